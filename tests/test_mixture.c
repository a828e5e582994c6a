/* test_mixture.c - parts/convert.h [2]: the type that `gemma4 quantize` gives to each tensor, for the published models.
 *
 * The tensors of each model are listed from its dimensions and sent through mixture_type in the order of a file. The
 * counts per type are those of published Q4_K_M files (12B, 26B-A4B and E4B); the other lists test each rule with
 * shapes for which it decides. */
#define TESTING
#include "../gemma4.c"
#include "test.h"

typedef struct { int n_layers, period, dim, n_heads, kv_swa, kv_full, ffn, experts, expert_dim,
                 ple; bool k_eq_v; } Shape;

static GgufTensor tensors[4096];
static char names[4096][80];
static int n_tensors;

static void add(const char *name, int layer, int type, int n_dims, uint64_t ne0, uint64_t ne1) {
    GgufTensor *t = &tensors[n_tensors];
    if (layer < 0) snprintf(names[n_tensors], sizeof *names, "%s", name);
    else snprintf(names[n_tensors], sizeof *names, "blk.%d.%s", layer, name);
    *t = (GgufTensor){ .name = { names[n_tensors], strlen(names[n_tensors]) }, .type = type, .n_dims = n_dims,
                       .ne = { ne0, ne1, 1, 1 } };
    n_tensors++;
}
static void vector(const char *name, int layer) { add(name, layer, GGUF_F32, 1, 256, 1); }
static void matrix(const char *name, int layer, int cols, int rows) {
    add(name, layer, GGUF_BF16, 2, (uint64_t)cols, (uint64_t)rows);
}

// The tensors of a model as a converter writes them: not in the order of a quantised file.
static void list_model(const Shape *s) {
    n_tensors = 0;
    matrix("token_embd.weight", -1, s->dim, 262144);
    vector("rope_freqs.weight", -1);
    for (int l = 0; l < s->n_layers; l++) {
        const bool full = l % s->period == s->period - 1;
        const int hd = full ? 512 : 256, kv = (full ? s->kv_full : s->kv_swa) * hd;
        matrix("attn_q.weight", l, s->dim, s->n_heads * hd);
        matrix("attn_k.weight", l, s->dim, kv);
        if (!full || !s->k_eq_v) matrix("attn_v.weight", l, s->dim, kv);
        matrix("attn_output.weight", l, s->n_heads * hd, s->dim);
        matrix("ffn_gate.weight", l, s->dim, s->ffn);
        matrix("ffn_up.weight", l, s->dim, s->ffn);
        matrix("ffn_down.weight", l, s->ffn, s->dim);
        static const char *const norms[] = { "attn_norm", "attn_q_norm", "attn_k_norm", "post_attention_norm",
                                             "ffn_norm",
                                             "post_ffw_norm", "layer_output_scale" };
        char name[64];
        for (int i = 0; i < 7; i++) {
            snprintf(name, sizeof name, "%s.weight", norms[i]);
            vector(name, l);
        }
        if (s->experts) {
            add("ffn_gate_inp.weight", l, GGUF_F32, 2, (uint64_t)s->dim, (uint64_t)s->experts);
            vector("ffn_gate_inp.scale", l);
            vector("ffn_down_exps.scale", l);
            vector("pre_ffw_norm_2.weight", l);
            vector("post_ffw_norm_1.weight", l);
            vector("post_ffw_norm_2.weight", l);
            matrix("ffn_gate_up_exps.weight", l, s->dim, 2 * s->expert_dim);
            matrix("ffn_down_exps.weight", l, s->expert_dim, s->dim);
        }
        if (s->ple) {
            matrix("inp_gate.weight", l, s->dim, s->ple);
            matrix("proj.weight", l, s->ple, s->dim);
            vector("post_norm.weight", l);
        }
    }
    vector("output_norm.weight", -1);
    if (s->ple) {
        matrix("per_layer_token_embd.weight", -1, s->ple * s->n_layers, 262144);
        matrix("per_layer_model_proj.weight", -1, s->dim, s->ple * s->n_layers);
        vector("per_layer_proj_norm.weight", -1);
    }
}

static int types[4096];                     // of tensors[i]

static void assign(const char *recipe, int n_layers, int n_experts) {
    const GgufTensor *order[4096];
    Mixture m = { .recipe = find_recipe(recipe), .n_layers = n_layers, .has_8_experts = n_experts == 8 };
    for (int i = 0; i < n_tensors; i++) {
        order[i] = &tensors[i];
        m.n_attn_v += is_attn_v(tensors[i].name);
        m.has_output |= !strcmp(names[i], "output.weight");
    }
    qsort(order, (size_t)n_tensors, sizeof *order, tensor_order);
    for (int i = 0; i < n_tensors; i++) types[order[i] - tensors] = mixture_type(&m, order[i]);
}

static int tensor_type(const char *name) {
    for (int i = 0; i < n_tensors; i++)
        if (!strcmp(names[i], name)) return types[i];
    return -1;
}

static void expect(const char *what, const char *name, int type) {
    CHECK(tensor_type(name) == type, "%s: %s: expected %s, got %s", what, name, gguf_type_name(type),
          gguf_type_name(tensor_type(name)));
}

static void expect_count(const char *what, int type, int count) {
    int n = 0;
    for (int i = 0; i < n_tensors; i++) n += types[i] == type;
    CHECK(n == count, "%s: expected %d tensors of %s, got %d", what, count, gguf_type_name(type), n);
}

static const Shape shape_12b = { 48, 6, 3840, 16, 8, 1, 15360, 0, 0, 0, true };
static const Shape shape_26b = { 30, 6, 2816, 16, 8, 2, 2112, 128, 704, 0, true };
static const Shape shape_e4b = { 42, 6, 2560, 8, 2, 2, 10240, 0, 0, 256, false };

static void test_published(void) {
    list_model(&shape_12b);
    assign("q4_k_m", 48, 0);
    CHECK(n_tensors == 667, "12B: %d tensors", n_tensors);
    expect_count("12B Q4_K_M", GGUF_F32, 338);
    expect_count("12B Q4_K_M", GGUF_Q4_K, 284);
    expect_count("12B Q4_K_M", GGUF_Q6_K, 45);

    list_model(&shape_26b);
    assign("Q4_K_M", 30, 128);
    CHECK(n_tensors == 658, "26B: %d tensors", n_tensors);
    expect_count("26B Q4_K_M", GGUF_F32, 392);
    expect_count("26B Q4_K_M", GGUF_Q4_K, 192);
    expect_count("26B Q4_K_M", GGUF_Q6_K, 14);
    expect_count("26B Q4_K_M", GGUF_Q5_0, 32);
    expect_count("26B Q4_K_M", GGUF_Q8_0, 28);
    for (int l = 0; l < 30; l++) {          // the layers with more bits in published files
        static const char more[31] = "111001001001001001001001001111";
        char name[64];
        snprintf(name, sizeof name, "blk.%d.ffn_down_exps.weight", l);
        expect("26B Q4_K_M", name, more[l] == '1' ? GGUF_Q8_0 : GGUF_Q5_0);
    }
    assign("q4_0", 30, 128);
    expect("26B Q4_0", "blk.3.ffn_down_exps.weight", GGUF_Q4_0);
    expect("26B Q4_0", "token_embd.weight", GGUF_Q6_K);
    assign("q5_k_m", 30, 128);
    expect("26B Q5_K_M", "blk.3.ffn_down.weight", GGUF_Q5_1);
    expect("26B Q5_K_M", "blk.0.ffn_down.weight", GGUF_Q8_0);
    assign("q8_0", 30, 128);
    expect_count("26B Q8_0", GGUF_F32, 392);
    expect_count("26B Q8_0", GGUF_Q8_0, 658 - 392);

    list_model(&shape_e4b);
    assign("q4_k_m", 42, 0);
    CHECK(n_tensors == 720, "E4B: %d tensors", n_tensors);
    expect_count("E4B Q4_K_M", GGUF_F32, 339);
    expect_count("E4B Q4_K_M", GGUF_Q4_K, 336);
    expect_count("E4B Q4_K_M", GGUF_Q6_K, 44);
    expect_count("E4B Q4_K_M", GGUF_BF16, 1);
    expect("E4B Q4_K_M", "per_layer_model_proj.weight", GGUF_BF16);
    expect("E4B Q4_K_M", "per_layer_token_embd.weight", GGUF_Q6_K);
}

static void test_rules(void) {
    n_tensors = 0;
    matrix("token_embd.weight", -1, 256, 64);
    matrix("output.weight", -1, 256, 64);
    matrix("fc.weight", -1, 96, 64);
    matrix("odd.weight", -1, 100, 64);
    matrix("enc.output_norm.weight", -1, 256, 2);
    matrix("table", -1, 256, 64);
    add("masked_embd_ordering", -1, GGUF_I32, 1, 512, 1);
    add("ids.weight", -1, GGUF_I32, 2, 256, 2);
    for (int l = 0; l < 16; l++) {
        matrix("attn_k.weight", l, 256, 64);
        matrix("attn_v.weight", l, 256, 64);
        matrix("attn_output.weight", l, 256, 64);
        matrix("ffn_down.weight", l, 256, 64);
    }
    matrix("attn_qkv.weight", 16, 256, 64);
    matrix("ffn_gate_inp.weight", 16, 256, 8);

    assign("q4_k_s", 16, 0);
    expect("q4_k_s", "output.weight", GGUF_Q6_K);
    expect("q4_k_s", "token_embd.weight", GGUF_Q4_K);       // it is not the head here
    expect("q4_k_s", "fc.weight", GGUF_Q5_0);
    expect("q4_k_s", "odd.weight", GGUF_F16);
    expect("q4_k_s", "enc.output_norm.weight", GGUF_BF16);
    expect("q4_k_s", "table", GGUF_BF16);
    expect("q4_k_s", "ids.weight", GGUF_I32);
    expect("q4_k_s", "blk.16.ffn_gate_inp.weight", GGUF_BF16);
    expect("q4_k_s", "blk.3.attn_v.weight", GGUF_Q5_K);
    expect("q4_k_s", "blk.4.attn_v.weight", GGUF_Q4_K);
    expect("q4_k_s", "blk.1.ffn_down.weight", GGUF_Q5_K);
    expect("q4_k_s", "blk.2.ffn_down.weight", GGUF_Q4_K);
    expect("q4_k_s", "blk.0.attn_output.weight", GGUF_Q4_K);
    expect("q4_k_s", "blk.16.attn_qkv.weight", GGUF_Q4_K);  // the 17th tensor of this name
    assign("q4_k_m", 16, 0);
    expect("q4_k_m", "blk.16.attn_qkv.weight", GGUF_Q6_K);
    // 10 - 17/8 = 8, 8 % 3 = 2: by number, not by name ("10" < "2")
    expect("q4_k_m", "blk.10.attn_v.weight", GGUF_Q6_K);
    expect("q4_k_m", "blk.2.attn_v.weight", GGUF_Q4_K);
    assign("q4_k_m", 16, 8);
    expect("8 experts", "blk.5.attn_k.weight", GGUF_Q8_0);
    expect("8 experts", "blk.5.attn_v.weight", GGUF_Q8_0);
    expect("8 experts", "blk.5.attn_output.weight", GGUF_Q5_K);
    assign("q6_k", 16, 8);
    expect("8 experts", "blk.5.attn_output.weight", GGUF_Q6_K);
    expect("q6_k", "fc.weight", GGUF_Q8_0);
    assign("f16", 16, 8);
    expect("f16", "blk.5.attn_k.weight", GGUF_F16);
    expect("f16", "masked_embd_ordering", GGUF_I32);
}

int main(void) {
    test_published();
    test_rules();
    return test_done("mixture");
}
