/* test_kv.c - rows of quantised caches (parts/kv.h): their error on values of several distributions, compared with that
 * of the specification; rows of zeros, and rows with NaN and Inf; the Hadamard rotation; and the older TurboQuant
 * formats of other programs (TQ3_0 of 3.5 bits, K3 of 3.125, V4 of 4.25), which gemma4 itself does not use. */
#define _GNU_SOURCE
#include <math.h>
#include "../gemma4.h"
#include "../gguf.h"
#include "../parts/kv.h"
#include "test.h"

enum { DIM = 512, N_ROWS = 2000 };

static uint64_t rng_state = 1;
static double uniform(void) {                          // 0 < u < 1
    rng_state += 0x9e3779b97f4a7c15u;
    uint64_t z = rng_state;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return ((double)((z ^ (z >> 31)) >> 12) + 0.5) * 0x1p-52;
}
static double gaussian(void) { return sqrt(-2 * log(uniform())) * cos(6.283185307179586 * uniform()); }

typedef enum { GAUSSIAN, OUTLIERS, LOG_NORMAL, LAPLACE, N_KINDS } Kind;
static const char *const kind_names[] = { "Gaussian", "8 of 512 channels x 10", "log-normal channels", "Laplace" };

static void random_rows(Kind kind, float *x) {         // (N_ROWS, DIM)
    double channel[DIM];
    for (int i = 0; i < DIM; i++)
        channel[i] = kind == OUTLIERS ? (i % 64 == 5 ? 10 : 1) : kind == LOG_NORMAL ? exp(gaussian()) : 1;
    for (int i = 0; i < N_ROWS * DIM; i++) {
        const double u = uniform() - 0.5;
        x[i] = (float)(channel[i % DIM] * (kind == LAPLACE ? (u < 0 ? 1 : -1) * log(1 - 2 * fabs(u)) : gaussian()));
    }
}

typedef struct { double error, bias; } Quality;        // |x - y|^2 / |x|^2; x . y / x . x

static Quality quality(const float *x, const float *y, int n) {
    double error = 0, xy = 0, xx = 0;
    for (int i = 0; i < n; i++) {
        error += (double)(x[i] - y[i]) * (x[i] - y[i]);
        xy += (double)x[i] * y[i];
        xx += (double)x[i] * x[i];
    }
    return (Quality){ error / xx, xy / xx };
}

// Encodes rows x (N_ROWS, DIM) as type t, decodes them and rotates them back, into y.
static void encode_decode(KvType t, bool unbiased, const float *x, float *y) {
    uint8_t row[DIM * 4];
    uint16_t scales[DIM / 32];
    for (int r = 0; r < N_ROWS; r++) {
        kv_write_row(t, unbiased, DIM, x + r * DIM, row, scales);
        kv_read_rows(t, 1, DIM, row, scales, y + r * DIM);
        // the factors are 1 / 16 for a row and 1 / 8 back, and H H = 128 I
        kv_rotate_rows_back(y + r * DIM, DIM);
    }
}

static void test_errors(void) {
    static const struct { KvType type; bool unbiased; double most; } cases[] = {
        { KV_Q8_0, false, 3.0e-5 }, { KV_Q4_0, false, 7.5e-3 }, { KV_TQ4, false, 7.3e-3 }, { KV_TQ4, true, 7.4e-3 },
        { KV_TQ3, false, 3.3e-2 }, { KV_TQ3, true, 3.4e-2 }
    };
    float *x = malloc((size_t)N_ROWS * DIM * sizeof *x), *y = malloc((size_t)N_ROWS * DIM * sizeof *y);
    for (int kind = 0; kind < N_KINDS; kind++) {
        random_rows((Kind)kind, x);
        for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
            encode_decode(cases[c].type, cases[c].unbiased, x, y);
            const Quality q = quality(x, y, N_ROWS * DIM);
            CHECK(q.error <= cases[c].most, "type %d%s, %s: expected a relative error of at most %.3g, got %.3g",
                  cases[c].type, cases[c].unbiased ? " unbiased" : "", kind_names[kind], cases[c].most, q.error);
            CHECK(kind != GAUSSIAN || q.error >= cases[c].most * 0.9,
                  "type %d, %s: an error of %.3g is too small to be true", cases[c].type, kind_names[kind], q.error);
            if (cases[c].unbiased || cases[c].type == KV_Q8_0)
                CHECK(fabs(q.bias - 1) < 5e-4, "type %d, %s: scores are %.5f times the exact ones", cases[c].type,
                      kind_names[kind], q.bias);
            if (cases[c].unbiased && kind == GAUSSIAN)         // the factor that corrects a tied V
                CHECK(fabs(1 / (1 + q.error) - kv_tied_factor(cases[c].type)) < 1e-3,
                      "type %d: factor of V: expected %.4f, got %.4f", cases[c].type, 1 / (1 + q.error),
                      (double)kv_tied_factor(cases[c].type));
        }
    }
    free(x);
    free(y);
}

static void test_rotation(void) {
    float x[KV_ROTATION], q[KV_ROTATION], row[KV_ROTATION], query[KV_ROTATION];
    for (int round = 0; round < 50; round++) {
        for (int i = 0; i < KV_ROTATION; i++) x[i] = row[i] = (float)gaussian(), q[i] = query[i] = (float)gaussian();
        kv_rotate(row, 0.0625f);
        kv_rotate(query, 0.125f);
        double exact = 0, rotated = 0;
        for (int i = 0; i < KV_ROTATION; i++) {
            exact += (double)x[i] * q[i];
            rotated += (double)row[i] * query[i];
        }
        CHECK(fabs(exact - rotated) < 1e-4, "dot product of rotated groups: expected %g, got %g", exact, rotated);
        kv_rotate_back(row);
        double far = 0;
        for (int i = 0; i < KV_ROTATION; i++) far = fmax(far, fabs((double)row[i] - x[i]));
        CHECK(far < 2e-6, "a group that was rotated and rotated back differs by %g", far);
    }
}

static void test_edges(void) {
    static const KvType types[] = { KV_Q8_0, KV_Q4_0, KV_TQ4, KV_TQ3 };
    float x[KV_ROTATION], y[KV_ROTATION];
    uint8_t row[KV_ROTATION], again[KV_ROTATION];
    uint16_t scales[KV_ROTATION / 32], scales_again[KV_ROTATION / 32];
    for (int k = 0; k < 4; k++) {
        const KvType t = types[k];
        const size_t bytes = kv_row_bytes(t, KV_ROTATION);
        int bad = 0;
        memset(x, 0, sizeof x);
        kv_write_row(t, false, KV_ROTATION, x, row, scales);
        kv_read_rows(t, 1, KV_ROTATION, row, scales, y);
        for (int i = 0; i < KV_ROTATION; i++) bad += y[i] != 0;
        CHECK(!bad, "type %d: %d of %d zeros were not decoded as 0", t, bad, KV_ROTATION);
        static const float broken[] = { NAN, INFINITY, -INFINITY };
        for (int b = 0; b < 3; b++) {
            for (int i = 0; i < KV_ROTATION; i++) x[i] = (float)gaussian();
            x[77] = broken[b];
            kv_write_row(t, false, KV_ROTATION, x, row, scales);
            kv_read_rows(t, 1, KV_ROTATION, row, scales, y);
            for (int i = 0; i < KV_ROTATION; i++) bad += !isnan(y[i]);
            CHECK(!bad, "type %d: %g in a group: %d values are not NaN", t, (double)broken[b], bad);
        }
        for (int e = -90; e <= 12; e += 6) {           // a factor 2^e changes the scales only
            float times[KV_ROTATION];
            for (int i = 0; i < KV_ROTATION; i++) x[i] = (float)gaussian(), times[i] = ldexpf(x[i], e);
            kv_write_row(t, true, KV_ROTATION, x, row, scales);
            kv_write_row(t, true, KV_ROTATION, times, again, scales_again);
            CHECK(!memcmp(row, again, bytes), "type %d: 2^%d times the values has other codes", t, e);
        }
        // Decoded values are encoded to the same codes.
        for (int i = 0; i < KV_ROTATION; i++) x[i] = (float)gaussian();
        kv_write_row(t, false, KV_ROTATION, x, row, scales);
        kv_read_rows(t, 1, KV_ROTATION, row, scales, y);
        kv_rotate_back(y);
        kv_write_row(t, false, KV_ROTATION, y, again, scales_again);
        CHECK(!memcmp(row, again, bytes), "type %d: encoding decoded values changes codes", t);
    }
}

// ---- TurboQuant formats of other programs (spec/kv_and_pflash.md B2, B3, B7)
// -----------------------------------------

// Rows that are common in models, constant or alternating, are spread over all values: without signs, one value would get
// all of the row.
static void test_signs(void) {
    for (int period = 1; period <= 64; period *= 2) {
        float y[KV_ROTATION], most = 0;
        for (int i = 0; i < KV_ROTATION; i++) y[i] = i / period % 2 ? -1 : 1;
        kv_rotate(y, 0.0625f);
        for (int i = 0; i < KV_ROTATION; i++) most = fmaxf(most, fabsf(y[i]));
        CHECK(most < 3.2f, "a row that alternates every %d values: one rotated value is %g, the root of the mean square 0.71",
              period, (double)most);
    }
}

// The rotation: diag(S2) H diag(S1) / sqrt(128), H of 128 rows, S1 and S2 signs.
static const uint8_t S1[] = {
    0x59, 0x03, 0x6a, 0xe4, 0x49, 0x59, 0xf8, 0x42, 0xbb, 0x3b, 0xc6, 0xa4, 0xa9, 0x50, 0xf2, 0x49
};
static const uint8_t S2[] = {
    0x90, 0xee, 0xac, 0x16, 0xdc, 0x8f, 0x62, 0x3f, 0x7a, 0x35, 0xa5, 0xb7, 0x62, 0x65, 0xa5, 0xbe
};
static void signs(const uint8_t *s, float *x) {
    for (int i = 0; i < 128; i++)
        if (s[i / 8] >> (i % 8) & 1) x[i] = -x[i];
}
static void turboquant_rotate(float *x, bool back) {
    signs(back ? S2 : S1, x);
    kv_hadamard(x);
    for (int i = 0; i < 128; i++) x[i] *= (float)sqrt(1 / 128.0);
    signs(back ? S1 : S2, x);
}

static const float tq3_levels[] = { -0.190685f, -0.117832f, -0.065717f, -0.021460f,
                                    0.021460f, 0.065717f, 0.117832f, 0.190685f };
static const float tq4_levels[] = { 0.1280f, 0.3866f, 0.6540f, 0.9375f,                // times 1/sqrt(128)
                                    1.2482f, 1.6048f, 2.0464f, 2.6892f };
static float level_of(int bits, int i) {
    if (bits == 3) return tq3_levels[i];
    return (i < 8 ? -tq4_levels[7 - i] : tq4_levels[i - 8]) / sqrtf(128);
}

// Computes the level indices (128). Returns the scale with which the decoded group keeps the norm of x.
static float turboquant_encode(int bits, const float *x, uint8_t *index) {
    float y[128];
    double norm = 0, length = 0;
    memcpy(y, x, sizeof y);
    for (int i = 0; i < 128; i++) norm += (double)x[i] * x[i];
    norm = sqrt(norm);
    turboquant_rotate(y, false);
    for (int i = 0; i < 128; i++) {
        index[i] = 0;
        for (int l = 1; l < 1 << bits; l++)
            index[i] += norm >= 1e-10 && y[i] / (float)norm >= 0.5f * (level_of(bits, l - 1) + level_of(bits, l));
        length += (double)level_of(bits, index[i]) * level_of(bits, index[i]);
    }
    return norm < 1e-10 ? 0 : (float)(norm / sqrt(length));
}

// 4 blocks of 14 bytes: scale, low bits of 32 indices, high bits.
static void write_tq3_0(const float *x, uint8_t *out) {
    uint8_t index[128];
    const uint16_t scale = gguf_f32_to_f16(turboquant_encode(3, x, index));
    memset(out, 0, 56);
    for (int b = 0; b < 4; b++, out += 14) {
        memcpy(out, &scale, 2);
        for (int j = 0; j < 32; j++) {
            out[2 + j / 4] |= (uint8_t)((index[32 * b + j] & 3) << (2 * (j % 4)));
            out[10 + j / 8] |= (uint8_t)(index[32 * b + j] >> 2 << (j % 8));
        }
    }
}
static void read_tq3_0(const uint8_t *in, float *x) {
    for (int b = 0; b < 4; b++, in += 14) {
        uint16_t scale;
        memcpy(&scale, in, 2);
        for (int j = 0; j < 32; j++) {
            const int low = in[2 + j / 4] >> (2 * (j % 4)) & 3, high = in[10 + j / 8] >> (j % 8) & 1;
            x[32 * b + j] = gguf_f16_to_f32(scale) * tq3_levels[low | high << 2];
        }
    }
    turboquant_rotate(x, true);
}

// A block of 128 values. K3, 50 bytes: scale, low bits, high bits. V4, 68 bytes: scale, 2 unused bytes, 64 bytes of
// indices, low nibble first.
static void write_block(int bits, const float *x, uint8_t *out) {
    uint8_t index[128];
    const uint16_t scale = gguf_f32_to_f16(turboquant_encode(bits, x, index));
    memset(out, 0, bits == 3 ? 50 : 68);
    memcpy(out, &scale, 2);
    for (int j = 0; j < 128; j++) {
        if (bits == 4) out[4 + j / 2] |= (uint8_t)(index[j] << (4 * (j % 2)));
        if (bits == 3) out[2 + j / 4] |= (uint8_t)((index[j] & 3) << (2 * (j % 4)));
        if (bits == 3) out[34 + j / 8] |= (uint8_t)(index[j] >> 2 << (j % 8));
    }
}
static void read_block(int bits, const uint8_t *in, float *x) {
    uint16_t scale;
    memcpy(&scale, in, 2);
    for (int j = 0; j < 128; j++) {
        const int three = (in[2 + j / 4] >> (2 * (j % 4)) & 3) | (in[34 + j / 8] >> (j % 8) & 1) << 2;
        x[j] = gguf_f16_to_f32(scale) * level_of(bits, bits == 3 ? three : in[4 + j / 2] >> (4 * (j % 2)) & 15);
    }
    turboquant_rotate(x, true);
}

static void test_turboquant(void) {
    static const struct { const char *name; size_t bytes; double most; } formats[] = {
        { "TQ3_0", 56, 3.45e-2 }, { "K3", 50, 3.45e-2 }, { "V4", 68, 9.4e-3 } };
    enum { N = 4000 };
    float *x = malloc((size_t)N * 128 * sizeof *x), *y = malloc((size_t)N * 128 * sizeof *y);
    uint8_t *bytes = malloc((size_t)N * 68);
    for (int i = 0; i < N * 128; i++) x[i] = (float)gaussian();
    for (int f = 0; f < 3; f++) {
        for (int r = 0; r < N; r++) {
            uint8_t *at = bytes + (size_t)r * formats[f].bytes;
            if (f == 0) {
                write_tq3_0(x + r * 128, at);
                read_tq3_0(at, y + r * 128);
            } else {
                write_block(f + 2, x + r * 128, at);
                read_block(f + 2, at, y + r * 128);
            }
        }
        const Quality q = quality(x, y, N * 128);
        CHECK(q.error < formats[f].most && q.error > 0.9 * formats[f].most,
              "%s: expected an error of about %.3g, got %.3g", formats[f].name, formats[f].most, q.error);
        double norms = 0;                              // the scale keeps the norm
        for (int r = 0; r < N; r++) {
            double a = 0, b = 0;
            for (int i = 128 * r; i < 128 * (r + 1); i++) {
                a += (double)x[i] * x[i];
                b += (double)y[i] * y[i];
            }
            norms = fmax(norms, fabs(sqrt(b / a) - 1));
        }
        CHECK(norms < 1e-3, "%s: norms are off by up to %g", formats[f].name, norms);
    }
    // The bytes of one vector: in the rotated basis, value 5 is far larger than the others, so it has the highest
    // index.
    float one[128] = { 0 };
    uint8_t block[68];
    for (int i = 0; i < 128; i++) one[i] = (i % 2 ? -1 : 1) * 0.05f;
    one[5] = 3;
    turboquant_rotate(one, true);
    write_tq3_0(one, block);
    CHECK((block[2 + 1] >> 2 & 3) == 3 && (block[10] >> 5 & 1), "TQ3_0: value 5 has code %d", block[3] >> 2 & 3);
    write_block(4, one, block);
    CHECK(block[4 + 2] >> 4 == 15, "V4: value 5 has code %d", block[6] >> 4);
    free(x);
    free(y);
    free(bytes);
}

int main(void) {
    test_errors();
    test_rotation();
    test_signs();
    test_edges();
    test_turboquant();
    return test_done("kv");
}
