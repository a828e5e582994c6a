/* kv.h - the rows of a KV cache: how each type of gemma4.h stores them, the Hadamard rotation, the codes.
 *
 * The CPU backend, the reference, the CUDA kernels and the tests all use this code. On a GPU the lanes of a warp share
 * a group of values; on the CPU one caller does the whole group. Lanes sum only integers, whose sum does not depend on
 * the order, so CPU and GPU compute the same codes, bit for bit.
 *
 * A row of a quantised type (kv_group() > 0) consists of groups of 128 values. Each group is first multiplied by an
 * orthogonal matrix, a randomised Hadamard rotation, which spreads outliers over the group. The rotated values are then
 * stored with few bits per value and one f16 scale per kv_group() values. Rotating the query too leaves every dot
 * product q . k unchanged, and a weighted sum of rows of V is rotated back once, after the sum; so attention never
 * rotates a cached row. With H the Hadamard matrix (entries +-1) and S a diagonal matrix of signs:
 *     row   y = H S x / 16       query   y = H S x / 8       back   x = S H y / 8        all factors are powers of two
 * This rotation has nothing to do with RoPE, which is applied to Q and K before it.
 *
 *   type   bits    codes of a group                                           value
 *   q8_0   8.5     128 int8                                                   scale of 32 * code
 *   q4_0   4.5     16 words of 8 nibbles; value 8 w + n: nibble n of word w   scale of 32 * (nibble - 8)
 *   tq4    4.25    the same; bit 3 of a nibble is the sign                    scale of 64 * +-{1 4 7 10 13 17 22 29}
 *   tq3    3.125   8 words W, 4 words S; value 32 b + 8 k + n: two bits of    scale of 128 * +-{1 3 5 8}
 *                  W[2 b + k / 2] from bit 4 n + 2 (k % 2) on, its sign is
 *                  bit 4 n + k of S[b]
 * "bits" is per value, scale included. Words have the byte order of the machine. tq4 and tq3 are TurboQuant, with a
 * search for the best scale: their levels are those of an optimal 4-bit and 3-bit quantiser of a Gaussian, rounded to
 * integers; the levels of tq3 are integers whose f16 has a low byte of 0.
 *
 *   [1] Hadamard rotation              [3] Reading codes
 *   [2] Encoding                       [4] Rows on the CPU     [5] A value on a GPU
 *
 * Uses gemma4.h, and on the CPU gguf.h. Begin with kv_write_row() and kv_read_rows(). A file of GPU code defines the
 * macros below before it includes this one. */
#ifndef KV_H
#define KV_H
#include <math.h>

#ifndef KV_CODE
#define KV_CODE static inline
#define KV_LANE 0             // number of this lane
#define KV_LANES 1            // lanes that share a group
#define KV_SUM(n) (n)         // sum of a uint32_t over the lanes; every lane gets it
#define KV_MAX(x) (x)         // maximum of a float over the lanes; every lane gets it
#define KV_SYNC() ((void)0)   // after it, a lane may read what other lanes wrote
#define KV_TO_HALF(x) gguf_f32_to_f16(x)
#define KV_FROM_HALF(h) gguf_f16_to_f32(h)
#endif

enum { KV_ROTATION = 128 };   // values of a group, which one rotation mixes; divides dim of a quantised plane

// ==== [1] Hadamard rotation =========================================================================================
// Entry i of S: the highest bit of a hash of i, so that the signs follow no pattern that a model could share.
KV_CODE float kv_sign(int i) {
    const uint32_t x = (uint32_t)i * 0x9e3779b1u;
    return (x ^ x >> 15) * 0x85ebca77u >> 31 ? -1.0f : 1.0f;
}

// y = H y, in place. Each stage only adds and subtracts pairs, so the number of lanes changes no bit.
KV_CODE void kv_hadamard(float *y) {
    for (int step = 1; step < KV_ROTATION; step *= 2) {
        KV_SYNC();
        for (int p = KV_LANE; p < KV_ROTATION / 2; p += KV_LANES) {
            const int i = p / step * 2 * step + p % step;
            const float a = y[i], b = y[i + step];
            y[i] = a + b;
            y[i + step] = a - b;
        }
    }
    KV_SYNC();
}

// Rotates y (128) into the basis of quantised rows; factor is 1 / 16 for a row, 1 / 8 for a query.
KV_CODE void kv_rotate(float *y, float factor) {
    KV_SYNC();
    for (int i = KV_LANE; i < KV_ROTATION; i += KV_LANES) y[i] *= kv_sign(i) * factor;
    kv_hadamard(y);
}

// Rotates y (128) back from that basis.
KV_CODE void kv_rotate_back(float *y) {
    kv_hadamard(y);
    for (int i = KV_LANE; i < KV_ROTATION; i += KV_LANES) y[i] *= kv_sign(i) * 0.125f;
    KV_SYNC();
}

// ==== [2] Encoding ==================================================================================================
// Level i of a codebook, and the boundary halfway between levels i - 1 and i.
KV_CODE int kv_level(KvType t, int i) {                // the constants hold one level per byte
    return (int)((t == KV_TQ4 ? 0x1d16110d0a070401u : 0x08050301u) >> (8 * i) & 0xff);
}
KV_CODE float kv_boundary(KvType t, int i) { return 0.5f * (float)(kv_level(t, i - 1) + kv_level(t, i)); }

// A row of K gets the scale with which the decoded row y^ satisfies x . y^ = x . x ("unbiased"), so that attention
// scores are right on average. This scale is larger than the one with the smallest error. If one row is both K and V
// (tied), its values are therefore too large for V on average. Attention corrects this: it multiplies the weights of V
// by kv_tied_factor(), which is 1 - the relative error of the type.
KV_CODE float kv_tied_factor(KvType t) { return t == KV_TQ3 ? 0.968f : t == KV_TQ4 ? 0.9928f : 1.0f; }

// Uniform levels: codes of n values, the value of largest magnitude gets the last code. Returns the scale.
KV_CODE float kv_encode_uniform(KvType t, const float *y, uint8_t *code, int n) {
    float high = -INFINITY, low = -INFINITY;           // maximum of the values, and of the negated values
    for (int i = KV_LANE; i < n; i += KV_LANES) {
        high = fmaxf(high, y[i]);
        low = fmaxf(low, -y[i]);
    }
    high = KV_MAX(high);
    low = KV_MAX(low);
    const float most = high >= low ? high : -low, unit = t == KV_Q8_0 ? fabsf(most) / 127 : most / -8;
    const float per_unit = fabsf(most) < 0x1p-100f ? 0 : t == KV_Q8_0 ? 127 / fabsf(most) : -8 / most;
    for (int i = KV_LANE; i < n; i += KV_LANES) {
        const int q = (int)rintf(y[i] * per_unit);     // -8 .. 8 in q4_0, where 8 has no code
        code[i] = (uint8_t)(t == KV_Q8_0 ? q : q < 7 ? q + 8 : 15);
    }
    return per_unit == 0 ? 0 : unit;
}

// Levels of a codebook: tries nine step sizes and keeps the one with the smallest error. The values are first scaled by
// `up` to integers x below 4096, so that all sums are exact. With c the level of x and the best scale for these levels,
// the error is sum x^2 - (sum x c)^2 / sum c^2. Returns the scale.
KV_CODE float kv_encode_codebook(KvType t, bool unbiased, const float *y, uint8_t *code, int n) {
    const int n_levels = t == KV_TQ4 ? 8 : 4;
    float most = 0, best = -1, step = 0;
    uint32_t squares = 0, best_xc = 0, best_cc = 1;
    for (int i = KV_LANE; i < n; i += KV_LANES) most = fmaxf(most, fabsf(y[i]));
    most = KV_MAX(most);
    if (most < 0x1p-100f) most = 0x1p-100f;
    const float up = ldexpf(1, 11 - ilogbf(most));
    for (int i = KV_LANE; i < n; i += KV_LANES) {
        const int x = (int)rintf(y[i] * up);
        squares += (uint32_t)(x * x);
    }
    squares = KV_SUM(squares);
    const float base = sqrtf((float)squares / n) * (t == KV_TQ4 ? 2.733f / 29 : 0.2675f) / 100;
    for (int k = 80; k <= 120; k += 5) {
        uint32_t xc = 0, cc = 0;                       // sum x c, sum c^2
        for (int i = KV_LANE; i < n; i += KV_LANES) {
            const float x = fabsf(rintf(y[i] * up));
            int level = 0;
            for (int l = 1; l < n_levels; l++) level += x > kv_boundary(t, l) * (base * k);
            const int c = kv_level(t, level);
            xc += (uint32_t)((int)x * c);
            cc += (uint32_t)(c * c);
        }
        xc = KV_SUM(xc);
        cc = KV_SUM(cc);
        const float gain = (float)xc * (float)xc / (float)cc;
        if (gain > best) {
            best = gain;
            step = base * k;
            best_xc = xc;
            best_cc = cc;
        }
    }
    for (int i = KV_LANE; i < n; i += KV_LANES) {
        const float x = fabsf(rintf(y[i] * up));
        int level = 0;
        for (int l = 1; l < n_levels; l++) level += x > kv_boundary(t, l) * step;
        code[i] = (uint8_t)(level + (y[i] < 0 ? n_levels : 0));
    }
    if (squares == 0) return 0;
    return (unbiased ? (float)squares / (float)best_xc : (float)best_xc / (float)best_cc) / up;
}

// Packs the codes of a group into the words of a row.
KV_CODE void kv_pack(KvType t, const uint8_t *code, uint32_t *words) {
    const int n_words = t == KV_Q8_0 ? 32 : t == KV_TQ3 ? 12 : 16;
    for (int w = KV_LANE; w < n_words; w += KV_LANES) {
        uint32_t word = 0;
        for (int n = 0; n < 8; n++) {
            if (t == KV_Q8_0) word |= n < 4 ? (uint32_t)code[4 * w + n] << (8 * n) : 0;
            else if (t != KV_TQ3) word |= (uint32_t)code[8 * w + n] << (4 * n);
            else if (w < 8)                            // a word of W: the low bits of 16 values
                word |= (uint32_t)(code[16 * w + n] & 3) << (4 * n) |
                        (uint32_t)(code[16 * w + 8 + n] & 3) << (4 * n + 2);
            else
                for (int k = 0; k < 4; k++) word |= (uint32_t)(code[32 * (w - 8) + 8 * k + n] >> 2) << (4 * n + k);
        }
        words[w] = word;
    }
}

// Encodes y (128), a rotated group, to packed codes and their scales; code (128) is scratch. If a value is not finite,
// all scales of the group become NaN and the value is set to 0 in y.
KV_CODE void kv_encode(KvType t, bool unbiased, float *y, uint8_t *code, uint32_t *codes, uint16_t *scales) {
    const int n = kv_group(t);
    const bool uniform = t == KV_Q8_0 || t == KV_Q4_0;
    uint32_t broken = 0;
    KV_SYNC();
    for (int i = KV_LANE; i < KV_ROTATION; i += KV_LANES)
        if (!(fabsf(y[i]) < 0x1p100f)) {
            broken = 1;
            y[i] = 0;
        }
    broken = KV_SUM(broken);
    KV_SYNC();
    for (int g = 0; g < KV_ROTATION / n; g++) {
        const float *x = y + g * n;
        const float scale = uniform ? kv_encode_uniform(t, x, code + g * n, n)
                                    : kv_encode_codebook(t, unbiased, x, code + g * n, n);
        if (KV_LANE == 0) scales[g] = broken ? 0x7e00 : KV_TO_HALF(scale);
    }
    KV_SYNC();
    kv_pack(t, code, codes);
    KV_SYNC();
}

// ==== [3] Reading codes =============================================================================================
// Codes of values 8 o .. 8 o + 7 of a group, as nibbles. Not for q8_0.
KV_CODE uint32_t kv_nibbles(KvType t, const uint32_t *words, int o) {
    if (t != KV_TQ3) return words[o];
    return (words[o / 2] >> (2 * (o % 2)) & 0x33333333u) | (words[8 + o / 4] >> (o % 4) & 0x11111111u) << 2;
}

// The value of a nibble, as a multiple of the scale.
KV_CODE int kv_multiple(KvType t, uint32_t nibble) {
    if (t == KV_Q4_0) return (int)nibble - 8;
    const uint32_t sign = t == KV_TQ4 ? 8 : 4;
    return nibble & sign ? -kv_level(t, nibble & (sign - 1)) : kv_level(t, nibble);
}

#ifdef GGUF_H
// ==== [4] Rows on the CPU ===========================================================================================
// Stores v (dim) in a row; of a quantised type: rotated, and its scales in `scales`.
static inline void kv_write_row(KvType t, bool unbiased, int dim, const float *v, void *row, uint16_t *scales) {
    const int type = t == KV_F32 ? GGUF_F32 : t == KV_F16 ? GGUF_F16 : GGUF_BF16;      // stored as in a GGUF file
    if (!kv_group(t)) {
        gguf_quantize(type, v, row, (size_t)dim);
        return;
    }
    for (int g = 0; g < dim / KV_ROTATION; g++) {
        float y[KV_ROTATION];
        uint8_t code[KV_ROTATION];
        memcpy(y, v + g * KV_ROTATION, sizeof y);
        kv_rotate(y, 0.0625f);
        kv_encode(t, unbiased, y, code, (uint32_t *)((char *)row + kv_row_bytes(t, g * KV_ROTATION)),
                  scales + g * KV_ROTATION / kv_group(t));
    }
}

// Decodes n groups of a quantised type to floats. Inlined with a constant t, so that the branches on it disappear.
static inline void kv_read_groups(KvType t, int n, const uint32_t *words, const uint16_t *scales, float *v) {
    const int group = kv_group(t);
    float multiple[16];
    for (uint32_t i = 0; i < 16 && t != KV_Q8_0; i++) multiple[i] = (float)kv_multiple(t, i & (t == KV_TQ3 ? 7 : 15));
    for (int g = 0; g < n; g++, words += kv_row_bytes(t, KV_ROTATION) / 4)
        for (int from = 0; from < KV_ROTATION; from += group, v += group) {
            const float scale = KV_FROM_HALF(*scales++);
            const int8_t *codes = (const int8_t *)words + from;
            for (int i = 0; i < group && t == KV_Q8_0; i++) v[i] = scale * (float)codes[i];
            for (int o = 0; o < group / 8 && t != KV_Q8_0; o++) {
                const uint32_t nibbles = kv_nibbles(t, words, from / 8 + o);
                for (int i = 0; i < 8; i++) v[8 * o + i] = scale * multiple[nibbles >> (4 * i) & 15];
            }
        }
}

// Decodes n consecutive rows to floats (n, dim). Rows of a quantised type stay rotated.
static inline void kv_read_rows(KvType t, int n, int dim, const void *rows, const uint16_t *scales, float *v) {
    const int groups = n * (dim / KV_ROTATION);
    switch (t) {
    case KV_Q8_0: kv_read_groups(KV_Q8_0, groups, (const uint32_t *)rows, scales, v); return;
    case KV_Q4_0: kv_read_groups(KV_Q4_0, groups, (const uint32_t *)rows, scales, v); return;
    case KV_TQ4: kv_read_groups(KV_TQ4, groups, (const uint32_t *)rows, scales, v); return;
    case KV_TQ3: kv_read_groups(KV_TQ3, groups, (const uint32_t *)rows, scales, v); return;
    default: gguf_dequantize(t == KV_F32 ? GGUF_F32 : t == KV_F16 ? GGUF_F16 : GGUF_BF16, rows, v, (size_t)n * dim);
    }
}

// Rotates a query (dim) into the basis of quantised rows; rotates a weighted sum of rows (dim) back from it.
static inline void kv_rotate_query(float *q, int dim) {
    for (int g = 0; g < dim; g += KV_ROTATION) kv_rotate(q + g, 0.125f);
}
static inline void kv_rotate_rows_back(float *y, int dim) {
    for (int g = 0; g < dim; g += KV_ROTATION) kv_rotate_back(y + g);
}
#else
// ==== [5] A value on a GPU ==========================================================================================
// Value i of a row of a quantised type. It stays rotated.
KV_CODE float kv_value(KvType t, const void *row, const uint16_t *scales, int i) {
    const uint32_t *words = (const uint32_t *)((const char *)row + kv_row_bytes(t, i - i % KV_ROTATION));
    const float scale = KV_FROM_HALF(scales[i / kv_group(t)]);
    if (t == KV_Q8_0) return scale * ((const int8_t *)row)[i];
    return scale * kv_multiple(t, kv_nibbles(t, words, i % KV_ROTATION / 8) >> (4 * (i % 8)) & 15);
}
#endif
#endif
