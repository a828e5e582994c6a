/* gemma4.c - Gemma 4 inference: load a GGUF, run the transformer, print text.
 *
 * HOW TO READ  main [12] -> verb_generate -> print_answer [11] -> session_next -> run_sessions [10] -> go_through [8] ->
 *              forward [5] -> attention -> op->attend (declared in gemma4.h) -> cpu_attend [13]. The forward
 *              pass is written once, against a table of operations; a backend fills the table.
 * CONTENTS     search for "[n]"
 *   [1]  Limits, helpers, die()
 *   [2]  Config: model-wide and per layer
 *   [3]  Weights: names, shapes, binding
 *   [4]  Sessions and KV cache
 *   [5]  The forward pass
 *   [6]  Drafters: files, plan, passes
 *   [7]  Memory: the plan, loading
 *   [8]  Step: batch, run, commit
 *   [9]  Drafting: who guesses, how far
 *   [10] Generation: sessions, events
 *   [11] Text and verbs: logits, tokenize, detokenize, plan
 *   [12] Command line
 *   [13] CPU operations
 * PARTS        parts/convert.h: Hugging Face folders, quantising; parts/bench.h: bench, check, ppl; parts/niah.h: niah;
 *              parts/chat.h: conversations; parts/lines.h: the terminal; parts/session.h: sessions in files;
 *              parts/store.h: sessions without a slot; parts/server.h: HTTP; parts/kv.h: rows of the KV cache;
 *              parts/reference.h: what each operation means; parts/compress.h: shorter prompts; parts/grammar.h,
 *              parts/schema.h: answers of a given form
 * INVARIANTS   activations are f32; matrices are (rows = out, cols = in), row-major; index products are size_t; a step
 *              allocates nothing, unless --dump is given.
 * TRAPS        the list before forward: every way this model differs from Llama. */
#define _GNU_SOURCE
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#ifndef TESTING               // whose build has it in an object of its own
#define GGUF_IMPLEMENTATION
#endif
#define TOKENIZER_IMPLEMENTATION
#include "gemma4.h"
#include "gguf.h"
#include "tokenizer.h"
#include "parts/kv.h"
#include "parts/grammar.h"
#include "parts/schema.h"

// ==== [1] Limits, helpers, die() =====================================================================================
// Two kinds of failure, never mixed: bad input prints one line and exits 1; our own bug is an assert.

enum { MAX_LAYERS = 512, MAX_HEAD_DIM = 512, MAX_EXPERTS = 1024, MAX_CONTEXT = 1 << 24, MAX_VOCAB = 1 << 24,
       MAX_THREADS = 4096, MAX_FILE = 256 << 20 };

static bool bar_shown;                                 // progress() has left a line on the terminal, not ended yet

// One line on stderr, exit 1: "<file>: <tensor, key or flag>: expected <x>, got <y>; try <fix>". Where a model file is
// at fault its kind of fault is named as in gguf.h: E_META_* keys, E_TENSOR_MISSING, E_SHAPE, E_PAYLOAD.
__attribute__((noreturn, format(printf, 1, 2))) static void die(const char *fmt, ...) {
    char line[4096];
    va_list ap;
    va_start(ap, fmt);
    fflush(stdout);
    vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    for (char *c = line; *c; c++)                      // a value or a path may hold a line break, or steer a terminal
        if ((unsigned char)*c < ' ' || *c == 0x7f) *c = '?';
    fprintf(stderr, "%sgemma4: error: %s\n", bar_shown ? "\r\033[K" : "", line);
    _exit(1);                                          // stdout is flushed; memory goes with the process
}

static void flush_output(void) {                       // dies if not all of stdout could be written
    if (fflush(stdout) || ferror(stdout)) die("standard output: %s", strerror(errno));
}

static const char *volatile unfinished;                // a file that is being written, to be removed if that fails

// SIGBUS: pages of a mapped model file are gone, because somebody made it shorter or its disk failed.
static void on_lost_pages(int signal_number) {
    static const char text[] = "\ngemma4: error: a model file got shorter, or could not be read, while it was in use\n";
    (void)signal_number;
    if (unfinished) unlink(unfinished);
    if (write(2, text + !bar_shown, sizeof text - 1 - !bar_shown) < 0) {}
    _exit(1);
}

static void *alloc_or_die(size_t n, size_t size) {                 // host memory, zeroed
    void *p = calloc(n ? n : 1, size);
    if (!p) die("out of memory: %zu bytes wanted", n * size);
    return p;
}

typedef struct { const char **text; int n; } TextList;

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }
static int min_int(int a, int b) { return a < b ? a : b; }
static int max_int(int a, int b) { return a > b ? a : b; }

// The whole file, of at most MAX_FILE bytes, or with path NULL standard input from where it stands; the caller frees it
static void *read_file(const char *path, size_t *size, const char *flag) {
    FILE *f = path ? fopen(path, "rb") : stdin;
    if (!path) path = "standard input";
    if (!f) die("%s: %s: %s", flag, path, strerror(errno));
    size_t cap = 1 << 16, n = 0;
    char *data = alloc_or_die(cap, 1);
    for (size_t got; (got = fread(data + n, 1, cap - n, f)) > 0; ) {
        n += got;
        if (n > MAX_FILE) die("%s: %s: expected at most %d MiB, got more", flag, path, MAX_FILE >> 20);
        if (n < cap) continue;
        data = realloc(data, cap *= 2);
        if (!data) die("%s: %s: out of memory at %zu bytes", flag, path, n);
    }
    if (ferror(f)) die("%s: %s: %s", flag, path, strerror(errno));
    if (f != stdin) fclose(f);                         // no file opened later may become standard input
    *size = n;
    return data;
}

// "7.9 MB", "512 tokens": n of a unit, "B" being bytes.
static const char *amount(char out[32], double n, const char *unit) {
    static const struct { double size; const char *name; } bytes[] = { { 1e9, "GB" }, { 1e6, "MB" }, { 1e3, "kB" } };
    snprintf(out, 32, "%.*f %.16s", n < 10 && strcmp(unit, "B") ? 1 : 0, n, unit);
    for (int i = 2; i >= 0 && !strcmp(unit, "B"); i--)
        if (n >= bytes[i].size || i == 2) snprintf(out, 32, "%.1f %s", n / bytes[i].size, bytes[i].name);
    return out;
}

// A line about long work that redraws itself, on a terminal only: "# what  7.9 MB  [=====>    ]  56 %  3.2 GB/s  1 s
// left". done == 0 starts it and its clock, done == total erases it. One at a time, from one thread.
static void progress(const char *what, size_t done, size_t total, const char *unit) {
    static double start, drawn;
    const double now = seconds();
    if (done == 0) start = now;
    if (!isatty(2) || (done && done < total && now - drawn < 0.1)) return;
    drawn = now;
    bar_shown = done < total;
    if (!bar_shown) {
        fprintf(stderr, "\r\033[K");
        return;
    }
    char size[32], rate[32] = "", left[32] = "", bar[11] = "          ";
    const double share = (double)done / (double)total, speed = (double)done / (now - start + 1e-9);
    memset(bar, '=', (size_t)(share * 10));
    bar[(size_t)(share * 10)] = '>';
    if (done) {
        amount(rate, speed, unit);
        snprintf(left, sizeof left, "/s  %.0f s left", ceil((double)(total - done) / speed));
    }
    fprintf(stderr, "\r# %.20s  %s  [%s]  %d %%  %s%s\033[K", what, amount(size, (double)total, unit), bar,
            (int)(share * 100), rate, left);
    fflush(stderr);
}

// Declared ahead: bodies are in [13], and of a folder in parts/convert.h.
typedef void (*Work)(const void *task, int first, int end);        // does items first .. end - 1 of a job
static void parallel(int n_items, int step, Work work, const void *task);          // by all threads
static int share(int n_items, int grain);              // a good step for it
static void start_threads(int n);                      // once; 0: one for each core
static int count_threads(void);
static double logsumexp(const float *logits, int vocab);
static void open_folder(Gguf *g, const char *path);

// ==== [2] Config: model-wide and per layer ===========================================================================
// Everything here comes from the file's metadata and is checked against a range before anything is computed from it.
// Gemma 4 layers differ from each other: sliding or global attention, their head size, whether they own a cache, and
// (E2B) their FFN width. Names are those of the GGUF keys, shortened.

typedef struct {              // one per layer: everything that is not the same for all layers
    bool is_swa;              // true: sliding window of n_swa tokens; false: all positions
    int  head_dim;            // values per head
    int  n_kv_heads;          // divides n_heads
    int  ffn_dim;             // rows of ffn_gate and ffn_up
    int  kv_layer;            // whose cache this layer reads; == own index when this layer has K and V
    int  last_reader;         // the last layer that reads this layer's cache; owners only
} LayerConfig;

typedef struct {
    int    dim;               // width of the residual stream
    int    n_layers, n_heads, vocab;
    int    n_swa;             // sliding window in tokens, the row itself included
    int    first_shared;      // layers from here on own no cache; n_layers when all do
    int    ple_dim;           // width of per-layer embeddings; 0: none
    int    n_experts, n_experts_used, expert_dim;      // 0: dense
    int    n_ctx_train;
    float  eps, logit_cap;
    double rope_base, rope_base_swa;                   // theta of global and of sliding layers
    LayerConfig layer[MAX_LAYERS];
} Config;

// A string of the file as a message may show it: its first bytes, '?' for what could steer a terminal. One at a time.
static const char *shown(GgufStr s) {
    static char text[64];
    size_t n = 0;
    for (; n < s.n && n < sizeof text - 1; n++) text[n] = s.s[n] >= 0x20 && s.s[n] < 0x7f ? s.s[n] : '?';
    text[n] = 0;
    return text;
}

static bool str_is(GgufStr s, const char *text) { return s.n == strlen(text) && !memcmp(s.s, text, s.n); }

static void die_gguf(const Gguf *g) { die("%s: %s", g->path, g->err); }

// The value of a key, or `otherwise` when the file lacks it; otherwise < min (floats: 0) means that it is required.
static int64_t key_int(Gguf *g, const char *key, int64_t min, int64_t max, int64_t otherwise) {
    int64_t v = otherwise;
    int found = gguf_get_int(g, key, min, max, &v);
    if (found < 0) die_gguf(g);
    if (!found && otherwise < min) die("%s: key '%s': missing (E_META_MISSING)", g->path, key);
    return v;
}

static double key_float(Gguf *g, const char *key, double otherwise) {
    double v = otherwise;
    int found = gguf_get_float(g, key, &v);
    if (found < 0) die_gguf(g);
    if (!found && otherwise == 0) die("%s: key '%s': missing (E_META_MISSING)", g->path, key);
    if (!(v > 0)) die("%s: key '%s': expected a positive number, got %g (E_META_RANGE)", g->path, key, v);
    return v;
}

// A value per layer, or one for all.
static void key_per_layer(Gguf *g, const char *key, int64_t min, int64_t max, int64_t *out, int n) {
    int found = gguf_get_ints(g, key, min, max, out, n);
    if (found < 0) die_gguf(g);
    if (!found) die("%s: key '%s': missing (E_META_MISSING)", g->path, key);
}

// The same, where the n values have to be one: 1 .. max.
static int key_every_layer(Gguf *g, const char *key, int64_t max, int n) {
    int64_t v[MAX_LAYERS];
    key_per_layer(g, key, 1, max, v, n);
    for (int l = 1; l < n; l++)
        if (v[l] != v[0])
            die("%s: key '%s': expected %d in every layer, got %d in layer %d (E_META_RANGE)", g->path, key, (int)v[0],
                (int)v[l], l);
    return (int)v[0];
}

// What differs from layer to layer. head_dim: of global layers, of sliding ones.
static void load_layers(Config *c, Gguf *g, const int *head_dim) {
    const int n = c->n_layers;
    int64_t swa[MAX_LAYERS], kv_heads[MAX_LAYERS], ffn[MAX_LAYERS];
    const GgufKv *pattern = gguf_find_kv(g, "gemma4.attention.sliding_window_pattern");
    if (pattern && pattern->type != GGUF_V_ARRAY)
        die("%s: key 'gemma4.attention.sliding_window_pattern': expected an array, one value per layer (E_META_TYPE)",
            g->path);
    key_per_layer(g, "gemma4.attention.sliding_window_pattern", 0, INT_MAX, swa, n);
    key_per_layer(g, "gemma4.attention.head_count_kv", 1, 1024, kv_heads, n);
    key_per_layer(g, "gemma4.feed_forward_length", 1, 1 << 20, ffn, n);

    int newest[2] = { -1, -1 };                        // last layer that owns a cache: global, sliding
    for (int l = 0; l < n; l++) {
        LayerConfig *lc = &c->layer[l];
        lc->is_swa = swa[l] != 0;
        lc->head_dim = head_dim[lc->is_swa];
        lc->n_kv_heads = (int)kv_heads[l];
        lc->ffn_dim = (int)ffn[l];
        if (l < c->first_shared) newest[lc->is_swa] = l;
        lc->kv_layer = newest[lc->is_swa];
        if (lc->kv_layer < 0)
            die("%s: key 'gemma4.attention.shared_kv_layers': layer %d shares K and V, but no layer of its kind before "
                "%d owns any (E_META_RANGE)", g->path, l, c->first_shared);
        c->layer[lc->kv_layer].last_reader = l;
        if (lc->n_kv_heads != c->layer[lc->kv_layer].n_kv_heads)
            die("%s: key 'gemma4.attention.head_count_kv': layer %d reads the cache of layer %d: expected %d, got %d "
                "(E_META_RANGE)", g->path, l, lc->kv_layer, c->layer[lc->kv_layer].n_kv_heads, lc->n_kv_heads);
        if (c->n_heads % lc->n_kv_heads)
            die("%s: key 'gemma4.attention.head_count_kv': layer %d: expected a divisor of %d heads, got %d "
                "(E_META_RANGE)", g->path, l, c->n_heads, lc->n_kv_heads);
    }
}

static void load_config(Config *c, Gguf *g) {
    GgufStr arch = { "", 0 };
    if (gguf_get_str(g, "general.architecture", &arch) < 0) die_gguf(g);
    if (!str_is(arch, "gemma4"))
        die("%s: key 'general.architecture': expected 'gemma4', got '%s'; drafters and other models cannot be run by "
            "themselves (E_META_RANGE)", g->path, shown(arch));

    memset(c, 0, sizeof *c);
    c->n_layers    = (int)key_int(g, "gemma4.block_count", 1, MAX_LAYERS, 0);
    c->dim         = (int)key_int(g, "gemma4.embedding_length", 1, 1 << 20, 0);
    c->n_ctx_train = (int)key_int(g, "gemma4.context_length", 1, MAX_CONTEXT, 0);
    c->n_swa       = (int)key_int(g, "gemma4.attention.sliding_window", 1, MAX_CONTEXT, 0);
    c->ple_dim     = (int)key_int(g, "gemma4.embedding_length_per_layer_input", 0, 1 << 16, 0);
    c->n_experts   = (int)key_int(g, "gemma4.expert_count", 0, MAX_EXPERTS, 0);
    c->eps         = (float)key_float(g, "gemma4.attention.layer_norm_rms_epsilon", 0);
    c->logit_cap   = (float)key_float(g, "gemma4.final_logit_softcapping", 30);
    c->rope_base     = key_float(g, "gemma4.rope.freq_base", 1e4);
    c->rope_base_swa = key_float(g, "gemma4.rope.freq_base_swa", 1e4);
    if (!(c->rope_base > 1) || !(c->rope_base_swa > 1))
        die("%s: key 'gemma4.rope.freq_base': expected more than 1, got %g and %g for sliding layers (E_META_RANGE)",
            g->path, c->rope_base, c->rope_base_swa);

    const int n = c->n_layers;
    c->n_heads = key_every_layer(g, "gemma4.attention.head_count", 1024, n);
    if (c->n_experts) {
        c->n_experts_used = (int)key_int(g, "gemma4.expert_used_count", 1, c->n_experts, 0);
        c->expert_dim = key_every_layer(g, "gemma4.expert_feed_forward_length", 1 << 20, n);
    }
    const int n_shared = (int)key_int(g, "gemma4.attention.shared_kv_layers", 0, n - 1, 0);
    c->first_shared = n - n_shared;

    // Head sizes: global layers, sliding layers. K and V agree in both.
    const char *head_keys[2][3] = {
        { "gemma4.attention.key_length", "gemma4.attention.value_length", "gemma4.rope.dimension_count" },
        { "gemma4.attention.key_length_swa", "gemma4.attention.value_length_swa", "gemma4.rope.dimension_count_swa" } };
    int head_dim[2];
    for (int t = 0; t < 2; t++) {
        head_dim[t] = (int)key_int(g, head_keys[t][0], 32, MAX_HEAD_DIM, 0);
        if (head_dim[t] % 32)
            die("%s: key '%s': expected a multiple of 32, got %d (E_META_RANGE)", g->path, head_keys[t][0],
                head_dim[t]);
        for (int i = 1; i < 3; i++)
            if (key_int(g, head_keys[t][i], 1, INT_MAX, head_dim[t]) != head_dim[t])
                die("%s: key '%s': expected %d as in '%s' (E_META_RANGE)", g->path, head_keys[t][i], head_dim[t],
                    head_keys[t][0]);
    }
    load_layers(c, g, head_dim);
}

// ==== [3] Weights: names, shapes, binding ============================================================================
// Weights point into the mapped file. Every tensor that the model needs is looked up by its GGUF name, with the shape
// that the config implies; all layers are checked before the first byte is used. A backend that keeps weights in its
// own memory gets them one by one through upload(), once; until then and on the CPU they are read where they lie.

typedef struct {                        // shapes are (rows, cols); vectors are f32
    const float *attn_norm;             // (dim)
    Tensor attn_q;                      // (n_heads * head_dim, dim)
    Tensor attn_k, attn_v;              // (n_kv_heads * head_dim, dim); data NULL: attn_k in layers that share K and V,
                                        // attn_v there and in layers whose V is the K projection
    const float *attn_q_norm;           // (head_dim)
    const float *attn_k_norm;           // (head_dim) NULL in layers that share K and V
    Tensor attn_output;                 // (dim, n_heads * head_dim)
    const float *post_attention_norm;   // (dim)
    const float *ffn_norm;              // (dim)
    Tensor ffn_gate, ffn_up;            // (ffn_dim, dim)
    Tensor ffn_down;                    // (dim, ffn_dim)
    const float *post_ffw_norm;         // (dim)
    float layer_output_scale;           // 1 when the file has none
    // MoE (26B-A4B), beside the dense FFN
    Tensor ffn_gate_inp;                // (n_experts, dim) router
    const float *router_norm;           // (dim) ffn_gate_inp.scale / sqrt(dim): a norm weight
    Tensor ffn_gate_exps, ffn_up_exps;  // (expert_dim, dim) x n_experts; fused in the file: ffn_gate_exps is
                                        // (2 * expert_dim, dim), gate rows first, and ffn_up_exps.data NULL
    Tensor ffn_down_exps;               // (dim, expert_dim) x n_experts
    const float *ffn_down_exps_scale;   // (n_experts) or NULL
    const float *pre_ffw_norm_2, *post_ffw_norm_1, *post_ffw_norm_2;   // (dim)
    // per-layer embeddings (E2B, E4B)
    Tensor inp_gate;                    // (ple_dim, dim)
    Tensor proj;                        // (dim, ple_dim)
    const float *post_norm;             // (dim)
} LayerWeights;

typedef struct {
    Tensor token_embd;                  // (vocab, dim)
    Tensor output;                      // (vocab, dim) LM head; data NULL: token_embd serves as such
    const float *output_norm;           // (dim)
    Tensor per_layer_token_embd;        // (vocab, n_layers * ple_dim)
    Tensor per_layer_model_proj;        // (n_layers * ple_dim, dim)
    const float *per_layer_proj_norm;   // (ple_dim)
    double inv_freq[2][MAX_HEAD_DIM / 2];   // (n_pairs) radians per position: global, sliding layers; on the host
    int n_pairs[2];                     // pairs that turn
    LayerWeights *layer;                // (n_layers)
} Weights;

typedef struct {                        // one thing that upload() may move: a matrix, or a vector and who points to it
    Tensor tensor;
    Tensor *matrix;
    const float **vector;
    void   *room;                       // where a drafter's goes in backend memory, NULL: it is read where it lies
} Upload;

typedef struct {
    Gguf    *g;
    char    *seen;                      // (g->n_tensors) UNSEEN, KNOWN or BOUND
    Upload  *uploads;                   // room for every tensor of the file and a few that are derived
    float   *derived;                   // (n_layers, dim + 2 * n_experts) vectors that are computed while binding
    size_t   n_derived;                 // floats of it in use
    int      n_uploads;
    size_t   bytes;                     // of what is bound, in the file
} Binder;

enum { UNSEEN, KNOWN, BOUND };          // a tensor that is KNOWN has a name of this architecture, but nothing reads it

static bool is_quantised(DType t) { return t != T_F32 && t != T_F16 && t != T_BF16; }

static size_t matrix_bytes(const Tensor *t) { return gguf_row_size(t->type, t->cols) * (size_t)t->rows * t->n; }

static const GgufTensor *find_tensor(Binder *b, const char *name) {
    const GgufTensor *t = gguf_find_tensor(b->g, name);
    if (t && b->seen[t - b->g->tensors] == UNSEEN) b->seen[t - b->g->tensors] = KNOWN;
    return t;
}

// Bind tensor `name` as n matrices (rows, cols), or stop. GGUF stores ne[0] = cols, ne[1] = rows, ne[2] = n.
static Tensor bind_tensor(Binder *b, const char *name, int rows, int cols, int n) {
    const GgufTensor *t = find_tensor(b, name);
    if (!t)
        die("%s: tensor '%s': missing, expected shape (%d, %d, %d) (E_TENSOR_MISSING)", b->g->path, name, cols, rows,
            n);
    if (t->ne[0] != (uint64_t)cols || t->ne[1] != (uint64_t)rows || t->ne[2] != (uint64_t)n || t->ne[3] != 1)
        die("%s: tensor '%s': expected shape (%d, %d, %d), got (%" PRIu64 ", %" PRIu64 ", %" PRIu64 ") (E_SHAPE)",
            b->g->path, name, cols, rows, n, t->ne[0], t->ne[1], t->ne[2]);
    if (!gguf_type_supported(t->type))
        die("%s: tensor '%s': type %s is not supported by this build (E_TYPE_UNSUPPORTED)", b->g->path, name,
            gguf_type_name(t->type));
    b->bytes += t->size;
    b->seen[t - b->g->tensors] = BOUND;
    return (Tensor){ .data = t->data, .type = (DType)t->type, .rows = rows, .cols = cols, .n = n };
}

static void bind_matrix(Binder *b, Tensor *dst, const char *name, int rows, int cols, int n) {
    *dst = bind_tensor(b, name, rows, cols, n);
    b->uploads[b->n_uploads++] = (Upload){ .tensor = *dst, .matrix = dst };
}

static void add_vector(Binder *b, const float **dst, const float *values, int n) {
    *dst = values;
    const Tensor t = { .data = values, .type = T_F32, .rows = 1, .cols = n, .n = 1 };
    b->uploads[b->n_uploads++] = (Upload){ .tensor = t, .vector = dst };
}

// The n values of a vector that stays on the host.
static const float *host_vector(Binder *b, const char *name, int n) {
    const Tensor t = bind_tensor(b, name, 1, n, 1);
    if (t.type != T_F32)
        die("%s: tensor '%s': expected type F32, got %s (E_TYPE_UNSUPPORTED)", b->g->path, name,
            gguf_type_name(t.type));
    return t.data;
}

static void bind_vector(Binder *b, const float **dst, const char *name, int n) {
    add_vector(b, dst, host_vector(b, name, n), n);
}

// The factors that files with NVFP4 matrices hold beside them, STEM.scale for STEM.weight: one for all n, or one each.
// To be called after the upload of dst is noted. Not for ffn_gate_inp and ffn_down_exps, whose .scale is another thing.
static void bind_scale(Binder *b, Tensor *dst, const char *weight, int n) {
    char name[80];
    snprintf(name, sizeof name, "%.*s.scale", (int)(strlen(weight) - strlen(".weight")), weight);
    const GgufTensor *t = find_tensor(b, name);
    if (!t) return;
    if (t->ne[0] != 1 || n == 1) {
        bind_vector(b, &dst->scale, name, n);
        return;
    }
    const float *one = host_vector(b, name, 1);
    float *each = b->derived + b->n_derived;
    for (int i = 0; i < n; i++) each[i] = *one;
    b->n_derived += (size_t)n;
    add_vector(b, &dst->scale, each, n);
}

static void bind_scaled(Binder *b, Tensor *dst, const char *name, int rows, int cols, int n) {
    bind_matrix(b, dst, name, rows, cols, n);
    bind_scale(b, dst, name, n);
}

// A table that rows are taken from. A factor of it would have to be applied there: no file is known that has one.
static void bind_table(Binder *b, Tensor *dst, const char *name, int rows, int cols) {
    bind_scaled(b, dst, name, rows, cols, 1);
    if (dst->scale)
        die("%s: tensor '%s': a table with a factor, its .scale, is not supported (E_TYPE_UNSUPPORTED)",
            b->g->path, name);
}

// Radians per position of every pair that turns: base^(-2i/head_dim) / factor[i]. Published files give global layers
// factors of 1 for the first quarter and 1e30, which stops a pair, for the rest.
static void bind_rope(Binder *b, Weights *w, int t, double base, int head_dim, const float *factor) {
    for (int i = 0; i < head_dim / 2; i++) {
        const double divisor = factor ? factor[i] : 1;
        if (!(divisor > 0))
            die("%s: tensor 'rope_freqs.weight': expected positive factors, got %g (E_PAYLOAD)", b->g->path, divisor);
        w->inv_freq[t][i] = pow(base, -2.0 * i / head_dim) / divisor;
        if (divisor < 1e20 || i == 0) w->n_pairs[t] = i + 1;         // at least one: 0 would mean an untied cache
    }
}

#define NAME(stem) (snprintf(name, sizeof name, "blk.%d." stem, l), name)         // char name[80], layer l

// The experts of a layer, and their router.
static void bind_experts(Binder *b, const Config *c, LayerWeights *w, int l) {
    const int dim = c->dim;
    char name[80];
    bind_matrix(b, &w->ffn_gate_inp, NAME("ffn_gate_inp.weight"), c->n_experts, dim, 1);
    const float *scale = host_vector(b, NAME("ffn_gate_inp.scale"), dim);
    float *norm = b->derived + b->n_derived;
    b->n_derived += (size_t)dim;
    for (int i = 0; i < dim; i++) norm[i] = scale[i] / sqrtf((float)dim);
    add_vector(b, &w->router_norm, norm, dim);
    if (find_tensor(b, NAME("ffn_gate_up_exps.weight"))) {
        bind_scaled(b, &w->ffn_gate_exps, name, 2 * c->expert_dim, dim, c->n_experts);
    } else {
        bind_scaled(b, &w->ffn_gate_exps, NAME("ffn_gate_exps.weight"), c->expert_dim, dim, c->n_experts);
        bind_scaled(b, &w->ffn_up_exps, NAME("ffn_up_exps.weight"), c->expert_dim, dim, c->n_experts);
    }
    bind_matrix(b, &w->ffn_down_exps, NAME("ffn_down_exps.weight"), dim, c->expert_dim, c->n_experts);
    if (find_tensor(b, NAME("ffn_down_exps.scale"))) bind_vector(b, &w->ffn_down_exps_scale, name, c->n_experts);
    bind_vector(b, &w->pre_ffw_norm_2, NAME("pre_ffw_norm_2.weight"), dim);
    bind_vector(b, &w->post_ffw_norm_1, NAME("post_ffw_norm_1.weight"), dim);
    bind_vector(b, &w->post_ffw_norm_2, NAME("post_ffw_norm_2.weight"), dim);
}

static void bind_layer(Binder *b, const Config *c, LayerWeights *w, int l) {
    const LayerConfig *lc = &c->layer[l];
    const bool own = lc->kv_layer == l;
    const int q_dim = c->n_heads * lc->head_dim, kv_dim = lc->n_kv_heads * lc->head_dim, dim = c->dim;
    char name[80];
    bind_vector(b, &w->attn_norm, NAME("attn_norm.weight"), dim);
    const GgufTensor *fused = find_tensor(b, NAME("attn_qkv.weight"));
    if (fused) {                                       // rows of q, k, v; k and v are dead in layers that share
        const uint64_t n_kv = (fused->ne[1] - (uint64_t)q_dim) / (uint64_t)kv_dim;
        const bool complete = n_kv == 2 || (n_kv == 1 && !(own && lc->is_swa)) || (n_kv == 0 && !own);
        const Tensor qkv = bind_tensor(b, name, q_dim + (complete ? (int)n_kv : 2) * kv_dim, dim, 1);
        Tensor *parts[3] = { &w->attn_q, &w->attn_k, &w->attn_v };
        const uint8_t *at = qkv.data;
        for (int i = 0; i <= (own ? (int)n_kv : 0); i++) {
            *parts[i] = (Tensor){ .data = at, .type = qkv.type, .rows = i ? kv_dim : q_dim, .cols = dim, .n = 1 };
            b->uploads[b->n_uploads++] = (Upload){ .tensor = *parts[i], .matrix = parts[i] };
            bind_scale(b, parts[i], name, 1);
            at += matrix_bytes(parts[i]);
        }
    } else {
        bind_scaled(b, &w->attn_q, NAME("attn_q.weight"), q_dim, dim, 1);
        if (own) {
            bind_scaled(b, &w->attn_k, NAME("attn_k.weight"), kv_dim, dim, 1);
            if (find_tensor(b, NAME("attn_v.weight")))
                bind_scaled(b, &w->attn_v, name, kv_dim, dim, 1);
            else if (lc->is_swa)
                die("%s: tensor '%s': missing; only global layers take V from the K projection (E_TENSOR_MISSING)",
                    b->g->path, name);
        } else {                                       // published files keep these; nothing reads them
            find_tensor(b, NAME("attn_k.weight"));
            find_tensor(b, NAME("attn_v.weight"));
        }
    }
    bind_vector(b, &w->attn_q_norm, NAME("attn_q_norm.weight"), lc->head_dim);
    if (own) bind_vector(b, &w->attn_k_norm, NAME("attn_k_norm.weight"), lc->head_dim);
    else find_tensor(b, NAME("attn_k_norm.weight"));
    bind_scaled(b, &w->attn_output, NAME("attn_output.weight"), dim, q_dim, 1);
    bind_vector(b, &w->post_attention_norm, NAME("post_attention_norm.weight"), dim);
    bind_vector(b, &w->ffn_norm, NAME("ffn_norm.weight"), dim);
    bind_scaled(b, &w->ffn_gate, NAME("ffn_gate.weight"), lc->ffn_dim, dim, 1);
    bind_scaled(b, &w->ffn_up, NAME("ffn_up.weight"), lc->ffn_dim, dim, 1);
    bind_scaled(b, &w->ffn_down, NAME("ffn_down.weight"), dim, lc->ffn_dim, 1);
    bind_vector(b, &w->post_ffw_norm, NAME("post_ffw_norm.weight"), dim);
    w->layer_output_scale = find_tensor(b, NAME("layer_output_scale.weight")) ? *host_vector(b, name, 1) : 1;
    if (c->n_experts) bind_experts(b, c, w, l);
    if (c->ple_dim) {
        bind_scaled(b, &w->inp_gate, NAME("inp_gate.weight"), c->ple_dim, dim, 1);
        bind_scaled(b, &w->proj, NAME("proj.weight"), dim, c->ple_dim, 1);
        bind_vector(b, &w->post_norm, NAME("post_norm.weight"), dim);
    }
}

// Steps that score tokens take the first third of the layers, to the next one that is global; where layers share
// caches, those up to the last global one that owns one.
static int layers_scored(const Config *c) {
    int n = c->first_shared;
    while (n > 1 && c->layer[n - 1].is_swa) n--;
    if (c->first_shared < c->n_layers) return n;
    for (int l = (c->n_layers - 1) / 3; l < n; l++) if (!c->layer[l].is_swa) n = l + 1;
    return n;
}

// Bind everything; sets c->vocab. Layers that only_scores never runs are checked, but not loaded.
static void bind_weights(Binder *b, Config *c, Weights *w, bool only_scores) {
    w->layer = alloc_or_die(c->n_layers, sizeof *w->layer);
    const GgufTensor *embd = gguf_find_tensor(b->g, "token_embd.weight");
    if (!embd) die("%s: tensor 'token_embd.weight': missing (E_TENSOR_MISSING)", b->g->path);
    if (embd->ne[1] > MAX_VOCAB)
        die("%s: tensor 'token_embd.weight': expected at most %d rows, got %" PRIu64 " (E_SHAPE)", b->g->path,
            MAX_VOCAB, embd->ne[1]);
    c->vocab = (int)embd->ne[1];
    bind_table(b, &w->token_embd, "token_embd.weight", c->vocab, c->dim);
    if (find_tensor(b, "output.weight")) bind_scaled(b, &w->output, "output.weight", c->vocab, c->dim, 1);
    bind_vector(b, &w->output_norm, "output_norm.weight", c->dim);

    bool has[2] = { false, false };
    int head_dim[2] = { 0, 0 };
    for (int l = 0; l < c->n_layers; l++) {
        has[c->layer[l].is_swa] = true;
        head_dim[c->layer[l].is_swa] = c->layer[l].head_dim;
    }
    if (has[0]) bind_rope(b, w, 0, c->rope_base, head_dim[0], host_vector(b, "rope_freqs.weight", head_dim[0] / 2));
    else find_tensor(b, "rope_freqs.weight");
    if (has[1]) bind_rope(b, w, 1, c->rope_base_swa, head_dim[1], NULL);
    if (c->ple_dim) {
        const int all = c->n_layers * c->ple_dim;
        bind_table(b, &w->per_layer_token_embd, "per_layer_token_embd.weight", c->vocab, all);
        bind_scaled(b, &w->per_layer_model_proj, "per_layer_model_proj.weight", all, c->dim, 1);
        bind_vector(b, &w->per_layer_proj_norm, "per_layer_proj_norm.weight", c->ple_dim);
    }
    const int n_loaded = only_scores ? layers_scored(c) : c->n_layers;
    for (int l = 0; l < n_loaded; l++) bind_layer(b, c, &w->layer[l], l);
    const int n_uploads = b->n_uploads;
    const size_t bytes = b->bytes;
    for (int l = n_loaded; l < c->n_layers; l++) {
        bind_layer(b, c, &w->layer[l], l);
        b->n_uploads = n_uploads, b->bytes = bytes;
    }
}

static bool starts_with_one_of(GgufStr s, const char *const *starts) {                // NULL ends the list
    for (; *starts; starts++)
        if (s.n >= strlen(*starts) && !memcmp(s.s, *starts, strlen(*starts))) return true;
    return false;
}

// Says on stderr how many tensors and keys this program knows nothing about, and the first few names. Other modalities
// (vision, audio), unused K and V of layers that share them and scales of inputs are known and not worth a line.
static void print_unknown(const Binder *b) {
    static const char *const tensors[] = { "v.", "a.", "mm.", NULL };
    static const char *const keys[] = { "gemma4.", "gemma4-assistant.", "gemma4_assistant.", "gemma4-dflash-draft.",
                                        "dflash.", "dflash-draft.", "general.", "tokenizer.", "split.", "quantize.",
                                        NULL };
    static const char input_scale[] = ".input_scale";
    for (int kind = 0; kind < 2; kind++) {
        const size_t n_all = kind ? b->g->n_kvs : b->g->n_tensors, n_end = strlen(input_scale);
        size_t n = 0;
        char names[3 * 66 + 8] = "";
        for (size_t i = 0; i < n_all; i++) {
            const GgufStr s = kind ? b->g->kvs[i].key : b->g->tensors[i].name;
            if (!kind && (b->seen[i] != UNSEEN ||
                          (s.n >= n_end && !memcmp(s.s + s.n - n_end, input_scale, n_end)))) continue;
            if (starts_with_one_of(s, kind ? keys : tensors)) continue;
            const size_t at = strlen(names);
            if (n < 3) snprintf(names + at, sizeof names - at, "%s%.*s", n ? ", " : "", s.n < 64 ? (int)s.n : 64, s.s);
            if (n == 3) strcat(names, ", ...");
            n++;
        }
        if (n)
            fprintf(stderr, "# %zu %s%s not used: %s\n", n, kind ? "key" : "tensor", n == 1 ? " is" : "s are", names);
    }
}

// ==== [4] Sessions and KV cache ======================================================================================
// A model serves n_seqs sessions; each owns a slice of every layer's cache and a length. Sliding layers are rings,
// global layers hold the whole context; where V is the K projection the two are stored once ("tied", gemma4.h). How
// much memory all of it takes is planned in [7].

static const char *const kv_names[] = { "f32", "f16", "bf16", "q8_0", "q4_0", "tq4", "tq3" };       // of KvType

typedef struct {
    int    n_ctx;             // tokens a session can hold; 0: as many as it was trained for, 8192 at most; CTX_FIT
    int    n_seqs;            // sessions
    int    n_batch;           // most rows of a step, >= STEP_ROWS; BATCH_FIT
    int    n_logits;          // most rows of a step that want logits
    KvType k_type, v_type;    // of global layers
    KvType ring_type;         // of sliding layers; KV_F32: f16, unless k_type is f32
    int    tail;              // newest rows that quantised global layers keep in f16 too; 0: none
    bool   untied;            // keep K and V apart also where they come from one projection
    bool   penalties, bias;   // sampling counts tokens; adds a bias to logits
    float  pflash;            // alpha of block_select in prompts of at least pflash_from tokens in all; 0: dense
    float  pflash_density;    // for measurements: the part of the blocks that stays, instead; 0: alpha decides
    int    pflash_from;
    bool   between;           // small steps may run between two layers of a prompt's, which wants one row of logits at most
    bool   scores;            // it may score tokens, for prompt compression
    bool   only_scores;       // and does nothing else: what it runs then is all that is loaded
    Limits beside;            // of a model that shares the backend
    const char *drafter;      // file of a drafter; NULL: none
    bool   lazy_draft;        // its weights have room, but are uploaded when it drafts first
    int    draft_width;       // candidates for each token that it drafts; 1: chains
    int    draft_depth;       // most tokens that it drafts at once
    size_t memory;            // bytes that the backend is taken to have; 0: what it has
    size_t host_memory;       // bytes that the caller will take of the host's, which may be the backend's as well
    const char *ctx_from;     // what n_ctx follows from, for advice: "-p, -n or -d"; "": no flag; NULL: -c
} PlanOptions;

enum { CTX_FIT = -1 };        // n_ctx: as many tokens as memory has room for, up to those the model was trained for
// n_batch: where the backend keeps weights itself it may bring them into another form for each large step, so steps are
// as large as a 16th part of the memory has room for, up to LARGE_BATCH and down to SMALL_BATCH
enum { BATCH_FIT = 0, SMALL_BATCH = 512, LARGE_BATCH = 4096 };

typedef struct {              // bytes
    size_t weights;           // that the backend keeps itself; 0: read in the mapped file
    size_t in_host;           // of host memory for the per-layer table, which the backend has no room for
    size_t kv_global, kv_rings, stage, activations, scratch;
    size_t drafter;           // its weights, as far as the backend keeps them itself, and what it works on
} Plan;

enum { MAX_SESSIONS = 64 };   // of a model, and so of a step

typedef struct {              // what forward works on; all in backend memory
    Row     *rows, *kept_rows;         // (n_batch), (n_logits): the rows of a step, and of those whose output is wanted
    Segment *segs;                     // (n_seqs)
    int32_t *len;                      // (n_seqs)
    int32_t *kept_index;               // (n_logits) kept row -> row
    int32_t *n_accept, *path;          // (n_seqs), (n_seqs, STEP_ROWS)
    int32_t *walked;                   // (n_seqs) rows of each segment that the last walk has accepted
    int32_t *last;                     // (n_seqs) by segment: kept row where its walk ended
    int32_t *next;                     // (n_seqs) and the token chosen there; behind these, ids that a drafter finds
    float   *found_logits, *found_logsumexp;           // and what belongs to them: Drafter.logits, .logsumexp
    int32_t *feed;                     // (STEP_ROWS) where in next a row's token is, in a step that is fed
    float   *x[2];                     // (n_batch, dim) the residual stream, and its next state
    float   *q;                        // (n_batch, n_heads * head_dim)
    float   *k, *v;                    // (n_batch, n_kv_heads * head_dim)
    Act      att_out;                  // (n_batch, n_heads * head_dim)
    float   *y;                        // (n_batch, dim) what attention, or the per-layer embedding, adds to x
    Act      ffn;                      // (n_batch, ffn_dim)
    float   *mlp, *moe;                // (n_batch, dim) what the FFN and the experts add
    Act      expert;                   // (n_batch, n_experts_used, expert_dim)
    float   *router, *expert_weights;  // (n_batch, n_experts), (n_batch, n_experts_used)
    int32_t *expert_ids;               // (n_batch, n_experts_used)
    float   *ple, *ple_kept;           // (n_batch, n_layers, ple_dim), (n_logits, n_layers, ple_dim)
    Act      ple_gate;                 // (n_batch, ple_dim)
    float   *logits, *hidden;          // (n_logits, vocab), (n_logits, dim)
    float   *tapped;                   // (n_batch, n_taps * dim) what a DFlash drafter reads of the last step, or NULL
    uint32_t *mask;                    // (n_logits, vocab / 32) tokens that may be sampled
    int32_t *chosen;                   // (n_logits)
    SampleParams *params;              // (n_seqs)
    int32_t *counts;                   // (n_seqs, vocab) how often a token was committed; NULL without penalties
    float   *bias;                     // (n_seqs, vocab) 0 until set; NULL without biases
    BlockList blocks;                  // what prompts attend to in a global layer; all of these NULL: everything
    void    *block_means;              // (n_seqs, n_kv_heads, n_blocks, head_dim) floats of room
    float   *block_scores, *block_weights;     // (n_batch / SELECT_ROWS, n_heads or n_kv_heads, n_blocks)
    int64_t *block_count;              // (2) blocks attended to, blocks in sight
    float   *shares, *mass;            // (LOOK_ROWS, n_heads, n_keys), (LOOK_ROWS, n_keys) of AttnMass, or NULL
    int      n_keys;                   // the largest number of slots
    double  *inv_freq[2];              // (n_pairs) radians per position: global, sliding layers
    float   *dump[5];                  // (n_batch, widest) when dumping
} State;

enum { LOOK_ROWS = 32 };      // last tokens of a prompt, whose attention is what a token scores

enum { FED = -1 };            // StepRow.token of a row: what is known on the device only. In segments of one row it was
                              // sampled last, for this row of the logits; in longer ones it was chosen last and drafted
                              // behind it

typedef struct StepRow {      // one row as the caller of step() describes it
    int32_t token;            // or FED, all of a step or none
    int32_t parent;           // TREE: number within the segment of the row it follows; -1: the last committed token
    bool    want;             // its logits are wanted
} StepRow;

typedef struct {              // a named intermediate result
    char   name[24];
    int    layer;             // -1: outside the layers
    int    n_rows, cols;
    float *data;              // (n_rows, cols) on the host
} Checkpoint;

typedef enum { DRAFTER_NONE, DRAFTER_MTP, DRAFTER_DFLASH } DrafterKind;
enum { LAYERS_AT_ONCE = MAX_PRODUCTS / 2 };            // of DFlash, whose K and V of a context are products of one launch

typedef struct {              // a second, small model that guesses what the first one, its target, will say
    DrafterKind kind;
    Gguf     gguf;
    Binder   binder;
    Config   config;          // MTP: its layers own no cache, kv_layer is -1
    Weights  weights;
    char     arch[64];        // general.architecture, which its keys begin with
    bool     uploaded;
    int      window;                   // of its sliding layers; a row at position p reads rows p - window < j < p
    // an MTP assistant
    int      donor[MAX_LAYERS];        // (n_layers) the target's layer whose cache a layer reads
    Tensor   pre_projection;           // (dim, 2 * target's dim)
    Tensor   post_projection;          // (target's dim, dim)
    Tensor   centroids;                // (n_centroids, dim); data NULL: every token gets a logit
    int      n_centroids_used;
    int32_t *order;                    // (vocab) tokens by centroid; on the host
    // a DFlash block drafter
    int      n_taps, taps[MAX_LAYERS]; // the target's layers whose outputs it reads, one beside the other
    int      n_tapped;                 // the target's layers up to the last of them
    int      block_size, mask_id;      // most rows of a block; the token that stands for one to guess
    float    embedding_scale, attention_scale;
    OwnMask  own[2];                   // how rows of a block see each other: in full layers, in sliding ones
    Tensor   fc;                       // (dim, n_taps * dim)
    const float *hidden_norm;          // (dim)
    int      start[MAX_SESSIONS];      // token of the session that its context begins with, at its position 0
    int      waiting[MAX_SESSIONS];    // the last tokens of the session whose taps are in the backlog. Those between
                                       // are in its caches
    int      seen[MAX_SESSIONS];       // how far rows were ever written, counted like tokens of the session, but for
    int      drafted[MAX_SESSIONS];    // the rows of a block behind the last token
    // what it works on, in backend memory; n is n_seqs, DFlash: n_seqs * (1 + draft_depth), in activations at most
    // STEP_ROWS
    Row     *rows;                     // (n) MTP: row i drafts for segment i of segs
    Segment *segs;                     // (n_seqs)
    int32_t *of;                       // (n_seqs) whose segment of the target's step that is
    int32_t *token_order;              // (vocab)
    Act      pair;                     // (n_seqs, 2 * target's dim) embedding and hidden row
    float   *x[2];                     // (n, dim)
    float   *q;                        // (n, n_heads * head_dim)
    Act      att_out, ffn;             // (n, n_heads * head_dim), (n, ffn_dim)
    float   *y, *mlp;                  // (n, dim) what attention and the FFN add
    float   *hidden;                   // (n_seqs, target's dim) the next hidden row; DFlash: (depth, n_seqs, dim) of the head
    float   *scores, *head_logits;     // (n_seqs, n_centroids), (n_seqs, tokens of the used ones)
    // what comes of it; with n rows and the options' draft_width:
    int32_t *ids;                      // (depth, n, draft_width) descending logit
    float   *logits, *logsumexp;       // (depth, n, draft_width), (depth, n)
    // DFlash: the context
    Cache    caches[MAX_LAYERS];       // (n_layers) rings
    int32_t *len;                      // (n_seqs) its tokens that are in the caches
    double  *inv_freq;                 // (head_dim / 2)
    float   *backlog;                  // (n_seqs, STEP_ROWS, n_taps * dim)
    Row     *backlog_rows;             // (STEP_ROWS)
    Segment *backlog_seg;              // (1) the session whose backlog is taken in,
    int32_t *backlog_n;                // (1) and how many rows of it
    float   *context;                  // (n_batch, dim)
    float   *k[LAYERS_AT_ONCE], *v[LAYERS_AT_ONCE];    // (n_batch, n_kv_heads * head_dim)
    struct { Row *rows; Segment *segs; int32_t *of; } sent;          // as in Model
} Drafter;

typedef struct {              // seconds by a number, of rows or guesses
    double of[STEP_ROWS + 1]; // 0: not measured yet
    int    n[STEP_ROWS + 1];  // how often it was measured
} Times;
typedef struct {              // how long a step of one session takes, by its rows; a draft, by its tokens
    Times  step, draft;
    double draft_share;       // bytes that a draft of one token reads, as a part of a step's
    bool   records;           // the backend records steps: the first of a kind is slow
} Pace;

typedef struct {              // what came of a step, on the host
    size_t   bytes;           // of all but path, which lie in one piece, from `accepted` on
    int32_t *accepted;        // (n_seqs) rows of each segment that were committed
    int32_t *chosen;          // (n_logits) at every row of logits
    int32_t *path;            // (n_seqs, STEP_ROWS) which, of a TREE
    int32_t *ids;             // what was drafted behind it: (depth, n, draft_width) ids, logits; (depth, n) logsumexp
    float   *logits, *logsumexp;
    int      n_segs, seq[MAX_SESSIONS];                // whose segments these are
    int      mark, end_mark;  // behind the commit; behind all of it
    double   verified, drafted;        // seconds() when they were there
} Verdict;

enum { LAYERS_AHEAD = 2 };    // see go_on()

typedef struct {              // what one pass through the layers carries along
    Batch all, batch;         // all rows of the step; those still under way
    In    stream;             // the residual stream, and what its next reader has to add to it
    const float *ple;         // (n_rows, n_layers, ple_dim)
    int   layer;              // that comes next
    double worked;            // multiplications that a prompt's step took since it was begun or resumed
    bool  staged;             // a prompt step: rows of sliding layers wait in m->stage until their last reader is done
    int   waiting;            // layer whose rows are in the stage; -1: none
    int   marks[LAYERS_AHEAD + 1];     // where the last layers began
} Pass;

typedef struct {              // the step under way, or the last one, on the host
    Row     *rows, *kept_rows;         // (n_rows), (n_kept) as in State
    Segment *segs;                     // (n_segs)
    int32_t *kept_index;               // (n_kept)
    struct {                           // what of these the backend was sent last, and is not sent again; operations write none
        Row     *rows, *kept_rows;     // of it but the token of a row that is FED
        Segment *segs;
        int32_t *kept_index;
    } sent;
    int      n_rows, n_segs, n_kept;
    bool     ahead;                    // it was FED: it runs before anybody knows whether it is wanted
    int64_t  number;                   // of it among all steps
    StepKey  key;
    Pass     pass;
} StepRun;

typedef struct {
    Gguf         gguf;
    Config       config;
    Weights      weights;
    Binder       binder;
    Drafter      drafter;
    Verdict      verdict;
    Pace         pace;
    const Ops   *ops;
    PlanOptions  options;
    Plan         plan;
    double       upload_seconds;
    void        *arena;
    State        s;
    Cache        caches[MAX_LAYERS];   // (n_owners) of the layers that own one, in order
    int          cache_of[MAX_LAYERS]; // layer -> index into caches, the donor's for layers that share
    int          n_caches;
    int          number;               // of StepKey.model: recorded steps are a model's own. A drafter has the next
    Cache        stage;                // rows of a prompt step on sliding layers, until their ring takes them
    // host side
    int         *len;                  // (n_seqs) mirror of s.len
    int         *seen;                 // (n_seqs) how far rows were ever written: rings have lost what is far behind it
    StepRun      step;
    struct { State s; StepRun step; } other;           // of the other kind of steps: see choose_kind()
    bool         on_prompts;           // s and step are those of prompts' steps
    int          between;              // session whose prompt's step is between two layers; -1: there is none
    struct { int32_t *n_accept, *feed; } sent;         // as in StepRun
    StepRow     *chunk;                // (n_batch) room for a caller of step() to write rows to
    int          scoring;              // 0, or the variant of steps that score tokens: SCORING, LOOKING
    int          n_scored;             // the first layers, which such steps run; the last one's own cache sees all
    const volatile sig_atomic_t *stop; // a prompt step is given up between two layers when this is set; NULL: it is not
    const char  *dump_dir;             // checkpoints go to files here; "": into memory; NULL: there are none
    Checkpoint  *checkpoints;          // (n_checkpoints) of the steps so far, in memory
    int          n_checkpoints;
    int64_t      steps;                // done so far
    uint32_t    *sampled, *fitting;    // (vocab / 32) tokens that the file lets be sampled; room for those that fit a row
    int          n_suppressed;         // the others
    uint64_t     masked;               // rows of s.mask that hold less than `sampled`
    uint64_t     hash[3];              // of the file, once somebody asked: parts/session.h
} Model;

// Not zeroed; in large pages, which come faster, where the system has some.
static void *alloc_large(size_t bytes) {
    enum { LARGE_PAGE = 2 << 20 };
    bytes = round_up(bytes + !bytes, LARGE_PAGE);
    void *p = aligned_alloc(LARGE_PAGE, bytes);
    if (!p) die("out of memory: %zu bytes wanted", bytes);
#ifdef MADV_HUGEPAGE
    madvise(p, bytes, MADV_HUGEPAGE);
#endif
    return p;
}

typedef struct { char *base; size_t used; } Arena;     // base NULL: a dry run that only counts

static void *take(Arena *a, size_t n, size_t size) {
    void *p = a->base ? a->base + a->used : NULL;
    a->used += round_up(n * size, 256);
    return p;
}

// The forms of an activation that its readers want: f32 for matrices of floats, int8 for quantised ones.
typedef struct { bool f, q; } Forms;

static void add_reader(Forms *forms, const Tensor *w) { *(is_quantised(w->type) ? &forms->q : &forms->f) = true; }

static Act take_act(Arena *a, Forms forms, size_t rows, size_t cols) {
    Act t = { 0 };
    if (forms.f) t.f = take(a, rows * cols, sizeof(float));
    if (forms.q) t.q = take(a, rows * cols, 1);
    if (forms.q) t.s = take(a, rows * cols / 32, sizeof(float));
    return t;
}

static void take_plane(Arena *a, KvPlane *p, size_t rows) {
    p->data = take(a, rows, kv_row_bytes(p->type, p->dim));
    p->scale = kv_group(p->type) ? take(a, rows, kv_scale_bytes(p->type, p->dim)) : NULL;
}

static void take_cache(Arena *a, Cache *c) {
    const size_t rows = (size_t)c->n_seqs * c->n_kv_heads * (size_t)c->slots;
    const size_t tail_rows = (size_t)c->n_seqs * c->n_kv_heads * (size_t)c->tail_slots;
    take_plane(a, &c->k, rows);
    take_plane(a, &c->v, rows);
    if (!tail_rows) return;
    take_plane(a, &c->k_tail, tail_rows);
    take_plane(a, &c->v_tail, tail_rows);
}

// general.name, or the file's name: what the user may know the model by. Until the next call.
static const char *model_name(const Model *m) {
    const GgufKv *kv = gguf_find_kv(&m->gguf, "general.name");
    const char *slash = strrchr(m->gguf.path, '/'), *file = slash ? slash + 1 : m->gguf.path;
    return shown(kv && kv->type == GGUF_V_STR && kv->count ? (GgufStr){ (const char *)kv->data, (size_t)kv->count }
                                                           : (GgufStr){ file, strlen(file) });
}

// A GGUF file, or a folder of Hugging Face form.
static void open_model_file(Gguf *g, const char *path) {
    struct stat st;
    signal(SIGBUS, on_lost_pages);
    const size_t n = strlen(path);
    const bool folder = (!stat(path, &st) && S_ISDIR(st.st_mode)) ||
                        (n > 12 && !strcmp(path + n - 12, ".safetensors")) ||
                        (n > 11 && !strcmp(path + n - 11, ".index.json"));
    if (folder) open_folder(g, path);
    else if (gguf_open(g, path) < 0) die("%s: %s", path, g->err);
}

// Whether the GPU has no memory of its own.
static bool shares_memory(const Ops *op) {
    const Card *card = op->card ? op->card() : NULL;
    return card && card->host_memory;
}

// In shared memory a weight is there twice until the file's pages of it are dropped.
static void upload(const Ops *op, const Gguf *g, Upload *u, void *room) {
    const Tensor in_file = u->tensor;
    op->upload(&u->tensor, room);
    if (shares_memory(op)) gguf_drop_pages(g, in_file.data, matrix_bytes(&in_file));
    if (u->matrix) *u->matrix = u->tensor;
    if (u->vector) *u->vector = u->tensor.data;
}

// Copies to the backend what it does not hold yet: of plain decoding, nothing.
static void send_new(Model *m, void *dst, void *sent, const void *src, size_t bytes) {
    if (!memcmp(sent, src, bytes)) return;
    memcpy(sent, src, bytes);
    m->ops->copy(&(Copy){ dst, src, bytes, COPY_IN });
}

static void shorten_drafter(Model *m, int seq, int n);  // [6]

// Makes session seq n tokens long, n <= len. They are ids, which penalties count. False, with nothing done: a ring has
// moved on and lost rows that the token behind them would see.
static bool shorten_session(Model *m, int seq, const int32_t *ids, int n) {
    const int32_t len = n;
    for (int i = 0; i < m->n_caches; i++) {
        const int slots = m->caches[i].slots, tail = m->caches[i].tail_slots;
        if (slots < m->seen[seq] && m->seen[seq] - n > slots - (m->config.n_swa - 1)) return false;
        if (tail && tail < m->seen[seq] && m->seen[seq] - n > STEP_ROWS) return false;
    }
    shorten_drafter(m, seq, n);
    m->len[seq] = n;
    m->ops->copy(&(Copy){ m->s.len + seq, &len, sizeof len, COPY_IN });
    if (!m->s.counts) return true;
    const size_t vocab = (size_t)m->config.vocab;
    int32_t *counts = alloc_or_die(vocab, sizeof *counts);
    for (int i = 0; i < n; i++) counts[ids[i]]++;
    m->ops->copy(&(Copy){ m->s.counts + (size_t)seq * vocab, counts, vocab * sizeof *counts, COPY_IN });
    free(counts);
    return true;
}

static void reset_session(Model *m, int seq) {         // forget everything; no cached row needs to be erased
    m->seen[seq] = 0;
    shorten_session(m, seq, NULL, 0);
}

typedef struct {              // rows of a cache, or the scales beside them
    uint8_t *data;
    size_t  bytes;
    KvType  type;
    bool    is_scale, is_tail;
} CachePart;

enum { CACHE_PARTS = 6 };     // at most

// Where the rows of session seq lie in a cache -> number of parts.
static int cache_parts(const Cache *c, int seq, CachePart *parts) {
    const KvPlane *planes[] = { &c->k, &c->v, &c->k_tail, &c->v_tail };
    int n = 0;
    for (int k = 0; k < (c->tail_slots ? 4 : 2); k++) {
        const KvPlane *p = planes[k];
        const size_t rows = (size_t)c->n_kv_heads * (size_t)(k < 2 ? c->slots : c->tail_slots);
        const size_t bytes = rows * kv_row_bytes(p->type, p->dim), scale = p->scale ? rows * kv_scale_bytes(p->type,
                                                                                                            p->dim) : 0;
        if (bytes) parts[n++] = (CachePart){ (uint8_t *)p->data + (size_t)seq * bytes, bytes, p->type, false, k > 1 };
        if (scale) parts[n++] = (CachePart){ (uint8_t *)p->scale + (size_t)seq * scale, scale, p->type, true, false };
    }
    return n;
}

// Copies the rows of session seq in a cache that can move on, a ring or a tail, to host memory, COPY_OUT, or back;
// wait() is left to the caller. Returns their bytes; host NULL: only that.
static size_t copy_ring(Model *m, int cache, int seq, uint8_t *host, CopyKind kind) {
    const Cache *c = &m->caches[cache];
    const bool is_ring = c->slots < m->options.n_ctx + STEP_ROWS;
    CachePart parts[CACHE_PARTS];
    const int n_parts = cache_parts(c, seq, parts);
    size_t n = 0;
    for (int k = 0; k < n_parts; k++) {
        if (!is_ring && !parts[k].is_tail) continue;
        if (host) {
            void *there = parts[k].data, *here = host + n;
            const bool out = kind == COPY_OUT;
            m->ops->copy(&(Copy){ out ? here : there, out ? there : here, parts[k].bytes, kind });
        }
        n += parts[k].bytes;
    }
    return n;
}

// The same in all caches.
static size_t copy_rings(Model *m, int seq, uint8_t *host, CopyKind kind) {
    size_t n = 0;
    for (int i = 0; i < m->n_caches; i++) n += copy_ring(m, i, seq, host ? host + n : NULL, kind);
    if (host) m->ops->wait();
    return n;
}

// ==== [5] The forward pass ===========================================================================================
// Written once, against the table of operations; a step's rows may belong to several sessions and may be prompt, plain
// decoding or a tree of drafts. Each layer: attention, feed-forward, per-layer embedding (E2B, E4B), scale. Norms and
// residual additions ride on the products that read them (In in gemma4.h): a block leaves what it adds as a delta of
// the stream, and the next product takes it in.
//
// Checkpoints carry the names of llama.cpp's gemma4 graph. They cost nothing unless --dump is given.

// What else the operations of a step depend on: StepKey.variant.
enum { PLAIN, ROWS_ARE_FED, DRAFTS_ARE_FED, COMMITS_CHAINS, COMMITS_PATHS, WALKS_CHAINS, WALKS_PATHS,
       SCORING, LOOKING };
enum { OUT_OF_LAYERS = -1 };
enum { MANY_ROWS = 512 };     // see go_on()

// Keeps n_rows x cols values in memory, or appends them to DIR/NAME-LAYER.f32 (DIR/NAME.f32 outside the layers); the
// first step of a run truncates.
static void checkpoint(Model *m, const char *name, int l, const float *data, int n_rows, int cols) {
    if (!m->dump_dir) return;
    const size_t n = (size_t)n_rows * cols;
    float *host = alloc_or_die(n, sizeof *host);
    m->ops->copy(&(Copy){ host, data, n * sizeof *host, COPY_OUT });
    m->ops->wait();
    if (!*m->dump_dir) {
        m->checkpoints = realloc(m->checkpoints, (size_t)(m->n_checkpoints + 1) * sizeof *m->checkpoints);
        if (!m->checkpoints) die("out of memory for %d checkpoints", m->n_checkpoints + 1);
        Checkpoint *c = &m->checkpoints[m->n_checkpoints++];
        *c = (Checkpoint){ .layer = l, .n_rows = n_rows, .cols = cols, .data = host };
        snprintf(c->name, sizeof c->name, "%s", name);
        return;
    }
    char path[4096], layer[16] = "";
    if (l != OUT_OF_LAYERS) snprintf(layer, sizeof layer, "-%d", l);
    if (snprintf(path, sizeof path, "%s/%s%s.f32", m->dump_dir, name, layer) >= (int)sizeof path)
        die("--dump: %s: the path is too long", m->dump_dir);
    FILE *f = fopen(path, m->steps > 1 ? "ab" : "wb");
    if (!f) die("--dump: %s: %s", path, strerror(errno));
    if (fwrite(host, sizeof *host, n, f) != n || fclose(f)) die("--dump: %s: %s", path, strerror(errno));
    free(host);
}

// The same for the y of an In, which no buffer holds.
static void checkpoint_in(Model *m, const char *name, int l, In in, int n_rows) {
    if (!m->dump_dir) return;
    in.x_out = NULL;
    m->ops->close(&(Close){ .n_rows = n_rows, .cols = m->config.dim, .in = in, .out = m->s.dump[0] });
    checkpoint(m, name, l, m->s.dump[0], n_rows, m->config.dim);
}

// What the last block added to the stream: the y of an In without its x.
static void checkpoint_added(Model *m, const char *name, int l, In stream, int n_rows) {
    stream.x = NULL;
    checkpoint_in(m, name, l, stream, n_rows);
}

// The stream as the input of a product whose norm weight is w_pre. If something is to be added, the sum goes to the
// other buffer, which is the stream from here on.
static In enter(float *const buffers[2], In *stream, const float *w_pre) {
    In in = *stream;
    in.w_pre = w_pre;
    if (in.delta[0] || in.scale != 1) {
        in.x_out = buffers[stream->x == buffers[0]];
        *stream = (In){ .x = in.x_out, .scale = 1, .eps = in.eps };
    }
    return in;
}

// out = w in, a single product.
static void multiply(const Model *m, int n_rows, In in, const Tensor *w, float *out) {
    m->ops->matmul(&(Matmul){ .n_rows = n_rows, .in = in, .n = 1, .w = { w }, .out = { out } });
}

// Words that move on the device: dst[i] = src[index[i]], n rows of so many columns.
static void move_rows(const Model *m, int n, int cols, const void *src, int src_stride, const int32_t *index, void *dst,
                      int dst_stride) {
    m->ops->gather_rows(&(GatherRows){ .n_rows = n, .cols = cols, .src = src, .src_stride = src_stride, .index = index,
                                       .dst = dst, .dst_stride = dst_stride });
}

// The form in which the matrix w wants to find an activation.
static Act act_for(const Tensor *w, Act a) {
    if (is_quantised(w->type)) a.f = NULL;
    else a.q = NULL, a.s = NULL;
    return a;
}

static Cache stage_of(const Model *m, const Cache *ring) {          // the stage in the shape of one ring
    Cache st = m->stage;
    st.n_kv_heads = ring->n_kv_heads;
    st.head_dim = st.k.dim = st.v.dim = ring->head_dim;
    return st;
}

static void empty_stage(Model *m, Pass *p) {
    if (p->waiting < 0) return;
    const Cache *ring = &m->caches[m->cache_of[p->waiting]], stage = stage_of(m, ring);
    m->ops->kv_copy(&(KvCopy){ .batch = &p->all, .cache = ring, .stage = &stage });
    p->waiting = -1;
}

// Go on with the rows whose output is wanted. The stream has nothing pending.
static void keep_wanted(Model *m, Pass *p) {
    const Config *c = &m->config;
    State *s = &m->s;
    float *x = p->stream.x == s->x[0] ? s->x[1] : s->x[0];
    const int n = m->step.n_kept, ple = c->n_layers * c->ple_dim;
    move_rows(m, n, c->dim, p->stream.x, c->dim, s->kept_index, x, c->dim);
    if (ple) {
        move_rows(m, n, ple, s->ple, ple, s->kept_index, s->ple_kept, ple);
        p->ple = s->ple_kept;
    }
    p->stream.x = x;
    p->batch.rows = s->kept_rows;
    p->batch.n_rows = n;
}

// What layer l gave, all rows of it, goes to where a DFlash drafter finds it. The stream has nothing pending.
static void tap(Model *m, int l, const Pass *p) {
    const Drafter *d = &m->drafter;
    const int dim = m->config.dim;
    for (int i = 0; i < d->n_taps; i++)
        if (d->taps[i] == l)
            move_rows(m, m->step.n_rows, dim, p->stream.x, dim, NULL, m->s.tapped + (size_t)i * dim, d->n_taps * dim);
}

// Carries out a store, and finds what the rows of a prompt attend to in the global layer that it belongs to.
static void select_blocks(Model *m, const QkvStore *store) {
    const PlanOptions *o = &m->options;
    const State *s = &m->s;
    m->ops->qkv_store(store);
    m->ops->block_select(&(BlockSelect){ .batch = store->batch, .cache = store->cache, .n_heads = store->n_heads,
                                         .q = store->q, .scale = 1, .alpha = o->pflash, .density = o->pflash_density,
                                         .means = s->block_means, .scores = s->block_scores,
                                         .weights = s->block_weights, .out = s->blocks, .count = s->block_count });
}

// x += norm(Wo attend(q, K, V)); leaves the sum as a delta. False: no row's output is wanted, the caches are complete.
static bool attention(Model *m, int l, Pass *p) {
    const Config *c = &m->config;
    const LayerConfig *lc = &c->layer[l];
    const LayerWeights *w = &m->weights.layer[l];
    const Ops *op = m->ops;
    State *s = &m->s;
    const bool own = lc->kv_layer == l;
    const bool has_v = w->attn_v.data != NULL;
    // From the last layer with a cache of its own on, and behind the last that is tapped, layers need only the rows
    // whose output is wanted, and so does its q.
    // Steps that score tokens end there.
    const bool looks = m->scoring == LOOKING && !lc->is_swa;
    const int last = m->scoring ? m->n_scored - 1 : max_int(c->first_shared - 1, m->drafter.n_tapped);
    const bool shrink = l == last && m->step.n_kept < p->batch.n_rows && !m->dump_dir && !looks;
    const Cache *cache = &m->caches[m->cache_of[l]];
    const Cache stage = stage_of(m, cache);

    In in = enter(s->x, &p->stream, w->attn_norm);
    checkpoint_in(m, "attn_norm", l, in, p->batch.n_rows);
    Matmul qkv = { .n_rows = p->batch.n_rows, .in = in };
    if (!shrink) qkv.w[qkv.n] = &w->attn_q, qkv.out[qkv.n++] = s->q;
    if (own) qkv.w[qkv.n] = &w->attn_k, qkv.out[qkv.n++] = s->k;
    if (own && has_v) qkv.w[qkv.n] = &w->attn_v, qkv.out[qkv.n++] = s->v;
    if (qkv.n) op->matmul(&qkv);
    else op->close(&(Close){ .n_rows = qkv.n_rows, .cols = c->dim, .in = in });
    tap(m, l - 1, p);

    if (own && p->staged && lc->is_swa) p->waiting = l;
    QkvStore store = {
        .batch = &p->batch, .cache = cache, .stage = p->staged && lc->is_swa ? &stage : NULL, .n_heads = c->n_heads,
        .q = shrink ? NULL : s->q, .k = own ? s->k : NULL, .v = own ? (has_v ? s->v : s->k) : NULL,
        .w_q = w->attn_q_norm, .w_k = w->attn_k_norm, .v_norm = true, .eps = c->eps,
        .rope = { s->inv_freq[lc->is_swa], m->weights.n_pairs[lc->is_swa] },
        .dump_q = s->dump[0], .dump_q_pos = s->dump[1], .dump_k = s->dump[2], .dump_v = s->dump[3],
        .dump_k_pos = s->dump[4]
    };
    if (shrink) {
        if (own) op->qkv_store(&store);
        if (!m->step.n_kept) return false;
        keep_wanted(m, p);
        multiply(m, m->step.n_kept, enter(s->x, &p->stream, w->attn_norm), &w->attn_q, s->q);
        store.q = s->q;
        store.k = store.v = NULL;
    }
    const int n_rows = p->batch.n_rows;
    const bool sparse = s->blocks.n && p->staged && !lc->is_swa && n_rows == m->step.n_rows && !m->scoring;
    if (sparse) select_blocks(m, &store);
    if (looks) {
        op->qkv_store(&store);
        op->attn_mass(&(AttnMass){ .batch = &p->batch, .cache = cache, .n_heads = c->n_heads, .q = s->q, .scale = 1,
                                   .n_keys = s->n_keys, .shares = s->shares, .mass = s->mass });
        if (l == last) return false;
    }
    const Act att_out = act_for(&w->attn_output, s->att_out);
    op->attend(&(Attend){ .batch = &p->batch, .cache = cache, .stage = store.stage, .n_heads = c->n_heads, .q = s->q,
                          .window = lc->is_swa ? c->n_swa : 0, .own = OWN_CAUSAL, .scale = 1,
                          .blocks = sparse ? &s->blocks : NULL, .store = sparse || looks ? NULL : &store,
                          .out = att_out });
    checkpoint(m, "Qcur_normed", l, s->dump[0], n_rows, c->n_heads * lc->head_dim);
    checkpoint(m, "Qcur_pos", l, s->dump[1], n_rows, c->n_heads * lc->head_dim);
    if (own) {
        checkpoint(m, "Kcur_normed", l, s->dump[2], n_rows, lc->n_kv_heads * lc->head_dim);
        checkpoint(m, "Vcur_normed", l, s->dump[3], n_rows, lc->n_kv_heads * lc->head_dim);
        checkpoint(m, "Kcur_pos", l, s->dump[4], n_rows, lc->n_kv_heads * lc->head_dim);
    }
    if (p->waiting >= 0 && c->layer[p->waiting].last_reader == l) empty_stage(m, p);
    multiply(m, n_rows, (In){ .act = att_out }, &w->attn_output, s->y);

    p->stream.delta[0] = s->y;
    p->stream.w_post = w->post_attention_norm;
    checkpoint_added(m, "attn_post_norm", l, p->stream, n_rows);
    checkpoint_in(m, "attn_out", l, p->stream, n_rows);
    return true;
}

// x += norm(FFN(x)), with the experts beside the dense FFN where the model has them; leaves the sum as deltas.
static void feed_forward(Model *m, int l, Pass *p) {
    const Config *c = &m->config;
    const LayerWeights *w = &m->weights.layer[l];
    const Ops *op = m->ops;
    State *s = &m->s;
    const int n_rows = p->batch.n_rows;

    const In in = enter(s->x, &p->stream, w->ffn_norm);
    checkpoint_in(m, c->n_experts ? "ffn_norm_1" : "ffn_norm", l, in, n_rows);
    Route route = { .n_rows = n_rows, .n_used = c->n_experts_used, .in = in, .w = &w->ffn_gate_inp,
                    .expert_scale = w->ffn_down_exps_scale, .logits = s->router, .ids = s->expert_ids,
                    .weights = s->expert_weights };
    route.in.w_pre = w->router_norm;                   // the router sees x itself, not what the experts see
    route.in.x_out = NULL;
    const Act ffn = act_for(&w->ffn_down, s->ffn), expert = act_for(&w->ffn_down_exps, s->expert);
    const Matmul down = { .n_rows = n_rows, .in = { .act = ffn }, .n = 1, .w = { &w->ffn_down }, .out = { s->mlp } };
    const ExpertGateUp experts = { .n_rows = n_rows, .n_used = c->n_experts_used,
                                   .in = enter(s->x, &p->stream, w->pre_ffw_norm_2), .gate = &w->ffn_gate_exps,
                                   .up = w->ffn_up_exps.data ? &w->ffn_up_exps : NULL, .fn = ACT_GELU,
                                   .ids = s->expert_ids, .out = expert, .beside = &down };
    op->gate_up(&(GateUp){ .n_rows = n_rows, .in = in, .gate = &w->ffn_gate, .up = &w->ffn_up, .fn = ACT_GELU, .out = ffn,
                           .route = c->n_experts ? &route : NULL, .experts = c->n_experts ? &experts : NULL });

    if (c->n_experts) {
        checkpoint(m, "ffn_moe_logits", l, s->router, n_rows, c->n_experts);
        checkpoint_in(m, "ffn_norm_2", l, experts.in, n_rows);
        op->expert_down(&(ExpertDown){ .n_rows = n_rows, .n_used = c->n_experts_used, .in = expert,
                                       .down = &w->ffn_down_exps, .ids = s->expert_ids, .weights = s->expert_weights,
                                       .out = s->moe });
        In branch = { .delta = { s->mlp }, .w_delta = { w->post_ffw_norm_1 }, .scale = 1, .eps = c->eps };
        checkpoint_in(m, "ffn_mlp", l, branch, n_rows);
        branch.delta[0] = s->moe;
        branch.w_delta[0] = w->post_ffw_norm_2;
        checkpoint_in(m, "ffn_moe", l, branch, n_rows);
        p->stream.delta[1] = s->moe;
        p->stream.w_delta[0] = w->post_ffw_norm_1;
        p->stream.w_delta[1] = w->post_ffw_norm_2;
    } else {
        op->matmul(&down);
        checkpoint(m, "ffn_out", l, s->mlp, n_rows, c->dim);
    }
    p->stream.delta[0] = s->mlp;
    p->stream.w_post = w->post_ffw_norm;
    checkpoint_added(m, "ffn_post_norm", l, p->stream, n_rows);
}

// x += norm(Wproj (gelu(Wgate x) * u[l])); leaves the sum as a delta. x is not normed on the way in.
static void per_layer_embedding(Model *m, int l, Pass *p) {
    const Config *c = &m->config;
    const LayerWeights *w = &m->weights.layer[l];
    State *s = &m->s;
    const int n_rows = p->batch.n_rows;
    const Act gate = act_for(&w->proj, s->ple_gate);
    m->ops->ple_inject(&(PleInject){ .n_rows = n_rows, .in = enter(s->x, &p->stream, NULL), .w = &w->inp_gate,
                                     .u = p->ple + (size_t)l * c->ple_dim, .u_stride = c->n_layers * c->ple_dim,
                                     .out = gate });
    multiply(m, n_rows, (In){ .act = gate }, &w->proj, s->y);
    p->stream.delta[0] = s->y;
    p->stream.w_post = w->post_norm;
    checkpoint_added(m, "per_layer_embd_out", l, p->stream, n_rows);
}

// Whether layer l of a prompt step is still wanted. A backend that works beside the host is given at most LAYERS_AHEAD
// layers more than it has done, so that there is something to give up; few rows are done before anybody could want to.
static bool go_on(const Model *m, int l, Pass *p) {
    const Ops *op = m->ops;
    if (!m->stop || !p->staged) return true;
    if (op->mark && m->step.n_rows >= MANY_ROWS) {
        p->marks[l % (LAYERS_AHEAD + 1)] = op->mark();
        if (l >= LAYERS_AHEAD) op->wait_for(p->marks[(l + 1) % (LAYERS_AHEAD + 1)]);
    }
    return !*m->stop;
}

// What a row meets in the matrices of a layer, of the experts in those that are chosen: bytes, or else values.
static double layer_size(const Config *c, const LayerWeights *w, bool bytes) {
    const Tensor *all[] = { &w->attn_q, &w->attn_k, &w->attn_v, &w->attn_output, &w->ffn_gate, &w->ffn_up, &w->ffn_down,
                            &w->ffn_gate_inp, &w->ffn_gate_exps, &w->ffn_up_exps, &w->ffn_down_exps, &w->inp_gate, &w->proj };
    double size = 0;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        const Tensor *t = all[i];
        if (!t->data) continue;
        const double row = bytes ? (double)gguf_row_size(t->type, t->cols) : t->cols;
        size += row * t->rows * (t->n > 1 ? c->n_experts_used : 1);
    }
    return size;
}

// Multiplications that layer l takes for the rows still under way of a prompt's step, which is one chain.
static double layer_work(const Model *m, int l, const Pass *p) {
    const Config *c = &m->config;
    const LayerConfig *lc = &c->layer[l];
    const int keys = m->len[m->step.segs[0].seq] + p->all.n_rows, seen = lc->is_swa ? min_int(keys, c->n_swa) : keys;
    return p->batch.n_rows * (layer_size(c, &m->weights.layer[l], false) + 2.0 * c->n_heads * lc->head_dim * seen);
}

static Batch step_batch(const Model *m, int32_t *len) {                // all rows of the step
    return (Batch){ .rows = m->s.rows, .segs = m->s.segs, .len = len, .n_rows = m->step.n_rows, .n_segs = m->step.n_segs };
}

// Where a step begins: the rows' embeddings.
static void enter_layers(Model *m, Pass *p) {
    const Config *c = &m->config;
    const Weights *w = &m->weights;
    const Ops *op = m->ops;
    State *s = &m->s;
    const int n_rows = m->step.n_rows;
    p->batch = p->all = step_batch(m, s->len);
    p->stream = (In){ .x = s->x[0], .scale = 1, .eps = c->eps };
    p->ple = s->ple;
    p->waiting = -1;
    assert(m->scoring || !m->options.only_scores);     // else not all layers are there

    op->embed(&(Embed){ .batch = &p->all, .table = &w->token_embd, .scale = sqrtf((float)c->dim), .out = s->x[0] });
    checkpoint(m, "inp_scaled", OUT_OF_LAYERS, s->x[0], n_rows, c->dim);
    if (!c->ple_dim) return;
    multiply(m, n_rows, p->stream, &w->per_layer_model_proj, s->ple);
    op->ple_rows(&(PleRows){ .batch = &p->all, .table = &w->per_layer_token_embd, .w_norm = w->per_layer_proj_norm,
                             .u = s->ple, .n_layers = c->n_layers, .ple_dim = c->ple_dim, .eps = c->eps,
                             .proj_scale = 1 / sqrtf((float)c->dim), .table_scale = sqrtf((float)c->ple_dim),
                             .out_scale = 1 / sqrtf(2) });
    checkpoint(m, "inp_per_layer", OUT_OF_LAYERS, s->ple, n_rows, c->n_layers * c->ple_dim);
}

// And where it ends: the logits of the rows that want them.
static void leave_layers(Model *m, Pass *p) {
    const Config *c = &m->config;
    const Weights *w = &m->weights;
    const Ops *op = m->ops;
    State *s = &m->s;
    const int n_kept = m->step.n_kept;
    empty_stage(m, p);
    const bool tapped = m->drafter.n_tapped == c->n_layers;            // the last layer's output too
    if (tapped || (n_kept && p->batch.n_rows > n_kept))                // or a dump took all rows through all layers
        op->close(&(Close){ .n_rows = p->batch.n_rows, .cols = c->dim, .in = enter(s->x, &p->stream, NULL) });
    if (tapped) tap(m, c->n_layers - 1, p);
    if (!n_kept) {                                     // truncates what an earlier dump left: a later chunk appends
        checkpoint(m, "result_norm", OUT_OF_LAYERS, s->hidden, 0, c->dim);
        checkpoint(m, "result_output", OUT_OF_LAYERS, s->logits, 0, c->vocab);
        return;
    }
    if (p->batch.n_rows > n_kept) keep_wanted(m, p);
    p->stream.w_pre = w->output_norm;
    op->head(&(Head){ .n_rows = n_kept, .in = p->stream, .w = w->output.data ? &w->output : &w->token_embd,
                      .cap = c->logit_cap, .logits = s->logits, .hidden = s->hidden });
    checkpoint(m, "result_norm", OUT_OF_LAYERS, s->hidden, n_kept, c->dim);
    checkpoint(m, "result_output", OUT_OF_LAYERS, s->logits, n_kept, c->vocab);
}

typedef enum { DONE = 0, GIVEN_UP = -1, PAUSED = -2 } Forward;

/* TRAPS  what differs from Llama, and the test that sees it when it is wrong (all: the golden logits of test_forward.c)
 *  1. embedding times sqrt(dim); the LM head uses the same table without it                      golden
 *  2. norm weights as stored, no "1 + w"                                                         golden
 *  3. attention scale 1, not 1/sqrt(head_dim); per-head norms of q and k carry the temperature   golden
 *  4. V is normed without a weight, and never rotated                                            golden
 *  5. a global layer without attn_v takes V from the raw K projection, before k's norm and rope  golden moe; test_cache
 *  6. sliding layers: head_dim 256, base 1e4, all pairs turn; global: head_dim 512, base 1e6,
 *     pairs (i, i + 256), i < 64 turn with exponent 2i/512, the others stay                      golden; test_ops rope
 *  7. the window holds n_swa keys, the row's own included                                        golden; test_cache
 *  8. layers that share K and V read the last owner of their kind, as it is after this step      golden e; test_cache
 *  9. residual: x + norm(attention), x + norm(FFN): norms before and after each block            golden
 * 10. GELU in its tanh form, in the FFN, the experts and the per-layer gate                      test_ops
 * 11. FFN width differs by layer (E2B: doubled in layers that share K and V)                     golden e
 * 12. MoE: router, dense FFN and experts all read x, each through its own norm; the router's norm
 *     weight is scale / sqrt(dim); outputs are normed apart, added, normed again                 golden moe
 * 13. chosen experts' weights are renormalised, then times ffn_down_exps.scale                   golden moe; test_ops
 * 14. fused expert tensors hold the rows of gate first                                           test_forward
 * 15. per-layer embeddings: table times 16, projection times 1/sqrt(dim) then normed per layer,
 *     sum times 1/sqrt(2); the gate reads x without a norm                                       golden e
 * 16. layer_output_scale multiplies the whole stream, last                                       golden
 * 17. logits = 30 tanh(z / 30)                                                                   golden
 * 18. positions are len + depth, taken before anything is stored                                 test_cache */

// Takes the rows of a step through the layers. Those of a prompt stop, PAUSED, before a layer with which they would
// take more than `work` multiplications, and behind one at least; called again they go on there. GIVEN_UP half-way:
// what was written to caches lies behind the sessions' ends, but in rings that have gone round.
static Forward forward(Model *m, double work) {
    const Config *c = &m->config;
    Pass *p = &m->step.pass;
    p->worked = 0;
    if (!p->layer) enter_layers(m, p);
    for (; p->layer < c->n_layers; p->layer++) {
        const int l = p->layer;
        const double more = p->staged ? layer_work(m, l, p) : 0;
        if (p->worked && p->worked + more > work) return PAUSED;
        if (!go_on(m, l, p)) return GIVEN_UP;
        p->worked += more;
        if (!attention(m, l, p)) break;
        feed_forward(m, l, p);
        if (c->ple_dim) per_layer_embedding(m, l, p);
        p->stream.scale = m->weights.layer[l].layer_output_scale;
        checkpoint_in(m, "out_scaled", l, p->stream, p->batch.n_rows);
        checkpoint_in(m, "l_out", l, p->stream, p->batch.n_rows);
    }
    leave_layers(m, p);
    return DONE;
}

// ==== [6] Drafters: files, plan, passes ==============================================================================
// A drafter is a second, small model made for one target. It has a file, weights and a part of the plan of its own;
// what it guesses it leaves in backend memory, for whoever makes the target's next step of it. Which kind it is,
// general.architecture says; that it belongs to the target, sizes say.
//
// MTP, the assistant of Gemma 4: four layers with queries only, which read the target's caches. Its input is the
// embedding of the last token beside the hidden row that chose it, both the target's; it gives a token and the next
// hidden row, so it goes on from itself, as many times as tokens are wanted, all at the same position: behind the last
// committed row. It stores nothing, so nothing has to be undone.
//
// DFlash: a few layers that guess a whole block at once, the last token and behind it mask tokens, each row the token
// at its own place. They read what the target made of the text so far: outputs of some of its layers ("taps") become,
// by one matrix, a row of context for each token, and by the K and V of each layer rows of caches of its own. So the
// drafter has a length of its own too, and tokens that are committed have to be taken in (drafter_committed). Rows
// stand at their distance from each other, not at a place in the text: a context may begin anywhere, and starts anew
// where it was lost. A block's own K and V lie behind the context, where the next ones overwrite them. The head and the
// embeddings are the target's.

enum { DFLASH_REACH = 32768 };          // positions that a full layer sees back

// What the file is by its architecture. Dies on kinds that cannot be run.
static DrafterKind drafter_kind(Drafter *d, const char *target) {
    static const char *const dflash[] = { "dflash", "gemma4-dflash-draft", "dflash-draft" };
    static const char *const others[][2] = { { "eagle3", "EAGLE-3" }, { "gemma4", "another whole model as the" } };
    Gguf *g = &d->gguf;
    GgufStr arch = { "", 0 };
    if (gguf_get_str(g, "general.architecture", &arch) < 0) die_gguf(g);
    snprintf(d->arch, sizeof d->arch, "%s", shown(arch));
    if (!strcmp(d->arch, "gemma4-assistant") || !strcmp(d->arch, "gemma4_assistant")) return DRAFTER_MTP;
    const char *kind = NULL;
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (!strcmp(d->arch, others[i][0])) kind = others[i][1];
    for (size_t i = 0; i < sizeof dflash / sizeof *dflash; i++) {
        if (strcmp(d->arch, dflash[i])) continue;
        if (gguf_find_tensor(g, "markov_w1.weight")) kind = "DSpark";
        else if (gguf_find_tensor(g, "selector_hidden.weight")) kind = "DFlash2";
        else return DRAFTER_DFLASH;
    }
    if (kind) die("%s: a drafter for %s: %s drafter is not supported; try an MTP assistant", g->path, target, kind);
    die("%s: key 'general.architecture': expected a drafter for %s, gemma4-assistant or dflash, got '%s' "
        "(E_META_RANGE)", g->path, target, d->arch);
}

// A size that drafter and target share.
static void must_agree(const Model *m, const char *what, int64_t got, int64_t want) {
    if (got != want)
        die("%s: drafter for %s: %s: expected %" PRId64 ", got %" PRId64 "; try the drafter that was made for this "
            "model", m->drafter.gguf.path, m->gguf.path, what, want, got);
}

static const char *drafter_key(const Drafter *d, const char *key) {  // with the architecture before it. One at a time
    static char full[128];
    snprintf(full, sizeof full, "%s.%s", d->arch, key);
    return full;
}

// The first of two names that the file has, or else the first: the two dialects.
static const char *either_tensor(const Drafter *d, const char *name, const char *older) {
    return !gguf_find_tensor(&d->gguf, name) && gguf_find_tensor(&d->gguf, older) ? older : name;
}

// The config of an MTP assistant and whose caches its layers read: the last of the same kind that the target has.
static void load_mtp_config(Model *m) {
    Drafter *d = &m->drafter;
    Gguf *g = &d->gguf;
    Config *c = &d->config;
    const Config *t = &m->config;
#define KEY(key) drafter_key(d, key)
    const int64_t older = key_int(g, KEY("n_embd_backbone"), -1, 1 << 20, -1);
    must_agree(m, "hidden size", older >= 0 ? older : key_int(g, KEY("embedding_length_out"), 1, 1 << 20, 0), t->dim);
    c->n_layers = (int)key_int(g, KEY("block_count"), 1, MAX_LAYERS, 0);
    c->dim      = (int)key_int(g, KEY("embedding_length"), 1, 1 << 20, 0);
    c->n_heads  = (int)key_int(g, KEY("attention.head_count"), 1, 1024, 0);
    c->eps      = (float)key_float(g, KEY("attention.layer_norm_rms_epsilon"), 0);
    c->rope_base     = key_float(g, KEY("rope.freq_base"), t->rope_base);
    c->rope_base_swa = key_float(g, KEY("rope.freq_base_swa"), t->rope_base_swa);
    d->window = (int)key_int(g, KEY("attention.sliding_window"), 1, MAX_CONTEXT, t->n_swa);
    must_agree(m, "sliding window", d->window, t->n_swa);
    int64_t head_dim[2];                               // of global layers, of sliding ones
    head_dim[0] = key_int(g, KEY("attention.key_length"), 1, MAX_HEAD_DIM, 0);
    head_dim[1] = key_int(g, KEY("attention.key_length_swa"), 1, MAX_HEAD_DIM, 0);
    int64_t swa[MAX_LAYERS], kv_heads[MAX_LAYERS], ffn[MAX_LAYERS];
    key_per_layer(g, KEY("attention.sliding_window_pattern"), 0, INT_MAX, swa, c->n_layers);
    key_per_layer(g, KEY("attention.head_count_kv"), 1, 1024, kv_heads, c->n_layers);
    key_per_layer(g, KEY("feed_forward_length"), 1, 1 << 20, ffn, c->n_layers);
#undef KEY
    for (int l = 0; l < c->n_layers; l++) {
        int donor = t->first_shared - 1;
        while (donor >= 0 && t->layer[donor].is_swa != (swa[l] != 0)) donor--;
        if (donor < 0)
            die("%s: drafter for %s: layer %d reads a %s layer, of which the model has none", g->path, m->gguf.path, l,
                swa[l] ? "sliding" : "global");
        const LayerConfig *from = &t->layer[donor];
        const int s = swa[l] != 0;
        must_agree(m, s ? "head size of sliding layers" : "head size of global layers", head_dim[s], from->head_dim);
        must_agree(m, s ? "KV heads of sliding layers" : "KV heads of global layers", kv_heads[l], from->n_kv_heads);
        if (c->n_heads % from->n_kv_heads)
            die("%s: key '%s': expected a multiple of %d KV heads, got %d (E_META_RANGE)", g->path,
                drafter_key(d, "attention.head_count"), from->n_kv_heads, c->n_heads);
        c->layer[l] = (LayerConfig){ .is_swa = swa[l] != 0, .head_dim = from->head_dim, .n_kv_heads = from->n_kv_heads,
                                     .ffn_dim = (int)ffn[l], .kv_layer = -1 };
        d->donor[l] = donor;
    }
}

// The head that looks only at tokens of the nearest centroids, where the file has it: the small assistants.
static void bind_centroids(Model *m) {
    Drafter *d = &m->drafter;
    Gguf *g = &d->gguf;
    const char *name = either_tensor(d, "masked_embd_centroids.weight", "mtp.centroids.weight");
    const char *order_name = either_tensor(d, "masked_embd_ordering", "mtp.token_ordering.weight");
    const int vocab = d->config.vocab;
    const GgufTensor *t = find_tensor(&d->binder, name), *order = find_tensor(&d->binder, order_name);
    if (!t || !order || !key_int(g, drafter_key(d, "use_ordered_embeddings"), 0, 1, 1)) return;
    const uint64_t n = t->ne[1];
    if (n < 1 || n > (uint64_t)vocab || (uint64_t)vocab % n)
        die("%s: tensor '%s': expected a number of rows that divides the vocabulary of %d, got %" PRIu64 " (E_SHAPE)",
            g->path, name, vocab, n);
    if (!m->ops->head_centroid)
        die("%s: tensor '%s': the %s backend has no head for centroids", g->path, name, m->ops->name);
    bind_scaled(&d->binder, &d->centroids, name, (int)n, d->config.dim, 1);
    const int per = vocab / (int)n, least = (m->options.draft_width + per - 1) / per;  // enough for the candidates
    d->n_centroids_used = (int)key_int(g, drafter_key(d, "centroid_top_k"), least, (int64_t)n,
                                       max_int(least, min_int(32, (int)n)));
    const bool wide = order->type == GGUF_I64;
    if (!(wide || order->type == GGUF_I32) || order->ne[0] != (uint64_t)vocab ||
        order->size != (uint64_t)vocab * (wide ? 8 : 4))
        die("%s: tensor '%s': expected %d values of type I32, got %" PRIu64 " of %s (E_SHAPE)", g->path, order_name,
            vocab, order->ne[0], gguf_type_name(order->type));
    d->binder.seen[order - g->tensors] = BOUND;
    d->order = alloc_or_die(vocab, sizeof *d->order);
    char *taken = alloc_or_die(vocab, 1);
    for (int i = 0; i < vocab; i++) {
        int64_t id = 0;
        memcpy(&id, order->data + (size_t)i * (wide ? 8 : 4), wide ? 8 : 4);        // little-endian, not negative
        if (id < 0 || id >= vocab || taken[id])
            die("%s: tensor '%s': expected every token once, got %" PRId64 " at %d (E_PAYLOAD)", g->path, order_name,
                id, i);
        taken[id] = 1;
        d->order[i] = (int32_t)id;
    }
    free(taken);
}

static void bind_mtp(Model *m) {
    Drafter *d = &m->drafter;
    Binder *b = &d->binder;
    Config *c = &d->config;
    Weights *w = &d->weights;
    const Weights *t = &m->weights;
    const GgufTensor *embd = gguf_find_tensor(b->g, "token_embd.weight");
    if (!embd) die("%s: tensor 'token_embd.weight': missing (E_TENSOR_MISSING)", b->g->path);
    if (!m->ops->pair) die("%s: the %s backend has no input for MTP drafters", b->g->path, m->ops->name);
    must_agree(m, "vocabulary", (int64_t)embd->ne[1], m->config.vocab);
    c->vocab = m->config.vocab;
    bind_scaled(b, &w->token_embd, "token_embd.weight", c->vocab, c->dim, 1);  // the head; embeddings: the target's
    bind_vector(b, &w->output_norm, "output_norm.weight", c->dim);
    bind_scaled(b, &d->pre_projection, either_tensor(d, "nextn.pre_projection.weight", "mtp.pre_projection.weight"),
                c->dim, 2 * m->config.dim, 1);
    bind_scaled(b, &d->post_projection, either_tensor(d, "nextn.post_projection.weight", "mtp.post_projection.weight"),
                m->config.dim, c->dim, 1);
    for (int l = 0; l < c->n_layers; l++) bind_layer(b, c, &w->layer[l], l);
    bind_centroids(m);

    // Queries turn as the keys do that they meet.
    const double base[2] = { c->rope_base, c->rope_base_swa };
    for (int l = 0; l < c->n_layers; l++) {
        const LayerConfig *lc = &c->layer[l];
        const int s = lc->is_swa;
        const bool has_factors = !s && find_tensor(b, "rope_freqs.weight");
        const float *factors = has_factors ? host_vector(b, "rope_freqs.weight", lc->head_dim / 2) : NULL;
        if (s || has_factors) bind_rope(b, w, s, base[s], lc->head_dim, factors);
        if ((s || has_factors) && (w->n_pairs[s] != t->n_pairs[s] ||
                                   memcmp(w->inv_freq[s], t->inv_freq[s], (size_t)t->n_pairs[s] * sizeof(double))))
            die("%s: drafter for %s: expected the model's own rotation of %s layers, got another one; try the drafter "
                "that was made for this model", b->g->path, m->gguf.path, s ? "sliding" : "global");
    }
}

// The target's layers whose outputs a DFlash drafter reads. Mainline files count inputs: that of layer v is the output
// of v - 1.
static void load_taps(Model *m, const char *key, int first) {
    Drafter *d = &m->drafter;
    Gguf *g = &d->gguf;
    int64_t ids[MAX_LAYERS];
    const GgufKv *kv = gguf_find_kv(g, key);
    if (!kv || kv->type != GGUF_V_ARRAY || kv->count < 1 || kv->count > MAX_LAYERS)
        die("%s: key '%s': expected 1 to %d layers of %s that it reads; without them it cannot be run (E_META_MISSING)",
            g->path, key, MAX_LAYERS, m->gguf.path);
    d->n_taps = (int)kv->count;
    if (gguf_get_ints(g, key, INT_MIN, INT_MAX, ids, kv->count) < 0) die_gguf(g);
    for (int i = 0; i < d->n_taps; i++) {
        const int64_t layer = ids[i] - first;
        if (layer < 0 || layer >= m->config.n_layers)
            die("%s: drafter for %s: key '%s': expected %d to %d, as the model has %d layers, got %" PRId64 "; try the "
                "drafter that was made for this model", g->path, m->gguf.path, key, first,
                m->config.n_layers - 1 + first, m->config.n_layers, ids[i]);
        d->taps[i] = (int)layer;
        d->n_tapped = max_int(d->n_tapped, (int)layer + 1);
    }
}

// The layers of a DFlash drafter: which slide, and how wide they are.
static void load_dflash_layers(Model *m, int head_dim) {
    Drafter *d = &m->drafter;
    Gguf *g = &d->gguf;
    Config *c = &d->config;
    int64_t swa[MAX_LAYERS], kv_heads[MAX_LAYERS], ffn[MAX_LAYERS];
    for (int l = 0; l < c->n_layers; l++) swa[l] = l < c->n_layers - 1;          // unless the file says otherwise
    if (gguf_find_kv(g, drafter_key(d, "attention.sliding_window_pattern")))
        key_per_layer(g, drafter_key(d, "attention.sliding_window_pattern"), 0, INT_MAX, swa, c->n_layers);
    key_per_layer(g, drafter_key(d, "attention.head_count_kv"), 1, 1024, kv_heads, c->n_layers);
    key_per_layer(g, drafter_key(d, "feed_forward_length"), 1, 1 << 20, ffn, c->n_layers);
    for (int l = 0; l < c->n_layers; l++) {
        if (c->n_heads % kv_heads[l])
            die("%s: key '%s': layer %d: expected a divisor of %d heads, got %" PRId64 " (E_META_RANGE)", g->path,
                drafter_key(d, "attention.head_count_kv"), l, c->n_heads, kv_heads[l]);
        c->layer[l] = (LayerConfig){ .is_swa = swa[l] != 0, .head_dim = head_dim, .n_kv_heads = (int)kv_heads[l],
                                     .ffn_dim = (int)ffn[l], .kv_layer = l, .last_reader = l };
    }
}

// The config of a DFlash drafter, in the mainline dialect or an older one. What a file lacks is as in published ones.
static void load_dflash_config(Model *m) {
    Drafter *d = &m->drafter;
    Gguf *g = &d->gguf;
    Config *c = &d->config;
    const Config *t = &m->config;
    const bool older = strcmp(d->arch, "dflash") != 0;
#define KEY(key) drafter_key(d, key)
#define EITHER(key, older_key) drafter_key(d, older ? older_key : key)
    must_agree(m, "hidden size", key_int(g, KEY("embedding_length"), 1, 1 << 20, 0), t->dim);
    must_agree(m, "vocabulary", key_int(g, KEY("vocab_size"), 1, INT_MAX, t->vocab), t->vocab);
    c->dim = t->dim;
    c->vocab = t->vocab;
    c->n_layers  = (int)key_int(g, KEY("block_count"), 1, MAX_LAYERS, 0);
    c->n_heads   = (int)key_int(g, KEY("attention.head_count"), 1, 1024, 0);
    c->eps       = (float)key_float(g, KEY("attention.layer_norm_rms_epsilon"), 0);
    c->logit_cap = (float)key_float(g, EITHER("final_logit_softcapping", "dflash.logit_softcap"), t->logit_cap);
    c->rope_base = key_float(g, KEY("rope.freq_base"), 0);
    d->window     = (int)key_int(g, EITHER("attention.sliding_window", "dflash.sliding_window"), 1, MAX_CONTEXT, 2048);
    d->block_size = (int)key_int(g, EITHER("block_size", "dflash.block_size"), 2, STEP_ROWS, 0);
    d->mask_id    = (int)key_int(g, older ? KEY("dflash.mask_token_id") : "tokenizer.ggml.mask_token_id", 0,
                                 t->vocab - 1, -1);
    d->embedding_scale = (float)key_float(g, KEY("embedding_scale"), sqrt(c->dim));
    const int head_dim = (int)key_int(g, KEY("attention.key_length"), 32, MAX_HEAD_DIM, 0);
    if (head_dim % 32 || key_int(g, KEY("attention.value_length"), 1, INT_MAX, head_dim) != head_dim)
        die("%s: keys '%s' and value_length: expected the same multiple of 32 (E_META_RANGE)", g->path,
            KEY("attention.key_length"));
    d->attention_scale = (float)key_float(g, KEY("attention.scale"), 1 / sqrt(head_dim));
    const int64_t causal = key_int(g, KEY("attention.causal"), -1, 1, -1);         // -1: sliding layers alone are
    d->own[0] = causal == 1 ? OWN_CAUSAL : OWN_ALL;
    d->own[1] = causal == 0 ? OWN_ALL : OWN_CAUSAL;
    GgufStr activation = { "silu", 4 };
    if (gguf_get_str(g, KEY("hidden_activation"), &activation) < 0) die_gguf(g);
    if (!str_is(activation, "silu"))
        die("%s: key '%s': expected silu, got '%s' (E_META_RANGE)", g->path, KEY("hidden_activation"),
            shown(activation));
    load_dflash_layers(m, head_dim);
    load_taps(m, EITHER("target_layers", "dflash.target_layer_ids"), !older);
#undef EITHER
#undef KEY
}

static void bind_dflash_layer(Binder *b, const Config *c, LayerWeights *w, int l) {
    const LayerConfig *lc = &c->layer[l];
    const int q_dim = c->n_heads * lc->head_dim, kv_dim = lc->n_kv_heads * lc->head_dim, dim = c->dim;
    char name[80];
    if (find_tensor(b, NAME("attn_sinks.weight")))
        die("%s: tensor '%s': a drafter with attention sinks is not supported", b->g->path, name);
    bind_vector(b, &w->attn_norm, NAME("attn_norm.weight"), dim);
    bind_scaled(b, &w->attn_q, NAME("attn_q.weight"), q_dim, dim, 1);
    bind_scaled(b, &w->attn_k, NAME("attn_k.weight"), kv_dim, dim, 1);
    if (find_tensor(b, NAME("attn_v.weight"))) bind_scaled(b, &w->attn_v, name, kv_dim, dim, 1);
    bind_vector(b, &w->attn_q_norm, NAME("attn_q_norm.weight"), lc->head_dim);
    bind_vector(b, &w->attn_k_norm, NAME("attn_k_norm.weight"), lc->head_dim);
    bind_scaled(b, &w->attn_output, NAME("attn_output.weight"), dim, q_dim, 1);
    if (find_tensor(b, NAME("post_attention_norm.weight"))) bind_vector(b, &w->post_attention_norm, name, dim);
    bind_vector(b, &w->ffn_norm, NAME("ffn_norm.weight"), dim);
    bind_scaled(b, &w->ffn_gate, NAME("ffn_gate.weight"), lc->ffn_dim, dim, 1);
    bind_scaled(b, &w->ffn_up, NAME("ffn_up.weight"), lc->ffn_dim, dim, 1);
    bind_scaled(b, &w->ffn_down, NAME("ffn_down.weight"), dim, lc->ffn_dim, 1);
    if (find_tensor(b, NAME("post_ffw_norm.weight"))) bind_vector(b, &w->post_ffw_norm, name, dim);
    w->layer_output_scale = find_tensor(b, NAME("layer_output_scale.weight")) ? *host_vector(b, name, 1) : 1;
}
#undef NAME

static void bind_dflash(Model *m) {
    Drafter *d = &m->drafter;
    Binder *b = &d->binder;
    Config *c = &d->config;
    Weights *w = &d->weights;
    const char *fc = either_tensor(d, "fc.weight", either_tensor(d, "dflash.fc.weight", "dflash_fc.weight"));
    const char *norm = either_tensor(d, "enc.output_norm.weight",
                                     either_tensor(d, "dflash.hidden_norm.weight", "dflash_hidden_norm.weight"));
    const GgufTensor *t = find_tensor(b, fc);
    if (t) must_agree(m, "columns of fc, tapped layers times hidden size", (int64_t)t->ne[0],
                      (int64_t)d->n_taps * c->dim);
    if (find_tensor(b, "d2t"))
        die("%s: tensor 'd2t': a drafter with a vocabulary of its own is not supported", b->g->path);
    bind_scaled(b, &d->fc, fc, c->dim, d->n_taps * c->dim, 1);
    bind_vector(b, &d->hidden_norm, norm, c->dim);
    bind_vector(b, &w->output_norm, "output_norm.weight", c->dim);
    if (find_tensor(b, "token_embd.weight")) bind_table(b, &w->token_embd, "token_embd.weight", c->vocab, c->dim);
    if (find_tensor(b, "output.weight")) bind_scaled(b, &w->output, "output.weight", c->vocab, c->dim, 1);
    const int head_dim = c->layer[0].head_dim;
    const bool has_factors = find_tensor(b, "rope_freqs.weight") != NULL;
    bind_rope(b, w, 0, c->rope_base, head_dim, has_factors ? host_vector(b, "rope_freqs.weight", head_dim / 2) : NULL);
    for (int l = 0; l < c->n_layers; l++) bind_dflash_layer(b, c, &w->layer[l], l);
}

enum { MTP_DEPTH = 8 };       // tokens drafted at once, where nobody says how many

// Opens and checks a drafter for the model, which is bound already.
static void open_drafter(Model *m, const char *path) {
    Drafter *d = &m->drafter;
    Binder *b = &d->binder;
    open_model_file(&d->gguf, path);
    d->kind = drafter_kind(d, m->gguf.path);
    const bool is_block = d->kind == DRAFTER_DFLASH;
    if (is_block) load_dflash_config(m);
    else load_mtp_config(m);
    if (!m->options.draft_depth) m->options.draft_depth = is_block ? d->block_size - 1 : MTP_DEPTH;
    if (is_block) m->options.draft_depth = min_int(m->options.draft_depth, d->block_size - 1);
    b->g = &d->gguf;
    b->seen = alloc_or_die(d->gguf.n_tensors, 1);
    b->uploads = alloc_or_die(d->gguf.n_tensors, sizeof *b->uploads);
    d->weights.layer = alloc_or_die(d->config.n_layers, sizeof *d->weights.layer);
    if (is_block) bind_dflash(m);
    else bind_mtp(m);
    const size_t n_seqs = (size_t)m->options.n_seqs;
    d->sent.rows = alloc_or_die(n_seqs * (1 + (size_t)m->options.draft_depth), sizeof *d->sent.rows);
    d->sent.segs = alloc_or_die(n_seqs, sizeof *d->sent.segs);
    d->sent.of = alloc_or_die(n_seqs, sizeof *d->sent.of);
}

static void free_drafter(Drafter *d) {
    if (d->kind == DRAFTER_NONE) return;
    free(d->binder.seen);
    free(d->binder.uploads);
    free(d->weights.layer);
    free(d->order);
    free(d->sent.rows);
    free(d->sent.segs);
    free(d->sent.of);
    gguf_close(&d->gguf);
}

static int centroid_tokens(const Drafter *d) {         // how many get a logit; 0: all, there are no centroids
    return d->centroids.data ? d->n_centroids_used * (d->config.vocab / d->centroids.rows) : 0;
}

// What both kinds work on, with n rows at a time.
static void plan_draft_rows(Drafter *d, Arena *a, size_t n) {
    const Config *c = &d->config;
    const size_t dim = (size_t)c->dim, f = sizeof(float);
    size_t q_dim = 0, ffn_dim = 0;
    Forms att_out = { 0 }, ffn = { 0 };
    for (int l = 0; l < c->n_layers; l++) {
        add_reader(&att_out, &d->weights.layer[l].attn_output);
        add_reader(&ffn, &d->weights.layer[l].ffn_down);
        q_dim = (size_t)max_int((int)q_dim, c->n_heads * c->layer[l].head_dim);
        ffn_dim = (size_t)max_int((int)ffn_dim, c->layer[l].ffn_dim);
    }
    for (int i = 0; i < 2; i++) d->x[i] = take(a, n * dim, f);
    d->q = take(a, n * q_dim, f);
    d->att_out = take_act(a, att_out, n, q_dim);
    d->y = take(a, n * dim, f);
    d->ffn = take_act(a, ffn, n, ffn_dim);
    d->mlp = take(a, n * dim, f);
}

static void plan_mtp(Model *m, Arena *a) {
    Drafter *d = &m->drafter;
    const Config *c = &d->config;
    const size_t n = (size_t)m->options.n_seqs, target_dim = (size_t)m->config.dim, f = sizeof(float);
    d->rows = take(a, n, sizeof(Row));
    Forms pair = { 0 };
    add_reader(&pair, &d->pre_projection);
    d->pair = take_act(a, pair, n, 2 * target_dim);
    plan_draft_rows(d, a, n);
    d->hidden = take(a, n * target_dim, f);
    if (!d->centroids.data) return;
    d->token_order = take(a, (size_t)c->vocab, sizeof(int32_t));
    d->scores = take(a, n * (size_t)d->centroids.rows, f);
    d->head_logits = take(a, n * (size_t)centroid_tokens(d), f);
}

static int dflash_reach(const Drafter *d, int l) { return d->config.layer[l].is_swa ? d->window : DFLASH_REACH; }

static void plan_dflash(Model *m, Arena *a) {
    Drafter *d = &m->drafter;
    const Config *c = &d->config;
    const PlanOptions *o = &m->options;
    const size_t n_seqs = (size_t)o->n_seqs, n_batch = (size_t)o->n_batch, dim = (size_t)c->dim, f = sizeof(float);
    const size_t n = n_seqs * (1 + (size_t)o->draft_depth), taps = (size_t)d->n_taps * dim;
    const KvType type = o->k_type == KV_F32 ? KV_F32 : KV_F16;
    size_t kv_dim = 0;
    d->rows = take(a, n, sizeof(Row));
    plan_draft_rows(d, a, n < STEP_ROWS ? n : STEP_ROWS);
    d->hidden = take(a, n_seqs * (size_t)o->draft_depth * dim, f);
    for (int l = 0; l < c->n_layers; l++) {
        const LayerConfig *lc = &c->layer[l];
        Cache k = { .n_seqs = o->n_seqs, .n_kv_heads = lc->n_kv_heads, .head_dim = lc->head_dim,
                    .k = { .type = type, .dim = lc->head_dim }, .v = { .type = type, .dim = lc->head_dim } };
        k.slots = (int)round_up((size_t)min_int(o->n_ctx, dflash_reach(d, l) - 1) + STEP_ROWS, TILE_SLOTS);
        take_cache(a, &k);
        d->caches[l] = k;
        kv_dim = (size_t)max_int((int)kv_dim, lc->n_kv_heads * lc->head_dim);
    }
    d->len = take(a, n_seqs, sizeof(int32_t));
    d->inv_freq = take(a, (size_t)d->weights.n_pairs[0], sizeof(double));
    d->backlog = take(a, n_seqs * STEP_ROWS * taps, f);
    d->backlog_rows = take(a, STEP_ROWS, sizeof(Row));
    d->backlog_seg = take(a, 1, sizeof(Segment));
    d->backlog_n = take(a, 1, sizeof(int32_t));
    d->context = take(a, n_batch * dim, f);
    for (int i = 0; i < LAYERS_AT_ONCE; i++) d->k[i] = take(a, n_batch * kv_dim, f);
    for (int i = 0; i < LAYERS_AT_ONCE; i++) d->v[i] = take(a, n_batch * kv_dim, f);
}

static void plan_drafter(Model *m, Arena *a) {
    Drafter *d = &m->drafter;
    const size_t n = (size_t)m->options.n_seqs, before = a->used;
    for (int i = 0; i < d->binder.n_uploads; i++) {
        Upload *u = &d->binder.uploads[i];
        const size_t bytes = m->ops->weight_bytes(&u->tensor);
        u->room = bytes ? take(a, bytes, 1) : NULL;
    }
    d->segs = take(a, n, sizeof(Segment));
    d->of = take(a, n, sizeof(int32_t));
    if (d->kind == DRAFTER_MTP) plan_mtp(m, a);
    else plan_dflash(m, a);
    d->ids = m->s.next ? m->s.next + n : NULL;
    d->logits = m->s.found_logits;
    d->logsumexp = m->s.found_logsumexp;
    m->plan.drafter = a->used - before;
}

static void upload_drafter(Model *m) {
    Drafter *d = &m->drafter;
    for (int i = 0; i < d->binder.n_uploads; i++) upload(m->ops, &d->gguf, &d->binder.uploads[i], d->binder.uploads[i].room);
    d->uploaded = true;
}

// Fills the room that the plan has given to a drafter.
static void start_drafter(Model *m) {
    Drafter *d = &m->drafter;
    Row rows[STEP_ROWS] = { { 0 } };
    _Static_assert((int)MAX_SESSIONS <= (int)STEP_ROWS, "room for a row of each session");
    if (!m->options.lazy_draft) upload_drafter(m);
    if (d->kind == DRAFTER_DFLASH) {
        for (int i = 0; i < STEP_ROWS; i++) rows[i] = (Row){ .index = i, .depth = i };
        m->ops->copy(&(Copy){ d->backlog_rows, rows, STEP_ROWS * sizeof *rows, COPY_IN });
        m->ops->copy(&(Copy){ d->inv_freq, d->weights.inv_freq[0], (size_t)d->weights.n_pairs[0] * sizeof(double),
                              COPY_IN });
        return;
    }
    for (int i = 0; i < MAX_SESSIONS; i++) rows[i].seg = i;            // one for each segment; the target has tokens
    m->ops->copy(&(Copy){ d->rows, rows, (size_t)m->options.n_seqs * sizeof *rows, COPY_IN });
    if (d->order) m->ops->copy(&(Copy){ d->token_order, d->order, (size_t)d->config.vocab * sizeof *d->order,
                                        COPY_IN });
}

// The rest of a drafter's layer behind attention: what it adds, and the FFN, as in the target. Norms may be NULL.
static void draft_feed_forward(Model *m, const LayerWeights *w, int n, ActFn fn, In *stream) {
    Drafter *d = &m->drafter;
    const Act att_out = act_for(&w->attn_output, d->att_out), ffn = act_for(&w->ffn_down, d->ffn);
    multiply(m, n, (In){ .act = att_out }, &w->attn_output, d->y);
    stream->delta[0] = d->y;
    stream->w_post = w->post_attention_norm;

    m->ops->gate_up(&(GateUp){ .n_rows = n, .in = enter(d->x, stream, w->ffn_norm), .gate = &w->ffn_gate,
                               .up = &w->ffn_up, .fn = fn, .out = ffn });
    multiply(m, n, (In){ .act = ffn }, &w->ffn_down, d->mlp);
    stream->delta[0] = d->mlp;
    stream->w_post = w->post_ffw_norm;
    stream->scale = w->layer_output_scale;
}

// A layer of an MTP assistant: as in the target, but K and V are the donor's, and only committed rows are seen.
static void mtp_layer(Model *m, int l, const Batch *b, In *stream) {
    Drafter *d = &m->drafter;
    const LayerConfig *lc = &d->config.layer[l];
    const LayerWeights *w = &d->weights.layer[l];
    const Cache *cache = &m->caches[m->cache_of[d->donor[l]]];
    const int n = b->n_rows, n_heads = d->config.n_heads;
    const Act att_out = act_for(&w->attn_output, d->att_out);

    multiply(m, n, enter(d->x, stream, w->attn_norm), &w->attn_q, d->q);
    const QkvStore query = { .batch = b, .cache = cache, .n_heads = n_heads, .q = d->q, .w_q = w->attn_q_norm,
                             .v_norm = true, .rope = { m->s.inv_freq[lc->is_swa], m->weights.n_pairs[lc->is_swa] },
                             .eps = d->config.eps };
    m->ops->attend(&(Attend){ .batch = b, .cache = cache, .n_heads = n_heads, .q = d->q,
                              .window = lc->is_swa ? d->window : 0,
                              .own = OWN_NONE, .scale = 1, .store = &query, .out = att_out });
    draft_feed_forward(m, w, n, ACT_GELU, stream);
}

// The candidates for the k-th token, from the stream behind the last layer, normed.
static void mtp_head(Model *m, int k, int n, In stream) {
    Drafter *d = &m->drafter;
    const int width = m->options.draft_width;
    int32_t *ids = d->ids + (size_t)k * n * width;
    float *logits = d->logits + (size_t)k * n * width, *logsumexp = d->logsumexp + (size_t)k * n;
    if (d->centroids.data)
        m->ops->head_centroid(&(HeadCentroid){ .n_rows = n, .in = stream, .centroids = &d->centroids,
                                               .w = &d->weights.token_embd, .order = d->token_order,
                                               .n_used = d->n_centroids_used, .scores = d->scores,
                                               .logits = d->head_logits, .top_k = width, .top_ids = ids,
                                               .top_logits = logits, .logsumexp = logsumexp });
    else
        m->ops->head(&(Head){ .n_rows = n, .in = stream, .w = &d->weights.token_embd, .top_k = width, .top_ids = ids,
                              .top_logits = logits, .logsumexp = logsumexp });
}

static void draft_mtp(Model *m, int n, int depth) {
    Drafter *d = &m->drafter;
    const State *s = &m->s;
    const int width = m->options.draft_width;
    const Batch b = { .rows = d->rows, .segs = d->segs, .len = s->len, .n_rows = n, .n_segs = n };
    const Act pair = act_for(&d->pre_projection, d->pair);
    In stream = { 0 };
    for (int k = 0; k < depth; k++) {
        Pair begin = { .n_rows = n, .table = &m->weights.token_embd, .scale = sqrtf((float)m->config.dim), .of = d->of,
                       .tokens = s->next, .token_stride = 1, .hidden = s->hidden, .row = s->last, .out = pair };
        if (k) {                                       // go on from what the last pass found
            multiply(m, n, stream, &d->post_projection, d->hidden);
            begin.of = begin.row = NULL;
            begin.tokens = d->ids + (size_t)(k - 1) * n * width;
            begin.token_stride = width;
            begin.hidden = d->hidden;
        }
        m->ops->pair(&begin);
        multiply(m, n, (In){ .act = pair }, &d->pre_projection, d->x[0]);
        stream = (In){ .x = d->x[0], .scale = 1, .eps = d->config.eps };
        for (int l = 0; l < d->config.n_layers; l++) mtp_layer(m, l, &b, &stream);
        stream.w_pre = d->weights.output_norm;
        mtp_head(m, k, n, stream);
    }
}

// Rows of a batch that a ring would have lost when the last ones are stored.
static int rows_lost(const Drafter *d, int l, const Batch *b) {
    return b->n_segs == 1 ? max_int(0, b->n_rows - d->caches[l].slots) : 0;
}

// Takes rows, whose taps (n_rows, n_taps * dim) are given, into the contexts of their sessions: a row of K and V in every
// layer. Of each segment n_accept rows stay. A segment with more rows than a ring holds is alone: its last rows are stored.
static void take_context(Model *m, const Batch *b, const float *taps, const int32_t *n_accept, const int32_t *path) {
    Drafter *d = &m->drafter;
    const Config *c = &d->config;
    multiply(m, b->n_rows, (In){ .x = taps, .scale = 1 }, &d->fc, d->context);
    for (int l = 0, n; l < c->n_layers; l += n) {
        const int skip = rows_lost(d, l, b);
        Batch last = *b;
        last.rows += skip;
        last.n_rows -= skip;
        Matmul kv = { .n_rows = last.n_rows, .in = { .x = d->context + (size_t)skip * (size_t)c->dim, .scale = 1,
                                                     .w_pre = d->hidden_norm, .eps = c->eps } };
        for (n = 0; n < LAYERS_AT_ONCE && l + n < c->n_layers && rows_lost(d, l + n, b) == skip; n++) {
            const LayerWeights *w = &d->weights.layer[l + n];
            kv.w[kv.n] = &w->attn_k, kv.out[kv.n++] = d->k[n];
            if (w->attn_v.data) kv.w[kv.n] = &w->attn_v, kv.out[kv.n++] = d->v[n];
        }
        m->ops->matmul(&kv);
        for (int i = 0; i < n; i++) {
            const LayerWeights *w = &d->weights.layer[l + i];
            const bool has_v = w->attn_v.data != NULL;
            m->ops->qkv_store(&(QkvStore){ .batch = &last, .cache = &d->caches[l + i], .n_heads = c->n_heads,
                                           .k = d->k[i], .v = has_v ? d->v[i] : d->k[i], .w_k = w->attn_k_norm,
                                           .v_norm = !has_v, .rope = { d->inv_freq, d->weights.n_pairs[0] },
                                           .eps = c->eps });
        }
    }
    m->ops->kv_commit(&(KvCommit){ .batch = b, .caches = d->caches, .n_caches = c->n_layers, .n_accept = n_accept,
                                   .path = path });
}

// What else the operations of a drafter's commit depend on: StepKey.variant. Of a backlog also its session.
enum { TAKES_KNOWN, TAKES_WALKED, TAKES_PATHS = 2, TAKES_BACKLOG = 4 };

static void count_written(Drafter *d, int seq, int end) { d->seen[seq] = max_int(d->seen[seq], end); }

// Takes in the backlog of a session, which ends at token `end` of it. The rows are as many as a power of two, so that
// few kinds of steps are recorded; those behind the backlog do not stay.
static void take_backlog(Model *m, int seq, int end) {
    Drafter *d = &m->drafter;
    const int32_t waiting = d->waiting[seq];
    int n = 1;
    if (!waiting) return;
    while (n < waiting) n *= 2;
    const Segment seg = { .seq = seq, .n = n };
    m->ops->copy(&(Copy){ d->backlog_seg, &seg, sizeof seg, COPY_IN });
    m->ops->copy(&(Copy){ d->backlog_n, &waiting, sizeof waiting, COPY_IN });
    const Batch b = { .rows = d->backlog_rows, .segs = d->backlog_seg, .len = d->len, .n_rows = n, .n_segs = 1 };
    const size_t taps = (size_t)d->n_taps * (size_t)d->config.dim;
    if (m->ops->begin((StepKey){ .model = m->number + 1, .kind = STEP_COMMIT, .rows = n, .segs = 1,
                                 .variant = TAKES_BACKLOG + seq }))
        take_context(m, &b, d->backlog + (size_t)seq * STEP_ROWS * taps, d->backlog_n, NULL);
    m->ops->end();
    count_written(d, seq, end - waiting + n);
    d->waiting[seq] = 0;
}

// The first n rows of a chain of the last step, which ends at token `end` of its session, wait in the backlog.
static void let_wait(Model *m, const Segment *seg, int n, int end) {
    Drafter *d = &m->drafter;
    const int seq = seg->seq;
    const size_t taps = (size_t)d->n_taps * (size_t)d->config.dim;
    if (d->waiting[seq] + n > STEP_ROWS && d->uploaded) take_backlog(m, seq, end - n);
    if (d->waiting[seq] + n > STEP_ROWS) d->waiting[seq] = 0, d->start[seq] = end - n;
    const size_t at = (size_t)seq * STEP_ROWS + (size_t)d->waiting[seq];
    if (n) m->ops->copy(&(Copy){ d->backlog + at * taps, m->s.tapped + (size_t)seg->first * taps,
                                 (size_t)n * taps * sizeof(float), COPY_WITHIN });
    d->waiting[seq] += n;
}

// To be called behind every kv_commit of the last step's rows, before the next step: what became part of sessions
// becomes part of a DFlash drafter's context. n_accept: rows of each segment, on the host, which has counted them in
// m->len; they and the paths of trees are in m->s too. NULL: nobody knows yet, m->s.walked and .path say so in backend
// memory. Chains of few rows wait, for until a draft is wanted. As long as the weights of a lazy drafter were not
// wanted, no more than that is kept.
static void drafter_committed(Model *m, const int32_t *n_accept) {
    Drafter *d = &m->drafter;
    State *s = &m->s;
    bool wait = n_accept != NULL, trees = false;
    if (d->kind != DRAFTER_DFLASH) return;
    for (int i = 0; i < m->step.n_segs; i++) {
        trees |= m->step.segs[i].kind == SEG_TREE;
        wait = wait && !trees && n_accept[i] <= STEP_ROWS;
    }
    const bool forget = n_accept && !wait && !d->uploaded;
    if (!wait && !forget && !d->uploaded) upload_drafter(m);
    for (int i = 0; i < m->step.n_segs; i++) {
        const Segment *seg = &m->step.segs[i];
        const int seq = seg->seq, before = m->len[seq] - (n_accept ? n_accept[i] : 0);
        assert(m->step.n_segs == 1 || seg->n <= STEP_ROWS);
        count_written(d, seq, before + d->drafted[seq]);
        d->drafted[seq] = 0;
        if (wait) let_wait(m, seg, n_accept[i], m->len[seq]);
        else if (forget) d->start[seq] = m->len[seq], d->waiting[seq] = 0;
        else take_backlog(m, seq, before), count_written(d, seq, before + seg->n);
    }
    if (wait || forget) return;
    const Batch b = step_batch(m, d->len);
    if (m->ops->begin((StepKey){ .model = m->number + 1, .kind = m->step.n_rows > STEP_ROWS ? STEP_PROMPT : STEP_COMMIT,
                                 .rows = m->step.n_rows, .segs = m->step.n_segs,
                                 .variant = (n_accept ? TAKES_KNOWN : TAKES_WALKED) | (trees ? TAKES_PATHS : 0) }))
        take_context(m, &b, s->tapped, n_accept ? s->n_accept : s->walked, trees ? s->path : NULL);
    m->ops->end();
}

// Session seq becomes n tokens long. Where the drafter's context does not reach back, or was not told what came since,
// it starts anew behind them.
static void shorten_drafter(Model *m, int seq, int n) {
    Drafter *d = &m->drafter;
    if (d->kind != DRAFTER_DFLASH) return;
    const int stored = m->len[seq] - d->waiting[seq], seen = max_int(d->seen[seq], m->len[seq] + d->drafted[seq]);
    bool keeps = n > d->start[seq] && n <= m->len[seq];
    for (int l = 0; l < d->config.n_layers && n < stored; l++) {
        const int slots = d->caches[l].slots;
        if (slots < seen - d->start[seq] && seen - n > slots - (dflash_reach(d, l) - 1)) keeps = false;
    }
    d->seen[seq] = keeps ? seen : n;
    d->drafted[seq] = 0;
    if (!keeps) d->start[seq] = n;
    d->waiting[seq] = keeps ? max_int(0, n - stored) : 0;
    const int32_t len = n - d->waiting[seq] - d->start[seq];
    m->ops->copy(&(Copy){ d->len + seq, &len, sizeof len, COPY_IN });
}

// A layer of a DFlash drafter on rows of blocks.
static void dflash_layer(Model *m, int l, const Batch *b, In *stream) {
    Drafter *d = &m->drafter;
    const Config *c = &d->config;
    const LayerWeights *w = &d->weights.layer[l];
    const Cache *cache = &d->caches[l];
    const int n = b->n_rows;
    const bool has_v = w->attn_v.data != NULL;
    const Act att_out = act_for(&w->attn_output, d->att_out);

    m->ops->matmul(&(Matmul){ .n_rows = n, .in = enter(d->x, stream, w->attn_norm), .n = has_v ? 3 : 2,
                              .w = { &w->attn_q, &w->attn_k, &w->attn_v }, .out = { d->q, d->k[0], d->v[0] } });
    const QkvStore store = { .batch = b, .cache = cache, .n_heads = c->n_heads, .q = d->q, .k = d->k[0],
                             .v = has_v ? d->v[0] : d->k[0], .w_q = w->attn_q_norm, .w_k = w->attn_k_norm,
                             .v_norm = !has_v, .rope = { d->inv_freq, d->weights.n_pairs[0] }, .eps = c->eps };
    m->ops->attend(&(Attend){ .batch = b, .cache = cache, .n_heads = c->n_heads, .q = d->q,
                              .window = dflash_reach(d, l), .own = d->own[c->layer[l].is_swa],
                              .scale = d->attention_scale, .store = &store, .out = att_out });
    draft_feed_forward(m, w, n, ACT_SILU, stream);
}

// Blocks of 1 + depth rows, as many at a time as make a step. The rows behind the first of each go to the head, those
// of all blocks together: of one block they lie together already.
static void draft_dflash(Model *m, int n, int depth) {
    Drafter *d = &m->drafter;
    const int dim = d->config.dim, block = 1 + depth, most = STEP_ROWS / block;
    const Weights *w = &d->weights, *target = &m->weights;
    const Tensor *head = w->output.data ? &w->output : target->output.data ? &target->output : &target->token_embd;
    In in = { .x = d->hidden, .scale = 1, .eps = d->config.eps };
    move_rows(m, n, 1, m->s.next, 1, d->of, &d->rows->token, block * (int)(sizeof(Row) / sizeof(int32_t)));
    for (int first = 0; first < n; first += most) {
        const int n_blocks = min_int(most, n - first);
        const Batch b = { .rows = d->rows + (size_t)first * (size_t)block, .segs = d->segs, .len = d->len,
                          .n_rows = n_blocks * block, .n_segs = n };
        m->ops->embed(&(Embed){ .batch = &b, .table = w->token_embd.data ? &w->token_embd : &target->token_embd,
                                .scale = d->embedding_scale, .out = d->x[0] });
        In stream = { .x = d->x[0], .scale = 1, .eps = d->config.eps };
        for (int l = 0; l < d->config.n_layers; l++) dflash_layer(m, l, &b, &stream);
        if (n == 1) {
            in = stream;
            in.x += dim, in.delta[0] += dim;
            break;
        }
        m->ops->close(&(Close){ .n_rows = b.n_rows, .cols = dim, .in = enter(d->x, &stream, NULL) });
        for (int i = 0; i < n_blocks; i++)
            move_rows(m, depth, dim, stream.x + (size_t)(i * block + 1) * (size_t)dim, dim, NULL,
                      d->hidden + (size_t)(first + i) * (size_t)dim, n * dim);
    }
    in.w_pre = w->output_norm;
    m->ops->head(&(Head){ .n_rows = n * depth, .in = in, .w = head, .cap = d->config.logit_cap,
                          .top_k = m->options.draft_width, .top_ids = d->ids, .top_logits = d->logits,
                          .logsumexp = d->logsumexp });
}

// Issues the drafting of `depth` tokens for n of the last step's segments (their numbers, on the host), whose tokens
// are chosen, walked and committed: candidates go to m->drafter.ids, .logits (depth, n, draft_width) and .logsumexp
// (depth, n), in backend memory.
static void issue_draft(Model *m, const int32_t *segs, int n, int depth) {
    Drafter *d = &m->drafter;
    const bool is_block = d->kind == DRAFTER_DFLASH;
    const int rows = is_block ? 1 + depth : 1;         // for each segment
    Segment of[MAX_SESSIONS];
    assert(d->kind != DRAFTER_NONE && n >= 1 && n <= m->step.n_segs && depth >= 1 && depth <= m->options.draft_depth);
    if (!d->uploaded) upload_drafter(m);
    for (int i = 0; i < n; i++) {
        const Segment *seg = &m->step.segs[segs[i]];
        of[i] = (Segment){ .seq = seg->seq, .first = i * rows, .n = rows, .kind = SEG_CHAIN };
        if (!is_block) continue;
        take_backlog(m, seg->seq, m->len[seg->seq]);
        d->drafted[seg->seq] = max_int(d->drafted[seg->seq], rows);
    }
    if (is_block) {
        Row block[MAX_SESSIONS * STEP_ROWS];
        for (int r = 0; r < n * rows; r++)
            block[r] = (Row){ .token = d->mask_id, .seg = r / rows, .index = r % rows, .depth = r % rows };
        send_new(m, d->rows, d->sent.rows, block, (size_t)(n * rows) * sizeof *block);
    }
    send_new(m, d->segs, d->sent.segs, of, (size_t)n * sizeof *of);
    send_new(m, d->of, d->sent.of, segs, (size_t)n * sizeof *segs);
    if (m->ops->begin((StepKey){ .model = m->number + 1, .kind = STEP_DRAFT, .rows = n * rows, .segs = n,
                                 .kept = depth })) {
        if (is_block) draft_dflash(m, n, depth);
        else draft_mtp(m, n, depth);
    }
    m->ops->end();
}

// ==== [7] Memory: the plan, loading ===================================================================================
// All backend memory of a model and its drafter, but the backend's own scratch, is planned here and reserved in one
// piece at start. Forward's activations are sized for n_batch rows; what has to fit decides how many these are, and how
// long a context.

// Rows of quantised types are whole groups, and a tied row has one type.
static void check_kv_types(const Model *m, int layer, const Cache *c) {
    const KvPlane *planes[] = { &c->k, &c->v };
    if (c->n_rot && c->k.type != c->v.type)
        die("-ctk, -ctv: expected one type, since layer %d stores K and V as one row, got %s and %s; try --kv-layout "
            "untied", layer, kv_names[c->k.type], kv_names[c->v.type]);
    for (int i = 0; i < 2; i++)
        if (kv_group(planes[i]->type) && planes[i]->dim % KV_TURN)
            die("%s: a cache of type %s: expected rows of a multiple of %d values, got %d in layer %d; try -ctk f16%s",
                m->gguf.path, kv_names[planes[i]->type], KV_TURN, planes[i]->dim, layer,
                c->n_rot ? " or --kv-layout untied" : "");
}

// The caches of all layers that own one, and the stage that their rows pass through in prompt steps.
static void plan_caches(Model *m, Arena *a) {
    const Config *c = &m->config;
    const PlanOptions *o = &m->options;
    const KvType ring_type = o->ring_type != KV_F32 ? o->ring_type : o->k_type == KV_F32 ? KV_F32 : KV_F16;
    int stage_dim = 0;                                 // values of a row of all heads, in the widest ring
    m->n_caches = 0;
    for (int l = 0; l < c->first_shared; l++) {
        const LayerConfig *lc = &c->layer[l];
        const LayerWeights *w = &m->weights.layer[l];
        Cache k = { .n_seqs = o->n_seqs, .n_kv_heads = lc->n_kv_heads, .head_dim = lc->head_dim };
        k.slots = (int)round_up((size_t)o->n_ctx + STEP_ROWS, TILE_SLOTS);
        k.k = (KvPlane){ .type = o->k_type, .dim = lc->head_dim };
        k.v = (KvPlane){ .type = o->v_type, .dim = lc->head_dim };
        if (lc->is_swa) {
            k.slots = min_int(k.slots, (int)round_up((size_t)c->n_swa - 1 + STEP_ROWS, TILE_SLOTS));
            k.k.type = k.v.type = ring_type;
            stage_dim = max_int(stage_dim, lc->n_kv_heads * lc->head_dim);
        } else if (!w->attn_v.data && !o->untied) {
            k.n_rot = m->weights.n_pairs[0];
            k.k.dim = 2 * k.n_rot;
            k.fold = w->attn_k_norm;
        }
        check_kv_types(m, l, &k);
        if (!lc->is_swa && o->tail && (kv_group(k.k.type) || kv_group(k.v.type))) {
            k.tail_slots = (int)round_up((size_t)o->tail + STEP_ROWS, TILE_SLOTS);
            k.k_tail = (KvPlane){ .type = KV_F16, .dim = k.k.dim };
            k.v_tail = (KvPlane){ .type = KV_F16, .dim = k.v.dim };
        }
        const size_t before = a->used;
        take_cache(a, &k);
        *(lc->is_swa ? &m->plan.kv_rings : &m->plan.kv_global) += a->used - before;
        m->cache_of[l] = m->n_caches;
        m->caches[m->n_caches++] = k;
    }
    for (int l = c->first_shared; l < c->n_layers; l++) m->cache_of[l] = m->cache_of[c->layer[l].kv_layer];

    const size_t before = a->used;
    m->stage = (Cache){ .n_seqs = 1, .n_kv_heads = 1, .slots = (int)round_up(o->n_batch, TILE_SLOTS),
                        .k = { .type = ring_type, .dim = stage_dim }, .v = { .type = ring_type, .dim = stage_dim } };
    take_cache(a, &m->stage);
    m->plan.stage = a->used - before;
}

// What a step of at most n rows needs from one layer to the next, and behind the last.
static void plan_stream(const Model *m, Arena *a, State *s, size_t n, size_t kept) {
    const Config *c = &m->config;
    const size_t dim = (size_t)c->dim, ple = (size_t)c->n_layers * (size_t)c->ple_dim, f = sizeof(float);
    s->rows = take(a, n, sizeof(Row));
    s->kept_rows = take(a, kept, sizeof(Row));
    s->segs = take(a, (size_t)m->options.n_seqs, sizeof(Segment));
    s->kept_index = take(a, kept, sizeof(int32_t));
    for (int i = 0; i < 2; i++) s->x[i] = take(a, n * dim, f);
    s->y = take(a, n * dim, f);
    s->mlp = take(a, n * dim, f);
    s->moe = c->n_experts ? take(a, n * dim, f) : NULL;
    s->ple = ple ? take(a, n * ple, f) : NULL;
    s->ple_kept = ple ? take(a, kept * ple, f) : NULL;
    s->logits = take(a, kept * (size_t)c->vocab, f);
    s->hidden = take(a, kept * dim, f);
    const size_t taps = (size_t)m->drafter.n_taps * (size_t)m->drafter.config.dim;
    s->tapped = taps ? take(a, n * taps, f) : NULL;
}

static void plan_state(Model *m, Arena *a) {
    const Config *c = &m->config;
    const PlanOptions *o = &m->options;
    State *s = &m->s;
    size_t q_dim = 0, kv_dim = 0, ffn_dim = 0;
    Forms att_out = { 0 }, ffn = { 0 }, expert = { 0 }, ple_gate = { 0 };
    for (int l = 0; l < c->n_layers; l++) {
        const LayerConfig *lc = &c->layer[l];
        const LayerWeights *w = &m->weights.layer[l];
        add_reader(&att_out, &w->attn_output);
        add_reader(&ffn, &w->ffn_down);
        add_reader(&expert, &w->ffn_down_exps);
        add_reader(&ple_gate, &w->proj);
        q_dim = (size_t)max_int((int)q_dim, c->n_heads * lc->head_dim);
        kv_dim = (size_t)max_int((int)kv_dim, lc->n_kv_heads * lc->head_dim);
        ffn_dim = (size_t)max_int((int)ffn_dim, lc->ffn_dim);
    }
    const size_t n = (size_t)o->n_batch, kept = (size_t)o->n_logits, seqs = (size_t)o->n_seqs;
    const size_t used = (size_t)c->n_experts_used, f = sizeof(float);
    plan_stream(m, a, s, o->between ? STEP_ROWS : n, kept);
    s->len = take(a, seqs, sizeof(int32_t));
    s->n_accept = take(a, seqs, sizeof(int32_t));
    s->path = take(a, seqs * STEP_ROWS, sizeof(int32_t));
    s->last = take(a, 2 * seqs, sizeof(int32_t));
    s->walked = s->last ? s->last + seqs : NULL;       // from here on what a Verdict reads, in one piece
    s->chosen = take(a, kept, sizeof(int32_t));
    const size_t drafted = o->drafter ? (size_t)o->draft_depth * seqs : 0, found = drafted * (size_t)o->draft_width;
    s->next = take(a, seqs + found, sizeof(int32_t));
    s->found_logits = take(a, found, f);
    s->found_logsumexp = take(a, drafted, f);
    s->feed = take(a, STEP_ROWS, sizeof(int32_t));
    s->q = take(a, n * q_dim, f);
    s->k = take(a, n * kv_dim, f);
    s->v = take(a, n * kv_dim, f);
    s->att_out = take_act(a, att_out, n, q_dim);
    s->ffn = take_act(a, ffn, n, ffn_dim);
    if (c->n_experts) {
        s->expert = take_act(a, expert, n * used, c->expert_dim);
        s->router = take(a, n * (size_t)c->n_experts, f);
        s->expert_weights = take(a, n * used, f);
        s->expert_ids = take(a, n * used, sizeof(int32_t));
    }
    if (c->ple_dim) s->ple_gate = take_act(a, ple_gate, n, c->ple_dim);
    s->mask = take(a, kept * round_up((size_t)c->vocab, 32) / 32, sizeof(uint32_t));
    s->params = take(a, seqs, sizeof(SampleParams));
    s->counts = o->penalties ? take(a, seqs * (size_t)c->vocab, sizeof(int32_t)) : NULL;
    s->bias = o->bias ? take(a, seqs * (size_t)c->vocab, f) : NULL;
    for (int t = 0; t < 2; t++) s->inv_freq[t] = take(a, (size_t)m->weights.n_pairs[t], sizeof(double));
    const size_t widest = (size_t)max_int(max_int((int)q_dim, (int)kv_dim), c->dim);
    for (int i = 0; i < 5; i++) s->dump[i] = m->dump_dir ? take(a, n * widest, f) : NULL;
}

// What block_select works on, where prompts are sparse.
static void plan_blocks(Model *m, Arena *a) {
    const PlanOptions *o = &m->options;
    State *s = &m->s;
    size_t kv_heads = 0, head_dim = 0;
    if (!o->pflash && !o->pflash_density) return;
    for (int i = 0; i < m->n_caches; i++) {            // rings are seen whole, and have no more slots than others
        kv_heads = (size_t)max_int((int)kv_heads, m->caches[i].n_kv_heads);
        head_dim = (size_t)max_int((int)head_dim, m->caches[i].head_dim);
    }
    s->blocks.n_blocks = (o->n_ctx + STEP_ROWS + TILE_SLOTS) / SELECT_KEYS + 1;
    const size_t n_blocks = (size_t)s->blocks.n_blocks, rows = ((size_t)o->n_batch + SELECT_ROWS - 1) / SELECT_ROWS;
    s->blocks.n = take(a, rows * kv_heads, sizeof(int32_t));
    s->blocks.block = take(a, rows * kv_heads * n_blocks, sizeof(int32_t));
    s->block_means = take(a, (size_t)o->n_seqs * kv_heads * n_blocks * head_dim, sizeof(float));
    s->block_scores = take(a, rows * (size_t)m->config.n_heads * n_blocks, sizeof(float));
    s->block_weights = take(a, rows * kv_heads * n_blocks, sizeof(float));
    s->block_count = take(a, 2, sizeof(int64_t));
}

// What scoring tokens works on.
static void plan_scores(Model *m, Arena *a) {
    const Config *c = &m->config;
    State *s = &m->s;
    if (!m->options.scores) return;
    m->n_scored = layers_scored(c);
    s->n_keys = (int)round_up((size_t)m->options.n_ctx + STEP_ROWS, TILE_SLOTS);
    s->shares = take(a, (size_t)LOOK_ROWS * (size_t)c->n_heads * (size_t)s->n_keys, sizeof(float));
    s->mass = take(a, (size_t)LOOK_ROWS * (size_t)s->n_keys, sizeof(float));
}

static Limits plan_limits(const Model *m) {
    const Config *c = &m->config;
    const Limits *with = &m->options.beside;
    Limits lim = { .max_rows = m->options.n_batch, .max_experts = c->n_experts_used, .vocab = c->vocab,
                   .max_cols = max_int(max_int(c->dim, c->expert_dim), c->n_layers * c->ple_dim) };
    for (int l = 0; l < c->n_layers; l++)
        lim.max_cols = max_int(lim.max_cols, max_int(c->layer[l].ffn_dim, c->n_heads * c->layer[l].head_dim));
    const Config *d = &m->drafter.config;
    for (int l = 0; l < d->n_layers; l++)
        lim.max_cols = max_int(lim.max_cols, max_int(d->layer[l].ffn_dim, d->n_heads * d->layer[l].head_dim));
    if (m->drafter.kind == DRAFTER_MTP) lim.max_cols = max_int(lim.max_cols, 2 * c->dim);
    if (m->drafter.kind == DRAFTER_DFLASH) {
        lim.max_cols = max_int(lim.max_cols, m->drafter.n_taps * c->dim);
        lim.max_rows = max_int(lim.max_rows, m->options.n_seqs * m->options.draft_depth);
    }
    lim.max_rows = max_int(lim.max_rows, with->max_rows), lim.max_cols = max_int(lim.max_cols, with->max_cols);
    lim.max_experts = max_int(lim.max_experts, with->max_experts), lim.vocab = max_int(lim.vocab, with->vocab);
    return lim;
}

// Everything that lives in backend memory, in one pass: weights, caches, activations. Called to count, as often as
// plans are compared, and then once to place.
static void plan_memory(Model *m, Arena *a) {
    const size_t to_upload = m->plan.weights + m->plan.in_host;    // known once it was counted
    m->plan = (Plan){ 0 };
    if (a->base && to_upload) progress(model_name(m), 0, to_upload, "B");
    for (int i = 0; i < m->binder.n_uploads; i++) {
        Upload *u = &m->binder.uploads[i];
        Tensor on_device = u->tensor;
        on_device.in_host = false;
        const size_t bytes = m->ops->weight_bytes(&u->tensor);
        void *dst = bytes ? take(a, bytes, 1) : NULL;
        m->plan.weights += bytes;
        m->plan.in_host += u->tensor.in_host ? m->ops->weight_bytes(&on_device) : 0;
        if (!a->base) continue;
        upload(m->ops, &m->gguf, u, dst);
        if (to_upload) progress(model_name(m), m->plan.weights + m->plan.in_host, to_upload, "B");
    }
    plan_caches(m, a);
    const size_t before = a->used;
    plan_state(m, a);
    plan_blocks(m, a);
    plan_scores(m, a);
    m->other.s = m->s;
    if (m->options.between) plan_stream(m, a, &m->other.s, (size_t)m->options.n_batch, 1);
    m->plan.activations = a->used - before;
    if (m->drafter.kind != DRAFTER_NONE) plan_drafter(m, a);
    const Limits lim = plan_limits(m);
    m->plan.scratch = m->ops->scratch_bytes(&lim);
}

// Tokens that the file forbids to sample (tokenizer.ggml.suppress_tokens) leave the mask; all others stay.
static void load_mask(Model *m) {
    const size_t words = round_up((size_t)m->config.vocab, 32) / 32;
    uint32_t *mask = m->sampled = alloc_or_die(words, sizeof *mask);
    m->fitting = alloc_or_die(words, sizeof *mask);
    for (int i = 0; i < m->config.vocab; i++) mask[i / 32] |= 1u << (i % 32);
    const GgufKv *kv = gguf_find_kv(&m->gguf, "tokenizer.ggml.suppress_tokens");
    if (kv && kv->type == GGUF_V_ARRAY && kv->count) {
        if (kv->count > (uint64_t)m->config.vocab)
            die("%s: key 'tokenizer.ggml.suppress_tokens': expected at most %d ids (E_META_ARRAY)", m->gguf.path,
                m->config.vocab);
        int64_t *ids = alloc_or_die(kv->count, sizeof *ids);
        if (gguf_get_ints(&m->gguf, "tokenizer.ggml.suppress_tokens", 0, m->config.vocab - 1, ids, kv->count) < 0)
            die_gguf(&m->gguf);
        for (uint64_t i = 0; i < kv->count; i++) {
            m->n_suppressed += mask[ids[i] / 32] >> (ids[i] % 32) & 1;
            mask[ids[i] / 32] &= ~(1u << (ids[i] % 32));
        }
        free(ids);
    }
    for (int r = 0; r < m->options.n_logits; r++)
        m->ops->copy(&(Copy){ m->s.mask + (size_t)r * words, mask, words * sizeof *mask, COPY_IN });
}

// Plans for a context of n_ctx tokens. Returns the bytes that have to be there: the arena, the backend's scratch, and
// weights that are read in the mapped file.
static size_t plan_context(Model *m, int n_ctx) {
    Arena arena = { 0 };
    m->options.n_ctx = n_ctx;
    plan_memory(m, &arena);
    return arena.used + m->plan.scratch + (m->plan.weights ? 0 : m->binder.bytes + m->drafter.binder.bytes);
}

// Leaves the table of per-layer embeddings, of which a token reads one row, in host memory, or puts it back. False:
// there is none, or the backend reads weights where they lie, or its memory is the host's.
static bool table_in_host(Model *m, bool in_host) {
    if (in_host && shares_memory(m->ops)) return false;
    for (int i = 0; i < m->binder.n_uploads && m->plan.weights; i++) {
        Upload *u = &m->binder.uploads[i];
        if (u->matrix != &m->weights.per_layer_token_embd) continue;
        u->tensor.in_host = in_host;
        return true;
    }
    return false;
}

// Plans for a context of n_ctx tokens in a budget: what does not fit with that table on the device gets it in host
// memory. Returns the bytes that have to be there, more than the budget if there is no room.
static size_t fit_context(Model *m, int n_ctx, size_t budget) {
    table_in_host(m, false);
    const size_t needed = plan_context(m, n_ctx);
    return needed > budget && table_in_host(m, true) ? plan_context(m, n_ctx) : needed;
}

// Bytes that a plan may take: what is free, less a 32nd part for what others take meanwhile. Where the user says how
// much there is: that, less what is taken already of a device's memory, as by the driver itself. In shared memory what the
// host will take counts as taken.
static size_t plan_budget(const Model *m) {
    size_t free_bytes, total;
    m->ops->memory(&free_bytes, &total);
    if (shares_memory(m->ops)) free_bytes -= free_bytes < m->options.host_memory ? free_bytes : m->options.host_memory;
    if (!m->options.memory) return free_bytes - free_bytes / 32;
    const size_t taken = m->ops->weight_bytes(&m->weights.token_embd) ? total - free_bytes : 0;
    return m->options.memory > taken ? m->options.memory - taken : 0;
}

// Finds n_batch for a context of n_ctx tokens, which has to have room, and prompts of up to `longest`.
static void fit_batch(Model *m, int n_ctx, int longest, size_t budget) {
    for (m->options.n_batch = LARGE_BATCH; m->options.n_batch > SMALL_BATCH; m->options.n_batch /= 2) {
        const size_t needed = fit_context(m, n_ctx, budget);
        const Plan *p = &m->plan;
        if (p->weights && m->options.n_batch / 2 < longest && needed <= budget &&
            p->activations + p->stage + p->scratch <= budget / 16) return;
    }
}

// The longest context, at most `most`, that the budget has room for; 0: not even the smallest.
static int largest_context(Model *m, int most, size_t budget) {
    int low = 0, high = (most - 1) / TILE_SLOTS + 1;   // in tiles: has room, has none
    if (fit_context(m, most, budget) <= budget) return most;
    while (high - low > 1) {
        const int mid = low + (high - low) / 2;
        *(fit_context(m, mid * TILE_SLOTS, budget) <= budget ? &low : &high) = mid;
    }
    return low * TILE_SLOTS;
}

// The plan has no room: what it needs, what there is, and what would have room.
__attribute__((noreturn)) static void die_no_room(Model *m) {
    const int n_ctx = m->options.n_ctx;
    const size_t budget = plan_budget(m);
    const double gib = 1 << 30, needed = (double)fit_context(m, n_ctx, budget), room = (double)budget;
    const Plan p = m->plan;
    const char *from = m->options.ctx_from;
    int most = largest_context(m, n_ctx, budget);
    if (most == n_ctx) most = n_ctx / 2 / TILE_SLOTS * TILE_SLOTS;   // free in pieces, or somebody was quicker
    char advice[96] = "";
    bool tailed = false;
    for (int i = 0; i < m->n_caches; i++) tailed |= m->caches[i].tail_slots > 0;
    if (most && !from) snprintf(advice, sizeof advice, "-c %d, ", most);
    if (most && from && *from) snprintf(advice, sizeof advice, "a smaller %.24s, ", from);
    if (m->options.k_type != KV_TQ3) {
        const KvType smaller = m->options.k_type == KV_F32 || m->options.k_type == KV_BF16 ? KV_F16 :
                               m->options.k_type == KV_F16 ? KV_Q8_0 : KV_TQ3;
        snprintf(advice + strlen(advice), 16, "-ctk %s, ", kv_names[smaller]);
    }
    if (tailed) strcat(advice, "a smaller --kv-tail, ");
    const bool refused = m->options.memory && needed <= room;          // --vram grants more than there is
    const size_t drafter_bytes = p.drafter + (p.weights ? 0 : m->drafter.binder.bytes);
    char drafter[32] = "";
    if (drafter_bytes) snprintf(drafter, sizeof drafter, ", drafter %.2f", (double)drafter_bytes / gib);
    const char *whose = refused ? " that --vram grants, but the backend has less" :
                        m->options.memory ? " that --vram grants" : " free";
    die("out of memory: a context of %d needs %.2f GiB (weights %.2f, KV cache %.2f, activations and scratch %.2f%s) "
        "of %.2f GiB%s; try %s%s%sa smaller model", n_ctx, needed / gib,
        (double)(p.weights ? p.weights : m->binder.bytes) / gib, (double)(p.kv_global + p.kv_rings) / gib,
        (double)(p.activations + p.stage + p.scratch) / gib, drafter, room / gib,
        whose, advice, m->options.drafter ? "no -md, " : "", m->options.memory && !refused ? "a larger --vram, " : "");
}

// Opens and checks a model and plans its memory, of which nothing is reserved yet. Dies with one line on bad input.
// dump_dir may be NULL.
static void plan_model(Model *m, const char *path, const Ops *ops, PlanOptions o, const char *dump_dir) {
    static int n_models;
    *m = (Model){ .ops = ops, .dump_dir = dump_dir, .number = 2 * n_models++ };
    open_model_file(&m->gguf, path);
    if (dump_dir && *dump_dir && ((mkdir(dump_dir, 0777) && errno != EEXIST) || access(dump_dir, W_OK | X_OK)))
        die("--dump: %s: %s", dump_dir, strerror(errno));
    load_config(&m->config, &m->gguf);
    Binder *b = &m->binder;
    b->g = &m->gguf;
    b->seen = alloc_or_die(m->gguf.n_tensors, 1);
    b->uploads = alloc_or_die(m->gguf.n_tensors + (size_t)m->config.n_layers * 4, sizeof *b->uploads);
    b->derived = alloc_or_die((size_t)m->config.n_layers * ((size_t)m->config.dim + 2 * (size_t)m->config.n_experts),
                              sizeof *b->derived);
    bind_weights(b, &m->config, &m->weights, o.only_scores);

    const Config *c = &m->config;
    assert(o.n_seqs >= 1 && o.n_seqs <= MAX_SESSIONS);
    if ((o.pflash || o.pflash_density) && !ops->block_select)
        die("--pflash: the backend %s has no sparse attention", ops->name);
    if (o.scores && !ops->attn_mass) die("--compress: the backend %s cannot score tokens", ops->name);
    if (o.n_batch != BATCH_FIT) o.n_batch = max_int(o.n_batch, STEP_ROWS);
    o.n_logits = max_int(o.n_logits, o.n_seqs);
    m->options = o;
    if (o.drafter) open_drafter(m, o.drafter);
    const size_t budget = plan_budget(m);
    int n_ctx = o.n_ctx ? o.n_ctx : min_int(c->n_ctx_train, 8192);
    if (o.n_batch == BATCH_FIT)
        fit_batch(m, n_ctx == CTX_FIT ? TILE_SLOTS : n_ctx, n_ctx == CTX_FIT ? c->n_ctx_train : n_ctx, budget);
    if (n_ctx == CTX_FIT) n_ctx = max_int(largest_context(m, c->n_ctx_train, budget), TILE_SLOTS);
    fit_context(m, n_ctx, budget);
}

// Room for a verdict, as its parts lie on the device.
static void open_verdict(Model *m) {
    const State *s = &m->s;
    const PlanOptions *o = &m->options;
    Verdict *v = &m->verdict;
    const char *base = (const char *)s->walked;
    v->bytes = (size_t)((const char *)s->found_logsumexp - base) +
               (o->drafter ? (size_t)o->draft_depth : 0) * (size_t)o->n_seqs * sizeof(float);
    char *host = alloc_or_die(v->bytes, 1);
    v->accepted = (int32_t *)host;
    v->chosen = (int32_t *)(host + ((const char *)s->chosen - base));
    v->ids = (int32_t *)(host + ((const char *)s->next - base)) + o->n_seqs;
    v->logits = (float *)(host + ((const char *)s->found_logits - base));
    v->logsumexp = (float *)(host + ((const char *)s->found_logsumexp - base));
    v->path = alloc_or_die((size_t)o->n_seqs * STEP_ROWS, sizeof(int32_t));
}

static void alloc_step(const Model *m, StepRun *step) {
    const int n_seqs = m->options.n_seqs, n_batch = m->options.n_batch, n_logits = m->options.n_logits;
    step->rows = alloc_or_die(n_batch, sizeof *step->rows);
    step->kept_rows = alloc_or_die(n_logits, sizeof *step->kept_rows);
    step->segs = alloc_or_die(n_seqs, sizeof *step->segs);
    step->kept_index = alloc_or_die(n_logits, sizeof *step->kept_index);
    step->sent.rows = alloc_or_die(n_batch, sizeof *step->sent.rows);
    step->sent.kept_rows = alloc_or_die(n_logits, sizeof *step->sent.kept_rows);
    step->sent.segs = alloc_or_die(n_seqs, sizeof *step->sent.segs);
    step->sent.kept_index = alloc_or_die(n_logits, sizeof *step->sent.kept_index);
}

static void free_step(StepRun *step) {
    free(step->rows);
    free(step->kept_rows);
    free(step->segs);
    free(step->kept_index);
    free(step->sent.rows);
    free(step->sent.kept_rows);
    free(step->sent.segs);
    free(step->sent.kept_index);
}

// Open, check, plan, reserve. Dies with one line on bad input or when there is no room. dump_dir may be NULL.
static void load_model(Model *m, const char *path, const Ops *ops, PlanOptions o, const char *dump_dir) {
    plan_model(m, path, ops, o, dump_dir);
    const bool strict = o.memory || o.n_ctx == CTX_FIT || m->plan.weights;         // else memory may be had by swapping
    const size_t budget = plan_budget(m);
    if (strict && fit_context(m, m->options.n_ctx, budget) > budget) die_no_room(m);
    Arena arena = { 0 };
    plan_memory(m, &arena);
    const Limits lim = plan_limits(m);
    ops->init(&lim);
    m->arena = ops->reserve(arena.used);
    if (!m->arena) die_no_room(m);
    arena = (Arena){ .base = m->arena };
    const double start = seconds();
    plan_memory(m, &arena);
    ops->wait();
    m->upload_seconds = seconds() - start;

    const int n_seqs = m->options.n_seqs, n_batch = m->options.n_batch;
    m->len = alloc_or_die(n_seqs, sizeof *m->len);
    m->seen = alloc_or_die(n_seqs, sizeof *m->seen);
    alloc_step(m, &m->step);
    alloc_step(m, &m->other.step);
    m->between = -1;
    m->sent.n_accept = alloc_or_die(n_seqs, sizeof *m->sent.n_accept);
    m->sent.feed = alloc_or_die(STEP_ROWS, sizeof *m->sent.feed);
    m->chunk = alloc_or_die(n_batch, sizeof *m->chunk);
    open_verdict(m);
    for (int i = 0; i < n_seqs; i++) reset_session(m, i);
    load_mask(m);
    for (int t = 0; t < 2; t++)
        ops->copy(&(Copy){ m->s.inv_freq[t], m->weights.inv_freq[t], m->weights.n_pairs[t] * sizeof(double), COPY_IN });
    if (m->drafter.kind != DRAFTER_NONE) start_drafter(m);
}

static void read_weights(Model *m, bool check);         // [13]

static void free_model(Model *m) {
    if (m->arena) m->ops->release(m->arena);
    for (int i = 0; i < m->n_checkpoints; i++) free(m->checkpoints[i].data);
    free(m->checkpoints);
    free(m->weights.layer);
    free(m->binder.seen);
    free(m->binder.uploads);
    free(m->binder.derived);
    free(m->len);
    free(m->seen);
    free(m->sampled);
    free(m->fitting);
    free_step(&m->step);
    free_step(&m->other.step);
    free(m->sent.n_accept);
    free(m->sent.feed);
    free(m->chunk);
    free(m->verdict.accepted);
    free(m->verdict.path);
    free_drafter(&m->drafter);
    gguf_close(&m->gguf);
}

// ==== [8] Step: batch, run, commit ===================================================================================
// A step takes rows of one or more sessions through the model. Their K and V are in the caches afterwards, but the
// sessions are as long as before: commit() decides how many rows, along which path, become part of a session. What is
// not committed needs no undo. A segment of more than STEP_ROWS rows is a prompt chunk and must be committed whole.

typedef struct {
    int seq;                  // session
    SegKind kind;
    int n;
    const StepRow *rows;      // (n)
    int more;                 // of a prompt: rows that follow in later steps
} StepSeg;

enum { DENSE_ROWS = 256 };    // at the end of a prompt, which see everything also where prompts are sparse

// Of a segment: the last rows that see everything.
static int n_dense(const Model *m, const StepSeg *seg) {
    if (m->len[seg->seq] + seg->n + seg->more < m->options.pflash_from) return seg->n;
    return max_int(0, min_int(seg->n, DENSE_ROWS - seg->more));
}

// Tokens of a step that is fed, from where the last one left them: each segment's next one and what was drafted behind it.
static void issue_feed(Model *m, bool drafts) {
    const State *s = &m->s;
    move_rows(m, m->step.n_rows, 1, drafts ? s->next : s->chosen, 1, drafts ? s->feed : NULL, &s->rows->token,
              sizeof(Row) / sizeof(int32_t));
}

static void send_feed(Model *m) {
    const int n_seqs = m->options.n_seqs, width = m->options.draft_width;
    int32_t feed[STEP_ROWS];
    for (int r = 0; r < m->step.n_rows; r++) {
        const Row *row = &m->step.rows[r];
        feed[r] = row->index ? n_seqs + ((row->index - 1) * m->step.n_segs + row->seg) * width : row->seg;
    }
    send_new(m, m->s.feed, m->sent.feed, feed, (size_t)m->step.n_rows * sizeof *feed);
}

// Prompts' steps, those of more than STEP_ROWS rows, and others have buffers of their own for what has to last from one
// layer to the next, where the plan says so (PlanOptions.between). Makes those of one kind m->s and m->step.
static void choose_kind(Model *m, bool prompts) {
    if (!m->options.between || m->on_prompts == prompts) return;
    const State s = m->s;
    const StepRun step = m->step;
    m->s = m->other.s;
    m->step = m->other.step;
    m->other.s = s;
    m->other.step = step;
    m->on_prompts = prompts;
}

static void lay_segment(Model *m, int i, const StepSeg *in) {
    StepRun *t = &m->step;
    assert(t->n_rows + in->n <= m->options.n_batch && (in->kind == SEG_CHAIN || in->n <= STEP_ROWS));
    assert(m->len[in->seq] + in->n <= m->options.n_ctx + STEP_ROWS);
    m->seen[in->seq] = max_int(m->seen[in->seq], m->len[in->seq] + in->n);
    t->segs[i] = (Segment){ .seq = in->seq, .first = t->n_rows, .n = in->n, .kind = (int32_t)in->kind,
                            .n_dense = n_dense(m, in) };
    for (int j = 0; j < in->n; j++) {
        Row *row = &t->rows[t->n_rows];
        *row = (Row){ .token = in->rows[j].token, .seg = i, .index = j, .depth = j };
        if (in->kind == SEG_TREE) {
            const int parent = in->rows[j].parent;
            assert(parent < j);
            const Row *above = row - j + parent;
            row->depth = parent < 0 ? 0 : above->depth + 1;
            assert(row->depth < m->config.n_swa);
            row->ancestors = (parent < 0 ? 0 : above->ancestors) | (uint64_t)1 << j;
        }
        if (in->rows[j].want) {
            assert(t->n_kept < (m->on_prompts ? 1 : m->options.n_logits));
            t->kept_rows[t->n_kept] = *row;
            t->kept_rows[t->n_kept].token = 0;         // embedded already: nobody reads it
            t->kept_index[t->n_kept++] = t->n_rows;
        }
        t->n_rows++;
    }
}

// Makes a step of the rows of n_segs segments of different sessions, for go_through(). The caller has checked token ids
// and that len + n fits the session.
static void lay_step(Model *m, const StepSeg *segs, int n_segs) {
    const bool fed = segs[0].rows[0].token == FED, drafts = fed && segs[0].n > 1;
    bool staged = false;
    int rows = 0;
    for (int i = 0; i < n_segs; i++) rows += segs[i].n, staged |= segs[i].n > STEP_ROWS;
    choose_kind(m, rows > STEP_ROWS);
    State *s = &m->s;
    StepRun *t = &m->step;
    assert(!fed || drafts || n_segs == t->n_kept);     // of the step before
    assert(n_segs <= m->options.n_seqs);
    t->ahead = fed;
    t->n_segs = n_segs;
    t->n_rows = t->n_kept = 0;
    for (int i = 0; i < n_segs; i++) lay_segment(m, i, &segs[i]);
    send_new(m, s->rows, t->sent.rows, t->rows, (size_t)t->n_rows * sizeof(Row));
    send_new(m, s->segs, t->sent.segs, t->segs, (size_t)t->n_segs * sizeof(Segment));
    send_new(m, s->kept_rows, t->sent.kept_rows, t->kept_rows, (size_t)t->n_kept * sizeof(Row));
    send_new(m, s->kept_index, t->sent.kept_index, t->kept_index, (size_t)t->n_kept * sizeof(int32_t));
    if (drafts) send_feed(m);
    const int32_t variant = m->scoring ? m->scoring : drafts ? DRAFTS_ARE_FED : fed ? ROWS_ARE_FED : PLAIN;
    t->key = (StepKey){ .model = m->number, .kind = staged ? STEP_PROMPT : STEP_DECODE, .rows = t->n_rows, .segs = n_segs,
                        .kept = t->n_kept, .logits = t->n_kept, .variant = variant };
    t->pass = (Pass){ .staged = staged };
    t->number = ++m->steps;
}

// Runs the step that was laid, or goes on with it. Returns the number of rows of logits, in the order of the rows that
// want them. GIVEN_UP: m->stop was set, and nothing is there to commit. PAUSED: see forward().
static int go_through(Model *m, double work) {
    const Ops *op = m->ops;
    const bool record = !m->dump_dir;                  // checkpoints copy out as they go
    Forward end = DONE;
    if (!record || op->begin(m->step.key)) {
        if (m->step.ahead) issue_feed(m, m->step.key.variant == DRAFTS_ARE_FED);
        end = forward(m, work);
    }
    if (record) op->end();
    return end == DONE ? m->step.n_kept : (int)end;
}

static int step(Model *m, const StepSeg *segs, int n_segs) {
    lay_step(m, segs, n_segs);
    return go_through(m, INFINITY);
}

// The tokens that may be chosen at row `row` of logits, of those that the file allows: bits (vocab / 32), which it clears where
// the file forbids; NULL: all.
static void mask_row(Model *m, int row, uint32_t *bits) {
    const size_t words = round_up((size_t)m->config.vocab, 32) / 32;
    const uint64_t bit = (uint64_t)1 << row;
    if (!bits && !(m->masked & bit)) return;
    for (size_t w = 0; bits && w < words; w++) bits[w] &= m->sampled[w];
    m->masked = bits ? m->masked | bit : m->masked & ~bit;
    m->ops->copy(&(Copy){ m->s.mask + (size_t)row * words, bits ? bits : m->sampled, words * sizeof *bits, COPY_IN });
}

// A token is chosen at every row of logits of the last step, into m->s.chosen.
static void issue_sample(Model *m) {
    const State *s = &m->s;
    Batch kept = step_batch(m, s->len);
    kept.rows = s->kept_rows, kept.n_rows = m->step.n_kept;
    m->ops->sample(&(Sample){ .batch = &kept, .vocab = m->config.vocab, .logits = s->logits, .params = s->params,
                              .mask = s->mask, .bias = s->bias, .counts = s->counts, .step_rows = s->counts ? s->rows : NULL,
                              .out = s->chosen });
}

static void issue_commit(Model *m, const int32_t *n_accept, const int32_t *path) {
    const State *s = &m->s;
    const Batch all = step_batch(m, s->len);
    m->ops->kv_commit(&(KvCommit){ .batch = &all, .caches = m->caches, .n_caches = m->n_caches, .n_accept = n_accept,
                                   .path = path, .counts = s->counts, .vocab = m->config.vocab });
}

static void lengthen(Model *m, const int32_t *n_accept) {
    for (int i = 0; i < m->step.n_segs; i++) {
        const Segment *seg = &m->step.segs[i];
        assert(n_accept[i] >= 0 && n_accept[i] <= seg->n && (seg->n <= STEP_ROWS || n_accept[i] == seg->n));
        m->len[seg->seq] += n_accept[i];
    }
}

// Makes n_accept[i] rows of the last step's segment i part of its session: of a CHAIN the first ones, of a TREE the rows
// path[i * STEP_ROWS ...], root first. path may be NULL when all segments are chains. sample: a token is chosen first from
// every row of logits, into m->s.chosen. The two follow each other in plain decoding, so they are recorded as one.
static void finish_step(Model *m, const int32_t *n_accept, const int32_t *path, bool sample) {
    const Ops *op = m->ops;
    State *s = &m->s;
    lengthen(m, n_accept);
    send_new(m, s->n_accept, m->sent.n_accept, n_accept, (size_t)m->step.n_segs * sizeof *n_accept);
    if (path) op->copy(&(Copy){ s->path, path, (size_t)m->step.n_segs * STEP_ROWS * sizeof *path, COPY_IN });
    if (op->begin((StepKey){ .model = m->number, .kind = sample ? STEP_SAMPLE : STEP_COMMIT, .rows = m->step.n_rows,
                             .segs = m->step.n_segs, .logits = sample ? m->step.n_kept : 0,
                             .variant = path ? COMMITS_PATHS : COMMITS_CHAINS })) {
        if (sample) issue_sample(m);
        issue_commit(m, s->n_accept, path ? s->path : NULL);
    }
    op->end();
    drafter_committed(m, n_accept);
}

static void commit(Model *m, const int32_t *n_accept, const int32_t *path) { finish_step(m, n_accept, path, false); }

static void commit_all(Model *m) {                     // every row of the last step, which is one chain
    commit(m, &(int32_t){ m->step.n_rows }, NULL);
}

static void read_logits(Model *m, int row, float *host) {            // (vocab) of one row of the last step
    const size_t n = (size_t)m->config.vocab;
    m->ops->copy(&(Copy){ host, m->s.logits + (size_t)row * n, n * sizeof *host, COPY_OUT });
    m->ops->wait();
}

// The last step had drafts, or gets some behind it: a token is chosen at every row of logits, the drafts are walked as far as
// they are what was chosen, these rows are committed, and `depth` tokens are drafted behind n of the segments (their numbers).
// One follows the other without the host; read_verdict() waits for what came of it. forced: not the walk, this says how many
// rows of each segment, all chains of drafts, are accepted, as for measurements; NULL: the walk.
static void issue_verdict(Model *m, const int32_t *segs, int n, int depth, const int32_t *forced) {
    const Ops *op = m->ops;
    State *s = &m->s;
    Verdict *v = &m->verdict;
    const Batch all = step_batch(m, s->len);
    bool trees = false;
    v->n_segs = m->step.n_segs;
    for (int i = 0; i < m->step.n_segs; i++) trees |= m->step.segs[i].kind == SEG_TREE, v->seq[i] = m->step.segs[i].seq;
    int32_t *path = trees ? s->path : NULL;
    if (forced) {                                      // every row of a chain has logits: its last row that stays is a kept row
        int32_t found[2 * MAX_SESSIONS] = { 0 }, *const walked = found + m->options.n_seqs;
        for (int i = 0; i < m->step.n_segs; i++) found[i] = m->step.segs[i].first + forced[i] - 1, walked[i] = forced[i];
        op->copy(&(Copy){ s->last, found, 2 * (size_t)m->options.n_seqs * sizeof *found, COPY_IN });
    }
    if (op->begin((StepKey){ .model = m->number, .kind = STEP_SAMPLE, .rows = m->step.n_rows, .segs = m->step.n_segs,
                             .logits = m->step.n_kept, .kept = forced != NULL,
                             .variant = trees ? WALKS_PATHS : WALKS_CHAINS })) {
        if (m->step.n_kept) issue_sample(m);
        if (forced) move_rows(m, m->step.n_segs, 1, s->chosen, 1, s->last, s->next, 1);
        else op->verify_walk(&(VerifyWalk){ .batch = &all, .kept_rows = s->kept_rows, .n_kept = m->step.n_kept,
                                            .chosen = s->chosen, .n_accept = s->walked, .path = path, .last = s->last,
                                            .next = s->next });
        issue_commit(m, s->walked, path);
    }
    op->end();
    if (trees) op->copy(&(Copy){ v->path, s->path, (size_t)m->step.n_segs * STEP_ROWS * sizeof *v->path, COPY_OUT });
    if (op->mark) v->mark = op->mark();
    else v->verified = seconds();
    drafter_committed(m, NULL);
    if (n && depth) issue_draft(m, segs, n, depth);
    op->copy(&(Copy){ v->accepted, s->walked, v->bytes, COPY_OUT });
    if (op->mark) v->end_mark = op->mark();
}

// Waits for the verdict, on which sessions are as long as it says. A step may be under way behind it.
static void read_verdict(Model *m) {
    const Ops *op = m->ops;
    Verdict *v = &m->verdict;
    if (op->mark) op->wait_for(v->mark);
    if (op->mark) v->verified = seconds();
    if (op->mark) op->wait_for(v->end_mark);
    else op->wait();
    v->drafted = seconds();
    for (int i = 0; i < v->n_segs; i++) m->len[v->seq[i]] += v->accepted[i];
    for (int i = 0; m->step.ahead && i < m->step.n_segs; i++)
        m->seen[m->step.segs[i].seq] = max_int(m->seen[m->step.segs[i].seq], m->len[m->step.segs[i].seq] + m->step.segs[i].n);
}

// Runs as many of n tokens through session seq as a step has room for, and returns how many: the caller commits them.
// Where these are all, the last one's logits are row 0.
static int run_chunk(Model *m, int seq, const int32_t *tokens, int n) {
    const int chunk = min_int(n, m->options.n_batch);
    for (int i = 0; i < chunk; i++) m->chunk[i] = (StepRow){ .token = tokens[i], .want = i == n - 1 };
    step(m, &(StepSeg){ .seq = seq, .kind = SEG_CHAIN, .n = chunk, .rows = m->chunk, .more = n - chunk }, 1);
    return chunk;
}

// The part of the blocks of keys in sight that the rows of prompts have attended to since the last call; 0: there were
// none, or prompts are dense.
static double read_density(Model *m) {
    int64_t n[2] = { 0 };
    if (!m->s.block_count) return 0;
    m->ops->copy(&(Copy){ n, m->s.block_count, sizeof n, COPY_OUT });
    m->ops->wait();
    m->ops->copy(&(Copy){ m->s.block_count, &(int64_t[2]){ 0 }, sizeof n, COPY_IN });
    return n[1] ? (double)n[0] / (double)n[1] : 0;
}

// ==== [9] Drafting: who guesses, how far =============================================================================
// What may stand behind a session's last token is guessed by: the text itself, where its last tokens have been before
// (prompt lookup, ngram); a table of what followed the last NGRAM_MOD tokens in any text so far, which all sessions share
// (ngram-mod); the grammar of the answer, where it leaves one way to go on (grammar); or a drafter. Guesses are a tree,
// mostly one without branches. Whoever guesses, the model's own choices decide what is said, so all this is about time
// alone.
//
// How far to guess (auto): a step of n rows takes so long, n guesses too, and at every depth so many were right of late. Of all
// depths, none among them, the one with most tokens a second is taken. But what is not known has to be tried, and what was
// right may be wrong next: so every step earns a little credit, guesses that save time earn more, and none is made that might
// cost more than there is. Guesses from the text cost nothing as long as they are only watched.

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

// ---- n-grams ----

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
        if (!more) die("out of memory: %zu bytes wanted", (size_t)g->n_room * sizeof *more);
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

// ---- trees ----

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

// ---- how far ----

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

// ==== [10] Generation: sessions, events ===============================================================================
// The engine as its callers see it: a session holds tokens in one slot of the model's caches; session_start() gives it a
// prompt to answer, and each session_next() does one piece of work, a chunk of the prompt or a token, and tells what came of
// it. sessions_next() does so for several sessions at once, which share their decoding steps. Nothing here prints, or ends
// the process for what is the caller's business.
//
// Decoding may be speculative: a drafter guesses what comes next, the guesses run in one step with the token before them, and
// the model's own choice is made at every row. As far as guesses and choices agree, one step has made several tokens. Choices
// are those that a step of one row makes, bit for bit, greedy or drawn; so the text is the same with any drafter, and without.
//
// Behind it: a prompt runs only from where it differs from what the session holds. A backend that works beside the host (one
// with marks) never waits for it: the next step is fed its tokens by the device, and the host looks at them while it runs.
// Where a token turns out to end the text, or to be followed by others than the model's, that step is dropped: it was not
// committed. A full context drops its oldest tokens, if that is wanted, and goes on.

typedef struct {              // how to answer
    int          n_predict;   // tokens to generate; -1: until the turn ends or the context is full
    bool         ignore_eos;
    bool         keep_logits; // session_logits() is asked for every token: no step is issued ahead
    TextList     stops;       // text that ends the answer and is no part of it
    Grammar     *grammar;     // what the answer may be, and of this session alone as long as it answers; NULL: anything
    bool         may_think;   // before that
    int          think_budget;   // tokens of thought, after which it is closed; -1: as many as the model likes
    bool         shift;       // a full context drops its oldest tokens; else it ends the answer
    SampleParams sampling;
    Drafting     drafting;
} AnswerOptions;

typedef struct {
    const int32_t *ids;       // (n), n >= 1
    int            n;
    int            n_head;    // the first of them that stay when the context shifts: <bos> and the system turn
    int            mark;      // how many of them a later prompt is sure to begin with, 0 if that is not known: what rings
} Prompt;                     // would lose is saved there

typedef enum { END_TURN, END_CALLS, END_STOP_STRING, END_LENGTH, END_CONTEXT, END_CANCELLED, END_ERROR } EndReason;
static const char *const end_text[] = { "end of turn", "tool call", "stop string", "-n reached", "context full",
                                        "interrupted", "error" };

typedef enum { EVENT_PROMPT, EVENT_TOKEN, EVENT_SHIFT, EVENT_END } EventKind;

typedef struct {              // what came of one session_next(); texts are there until the next one
    EventKind      kind;
    int            done, total;        // PROMPT: tokens of the prompt that have run, that are to run
    const int32_t *ids;                // TOKEN: (n_ids) the token, and what the budget of thoughts put behind it
    int            n_ids;
    TokStr         content, thought;   // TOKEN, END: text of the answer, of a thought that has come
    int            dropped, head, kept;   // SHIFT: tokens that went, the first and the newest that stay
    EndReason      end;                // END
    const char    *error;              // END_ERROR: why; the session can be used again
} Event;

typedef struct {              // what an answer took
    int         n_prompt, n_run;       // tokens of the prompt, and those that were not in the cache
    int         made, steps;           // tokens generated, decoding steps
    int         shifts;                // times the context was full
    double      prompt_seconds, decode_seconds, read;     // read: bytes that the decoding steps had to read
    uint64_t    hash;                  // of the last logits, where the caller looks at them
    DraftCount  drafts;
    double      density;               // of blocks that its prompt attended to, where it was sparse and the caller asks; else 0
    int         loop;                  // the text ends in a loop of so many tokens, 0: it does not
    const char *why;                   // it ended; NULL: it has not
} Turn;

// Stop strings. Text passes through byte by byte, so that where tokens begin makes no difference; what may be the
// beginning of a stop string waits. The stop string that is complete first ends the text before it; of several that
// end there, the longest.
typedef struct {
    const TextList *strings;  // none is empty
    char           *held;     // (longest) the last bytes of the text, not passed on yet
    size_t          n_held, longest;
    const char     *hit;      // the stop string that was found: nothing passes any more
} Stops;

static Stops stops_new(const TextList *strings) {      // free(held) when done
    size_t longest = 0;
    for (int i = 0; i < strings->n; i++)
        if (strlen(strings->text[i]) > longest) longest = strlen(strings->text[i]);
    return (Stops){ .strings = strings, .held = alloc_or_die(longest + 1, 1), .longest = longest };
}

// Takes n bytes of text and returns how many are written to out, at most n + longest.
static size_t stops_push(Stops *s, const char *text, size_t n, char *out) {
    size_t n_out = 0;
    for (size_t i = 0; i < n && !s->hit; i++) {
        s->held[s->n_held++] = text[i];
        size_t keep = 0, found = 0;                    // bytes at the end of held: a beginning, a whole stop string
        for (int k = 0; k < s->strings->n; k++) {
            const char *stop = s->strings->text[k];
            const size_t len = strlen(stop);
            size_t same = len < s->n_held ? len : s->n_held;
            while (memcmp(s->held + s->n_held - same, stop, same)) same--;
            if (same == len && len > found) found = len, s->hit = stop;
            if (same > keep) keep = same;
        }
        const size_t pass = s->n_held - (found ? found : keep);
        memcpy(out + n_out, s->held, pass);
        n_out += pass;
        memmove(s->held, s->held + pass, s->n_held -= pass);
    }
    return n_out;
}

static size_t stops_flush(Stops *s, char *out) {       // at the end: what waits was no stop string
    const size_t n = s->hit ? 0 : s->n_held;
    memcpy(out, s->held, n);
    s->n_held = 0;
    return n;
}

enum { MARKS = 32 };
typedef struct { uint8_t *rings; int n, seen; } Mark;                // the rings as they were when the first n tokens were held

typedef struct {
    Model     *m;
    Tokenizer *t;
    int        seq;           // its slot in the model's caches
    TokIds     held;          // (m->len[seq]) the committed tokens
    Mark       marks[MARKS];  // (n_marks) ascending: to go back further than rings reach. Those behind keep their memory
    int        n_marks;
    int        most_marks;    // 1 .. MARKS
    bool       saving;        // one more, of which so much is there:
    int        saved_caches;
    size_t     saved_bytes;
    int        mark_every;    // a prompt leaves one each time it has run so many tokens; 0: only at Prompt.mark
    int        chunk;         // tokens of a prompt that run in one step at most
    double     work;          // multiplications of a prompt's step that run before other sessions do; INFINITY: all. Less than
                              // all where the model's plan has `between`
    double     worked;        // in the last piece of such a step
    // the answer under way, or the last one
    AnswerOptions options;
    TokReply   reply;         // as far as it has come; at its end cut where a stop string began
    Turn       turn;
    GrammarState state;       // of options.grammar, behind todo
    TokIds     todo;          // what runs next: the prompt, later the last token; of these `at` have been run
    int        at, want_mark, n_head;
    bool       prompting;     // todo is a prompt
    bool       fed;           // a step has been issued that takes the last token from the device
    bool       answering, ending;      // not told EVENT_END yet; it is what comes next
    volatile sig_atomic_t cancelled;
    EndReason  end;
    Event      shifted;       // n dropped: to be told
    TokIds     said, thought_name;     // ids of the last event; the first line of a thought
    Guesser    guesser;
    int        named, thought_tokens;  // ids of that line, and of thoughts, so far
    size_t     content, thought, passed;   // bytes of the reply that were looked at; of content, what the stop strings let by
    Stops      stops;
    char      *text;          // (text_room) of the last event: what passed the stop strings
    size_t     text_room, n_text;
    size_t     thought_start; // of what the last event has of it
    int        row;           // of the logits of step number `step` that the last token was chosen from; -1: none yet
    int64_t    step;
    double     started, first_token, returned;         // seconds(); returned: of its last step
    char       err[512];
} Session;

static double cache_bytes(const Cache *k, int n) {      // of the newest n rows of a session, all heads
    return (double)n * k->n_kv_heads * (double)(kv_row_bytes(k->k.type, k->k.dim) + kv_scale_bytes(k->k.type, k->k.dim) +
                                                kv_row_bytes(k->v.type, k->v.dim) + kv_scale_bytes(k->v.type, k->v.dim));
}

// Bytes of weights and cache that decoding a token at position pos has to read: over bandwidth, the floor of its time.
static double bytes_per_token(const Model *m, int pos) {
    const Config *c = &m->config;
    double bytes = (double)matrix_bytes(m->weights.output.data ? &m->weights.output : &m->weights.token_embd);
    if (c->ple_dim) bytes += (double)matrix_bytes(&m->weights.per_layer_model_proj);
    for (int l = 0; l < c->n_layers; l++)
        bytes += layer_size(c, &m->weights.layer[l], true) +
                 cache_bytes(&m->caches[m->cache_of[l]], c->layer[l].is_swa ? min_int(pos, c->n_swa) : pos);
    return bytes;
}

// The same for each token that an MTP assistant guesses in one session of pos tokens, or each block of DFlash.
static double bytes_per_draft(const Model *m, int pos) {
    const Drafter *d = &m->drafter;
    const Config *c = &d->config;
    const bool is_block = d->kind == DRAFTER_DFLASH;
    const Tensor *head = d->weights.output.data ? &d->weights.output : !is_block ? &d->weights.token_embd :
                         m->weights.output.data ? &m->weights.output : &m->weights.token_embd;
    double bytes = (double)matrix_bytes(head);
    if (d->centroids.data) bytes = (double)matrix_bytes(&d->centroids) + bytes / c->vocab * centroid_tokens(d);
    if (!is_block) bytes += (double)matrix_bytes(&d->pre_projection) + (double)matrix_bytes(&d->post_projection);
    for (int l = 0; l < c->n_layers; l++) {
        bytes += layer_size(c, &d->weights.layer[l], true);
        const int seen = is_block ? min_int(pos, dflash_reach(d, l)) : c->layer[l].is_swa ? min_int(pos, d->window - 1) : pos;
        bytes += cache_bytes(is_block ? &d->caches[l] : &m->caches[m->cache_of[d->donor[l]]], seen);
    }
    return bytes;
}

static void session_open(Session *s, Model *m, Tokenizer *t, int seq) {
    *s = (Session){ .m = m, .t = t, .seq = seq, .row = -1, .most_marks = 1, .chunk = m->options.n_batch,
                     .work = INFINITY };
    guesser_init(&s->guesser);
    m->pace.records = m->ops->mark != NULL;
    if (m->drafter.kind != DRAFTER_NONE) m->pace.draft_share = bytes_per_draft(m, 0) / bytes_per_token(m, 0);
    reset_session(m, seq);
}

static void session_close(Session *s) {
    tok_ids_free(&s->held);
    tok_ids_free(&s->todo);
    tok_ids_free(&s->said);
    guesser_free(&s->guesser);
    tok_ids_free(&s->thought_name);
    tok_reply_free(&s->reply);
    for (int i = 0; i < MARKS; i++) free(s->marks[i].rings);
    free(s->stops.held);
    free(s->text);
}

static void session_forget(Session *s) {               // it holds nothing, and nothing is kept of it
    reset_session(s->m, s->seq);
    s->held.n = 0;
    s->n_marks = 0;
    s->row = -1;
}

static void session_cancel(Session *s) { s->cancelled = 1; }         // the next event is the end; from any thread or handler

static void push_id(Session *s, TokIds *ids, int32_t id) {
    if (tok__push(s->t, ids, id) < 0) die("%s", s->t->err);           // out of memory
}

// Cuts the session back to what it shares with a prompt (ids, n >= 1), less the last token, which has to run for its
// logits. Where the rings do not reach back as far, they are put back as they were at the last mark before; else the
// session starts again.
static void session_keep(Session *s, const int32_t *ids, int n) {
    Model *m = s->m;
    int same = 0;
    while (same < min_int(n - 1, m->len[s->seq]) && s->held.ids[same] == ids[same]) same++;
    while (s->n_marks && s->marks[s->n_marks - 1].n > same) s->n_marks--;
    if (!shorten_session(m, s->seq, ids, same)) {
        const Mark *mark = s->n_marks ? &s->marks[s->n_marks - 1] : NULL;
        same = mark ? mark->n : 0;
        if (mark) {
            copy_rings(m, s->seq, mark->rings, COPY_IN);
            m->seen[s->seq] = mark->seen;
            shorten_session(m, s->seq, ids, same);
        } else {
            reset_session(m, s->seq);
        }
    }
    s->held.n = (size_t)same;
}

// Of too many marks the one goes that is closest to the next; its memory is the next one's.
static void make_room_for_mark(Session *s) {
    Mark *marks = s->marks;
    int least = 0;
    if (s->n_marks < s->most_marks) return;
    for (int i = 0, best = INT_MAX; i < s->n_marks; i++) {
        const int gap = (i + 1 < s->n_marks ? marks[i + 1].n : s->m->len[s->seq]) - marks[i].n;
        if (gap < best) best = gap, least = i;
    }
    const Mark out = marks[least];
    memmove(marks + least, marks + least + 1, (size_t)(--s->n_marks - least) * sizeof *marks);
    marks[s->n_marks] = out;
}

// What the rings hold now is kept: the session can go back to here from wherever it gets to. Not whole: the next ring
// of it; the session runs nothing as long as it is s->saving.
static void session_save(Session *s, bool whole) {
    Model *m = s->m;
    if (!s->saving) {
        if (s->n_marks && s->marks[s->n_marks - 1].n == m->len[s->seq]) return;
        make_room_for_mark(s);
        s->saved_caches = 0;
        s->saved_bytes = 0;
    }
    Mark *mark = &s->marks[s->n_marks];
    if (!mark->rings) mark->rings = alloc_large(copy_rings(m, s->seq, NULL, COPY_OUT));
    for (size_t n = 0; s->saved_caches < m->n_caches && (whole || !n); s->saved_bytes += n)
        n = copy_ring(m, s->saved_caches++, s->seq, mark->rings + s->saved_bytes, COPY_OUT);
    m->ops->wait();
    s->saving = s->saved_caches < m->n_caches;
    if (s->saving) return;
    mark->n = m->len[s->seq];
    mark->seen = m->seen[s->seq];
    s->n_marks++;
}

// The tokens behind what the session shares with (ids, n) are what it runs next.
static void set_prompt(Session *s, const int32_t *ids, int n) {
    session_keep(s, ids, n);
    s->todo.n = 0;
    s->at = 0;
    for (int i = s->m->len[s->seq]; i < n; i++) push_id(s, &s->todo, ids[i]);
    s->prompting = true;
}

// Begins to answer a prompt; what the session shares with it does not run again. False: it cannot, and s->err says why.
static bool session_start(Session *s, const Prompt *p, const AnswerOptions *o) {
    Model *m = s->m;
    if (p->n < 1 || p->n > m->options.n_ctx) {
        snprintf(s->err, sizeof s->err, "expected a prompt of 1 to %d tokens, got %d", m->options.n_ctx, p->n);
        return false;
    }
    s->thought_name.n = 0;
    if (tok_encode(s->t, "thought\n", 8, TOK_PLAIN, &s->thought_name) < 0) die("%s", s->t->err);
    tok_reply_start(s->t, &s->reply, p->ids, (size_t)p->n);
    free(s->stops.held);
    s->options = *o;
    s->stops = stops_new(&s->options.stops);
    s->turn = (Turn){ .n_prompt = p->n };
    s->started = s->first_token = seconds();
    s->answering = true;
    s->ending = s->fed = false;
    s->cancelled = 0;
    s->content = s->thought = s->passed = 0;
    s->named = tok_reply_thinks(&s->reply) ? (int)s->thought_name.n : 0;
    s->thought_tokens = 0;
    if (o->grammar) s->state = grammar_start(o->grammar, tok_reply_thinks(&s->reply) ? START_THINKING :
                                                         o->may_think ? START_MAY_THINK : START_ANSWER);
    guesser_start(&s->guesser, &o->drafting);
    s->n_head = p->n_head;
    s->row = -1;
    s->shifted = (Event){ .kind = EVENT_SHIFT };
    m->ops->copy(&(Copy){ m->s.params + s->seq, &s->options.sampling, sizeof s->options.sampling, COPY_IN });
    set_prompt(s, p->ids, p->n);
    s->want_mark = p->mark < p->n && copy_rings(m, s->seq, NULL, COPY_OUT) ? p->mark : 0;
    return true;
}

// A text from a byte on, 0 <= from <= text->n. No offset is added to a text that was never written, which is NULL.
static TokStr text_from(const TokText *text, size_t from) {
    return from < text->n ? (TokStr){ text->s + from, text->n - from } : (TokStr){ "", 0 };
}

// What has run of a prompt's step is for nothing, and the rings may have lost what the session's last logits came from.
static void give_up(Session *s) {
    s->row = -1;
    s->m->between = -1;
}

static void end_answer(Session *s, EndReason end) {
    if (s->m->between == s->seq) give_up(s);
    s->saving = false;
    s->ending = true;
    s->end = end;
    s->fed = false;
}

// Adds to an event the text of the reply that has come since: thoughts as they are, content as far as the stop strings
// let it pass.
static void pass_text(Session *s, Event *e) {
    const TokReply *r = &s->reply;
    const size_t n = r->content.n - s->content, room = s->n_text + n + 2 * s->stops.longest + 1;
    if (room > s->text_room) {
        s->text = realloc(s->text, s->text_room = 2 * room);
        if (!s->text) die("out of memory: %zu bytes wanted", s->text_room);
    }
    const size_t before = s->n_text;
    if (n) s->n_text += stops_push(&s->stops, r->content.s + s->content, n, s->text + s->n_text);
    if (e->kind == EVENT_END) s->n_text += stops_flush(&s->stops, s->text + s->n_text);
    s->passed += s->n_text - before;
    s->content = r->content.n;
    s->thought = r->thought.n;
    e->content = (TokStr){ s->text, s->n_text };
    e->thought = text_from(&r->thought, s->thought_start);
    e->ids = s->said.ids;
    e->n_ids = (int)s->said.n;
}

static void begin_event(Session *s, Event *e, EventKind kind) {
    *e = (Event){ .kind = kind };
    s->said.n = s->n_text = 0;
    s->thought_start = s->thought;
}

// Whether ids (n) end in a loop: their last tokens, 96 at least and four times over, repeat every so many. 0: they do not.
static int loop_of(const int32_t *ids, int n) {
    for (int period = 1; period <= 64; period++) {
        const int span = max_int(4 * period, 96);
        int same = 0;
        while (n > span && same < span - period && ids[n - 1 - same] == ids[n - 1 - same - period]) same++;
        if (n > span && same == span - period) return period;
    }
    return 0;
}

static void tell_end(Session *s, Event *e) {
    const int made = min_int(s->turn.made, (int)s->held.n);            // tokens of it that are held
    begin_event(s, e, EVENT_END);
    e->end = s->end;
    e->error = s->end == END_ERROR ? s->err : NULL;
    if (!s->answering) return;
    if (tok_reply_end(s->t, &s->reply) < 0) die("%s", s->t->err);     // out of memory
    pass_text(s, e);
    s->reply.content.n = s->passed;
    s->turn.why = end_text[s->end];
    s->turn.loop = loop_of(s->held.ids + (int)s->held.n - made, made);
    s->turn.prompt_seconds = (s->turn.made ? s->first_token : seconds()) - s->started;
    s->turn.decode_seconds = s->turn.made ? seconds() - s->first_token : 0;
    s->answering = false;
}

// The thought has used up its budget: its end, on a line of its own, is what the model said. As tok_reply_push().
static int close_thought(Session *s) {
    Tokenizer *t = s->t;
    const size_t first = s->said.n;
    const TokStr last = tok_piece(t, s->said.ids[first - 1], false);
    int over = 0;
    if (!(last.n && last.s[last.n - 1] == '\n') && tok_encode(t, "\n", 1, TOK_PLAIN, &s->said) < 0) return -1;
    push_id(s, &s->said, t->channel_close);
    for (size_t i = first; i < s->said.n && !over; i++, s->turn.made++) over = tok_reply_push(t, &s->reply, s->said.ids[i]);
    return over;
}

// Accepted guesses that turned out to be behind the end of what was said leave the cache.
static void drop_drafts(Session *s) {
    if (s->m->len[s->seq] > (int)s->held.n) shorten_session(s->m, s->seq, s->held.ids, (int)s->held.n);
}

// The context is full: of its tokens the first n_head stay, and the newest half of the room behind these; they run
// again, with what was said last. False: the head leaves less than half of the context, so nothing was done.
static bool shift_context(Session *s, const int32_t *said, int n) {
    const int n_ctx = s->m->options.n_ctx, n_head = s->n_head, half = (n_ctx - n_head) / 2, len = (int)s->held.n;
    if (n_head > n_ctx / 2 || half < n) return false;
    drop_drafts(s);
    int32_t *ids = alloc_or_die((size_t)(n_head + half + n), sizeof *ids);
    memcpy(ids, s->held.ids, (size_t)n_head * sizeof *ids);
    memcpy(ids + n_head, s->held.ids + len - half, (size_t)half * sizeof *ids);
    memcpy(ids + n_head + half, said, (size_t)n * sizeof *ids);
    s->shifted = (Event){ .kind = EVENT_SHIFT, .dropped = len - n_head - half, .head = n_head, .kept = half };
    s->turn.shifts++;
    set_prompt(s, ids, n_head + half + n);
    free(ids);
    return true;
}

// Why the answer cannot go on in its form: s->err.
static void explain_form(Session *s) {
    Model *m = s->m;
    Grammar *g = s->options.grammar;
    const bool fits = !g->failed && s->state && grammar_mask(g, s->state, m->fitting, m->config.vocab);
    snprintf(s->err, sizeof s->err, "%s", g->failed ? g->err :
             fits ? "grammar: the model cannot choose any of the tokens that fit" :
             "grammar: a thought was closed where none may end");
}

// The grammar goes on behind tokens that were said. False: s->err says why it cannot.
static bool follow_grammar(Session *s, const int32_t *ids, int n) {
    Grammar *g = s->options.grammar;
    bool ok = true;
    for (int i = 0; g && ok && i < n; i++) ok = grammar_advance(g, &s->state, ids[i]);
    if (!ok) explain_form(s);
    return ok;
}

// The token that the model chose, behind those of the event so far: it runs next, unless the answer ends here.
static void take_token(Session *s, int32_t token, Event *e) {
    const AnswerOptions *o = &s->options;
    Model *m = s->m;
    const size_t first = s->said.n;
    if (!s->turn.made) s->first_token = seconds();
    s->prompting = false;
    s->todo.n = 0;
    s->at = 0;
    if (token < 0) {
        if (o->grammar) explain_form(s);
        else snprintf(s->err, sizeof s->err, "%s: no token can be chosen at position %zu: the logits are not numbers, so the "
                      "file is damaged, or every token is suppressed", m->gguf.path, s->held.n - 1);
        end_answer(s, END_ERROR);
        return;
    }
    if (!o->n_predict) {                               // the prompt was all that was wanted
        end_answer(s, END_LENGTH);
        return;
    }
    const int name = (int)s->thought_name.n;
    const bool thought_before = tok_reply_thinks(&s->reply);
    int over = o->ignore_eos && tok_is_stop(s->t, token) ? 0 : tok_reply_push(s->t, &s->reply, token);
    s->turn.made++;
    push_id(s, &s->said, token);
    const bool thinks = tok_reply_thinks(&s->reply);
    if (!thinks) s->named = 0;
    else if (thought_before && s->named < name) s->named++;
    else if (thought_before) s->thought_tokens++;
    if (!over && thinks && o->think_budget >= 0 && s->thought_tokens >= o->think_budget && s->named == name)
        over = close_thought(s);
    const int32_t *said = s->said.ids + first;
    const int n = (int)(s->said.n - first);
    if (over < 0) snprintf(s->err, sizeof s->err, "%s", s->t->err);
    if (over < 0 || !follow_grammar(s, said, n)) {
        end_answer(s, END_ERROR);
        return;
    }
    pass_text(s, e);
    if (s->stops.hit) end_answer(s, END_STOP_STRING);
    else if (over) end_answer(s, s->reply.finish == TOK_TOOL_CALLS ? END_CALLS : END_TURN);
    else if (s->turn.made >= o->n_predict && o->n_predict >= 0) end_answer(s, END_LENGTH);
    else if ((int)s->held.n + n > m->options.n_ctx) {
        if (!o->shift || !shift_context(s, said, n)) end_answer(s, END_CONTEXT);
    }
    for (int i = 0; i < n && !s->prompting; i++) push_id(s, &s->todo, said[i]);       // an answer that ended leaves it there
    s->fed &= !s->ending && !s->prompting && n == 1;
}

// The most tokens that may be guessed behind a text of n tokens, of which the answer has made so many.
static int room_for_drafts(const Session *s, int n, int made) {
    const AnswerOptions *o = &s->options;
    const int room = min_int(s->m->options.n_ctx - n, s->m->options.n_logits - 1);
    const int most = min_int(max_int(o->drafting.most, o->drafting.tree), room);
    return o->keep_logits ? 0 : o->n_predict < 0 ? most : min_int(most, o->n_predict - made - 1);
}

static SpecKind drafter_of(const Model *m) {
    return m->drafter.kind == DRAFTER_MTP ? SPEC_MTP : m->drafter.kind == DRAFTER_DFLASH ? SPEC_DFLASH : SPEC_OFF;
}

// Guesses of the grammar, where it leaves one way to go on. Their text is cut into tokens as if it stood alone; the
// last one may go on, so it is left out.
static void guess_grammar(Session *s, int most) {
    Guesser *g = &s->guesser;
    Grammar *grammar = s->options.grammar;
    GrammarState state = s->state;
    TokIds ids = { 0 };
    char text[128];
    size_t n = 0;
    for (int next = 0; next >= 0 && (int)ids.n < most; ) {
        next = n < sizeof text ? grammar_only(grammar, state) : -1;
        if (next >= 0 && next < 256) text[n++] = (char)next;
        if (next < 0 || next >= 256) {
            if (tok_encode(s->t, text, n, TOK_PLAIN, &ids) < 0) die("%s", s->t->err);
            if (next < 0 && n) ids.n--;
            n = 0;
        }
        if (next >= 256) push_id(s, &ids, grammar->named[next - 256]);
        if (next >= 0) state = grammar_behind(grammar, state, next);
    }
    if (grammar->failed) grammar_recover(grammar, &s->state, 1);       // it may not come to that
    g->n_only = min_int((int)ids.n, most);
    if (g->n_only) memcpy(g->only, ids.ids, (size_t)g->n_only * sizeof *g->only);
    tok_ids_free(&ids);
}

// Guesses what follows the token that runs next, where that is all that runs and it is known. rows: of other sessions.
static void draft(Session *s, int rows) {
    Guesser *g = &s->guesser;
    const double start = seconds();
    const int under_way = g->found.depth;              // if a step is: with what the drafter has found
    g->drafts.n = 0;
    if (g->how.kind == SPEC_OFF || s->prompting || s->todo.n != 1) return;
    push_id(s, &s->held, s->todo.ids[0]);              // for as long as it is looked up
    const int most = room_for_drafts(s, (int)s->held.n, s->turn.made);
    if (s->options.grammar && uses_grammar(&g->how)) guess_grammar(s, most);
    guess(g, &s->m->pace, drafter_of(s->m), s->held.ids, (int)s->held.n, most, rows);
    s->held.n--;
    if (s->fed && under_way) {
        g->found.depth = under_way;
        g->drafts.who = drafter_of(s->m);
        tree_of(&g->drafts, &g->found, under_way, 0);
    } else if (s->fed) {
        g->drafts.n = 0;
    }
    s->turn.drafts.draft_seconds += seconds() - start;
}

// What the drafter has found behind segment i of n: for the step that comes, if the text goes on from there.
static void take_candidates(Session *s, int i, int n, int depth) {
    const Verdict *v = &s->m->verdict;
    Candidates *c = &s->guesser.found;
    const int width = s->m->options.draft_width;
    c->depth = depth, c->width = width;
    for (int d = 0; d < depth; d++)
        for (int k = 0; k < width; k++) {
            const size_t at = ((size_t)d * n + i) * width + k;
            c->id[d][k] = v->ids[at];
            c->log_share[d][k] = v->logits[at] - v->logsumexp[(size_t)d * n + i];
        }
}

static void count_drafts(Session *s, int right) {
    DraftCount *count = &s->turn.drafts;
    const Drafts *d = &s->guesser.drafts;
    for (int k = 0; k < min_int(d->depth, DRAFT_DEPTHS) && k <= right; k++) count->tried[k]++, count->right[k] += k < right;
    count->n_passes++;
    count->by[d->who]++;
    count->drafted += d->n;
    count->accepted += right;
}

// Of the tokens chosen at the last token's row, number `row` of logits, and at those of the drafts: takes one after the
// other along the accepted path, number i. rows: of other sessions in the step.
static void take_tokens(Session *s, int i, int row, int rows, Event *e) {
    Guesser *g = &s->guesser;
    const Verdict *v = &s->m->verdict;
    const int32_t *chosen = v->chosen + row, *path = v->path + (size_t)i * STEP_ROWS;
    const int right = g->drafts.n ? v->accepted[i] - 1 : 0;
    int taken = 0, at = 0;
    begin_event(s, e, EVENT_TOKEN);
    take_token(s, chosen[0], e);
    while (taken < right) {
        if (s->ending || s->prompting || s->todo.n != 1) break;        // it ended, or goes on with other tokens
        push_id(s, &s->held, chosen[at]);
        at = g->drafts.branches ? path[++taken] : ++taken;
        take_token(s, chosen[at], e);
    }
    s->row = row + at;
    if (s->ending || s->prompting || s->todo.n != 1) g->found.depth = 0;
    if (!s->prompting) drop_drafts(s);
    if (!g->drafts.n) return;
    count_drafts(s, right);
    guesser_learn(g, &s->m->pace, right, rows);
    g->drafts.n = 0;
}

// How long the session is where the rings are to be saved next; INT_MAX: nowhere.
static int next_mark(const Session *s) {
    const int len = s->m->len[s->seq], every = s->prompting ? s->mark_every : 0;
    return min_int(s->want_mark > len ? s->want_mark : INT_MAX, every ? len - len % every + every : INT_MAX);
}

// Rows of the next step: of a prompt a chunk, which ends where the rings are to be saved.
static int next_rows(const Session *s) {
    const int n = (int)s->todo.n - s->at;
    return min_int(min_int(n, next_mark(s) - s->m->len[s->seq]), s->chunk);
}

enum { PATIENCE = 4 };        // steps without a guess, after which the next is issued ahead again

// Whether the step behind the one that was just sampled can be issued before its tokens are known, with as many drafts
// as the drafter makes now. Not behind a prompt: a step that is dropped is made good by another run of the last token,
// and the rounding of a prompt differs. Not where it is known that nothing follows, or somebody looks at each step, or
// where other guesses may follow.
static bool may_go_ahead(const Session *s, int depth) {
    const Model *m = s->m;
    const Guesser *g = &s->guesser;
    const int n = s->options.n_predict, most = 2 + g->drafts.n + depth;            // rows of the two steps
    const bool reads = uses_ngrams(&g->how) || (uses_grammar(&g->how) && s->options.grammar);
    const bool as_wanted = g->how.kind == SPEC_OFF || g->missed >= PATIENCE || !reads;
    return m->ops->mark && m->step.n_rows <= STEP_ROWS && m->len[s->seq] + most <= m->options.n_ctx &&
           !s->options.keep_logits && !m->dump_dir && (n < 0 || s->turn.made + most <= n) && !s->cancelled &&
           g->depth == depth && as_wanted && (!depth || (!g->how.tree && g->how.least <= 0));
}

// What a session has to tell without running anything. False: it has tokens to run.
static bool is_settled(Session *s, Event *e) {
    if (s->answering && s->cancelled && !s->ending) end_answer(s, END_CANCELLED);
    if (s->ending || !s->answering) {
        tell_end(s, e);
        return true;
    }
    *e = s->shifted;
    s->shifted.dropped = 0;
    return e->dropped > 0;
}

// Writes the rows that n sessions run in the next step, and makes segments of them. True: some are drafts.
static bool lay_out(Session *const *sessions, StepSeg *segs, int n) {
    Model *m = sessions[0]->m;
    StepRow *row = m->chunk;
    bool drafted = false;
    for (int i = 0; i < n; i++) {
        Session *s = sessions[i];
        const Drafts *d = &s->guesser.drafts;
        const int n_todo = next_rows(s);
        segs[i] = (StepSeg){ .seq = s->seq, .kind = d->n && d->branches ? SEG_TREE : SEG_CHAIN, .n = n_todo + d->n, .rows = row,
                             .more = (int)s->todo.n - s->at - n_todo };
        for (int k = 0; k < n_todo; k++)
            *row++ = (StepRow){ .token = s->todo.ids[s->at + k], .parent = -1, .want = s->at + k + 1 == (int)s->todo.n };
        for (int k = 0; k < d->n; k++) *row++ = (StepRow){ .token = d->token[k], .parent = d->parent[k], .want = true };
        drafted |= d->n > 0;
    }
    return drafted;
}

// Asks for each session how many guesses it wants of the drafter behind the step, and lists those that want some. -> the most
static int ask_drafter(Session *const *sessions, const StepSeg *segs, int n_sessions, int32_t *drafting, int *n_drafting) {
    Model *m = sessions[0]->m;
    int depth = 0;
    *n_drafting = 0;
    for (int k = 0; k < n_sessions; k++) {
        Session *s = sessions[k];
        Guesser *g = &s->guesser;
        const int n_todo = (int)s->todo.n - s->at, n = (int)s->held.n + n_todo + 1;
        const int room = min_int(room_for_drafts(s, n, s->turn.made + 1), m->options.draft_depth);
        const int most = segs[k].n - g->drafts.n < n_todo ? 0 : room;
        g->depth = depth_wanted(g, &m->pace, drafter_of(m), most, m->step.n_rows - segs[k].n);
        g->found.depth = 0;
        if (g->depth) drafting[(*n_drafting)++] = k;
        depth = max_int(depth, g->depth);
    }
    return depth;
}

// Issues the next step of n sessions before their tokens are known, each with so many drafts.
static void step_ahead(Model *m, StepSeg *segs, int n, int depth) {
    for (int i = 0; i < n; i++) {
        StepRow *rows = m->chunk + (size_t)i * (1 + depth);
        for (int r = 0; r <= depth; r++) rows[r] = (StepRow){ .token = FED, .want = true };
        segs[i] = (StepSeg){ .seq = segs[i].seq, .kind = SEG_CHAIN, .n = 1 + depth, .rows = rows };
    }
    step(m, segs, n);
}

// Chooses, commits and drafts behind the step that was just issued, which began at `start`; then the host waits for
// what came of it, while the next step may be under way already. True: it is.
static bool conclude(Session *const *sessions, StepSeg *segs, int n, bool drafted, double start) {
    Model *m = sessions[0]->m;
    const Ops *op = m->ops;
    Verdict *v = &m->verdict;
    int32_t drafting[MAX_SESSIONS];
    int n_drafting;
    const int depth = ask_drafter(sessions, segs, n, drafting, &n_drafting), n_rows = m->step.n_rows;
    bool ahead = n * (1 + depth) <= min_int(STEP_ROWS, m->options.n_logits) && (!drafted || depth);
    int kept = 0;                                      // rows of logits, if all sessions have some
    for (int i = 0; i < n; i++) kept += 1 + sessions[i]->guesser.drafts.n;
    for (int i = 0; i < n; i++) ahead = ahead && kept == m->step.n_kept && may_go_ahead(sessions[i], depth);
    if (drafted || depth) {
        const bool late = n_drafting && m->drafter.waiting[segs[drafting[0]].seq] > 8;     // it has much to take in first
        issue_verdict(m, drafting, n_drafting, depth, NULL);
        if (ahead) step_ahead(m, segs, n, depth);
        read_verdict(m);
        if (n == 1 && n_rows <= STEP_ROWS) step_took(&m->pace, n_rows, v->verified - start);
        if (n_drafting == 1 && !late) draft_took(&m->pace, drafter_of(m), depth, v->drafted - v->verified);
        for (int k = 0; k < n_drafting; k++) take_candidates(sessions[drafting[k]], k, n_drafting, depth);
        return ahead;
    }
    for (int i = 0; i < n; i++) v->accepted[i] = segs[i].n;
    finish_step(m, v->accepted, NULL, m->step.n_kept > 0);
    if (m->step.n_kept) op->copy(&(Copy){ v->chosen, m->s.chosen, (size_t)m->step.n_kept * sizeof *v->chosen, COPY_OUT });
    if (ahead) {
        const int mark = op->mark();
        step_ahead(m, segs, n, 0);
        op->wait_for(mark);
    } else if (m->step.n_kept) {
        op->wait();
    }
    return ahead;
}

// What may follow each row of logits of the step under way: where the answer has a form, what fits it behind the last token and
// along the guesses. Behind a guess that does not fit, and where the grammar fails, it is nothing.
static void mask_rows(Session *const *sessions, const StepSeg *segs, int n) {
    Model *m = sessions[0]->m;
    const size_t words = round_up((size_t)m->config.vocab, 32) / 32;
    int row = 0;
    for (int i = 0; i < n; i++) {
        Session *s = sessions[i];
        const Drafts *d = &s->guesser.drafts;
        Grammar *g = s->options.grammar;
        GrammarState state[STEP_ROWS] = { s->state };
        if (s->at + segs[i].n - d->n < (int)s->todo.n) continue;       // a part of a prompt: nothing is chosen
        for (int k = 0; k <= d->n; k++) {
            if (!g) {
                mask_row(m, row++, NULL);
                continue;
            }
            if (k) state[k] = state[d->parent[k - 1]], grammar_advance(g, &state[k], d->token[k - 1]);
            grammar_settle(g, state, k + 1);
            if (!state[k] || !grammar_mask(g, state[k], m->fitting, m->config.vocab))
                memset(m->fitting, 0, words * sizeof *m->fitting);
            if (k && g->failed) grammar_recover(g, state, k), state[k] = 0;        // it may not come to that
            mask_row(m, row++, m->fitting);
        }
        s->state = state[0];
    }
}

static Event prompt_event(const Session *s) { return (Event){ .kind = EVENT_PROMPT, .done = s->at, .total = (int)s->todo.n }; }

// Runs the step of n sessions, or goes on with that of a prompt. False: it was given up, or has stopped between two
// layers, and event says so.
static bool run_step(Session *const *sessions, const StepSeg *segs, int n, Event *event) {
    Session *s = sessions[0];
    Model *m = s->m;
    const bool goes_on = n == 1 && m->between == s->seq, is_prompt = n == 1 && segs[0].n > STEP_ROWS;
    if (!goes_on) lay_step(m, segs, n);
    assert(m->step.n_rows == segs[0].n || n > 1);
    m->stop = n == 1 ? &s->cancelled : NULL;
    const int end = go_through(m, is_prompt ? s->work : INFINITY);
    m->stop = NULL;
    if (is_prompt) s->worked = m->step.pass.worked;
    if (is_prompt) m->between = end == PAUSED ? s->seq : -1;
    if (end == PAUSED) *event = prompt_event(s);
    if (end == GIVEN_UP) give_up(s), is_settled(s, event);
    return end >= 0;
}

// Runs the next rows of n sessions in one step, and tells each what came of it.
static void run_sessions(Session *const *sessions, Event *const *events, int n) {
    Model *m = sessions[0]->m;
    StepSeg segs[MAX_SESSIONS] = { { 0 } };
    int32_t n_todo[MAX_SESSIONS];
    int marks[MAX_SESSIONS];
    const double start = seconds();
    const bool drafted = lay_out(sessions, segs, n);
    choose_kind(m, n == 1 && segs[0].n > STEP_ROWS);
    bool runs_already = m->step.ahead && m->step.n_segs == n;
    for (int i = 0; i < n; i++) {
        Session *s = sessions[i];
        n_todo[i] = segs[i].n - s->guesser.drafts.n;
        marks[i] = next_mark(s);
        runs_already = runs_already && s->fed && m->step.segs[i].seq == s->seq && m->step.segs[i].n == segs[i].n;
        s->turn.steps += !s->prompting;
        s->turn.read += s->prompting ? 0 : bytes_per_token(m, m->len[s->seq]);
    }
    if (!runs_already && !run_step(sessions, segs, n, events[0])) return;
    const int64_t step_number = m->step.number;
    const int n_step = m->step.n_rows;
    const double began = runs_already ? sessions[0]->returned : start;
    mask_rows(sessions, segs, n);                      // while a GPU computes
    const bool ahead = conclude(sessions, segs, n, drafted, began);
    const double now = seconds();
    if (n == 1 && n_step == 1 && !sessions[0]->guesser.depth) step_took(&m->pace, 1, now - began);
    for (int i = 0, row = 0; i < n; i++) {
        Session *s = sessions[i];
        const int n_rows = 1 + s->guesser.drafts.n;
        if (n_rows > 1) s->turn.drafts.verify_seconds += m->verdict.verified - began;
        if (s->guesser.depth) {
            const bool block = m->drafter.kind == DRAFTER_DFLASH;
            s->turn.drafts.draft_seconds += m->verdict.drafted - m->verdict.verified;
            s->turn.read += bytes_per_draft(m, m->len[s->seq]) * (block ? 1 : s->guesser.depth);
        }
        for (int r = 0; r < n_todo[i]; r++) push_id(s, &s->held, s->todo.ids[s->at++]);
        s->turn.n_run += s->prompting && !s->turn.shifts ? n_todo[i] : 0;
        s->fed = ahead;
        s->returned = now;
        if (marks[i] == m->len[s->seq]) session_save(s, s->at == (int)s->todo.n || isinf(s->work));
        if (s->at == (int)s->todo.n) {
            s->step = step_number;
            take_tokens(s, i, row, n_step - n_rows, events[i]);
            row += n_rows;
        } else {
            *events[i] = prompt_event(s);
        }
    }
}

// One piece of work for each of n sessions of one model, all different, and events[i] for what came of it: a chunk of a
// prompt, some layers of one (Session.work) or a ring of what is kept behind it, or a token. Sessions with few rows to
// run share steps; a longer chunk has one of its own, so that what a session is told does not depend on the others.
// While one is between two layers, others wait.
static void sessions_next(Session *const *sessions, int n, Event *events) {
    Session *some[MAX_SESSIONS];
    Event *theirs[MAX_SESSIONS];
    int n_some = 0, rows = 0, wanted = 0;
    for (int i = 0; i < n; i++) {
        Session *s = sessions[i];
        Event *e = &events[i];
        if (is_settled(s, e)) continue;
        if (s->saving) {
            session_save(s, isinf(s->work));
            *e = prompt_event(s);
            continue;
        }
        draft(s, rows);
        const int more = next_rows(s) + s->guesser.drafts.n;
        if (more > STEP_ROWS) {
            const bool waits = s->m->between >= 0 && s->m->between != s->seq;
            if (waits) *e = prompt_event(s);
            else run_sessions(&s, &e, 1);
            continue;
        }
        const int wants = 1 + s->guesser.drafts.n;
        if (n_some && (rows + more > STEP_ROWS || wanted + wants > s->m->options.n_logits)) {
            run_sessions(some, theirs, n_some);
            n_some = rows = wanted = 0;
        }
        some[n_some] = s;
        theirs[n_some++] = e;
        rows += more;
        wanted += wants;
    }
    if (n_some) run_sessions(some, theirs, n_some);
}

static void session_next(Session *s, Event *e) { sessions_next(&s, 1, e); }

// Times a step of n guesses that stand in no text: of session 0, which is empty, and so it is afterwards.
static void time_guesses(Model *m, int32_t id, int n) {
    const double start = seconds();
    for (int r = 0; r <= n; r++) m->chunk[r] = (StepRow){ .token = id, .parent = r - 1, .want = true };
    step(m, &(StepSeg){ .seq = 0, .kind = SEG_CHAIN, .n = n + 1, .rows = m->chunk }, 1);
    issue_verdict(m, NULL, 0, 0, NULL);
    read_verdict(m);
    step_took(&m->pace, n + 1, m->verdict.verified - start);
    reset_session(m, 0);
}

// What steps and drafts of every depth take is measured once, in session 0, which is empty then. Where the backend records
// steps, the first two of each kind are slow: so none of them is in an answer that chooses its depth by what that takes.
static void measure_pace(Model *m, Tokenizer *t, const Drafting *how) {
    enum { RECORDED = 2, STEPS = 4 };                  // rounds before the one that counts
    const SpecKind who = drafter_of(m);
    const int most = min_int(how->most, who == SPEC_OFF ? m->options.n_logits - 1 : m->options.draft_depth);
    const int32_t id = t->bos >= 0 ? t->bos : 0;
    Session s;
    if (how->kind != SPEC_AUTO || !m->ops->mark || m->options.lazy_draft) return;
    session_open(&s, m, t, 0);
    for (int k = 0; k <= RECORDED; k++) {
        m->pace.step = m->pace.draft = (Times){ 0 };
        for (int n = 0; n <= most; n = next_depth(n, most)) {
            Event e = { .kind = EVENT_PROMPT };
            const AnswerOptions o = { .n_predict = -1, .ignore_eos = true, .think_budget = -1, .sampling.repeat = 1,
                                      .drafting = { .kind = n ? who : SPEC_OFF, .most = n } };
            for (int i = 0; n && who == SPEC_OFF && i < STEPS; i++) time_guesses(m, id, n);
            if (n && who == SPEC_OFF) continue;
            if (!session_start(&s, &(Prompt){ .ids = &id, .n = 1 }, &o)) die("%s", s.err);
            for (; e.kind != EVENT_END; session_next(&s, &e)) if (s.turn.steps >= STEPS) session_cancel(&s);
            session_forget(&s);
        }
    }
    session_close(&s);
    reset_session(m, 0);
}

// The logits (vocab) that the session's last token was chosen from. Where another step has been run since, the token
// before it runs once more. False: there are none yet.
static bool session_logits(Session *s, float *logits) {
    Model *m = s->m;
    if (s->row < 0) return false;
    if (s->step == m->other.step.number) choose_kind(m, !m->on_prompts);
    if (s->step != m->step.number) {
        const int n = m->len[s->seq] - 1;
        const StepRow last = { .token = s->held.ids[n], .want = true };
        shorten_session(m, s->seq, s->held.ids, n);
        step(m, &(StepSeg){ .seq = s->seq, .kind = SEG_CHAIN, .n = 1, .rows = &last }, 1);
        commit_all(m);
        s->row = 0;
        s->step = m->step.number;
        s->fed = false;
    }
    read_logits(m, s->row, logits);
    return true;
}

// ==== [11] Text and verbs: logits, tokenize, detokenize, plan =========================================================
// The tokenizer of a file, verbs that need no part, and how an answer is told on the terminal.

static TokStr tok_str(GgufStr s) { return (TokStr){ s.s, s.n }; }

static int token_id(Gguf *g, const char *key, int vocab) {           // -1: the file does not say
    return gguf_find_kv(g, key) ? (int)key_int(g, key, 0, vocab - 1, 0) : -1;
}

// vocab: how many tokens the weights are for; 0 for a file that is read for its tokenizer only.
static void load_tokenizer(Tokenizer *t, Gguf *g, int vocab) {
    GgufStr kind = { "", 0 };
    const int has_kind = gguf_get_str(g, "tokenizer.ggml.model", &kind);
    if (has_kind < 0) die_gguf(g);
    if (!has_kind) die("%s: key 'tokenizer.ggml.model': missing; the file has no tokenizer", g->path);
    if (!str_is(kind, "gemma4"))
        die("%s: key 'tokenizer.ggml.model': expected 'gemma4', got '%s' (E_META_RANGE)", g->path, shown(kind));
    const GgufStr *tokens = NULL, *merges = NULL;
    size_t n_tokens = 0, n_merges = 0;
    int found = gguf_get_strs(g, "tokenizer.ggml.tokens", &tokens, &n_tokens);
    if (found < 0) die_gguf(g);
    if (!found) die("%s: key 'tokenizer.ggml.tokens': missing (E_META_MISSING)", g->path);
    if (vocab && n_tokens != (size_t)vocab)
        die("%s: key 'tokenizer.ggml.tokens': expected %d texts, one per row of token_embd.weight, got %zu (E_SHAPE)",
            g->path, vocab, n_tokens);
    if (n_tokens < 1 || n_tokens > MAX_VOCAB)
        die("%s: key 'tokenizer.ggml.tokens': expected 1 to %d texts, got %zu (E_META_ARRAY)", g->path, MAX_VOCAB,
            n_tokens);
    found = gguf_get_strs(g, "tokenizer.ggml.merges", &merges, &n_merges);
    if (found < 0) die_gguf(g);
    if (!found) die("%s: key 'tokenizer.ggml.merges': missing (E_META_MISSING)", g->path);
    if (n_merges > INT_MAX)
        die("%s: key 'tokenizer.ggml.merges': expected at most %d, got %zu (E_META_ARRAY)", g->path, INT_MAX, n_merges);
    for (size_t i = 0; i < n_merges; i++)
        if (merges[i].n < 3 || !memchr(merges[i].s + 1, ' ', merges[i].n - 2))
            die("%s: key 'tokenizer.ggml.merges': merge %zu: expected two texts with a space between, got '%s' "
                "(E_META_RANGE)", g->path, i, shown(merges[i]));
    const GgufKv *scores = gguf_find_kv(g, "tokenizer.ggml.scores");  // nothing reads them
    if (scores && (scores->type != GGUF_V_ARRAY || scores->count != n_tokens))
        die("%s: key 'tokenizer.ggml.scores': expected an array of %zu (E_META_ARRAY)", g->path, n_tokens);
    static const char *const unread[] = { "unknown", "padding", "mask", "eom", "separator" };
    for (size_t i = 0; i < sizeof unread / sizeof *unread; i++) {
        char key[64];
        snprintf(key, sizeof key, "tokenizer.ggml.%s_token_id", unread[i]);
        token_id(g, key, (int)n_tokens);
    }

    TokStr *text = alloc_or_die(n_tokens + n_merges, sizeof *text);
    int64_t *types64 = alloc_or_die(n_tokens, sizeof *types64);
    int32_t *types = alloc_or_die(n_tokens, sizeof *types);
    for (size_t i = 0; i < n_tokens; i++) text[i] = tok_str(tokens[i]);
    for (size_t i = 0; i < n_merges; i++) text[n_tokens + i] = tok_str(merges[i]);
    const int has_types = gguf_get_ints(g, "tokenizer.ggml.token_type", INT32_MIN, INT32_MAX, types64, n_tokens);
    if (has_types < 0) die_gguf(g);
    for (size_t i = 0; i < n_tokens; i++) types[i] = (int32_t)types64[i];
    GgufStr chat_template = { "", 0 };
    if (gguf_get_str(g, "tokenizer.chat_template", &chat_template) < 0) die_gguf(g);
    const TokVocab v = {
        .tokens = text, .n_tokens = (int)n_tokens, .types = has_types ? types : NULL,
        .merges = text + n_tokens, .n_merges = (int)n_merges,
        .bos = token_id(g, "tokenizer.ggml.bos_token_id", (int)n_tokens),
        .eos = token_id(g, "tokenizer.ggml.eos_token_id", (int)n_tokens),
        .eot = token_id(g, "tokenizer.ggml.eot_token_id", (int)n_tokens),
        .chat_template = tok_str(chat_template),
        .has_ple = key_int(g, "gemma4.embedding_length_per_layer_input", 0, 1 << 16, 0) > 0
    };
    if (tok_init(t, &v) < 0) die("%s: tokenizer: %s", g->path, t->err);
    free(text);
    free(types64);
    free(types);
}

// The GPU that operations are planned for; "": the CPU. Until the next call.
static const char *card_name(const Ops *op) {
    static char name[280];
    const Card *card = op->card ? op->card() : NULL;
    snprintf(name, sizeof name, "%s%s", card ? card->name : "", card && is_pretended(card) ? " (pretended)" : "");
    return name;
}

static void print_card(FILE *f, const char *label, const Ops *op) {
    const Card *card = op->card ? op->card() : NULL;
    if (card)
        fprintf(f, "%s%s, compute capability %d.%d, %d SMs, %.1f GiB%s\n", label, card_name(op), card->major, card->minor,
                card->n_sm, (double)card->memory / (1 << 30), card->host_memory ? " shared with the host" : "");
}

// What is about to run, on stderr: model, plan, device.
static void print_plan(Model *m) {
    const Config *c = &m->config;
    const double mib = 1 << 20;
    bool tied = false;
    for (int i = 0; i < m->n_caches; i++) tied |= m->caches[i].n_rot > 0;
    const KvType k = m->options.k_type, v = m->options.v_type;
    fprintf(stderr, "# %s: %d layers, dim %d, %d experts, vocabulary %d, weights %.1f MiB (%s)\n", model_name(m),
            c->n_layers, c->dim, c->n_experts, c->vocab, (double)m->binder.bytes / mib,
            gguf_type_name(m->weights.layer[0].attn_q.type));
    fprintf(stderr, "# plan: context %d: global KV %.1f MiB (%s%s%s %s), rings %.1f MiB, stage %.1f MiB, activations "
            "%.1f MiB, scratch %.1f MiB\n", m->options.n_ctx, (double)m->plan.kv_global / mib,
            kv_names[k], k == v ? "" : "/", k == v ? "" : kv_names[v], tied ? "tied" : "untied",
            (double)m->plan.kv_rings / mib, (double)m->plan.stage / mib, (double)m->plan.activations / mib,
            (double)m->plan.scratch / mib);
    if (m->plan.in_host)
        fprintf(stderr, "# plan: the table of per-layer embeddings, %.1f MiB, stays in host memory: the GPU has no "
                "room for it\n", (double)m->plan.in_host / mib);
    if (m->plan.weights)
        fprintf(stderr, "# weights loaded in %.2f s, %.2f GB/s\n", m->upload_seconds,
                (double)m->binder.bytes / m->upload_seconds * 1e-9);
    if (m->options.n_ctx > c->n_ctx_train)
        fprintf(stderr, "# warning: a context of %d, but the model was trained for %d\n", m->options.n_ctx,
                c->n_ctx_train);
    print_unknown(&m->binder);
    const Drafter *d = &m->drafter;
    if (d->kind != DRAFTER_NONE) {
        fprintf(stderr, "# drafter: %s %s: %d layers, dim %d, weights %.1f MiB (%s)%s; plan: %.1f MiB\n",
                d->kind == DRAFTER_MTP ? "MTP assistant" : "DFlash", d->gguf.path,
                d->config.n_layers, d->config.dim, (double)d->binder.bytes / mib,
                gguf_type_name(d->weights.layer[0].attn_q.type), d->uploaded ? "" : " not loaded yet",
                (double)m->plan.drafter / mib);
        print_unknown(&d->binder);
    }
    const char *note = "";
#ifdef USE_CUDA
    if (m->ops == cpu_ops()) note = " (no GPU that this build can use)";
#endif
    fprintf(stderr, "# backend: %s%s, %d thread%s\n", m->ops->name, note, count_threads(),
            count_threads() == 1 ? "" : "s");
    print_card(stderr, "# card: ", m->ops);
}

// A file that takes its name only when it is complete. Until then it is called TARGET.(8 hex digits).tmp, and what TARGET was
// stays. Only a process that is killed outright leaves such a file; the next one draws another name, so it blocks no write.
typedef struct {
    const char *path;         // as the user wrote it
    char *target, *tmp;       // the file that path leads to over symbolic links; its temporary name
    int fd;
} Output;

// The file that a path leads to over symbolic links, whether it exists or not. To be freed; NULL: see errno.
static char *follow_links(const char *path) {
    char *at = alloc_or_die(strlen(path) + 1, 1);
    strcpy(at, path);
    for (int n = 0; n < 40; n++) {
        char to[4096];
        const ssize_t len = readlink(at, to, sizeof to);
        if (len < 0) return at;                        // no link, or nothing of that name
        const char *slash = *to == '/' ? NULL : strrchr(at, '/');
        const size_t folder = slash ? (size_t)(slash + 1 - at) : 0;
        char *next = alloc_or_die(folder + (size_t)len + 1, 1);
        memcpy(next, at, folder);
        memcpy(next + folder, to, (size_t)len);
        free(at);
        at = next;
    }
    free(at);
    errno = ELOOP;
    return NULL;
}

// Begins to write the file `path` -> 0, or errno; either way finish_output() ends it. A file that exists keeps its mode and has
// to be writable; a new one gets `mode`, less the umask.
static int create_output(Output *o, const char *path, mode_t mode) {
    struct stat old;
    struct timespec now;
    *o = (Output){ .path = path, .target = follow_links(path), .fd = -1 };
    if (!o->target) return errno;
    const bool exists = !stat(path, &old);
    if (exists && !S_ISREG(old.st_mode)) return S_ISDIR(old.st_mode) ? EISDIR : ENOTSUP;
    if (exists && access(o->target, W_OK)) return errno;
    const size_t size = strlen(o->target) + 16;
    o->tmp = alloc_or_die(size, 1);
    for (int k = 0; k < 100 && o->fd < 0; k++) {
        clock_gettime(CLOCK_REALTIME, &now);
        const uint64_t drawn = (uint64_t)now.tv_sec << 30 ^ (uint64_t)now.tv_nsec ^ (uint64_t)getpid() << 44;
        snprintf(o->tmp, size, "%s.%08x.tmp", o->target, (unsigned)((drawn + (uint64_t)k) * 0x9E3779B97F4A7C15u >> 32));
        o->fd = open(o->tmp, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, exists ? 0600 : mode);
        if (o->fd < 0 && errno != EEXIST) return errno;
    }
    if (o->fd < 0) return EEXIST;
    unfinished = o->tmp;
    if (exists && fchown(o->fd, old.st_uid, old.st_gid)) {}            // only root gives files away
    if (exists && fchmod(o->fd, old.st_mode & 07777)) {}               // some file systems have no modes
    return 0;
}

static int write_output(const Output *o, const void *bytes, size_t n) {            // 0, or errno
    for (const uint8_t *p = bytes; n > 0; ) {
        const ssize_t done = write(o->fd, p, n < (1 << 30) ? n : 1 << 30);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) return done ? errno : EIO;
        p += done;
        n -= (size_t)done;
    }
    return 0;
}

// Gives the file its name if err is 0, else removes it; o is used up. Returns err, or errno of what failed.
static int finish_output(Output *o, int err) {
    if (o->fd >= 0) {
        if (!err && fsync(o->fd)) err = errno;
        if (close(o->fd) && !err) err = errno;
        if (!err && rename(o->tmp, o->target)) err = errno;
        if (err) unlink(o->tmp);
    }
    unfinished = NULL;
    char *slash = o->target ? strrchr(o->target, '/') : NULL;
    if (slash) slash[slash == o->target] = 0;           // the folder, so that the new name survives a power cut too
    const int dir = err ? -1 : open(slash ? o->target : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (dir >= 0) {
        fsync(dir);
        close(dir);
    }
    free(o->target);
    free(o->tmp);
    return err;
}

// gemma4 logits: the logits of every position of a list of ids, after the soft-cap, as n x vocab float32.
static void verb_logits(const char *model, const Ops *ops, PlanOptions o, const char *ids_path, const char *out_path,
                        const char *dump_dir, bool check_tensors) {
    size_t size = 0;
    uint8_t *bytes = read_file(ids_path, &size, "--ids");
    if (!size || size % 4) die("--ids: %s: expected little-endian int32 ids, got %zu bytes", ids_path, size);
    if (size / 4 > MAX_CONTEXT) die("--ids: %s: expected at most %d ids, got %zu", ids_path, MAX_CONTEXT, size / 4);
    const int n = (int)(size / 4);
    if (o.n_ctx <= 0) o.n_ctx = n;
    if (o.n_ctx == n) o.ctx_from = "number of --ids";
    if (n > o.n_ctx) die("--ids: %s: expected at most %d ids, got %d; try -c %d", ids_path, o.n_ctx, n, n);
    struct stat in, out;
    if (!stat(model, &in) && !stat(out_path, &out) && in.st_dev == out.st_dev && in.st_ino == out.st_ino)
        die("-o: %s: expected another file, got the model itself", out_path);
    o.n_logits = o.n_batch = STEP_ROWS;
    Model *m = alloc_or_die(1, sizeof *m);
    load_model(m, model, ops, o, dump_dir);
    if (check_tensors) read_weights(m, true);
    int32_t *ids = alloc_or_die(n, sizeof *ids);
    for (int i = 0; i < n; i++) {
        const uint8_t *b = bytes + (size_t)i * 4;
        ids[i] = (int32_t)((uint32_t)b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24);
        if (ids[i] < 0 || ids[i] >= m->config.vocab)
            die("--ids: %s: id %d: expected 0..%d, got %" PRId32, ids_path, i, m->config.vocab - 1, ids[i]);
    }
    FILE *f = fopen(out_path, "wb");
    if (!f) die("-o: %s: %s", out_path, strerror(errno));
    float *logits = alloc_or_die(m->config.vocab, sizeof *logits);
    const double t0 = seconds();
    progress("logits", 0, n, "positions");
    for (int at = 0; at < n; ) {
        const int chunk = min_int(n - at, STEP_ROWS);
        for (int i = 0; i < chunk; i++) m->chunk[i] = (StepRow){ .token = ids[at + i], .want = true };
        step(m, &(StepSeg){ .seq = 0, .kind = SEG_CHAIN, .n = chunk, .rows = m->chunk }, 1);
        for (int i = 0; i < chunk; i++) {
            read_logits(m, i, logits);
            if (fwrite(logits, sizeof *logits, m->config.vocab, f) != (size_t)m->config.vocab)
                die("-o: %s: %s", out_path, strerror(errno));
        }
        commit_all(m);
        at += chunk;
        progress("logits", at, n, "positions");
    }
    if (fclose(f)) die("-o: %s: %s", out_path, strerror(errno));
    print_plan(m);
    fprintf(stderr, "# %d positions x %d logits in %.2f s\n", n, m->config.vocab, seconds() - t0);
    free(logits);
    free(ids);
    free(bytes);
    free_model(m);
    free(m);
}

// The tokenizer of a file, which may hold nothing else.
static void open_tokenizer(Tokenizer *t, Gguf *g, const char *path) {
    open_model_file(g, path);
    load_tokenizer(t, g, 0);
}

// gemma4 tokenize: the ids of a text in decimal, on one line, no <bos> added.
static void verb_tokenize(const char *model, const char *text, size_t n, TokMode mode) {
    Gguf g;
    Tokenizer tok;
    TokIds ids = { 0 };
    open_tokenizer(&tok, &g, model);
    if (tok_encode(&tok, text, n, mode, &ids) < 0) die("tokenize: %s", tok.err);
    for (size_t i = 0; i < ids.n; i++) printf("%s%" PRId32, i ? " " : "", ids.ids[i]);
    printf("\n");
    flush_output();
    tok_ids_free(&ids);
    tok_free(&tok);
    gguf_close(&g);
}

// gemma4 detokenize: the bytes of ids, markers as their text.
static void verb_detokenize(const char *model, const char *list) {
    Gguf g;
    Tokenizer tok;
    open_tokenizer(&tok, &g, model);
    for (int round = 0; round < 2; round++) {          // first all are checked, then they are written
        const char *s = list;
        for (int i = 0; ; i++) {
            s += strspn(s, " \t\r\n");
            if (!*s) break;
            char *end;
            errno = 0;
            const long id = strtol(s, &end, 10);
            if (end == s || errno || id < 0 || id >= tok.n_tokens || !strchr(" \t\r\n", *end))
                die("--ids: number %d: expected an id from 0 to %d, got '%.*s'", i + 1, tok.n_tokens - 1,
                    min_int((int)strcspn(s, " \t\r\n"), 40), s);
            const TokStr piece = tok_piece(&tok, (int32_t)id, true);
            if (round && fwrite(piece.s, 1, piece.n, stdout) != piece.n) die("standard output: %s", strerror(errno));
            s = end;
        }
    }
    flush_output();
    tok_free(&tok);
    gguf_close(&g);
}

// gemma4 plan: what a context takes in memory, without taking it. Dies when it does not fit.
static void verb_plan(const char *model, const Ops *ops, PlanOptions o) {
    static const int contexts[] = { 8 << 10, 32 << 10, 128 << 10, 256 << 10, 1 << 20 };
    const double gib = 1 << 30;
    Model *m = alloc_or_die(1, sizeof *m);
    plan_model(m, model, ops, o, NULL);
    const size_t budget = plan_budget(m);
    const int n_ctx = m->options.n_ctx, trained = m->config.n_ctx_train, most = largest_context(m, trained, budget);
    size_t free_bytes, total;
    ops->memory(&free_bytes, &total);
    const size_t needed = fit_context(m, n_ctx, budget);
    const Plan plan = m->plan;
    const size_t weights = plan.weights ? plan.weights : m->binder.bytes;
    printf("%s: context %d, trained for %d\n", model_name(m), n_ctx, trained);
    print_card(stdout, "card         ", ops);
    printf("weights      %9.3f GiB%s\n", (double)weights / gib, plan.weights ? "" : ", read in the mapped file");
    if (plan.in_host)
        printf("             %9.3f GiB in host memory: the table of per-layer embeddings\n",
               (double)plan.in_host / gib);
    printf("global KV    %9.3f GiB\n", (double)plan.kv_global / gib);
    printf("rings        %9.3f GiB\n", (double)plan.kv_rings / gib);
    printf("stage        %9.3f GiB\n", (double)plan.stage / gib);
    printf("activations  %9.3f GiB\n", (double)plan.activations / gib);
    printf("scratch      %9.3f GiB\n", (double)plan.scratch / gib);
    if (o.drafter)
        printf("drafter      %9.3f GiB\n", (double)(plan.drafter + (plan.weights ? 0 : m->drafter.binder.bytes)) / gib);
    printf("total        %9.3f GiB\n", (double)needed / gib);
    printf("room         %9.3f GiB, %s\n", (double)budget / gib,
           o.memory ? "as --vram says" : "31/32 of the backend's free memory");
    if (!o.memory) printf("free         %9.3f GiB of %.3f\n", (double)free_bytes / gib, (double)total / gib);
    printf("largest context that fits: %d%s\n\n", most, most == trained ? ", as trained" : "");
    printf("%8s  %9s  %9s\n", "context", "KV GiB", "total GiB");
    for (size_t i = 0; i < sizeof contexts / sizeof *contexts; i++) {
        const size_t all = fit_context(m, contexts[i], budget);
        printf("%8d  %9.3f  %9.3f  %s%s%s\n", contexts[i], (double)(m->plan.kv_global + m->plan.kv_rings) / gib,
               (double)all / gib, all <= budget ? "fits" : "does not fit", m->plan.in_host ? ", the table in host "
               "memory" : "", contexts[i] > trained ? ", past the trained length" : "");
    }
    flush_output();
    if (fit_context(m, n_ctx, budget) > budget) die_no_room(m);
    free_model(m);
    free(m);
}

// ---- answers on the terminal: text on stdout as it comes, statistics on stderr, each line with "# " ----

static volatile sig_atomic_t interrupted;              // the number of the first signal; a second one ends the process
static Session *volatile answering;                    // what it cancels

static void on_interrupt(int signal_number) {
    if (interrupted) {                                 // what was generated is written; a terminal is as we found it
        const char *end = bar_shown ? "\r\033[K" : "";
        if (unfinished) unlink(unfinished);
        if (write(2, end, strlen(end)) < 0) _exit(1);
        _exit(128 + signal_number);
    }
    interrupted = signal_number;
    if (answering) session_cancel(answering);
}

// From now on the signal asks to stop, unless it is ignored, as nohup and shells without job control have it.
static void stop_on(int signal_number) {
    const struct sigaction act = { .sa_handler = on_interrupt, .sa_flags = (int)SA_RESTART };
    struct sigaction before;
    if (!sigaction(signal_number, NULL, &before) && before.sa_handler != SIG_IGN) sigaction(signal_number, &act, NULL);
}

// FNV-1a of the bytes, to compare two runs at a glance.
static uint64_t hash_bytes(const void *p, size_t n) {
    uint64_t h = 0xcbf29ce484222325u;
    for (size_t i = 0; i < n; i++) h = (h ^ ((const uint8_t *)p)[i]) * 0x100000001b3u;
    return h;
}

static void write_text(const char *s, size_t n) {
    if (fwrite(s, 1, n, stdout) != n || fflush(stdout)) die("standard output: %s", strerror(errno));
}

// The text of a token in quotes, so that it stays on its line and cannot steer a terminal.
static void print_quoted(FILE *f, TokStr s) {
    fputc('"', f);
    for (size_t i = 0; i < s.n; i++) {
        const unsigned char c = (unsigned char)s.s[i];
        if (c == '\n') fputs("\\n", f);
        else if (c == '"' || c == '\\') fprintf(f, "\\%c", c);
        else if (c < 0x20 || c > 0x7e) fprintf(f, "\\x%02x", c);
        else fputc(c, f);
    }
    fputc('"', f);
}

// The n likeliest of the logits (vocab) that a token was chosen from, on one line of stderr: id, text, logit and
// probability as the model gives them, before mask, bias, penalties and temperature. Overwrites what it shows.
static void print_top_logits(const Tokenizer *t, int pos, int32_t chosen, int n, float *logits, int vocab) {
    const double sum = logsumexp(logits, vocab);
    fprintf(stderr, "# position %d, chosen %" PRId32 ":", pos, chosen);
    for (int i = 0; i < min_int(n, vocab); i++) {
        int best = 0;
        for (int id = 1; id < vocab; id++) if (logits[id] > logits[best]) best = id;
        fprintf(stderr, "%s %d ", i ? "," : "", best);
        print_quoted(stderr, tok_piece(t, best, true));
        fprintf(stderr, " %.4f %.4g", (double)logits[best], exp(logits[best] - sum));
        logits[best] = -INFINITY;
    }
    fprintf(stderr, "\n");
}

// The calls of a finished reply, each as a line of JSON on stdout: {"name":"f","arguments":{...}}.
static void show_calls(const TokReply *r) {
    for (int i = 0; i < r->n_calls; i++) {
        TokText name = { 0 };
        if (tok_add_json_string(&name, r->calls[i].name) < 0) die("out of memory for a tool call");
        if (i == 0 && r->content.n && r->content.s[r->content.n - 1] != '\n') write_text("\n", 1);
        write_text("{\"name\":", 8);
        write_text(name.s, name.n);
        write_text(",\"arguments\":", 13);
        write_text(r->calls[i].arguments.s, r->calls[i].arguments.n);
        write_text("}\n", 2);
        tok_text_free(&name);
    }
}

// What drafting did. The share of right guesses in a loop says nothing, so it is not told.
static void print_drafts(const Turn *t) {
    const DraftCount *d = &t->drafts;
    fprintf(stderr, "# drafts: %d in %d of %d steps", d->drafted, d->n_passes, t->steps);
    for (int k = 0; k < SPEC_KINDS; k++)
        if (d->by[k]) fprintf(stderr, ", %s in %d", spec_names[k], d->by[k]);
    if (!t->loop) {
        fprintf(stderr, "; %d right, %.2f tokens a step; right by depth, if all before were:", d->accepted,
                (double)(t->made - (t->steps == 0)) / max_int(t->steps, 1));
        for (int i = 0; i < DRAFT_DEPTHS && d->tried[i]; i++)
            fprintf(stderr, " %.0f", 100.0 * d->right[i] / d->tried[i]);
        fprintf(stderr, " %%");
    }
    fprintf(stderr, "; %.3f ms to draft, %.3f ms to verify, for each of these steps\n",
            1e3 * d->draft_seconds / d->n_passes, 1e3 * d->verify_seconds / d->n_passes);
}

static void print_turn(const Turn *t) {
    const DraftCount *d = &t->drafts;
    fprintf(stderr, "# prompt: %d tokens in %.3f s, %.1f tok/s", t->n_run, t->prompt_seconds,
            t->n_run / t->prompt_seconds);
    if (t->n_run < t->n_prompt) fprintf(stderr, "; %d were in the cache", t->n_prompt - t->n_run);
    if (t->density > 0) fprintf(stderr, "; pFlash: attended to %.1f %% of the blocks", 100 * t->density);
    if (t->steps)
        fprintf(stderr, "\n# decode: %d tokens in %d steps, %.3f s, %.1f tok/s, %.2f GB/s", t->made - 1, t->steps,
                t->decode_seconds, (t->made - 1) / t->decode_seconds, t->read / t->decode_seconds * 1e-9);
    fprintf(stderr, "\n# %d tokens generated, stopped: %s", t->made, t->why);
    if (t->hash) fprintf(stderr, "; last logits %016" PRIx64, t->hash);
    fprintf(stderr, "\n");
    if (t->loop) fprintf(stderr, "# the text has fallen into a loop of %d token%s\n", t->loop, t->loop == 1 ? "" : "s");
    if (d->n_passes) print_drafts(t);
}

typedef struct {              // what is shown of an answer
    int  top_logits;          // candidates of every token, on stderr
    bool thoughts;            // on stderr, on lines of their own
    bool newline;             // end the text with one also where it does not go to a terminal
} ShowOptions;

static void show_text(const Event *e, const ShowOptions *o, bool *thought, bool *content) {
    if (o->thoughts && e->thought.n) {
        if (!*thought) fprintf(stderr, "# thought:\n");
        fwrite(e->thought.s, 1, e->thought.n, stderr);
        *thought = true;
    }
    if (!e->content.n) return;
    if (*thought && !*content) fprintf(stderr, "\n");
    write_text(e->content.s, e->content.n);
    *content = true;
}

// Runs the answer that the session has started to its end, or to Ctrl-C, and prints it. False: s->err says why not.
static bool print_answer(Session *s, const ShowOptions *o) {
    const size_t vocab = (size_t)s->m->config.vocab, total = s->todo.n;
    float *logits = alloc_or_die(vocab, sizeof *logits);
    bool thought = false, content = false;
    Event e = { .kind = EVENT_PROMPT };
    progress("prompt", 0, total, "tokens");
    answering = s;
    if (interrupted) session_cancel(s);                // it came before there was anything to cancel
    while (e.kind != EVENT_END) {
        session_next(s, &e);
        if (e.kind == EVENT_PROMPT) progress("prompt", (size_t)e.done, (size_t)e.total, "tokens");
        else if (bar_shown) progress("prompt", total, total, "tokens");
        if (e.kind == EVENT_SHIFT)
            fprintf(stderr, "%s# context full: %d tokens dropped, the first %d and the newest %d stay\n",
                    isatty(1) && isatty(2) ? "\n" : "", e.dropped, e.head, e.kept);
        if (e.n_ids && o->top_logits && session_logits(s, logits))
            print_top_logits(s->t, s->m->len[s->seq], e.ids[0], o->top_logits, logits, (int)vocab);
        show_text(&e, o, &thought, &content);
    }
    answering = NULL;
    if (thought && !content) fprintf(stderr, "\n");
    show_calls(&s->reply);
    if ((o->newline || isatty(1)) && !s->reply.n_calls) write_text("\n", 1);
    s->turn.density = read_density(s->m);
    if (session_logits(s, logits)) s->turn.hash = hash_bytes(logits, vocab * sizeof *logits);
    free(logits);
    return e.end != END_ERROR;
}

#include "parts/convert.h"
#include "parts/reference.h"
#include "parts/session.h"
#include "parts/bench.h"
#include "parts/compress.h"
#include "parts/niah.h"
#include "parts/lines.h"
#include "parts/chat.h"
#include "parts/store.h"
#include "parts/server.h"

// ==== [12] Command line ===============================================================================================
// gemma4 MODEL [flags] generates; gemma4 VERB MODEL [flags] does something else. One table describes every flag: its
// spelling, what it takes, where the value goes, and the line that --help prints.

#ifndef TESTING
#define VERSION "0.1"
#define PFLASH_ALPHA 0.1                // --pflash without a number: docs/quality.md
#define PFLASH_ALPHA_TEXT "0.1"
#define KV_TYPES "f16|f32|bf16|q8_0|q4_0|tq4|tq3"

typedef enum {
    GENERATE = 1, LOGITS = 2, TOKENIZE = 4, DETOKENIZE = 8, QUANTIZE = 16, BENCH = 32, PLAN = 64, CHECK = 128,
    SERVE = 256, PPL = 512, NIAH = 1024, ANSWERS = GENERATE | SERVE, DRAFTS = ANSWERS | PLAN | BENCH,
    RUNS = GENERATE | LOGITS, PLANS = RUNS | SERVE | PLAN | PPL, ANY = 2047
} Verb;

static const struct { const char *name; Verb verb; } verbs[] = {
    { "logits", LOGITS }, { "tokenize", TOKENIZE }, { "detokenize", DETOKENIZE }, { "quantize", QUANTIZE },
    { "bench", BENCH }, { "plan", PLAN }, { "check", CHECK }, { "serve", SERVE },
    { "ppl", PPL }, { "niah", NIAH }
};

typedef struct {
    Verb verb;
    const char *grammar, *grammar_file, *schema, *schema_file, *tool_choice;
    const char *model, *prompt, *prompt_file, *system, *tools, *chat_template, *ids, *out, *dump, *kv_layout, *against;
    const char *k_type, *v_type, *ring_type, *history, *session, *drafter, *spec, *force;
    const char *target, *type;                  // quantize: OUT, TYPE
    const char *prompts, *generated, *rows, *depths;      // bench: lists of numbers
    const char *fill, *svg, *scorer, *card;
    const char *host, *api_key, *api_key_file, *alias, *session_dir;   // serve
    double port, parallel, chunk, queue, timeout, max_body, cache_ram, session_disk;
    const char *kld_base, *kld;                 // ppl
    double n_runs, stride, n_chunks;
    double n_predict, n_ctx, n_threads, temperature, top_k, top_p, min_p, repeat, presence, frequency, seed, top_logits;
    double think_budget, memory, tail, draft_max, draft_min_p, tree;
    double pflash, pflash_from, pflash_density, n_needles, compress;
    TextList biases, stops;
    bool interactive, shift, verbose, raw, think, show_thoughts, ignore_eos, check_tensors, plain, special, lazy_draft;
    bool log_text, help, version;
} Flags;

// A list: the flag may come again. Maybe: a number may follow, else PFLASH_ALPHA counts
typedef enum { FLAG_TEXT, FLAG_LIST, FLAG_CHOICE, FLAG_INT, FLAG_REAL, FLAG_MAYBE, FLAG_ON } FlagKind;

typedef struct {
    const char *name, *alias, *value;            // alias: other names, with spaces between; value of a CHOICE: all there are
    FlagKind    kind;
    int         verbs;        // those that take it
    size_t      field;        // offset into Flags
    double      min, max;
    const char *help;
} Flag;

#define FIELD(name) offsetof(Flags, name)
static const Flag flags[] = {
    { "-m", "--model", "FILE", FLAG_TEXT, ANY, FIELD(model), 0, 0, "the model, instead of the first argument" },
    { "-t", "--threads", "N", FLAG_INT, RUNS | SERVE | BENCH | CHECK | QUANTIZE | PPL | NIAH, FIELD(n_threads), 1,
      MAX_THREADS, "CPU threads; default: one per core" },
    { "--check-tensors", NULL, NULL, FLAG_ON, RUNS | SERVE, FIELD(check_tensors), 0, 0,
      "read the whole file first and refuse numbers that are none: NaN, Inf, reserved scales; default: off" },
    { "-p", "--prompt", "TEXT", FLAG_TEXT, GENERATE | TOKENIZE, FIELD(prompt), 0, 0,
      "what to answer, or to continue with --raw; default: -f, standard input, or a chat" },
    { "-f", "--file", "FILE", FLAG_TEXT, GENERATE | TOKENIZE | PPL, FIELD(prompt_file), 0, 0,
      "the prompt, for ppl the text, is in this file, - for standard input; with -p: behind that text and an empty "
      "line; default: none" },
    { "-sys", "--system --system-prompt", "TEXT", FLAG_TEXT, GENERATE, FIELD(system), 0, 0,
      "system turn; default: none" },
    { "-i", "--interactive -cnv --conversation", NULL, FLAG_ON, GENERATE, FIELD(interactive), 0, 0,
      "chat, also where input or output is no terminal; -p is said first; default: without a prompt on a terminal" },
    { "--history", NULL, "FILE", FLAG_TEXT, GENERATE, FIELD(history), 0, 0,
      "chat: keep typed lines in this file from one chat to the next; default: none" },
    { "--session", NULL, "FILE", FLAG_TEXT, GENERATE, FIELD(session), 0, 0,
      "go on where the run that wrote FILE stopped, cache and all, and write it again; -p is the next message, with "
      "--raw the text goes on with it; default: none" },
    { "--think", NULL, NULL, FLAG_ON, ANSWERS, FIELD(think), 0, 0,
      "let the model think before it answers; default: it answers at once" },
    { "--think-budget", "--reasoning-budget", "N", FLAG_INT, ANSWERS, FIELD(think_budget), -1, INT_MAX,
      "tokens of thought, then it is closed and the answer goes on; 0: none; default -1: no limit" },
    { "--tools", NULL, "FILE", FLAG_TEXT, GENERATE, FIELD(tools), 0, 0,
      "tools it may call, a JSON list as in the OpenAI API; a call is a line {\"name\":..,\"arguments\":{..}} on "
      "stdout; default: none" },
    { "--tool-choice", NULL, "CHOICE", FLAG_TEXT, GENERATE, FIELD(tool_choice), 0, 0,
      "required: the answer is calls of tools; a tool's name: of this one; auto (default): as the model likes" },
    { "--template", NULL, "large|small", FLAG_CHOICE, ANSWERS, FIELD(chat_template), 0, 0,
      "chat template: large (12B, 26B, 31B) or small (E2B, E4B); default: as the file's template or its shape says" },
    { "--raw", NULL, NULL, FLAG_ON, GENERATE, FIELD(raw), 0, 0,
      "continue the prompt as it is, without chat turns; <bos> is added; default: off" },
    { "-n", "--predict --n-predict", "N", FLAG_INT, ANSWERS, FIELD(n_predict), -1, INT_MAX,
      "most tokens to generate, in a chat for each answer; default -1: until the turn ends or the context is full" },
    { "--temp", "--temperature", "T", FLAG_REAL, ANSWERS, FIELD(temperature), 0, 1000,
      "temperature; 0: always the likeliest token; default: the file's, else 1.0" },
    { "--top-k", NULL, "N", FLAG_INT, ANSWERS, FIELD(top_k), 0, INT_MAX,
      "sample from the N likeliest tokens, 0: all; default: the file's, else 64" },
    { "--top-p", NULL, "P", FLAG_REAL, ANSWERS, FIELD(top_p), 0, 1,
      "sample from the likeliest tokens that hold P of the probability; default: the file's, else 0.95" },
    { "--min-p", NULL, "P", FLAG_REAL, ANSWERS, FIELD(min_p), 0, 1,
      "leave out tokens less than P times as likely as the likeliest; default 0" },
    { "--repeat-penalty", NULL, "R", FLAG_REAL, ANSWERS, FIELD(repeat), 0.001, 1000,
      "logits of tokens seen: / R above 0, * R below; default 1. Seen: in all of prompt and text (llama.cpp: the last "
      "64)" },
    { "--presence-penalty", NULL, "P", FLAG_REAL, ANSWERS, FIELD(presence), -1000, 1000,
      "take P from the logits of tokens seen; default 0" },
    { "--frequency-penalty", NULL, "P", FLAG_REAL, ANSWERS, FIELD(frequency), -1000, 1000,
      "take P from the logit of a token for each time it was seen; default 0" },
    { "-l", "--logit-bias", "ID+B", FLAG_LIST, GENERATE, FIELD(biases), 0, 0,
      "add B to the logit of token ID; ID-B: take it away, ID-inf: never; with commas, or again, for more; default: "
      "none" },
    { "-s", "--seed", "N", FLAG_INT, ANSWERS, FIELD(seed), 0, 4294967295.0,
      "random seed; default: another one each time, printed" },
    { "-r", "--stop --reverse-prompt", "TEXT", FLAG_LIST, GENERATE, FIELD(stops), 0, 0,
      "stop before this text, which is not printed; again for more; default: none" },
    { "--grammar", NULL, "TEXT", FLAG_TEXT, GENERATE, FIELD(grammar), 0, 0,
      "answer with a text that fits this grammar (GBNF), and nothing else; default: anything" },
    { "--grammar-file", NULL, "FILE", FLAG_TEXT, GENERATE, FIELD(grammar_file), 0, 0,
      "that grammar is in this file; default: none" },
    { "-j", "--json-schema", "SCHEMA", FLAG_TEXT, GENERATE, FIELD(schema), 0, 0,
      "answer with JSON that fits this schema; '{}': with any; default: anything" },
    { "-jf", "--json-schema-file", "FILE", FLAG_TEXT, GENERATE, FIELD(schema_file), 0, 0,
      "that schema is in this file; default: none" },
    { "--ignore-eos", NULL, NULL, FLAG_ON, GENERATE, FIELD(ignore_eos), 0, 0,
      "go on after the end of the turn; default: off" },
    { "-md", "--model-draft --spec-draft-model", "FILE", FLAG_TEXT, DRAFTS, FIELD(drafter), 0, 0,
      "a drafter made for the model, an MTP assistant: it guesses tokens, and several are checked in one step, which "
      "changes no text; default: none" },
    { "--spec", "--spec-type", "off|mtp|dflash|ngram|ngram-mod|grammar|auto", FLAG_CHOICE, ANSWERS, FIELD(spec), 0, 0,
      "who guesses: off; mtp or dflash: the drafter, always as far as --draft-max; ngram: the text itself, where its "
      "last tokens have been before; ngram-mod: a table of what followed 12 tokens in any text so far; grammar: what "
      "--grammar or --json-schema leave no choice in; auto: drafter, ngram and grammar, as far as it makes answers "
      "faster; default: auto with -md, else off" },
    { "--draft-max", "--draft --draft-n --spec-draft-n-max",
      "N", FLAG_INT, DRAFTS | BENCH, FIELD(draft_max), 1, DRAFT_MAX, "most tokens that are guessed at a time; default: "
      "16 for ngram, 4 for mtp, the block for dflash" },
    { "--draft-min-p", "--draft-p-min --spec-draft-p-min", "P", FLAG_REAL, ANSWERS, FIELD(draft_min_p), 0, 1,
      "a drafter's guess that it holds for less likely ends its guesses; default 0" },
    { "--tree", "--spec-tree", "N", FLAG_INT, ANSWERS, FIELD(tree), 1, DRAFT_MAX,
      "guesses of a drafter are a tree of up to N tokens, the likeliest; default: a chain" },
    { "--lazy-draft", NULL, NULL, FLAG_ON, DRAFTS, FIELD(lazy_draft), 0, 0,
      "read the drafter's weights when it guesses first; its memory is set aside at start all the same; default: off" },
    { "-c", "--ctx-size", "N", FLAG_INT, PLANS, FIELD(n_ctx), 0, MAX_CONTEXT,
      "tokens of context; 0: what memory has room for, up to the trained length; default: the trained length, 8192 at "
      "most; ppl: ids of a chunk, 512" },
    { "--context-shift", NULL, NULL, FLAG_ON, GENERATE, FIELD(shift), 0, 0,
      "when the context is full, forget its older half but for the system turn, and go on; default: stop" },
    { "-ctk", "--cache-type-k", KV_TYPES, FLAG_CHOICE, PLANS | BENCH | CHECK | NIAH, FIELD(k_type), 0, 0,
      "type of cached K of global layers; default f16, for logits and check f32" },
    { "-ctv", "--cache-type-v", KV_TYPES, FLAG_CHOICE, PLANS | BENCH | CHECK | NIAH, FIELD(v_type), 0, 0,
      "type of cached V of global layers; another than K's needs --kv-layout untied where K and V are one; default: as "
      "K" },
    { "--kv-swa", NULL, KV_TYPES, FLAG_CHOICE, PLANS | BENCH | CHECK | NIAH, FIELD(ring_type), 0, 0,
      "type of what sliding layers cache; default f16, or f32 with -ctk f32" },
    { "--kv-tail", NULL, "N", FLAG_INT, PLANS | BENCH | CHECK | NIAH, FIELD(tail), 0, MAX_CONTEXT,
      "keep the newest N tokens of quantised global layers in f16 too; default 0" },
    { "--kv-layout", NULL, "tied|untied", FLAG_CHOICE, PLANS | BENCH | CHECK | NIAH, FIELD(kv_layout), 0, 0,
      "tied (default): K and V of global layers stored once where V is the K projection; untied: apart" },
    { "--pflash", NULL, "[ALPHA]", FLAG_MAYBE, ANSWERS | PLAN | PPL | BENCH | NIAH, FIELD(pflash), 0, 1,
      "sparse prompts, lossy: in global layers 64 tokens of a long prompt attend to the 128-token blocks that weigh at "
      "least ALPHA of the heaviest, the first and the nearest; 1: to all, 0: off (default); without a number "
      PFLASH_ALPHA_TEXT },
    { "--pflash-from", NULL, "N", FLAG_INT, ANSWERS | PLAN | PPL | BENCH | NIAH, FIELD(pflash_from), 0, MAX_CONTEXT,
      "prompts that end before token N stay dense; default 16384" },
    { "--pflash-density", NULL, "PERCENT", FLAG_REAL, PPL | BENCH | NIAH, FIELD(pflash_density), 0, 100,
      "to measure: attend to this part of the blocks, the heaviest, whatever they weigh; default 0: --pflash decides" },
    { "--compress", NULL, "R", FLAG_REAL, GENERATE | NIAH, FIELD(compress), 0.001, 0.999,
      "prompt compression, lossy: of a long prompt, in a chat of a long message, the model sees this part of the "
      "tokens only, those that its end attends to most; default: all" },
    { "--scorer", NULL, "FILE", FLAG_TEXT, GENERATE | NIAH, FIELD(scorer), 0, 0,
      "--compress: a small model of the same vocabulary, which reads the whole prompt; default: the first layers of "
      "the model itself" },
    { "--against", NULL, "cpu|reference", FLAG_CHOICE, CHECK, FIELD(against), 0, 0,
      "check: compare with this; reference: the definition in plain loops, slow beyond small files; default cpu" },
    { "--vram", NULL, "G", FLAG_REAL, PLANS | BENCH | NIAH, FIELD(memory), 0.001, 1e6,
      "plan as if the backend had G GiB of memory, and end if that is not enough; default: what is free" },
    { "--card", NULL, CARD_NAMES, FLAG_CHOICE, PLANS | BENCH | CHECK | NIAH, FIELD(card), 0, 0,
      "treat the GPU as this one: launches and memory follow from it, never beyond what is there; plan needs no GPU; default: "
      "as what it is" },
    { "--show-thoughts", NULL, NULL, FLAG_ON, GENERATE, FIELD(show_thoughts), 0, 0,
      "write thoughts to stderr; default: they are dropped" },
    { "--top-logits", NULL, "N", FLAG_INT, GENERATE, FIELD(top_logits), 0, MAX_VOCAB,
      "print the N likeliest candidates of every token: id, text, logit, probability, before bias and penalties; "
      "default 0" },
    { "-v", "--verbose", NULL, FLAG_ON, GENERATE, FIELD(verbose), 0, 0,
      "chat: statistics after every answer; default: when /stats asks" },
    { "-o", "--output", "FILE", FLAG_TEXT, LOGITS, FIELD(out), 0, 0,
      "logits: where they go, positions x vocabulary float32; no default" },
    { "--dump", NULL, "DIR", FLAG_TEXT, RUNS, FIELD(dump), 0, 0,
      "write every checkpoint to DIR/NAME-LAYER.f32, rows x width float32; default: none" },
    { "--ids", NULL, "IDS", FLAG_TEXT, LOGITS | DETOKENIZE, FIELD(ids), 0, 0,
      "logits: a file of token ids, little-endian int32, <bos> included; detokenize: the ids themselves, \"2 105 "
      "2364\"; no default" },
    { "--plain", NULL, NULL, FLAG_ON, TOKENIZE, FIELD(plain), 0, 0,
      "tokenize: no string is special; default: those around calls and thoughts are" },
    { "--special", NULL, NULL, FLAG_ON, TOKENIZE | PPL, FIELD(special), 0, 0,
      "tokenize, ppl: all of them are, such as <|turn>; default: as above, for ppl none" },
    { "--chunks", NULL, "N", FLAG_INT, PPL, FIELD(n_chunks), 0, INT_MAX,
      "ppl: chunks to run; default 0: all that the text has" },
    { "--ppl-stride", NULL, "N", FLAG_INT, PPL, FIELD(stride), 0, MAX_CONTEXT,
      "ppl: chunks begin N ids apart and are N/2 longer, and the last N ids of each are judged; default 0: the second "
      "half" },
    { "--kld-base", NULL, "FILE", FLAG_TEXT, PPL, FIELD(kld_base), 0, 0,
      "ppl: write the distributions to this file, two bytes for each id judged and word of the vocabulary; default: "
      "none" },
    { "--kld", NULL, "FILE", FLAG_TEXT, PPL, FIELD(kld), 0, 0,
      "ppl: compare with what --kld-base wrote for this text: KL divergence, first choices; default: none" },
    { "-o", "--output", "md|csv|json|jsonl", FLAG_CHOICE, PPL, FIELD(out), 0, 0, "ppl: format of the result; default md" },
    { "-p", "--n-prompt", "N,..", FLAG_TEXT, BENCH, FIELD(prompts), 0, 0,
      "bench: tokens of a prompt; default 512, 0: none" },
    { "-n", "--n-gen", "N,..", FLAG_TEXT, BENCH, FIELD(generated), 0, 0,
      "bench: tokens to generate; default 128, 0: none" },
    { "--rows", NULL, "N,..", FLAG_TEXT, BENCH, FIELD(rows), 0, 0,
      "bench: steps of N rows, 1 to 64, as drafts are verified, again and again at the same depth; default 0: none" },
    { "-d", "--n-depth", "N,..", FLAG_TEXT, BENCH, FIELD(depths), 0, 0,
      "bench: tokens that are in the context already; default 0" },
    { "--spec-force", NULL, "P,..", FLAG_TEXT, BENCH, FIELD(force), 0, 0,
      "bench: with -md, generation takes the drafter's guesses for right by chance, P of 1 at each depth, the last P "
      "beyond, to measure what drafting costs; default: no drafting" },
    { "--fill", NULL, "prompt|random", FLAG_CHOICE, BENCH, FIELD(fill), 0, 0,
      "bench: how they got there: prompt (default): they are run; random: cache rows are random numbers, which is "
      "quick" },
    { "-r", "--repetitions", "N", FLAG_INT, BENCH, FIELD(n_runs), 1, 1000, "bench: runs of each test; default 5" },
    { "-o", "--output", "md|csv|json", FLAG_CHOICE, BENCH, FIELD(out), 0, 0, "bench: format of the result; default md" },
    { "-p", "--n-prompt", "N,..", FLAG_TEXT, NIAH, FIELD(prompts), 0, 0,
      "niah: tokens of a prompt; default 1024,2048,4096" },
    { "-d", "--depth", "P,..", FLAG_TEXT, NIAH, FIELD(depths), 0, 0,
      "niah: percent of the text before the code; default 0,25,50,75,100" },
    { "--needles", NULL, "N", FLAG_INT, NIAH, FIELD(n_needles), 1, MAX_NEEDLES,
      "niah: codes in a text, all asked for; default 1" },
    { "-r", "--repetitions", "N", FLAG_INT, NIAH, FIELD(n_runs), 1, 1000,
      "niah: texts for each length and depth; default 5" },
    { "-f", "--file", "FILE", FLAG_TEXT, NIAH, FIELD(prompt_file), 0, 0,
      "niah: texts are made of this one; default: made up" },
    { "-o", "--output", "md|csv", FLAG_CHOICE, NIAH, FIELD(out), 0, 0, "niah: format of the result; default md" },
    { "--svg", NULL, "FILE", FLAG_TEXT, NIAH, FIELD(svg), 0, 0, "niah: write a heat map to this file; default: none" },
    { "--host", NULL, "ADDRESS", FLAG_TEXT, SERVE, FIELD(host), 0, 0,
      "serve: where to listen; default 127.0.0.1, which only this machine reaches" },
    { "--port", NULL, "N", FLAG_INT, SERVE, FIELD(port), 0, 65535,
      "serve: default 8080; 0: any that is free, printed" },
    { "-np", "--parallel", "N", FLAG_INT, SERVE, FIELD(parallel), 1, MAX_SESSIONS,
      "serve: answers at a time, each with a context of its own; default 1" },
    { "--chunk", NULL, "N", FLAG_INT, SERVE, FIELD(chunk), 1, LARGE_BATCH,
      "serve: tokens of a prompt between two steps of other answers; default with -np: 512, else what memory has room for" },
    { "--api-key", NULL, "KEY", FLAG_TEXT, SERVE, FIELD(api_key), 0, 0, "serve: asked of every request; default: none" },
    { "--api-key-file", NULL, "FILE", FLAG_TEXT, SERVE, FIELD(api_key_file), 0, 0,
      "serve: it is the first line of this file; default: none" },
    { "--alias", NULL, "NAME", FLAG_TEXT, SERVE, FIELD(alias), 0, 0,
      "serve: what the model is called; default: as its file" },
    { "--queue", NULL, "N", FLAG_INT, SERVE, FIELD(queue), 0, 100000,
      "serve: requests that may wait for a session, more are refused; default 64" },
    { "--timeout", NULL, "S", FLAG_INT, SERVE, FIELD(timeout), 1, 1e6,
      "serve: seconds after which an answer is cut; default 3600" },
    { "--max-body", NULL, "M", FLAG_INT, SERVE, FIELD(max_body), 1, 1024, "serve: most MiB of a request; default 16" },
    { "--cache-ram", "-cram", "M", FLAG_INT, SERVE, FIELD(cache_ram), 0, 1 << 24,
      "serve: MiB of host memory to go back to earlier prompts and conversations; default an eighth of what is free" },
    { "--session-dir", NULL, "DIR", FLAG_TEXT, SERVE, FIELD(session_dir), 0, 0,
      "serve: conversations are kept in files there, also for the next run; default: in memory only" },
    { "--session-disk", NULL, "M", FLAG_INT, SERVE, FIELD(session_disk), 1, 1 << 24,
      "serve: most MiB of these files; default 65536" },
    { "--log-text", NULL, NULL, FLAG_ON, SERVE, FIELD(log_text), 0, 0,
      "serve: prompts and answers go to the log; default: not" },
    { "-h", "--help", NULL, FLAG_ON, ANY, FIELD(help), 0, 0, "this text" },
    { "--version", NULL, NULL, FLAG_ON, ANY, FIELD(version), 0, 0, "version and backend" },
};

static const struct { const char *first, *title; } groups[] = {   // of flags, in their order, each with its first one
    { "-m", "model" }, { "-p", "prompt" }, { "-n", "sampling" }, { "-md", "drafting" }, { "-c", "context" },
    { "--show-thoughts", "output" },
    { "--ids", "other verbs" }, { "-p", "bench" },
    { "--host", "serve" }, { "-h", "help" }
};

// Flags of llama.cpp whose job needs no flag here.
static const struct { const char *names, *why; } needless[] = {
    { "-ngl --gpu-layers --n-gpu-layers -nkvo --no-kv-offload -sm --split-mode -mg --main-gpu -ts --tensor-split",
      "a model and its cache are on the GPU as a whole, where there is one; --vram G limits what they take, "
      "CUDA_VISIBLE_DEVICES names the GPU, and make cpu builds without" },
    { "-fa --flash-attn", "attention never writes its scores to memory, so there is nothing to switch on" },
    { "--mlock --mmap --no-mmap --no-warmup --warmup --numa -dio --direct-io",
      "weights are mapped and read ahead before the first prompt; a GPU gets them once" },
    { "--jinja --no-jinja --chat-template --chat-template-file",
      "Gemma 4's template is built in; --template large or small chooses its variant, --raw does without" },
    { "-b --batch-size -ub --ubatch-size -tb --threads-batch",
      "how many rows of a prompt run at a time follows from the model and the memory; -t N sets the threads" },
    { "-no-cnv --no-conversation -st --single-turn", "with -p there is one answer; -i makes it a chat" },
    { "--no-display-prompt --color --simple-io --log-disable --no-perf --perf",
      "standard output gets the answer alone, standard error the rest; 2>/dev/null hides it" },
};

static bool is_listed(const char *names, const char *arg) {          // names with spaces or bars between
    const size_t n = strlen(arg);
    for (const char *at = names; at && *at; at += strspn(at, " |")) {
        const size_t len = strcspn(at, " |");
        if (len == n && !memcmp(at, arg, n)) return true;
        at += len;
    }
    return false;
}

static void print_help(void) {
    printf("gemma4 " VERSION " - runs Gemma 4 text models from GGUF files\n\n"
           "  gemma4 MODEL.gguf -p TEXT [flags]                answers: text on stdout, statistics on stderr\n"
           "  gemma4 MODEL.gguf [flags]                        chat on a terminal; else the prompt is standard input\n"
           "  gemma4 serve MODEL.gguf [--port N] [-np N]       HTTP API as OpenAI's; docs/server.md\n"
           "  gemma4 plan MODEL.gguf [-c N] [--card NAME]      what a context takes in memory\n"
           "  gemma4 logits MODEL.gguf --ids FILE -o FILE      logits of every position, after the soft-cap\n"
           "  gemma4 tokenize MODEL.gguf (-p TEXT | -f FILE)   the ids of a text; no <bos> is added\n"
           "  gemma4 detokenize MODEL.gguf --ids \"2 105 2364\"  the text of ids\n"
           "  gemma4 bench MODEL.gguf [flags]                  tokens per second, as llama-bench measures them\n"
           "  gemma4 ppl MODEL.gguf -f TEXT [flags]            perplexity, as llama-perplexity counts it; --kld: divergence\n"
           "  gemma4 niah MODEL.gguf [flags]                   codes planted in long texts, and whether they are found\n"
           "  gemma4 check MODEL.gguf                          the GPU against the CPU (--against), checkpoint by checkpoint\n"
           "  gemma4 quantize IN OUT.gguf TYPE                 q8_0 q6_k q5_k_m q4_k_m q4_k_s q4_0 bf16 f16 f32\n");
    for (size_t i = 0, group = 0; i < sizeof flags / sizeof *flags; i++) {
        char left[80];
        const Flag *f = &flags[i];
        if (group < sizeof groups / sizeof *groups && !strcmp(groups[group].first, f->name))
            printf("\n%s\n", groups[group++].title);
        int n = snprintf(left, sizeof left, "%s", f->name);
        for (const char *at = f->alias; at && *at; at += strspn(at, " ")) {
            n += snprintf(left + n, sizeof left - (size_t)n, ", %.*s", (int)strcspn(at, " "), at);
            at += strcspn(at, " ");
        }
        snprintf(left + n, sizeof left - (size_t)n, " %s", f->value ? f->value : "");
        printf("  %-28s%s%s\n", left, strlen(left) > 28 ? "\n                               " : " ", f->help);
    }
}

static bool is_named(const Flag *f, const char *arg) {
    return !strcmp(arg, f->name) || is_listed(f->alias, arg);
}

static Verb verb_named(const char *name) {
    for (size_t k = 0; k < sizeof verbs / sizeof *verbs; k++)
        if (!strcmp(name, verbs[k].name)) return verbs[k].verb;
    return 0;
}

// A flag that the verb does not take would do nothing: say to whom it belongs.
static void refuse_flag(const Flag *flag, Verb verb) {
    char owners[90] = "";
    const char *own = "generating";
    for (size_t k = 0; k < sizeof verbs / sizeof *verbs; k++) {
        if (verbs[k].verb == verb) own = verbs[k].name;
        if (!(flag->verbs & (int)verbs[k].verb)) continue;
        snprintf(owners + strlen(owners), sizeof owners - strlen(owners), "%s%s", *owners ? ", " : "", verbs[k].name);
    }
    const bool generates = flag->verbs & GENERATE;
    die("%s: %s does not take it; it belongs to %s%s%s", flag->name, own, generates ? "generating" : "",
        generates && *owners ? ", " : "", owners);
}

// The flag of this name that the verb takes, else the first one: refuse_flag says whose it is. NULL: there is none.
static const Flag *find_flag(const char *arg, Verb verb) {
    const Flag *flag = NULL;
    for (size_t k = 0; k < sizeof flags / sizeof *flags; k++)
        if (is_named(&flags[k], arg) && (!flag || flags[k].verbs & (int)verb)) flag = &flags[k];
    return flag;
}

static bool is_number(const char *word) {
    char *end;
    strtod(word, &end);
    return end != word && !*end;
}

// Where the verb stands, the first word that is neither a flag nor a flag's value; 0: that word is no verb. Of flags
// that share a name all take a value, or none does.
static int find_verb(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        const Flag *flag = find_flag(argv[i], 0);
        if (!flag && argv[i][0] != '-') return verb_named(argv[i]) ? i : 0;
        i += flag && (flag->kind == FLAG_MAYBE ? i + 1 < argc && is_number(argv[i + 1]) : flag->kind != FLAG_ON);
    }
    return 0;
}

static bool is_no_file(const char *word) { return !strpbrk(word, "./") && access(word, F_OK); }

__attribute__((noreturn)) static void die_no_verb(const char *word) {
    char names[120] = "";
    for (size_t k = 0; k < sizeof verbs / sizeof *verbs; k++)
        snprintf(names + strlen(names), sizeof names - strlen(names), "%s%s", k ? ", " : "", verbs[k].name);
    die("%s: no such verb, and no file: expected a model, or one of %s before it", word, names);
}

// A word behind the model that nothing takes.
__attribute__((noreturn)) static void refuse_word(const char *model, const char *word) {
    if (is_no_file(model)) die_no_verb(model);
    if (verb_named(word)) die("%s: expected it before the model; try gemma4 %s %s", word, word, model);
    die("%s: expected a flag, got a second model (the first is %s)", word, model);
}

static void parse_flags(Flags *f, int argc, char **argv) {
    bool given[sizeof flags / sizeof *flags] = { false };
    const char *word = NULL;                           // the model, as long as no -m says otherwise
    const int verb_at = find_verb(argc, argv);
    f->verb = verb_at ? verb_named(argv[verb_at]) : GENERATE;
    for (int i = 1; i < argc; i++) {
        const char *arg = argv[i];
        const Flag *flag = find_flag(arg, f->verb);
        if (i == verb_at) continue;
        if (!flag) {
            for (size_t k = 0; k < sizeof needless / sizeof *needless; k++)
                if (is_listed(needless[k].names, arg)) die("%s: not needed: %s", arg, needless[k].why);
            if (arg[0] == '-') die("%s: no such flag; try --help", arg);
            if (!f->model) f->model = word = arg;
            else if (f->verb == QUANTIZE && !f->target) f->target = arg;
            else if (f->verb == QUANTIZE && !f->type) f->type = arg;
            else refuse_word(f->model, arg);
            continue;
        }
        given[flag - flags] = true;
        void *field = (char *)f + flag->field;
        if (flag->kind == FLAG_ON) {
            *(bool *)field = true;
            continue;
        }
        if (flag->kind == FLAG_MAYBE && !(i + 1 < argc && is_number(argv[i + 1]))) {
            *(double *)field = PFLASH_ALPHA;
            continue;
        }
        if (++i == argc) die("%s: expected a value (%s), got the end of the line", arg, flag->value);
        if (flag->kind == FLAG_CHOICE && !is_listed(flag->value, argv[i]))
            die("%s: expected %s, got '%s'", arg, flag->value, argv[i]);
        if (flag->kind == FLAG_TEXT || flag->kind == FLAG_CHOICE) {
            *(const char **)field = argv[i];
            continue;
        }
        if (flag->kind == FLAG_LIST) {
            TextList *list = field;
            list->text = realloc(list->text, (size_t)(list->n + 1) * sizeof *list->text);
            if (!list->text) die("%s: out of memory", arg);
            list->text[list->n++] = argv[i];
            continue;
        }
        char *end;
        errno = 0;
        const double v = strtod(argv[i], &end);
        const bool whole = v == floor(v);
        if (end == argv[i] || *end || errno || !(v >= flag->min && v <= flag->max) ||
            (flag->kind == FLAG_INT && !whole))
            die("%s: expected %s from %.10g to %.10g, got '%s'", arg,
                flag->kind == FLAG_INT ? "a whole number" : "a number", flag->min, flag->max, argv[i]);
        *(double *)field = v;
    }
    for (size_t k = 0; k < sizeof flags / sizeof *flags; k++)
        if (given[k] && !(flags[k].verbs & (int)f->verb)) refuse_flag(&flags[k], f->verb);
    if (word && is_no_file(word) && f->verb == GENERATE && !f->help) die_no_verb(word);
    if (word && f->model != word) refuse_word(f->model, word);
}

static IntList parse_list(const char *flag, const char *text, int otherwise) {
    IntList list = { .n = { otherwise }, .count = 1 };
    for (const char *at = text; at; at++) {
        char *end;
        errno = 0;
        const long v = *at >= '0' && *at <= '9' ? strtol(at, &end, 10) : -1;
        if (at == text) list.count = 0;
        if (v < 0 || v > MAX_CONTEXT || errno || (*end && *end != ',') || list.count == 32)
            die("%s: expected at most 32 whole numbers from 0 to %d with commas between, got '%s'", flag, MAX_CONTEXT,
                text);
        list.n[list.count++] = (int)v;
        if (!*end) break;
        at = end;
    }
    return list;
}

// --spec-force: shares by depth, of as many guesses as --draft-max says, else as there are shares.
static Forced parse_forced(const Flags *f) {
    Forced forced = { .depth = 0 };
    int n = 0;
    if (!f->force) return forced;
    if (!f->drafter) die("--spec-force: expected a drafter; try -md FILE");
    for (const char *at = f->force; ; at++) {
        char *end;
        const float share = strtof(at, &end);
        if (end == at || !(share >= 0 && share <= 1) || n == DRAFT_MAX || (*end && *end != ','))
            die("--spec-force: expected numbers from 0 to 1 with commas between, got '%s'", f->force);
        forced.share[n++] = share;
        if (!*end) break;
        at = end;
    }
    forced.depth = f->draft_max ? (int)f->draft_max : n;
    for (; n < forced.depth; n++) forced.share[n] = forced.share[n - 1];
    return forced;
}

// The number of a choice among names, which has it; without one `otherwise`.
static int number_of(const char *choice, const char *const *names, int otherwise) {
    int n = 0;
    if (!choice) return otherwise;
    while (strcmp(choice, names[n])) n++;
    return n;
}

static bool is_choice(const char *choice, const char *name) { return choice && !strcmp(choice, name); }

// A sampling number: the command line's, else the file's, else Gemma's.
static double sampling_value(Gguf *g, double given, const char *key, double max, double otherwise) {
    const GgufKv *kv = gguf_find_kv(g, key);
    if (!isnan(given) || !kv) return isnan(given) ? otherwise : given;
    double v = 0;
    int64_t i = 0;
    const bool is_float = kv->type == GGUF_V_F32 || kv->type == GGUF_V_F64;
    if (is_float ? gguf_get_float(g, key, &v) < 0 : gguf_get_int(g, key, 0, INT_MAX, &i) < 0) die_gguf(g);
    if (!is_float) v = (double)i;
    if (!(v >= 0 && v <= max)) die("%s: key '%s': expected 0 to %.10g, got %g (E_META_RANGE)", g->path, key, max, v);
    return v;
}

// Biases "ID+VALUE", "ID-VALUE", several with commas between, as (vocab); those of one id add up.
static float *parse_biases(const TextList *list, int vocab) {
    float *bias = alloc_or_die(vocab, sizeof *bias);
    for (int i = 0; i < list->n; i++)
        for (const char *at = list->text[i]; ; at++) {
            char *sign, *end = NULL;
            const long id = *at >= '0' && *at <= '9' ? strtol(at, &sign, 10) : -1;
            const float value = id >= 0 && (*sign == '+' || *sign == '-') ? strtof(sign, &end) : 0;
            if (!end || end == sign || (*end && *end != ',') || !(value < INFINITY))
                die("--logit-bias: expected ID+VALUE or ID-VALUE, with commas between several, got '%s'",
                    list->text[i]);
            if (id >= vocab)
                die("--logit-bias: '%s': expected ids from 0 to %d, got %ld", list->text[i], vocab - 1, id);
            bias[id] += value;
            at = end;
            if (!*at) break;
        }
    return bias;
}

// The steps of sampling that change something, in their order.
static void print_sampling(const Model *m, const SampleParams *p) {
    fprintf(stderr, "# sampling: ");
    if (m->n_suppressed) fprintf(stderr, "%d tokens suppressed > ", m->n_suppressed);
    if (m->s.bias) fprintf(stderr, "bias > ");
    if (m->s.counts)
        fprintf(stderr, "penalties: repeat %g, frequency %g, presence %g > ", (double)p->repeat, (double)p->frequency,
                (double)p->presence);
    if (p->temperature <= 0) {
        fprintf(stderr, "the likeliest\n");
        return;
    }
    fprintf(stderr, "temperature %g > ", (double)p->temperature);
    if (p->top_k > 0) fprintf(stderr, "top-k %d > ", (int)p->top_k);
    if (p->top_p < 1) fprintf(stderr, "top-p %g > ", (double)p->top_p);
    if (p->min_p > 0) fprintf(stderr, "min-p %g > ", (double)p->min_p);
    fprintf(stderr, "draw, seed %" PRIu64 "\n", p->seed);
}

// The prompt: the text of -p, of -f, or both with an empty line between; else standard input, unless that is a
// terminal. The caller frees it. NULL: there is none.
static char *read_prompt(const Flags *f, size_t *n) {
    const bool typed = isatty(0);
    const char *path = f->prompt_file;
    *n = f->prompt ? strlen(f->prompt) : 0;
    if (!path && !f->prompt) {
        if (typed || f->interactive) return NULL;
        path = "-";
    }
    if (path && !strcmp(path, "-") && f->interactive) die("-f: expected a file, got -: the chat reads standard input");
    size_t n_file = 0;
    char *file = path ? read_file(strcmp(path, "-") ? path : NULL, &n_file, "-f") : NULL;
    if (!f->prompt && !f->prompt_file && !n_file) {
        free(file);
        return NULL;
    }
    char *text = alloc_or_die(*n + n_file + 3, 1);
    if (*n) memcpy(text, f->prompt, *n);
    if (*n && n_file) *n += (size_t)sprintf(text + *n, "\n\n");
    if (n_file) memcpy(text + *n, file, n_file);
    *n += n_file;
    free(file);
    return text;
}

__attribute__((noreturn)) static void die_without_prompt(const Flags *f) {
    die("-p: expected a prompt, got none, and nothing on standard input; try gemma4 %sMODEL.gguf -p \"Hello\"%s",
        f->verb == TOKENIZE ? "tokenize " : "", f->verb == TOKENIZE ? "" : ", or -i for a chat");
}

// Name a template in the file that is not the one we render.
static void print_template(const Tokenizer *t) {
    static const char *const names[] = { [TOK_TEMPLATE_SPRING] = "Google's of spring 2026",
        [TOK_TEMPLATE_LAUNCH] = "Google's of the release", [TOK_TEMPLATE_OTHER] = "not one of Google's" };
    if (t->chat_template != TOK_TEMPLATE_NONE && t->chat_template != TOK_TEMPLATE_CANONICAL)
        fprintf(stderr, "# chat template of the file: %s; used instead: Google's of 2026-07-09, %s variant\n",
                names[t->chat_template], t->large_variant ? "large" : "small");
}

// Dies where a session could not be written: that is better known before the answer than behind it.
static void check_session_path(const char *path) {
    struct stat st;
    const char *slash = strrchr(path, '/');
    const size_t n = slash ? (size_t)(slash - path) + (slash == path) : 1;
    char *folder = alloc_or_die(n + 1, 1);
    memcpy(folder, slash ? path : ".", n);
    if (!*path) die("--session: expected a file, got an empty name");
    if (!stat(path, &st) && !S_ISREG(st.st_mode))
        die("--session: %s: expected a file, got a device, a pipe or a folder", path);
    if (access(folder, W_OK | X_OK)) die("--session: %s: cannot write to %s: %s", path, folder, strerror(errno));
    free(folder);
}

// Dies where flags contradict each other.
static void check_generate_flags(const Flags *f, bool chatting) {
    if (f->compress && (f->session || f->shift || f->dump))
        die("--compress: expected no %s with it: what the model was shown is not the text",
            f->session ? "--session" : f->shift ? "--context-shift" : "--dump");
    for (int i = 0; i < f->stops.n; i++)
        if (!*f->stops.text[i]) die("--stop: expected a text, got an empty one");
    if (f->raw && (f->system || f->tools || f->think || f->chat_template || chatting))
        die("%s: has no place in a --raw prompt", f->system ? "--system" : f->tools ? "--tools" : f->think ? "--think" :
            f->chat_template ? "--template" : "a chat");
    if (f->think_budget >= 0 && !f->think) die("--think-budget: expected --think beside it");
    if (f->session) check_session_path(f->session);
    if (!chatting && (f->history || f->verbose))
        die("%s: expected a chat, got a prompt; try -i", f->history ? "--history" : "--verbose");
#ifndef EDITS_LINES
    if (f->history) die("--history: this build edits no lines: it was made without libedit and readline");
#endif
}

static SampleParams sampling_params(const Flags *f, Gguf *g) {
    const uint64_t clock_seed = ((uint64_t)time(NULL) * 1000003u ^ (uint64_t)getpid()) & 0xffffffff;
    const double seed = isnan(f->seed) ? (double)clock_seed : f->seed;
    return (SampleParams){
        .seed = (uint64_t)seed,
        .temperature = (float)sampling_value(g, f->temperature, "general.sampling.temp", 1000, 1.0),
        .top_k = (int32_t)sampling_value(g, f->top_k, "general.sampling.top_k", INT_MAX, 64),
        .top_p = (float)sampling_value(g, f->top_p, "general.sampling.top_p", 1, 0.95),
        .min_p = isnan(f->min_p) ? 0 : (float)f->min_p,
        .repeat = (float)f->repeat, .presence = (float)f->presence, .frequency = (float)f->frequency
    };
}

// The ids of a --raw prompt, behind what the session holds, else behind <bos>. Where they are too many for the context
// its oldest tokens go, if that is wanted, as while generating: shift_context().
static void raw_prompt(Chat *c, const char *text, size_t n, TokIds *ids) {
    Session *s = &c->s;
    const size_t n_ctx = (size_t)s->m->options.n_ctx, held = s->held.n, half = (n_ctx - 1) / 2;
    if (s->t->bos < 0)
        die("%s: key 'tokenizer.ggml.bos_token_id': missing, and no token is called <bos>", s->m->gguf.path);
    for (size_t i = 0; i < held; i++) push_id(s, ids, s->held.ids[i]);
    for (size_t i = 0; i < c->pending.n; i++) push_id(s, ids, c->pending.ids[i]);
    if (!ids->n) push_id(s, ids, s->t->bos);
    if (tok_encode(s->t, text, n, TOK_PLAIN, ids) < 0) die("-p: %s", s->t->err);
    if (ids->n <= n_ctx || !c->options.shift || half + 1 > held || ids->n - held > half) return;
    memmove(ids->ids + 1, ids->ids + held - half, (ids->n - held + half) * sizeof *ids->ids);
    ids->n -= held - half - 1;
    fprintf(stderr, "# context full: %zu tokens dropped, the first 1 and the newest %zu stay\n", held - half - 1, half);
}

// The one answer of a run without a chat. Dies where it cannot be had; from: the flag that the prompt came with.
static void answer_once(Chat *c, const TokIds *raw, const char *from) {
    Session *s = &c->s;
    const size_t n = count_messages(&c->messages, NULL);
    Prompt p = { .ids = raw->ids, .n = (int)raw->n, .n_head = 1 };
    if (c->raw && c->compressor.ratio > 0) {
        if (!compress_prompt(&c->compressor, s, raw->ids, (int)raw->n, max_int((int)s->held.n, 1), &c->shown))
            die("%s", c->compressor.err);
        print_compressed((int)c->shown.n, (int)raw->n);
        p.ids = c->shown.ids, p.n = (int)c->shown.n;
    }
    if (!c->raw && !answer(c)) die("%s%s%s", *c->err == '-' ? "" : from, *c->err == '-' ? "" : ": ", c->err);
    if (c->raw && !(session_start(s, &p, &c->options) && print_answer(s, &c->show))) die("%s: %s", from, s->err);
    if (!c->raw && count_messages(&c->messages, NULL) == n) keep_messages(&c->messages, true, n - 1);  // no answer came
    print_turn(&s->turn);
    if (s->end == END_CONTEXT)
        fprintf(stderr, "# the context of %d tokens is full; try a larger -c, or --context-shift\n",
                s->m->options.n_ctx);
    if (c->session && !keep_session(c)) die("%s", c->err);
}

// What the plan needs to know of a drafter, if there is one.
static void plan_drafting(const Flags *f, PlanOptions *o, int width) {
    if (!f->drafter) return;
    o->drafter = f->drafter;
    o->draft_width = width;
    o->draft_depth = (int)f->draft_max;
    o->lazy_draft = f->lazy_draft;
}

// --spec and what belongs to it, and what the plan needs to know of it.
static Drafting drafting_of(const Flags *f, const Ops *ops, PlanOptions *o) {
    Drafting d = { .kind = (SpecKind)number_of(f->spec, spec_names, f->drafter ? SPEC_AUTO : SPEC_OFF),
                   .tree = (int)f->tree, .least = (float)f->draft_min_p };
    if ((d.kind == SPEC_MTP || d.kind == SPEC_DFLASH) && !f->drafter)
        die("--spec %s: expected a drafter's file; try -md FILE, or --spec ngram, which needs none", f->spec);
    if (d.tree && !(f->drafter && uses_drafter(&d)))
        die("--tree: expected a drafter, of whose guesses a tree is made; try -md FILE");
    if (d.kind != SPEC_OFF && !ops->verify_walk) die("--spec: the %s backend cannot verify guesses", ops->name);
    d.most = f->draft_max ? (int)f->draft_max : d.kind == SPEC_MTP ? 4 : d.kind == SPEC_OFF ? 0 : 16;
    if (uses_drafter(&d)) plan_drafting(f, o, d.tree ? DRAFT_WIDTH : 1);
    o->n_logits = max_int(o->n_logits, min_int(STEP_ROWS, o->n_seqs * (1 + max_int(d.most, d.tree))));
    return d;
}

// The drafter that was asked for is the one in the file.
static void check_drafting(const Model *m, const Drafting *d) {
    if ((d->kind == SPEC_MTP || d->kind == SPEC_DFLASH) && drafter_of(m) != d->kind)
        die("--spec %s: %s: expected such a drafter, got one for --spec %s", spec_names[d->kind], m->drafter.gguf.path,
            spec_names[drafter_of(m)]);
}

// What the answers have to fit, as --grammar, --json-schema and --tool-choice say; NULL: nothing. It lives as long as the
// program.
static Grammar *read_grammar(const Flags *f, const Tokenizer *t, TokStr tools) {
    const struct { const char *name, *text; bool is_file, is_schema; } from[] = {
        { "--grammar", f->grammar, false, false }, { "--grammar-file", f->grammar_file, true, false },
        { "--json-schema", f->schema, false, true }, { "--json-schema-file", f->schema_file, true, true } };
    static GrammarVocab vocab;
    static Grammar g;
    const char *name = NULL, *choice = f->tool_choice && strcmp(f->tool_choice, "auto") ? f->tool_choice : NULL;
    char *file = NULL;
    TokStr text = { NULL, 0 };
    bool is_schema = false, ok;
    for (size_t i = 0; i < sizeof from / sizeof *from; i++) {
        if (!from[i].text) continue;
        if (name) die("%s: expected one of %s and %s", from[i].name, name, from[i].name);
        name = from[i].name;
        size_t n = strlen(from[i].text);
        file = from[i].is_file ? read_file(from[i].text, &n, name) : NULL;
        text = (TokStr){ file ? file : from[i].text, n };
        is_schema = from[i].is_schema;
    }
    if (choice && name) die("--tool-choice: expected no %s beside it: the answer is a call", name);
    if (choice && !tools.n) die("--tool-choice: expected --tools beside it");
    if (!choice && !name) return NULL;
    if (f->ignore_eos) die("--ignore-eos: expected no %s beside it: its text has an end", name ? name : "--tool-choice");
    if (!grammar_vocab_init(&vocab, t)) die("out of memory for a tree of tokens");
    if (name && !is_schema) ok = grammar_from_gbnf(&g, &vocab, text);
    else if (tools.n) ok = grammar_from_tools(&g, &vocab, tools, is_choice(choice, "required") ? NULL : choice, true, text);
    else ok = grammar_from_schema(&g, &vocab, text);
    if (!ok) die("%s: %s", name ? name : "--tool-choice", g.err);
    free(file);
    return &g;
}

static int verb_generate(const Flags *f, const Ops *ops, PlanOptions o) {
    size_t n_text = 0, n_tools = 0;
    char *text = read_prompt(f, &n_text);
    const bool chatting = f->interactive || (!text && isatty(0) && isatty(1));
    if (!text && !chatting) die_without_prompt(f);
    const char *const from = chatting ? "-i" : f->prompt ? "-p" : f->prompt_file ? "-f" : "standard input";
    check_generate_flags(f, chatting);
    char *tools = f->tools ? read_file(f->tools, &n_tools, "--tools") : NULL;
    o.penalties = f->repeat != 1 || f->presence != 0 || f->frequency != 0;
    o.bias = f->biases.n > 0;
    const Drafting drafting = drafting_of(f, ops, &o);
    Model *m = alloc_or_die(1, sizeof *m);
    Tokenizer tok;
    TokIds ids = { 0 };
    GgufJson id;
    load_model(m, f->model, ops, o, f->dump);
    check_drafting(m, &drafting);
    load_tokenizer(&tok, &m->gguf, m->config.vocab);
    if (f->scorer) check_scorer(f->scorer, &m->gguf);
    if (f->chat_template) tok.large_variant = is_choice(f->chat_template, "large");
    if (f->think_budget >= 0 && tok.channel_close < 0) die("--think-budget: %s: has no token <channel|>", m->gguf.path);
    Chat c = { .tools = { tools, n_tools }, .think = f->think, .verbose = f->verbose, .chatting = chatting,
               .raw = f->raw, .session = f->session, .compressor = { .ratio = (float)f->compress, .file = f->scorer },
               .show = { (int)f->top_logits, f->show_thoughts, .newline = chatting } };
    c.options = (AnswerOptions){ .n_predict = (int)f->n_predict, .ignore_eos = f->ignore_eos, .stops = f->stops,
                                 .keep_logits = f->top_logits > 0, .think_budget = (int)f->think_budget,
                                 .shift = f->shift, .grammar = read_grammar(f, &tok, c.tools), .may_think = f->think };
    c.options.sampling = sampling_params(f, &m->gguf);
    c.options.drafting = drafting;
    if (chatting) measure_pace(m, &tok, &drafting);    // else it takes longer than it brings
    session_open(&c.s, m, &tok, 0);
    if (f->session && !resume(&c, !isnan(f->seed))) die("--session: %s", c.err);
    if (f->raw) {
        raw_prompt(&c, text, n_text, &ids);
    } else {
        if (f->system) set_system(&c, (TokStr){ f->system, strlen(f->system) });
        if (!chatting && calls_waiting(&c.messages, &id))
            die("--session: %s: a call waits for its result: expected a chat, and /tool RESULT; try -i", f->session);
        if (!chatting && tok_add_message(&c.messages, "user", (TokStr){ text, n_text }) < 0)
            die("%s: out of memory for a prompt of %zu bytes", from, n_text);
        if (render(&c, 0, 1, true, &ids) < 0) {
            if (!strncmp(tok.err, "tools", 5)) die("--tools: %s: %s", f->tools, tok.err);
            die("%s: %s", from, tok.err);
        }
    }
    if (ids.n > (size_t)m->options.n_ctx && !f->compress)              // in a chat, what the flags bring
        die("%s: the prompt has %zu tokens, the context %d; try -c %zu", from, ids.n, m->options.n_ctx, ids.n + 512);

    if (o.bias) {
        float *bias = parse_biases(&f->biases, m->config.vocab);
        ops->copy(&(Copy){ m->s.bias, bias, (size_t)m->config.vocab * sizeof *bias, COPY_IN });
        free(bias);
    }
    print_plan(m);
    if (!f->raw) print_template(&tok);
    print_sampling(m, &c.options.sampling);
    read_weights(m, f->check_tensors);                 // Ctrl-C still ends the process at once
    stop_on(SIGINT);
    int status = 0;
    if (chatting) {
        status = chat_loop(&c, (TokStr){ text, n_text }, f->history);
    } else {
        answer_once(&c, &ids, from);
        status = interrupted ? 130 : 0;
    }
    if (c.options.grammar) grammar_free(c.options.grammar);
    chat_free(&c);
    tok_ids_free(&ids);
    tok_free(&tok);
    free(text);
    free(tools);
    free_model(m);
    free(m);
    return status;
}

// The first line of a file, without its end; freed by the caller.
static char *read_key(const char *path) {
    size_t n;
    char *text = read_file(path, &n, "--api-key-file");
    char *key = alloc_or_die(n + 1, 1);
    memcpy(key, text, n);
    key[strcspn(key, "\r\n")] = 0;
    free(text);
    return key;
}

static const char *const format_names[] = { "md", "csv", "json", "jsonl" };            // of Format

static int run_ppl(const Flags *f, const Ops *ops, PlanOptions o) {
    PplOptions p = { .n_ctx = f->n_ctx < 0 ? 512 : (int)f->n_ctx, .stride = (int)f->stride,
                     .n_chunks = (int)f->n_chunks, .base = f->kld_base, .compare = f->kld,
                     .format = (Format)number_of(f->out, format_names, FORMAT_MD) };
    size_t n;
    if (!f->prompt_file) die("-f: expected a text; try gemma4 ppl %s -f text.txt", f->model);
    if (p.n_ctx < 4) die("-c: expected at least 4 ids in a chunk, got %d", p.n_ctx);
    if (p.stride >= p.n_ctx) die("--ppl-stride: expected less than -c, %d, got %d", p.n_ctx, p.stride);
    if (ppl_chunk(&p) > MAX_CONTEXT) die("-c: expected at most %d ids in a chunk, got %d", MAX_CONTEXT, ppl_chunk(&p));
    if (p.base && p.compare) die("--kld: expected one of --kld-base and --kld");
    char *text = read_prompt(f, &n);
    const int status = verb_ppl(f->model, ops, o, &p, text, n, f->special ? TOK_SPECIAL : TOK_PLAIN);
    free(text);
    return status;
}

static void run_niah(const Flags *f, const Ops *ops, PlanOptions o) {
    size_t n = 0;
    char *hay = f->prompt_file ? read_prompt(f, &n) : NULL;
    if (hay && !n) die("-f: %s: expected a text, got an empty file", f->prompt_file);
    verb_niah(f->model, ops, o, &(NiahOptions){
        .lengths = parse_list("-p", f->prompts ? f->prompts : "1024,2048,4096", 0), .n_needles = (int)f->n_needles,
        .depths = parse_list("-d", f->depths ? f->depths : "0,25,50,75,100", 0), .n_runs = (int)f->n_runs,
        .csv = is_choice(f->out, "csv"), .svg = f->svg, .hay = hay, .n_hay = n,
        .compressor = { .ratio = (float)f->compress, .file = f->scorer } });
    free(hay);
}

static void verb_serve(const Flags *f, const Ops *ops, PlanOptions o) {
    need_http();
    Model *m = alloc_or_die(1, sizeof *m);
    Tokenizer tok;
    char *key = f->api_key_file ? read_key(f->api_key_file) : NULL;
    if (key && f->api_key) die("--api-key: expected one of --api-key and --api-key-file");
    size_t free_bytes, total;
    cpu_ops()->memory(&free_bytes, &total);
    ServeOptions s = { .host = f->host ? f->host : "127.0.0.1", .alias = f->alias, .api_key = key ? key : f->api_key,
                       .port = (int)f->port, .max_queue = (int)f->queue, .timeout = (int)f->timeout,
                       .max_body = (size_t)f->max_body << 20, .n_predict = (int)f->n_predict,
                       .think_budget = (int)f->think_budget, .think = f->think, .fixed_seed = !isnan(f->seed),
                       .chunk = (int)f->chunk, .session_dir = f->session_dir,
                       .session_disk = (size_t)f->session_disk << 20, .log_text = f->log_text,
                       .cache_ram = f->cache_ram < 0 ? free_bytes / 8 : (size_t)f->cache_ram << 20 };
    if (s.api_key && !*s.api_key) die("%s: expected a key, got an empty one", key ? "--api-key-file" : "--api-key");
    o.n_seqs = (int)f->parallel;
    o.host_memory = s.cache_ram;
    s.drafting = drafting_of(f, ops, &o);
    o.penalties = o.bias = true;
    o.between = o.n_seqs > 1;                          // nobody waits for the next token longer than for a layer of a prompt
    if (o.between) o.n_batch = SMALL_BATCH;
    if (f->chunk) o.n_batch = max_int((int)f->chunk, STEP_ROWS);
    load_model(m, f->model, ops, o, NULL);
    check_drafting(m, &s.drafting);
    load_tokenizer(&tok, &m->gguf, m->config.vocab);
    if (f->chat_template) tok.large_variant = is_choice(f->chat_template, "large");
    s.sampling = sampling_params(f, &m->gguf);
    print_plan(m);
    print_template(&tok);
    read_weights(m, f->check_tensors);
    serve(m, &tok, &s);
    tok_free(&tok);
    free(key);
    free_model(m);
    free(m);
}

// Verbs that need neither a backend nor a plan. -> whether it was one of them
static bool run_file_verb(const Flags *f) {
    if (f->verb == TOKENIZE) {
        size_t n;
        char *text = read_prompt(f, &n);
        if (!text) die_without_prompt(f);
        if (f->plain && f->special) die("--special: expected one of --plain and --special");
        verb_tokenize(f->model, text, n, f->plain ? TOK_PLAIN : f->special ? TOK_SPECIAL : TOK_USER_DEFINED);
        free(text);
    } else if (f->verb == DETOKENIZE) {
        if (!f->ids) die("--ids: expected token ids; try --ids \"2 105 2364\"");
        verb_detokenize(f->model, f->ids);
    } else if (f->verb == QUANTIZE) {
        if (!f->type) die("quantize: expected three names, IN OUT.gguf TYPE");
        verb_quantize(f->model, f->target, f->type);
    } else return false;
    return true;
}

static PlanOptions plan_options(const Flags *f) {
    PlanOptions o = { .n_seqs = 1, .n_batch = BATCH_FIT, .n_logits = 1, .memory = (size_t)(f->memory * (1 << 30)) };
    if (f->scorer && !f->compress) die("--scorer: it scores tokens for --compress; try --compress 0.2");
    if (f->scorer && access(f->scorer, R_OK)) die("--scorer: %s: %s", f->scorer, strerror(errno));    // opened later
    o.scores = f->compress && !f->scorer;
    o.n_ctx = f->n_ctx < 0 ? 0 : f->n_ctx > 0 ? (int)f->n_ctx : CTX_FIT;
    o.k_type = (KvType)number_of(f->k_type, kv_names, f->verb == LOGITS || f->verb == CHECK ? KV_F32 : KV_F16);
    o.v_type = (KvType)number_of(f->v_type, kv_names, (int)o.k_type);
    o.ring_type = (KvType)number_of(f->ring_type, kv_names, KV_F32);
    if (f->ring_type && o.ring_type == KV_F32 && o.k_type != KV_F32)
        die("--kv-swa: expected f32 only with -ctk f32, got -ctk %s; try --kv-swa f16", kv_names[o.k_type]);
    o.tail = (int)f->tail;
    o.pflash = (float)f->pflash;
    o.pflash_density = (float)f->pflash_density / 100;
    o.pflash_from = o.pflash_density ? 0 : (int)f->pflash_from;
    o.untied = is_choice(f->kv_layout, "untied");
    return o;
}

static void run_bench(const Flags *f, const Ops *ops, PlanOptions o) {
    BenchOptions b = { .prompts = parse_list("-p", f->prompts, 512), .generated = parse_list("-n", f->generated, 128),
                       .rows = parse_list("--rows", f->rows, 0), .depths = parse_list("-d", f->depths, 0),
                       .n_runs = (int)f->n_runs, .forced = parse_forced(f), .random_fill = is_choice(f->fill, "random"),
                       .format = (Format)number_of(f->out, format_names, FORMAT_MD) };
    if (f->force) o.draft_depth = b.forced.depth;
    verb_bench(f->model, ops, o, &b);
}

static void run_logits(const Flags *f, const Ops *ops, PlanOptions o) {
    if (!f->ids) die("--ids: expected a file of token ids");
    if (!f->out) die("-o: expected a file for the logits");
    verb_logits(f->model, ops, o, f->ids, f->out, f->dump, f->check_tensors);
}

// The GPU where there is one that this program can use, as the card that is asked for; else the CPU.
static const Ops *choose_ops(const Flags *f) {
    const Card *card = f->card ? find_card(f->card) : NULL;
    const Ops *ops = NULL;
    const char *advice = "built without CUDA, which this needs; build it with make cuda";
#ifdef USE_CUDA
    cuda_pretend(card);
    ops = cuda_ops();
    if (!ops && f->verb == PLAN) ops = cuda_plan_ops();
    advice = "there is no GPU to run on; without one, try gemma4 plan";
#endif
    if (card && !ops) die("--card: %s: %s", card->name, advice);
    return ops ? ops : cpu_ops();
}

int main(int argc, char **argv) {
    Flags f = { .n_predict = -1, .n_ctx = -1, .think_budget = -1, .temperature = NAN, .top_k = NAN, .top_p = NAN,
                .min_p = NAN, .repeat = 1, .seed = NAN, .n_runs = 5, .port = 8080, .parallel = 1, .queue = 64,
                .timeout = 3600, .max_body = 16, .cache_ram = -1, .session_disk = 65536,
                .pflash_from = 16384, .n_needles = 1 };
    int status = 0;
    parse_flags(&f, argc, argv);
    if (f.help) {
        print_help();
        flush_output();
        return 0;
    }
    if (f.version) {
        printf("gemma4 " VERSION " (%s)\n", choose_ops(&f)->name);
        flush_output();
        return 0;
    }
    const uint16_t one = 1;
    if (*(const uint8_t *)&one != 1) die("this program needs a little-endian machine");
    if (!f.model) die("expected a model file; try gemma4 MODEL.gguf -p \"Hello\", or --help");
    if (!(f.verb & (TOKENIZE | DETOKENIZE | PLAN))) start_threads((int)f.n_threads);
    if (run_file_verb(&f)) return 0;

    const Ops *ops = choose_ops(&f);
    PlanOptions o = plan_options(&f);
    const Ops *judge = is_choice(f.against, "reference") ? reference_ops() : cpu_ops();
    if (f.verb & (PLAN | BENCH)) plan_drafting(&f, &o, 1);
    switch (f.verb) {
    case SERVE: verb_serve(&f, ops, o); break;
    case PLAN:  verb_plan(f.model, ops, o); break;
    case BENCH: run_bench(&f, ops, o); break;
    case NIAH:  run_niah(&f, ops, o); break;
    case CHECK: status = verb_check(f.model, ops, judge, o); break;
    case PPL:   status = run_ppl(&f, ops, o); break;
    case LOGITS: run_logits(&f, ops, o); break;
    default:    status = verb_generate(&f, ops, o);
    }
    free(f.stops.text);
    free(f.biases.text);
    return status;
}
#endif

// ==== [13] CPU operations ============================================================================================
// How the CPU carries out gemma4.h: each operation is a function cpu_<op>, a job that all threads share. Weights are read
// where they lie in the mapped file. First threads, reading ahead and memory, then operations in the order of gemma4.h.

// ---- threads ----

// A job is cut into pieces, which the caller and a pool of threads claim one by one: a thread that another program
// keeps from its core is late for its own piece only, and one that has not woken up delays nobody. Threads without work
// look for some for a short while, then they sleep.

enum { LOOKS = 2000, STACK_BYTES = 8 << 20 };  // looks for work, tens of microseconds, before a sleep

static struct {
    int n_threads;                      // the caller's included; 0: not started yet
    Work work;                          // the job; it stays as it is while a piece is claimed and not done
    const void *task;
    int n_items, step;                  // items in all, and of a piece
    uint32_t n_pieces;
    _Atomic uint64_t open;              // number of the job << 32 | pieces that nobody has claimed
    _Atomic uint32_t undone;            // pieces
    atomic_int n_sleeping;
    atomic_bool caller_sleeps;
    pthread_mutex_t lock;
    pthread_cond_t wake, done;
} pool = { .lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER, .done = PTHREAD_COND_INITIALIZER };

static int count_cores(void) {                         // that this process may use
#ifdef __linux__
    cpu_set_t set;
    if (!sched_getaffinity(0, sizeof set, &set)) return CPU_COUNT(&set);
#endif
    return max_int(1, (int)sysconf(_SC_NPROCESSORS_ONLN));
}

static void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void work_on_job(void) {                        // until no piece is left to claim
    uint64_t open = atomic_load(&pool.open);
    while ((uint32_t)open) {
        if (!atomic_compare_exchange_weak(&pool.open, &open, open - 1)) continue;
        const int first = (int)(pool.n_pieces - (uint32_t)open) * pool.step;       // below n_items
        pool.work(pool.task, first, first + min_int(pool.step, pool.n_items - first));
        if (atomic_fetch_sub(&pool.undone, 1) == 1 && atomic_load(&pool.caller_sleeps)) {
            pthread_mutex_lock(&pool.lock);
            pthread_cond_signal(&pool.done);
            pthread_mutex_unlock(&pool.lock);
        }
        open = atomic_load(&pool.open);
    }
}

static void *pool_thread(void *unused) {
    for (;;) {
        for (int i = 0; i < LOOKS && !(uint32_t)atomic_load_explicit(&pool.open, memory_order_relaxed); i++) pause_briefly();
        if (!(uint32_t)atomic_load(&pool.open)) {
            pthread_mutex_lock(&pool.lock);
            atomic_fetch_add(&pool.n_sleeping, 1);
            while (!(uint32_t)atomic_load(&pool.open)) pthread_cond_wait(&pool.wake, &pool.lock);
            atomic_fetch_sub(&pool.n_sleeping, 1);
            pthread_mutex_unlock(&pool.lock);
        }
        work_on_job();
    }
    return unused;
}

static void pool_forked(void) { pool.n_threads = 1; }  // a child process has none of the threads

// Starts the threads, once; n = 0: one per core.
static void start_threads(int n) {
    if (pool.n_threads) return;
    pthread_attr_t attr;
    pthread_t id;
    pool.n_threads = n ? n : count_cores();
    pthread_atfork(NULL, NULL, pool_forked);
    if (pthread_attr_init(&attr) || pthread_attr_setstacksize(&attr, STACK_BYTES)) die("threads: no memory");
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    sigset_t all, before;                              // signals are for the thread that may wait for input
    sigfillset(&all);
    sigdelset(&all, SIGBUS);                           // but this one, which comes to who reads a page that is lost
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int i = 1; i < pool.n_threads; i++) {
        const int error = pthread_create(&id, &attr, pool_thread, NULL);
        if (error) die("-t: cannot start %d threads: %s; try -t %d", pool.n_threads, strerror(error), i);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attr);
}

static int count_threads(void) { return pool.n_threads; }

// Does a job of n_items in pieces of `step`, and returns when all are done. Not from within a job.
static void parallel(int n_items, int step, Work work, const void *task) {
    start_threads(0);
    if (pool.n_threads == 1 || n_items <= step) {
        if (n_items > 0) work(task, 0, n_items);
        return;
    }
    pool.work = work;
    pool.task = task;
    pool.n_items = n_items;
    pool.step = step;
    pool.n_pieces = (uint32_t)((n_items + step - 1) / step);
    atomic_store(&pool.undone, pool.n_pieces);
    atomic_store(&pool.open, ((atomic_load(&pool.open) >> 32) + 1) << 32 | pool.n_pieces);
    if (atomic_load(&pool.n_sleeping)) {
        pthread_mutex_lock(&pool.lock);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.lock);
    }
    work_on_job();
    for (int i = 0; i < LOOKS && atomic_load(&pool.undone); i++) pause_briefly();
    if (!atomic_load(&pool.undone)) return;
    pthread_mutex_lock(&pool.lock);
    atomic_store(&pool.caller_sleeps, true);
    while (atomic_load(&pool.undone)) pthread_cond_wait(&pool.done, &pool.lock);
    atomic_store(&pool.caller_sleeps, false);
    pthread_mutex_unlock(&pool.lock);
}

// Items of a piece, a multiple of grain: several pieces for each thread, as they take different times.
static int share(int n_items, int grain) {
    start_threads(0);
    const int n_pieces = 8 * pool.n_threads;
    return (int)round_up((size_t)max_int((n_items + n_pieces - 1) / n_pieces, 1), (size_t)grain);
}

// ---- reading ahead ----

// Bytes that can be had without swapping: what is free and what the page cache would give back.
static size_t available_memory(void) {
    char line[128];
    unsigned long long kb = 0;
    FILE *f = fopen("/proc/meminfo", "r");
    while (f && !kb && fgets(line, sizeof line, f)) sscanf(line, "MemAvailable: %llu kB", &kb);
    if (f) fclose(f);
    return kb ? (size_t)kb * 1024 : (size_t)sysconf(_SC_AVPHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
}

typedef struct {
    const GgufTensor *t;
    size_t first, n;          // blocks of it
} Piece;

typedef struct {
    const Piece *pieces;
    int          n;
    bool         check;
    const char  *what;        // the bar's
    size_t       total;       // bytes
    size_t      *done;        // under the lock, like what follows
    int         *bad_piece;   // the first one that has a bad block
    size_t      *bad_block;
    pthread_mutex_t *lock;
    pthread_t    caller;      // draws the bar
} ReadJob;

static void read_pieces(const void *task, int begin, int end) {
    enum { AHEAD = 8 };                                // pieces that the kernel is told of in advance
    const ReadJob *job = task;
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    for (int i = begin; i < end; i++) {
        const Piece *p = &job->pieces[i], *next = &job->pieces[min_int(i + AHEAD, job->n - 1)];
        const size_t bytes = (size_t)gguf_block_bytes(p->t->type), next_bytes = (size_t)gguf_block_bytes(next->t->type);
        const uint8_t *data = p->t->data + p->first * bytes, *from = next->t->data + next->first * next_bytes;
        const size_t before = (size_t)((uintptr_t)from % page);
        size_t bad = p->n;
        madvise((void *)(uintptr_t)(from - before), next->n * next_bytes + before, MADV_WILLNEED);
        if (job->check) bad = gguf_find_bad_block(p->t->type, data, p->n);
        else for (size_t at = 0; at < p->n * bytes; at += page) (void)((const volatile uint8_t *)data)[at];
        pthread_mutex_lock(job->lock);
        const size_t so_far = *job->done += p->n * bytes;
        if (bad < p->n && i < *job->bad_piece) {
            *job->bad_piece = i;
            *job->bad_block = p->first + bad;
        }
        pthread_mutex_unlock(job->lock);
        if (so_far < job->total && pthread_equal(pthread_self(), job->caller)) progress(job->what, so_far, job->total, "B");
    }
}

// Reads a file's data from one end to the other, with all threads and under a progress bar: for the pages, which the
// first prompt would otherwise wait for one by one, or, with check, for what stands in them (every tensor of the file).
// Left out without check: what nobody reads or what rows are only taken from; and all when it is more than memory can
// hold or the backend keeps weights of its own. Takes next to no time when the pages are in memory already.
static void read_file_weights(const Model *m, const Gguf *g, const Binder *b, const char *name, bool check) {
    enum { PIECE = 4 << 20 };                          // bytes
    const Weights *w = &m->weights;
    size_t total = 0, done = 0, bad_block = 0;
    int n_pieces = 0, bad_piece = INT_MAX;
    if (!check && m->plan.weights) return;
    Piece *pieces = alloc_or_die(g->n_tensors + g->file_size / (PIECE / 2), sizeof *pieces);
    for (size_t i = 0; i < g->n_tensors; i++) {
        const GgufTensor *t = &g->tensors[i];
        const bool table = t->data == w->per_layer_token_embd.data || (w->output.data && t->data == w->token_embd.data);
        if (!check && (b->seen[i] != BOUND || table)) continue;
        const size_t bytes = (size_t)gguf_block_bytes(t->type), n = (size_t)t->size / bytes, most = PIECE / bytes;
        for (size_t at = 0; at < n; at += most)
            pieces[n_pieces++] = (Piece){ t, at, n - at < most ? n - at : most };
        total += (size_t)t->size;
    }
    char size[2][32];
    if (!check && total > available_memory()) {
        fprintf(stderr, "# %s of weights do not fit %s of available memory: they are read as they are needed\n",
                amount(size[0], (double)total, "B"), amount(size[1], (double)available_memory(), "B"));
        n_pieces = 0;
    }

    const double start = seconds();
    char what[64];
    snprintf(what, sizeof what, "%s%.40s", check ? "checking " : "", name);
    if (n_pieces) progress(what, 0, total, "B");
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    const ReadJob job = { .pieces = pieces, .n = n_pieces, .check = check, .what = what, .total = total, .done = &done,
                          .bad_piece = &bad_piece, .bad_block = &bad_block, .lock = &lock, .caller = pthread_self() };
    parallel(n_pieces, 1, read_pieces, &job);
    if (n_pieces) progress(what, total, total, "B");
    if (bad_piece < INT_MAX) {
        const GgufTensor *t = pieces[bad_piece].t;
        const size_t elems = (size_t)gguf_block_elems(t->type);
        die("%s: tensor '%.*s': expected finite numbers, got NaN, Inf or a reserved value in block %zu of type %s, elements "
            "%zu to %zu (E_PAYLOAD)", g->path, (int)t->name.n, t->name.s, bad_block, gguf_type_name(t->type),
            bad_block * elems, (bad_block + 1) * elems - 1);
    }
    if (check)
        fprintf(stderr, "# checked %zu tensors, %s at %s/s: all numbers are finite\n", g->n_tensors,
                amount(size[0], (double)total, "B"), amount(size[1], (double)total / (seconds() - start + 1e-9), "B"));
    free(pieces);
}

static void read_weights(Model *m, bool check) {
    const Drafter *d = &m->drafter;
    read_file_weights(m, &m->gguf, &m->binder, model_name(m), check);
    if (d->kind != DRAFTER_NONE) read_file_weights(m, &d->gguf, &d->binder, "the drafter", check);
}

// ---- memory ----

typedef struct { uint64_t key, weight; } Candidate;    // a token among others: the higher key, the better (candidate_key)

enum { PASS_PAIRS = 4096 };   // most pairs (row, chosen expert) that experts work on at a time

// Attention numbers its keys: j < len is the committed position j, len + i is row i of the segment. SPAN of them are a
// span, and span s belongs to part s mod PARTS. What the parts find is put together in their order, so that threads may
// share a long context of a step of few queries, and the bits follow from the numbers alone.
enum { SPAN = 256, PARTS = 16, SPLIT_QUERIES = 256 };

static struct {               // scratch of the CPU backend: one prepared input at a time, one row of logits
    Act        y;             // (max_rows, max_cols)
    uint8_t   *packed;        // (max_rows or pairs, max_cols) the input for gguf_dot_q8_rows
    int32_t   *order;         // (pairs) sorted by expert
    size_t     rows, pairs, cols, vocab;
    Candidate *candidates;    // (vocab)
    float     *logits;        // (vocab)
    int32_t   *seen;          // (vocab) 0 between operations
    float     *parts;         // (SPLIT_QUERIES, PARTS, MAX_HEAD_DIM + 2) largest score, sum, values
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
    *total = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
}

static void read_words(const void *task, int first, int end) {
    const uint64_t *words = task;
    uint64_t sum[16] = { 0 };
    for (size_t i = (size_t)first * 512; i < (size_t)end * 512; i += 16)
        for (int j = 0; j < 16; j++) sum[j] += words[i + j];
    for (int j = 1; j < 16; j++) sum[0] += sum[j];
    *(volatile uint64_t *)&sum[1] = sum[0];
}

static void write_words(const void *task, int first, int end) {
    memset(*(char *const *)task + (size_t)first * 4096, 1, (size_t)(end - first) * 4096);
}

// What all threads together read per second, the best of five times through more than the caches hold; 0 without the memory.
static double cpu_bandwidth(void) {
    const int n_pages = (int)((available_memory() / 4 < (512u << 20) ? available_memory() / 4 : 512u << 20) / 4096);
    char *words = aligned_alloc(4096, (size_t)n_pages * 4096);
    double best = 0;
    if (!words || !n_pages) return 0;
    parallel(n_pages, share(n_pages, 1), write_words, &words);
    for (int i = 0; i < 5; i++) {
        const double start = seconds();
        parallel(n_pages, share(n_pages, 1), read_words, words);
        const double speed = n_pages * 4096.0 / (seconds() - start);
        if (speed > best) best = speed;
    }
    free(words);
    return best;
}

static size_t pairs_of_pass(const Limits *lim) {
    const size_t all = (size_t)lim->max_rows * lim->max_experts;
    return all < PASS_PAIRS ? all : PASS_PAIRS;
}

static size_t packed_bytes(size_t rows, size_t pairs, size_t cols) {
    return (rows > pairs ? rows : pairs) * gguf_packed_size(cols);
}

static size_t cpu_scratch_bytes(const Limits *lim) {
    const size_t n = (size_t)lim->max_rows * lim->max_cols, pairs = pairs_of_pass(lim);
    return n * 5 + n / 32 * 4 + lim->max_rows * 4 + SPLIT_QUERIES * PARTS * (MAX_HEAD_DIM + 2) * sizeof(float) +
           packed_bytes(lim->max_rows, pairs, lim->max_cols) + pairs * sizeof(int32_t) +
           lim->vocab * (sizeof(Candidate) + sizeof(float) + sizeof(int32_t));
}

static void cpu_init(const Limits *lim) {
    const size_t rows = (size_t)max_int(lim->max_rows, (int)cpu.rows), cols = (size_t)max_int(lim->max_cols, (int)cpu.cols);
    const size_t vocab = (size_t)max_int(lim->vocab, (int)cpu.vocab);
    const size_t pairs = (size_t)max_int((int)pairs_of_pass(lim), (int)cpu.pairs);
    if (rows == cpu.rows && pairs == cpu.pairs && cols == cpu.cols && vocab == cpu.vocab) return;
    free(cpu.y.f);
    free(cpu.y.q);
    free(cpu.y.s);
    free(cpu.packed);
    free(cpu.order);
    free(cpu.candidates);
    free(cpu.logits);
    free(cpu.seen);
    cpu.y.f = alloc_or_die(rows * cols, sizeof *cpu.y.f);
    cpu.y.q = alloc_or_die(rows * cols, sizeof *cpu.y.q);
    cpu.y.s = alloc_or_die(rows * (cols / 32 + 1), sizeof *cpu.y.s);
    cpu.packed = aligned_alloc(64, round_up(packed_bytes(rows, pairs, cols), 64));
    if (!cpu.packed) die("out of memory: %zu bytes wanted", packed_bytes(rows, pairs, cols));
    cpu.order = alloc_or_die(pairs, sizeof *cpu.order);
    cpu.candidates = alloc_or_die(vocab, sizeof *cpu.candidates);
    cpu.logits = alloc_or_die(vocab, sizeof *cpu.logits);
    cpu.seen = alloc_or_die(vocab, sizeof *cpu.seen);
    if (!cpu.parts) cpu.parts = alloc_or_die((size_t)SPLIT_QUERIES * PARTS * (MAX_HEAD_DIM + 2), sizeof *cpu.parts);
    cpu.rows = rows;
    cpu.pairs = pairs;
    cpu.cols = cols;
    cpu.vocab = vocab;
}

static void *cpu_reserve(size_t bytes) {
    bytes = round_up(bytes ? bytes : 1, 256);
    void *p = aligned_alloc(256, bytes);
    if (p) memset(p, 0, bytes);
    return p;
}

static void cpu_release(void *p) { free(p); }

static void cpu_copy(const Copy *c) { memcpy(c->dst, c->src, c->bytes); }

static bool cpu_begin(StepKey key) {                   // nothing is recorded: issue the operations
    (void)key;
    return true;
}

static void cpu_end(void) {}
static void cpu_wait(void) {}

// ---- building blocks ----

// 1 / sqrt(mean(x^2) + eps). The sum is in f64: eight parts, i mod 8, then these in order.
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

// e^x, relative error below 2e-7; 0 below -87, e^88 above 88; NaN for NaN. Without branches, so that loops over it
// become vectors: 2^n for the nearest n to x / ln 2, times a polynomial in the rest, |r| <= 0.35.
static inline float exp_of(float x) {
    const float in = x > 88 ? 88 : x < -87 ? -87 : x;
    const float shifted = in * 1.44269504f + 0x1.8p23f, n = shifted - 0x1.8p23f;     // the sum's last bits hold n
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

// One row of In: stores x' where wanted, leaves y in out (cols).
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

// The input of matrix products: rows in the forms that the matrices want.
typedef struct {
    Act            a;         // (n_rows, cols)
    const uint8_t *packed;    // (n_rows) for gguf_dot_q8_rows, NULL where no matrix is quantised
} Rows;

typedef struct {
    const In *in;
    Act       from;           // what a producer left, or NULL and NULL
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

// The input of a product: what a producer left, or rows prepared in scratch; in int8 too where a matrix is quantised,
// and packed if that is wanted.
static Rows prepare_as(const In *in, int n_rows, int cols, bool quantise, bool pack) {
    const bool own = !in->act.f && !in->act.q;
    const PrepareJob job = { .in = in, .from = in->act, .cols = cols, .quantise = quantise, .pack = pack };
    if (own || pack) parallel(n_rows, share(n_rows, 1), prepare_rows, &job);
    return (Rows){ .a = own ? cpu.y : in->act, .packed = pack ? cpu.packed : NULL };
}

static Rows prepare(const In *in, int n_rows, int cols, bool quantise) {
    return prepare_as(in, n_rows, cols, quantise, quantise);
}

// out[j * stride + i] = row first + i of matrix e of w times row r + j of x: n columns of n_rows rows of a product.
static void dots(const Tensor *w, int e, int first, int n, const Rows *x, size_t r, int n_rows, float *out, size_t stride) {
    const size_t cols = (size_t)w->cols, row_size = gguf_row_size(w->type, cols), at = r * cols;
    const uint8_t *rows = (const uint8_t *)w->data + ((size_t)e * w->rows + first) * row_size;
    if (!is_quantised(w->type))
        gguf_dot_f32_rows(w->type, rows, n, row_size, x->a.f + at, n_rows, cols, cols, out, stride);
    else
        gguf_dot_q8_rows(w->type, rows, n, x->packed + r * gguf_packed_size(cols), n_rows, cols, out, stride);
    for (int j = 0; w->scale && j < n_rows; j++)
        for (int i = 0; i < n; i++) out[j * stride + i] *= w->scale[e];
}

// n values of row r of an Act (cols wide) from column `first`, a multiple of 32; in int8 too when the reader wants that.
static void emit(const Act *out, size_t r, int cols, int first, const float *v, int n) {
    const size_t at = r * (size_t)cols + first;
    if (out->f) memcpy(out->f + at, v, (size_t)n * sizeof *v);
    if (out->q) gguf_quantize_q8(v, out->q + at, out->s + at / 32, n);
}

// ---- body ----

// The token of a row, 0 for one outside the vocabulary: a choice of -1 that was fed.
static int32_t known(int32_t token, int vocab) { return token < 0 || token >= vocab ? 0 : token; }

// A token's row of an embedding table as f32 (cols).
static void embedding_row(const Tensor *table, int32_t token, float *out) {
    const size_t row = (size_t)known(token, table->rows), row_size = gguf_row_size(table->type, table->cols);
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

static void cpu_embed(const Embed *o) { parallel(o->batch->n_rows, share(o->batch->n_rows, 1), embed_rows, o); }

static void cpu_pair(const Pair *o) {
    const int cols = o->table->cols;
    float *x = cpu.y.f;                                // (2 * cols)
    for (int r = 0; r < o->n_rows; r++) {
        const int i = o->of ? o->of[r] : r;
        embedding_row(o->table, o->tokens[(size_t)i * o->token_stride], x);
        for (int c = 0; c < cols; c++) x[c] *= o->scale;
        memcpy(x + cols, o->hidden + (size_t)(o->row ? o->row[i] : i) * cols, (size_t)cols * sizeof *x);
        emit(&o->out, r, 2 * cols, 0, x, 2 * cols);
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

static void cpu_ple_rows(const PleRows *o) { parallel(o->batch->n_rows, share(o->batch->n_rows, 1), ple_rows, o); }

typedef struct { const void *o; Rows y; } InputJob;                     // an operation, and its input

static void matmul_columns(const void *task, int first, int end) {      // columns of all outputs, one after the other
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
    parallel(n, share(n, 16), matmul_columns, &job);
}

enum { TILE_ROWS = 32 };      // activation rows, and columns, of a product that goes through more than one matrix

// out[r][i] = act(gate y) * (up y) of 32 columns from `first` on, of n_rows <= TILE_ROWS rows. Fused tensors hold the n
// rows of up behind those of gate.
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
        for (int j = 0; j < o->n_used; j++) {          // the next largest, the lower expert first on ties
            int best = -1;
            for (int i = 0; i < n; i++)
                if (!taken[i] && (best < 0 || z[i] > z[best])) best = i;
            taken[best] = true;
            ids[j] = best;
            weights[j] = expf(z[best] - z[ids[0]]);    // softmax over all, then over the chosen: the common factor cancels
            sum += weights[j];
        }
        for (int j = 0; j < o->n_used; j++) weights[j] = weights[j] / sum * (o->expert_scale ? o->expert_scale[ids[j]] : 1);
    }
}

static void cpu_route(const Route *o) {
    const InputJob job = { o, prepare(&o->in, o->n_rows, o->w->cols, is_quantised(o->w->type)) };
    parallel(o->w->rows, share(o->w->rows, 4), route_columns, &job);
    parallel(o->n_rows, share(o->n_rows, 4), route_rows, o);
}

// Pairs (row, chosen expert) by expert, so that an expert's weights are unpacked once for all rows that chose it. Pair p is
// choice p % n_used of row p / n_used; order[k] for start[i] <= k < start[i + 1] are the pairs of expert[i], ascending.
typedef struct {
    int first, n;             // pairs
    int n_experts;            // that were chosen
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
    const ExpertGateUp *gate_up;       // one of the two
    const ExpertDown   *down;
    Rows  y;                  // by pair, gate_up: by row
    bool  sorted;             // its packed rows lie in the order of the pairs
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

// Sorts the pairs from `first` on, as many as a pass takes, and with `pack` packs their inputs in that order.
static void begin_pass(ExpertJob *job, const int32_t *ids, int first, int n_pairs, int n_used, bool pack) {
    const int most = (int)cpu.pairs / n_used * n_used;
    const int n_experts = job->down ? job->down->down->n : job->gate_up->gate->n;
    sort_pairs(&job->pairs, n_experts, ids, first, min_int(most, n_pairs - first));
    job->sorted = pack;
    if (!pack) return;
    job->y.packed = cpu.packed;
    parallel(job->pairs.n, share(job->pairs.n, 16), pack_pairs, job);    // a few are no work to share
}

static void expert_gate_up_tiles(const void *task, int begin, int end) {           // of 32 columns of one expert
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
            for (int j = 0; j < n_rows; j++) emit(&o->out, p->order[k + j], n, first, out[j], min_int(32, n - first));
        }
    }
}

static void cpu_expert_gate_up(const ExpertGateUp *o) {
    const int n = o->up ? o->gate->rows : o->gate->rows / 2, n_pairs = o->n_rows * o->n_used;
    const bool gate_q = is_quantised(o->gate->type), up_q = o->up ? is_quantised(o->up->type) : gate_q;
    const bool pack = gate_q && up_q && o->n_rows > 1;                 // else each pair takes its row as it is
    ExpertJob job = { .gate_up = o,
                      .y = prepare_as(&o->in, o->n_rows, o->gate->cols, gate_q || up_q, (gate_q || up_q) && !pack) };
    for (int first = 0; first < n_pairs; first += job.pairs.n) {
        begin_pass(&job, o->ids, first, n_pairs, o->n_used, pack);
        const int n_tiles = job.pairs.n_experts * ((n + 31) / 32);
        parallel(n_tiles, share(n_tiles, 1), expert_gate_up_tiles, &job);
    }
    if (o->beside) cpu_matmul(o->beside);
}

static void gate_up_tiles(const void *task, int begin, int end) {       // of 32 columns, all rows
    const InputJob *job = task;
    const GateUp *o = job->o;
    const int n = o->gate->rows;
    float out[TILE_ROWS][32];
    for (int first = begin * 32; first < end * 32; first += 32)
        for (int r = 0; r < o->n_rows; r += TILE_ROWS) {
            const int n_rows = min_int(TILE_ROWS, o->n_rows - r);
            gated_tile(o->gate, o->up, 0, n, first, o->fn, &job->y, r, n_rows, out);
            for (int j = 0; j < n_rows; j++) emit(&o->out, r + j, n, first, out[j], min_int(32, n - first));
        }
}

static void cpu_gate_up(const GateUp *o) {
    const int n = o->gate->rows, n_tiles = (n + 31) / 32;
    const bool quantise = is_quantised(o->gate->type) || is_quantised(o->up->type);
    const InputJob job = { o, prepare(&o->in, o->n_rows, o->gate->cols, quantise) };
    parallel(n_tiles, share(n_tiles, 1), gate_up_tiles, &job);
    if (o->route) cpu_route(o->route);
    if (o->experts) cpu_expert_gate_up(o->experts);
}

static void expert_down_tiles(const void *task, int begin, int end) {   // of 16 columns, all pairs of the pass
    enum { WIDTH = 16 };
    const ExpertJob *job = task;
    const ExpertDown *o = job->down;
    const Pairs *p = &job->pairs;
    const int n = o->down->rows;
    float part[PASS_PAIRS][WIDTH];                     // by pair: they are added in the order of a row's choices
    float tile[TILE_ROWS][WIDTH];
    for (int first = begin * WIDTH; first < end * WIDTH; first += WIDTH) {
        const int width = min_int(WIDTH, n - first), at_once = job->sorted ? TILE_ROWS : 1;
        for (int x = 0; x < p->n_experts; x++)
            for (int k = p->start[x]; k < p->start[x + 1]; k += at_once) {
                const int n_rows = min_int(at_once, p->start[x + 1] - k);
                dots(o->down, p->expert[x], first, width, &job->y, job->sorted ? k : p->order[k], n_rows, tile[0], WIDTH);
                for (int j = 0; j < n_rows; j++) memcpy(part[p->order[k + j] - p->first], tile[j], sizeof tile[j]);
            }
        for (int i = 0; i < p->n; i += o->n_used) {
            float sum[WIDTH] = { 0 };
            for (int j = i; j < i + o->n_used; j++)
                for (int c = 0; c < width; c++) sum[c] += o->weights[p->first + j] * part[j][c];
            memcpy(o->out + (size_t)((p->first + i) / o->n_used) * n + first, sum, (size_t)width * sizeof *sum);
        }
    }
}

static void cpu_expert_down(const ExpertDown *o) {
    const int n_tiles = (o->down->rows + 15) / 16, n_pairs = o->n_rows * o->n_used;
    ExpertJob job = { .down = o, .y.a = o->in };
    for (int first = 0; first < n_pairs; first += job.pairs.n) {
        begin_pass(&job, o->ids, first, n_pairs, o->n_used, is_quantised(o->down->type));
        parallel(n_tiles, share(n_tiles, 1), expert_down_tiles, &job);
    }
}

static void ple_inject_tiles(const void *task, int begin, int end) {    // of 32 columns, all rows
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
                emit(&o->out, r + j, n, first, v[j], width);
            }
        }
}

static void cpu_ple_inject(const PleInject *o) {
    const int n_tiles = (o->w->rows + 31) / 32;
    const InputJob job = { o, prepare(&o->in, o->n_rows, o->w->cols, is_quantised(o->w->type)) };
    parallel(n_tiles, share(n_tiles, 1), ple_inject_tiles, &job);
}

static void cpu_close(const Close *o) {
    for (int r = 0; r < o->n_rows; r++) {
        prepare_row(&o->in, r, o->cols, cpu.y.f);
        if (o->out) memcpy(o->out + (size_t)r * o->cols, cpu.y.f, (size_t)o->cols * sizeof(float));
    }
}

static void cpu_gather_rows(const GatherRows *o) {
    for (int r = 0; r < o->n_rows; r++)
        memcpy((uint32_t *)o->dst + (size_t)r * o->dst_stride,
               (const uint32_t *)o->src + (size_t)(o->index ? o->index[r] : r) * o->src_stride, o->cols * sizeof(uint32_t));
}

// ---- cache ----

// Where row `slot` of one head lies, and the scales beside it.
static void *kv_row(const Cache *c, const KvPlane *p, int seq, int head, int slot) {
    const size_t row = ((size_t)seq * c->n_kv_heads + head) * (size_t)c->slots + slot;
    return (char *)p->data + row * kv_row_bytes(p->type, p->dim);
}
static uint16_t *kv_scales(const Cache *c, const KvPlane *p, int seq, int head, int slot) {
    const size_t row = ((size_t)seq * c->n_kv_heads + head) * (size_t)c->slots + slot;
    return p->scale ? (uint16_t *)p->scale + row * kv_scale_bytes(p->type, p->dim) / 2 : NULL;
}

// A cache's tail as a cache: the newest rows in f16.
static Cache tail_of(const Cache *c) {
    Cache tail = *c;
    tail.k = c->k_tail, tail.v = c->v_tail, tail.slots = c->tail_slots;
    return tail;
}

// The first dim values of v to a row of plane k or v.
static void kv_write(const Cache *c, bool is_v, int seq, int head, int slot, const float *v) {
    const KvPlane *p = is_v ? &c->v : &c->k;
    kv_write_row(p->type, !is_v || c->n_rot, p->dim, v, kv_row(c, p, seq, head, slot), kv_scales(c, p, seq, head, slot));
}

// The same to the tail, in the basis of the plane's rows; v is lost.
static void kv_write_tail(const Cache *c, bool is_v, int seq, int head, int pos, float *v) {
    const KvPlane *p = is_v ? &c->v : &c->k;
    const Cache tail = tail_of(c);
    for (int i = 0; kv_group(p->type) && i < p->dim; i += KV_TURN) kv_turn(v + i, 0.0625f);
    kv_write(&tail, is_v, seq, head, pos % tail.slots, v);
}

// Pairs (i, i + half), i < n: (a, b) -> (a cos - b sin, a sin + b cos).
static void rope_rotate(float *v, int half, int n, const float *cosine, const float *sine) {
    for (int i = 0; i < n; i++) {
        const float a = v[i], b = v[i + half];
        v[i] = a * cosine[i] - b * sine[i];
        v[i + half] = a * sine[i] + b * cosine[i];
    }
}

// Tied order of a head (gemma4.h, Cache): the 2 * n_rot values that rotate, then the others. back: the other way round.
static void tied_order(float *v, int head_dim, int n_rot, bool back) {
    float t[MAX_HEAD_DIM];
    const int half = head_dim / 2;
    int k = 0;
    memcpy(t, v, (size_t)head_dim * sizeof *v);
    for (int part = 0; part < 4; part++) {             // rotated of both halves, then unrotated of both
        const int from = (part & 1) * half + (part < 2 ? 0 : n_rot), to = (part & 1) * half + (part < 2 ? n_rot : half);
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
        for (int i = 0; i < o->rope.n_pairs; i++) {    // angles in f64: f32 is 0.016 rad off at position 262143
            cosine[i] = (float)cos(pos * o->rope.inv_freq[i]);
            sine[i] = (float)sin(pos * o->rope.inv_freq[i]);
        }
        for (int h = 0; o->q && h < o->n_heads; h++) {
            float *q = o->q + ((size_t)r * o->n_heads + h) * (size_t)hd;
            rms_norm(q, q, o->w_q, hd, o->eps);
            dump_head(o->dump_q, r, o->n_heads, h, hd, q);
            rope_rotate(q, half, o->rope.n_pairs, cosine, sine);
            dump_head(o->dump_q_pos, r, o->n_heads, h, hd, q);
            for (int i = c->n_rot; c->n_rot && i < half; i++) {        // the unrotated part of K is r * fold: fold goes into q
                q[i] *= c->fold[i];
                q[i + half] *= c->fold[i + half];
            }
            if (c->n_rot) tied_order(q, hd, c->n_rot, false);
            if (kv_group(c->k.type)) kv_turn_query(q, hd);
        }
        if (!o->k) continue;
        const Cache *dst = o->stage ? o->stage : c;
        const int seq = o->stage ? 0 : seg->seq, slot = o->stage ? seg->first + row->index : (len + row->index) % c->slots;
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
            kv_write(dst, false, seq, g, slot, k);     // tied: the first k.dim values, those that rotate
            kv_write(dst, true, seq, g, slot, v);
            if (!c->tail_slots || row->index < seg->n - c->tail_slots) continue;
            kv_write_tail(c, false, seq, g, len + row->index, k);
            kv_write_tail(c, true, seq, g, len + row->index, v);
        }
    }
}

static void cpu_qkv_store(const QkvStore *o) { parallel(o->batch->n_rows, share(o->batch->n_rows, 1), qkv_store_rows, o); }

enum { QUERIES = 8, KEYS = 32 };        // rows x heads, and cached rows, that are worked on at a time

// softmax(q . k) v of some queries, which are heads of one KV head in rows of one segment. Key by key in the order of
// positions ("online softmax"): the largest score so far stays the reference point, so exp never overflows. How queries
// are grouped makes no difference to the bits.
typedef struct {
    const Attend *o;
    int   head_dim, n_heads, n;         // n queries: rows x n_heads
    float q[QUERIES * MAX_HEAD_DIM], out[QUERIES * MAX_HEAD_DIM];      // (n, head_dim); out unnormalised
    float max[QUERIES], sum[QUERIES];
} Softmax;

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
            a += p[j] * from[0], b += p[j] * from[1], c += p[j] * from[2], d += p[j] * from[3];
        }
        o[0] = a, o[1] = b, o[2] = c, o[3] = d;
    }
    for (; i < dim; i++)
        for (int j = 0; j < n; j++) out[i] += p[j] * v[(size_t)key[j] * dim + i];
}

// n <= KEYS rows of a plane (n, dim) as floats, where they lie or in room for them.
static const float *kv_floats(const Cache *c, const KvPlane *p, int seq, int head, int slot, int n, float *room) {
    const void *rows = kv_row(c, p, seq, head, slot);
    if (p->type == KV_F32) return rows;
    kv_read_rows(p->type, n, p->dim, rows, kv_scales(c, p, seq, head, slot), room);
    return room;
}

// scores[i][k] of n <= KEYS keys and all queries. v (n, head_dim): their rows of V as floats.
static void score_keys(Softmax *s, const Cache *c, int seq, int head, int slot, int n, const float *v, float scores[][KEYS]) {
    const int hd = s->head_dim, n_k = c->k.dim;
    const bool halves = c->k.type == KV_F16 || c->k.type == KV_BF16;
    const size_t unit = sizeof(float);
    float k_room[KEYS * MAX_HEAD_DIM], rest[QUERIES][KEYS];
    if (halves) gguf_dot_f32_rows(c->k.type == KV_F16 ? GGUF_F16 : GGUF_BF16, kv_row(c, &c->k, seq, head, slot), n,
                                  kv_row_bytes(c->k.type, n_k), s->q, s->n, hd, n_k, scores[0], KEYS);
    else gguf_dot_f32_rows(GGUF_F32, kv_floats(c, &c->k, seq, head, slot, n, k_room), n, n_k * unit, s->q, s->n, hd, n_k,
                           scores[0], KEYS);
    if (n_k < hd)                                      // tied: the rest of K is V
        gguf_dot_f32_rows(GGUF_F32, v + n_k, n, hd * unit, s->q + n_k, s->n, hd, hd - n_k, rest[0], KEYS);
    for (int i = 0; i < s->n; i++)
        for (int k = 0; k < n; k++) scores[i][k] = (n_k < hd ? scores[i][k] + rest[i][k] : scores[i][k]) * s->o->scale;
}

// Takes n <= KEYS keys into account, in slots from `slot` on. Bit k of seen[i]: row i of the queries sees key k.
static void attend_keys(Softmax *s, const Cache *c, int seq, int head, int slot, int n, const uint32_t *seen) {
    const int hd = s->head_dim;
    const float factor = c->n_rot ? kv_tied_factor(c->v.type) : 1;
    float scores[QUERIES][KEYS], v_room[KEYS * MAX_HEAD_DIM];
    const float *v = kv_floats(c, &c->v, seq, head, slot, n, v_room);
    score_keys(s, c, seq, head, slot, n, v, scores);
    for (int i = 0; i < s->n; i++) {
        float score[KEYS], p[KEYS], *out = s->out + (size_t)i * hd;
        int key[KEYS], n_seen = 0;
        for (int k = 0; k < n; k++) {
            if (!(seen[i / s->n_heads] >> k & 1)) continue;
            score[n_seen] = scores[i][k];
            key[n_seen++] = k;
        }
        for (int from = 0, to; from < n_seen; from = to) {             // as far as the largest score stays the same
            if (score[from] > s->max[i]) {
                const float shrink = exp_of(s->max[i] - score[from]);    // 0 the first time: max is -inf
                s->sum[i] *= shrink;
                for (int d = 0; d < hd; d++) out[d] *= shrink;
                s->max[i] = score[from];
            }
            for (to = from + 1; to < n_seen && !(score[to] > s->max[i]); to++) {}
            for (int j = from; j < to; j++) p[j] = exp_of(score[j] - s->max[i]);
            for (int j = from; j < to; j++) s->sum[i] += p[j], p[j] *= factor;
            add_values(out, v, key + from, p + from, to - from, hd);
        }
    }
}

typedef struct {              // rows of one segment, fewer than 32, and what they see
    const Row *row;
    const Segment *seg;
    int n, len;
    int first[QUERIES];       // the lowest position in sight
    int cut[QUERIES];         // committed positions up to here are read in k and v, those above in the tail
    int lowest, end;          // keys in sight of any row are lowest .. end - 1
    int low_cut, high_cut;
    bool tailed;
    const int32_t *block;     // (n_blocks) the only blocks of keys in sight, ascending; NULL: all are
    int n_blocks;
} Sight;

// Bit k: the block of key j + k is among those in sight.
static uint32_t listed_keys(const Sight *v, int j) {
    uint32_t seen = v->block ? 0 : ~(uint32_t)0;
    for (int b = j / SELECT_KEYS; v->block && b <= (j + 31) / SELECT_KEYS; b++) {
        int low = 0, high = v->n_blocks;               // the first one that is not below b
        while (low < high) {
            const int mid = (low + high) / 2;
            if (v->block[mid] < b) low = mid + 1;
            else high = mid;
        }
        if (low == v->n_blocks || v->block[low] != b) continue;
        const int from = max_int(b * SELECT_KEYS - j, 0), to = min_int((b + 1) * SELECT_KEYS - j, 32);
        seen |= ~(uint32_t)0 << from & ~(uint32_t)0 >> (32 - to);
    }
    return seen;
}

// Committed positions from <= p < to, in a cache or (is_tail) its tail.
static void attend_committed(Softmax *s, const Sight *v, const Cache *c, bool is_tail, int head, int from, int to) {
    for (int p = from, n; p < to; p += n) {
        uint32_t seen[QUERIES], any = 0;
        const uint32_t listed = listed_keys(v, p);
        n = min_int(min_int(KEYS, to - p), c->slots - p % c->slots);
        for (int i = 0; i < v->n; i++) {
            const int low = max_int((is_tail ? max_int(v->first[i], v->cut[i] + 1) : v->first[i]) - p, 0);
            const int high = is_tail ? 32 : v->cut[i] - p + 1;         // bits low .. high - 1
            seen[i] = low < 32 ? ~(uint32_t)0 << low : 0;
            if (high < 32) seen[i] &= high > 0 ? ((uint32_t)1 << high) - 1 : 0;
            any |= seen[i] &= listed;
        }
        if (any) attend_keys(s, c, v->seg->seq, head, p % c->slots, n, seen);
    }
}

// Rows of a tree on the path to one of them, its own included, whose depths are from .. to - 1.
static uint64_t path_rows(uint64_t ancestors, int from, int to) {
    uint64_t rows = 0;
    for (int depth = 0; ancestors; depth++, ancestors &= ancestors - 1)
        if (depth >= from && depth < to) rows |= ancestors & -ancestors;
    return rows;
}

// Rows of the segment itself, which lie behind the committed ones or in a stage, at depths from .. to - 1.
static void attend_own(Softmax *s, const Sight *v, const Cache *c, int head, int from, int to) {
    const Cache *stage = s->o->stage;
    const bool all = s->o->own == OWN_ALL, tree = !all && v->seg->kind == SEG_TREE;
    uint64_t path[QUERIES];
    for (int i = 0; i < v->n && tree; i++) path[i] = path_rows(v->row[i].ancestors, from, to);
    const int end = tree ? v->end - v->len : to;       // a tree's rows are not in the order of their depths
    for (int k = tree ? 0 : from, n; k < end; k += n) {
        const int slot = stage ? v->seg->first + k : (v->len + k) % c->slots;
        uint32_t seen[QUERIES], any = 0;
        const uint32_t listed = listed_keys(v, v->len + k);
        n = min_int(KEYS, end - k);
        if (!stage) n = min_int(n, c->slots - slot);
        for (int i = 0; i < v->n; i++) {
            const int hidden = max_int(v->first[i] - v->len - k, 0), ahead = v->row[i].index + 1 - k;
            seen[i] = tree ? (uint32_t)(path[i] >> k) : all || hidden < 32 ? ~(uint32_t)0 << (all ? 0 : hidden) : 0;
            if (!all && ahead < 32) seen[i] &= ahead > 0 ? ((uint32_t)1 << ahead) - 1 : 0;
            any |= seen[i] &= listed;
        }
        if (any) attend_keys(s, stage ? stage : c, stage ? 0 : v->seg->seq, head, slot, n, seen);
    }
}

// Rows r .. r + n_rows - 1 of the step, which are of one segment and of one block of rows, and what they see of KV head g.
static Sight look(const Attend *o, int r, int n_rows, int g) {
    const Cache *c = o->cache;
    const Row *row = &o->batch->rows[r];
    const Segment *seg = &o->batch->segs[row->seg];
    Sight v = { .row = row, .seg = seg, .n = n_rows, .len = o->batch->len[seg->seq], .high_cut = -1,
                .tailed = c->tail_slots && seg->n <= STEP_ROWS };
    v.lowest = v.low_cut = v.end = v.len;
    for (int i = 0; i < n_rows; i++) {
        const int pos = v.len + row[i].depth, n_own = o->own == OWN_NONE ? 0 : o->own == OWN_ALL ? seg->n : row[i].index + 1;
        v.first[i] = o->window ? max_int(0, pos - o->window + 1) : 0;
        v.cut[i] = v.tailed ? max_int(-1, pos - (c->tail_slots - STEP_ROWS)) : INT_MAX - 1;
        v.lowest = min_int(v.lowest, v.first[i]);
        v.low_cut = min_int(v.low_cut, v.cut[i]), v.high_cut = max_int(v.high_cut, v.cut[i]);
        v.end = max_int(v.end, v.len + n_own);
    }
    const size_t list = (size_t)(r / SELECT_ROWS) * c->n_kv_heads + g;
    if (o->blocks && o->blocks->n[list] >= 0) {
        v.block = o->blocks->block + list * o->blocks->n_blocks;
        v.n_blocks = o->blocks->n[list];
    }
    return v;
}

// What one part finds for the queries of s: out, max and sum.
static void attend_part(Softmax *s, const Sight *v, int head, int part) {
    const Cache *c = s->o->cache, tail = tail_of(c);
    const int first = v->lowest / SPAN;
    for (int i = 0; i < s->n; i++) s->max[i] = -INFINITY, s->sum[i] = 0;
    memset(s->out, 0, (size_t)s->n * s->head_dim * sizeof *s->out);
    for (int span = first + (part - first % PARTS + PARTS) % PARTS; span * SPAN < v->end; span += PARTS) {
        const int from = max_int(span * SPAN, v->lowest), to = min_int((span + 1) * SPAN, v->end), held = min_int(to, v->len);
        attend_committed(s, v, c, false, head, from, min_int(held, v->high_cut + 1));
        if (v->tailed) attend_committed(s, v, &tail, true, head, max_int(from, v->low_cut + 1), held);
        if (to > v->len) attend_own(s, v, v->tailed ? &tail : c, head, max_int(from, v->len) - v->len, to - v->len);
    }
}

// Adds what a part found (out, max, sum) for one query to what those before it did.
static void join_part(float *out, float *max, float *sum, const float *part_out, float part_max, float part_sum, int n) {
    if (part_sum == 0) return;
    if (*sum == 0) {
        memcpy(out, part_out, (size_t)n * sizeof *out);
        *max = part_max, *sum = part_sum;
        return;
    }
    const float top = fmaxf(*max, part_max), shrink = exp_of(*max - top), factor = exp_of(part_max - top);
    for (int d = 0; d < n; d++) out[d] = out[d] * shrink + part_out[d] * factor;
    *sum = *sum * shrink + part_sum * factor;
    *max = top;
}

// One query's result (head_dim), to where attention writes it.
static void put_query(const Attend *o, int r, int head, float *out, float sum) {
    const Cache *c = o->cache;
    const int hd = c->head_dim;
    for (int d = 0; d < hd; d++) out[d] = sum == 0 ? 0 : out[d] / sum;         // nothing in sight: 0
    if (kv_group(c->v.type)) kv_turn_rows_back(out, hd);
    if (c->n_rot) tied_order(out, hd, c->n_rot, true);
    emit(&o->out, r, o->n_heads * hd, head * hd, out, hd);
}

typedef struct {
    const Attend *o;
    int rows, heads;          // of an item
    int parts;                // into which the heads of a KV head are cut
    int split;                // into which the context is: 1, or PARTS
} AttendJob;

// The heads from `head` on, of rows r .. r + n_rows - 1 of the step, which are of one segment: all parts, or one of
// them, whose results wait in cpu.parts.
static void attend_queries(Softmax *s, const AttendJob *job, int r, int n_rows, int head, int n_heads, int part) {
    const Attend *o = job->o;
    const int hd = o->cache->head_dim, g = head / (o->n_heads / o->cache->n_kv_heads);
    const Sight v = look(o, r, n_rows, g);
    float total[QUERIES * MAX_HEAD_DIM], max[QUERIES], sum[QUERIES];
    s->o = o;
    s->head_dim = hd;
    s->n_heads = n_heads;
    s->n = n_rows * n_heads;
    for (int i = 0; i < s->n; i++) {
        const size_t at = (size_t)(r + i / n_heads) * o->n_heads + head + i % n_heads;
        memcpy(s->q + (size_t)i * hd, o->q + at * hd, (size_t)hd * sizeof *s->q);
        max[i] = -INFINITY, sum[i] = 0;
    }
    const int first = job->split > 1 ? part : 0, end = job->split > 1 ? part + 1 : min_int(PARTS, (v.end - 1) / SPAN + 1);
    for (int p = first; p < end; p++) {
        attend_part(s, &v, g, p);
        for (int i = 0; i < s->n; i++) {
            const float *out = s->out + (size_t)i * hd;
            const size_t query = (size_t)(r + i / n_heads) * o->n_heads + head + i % n_heads;
            if (job->split == 1) {
                join_part(total + (size_t)i * hd, &max[i], &sum[i], out, s->max[i], s->sum[i], hd);
                continue;
            }
            float *to = cpu.parts + (query * PARTS + p) * (MAX_HEAD_DIM + 2);
            to[0] = s->max[i], to[1] = s->sum[i];
            memcpy(to + 2, out, (size_t)hd * sizeof *out);
        }
    }
    for (int i = 0; i < s->n && job->split == 1; i++)
        put_query(o, r + i / n_heads, head + i % n_heads, total + (size_t)i * hd, sum[i]);
}

static int attend_count(const AttendJob *job) {        // items
    return (job->o->batch->n_rows + job->rows - 1) / job->rows * job->o->cache->n_kv_heads * job->parts * job->split;
}

static void attend_items(const void *task, int begin, int end) {
    const AttendJob *job = task;
    const Attend *o = job->o;
    const int kv_heads = o->cache->n_kv_heads, group = o->n_heads / kv_heads, across = kv_heads * job->parts;
    Softmax s;
    for (int i = begin; i < end; i++) {
        const int item = i / job->split, part = i % job->split;
        const int from = item % across % job->parts * job->heads, head = item % across / job->parts * group + from;
        const int row_end = min_int((item / across + 1) * job->rows, o->batch->n_rows);
        for (int r = item / across * job->rows, n; r < row_end; r += n) {
            for (n = 1; r + n < row_end && o->batch->rows[r + n].seg == o->batch->rows[r].seg; n++) {}
            attend_queries(&s, job, r, n, head, min_int(job->heads, group - from), part);
        }
    }
}

// Queries first .. end - 1, of which all parts wait in cpu.parts.
static void join_queries(const void *task, int first, int end) {
    const Attend *o = ((const AttendJob *)task)->o;
    for (int query = first; query < end; query++) {
        float out[MAX_HEAD_DIM] = { 0 }, max = -INFINITY, sum = 0;
        for (int p = 0; p < PARTS; p++) {
            const float *part = cpu.parts + ((size_t)query * PARTS + p) * (MAX_HEAD_DIM + 2);
            join_part(out, &max, &sum, part + 2, part[0], part[1], o->cache->head_dim);
        }
        put_query(o, query / o->n_heads, query % o->n_heads, out, sum);
    }
}

static void cpu_attend(const Attend *o) {
    const int group = o->n_heads / o->cache->n_kv_heads, n_queries = o->batch->n_rows * o->n_heads;
    AttendJob job = { .o = o, .heads = min_int(group, QUERIES), .split = 1 };
    int longest = 0;
    if (o->store) cpu_qkv_store(o->store);
    job.rows = QUERIES / job.heads;
    job.parts = (group + job.heads - 1) / job.heads;
    for (int i = 0; i < o->batch->n_segs; i++) longest = max_int(longest, o->batch->len[o->batch->segs[i].seq]);
    if (o->window) longest = min_int(longest, o->window);
    if (attend_count(&job) < 2 * pool.n_threads && n_queries <= SPLIT_QUERIES && longest >= 4 * SPAN) job.split = PARTS;
    while (attend_count(&job) < pool.n_threads && job.rows * job.heads > 1) {       // fewer queries share a key then
        if (job.rows > 1) job.rows = (job.rows + 1) / 2;
        else job.heads = (job.heads + 1) / 2;
        job.parts = (group + job.heads - 1) / job.heads;
    }
    parallel(attend_count(&job), job.split > 1 ? 1 : share(attend_count(&job), 1), attend_items, &job);
    if (job.split > 1) parallel(n_queries, share(n_queries, 1), join_queries, &job);
}

// Of the blocks first .. end - 1 of the KV heads of all segments: the means of their rows of K.
static void mean_blocks(const void *task, int first, int end) {
    const BlockSelect *o = task;
    const Cache *c = o->cache;
    const int hd = c->head_dim, n_blocks = o->out.n_blocks;
    float k_room[KEYS * MAX_HEAD_DIM], v_room[KEYS * MAX_HEAD_DIM];
    for (int i = first; i < end; i++) {
        const int block = i % n_blocks, g = i / n_blocks % c->n_kv_heads;
        const Segment *seg = &o->batch->segs[i / n_blocks / c->n_kv_heads];
        float *mean = (float *)o->means + (size_t)i * hd;
        if ((block + 1) * SELECT_KEYS > o->batch->len[seg->seq] + seg->n) continue;
        memset(mean, 0, (size_t)hd * sizeof *mean);
        for (int slot = block * SELECT_KEYS; slot < (block + 1) * SELECT_KEYS; slot += KEYS) {
            const float *k = kv_floats(c, &c->k, seg->seq, g, slot, KEYS, k_room), *v = k;
            if (c->n_rot) v = kv_floats(c, &c->v, seg->seq, g, slot, KEYS, v_room);        // the rest of K is V
            for (int j = 0; j < KEYS; j++) {
                for (int d = 0; d < c->k.dim; d++) mean[d] += k[(size_t)j * c->k.dim + d];
                for (int d = c->k.dim; d < hd; d++) mean[d] += v[(size_t)j * hd + d];
            }
        }
        for (int d = 0; d < hd; d++) mean[d] *= 1.0f / SELECT_KEYS;
    }
}

typedef struct {              // a block of rows
    int  seg, first, n;       // rows first .. first + n - 1 of the batch
    int  pos, n_blocks;       // position of the first; blocks of keys in sight
    bool all, of_prompt;      // they see all; the segment is a prompt's
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

// Scores of heads first .. end - 1, counted through all blocks of rows.
static void score_blocks(const void *task, int first, int end) {
    const BlockSelect *o = task;
    const int hd = o->cache->head_dim, n_blocks = o->out.n_blocks, group = o->n_heads / o->cache->n_kv_heads;
    float scores[SELECT_ROWS][KEYS];
    for (int i = first; i < end; i++) {
        const int h = i % o->n_heads;
        const RowBlock v = row_block(o->batch, i / o->n_heads);
        const float *mean = (float *)o->means + ((size_t)v.seg * o->cache->n_kv_heads + h / group) * n_blocks * hd;
        const float *q = o->q + ((size_t)v.first * o->n_heads + h) * hd;
        float *s = o->scores + (size_t)i * n_blocks;
        for (int b = 0; b < v.n_blocks && !v.all; b += KEYS) {
            const int n = min_int(KEYS, v.n_blocks - b);
            gguf_dot_f32_rows(GGUF_F32, mean + (size_t)b * hd, n, hd * sizeof *mean, q, v.n, (size_t)o->n_heads * hd, hd,
                              scores[0], KEYS);
            for (int k = 0; k < n; k++) {
                const int from = max_int((b + k + 1) * SELECT_KEYS - 1 - v.pos, 0);    // rows before it do not see all of it
                float largest = -INFINITY, sum = 0;
                for (int r = from; r < v.n; r++) largest = fmaxf(largest, scores[r][k] * o->scale);
                for (int r = from; r < v.n; r++) sum += exp_of(scores[r][k] * o->scale - largest);
                s[b + k] = from < v.n ? largest + logf(sum) : -INFINITY;
            }
        }
    }
}

// The least weight >= 0 that at most `most` of w (n) exceed.
static float weight_of_rank(const float *w, int n, int most) {
    uint32_t low = 0, high = 0x7f800000;               // bits of floats from 0 to infinity are in their order
    float edge = 0;
    while (low < high) {
        const uint32_t mid = low + (high - low) / 2;
        int above = 0;
        memcpy(&edge, &mid, sizeof edge);
        for (int i = 0; i < n; i++) above += w[i] > edge;
        if (above > most) low = mid + 1;
        else high = mid;
    }
    memcpy(&edge, &low, sizeof edge);
    return edge;
}

// Weights of n blocks of keys (n): the largest of some heads, whose scores (n_heads, stride) become shares of their sums.
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

// Lists of KV heads first .. end - 1, counted through all blocks of rows.
static void list_blocks(const void *task, int first, int end) {
    const BlockSelect *o = task;
    const int kv_heads = o->cache->n_kv_heads, n_blocks = o->out.n_blocks, group = o->n_heads / kv_heads;
    for (int i = first; i < end; i++) {
        const RowBlock v = row_block(o->batch, i / kv_heads);
        const int near = max_int(v.pos / SELECT_KEYS - SELECT_NEAR + 1, 0);
        float *w = o->weights + (size_t)i * n_blocks, largest = 0;
        int32_t *list = o->out.block + (size_t)i * n_blocks;
        int n = 0, room = (int)ceilf(o->density * (float)v.n_blocks) - min_int(v.n_blocks, v.n_blocks - near + SELECT_FIRST);
        o->out.n[i] = -1;
        if (v.all) continue;
        weigh_blocks(w, o->scores + (size_t)i * group * n_blocks, group, v.n_blocks, n_blocks);
        for (int b = 0; b < v.n_blocks; b++) largest = fmaxf(largest, w[b]);
        const int n_ranked = max_int(near - SELECT_FIRST, 0);
        const bool ranked = o->density > 0;
        const float edge = ranked ? weight_of_rank(w + SELECT_FIRST, n_ranked, max_int(room, 0)) : o->alpha * largest;
        for (int b = SELECT_FIRST; b < near && ranked; b++) room -= w[b] > edge;
        for (int b = 0; b < v.n_blocks; b++) {
            const bool always = b < SELECT_FIRST || b >= near;
            const bool above = ranked ? w[b] > edge || (w[b] == edge && room > 0) : o->alpha >= 1 || w[b] >= edge;
            if (!always && !above) continue;
            room -= ranked && !always && w[b] == edge;
            list[n++] = b;
        }
        o->out.n[i] = n;
    }
}

static void cpu_block_select(const BlockSelect *o) {
    const Cache *c = o->cache;
    const int blocks = (o->batch->n_rows + SELECT_ROWS - 1) / SELECT_ROWS;
    const int n_means = o->batch->n_segs * c->n_kv_heads * o->out.n_blocks;
    parallel(n_means, share(n_means, 1), mean_blocks, o);
    parallel(blocks * o->n_heads, share(blocks * o->n_heads, 1), score_blocks, o);
    parallel(blocks * c->n_kv_heads, share(blocks * c->n_kv_heads, 1), list_blocks, o);
    for (int i = 0; i < blocks * c->n_kv_heads; i++) {
        const RowBlock v = row_block(o->batch, i / c->n_kv_heads);
        if (!v.of_prompt) continue;
        o->count[0] += v.all ? v.n_blocks : o->out.n[i];
        o->count[1] += v.n_blocks;
    }
}

// Of heads first .. end - 1, counted through all rows: what each looks at.
static void share_keys(const void *task, int first, int end) {
    const AttnMass *o = task;
    const Cache *c = o->cache;
    const int hd = c->head_dim, n_k = c->k.dim;
    float k_room[KEYS * MAX_HEAD_DIM], v_room[KEYS * MAX_HEAD_DIM];
    for (int i = first; i < end; i++) {
        const Row *row = &o->batch->rows[i / o->n_heads];
        const int seq = o->batch->segs[row->seg].seq, keys = o->batch->len[seq] + row->index + 1;
        const int g = i % o->n_heads / (o->n_heads / c->n_kv_heads);
        const float *q = o->q + (size_t)i * hd;
        float *share = o->shares + (size_t)i * o->n_keys, rest[KEYS] = { 0 }, largest = -INFINITY, sum = 0;
        for (int j = 0; j < keys; j += KEYS) {
            const int n = min_int(KEYS, keys - j);
            const float *k = kv_floats(c, &c->k, seq, g, j, n, k_room);
            gguf_dot_f32_rows(GGUF_F32, k, n, n_k * sizeof *k, q, 1, hd, n_k, share + j, KEYS);
            if (n_k < hd) {                            // tied: the rest of K is V
                const float *v = kv_floats(c, &c->v, seq, g, j, n, v_room);
                gguf_dot_f32_rows(GGUF_F32, v + n_k, n, hd * sizeof *v, q + n_k, 1, hd, hd - n_k, rest, KEYS);
            }
            for (int m = 0; m < n; m++) largest = fmaxf(largest, share[j + m] = (share[j + m] + rest[m]) * o->scale);
        }
        for (int j = 0; j < keys; j++) sum += share[j] = exp_of(share[j] - largest);
        for (int j = 0; j < keys; j++) share[j] /= sum;
    }
}

static void cpu_attn_mass(const AttnMass *o) {
    parallel(o->batch->n_rows * o->n_heads, 1, share_keys, o);
    for (int i = 0; i < o->batch->n_rows * o->n_heads; i++) {
        const Row *row = &o->batch->rows[i / o->n_heads];
        const int keys = o->batch->len[o->batch->segs[row->seg].seq] + row->index + 1;
        const float *share = o->shares + (size_t)i * o->n_keys;
        float *mass = o->mass + (size_t)(i / o->n_heads) * o->n_keys;
        for (int j = 0; j < keys; j++) mass[j] = fmaxf(mass[j], share[j]);
    }
}

// One cached row of all heads from one place to another.
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
        for (int k = 0; k < o->n_accept[i]; k++) {     // path[k] >= k: no row is overwritten unread
            const int from = seg->kind == SEG_TREE ? o->path[(size_t)i * STEP_ROWS + k] : k;
            for (int l = 0; l < o->n_caches && from != k; l++) {
                const Cache *c = &o->caches[l], tail = tail_of(c);
                kv_move(c, seg->seq, (*len + k) % c->slots, c, seg->seq, (*len + from) % c->slots);
                if (tail.slots) kv_move(&tail, seg->seq, (*len + k) % tail.slots, &tail, seg->seq, (*len + from) % tail.slots);
            }
            const int32_t token = known(o->batch->rows[seg->first + from].token, o->vocab);
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
            kv_move(o->cache, seg->seq, (len + j) % o->cache->slots, o->stage, 0, seg->first + j);
    }
}

// ---- output ----

// Candidates in order are those of descending keys: descending logit, then ascending id. No two keys are equal.
static uint64_t candidate_key(float logit, int32_t id) {
    uint32_t bits;
    logit += 0.0f;                                     // -0 becomes 0: the two are equal
    memcpy(&bits, &logit, sizeof bits);
    bits = bits >> 31 ? ~bits : bits | 0x80000000u;    // ascending like the number
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

// Brings the fewest best candidates that together weigh at least `weight` to the front, the worst of them last. Returns how
// many they are. All n together weigh that much. Quickselect: its time grows with n, whatever the order and the weights.
static int best_prefix(Candidate *c, int n, uint64_t weight) {
    uint32_t random = 1;
    uint64_t before = 0;                               // weight of c[0 .. low - 1], which are better than the rest and stay
    for (int low = 0, high = n; ; ) {
        random = random * 1664525 + 1013904223;
        const int at = low + (int)((uint64_t)random * (uint32_t)(high - low) >> 32);
        const Candidate pivot = c[at];
        c[at] = c[high - 1];
        uint64_t better = 0;
        int i = low;
        for (int j = low; j < high - 1; j++) {         // no branch: it could not be predicted
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

typedef struct {              // the k best of the candidates that came by, in any order, among n that may be among them
    Candidate *c;             // room for all that come by
    int        n, k;
    uint64_t   floor;         // no key up to this one is among them
} Best;

static void best_cut(Best *b) {
    if (b->n <= b->k) return;
    b->n = best_prefix(b->c, b->n, (uint64_t)b->k);    // each weighs 1
    b->floor = b->c[b->n - 1].key;
}

static void best_add(Best *b, uint64_t key) {
    if (key <= b->floor) return;
    b->c[b->n++] = (Candidate){ key, 1 };
    if (b->n >= b->k + max_int(b->k, 64)) best_cut(b);
}

// The k best of a row, k <= vocab, in order, at c[0 .. k - 1]. c has room for the row.
static void best_of_row(Candidate *c, const float *logits, int vocab, int k) {
    Best best = { .c = c, .k = k };
    for (int i = 0; i < vocab; i++) best_add(&best, candidate_key(isnan(logits[i]) ? -INFINITY : logits[i], i));
    best_cut(&best);
    qsort(c, k, sizeof *c, compare_candidates);
}

static double logsumexp(const float *logits, int vocab) {
    float largest = -INFINITY;
    for (int i = 0; i < vocab; i++)
        if (logits[i] > largest) largest = logits[i];
    if (isinf(largest)) largest = 0;                   // all -Inf, or one +Inf: the sum says so
    double sum = 0;
    for (int i = 0; i < vocab; i++) sum += exp((double)logits[i] - largest);
    return largest + log(sum);
}

typedef struct {
    const Head *o;
    Rows   y;
    int    first, n_rows;     // of y
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
        parallel(vocab, share(vocab, 16), head_columns, &job);
        for (int r = 0; r < at_once; r++, logits += vocab) {
            const size_t at = (size_t)(first + r) * o->top_k;
            if (o->top_k) best_of_row(cpu.candidates, logits, vocab, o->top_k);
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
    int  r;                   // row whose candidates it is about
} CentroidJob;

static void centroid_columns(const void *task, int first, int end) {
    const CentroidJob *job = task;
    const HeadCentroid *o = job->o;
    dots(o->centroids, 0, first, end - first, &job->y, 0, o->n_rows, o->scores + first, o->centroids->rows);
}

static void candidate_columns(const void *task, int first, int end) {   // the weight of a candidate is its token
    const CentroidJob *job = task;
    float *logits = job->o->logits + (size_t)job->r * job->o->n_used * (job->o->w->rows / job->o->centroids->rows);
    for (int i = first; i < end; i++) dots(job->o->w, 0, (int)cpu.candidates[i].weight, 1, &job->y, job->r, 1, logits + i, 1);
}

static void cpu_head_centroid(const HeadCentroid *o) {
    const int n_centroids = o->centroids->rows, per = o->w->rows / n_centroids, n = o->n_used * per, cols = o->w->cols;
    CentroidJob job = { o, prepare(&o->in, o->n_rows, cols, is_quantised(o->w->type) || is_quantised(o->centroids->type)), 0 };
    Candidate *c = cpu.candidates;
    if (o->hidden) memcpy(o->hidden, job.y.a.f, (size_t)o->n_rows * cols * sizeof(float));
    parallel(n_centroids, share(n_centroids, 16), centroid_columns, &job);
    for (; job.r < o->n_rows; job.r++) {
        const float *logits = o->logits + (size_t)job.r * n;
        const size_t at = (size_t)job.r * o->top_k;
        best_of_row(c, o->scores + (size_t)job.r * n_centroids, n_centroids, o->n_used);
        for (int k = o->n_used - 1; k >= 0; k--) {     // their tokens in their place, which those before have not taken yet
            const int32_t *ids = o->order + (size_t)candidate_id(c[k]) * per;
            for (int i = per - 1; i >= 0; i--) c[k * per + i].weight = (uint64_t)ids[i];
        }
        parallel(n, share(n, 16), candidate_columns, &job);
        Best best = { .c = c, .k = o->top_k };         // holds fewer than came by
        for (int i = 0; i < n; i++)
            best_add(&best, candidate_key(isnan(logits[i]) ? -INFINITY : logits[i], (int32_t)c[i].weight));
        best_cut(&best);
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

// Steps 2 and 3 of Sample: row r with bias and penalties. Without both the row itself.
static const float *penalised_row(const Sample *o, int r) {
    const Row *row = &o->batch->rows[r];
    const Segment *seg = &o->batch->segs[row->seg];
    const float *logits = o->logits + (size_t)r * o->vocab, *bias = o->bias ? o->bias + (size_t)seg->seq * o->vocab : NULL;
    const int32_t *counts = o->counts ? o->counts + (size_t)seg->seq * o->vocab : NULL;
    const SampleParams *p = &o->params[seg->seq];
    float *z = cpu.logits;
    if (!bias && !counts) return logits;
    for (int i = 0; i < o->vocab; i++) z[i] = bias ? logits[i] + bias[i] : logits[i];
    if (!counts) return z;
    const Row *rows = o->step_rows + seg->first;
    for (int j = 0; j <= row->index; j++)
        if (seg->kind == SEG_CHAIN || row->ancestors >> j & 1) cpu.seen[known(rows[j].token, o->vocab)]++;
    for (int i = 0; i < o->vocab; i++) {
        const int32_t c = counts[i] + cpu.seen[i];
        if (c > 0) z[i] = sample_penalised(z[i], c, p);
    }
    for (int j = 0; j <= row->index; j++) cpu.seen[known(rows[j].token, o->vocab)] = 0;
    return z;
}

// The other steps of Sample. z (vocab), mask may be NULL. Returns the token or -1.
static int32_t sample_row(const float *z, int vocab, const uint32_t *mask, const SampleParams *p, int pos) {
    Best best = { .c = cpu.candidates, .k = p->temperature <= 0 ? 1 : p->top_k > 0 ? min_int(p->top_k, vocab) : vocab };
    float floor = -INFINITY;                           // what best.floor says, to pass most tokens by at once
    for (int first = 0; first < vocab; first += 32) {
        const int n = min_int(32, vocab - first);
        bool above = false;
        for (int j = 0; j < n; j++) above |= !(z[first + j] <= floor);
        for (int i = first; above && i < first + n; i++) {
            if (isnan(z[i])) return -1;
            if (z[i] > floor && (!mask || mask[i / 32] >> (i % 32) & 1)) best_add(&best, candidate_key(z[i], i));
        }
        if (best.floor) floor = candidate_logit((Candidate){ .key = best.floor });
    }
    best_cut(&best);
    Candidate *c = best.c;
    int n = best.n;
    if (!n) return -1;
    if (p->temperature <= 0) return candidate_id(c[0]);

    uint64_t largest = 0, total = 0;
    for (int i = 0; i < n; i++) largest = c[i].key > largest ? c[i].key : largest;
    const float z_largest = candidate_logit((Candidate){ .key = largest }), scale = 1.44269504f / p->temperature;
    for (int i = 0; i < n; i++) total += c[i].weight = sample_weight(candidate_logit(c[i]), z_largest, scale);
    if (p->top_p < 1) {
        const uint64_t part = sample_share(total, p->top_p);
        n = best_prefix(c, n, part ? part : 1);
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

// Whether the walk of segment i, which stands at kept row `at`, goes to kept row k, which comes later.
static bool walk_goes_to(const VerifyWalk *o, int i, int at, int k) {
    const Segment *seg = &o->batch->segs[i];
    const Row *row = &o->kept_rows[k];
    int parent = row->index - 1;
    if (row->seg != i) return false;
    if (at < 0) return true;
    while (seg->kind == SEG_TREE && parent >= 0 && !(row->ancestors >> parent & 1)) parent--;
    return parent == o->kept_rows[at].index && o->chosen[at] >= 0 &&
           o->batch->rows[seg->first + row->index].token == o->chosen[at];
}

static void cpu_verify_walk(const VerifyWalk *o) {
    for (int i = 0; i < o->batch->n_segs; i++) {
        const Segment *seg = &o->batch->segs[i];
        int32_t *path = seg->kind == SEG_TREE ? o->path + (size_t)i * STEP_ROWS : NULL;
        int at = -1, n = 0;
        for (int k = 0; k < o->n_kept; k++) {
            if (!walk_goes_to(o, i, at, k)) continue;
            const int index = o->kept_rows[k].index, from = at < 0 ? 0 : index;        // rows before the first kept one stay
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

// Operations are done when they return, so there are no marks; launches and energy are not known.
const Ops *cpu_ops(void) {
    static const Ops ops = {
        .name = "cpu", .memory = cpu_memory, .weight_bytes = cpu_weight_bytes, .upload = cpu_upload,
        .scratch_bytes = cpu_scratch_bytes, .init = cpu_init, .reserve = cpu_reserve, .release = cpu_release,
        .copy = cpu_copy, .begin = cpu_begin, .end = cpu_end, .wait = cpu_wait, .bandwidth = cpu_bandwidth,
        .embed = cpu_embed, .pair = cpu_pair, .ple_rows = cpu_ple_rows, .matmul = cpu_matmul, .gate_up = cpu_gate_up,
        .route = cpu_route, .expert_gate_up = cpu_expert_gate_up, .expert_down = cpu_expert_down, .ple_inject = cpu_ple_inject,
        .close = cpu_close, .gather_rows = cpu_gather_rows, .qkv_store = cpu_qkv_store,
        .block_select = cpu_block_select, .attn_mass = cpu_attn_mass, .attend = cpu_attend,
        .kv_commit = cpu_kv_commit, .kv_copy = cpu_kv_copy, .head = cpu_head, .logprob = cpu_logprob, .sample = cpu_sample,
        .verify_walk = cpu_verify_walk, .head_centroid = cpu_head_centroid
    };
    return &ops;
}
