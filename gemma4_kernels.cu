/* gemma4_kernels.cu - the CUDA backend: every operation of gemma4.h as kernels, each with its host wrapper below it.
 *
 * HOW TO READ  cuda_ops() at the end lists what there is. An operation is a function cuda_<op>; the definition of what it has
 *              to compute is cpu_<op> in gemma4.c [5]. Nothing here knows about files, text or the model.
 * CONTENTS     search for "[n]"
 *   [1] Errors, the stream, state           [6] Products of a prompt: cuBLAS
 *   [2] Warp and block helpers              [7] Cache: store, commit, copy
 *   [3] Weights: layout, upload             [8] Attention
 *   [4] Inputs: embedding, norms            [9] Output: head, sampling
 *   [5] Products of 1 to 64 rows            [10] Memory, copies, recorded steps, the table
 * INVARIANTS   one stream; no operation allocates or synchronises; index products are size_t; for 1..64 rows the order of
 *              every sum depends on shapes alone. sm_80 and up.
 *
 * A warp is 32 threads, a lane one of them. A group is 32 consecutive values of a row: the unit of quantised weights and of
 * int8 activations. */
#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "gemma4.h"

// ==== [1] Errors, the stream, state ==================================================================================
// A device error ends the process with one line that names the operation and its shapes. Everything the backend keeps for
// itself is here: one stream, scratch that an operation may use until the next one, a ring of pinned memory for copies, and
// the recorded steps.

enum { RING_BYTES = 4 << 20, MAX_STEPS = 256, MAX_PENDING = 256, MAX_MARKS = 1024, PANEL_BYTES = 64 << 20,
       PARTIAL_BYTES = 64 << 20, BLAS_BYTES = 32 << 20 };

typedef struct {              // a recorded step
    StepKey key;
    cudaGraphExec_t exec;
} Recorded;

typedef struct {              // device -> host copy that wait() completes
    void  *dst;
    const char *src;          // in the ring
    size_t bytes;
} Pending;

static struct {
    cudaStream_t stream;
    cublasHandle_t blas;
    int    n_sm;
    Limits lim;
    char  *scratch;           // (scratch_size) carved by scratch_layout()
    size_t scratch_size;
    float *y;                 // (2, max_rows, max_cols) prepared inputs: of the operation, of what rides along
    int8_t *yq;               // (2, max_rows, max_cols)
    float *ys;                // (2, max_rows, max_cols / 32)
    __half *y16;              // (max_rows, max_cols) for cuBLAS, times PROMPT_SCALE
    __half *panel;            // (PANEL_BYTES) a piece of a matrix for cuBLAS
    float *wide;              // (2, max_rows, PANEL_COLS) gate and up of a prompt
    float *partial;           // (PARTIAL_BYTES) attention before its parts are put together
    char  *blas_work;         // (BLAS_BYTES)
    char  *ring;              // (RING_BYTES) pinned
    size_t ring_at;
    Pending pending[MAX_PENDING];
    int    n_pending;
    Recorded steps[MAX_STEPS];
    int    n_steps;
    bool   recording;
    int    replay;            // the step that end() launches; -1: none
    cudaEvent_t marks[MAX_MARKS];
    int    n_marks;           // given out so far
} cuda;

__attribute__((noreturn, format(printf, 1, 2))) static void cuda_die(const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    fflush(stdout);
    fprintf(stderr, "gemma4: error: cuda: ");
    vfprintf(stderr, fmt, ap);
    fprintf(stderr, "\n");
    va_end(ap);
    _exit(1);
}

#define CHECK_CUDA(call, ...) do { \
        const cudaError_t e_ = (call); \
        if (e_ != cudaSuccess) { \
            char what_[160]; \
            snprintf(what_, sizeof what_, __VA_ARGS__); \
            cuda_die("%s: %s", what_, cudaGetErrorString(e_)); \
        } \
    } while (0)
#define CHECK_LAUNCH(...) CHECK_CUDA(cudaGetLastError(), __VA_ARGS__)
#define CHECK_BLAS(call, what) do { \
        const cublasStatus_t e_ = (call); \
        if (e_ != CUBLAS_STATUS_SUCCESS) cuda_die("%s: cuBLAS status %d", what, (int)e_); \
    } while (0)

static size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }
static int div_up(int n, int by) { return (n + by - 1) / by; }
static int min_int(int a, int b) { return a < b ? a : b; }
static int max_int(int a, int b) { return a > b ? a : b; }

// ==== [2] Warp and block helpers =====================================================================================
// Sums fold in halves, so their order is fixed: lane l adds lane l + 16, then 8, 4, 2, 1. All lanes get the result.

__device__ static inline float warp_sum(float v) {
    for (int h = 16; h > 0; h /= 2) v += __shfl_xor_sync(~0u, v, h);
    return v;
}

__device__ static inline float warp_max(float v) {
    for (int h = 16; h > 0; h /= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, h));
    return v;
}

// Sum over the block, for all threads. blockDim.x is a multiple of 32. Two barriers: one before the parts are read, one
// before the next call may overwrite them.
__device__ static inline float block_sum(float v) {
    __shared__ float part[32];
    v = warp_sum(v);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    v = threadIdx.x % 32 < blockDim.x / 32 ? part[threadIdx.x % 32] : 0;
    v = warp_sum(v);
    __syncthreads();
    return v;
}

__device__ static inline float activate(ActFn fn, float x) {
    if (fn == ACT_SILU) return x / (1.0f + expf(-x));
    return 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
}

// One group by one warp: lane l holds x, value l of the group. The rule of contract 6, bit for bit.
__device__ static inline void quantise_group(float x, int8_t *q, float *s) {
    const int lane = threadIdx.x % 32;
    const unsigned top = __reduce_max_sync(~0u, __float_as_uint(x) & 0x7fffffffu);    // |x| as integers: NaN above Inf
    const float a = __uint_as_float(top);
    const bool usable = top < 0x7f800000u && a >= 0x1p-120f;
    const float inv = usable ? __fdiv_rn(127.0f, a) : 0;
    q[lane] = usable ? (int8_t)__float2int_rn(__fmul_rn(x, inv)) : 0;
    if (lane == 0) *s = top >= 0x7f800000u ? __uint_as_float(0x7fc00000u) : usable ? __fdiv_rn(a, 127.0f) : 0;
}

// ==== [3] Weights: layout, upload ====================================================================================
// Quantised matrices are repacked once, at upload, into planes that lanes read with wide, aligned loads: a lane takes a whole
// group. Nothing is converted, every bit of the file is kept.
//
//   plane   per group of 32 values, row after row             Q8  4-bit  5-bit  6-bit  2-bit  3-bit
//   lo      the low bits of the codes                bytes    32     16     16     16      8      8
//   hi      the bits above them                      bytes     -      -      4      8      -      4
//   head    what scales the group, or its 256 values, in the order of the file: see the list of formats below
//   sup     f16 values of 256 that stand apart in the file
//
//   4-bit lo   byte j: value j low nibble, value j + 16 high nibble. As four words v[0..3]: codes 4w .. 4w + 3 are the bytes of
//              v[w] & 0x0f0f0f0f, codes 16 + 4w .. are those of v[w] >> 4 & 0x0f0f0f0f
//   2-bit lo, hi of 6-bit: two words, one for each half of the group; bits 2w, 2w + 1 of byte b belong to value 4w + b
//   1-bit hi:  one word; bit w of byte b belongs to value 4w + b
// Planes follow each other, each at a multiple of 256 bytes. A stack of n matrices is one matrix of n * rows rows.

typedef struct {              // where the planes of an uploaded matrix lie; floats: lo only, as in the file
    const uint8_t *lo, *hi, *head, *sup;
} Planes;

// One line per format: codes = lo + (hi << lo_bits); the integer that meets an activation is code - offset, or the table's
// entry. scales() gives, for group g of a row that has n groups, the factors a[h] and the minima m[h] of its two halves:
// value = a * integer - m.
typedef struct {
    int lo_bits, hi_bits;     // of a code
    int lo, hi;               // bytes per group
    int head, head_values;    // bytes per head_values values
    int sup;                  // bytes per 256 values
} Format;

static bool format_of(DType t, Format *f) {
    switch (t) {
    case T_Q8_0:   *f = (Format){ 8, 0, 32, 0, 2, 32, 0 };   return true;    // head: d
    case T_Q4_0:   *f = (Format){ 4, 0, 16, 0, 2, 32, 0 };   return true;
    case T_IQ4_NL: *f = (Format){ 4, 0, 16, 0, 2, 32, 0 };   return true;
    case T_Q4_1:   *f = (Format){ 4, 0, 16, 0, 4, 32, 0 };   return true;    // d, m
    case T_Q5_0:   *f = (Format){ 4, 1, 16, 4, 2, 32, 0 };   return true;
    case T_Q5_1:   *f = (Format){ 4, 1, 16, 4, 4, 32, 0 };   return true;
    case T_MXFP4:  *f = (Format){ 4, 0, 16, 0, 1, 32, 0 };   return true;    // exponent
    case T_NVFP4:  *f = (Format){ 4, 0, 16, 0, 2, 32, 0 };   return true;    // two scales
    case T_Q4_K:   *f = (Format){ 4, 0, 16, 0, 16, 256, 0 }; return true;    // d, dmin, 12 bytes
    case T_Q5_K:   *f = (Format){ 4, 1, 16, 4, 16, 256, 0 }; return true;
    case T_Q6_K:   *f = (Format){ 4, 2, 16, 8, 16, 256, 2 }; return true;    // 16 scales; d
    case T_Q2_K:   *f = (Format){ 2, 0, 8, 0, 16, 256, 4 };  return true;    // 16 scales and minima; d, dmin
    case T_Q3_K:   *f = (Format){ 2, 1, 8, 4, 12, 256, 2 };  return true;    // 12 bytes of scales; d
    case T_IQ4_XS: *f = (Format){ 4, 0, 16, 0, 8, 256, 0 };  return true;    // d, two and four bytes of scales
    default: return false;
    }
}

static bool is_float(DType t) { return t == T_F32 || t == T_F16 || t == T_BF16; }
static size_t float_size(DType t) { return t == T_F32 ? 4 : 2; }

static Planes planes_at(const void *base, DType t, size_t values, size_t *bytes) {
    Planes p = { (const uint8_t *)base, NULL, NULL, NULL };
    Format f;
    size_t at = 0;
    if (is_float(t)) {
        *bytes = values * float_size(t);
        return p;
    }
    if (!format_of(t, &f)) cuda_die("matrices of type %d are not supported", (int)t);
    const uint8_t **plane[4] = { &p.lo, &p.hi, &p.head, &p.sup };
    const size_t size[4] = { values / 32 * f.lo, values / 32 * f.hi, values / f.head_values * f.head, values / 256 * f.sup };
    for (int i = 0; i < 4; i++) {
        *plane[i] = (const uint8_t *)base + at;
        at = round_up(at + size[i], 256);
    }
    *bytes = at;
    return p;
}

static Planes planes_of(const Tensor *w) {
    size_t bytes;
    return planes_at(w->data, w->type, (size_t)w->n * w->rows * w->cols, &bytes);
}

// Code of value i (0..255) of a block as it lies in the file; all its bits.
__device__ static inline unsigned file_code(DType t, const uint8_t *b, int i) {
    const int l = i % 32, g = i / 32, p = i / 64, half = i / 128, k = i / 32 % 4;
    switch (t) {
    case T_Q8_0: return b[2 + i];
    case T_Q4_0: case T_IQ4_NL: return b[2 + i % 16] >> 4 * (i / 16) & 15;
    case T_Q4_1: return b[4 + i % 16] >> 4 * (i / 16) & 15;
    case T_Q5_0: return (b[6 + i % 16] >> 4 * (i / 16) & 15) | (b[2 + i / 8] >> i % 8 & 1) << 4;
    case T_Q5_1: return (b[8 + i % 16] >> 4 * (i / 16) & 15) | (b[4 + i / 8] >> i % 8 & 1) << 4;
    case T_MXFP4: return b[1 + i % 16] >> 4 * (i / 16) & 15;
    case T_NVFP4: return b[4 + 8 * (i / 16) + i % 8] >> 4 * (i / 8 % 2) & 15;                // i < 64
    case T_Q4_K: return b[16 + 32 * p + l] >> 4 * (g & 1) & 15;
    case T_Q5_K: return (b[48 + 32 * p + l] >> 4 * (g & 1) & 15) | (b[16 + l] >> g & 1) << 4;
    case T_Q6_K: return (b[64 * half + 32 * (k & 1) + l] >> 4 * (k >> 1) & 15) | (b[128 + 32 * half + l] >> 2 * k & 3) << 4;
    case T_Q2_K: return b[16 + 32 * half + l] >> 2 * k & 3;
    case T_Q3_K: return (b[32 + 32 * half + l] >> 2 * k & 3) | (b[l] >> g & 1) << 2;
    case T_IQ4_XS: return b[8 + 16 * g + l % 16] >> 4 * (l / 16) & 15;
    default: return 0;
    }
}

// repack: blocks of the file -> planes, one thread per group.
//   shapes    src: n_groups / (block / 32) blocks; planes: n_groups groups from first_group on
//   launch    grid n_groups / 128, block 128
//   traffic   reads and writes every byte once, bytewise: bound by the bus that brings them, not by memory
__global__ void repack_kernel(DType t, Format f, int block_values, int block_bytes, const uint8_t *src, Planes p,
                              size_t first_group, size_t n_groups) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n_groups) return;
    const size_t first = i * 32, g = first_group + i;
    const uint8_t *b = src + first / block_values * block_bytes;
    const int in_block = (int)(first % block_values);
    unsigned lo[8] = { 0 }, hi[2] = { 0 };
    for (int v = 0; v < 32; v++) {
        const unsigned code = file_code(t, b, in_block + v), low = code & ((1u << f.lo_bits) - 1), high = code >> f.lo_bits;
        const int h = v / 16, w = v % 16 / 4, byte = v % 4;
        if (f.lo_bits == 8) lo[v / 4] |= low << 8 * byte;
        if (f.lo_bits == 4) lo[w] |= low << (8 * byte + 4 * h);
        if (f.lo_bits == 2) lo[h] |= low << (8 * byte + 2 * w);
        if (f.hi_bits == 2) hi[h] |= high << (8 * byte + 2 * w);
        if (f.hi_bits == 1) hi[0] |= high << (8 * byte + (v / 4));
    }
    memcpy((uint8_t *)p.lo + g * f.lo, lo, f.lo);
    memcpy((uint8_t *)p.hi + g * f.hi, hi, f.hi);
    if (block_values == 32) {                          // head: the bytes before the codes
        memcpy((uint8_t *)p.head + g * f.head, b, f.head);
    } else if (block_values == 64) {
        memcpy((uint8_t *)p.head + g * 2, b + in_block / 16, 2);
    } else if (in_block == 0) {
        const int head_at = t == T_Q6_K ? 192 : t == T_Q3_K ? 96 : 0, sup_at = t == T_Q6_K ? 208 : t == T_Q3_K ? 108 : 80;
        memcpy((uint8_t *)p.head + g / 8 * f.head, b + head_at, f.head);
        memcpy((uint8_t *)p.sup + g / 8 * f.sup, b + sup_at, f.sup);
    }
}

// ---- reading a group ----

typedef struct {              // a group, ready for dp4a: value = a[h] * integer - m[h], h = 0 for the first 16 values
    unsigned c[8];            // four integers each, as bytes. With an offset they are codes: integer = code - offset
    float a[2], m[2];
} Group;

// What each type needs beyond Format, known at compile time.
template <DType T> struct Traits {
    static constexpr int offset = T == T_Q4_0 ? 8 : T == T_Q5_0 ? 16 : T == T_Q6_K ? 32 : T == T_Q3_K ? 4 : 0;
    static constexpr bool min = T == T_Q4_1 || T == T_Q5_1 || T == T_Q4_K || T == T_Q5_K || T == T_Q2_K;
    static constexpr bool halves = T == T_Q6_K || T == T_Q3_K || T == T_Q2_K || T == T_NVFP4;    // a[0] != a[1]
};

__device__ static inline float f16_at(const uint8_t *p) { return __half2float(*(const __half *)p); }

// Four table entries by four codes 0..15 in the bytes of x. t: the table, four entries a word.
__device__ static inline unsigned lookup4(unsigned x, unsigned t0, unsigned t1, unsigned t2, unsigned t3) {
    const unsigned sel = (x & 0x7) | (x >> 4 & 0x70) | (x >> 8 & 0x700) | (x >> 12 & 0x7000);
    const unsigned upper = (x >> 3 & 0x01010101u) * 0xff;
    return (__byte_perm(t0, t1, sel) & ~upper) | (__byte_perm(t2, t3, sel) & upper);
}

__device__ static inline float e4m3(unsigned x) {      // unsigned; 0x7f means 0 here
    x &= 127;
    const int e = x >> 3, m = x & 7;
    return x == 127 ? 0 : e ? ldexpf(1 + m * 0.125f, e - 7) : m * 0x1p-9f;
}

// Sub-scale and sub-minimum g of Q4_K and Q5_K from the twelve bytes after d and dmin.
__device__ static inline void k_scales(const uint8_t *s, int g, int *sc, int *mn) {
    *sc = g < 4 ? s[g] & 63 : (s[g + 4] & 15) | (s[g - 4] >> 6) << 4;
    *mn = g < 4 ? s[g + 4] & 63 : s[g + 4] >> 4 | (s[g] >> 6) << 4;
}

// Group number g of the whole matrix.
template <DType T> __device__ static inline void load_group(const Planes &p, size_t g, Group *out) {
    unsigned *c = out->c;
    if constexpr (T == T_Q8_0) {
        const uint4 v0 = ((const uint4 *)p.lo)[g * 2], v1 = ((const uint4 *)p.lo)[g * 2 + 1];
        c[0] = v0.x, c[1] = v0.y, c[2] = v0.z, c[3] = v0.w, c[4] = v1.x, c[5] = v1.y, c[6] = v1.z, c[7] = v1.w;
    } else if constexpr (T == T_Q2_K || T == T_Q3_K) {
        const uint2 v = ((const uint2 *)p.lo)[g];
        for (int w = 0; w < 4; w++) c[w] = v.x >> 2 * w & 0x03030303u, c[4 + w] = v.y >> 2 * w & 0x03030303u;
    } else {
        const uint4 v = ((const uint4 *)p.lo)[g];
        const unsigned word[4] = { v.x, v.y, v.z, v.w };
        for (int w = 0; w < 4; w++) c[w] = word[w] & 0x0f0f0f0fu, c[4 + w] = word[w] >> 4 & 0x0f0f0f0fu;
    }
    if constexpr (T == T_Q5_0 || T == T_Q5_1 || T == T_Q5_K || T == T_Q3_K) {
        const unsigned h = ((const unsigned *)p.hi)[g];
        for (int w = 0; w < 8; w++) c[w] |= (h >> w & 0x01010101u) << (T == T_Q3_K ? 2 : 4);
    }
    if constexpr (T == T_Q6_K) {
        const uint2 h = ((const uint2 *)p.hi)[g];
        for (int w = 0; w < 4; w++) c[w] |= (h.x >> 2 * w & 0x03030303u) << 4, c[4 + w] |= (h.y >> 2 * w & 0x03030303u) << 4;
    }
    if constexpr (T == T_IQ4_NL || T == T_IQ4_XS)      // -127 -104 -83 -65 | -49 -35 -22 -10 | 1 13 25 38 | 53 69 89 113
        for (int w = 0; w < 8; w++) c[w] = lookup4(c[w], 0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u);
    if constexpr (T == T_MXFP4 || T == T_NVFP4)        // twice 0 0.5 1 1.5 | 2 3 4 6, and the negative ones
        for (int w = 0; w < 8; w++) c[w] = lookup4(c[w], 0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu);

    const int in_256 = (int)(g % 8);
    out->m[0] = out->m[1] = 0;
    if constexpr (T == T_Q8_0 || T == T_Q4_0 || T == T_Q5_0 || T == T_IQ4_NL) {
        out->a[0] = out->a[1] = __half2float(((const __half *)p.head)[g]);
    } else if constexpr (T == T_Q4_1 || T == T_Q5_1) {
        const __half2 dm = ((const __half2 *)p.head)[g];
        out->a[0] = out->a[1] = __low2float(dm);
        out->m[0] = out->m[1] = -__high2float(dm);     // these formats add it
    } else if constexpr (T == T_MXFP4) {
        const unsigned e = p.head[g];                  // 2^(e - 128); 0 and 1 are subnormal, 255 is NaN
        out->a[0] = out->a[1] = __uint_as_float(e == 255 ? 0x7fc00000u : e >= 2 ? (e - 1) << 23 : 0x00200000u << e);
    } else if constexpr (T == T_NVFP4) {
        for (int h = 0; h < 2; h++) out->a[h] = 0.5f * e4m3(p.head[g * 2 + h]);
    } else if constexpr (T == T_Q4_K || T == T_Q5_K) {
        const uint8_t *b = p.head + g / 8 * 16;
        const __half2 d = *(const __half2 *)b;
        int sc, mn;
        k_scales(b + 4, in_256, &sc, &mn);
        out->a[0] = out->a[1] = __low2float(d) * sc;
        out->m[0] = out->m[1] = __high2float(d) * mn;
    } else if constexpr (T == T_Q6_K) {
        const float d = ((const __half *)p.sup)[g / 8];
        const int8_t *sc = (const int8_t *)p.head + g * 2;
        for (int h = 0; h < 2; h++) out->a[h] = d * sc[h];
    } else if constexpr (T == T_Q2_K) {
        const __half2 d = ((const __half2 *)p.sup)[g / 8];
        for (int h = 0; h < 2; h++) {
            const unsigned s = p.head[g * 2 + h];
            out->a[h] = __low2float(d) * (s & 15);
            out->m[h] = __high2float(d) * (s >> 4);
        }
    } else if constexpr (T == T_Q3_K) {
        const float d = ((const __half *)p.sup)[g / 8];
        const uint8_t *s = p.head + g / 8 * 12;
        for (int h = 0; h < 2; h++) {
            const int j = 2 * in_256 + h;
            const int sc = ((j < 8 ? s[j] & 15 : s[j - 8] >> 4) | (s[8 + j % 4] >> 2 * (j / 4) & 3) << 4) - 32;
            out->a[h] = d * sc;
        }
    } else if constexpr (T == T_IQ4_XS) {
        const uint8_t *b = p.head + g / 8 * 8;
        const unsigned sh = b[2] | b[3] << 8, ls = (b[4 + in_256 / 2] >> 4 * (in_256 & 1) & 15) | (sh >> 2 * in_256 & 3) << 4;
        out->a[0] = out->a[1] = f16_at(b) * ((int)ls - 32);
    }
}

// The 32 values of a group in f32: exact, or correctly rounded where there is a minimum.
template <DType T> __device__ static inline void group_values(const Planes &p, size_t g, float *v) {
    Group x;
    load_group<T>(p, g, &x);
    for (int i = 0; i < 32; i++) {
        const int code = (int8_t)(x.c[i / 4] >> 8 * (i % 4)) - Traits<T>::offset;
        v[i] = Traits<T>::min ? __fsub_rn(__fmul_rn(x.a[i / 16], (float)code), x.m[i / 16]) : x.a[i / 16] * code;
    }
}

__device__ static inline float float_value(DType t, const uint8_t *p, size_t i) {
    return t == T_F32 ? ((const float *)p)[i] : t == T_F16 ? __half2float(((const __half *)p)[i])
                                                           : __bfloat162float(((const __nv_bfloat16 *)p)[i]);
}

// X(T) for every quantised type: one case each in the switches below.
#define QUANTISED_TYPES(X) X(T_Q8_0) X(T_Q4_0) X(T_Q4_1) X(T_Q5_0) X(T_Q5_1) X(T_Q4_K) X(T_Q5_K) X(T_Q6_K) X(T_IQ4_NL) \
    X(T_IQ4_XS) X(T_Q2_K) X(T_Q3_K) X(T_MXFP4) X(T_NVFP4)

// Up to 32 values of a matrix from value `first` on, a multiple of 32, in f32.
__device__ static inline void values_at(DType t, const Planes &p, size_t first, int n, float *v) {
    switch (t) {
#define CASE(T) case T: group_values<T>(p, first / 32, v); return;
    QUANTISED_TYPES(CASE)
#undef CASE
    default:
        for (int i = 0; i < n; i++) v[i] = float_value(t, p.lo, first + i);
    }
}

// ---- upload ----

static int block_values_of(DType t) {
    if (is_float(t)) return 1;
    return t == T_NVFP4 ? 64 : t >= T_Q2_K && t != T_IQ4_NL && t != T_MXFP4 ? 256 : 32;
}
static int block_bytes_of(DType t) {
    switch (t) {
    case T_F32: return 4;
    case T_F16: case T_BF16: return 2;
    case T_Q4_0: case T_IQ4_NL: return 18;
    case T_Q4_1: return 20;
    case T_Q5_0: return 22;
    case T_Q5_1: return 24;
    case T_Q8_0: return 34;
    case T_Q2_K: return 84;
    case T_Q3_K: return 110;
    case T_Q4_K: return 144;
    case T_Q5_K: return 176;
    case T_Q6_K: return 210;
    case T_IQ4_XS: return 136;
    case T_MXFP4: return 17;
    case T_NVFP4: return 36;
    }
    return 0;
}

enum { UPLOAD_CHUNK = 16 << 20, UPLOAD_BUFFERS = 3 };

static size_t cuda_weight_bytes(const Tensor *w) {
    size_t bytes;
    planes_at(NULL, w->type, (size_t)w->n * w->rows * w->cols, &bytes);
    return bytes + (w->scale ? round_up(w->n * sizeof(float), 256) : 0);
}

// Host bytes of the file -> planes at dst, through pinned buffers that take turns: while one is on the bus the next is filled.
// On the device they pass through cuda.panel.
static struct {
    char *host[UPLOAD_BUFFERS];
    cudaEvent_t free[UPLOAD_BUFFERS];
    int next;
} uploads;

static void cuda_upload(Tensor *w, void *dst) {
    const size_t values = (size_t)w->n * w->rows * w->cols;
    const int block_values = block_values_of(w->type), block_bytes = block_bytes_of(w->type);
    if (!dst) cuda_die("upload: a matrix of %d x %d was given no memory", w->rows, w->cols);
    for (int i = 0; i < UPLOAD_BUFFERS && !uploads.host[i]; i++) {
        CHECK_CUDA(cudaMallocHost((void **)&uploads.host[i], UPLOAD_CHUNK), "upload: pinned buffer of %d bytes", UPLOAD_CHUNK);
        CHECK_CUDA(cudaEventCreateWithFlags(&uploads.free[i], cudaEventDisableTiming), "upload: event");
    }
    Format f = { 0 };
    format_of(w->type, &f);
    size_t bytes;
    const Planes p = planes_at(dst, w->type, values, &bytes);
    // chunks of whole blocks whose first value is a multiple of 256
    const size_t unit = 256 / block_values, chunk = UPLOAD_CHUNK / (unit * block_bytes) * unit, n_blocks = values / block_values;
    for (size_t at = 0; at < n_blocks; at += chunk) {
        const size_t n = n_blocks - at < chunk ? n_blocks - at : chunk;
        const int b = uploads.next++ % UPLOAD_BUFFERS;
        CHECK_CUDA(cudaEventSynchronize(uploads.free[b]), "upload of %d x %d", w->rows, w->cols);
        memcpy(uploads.host[b], (const char *)w->data + at * block_bytes, n * block_bytes);
        char *raw = (char *)cuda.panel + (size_t)b * UPLOAD_CHUNK;
        void *to = is_float(w->type) ? (char *)dst + at * block_bytes : raw;
        CHECK_CUDA(cudaMemcpyAsync(to, uploads.host[b], n * block_bytes, cudaMemcpyHostToDevice, cuda.stream),
                   "upload of %d x %d", w->rows, w->cols);
        if (!is_float(w->type)) {
            const size_t groups = n * block_values / 32;
            repack_kernel<<<(unsigned)((groups + 127) / 128), 128, 0, cuda.stream>>>(
                w->type, f, block_values, block_bytes, (const uint8_t *)raw, p, at * block_values / 32, groups);
            CHECK_LAUNCH("repack of %d x %d, type %d", w->rows, w->cols, (int)w->type);
        }
        CHECK_CUDA(cudaEventRecord(uploads.free[b], cuda.stream), "upload");
    }
    if (w->scale) {
        float *scale = (float *)((char *)dst + bytes);
        CHECK_CUDA(cudaMemcpyAsync(scale, w->scale, w->n * sizeof(float), cudaMemcpyHostToDevice, cuda.stream), "upload of scales");
        w->scale = scale;
    }
    w->data = dst;
}

// ==== [4] Inputs: embedding, norms ===================================================================================
// The input of a product is prepared once per operation by a kernel of its own, for all rows: x', the norm and the int8 form.

// Prompts multiply in f16, whose 11 bits make an eighth of bf16's error. Activations go in times PROMPT_SCALE, so that they
// may reach a million; what lies beyond is cut there.
#define PROMPT_SCALE 0.0625f
__device__ static inline __half prompt_half(float y) {
    y *= PROMPT_SCALE;
    return __float2half_rn(y != y ? y : fminf(fmaxf(y, -65504.0f), 65504.0f));
}

typedef struct {              // where a prepared input goes; NULL: not wanted
    float *f;                 // (n_rows, cols)
    int8_t *q;                // (n_rows, cols)
    float *s;                 // (n_rows, cols / 32)
    __half *h;                // (n_rows, cols) times PROMPT_SCALE
} Prepared;

// prepare: In of gemma4.h, one or two of them with the same x' (blockIdx.y); d, x' and y as defined there.
//   shapes    as In; cols <= 49152 (a row lies in shared memory)
//   launch    grid (n_rows, 1 or 2), block 512, dynamic shared memory 4 * cols
//   traffic   reads up to 3 rows of f32 and the norm weights, writes x' and y in the forms wanted
//   numerics  f32, sums over 512 threads, then halves
//   see       prepare_row() in gemma4.c [5]; tests/test_ops.c "close" and every product
__global__ void prepare_kernel(In in0, In in1, Prepared out0, Prepared out1, int cols) {
    extern __shared__ float row[];
    const In in = blockIdx.y ? in1 : in0;
    const Prepared out = blockIdx.y ? out1 : out0;
    const size_t at = (size_t)blockIdx.x * cols;
    float scale[2] = { 1, 1 };
    for (int k = 0; k < 2; k++) {
        if (!in.delta[k] || !in.w_delta[k]) continue;
        float ss = 0;
        for (int i = threadIdx.x; i < cols; i += blockDim.x) ss += in.delta[k][at + i] * in.delta[k][at + i];
        scale[k] = rsqrtf(block_sum(ss) / cols + in.eps);
    }
    float ss = 0;
    for (int i = threadIdx.x; i < cols; i += blockDim.x) {
        float d = 0;
        for (int k = 0; k < 2; k++)
            if (in.delta[k]) d += in.w_delta[k] ? in.w_delta[k][i] * (in.delta[k][at + i] * scale[k]) : in.delta[k][at + i];
        row[i] = d;                                    // each thread comes back to its own elements only
        ss += d * d;
    }
    const bool post = in.w_post && (in.delta[0] || in.delta[1]);
    const float post_scale = post ? rsqrtf(block_sum(ss) / cols + in.eps) : 1;
    ss = 0;
    for (int i = threadIdx.x; i < cols; i += blockDim.x) {
        const float d = post ? in.w_post[i] * (row[i] * post_scale) : row[i];
        const float x = in.scale * ((in.x ? in.x[at + i] : 0) + d);
        if (in.x_out) in.x_out[at + i] = x;
        row[i] = x;
        ss += x * x;
    }
    const float pre_scale = in.w_pre ? rsqrtf(block_sum(ss) / cols + in.eps) : 1;
    // Whole groups per warp from here on; blockDim.x is a multiple of 32, so these are still a thread's own elements.
    for (int i = threadIdx.x; i < cols; i += blockDim.x) {
        const float y = in.w_pre ? in.w_pre[i] * (row[i] * pre_scale) : row[i];
        if (out.f) out.f[at + i] = y;
        if (out.h) out.h[at + i] = prompt_half(y);
        if (out.q) quantise_group(y, out.q + at + i - threadIdx.x % 32, out.s + (at + i) / 32);
    }
}

static void launch_prepare(const In *in, const In *beside, Prepared out, Prepared out_beside, int n_rows, int cols) {
    const size_t shared = (size_t)cols * sizeof(float);
    if (shared > 192 << 10) cuda_die("prepare: rows of %d values are not supported", cols);
    if (out.q && cols % 32) cuda_die("prepare: expected a multiple of 32 columns for int8, got %d", cols);
    prepare_kernel<<<dim3(n_rows, beside ? 2 : 1), 512, shared, cuda.stream>>>(*in, beside ? *beside : *in, out, out_beside, cols);
    CHECK_LAUNCH("prepare n_rows=%d cols=%d", n_rows, cols);
}

// act_to_half: the form that cuBLAS takes, of what a producer left: f, or q * s.
//   launch    grid (n_rows, ceil(cols / 256)), block 256
__global__ void act_to_half_kernel(Act a, __half *out, int cols) {
    const int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= cols) return;
    const size_t at = (size_t)blockIdx.x * cols + i;
    out[at] = prompt_half(a.f ? a.f[at] : a.q[at] * a.s[at / 32]);
}

// The int8 and f32 forms of an input for the 1..64-row products: what a producer left, or prepared in scratch number `part`.
static Prepared prepared_at(int part, int cols, bool f, bool q, bool h) {
    const size_t all = (size_t)cuda.lim.max_rows * cuda.lim.max_cols;
    return (Prepared){ f ? cuda.y + part * all : NULL, q ? cuda.yq + part * all : NULL,
                       q ? cuda.ys + part * (all / 32 + cuda.lim.max_rows) : NULL, h ? cuda.y16 : NULL };
}

// embed: out[r] = scale * table[token of r].
//   shapes    table (vocab, cols), out (n_rows, out_stride)
//   launch    grid (n_rows, ceil(cols / 32 / 128)), block 128: a thread takes a group
//   traffic   reads one row of the table per row
//   see       cpu_embed
__global__ void embed_kernel(Batch b, Planes table, DType type, int vocab, int cols, float scale, float *out, int out_stride) {
    const int g = blockIdx.y * blockDim.x + threadIdx.x, first = g * 32;
    if (first >= cols) return;
    int token = b.rows[blockIdx.x].token;
    if (token < 0 || token >= vocab) token = 0;
    float v[32];
    const int n = min(32, cols - first);
    values_at(type, table, (size_t)token * cols + first, n, v);
    for (int i = 0; i < n; i++) out[(size_t)blockIdx.x * out_stride + first + i] = v[i] * scale;
}
static void cuda_embed(const Embed *o) {
    const Tensor *t = o->table;
    embed_kernel<<<dim3(o->batch->n_rows, div_up(div_up(t->cols, 32), 128)), 128, 0, cuda.stream>>>(
        *o->batch, planes_of(t), t->type, t->rows, t->cols, o->scale, o->out, o->out_stride);
    CHECK_LAUNCH("embed n_rows=%d cols=%d", o->batch->n_rows, t->cols);
}

// ple_rows: u = out_scale * (norm(proj_scale * u; w_norm) + table_scale * table[token]), per row and layer.
//   shapes    u (n_rows, n_layers, ple_dim); table (vocab, n_layers * ple_dim)
//   launch    grid (n_rows, n_layers), block 256, dynamic shared memory 4 * ple_dim
//   traffic   reads and writes u, reads one row of the table per row
//   see       cpu_ple_rows
__global__ void ple_rows_kernel(Batch b, Planes table, DType type, int vocab, const float *w_norm, float *u, int n_layers,
                                int dim, float proj_scale, float table_scale, float out_scale, float eps) {
    extern __shared__ float embedding[];
    int token = b.rows[blockIdx.x].token;
    if (token < 0 || token >= vocab) token = 0;
    float *row = u + ((size_t)blockIdx.x * n_layers + blockIdx.y) * dim;
    const size_t at = ((size_t)token * n_layers + blockIdx.y) * dim;       // first value: its group may begin before it
    float ss = 0;
    for (int i = threadIdx.x; i < dim; i += blockDim.x) ss += row[i] * proj_scale * (row[i] * proj_scale);
    for (size_t g = at / 32 + threadIdx.x; g * 32 < at + dim; g += blockDim.x) {
        float v[32];
        const size_t row_end = ((size_t)token + 1) * n_layers * dim;
        values_at(type, table, g * 32, (int)min((size_t)32, row_end - g * 32), v);
        for (int i = 0; i < 32; i++)
            if (g * 32 + i >= at && g * 32 + i < at + dim) embedding[g * 32 + i - at] = v[i];
    }
    const float scale = rsqrtf(block_sum(ss) / dim + eps);                 // a barrier: embedding is whole behind it
    for (int i = threadIdx.x; i < dim; i += blockDim.x)
        row[i] = (w_norm[i] * (row[i] * proj_scale * scale) + embedding[i] * table_scale) * out_scale;
}
static void cuda_ple_rows(const PleRows *o) {
    ple_rows_kernel<<<dim3(o->batch->n_rows, o->n_layers), 256, o->ple_dim * sizeof(float), cuda.stream>>>(
        *o->batch, planes_of(o->table), o->table->type, o->table->rows, o->w_norm, o->u, o->n_layers, o->ple_dim,
        o->proj_scale, o->table_scale, o->out_scale, o->eps);
    CHECK_LAUNCH("ple_rows n_rows=%d n_layers=%d ple_dim=%d", o->batch->n_rows, o->n_layers, o->ple_dim);
}

static void cuda_close(const Close *o) {
    launch_prepare(&o->in, NULL, (Prepared){ .f = o->out }, (Prepared){ 0 }, o->n_rows, o->cols);
}

// gather_rows: dst[i] = src[index[i]], words of 32 bits.
//   launch    grid (n_rows, ceil(cols / 256)), block 256
//   see       cpu_gather_rows
__global__ void gather_rows_kernel(const uint32_t *src, const int32_t *index, uint32_t *dst, int cols, int src_stride,
                                   int dst_stride) {
    const int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= cols) return;
    const size_t from = index ? index[blockIdx.x] : blockIdx.x;
    dst[(size_t)blockIdx.x * dst_stride + i] = src[from * src_stride + i];
}
static void cuda_gather_rows(const GatherRows *o) {
    gather_rows_kernel<<<dim3(o->n_rows, div_up(o->cols, 256)), 256, 0, cuda.stream>>>(
        (const uint32_t *)o->src, o->index, (uint32_t *)o->dst, o->cols, o->src_stride, o->dst_stride);
    CHECK_LAUNCH("gather_rows n_rows=%d cols=%d", o->n_rows, o->cols);
}

// ==== [5] Products of 1 to 64 rows ===================================================================================
// One kernel carries out a list of jobs: matrices of different types and shapes that may run beside each other. A block of
// 8 warps takes a tile of a job's output features and up to R of its rows; a warp takes one feature at a time, lane l the
// groups l, l + 32, ... of it. Partial sums fold in halves. The order of a row's sum thus depends on its length alone.

typedef enum {
    JOB_STORE,                // out = w y, soft-capped when cap > 0
    JOB_GATED,                // out = fn(gate y) * (up y), as Act
    JOB_INJECT,               // out = gelu(w y) * u, as Act
    JOB_DOWN                  // out = sum over j of weights[j] * (w_e y_j): the experts of a row
} JobKind;

typedef struct {
    JobKind  kind;
    DType    type, up_type;
    Planes   w, up;
    size_t   up_first;        // JOB_GATED: first row of `up` within its expert (fused tensors: expert_dim, up = w)
    size_t   rows_e;          // rows of one expert of w
    int      rows, cols;      // output features, input width
    int      n_rows;          // rows of the input; JOB_GATED with ids: n_rows * n_used outputs
    Prepared in;
    const float *factor, *up_factor;           // (n) Tensor.scale
    const int32_t *ids;       // experts; NULL: a single matrix
    const float *weights;     // JOB_DOWN
    int      n_used;
    float   *out;             // JOB_STORE, JOB_DOWN
    Act      act;             // JOB_GATED, JOB_INJECT
    ActFn    fn;
    const float *u;           // JOB_INJECT
    int      u_stride;
    float    cap;
    int      tile;            // features per block: 8 or 32
    int      blocks_x, blocks_y;               // tiles; tiles of R rows, or pairs of row and expert
} Job;

enum { MAX_JOBS = 6, PRODUCT_WARPS = 8 };
typedef struct {
    Job job[MAX_JOBS];
    int n;
} Jobs;

// acc[r] = one feature (row number `row` of the planes) times n <= R rows of y; all lanes get the sums.
template <DType T, int R> __device__ static inline void dot_rows(const Planes &w, size_t row, const Prepared &y, size_t first,
                                                                 int n, int cols, float *acc) {
    const int lane = threadIdx.x % 32, n_groups = cols / 32;
    for (int r = 0; r < R; r++) acc[r] = 0;
    for (int g = lane; g < n_groups; g += 32) {
        Group x;
        load_group<T>(w, row * n_groups + g, &x);
#pragma unroll
        for (int r = 0; r < R; r++) {
            if (R > 1 && r >= n) continue;
            const uint4 *q = (const uint4 *)(y.q + (first + r) * cols) + g * 2;
            const uint4 q0 = q[0], q1 = q[1];
            const float s = y.s[(first + r) * n_groups + g];
            const unsigned qs[8] = { q0.x, q0.y, q0.z, q0.w, q1.x, q1.y, q1.z, q1.w };
            int dot[2] = { 0, 0 }, sum[2] = { 0, 0 };
            for (int i = 0; i < 8; i++) {
                dot[i / 4] = __dp4a((int)x.c[i], (int)qs[i], dot[i / 4]);
                if (Traits<T>::offset || Traits<T>::min) sum[i / 4] = __dp4a(0x01010101, (int)qs[i], sum[i / 4]);
            }
            for (int h = 0; h < 2; h++) dot[h] -= Traits<T>::offset * sum[h];
            float term = Traits<T>::halves ? __fmaf_rn(x.a[1], (float)dot[1], __fmul_rn(x.a[0], (float)dot[0]))
                                           : __fmul_rn(x.a[0], (float)(dot[0] + dot[1]));
            if (Traits<T>::min) {
                if (Traits<T>::halves) term = __fmaf_rn(-x.m[0], (float)sum[0], __fmaf_rn(-x.m[1], (float)sum[1], term));
                else term = __fmaf_rn(-x.m[0], (float)(sum[0] + sum[1]), term);
            }
            acc[r] = __fmaf_rn(s, term, acc[r]);
        }
    }
    for (int r = 0; r < R; r++) acc[r] = warp_sum(acc[r]);
}

template <int R> __device__ static inline void dot_rows_float(DType t, const Planes &w, size_t row, const Prepared &y,
                                                              size_t first, int n, int cols, float *acc) {
    const int lane = threadIdx.x % 32;
    for (int r = 0; r < R; r++) acc[r] = 0;
    for (int i = lane; i < cols; i += 32) {
        const float x = float_value(t, w.lo, row * cols + i);
        for (int r = 0; r < R; r++)
            if (r < n) acc[r] = __fmaf_rn(x, y.f[(first + r) * cols + i], acc[r]);
    }
    for (int r = 0; r < R; r++) acc[r] = warp_sum(acc[r]);
}

template <int R> __device__ static inline void dot_any(DType t, const Planes &w, size_t row, const Prepared &y, size_t first,
                                                       int n, int cols, float *acc) {
    switch (t) {
#define CASE(T) case T: dot_rows<T, R>(w, row, y, first, n, cols, acc); return;
    QUANTISED_TYPES(CASE)
#undef CASE
    default: dot_rows_float<R>(t, w, row, y, first, n, cols, acc);
    }
}

// product: the jobs of a launch.
//   shapes    w (rows, cols) per expert, y (n_rows, cols), out (n_rows, rows)
//   launch    grid: the sum over jobs of blocks_x * blocks_y; block 256; R = 1 or 8 rows of a job per block
//   traffic   every block reads tile * cols weights (GATED: twice that) and R rows of y
//   numerics  integer dot products per group, exact; f32 sum of the groups in the order of dot_rows
//   see       cpu_matmul, cpu_gate_up, cpu_expert_gate_up, cpu_expert_down, cpu_ple_inject, cpu_head
template <int R> __global__ void __launch_bounds__(256) product_kernel(const __grid_constant__ Jobs jobs) {
    __shared__ float tile[2][R][32];                   // gate or the only matrix, up
    int b = blockIdx.x, k = 0;
    for (int n; k < jobs.n - 1 && b >= (n = jobs.job[k].blocks_x * jobs.job[k].blocks_y); k++) b -= n;
    const Job &o = jobs.job[k];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first_out = b % o.blocks_x * o.tile, n_out = min(o.tile, o.rows - first_out), y_block = b / o.blocks_x;
    // Rows of the input and of the output that this block works on.
    const bool pairs = o.ids && o.kind == JOB_GATED;
    const int first = pairs ? y_block / o.n_used : o.kind == JOB_DOWN ? y_block * o.n_used : y_block * R;
    const int n = pairs || o.kind == JOB_DOWN ? 1 : min(R, o.n_rows - first);
    const int first_row = pairs || o.kind == JOB_DOWN ? y_block : first;
    const int e = pairs ? o.ids[y_block] : 0;

    float acc[R];
    if (o.kind == JOB_DOWN) {
        for (int i = warp; i < n_out; i += PRODUCT_WARPS) {
            float sum = 0;
            for (int j = 0; j < o.n_used; j++) {
                const int id = o.ids[first + j];
                float one[1];
                dot_any<1>(o.type, o.w, id * o.rows_e + first_out + i, o.in, first + j, 1, o.cols, one);
                sum = __fmaf_rn(o.weights[first + j], o.factor ? o.factor[id] * one[0] : one[0], sum);
            }
            if (lane == 0) o.out[(size_t)first_row * o.rows + first_out + i] = sum;
        }
        return;
    }
    const int n_dots = o.kind == JOB_GATED ? 2 * n_out : n_out;
    for (int i = warp; i < n_dots; i += PRODUCT_WARPS) {
        const bool up = i >= n_out;
        const size_t row = e * o.rows_e + (up ? o.up_first + first_out + i - n_out : first_out + i);
        dot_any<R>(up ? o.up_type : o.type, up ? o.up : o.w, row, o.in, first, n, o.cols, acc);
        const float *factor = up ? o.up_factor : o.factor;
        if (lane == 0)
            for (int r = 0; r < n; r++) tile[up][r][up ? i - n_out : i] = factor ? factor[e] * acc[r] : acc[r];
    }
    __syncthreads();
    for (int j = threadIdx.x; j < n * 32; j += blockDim.x) {           // a warp takes 32 features of one row
        const int r = j / 32, i = j % 32;
        const size_t at = (size_t)(first_row + r) * o.rows + first_out;
        float v = i < n_out ? tile[0][r][i] : 0;
        if (o.kind == JOB_STORE) {
            if (i < n_out) o.out[at + i] = o.cap > 0 ? o.cap * tanhf(v / o.cap) : v;
            continue;
        }
        if (o.kind == JOB_GATED) v = activate(o.fn, v) * (i < n_out ? tile[1][r][i] : 0);
        else v = activate(ACT_GELU, v) * (i < n_out ? o.u[(size_t)(first_row + r) * o.u_stride + first_out + i] : 0);
        if (o.act.f && i < n_out) o.act.f[at + i] = v;
        if (o.act.q) quantise_group(v, o.act.q + at, o.act.s + at / 32);
    }
}

static void add_job(Jobs *jobs, Job o) {
    if (jobs->n == MAX_JOBS) cuda_die("product: more than %d jobs", MAX_JOBS);
    if (!is_float(o.type) && (o.cols % 32 || (size_t)o.in.q % 16))
        cuda_die("product %d x %d: int8 rows must be whole groups at multiples of 16 bytes", o.rows, o.cols);
    if (o.act.q && o.rows % 32) cuda_die("product %d x %d: an int8 result must be whole groups", o.rows, o.cols);
    o.tile = o.kind == JOB_GATED || o.kind == JOB_INJECT ? 32 : PRODUCT_WARPS;
    o.blocks_x = div_up(o.rows, o.tile);
    jobs->job[jobs->n++] = o;
}

static void launch_jobs(Jobs *jobs, const char *what, int n_rows) {
    const int r = n_rows == 1 ? 1 : 8;
    int blocks = 0;
    for (int k = 0; k < jobs->n; k++) {
        Job *o = &jobs->job[k];
        o->blocks_y = div_up(o->n_rows, r);
        if (o->kind == JOB_DOWN) o->blocks_y = o->n_rows;
        if (o->kind == JOB_GATED && o->ids) o->blocks_y = o->n_rows * o->n_used;
        blocks += o->blocks_x * o->blocks_y;
    }
    if (r == 1) product_kernel<1><<<blocks, 256, 0, cuda.stream>>>(*jobs);
    else product_kernel<8><<<blocks, 256, 0, cuda.stream>>>(*jobs);
    CHECK_LAUNCH("%s n_rows=%d rows=%d cols=%d", what, n_rows, jobs->job[0].rows, jobs->job[0].cols);
}

static Job job_of(const Tensor *w, Prepared in, int n_rows) {
    Job o = { };
    o.type = w->type;
    o.w = planes_of(w);
    o.rows_e = o.rows = w->rows;
    o.cols = w->cols;
    o.n_rows = n_rows;
    o.in = in;
    o.factor = w->scale;
    return o;
}

// The input of a product with matrices a and b (b may be NULL), ready in the forms that they read.
static Prepared prepare(const In *in, const Tensor *a, const Tensor *b, int n_rows) {
    if (in->act.f || in->act.q) return (Prepared){ in->act.f, in->act.q, in->act.s, NULL };
    const bool f = is_float(a->type) || (b && is_float(b->type)), q = !is_float(a->type) || (b && !is_float(b->type));
    const Prepared y = prepared_at(0, a->cols, f, q, false);
    launch_prepare(in, NULL, y, (Prepared){ 0 }, n_rows, a->cols);
    return y;
}

// ==== [6] Products of a prompt: cuBLAS ===============================================================================
// More than STEP_ROWS rows: the matrix goes to f16 piece by piece, each piece as large as the panel, and cuBLAS multiplies it
// with the rows in f16, sums in f32. The pieces of gate and up meet in scratch, where the activation takes them.

// dequantise: n rows of a matrix from row `first` on, to f16.
//   launch    grid (ceil(cols / 32 / 128), n), block 128: a thread takes a group
//   traffic   reads the weights once, writes 2 bytes a value
__global__ void dequantise_kernel(DType t, Planes w, size_t first, int cols, __half *out) {
    const int g = blockIdx.x * blockDim.x + threadIdx.x;
    if (g * 32 >= cols) return;
    float v[32];
    const int n = min(32, cols - g * 32);
    values_at(t, w, (first + blockIdx.y) * cols + g * 32, n, v);
    for (int i = 0; i < n; i++) out[(size_t)blockIdx.y * cols + g * 32 + i] = __float2half_rn(v[i]);
}

// out[r][i] = factor * (w[first + i] . y[r]) for n features and all rows; out has row stride `stride` floats.
static void multiply_panel(const Tensor *w, size_t first, int n, const __half *y, int n_rows, float *out, int stride) {
    const int cols = w->cols;
    dequantise_kernel<<<dim3(div_up(div_up(cols, 32), 128), n), 128, 0, cuda.stream>>>(w->type, planes_of(w), first, cols, cuda.panel);
    CHECK_LAUNCH("dequantise rows=%d cols=%d", n, cols);
    const float back = 1 / PROMPT_SCALE, zero = 0;
    CHECK_BLAS(cublasGemmEx(cuda.blas, CUBLAS_OP_T, CUBLAS_OP_N, n, n_rows, cols, &back, cuda.panel, CUDA_R_16F, cols, y,
                            CUDA_R_16F, cols, &zero, out, CUDA_R_32F, stride, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT), "gemm");
}

// out *= *factor. launch: grid ceil(n / 256), block 256.
__global__ void scale_kernel(float *out, const float *factor, size_t n) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] *= *factor;
}

static int panel_rows(const Tensor *w) { return (int)(PANEL_BYTES / sizeof(__half) / w->cols); }

static void multiply_prompt(const Tensor *w, const __half *y, int n_rows, float *out) {
    const int step = panel_rows(w);
    for (int i = 0; i < w->rows; i += step) multiply_panel(w, i, min_int(step, w->rows - i), y, n_rows, out + i, w->rows);
    if (!w->scale) return;
    const size_t n = (size_t)n_rows * w->rows;
    scale_kernel<<<(unsigned)((n + 255) / 256), 256, 0, cuda.stream>>>(out, w->scale, n);
    CHECK_LAUNCH("scale n_rows=%d rows=%d", n_rows, w->rows);
}

// gated: Act columns first .. first + n of act(gate) * up. launch: grid (n_rows, n / 32), block 32: a warp takes a group.
__global__ void gated_kernel(const float *gate, const float *up, int stride, const float *gate_factor, const float *up_factor,
                             ActFn fn, Act out, int cols, int first, int n) {
    const int i = blockIdx.y * 32 + threadIdx.x;
    const size_t from = (size_t)blockIdx.x * stride + i, at = (size_t)blockIdx.x * cols + first + i;
    float v = 0;
    if (i < n) v = activate(fn, gate[from] * (gate_factor ? *gate_factor : 1)) * (up[from] * (up_factor ? *up_factor : 1));
    if (out.f && i < n) out.f[at] = v;
    if (out.q) quantise_group(v, out.q + at - threadIdx.x, out.s + at / 32);
}

enum { PANEL_COLS = 2048 };   // features of gate and of up that meet at a time

static const __half *prompt_input(const In *in, int n_rows, int cols) {
    if (in->act.f || in->act.q) {
        act_to_half_kernel<<<dim3(n_rows, div_up(cols, 256)), 256, 0, cuda.stream>>>(in->act, cuda.y16, cols);
        CHECK_LAUNCH("act_to_half n_rows=%d cols=%d", n_rows, cols);
    } else {
        launch_prepare(in, NULL, (Prepared){ NULL, NULL, NULL, cuda.y16 }, (Prepared){ 0 }, n_rows, cols);
    }
    return cuda.y16;
}

// ---- the operations made of products ----

static void cuda_matmul(const Matmul *o) {
    if (o->n_rows > STEP_ROWS) {
        const __half *y = prompt_input(&o->in, o->n_rows, o->w[0]->cols);
        for (int k = 0; k < o->n; k++) multiply_prompt(o->w[k], y, o->n_rows, o->out[k]);
        return;
    }
    bool f = false, q = false;
    for (int k = 0; k < o->n; k++) *(is_float(o->w[k]->type) ? &f : &q) = true;
    Prepared y = { o->in.act.f, o->in.act.q, o->in.act.s, NULL };
    if (!y.f && !y.q) {
        y = prepared_at(0, o->w[0]->cols, f, q, false);
        launch_prepare(&o->in, NULL, y, (Prepared){ 0 }, o->n_rows, o->w[0]->cols);
    }
    Jobs jobs = { };
    for (int k = 0; k < o->n; k++) {
        Job job = job_of(o->w[k], y, o->n_rows);
        job.out = o->out[k];
        add_job(&jobs, job);
    }
    launch_jobs(&jobs, "matmul", o->n_rows);
}

// top_experts: the n_used largest of each row of logits, the lower expert first on ties, with their softmax weights.
//   launch    grid n_rows, block 32: every lane looks at n / 32 experts, n_used rounds of a warp-wide maximum
//   see       cpu_route
__global__ void top_experts_kernel(const float *logits, int n, int n_used, const float *expert_scale, int32_t *ids, float *weights) {
    extern __shared__ float z[];
    const int lane = threadIdx.x;
    const float *row = logits + (size_t)blockIdx.x * n;
    for (int i = lane; i < n; i += 32) z[i] = row[i];
    __syncwarp();
    float first = 0, sum = 0;
    for (int j = 0; j < n_used; j++) {
        int best = -1;
        for (int i = lane; i < n; i += 32)
            if (z[i] == z[i] && (best < 0 || z[i] > z[best])) best = i;                // a taken one is NaN
        float top = best < 0 ? -INFINITY : z[best];
        for (int h = 16; h > 0; h /= 2) {
            const float other = __shfl_xor_sync(~0u, top, h);
            const int id = __shfl_xor_sync(~0u, best, h);
            if (id >= 0 && (best < 0 || other > top || (other == top && id < best))) top = other, best = id;
        }
        if (best < 0) best = 0, top = row[0];          // nothing but NaN: any expert, and the NaN in its weight
        if (j == 0) first = top;
        const float w = expf(top - first);
        sum += w;
        if (lane == 0) {
            ids[(size_t)blockIdx.x * n_used + j] = best;
            weights[(size_t)blockIdx.x * n_used + j] = w;
            z[best] = __uint_as_float(0x7fc00000u);
        }
        __syncwarp();
    }
    for (int j = lane; j < n_used; j += 32) {
        float *w = weights + (size_t)blockIdx.x * n_used + j;
        *w = *w / sum * (expert_scale ? expert_scale[ids[(size_t)blockIdx.x * n_used + j]] : 1);
    }
}

static Job route_job(const Route *o, Prepared y) {
    Job job = job_of(o->w, y, o->n_rows);
    job.out = o->logits;
    return job;
}

static void launch_top_experts(const Route *o) {
    top_experts_kernel<<<o->n_rows, 32, o->w->rows * sizeof(float), cuda.stream>>>(o->logits, o->w->rows, o->n_used, o->expert_scale,
                                                                                   o->ids, o->weights);
    CHECK_LAUNCH("route n_rows=%d n_experts=%d", o->n_rows, o->w->rows);
}

static void cuda_route(const Route *o) {
    Jobs jobs = { };
    add_job(&jobs, route_job(o, prepare(&o->in, o->w, NULL, o->n_rows)));
    launch_jobs(&jobs, "route", o->n_rows);
    launch_top_experts(o);
}

static void cuda_gate_up(const GateUp *o) {
    const int rows = o->gate->rows, cols = o->gate->cols;
    if (o->n_rows > STEP_ROWS) {
        const __half *y = prompt_input(&o->in, o->n_rows, cols);
        float *gate = cuda.wide, *up = cuda.wide + (size_t)cuda.lim.max_rows * PANEL_COLS;
        const int step = min_int(PANEL_COLS, panel_rows(o->gate));
        for (int i = 0; i < rows; i += step) {
            const int n = min_int(step, rows - i);
            multiply_panel(o->gate, i, n, y, o->n_rows, gate, n);
            multiply_panel(o->up, i, n, y, o->n_rows, up, n);
            gated_kernel<<<dim3(o->n_rows, div_up(n, 32)), 32, 0, cuda.stream>>>(gate, up, n, o->gate->scale, o->up->scale, o->fn,
                                                                                 o->out, rows, i, n);
            CHECK_LAUNCH("gated n_rows=%d n=%d", o->n_rows, n);
        }
        if (o->route) cuda_route(o->route);
        return;
    }
    const Route *route = o->route;
    Prepared y = { o->in.act.f, o->in.act.q, o->in.act.s, NULL }, y_route = { };
    if (route) {
        const bool f = is_float(route->w->type);
        y_route = prepared_at(1, cols, f, !f, false);
    }
    if (!y.f && !y.q) {
        const bool f = is_float(o->gate->type) || is_float(o->up->type), q = !is_float(o->gate->type) || !is_float(o->up->type);
        y = prepared_at(0, cols, f, q, false);
        launch_prepare(&o->in, route ? &route->in : NULL, y, y_route, o->n_rows, cols);
    } else if (route) {
        launch_prepare(&route->in, NULL, y_route, (Prepared){ 0 }, o->n_rows, cols);
    }
    Jobs jobs = { };
    Job job = job_of(o->gate, y, o->n_rows);
    job.kind = JOB_GATED;
    job.up_type = o->up->type;
    job.up = planes_of(o->up);
    job.up_factor = o->up->scale;
    job.fn = o->fn;
    job.act = o->out;
    add_job(&jobs, job);
    if (route) add_job(&jobs, route_job(route, y_route));
    launch_jobs(&jobs, "gate_up", o->n_rows);
    if (route) launch_top_experts(route);
}

static void cuda_expert_gate_up(const ExpertGateUp *o) {
    const bool fused = !o->up;
    const bool with = o->beside && o->beside->n_rows <= STEP_ROWS && (o->beside->in.act.f || o->beside->in.act.q);
    const Prepared y = prepare(&o->in, o->gate, o->up, o->n_rows);
    Jobs jobs = { };
    Job job = job_of(o->gate, y, o->n_rows);
    job.kind = JOB_GATED;
    job.rows = fused ? o->gate->rows / 2 : o->gate->rows;
    job.up_first = fused ? job.rows : 0;
    job.up_type = fused ? job.type : o->up->type;
    job.up = fused ? job.w : planes_of(o->up);
    job.up_factor = fused ? o->gate->scale : o->up->scale;
    job.fn = o->fn;
    job.ids = o->ids;
    job.n_used = o->n_used;
    job.act = o->out;
    add_job(&jobs, job);
    if (with)
        for (int k = 0; k < o->beside->n; k++) {
            const Act a = o->beside->in.act;
            Job down = job_of(o->beside->w[k], (Prepared){ a.f, a.q, a.s, NULL }, o->beside->n_rows);
            down.out = o->beside->out[k];
            add_job(&jobs, down);
        }
    launch_jobs(&jobs, "expert_gate_up", o->n_rows);
    if (o->beside && !with) cuda_matmul(o->beside);
}

static void cuda_expert_down(const ExpertDown *o) {
    Jobs jobs = { };
    Job job = job_of(o->down, (Prepared){ o->in.f, o->in.q, o->in.s, NULL }, o->n_rows);
    job.kind = JOB_DOWN;
    job.ids = o->ids;
    job.weights = o->weights;
    job.n_used = o->n_used;
    job.out = o->out;
    add_job(&jobs, job);
    launch_jobs(&jobs, "expert_down", o->n_rows);
}

static void cuda_ple_inject(const PleInject *o) {
    Jobs jobs = { };
    Job job = job_of(o->w, prepare(&o->in, o->w, NULL, o->n_rows), o->n_rows);
    job.kind = JOB_INJECT;
    job.u = o->u;
    job.u_stride = o->u_stride;
    job.act = o->out;
    add_job(&jobs, job);
    launch_jobs(&jobs, "ple_inject", o->n_rows);
}

// ==== [7] Cache: store, commit, copy =================================================================================
// Rows are written once, in the type of the cache, and read where they lie.

static void check_cache(const Cache *c, const char *what) {
    if (c->k.type > KV_BF16 || c->v.type > KV_BF16 || c->hadamard || c->tail_slots)
        cuda_die("%s: cache of types %d and %d is not supported", what, (int)c->k.type, (int)c->v.type);
}

// Row `slot` of one head; floats of the plane's type follow.
__device__ static inline char *kv_row(const Cache &c, const KvPlane &p, int seq, int head, int slot) {
    return (char *)p.data + (((size_t)seq * c.n_kv_heads + head) * c.slots + slot) * kv_row_bytes(p.type, p.dim);
}

__device__ static inline void kv_write(const KvPlane &p, char *row, int i, float v) {
    if (p.type == KV_F32) ((float *)row)[i] = v;
    else if (p.type == KV_F16) ((__half *)row)[i] = __float2half_rn(v);
    else ((__nv_bfloat16 *)row)[i] = __float2bfloat16_rn(v);
}

// Values i and i + 1 of a row; i is even.
__device__ static inline float2 kv_read2(const KvPlane &p, const char *row, int i) {
    if (p.type == KV_F32) return *(const float2 *)((const float *)row + i);
    if (p.type == KV_F16) return __half22float2(*(const __half2 *)((const __half *)row + i));
    return __bfloat1622float2(*(const __nv_bfloat162 *)((const __nv_bfloat16 *)row + i));
}

// Where value i of a head goes in the tied order (gemma4.h, Cache).
__device__ static inline int tied_place(int i, int head_dim, int n_rot) {
    const int half = head_dim / 2, j = i % half, second = i / half;
    return j < n_rot ? second * n_rot + j : 2 * n_rot + second * (half - n_rot) + j - n_rot;
}

// qkv_store: head norms, rope, order of the cache, write. One block per head of q, then one per head of K and V.
//   shapes    as QkvStore; head_dim <= 512
//   launch    grid (n_rows, (q ? n_heads : 0) + (k ? n_kv_heads : 0)), block 128
//   traffic   reads and writes q, reads k and v, writes a row of each plane
//   numerics  f32; angles are reduced to a turn in f64, sine and cosine are f32
//   see       cpu_qkv_store
__global__ void qkv_store_kernel(QkvStore o, Batch b, Cache c, Cache dst, bool staged) {
    __shared__ float x[512], v[512];
    const int hd = c.head_dim, half = hd / 2, r = blockIdx.x, n_q = o.q ? o.n_heads : 0;
    const Row row = b.rows[r];
    const Segment seg = b.segs[row.seg];
    const int len = b.len[seg.seq], pos = len + row.depth;
    const bool is_q = (int)blockIdx.y < n_q;
    const int h = is_q ? blockIdx.y : blockIdx.y - n_q, n_h = is_q ? o.n_heads : c.n_kv_heads;
    const size_t at = ((size_t)r * n_h + h) * hd;
    const float *from = is_q ? o.q : o.k, *w = is_q ? o.w_q : o.w_k;
    float ss = 0, ss_v = 0;
    for (int i = threadIdx.x; i < hd; i += blockDim.x) {
        x[i] = from[at + i];
        ss += x[i] * x[i];
        if (is_q) continue;
        v[i] = o.v[at + i];
        ss_v += v[i] * v[i];
    }
    const float scale = 1.0f / sqrtf(block_sum(ss) / hd + o.eps);
    const float scale_v = is_q || !o.v_norm ? 1 : 1.0f / sqrtf(block_sum(ss_v) / hd + o.eps);
    float *dump = is_q ? o.dump_q : o.dump_k, *dump_pos = is_q ? o.dump_q_pos : o.dump_k_pos;
    for (int i = threadIdx.x; i < hd; i += blockDim.x) {
        x[i] = w[i] * (x[i] * scale);
        if (dump) dump[at + i] = x[i];
        if (is_q) continue;
        v[i] *= scale_v;
        if (o.dump_v) o.dump_v[at + i] = v[i];
    }
    __syncthreads();                                   // a thread turns pairs that others have normed
    for (int i = threadIdx.x; i < o.rope.n_pairs; i += blockDim.x) {
        double turns = pos * o.rope.inv_freq[i] * 0.15915494309189535;
        float sine, cosine;
        sincospif(2 * (float)(turns - rint(turns)), &sine, &cosine);
        const float p = x[i], q = x[i + half];
        x[i] = p * cosine - q * sine;
        x[i + half] = p * sine + q * cosine;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < hd; i += blockDim.x)
        if (dump_pos) dump_pos[at + i] = x[i];
    const int slot = staged ? seg.first + row.index : (len + row.index) % c.slots, seq = staged ? 0 : seg.seq;
    for (int i = threadIdx.x; i < hd; i += blockDim.x) {
        const int to = c.n_rot ? tied_place(i, hd, c.n_rot) : i;
        if (is_q) {                                    // the unrotated part of K is r * fold: fold goes into q
            o.q[at + to] = c.n_rot && i % half >= c.n_rot ? x[i] * c.fold[i] : x[i];
        } else {
            if (to < dst.k.dim) kv_write(dst.k, kv_row(dst, dst.k, seq, h, slot), to, x[i]);
            kv_write(dst.v, kv_row(dst, dst.v, seq, h, slot), to, v[i]);
        }
    }
}
static void cuda_qkv_store(const QkvStore *o) {
    const int heads = (o->q ? o->n_heads : 0) + (o->k ? o->cache->n_kv_heads : 0);
    check_cache(o->cache, "qkv_store");
    if (o->cache->head_dim > 512) cuda_die("qkv_store: heads of %d values are not supported", o->cache->head_dim);
    if (!heads) return;
    qkv_store_kernel<<<dim3(o->batch->n_rows, heads), 128, 0, cuda.stream>>>(*o, *o->batch, *o->cache, o->stage ? *o->stage : *o->cache,
                                                                            o->stage != NULL);
    CHECK_LAUNCH("qkv_store n_rows=%d heads=%d head_dim=%d", o->batch->n_rows, heads, o->cache->head_dim);
}

enum { CACHES_AT_ONCE = 12 }; // that travel as arguments of one launch
typedef struct { Cache c[CACHES_AT_ONCE]; } Caches;

// kv_move: rows of accepted tree paths to slots len, len + 1, ... Paths ascend and a thread stays with its word of a row, so
// nothing is overwritten unread.
//   launch    grid (n_segs, caches, kv heads), block 256: a thread takes words of 16 bits of both planes
//   see       cpu_kv_commit
__global__ void kv_move_kernel(Batch b, const __grid_constant__ Caches caches, const int32_t *n_accept, const int32_t *path) {
    const Segment seg = b.segs[blockIdx.x];
    const Cache &c = caches.c[blockIdx.y];
    if (seg.kind != SEG_TREE || (int)blockIdx.z >= c.n_kv_heads) return;
    const int len = b.len[seg.seq];
    for (int plane = 0; plane < 2; plane++) {
        const KvPlane &p = plane ? c.v : c.k;
        const int words = (int)(kv_row_bytes(p.type, p.dim) / 2);
        for (int i = threadIdx.x; i < words; i += blockDim.x)
            for (int k = 0; k < n_accept[blockIdx.x]; k++) {
                const int from = path[blockIdx.x * STEP_ROWS + k];
                ((uint16_t *)kv_row(c, p, seg.seq, blockIdx.z, (len + k) % c.slots))[i] =
                    ((const uint16_t *)kv_row(c, p, seg.seq, blockIdx.z, (len + from) % c.slots))[i];
            }
    }
}

// kv_lengths: counts and len, after everything that reads len.   launch: grid n_segs, block 32
__global__ void kv_lengths_kernel(Batch b, const int32_t *n_accept, const int32_t *path, int32_t *counts, int vocab) {
    const Segment seg = b.segs[blockIdx.x];
    const int n = n_accept[blockIdx.x];
    for (int k = threadIdx.x; counts && k < n; k += 32) {
        const int row = seg.kind == SEG_TREE ? path[blockIdx.x * STEP_ROWS + k] : k;
        const int token = b.rows[seg.first + row].token;
        atomicAdd(&counts[(size_t)seg.seq * vocab + (token < 0 || token >= vocab ? 0 : token)], 1);
    }
    if (threadIdx.x == 0) b.len[seg.seq] += n;
}
static void cuda_kv_commit(const KvCommit *o) {
    for (int i = 0; o->path && i < o->n_caches; i += CACHES_AT_ONCE) {
        Caches caches;
        const int n = min_int(CACHES_AT_ONCE, o->n_caches - i);
        int heads = 0;
        for (int k = 0; k < n; k++) {
            caches.c[k] = o->caches[i + k];
            check_cache(&caches.c[k], "kv_commit");
            heads = max_int(heads, caches.c[k].n_kv_heads);
        }
        kv_move_kernel<<<dim3(o->batch->n_segs, n, heads), 256, 0, cuda.stream>>>(*o->batch, caches, o->n_accept, o->path);
        CHECK_LAUNCH("kv_commit n_segs=%d n_caches=%d", o->batch->n_segs, o->n_caches);
    }
    kv_lengths_kernel<<<o->batch->n_segs, 32, 0, cuda.stream>>>(*o->batch, o->n_accept, o->path, o->counts, o->vocab);
    CHECK_LAUNCH("kv_commit n_segs=%d", o->batch->n_segs);
}

// kv_copy: stage -> ring, the last min(n, slots) rows of every segment.
//   launch    grid (n_rows, kv heads), block 128: one row of the step
//   see       cpu_kv_copy
__global__ void kv_copy_kernel(Batch b, Cache c, Cache stage) {
    const Row row = b.rows[blockIdx.x];
    const Segment seg = b.segs[row.seg];
    if (row.index < seg.n - c.slots) return;
    const int slot = (b.len[seg.seq] + row.index) % c.slots;
    for (int plane = 0; plane < 2; plane++) {
        const KvPlane &p = plane ? c.v : c.k, &from = plane ? stage.v : stage.k;
        const uint16_t *src = (const uint16_t *)kv_row(stage, from, 0, blockIdx.y, seg.first + row.index);
        uint16_t *dst = (uint16_t *)kv_row(c, p, seg.seq, blockIdx.y, slot);
        for (int i = threadIdx.x; i < (int)(kv_row_bytes(p.type, p.dim) / 2); i += blockDim.x) dst[i] = src[i];
    }
}
static void cuda_kv_copy(const KvCopy *o) {
    check_cache(o->cache, "kv_copy");
    kv_copy_kernel<<<dim3(o->batch->n_rows, o->cache->n_kv_heads), 128, 0, cuda.stream>>>(*o->batch, *o->cache, *o->stage);
    CHECK_LAUNCH("kv_copy n_rows=%d", o->batch->n_rows);
}

// ==== [8] Attention ==================================================================================================
// Keys are numbered as they lie in the cache, committed positions first, then the rows of the step: number j below len is
// position j, len + i is row i of the segment. They are cut into tiles of TILE_SLOTS, aligned to number 0, and dealt out to a
// number of parts that depends on the cache alone. A block takes a row, up to HEADS query heads that share a KV head, and one
// part, its tiles upwards. What the parts found is put together in their order. So a row's result depends neither on the
// other rows of the step, nor on how many of the keys before it are committed already, nor on the card.

enum { HEADS = 8, ATTEND_THREADS = 256, MAX_PARTS = 64 };

static int attend_parts(const Cache *c) {              // two tiles or more for a part
    return max_int(1, min_int(MAX_PARTS, c->slots / (2 * TILE_SLOTS)));
}

// attend: softmax(scale * q k) v over the positions of one part.
//   shapes    q (n_rows, n_heads, head_dim), cache as in gemma4.h, partial (n_rows, n_heads, parts, head_dim + 2)
//   launch    grid (n_rows, n_kv_heads * ceil(group / HEADS), parts), block 256
//   traffic   reads K and V of the positions in sight once per row and KV head (tied: V's row serves both)
//   numerics  f32 throughout; online softmax per tile
//   see       cpu_attend
__global__ void __launch_bounds__(ATTEND_THREADS) attend_kernel(Attend o, Batch b, Cache c, Cache stage, bool staged, int parts,
                                                                float *partial) {
    extern __shared__ float q[];                       // (HEADS, head_dim)
    __shared__ float p[HEADS][TILE_SLOTS];             // scores, then weights
    __shared__ float max_of[HEADS], sum_of[HEADS], shrink[HEADS];
    __shared__ int slot_of[TILE_SLOTS];                // of the keys of a tile: slot, -1: out of sight, or -2 - slot of the stage
    const int hd = c.head_dim, group = o.n_heads / c.n_kv_heads, per_kv = (group + HEADS - 1) / HEADS, r = blockIdx.x;
    const int g = blockIdx.y / per_kv, head = g * group + blockIdx.y % per_kv * HEADS;
    const int n_heads = min(HEADS, group - (int)blockIdx.y % per_kv * HEADS), part = blockIdx.z;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Row row = b.rows[r];
    const Segment seg = b.segs[row.seg];
    const int len = b.len[seg.seq], pos = len + row.depth;
    const int first = o.window ? max(0, pos - o.window + 1) : 0;       // the lowest position in sight
    for (int i = threadIdx.x; i < n_heads * hd; i += blockDim.x) q[i] = o.q[((size_t)r * o.n_heads + head) * hd + i];
    if (threadIdx.x < HEADS) max_of[threadIdx.x] = -INFINITY, sum_of[threadIdx.x] = 0;
    float acc[HEADS][2] = { };                         // values 2 * thread and 2 * thread + 1
    const int n_own = o.own == OWN_NONE ? 0 : o.own == OWN_ALL ? seg.n : row.index + 1;
    const int end = len + n_own, first_tile = min(first, len) / TILE_SLOTS;
    const int n_tiles = end > min(first, len) ? (end - 1) / TILE_SLOTS - first_tile + 1 : 0;
    // Tile t belongs to part t mod parts.
    const int skip = ((part - first_tile) % parts + parts) % parts, mine = n_tiles > skip ? (n_tiles - skip + parts - 1) / parts : 0;
    for (int t = 0; t < mine; t++) {
        __syncthreads();                               // the last tile's weights have been read
        if (threadIdx.x < TILE_SLOTS) {
            const int j = (first_tile + skip + t * parts) * TILE_SLOTS + threadIdx.x, i = j - len;
            bool seen = j < end && (i >= 0 || j >= first);
            if (seen && i >= 0 && o.own == OWN_CAUSAL) seen = seg.kind == SEG_TREE ? row.ancestors >> i & 1 : j >= first;
            const int slot = !seen ? -1 : i >= 0 && staged ? -2 - (seg.first + i) : j % c.slots;
            slot_of[threadIdx.x] = slot;
        }
        __syncthreads();
        for (int k = warp; k < TILE_SLOTS; k += ATTEND_THREADS / 32) {
            const int slot = slot_of[k];
            if (slot == -1) {
                if (lane < HEADS) p[lane][k] = -INFINITY;
                continue;
            }
            const Cache &from = slot < 0 ? stage : c;
            const int seq = slot < 0 ? 0 : seg.seq, at = slot < 0 ? -2 - slot : slot;
            const char *k_row = kv_row(from, from.k, seq, g, at), *v_row = kv_row(from, from.v, seq, g, at);
            float dot[HEADS] = { };
            for (int i = 2 * lane; i < hd; i += 64) {  // tied: the rest of K is V
                const float2 x = i < from.k.dim ? kv_read2(from.k, k_row, i) : kv_read2(from.v, v_row, i);
                for (int h = 0; h < HEADS; h++)
                    if (h < n_heads) dot[h] = __fmaf_rn(q[h * hd + i + 1], x.y, __fmaf_rn(q[h * hd + i], x.x, dot[h]));
            }
            for (int h = 0; h < n_heads; h++) {
                const float s = warp_sum(dot[h]) * o.scale;
                if (lane == 0) p[h][k] = s;
            }
        }
        __syncthreads();
        if (warp < n_heads) {                          // a warp per head; two keys a lane
            float *w = p[warp];
            const float top = fmaxf(max_of[warp], warp_max(fmaxf(w[lane], w[lane + 32])));
            const float a = top == -INFINITY ? 0 : expf(w[lane] - top), z = top == -INFINITY ? 0 : expf(w[lane + 32] - top);
            const float sum = warp_sum(a + z);
            w[lane] = a;
            w[lane + 32] = z;
            if (lane == 0) {
                shrink[warp] = top == -INFINITY ? 1 : expf(max_of[warp] - top);
                max_of[warp] = top;
                sum_of[warp] = sum_of[warp] * shrink[warp] + sum;
            }
        }
        __syncthreads();
        const int i = 2 * threadIdx.x;
        if (i >= hd) continue;
        for (int h = 0; h < HEADS; h++)
            if (h < n_heads) acc[h][0] *= shrink[h], acc[h][1] *= shrink[h];
        for (int k = 0; k < TILE_SLOTS; k++) {
            const int slot = slot_of[k];
            if (slot == -1) continue;                  // what lies there may be anything
            const float2 x = slot < 0 ? kv_read2(stage.v, kv_row(stage, stage.v, 0, g, -2 - slot), i)
                                      : kv_read2(c.v, kv_row(c, c.v, seg.seq, g, slot), i);
            for (int h = 0; h < HEADS; h++)
                if (h < n_heads) acc[h][0] = __fmaf_rn(p[h][k], x.x, acc[h][0]), acc[h][1] = __fmaf_rn(p[h][k], x.y, acc[h][1]);
        }
    }
    __syncthreads();
    for (int h = 0; h < HEADS; h++) {
        if (h >= n_heads) break;
        float *out = partial + (((size_t)r * o.n_heads + head + h) * parts + part) * (hd + 2);
        if (threadIdx.x == 0) out[hd] = max_of[h], out[hd + 1] = sum_of[h];
        if (2 * threadIdx.x < (unsigned)hd) out[2 * threadIdx.x] = acc[h][0], out[2 * threadIdx.x + 1] = acc[h][1];
    }
}

// attend_join: the parts of a query head put together in their order; back from the tied order; as Act.
//   launch    grid (n_rows, n_heads), block head_dim rounded up to a warp
//   traffic   reads partial once
__global__ void attend_join_kernel(const float *partial, int parts, int hd, int n_rot, Act out) {
    const float *from = partial + ((size_t)blockIdx.x * gridDim.y + blockIdx.y) * parts * (hd + 2);
    const int i = threadIdx.x;
    float top = -INFINITY, sum = 0, v = 0;
    for (int k = 0; k < parts; k++) top = fmaxf(top, from[k * (hd + 2) + hd]);
    for (int k = 0; k < parts && i < hd; k++) {
        const float *part = from + (size_t)k * (hd + 2);
        if (part[hd] == -INFINITY) continue;           // saw nothing
        const float w = expf(part[hd] - top);
        sum = __fmaf_rn(w, part[hd + 1], sum);
        v = __fmaf_rn(w, part[n_rot ? tied_place(i, hd, n_rot) : i], v);
    }
    v = sum == 0 ? 0 : v / sum;
    const size_t at = ((size_t)blockIdx.x * gridDim.y + blockIdx.y) * hd;
    if (out.f && i < hd) out.f[at + i] = v;
    if (out.q) quantise_group(v, out.q + at + i - i % 32, out.s + (at + i) / 32);
}

static void cuda_attend(const Attend *o) {
    const Cache *c = o->cache;
    const int hd = c->head_dim, group = o->n_heads / c->n_kv_heads, parts = attend_parts(c), n_rows = o->batch->n_rows;
    check_cache(c, "attend");
    if (hd > 2 * ATTEND_THREADS || hd % 2) cuda_die("attend: heads of %d values are not supported", hd);
    if (o->blocks) cuda_die("attend: block lists are not supported");
    if (o->out.q && hd % 32) cuda_die("attend: expected heads of whole groups for int8, got %d values", hd);
    if (o->store) cuda_qkv_store(o->store);
    // For each query head a part leaves (head_dim) values, the largest score and the sum. Many rows go through in pieces.
    const size_t row_bytes = (size_t)o->n_heads * parts * (hd + 2) * sizeof(float);
    if (row_bytes > PARTIAL_BYTES) cuda_die("attend: n_heads=%d head_dim=%d is not supported", o->n_heads, hd);
    const int step = (int)(PARTIAL_BYTES / row_bytes);
    for (int r = 0; r < n_rows; r += step) {
        const int n = min_int(step, n_rows - r);
        Batch b = *o->batch;
        Attend part = *o;
        b.rows += r;
        part.q += (size_t)r * o->n_heads * hd;
        if (part.out.f) part.out.f += (size_t)r * o->n_heads * hd;
        if (part.out.q) part.out.q += (size_t)r * o->n_heads * hd, part.out.s += (size_t)r * o->n_heads * hd / 32;
        attend_kernel<<<dim3(n, c->n_kv_heads * div_up(group, HEADS), parts), ATTEND_THREADS, HEADS * hd * sizeof(float), cuda.stream>>>(
            part, b, *c, o->stage ? *o->stage : *c, o->stage != NULL, parts, cuda.partial);
        CHECK_LAUNCH("attend n_rows=%d n_heads=%d head_dim=%d", n, o->n_heads, hd);
        attend_join_kernel<<<dim3(n, o->n_heads), round_up(hd, 32), 0, cuda.stream>>>(cuda.partial, parts, hd, c->n_rot, part.out);
        CHECK_LAUNCH("attend_join n_rows=%d n_heads=%d head_dim=%d", n, o->n_heads, hd);
    }
}

// ==== [9] Output: head, sampling =====================================================================================
// Tokens of a row are ordered by a key of 64 bits, descending logit, then ascending id: no two are equal, 0 is below all. One
// block works on a row. Up to LIST / 2 candidates are gathered in shared memory and sorted; more of them (top_k off, or a row
// full of equal logits) are found where they lie, byte by byte of the key.

enum { SAMPLE_THREADS = 1024, LIST = 2 * SAMPLE_THREADS };

typedef unsigned long long u64;

__device__ static inline u64 token_key(float z, int id) {
    unsigned bits = __float_as_uint(z + 0.0f);         // -0 becomes 0: the two are equal
    bits = bits >> 31 ? ~bits : bits | 0x80000000u;
    return (u64)bits << 32 | (unsigned)~id;
}
__device__ static inline int key_id(u64 key) { return (int)~(unsigned)key; }
__device__ static inline float key_logit(u64 key) {
    const unsigned bits = (unsigned)(key >> 32);
    return __uint_as_float(bits >> 31 ? bits & 0x7fffffffu : ~bits);
}

typedef struct {              // the logits of one row as steps 1 to 3 of Sample leave them
    const float *logits, *bias;
    const uint32_t *mask;
    const int32_t *counts, *seen;              // committed, of the step; NULL: no penalties
    SampleParams p;
    int vocab;
    bool nan_is_low;          // head: a NaN counts as -Inf, nothing is out
} TokenRow;

// Key of token i, 0 if it is out. *nan is set for a NaN.
__device__ static inline u64 key_of(const TokenRow &o, int i, bool *nan) {
    float z = o.logits[i];
    if (o.nan_is_low) return token_key(z != z ? -INFINITY : z, i);
    if (o.bias) z += o.bias[i];
    const int c = o.counts ? o.counts[i] + o.seen[i] : 0;
    if (c > 0) z = sample_penalised(z, c, &o.p);
    if (z != z) *nan = true;
    const bool allowed = !o.mask || o.mask[i / 32] >> (i % 32) & 1;
    return allowed && z > -INFINITY ? token_key(z, i) : 0;
}

// Descending, n a power of two. All threads; whole behind it.
__device__ static void sort_keys(u64 *key, int n) {
    for (int size = 2; size <= n; size *= 2)
        for (int step = size / 2; step > 0; step /= 2) {
            __syncthreads();
            for (int i = threadIdx.x; i < n; i += blockDim.x) {
                const int j = i ^ step;
                if (j <= i) continue;
                const bool down = (i & size) == 0;
                const u64 a = key[i], b = key[j];
                if ((a < b) == down) key[i] = b, key[j] = a;
            }
        }
    __syncthreads();
}

// The best k <= SAMPLE_THREADS keys of a row, sorted, in list (LIST). Returns how many there are, or -1 when too many are as
// good as a bound that is quickly found. *top: the best of all; *nan: the row holds a NaN.
//   Every thread keeps the best of its tokens; the k-th best of these is a bound that at least k tokens reach.
__device__ static int gather_best(const TokenRow &o, int k, u64 *list, u64 *top, bool *nan) {
    __shared__ int n_found;
    u64 best = 0;
    bool bad = false;
    for (int i = threadIdx.x; i < o.vocab; i += blockDim.x) best = max(best, key_of(o, i, &bad));
    *nan = __syncthreads_or(bad);
    list[threadIdx.x] = best;
    sort_keys(list, SAMPLE_THREADS);
    *top = list[0];
    if (k > SAMPLE_THREADS) return -1;
    const u64 bound = max(list[k - 1], (u64)1);
    __syncthreads();
    if (threadIdx.x == 0) n_found = 0;
    for (int i = threadIdx.x; i < LIST; i += blockDim.x) list[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < o.vocab; i += blockDim.x) {
        const u64 key = key_of(o, i, &bad);
        if (key < bound) continue;
        const int at = atomicAdd(&n_found, 1);
        if (at < LIST) list[at] = key;
    }
    __syncthreads();
    if (n_found > LIST) return -1;
    sort_keys(list, LIST);
    return min(k, n_found);
}

typedef struct { float largest, scale; u64 least; } Weighing;          // scale 0: every token weighs 1

__device__ static inline u64 weight_of(const Weighing &w, u64 key) {
    if (w.scale == 0) return 1;
    const u64 x = sample_weight(key_logit(key), w.largest, w.scale);
    return x < w.least ? 0 : x;
}

// Of the tokens with keys from `low` up, best first: the key of the first that together with those before it weighs more than
// target; 0: all of them weigh no more. total: what they weigh, when not NULL.
__device__ static u64 first_above(const TokenRow &o, u64 low, const Weighing &w, u64 target, u64 *hist, u64 *total) {
    __shared__ u64 prefix, rest;
    __shared__ bool found;
    if (threadIdx.x == 0) prefix = 0, rest = target;
    for (int shift = 56; shift >= 0; shift -= 8) {
        __syncthreads();
        for (int i = threadIdx.x; i < 256; i += blockDim.x) hist[i] = 0;
        __syncthreads();
        bool bad = false;
        for (int i = threadIdx.x; i < o.vocab; i += blockDim.x) {
            const u64 key = key_of(o, i, &bad);
            if (key < low || (shift < 56 && key >> (shift + 8) != prefix >> (shift + 8))) continue;
            atomicAdd(&hist[key >> shift & 255], weight_of(w, key));
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            u64 sum = 0;
            for (int i = 0; i < 256; i++) sum += hist[i];
            if (total && shift == 56) *total = sum;
            found = sum > rest;
            for (int i = 255; found && i >= 0; i--) {
                if (hist[i] > rest) {
                    prefix |= (u64)i << shift;
                    break;
                }
                rest -= hist[i];
            }
        }
        __syncthreads();
        if (!found) return 0;
    }
    return prefix;
}

// sample: one token per row, steps 1 to 8 of Sample in gemma4.h.
//   shapes    logits (n_rows, vocab)
//   launch    grid n_rows, block 1024, dynamic shared memory 8 * LIST
//   traffic   reads a row of logits twice (top_k up to 1024), else some twenty times
//   numerics  whole numbers behind step 3: equal to the CPU's choice whenever the logits are equal
//   see       cpu_sample
__global__ void __launch_bounds__(SAMPLE_THREADS) sample_kernel(Sample o, Batch b, const int32_t *seen) {
    extern __shared__ u64 list[];
    __shared__ int32_t choice;
    __shared__ u64 sum;
    const int r = blockIdx.x;
    const Row row = b.rows[r];
    const int seq = b.segs[row.seg].seq, pos = b.len[seq] + row.depth;
    const size_t words = ((size_t)o.vocab + 31) / 32;
    const TokenRow t = { o.logits + (size_t)r * o.vocab, o.bias ? o.bias + (size_t)seq * o.vocab : NULL,
                         o.mask ? o.mask + r * words : NULL, o.counts ? o.counts + (size_t)seq * o.vocab : NULL,
                         seen ? seen + (size_t)r * o.vocab : NULL, o.params[seq], o.vocab, false };
    const SampleParams p = t.p;
    const int k = p.temperature <= 0 ? 1 : p.top_k > 0 ? min(p.top_k, o.vocab) : o.vocab;
    u64 top;
    bool nan;
    const int n = gather_best(t, k, list, &top, &nan);
    if (threadIdx.x == 0) choice = nan || !top ? -1 : key_id(top);
    __syncthreads();
    if (choice >= 0 && p.temperature > 0) {
        Weighing w = { key_logit(top), 1.44269504f / p.temperature, 0 };
        const u64 least = sample_share(SAMPLE_ONE, p.min_p);
        const float u = random_unit(p.seed, pos);
        if (n >= 0) {
            if (threadIdx.x == 0) {                    // a few dozen tokens, in order
                u64 total = 0, before = 0, kept = 0;
                for (int i = 0; i < n; i++) total += weight_of(w, list[i]);
                const u64 part = p.top_p < 1 ? sample_share(total, p.top_p) : total;
                int n_kept = 0;
                for (; n_kept < n; n_kept++) {
                    const u64 x = weight_of(w, list[n_kept]);
                    if (n_kept && p.top_p < 1 && before >= part) break;
                    before += x;
                    kept += x < least ? 0 : x;
                }
                const u64 target = sample_share(kept, u);
                before = 0;
                for (int i = 0; i < n_kept; i++) {
                    const u64 x = weight_of(w, list[i]);
                    before += x < least ? 0 : x;
                    if (before <= target) continue;
                    choice = key_id(list[i]);
                    break;
                }
            }
        } else {
            u64 low = 1;
            const Weighing count = { 0, 0, 0 };
            if (k < o.vocab) {
                const u64 last = first_above(t, low, count, k - 1, list, NULL);
                low = last ? last : low;
            }
            if (p.top_p < 1) {
                first_above(t, low, w, ~(u64)0, list, &sum);
                __syncthreads();
                const u64 part = sample_share(sum, p.top_p);
                const u64 last = first_above(t, low, w, part ? part - 1 : 0, list, NULL);
                low = last ? last : low;
            }
            w.least = least;
            first_above(t, low, w, ~(u64)0, list, &sum);
            __syncthreads();
            const u64 key = first_above(t, low, w, sample_share(sum, u), list, NULL);
            if (threadIdx.x == 0 && key) choice = key_id(key);
        }
        __syncthreads();
    }
    if (threadIdx.x != 0) return;
    o.out[r] = choice;
    if (o.feed) o.feed[r].token = choice;
}

// seen: occurrences of tokens among a row of the step and its ancestors; seen (n_rows, vocab) is zero before.
//   launch    grid n_rows, block 128
__global__ void seen_kernel(Batch b, const Row *step_rows, int32_t *seen, int vocab) {
    const Row row = b.rows[blockIdx.x];
    const Segment seg = b.segs[row.seg];
    for (int j = threadIdx.x; j <= row.index; j += blockDim.x) {
        if (seg.kind != SEG_CHAIN && !(row.ancestors >> j & 1)) continue;
        const int token = step_rows[seg.first + j].token;
        atomicAdd(&seen[(size_t)blockIdx.x * vocab + (token < 0 || token >= vocab ? 0 : token)], 1);
    }
}

static void cuda_sample(const Sample *o) {
    const int n_rows = o->batch->n_rows;
    int32_t *seen = o->counts ? (int32_t *)cuda.panel : NULL;
    if (seen) {
        const size_t bytes = (size_t)n_rows * o->vocab * sizeof *seen;
        if (bytes > PANEL_BYTES) cuda_die("sample: penalties for %d rows of %d tokens are not supported", n_rows, o->vocab);
        CHECK_CUDA(cudaMemsetAsync(seen, 0, bytes, cuda.stream), "sample n_rows=%d", n_rows);
        seen_kernel<<<n_rows, 128, 0, cuda.stream>>>(*o->batch, o->step_rows, seen, o->vocab);
        CHECK_LAUNCH("seen n_rows=%d", n_rows);
    }
    sample_kernel<<<n_rows, SAMPLE_THREADS, LIST * sizeof(u64), cuda.stream>>>(*o, *o->batch, seen);
    CHECK_LAUNCH("sample n_rows=%d vocab=%d", n_rows, o->vocab);
}

// top_logits: the top_k best tokens of each row in order.
//   launch    grid n_rows, block 1024, dynamic shared memory 8 * LIST
//   see       cpu_head
__global__ void __launch_bounds__(SAMPLE_THREADS) top_logits_kernel(const float *logits, int vocab, int k, int32_t *ids, float *top_logits) {
    extern __shared__ u64 list[];
    __shared__ u64 hist[256];
    __shared__ int n_found;
    const TokenRow t = { .logits = logits + (size_t)blockIdx.x * vocab, .vocab = vocab, .nan_is_low = true };
    u64 top;
    bool nan;
    const int n = gather_best(t, k, list, &top, &nan);
    if (n < 0) {
        const Weighing count = { 0, 0, 0 };
        const u64 last = first_above(t, 1, count, k - 1, hist, NULL);
        for (int i = threadIdx.x; i < LIST; i += blockDim.x) list[i] = 0;
        if (threadIdx.x == 0) n_found = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < vocab; i += blockDim.x) {
            const u64 key = key_of(t, i, &nan);
            if (key >= last) list[atomicAdd(&n_found, 1)] = key;
        }
        sort_keys(list, LIST);
    }
    for (int i = threadIdx.x; i < k; i += blockDim.x) {
        ids[(size_t)blockIdx.x * k + i] = key_id(list[i]);
        top_logits[(size_t)blockIdx.x * k + i] = t.logits[key_id(list[i])];
    }
}

// logsumexp: of each row; with ids the log-probability of one token instead.
//   launch    grid n_rows, block 1024
//   numerics  exp in f32 of the distance to the largest, sum in f64
//   see       logsumexp(), cpu_logprob
__global__ void __launch_bounds__(SAMPLE_THREADS) logsumexp_kernel(const float *logits, int vocab, const int32_t *ids, float *out) {
    __shared__ float tops[32];
    __shared__ double sums[32];
    const float *row = logits + (size_t)blockIdx.x * vocab;
    float top = -INFINITY;
    double sum = 0;
    for (int i = threadIdx.x; i < vocab; i += blockDim.x) top = fmaxf(top, row[i]);
    top = warp_max(top);
    if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = top;
    __syncthreads();
    top = warp_max(tops[threadIdx.x % 32]);
    if (isinf(top)) top = 0;                           // all -Inf, or one +Inf: the sum says so
    for (int i = threadIdx.x; i < vocab; i += blockDim.x) sum += (double)expf(row[i] - top);
    for (int h = 16; h > 0; h /= 2) sum += __shfl_xor_sync(~0u, sum, h);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return;
    sum = 0;
    for (int i = 0; i < 32; i++) sum += sums[i];
    const double all = top + log(sum);
    const int id = ids ? ids[blockIdx.x] : 0;
    out[blockIdx.x] = !ids ? (float)all : id < 0 || id >= vocab ? NAN : (float)(row[id] - all);
}
static void cuda_logprob(const Logprob *o) {
    logsumexp_kernel<<<o->n_rows, SAMPLE_THREADS, 0, cuda.stream>>>(o->logits, o->vocab, o->ids, o->out);
    CHECK_LAUNCH("logprob n_rows=%d vocab=%d", o->n_rows, o->vocab);
}

// head: the soft-capped products of STEP_ROWS rows at a time; logits that nobody wants whole pass through cuda.panel.
static void cuda_head(const Head *o) {
    const int vocab = o->w->rows, cols = o->w->cols;
    const bool f = is_float(o->w->type);
    const int at_once = o->logits ? STEP_ROWS : min_int(STEP_ROWS, (int)(PANEL_BYTES / sizeof(float) / vocab));
    if (!at_once) cuda_die("head: a vocabulary of %d is not supported", vocab);
    if (o->top_k > LIST) cuda_die("head: expected top_k up to %d, got %d", LIST, o->top_k);
    for (int r = 0; r < o->n_rows; r += at_once) {
        const int n = min_int(at_once, o->n_rows - r);
        const size_t at = (size_t)r * cols;
        float *logits = o->logits ? o->logits + (size_t)r * vocab : (float *)cuda.panel;
        In in = o->in;
        if (in.x) in.x += at;
        for (int k = 0; k < 2; k++)
            if (in.delta[k]) in.delta[k] += at;
        if (in.x_out) in.x_out += at;
        Prepared y = prepared_at(0, cols, f, !f, false);
        if (o->hidden) y.f = o->hidden + at;
        launch_prepare(&in, NULL, y, (Prepared){ 0 }, n, cols);
        Jobs jobs = { };
        Job job = job_of(o->w, y, n);
        job.out = logits;
        job.cap = o->cap;
        add_job(&jobs, job);
        launch_jobs(&jobs, "head", n);
        if (o->top_k) {
            const size_t top = (size_t)r * o->top_k;
            top_logits_kernel<<<n, SAMPLE_THREADS, LIST * sizeof(u64), cuda.stream>>>(logits, vocab, o->top_k, o->top_ids + top,
                                                                                      o->top_logits + top);
            CHECK_LAUNCH("top_logits n_rows=%d vocab=%d", n, vocab);
        }
        if (o->logsumexp) {
            logsumexp_kernel<<<n, SAMPLE_THREADS, 0, cuda.stream>>>(logits, vocab, NULL, o->logsumexp + r);
            CHECK_LAUNCH("logsumexp n_rows=%d vocab=%d", n, vocab);
        }
    }
}

// ==== [10] Memory, copies, recorded steps, the table =================================================================
// Small copies go through a ring of pinned memory, so that neither direction makes the host wait: what goes in is copied to
// the ring first, what comes out stays there until wait(). A step is recorded as a graph the first time its key is seen;
// prompt steps are not, since their sizes seldom repeat.

static size_t scratch_layout(const Limits *lim, char *base) {
    const size_t all = (size_t)lim->max_rows * lim->max_cols;
    size_t at = 0;
#define PLACE(field, type, n) do { cuda.field = (type *)(base + at); at += round_up((n) * sizeof(type), 256); } while (0)
    PLACE(y, float, 2 * all);
    PLACE(yq, int8_t, 2 * all);
    PLACE(ys, float, 2 * (all / 32 + lim->max_rows));
    PLACE(y16, __half, lim->max_rows > STEP_ROWS ? all : 0);
    PLACE(panel, __half, PANEL_BYTES / sizeof(__half));
    PLACE(wide, float, lim->max_rows > STEP_ROWS ? (size_t)2 * lim->max_rows * PANEL_COLS : 0);
    PLACE(partial, float, PARTIAL_BYTES / sizeof(float));
    PLACE(blas_work, char, BLAS_BYTES);
#undef PLACE
    return at;
}

static Limits joined_limits(const Limits *lim) {
    Limits l = *lim;
    l.max_rows = max_int(max_int(l.max_rows, cuda.lim.max_rows), 1);
    l.max_cols = (int)round_up(max_int(l.max_cols, cuda.lim.max_cols), 32);
    l.max_experts = max_int(l.max_experts, cuda.lim.max_experts);
    l.vocab = max_int(l.vocab, cuda.lim.vocab);
    return l;
}

static size_t cuda_scratch_bytes(const Limits *lim) {
    const Limits l = joined_limits(lim);
    char *kept = cuda.scratch;
    const size_t n = scratch_layout(&l, NULL);
    if (kept) scratch_layout(&cuda.lim, kept);         // the layout above was only counted
    return n;
}

static void start_device(void) {
    if (cuda.stream) return;
    int optin = 0;
    CHECK_CUDA(cudaStreamCreateWithFlags(&cuda.stream, cudaStreamNonBlocking), "stream");
    CHECK_CUDA(cudaMallocHost((void **)&cuda.ring, RING_BYTES), "pinned memory of %d bytes", RING_BYTES);
    CHECK_CUDA(cudaDeviceGetAttribute(&cuda.n_sm, cudaDevAttrMultiProcessorCount, 0), "device");
    CHECK_CUDA(cudaDeviceGetAttribute(&optin, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0), "device");
    CHECK_CUDA(cudaFuncSetAttribute(prepare_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, min_int(optin - 1024, 192 << 10)),
               "shared memory of prepare");
    CHECK_BLAS(cublasCreate(&cuda.blas), "cublasCreate");
    CHECK_BLAS(cublasSetStream(cuda.blas, cuda.stream), "cublasSetStream");
    cuda.replay = -1;
}

static void forget_steps(void) {
    for (int i = 0; i < cuda.n_steps; i++) cudaGraphExecDestroy(cuda.steps[i].exec);
    cuda.n_steps = 0;
}

static void cuda_init(const Limits *lim) {
    start_device();
    CHECK_CUDA(cudaStreamSynchronize(cuda.stream), "init");
    forget_steps();
    const Limits l = joined_limits(lim);
    const size_t size = scratch_layout(&l, NULL);
    if (size > cuda.scratch_size) {
        if (cuda.scratch) cudaFree(cuda.scratch);
        CHECK_CUDA(cudaMalloc((void **)&cuda.scratch, size), "scratch of %zu bytes", size);
        cuda.scratch_size = size;
    }
    cuda.lim = l;
    scratch_layout(&l, cuda.scratch);
    CHECK_BLAS(cublasSetWorkspace(cuda.blas, cuda.blas_work, BLAS_BYTES), "cublasSetWorkspace");
}

static void cuda_memory(size_t *free_bytes, size_t *total) {
    start_device();
    CHECK_CUDA(cudaMemGetInfo(free_bytes, total), "memory");
}

static void *cuda_reserve(size_t bytes) {
    void *p = NULL;
    start_device();
    if (cudaMalloc(&p, bytes ? bytes : 256) != cudaSuccess) {
        cudaGetLastError();
        return NULL;
    }
    CHECK_CUDA(cudaMemsetAsync(p, 0, bytes, cuda.stream), "zeroing %zu bytes", bytes);
    return p;
}

// What came out of the device is handed over; the ring is empty behind it.
static void finish_copies(void) {
    for (int i = 0; i < cuda.n_pending; i++) memcpy(cuda.pending[i].dst, cuda.pending[i].src, cuda.pending[i].bytes);
    cuda.n_pending = 0;
    cuda.ring_at = 0;
}

static void cuda_release(void *p) {
    CHECK_CUDA(cudaStreamSynchronize(cuda.stream), "release");
    finish_copies();
    forget_steps();
    CHECK_CUDA(cudaFree(p), "release");
}

static void cuda_wait(void) {
    CHECK_CUDA(cudaStreamSynchronize(cuda.stream), "wait");
    finish_copies();
}

static void cuda_copy(const Copy *c) {
    if (!c->bytes) return;
    if (c->kind == COPY_WITHIN) {
        CHECK_CUDA(cudaMemcpyAsync(c->dst, c->src, c->bytes, cudaMemcpyDeviceToDevice, cuda.stream), "copy of %zu bytes", c->bytes);
        return;
    }
    const cudaMemcpyKind kind = c->kind == COPY_IN ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost;
    if (c->bytes > RING_BYTES / 4) {                   // large: the driver's own way, and the host waits
        CHECK_CUDA(cudaMemcpyAsync(c->dst, c->src, c->bytes, kind, cuda.stream), "copy of %zu bytes", c->bytes);
        CHECK_CUDA(cudaStreamSynchronize(cuda.stream), "copy of %zu bytes", c->bytes);
        return;
    }
    const size_t need = round_up(c->bytes, 64);
    if (cuda.ring_at + need > RING_BYTES || cuda.n_pending == MAX_PENDING) cuda_wait();
    char *at = cuda.ring + cuda.ring_at;
    cuda.ring_at += need;
    if (c->kind == COPY_IN) {
        memcpy(at, c->src, c->bytes);
        CHECK_CUDA(cudaMemcpyAsync(c->dst, at, c->bytes, kind, cuda.stream), "copy of %zu bytes", c->bytes);
    } else {
        CHECK_CUDA(cudaMemcpyAsync(at, c->src, c->bytes, kind, cuda.stream), "copy of %zu bytes", c->bytes);
        cuda.pending[cuda.n_pending++] = (Pending){ c->dst, at, c->bytes };
    }
}

static bool cuda_begin(StepKey key) {
    cuda.replay = -1;
    cuda.recording = false;
    if (key.kind == STEP_PROMPT) return true;
    for (int i = 0; i < cuda.n_steps; i++)
        if (memcmp(&cuda.steps[i].key, &key, sizeof key) == 0) {
            cuda.replay = i;
            return false;
        }
    if (cuda.n_steps == MAX_STEPS) forget_steps();
    cuda.steps[cuda.n_steps].key = key;
    cuda.recording = true;
    CHECK_CUDA(cudaStreamBeginCapture(cuda.stream, cudaStreamCaptureModeThreadLocal), "recording a step of %d rows", key.rows);
    return true;
}

static void cuda_end(void) {
    if (cuda.recording) {
        Recorded *step = &cuda.steps[cuda.n_steps];
        cudaGraph_t graph;
        CHECK_CUDA(cudaStreamEndCapture(cuda.stream, &graph), "recording a step of %d rows", step->key.rows);
        CHECK_CUDA(cudaGraphInstantiate(&step->exec, graph, 0), "recording a step of %d rows", step->key.rows);
        CHECK_CUDA(cudaGraphDestroy(graph), "recording a step of %d rows", step->key.rows);
        cuda.replay = cuda.n_steps++;
        cuda.recording = false;
    }
    if (cuda.replay < 0) return;
    const Recorded *step = &cuda.steps[cuda.replay];
    CHECK_CUDA(cudaGraphLaunch(step->exec, cuda.stream), "step of %d rows", step->key.rows);
    cuda.replay = -1;
}

static int cuda_mark(void) {
    const int i = cuda.n_marks % MAX_MARKS;
    if (!cuda.marks[i]) CHECK_CUDA(cudaEventCreateWithFlags(&cuda.marks[i], cudaEventDisableTiming | cudaEventBlockingSync), "mark");
    CHECK_CUDA(cudaEventRecord(cuda.marks[i], cuda.stream), "mark");
    return cuda.n_marks++;
}

// A mark older than the last MAX_MARKS has been overtaken: waiting for its successor waits for it too.
static void cuda_wait_for(int mark) {
    CHECK_CUDA(cudaEventSynchronize(cuda.marks[mark % MAX_MARKS]), "wait_for");
}

static double cuda_bandwidth(void) {
    int clock = 0, bus = 0;
    start_device();
    CHECK_CUDA(cudaDeviceGetAttribute(&clock, cudaDevAttrMemoryClockRate, 0), "bandwidth");          // kHz
    CHECK_CUDA(cudaDeviceGetAttribute(&bus, cudaDevAttrGlobalMemoryBusWidth, 0), "bandwidth");       // bits
    return 2.0 * clock * 1e3 * bus / 8;
}

// Energy since the driver was loaded, from NVML where it is installed.
static double cuda_joules(void) {
    static unsigned (*energy)(void *, unsigned long long *);
    static void *device;
    static bool tried;
    if (!tried) {
        tried = true;
        void *lib = dlopen("libnvidia-ml.so.1", RTLD_NOW);
        unsigned (*init)(void) = lib ? (unsigned (*)(void))dlsym(lib, "nvmlInit_v2") : NULL;
        typedef unsigned (*ByPci)(const char *, void **);
        const ByPci by_pci = lib ? (ByPci)dlsym(lib, "nvmlDeviceGetHandleByPciBusId_v2") : NULL;
        char pci[32] = "";
        if (init && by_pci && init() == 0 && cudaDeviceGetPCIBusId(pci, sizeof pci, 0) == cudaSuccess && by_pci(pci, &device) == 0)
            energy = (unsigned (*)(void *, unsigned long long *))dlsym(lib, "nvmlDeviceGetTotalEnergyConsumption");
    }
    unsigned long long millijoules = 0;
    return energy && energy(device, &millijoules) == 0 ? millijoules * 1e-3 : -1;
}

// Operations that no feature of this build needs yet stay NULL (gemma4.h, contract 10).
const Ops *cuda_ops(void) {
    static Ops ops;
    int n_devices = 0;
    if (cudaGetDeviceCount(&n_devices) != cudaSuccess || !n_devices) return NULL;
    ops.name = "cuda";
    ops.memory = cuda_memory, ops.weight_bytes = cuda_weight_bytes, ops.upload = cuda_upload;
    ops.scratch_bytes = cuda_scratch_bytes, ops.init = cuda_init, ops.reserve = cuda_reserve, ops.release = cuda_release;
    ops.copy = cuda_copy, ops.begin = cuda_begin, ops.end = cuda_end, ops.wait = cuda_wait;
    ops.mark = cuda_mark, ops.wait_for = cuda_wait_for, ops.bandwidth = cuda_bandwidth, ops.joules = cuda_joules;
    ops.embed = cuda_embed, ops.ple_rows = cuda_ple_rows, ops.matmul = cuda_matmul, ops.gate_up = cuda_gate_up;
    ops.route = cuda_route, ops.expert_gate_up = cuda_expert_gate_up, ops.expert_down = cuda_expert_down;
    ops.ple_inject = cuda_ple_inject, ops.close = cuda_close, ops.gather_rows = cuda_gather_rows;
    ops.qkv_store = cuda_qkv_store, ops.attend = cuda_attend, ops.kv_commit = cuda_kv_commit, ops.kv_copy = cuda_kv_copy;
    ops.head = cuda_head, ops.logprob = cuda_logprob, ops.sample = cuda_sample;
    return &ops;
}
