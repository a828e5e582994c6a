/* attend_coded.cuh - attention over KV caches of quantised types (q8_0, q4_0, tq3, tq4) in steps of up to 64 rows, and
 * in prompts if the cache has a tail. A part of gemma4_kernels.cu, which includes it in its section [8].
 *
 * HOLDS        reading of quantised rows as f16 (flash_kernel uses it too), attend_coded_kernel, and the sizes and
 * arguments
 *              of its launch
 * MAY USE      sections [1] to [7] of gemma4_kernels.cu and, of [8], what precedes the include; parts/kv.h, which
 * defines the
 *              quantised types
 * BEGIN        with the design comment of [2], then attend_coded_kernel in [6], then what it calls
 * WORDS        as in gemma4_kernels.cu; below, t = lane / 4 and k = lane % 4
 *   [1] Quantised rows as halves      [4] Scores and weights of 16 keys
 *   [2] Design, arguments, memory     [5] Values of 16 keys, one warp's keys
 *   [3] Codes as integers, copies     [6] The kernel and its launch */
#ifndef ATTEND_CODED_CUH
#define ATTEND_CODED_CUH

// ==== [1] Quantised rows as halves ===================================================================================
// Values of a row as halves; parts/kv.h defines the bytes of a row.

static bool is_readable(const KvPlane *p) { return p->type == KV_F16 || kv_group(p->type); }

template <KvType T> struct CodedType {                 // kv_group(T), run_of(T) and bits of a value as constants
    static constexpr KvType type = T;
    static constexpr int bits = T == KV_F16 ? 16 : T == KV_Q8_0 ? 8 : T == KV_TQ3 ? 3 : 4;
    static constexpr int group = T == KV_TQ3 ? 128 : T == KV_TQ4 ? 64 : 32;
    static constexpr int run = T == KV_TQ3 ? 16 : T == KV_Q8_0 ? 2 : 4;
};

// Two bytes of `bytes`, 0 .. 255, as halves: (byte - zero) * scale. which 0x4140: bytes 0 and 1; 0x4342: bytes 2 and 3.
// A byte becomes the low byte of 0x6400, which is the f16 number 1024 + byte.
__device__ static inline unsigned bytes_to_halves(unsigned bytes, unsigned which, unsigned zero, __half2 scale) {
    const __half2 less = __half2half2(__float2half_rn((float)(1024 + zero)));
    return half_bits(__hmul2(__hsub2(two_halves(__byte_perm(bytes, 0x64646464u, which)), less), scale));
}

// Four values whose codes are the four low nibbles of a word, times scale.
template <KvType T>
__device__ static inline void nibbles_to_halves(unsigned nibbles, __half2 scale, unsigned h[2]) {
    if (T == KV_Q4_0) {
        const unsigned bytes = __byte_perm(nibbles & 0x0f0f0f0fu, nibbles >> 4 & 0x0f0f0f0fu, 0x5140);
        h[0] = bytes_to_halves(bytes, 0x4140, 8, scale);
        h[1] = bytes_to_halves(bytes, 0x4342, 8, scale);
        return;
    }
    unsigned high, low = 0;                            // high bytes of +-{1 3 5 8} or {1 4 7 10 13 17 22 29} in f16
    if (T == KV_TQ3) {
        high = __byte_perm(0x4845423cu, 0xc8c5c2bcu, nibbles);
    } else {
        const unsigned level = nibbles & 0x7777u, signs = __byte_perm(nibbles, nibbles << 4, 0x1504) & 0x80808080u;
        high = __byte_perm(0x4947443cu, 0x4f4d4c4au, level) ^ signs;
        low = __byte_perm(0, 0x40804080u, level);
    }
    h[0] = half_bits(__hmul2(two_halves(__byte_perm(low, high, 0x5140)), scale));
    h[1] = half_bits(__hmul2(two_halves(__byte_perm(low, high, 0x7362)), scale));
}

// Reads values i .. i + 7 of a row; i is a multiple of 8.
template <KvType T>
__device__ static inline void read_halves(const char *row, const char *scales, int i, unsigned (&h)[4]) {
    if (T == KV_F16) {
        memcpy(h, __builtin_assume_aligned(row + 2 * i, 16), 16);
        return;
    }
    const __half2 scale = __half2half2(((const __half *)scales)[i / CodedType<T>::group]);
    if (T == KV_Q8_0) {
        const uint2 codes = *(const uint2 *)(row + i);
        h[0] = bytes_to_halves(codes.x ^ 0x80808080u, 0x4140, 128, scale);
        h[1] = bytes_to_halves(codes.x ^ 0x80808080u, 0x4342, 128, scale);
        h[2] = bytes_to_halves(codes.y ^ 0x80808080u, 0x4140, 128, scale);
        h[3] = bytes_to_halves(codes.y ^ 0x80808080u, 0x4342, 128, scale);
        return;
    }
    unsigned codes;
    if (T == KV_TQ3) {                                 // the bit of S goes to bit 2 of its nibble
        const unsigned *words = (const unsigned *)(row + kv_row_bytes(T, i - i % KV_ROTATION));
        const int o = i % KV_ROTATION / 8;
        const unsigned w = words[o / 2], s = words[8 + o / 4];
        codes = (w >> 2 * (o % 2) & 0x33333333u) | (__funnelshift_r(s, s, o % 4 + 30) & 0x44444444u);
    } else {
        codes = *(const unsigned *)(row + i / 2);
    }
    nibbles_to_halves<T>(codes, scale, h);
    nibbles_to_halves<T>(codes >> 16, scale, h + 2);
}

// ==== [2] Design, arguments, memory ==================================================================================
// Every warp works alone. It copies quantised rows to its own shared memory as they lie in the cache, and converts them
// to halves in registers, in the layout of the tensor cores; rows of f16 are read from the cache. So a key costs only
// its own bytes of memory traffic. Rows stay Hadamard-rotated: q and the sums are rotated instead. Codes are multiplied
// as integers: the scale of a group is applied to its scores, and to the weights of its values.
//
// The integers are made non-negative by adding zero_point(type). Then they are the low bits of an f16 subnormal, in
// units of 2^-24, without any conversion. The zero point is subtracted where that is cheap: zero_point times the sum of
// q from the score of a group, zero_point times the sum of weights from its values.
//
// Subtiles of 16 keys are dealt to the warps; the results of the warps are combined in their order:
//
//     tile of the split     0        1        2        3        4
//     subtile               0   1    2   3    4   5    6   7    8   9
//     warp                  0   1    2   3    4   5    6   7    0   1
//
// The K rows and the V rows of a subtile are copied separately, each with the scales after the rows.

enum { SUBTILE = 16, CODED_WARPS = ATTEND_WARPS, CODED_COLUMNS = 8,
       CODED_PAD = 32,        // halves between rows of q, so that lanes that read together use different banks
       WEIGHTED_SPLITS = 512 };        // columns times splits whose weights fit

typedef struct {              // K or V of a cache, or of its tail
    KvType  type;
    int     dim;              // values of a row
    int     chunks;           // of 16 bytes in a row
    int     scale_bytes;      // of a row
    int     lane_bits;        // 2^lane_bits lanes copy a row; at most 32 chunks
    int     stride;           // bytes from row to row in shared memory: an odd number of chunks, so that banks differ
    const char *codes, *scales;
    const char *stage_codes, *stage_scales;    // as in Attend
} CodedPlane;

typedef struct {              // a cache, or its tail
    CodedPlane k, v;
    int     slots;
    Divisor by_slots;
} CodedKeys;

typedef struct {              // the parameters of attend_coded
    AttendTask a;
    CodedKeys  keys, tail;
    int        n_in_flight;   // copies of K or V of a subtile in flight in a warp: 1, 2, 4 or 8
    int        v_at;          // bytes from K to V in a stage; n_in_flight 1: V follows K in the same place
    int        stage_bytes, buffer_bytes;      // of a subtile; of a warp
    int        tail_reach;    // a row reads this many positions, up to its own, from the tail; 0: there is none
    bool       rotated;       // V is Hadamard-rotated
    bool       with_flash;    // flash_kernel computes the segments of more than STEP_ROWS rows: a sparse prompt
} CodedTask;

// Dynamic shared memory of attend_coded.
template <int HD> struct CodedSmem {
    __half *q;                // (2, CODED_COLUMNS, HD + CODED_PAD): q in f16, and the rounding error of that
    float  *weights;          // (WEIGHTED_SPLITS) pairs, of splits
    float4 *starts;           // (groups of a row of K, 4) where sums of a group start: columns 2k, 2k + 1, and again
    uint4  *constants;        // (2) zero points of V for multiply_half; Tables: in memory, else they are recomputed
    char   *buffers;          // (CODED_WARPS) pipelines; then (CODED_WARPS, CODED_COLUMNS, HD / 2 + ROW_PAD / 2) floats

    __device__ CodedSmem() {
        q = (__half *)shared_bytes, weights = (float *)(q + 2 * CODED_COLUMNS * (HD + CODED_PAD));
        starts = (float4 *)(weights + 2 * WEIGHTED_SPLITS), constants = (uint4 *)(starts + HD / 32 * 4);
        buffers = (char *)(constants + 2);
    }
};

// The result of a warp. A lane has columns 2k and 2k + 1. acc[m][0], acc[m][1]: its value 2m of them; acc[m][2],
// acc[m][3]: its value 2m + 1. Of every 8 * run values of a row it has `run`, from t * run on.
template <int HD> struct WarpSums {
    float acc[HD / 16][4];
    float top[2], sum[2];     // the maximum, times log2(e); the sum of weights of the lane's keys
};

// ==== [3] Codes as integers, copies ==================================================================================

enum { KV_UNITS = 1 << 24 };      // units in 1
__device__ static inline constexpr int zero_point(KvType t) {
    return t == KV_Q8_0 ? 128 : t == KV_TQ4 ? 32 : t == KV_Q4_0 || t == KV_TQ3 ? 8 : 0;
}
__device__ static inline int run_of(KvType t) { return t == KV_TQ3 ? 16 : t == KV_Q8_0 ? 2 : 4; }  // as in WarpSums

typedef struct { unsigned tq3, tq4, tq4_below, none; } Tables;  // first halves of the tables: integers of codes 0 .. 3

// Four bytes: the integers of the four low nibbles of a word. tq4 has two tables; a nibble finds 0 in one of them.
template <KvType T> __device__ static inline unsigned look_up(unsigned nibbles, const Tables &first) {
    if (T == KV_TQ3) return permute_bytes(first.tq3, 0x00030507u, nibbles);
    return permute_bytes(first.tq4, 0x3d36312du, nibbles) |
        permute_bytes(first.tq4_below, 0x030a0f13u, nibbles ^ 0x8888u);
}

// Byte i of a and byte i of b as two subnormal halves; both bytes are below 128.
__device__ static inline unsigned pair_of(unsigned a, unsigned b, int i) {
    return permute_bytes(a, b, 0xc480u + 0x1111u * i);
}

// Of KV_ROTATION values of a key, lane k has 32. Its values 8 n + 4 c .. 8 n + 4 c + 3 begin here. type: of K
__device__ static inline int value_at(KvType type, int n, int k, int c) {
    return type == KV_TQ3 ? 32 * k + 8 * n + 4 * c : 32 * n + (type == KV_Q8_0 ? 4 * k + 16 * c : 8 * k + 4 * c);
}

// Reads half h of lane k's codes of KV_ROTATION values, for keys t and t + 8: 16 values of a key as nibbles, in q8_0 as
// bytes.
//   rows: of both keys; shared: lanes 0 .. 15 pass the first 16 bytes of a key each, the others the next 16
template <KvType T>
__device__ static inline void read_keys(const char *const (&rows)[2], const char *shared, int k, int h,
                                        unsigned (&codes)[2][4]) {
    unsigned r[2][4];
    if (T != KV_TQ3) load_matrices(r[0], shared + kv_row_bytes(T, KV_ROTATION / 2) * h);
    if (T == KV_Q8_0) load_matrices(r[1], shared + KV_ROTATION / 2 * h + 32);
#pragma unroll
    for (int e = 0; e < 2; e++) {
        const unsigned *words = (const unsigned *)rows[e];
        if (T == KV_TQ3) {                             // a bit of S goes to bit 2 of its nibble
            const unsigned w = words[2 * k + h], s = words[8 + k];
            codes[e][0] = (w & 0x33333333u) | ((h ? s : s << 2) & 0x44444444u);
            codes[e][1] = (w >> 2 & 0x33333333u) | ((h ? s >> 1 : s << 1) & 0x44444444u);
        } else {
            codes[e][0] = r[0][e], codes[e][1] = r[0][2 + e];
            if (T == KV_Q8_0) codes[e][2] = r[1][e], codes[e][3] = r[1][2 + e];
        }
    }
}

// Integers 8 n .. 8 n + 7 of the codes that read_keys returned for a key.
template <KvType T>
__device__ static inline void key_numbers(const unsigned (&codes)[4], int n, const Tables &tables, unsigned (&h)[4]) {
    if (T == KV_Q4_0) {
        const unsigned even = codes[n] & 0x0f0f0f0fu, odd = codes[n] >> 4 & 0x0f0f0f0fu;
#pragma unroll
        for (int i = 0; i < 4; i++) h[i] = pair_of(even, odd, i);
        return;
    }
    const unsigned x = T == KV_Q8_0 ? codes[2 * n] ^ 0x80808080u : look_up<T>(codes[n], tables);
    const unsigned y = T == KV_Q8_0 ? codes[2 * n + 1] ^ 0x80808080u : look_up<T>(codes[n] >> 16, tables);
    h[0] = __byte_perm(x, 0, 0x4140), h[1] = __byte_perm(x, 0, 0x4342);
    h[2] = __byte_perm(y, 0, 0x4140), h[3] = __byte_perm(y, 0, 0x4342);
}

typedef struct __align__(16) { const char *codes, *scales; } CodedRow;

__device__ static inline CodedRow row_at(const CodedPlane &p, size_t row) {
    return (CodedRow){ p.codes + row * (16 * p.chunks), p.scales + row * p.scale_bytes };
}

// The row of key j in the cache or among the staged rows.
__device__ static inline CodedRow coded_row(const AttendTask &a, const CodedKeys &from, const CodedPlane &p,
                                            const KeyRange &s, int j) {
    if (!a.staged || j < s.len)
        return row_at(p, ((size_t)s.seq * a.n_kv_heads + s.head) * from.slots + modulo(j, from.by_slots));
    const size_t row = (size_t)s.head * a.stage_slots + s.seg_first + j - s.len;
    return (CodedRow){ p.stage_codes + row * (16 * p.chunks), p.stage_scales + row * p.scale_bytes };
}

// Stores q so that a lane's values follow each other as in value_at; sets starts and constants.   type: of K
template <int HD>
__device__ static inline void place_queries(const AttendTask &a, const AttendBlock &b, KvType type, KvType v_type,
                                            const CodedSmem<HD> &smem) {
    constexpr int ROW = HD + CODED_PAD;
    const int group = max(32, kv_group(type));
    if (threadIdx.x == 0) {
        const unsigned zero = (0x8000u | zero_point(v_type)) * 0x10001u;
        smem.constants[0] = make_uint4(zero, zero, zero, zero);
        smem.constants[1] = make_uint4(0x100d0b09u, 0x2a272421u, 0x16191c1fu, 0);
    }
    for (int i = 4 * threadIdx.x; i < b.n_columns * HD; i += 4 * ATTEND_THREADS) {
        const int col = i / HD, place = i % HD, row = quotient(col, a.by_heads);
        const int h = min(col - row * a.heads, b.n_heads - 1);
        const int at = place - place % KV_ROTATION + value_at(type, place % KV_ROTATION / 32, place % 32 / 8,
                                                              place % 8 / 4);
        const float4 v = *(const float4 *)(a.q + ((size_t)(b.r0 + row) * a.n_heads + b.head + h) * HD + at);
        const uint2 hi = halves_of(v), lo = halves_of(half_residue(v));
        __half *to = smem.q + col * ROW + place;
        *(uint2 *)to = hi, *(uint2 *)(to + CODED_COLUMNS * ROW) = lo;
        const __half2 parts[4] = { two_halves(hi.x), two_halves(hi.y), two_halves(lo.x), two_halves(lo.y) };
        float sum = 0;
        for (int n = 0; n < 4; n++) sum += __low2float(parts[n]) + __high2float(parts[n]);
        for (int n = 1; n < group / 4; n *= 2) sum += __shfl_xor_sync(~0u, sum, n);
        float *start = (float *)(smem.starts + place / group * 4 + col / 2) + col % 2;
        if (place % group == 0) start[0] = start[2] = sum * (-(float)zero_point(type) / KV_UNITS);
    }
}

typedef struct {              // what a warp reads from a cache, or from its tail
    int first, step;          // first keys of its subtiles: first, first + step, ... below last
    int low, last;            // keys that some row may read there are among low .. last - 1
    int whole_low, whole_end; // keys that all rows read there
    int contiguous_end;       // keys from low up to here are in the cache, not staged
    CodedRow slot0[2];        // the head's rows of K and V in slot 0
} Subtiles;

// Starts to copy SUBTILE contiguous rows from `slot` on, then their scales, by a warp.   BYTES: of a row, 0: not a
// constant; slot0: row of slot 0
template <int BYTES>
__device__ static inline void copy_contiguous(const CodedPlane &p, CodedRow slot0, int slot, char *to) {
    const int bytes = BYTES ? BYTES : 16 * p.chunks, stride = BYTES ? (BYTES / 16 | 1) * 16 : p.stride;
    const int bits = !BYTES ? p.lane_bits : BYTES > 256 ? 5 : BYTES > 128 ? 4 : BYTES > 64 ? 3 : 2, step = 32 >> bits;
    const int lane = threadIdx.x % 32, first = lane >> bits, at = 16 * (lane - (first << bits));
    const char *codes = slot0.codes + (size_t)(slot + first) * bytes + at;
    char *rows = to + first * stride + at;
    if (at < bytes)                                    // a row has more than two chunks and up to 32
#pragma unroll (BYTES ? SUBTILE : 1)
        for (int key = 0; key < SUBTILE; key += 2 * step) {
            copy_ahead(rows, codes), copy_ahead(rows + step * stride, codes + (size_t)step * bytes);
            rows += 2 * step * stride, codes += 2 * step * bytes;
        }
    if (lane < p.scale_bytes)
        copy_ahead(to + SUBTILE * stride + 16 * lane, slot0.scales + (size_t)slot * p.scale_bytes + 16 * lane);
}

// Starts to copy SUBTILE keys from j0 on. Keys outside of low .. last - 1 get no weight; other rows are copied for
// them.
__device__ static inline void copy_subtile(const AttendTask &a, const CodedKeys &from, const CodedPlane &p,
                                           const KeyRange &s,
                                       const Subtiles &w, int j0, CodedRow slot0, char *to) {
    const int lane = threadIdx.x % 32, stride = p.stride, bytes = 16 * p.chunks, scale_bytes = p.scale_bytes;
    char *to_scales = to + SUBTILE * stride;
    if (j0 >= w.low && j0 + SUBTILE <= w.contiguous_end) {
        copy_contiguous<0>(p, slot0, modulo(j0, from.by_slots), to);
        return;
    }
#pragma unroll 1
    for (int key = 0; key < SUBTILE; key++) {
        const CodedRow row = coded_row(a, from, p, s, min(max(j0 + key, w.low), w.last - 1));
        if (16 * lane < bytes) copy_ahead(to + key * stride + 16 * lane, row.codes + 16 * lane);
        if (2 * lane < scale_bytes)
            ((uint16_t *)(to_scales + key * scale_bytes))[lane] = ((const uint16_t *)row.scales)[lane];
    }
}

// Waits until the oldest of n copies in flight has arrived, for the warp.
__device__ static inline void wait_for_oldest_copy(int n) {
    if (n == 8) wait_for_copies<7>();
    else if (n == 4) wait_for_copies<3>();
    else if (n == 2) wait_for_copies<1>();
    else wait_for_copies<0>();
    __syncwarp();
}

// ==== [4] Scores and weights of 16 keys ==============================================================================

// Scales of KV_ROTATION values from d on.
template <KvType T> struct __align__(2 * KV_ROTATION / CodedType<T>::group) RotationScales {
    __half of[KV_ROTATION / CodedType<T>::group];
};
template <KvType T> __device__ static inline RotationScales<T> rotation_scales(const char *scales, int d) {
    return *(const RotationScales<T> *)(scales + d / CodedType<T>::group * sizeof(__half));
}

// s += k q over values from .. to - 1 of a subtile's rows, in units.   rows: keys t (scores s[0], s[1]) and t + 8
// (s[2], s[3]); shared: as in read_keys; type: of K
template <KvType T, int HD>
__device__ static inline void score_subtile(float (&s)[4], const CodedRow (&rows)[2], const char *shared, int from,
                                            int to,
                                          KvType type, const CodedSmem<HD> &smem) {
    constexpr int ROW = HD + CODED_PAD, GROUP = CodedType<T>::group;
    const int lane = threadIdx.x % 32, k4 = lane % 4;
    const __half *q = smem.q + lane / 4 * ROW + from + 8 * k4;
    const float4 *starts = smem.starts + from / GROUP * 4 + k4;
    const Tables tables = *(const Tables *)(smem.constants + 1);
    const char *codes_of[2], *scales_of[2];
    shared += kv_row_bytes(T, from);
    for (int e = 0; e < 2; e++) {
        codes_of[e] = rows[e].codes + kv_row_bytes(T, from);
        scales_of[e] = rows[e].scales + from / GROUP * sizeof(__half);
    }
#pragma unroll 1
    for (int left = to - from; left > 0; left -= KV_ROTATION) {
        RotationScales<T> scales[2];
        if (T != KV_F16)
            for (int e = 0; e < 2; e++) scales[e] = *(const RotationScales<T> *)scales_of[e];
#pragma unroll
        for (int n = 0; n < KV_ROTATION / 32; n++) {
            const int i = 32 * n;
            unsigned codes[2][4], k[2][4];
            if (n % 2 == 0) __syncwarp();  // keeps the loads below from moving up, where they would take registers
            if (n % 2 == 0 && T != KV_F16) read_keys<T>(codes_of, shared, k4, n / 2, codes);
            const uint4 hi = *(const uint4 *)(q + i), lo = *(const uint4 *)(q + CODED_COLUMNS * ROW + i);
            const unsigned b[4][2] = { { hi.x, hi.y }, { hi.z, hi.w }, { lo.x, lo.y }, { lo.z, lo.w } };
            float sum[4] = { };
            if (T != KV_F16 && i % GROUP == 0) *(float4 *)sum = starts[i / GROUP * 4];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                if (T != KV_F16) key_numbers<T>(codes[e], n % 2, tables, k[e]);
                else
                    for (int c = 0; c < 2; c++)
                        memcpy(k[e] + 2 * c,
                               __builtin_assume_aligned(codes_of[e] + 2 * value_at(type, n, k4, c), 8), 8);
            }
#pragma unroll
            for (int u = 0; u < 4; u++) {
                const unsigned x[4] = { k[0][u % 2 * 2], k[1][u % 2 * 2], k[0][u % 2 * 2 + 1], k[1][u % 2 * 2 + 1] };
                multiply_half(sum, x, b[u]);
            }
#pragma unroll
            for (int e = 0; e < 4; e++)
                s[e] = T == KV_F16 ? s[e] + sum[e] : __fmaf_rn(sum[e], __half2float(scales[e / 2].of[i / GROUP]), s[e]);
        }
        q += KV_ROTATION, starts += KV_ROTATION / GROUP * 4, shared += kv_row_bytes(T, KV_ROTATION);
        for (int e = 0; e < 2; e++)
            codes_of[e] += kv_row_bytes(T, KV_ROTATION), scales_of[e] += KV_ROTATION / GROUP * sizeof(__half);
    }
}

// Softmax of a subtile. s: scores times log2(e), -Inf for keys that are not visible. p: weights in the layout of
// multiply_half, 2^WEIGHT_UP times too large, so that they keep their bits when a small scale is multiplied with them.
enum { WEIGHT_UP = 6 };
template <int HD>
__device__ static inline void softmax_subtile(WarpSums<HD> &x, const float (&s)[4], unsigned (&p)[2]) {
    float now[2] = { fmaxf(s[0], s[2]), fmaxf(s[1], s[3]) };
#pragma unroll
    for (int e = 0; e < 2; e++) {
        for (int h = 16; h > 2; h /= 2) now[e] = fmaxf(now[e], __shfl_xor_sync(~0u, now[e], h));
        now[e] = fmaxf(now[e], x.top[e]);
    }
    if (__any_sync(~0u, now[0] != x.top[0] || now[1] != x.top[1])) {
        const float f0 = now[0] == x.top[0] ? 1 : fast_exp2(x.top[0] - now[0]);
        const float f1 = now[1] == x.top[1] ? 1 : fast_exp2(x.top[1] - now[1]);
        x.top[0] = now[0], x.top[1] = now[1], x.sum[0] *= f0, x.sum[1] *= f1;
#pragma unroll
        for (int m = 0; m < HD / 16; m++) x.acc[m][0] *= f0, x.acc[m][1] *= f1, x.acc[m][2] *= f0, x.acc[m][3] *= f1;
    }
    const float less[2] = { now[0] == -INFINITY ? 0 : now[0] - WEIGHT_UP,
                            now[1] == -INFINITY ? 0 : now[1] - WEIGHT_UP };
#pragma unroll
    for (int e = 0; e < 2; e++) {
        const __half2 w = __floats2half2_rn(fast_exp2(s[2 * e] - less[0]), fast_exp2(s[2 * e + 1] - less[1]));
        x.sum[0] += __low2float(w), x.sum[1] += __high2float(w);
        p[e] = transpose_matrix(half_bits(w));
    }
}

// ==== [5] Values of 16 keys, one warp's keys =========================================================================

// Integers of 8 N values from d on: of keys 2k and 2k + 1 in pairs (v[0]), and of keys 2k + 8 and 2k + 9 (v[1]); the
// values that a lane has, as in WarpSums.   rows: the four keys; shared: as in read_keys; f16 is returned as it is
template <KvType T, int N>
__device__ static inline void read_values(const CodedRow (&rows)[4], const char *shared, int d, const Tables &tables,
                                          unsigned (&v)[2][N]) {
    const int t = threadIdx.x % 32 / 4;
    if (T == KV_F16) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            unsigned x[N / 2], y[N / 2];
            memcpy(x, __builtin_assume_aligned(rows[2 * e].codes + 2 * (d + t * N), 2 * N), 2 * N);
            memcpy(y, __builtin_assume_aligned(rows[2 * e + 1].codes + 2 * (d + t * N), 2 * N), 2 * N);
            for (int j = 0; j < N; j++) v[e][j] = __byte_perm(x[j / 2], y[j / 2], j % 2 ? 0x7632 : 0x5410);
        }
    } else if (T == KV_TQ3) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            unsigned codes[2][2];                      // of both keys, from even and from odd pairs of bits
            for (int n = 0; n < 2; n++) {
                const unsigned *words = (const unsigned *)(rows[2 * e + n].codes + kv_row_bytes(T, d));
                const unsigned w = words[t], s = __funnelshift_r(words[8 + t / 2], words[8 + t / 2], 2 * (t % 2) + 30);
                codes[n][0] = (w & 0x33333333u) | (s & 0x44444444u);
                codes[n][1] = (w >> 2 & 0x33333333u) | (s >> 1 & 0x44444444u);
            }
#pragma unroll
            for (int j = 0; j < N; j += 4) {
                const unsigned a = look_up<T>(codes[0][j / 8] >> j % 8 * 4, tables);
                const unsigned b = look_up<T>(codes[1][j / 8] >> j % 8 * 4, tables);
                for (int i = 0; i < 4; i++) v[e][j + i] = pair_of(a, b, i);
            }
        }
    } else {
        unsigned r[4];                                 // 16 bits of both keys
        load_matrices_transposed(r, shared + kv_row_bytes(T, d));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            unsigned *to = v[i % 2] + i / 2 * (N / 2);
            const unsigned a = T == KV_TQ4 ? look_up<T>(r[i], tables) : r[i] ^ 0x80808080u;
            const unsigned b = T == KV_TQ4 ? look_up<T>(r[i] >> 16, tables) : 0;
#pragma unroll
            for (int j = 0; j < N / 2; j++)
                to[j] = T == KV_Q8_0 ? __byte_perm(a, 0, 0x4240 + 0x0101 * j)
                      : T == KV_Q4_0 ? r[i] >> 4 * j & 0x000f000fu : pair_of(a, b, j);
        }
    }
}

// acc += V^T p for a subtile, in units.   rows, shared: as in read_values
template <KvType T, int RUN, int HD>
__device__ static inline void add_subtile(float (&acc)[HD / 16][4], const CodedRow (&rows)[4], const char *shared,
                                        const unsigned (&p)[2], const CodedSmem<HD> &smem) {
    constexpr int N = T == KV_F16 || T == KV_TQ3 ? RUN : 2 * RUN, GROUP = CodedType<T>::group;
    const uint4 zero = smem.constants[0];
    const unsigned zeros[4] = { zero.x, zero.y, zero.z, zero.w };
    const Tables tables = *(const Tables *)(smem.constants + 1);
#pragma unroll
    for (int d = 0; d < HD; d += KV_ROTATION) {
        RotationScales<T> scales[4];
        for (int e = 0; e < 4 && T != KV_F16; e++) scales[e] = rotation_scales<T>(rows[e].scales, d);
        unsigned w[2] = { p[0], p[1] };
#pragma unroll
        for (int i = 0; i < KV_ROTATION; i += 8 * N) {
            unsigned v[2][N];
            read_values<T, N>(rows, shared, d + i, tables, v);
#pragma unroll
            for (int m = 0; m < N / 2; m++) {
                const int at = i + 16 * m;
                if (T != KV_F16 && at % GROUP == 0)
                    for (int e = 0; e < 2; e++)
                        w[e] = half_bits(__hmul2(two_halves(p[e]), __halves2half2(scales[2 * e].of[at / GROUP],
                                                                                  scales[2 * e + 1].of[at / GROUP])));
                const unsigned x[4] = { v[0][2 * m], v[0][2 * m + 1], v[1][2 * m], v[1][2 * m + 1] };
                float (&sum)[4] = acc[(d + at) / 16];
                if (T != KV_F16) multiply_half(sum, zeros, w);
                multiply_half(sum, x, w);
            }
        }
    }
}

// Calls f with the type of a plane as a compile-time constant.
template <typename F> __device__ static inline void with_type(KvType t, F f) {
    switch (t) {
    case KV_Q8_0: f(CodedType<KV_Q8_0>()); return;
    case KV_Q4_0: f(CodedType<KV_Q4_0>()); return;
    case KV_TQ4: f(CodedType<KV_TQ4>()); return;
    case KV_TQ3: f(CodedType<KV_TQ3>()); return;
    default: f(CodedType<KV_F16>());
    }
}
// The same for the run of a tail, whose rows are f16. RUN: as in WarpSums
template <int RUN> struct Run { static constexpr int run = RUN; };
template <typename F> __device__ static inline void with_run(KvType t, F f) {
    switch (run_of(t)) {
    case 16: f(Run<16>()); return;
    case 2: f(Run<2>()); return;
    default: f(Run<4>());
    }
}

// The subtiles of this warp. A row reads the last `reach` positions up to its own from the tail; 0: there is no tail.
// CODED_WARPS subtiles are whole spans, so a warp's subtiles have equal distances.
template <bool TAIL>
__device__ static inline Subtiles subtiles_of(const AttendTask &a, const CodedKeys &from, const KeyRange &s,
                                              const RowMask *rows,
                                          int reach) {
    static_assert(CODED_WARPS * SUBTILE % (KEYS << 2) == 0, "spans of up to 4 tiles");
    const SplitTiles &tiles = s.tiles;
    const int before = 2 * ((quotient(tiles.span, a.splits.by_n) << a.splits.span_bits) + tiles.from);
    // in subtiles, from the first tile of the split
    const int skip = ((int)threadIdx.x / 32 - before) & (CODED_WARPS - 1);
    int first = INT_MAX, last = 0;
    Subtiles w = { tile_of(tiles, a.splits, tiles.from + skip / 2) * KEYS + skip % 2 * SUBTILE,
                 CODED_WARPS * SUBTILE * a.splits.n, s.low, s.end, 0, s.len, 0, { } };
    const size_t slot0 = ((size_t)s.seq * a.n_kv_heads + s.head) * from.slots;
    w.slot0[0] = row_at(from.k, slot0), w.slot0[1] = row_at(from.v, slot0);
#pragma unroll 1
    for (int r = s.from; r < s.to; r++) {
        first = min(first, rows[r].pos), last = max(last, rows[r].pos);
        w.whole_low = max(w.whole_low, rows[r].first);
    }
    if (TAIL) w.low = max(w.low, first - reach + 1), w.whole_low = max(w.whole_low, last - reach + 1);
    else if (reach) w.last = min(w.last, last - reach + 1), w.whole_end = min(w.whole_end, first - reach + 1);
    if (tiles.from == tiles.to) w.last = 0;
    w.contiguous_end = a.staged ? min(w.last, s.len) : w.last;
    w.first += max(0, w.low - SUBTILE - w.first + w.step) / w.step * w.step;     // the first one with a key from low on
    return w;
}

// Computes the keys of a warp in the cache, or in its tail.
template <int HD, bool TAIL>
__device__ static inline void attend_warp(const CodedTask &c, const AttendBlock &block, const KeyRange &keys,
                                            const Columns<CODED_COLUMNS> &columns, const int &reach,
                                            const CodedSmem<HD> &smem, WarpSums<HD> &x) {
    const AttendTask &a = c.a;
    const CodedKeys &source = TAIL ? c.tail : c.keys;
    const int warp = threadIdx.x / 32, t = threadIdx.x % 32 / 4, k2 = threadIdx.x % 4 * 2;
    __shared__ Subtiles of_warps[CODED_WARPS];         // here because registers are short
    const Subtiles &w = of_warps[warp];
    const KvType k_type = c.keys.k.type;               // q lies in the order of this type
    const float scale = a.scale * 1.44269504f * (kv_group(source.k.type) ? KV_UNITS : 1);
    const float factor = (a.n_rot ? kv_tied_factor(source.v.type) : 1) * (kv_group(source.v.type) ? KV_UNITS : 1);
    char *buffer = smem.buffers + warp * c.buffer_bytes;
    auto start_copy = [&](int v, int j0, char *to) {   // of K of a subtile, or of V
        const CodedPlane &plane = v ? source.v : source.k;
        if (!TAIL && plane.type != KV_F16 && j0 < w.last)
            copy_subtile(a, source, plane, keys, w, j0, w.slot0[v], to);
        copy_commit();
    };
    auto row_of = [&](const CodedPlane &p, bool in_shared, const char *shared, int j0, int key) {
        if (!in_shared) return coded_row(a, source, p, keys, min(max(j0 + key, w.low), w.last - 1));
        return (CodedRow){ shared + key * p.stride, shared + SUBTILE * p.stride + key * p.scale_bytes };
    };
    if (threadIdx.x % 32 == 0) of_warps[warp] = subtiles_of<TAIL>(a, source, keys, columns.masks, reach);
    __syncwarp();
    const int n_stages = c.n_in_flight / 2;            // 0: V is copied to the place of K
#pragma unroll 1
    for (int l = 0; l < c.n_in_flight; l++)
        start_copy(l % 2, w.first + l / 2 * w.step, buffer + l / 2 * c.stage_bytes + l % 2 * c.v_at);
    if (!TAIL) {
        place_queries(a, block, k_type, source.v.type, smem);
        __syncthreads();
    }
    int stage = 0;                                     // of the subtile
#pragma unroll 1
    for (int j0 = w.first; j0 < w.last; j0 += w.step, stage = stage + 1 < n_stages ? stage + 1 : 0) {
        char *const k_shared = buffer + stage * c.stage_bytes, *const v_shared = k_shared + c.v_at;
        float s[4] = { };
        unsigned p[2];
#pragma unroll 1
        for (int v = 0; v < 2; v++) {                  // tied: V is the rest of K
            const CodedPlane &plane = v ? source.v : source.k;
            wait_for_oldest_copy(c.n_in_flight);
            with_type(TAIL ? KV_F16 : plane.type, [&](auto type) {
                constexpr KvType T = decltype(type)::type;
                const char *shared = v ? v_shared : k_shared;
                const CodedRow two[2] = { row_of(plane, T != KV_F16, shared, j0, t),
                                          row_of(plane, T != KV_F16, shared, j0, t + 8) };
                shared += threadIdx.x % 16 * plane.stride + threadIdx.x % 32 / 16 * 16;
                score_subtile<T, HD>(s, two, shared, v ? a.n_k : 0, v ? HD : a.n_k, k_type, smem);
            });
            if (v) break;
            __syncwarp();                              // K has been read
            start_copy(!n_stages, j0 + n_stages * w.step, k_shared);
        }
#pragma unroll
        for (int e = 0; e < 4; e++) s[e] *= scale;
        if (j0 < w.whole_low || j0 + SUBTILE > w.whole_end) {          // some row does not see all keys
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int row = columns.row_of[k2 + e % 2], j = j0 + t + e / 2 * 8;
                const RowMask &self = columns.masks[max(row, 0)];
                if (row < 0 || !is_visible(self, a.own, j) || (reach && (j > self.pos - reach) != TAIL))
                    s[e] = -INFINITY;
            }
        }
        softmax_subtile<HD>(x, s, p);
        auto add = [&](auto type, auto run) {
            constexpr KvType T = decltype(type)::type;
            CodedRow four[4];
            for (int e = 0; e < 4; e++)
                four[e] = row_of(source.v, T != KV_F16, v_shared, j0, k2 + e % 2 + e / 2 * 8);
            const char *shared = v_shared + threadIdx.x % 16 * source.v.stride + threadIdx.x % 32 / 16 * 16;
            add_subtile<T, decltype(run)::run, HD>(x.acc, four, shared, p, smem);
        };
        const int next = j0 + n_stages * w.step;       // its V is copied to this place; mostly contiguous rows
        const bool contiguous = n_stages && next + SUBTILE <= w.contiguous_end;
        if (TAIL) with_run(c.keys.v.type, [&](auto run) { add(CodedType<KV_F16>(), run); });
        else with_type(source.v.type, [&](auto type) {
            constexpr KvType T = decltype(type)::type;
            add(type, Run<CodedType<T>::run>());
            __syncwarp();                              // V has been read
            if (T != KV_F16 && contiguous)
                copy_contiguous<HD * CodedType<T>::bits / 8>(source.v, w.slot0[1], modulo(next, source.by_slots),
                                                             v_shared);
        });
        if (contiguous) copy_commit();                 // of no copies, if V is f16
        else start_copy(!!n_stages, n_stages ? next : j0 + w.step, v_shared);
    }
    if (factor == 1) return;
#pragma unroll
    for (int m = 0; m < HD / 16; m++)
#pragma unroll
        for (int e = 0; e < 4; e++) x.acc[m][e] *= factor;
}

// Combines the warps of a block: sets top and sum in c, and writes the values of the columns to where(column).
//   run: as in WarpSums; found: shared memory for half of all values
//
// Each warp multiplies its acc with exp2(its top - the top of all warps). Shared memory holds half of the dims, so
// there are two rounds. In each, warps write and then all threads add, in the order of the warps:
//
//     found[warp][column][d]: lane (t, k) writes its columns 2k and 2k + 1; the t that writes d, for run = 4:
//         d      0 1 2 3   4 5 6 7   ...   28 29 30 31   32 33 34 35   ...
//         t      0 0 0 0   1 1 1 1          7  7  7  7    0  0  0  0           d = i / run * 8 run + t run + i % run
//     barrier
//     where(column)[d .. d + 3] = found[0][column] + found[1][column] + ... + found[7][column], one thread for each
template <int HD, typename Where>
__device__ static inline void join_warps(WarpSums<HD> &x, int run, Columns<CODED_COLUMNS> &c, float *found,
                                         Where where) {
    constexpr int ROW = HD / 2 + ROW_PAD / 2;
    __shared__ float2 stats[CODED_WARPS][CODED_COLUMNS];   // top and sum
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane / 4, k2 = lane % 4 * 2, col = threadIdx.x;
#pragma unroll
    for (int e = 0; e < 2; e++) {
        for (int h = 16; h > 2; h /= 2) x.sum[e] += __shfl_xor_sync(~0u, x.sum[e], h);
        if (t == 0) stats[warp][k2 + e] = make_float2(x.top[e], x.sum[e]);
    }
    __syncthreads();                                   // all are done with their copies and with q
    auto top_of = [&](int col) {
        float top = -INFINITY;
        for (int s = 0; s < CODED_WARPS; s++) top = fmaxf(top, stats[s][col].x);
        return top;
    };
    auto weight_of = [&](int s, int col, float top) {
        return stats[s][col].y == 0 ? 0 : fast_exp2(stats[s][col].x - top);
    };
    if (col < CODED_COLUMNS) {
        float top = top_of(col), sum = 0;
        for (int s = 0; s < CODED_WARPS; s++) sum = __fmaf_rn(weight_of(s, col, top), stats[s][col].y, sum);
        c.top[col] = top * 0.693147181f, c.sum[col] = sum;
    }
    const bool live = __any_sync(~0u, x.sum[0] != 0 || x.sum[1] != 0);
    const float f[2] = { weight_of(warp, k2, top_of(k2)), weight_of(warp, k2 + 1, top_of(k2 + 1)) };
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (half) __syncthreads();                     // the first half has been read
#pragma unroll
        for (int i = 0; i < HD / 16 && live; i += 2)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float (&y)[4] = x.acc[half * (HD / 32) + i / 2];
                *(float2 *)(found + (warp * CODED_COLUMNS + k2 + e) * ROW + i / run * 8 * run + t * run + i % run) =
                    make_float2(y[e] * f[e], y[2 + e] * f[e]);
            }
        __syncthreads();
#pragma unroll 1
        for (int i = 4 * threadIdx.x; i < CODED_COLUMNS * HD / 2; i += 4 * ATTEND_THREADS) {
            const int col = i / (HD / 2), d = i % (HD / 2);
            float *to = where(col);
            if (!to) continue;
            float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
            for (int s = 0; s < CODED_WARPS; s++) {
                if (stats[s][col].y == 0) continue;
                const float4 y = *(const float4 *)(found + (s * CODED_COLUMNS + col) * ROW + d);
                sum = make_float4(sum.x + y.x, sum.y + y.y, sum.z + y.z, sum.w + y.w);
            }
            *(float4 *)(to + half * (HD / 2) + d) = sum;
        }
    }
}

// ==== [6] The kernel and its launch ==================================================================================

// attend, codes: softmax(scale * q k) v over the keys of one split, for 8 columns as in attend_half, of caches whose K
// or V is of a quantised type; the other may be f16.
//   shapes    q (n_rows, n_heads, HD) ready, rotated like K; cache as in gemma4.h and parts/kv.h, tied or not
//   launch    as attend_half, dynamic shared memory coded_fixed_bytes + coded_block_buffer_bytes
//   traffic   every visible key once for 8 columns, in its own bytes, up to n_in_flight copies in flight in a warp;
//             rows of f16 once more, from L1 or L2
//   numerics  codes are exact in f16, as integers from 0 up. S = K q as in attend_half, group by group: the sum starts
//             at -zero_point times the sum of q, and is multiplied with the scale of the group in f32. Weights in f16,
//             2^WEIGHT_UP times too large; they are summed, then multiplied with the scale of a group of V and rounded
//             again. The sum of these times zero_point is subtracted from V's sums before a subtile is added. V's sums
//             stay rotated until all splits are combined
//   time      instructions: 1280 to 1630 for a subtile of 512 values in tied rows, half of them convert codes to halves
//             (sm_90); bandwidth of shared memory, a third of it for q
//   see       ref_attend
template <int HD>
__global__ void __launch_bounds__(ATTEND_THREADS, 1) attend_coded_kernel(const __grid_constant__ CodedTask c) {
    __shared__ Columns<CODED_COLUMNS> columns;
    __shared__ KeyRange keys; // here because registers are short
    __shared__ int reach;     // of the rows of keys
    const AttendTask &a = c.a;
    const CodedSmem<HD> smem;
    const AttendBlock block = attend_block(a);
    wait_for_previous_kernel();
    if ((int)threadIdx.x < block.n_rows)
        columns.masks[threadIdx.x] = row_mask(a.b, a.n_seqs, a.window, a.own, block.r0 + threadIdx.x);

    for (int from = 0; from < block.n_rows; from = keys.to) {  // rows of one segment at a time; mostly there is one
        __syncthreads();                               // masks are there; all are done with the last segment
        if (threadIdx.x == 0) {
            keys = key_range_of(a, block, columns.masks, from);
            reach = c.with_flash && a.b.segs[keys.seg].n > STEP_ROWS ? -1 : c.tail_reach;
        }
        __syncthreads();                               // keys are there
        if (reach < 0) continue;                       // flash_kernel computes them
        if (keys.tiles.from == keys.tiles.to && (blockIdx.z || keys.spans.n || (a.splits.n > 1 && !a.joins)))
            continue;                                  // no visible key in this split
        set_columns(a, block, keys, columns);
        WarpSums<HD> x = { { }, { -INFINITY, -INFINITY }, { } };
        attend_warp<HD, false>(c, block, keys, columns, reach, smem, x);
        if (reach) attend_warp<HD, true>(c, block, keys, columns, reach, smem, x);
        finish_columns<HD>(a, block, keys, columns.masks, columns, smem.weights, (float *)smem.buffers, c.rotated,
                          [&](auto where) {
            join_warps(x, run_of(c.keys.v.type), columns, (float *)smem.buffers, where);
        });
    }
}

typedef void (*AttendCoded)(CodedTask);
static AttendCoded attend_coded_of(int hd) {           // NULL: there is none
    return hd == 512 ? attend_coded_kernel<512> : hd == 256 ? attend_coded_kernel<256> : NULL;
}

static size_t coded_fixed_bytes(int hd) {
    return 2 * CODED_COLUMNS * (hd + CODED_PAD) * sizeof(__half) + WEIGHTED_SPLITS * sizeof(float2) +
           hd / 32 * 4 * sizeof(float4) + 2 * sizeof(uint4);
}
static int coded_stride(const KvPlane *p) { return (int)(kv_row_bytes(p->type, p->dim) / 16 | 1) * 16; }
static size_t subtile_bytes(const KvPlane *p) {
    return kv_group(p->type) ? SUBTILE * (coded_stride(p) + kv_scale_bytes(p->type, p->dim)) : 0;
}
// Bytes of the pipeline of a warp. n_stages: subtiles in flight; 0: K or V of one subtile
static size_t coded_warp_buffer_bytes(const Cache *c, int n_stages) {
    const size_t k = subtile_bytes(&c->k), v = subtile_bytes(&c->v);
    return n_stages ? n_stages * (k + v) : k > v ? k : v;
}
// Bytes of the pipelines of a block, and later of the results of its warps.
static size_t coded_block_buffer_bytes(const Cache *c, int n_stages) {
    const size_t buffers = CODED_WARPS * coded_warp_buffer_bytes(c, n_stages);
    const size_t found = CODED_WARPS * CODED_COLUMNS * (c->head_dim + ROW_PAD) / 2 * sizeof(float);
    return buffers > found ? buffers : found;
}

static CodedPlane coded_plane(const KvPlane *p, const KvPlane *stage) {
    CodedPlane c = { };
    c.type = p->type, c.dim = p->dim;
    c.chunks = (int)(kv_row_bytes(p->type, p->dim) / 16);
    while (1 << c.lane_bits < c.chunks) c.lane_bits++;
    c.scale_bytes = (int)kv_scale_bytes(p->type, p->dim), c.stride = coded_stride(p);
    c.codes = (const char *)p->data, c.scales = (const char *)p->scale;
    if (stage) c.stage_codes = (const char *)stage->data, c.stage_scales = (const char *)stage->scale;
    return c;
}

static CodedKeys coded_keys(const Cache *c, const Cache *stage) {
    CodedKeys k = { };
    k.k = coded_plane(&c->k, stage ? &stage->k : NULL), k.v = coded_plane(&c->v, stage ? &stage->v : NULL);
    k.slots = c->slots, k.by_slots = divisor(c->slots);
    return k;
}

#endif
