/* load.h - reading a model file: configuration, tensors, their checks, upload.
 *
 * Uses base.h, gguf.h, folder.h and the types of gemma4.c [1] and [2]. Begin with load_config() and bind_weights().
 * Every key and every tensor of all layers is checked before the first byte is used; bad input ends the process.
 *   [1] Configuration    [2] Binding    [3] Room, files, upload */
#ifndef LOAD_H
#define LOAD_H

// ==== [1] Configuration =============================================================================================

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
        die("%s: key 'general.architecture': expected 'gemma4', got '%s'; draft models and other architectures "
            "cannot run on their own (E_META_RANGE)", g->path, shown(arch));

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

// ==== [2] Binding ===================================================================================================

typedef struct {                        // one thing that upload() may move: a matrix, or a vector and who points to it
    Tensor tensor;
    Tensor *matrix;
    const float **vector;
    void   *room;                       // where a drafter's goes in backend memory, NULL: it is read where it lies
} Upload;

typedef struct Binder {
    Gguf    *g;
    char    *seen;                      // (g->n_tensors) UNSEEN, KNOWN or BOUND
    Upload  *uploads;                   // room for every tensor of the file and a few that are derived
    float   *derived;                   // (n_layers, dim + 2 * n_experts) vectors that are computed while binding
    size_t   n_derived;                 // floats of it in use
    int      n_uploads;
    size_t   bytes;                     // of what is bound, in the file
} Binder;

enum { UNSEEN, KNOWN, BOUND };          // a tensor that is KNOWN has a name of this architecture, but nothing reads it

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
        die("%s: tensor '%s': an embedding table with a .scale tensor is not supported (E_TYPE_UNSUPPORTED)",
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

// Bind everything; sets c->vocab. Layers that scorer_only never runs are checked, but not loaded.
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
    if (has[0]) bind_rope(b, w, 0, c->rope_base, head_dim[0], host_vector(b, "rope_freqs.weight", head_dim[0] / 2));
    else find_tensor(b, "rope_freqs.weight");
    if (has[1]) bind_rope(b, w, 1, c->rope_base_swa, head_dim[1], NULL);
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
            fprintf(stderr, "# %zu unused %s%s: %s\n", n, kind ? "key" : "tensor", n == 1 ? "" : "s", names);
    }
}

// ==== [3] Room, files, upload =======================================================================================

// Not zeroed; in large pages, which come faster, where the system has some.
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

#endif
