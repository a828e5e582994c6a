/* test_verify.c - text with guesses is the text without: the same ids, reasons, tokens held and second answers, greedy
 * and drawn, whoever guesses and however well.
 *
 *   test_verify           on the CPU, and on the GPU where there is one
 *   test_verify -few      on the GPU, one model and few ids: for the emulated one
 *
 * The guesses are those of a drafter, as chains and as trees, prompt lookup's (--spec ngram) and those of a table
 * (ngram-mod), which is first empty, then knows the
 * text from an earlier answer, so that long guesses are right, then has a part of its entries replaced by ids at random,
 * among them those that end a text. Stop strings, -n, a full context with and without a shift, Ctrl-C and several sessions
 * in one step come in between. LONG=1: 200 prompts with 256 ids each. Run from the top of the repository: the models lie
 * there. */
#define TESTING
#include "../gemma4.c"
#include "test.h"

enum { MOST_IDS = 1024, N_KINDS = 4, N_GUESSERS = 10, FIRST_DRAFTER = 6 };    // guessers from this one on need a drafter

typedef struct {
    const char *name;
    float temperature, repeat, presence;
} Choosing;
static const Choosing choosing[] = { { "greedy", 0, 1, 0 }, { "drawn", 1, 1, 0 }, { "drawn, with penalties", 0.8f, 1.1f, 0.3f } };

typedef enum { TO_THE_END, BY_STOP_STRING, IN_FULL_CONTEXT, SHIFTING, CANCELLED, N_ENDS } Ends;
static const char *const ends[] = { "to its end", "stop string", "full context", "shifted", "cancelled" };

typedef struct {
    int32_t ids[MOST_IDS];
    int     n, len, shifts;
    const char *why;
    uint64_t held;            // hash of the tokens that the session holds
    DraftCount drafts;
} Answer;

static bool on_gpu;

static const Ops *gpu_ops(void) {                      // NULL: none
#ifdef USE_CUDA
    return cuda_ops();
#else
    return NULL;
#endif
}

static Model *open_model(const char *path, const char *drafter, int n_ctx) {        // drafter NULL: none
    Model *m = alloc_or_die(1, sizeof *m);
    const PlanOptions o = { .drafter = drafter, .draft_width = DRAFT_WIDTH, .n_ctx = n_ctx, .n_seqs = 3, .n_batch = 256, .n_logits = STEP_ROWS, .k_type = KV_F16,
                            .v_type = KV_F16, .penalties = true };
    load_model(m, path, on_gpu ? gpu_ops() : cpu_ops(), o, NULL);
    return m;
}

// A prompt as the chat writes it, and texts that go on: stories, lists that repeat, an edit, which repeats a text.
static void set_prompt_text(int i, char *text, size_t room) {
    static const char *const who[] = { "fox", "robot", "king", "cat", "baker", "sailor", "dragon", "teacher", "farmer",
                                       "mouse" };
    static const char *const where[] = { "in the forest", "by the sea", "on a hill", "in a castle", "at night" };
    const char *name = who[i % 10], *place = where[i / 10 % 5];
    switch (i % N_KINDS) {
    case 0:
        snprintf(text, room, "<|turn>user\nTell me a story about a %s %s.<turn|>\n<|turn>model\n", name, place);
        return;
    case 1: snprintf(text, room, "One %s, two %ss, one %s, two %ss, one %s, two", name, name, name, name, name); return;
    case 2:
        snprintf(text, room, "<|turn>user\nRepeat this:\nOnce upon a time, a %s named Jasper lived %s. Jasper was always "
                 "curious. One bright spring day, Jasper picked a full basket of carrots.<turn|>\n<|turn>model\n", name, place);
        return;
    default: snprintf(text, room, "Once upon a time there was a small %s who lived %s. %d", name, place, i); return;
    }
}

static AnswerOptions options_of(const Choosing *c, int n, Ends end, Drafting drafting, int seed) {
    static const char *stop[] = { "the" };
    AnswerOptions o = { .n_predict = n, .think_budget = -1, .shift = end == SHIFTING, .drafting = drafting,
                        .ignore_eos = end == IN_FULL_CONTEXT || end == SHIFTING };
    if (end == BY_STOP_STRING) o.stops = (TextList){ .text = stop, .n = 1 };
    o.sampling = (SampleParams){ .seed = (uint64_t)seed, .temperature = c->temperature, .top_k = 64, .top_p = 0.95f,
                                 .repeat = c->repeat, .presence = c->presence };
    return o;
}

static void begin(Session *s, int i, const AnswerOptions *o) {
    char text[512];
    TokIds ids = { 0 };
    set_prompt_text(i, text, sizeof text);
    push_id(s, &ids, s->t->bos);
    if (tok_encode(s->t, text, strlen(text), TOK_SPECIAL, &ids) < 0) die("%s", s->t->err);
    if (!session_start(s, &(Prompt){ .ids = ids.ids, .n = (int)ids.n, .n_head = 4 }, o)) die("%s", s->err);
    tok_ids_free(&ids);
}

static bool took(Session *s, const Event *e, Answer *a) {              // false: it was the end
    for (int k = 0; e->kind == EVENT_TOKEN && k < e->n_ids && a->n < MOST_IDS; k++) a->ids[a->n++] = e->ids[k];
    if (e->kind != EVENT_END) return true;
    a->why = s->turn.why, a->shifts = s->turn.shifts, a->drafts = s->turn.drafts;
    a->len = s->m->len[s->seq];
    a->held = hash_bytes(s->held.ids, s->held.n * sizeof *s->held.ids);
    return false;
}

static Answer tell(Session *s, int i, const AnswerOptions *o, int cancel_after) {
    Answer a = { 0 };
    Event e;
    begin(s, i, o);
    do {
        if (cancel_after && a.n >= cancel_after) session_cancel(s);
        session_next(s, &e);
    } while (took(s, &e, &a));
    return a;
}

static void compare(const Answer *got, const Answer *want, const char *what, const char *how, const char *who, int i) {
    int same = 0;
    while (same < got->n && same < want->n && got->ids[same] == want->ids[same]) same++;
    char where[160];
    snprintf(where, sizeof where, "%s, %s, prompt %d: %s", what, how, i, who);
    CHECK(same == got->n && same == want->n, "%s: %d ids, %d without guesses, the first %d the same", where, got->n, want->n,
          same);
    CHECK(got->why == want->why, "%s: ends with %s, without guesses %s", where, got->why, want->why);
    CHECK(got->held == want->held && got->len == want->len && got->shifts == want->shifts,
          "%s: the session holds %d tokens, without guesses %d", where, got->len, want->len);
}

static void spoil_table(Model *m) {                    // one in five of the entries is another
    uint32_t r = 1;
    for (size_t i = 0; i < (size_t)1 << NGRAM_MOD_BITS; i++) {
        r = r * 1664525 + 1013904223;
        int32_t *next = &ngram_mod.next[i];
        if (*next && (r >> 16 & 3) == 3) *next = (int32_t)(r >> 8) % m->config.vocab + 1;
        else if (*next && (r >> 18 & 15) == 0) *next = 106 + 1;        // <turn|>
    }
}
static void forget_table(void) {
    if (ngram_mod.next) memset(ngram_mod.next, 0, ((size_t)1 << NGRAM_MOD_BITS) * sizeof *ngram_mod.next);
}

// One prompt: without guesses, then with each kind of them in a session of its own; what the last one holds is gone on
// with. Counts go to sum (N_GUESSERS).
static void one_prompt(Session *plain, Session *s, const char *name, const Choosing *c, int i, int n, Ends end,
                       DraftCount *sum) {
    static const struct { const char *who; Drafting drafting; bool forget, spoil; } guess[N_GUESSERS] = {
        { "ngram", { .kind = SPEC_NGRAM, .most = 8 }, false, false },
        { "ngram, as many as fit", { .kind = SPEC_NGRAM, .most = DRAFT_MAX }, false, false },
        { "an empty table", { .kind = SPEC_NGRAM_MOD, .most = 4 }, true, false },
        { "a table that knows", { .kind = SPEC_NGRAM_MOD, .most = DRAFT_MAX }, false, false },
        { "a spoilt table", { .kind = SPEC_NGRAM_MOD, .most = 16 }, false, true },
        { "auto", { .kind = SPEC_AUTO, .most = 16 }, false, false },
        { "a drafter", { .kind = SPEC_MTP, .most = 5 }, false, false },
        { "a drafter that stops early", { .kind = SPEC_MTP, .most = 8, .least = 0.9f }, false, false },
        { "a tree", { .kind = SPEC_MTP, .most = 4, .tree = 14 }, false, false },
        { "auto, a tree", { .kind = SPEC_AUTO, .most = 16, .tree = 20 }, false, false },
    };
    char what[64];
    snprintf(what, sizeof what, "%s, %s", name, ends[end]);
    const int cancel_after = end == CANCELLED ? n / 2 + 1 : 0;
    AnswerOptions o = options_of(c, n, end, (Drafting){ .kind = SPEC_OFF }, i);
    const Answer want = tell(plain, i, &o, cancel_after);
    for (int g = 0; g < N_GUESSERS; g++) {
        if (g >= FIRST_DRAFTER && s->m->drafter.kind == DRAFTER_NONE) break;
        if (g < FIRST_DRAFTER && s->m->drafter.kind == DRAFTER_DFLASH) continue;       // the other pair has tried these
        if (guess[g].forget) forget_table();
        if (guess[g].spoil && ngram_mod.next) spoil_table(s->m);
        o.drafting = guess[g].drafting;
        if (o.drafting.kind == SPEC_MTP) o.drafting.kind = drafter_of(s->m);          // whichever there is
        reset_session(s->m, s->seq);
        s->held.n = 0, s->n_marks = 0;
        const Answer got = tell(s, i, &o, cancel_after);
        if (end == CANCELLED) {                        // where it stops depends on how many tokens a step makes
            const int both = min_int(got.n, want.n);
            CHECK((both >= cancel_after || got.n == want.n) && !memcmp(got.ids, want.ids, (size_t)both * sizeof *got.ids),
                  "%s, %s, prompt %d: %s: %d ids differ", what, c->name, i, guess[g].who, both);
        } else {
            compare(&got, &want, what, c->name, guess[g].who, i);
        }
        sum[g].drafted += got.drafts.drafted, sum[g].accepted += got.drafts.accepted;
        // What the session holds serves the next answer as well as it would without guesses.
        o.n_predict = 6;
        const Answer more = tell(s, i + 4, &o, 0);
        o.drafting.kind = SPEC_OFF;
        const Answer more_plain = tell(s, i + 4, &o, 0);
        compare(&more, &more_plain, what, c->name, "a second answer", i);
        o.n_predict = n;
    }
}

// Three sessions, in steps of their own and then in common ones: what each says does not depend on the others' guesses.
static void in_company(Model *m, Session *s, const char *name, int n) {
    const SpecKind drafter = m->drafter.kind == DRAFTER_NONE ? SPEC_NGRAM : drafter_of(m);
    const Drafting company[3] = { { .kind = SPEC_NGRAM, .most = 12 }, { .kind = SPEC_NGRAM_MOD, .most = 12 }, { .kind = drafter, .most = 6 } };
    Answer alone[3], together[3] = { 0 };
    AnswerOptions o[3];
    bool runs[3] = { true, true, true };
    for (int k = 0; k < 3; k++) {
        o[k] = options_of(&choosing[k], n, TO_THE_END, company[k], 5 + k);
        o[k].drafting.kind = SPEC_OFF;
        alone[k] = tell(&s[k], k + 1, &o[k], 0);
        reset_session(m, k);
        s[k].held.n = 0;
        o[k].drafting = company[k];
    }
    for (int k = 0; k < 3; k++) begin(&s[k], k + 1, &o[k]);
    while (runs[0] || runs[1] || runs[2]) {
        Session *some[3];
        Event e[3];
        int who[3], n_some = 0;
        for (int k = 0; k < 3; k++)
            if (runs[k]) who[n_some] = k, some[n_some++] = &s[k];
        sessions_next(some, n_some, e);
        for (int k = 0; k < n_some; k++) runs[who[k]] = took(some[k], &e[k], &together[who[k]]);
    }
    for (int k = 0; k < 3; k++) compare(&together[k], &alone[k], name, choosing[k].name, "in company", k + 1);
}

static void one_model(const char *path, const char *drafter, bool whole) {
    const int n_prompts = whole ? 200 : 2, n = whole ? 256 : 32, n_kinds = whole ? N_KINDS : 2;
    const char *name = strrchr(path, '/') + 1;
    Model *m = open_model(path, drafter, 512), *tight = open_model(path, drafter, 80);
    Tokenizer tok;
    Session s[3], t[2];
    DraftCount sum[N_GUESSERS] = { { 0 } };
    load_tokenizer(&tok, &m->gguf, m->config.vocab);
    for (int k = 0; k < 3; k++) session_open(&s[k], m, &tok, k);
    for (int k = 0; k < 2; k++) session_open(&t[k], tight, &tok, k);
    for (int i = 0; i < n_prompts; i++)
        for (int c = whole ? 0 : i % 3; c < (whole ? 3 : i % 3 + 1); c++)
            one_prompt(&s[0], &s[1], name, &choosing[c], i, n, TO_THE_END, sum);
    for (Ends end = BY_STOP_STRING; end < N_ENDS; end++) {
        const bool full = end == IN_FULL_CONTEXT || end == SHIFTING;
        for (int i = 0; i < n_kinds; i++) {
            reset_session(m, 0), s[0].held.n = 0;
            reset_session(tight, 0), t[0].held.n = 0;
            one_prompt(full ? &t[0] : s, full ? &t[1] : &s[1], name, &choosing[i % 3], i, full ? 80 : 24, end, sum);
        }
    }
    // The guesses that this rests on were made, and right where they must be.
    for (int g = 0; g < (drafter ? N_GUESSERS : FIRST_DRAFTER); g++) {
        if (g < FIRST_DRAFTER && m->drafter.kind == DRAFTER_DFLASH) continue;
        CHECK(g <= 2 || g == 5 || sum[g].drafted > 0, "%s: guesser %d has guessed nothing", name, g);
        CHECK(g <= 2 || g == 5 || sum[g].accepted > 0, "%s: guesser %d was never right", name, g);
        CHECK(g != 3 || sum[g].accepted * 10 > sum[g].drafted * 7, "%s: the table that knows was right %d of %d times",
              name, sum[g].accepted, sum[g].drafted);
        CHECK(g < FIRST_DRAFTER || sum[g].accepted * 10 > sum[g].drafted * 3 || g >= FIRST_DRAFTER + 2,
              "%s: the drafter was right %d of %d times", name, sum[g].accepted, sum[g].drafted);
        CHECK(g != 4 || sum[g].accepted * 10 < sum[g].drafted * 9, "%s: the spoilt table was right %d of %d times", name,
              sum[g].accepted, sum[g].drafted);
    }
    in_company(m, s, name, n);
    for (int k = 0; k < 3; k++) session_close(&s[k]);
    for (int k = 0; k < 2; k++) session_close(&t[k]);
    tok_free(&tok);
    free_model(m), free_model(tight);
    free(m), free(tight);
}

// What takes the emulated GPU seconds: a prompt that the model repeats, without guesses and with those of its own text.
static void few_ids(const char *path) {
    Model *m = open_model(path, NULL, 256);
    Tokenizer tok;
    Session s[2];
    load_tokenizer(&tok, &m->gguf, m->config.vocab);
    for (int k = 0; k < 2; k++) session_open(&s[k], m, &tok, k);
    AnswerOptions o = options_of(&choosing[0], 20, TO_THE_END, (Drafting){ .kind = SPEC_OFF }, 1);
    const Answer want = tell(&s[0], 2, &o, 0);
    o.drafting = (Drafting){ .kind = SPEC_NGRAM, .most = 4 };
    const Answer got = tell(&s[1], 2, &o, 0);
    compare(&got, &want, path, choosing[0].name, "ngram", 2);
    CHECK(got.drafts.accepted > 0 && got.drafts.accepted < got.drafts.drafted,
          "%s: %d of %d guesses are right, expected some", path, got.drafts.accepted, got.drafts.drafted);
    for (int k = 0; k < 2; k++) session_close(&s[k]);
    tok_free(&tok);
    free_model(m);
    free(m);
}

// A text that repeats itself four times, in 96 ids at least, is said to loop; one that is cut short or has a slip does not.
static void test_loops(void) {
    static const int periods[] = { 1, 3, 24, 25, 64 };
    int32_t ids[400];
    for (size_t i = 0; i < sizeof periods / sizeof *periods; i++) {
        const int period = periods[i], span = max_int(4 * period, 96);
        for (int k = 0; k < 400; k++) ids[k] = k < 400 - span ? 1000 + k : k % period;
        CHECK(loop_of(ids, 400) == period, "period %d: a loop of %d", period, loop_of(ids, 400));
        ids[400 - span / 2] = -1;
        CHECK(loop_of(ids, 400) == 0, "period %d with a slip: a loop of %d", period, loop_of(ids, 400));
        CHECK(loop_of(ids, 90) == 0, "no repeats: a loop of %d", loop_of(ids, 90));
    }
}

int main(int argc, char **argv) {
    const bool whole = getenv("LONG") && strcmp(getenv("LONG"), "0"), few = argc > 1 && !strcmp(argv[1], "-few");
    on_gpu = few;
    test_loops();
    if (few && gpu_ops()) few_ids("models/gemma4-mini-e-q8_0.gguf");
    for (int gpu = 0; gpu < 2 && !few; gpu++) {
        on_gpu = gpu;
        if (gpu && !gpu_ops()) {
            SKIP("no GPU: text with guesses on the CUDA backend");
            break;
        }
        one_model("models/gemma4-mini-q8_0.gguf", "models/gemma4-mini-mtp-q8_0.gguf", whole);
        one_model("models/gemma4-mini-q8_0.gguf", "models/gemma4-mini-dflash-q8_0.gguf", whole);
        one_model("models/gemma4-mini-e-q8_0.gguf", NULL, whole);
    }
    return test_done("verify");
}
