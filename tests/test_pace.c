/* test_pace.c - the draft lengths of --spec auto, with a simulated exact clock: unpredictable text takes hardly longer
 * than without drafts, however short it is, and long text hardly longer than with the best fixed setting.
 *
 * A machine is given by the times of steps of n rows and of drafts of n tokens; a text by the acceptance rate at each
 * depth, or by how it repeats itself. -v prints the table. */
#define TESTING
#include "../gemma4.c"
#include "test.h"

enum { DEEPEST = 15, N_SEEDS = 2, LONG_TEXT = 4000 };

typedef struct {
    const char *name;
    SpecKind    who;
    double      rows[8][2];   // rows of a step and its time; linear interpolation between them
    double      drafts[4][2]; // tokens of a draft and its time
    double      share;        // bytes that a draft of one token reads, relative to the model
    double      first;        // additional time of the first step or draft of each size
    double      late;         // a plain step after drafts takes longer by this fraction, as it is not issued ahead
} Simulated;

// The first three as measured, in ms.
static const Simulated machines[] = {
    { "31B, H100, MTP", SPEC_MTP, { { 1, 8.15 }, { 3, 10.3 }, { 5, 10.7 }, { 8, 11.3 }, { 16, 16.1 } },
      { { 1, 0.2 }, { 15, 3 } }, 0.04, 0, 0 },
    { "31B, H100, DFlash", SPEC_DFLASH, { { 1, 8.15 }, { 3, 10.3 }, { 5, 10.7 }, { 8, 11.3 }, { 16, 16.1 } },
      { { 1, 1.4 }, { 7, 1.47 }, { 15, 1.85 } }, 0.17, 0, 0 },
    { "26B, H100, MTP", SPEC_MTP, { { 1, 2.1 }, { 3, 3.6 }, { 5, 4.1 }, { 8, 4.5 }, { 16, 6.7 } },
      { { 1, 0.21 }, { 15, 3.2 } }, 0.15, 0, 0 },
    { "26B, H100, DFlash", SPEC_DFLASH, { { 1, 2.1 }, { 3, 3.6 }, { 5, 4.1 }, { 8, 4.5 }, { 16, 6.7 } },
      { { 1, 0.7 }, { 7, 0.8 }, { 15, 1.03 } }, 0.4, 0, 0 },
    { "mini, 2 cores, MTP", SPEC_MTP, { { 1, 1 }, { 4, 1.25 }, { 6, 1.75 }, { 8, 2.15 }, { 12, 3.4 }, { 16, 4.4 } },
      { { 1, 0.6 }, { 15, 10 } }, 0.34, 0, 0 },
    { "mini, 2 cores, DFlash", SPEC_DFLASH, { { 1, 1 }, { 4, 1.25 }, { 6, 1.75 }, { 8, 2.15 }, { 12, 3.4 },
                                              { 16, 4.4 } },
      { { 1, 1.2 }, { 7, 2.8 }, { 15, 6.9 } }, 0.5, 0, 0 },
    { "rows one by one", SPEC_MTP, { { 1, 1 }, { 16, 14.5 } }, { { 1, 0.05 }, { 15, 0.75 } }, 0.05, 0, 0 },
    { "a drafter as large as the model", SPEC_MTP, { { 1, 1 }, { 16, 1.6 } }, { { 1, 1 }, { 15, 15 } }, 1, 0, 0 },
    { "rows for nothing", SPEC_DFLASH, { { 1, 1 }, { 16, 1.1 } }, { { 1, 0.1 }, { 15, 0.1 } }, 0.1, 0, 0 },
    { "mini, H100, DFlash", SPEC_DFLASH, { { 1, 0.175 }, { 3, 0.26 }, { 8, 0.3 }, { 16, 0.35 } },
      { { 1, 0.16 }, { 15, 0.19 } }, 0.5, 0, 0.3 },
    { "recorded steps", SPEC_MTP, { { 1, 2.1 }, { 3, 3.6 }, { 5, 4.1 }, { 8, 4.5 }, { 16, 6.7 } },
      { { 1, 0.21 }, { 15, 3.2 } }, 0.15, 5, 0 },
};

typedef struct {
    const char *name;
    float       right[4];     // acceptance rate at depths 1, 2, 3, and any deeper, if all before were accepted
    int         turns;        // it alternates with unpredictable text, each time after so many tokens; 0: it does not
    int         repeats;      // tokens after which the text repeats itself; 0: never
    float       anew;         // fraction of tokens that differ in a repetition
} Text;
static const Text texts[] = {
    { "story, greedy", { 1.0f, 0.99f, 0.99f, 0.99f }, 0, 0, 0 },
    { "story, sampled", { 0.94f, 0.93f, 0.93f, 0.93f }, 0, 0, 0 },
    { "edit", { 0.80f, 0.85f, 0.85f, 0.85f }, 0, 0, 0 },
    { "facts", { 0.81f, 0.75f, 0.67f, 0.8f }, 0, 0, 0 },
    { "dice", { 0.56f, 0.55f, 0.7f, 0.64f }, 0, 0, 0 },
    { "roll", { 0.03f, 0.1f, 0.1f, 0.1f }, 0, 0, 0 },
    { "story and roll", { 0.97f, 0.97f, 0.97f, 0.97f }, 400, 0, 0 },
    { "list", { 0.03f, 0.1f, 0.1f, 0.1f }, 0, 40, 0 },
    { "list with changes", { 0.03f, 0.1f, 0.1f, 0.1f }, 0, 40, 0.1f },
    { "list of surprises", { 0.03f, 0.1f, 0.1f, 0.1f }, 0, 8, 0.7f },
};
#define N_OF(a) ((int)(sizeof(a) / sizeof *(a)))

static double between(const double (*at)[2], int n, double x) {
    int i = 1;
    while (i + 1 < n && at[i + 1][0] > 0 && at[i][0] < x) i++;
    return at[i - 1][1] + (at[i][1] - at[i - 1][1]) * (x - at[i - 1][0]) / (at[i][0] - at[i - 1][0]);
}

static double coin(uint64_t *state) {                 // 0 .. 1
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (double)(*state >> 40) / (double)(1 << 24);
}

typedef struct {              // a process: one machine, one session
    const Simulated *on;
    Pace     pace;
    Speculator speculator;
    bool     used[2][STEP_ROWS + 1];   // whether a step of so many rows, a draft of so many tokens, has run
    uint64_t random;
    int32_t *ids;             // of the answer, and the next one
    int      n;
    int      with_drafts, drafted;     // steps with drafts; of these by the drafter
    bool     late;            // the last step had drafts, or made some
} Run;

static double takes(Run *r, int what, int n) {
    const Simulated *m = r->on;
    const double more = r->used[what][n] ? 0 : m->first;
    r->used[what][n] = true;
    return more + (what ? between(m->drafts, N_OF(m->drafts), n) : between(m->rows, N_OF(m->rows), n));
}

// The id at position i of a text: the one `repeats` positions before, or a new one.
static void add_id(Run *r, const Text *t) {
    const bool old = t->repeats && r->n >= t->repeats && coin(&r->random) >= (double)t->anew;
    r->ids[r->n] = old ? r->ids[r->n - t->repeats] : 1000000 + r->n;
    r->n++;
}

static int right_of(const Run *r, const Text *t, const Drafts *d, int done, uint64_t *random) {
    int n = 0;
    if (d->source == SPEC_NGRAM) {
        while (n < d->n && d->token[n] == r->ids[r->n + n]) n++;
        return n;
    }
    const bool hopeless = t->turns && done / t->turns % 2;
    while (n < d->n && coin(random) < (hopeless ? 0.03 : (double)t->right[min_int(n, 3)])) n++;
    return n;
}

// Runs one answer of n tokens. Returns its time.
static double take_answer(Run *r, const Text *t, int n, const Drafting *how, int done) {
    Speculator *g = &r->speculator;
    const int room = n + 2 * STEP_ROWS;
    double time = 0;
    r->ids = alloc_or_die((size_t)room, sizeof *r->ids);
    r->n = 0;
    while (r->n < room) add_id(r, t);                  // drafts may go beyond the end
    speculator_start(g, how);
    for (r->n = 1; r->n <= n;) {
        const int left = n - r->n;
        g->drafts.n = 0;
        if (how->kind != SPEC_OFF) make_drafts(g, &r->pace, r->on->who, r->ids, r->n, min_int(DEEPEST, left), 0);
        const int rows = 1 + g->drafts.n;
        const int depth = choose_depth(g, &r->pace, r->on->who, min_int(how->n_max, left - 1), 0);
        const int right = rows > 1 ? right_of(r, t, &g->drafts, done + r->n, &r->random) : 0;
        const double step = takes(r, 0, rows), draft = depth ? takes(r, 1, depth) : 0;
        g->depth = depth;
        add_step_time(&r->pace, rows, step);
        if (depth) add_draft_time(&r->pace, r->on->who, depth, draft);
        g->candidates = (Candidates){ .depth = depth, .width = 1 };
        if (rows > 1) {
            r->with_drafts++;
            r->drafted += g->drafts.source != SPEC_NGRAM;
        }
        const bool late = r->late && rows == 1;
        const double waits = late ? r->on->late * step : 0;
        speculator_learn(g, &r->pace, r->on->who,
                         &(StepDone){ .accepted = right, .seconds = step + draft + waits, .drafting = draft, .waited = late });
        r->late = rows > 1 || depth;
        g->drafts.n = 0;
        r->n += 1 + right;
        time += step + draft + waits;
    }
    free(r->ids);
    return time;
}

// Several answers of n tokens each in one session; with several seeds.
static double takes_all(const Simulated *m, const Text *t, int answers, int n, Drafting how) {
    double time = 0;
    for (uint64_t seed = 1; seed <= N_SEEDS; seed++) {
        Run r = { .on = m, .pace = { .draft_share = m->share, .records = m->first > 0 },
                  .random = seed * 0x9e3779b97f4a7c15u };
        speculator_init(&r.speculator);
        for (int i = 0; i < answers; i++) time += take_answer(&r, t, n, &how, i * n);
        speculator_free(&r.speculator);
    }
    return time;
}

static double takes_at_best(const Simulated *m, const Text *t, int n) {  // with the best fixed setting, or no drafts
    static const int depths[] = { 1, 3, 5, 7, 15 };
    double best = takes_all(m, t, 1, n, (Drafting){ .kind = SPEC_OFF });
    best = fmin(best, takes_all(m, t, 1, n, (Drafting){ .kind = SPEC_NGRAM, .n_max = DEEPEST }));
    for (int i = 0; i < N_OF(depths); i++)
        best = fmin(best, takes_all(m, t, 1, n, (Drafting){ .kind = m->who, .n_max = depths[i] }));
    return best;
}

// The allowed cost if drafts do not pay: 0.8 steps at first, or the first trial, and 1.5 % of the time. The controller
// does not count the recording of new steps, so machines where that is slow are tested with long texts only.
static void test_text(const Simulated *m, const Text *t, bool tell) {
    static const struct { int answers, n; double least; } kinds[] = { { 1, 20, 0.915 }, { 1, 60, 0.965 },
                                                                      { 20, 60, 0.98 },
                                                                      { 1, 400, 0.98 }, { 1, LONG_TEXT, 0.985 } };
    const Drafting automatic = { .kind = SPEC_AUTO, .n_max = DEEPEST };
    double with = 0, off = 0;
    if (tell) printf("%-32s %-18s", m->name, t->name);
    for (int k = 0; k < N_OF(kinds); k++) {
        const int answers = kinds[k].answers, n = kinds[k].n;
        with = takes_all(m, t, answers, n, automatic);
        off = takes_all(m, t, answers, n, (Drafting){ .kind = SPEC_OFF });
        if (tell) printf("  %6.3f", off / with);
        if (m->first > 0 && n < LONG_TEXT) continue;
        CHECK(off / with >= kinds[k].least, "%s, %s, %d of %d tokens: %.3f of the speed without drafts, expected %.3f",
              m->name, t->name, answers, n, off / with, kinds[k].least);
    }
    const double best = takes_at_best(m, t, LONG_TEXT), least = off / best > 1.7 ? 0.95 : 0.88;
    if (tell) printf("  best %.2f: %.3f\n", off / best, best / with);
    CHECK(best / with >= least, "%s, %s: %.3f of the best fixed setting, which is %.2f of no drafts; expected %.2f",
          m->name, t->name, best / with, off / best, least);
}

// One time of 50 times the usual length, because the machine did something else, changes the estimates by an eighth at
// most; so does one that is late every time it is measured, until it is believed.
static void test_outliers(void) {
    Pace p = { .draft_share = 0.1 };
    for (int i = 0; i < 10; i++)
        for (int rows = 1; rows <= 8; rows += 7) add_step_time(&p, rows, rows == 1 ? 2.0 : 3.0);
    for (int i = 0; i < 10; i++) add_draft_time(&p, SPEC_MTP, 3, 0.5);
    add_step_time(&p, 8, 150);
    CHECK(step_seconds(&p, 8) > 3 && step_seconds(&p, 8) <= 3 * 1.126, "a step of 150 after steps of 3: %.3f, expected 3.375",
          step_seconds(&p, 8));
    CHECK(step_seconds(&p, 1) > 2 && step_seconds(&p, 1) <= 2 * 1.061, "other steps, of 2: %.3f, expected 2.121",
          step_seconds(&p, 1));
    add_draft_time(&p, SPEC_MTP, 3, 25);
    CHECK(draft_seconds(&p, SPEC_MTP, 3) <= 0.5 * 1.2, "a draft of 25 after drafts of 0.5: %.3f, expected at most 0.6",
          draft_seconds(&p, SPEC_MTP, 3));
    for (int i = 0; i < 60; i++) add_step_time(&p, 8, 30);
    CHECK(step_seconds(&p, 8) > 29 && step_seconds(&p, 8) < 31, "60 steps of 30: %.3f", step_seconds(&p, 8));
}

// Drafts from the text itself: beyond its end they repeat with the distance to the match; after drafts that all failed
// the next match has to be longer, until a draft is accepted; drafts that save time fill the budget up to its limit.
static void test_ngrams(void) {
    static const int32_t text[] = { 7, 1, 2, 3, 1, 2, 3, 1, 2, 3 }, once[] = { 5, 1, 2, 3, 4, 6, 9, 1, 2, 3, 4 };
    enum { N = sizeof text / sizeof *text, M = sizeof once / sizeof *once };
    Speculator s;
    int32_t drafts[DRAFT_MAX] = { 0 };
    speculator_init(&s);
    ngrams_add(&s.ngrams, text, N, false);
    const int n = ngrams_look_up(&s.ngrams, text, N, NGRAM_MIN, 8, drafts);
    for (int i = 0; i < 8; i++)
        CHECK(n == 8 && drafts[i] == 1 + i % 3, "draft %d of %d: got %d, expected %d", i, n, drafts[i], 1 + i % 3);
    speculator_free(&s);
    speculator_init(&s);                               // the longest match of this text has 4 tokens
    s.options.kind = SPEC_NGRAM;
    static const struct { int accepted, expected, min_match; } steps[] = {
        { 4, 4, 3 }, { 0, 0, 5 }, { 0, 0, 7 }, { 1, 2, 3 } };          // of 4 drafts; then: drafts, length of a match
    for (int i = 0; i < N_OF(steps); i++) {
        ngrams_learn(&s.ngrams, 4, steps[i].accepted);
        const int found = draft_ngrams(&s, once, M, 4, drafts);
        CHECK(found == steps[i].expected && s.ngrams.min_match == steps[i].min_match && (!found || drafts[0] == 6),
              "%d of 4 accepted: %d drafts of %d, matches of %d; expected %d of 6, matches of %d", steps[i].accepted,
              found, drafts[0], s.ngrams.min_match, steps[i].expected, steps[i].min_match);
    }
    speculator_free(&s);
    speculator_init(&s);
    Pace p = { .draft_share = 0 };
    s.options.kind = SPEC_AUTO;
    s.drafts = (Drafts){ .n = 4, .depth = 4, .source = SPEC_NGRAM };
    for (int i = 0; i < 9; i++) {
        add_step_time(&p, 1, 1);
        speculator_learn(&s, &p, SPEC_OFF, &(StepDone){ .accepted = 4, .seconds = 1 });
    }
    CHECK(s.budget[SPEC_NGRAM] == budget_max, "9 steps that save 4 each: a budget of %g steps, expected %g",
          s.budget[SPEC_NGRAM], budget_max);
    speculator_free(&s);
}

int main(int argc, char **argv) {
    const bool tell = argc > 1 && !strcmp(argv[1], "-v");
    for (int m = 0; m < N_OF(machines); m++)
        for (int t = 0; t < N_OF(texts); t++) test_text(&machines[m], &texts[t], tell);
    test_outliers();
    test_ngrams();
    return test_done("test_pace");
}
