/* guess.h - drafts without a model (n-grams, grammar), trees of drafts, and how many tokens to draft. Arithmetic only.
 *
 * Uses base.h, engine.h (Drafting, DraftCount) and the limits of gemma4.h. Begin with make_drafts().
 *
 * Speculative decoding verifies several draft tokens in one step of the model. A session's drafts come from one source:
 *   ngram         the session's own text: what followed its last tokens where they occurred before (prompt lookup)
 *   ngram-mod     a table of what followed the last NGRAM_MOD tokens in any text so far; all sessions share it
 *   grammar       the grammar of the answer, where it allows a single continuation
 *   mtp, dflash   a draft model (draft.h)
 * Drafts form a tree; most trees are chains. The model accepts only drafts that it would have chosen itself, so the
 * text does not depend on the drafts: everything in this file is about speed.
 *
 * --spec auto also chooses how many tokens to draft. It knows the time of a step of n rows, the time of n drafts, and
 * the recent acceptance rate at every depth. It takes the depth with the most tokens per second, depth 0 included. An
 * unknown rate has to be tried, and a known rate may change. The speculation budget limits what such trials cost: every
 * step adds a little to it, drafts that save time add more, drafts that cost time are paid from it. Drafts that may
 * cost more than the budget are not made. Drafts from the text are free while they are shadow drafts: not run, only
 * compared with the tokens that follow.
 *   [1] Types    [2] N-grams    [3] Trees    [4] Draft depth */
#ifndef GUESS_H
#define GUESS_H

// ==== [1] Types =====================================================================================================

typedef struct {              // drafts for a step: draft i is row i + 1 of the segment
    int      n;
    int32_t  token[DRAFT_MAX];
    int      parent[DRAFT_MAX];        // the row that it follows; 0: the last token before the drafts
    int      depth;           // of the deepest draft; the first one has depth 1
    bool     branches;
    SpecKind source;
} Drafts;

typedef struct {              // the drafter's best tokens at each depth, in descending probability
    int     depth, width;
    int32_t id[DRAFT_MAX][DRAFT_WIDTH];
    float   logprob[DRAFT_MAX][DRAFT_WIDTH];           // if the best tokens of all smaller depths are accepted
} Candidates;

typedef struct {              // measured times, by the number of rows or of drafts
    double seconds[STEP_ROWS + 1];     // 0: not measured yet
    int    n_measured[STEP_ROWS + 1];
} Times;
typedef struct Pace {
    Times  step, draft;       // of a step of one session by its rows; of drafting by its tokens
    double draft_share;       // bytes that drafting one token reads, as a fraction of a step's bytes
    bool   records;           // the backend records steps (CUDA graphs): the first step of each kind is slow
    double returned;          // seconds() when the last step was done
} Pace;

// ==== [2] N-grams ===================================================================================================

enum { NGRAM_BITS = 16, NGRAM_MIN = 3, NGRAM_MAX = 24,             // tokens of a match: at least; compared at most
       NGRAM_TRIES = 16,                // earlier places that are compared
       NGRAM_MOD = 12, NGRAM_MOD_BITS = 22 };

// A hash table of all places in a session's tokens where an n-gram of NGRAM_MIN tokens begins. newest[hash] is the last
// such place, earlier[place] the one before it with the same hash. The number of drafts follows the last result: it
// doubles if all drafts were accepted, else it is the number accepted plus one. If none was accepted, the next match
// has to be longer.
typedef struct {
    int32_t *newest;          // (2^NGRAM_BITS) place + 1; 0: none
    int32_t *earlier;         // (n_room) as newest
    int      n, n_room;       // places in the table; allocated
    int      n_draft;         // tokens to draft
    int      min_match;       // tokens that have to match
} Ngrams;

static struct {               // ngram-mod: the token that last followed NGRAM_MOD tokens, in any text
    int32_t *next;            // (2^NGRAM_MOD_BITS) by hash, which may collide: token + 1; 0: none
} ngram_mod;

static uint64_t hash_ids(const int32_t *ids, int n) {
    uint64_t h = 0;
    for (int i = 0; i < n; i++) h = h * 6364136223846793005u + (uint32_t)ids[i] + 1;
    return h * 0x9e3779b97f4a7c15u;
}

// Adds the tokens of ids (n) that are not in the table yet. If the text was shortened, the table is built again.
// shared: the table of ngram-mod gets them too.
static void ngrams_add(Ngrams *g, const int32_t *ids, int n, bool shared) {
    if (!g->newest) g->newest = alloc_or_die((size_t)1 << NGRAM_BITS, sizeof *g->newest);
    if (g->n_room < n) {
        g->n_room = n + 4096;
        int32_t *larger = realloc(g->earlier, (size_t)g->n_room * sizeof *larger);
        if (!larger) die("out of memory: cannot allocate %zu bytes", (size_t)g->n_room * sizeof *larger);
        g->earlier = larger;
    }
    if (g->n > n) {
        memset(g->newest, 0, ((size_t)1 << NGRAM_BITS) * sizeof *g->newest);
        g->n = 0;
    }
    for (; g->n + NGRAM_MIN <= n; g->n++) {
        int32_t *head = &g->newest[hash_ids(ids + g->n, NGRAM_MIN) >> (64 - NGRAM_BITS)];
        g->earlier[g->n] = *head;
        *head = g->n + 1;
        const int at = g->n + NGRAM_MIN - NGRAM_MOD - 1;               // the token after this run is known by now
        if (!shared || at < 0) continue;
        ngram_mod.next[hash_ids(ids + at, NGRAM_MOD) >> (64 - NGRAM_MOD_BITS)] = max_int(ids[at + NGRAM_MOD], -1) + 1;
    }
}

// Drafts `max` tokens after ids (n), and returns how many; 0: no match of at least min_match tokens. Fewer if a picture
// follows. The drafts are the
// tokens after the longest earlier match. If several matches are equally long, the newest one counts.
static int ngrams_look_up(const Ngrams *g, const int32_t *ids, int n, int min_match, int max, int32_t *out) {
    int longest = 0, from = 0, tries = NGRAM_TRIES;
    if (n <= NGRAM_MIN) return 0;
    int place = g->newest[hash_ids(ids + n - NGRAM_MIN, NGRAM_MIN) >> (64 - NGRAM_BITS)];
    for (; place && tries--; place = g->earlier[place - 1]) {
        const int end = place - 1 + NGRAM_MIN;         // the end of the earlier n-gram
        int match = 0;
        if (end >= n) continue;
        while (match < NGRAM_MAX && match < end && ids[end - 1 - match] == ids[n - 1 - match]) match++;
        if (match > longest) {
            longest = match;
            from = end;
        }
    }
    if (longest < min_match) return 0;
    const int period = n - from;                       // after `period` drafts the text ends, and the drafts repeat
    for (int i = 0; i < max; i++) {
        out[i] = i < period ? ids[from + i] : out[i - period];
        if (out[i] < 0) return i;                      // a picture follows
    }
    return max;
}

static int ngram_mod_look_up(const int32_t *ids, int n, int max, int32_t *out) {
    int32_t run[NGRAM_MOD + DRAFT_MAX];
    int found = 0;
    if (n < NGRAM_MOD) return 0;
    memcpy(run, ids + n - NGRAM_MOD, NGRAM_MOD * sizeof *run);
    for (; found < max; found++) {
        const int32_t next = ngram_mod.next[hash_ids(run + found, NGRAM_MOD) >> (64 - NGRAM_MOD_BITS)];
        if (!next) break;
        out[found] = run[NGRAM_MOD + found] = next - 1;
    }
    return found;
}

// The first `accepted` of n drafts were accepted.
static void ngrams_learn(Ngrams *g, int n, int accepted) {
    g->n_draft = accepted == n ? min_int(2 * n, DRAFT_MAX) : max_int(accepted + 1, 2);
    g->min_match = accepted ? NGRAM_MIN : min_int(g->min_match + 2, NGRAM_MAX);
}

// ==== [3] Trees =====================================================================================================

static int add_draft(Drafts *d, int32_t token, int parent, int depth) {        // returns its row
    d->token[d->n] = token;
    d->parent[d->n] = parent;
    d->branches |= parent != d->n;
    d->depth = max_int(d->depth, depth);
    return ++d->n;
}

static void make_chain(Drafts *d, const int32_t *ids, int n) {
    *d = (Drafts){ .source = d->source };
    for (int i = 0; i < n; i++) add_draft(d, ids[i], i, i + 1);
}

// Makes the most probable tree of at most `max` candidates (DDTree). It begins as the chain of the best token at every
// depth. Then the branch with the largest product of probabilities along its path is added, one at a time, while the
// logarithm of that product exceeds min_logprob. Each branch opens two more: the next candidate of its depth, and its
// first child.
static void make_tree(Drafts *d, const Candidates *c, int max, float min_logprob) {
    typedef struct { float logprob; int parent, depth, rank; } Branch;
    Branch open[2 * STEP_ROWS];
    int n_open = 0, row = 0;
    float logprob = 0;
    *d = (Drafts){ .source = d->source };
    for (int i = 0; i < min_int(c->depth, max); i++) {
        if (c->width > 1) open[n_open++] = (Branch){ logprob + c->logprob[i][1], row, i, 1 };
        logprob += c->logprob[i][0];
        row = add_draft(d, c->id[i][0], row, i + 1);
    }
    while (d->n < max && n_open) {
        int best = 0;
        for (int i = 1; i < n_open; i++) if (open[i].logprob > open[best].logprob) best = i;
        const Branch b = open[best];
        if (b.logprob <= min_logprob) break;
        open[best] = open[--n_open];
        row = add_draft(d, c->id[b.depth][b.rank], b.parent, b.depth + 1);
        if (b.rank + 1 < c->width) {
            const float *at = c->logprob[b.depth];
            open[n_open++] = (Branch){ b.logprob - at[b.rank] + at[b.rank + 1], b.parent, b.depth, b.rank + 1 };
        }
        if (b.depth + 1 < c->depth)
            open[n_open++] = (Branch){ b.logprob + c->logprob[b.depth + 1][0], row, b.depth + 1, 0 };
    }
}

// ==== [4] Draft depth ===============================================================================================

// ---- acceptance rates ----

typedef struct {              // by depth, of drafts whose parents were all accepted; rate[0] is of the first draft
    float rate[DRAFT_MAX];
    int   n_seen[DRAFT_MAX];  // drafts that the rate rests on, at most ACCEPT_MEMORY; 0: see accept_rate()
} AcceptRates;

enum { ACCEPT_MEMORY = 24,
       ACCEPT_PRIOR = 1, ACCEPT_PRIOR_DEEPER = 3 };    // weight, in drafts, of the initial rate: first depth, others

static AcceptRates accept_init(float first) {
    AcceptRates a = { { first }, { 0 } };
    return a;
}

static float accept_rate(const AcceptRates *a, int d) {                // of depth d, or the nearest smaller depth seen
    while (d > 0 && !a->n_seen[d]) d--;
    return a->rate[d];
}

static int depths_seen(const AcceptRates *a) {
    int n = 0;
    while (n < DRAFT_MAX && a->n_seen[n]) n++;
    return n;
}

// The first `accepted` drafts of a chain of n were accepted. The rate of a depth that was not reached moves towards the
// rate of the depth before it, so that the depth is tried again later.
static void accept_learn(AcceptRates *a, int n, int accepted) {
    for (int d = 0; d < DRAFT_MAX; d++) {
        if (d < n && d <= accepted) {
            a->rate[d] = accept_rate(a, d);
            a->n_seen[d] = min_int(a->n_seen[d] + 1, ACCEPT_MEMORY);
            const int prior = d ? ACCEPT_PRIOR_DEEPER : ACCEPT_PRIOR;
            a->rate[d] += ((d < accepted) - a->rate[d]) / (float)(a->n_seen[d] + prior);
        } else if (a->n_seen[d]) {
            a->rate[d] += (a->rate[d - 1] - a->rate[d]) / 32;
        }
    }
}

static double expected_tokens(const AcceptRates *a, int n) {           // tokens that a step with n drafts makes
    double tokens = 1, all_accepted = 1;
    for (int d = 0; d < n; d++) {
        all_accepted *= accept_rate(a, d);
        tokens += all_accepted;
    }
    return tokens;
}

// ---- times ----

enum { TIMES_FIRST = 4 };     // the smallest of a size's first 4 times counts, without the first one: caches are cold

// Interpolates linearly between measured sizes. Beyond the last one it uses the mean slope from 1 to the last; if only
// size 1 is known, the slope is `each` times its seconds.
static double estimate_seconds(const Times *t, int n, double each) {
    const double *s = t->seconds;
    int low = n, high = n;
    while (low > 1 && s[low] == 0) low--;
    while (high < STEP_ROWS && s[high] == 0) high++;
    if (low == n) return s[n];
    if (s[high] > 0) return s[low] > 0 ? s[low] + (s[high] - s[low]) * (n - low) / (high - low) : s[high];
    return s[low] + (n - low) * (low > 1 ? (s[low] - s[1]) / (low - 1) : s[1] * each);
}

// A measured size took `taken` seconds. The whole machine may become faster or slower, so a change of this size changes
// all times by the square root of its factor.
static void add_time(Pace *p, Times *t, int n, double taken, double expected) {
    double *known = &t->seconds[n];
    const int n_before = t->n_measured[n]++;
    if (!n_before && p->records) return;
    if (expected > 0) taken = fmin(taken, 2 * expected);               // an outlier: the machine did something else
    if (n_before < 2) {
        *known = taken;
    } else if (n_before < TIMES_FIRST) {
        *known = fmin(*known, taken);
    } else {
        const double mean = *known + (taken - *known) / 8, factor = sqrt(mean / *known);
        for (int i = 0; i <= STEP_ROWS; i++) {
            p->step.seconds[i] *= factor;
            p->draft.seconds[i] *= factor;
        }
        *known = mean;
    }
}

static double step_seconds(const Pace *p, int rows) {
    return estimate_seconds(&p->step, min_int(rows, STEP_ROWS), 0.08);
}

// If no time was measured, returns 1.5 times the drafter's share of the bytes, since small matrices are slow. DFlash
// makes all drafts at once.
static double draft_seconds(const Pace *p, SpecKind drafter, int n) {
    const double known = estimate_seconds(&p->draft, n, drafter == SPEC_MTP ? 1 : 0.08);
    return known > 0 ? known : 1.5 * p->draft_share * step_seconds(p, 1) * (drafter == SPEC_MTP ? n : 1);
}

static void add_step_time(Pace *p, int rows, double seconds) {
    add_time(p, &p->step, rows, seconds, step_seconds(p, rows));
}

static void add_draft_time(Pace *p, SpecKind drafter, int n, double seconds) {
    add_time(p, &p->draft, n, seconds, draft_seconds(p, drafter, n));
}

// ---- choosing a depth ----

// Returns the time of a step with n drafts and `rows` rows of other sessions, divided by the time of the same step
// without drafts; at least 1. drafter: makes the drafts; OFF: they exist already.
static double step_cost(const Pace *p, SpecKind drafter, int n, int rows) {
    const double plain = step_seconds(p, rows + 1);
    const double draft = drafter != SPEC_OFF && n ? draft_seconds(p, drafter, n) : 0;
    return plain > 0 ? fmax((step_seconds(p, rows + 1 + n) + draft) / plain, 1) : 1;
}

static double token_rate(const Pace *p, const AcceptRates *a, SpecKind drafter, int n, int rows) {     // per plain step
    return expected_tokens(a, n) / step_cost(p, drafter, n, rows);
}

// Returns the next depth to compare after n: 1 2 3 4 7 11 15 .. and max. There are few, so that few kinds of steps are
// recorded.
static int next_depth(int n, int max) {
    if (n == max) return max + 1;
    return min_int(n < 4 ? n + 1 : n == 4 ? 7 : n + 4, max);
}

// Returns the depth from 1 to max with the most tokens per second; 0: none is 2 % better than a plain step. Compares
// depths up to twice the deepest one seen.
static int best_depth(const Pace *p, const AcceptRates *a, SpecKind drafter, int max, int rows) {
    int best = 0;
    double best_rate = 1.02;
    for (int n = 1; n <= min_int(max, 2 * depths_seen(a) + 1); n = next_depth(n, max)) {
        const double rate = token_rate(p, a, drafter, n, rows);
        if (rate > best_rate) {
            best = n;
            best_rate = rate;
        }
    }
    return best;
}

// ---- the speculation budget of a session ----
// It is counted in plain steps. Each step adds budget_per_step: text that no source can predict becomes slower by that
// fraction at most. Drafts add the steps that they save and pay the steps that they cost. The text sources start with
// more, since their drafts are shadow drafts first.

static const double budget_per_step = 0.015, budget_start = 0.8, budget_start_text = 1, budget_max = 8;
enum { DRAFTED_MAX = 256,     // steps with drafts, after which one step goes without, to measure plain steps again
       BACKOFF_MAX = 8 };

typedef struct {              // the drafting of a session
    Drafting    options;
    Ngrams      ngrams;
    Drafts      drafts;                // for the next step, after the one token that it runs anyway
    Candidates  candidates;            // of the drafter, for the next step; depth 0: none
    int32_t     grammar_ids[DRAFT_MAX];        // (n_grammar_ids) the continuation that the grammar forces
    int         n_grammar_ids;
    int32_t     shadow[DRAFT_MAX];     // (n_shadow) shadow drafts,
    int         n_shadow, shadow_at;   // the position of the first one,
    SpecKind    shadow_source;         // and where they come from
    AcceptRates accept[SPEC_KINDS];    // by source
    double      budget[SPEC_KINDS];    // by source
    int         backoff;               // a trial of the drafter needs `backoff` times the budget that it may cost
    int         depth;                 // tokens that the drafter makes after the running step
    int         idle_lookups;          // steps in a row without drafts from the text
    int         drafted;               // steps with drafts since the last plain step
    SpecKind    payer;                 // the last source that made drafts: it pays for plain steps that waited for it
} Speculator;

static void speculator_init(Speculator *s) {
    *s = (Speculator){ .ngrams = { .n_draft = 4, .min_match = NGRAM_MIN }, .backoff = 1, .payer = SPEC_NGRAM };
    for (int k = 0; k < SPEC_KINDS; k++) {
        s->accept[k] = accept_init(k == SPEC_NGRAM ? 0.6f : 0.8f);
        s->budget[k] = k == SPEC_NGRAM || k == SPEC_GRAMMAR ? budget_start_text : budget_start;
    }
}

static void speculator_start(Speculator *s, const Drafting *options) {         // a new answer
    s->options = *options;
    s->drafts.n = s->candidates.depth = s->depth = s->n_shadow = s->n_grammar_ids = 0;
    if (options->kind == SPEC_NGRAM_MOD && !ngram_mod.next)
        ngram_mod.next = alloc_or_die((size_t)1 << NGRAM_MOD_BITS, sizeof *ngram_mod.next);
}

static void speculator_free(Speculator *s) {
    free(s->ngrams.newest);
    free(s->ngrams.earlier);
}

static bool uses_drafter(const Drafting *d) { return d->kind >= SPEC_MTP; }
static bool uses_grammar(const Drafting *d) { return d->kind == SPEC_GRAMMAR || d->kind == SPEC_AUTO; }
static bool uses_ngrams(const Drafting *d) {
    return d->kind == SPEC_NGRAM || d->kind == SPEC_NGRAM_MOD || d->kind == SPEC_AUTO;
}

static void add_budget(Speculator *s, SpecKind source, double steps) {
    s->budget[source] = fmin(s->budget[source] + steps, budget_max);
}

// Returns the largest depth, at most max, that the budget can pay for if half of the expected tokens are made.
static int affordable_depth(const Speculator *s, const Pace *p, SpecKind source, SpecKind drafter, int max, int rows) {
    const AcceptRates *a = &s->accept[source];
    while (max > 0 && step_cost(p, drafter, max, rows) - (1 + expected_tokens(a, max)) / 2 > s->budget[source]) max--;
    return max;
}

// Compares the shadow drafts with the text ids (n), once it is known how many of them are right.
static void check_shadow(Speculator *s, const int32_t *ids, int n) {
    const int n_known = n - s->shadow_at;
    int right = 0;
    while (right < min_int(s->n_shadow, n_known) && ids[s->shadow_at + right] == s->shadow[right]) right++;
    if (!s->n_shadow || (right == n_known && right < s->n_shadow)) return;     // the next tokens will tell
    accept_learn(&s->accept[s->shadow_source], s->n_shadow, right);
    if (s->shadow_source == SPEC_NGRAM) ngrams_learn(&s->ngrams, s->n_shadow, right);
    s->n_shadow = 0;
}

static void start_shadow(Speculator *s, SpecKind source, const int32_t *drafts, int n_drafts, int at) {
    if (!n_drafts || s->n_shadow) return;
    memcpy(s->shadow, drafts, (size_t)n_drafts * sizeof *drafts);
    s->n_shadow = n_drafts;
    s->shadow_at = at;
    s->shadow_source = source;
}

static int draft_ngrams(Speculator *s, const int32_t *ids, int n, int max, int32_t *out) {
    const bool table = s->options.kind == SPEC_NGRAM_MOD;
    max = min_int(max, s->ngrams.n_draft);
    ngrams_add(&s->ngrams, ids, n, table);
    if (table) return ngram_mod_look_up(ids, n, max, out);
    return ngrams_look_up(&s->ngrams, ids, n, s->ngrams.min_match, max, out);
}

// Drafts from the grammar, else from n-grams: at most max tokens after ids (n). Returns how many.
static int draft_text(Speculator *s, const int32_t *ids, int n, int max, int32_t *out) {
    const int n_ngram = uses_ngrams(&s->options) && max > 0 ? draft_ngrams(s, ids, n, max, out) : 0;
    if (!s->n_grammar_ids) return n_ngram;
    memcpy(out, s->grammar_ids, sizeof s->grammar_ids);
    return min_int(s->n_grammar_ids, max);
}

// Returns the logarithm of the probability below which one more branch of a tree costs more time than it saves.
static float min_branch_logprob(const Pace *p, const AcceptRates *a, int chain, int tree, int rows) {
    const double step = step_seconds(p, rows + 1 + chain), with_tree = step_seconds(p, rows + 1 + tree);
    if (tree <= chain || step <= 0) return 0;
    return (float)log(fmax((with_tree - step) / (tree - chain) / step * expected_tokens(a, chain), 1e-6));
}

// Both kinds of drafts exist: *n_text from a text source, and a chain of *n_chain from the drafter. Sets how many of
// each are worth running, and drops those from the text if the drafter's make more tokens per second.
static void choose_drafts(Speculator *s, const Pace *p, SpecKind text_source, SpecKind drafter, int *n_text,
                          int *n_chain, int rows) {
    const AcceptRates *text = &s->accept[text_source], *chain = &s->accept[drafter];
    *n_text = depths_seen(text) ? affordable_depth(s, p, text_source, SPEC_OFF, *n_text, rows) : 0;
    *n_text = best_depth(p, text, SPEC_OFF, *n_text, rows);
    if (depths_seen(chain)) *n_chain = best_depth(p, chain, SPEC_OFF, *n_chain, rows);
    if (token_rate(p, text, SPEC_OFF, *n_text, rows) <= token_rate(p, chain, SPEC_OFF, *n_chain, rows)) *n_text = 0;
}

// Makes the drafts of a session for the next step, at most max. ids (n) are its tokens, the one that the step runs
// anyway included. drafter: it made s->candidates; rows: of other sessions in the step.
static void make_drafts(Speculator *s, const Pace *p, SpecKind drafter, const int32_t *ids, int n, int max, int rows) {
    Candidates *c = &s->candidates;
    int32_t text[DRAFT_MAX];
    float min_logprob = -INFINITY;
    max = max_int(max, 0);
    s->drafts.n = 0;
    check_shadow(s, ids, n);
    const int n_found = draft_text(s, ids, n, max, text);
    const SpecKind text_source = s->n_grammar_ids ? SPEC_GRAMMAR :
                                 s->options.kind == SPEC_NGRAM_MOD ? SPEC_NGRAM_MOD : SPEC_NGRAM;
    int n_text = n_found, n_chain = min_int(c->depth, max);
    for (int i = 0; i < n_chain; i++) if (c->logprob[i][0] < logf(s->options.p_min)) n_chain = i;
    if (s->options.kind == SPEC_AUTO) {
        add_budget(s, text_source, budget_per_step);
        add_budget(s, drafter, budget_per_step);
        choose_drafts(s, p, text_source, drafter, &n_text, &n_chain, rows);
        min_logprob = min_branch_logprob(p, &s->accept[drafter], n_chain, s->options.tree, rows);
        if (!n_text) start_shadow(s, text_source, text, n_found, n);
    }
    s->idle_lookups = n_text ? 0 : s->idle_lookups + 1;
    if (n_text) {
        s->drafts.source = text_source;
        make_chain(&s->drafts, text, n_text);
    } else if (n_chain) {
        s->drafts.source = drafter;
        c->depth = n_chain;
        make_tree(&s->drafts, c, max_int(min_int(max, s->options.tree), n_chain), min_logprob);
    }
}

// Returns the depth that saves time and fits the budget; 0: none. An unknown drafter is tried with one token. If a
// known one does not save time at any depth, its rates are forgotten and the backoff doubles: the next trial needs more
// budget.
static int profitable_depth(Speculator *s, const Pace *p, SpecKind drafter, int max, int rows) {
    AcceptRates *a = &s->accept[drafter];
    if (!depths_seen(a))
        return s->budget[drafter] >= fmin(s->backoff * (step_cost(p, drafter, 1, rows) - 1), budget_max);
    if (best_depth(p, a, drafter, max, rows))
        return best_depth(p, a, drafter, affordable_depth(s, p, drafter, drafter, max, rows), rows);
    *a = accept_init(0.8f);
    s->budget[drafter] = fmin(s->budget[drafter], 0);
    s->backoff = min_int(2 * s->backoff, BACKOFF_MAX);
    return 0;
}

// Returns how many tokens, at most max, the drafter makes after the step that runs next. OFF: there is no drafter.
static int choose_depth(Speculator *s, const Pace *p, SpecKind drafter, int max, int rows) {
    if (!uses_drafter(&s->options) || drafter == SPEC_OFF || max <= 0) return 0;
    if (s->options.kind != SPEC_AUTO) return max;
    const bool text_is_good = s->drafts.n && s->drafts.source != drafter && s->accept[s->drafts.source].rate[0] > 0.9f;
    const bool plain = p->step.n_measured[1] < TIMES_FIRST || s->drafted == DRAFTED_MAX || text_is_good;
    const int depth = plain ? 0 : profitable_depth(s, p, drafter, max, rows);
    s->drafted = depth ? s->drafted + 1 : 0;
    return depth;
}

typedef struct {              // a step that is done
    int    accepted;          // of its drafts
    int    rows;              // of other sessions in it
    double seconds;           // since the step before was done, what the host did meanwhile included
    double drafting;          // of these, in which the drafter made the next drafts
    bool   waited;            // without drafts the step would have been issued ahead
} StepDone;

// Learns from a step: rates from its drafts, and the budget pays the time that it took beyond plain steps of as many
// tokens. A time that is more than twice the expected one counts as that: the machine did something else.
static void speculator_learn(Speculator *s, const Pace *p, SpecKind drafter, const StepDone *done) {
    const Drafts *d = &s->drafts;
    const int rows = done->rows + 1;
    const bool is_text = d->source == SPEC_NGRAM || d->source == SPEC_NGRAM_MOD;
    const double plain = step_seconds(p, rows),
                 step = fmin(done->seconds - done->drafting, 2 * step_seconds(p, rows + d->n)),
                 drafting = s->depth ? fmin(done->drafting, 2 * draft_seconds(p, drafter, s->depth)) : 0;
    if (d->n) accept_learn(&s->accept[d->source], d->depth, done->accepted);
    if (d->n && is_text) ngrams_learn(&s->ngrams, d->n, done->accepted);
    if (s->options.kind != SPEC_AUTO || plain <= 0) return;
    add_budget(s, drafter, -drafting / plain);
    if (d->n) s->payer = d->source;
    if (d->n || done->waited) add_budget(s, s->payer, done->accepted + 1 - step / plain);
    if (s->depth) s->payer = drafter;
    if (d->n && s->budget[d->source] >= budget_max) s->backoff = 1;
}

#endif
