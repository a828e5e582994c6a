/* test_dflash.c - DFlash block drafters: a block against plain loops in double, contexts that were built in different
 * ways, files in all notations, pairs that are refused, and the acceptance rate of the trained drafter.
 *
 *   test_dflash           on the CPU, and on the GPU where there is one
 *   test_dflash -few      on the GPU, few cases: for the emulator
 *
 * Run from the top of the repository, where the trained models are.
 * Environment: BUILD (build: where make put make_gguf), TMPDIR (/tmp). */
#define _GNU_SOURCE
#define TESTING
#include "../gemma4.c"
#include "pairs.h"
#include "card.h"
#include "steps.h"

enum { WIDTH = 4, DEPTH = 7, MOST_TOKENS = 1024 };
#define MINI "models/gemma4-mini-q8_0.gguf"
#define MINI_DFLASH "models/gemma4-mini-dflash-q8_0.gguf"

static ModelOptions plan(const char *drafter, int n_seqs) {
    return (ModelOptions){ .n_ctx = 1024, .n_seqs = n_seqs, .n_batch = 512, .n_logits = STEP_ROWS, .k_type = KV_F16,
                          .v_type = KV_F16, .drafter = drafter, .draft_width = WIDTH, .draft_depth = DEPTH };
}

// Writes the token of each segment to where sampling leaves it for a draft.
static void set_next(Model *m, const int32_t *next, int n) {
    m->ops->copy(&(Copy){ m->s.next, next, (size_t)n * sizeof *next, COPY_IN });
}

static int best_of(const float *logits, int n) {
    int best = 0;
    for (int i = 1; i < n; i++)
        if (logits[i] > logits[best]) best = i;
    return best;
}

static int32_t greedy_token(Model *m) {                  // of row 0 of the logits
    float *logits = alloc_or_die((size_t)m->config.vocab, sizeof *logits);
    read_logits(m, 0, logits);
    const int32_t best = best_of(logits, m->config.vocab);
    free(logits);
    return best;
}

typedef struct {
    int32_t ids[DEPTH * WIDTH];
    float   logits[DEPTH * WIDTH], logsumexp[DEPTH];
} Block;

// The drafts for segment `seg` of the last step, after token `next`.
static Block draft_alone(Model *m, int seg, int32_t next) {
    Block b;
    m->ops->copy(&(Copy){ m->s.next + seg, &next, sizeof next, COPY_IN });
    issue_draft(m, &seg, 1, DEPTH);
    read_back(m, b.ids, m->drafter->ids, sizeof b.ids);
    read_back(m, b.logits, m->drafter->logits, sizeof b.logits);
    read_back(m, b.logsumexp, m->drafter->logsumexp, sizeof b.logsumexp);
    return b;
}

// ---- contexts -------------------------------------------------------------------------------------------------------

typedef enum { CHUNKS, CHAINS, CHAINS_WALKED, TREES, TREES_WALKED } How;
enum { OWN = 7, JUNK = 5 };                            // rows of a step that are committed, and others

// The committed rows are among other rows, which are their siblings or descendants.
static int tree_rows(StepRow *rows, const int32_t *ids, int n, int vocab, int32_t *path) {
    int n_rows = 0, last = -1;
    for (int i = 0; i < n; i++) {
        for (int k = 0; k < (i % 3 == 1 ? 2 : 0); k++, n_rows++)
            rows[n_rows] = (StepRow){ .token = (ids[i] + 7 + k) % vocab, .parent = k ? n_rows - 1 : last };
        rows[n_rows] = (StepRow){ .token = ids[i], .parent = last };
        path[i] = last = n_rows++;
    }
    return n_rows;
}

// Which rows of the last step are committed, for a host that learns it later.
static void commit_walked(Model *m, int32_t n, const int32_t *path) {
    const Batch all = { .rows = m->s.rows, .segs = m->s.segs, .len = m->s.len, .n_rows = m->step.n_rows,
                        .n_segs = m->step.n_segs };
    m->ops->copy(&(Copy){ m->s.walked, &n, sizeof n, COPY_IN });
    m->ops->copy(&(Copy){ m->s.path, path, STEP_ROWS * sizeof *path, COPY_IN });
    m->ops->kv_commit(&(KvCommit){ .batch = &all, .caches = m->caches, .n_caches = m->n_caches, .n_accept = m->s.walked,
                                   .path = m->step.segs[0].kind == SEG_TREE ? m->s.path : NULL });
    drafter_committed(m, NULL);
    m->len[m->step.segs[0].seq] += n;
}

// Appends ids (n) to session seq, at most `chunk` in a step. draft: drafts before each step.
static void run_ids(Model *m, int seq, const int32_t *ids, int n, How how, int chunk, bool draft) {
    StepRow rows[512];
    if (on_gpu) chunk = min_int(chunk, STEP_ROWS);     // larger steps round differently there
    for (int at = 0, some; at < n; at += some) {
        int32_t path[STEP_ROWS] = { 0 };
        some = min_int(chunk, n - at);
        int n_rows = some;
        for (int i = 0; i < some; i++) rows[i] = (StepRow){ .token = ids[at + i] };
        if (how == CHAINS || how == CHAINS_WALKED)
            for (; n_rows < some + JUNK; n_rows++)
                rows[n_rows] = (StepRow){ .token = (n_rows * 31 + at) % m->config.vocab };
        if (how == TREES || how == TREES_WALKED) n_rows = tree_rows(rows, ids + at, some, m->config.vocab, path);
        if (draft && m->step.n_segs) draft_alone(m, 0, ids[at]);
        const bool tree = how == TREES || how == TREES_WALKED;
        step(m, &(StepSeg){ .seq = seq, .kind = tree ? SEG_TREE : SEG_CHAIN, .n = n_rows, .rows = rows }, 1);
        if (how == CHAINS_WALKED || how == TREES_WALKED) commit_walked(m, some, path);
        else commit(m, &(int32_t){ some }, tree ? path : NULL);
    }
}

static void random_ids(int32_t *ids, int n, int vocab) {
    for (int i = 0; i < n; i++) ids[i] = (i * i * 7 + i * 991 + 3) % vocab;
}

// A block drafted from a context of trees: on a GPU, rows of a tree may differ in their last bits, and if activations
// are then rounded to int8, later values differ by that rounding (emulated as an H100, contexts of 50 to 170 tokens: 1.3 %
// of a logit in the mean, 4.9 % at most). A wrong path in every step, or in one, differs by 8 % in the mean.
static void like_block(const Block *got, const Block *want, const char *what) {
    float sum = 0;
    int others = 0;
    for (int d = 0; d < DEPTH; d++) {
        const float a = got->logits[d * WIDTH], b = want->logits[d * WIDTH], apart = fabsf(a - b) / fabsf(b);
        sum += apart, others += got->ids[d * WIDTH] != want->ids[d * WIDTH];
        CHECK(apart <= 0.1f, "%s, place %d: it drafts %d with logit %.9g, expected %d with %.9g", what, d,
              got->ids[d * WIDTH], (double)a, want->ids[d * WIDTH], (double)b);
    }
    CHECK(sum <= 0.04f * DEPTH, "%s: logits differ by %.3f in the mean", what, (double)sum / DEPTH);
    CHECK(others <= 2, "%s: %d of %d tokens are others", what, others, DEPTH);
}

static void same_block(const Block *got, const Block *want, const char *what) {
    CHECK(!memcmp(got, want, sizeof *got),
          "%s: it drafts something else: %d %d %d with logit %.9g, expected %d %d %d with %.9g", what,
          got->ids[0], got->ids[WIDTH], got->ids[2 * WIDTH], (double)got->logits[0], want->ids[0], want->ids[WIDTH],
          want->ids[2 * WIDTH], (double)want->logits[0]);
}

// For any steps, whether host or device counts the committed rows: the same context, bit for bit, of more tokens than
// the rings hold.
static void test_contexts(const char *path, const char *drafter, int n) {
    static const struct { const char *what; How how; int chunk; bool draft; } ways[] = {
        { "a prompt in one chunk", CHUNKS, 512, false }, { "chunks of 150", CHUNKS, 150, false },
        { "chunks of 50", CHUNKS, 50, false },
        { "one token at a time", CHUNKS, 1, false }, { "drafts in between", CHUNKS, 3, true },
        { "chains with rejected rows", CHAINS, OWN, false }, { "walked chains", CHAINS_WALKED, OWN, false },
        { "walked chains, drafts in between", CHAINS_WALKED, OWN, true }, { "trees", TREES, OWN, false },
        { "walked trees", TREES_WALKED, OWN, false }, { "trees, drafts in between", TREES, OWN, true },
    };
    int32_t ids[MOST_TOKENS];
    Block want = { 0 };
    Model *m = open_pair(path, plan(drafter, 2));
    random_ids(ids, n, m->config.vocab);
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        reset_session(m, 1);
        const int first = i ? 25 : 0;                  // they are in the backlog when the others come
        run_ids(m, 1, ids, first, CHUNKS, first, false);
        run_ids(m, 1, ids + first, n - first, ways[i].how, ways[i].chunk, ways[i].draft);
        const Block got = draft_alone(m, 0, 9);
        if (i == 0) want = got;
        (on_gpu && (ways[i].how == TREES || ways[i].how == TREES_WALKED) ? like_block : same_block)(&got, &want,
                ways[i].what);
        CHECK(m->drafter->context_start[1] == 0, "%s: the context begins at %d", ways[i].what,
              m->drafter->context_start[1]);
    }
    // further tokens, some in the backlog and some stored, which are removed again
    for (int back = 1; back <= 50; back += 49) {
        reset_session(m, 1);
        run_ids(m, 1, ids, n - 1, CHUNKS, 100, false);
        run_ids(m, 1, ids, back, back > 1 ? CHAINS_WALKED : CHUNKS, 10, true);
        CHECK(shorten_session(m, 1, ids, n - 1), "%s: a session cannot be %d tokens shorter", path, back);
        run_ids(m, 1, ids + n - 1, 1, CHUNKS, 1, false);
        const Block got = draft_alone(m, 0, 9);
        same_block(&got, &want, "tokens taken back");
        CHECK(m->drafter->context_start[1] == 0, "%d tokens taken back: the context begins at %d", back,
              m->drafter->context_start[1]);
    }
    close_model(m);
}

// Rows of a context that the drafter has overwritten. A shorter session keeps its context if the window of the next row
// (64 tokens, in rings of 128 rows) is whole, else it starts a new one. backlog: the last rows were added from the
// backlog: 33, which take 64 rows.
static void test_context_edge(const char *path, const char *drafter) {
    enum { N = 200, BACKLOG = 33, REACH = 128 - (64 - 1) };
    int32_t ids[N + BACKLOG];
    Model *m = open_pair(path, plan(drafter, 2));
    random_ids(ids, N + BACKLOG, m->config.vocab);
    CHECK(m->drafter->caches[0].slots == 128 && draft_window(m->drafter, 0) == 64, "%s: other rings: a weak test",
          drafter);
    for (int backlog = 0; backlog < 2; backlog++)
        for (int lost = 0; lost < 2; lost++) {
            const int back = N + 64 * backlog - REACH - lost;
            reset_session(m, 0);
            run_ids(m, 0, ids, N, CHUNKS, N, false);
            if (backlog) run_ids(m, 0, ids + N, BACKLOG, CHUNKS, 1, false);
            if (backlog) draft_alone(m, 0, 9);
            CHECK(shorten_session(m, 0, ids, back), "%s: a session cannot go back to %d tokens", path, back);
            CHECK(m->drafter->context_start[0] == (lost ? back : 0),
                  "%s%s, back to %d tokens: the context begins at %d, expected %d", path,
                  backlog ? ", a backlog" : "", back, m->drafter->context_start[0], lost ? back : 0);
            if (lost) continue;
            const Block got = draft_alone(m, 0, 9);
            reset_session(m, 1);
            run_ids(m, 1, ids, back, CHUNKS, back, false);
            const Block want = draft_alone(m, 0, 9);
            same_block(&got, &want, backlog ? "back to the edge of a ring after a backlog" : "back to the edge of a ring");
        }
    close_model(m);
}

// A lost context starts again, like that of a new drafter; only distances between positions matter.
static void test_new_start(const char *path, const char *drafter) {
    enum { N = 600, CUT = 200, MORE = 50 };
    int32_t ids[N];
    ModelOptions o = plan(drafter, 1);
    o.lazy_draft = true;
    Model *m = open_pair(path, o);
    random_ids(ids, N, m->config.vocab);
    run_ids(m, 0, ids, CUT, CHUNKS, 512, false);
    CHECK(!m->drafter->weights_uploaded && m->drafter->context_start[0] == CUT,
          "a lazy drafter keeps tokens from %d on", m->drafter->context_start[0]);
    run_ids(m, 0, ids + CUT, MORE, CHUNKS, 1, false);
    const Block want = draft_alone(m, 0, 9);
    CHECK(m->drafter->weights_uploaded, "a draft does not upload the weights");

    uint8_t *rings = alloc_or_die(copy_rings(m, 0, NULL, COPY_OUT), 1);
    reset_session(m, 0);
    run_ids(m, 0, ids, CUT, CHUNKS, 512, false);
    copy_rings(m, 0, rings, COPY_OUT);
    const int seen = m->n_written[0];
    run_ids(m, 0, ids + CUT, N - CUT, CHUNKS, 512, false);
    CHECK(!shorten_session(m, 0, ids, CUT) && m->drafter->context_start[0] == 0,
          "rings reach back further than expected: a weak test");
    copy_rings(m, 0, rings, COPY_IN);
    m->n_written[0] = seen;
    CHECK(shorten_session(m, 0, ids, CUT), "rings that were put back do not hold");
    CHECK(m->drafter->context_start[0] == CUT, "the context begins at %d, expected %d", m->drafter->context_start[0],
          CUT);
    run_ids(m, 0, ids + CUT, MORE, CHUNKS, 7, false);
    const Block got = draft_alone(m, 0, 9);
    same_block(&got, &want, "a context that starts anew");
    free(rings);
    close_model(m);
}

// Sessions that are drafted together get the same drafts as alone, also a subset in any order. More sessions than fit
// one step.
static void test_together(const char *path, const char *drafter) {
    enum { N = 10 };
    static const int groups[][N] = { { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 }, { 2, 0, -1 }, { 9, 3, 1, -1 }, { 1, -1 } };
    Model *m = open_pair(path, plan(drafter, N));
    int32_t tokens[512], next[N], ids[N], one[N], got[DEPTH * N * WIDTH];
    float logits[DEPTH * N * WIDTH], sums[DEPTH * N];
    StepRow rows[N];
    StepSeg segs[N];
    Block alone[N];
    random_ids(tokens, 512, m->config.vocab);
    for (int s = 0; s < N; s++) {
        run_ids(m, s, tokens + s, 30 + 40 * s, CHUNKS, 64, false);
        rows[s] = (StepRow){ .token = s * 31 + 5, .output = true };
        segs[s] = (StepSeg){ .seq = (s + 1) % N, .kind = SEG_CHAIN, .n = 1, .rows = &rows[s] };
        next[s] = s * 37 + 11;
        one[s] = 1;
    }
    step(m, segs, N);
    commit(m, one, NULL);
    for (int s = 0; s < N; s++) alone[s] = draft_alone(m, s, next[s]);
    CHECK(memcmp(alone[0].logits, alone[1].logits, sizeof alone[0].logits), "sessions draft the same: a weak test");
    set_next(m, next, N);
    for (size_t g = 0; g < sizeof groups / sizeof *groups; g++) {
        int n = 0;
        while (n < N && groups[g][n] >= 0) {
            ids[n] = groups[g][n];
            n++;
        }
        issue_draft(m, ids, n, DEPTH);
        read_back(m, got, m->drafter->ids, (size_t)(DEPTH * n * WIDTH) * sizeof *got);
        read_back(m, logits, m->drafter->logits, (size_t)(DEPTH * n * WIDTH) * sizeof *logits);
        read_back(m, sums, m->drafter->logsumexp, (size_t)(DEPTH * n) * sizeof *sums);
        for (int i = 0; i < n; i++)
            for (int k = 0; k < DEPTH; k++) {
                const Block *want = &alone[ids[i]];
                CHECK(!memcmp(got + (k * n + i) * WIDTH, want->ids + k * WIDTH, WIDTH * sizeof *got) &&
                          !memcmp(logits + (k * n + i) * WIDTH, want->logits + k * WIDTH, WIDTH * sizeof *logits) &&
                          sums[k * n + i] == want->logsumexp[k],
                      "%s: group %zu, segment %d, depth %d: not what it drafts alone", path, g, ids[i], k);
            }
    }
    close_model(m);
}

// ---- a block in plain loops -----------------------------------------------------------------------------------------

// of the micro models; rows: those of the context, then the block
enum { VOCAB = 512, DIM = 64, HEAD = 128, MOST_ROWS = 256 };

typedef struct {
    const char *family;
    int   taps[2];            // layers whose outputs the drafter reads
    int   causal;             // -1: sliding layers are causal, the full one is not
    int   n;                  // context length
} BlockCase;

static void plain_norm(double *x, const float *w, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += x[i] * x[i];
    for (int i = 0; i < n; i++) x[i] *= (w ? (double)w[i] : 1) / sqrt(sum / n + 1e-6);
}

static void plain_times(double *out, const Tensor *w, const double *x) {       // of f32
    for (int r = 0; r < w->rows; r++) {
        out[r] = 0;
        for (int i = 0; i < w->cols; i++)
            out[r] += (double)((const float *)w->data)[(size_t)r * (size_t)w->cols + i] * x[i];
    }
}

static void plain_turn(double *head, int pos) {
    for (int i = 0; i < HEAD / 2; i++) {
        const double angle = pos * pow(1e6, -2.0 * i / HEAD), a = head[i], b = head[i + HEAD / 2];
        head[i] = a * cos(angle) - b * sin(angle);
        head[i + HEAD / 2] = a * sin(angle) + b * cos(angle);
    }
}

// K and V of row y at a position, for one KV head.
static void plain_kv(const LayerWeights *w, const double *y, int pos, double *k, double *v) {
    plain_times(k, &w->attn_k, y);
    plain_norm(k, w->attn_k_norm, HEAD);
    plain_turn(k, pos);
    plain_times(v, &w->attn_v, y);
}

// True: row j of the block sees row t of context and block.
static bool plain_sees(const BlockCase *c, bool full, int j, int t) {
    if (t < c->n) return full || c->n + j - t < 64;
    return c->causal == 1 || (c->causal < 0 && !full) ? t - c->n <= j : true;
}

static void plain_layer(const BlockCase *c, const LayerWeights *w, bool full, double u[][DIM], double k[][HEAD],
                        double v[][HEAD]) {
    double z[DEPTH + 1][DIM], q[2 * HEAD], o[2 * HEAD], add[DIM], gate[128], up[128];
    for (int j = 0; j <= DEPTH; j++) {
        memcpy(z[j], u[j], sizeof z[j]);
        plain_norm(z[j], w->attn_norm, DIM);
        plain_kv(w, z[j], c->n + j, k[c->n + j], v[c->n + j]);
    }
    for (int j = 0; j <= DEPTH; j++) {
        plain_times(q, &w->attn_q, z[j]);
        for (int h = 0; h < 2; h++) {
            double total = 0, *out = o + h * HEAD;
            plain_norm(q + h * HEAD, w->attn_q_norm, HEAD);
            plain_turn(q + h * HEAD, c->n + j);
            memset(out, 0, HEAD * sizeof *out);
            for (int t = 0; t < c->n + DEPTH + 1; t++) {
                double score = 0;
                if (!plain_sees(c, full, j, t)) continue;
                for (int i = 0; i < HEAD; i++) score += q[h * HEAD + i] * k[t][i];
                const double p = exp(score / sqrt(HEAD));
                total += p;
                for (int i = 0; i < HEAD; i++) out[i] += p * v[t][i];
            }
            for (int i = 0; i < HEAD; i++) out[i] /= total;
        }
        plain_times(add, &w->attn_output, o);
        for (int i = 0; i < DIM; i++) u[j][i] += add[i];
        memcpy(z[j], u[j], sizeof z[j]);
        plain_norm(z[j], w->ffn_norm, DIM);
        plain_times(gate, &w->ffn_gate, z[j]);
        plain_times(up, &w->ffn_up, z[j]);
        for (int i = 0; i < w->ffn_gate.rows; i++) gate[i] *= up[i] / (1 + exp(-gate[i]));
        plain_times(add, &w->ffn_down, gate);
        for (int i = 0; i < DIM; i++) u[j][i] += add[i];
    }
}

// taps: the outputs of layers, (n, DIM) each. logits: of rows 1 .. DEPTH.
static void plain_block(const BlockCase *c, const Model *m, const float *const *taps, int32_t next,
                        double logits[][VOCAB]) {
    static double k[MOST_ROWS][HEAD], v[MOST_ROWS][HEAD], context[MOST_ROWS][DIM];
    const Drafter *d = m->drafter;
    const float *table = m->weights.token_embd.data;
    double both[2 * DIM], u[DEPTH + 1][DIM];
    for (int t = 0; t < c->n; t++) {
        for (int i = 0; i < 2 * DIM; i++) both[i] = (double)taps[i / DIM][(size_t)t * DIM + (size_t)(i % DIM)];
        plain_times(context[t], &d->fc, both);
        plain_norm(context[t], d->hidden_norm, DIM);
    }
    for (int j = 0; j <= DEPTH; j++)
        for (int i = 0; i < DIM; i++) u[j][i] = (double)table[(size_t)(j ? 4 : next) * DIM + (size_t)i] * sqrt(DIM);
    for (int l = 0; l < d->config.n_layers; l++) {
        for (int t = 0; t < c->n; t++) plain_kv(&d->weights.layer[l], context[t], t, k[t], v[t]);
        plain_layer(c, &d->weights.layer[l], l == d->config.n_layers - 1, u, k, v);
    }
    for (int j = 1; j <= DEPTH; j++) {
        plain_norm(u[j], d->weights.output_norm, DIM);
        plain_times(logits[j - 1], m->weights.output.data ? &m->weights.output : &m->weights.token_embd, u[j]);
        for (int i = 0; i < VOCAB; i++) logits[j - 1][i] = 30 * tanh(logits[j - 1][i] / 30);
    }
}

static void put_i32s(Draft *d, const char *key, const int *v, int n) {
    Bytes *b = &draft_key(d, key)->value;
    b->n = 0;
    put_u32(b, GGUF_V_ARRAY);
    put_u32(b, GGUF_V_I32);
    put_u64(b, (uint64_t)n);
    for (int i = 0; i < n; i++) put_u32(b, (uint32_t)v[i]);
}

static const char *dflash_of(const char *family, const char *quant) {
    char name[64];
    snprintf(name, sizeof name, "%s-%s-dflash", family, quant);
    return make_model(name, family, quant, "--kind", "dflash", NULL);
}

// The taps come from a target on the CPU with --dump; the block from another one.
static void test_block(const BlockCase *c) {
    int32_t ids[MOST_ROWS];
    double want[DEPTH][VOCAB], worst = 0, most = 0;
    const float *taps[2] = { 0 };
    const char *path = kept(make_model(c->family, c->family, "f32", NULL));
    Draft file = read_draft(dflash_of(c->family, "f32"));
    put_i32s(&file, "dflash.target_layers", (const int[]){ c->taps[0] + 1, c->taps[1] + 1 }, 2);
    if (c->causal >= 0) draft_u16(&file, "dflash.attention.causal", (unsigned)c->causal);
    const char *drafter = kept(write_draft(&file, in_tmp("block.gguf")));
    ModelOptions o = plan(drafter, 1);
    o.k_type = o.v_type = KV_F32;
    o.draft_width = VOCAB;
    random_ids(ids, c->n, VOCAB);
    Model *plain = alloc_or_die(1, sizeof *plain);
    load_model(plain, path, cpu_ops(), o, "");
    run_prompt(plain, 0, ids, c->n);
    for (int i = 0; i < plain->n_checkpoints; i++)
        for (int k = 0; k < 2; k++)
            if (!strcmp(plain->checkpoints[i].name, "l_out") && plain->checkpoints[i].layer == c->taps[k])
                taps[k] = plain->checkpoints[i].data;
    plain_block(c, plain, taps, 9, want);

    Model *m = open_pair(path, o);
    static int32_t got_ids[DEPTH * VOCAB];
    static float got[DEPTH * VOCAB], sums[DEPTH];
    run_ids(m, 0, ids, c->n, CHUNKS, 512, false);
    set_next(m, &(int32_t){ 9 }, 1);
    issue_draft(m, &(int32_t){ 0 }, 1, DEPTH);
    read_back(m, got_ids, m->drafter->ids, sizeof got_ids);
    read_back(m, got, m->drafter->logits, sizeof got);
    read_back(m, sums, m->drafter->logsumexp, sizeof sums);
    for (int k = 0; k < DEPTH; k++) {
        double sum = 0;
        for (int i = 0; i < VOCAB; i++) {
            const double z = want[k][got_ids[k * VOCAB + i]];
            worst = fmax(worst, fabs(z - (double)got[k * VOCAB + i]));
            most = fmax(most, fabs(z));
            sum += exp(z);
        }
        CHECK(fabs(log(sum) - (double)sums[k]) < 1e-3, "%s: depth %d: logsumexp %g, expected %g", c->family, k,
              (double)sums[k], log(sum));
    }
    CHECK(worst <= (on_gpu ? 1e-3 : 1e-4) * most,
          "%s, taps %d and %d, causal %d, %d tokens: logits differ by %.3g of %.3g", c->family,
          c->taps[0], c->taps[1], c->causal, c->n, worst, most);
    close_model(plain);
    close_model(m);
}

// More tokens than a ring has slots; taps of the last layer and of layers that share K and V, in any order.
static void test_blocks(void) {
    static const BlockCase cases[] = {
        { "micro-dense", { 0, 2 }, -1, 200 }, { "micro-dense", { 3, 1 }, 0, 90 }, { "micro-moe", { 0, 2 }, -1, 20 },
        { "micro-moe", { 2, 3 }, 1, 200 }, { "micro-e", { 1, 3 }, -1, 200 }, { "micro-e", { 4, 0 }, -1, 70 },
        { "micro-e", { 5, 5 }, -1, 100 }, { "micro-e", { 0, 1 }, -1, 100 },
    };
    for (size_t i = 0; i < (on_gpu ? 2 : sizeof cases / sizeof *cases); i++) test_block(&cases[i]);
}

// ---- files ----------------------------------------------------------------------------------------------------------

static void set_text(Draft *d, const char *key, const char *text) {
    Bytes *b = &draft_key(d, key)->value;
    b->n = 0;
    put_u32(b, GGUF_V_STR);
    put_text(b, text);
}

static void rename_key(Draft *d, const char *from, const char *to) {
    snprintf(draft_key(d, from)->name, sizeof d->keys->name, "%s", to);
}
static void rename_tensor(Draft *d, const char *from, const char *to) {
    snprintf(draft_tensor(d, from)->name, sizeof d->tensors->name, "%s", to);
}

// The file in an older notation, without the keys that it implies.
static const char *write_older(const char *from, const char *to, const char *arch, const char *fc, const char *norm) {
    static const char *const keys[][2] = { { "block_size", "dflash.block_size" },
                                           { "attention.sliding_window", "dflash.sliding_window" },
        { "final_logit_softcapping", "dflash.logit_softcap" }, { "attention.sliding_window_pattern",
                                                                 NULL }, { "embedding_scale", NULL } };
    Draft d = read_draft(from);
    char name[128], other[128];
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        snprintf(name, sizeof name, "dflash.%s", keys[i][0]);
        snprintf(other, sizeof other, "dflash.%s", keys[i][1] ? keys[i][1] : "");
        rename_key(&d, name, keys[i][1] ? other : "");
    }
    rename_key(&d, "dflash.target_layers", "");
    put_i32s(&d, "dflash.dflash.target_layer_ids", (const int[]){ 0, 2 }, 2);
    rename_key(&d, "tokenizer.ggml.mask_token_id", "");
    draft_u16(&d, "dflash.dflash.mask_token_id", 4);
    for (size_t i = 0; i < d.n_keys; i++)
        if (!strncmp(d.keys[i].name, "dflash.", 7)) {
            snprintf(other, sizeof other, "%s.%s", arch, d.keys[i].name + 7);
            snprintf(d.keys[i].name, sizeof d.keys->name, "%s", other);
        }
    set_text(&d, "general.architecture", arch);
    rename_tensor(&d, "fc.weight", fc);
    rename_tensor(&d, "enc.output_norm.weight", norm);
    return write_draft(&d, to);
}

// The file as a Hugging Face folder, with the published names, in f32.
static const char *write_folder(const char *from, const char *path) {
    static const char *const names[][2] = { { "fc.weight", "fc.weight" },
                                            { "enc.output_norm.weight", "hidden_norm.weight" },
        { "output_norm.weight", "norm.weight" }, { "attn_norm.weight", "input_layernorm.weight" },
        { "ffn_norm.weight", "post_attention_layernorm.weight" }, { "attn_q.weight", "self_attn.q_proj.weight" },
        { "attn_k.weight", "self_attn.k_proj.weight" }, { "attn_v.weight", "self_attn.v_proj.weight" },
        { "attn_output.weight", "self_attn.o_proj.weight" }, { "attn_q_norm.weight", "self_attn.q_norm.weight" },
        { "attn_k_norm.weight", "self_attn.k_norm.weight" }, { "ffn_gate.weight", "mlp.gate_proj.weight" },
        { "ffn_up.weight", "mlp.up_proj.weight" }, { "ffn_down.weight", "mlp.down_proj.weight" } };
    char file[1200], entry[512], sep = '{';
    Draft d = read_draft(from);
    Bytes head = { 0 }, data = { 0 };
    for (size_t i = 0; i < d.n_tensors; i++) {
        const DraftTensor *t = &d.tensors[i];
        int l = -1, end = 0;
        if (sscanf(t->name, "blk.%d.%n", &l, &end) < 1) end = 0;
        size_t k = 0;
        while (strcmp(names[k][0], t->name + end)) k++;
        char layer[32] = "";
        if (end) snprintf(layer, sizeof layer, "layers.%d.", l);
        put(&head, entry, (size_t)snprintf(entry, sizeof entry, "%c\"%s%s\":", sep, layer, names[k][1]));
        char shape[64];
        if (t->n_dims > 1) snprintf(shape, sizeof shape, "%d,%d", (int)t->ne[1], (int)t->ne[0]);
        else snprintf(shape, sizeof shape, "%d", (int)t->ne[0]);
        put(&head, entry, (size_t)snprintf(entry, sizeof entry,
                                           "{\"dtype\":\"F32\",\"shape\":[%s],\"data_offsets\":[%zu,%zu]}", shape,
                                           data.n, data.n + t->data.n));
        put(&data, t->data.data, t->data.n);
        sep = ',';
    }
    put(&head, "}", 1);
    put_padding(&head, 8);
    for (size_t i = 0; i < head.n; i++) head.data[i] = head.data[i] ? head.data[i] : ' ';
    CHECK(!mkdir(path, 0700), "%s: %s", path, strerror(errno));
    snprintf(file, sizeof file, "%s/model.safetensors", path);
    FILE *f = must(fopen(file, "wb"));
    const uint64_t n_head = head.n;
    fwrite(&n_head, 8, 1, f);
    fwrite(head.data, 1, head.n, f);
    fwrite(data.data, 1, data.n, f);
    fclose(f);
    snprintf(file, sizeof file, "%s/config.json", path);
    f = must(fopen(file, "wb"));
    fprintf(f,
            "{\"architectures\":[\"DFlashDraftModel\"],\"model_type\":\"qwen3\",\"num_hidden_layers\":5,"
            "\"hidden_size\":64,\"intermediate_size\":128,\"num_attention_heads\":2,\"num_key_value_heads\":1,"
            "\"head_dim\":128,\"rms_norm_eps\":1e-6,\"rope_theta\":1000000,\"rope_scaling\":null,"
            "\"hidden_act\":\"silu\",\"sliding_window\":64,\"block_size\":16,"
            "\"layer_types\":[\"sliding_attention\",\"sliding_attention\",\"sliding_attention\",\"sliding_attention\","
            "\"full_attention\"],\"vocab_size\":512,\"dflash_config\":{\"mask_token_id\":4,"
            "\"target_layer_ids\":[0,2]}}");
    fclose(f);
    free(head.data);
    free(data.data);
    free_draft(&d);
    return path;
}

static Block block_of(const char *path, ModelOptions o) {               // after a prompt
    int32_t ids[60];
    Model *m = open_pair(path, o);
    random_ids(ids, 60, m->config.vocab);
    run_ids(m, 0, ids, 60, CHUNKS, 60, false);
    const Block b = draft_alone(m, 0, 9);
    close_model(m);
    return b;
}

static void test_forms(void) {
    const char *path = kept(make_model("micro-dense", "micro-dense", "f32", NULL)),
        *drafter = kept(dflash_of("micro-dense", "f32"));
    ModelOptions o = plan(drafter, 1);
    const Block want = block_of(path, o);
    o.lazy_draft = true;
    Block got = block_of(path, o);
    same_block(&got, &want, "a lazy drafter");
    o = plan(write_older(drafter, in_tmp("older.gguf"), "gemma4-dflash-draft", "dflash.fc.weight",
                         "dflash.hidden_norm.weight"), 1);
    got = block_of(path, o);
    same_block(&got, &want, "gemma4-dflash-draft");
    o = plan(write_older(drafter, in_tmp("older.gguf"), "dflash-draft", "dflash_fc.weight",
                         "dflash_hidden_norm.weight"), 1);
    got = block_of(path, o);
    same_block(&got, &want, "dflash-draft");
    o = plan(write_folder(drafter, kept(in_tmp("folder"))), 1);
    got = block_of(path, o);
    same_block(&got, &want, "a folder");
    o = plan(drafter, 1);
    o.draft_depth = 0;
    Model *m = open_pair(path, o);
    CHECK(m->options.draft_depth == 15, "depth: expected 15, one less than a block, got %d", m->options.draft_depth);
    close_model(m);
}

#define REFUSED(path, drafter, ...) refused(path, plan(drafter, 1), (const char *const[]){ __VA_ARGS__, NULL })

static void test_refused(void) {
    const char *path = kept(make_model("micro-dense", "micro-dense", "f32", NULL)),
        *drafter = kept(dflash_of("micro-dense", "f32"));
    const char *broken = kept(in_tmp("broken.gguf"));
    REFUSED(path, MINI_DFLASH, "micro-dense.gguf", MINI_DFLASH, "hidden size: expected 64, got 256");
    REFUSED(MINI, drafter, MINI, "dflash.gguf", "hidden size: expected 256, got 64");
    static const struct { const char *key; unsigned value; const char *says; } keys[] = {
        { "dflash.vocab_size", 511, "vocabulary: expected 512, got 511" },
        { "dflash.block_size", 1, "dflash.block_size" },
        { "dflash.attention.key_length", 64, "value_length" }, { "dflash.attention.head_count", 3, "shape" },
        { "dflash.attention.head_count_kv", 3, "divisor of 2 heads, got 3" },
        { "tokenizer.ggml.mask_token_id", 512, "mask_token_id" },
        { "dflash.target_layers", 1, "micro-dense.gguf" }, { "dflash.block_count", 6, "sliding_window_pattern" },
    };
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        Draft d = read_draft(drafter);
        draft_u16(&d, keys[i].key, keys[i].value);
        REFUSED(path, write_draft(&d, broken), "broken.gguf", keys[i].says);
    }
    static const int taps[][3] = { { 1, 5 }, { 0, 3 }, { 1, 2, 3 } };
    static const char *const says[] = { "expected 1 to 4, as the model has 4 layers, got 5",
                                        "expected 1 to 4, as the model has 4 layers, got 0",
                                        "columns of fc, tapped layers times hidden size: expected 192, got 128" };
    for (int i = 0; i < 3; i++) {
        Draft d = read_draft(drafter);
        put_i32s(&d, "dflash.target_layers", taps[i], i < 2 ? 2 : 3);
        REFUSED(path, write_draft(&d, broken), "broken.gguf", "micro-dense.gguf", says[i]);
    }
    static const char *const gone[] = { "dflash.target_layers", "tokenizer.ggml.mask_token_id", "dflash.block_size",
                                        "dflash.rope.freq_base" };
    for (size_t i = 0; i < sizeof gone / sizeof *gone; i++) {
        Draft d = read_draft(drafter);
        rename_key(&d, gone[i], "");
        REFUSED(path, write_draft(&d, broken), "broken.gguf", gone[i], "E_META_MISSING");
    }
    static const char *const extra[][2] = {
        { "markov_w1.weight", "DSpark draft models are not supported" }, { "d2t", "their own vocabulary" },
        { "selector_hidden.weight", "DFlash2 draft models are not supported" },
        { "blk.1.attn_sinks.weight", "attention sinks" },
    };
    for (size_t i = 0; i < sizeof extra / sizeof *extra; i++) {
        Draft d = read_draft(drafter);
        draft_add(&d, extra[i][0], 32);
        REFUSED(path, write_draft(&d, broken), "broken.gguf", extra[i][1]);
    }
    Draft d = read_draft(drafter);
    set_text(&d, "dflash.hidden_activation", "gelu");
    REFUSED(path, write_draft(&d, broken), "broken.gguf", "expected silu, got 'gelu'");
    d = read_draft(drafter);
    draft_tensor(&d, "fc.weight")->name[0] = 0;
    REFUSED(path, write_draft(&d, broken), "fc.weight", "missing");
    d = read_draft(drafter);
    draft_add(&d, "rope_freqs.weight", 64)->type = GGUF_F16;
    REFUSED(path, write_draft(&d, broken), "rope_freqs.weight", "expected type F32, got F16");
}

// ---- trained models -------------------------------------------------------------------------------------------------

// Greedy text with a block at every token: counts accepted drafts at each depth. least: the rates of
// models/acceptance.md for this kind of text, less the deviation that few prompts may have.
static void test_acceptance(const char *question, int n_ids, int depth, const double *least) {
    enum { MOST = 256, ALL = 15 };
    char text[512];
    ModelOptions o = plan(MINI_DFLASH, 1);
    o.draft_depth = depth;
    o.draft_width = 1;
    Model *m = open_pair(MINI, o);
    Tokenizer tok;
    TokIds prompt = { 0 };
    int32_t said[MOST + 1] = { 0 }, drafts[MOST][ALL];
    int right[ALL] = { 0 }, tried[ALL] = { 0 }, n = 0;
    load_tokenizer(&tok, &m->gguf, m->config.vocab);
    tok_push_id(&tok, &prompt, tok.bos);
    snprintf(text, sizeof text, "<|turn>user\n%s<turn|>\n<|turn>model\n", question);
    if (tok_encode(&tok, text, strlen(text), TOK_SPECIAL, &prompt) < 0) die("%s", tok.err);
    run_prompt(m, 0, prompt.ids, (int)prompt.n);
    said[n++] = greedy_token(m);
    commit_all(m);
    while (n < n_ids && !tok_is_stop(&tok, said[n - 1])) {
        set_next(m, &said[n - 1], 1);
        issue_draft(m, &(int32_t){ 0 }, 1, depth);
        read_back(m, drafts[n - 1], m->drafter->ids, (size_t)depth * sizeof **drafts);
        run_prompt(m, 0, &said[n - 1], 1);
        said[n++] = greedy_token(m);
        commit_all(m);
    }
    for (int i = 0; i + 1 < n; i++)
        for (int k = 0, good = 1; k < depth && i + 1 + k < n; k++) {
            good = good && drafts[i][k] == said[i + 1 + k];
            tried[k]++;
            right[k] += good;
        }
    for (int k = 0; k < depth; k++)
        CHECK(tried[k] && right[k] >= least[k] * tried[k], "%s: depth %d: %d of %d are right, expected %.2f", question,
              k + 1, right[k], tried[k], least[k]);
    tok_ids_free(&prompt);
    tok_free(&tok);
    close_model(m);
}

int main(int argc, char **argv) {
    take_card(&argc, argv);
    const bool few = argc > 1 && !strcmp(argv[1], "-few");
    static const double story[15] = { .9, .9, .9, .9, .9, .9, .9, .9, .8, .8, .8, .8, .8, .8, .8 },
        some[2] = { .6, .4 };
    make_tmp();
    start_threads(0);
    for (int gpu = few; gpu < 2; gpu++) {
        on_gpu = gpu;
        if (gpu && !gpu_ops()) {
            SKIP("no GPU: DFlash on the CUDA backend");
            break;
        }
        const char *path = kept(make_model("micro-e-q8", "micro-e", "q8_0", NULL)),
            *drafter = kept(dflash_of("micro-e", "q8_0"));
        test_blocks();
        test_contexts(path, drafter, few ? 150 : 300);
        if (few) break;
        if (!gpu) test_new_start(path, drafter);
        if (!gpu) test_context_edge(path, drafter);
        test_together(path, drafter);
        test_acceptance("Tell me a story about a fox.", 70, 15, story);
        test_acceptance("Tell me a story about a robot.", 30, 8, story);
        test_acceptance("What is the capital of France?", 60, 2, some);
    }
    on_gpu = false;
    if (!few) {
        test_forms();
        test_refused();
    }
    return test_done("dflash");
}
