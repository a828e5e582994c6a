/* kv.h - what a row of the KV cache is made of: the types of gemma4.h, the rotation, the codes.
 *
 * One text for the definition, the CPU, CUDA and the tests. On a GPU the lanes of a warp share a group of values, on the
 * CPU one caller has it alone; everything that lanes add up is a whole number, so both find the same codes, bit for bit.
 *
 * A row of a quantised type (kv_group() > 0) is cut into groups of 128 values. A group is turned by an orthogonal matrix
 * first, so that no value stands out, and then written with few bits a value and f16 scales, one for kv_group() values.
 * Dot products do not see the turn when q is turned as well, and sums of rows are turned back once at the end; so no
 * reader of a cache turns a row. With H the Hadamard matrix of +-1 and S a diagonal of signs:
 *     row   y = H S x / 16        q   y = H S x / 8        back   x = S H y / 8           all factors are exact
 *
 *   type   bits    codes of a group                                           value
 *   q8_0   8.5     128 int8                                                   scale of 32 * code
 *   q4_0   4.5     16 words of 8 nibbles; value 8 w + n: nibble n of word w   scale of 32 * (nibble - 8)
 *   tq4    4.25    the same; bit 3 of a nibble is the sign                    scale of 64 * +-{1 4 7 10 13 17 22 29}
 *   tq3    3.125   8 words W, 4 words S; value 32 b + 8 k + n: two bits of    scale of 128 * +-{1 3 5 8}
 *                  W[2 b + k / 2] from bit 4 n + 2 (k % 2) on, its sign is
 *                  bit 4 n + k of S[b]
 * Words have the byte order of the machine. The levels are those of a Gaussian of 4 and 3 bits, the latter rounded to
 * numbers whose f16 has a low byte of 0 (TurboQuant with a search for the scale).
 *
 *   [1] Turning groups                 [3] Reading codes
 *   [2] Encoding                       [4] Rows on the CPU     [5] A value on a GPU
 *
 * Needs gemma4.h. On the CPU also gguf.h. A GPU's file says before what KV_CODE,
 * KV_LANE, KV_LANES, KV_SUM, KV_MOST, KV_SYNC, KV_TO_HALF and KV_FROM_HALF are there. */
#ifndef KV_H
#define KV_H
#include <math.h>

#ifndef KV_CODE
#define KV_CODE static inline
#define KV_LANE 0             // of
#define KV_LANES 1            // that share a group
#define KV_SUM(n) (n)         // over the lanes, of a uint32_t; all get it
#define KV_MOST(x) (x)        // the largest of a float
#define KV_SYNC() ((void)0)   // what lanes wrote may be read by others
#define KV_TO_HALF(x) gguf_f32_to_f16(x)
#define KV_FROM_HALF(h) gguf_f16_to_f32(h)
#endif

enum { KV_TURN = 128 };       // values that are turned together; rows of quantised types are multiples

// ==== [1] Turning groups ============================================================================================
// The sign of value i in S, of no pattern that a model could have: the highest bit of a mixed up i.
KV_CODE float kv_sign(int i) {
    const uint32_t x = (uint32_t)i * 0x9e3779b1u;
    return (x ^ x >> 15) * 0x85ebca77u >> 31 ? -1.0f : 1.0f;
}

// y = H y, in place. Each step only adds and subtracts pairs: lanes or not, the bits are the same.
KV_CODE void kv_hadamard(float *y) {
    for (int step = 1; step < KV_TURN; step *= 2) {
        KV_SYNC();
        for (int p = KV_LANE; p < KV_TURN / 2; p += KV_LANES) {
            const int i = p / step * 2 * step + p % step;
            const float a = y[i], b = y[i + step];
            y[i] = a + b;
            y[i + step] = a - b;
        }
    }
    KV_SYNC();
}

// (128) into the basis of quantised rows: factor 1 / 16 for a row, 1 / 8 for a query.
KV_CODE void kv_turn(float *y, float factor) {
    KV_SYNC();
    for (int i = KV_LANE; i < KV_TURN; i += KV_LANES) y[i] *= kv_sign(i) * factor;
    kv_hadamard(y);
}

// (128) back from that basis.
KV_CODE void kv_turn_back(float *y) {
    kv_hadamard(y);
    for (int i = KV_LANE; i < KV_TURN; i += KV_LANES) y[i] *= kv_sign(i) * 0.125f;
    KV_SYNC();
}

// ==== [2] Encoding ==================================================================================================
// Level i of a codebook, and the middle between levels i - 1 and i.
KV_CODE int kv_level(KvType t, int i) {                // a byte each
    return (int)((t == KV_TQ4 ? 0x1d16110d0a070401u : 0x08050301u) >> (8 * i) & 0xff);
}
KV_CODE float kv_edge(KvType t, int i) { return 0.5f * (float)(kv_level(t, i - 1) + kv_level(t, i)); }

// Scores are made with rows whose scale keeps x * y^ = x * x ("unbiased"), which is larger than the scale that keeps
// the error small. Where one row is K and V (tied), V is that much too large on average, and attention's weights of V
// take this factor: 1 - the relative error of the type.
KV_CODE float kv_tied_factor(KvType t) { return t == KV_TQ3 ? 0.968f : t == KV_TQ4 ? 0.9928f : 1.0f; }

// Codes and scale of n values: the largest value becomes the last code. -> scale
KV_CODE float kv_encode_even(KvType t, const float *y, uint8_t *code, int n) {
    float high = -INFINITY, low = -INFINITY;           // the largest value, and the largest of -value
    for (int i = KV_LANE; i < n; i += KV_LANES) high = fmaxf(high, y[i]), low = fmaxf(low, -y[i]);
    high = KV_MOST(high), low = KV_MOST(low);
    const float most = high >= low ? high : -low, unit = t == KV_Q8_0 ? fabsf(most) / 127 : most / -8;
    const float per_unit = fabsf(most) < 0x1p-100f ? 0 : t == KV_Q8_0 ? 127 / fabsf(most) : -8 / most;
    for (int i = KV_LANE; i < n; i += KV_LANES) {
        const int q = (int)rintf(y[i] * per_unit);     // -8 .. 8 in q4_0, where 8 has no code
        code[i] = (uint8_t)(t == KV_Q8_0 ? q : q < 7 ? q + 8 : 15);
    }
    return per_unit == 0 ? 0 : unit;
}

// The same with a codebook: of nine scales the one that leaves the smallest error. Values are whole numbers below 4096,
// in `up`ths; for the levels c that they get, error = sum x^2 - (sum x c)^2 / sum c^2.
KV_CODE float kv_encode_levels(KvType t, bool unbiased, const float *y, uint8_t *code, int n) {
    const int n_levels = t == KV_TQ4 ? 8 : 4;
    float most = 0, best = -1, step = 0;
    uint32_t squares = 0, best_along = 0, best_length = 1;
    for (int i = KV_LANE; i < n; i += KV_LANES) most = fmaxf(most, fabsf(y[i]));
    most = KV_MOST(most);
    if (most < 0x1p-100f) most = 0x1p-100f;
    const float up = ldexpf(1, 11 - ilogbf(most));
    for (int i = KV_LANE; i < n; i += KV_LANES) {
        const int x = (int)rintf(y[i] * up);
        squares += (uint32_t)(x * x);
    }
    squares = KV_SUM(squares);
    const float base = sqrtf((float)squares / n) * (t == KV_TQ4 ? 2.733f / 29 : 0.2675f) / 100;
    for (int k = 80; k <= 120; k += 5) {
        uint32_t along = 0, length = 0;                // sum x c, sum c^2
        for (int i = KV_LANE; i < n; i += KV_LANES) {
            const float x = fabsf(rintf(y[i] * up));
            int level = 0;
            for (int l = 1; l < n_levels; l++) level += x > kv_edge(t, l) * (base * k);
            const int c = kv_level(t, level);
            along += (uint32_t)((int)x * c);
            length += (uint32_t)(c * c);
        }
        along = KV_SUM(along), length = KV_SUM(length);
        const float good = (float)along * (float)along / (float)length;
        if (good > best) best = good, step = base * k, best_along = along, best_length = length;
    }
    for (int i = KV_LANE; i < n; i += KV_LANES) {
        const float x = fabsf(rintf(y[i] * up));
        int level = 0;
        for (int l = 1; l < n_levels; l++) level += x > kv_edge(t, l) * step;
        code[i] = (uint8_t)(level + (y[i] < 0 ? n_levels : 0));
    }
    if (squares == 0) return 0;
    return (unbiased ? (float)squares / (float)best_along : (float)best_along / (float)best_length) / up;
}

// The codes of a group as they lie in a row.
KV_CODE void kv_pack(KvType t, const uint8_t *code, uint32_t *words) {
    const int n_words = t == KV_Q8_0 ? 32 : t == KV_TQ3 ? 12 : 16;
    for (int w = KV_LANE; w < n_words; w += KV_LANES) {
        uint32_t word = 0;
        for (int n = 0; n < 8; n++) {
            if (t == KV_Q8_0) word |= n < 4 ? (uint32_t)code[4 * w + n] << (8 * n) : 0;
            else if (t != KV_TQ3) word |= (uint32_t)code[8 * w + n] << (4 * n);
            else if (w < 8)                            // 16 values of half a block
                word |= (uint32_t)(code[16 * w + n] & 3) << (4 * n) | (uint32_t)(code[16 * w + 8 + n] & 3) << (4 * n + 2);
            else
                for (int k = 0; k < 4; k++) word |= (uint32_t)(code[32 * (w - 8) + 8 * k + n] >> 2) << (4 * n + k);
        }
        words[w] = word;
    }
}

// Encodes y (128), a group in the basis of rows, to codes (128 values) and their scales; code (128) is room for them on
// the way. A group with a value that is not finite gets scales that are NaN, and y loses that value.
KV_CODE void kv_encode(KvType t, bool unbiased, float *y, uint8_t *code, uint32_t *codes, uint16_t *scales) {
    const int n = kv_group(t);
    const bool even = t == KV_Q8_0 || t == KV_Q4_0;
    uint32_t broken = 0;
    KV_SYNC();
    for (int i = KV_LANE; i < KV_TURN; i += KV_LANES)
        if (!(fabsf(y[i]) < 0x1p100f)) broken = 1, y[i] = 0;
    broken = KV_SUM(broken);
    KV_SYNC();
    for (int g = 0; g < KV_TURN / n; g++) {
        const float *x = y + g * n;
        const float scale = even ? kv_encode_even(t, x, code + g * n, n) : kv_encode_levels(t, unbiased, x, code + g * n, n);
        if (KV_LANE == 0) scales[g] = broken ? 0x7e00 : KV_TO_HALF(scale);
    }
    KV_SYNC();
    kv_pack(t, code, codes);
    KV_SYNC();
}

// ==== [3] Reading codes =============================================================================================
// Codes of values 8 o .. 8 o + 7 of a group, as nibbles; not of q8_0.
KV_CODE uint32_t kv_nibbles(KvType t, const uint32_t *words, int o) {
    if (t != KV_TQ3) return words[o];
    return (words[o / 2] >> (2 * (o % 2)) & 0x33333333u) | (words[8 + o / 4] >> (o % 4) & 0x11111111u) << 2;
}

// What a nibble stands for, as a multiple of the scale.
KV_CODE int kv_multiple(KvType t, uint32_t nibble) {
    if (t == KV_Q4_0) return (int)nibble - 8;
    const uint32_t sign = t == KV_TQ4 ? 8 : 4;
    return nibble & sign ? -kv_level(t, nibble & (sign - 1)) : kv_level(t, nibble);
}

#ifdef GGUF_H
// ==== [4] Rows on the CPU ===========================================================================================
// v (dim) to row and, in a quantised type, its scales.
static inline void kv_write_row(KvType t, bool unbiased, int dim, const float *v, void *row, uint16_t *scales) {
    const int type = t == KV_F32 ? GGUF_F32 : t == KV_F16 ? GGUF_F16 : GGUF_BF16;      // the same numbers in a file
    if (!kv_group(t)) {
        gguf_quantize(type, v, row, (size_t)dim);
        return;
    }
    for (int g = 0; g < dim / KV_TURN; g++) {
        float y[KV_TURN];
        uint8_t code[KV_TURN];
        memcpy(y, v + g * KV_TURN, sizeof y);
        kv_turn(y, 0.0625f);
        kv_encode(t, unbiased, y, code, (uint32_t *)((char *)row + kv_row_bytes(t, g * KV_TURN)),
                  scales + g * KV_TURN / kv_group(t));
    }
}

// Groups of a quantised type as floats; t is known where this is inlined.
static inline void kv_read_groups(KvType t, int n, const uint32_t *words, const uint16_t *scales, float *v) {
    const int group = kv_group(t);
    float multiple[16];
    for (uint32_t i = 0; i < 16 && t != KV_Q8_0; i++) multiple[i] = (float)kv_multiple(t, i & (t == KV_TQ3 ? 7 : 15));
    for (int g = 0; g < n; g++, words += kv_row_bytes(t, KV_TURN) / 4)
        for (int from = 0; from < KV_TURN; from += group, v += group) {
            const float scale = KV_FROM_HALF(*scales++);
            const int8_t *codes = (const int8_t *)words + from;
            for (int i = 0; i < group && t == KV_Q8_0; i++) v[i] = scale * (float)codes[i];
            for (int o = 0; o < group / 8 && t != KV_Q8_0; o++) {
                const uint32_t nibbles = kv_nibbles(t, words, from / 8 + o);
                for (int i = 0; i < 8; i++) v[8 * o + i] = scale * multiple[nibbles >> (4 * i) & 15];
            }
        }
}

// n rows that follow each other as floats (n, dim), in the basis that they are in. They lie without gaps, as their scales do.
static inline void kv_read_rows(KvType t, int n, int dim, const void *rows, const uint16_t *scales, float *v) {
    const int groups = n * (dim / KV_TURN);
    switch (t) {
    case KV_Q8_0: kv_read_groups(KV_Q8_0, groups, (const uint32_t *)rows, scales, v); return;
    case KV_Q4_0: kv_read_groups(KV_Q4_0, groups, (const uint32_t *)rows, scales, v); return;
    case KV_TQ4: kv_read_groups(KV_TQ4, groups, (const uint32_t *)rows, scales, v); return;
    case KV_TQ3: kv_read_groups(KV_TQ3, groups, (const uint32_t *)rows, scales, v); return;
    default: gguf_dequantize(t == KV_F32 ? GGUF_F32 : t == KV_F16 ? GGUF_F16 : GGUF_BF16, rows, v, (size_t)n * dim);
    }
}

// (dim) of queries into the basis of quantised rows, and of sums of rows back.
static inline void kv_turn_query(float *q, int dim) {
    for (int g = 0; g < dim; g += KV_TURN) kv_turn(q + g, 0.125f);
}
static inline void kv_turn_rows_back(float *y, int dim) {
    for (int g = 0; g < dim; g += KV_TURN) kv_turn_back(y + g);
}
#else
// ==== [5] A value on a GPU ==========================================================================================
// Value i of a row of a quantised type, in the basis of the row.
KV_CODE float kv_value(KvType t, const void *row, const uint16_t *scales, int i) {
    const uint32_t *words = (const uint32_t *)((const char *)row + kv_row_bytes(t, i - i % KV_TURN));
    const float scale = KV_FROM_HALF(scales[i / kv_group(t)]);
    if (t == KV_Q8_0) return scale * ((const int8_t *)row)[i];
    return scale * kv_multiple(t, kv_nibbles(t, words, i % KV_TURN / 8) >> (4 * (i % 8)) & 15);
}
#endif
#endif
