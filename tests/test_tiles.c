/* test_tiles.c - gguf.h: the products of many rows with AMX, on processors without it.
 *
 * The four functions that hold AMX instructions are replaced by plain C with the same effect, so blocking, layout and
 * factors are those of the real kernel. On a processor with AMX test_blocks.c tests the instructions too. */
#define _GNU_SOURCE
#define GGUF_IMPLEMENTATION
#define GGUF__TILE_TWIN
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

static struct { size_t n_rows, n; } tiles;      // what gguf__set_tiles has set; n_rows 0: released
static int n_products;                          // calls of gguf__dot_tiles
static bool gguf__ask_for_tiles(void) { return true; }
static void gguf__set_tiles(size_t n_rows, size_t n) {
    tiles.n_rows = n_rows;
    tiles.n = n;
}
static void gguf__release_tiles(void) { tiles.n_rows = 0; }
static void gguf__dot_tiles(const int8_t *q, size_t q_stride, size_t q_step, const int8_t *w, size_t w_step,
                            int32_t (*dot)[16][16]) {
    n_products++;
    for (int k = 0; k < 2; k++, q += q_step, w += w_step)
        for (size_t r = 0; r < tiles.n_rows; r++)
            for (int i = 0; i < 16; i++) {
                dot[k][r][i] = 0;
                for (size_t j = 0; j < tiles.n; j++)
                    dot[k][r][i] += q[r * q_stride + j] * w[j / 4 * 64 + (size_t)i * 4 + j % 4];
            }
}
#include "gguf.h"
#include "test.h"

static uint32_t rng(void) {
    static uint64_t state = 1;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 33);
}

// n_w weight rows times n_rows activation rows of n elements: the bits of gguf_dot_q8, and nothing else is written.
static void test_product(int type, size_t n_w, size_t n_rows, size_t n) {
    const size_t row_size = gguf_row_size(type, n), size = gguf_packed_size(n), stride = n_w + 1;
    uint8_t *w = malloc(n_w * row_size), *packed = aligned_alloc(64, (n_rows * size + 63) / 64 * 64);
    float *x = malloc(n * sizeof *x), *scale = malloc(n_rows * n / 32 * sizeof *scale);
    float *out = malloc(n_rows * stride * sizeof *out);
    int8_t *q = malloc(n_rows * n);
    for (size_t i = 0; i < n_w * row_size; i++) w[i] = (uint8_t)(rng() & 0xbf);        // no NaN, no Inf
    for (size_t r = 0; r < n_rows; r++) {
        for (size_t i = 0; i < n; i++) x[i] = (float)rng() * 0x1p-30f - 1;
        gguf_quantize_q8(x, q + r * n, scale + r * n / 32, n);
        gguf_pack_q8(q + r * n, scale + r * n / 32, n, packed + r * size);
    }
    for (size_t i = 0; i < n_rows * stride; i++) out[i] = 7;
    n_products = 0;
    gguf_dot_q8_rows(type, w, n_w, packed, n_rows, n, out, stride);
    CHECK(n_products, "%s, %zu by %zu of %zu: expected tiles, got none", gguf_type_name(type), n_w, n_rows, n);
    CHECK(!tiles.n_rows, "%s: tiles: expected released, got %zu rows", gguf_type_name(type), tiles.n_rows);
    for (size_t r = 0; r < n_rows; r++)
        for (size_t i = 0; i < stride; i++) {
            float want = 7, got = out[r * stride + i];
            if (i < n_w) want = gguf_dot_q8(type, w + i * row_size, q + r * n, scale + r * n / 32, n);
            CHECK(!memcmp(&got, &want, 4), "%s, %zu by %zu of %zu, [%zu][%zu]: expected %a, got %a",
                  gguf_type_name(type), n_w, n_rows, n, r, i, want, got);
        }
    free(w);
    free(packed);
    free(x);
    free(scale);
    free(out);
    free(q);
}

int main(void) {
    static const int types[] = {GGUF_Q8_0, GGUF_Q4_0, GGUF_Q4_1, GGUF_Q5_0, GGUF_Q5_1, GGUF_Q2_K, GGUF_Q3_K, GGUF_Q4_K,
                                GGUF_Q5_K, GGUF_Q6_K, GGUF_IQ4_NL, GGUF_IQ4_XS, GGUF_MXFP4, GGUF_NVFP4};
#if defined(GGUF__WIDE) && defined(GGUF__TILES)
    for (size_t t = 0; t < sizeof types / sizeof *types; t++) {
        const size_t elems = (size_t)gguf_block_elems(types[t]);
        test_product(types[t], 16, 16, 256);
        test_product(types[t], 37, 43, 1280);           // five parts; the last panel and block are not full
        test_product(types[t], 5, 300, elems == 256 ? 512 : 320);
        if (elems < 256) test_product(types[t], 33, 9, elems * 11);
    }
#else
    (void)types;
    SKIP("products with AMX: a build without AVX-512 VNNI, or an old compiler");
#endif
    return test_done("tiles");
}
