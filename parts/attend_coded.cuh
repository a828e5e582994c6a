/* attend_coded.cuh - attention over KV caches of quantised types (q8_0, q4_0, tq3, tq4) in steps of up to 64 rows. A part of
 * gemma4_kernels.cu, which includes it in its section [8].
 *
 * HOLDS        the reading of quantised rows as f16 (flash_kernel uses it as well), attend_coded_kernel, and the sizes and
 *              arguments of its launch
 * MAY USE      sections [1] to [7] of gemma4_kernels.cu and what stands before the include in [8]; parts/kv.h, which
 *              defines the quantised types
 * BEGIN        with the design comment of [2], then attend_coded_kernel in [6], then what it calls
 *   [1] Quantised rows as halves      [4] Scores and weights of 16 keys
 *   [2] Design, arguments, memory     [5] Values of 16 keys, one warp's keys
 *   [3] Codes as integers, copies     [6] The kernel and its launch */
#ifndef ATTEND_CODED_CUH
#define ATTEND_CODED_CUH

// ==== [1] Quantised rows as halves ===================================================================================
// Values of a row as halves, wherever the row lies; parts/kv.h says what it consists of.

static bool is_readable(const KvPlane *p) { return p->type == KV_F16 || kv_group(p->type); }

template <KvType T> struct CodedType {                 // kv_group(T), run_of(T) and bits of a value as constants
    static constexpr KvType type = T;
    static constexpr int bits = T == KV_F16 ? 16 : T == KV_Q8_0 ? 8 : T == KV_TQ3 ? 3 : 4;
    static constexpr int group = T == KV_TQ3 ? 128 : T == KV_TQ4 ? 64 : 32;
    static constexpr int run = T == KV_TQ3 ? 16 : T == KV_Q8_0 ? 2 : 4;
};

// Two bytes of 0 .. 255, less `zero`, as halves times scale: those at 0 and 1 of a word (which 0x4140), or at 2 and 3
// (0x4342). They become the last bits of 1024 + byte.
__device__ static inline unsigned bytes_to_halves(unsigned bytes, unsigned which, unsigned zero, __half2 scale) {
    const __half2 less = __half2half2(__float2half_rn((float)(1024 + zero)));
    return half_bits(__hmul2(__hsub2(two_halves(__byte_perm(bytes, 0x64646464u, which)), less), scale));
}

// Four values whose codes are the low nibbles of a word, times scale.
template <KvType T>
__device__ static inline void nibbles_to_halves(unsigned nibbles, __half2 scale, unsigned h[2]) {
    if (T == KV_Q4_0) {
        const unsigned bytes = __byte_perm(nibbles & 0x0f0f0f0fu, nibbles >> 4 & 0x0f0f0f0fu, 0x5140);
        h[0] = bytes_to_halves(bytes, 0x4140, 8, scale);
        h[1] = bytes_to_halves(bytes, 0x4342, 8, scale);
        return;
    }
    unsigned high, low = 0;                            // bytes of +-{1 3 5 8} or {1 4 7 10 13 17 22 29} in f16
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

// Values i .. i + 7 of a row; i is a multiple of 8.
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
// A warp works alone. Rows of codes come to shared memory of its own as they lie in the cache and become halves in
// registers, as the tensor cores take them; rows of f16 are read where they lie. So a key costs its own bytes once in
// memory, and q and the sums are turned instead of rows. Codes are multiplied as whole numbers: a group's scale goes to
// its scores, and to the weights of its values.
//
// The numbers are made positive: zero_of(type) more than what they stand for. As the last bits of a half they count
// units of 2^-24, the smallest there are, and need nothing above them [subnormal]. What is too much comes off where it
// is cheap: zero_of times the sum of q off the score of a group, zero_of times the sum of weights off its values.
//
// The keys of a part are cut into swaths of SWATH keys; swath n belongs to stream n mod STREAMS of the part, and a warp
// attends to one. What the streams of a part found is put together in their order. The swath's rows of K and V are a
// lot each.

enum { SWATH = 16, STREAMS = ATTEND_WARPS, CODED_COLUMNS = 8,
       CODED_PAD = 32,        // halves between rows of q, so that lanes that read side by side read different banks
       WEIGHTED_PARTS = 512 };         // columns times parts whose weights find room

typedef struct {              // K or V of a cache, or of its tail
    KvType  type;
    int     dim;              // values
    int     chunks;           // of 16 bytes in a row
    int     scale_bytes;      // of a row
    int     lane_bits;        // 2^lane_bits lanes copy a row; at most 32 chunks
    int     stride;           // bytes from row to row in a lot: an odd number of chunks, so that banks differ
    const char *codes, *scales;
    const char *stage_codes, *stage_scales;    // as in Attend
} CodedPlane;

typedef struct {              // the cache, or its tail
    CodedPlane k, v;
    int     slots;
    Divisor by_slots;
} CodedKeys;

typedef struct {              // the parameters of attend_coded
    AttendTask a;
    CodedKeys  keys, tail;
    int        n_lots;        // under way in a warp: 1, 2, 4 or 8
    int        v_at;          // bytes from K to V in a stage; n_lots 1: they lie there in turn
    int        stage_bytes, ring_bytes;        // of a swath, of a warp
    int        tail_reach;    // a row reads that many positions up to its own in the tail; 0: there is none
    bool       turned;        // V is in the basis of quantised rows
    bool       beside_flash;  // which has the segments of more than STEP_ROWS rows
} CodedTask;

// Dynamic shared memory of attend_coded.
template <int HD> struct CodedRoom {
    __half *q;                // (2, CODED_COLUMNS, HD + CODED_PAD): the halves, and what they leave behind
    float  *weights;          // (WEIGHTED_PARTS) pairs, of parts
    float4 *starts;           // (groups of a row of K, 4): of columns 2k, 2k + 1 and again, where sums of a group begin
    uint4  *constants;        // (2) zeros of V for multiply_half; Tables: here, so that no compiler makes them anew
    char   *rings;            // (STREAMS) rings of lots; then (STREAMS, CODED_COLUMNS, HD / 2 + ROW_PAD / 2) floats

    __device__ CodedRoom() {
        q = (__half *)shared_bytes, weights = (float *)(q + 2 * CODED_COLUMNS * (HD + CODED_PAD));
        starts = (float4 *)(weights + 2 * WEIGHTED_PARTS), constants = (uint4 *)(starts + HD / 32 * 4);
        rings = (char *)(constants + 2);
    }
};

// What a warp found. Lane l, t = l / 4, k = l % 4, has columns 2k, 2k + 1; of acc[m], [0] and [1] are its value 2m of
// them and [2] and [3] its value 2m + 1. Of each 8 * run values in a row it has `run`, from t * run on.
template <int HD> struct Stream {
    float acc[HD / 16][4];
    float top[2], sum[2];     // the largest score, times log2(e); weights, of the lane's keys
};

// ==== [3] Codes as integers, copies ==================================================================================

enum { KV_UNITS = 1 << 24 };      // units in 1
__device__ static inline constexpr int zero_of(KvType t) {
    return t == KV_Q8_0 ? 128 : t == KV_TQ4 ? 32 : t == KV_Q4_0 || t == KV_TQ3 ? 8 : 0;
}
__device__ static inline int run_of(KvType t) { return t == KV_TQ3 ? 16 : t == KV_Q8_0 ? 2 : 4; }  // as in Stream

typedef struct { unsigned tq3, tq4, tq4_below, none; } Tables;         // their first halves: numbers of codes 0 .. 3

// Four bytes: the numbers of the low nibbles of a word. Of two tables for tq4 a nibble finds 0 in one.
template <KvType T> __device__ static inline unsigned look_up(unsigned nibbles, const Tables &first) {
    if (T == KV_TQ3) return pick_bytes(first.tq3, 0x00030507u, nibbles);
    return pick_bytes(first.tq4, 0x3d36312du, nibbles) | pick_bytes(first.tq4_below, 0x030a0f13u, nibbles ^ 0x8888u);
}

// Byte i of a and of b as halves; both are below 128.
__device__ static inline unsigned pair_of(unsigned a, unsigned b, int i) {
    return pick_bytes(a, b, 0xc480u + 0x1111u * i);
}

// Lane k of 4 has 32 of KV_ROTATION values of a key: 8 n + 4 c .. 8 n + 4 c + 3 of them are those from here on. type: of K
__device__ static inline int value_at(KvType type, int n, int k, int c) {
    return type == KV_TQ3 ? 32 * k + 8 * n + 4 * c : 32 * n + (type == KV_Q8_0 ? 4 * k + 16 * c : 8 * k + 4 * c);
}

// Half h of the codes of KV_ROTATION values of keys t and t + 8, those of lane k: 16 values of a key as nibbles, or as bytes
// in q8_0.   rows: of both keys; lot: of lanes 0 .. 15 the first 16 bytes of a key each, of the others the next 16
template <KvType T>
__device__ static inline void read_keys(const char *const (&rows)[2], const char *lot, int k, int h,
                                        unsigned (&codes)[2][4]) {
    unsigned r[2][4];
    if (T != KV_TQ3) load_matrices(r[0], lot + kv_row_bytes(T, KV_ROTATION / 2) * h);
    if (T == KV_Q8_0) load_matrices(r[1], lot + KV_ROTATION / 2 * h + 32);
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

// Numbers 8 n .. 8 n + 7 of what read_keys has read of a key.
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

// Of key j, where it lies.
__device__ static inline CodedRow coded_row(const AttendTask &a, const CodedKeys &from, const CodedPlane &p,
                                            const Keys &s, int j) {
    if (!a.staged || j < s.len)
        return row_at(p, ((size_t)s.seq * a.n_kv_heads + s.head) * from.slots + rest(j, from.by_slots));
    const size_t row = (size_t)s.head * a.stage_slots + s.seg_first + j - s.len;
    return (CodedRow){ p.stage_codes + row * (16 * p.chunks), p.stage_scales + row * p.scale_bytes };
}

// q, so that a lane's values follow each other as in value_at; starts and constants.   type: of K
template <int HD>
__device__ static inline void place_queries(const AttendTask &a, const AttendBlock &b, KvType type, KvType v_type,
                                            const CodedRoom<HD> &room) {
    constexpr int ROW = HD + CODED_PAD;
    const int group = max(32, kv_group(type));
    if (threadIdx.x == 0) {
        const unsigned zero = (0x8000u | zero_of(v_type)) * 0x10001u;
        room.constants[0] = make_uint4(zero, zero, zero, zero);
        room.constants[1] = make_uint4(0x100d0b09u, 0x2a272421u, 0x16191c1fu, 0);
    }
    for (int i = 4 * threadIdx.x; i < b.n_columns * HD; i += 4 * ATTEND_THREADS) {
        const int col = i / HD, place = i % HD, row = quotient(col, a.by_heads);
        const int h = min(col - row * a.heads, b.n_heads - 1);
        const int at = place - place % KV_ROTATION + value_at(type, place % KV_ROTATION / 32, place % 32 / 8, place % 8 / 4);
        const float4 v = *(const float4 *)(a.q + ((size_t)(b.r0 + row) * a.n_heads + b.head + h) * HD + at);
        const uint2 hi = halves_of(v), lo = halves_of(behind(v));
        __half *to = room.q + col * ROW + place;
        *(uint2 *)to = hi, *(uint2 *)(to + CODED_COLUMNS * ROW) = lo;
        const __half2 parts[4] = { two_halves(hi.x), two_halves(hi.y), two_halves(lo.x), two_halves(lo.y) };
        float sum = 0;
        for (int n = 0; n < 4; n++) sum += __low2float(parts[n]) + __high2float(parts[n]);
        for (int n = 1; n < group / 4; n *= 2) sum += __shfl_xor_sync(~0u, sum, n);
        float *start = (float *)(room.starts + place / group * 4 + col / 2) + col % 2;
        if (place % group == 0) start[0] = start[2] = sum * (-(float)zero_of(type) / KV_UNITS);
    }
}

typedef struct {              // what a stream reads of the cache, or of its tail
    int first, step;          // first keys of its swaths: first, first + step, .. below last
    int low, last;            // keys that any of the rows may read there are among low .. last - 1
    int whole_low, whole_end; // keys that all of them read there
    int in_line_end;          // those from low up to it lie in the cache
    CodedRow slot0[2];        // where it has the head's first rows of K and V
} Swaths;

// A lot of rows that follow each other from `slot` on, behind them their scales, by a warp.   BYTES: of a row, if known,
// else 0; slot0: row of slot 0
template <int BYTES>
__device__ static inline void copy_rows(const CodedPlane &p, CodedRow slot0, int slot, char *to) {
    const int bytes = BYTES ? BYTES : 16 * p.chunks, stride = BYTES ? (BYTES / 16 | 1) * 16 : p.stride;
    const int bits = !BYTES ? p.lane_bits : BYTES > 256 ? 5 : BYTES > 128 ? 4 : BYTES > 64 ? 3 : 2, step = 32 >> bits;
    const int lane = threadIdx.x % 32, first = lane >> bits, at = 16 * (lane - (first << bits));
    const char *codes = slot0.codes + (size_t)(slot + first) * bytes + at;
    char *rows = to + first * stride + at;
    if (at < bytes)                                    // a row has more than two chunks, and up to 32
#pragma unroll (BYTES ? SWATH : 1)
        for (int key = 0; key < SWATH; key += 2 * step) {
            copy_ahead(rows, codes), copy_ahead(rows + step * stride, codes + (size_t)step * bytes);
            rows += 2 * step * stride, codes += 2 * step * bytes;
        }
    if (lane < p.scale_bytes)
        copy_ahead(to + SWATH * stride + 16 * lane, slot0.scales + (size_t)slot * p.scale_bytes + 16 * lane);
}

// A lot of the SWATH keys from j0 on. Those of keys outside of low .. last - 1, which get no weight, are rows of others.
__device__ static inline void copy_lot(const AttendTask &a, const CodedKeys &from, const CodedPlane &p, const Keys &s,
                                       const Swaths &w, int j0, CodedRow slot0, char *to) {
    const int lane = threadIdx.x % 32, stride = p.stride, bytes = 16 * p.chunks, scale_bytes = p.scale_bytes;
    char *to_scales = to + SWATH * stride;
    if (j0 >= w.low && j0 + SWATH <= w.in_line_end) {
        copy_rows<0>(p, slot0, rest(j0, from.by_slots), to);
        return;
    }
#pragma unroll 1
    for (int key = 0; key < SWATH; key++) {
        const CodedRow row = coded_row(a, from, p, s, min(max(j0 + key, w.low), w.last - 1));
        if (16 * lane < bytes) copy_ahead(to + key * stride + 16 * lane, row.codes + 16 * lane);
        if (2 * lane < scale_bytes)
            ((uint16_t *)(to_scales + key * scale_bytes))[lane] = ((const uint16_t *)row.scales)[lane];
    }
}

// Until the oldest of n lots under way is there, for the warp.
__device__ static inline void wait_for_lot(int n) {
    if (n == 8) copied<7>();
    else if (n == 4) copied<3>();
    else if (n == 2) copied<1>();
    else copied<0>();
    __syncwarp();
}

// ==== [4] Scores and weights of 16 keys ==============================================================================

// Scales of the KV_ROTATION values from d on.
template <KvType T> struct __align__(2 * KV_ROTATION / CodedType<T>::group) TurnScales {
    __half of[KV_ROTATION / CodedType<T>::group];
};
template <KvType T> __device__ static inline TurnScales<T> turn_scales(const char *scales, int d) {
    return *(const TurnScales<T> *)(scales + d / CodedType<T>::group * sizeof(__half));
}

// s += k q over values from .. to - 1 of a swath's rows, in units.   rows: keys t and t + 8, which s[0], s[1] and s[2],
// s[3] have; lot: as in read_keys; type: of K
template <KvType T, int HD>
__device__ static inline void score_swath(float (&s)[4], const CodedRow (&rows)[2], const char *lot, int from, int to,
                                          KvType type, const CodedRoom<HD> &room) {
    constexpr int ROW = HD + CODED_PAD, GROUP = CodedType<T>::group;
    const int lane = threadIdx.x % 32, k4 = lane % 4;
    const __half *q = room.q + lane / 4 * ROW + from + 8 * k4;
    const float4 *starts = room.starts + from / GROUP * 4 + k4;
    const Tables tables = *(const Tables *)(room.constants + 1);
    const char *codes_of[2], *scales_of[2];
    lot += kv_row_bytes(T, from);
    for (int e = 0; e < 2; e++) {
        codes_of[e] = rows[e].codes + kv_row_bytes(T, from);
        scales_of[e] = rows[e].scales + from / GROUP * sizeof(__half);
    }
#pragma unroll 1
    for (int left = to - from; left > 0; left -= KV_ROTATION) {
        TurnScales<T> scales[2];
        if (T != KV_F16)
            for (int e = 0; e < 2; e++) scales[e] = *(const TurnScales<T> *)scales_of[e];
#pragma unroll
        for (int n = 0; n < KV_ROTATION / 32; n++) {
            const int i = 32 * n;
            unsigned codes[2][4], k[2][4];
            if (n % 2 == 0) __syncwarp();              // what comes behind takes no registers before
            if (n % 2 == 0 && T != KV_F16) read_keys<T>(codes_of, lot, k4, n / 2, codes);
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
        q += KV_ROTATION, starts += KV_ROTATION / GROUP * 4, lot += kv_row_bytes(T, KV_ROTATION);
        for (int e = 0; e < 2; e++)
            codes_of[e] += kv_row_bytes(T, KV_ROTATION), scales_of[e] += KV_ROTATION / GROUP * sizeof(__half);
    }
}

// Softmax of a swath's scores, times log2(e), -Inf where a key is out of sight: weights p as multiply_half takes them.
// They are WEIGHT_UP times as large as they say, so that they have their bits after a scale is multiplied with them.
enum { WEIGHT_UP = 6 };       // log2 of it
template <int HD>
__device__ static inline void weigh_swath(Stream<HD> &x, const float (&s)[4], unsigned (&p)[2]) {
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
    const float less[2] = { now[0] == -INFINITY ? 0 : now[0] - WEIGHT_UP, now[1] == -INFINITY ? 0 : now[1] - WEIGHT_UP };
#pragma unroll
    for (int e = 0; e < 2; e++) {
        const __half2 w = __floats2half2_rn(fast_exp2(s[2 * e] - less[0]), fast_exp2(s[2 * e + 1] - less[1]));
        x.sum[0] += __low2float(w), x.sum[1] += __high2float(w);
        p[e] = transpose_matrix(half_bits(w));
    }
}

// ==== [5] Values of 16 keys, one warp's keys =========================================================================

// Numbers of 8 N values from d on, of keys 2k, 2k + 1 (v[0]) and 2k + 8, 2k + 9 (v[1]) side by side: those that a lane
// has, as in Stream.   rows: the four keys; lot: as in read_keys; rows of f16 are taken as they are
template <KvType T, int N>
__device__ static inline void read_values(const CodedRow (&rows)[4], const char *lot, int d, const Tables &tables,
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
        load_matrices_transposed(r, lot + kv_row_bytes(T, d));
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

// acc += V^T p for a swath, in units.   rows, lot: as in read_values
template <KvType T, int RUN, int HD>
__device__ static inline void add_swath(float (&acc)[HD / 16][4], const CodedRow (&rows)[4], const char *lot,
                                        const unsigned (&p)[2], const CodedRoom<HD> &room) {
    constexpr int N = T == KV_F16 || T == KV_TQ3 ? RUN : 2 * RUN, GROUP = CodedType<T>::group;
    const uint4 zero = room.constants[0];
    const unsigned zeros[4] = { zero.x, zero.y, zero.z, zero.w };
    const Tables tables = *(const Tables *)(room.constants + 1);
#pragma unroll
    for (int d = 0; d < HD; d += KV_ROTATION) {
        TurnScales<T> scales[4];
        for (int e = 0; e < 4 && T != KV_F16; e++) scales[e] = turn_scales<T>(rows[e].scales, d);
        unsigned w[2] = { p[0], p[1] };
#pragma unroll
        for (int i = 0; i < KV_ROTATION; i += 8 * N) {
            unsigned v[2][N];
            read_values<T, N>(rows, lot, d + i, tables, v);
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

// f(the type of a plane), known where it is compiled.
template <typename F> __device__ static inline void with_type(KvType t, F f) {
    switch (t) {
    case KV_Q8_0: f(CodedType<KV_Q8_0>()); return;
    case KV_Q4_0: f(CodedType<KV_Q4_0>()); return;
    case KV_TQ4: f(CodedType<KV_TQ4>()); return;
    case KV_TQ3: f(CodedType<KV_TQ3>()); return;
    default: f(CodedType<KV_F16>());
    }
}
// The same for a tail, whose rows are f16. RUN: as in Stream
template <int RUN> struct Run { static constexpr int run = RUN; };
template <typename F> __device__ static inline void with_run(KvType t, F f) {
    switch (run_of(t)) {
    case 16: f(Run<16>()); return;
    case 2: f(Run<2>()); return;
    default: f(Run<4>());
    }
}

// Keys that a row reads in the tail begin behind its position less `reach`; 0: it reads none there. STREAMS swaths are
// whole spans, so a stream's come at equal distances.
template <bool TAIL>
__device__ static inline Swaths swaths_of(const AttendTask &a, const CodedKeys &from, const Keys &s, const Sight *rows,
                                          int reach) {
    static_assert(STREAMS * SWATH % (KEYS << 2) == 0, "spans of up to 4 tiles");
    const Share &share = s.share;
    const int before = 2 * ((quotient(share.span, a.split.by_parts) << a.split.span_bits) + share.from);
    const int skip = ((int)threadIdx.x / 32 - before) & (STREAMS - 1);         // swaths, from the first tile of the share
    int first = INT_MAX, last = 0;
    Swaths w = { tile_of(share, a.split, share.from + skip / 2) * KEYS + skip % 2 * SWATH,
                 STREAMS * SWATH * a.split.parts, s.low, s.end, 0, s.len, 0, { } };
    const size_t slot0 = ((size_t)s.seq * a.n_kv_heads + s.head) * from.slots;
    w.slot0[0] = row_at(from.k, slot0), w.slot0[1] = row_at(from.v, slot0);
#pragma unroll 1
    for (int r = s.from; r < s.to; r++) {
        first = min(first, rows[r].pos), last = max(last, rows[r].pos);
        w.whole_low = max(w.whole_low, rows[r].first);
    }
    if (TAIL) w.low = max(w.low, first - reach + 1), w.whole_low = max(w.whole_low, last - reach + 1);
    else if (reach) w.last = min(w.last, last - reach + 1), w.whole_end = min(w.whole_end, first - reach + 1);
    if (share.from == share.to) w.last = 0;
    w.in_line_end = a.staged ? min(w.last, s.len) : w.last;
    w.first += max(0, w.low - SWATH - w.first + w.step) / w.step * w.step;     // the first one with a key from low on
    return w;
}

// What a stream finds in the cache, or in its tail.
template <int HD, bool TAIL>
__device__ static inline void attend_stream(const CodedTask &c, const AttendBlock &block, const Keys &keys,
                                            const Columns<CODED_COLUMNS> &columns, const int &reach,
                                            const CodedRoom<HD> &room, Stream<HD> &x) {
    const AttendTask &a = c.a;
    const CodedKeys &source = TAIL ? c.tail : c.keys;
    const int warp = threadIdx.x / 32, t = threadIdx.x % 32 / 4, k2 = threadIdx.x % 4 * 2;
    __shared__ Swaths of_streams[STREAMS];             // here they take no registers
    const Swaths &w = of_streams[warp];
    const KvType k_type = c.keys.k.type;               // in whose order q lies
    const float scale = a.scale * 1.44269504f * (kv_group(source.k.type) ? KV_UNITS : 1);
    const float factor = (a.n_rot ? kv_tied_factor(source.v.type) : 1) * (kv_group(source.v.type) ? KV_UNITS : 1);
    char *ring = room.rings + warp * c.ring_bytes;
    auto ask = [&](int v, int j0, char *to) {          // for a lot: K of a swath, or V
        const CodedPlane &plane = v ? source.v : source.k;
        if (!TAIL && plane.type != KV_F16 && j0 < w.last)
            copy_lot(a, source, plane, keys, w, j0, w.slot0[v], to);
        copy_commit();
    };
    auto row_of = [&](const CodedPlane &p, bool in_lot, const char *lot, int j0, int key) {
        if (!in_lot) return coded_row(a, source, p, keys, min(max(j0 + key, w.low), w.last - 1));
        return (CodedRow){ lot + key * p.stride, lot + SWATH * p.stride + key * p.scale_bytes };
    };
    if (threadIdx.x % 32 == 0) of_streams[warp] = swaths_of<TAIL>(a, source, keys, columns.sights, reach);
    __syncwarp();
    const int n_stages = c.n_lots / 2;                 // 0: a lot of V comes where that of K was
#pragma unroll 1
    for (int l = 0; l < c.n_lots; l++)
        ask(l % 2, w.first + l / 2 * w.step, ring + l / 2 * c.stage_bytes + l % 2 * c.v_at);
    if (!TAIL) {
        place_queries(a, block, k_type, source.v.type, room);
        __syncthreads();
    }
    int stage = 0;                                     // of the swath
#pragma unroll 1
    for (int j0 = w.first; j0 < w.last; j0 += w.step, stage = stage + 1 < n_stages ? stage + 1 : 0) {
        char *const k_lot = ring + stage * c.stage_bytes, *const v_lot = k_lot + c.v_at;
        float s[4] = { };
        unsigned p[2];
#pragma unroll 1
        for (int v = 0; v < 2; v++) {                  // tied: V is the rest of K
            const CodedPlane &plane = v ? source.v : source.k;
            wait_for_lot(c.n_lots);
            with_type(TAIL ? KV_F16 : plane.type, [&](auto type) {
                constexpr KvType T = decltype(type)::type;
                const char *lot = v ? v_lot : k_lot;
                const CodedRow two[2] = { row_of(plane, T != KV_F16, lot, j0, t),
                                          row_of(plane, T != KV_F16, lot, j0, t + 8) };
                lot += threadIdx.x % 16 * plane.stride + threadIdx.x % 32 / 16 * 16;
                score_swath<T, HD>(s, two, lot, v ? a.n_k : 0, v ? HD : a.n_k, k_type, room);
            });
            if (v) break;
            __syncwarp();                              // K has been read
            ask(!n_stages, j0 + n_stages * w.step, k_lot);
        }
#pragma unroll
        for (int e = 0; e < 4; e++) s[e] *= scale;
        if (j0 < w.whole_low || j0 + SWATH > w.whole_end) {            // some row does not see all of it
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int row = columns.row_of[k2 + e % 2], j = j0 + t + e / 2 * 8;
                const Sight &self = columns.sights[max(row, 0)];
                if (row < 0 || !in_sight(self, a.own, j) || (reach && (j > self.pos - reach) != TAIL)) s[e] = -INFINITY;
            }
        }
        weigh_swath<HD>(x, s, p);
        auto add = [&](auto type, auto run) {
            constexpr KvType T = decltype(type)::type;
            CodedRow four[4];
            for (int e = 0; e < 4; e++)
                four[e] = row_of(source.v, T != KV_F16, v_lot, j0, k2 + e % 2 + e / 2 * 8);
            const char *lot = v_lot + threadIdx.x % 16 * source.v.stride + threadIdx.x % 32 / 16 * 16;
            add_swath<T, decltype(run)::run, HD>(x.acc, four, lot, p, room);
        };
        const int next = j0 + n_stages * w.step;       // whose V comes here, mostly rows that follow each other
        const bool in_line = n_stages && next + SWATH <= w.in_line_end;
        if (TAIL) with_run(c.keys.v.type, [&](auto run) { add(CodedType<KV_F16>(), run); });
        else with_type(source.v.type, [&](auto type) {
            constexpr KvType T = decltype(type)::type;
            add(type, Run<CodedType<T>::run>());
            __syncwarp();                              // V has been read
            if (T != KV_F16 && in_line)
                copy_rows<HD * CodedType<T>::bits / 8>(source.v, w.slot0[1], rest(next, source.by_slots), v_lot);
        });
        if (in_line) copy_commit();                    // of nothing, where V is f16
        else ask(!!n_stages, n_stages ? next : j0 + w.step, v_lot);
    }
    if (factor == 1) return;
#pragma unroll
    for (int m = 0; m < HD / 16; m++)
#pragma unroll
        for (int e = 0; e < 4; e++) x.acc[m][e] *= factor;
}

// The streams of a block put together: tops and sums of c, and values of columns where where(column) says.
//   run: as in Stream; found: room for half of all values
template <int HD, typename Where>
__device__ static inline void join_streams(Stream<HD> &x, int run, Columns<CODED_COLUMNS> &c, float *found, Where where) {
    constexpr int ROW = HD / 2 + ROW_PAD / 2;
    __shared__ float2 stats[STREAMS][CODED_COLUMNS];   // top and sum
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane / 4, k2 = lane % 4 * 2, col = threadIdx.x;
#pragma unroll
    for (int e = 0; e < 2; e++) {
        for (int h = 16; h > 2; h /= 2) x.sum[e] += __shfl_xor_sync(~0u, x.sum[e], h);
        if (t == 0) stats[warp][k2 + e] = make_float2(x.top[e], x.sum[e]);
    }
    __syncthreads();                                   // all are done with their lots, and with q
    auto top_of = [&](int col) {
        float top = -INFINITY;
        for (int s = 0; s < STREAMS; s++) top = fmaxf(top, stats[s][col].x);
        return top;
    };
    auto weight_of = [&](int s, int col, float top) {
        return stats[s][col].y == 0 ? 0 : fast_exp2(stats[s][col].x - top);
    };
    if (col < CODED_COLUMNS) {
        float top = top_of(col), sum = 0;
        for (int s = 0; s < STREAMS; s++) sum = __fmaf_rn(weight_of(s, col, top), stats[s][col].y, sum);
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
            for (int s = 0; s < STREAMS; s++) {
                if (stats[s][col].y == 0) continue;
                const float4 y = *(const float4 *)(found + (s * CODED_COLUMNS + col) * ROW + d);
                sum = make_float4(sum.x + y.x, sum.y + y.y, sum.z + y.z, sum.w + y.w);
            }
            *(float4 *)(to + half * (HD / 2) + d) = sum;
        }
    }
}

// ==== [6] The kernel and its launch ==================================================================================

// attend, codes: softmax(scale * q k) v over the keys of one part, for 8 columns as in attend_half, of caches whose K or
// V is of a quantised type; the other may be f16.
//   shapes    q (n_rows, n_heads, HD) made already, in the basis of K; cache as in gemma4.h and parts/kv.h, tied or not
//   launch    as attend_half, a warp for a stream, dynamic shared memory coded_fixed_bytes + coded_ring_bytes
//   traffic   every key in sight once for 8 columns, in its own bytes, up to n_lots lots under way in a warp; rows of
//             f16 once more, from L1 or L2
//   numerics  codes are exact in f16, as numbers from 0 up. S = K q as in attend_half, for a group at a time, from
//             -zero_of times the sum of q on, and then times its scale in f32. Weights in f16, 2^WEIGHT_UP times as
//             large; they are summed before they are multiplied with the scale of a group of V and rounded again, and
//             the sum of these times zero_of goes off V's sums before a swath is added. V's sums stay in the basis of
//             its rows and are turned back when all parts are together
//   time      instructions, 1280 to 1630 for a swath of 512 values in tied rows, half of which make halves of codes
//             (sm_90); passes of shared memory, of which q is a third
//   see       cpu_attend
template <int HD>
__global__ void __launch_bounds__(ATTEND_THREADS, 1) attend_coded_kernel(const __grid_constant__ CodedTask c) {
    __shared__ Columns<CODED_COLUMNS> columns;
    __shared__ Keys keys;     // here they take no registers
    __shared__ int reach;     // of the rows of keys
    const AttendTask &a = c.a;
    const CodedRoom<HD> room;
    const AttendBlock block = attend_block(a);
    take_turn();
    if ((int)threadIdx.x < block.n_rows)
        columns.sights[threadIdx.x] = look(a.b, a.n_seqs, a.window, a.own, block.r0 + threadIdx.x);

    for (int from = 0; from < block.n_rows; from = keys.to) {  // rows of one segment at a time: mostly there is one
        __syncthreads();                               // rows are there; nobody works on the last segment
        if (threadIdx.x == 0) {
            keys = keys_of(a, block, columns.sights, from);
            reach = a.b.segs[keys.seg].n > STEP_ROWS ? c.beside_flash ? -1 : 0 : c.tail_reach;
        }
        __syncthreads();                               // keys are there
        if (reach < 0) continue;                       // for flash
        if (keys.share.from == keys.share.to && (blockIdx.z || keys.spans.n || (a.split.parts > 1 && !a.joins)))
            continue;                                  // nothing to say
        set_columns(a, block, keys, columns);
        Stream<HD> x = { { }, { -INFINITY, -INFINITY }, { } };
        attend_stream<HD, false>(c, block, keys, columns, reach, room, x);
        if (reach) attend_stream<HD, true>(c, block, keys, columns, reach, room, x);
        leave_columns<HD>(a, block, keys, columns.sights, columns, room.weights, (float *)room.rings, c.turned,
                          [&](auto where) {
            join_streams(x, run_of(c.keys.v.type), columns, (float *)room.rings, where);
        });
    }
}

typedef void (*AttendCoded)(CodedTask);
static AttendCoded attend_coded_of(int hd) {           // NULL: there is none
    return hd == 512 ? attend_coded_kernel<512> : hd == 256 ? attend_coded_kernel<256> : NULL;
}

static size_t coded_fixed_bytes(int hd) {
    return 2 * CODED_COLUMNS * (hd + CODED_PAD) * sizeof(__half) + WEIGHTED_PARTS * sizeof(float2) +
           hd / 32 * 4 * sizeof(float4) + 2 * sizeof(uint4);
}
static int coded_stride(const KvPlane *p) { return (int)(kv_row_bytes(p->type, p->dim) / 16 | 1) * 16; }
static size_t lot_bytes(const KvPlane *p) {
    return kv_group(p->type) ? SWATH * (coded_stride(p) + kv_scale_bytes(p->type, p->dim)) : 0;
}
// Of a warp. n_stages: swaths under way; 0: half a one
static size_t coded_ring_bytes(const Cache *c, int n_stages) {
    const size_t k = lot_bytes(&c->k), v = lot_bytes(&c->v);
    return n_stages ? n_stages * (k + v) : k > v ? k : v;
}
// Of a block: rings, and then what its streams found.
static size_t coded_room_bytes(const Cache *c, int n_stages) {
    const size_t rings = STREAMS * coded_ring_bytes(c, n_stages);
    const size_t found = STREAMS * CODED_COLUMNS * (c->head_dim + ROW_PAD) / 2 * sizeof(float);
    return rings > found ? rings : found;
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
