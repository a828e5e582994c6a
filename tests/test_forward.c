/* test_forward.c - the forward pass as a whole: against reference results, against itself, and against its contract.
 *
 * The models are small random ones that make_gguf writes; tests/golden/README.md says what the reference results are. A
 * rewriter of GGUF files derives from them what make_gguf does not write: widened, fused and damaged files. A backend that
 * wraps the CPU's hands out memory that nobody can touch outside its operations, and writes down what it was asked for.
 *
 *   [1] Programs, files, small helpers      [5] Other forms of the same weights
 *   [2] Files rewritten                     [6] The guarded backend
 *   [3] Golden logits                       [7] Damaged files
 *   [4] Checkpoints                         [8] True widths
 *
 * Environment: BUILD (build: where make put make_gguf), CC (used if it is not there), GEMMA4 (./gemma4), TMPDIR (/tmp),
 * LONG=1 (a 26B-A4B of true width too). */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#define TESTING
#include "../gemma4.c"
#include "steps.h"
#include "test.h"
#include "files.h"

// Every allocation of this program is counted: steps must make none. Where the Makefile asks the linker for that, calls of
// malloc go to __wrap_malloc, and __real_malloc is the library's.
static volatile long n_allocations;       // volatile: gcc believes that malloc changes no variable
#ifdef __linux__
void *__real_malloc(size_t n), *__real_calloc(size_t n, size_t size), *__real_realloc(void *p, size_t n), *__real_aligned_alloc(size_t align, size_t n);
void *__wrap_malloc(size_t n), *__wrap_calloc(size_t n, size_t size), *__wrap_realloc(void *p, size_t n), *__wrap_aligned_alloc(size_t align, size_t n);
void *__wrap_malloc(size_t n) { n_allocations++; return __real_malloc(n); }
void *__wrap_calloc(size_t n, size_t size) { n_allocations++; return __real_calloc(n, size); }
void *__wrap_realloc(void *p, size_t n) { n_allocations++; return __real_realloc(p, n); }
void *__wrap_aligned_alloc(size_t align, size_t n) { n_allocations++; return __real_aligned_alloc(align, n); }
#endif

enum { N_POSITIONS = 160, VOCAB = 512, DIM = 64,       // of the golden data
       N_FORM = 96 };                                  // positions that files with the same weights are compared at
#define TOLERANCE 1e-4                                 // of the largest magnitude; the reference sums in another order: 1.4e-5
#define TOLERANCE_INT8 4e-2                            // root of the mean square, of that of the logits: int8 activations

// A sanitizer makes everything ten times slower: the F32 files, which differ in one line of the dot product, are left to
// the ordinary run.
#ifdef SANITIZED
enum { N_TYPES = 1 };
#else
enum { N_TYPES = 2 };
#endif

static const char *const families[] = { "micro-dense", "micro-moe", "micro-e" };
static int32_t prompts[2][N_POSITIONS];

// ==== [1] Programs, files, small helpers =============================================================================

// Where threads matter it is said so; elsewhere the models are so small that a second thread would only wait.
static int max_threads = 1;
static float *floats_of(const char *path, size_t n) {  // n floats; NULL if the file holds another number of them
    size_t size = 0;
    struct stat st;
    if (stat(path, &st) || (size_t)st.st_size != n * sizeof(float)) return NULL;
    return read_file(path, &size, "test");
}

static float *golden(const char *family, const char *type, const char *what, size_t n) {
    char path[256];
    snprintf(path, sizeof path, "tests/golden/%s-%s.%s.f32", family, type, what);
    float *p = floats_of(path, n);
    CHECK(p, "%s: expected %zu floats; run from the root of the repository", path, n);
    return p;
}

// What the tests run with unless they say otherwise: f32 caches, room for a whole prompt in one step.
static ModelOptions plan(bool untied) {
    return (ModelOptions){ .n_ctx = 256, .n_seqs = 2, .n_batch = N_POSITIONS, .n_logits = N_POSITIONS, .k_type = KV_F32, .v_type = KV_F32, .untied = untied };
}

// A loaded model, or NULL and a failed case. A child tries first, because load_model ends the process on bad input.
static Model *open_model(const char *path, const Ops *ops, ModelOptions o, const char *dump_dir) {
    fflush(stdout);
    const pid_t child = fork();
    Model *m = must(calloc(1, sizeof *m));
    if (!child) {
        load_model(m, path, cpu_ops(), o, dump_dir);
        _exit(0);
    }
    int status = -1;
    while (child > 0 && waitpid(child, &status, 0) < 0 && errno == EINTR) {}
    if (!CHECK(status == 0, "%s: does not load (status %d; the reason is above)", path, status)) {
        free(m);
        return NULL;
    }
    load_model(m, path, ops, o, dump_dir);
    return m;
}

static void close_model(Model *m) {
    if (m) free_model(m);
    free(m);
}

// Takes n tokens through session seq in chunks, with the logits of the rows that `every` selects: row i if (i + 1) % every
// is 0. They go to their place in logits (n, vocab).
static void run_tokens(Model *m, int seq, const int32_t *ids, int n, int chunk, int every, float *logits) {
    const size_t vocab = (size_t)m->config.vocab;
    for (int at = 0; at < n; at += chunk) {
        const int rows = min_int(chunk, n - at);
        for (int i = 0; i < rows; i++) m->step_rows[i] = (StepRow){ .token = ids[at + i], .output = (at + i + 1) % every == 0 };
        step(m, &(StepSeg){ .seq = seq, .kind = SEG_CHAIN, .n = rows, .rows = m->step_rows }, 1);
        for (int i = 0, k = 0; i < rows; i++)
            if (m->step_rows[i].output) read_logits(m, k++, logits + (size_t)(at + i) * vocab);
        commit(m, &(int32_t){ rows }, NULL);
    }
}

// The logits of the first N_FORM positions of a prompt (N_FORM, VOCAB) in chunks of 64, or NULL. The caller frees them.
static float *logits_of(const char *path, const int32_t *ids, bool untied) {
    Model *m = open_model(path, cpu_ops(), plan(untied), NULL);
    if (!m) return NULL;
    float *logits = must(calloc((size_t)N_FORM * VOCAB, sizeof *logits));
    run_tokens(m, 0, ids, N_FORM, STEP_ROWS, 1, logits);
    close_model(m);
    return logits;
}

// Fills all caches of a CPU model with NaN: whoever reads a row that was not written gets NaN.
static void poison_caches(Model *m) {
    for (int i = 0; i < m->n_caches; i++) {
        const Cache *c = &m->caches[i];
        const size_t rows = (size_t)c->n_seqs * (size_t)c->n_kv_heads * (size_t)c->slots;
        memset(c->k.data, 0xff, rows * kv_row_bytes(c->k.type, c->k.dim));
        memset(c->v.data, 0xff, rows * kv_row_bytes(c->v.type, c->v.dim));
    }
}

static double largest(const float *v, size_t n) {
    double max = 0;
    for (size_t i = 0; i < n; i++) max = fmax(max, fabs((double)v[i]));
    return max;
}

// One case: every |got - want| <= tolerance * scale. NaN fails.
static void check_close(const char *label, const float *got, const float *want, size_t n, double scale, double tolerance) {
    size_t worst = 0;
    double most = -1;
    for (size_t i = 0; i < n; i++) {
        const double d = fabs((double)got[i] - (double)want[i]);
        if (!(d <= most)) most = d, worst = i;
        if (isnan(d)) break;
    }
    CHECK(most <= tolerance * scale, "%s: element %zu: got %.9g, expected %.9g, tolerance %.3g", label, worst, (double)got[worst],
          (double)want[worst], tolerance * scale);
}

// One case: the same bits, n rows of cols floats.
static void check_same(const char *label, const float *got, const float *want, size_t n, size_t cols) {
    if (!got || !want) {
        CHECK(0, "%s: no result to compare", label);
        return;
    }
    size_t i = 0;
    while (i < n * cols && !memcmp(got + i, want + i, sizeof *got)) i++;
    CHECK(i == n * cols, "%s: row %zu, column %zu: got %.9g, expected the bits of %.9g", label, i / cols, i % cols,
          (double)got[i < n * cols ? i : 0], (double)want[i < n * cols ? i : 0]);
}

// ==== [2] Files rewritten ============================================================================================
// F16 tensors become F32: the same values in another type.
static const char *write_widened(const char *from, const char *to) {
    Draft d = read_draft(from);
    for (size_t i = 0; i < d.n_tensors; i++) {
        DraftTensor *t = &d.tensors[i];
        if (t->type != GGUF_F16) continue;
        const size_t n = t->data.n / 2;
        float *wide = must(malloc(n * sizeof *wide));
        gguf_dequantize(GGUF_F16, t->data.data, wide, n);
        free(t->data.data);
        t->data = (Bytes){ (uint8_t *)wide, n * sizeof *wide, n * sizeof *wide };
        t->type = GGUF_F32;
    }
    return write_draft(&d, to);
}

// The rows of attn_q, attn_k and attn_v become one attn_qkv per layer. no_v: attn_v of this layer goes; -1: of none.
static const char *write_fused(const char *from, const char *to, int no_v) {
    Draft d = read_draft(from);
    char name[64];
    for (int l = 0; snprintf(name, sizeof name, "blk.%d.attn_q.weight", l), draft_tensor(&d, name) != NULL; l++) {
        DraftTensor *q = draft_tensor(&d, name);
        for (int i = 0; i < 2; i++) {
            snprintf(name, sizeof name, "blk.%d.attn_%c.weight", l, "kv"[i]);
            DraftTensor *t = draft_tensor(&d, name);
            if (!t) continue;
            t->name[0] = 0;
            if (i && l == no_v) continue;
            q->ne[1] += t->ne[1];
            put(&q->data, t->data.data, t->data.n);
        }
        snprintf(q->name, sizeof q->name, "blk.%d.attn_qkv.weight", l);
    }
    return write_draft(&d, to);
}

// Layers from `first` on lose what they do not read when they share K and V.
static const char *write_dropped(const char *from, const char *to, int first) {
    static const char *const stems[] = { "attn_k.weight", "attn_k_norm.weight", "attn_v.weight" };
    Draft d = read_draft(from);
    int n_dropped = 0;
    char name[64];
    for (int l = first; l < MAX_LAYERS; l++)
        for (int i = 0; i < 3; i++) {
            snprintf(name, sizeof name, "blk.%d.%s", l, stems[i]);
            DraftTensor *t = draft_tensor(&d, name);
            if (t) t->name[0] = 0, n_dropped++;
        }
    CHECK(n_dropped > 0, "%s: no K and V to drop from layer %d on", from, first);
    return write_draft(&d, to);
}

// Every matrix of a layer that can have factors beside it gets them, as NVFP4 files have, and its weights are divided by
// them: powers of two, so the products keep their bits. one: a single factor also for a stack of experts.
static const char *write_side_scales(const char *from, const char *to, bool one) {
    Draft d = read_draft(from);
    const size_t n_tensors = d.n_tensors;
    for (size_t i = 0, k = 0; i < n_tensors; i++) {
        DraftTensor *t = &d.tensors[i];
        if (strncmp(t->name, "blk.", 4) || t->n_dims < 2 || strstr(t->name, "ffn_gate_inp") || strstr(t->name, "ffn_down_exps")) continue;
        char name[64];
        snprintf(name, sizeof name, "%.*sscale", (int)(strlen(t->name) - strlen("weight")), t->name);
        const size_t n = one ? 1 : (size_t)t->ne[2], elems = (size_t)gguf_block_elems(t->type), bytes = (size_t)gguf_block_bytes(t->type);
        const size_t n_blocks = t->data.n / bytes;
        DraftTensor *scale = draft_add(&d, name, n);
        for (size_t e = 0; e < n; e++, k++) {
            const float factor = (float[]){ 2, 0.5f, 4 }[k % 3];
            put(&scale->data, &factor, sizeof factor);
            for (size_t j = n_blocks / n * e; j < n_blocks / n * (e + 1); j++) {
                uint8_t *block = t->data.data + j * bytes;
                float f;
                uint16_t h;
                if (elems == 1) {                      // F32
                    memcpy(&f, block, 4);
                    f /= factor;
                    memcpy(block, &f, 4);
                } else {                               // Q8_0: the scale of the block
                    memcpy(&h, block, 2);
                    h = gguf_f32_to_f16(gguf_f16_to_f32(h) / factor);
                    memcpy(block, &h, 2);
                }
            }
        }
        snprintf(name, sizeof name, "%.*sinput_scale", (int)(strlen(t->name) - strlen("weight")), t->name);
        if (i % 7 == 0) draft_add(&d, name, 1);        // of no consequence
    }
    CHECK(d.n_tensors > n_tensors, "%s: no matrix to give a factor", from);
    return write_draft(&d, to);
}

// ==== [3] Golden logits ==============================================================================================
// Three models, two types, both cache layouts, by the CPU's operations and by the reference's; six ways to bring the rows
// (the reference: with f32, tied), which must agree in every bit, with one thread and with many.

static void test_golden(const char *family, const char *type) {
    const struct { const char *name; int chunk, every, threads; } ways[] = {
        { "chunks of 64", STEP_ROWS, 1, max_threads }, { "one prompt chunk", N_POSITIONS, 1, max_threads },
        { "one by one", 1, 1, 1 }, { "one prompt chunk, every eighth row wanted", N_POSITIONS, 8, 1 },
        { "chunks of 72: the second goes round the ring", 72, 8, 1 }, { "a chunk longer than the ring, then 20 rows", 140, 1, 1 } };
    const bool f16 = !strcmp(type, "f16");
    const int every = f16 ? 1 : 8, n = N_POSITIONS / every;            // rows that the golden data has: i with (i + 1) % every == 0
    float *want = golden(family, type, "logits", (size_t)n * VOCAB);
    if (!want) return;
    const double scale = largest(want, (size_t)n * VOCAB);
    float *got = must(malloc((size_t)N_POSITIONS * VOCAB * sizeof *got)), *first = must(malloc((size_t)N_POSITIONS * VOCAB * sizeof *got));
    for (int k = 0; k < 4; k++) {
        const bool untied = k % 2;
        const Ops *ops = k < 2 ? cpu_ops() : reference_ops();
        Model *m = open_model(in_tmp("%s-%s.gguf", family, type), ops, plan(untied), NULL);
        const size_t n_ways = k < 2 || (k == 2 && !f16) ? sizeof ways / sizeof *ways : 1;  // the reference is slow
        for (size_t w = 0; m && w < n_ways; w++) {
            char label[128];
            snprintf(label, sizeof label, "%s-%s, %s, %s, %s", family, type, ops->name, untied ? "untied" : "tied", ways[w].name);
            reset_session(m, 0);
            poison_caches(m);                          // the rows of the way before would be the right ones
            for (size_t i = 0; i < (size_t)N_POSITIONS * VOCAB; i++) got[i] = NAN;     // what is not computed must show
            use_threads(ways[w].threads);
            run_tokens(m, 0, prompts[f16 ? 0 : 1], N_POSITIONS, ways[w].chunk, ways[w].every, got);
            if (!w) memcpy(first, got, (size_t)N_POSITIONS * VOCAB * sizeof *got);
            use_threads(1);
            const int apart = max_int(every, ways[w].every);
            for (int i = apart - 1; i < N_POSITIONS; i += apart) {
                const float *row = got + (size_t)i * VOCAB;
                char at[160];
                snprintf(at, sizeof at, "%s, position %d", label, i);
                check_close(at, row, want + (size_t)((i + 1) / every - 1) * VOCAB, VOCAB, scale, TOLERANCE);
                if (w) check_same(at, row, first + (size_t)i * VOCAB, 1, VOCAB);
            }
        }
        close_model(m);
    }
    free(got);
    free(first);
    free(want);
}

// Quantised matrices: the CPU against the reference, whose sums are rounded elsewhere. An activation close to a tie may become
// another int8 number, and random weights make much of that: what counts is the mean.
static void test_quantised(const char *family) {
    const char *path = make_model("quantised", family, "q8_0", NULL);
    const size_t n = (size_t)N_FORM * VOCAB;
    float *logits[2];
    for (int k = 0; k < 2; k++) {
        Model *m = open_model(path, k ? reference_ops() : cpu_ops(), plan(false), NULL);
        if (!m) return;
        logits[k] = must(calloc(n, sizeof *logits[k]));
        run_tokens(m, 0, prompts[0], N_FORM, STEP_ROWS, 1, logits[k]);
        close_model(m);
    }
    double off = 0, size = 0;
    for (size_t i = 0; i < n; i++) {
        off += pow((double)logits[0][i] - (double)logits[1][i], 2);
        size += pow((double)logits[1][i], 2);
    }
    CHECK(sqrt(off / size) <= TOLERANCE_INT8, "%s-q8_0: the CPU is off the reference by %.2g of the logits' size, expected at most %.2g",
          family, sqrt(off / size), TOLERANCE_INT8);
    free(logits[0]);
    free(logits[1]);
}

// ==== [4] Checkpoints ================================================================================================

static float *dumped(const char *dir, const char *name, int l, int rows, int cols) {
    char path[1200];
    if (l < 0) snprintf(path, sizeof path, "%s/%s.f32", dir, name);
    else snprintf(path, sizeof path, "%s/%s-%d.f32", dir, name, l);
    float *v = floats_of(path, (size_t)rows * (size_t)cols);
    CHECK(v, "%s: missing, or not (%d, %d) floats", path, rows, cols);
    return v;
}

static int n_files;
static int count_file(const char *path, const struct stat *st, int kind, struct FTW *at) {
    (void)path, (void)st, (void)at;
    n_files += kind == FTW_F;
    return 0;
}

// Every checkpoint exists with its size, and no other file does. rows went through the layers, kept through the head.
static void check_dump_files(const Model *m, const char *dir, int rows, int kept) {
    const Config *c = &m->config;
    int expected = 0;
#define EXISTS(name, l, n, cols) (free(dumped(dir, name, l, n, cols)), expected++)
    EXISTS("inp_scaled", -1, rows, c->dim);
    if (c->ple_dim) EXISTS("inp_per_layer", -1, rows, c->n_layers * c->ple_dim);
    for (int l = 0; l < c->n_layers; l++) {
        const LayerConfig *lc = &c->layer[l];
        const int q_dim = c->n_heads * lc->head_dim, kv_dim = lc->n_kv_heads * lc->head_dim;
        EXISTS("attn_norm", l, rows, c->dim);
        EXISTS("Qcur_normed", l, rows, q_dim);
        EXISTS("Qcur_pos", l, rows, q_dim);
        if (lc->kv_layer == l) {
            EXISTS("Kcur_normed", l, rows, kv_dim);
            EXISTS("Vcur_normed", l, rows, kv_dim);
            EXISTS("Kcur_pos", l, rows, kv_dim);
        }
        EXISTS("attn_post_norm", l, rows, c->dim);
        EXISTS("attn_out", l, rows, c->dim);
        if (c->n_experts) {
            EXISTS("ffn_norm_1", l, rows, c->dim);
            EXISTS("ffn_norm_2", l, rows, c->dim);
            EXISTS("ffn_mlp", l, rows, c->dim);
            EXISTS("ffn_moe_logits", l, rows, c->n_experts);
            EXISTS("ffn_moe", l, rows, c->dim);
        } else {
            EXISTS("ffn_norm", l, rows, c->dim);
            EXISTS("ffn_out", l, rows, c->dim);
        }
        EXISTS("ffn_post_norm", l, rows, c->dim);
        if (c->ple_dim) EXISTS("per_layer_embd_out", l, rows, c->dim);
        EXISTS("out_scaled", l, rows, c->dim);
        EXISTS("l_out", l, rows, c->dim);
    }
    EXISTS("rows", -1, rows, 3);
    for (int l = 0; l < c->n_layers; l++) EXISTS("lens", l, kept, LENS * 3);
    expected++;                                        // model.json
    EXISTS("result_norm", -1, kept, c->dim);
    EXISTS("result_output", -1, kept, c->vocab);
#undef EXISTS
    n_files = 0;
    nftw(dir, count_file, 16, FTW_PHYS);
    CHECK(n_files == expected, "%s: expected %d checkpoints, got %d files", dir, expected, n_files);
}

// The checkpoints of one layer belong together: residual sums, the layer's scale, V of unit size, rotation keeps lengths.
static void check_dump_relations(const Model *m, const char *dir, int l, int rows) {
    const Config *c = &m->config;
    const LayerConfig *lc = &c->layer[l];
    const size_t n = (size_t)rows * (size_t)c->dim;
    const int q_dim = c->n_heads * lc->head_dim, kv_dim = lc->n_kv_heads * lc->head_dim;
    float *before = l ? dumped(dir, "l_out", l - 1, rows, c->dim) : dumped(dir, "inp_scaled", -1, rows, c->dim);
    float *added = dumped(dir, "attn_post_norm", l, rows, c->dim), *attn_out = dumped(dir, "attn_out", l, rows, c->dim);
    float *ffn = dumped(dir, "ffn_post_norm", l, rows, c->dim), *ple = c->ple_dim ? dumped(dir, "per_layer_embd_out", l, rows, c->dim) : NULL;
    float *scaled = dumped(dir, "out_scaled", l, rows, c->dim), *l_out = dumped(dir, "l_out", l, rows, c->dim);
    float *q = dumped(dir, "Qcur_normed", l, rows, q_dim), *q_pos = dumped(dir, "Qcur_pos", l, rows, q_dim);
    float *v = lc->kv_layer == l ? dumped(dir, "Vcur_normed", l, rows, kv_dim) : NULL;
    if (before && added && attn_out && ffn && scaled && l_out && q && q_pos) {
        char label[1200];
        snprintf(label, sizeof label, "%s: layer %d, attn_out", dir, l);
        for (size_t i = 0; i < n; i++) before[i] += added[i];
        check_close(label, attn_out, before, n, largest(before, n), 1e-6);
        snprintf(label, sizeof label, "%s: layer %d, out_scaled", dir, l);
        for (size_t i = 0; i < n; i++) before[i] = m->weights.layer[l].layer_output_scale * (attn_out[i] + ffn[i] + (ple ? ple[i] : 0));
        check_close(label, scaled, before, n, largest(before, n), 1e-6);
        check_same(label, l_out, scaled, (size_t)rows, (size_t)c->dim);
        double worst[2] = { 0, 0 };
        for (int h = 0; h < rows * c->n_heads; h++) {
            double a = 0, b = 0;
            for (int i = 0; i < lc->head_dim; i++) {
                const size_t at = (size_t)h * (size_t)lc->head_dim + (size_t)i;
                a += (double)q[at] * q[at];
                b += (double)q_pos[at] * q_pos[at];
            }
            worst[0] = fmax(worst[0], fabs(a / b - 1));
        }
        for (int h = 0; v && h < rows * lc->n_kv_heads; h++) {
            double a = 0;
            for (int i = 0; i < lc->head_dim; i++) a += (double)v[(size_t)h * (size_t)lc->head_dim + (size_t)i] * v[(size_t)h * (size_t)lc->head_dim + (size_t)i];
            worst[1] = fmax(worst[1], fabs(a / lc->head_dim - 1));
        }
        CHECK(worst[0] < 1e-5, "%s: layer %d: Qcur_pos and Qcur_normed differ in length by %.3g", dir, l, worst[0]);
        CHECK(worst[1] < 1e-3, "%s: layer %d: Vcur_normed is off 1 by %.3g", dir, l, worst[1]);
    }
    float *all[] = { before, added, attn_out, ffn, ple, scaled, l_out, q, q_pos, v };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

// Prompt 0 in chunks of 64 with all logits, prompt 1 in one chunk with the last one's only.
static void test_checkpoints(const char *family, const char *type) {
    const char *path = in_tmp("%s-%s.gguf", family, type);
    Model *plain = open_model(path, cpu_ops(), plan(false), NULL);
    if (!plain) return;
    const int n_layers = plain->config.n_layers;
    float *states = golden(family, type, "layers", (size_t)(2 * (n_layers + 1) * DIM));
    float *want = must(calloc((size_t)N_POSITIONS * VOCAB, sizeof *want)), *got = must(calloc((size_t)N_POSITIONS * VOCAB, sizeof *got));
    for (int p = 0; p < 2 && states; p++) {
        char dir[600], label[700];
        snprintf(dir, sizeof dir, "%s", in_tmp("dump"));
        CHECK(mkdir(dir, 0700) == 0, "mkdir %s: %s", dir, strerror(errno));
        const int chunk = p ? N_POSITIONS : STEP_ROWS, every = p ? N_POSITIONS : 1, kept = N_POSITIONS / every;
        Model *m = open_model(path, cpu_ops(), plan(false), dir);
        if (!m) break;
        run_tokens(plain, p, prompts[p], N_POSITIONS, chunk, every, want);
        run_tokens(m, p, prompts[p], N_POSITIONS, chunk, every, got);
        snprintf(label, sizeof label, "%s-%s, prompt %d: logits with a dump", family, type, p);
        check_same(label, got + (size_t)(every - 1) * VOCAB, want + (size_t)(every - 1) * VOCAB, (size_t)kept, VOCAB);

        check_dump_files(m, dir, N_POSITIONS, kept);
        for (int l = 0; l < n_layers; l++) check_dump_relations(m, dir, l, N_POSITIONS);
        for (int e = 0; e <= n_layers; e++) {
            const bool last = e == n_layers;
            const char *name = last ? "result_norm" : e ? "l_out" : "inp_scaled";
            float *state = dumped(dir, name, e && !last ? e - 1 : -1, last ? kept : N_POSITIONS, DIM);
            const float *entry = states + (size_t)((p * (n_layers + 1) + e) * DIM);
            snprintf(label, sizeof label, "%s-%s, prompt %d: %s, entry %d of the golden states", family, type, p, name, e);
            if (state) check_close(label, state + (size_t)((last ? kept : N_POSITIONS) - 1) * DIM, entry, DIM, largest(entry, DIM), TOLERANCE);
            free(state);
        }
        float *output = dumped(dir, "result_output", -1, kept, VOCAB);
        if (output) check_same(label, output + (size_t)(kept - 1) * VOCAB, got + (size_t)(N_POSITIONS - 1) * VOCAB, 1, VOCAB);
        free(output);
        close_model(m);
        remove_tree(dir);
    }
    close_model(plain);
    free(states);
    free(want);
    free(got);
}

// ==== [5] Other forms of the same weights ============================================================================

static void check_same_logits(const char *label, const char *path, const float *want) {
    float *got = logits_of(path, prompts[0], false);
    check_same(label, got, want, N_FORM, VOCAB);
    free(got);
}

static void test_other_forms(void) {
    float *want[3];
    for (int i = 0; i < 3; i++) {
        const char *f16 = in_tmp("%s-f16.gguf", families[i]);
        char label[128];
        want[i] = logits_of(f16, prompts[0], false);
        snprintf(label, sizeof label, "%s: f16 widened to f32", families[i]);
        check_same_logits(label, write_widened(f16, in_tmp("widened.gguf")), want[i]);
        snprintf(label, sizeof label, "%s: attn_qkv instead of attn_q, attn_k, attn_v", families[i]);
        check_same_logits(label, write_fused(f16, in_tmp("fused.gguf"), -1), want[i]);
    }
    check_same_logits("micro-moe: gate and up of the experts apart", make_model("split", "micro-moe", "f16", "--split-experts", NULL), want[1]);
    const char *dropped = write_dropped(in_tmp("micro-e-f16.gguf"), in_tmp("dropped.gguf"), 3);
    check_same_logits("micro-e: without the unused K and V", dropped, want[2]);
    check_same_logits("micro-e: without the unused K and V, attn_qkv", write_fused(dropped, in_tmp("fused.gguf"), -1), want[2]);
    for (int i = 0; i < 3; i++) {
        const char *f32 = write_widened(in_tmp("%s-f16.gguf", families[i]), in_tmp("widened.gguf"));
        char label[128];
        snprintf(label, sizeof label, "%s: factors beside the matrices", families[i]);
        check_same_logits(label, write_side_scales(f32, in_tmp("scaled.gguf"), false), want[i]);
        snprintf(label, sizeof label, "%s: attn_qkv with a factor, one factor for all experts", families[i]);
        check_same_logits(label, write_side_scales(write_fused(f32, in_tmp("fused.gguf"), -1), in_tmp("scaled.gguf"), true), want[i]);
        free(want[i]);
    }
    const char *q8 = make_model("q8", "micro-moe", "q8_0", "--split-experts", NULL);
    float *plain = logits_of(q8, prompts[0], false);
    check_same_logits("micro-moe q8_0: factors beside the matrices", write_side_scales(q8, in_tmp("scaled.gguf"), false), plain);
    free(plain);

    // Global layers where every pair turns, and where none does: tied and untied caches agree, and the factors matter.
    static const float factors[] = { 1, 1e30f };
    float *result[2] = { NULL, NULL };
    for (int i = 0; i < 2; i++) {
        Draft d = read_draft(in_tmp("micro-dense-f16.gguf"));
        fill(draft_tensor(&d, "rope_freqs.weight"), factors[i]);
        const char *path = write_draft(&d, in_tmp("rope.gguf"));
        float *tied = logits_of(path, prompts[0], false), *untied = logits_of(path, prompts[0], true);
        char label[128];
        snprintf(label, sizeof label, "micro-dense with all rope_freqs = %g: tied and untied", (double)factors[i]);
        if (tied && untied) check_close(label, tied, untied, (size_t)N_FORM * VOCAB, largest(untied, (size_t)N_FORM * VOCAB), TOLERANCE);
        free(tied);
        result[i] = untied;
    }
    CHECK(result[0] && result[1] && memcmp(result[0], result[1], (size_t)N_FORM * VOCAB * sizeof(float)), "micro-dense: rope_freqs change nothing");
    free(result[0]);
    free(result[1]);
}

// ==== [6] The guarded backend ========================================================================================
// cpu_ops() behind a table that keeps its memory unreadable while no operation runs, moves the weights into it, and holds
// gemma4.c to the contract of gemma4.h: pointers into backend memory, copies in the right direction, no reservation after
// loading, operations inside begin .. end only, equal keys issue equal operations.

#define OPERATIONS(X) X(embed, Embed) X(ple_rows, PleRows) X(matmul, Matmul) X(gate_up, GateUp) X(route, Route) \
    X(expert_gate_up, ExpertGateUp) X(expert_down, ExpertDown) X(ple_inject, PleInject) X(close, Close) \
    X(gather_rows, GatherRows) X(qkv_store, QkvStore) X(attend, Attend) X(kv_commit, KvCommit) X(kv_copy, KvCopy) \
    X(head, Head) X(sample, Sample)
#define X(op, Type) OP_##op,
enum { OPERATIONS(X) N_OPERATIONS };
#undef X

enum { MAX_TRACE = 512, MAX_KEYS = 64 };

typedef struct {              // one step: what was issued, field by field (structs have padding)
    StepKey     key;
    int         n;
    const char *op[MAX_TRACE];
    size_t      at[MAX_TRACE + 1];     // where the description of operation i begins
    Bytes       fields;
} Trace;

static struct {
    Ops         ops;
    struct { char *base, *data; size_t mapped, bytes; } region[8];
    const char *volatile op;           // running; NULL: none
    bool        in_step, loaded, record;
    int         n_steps, n_faults;
    unsigned    used;                  // bit per operation
    char        fault[256];            // the first breach of the contract
    Trace       now, seen[MAX_KEYS];
    int         n_seen;
    // a touch of locked memory leads back to guarded()
    volatile sig_atomic_t armed;
    sigjmp_buf  escape;
    pthread_t   main_thread;
} guard;

__attribute__((format(printf, 1, 2))) static void breach(const char *fmt, ...) {
    if (guard.n_faults++) return;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(guard.fault, sizeof guard.fault, fmt, ap);
    va_end(ap);
}

static void on_fault(int sig) {
    if (guard.armed && pthread_equal(pthread_self(), guard.main_thread)) siglongjmp(guard.escape, 1);
    static const char text[] = "test_forward: memory fault outside the guarded calls, or in a thread of operation: ";
    const char *op = guard.op ? guard.op : "none";
    if (write(2, text, sizeof text - 1) < 0 || write(2, op, strlen(op)) < 0 || write(2, "\n", 1) < 0) {}
    signal(sig, SIG_DFL);              // and again, without us
}

// Runs a function; false when it touched memory that it must not touch.
static bool guarded(void (*run)(void *), void *arg) {
    struct sigaction act = { .sa_handler = on_fault }, old[2];
    sigaction(SIGSEGV, &act, &old[0]);
    sigaction(SIGBUS, &act, &old[1]);
    guard.main_thread = pthread_self();
    guard.op = NULL;
    const bool ok = !sigsetjmp(guard.escape, 1);
    if (ok) {
        guard.armed = 1;
        run(arg);
    }
    guard.armed = 0;
    sigaction(SIGSEGV, &old[0], NULL);
    sigaction(SIGBUS, &old[1], NULL);
    return ok;
}

static void set_access(int protection) {
    for (int i = 0; i < 8; i++)
        if (guard.region[i].base && mprotect(guard.region[i].base + sysconf(_SC_PAGESIZE), guard.region[i].mapped - 2 * (size_t)sysconf(_SC_PAGESIZE), protection)) abort();
}
static void unlock(const char *op) {
    guard.op = op;
    set_access(PROT_READ | PROT_WRITE);
}
static void lock(void) {
    set_access(PROT_NONE);
    guard.op = NULL;
}

static bool in_backend(const void *p, size_t bytes) {
    for (int i = 0; i < 8; i++) {
        const char *a = guard.region[i].data, *b = p;
        if (a && b >= a && b <= a + guard.region[i].bytes && bytes <= (size_t)(a + guard.region[i].bytes - b)) return true;
    }
    return false;
}

// ---- describing an operation: numbers, backend pointers, and the host structs behind the others ----

static void keep(Bytes *b, const void *p, size_t n) {   // its allocations do not count: they are not the step's
    const long before = n_allocations;
    put(b, p, n);
    n_allocations = before;
}
static void note(const void *p, size_t n) {
    if (guard.record) keep(&guard.now.fields, p, n);
}
static void note_pointer(const char *field, const void *p) {
    note(&p, sizeof p);
    if (p && !in_backend(p, 1)) breach("%s: %s points outside the backend's memory", guard.op, field);
}
#define NUM(x) note(&(x), sizeof(x))
#define PTR(p) note_pointer(#p, p)

static void note_act(const Act *a) { PTR(a->f); PTR(a->q); PTR(a->s); }

static void note_tensor(const Tensor *t) {
    const bool present = t != NULL;
    NUM(present);
    if (!t) return;
    if (t->in_host) NUM(t->data);
    else PTR(t->data);
    NUM(t->type); NUM(t->rows); NUM(t->cols); NUM(t->n); PTR(t->scale); NUM(t->in_host);
}

static void note_batch(const Batch *b) { PTR(b->rows); PTR(b->segs); PTR(b->len); NUM(b->n_rows); NUM(b->n_segs); }

static void note_plane(const KvPlane *p) { NUM(p->type); NUM(p->dim); PTR(p->data); PTR(p->scale); }

static void note_cache(const Cache *c) {
    const bool present = c != NULL;
    NUM(present);
    if (!c) return;
    NUM(c->n_seqs); NUM(c->n_kv_heads); NUM(c->head_dim); NUM(c->slots); NUM(c->n_rot);
    note_plane(&c->k); note_plane(&c->v); note_plane(&c->k_tail); note_plane(&c->v_tail);
    PTR(c->fold); NUM(c->tail_slots); NUM(c->tail_reach);
}

static void note_in(const In *in, int n_rows, int cols) {
    PTR(in->x); note_act(&in->act);
    for (int i = 0; i < 2; i++) { PTR(in->delta[i]); PTR(in->w_delta[i]); }
    PTR(in->w_post); NUM(in->scale); PTR(in->w_pre); NUM(in->eps); PTR(in->x_out);
    const float *inputs[] = { in->x, in->delta[0], in->delta[1] };
    const uintptr_t size = (uintptr_t)n_rows * (uintptr_t)cols * sizeof(float), out = (uintptr_t)in->x_out;
    for (int i = 0; i < 3 && in->x_out; i++)           // contract 8
        if (inputs[i] && out < (uintptr_t)inputs[i] + size && (uintptr_t)inputs[i] < out + size) breach("%s: x_out overlaps an input", guard.op);
    if ((in->act.f || in->act.q) && (in->x || in->delta[0] || in->delta[1] || in->w_pre || in->x_out)) breach("%s: an Act as input, with stream or norm", guard.op);
}

static void note_embed(const Embed *o) {
    note_batch(o->batch); note_tensor(o->table); NUM(o->scale); PTR(o->out);
}
static void note_ple_rows(const PleRows *o) {
    note_batch(o->batch); note_tensor(o->table); PTR(o->w_norm); PTR(o->u);
    NUM(o->n_layers); NUM(o->ple_dim); NUM(o->proj_scale); NUM(o->table_scale); NUM(o->out_scale); NUM(o->eps);
}
static void note_matmul(const Matmul *o) {
    NUM(o->n_rows); NUM(o->n); note_in(&o->in, o->n_rows, o->w[0]->cols);
    if (o->n < 1 || o->n > MAX_PRODUCTS) breach("matmul: %d products", o->n);
    for (int i = 0; i < o->n && i < MAX_PRODUCTS; i++) { note_tensor(o->w[i]); PTR(o->out[i]); }
}
static void note_route(const Route *o) {
    NUM(o->n_rows); NUM(o->n_used); note_in(&o->in, o->n_rows, o->w->cols); note_tensor(o->w);
    PTR(o->expert_scale); PTR(o->logits); PTR(o->ids); PTR(o->weights);
}
static void note_expert_gate_up(const ExpertGateUp *o) {
    NUM(o->n_rows); NUM(o->n_used); note_in(&o->in, o->n_rows, o->gate->cols); note_tensor(o->gate); note_tensor(o->up); NUM(o->fn);
    PTR(o->ids); note_act(&o->out);
    if (o->dense_down) note_matmul(o->dense_down);
}
static void note_gate_up(const GateUp *o) {
    NUM(o->n_rows); note_in(&o->in, o->n_rows, o->gate->cols); note_tensor(o->gate); note_tensor(o->up); NUM(o->fn); note_act(&o->out);
    if (o->route) note_route(o->route);
    if (!o->experts) return;
    guard.used |= 1u << OP_expert_gate_up;
    note_expert_gate_up(o->experts);
}
static void note_expert_down(const ExpertDown *o) {
    NUM(o->n_rows); NUM(o->n_used); note_act(&o->in); note_tensor(o->down); PTR(o->ids); PTR(o->weights); PTR(o->out);
}
static void note_ple_inject(const PleInject *o) {
    NUM(o->n_rows); note_in(&o->in, o->n_rows, o->w->cols); note_tensor(o->w); PTR(o->u); NUM(o->u_stride); note_act(&o->out);
}
static void note_close(const Close *o) { NUM(o->n_rows); NUM(o->cols); note_in(&o->in, o->n_rows, o->cols); PTR(o->out); }
static void note_gather_rows(const GatherRows *o) {
    NUM(o->n_rows); NUM(o->cols); PTR(o->src); PTR(o->index); PTR(o->dst); NUM(o->src_stride); NUM(o->dst_stride);
}
static void note_qkv_store(const QkvStore *o) {
    note_batch(o->batch); note_cache(o->cache); note_cache(o->staging); NUM(o->n_heads);
    PTR(o->q); PTR(o->k); PTR(o->v); PTR(o->w_q); PTR(o->w_k); NUM(o->v_norm); PTR(o->rope.inv_freq); NUM(o->rope.n_pairs); NUM(o->eps);
    PTR(o->dump_q); PTR(o->dump_k); PTR(o->dump_v); PTR(o->dump_k_pos); PTR(o->dump_q_pos);
    if (o->dump_q || o->dump_k || o->dump_v || o->dump_k_pos || o->dump_q_pos) breach("qkv_store: a checkpoint without a dump");
}
static void note_attend(const Attend *o) {
    note_batch(o->batch); note_cache(o->cache); note_cache(o->staging); NUM(o->n_heads); PTR(o->q); NUM(o->window); NUM(o->own);
    NUM(o->scale); note_act(&o->out);
    if (!o->store) return;
    guard.used |= 1u << OP_qkv_store;
    note_qkv_store(o->store);
}
static void note_kv_commit(const KvCommit *o) {
    note_batch(o->batch); NUM(o->n_caches); PTR(o->n_accept); PTR(o->path);
    for (int i = 0; i < o->n_caches; i++) note_cache(&o->caches[i]);
}
static void note_kv_copy(const KvCopy *o) { note_batch(o->batch); note_cache(o->cache); note_cache(o->staging); }
static void note_head(const Head *o) {
    NUM(o->n_rows); note_in(&o->in, o->n_rows, o->w->cols); note_tensor(o->w); NUM(o->cap); PTR(o->logits); PTR(o->hidden);
    NUM(o->top_k); PTR(o->top_ids); PTR(o->top_logits); PTR(o->logsumexp);
}
static void note_sample(const Sample *o) {
    note_batch(o->batch); NUM(o->vocab); PTR(o->logits); PTR(o->params); PTR(o->mask); PTR(o->bias); PTR(o->counts); PTR(o->step_rows); PTR(o->out);
}

// ---- the table ----

static void start_op(int id, const char *name) {
    if (!guard.in_step) breach("%s: outside begin .. end", name);
    guard.used |= 1u << id;
    guard.record = guard.in_step && guard.now.n < MAX_TRACE;
    if (guard.record) {
        guard.now.op[guard.now.n] = name;
        guard.now.at[guard.now.n++] = guard.now.fields.n;
    }
    unlock(name);
}
#define X(op, Type) static void guard_##op(const Type *o) { start_op(OP_##op, #op); note_##op(o); cpu_ops()->op(o); lock(); }
OPERATIONS(X)
#undef X

static size_t guard_weight_bytes(const Tensor *w) { return matrix_bytes(w); }

static void guard_upload(Tensor *w, void *dst) {
    unlock("upload");
    memcpy(dst, w->data, matrix_bytes(w));
    w->data = dst;
    lock();
}

// Pages that nobody may touch on both sides, the last byte close to the upper one.
static void *guard_reserve(size_t bytes) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    int i = 0;
    while (guard.region[i].base) i++;
    if (i == 7) abort();
    if (guard.loaded) breach("reserve: after loading");
    guard.region[i].bytes = round_up(bytes, 256);
    guard.region[i].mapped = round_up(bytes, page) + 2 * page;
    guard.region[i].base = mmap(NULL, guard.region[i].mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (guard.region[i].base == MAP_FAILED) must(NULL);
    return guard.region[i].data = guard.region[i].base + guard.region[i].mapped - page - guard.region[i].bytes;
}

static void guard_release(void *p) {
    for (int i = 0; i < 8; i++)
        if (guard.region[i].data == p) {
            munmap(guard.region[i].base, guard.region[i].mapped);
            memset(&guard.region[i], 0, sizeof guard.region[i]);
        }
}

static void guard_copy(const Copy *c) {
    if (in_backend(c->dst, c->bytes) != (c->kind != COPY_OUT)) breach("copy of kind %d: the destination is on the wrong side", (int)c->kind);
    if (in_backend(c->src, c->bytes) != (c->kind != COPY_IN)) breach("copy of kind %d: the source is on the wrong side", (int)c->kind);
    unlock("copy");
    memcpy(c->dst, c->src, c->bytes);
    lock();
}

static bool guard_begin(StepKey key) {
    if (guard.in_step) breach("begin: inside a step");
    guard.in_step = true;
    guard.n_steps++;
    guard.now.key = key;
    guard.now.n = 0;
    guard.now.fields.n = 0;
    return true;
}

static void guard_end(void) {
    if (!guard.in_step) breach("end: without begin");
    guard.in_step = guard.record = false;
    Trace *now = &guard.now;
    now->at[now->n] = now->fields.n;
    if (now->n == MAX_TRACE) breach("end: more operations than this test can record");
    for (int i = 0; i < guard.n_seen; i++) {
        const Trace *t = &guard.seen[i];
        if (memcmp(&t->key, &now->key, sizeof now->key)) continue;
        const StepKey *k = &now->key;
        for (int o = 0; o < max_int(t->n, now->n); o++)
            if (o >= t->n || o >= now->n || strcmp(t->op[o], now->op[o]) || t->at[o + 1] - t->at[o] != now->at[o + 1] - now->at[o] ||
                memcmp(t->fields.data + t->at[o], now->fields.data + now->at[o], now->at[o + 1] - now->at[o]))
                breach("step kind %d, %d rows, %d segments, %d kept: operation %d is %s with other fields or in place of %s", (int)k->kind,
                       (int)k->rows, (int)k->segs, (int)k->out_rows, o, o < now->n ? now->op[o] : "missing", o < t->n ? t->op[o] : "none");
        return;
    }
    if (guard.n_seen == MAX_KEYS) {
        breach("end: more keys than this test can record");
        return;
    }
    Trace *t = &guard.seen[guard.n_seen++];
    *t = *now;
    t->fields = (Bytes){ 0 };
    keep(&t->fields, now->fields.data, now->fields.n);
}

static int guard_mark(void) {                          // with marks, sessions issue steps ahead of the tokens it knows
    if (guard.in_step) breach("mark: inside a step");
    return 0;
}
static void guard_wait_for(int mark) { (void)mark; }

static const Ops *guard_ops(void) {                    // a fresh table: nothing recorded
    for (int i = 0; i < guard.n_seen; i++) free(guard.seen[i].fields.data);
    free(guard.now.fields.data);
    memset(&guard, 0, sizeof guard);
    guard.ops = *cpu_ops();
    guard.ops.name = "guard";
    guard.ops.weight_bytes = guard_weight_bytes;
    guard.ops.upload = guard_upload;
    guard.ops.reserve = guard_reserve;
    guard.ops.release = guard_release;
    guard.ops.copy = guard_copy;
    guard.ops.begin = guard_begin;
    guard.ops.end = guard_end;
    guard.ops.fence = guard_mark;
    guard.ops.wait_for = guard_wait_for;
#define X(name, Type) guard.ops.name = guard_##name;
    OPERATIONS(X)
#undef X
    return &guard.ops;
}

// ---- a script that uses all kinds of steps ----

enum { MAX_SCRIPT_ROWS = 256 };

typedef struct {
    Model         *m;
    const int32_t *ids;
    float         *logits;             // (MAX_SCRIPT_ROWS, VOCAB) everything that was wanted, in order
    int            n, at;              // rows of logits; next token
} Script;

typedef enum { ALL, LAST, NONE } Wanted;

// One step: a segment of n0 rows for session 0 (tree: parents are given) and one of n1 rows for session 1; 0: no segment.
static void play(Script *s, int n0, const int *parents, int n1, Wanted wanted, int accept0, int accept1, const int32_t *path0) {
    StepRow rows[2 * N_POSITIONS];
    StepSeg segs[2];
    int n = 0, n_segs = 0;
    int32_t accept[2], path[2 * STEP_ROWS] = { 0 };
    for (int seq = 0; seq < 2; seq++) {
        const int count = seq ? n1 : n0;
        const bool tree = !seq && parents;
        if (!count) continue;
        if (tree) memcpy(path + n_segs * STEP_ROWS, path0, (size_t)accept0 * sizeof *path);
        accept[n_segs] = seq ? accept1 : accept0;
        segs[n_segs++] = (StepSeg){ .seq = seq, .kind = tree ? SEG_TREE : SEG_CHAIN, .n = count, .rows = rows + n };
        for (int i = 0; i < count; i++)
            rows[n++] = (StepRow){ .token = s->ids[s->at++ % N_POSITIONS], .parent = tree ? parents[i] : 0, .output = wanted == ALL || (wanted == LAST && i == count - 1) };
    }
    const int kept = step(s->m, segs, n_segs);
    for (int i = 0; i < kept && s->n < MAX_SCRIPT_ROWS; i++) read_logits(s->m, i, s->logits + (size_t)s->n++ * VOCAB);
    commit(s->m, accept, parents ? path : NULL);
}

// Prompt, decoding, a rejected end of a chain, trees, two sessions in one step, a prompt chunk beside a tree. Both sessions
// go past the 128 slots of a ring.
static void play_script(void *arg) {
    static const int parents[7] = { -1, 0, 0, 1, 1, 2, 4 };
    static const int32_t path[4] = { 0, 1, 4, 6 };
    Script *s = arg;
    Model *m = s->m;
    s->n = s->at = 0;
    reset_session(m, 0);
    reset_session(m, 1);
    run_prompt(m, 0, s->ids, 120);
    read_logits(m, 0, s->logits + (size_t)s->n++ * VOCAB);
    commit_all(m);
    play(s, 0, NULL, 80, ALL, 0, 80, NULL);
    for (int i = 0; i < 3; i++) play(s, 1, NULL, 0, ALL, 1, 0, NULL);
    play(s, 3, NULL, 5, ALL, 2, 5, NULL);
    play(s, 7, parents, 3, LAST, 4, 2, path);
    play(s, 1, NULL, 1, ALL, 1, 1, NULL);
    play(s, 0, NULL, 40, NONE, 0, 40, NULL);
    play(s, 0, NULL, 1, ALL, 0, 1, NULL);
    play(s, 20, NULL, 0, LAST, 20, 0, NULL);           // three steps that only their wanted rows tell apart
    play(s, 20, NULL, 0, ALL, 5, 0, NULL);
    play(s, 20, NULL, 0, NONE, 5, 0, NULL);
    play(s, 7, parents, 0, ALL, 1, 0, path);
    play(s, 5, parents, 70, LAST, 3, 70, path);
    play(s, 7, parents, 3, LAST, 1, 3, path);
    play(s, 1, NULL, 1, ALL, 1, 1, NULL);
}

typedef struct {
    Model      *m;
    const char *path;
    const Ops  *ops;
} Loading;

static void run_loading(void *arg) {
    Loading *l = arg;
    load_model(l->m, l->path, l->ops, plan(false), NULL);
}

static void touch(void *arg) { (void)*(volatile char *)arg; }

typedef struct {
    Model     *m;
    Tokenizer *tok;
} Talk;

static void run_generate(void *arg) {
    Talk *t = arg;
    const AnswerOptions o = { .n_predict = 12, .ignore_eos = true, .think_budget = -1, .sampling = { .seed = 5, .temperature = 1, .top_k = 40, .top_p = 0.9f, .repeat = 1 } };
    Session s;
    init_session(&s, t->m, t->tok, 0);
    session_start(&s, &(Prompt){ .ids = prompts[0], .n = 90 }, &o);
    print_answer(&s, &(ShowOptions){ 0 });
    free_session(&s);
}

// The text of an answer as it is printed, caught in a file.
static char *generated(Model *m, Tokenizer *tok, bool *ok) {
    const char *out = in_tmp("text");
    int saved[2];
    fflush(stdout);
    fflush(stderr);
    for (int i = 0; i < 2; i++) {
        const int fd = open(i ? "/dev/null" : out, O_WRONLY | O_CREAT | O_TRUNC, 0600);
        saved[i] = dup(i + 1);
        if (fd < 0 || saved[i] < 0 || dup2(fd, i + 1) < 0) abort();
        close(fd);
    }
    *ok = guarded(run_generate, &(Talk){ m, tok });
    fflush(stdout);
    fflush(stderr);
    for (int i = 0; i < 2; i++) {
        dup2(saved[i], i + 1);
        close(saved[i]);
    }
    return text_of(out);
}

static void test_guarded(const char *family, unsigned operations) {
    const char *path = in_tmp("%s-f16.gguf", family);
    const size_t size = (size_t)MAX_SCRIPT_ROWS * VOCAB;
    float *want = must(calloc(size, sizeof *want)), *got = must(calloc(size, sizeof *got));
    Model *plain = open_model(path, cpu_ops(), plan(false), NULL), *m = must(calloc(1, sizeof *m));
    if (!plain) goto done;
    Loading loading = { m, path, guard_ops() };
    if (!CHECK(guarded(run_loading, &loading), "%s: load_model touches backend memory %s%s", family, guard.op ? "in " : "outside every operation", guard.op ? guard.op : "")) goto done;
    guard.loaded = true;
    CHECK(!guarded(touch, m->s.x[0]) && !guard.op, "%s: backend memory is readable outside operations: this test tests nothing", family);
    CHECK(m->plan.weights > 0 && in_backend(m->weights.token_embd.data, matrix_bytes(&m->weights.token_embd)), "%s: the weights were not uploaded", family);

    const long allocations = n_allocations;
#ifdef __linux__
    CHECK(allocations > 0, "%s: allocations are not counted", family);
#endif
    Script a = { .m = plain, .logits = want }, b = { .m = m, .logits = got };
    static const int rounds[] = { 0, 1, 0 };           // the same keys with other contents, and the first once more
    uint64_t first = 0;
    for (int r = 0; r < 3; r++) {
        a.ids = b.ids = prompts[rounds[r]];
        play_script(&a);
        if (!CHECK(guarded(play_script, &b), "%s: backend memory is touched %s%s", family, guard.op ? "out of bounds in " : "outside every operation", guard.op ? guard.op : "")) goto done;
        char label[128];
        snprintf(label, sizeof label, "%s, round %d: guarded and plain backend", family, r);
        CHECK(a.n == b.n && a.n > 90, "%s: %d and %d rows of logits", label, b.n, a.n);
        check_same(label, got, want, (size_t)a.n, VOCAB);
        if (!r) first = hash_bytes(want, (size_t)a.n * VOCAB * sizeof *want);
    }
    CHECK(first == hash_bytes(want, (size_t)a.n * VOCAB * sizeof *want), "%s: the same script on a used model gives other logits", family);
    CHECK(n_allocations == allocations, "%s: steps made %ld allocations", family, n_allocations - allocations);
    CHECK(guard.n_steps > 3 * guard.n_seen && guard.n_seen > 12, "%s: %d steps with %d different keys: too few to compare", family, guard.n_steps, guard.n_seen);
    for (int i = 0; i < N_OPERATIONS; i++) {
#define X(op, Type) #op,
        static const char *const names[] = { OPERATIONS(X) };
#undef X
        CHECK((guard.used >> i & 1) == (operations >> i & 1), "%s: operation %s is %s", family, names[i], guard.used >> i & 1 ? "used" : "not used");
    }

    Tokenizer tok;
    load_tokenizer(&tok, &m->gguf, m->config.vocab);
    bool ok[2];
    char *text[2] = { generated(plain, &tok, &ok[0]), generated(m, &tok, &ok[1]) };
    CHECK(ok[1], "%s: generation touches backend memory %s%s", family, guard.op ? "in " : "outside every operation", guard.op ? guard.op : "");
    CHECK(text[0][0] && !strcmp(text[0], text[1]), "%s: generated '%s' on the guarded backend, '%s' on the plain one", family, text[1], text[0]);
    CHECK(guard.used & 1u << OP_sample, "%s: generation does not sample", family);
    CHECK(!guard.n_faults, "%s: %d breaches of the contract, the first: %s", family, guard.n_faults, guard.fault);
    free(text[0]);
    free(text[1]);
    tok_free(&tok);
done:
    close_model(plain);
    close_model(m);
    guard_ops();
    free(want);
    free(got);
}

// ==== [7] Damaged files ==============================================================================================
// A file that does not fit ends the process with one line that names the file and the key or tensor.

typedef enum { DROP_KEY, SET_INT, SET_REAL, SET_TEXT, SET_TEXTS, SET_INTS, ADD_TENSOR, DROP_TENSOR, SET_SHAPE, SET_TYPE, FILL } EditKind;

typedef struct {
    int         family;                // index into families
    EditKind    kind;
    const char *name;                  // key or tensor
    const char *names;                 // what the error names instead; NULL: name
    double      value[5];              // SET_INTS, SET_SHAPE: up to the first negative number
    const char *text;
} Edit;

static const Edit edits[] = {
    // the model
    { 0, SET_TEXT, "general.architecture", NULL, { 0 }, "llama" },
    { 0, SET_TEXT, "general.architecture", NULL, { 0 }, "gemma4-assistant" },
    { 0, SET_INT, "general.architecture", NULL, { 4 }, NULL },
    { 0, DROP_KEY, "general.architecture", NULL, { 0 }, NULL },
    { 0, DROP_KEY, "gemma4.block_count", NULL, { 0 }, NULL },
    { 0, SET_INT, "gemma4.block_count", NULL, { 0 }, NULL },
    { 0, SET_INT, "gemma4.block_count", NULL, { 513 }, NULL },
    { 0, SET_INT, "gemma4.block_count", NULL, { 4294967295.0 }, NULL },
    { 0, SET_INT, "gemma4.block_count", "gemma4.attention.sliding_window_pattern", { 5 }, NULL },
    { 0, SET_INT, "gemma4.block_count", "gemma4.attention.sliding_window_pattern", { 3 }, NULL },
    { 0, SET_TEXT, "gemma4.block_count", NULL, { 0 }, "4" },
    { 0, SET_INT, "gemma4.embedding_length", "token_embd.weight", { 128 }, NULL },
    { 0, SET_INT, "gemma4.embedding_length", NULL, { 0 }, NULL },
    { 0, SET_INT, "gemma4.context_length", NULL, { 0 }, NULL },
    { 0, SET_REAL, "gemma4.attention.layer_norm_rms_epsilon", "layer_norm_rms_epsilon': expected a finite number, got nan (E_META_RANGE", { NAN }, NULL },
    { 0, SET_REAL, "gemma4.attention.layer_norm_rms_epsilon", NULL, { 0 }, NULL },
    { 0, SET_REAL, "gemma4.attention.layer_norm_rms_epsilon", NULL, { -1e-6 }, NULL },
    { 0, SET_TEXT, "gemma4.attention.layer_norm_rms_epsilon", NULL, { 0 }, "1e-6" },
    { 0, DROP_KEY, "gemma4.attention.layer_norm_rms_epsilon", NULL, { 0 }, NULL },
    { 0, SET_REAL, "gemma4.final_logit_softcapping", "softcapping': expected a positive number, got -1 (E_META_RANGE", { -1 }, NULL },
    { 0, SET_REAL, "gemma4.final_logit_softcapping", NULL, { -30 }, NULL },
    { 0, SET_REAL, "gemma4.final_logit_softcapping", NULL, { NAN }, NULL },
    { 0, SET_REAL, "gemma4.final_logit_softcapping", NULL, { INFINITY }, NULL },
    { 0, SET_REAL, "gemma4.rope.freq_base", NULL, { 1 }, NULL },
    { 0, SET_REAL, "gemma4.rope.freq_base_swa", NULL, { NAN }, NULL },
    // attention
    { 0, SET_INTS, "gemma4.attention.head_count_kv", "head_count_kv': expected 4 elements, got 3 (E_META_ARRAY", { 2, 1, 2, -1 }, NULL },
    { 0, SET_INTS, "gemma4.attention.head_count_kv", "head_count_kv': expected an integer in 1..1024, got 0 (E_META_RANGE", { 2, 1, 0, 1, -1 }, NULL },
    { 0, SET_INTS, "gemma4.attention.head_count_kv", NULL, { 2, 1, 3, 1, -1 }, NULL },
    { 0, SET_INTS, "gemma4.attention.head_count_kv", "blk.2.attn_k.weight", { 2, 1, 1, 1, -1 }, NULL },
    { 0, SET_REAL, "gemma4.attention.head_count_kv", NULL, { 1 }, NULL },
    { 0, DROP_KEY, "gemma4.attention.head_count_kv", NULL, { 0 }, NULL },
    { 0, SET_INT, "gemma4.attention.head_count", NULL, { 0 }, NULL },
    { 0, SET_INT, "gemma4.attention.head_count", "gemma4.attention.head_count_kv", { 3 }, NULL },
    { 0, SET_INT, "gemma4.attention.head_count", "blk.0.attn_q.weight", { 4 }, NULL },
    { 0, SET_INT, "gemma4.attention.head_count", "blk.0.attn_q.weight", { 256 }, NULL },
    { 0, SET_INT, "gemma4.attention.key_length", NULL, { 0 }, NULL },
    { 0, SET_INT, "gemma4.attention.key_length", NULL, { 1024 }, NULL },
    { 0, SET_INT, "gemma4.attention.key_length_swa", NULL, { 48 }, NULL },
    { 0, SET_INT, "gemma4.attention.value_length", NULL, { 256 }, NULL },
    { 0, SET_INT, "gemma4.attention.sliding_window", NULL, { 0 }, NULL },
    { 0, SET_INT, "gemma4.attention.sliding_window_pattern", NULL, { 2 }, NULL },
    { 0, SET_INTS, "gemma4.attention.sliding_window_pattern", NULL, { 1, 0, 1, -1 }, NULL },
    { 0, SET_INT, "gemma4.attention.shared_kv_layers", "shared_kv_layers': expected an integer in 0..3, got 4 (E_META_RANGE", { 4 }, NULL },
    { 0, SET_INT, "gemma4.attention.shared_kv_layers", NULL, { 3 }, NULL },
    { 0, SET_INT, "gemma4.feed_forward_length", NULL, { 0 }, NULL },
    { 0, SET_INT, "gemma4.feed_forward_length", "blk.0.ffn_gate.weight", { 96 }, NULL },
    // tensors
    { 0, DROP_TENSOR, "token_embd.weight", NULL, { 0 }, NULL },
    { 0, DROP_TENSOR, "output_norm.weight", NULL, { 0 }, NULL },
    { 0, DROP_TENSOR, "rope_freqs.weight", NULL, { 0 }, NULL },
    { 0, DROP_TENSOR, "blk.0.attn_norm.weight", NULL, { 0 }, NULL },
    { 0, DROP_TENSOR, "blk.0.attn_v.weight", NULL, { 0 }, NULL },
    { 0, DROP_TENSOR, "blk.1.attn_k.weight", NULL, { 0 }, NULL },
    { 0, DROP_TENSOR, "blk.1.attn_k_norm.weight", NULL, { 0 }, NULL },
    { 0, DROP_TENSOR, "blk.3.ffn_down.weight", NULL, { 0 }, NULL },
    { 0, SET_SHAPE, "blk.2.attn_q.weight", NULL, { 64, 256, -1 }, NULL },
    { 0, SET_SHAPE, "blk.2.attn_q.weight", NULL, { 512, 64, -1 }, NULL },
    { 0, SET_SHAPE, "blk.2.attn_q.weight", NULL, { 64, 512, 2, -1 }, NULL },
    { 0, SET_SHAPE, "blk.2.attn_q.weight", NULL, { 64, 512, 1, 2, -1 }, NULL },
    { 0, SET_SHAPE, "output_norm.weight", NULL, { 32, -1 }, NULL },
    { 0, SET_SHAPE, "rope_freqs.weight", NULL, { 128, -1 }, NULL },
    { 0, SET_SHAPE, "token_embd.weight", NULL, { 32, 512, -1 }, NULL },
    { 0, SET_TYPE, "blk.1.ffn_up.weight", "'blk.1.ffn_up.weight': type I8 is not supported by this build (E_TYPE_UNSUPPORTED)", { GGUF_I8 }, NULL },
    { 0, SET_TYPE, "blk.1.ffn_up.weight", "'blk.1.ffn_up.weight': type F64 is not supported by this build (E_TYPE_UNSUPPORTED)", { GGUF_F64 }, NULL },
    { 0, SET_TYPE, "blk.1.ffn_up.weight", "'blk.1.ffn_up.weight': type Q8_1 is not supported by this build (E_TYPE_UNSUPPORTED)", { GGUF_Q8_1 }, NULL },
    { 0, SET_TYPE, "blk.1.attn_output.weight", "'blk.1.attn_output.weight': type Q8_K is not supported by this build (E_TYPE_UNSUPPORTED)", { GGUF_Q8_K }, NULL },
    { 0, SET_TYPE, "blk.1.attn_output.weight", "'blk.1.attn_output.weight': type IQ1_S is not supported by this build (E_TYPE_UNSUPPORTED)", { GGUF_IQ1_S }, NULL },
    { 0, SET_TYPE, "token_embd.weight", "'token_embd.weight': type I8 is not supported by this build (E_TYPE_UNSUPPORTED)", { GGUF_I8 }, NULL },
    { 0, SET_TYPE, "rope_freqs.weight", NULL, { GGUF_F16 }, NULL },
    { 0, SET_TYPE, "blk.0.attn_norm.weight", NULL, { GGUF_F16 }, NULL },
    { 0, SET_TYPE, "blk.0.layer_output_scale.weight", NULL, { GGUF_F16 }, NULL },
    { 0, FILL, "rope_freqs.weight", NULL, { 0 }, NULL },
    { 0, FILL, "rope_freqs.weight", NULL, { -1 }, NULL },
    { 0, FILL, "rope_freqs.weight", NULL, { NAN }, NULL },
    // the tables of rows
    { 0, ADD_TENSOR, "token_embd.scale", "'token_embd.weight': an embedding table with a .scale tensor", { 0 }, NULL },
    { 2, ADD_TENSOR, "per_layer_token_embd.scale", "'per_layer_token_embd.weight': an embedding table with a .scale tensor", { 0 }, NULL },
    { 1, ADD_TENSOR, "blk.0.ffn_gate_up_exps.scale", "'blk.0.ffn_gate_up_exps.scale': expected shape (8, 1, 1), got (2, 1, 1) (E_SHAPE)", { 2 }, NULL },
    // tokenizer
    { 0, SET_INTS, "tokenizer.ggml.scores", "(E_META_ARRAY)", { 1, 2, -1 }, NULL },
    { 0, SET_INT, "tokenizer.ggml.scores", NULL, { 1 }, NULL },
    { 0, SET_TEXTS, "tokenizer.ggml.merges", "merge 1: expected two texts separated by a space, got 'ab' (E_META_RANGE)", { 0 }, "ab" },
    { 0, SET_TEXTS, "tokenizer.ggml.merges", "merge 1: expected two texts separated by a space, got ' a' (E_META_RANGE)", { 0 }, " a" },
    { 0, SET_TEXTS, "tokenizer.ggml.merges", "merge 1: expected two texts separated by a space, got 'a ' (E_META_RANGE)", { 0 }, "a " },
    { 0, DROP_KEY, "tokenizer.ggml.tokens", NULL, { 0 }, NULL },
    { 0, DROP_KEY, "tokenizer.ggml.merges", NULL, { 0 }, NULL },
    { 0, SET_TEXT, "tokenizer.ggml.model", NULL, { 0 }, "llama" },
    { 0, SET_INTS, "tokenizer.ggml.token_type", NULL, { 1, 1, 1, -1 }, NULL },
    { 0, SET_INT, "tokenizer.ggml.bos_token_id", "bos_token_id': expected an integer in 0..511, got 512 (E_META_RANGE", { 512 }, NULL },
    { 0, SET_INT, "tokenizer.ggml.eos_token_id", NULL, { 4294967295.0 }, NULL },
    { 0, SET_INT, "tokenizer.ggml.eot_token_id", NULL, { 512 }, NULL },
    // experts
    { 1, SET_INT, "gemma4.expert_used_count", "expert_used_count': expected an integer in 1..8, got 9 (E_META_RANGE", { 9 }, NULL },
    { 1, SET_INT, "gemma4.expert_used_count", NULL, { 0 }, NULL },
    { 1, SET_INT, "gemma4.expert_count", NULL, { 1025 }, NULL },
    { 1, SET_INT, "gemma4.expert_count", "blk.0.ffn_gate_inp.weight", { 4 }, NULL },
    { 1, SET_INT, "gemma4.expert_feed_forward_length", "blk.0.ffn_gate_up_exps.weight", { 64 }, NULL },
    { 1, DROP_KEY, "gemma4.expert_feed_forward_length", NULL, { 0 }, NULL },
    { 1, DROP_TENSOR, "blk.1.ffn_gate_inp.scale", NULL, { 0 }, NULL },
    { 1, DROP_TENSOR, "blk.2.ffn_gate_up_exps.weight", "blk.2.ffn_gate_exps.weight", { 0 }, NULL },
    { 1, DROP_TENSOR, "blk.3.ffn_down_exps.weight", NULL, { 0 }, NULL },
    { 1, SET_SHAPE, "blk.3.ffn_down_exps.weight", "ffn_down_exps.weight': expected shape (32, 64, 8), got (32, 64, 7) (E_SHAPE", { 32, 64, 7, -1 }, NULL },
    { 1, SET_SHAPE, "blk.3.ffn_down_exps.scale", NULL, { 7, -1 }, NULL },
    // per-layer embeddings, shared K and V
    { 2, SET_INT, "gemma4.embedding_length_per_layer_input", "per_layer_token_embd.weight", { 64 }, NULL },
    { 2, SET_SHAPE, "per_layer_token_embd.weight", NULL, { 192, 511, -1 }, NULL },
    { 2, DROP_TENSOR, "per_layer_token_embd.weight", NULL, { 0 }, NULL },
    { 2, DROP_TENSOR, "per_layer_proj_norm.weight", NULL, { 0 }, NULL },
    { 2, DROP_TENSOR, "blk.5.inp_gate.weight", NULL, { 0 }, NULL },
    { 2, SET_INTS, "gemma4.feed_forward_length", NULL, { 128, 128, 128, -1 }, NULL },
    { 2, SET_INT, "gemma4.feed_forward_length", "blk.3.ffn_gate.weight", { 128 }, NULL },
    { 2, SET_INT, "gemma4.attention.shared_kv_layers", NULL, { 5 }, NULL },
    { 2, SET_INT, "gemma4.attention.shared_kv_layers", NULL, { 6 }, NULL },
};

static void apply_edit(Draft *d, const Edit *e) {
    static const uint32_t types[] = { [SET_INT] = GGUF_V_U32, [SET_REAL] = GGUF_V_F32, [SET_TEXT] = GGUF_V_STR, [SET_TEXTS] = GGUF_V_ARRAY, [SET_INTS] = GGUF_V_ARRAY };
    uint64_t n = 0;
    while (n < 5 && e->value[n] >= 0) n++;
    if (e->kind <= SET_INTS) {
        DraftKey *k = draft_key(d, e->name);
        if (e->kind == DROP_KEY) {
            k->name[0] = 0;
            return;
        }
        Bytes *b = &k->value;
        b->n = 0;
        put_u32(b, types[e->kind]);
        if (e->kind == SET_INT) put_u32(b, (uint32_t)e->value[0]);
        if (e->kind == SET_REAL) put(b, &(float){ (float)e->value[0] }, 4);
        if (e->kind == SET_TEXT) put_text(b, e->text);
        if (e->kind == SET_TEXTS) {                    // a good merge, then the text
            put_u32(b, GGUF_V_STR);
            put_u64(b, 2);
            put_text(b, "a b");
            put_text(b, e->text);
        }
        if (e->kind != SET_INTS) return;
        put_u32(b, GGUF_V_U32);
        put_u64(b, n);
        for (uint64_t i = 0; i < n; i++) put_u32(b, (uint32_t)e->value[i]);
        return;
    }
    if (e->kind == ADD_TENSOR) {
        draft_add(d, e->name, e->value[0] > 0 ? (uint64_t)e->value[0] : 1);
        return;
    }
    DraftTensor *t = draft_tensor(d, e->name);
    if (!CHECK(t, "%s: no tensor '%s' to damage", families[e->family], e->name)) return;
    if (e->kind == DROP_TENSOR) t->name[0] = 0;
    if (e->kind == SET_TYPE) t->type = (int)e->value[0];
    if (e->kind == FILL) fill(t, (float)e->value[0]);
    if (e->kind != SET_SHAPE) return;
    t->n_dims = (int)n;
    for (uint64_t i = 0; i < 4; i++) t->ne[i] = i < n ? (uint64_t)e->value[i] : 1;
}

static int run_gemma4(const char *path) {
    const char *gemma4 = getenv("GEMMA4") ? getenv("GEMMA4") : "./gemma4";
    const char *argv[] = { gemma4, path, "-p", "a", "--raw", "-n", "1", "-c", "64", "--temp", "0", NULL };
    return run_program(argv, in_tmp("stdout"), in_tmp("stderr"));
}

static void check_refused(const char *what, const char *path, const char *names) {
    const int status = run_gemma4(path);
    char *err = text_of(in_tmp("stderr")), *out = text_of(in_tmp("stdout")), *error = NULL, start[1100];
    int n_errors = 0;
    for (char *line = strtok(err, "\n"); line; line = strtok(NULL, "\n"))
        if (line[0] != '#' && !n_errors++) error = line;               // "# " lines are remarks
    snprintf(start, sizeof start, "gemma4: error: %s: ", path);
    CHECK(status == 1, "%s: expected exit status 1, got %d", what, status);
    CHECK(n_errors == 1 && error && !strncmp(error, start, strlen(start)) && strstr(error, names) && strstr(error, "(E_") && !out[0],
          "%s: expected one line '%s...%s...(E_...)', got %d, the first: %s", what, start, names, n_errors, error ? error : "(none)");
    free(err);
    free(out);
}

static void test_damaged(void) {
    const char *gemma4 = getenv("GEMMA4") ? getenv("GEMMA4") : "./gemma4";
    if (access(gemma4, X_OK)) {
        SKIP("no gemma4 to run: the errors of damaged files were not checked");
        return;
    }
    for (int i = 0; i < 3; i++) {                      // what the rewriter leaves alone works
        Draft d = read_draft(in_tmp("%s-f16.gguf", families[i]));
        const int status = run_gemma4(write_draft(&d, in_tmp("damaged.gguf")));
        CHECK(status == 0, "%s, rewritten without a change: exit status %d", families[i], status);
    }
    for (size_t i = 0; i < sizeof edits / sizeof *edits; i++) {
        const Edit *e = &edits[i];
        char what[256];
        snprintf(what, sizeof what, "%s, edit %zu of '%s' (%g, %g, %g ...)", families[e->family], i, e->name, e->value[0], e->value[1], e->value[2]);
        Draft d = read_draft(in_tmp("%s-f16.gguf", families[e->family]));
        apply_edit(&d, e);
        check_refused(what, write_draft(&d, in_tmp("damaged.gguf")), e->names ? e->names : e->name);
    }
    check_refused("micro-dense, attn_qkv of sliding layer 0 without V", write_fused(in_tmp("micro-dense-f16.gguf"), in_tmp("damaged.gguf"), 0), "blk.0.attn_");
}

// Tokens that the file suppresses are never sampled, not even by a bias.
static void test_suppressed(void) {
    enum { ALSO = 5 };
    float *z = must(calloc(VOCAB, sizeof *z));
    int best = 0, next = -1, bad = 0;
    ModelOptions o = plan(false);
    o.bias = true;
    Model *m = open_model(in_tmp("micro-dense-f16.gguf"), cpu_ops(), o, NULL);
    if (!m) return;
    run_prompt(m, 0, prompts[0], 8);
    read_logits(m, 0, z);
    for (int i = 0; i < VOCAB; i++) if (z[i] > z[best]) best = i;
    for (int i = 0; i < VOCAB; i++) if (i != best && i != ALSO && (next < 0 || z[i] > z[next])) next = i;
    close_model(m);

    Draft d = read_draft(in_tmp("micro-dense-f16.gguf"));
    apply_edit(&d, &(Edit){ 0, SET_INTS, "tokenizer.ggml.suppress_tokens", NULL, { best, ALSO, best, -1 }, NULL });
    m = open_model(write_draft(&d, in_tmp("suppressed.gguf")), cpu_ops(), o, NULL);
    if (!m) return;
    CHECK(m->n_suppressed == 2, "suppressed tokens: counted %d, expected 2", m->n_suppressed);
    run_prompt(m, 0, prompts[0], 8);
    const Batch b = { .rows = m->s.out_rows, .segs = m->s.segs, .len = m->s.len, .n_rows = 1, .n_segs = 1 };
    const Sample sample = { .batch = &b, .vocab = VOCAB, .logits = m->s.logits, .params = m->s.params, .mask = m->s.mask,
                            .bias = m->s.bias, .out = m->s.chosen };
    m->s.params[0] = (SampleParams){ .temperature = 0, .top_p = 1, .repeat = 1 };
    cpu_ops()->sample(&sample);
    CHECK(m->s.chosen[0] == next, "suppressed tokens: greedy chose %d, expected %d", (int)m->s.chosen[0], next);
    m->s.bias[best] = m->s.bias[ALSO] = 1000;
    for (uint64_t seed = 0; seed < 500; seed++) {
        m->s.params[0] = (SampleParams){ .seed = seed, .temperature = (float)(seed % 2), .top_p = 1, .repeat = 1 };
        cpu_ops()->sample(&sample);
        bad += m->s.chosen[0] == best || m->s.chosen[0] == ALSO || m->s.chosen[0] < 0;
    }
    CHECK(!bad, "suppressed tokens: chosen %d of 500 times", bad);
    close_model(m);
    free(z);
}

// ==== [8] True widths ================================================================================================
// Few layers and tokens, but every other dimension as published: buffers, strides and block types that small models miss.

static void test_true_width(const char *preset, const char *layers) {
    enum { N = 8 };
    struct statvfs fs;
    if (statvfs(tmp, &fs) || (double)fs.f_bavail * (double)fs.f_frsize < 2e9) {
        SKIP("less than 2 GB of disk free for a model of true width");
        return;
    }
    char label[128];
    const char *path = make_model("wide", preset, "q4_k_m", "--vocab", "512", "--layers", layers, NULL);
    const ModelOptions o = { .n_ctx = 64, .n_seqs = 2, .n_batch = STEP_ROWS, .n_logits = N, .k_type = KV_F16, .v_type = KV_F16 };
    Model *m = open_model(path, cpu_ops(), o, NULL);
    if (m) {
        float *chunk = must(calloc(N * VOCAB, sizeof *chunk)), *single = must(calloc(N * VOCAB, sizeof *single));
        use_threads(max_threads);
        run_tokens(m, 0, prompts[0], N, N, 1, chunk);
        run_tokens(m, 1, prompts[0], N, 1, 1, single);
        use_threads(1);
        snprintf(label, sizeof label, "%s, %s layers: %d rows at once and one by one", preset, layers, N);
        check_same(label, chunk, single, N, VOCAB);
        size_t n_bad = 0;
        for (size_t i = 0; i < N * VOCAB; i++) n_bad += !(fabsf(chunk[i]) <= 30);
        CHECK(!n_bad, "%s: %zu logits are not numbers of at most 30", preset, n_bad);
        for (int r = 0; r < N; r++) {
            float low = chunk[r * VOCAB], high = low;
            for (int i = 0; i < VOCAB; i++) low = fminf(low, chunk[r * VOCAB + i]), high = fmaxf(high, chunk[r * VOCAB + i]);
            CHECK(high - low > 1, "%s: row %d: logits from %g to %g", preset, r, (double)low, (double)high);
            CHECK(!r || memcmp(chunk + r * VOCAB, chunk + (r - 1) * VOCAB, VOCAB * sizeof *chunk), "%s: rows %d and %d are equal", preset, r - 1, r);
        }
        free(chunk);
        free(single);
        close_model(m);
    }
    remove(path);
}

int main(void) {
    make_tmp();
    start_threads(0);
    max_threads = count_threads();
    use_threads(1);
    size_t size = 0;
    void *ids = read_file("tests/golden/tokens.i32", &size, "run from the root of the repository");
    if (!CHECK(size == sizeof prompts, "tests/golden/tokens.i32: expected %zu bytes, got %zu", sizeof prompts, size)) return test_done("forward");
    memcpy(prompts, ids, sizeof prompts);
    free(ids);

    for (int f = 0; f < 3; f++)
        for (int t = 0; t < N_TYPES; t++) {
            char name[64];
            const char *type = t ? "f32" : "f16";
            snprintf(name, sizeof name, "%s-%s", families[f], type);
            make_model(name, families[f], type, NULL);
            test_golden(families[f], type);
            test_checkpoints(families[f], type);
        }
    for (int f = 0; f < 3; f++) test_quantised(families[f]);
    test_other_forms();

    const unsigned dense = 1u << OP_embed | 1u << OP_matmul | 1u << OP_gate_up | 1u << OP_gather_rows | 1u << OP_qkv_store | 1u << OP_attend |
                           1u << OP_kv_commit | 1u << OP_kv_copy | 1u << OP_head;
    test_guarded("micro-dense", dense);
    test_guarded("micro-moe", dense | 1u << OP_expert_gate_up | 1u << OP_expert_down);
    test_guarded("micro-e", dense | 1u << OP_ple_rows | 1u << OP_ple_inject);
    test_damaged();
    test_suppressed();
    const char *all = getenv("LONG");
    if (all && strcmp(all, "0")) test_true_width("26b-a4b", "2");      // a file of 1.1 GB
    test_true_width("e2b", "6");
    return test_done("forward");
}
