/* plain.cu - a whole backend in plain CUDA: one kernel for one operation, the definition of parts/reference.h in
 * parallel.
 *
 * It is here to be read before gemma4_kernels.cu, to be the start of a port to another GPU, and to run on GPUs that the
 * fast kernels do not support. It has no tensor cores, no inline PTX, no recorded steps and no fused operations: an
 * operation that carries another one launches it on its own, in the order of parts/reference.h. Weights stay in the
 * blocks of the file; weight_at() decodes one value of any type. Each kernel names its fast twin in gemma4_kernels.cu
 * and says what makes that one faster, and how much where that was measured (docs/kernels.md: the 26B, one H100).
 *
 * Uses gemma4.h and kv.h. Begin with plain_ops() at the end, then matmul in [3].
 *   [1] Errors, launches, blocks of threads      [5] Images
 *   [2] Weights of the file, inputs              [6] Output
 *   [3] Body                                     [7] Run time, the table
 *   [4] Cache
 *
 * LAUNCHES   blocks of 32 or 256 threads; the comment of each kernel says what a block does. No sum depends on the
 *            number of rows or on the order of blocks, so rule 7 of gemma4.h holds
 * HIP        the aliases below let hipcc compile this file unchanged (5.2 does, for gfx90a and gfx1030, in
 *            test_backend.sh); it has not run on a GPU of AMD. Lanes exchange values only in shuffle_xor(), within 32
 *            lanes, on GPUs with 64 lanes too */
#ifdef __HIPCC__
#include <hip/hip_fp16.h>
#include <hip/hip_runtime.h>
#define cudaDevAttrComputeCapabilityMajor hipDeviceAttributeComputeCapabilityMajor
#define cudaDevAttrComputeCapabilityMinor hipDeviceAttributeComputeCapabilityMinor
#define cudaDevAttrIntegrated hipDeviceAttributeIntegrated
#define cudaDevAttrL2CacheSize hipDeviceAttributeL2CacheSize
#define cudaDevAttrMaxRegistersPerMultiprocessor hipDeviceAttributeMaxRegistersPerMultiprocessor
#define cudaDevAttrMaxSharedMemoryPerBlock hipDeviceAttributeMaxSharedMemoryPerBlock
#define cudaDevAttrMaxSharedMemoryPerMultiprocessor hipDeviceAttributeMaxSharedMemoryPerMultiprocessor
#define cudaDevAttrMaxThreadsPerMultiProcessor hipDeviceAttributeMaxThreadsPerMultiProcessor
#define cudaDevAttrMultiProcessorCount hipDeviceAttributeMultiprocessorCount
#define cudaDeviceAttr hipDeviceAttribute_t
#define cudaDeviceGetAttribute hipDeviceGetAttribute
#define cudaDeviceProp hipDeviceProp_t
#define cudaError_t hipError_t
#define cudaFree hipFree
#define cudaFreeHost hipHostFree
#define cudaGetDeviceCount hipGetDeviceCount
#define cudaGetDeviceProperties hipGetDeviceProperties
#define cudaGetErrorString hipGetErrorString
#define cudaGetLastError hipGetLastError
#define cudaMalloc hipMalloc
#define cudaMallocHost(p, bytes) hipHostMalloc(p, bytes, hipHostMallocMapped)
#define cudaMemGetInfo hipMemGetInfo
#define cudaMemcpyAsync hipMemcpyAsync
#define cudaMemcpyDefault hipMemcpyDefault
#define cudaMemsetAsync hipMemsetAsync
#define cudaStreamCreateWithFlags hipStreamCreateWithFlags
#define cudaStreamNonBlocking hipStreamNonBlocking
#define cudaStreamSynchronize hipStreamSynchronize
#define cudaStream_t hipStream_t
#define cudaSuccess hipSuccess
#define __shfl_xor_sync(mask, v, lanes, width) __shfl_xor(v, lanes, width)
#else
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#endif
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "../gemma4.h"

// ==== [1] Errors, launches, blocks of threads ========================================================================
// One stream carries out everything in the order of the calls. An error ends the process with the operation's name; an
// error inside a kernel is noticed by the next call of the run time, which is then named.

enum { WARP = 32,                     // lanes that shuffle_xor() connects; also the features and the group of a tile
       ROW_THREADS = 256,             // threads of a block that computes a row, or a tile of a product: 8 warps
       WARPS = ROW_THREADS / WARP,    // of such a block
       KEY_LANES = 8,                 // threads that share the dot product of one key
       TILE_ROWS = 8 };               // rows of a tile of a product: one for each warp

typedef struct HostMatrix {           // a matrix in pinned host memory, which the GPU reads
    const void *file, *owner;         // the uploaded data; the last memory reserved before the upload
    void *data;
    struct HostMatrix *next;
} HostMatrix;

static struct {
    cudaStream_t stream;
    Card    card;
    Limits  lim;
    char   *scratch;                  // (scratch_size) what follows lies in it
    size_t  scratch_size;
    Act     y;                        // (max_rows, max_cols) the prepared input of a product
    float  *z;                        // (TILE_ROWS, vocab) logits without a place of their own
    int64_t n_launches;
    void   *reserved;                 // the last reservation
    HostMatrix *in_host;
} plain;

static void plain_check(const char *operation, cudaError_t e) {
    if (e == cudaSuccess) return;
    fflush(stdout);
    fprintf(stderr, "gemma4: error: plain: %s: %s\n", operation, cudaGetErrorString(e));
    _exit(1);
}

static void plain_refuse(const char *what, int got) {
    fprintf(stderr, "gemma4: error: plain: %s: got %d\n", what, got);
    _exit(1);
}

// Launches a kernel and checks that it could be launched. A grid without blocks is not launched.
template <typename... Parameters, typename... Arguments>
static void launch(const char *operation, dim3 grid, int threads, void (*kernel)(Parameters...),
                   Arguments... arguments) {
    if (!grid.x || !grid.y || !grid.z) return;
#if defined(__CUDACC__) || defined(__HIPCC__)
    kernel<<<grid, threads, 0, plain.stream>>>(static_cast<Parameters>(arguments)...);
#else                                 // the emulator of the tests: C++ has no <<< >>>
    cudaLaunchConfig_t config = { };
    config.gridDim = grid;
    config.blockDim = threads;
    config.stream = plain.stream;
    cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
#endif
    plain_check(operation, cudaGetLastError());
    plain.n_launches++;
}

HOST_DEVICE static inline int div_up(int n, int by) { return (n + by - 1) / by; }
HOST_DEVICE static inline int min_int(int a, int b) { return a < b ? a : b; }
HOST_DEVICE static inline int max_int(int a, int b) { return a > b ? a : b; }

// The value of lane `lane ^ lanes` of the same 32. All 32 lanes have to call it.
template <typename T> __device__ static inline T shuffle_xor(T v, int lanes) {
    return __shfl_xor_sync(0xffffffffu, v, lanes, WARP);
}

__device__ static inline float larger(float a, float b) { return fmaxf(a, b); }
__device__ static inline uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }

// The sum and the maximum over 32 lanes. Every lane gets it: after step m, groups of 2 m lanes have equal values.
template <typename T> __device__ static inline T warp_sum(T v) {
    for (int m = 1; m < WARP; m *= 2) v += shuffle_xor(v, m);
    return v;
}
template <typename T> __device__ static inline T warp_max(T v) {
    for (int m = 1; m < WARP; m *= 2) v = larger(v, shuffle_xor(v, m));
    return v;
}

// The same over a block of whole warps: each warp leaves its result in shared memory, every thread combines them all.
// The second barrier keeps the next call from overwriting results that are still read.
template <typename T> __device__ static T block_sum(T v) {
    __shared__ T of_warp[WARPS];
    v = warp_sum(v);
    if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = v;
    __syncthreads();
    T sum = 0;
    for (unsigned w = 0; w < blockDim.x / WARP; w++) sum += of_warp[w];
    __syncthreads();
    return sum;
}
template <typename T> __device__ static T block_max(T v) {
    __shared__ T of_warp[WARPS];
    v = warp_max(v);
    if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = v;
    __syncthreads();
    T most = of_warp[0];
    for (unsigned w = 1; w < blockDim.x / WARP; w++) most = larger(most, of_warp[w]);
    __syncthreads();
    return most;
}

// ==== [2] Weights of the file, inputs ================================================================================

// The layout of a block is that of the table at the head of gguf.h. Blocks have no alignment, so all is read as bytes.
__device__ static inline float half_at(const uint8_t *p) {
    return __half2float(__ushort_as_half((unsigned short)(p[0] | p[1] << 8)));
}

// Nibble i of 32 in 16 bytes: all low ones, then all high ones.
__device__ static inline int nibble_at(const uint8_t *q, int i) { return i < 16 ? q[i] & 15 : q[i - 16] >> 4; }

__device__ static inline int bit_at(const uint8_t *bits, int i) { return bits[i / 8] >> i % 8 & 1; }

__constant__ static const int8_t codes_of_iq4[16] = { -127, -104, -83, -65, -49, -35, -22, -10,
                                                      1, 13, 25, 38, 53, 69, 89, 113 };
__constant__ static const int8_t codes_of_fp4[16] = { 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12 };

// Half of the scale of NVFP4, an unsigned E4M3: its codes are doubled.
__device__ static inline float half_of_e4m3(int s) {
    s &= 127;
    if (s == 127) return 0;
    return s < 8 ? (float)s * 0x1p-10f : ldexpf((float)(8 + (s & 7)), (s >> 3) - 11);
}

// Half of the scale of MXFP4, a power of two: its codes are doubled.
__device__ static inline float half_of_e8m0(int e) { return e == 255 ? NAN : ldexpf(1, e - 128); }

// Scale (first = 0) or minimum (first = 4) of 32 values of Q4_K and Q5_K: the low six bits of byte g; from g = 4 on, a
// nibble of bytes 8 .. 11 and the upper two bits of bytes 0 .. 7.
__device__ static inline int scale_of_q4_k(const uint8_t *s, int first, int g) {
    if (g < 4) return s[first + g] & 63;
    return (first ? s[4 + g] >> 4 : s[4 + g] & 15) | s[first + g - 4] >> 6 << 4;
}

// Value i of a block of 256 values.
__device__ static float weight_of_256(DType t, const uint8_t *b, int i) {
    const int g = i / 32, l = i % 32, half = i / 128, k = i % 128 / 32, j = i / 16;    // groups; sub-blocks of 16
    if (t == T_Q2_K) {
        const int code = b[16 + 32 * half + l] >> 2 * k & 3;
        return half_at(b + 80) * (b[j] & 15) * code - half_at(b + 82) * (b[j] >> 4);
    }
    if (t == T_Q3_K) {
        const uint8_t *s = b + 96;
        const int code = (b[32 + 32 * half + l] >> 2 * k & 3) | (b[l] >> (4 * half + k) & 1) << 2;
        const int scale = ((j < 8 ? s[j] & 15 : s[j - 8] >> 4) | (s[8 + j % 4] >> 2 * (j / 4) & 3) << 4) - 32;
        return half_at(b + 108) * scale * (code - 4);
    }
    if (t == T_Q4_K || t == T_Q5_K) {
        const uint8_t *q = b + (t == T_Q4_K ? 16 : 48) + i / 64 * 32;
        int code = g % 2 ? q[l] >> 4 : q[l] & 15;
        if (t == T_Q5_K) code |= (b[16 + l] >> g & 1) << 4;
        return half_at(b) * scale_of_q4_k(b + 4, 0, g) * code - half_at(b + 2) * scale_of_q4_k(b + 4, 4, g);
    }
    if (t == T_Q6_K) {
        const int low = b[64 * half + 32 * (k & 1) + l], high = b[128 + 32 * half + l] >> 2 * k & 3;
        return half_at(b + 208) * (int8_t)b[192 + j] * (((k < 2 ? low & 15 : low >> 4) | high << 4) - 32);
    }
    const int scale = ((b[4 + g / 2] >> g % 2 * 4 & 15) | (b[2 + g / 4] >> g % 4 * 2 & 3) << 4) - 32;  // IQ4_XS
    return half_at(b) * scale * codes_of_iq4[nibble_at(b + 8 + 16 * g, l)];
}

// Values and bytes of a block.
HOST_DEVICE static inline int block_values(DType t) {
    if (!is_quantised(t)) return 1;
    return (t >= T_Q2_K && t <= T_Q6_K) || t == T_IQ4_XS ? 256 : t == T_NVFP4 ? 64 : 32;
}
HOST_DEVICE static inline int block_bytes(DType t) {
    switch (t) {
    case T_F32: return 4;
    case T_F16: case T_BF16: return 2;
    case T_Q8_0: return 34;
    case T_Q4_0: case T_IQ4_NL: return 18;
    case T_Q4_1: return 20;
    case T_Q5_0: return 22;
    case T_Q5_1: return 24;
    case T_MXFP4: return 17;
    case T_NVFP4: return 36;
    case T_Q2_K: return 84;
    case T_Q3_K: return 110;
    case T_Q4_K: return 144;
    case T_Q5_K: return 176;
    case T_Q6_K: return 210;
    case T_IQ4_XS: return 136;
    }
    return 0;
}
HOST_DEVICE static inline size_t bytes_of_row(const Tensor &w) {
    return (size_t)(w.cols / block_values(w.type)) * block_bytes(w.type);
}

// Value i of a row of any type. All products are exact in f32, so the value is the one that gguf_dequantize gives.
__device__ static float weight_at(DType t, const uint8_t *row, int i) {
    const uint8_t *b = row + (size_t)(i / block_values(t)) * block_bytes(t);
    const int k = i % 32;
    switch (t) {
    case T_F32: return *(const float *)b;
    case T_F16: return __half2float(*(const __half *)b);
    case T_BF16: return __uint_as_float((unsigned)*(const uint16_t *)b << 16);
    case T_Q8_0: return half_at(b) * (int8_t)b[2 + k];
    case T_Q4_0: return half_at(b) * (nibble_at(b + 2, k) - 8);
    case T_Q4_1: return half_at(b) * nibble_at(b + 4, k) + half_at(b + 2);
    case T_Q5_0: return half_at(b) * ((nibble_at(b + 6, k) | bit_at(b + 2, k) << 4) - 16);
    case T_Q5_1: return half_at(b) * (nibble_at(b + 8, k) | bit_at(b + 4, k) << 4) + half_at(b + 2);
    case T_IQ4_NL: return half_at(b) * codes_of_iq4[nibble_at(b + 2, k)];
    case T_MXFP4: return half_of_e8m0(b[0]) * codes_of_fp4[nibble_at(b + 1, k)];
    case T_NVFP4: {                   // sub-blocks of 16 values: a scale, and 8 bytes of nibbles
        const int sub = i % 64 / 16, at = b[4 + 8 * sub + i % 8];
        return half_of_e4m3(b[sub]) * codes_of_fp4[i % 16 < 8 ? at & 15 : at >> 4];
    }
    default: return weight_of_256(t, b, i % 256);
    }
}

__device__ static inline const uint8_t *weight_row(const Tensor &w, size_t row) {
    return (const uint8_t *)w.data + row * bytes_of_row(w);
}

// Stores v in column i of a row of an Act. The lanes of a warp hold consecutive columns; if the Act has int8 values
// they hold a group of 32, which rule 6 of gemma4.h quantises.
__device__ static void store_act(const Act &out, size_t row, int cols, int i, float v) {
    if (out.f) out.f[row * cols + i] = v;
    if (!out.q) return;
    const float largest = warp_max(fabsf(v));
    const bool finite = warp_sum(isfinite(v) ? 0 : 1) == 0;
    const float s = !finite ? NAN : largest < 0x1p-120f ? 0 : largest / 127;
    out.q[row * cols + i] = s > 0 ? (int8_t)rintf(v * (127 / largest)) : 0;
    if (i % 32 == 0) out.s[(row * cols + i) / 32] = s;
}

// Value i of a row of an Act, as a matrix of floats or a quantised one reads it.
__device__ static inline float act_at(const Act &a, size_t row, int cols, int i, bool floats) {
    const size_t at = row * cols + i;
    return floats ? a.f[at] : a.s[at / 32] * (float)a.q[at];
}

__device__ static inline float rms_factor(float squares, int n, float eps) { return 1 / sqrtf(squares / n + eps); }

// prepare: d = norm(delta[0]; w_delta[0]) + norm(delta[1]; w_delta[1]);  x' = scale * (x + norm(d; w_post));
//          y = norm(x'; w_pre)        the input of a product (In of gemma4.h), as f32 and as int8
//   shapes    x, deltas, x_out (n_rows, cols); y (n_rows, cols)
//   launch    grid n_rows, block 256: a block computes a row; thread t has columns t, t + 256, ...
//   traffic   reads x and the deltas up to four times (after the first time from a cache), writes x_out and y once
//   numerics  f32; sums of squares over 256 threads in a fixed order
//   see       ref_input
//   fast twin prepare_kernel; up to a few rows, every block of a product computes its input itself, which saves a
//             launch and the way through memory
struct Deltas { float factor[2], post; };              // 1 / rms of the deltas, and of their sum

__device__ static float delta_at(const In &in, const Deltas &d, size_t at, int i) {
    float sum = 0;
    for (int k = 0; k < 2; k++) {
        if (!in.delta[k]) continue;
        sum += in.w_delta[k] ? in.delta[k][at] * d.factor[k] * in.w_delta[k][i] : in.delta[k][at];
    }
    return sum;
}

__device__ static float stream_at(const In &in, const Deltas &d, size_t at, int i) {                   // x'
    float delta = delta_at(in, d, at, i);
    if (in.w_post && (in.delta[0] || in.delta[1])) delta *= d.post * in.w_post[i];
    return in.scale * ((in.x ? in.x[at] : 0) + delta);
}

static __global__ void prepare_kernel(In in, int cols, Act y) {
    const size_t row = (size_t)blockIdx.x * cols;
    Deltas d = { { 1, 1 }, 1 };
    for (int k = 0; k < 2; k++) {
        if (!in.delta[k] || !in.w_delta[k]) continue;
        float squares = 0;
        for (int i = threadIdx.x; i < cols; i += blockDim.x) squares += in.delta[k][row + i] * in.delta[k][row + i];
        d.factor[k] = rms_factor(block_sum(squares), cols, in.eps);
    }
    float squares = 0;
    for (int i = threadIdx.x; i < cols; i += blockDim.x) {
        const float v = delta_at(in, d, row + i, i);
        squares += v * v;
    }
    d.post = rms_factor(block_sum(squares), cols, in.eps);
    squares = 0;
    for (int i = threadIdx.x; i < cols; i += blockDim.x) {
        const float v = stream_at(in, d, row + i, i);
        if (in.x_out) in.x_out[row + i] = v;
        squares += v * v;
    }
    const float factor = rms_factor(block_sum(squares), cols, in.eps);
    for (int i = threadIdx.x; i < cols; i += blockDim.x) {
        const float v = stream_at(in, d, row + i, i);
        store_act(y, blockIdx.x, cols, i, in.w_pre ? v * factor * in.w_pre[i] : v);
    }
}

// The Act that a product reads: the one that the producer wrote, or else the In carried out, in scratch. f32 is written
// to `f` if that is not NULL.
static Act prepare(const char *operation, const In *in, int n_rows, int cols, float *f) {
    Act y = plain.y;
    if (in->act.f || in->act.q) return in->act;
    if (n_rows > plain.lim.max_rows || cols > plain.lim.max_cols) plain_refuse("an input wider than planned", cols);
    if (f) y.f = f;
    if (cols % 32) y.q = NULL;
    launch(operation, n_rows, ROW_THREADS, prepare_kernel, *in, cols, y);
    return y;
}

// ==== [3] Body =======================================================================================================

// The token id of a row, or 0 if it is outside the vocabulary.
HOST_DEVICE static inline int valid_token(int token, int vocab) { return token < 0 || token >= vocab ? 0 : token; }

// embed: out[r] = scale * table[token of r]
//   shapes    table (vocab, cols) any type, out (n_rows, cols)
//   launch    grid n_rows, block 256: a block decodes a row
//   traffic   reads a row of the table and writes 4 cols bytes, for each row
//   numerics  exact values of the file, one rounding
//   see       ref_embed
//   fast twin embed_kernel: a thread decodes 32 values with wide loads, from a layout of its own
static __global__ void embed_kernel(Batch b, Tensor table, float scale, float *out) {
    const uint8_t *row = weight_row(table, valid_token(b.rows[blockIdx.x].token, table.rows));
    for (int i = threadIdx.x; i < table.cols; i += blockDim.x)
        out[(size_t)blockIdx.x * table.cols + i] = weight_at(table.type, row, i) * scale;
}

static void plain_embed(const Embed *o) {
    launch("embed", o->batch->n_rows, ROW_THREADS, embed_kernel, *o->batch, *o->table, o->scale, o->out);
}

// pair: out[r] = scale * table[tokens[i]], then hidden[row[i]], with i = of[r]: the input of an MTP drafter
//   shapes    table (vocab, cols), hidden (.., cols), out (n_rows, 2 cols)
//   launch    grid n_rows, block 256: a block writes a row
//   traffic   reads a row of the table and of hidden, writes 2 cols values, for each row
//   numerics  as embed; int8 by rule 6
//   see       ref_pair
//   fast twin pair_kernel: as embed_kernel
static __global__ void pair_kernel(Pair o, Tensor table) {
    const int r = blockIdx.x, i = o.of ? o.of[r] : r, cols = table.cols;
    const uint8_t *row = weight_row(table, valid_token(o.tokens[(size_t)i * o.token_stride], table.rows));
    const float *hidden = o.hidden + (size_t)(o.row ? o.row[i] : i) * cols;
    for (int c = threadIdx.x; c < 2 * cols; c += blockDim.x)
        store_act(o.out, r, 2 * cols, c, c < cols ? weight_at(table.type, row, c) * o.scale : hidden[c - cols]);
}

static void plain_pair(const Pair *o) { launch("pair", o->n_rows, ROW_THREADS, pair_kernel, *o, *o->table); }

// ple_rows: u[r][l] = out_scale * (norm(proj_scale * u[r][l]; w_norm) + table_scale * table[token of r][l])
//   shapes    table (vocab, n_layers * ple_dim), u (n_rows, n_layers, ple_dim)
//   launch    grid (n_layers, n_rows), block 256: a block computes the values of one layer of one row
//   traffic   reads and writes u, reads a row of the table, perhaps from host memory
//   numerics  f32
//   see       ref_ple_rows
//   fast twin ple_rows_kernel: values stay in shared memory between the two passes
static __global__ void ple_rows_kernel(PleRows o, Batch b, Tensor table) {
    const int l = blockIdx.x, r = blockIdx.y;
    const uint8_t *row = weight_row(table, valid_token(b.rows[r].token, table.rows));
    float *u = o.u + ((size_t)r * o.n_layers + l) * o.ple_dim, squares = 0;
    for (int i = threadIdx.x; i < o.ple_dim; i += blockDim.x) {
        const float v = o.proj_scale * u[i];
        squares += v * v;
    }
    const float factor = rms_factor(block_sum(squares), o.ple_dim, o.eps);
    for (int i = threadIdx.x; i < o.ple_dim; i += blockDim.x) {
        const float v = o.proj_scale * u[i] * factor * o.w_norm[i];
        u[i] = o.out_scale * (v + o.table_scale * weight_at(table.type, row, l * o.ple_dim + i));
    }
}

static void plain_ple_rows(const PleRows *o) {
    launch("ple_rows", dim3(o->n_layers, o->batch->n_rows), ROW_THREADS, ple_rows_kernel, *o, *o->batch, *o->table);
}

// The heart of every product. A warp multiplies row `row` of all matrices of w with n rows of y, from row r0 on: lane l
// adds up columns l, l + 32, ..., and the lanes' sums are added. A weight is decoded once for up to TILE_ROWS rows.
// Every lane gets the results.
__device__ static void dot_rows(float *sum, const Tensor &w, size_t row, const Act &y, size_t r0, int n) {
    const uint8_t *weights = weight_row(w, row);
    const bool floats = !is_quantised(w.type);
    for (int r = 0; r < TILE_ROWS; r++) sum[r] = 0;
    for (int c = threadIdx.x % WARP; c < w.cols; c += WARP) {
        const float v = weight_at(w.type, weights, c);
#pragma unroll
        for (int r = 0; r < TILE_ROWS; r++)
            if (r < n) sum[r] = fmaf(v, act_at(y, r0 + r, w.cols, c, floats), sum[r]);
    }
    const float scale = w.scale ? w.scale[row / w.rows] : 1;
#pragma unroll
    for (int r = 0; r < TILE_ROWS; r++)
        if (r < n) sum[r] = scale * warp_sum(sum[r]);
}

// A block of 8 warps computes a tile of a product: z[r][k] is row `row + k` of w times row r0 + r of y, for k < n_out
// and r < n. Warp v computes k = v, v + 8, v + 16 and v + 24. Afterwards warp r stores row r: its lanes hold a group.
__device__ static void product_tile(float (*z)[WARP], const Tensor &w, size_t row, int n_out, const Act &y, size_t r0,
                                    int n) {
    float sum[TILE_ROWS];
    for (int k = threadIdx.x / WARP; k < WARP && k < n_out; k += WARPS) {
        dot_rows(sum, w, row + k, y, r0, n);
#pragma unroll
        for (int r = 0; r < TILE_ROWS; r++)
            if (r < n && threadIdx.x % WARP == 0) z[r][k] = sum[r];
    }
    __syncthreads();                                   // the warp that stores a row needs the values of all warps
}

static dim3 tiles(int n_rows, int n_out) { return dim3(div_up(n_rows, TILE_ROWS), div_up(n_out, WARP)); }

// matmul: out[r][i] = sum over c of w[i][c] y[r][c];  head: cap * tanh(out / cap)
//   shapes    w (rows, cols) any type, y (n_rows, cols), out (n_rows, rows)
//   launch    grid (n_rows / 8, rows / 32) rounded up, block 256: a tile of 8 rows and 32 features
//   traffic   reads w once for 8 rows in the file's blocks, y for each 32 features (from a cache)
//   numerics  decoded f32 weights times f32, or times s q of int8 values; 32 sums of a lane, then a tree
//   see       ref_matmul, ref_head
//   fast twin gemv_kernel and product_kernel (1 or 2 rows), tile_kernel (up to 64), cuBLAS (prompts): loads of 16 bytes
//             from a layout of planes, integer dot products, from 3 rows on tensor cores; several matrices in a launch.
//             One row of the 26B: q, k, v 89 times as fast, Wo 112, the head 30
static __global__ void product_kernel(Tensor w, Act y, int n_rows, float cap, float *out) {
    __shared__ float z[TILE_ROWS][WARP];
    const int r0 = blockIdx.x * TILE_ROWS, first = blockIdx.y * WARP, n = min_int(TILE_ROWS, n_rows - r0);
    const int r = threadIdx.x / WARP, k = threadIdx.x % WARP;
    product_tile(z, w, first, w.rows - first, y, r0, n);
    if (r >= n || first + k >= w.rows) return;
    out[(size_t)(r0 + r) * w.rows + first + k] = cap > 0 ? cap * tanhf(z[r][k] / cap) : z[r][k];
}

static void plain_matmul(const Matmul *o) {
    const Act y = prepare("matmul", &o->in, o->n_rows, o->w[0]->cols, NULL);
    for (int k = 0; k < o->n; k++)
        launch("matmul", tiles(o->n_rows, o->w[k]->rows), ROW_THREADS, product_kernel, *o->w[k], y, o->n_rows, 0,
               o->out[k]);
}

// The order of logits as an integer: a larger key is a larger logit or, if they are equal, a lower id. -0 equals 0.
__device__ static inline uint64_t order_key(float z, uint32_t id) {
    const uint32_t bits = __float_as_uint(z + 0.0f);
    return (uint64_t)(bits >> 31 ? ~bits : bits | 0x80000000u) << 32 | (uint32_t)~id;
}
__device__ static inline int32_t id_of_key(uint64_t key) { return (int32_t)~(uint32_t)key; }
__device__ static inline float logit_of_key(uint64_t key) {
    const uint32_t bits = (uint32_t)(key >> 32);
    return __uint_as_float(bits >> 31 ? bits & 0x7fffffffu : ~bits);
}

// The largest key of n logits below `last`, found by a whole block. A NaN counts as -Inf. ids NULL: id i of logit i.
__device__ static uint64_t next_best(const float *z, const int32_t *ids, int n, uint64_t last) {
    uint64_t best = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        const uint64_t key = order_key(isnan(z[i]) ? -INFINITY : z[i], ids ? ids[i] : i);
        if (key < last) best = larger(best, key);
    }
    return block_max(best);
}

// route: the n_used largest logits of a row; weights = exp(logit - largest), normalised to sum 1, times expert_scale
//   shapes    logits (n_rows, n_experts), ids and weights (n_rows, n_used)
//   launch    grid n_rows, block 256: a block looks through a row n_used times
//   traffic   n_used times the logits of a row, from a cache
//   numerics  f64 for the weights
//   see       ref_choose_experts
//   fast twin choose_kernel; for one or two rows the blocks that multiply with the experts choose for themselves
static __global__ void route_kernel(Route o, int n_experts) {
    const float *z = o.logits + (size_t)blockIdx.x * n_experts;
    float *weights = o.weights + (size_t)blockIdx.x * o.n_used;
    int32_t *ids = o.ids + (size_t)blockIdx.x * o.n_used;
    uint64_t key = ~(uint64_t)0;
    double sum = 0;
    for (int j = 0; j < o.n_used; j++) {
        key = next_best(z, NULL, n_experts, key);
        if (threadIdx.x) continue;
        ids[j] = id_of_key(key);
        sum += exp((double)z[ids[j]] - z[ids[0]]);
    }
    for (int j = 0; j < o.n_used && threadIdx.x == 0; j++) {
        const double p = exp((double)z[ids[j]] - z[ids[0]]) / sum;
        weights[j] = (float)(o.expert_scale ? p * o.expert_scale[ids[j]] : p);
    }
}

static void plain_route(const Route *o) {
    const Act y = prepare("route", &o->in, o->n_rows, o->w->cols, NULL);
    launch("route", tiles(o->n_rows, o->w->rows), ROW_THREADS, product_kernel, *o->w, y, o->n_rows, 0, o->logits);
    launch("route", o->n_rows, ROW_THREADS, route_kernel, *o, o->w->rows);
}

__device__ static float activation(ActFn fn, float x) {
    if (fn == ACT_SILU) return x / (1 + expf(-x));
    return 0.5f * x * (1 + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
}

// expert_gate_up: out[r][j] = act(gate_e y[r]) * (up_e y[r]) with e = ids[r][j]
//   shapes    gate, up (n experts, expert_dim, cols), or both in one; y (n_rows, cols);
//             out (n_rows, n_used, expert_dim)
//   launch    grid (n_rows * n_used, expert_dim / 32), block 256: 32 features of one expert of one row
//   traffic   reads the matrices of a chosen expert once for each row that chose it
//   numerics  as matmul
//   see       ref_expert_gate_up
//   fast twin product_kernel, with the dense down in the same launch: 37 times as fast. experts_kernel for prompts:
//             sort_pairs_kernel sorts the pairs by expert, so that a tile of rows shares one read of an expert
static __global__ void expert_gate_up_kernel(ExpertGateUp o, Tensor gate, Tensor up, int n_out, int first_up, Act y) {
    __shared__ float of_gate[TILE_ROWS][WARP], of_up[TILE_ROWS][WARP];
    const int pair = blockIdx.x, r = pair / o.n_used, first = blockIdx.y * WARP, k = threadIdx.x;
    const size_t e = o.ids[pair];
    product_tile(of_gate, gate, e * gate.rows + first, n_out - first, y, r, 1);
    product_tile(of_up, up, e * up.rows + first_up + first, n_out - first, y, r, 1);
    if (k < WARP && first + k < n_out)
        store_act(o.out, pair, n_out, first + k, activation(o.fn, of_gate[0][k]) * of_up[0][k]);
}

static void plain_expert_gate_up(const ExpertGateUp *o) {
    const int n_out = o->up ? o->gate->rows : o->gate->rows / 2;
    const Act y = prepare("expert_gate_up", &o->in, o->n_rows, o->gate->cols, NULL);
    launch("expert_gate_up", dim3(o->n_rows * o->n_used, div_up(n_out, WARP)), ROW_THREADS, expert_gate_up_kernel, *o,
           *o->gate, o->up ? *o->up : *o->gate, n_out, o->up ? 0 : n_out, y);
    if (o->dense_down) plain_matmul(o->dense_down);
}

// gate_up: out = act(gate y) * (up y)
//   shapes    gate, up (ffn_dim, cols), y (n_rows, cols), out (n_rows, ffn_dim)
//   launch    grid (n_rows / 8, ffn_dim / 32) rounded up, block 256: a tile of 8 rows and 32 features of both matrices
//   traffic   reads both matrices once for 8 rows
//   numerics  as matmul; int8 by rule 6: a warp of the tile holds a group of a row
//   see       ref_gate_up
//   fast twin as for matmul; the router of a layer with experts runs in the same launch: 75 times as fast together
static __global__ void gate_up_kernel(GateUp o, Tensor gate, Tensor up, Act y) {
    __shared__ float of_gate[TILE_ROWS][WARP], of_up[TILE_ROWS][WARP];
    const int r0 = blockIdx.x * TILE_ROWS, first = blockIdx.y * WARP, n = min_int(TILE_ROWS, o.n_rows - r0);
    const int r = threadIdx.x / WARP, k = threadIdx.x % WARP;
    product_tile(of_gate, gate, first, gate.rows - first, y, r0, n);
    product_tile(of_up, up, first, gate.rows - first, y, r0, n);
    if (r < n && first + k < gate.rows)
        store_act(o.out, r0 + r, gate.rows, first + k, activation(o.fn, of_gate[r][k]) * of_up[r][k]);
}

static void plain_gate_up(const GateUp *o) {
    const Act y = prepare("gate_up", &o->in, o->n_rows, o->gate->cols, NULL);
    launch("gate_up", tiles(o->n_rows, o->gate->rows), ROW_THREADS, gate_up_kernel, *o, *o->gate, *o->up, y);
    if (o->route) plain_route(o->route);
    if (o->experts) plain_expert_gate_up(o->experts);
}

// expert_down: out[r] = sum over j, ascending, of weights[r][j] * (down_e in[r][j]) with e = ids[r][j]
//   shapes    down (n experts, rows, expert_dim), in (n_rows, n_used, expert_dim), out (n_rows, rows)
//   launch    grid (n_rows, rows / 32), block 256: 32 features of one row, one expert after the other
//   traffic   reads the matrices of a chosen expert once for each row that chose it
//   numerics  as matmul; the sum over j in f32
//   see       ref_expert_down
//   fast twin product_kernel: 16 warps share the experts of a row, 42 times as fast; for prompts as expert_gate_up
static __global__ void expert_down_kernel(ExpertDown o, Tensor down) {
    __shared__ float z[TILE_ROWS][WARP];
    const int r = blockIdx.x, first = blockIdx.y * WARP, k = threadIdx.x;
    float sum = 0;
    for (int pair = r * o.n_used; pair < (r + 1) * o.n_used; pair++) {
        product_tile(z, down, (size_t)o.ids[pair] * down.rows + first, down.rows - first, o.in, pair, 1);
        if (k < WARP && first + k < down.rows) sum += o.weights[pair] * z[0][k];
        __syncthreads();                               // z is read before the next expert overwrites it
    }
    if (k < WARP && first + k < down.rows) o.out[(size_t)r * down.rows + first + k] = sum;
}

static void plain_expert_down(const ExpertDown *o) {
    launch("expert_down", dim3(o->n_rows, div_up(o->down->rows, WARP)), ROW_THREADS, expert_down_kernel, *o, *o->down);
}

// ple_inject: out = gelu(w y) * u
//   shapes    w (ple_dim, cols), y (n_rows, cols), out (n_rows, ple_dim); row r of u at u + r u_stride
//   launch    grid (n_rows / 8, ple_dim / 32) rounded up, block 256: a tile of 8 rows and 32 features
//   traffic   reads w once for 8 rows
//   numerics  as matmul
//   see       ref_ple_inject
//   fast twin as for matmul
static __global__ void ple_inject_kernel(PleInject o, Tensor w, Act y) {
    __shared__ float z[TILE_ROWS][WARP];
    const int r0 = blockIdx.x * TILE_ROWS, first = blockIdx.y * WARP, n = min_int(TILE_ROWS, o.n_rows - r0);
    const int r = threadIdx.x / WARP, k = threadIdx.x % WARP;
    product_tile(z, w, first, w.rows - first, y, r0, n);
    if (r >= n || first + k >= w.rows) return;
    const float u = o.u[(size_t)(r0 + r) * o.u_stride + first + k];
    store_act(o.out, r0 + r, w.rows, first + k, activation(ACT_GELU, z[r][k]) * u);
}

static void plain_ple_inject(const PleInject *o) {
    const Act y = prepare("ple_inject", &o->in, o->n_rows, o->w->cols, NULL);
    launch("ple_inject", tiles(o->n_rows, o->w->rows), ROW_THREADS, ple_inject_kernel, *o, *o->w, y);
}

static void plain_close(const Close *o) {              // the input of a product, without the product
    const Act y = { o->out, NULL, NULL };
    launch("close", o->n_rows, ROW_THREADS, prepare_kernel, o->in, o->cols, y);
}

// gather_rows: dst[r] = src[index[r]], words of 32 bits
//   shapes    dst (n_rows, dst_stride), src (.., src_stride), cols words of a row are copied
//   launch    grid n_rows, block 256: a block copies a row
//   traffic   4 cols bytes read and written for each row
//   numerics  exact
//   see       ref_gather_rows
//   fast twin gather_rows_kernel: several blocks share a wide row
static __global__ void gather_rows_kernel(GatherRows o) {
    const size_t row = o.index ? o.index[blockIdx.x] : blockIdx.x;
    const uint32_t *from = (const uint32_t *)o.src + row * o.src_stride;
    uint32_t *to = (uint32_t *)o.dst + (size_t)blockIdx.x * o.dst_stride;
    for (int i = threadIdx.x; i < o.cols; i += blockDim.x) to[i] = from[i];
}

static void plain_gather_rows(const GatherRows *o) {
    launch("gather_rows", o->n_rows, ROW_THREADS, gather_rows_kernel, *o);
}

// ==== [4] Cache ======================================================================================================

// parts/kv.h lets the threads of a block share a group of 128 values.
#define KV_CODE __device__ static inline
#define KV_LANE ((int)threadIdx.x)
#define KV_LANES ((int)blockDim.x)
#define KV_SUM(n) block_sum(n)
#define KV_MAX(x) block_max(x)
#define KV_SYNC() __syncthreads()
#define KV_TO_HALF(x) __half_as_ushort(__float2half_rn(x))
#define KV_FROM_HALF(h) __half2float(__ushort_as_half(h))
#include "kv.h"

// The tail of a cache (its newest rows in f16) as a cache of its own.
HOST_DEVICE static inline Cache tail_of(const Cache &c) {
    Cache tail = c;
    tail.k = c.k_tail;
    tail.v = c.v_tail;
    tail.slots = c.tail_slots;
    return tail;
}

// Number of a row of a plane, and where it lies.
__device__ static inline size_t cache_row(const Cache &c, int seq, int head, int slot) {
    return ((size_t)seq * c.n_kv_heads + head) * c.slots + slot;
}
__device__ static inline char *codes_of(const KvPlane &p, size_t row) {
    return (char *)p.data + row * kv_row_bytes(p.type, p.dim);
}
__device__ static inline uint16_t *scales_of(const KvPlane &p, size_t row) {
    return (uint16_t *)((char *)p.scale + row * kv_scale_bytes(p.type, p.dim));
}

__device__ static inline float value_of_bf16(uint16_t h) { return __uint_as_float((unsigned)h << 16); }
__device__ static inline uint16_t bf16_of_value(float v) {             // ties to even
    const unsigned bits = __float_as_uint(v);
    return isnan(v) ? 0x7fff : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Value i of a row of type t. Rows of quantised types stay rotated.
__device__ static inline float value_of(KvType t, const char *data, const uint16_t *scales, int i) {
    if (t == KV_F32) return ((const float *)data)[i];
    if (t == KV_F16) return KV_FROM_HALF(((const uint16_t *)data)[i]);
    if (t == KV_BF16) return value_of_bf16(((const uint16_t *)data)[i]);
    return kv_value(t, data, scales, i);
}

// Value i of K: of a tied cache, K is V except for the values that RoPE rotates.
__device__ static inline float key_value(const Cache &c, size_t row, int i) {
    const KvPlane &p = i < c.k.dim ? c.k : c.v;
    return value_of(p.type, codes_of(p, row), scales_of(p, row), i);
}

// A row for a warp: out[m] = value lane + 32 m, for N values of a lane. The type is looked at once, and lanes without a
// value read the last one, so no branch stands between the loads and all of them are under way together.
template <int N> __device__ static inline void read_row(float *out, const KvPlane &p, size_t row) {
    const char *data = codes_of(p, row);
    const uint16_t *scales = scales_of(p, row);
#define READ(t) case t: _Pragma("unroll") for (int m = 0; m < N; m++) \
        out[m] = value_of(t, data, scales, min_int(threadIdx.x % WARP + WARP * m, p.dim - 1)); \
    break
    switch (p.type) {
    READ(KV_F32); READ(KV_F16); READ(KV_BF16); READ(KV_Q8_0); READ(KV_Q4_0); READ(KV_TQ4); READ(KV_TQ3);
    }
#undef READ
}

// Where a cache row holds value i of a head. A tied cache has first the values that RoPE rotates, of both halves.
__device__ static inline int tied_index(const Cache &c, int i) {
    const int half = c.head_dim / 2;
    if (!c.n_rot || i < c.n_rot || i >= half + c.n_rot) return i;
    return i < half ? i + c.n_rot : i - half + c.n_rot;
}

// The first dim values of y (in shared memory) to a row whose type is not quantised.
__device__ static void write_floats(const KvPlane &p, size_t row, const float *y) {
    char *data = codes_of(p, row);
    for (int i = threadIdx.x; i < p.dim; i += blockDim.x) {
        if (p.type == KV_F32) ((float *)data)[i] = y[i];
        else ((uint16_t *)data)[i] = p.type == KV_F16 ? KV_TO_HALF(y[i]) : bf16_of_value(y[i]);
    }
}

// Writes y to a row of plane p and, if tail is not NULL, to a row of the tail, which has the same rotation. Rows that
// enter scores, K and tied V, get unbiased scales. Changes y.
__device__ static void write_row(const KvPlane &p, size_t row, bool unbiased, float *y, const KvPlane *tail,
                                 size_t tail_row) {
    __shared__ uint8_t code[KV_ROTATION];
    const int group = kv_group(p.type);
    for (int g = 0; group && g < p.dim; g += KV_ROTATION) kv_rotate(y + g, 0.0625f);
    __syncthreads();
    if (tail) write_floats(*tail, tail_row, y);
    if (!group) write_floats(p, row, y);
    for (int g = 0; group && g < p.dim; g += KV_ROTATION)
        kv_encode(p.type, unbiased, y + g, code, (uint32_t *)(codes_of(p, row) + kv_row_bytes(p.type, g)),
                  scales_of(p, row) + g / group);
}

__device__ static void dump_head(float *dump, size_t head, const float *u, int head_dim) {
    for (int i = threadIdx.x; dump && i < head_dim; i += blockDim.x) dump[head * head_dim + i] = u[i];
}

// u = norm(from; w), then with inv_freq RoPE at a position, in shared memory. normed: false: without the norm.
__device__ static void load_head(float *u, const float *from, int hd, bool normed, const float *w, float eps) {
    float squares = 0;
    for (int i = threadIdx.x; i < hd; i += blockDim.x) squares += from[i] * from[i];
    const float factor = normed ? rms_factor(block_sum(squares), hd, eps) : 1;
    for (int i = threadIdx.x; i < hd; i += blockDim.x) u[i] = from[i] * factor * (w ? w[i] : 1);
    __syncthreads();
}
__device__ static void rope_head(float *u, int half, const Rope &rope, int pos) {
    for (int i = threadIdx.x; i < rope.n_pairs; i += blockDim.x) {     // f64: a position times a frequency is large
        const double angle = pos * rope.inv_freq[i];
        const float c = (float)cos(angle), s = (float)sin(angle), a = u[i], b = u[i + half];
        u[i] = a * c - b * s;
        u[i + half] = a * s + b * c;
    }
    __syncthreads();
}

// qkv_store: q = rope(norm(q; w_q)) in the order and rotation of the cache; rows of K and V to the cache
//   shapes    q (n_rows, n_heads, head_dim), k and v (n_rows, n_kv_heads, head_dim)
//   launch    grid (n_rows, n_heads + 2 n_kv_heads), block 32: one head of q, k or v of one row
//   traffic   reads q, k, v once, writes q and the rows of the cache
//   numerics  f32, angles in f64; codes bit for bit as on the CPU (parts/kv.h)
//   see       ref_qkv_store
//   fast twin qkv_store_kernel: four heads of a row in a block share the sines and cosines; in decode steps attention
//             may carry it out in its own launch
static __global__ void qkv_store_kernel(QkvStore o, Batch b, Cache c, Cache dst, bool staged) {
    __shared__ float u[MAX_HEAD_DIM], y[MAX_HEAD_DIM];                 // y: u in the order of the cache
    const int r = blockIdx.x, hd = c.head_dim, half = hd / 2, n_q = o.q ? o.n_heads : 0;
    const Row row = b.rows[r];
    const Segment seg = b.segs[row.seg];
    const int len = b.len[seg.seq], pos = len + row.depth;
    if ((int)blockIdx.y < n_q) {
        const size_t head = (size_t)r * n_q + blockIdx.y;
        load_head(u, o.q + head * hd, hd, true, o.w_q, o.eps);
        dump_head(o.dump_q, head, u, hd);
        __syncthreads();
        rope_head(u, half, o.rope, pos);
        dump_head(o.dump_q_pos, head, u, hd);
        for (int i = threadIdx.x; i < hd; i += blockDim.x)             // tied: K's factor fold is applied to q instead
            y[tied_index(c, i)] = c.n_rot && i % half >= c.n_rot ? u[i] * c.fold[i] : u[i];
        for (int g = 0; kv_group(c.k.type) && g < hd; g += KV_ROTATION) kv_rotate(y + g, 0.125f);
        __syncthreads();
        for (int i = threadIdx.x; i < hd; i += blockDim.x) o.q[head * hd + i] = y[i];
        return;
    }
    const bool is_v = (int)blockIdx.y >= n_q + c.n_kv_heads;
    const int g = ((int)blockIdx.y - n_q) % c.n_kv_heads;
    const size_t head = (size_t)r * c.n_kv_heads + g;
    load_head(u, (is_v ? o.v : o.k) + head * hd, hd, !is_v || o.v_norm, is_v ? NULL : o.w_k, o.eps);
    dump_head(is_v ? o.dump_v : o.dump_k, head, u, hd);
    __syncthreads();
    if (!is_v) rope_head(u, half, o.rope, pos);
    if (!is_v) dump_head(o.dump_k_pos, head, u, hd);
    for (int i = threadIdx.x; i < hd; i += blockDim.x) y[tied_index(c, i)] = u[i];

    const Cache tail = tail_of(c);
    const int slot = staged ? seg.first + row.index : (len + row.index) % dst.slots;
    const size_t tail_row = tail.slots ? cache_row(tail, seg.seq, g, (len + row.index) % tail.slots) : 0;
    write_row(is_v ? dst.v : dst.k, cache_row(dst, staged ? 0 : seg.seq, g, slot), !is_v || c.n_rot > 0, y,
              !tail.slots ? NULL : is_v ? &tail.v : &tail.k, tail_row);
}

static void plain_qkv_store(const QkvStore *o) {
    const Cache *c = o->cache;
    if (c->head_dim > MAX_HEAD_DIM) plain_refuse("head_dim: expected at most 512", c->head_dim);
    launch("qkv_store", dim3(o->batch->n_rows, (o->q ? o->n_heads : 0) + (o->k ? 2 * c->n_kv_heads : 0)), WARP,
           qkv_store_kernel, *o, *o->batch, *c, o->staging ? *o->staging : *c, o->staging != NULL);
}

// attend: out = sum over j of softmax_j(scale * q . k[j]) v[j]
//   shapes    q, out (n_rows, n_heads, head_dim); keys in the cache, in staging, or in the tail
//   launch    grid (n_heads, n_rows), block 256: one head of one row; warp w takes the keys j with j mod 8 = w
//   traffic   reads the visible rows of K and V once for each head of q and each row
//   numerics  f32; a warp's keys in ascending order: when the largest score grows, the sums so far are scaled down; at
//             the end the sums of the 8 warps, in order
//   see       ref_attend_head
//   fast twin attend_half_kernel and attend_coded_kernel: the heads that share a KV head share one read of the cache,
//             tensor cores multiply, and splits of long contexts run at the same time, which attend_join_kernel
//             combines; flash_kernel for prompts: many rows share the reads. Few keys: 7 times as fast, 32768 keys of
//             the E4B: 116 times
template <int N> struct Softmax {                      // of some keys: sum[m] belongs to value lane + 32 m
    float largest, total, sum[N];
};

// Adds a key with the values k and v to the sums of a warp; q is 0 beyond the head's values. k_dim: values from there
// on are those of v (a tied cache).
template <int N>
__device__ static void add_key(Softmax<N> *x, const float *q, const float *k, const float *v, int k_dim, float scale,
                               float v_factor) {
    float s = 0;
#pragma unroll
    for (int m = 0; m < N; m++) s = fmaf(q[m], (int)threadIdx.x % WARP + WARP * m < k_dim ? k[m] : v[m], s);
    s = scale * warp_sum(s);
    if (s == -INFINITY) return;
    const float most = fmaxf(x->largest, s), shrink = expf(x->largest - most), p = expf(s - most);
    x->largest = most;
    x->total = x->total * shrink + p;
#pragma unroll
    for (int m = 0; m < N; m++) x->sum[m] = fmaf(v_factor * p, v[m], x->sum[m] * shrink);
}

// y[i] = sum of the warps' sums / sum of their totals, in shared memory; 0 if no key was in sight.
template <int N> __device__ static void join_warps(const Softmax<N> &x, int hd, float *y) {
    __shared__ float largest[WARPS], total[WARPS], sum[WARPS][WARP * N];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    float most = -INFINITY, all = 0;
    largest[warp] = x.largest, total[warp] = x.total;
    for (int m = 0; m < N; m++) sum[warp][lane + WARP * m] = x.sum[m];
    __syncthreads();                                   // the results of all warps are complete
    for (int w = 0; w < WARPS; w++) most = fmaxf(most, largest[w]);
    for (int w = 0; w < WARPS; w++) if (total[w] != 0) all += total[w] * expf(largest[w] - most);
    for (int i = threadIdx.x; i < hd; i += ROW_THREADS) {
        float v = 0;
        for (int w = 0; w < WARPS; w++) if (total[w] != 0) v += sum[w][i] * expf(largest[w] - most);
        y[i] = all == 0 ? 0 : v / all;
    }
    __syncthreads();                                   // y is complete
}

template <int N>
static __global__ void attend_kernel(Attend o, Batch b, Cache c, Cache tail, Cache staging, bool staged,
                                     BlockList blocks) {
    __shared__ float y[MAX_HEAD_DIM];
    const int r = blockIdx.y, h = blockIdx.x, hd = c.head_dim, g = h / (o.n_heads / c.n_kv_heads);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const Row row = b.rows[r];
    const Segment seg = b.segs[row.seg];
    const int len = b.len[seg.seq], pos = len + row.depth;
    const int from = o.window ? max_int(0, pos - o.window + 1) : 0;
    const bool chain = o.own == OWN_CAUSAL && seg.kind == SEG_CHAIN;
    const int to = len + (o.own == OWN_NONE ? 0 : o.own == OWN_ALL ? seg.n : rows_in_sight(&row, &seg, o.window));
    const int tail_from = reads_tail(&c, &seg, blocks.n != NULL) ? pos - c.tail_reach + 1 : to;
    const int list = r / SELECT_ROWS * c.n_kv_heads + g, n_listed = blocks.n ? blocks.n[list] : -1;
    const int32_t *listed = blocks.block + (size_t)list * blocks.n_blocks;
    float q[N], k[N] = { }, v[N];
    Softmax<N> x = { -INFINITY };
    int n_passed = 0;                                  // blocks of the list before the key
    for (int m = 0; m < N; m++)
        q[m] = lane + WARP * m < hd ? o.q[((size_t)r * o.n_heads + h) * hd + lane + WARP * m] : 0;
    for (int j = min_int(from, len) / WARPS * WARPS + warp; j < to; j += WARPS) {
        while (n_passed < n_listed && listed[n_passed] < j / SELECT_KEYS) n_passed++;
        if (n_listed >= 0 && (n_passed == n_listed || listed[n_passed] != j / SELECT_KEYS)) continue;
        const int own = j - len;                       // j < len: position j; else row `own` of the segment
        if (own < 0 || chain ? j < from
            : o.own == OWN_CAUSAL && !(row.ancestors >> own & 1)) continue;
        const bool is_staged = staged && own >= 0;
        const Cache &at = is_staged ? staging : j >= tail_from ? tail : c;
        const size_t key = cache_row(at, is_staged ? 0 : seg.seq, g, is_staged ? seg.first + own : j % at.slots);
        read_row<N>(k, at.k, key);
        read_row<N>(v, at.v, key);
        add_key(&x, q, k, v, at.k.dim, o.scale, at.n_rot ? kv_tied_factor(at.v.type) : 1);
    }
    join_warps(x, hd, y);
    for (int i = 0; kv_group(c.v.type) && i < hd; i += KV_ROTATION) kv_rotate_back(y + i);
    __syncthreads();
    for (int i = threadIdx.x; i < hd; i += ROW_THREADS)
        store_act(o.out, r, o.n_heads * hd, h * hd + i, y[tied_index(c, i)]);
}

static void plain_attend(const Attend *o) {
    const Cache *c = o->cache;
    const BlockList none = { };
    const int hd = c->head_dim;
    if (hd > MAX_HEAD_DIM) plain_refuse("head_dim: expected at most 512", hd);
    if (o->out.q && hd % 32) plain_refuse("heads of whole groups of 32 for int8", hd);
    if (o->store) plain_qkv_store(o->store);
    launch("attend", dim3(o->n_heads, o->batch->n_rows), ROW_THREADS,
           hd <= 128 ? attend_kernel<4> : hd <= 256 ? attend_kernel<8> : attend_kernel<16>, *o, *o->batch, *c,
           tail_of(*c), o->staging ? *o->staging : *c, o->staging != NULL, o->blocks ? *o->blocks : none);
}

// block_select, part 1: means[seg][g][n] = mean of the keys of block n, for whole blocks
//   shapes    means (n_segs, n_kv_heads, n_blocks, head_dim)
//   launch    grid (n_blocks, n_kv_heads, n_segs), block 256: the mean of one block of keys
//   traffic   reads every key once
//   numerics  f32, ascending slots
//   see       ref_mean_key
//   fast twin block_mean_kernel: means in f16, which tensor cores multiply
static __global__ void block_mean_kernel(BlockSelect o, Batch b, Cache c) {
    const int n = blockIdx.x, g = blockIdx.y;
    const Segment seg = b.segs[blockIdx.z];
    float *mean = (float *)o.means + (((size_t)blockIdx.z * c.n_kv_heads + g) * o.out.n_blocks + n) * c.head_dim;
    if ((n + 1) * SELECT_KEYS > b.len[seg.seq] + seg.n) return;
    for (int i = threadIdx.x; i < c.head_dim; i += blockDim.x) {
        float sum = 0;
        for (int k = 0; k < SELECT_KEYS; k++) sum += key_value(c, cache_row(c, seg.seq, g, n * SELECT_KEYS + k), i);
        mean[i] = sum / SELECT_KEYS;
    }
}

// A block of rows, which share their selected blocks of keys.
struct RowBlock {
    int  seg, first, n_rows;  // segment; first row of the step, number of rows
    int  pos, n;              // position of the first row; blocks of keys in sight
    bool all, of_prompt;      // the rows attend to all keys; they are rows of one prompt
};

__device__ static RowBlock row_block(const Batch &b, int number) {
    const int first = number * SELECT_ROWS, last = min_int(first + SELECT_ROWS, b.n_rows) - 1;
    const Row top = b.rows[first], end = b.rows[last];
    const Segment seg = b.segs[top.seg];
    const int len = b.len[seg.seq];
    const bool prompt = end.seg == top.seg && seg.n > STEP_ROWS;
    const RowBlock v = { top.seg, first, last - first + 1, len + top.index, (len + end.index) / SELECT_KEYS + 1,
                         !prompt || end.index >= seg.n - seg.n_dense, prompt };
    return v;
}

// block_select, part 2: s[h][n] = log sum over rows j of exp(scale * q[j][h] . mean[n])
//   shapes    scores (n_rows / 64, n_heads, n_blocks)
//   launch    grid (n_blocks, n_heads, n_rows / 64), block 256: a warp takes every eighth row
//   traffic   reads q of 64 rows once for each block of keys
//   numerics  f32 dot products, f64 sums
//   see       ref_block_score
//   fast twin block_score_kernel: a product of tiles on tensor cores
static __global__ void block_score_kernel(BlockSelect o, Batch b, Cache c) {
    __shared__ float score[SELECT_ROWS];
    const int n = blockIdx.x, h = blockIdx.y, g = h / (o.n_heads / c.n_kv_heads), hd = c.head_dim;
    const RowBlock v = row_block(b, blockIdx.z);
    const float *mean = (const float *)o.means + (((size_t)v.seg * c.n_kv_heads + g) * o.out.n_blocks + n) * hd;
    if (v.all || n >= v.n) return;
    for (int r = threadIdx.x / WARP; r < SELECT_ROWS; r += WARPS) {
        const bool sees = r < v.n_rows && v.pos + r >= (n + 1) * SELECT_KEYS - 1;
        const float *q = o.q + ((size_t)(v.first + r) * o.n_heads + h) * hd;
        float sum = 0;
        for (int i = threadIdx.x % WARP; sees && i < hd; i += WARP) sum = fmaf(q[i], mean[i], sum);
        sum = warp_sum(sum);
        if (threadIdx.x % WARP == 0) score[r] = sees ? sum * o.scale : -INFINITY;
    }
    __syncthreads();
    if (threadIdx.x) return;
    float largest = -INFINITY;
    double sum = 0;
    for (int r = 0; r < SELECT_ROWS; r++) largest = fmaxf(largest, score[r]);
    for (int r = 0; r < SELECT_ROWS; r++) sum += score[r] == -INFINITY ? 0 : exp((double)score[r] - largest);
    o.scores[((size_t)blockIdx.z * o.n_heads + h) * o.out.n_blocks + n] =
        sum == 0 ? -INFINITY : (float)(largest + log(sum));
}

// block_select, part 3: w[n] = the largest softmax_n(s[h][n]) of the heads of a KV head; the list of blocks
//   shapes    weights and lists (n_rows / 64, n_kv_heads, n_blocks)
//   launch    grid (n_rows / 64, n_kv_heads), block 256: one list; with a density thread t ranks blocks t, t + 256, ...
//   traffic   reads the scores twice; with a density the weights once for each block
//   numerics  f64
//   see       ref_select
//   fast twin block_list_kernel: finds the last weight that is listed by its bits
static __global__ void block_list_kernel(BlockSelect o, Batch b, int n_kv_heads) {
    const int list = blockIdx.x * n_kv_heads + blockIdx.y, group = o.n_heads / n_kv_heads;
    const RowBlock v = row_block(b, blockIdx.x);
    float *w = o.weights + (size_t)list * o.out.n_blocks, most = 0;
    int32_t *block = o.out.block + (size_t)list * o.out.n_blocks, n = 0;
    const int near = v.pos / SELECT_KEYS - SELECT_NEAR + 1;
    for (int i = threadIdx.x; i < v.n && !v.all; i += blockDim.x) w[i] = 0;
    for (int h = blockIdx.y * group; h < (int)(blockIdx.y + 1) * group && !v.all; h++) {
        const float *s = o.scores + ((size_t)blockIdx.x * o.n_heads + h) * o.out.n_blocks;
        float largest = -INFINITY;
        double sum = 0;
        for (int i = threadIdx.x; i < v.n; i += blockDim.x) largest = fmaxf(largest, s[i]);
        largest = block_max(largest);
        for (int i = threadIdx.x; i < v.n; i += blockDim.x) sum += exp((double)s[i] - largest);
        sum = block_sum(sum);
        for (int i = threadIdx.x; i < v.n && sum > 0; i += blockDim.x)
            w[i] = fmaxf(w[i], (float)(exp((double)s[i] - largest) / sum));
    }
    for (int i = threadIdx.x; i < v.n && !v.all; i += blockDim.x) most = fmaxf(most, w[i]);
    most = block_max(most);                            // after it, every thread sees all of w
    const int always = min_int(SELECT_FIRST, v.n) + max_int(0, v.n - max_int(near, min_int(SELECT_FIRST, v.n)));
    const int room = (int)ceilf(o.density * v.n) - always;
    for (int i = threadIdx.x; i < v.n && !v.all; i += blockDim.x) {    // block[i] = is block i listed?
        bool listed = o.alpha >= 1 || w[i] >= o.alpha * (double)most;
        int before = 0;                                // blocks that rank above block i
        for (int k = SELECT_FIRST; k < near && o.density > 0; k++) before += w[k] > w[i] || (w[k] == w[i] && k < i);
        if (o.density > 0) listed = before < room;
        block[i] = listed || i < SELECT_FIRST || i >= near;
    }
    __syncthreads();
    if (threadIdx.x) return;
    for (int i = 0; i < v.n && !v.all; i++)            // n <= i, so that no answer is overwritten before it is read
        if (block[i]) block[n++] = i;
    o.out.n[list] = v.all ? -1 : n;
    if (!v.of_prompt) return;
    atomicAdd((unsigned long long *)&o.count[0], (unsigned long long)(v.all ? v.n : n));
    atomicAdd((unsigned long long *)&o.count[1], (unsigned long long)v.n);
}

static void plain_block_select(const BlockSelect *o) {
    const Cache *c = o->cache;
    const int lists = div_up(o->batch->n_rows, SELECT_ROWS);
    launch("block_select", dim3(o->out.n_blocks, c->n_kv_heads, o->batch->n_segs), ROW_THREADS, block_mean_kernel, *o,
           *o->batch, *c);
    launch("block_select", dim3(o->out.n_blocks, o->n_heads, lists), ROW_THREADS, block_score_kernel, *o, *o->batch,
           *c);
    launch("block_select", dim3(lists, c->n_kv_heads), ROW_THREADS, block_list_kernel, *o, *o->batch, c->n_kv_heads);
}

// log sum over i of exp(z[i]), by a whole block: the terms in f32, their sum in f64.
__device__ static double block_logsumexp(const float *z, int n) {
    float largest = -INFINITY;
    double sum = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) largest = fmaxf(largest, z[i]);
    largest = block_max(largest);
    if (isinf(largest)) largest = 0;                   // all z -Inf, or one +Inf: the result is that Inf
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += expf(z[i] - largest);
    return largest + log(block_sum(sum));
}

// attn_mass, part 1: probs[r][h][j] = softmax_j(scale * q[r][h] . k[j])
//   shapes    probs (n_rows, n_heads, n_keys)
//   launch    grid (n_heads, n_rows), block 256: one head of one row; 8 threads share a key
//   traffic   reads the keys once for each head, probs twice
//   numerics  f32, sums in f64
//   see       ref_attn_mass
//   fast twin mass_scores_kernel, mass_softmax_kernel: a warp reads a key once for all rows and heads
static __global__ void attn_mass_kernel(AttnMass o, Batch b, Cache c) {
    const int r = blockIdx.y, h = blockIdx.x, hd = c.head_dim, g = h / (o.n_heads / c.n_kv_heads);
    const int seq = b.segs[b.rows[r].seg].seq, n = b.len[seq] + b.rows[r].index + 1;
    const float *q = o.q + ((size_t)r * o.n_heads + h) * hd;
    float *probs = o.probs + ((size_t)r * o.n_heads + h) * o.n_keys;
    for (int j0 = 0; j0 < n; j0 += ROW_THREADS / KEY_LANES) {
        const int j = j0 + threadIdx.x / KEY_LANES;
        const size_t key = cache_row(c, seq, g, j % c.slots);
        float s = 0;
        for (int i = threadIdx.x % KEY_LANES; j < n && i < hd; i += KEY_LANES) s = fmaf(q[i], key_value(c, key, i), s);
        for (int m = 1; m < KEY_LANES; m *= 2) s += shuffle_xor(s, m);
        if (j < n && threadIdx.x % KEY_LANES == 0) probs[j] = s * o.scale;
    }
    __syncthreads();
    const double lse = block_logsumexp(probs, n);
    for (int j = threadIdx.x; j < n; j += blockDim.x) probs[j] = (float)exp(probs[j] - lse);
}

// attn_mass, part 2: mass[r][j] = max(mass[r][j], the largest probs[r][h][j])
//   shapes    mass (n_rows, n_keys)
//   launch    grid n_rows, block 256: a block takes the keys of a row
//   traffic   reads probs once
//   numerics  exact
//   see       ref_attn_mass
//   fast twin mass_max_kernel: a thread for each key, in many blocks
static __global__ void attn_max_kernel(AttnMass o, Batch b) {
    const int r = blockIdx.x, n = b.len[b.segs[b.rows[r].seg].seq] + b.rows[r].index + 1;
    for (int j = threadIdx.x; j < n; j += blockDim.x) {
        float most = o.mass[(size_t)r * o.n_keys + j];
        for (int h = 0; h < o.n_heads; h++) most = fmaxf(most, o.probs[((size_t)r * o.n_heads + h) * o.n_keys + j]);
        o.mass[(size_t)r * o.n_keys + j] = most;
    }
}

static void plain_attn_mass(const AttnMass *o) {
    launch("attn_mass", dim3(o->n_heads, o->batch->n_rows), ROW_THREADS, attn_mass_kernel, *o, *o->batch, *o->cache);
    launch("attn_mass", o->batch->n_rows, ROW_THREADS, attn_max_kernel, *o, *o->batch);
}

// Copies words of 16 bits from row to row; thread t of a block has words t, t + 256, ... of every row, so that copies
// which follow each other need no barrier.
__device__ static void move_words(void *to, const void *from, size_t bytes) {
    for (size_t i = threadIdx.x; i < bytes / 2; i += blockDim.x) ((uint16_t *)to)[i] = ((const uint16_t *)from)[i];
}
__device__ static void move_row(const KvPlane &to, size_t to_row, const KvPlane &from, size_t from_row) {
    if (!to.dim) return;
    move_words(codes_of(to, to_row), codes_of(from, from_row), kv_row_bytes(to.type, to.dim));
    if (to.scale) move_words(scales_of(to, to_row), scales_of(from, from_row), kv_scale_bytes(to.type, to.dim));
}

// kv_commit, part 1: row path[k] of a tree moves to slot len + k, k ascending, in one cache
//   shapes    n_accept (n_segs), path (n_segs, STEP_ROWS)
//   launch    grid (n_segs, n_kv_heads), block 256: the rows of one head, one after the other
//   traffic   reads and writes the accepted rows that move
//   numerics  exact
//   see       ref_kv_commit
//   fast twin kv_move_kernel: all caches in one launch
static __global__ void kv_move_kernel(Batch b, Cache c, const int32_t *n_accept, const int32_t *path) {
    const Segment seg = b.segs[blockIdx.x];
    const int len = b.len[seg.seq], g = blockIdx.y;
    for (int k = 0; seg.kind == SEG_TREE && k < n_accept[blockIdx.x]; k++) {
        const int from = path[blockIdx.x * STEP_ROWS + k];
        const size_t a = cache_row(c, seg.seq, g, (len + k) % c.slots);
        const size_t z = cache_row(c, seg.seq, g, (len + from) % c.slots);
        if (from == k) continue;
        move_row(c.k, a, c.k, z);
        move_row(c.v, a, c.v, z);
    }
}

// kv_commit, part 2: counts[seq][token] += 1 for each row that stays, then len += n_accept
//   shapes    counts (n_seqs, vocab)
//   launch    grid n_segs, block 256: a segment
//   traffic   a few words
//   numerics  integers
//   see       ref_kv_commit
//   fast twin kv_lengths_kernel: the same
static __global__ void kv_lengths_kernel(KvCommit o, Batch b) {
    const Segment seg = b.segs[blockIdx.x];
    const int n = o.n_accept[blockIdx.x];
    for (int k = threadIdx.x; o.counts && k < n; k += blockDim.x) {
        const int from = seg.kind == SEG_TREE ? o.path[blockIdx.x * STEP_ROWS + k] : k;
        atomicAdd(&o.counts[(size_t)seg.seq * o.vocab + valid_token(b.rows[seg.first + from].token, o.vocab)], 1);
    }
    if (threadIdx.x == 0) b.len[seg.seq] += n;
}

static void plain_kv_commit(const KvCommit *o) {
    for (int i = 0; i < o->n_caches && o->path; i++) {
        const Cache *c = &o->caches[i];
        const dim3 grid(o->batch->n_segs, c->n_kv_heads);
        launch("kv_commit", grid, ROW_THREADS, kv_move_kernel, *o->batch, *c, o->n_accept, o->path);
        if (c->tail_slots)
            launch("kv_commit", grid, ROW_THREADS, kv_move_kernel, *o->batch, tail_of(*c), o->n_accept, o->path);
    }
    launch("kv_commit", o->batch->n_segs, ROW_THREADS, kv_lengths_kernel, *o, *o->batch);
}

// kv_copy: the last min(n, slots) rows of every segment go from staging to their slots of the ring
//   shapes    as the caches
//   launch    grid (n_rows, n_kv_heads), block 256: a block copies one row of one head
//   traffic   reads and writes the rows once
//   numerics  exact
//   see       ref_kv_copy
//   fast twin kv_copy_kernel: all heads of a row in a block, 16 bytes at a time
static __global__ void kv_copy_kernel(Batch b, Cache c, Cache staging) {
    const Row row = b.rows[blockIdx.x];
    const Segment seg = b.segs[row.seg];
    if (row.index < seg.n - c.slots) return;
    const size_t to = cache_row(c, seg.seq, blockIdx.y, (b.len[seg.seq] + row.index) % c.slots);
    const size_t from = cache_row(staging, 0, blockIdx.y, seg.first + row.index);
    move_row(c.k, to, staging.k, from);
    move_row(c.v, to, staging.v, from);
}

static void plain_kv_copy(const KvCopy *o) {
    launch("kv_copy", dim3(o->batch->n_rows, o->cache->n_kv_heads), ROW_THREADS, kv_copy_kernel, *o->batch, *o->cache,
           *o->staging);
}

// ==== [5] Images =====================================================================================================
// Rows are the patches of a picture. The fast twins of the small kernels do the same with loads of 16 bytes.

// clamp: out = x, not below lo and not above hi; a NaN stays
//   shapes    x, out n values, may be the same memory
//   launch    grid n / 256, block 256: a thread for each value
//   traffic   8 bytes a value
//   numerics  exact
//   see       ref_clamp
static __global__ void clamp_kernel(const float *x, Range range, size_t n, float *out) {
    const size_t i = (size_t)blockIdx.x * ROW_THREADS + threadIdx.x;
    if (i < n) out[i] = x[i] < range.lo ? range.lo : x[i] > range.hi ? range.hi : x[i];
}

static dim3 blocks_of_values(size_t n) { return dim3((unsigned)((n + ROW_THREADS - 1) / ROW_THREADS)); }

static void plain_clamp(const Clamp *o) {
    const size_t n = (size_t)o->n_rows * o->cols;
    launch("clamp", blocks_of_values(n), ROW_THREADS, clamp_kernel, o->x, o->range, n, o->out);
}

// gelu_product: out = gelu(gate) * up
//   shapes    gate, up, out n values; out may be gate or up
//   launch    grid n / 256, block 256: a thread for each value
//   traffic   12 bytes a value
//   numerics  f32
//   see       ref_gelu_product
static __global__ void gelu_product_kernel(const float *gate, const float *up, size_t n, float *out) {
    const size_t i = (size_t)blockIdx.x * ROW_THREADS + threadIdx.x;
    if (i < n) out[i] = activation(ACT_GELU, gate[i]) * up[i];
}

static void plain_gelu_product(const GeluProduct *o) {
    const size_t n = (size_t)o->n_rows * o->cols;
    launch("gelu_product", blocks_of_values(n), ROW_THREADS, gelu_product_kernel, o->gate, o->up, n, o->out);
}

// layer_norm: u = x + add + add_rows;  out = w * (u - mean(u)) / sqrt(var(u) + eps) + bias
//   shapes    x, add_rows, out (n_rows, cols); add, w, bias (cols)
//   launch    grid n_rows, block 256: a block computes a row; thread t has columns t, t + 256, ...
//   traffic   reads x and add_rows three times (twice from a cache), writes out once
//   numerics  f32; the mean first, then the squares of what is left; sums of 256 threads in a fixed order
//   see       ref_layer_norm
__device__ static float layer_norm_input(const LayerNorm &o, size_t row, int i) {
    return o.x[row + i] + (o.add ? o.add[i] : 0) + (o.add_rows ? o.add_rows[row + i] : 0);
}

static __global__ void layer_norm_kernel(LayerNorm o) {
    const size_t row = (size_t)blockIdx.x * o.cols;
    float sum = 0, squares = 0;
    for (int i = threadIdx.x; i < o.cols; i += blockDim.x) sum += layer_norm_input(o, row, i);
    const float mean = block_sum(sum) / o.cols;
    for (int i = threadIdx.x; i < o.cols; i += blockDim.x) {
        const float d = layer_norm_input(o, row, i) - mean;
        squares += d * d;
    }
    const float factor = rms_factor(block_sum(squares), o.cols, o.eps);
    for (int i = threadIdx.x; i < o.cols; i += blockDim.x)
        o.out[row + i] = o.w[i] * ((layer_norm_input(o, row, i) - mean) * factor) + o.bias[i];
}

static void plain_layer_norm(const LayerNorm *o) {
    launch("layer_norm", o->n_rows, ROW_THREADS, layer_norm_kernel, *o);
}

// rope_2d: q = rope(norm(q; w_q)), k = rope(norm(k; w_k)), v = v / rms(v), of the heads of each row
//   shapes    q, k, v (n_rows, n_heads, head_dim); pos (n_rows, 2)
//   launch    grid (n_rows, 3 n_heads), block 32: a head of q, k or v
//   traffic   reads and writes q, k, v once
//   numerics  f32, angles in f64
//   see       ref_rope_2d
static __global__ void rope_2d_kernel(Rope2d o) {
    __shared__ float u[MAX_IMAGE_HEAD_DIM];
    const int r = blockIdx.x, which = blockIdx.y / o.n_heads, hd = o.head_dim;
    float *head = (which == 0 ? o.q : which == 1 ? o.k : o.v) +
                  ((size_t)r * o.n_heads + blockIdx.y % o.n_heads) * hd;
    load_head(u, head, hd, true, which == 0 ? o.w_q : which == 1 ? o.w_k : NULL, o.eps);
    const Rope rope = { o.inv_freq, hd / 4 };
    for (int axis = 0; axis < 2 && which < 2; axis++) rope_head(u + axis * hd / 2, hd / 4, rope, o.pos[2 * r + axis]);
    for (int i = threadIdx.x; i < hd; i += blockDim.x) head[i] = u[i];
}

static void plain_rope_2d(const Rope2d *o) {
    if (o->head_dim > MAX_IMAGE_HEAD_DIM) plain_refuse("rope_2d: heads of at most 128 values", o->head_dim);
    launch("rope_2d", dim3(o->n_rows, 3 * o->n_heads), WARP, rope_2d_kernel, *o);
}

// attend_all: out[r][h] = sum over all keys j of softmax_j(scale * q[r][h] . k[j][h]) v[j][h]
//   shapes    q, out (n_rows, n_heads, head_dim), k, v (n_keys, n_heads, head_dim)
//   launch    grid (n_heads, n_rows), block 256: one head of one row; warp w takes the keys j with j mod 8 = w
//   traffic   reads all rows of k and v once for each head of q and each row
//   numerics  f32, as attend
//   see       ref_attend_all
//   fast twin attend_all_kernel there: 64 rows of q share the reads, tensor cores multiply
static __global__ void attend_all_kernel(AttendAll o) {
    constexpr int N = (int)MAX_IMAGE_HEAD_DIM / (int)WARP;
    __shared__ float y[MAX_IMAGE_HEAD_DIM];
    const int hd = o.head_dim, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const size_t stride = (size_t)o.n_heads * hd, head = (size_t)blockIdx.x * hd, row = blockIdx.y * stride + head;
    float q[N], k[N], v[N];
    Softmax<N> x = { -INFINITY };
    for (int m = 0; m < N; m++) q[m] = lane + WARP * m < hd ? o.q[row + lane + WARP * m] : 0;
    for (int j = warp; j < o.n_keys; j += WARPS) {
        for (int m = 0; m < N; m++) {
            const int i = lane + WARP * m;
            k[m] = i < hd ? o.k[j * stride + head + i] : 0;
            v[m] = i < hd ? o.v[j * stride + head + i] : 0;
        }
        add_key(&x, q, k, v, MAX_IMAGE_HEAD_DIM, o.scale, 1);
    }
    join_warps(x, hd, y);
    for (int i = threadIdx.x; i < hd; i += ROW_THREADS) o.out[row + i] = y[i];
}

static void plain_attend_all(const AttendAll *o) {
    if (o->head_dim > MAX_IMAGE_HEAD_DIM) plain_refuse("attend_all: heads of at most 128 values", o->head_dim);
    launch("attend_all", dim3(o->n_heads, o->n_rows), ROW_THREADS, attend_all_kernel, *o);
}

// pool: out[Y][X] = (factor * mean of the side x side rows of a square - sub) * mul
//   shapes    x (h, w, cols), out (h / side, w / side, cols); sub, mul (cols)
//   launch    grid h w / side^2, block 256: a block computes a row of out
//   traffic   reads x once, writes out once
//   numerics  f32, row by row of the square
//   see       ref_pool
static __global__ void pool_kernel(Pool o) {
    const int width = o.w / o.side, Y = blockIdx.x / width, X = blockIdx.x % width;
    for (int i = threadIdx.x; i < o.cols; i += blockDim.x) {
        float sum = 0;
        for (int y = Y * o.side; y < (Y + 1) * o.side; y++)
            for (int x = X * o.side; x < (X + 1) * o.side; x++) sum += o.x[((size_t)y * o.w + x) * o.cols + i];
        const float v = o.factor * (sum / (float)(o.side * o.side));
        o.out[(size_t)blockIdx.x * o.cols + i] = o.sub ? (v - o.sub[i]) * o.mul[i] : v;
    }
}

static void plain_pool(const Pool *o) {
    launch("pool", o->w / o->side * (o->h / o->side), ROW_THREADS, pool_kernel, *o);
}

// ==== [6] Output =====================================================================================================

// top_k: the top_k largest logits of a row in descending order, the lower id first on ties
//   shapes    z (n_rows, n), ids (n_rows, n) or NULL: id i of logit i; top_ids, top_logits (n_rows, top_k)
//   launch    grid n_rows, block 256: a block looks through a row top_k times
//   traffic   top_k times the logits
//   numerics  exact
//   see       ref_summary
//   fast twin summary_kernel: many blocks share a row and read it once
static __global__ void top_k_kernel(const float *z, const int32_t *ids, int n, int top_k, int32_t *top_ids,
                                    float *top_logits) {
    const size_t row = blockIdx.x;
    uint64_t key = ~(uint64_t)0;
    for (int j = 0; j < top_k; j++) {
        key = next_best(z + row * n, ids ? ids + row * n : NULL, n, key);
        if (threadIdx.x) continue;
        top_ids[row * top_k + j] = id_of_key(key);
        top_logits[row * top_k + j] = ids ? logit_of_key(key) : z[row * n + id_of_key(key)];
    }
}

// logsumexp: out[r] = log sum over i of exp(z[r][i]);  with ids, logprob: out[r] = z[r][ids[r]] - that
//   shapes    z (n_rows, n), ids and out (n_rows)
//   launch    grid n_rows, block 256: a block takes a row
//   traffic   reads the logits twice
//   numerics  terms in f32, sum in f64
//   see       ref_logsumexp
//   fast twin summary_kernel: one pass, many blocks for a row
static __global__ void logsumexp_kernel(const float *z, int n, const int32_t *ids, float *out) {
    const float *row = z + (size_t)blockIdx.x * n;
    const double lse = block_logsumexp(row, n);
    const int id = ids ? ids[blockIdx.x] : 0;
    if (threadIdx.x) return;
    if (!ids) out[blockIdx.x] = (float)lse;
    else out[blockIdx.x] = id < 0 || id >= n ? NAN : (float)(row[id] - lse);
}

static void plain_logprob(const Logprob *o) {
    launch("logprob", o->n_rows, ROW_THREADS, logsumexp_kernel, o->logits, o->vocab, o->ids, o->out);
}

// Rows r .. of an Act.
static Act act_from(const Act &a, size_t r, int cols) {
    const Act from = { a.f ? a.f + r * cols : NULL, a.q ? a.q + r * cols : NULL, a.s ? a.s + r * cols / 32 : NULL };
    return from;
}

static void plain_head(const Head *o) {
    const int vocab = o->w->rows, cols = o->w->cols;
    const Act y = prepare("head", &o->in, o->n_rows, cols, o->hidden);
    if (!o->logits && !o->top_k && !o->logsumexp) return;
    const int step = o->logits ? o->n_rows : TILE_ROWS;                // scratch has room for so many rows of logits
    for (int r = 0; r < o->n_rows; r += step) {
        const int n = min_int(step, o->n_rows - r);
        float *z = o->logits ? o->logits : plain.z;
        launch("head", tiles(n, vocab), ROW_THREADS, product_kernel, *o->w, act_from(y, r, cols), n, o->cap, z);
        if (o->top_k)
            launch("head", n, ROW_THREADS, top_k_kernel, z, (const int32_t *)NULL, vocab, o->top_k,
                   o->top_ids + (size_t)r * o->top_k, o->top_logits + (size_t)r * o->top_k);
        if (o->logsumexp)
            launch("head", n, ROW_THREADS, logsumexp_kernel, z, vocab, (const int32_t *)NULL, o->logsumexp + r);
    }
}

// head_centroid, part 1: the tokens of the n_used best centroids of a row
//   shapes    scores (n_rows, n_centroids), order (n_centroids, per), tokens (n_rows, n_used, per)
//   launch    grid n_rows, block 256: a block looks through the scores n_used times
//   traffic   n_used times the scores of a row
//   numerics  exact
//   see       ref_head_centroid
//   fast twin summary_kernel, which chooses centroids as it does tokens
static __global__ void centroid_tokens_kernel(HeadCentroid o, int n_centroids, int per, int first, int32_t *tokens) {
    uint64_t key = ~(uint64_t)0;
    for (int k = 0; k < o.n_used; k++) {
        key = next_best(o.scores + (size_t)(first + blockIdx.x) * n_centroids, NULL, n_centroids, key);
        for (int i = threadIdx.x; i < per; i += blockDim.x)
            tokens[((size_t)blockIdx.x * o.n_used + k) * per + i] = o.order[(size_t)id_of_key(key) * per + i];
    }
}

// head_centroid, part 2: z[r][i] = w[tokens[r][i]] y[r]
//   shapes    w (vocab, cols), tokens and z (n_rows, n)
//   launch    grid (n_rows, n / 8), block 256: a warp computes one logit
//   traffic   reads a row of w for each logit
//   numerics  as matmul
//   see       ref_candidates
//   fast twin candidates_kernel: a warp computes four logits at a time, with integer dot products
static __global__ void candidates_kernel(Tensor w, Act y, const int32_t *tokens, int n, float *z) {
    const int i = blockIdx.y * WARPS + threadIdx.x / WARP;
    const size_t at = (size_t)blockIdx.x * n + i;
    float sum[TILE_ROWS];
    if (i >= n) return;                                // whole warps
    dot_rows(sum, w, tokens[at], y, blockIdx.x, 1);
    if (threadIdx.x % WARP == 0) z[at] = sum[0];
}

static void plain_head_centroid(const HeadCentroid *o) {
    const int n_centroids = o->centroids->rows, per = o->w->rows / n_centroids, n = o->n_used * per, cols = o->w->cols;
    int32_t *tokens = (int32_t *)plain.z;
    const Act y = prepare("head_centroid", &o->in, o->n_rows, cols, o->hidden);
    launch("head_centroid", tiles(o->n_rows, n_centroids), ROW_THREADS, product_kernel, *o->centroids, y, o->n_rows, 0,
           o->scores);
    for (int r = 0; r < o->n_rows; r += TILE_ROWS) {
        const int rows = min_int(TILE_ROWS, o->n_rows - r);
        float *z = o->logits + (size_t)r * n;
        launch("head_centroid", rows, ROW_THREADS, centroid_tokens_kernel, *o, n_centroids, per, r, tokens);
        launch("head_centroid", dim3(rows, div_up(n, WARPS)), ROW_THREADS, candidates_kernel, *o->w,
               act_from(y, r, cols), (const int32_t *)tokens, n, z);
        if (o->logsumexp)
            launch("head_centroid", rows, ROW_THREADS, logsumexp_kernel, z, n, (const int32_t *)NULL, o->logsumexp + r);
        launch("head_centroid", rows, ROW_THREADS, top_k_kernel, z, (const int32_t *)tokens, n, o->top_k,
               o->top_ids + (size_t)r * o->top_k, o->top_logits + (size_t)r * o->top_k);
    }
}

// ---- sample ----

// How often a token occurs: in the committed text, and in the step in the row and its ancestors.
__device__ static int count_of(const Sample &o, const Segment &seg, const Row &row, int id) {
    int n = o.counts[(size_t)seg.seq * o.vocab + id];
    for (int j = 0; j <= row.index; j++)
        n += (seg.kind == SEG_CHAIN || row.ancestors >> j & 1) &&
             valid_token(o.step_rows[seg.first + j].token, o.vocab) == id;
    return n;
}

__device__ static float penalised_logit(const Sample &o, int r, int seq, int id, int count) {
    float z = o.logits[(size_t)r * o.vocab + id];
    if (o.bias) z += o.bias[(size_t)seq * o.vocab + id];
    return count > 0 ? sample_penalised(z, count, &o.params[seq]) : z;
}

// The tokens of a row in descending order are never sorted: what a token weighs, and whether it is still there, follows
// from its logit and its key.
struct Tokens {
    const float *z;           // (n) -Inf: out
    int      n;
    float    largest, scale;  // for sample_weight
    uint64_t least_key;       // tokens with smaller keys are out (top-k, top-p)
    uint64_t least_weight;    // so are tokens that weigh less (min-p)
};

__device__ static uint64_t weight_of(const Tokens &t, int i, uint64_t key) {
    if (t.z[i] == -INFINITY || key < t.least_key) return 0;
    const uint64_t weight = sample_weight(t.z[i], t.largest, t.scale);
    return weight < t.least_weight ? 0 : weight;
}

__device__ static uint64_t total_weight(const Tokens &t) {
    uint64_t sum = 0;
    for (int i = threadIdx.x; i < t.n; i += blockDim.x) sum += weight_of(t, i, order_key(t.z[i], i));
    return block_sum(sum);
}

// The key of the first token, in descending order, that together with those before it weighs more than `target`;
// by_number: every token counts 1. Finds the key byte by byte, from the highest: of the tokens that have the bytes
// found so far, sums the weights for each value of the next byte. Integers, so the order of the sums does not matter.
__device__ static uint64_t find_token(const Tokens &t, bool by_number, uint64_t target) {
    __shared__ unsigned long long of_byte[256];
    uint64_t found = 0, before = 0;                    // the bytes found so far; the weight of larger keys
    for (int shift = 56; shift >= 0; shift -= 8) {
        for (int i = threadIdx.x; i < 256; i += blockDim.x) of_byte[i] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < t.n; i += blockDim.x) {
            const uint64_t key = order_key(t.z[i], i);
            if (key >> shift >> 8 != found || t.z[i] == -INFINITY) continue;
            atomicAdd(&of_byte[key >> shift & 255], (unsigned long long)(by_number ? 1 : weight_of(t, i, key)));
        }
        __syncthreads();
        int byte = 255;
        while (byte > 0 && before + of_byte[byte] <= target) before += of_byte[byte--];
        found = found << 8 | byte;
        __syncthreads();                               // all have read the sums
    }
    return found;
}

// sample: one token for each row, by the eight steps that gemma4.h lists
//   shapes    logits (n_rows, vocab), out (n_rows); z (.., vocab) is scratch
//   launch    grid n_rows, block 256: a block samples a row
//   traffic   reads the logits once and z some 30 times, from a cache
//   numerics  integers, and f32 without contraction: every backend chooses the same token
//   see       ref_sample_row
//   fast twin sample_kernel: many blocks share a row; the last one reads only the parts that matter again
static __global__ void sample_kernel(Sample o, Batch b, int first, float *scratch) {
    const int r = first + blockIdx.x;
    const Row row = b.rows[r];
    const Segment seg = b.segs[row.seg];
    const SampleParams p = o.params[seg.seq];
    const uint32_t *mask = o.mask ? o.mask + (size_t)r * ((o.vocab + 31) / 32) : NULL;
    float *z = scratch + (size_t)blockIdx.x * o.vocab;
    for (int i = threadIdx.x; i < o.vocab; i += blockDim.x)            // 2, 3: bias, penalties of the committed text
        z[i] = penalised_logit(o, r, seg.seq, i, o.counts ? o.counts[(size_t)seg.seq * o.vocab + i] : 0);
    __syncthreads();
    for (int j = threadIdx.x; o.counts && j <= row.index; j += blockDim.x) {           // 3: and of the step
        if (seg.kind != SEG_CHAIN && !(row.ancestors >> j & 1)) continue;
        const int id = valid_token(o.step_rows[seg.first + j].token, o.vocab);
        z[id] = penalised_logit(o, r, seg.seq, id, count_of(o, seg, row, id));
    }
    __syncthreads();
    uint64_t best = 0;
    int n = 0, broken = 0;
    for (int i = threadIdx.x; i < o.vocab; i += blockDim.x) {          // 1: mask
        broken |= isnan(z[i]) != 0;
        if (mask && !(mask[i / 32] >> i % 32 & 1)) z[i] = -INFINITY;
        if (!(z[i] > -INFINITY)) continue;
        best = larger(best, order_key(z[i], i));
        n++;
    }
    best = block_max(best);
    n = block_sum(n);
    broken = block_sum(broken);
    if (!n || broken || p.temperature <= 0) {                          // 4: greedy
        if (threadIdx.x == 0) o.out[r] = !n || broken ? -1 : id_of_key(best);
        return;
    }
    Tokens t = { z, o.vocab, z[id_of_key(best)], 1.44269504f / p.temperature, 0, 0 };
    if (p.top_k > 0 && p.top_k < n) t.least_key = find_token(t, true, p.top_k - 1);    // 5: top-k
    const uint64_t share = sample_share(total_weight(t), p.top_p);     // 6: top-p
    t.least_key = larger(t.least_key, find_token(t, false, share ? share - 1 : 0));
    t.least_weight = sample_share(SAMPLE_ONE, p.min_p);                // 7: min-p
    const float random = random_unit(p.seed, b.len[seg.seq] + row.depth);
    const uint64_t key = find_token(t, false, sample_share(total_weight(t), random));  // 8: draw
    if (threadIdx.x == 0) o.out[r] = id_of_key(key);
}

static void plain_sample(const Sample *o) {
    const int n_rows = o->batch->n_rows;
    for (int r = 0; r < n_rows; r += TILE_ROWS)
        launch("sample", min_int(TILE_ROWS, n_rows - r), ROW_THREADS, sample_kernel, *o, *o->batch, r, plain.z);
}

// verify_walk: how far the drafts of each segment are what the model itself samples
//   shapes    n_accept, last, next (n_segs), path (n_segs, STEP_ROWS)
//   launch    grid n_segs, block 32, of which one thread walks
//   traffic   a few words for each output row
//   numerics  integers
//   see       ref_verify_walk
//   fast twin verify_walk_kernel: 32 output rows at a time, one a lane
static __global__ void verify_walk_kernel(VerifyWalk o, Batch b) {
    const int i = blockIdx.x;
    const Segment seg = b.segs[i];
    int n = 0, first = 0, at = -1;                     // at: the last output row that was accepted
    if (threadIdx.x) return;
    while (first < o.n_out && o.out_rows[first].seg != i) first++;
    const int before = first < o.n_out ? o.out_rows[first].index : seg.n;
    for (; n < before; n++)
        if (seg.kind == SEG_TREE) o.path[i * STEP_ROWS + n] = n;
    for (int k = first; k < o.n_out; k++) {            // a parent comes before its children
        const Row row = o.out_rows[k];
        if (row.seg != i) continue;
        int parent = row.index - 1;
        while (seg.kind == SEG_TREE && parent >= 0 && !(row.ancestors >> parent & 1)) parent--;
        if (k != first && (parent != o.out_rows[at].index || o.chosen[at] < 0 ||
                           b.rows[seg.first + row.index].token != o.chosen[at])) continue;
        if (seg.kind == SEG_TREE) o.path[i * STEP_ROWS + n] = row.index;
        at = k;
        n++;
    }
    o.n_accept[i] = n;
    o.last[i] = at;
    o.next[i] = at < 0 ? 0 : o.chosen[at];
}

static void plain_verify_walk(const VerifyWalk *o) {
    launch("verify_walk", o->batch->n_segs, WARP, verify_walk_kernel, *o, *o->batch);
}

// ==== [7] Run time, the table ========================================================================================
// Copies from and to the host wait until they are done; steps are not recorded, so begin() always says: issue.

static void plain_wait(void) { plain_check("wait", cudaStreamSynchronize(plain.stream)); }

static void plain_memory(size_t *free_bytes, size_t *total) {
    plain_check("memory", cudaMemGetInfo(free_bytes, total));
}

static size_t round_up(size_t n) { return (n + 255) / 256 * 256; }

static size_t bytes_of_tensor(const Tensor *w) {       // the file's blocks, then the factors
    return round_up((size_t)w->n * w->rows * bytes_of_row(*w)) + (w->scale ? round_up(w->n * sizeof(float)) : 0);
}

static size_t plain_weight_bytes(const Tensor *w) { return w->in_host ? 0 : bytes_of_tensor(w); }

// Pinned memory for a matrix that stays on the host. *is_new: the caller has to fill it.
static void *host_matrix(const Tensor *w, bool *is_new) {
    HostMatrix *t = plain.in_host;
    while (t && (t->file != w->data || t->owner != plain.reserved)) t = t->next;
    *is_new = !t;
    if (t) return t->data;
    t = (HostMatrix *)malloc(sizeof *t);
    if (!t) plain_refuse("upload: no memory for a matrix of so many rows", w->rows);
    plain_check("upload of a matrix to pinned host memory", cudaMallocHost(&t->data, bytes_of_tensor(w)));
    t->file = w->data;
    t->owner = plain.reserved;
    t->next = plain.in_host;
    plain.in_host = t;
    return t->data;
}

static void plain_upload(Tensor *w, void *dst) {
    const size_t bytes = (size_t)w->n * w->rows * bytes_of_row(*w);
    bool fill = true;
    if (!block_bytes(w->type)) plain_refuse("upload: unknown type of a matrix", w->type);
    if (w->in_host && !dst) dst = host_matrix(w, &fill);
    if (!dst) plain_refuse("upload: no memory was given for a matrix with so many rows", w->rows);
    if (fill) plain_check("upload", cudaMemcpyAsync(dst, w->data, bytes, cudaMemcpyDefault, plain.stream));
    if (w->scale) {
        float *scale = (float *)((char *)dst + round_up(bytes));
        plain_check("upload", cudaMemcpyAsync(scale, w->scale, w->n * sizeof(float), cudaMemcpyDefault, plain.stream));
        w->scale = scale;
    }
    w->data = dst;
    plain_wait();
}

// Divides scratch; base NULL: counts its bytes only.
static size_t place_scratch(const Limits *lim, char *base) {
    const size_t n = (size_t)lim->max_rows * lim->max_cols;
    size_t at = 0;
    plain.y.f = (float *)(base + at);
    at += round_up(n * sizeof(float));
    plain.y.q = (int8_t *)(base + at);
    at += round_up(n);
    plain.y.s = (float *)(base + at);
    at += round_up((n / 32 + 1) * sizeof(float));
    plain.z = (float *)(base + at);
    at += round_up((size_t)TILE_ROWS * lim->vocab * sizeof(float));
    return at;
}

static Limits joined_limits(const Limits *lim) {
    Limits l = *lim;
    l.max_rows = max_int(max_int(l.max_rows, plain.lim.max_rows), 1);
    l.max_cols = max_int(l.max_cols, plain.lim.max_cols);
    l.vocab = max_int(l.vocab, plain.lim.vocab);
    return l;
}

static size_t plain_scratch_bytes(const Limits *lim) {
    const Limits l = joined_limits(lim);
    const size_t n = place_scratch(&l, NULL);
    place_scratch(&plain.lim, plain.scratch);
    return n;
}

static void plain_init(const Limits *lim) {
    const Limits l = joined_limits(lim);
    const size_t size = place_scratch(&l, NULL);
    plain_wait();
    if (size > plain.scratch_size) {
        if (plain.scratch) plain_check("init", cudaFree(plain.scratch));
        plain_check("init: scratch memory", cudaMalloc((void **)&plain.scratch, size));
        plain.scratch_size = size;
    }
    plain.lim = l;
    place_scratch(&l, plain.scratch);
}

static void *plain_reserve(size_t bytes) {
    void *p = NULL;
    if (cudaMalloc(&p, bytes ? bytes : 256) != cudaSuccess) {
        (void)cudaGetLastError();
        return NULL;
    }
    plain_check("reserve", cudaMemsetAsync(p, 0, bytes, plain.stream));
    return plain.reserved = p;
}

static void plain_release(void *p) {
    plain_wait();
    for (HostMatrix **at = &plain.in_host; *at;) {
        HostMatrix *t = *at;
        if (t->owner != p) {
            at = &t->next;
            continue;
        }
        *at = t->next;
        plain_check("release", cudaFreeHost(t->data));
        free(t);
    }
    plain_check("release", cudaFree(p));
}

static void plain_copy(const Copy *c) {
    if (!c->bytes) return;
    plain_check("copy", cudaMemcpyAsync(c->dst, c->src, c->bytes, cudaMemcpyDefault, plain.stream));
    plain.n_launches++;
    if (c->kind != COPY_WITHIN) plain_wait();
}

static bool plain_begin(StepKey) { return true; }
static void plain_end(void) {}
static double plain_bandwidth(void) { return 0; }
static double plain_joules(void) { return -1; }
static int64_t plain_launches(void) { return plain.n_launches; }
static const Card *plain_card(void) { return &plain.card; }

static int attribute(cudaDeviceAttr which) {
    int value = 0;
    plain_check("device", cudaDeviceGetAttribute(&value, which, 0));
    return value;
}

static void start_device(void) {
    static cudaDeviceProp properties;
    size_t free_bytes;
    Card *c = &plain.card;
    plain_check("device", cudaGetDeviceProperties(&properties, 0));
    c->name = properties.name;
    c->major = attribute(cudaDevAttrComputeCapabilityMajor);
    c->minor = attribute(cudaDevAttrComputeCapabilityMinor);
    c->n_sm = attribute(cudaDevAttrMultiProcessorCount);
    c->block_shared = attribute(cudaDevAttrMaxSharedMemoryPerBlock);
    c->sm_shared = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    c->sm_threads = attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
    c->sm_registers = attribute(cudaDevAttrMaxRegistersPerMultiprocessor);
    c->l2 = (size_t)attribute(cudaDevAttrL2CacheSize);
    c->host_memory = attribute(cudaDevAttrIntegrated) != 0;
    plain_check("device", cudaMemGetInfo(&free_bytes, &c->memory));
    plain_check("device", cudaStreamCreateWithFlags(&plain.stream, cudaStreamNonBlocking));
}

const Ops *plain_ops(void) {
    static Ops ops;
    int n_devices = 0;
    if (plain.stream) return &ops;
    if (cudaGetDeviceCount(&n_devices) != cudaSuccess || !n_devices) {
        (void)cudaGetLastError();
        return NULL;
    }
    start_device();
    ops.name = "plain", ops.exact_prompts = true;
    ops.memory = plain_memory, ops.weight_bytes = plain_weight_bytes, ops.upload = plain_upload;
    ops.scratch_bytes = plain_scratch_bytes, ops.init = plain_init, ops.reserve = plain_reserve;
    ops.release = plain_release, ops.copy = plain_copy, ops.begin = plain_begin, ops.end = plain_end;
    ops.wait = plain_wait, ops.bandwidth = plain_bandwidth, ops.joules = plain_joules;
    ops.launches = plain_launches, ops.card = plain_card;
    ops.embed = plain_embed, ops.pair = plain_pair, ops.ple_rows = plain_ple_rows, ops.matmul = plain_matmul;
    ops.gate_up = plain_gate_up, ops.route = plain_route, ops.expert_gate_up = plain_expert_gate_up;
    ops.expert_down = plain_expert_down, ops.ple_inject = plain_ple_inject, ops.close = plain_close;
    ops.gather_rows = plain_gather_rows, ops.qkv_store = plain_qkv_store, ops.block_select = plain_block_select;
    ops.attn_mass = plain_attn_mass, ops.attend = plain_attend, ops.kv_commit = plain_kv_commit;
    ops.kv_copy = plain_kv_copy, ops.clamp = plain_clamp, ops.gelu_product = plain_gelu_product;
    ops.layer_norm = plain_layer_norm, ops.rope_2d = plain_rope_2d, ops.attend_all = plain_attend_all;
    ops.pool = plain_pool, ops.head = plain_head, ops.logprob = plain_logprob, ops.sample = plain_sample;
    ops.verify_walk = plain_verify_walk, ops.head_centroid = plain_head_centroid;
    return &ops;
}
