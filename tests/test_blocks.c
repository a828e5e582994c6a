/* test_blocks.c - gguf.h: block formats, their values, and their dot products with float and int8 activations.
 *
 * Run from the top of the repository. Block formats are compared with tests/golden/quants.txt and with independent
 * formulas, element by element, in double. */
#define _GNU_SOURCE
#define GGUF_IMPLEMENTATION
#include "gguf.h"
#include "test.h"

// ---- helpers -----------------------------------------------------------------------------------------------------

static uint32_t bits_of(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}
static float float_of(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static uint64_t rng_state = 1;
static uint32_t rng(void) {
    rng_state = rng_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(rng_state >> 33);
}
static float uniform(void) { return (float)rng() * 0x1p-30f - 1; }          // -1..1

static const int types[] = {GGUF_F32, GGUF_F16, GGUF_BF16, GGUF_Q8_0, GGUF_Q4_0, GGUF_Q4_1, GGUF_Q5_0, GGUF_Q5_1,
                            GGUF_Q2_K,
                            GGUF_Q3_K, GGUF_Q4_K, GGUF_Q5_K, GGUF_Q6_K, GGUF_IQ4_NL, GGUF_IQ4_XS, GGUF_MXFP4, GGUF_NVFP4};
enum { N_TYPES = sizeof types / sizeof *types, N_QUANTS = N_TYPES - 1 };     // F32 needs no golden bytes

static int type_by_name(const char *name) {
    for (int i = 0; i < N_TYPES; i++)
        if (strcmp(gguf_type_name(types[i]), name) == 0) return types[i];
    return -1;
}

static void test_table(void) {
    int supported = 0, known = 0;
    for (int type = -1; type <= GGUF_N_TYPES; type++) {
        supported += gguf_type_supported(type);
        known += gguf_block_elems(type) > 0;
        CHECK((gguf_block_elems(type) > 0) == (gguf_block_bytes(type) > 0), "type %d: half known", type);
        CHECK((strcmp(gguf_type_name(type), "unknown") == 0) == (gguf_block_elems(type) == 0),
              "type %d: name %s", type, gguf_type_name(type));
    }
    CHECK(supported == N_TYPES && known == 35, "types: expected %d with code of 35, got %d of %d", N_TYPES, supported,
          known);
    CHECK(gguf_row_size(GGUF_Q4_K, 512) == 288 && gguf_row_size(GGUF_Q4_K, 128) == 0, "row size Q4_K");
    CHECK(gguf_row_size(GGUF_F32, SIZE_MAX / 2) == 0 && gguf_row_size(4, 32) == 0 && gguf_row_size(-1, 32) == 0,
          "row size limits");
}

// The value of a binary16, and the binary16 nearest to a float, by arithmetic.
static double f16_value(uint16_t h) {
    int e = h >> 10 & 31, m = h & 1023;
    double v = e == 31 ? (m ? NAN : INFINITY) : e ? ldexp(1024 + m, e - 25) : ldexp(m, -24);
    return h >> 15 ? -v : v;
}
static uint16_t f16_nearest(float f) {
    double a = fabs((double)f);
    uint16_t sign = (uint16_t)(signbit(f) ? 0x8000 : 0);
    if (a >= 65520) return sign | 0x7c00;
    int e = a < 0x1p-14 ? -24 : ilogb(a) - 10;                              // exponent of the last mantissa bit
    double m = nearbyint(ldexp(a, -e));                                     // 0..2048, exact
    return (uint16_t)(sign + (e == -24 ? 0 : (e + 24) << 10) + (int)m);     // a full mantissa carries into the exponent
}

static void test_scalars(void) {
    for (uint32_t h = 0; h < 65536; h++) {
        double want = f16_value((uint16_t)h);
        float got = gguf_f16_to_f32((uint16_t)h);
        uint16_t back = gguf_f32_to_f16(got);
        if (isnan(want)) {
            CHECK(isnan(got) && (back & 0x7fff) > 0x7c00 && (bits_of(got) & 0x00400000),
                  "f16 %04x: got %08x, back %04x", h, bits_of(got), back);
        } else {
            CHECK((double)got == want && !!signbit(got) == (int)(h >> 15),
                  "f16 %04x: expected %a, got %a", h, want, got);
            CHECK(back == h, "f16 %04x: back %04x", h, back);
        }
        uint16_t b = gguf_f32_to_bf16(gguf_bf16_to_f32((uint16_t)h));
        CHECK(b == h || ((h & 0x7fff) > 0x7f80 && b == (h | 64)), "bf16 %04x: back %04x", h, b);
    }
    for (int i = 0; i < 200000; i++) {
        uint32_t u = rng() ^ rng() << 16;
        if (i & 1) u = (u & 0x80000000) | (0x32000000 + u % 0x16000000);    // around the range of f16
        if (i & 2) u &= 0xfffff000;                                         // ties
        float f = float_of(u);
        if (isnan(f)) {
            CHECK((gguf_f32_to_f16(f) & 0x7fff) > 0x7c00 && (gguf_f32_to_bf16(f) & 0x7fff) > 0x7f80, "NaN %08x is lost",
                  u);
            continue;
        }
        CHECK(gguf_f32_to_f16(f) == f16_nearest(f),
              "f32 %08x to f16: expected %04x, got %04x", u, f16_nearest(f), gguf_f32_to_f16(f));
        uint32_t rest = u & 0xffff, bf = u >> 16;
        bf += rest > 0x8000 || (rest == 0x8000 && (bf & 1));
        CHECK(gguf_f32_to_bf16(f) == bf, "f32 %08x to bf16: expected %04x, got %04x", u, bf, gguf_f32_to_bf16(f));
    }
}

static void test_quantize(void) {
    float x[64] = {0}, scale[2];
    int8_t q[64];
    memset(q, 1, sizeof q);
    gguf_quantize_q8(x, q, scale, 64);
    CHECK(bits_of(scale[0]) == 0 && bits_of(scale[1]) == 0 && q[0] == 0 && q[63] == 0, "quantize zeros");
    static const float xs[] = {127, -127, 0.5f, 1.5f, 2.5f, -0.5f, -2.5f, 3.25f, 126.5f, -125.5f};
    static const int8_t want[] = {127, -127, 0, 2, 2, 0, -2, 3, 126, -126};
    memcpy(x, xs, sizeof xs);
    x[32] = 0x1p-121f, x[33] = -0x1p-149f;          // too small for 127 / max
    gguf_quantize_q8(x, q, scale, 64);
    for (int i = 0; i < 10; i++) CHECK(q[i] == want[i], "quantize %g: expected %d, got %d", x[i], want[i], q[i]);
    CHECK(scale[0] == 1 && scale[1] == 0 && q[32] == 0, "quantize scales: got %g, %g", scale[0], scale[1]);
    x[32] = 0x1p-120f;
    gguf_quantize_q8(x, q, scale, 64);
    CHECK(q[32] == 127 && scale[1] > 0, "quantize the smallest group: got %d, %g", q[32], scale[1]);
    x[5] = NAN;
    x[40] = -INFINITY;
    gguf_quantize_q8(x, q, scale, 64);
    CHECK(isnan(scale[0]) && isnan(scale[1]) && q[0] == 0 && q[40] == 0, "quantize NaN, Inf: got %g, %g", scale[0],
          scale[1]);
    for (int i = 0; i < 32; i++) x[i] = uniform() * 1e38f;
    x[7] = 3.4028235e38f;
    gguf_quantize_q8(x, q, scale, 32);
    CHECK(q[7] == 127 && isfinite(scale[0]), "quantize the largest float: got %d, %g", q[7], scale[0]);
}

static size_t read_words(const char *p, float *out, size_t max) {
    size_t n = 0;
    for (char *end; n < max; n++, p = end) {
        uint32_t u = (uint32_t)strtoul(p, &end, 16);
        if (end == p) break;
        out[n] = float_of(u);
    }
    return n;
}
static size_t read_hex(const char *p, uint8_t *out, size_t max) {
    size_t n = 0;
    for (unsigned v; n < max && sscanf(p + 2 * n, "%2x", &v) == 1; n++) out[n] = (uint8_t)v;
    return n;
}

// Tests the golden file, and rows of up to 88 copies of its blocks (K = 704 and 2816 among them): m copies of a block
// have m times its dot product.
static void test_golden(void) {
    static const size_t repeats[] = {1, 2, 3, 7, 8, 9, 11, 22, 64, 65, 66, 88};
    static char line[1 << 14];
    static uint8_t row[88 * 256];
    static int8_t row_q[88 * 256];
    static float row_scale[88 * 8];
    float x[256], w[256], scale[8], want_scale[8], want[256], got[256];
    uint8_t want_q[256], block[1024], quant[1024];
    int8_t q[256];
    char name[16] = "";
    int elems = 0, type = -1, n_blocks = 0, n_dots = 0, n_quants = 0;
    size_t bytes = 0;
    FILE *f = fopen("tests/golden/quants.txt", "r");
    if (!CHECK(f, "cannot open tests/golden/quants.txt; run from the top of the repository")) return;
    while (fgets(line, sizeof line, f)) {
        int hex = 0;
        double y64, y8, y_float;
        if (strncmp(line, "x ", 2) == 0) {
            CHECK(read_words(line + 2, x, 256) == 256, "golden x");
            gguf_quantize_q8(x, q, scale, 256);
        } else if (strncmp(line, "scale ", 6) == 0) {
            CHECK(read_words(line + 6, want_scale, 8) == 8, "golden scale");
            for (int g = 0; g < 8; g++)
                CHECK(bits_of(scale[g]) == bits_of(want_scale[g]),
                      "scale %d: expected %a, got %a", g, want_scale[g], scale[g]);
        } else if (strncmp(line, "q ", 2) == 0) {
            CHECK(read_hex(line + 2, want_q, 256) == 256, "golden q");
            for (int i = 0; i < 256; i++)
                CHECK((uint8_t)q[i] == want_q[i], "q %d: expected %d, got %d", i, (int8_t)want_q[i], q[i]);
        } else if (sscanf(line, "block %15s %d %n", name, &elems, &hex) == 2 && hex > 0) {
            type = type_by_name(name);
            if (!CHECK(type >= 0 && elems <= 256, "golden block %s", name)) break;
            bytes = read_hex(line + hex, block, sizeof block);
            CHECK(bytes == gguf_row_size(type, (size_t)elems), "golden block %s: %zu bytes", name, bytes);
            n_blocks++;
        } else if (strncmp(line, "f32 ", 4) == 0) {
            CHECK((int)read_words(line + 4, want, 256) == elems, "golden f32 of %s", name);
            gguf_dequantize(type, block, got, (size_t)elems);
            for (int i = 0; i < elems; i++)
                CHECK(bits_of(got[i]) == bits_of(want[i]) || (got[i] == 0 && want[i] == 0),
                      "%s block %d [%d]: expected %a, got %a", name, n_blocks, i, want[i], got[i]);
        } else if (sscanf(line, "dot %la %la %la", &y64, &y8, &y_float) == 3) {
            // A subnormal term loses bits, at most 2^-149.
            double size = 0, sizes = 0, size_x = 0, tiny = 0x1p-140;
            for (int i = 0; i < elems; i++) {
                size += fabs((double)want[i] * scale[i / 32] * q[i]);
                sizes += (double)want[i] * want[i];
                size_x += (double)x[i] * x[i];
            }
            float y = gguf_dot_q8(type, block, q, scale, (size_t)elems);
            CHECK(fabs(y - y64) <= 2e-6 * size + tiny, "%s block %d dot: expected %a, got %a", name, n_blocks, y64, y);
            // The reference used another activation format, whose scales differ by up to 2^-11.
            CHECK(fabs(y - y8) <= 0x1p-11 * size + tiny,
                  "%s block %d dot, Q8_0: expected %a, got %a", name, n_blocks, y8, y);
            CHECK(fabs(y - y_float) <= 5e-3 * sqrt(sizes * size_x) + tiny,
                  "%s block %d dot, float: expected %a, got %a", name, n_blocks, y_float, y);
            for (size_t k = 0; k < sizeof repeats / sizeof *repeats; k++) {
                size_t m = repeats[k], n = m * (size_t)elems;
                for (size_t i = 0; i < m; i++) {
                    memcpy(row + i * bytes, block, bytes);
                    memcpy(row_q + i * (size_t)elems, q, (size_t)elems);
                    memcpy(row_scale + i * (size_t)elems / 32, scale, (size_t)elems / 32 * sizeof *scale);
                }
                y = gguf_dot_q8(type, row, row_q, row_scale, n);
                CHECK(fabs(y - (double)m * y64) <= (double)m * (2e-6 * size + tiny),
                      "%s block %d dot, %zu times: expected %a, got %a", name, n_blocks, m, (double)m * y64, y);
            }
            n_dots++;
        } else if (strncmp(line, "w ", 2) == 0) {
            CHECK(read_words(line + 2, w, 256) == 256, "golden w");
        } else if (sscanf(line, "quant %15s %n", name, &hex) == 1 && hex > 0) {
            type = type_by_name(name);
            if (!CHECK(type >= 0, "golden quant %s", name)) break;
            bytes = read_hex(line + hex, block, sizeof block);
            CHECK(bytes == gguf_row_size(type, 256), "golden quant %s: %zu bytes", name, bytes);
            gguf_quantize(type, w, quant, 256);
            for (size_t i = 0; i < bytes; i++)
                CHECK(quant[i] == block[i], "%s quantised, byte %zu: expected %02x, got %02x", name, i, block[i],
                      quant[i]);
            n_quants++;
        }
    }
    fclose(f);
    CHECK(n_blocks == 82 && n_dots == 70 && n_quants == N_QUANTS,
          "golden: expected 82 blocks, 70 dots and %d quants, got %d, %d and %d", N_QUANTS, n_blocks, n_dots, n_quants);
}

// One element by the format's definition: value = d*sub*code - min*sub_min.
typedef struct { int code, sub; double d, min; int sub_min; } Element;
static Element element(int type, const uint8_t *row, size_t i) {
    const uint8_t *b = row + i / (size_t)gguf_block_elems(type) * (size_t)gguf_block_bytes(type);
    static const int t[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    static const int v[8] = {0, 1, 2, 3, 4, 6, 8, 12};                      // E2M1 magnitudes, doubled
    const int j = (int)(i % (size_t)gguf_block_elems(type)), g = j / 32, l = j % 32;
    const int at_d = type == GGUF_Q6_K ? 208 : type == GGUF_Q3_K ? 108 : type == GGUF_Q2_K ? 80 : 0;
    uint16_t d = 0, dmin = 0;
    uint32_t h;
    Element e = {0, 1, 0, 0, 0};
    if (type != GGUF_MXFP4 && type != GGUF_NVFP4) memcpy(&d, b + at_d, 2);
    if (type != GGUF_Q3_K && type != GGUF_Q6_K) memcpy(&dmin, b + at_d + 2, 2);
    e.d = f16_value(d);
    switch (type) {
    case GGUF_Q8_0: e.code = (int8_t)b[2 + j]; break;
    case GGUF_Q4_0: e.code = (b[2 + j % 16] >> (j < 16 ? 0 : 4) & 15) - 8; break;
    case GGUF_IQ4_NL: e.code = t[b[2 + j % 16] >> (j < 16 ? 0 : 4) & 15]; break;
    case GGUF_Q4_1:
        e.code = b[4 + j % 16] >> (j < 16 ? 0 : 4) & 15;
        e.min = -f16_value(dmin);
        e.sub_min = 1;
        break;
    case GGUF_Q5_0:
        memcpy(&h, b + 2, 4);
        e.code = (b[6 + j % 16] >> (j < 16 ? 0 : 4) & 15) + 16 * (int)(h >> j & 1) - 16;
        break;
    case GGUF_Q5_1:
        memcpy(&h, b + 4, 4);
        e.code = (b[8 + j % 16] >> (j < 16 ? 0 : 4) & 15) + 16 * (int)(h >> j & 1);
        e.min = -f16_value(dmin);
        e.sub_min = 1;
        break;
    case GGUF_Q4_K:
    case GGUF_Q5_K: {
        const uint8_t *s = b + 4, *q = b + (type == GGUF_Q4_K ? 16 : 48);
        e.sub = g < 4 ? s[g] & 63 : (s[g + 4] & 15) | s[g - 4] >> 6 << 4;
        e.sub_min = g < 4 ? s[g + 4] & 63 : s[g + 4] >> 4 | s[g] >> 6 << 4;
        e.min = f16_value(dmin);
        e.code = q[32 * (j / 64) + l] >> (g % 2 ? 4 : 0) & 15;
        if (type == GGUF_Q5_K) e.code += 16 * (b[16 + l] >> g & 1);
        break;
    }
    case GGUF_Q6_K: {
        int n = j / 128, k = g % 4;
        e.sub = (int8_t)b[192 + j / 16];
        e.code = ((b[64 * n + 32 * (k & 1) + l] >> 4 * (k >> 1) & 15) | (b[128 + 32 * n + l] >> 2 * k & 3) << 4) - 32;
        break;
    }
    case GGUF_Q3_K: {
        const uint8_t *s = b + 96;
        int n = j / 16;
        e.sub = ((n < 8 ? s[n] & 15 : s[n - 8] >> 4) | (s[8 + n % 4] >> 2 * (n / 4) & 3) << 4) - 32;
        e.code = (b[32 + 32 * (j / 128) + l] >> 2 * (g % 4) & 3) - (b[l] >> g & 1 ? 0 : 4);
        break;
    }
    case GGUF_Q2_K:
        e.sub = b[j / 16] & 15;
        e.sub_min = b[j / 16] >> 4;
        e.min = f16_value(dmin);
        e.code = b[16 + 32 * (j / 128) + l] >> 2 * (g % 4) & 3;
        break;
    case GGUF_IQ4_XS:
        e.sub = ((b[4 + g / 2] >> 4 * (g & 1) & 15) | ((b[2] | b[3] << 8) >> 2 * g & 3) << 4) - 32;
        e.code = t[b[8 + 16 * g + l % 16] >> (l < 16 ? 0 : 4) & 15];
        break;
    case GGUF_MXFP4:
    case GGUF_NVFP4: {
        int c = type == GGUF_MXFP4 ? b[1 + j % 16] >> (j < 16 ? 0 : 4)
            : b[4 + 8 * (j / 16) + j % 8] >> (j % 16 < 8 ? 0 : 4);
        int s = b[j / 16] & 127;
        e.d = type == GGUF_MXFP4 ? ldexp(1, b[0] - 128) : s == 127 ? 0 : s < 8 ? ldexp(s, -10)
            : ldexp(8 + s % 8, s / 8 - 11);
        e.code = c & 8 ? -v[c & 7] : v[c & 7];
        break;
    }
    }
    return e;
}

// Random blocks with scales of usual magnitude and either sign.
static void random_row(int type, uint8_t *row, size_t n) {
    size_t bytes = (size_t)gguf_block_bytes(type), size = gguf_row_size(type, n);
    for (size_t i = 0; i < size; i++) row[i] = (uint8_t)rng();
    for (size_t b = 0; b < size; b += bytes) {
        float f = uniform();
        uint16_t d = type == GGUF_BF16 ? gguf_f32_to_bf16(f) : gguf_f32_to_f16(f), dmin = gguf_f32_to_f16(uniform());
        size_t at = type == GGUF_Q6_K ? 208 : type == GGUF_Q3_K ? 108 : type == GGUF_Q2_K ? 80 : 0;
        if (type == GGUF_F32) memcpy(row + b, &f, 4);
        else if (type == GGUF_MXFP4) row[b] = (uint8_t)(120 + rng() % 8);
        else if (type != GGUF_NVFP4) memcpy(row + b + at, &d, 2);
        if (type == GGUF_Q4_1 || type == GGUF_Q5_1 || type == GGUF_Q2_K || type == GGUF_Q4_K || type == GGUF_Q5_K)
            memcpy(row + b + at + 2, &dmin, 2);
    }
}

// Tests the dot products: against double within 2e-6 of the sum of terms, and, bit for bit, against their definition in
// plain loops (which needs -ffp-contract=off, like every build).
static void test_dots(void) {
    static const size_t blocks[] = {1, 2, 3, 7, 8, 9, 11, 22, 64, 65, 66, 88};
    static const size_t lengths[] = {0, 1, 7, 31, 32, 33, 63, 64, 65, 100, 704, 2112, 2817};
    enum { MAX = 88 * 256 };
    uint8_t *memory = malloc(MAX * 4 + 1), *row = memory + 1;               // rows need no alignment
    float *x = malloc(MAX * sizeof *x), *values = malloc(MAX * sizeof *values),
        *scale = malloc(MAX / 32 * sizeof *scale);
    int8_t *q = malloc(MAX);
    for (int t = 0; t < N_TYPES; t++)
        for (int k = 0; k < 13; k++) {
            int type = types[t], is_float = gguf_block_elems(type) == 1;
            if (!is_float && k == 12) break;
            size_t n = is_float ? lengths[k] : blocks[k] * (size_t)gguf_block_elems(type);
            const char *name = gguf_type_name(type);
            random_row(type, row, n);
            for (size_t i = 0; i < n; i++) x[i] = uniform() * uniform() * 4;
            double y64 = 0, size = 0;
            float acc[32] = {0}, y;
            gguf_dequantize(type, row, values, n);
            if (is_float) {
                for (size_t i = 0; i < n; i++) {
                    acc[i % 32] += values[i] * x[i];
                    y64 += (double)values[i] * x[i];
                    size += fabs((double)values[i] * x[i]);
                }
                for (int h = 16; h; h /= 2)
                    for (int j = 0; j < h; j++) acc[j] += acc[j + h];
                y = gguf_dot_f32(type, row, x, n);
            } else {
                gguf_quantize_q8(x, q, scale, n);
                for (size_t g = 0; g < n / 32; g++) {
                    int dot[2] = {0}, min = 0;
                    Element e[2] = {{0}};
                    for (size_t i = 32 * g; i < 32 * g + 32; i++) {
                        Element *p = &e[i % 32 / 16];
                        *p = element(type, row, i);
                        dot[i % 32 / 16] += p->sub * p->code * q[i];
                        min += p->sub_min * q[i];
                        float want = (float)(p->d * p->sub * p->code - p->min * p->sub_min);
                        CHECK(values[i] == want, "%s [%zu]: expected %a, got %a", name, i, want, values[i]);
                        y64 += (double)values[i] * scale[g] * q[i];
                    }
                    float d0 = (float)e[0].d * scale[g], d1 = (float)e[1].d * scale[g], m = (float)e[0].min * scale[g],
                        term;
                    if (type == GGUF_NVFP4) term = d0 * (float)dot[0] + d1 * (float)dot[1];
                    else term = d0 * (float)(dot[0] + dot[1]);
                    if (type == GGUF_NVFP4) size += fabs((double)d0 * dot[0]) + fabs((double)d1 * dot[1]);
                    else size += fabs((double)d0 * (dot[0] + dot[1])) + fabs((double)m * min);
                    if (e[0].min != 0) term -= m * (float)min;
                    CHECK(abs(dot[0] + dot[1]) < 1 << 24 && abs(min) < 1 << 24, "%s: integers are too wide", name);
                    acc[g % 8] += term;
                }
                for (int h = 4; h; h /= 2)
                    for (int j = 0; j < h; j++) acc[j] += acc[j + h];
                y = gguf_dot_q8(type, row, q, scale, n);
            }
            CHECK(fabs(y - y64) <= 2e-6 * size,
                  "%s dot of %zu: expected %a, got %a, tolerance %g", name, n, y64, y, 2e-6 * size);
            CHECK(y == acc[0], "%s dot of %zu: by definition %a, got %a", name, n, acc[0], y);
        }
    // The largest codes and scales, which give the largest integers.
    memset(q, 127, 256);
    for (int g = 0; g < 8; g++) scale[g] = 1;
    for (int sign = 0; sign < 2; sign++) {
        memset(row, sign ? 0x80 : 0x7f, 34);
        row[0] = 0;
        row[1] = 0x3c;
        float want = sign ? -128 * 127 * 32 : 127 * 127 * 32, y = gguf_dot_q8(GGUF_Q8_0, row, q, scale, 32);
        CHECK(y == want, "Q8_0 extreme: expected %g, got %g", want, y);
        memset(row, sign ? 0x00 : 0xff, 192);
        memset(row + 192, 0x80, 16);
        row[208] = 0;
        row[209] = 0x3c;
        want = sign ? 128 * 32 * 127 * 256.f : -128 * 31 * 127 * 256.f;
        y = gguf_dot_q8(GGUF_Q6_K, row, q, scale, 256);
        CHECK(y == want, "Q6_K extreme: expected %g, got %g", want, y);
        memset(q, -127, 256);
        memset(row, 0xff, 144);
        row[0] = row[2] = 0;
        row[1] = row[3] = 0x3c;
        want = -(63 * 15 - 63) * 127 * 256.f;
        y = gguf_dot_q8(GGUF_Q4_K, row, q, scale, 256);
        CHECK(y == want, "Q4_K extreme: expected %g, got %g", want, y);
        memset(q, 127, 256);
    }
    free(memory);
    free(x);
    free(values);
    free(scale);
    free(q);
}

// Many rows at once: the bits of gguf_dot_q8 for every pair of rows, and nothing written outside the result.
static void test_rows(void) {
    static const size_t n_ws[] = {1, 2, 3, 4, 5, 9, 16, 33};
    enum { MAX_ROWS = 270, MAX_N = 2816, STRIDE = 35 };
    float *x = malloc(MAX_N * sizeof *x), *scale = malloc(MAX_ROWS * MAX_N / 32 * sizeof *scale);
    float *out = malloc(MAX_ROWS * STRIDE * sizeof *out);
    int8_t *q = malloc(MAX_ROWS * MAX_N);
    for (int t = 0; t < N_TYPES; t++) {
        const int type = types[t];
        if (gguf_block_elems(type) == 1) continue;
        for (size_t n_rows = 1; n_rows <= MAX_ROWS; n_rows += n_rows < 34 ? 1 : n_rows < 70 ? 6 : 200) {
            const size_t k = n_rows == 33 ? MAX_N : n_rows % 5 == 4 ? 704 : 32 * (1 + n_rows % 24);
            const size_t elems = (size_t)gguf_block_elems(type), n = (k + elems - 1) / elems * elems;
            const size_t n_w = n_ws[n_rows % 8], size = gguf_packed_size(n), row_size = gguf_row_size(type, n);
            uint8_t *packed = malloc(n_rows * size);    // exact size, so that a sanitizer sees accesses beyond it
            uint8_t *rows = malloc(n_w * row_size);
            random_row(type, rows, n_w * n);
            for (size_t r = 0; r < n_rows; r++) {
                for (size_t i = 0; i < n; i++) x[i] = uniform() * uniform() * 4;
                if (r == 3) memset(x, 0, 32 * sizeof *x);
                if (r == 2) x[n - 1] = NAN;
                gguf_quantize_q8(x, q + r * n, scale + r * n / 32, n);
                gguf_pack_q8(q + r * n, scale + r * n / 32, n, packed + r * size);
            }
            for (size_t i = 0; i < MAX_ROWS * STRIDE; i++) out[i] = 7;
            gguf_dot_q8_rows(type, rows, n_w, packed, n_rows, n, out, STRIDE);
            for (size_t r = 0; r < MAX_ROWS; r++)
                for (size_t i = 0; i < STRIDE; i++) {
                    const int8_t *qr = q + r * n;
                    float want = 7, got = out[r * STRIDE + i];
                    if (r < n_rows && i < n_w) want = gguf_dot_q8(type, rows + i * row_size, qr, scale + r * n / 32, n);
                    CHECK(bits_of(got) == bits_of(want) || (isnan(got) && isnan(want)),
                          "%s rows, %zu by %zu of %zu, [%zu][%zu]: expected %a, got %a",
                          gguf_type_name(type), n_w, n_rows, n, r, i, want, got);
                }
            free(packed);
            free(rows);
        }
    }
    free(x);
    free(scale);
    free(out);
    free(q);
}

// Rms error of quantised Gaussian weights, in percent of their standard deviation. The limits are published figures of
// two digits, plus 2 %: a quantiser with worse codes or scales fails.
static void test_quantizers(void) {
    static const struct { int type; double percent; } rms[] = {
        {GGUF_F32, 0}, {GGUF_F16, 0.0207}, {GGUF_BF16, 0.166}, {GGUF_Q8_0, 0.54}, {GGUF_Q4_0, 8.6}, {GGUF_Q4_1, 7.8},
        {GGUF_Q5_0, 4.3}, {GGUF_Q5_1, 3.8}, {GGUF_Q2_K, 29.7}, {GGUF_Q3_K, 15.1}, {GGUF_Q4_K, 7.1}, {GGUF_Q5_K, 3.6},
        {GGUF_Q6_K, 1.8}, {GGUF_IQ4_NL, 7.9}, {GGUF_IQ4_XS, 7.7}, {GGUF_MXFP4, 11.4}, {GGUF_NVFP4, 10.3}};
    enum { N = 256 * 400, N_RMS = sizeof rms / sizeof *rms };
    float *x = malloc(N * sizeof *x), *y = malloc(N * sizeof *y);
    int n_can = 0;
    for (size_t i = 0; i < N; i++)
        x[i] = (float)(0.02 * sqrt(-2 * log((rng() + 1.0) * 0x1p-31)) * cos(6.283185307179586 * rng() * 0x1p-31));
    for (int type = -1; type <= GGUF_N_TYPES; type++) n_can += gguf_type_supported(type);
    CHECK(n_can == N_RMS, "quantisers: expected %d, got %d", N_RMS, n_can);
    for (int t = 0; t < N_RMS; t++) {
        const int type = rms[t].type;
        const char *name = gguf_type_name(type);
        const size_t size = gguf_row_size(type, N), bytes = (size_t)gguf_block_bytes(type);
        uint8_t *b = malloc(size), *again = malloc(size);                   // exact size, for a sanitizer
        gguf_quantize(type, x, b, N);
        gguf_dequantize(type, b, y, N);
        double error = 0, sum = 0;
        for (size_t i = 0; i < N; i++) {
            error += pow((double)x[i] - y[i], 2);
            sum += pow(x[i], 2);
        }
        error = 100 * sqrt(error / sum);
        CHECK(fabs(error - rms[t].percent) <= 0.02 * rms[t].percent,
              "%s quantised: expected an rms error of %.3g %%, got %.3g %%", name, rms[t].percent, error);
        // Zeros, constants, subnormals, huge and non-finite values: no undefined behaviour, and finite results for
        // finite values.
        static const float odd[] = {0, -0.0f, 1, -1, 0.375f, 0x1p-149f, -0x1p-130f, 1e-38f, -1e-20f, 6e4f, 3e38f,
                                    -INFINITY, NAN};
        for (size_t k = 0; k < sizeof odd / sizeof *odd; k++)
            for (int one = 0; one < 2; one++) {                 // the whole block, or one element of an ordinary one
                float in[256], out[256];
                for (size_t i = 0; i < 256; i++) in[i] = one && i % 32 != 5 ? x[i] : odd[k];
                memset(b, 0x55, 256 * 4);
                memset(again, 0xaa, 256 * 4);
                gguf_quantize(type, in, b, 256);
                gguf_quantize(type, in, again, 256);
                gguf_dequantize(type, b, out, 256);
                CHECK(memcmp(b, again, gguf_row_size(type, 256)) == 0, "%s of %g: bytes are left unwritten", name,
                      odd[k]);
                if (!(fabsf(odd[k]) <= 1)) continue;
                for (size_t i = 0; i < 256; i++)                            // 2 bits: a third of the range either way
                    CHECK(fabsf(out[i] - in[i]) <= 0.4f * fabsf(odd[k]) + 0.05f,
                          "%s of %g, [%zu]: expected %g, got %g", name, odd[k], i, in[i], out[i]);
            }
        // A block does not depend on its neighbours.
        gguf_quantize(type, x, b, N);
        for (size_t i = 0; i < size / bytes; i += 1 + size / bytes / 100) {
            gguf_quantize(type, x + i * (size_t)gguf_block_elems(type), again, (size_t)gguf_block_elems(type));
            CHECK(memcmp(b + i * bytes, again, bytes) == 0, "%s: block %zu alone is another", name, i);
        }
        free(b);
        free(again);
    }
    // Every scale of E4M3, and the midpoint to the next one: it rounds up, except after the last subnormal (7.5 and 8
    // units of 2^-9).
    for (int s = 0; s < 0x7e; s++) {
        const float v = 2 * gguf__e4m3_half((unsigned)s), half = (v + 2 * gguf__e4m3_half((unsigned)s + 1)) / 2;
        CHECK(gguf__to_e4m3(v) == s, "E4M3 %02x: got %02x", s, gguf__to_e4m3(v));
        CHECK(gguf__to_e4m3(half) == s + (s != 7), "E4M3 above %02x: got %02x", s, gguf__to_e4m3(half));
        const int below = gguf__to_e4m3(half * 0.999999f);
        CHECK(below == s, "E4M3 below the middle above %02x: got %02x", s, below);
    }
    CHECK(gguf__to_e4m3(1e30f) == 0x7e && gguf__to_e4m3(NAN) == 0 && gguf__to_e4m3(-1) == 0, "E4M3: out of range");
    free(x);
    free(y);
}

// Many rows of floats at once, compared with one pair at a time: strides, odd lengths, one to nine rows.
static void test_float_rows(void) {
    enum { N_W = 5, ROWS = 9, WIDTH = 100 };
    static const int types[] = { GGUF_F32, GGUF_F16, GGUF_BF16 };
    float x[ROWS * WIDTH], values[N_W * WIDTH], out[ROWS * 7];
    uint8_t w[N_W * WIDTH * 4];
    for (int i = 0; i < ROWS * WIDTH; i++) x[i] = sinf((float)i);
    for (int i = 0; i < N_W * WIDTH; i++) values[i] = cosf((float)i * 1.7f);
    for (size_t t = 0; t < sizeof types / sizeof *types; t++) {
        const size_t size = (size_t)gguf_block_bytes(types[t]), stride = (size_t)WIDTH * size;
        gguf_quantize(types[t], values, w, N_W * WIDTH);
        for (size_t n = 0; n <= 96; n += n < 70 ? 1 : 13)
            for (size_t rows = 1; rows <= ROWS; rows += 2) {
                int bad = 0;
                gguf_dot_f32_rows(types[t], w, N_W, stride, x, rows, WIDTH, n, out, 7);
                for (size_t r = 0; r < rows; r++)
                    for (size_t i = 0; i < N_W; i++) {
                        const float y = gguf_dot_f32(types[t], w + i * stride, x + r * WIDTH, n);
                        bad += memcmp(&y, &out[r * 7 + i], sizeof y) != 0;
                    }
                CHECK(!bad, "%s: %zu rows of %zu: %d of %zu products differ from gguf_dot_f32",
                      gguf_type_name(types[t]), rows, n, bad, rows * N_W);
            }
    }
}

int main(void) {
    test_table();
    test_scalars();
    test_quantize();
    test_golden();
    test_dots();
    test_rows();
    test_float_rows();
    test_quantizers();
    return test_done("blocks");
}
