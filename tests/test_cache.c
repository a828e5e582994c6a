/* test_cache.c - windows, rings, tied and shared caches, trees, sessions: the guarantees of step() and commit().
 *
 * It tests one property in many forms: the logits of a row depend only on the tokens on its path. They do not depend on
 * the chunks of the prompt, on where rings wrapped, on rejected drafts, on other sessions in the step, or on what a
 * session held before. Equal means equal bits. The reference is the simplest run: one token per step (t.ref), or a
 * session without drafts. test_forward.c checks that those logits are correct. Two tests do not compare runs with each
 * other: "poison" (rows outside the window are not read, rows at its edge are) and "tied" (tied == untied).
 *
 * Models are made by make_gguf. micro-*: window 32, ring 128 slots; tiny-e: window 64, ring 128 slots, which is window
 * - 1 + STEP_ROWS rounded up by one, so a ring that is too short fails there first. */
#define TESTING
#define CPU_IMPLEMENTATION     // it looks at rows of the cache
#include "../gemma4.c"
#include "steps.h"
#include "test.h"
#include <sys/mman.h>
#include <sys/wait.h>

#ifdef SANITIZED
enum { FEWER = 8 };           // steps are thirty times slower: every eighth combination, a few models
#else
enum { FEWER = 1 };
#endif
enum { N_SEQS = 3, N_BATCH = 400, N_TEXT = 720, N_CTX = 768 };

static struct {               // the model under test
    char    name[80];         // file and cache type
    char    path[256];
    ModelOptions options;
    Model  *m;
    // this model tests one of every `stride` combinations of lengths and sizes, another one than the next model
    int     number, stride;
    int     rounds;           // of random drafts
    int     vocab, window, ring;       // window in tokens; slots of a sliding layer
    int32_t text[N_TEXT];
    int     n_ref;
    float  *ref;              // (n_ref, vocab) logits of text, from single steps
} t;

static bool my_turn(size_t i) { return (i + (size_t)t.number) % (size_t)t.stride == 0; }    // true: test combination i

static uint32_t random_state = 1;
static int rnd(int n) {       // 0 .. n-1
    random_state = random_state * 1664525u + 1013904223u;
    return (int)((random_state >> 8) % (uint32_t)n);
}

// ---- files ----------------------------------------------------------------------------------------------------------

static const struct { const char *preset, *quant; } files[] = {
    { "micro-dense", "f16" }, { "micro-moe", "f16" }, { "micro-e", "f16" }, { "micro-e", "q8_0" }, { "tiny-e",
             "q4_k_m" }
};
enum { MICRO_DENSE, MICRO_MOE, MICRO_E, MICRO_E_Q8, TINY_E, N_FILES };

static char dir[200];         // has the models; removed at exit

static const char *file_path(int file) {
    static char path[sizeof dir + 40];
    snprintf(path, sizeof path, "%s/%s-%s.gguf", dir, files[file].preset, files[file].quant);
    return path;
}

static pid_t owner;           // the process that made them

static void remove_files(void) {
    if (getpid() != owner) return;
    for (int i = 0; i < N_FILES; i++) unlink(file_path(i));
    rmdir(dir);
}

static void make_files(void) {
    const char *build = getenv("BUILD"), *tmp = getenv("TMPDIR");
    char command[1024];
    snprintf(dir, sizeof dir, "%.150s/test_cache.XXXXXX", tmp ? tmp : "/tmp");
    if (!mkdtemp(dir)) die("%s: %s", dir, strerror(errno));
    owner = getpid();
    atexit(remove_files);
    for (int i = 0; i < N_FILES; i++) {
        snprintf(command, sizeof command, "'%.300s/make_gguf' --preset %s --quant %s --seed 11 --out '%s'",
                 build ? build : "build", files[i].preset, files[i].quant, file_path(i));
        if (system(command))
            die("cannot make a model; try make test-programs, and run this from the repository root: %s", command);
    }
}

// ---- running and comparing ------------------------------------------------------------------------------------------

static Model *open_model(const char *path, ModelOptions o) {
    Model *m = alloc_or_die(1, sizeof *m);
    load_model(m, path, cpu_ops(), o, NULL);
    return m;
}

static void close_model(Model *m) {
    free_model(m);
    free(m);
}

static const float *logits(const Model *m, int row) {  // of the last step, in the CPU backend's memory
    return m->s.logits + (size_t)row * (size_t)m->config.vocab;
}

static float *copy_logits(const Model *m, int n_rows) {            // freed by the caller
    const size_t n = (size_t)n_rows * (size_t)m->config.vocab;
    float *copy = alloc_or_die(n, sizeof *copy);
    memcpy(copy, logits(m, 0), n * sizeof *copy);
    return copy;
}

static const float *expected(int pos) { return t.ref + (size_t)pos * (size_t)t.vocab; }

static bool equal(const float *a, const float *b) { return !memcmp(a, b, (size_t)t.vocab * sizeof *a); }

// Counts one case: n rows of logits are equal bit for bit. Prints the first difference: row, logit, want and got.
__attribute__((format(printf, 5, 6)))
static bool same_rows(int line, const float *got, const float *want, int n, const char *fmt, ...) {
    char text[200];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    int r = 0, i = 0;
    while (r < n && equal(got + (size_t)r * (size_t)t.vocab, want + (size_t)r * (size_t)t.vocab)) r++;
    if (r == n) return test_check(1, __FILE__, line, " ");
    got += (size_t)r * (size_t)t.vocab;
    want += (size_t)r * (size_t)t.vocab;
    while (i < t.vocab - 1 && !memcmp(got + i, want + i, sizeof *got)) i++;
    return test_check(0, __FILE__, line, "%s: %s: row %d of %d: logit %d: expected %.9g, got %.9g", t.name, text, r, n,
                      i, (double)want[i], (double)got[i]);
}
#define SAME(got, want, n, ...) same_rows(__LINE__, got, want, n, __VA_ARGS__)

enum { NONE, LAST, ALL };     // rows that need logits

// Runs n tokens as a chain, without commit.
static void run_chain(Model *m, int seq, const int32_t *tokens, int n, int want) {
    static StepRow rows[N_BATCH];
    for (int i = 0; i < n; i++)
        rows[i] = (StepRow){ .token = tokens[i], .parent = i - 1, .output = want == ALL ||
                             (want == LAST && i == n - 1) };
    step(m, &(StepSeg){ .seq = seq, .kind = SEG_CHAIN, .n = n, .rows = rows }, 1);
}

static void accept_rows(Model *m, int n) { commit(m, &(int32_t){ n }, NULL); }

// Commits the first n tokens of the text to session seq, in chunks below and above STEP_ROWS.
static void fill(Model *m, int seq, int n) {
    reset_session(m, seq);
    for (int at = 0, k = 0; at < n; k++) {
        const int chunk = min_int(n - at, k % 2 ? 100 : 48);
        run_chain(m, seq, t.text + at, chunk, NONE);
        accept_rows(m, chunk);
        at += chunk;
    }
}

// ---- drafts ----

static void random_tokens(StepRow *rows, int n, int want_percent) {
    for (int i = 0; i < n; i++)
        rows[i] = (StepRow){ .token = rnd(t.vocab), .parent = i - 1, .output = rnd(100) < want_percent };
}

// Makes a tree of n rows whose branches are interleaved, with about n_roots roots and paths of at most max_path rows.
static void random_tree(StepRow *rows, int n, int n_roots, int max_path, int want_percent) {
    int length[STEP_ROWS];
    random_tokens(rows, n, want_percent);
    for (int i = 0; i < n; i++) {
        int parent = i < n_roots ? -1 : rnd(2) ? rnd(i) : i - 1 - rnd(min_int(i, 3));
        if (parent >= 0 && length[parent] == max_path) parent = -1;
        rows[i].parent = parent;
        length[i] = parent < 0 ? 1 : length[parent] + 1;
    }
}

// The rows from a root to `node`, root first. Returns their number.
static int path_to(const StepRow *rows, int node, int32_t *path) {
    int n = 0;
    for (int i = node; i >= 0; i = rows[i].parent) n++;
    for (int i = node, k = n; i >= 0; i = rows[i].parent) path[--k] = i;
    return n;
}

// Compares every row of the tree in session seq with its path as a chain in session `other`, which has the same tokens.
// Both keep their lengths; the tree was the last step, with logits for all rows.
static void compare_tree(Model *m, int seq, int other, StepRow *rows, int n, const char *what) {
    bool leaf[STEP_ROWS];
    for (int i = 0; i < n; i++) {
        rows[i].output = leaf[i] = true;
        if (rows[i].parent >= 0) leaf[rows[i].parent] = false;
    }
    const StepSeg seg = { .seq = seq, .kind = SEG_TREE, .n = n, .rows = rows };
    step(m, &seg, 1);
    float *want = copy_logits(m, n);
    for (int i = 0; i < n; i++) {
        int32_t path[STEP_ROWS], tokens[STEP_ROWS];
        if (!leaf[i]) continue;
        const int depth = path_to(rows, i, path);
        for (int k = 0; k < depth; k++) tokens[k] = rows[path[k]].token;
        run_chain(m, other, tokens, depth, ALL);
        int k = 0;
        while (k < depth - 1 && equal(want + (size_t)path[k] * (size_t)t.vocab, logits(m, k))) k++;
        SAME(want + (size_t)path[k] * (size_t)t.vocab, logits(m, k), 1,
             "%s: tree of %d at length %d: row %d, depth %d, against its path as a chain",
             what, n, m->len[seq], (int)path[k], k);
    }
    step(m, &seg, 1);
    SAME(logits(m, 0), want, n, "%s: tree of %d at length %d, run again", what, n, m->len[seq]);
    free(want);
}

// ---- access to caches ------

// The layers that own a cache come first, and caches are in the order of layers, so cache i belongs to layer i.
static bool is_ring(const Model *m, int i) { return m->config.layer[i].is_swa; }

// Replaces all rings by empty ones with the given number of slots. Returns their memory, to be freed after the model.
static void *replace_rings(Model *m, int slots) {
    Arena a = { 0 };
    for (int pass = 0; pass < 2; pass++) {
        if (pass) a = (Arena){ .base = alloc_or_die(a.used, 1) };
        for (int i = 0; i < m->n_caches; i++) {
            if (!is_ring(m, i)) continue;
            m->caches[i].slots = slots;
            take_cache(&a, &m->caches[i]);
        }
    }
    return a.base;
}

static void poison_row(const Cache *c, int seq, int slot) {        // writes NaN in any type
    for (int g = 0; g < c->n_kv_heads; g++) {
        memset(kv_row(c, &c->k, seq, g, slot), 0xff, kv_row_bytes(c->k.type, c->k.dim));
        memset(kv_row(c, &c->v, seq, g, slot), 0xff, kv_row_bytes(c->v.type, c->v.dim));
        if (c->k.scale) memset(kv_scales(c, &c->k, seq, g, slot), 0xff, kv_scale_bytes(c->k.type, c->k.dim));
        if (c->v.scale) memset(kv_scales(c, &c->v, seq, g, slot), 0xff, kv_scale_bytes(c->v.type, c->v.dim));
    }
}

// Writes NaN to all rows that the next row of session seq must not read: ring slots whose position is outside [len -
// (window - 1), len), global slots from len on, and the staging cache.
static void poison_unseen(Model *m, int seq) {
    const int len = m->len[seq];
    for (int i = 0; i < m->n_caches; i++) {
        const Cache *c = &m->caches[i];
        for (int slot = 0; slot < c->slots; slot++) {
            // the newest position in the slot
            const int pos = is_ring(m, i) ? len - 1 - ((len - 1 - slot) % c->slots + c->slots) % c->slots : slot;
            if (is_ring(m, i) ? pos < max_int(0, len - (t.window - 1)) : pos >= len) poison_row(c, seq, slot);
        }
        if (!is_ring(m, i)) continue;
        const Cache stage = staging_for(m, c);
        for (int slot = 0; slot < stage.slots; slot++) poison_row(&stage, 0, slot);
    }
}

static uint64_t cache_hash(const Model *m, int seq) {  // hash of the rows of session seq in all layers
    uint64_t h = 0;
    for (int i = 0; i < m->n_caches; i++) {
        const Cache *c = &m->caches[i];
        const size_t rows = (size_t)c->n_kv_heads * (size_t)c->slots;
        h = h * 31 + hash_bytes(kv_row(c, &c->k, seq, 0, 0), rows * kv_row_bytes(c->k.type, c->k.dim));
        h = h * 31 + hash_bytes(kv_row(c, &c->v, seq, 0, 0), rows * kv_row_bytes(c->v.type, c->v.dim));
        if (c->k.scale)
            h = h * 31 + hash_bytes(kv_scales(c, &c->k, seq, 0, 0), rows * kv_scale_bytes(c->k.type, c->k.dim));
        if (c->v.scale)
            h = h * 31 + hash_bytes(kv_scales(c, &c->v, seq, 0, 0), rows * kv_scale_bytes(c->v.type, c->v.dim));
    }
    return h;
}

// ---- the model under test ----

static void open_test(int file, KvType k, KvType v, KvType ring) {
    snprintf(t.path, sizeof t.path, "%s", file_path(file));
    snprintf(t.name, sizeof t.name, "%s-%s %s %s, rings %s", files[file].preset, files[file].quant, kv_names[k],
             kv_names[v], ring ? kv_names[ring] : "as usual");
    t.options = (ModelOptions){ .n_ctx = N_CTX, .n_seqs = N_SEQS, .n_batch = N_BATCH, .n_logits = N_BATCH, .k_type = k,
                                .v_type = v, .ring_type = ring };
    t.m = open_model(t.path, t.options);
    t.vocab = t.m->config.vocab;
    t.window = t.m->config.n_swa;
    t.ring = t.m->caches[0].slots;
    CHECK(is_ring(t.m, 0) && t.ring >= t.window - 1 + STEP_ROWS && t.ring % TILE_SLOTS == 0,
          "%s: window %d, ring of %d slots", t.name, t.window, t.ring);
    random_state = 1;
    for (int i = 0; i < N_TEXT; i++) t.text[i] = rnd(t.vocab);
    t.n_ref = max_int(FEWER > 1 ? 0 : 10 * t.window, 420);
    t.ref = alloc_or_die((size_t)t.n_ref * (size_t)t.vocab, sizeof *t.ref);
    for (int i = 0; i < t.n_ref; i++) {
        run_chain(t.m, 0, t.text + i, 1, LAST);
        accept_rows(t.m, 1);
        read_logits(t.m, 0, t.ref + (size_t)i * (size_t)t.vocab);
    }
}

static void close_test(void) {
    close_model(t.m);
    free(t.ref);
}

// ---- 1. chunks ------------------------------------------------------------------------------------------------------

// A prompt of n tokens in chunks gives the same as single steps.
static void check_chunks(int n, int size, int want) {
    Model *m = t.m;
    reset_session(m, 0);
    for (int at = 0; at < n; ) {
        const int chunk = min_int(size, n - at);
        run_chain(m, 0, t.text + at, chunk, want == LAST && at + chunk < n ? NONE : want);
        if (want == ALL && !SAME(logits(m, 0), expected(at), chunk, "chunks of %d, all rows: rows from %d of %d", size,
                                 at, n)) return;
        accept_rows(m, chunk);
        at += chunk;
    }
    if (want == LAST) SAME(logits(m, 0), expected(n - 1), 1, "chunks of %d, last row: prompt of %d", size, n);
}

static void test_chunks(void) {
    static const int lengths[] = { 1, 2, 31, 32, 33, 63, 64, 65, 66, 95, 96, 97, 200, 400 };
    static const int sizes[] = { 1, 7, 32, 64, 65, 100, 400 };     // 65: the smallest that uses staging
    size_t n = 0;
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
        for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
            if (k && sizes[k - 1] >= lengths[i]) continue;         // the same chunks again
            if (my_turn(n++)) check_chunks(lengths[i], sizes[k], LAST);
            if (k && my_turn(n++)) check_chunks(lengths[i], sizes[k], ALL);
        }
}

// Random chunks, with logits for random rows of each chunk.
static void test_wanted(void) {
    Model *m = t.m;
    static StepRow rows[N_BATCH];
    for (int run = 0; run <= t.rounds / 25; run++) {
        reset_session(m, 0);
        for (int at = 0; at < 300; ) {
            const int chunk = min_int(1 + rnd(140), 300 - at), percent = rnd(2) ? 10 : 60;
            int r = 0;
            for (int i = 0; i < chunk; i++)
                rows[i] = (StepRow){ .token = t.text[at + i], .output = rnd(100) < percent };
            step(m, &(StepSeg){ .seq = 0, .kind = SEG_CHAIN, .n = chunk, .rows = rows }, 1);
            for (int i = 0; i < chunk; i++) {
                if (!rows[i].output) continue;
                if (!SAME(logits(m, r++), expected(at + i), 1, "position %d of a chunk of %d, %d %% wanted", at + i,
                          chunk, percent)) return;
            }
            CHECK(m->step.n_out == r, "%s: %d rows of logits, expected %d", t.name, m->step.n_out, r);
            accept_rows(m, chunk);
            at += chunk;
        }
    }
    // run_prompt makes its own chunks, of n_batch rows
    ModelOptions o = t.options;
    o.n_batch = 100;
    o.n_logits = 1;
    Model *p = open_model(t.path, o);
    run_prompt(p, 1, t.text, 330);
    SAME(logits(p, 0), expected(329), 1, "run_prompt, 330 tokens, n_batch 100");
    // A sampled token depends on its position, not on the chunks.
    for (uint64_t seed = 0; seed < 20; seed++) {
        const SampleParams params = { .seed = seed, .temperature = 1, .top_p = 1, .repeat = 1 };
        const int32_t want = sample_row(expected(329), t.vocab, NULL, &params, 329);
        const Batch b = { .rows = p->s.out_rows, .segs = p->s.segs, .len = p->s.len, .n_rows = 1, .n_segs = 1 };
        p->s.params[1] = params;
        p->ops->sample(&(Sample){ .batch = &b, .vocab = t.vocab, .logits = p->s.logits, .params = p->s.params,
                                  .out = p->s.chosen });
        CHECK(p->s.chosen[0] == want, "%s: seed %d after a prompt in chunks: token %d, expected %d", t.name, (int)seed,
              (int)p->s.chosen[0], (int)want);
    }
    commit_all(p);
    run_prompt(p, 1, t.text + 330, 1);
    SAME(logits(p, 0), expected(330), 1, "run_prompt, one token more");
    commit_all(p);
    close_model(p);
}

// ---- 2. rings -------------------------------------------------------------------------------------------------------

static void test_ring(void) {
    const int W = t.window, n = FEWER > 1 ? 5 * W : 10 * W;
    ModelOptions o = t.options;
    o.n_seqs = 1;
    Model *m = open_model(t.path, o);                  // rings as long as the context, which never wrap
    void *rings = replace_rings(m, N_CTX + STEP_ROWS);
    for (int i = 0; i < n; i++) {
        run_chain(m, 0, t.text + i, 1, LAST);
        if (!SAME(logits(m, 0), expected(i), 1, "position %d of %d: rings of %d slots against rings that never wrap", i,
                  n, t.ring)) break;
        accept_rows(m, 1);
    }
    close_model(m);
    free(rings);

    m = open_model(t.path, o);    // the shortest rings that gemma4.h allows, except for the tile size
    rings = replace_rings(m, W - 1 + STEP_ROWS);
    const int at = 3 * W + 5;
    for (int seam = 0; seam < 2; seam++) {             // seam 1: the draft wraps around the ring's end
        const int len = at + seam * (W - 1 + STEP_ROWS - at % (W - 1 + STEP_ROWS) - 10);
        fill(m, 0, len);
        run_chain(m, 0, t.text + len, STEP_ROWS, ALL);
        SAME(logits(m, 0), expected(len), STEP_ROWS, "rings of window - 1 + %d: a draft of %d at %d", STEP_ROWS,
             STEP_ROWS, len);
        run_chain(m, 0, t.text + len, 1, ALL);
        SAME(logits(m, 0), expected(len), 1, "rings of window - 1 + %d: after a rejected draft at %d", STEP_ROWS, len);
        run_chain(m, 0, t.text + len, STEP_ROWS + 1, ALL);
        SAME(logits(m, 0), expected(len), STEP_ROWS + 1, "rings of window - 1 + %d: a prompt chunk at %d", STEP_ROWS,
             len);
    }
    close_model(m);
    free(rings);

    m = open_model(t.path, o);    // one slot less: a draft of 64 rows overwrites a row that its first row reads
    rings = replace_rings(m, W - 1 + STEP_ROWS - 1);
    fill(m, 0, at);
    run_chain(m, 0, t.text + at, STEP_ROWS - 1, ALL);
    SAME(logits(m, 0), expected(at), STEP_ROWS - 1, "rings of window - 1 + %d: a draft of %d at %d", STEP_ROWS - 1,
         STEP_ROWS - 1, at);
    run_chain(m, 0, t.text + at, STEP_ROWS, ALL);
    CHECK(!equal(logits(m, 0), expected(at)),
          "%s: rings of window - 1 + %d slots should be too short for a draft of %d", t.name, STEP_ROWS - 1, STEP_ROWS);
    close_model(m);
    free(rings);
}

// ---- 3. the window's edge -------------------------------------------------------------------------------------------

static void test_poison(void) {
    Model *m = t.m;
    const int W = t.window, R = t.ring, lengths[] = { 1, W - 1, W, W + 1, 2 * W, R - 1, R, R + 1, R + W + 5 };
    StepRow draft[STEP_ROWS];
    for (size_t k = 0; k < sizeof lengths / sizeof *lengths; k++) {
        if (!my_turn(k)) continue;
        int len = lengths[k];
        fill(m, 0, len);
        random_tree(draft, STEP_ROWS, 3, 20, 0);       // leaves stale rows in all slots
        step(m, &(StepSeg){ .seq = 0, .kind = SEG_TREE, .n = STEP_ROWS, .rows = draft }, 1);
        poison_unseen(m, 0);
        run_chain(m, 0, t.text + len, STEP_ROWS, ALL);
        SAME(logits(m, 0), expected(len), STEP_ROWS, "NaN outside the window at %d, then a draft of %d", len,
             STEP_ROWS);
        for (const int end = len + 3; len < end; len++) {
            poison_unseen(m, 0);
            run_chain(m, 0, t.text + len, 1, ALL);
            SAME(logits(m, 0), expected(len), 1, "NaN outside the window at %d, then one token", len);
            accept_rows(m, 1);
        }
        for (int want = ALL; want >= LAST; want--) {
            const int n = STEP_ROWS + 9, first = want == ALL ? 0 : n - 1;
            poison_unseen(m, 0);
            run_chain(m, 0, t.text + len, n, want);
            SAME(logits(m, 0), expected(len + first), n - first, "NaN outside the window at %d, then a prompt chunk%s",
                 len, want == ALL ? "" : ", last row");
            accept_rows(m, n);
            len += n;
        }
    }
    // The opposite: each cache is read up to the edge of the window. Layers that share a cache come after its owner.
    const int len = R + 3;
    fill(m, 0, len);
    fill(m, 1, len);                                   // has the rows that are restored in session 0
    for (int i = 0; i < m->n_caches; i++) {
        const Cache *c = &m->caches[i];
        const int oldest = is_ring(m, i) ? len - (W - 1) : 0, before = oldest - 1;
        const int seen[] = { oldest, (oldest + len) / 2, len - 1 };
        for (int k = 0; k < 3; k++) {
            poison_row(c, 0, seen[k] % c->slots);
            run_chain(m, 0, t.text + len, 1, ALL);
            CHECK(!equal(logits(m, 0), expected(len)),
                  "%s: cache %d: position %d is visible from position %d, but NaN there changes nothing", t.name, i, seen[k], len);
            kv_move(c, 0, seen[k] % c->slots, c, 1, seen[k] % c->slots);
        }
        if (!is_ring(m, i)) continue;
        poison_row(c, 0, before % c->slots);
        run_chain(m, 0, t.text + len, 1, ALL);
        SAME(logits(m, 0), expected(len), 1, "cache %d: NaN at position %d, just out of sight of %d", i, before, len);
    }
}

// ---- 4. trees and rollback ------------------------------------------------------------------------------------------

// A tree equals its chains. Then a random path is committed, and session 0 continues like session 1, which got the path
// token by token.
static void test_trees(void) {
    Model *m = t.m;
    const int W = t.window, R = t.ring;
    const int lengths[] = { 0, 1, W - 10, W - 1, W, W + 1, R - 64, R - 20, R - 1, R, R + 1, R + W - 9, 2 * R };
    StepRow rows[STEP_ROWS];
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        if (!my_turn(i)) continue;
        const int len = lengths[i], n = i % 3 == 0 ? STEP_ROWS : 1 + rnd(STEP_ROWS);
        fill(m, 0, len);
        fill(m, 1, len);
        random_tree(rows, n, 1 + (int)i % 4, 20, 100);
        compare_tree(m, 0, 1, rows, n, "random");
        int32_t path[STEP_ROWS] = { 0 };
        const int depth = path_to(rows, rnd(n), path);
        commit(m, &(int32_t){ depth }, path);
        for (int k = 0; k < depth; k++) {
            run_chain(m, 1, &rows[path[k]].token, 1, NONE);
            accept_rows(m, 1);
        }
        for (int k = 0; k < 4; k++) {
            int32_t token = rnd(t.vocab);
            run_chain(m, 1, &token, 1, ALL);
            accept_rows(m, 1);
            float *want = copy_logits(m, 1);
            run_chain(m, 0, &token, 1, ALL);
            accept_rows(m, 1);
            SAME(logits(m, 0), want, 1, "token %d after a path of %d from a tree of %d at %d", k, depth, n, len);
            free(want);
        }
    }
    // One branch as long as the window, the longest that gemma4.h allows, and short branches.
    fill(m, 0, W + 3);
    fill(m, 1, W + 3);
    random_tokens(rows, STEP_ROWS, 100);
    for (int i = 0; i < STEP_ROWS; i++) rows[i].parent = i < W ? i - 1 : i - W - 1;
    compare_tree(m, 0, 1, rows, STEP_ROWS, "deep");
}

// Session 0 gets random drafts, chains and trees, and commits a random part; session 1 gets only the committed tokens.
// Session 2 is not involved.
static void draft_rounds(int n_rounds, const char *what) {
    Model *m = t.m;
    StepRow rows[STEP_ROWS];
    const uint64_t bystander = cache_hash(m, 2);
    for (int round = 0; round < n_rounds; round++) {
        if (m->len[0] + STEP_ROWS + 1 > N_CTX) {
            reset_session(m, 0);
            reset_session(m, 1);
        }
        const bool tree = rnd(2);
        const int len = m->len[0], n = 1 + rnd(STEP_ROWS), percent = rnd(4) ? 50 : rnd(2) * 100;
        int32_t path[STEP_ROWS] = { 0 }, tokens[STEP_ROWS + 1];
        int n_out;
        if (tree) {
            random_tree(rows, n, 1 + rnd(3), 20, percent);
            n_out = rnd(5) ? path_to(rows, rnd(n), path) : 0;
        } else {
            random_tokens(rows, n, percent);
            n_out = rnd(5) ? min_int(rnd(n + 1), 24) : rnd(2) * n;
            for (int i = 0; i < n; i++) path[i] = i;
        }
        step(m, &(StepSeg){ .seq = 0, .kind = tree ? SEG_TREE : SEG_CHAIN, .n = n, .rows = rows }, 1);
        float *drafted = copy_logits(m, m->step.n_out);
        commit(m, &(int32_t){ n_out }, path);
        for (int k = 0; k < n_out; k++) tokens[k] = rows[path[k]].token;
        tokens[n_out] = rnd(t.vocab);                 // one more token, in both
        run_chain(m, 0, tokens + n_out, 1, ALL);
        accept_rows(m, 1);
        float *next = copy_logits(m, 1);
        if (n_out) {
            run_chain(m, 1, tokens, n_out, ALL);
            int k = 0, r = 0;                          // r: the row of `drafted` for row path[k]
            for (int i = 0; k < n_out; i++) {
                if (path[k] == i) {
                    if (rows[i].output && !SAME(drafted + (size_t)r * (size_t)t.vocab, logits(m, k), 1,
                                                "%s: round %d: %s of %d at %d, %d kept: logits of row %d",
                                              what, round, tree ? "tree" : "chain", n, len, n_out, i)) break;
                    k++;
                }
                r += rows[i].output;
            }
            accept_rows(m, n_out);
        }
        run_chain(m, 1, tokens + n_out, 1, ALL);
        accept_rows(m, 1);
        const bool ok = SAME(next, logits(m, 0), 1, "%s: round %d: token after %d rows kept of a %s of %d at %d", what,
                             round, n_out, tree ? "tree" : "chain", n, len);
        free(drafted);
        free(next);
        if (!ok) break;
    }
    CHECK(m->len[0] == m->len[1], "%s: %s: lengths %d and %d", t.name, what, m->len[0], m->len[1]);
    CHECK(cache_hash(m, 2) == bystander, "%s: %s: the cache of a session that took no part changed", t.name, what);
}

static void test_rollback(void) {
    const int W = t.window, R = t.ring, lengths[] = { W - 1, W, W + 1, R - 1, R, R + 1, 2 * R };
    fill(t.m, 2, R + 20);
    reset_session(t.m, 0);
    reset_session(t.m, 1);
    draft_rounds(t.rounds, "fuzz");
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        if (!my_turn(i)) continue;
        fill(t.m, 0, lengths[i]);
        fill(t.m, 1, lengths[i]);
        draft_rounds(3, "edge");
    }
}

// A session can go back as long as its rings hold the window of the next row, and by no row more.
static void test_going_back(void) {
    Model *m = t.m;
    const int len = 2 * t.ring + 5, rows = t.ring - (t.window - 1);
    for (int drafted = 0; drafted < 20; drafted += 13) {           // rejected rows have overwritten others too
        const int back = len - (rows - drafted);
        fill(m, 0, len);
        if (drafted) run_chain(m, 0, t.text, drafted, NONE);
        CHECK(!shorten_session(m, 0, t.text, back - 1) && m->len[0] == len,
              "%s: %d tokens and %d rejected rows: goes back to %d, whose window is overwritten", t.name, len, drafted,
              back - 1);
        CHECK(shorten_session(m, 0, t.text, back) && m->len[0] == back, "%s: %d tokens: cannot go back to %d", t.name,
              len, back);
        run_chain(m, 0, t.text + back, 1, ALL);
        SAME(logits(m, 0), expected(back), 1, "after %d tokens and %d rejected rows: back to %d", len, drafted, back);
    }
}

// ---- 5. sessions ----------------------------------------------------------------------------------------------------

typedef struct { SegKind kind; int n; } Part;          // n 0: not in the step

// One step of several sessions in m equals one step each in alone. order: the order of the sessions.
static void check_mixed(Model *m, Model *alone, const Part *parts, int order, int want_percent) {
    static StepRow rows[N_SEQS][N_BATCH];
    StepSeg segs[N_SEQS];
    int32_t n_accept[N_SEQS], path[N_SEQS * STEP_ROWS] = { 0 };
    char text[100] = "";
    int n_segs = 0, row = 0;
    for (int i = 0; i < N_SEQS; i++) {
        const int seq = (order + i) % N_SEQS, n = parts[seq].n;
        if (!n) continue;
        if (parts[seq].kind == SEG_TREE) random_tree(rows[seq], n, 1 + rnd(2), 20, want_percent);
        else random_tokens(rows[seq], n, want_percent);
        if (parts[seq].kind == SEG_TREE) n_accept[n_segs] = path_to(rows[seq], rnd(n), path + n_segs * STEP_ROWS);
        else n_accept[n_segs] = n > STEP_ROWS || rnd(2) ? n : rnd(n + 1);
        segs[n_segs++] = (StepSeg){ .seq = seq, .kind = parts[seq].kind, .n = n, .rows = rows[seq] };
        snprintf(text + strlen(text), sizeof text - strlen(text), " %s%d@%d",
                 parts[seq].kind == SEG_TREE ? "tree" : "chain", n, m->len[seq]);
    }
    if (!n_segs) return;
    step(m, segs, n_segs);
    float *got = copy_logits(m, m->step.n_out);
    commit(m, n_accept, path);
    for (int i = 0; i < n_segs; i++) {
        step(alone, &segs[i], 1);
        SAME(got + (size_t)row * (size_t)t.vocab, logits(alone, 0), alone->step.n_out,
             "segment %d of a step of%s, against the same alone", i, text);
        row += alone->step.n_out;
        commit(alone, &n_accept[i], path + i * STEP_ROWS);
        CHECK(m->len[segs[i].seq] == alone->len[segs[i].seq], "%s:%s: length of session %d", t.name, text, segs[i].seq);
    }
    free(got);
}

static void test_sessions(void) {
    static const Part fixed[][N_SEQS] = {
        { { SEG_CHAIN, 40 }, { SEG_CHAIN, 1 }, { SEG_TREE, 23 } },             // without staging
        { { SEG_CHAIN, 100 }, { SEG_CHAIN, 1 }, { SEG_TREE, 64 } },    // staging: two short segments do not use it
        { { SEG_CHAIN, 1 }, { SEG_CHAIN, 150 }, { SEG_CHAIN, 90 } },           // two prompts, one longer than the ring
        { { SEG_CHAIN, 1 }, { SEG_CHAIN, 1 }, { SEG_CHAIN, 1 } },
        { { SEG_TREE, 64 }, { SEG_CHAIN, 0 }, { SEG_CHAIN, 65 } },
        { { SEG_TREE, 30 }, { SEG_TREE, 64 }, { SEG_TREE, 1 } },
        { { SEG_CHAIN, 64 }, { SEG_TREE, 2 }, { SEG_CHAIN, 0 } },
    };
    Model *alone = open_model(t.path, t.options);
    const int n_fixed = sizeof fixed / sizeof *fixed;
    for (int seq = 0; seq < N_SEQS; seq++) {
        fill(t.m, seq, t.window - 2 + seq * 50);
        fill(alone, seq, t.window - 2 + seq * 50);
    }
    for (int i = FEWER > 1; i < n_fixed + t.rounds / 12; i += FEWER > 1 ? 3 : 1) {
        Part parts[N_SEQS];
        for (int seq = 0; seq < N_SEQS; seq++) {
            const int kind = rnd(5);                   // 0: none, 1: decode, 2: tree, 3: short chain, 4: prompt
            parts[seq] = (Part){ kind == 2 ? SEG_TREE : SEG_CHAIN,
                                 kind == 0 ? 0 : kind == 1 ? 1 : kind == 4 ? 65 + rnd(60) : 1 + rnd(STEP_ROWS) };
            if (i < n_fixed) parts[seq] = fixed[i][seq];
            if (t.m->len[seq] + parts[seq].n + STEP_ROWS > N_CTX) {
                reset_session(t.m, seq);
                reset_session(alone, seq);
            }
        }
        check_mixed(t.m, alone, parts, i, i % 3 == 0 ? 100 : i % 3 == 1 ? 15 : 0);
        for (int seq = 0; seq < N_SEQS; seq++) {       // the next token sees what was committed
            Part next[N_SEQS] = { 0 };
            next[seq] = (Part){ SEG_CHAIN, 1 };
            check_mixed(t.m, alone, next, 0, 100);
        }
    }
    close_model(alone);
}

// ---- 6. contents of caches ------------------------------------------------------------------------------------------

static int compare_doubles(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

// The difference between t.ref and a model with other caches: at each of 160 positions the largest, relative to
// max|logit|; of these the maximum or the median.
static double difference(ModelOptions o, bool median) {
    o.n_seqs = 1;
    Model *m = open_model(t.path, o);
    double row[160] = { 0 }, largest = 0;
    run_chain(m, 0, t.text, 160, ALL);
    for (int r = 0; r < 160; r++)
        for (int i = 0; i < t.vocab; i++) {
            const double d = fabs((double)logits(m, r)[i] - (double)expected(r)[i]);
            row[r] = isnan(d) ? INFINITY : fmax(row[r], d);
            largest = fmax(largest, fabs((double)expected(r)[i]));
        }
    qsort(row, 160, sizeof *row, compare_doubles);
    close_model(m);
    return row[median ? 80 : 159] / largest;
}

// Rounding in a cache changes logits only a little, except if another expert is chosen (then only the median is
// bounded) or an int8 activation rounds the other way (then the noise of int8 is measured).
static void test_layout(void) {
    ModelOptions o = t.options;
    const bool f32 = o.k_type == KV_F32, moe = t.m->config.n_experts > 0,
        int8 = is_quantised(t.m->weights.layer[0].attn_q.type);
    const bool coded = kv_group(o.k_type) > 0;         // the limit is for caches of three bits
    double most = coded ? 0.5 : int8 ? 0.1 : 5e-3;
    o.k_type = o.v_type = f32 ? KV_F16 : KV_F32;
    double d = difference(o, moe || coded);
    CHECK(d > 0 && d <= most, "%s: against %s: %s difference %.3g of max|logit|, expected at most %g", t.name,
          f32 ? "f16" : "f32", moe ? "median" : "largest", d, most);
    o = t.options;
    o.untied = true;
    o.n_seqs = 1;
    bool has_tied = false;
    for (int i = 0; i < t.m->n_caches; i++) has_tied |= t.m->caches[i].n_rot > 0;
    if (!has_tied) return;
    most = coded ? 0.5 : f32 ? 1e-5 : 5e-3;
    d = difference(o, (moe || coded) && !f32);
    CHECK(d <= most, "%s: tied against untied: %s difference %.3g of max|logit|, expected at most %g", t.name, moe &&
          !f32 ? "median" : "largest", d, most);
    Model *untied = open_model(t.path, (o.n_seqs = N_SEQS, o));
    const size_t rounding = coded ? 4096 * 1024 : 0;   // scales of few rows are padded to 256 bytes
    const size_t tied_bytes = t.m->plan.kv_global * 1024, untied_bytes = untied->plan.kv_global * 640;
    CHECK(tied_bytes >= untied_bytes && tied_bytes <= untied_bytes + rounding,
          "%s: global caches: tied %zu bytes, untied %zu, expected 640 / 1024", t.name, t.m->plan.kv_global, untied->plan.kv_global);
    CHECK(t.m->plan.kv_rings == untied->plan.kv_rings, "%s: rings: tied %zu bytes, untied %zu", t.name,
          t.m->plan.kv_rings, untied->plan.kv_rings);
    close_model(untied);
}

// ---- 7. reset, full context -----------------------------------------------------------------------------------------

static void test_reset(void) {
    int32_t other[150];
    for (int i = 0; i < 150; i++) other[i] = rnd(t.vocab);
    Model *fresh = open_model(t.path, t.options);
    fill(t.m, 0, t.ring + 77);
    run_chain(t.m, 0, t.text, STEP_ROWS, NONE);        // a rejected draft
    reset_session(t.m, 0);
    for (int at = 0, n = 1; at < 150; at += n, n = at < 20 ? 3 : 65) {
        n = min_int(n, 150 - at);
        run_chain(fresh, 0, other + at, n, ALL);
        run_chain(t.m, 0, other + at, n, ALL);
        SAME(logits(t.m, 0), logits(fresh, 0), n, "another text after reset_session, from %d", at);
        accept_rows(fresh, n);
        accept_rows(t.m, n);
    }
    close_model(fresh);
}

static void test_full(int n_ctx) {
    ModelOptions o = t.options;
    o.n_ctx = n_ctx;
    o.n_batch = 100;
    o.n_logits = STEP_ROWS;
    Model *m = open_model(t.path, o);
    StepRow rows[STEP_ROWS];
    run_prompt(m, 0, t.text, n_ctx);
    SAME(logits(m, 0), expected(n_ctx - 1), 1, "context of %d, filled in chunks: last position", n_ctx);
    commit_all(m);
    for (int i = 0; i < n_ctx; i++) {
        run_chain(m, 2, t.text + i, 1, LAST);
        accept_rows(m, 1);
    }
    SAME(logits(m, 0), expected(n_ctx - 1), 1, "context of %d, filled one by one: last position", n_ctx);
    fill(m, 1, n_ctx - 1);
    const uint64_t before[] = { cache_hash(m, 0), cache_hash(m, 2) };
    run_chain(m, 1, t.text + n_ctx - 1, STEP_ROWS, ALL);           // the middle session drafts into the spare slots
    SAME(logits(m, 0), expected(n_ctx - 1), STEP_ROWS, "context of %d: draft of %d at the last position", n_ctx,
         STEP_ROWS);
    random_tree(rows, STEP_ROWS, 2, 20, 0);
    step(m, &(StepSeg){ .seq = 1, .kind = SEG_TREE, .n = STEP_ROWS, .rows = rows }, 1);
    run_chain(m, 1, t.text + n_ctx - 1, STEP_ROWS, ALL);
    accept_rows(m, 1);
    run_chain(m, 1, t.text + n_ctx, STEP_ROWS, ALL);
    SAME(logits(m, 0), expected(n_ctx), STEP_ROWS, "context of %d, full: draft of %d that cannot be kept", n_ctx,
         STEP_ROWS);
    CHECK(cache_hash(m, 0) == before[0] && cache_hash(m, 2) == before[1],
          "%s: context of %d: drafts at its end changed another session", t.name, n_ctx);
    close_model(m);
}

// ---- 8. the newest rows in f16 too ----------------------------------------------------------------------------------

// As long as the whole text is in the tail, it replaces the codes: the logits are those of an f16 cache, except that the
// tail rounds rotated values to f16. That is all that differs, so both models have rings of f16. In a ring of 3 or 4 bits
// a last bit can become another code, which changes logits by up to 4e-2. Seen here: 6.4e-4, and without the tail 4e-2
// and more. In a mixture only the median is bounded, since another expert may be chosen.
static void check_tail_values(ModelOptions o) {
    enum { N = STEP_ROWS };
    o.ring_type = KV_F16;
    Model *m = open_model(t.path, o);
    o.tail = 0;
    o.k_type = o.v_type = KV_F16;
    Model *halves = open_model(t.path, o);
    double row[N] = { 0 }, largest = 0;
    run_chain(m, 0, t.text, N, ALL);
    run_chain(halves, 0, t.text, N, ALL);
    for (int r = 0; r < N; r++)
        for (int i = 0; i < t.vocab; i++) {
            const double d = fabs((double)logits(m, r)[i] - (double)logits(halves, r)[i]);
            row[r] = isnan(d) ? INFINITY : fmax(row[r], d);
            largest = fmax(largest, fabs((double)logits(halves, r)[i]));
        }
    qsort(row, N, sizeof *row, compare_doubles);
    const bool moe = m->config.n_experts > 0;
    const double d = row[moe ? N / 2 : N - 1] / largest;
    CHECK(d > 0 && d <= 2e-3, "%s: text within the tail: against f16: %s difference %.3g of max|logit|, expected at most "
          "2e-3", t.name, moe ? "median" : "largest", d);
    close_model(m);
    close_model(halves);
}

// A row reads the newest `reach` positions, its own among them, from the tail and no other; older ones from the codes.
// Sessions 0 and 1 have the same text; session 0 is poisoned.
static void check_tail_reach(Model *m, int len, int reach) {
    fill(m, 0, len);
    fill(m, 1, len);
    run_chain(m, 1, t.text + len, 1, ALL);
    float *want = copy_logits(m, 1);
    const int newest = len - reach + 1;                // the oldest position that is read from the tail
    for (int i = 0; i < m->n_caches; i++) {
        const Cache *c = &m->caches[i], tail = tail_of(c);
        if (is_ring(m, i)) continue;
        CHECK(c->tail_reach == reach && tail.slots > len, "%s: tail: reach %d, %d slots", t.name, c->tail_reach, tail.slots);
        for (int pos = newest; pos < c->slots; pos++) poison_row(c, 0, pos);
        for (int slot = 0; slot < tail.slots; slot++)
            if (slot < newest || slot >= len) poison_row(&tail, 0, slot);
    }
    run_chain(m, 0, t.text + len, 1, ALL);
    SAME(logits(m, 0), want, 1, "tail: NaN in newer codes, and in older rows of the tail, at %d", len);
    for (int i = 0; i < m->n_caches; i++) {
        const Cache *c = &m->caches[i], tail = tail_of(c);
        if (is_ring(m, i)) continue;
        const struct { const Cache *cache; int pos; } read[] = {
            { c, 0 }, { c, newest - 1 }, { &tail, newest }, { &tail, len - 1 } };
        for (int k = 0; k < 4; k++) {
            poison_row(read[k].cache, 0, read[k].pos);
            run_chain(m, 0, t.text + len, 1, ALL);
            CHECK(!equal(logits(m, 0), want), "%s: tail: cache %d: NaN in %s at position %d changes nothing at %d", t.name,
                  i, k < 2 ? "the codes" : "the tail", read[k].pos, len);
            kv_move(read[k].cache, 0, read[k].pos, read[k].cache, 1, read[k].pos);
        }
    }
    free(want);
}

// Steps of any number of rows give the bits of single steps also with a tail, whatever was drafted. A session can go
// back by the spare rows of the tail.
static void test_tail(void) {
    enum { N = 260, TAIL = 128 };
    if (!kv_group(t.options.k_type) || !kv_group(t.options.v_type)) return;
    ModelOptions o = t.options;
    o.tail = TAIL - STEP_ROWS;
    check_tail_values(o);
    Model *m = open_model(t.path, o);
    float *want = alloc_or_die((size_t)N * (size_t)t.vocab, sizeof *want);
    CHECK(m->plan.kv_global > t.m->plan.kv_global, "%s: a tail takes no memory", t.name);
    check_tail_reach(m, 150, TAIL - STEP_ROWS);
    reset_session(m, 0);
    for (int i = 0; i < N; i++) {
        run_chain(m, 0, t.text + i, 1, LAST);
        read_logits(m, 0, want + (size_t)i * (size_t)t.vocab);
        if (i % 4 == 0) run_chain(m, 0, t.text + i, 1 + i / 4 % 64, NONE);     // a rejected draft
        accept_rows(m, 1);
    }
    CHECK(!equal(want + (size_t)(N - 1) * (size_t)t.vocab, expected(N - 1)), "%s: a tail changes nothing", t.name);
    reset_session(m, 1);
    for (int at = 0, n = 1; at < N; at += n, n = 1 + (at * 7) % STEP_ROWS) {
        n = min_int(n, N - at);
        run_chain(m, 1, t.text + at, n, ALL);
        SAME(logits(m, 0), want + (size_t)at * (size_t)t.vocab, n, "%s: tail: %d rows from %d", t.name, n, at);
        accept_rows(m, n);
    }
    static const int sizes[] = { 65, N };
    for (int k = 0; k < 2; k++) {                      // prompts: the tail wraps between their chunks, and within one
        reset_session(m, 1);
        for (int at = 0, n; at < N; at += n) {
            n = min_int(sizes[k], N - at);
            run_chain(m, 1, t.text + at, n, ALL);
            SAME(logits(m, 0), want + (size_t)at * (size_t)t.vocab, n, "%s: tail: chunks of %d: %d rows from %d", t.name,
                 sizes[k], n, at);
            accept_rows(m, n);
        }
    }
    CHECK(shorten_session(m, 1, t.text, N - 1), "%s: tail: cannot go back by one", t.name);
    run_chain(m, 1, t.text + N - 1, 1, LAST);
    SAME(logits(m, 0), want + (size_t)(N - 1) * (size_t)t.vocab, 1, "%s: tail: back by one", t.name);
    accept_rows(m, 1);
    CHECK(!shorten_session(m, 1, t.text, N - STEP_ROWS - 1), "%s: tail: goes back further than it has rows", t.name);
    free(want);
    close_model(m);
}

// ---- jobs -----------------------------------------------------------------------------------------------------------
// Models are independent and their steps are too small for several threads: one process with one thread for each model,
// as many at a time as there are processors. Counts are returned through shared memory.

static const struct {
    int    file;
    KvType k_type, v_type, ring_type;
    int    stride, rounds;    // see t
} jobs[] = {
#ifndef SANITIZED
    { MICRO_E, KV_F32, KV_F32, KV_F32, 5, 25 }, { MICRO_DENSE, KV_F16, KV_F16, KV_F32, 9, 25 },
    { MICRO_MOE, KV_TQ3, KV_TQ3, KV_Q4_0, 19, 12 },
    // LONG=1
    { MICRO_DENSE, KV_Q4_0, KV_Q4_0, KV_TQ3, 13, 12 },
    { MICRO_E, KV_Q8_0, KV_TQ4, KV_F32, 13, 12 }, { MICRO_MOE, KV_F16, KV_F16, KV_F32, 7, 24 },
    { MICRO_E_Q8, KV_F32, KV_F32, KV_F32, 7, 50 },
    { TINY_E, KV_F32, KV_F32, KV_F32, 14, 16 }, { MICRO_DENSE, KV_F32, KV_F32, KV_F32, 4, 50 },
    { MICRO_E, KV_F16, KV_F16, KV_F32, 5, 50 }, { MICRO_MOE, KV_F32, KV_F32, KV_F32, 5, 50 },
    { MICRO_E, KV_F16, KV_F32, KV_F32, 9, 16 },        // f16 rings, f32 V of the global layer
    { MICRO_E, KV_TQ3, KV_Q8_0, KV_Q8_0, 13, 12 }
#else
    { MICRO_E, KV_F32, KV_F32, KV_F32, 4, 50 }, { MICRO_MOE, KV_F16, KV_F16, KV_F32, 4, 24 },
    { MICRO_E_Q8, KV_F32, KV_F32, KV_F32, 4, 24 },
    { MICRO_DENSE, KV_TQ3, KV_TQ3, KV_Q8_0, 8, 12 }
#endif
};
enum { N_JOBS = sizeof jobs / sizeof *jobs, N_SHORT = 3 };

static void run_job(int i) {
    t.number = i;
    t.stride = jobs[i].stride * FEWER;
    t.rounds = jobs[i].rounds / FEWER;
    open_test(jobs[i].file, jobs[i].k_type, jobs[i].v_type, jobs[i].ring_type);
    test_chunks();
    test_wanted();
    test_ring();
    test_poison();
    test_trees();
    test_rollback();
    test_going_back();
    test_sessions();
    test_layout();
    test_reset();
    test_tail();
    test_full(128);           // and 64 spare slots: exactly as many as needed
    close_test();
    printf("%s: %d passed, %d failed, %.1f s of processor time\n", t.name, test_passed, test_failed,
           (double)clock() / CLOCKS_PER_SEC);
}

int main(int argc, char **argv) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    make_files();
    start_threads(1);
    if (argc > 1) {                                    // one job, in this process
        run_job(atoi(argv[1]) % N_JOBS);
        return test_done("cache");
    }
    const char *all = getenv("LONG");
    const int n_jobs = all && strcmp(all, "0") ? N_JOBS : min_int(N_SHORT, N_JOBS);
    const int cores = max_int(1, (int)sysconf(_SC_NPROCESSORS_ONLN));
    int (*counts)[2] = mmap(NULL, N_JOBS * sizeof *counts, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (counts == MAP_FAILED) die("mmap: %s", strerror(errno));
    for (int started = 0, ended = 0; ended < n_jobs; ) {
        if (started < n_jobs && started - ended < cores) {
            const pid_t pid = fork();
            if (pid < 0) die("fork: %s", strerror(errno));
            if (!pid) {
                run_job(started);
                counts[started][0] = test_passed;
                counts[started][1] = test_failed;
                exit(0);
            }
            started++;
            continue;
        }
        int status;
        if (wait(&status) < 0) die("wait: %s", strerror(errno));
        CHECK(status == 0, "a model's process ended with status 0x%x", (unsigned)status);
        ended++;
    }
    for (int i = 0; i < n_jobs; i++) {
        test_passed += counts[i][0];
        test_failed += counts[i][1];
    }
    munmap(counts, N_JOBS * sizeof *counts);
    return test_done("cache");
}
