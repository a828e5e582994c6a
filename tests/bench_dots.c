/* bench_dots.c - speed of gguf.h's integer dot products, per type: for one activation row, and for several.
 *
 *   cc -std=c11 -O3 -march=native -ffp-contract=off -I. tests/bench_dots.c -o build/bench_dots -lm && build/bench_dots
 *
 * One thread; row length of the 26B model; the matrix fits into the cache, so this measures instructions, not memory.
 * GB/s is weight bytes over time, each weight row counted once per pass; GMAC/s counts products. */
#define _GNU_SOURCE
#define GGUF_IMPLEMENTATION
#include "gguf.h"
#include <time.h>

enum { COLS = 2816, ROWS = 64, MAX_ACTS = 64 };

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static float x[COLS], scale[COLS / 32], out[MAX_ACTS * ROWS];
static int8_t q[COLS];
static uint8_t w[ROWS * COLS * 2];
static void *packed;
static volatile float sink;

// Multiplies the matrix with n_acts rows; 0: one row, without packing.
static void pass(int type, int n_acts) {
    const size_t row = gguf_row_size(type, COLS);
    if (n_acts) gguf_dot_q8_rows(type, w, ROWS, packed, (size_t)n_acts, COLS, out, ROWS);
    else for (size_t i = 0; i < ROWS; i++) out[i] = gguf_dot_q8(type, w + i * row, q, scale, COLS);
}

// Seconds of a pass: the best of 100 runs of a millisecond or more.
static double seconds(int type, int n_acts) {
    double best = 1e9;
    for (int run = 0; run < 100; run++) {
        const double start = now();
        double t = 0;
        int n = 0;
        for (; t < 0.001; t = now() - start, n++) pass(type, n_acts);
        if (t / n < best) best = t / n;
        sink = out[0];
    }
    return best;
}

int main(void) {
    static const int types[] = {GGUF_Q8_0, GGUF_Q4_0, GGUF_Q4_1, GGUF_Q5_0, GGUF_Q5_1, GGUF_Q2_K, GGUF_Q3_K, GGUF_Q4_K,
                                GGUF_Q5_K, GGUF_Q6_K, GGUF_IQ4_NL, GGUF_IQ4_XS, GGUF_MXFP4, GGUF_NVFP4};
    uint32_t u = 1;
    for (size_t i = 0; i < COLS; i++) x[i] = sinf((float)i);
    for (size_t i = 0; i < sizeof w; i++) w[i] = (uint8_t)((u = u * 1664525 + 1013904223) >> 24) & 0x7b;    // finite
    gguf_quantize_q8(x, q, scale, COLS);
    const size_t size = gguf_packed_size(COLS);
    packed = aligned_alloc(64, (size * MAX_ACTS + 63) / 64 * 64);
    if (!packed) return 1;
    for (size_t r = 0; r < MAX_ACTS; r++) gguf_pack_q8(q, scale, COLS, (uint8_t *)packed + r * size);
    printf("           gguf_dot_q8     rows: 1         4              16              64\n");
    printf("type       GB/s GMAC/s     GB/s GMAC/s     GB/s GMAC/s     GB/s GMAC/s     GB/s GMAC/s\n");
    for (size_t t = 0; t < sizeof types / sizeof *types; t++) {
        if (types[t] == GGUF_MXFP4)                 // no subnormal scales, which are slow
            for (size_t i = 0; i < sizeof w; i += 17) w[i] = 120;
        printf("%-8s", gguf_type_name(types[t]));
        for (int i = 0; i < 5; i++) {
            static const int n_acts[] = {0, 1, 4, 16, 64};
            const double s = seconds(types[t], n_acts[i]), rows = n_acts[i] ? n_acts[i] : 1;
            printf("%7.1f %6.1f  ", (double)gguf_row_size(types[t], COLS) * ROWS / s * 1e-9,
                   COLS * ROWS * rows / s * 1e-9);
        }
        printf("\n");
    }
    free(packed);
    return 0;
}
