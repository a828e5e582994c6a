/* test_formats.c - every block format in a whole model: compares the logits of a file whose matrices have the format
 * with those of a file that has the same values as F32. Both run the same steps; only the int8 activations of the first
 * differ.
 *
 * Run from the top of the repository.
 * Environment: BUILD, CC, TMPDIR (see files.h). */
#define _GNU_SOURCE
#define TESTING
#include "../gemma4.c"
#include "test.h"
#include "files.h"

enum { N_TOKENS = 24, VOCAB = 512 };

static uint32_t rng_state = 1;
static uint32_t rng(void) { return (rng_state = rng_state * 1664525 + 1013904223) >> 8; }

// Rewrites a model of F32 matrices: every matrix of layers whose rows divide into blocks, and the embedding table,
// becomes `type` (blocks true) or F32 with the values of the same blocks. with_factors: as in NVFP4 files, a matrix is
// divided by a factor in a separate tensor, one per expert; for ffn_down_exps it is multiplied into the existing
// factor.
static const char *write_as(const char *from, const char *to, int type, bool blocks, bool with_factors,
                            size_t *n_changed) {
    Draft d = read_draft(from);
    const size_t n_tensors = d.n_tensors, elems = (size_t)gguf_block_elems(type);
    *n_changed = 0;
    rng_state = 1;
    for (size_t i = 0; i < n_tensors; i++) {
        DraftTensor *t = &d.tensors[i];
        if (t->n_dims < 2 || t->type != GGUF_F32 || t->ne[0] % elems || strstr(t->name, "ffn_gate_inp")) continue;
        const bool factors = with_factors && !strncmp(t->name, "blk.", 4),
            down = strstr(t->name, "ffn_down_exps") != NULL;
        const size_t n = t->data.n / 4, n_experts = (size_t)t->ne[2], each = n / n_experts;
        float *x = (float *)(void *)t->data.data;
        uint8_t *b = must(malloc(gguf_row_size(type, n)));
        char name[64];
        snprintf(name, sizeof name, "%.*sscale", (int)(strlen(t->name) - strlen("weight")), t->name);
        DraftTensor *scale = factors ? draft_tensor(&d, name) : NULL;
        CHECK(!factors || !!scale == down, "%s: %s", name, scale ? "there already" : "missing");
        if (factors && !scale && blocks) scale = draft_add(&d, name, n_experts);
        for (size_t e = 0; e < n_experts; e++) {
            const float factor = factors ? 0.003f * (float)(1 + rng() % 7) : 1;
            for (size_t k = e * each; k < (e + 1) * each; k++) x[k] /= factor;
            uint8_t *at = b + gguf_row_size(type, e * each);
            gguf_quantize(type, x + e * each, at, each);
            gguf_dequantize(type, at, x + e * each, each);
            for (size_t k = e * each; k < (e + 1) * each; k++) x[k] *= factor;
            if (factors && blocks && down) ((float *)(void *)scale->data.data)[e] *= factor;
            else if (factors && blocks) put(&scale->data, &factor, sizeof factor);
        }
        if (blocks) {
            t->type = type;
            t->data.n = 0;
            put(&t->data, b, gguf_row_size(type, n));
        }
        free(b);
        ++*n_changed;
    }
    return write_draft(&d, to);
}

// Logits (N_TOKENS, VOCAB) of some tokens; the caller frees them.
static float *logits_of(const char *path) {
    const ModelOptions o = { .n_ctx = 64, .n_seqs = 1, .n_batch = STEP_ROWS, .n_logits = N_TOKENS, .k_type = KV_F32,
                            .v_type = KV_F32 };
    Model *m = must(calloc(1, sizeof *m));
    float *logits = must(calloc((size_t)N_TOKENS * VOCAB, sizeof *logits));
    load_model(m, path, cpu_ops(), o, NULL);
    for (int i = 0; i < N_TOKENS; i++) m->step_rows[i] = (StepRow){ .token = (i * 37 + 11) % VOCAB, .output = true };
    step(m, &(StepSeg){ .seq = 0, .kind = SEG_CHAIN, .n = N_TOKENS, .rows = m->step_rows }, 1);
    for (int i = 0; i < N_TOKENS; i++) read_logits(m, i, logits + (size_t)i * VOCAB);
    free_model(m);
    free(m);
    return logits;
}

// |a - b| / |b| over all logits.
static double distance(const float *a, const float *b) {
    double diff = 0, norm = 0;
    for (size_t i = 0; i < (size_t)N_TOKENS * VOCAB; i++) {
        diff += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        norm += (double)b[i] * b[i];
    }
    return sqrt(diff / norm);
}

// source: the logits of `from`.
static void test_format(const char *what, const char *from, const float *source, int type, bool with_factors) {
    size_t n = 0, n_again = 0;
    float *got = logits_of(write_as(from, in_tmp("blocks.gguf"), type, true, with_factors, &n));
    float *want = logits_of(write_as(from, in_tmp("values.gguf"), type, false, with_factors, &n_again));
    const double d = distance(got, want), d_source = distance(want, source);
    printf("%s, %s%s: %zu matrices, off by %.4f of the same values as F32, which are off by %.4f of the source\n", what,
           gguf_type_name(type), with_factors ? " with factors" : "", n, d, d_source);
    CHECK(n > 10 && n == n_again, "%s %s: %zu and %zu matrices", what, gguf_type_name(type), n, n_again);
    CHECK(d < 0.05, "%s %s: expected the logits of the same values, got a distance of %.4f", what, gguf_type_name(type),
          d);
    free(got);
    free(want);
}

int main(void) {
    make_tmp();
#ifdef _OPENMP
    omp_set_num_threads(1);
#endif
    char path[2][1024];
    float *source[2];
    for (int moe = 0; moe < 2; moe++) {
        const char *made = make_model("source", moe ? "tiny-moe" : "tiny-dense", "f32", "--vocab", "512", "--layers",
                                      "3", moe ? "--split-experts" : NULL, NULL);
        Draft d = read_draft(made);
        if (moe) draft_u16(&d, "gemma4.expert_used_count", 16);   // use all experts, so that a near tie does not matter
        snprintf(path[moe], sizeof path[moe], "%s", write_draft(&d, in_tmp(moe ? "moe.gguf" : "dense.gguf")));
        source[moe] = logits_of(path[moe]);
    }
    for (int type = 0; type < GGUF_N_TYPES; type++) {
        if (!gguf_type_supported(type)) continue;
        test_format("dense", path[0], source[0], type, false);
        if (gguf_block_elems(type) <= 64) test_format("MoE", path[1], source[1], type, false);  // experts of 64 columns
    }
    test_format("dense", path[0], source[0], GGUF_NVFP4, true);
    test_format("MoE", path[1], source[1], GGUF_NVFP4, true);
    free(source[0]);
    free(source[1]);
    return test_done("formats");
}
