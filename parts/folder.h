/* folder.h - reads a Hugging Face folder as if it were a GGUF file: open_folder(), and its image tower:
 * open_folder_vision().
 *
 * Uses base.h and gguf.h. Begin with open_folder().
 *   [1] Strings of a file    [2] Hugging Face folders    [3] Image towers of folders */
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
static bool is_gelu(GgufStr s) {
    return str_is(s, "gelu_pytorch_tanh") || str_is(s, "gelu_new") || str_is(s, "gelu_tanh");
}

static void die_gguf(const Gguf *g) { die("%s: %s", g->path, g->err); }

// ==== [2] Hugging Face folders =======================================================================================
// A folder with config.json, *.safetensors and tokenizer.json is converted, in memory, to the GGUF file that
// llama.cpp's converter would write: the same keys, names and shapes. So all code after open_model_file() sees a GGUF
// file. Matrices stay in the mapped files, in their types; vectors and routers are converted to F32. Supported are text
// models, MTP assistants and DFlash drafters; tensors of other modalities are counted and left out, except those of an
// image tower that is opened too [3]. No value is changed or permuted.

typedef struct { const char *name[128]; int n; } HfRead;       // members of config.json that somebody asked for

typedef struct {
    const char *path;           // of config.json
    GgufJson root, text;        // the whole object; its text_config, or the whole object if it has none
    bool assistant, dflash;     // kinds of drafters
    bool unified;               // model_type gemma4_unified
    bool with_tower;            // the image tower is opened too
    const char *arch;           // general.architecture
    HfRead *read;
} HfConfig;

// Finds a member of text_config, or else of the whole object. A member that is null counts as missing.
static bool hf_get(const HfConfig *c, const char *key, GgufJson *v) {
    int i = 0;
    while (i < c->read->n && strcmp(c->read->name[i], key)) i++;
    if (i == c->read->n && i < (int)(sizeof c->read->name / sizeof *c->read->name)) c->read->name[c->read->n++] = key;
    return (gguf_json_get(&c->text, key, v) && v->type != GGUF_J_NULL) ||
           (gguf_json_get(&c->root, key, v) && v->type != GGUF_J_NULL);
}

__attribute__((noreturn)) static void die_member(const HfConfig *c, const char *key, const char *want, GgufJson v) {
    die("%s: '%s': expected %s, got %s", c->path, key, want, shown((GgufStr){ v.s, v.n }));
}

// Returns a number, or `fallback` if it is missing. It is required if fallback < min; in json_float, if fallback is 0.
static int64_t hf_int(const HfConfig *c, const char *key, int64_t min, int64_t max, int64_t fallback) {
    GgufJson v = { 0 };
    int64_t n = fallback;
    char want[64];
    snprintf(want, sizeof want, "%" PRId64 "..%" PRId64, min, max);
    if (!hf_get(c, key, &v)) {
        if (fallback < min) die("%s: '%s': missing", c->path, key);
    } else if (!gguf_json_int(&v, min, max, &n)) {
        die_member(c, key, want, v);
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

static double hf_float(const HfConfig *c, const char *key, double fallback) {
    GgufJson v = { 0 };
    double x = fallback;
    if (hf_get(c, key, &v) && !gguf_json_float(&v, &x)) die_member(c, key, "a number", v);
    return x;
}

static bool hf_bool(const HfConfig *c, const char *key) {
    GgufJson v = { 0 };
    return hf_get(c, key, &v) && v.type == GGUF_J_TRUE;
}

// True for null, false, 0 and empty texts and containers: a member with such a value asks for nothing.
static bool json_is_empty(const GgufJson *v) {
    double x;
    GgufJson rest = *v, item;
    if (v->type == GGUF_J_NUMBER) return gguf_json_float(v, &x) && x == 0;
    if (v->type == GGUF_J_ARRAY || v->type == GGUF_J_OBJECT) return !gguf_json_next(&rest, NULL, &item);
    return v->type == GGUF_J_NULL || v->type == GGUF_J_FALSE || (v->type == GGUF_J_STRING && v->n == 2);
}

// Names to stderr, in one line, the members of an object that nobody has read. neutral: names that change nothing, with
// NULL after the last; a name that ends with * stands for all that begin or, *NAME, end so.
static void print_unread(const char *file, const GgufJson *objects, int n_objects, const HfRead *read,
                         const char *const *neutral) {
    char names[3 * 66 + 8] = "", name[66];
    size_t n = 0;
    for (int k = 0; k < n_objects; k++) {
        GgufJson rest = objects[k], key, v;
        while (gguf_json_next(&rest, &key, &v)) {
            bool known = json_is_empty(&v);
            snprintf(name, sizeof name, "%s", shown((GgufStr){ key.s + 1, key.n - 2 }));
            const size_t len = strlen(name);
            for (int i = 0; i < read->n; i++) known |= !strcmp(name, read->name[i]);
            for (const char *const *p = neutral; *p; p++) {
                const size_t m = strlen(*p) - 1;
                known |= **p == '*' ? len >= m && !strcmp(name + len - m, *p + 1)
                                    : (*p)[m] == '*' ? !strncmp(name, *p, m) : !strcmp(name, *p);
            }
            if (known) continue;
            if (n < 3) snprintf(names + strlen(names), sizeof names - strlen(names), "%s%s", n ? ", " : "", name);
            if (n == 3) strcat(names, ", ...");
            n++;
        }
    }
    if (n) fprintf(stderr, "# %s: %zu unused member%s: %s\n", file, n, n == 1 ? "" : "s", names);
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
    { "experts.gate_proj", "ffn_gate_exps.weight" }, { "experts.up_proj", "ffn_up_exps.weight" },
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

// Removes `part` from s wherever it occurs.
static void cut_out(char *s, const char *part) {
    for (char *at; (at = strstr(s, part)); ) memmove(at, at + strlen(part), strlen(at + strlen(part)) + 1);
}

// Replaces a beginning of s, in a buffer of 256 bytes, if s has it.
static bool replace_start(char *s, const char *start, const char *with) {
    const size_t n = strlen(start), m = strlen(with);
    if (strncmp(s, start, n) || strlen(s) - n + m >= 256) return false;
    memmove(s + m, s + n, strlen(s + n) + 1);
    memcpy(s, with, m);
    return true;
}

// Writes the name without the prefixes of wrappers and of models that contain the text model, out[256]. False: it is
// too long.
static bool hf_stem(GgufStr name, char *out) {
    static const char *const wrappers[] = { "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module." };
    static const char *const prefixes[] = { "base_model.model.", "module.", "model.", "language_model.",
                                            "text_model." };
    if (name.n >= 256) return false;
    memcpy(out, name.s, name.n);
    out[name.n] = 0;
    for (size_t i = 0; i < sizeof wrappers / sizeof *wrappers; i++) cut_out(out, wrappers[i]);
    for (size_t i = 0; i < sizeof prefixes / sizeof *prefixes; i++)
        if (replace_start(out, prefixes[i], "")) i = (size_t)-1;             // again from the first
    return true;
}

// True for tensors of the image tower.
static bool hf_is_vision(GgufStr name) {
    char s[256];
    return hf_stem(name, s) && (!strncmp(s, "vision_tower.", 13) || !strncmp(s, "vision_embedder.", 16) ||
                                !strncmp(s, "embed_vision.", 13));
}

// Renames a tensor of a layer to its name in transformers: other programs put the experts elsewhere. Returns the number
// of the expert if the name is that of one expert, else -1.
static int hf_usual_name(char *s) {
    static const char *const suffixed[] = { "experts.gate_up_proj", "experts.gate_proj", "experts.up_proj",
                                            "experts.down_proj", "router.scale", "router.per_expert_scale",
                                            "layer_scalar" };
    static const char *const starts[][2] = { { "moe.per_expert_scale", "router.per_expert_scale" },
                                             { "moe.experts.", "experts." }, { "moe.router.", "router." },
                                             { "moe.", "experts." }, { "mlp.experts.", "experts." },
                                             { "experts.switch_glu.", "experts." }, { "switch_glu.", "experts." } };
    int expert = -1, end = 0;
    for (size_t i = 0; i < sizeof starts / sizeof *starts; i++) replace_start(s, starts[i][0], starts[i][1]);
    if (sscanf(s, "experts.%5d.%n", &expert, &end) == 1 && end) memmove(s + 8, s + end, strlen(s + end) + 1);
    else expert = -1;
    if (expert < 0 && end) strcpy(s, "?");              // no such expert
    for (size_t i = 0; i < sizeof suffixed / sizeof *suffixed; i++) {
        const size_t n = strlen(suffixed[i]);
        if (!strncmp(s, suffixed[i], n) && !strcmp(s + n, ".weight")) s[n] = 0;
    }
    return expert;
}

// Writes the GGUF name of a tensor of the text model. False: it belongs to another part of the model. *expert: the
// number of the expert that the tensor is of, -1: all of them, or none. A DFlash drafter has no norm after attention:
// its post_attention_layernorm is the norm before the feed-forward network.
static bool hf_tensor_name(const HfConfig *c, GgufStr name, char *out, size_t room, int *expert) {
    char s[256 + 64];                                  // hf_usual_name() makes names longer
    int l = 0, end = 0;
    *expert = -1;
    if (!hf_stem(name, s)) return false;
    for (size_t i = 0; i < sizeof hf_names / sizeof *hf_names; i++) {
        if (strcmp(s, hf_names[i].hf)) continue;
        snprintf(out, room, "%s", hf_names[i].gguf);
        return true;
    }
    if (sscanf(s, "layers.%4d.%n", &l, &end) != 1 || !end || l < 0) return false;
    char *p = s + end;
    if (c->dflash && !strcmp(p, "post_attention_layernorm.weight")) {
        snprintf(out, room, "blk.%d.ffn_norm.weight", l);
        return true;
    }
    *expert = hf_usual_name(p);
    for (size_t i = 0; i < sizeof hf_layer_names / sizeof *hf_layer_names; i++) {
        if (strcmp(p, hf_layer_names[i].hf)) continue;
        snprintf(out, room, "blk.%d.%s", l, hf_layer_names[i].gguf);
        return *expert < 0 || !strncmp(p, "experts.", 8);
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

// Dies if a tensor that is left out belongs to the layers of the text model: results would be wrong without it.
// Statistics of caches, tables of RoPE and biases of zeros are not missed.
static void check_left_out(const Gguf *st, const GgufTensor *t) {
    static const char *const harmless[] = { "rotary_emb.inv_freq", ".k_scale", ".v_scale", ".input_scale",
                                            ".output_scale" };
    char s[256];
    if (!hf_stem(t->name, s) || strncmp(s, "layers.", 7)) return;
    for (size_t i = 0; i < sizeof harmless / sizeof *harmless; i++) if (strstr(s, harmless[i])) return;
    const bool is_bias = strlen(s) > 5 && !strcmp(s + strlen(s) - 5, ".bias");
    size_t at = 0;
    while (is_bias && at < t->size && !t->data[at]) at++;
    if (is_bias && at == t->size) return;
    die("%s: tensor '%s': a layer of Gemma 4 has no tensor of this name%s", st->path, shown(t->name),
        is_bias ? ": biases are not supported" : strstr(s, "lora_") ? "; try to merge the LoRA adapter first" :
        strstr(s, "weight_") || strstr(s, "qweight") ? "; try the folder that is not quantised, or a GGUF file" : "");
}

// Copies the experts of a layer, which are tensors of their own, into one tensor. t: the one of expert 0, gguf: the
// name of the result. Its bytes are private memory, *data. ne[2]: the number of experts.
static void hf_gather_experts(const HfConfig *c, Gguf *st, size_t t, const char *gguf, uint64_t ne[4],
                              const uint8_t **data) {
    const GgufTensor *first = &st->tensors[t];
    const int n = (int)hf_int(c, "num_experts", 1, MAX_EXPERTS, 0);
    char name[320];
    int expert;
    if (first->n_dims != 2) die("%s: tensor '%s': expected a matrix", st->path, shown(first->name));
    if (first->size > SIZE_MAX / 2 / (size_t)n || (size_t)n * first->size > available_memory())
        die("out of memory: '%s' and the other experts of this matrix are tensors of their own and need %.1f GB to be "
            "put together; try a GGUF file", shown(first->name), (double)n * (double)first->size * 1e-9);
    uint8_t *all = gguf_private(st, (size_t)n * first->size);
    bool *found = alloc_or_die(n, sizeof *found);
    if (!all) die_gguf(st);
    for (size_t i = 0; i < st->n_tensors; i++) {
        const GgufTensor *e = &st->tensors[i];
        if (!hf_tensor_name(c, e->name, name, sizeof name, &expert) || expert < 0 || strcmp(name, gguf)) continue;
        if (expert >= n || found[expert] || e->type != first->type || e->size != first->size ||
            e->ne[0] != first->ne[0])
            die("%s: tensor '%s': expected one for each of %d experts, all of one type and shape", st->path,
                shown(e->name), n);
        memcpy(all + (size_t)expert * first->size, e->data, first->size);
        found[expert] = true;
    }
    for (int e = 0; e < n; e++)
        if (!found[e])
            die("%s: tensor '%s': expected one for each of %d experts, got none for expert %d", st->path,
                shown(first->name), n, e);
    free(found);
    memcpy(ne, (uint64_t[]){ first->ne[0], first->ne[1], (uint64_t)n, 1 }, 4 * sizeof *ne);
    *data = all;
}

// Puts rope_freqs, the first tensor: the factors that scale the frequencies of n_rot pairs of global layers and exclude
// the others from RoPE. Returns the floats after them, of which there is one for every element that becomes F32.
static float *hf_put_rope(const HfConfig *c, Gguf *st, GgufWriter *w, const uint8_t **data, int head_dim, int n_rot) {
    size_t n_floats = (size_t)head_dim / 2;
    char name[320];
    int expert;
    for (size_t i = 0; i < st->n_tensors; i++)
        if (hf_tensor_name(c, st->tensors[i].name, name, sizeof name, &expert) && hf_is_f32(&st->tensors[i], name))
            n_floats += (size_t)st->tensors[i].size;                            // at least the number of elements
    float *floats = gguf_private(st, n_floats * sizeof *floats);
    if (!floats) die_gguf(st);
    for (int i = 0; i < head_dim / 2; i++) floats[i] = i < n_rot ? 1 : 1e30f;
    gguf_put_tensor(w, (GgufStr){ "rope_freqs.weight", 17 }, GGUF_F32, 1, (uint64_t[]){ (uint64_t)head_dim / 2 });
    *data = (const uint8_t *)floats;
    return floats + head_dim / 2;
}

// Returns the rows of the embedding table, whose columns have to agree with config.json.
static uint64_t hf_embedding_rows(const HfConfig *c, const Gguf *st, const GgufTensor *t) {
    const uint64_t dim = (uint64_t)hf_int(c, "hidden_size", 1, 1 << 20, 2304);
    if (t->ne[0] != dim)
        die("%s: tensor '%s' ('token_embd.weight'): expected %" PRIu64 " columns, the 'hidden_size' of config.json, "
            "got %" PRIu64, st->path, shown(t->name), dim, t->ne[0]);
    return t->ne[1];
}

// Puts every tensor of the text model into w, and its bytes into data, which has one element more than st has tensors.
// tied: an LM head in the file is a copy of the embedding table. Returns the rows of token_embd, 0: none.
static uint64_t hf_tensors(const HfConfig *c, Gguf *st, GgufWriter *w, const uint8_t **data, int head_dim, int n_rot,
                           bool tied) {
    size_t n = 1, n_other = 0;
    uint64_t vocab = 0;
    GgufStr first_other = { "", 0 };
    char name[320];
    int expert;
    float *floats = hf_put_rope(c, st, w, data, head_dim, n_rot);
    for (size_t i = 0; i < st->n_tensors; i++) {
        const GgufTensor *t = &st->tensors[i];
        if (!hf_tensor_name(c, t->name, name, sizeof name, &expert)) {
            if (c->dflash)
                die("%s: tensor '%s': DFlash v1 has no tensor of this name; other draft models are not "
                    "supported", st->path, shown(t->name));
            check_left_out(st, t);
            if (c->with_tower && hf_is_vision(t->name)) continue;
            if (!n_other++) first_other = t->name;
            continue;
        }
        if (tied && !strcmp(name, "output.weight")) continue;       // the embedding table again
        const bool is_float = t->type == GGUF_F32 || t->type == GGUF_F16 || t->type == GGUF_BF16;
        const bool is_ids = (t->type == GGUF_I32 || t->type == GGUF_I64) && !strcmp(name, "masked_embd_ordering");
        if (!t->size || !(is_float || is_ids))
            die("%s: tensor '%s': expected F32, F16 or BF16, got %s", st->path, shown(t->name),
                !t->size ? "no elements" : t->type < 0 ? "a type that GGUF does not have" : gguf_type_name(t->type));
        if (expert > 0) continue;
        const bool f32 = is_float && hf_is_f32(t, name);
        uint64_t ne[4];
        memcpy(ne, t->ne, sizeof ne);
        data[n] = f32 ? (const uint8_t *)floats : t->data;
        if (!expert) hf_gather_experts(c, st, i, name, ne, &data[n]);
        if (!strcmp(name, "token_embd.weight")) vocab = hf_embedding_rows(c, st, t);
        gguf_put_tensor(w, (GgufStr){ name, strlen(name) }, f32 ? GGUF_F32 : t->type,
                        expert ? max_int(t->n_dims, 1) : 3, ne);
        n++;
        if (!f32) continue;
        gguf_dequantize(t->type, t->data, floats, n_elements(t));
        floats += n_elements(t);
    }
    if (n_other)
        fprintf(stderr, "# %zu tensor%s not belong to the text model and %s ignored, the first: %s\n", n_other,
                n_other == 1 ? " does" : "s do", n_other == 1 ? "is" : "are", shown(first_other));
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

typedef struct {
    int32_t ffn[MAX_LAYERS], kv_heads[MAX_LAYERS], head_dim[MAX_LAYERS];
    uint8_t is_swa[MAX_LAYERS];
} HfLayers;

// Reads which of n layers are sliding. By default every sixth is global, and the last.
static void hf_read_types(const HfConfig *c, int n, uint8_t *is_swa) {
    GgufJson types, v;
    int l = 0;
    for (; l < n; l++) is_swa[l] = (l + 1) % 6 && l + 1 < n;
    if (!hf_get(c, "layer_types", &types)) return;
    if (types.type != GGUF_J_ARRAY) die("%s: 'layer_types': expected an array", c->path);
    for (l = 0; gguf_json_next(&types, NULL, &v); l++) {
        if (l == n) die("%s: 'layer_types': expected %d, one per layer, got more", c->path, n);
        is_swa[l] = gguf_json_is(&v, "sliding_attention");
        if (!is_swa[l] && !gguf_json_is(&v, "full_attention"))
            die_member(c, "layer_types", "sliding_attention or full_attention", v);
    }
    if (l < n) die("%s: 'layer_types': expected %d, one per layer, got %d", c->path, n, l);
}

// Reads per_layer_config, {"5": {"head_dim": 512}, ..}, which replaces members for single layers. False: there is none.
static bool hf_read_overrides(const HfConfig *c, int n, HfLayers *out) {
    GgufJson all, key, layer, name, v, same = { 0 };
    if (!hf_get(c, "per_layer_config", &all)) return false;
    if (all.type != GGUF_J_OBJECT) die_member(c, "per_layer_config", "an object", all);
    while (gguf_json_next(&all, &key, &layer)) {
        char *end;
        const long l = strtol(key.s + 1, &end, 10);
        int64_t value = 0;
        if (end == key.s + 1 || *end != '"' || l < 0 || l >= n || layer.type != GGUF_J_OBJECT)
            die_member(c, "per_layer_config", "objects by the numbers of layers", key);
        while (gguf_json_next(&layer, &name, &v)) {
            int32_t *to = gguf_json_is(&name, "head_dim") ? &out->head_dim[l] :
                          gguf_json_is(&name, "num_key_value_heads") ? &out->kv_heads[l] :
                          gguf_json_is(&name, "intermediate_size") ? &out->ffn[l] : NULL;
            char text[64];
            snprintf(text, sizeof text, "%s", shown((GgufStr){ name.s + 1, name.n - 2 }));
            if (!to && gguf_json_get(&c->text, text, &same) && same.n == v.n && !memcmp(same.s, v.s, v.n)) continue;
            if (!to || !gguf_json_int(&v, 1, 1 << 20, &value))
                die("%s: 'per_layer_config': layer %ld: '%s': expected head_dim, num_key_value_heads or "
                    "intermediate_size, got %s", c->path, l, text, shown((GgufStr){ v.s, v.n }));
            *to = (int32_t)value;
        }
    }
    return true;
}

// Reads what differs between the n layers of a model, of which the last n_shared share K and V. Values that a file
// leaves out are those of transformers. num_global_key_value_heads counts where V is the K projection; newer
// configurations of unified models do not say so any more.
static void hf_read_layers(const HfConfig *c, int n, int n_shared, HfLayers *out) {
    const int32_t ffn = (int32_t)hf_int(c, "intermediate_size", 1, 1 << 20, 9216);
    const int32_t kv_swa = (int32_t)hf_int(c, "num_key_value_heads", 1, 1024, 4);
    const int32_t kv_global = (int32_t)hf_int(c, "num_global_key_value_heads", 0, 1024, 0);
    const int32_t dim_swa = (int32_t)hf_int(c, "head_dim", 32, MAX_HEAD_DIM, 256);
    const int32_t dim_global = (int32_t)hf_int(c, "global_head_dim", 0, MAX_HEAD_DIM, 0);
    GgufJson v;
    const bool k_eq_v = hf_get(c, "attention_k_eq_v", &v) ? v.type == GGUF_J_TRUE : c->unified;
    const bool wide = hf_bool(c, "use_double_wide_mlp");
    hf_read_types(c, n, out->is_swa);
    for (int l = 0; l < n; l++) {
        out->ffn[l] = wide && l >= n - n_shared ? 2 * ffn : ffn;
        out->kv_heads[l] = kv_swa;
        out->head_dim[l] = dim_swa;
    }
    const bool overrides = hf_read_overrides(c, n, out);
    for (int l = 0; l < n; l++) {
        if (!out->is_swa[l] && (dim_global || !overrides)) out->head_dim[l] = dim_global ? dim_global : 512;
        if (!out->is_swa[l] && kv_global && k_eq_v) out->kv_heads[l] = kv_global;
    }
}

// Returns the values of a head in sliding or global layers, which have to agree; fallback: there is no such layer.
static int hf_head_dim(const HfConfig *c, const HfLayers *layers, int n, bool is_swa, int fallback) {
    int dim = 0;
    for (int l = 0; l < n; l++) {
        if ((layers->is_swa[l] != 0) != is_swa) continue;
        if (dim && layers->head_dim[l] != dim)
            die("%s: 'head_dim': expected %d in all %s layers, got %d in layer %d", c->path, dim,
                is_swa ? "sliding" : "global", layers->head_dim[l], l);
        dim = layers->head_dim[l];
    }
    return dim ? dim : fallback;
}

typedef struct { double base, part, factor; } HfRopeKind;      // theta; part of the pairs that rotate; scaling

// Reads RoPE of global or sliding layers. "proportional" divides the exponent by the whole head; "default" and "linear"
// do the same if all pairs rotate.
static HfRopeKind hf_read_rope(const HfConfig *c, const char *kind, double base, double part) {
    static const char *const members[] = { "rope_type", "rope_theta", "partial_rotary_factor", "factor" };
    GgufJson rope, of, type = { 0 }, rest, key, v;
    HfRopeKind out = { base, part, 1 };
    if (!hf_get(c, "rope_parameters", &rope)) return out;
    if (!gguf_json_get(&rope, kind, &of) || of.type != GGUF_J_OBJECT)
        die("%s: 'rope_parameters': expected full_attention and sliding_attention", c->path);
    const bool typed = gguf_json_get(&of, "rope_type", &type) && type.type != GGUF_J_NULL;
    const bool proportional = typed && gguf_json_is(&type, "proportional");
    const bool linear = typed && gguf_json_is(&type, "linear");
    out.base = json_float(c->path, &of, "rope_theta", base);
    out.part = json_float(c->path, &of, "partial_rotary_factor", 1);
    if (proportional || linear) out.factor = json_float(c->path, &of, "factor", 1);
    if ((typed && !proportional && !linear && !gguf_json_is(&type, "default")) || (!proportional && out.part != 1) ||
        !(out.part > 0 && out.part <= 1) || !(out.factor > 0 && out.factor <= 1e6))
        die("%s: 'rope_parameters': %s: expected rope_type default, linear or proportional, and only for proportional "
            "a partial_rotary_factor other than 1, got %s", c->path, kind, shown((GgufStr){ of.s, of.n }));
    for (rest = of; gguf_json_next(&rest, &key, &v); ) {
        bool known = json_is_empty(&v);
        for (size_t i = 0; i < sizeof members / sizeof *members; i++) known |= gguf_json_is(&key, members[i]);
        if (!known)
            die("%s: 'rope_parameters': %s: member %s is not supported", c->path, kind,
                shown((GgufStr){ key.s, key.n }));
    }
    return out;
}

// Dies if the model asks for something that changes results and that this program does not do.
static void hf_check_neutral(const HfConfig *c) {
    static const char *const empty[] = { "attention_bias", "mlp_bias", "attn_logit_softcapping", "rope_scaling" };
    GgufJson v;
    for (size_t i = 0; i < sizeof empty / sizeof *empty; i++)
        if (hf_get(c, empty[i], &v) && !json_is_empty(&v)) die_member(c, empty[i], "none: it is not supported", v);
    static const char *const acts[] = { "hidden_activation", "hidden_act" };
    for (int i = 0; i < 2; i++)
        if (hf_get(c, acts[i], &v) && (v.type != GGUF_J_STRING || !is_gelu((GgufStr){ v.s + 1, v.n - 2 })))
            die_member(c, acts[i], "gelu_pytorch_tanh", v);
    if (hf_get(c, "use_bidirectional_attention", &v) && v.type != GGUF_J_FALSE && !gguf_json_is(&v, "vision"))
        die_member(c, "use_bidirectional_attention", "null or vision", v);
    if (hf_get(c, "is_causal", &v) && v.type == GGUF_J_FALSE) die_member(c, "is_causal", "true", v);
}

// Puts the keys of attention and RoPE.
static HfRope hf_attention_keys(GgufWriter *w, const HfConfig *c, const HfLayers *layers, int n, int n_shared) {
    const int head_dim = hf_head_dim(c, layers, n, false, 512), head_dim_swa = hf_head_dim(c, layers, n, true, 256);
    const HfRopeKind full = hf_read_rope(c, "full_attention", 1e6, 0.25);
    const HfRopeKind sliding = hf_read_rope(c, "sliding_attention", 1e4, 1);
    char full_key[96];
    if (sliding.part != 1 || sliding.factor != 1)
        die("%s: 'rope_parameters': sliding_attention: expected all pairs and a factor of 1", c->path);
    hf_put_f32(w, c, "rope.freq_base", full.base);
    hf_put_f32(w, c, "rope.freq_base_swa", sliding.base);
    if (full.factor != 1) {
        gguf_put_str(w, hf_key(full_key, c, "rope.scaling.type"), (GgufStr){ "linear", 6 });
        hf_put_f32(w, c, "rope.scaling.factor", full.factor);
    }
    hf_put_f32(w, c, "attention.layer_norm_rms_epsilon", hf_float(c, "rms_norm_eps", 1e-6));
    hf_put_u32(w, c, "attention.key_length", (uint32_t)head_dim);
    hf_put_u32(w, c, "attention.value_length", (uint32_t)head_dim);
    hf_put_u32(w, c, "attention.sliding_window", (uint32_t)hf_int(c, "sliding_window", 1, MAX_CONTEXT, 512));
    hf_put_u32(w, c, "attention.shared_kv_layers", (uint32_t)n_shared);
    gguf_put_array(w, hf_key(full_key, c, "attention.sliding_window_pattern"), GGUF_V_BOOL, layers->is_swa, (size_t)n);
    hf_put_u32(w, c, "attention.key_length_swa", (uint32_t)head_dim_swa);
    hf_put_u32(w, c, "attention.value_length_swa", (uint32_t)head_dim_swa);
    hf_put_u32(w, c, "rope.dimension_count", (uint32_t)head_dim);
    hf_put_u32(w, c, "rope.dimension_count_swa", (uint32_t)head_dim_swa);
    return (HfRope){ head_dim, (int)(head_dim * full.part / 2) };
}

// Puts the keys of a text model or an MTP assistant. ple: the folder has a table of per-layer embeddings.
static HfRope hf_model_keys(GgufWriter *w, const HfConfig *c, bool ple) {
    const int n = (int)hf_int(c, "num_hidden_layers", 1, MAX_LAYERS, 30);
    const int n_shared = (int)hf_int(c, "num_kv_shared_layers", 0, n, c->assistant ? n : 0);
    HfLayers layers;
    hf_check_neutral(c);
    hf_read_layers(c, n, n_shared, &layers);

    hf_put_u32(w, c, "block_count", (uint32_t)n);
    hf_put_u32(w, c, "context_length", (uint32_t)hf_int(c, "max_position_embeddings", 1, MAX_CONTEXT, 131072));
    hf_put_u32(w, c, "embedding_length", (uint32_t)hf_int(c, "hidden_size", 1, 1 << 20, 2304));
    hf_put_layers(w, c, "feed_forward_length", layers.ffn, n);
    hf_put_u32(w, c, "attention.head_count", (uint32_t)hf_int(c, "num_attention_heads", 1, 1024, 8));
    hf_put_layers(w, c, "attention.head_count_kv", layers.kv_heads, n);
    hf_put_u32(w, c, "embedding_length_per_layer_input",
               (uint32_t)hf_int(c, "hidden_size_per_layer_input", 0, 1 << 16, ple ? 256 : 0));
    const HfRope rope = hf_attention_keys(w, c, &layers, n, n_shared);
    if (c->assistant) {
        hf_put_u32(w, c, "embedding_length_out", (uint32_t)hf_int(c, "backbone_hidden_size", 1, 1 << 20, 0));
        hf_put_u32(w, c, "nextn_predict_layers", (uint32_t)n);
        gguf_put_bool(w, "gemma4-assistant.use_ordered_embeddings", hf_bool(c, "use_ordered_embeddings"));
        if (hf_bool(c, "use_ordered_embeddings"))
            hf_put_u32(w, c, "centroid_top_k", (uint32_t)hf_int(c, "centroid_intermediate_top_k", 1, MAX_VOCAB, 32));
    } else {
        hf_put_f32(w, c, "final_logit_softcapping", hf_float(c, "final_logit_softcapping", 0));
    }
    if (hf_bool(c, "enable_moe_block")) {
        hf_put_u32(w, c, "expert_count", (uint32_t)hf_int(c, "num_experts", 1, MAX_EXPERTS, 0));
        hf_put_u32(w, c, "expert_used_count", (uint32_t)hf_int(c, "top_k_experts", 1, MAX_EXPERTS, 0));
        hf_put_u32(w, c, "expert_feed_forward_length", (uint32_t)hf_int(c, "moe_intermediate_size", 1, 1 << 20, 0));
    }
    return rope;
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

// Finds a template in "chat_template": a text, or an array of {"name": .., "template": ..}, of which the one called
// default counts, else the first.
static bool json_template(const GgufJson *object, GgufJson *text) {
    GgufJson all, v, name;
    if (!gguf_json_get(object, "chat_template", &all)) return false;
    *text = all;
    for (int i = 0; all.type == GGUF_J_ARRAY && gguf_json_next(&all, NULL, &v); i++) {
        if (v.type != GGUF_J_OBJECT) return false;
        if (!i || (gguf_json_get(&v, "name", &name) && gguf_json_is(&name, "default")))
            gguf_json_get(&v, "template", text);
    }
    return text->type == GGUF_J_STRING;
}

// Puts the chat template. config: tokenizer_config.json, or NULL.
static void hf_template_key(GgufWriter *w, const char *folder, const GgufJson *config) {
    GgufJson other = { 0 }, v;
    size_t size;
    char *jinja = read_in_folder(folder, "chat_template.jinja", &size), *text = NULL;
    if (!jinja && !(config && json_template(config, &v)))
        text = read_json(folder, "chat_template.json", &other);
    if (jinja) {
        gguf_put_str(w, "tokenizer.chat_template", (GgufStr){ jinja, size });
    } else if (text ? json_template(&other, &v) : config && json_template(config, &v)) {
        jinja = alloc_or_die(v.n, 1);
        gguf_put_str(w, "tokenizer.chat_template", (GgufStr){ jinja, gguf_json_string(&v, jinja) });
    }
    free(jinja);
    free(text);
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
    hf_template_key(w, folder, config_text ? &config : NULL);
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
    size_t n_beyond = 0;
    GgufJson first_beyond = { 0 };
    for (rest = *map; gguf_json_next(&rest, &key, &v); ) {
        if (!gguf_json_int(&v, 0, MAX_VOCAB, &id))
            die("%s/tokenizer.json: %s: expected an id from 0 to %d", folder, shown((GgufStr){ key.s, key.n }),
                MAX_VOCAB);
        if (id >= (int64_t)vocab && !n_beyond++) first_beyond = key;
        if (id >= (int64_t)vocab) continue;
        if (tokens[id].n)
            die("%s/tokenizer.json: %s: expected a unique id, got %" PRId64 " again", folder,
                shown((GgufStr){ key.s, key.n }), id);
        const GgufStr t = tokens[id] = take_text(at, &key);
        types[id] = t.n == 6 && !memcmp(t.s, "<0x", 3) && t.s[5] == '>' ? HF_BYTE : HF_NORMAL;
    }
    if (gguf_json_get(root, "added_tokens", &added) && added.type != GGUF_J_ARRAY)
        die("%s/tokenizer.json: added_tokens: expected an array", folder);
    for (rest = added; added.n && gguf_json_next(&rest, NULL, &v); ) {
        if (!gguf_json_get(&v, "id", &id_v) || !gguf_json_int(&id_v, 0, MAX_VOCAB, &id) ||
            !gguf_json_get(&v, "content", &content) || content.type != GGUF_J_STRING)
            die("%s/tokenizer.json: added_tokens: expected ids and texts", folder);
        if (id >= (int64_t)vocab && !n_beyond++) first_beyond = content;
        if (id >= (int64_t)vocab) continue;
        tokens[id] = take_text(at, &content);
        types[id] = gguf_json_get(&v, "special", &id_v) && id_v.type == GGUF_J_TRUE ? HF_CONTROL : HF_USER_DEFINED;
        for (size_t i = 0; i < sizeof visible / sizeof *visible; i++)
            if (gguf_json_is(&content, visible[i])) types[id] = HF_USER_DEFINED;
    }
    if (n_beyond)
        fprintf(stderr, "# note: tokenizer.json: %zu token%s no row in the embedding table, the first: %s; left out\n",
                n_beyond, n_beyond == 1 ? " has" : "s have", shown((GgufStr){ first_beyond.s, first_beyond.n }));
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

// Adds the ids of a member, one or an array, to ids[MAX_END_IDS]; more are left out.
enum { MAX_END_IDS = 1024 };
static void hf_add_ids(const char *file, const char *key, GgufJson v, int32_t *ids, size_t *n) {
    GgufJson item = v;
    int64_t id;
    const bool many = v.type == GGUF_J_ARRAY;
    if (v.type == GGUF_J_NULL) return;
    while ((!many || gguf_json_next(&v, NULL, &item)) && *n < MAX_END_IDS) {
        if (!gguf_json_int(&item, 0, INT32_MAX, &id))
            die("%s: '%s': expected ids of tokens, got %s", file, key, shown((GgufStr){ item.s, item.n }));
        size_t i = 0;
        while (i < *n && ids[i] != (int32_t)id) i++;
        if (i == *n) ids[(*n)++] = (int32_t)id;
        if (!many) return;
    }
}

// Puts the ids that end an answer, of generation_config.json (root; NULL: none) and config.json together.
static void hf_end_keys(GgufWriter *w, const HfConfig *c, const GgufJson *root) {
    static const char key[] = "eos_token_id";
    int32_t ids[MAX_END_IDS];
    size_t n = 0;
    GgufJson v;
    hf_get(c, key, &v);                                // so that it counts as read
    if (root && gguf_json_get(root, key, &v)) hf_add_ids("generation_config.json", key, v, ids, &n);
    if (gguf_json_get(&c->text, key, &v)) hf_add_ids(c->path, key, v, ids, &n);
    if (gguf_json_get(&c->root, key, &v)) hf_add_ids(c->path, key, v, ids, &n);
    if (n) gguf_put_array(w, "tokenizer.ggml.eos_token_ids", GGUF_V_I32, ids, n);
}

// Puts defaults of sampling, tokens that must not be sampled and tokens that end an answer.
static void hf_generation_keys(GgufWriter *w, const HfConfig *c, const char *folder) {
    static const struct { const char *hf, *gguf; double min, max; } numbers[] = {
        { "temperature", "general.sampling.temp", 0, 1000 }, { "top_p", "general.sampling.top_p", 0, 1 },
        { "min_p", "general.sampling.min_p", 0, 1 },
        { "repetition_penalty", "general.sampling.penalty_repeat", 0.001, 1000 } };
    static const char *const neutral[] = { "*_token_id", "transformers_version", "cache_implementation", "use_cache",
                                           "max_length", "_from_model_config", "return_dict_in_generate", NULL };
    static const char *const ones[] = { "typical_p", "num_beams", "num_beam_groups", "length_penalty",
                                        "num_return_sequences", "encoder_repetition_penalty" };
    HfRead read = { .name = { "do_sample", "temperature", "top_p", "min_p", "repetition_penalty", "top_k",
                              "suppress_tokens" }, .n = 7 };
    GgufJson root, v;
    double x;
    int64_t k;
    char *text = read_json(folder, "generation_config.json", &root);
    if (!c->assistant && !c->dflash) hf_end_keys(w, c, text ? &root : NULL);
    if (!text) return;
    const bool greedy = gguf_json_get(&root, "do_sample", &v) && v.type == GGUF_J_FALSE;
    if (greedy) gguf_put_f32(w, "general.sampling.temp", 0);
    for (size_t i = greedy; i < sizeof numbers / sizeof *numbers; i++) {
        if (!gguf_json_get(&root, numbers[i].hf, &v) || v.type == GGUF_J_NULL) continue;
        if (!gguf_json_float(&v, &x) || x < numbers[i].min || x > numbers[i].max)
            die("%s/generation_config.json: '%s': expected %g to %g, got %s", folder, numbers[i].hf, numbers[i].min,
                numbers[i].max, shown((GgufStr){ v.s, v.n }));
        gguf_put_f32(w, numbers[i].gguf, (float)x);
    }
    if (gguf_json_get(&root, "top_k", &v) && v.type != GGUF_J_NULL) {
        if (!gguf_json_int(&v, -1, INT_MAX, &k))
            die("%s/generation_config.json: 'top_k': expected -1 or more, got %s", folder,
                shown((GgufStr){ v.s, v.n }));
        gguf_put_u32(w, "general.sampling.top_k", (uint32_t)(k < 0 ? 0 : k));
    }
    int32_t ids[MAX_END_IDS];
    size_t n = 0;
    if (gguf_json_get(&root, "suppress_tokens", &v))
        hf_add_ids("generation_config.json", "suppress_tokens", v, ids, &n);
    if (n) gguf_put_array(w, "tokenizer.ggml.suppress_tokens", GGUF_V_I32, ids, n);
    for (size_t i = 0; i < sizeof ones / sizeof *ones; i++)
        if (gguf_json_get(&root, ones[i], &v) && gguf_json_float(&v, &x) && x == 1) read.name[read.n++] = ones[i];
    print_unread("generation_config.json", &root, 1, &read, neutral);
    free(text);
}

// Names the members of config.json that nobody has read.
static void hf_print_unread(const HfConfig *c) {
    static const char *const neutral[] = {
        "architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "use_cache", "text_config",
        "vision_config", "audio_config", "initializer_range", "attention_dropout", "*_token_id", "*_token_index",
        "vision_*", "vocab_size", "vocab_size_per_layer_input", "tie_word_embeddings", "_name_or_path", "id2label",
        "label2id", "problem_type", "return_dict", "auto_map", "unsloth_*", "num_experts", "top_k_experts",
        "moe_intermediate_size", "use_ordered_embeddings", "centroid_intermediate_top_k", "num_centroids",
        "chunk_size_feed_forward", "is_causal", NULL };
    const GgufJson objects[] = { c->root, c->text };
    print_unread("config.json", objects, c->text.s == c->root.s ? 1 : 2, c->read, neutral);
}

// Reads config.json and finds out which kind of model it describes. Returns its text, to which c points; the caller
// frees it.
static char *hf_read_config(const char *folder, HfConfig *c) {
    GgufJson type, names = { 0 }, first;
    char *text = read_json(folder, "config.json", &c->root);
    GgufJson adapter;
    if (!text && read_json(folder, "adapter_config.json", &adapter))
        die("%s: expected a model, got a LoRA adapter; try to merge it into its model, and run the result", folder);
    if (!text) die("%s: expected a model, got a directory without config.json", folder);
    if (!gguf_json_get(&c->root, "text_config", &c->text) || c->text.type != GGUF_J_OBJECT) c->text = c->root;
    if (!gguf_json_get(&c->root, "model_type", &type) || type.type != GGUF_J_STRING)
        die("%s: 'model_type': missing", c->path);
    c->unified = !strncmp(type.s, "\"gemma4_unified", 15);
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

// True if the folder has a table of per-layer embeddings.
static bool hf_has_ple(const Gguf *st) {
    char s[256];
    for (size_t i = 0; i < st->n_tensors; i++)
        if (hf_stem(st->tensors[i].name, s) && !strcmp(s, "embed_tokens_per_layer.weight")) return true;
    return false;
}

// Finds the folder of a path: the folder itself, one of its *.safetensors, or the index of these.
static void find_folder(const char *path, char folder[4096]) {
    struct stat st;
    if ((size_t)snprintf(folder, 4096, "%s", path) >= 4096) die("%s: expected a shorter path", path);
    if (stat(path, &st)) die("%s: %s", path, strerror(errno));
    char *slash = strrchr(folder, '/');
    if (!S_ISDIR(st.st_mode) && slash) slash[slash == folder] = 0;
    else if (!S_ISDIR(st.st_mode)) strcpy(folder, ".");
}

// Opens a folder as a GGUF file. path: the folder, one of its *.safetensors, or the index of these. with_tower: the
// caller opens its image tower too, so that is not reported as ignored.
static void open_folder(Gguf *g, const char *path, bool with_tower) {
    char folder[4096], config_path[4096 + 16];
    find_folder(path, folder);
    snprintf(config_path, sizeof config_path, "%s/config.json", folder);

    Gguf tensors;
    GgufWriter w = { 0 };
    GgufJson tie;
    HfRead read = { .n = 0 };
    HfConfig c = { .path = config_path, .read = &read, .with_tower = with_tower };
    char *config = hf_read_config(folder, &c);
    if (gguf_open_safetensors(&tensors, path) < 0) die("%s: %s", path, tensors.err);
    const char *base = strrchr(folder, '/');
    base = base && base[1] ? base + 1 : folder;
    gguf_put_str(&w, "general.architecture", (GgufStr){ c.arch, strlen(c.arch) });
    gguf_put_str(&w, "general.type", (GgufStr){ "model", 5 });
    gguf_put_str(&w, "general.name", (GgufStr){ base, strlen(base) });
    hf_generation_keys(&w, &c, folder);
    const HfRope rope = c.dflash ? hf_dflash_keys(&w, &c) : hf_model_keys(&w, &c, hf_has_ple(&tensors));
    const uint8_t **data = alloc_or_die(tensors.n_tensors + 1, sizeof *data);
    const bool says = gguf_json_get(&c.root, "tie_word_embeddings", &tie) ||
                      gguf_json_get(&c.text, "tie_word_embeddings", &tie);
    const bool tied = says ? tie.type == GGUF_J_TRUE : !c.dflash;      // transformers leaves out what is the default
    const uint64_t vocab = hf_tensors(&c, &tensors, &w, data, rope.head_dim, rope.n_rot, tied);
    if (!c.dflash && (!vocab || vocab > MAX_VOCAB))
        die("%s: tensor 'embed_tokens.weight': expected 1..%d rows, got %" PRIu64, path, MAX_VOCAB, vocab);
    if (!c.dflash) hf_tokenizer_keys(&w, folder, vocab, !c.assistant);
    if (!c.dflash) hf_print_unread(&c);
    if (gguf_from_writer(g, &w, data, &tensors) < 0) die_gguf(g);
    gguf_writer_free(&w);
    free(data);
    free(config);
}

// ==== [3] Image towers of folders ====================================================================================
// The tower is in the same safetensors as the text model. It becomes the second GGUF file that llama.cpp's converter
// would write (mmproj), with one difference: columns of the patch matrix keep their order (y, x, channel), since no
// value of a matrix is moved. parts/vision.h brings those of GGUF files into that order.

// Names in Hugging Face and GGUF files: of tensors outside the layers, and of modules of a layer.
static const struct { const char *hf, *gguf; } hf_vision_names[] = {
    { "vision_tower.patch_embedder.input_proj.weight", "v.patch_embd.weight" },
    { "vision_tower.patch_embedder.position_embedding_table", "v.position_embd.weight" },
    { "vision_tower.std_bias", "v.std_bias" }, { "vision_tower.std_scale", "v.std_scale" },
    { "vision_embedder.patch_dense.weight", "v.patch_embd.weight" },
    { "vision_embedder.patch_dense.bias", "v.patch_embd.bias" },
    { "vision_embedder.patch_ln1.weight", "v.patch_norm.1.weight" },
    { "vision_embedder.patch_ln1.bias", "v.patch_norm.1.bias" },
    { "vision_embedder.patch_ln2.weight", "v.patch_norm.2.weight" },
    { "vision_embedder.patch_ln2.bias", "v.patch_norm.2.bias" },
    { "vision_embedder.pos_norm.weight", "v.patch_norm.3.weight" },
    { "vision_embedder.pos_norm.bias", "v.patch_norm.3.bias" },
    { "vision_embedder.pos_embedding", "v.position_embd.weight" },
    { "embed_vision.embedding_projection.weight", "mm.input_projection.weight" },
}, hf_vision_modules[] = {
    { "input_layernorm", "ln1" }, { "post_attention_layernorm", "attn_post_norm" },
    { "pre_feedforward_layernorm", "ln2" }, { "post_feedforward_layernorm", "ffn_post_norm" },
    { "self_attn.q_norm", "attn_q_norm" }, { "self_attn.k_norm", "attn_k_norm" }, { "self_attn.q_proj", "attn_q" },
    { "self_attn.k_proj", "attn_k" }, { "self_attn.v_proj", "attn_v" }, { "self_attn.o_proj", "attn_out" },
    { "mlp.gate_proj", "ffn_gate" }, { "mlp.up_proj", "ffn_up" }, { "mlp.down_proj", "ffn_down" },
};

// Writes the GGUF name of a tensor of the tower. False: it is of another part of the model. transformers writes other
// names when it saves a unified model again, and some programs leave out ".linear".
static bool hf_vision_name(GgufStr name, char out[64]) {
    char s[256];
    int l = 0, end = 0;
    if (!hf_stem(name, s)) return false;
    cut_out(s, ".linear");
    replace_start(s, "embed_vision.multimodal_embedder.", "embed_vision.");
    replace_start(s, "embed_vision.patch_", "vision_embedder.patch_");
    replace_start(s, "embed_vision.pos_", "vision_embedder.pos_");
    for (size_t i = 0; i < sizeof hf_vision_names / sizeof *hf_vision_names; i++) {
        if (strcmp(s, hf_vision_names[i].hf)) continue;
        snprintf(out, 64, "%s", hf_vision_names[i].gguf);
        return true;
    }
    if (sscanf(s, "vision_tower.encoder.layers.%4d.%n", &l, &end) != 1 || !end || l < 0) return false;
    char *dot = strrchr(s + end, '.');
    if (!dot) return false;
    *dot = 0;
    for (size_t i = 0; i < sizeof hf_vision_modules / sizeof *hf_vision_modules; i++) {
        if (strcmp(s + end, hf_vision_modules[i].hf)) continue;
        snprintf(out, 64, "v.blk.%d.%s.%.16s", l, hf_vision_modules[i].gguf, dot + 1);
        return true;
    }
    return false;
}

// Dies if the tower asks for something that changes results and that this program does not do.
static void hf_check_vision(const char *path) {
    char folder[4096], config_path[4096 + 16];
    HfRead read = { .n = 0 };
    HfConfig c = { .path = config_path, .read = &read };
    GgufJson v;
    find_folder(path, folder);
    snprintf(config_path, sizeof config_path, "%s/config.json", folder);
    char *text = hf_read_config(folder, &c);
    if (gguf_json_get(&c.root, "vision_config", &v) && v.type == GGUF_J_OBJECT) {
        c.root = c.text = v;
        hf_int(&c, "patch_size", 16, 16, 16);
        hf_int(&c, "pooling_kernel_size", 3, 3, 3);
        hf_check_neutral(&c);
        if (hf_get(&c, "rope_parameters", &v) && v.type == GGUF_J_OBJECT &&
            json_float(config_path, &v, "rope_theta", 100) != 100)
            die_member(&c, "rope_parameters", "a rope_theta of 100", v);
    }
    free(text);
}

typedef struct { uint64_t dim, ffn_dim, head_dim, out_dim; uint32_t n_layers; bool unified; } HfTower;

// Puts the keys of a mmproj file.
static void hf_vision_keys(GgufWriter *w, const HfTower *t) {
    const GgufStr type = t->unified ? (GgufStr){ "gemma4uv", 8 } : (GgufStr){ "gemma4v", 7 };
    gguf_put_str(w, "general.architecture", (GgufStr){ "clip", 4 });
    gguf_put_str(w, "general.type", (GgufStr){ "mmproj", 6 });
    gguf_put_bool(w, "clip.has_vision_encoder", true);
    gguf_put_str(w, "clip.vision.projector_type", type);
    gguf_put_u32(w, "clip.vision.projection_dim", (uint32_t)t->out_dim);
    gguf_put_u32(w, "clip.vision.patch_size", 16);
    gguf_put_u32(w, "clip.vision.embedding_length", (uint32_t)t->dim);
    gguf_put_u32(w, "clip.vision.feed_forward_length", (uint32_t)t->ffn_dim);
    gguf_put_u32(w, "clip.vision.block_count", t->n_layers);
    gguf_put_u32(w, "clip.vision.attention.head_count", t->head_dim ? (uint32_t)(t->dim / t->head_dim) : 0);
    gguf_put_f32(w, "clip.vision.attention.layer_norm_epsilon", 1e-6f);
}

// Notes what the shapes of tensors say. name: of GGUF.
static void hf_note_shape(HfTower *tower, const char *name, const GgufTensor *t) {
    int l = 0;
    if (!strcmp(name, "v.patch_embd.weight")) tower->dim = t->ne[1];
    if (!strcmp(name, "v.blk.0.ffn_gate.weight")) tower->ffn_dim = t->ne[1];
    if (!strcmp(name, "v.blk.0.attn_q_norm.weight")) tower->head_dim = t->ne[0];
    if (!strcmp(name, "mm.input_projection.weight")) tower->out_dim = t->ne[1];
    if (!strcmp(name, "v.patch_norm.1.weight")) tower->unified = true;
    if (sscanf(name, "v.blk.%4d.", &l) == 1 && (uint32_t)l >= tower->n_layers) tower->n_layers = (uint32_t)l + 1;
}

// Returns the positions of a unified model, (n, 2, dim), as (2, n, dim), in private memory.
static const uint8_t *hf_position_planes(Gguf *st, const GgufTensor *t, uint64_t ne[4]) {
    const size_t n = t->ne[2], row = (size_t)gguf_block_bytes(t->type) * t->ne[0];
    uint8_t *planes = gguf_private(st, t->size);
    if (!planes) die_gguf(st);
    for (size_t i = 0; i < 2 * n; i++) memcpy(planes + (i % 2 * n + i / 2) * row, t->data + i * row, row);
    ne[1] = n;
    ne[2] = 2;
    return planes;
}

// Notes a tensor of the tower that has no name in hf_vision_names.
static void hf_note_unknown(const Gguf *st, const GgufTensor *t) {
    char s[256];
    if (!hf_is_vision(t->name) || !hf_stem(t->name, s) || strstr(s, "rotary_emb")) return;
    fprintf(stderr, "# note: %s: tensor '%s' of the image tower is not used\n", st->path, shown(t->name));
}

// Puts all tensors of the tower, and their bytes into data. Vectors, and scalars, become F32.
static void hf_vision_tensors(Gguf *st, GgufWriter *w, const uint8_t **data, float *floats, HfTower *tower) {
    static const char positions[] = ".pos_embedding";  // (n, 2, dim)
    const size_t n_end = strlen(positions);
    char name[64];
    size_t n = 0;
    for (size_t i = 0; i < st->n_tensors; i++) {
        const GgufTensor *t = &st->tensors[i];
        if (!hf_vision_name(t->name, name)) {
            hf_note_unknown(st, t);
            continue;
        }
        if (!t->size || (t->type != GGUF_F32 && t->type != GGUF_F16 && t->type != GGUF_BF16))
            die("%s: tensor '%s': expected F32, F16 or BF16", st->path, shown(t->name));
        uint64_t ne[4];
        memcpy(ne, t->ne, sizeof ne);
        const bool f32 = t->n_dims < 2;
        const bool pairs = t->n_dims == 3 && t->ne[1] == 2 && t->name.n > n_end &&
                           !memcmp(t->name.s + t->name.n - n_end, positions, n_end);
        data[n++] = f32 ? (const uint8_t *)floats : pairs ? hf_position_planes(st, t, ne) : t->data;
        gguf_put_tensor(w, (GgufStr){ name, strlen(name) }, f32 ? GGUF_F32 : t->type, max_int(t->n_dims, 1), ne);
        hf_note_shape(tower, name, t);
        if (!f32) continue;
        gguf_dequantize(t->type, t->data, floats, n_elements(t));
        floats += n_elements(t);
    }
}

// Opens the image tower of a folder as a GGUF file. path: as in open_folder(). False: the folder has none.
static bool open_folder_vision(Gguf *g, const char *path) {
    Gguf st;
    GgufWriter w = { 0 };
    HfTower tower = { 0 };
    char name[64];
    size_t n = 0, n_floats = 0;
    if (gguf_open_safetensors(&st, path) < 0) die("%s: %s", path, st.err);
    for (size_t i = 0; i < st.n_tensors; i++) {
        if (!hf_vision_name(st.tensors[i].name, name)) continue;
        n++;
        if (st.tensors[i].n_dims < 2) n_floats += st.tensors[i].size;          // at least the number of elements
    }
    if (!n) {
        gguf_close(&st);
        return false;
    }
    hf_check_vision(path);
    const uint8_t **data = alloc_or_die(n, sizeof *data);
    float *floats = gguf_private(&st, n_floats * sizeof *floats);
    if (!floats) die_gguf(&st);
    hf_vision_tensors(&st, &w, data, floats, &tower);
    hf_vision_keys(&w, &tower);
    if (gguf_from_writer(g, &w, data, &st) < 0) die_gguf(g);
    gguf_writer_free(&w);
    free(data);
    return true;
}

#endif
