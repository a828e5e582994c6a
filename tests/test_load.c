/* test_load.c - loading a model: split files, damaged data, real sizes, the output on stderr, and mutated files.
 *
 * Run from the top of the repository. Small random models of make_gguf are rewritten, opened by the binary or by a
 * child of this program, which must end with exit status 0, or with 1 and one error line.
 *
 * Environment: BUILD, CC, TMPDIR (see files.h), GEMMA4 (./gemma4), LONG=1 (10,000 mutations instead of 300), SEED
 * (1). */
#define _GNU_SOURCE
#define TESTING
#include "../gemma4.c"
#include "test.h"
#include "files.h"
#include "pty.h"

static const char *gemma4;
static const ModelOptions small = { .n_ctx = 64, .n_seqs = 1, .n_batch = STEP_ROWS, .n_logits = 1, .k_type = KV_F16,
                                   .v_type = KV_F16 };

// Runs the binary on a model for a few greedy tokens, with one more flag or NULL. Its output goes to the files stdout
// and stderr.
static int run_model(const char *path, const char *flag) {
    const char *argv[] = { gemma4, path, "-p", "a b", "--raw", "-n", "8", "-c", "64", "--temp", "0", "--ignore-eos",
                           flag, NULL };
    return run_program(argv, in_tmp("stdout"), in_tmp("stderr"));
}

static bool output_has(const char *file, const char *text) {
    char *s = text_of(in_tmp("%s", file));
    const bool has = strstr(s, text) != NULL;
    free(s);
    return has;
}

// The model must be refused with one line that contains all given texts.
static void check_refused(const char *what, const char *path, const char *flag, const char *code, const char *names) {
    const int status = run_model(path, flag);
    char *err = text_of(in_tmp("stderr")), *line = strstr(err, "gemma4: error: ");
    CHECK(status == 1 && line && strstr(line, code) && strstr(line, names) && strchr(line, '\n') == strrchr(err, '\n'),
          "%s: expected status 1 and one line with %s and '%s', got %d and: %s", what, code, names, status, err);
    free(err);
}

// ---- split models ------------------------------------------------------------------------------------------------

// Writes NAME-00001-of-0000N.gguf etc., with consecutive tensors in each part. Returns the first path.
static const char *write_parts(const char *from, const char *name, int n, bool first_is_empty) {
    for (int i = n - 1; i >= 0; i--) {
        Draft d = read_draft(from);
        const size_t parts = (size_t)(n - first_is_empty), all = d.n_tensors;
        for (size_t k = 0; k < all; k++)
            if ((int)(k * parts / all) + first_is_empty != i) d.tensors[k].name[0] = 0;
        for (size_t k = 0; k < d.n_keys && i > 0; k++) d.keys[k].name[0] = 0;
        draft_u16(&d, "split.no", (unsigned)i);
        draft_u16(&d, "split.count", (unsigned)n);
        draft_u16(&d, "split.tensors.count", (unsigned)all);
        write_draft(&d, in_tmp("%s-%05d-of-%05d.gguf", name, i + 1, n));
    }
    return in_tmp("%s-%05d-of-%05d.gguf", name, 1, n);
}

static void test_split(const char *whole) {
    CHECK(run_model(whole, NULL) == 0, "the whole model does not run");
    char *want = text_of(in_tmp("stdout"));
    CHECK(want[0] != 0, "the whole model writes nothing");
    for (int n = 2; n <= 5; n++) {
        const int status = run_model(write_parts(whole, "m", n, n % 2), NULL);
        char *got = text_of(in_tmp("stdout"));
        CHECK(status == 0 && !strcmp(got, want), "%d parts: exit status %d, and the text of the whole model: %s", n,
              status, strcmp(got, want) ? "no" : "yes");
        CHECK(!output_has("stderr", "split."), "split.* are reported as unknown keys");
        free(got);
    }
    free(want);
    check_refused("the second part", in_tmp("m-00002-of-00003.gguf"), NULL, "(E_SPLIT_NO ", "-00001-of-00003.gguf");
    remove(in_tmp("m-00003-of-00003.gguf"));
    check_refused("a missing part", in_tmp("m-00001-of-00003.gguf"), NULL, "(E_SPLIT_MISSING",
                  "m-00003-of-00003.gguf");
}

// ---- --check-tensors, unknown names ------------------------------------------------------------------------------

// Overwrites bytes of tensor `name` at an offset with v.
static const char *write_damaged(const char *from, const char *name, size_t at, uint16_t v) {
    Draft d = read_draft(from);
    DraftTensor *t = draft_tensor(&d, name);
    if (CHECK(t && at + 2 <= t->data.n, "%s: no byte %zu of tensor '%s'", from, at, name))
        memcpy(t->data.data + at, &v, 2);
    return write_draft(&d, in_tmp("damaged.gguf"));
}

static void test_check_tensors(const char *f16, const char *q8) {
    const char *files[] = { f16, q8 };
    for (int i = 0; i < 2; i++) {
        CHECK(run_model(files[i], "--check-tensors") == 0, "--check-tensors refuses a good model");
        CHECK(output_has("stderr", "# checked "), "--check-tensors says nothing");
        CHECK(run_model(files[i], NULL) == 0 && !output_has("stderr", "# checked "),
              "tensors are checked without the flag");
    }
    check_refused("Q8_0 scale Inf", write_damaged(q8, "blk.1.ffn_up.weight", 34 * 7, 0x7c00), "--check-tensors",
                  "(E_PAYLOAD)", "'blk.1.ffn_up.weight'");
    check_refused("Q8_0 scale Inf", in_tmp("damaged.gguf"), "--check-tensors", "block 7 of type Q8_0",
                  "elements 224 to");
    check_refused("Q8_0 scale NaN", write_damaged(q8, "token_embd.weight", 0, 0x7e00), "--check-tensors",
                  "block 0 of type Q8_0", "'token_embd.weight'");
    check_refused("F16 NaN", write_damaged(f16, "blk.3.attn_q.weight", 2 * 1000, 0xfe00), "--check-tensors",
                  "block 1000 of type F16", "'blk.3.attn_q.weight'");
    check_refused("F32 Inf", write_damaged(f16, "output_norm.weight", 4 * 63 + 2, 0x7f80), "--check-tensors",
                  "block 63 of type F32", "'output_norm.weight'");
}

static void test_unknown(const char *model) {
    Draft d = read_draft(model);
    for (int i = 0; i < 5; i++) {
        char name[64];
        snprintf(name, sizeof name, "extra.%d.weight", i);
        if (i != 1) draft_add(&d, name, 4);
    }
    static const char *const known[] = { "v.blk.0.attn_q.weight", "a.conv.weight", "mm.input.weight",
                                         "blk.0.ffn_up.input_scale" };
    for (int i = 0; i < 4; i++) draft_add(&d, known[i], 4);
    draft_u16(&d, "quantize.imatrix.chunks_count", 1);
    draft_u16(&d, "gemma4.vision.block_count", 1);
    draft_u16(&d, "other.key", 1);
    CHECK(run_model(write_draft(&d, in_tmp("unknown.gguf")), NULL) == 0, "unknown tensors: the model does not run");
    CHECK(output_has("stderr", "# 4 unused tensors: extra.0.weight, extra.2.weight, extra.3.weight, ...\n"),
          "unknown tensors are not named, or others with them");
    CHECK(output_has("stderr", "# 4 unused keys: synthetic.preset, synthetic.kind, synthetic.seed, ...\n"),
          "unknown keys are not named, or others with them");
    CHECK(run_model("models/gemma4-mini-q8_0.gguf", NULL) == 0 && !output_has("stderr", "unused"),
          "an ordinary model is said to have unknown parts");
}

// ---- keys of published files -----------------------------------------------------------------------------------------

#define STORY "Once upon a time, there was a little fox named Tom"
#define CUT "Once upon a time, there was a"
#define MINI_E "models/gemma4-mini-e-q8_0.gguf"

// Runs a trained model for 12 tokens. Returns the hash of the last logits; the text is in the file stdout. "": refused.
static const char *story(const char *path, bool greedy) {
    static char hash[20];
    const char *argv[] = { gemma4, path, "-v", "-t", "1", "-p", "Tell me a story about a fox.", "-n", "12", "-s", "1",
                           greedy ? "--temp" : NULL, "0", NULL };
    hash[0] = 0;
    if (run_program(argv, in_tmp("stdout"), in_tmp("stderr"))) return hash;
    char *err = text_of(in_tmp("stderr"));
    const char *at = strstr(err, "last logits ");
    if (at) snprintf(hash, sizeof hash, "%.16s", at + 12);
    free(err);
    return hash;
}

typedef struct {
    const char *key;
    int type;                 // of a number, GGUF_V_STR, or GGUF_V_ARRAY: of the i32 values number, 986 and 99999
    double number;
    const char *text, *prints, *says;      // a string; the answer, NULL: refused; words on stderr, NULL: no note
} KeyCase;

static const KeyCase key_cases[] = {
    { "tokenizer.ggml.model", GGUF_V_STR, 0, "llama", STORY, NULL },               // with pre gemma4, as Ollama writes it
    { "tokenizer.ggml.padding_token_id", GGUF_V_U32, 4294967295.0, NULL, STORY, "padding_token_id': 4294967295 is not" },
    { "tokenizer.ggml.mask_token_id", GGUF_V_U32, 262144, NULL, STORY, "mask_token_id': 262144 is not a token" },
    { "tokenizer.ggml.unknown_token_id", GGUF_V_I32, -1, NULL, STORY, "unknown_token_id': -1 is not a token" },
    { "tokenizer.ggml.eom_token_id", GGUF_V_U32, 986, NULL, CUT, NULL },
    { "tokenizer.ggml.eos_token_ids", GGUF_V_ARRAY, 1, NULL, CUT, "eos_token_ids': 99999 is not a token" },
    { "tokenizer.ggml.add_space_prefix", GGUF_V_BOOL, 1, NULL, STORY, "# 1 unused key: tokenizer.ggml.add_space_prefix" },
    { "tokenizer.ggml.add_bos_token", GGUF_V_BOOL, 0, NULL, STORY, NULL },
    { "gemma4.something", GGUF_V_U32, 3, NULL, STORY, "# 1 unused key: gemma4.something\n" },
    { "gemma4.something", GGUF_V_U32, 0, NULL, STORY, NULL },
    { "gemma4.vision.block_count", GGUF_V_U32, 3, NULL, STORY, NULL },
    { "gemma4.attention.causal", GGUF_V_BOOL, 0, NULL, NULL, "'gemma4.attention.causal': expected 1" },
    { "gemma4.attention.causal", GGUF_V_BOOL, 1, NULL, STORY, NULL },
    { "gemma4.attn_logit_softcapping", GGUF_V_F32, 50, NULL, NULL, "attn_logit_softcapping" },
    { "gemma4.hidden_activation", GGUF_V_STR, 0, "silu", NULL, "expected gelu_pytorch_tanh, got 'silu'" },
    { "gemma4.hidden_activation", GGUF_V_STR, 0, "gelu_pytorch_tanh", STORY, NULL },
    { "gemma4.rope.scaling.type", GGUF_V_STR, 0, "yarn", NULL, "expected none or linear, got 'yarn'" },
    { "gemma4.rope.scaling.type", GGUF_V_STR, 0, "none", STORY, NULL },
    { "gemma4.rope.scaling.factor", GGUF_V_F32, -2, NULL, NULL, "rope.scaling.factor': expected 0 to" },
    { "general.sampling.xtc_probability", GGUF_V_F32, 0.5, NULL, STORY, "# 1 unused key: general.sampling.xtc_prob" },
    { "general.sampling.top_k", GGUF_V_I32, -1, NULL, STORY, NULL },
    { "general.sampling.top_k", GGUF_V_I32, -2, NULL, NULL, "general.sampling.top_k" },
    { "general.type", GGUF_V_STR, 0, "adapter", NULL, "a LoRA adapter" },
    { "general.type", GGUF_V_STR, 0, "mmproj", NULL, "a projector of images" },
    { "general.type", GGUF_V_STR, 0, "imatrix", NULL, "an importance matrix" },
    { "general.architecture", GGUF_V_STR, 0, "clip", NULL, "a projector of images" },
};

static void set_key(Draft *d, const KeyCase *c) {
    Bytes *b = &draft_key(d, c->key)->value;
    b->n = 0;
    put_u32(b, (uint32_t)c->type);
    if (c->type == GGUF_V_STR) put_text(b, c->text);
    if (c->type == GGUF_V_F32) put(b, &(float){ (float)c->number }, 4);
    if (c->type == GGUF_V_BOOL) put(b, &(uint8_t){ c->number != 0 }, 1);
    if (c->type == GGUF_V_U32) put_u32(b, (uint32_t)c->number);
    if (c->type == GGUF_V_I32) put_u32(b, (uint32_t)(int32_t)c->number);
    if (c->type != GGUF_V_ARRAY) return;
    put_u32(b, GGUF_V_I32);
    put_u64(b, 3);
    put_u32(b, (uint32_t)c->number);
    put_u32(b, 986);                                   // " little", the ninth token of the story
    put_u32(b, 99999);
}

static const char *with_key(const KeyCase *c) {
    Draft d = read_draft(MINI_E);
    set_key(&d, &(KeyCase){ .key = "tokenizer.ggml.pre", .type = GGUF_V_STR, .text = "gemma4" });
    set_key(&d, c);
    return write_draft(&d, in_tmp("keys.gguf"));
}

static void test_keys(void) {
    for (size_t i = 0; i < sizeof key_cases / sizeof *key_cases; i++) {
        const KeyCase *c = &key_cases[i];
        const bool ran = *story(with_key(c), true) != 0;
        char *out = text_of(in_tmp("stdout")), *err = text_of(in_tmp("stderr"));
        out[strcspn(out, "\n")] = 0;
        CHECK(ran == (c->prints != NULL) && (!ran || !strcmp(out, c->prints)), "case %zu, %s: got '%s' and: %s", i,
              c->key, out, err);
        CHECK(c->says ? strstr(err, c->says) != NULL : !strstr(err, "unused") && !strstr(err, "# note"),
              "case %zu, %s: expected '%s' in: %s", i, c->key, c->says ? c->says : "no note", err);
        free(out);
        free(err);
    }
    char hash[20];
    static const KeyCase scaled[] = { { "gemma4.rope.scaling.factor", GGUF_V_F32, 8, NULL, NULL, NULL },
                                      { "gemma4.rope.scale_linear", GGUF_V_F32, 8, NULL, NULL, NULL } };
    Draft d = read_draft(MINI_E);
    DraftTensor *t = draft_tensor(&d, "rope_freqs.weight");
    for (size_t i = 0; i < t->data.n; i += 4) {
        float f;
        memcpy(&f, t->data.data + i, 4);
        if (f < 1e20f) f *= 8;
        memcpy(t->data.data + i, &f, 4);
    }
    snprintf(hash, sizeof hash, "%s", story(write_draft(&d, in_tmp("keys.gguf")), true));
    CHECK(strcmp(hash, story(MINI_E, true)), "frequencies divided by 8 change nothing");
    for (int i = 0; i < 2; i++)
        CHECK(!strcmp(hash, story(with_key(&scaled[i]), true)), "%s: other logits than with scaled rope_freqs",
              scaled[i].key);
    KeyCase hot = { "general.sampling.temp", GGUF_V_F32, 5, NULL, NULL, NULL };
    d = read_draft(MINI_E);
    set_key(&d, &hot);
    hot.key = "general.sampling.min_p", hot.number = 1;
    set_key(&d, &hot);
    story(write_draft(&d, in_tmp("keys.gguf")), false);
    CHECK(output_has("stdout", STORY), "min_p 1 of the file at temperature 5: another text than that of greedy sampling");
}

static void test_damaged_downloads(void) {
    static const struct { const char *bytes; size_t n; const char *says; } files[] = {
        { "version https://git-lfs.github.com/spec/v1\noid sha256:0\n", 53, "a Git LFS pointer" },
        { "<!doctype html><html><body>Not found</body></html>", 50, "a web page" },
        { "PK\3\4" "0123456789012345678901234567", 32, "a zip archive" },
        { "\2\0\0\0\x13\0\0\0blk.0.attn_q.weight\0\0\0\0\0", 32, "an importance matrix" },
        { "something else, of no known kind", 32, "E_MAGIC" } };
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        FILE *f = must(fopen(in_tmp("keys.gguf"), "wb"));
        fwrite(files[i].bytes, 1, files[i].n, f);
        fclose(f);
        CHECK(!*story(in_tmp("keys.gguf"), true) && output_has("stderr", files[i].says), "not called %s", files[i].says);
    }
    Draft d = read_draft(MINI_E);
    fill(draft_tensor(&d, "blk.6.ffn_norm.weight"), 0);
    story(write_draft(&d, in_tmp("keys.gguf")), true);
    CHECK(output_has("stderr", "'blk.6.ffn_norm.weight': expected the weights of a norm, got zeros"), "zeros");
    d = read_draft(MINI_E);
    fill(draft_add(&d, "blk.0.attn_q.bias", 4), 1);
    story(write_draft(&d, in_tmp("keys.gguf")), true);
    CHECK(output_has("stderr", "'blk.0.attn_q.bias': biases are not supported"), "a bias is accepted");
    d = read_draft(MINI_E);
    draft_add(&d, "blk.0.attn_q.bias", 4);
    CHECK(*story(write_draft(&d, in_tmp("keys.gguf")), true), "a bias of zeros is refused");
    d = read_draft(MINI_E);
    DraftTensor *t = draft_tensor(&d, "token_embd.weight"), *ple = draft_tensor(&d, "per_layer_token_embd.weight");
    t->ne[1] = ple->ne[1] = 4095;
    CHECK(*story(write_draft(&d, in_tmp("keys.gguf")), true) && output_has("stdout", STORY) &&
          output_has("stderr", "# note: 1 token has no row in token_embd.weight"), "a token without a row");
}

// ---- folders as published ------------------------------------------------------------------------------------------

static Bytes replaced(const char *text, size_t n, const char *from, const char *to) {  // every `from`
    Bytes b = { 0 };
    const size_t k = strlen(from);
    for (size_t i = 0; i < n; ) {
        const bool here = k && i + k <= n && !memcmp(text + i, from, k);
        put(&b, here ? to : text + i, here ? strlen(to) : 1);
        i += here ? k : 1;
    }
    return b;
}

// Replaces text in a file of the folder; in model.safetensors, in its head.
static void edit_folder(const char *file, const char *from, const char *to) {
    size_t n;
    const char *path = in_tmp("folder/%s", file);
    char *text = read_file(path, &n, "test");
    uint64_t head = 0;
    const bool tensors = strstr(file, "safetensors") != NULL;
    if (tensors) memcpy(&head, text, 8);
    const size_t skip = tensors ? 8 : 0, end = tensors ? 8 + (size_t)head : n;
    Bytes b = replaced(text + skip, end - skip, from, to);
    CHECK(b.n != end - skip || memcmp(b.data, text + skip, b.n), "%s has no '%s'", file, from);
    FILE *f = must(fopen(path, "wb"));
    head = b.n;
    if (tensors) fwrite(&head, 8, 1, f);
    fwrite(b.data, 1, b.n, f);
    fwrite(text + end, 1, n - end, f);
    CHECK(!fclose(f), "%s: %s", path, strerror(errno));
    free(b.data);
    free(text);
}

// Replaces each fused matrix of experts in the head of model.safetensors by one tensor for each of 8 experts and part.
static void split_experts(const char *name, int parts, const char *const *part_names, int rows, int cols) {
    for (int l = 0; l < 4; l++) {
        char from[256], key[128], *to = must(calloc(1, 1 << 14));
        snprintf(key, sizeof key, "\"model.language_model.layers.%d.experts.%s\": ", l, name);
        size_t n, total;
        char *text = read_file(in_tmp("folder/model.safetensors"), &n, "test");
        uint64_t begin = 0, end = 0;
        text[n - 1] = 0;
        const char *at = strstr(text + 8, key), *offsets = at ? strstr(at, "data_offsets\":[") : NULL;
        if (!CHECK(offsets && sscanf(offsets, "data_offsets\":[%" SCNu64 ",%" SCNu64, &begin, &end) == 2, "no %s", key))
            return;
        snprintf(from, sizeof from, "%.*s", (int)(strchr(at, '}') + 1 - at), at);
        total = (size_t)(end - begin) / (size_t)(8 * parts);
        for (int e = 0, k = 0; e < 8; e++)
            for (int i = 0; i < parts; i++, k++)
                sprintf(to + strlen(to), "%s\"model.language_model.layers.%d.experts.%d.%s.weight\": {\"dtype\":\"F16\","
                        "\"shape\":[%d,%d],\"data_offsets\":[%zu,%zu]}", k ? ", " : "", l, e, part_names[i], rows, cols,
                        (size_t)begin + (size_t)k * total, (size_t)begin + (size_t)(k + 1) * total);
        free(text);
        edit_folder("model.safetensors", from, to);
        free(to);
    }
}

static bool new_folder(const char *model) {
    char program[1024];
    snprintf(program, sizeof program, "%s/make_hf", getenv("BUILD") ? getenv("BUILD") : "build");
    const char *argv[] = { program, model, in_tmp("folder"), NULL };
    return !run_program(argv, in_tmp("stdout"), in_tmp("stderr"));
}

// Runs the folder. Returns the hash of the last logits; "": refused.
static const char *folder_hash(void) {
    static char hash[20];
    hash[0] = 0;
    if (run_model(in_tmp("folder"), "-v")) return hash;
    char *err = text_of(in_tmp("stderr"));
    const char *at = strstr(err, "last logits ");
    if (at) snprintf(hash, sizeof hash, "%.16s", at + 12);
    free(err);
    return hash;
}

typedef struct { const char *file, *from, *to, *says; bool refused; } FolderCase;    // says NULL: the same, no note

#define CONFIG "config.json"
#define TENSORS "model.safetensors"
static const FolderCase folder_cases[] = {
    { TENSORS, "model.language_model.", "base_model.model.model.language_model.", NULL, false },
    { TENSORS, "model.language_model.", "_orig_mod.module.model.", NULL, false },
    { TENSORS, "model.language_model.", "", NULL, false },
    { TENSORS, "layers.1.", "layers.1._orig_mod.", NULL, false },
    { TENSORS, ".experts.", ".moe.", NULL, false },
    { TENSORS, ".experts.", ".mlp.experts.", NULL, false },
    { TENSORS, ".router.per_expert_scale", ".moe.per_expert_scale", NULL, false },
    { TENSORS, ".experts.down_proj\"", ".experts.switch_glu.down_proj.weight\"", NULL, false },
    { TENSORS, ".layer_scalar\"", ".layer_scalar.weight\"", NULL, false },
    { TENSORS, "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.q_proj.lora_A.weight", "merge the LoRA", true },
    { TENSORS, "layers.2.mlp.up_proj.weight", "vision_tower.2.weight", "'layers.2.mlp.up_proj.weight' ('blk.2.ffn_up", true },
    { CONFIG, "\"rms_norm_eps\": 1e-06,", "", NULL, false },
    { CONFIG, "\"tie_word_embeddings\": true,", "", NULL, false },
    { CONFIG, "\"text_config\": {", "\"text_config\": { \"hidden_activation\": \"silu\",", "gelu_pytorch_tanh", true },
    { CONFIG, "\"text_config\": {", "\"text_config\": { \"attention_bias\": true,", "attention_bias", true },
    { CONFIG, "\"text_config\": {", "\"text_config\": { \"attention_bias\": false, \"new\": null,", NULL, false },
    { CONFIG, "\"text_config\": {", "\"text_config\": { \"use_bidirectional_attention\": \"all\",", "vision", true },
    { CONFIG, "\"text_config\": {", "\"text_config\": { \"rope_scaling\": {\"factor\": 8},", "rope_scaling", true },
    { CONFIG, "\"text_config\": {", "\"text_config\": { \"new_thing\": 7,", "# config.json: 1 unused member: new_thing\n", false },
    { "generation_config.json", "\"top_k\": 64", "\"top_k\": -1", NULL, false },
    { "generation_config.json", "\"top_k\": 64", "\"num_beams\": 4", "1 unused member: num_beams", false },
    { "generation_config.json", "\"top_k\": 64", "\"min_p\": 2", "'min_p': expected 0 to 1, got 2", true },
    { "tokenizer.json", "\"added_tokens\": [", "\"added_tokens\": [{\"id\": 999999, \"content\": \"<far>\"},", "no row in the embedding", false },
    { CONFIG, "{", "\xef\xbb\xbf{", "config.json", true },           // every brace: no JSON any more
};

static void test_folders(const char *model) {
    char base[20], scaled[20];
    if (!new_folder(model)) {
        SKIP("no make_hf to run: folders as published");
        return;
    }
    snprintf(base, sizeof base, "%s", folder_hash());
    CHECK(*base, "the folder of %s does not run", model);
    for (size_t i = 0; i < sizeof folder_cases / sizeof *folder_cases; i++) {
        const FolderCase *c = &folder_cases[i];
        new_folder(model);
        edit_folder(c->file, c->from, c->to);
        const char *hash = folder_hash();
        char *err = text_of(in_tmp("stderr"));
        CHECK(!strcmp(hash, c->refused ? "" : base), "folder case %zu, %s: got '%s' and: %s", i, c->to, hash, err);
        CHECK(c->says ? strstr(err, c->says) != NULL : !strstr(err, "unused") && !strstr(err, "# note"),
              "folder case %zu, %s: expected '%s' in: %s", i, c->to, c->says ? c->says : "no note", err);
        free(err);
    }
    new_folder(model);
    split_experts("gate_up_proj", 2, (const char *const[]){ "gate_proj", "up_proj" }, 32, 64);
    split_experts("down_proj", 1, (const char *const[]){ "down_proj" }, 64, 32);
    CHECK(!strcmp(folder_hash(), base), "experts one by one: other logits, or refused");
    edit_folder(TENSORS, "experts.5.down_proj", "experts.9.down_proj");
    CHECK(!*folder_hash() && output_has("stderr", "experts.9.down_proj"), "a missing expert is accepted");

    // global layers as transformers 5.15 and later write them
    new_folder(model);
    edit_folder(CONFIG, "\"global_head_dim\": 512,", "");
    edit_folder(CONFIG, "\"num_global_key_value_heads\": 1,", "");
    CHECK(!*folder_hash() && output_has("stderr", "layers.1.self_attn.k_proj.weight"),
          "global layers with the KV heads of sliding ones are accepted");
    edit_folder(CONFIG, "\"text_config\": {", "\"text_config\": { \"per_layer_config\": {\"01\": {\"head_dim\": 512, "
                "\"num_key_value_heads\": 1}, \"3\": {\"head_dim\": 512, \"num_key_value_heads\": 1}},");
    CHECK(!strcmp(folder_hash(), base), "per_layer_config: other logits, or refused");
    edit_folder(CONFIG, "\"num_key_value_heads\": 1}", "\"sliding_window\": 1}");
    CHECK(!*folder_hash() && output_has("stderr", "'per_layer_config': layer 1: 'sliding_window'"),
          "per_layer_config with another window is accepted");

    // RoPE: the factor of a folder and of a GGUF file do the same
    new_folder(model);
    edit_folder(CONFIG, "\"rope_type\": \"proportional\",", "\"rope_type\": \"proportional\", \"factor\": 8.0,");
    snprintf(scaled, sizeof scaled, "%s", folder_hash());
    CHECK(*scaled && strcmp(scaled, base), "a factor of 8 changes nothing");
    Draft d = read_draft(model);
    set_key(&d, &(KeyCase){ .key = "gemma4.rope.scaling.factor", .type = GGUF_V_F32, .number = 8 });
    CHECK(!run_model(write_draft(&d, in_tmp("keys.gguf")), "-v") && output_has("stderr", scaled),
          "a factor of 8: other logits in a folder than in a file");

    // the part of the pairs that rotate: half of them in a folder, the same in the factors of a file
    new_folder(model);
    edit_folder(CONFIG, "\"partial_rotary_factor\": 0.25", "\"partial_rotary_factor\": 0.5");
    snprintf(scaled, sizeof scaled, "%s", folder_hash());
    CHECK(*scaled && strcmp(scaled, base), "a partial_rotary_factor of 0.5 changes nothing");
    d = read_draft(model);
    DraftTensor *factors = draft_tensor(&d, "rope_freqs.weight");
    for (size_t i = 0; i < factors->data.n / 8; i++) memcpy(factors->data.data + 4 * i, &(float){ 1 }, 4);
    CHECK(!run_model(write_draft(&d, in_tmp("keys.gguf")), "-v") && output_has("stderr", scaled),
          "a partial_rotary_factor of 0.5: other logits than in a file that rotates half of the pairs");

    // the soft-cap may be absent, and end ids and greedy sampling come from either file
    new_folder(model);
    edit_folder(CONFIG, "\"final_logit_softcapping\": 30.0", "\"final_logit_softcapping\": null");
    CHECK(strcmp(folder_hash(), base) && *folder_hash(), "no soft-cap: the logits of a cap of 30, or refused");
    new_folder(model);
    edit_folder("generation_config.json", "\"temperature\": 1.0", "\"do_sample\": false, \"repetition_penalty\": 1.5");
    const char *argv[] = { gemma4, in_tmp("folder"), "-v", "-p", "a b", "--raw", "-n", "2", "-c", "64", NULL };
    CHECK(!run_program(argv, in_tmp("stdout"), in_tmp("stderr")) &&
          output_has("stderr", "# sampling: penalties (repeat 1.5, frequency 0, presence 0), greedy"),
          "do_sample false and a penalty are not followed");
}

// ---- limits of control groups --------------------------------------------------------------------------------------

static void put_file(const char *name, const char *text) {             // in a folder that stands for /
    char path[700];
    snprintf(path, sizeof path, "%s", in_tmp("root/%s", name));
    for (char *slash = path + 1; (slash = strchr(slash, '/')); slash++) {
        *slash = 0;
        mkdir(path, 0700);
        *slash = '/';
    }
    FILE *f = must(fopen(path, "w"));
    fputs(text, f);
    fclose(f);
}

static void check_limits(const char *what, size_t room, size_t memory, double cores) {
    char root[600];
    snprintf(root, sizeof root, "%s", in_tmp("root"));
    const GroupLimits got = group_limits(root);
    CHECK(got.room == room && got.memory == memory && (got.cores == cores),
          "%s: expected %zu, %zu, %g, got %zu, %zu, %g", what, room, memory, cores, got.room, got.memory, got.cores);
}

static void test_group_limits(void) {
    check_limits("no groups", SIZE_MAX, SIZE_MAX, INFINITY);
    put_file("proc/self/cgroup", "0::/pod/box\n");
    put_file("proc/self/mountinfo", "31 23 0:28 / /proc rw - proc proc rw\n"
             "41 31 0:38 / /cg rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n");
    check_limits("groups without limits", SIZE_MAX, SIZE_MAX, INFINITY);
    put_file("cg/pod/box/memory.max", "max\n");
    put_file("cg/pod/box/cpu.max", "max 100000\n");
    check_limits("version 2, max", SIZE_MAX, SIZE_MAX, INFINITY);
    put_file("cg/pod/memory.max", "1000000\n");
    put_file("cg/pod/memory.current", "700000\n");
    put_file("cg/pod/memory.stat", "anon 1\nfile 600000\ninactive_file 200000\nactive_file 100000\n");
    put_file("cg/pod/cpu.max", "150000 100000\n");
    check_limits("version 2, the group around it", 600000, 1000000, 1.5);
    put_file("cg/pod/box/memory.max", "500000\n");
    put_file("cg/pod/box/memory.current", "600000\n");
    check_limits("version 2, full", 0, 500000, 1.5);
    put_file("proc/self/mountinfo", "41 31 0:38 /elsewhere /cg rw - cgroup2 cgroup2 rw\n");
    put_file("cg/memory.max", "4096\n");
    check_limits("a path that is not mounted", 4096, 4096, INFINITY);
    put_file("proc/self/cgroup", "5:memory:/a/b\n4:cpu,cpuacct:/c\n3:cpuset:/x\n0::/\n");
    put_file("proc/self/mountinfo", "35 31 0:32 /a /v1/memory rw - cgroup cgroup rw,memory\n"
             "32 31 0:29 / /v1/cpu rw - cgroup cgroup rw,cpu,cpuacct\n");
    put_file("v1/memory/b/memory.limit_in_bytes", "40000\n");
    put_file("v1/memory/b/memory.usage_in_bytes", "30000\n");
    put_file("v1/memory/b/memory.stat", "active_file 9\ntotal_inactive_file 5000\ntotal_active_file 1000\n");
    put_file("v1/memory/memory.limit_in_bytes", "9223372036854771712\n");
    put_file("v1/cpu/c/cpu.cfs_quota_us", "50000\n");
    put_file("v1/cpu/c/cpu.cfs_period_us", "100000\n");
    put_file("v1/cpu/cpu.cfs_quota_us", "-1\n");
    check_limits("version 1", 16000, 40000, 0.5);
}

// ---- texts -----------------------------------------------------------------------------------------------------------

static void test_texts(void) {
    static const struct { const char *bytes; size_t n; const char *text; } cases[] = {     // text NULL: refused
        { "abc", 3, "abc" }, { "\xef\xbb\xbf" "abc", 6, "abc" }, { "\xff\xfe" "a\0\x3d\xd8\x00\xde", 8, "a\xf0\x9f\x98\x80" },
        { "\xfe\xff" "\0a\x20\xac", 6, "a\xe2\x82\xac" }, { "\xff\xfe\x3d\xd8", 4, "\xef\xbf\xbd" },
        { "\xff\xfe" "a\0b", 5, NULL }, { "a\0b\0c\0", 6, NULL }, { "\0a\0b\0c", 6, NULL }, { "", 0, "" } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        FILE *f = must(fopen(in_tmp("text"), "wb"));
        fwrite(cases[i].bytes, 1, cases[i].n, f);
        fclose(f);
        const char *argv[] = { gemma4, "models/gemma4-mini-e-q8_0.gguf", "-f", in_tmp("text"), "-n", "1", NULL };
        if (!cases[i].text) {
            CHECK(run_program(argv, in_tmp("stdout"), in_tmp("stderr")) == 1 && output_has("stderr", "UTF-16"),
                  "text %zu: not refused as UTF-16", i);
            continue;
        }
        size_t n = 0;
        char *text = read_text(in_tmp("text"), &n, "test");
        CHECK(n == strlen(cases[i].text) && !memcmp(text, cases[i].text, n), "text %zu: got %zu bytes: %.*s", i, n, (int)n,
              text);
        free(text);
    }
}

// ---- the table of check ----

// The line of a name shows a NaN or Inf of one layer, whatever the other values and layers are.
static void test_nan_stays(void) {
    float ones[] = { 1, 1, 1 }, nan[] = { 1, NAN, 2 }, tenth[] = { 1, 1.1f, 1 }, zeros[] = { 0, 0, 0 };
    Checkpoint a[] = { { "Qcur_pos", 0, 1, 3, ones }, { "Qcur_pos", 1, 1, 3, ones }, { "Qcur_pos", 2, 1, 3, ones },
                       { "attn_out", 0, 1, 3, zeros }, { "attn_out", 1, 1, 3, ones },
                       { "l_out", 0, 1, 3, zeros }, { "l_out", 1, 1, 3, ones } };
    Checkpoint b[] = { { "Qcur_pos", 0, 1, 3, ones }, { "Qcur_pos", 1, 1, 3, nan }, { "Qcur_pos", 2, 1, 3, tenth },
                       { "attn_out", 0, 1, 3, zeros }, { "attn_out", 1, 1, 3, tenth },
                       { "l_out", 0, 1, 3, ones }, { "l_out", 1, 1, 3, tenth } };
    Model x = { .checkpoints = a, .n_checkpoints = 7, .ops = cpu_ops() }, y = x;
    y.checkpoints = b;
    fflush(stdout);
    const pid_t child = fork();
    if (!child) {
        const int out = open(in_tmp("stdout"), O_WRONLY | O_CREAT | O_TRUNC, 0600);
        if (out < 0 || dup2(out, 1) < 0) _exit(126);
        const bool good = check_compare(&x, &y, "");
        fflush(stdout);
        _exit(good);
    }
    int status = -1;
    while (child > 0 && waitpid(child, &status, 0) < 0 && errno == EINTR) {}
    char *got = text_of(in_tmp("stdout"));
    CHECK(WIFEXITED(status) && !WEXITSTATUS(status), "a NaN passes");
    CHECK(strstr(got, "| Qcur_pos           |     1 |        inf |   1.0e-03 |       inf |   2.0e-02 | FAIL   |"),
          "a NaN is lost: %s", got);
    CHECK(strstr(got, "| attn_out           |     1 |    5.8e-02 |   1.0e-03 |   5.8e-02 |   5.0e-02 | FAIL   |"),
          "0 of 0 is shown: %s", got);
    CHECK(strstr(got, "| l_out              |     0 |        inf |   1.0e-03 |       inf |   5.0e-02 | FAIL   |"),
          "1 of 0 is lost: %s", got);
    CHECK(strstr(got, "first difference: layer 0, l_out: inf in the median row"), "the first layer comes first: %s", got);
    free(got);
}

// ---- too little memory ---------------------------------------------------------------------------------------------

static size_t small_device;                            // its memory in bytes
static void *no_reserve(size_t bytes) {
    (void)bytes;
    return NULL;
}
static void device_memory_of(size_t *free_bytes, size_t *total) { *free_bytes = *total = small_device; }

static size_t device_bytes(const Tensor *w) { return w->in_host ? 0 : matrix_bytes(w); }
static const Card *shared_card(void) { return find_card("gb10"); }

// A backend with its own weight memory of this size, which reserves nothing.
static const Ops *device_of(size_t memory) {
    static Ops ops;
    ops = *cpu_ops();
    ops.weight_bytes = device_bytes;
    ops.reserve = no_reserve;
    ops.memory = device_memory_of;
    small_device = memory;
    return &ops;
}

// Loads in a child process on such a backend. Returns its line on stderr.
static char *refused_plan(const char *path, size_t memory, ModelOptions o) {
    const Ops *ops = device_of(memory);
    fflush(stdout);
    const pid_t child = fork();
    if (!child) {
        const int err = open(in_tmp("stderr"), O_WRONLY | O_CREAT | O_TRUNC, 0600);
        if (err < 0 || dup2(err, 2) < 0) _exit(126);
        Model *m = must(calloc(1, sizeof *m));
        load_model(m, path, ops, o, NULL);
        _exit(0);
    }
    int status = -1;
    while (child > 0 && waitpid(child, &status, 0) < 0 && errno == EINTR) {}
    char *err = text_of(in_tmp("stderr"));
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 1 && strchr(err, '\n') == strrchr(err, '\n'),
          "no room: status %d and: %s", status, err);
    return err;
}

static void test_no_room(const char *path) {
    ModelOptions o = small;
    o.n_ctx = 100000;
    const struct { size_t memory, vram; const char *says[4]; } cases[] = {
        { (size_t)1 << 40, 0, { "gemma4: error: out of memory: a context of 100000 needs ",
                                " of 992.00 GiB free; try -c 49984, -ctk q8_0, a smaller",
                                "", "" } },
        { 20 << 20, 0, { "out of memory: a context of 100000 needs ", "(weights 0.00, KV cache ",
                         " of 0.02 GiB free; try -c ",
                         ", a smaller model\n" } },
        { 1 << 10, 0, { "out of memory", "GiB free; try -ctk q8_0, a smaller model\n", "", "" } },
        { (size_t)1 << 40, 20 << 20, { "of 0.02 GiB allowed by --vram; try -c ",
                                       ", a larger --vram, a smaller model\n", "", "" } },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        o.memory = cases[i].vram;
        char *err = refused_plan(path, cases[i].memory, o);
        for (int k = 0; k < 4; k++)
            CHECK(strstr(err, cases[i].says[k]), "no room, case %zu: expected '%s' in: %s", i, cases[i].says[k], err);
        free(err);
    }
    const struct { const char *from, *says; } froms[] = {
        { "-p, -n or -d", "free; try a smaller -p, -n or -d, -ctk q8_0, a smaller model\n" }, { "",
                 "free; try -ctk q8_0, a smaller model\n" } };
    o.memory = 0;
    for (size_t i = 0; i < sizeof froms / sizeof *froms; i++) {
        o.ctx_from = froms[i].from;
        char *err = refused_plan(path, 20 << 20, o);
        CHECK(strstr(err, froms[i].says), "no room: expected '%s' in: %s", froms[i].says, err);
        free(err);
    }
    o.ctx_from = NULL;
    o.n_ctx = 64;
    o.k_type = o.v_type = KV_F32;
    char *err = refused_plan(path, 1 << 10, o);
    CHECK(strstr(err, "-ctk f16"), "no room: a smaller type is not named: %s", err);
    free(err);
}

// The per-layer table is in host memory if the context does not fit otherwise, and on the device if it does: the
// longest context is the same for every way to request it.
static void test_table(const char *path) {
    Model *m = must(calloc(1, sizeof *m));
    ModelOptions o = small;
    o.place = "ffn=GPU";
    plan_model(m, path, device_of((size_t)1 << 40), o, NULL);
    CHECK(!m->plan.in_host, "the table leaves a device that has room for it");
    o.memory = fit_context(m, 64, SIZE_MAX);
    const int most = largest_context(m, m->config.n_ctx_train, o.memory);
    CHECK(most > 64, "no context above 64 fits without the table");
    CHECK(fit_context(m, most, o.memory) <= o.memory && m->plan.in_host, "%d does not fit, or not without the table",
          most);
    CHECK(most == m->config.n_ctx_train || fit_context(m, most + TILE_SLOTS, o.memory) > o.memory, "more than %d fits",
          most);
    CHECK(fit_context(m, 64, o.memory) == o.memory && !m->plan.in_host, "the table does not come back");
    free_model(m);
    const struct { int n_ctx, is; } asked[] = { { 64, 64 }, { most, most }, { CTX_FIT, most } };
    for (size_t i = 0; i < sizeof asked / sizeof *asked; i++) {
        o.n_ctx = asked[i].n_ctx;
        plan_model(m, path, device_of((size_t)1 << 40), o, NULL);
        CHECK(m->options.n_ctx == asked[i].is && !m->plan.in_host == (asked[i].is == 64),
              "context %d: got %d, %zu bytes of the table in host memory", asked[i].n_ctx, m->options.n_ctx,
              m->plan.in_host);
        const int again = largest_context(m, m->config.n_ctx_train, o.memory);
        CHECK(again == most, "after a plan for %d: the longest is %d, then %d", o.n_ctx, most, again);
        free_model(m);
    }
    free(m);
}

// The weights that the plan puts into host memory: how many, of which layer on, bytes, and what a token reads of them.
typedef struct { int n; size_t bytes, token; int first_layer[2]; } HostWeights;        // [0] experts, [1] FFNs

static HostWeights in_host(const Model *m) {
    HostWeights h = { .first_layer = { 99, 99 } };
    for (int i = 0; i < m->binder->n_uploads; i++) {
        const Upload *u = &m->binder->uploads[i];
        if (!u->tensor.in_host) continue;
        const size_t bytes = matrix_bytes(&u->tensor);
        h.n++;
        h.bytes += bytes;
        h.token += u->tensor.n > 1 ? bytes / (size_t)u->tensor.n * (size_t)m->config.n_experts_used : bytes;
        int *first = &h.first_layer[u->tensor.n == 1];
        *first = min_int(*first, u->layer);
        CHECK(strstr(u->name.s, "ffn") && u->layer >= 0, "%.*s is in host memory", (int)u->name.n, u->name.s);
    }
    CHECK(m->plan.in_host == h.bytes && m->plan.from_host == h.token, "plan: %zu and %zu bytes in host memory, not %zu "
          "and %zu", m->plan.in_host, m->plan.from_host, h.bytes, h.token);
    return h;
}

// With ever less memory ever more weights are in host memory: experts, then FFNs, the last layers first, and never more
// than needed.
static void test_host_weights(const char *path, bool moe) {
    Model *m = must(calloc(1, sizeof *m));
    plan_model(m, path, device_of((size_t)1 << 40), small, NULL);
    const size_t all = fit_context(m, 64, SIZE_MAX), weights = m->plan.weights;
    const int n_layers = m->config.n_layers;
    CHECK(!in_host(m).n && !plan_limits(m).host_bytes, "weights leave a device that has room for them");
    int n = 0, reached = 0;
    for (size_t budget = all - 1, needed; ; budget = needed - 1) {
        needed = fit_context(m, 64, budget);
        if (needed > budget) break;
        const HostWeights h = in_host(m);
        n++;
        CHECK(h.n == n, "%zu bytes less: %d matrices are in host memory, not %d", all - budget, h.n, n);
        CHECK(m->plan.weights + h.bytes == weights && needed + h.bytes == all, "weights of %zu bytes are lost",
              weights - m->plan.weights - h.bytes);
        const int leaving = h.first_layer[h.first_layer[1] < 99];
        const int n_here = n - (moe && h.first_layer[1] < 99 ? 2 * n_layers : 0), each = h.first_layer[1] < 99 ? 3 : 2;
        CHECK(leaving == n_layers - 1 - (n_here - 1) / each, "%d matrices: layer %d leaves", n, leaving);
        CHECK(plan_limits(m).host_bytes >= h.bytes / (size_t)n_layers, "no room for the copies of a layer");
        reached |= h.first_layer[0] == 0 ? 1 : 0;
        reached |= h.first_layer[1] == 0 ? 2 : 0;
    }
    CHECK(n == n_layers * (moe ? 5 : 3) && reached == (moe ? 3 : 2), "%d matrices may leave", n);
    free_model(m);

    const struct { const char *place; int n, first; } places[] = {
        { "exps=CPU", moe ? 2 * n_layers : 0, 0 }, { "blk\\.(2|3)\\..*exps=CPU", moe ? 4 : 0, 2 },
        { "blk.1.ffn_down_exps=GPU,exps=CPU", moe ? 2 * n_layers - 1 : 0, 0 }, { "down=GPU,blk.1.ffn=CPU,", moe ? 4 : 2, 1 },
        { "token_embd=CPU", 0, 0 }, { "norm=CPU", 0, 0 } };
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        ModelOptions o = small;
        o.place = places[i].place;
        plan_model(m, path, device_of((size_t)1 << 40), o, NULL);
        const HostWeights h = in_host(m);
        CHECK(h.n == places[i].n, "-ot %s: %d matrices are in host memory, not %d", o.place, h.n, places[i].n);
        const int first = min_int(h.first_layer[0], h.first_layer[1]);
        CHECK(!h.n || first == places[i].first, "-ot %s: layer %d is the first", o.place, first);
        free_model(m);
    }
    free(m);
}

// A device that shares the host's memory: the table stays there, memory for the host is subtracted, and weights can be
// read again after their pages of the file were dropped.
static void test_shared_memory(const char *path) {
    Model *m = must(calloc(1, sizeof *m)), *plain = must(calloc(1, sizeof *plain));
    ModelOptions o = small;
    Ops ops = *device_of((size_t)1 << 30);
    ops.card = shared_card;
    plan_model(m, path, &ops, o, NULL);
    const size_t needed = fit_context(m, 64, SIZE_MAX), budget = plan_budget(m);
    CHECK(budget == ((size_t)1 << 30) / 32 * 31, "shared memory: a budget of %zu bytes", budget);
    CHECK(fit_context(m, 64, needed - 1) == needed && !m->plan.in_host,
          "shared memory: %zu bytes of the table leave it", m->plan.in_host);
    m->options.host_memory = (size_t)1 << 29;
    CHECK(plan_budget(m) == ((size_t)1 << 29) / 32 * 31,
          "shared memory: the host takes half, and the budget is %zu bytes",
          plan_budget(m));
    m->options.host_memory = (size_t)1 << 31;
    CHECK(!plan_budget(m), "shared memory: a budget of %zu bytes where the host takes all", plan_budget(m));
    free_model(m);

    ops = *cpu_ops();
    ops.card = shared_card;
    ops.memory = cpu_ops()->memory;
    load_model(plain, path, cpu_ops(), o, NULL);
    load_model(m, path, &ops, o, NULL);
    float *logits[2];
    for (int i = 0; i < 2; i++) {
        Model *of = i ? plain : m;
        of->step_rows[0] = (StepRow){ .token = 17, .output = true };
        step(of, &(StepSeg){ .seq = 0, .kind = SEG_CHAIN, .n = 1, .rows = of->step_rows }, 1);
        read_logits(of, 0, logits[i] = must(calloc((size_t)of->config.vocab, sizeof(float))));
    }
    CHECK(!memcmp(logits[0], logits[1], (size_t)m->config.vocab * sizeof(float)),
          "other logits after pages were dropped");
    for (int i = 0; i < 2; i++) {
        free(logits[i]);
        free_model(i ? plain : m);
    }
    free(m);
    free(plain);
}

// A file that is truncated while the program reads it, on one thread or several.
static void test_shorter(const char *model) {
    for (int n = 1; n <= 3; n += 2) {
        Draft d = read_draft(model);
        const char *path = write_draft(&d, in_tmp("shorter.gguf"));
        struct stat st;
        if (!CHECK(!stat(path, &st), "%s: %s", path, strerror(errno))) return;
        fflush(stdout);
        const pid_t child = fork();
        if (!child) {
            const int err = open(in_tmp("stderr"), O_WRONLY | O_CREAT | O_TRUNC, 0600);
            if (err < 0 || dup2(err, 2) < 0) _exit(126);
            use_threads(0);
            start_threads(n);
            Model *m = must(calloc(1, sizeof *m));
            load_model(m, path, cpu_ops(), small, NULL);
            if (truncate(path, st.st_size / 4)) _exit(127);
            read_weights(m, true);
            _exit(0);
        }
        int status = -1;
        while (child > 0 && waitpid(child, &status, 0) < 0 && errno == EINTR) {}
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 1 &&
              output_has("stderr", "gemma4: error: a model file was truncated"),
              "a file that got shorter, %d threads: status %d", n, status);
    }
}

// ---- the terminal ------------------------------------------------------------------------------------------------

// Runs the binary with stderr on a terminal. interrupt: Ctrl-C as soon as a progress bar is shown. Returns the exit
// status, or 1000 + signal; -1: no terminal available.
static int run_on_terminal(Pty *p, const char *const argv[], bool interrupt) {
    if (!pty_start(p, argv, PTY_ERR, NULL)) return -1;
    if (interrupt) {
        CHECK(pty_expect(p, "  ["), "no bar to interrupt: %s", p->shows);
        kill(p->pid, SIGINT);
    }
    return pty_end(p, NULL);
}

static void test_terminal(const char *model, const char *large) {
    static Pty p;
    const char *shows = p.shows;
    const char *argv[] = { gemma4, model, "-p", "a b", "--raw", "-n", "2", "-c", "64", NULL };
    int status = run_on_terminal(&p, argv, false);
    if (status == -1) {
        SKIP("no terminal to be had: the bar");
        return;
    }
    CHECK(status == 0, "on a terminal: exit status %d", status);
    CHECK(strstr(shows, "\r# Synthetic Gemma 4 mi  ") && strstr(shows, " MB  [>         ]  0 %"),
          "no bar while loading: %s", shows);
    CHECK(strstr(shows, "\r\033[K# 2 tokens, "), "the bar is still shown after the work: %s", shows);
    CHECK(run_model(model, NULL) == 0 && !output_has("stderr", "\r") && !output_has("stderr", "\033"),
          "a bar goes to a file");
    if (!large) return;
    const char *with_check[] = { gemma4, large, "-p", "a", "-c", "64", "--check-tensors", NULL };    // a file of 17 GB
    status = run_on_terminal(&p, with_check, true);
    CHECK(status == 1000 + SIGINT, "Ctrl-C while reading: expected the end by SIGINT, got status %d", status);
}

// ---- real size ---------------------------------------------------------------------------------------------------

// A 26B model with real shapes whose matrices are holes in the file: 16.8 GB that take 10 MB of disk. NULL: the file
// system has no holes.
static const char *test_true_size(void) {
    const char *path = in_tmp("26b.gguf");
    char program[1024];
    snprintf(program, sizeof program, "%s/make_gguf", getenv("BUILD") ? getenv("BUILD") : "build");
    const char *argv[] = { access(program, X_OK) ? in_tmp("make_gguf") : program, "--preset", "26b-a4b", "--quant",
                           "q4_k_m",
                           "--sparse", "--out", path, NULL };
    struct stat st;
    if (run_program(argv, in_tmp("stdout"), in_tmp("stderr")) || stat(path, &st) || (double)st.st_blocks * 512 > 1e9) {
        SKIP("no sparse files here: a 26B of true size");
        remove(path);
        return NULL;
    }
    // Published files of this type have 658 tensors: F32 392, Q4_K 192, Q5_0 32, Q8_0 28, Q6_K 14.
    static const struct { int type, n; } want[] = {
        { GGUF_F32, 392 }, { GGUF_Q4_K, 192 }, { GGUF_Q5_0, 32 }, { GGUF_Q8_0, 28 }, { GGUF_Q6_K, 14 } };
    const double start = seconds();
    Gguf g;
    if (!CHECK(gguf_open(&g, path) == 0, "26B: %s", g.err)) return NULL;
    const double opened = seconds() - start;
    CHECK(g.n_tensors == 658, "26B: expected 658 tensors, got %zu", g.n_tensors);
    for (int i = 0; i < 5; i++) {
        int n = 0;
        for (size_t k = 0; k < g.n_tensors; k++) n += g.tensors[k].type == want[i].type;
        CHECK(n == want[i].n, "26B: expected %d tensors of type %s, got %d", want[i].n, gguf_type_name(want[i].type),
              n);
    }
    CHECK(g.file_size > (size_t)16700000000 && g.file_size < (size_t)16900000000, "26B: %zu bytes", g.file_size);
    gguf_close(&g);
    fflush(stdout);
    const pid_t child = fork();
    if (!child) {
        const double from = seconds();
        Model *m = must(calloc(1, sizeof *m));
        Tokenizer t;
        load_model(m, path, cpu_ops(), small, NULL);
        const double bound = seconds() - from;
        load_tokenizer(&t, &m->gguf, m->config.vocab);
        printf("26B, %.1f GB: opened and checked in %.3f s; with config, binding and plan %.3f s; "
               "with the tokenizer %.3f "
               "s\n", (double)m->gguf.file_size / 1e9, opened, bound, seconds() - from);
        const bool ok = m->config.n_layers == 30 && m->config.n_experts == 128 && m->config.vocab == 262144;
        fflush(stdout);
        _exit(ok ? 0 : 3);
    }
    int status = -1;
    while (child > 0 && waitpid(child, &status, 0) < 0 && errno == EINTR) {}
    CHECK(status == 0, "26B: config, binding and tokenizer: status %d", status);
    return path;
}

// ---- mutations ---------------------------------------------------------------------------------------------------

static uint64_t rng_state;
static uint64_t rng(void) {
    rng_state = rng_state * 6364136223846793005u + 1442695040888963407u;
    return rng_state >> 29;
}

// A child process runs a mutated file like a user, for three tokens.
static void use_model(const char *path, bool check) {
    Model *m = must(calloc(1, sizeof *m));
    Tokenizer t;
    load_model(m, path, cpu_ops(), small, NULL);
    load_tokenizer(&t, &m->gguf, m->config.vocab);
    print_plan(m);
    read_weights(m, check);
    TokIds ids = { 0 };
    const TokChat chat = { .messages = { "[{\"role\":\"user\",\"content\":\"ab\"}]", 32 }, .add_cue = true };
    if (tok_chat(&t, &chat, &ids, NULL) < 0) die("-p: %s", t.err);
    if (ids.n > 40) die("the prompt has %zu tokens", ids.n);
    const AnswerOptions g = { .n_predict = 3, .ignore_eos = true, .think_budget = -1,
                                .sampling = { .seed = 1, .temperature = 1, .top_k = 64, .top_p = 0.95f, .repeat = 1 } };
    Session s;
    init_session(&s, m, &t, 0);
    if (!session_start(&s, &(Prompt){ .ids = ids.ids, .n = (int)ids.n, .n_head = 1 }, &g)) die("%s", s.err);
    if (!print_answer(&s, &(ShowOptions){ 0 })) die("%s", s.err);
    print_turn(&s.turn);
    free_session(&s);
    tok_ids_free(&ids);
    tok_free(&t);
    free_model(m);
    free(m);
}

// Changes a few bytes of the file, or truncates it. Most changes are in the first 4 KB and in the tensors' names,
// shapes and types.
static void mutate(uint8_t *file, size_t *size, size_t infos, size_t data) {
    static const uint64_t values[] = { 0, 1, 2, 3, 7, 31, 32, 255, 256, 65535, 0x7fffffff, 0x80000000, 0xffffffff,
                                       (uint64_t)1 << 32, (uint64_t)1 << 62, (uint64_t)1 << 63, UINT64_MAX,
                                       UINT64_MAX - 31 };
    for (size_t k = 1 + rng() % 4 / 3; k > 0; k--) {
        const unsigned where = (unsigned)(rng() % 16);
        size_t at = where < 7 ? rng() % 4096 : where < 12 ? infos + rng() % (data - infos)
                                                          : rng() % (where < 14 ? data : *size);
        if (at + 8 > *size) at = *size - 8;
        const uint64_t value = values[rng() % (sizeof values / sizeof *values)];
        switch (rng() % 5) {
        case 0: file[at] ^= (uint8_t)(1 << rng() % 8); break;
        case 1: file[at] = (uint8_t)rng(); break;
        case 2: memcpy(file + at, &value, 4); break;
        case 3: memcpy(file + at, &value, 8); break;
        default: memmove(file + at, file + rng() % (*size - 8), 8); break;
        }
    }
    if (rng() % 30 == 0) *size = 8 + rng() % (*size - 8);
}

static void test_mutations(const char *const *models, int n_models, int n) {
    size_t accepted = 0, refused = 0;
    for (int k = 0; k < n_models; k++) {
        Gguf g;
        if (!CHECK(gguf_open(&g, models[k]) == 0, "%s: %s", models[k], g.err)) continue;
        const size_t infos = (size_t)((const uint8_t *)g.tensors[0].name.s - g.meta), data = g.data_start;
        gguf_close(&g);
        size_t whole = 0;
        uint8_t *good = read_file(models[k], &whole, "test"), *file = must(malloc(whole));
        const char *path = in_tmp("mutant.gguf"), *err_path = in_tmp("stderr");
        for (int i = k; i < n; i += n_models) {
            size_t size = whole;
            rng_state = (getenv("SEED") ? strtoull(getenv("SEED"), NULL, 10) : 1) * 1000003 + (uint64_t)i;
            for (int j = 0; j < 4; j++) rng();
            memcpy(file, good, whole);
            mutate(file, &size, infos, data);
            FILE *f = must(fopen(path, "wb"));
            const bool ok = fwrite(file, 1, size, f) == size;
            if (!CHECK(!fclose(f) && ok, "%s: %s", path, strerror(errno))) break;
            fflush(stdout);
            const pid_t child = fork();
            if (!child) {
                const int err = open(err_path, O_WRONLY | O_CREAT | O_TRUNC, 0600), null = open("/dev/null", O_WRONLY);
                if (err < 0 || null < 0 || dup2(err, 2) < 0 || dup2(null, 1) < 0) _exit(126);
                alarm(60);
                use_model(path, i % 4 == 0);
                _exit(0);
            }
            int status = -1;
            while (child > 0 && waitpid(child, &status, 0) < 0 && errno == EINTR) {}
            char *err = text_of(err_path), *error = strstr(err, "gemma4: error: ");
            const bool fine = status == 0 ? !error : WIFEXITED(status) && WEXITSTATUS(status) == 1 && error &&
                              strchr(error, '\n') == strrchr(err, '\n');
            CHECK(fine, "mutation %d of %s: status %d, stderr: %s", i, models[k], status, err);
            status == 0 ? accepted++ : refused++;
            free(err);
        }
        free(file);
        free(good);
    }
    printf("%zu mutations: %zu ran, %zu refused\n", accepted + refused, accepted, refused);
    CHECK(accepted && refused, "mutations: %zu ran, %zu refused: both should occur", accepted, refused);
}

int main(void) {
    make_tmp();
    gemma4 = getenv("GEMMA4") ? getenv("GEMMA4") : "./gemma4";
    start_threads(1);
    static const char *const presets[] = { "micro-dense", "micro-moe", "micro-e" }, *const quants[] = { "f16", "q8_0" };
    char models[6][1024];
    const char *list[6];
    for (int i = 0; i < 6; i++) {
        char name[32];
        snprintf(name, sizeof name, "%s-%s", presets[i % 3], quants[i / 3]);
        snprintf(models[i], sizeof models[i], "%s", make_model(name, presets[i % 3], quants[i / 3], NULL));
        list[i] = models[i];
    }
    test_nan_stays();
    test_group_limits();
    test_no_room(models[1]);
    test_table(models[2]);
    test_host_weights(models[0], false);
    test_host_weights(models[1], true);
    test_shared_memory(models[2]);
    test_shorter(models[1]);
    const char *large = test_true_size();
    if (access(gemma4, X_OK)) {
        SKIP("no gemma4 to run: split models, --check-tensors, unknown names, the terminal");
    } else {
        char path[1024] = "";
        if (large) snprintf(path, sizeof path, "%s", large);
        for (int i = 0; i < 3; i++) test_split(models[i]);
        test_check_tensors(models[0], models[3]);
        test_unknown(models[1]);
        test_keys();
        test_damaged_downloads();
        test_folders(models[1]);
        test_texts();
        test_terminal(models[0], path[0] ? path : NULL);
    }
    const char *is_long = getenv("LONG");
    test_mutations(list, 6, is_long && strcmp(is_long, "0") ? 10000 : 300);
    return test_done("load");
}
