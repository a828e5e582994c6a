/* test_ahead.c - sessions write the same text on an asynchronous backend as on a synchronous one; several sessions that
 * decode together write the same text as each alone.
 *
 * The backend is the CPU's with fences: data that is copied out of it arrives at wait(), or at wait_for() of a fence
 * after the copy, not earlier. So sessions issue steps before the host knows their tokens, and discard some. Text,
 * thoughts, counters, the hash of the last logits, the session's tokens and a second turn must be as on the plain
 * backend: with stop strings, a grammar, -n, the end of the turn, thinking budgets, a full context, penalties and
 * Ctrl-C. The CUDA backend is compared with itself without fences.
 *
 * Run from the top of the repository, where the model is. */
#define TESTING
#include "../gemma4.c"
#include "card.h"
#include "test.h"
#include "files.h"

#define MINI "models/gemma4-mini-q8_0.gguf"

// ---- a backend with fences ----

enum { MAX_LATE = 64 };
static struct {
    const Ops *base;
    Ops  ops;
    // copies that have not arrived; large ones are waited for
    struct { void *dst; uint8_t bytes[64]; size_t n; int fence; } late[MAX_LATE];
    int  n_late, n_fences;
    int  n_ahead, n_samples;  // steps whose token was on the device; sample operations
    int  interrupt_at;        // the sample operation at which Ctrl-C is pressed; 0: none
    int  cancel_at;           // the attend() at which the session is cancelled; 0: none
    Session *cancelled;
} fake;

static void arrive(int before) {                       // copies before a fence arrive
    int kept = 0;
    for (int i = 0; i < fake.n_late; i++) {
        if (fake.late[i].fence < before) memcpy(fake.late[i].dst, fake.late[i].bytes, fake.late[i].n);
        else fake.late[kept++] = fake.late[i];
    }
    fake.n_late = kept;
}

static void late_copy(const Copy *c) {
    const bool late = c->kind == COPY_OUT && c->bytes <= 64 && fake.n_late < MAX_LATE;
    if (!late) {
        memcpy(c->dst, c->src, c->bytes);
        return;
    }
    fake.late[fake.n_late].dst = c->dst;
    fake.late[fake.n_late].n = c->bytes;
    fake.late[fake.n_late].fence = fake.n_fences;
    memcpy(fake.late[fake.n_late++].bytes, c->src, c->bytes);
    memset(c->dst, 0xfe, c->bytes);                    // so that reading it too early is noticed
}

static int late_fence(void) { return ++fake.n_fences; }
static void late_wait_for(int fence) { arrive(fence); }
static void late_wait(void) { arrive(INT_MAX); }

static bool count_begin(StepKey key) {
    fake.n_ahead += key.kind == STEP_DECODE && key.variant == TOKENS_ON_DEVICE;
    return fake.base->begin(key);
}

static void count_sample(const Sample *o) {
    fake.base->sample(o);
    if (++fake.n_samples == fake.interrupt_at) on_interrupt(SIGINT);
}

static void count_attend(const Attend *o) {
    fake.base->attend(o);
    if (fake.cancel_at && !--fake.cancel_at) session_cancel(fake.cancelled);
}

// A backend with or without fences. A backend that has fences keeps or loses them.
static const Ops *backend(const Ops *base, bool fences) {
    fake.base = base;
    fake.ops = *base;
    fake.ops.begin = count_begin;
    fake.ops.sample = count_sample;
    fake.ops.attend = count_attend;
    if (!fences) fake.ops.fence = NULL;
    if (!fences || base->fence) return &fake.ops;
    fake.ops.copy = late_copy;
    fake.ops.wait = late_wait;
    fake.ops.fence = late_fence;
    fake.ops.wait_for = late_wait_for;
    return &fake.ops;
}

// ---- a conversation of two turns ------

typedef struct {
    const char *name, *text, *second;                  // the user's messages; second NULL: one turn
    int   n_ctx, n, budget, interrupt_at;
    bool  think, ignore_eos, shift;
    const char *stop;
    float temperature, presence;
    const char *why;                                   // how the first turn ends
    const char *grammar;                               // of both answers; NULL: none
} Case;

typedef struct {
    char    *out, *err;
    Turn     turn[2];
    int32_t  held[4096];
    int      n_held, len, n_ahead;
} Result;

static Result talk(const Case *k, const Ops *base, bool fences) {
    Result r = { 0 };
    const ModelOptions o = { .n_ctx = k->n_ctx, .n_seqs = 1, .n_batch = 512, .n_logits = 1, .k_type = KV_F16,
                             .v_type = KV_F16, .penalties = k->presence != 0 };
    Model *m = alloc_or_die(1, sizeof *m);
    Tokenizer tok;
    GrammarVocab vocab = { .t = NULL };
    Grammar form;
    const TextList stops = { .text = (const char *[]){ k->stop }, .n = k->stop != NULL };
    load_model(m, MINI, backend(base, fences), o, NULL);
    load_tokenizer(&tok, &m->gguf, m->config.vocab);
    Chat c = { .think = k->think, .chatting = true, .show = { .thoughts = true, .newline = true } };
    c.s = session_open(m, &tok, 0);
    c.options = (AnswerOptions){ .n_predict = k->n, .ignore_eos = k->ignore_eos, .stops = stops,
                                 .think_budget = k->budget, .shift = k->shift };
    c.options.sampling = (SampleParams){ .seed = 7, .temperature = k->temperature, .top_k = 64, .top_p = 0.95f,
                                         .repeat = 1, .presence = k->presence };
    if (k->grammar) {
        if (!grammar_vocab_init(&vocab, &tok)) abort();
        CHECK(grammar_from_gbnf(&form, &vocab, (TokStr){ k->grammar, strlen(k->grammar) }), "%s", form.err);
        c.options.grammar = &form;
    }
    fake.n_ahead = fake.n_samples = 0;
    fake.interrupt_at = k->interrupt_at;
    interrupted = 0;
    fflush(stdout);
    fflush(stderr);
    int saved[2];
    for (int i = 0; i < 2; i++) {
        const int fd = open(in_tmp(i ? "err" : "out"), O_WRONLY | O_CREAT | O_TRUNC, 0600);
        saved[i] = dup(i + 1);
        if (fd < 0 || saved[i] < 0 || dup2(fd, i + 1) < 0) abort();
        close(fd);
    }
    for (int i = 0; i < 2 && (i ? k->second : k->text); i++) {
        const char *text = i ? k->second : k->text;
        if (tok_add_message(&c.messages, "user", (TokStr){ text, strlen(text) }) < 0) die("out of memory");
        if (!answer(&c)) printf("no answer: %s\n", c.err);
        r.turn[i] = c.s->turn;
        fake.interrupt_at = interrupted = 0;
    }
    fflush(stdout);
    fflush(stderr);
    for (int i = 0; i < 2; i++) {
        dup2(saved[i], i + 1);
        close(saved[i]);
    }
    r.out = text_of(in_tmp("out"));
    r.err = text_of(in_tmp("err"));
    r.n_held = (int)c.s->held.n;
    memcpy(r.held, c.s->held.ids, (size_t)r.n_held * sizeof *r.held);
    r.len = m->len[0];
    r.n_ahead = fake.n_ahead;
    if (k->grammar) grammar_free(&form);
    grammar_vocab_free(&vocab);
    chat_free(&c);
    tok_free(&tok);
    free_model(m);
    free(m);
    return r;
}

#define FORM "root ::= ([a-f] [0-9] \", \"){4,6} \"end\""

static const Case cases[] = {
    { "end of turn", "Tell me a story about a fox.", "And one about a cow.", 2048, 200, -1, 0, false, false, false,
      NULL, 0, 0, NULL, NULL },
    { "-n", "Tell me a story about a fox.", "Go on.", 2048, 17, -1, 0, false, false, false, NULL, 0, 0, "-n reached",
      NULL },
    { "-n 1", "Tell me a story about a fox.", "Go on.", 2048, 1, -1, 0, false, false, false, NULL, 0, 0, "-n reached",
      NULL },
    { "-n 2", "Tell me a story about a fox.", "Go on.", 2048, 2, -1, 0, false, false, false, NULL, 0, 0, "-n reached",
      NULL },
    { "-n 0", "Tell me a story about a fox.", "Go on.", 2048, 0, -1, 0, false, false, false, NULL, 0, 0, "-n reached",
      NULL },
    { "stop string", "Tell me a story about a fox.", "Go on.", 2048, 80, -1, 0, false, false, false, "wa", 0, 0,
      "stop string", NULL },
    { "sampled, penalties", "Tell me a story about a fox.", "Go on.", 2048, 60, -1, 0, false, false, false, NULL, 1,
      0.5f, NULL, NULL },
    { "stop string, penalties", "Tell me a story about a fox.", "Go on.", 2048, 60, -1, 0, false, false, false, "wa", 1,
      0.5f,
      "stop string", NULL },
    { "thought, budget", "What is 22 minus 2?", "And 22 minus 3?", 2048, 80, 2, 0, true, false, false, NULL, 0, 0, NULL,
      NULL },
    { "thought, budget meets -n", "What is 22 minus 2?", "And 22 minus 3?", 2048, 6, 2, 0, true, false, false, NULL, 0,
      0, NULL, NULL },
    { "context full", "Tell me a story about a fox.", NULL, 64, -1, -1, 0, false, true, false, NULL, 0, 0,
      "context full", NULL },
    { "context shifts", "Tell me a story about a fox.", NULL, 64, 120, -1, 0, false, true, true, NULL, 0, 0,
      "-n reached", NULL },
    { "a form", "Tell me a story about a fox.", "Go on.", 2048, 60, -1, 0, false, false, false, NULL, 0, 0,
      "end of turn", FORM },
    { "a grammar, sampled", "Tell me a story about a fox.", "Go on.", 2048, 60, -1, 0, false, false, false, NULL, 1, 0,
      "end of turn", FORM },
    { "a grammar, cut", "Tell me a story about a fox.", NULL, 2048, 11, -1, 0, false, false, false, NULL, 1, 0,
      "-n reached", FORM },
    { "Ctrl-C", "Tell me a story about a fox.", "Go on.", 2048, 60, -1, 12, false, false, false, NULL, 0, 0,
      "interrupted", NULL },
    { "Ctrl-C at once", "Tell me a story about a fox.", "Go on.", 2048, 20, -1, 1, false, false, false, NULL, 0, 0,
      "interrupted", NULL },
};

// The cases for the CUDA backend. Replayed steps do not call sample(), so Ctrl-C is not tested.
static const Case few[] = {
    { "-n, penalties", "Hi", "Go on.", 256, 9, -1, 0, false, true, false, NULL, 1, 0.5f, "-n reached", NULL },
    { "stop string", "Tell me a story about a fox.", NULL, 256, 24, -1, 0, false, false, false, " ", 0, 0,
      "stop string", NULL },
    { "a form", "Hi", NULL, 256, 12, -1, 0, false, false, false, NULL, 1, 0, NULL, FORM },
};

static void compare(const Ops *base, const Case *k) {
    Result want = talk(k, base, false), got = talk(k, base, true);
    const int steps = want.turn[0].steps + want.turn[1].steps;
    const char *name = k->name;
    CHECK(!k->why || !strcmp(want.turn[0].why, k->why), "%s: the case ends by '%s'", name, want.turn[0].why);
    CHECK(!strcmp(got.out, want.out), "%s: got the text '%s', want '%s'", name, got.out, want.out);
    CHECK(!strcmp(got.err, want.err), "%s: got '%s' on stderr, want '%s'", name, got.err, want.err);
    for (int t = 0; t < 2 && (!t || k->second); t++) {
        const Turn *a = &got.turn[t], *b = &want.turn[t];
        CHECK(a->made == b->made && a->steps == b->steps && a->n_run == b->n_run && a->shifts == b->shifts &&
              !strcmp(a->why, b->why),
              "%s, turn %d: got %d tokens, %d steps, %d run, '%s'; want %d, %d, %d, '%s'", name, t, a->made, a->steps,
              a->n_run, a->why, b->made, b->steps, b->n_run, b->why);
        CHECK(a->hash == b->hash, "%s, turn %d: other last logits", name, t);
        const int thought = k->budget < 0 || t ? b->thought_tokens : k->budget;        // a budget ends the first thought
        CHECK(a->thought_tokens == thought, "%s, turn %d: %d tokens of thought, want %d", name, t, a->thought_tokens,
              thought);
    }
    CHECK(got.len == want.len && got.n_held == want.n_held &&
          !memcmp(got.held, want.held, (size_t)got.n_held * sizeof *got.held),
          "%s: the session has %d tokens, %d of them in the cache; want %d and %d, or the ids differ", name, got.n_held,
          got.len, want.n_held, want.len);
    CHECK(!want.n_ahead, "%s: a backend without fences issued steps ahead", name);
    CHECK(steps < 8 || got.n_ahead >= steps - 8 - 2 * want.turn[0].shifts, "%s: %d of %d steps were issued ahead", name,
          got.n_ahead, steps);
    printf("# %s, %s: %d steps, %d ahead; %s\n", base->name, name, steps, got.n_ahead, want.turn[0].why);
    free(got.out);
    free(got.err);
    free(want.out);
    free(want.err);
}

// ---- several sessions at once ----

enum { N_TALKS = 4, TALK_TOKENS = 40, CANCELLED_ONE = 3, CANCEL_AT = 10, LATE = 2, LATE_ROUND = 5 };

typedef struct {
    int32_t   ids[TALK_TOKENS + 8];
    int       n;
    char      text[4096];
    size_t    n_text;
    EndReason end;
    uint64_t  hash;
} Said;

static void note(Said *said, const Event *e) {
    for (int i = 0; i < e->n_ids; i++) said->ids[said->n++] = e->ids[i];
    if (e->content.n) memcpy(said->text + said->n_text, e->content.s, e->content.n);
    said->n_text += e->content.n;
    if (e->kind == EVENT_END) said->end = e->end;
}

// Answers of sessions that run one after the other or together. One starts later, one is cancelled, one or two have a
// prompt that is longer than a decode step. work: of such a prompt before the others run. Returns how often a prompt
// paused between layers.
static int talk_all(Model *m, Tokenizer *tok, bool together, double work, Said *said) {
    const char *const texts[N_TALKS] = { "Tell me a story about a fox.", "What is 22 minus 2?",
                                         m->options.interleave ? "" : "Tell me a story about a cow.", "" };
    int pauses = 0;
    Session sessions[N_TALKS], *live[N_TALKS];
    Event events[N_TALKS];
    TokIds ids[N_TALKS] = { 0 };
    bool ended[N_TALKS] = { false };
    float *logits = alloc_or_die(m->config.vocab, sizeof *logits);
    memset(said, 0, N_TALKS * sizeof *said);
    for (int i = 0; i < N_TALKS; i++) {
        init_session(&sessions[i], m, tok, i);
        sessions[i].work = work;
        TokText messages = { 0 };
        char text[1024] = "";
        for (int k = 0; !*texts[i] && k < 20; k++)
            strcat(text, i == LATE ? "The cow was in the house. " : "The fox went to the river. ");
        const char *said_by_user = *texts[i] ? texts[i] : text;
        if (tok_add_message(&messages, "user", (TokStr){ said_by_user, strlen(said_by_user) }) < 0) abort();
        const TokChat chat = { .messages = { messages.s, messages.n }, .add_cue = true };
        if (tok_chat(tok, &chat, &ids[i], NULL) < 0) abort();
        tok_text_free(&messages);
    }
    CHECK(ids[N_TALKS - 1].n > STEP_ROWS, "the long prompt has %zu tokens", ids[N_TALKS - 1].n);
    const bool first_alone = !together;
    for (int only = first_alone ? 0 : -1; only < (first_alone ? N_TALKS : 0); only++) {
        for (int round = 0, n_live = 1; n_live; round++) {
            n_live = 0;
            for (int i = 0; i < N_TALKS; i++) {
                if (only >= 0 && i != only) continue;
                if (only < 0 && i == LATE && round < LATE_ROUND) continue;
                if (round == (only < 0 && i == LATE ? LATE_ROUND : 0)) {
                    const AnswerOptions o = { .n_predict = TALK_TOKENS, .ignore_eos = i == 0, .think_budget = -1,
                        .sampling = { .seed = 3 + (uint64_t)i, .temperature = i % 2 ? 1 : 0, .top_k = 40,
                                      .top_p = 0.95f, .repeat = 1 } };
                    CHECK(session_start(&sessions[i], &(Prompt){ .ids = ids[i].ids, .n = (int)ids[i].n }, &o), "%s",
                          sessions[i].err);
                }
                if (i == CANCELLED_ONE && said[i].n == CANCEL_AT) session_cancel(&sessions[i]);
                if (!ended[i]) live[n_live++] = &sessions[i];
            }
            if (n_live) sessions_next(live, n_live, events);
            pauses += m->paused_seq >= 0;
            for (int k = 0; k < n_live; k++) {
                const int i = live[k]->seq;
                note(&said[i], &events[k]);
                ended[i] = events[k].kind == EVENT_END;
                if (!ended[i]) continue;
                CHECK(session_logits(live[k], logits), "session %d has no logits", i);
                said[i].hash = hash_bytes(logits, (size_t)m->config.vocab * sizeof *logits);
            }
        }
    }
    CHECK(!session_start(&sessions[0], &(Prompt){ .ids = ids[0].ids, .n = m->options.n_ctx + 1 },
                         &(AnswerOptions){ 0 }) && *sessions[0].err,
          "a prompt longer than the context is begun");
    for (int i = 0; i < N_TALKS; i++) {
        CHECK((int)sessions[i].held.n == m->len[i], "session %d holds %zu tokens, its cache %d", i, sessions[i].held.n,
              m->len[i]);
        free_session(&sessions[i]);
        tok_ids_free(&ids[i]);
    }
    free(logits);
    return pauses;
}

// interleave: decode steps of some sessions run between two layers of others' prompts.
static void compare_together(const Ops *base, bool fences, bool interleave) {
    static Said alone[N_TALKS], together[N_TALKS];
    const ModelOptions o = { .n_ctx = 256, .n_seqs = N_TALKS, .n_batch = 128, .n_logits = 1, .k_type = KV_F16,
                             .v_type = KV_F16, .interleave = interleave };
    Model *m = alloc_or_die(1, sizeof *m);
    Tokenizer tok;
    fake.interrupt_at = 0;
    load_model(m, MINI, backend(base, fences), o, NULL);
    load_tokenizer(&tok, &m->gguf, m->config.vocab);
    talk_all(m, &tok, false, INFINITY, alone);
    const int64_t steps = m->steps;
    fake.n_ahead = 0;
    const int pauses = talk_all(m, &tok, true, interleave ? 1 : INFINITY, together);
    const int64_t shared = m->steps - steps;
    CHECK(interleave ? pauses >= 2 * (m->config.n_layers - 1) : !pauses, "prompts stopped %d times between layers",
          pauses);
    for (int i = 0; i < N_TALKS; i++) {
        const Said *a = &alone[i], *b = &together[i];
        CHECK(a->n == b->n && !memcmp(a->ids, b->ids, (size_t)a->n * sizeof *a->ids),
              "session %d: other tokens than alone", i);
        CHECK(a->n_text == b->n_text && !memcmp(a->text, b->text, a->n_text), "session %d: other text than alone",
              i);
        CHECK(a->end == b->end && (i != CANCELLED_ONE || a->end == END_CANCELLED),
              "session %d: end reason %d alone, %d with others", i, a->end, b->end);
        CHECK(a->hash == b->hash, "session %d: other last logits than alone", i);
        CHECK(a->n > 3, "session %d says %d tokens", i, a->n);
    }
    CHECK(shared < steps * (interleave ? 4 : 3) / 4, "sessions took %d steps together, %d alone", (int)shared,
          (int)steps);
    CHECK(!fences || fake.n_ahead > 10, "%d steps were issued ahead", fake.n_ahead);
    printf("# %s%s: %d sessions: %d steps alone, %d together, %d of them ahead, %d between layers\n", base->name,
           fences ? " with fences" : "", N_TALKS, (int)steps, (int)shared, fake.n_ahead, pauses);
    tok_free(&tok);
    free_model(m);
    free(m);
}

// A session that is cancelled inside a chunk of its prompt reports it before the chunk ends, and then answers the same
// prompt as if it had not been cancelled.
static void cancel_prompt(const Ops *base, bool fences) {
    static Said said[2];
    enum { N_PROMPT = 700, N_BATCH = 600 };
    const ModelOptions o = { .n_ctx = 1024, .n_seqs = 1, .n_batch = N_BATCH, .n_logits = 1, .k_type = KV_F16,
                             .v_type = KV_F16 };
    Model *m = alloc_or_die(1, sizeof *m);
    Tokenizer tok;
    int32_t ids[N_PROMPT];
    load_model(m, MINI, backend(base, fences), o, NULL);
    load_tokenizer(&tok, &m->gguf, m->config.vocab);
    for (int i = 0; i < N_PROMPT; i++) ids[i] = i ? 300 + i * 37 % 3000 : tok.bos;
    memset(said, 0, sizeof said);
    for (int again = 0; again < 2; again++) {
        Session s;
        Event e = { .kind = EVENT_PROMPT };
        const AnswerOptions answer = { .n_predict = 12, .ignore_eos = true, .think_budget = -1, .sampling.repeat = 1 };
        init_session(&s, m, &tok, 0);
        // chunk 2, then 1
        for (int layers = again ? m->config.n_layers + 2 : 0; layers > 0; layers -= m->config.n_layers) {
            fake.cancelled = &s;
            fake.cancel_at = layers;
            CHECK(session_start(&s, &(Prompt){ .ids = ids, .n = N_PROMPT }, &answer), "%s", s.err);
            int n_chunks = 0;
            for (e.kind = EVENT_PROMPT; e.kind == EVENT_PROMPT; n_chunks++) session_next(&s, &e);
            CHECK(e.kind == EVENT_END && e.end == END_CANCELLED && n_chunks == 1 + (layers > m->config.n_layers),
                  "cancelled at layer %d: %d chunks, event %d", layers, n_chunks, e.kind);
            CHECK(!fake.cancel_at && (int)s.held.n == m->len[0], "%d tokens held, %d in the cache", (int)s.held.n,
                  m->len[0]);
        }
        CHECK(session_start(&s, &(Prompt){ .ids = ids, .n = N_PROMPT }, &answer), "%s", s.err);
        for (e.kind = EVENT_PROMPT; e.kind != EVENT_END; note(&said[again], &e)) session_next(&s, &e);
        free_session(&s);
    }
    CHECK(said[0].n == 12 && said[1].n == 12 && !memcmp(said[0].ids, said[1].ids, sizeof said[0].ids),
          "other tokens after a cancelled prompt");
    tok_free(&tok);
    free_model(m);
    free(m);
}

// The same between two layers of its prompt: then another session's waiting prompt runs, and the session's own prompt
// again.
static void cancel_between(const Ops *base, bool fences) {
    static Said said[2][2];
    enum { N_PROMPT = 100 };
    const ModelOptions o = { .n_ctx = 256, .n_seqs = 2, .n_batch = 128, .n_logits = 1, .k_type = KV_F16,
                             .v_type = KV_F16, .interleave = true };
    const AnswerOptions answer = { .n_predict = 12, .ignore_eos = true, .think_budget = -1, .sampling.repeat = 1 };
    Model *m = alloc_or_die(1, sizeof *m);
    Tokenizer tok;
    int32_t ids[2][N_PROMPT];
    load_model(m, MINI, backend(base, fences), o, NULL);
    load_tokenizer(&tok, &m->gguf, m->config.vocab);
    for (int i = 0; i < 2 * N_PROMPT; i++)
        ids[i / N_PROMPT][i % N_PROMPT] = i % N_PROMPT ? 300 + i * 37 % 3000 : tok.bos;
    memset(said, 0, sizeof said);
    for (int again = 0; again < 2; again++) {
        Session s[2], *both[2] = { &s[0], &s[1] };
        Event e[2];
        for (int i = 0; i < 2; i++) {
            init_session(&s[i], m, &tok, i);
            CHECK(session_start(&s[i], &(Prompt){ .ids = ids[i], .n = N_PROMPT }, &answer), "%s", s[i].err);
        }
        if (again) {
            s[0].work = s[1].work = 1;
            for (int k = 0; k < 3; k++) sessions_next(both, 2, e);
            CHECK(m->paused_seq == 0 && e[0].kind == EVENT_PROMPT && e[1].kind == EVENT_PROMPT && !s[1].at,
                  "session %d is between layers", m->paused_seq);
            session_cancel(&s[0]);
            session_next(&s[0], &e[0]);
            CHECK(e[0].kind == EVENT_END && e[0].end == END_CANCELLED && m->paused_seq < 0,
                  "event %d, session %d is between layers", e[0].kind, m->paused_seq);
            sessions_next(both + 1, 1, e + 1);
            CHECK(m->paused_seq == 1, "session %d is between layers", m->paused_seq);
            CHECK(session_start(&s[0], &(Prompt){ .ids = ids[0], .n = N_PROMPT }, &answer), "%s", s[0].err);
        }
        for (int i = 0; i < 2; i++) e[i].kind = EVENT_PROMPT;
        while (e[0].kind != EVENT_END || e[1].kind != EVENT_END) {
            sessions_next(both, 2, e);
            for (int i = 0; i < 2; i++) note(&said[again][i], &e[i]);
        }
        for (int i = 0; i < 2; i++) free_session(&s[i]);
    }
    for (int i = 0; i < 2; i++)
        CHECK(said[0][i].n == 12 && said[1][i].n == 12 &&
              !memcmp(said[0][i].ids, said[1][i].ids, sizeof said[0][i].ids),
              "session %d: other tokens after a prompt was cancelled between two layers", i);
    tok_free(&tok);
    free_model(m);
    free(m);
}

// Step times are measured for each draft depth, without a drafter too, and this does not change the session.
static void measure(const Ops *base) {
    const ModelOptions o = { .n_ctx = 256, .n_seqs = 2, .n_batch = 64, .n_logits = 17, .k_type = KV_F16,
                             .v_type = KV_F16 };
    const AnswerOptions answer = { .n_predict = 12, .ignore_eos = true, .think_budget = -1, .sampling.repeat = 1 };
    Model *m = alloc_or_die(1, sizeof *m);
    Tokenizer tok;
    Said said[2] = { 0 };
    load_model(m, MINI, backend(base, true), o, NULL);
    load_tokenizer(&tok, &m->gguf, m->config.vocab);
    for (int i = 0; i < 2; i++) {
        Session s;
        Event e = { .kind = EVENT_PROMPT };
        if (i) measure_pace(m, &tok, &(Drafting){ .kind = SPEC_AUTO, .n_max = 16 });
        CHECK(!m->len[0], "%d tokens are left in the session", m->len[0]);
        init_session(&s, m, &tok, 0);
        CHECK(session_start(&s, &(Prompt){ .ids = &(int32_t){ tok.bos }, .n = 1 }, &answer), "%s", s.err);
        for (; e.kind != EVENT_END; note(&said[i], &e)) session_next(&s, &e);
        free_session(&s);
    }
    for (int n = 0; n <= 16; n = next_depth(n, 16))
        CHECK(m->pace->step.n_measured[n + 1] >= 2 && m->pace->step.seconds[n + 1] > 0, "%d drafts: measured %d times",
              n, m->pace->step.n_measured[n + 1]);
    CHECK(said[0].n == 12 && said[1].n == 12 && !memcmp(said[0].ids, said[1].ids, sizeof said[0].ids),
          "other tokens once steps were measured");
    tok_free(&tok);
    free_model(m);
    free(m);
}

int main(int argc, char **argv) {                      // -cuda: only the CUDA backend
    take_card(&argc, argv);
    const bool all = argc < 2 || strcmp(argv[1], "-cuda");
    make_tmp();
    start_threads(1);
    for (size_t i = 0; all && i < sizeof cases / sizeof *cases; i++) compare(cpu_ops(), &cases[i]);
    if (all) measure(cpu_ops());
    for (int fences = 0; all && fences < 2; fences++) {
        compare_together(cpu_ops(), fences, false);
        compare_together(cpu_ops(), fences, true);
        cancel_prompt(cpu_ops(), fences);
        cancel_between(cpu_ops(), fences);
    }
#ifdef USE_CUDA
    for (size_t i = 0; cuda_ops() && i < sizeof few / sizeof *few; i++) compare(cuda_ops(), &few[i]);
    if (cuda_ops()) measure(cuda_ops());
    if (cuda_ops()) compare_together(cuda_ops(), true, true);
    if (!cuda_ops()) SKIP("no GPU: steps ahead on the CUDA backend");
#else
    (void)few;
    SKIP("built without CUDA: steps ahead on the CUDA backend");
#endif
    return test_done("ahead");
}
