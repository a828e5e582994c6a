/* guess.h - drafts without a model: n-grams, trees of candidates, and how many tokens to draft. Arithmetic only.
 *
 * Uses base.h and the limits of gemma4.h. Begin with guess().
 *
 * What may stand behind a session's last token is guessed by: the text itself, where its last tokens have been before
 * (prompt lookup, ngram); a table of what followed the last NGRAM_MOD tokens in any text so far, which all sessions share
 * (ngram-mod); the grammar of the answer, where it leaves one way to go on (grammar); or a drafter. Guesses are a tree,
 * mostly one without branches. Whoever guesses, the model's own choices decide what is said, so all this is about time
 * alone.
 *
 * How far to guess (auto): a step of n rows takes so long, n guesses too, and at every depth so many were right of late. Of all
 * depths, none among them, the one with most tokens a second is taken. But what is not known has to be tried, and what was
 * right may be wrong next: so every step earns a little credit, guesses that save time earn more, and none is made that might
 * cost more than there is. Guesses from the text cost nothing as long as they are only watched.
 *   [1] Types    [2] N-grams    [3] Trees    [4] How far */
#ifndef GUESS_H
#define GUESS_H

// ==== [1] Types =====================================================================================================

typedef enum { SPEC_OFF, SPEC_NGRAM, SPEC_NGRAM_MOD, SPEC_GRAMMAR, SPEC_MTP, SPEC_DFLASH, SPEC_AUTO, SPEC_KINDS } SpecKind;
static const char *const spec_names[] = { "off", "ngram", "ngram-mod", "grammar", "mtp", "dflash", "auto" };

enum { DRAFT_MAX = STEP_ROWS - 1,      // tokens guessed for a step
       DRAFT_DEPTHS = 16,              // of these it is counted how often they were right
       DRAFT_WIDTH = 8 };              // most candidates of a depth

typedef struct {
    SpecKind kind;            // AUTO: drafter, n-grams and grammar, where they are, as far as they pay; others: all they can
    int      most;            // tokens drafted in a step, 1 .. DRAFT_MAX
    int      tree;            // tokens of a tree; 0: chains
    float    least;           // a guess of a drafter that is less likely, by its own account, ends the chain; 0: none does
} Drafting;

typedef struct {              // guesses for a step: number i is its row i + 1
    int      n;
    int32_t  token[DRAFT_MAX];
    int      parent[DRAFT_MAX];        // row that it follows; 0: the token before all of them
    int      depth;           // of the deepest, the first being 1
    bool     branches;
    SpecKind who;             // has guessed
} Drafts;

typedef struct {              // what a drafter holds for likely, for each depth, the likeliest first
    int     depth, width;
    int32_t id[DRAFT_MAX][DRAFT_WIDTH];
    float   log_share[DRAFT_MAX][DRAFT_WIDTH];         // logarithm of its probability, where the ones before are right
} Candidates;

typedef struct {              // what an answer took
    int    n_passes;          // steps that had drafts
    int    by[SPEC_KINDS];    // of these, by who guessed
    int    drafted, accepted; // tokens
    int    tried[DRAFT_DEPTHS], right[DRAFT_DEPTHS];   // by depth: looked at, as all before it were right; right
    double draft_seconds, verify_seconds;
} DraftCount;

typedef struct {              // seconds by a number, of rows or guesses
    double of[STEP_ROWS + 1]; // 0: not measured yet
    int    n[STEP_ROWS + 1];  // how often it was measured
} Times;
typedef struct Pace {         // how long a step of one session takes, by its rows; a draft, by its tokens
    Times  step, draft;
    double draft_share;       // bytes that a draft of one token reads, as a part of a step's
    bool   records;           // the backend records steps: the first of a kind is slow
} Pace;

// ==== [2] N-grams ===================================================================================================

enum { NGRAM_BITS = 16, NGRAM_LEAST = 3, NGRAM_MOST = 24,          // tokens of a match: to be looked at, that count
       NGRAM_TRIES = 16,                // earlier places that are compared
       NGRAM_MOD = 12, NGRAM_MOD_BITS = 22 };

// Where in the session's tokens each run of NGRAM_LEAST begins: newest[hash], and before it earlier[place], as far back
// as the context. How far to guess follows what became of the guesses before: twice as far where all were right, as far
// as they were right else; and where none was, a longer match is asked for.
typedef struct {
    int32_t *newest;          // (2^NGRAM_BITS) one behind the place; 0: nowhere
    int32_t *earlier;         // (n_room)
    int      n, n_room;       // places entered
    int      reach, least;    // tokens to guess; tokens that have to match
} Ngrams;

static struct {               // ngram-mod: what followed the last NGRAM_MOD tokens, wherever that was last; hashes may collide
    int32_t *next;            // (2^NGRAM_MOD_BITS) token + 1; 0: nothing
} ngram_mod;

static uint64_t hash_ids(const int32_t *ids, int n) {
    uint64_t h = 0;
    for (int i = 0; i < n; i++) h = h * 6364136223846793005u + (uint32_t)ids[i] + 1;
    return h * 0x9e3779b97f4a7c15u;
}

// Enters the tokens that have come since; where the text was cut back, all of it again.
static void ngrams_enter(Ngrams *g, const int32_t *ids, int n, bool shared) {
    if (!g->newest) g->newest = alloc_or_die((size_t)1 << NGRAM_BITS, sizeof *g->newest);
    if (g->n_room < n) {
        g->n_room = n + 4096;
        int32_t *more = realloc(g->earlier, (size_t)g->n_room * sizeof *more);
        if (!more) die("out of memory: cannot allocate %zu bytes", (size_t)g->n_room * sizeof *more);
        g->earlier = more;
    }
    if (g->n > n) {
        memset(g->newest, 0, ((size_t)1 << NGRAM_BITS) * sizeof *g->newest);
        g->n = 0;
    }
    for (; g->n + NGRAM_LEAST <= n; g->n++) {          // the last place is left out until something follows it
        int32_t *head = &g->newest[hash_ids(ids + g->n, NGRAM_LEAST) >> (64 - NGRAM_BITS)];
        g->earlier[g->n] = *head;
        *head = g->n + 1;
        const int at = g->n + NGRAM_LEAST - NGRAM_MOD - 1;             // what follows a run there is known now
        if (shared && at >= 0) ngram_mod.next[hash_ids(ids + at, NGRAM_MOD) >> (64 - NGRAM_MOD_BITS)] = ids[at + NGRAM_MOD] + 1;
    }
}

// Guesses at most `most` tokens that follow ids (n) -> how many. A guess is what stood behind the earlier place that
// shares most tokens with the end of ids, the newest of several.
static int ngrams_look_up(const Ngrams *g, const int32_t *ids, int n, int least, int most, int32_t *out) {
    int best = 0, from = 0, tries = NGRAM_TRIES;
    if (n <= NGRAM_LEAST) return 0;
    int place = g->newest[hash_ids(ids + n - NGRAM_LEAST, NGRAM_LEAST) >> (64 - NGRAM_BITS)];
    for (; place && tries--; place = g->earlier[place - 1]) {
        const int end = place - 1 + NGRAM_LEAST;       // behind the earlier run
        int same = 0;
        if (end >= n) continue;
        while (same < NGRAM_MOST && same < end && ids[end - 1 - same] == ids[n - 1 - same]) same++;
        if (same > best) best = same, from = end;
    }
    if (best < least) return 0;
    const int period = n - from;                       // what is guessed may run into the guess itself
    for (int i = 0; i < most; i++) out[i] = i < period ? ids[from + i] : out[i - period];
    return most;
}

static int ngram_mod_look_up(const int32_t *ids, int n, int most, int32_t *out) {
    int32_t run[NGRAM_MOD + DRAFT_MAX];
    int found = 0;
    if (n < NGRAM_MOD) return 0;
    memcpy(run, ids + n - NGRAM_MOD, NGRAM_MOD * sizeof *run);
    for (; found < most; found++) {
        const int32_t next = ngram_mod.next[hash_ids(run + found, NGRAM_MOD) >> (64 - NGRAM_MOD_BITS)];
        if (!next) break;
        out[found] = run[NGRAM_MOD + found] = next - 1;
    }
    return found;
}

// Of n guesses the first `right` were.
static void ngrams_learn(Ngrams *g, int n, int right) {
    g->reach = right == n ? min_int(2 * n, DRAFT_MAX) : max_int(right + 1, 2);
    g->least = right ? NGRAM_LEAST : min_int(g->least + 2, NGRAM_MOST);
}

// ==== [3] Trees =====================================================================================================

static int add_guess(Drafts *d, int32_t token, int parent, int depth) {                // -> its row
    d->token[d->n] = token;
    d->parent[d->n] = parent;
    d->branches |= parent != d->n;
    d->depth = max_int(d->depth, depth);
    return ++d->n;
}

static void chain_of(Drafts *d, const int32_t *ids, int n) {
    *d = (Drafts){ .who = d->who };
    for (int i = 0; i < n; i++) add_guess(d, ids[i], i, i + 1);
}

// The likeliest tree of at most `most` candidates (DDTree): first the chain of the likeliest at every depth, then
// whatever has the largest product of shares along its path, one at a time, as long as its logarithm is more than
// `least`; it opens the next candidate of its depth and the first one behind it.
static void tree_of(Drafts *d, const Candidates *c, int most, float least) {
    typedef struct { float share; int parent, depth, rank; } Branch;
    Branch open[2 * STEP_ROWS];
    int n_open = 0, row = 0;
    float share = 0;
    *d = (Drafts){ .who = d->who };
    for (int i = 0; i < min_int(c->depth, most); i++) {
        if (c->width > 1) open[n_open++] = (Branch){ share + c->log_share[i][1], row, i, 1 };
        share += c->log_share[i][0];
        row = add_guess(d, c->id[i][0], row, i + 1);
    }
    while (d->n < most && n_open) {
        int best = 0;
        for (int i = 1; i < n_open; i++) if (open[i].share > open[best].share) best = i;
        const Branch b = open[best];
        if (b.share <= least) break;
        open[best] = open[--n_open];
        row = add_guess(d, c->id[b.depth][b.rank], b.parent, b.depth + 1);
        if (b.rank + 1 < c->width) {
            const float *shares = c->log_share[b.depth];
            open[n_open++] = (Branch){ b.share - shares[b.rank] + shares[b.rank + 1], b.parent, b.depth, b.rank + 1 };
        }
        if (b.depth + 1 < c->depth) open[n_open++] = (Branch){ b.share + c->log_share[b.depth + 1][0], row, b.depth + 1, 0 };
    }
}

// ==== [4] How far ===================================================================================================

typedef struct {              // how often guesses are right, at each depth where all before were: right[0] is the first
    float right[DRAFT_MAX];
    int   seen[DRAFT_MAX];    // guesses that this rests on; old ones fade. 0: none, it is as often as one before
} Odds;

enum { ODDS_MEMORY = 24,      // guesses that a share of them rests on,
       ODDS_PRIOR = 1, ODDS_DEEPER = 3 };              // and those that are supposed at first, of the first depth and of others

static Odds odds_new(float first) {
    Odds o = { { first }, { 0 } };
    return o;
}

static float odds_at(const Odds *o, int d) {           // at depth d, or where it was seen last before that
    while (d > 0 && !o->seen[d]) d--;
    return o->right[d];
}

static int odds_deepest(const Odds *o) {               // depths that were seen
    int n = 0;
    while (n < DRAFT_MAX && o->seen[n]) n++;
    return n;
}

// Of n guesses, each behind the one before, the first `right` were. What was known of depths that nobody looked at
// comes nearer to the depth before, so that they are looked at again some day.
static void odds_learn(Odds *o, int n, int right) {
    for (int d = 0; d < DRAFT_MAX; d++) {
        if (d < n && d <= right) {
            o->right[d] = odds_at(o, d);
            o->seen[d] = min_int(o->seen[d] + 1, ODDS_MEMORY);
            o->right[d] += ((d < right) - o->right[d]) / (float)(o->seen[d] + (d ? ODDS_DEEPER : ODDS_PRIOR));
        } else if (o->seen[d]) {
            o->right[d] += (o->right[d - 1] - o->right[d]) / 32;
        }
    }
}

static double tokens_of(const Odds *o, int n) {        // that a step with n guesses makes
    double tokens = 1, all = 1;
    for (int d = 0; d < n; d++) tokens += all *= odds_at(o, d);
    return tokens;
}

enum { TIMES_FIRST = 4 };     // the least of the first few is taken, but for the very first: caches are cold

// Seconds that n should take: between those known, in proportion; behind them, for each one more what it was from 1 to
// the last of them, or, as long as no other is known, `each` times that of 1.
static double times_of(const Times *t, int n, double each) {
    const double *of = t->of;
    int low = n, high = n;
    while (low > 1 && of[low] == 0) low--;
    while (high < STEP_ROWS && of[high] == 0) high++;
    if (low == n) return of[n];
    if (of[high] > 0) return of[low] > 0 ? of[low] + (of[high] - of[low]) * (n - low) / (high - low) : of[high];
    return of[low] + (n - low) * (low > 1 ? (of[low] - of[1]) / (low - 1) : of[1] * each);
}

// The machine may become slower or faster as a whole, so what is not measured now follows what is, half of the way.
static void times_learn(Pace *p, Times *t, int n, double taken, double expected) {
    double *was = &t->of[n];
    const int before = t->n[n]++;
    if (!before && p->records) return;
    if (expected > 0) taken = fmin(taken, 2 * expected);               // now and then it does something else
    if (before < 2) *was = taken;
    else if (before < TIMES_FIRST) *was = fmin(*was, taken);
    else {
        const double now = *was + (taken - *was) / 8, half = sqrt(now / *was);
        for (int i = 0; i <= STEP_ROWS; i++) p->step.of[i] *= half, p->draft.of[i] *= half;
        *was = now;
    }
}

static double step_seconds(const Pace *p, int rows) { return times_of(&p->step, min_int(rows, STEP_ROWS), 0.08); }

// Before it was measured, somewhat more than its share of bytes: small matrices are slow. DFlash makes all guesses at once.
static double draft_seconds(const Pace *p, SpecKind who, int n) {
    const double known = times_of(&p->draft, n, who == SPEC_MTP ? 1 : 0.08);
    return known > 0 ? known : 1.5 * p->draft_share * step_seconds(p, 1) * (who == SPEC_MTP ? n : 1);
}

static void step_took(Pace *p, int rows, double seconds) { times_learn(p, &p->step, rows, seconds, step_seconds(p, rows)); }

static void draft_took(Pace *p, SpecKind who, int n, double seconds) {
    times_learn(p, &p->draft, n, seconds, draft_seconds(p, who, n));
}

// What a step with n guesses takes, beside `rows` other rows, in steps without: as much at least, whatever was
// measured. who: makes them; OFF: they are there.
static double price_of(const Pace *p, SpecKind who, int n, int rows) {
    const double plain = step_seconds(p, rows + 1), draft = who != SPEC_OFF && n ? draft_seconds(p, who, n) : 0;
    return plain > 0 ? fmax((step_seconds(p, rows + 1 + n) + draft) / plain, 1) : 1;
}

static double rate_of(const Pace *p, const Odds *o, SpecKind who, int n, int rows) {   // tokens in the time of a plain step
    return tokens_of(o, n) / price_of(p, who, n, rows);
}

// The depth that is tried behind n: 1 2 3 4 7 11 15 .. and `most`, so that few kinds of steps are recorded.
static int next_depth(int n, int most) { return n == most ? most + 1 : min_int(n < 4 ? n + 1 : n == 4 ? 7 : n + 4, most); }

// The depth from 1 to `most` that makes most tokens a second; 0: plain steps make as many, or nearly so. It goes twice
// as deep as guesses were ever seen, and no deeper.
static int best_depth(const Pace *p, const Odds *o, SpecKind who, int most, int rows) {
    int best = 0;
    double rate = 1.02;
    for (int n = 1; n <= min_int(most, 2 * odds_deepest(o) + 1); n = next_depth(n, most)) {
        const double with = rate_of(p, o, who, n, rows);
        if (with > rate) best = n, rate = with;
    }
    return best;
}

// Credit is counted in plain steps. Each step earns a share of one, by which text that nobody can guess may become
// slower; guesses earn what they save and pay what they cost. Text gets more at first: it was watched before.
static const double credit_of_step = 0.015, credit_first = 0.8, credit_first_text = 1, credit_most = 8;
enum { DRAFTED_MOST = 256,    // steps with guesses, after which one goes without, to see how long those take
       DOUBT_MOST = 8 };

typedef struct {              // the drafting of a session
    Drafting   how;
    Ngrams     ngrams;
    Drafts     drafts;        // for the step that comes, behind the one token in todo
    Candidates found;         // what the drafter has found for it; depth 0: nothing
    int32_t    only[DRAFT_MAX];        // (n_only) what the grammar says
    int        n_only;
    int32_t    watched[DRAFT_MAX];     // guesses from the text that were not run, to see what they would have been worth,
    int        n_watched, watched_at;  // and where their text goes on
    SpecKind   watched_who;
    Odds       odds[SPEC_KINDS];
    double     credit[SPEC_KINDS];
    int        doubt;         // credit that a trial of the drafter needs, as a multiple of what it might cost
    int        depth;         // guesses to ask of the drafter behind the step that runs
    int        missed;        // times in a row that the text had nothing to guess
    int        drafted;       // steps since the last plain one
} Guesser;

static void guesser_init(Guesser *g) {
    *g = (Guesser){ .ngrams = { .reach = 4, .least = NGRAM_LEAST }, .doubt = 1 };
    for (int k = 0; k < SPEC_KINDS; k++) {
        g->odds[k] = odds_new(k == SPEC_NGRAM ? 0.6f : 0.8f);
        g->credit[k] = k == SPEC_NGRAM || k == SPEC_GRAMMAR ? credit_first_text : credit_first;
    }
}

static void guesser_start(Guesser *g, const Drafting *how) {           // an answer
    g->how = *how;
    g->drafts.n = g->found.depth = g->depth = g->n_watched = g->n_only = 0;
    if (how->kind == SPEC_NGRAM_MOD && !ngram_mod.next)
        ngram_mod.next = alloc_or_die((size_t)1 << NGRAM_MOD_BITS, sizeof *ngram_mod.next);
}

static void guesser_free(Guesser *g) {
    free(g->ngrams.newest);
    free(g->ngrams.earlier);
}

static bool uses_drafter(const Drafting *d) { return d->kind >= SPEC_MTP; }
static bool uses_grammar(const Drafting *d) { return d->kind == SPEC_GRAMMAR || d->kind == SPEC_AUTO; }
static bool uses_ngrams(const Drafting *d) {
    return d->kind == SPEC_NGRAM || d->kind == SPEC_NGRAM_MOD || d->kind == SPEC_AUTO;
}

static void earn(Guesser *g, SpecKind who, double steps) { g->credit[who] = fmin(g->credit[who] + steps, credit_most); }

// How many guesses may be made, of at most `most`: there is credit for what they cost if half of what is expected of
// them is right.
static int affordable(const Guesser *g, const Pace *p, SpecKind who, SpecKind maker, int most, int rows) {
    while (most > 0 && price_of(p, maker, most, rows) - (1 + tokens_of(&g->odds[who], most)) / 2 > g->credit[who]) most--;
    return most;
}

// Guesses from the text that were not run are compared with ids (n) as far as they have come by now.
static void learn_watched(Guesser *g, const int32_t *ids, int n) {
    const int come = n - g->watched_at;
    int right = 0;
    while (right < min_int(g->n_watched, come) && ids[g->watched_at + right] == g->watched[right]) right++;
    if (!g->n_watched || (right == come && right < g->n_watched)) return;              // they may go on
    odds_learn(&g->odds[g->watched_who], g->n_watched, right);
    if (g->watched_who == SPEC_NGRAM) ngrams_learn(&g->ngrams, g->n_watched, right);
    g->n_watched = 0;
}

// Guesses what follows ids (n) from n-grams -> how many of at most `most`.
static int guess_ngrams(Guesser *g, const int32_t *ids, int n, int most, int32_t *out) {
    const bool table = g->how.kind == SPEC_NGRAM_MOD;
    most = min_int(most, g->ngrams.reach);
    ngrams_enter(&g->ngrams, ids, n, table);
    return table ? ngram_mod_look_up(ids, n, most, out) : ngrams_look_up(&g->ngrams, ids, n, g->ngrams.least, most, out);
}

// The share below which a branch of a tree costs more than it brings; its logarithm.
static float least_share(const Pace *p, const Odds *o, int chain, int tree, int rows) {
    const double step = step_seconds(p, rows + 1 + chain), with = step_seconds(p, rows + 1 + tree);
    return tree > chain && step > 0 ? (float)log(fmax((with - step) / (tree - chain) / step * tokens_of(o, chain), 1e-6)) : 0;
}

// How many of the guesses that are there to run: those from the text, by source, or else a chain of the drafter's.
static void choose_guesses(Guesser *g, const Pace *p, SpecKind source, SpecKind who, int *from_text, int *chain, int rows) {
    const Odds *text = &g->odds[source], *drafter = &g->odds[who];
    *from_text = odds_deepest(text) ? affordable(g, p, source, SPEC_OFF, *from_text, rows) : 0;
    *from_text = best_depth(p, text, SPEC_OFF, *from_text, rows);
    if (odds_deepest(drafter)) *chain = best_depth(p, drafter, SPEC_OFF, *chain, rows);
    if (rate_of(p, text, SPEC_OFF, *from_text, rows) <= rate_of(p, drafter, SPEC_OFF, *chain, rows)) *from_text = 0;
}

// Makes the drafts for a step of a session whose text, the token that runs next included, is ids (n): of what the grammar or
// else n-grams say, and what the drafter has found, that which makes more tokens a second. who: the drafter; rows: of others in
// the step.
static void guess(Guesser *g, const Pace *p, SpecKind who, const int32_t *ids, int n, int most, int rows) {
    Candidates *c = &g->found;
    int32_t text[DRAFT_MAX];
    float least = -INFINITY;
    most = max_int(most, 0);
    g->drafts.n = 0;
    learn_watched(g, ids, n);
    int found = uses_ngrams(&g->how) && most > 0 ? guess_ngrams(g, ids, n, most, text) : 0;
    const SpecKind source = g->n_only ? SPEC_GRAMMAR : g->how.kind == SPEC_NGRAM_MOD ? SPEC_NGRAM_MOD : SPEC_NGRAM;
    if (g->n_only) memcpy(text, g->only, sizeof text), found = min_int(g->n_only, most);
    int from_text = found, chain = min_int(c->depth, most);
    for (int i = 0; i < chain; i++) if (c->log_share[i][0] < logf(g->how.least)) chain = i;
    if (g->how.kind == SPEC_AUTO) {
        earn(g, source, credit_of_step);
        earn(g, who, credit_of_step);
        if (c->depth) earn(g, who, price_of(p, SPEC_OFF, c->depth, rows) - price_of(p, who, c->depth, rows));
        choose_guesses(g, p, source, who, &from_text, &chain, rows);
        least = least_share(p, &g->odds[who], chain, g->how.tree, rows);
        if (found && !from_text && !g->n_watched) {
            memcpy(g->watched, text, (size_t)found * sizeof *text);
            g->n_watched = found, g->watched_at = n, g->watched_who = source;
        }
    }
    g->missed = from_text ? 0 : g->missed + 1;
    if (from_text) {
        g->drafts.who = source;
        chain_of(&g->drafts, text, from_text);
    } else if (chain) {
        g->drafts.who = who;
        c->depth = chain;
        tree_of(&g->drafts, c, max_int(min_int(most, g->how.tree), chain), least);
    }
}

// The depth that pays, 0: none. A drafter of which nothing is known is tried with one guess; where that is right, it
// goes on as long as it pays. Where it does not, all is forgotten, and the next trial needs more credit.
static int paying_depth(Guesser *g, const Pace *p, SpecKind who, int most, int rows) {
    Odds *o = &g->odds[who];
    if (!odds_deepest(o)) return g->credit[who] >= fmin(g->doubt * (price_of(p, who, 1, rows) - 1), credit_most);
    if (best_depth(p, o, who, most, rows)) return best_depth(p, o, who, affordable(g, p, who, who, most, rows), rows);
    *o = odds_new(0.8f);
    g->credit[who] = fmin(g->credit[who], 0);
    g->doubt = min_int(2 * g->doubt, DOUBT_MOST);
    return 0;
}

// How many drafts the drafter makes after the step that is about to run. who: the drafter; OFF: there is none.
static int depth_wanted(Guesser *g, const Pace *p, SpecKind who, int most, int rows) {
    if (!uses_drafter(&g->how) || who == SPEC_OFF || most <= 0) return 0;
    if (g->how.kind != SPEC_AUTO) return most;
    const bool text_will_do = g->drafts.n && g->drafts.who != who && g->odds[g->drafts.who].right[0] > 0.9f;
    const bool plain = p->step.n[1] < TIMES_FIRST || g->drafted == DRAFTED_MOST || text_will_do;
    const int depth = plain ? 0 : paying_depth(g, p, who, most, rows);
    g->drafted = depth ? g->drafted + 1 : 0;
    return depth;
}

// Of the drafts, a path of so many was right. rows: of others in the step.
static void guesser_learn(Guesser *g, const Pace *p, int right, int rows) {
    const Drafts *d = &g->drafts;
    odds_learn(&g->odds[d->who], d->depth, right);
    if (d->who == SPEC_NGRAM || d->who == SPEC_NGRAM_MOD) ngrams_learn(&g->ngrams, d->n, right);
    if (g->how.kind != SPEC_AUTO) return;
    earn(g, d->who, right + 1 - price_of(p, SPEC_OFF, d->n, rows));
    if (g->credit[d->who] >= credit_most) g->doubt = 1;
}

#endif
