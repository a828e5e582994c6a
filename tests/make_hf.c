/* make_hf.c - makes and lists files for the tests of importing and quantising.
 *
 *   make_hf IN.gguf FOLDER [--shards N] [--numbered] [--prefix P] [--bf16] [--extra]
 *       the same model as a Hugging Face folder: config.json, safetensors, tokenizer.json, tokenizer_config.json,
 *       chat_template.jinja. --shards: N files and an index; --numbered: no index; --prefix: before the text model's
 *       names; --bf16: vectors become BF16; --extra: also tensors of other modalities, of types that no model may use
 *   make_hf --round IN.gguf OUT.gguf     the same file with all vectors but rope_freqs rounded to BF16 values
 *   make_hf --list FILE.gguf             one line per tensor: type, name, FNV-1a 64 of the bytes; then the hash of the
 *                                        whole file
 *
 * The table of names is independent of the one in the engine, so that a mistake there shows. */
#define _GNU_SOURCE
#include "gguf.h"
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

static void die(const char *what, const char *why) {
    fprintf(stderr, "make_hf: error: %s: %s\n", what, why);
    exit(1);
}

static FILE *create(const char *folder, const char *name) {
    char path[1024];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "wb");
    if (!f) die(path, strerror(errno));
    return f;
}

// ---- --list, --round ---------------------------------------------------------------------------------------------

static uint64_t hash(const uint8_t *p, size_t n) {
    uint64_t h = 0xcbf29ce484222325u;
    while (n-- > 0) h = (h ^ *p++) * 0x100000001b3u;
    return h;
}

static void list(const Gguf *g) {
    for (size_t i = 0; i < g->n_tensors; i++) {
        const GgufTensor *t = &g->tensors[i];
        printf("%s %.*s %016" PRIx64 "\n", gguf_type_name(t->type), (int)t->name.n, t->name.s, hash(t->data, t->size));
    }
    printf("file %016" PRIx64 "\n", hash(g->maps[0].at, g->file_size));
}

static bool is_vector(const GgufTensor *t) { return t->n_dims == 1 && memcmp(t->name.s, "rope_freqs", 10) != 0; }

static void round_vectors(const Gguf *g, const char *out) {
    FILE *in = fopen(g->path, "rb"), *f = fopen(out, "wb");
    uint8_t *bytes = malloc(g->file_size);
    if (!in || !f || !bytes || fread(bytes, 1, g->file_size, in) != g->file_size) die(out, "cannot copy");
    for (size_t i = 0; i < g->n_tensors; i++) {
        const GgufTensor *t = &g->tensors[i];
        for (uint64_t k = 0; is_vector(t) && k < t->ne[0]; k++) {
            uint8_t *p = bytes + g->data_start + t->offset + 4 * k;
            float v;
            memcpy(&v, p, 4);
            v = gguf_bf16_to_f32(gguf_f32_to_bf16(v));
            memcpy(p, &v, 4);
        }
    }
    if (fwrite(bytes, 1, g->file_size, f) != g->file_size || fclose(f)) die(out, "cannot write");
    fclose(in);
    free(bytes);
}

// ---- the folder --------------------------------------------------------------------------------------------------

static const char *const names[][2] = {
    { "token_embd.weight", "embed_tokens.weight" }, { "output_norm.weight", "norm.weight" },
    { "output.weight", "lm_head.weight" }, { "per_layer_token_embd.weight", "embed_tokens_per_layer.weight" },
    { "per_layer_model_proj.weight", "per_layer_model_projection.weight" },
    { "per_layer_proj_norm.weight", "per_layer_projection_norm.weight" },
    { "nextn.pre_projection.weight", "pre_projection.weight" },
    { "nextn.post_projection.weight", "post_projection.weight" },
    { "attn_norm.weight", "input_layernorm.weight" }, { "attn_q.weight", "self_attn.q_proj.weight" },
    { "attn_k.weight", "self_attn.k_proj.weight" }, { "attn_v.weight", "self_attn.v_proj.weight" },
    { "attn_output.weight", "self_attn.o_proj.weight" }, { "attn_q_norm.weight", "self_attn.q_norm.weight" },
    { "attn_k_norm.weight", "self_attn.k_norm.weight" },
    { "post_attention_norm.weight", "post_attention_layernorm.weight" },
    { "ffn_norm.weight", "pre_feedforward_layernorm.weight" }, { "ffn_gate.weight", "mlp.gate_proj.weight" },
    { "ffn_up.weight", "mlp.up_proj.weight" }, { "ffn_down.weight", "mlp.down_proj.weight" },
    { "post_ffw_norm.weight", "post_feedforward_layernorm.weight" }, { "layer_output_scale.weight", "layer_scalar" },
    { "ffn_gate_inp.weight", "router.proj.weight" }, { "ffn_gate_inp.scale", "router.scale" },
    { "ffn_down_exps.scale", "router.per_expert_scale" }, { "ffn_gate_up_exps.weight", "experts.gate_up_proj" },
    { "ffn_down_exps.weight", "experts.down_proj" }, { "pre_ffw_norm_2.weight", "pre_feedforward_layernorm_2.weight" },
    { "post_ffw_norm_1.weight", "post_feedforward_layernorm_1.weight" },
    { "post_ffw_norm_2.weight", "post_feedforward_layernorm_2.weight" },
    { "inp_gate.weight", "per_layer_input_gate.weight" },
    { "proj.weight", "per_layer_projection.weight" }, { "post_norm.weight", "post_per_layer_input_norm.weight" },
};

typedef struct {
    char name[160];
    const char *dtype, *shape;          // shape: JSON; NULL: the tensor's shape
    const GgufTensor *t;                // NULL: data is `size` bytes of 0x5a
    uint64_t size, offset;
    int shard;
} Entry;

static Entry entries[4096];
static int n_entries;

static void add_entry(const GgufTensor *t, const char *prefix, bool bf16) {
    Entry *e = &entries[n_entries];
    char stem[64];
    int layer = -1, end = 0;
    snprintf(stem, sizeof stem, "%.*s", (int)t->name.n, t->name.s);
    if (!strcmp(stem, "rope_freqs.weight")) return;
    sscanf(stem, "blk.%d.%n", &layer, &end);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (strcmp(stem + end, names[i][0]) != 0) continue;
        const bool outside = strstr(names[i][1], "lm_head") || !strncmp(names[i][0], "nextn", 5);
        if (layer >= 0) snprintf(e->name, sizeof e->name, "%slayers.%d.%s", prefix, layer, names[i][1]);
        else snprintf(e->name, sizeof e->name, "%s%s", outside ? "" : prefix, names[i][1]);
    }
    if (!e->name[0]) die(stem, "no Hugging Face name");
    if (t->type != GGUF_F32 && t->type != GGUF_F16 && t->type != GGUF_BF16) die(stem, "expected a float type");
    e->t = t;
    e->dtype = bf16 && is_vector(t) ? "BF16" : gguf_type_name(t->type);
    e->size = bf16 && is_vector(t) ? t->size / 2 : t->size;
    n_entries++;
}

static void add_extra(const char *name, const char *dtype, const char *shape, uint64_t size) {
    Entry *e = &entries[n_entries++];
    snprintf(e->name, sizeof e->name, "%s", name);
    e->dtype = dtype;
    e->shape = shape;
    e->size = size;
}

static void write_entry(FILE *f, const Entry *e) {
    for (uint64_t k = 0; !e->t && k < e->size; k++) fputc(0x5a, f);
    if (e->t && e->size == e->t->size) fwrite(e->t->data, 1, e->size, f);
    for (uint64_t k = 0; e->t && e->size != e->t->size && k < e->t->ne[0]; k++) {
        float v;
        memcpy(&v, e->t->data + 4 * k, 4);
        fwrite(&(uint16_t){ gguf_f32_to_bf16(v) }, 2, 1, f);
    }
}

// Entries i with i % n_shards == shard. Data is written in reverse order, so that its order differs from the header's.
static void write_shard(const char *folder, const char *name, int shard, int n_shards) {
    char *json = NULL;
    size_t n = 0;
    uint64_t offset = 0;
    for (int i = n_entries - 1; i >= 0; i--) {
        if (i % n_shards != shard) continue;
        entries[i].offset = offset;
        entries[i].shard = shard;
        offset += entries[i].size;
    }
    FILE *m = open_memstream(&json, &n);
    fprintf(m, "{\"__metadata__\": {\"format\": \"pt\"}");
    for (int i = shard; i < n_entries; i += n_shards) {
        const Entry *e = &entries[i];
        fprintf(m, ", \"%s\": {\"dtype\":\"%s\",\"shape\":[", e->name, e->dtype);
        if (!e->t) fprintf(m, "%s", e->shape);
        for (int d = e->t ? e->t->n_dims - 1 : -1; d >= 0; d--) fprintf(m, "%" PRIu64 "%s", e->t->ne[d], d ? "," : "");
        fprintf(m, "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", e->offset, e->offset + e->size);
    }
    fprintf(m, "}");
    fclose(m);
    FILE *f = create(folder, name);
    const uint64_t length = n;                          // not padded, so that tensors have odd addresses
    fwrite(&length, 8, 1, f);
    fwrite(json, 1, n, f);
    for (int i = n_entries - 1; i >= 0; i--)
        if (i % n_shards == shard) write_entry(f, &entries[i]);
    if (fclose(f)) die(name, "cannot write");
    free(json);
}

static void json_string(FILE *f, GgufStr s) {           // every 16th character as \u00xx, to test both forms
    fputc('"', f);
    for (size_t i = 0; i < s.n; i++) {
        const unsigned char c = (unsigned char)s.s[i];
        if (c == '\n') fputs("\\n", f);
        else if (c < 0x20 || c == '"' || c == '\\' || (c < 0x7f && c % 16 == 9)) fprintf(f, "\\u%04x", c);
        else fputc(c, f);
    }
    fputc('"', f);
}

static int64_t key_int(Gguf *g, const char *arch, const char *key, int64_t otherwise) {
    char full[96];
    int64_t v = otherwise;
    snprintf(full, sizeof full, "%s.%s", arch, key);
    if (gguf_get_int(g, full, 0, INT64_MAX, &v) < 0) die(full, g->err);
    return v;
}

static void key_ints(Gguf *g, const char *arch, const char *key, int64_t *v, int n) {
    char full[96];
    snprintf(full, sizeof full, "%s.%s", arch, key);
    if (gguf_get_ints(g, full, 0, INT64_MAX, v, (size_t)n) != 1) die(full, g->err);
}

static void write_config(Gguf *g, const char *folder) {
    const bool assistant = gguf_find_kv(g, "gemma4-assistant.block_count") != NULL;
    const char *arch = assistant ? "gemma4-assistant" : "gemma4";
    const int n = (int)key_int(g, arch, "block_count", 0),
        n_shared = (int)key_int(g, arch, "attention.shared_kv_layers", 0);
    int64_t swa[512], ffn[512], kv[512], kv_heads[2] = { 0, 0 };
    if (n < 1 || n > 512) die(folder, "layers");
    key_ints(g, arch, "attention.sliding_window_pattern", swa, n);
    key_ints(g, arch, "feed_forward_length", ffn, n);
    key_ints(g, arch, "attention.head_count_kv", kv, n);
    for (int l = 0; l < n; l++) kv_heads[swa[l] != 0] = kv[l];
    const bool k_eq_v = kv_heads[0] != kv_heads[1];
    FILE *f = create(folder, "config.json");
    fprintf(f, "{\n  \"architectures\": [\"X\"], \"model_type\": \"%s\", \"tie_word_embeddings\": true,\n",
            assistant ? "gemma4_assistant" : "gemma4");
    if (assistant)
        fprintf(f, "  \"backbone_hidden_size\": %" PRId64 ", \"use_ordered_embeddings\": false,\n",
                key_int(g, arch, "embedding_length_out", 0));
    fprintf(f, "  \"text_config\": {\"model_type\": \"gemma4_text\", \"rms_norm_eps\": 1e-06,\n"
            "    \"final_logit_softcapping\": %s,\n", assistant ? "null" : "30.0");
    static const char *const fields[][2] = { { "num_hidden_layers", "block_count" },
                                             { "hidden_size", "embedding_length" },
        { "num_attention_heads", "attention.head_count" }, { "head_dim", "attention.key_length_swa" },
        { "global_head_dim", "attention.key_length" }, { "sliding_window", "attention.sliding_window" },
        { "max_position_embeddings", "context_length" }, { "num_kv_shared_layers", "attention.shared_kv_layers" },
        { "hidden_size_per_layer_input", "embedding_length_per_layer_input" } };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        fprintf(f, "    \"%s\": %" PRId64 ",\n", fields[i][0], key_int(g, arch, fields[i][1], 0));
    fprintf(f, "    \"intermediate_size\": %" PRId64 ", \"use_double_wide_mlp\": %s,\n", ffn[0],
            n_shared && ffn[n - 1] != ffn[0] ? "true" : "false");
    fprintf(f,
            "    \"num_key_value_heads\": %" PRId64 ", \"attention_k_eq_v\": %s,\n    \"num_global_key_value_heads\": ",
            kv_heads[1], k_eq_v ? "true" : "false");
    if (k_eq_v) fprintf(f, "%" PRId64 ",\n", kv_heads[0]);
    else fprintf(f, "null,\n");
    if (key_int(g, arch, "expert_count", 0))
        fprintf(f, "    \"enable_moe_block\": true, \"num_experts\": %" PRId64 ", \"top_k_experts\": %" PRId64
                ", \"moe_intermediate_size\": %" PRId64 ",\n", key_int(g, arch, "expert_count", 0),
                key_int(g, arch, "expert_used_count", 0), key_int(g, arch, "expert_feed_forward_length", 0));
    else fprintf(f, "    \"enable_moe_block\": false, \"num_experts\": null,\n");
    fprintf(f, "    \"rope_parameters\": {\"full_attention\": {\"rope_type\": \"proportional\", "
            "\"partial_rotary_factor\": 0.25, \"rope_theta\": 1000000.0}, \"sliding_attention\": {\"rope_type\": \"default\", \"rope_theta\": 10000.0}},\n"
            "    \"layer_types\": [");
    for (int l = 0; l < n; l++) fprintf(f, "%s\"%s_attention\"", l ? ", " : "", swa[l] ? "sliding" : "full");
    fprintf(f, "]\n  }\n}\n");
    if (fclose(f)) die(folder, "config.json");
    f = create(folder, "generation_config.json");
    fprintf(f, "{\"top_k\": 64, \"top_p\": 0.95, \"temperature\": 1.0, \"suppress_tokens\": []}\n");
    if (fclose(f)) die(folder, "generation_config.json");
}

// Special tokens are in the vocabulary and in the list of added tokens; the two notations of merges alternate by file.
static void write_tokenizer(Gguf *g, const char *folder, bool pairs) {
    const GgufStr *tokens, *merges;
    size_t n, n_merges;
    if (gguf_get_strs(g, "tokenizer.ggml.tokens", &tokens, &n) != 1) return;
    int64_t *types = calloc(n, sizeof *types);
    if (!types || gguf_get_strs(g, "tokenizer.ggml.merges", &merges, &n_merges) != 1 ||
        gguf_get_ints(g, "tokenizer.ggml.token_type", 0, 9, types, n) != 1)
        die(folder, g->err);
    FILE *f = create(folder, "tokenizer.json");
    fprintf(f, "{\"version\": \"1.0\", \"added_tokens\": [");
    for (size_t i = 0, comma = 0; i < n; i++) {
        if (types[i] != 3 && types[i] != 4) continue;
        fprintf(f, "%s\n{\"id\": %zu, \"content\": ", comma++ ? "," : "", i);
        json_string(f, tokens[i]);
        fprintf(f, ", \"special\": true}");
    }
    fprintf(f, "],\n\"model\": {\"type\": \"BPE\", \"vocab\": {");
    for (size_t i = n; i-- > 0; ) {
        json_string(f, tokens[i]);
        fprintf(f, ": %zu%s\n", i, i ? "," : "");
    }
    fprintf(f, "}, \"merges\": [");
    for (size_t i = 0; i < n_merges; i++) {
        const char *space = memchr(merges[i].s + 1, ' ', merges[i].n - 1);
        const size_t left = (size_t)(space - merges[i].s);
        if (i) fputs(",\n", f);
        if (pairs) {
            fputc('[', f);
            json_string(f, (GgufStr){ merges[i].s, left });
            fputs(", ", f);
            json_string(f, (GgufStr){ space + 1, merges[i].n - left - 1 });
            fputc(']', f);
        } else {
            json_string(f, merges[i]);
        }
    }
    fprintf(f, "]}}\n");
    if (fclose(f)) die(folder, "tokenizer.json");
    GgufStr template;
    const bool has_template = gguf_get_str(g, "tokenizer.chat_template", &template) == 1;
    f = create(folder, "tokenizer_config.json");
    fprintf(f, "{\"bos_token\": \"<bos>\", \"eos_token\": {\"content\": \"<eos>\"}, \"pad_token\": \"<pad>\"");
    if (has_template && pairs) {
        fprintf(f, ", \"chat_template\": ");
        json_string(f, template);
    }
    fprintf(f, "}\n");
    if (fclose(f)) die(folder, "tokenizer_config.json");
    if (has_template && !pairs) {
        f = create(folder, "chat_template.jinja");
        fwrite(template.s, 1, template.n, f);
        if (fclose(f)) die(folder, "chat_template.jinja");
    }
    free(types);
}

int main(int argc, char **argv) {
    const char *in = NULL, *out = NULL, *prefix = "model.language_model.";
    bool do_list = false, do_round = false, numbered = false, bf16 = false, extra = false;
    int n_shards = 1;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--list")) do_list = true;
        else if (!strcmp(argv[i], "--round")) do_round = true;
        else if (!strcmp(argv[i], "--numbered")) numbered = true;
        else if (!strcmp(argv[i], "--bf16")) bf16 = true;
        else if (!strcmp(argv[i], "--extra")) extra = true;
        else if (!strcmp(argv[i], "--shards") && i + 1 < argc) n_shards = atoi(argv[++i]);
        else if (!strcmp(argv[i], "--prefix") && i + 1 < argc) prefix = argv[++i];
        else if (!in) in = argv[i];
        else if (!out) out = argv[i];
        else die(argv[i], "unknown argument");
    }
    Gguf g;
    if (!in || (!out && !do_list) || n_shards < 1)
        die("arguments", "expected IN.gguf FOLDER; see the head of make_hf.c");
    if (gguf_open(&g, in) < 0) die(in, g.err);
    if (do_list) {
        list(&g);
    } else if (do_round) {
        round_vectors(&g, out);
    } else {
        if (mkdir(out, 0777) && errno != EEXIST) die(out, strerror(errno));
        if (extra) add_extra("model.vision_tower.patch_embedder.input_proj.weight", "F8_E4M3", "4,1,2,3,5,1", 120);
        for (size_t i = 0; i < g.n_tensors; i++) add_entry(&g.tensors[i], prefix, bf16);
        if (extra) add_extra("model.audio_tower.layers.0.mlp.up_proj.weight", "F64", "", 8);
        if (extra) add_extra("model.embed_vision.empty", "U8", "0,7", 0);
        for (int s = 0; s < n_shards; s++) {
            char name[64] = "model.safetensors";
            if (n_shards > 1) snprintf(name, sizeof name, "model-%05d-of-%05d.safetensors", s + 1, n_shards);
            write_shard(out, name, s, n_shards);
        }
        if (n_shards > 1 && !numbered) {
            FILE *f = create(out, "model.safetensors.index.json");
            fprintf(f, "{\"metadata\": {\"total_size\": 1}, \"weight_map\": {");
            for (int i = 0; i < n_entries; i++)
                fprintf(f, "%s\"%s\": \"model-%05d-of-%05d.safetensors\"", i ? ",\n" : "", entries[i].name,
                        entries[i].shard + 1, n_shards);
            fprintf(f, "}}\n");
            if (fclose(f)) die(out, "index");
        }
        write_config(&g, out);
        write_tokenizer(&g, out, n_shards % 2 == 1);
    }
    gguf_close(&g);
    return 0;
}
