/* cpu.h - the CPU backend: the operations of gemma4.h, fast and on several threads.
 *
 * Uses base.h (threads), gemma4.h, gguf.h (dot products of block formats) and kv.h. Each operation is a function
 * cpu_<op>; parallel() divides its rows or columns among the threads. Weights are read in place from the mapped file.
 * Begin with cpu_ops(), the table at the end.
 * One file defines CPU_IMPLEMENTATION before it includes this one, and so gets the bodies.
 *   [1] Memory    [2] Building blocks    [3] Body    [4] Cache    [5] Images    [6] Output */
#ifndef CPU_H
#define CPU_H

// log(sum of exp(logits)) over the vocabulary, summed in f64; NaN if a logit is NaN.
double logsumexp(const float *logits, int vocab);

#ifdef CPU_IMPLEMENTATION

// ==== [1] Memory ====================================================================================================

typedef struct { uint64_t key, weight; } Candidate;    // a token; key orders tokens, the best has the highest

enum { PASS_PAIRS = 4096 };   // the expert operations take at most this many pairs (row, chosen expert) at a time

// Attention numbers its keys: j < len is the committed position j, len + i is row i of the segment. The keys are cut
// into chunks of SPLIT_CHUNK; chunk c belongs to split c mod N_SPLITS. Each split has a partial result (split-K
// attention), and partial results are merged in the order of the splits. So threads can divide a long context when a
// step has few queries, and the number of threads changes no bit.
enum { SPLIT_CHUNK = 256, N_SPLITS = 16, MAX_SPLIT_QUERIES = 256 };

static struct {               // scratch of the CPU backend: one prepared input at a time, one row of logits
    Act        y;             // (max_rows, max_cols)
    uint8_t   *packed;        // (max_rows or pairs, max_cols) the input in the form that gguf_dot_q8_rows reads
    int32_t   *order;         // (pairs) pairs sorted by expert
    size_t     rows, pairs, cols, vocab;               // sizes of these buffers
    Candidate *candidates;    // (vocab)
    float     *logits;        // (vocab)
    int32_t   *token_counts;  // (vocab) all 0 between operations
    float     *partials;      // (MAX_SPLIT_QUERIES, N_SPLITS, MAX_HEAD_DIM + 2) largest score, sum, output
} cpu;

static size_t cpu_weight_bytes(const Tensor *w) {
    (void)w;
    return 0;
}

static void cpu_upload(Tensor *w, void *dst) {         // weights are read in the mapped file
    (void)w;
    (void)dst;
}

static void cpu_memory(size_t *free_bytes, size_t *total) {
    *free_bytes = available_memory();
    *total = total_memory();
}

static void read_words(const void *task, int first, int end) {
    const uint64_t *words = task;
    uint64_t sum[16] = { 0 };
    for (size_t i = (size_t)first * 512; i < (size_t)end * 512; i += 16)
        for (int j = 0; j < 16; j++) sum[j] += words[i + j];
    for (int j = 1; j < 16; j++) sum[0] += sum[j];
    *(volatile uint64_t *)&sum[1] = sum[0];
}

static void touch_pages(const void *task, int first, int end) {        // a page has no memory before it is written
    for (int i = first; i < end; i++) (*(char *const *)task)[(size_t)i * 4096] = 1;
}

// Bytes per second that all threads together read from memory: the best of three passes over a buffer larger than the
// caches. Measured once for a number of threads. 0: there is no memory for the buffer.
static double cpu_bandwidth(void) {
    static double best;
    static int n_threads;
    if (n_threads == (start_threads(0), count_threads())) return best;
    const size_t quarter = available_memory() / 4;
    const int n_pages = (int)((quarter < (512u << 20) ? quarter : 512u << 20) / 4096);
    char *words = aligned_alloc(4096, (size_t)n_pages * 4096);
    if (!words || !n_pages) return 0;
    best = 0;
    n_threads = count_threads();
    parallel(n_pages, chunk_size(n_pages, 1), touch_pages, &words);
    for (int i = 0; i < 3; i++) {
        const double start = seconds();
        parallel(n_pages, chunk_size(n_pages, 1), read_words, words);
        const double speed = n_pages * 4096.0 / (seconds() - start);
        if (speed > best) best = speed;
    }
    free(words);
    return best;
}

static void multiply_int8(const void *task, int first, int end) {
    (void)task;
    gguf_multiply_int8((size_t)(end - first) * 4096);
}

// Operations (two per multiplication) per second of the instruction that multiplies int8 in prompts, on all threads:
// the best of ten runs of some milliseconds. 0: not known.
static double cpu_int8_peak(void) {
    const int n_items = 64 * (start_threads(0), count_threads());
    const double n = gguf_multiply_int8(1) * 4096 * n_items;
    double best = 0;
    for (int i = 0; i < 10 && n > 0; i++) {
        const double start = seconds();
        parallel(n_items, 8, multiply_int8, NULL);
        const double speed = 2 * n / (seconds() - start);
        if (speed > best) best = speed;
    }
    return best;
}

static size_t max_pairs(const Limits *lim) {
    const size_t all = (size_t)lim->max_rows * lim->max_experts;
    return all < PASS_PAIRS ? all : PASS_PAIRS;
}

static size_t packed_bytes(size_t rows, size_t pairs, size_t cols) {
    return (rows > pairs ? rows : pairs) * gguf_packed_size(cols);
}

static size_t cpu_scratch_bytes(const Limits *lim) {
    const size_t n = (size_t)lim->max_rows * lim->max_cols, pairs = max_pairs(lim);
    return n * 5 + n / 32 * 4 + lim->max_rows * 4 + MAX_SPLIT_QUERIES * N_SPLITS * (MAX_HEAD_DIM + 2) * sizeof(float) +
           packed_bytes(lim->max_rows, pairs, lim->max_cols) + pairs * sizeof(int32_t) +
           lim->vocab * (sizeof(Candidate) + sizeof(float) + sizeof(int32_t));
}

static void cpu_init(const Limits *lim) {
    const size_t rows = (size_t)max_int(lim->max_rows, (int)cpu.rows);
    const size_t cols = (size_t)max_int(lim->max_cols, (int)cpu.cols);
    const size_t vocab = (size_t)max_int(lim->vocab, (int)cpu.vocab);
    const size_t pairs = (size_t)max_int((int)max_pairs(lim), (int)cpu.pairs);
    if (rows == cpu.rows && pairs == cpu.pairs && cols == cpu.cols && vocab == cpu.vocab) return;
    free(cpu.y.f);
    free(cpu.y.q);
    free(cpu.y.s);
    free(cpu.packed);
    free(cpu.order);
    free(cpu.candidates);
    free(cpu.logits);
    free(cpu.token_counts);
    cpu.y.f = alloc_or_die(rows * cols, sizeof *cpu.y.f);
    cpu.y.q = alloc_or_die(rows * cols, sizeof *cpu.y.q);
    cpu.y.s = alloc_or_die(rows * (cols / 32 + 1), sizeof *cpu.y.s);
    cpu.packed = aligned_alloc(64, round_up(packed_bytes(rows, pairs, cols), 64));
    if (!cpu.packed) die("out of memory: cannot allocate %zu bytes", packed_bytes(rows, pairs, cols));
    cpu.order = alloc_or_die(pairs, sizeof *cpu.order);
    cpu.candidates = alloc_or_die(vocab, sizeof *cpu.candidates);
    cpu.logits = alloc_or_die(vocab, sizeof *cpu.logits);
    cpu.token_counts = alloc_or_die(vocab, sizeof *cpu.token_counts);
    if (!cpu.partials)
        cpu.partials = alloc_or_die((size_t)MAX_SPLIT_QUERIES * N_SPLITS * (MAX_HEAD_DIM + 2), sizeof *cpu.partials);
    cpu.rows = rows;
    cpu.pairs = pairs;
    cpu.cols = cols;
    cpu.vocab = vocab;
}

// A large piece of calloc() is new pages, which are zero: they take memory when they are first used. The word before
// the aligned address says where the piece begins.
static void *cpu_reserve(size_t bytes) {
    char *all = calloc(1, bytes + 2 * 256);
    if (!all) return NULL;
    char *p = all + 2 * 256 - (uintptr_t)all % 256;
    ((void **)(void *)p)[-1] = all;
    return p;
}

static void cpu_release(void *p) {
    if (p) free(((void **)p)[-1]);
}

static void cpu_copy(const Copy *c) { memcpy(c->dst, c->src, c->bytes); }

static bool cpu_begin(StepKey key) {                   // true: this backend records no steps, so issue the operations
    (void)key;
    return true;
}

static void cpu_end(void) {}
static void cpu_wait(void) {}

// ==== [2] Building blocks ===========================================================================================

// 1 / sqrt(mean(x^2) + eps). The sum is in f64: eight partial sums, by i mod 8, which are then added in order.
static float rms_scale(const float *x, int n, float eps) {
    double part[8] = { 0 }, ss = 0;
    int i = 0;
    for (; i + 8 <= n; i += 8)
        for (int j = 0; j < 8; j++) part[j] += (double)x[i + j] * x[i + j];
    for (; i < n; i++) part[i % 8] += (double)x[i] * x[i];
    for (int j = 0; j < 8; j++) ss += part[j];
    return (float)(1.0 / sqrt(ss / n + eps));
}

// out[i] = w[i] * x[i] / rms(x); w NULL: no weight. out may be x.
static void rms_norm(float *out, const float *x, const float *w, int n, float eps) {
    const float scale = rms_scale(x, n, eps);
    for (int i = 0; i < n; i++) out[i] = w ? w[i] * (x[i] * scale) : x[i] * scale;
}

// e^x, relative error below 2e-7; 0 below -87, e^88 above 88; NaN for NaN. It has no branches, so that the compiler can
// vectorise loops that call it. e^x = 2^n e^r with n the integer nearest to x / ln 2; a polynomial gives e^r, |r| <=
// 0.35.
static inline float exp_of(float x) {
    const float in = x > 88 ? 88 : x < -87 ? -87 : x;
    const float shifted = in * 1.44269504f + 0x1.8p23f, n = shifted - 0x1.8p23f;     // the last bits of shifted hold n
    const float r = (in - n * 0.693359375f) + n * 2.12194440e-4f;                    // n ln 2 in two parts
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1;
    uint32_t bits, two_n;
    memcpy(&bits, &shifted, sizeof bits);
    two_n = (bits << 23) + 0x3f800000u;
    float scale;
    memcpy(&scale, &two_n, sizeof scale);
    return x < -87 ? 0 : p * scale;
}

static inline float tanh_of(float x) { return 1 - 2 / (1 + exp_of(2 * x)); }

// v[i] = act(v[i]). 0.5 (1 + tanh u) is 1 / (1 + e^(-2 u)).
static void activate(ActFn fn, float *v, int n) {
    for (int i = 0; i < n && fn == ACT_SILU; i++) v[i] = v[i] / (1 + exp_of(-v[i]));
    for (int i = 0; i < n && fn == ACT_GELU; i++) {
        const float x = v[i];
        v[i] = x / (1 + exp_of(-1.5957691216057308f * (x + 0.044715f * x * x * x)));
    }
}

// One row of In (gemma4.h): stores x' if the operation asks for it, writes y to out (cols).
static void prepare_row(const In *in, size_t r, int cols, float *out) {
    const size_t at = r * (size_t)cols;
    memset(out, 0, (size_t)cols * sizeof *out);
    for (int k = 0; k < 2; k++) {                      // out = d
        if (!in->delta[k]) continue;
        const float *d = in->delta[k] + at, *w = in->w_delta[k];
        const float scale = w ? rms_scale(d, cols, in->eps) : 1;
        for (int i = 0; i < cols; i++) out[i] += w ? w[i] * (d[i] * scale) : d[i];
    }
    if (in->w_post && (in->delta[0] || in->delta[1])) rms_norm(out, out, in->w_post, cols, in->eps);
    for (int i = 0; i < cols; i++) out[i] = in->scale * ((in->x ? in->x[at + i] : 0) + out[i]);
    if (in->x_out) memcpy(in->x_out + at, out, (size_t)cols * sizeof *out);
    if (in->w_pre) rms_norm(out, out, in->w_pre, cols, in->eps);
}

// The input rows of matrix products: as f32 and, for quantised matrices, as int8.
typedef struct {
    Act            a;         // (n_rows, cols)
    const uint8_t *packed;    // (n_rows) for gguf_dot_q8_rows; NULL if no matrix is quantised
} Rows;

typedef struct {
    const In *in;
    Act       from;           // the Act that a producer wrote; all NULL: compute the rows from `in`
    int       cols;
    bool      quantise, pack;
} PrepareJob;

static void prepare_rows(const void *task, int first, int end) {
    const PrepareJob *job = task;
    const size_t cols = (size_t)job->cols;
    const Act *from = &job->from;
    const bool own = !from->f && !from->q;
    for (int r = first; r < end; r++) {
        const size_t at = (size_t)r * cols;
        if (own) prepare_row(job->in, r, job->cols, cpu.y.f + at);
        if (own && job->quantise) gguf_quantize_q8(cpu.y.f + at, cpu.y.q + at, cpu.y.s + at / 32, cols);
        const Act *a = own ? &cpu.y : from;
        if (job->pack) gguf_pack_q8(a->q + at, a->s + at / 32, cols, cpu.packed + (size_t)r * gguf_packed_size(cols));
    }
}

// The input of a product: the Act that a producer wrote, or else rows computed from In into scratch; quantise: in int8
// too; pack: also packed for gguf_dot_q8_rows.
static Rows prepare_packed(const In *in, int n_rows, int cols, bool quantise, bool pack) {
    const bool own = !in->act.f && !in->act.q;
    const PrepareJob job = { .in = in, .from = in->act, .cols = cols, .quantise = quantise, .pack = pack };
    if (own || pack) parallel(n_rows, chunk_size(n_rows, 1), prepare_rows, &job);
    return (Rows){ .a = own ? cpu.y : in->act, .packed = pack ? cpu.packed : NULL };
}

static Rows prepare(const In *in, int n_rows, int cols, bool quantise) {
    return prepare_packed(in, n_rows, cols, quantise, quantise);
}

// out[j * stride + i] = (row first + i of matrix e of w) . (row r + j of x), for i < n and j < n_rows.
static void dots(const Tensor *w, int e, int first, int n, const Rows *x, size_t r, int n_rows, float *out,
                 size_t stride) {
    const size_t cols = (size_t)w->cols, row_size = gguf_row_size(w->type, cols), at = r * cols;
    const uint8_t *rows = (const uint8_t *)w->data + ((size_t)e * w->rows + first) * row_size;
    if (!is_quantised(w->type))
        gguf_dot_f32_rows(w->type, rows, n, row_size, x->a.f + at, n_rows, cols, cols, out, stride);
    else
        gguf_dot_q8_rows(w->type, rows, n, x->packed + r * gguf_packed_size(cols), n_rows, cols, out, stride);
    for (int j = 0; w->scale && j < n_rows; j++)
        for (int i = 0; i < n; i++) out[j * stride + i] *= w->scale[e];
}

// Stores n values v in row r of an Act (cols wide) from column `first` on, a multiple of 32: as f32, as int8, or both.
static void store_act(const Act *out, size_t r, int cols, int first, const float *v, int n) {
    const size_t at = r * (size_t)cols + first;
    if (out->f) memcpy(out->f + at, v, (size_t)n * sizeof *v);
    if (out->q) gguf_quantize_q8(v, out->q + at, out->s + at / 32, n);
}

// ==== [3] Body ======================================================================================================

// The token id, or 0 if it is outside the vocabulary: sampling gives -1 when no token can be chosen.
static int32_t valid_token(int32_t token, int vocab) { return token < 0 || token >= vocab ? 0 : token; }

// Row `token` of an embedding table, as f32 (cols).
static void embedding_row(const Tensor *table, int32_t token, float *out) {
    const size_t row = (size_t)valid_token(token, table->rows), row_size = gguf_row_size(table->type, table->cols);
    gguf_dequantize(table->type, (const uint8_t *)table->data + row * row_size, out, table->cols);
}

static void embed_rows(const void *task, int first, int end) {
    const Embed *o = task;
    for (int r = first; r < end; r++) {
        float *x = o->out + (size_t)r * o->table->cols;
        embedding_row(o->table, o->batch->rows[r].token, x);
        for (int i = 0; i < o->table->cols; i++) x[i] *= o->scale;
    }
}

static void cpu_embed(const Embed *o) { parallel(o->batch->n_rows, chunk_size(o->batch->n_rows, 1), embed_rows, o); }

static void cpu_pair(const Pair *o) {
    const int cols = o->table->cols;
    float *x = cpu.y.f;                                // (2 * cols)
    for (int r = 0; r < o->n_rows; r++) {
        const int i = o->of ? o->of[r] : r;
        embedding_row(o->table, o->tokens[(size_t)i * o->token_stride], x);
        for (int c = 0; c < cols; c++) x[c] *= o->scale;
        memcpy(x + cols, o->hidden + (size_t)(o->row ? o->row[i] : i) * cols, (size_t)cols * sizeof *x);
        store_act(&o->out, r, 2 * cols, 0, x, 2 * cols);
    }
}

static void ple_rows(const void *task, int first, int end) {
    const PleRows *o = task;
    const size_t cols = (size_t)o->table->cols;
    for (int r = first; r < end; r++) {
        float *a = cpu.y.f + (size_t)r * cols;         // the token's row for all layers
        embedding_row(o->table, o->batch->rows[r].token, a);
        for (int l = 0; l < o->n_layers; l++) {
            const size_t at = (size_t)l * o->ple_dim;
            float *u = o->u + (size_t)r * cols + at;
            for (int i = 0; i < o->ple_dim; i++) u[i] *= o->proj_scale;
            rms_norm(u, u, o->w_norm, o->ple_dim, o->eps);
            for (int i = 0; i < o->ple_dim; i++) u[i] = (u[i] + a[at + i] * o->table_scale) * o->out_scale;
        }
    }
}

static void cpu_ple_rows(const PleRows *o) { parallel(o->batch->n_rows, chunk_size(o->batch->n_rows, 1), ple_rows, o); }

typedef struct { const void *o; Rows y; } InputJob;                     // an operation, and its input

static void matmul_columns(const void *task, int first, int end) {      // of the outputs, numbered consecutively
    const InputJob *job = task;
    const Matmul *o = job->o;
    for (int k = 0, at = 0; k < o->n; at += o->w[k++]->rows) {
        const Tensor *w = o->w[k];
        const int from = max_int(first - at, 0), to = min_int(end - at, w->rows);
        if (from < to) dots(w, 0, from, to - from, &job->y, 0, o->n_rows, o->out[k] + from, w->rows);
    }
}

static void cpu_matmul(const Matmul *o) {
    bool quantise = false;
    int n = 0;
    for (int k = 0; k < o->n; k++) {
        quantise |= is_quantised(o->w[k]->type);
        n += o->w[k]->rows;
    }
    const InputJob job = { o, prepare(&o->in, o->n_rows, o->w[0]->cols, quantise) };
    parallel(n, chunk_size(n, o->n_rows == 1 ? 16 : 32), matmul_columns, &job);
}

enum { TILE_ROWS = 256 };     // rows of an output tile that combines several products; it has 16 or 32 columns

// out[r][i] = act(gate y) * (up y) for 32 columns from `first` on and n_rows <= TILE_ROWS rows. up NULL: a fused
// tensor, the n rows of up follow those of gate.
static void gated_tile(const Tensor *gate, const Tensor *up, int e, int n, int first, ActFn fn, const Rows *y, size_t r,
                       int n_rows, float out[TILE_ROWS][32]) {
    float u[TILE_ROWS][32];
    const int width = min_int(32, n - first);
    dots(gate, e, first, width, y, r, n_rows, out[0], 32);
    dots(up ? up : gate, e, up ? first : n + first, width, y, r, n_rows, u[0], 32);
    for (int j = 0; j < n_rows; j++) {
        activate(fn, out[j], width);
        for (int i = 0; i < width; i++) out[j][i] *= u[j][i];
    }
}

static void route_columns(const void *task, int first, int end) {
    const InputJob *job = task;
    const Route *o = job->o;
    dots(o->w, 0, first, end - first, &job->y, 0, o->n_rows, o->logits + first, o->w->rows);
}

static void route_rows(const void *task, int first, int end) {
    const Route *o = task;
    const int n = o->w->rows;
    for (int r = first; r < end; r++) {
        const float *z = o->logits + (size_t)r * n;
        int32_t *ids = o->ids + (size_t)r * o->n_used;
        float *weights = o->weights + (size_t)r * o->n_used, sum = 0;
        bool taken[MAX_EXPERTS] = { false };
        for (int j = 0; j < o->n_used; j++) {          // the largest not taken yet; on ties the lower expert
            int best = -1;
            for (int i = 0; i < n; i++)
                if (!taken[i] && (best < 0 || z[i] > z[best])) best = i;
            taken[best] = true;
            ids[j] = best;
            weights[j] = expf(z[best] - z[ids[0]]);    // the denominator of softmax cancels below
            sum += weights[j];
        }
        for (int j = 0; j < o->n_used; j++)
            weights[j] = weights[j] / sum * (o->expert_scale ? o->expert_scale[ids[j]] : 1);
    }
}

static void cpu_route(const Route *o) {
    const InputJob job = { o, prepare(&o->in, o->n_rows, o->w->cols, is_quantised(o->w->type)) };
    parallel(o->w->rows, chunk_size(o->w->rows, 4), route_columns, &job);
    parallel(o->n_rows, chunk_size(o->n_rows, 4), route_rows, o);
}

// Pairs (row, chosen expert), sorted by expert, so that an expert's weights are unpacked once for all rows that chose
// it. Pair p is choice p % n_used of row p / n_used. The pairs of expert[i] are order[start[i] .. start[i + 1] - 1],
// ascending.
typedef struct {
    int first, n;             // pairs first .. first + n - 1
    int n_experts;            // experts that at least one row chose
    int expert[MAX_EXPERTS], start[MAX_EXPERTS + 1];
    int32_t *order;           // (n)
} Pairs;

static void sort_pairs(Pairs *p, int n_experts, const int32_t *ids, int first, int n) {
    int count[MAX_EXPERTS] = { 0 }, next[MAX_EXPERTS];
    p->first = first;
    p->n = n;
    p->n_experts = 0;
    p->start[0] = 0;
    p->order = cpu.order;
    for (int i = 0; i < n; i++) count[ids[first + i]]++;
    for (int e = 0; e < n_experts; e++) {
        if (!count[e]) continue;
        next[e] = p->start[p->n_experts];
        p->expert[p->n_experts++] = e;
        p->start[p->n_experts] = next[e] + count[e];
    }
    for (int i = 0; i < n; i++) p->order[next[ids[first + i]]++] = first + i;
}

typedef struct {
    const ExpertGateUp *gate_up;       // either this operation or `down`; the other is NULL
    const ExpertDown   *down;
    Rows  y;                  // of down: one row per pair; of gate_up: one per row of the step
    bool  sorted;             // y.packed has one row per pair, in the order of pairs.order
    Pairs pairs;
} ExpertJob;

static void pack_pairs(const void *task, int first, int end) {
    const ExpertJob *job = task;
    const Act *a = &job->y.a;
    const size_t cols = (size_t)(job->down ? job->down->down->cols : job->gate_up->gate->cols);
    for (int k = first; k < end; k++) {
        const int32_t pair = job->pairs.order[k];
        const size_t at = (size_t)(job->down ? pair : pair / job->gate_up->n_used) * cols;
        gguf_pack_q8(a->q + at, a->s + at / 32, cols, cpu.packed + (size_t)k * gguf_packed_size(cols));
    }
}

// Sorts the pairs from `first` on, as many as one pass takes. pack: packs their inputs in the sorted order.
static void begin_expert_pass(ExpertJob *job, const int32_t *ids, int first, int n_pairs, int n_used, bool pack) {
    const int most = (int)cpu.pairs / n_used * n_used;
    const int n_experts = job->down ? job->down->down->n : job->gate_up->gate->n;
    sort_pairs(&job->pairs, n_experts, ids, first, min_int(most, n_pairs - first));
    job->sorted = pack;
    if (!pack) return;
    job->y.packed = cpu.packed;
    parallel(job->pairs.n, chunk_size(job->pairs.n, 16), pack_pairs, job);    // fewer than 16: not worth another thread
}

static void expert_gate_up_tiles(const void *task, int begin, int end) {           // a tile: 32 columns of one expert
    const ExpertJob *job = task;
    const ExpertGateUp *o = job->gate_up;
    const Pairs *p = &job->pairs;
    const int n = o->up ? o->gate->rows : o->gate->rows / 2, n_tiles = (n + 31) / 32;
    float out[TILE_ROWS][32];
    for (int i = begin; i < end; i++) {
        const int x = i / n_tiles, first = i % n_tiles * 32, at_once = job->sorted ? TILE_ROWS : 1;
        for (int k = p->start[x]; k < p->start[x + 1]; k += at_once) {
            const int n_rows = min_int(at_once, p->start[x + 1] - k);
            const size_t r = job->sorted ? (size_t)k : (size_t)(p->order[k] / o->n_used);
            gated_tile(o->gate, o->up, p->expert[x], n, first, o->fn, &job->y, r, n_rows, out);
            for (int j = 0; j < n_rows; j++)
                store_act(&o->out, p->order[k + j], n, first, out[j], min_int(32, n - first));
        }
    }
}

static void cpu_expert_gate_up(const ExpertGateUp *o) {
    const int n = o->up ? o->gate->rows : o->gate->rows / 2, n_pairs = o->n_rows * o->n_used;
    const bool gate_q = is_quantised(o->gate->type), up_q = o->up ? is_quantised(o->up->type) : gate_q;
    const bool pack = gate_q && up_q && o->n_rows > 1;                 // false: each pair reads the row of the step
    const bool quantise = gate_q || up_q;
    ExpertJob job = { .gate_up = o,
                      .y = prepare_packed(&o->in, o->n_rows, o->gate->cols, quantise, quantise && !pack) };
    for (int first = 0; first < n_pairs; first += job.pairs.n) {
        begin_expert_pass(&job, o->ids, first, n_pairs, o->n_used, pack);
        const int n_tiles = job.pairs.n_experts * ((n + 31) / 32);
        parallel(n_tiles, chunk_size(n_tiles, 1), expert_gate_up_tiles, &job);
    }
    if (o->dense_down) cpu_matmul(o->dense_down);
}

static void gate_up_tiles(const void *task, int begin, int end) {       // a tile: 32 columns, all rows
    const InputJob *job = task;
    const GateUp *o = job->o;
    const int n = o->gate->rows;
    float out[TILE_ROWS][32];
    for (int first = begin * 32; first < end * 32; first += 32)
        for (int r = 0; r < o->n_rows; r += TILE_ROWS) {
            const int n_rows = min_int(TILE_ROWS, o->n_rows - r);
            gated_tile(o->gate, o->up, 0, n, first, o->fn, &job->y, r, n_rows, out);
            for (int j = 0; j < n_rows; j++) store_act(&o->out, r + j, n, first, out[j], min_int(32, n - first));
        }
}

static void cpu_gate_up(const GateUp *o) {
    const int n = o->gate->rows, n_tiles = (n + 31) / 32;
    const bool quantise = is_quantised(o->gate->type) || is_quantised(o->up->type);
    const InputJob job = { o, prepare(&o->in, o->n_rows, o->gate->cols, quantise) };
    parallel(n_tiles, chunk_size(n_tiles, 1), gate_up_tiles, &job);
    if (o->route) cpu_route(o->route);
    if (o->experts) cpu_expert_gate_up(o->experts);
}

static void expert_down_tiles(const void *task, int begin, int end) {   // a tile: 16 columns, all pairs of the pass
    enum { WIDTH = 16 };
    const ExpertJob *job = task;
    const ExpertDown *o = job->down;
    const Pairs *p = &job->pairs;
    const int n = o->down->rows;
    float by_pair[PASS_PAIRS][WIDTH];                  // products, which are then added in the order of a row's choices
    float tile[TILE_ROWS][WIDTH];
    for (int first = begin * WIDTH; first < end * WIDTH; first += WIDTH) {
        const int width = min_int(WIDTH, n - first), at_once = job->sorted ? TILE_ROWS : 1;
        for (int x = 0; x < p->n_experts; x++)
            for (int k = p->start[x]; k < p->start[x + 1]; k += at_once) {
                const int n_rows = min_int(at_once, p->start[x + 1] - k);
                const int r = job->sorted ? k : p->order[k];
                dots(o->down, p->expert[x], first, width, &job->y, r, n_rows, tile[0], WIDTH);
                for (int j = 0; j < n_rows; j++) memcpy(by_pair[p->order[k + j] - p->first], tile[j], sizeof tile[j]);
            }
        for (int i = 0; i < p->n; i += o->n_used) {
            float sum[WIDTH] = { 0 };
            for (int j = i; j < i + o->n_used; j++)
                for (int c = 0; c < width; c++) sum[c] += o->weights[p->first + j] * by_pair[j][c];
            memcpy(o->out + (size_t)((p->first + i) / o->n_used) * n + first, sum, (size_t)width * sizeof *sum);
        }
    }
}

static void cpu_expert_down(const ExpertDown *o) {
    const int n_tiles = (o->down->rows + 15) / 16, n_pairs = o->n_rows * o->n_used;
    ExpertJob job = { .down = o, .y.a = o->in };
    for (int first = 0; first < n_pairs; first += job.pairs.n) {
        begin_expert_pass(&job, o->ids, first, n_pairs, o->n_used, is_quantised(o->down->type));
        parallel(n_tiles, chunk_size(n_tiles, 1), expert_down_tiles, &job);
    }
}

static void ple_inject_tiles(const void *task, int begin, int end) {    // a tile: 32 columns, all rows
    const InputJob *job = task;
    const PleInject *o = job->o;
    const int n = o->w->rows;
    float v[TILE_ROWS][32];
    for (int first = begin * 32; first < end * 32; first += 32)
        for (int r = 0; r < o->n_rows; r += TILE_ROWS) {
            const int n_rows = min_int(TILE_ROWS, o->n_rows - r), width = min_int(32, n - first);
            dots(o->w, 0, first, width, &job->y, r, n_rows, v[0], 32);
            for (int j = 0; j < n_rows; j++) {
                const float *u = o->u + (size_t)(r + j) * o->u_stride + first;
                activate(ACT_GELU, v[j], width);
                for (int i = 0; i < width; i++) v[j][i] *= u[i];
                store_act(&o->out, r + j, n, first, v[j], width);
            }
        }
}

static void cpu_ple_inject(const PleInject *o) {
    const int n_tiles = (o->w->rows + 31) / 32;
    const InputJob job = { o, prepare(&o->in, o->n_rows, o->w->cols, is_quantised(o->w->type)) };
    parallel(n_tiles, chunk_size(n_tiles, 1), ple_inject_tiles, &job);
}

static void close_rows(const void *task, int first, int end) {
    const Close *o = task;
    for (int r = first; r < end; r++)
        prepare_row(&o->in, (size_t)r, o->cols, (o->out ? o->out : cpu.y.f) + (size_t)r * (size_t)o->cols);
}

static void cpu_close(const Close *o) { parallel(o->n_rows, chunk_size(o->n_rows, 1), close_rows, o); }

static void cpu_gather_rows(const GatherRows *o) {
    for (int r = 0; r < o->n_rows; r++)
        memcpy((uint32_t *)o->dst + (size_t)r * o->dst_stride,
               (const uint32_t *)o->src + (size_t)(o->index ? o->index[r] : r) * o->src_stride,
               o->cols * sizeof(uint32_t));
}

// ==== [4] Cache =====================================================================================================

// Address of row `slot` of one head; address of its scales.
static void *kv_row(const Cache *c, const KvPlane *p, int seq, int head, int slot) {
    const size_t row = ((size_t)seq * c->n_kv_heads + head) * (size_t)c->slots + slot;
    return (char *)p->data + row * kv_row_bytes(p->type, p->dim);
}
static uint16_t *kv_scales(const Cache *c, const KvPlane *p, int seq, int head, int slot) {
    const size_t row = ((size_t)seq * c->n_kv_heads + head) * (size_t)c->slots + slot;
    return p->scale ? (uint16_t *)p->scale + row * kv_scale_bytes(p->type, p->dim) / 2 : NULL;
}

// The tail of a cache (its newest rows in f16) as a Cache.
static Cache tail_of(const Cache *c) {
    Cache tail = *c;
    tail.k = c->k_tail;
    tail.v = c->v_tail;
    tail.slots = c->tail_slots;
    return tail;
}

// Writes the first dim values of v to a row of plane k or v.
static void kv_write(const Cache *c, bool is_v, int seq, int head, int slot, const float *v) {
    const KvPlane *p = is_v ? &c->v : &c->k;
    kv_write_row(p->type, !is_v || c->n_rot, p->dim, v, kv_row(c, p, seq, head, slot),
                 kv_scales(c, p, seq, head, slot));
}

// Writes the same values to the tail. They get the Hadamard rotation if the plane is quantised; v is overwritten.
static void kv_write_tail(const Cache *c, bool is_v, int seq, int head, int pos, float *v) {
    const KvPlane *p = is_v ? &c->v : &c->k;
    const Cache tail = tail_of(c);
    for (int i = 0; kv_group(p->type) && i < p->dim; i += KV_ROTATION) kv_rotate(v + i, 0.0625f);
    kv_write(&tail, is_v, seq, head, pos % tail.slots, v);
}

// RoPE: rotates the pairs (i, i + half), i < n: (a, b) -> (a cos - b sin, a sin + b cos).
static void rope_rotate(float *v, int half, int n, const float *cosine, const float *sine) {
    for (int i = 0; i < n; i++) {
        const float a = v[i], b = v[i + half];
        v[i] = a * cosine[i] - b * sine[i];
        v[i + half] = a * sine[i] + b * cosine[i];
    }
}

// Brings a head into the order of a tied cache (gemma4.h, Cache): the 2 * n_rot values that RoPE rotates, then the
// others. back: from that order to the usual one.
static void tied_order(float *v, int head_dim, int n_rot, bool back) {
    float t[MAX_HEAD_DIM];
    const int half = head_dim / 2;
    int k = 0;
    memcpy(t, v, (size_t)head_dim * sizeof *v);
    for (int part = 0; part < 4; part++) {             // the rotated values of both halves, then the unrotated ones
        const int from = (part & 1) * half + (part < 2 ? 0 : n_rot);
        const int to = (part & 1) * half + (part < 2 ? n_rot : half);
        for (int i = from; i < to; i++, k++) {
            if (back) v[i] = t[k];
            else v[k] = t[i];
        }
    }
}

static void dump_head(float *dump, size_t r, int n_heads, int h, int head_dim, const float *v) {
    if (dump) memcpy(dump + (r * (size_t)n_heads + h) * (size_t)head_dim, v, (size_t)head_dim * sizeof *v);
}

static void qkv_store_rows(const void *task, int first, int end) {
    const QkvStore *o = task;
    const Cache *c = o->cache;
    const int hd = c->head_dim, half = hd / 2;
    for (int r = first; r < end; r++) {
        const Row *row = &o->batch->rows[r];
        const Segment *seg = &o->batch->segs[row->seg];
        const int len = o->batch->len[seg->seq], pos = len + row->depth;
        float cosine[MAX_HEAD_DIM / 2], sine[MAX_HEAD_DIM / 2], k[MAX_HEAD_DIM], v[MAX_HEAD_DIM];
        for (int i = 0; i < o->rope.n_pairs; i++) {    // in f64: an f32 angle is off by 0.016 rad at position 262143
            cosine[i] = (float)cos(pos * o->rope.inv_freq[i]);
            sine[i] = (float)sin(pos * o->rope.inv_freq[i]);
        }
        for (int h = 0; o->q && h < o->n_heads; h++) {
            float *q = o->q + ((size_t)r * o->n_heads + h) * (size_t)hd;
            rms_norm(q, q, o->w_q, hd, o->eps);
            dump_head(o->dump_q, r, o->n_heads, h, hd, q);
            rope_rotate(q, half, o->rope.n_pairs, cosine, sine);
            dump_head(o->dump_q_pos, r, o->n_heads, h, hd, q);
            for (int i = c->n_rot; c->n_rot && i < half; i++) {        // tied: K's factor fold is applied to q instead
                q[i] *= c->fold[i];
                q[i + half] *= c->fold[i + half];
            }
            if (c->n_rot) tied_order(q, hd, c->n_rot, false);
            if (kv_group(c->k.type)) kv_rotate_query(q, hd);
        }
        if (!o->k) continue;
        const Cache *dst = o->staging ? o->staging : c;
        const int seq = o->staging ? 0 : seg->seq;
        const int slot = o->staging ? seg->first + row->index : (len + row->index) % c->slots;
        for (int g = 0; g < c->n_kv_heads; g++) {
            const size_t at = ((size_t)r * c->n_kv_heads + g) * (size_t)hd;
            rms_norm(k, o->k + at, o->w_k, hd, o->eps);
            if (o->v_norm) rms_norm(v, o->v + at, NULL, hd, o->eps);
            else memcpy(v, o->v + at, (size_t)hd * sizeof *v);
            dump_head(o->dump_k, r, c->n_kv_heads, g, hd, k);
            dump_head(o->dump_v, r, c->n_kv_heads, g, hd, v);
            rope_rotate(k, half, o->rope.n_pairs, cosine, sine);
            dump_head(o->dump_k_pos, r, c->n_kv_heads, g, hd, k);
            if (c->n_rot) {
                tied_order(k, hd, c->n_rot, false);
                tied_order(v, hd, c->n_rot, false);
            }
            kv_write(dst, false, seq, g, slot, k);     // tied: only the first k.dim values, those that RoPE rotates
            kv_write(dst, true, seq, g, slot, v);
            if (!c->tail_slots) continue;
            kv_write_tail(c, false, seq, g, len + row->index, k);
            kv_write_tail(c, true, seq, g, len + row->index, v);
        }
    }
}

static void cpu_qkv_store(const QkvStore *o) {
    parallel(o->batch->n_rows, chunk_size(o->batch->n_rows, 1), qkv_store_rows, o);
}

enum { TILE_QUERIES = 8, TILE_KEYS = 32 };     // queries (rows x heads) and keys that attention works on at a time

// softmax(q . k) v of some queries: heads that share a KV head, in rows of one segment. Keys are taken in the order of
// their positions ("online softmax"): scores are relative to the largest one so far, so exp never overflows. A query's
// result does not depend on the other queries of the tile.
typedef struct {
    const Attend *o;
    int   head_dim, n_heads, n;         // n queries: rows x n_heads
    float q[TILE_QUERIES * MAX_HEAD_DIM], out[TILE_QUERIES * MAX_HEAD_DIM];    // (n, head_dim); out not yet / sum
    float max[TILE_QUERIES], sum[TILE_QUERIES];                                // largest score; sum of exp(score - max)
} OnlineSoftmax;

#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
typedef float Vector __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));

// out[i] += sum over j, ascending, of p[j] * v[key[j]][i]; dim is a multiple of 32.
static void add_values(float *out, const float *v, const int *key, const float *p, int n, int dim) {
    int i = 0;
    for (; i + 4 * LANES <= dim; i += 4 * LANES) {
        Vector *o = (Vector *)(out + i), a = o[0], b = o[1], c = o[2], d = o[3];
        for (int j = 0; j < n; j++) {
            const Vector *from = (const Vector *)(v + (size_t)key[j] * dim + i);
            a += p[j] * from[0];
            b += p[j] * from[1];
            c += p[j] * from[2];
            d += p[j] * from[3];
        }
        o[0] = a;
        o[1] = b;
        o[2] = c;
        o[3] = d;
    }
    for (; i < dim; i++)
        for (int j = 0; j < n; j++) out[i] += p[j] * v[(size_t)key[j] * dim + i];
}

// n <= TILE_KEYS rows of a plane as floats (n, dim): f32 rows in place, others decoded into scratch.
static const float *kv_floats(const Cache *c, const KvPlane *p, int seq, int head, int slot, int n, float *scratch) {
    const void *rows = kv_row(c, p, seq, head, slot);
    if (p->type == KV_F32) return rows;
    kv_read_rows(p->type, n, p->dim, rows, kv_scales(c, p, seq, head, slot), scratch);
    return scratch;
}

// Computes scores[i][k] of all queries i and n <= TILE_KEYS keys k. v (n, head_dim): the keys' rows of V as floats.
static void score_keys(OnlineSoftmax *s, const Cache *c, int seq, int head, int slot, int n, const float *v,
                       float scores[][TILE_KEYS]) {
    const int hd = s->head_dim, n_k = c->k.dim;
    const bool halves = c->k.type == KV_F16 || c->k.type == KV_BF16;
    const size_t unit = sizeof(float);
    float k_floats[TILE_KEYS * MAX_HEAD_DIM], rest[TILE_QUERIES][TILE_KEYS];
    if (halves)
        gguf_dot_f32_rows(c->k.type == KV_F16 ? GGUF_F16 : GGUF_BF16, kv_row(c, &c->k, seq, head, slot), n,
                          kv_row_bytes(c->k.type, n_k), s->q, s->n, hd, n_k, scores[0], TILE_KEYS);
    else
        gguf_dot_f32_rows(GGUF_F32, kv_floats(c, &c->k, seq, head, slot, n, k_floats), n, n_k * unit, s->q, s->n, hd,
                          n_k, scores[0], TILE_KEYS);
    if (n_k < hd)                                      // tied: the values of K that RoPE does not rotate are V's
        gguf_dot_f32_rows(GGUF_F32, v + n_k, n, hd * unit, s->q + n_k, s->n, hd, hd - n_k, rest[0], TILE_KEYS);
    for (int i = 0; i < s->n; i++)
        for (int k = 0; k < n; k++) scores[i][k] = (n_k < hd ? scores[i][k] + rest[i][k] : scores[i][k]) * s->o->scale;
}

// Adds n <= TILE_KEYS keys, in slots from `slot` on, to the softmax. Bit k of visible[i]: row i of the queries sees key
// k.
static void attend_keys(OnlineSoftmax *s, const Cache *c, int seq, int head, int slot, int n, const uint32_t *visible) {
    const int hd = s->head_dim;
    const float factor = c->n_rot ? kv_tied_factor(c->v.type) : 1;
    float scores[TILE_QUERIES][TILE_KEYS], v_floats[TILE_KEYS * MAX_HEAD_DIM];
    const float *v = kv_floats(c, &c->v, seq, head, slot, n, v_floats);
    score_keys(s, c, seq, head, slot, n, v, scores);
    for (int i = 0; i < s->n; i++) {
        float score[TILE_KEYS], p[TILE_KEYS], *out = s->out + (size_t)i * hd;
        int key[TILE_KEYS], n_visible = 0;
        for (int k = 0; k < n; k++) {
            if (!(visible[i / s->n_heads] >> k & 1)) continue;
            score[n_visible] = scores[i][k];
            key[n_visible++] = k;
        }
        for (int from = 0, to; from < n_visible; from = to) {          // keys up to the next new maximum
            if (score[from] > s->max[i]) {
                const float shrink = exp_of(s->max[i] - score[from]);    // 0 the first time: max is -inf
                s->sum[i] *= shrink;
                for (int d = 0; d < hd; d++) out[d] *= shrink;
                s->max[i] = score[from];
            }
            for (to = from + 1; to < n_visible && !(score[to] > s->max[i]); to++) {}
            for (int j = from; j < to; j++) p[j] = exp_of(score[j] - s->max[i]);
            for (int j = from; j < to; j++) {
                s->sum[i] += p[j];
                p[j] *= factor;
            }
            add_values(out, v, key + from, p + from, to - from, hd);
        }
    }
}

typedef struct {              // rows of one segment, at most TILE_QUERIES, and the keys that each row sees
    const Row *row;
    const Segment *seg;
    int n, len;
    int first[TILE_QUERIES];            // the lowest position that row i sees
    int n_own[TILE_QUERIES];            // row i sees only the first n_own rows of the segment
    int before_tail[TILE_QUERIES];      // row i reads positions up to this one from k and v, later ones from the tail
    int lowest, end;          // every row sees only keys of lowest .. end - 1
    int min_before_tail, max_before_tail;
    bool uses_tail;
    const int32_t *block;     // (n_blocks) selected blocks of keys, ascending; NULL: all keys
    int n_blocks;
} VisibleKeys;

// Bit k: key j + k is in a selected block.
static uint32_t selected_keys(const VisibleKeys *v, int j) {
    uint32_t selected = v->block ? 0 : ~(uint32_t)0;
    for (int b = j / SELECT_KEYS; v->block && b <= (j + 31) / SELECT_KEYS; b++) {
        int low = 0, high = v->n_blocks;               // binary search for b
        while (low < high) {
            const int mid = (low + high) / 2;
            if (v->block[mid] < b) low = mid + 1;
            else high = mid;
        }
        if (low == v->n_blocks || v->block[low] != b) continue;
        const int from = max_int(b * SELECT_KEYS - j, 0), to = min_int((b + 1) * SELECT_KEYS - j, 32);
        selected |= ~(uint32_t)0 << from & ~(uint32_t)0 >> (32 - to);
    }
    return selected;
}

// Adds the committed positions from .. to - 1 to the softmax. c is the cache or (is_tail) its tail.
static void attend_committed(OnlineSoftmax *s, const VisibleKeys *v, const Cache *c, bool is_tail, int head, int from,
                             int to) {
    for (int p = from, n; p < to; p += n) {
        uint32_t visible[TILE_QUERIES], any = 0;
        const uint32_t selected = selected_keys(v, p);
        n = min_int(min_int(TILE_KEYS, to - p), c->slots - p % c->slots);
        for (int i = 0; i < v->n; i++) {
            const int low = max_int((is_tail ? max_int(v->first[i], v->before_tail[i] + 1) : v->first[i]) - p, 0);
            const int high = is_tail ? 32 : v->before_tail[i] - p + 1;         // bits low .. high - 1
            visible[i] = low < 32 ? ~(uint32_t)0 << low : 0;
            if (high < 32) visible[i] &= high > 0 ? ((uint32_t)1 << high) - 1 : 0;
            any |= visible[i] &= selected;
        }
        if (any) attend_keys(s, c, v->seg->seq, head, p % c->slots, n, visible);
    }
}

// Rows of a tree that are ancestors of a row, or the row itself, and whose depths are from .. to - 1.
static uint64_t path_rows(uint64_t ancestors, int from, int to) {
    uint64_t rows = 0;
    for (int depth = 0; ancestors; depth++, ancestors &= ancestors - 1)
        if (depth >= from && depth < to) rows |= ancestors & -ancestors;
    return rows;
}

// Adds the segment's own rows at depths from .. to - 1. They are in the cache after the committed rows, or in staging.
// A tree's rows are newer than all that is read before the tail.
static void attend_own(OnlineSoftmax *s, const VisibleKeys *v, const Cache *c, bool is_tail, int head, int from,
                       int to) {
    const Cache *staging = s->o->staging;
    const bool all = s->o->own == OWN_ALL, tree = !all && v->seg->kind == SEG_TREE;
    uint64_t path[TILE_QUERIES];
    for (int i = 0; i < v->n && tree; i++) path[i] = path_rows(v->row[i].ancestors, from, to);
    const int end = tree ? v->end - v->len : to;       // a tree's rows are not in the order of their depths
    for (int k = tree ? 0 : from, n; k < end; k += n) {
        const int slot = staging ? v->seg->first + k : (v->len + k) % c->slots;
        uint32_t visible[TILE_QUERIES], any = 0;
        const uint32_t selected = selected_keys(v, v->len + k);
        n = min_int(TILE_KEYS, end - k);
        if (!staging) n = min_int(n, c->slots - slot);
        for (int i = 0; i < v->n; i++) {               // bits low .. high - 1
            const int at = v->len + k, after = v->before_tail[i] + 1;
            const int low = max_int((is_tail ? max_int(v->first[i], after) : v->first[i]) - at, 0);
            const int high = min_int(v->n_own[i] - k, is_tail ? INT_MAX : after - at);
            visible[i] = tree ? (uint32_t)(path[i] >> k) : all || low < 32 ? ~(uint32_t)0 << (all ? 0 : low) : 0;
            if (!all && high < 32) visible[i] &= high > 0 ? ((uint32_t)1 << high) - 1 : 0;
            any |= visible[i] &= selected;
        }
        if (any) attend_keys(s, staging ? staging : c, staging ? 0 : v->seg->seq, head, slot, n, visible);
    }
}

// The keys of KV head g that rows r .. r + n_rows - 1 of the step see. The rows are of one segment and, of a prompt, of
// one block of rows (BlockSelect).
static VisibleKeys visible_keys(const Attend *o, int r, int n_rows, int g) {
    const Cache *c = o->cache;
    const Row *row = &o->batch->rows[r];
    const Segment *seg = &o->batch->segs[row->seg];
    VisibleKeys v = { .row = row, .seg = seg, .n = n_rows, .len = o->batch->len[seg->seq], .max_before_tail = -1,
                      .uses_tail = reads_tail(c, seg, o->blocks) };
    v.lowest = v.min_before_tail = v.end = v.len;
    for (int i = 0; i < n_rows; i++) {
        const int pos = v.len + row[i].depth;
        v.n_own[i] = o->own == OWN_NONE ? 0 : o->own == OWN_ALL ? seg->n : rows_in_sight(&row[i], seg, o->window);
        v.first[i] = o->window ? max_int(0, pos - o->window + 1) : 0;
        v.before_tail[i] = v.uses_tail ? max_int(-1, pos - c->tail_reach) : INT_MAX - 1;
        v.lowest = min_int(v.lowest, v.first[i]);
        v.min_before_tail = min_int(v.min_before_tail, v.before_tail[i]);
        v.max_before_tail = max_int(v.max_before_tail, v.before_tail[i]);
        v.end = max_int(v.end, v.len + v.n_own[i]);
    }
    const size_t list = (size_t)(r / SELECT_ROWS) * c->n_kv_heads + g;
    if (o->blocks && o->blocks->n[list] >= 0) {
        v.block = o->blocks->block + list * o->blocks->n_blocks;
        v.n_blocks = o->blocks->n[list];
    }
    return v;
}

// Computes the partial result of one split for the queries of s: out, max and sum.
static void attend_split(OnlineSoftmax *s, const VisibleKeys *v, int head, int split) {
    const Cache *c = s->o->cache, tail = tail_of(c);
    const int lowest = v->lowest / SPLIT_CHUNK, first = lowest + (split - lowest % N_SPLITS + N_SPLITS) % N_SPLITS;
    for (int i = 0; i < s->n; i++) {
        s->max[i] = -INFINITY;
        s->sum[i] = 0;
    }
    memset(s->out, 0, (size_t)s->n * s->head_dim * sizeof *s->out);
    for (int chunk = first; chunk * SPLIT_CHUNK < v->end; chunk += N_SPLITS) {
        const int from = max_int(chunk * SPLIT_CHUNK, v->lowest), to = min_int((chunk + 1) * SPLIT_CHUNK, v->end);
        const int codes_to = min_int(to, v->max_before_tail + 1), tail_from = max_int(from, v->min_before_tail + 1);
        const int len = v->len, own_from = max_int(from, len);
        attend_committed(s, v, c, false, head, from, min_int(codes_to, len));
        if (v->uses_tail) attend_committed(s, v, &tail, true, head, tail_from, min_int(to, len));
        if (codes_to > len) attend_own(s, v, c, false, head, own_from - len, codes_to - len);
        if (v->uses_tail && to > len) attend_own(s, v, &tail, true, head, max_int(tail_from, len) - len, to - len);
    }
}

// Merges the partial result (part_*) of a split for one query into the result of the splits before it.
static void merge_partial(float *out, float *max, float *sum, const float *part_out, float part_max, float part_sum,
                          int n) {
    if (part_sum == 0) return;
    if (*sum == 0) {
        memcpy(out, part_out, (size_t)n * sizeof *out);
        *max = part_max;
        *sum = part_sum;
        return;
    }
    const float top = fmaxf(*max, part_max), shrink = exp_of(*max - top), factor = exp_of(part_max - top);
    for (int d = 0; d < n; d++) out[d] = out[d] * shrink + part_out[d] * factor;
    *sum = *sum * shrink + part_sum * factor;
    *max = top;
}

// Normalises one query's result (head_dim), brings it back to the usual basis and order, and stores it.
static void finish_query(const Attend *o, int r, int head, float *out, float sum) {
    const Cache *c = o->cache;
    const int hd = c->head_dim;
    for (int d = 0; d < hd; d++) out[d] = sum == 0 ? 0 : out[d] / sum;         // 0 if the query sees no key
    if (kv_group(c->v.type)) kv_rotate_rows_back(out, hd);
    if (c->n_rot) tied_order(out, hd, c->n_rot, true);
    store_act(&o->out, r, o->n_heads * hd, head * hd, out, hd);
}

typedef struct {
    const Attend *o;
    int rows, heads;          // of a work item
    int head_groups;          // groups of `heads` query heads per KV head
    int n_splits;             // work items per group of queries: 1, which computes all splits, or N_SPLITS
} AttendJob;

// Attention of n_heads heads from `head` on, of rows r .. r + n_rows - 1 of the step, which are of one segment. With
// job->n_splits > 1 it computes only the split `split` and stores the partial results in cpu.partials.
static void attend_queries(OnlineSoftmax *s, const AttendJob *job, int r, int n_rows, int head, int n_heads,
                           int split) {
    const Attend *o = job->o;
    const int hd = o->cache->head_dim, g = head / (o->n_heads / o->cache->n_kv_heads);
    const VisibleKeys v = visible_keys(o, r, n_rows, g);
    float total[TILE_QUERIES * MAX_HEAD_DIM], max[TILE_QUERIES], sum[TILE_QUERIES];
    s->o = o;
    s->head_dim = hd;
    s->n_heads = n_heads;
    s->n = n_rows * n_heads;
    for (int i = 0; i < s->n; i++) {
        const size_t at = (size_t)(r + i / n_heads) * o->n_heads + head + i % n_heads;
        memcpy(s->q + (size_t)i * hd, o->q + at * hd, (size_t)hd * sizeof *s->q);
        max[i] = -INFINITY;
        sum[i] = 0;
    }
    const int first = job->n_splits > 1 ? split : 0;
    const int end = job->n_splits > 1 ? split + 1 : min_int(N_SPLITS, (v.end - 1) / SPLIT_CHUNK + 1);
    for (int p = first; p < end; p++) {
        attend_split(s, &v, g, p);
        for (int i = 0; i < s->n; i++) {
            const float *out = s->out + (size_t)i * hd;
            const size_t query = (size_t)(r + i / n_heads) * o->n_heads + head + i % n_heads;
            if (job->n_splits == 1) {
                merge_partial(total + (size_t)i * hd, &max[i], &sum[i], out, s->max[i], s->sum[i], hd);
                continue;
            }
            float *to = cpu.partials + (query * N_SPLITS + p) * (MAX_HEAD_DIM + 2);
            to[0] = s->max[i];
            to[1] = s->sum[i];
            memcpy(to + 2, out, (size_t)hd * sizeof *out);
        }
    }
    for (int i = 0; i < s->n && job->n_splits == 1; i++)
        finish_query(o, r + i / n_heads, head + i % n_heads, total + (size_t)i * hd, sum[i]);
}

static int count_work_items(const AttendJob *job) {
    const int row_groups = (job->o->batch->n_rows + job->rows - 1) / job->rows;
    return row_groups * job->o->cache->n_kv_heads * job->head_groups * job->n_splits;
}

static void attend_work_items(const void *task, int begin, int end) {
    const AttendJob *job = task;
    const Attend *o = job->o;
    const int kv_heads = o->cache->n_kv_heads, group = o->n_heads / kv_heads;
    const int per_rows = kv_heads * job->head_groups;
    OnlineSoftmax s;
    for (int i = begin; i < end; i++) {
        const int item = i / job->n_splits, split = i % job->n_splits;
        const int from = item % per_rows % job->head_groups * job->heads;
        const int head = item % per_rows / job->head_groups * group + from;
        const int row_end = min_int((item / per_rows + 1) * job->rows, o->batch->n_rows);
        for (int r = item / per_rows * job->rows, n; r < row_end; r += n) {
            for (n = 1; r + n < row_end && o->batch->rows[r + n].seg == o->batch->rows[r].seg; n++) {}
            attend_queries(&s, job, r, n, head, min_int(job->heads, group - from), split);
        }
    }
}

// Merges the partial results of all splits, which are in cpu.partials, for queries first .. end - 1.
static void merge_queries(const void *task, int first, int end) {
    const Attend *o = ((const AttendJob *)task)->o;
    for (int query = first; query < end; query++) {
        float out[MAX_HEAD_DIM] = { 0 }, max = -INFINITY, sum = 0;
        for (int p = 0; p < N_SPLITS; p++) {
            const float *part = cpu.partials + ((size_t)query * N_SPLITS + p) * (MAX_HEAD_DIM + 2);
            merge_partial(out, &max, &sum, part + 2, part[0], part[1], o->cache->head_dim);
        }
        finish_query(o, query / o->n_heads, query % o->n_heads, out, sum);
    }
}

static void cpu_attend(const Attend *o) {
    const int group = o->n_heads / o->cache->n_kv_heads, n_queries = o->batch->n_rows * o->n_heads;
    AttendJob job = { .o = o, .heads = min_int(group, TILE_QUERIES), .n_splits = 1 };
    int longest = 0;
    if (o->store) cpu_qkv_store(o->store);
    job.rows = TILE_QUERIES / job.heads;
    job.head_groups = (group + job.heads - 1) / job.heads;
    for (int i = 0; i < o->batch->n_segs; i++) longest = max_int(longest, o->batch->len[o->batch->segs[i].seq]);
    if (o->window) longest = min_int(longest, o->window);
    if (count_work_items(&job) < 2 * count_threads() && n_queries <= MAX_SPLIT_QUERIES && longest >= 4 * SPLIT_CHUNK)
        job.n_splits = N_SPLITS;
    while (count_work_items(&job) < count_threads() && job.rows * job.heads > 1) {      // smaller items, one per thread
        if (job.rows > 1) job.rows = (job.rows + 1) / 2;
        else job.heads = (job.heads + 1) / 2;
        job.head_groups = (group + job.heads - 1) / job.heads;
    }
    const int n_items = count_work_items(&job);
    parallel(n_items, job.n_splits > 1 ? 1 : chunk_size(n_items, 1), attend_work_items, &job);
    if (job.n_splits > 1) parallel(n_queries, chunk_size(n_queries, 1), merge_queries, &job);
}

// Mean of the rows of K, for blocks of keys first .. end - 1, counted through all segments and KV heads.
static void mean_blocks(const void *task, int first, int end) {
    const BlockSelect *o = task;
    const Cache *c = o->cache;
    const int hd = c->head_dim, n_blocks = o->out.n_blocks;
    float k_floats[TILE_KEYS * MAX_HEAD_DIM], v_floats[TILE_KEYS * MAX_HEAD_DIM];
    for (int i = first; i < end; i++) {
        const int block = i % n_blocks, g = i / n_blocks % c->n_kv_heads;
        const Segment *seg = &o->batch->segs[i / n_blocks / c->n_kv_heads];
        float *mean = (float *)o->means + (size_t)i * hd;
        if ((block + 1) * SELECT_KEYS > o->batch->len[seg->seq] + seg->n) continue;
        memset(mean, 0, (size_t)hd * sizeof *mean);
        for (int slot = block * SELECT_KEYS; slot < (block + 1) * SELECT_KEYS; slot += TILE_KEYS) {
            const float *k = kv_floats(c, &c->k, seg->seq, g, slot, TILE_KEYS, k_floats), *v = k;
            if (c->n_rot) v = kv_floats(c, &c->v, seg->seq, g, slot, TILE_KEYS, v_floats);     // the rest of K is V's
            for (int j = 0; j < TILE_KEYS; j++) {
                for (int d = 0; d < c->k.dim; d++) mean[d] += k[(size_t)j * c->k.dim + d];
                for (int d = c->k.dim; d < hd; d++) mean[d] += v[(size_t)j * hd + d];
            }
        }
        for (int d = 0; d < hd; d++) mean[d] *= 1.0f / SELECT_KEYS;
    }
}

typedef struct {              // a block of rows, which share their selected blocks of keys
    int  seg, first, n;       // rows first .. first + n - 1 of the batch
    int  pos, n_blocks;       // position of the first row; visible blocks of keys
    bool all, of_prompt;      // the rows attend to all keys; they are rows of one prompt
} RowBlock;

static RowBlock row_block(const Batch *b, int number) {
    const int first = number * SELECT_ROWS, last = min_int(first + SELECT_ROWS, b->n_rows) - 1;
    const Row *from = &b->rows[first], *to = &b->rows[last];
    const Segment *seg = &b->segs[from->seg];
    const int len = b->len[seg->seq];
    const bool of_prompt = from->seg == to->seg && seg->n > STEP_ROWS;
    return (RowBlock){ from->seg, first, last - first + 1, len + from->index, (len + to->index) / SELECT_KEYS + 1,
                       !of_prompt || to->index >= seg->n - seg->n_dense, of_prompt };
}

// Scores s[h][n] of BlockSelect, for heads first .. end - 1, counted through all blocks of rows.
static void score_blocks(const void *task, int first, int end) {
    const BlockSelect *o = task;
    const int hd = o->cache->head_dim, n_blocks = o->out.n_blocks, group = o->n_heads / o->cache->n_kv_heads;
    float scores[SELECT_ROWS][TILE_KEYS];
    for (int i = first; i < end; i++) {
        const int h = i % o->n_heads;
        const RowBlock v = row_block(o->batch, i / o->n_heads);
        const float *mean = (float *)o->means + ((size_t)v.seg * o->cache->n_kv_heads + h / group) * n_blocks * hd;
        const float *q = o->q + ((size_t)v.first * o->n_heads + h) * hd;
        float *s = o->scores + (size_t)i * n_blocks;
        for (int b = 0; b < v.n_blocks && !v.all; b += TILE_KEYS) {
            const int n = min_int(TILE_KEYS, v.n_blocks - b);
            gguf_dot_f32_rows(GGUF_F32, mean + (size_t)b * hd, n, hd * sizeof *mean, q, v.n, (size_t)o->n_heads * hd,
                              hd, scores[0], TILE_KEYS);
            for (int k = 0; k < n; k++) {
                const int from = max_int((b + k + 1) * SELECT_KEYS - 1 - v.pos, 0);    // first row that sees all of it
                float largest = -INFINITY, sum = 0;
                for (int r = from; r < v.n; r++) largest = fmaxf(largest, scores[r][k] * o->scale);
                for (int r = from; r < v.n; r++) sum += exp_of(scores[r][k] * o->scale - largest);
                s[b + k] = from < v.n ? largest + logf(sum) : -INFINITY;
            }
        }
    }
}

// The smallest threshold >= 0 such that at most max_above of the n weights are above it. Binary search over floats.
static float weight_of_rank(const float *w, int n, int max_above) {
    uint32_t low = 0, high = 0x7f800000;               // floats from 0 to infinity are ordered as their bits are
    float threshold = 0;
    while (low < high) {
        const uint32_t mid = low + (high - low) / 2;
        int above = 0;
        memcpy(&threshold, &mid, sizeof threshold);
        for (int i = 0; i < n; i++) above += w[i] > threshold;
        if (above > max_above) low = mid + 1;
        else high = mid;
    }
    memcpy(&threshold, &low, sizeof threshold);
    return threshold;
}

// Weights w (n) of blocks of keys: softmax over the blocks of each head's scores (n_heads, stride), then the maximum
// over the heads.
static void weigh_blocks(float *w, float *scores, int n_heads, int n, size_t stride) {
    memset(w, 0, (size_t)n * sizeof *w);
    for (int h = 0; h < n_heads; h++) {
        const float *s = scores + (size_t)h * stride;
        float largest = -INFINITY, sum = 0;
        for (int b = 0; b < n; b++) largest = fmaxf(largest, s[b]);
        for (int b = 0; b < n && largest > -INFINITY; b++) sum += exp_of(s[b] - largest);
        for (int b = 0; b < n && sum > 0; b++) w[b] = fmaxf(w[b], exp_of(s[b] - largest) / sum);
    }
}

// Lists of selected blocks, for KV heads first .. end - 1, counted through all blocks of rows.
static void list_blocks(const void *task, int first, int end) {
    const BlockSelect *o = task;
    const int kv_heads = o->cache->n_kv_heads, n_blocks = o->out.n_blocks, group = o->n_heads / kv_heads;
    for (int i = first; i < end; i++) {
        const RowBlock v = row_block(o->batch, i / kv_heads);
        const int near = max_int(v.pos / SELECT_KEYS - SELECT_NEAR + 1, 0);
        float *w = o->weights + (size_t)i * n_blocks, largest = 0;
        int32_t *list = o->out.block + (size_t)i * n_blocks;
        const int n_always = min_int(v.n_blocks, v.n_blocks - near + SELECT_FIRST);
        int n = 0, room = (int)ceilf(o->density * (float)v.n_blocks) - n_always;       // blocks that may be added
        o->out.n[i] = -1;
        if (v.all) continue;
        weigh_blocks(w, o->scores + (size_t)i * group * n_blocks, group, v.n_blocks, n_blocks);
        for (int b = 0; b < v.n_blocks; b++) largest = fmaxf(largest, w[b]);
        const int n_ranked = max_int(near - SELECT_FIRST, 0);
        const bool ranked = o->density > 0;
        const float threshold = ranked ? weight_of_rank(w + SELECT_FIRST, n_ranked, max_int(room, 0))
                                       : o->alpha * largest;
        for (int b = SELECT_FIRST; b < near && ranked; b++) room -= w[b] > threshold;
        for (int b = 0; b < v.n_blocks; b++) {
            const bool always = b < SELECT_FIRST || b >= near;
            const bool above = ranked ? w[b] > threshold || (w[b] == threshold && room > 0)
                                      : o->alpha >= 1 || w[b] >= threshold;
            if (!always && !above) continue;
            room -= ranked && !always && w[b] == threshold;
            list[n++] = b;
        }
        o->out.n[i] = n;
    }
}

static void cpu_block_select(const BlockSelect *o) {
    const Cache *c = o->cache;
    const int blocks = (o->batch->n_rows + SELECT_ROWS - 1) / SELECT_ROWS;
    const int n_means = o->batch->n_segs * c->n_kv_heads * o->out.n_blocks;
    parallel(n_means, chunk_size(n_means, 1), mean_blocks, o);
    parallel(blocks * o->n_heads, chunk_size(blocks * o->n_heads, 1), score_blocks, o);
    parallel(blocks * c->n_kv_heads, chunk_size(blocks * c->n_kv_heads, 1), list_blocks, o);
    for (int i = 0; i < blocks * c->n_kv_heads; i++) {
        const RowBlock v = row_block(o->batch, i / c->n_kv_heads);
        if (!v.of_prompt) continue;
        o->count[0] += v.all ? v.n_blocks : o->out.n[i];
        o->count[1] += v.n_blocks;
    }
}

// Attention probabilities over all keys, for heads first .. end - 1, counted through all rows.
static void attention_probs(const void *task, int first, int end) {
    const AttnMass *o = task;
    const Cache *c = o->cache;
    const int hd = c->head_dim, n_k = c->k.dim;
    float k_floats[TILE_KEYS * MAX_HEAD_DIM], v_floats[TILE_KEYS * MAX_HEAD_DIM];
    for (int i = first; i < end; i++) {
        const Row *row = &o->batch->rows[i / o->n_heads];
        const int seq = o->batch->segs[row->seg].seq, keys = o->batch->len[seq] + row->index + 1;
        const int g = i % o->n_heads / (o->n_heads / c->n_kv_heads);
        const float *q = o->q + (size_t)i * hd;
        float *probs = o->probs + (size_t)i * o->n_keys, rest[TILE_KEYS] = { 0 }, largest = -INFINITY, sum = 0;
        for (int j = 0; j < keys; j += TILE_KEYS) {
            const int n = min_int(TILE_KEYS, keys - j);
            const float *k = kv_floats(c, &c->k, seq, g, j, n, k_floats);
            gguf_dot_f32_rows(GGUF_F32, k, n, n_k * sizeof *k, q, 1, hd, n_k, probs + j, TILE_KEYS);
            if (n_k < hd) {                            // tied: the rest of K is V's
                const float *v = kv_floats(c, &c->v, seq, g, j, n, v_floats);
                gguf_dot_f32_rows(GGUF_F32, v + n_k, n, hd * sizeof *v, q + n_k, 1, hd, hd - n_k, rest, TILE_KEYS);
            }
            for (int m = 0; m < n; m++) {              // scores first
                probs[j + m] = (probs[j + m] + rest[m]) * o->scale;
                largest = fmaxf(largest, probs[j + m]);
            }
        }
        for (int j = 0; j < keys; j++) {
            probs[j] = exp_of(probs[j] - largest);
            sum += probs[j];
        }
        for (int j = 0; j < keys; j++) probs[j] /= sum;
    }
}

static void cpu_attn_mass(const AttnMass *o) {
    parallel(o->batch->n_rows * o->n_heads, 1, attention_probs, o);
    for (int i = 0; i < o->batch->n_rows * o->n_heads; i++) {
        const Row *row = &o->batch->rows[i / o->n_heads];
        const int keys = o->batch->len[o->batch->segs[row->seg].seq] + row->index + 1;
        const float *probs = o->probs + (size_t)i * o->n_keys;
        float *mass = o->mass + (size_t)(i / o->n_heads) * o->n_keys;
        for (int j = 0; j < keys; j++) mass[j] = fmaxf(mass[j], probs[j]);
    }
}

// Copies one cached row of all heads.
static void kv_move(const Cache *dst, int dst_seq, int dst_slot, const Cache *src, int src_seq, int src_slot) {
    for (int g = 0; g < dst->n_kv_heads; g++)
        for (int plane = 0; plane < 2; plane++) {
            const KvPlane *to = plane ? &dst->v : &dst->k, *from = plane ? &src->v : &src->k;
            memmove(kv_row(dst, to, dst_seq, g, dst_slot), kv_row(src, from, src_seq, g, src_slot),
                    kv_row_bytes(to->type, to->dim));
            if (to->scale) memmove(kv_scales(dst, to, dst_seq, g, dst_slot), kv_scales(src, from, src_seq, g, src_slot),
                                   kv_scale_bytes(to->type, to->dim));
        }
}

static void cpu_kv_commit(const KvCommit *o) {
    for (int i = 0; i < o->batch->n_segs; i++) {
        const Segment *seg = &o->batch->segs[i];
        int32_t *len = &o->batch->len[seg->seq];
        for (int k = 0; k < o->n_accept[i]; k++) {     // path[k] >= k, so a row is copied before it is overwritten
            const int from = seg->kind == SEG_TREE ? o->path[(size_t)i * STEP_ROWS + k] : k;
            for (int l = 0; l < o->n_caches && from != k; l++) {
                const Cache *c = &o->caches[l], tail = tail_of(c);
                kv_move(c, seg->seq, (*len + k) % c->slots, c, seg->seq, (*len + from) % c->slots);
                if (!tail.slots) continue;
                kv_move(&tail, seg->seq, (*len + k) % tail.slots, &tail, seg->seq, (*len + from) % tail.slots);
            }
            const int32_t token = valid_token(o->batch->rows[seg->first + from].token, o->vocab);
            if (o->counts) o->counts[(size_t)seg->seq * o->vocab + token]++;
        }
        *len += o->n_accept[i];
    }
}

static void cpu_kv_copy(const KvCopy *o) {
    for (int i = 0; i < o->batch->n_segs; i++) {
        const Segment *seg = &o->batch->segs[i];
        const int len = o->batch->len[seg->seq];
        for (int j = max_int(0, seg->n - o->cache->slots); j < seg->n; j++)
            kv_move(o->cache, seg->seq, (len + j) % o->cache->slots, o->staging, 0, seg->first + j);
    }
}

// ==== [5] Images ====================================================================================================

static void clamp_rows(const void *task, int first, int end) {
    const Clamp *o = task;
    const float lo = o->range.lo, hi = o->range.hi;
    for (size_t i = (size_t)first * (size_t)o->cols; i < (size_t)end * (size_t)o->cols; i++) {
        const float x = o->x[i], raised = x < lo ? lo : x;
        o->out[i] = raised > hi ? hi : raised;
    }
}

static void cpu_clamp(const Clamp *o) { parallel(o->n_rows, chunk_size(o->n_rows, 1), clamp_rows, o); }

static void gelu_product_rows(const void *task, int first, int end) {
    enum { PART = 64 };
    const GeluProduct *o = task;
    const size_t last = (size_t)end * (size_t)o->cols;
    float v[PART];
    for (size_t i = (size_t)first * (size_t)o->cols, n; i < last; i += n) {
        n = last - i < PART ? last - i : PART;
        memcpy(v, o->gate + i, n * sizeof *v);
        activate(ACT_GELU, v, (int)n);
        for (size_t j = 0; j < n; j++) o->out[i + j] = v[j] * o->up[i + j];
    }
}

static void cpu_gelu_product(const GeluProduct *o) {
    parallel(o->n_rows, chunk_size(o->n_rows, 1), gelu_product_rows, o);
}

static void layer_norm_rows(const void *task, int first, int end) {
    const LayerNorm *o = task;
    const int n = o->cols;
    for (int r = first; r < end; r++) {
        const size_t at = (size_t)r * (size_t)n;
        float *out = o->out + at;
        double sum = 0, squares = 0;
        for (int i = 0; i < n; i++) {
            out[i] = o->x[at + i] + (o->add ? o->add[i] : 0) + (o->add_rows ? o->add_rows[at + i] : 0);
            sum += out[i];
        }
        const double mean = sum / n;
        for (int i = 0; i < n; i++) squares += (out[i] - mean) * (out[i] - mean);
        const float center = (float)mean, scale = (float)(1 / sqrt(squares / n + o->eps));
        for (int i = 0; i < n; i++) out[i] = o->w[i] * ((out[i] - center) * scale) + o->bias[i];
    }
}

static void cpu_layer_norm(const LayerNorm *o) { parallel(o->n_rows, chunk_size(o->n_rows, 1), layer_norm_rows, o); }

static void rope_2d_rows(const void *task, int first, int end) {
    const Rope2d *o = task;
    const int hd = o->head_dim, n = hd / 4, heads = o->n_heads;
    float cosine[2][MAX_IMAGE_HEAD_DIM / 4], sine[2][MAX_IMAGE_HEAD_DIM / 4];
    for (int r = first; r < end; r++) {
        for (int i = 0; i < 2 * n; i++) {
            const double angle = o->pos[2 * r + i / n] * o->inv_freq[i % n];
            cosine[i / n][i % n] = (float)cos(angle);
            sine[i / n][i % n] = (float)sin(angle);
        }
        for (int h = 0; h < heads; h++) {
            const size_t at = ((size_t)r * (size_t)heads + (size_t)h) * (size_t)hd;
            rms_norm(o->q + at, o->q + at, o->w_q, hd, o->eps);
            rms_norm(o->k + at, o->k + at, o->w_k, hd, o->eps);
            rms_norm(o->v + at, o->v + at, NULL, hd, o->eps);
            for (int axis = 0; axis < 2; axis++) {
                rope_rotate(o->q + at + axis * 2 * n, n, n, cosine[axis], sine[axis]);
                rope_rotate(o->k + at + axis * 2 * n, n, n, cosine[axis], sine[axis]);
            }
        }
    }
}

static void cpu_rope_2d(const Rope2d *o) { parallel(o->n_rows, chunk_size(o->n_rows, 1), rope_2d_rows, o); }

// Attention of one head: IMAGE_QUERIES queries at a time meet IMAGE_KEYS keys at a time. Queries, scores and outputs
// are columns, so that all loops run over the queries: every vector holds one number of each query, and no query's
// result depends on the others.
enum { IMAGE_QUERIES = 64, IMAGE_KEYS = 64 };

typedef struct {
    float q[MAX_IMAGE_HEAD_DIM][IMAGE_QUERIES], out[MAX_IMAGE_HEAD_DIM][IMAGE_QUERIES];
    float p[IMAGE_KEYS][IMAGE_QUERIES];                // scores, then exp(score - max)
    float max[IMAGE_QUERIES], sum[IMAGE_QUERIES];      // largest score so far; sum of exp(score - max)
} ImageQueries;

// c (m, IMAGE_QUERIES) += a b with b (k, IMAGE_QUERIES); element (i, j) of a is a[i * row + j * step].
static void add_tile_product(float (*c)[IMAGE_QUERIES], const float *a, size_t row, size_t step, int m,
                             float (*b)[IMAGE_QUERIES], int k) {
    for (int i = 0; i < m; i += 4) {                   // four rows at a time; the last row again, if there are fewer
        int at[4];
        for (int r = 0; r < 4; r++) at[r] = min_int(i + r, m - 1);
        const float *a0 = a + (size_t)at[0] * row, *a1 = a + (size_t)at[1] * row;
        const float *a2 = a + (size_t)at[2] * row, *a3 = a + (size_t)at[3] * row;
        for (int j = 0; j < IMAGE_QUERIES; j += 2 * LANES) {
            Vector sum[4][2];
            for (int r = 0; r < 4; r++) memcpy(sum[r], c[at[r]] + j, sizeof sum[r]);
            for (int n = 0; n < k; n++) {
                const Vector *x = (const Vector *)(b[n] + j);
                const size_t s = (size_t)n * step;
                sum[0][0] += a0[s] * x[0];
                sum[0][1] += a0[s] * x[1];
                sum[1][0] += a1[s] * x[0];
                sum[1][1] += a1[s] * x[1];
                sum[2][0] += a2[s] * x[0];
                sum[2][1] += a2[s] * x[1];
                sum[3][0] += a3[s] * x[0];
                sum[3][1] += a3[s] * x[1];
            }
            for (int r = 0; r < 4; r++) memcpy(c[at[r]] + j, sum[r], sizeof sum[r]);
        }
    }
}

// Adds n keys to the softmax of all queries: k and v are the head's columns of their rows, `stride` floats apart.
static void attend_image_keys(ImageQueries *s, const float *k, const float *v, size_t stride, int n, int hd,
                              float scale) {
    float max[IMAGE_QUERIES], shrink[IMAGE_QUERIES];
    memset(s->p, 0, (size_t)n * sizeof s->p[0]);
    add_tile_product(s->p, k, stride, 1, n, s->q, hd);
    memcpy(max, s->max, sizeof max);
    for (int j = 0; j < n; j++)
        for (int i = 0; i < IMAGE_QUERIES; i++) {
            s->p[j][i] *= scale;
            max[i] = s->p[j][i] > max[i] ? s->p[j][i] : max[i];
        }
    for (int i = 0; i < IMAGE_QUERIES; i++) {
        shrink[i] = exp_of(s->max[i] - max[i]);        // 0 the first time: s->max is -inf
        s->max[i] = max[i];
        s->sum[i] *= shrink[i];
    }
    for (int j = 0; j < n; j++)
        for (int i = 0; i < IMAGE_QUERIES; i++) {
            s->p[j][i] = exp_of(s->p[j][i] - max[i]);
            s->sum[i] += s->p[j][i];
        }
    for (int d = 0; d < hd; d++)
        for (int i = 0; i < IMAGE_QUERIES; i++) s->out[d][i] *= shrink[i];
    add_tile_product(s->out, v, 1, stride, hd, s->p, n);
}

static void attend_image_tiles(const void *task, int begin, int end) {         // a tile: queries of one head
    const AttendAll *o = task;
    const int hd = o->head_dim, tiles = (o->n_rows + IMAGE_QUERIES - 1) / IMAGE_QUERIES;
    const size_t stride = (size_t)o->n_heads * (size_t)hd;
    ImageQueries s;
    for (int tile = begin; tile < end; tile++) {
        const size_t head = (size_t)(tile / tiles) * (size_t)hd;
        const int first = tile % tiles * IMAGE_QUERIES, n = min_int(IMAGE_QUERIES, o->n_rows - first);
        memset(&s, 0, sizeof s);
        for (int i = 0; i < IMAGE_QUERIES; i++) s.max[i] = -INFINITY;
        for (int i = 0; i < n; i++)
            for (int d = 0; d < hd; d++) s.q[d][i] = o->q[(size_t)(first + i) * stride + head + (size_t)d];
        for (int j = 0; j < o->n_keys; j += IMAGE_KEYS) {
            const size_t at = (size_t)j * stride + head;
            attend_image_keys(&s, o->k + at, o->v + at, stride, min_int(IMAGE_KEYS, o->n_keys - j), hd, o->scale);
        }
        for (int i = 0; i < n; i++)
            for (int d = 0; d < hd; d++)
                o->out[(size_t)(first + i) * stride + head + (size_t)d] = s.out[d][i] / s.sum[i];
    }
}

static void cpu_attend_all(const AttendAll *o) {
    if (o->head_dim > MAX_IMAGE_HEAD_DIM) die("attend_all: heads of %d values are not supported", o->head_dim);
    parallel(o->n_heads * ((o->n_rows + IMAGE_QUERIES - 1) / IMAGE_QUERIES), 1, attend_image_tiles, o);
}

static void pool_rows(const void *task, int first, int end) {          // of the output
    const Pool *o = task;
    const int side = o->side, cols = o->cols, width = o->w / side;
    const float count = (float)(side * side);
    for (int r = first; r < end; r++) {
        float *out = o->out + (size_t)r * (size_t)cols;
        memset(out, 0, (size_t)cols * sizeof *out);
        for (int k = 0; k < side * side; k++) {
            const int y = r / width * side + k / side, x = r % width * side + k % side;
            const float *from = o->x + ((size_t)y * (size_t)o->w + (size_t)x) * (size_t)cols;
            for (int i = 0; i < cols; i++) out[i] += from[i];
        }
        for (int i = 0; i < cols; i++) out[i] = o->factor * (out[i] / count);
        for (int i = 0; o->sub && i < cols; i++) out[i] = (out[i] - o->sub[i]) * o->mul[i];
    }
}

static void cpu_pool(const Pool *o) {
    const int n = o->w / o->side * (o->h / o->side);
    parallel(n, chunk_size(n, 1), pool_rows, o);
}

// ==== [6] Output ====================================================================================================

// Candidates are ordered by descending key: descending logit, then ascending id. No two keys are equal.
static uint64_t candidate_key(float logit, int32_t id) {
    uint32_t bits;
    logit += 0.0f;                                     // -0 becomes 0: the two are equal
    memcpy(&bits, &logit, sizeof bits);
    bits = bits >> 31 ? ~bits : bits | 0x80000000u;    // as integers, bits are now ordered as the floats are
    return (uint64_t)bits << 32 | (uint32_t)~id;
}

static int32_t candidate_id(Candidate c) { return (int32_t)~(uint32_t)c.key; }

static float candidate_logit(Candidate c) {
    uint32_t bits = (uint32_t)(c.key >> 32);
    float logit;
    bits = bits >> 31 ? bits & 0x7fffffffu : ~bits;
    memcpy(&logit, &bits, sizeof logit);
    return logit;
}

static int compare_candidates(const void *a, const void *b) {
    const uint64_t x = ((const Candidate *)a)->key, y = ((const Candidate *)b)->key;
    return x > y ? -1 : x < y;
}

// Moves the best candidates to the front, as few as together weigh at least `weight`, the worst of them last. Returns
// their number. The n candidates together weigh at least that much. This is quickselect with a random pivot: expected
// time is proportional to n for any order and any weights.
static int best_prefix(Candidate *c, int n, uint64_t weight) {
    uint32_t random = 1;
    uint64_t before = 0;                               // weight of c[0 .. low - 1], which are certainly selected
    for (int low = 0, high = n; ; ) {
        random = random * 1664525 + 1013904223;
        const int at = low + (int)((uint64_t)random * (uint32_t)(high - low) >> 32);
        const Candidate pivot = c[at];
        c[at] = c[high - 1];
        uint64_t better = 0;
        int i = low;
        for (int j = low; j < high - 1; j++) {         // without a branch, which the CPU could not predict
            const Candidate x = c[j];
            const uint64_t is_better = x.key > pivot.key;
            c[j] = c[i];
            c[i] = x;
            i += (int)is_better;
            better += x.weight & -is_better;
        }
        c[high - 1] = c[i];
        c[i] = pivot;
        if (before + better >= weight) {
            high = i;
        } else {
            before += better + pivot.weight;
            low = i + 1;
            if (before >= weight) return low;
        }
    }
}

typedef struct {              // finds the k best of the candidates that are added
    Candidate *c;             // (n), in any order; the k best are among them. Capacity: all that are added
    int        n, k;
    uint64_t   floor;         // candidates with keys up to this one are not among the k best
} TopK;

static void topk_cut(TopK *b) {
    if (b->n <= b->k) return;
    b->n = best_prefix(b->c, b->n, (uint64_t)b->k);    // each candidate weighs 1
    b->floor = b->c[b->n - 1].key;
}

static void topk_add(TopK *b, uint64_t key) {
    if (key <= b->floor) return;
    b->c[b->n++] = (Candidate){ key, 1 };
    if (b->n >= b->k + max_int(b->k, 64)) topk_cut(b);
}

// Writes the k <= vocab best tokens of a row, in order, to c[0 .. k - 1]. c has capacity vocab.
static void topk_of_row(Candidate *c, const float *logits, int vocab, int k) {
    TopK best = { .c = c, .k = k };
    for (int i = 0; i < vocab; i++) topk_add(&best, candidate_key(isnan(logits[i]) ? -INFINITY : logits[i], i));
    topk_cut(&best);
    qsort(c, k, sizeof *c, compare_candidates);
}

double logsumexp(const float *logits, int vocab) {
    float largest = -INFINITY;
    for (int i = 0; i < vocab; i++)
        if (logits[i] > largest) largest = logits[i];
    if (isinf(largest)) largest = 0;                   // all logits -Inf, or one +Inf: the result is that Inf
    double sum = 0;
    for (int i = 0; i < vocab; i++) sum += exp((double)logits[i] - largest);
    return largest + log(sum);
}

typedef struct {
    const Head *o;
    Rows   y;
    int    first, n_rows;     // rows first .. first + n_rows - 1 of y
    float *logits;            // (n_rows, vocab)
} HeadJob;

static void head_columns(const void *task, int first, int end) {
    const HeadJob *job = task;
    const size_t vocab = (size_t)job->o->w->rows;
    const float cap = job->o->cap;
    dots(job->o->w, 0, first, end - first, &job->y, job->first, job->n_rows, job->logits + first, vocab);
    for (int r = 0; cap > 0 && r < job->n_rows; r++) {
        float *z = job->logits + (size_t)r * vocab;
        for (int i = first; i < end; i++) z[i] = cap * tanh_of(z[i] / cap);
    }
}

static void cpu_head(const Head *o) {
    const int vocab = o->w->rows, cols = o->w->cols;
    const Rows y = prepare(&o->in, o->n_rows, cols, is_quantised(o->w->type));
    if (o->hidden) memcpy(o->hidden, y.a.f, (size_t)o->n_rows * cols * sizeof(float));
    const int at_once = o->logits ? o->n_rows : 1;
    for (int first = 0; first < o->n_rows; first += at_once) {
        float *logits = o->logits ? o->logits : cpu.logits;
        const HeadJob job = { o, y, first, at_once, logits };
        parallel(vocab, chunk_size(vocab, 16), head_columns, &job);
        for (int r = 0; r < at_once; r++, logits += vocab) {
            const size_t at = (size_t)(first + r) * o->top_k;
            if (o->top_k) topk_of_row(cpu.candidates, logits, vocab, o->top_k);
            for (int i = 0; i < o->top_k; i++) {
                o->top_ids[at + i] = candidate_id(cpu.candidates[i]);
                o->top_logits[at + i] = logits[o->top_ids[at + i]];
            }
            if (o->logsumexp) o->logsumexp[first + r] = (float)logsumexp(logits, vocab);
        }
    }
}

typedef struct {
    const HeadCentroid *o;
    Rows y;
    int  r;                   // the row of candidate_columns()
} CentroidJob;

static void centroid_columns(const void *task, int first, int end) {
    const CentroidJob *job = task;
    const HeadCentroid *o = job->o;
    dots(o->centroids, 0, first, end - first, &job->y, 0, o->n_rows, o->scores + first, o->centroids->rows);
}

// Logits of candidates first .. end - 1. The token id is in the field `weight`.
static void candidate_columns(const void *task, int first, int end) {
    const CentroidJob *job = task;
    float *logits = job->o->logits + (size_t)job->r * job->o->n_used * (job->o->w->rows / job->o->centroids->rows);
    for (int i = first; i < end; i++)
        dots(job->o->w, 0, (int)cpu.candidates[i].weight, 1, &job->y, job->r, 1, logits + i, 1);
}

static void cpu_head_centroid(const HeadCentroid *o) {
    const int n_centroids = o->centroids->rows, per = o->w->rows / n_centroids, n = o->n_used * per, cols = o->w->cols;
    const bool quantise = is_quantised(o->w->type) || is_quantised(o->centroids->type);
    CentroidJob job = { o, prepare(&o->in, o->n_rows, cols, quantise), 0 };
    Candidate *c = cpu.candidates;
    if (o->hidden) memcpy(o->hidden, job.y.a.f, (size_t)o->n_rows * cols * sizeof(float));
    parallel(n_centroids, chunk_size(n_centroids, 16), centroid_columns, &job);
    for (; job.r < o->n_rows; job.r++) {
        const float *logits = o->logits + (size_t)job.r * n;
        const size_t at = (size_t)job.r * o->top_k;
        topk_of_row(c, o->scores + (size_t)job.r * n_centroids, n_centroids, o->n_used);
        for (int k = o->n_used - 1; k >= 0; k--) {     // a centroid becomes its tokens; backwards: none is lost
            const int32_t *ids = o->order + (size_t)candidate_id(c[k]) * per;
            for (int i = per - 1; i >= 0; i--) c[k * per + i].weight = (uint64_t)ids[i];
        }
        parallel(n, chunk_size(n, 16), candidate_columns, &job);
        TopK best = { .c = c, .k = o->top_k };         // in place: it never holds more candidates than were read
        for (int i = 0; i < n; i++)
            topk_add(&best, candidate_key(isnan(logits[i]) ? -INFINITY : logits[i], (int32_t)c[i].weight));
        topk_cut(&best);
        qsort(c, o->top_k, sizeof *c, compare_candidates);
        for (int i = 0; i < o->top_k; i++) {
            o->top_ids[at + i] = candidate_id(c[i]);
            o->top_logits[at + i] = candidate_logit(c[i]);
        }
        if (o->logsumexp) o->logsumexp[job.r] = (float)logsumexp(logits, n);
    }
}

static void cpu_logprob(const Logprob *o) {
    for (int r = 0; r < o->n_rows; r++) {
        const float *logits = o->logits + (size_t)r * o->vocab;
        const int32_t id = o->ids[r];
        o->out[r] = id < 0 || id >= o->vocab ? NAN : (float)(logits[id] - logsumexp(logits, o->vocab));
    }
}

// Steps 2 and 3 of Sample: the logits of row r with bias and penalties; without either, the row itself.
static const float *penalised_row(const Sample *o, int r) {
    const Row *row = &o->batch->rows[r];
    const Segment *seg = &o->batch->segs[row->seg];
    const float *logits = o->logits + (size_t)r * o->vocab;
    const float *bias = o->bias ? o->bias + (size_t)seg->seq * o->vocab : NULL;
    const int32_t *counts = o->counts ? o->counts + (size_t)seg->seq * o->vocab : NULL;
    const SampleParams *p = &o->params[seg->seq];
    float *z = cpu.logits;
    if (!bias && !counts) return logits;
    for (int i = 0; i < o->vocab; i++) z[i] = bias ? logits[i] + bias[i] : logits[i];
    if (!counts) return z;
    const Row *rows = o->step_rows + seg->first;
    for (int j = 0; j <= row->index; j++)
        if (seg->kind == SEG_CHAIN || row->ancestors >> j & 1) cpu.token_counts[valid_token(rows[j].token, o->vocab)]++;
    for (int i = 0; i < o->vocab; i++) {
        const int32_t c = counts[i] + cpu.token_counts[i];
        if (c > 0) z[i] = sample_penalised(z[i], c, p);
    }
    for (int j = 0; j <= row->index; j++) cpu.token_counts[valid_token(rows[j].token, o->vocab)] = 0;
    return z;
}

// Steps 1 and 4 to 8 of Sample for logits z (vocab); mask may be NULL. Returns the token or -1.
static int32_t sample_row(const float *z, int vocab, const uint32_t *mask, const SampleParams *p, int pos) {
    TopK best = { .c = cpu.candidates, .k = p->temperature <= 0 ? 1 : p->top_k > 0 ? min_int(p->top_k, vocab) : vocab };
    float floor = -INFINITY;                           // best.floor as a logit: most tokens are skipped 32 at a time
    for (int first = 0; first < vocab; first += 32) {
        const int n = min_int(32, vocab - first);
        bool above = false;
        for (int j = 0; j < n; j++) above |= !(z[first + j] <= floor);
        for (int i = first; above && i < first + n; i++) {
            if (isnan(z[i])) return -1;
            if (z[i] > floor && (!mask || mask[i / 32] >> (i % 32) & 1)) topk_add(&best, candidate_key(z[i], i));
        }
        if (best.floor) floor = candidate_logit((Candidate){ .key = best.floor });
    }
    topk_cut(&best);
    Candidate *c = best.c;
    int n = best.n;
    if (!n) return -1;
    if (p->temperature <= 0) return candidate_id(c[0]);

    uint64_t largest = 0, total = 0;
    for (int i = 0; i < n; i++) largest = c[i].key > largest ? c[i].key : largest;
    const float z_largest = candidate_logit((Candidate){ .key = largest }), scale = 1.44269504f / p->temperature;
    for (int i = 0; i < n; i++) total += c[i].weight = sample_weight(candidate_logit(c[i]), z_largest, scale);
    if (p->top_p < 1) {
        const uint64_t needed = sample_share(total, p->top_p);
        n = best_prefix(c, n, needed ? needed : 1);
    }
    const uint64_t least = sample_share(SAMPLE_ONE, p->min_p);
    int kept = 0;
    total = 0;
    for (int i = 0; i < n; i++)
        if (c[i].weight >= least) total += (c[kept++] = c[i]).weight;
    return candidate_id(c[best_prefix(c, kept, sample_share(total, random_unit(p->seed, pos)) + 1) - 1]);
}

static void cpu_sample(const Sample *o) {
    const size_t words = round_up((size_t)o->vocab, 32) / 32;
    for (int r = 0; r < o->batch->n_rows; r++) {
        const Row *row = &o->batch->rows[r];
        const int seq = o->batch->segs[row->seg].seq;
        const uint32_t *mask = o->mask ? o->mask + (size_t)r * words : NULL;
        o->out[r] = sample_row(penalised_row(o, r), o->vocab, mask, &o->params[seq], o->batch->len[seq] + row->depth);
    }
}

// Verification of segment i has reached output row `at` (-1: none yet): does it continue at the later output row k?
static bool walk_goes_to(const VerifyWalk *o, int i, int at, int k) {
    const Segment *seg = &o->batch->segs[i];
    const Row *row = &o->out_rows[k];
    int parent = row->index - 1;
    if (row->seg != i) return false;
    if (at < 0) return true;
    while (seg->kind == SEG_TREE && parent >= 0 && !(row->ancestors >> parent & 1)) parent--;
    return parent == o->out_rows[at].index && o->chosen[at] >= 0 &&
           o->batch->rows[seg->first + row->index].token == o->chosen[at];
}

static void cpu_verify_walk(const VerifyWalk *o) {
    for (int i = 0; i < o->batch->n_segs; i++) {
        const Segment *seg = &o->batch->segs[i];
        int32_t *path = seg->kind == SEG_TREE ? o->path + (size_t)i * STEP_ROWS : NULL;
        int at = -1, n = 0;
        for (int k = 0; k < o->n_out; k++) {
            if (!walk_goes_to(o, i, at, k)) continue;
            const int index = o->out_rows[k].index, from = at < 0 ? 0 : index;         // rows before the first output
                                                                                       // row are accepted
            for (int j = from; j <= index; j++, n++)
                if (path) path[n] = j;
            at = k;
        }
        for (; at < 0 && n < seg->n; n++)
            if (path) path[n] = n;
        o->n_accept[i] = n;
        o->last[i] = at;
        o->next[i] = at < 0 ? 0 : o->chosen[at];
    }
}

// Operations are finished when they return, so there are no fences. Launches and energy are not measured.
const Ops *cpu_ops(void) {
    static const Ops ops = {
        .name = "cpu", .on_host = true, .exact_prompts = true, .memory = cpu_memory,
        .weight_bytes = cpu_weight_bytes, .upload = cpu_upload,
        .scratch_bytes = cpu_scratch_bytes, .init = cpu_init, .reserve = cpu_reserve, .release = cpu_release,
        .copy = cpu_copy, .begin = cpu_begin, .end = cpu_end, .wait = cpu_wait, .bandwidth = cpu_bandwidth,
        .int8_peak = cpu_int8_peak,
        .embed = cpu_embed, .pair = cpu_pair, .ple_rows = cpu_ple_rows, .matmul = cpu_matmul, .gate_up = cpu_gate_up,
        .route = cpu_route, .expert_gate_up = cpu_expert_gate_up, .expert_down = cpu_expert_down,
        .ple_inject = cpu_ple_inject,
        .close = cpu_close, .gather_rows = cpu_gather_rows, .qkv_store = cpu_qkv_store,
        .block_select = cpu_block_select, .attn_mass = cpu_attn_mass, .attend = cpu_attend,
        .kv_commit = cpu_kv_commit, .kv_copy = cpu_kv_copy,
        .clamp = cpu_clamp, .gelu_product = cpu_gelu_product, .layer_norm = cpu_layer_norm, .rope_2d = cpu_rope_2d,
        .attend_all = cpu_attend_all, .pool = cpu_pool, .head = cpu_head, .logprob = cpu_logprob,
        .sample = cpu_sample, .verify_walk = cpu_verify_walk, .head_centroid = cpu_head_centroid
    };
    return &ops;
}

#endif
#endif
