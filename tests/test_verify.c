/* test_verify.c - speculative decoding does not change the text: the same ids, end reasons, session tokens and second
 * answers, greedy and sampled, with every speculation method and any acceptance rate.
 *
 *   test_verify [mtp] [dflash] [e] on the CPU, and on the GPU if there is one; pairs of models to test, default: all
 *   test_verify -few on the GPU, one model and few ids: for the emulator
 *
 * Drafts come from a drafter, as chains and as trees, from prompt lookup (--spec ngram) and from a table (ngram-mod),
 * which is first empty, then has the text of an earlier answer, so that long drafts are accepted, then has some entries
 * replaced by random ids, also ids that end a text. There are cases with stop strings, -n, a full context with and
 * without a shift, Ctrl-C and several sessions in one step. Finally, pairs of tokens sampled with many seeds, at and
 * after accepted and rejected drafts, are compared with their probabilities by chi-square; the test must detect two
 * wrong verifiers.
 *
 * LONG=1: 200 different prompts, up to 256 ids each, greedy and sampled, eight in a step, with prompt lookup, an MTP
 * drafter, a DFlash drafter and its trees; two of each kind with all methods, and with penalties. Run from the top of
 * the repository, where the models are. */
#define TESTING
#include "../gemma4.c"
#include "chi.h"
#include "pairs.h"
#include "card.h"
#include "steps.h"

enum { MOST_IDS = 1024, N_KINDS = 4, N_METHODS = 10, FIRST_DRAFTER = 6 };    // methods from this one on need a drafter

typedef struct {
    const char *name;
    float temperature, repeat, presence;
} Choosing;
static const Choosing choosing[] = {
    { "greedy", 0, 1, 0 }, { "sampled", 1, 1, 0 }, { "sampled, with penalties", 0.8f, 1.1f, 0.3f } };

typedef enum { TO_THE_END, BY_STOP_STRING, IN_FULL_CONTEXT, SHIFTING, CANCELLED, N_ENDS } Ends;
static const char *const ends[] = { "to its end", "stop string", "full context", "shifted", "cancelled" };

typedef struct {
    int32_t ids[MOST_IDS];
    int     n, len, shifts;
    const char *why;
    uint64_t held;            // hash of the session's tokens
    DraftCount drafts;
} Answer;

static Model *open_model(const char *path, const char *drafter, int n_ctx, int n_seqs) {       // drafter NULL: none
    const ModelOptions o = { .drafter = drafter, .draft_width = DRAFT_WIDTH, .n_ctx = n_ctx, .n_seqs = n_seqs,
                            .n_batch = 256, .n_logits = STEP_ROWS, .k_type = KV_F16, .v_type = KV_F16,
                            .penalties = true };
    return open_pair(path, o);
}

// A prompt as the chat writes it, and texts to continue: stories, lists that repeat, an edit, which repeats a text.
static void set_prompt_text(int i, char *text, size_t room) {
    static const char *const who[] = { "fox", "robot", "king", "cat", "baker", "sailor", "dragon", "teacher", "farmer",
                                       "mouse" };
    static const char *const where[] = { "in the forest", "by the sea", "on a hill", "in a castle", "at night" };
    const int round = i / N_KINDS;                     // 50 texts of each kind
    const char *name = who[(round + i) % 10], *place = where[round / 10 % 5];
    switch (i % N_KINDS) {
    case 0:
        snprintf(text, room, "<|turn>user\nTell me a story about a %s %s.<turn|>\n<|turn>model\n", name, place);
        return;
    case 1:
        snprintf(text, room, "One %s %s, two %ss, one %s, two %ss, one %s, two", name, place, name, name, name, name);
        return;
    case 2:
        snprintf(text, room, "<|turn>user\nRepeat this:\nOnce upon a time, a %s named Jasper lived %s. Jasper was "
                 "always curious. One bright spring day, Jasper picked a full basket of "
                 "carrots.<turn|>\n<|turn>model\n", name, place);
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

static TokIds prompt_of(Session *s, int i) {
    char text[512];
    TokIds ids = { 0 };
    set_prompt_text(i, text, sizeof text);
    push_id(s->t, &ids, s->t->bos);
    if (tok_encode(s->t, text, strlen(text), TOK_SPECIAL, &ids) < 0) die("%s", s->t->err);
    return ids;
}

static void begin(Session *s, int i, const AnswerOptions *o) {
    TokIds ids = prompt_of(s, i);
    if (!session_start(s, &(Prompt){ .ids = ids.ids, .n = (int)ids.n, .n_head = 4 }, o)) die("%s", s->err);
    tok_ids_free(&ids);
}

static bool took(Session *s, const Event *e, Answer *a) {              // false: the answer ended
    for (int k = 0; e->kind == EVENT_TOKEN && k < e->n_ids && a->n < MOST_IDS; k++) a->ids[a->n++] = e->ids[k];
    if (e->kind != EVENT_END) return true;
    a->why = s->turn.why;
    a->shifts = s->turn.shifts;
    a->drafts = s->turn.drafts;
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

// On a GPU, rows of a tree may differ in their last bits, because their keys are in another order, and then by the
// rounding of activations; so a sampled token may be another one at a boundary. Sampled texts with trees may differ
// there, which is counted (on an H100: 6 of 36). Greedy texts may not.
static int n_sampled_with_trees, n_different;

static void compare(const Answer *got, const Answer *want, const char *what, const char *how, const char *who, int i) {
    int same = 0;
    while (same < got->n && same < want->n && got->ids[same] == want->ids[same]) same++;
    if (on_gpu && strstr(who, "tree") && !strncmp(how, "sampled", 7)) {
        n_sampled_with_trees++;
        if (same < got->n && same < want->n) {
            n_different++;
            return;
        }
    }
    char where[160];
    snprintf(where, sizeof where, "%s, %s, prompt %d: %s", what, how, i, who);
    CHECK(same == got->n && same == want->n, "%s: %d ids, %d without drafts, the first %d the same", where, got->n,
          want->n, same);
    CHECK(got->why == want->why, "%s: ends with %s, without drafts %s", where, got->why, want->why);
    CHECK(got->held == want->held && got->len == want->len && got->shifts == want->shifts,
          "%s: the session has %d tokens, without drafts %d", where, got->len, want->len);
}

static void spoil_table(Model *m) {                    // replaces one of five entries
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

static const struct { const char *who; Drafting drafting; bool forget, spoil; } methods[N_METHODS] = {
    { "ngram", { .kind = SPEC_NGRAM, .n_max = 8 }, false, false },
    { "ngram, as many as fit", { .kind = SPEC_NGRAM, .n_max = DRAFT_MAX }, false, false },
    { "an empty table", { .kind = SPEC_NGRAM_MOD, .n_max = 4 }, true, false },
    { "a table that knows", { .kind = SPEC_NGRAM_MOD, .n_max = DRAFT_MAX }, false, false },
    { "a spoilt table", { .kind = SPEC_NGRAM_MOD, .n_max = 16 }, false, true },
    { "auto", { .kind = SPEC_AUTO, .n_max = 16 }, false, false },
    { "a drafter", { .kind = SPEC_MTP, .n_max = 5 }, false, false },
    { "a drafter that stops early", { .kind = SPEC_MTP, .n_max = 8, .p_min = 0.9f }, false, false },
    { "a tree", { .kind = SPEC_MTP, .n_max = 4, .tree = 14 }, false, false },
    { "auto, a tree", { .kind = SPEC_AUTO, .n_max = 16, .tree = 20 }, false, false },
};

static Drafting drafting_by(const Model *m, int g) {   // for the model's drafter
    Drafting d = methods[g].drafting;
    if (d.kind == SPEC_MTP) d.kind = drafter_of(m);
    return d;
}

static void forget(Session *s) {
    reset_session(s->m, s->seq);
    s->held.n = 0;
    s->n_snapshots = 0;
}

// One prompt: without drafts, then with each method in a separate session; the last one is continued. Adds counts to
// sum (N_METHODS).
static void one_prompt(Session *plain, Session *s, const char *name, const Choosing *c, int i, int n, Ends end,
                       DraftCount *sum) {
    char what[64];
    snprintf(what, sizeof what, "%s, %s", name, ends[end]);
    const int cancel_after = end == CANCELLED ? n / 2 + 1 : 0;
    AnswerOptions o = options_of(c, n, end, (Drafting){ .kind = SPEC_OFF }, i);
    const Answer want = tell(plain, i, &o, cancel_after);
    for (int g = 0; g < N_METHODS; g++) {
        if (g >= FIRST_DRAFTER && s->m->drafter->kind == DRAFTER_NONE) break;
        if (g < FIRST_DRAFTER && s->m->drafter->kind == DRAFTER_DFLASH) continue;       // tested with the other pair
        if (methods[g].forget) forget_table();
        if (methods[g].spoil && ngram_mod.next) spoil_table(s->m);
        o.drafting = drafting_by(s->m, g);
        forget(s);
        const Answer got = tell(s, i, &o, cancel_after);
        if (end == CANCELLED) {                        // the end depends on how many tokens a step makes
            const int both = min_int(got.n, want.n);
            CHECK((both >= cancel_after || got.n == want.n) &&
                  !memcmp(got.ids, want.ids, (size_t)both * sizeof *got.ids),
                  "%s, %s, prompt %d: %s: %d ids differ", what, c->name, i, methods[g].who, both);
        } else {
            compare(&got, &want, what, c->name, methods[g].who, i);
        }
        sum[g].drafted += got.drafts.drafted;
        sum[g].accepted += got.drafts.accepted;
        // The session's tokens give the same next answer as without drafts.
        o.n_predict = 6;
        const Answer more = tell(s, i + 4, &o, 0);
        o.drafting.kind = SPEC_OFF;
        const Answer more_plain = tell(s, i + 4, &o, 0);
        compare(&more, &more_plain, what, c->name,
                methods[g].drafting.tree ? "a second answer, with a tree" : "a second answer", i);
        o.n_predict = n;
    }
}

enum { N_TOGETHER = 8 };         // sessions of the long form

// n sessions in common steps, session k with prompt first + k.
static void tell_together(Session *s, int n, int first, const AnswerOptions *o, Answer *out) {
    bool runs[N_TOGETHER];
    int n_runs = n;
    for (int k = 0; k < n; k++) {
        begin(&s[k], first + k, &o[k]);
        runs[k] = true;
        out[k] = (Answer){ 0 };
    }
    while (n_runs) {
        Session *some[N_TOGETHER];
        Event e[N_TOGETHER];
        int who[N_TOGETHER], n_some = 0;
        for (int k = 0; k < n; k++)
            if (runs[k]) who[n_some] = k, some[n_some++] = &s[k];
        sessions_next(some, n_some, e);
        for (int k = 0; k < n_some; k++) n_runs -= !(runs[who[k]] = took(some[k], &e[k], &out[who[k]]));
    }
}

// Prompts from `first` on in common steps: without drafts, then with prompt lookup, or with the drafter and its trees.
// Returns how many ids were compared.
static long many_prompts(Session *s, const char *name, const Choosing *c, int first, int n, DraftCount *sum) {
    const Model *m = s->m;
    const int also = m->drafter->kind == DRAFTER_DFLASH ? 8 : 0;        // of methods: trees, prompt lookup
    Answer want[N_TOGETHER], got[N_TOGETHER];
    AnswerOptions o[N_TOGETHER];
    long compared = 0;
    for (int g = -1; g < N_METHODS; g++) {            // -1: without drafts
        if (g >= 0 && g != also && (g != FIRST_DRAFTER || m->drafter->kind == DRAFTER_NONE)) continue;
        for (int k = 0; k < N_TOGETHER; k++) {
            o[k] = options_of(c, n, TO_THE_END, g < 0 ? (Drafting){ .kind = SPEC_OFF } : drafting_by(m, g), first + k);
            forget(&s[k]);
        }
        tell_together(s, N_TOGETHER, first, o, g < 0 ? want : got);
        for (int k = 0; g >= 0 && k < N_TOGETHER; k++) {
            compare(&got[k], &want[k], name, c->name, methods[g].who, first + k);
            sum[g].drafted += got[k].drafts.drafted;
            sum[g].accepted += got[k].drafts.accepted;
            compared += got[k].n;
        }
    }
    return compared;
}

// Three sessions, in separate steps and then in common ones: the text of each does not depend on the others' drafts.
static void with_others(const Model *m, Session *s, const char *name, int n) {
    const SpecKind drafter = m->drafter->kind == DRAFTER_NONE ? SPEC_NGRAM : drafter_of(m);
    const Drafting drafting[3] = { { .kind = SPEC_NGRAM, .n_max = 12 }, { .kind = SPEC_NGRAM_MOD, .n_max = 12 },
                                  { .kind = drafter, .n_max = 6 } };
    Answer alone[3], together[3];
    AnswerOptions o[3];
    for (int k = 0; k < 3; k++) {
        o[k] = options_of(&choosing[k], n, TO_THE_END, drafting[k], 5 + k);
        o[k].drafting.kind = SPEC_OFF;
        alone[k] = tell(&s[k], k + 1, &o[k], 0);
        forget(&s[k]);
        o[k].drafting = drafting[k];
    }
    tell_together(s, 3, 1, o, together);
    for (int k = 0; k < 3; k++) compare(&together[k], &alone[k], name, choosing[k].name, "with others", k + 1);
}

// ---- sampled tokens, by chi-square ----------------------------------------------------------------------------------

// Tokens that may be sampled after a prompt, the most probable first, and how often: as first token, and after each of
// them as second.
enum { TOP_K = 12, PAIRS = TOP_K * TOP_K };
typedef struct { int32_t id[TOP_K]; double p[TOP_K]; } Choice;
typedef struct { Choice first, second[TOP_K]; } Exact;
typedef struct { int first[TOP_K], second[TOP_K], pair[PAIRS], n; } Drawn;         // by rank in these lists

static const SampleParams drawing = { .temperature = 1.5f, .top_k = TOP_K, .top_p = 1, .repeat = 1 };

// The distribution after n more tokens of session 0, which does not change: in double, from the logits.
static void choice_after(Model *m, const int32_t *ids, int n, Choice *c) {
    float *logits = alloc_or_die((size_t)m->config.vocab, sizeof *logits);
    double total = 0;
    run_chunk(m, 0, ids, n);
    read_logits(m, 0, logits);
    for (int k = 0; k < TOP_K; k++) {
        int best = 0;
        for (int i = 1; i < m->config.vocab; i++) if (logits[i] > logits[best]) best = i;
        c->id[k] = best;
        total += c->p[k] = exp((double)logits[best] / (double)drawing.temperature);
        logits[best] = -INFINITY;
    }
    for (int k = 0; k < TOP_K; k++) c->p[k] /= total;
    free(logits);
}

static int place_of(const Choice *c, int32_t id) {     // TOP_K: it cannot be sampled
    int k = 0;
    while (k < TOP_K && c->id[k] != id) k++;
    return k;
}

static void count_pair(Drawn *d, int first, int second) {
    d->first[first]++;
    d->second[second]++;
    d->pair[first * TOP_K + second]++;
    d->n++;
}

// The deviation of first tokens, second tokens and pairs from their probabilities: chi-square relative to its bound.
static void set_distance(const Drawn *d, const Exact *e, double *part) {
    double second[TOP_K] = { 0 }, pair[PAIRS];
    for (int i = 0; i < PAIRS; i++) {
        pair[i] = e->first.p[i / TOP_K] * e->second[i / TOP_K].p[i % TOP_K];
        second[i % TOP_K] += pair[i];
    }
    const double *const p[3] = { e->first.p, second, pair };
    const int *const drawn[3] = { d->first, d->second, d->pair }, n[3] = { TOP_K, TOP_K, PAIRS };
    for (int k = 0; k < 3; k++) {
        int bins;
        part[k] = chi_square(drawn[k], p[k], n[k], d->n, &bins);
        part[k] = bins > 2 ? part[k] / chi_limit(bins - 1) : INFINITY;
    }
}

// Verifies the last step with this seed. The session's length stays `len`.
static const StepResult *judge(Model *m, int len, uint64_t seed) {
    SampleParams p = drawing;
    p.seed = seed;
    m->ops->copy(&(Copy){ m->s.params, &p, sizeof p, COPY_IN });
    issue_verification(m, NULL, 0, 0, NULL);
    read_result(m);
    set_length(m, 0, len);
    return m->result;
}

// A step after the last token of a prompt, with drafts: the most probable tokens, or a tree of the two most probable,
// each followed by its most probable token. For each of n_draws seeds it samples two tokens; if the first draft is
// rejected, the second token comes from a step without drafts. Returns how many drafts were accepted; *outside: samples
// that are in none of the lists.
static int draw_pairs(Model *m, int32_t last, const Exact *e, bool tree, int n_draws, Drawn *d, int *outside) {
    const StepRow rows[5] = {
        { .token = last, .parent = -1, .output = true },
        { .token = e->first.id[0], .parent = 0, .output = true },
        { .token = e->second[0].id[0], .parent = 1, .output = true },
        { .token = e->first.id[1], .parent = 0, .output = true },
        { .token = e->second[1].id[0], .parent = 3, .output = true } };
    const int len = m->len[0];
    int *first = alloc_or_die(n_draws, sizeof *first), right = 0;      // ranks; TOP_K: already counted
    *d = (Drawn){ 0 };
    *outside = 0;
    step(m, &(StepSeg){ .seq = 0, .kind = tree ? SEG_TREE : SEG_CHAIN, .n = tree ? 5 : 3, .rows = rows }, 1);
    for (int i = 0; i < n_draws; i++) {
        const StepResult *v = judge(m, len, (uint64_t)(2 * i + tree));
        first[i] = place_of(&e->first, v->chosen[0]);
        *outside += first[i] == TOP_K;
        right += v->accepted[0] - 1;
        if (v->accepted[0] == 1 || first[i] == TOP_K) continue;
        const int second = place_of(&e->second[first[i]], v->chosen[tree ? v->path[1] : 1]);
        if (second < TOP_K) count_pair(d, first[i], second);
        else ++*outside;
        first[i] = TOP_K;
    }
    set_length(m, 0, len + 1);
    for (int k = 0; k < TOP_K; k++) {
        step(m, &(StepSeg){ .seq = 0, .kind = SEG_CHAIN, .n = 1,
                            .rows = &(StepRow){ .token = e->first.id[k], .parent = -1, .output = true } }, 1);
        for (int i = 0; i < n_draws; i++) {
            if (first[i] != k) continue;
            const int second = place_of(&e->second[k], judge(m, len + 1, (uint64_t)(2 * i + tree))->chosen[0]);
            if (second < TOP_K) count_pair(d, k, second);
            else ++*outside;
        }
    }
    set_length(m, 0, len);
    free(first);
    return right;
}

static int draw(const Choice *c, float u) {            // the rank at which the sum exceeds u
    int k = 0;
    for (double sum = c->p[0]; k < TOP_K - 1 && sum <= (double)u; sum += c->p[k]) k++;
    return k;
}

// Two wrong verifiers, which the test must detect. One accepts a draft with its probability, and otherwise samples from
// all tokens, including the draft. The other uses the same random number for all rows of a step.
static void wrong_verifiers(const Exact *e, const char *name, int n_draws) {
    Drawn ratio = { 0 }, one = { 0 };
    double part[3];
    for (int i = 0; i < n_draws; i++) {
        float u[4];
        for (int k = 0; k < 4; k++) u[k] = random_unit((uint64_t)i, k);
        const int drafted = (double)u[0] < e->first.p[0] ? 0 : draw(&e->first, u[1]), first = draw(&e->first, u[3]);
        count_pair(&ratio, drafted, draw(&e->second[drafted], u[2]));
        count_pair(&one, first, draw(&e->second[first], u[3]));
    }
    set_distance(&ratio, e, part);
    CHECK(part[0] > 1, "%s: drafts accepted by their probability: expected first tokens to show it, "
                       "got %.2f of the bound",
          name, part[0]);
    set_distance(&one, e, part);
    CHECK(part[0] <= 1 && part[2] > 1, "%s: one random number for a step: expected pairs alone to show it, got %.2f "
          "and %.2f of the bound", name, part[0], part[2]);
}

static void in_distribution(Session *s, const char *name, int prompt, int n_draws, bool print) {
    Model *m = s->m;
    TokIds ids = prompt_of(s, prompt);
    const int n = (int)ids.n;
    Exact e;
    reset_session(m, 0);
    run_prompt(m, 0, ids.ids, n - 1);
    commit_all(m);
    int32_t path[2] = { ids.ids[n - 1] };
    choice_after(m, path, 1, &e.first);
    for (int k = 0; k < TOP_K; k++) {
        path[1] = e.first.id[k];
        choice_after(m, path, 2, &e.second[k]);
    }
    wrong_verifiers(&e, name, n_draws);
    for (int tree = 0; tree < 2; tree++) {
        const char *who = tree ? "a tree" : "a chain";
        Drawn d;
        double part[3];
        int outside;
        const int right = draw_pairs(m, path[0], &e, tree, n_draws, &d, &outside);
        set_distance(&d, &e, part);
        CHECK(!outside, "%s, %s: %d of %d samples are not among the %d most probable tokens", name, who, outside,
              n_draws, TOP_K);
        CHECK(part[0] <= 1 && part[1] <= 1 && part[2] <= 1, "%s, %s: chi-square of %d first tokens, second ones and "
              "pairs: got %.2f, %.2f and %.2f of the bound", name, who, n_draws, part[0], part[1], part[2]);
        CHECK(right * 8 > n_draws && right * 2 < 3 * n_draws, "%s, %s: %d drafts accepted in %d samples: a weak test",
              name, who, right, n_draws);
        if (print) printf("%s, %s: %d samples, %d drafts accepted; chi-square of first tokens, second ones, "
                          "pairs: %.2f, %.2f, %.2f of the bound\n", name, who, n_draws, right, part[0], part[1],
                          part[2]);
    }
    forget(s);
    tok_ids_free(&ids);
}

static void one_model(const char *path, const char *drafter, bool whole) {
    const int n_prompts = whole ? 200 : 2, n = whole ? 256 : 32, n_kinds = whole ? N_KINDS : 2;
    const int n_seqs = whole ? N_TOGETHER : 3;
    const char *name = strrchr(path, '/') + 1;
    Model *m = open_model(path, drafter, 512, n_seqs), *tight = open_model(path, drafter, 80, 2);
    Tokenizer tok;
    Session s[N_TOGETHER], t[2];
    DraftCount sum[N_METHODS] = { { 0 } };
    long compared = 0;
    load_tokenizer(&tok, &m->gguf, m->config.vocab);
    for (int k = 0; k < n_seqs; k++) init_session(&s[k], m, &tok, k);
    for (int k = 0; k < 2; k++) init_session(&t[k], tight, &tok, k);
    for (int i = 0; i < n_prompts; i++)                // the long form: two of each kind
        for (int c = whole ? 0 : i % 3; i % 100 < N_KINDS && c < (whole ? 3 : i % 3 + 1); c++)
            one_prompt(&s[0], &s[1], name, &choosing[c], i, n, TO_THE_END, sum);
    for (int i = 0; whole && i < n_prompts; i += N_TOGETHER)
        for (int c = 0; c < 2; c++) compared += many_prompts(s, name, &choosing[c], i, n, sum);
    for (Ends end = BY_STOP_STRING; end < N_ENDS; end++) {
        const bool full = end == IN_FULL_CONTEXT || end == SHIFTING;
        for (int i = 0; i < n_kinds; i++) {
            forget(&s[0]);
            forget(&t[0]);
            one_prompt(full ? &t[0] : s, full ? &t[1] : &s[1], name, &choosing[i % 3], i, full ? 80 : 24, end, sum);
        }
    }
    if (whole) printf("%s, %s: %d prompts, %ld ids with drafts compared\n", name, drafter ? drafter : "no drafter",
                      n_prompts, compared);
    // The required drafts were made, and accepted where they must be.
    for (int g = 0; g < (drafter ? N_METHODS : FIRST_DRAFTER); g++) {
        if (g < FIRST_DRAFTER && m->drafter->kind == DRAFTER_DFLASH) continue;
        const bool may_rest = g <= 2 || methods[g].drafting.kind == SPEC_AUTO;   // auto may not draft on every machine
        CHECK(may_rest || sum[g].drafted > 0, "%s: method %d has drafted nothing", name, g);
        CHECK(may_rest || sum[g].accepted > 0, "%s: no draft of method %d was accepted", name, g);
        CHECK(g != 3 || sum[g].accepted * 10 > sum[g].drafted * 7,
              "%s: of the table with the answer, %d of %d drafts accepted", name, sum[g].accepted, sum[g].drafted);
        CHECK(g < FIRST_DRAFTER || sum[g].accepted * 10 > sum[g].drafted * 3 || g >= FIRST_DRAFTER + 2,
              "%s: of the drafter, %d of %d drafts accepted", name, sum[g].accepted, sum[g].drafted);
        CHECK(g != 4 || sum[g].accepted * 10 < sum[g].drafted * 9, "%s: of the spoilt table, %d of %d drafts accepted",
              name, sum[g].accepted, sum[g].drafted);
    }
    with_others(m, s, name, n);
    if (m->drafter->kind != DRAFTER_DFLASH) in_distribution(s, name, 1, whole ? 100000 : 4000, whole);
    for (int k = 0; k < n_seqs; k++) free_session(&s[k]);
    for (int k = 0; k < 2; k++) free_session(&t[k]);
    tok_free(&tok);
    close_model(m);
    close_model(tight);
}

// A test that takes the emulated GPU only seconds: a prompt that the model repeats, without drafts and with prompt
// lookup.
static void few_ids(const char *path) {
    Model *m = open_model(path, NULL, 256, 2);
    Tokenizer tok;
    Session s[2];
    load_tokenizer(&tok, &m->gguf, m->config.vocab);
    for (int k = 0; k < 2; k++) init_session(&s[k], m, &tok, k);
    AnswerOptions o = options_of(&choosing[0], 20, TO_THE_END, (Drafting){ .kind = SPEC_OFF }, 1);
    const Answer want = tell(&s[0], 2, &o, 0);
    o.drafting = (Drafting){ .kind = SPEC_NGRAM, .n_max = 4 };
    const Answer got = tell(&s[1], 2, &o, 0);
    compare(&got, &want, path, choosing[0].name, "ngram", 2);
    CHECK(got.drafts.accepted > 0 && got.drafts.accepted < got.drafts.drafted,
          "%s: %d of %d drafts accepted, expected some", path, got.drafts.accepted, got.drafts.drafted);
    for (int k = 0; k < 2; k++) free_session(&s[k]);
    tok_free(&tok);
    close_model(m);
}

// A text that repeats itself four times within at least 96 ids counts as a loop; a shorter one, or one with a
// difference, does not.
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
    take_card(&argc, argv);
    static const struct { const char *name, *model, *drafter; } pairs[] = {
        { "mtp", "models/gemma4-mini-q8_0.gguf", "models/gemma4-mini-mtp-q8_0.gguf" },
        { "dflash", "models/gemma4-mini-q8_0.gguf", "models/gemma4-mini-dflash-q8_0.gguf" },
        { "e", "models/gemma4-mini-e-q8_0.gguf", NULL },
    };
    const bool whole = getenv("LONG") && strcmp(getenv("LONG"), "0"), few = argc > 1 && !strcmp(argv[1], "-few");
    start_threads(1);                                  // more threads do not pay for such small models
    on_gpu = few;
    test_loops();
    if (few && gpu_ops()) few_ids("models/gemma4-mini-e-q8_0.gguf");
    for (int gpu = 0; gpu < 2 && !few; gpu++) {
        on_gpu = gpu;
        if (gpu && !gpu_ops()) {
            SKIP("no GPU: speculative decoding on the CUDA backend");
            break;
        }
        for (int i = 0; i < 3; i++) {
            bool wanted = argc < 2;
            for (int k = 1; k < argc; k++) wanted |= !strcmp(argv[k], pairs[i].name);
            if (wanted) one_model(pairs[i].model, pairs[i].drafter, whole);
        }
    }
    printf("# cuda, sampled with trees: %d of %d texts differ\n", n_different, n_sampled_with_trees);
    CHECK(n_different * 3 <= n_sampled_with_trees, "%d of %d texts that were sampled with trees differ", n_different,
          n_sampled_with_trees);
    return test_done("verify");
}
