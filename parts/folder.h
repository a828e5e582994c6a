/* folder.h - reads a Hugging Face folder as if it were a GGUF file: open_folder().
 *
 * Uses base.h and gguf.h. Begin with open_folder().
 *   [1] Strings of a file    [2] Hugging Face folders */
#ifndef FOLDER_H
#define FOLDER_H

// ==== [1] Strings of a file =========================================================================================

// A string of a file in a form that is safe to print: its first bytes, '?' for all that is not printable ASCII. Valid
// until the next call.
static const char *shown(GgufStr s) {
    static char text[64];
    size_t n = 0;
    for (; n < s.n && n < sizeof text - 1; n++) text[n] = s.s[n] >= 0x20 && s.s[n] < 0x7f ? s.s[n] : '?';
    text[n] = 0;
    return text;
}

static bool str_is(GgufStr s, const char *text) { return s.n == strlen(text) && !memcmp(s.s, text, s.n); }

// The tanh form of GELU, by the names that it has.
static bool is_gelu(GgufStr s) { return str_is(s, "gelu_pytorch_tanh") || str_is(s, "gelu_new") || str_is(s, "gelu_tanh"); }

static void die_gguf(const Gguf *g) { die("%s: %s", g->path, g->err); }

// ==== [2] Hugging Face folders =======================================================================================
// A folder with config.json, *.safetensors and tokenizer.json is converted, in memory, to the GGUF file that
// llama.cpp's converter would write: the same keys, names and shapes. So all code after open_model_file() sees a GGUF
// file. Matrices stay in the mapped files, in their types; vectors and routers are converted to F32. Supported are text
// models, MTP assistants and DFlash drafters; tensors of other modalities are counted and left out. No value is changed
// or permuted.

typedef struct {
    const char *path;           // of config.json
    GgufJson root, text;        // the whole object; its text_config, or the whole object if it has none
    bool assistant, dflash;     // kinds of drafters
    const char *arch;           // general.architecture
} HfConfig;

// Finds a member of text_config, or else of the whole object. A member that is null counts as missing.
static bool hf_get(const HfConfig *c, const char *key, GgufJson *v) {
    return (gguf_json_get(&c->text, key, v) || gguf_json_get(&c->root, key, v)) && v->type != GGUF_J_NULL;
}

// Returns a number, or `fallback` if it is missing. It is required if fallback < min; in json_float, if fallback is 0.
static int64_t hf_int(const HfConfig *c, const char *key, int64_t min, int64_t max, int64_t fallback) {
    GgufJson v = { 0 };
    int64_t n = fallback;
    if (!hf_get(c, key, &v)) {
        if (fallback < min) die("%s: '%s': missing", c->path, key);
    } else if (!gguf_json_int(&v, min, max, &n)) {
        die("%s: '%s': expected %" PRId64 "..%" PRId64 ", got %s", c->path, key, min, max,
            shown((GgufStr){ v.s, v.n }));
    }
    return n;
}

static double json_float(const char *path, const GgufJson *object, const char *key, double fallback) {
    GgufJson v = { 0 };
    double x = fallback;
    if (!gguf_json_get(object, key, &v) || v.type == GGUF_J_NULL) {
        if (fallback == 0) die("%s: '%s': missing", path, key);
    } else if (!gguf_json_float(&v, &x)) {
        die("%s: '%s': expected a number, got %s", path, key, shown((GgufStr){ v.s, v.n }));
    }
    return x;
}

static bool hf_bool(const HfConfig *c, const char *key) {
    GgufJson v = { 0 };
    return hf_get(c, key, &v) && v.type == GGUF_J_TRUE;
}

// Returns the bytes of FOLDER/NAME; the caller frees them. NULL: there is no such file.
static char *read_in_folder(const char *folder, const char *name, size_t *n) {
    const off_t max_bytes = 1 << 28;                   // a published tokenizer.json has 32 MB
    char path[4096];
    struct stat st;
    if ((size_t)snprintf(path, sizeof path, "%s/%s", folder, name) >= sizeof path)
        die("%s: expected a shorter path", folder);
    if (stat(path, &st)) return NULL;
    if (!S_ISREG(st.st_mode)) die("%s: expected a regular file", path);
    if (st.st_size > max_bytes)
        die("%s: expected at most %lld bytes, got %lld", path, (long long)max_bytes, (long long)st.st_size);
    return read_text(path, n, folder);
}

// Parses FOLDER/NAME as a JSON object. Returns its text, to which *value points; the caller frees it. NULL: no such
// file.
static char *read_json(const char *folder, const char *name, GgufJson *value) {
    size_t n, at;
    const char *err;
    char *text = read_in_folder(folder, name, &n);
    if (!text) return NULL;
    if (gguf_json_parse(text, n, value, &at, &err) < 0)
        die("%s/%s: not JSON at byte %zu: expected %s", folder, name, at, err);
    if (value->type != GGUF_J_OBJECT) die("%s/%s: expected a JSON object", folder, name);
    return text;
}

// ---- tensors ----

// Names in Hugging Face and GGUF files: of tensors outside the layers, and of tensors of a layer, without its number.
static const struct { const char *hf, *gguf; } hf_names[] = {
    { "embed_tokens.weight", "token_embd.weight" }, { "norm.weight", "output_norm.weight" },
    { "lm_head.weight", "output.weight" }, { "embed_tokens_per_layer.weight", "per_layer_token_embd.weight" },
    { "per_layer_model_projection.weight", "per_layer_model_proj.weight" },
    { "per_layer_projection_norm.weight", "per_layer_proj_norm.weight" },
    { "pre_projection.weight", "nextn.pre_projection.weight" },
    { "post_projection.weight", "nextn.post_projection.weight" },
    { "masked_embedding.centroids.weight", "masked_embd_centroids.weight" },
    { "masked_embedding.token_ordering", "masked_embd_ordering" },
    { "fc.weight", "fc.weight" }, { "hidden_norm.weight", "enc.output_norm.weight" },
}, hf_layer_names[] = {
    { "input_layernorm.weight", "attn_norm.weight" }, { "self_attn.q_proj.weight", "attn_q.weight" },
    { "self_attn.k_proj.weight", "attn_k.weight" }, { "self_attn.v_proj.weight", "attn_v.weight" },
    { "self_attn.o_proj.weight", "attn_output.weight" }, { "self_attn.q_norm.weight", "attn_q_norm.weight" },
    { "self_attn.k_norm.weight", "attn_k_norm.weight" },
    { "post_attention_layernorm.weight", "post_attention_norm.weight" },
    { "pre_feedforward_layernorm.weight", "ffn_norm.weight" }, { "mlp.gate_proj.weight", "ffn_gate.weight" },
    { "mlp.up_proj.weight", "ffn_up.weight" }, { "mlp.down_proj.weight", "ffn_down.weight" },
    { "post_feedforward_layernorm.weight", "post_ffw_norm.weight" }, { "layer_scalar", "layer_output_scale.weight" },
    { "router.proj.weight", "ffn_gate_inp.weight" }, { "router.scale", "ffn_gate_inp.scale" },
    { "router.per_expert_scale", "ffn_down_exps.scale" }, { "experts.gate_up_proj", "ffn_gate_up_exps.weight" },
    { "experts.down_proj", "ffn_down_exps.weight" }, { "pre_feedforward_layernorm_2.weight", "pre_ffw_norm_2.weight" },
    { "post_feedforward_layernorm_1.weight", "post_ffw_norm_1.weight" },
    { "post_feedforward_layernorm_2.weight", "post_ffw_norm_2.weight" },
    { "per_layer_input_gate.weight", "inp_gate.weight" }, { "per_layer_projection.weight", "proj.weight" },
    { "post_per_layer_input_norm.weight", "post_norm.weight" },
};

// The name of a tensor in quotes, for messages: if the file is a folder, the folder's name, then the GGUF name. Valid
// until the next call.
static const char *own_name(const Gguf *g, const char *gguf) {
    static char text[256];
    const char *hf = NULL;
    int l = -1, end = 0;
    if (sscanf(gguf, "blk.%4d.%n", &l, &end) != 1 || !end) l = -1;
    for (size_t i = 0; l < 0 && i < sizeof hf_names / sizeof *hf_names; i++)
        if (!strcmp(gguf, hf_names[i].gguf)) hf = hf_names[i].hf;
    for (size_t i = 0; l >= 0 && i < sizeof hf_layer_names / sizeof *hf_layer_names; i++)
        if (!strcmp(gguf + end, hf_layer_names[i].gguf)) hf = hf_layer_names[i].hf;
    if (!g->converted || !hf) snprintf(text, sizeof text, "'%.200s'", gguf);
    else if (l < 0) snprintf(text, sizeof text, "'%s' ('%.80s')", hf, gguf);
    else snprintf(text, sizeof text, "'layers.%d.%s' ('%.80s')", l, hf, gguf);
    return text;
}

// Writes the GGUF name of a tensor of the text model. False: it belongs to another part of the model. A DFlash drafter
// has no norm after attention: its post_attention_layernorm is the norm before the feed-forward network.
static bool hf_tensor_name(const HfConfig *c, GgufStr name, char *out, size_t room) {
    static const char *const prefixes[] = { "model.language_model.", "language_model.model.", "language_model.",
                                            "model." };
    char s[256];
    int l = 0, end = 0;
    if (name.n >= sizeof s) return false;
    memcpy(s, name.s, name.n);
    s[name.n] = 0;
    const char *p = s;
    for (size_t i = 0; i < sizeof prefixes / sizeof *prefixes && p == s; i++)
        if (!strncmp(s, prefixes[i], strlen(prefixes[i]))) p += strlen(prefixes[i]);
    for (size_t i = 0; i < sizeof hf_names / sizeof *hf_names; i++) {
        if (strcmp(p, hf_names[i].hf)) continue;
        snprintf(out, room, "%s", hf_names[i].gguf);
        return true;
    }
    if (sscanf(p, "layers.%4d.%n", &l, &end) != 1 || !end || l < 0) return false;
    if (c->dflash && !strcmp(p + end, "post_attention_layernorm.weight")) {
        snprintf(out, room, "blk.%d.ffn_norm.weight", l);
        return true;
    }
    for (size_t i = 0; i < sizeof hf_layer_names / sizeof *hf_layer_names; i++) {
        if (strcmp(p + end, hf_layer_names[i].hf)) continue;
        snprintf(out, room, "blk.%d.%s", l, hf_layer_names[i].gguf);
        return true;
    }
    return false;
}

static size_t n_elements(const GgufTensor *t) {
    return (size_t)t->size / (size_t)gguf_block_bytes(t->type) * (size_t)gguf_block_elems(t->type);
}

// True for vectors and routers, which become F32.
static bool hf_is_f32(const GgufTensor *t, const char *name) {
    return t->n_dims < 2 || strstr(name, "ffn_gate_inp.weight");
}

// Puts every tensor of the text model into w, and its bytes into data, which has one element more than st has tensors:
// the first is rope_freqs, the factors that exclude `head_dim / 2 - n_rot` pairs of global layers from RoPE. tied: an
// LM head in the file is a copy of the embedding table. Returns the rows of token_embd, 0: none.
static uint64_t hf_tensors(const HfConfig *c, Gguf *st, GgufWriter *w, const uint8_t **data, int head_dim, int n_rot,
                           bool tied) {
    size_t n = 0, n_other = 0, n_floats = (size_t)head_dim / 2;
    uint64_t vocab = 0;
    GgufStr first_other = { "", 0 };
    char name[320];
    for (size_t i = 0; i < st->n_tensors; i++)
        if (hf_tensor_name(c, st->tensors[i].name, name, sizeof name) && hf_is_f32(&st->tensors[i], name))
            n_floats += (size_t)st->tensors[i].size;                            // at least the number of elements
    float *floats = gguf_private(st, n_floats * sizeof *floats);
    if (!floats) die_gguf(st);
    for (int i = 0; i < head_dim / 2; i++) floats[i] = i < n_rot ? 1 : 1e30f;
    gguf_put_tensor(w, (GgufStr){ "rope_freqs.weight", 17 }, GGUF_F32, 1, (uint64_t[]){ (uint64_t)head_dim / 2 });
    data[n++] = (const uint8_t *)floats;
    floats += head_dim / 2;
    for (size_t i = 0; i < st->n_tensors; i++) {
        const GgufTensor *t = &st->tensors[i];
        if (!hf_tensor_name(c, t->name, name, sizeof name)) {
            if (c->dflash)
                die("%s: tensor '%s': DFlash v1 has no tensor of this name; other draft models are not "
                    "supported", st->path, shown(t->name));
            if (!n_other++) first_other = t->name;
            continue;
        }
        if (tied && !strcmp(name, "output.weight")) continue;       // the embedding table again
        const bool is_float = t->type == GGUF_F32 || t->type == GGUF_F16 || t->type == GGUF_BF16;
        const bool is_ids = (t->type == GGUF_I32 || t->type == GGUF_I64) && !strcmp(name, "masked_embd_ordering");
        if (!t->size || !(is_float || is_ids))
            die("%s: tensor '%s': expected F32, F16 or BF16, got %s", st->path, shown(t->name),
                !t->size ? "no elements" : t->type < 0 ? "a type that GGUF does not have" : gguf_type_name(t->type));
        const bool f32 = is_float && hf_is_f32(t, name);
        if (!strcmp(name, "token_embd.weight")) vocab = t->ne[1];
        gguf_put_tensor(w, (GgufStr){ name, strlen(name) }, f32 ? GGUF_F32 : t->type, max_int(t->n_dims, 1), t->ne);
        data[n++] = f32 ? (const uint8_t *)floats : t->data;
        if (!f32) continue;
        gguf_dequantize(t->type, t->data, floats, n_elements(t));
        floats += n_elements(t);
    }
    if (n_other)
        fprintf(stderr, "# %zu tensors do not belong to the text model and are ignored, the first: %s\n", n_other,
                shown(first_other));
    return vocab;
}

// ---- keys ----

static const char *hf_key(char out[96], const HfConfig *c, const char *key) {       // "ARCH.KEY"
    snprintf(out, 96, "%s.%s", c->arch, key);
    return out;
}

static void hf_put_u32(GgufWriter *w, const HfConfig *c, const char *key, uint32_t v) {
    char full[96];
    gguf_put_u32(w, hf_key(full, c, key), v);
}

static void hf_put_f32(GgufWriter *w, const HfConfig *c, const char *key, double v) {
    char full[96];
    gguf_put_f32(w, hf_key(full, c, key), (float)v);
}

// Puts one value per layer, as an array; or as a scalar if all are equal.
static void hf_put_layers(GgufWriter *w, const HfConfig *c, const char *key, const int32_t *v, int n) {
    char full[96];
    bool same = true;
    for (int l = 1; l < n; l++) same &= v[l] == v[0];
    if (same) hf_put_u32(w, c, key, (uint32_t)v[0]);
    else gguf_put_array(w, hf_key(full, c, key), GGUF_V_I32, v, (size_t)n);
}

typedef struct { int head_dim, n_rot; } HfRope;         // of global layers: values of a head, pairs that RoPE rotates

typedef struct { int32_t ffn[MAX_LAYERS], kv_heads[MAX_LAYERS]; uint8_t is_swa[MAX_LAYERS]; } HfLayers;

// Reads what differs between the n layers of a model, of which the last n_shared share K and V.
static void hf_read_layers(const HfConfig *c, int n, int n_shared, HfLayers *out) {
    const int32_t ffn = (int32_t)hf_int(c, "intermediate_size", 1, 1 << 20, 0);
    const int32_t kv_swa = (int32_t)hf_int(c, "num_key_value_heads", 1, 1024, 0);
    const bool k_eq_v = hf_bool(c, "attention_k_eq_v");
    const int32_t kv_full = k_eq_v ? (int32_t)hf_int(c, "num_global_key_value_heads", 1, 1024, kv_swa) : kv_swa;
    const bool wide = hf_bool(c, "use_double_wide_mlp");
    GgufJson types, v;
    int l = 0;
    if (!hf_get(c, "layer_types", &types) || types.type != GGUF_J_ARRAY)
        die("%s: 'layer_types': expected an array", c->path);
    for (; gguf_json_next(&types, NULL, &v); l++) {
        if (l == n) die("%s: 'layer_types': expected %d, one per layer, got more", c->path, n);
        out->is_swa[l] = gguf_json_is(&v, "sliding_attention");
        if (!out->is_swa[l] && !gguf_json_is(&v, "full_attention"))
            die("%s: 'layer_types': expected sliding_attention or full_attention, got %s", c->path,
                shown((GgufStr){ v.s, v.n }));
        out->ffn[l] = wide && l >= n - n_shared ? 2 * ffn : ffn;
        out->kv_heads[l] = out->is_swa[l] ? kv_swa : kv_full;
    }
    if (l < n) die("%s: 'layer_types': expected %d, one per layer, got %d", c->path, n, l);
}

// Reads the bases of RoPE, and returns the part of the pairs that global layers rotate.
static double hf_read_rope(const HfConfig *c, double *base, double *base_swa) {
    GgufJson rope, full, sliding, v;
    if (!hf_get(c, "rope_parameters", &rope) || !gguf_json_get(&rope, "full_attention", &full) ||
        !gguf_json_get(&rope, "sliding_attention", &sliding))
        die("%s: 'rope_parameters': expected full_attention and sliding_attention", c->path);
    // "proportional" divides the exponent by the whole head; "default" does the same if all pairs rotate.
    const double part = json_float(c->path, &full, "partial_rotary_factor", 1);
    const double part_swa = json_float(c->path, &sliding, "partial_rotary_factor", 1);
    if (!(gguf_json_get(&full, "rope_type", &v) && (gguf_json_is(&v, "proportional") || gguf_json_is(&v, "default"))) ||
        (gguf_json_is(&v, "default") && part != 1) || !(part > 0 && part <= 1))
        die("%s: 'rope_parameters': full_attention: expected rope_type proportional with a factor in 0..1", c->path);
    if (!(gguf_json_get(&sliding, "rope_type", &v) && gguf_json_is(&v, "default")) || part_swa != 1)
        die("%s: 'rope_parameters': sliding_attention: expected rope_type default for all pairs", c->path);
    *base = json_float(c->path, &full, "rope_theta", 0);
    *base_swa = json_float(c->path, &sliding, "rope_theta", 0);
    return part;
}

// Puts the keys of a text model or an MTP assistant, in the order of the converter.
static HfRope hf_model_keys(GgufWriter *w, const HfConfig *c) {
    const int n = (int)hf_int(c, "num_hidden_layers", 1, MAX_LAYERS, 0);
    const int head_dim = (int)hf_int(c, "global_head_dim", 32, MAX_HEAD_DIM, 512);
    const int head_dim_swa = (int)hf_int(c, "head_dim", 32, MAX_HEAD_DIM, 0);
    const int n_shared = (int)hf_int(c, "num_kv_shared_layers", 0, n, c->assistant ? n : 0);
    HfLayers layers;
    double base, base_swa;
    hf_read_layers(c, n, n_shared, &layers);
    const double part = hf_read_rope(c, &base, &base_swa);

    hf_put_u32(w, c, "block_count", (uint32_t)n);
    hf_put_u32(w, c, "context_length", (uint32_t)hf_int(c, "max_position_embeddings", 1, MAX_CONTEXT, 0));
    hf_put_u32(w, c, "embedding_length", (uint32_t)hf_int(c, "hidden_size", 1, 1 << 20, 0));
    hf_put_layers(w, c, "feed_forward_length", layers.ffn, n);
    hf_put_u32(w, c, "attention.head_count", (uint32_t)hf_int(c, "num_attention_heads", 1, 1024, 0));
    hf_put_layers(w, c, "attention.head_count_kv", layers.kv_heads, n);
    hf_put_f32(w, c, "rope.freq_base", base);
    hf_put_f32(w, c, "rope.freq_base_swa", base_swa);
    hf_put_f32(w, c, "attention.layer_norm_rms_epsilon", json_float(c->path, &c->text, "rms_norm_eps", 0));
    hf_put_u32(w, c, "attention.key_length", (uint32_t)head_dim);
    hf_put_u32(w, c, "attention.value_length", (uint32_t)head_dim);
    hf_put_u32(w, c, "attention.sliding_window", (uint32_t)hf_int(c, "sliding_window", 1, MAX_CONTEXT, 0));
    hf_put_u32(w, c, "attention.shared_kv_layers", (uint32_t)n_shared);
    hf_put_u32(w, c, "embedding_length_per_layer_input",
               (uint32_t)hf_int(c, "hidden_size_per_layer_input", 0, 1 << 16, 0));
    char full_key[96];
    gguf_put_array(w, hf_key(full_key, c, "attention.sliding_window_pattern"), GGUF_V_BOOL, layers.is_swa, (size_t)n);
    hf_put_u32(w, c, "attention.key_length_swa", (uint32_t)head_dim_swa);
    hf_put_u32(w, c, "attention.value_length_swa", (uint32_t)head_dim_swa);
    hf_put_u32(w, c, "rope.dimension_count", (uint32_t)head_dim);
    hf_put_u32(w, c, "rope.dimension_count_swa", (uint32_t)head_dim_swa);
    if (c->assistant) {
        hf_put_u32(w, c, "embedding_length_out", (uint32_t)hf_int(c, "backbone_hidden_size", 1, 1 << 20, 0));
        hf_put_u32(w, c, "nextn_predict_layers", (uint32_t)n);
        gguf_put_bool(w, "gemma4-assistant.use_ordered_embeddings", hf_bool(c, "use_ordered_embeddings"));
        if (hf_bool(c, "use_ordered_embeddings"))
            hf_put_u32(w, c, "centroid_top_k", (uint32_t)hf_int(c, "centroid_intermediate_top_k", 1, MAX_VOCAB, 32));
    } else {
        hf_put_f32(w, c, "final_logit_softcapping", json_float(c->path, &c->text, "final_logit_softcapping", 0));
    }
    if (hf_bool(c, "enable_moe_block")) {
        hf_put_u32(w, c, "expert_count", (uint32_t)hf_int(c, "num_experts", 1, MAX_EXPERTS, 0));
        hf_put_u32(w, c, "expert_used_count", (uint32_t)hf_int(c, "top_k_experts", 1, MAX_EXPERTS, 0));
        hf_put_u32(w, c, "expert_feed_forward_length", (uint32_t)hf_int(c, "moe_intermediate_size", 1, 1 << 20, 0));
    }
    return (HfRope){ head_dim, (int)(head_dim * part / 2) };
}

// Puts the taps and the pattern of sliding layers of a DFlash drafter with n layers. d: c, with dflash_config as its
// text.
static void hf_dflash_layers(GgufWriter *w, const HfConfig *c, const HfConfig *d, int n, int32_t *taps,
                             size_t *n_taps) {
    GgufJson v, ids;
    int64_t id;
    uint8_t swa[MAX_LAYERS];
    char full_key[96];
    int l = 0;
    if (!hf_get(d, "target_layer_ids", &ids) || ids.type != GGUF_J_ARRAY)
        die("%s: 'target_layer_ids': expected the layers of the model that it reads", c->path);
    while (*n_taps < MAX_LAYERS && gguf_json_next(&ids, NULL, &v)) {
        if (!gguf_json_int(&v, 0, MAX_LAYERS - 1, &id))
            die("%s: 'target_layer_ids': expected layers, got %s", c->path, shown((GgufStr){ v.s, v.n }));
        taps[(*n_taps)++] = (int32_t)id + 1;           // the output of a layer is the input of the next
    }
    if (!hf_get(c, "layer_types", &ids) || ids.type != GGUF_J_ARRAY) return;
    for (; l < n && gguf_json_next(&ids, NULL, &v); l++) swa[l] = gguf_json_is(&v, "sliding_attention");
    if (l < n || gguf_json_next(&ids, NULL, &v)) die("%s: 'layer_types': expected %d, one per layer", c->path, n);
    gguf_put_array(w, hf_key(full_key, c, "attention.sliding_window_pattern"), GGUF_V_BOOL, swa, (size_t)n);
}

// Puts the keys of a DFlash drafter that its config.json may lack.
static void hf_dflash_optional_keys(GgufWriter *w, const HfConfig *c, const HfConfig *d) {
    GgufJson v;
    char full_key[96];
    if (hf_get(c, "vocab_size", &v)) hf_put_u32(w, c, "vocab_size", (uint32_t)hf_int(c, "vocab_size", 1, MAX_VOCAB, 0));
    if (hf_get(c, "sliding_window", &v))
        hf_put_u32(w, c, "attention.sliding_window", (uint32_t)hf_int(c, "sliding_window", 1, MAX_CONTEXT, 0));
    if (hf_get(c, "final_logit_softcapping", &v))
        hf_put_f32(w, c, "final_logit_softcapping", json_float(c->path, &c->root, "final_logit_softcapping", 0));
    if (hf_get(c, "input_embedding_scale", &v))
        hf_put_f32(w, c, "embedding_scale", json_float(c->path, &c->root, "input_embedding_scale", 0));
    if (hf_get(d, "causal", &v) || hf_get(d, "is_causal", &v))
        gguf_put_bool(w, hf_key(full_key, c, "attention.causal"), v.type == GGUF_J_TRUE);
    if (hf_get(c, "hidden_act", &v)) {
        const GgufStr act = v.type == GGUF_J_STRING && v.n > 2 ? (GgufStr){ v.s + 1, v.n - 2 } : (GgufStr){ v.s, v.n };
        gguf_put_str(w, hf_key(full_key, c, "hidden_activation"), act);
    }
}

// Puts the keys of a DFlash drafter. Its config.json is that of a Qwen 3 model with a dflash_config.
static HfRope hf_dflash_keys(GgufWriter *w, const HfConfig *c) {
    const int n = (int)hf_int(c, "num_hidden_layers", 1, MAX_LAYERS, 0);
    const int head_dim = (int)hf_int(c, "head_dim", 32, MAX_HEAD_DIM, 0);
    HfConfig d = *c;
    GgufJson v, rope = { 0 };
    int32_t taps[MAX_LAYERS];
    size_t n_taps = 0;
    char full_key[96];
    if (!gguf_json_get(&c->root, "dflash_config", &d.text) || d.text.type != GGUF_J_OBJECT) d.text = c->root;
    hf_dflash_layers(w, c, &d, n, taps, &n_taps);
    if (!hf_get(c, "rope_parameters", &rope) || rope.type != GGUF_J_OBJECT) rope = c->root;
    if (hf_get(c, "rope_scaling", &v) || (gguf_json_get(&rope, "rope_type", &v) && !gguf_json_is(&v, "default")))
        die("%s: 'rope_scaling': expected none", c->path);
    if (hf_get(c, "output_multiplier", &v))
        die("%s: 'output_multiplier': draft models with one are not supported", c->path);
    hf_put_u32(w, c, "block_count", (uint32_t)n);
    hf_put_u32(w, c, "embedding_length", (uint32_t)hf_int(c, "hidden_size", 1, 1 << 20, 0));
    hf_put_u32(w, c, "feed_forward_length", (uint32_t)hf_int(c, "intermediate_size", 1, 1 << 20, 0));
    hf_put_u32(w, c, "attention.head_count", (uint32_t)hf_int(c, "num_attention_heads", 1, 1024, 0));
    hf_put_u32(w, c, "attention.head_count_kv", (uint32_t)hf_int(c, "num_key_value_heads", 1, 1024, 0));
    hf_put_u32(w, c, "attention.key_length", (uint32_t)head_dim);
    hf_put_f32(w, c, "attention.layer_norm_rms_epsilon", json_float(c->path, &c->root, "rms_norm_eps", 0));
    hf_put_f32(w, c, "rope.freq_base", json_float(c->path, &rope, "rope_theta", 0));
    hf_put_u32(w, c, "block_size", (uint32_t)hf_int(&d, "block_size", 1, STEP_ROWS, 0));
    gguf_put_array(w, hf_key(full_key, c, "target_layers"), GGUF_V_I32, taps, n_taps);
    gguf_put_u32(w, "tokenizer.ggml.mask_token_id", (uint32_t)hf_int(&d, "mask_token_id", 0, MAX_VOCAB, -1));
    hf_dflash_optional_keys(w, c, &d);
    return (HfRope){ head_dim, head_dim / 2 };
}

// Appends a JSON string, unescaped, to a text arena.
static GgufStr take_text(char **arena, const GgufJson *v) {
    const GgufStr s = { *arena, gguf_json_string(v, *arena) };
    *arena += s.n;
    return s;
}

// Puts the chat template and the ids of special tokens. Their texts are in tokenizer_config.json, else they are
// Gemma's. tokens: (n) by id.
static void hf_special_keys(GgufWriter *w, const char *folder, const GgufStr *tokens, size_t n) {
    static const char *const special[5][3] = {
        { "bos_token", "<bos>", "tokenizer.ggml.bos_token_id" },
        { "eos_token", "<eos>", "tokenizer.ggml.eos_token_id" },
        { "unk_token", "<unk>", "tokenizer.ggml.unknown_token_id" },
        { "pad_token", "<pad>", "tokenizer.ggml.padding_token_id" },
        { "mask_token", "<mask>", "tokenizer.ggml.mask_token_id" } };
    GgufJson config = { 0 }, v;
    char *config_text = read_json(folder, "tokenizer_config.json", &config);
    for (int k = 0; k < 5; k++) {
        GgufStr want = { special[k][1], strlen(special[k][1]) };
        char buffer[256];
        if (config_text && gguf_json_get(&config, special[k][0], &v)) {
            if (v.type == GGUF_J_OBJECT && !gguf_json_get(&v, "content", &v)) continue;
            if (v.type == GGUF_J_STRING && v.n < sizeof buffer)
                want = (GgufStr){ buffer, gguf_json_string(&v, buffer) };
        }
        for (size_t i = 0; i < n; i++)
            if (tokens[i].n == want.n && !memcmp(tokens[i].s, want.s, want.n)) {
                gguf_put_u32(w, special[k][2], (uint32_t)i);
                break;
            }
    }
    gguf_put_bool(w, "tokenizer.ggml.add_bos_token", true);
    gguf_put_bool(w, "tokenizer.ggml.add_space_prefix", false);
    size_t size;
    char *jinja = read_in_folder(folder, "chat_template.jinja", &size);
    if (jinja) {
        gguf_put_str(w, "tokenizer.chat_template", (GgufStr){ jinja, size });
    } else if (config_text && gguf_json_get(&config, "chat_template", &v) && v.type == GGUF_J_STRING) {
        jinja = alloc_or_die(v.n, 1);
        gguf_put_str(w, "tokenizer.chat_template", (GgufStr){ jinja, gguf_json_string(&v, jinja) });
    }
    free(jinja);
    free(config_text);
}

enum { HF_NORMAL = 1, HF_CONTROL = 3, HF_USER_DEFINED = 4, HF_UNUSED = 5, HF_BYTE = 6 };        // token types of GGUF

// Reads the vocabulary of tokenizer.json: tokens and types (vocab), by id. Texts go to the arena *at. Rows of the
// embedding table that no token uses are padding.
static void hf_read_vocab(const char *folder, const GgufJson *root, const GgufJson *map, uint64_t vocab, char **at,
                          GgufStr *tokens, int32_t *types) {
    // Visible although they are special: chat parsers look for them in the text.
    static const char *const visible[] = { "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>",
                                           "<|tool_response>", "<tool_response|>", "<|\"|>" };
    GgufJson added = { 0 }, rest, key, v, id_v = { 0 }, content;
    int64_t id;
    for (rest = *map; gguf_json_next(&rest, &key, &v); ) {
        if (!gguf_json_int(&v, 0, (int64_t)vocab - 1, &id))
            die("%s/tokenizer.json: %s: expected an id below %" PRIu64 ", the rows of the embedding table", folder,
                shown((GgufStr){ key.s, key.n }), vocab);
        if (tokens[id].n)
            die("%s/tokenizer.json: %s: expected a unique id, got %" PRId64 " again", folder,
                shown((GgufStr){ key.s, key.n }), id);
        const GgufStr t = tokens[id] = take_text(at, &key);
        types[id] = t.n == 6 && !memcmp(t.s, "<0x", 3) && t.s[5] == '>' ? HF_BYTE : HF_NORMAL;
    }
    if (gguf_json_get(root, "added_tokens", &added) && added.type != GGUF_J_ARRAY)
        die("%s/tokenizer.json: added_tokens: expected an array", folder);
    for (rest = added; added.n && gguf_json_next(&rest, NULL, &v); ) {
        if (!gguf_json_get(&v, "id", &id_v) || !gguf_json_int(&id_v, 0, (int64_t)vocab - 1, &id) ||
            !gguf_json_get(&v, "content", &content) || content.type != GGUF_J_STRING)
            die("%s/tokenizer.json: added_tokens: expected ids below %" PRIu64 " and texts", folder, vocab);
        tokens[id] = take_text(at, &content);
        types[id] = gguf_json_get(&v, "special", &id_v) && id_v.type == GGUF_J_TRUE ? HF_CONTROL : HF_USER_DEFINED;
        for (size_t i = 0; i < sizeof visible / sizeof *visible; i++)
            if (gguf_json_is(&content, visible[i])) types[id] = HF_USER_DEFINED;
    }
    for (uint64_t i = 0; i < vocab; i++) {
        if (tokens[i].n) continue;
        tokens[i] = (GgufStr){ *at, (size_t)sprintf(*at, "[PAD%" PRIu64 "]", i) };
        *at += tokens[i].n;
        types[i] = HF_UNUSED;
    }
}

// Reads the merges of tokenizer.json, ["left", "right"] or "left right", as "left right". Texts go to the arena *at.
// The caller frees the result.
static GgufStr *hf_read_merges(const char *folder, const GgufJson *merges, char **at, size_t *n_merges) {
    GgufJson rest, v, part;
    size_t n = 0;
    for (rest = *merges; gguf_json_next(&rest, NULL, &v); ) n++;
    GgufStr *pairs = alloc_or_die(n, sizeof *pairs);
    n = 0;
    for (rest = *merges; gguf_json_next(&rest, NULL, &v); n++) {
        GgufStr *pair = &pairs[n];
        GgufJson parts = v;
        bool good = v.type == GGUF_J_STRING || v.type == GGUF_J_ARRAY;
        pair->s = *at;
        if (v.type == GGUF_J_STRING) take_text(at, &v);
        for (int i = 0; v.type == GGUF_J_ARRAY && gguf_json_next(&parts, NULL, &part) && good; i++) {
            good = part.type == GGUF_J_STRING && i < 2;
            if (i == 1) *(*at)++ = ' ';
            if (good) take_text(at, &part);
        }
        pair->n = (size_t)(*at - pair->s);
        const char *space = pair->n ? memchr(pair->s, ' ', pair->n) : NULL, *end = pair->s + pair->n;
        if (!good || !space || space == pair->s || space + 1 == end ||
            memchr(space + 1, ' ', (size_t)(end - space - 1)))
            die("%s/tokenizer.json: merges: merge %zu: expected two texts without spaces, got %s", folder, n,
                shown((GgufStr){ v.s, v.n }));
    }
    *n_merges = n;
    return pairs;
}

// Puts the keys tokenizer.ggml.* and the chat template. vocab: rows of the embedding table.
static void hf_tokenizer_keys(GgufWriter *w, const char *folder, uint64_t vocab, bool required) {
    GgufJson root, model, map, merges;
    char *text = read_json(folder, "tokenizer.json", &root);
    if (!text && required) die("%s: expected tokenizer.json in this directory, got none", folder);
    if (!text) return;
    char *arena = alloc_or_die(root.n + 16 * vocab, 1), *at = arena;
    if (!gguf_json_get(&root, "model", &model) || !gguf_json_get(&model, "vocab", &map) || map.type != GGUF_J_OBJECT ||
        !gguf_json_get(&model, "merges", &merges) || merges.type != GGUF_J_ARRAY)
        die("%s/tokenizer.json: expected model.vocab and model.merges", folder);
    GgufStr *tokens = alloc_or_die(vocab, sizeof *tokens);
    int32_t *types = alloc_or_die(vocab, sizeof *types);
    float *scores = alloc_or_die(vocab, sizeof *scores);
    size_t n_merges;
    hf_read_vocab(folder, &root, &map, vocab, &at, tokens, types);
    for (uint64_t i = 0; i < vocab; i++) scores[i] = -1000;
    GgufStr *pairs = hf_read_merges(folder, &merges, &at, &n_merges);
    gguf_put_str(w, "tokenizer.ggml.model", (GgufStr){ "gemma4", 6 });
    gguf_put_array(w, "tokenizer.ggml.tokens", GGUF_V_STR, tokens, (size_t)vocab);
    gguf_put_array(w, "tokenizer.ggml.scores", GGUF_V_F32, scores, (size_t)vocab);
    gguf_put_array(w, "tokenizer.ggml.token_type", GGUF_V_I32, types, (size_t)vocab);
    gguf_put_array(w, "tokenizer.ggml.merges", GGUF_V_STR, pairs, n_merges);

    hf_special_keys(w, folder, tokens, (size_t)vocab);
    free(pairs);
    free(scores);
    free(types);
    free(tokens);
    free(arena);
    free(text);
}

// Puts defaults of sampling, and tokens that must not be sampled, from generation_config.json.
static void hf_generation_keys(GgufWriter *w, const char *folder) {
    GgufJson root, v, id_v = { 0 };
    char *text = read_json(folder, "generation_config.json", &root);
    int64_t id;
    double x;
    if (!text) return;
    if (gguf_json_get(&root, "top_k", &v) && gguf_json_int(&v, 0, INT_MAX, &id))
        gguf_put_u32(w, "general.sampling.top_k", (uint32_t)id);
    if (gguf_json_get(&root, "top_p", &v) && gguf_json_float(&v, &x))
        gguf_put_f32(w, "general.sampling.top_p", (float)x);
    if (gguf_json_get(&root, "temperature", &v) && gguf_json_float(&v, &x))
        gguf_put_f32(w, "general.sampling.temp", (float)x);
    if (gguf_json_get(&root, "suppress_tokens", &v) && v.type == GGUF_J_ARRAY) {
        int32_t ids[1024];
        size_t n = 0;
        while (n < 1024 && gguf_json_next(&v, NULL, &id_v) && gguf_json_int(&id_v, 0, MAX_VOCAB, &id))
            ids[n++] = (int32_t)id;
        if (n) gguf_put_array(w, "tokenizer.ggml.suppress_tokens", GGUF_V_I32, ids, n);
    }
    free(text);
}

// Reads config.json and finds out which kind of model it describes. Returns its text, to which c points; the caller
// frees it.
static char *hf_read_config(const char *folder, HfConfig *c) {
    GgufJson type, names = { 0 }, first;
    char *text = read_json(folder, "config.json", &c->root);
    if (!text) die("%s: expected a model, got a directory without config.json", folder);
    if (!gguf_json_get(&c->root, "text_config", &c->text) || c->text.type != GGUF_J_OBJECT) c->text = c->root;
    if (!gguf_json_get(&c->root, "model_type", &type) || type.type != GGUF_J_STRING)
        die("%s: 'model_type': missing", c->path);
    c->assistant = gguf_json_is(&type, "gemma4_assistant") || gguf_json_is(&type, "gemma4_unified_assistant");
    c->dflash = gguf_json_get(&c->root, "architectures", &names) && names.type == GGUF_J_ARRAY &&
                gguf_json_next(&names, NULL, &first) && gguf_json_is(&first, "DFlashDraftModel");
    if (!c->assistant && !c->dflash && strncmp(type.s, "\"gemma4", 7))
        die("%s: 'model_type': expected a Gemma 4 model, its assistant or a DFlashDraftModel, got %s; other draft "
            "models "
            "are read from GGUF files", c->path, shown((GgufStr){ type.s, type.n }));
    c->arch = c->dflash ? "dflash" : c->assistant ? "gemma4-assistant" : "gemma4";
    return text;
}

// Opens a folder as a GGUF file. path: the folder, one of its *.safetensors, or the index of these.
static void open_folder(Gguf *g, const char *path) {
    char folder[4096], config_path[4096 + 16];
    struct stat st;
    if ((size_t)snprintf(folder, sizeof folder, "%s", path) >= sizeof folder) die("%s: expected a shorter path", path);
    if (stat(path, &st)) die("%s: %s", path, strerror(errno));
    char *slash = strrchr(folder, '/');
    if (!S_ISDIR(st.st_mode) && slash) slash[slash == folder] = 0;
    else if (!S_ISDIR(st.st_mode)) strcpy(folder, ".");
    snprintf(config_path, sizeof config_path, "%s/config.json", folder);

    Gguf tensors;
    GgufWriter w = { 0 };
    GgufJson tie;
    HfConfig c = { .path = config_path };
    char *config = hf_read_config(folder, &c);
    if (gguf_open_safetensors(&tensors, path) < 0) die("%s: %s", path, tensors.err);
    const char *base = strrchr(folder, '/');
    base = base && base[1] ? base + 1 : folder;
    gguf_put_str(&w, "general.architecture", (GgufStr){ c.arch, strlen(c.arch) });
    gguf_put_str(&w, "general.type", (GgufStr){ "model", 5 });
    gguf_put_str(&w, "general.name", (GgufStr){ base, strlen(base) });
    hf_generation_keys(&w, folder);
    const HfRope rope = c.dflash ? hf_dflash_keys(&w, &c) : hf_model_keys(&w, &c);
    const uint8_t **data = alloc_or_die(tensors.n_tensors + 1, sizeof *data);
    const bool tied = gguf_json_get(&c.root, "tie_word_embeddings", &tie) && tie.type == GGUF_J_TRUE;
    const uint64_t vocab = hf_tensors(&c, &tensors, &w, data, rope.head_dim, rope.n_rot, tied);
    if (!c.dflash && (!vocab || vocab > MAX_VOCAB))
        die("%s: tensor 'embed_tokens.weight': expected 1..%d rows, got %" PRIu64, path, MAX_VOCAB, vocab);
    if (!c.dflash) hf_tokenizer_keys(&w, folder, vocab, !c.assistant);
    if (gguf_from_writer(g, &w, data, &tensors) < 0) die_gguf(g);
    gguf_writer_free(&w);
    free(data);
    free(config);
}

#endif
