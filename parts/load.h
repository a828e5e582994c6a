/* load.h - reading a model file: configuration, tensors, their checks, upload.
 *
 * Uses base.h, gguf.h, folder.h and the types of gemma4.c [1] and [2]. Begin with load_config() and bind_weights().
 * Every key and every tensor of all layers is checked before the first weight is used; bad input ends the process.
 *   [1] Configuration    [2] Binding    [3] Memory, files, upload */
#ifndef LOAD_H
#define LOAD_H

#include <dirent.h>

// ==== [1] Configuration =============================================================================================

// Returns the value of a key, or `fallback` if the file lacks it. The key is required if fallback < min; in key_float,
// if fallback is 0.
static int64_t key_int(Gguf *g, const char *key, int64_t min, int64_t max, int64_t fallback) {
    int64_t v = fallback;
    const int found = gguf_get_int(g, key, min, max, &v);
    if (found < 0) die_gguf(g);
    if (!found && fallback < min) die("%s: key '%s': missing (E_META_MISSING)", g->path, key);
    return v;
}

static double key_float(Gguf *g, const char *key, double fallback) {
    double v = fallback;
    const int found = gguf_get_float(g, key, &v);
    if (found < 0) die_gguf(g);
    if (!found && fallback == 0) die("%s: key '%s': missing (E_META_MISSING)", g->path, key);
    if (!(v > 0)) die("%s: key '%s': expected a positive number, got %g (E_META_RANGE)", g->path, key, v);
    return v;
}

// Reads n values, one per layer. A file may also have one value for all layers.
static void key_per_layer(Gguf *g, const char *key, int64_t min, int64_t max, int64_t *out, int n) {
    const int found = gguf_get_ints(g, key, min, max, out, n);
    if (found < 0) die_gguf(g);
    if (!found) die("%s: key '%s': missing (E_META_MISSING)", g->path, key);
}

// Reads a value, 1 .. max, that has to be the same in all n layers.
static int key_every_layer(Gguf *g, const char *key, int64_t max, int n) {
    int64_t v[MAX_LAYERS];
    key_per_layer(g, key, 1, max, v, n);
    for (int l = 1; l < n; l++)
        if (v[l] != v[0])
            die("%s: key '%s': expected %d in every layer, got %d in layer %d (E_META_RANGE)", g->path, key, (int)v[0],
                (int)v[l], l);
    return (int)v[0];
}

// "ARCH.KEY", valid until the next call.
static const char *arch_key(const char *arch, const char *key) {
    static char full[128];
    snprintf(full, sizeof full, "%s.%s", arch, key);
    return full;
}

typedef struct { int64_t is_swa[MAX_LAYERS], n_kv_heads[MAX_LAYERS], ffn_dim[MAX_LAYERS]; } LayerKeys;

// Reads the keys that every architecture has per layer. If the pattern of sliding layers is optional and missing,
// is_swa does not change.
static void load_layer_keys(Gguf *g, const char *arch, int n, bool optional_pattern, LayerKeys *k) {
    const char *pattern = arch_key(arch, "attention.sliding_window_pattern");
    if (!optional_pattern || gguf_find_kv(g, pattern)) key_per_layer(g, pattern, 0, INT_MAX, k->is_swa, n);
    key_per_layer(g, arch_key(arch, "attention.head_count_kv"), 1, 1024, k->n_kv_heads, n);
    key_per_layer(g, arch_key(arch, "feed_forward_length"), 1, 1 << 20, k->ffn_dim, n);
}

static void check_kv_heads(const Gguf *g, const char *arch, int l, int n_heads, int n_kv_heads) {
    if (n_heads % n_kv_heads)
        die("%s: key '%s': layer %d: expected a divisor of %d heads, got %d (E_META_RANGE)", g->path,
            arch_key(arch, "attention.head_count_kv"), l, n_heads, n_kv_heads);
}

// Fills c->layer. head_dim: of global layers, of sliding layers.
static void load_layers(Config *c, Gguf *g, const int *head_dim) {
    const int n = c->n_layers;
    const GgufKv *pattern = gguf_find_kv(g, "gemma4.attention.sliding_window_pattern");
    if (pattern && pattern->type != GGUF_V_ARRAY)
        die("%s: key 'gemma4.attention.sliding_window_pattern': expected an array, one value per layer (E_META_TYPE)",
            g->path);
    LayerKeys keys;
    load_layer_keys(g, "gemma4", n, false, &keys);

    int owner[2] = { -1, -1 };                         // the last layer that owns a cache: global, sliding
    for (int l = 0; l < n; l++) {
        LayerConfig *lc = &c->layer[l];
        lc->is_swa = keys.is_swa[l] != 0;
        lc->head_dim = head_dim[lc->is_swa];
        lc->n_kv_heads = (int)keys.n_kv_heads[l];
        lc->ffn_dim = (int)keys.ffn_dim[l];
        if (l < c->first_shared) owner[lc->is_swa] = l;
        lc->kv_layer = owner[lc->is_swa];
        if (lc->kv_layer < 0)
            die("%s: key 'gemma4.attention.shared_kv_layers': layer %d shares K and V, but no layer of its kind before "
                "%d owns any (E_META_RANGE)", g->path, l, c->first_shared);
        c->layer[lc->kv_layer].last_reader = l;
        if (lc->n_kv_heads != c->layer[lc->kv_layer].n_kv_heads)
            die("%s: key 'gemma4.attention.head_count_kv': layer %d reads the cache of layer %d: expected %d, got %d "
                "(E_META_RANGE)", g->path, l, lc->kv_layer, c->layer[lc->kv_layer].n_kv_heads, lc->n_kv_heads);
        check_kv_heads(g, "gemma4", l, c->n_heads, lc->n_kv_heads);
    }
}

// Returns the values of a head, which K, V and RoPE have to agree on. keys: of the three.
static int load_head_dim(Gguf *g, const char *const keys[3]) {
    const int head_dim = (int)key_int(g, keys[0], 32, MAX_HEAD_DIM, 0);
    if (head_dim % 32)
        die("%s: key '%s': expected a multiple of 32, got %d (E_META_RANGE)", g->path, keys[0], head_dim);
    for (int i = 1; i < 3; i++)
        if (key_int(g, keys[i], 1, INT_MAX, head_dim) != head_dim)
            die("%s: key '%s': expected %d as in '%s' (E_META_RANGE)", g->path, keys[i], head_dim, keys[0]);
    return head_dim;
}

static bool is_draft_architecture(GgufStr arch) {
    static const char *const names[] = { "gemma4-assistant", "gemma4_assistant", "gemma4-dflash-draft", "dflash",
                                         "dflash-draft", "eagle3" };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) if (str_is(arch, names[i])) return true;
    return false;
}

// The factor that divides the frequencies of RoPE in global layers, or `fallback` if the file has none. As in
// llama.cpp, a factor without a type is linear, and 0 stands for 1. Dies on other kinds of scaling.
static double load_rope_factor(Gguf *g, const char *arch, double fallback) {
    GgufStr type = { "linear", 6 };
    double factor = fallback;
    const int has_type = gguf_get_str(g, arch_key(arch, "rope.scaling.type"), &type);
    if (has_type < 0) die_gguf(g);
    if (!str_is(type, "none") && !str_is(type, "linear"))
        die("%s: key '%s': expected none or linear, got '%s'; other kinds of RoPE scaling are not supported "
            "(E_META_RANGE)", g->path, arch_key(arch, "rope.scaling.type"), shown(type));
    if (has_type) factor = 1;
    if (gguf_get_float(g, arch_key(arch, "rope.scaling.factor"), &factor) < 0 ||
        (!gguf_find_kv(g, arch_key(arch, "rope.scaling.factor")) &&
         gguf_get_float(g, arch_key(arch, "rope.scale_linear"), &factor) < 0)) die_gguf(g);
    if (factor == 0 || str_is(type, "none")) factor = 1;
    if (!(factor > 0 && factor <= 1e6))
        die("%s: key '%s': expected 0 to 1000000, got %g (E_META_RANGE)", g->path,
            arch_key(arch, "rope.scaling.factor"), factor);
    return factor;
}

// True for a number that is one of two, false being 0; false for text and arrays.
static bool number_is(Gguf *g, const GgufKv *kv, double a, double b) {
    char key[128];
    int64_t i = 0;
    double x;
    snprintf(key, sizeof key, "%.*s", (int)kv->key.n, kv->key.s);
    if (kv->type == GGUF_V_STR || kv->type == GGUF_V_ARRAY || kv->key.n >= sizeof key) return false;
    if (kv->type == GGUF_V_F32 || kv->type == GGUF_V_F64) return gguf_get_float(g, key, &x) > 0 && (x == a || x == b);
    return gguf_get_int(g, key, INT64_MIN, INT64_MAX, &i) > 0 && ((double)i == a || (double)i == b);
}

// Dies if the file asks for something that changes results and that this program does not do.
static void check_neutral_keys(Gguf *g) {
    static const struct { const char *key; double a, b; } numbers[] = {                // the values without effect
        { "attention.causal", 1, 1 }, { "attention.scale", 1, 1 }, { "attention.clamp_kqv", 0, 0 },
        { "attention.max_alibi_bias", 0, 0 }, { "attn_logit_softcapping", 0, 0 }, { "router_logit_softcapping", 0, 0 },
        { "logit_scale", 0, 1 }, { "residual_scale", 0, 1 }, { "use_parallel_residual", 0, 0 },
        { "expert_shared_count", 0, 0 }, { "expert_gating_func", 0, 1 }, { "expert_weights_norm", 1, 1 },
        { "expert_weights_scale", 0, 1 }, { "rope.scaling.attn_factor", 0, 1 },
    };
    static const char *const activations[] = { "hidden_activation", "hidden_act", "activation_function" };
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        const GgufKv *kv = gguf_find_kv(g, arch_key("gemma4", numbers[i].key));
        if (kv && !number_is(g, kv, numbers[i].a, numbers[i].b))
            die("%s: key 'gemma4.%s': expected %g or none; other values are not supported (E_META_RANGE)", g->path,
                numbers[i].key, numbers[i].b);
    }
    for (size_t i = 0; i < sizeof activations / sizeof *activations; i++) {
        GgufStr text = { "gelu_pytorch_tanh", 17 };
        if (gguf_get_str(g, arch_key("gemma4", activations[i]), &text) < 0) die_gguf(g);
        if (!is_gelu(text))
            die("%s: key 'gemma4.%s': expected gelu_pytorch_tanh, got '%s' (E_META_RANGE)", g->path, activations[i],
                shown(text));
    }
}

static void load_config(Config *c, Gguf *g) {
    GgufStr arch = { "", 0 };
    if (gguf_get_str(g, "general.architecture", &arch) < 0) die_gguf(g);
    if (is_draft_architecture(arch))
        die("%s: this is a draft model; type gemma4 MODEL.gguf -md %s; key 'general.architecture': %s (E_META_RANGE)",
            g->path, g->path, shown(arch));
    if (!arch.n)
        die("%s: the file does not say which model it is; key 'general.architecture': missing (E_META_RANGE)", g->path);
    if (!str_is(arch, "gemma4"))
        die("%s: this is a %s model; gemma4 runs Gemma 4 models only; key 'general.architecture' (E_META_RANGE)",
            g->path, shown(arch));

    memset(c, 0, sizeof *c);
    c->n_layers    = (int)key_int(g, "gemma4.block_count", 1, MAX_LAYERS, 0);
    c->dim         = (int)key_int(g, "gemma4.embedding_length", 1, 1 << 20, 0);
    c->n_ctx_train = (int)key_int(g, "gemma4.context_length", 1, MAX_CONTEXT, 0);
    c->n_swa       = (int)key_int(g, "gemma4.attention.sliding_window", 1, MAX_CONTEXT, 0);
    c->ple_dim     = (int)key_int(g, "gemma4.embedding_length_per_layer_input", 0, 1 << 16, 0);
    c->n_experts   = (int)key_int(g, "gemma4.expert_count", 0, MAX_EXPERTS, 0);
    c->eps         = (float)key_float(g, "gemma4.attention.layer_norm_rms_epsilon", 0);
    const GgufKv *cap = gguf_find_kv(g, "gemma4.final_logit_softcapping");
    c->logit_cap   = cap && number_is(g, cap, 0, 0) ? 0 : (float)key_float(g, "gemma4.final_logit_softcapping", 30);
    c->rope_base     = key_float(g, "gemma4.rope.freq_base", 1e4);
    c->rope_base_swa = key_float(g, "gemma4.rope.freq_base_swa", 1e4);
    if (!(c->rope_base > 1) || !(c->rope_base_swa > 1))
        die("%s: key 'gemma4.rope.freq_base': expected more than 1, got %g and %g for sliding layers (E_META_RANGE)",
            g->path, c->rope_base, c->rope_base_swa);

    c->rope_factor = load_rope_factor(g, "gemma4", 1);
    check_neutral_keys(g);

    const int n = c->n_layers;
    c->n_heads = key_every_layer(g, "gemma4.attention.head_count", 1024, n);
    if (c->n_experts) {
        c->n_experts_used = (int)key_int(g, "gemma4.expert_used_count", 1, c->n_experts, 0);
        c->expert_dim = key_every_layer(g, "gemma4.expert_feed_forward_length", 1 << 20, n);
    }
    const int n_shared = (int)key_int(g, "gemma4.attention.shared_kv_layers", 0, n - 1, 0);
    c->first_shared = n - n_shared;

    static const char *const head_keys[2][3] = {       // of global layers, of sliding layers
        { "gemma4.attention.key_length", "gemma4.attention.value_length", "gemma4.rope.dimension_count" },
        { "gemma4.attention.key_length_swa", "gemma4.attention.value_length_swa", "gemma4.rope.dimension_count_swa" } };
    int head_dim[2];
    for (int t = 0; t < 2; t++) head_dim[t] = load_head_dim(g, head_keys[t]);
    load_layers(c, g, head_dim);
}

// ==== [2] Binding ===================================================================================================

typedef enum { PLACE_FREE, PLACE_HOST, PLACE_DEVICE } Place;   // where -ot wants a matrix; FREE: the plan decides

typedef struct {                        // something that upload() copies to the backend
    Tensor tensor;
    Tensor *matrix;                     // where its address is noted: a matrix,
    const float **vector;               // or a vector; the other is NULL
    GgufStr name;                       // of a matrix
    int    layer;                       // -1: of no layer
    Place  place;
    void   *dst;                        // backend memory for a drafter's tensor; NULL: it is read in the mapped file
} Upload;

typedef struct Binder {
    Gguf    *g;
    char    *status;                    // (g->n_tensors) UNKNOWN, KNOWN or BOUND
    Upload  *uploads;                   // allocated for every tensor of the file and a few derived ones
    float   *derived;                   // (n_layers, dim + 2 * n_experts) vectors that are computed while binding
    size_t   n_derived;                 // floats of it in use
    int      n_uploads;
    size_t   bytes;                     // of the bound tensors, in the file
    int      n_in_host, most_in_host;   // matrices for which the device has no room; the most that may leave it
} Binder;

enum { UNKNOWN, KNOWN, BOUND };         // KNOWN: the architecture has a tensor of this name, but nothing reads it

static const GgufTensor *find_tensor(Binder *b, const char *name) {
    const GgufTensor *t = gguf_find_tensor(b->g, name);
    if (t && b->status[t - b->g->tensors] == UNKNOWN) b->status[t - b->g->tensors] = KNOWN;
    return t;
}

// Binds tensor `name` as n matrices (rows, cols), or dies. GGUF stores ne[0] = cols, ne[1] = rows, ne[2] = n.
static Tensor bind_tensor(Binder *b, const char *name, int rows, int cols, int n) {
    const GgufTensor *t = find_tensor(b, name);
    if (!t)
        die("%s: tensor %s: missing, expected shape (%d, %d, %d) (E_TENSOR_MISSING)", b->g->path, own_name(b->g, name),
            cols, rows, n);
    if (t->ne[0] != (uint64_t)cols || t->ne[1] != (uint64_t)rows || t->ne[2] != (uint64_t)n || t->ne[3] != 1)
        die("%s: tensor %s: expected shape (%d, %d, %d), got (%" PRIu64 ", %" PRIu64 ", %" PRIu64 ") (E_SHAPE)",
            b->g->path, own_name(b->g, name), cols, rows, n, t->ne[0], t->ne[1], t->ne[2]);
    if (!gguf_type_supported(t->type))
        die("%s: tensor %s: type %s is not supported by this build (E_TYPE_UNSUPPORTED)", b->g->path,
            own_name(b->g, name), gguf_type_name(t->type));
    b->bytes += t->size;
    b->status[t - b->g->tensors] = BOUND;
    return (Tensor){ .data = t->data, .type = (DType)t->type, .rows = rows, .cols = cols, .n = n };
}

static void add_matrix(Binder *b, Tensor *dst, const char *name) {
    b->uploads[b->n_uploads++] = (Upload){ .tensor = *dst, .matrix = dst, .name = find_tensor(b, name)->name,
                                           .layer = strncmp(name, "blk.", 4) ? -1 : atoi(name + 4) };
}

static void bind_matrix(Binder *b, Tensor *dst, const char *name, int rows, int cols, int n) {
    *dst = bind_tensor(b, name, rows, cols, n);
    add_matrix(b, dst, name);
}

static void add_vector(Binder *b, const float **dst, const float *values, int n) {
    *dst = values;
    const Tensor t = { .data = values, .type = T_F32, .rows = 1, .cols = n, .n = 1 };
    b->uploads[b->n_uploads++] = (Upload){ .tensor = t, .vector = dst, .layer = -1 };
}

// Returns the n values of a vector, in the mapped file. A norm consists of zeros only where a download did not write
// into the room that was set aside for it.
static const float *host_vector(Binder *b, const char *name, int n) {
    const Tensor t = bind_tensor(b, name, 1, n, 1);
    if (t.type != T_F32)
        die("%s: tensor '%s': expected type F32, got %s (E_TYPE_UNSUPPORTED)", b->g->path, name,
            gguf_type_name(t.type));
    const float *v = t.data;
    int i = 0;
    if (!strstr(name, "norm")) return v;
    while (i < n && v[i] == 0) i++;
    if (i == n)
        die("%s: tensor %s: expected the weights of a norm, got zeros; is the download complete? (E_PAYLOAD)",
            b->g->path, own_name(b->g, name));
    return v;
}

static void bind_vector(Binder *b, const float **dst, const char *name, int n) {
    add_vector(b, dst, host_vector(b, name, n), n);
}

// Binds the factors of an NVFP4 matrix, tensor STEM.scale for STEM.weight: one for all n matrices, or one each.
// Requires: dst is in b->uploads. Not for ffn_gate_inp and ffn_down_exps: their .scale has another meaning.
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

// Binds a table from which rows are gathered. Gathering applies no factor, and no known file needs one.
static void bind_table(Binder *b, Tensor *dst, const char *name, int rows, int cols) {
    bind_scaled(b, dst, name, rows, cols, 1);
    if (dst->scale)
        die("%s: tensor '%s': an embedding table with a .scale tensor is not supported (E_TYPE_UNSUPPORTED)",
            b->g->path, name);
}

// Radians per position of every pair that RoPE rotates: base^(-2i/head_dim) / factor[i] / scale. Published files have
// factors for global layers: 1 for the first quarter of the pairs, 1e30 for the others, which are therefore not
// rotated.
static void bind_rope(Binder *b, Weights *w, int t, double base, int head_dim, const float *factor, double scale) {
    for (int i = 0; i < head_dim / 2; i++) {
        const double divisor = factor ? factor[i] : 1;
        if (!(divisor > 0))
            die("%s: tensor 'rope_freqs.weight': expected positive factors, got %g (E_PAYLOAD)", b->g->path, divisor);
        w->inv_freq[t][i] = pow(base, -2.0 * i / head_dim) / divisor / scale;
        if (divisor < 1e20 || i == 0) w->n_pairs[t] = i + 1;         // at least 1: a Cache with n_rot 0 is untied
    }
}

#define NAME(stem) (snprintf(name, sizeof name, "blk.%d." stem, l), name)         // char name[80], layer l

// Binds the experts of a layer, and their router.
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

// Binds attn_qkv, the rows of q, k and v in one tensor. A layer that shares K and V uses q alone.
static void bind_fused_qkv(Binder *b, const Config *c, LayerWeights *w, int l, const char *name) {
    const LayerConfig *lc = &c->layer[l];
    const bool own = lc->kv_layer == l;
    const int q_dim = c->n_heads * lc->head_dim, kv_dim = lc->n_kv_heads * lc->head_dim, dim = c->dim;
    const uint64_t n_kv = (find_tensor(b, name)->ne[1] - (uint64_t)q_dim) / (uint64_t)kv_dim;
    const bool complete = n_kv == 2 || (n_kv == 1 && !(own && lc->is_swa)) || (n_kv == 0 && !own);
    const Tensor qkv = bind_tensor(b, name, q_dim + (complete ? (int)n_kv : 2) * kv_dim, dim, 1);
    Tensor *parts[3] = { &w->attn_q, &w->attn_k, &w->attn_v };
    const uint8_t *at = qkv.data;
    for (int i = 0; i <= (own ? (int)n_kv : 0); i++) {
        *parts[i] = (Tensor){ .data = at, .type = qkv.type, .rows = i ? kv_dim : q_dim, .cols = dim, .n = 1 };
        add_matrix(b, parts[i], name);
        bind_scale(b, parts[i], name, 1);
        at += matrix_bytes(parts[i]);
    }
}

static void bind_qkv(Binder *b, const Config *c, LayerWeights *w, int l) {
    const LayerConfig *lc = &c->layer[l];
    const bool own = lc->kv_layer == l;
    const int q_dim = c->n_heads * lc->head_dim, kv_dim = lc->n_kv_heads * lc->head_dim, dim = c->dim;
    char name[80];
    if (find_tensor(b, NAME("attn_qkv.weight"))) {
        bind_fused_qkv(b, c, w, l, name);
        return;
    }
    bind_scaled(b, &w->attn_q, NAME("attn_q.weight"), q_dim, dim, 1);
    if (!own) {                                        // published files have these tensors; nothing reads them
        find_tensor(b, NAME("attn_k.weight"));
        find_tensor(b, NAME("attn_v.weight"));
        return;
    }
    bind_scaled(b, &w->attn_k, NAME("attn_k.weight"), kv_dim, dim, 1);
    if (find_tensor(b, NAME("attn_v.weight")))
        bind_scaled(b, &w->attn_v, name, kv_dim, dim, 1);
    else if (lc->is_swa)
        die("%s: tensor '%s': missing; only global layers take V from the K projection (E_TENSOR_MISSING)", b->g->path,
            name);
}

// Binds what a layer of every architecture has, except attn_norm, q, k and v. The norms of the blocks' outputs may be
// optional.
static void bind_blocks(Binder *b, const Config *c, LayerWeights *w, int l, bool optional_post_norms) {
    const LayerConfig *lc = &c->layer[l];
    const int q_dim = c->n_heads * lc->head_dim, dim = c->dim;
    char name[80];
    bind_vector(b, &w->attn_q_norm, NAME("attn_q_norm.weight"), lc->head_dim);
    if (lc->kv_layer == l) bind_vector(b, &w->attn_k_norm, NAME("attn_k_norm.weight"), lc->head_dim);
    else find_tensor(b, NAME("attn_k_norm.weight"));
    bind_scaled(b, &w->attn_output, NAME("attn_output.weight"), dim, q_dim, 1);
    if (find_tensor(b, NAME("post_attention_norm.weight")) || !optional_post_norms)
        bind_vector(b, &w->post_attention_norm, name, dim);
    bind_vector(b, &w->ffn_norm, NAME("ffn_norm.weight"), dim);
    bind_scaled(b, &w->ffn_gate, NAME("ffn_gate.weight"), lc->ffn_dim, dim, 1);
    bind_scaled(b, &w->ffn_up, NAME("ffn_up.weight"), lc->ffn_dim, dim, 1);
    bind_scaled(b, &w->ffn_down, NAME("ffn_down.weight"), dim, lc->ffn_dim, 1);
    if (find_tensor(b, NAME("post_ffw_norm.weight")) || !optional_post_norms)
        bind_vector(b, &w->post_ffw_norm, name, dim);
    w->layer_output_scale = find_tensor(b, NAME("layer_output_scale.weight")) ? *host_vector(b, name, 1) : 1;
}

static void bind_layer(Binder *b, const Config *c, LayerWeights *w, int l) {
    char name[80];
    bind_vector(b, &w->attn_norm, NAME("attn_norm.weight"), c->dim);
    bind_qkv(b, c, w, l);
    bind_blocks(b, c, w, l, false);
    if (c->n_experts) bind_experts(b, c, w, l);
    if (c->ple_dim) {
        bind_scaled(b, &w->inp_gate, NAME("inp_gate.weight"), c->ple_dim, c->dim, 1);
        bind_scaled(b, &w->proj, NAME("proj.weight"), c->dim, c->ple_dim, 1);
        bind_vector(b, &w->post_norm, NAME("post_norm.weight"), c->dim);
    }
}

// The number of layers that token scoring runs: the first third, rounded up to a global layer. If layers share caches:
// up to the last global layer that owns a cache.
static int layers_scored(const Config *c) {
    int n = c->first_shared;
    while (n > 1 && c->layer[n - 1].is_swa) n--;
    if (c->first_shared < c->n_layers) return n;
    for (int l = (c->n_layers - 1) / 3; l < n; l++) if (!c->layer[l].is_swa) n = l + 1;
    return n;
}

// Dies if a layer has a bias: no Gemma 4 layer has one, so the file needs another program. Zeros change nothing.
static void check_no_biases(const Binder *b) {
    for (size_t i = 0; i < b->g->n_tensors; i++) {
        const GgufTensor *t = &b->g->tensors[i];
        size_t at = 0;
        if (b->status[i] != UNKNOWN || t->name.n < 5 || memcmp(t->name.s, "blk.", 4) ||
            memcmp(t->name.s + t->name.n - 5, ".bias", 5)) continue;
        while (at < t->size && !t->data[at]) at++;
        if (at < t->size)
            die("%s: tensor '%s': biases are not supported: Gemma 4 has none (E_TENSOR_UNKNOWN)", b->g->path,
                shown(t->name));
    }
}

// Binds all tensors, and sets c->vocab. scorer_only: layers that token scoring does not run are checked but not loaded.
static void bind_weights(Binder *b, Config *c, Weights *w, bool scorer_only) {
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
    if (has[0]) bind_rope(b, w, 0, c->rope_base, head_dim[0], host_vector(b, "rope_freqs.weight", head_dim[0] / 2),
                          c->rope_factor);
    else find_tensor(b, "rope_freqs.weight");
    if (has[1]) bind_rope(b, w, 1, c->rope_base_swa, head_dim[1], NULL, 1);
    if (c->ple_dim) {
        const int all = c->n_layers * c->ple_dim;
        bind_table(b, &w->per_layer_token_embd, "per_layer_token_embd.weight", c->vocab, all);
        bind_scaled(b, &w->per_layer_model_proj, "per_layer_model_proj.weight", all, c->dim, 1);
        bind_vector(b, &w->per_layer_proj_norm, "per_layer_proj_norm.weight", c->ple_dim);
    }
    const int n_loaded = scorer_only ? layers_scored(c) : c->n_layers;
    for (int l = 0; l < n_loaded; l++) bind_layer(b, c, &w->layer[l], l);
    const int n_uploads = b->n_uploads;
    const size_t bytes = b->bytes;
    for (int l = n_loaded; l < c->n_layers; l++) {
        bind_layer(b, c, &w->layer[l], l);
        b->n_uploads = n_uploads;
        b->bytes = bytes;
    }
    check_no_biases(b);
}

static bool has_prefix(GgufStr s, const char *const *prefixes) {                      // NULL ends the list
    for (; *prefixes; prefixes++)
        if (s.n >= strlen(*prefixes) && !memcmp(s.s, *prefixes, strlen(*prefixes))) return true;
    return false;
}

// True if this program follows a key of the file, or if its value changes nothing: it is known, or 0, false or empty.
static bool is_followed(Gguf *g, const GgufKv *kv) {
    static const char *const watched[] = { "gemma4.", "general.sampling.", "tokenizer.", NULL };
    static const char *const ordinary[] = { "gemma4-assistant.", "gemma4_assistant.", "gemma4-dflash-draft.", "dflash.",
                                            "dflash-draft.", "general.", "split.", "quantize.", NULL };
    static const char *const known[] = {               // beginnings of names
        "gemma4.vocab_size", "gemma4.vision.", "gemma4.audio.", "gemma4.rope.scaling.", "gemma4.mm.",
        "general.sampling.temp", "general.sampling.top_k", "general.sampling.top_p", "general.sampling.min_p",
        "general.sampling.penalty_repeat", "general.sampling.xtc_threshold", "general.sampling.mirostat_",
        "tokenizer.ggml.model", "tokenizer.ggml.tokens", "tokenizer.ggml.scores", "tokenizer.ggml.token_type",
        "tokenizer.ggml.merges", "tokenizer.ggml.eos_token_id", "tokenizer.ggml.suppress_tokens",
        "tokenizer.chat_template", "tokenizer.huggingface.", NULL };
    static const struct { const char *key, *text; double number; } neutral[] = {
        { "tokenizer.ggml.add_bos_token", NULL, 1 }, { "tokenizer.ggml.pre", "gemma4", 0 },
        { "tokenizer.ggml.pre", "default", 0 }, { "general.sampling.penalty_last_n", NULL, -1 },
        { "gemma4.rope.partial_rotary_factor", NULL, 0.25 } };
    if (!has_prefix(kv->key, watched)) return has_prefix(kv->key, ordinary);
    const size_t n = kv->key.n, n_end = strlen("_token_id");
    static const char *const later[] = { "tokenizer.", "general.", NULL };             // others may read these later
    const bool is_later = has_prefix(kv->key, later);
    if (is_later && n > n_end && !memcmp(kv->key.s + n - n_end, "_token_id", n_end)) return true;
    for (size_t i = 0; i < sizeof neutral / sizeof *neutral; i++) {
        if (!str_is(kv->key, neutral[i].key)) continue;
        if (neutral[i].text ? kv->type == GGUF_V_STR && str_is((GgufStr){ (const char *)kv->data, (size_t)kv->count },
                                                               neutral[i].text)
                            : number_is(g, kv, neutral[i].number, neutral[i].number)) return true;
    }
    if (has_prefix(kv->key, known) || (!is_later && kv->read)) return true;
    return kv->type == GGUF_V_STR || kv->type == GGUF_V_ARRAY ? !kv->count : number_is(g, kv, 0, 0);
}

// Prints to stderr how many tensors and keys of the file this program does not follow, and the first three names.
// Tensors of vision and audio, K and V of layers that share a cache, and scales of inputs do not count.
static void print_unknown(const Binder *b) {
    static const char *const tensors[] = { "v.", "a.", "mm.", NULL };
    static const char input_scale[] = ".input_scale";
    for (int kind = 0; kind < 2; kind++) {
        const size_t n_all = kind ? b->g->n_kvs : b->g->n_tensors, n_end = strlen(input_scale);
        size_t n = 0;
        char names[3 * 66 + 8] = "";
        for (size_t i = 0; i < n_all; i++) {
            const GgufStr s = kind ? b->g->kvs[i].key : b->g->tensors[i].name;
            if (!kind && (b->status[i] != UNKNOWN ||
                          (s.n >= n_end && !memcmp(s.s + s.n - n_end, input_scale, n_end)))) continue;
            if (kind ? is_followed(b->g, &b->g->kvs[i]) : has_prefix(s, tensors)) continue;
            const size_t at = strlen(names);
            if (n < 3) snprintf(names + at, sizeof names - at, "%s%.*s", n ? ", " : "", s.n < 64 ? (int)s.n : 64, s.s);
            if (n == 3) strcat(names, ", ...");
            n++;
        }
        if (n)
            fprintf(stderr, "# %zu unused %s%s: %s\n", n, kind ? "key" : "tensor", n == 1 ? "" : "s", names);
    }
}

// ==== [3] Memory, files, upload =====================================================================================

// Host memory, not zeroed; in huge pages if the system has some, since fewer page faults take less time.
static void *alloc_large(size_t bytes) {
    enum { LARGE_PAGE = 2 << 20 };
    bytes = round_up(bytes + !bytes, LARGE_PAGE);
    void *p = aligned_alloc(LARGE_PAGE, bytes);
    if (!p) die("out of memory: cannot allocate %zu bytes", bytes);
#ifdef MADV_HUGEPAGE
    madvise(p, bytes, MADV_HUGEPAGE);
#endif
    return p;
}

typedef struct { char *base; size_t used; } Arena;     // base NULL: only counts

static void *take(Arena *a, size_t n, size_t size) {                          // n elements of `size` bytes
    void *p = a->base ? a->base + a->used : NULL;
    a->used += round_up(n * size, 256);
    return p;
}

// The forms of an activation that its readers need: f32 for matrices of floats, int8 for quantised matrices.
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

// The model's name for messages: general.name, or the name of the file. Valid until the next call.
static const char *model_name(const Model *m) {
    const GgufKv *kv = gguf_find_kv(&m->gguf, "general.name");
    const char *file = base_name(m->gguf.path);
    return shown(kv && kv->type == GGUF_V_STR && kv->count ? (GgufStr){ (const char *)kv->data, (size_t)kv->count }
                                                           : (GgufStr){ file, strlen(file) });
}

// Dies if a GGUF file is something else than a model.
static void check_is_model(Gguf *g) {
    static const char *const keys[] = { "general.type", "general.architecture" };
    static const char *const kinds[][3] = {
        { "adapter", "a LoRA adapter", "to merge it into its model" },
        { "mmproj", "a projector of images and audio", "the language model itself, with --mmproj and this file" },
        { "clip", "a projector of images and audio", "the language model itself, with --mmproj and this file" },
        { "imatrix", "an importance matrix", "the model that was quantised with it" },
        { "controlvector", "a control vector", "the model itself" } };
    for (int k = 0; k < 2; k++) {
        GgufStr text = { "", 0 };
        if (gguf_get_str(g, keys[k], &text) < 0) die_gguf(g);
        for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
            if (str_is(text, kinds[i][0]))
                die("%s: key '%s': expected a model, got %s ('%s'); try %s (E_META_RANGE)", g->path, keys[k],
                    kinds[i][1], kinds[i][0], kinds[i][2]);
    }
}

// What a file is that is no GGUF file, by its first bytes, as the end of a message; "": not known.
static const char *other_kind(const char *path) {
    static const struct { size_t at; const char *bytes, *what; } kinds[] = {
        { 0, "version https://git-lfs", "; it is a Git LFS pointer: try git lfs pull" },
        { 0, "PK\3\4", "; it is a zip archive, as PyTorch writes: try the folder with safetensors, or a GGUF file" },
        { 0, "<!", "; it is a web page: try to download the file itself" },
        { 0, "<html", "; it is a web page: try to download the file itself" },
        { 8, "blk.", "; it is an importance matrix: try the model that was quantised with it" },
        { 8, "output.", "; it is an importance matrix: try the model that was quantised with it" } };
    char head[64] = "";
    FILE *f = fopen(path, "rb");
    const size_t n = f ? fread(head, 1, sizeof head, f) : 0;
    if (f) fclose(f);
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        const size_t k = strlen(kinds[i].bytes);
        if (kinds[i].at + k <= n && !memcmp(head + kinds[i].at, kinds[i].bytes, k)) return kinds[i].what;
    }
    return "";
}

// True if a folder's file may be what the user means: a GGUF file, the first one of a set, and no image encoder.
static bool is_gguf_name(const char *name) {
    const size_t n = strlen(name);
    const char *of = n > 20 ? strstr(name + n - 20, "-of-") : NULL;   // -00002-of-00003.gguf
    return n > 5 && !strcmp(name + n - 5, ".gguf") && strncmp(name, "mmproj", 6) &&
           (!of || of - name < 6 || !strncmp(of - 6, "-00001", 6));
}

// Writes the path of the only GGUF file of a folder that has no config.json. False: it has none, or is no such folder.
// Dies if there are several, and names the first one by the alphabet.
static bool find_gguf(const char *folder, char *path, size_t room) {
    char config[4096], first[256] = "";
    int found = 0;
    if ((size_t)snprintf(config, sizeof config, "%s/config.json", folder) >= sizeof config) return false;
    DIR *dir = access(config, F_OK) ? opendir(folder) : NULL;
    for (struct dirent *e; dir && (e = readdir(dir)); ) {
        if (!is_gguf_name(e->d_name)) continue;
        if (!found++ || strcmp(e->d_name, first) < 0) snprintf(first, sizeof first, "%s", e->d_name);
    }
    if (dir) closedir(dir);
    if (found > 1) die("%s: expected a folder with one GGUF file, got %d; try %s/%s", folder, found, folder, first);
    if ((size_t)snprintf(path, room, "%s/%s", folder, first) >= room) die("%s: expected a shorter path", folder);
    return found;
}

// Opens a GGUF file, a folder with one, or a Hugging Face folder. with_tower: as in open_folder().
static void open_model_file(Gguf *g, const char *path, bool with_tower) {
    struct stat st;
    char inside[4096];
    signal(SIGBUS, on_lost_pages);
    const size_t n = strlen(path);
    const bool folder = (!stat(path, &st) && S_ISDIR(st.st_mode)) ||
                        (n > 12 && !strcmp(path + n - 12, ".safetensors")) ||
                        (n > 11 && !strcmp(path + n - 11, ".index.json"));
    if (folder && find_gguf(path, inside, sizeof inside)) {
        if (gguf_open(g, inside) < 0) die("%s: %s", inside, g->err);
        g->path = path;
    } else if (folder) open_folder(g, path, with_tower);
    else if (gguf_open(g, path) < 0) die("%s: %s%s", path, g->err, strstr(g->err, "(E_MAGIC") ? other_kind(path) : "");
    check_is_model(g);
}

// True if the GPU uses the host's memory.
static bool shares_memory(const Ops *op) {
    const Card *card = op->card ? op->card() : NULL;
    return card && card->host_memory;
}

// If GPU and host share memory, the file's pages of the tensor are dropped: else it would be in memory twice.
static void upload(const Ops *op, const Gguf *g, Upload *u, void *dst) {
    const Tensor in_file = u->tensor;
    op->upload(&u->tensor, dst);
    if (shares_memory(op)) gguf_drop_pages(g, in_file.data, matrix_bytes(&in_file));
    if (u->matrix) *u->matrix = u->tensor;
    if (u->vector) *u->vector = u->tensor.data;
}

#endif
