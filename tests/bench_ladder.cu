/* bench_ladder.cu - the ladder of docs/kernels.md: one product and one attention, each computed by three kernels. Prints
 * the time of each, and its share of the floor: the bytes that have to be read, over the bandwidth of the memory.
 *
 *   make build/bench_ladder && build/bench_ladder
 *
 * Step 1 and step 3 of the product and steps 2 and 3 of the attention are operations of the backends (parts/plain.cu,
 * gemma4_kernels.cu); the steps between are the kernels of this file. Weights, queries and caches are random. Results
 * are compared with those of parts/plain.cu before anything is timed. */
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <algorithm>
#include <vector>
#include "../gemma4.h"

enum { WARP = 32, BLOCK = 256 };

static void require(bool ok, const char *what) {
    if (ok) return;
    fprintf(stderr, "bench_ladder: %s\n", what);
    exit(1);
}
static void check(cudaError_t e) { require(e == cudaSuccess, cudaGetErrorString(e)); }

__device__ static float warp_sum(float v) {
    for (int m = 1; m < WARP; m *= 2) v += __shfl_xor_sync(~0u, v, m);
    return v;
}

// ==== [1] A product of one row: step 2, wide loads ===================================================================

// Byte i of the 12 bytes with the sub-scales and sub-minima of a Q4_K block.
__device__ static unsigned scale_byte(uint4 head, int i) {
    const unsigned word = i < 4 ? head.y : i < 8 ? head.z : head.w;
    return word >> 8 * (i % 4) & 255;
}

// Scale and minimum of group g of a Q4_K block, from its first 16 bytes (d, dmin, 12 bytes).
__device__ static float2 scale_of_group(uint4 head, int g) {
    const __half2 d = *(const __half2 *)&head.x;
    unsigned scale = scale_byte(head, g < 4 ? g : g + 4), low = scale_byte(head, g + 4);
    if (g < 4) scale &= 63, low &= 63;
    else {
        low = scale >> 4 | scale_byte(head, g) >> 6 << 4;
        scale = (scale & 15) | scale_byte(head, g - 4) >> 6 << 4;
    }
    return make_float2(__low2float(d) * scale, __high2float(d) * low);
}

// out[i] = sum over c of w[i][c] x[c], w (rows, cols) in the blocks of Q4_K
//   launch    grid rows / 8, block 256: a warp computes a row
//   traffic   a block of 256 values is 144 bytes = 9 loads of 16 bytes: 8 lanes take a block, each of them the head (the
//             same for all, so one request) and 16 bytes of codes, which are 32 values of two groups
//   numerics  f32
static __global__ void wide_kernel(const uint4 *w, int rows, int cols, const float *x, float *out) {
    const int row = blockIdx.x * (BLOCK / WARP) + threadIdx.x / WARP, lane = threadIdx.x % WARP, chunk = lane % 8;
    const int n_blocks = cols / 256;
    float sum = 0;
    if (row >= rows) return;
    for (int b = lane / 8; b < n_blocks; b += 4) {
        const uint4 *block = w + ((size_t)row * n_blocks + b) * 9;
        const uint4 head = block[0], codes = block[1 + chunk];
        const unsigned word[4] = { codes.x, codes.y, codes.z, codes.w };
        const float *at = x + b * 256 + chunk / 2 * 64 + chunk % 2 * 16;     // the low nibbles; the high ones: 32 on
        for (int half = 0; half < 2; half++) {
            const float2 scale = scale_of_group(head, chunk / 2 * 2 + half);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float4 v = *(const float4 *)(at + 32 * half + 4 * i);
                const unsigned n = word[i] >> 4 * half;
                sum = fmaf(scale.x * (n & 15) - scale.y, v.x, sum);
                sum = fmaf(scale.x * (n >> 8 & 15) - scale.y, v.y, sum);
                sum = fmaf(scale.x * (n >> 16 & 15) - scale.y, v.z, sum);
                sum = fmaf(scale.x * (n >> 24 & 15) - scale.y, v.w, sum);
            }
        }
    }
    sum = warp_sum(sum);
    if (lane == 0) out[row] = sum;
}

// ==== [2] Attention of one row: step 1, three passes =================================================================

// out[h] = sum over j of softmax_j(scale * q[h] . k[j]) v[j], as the formula reads: all scores to memory, then their
// softmax, then the sum.
//   shapes    q, out (n_heads, hd); k, v (n_kv_heads, slots, hd) f16; score (n_heads, n)
//   launch    grid n_heads, block 256: a block computes a head
//   traffic   K and V once for each head of q; the scores are written once and read five times
//   numerics  f32
static __global__ void three_pass_kernel(const float *q, const __half *k, const __half *v, int heads_of_one, int hd,
                                         int slots, int n, float scale, float *score, float *out) {
    __shared__ float part[BLOCK / WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const size_t first = (size_t)(blockIdx.x / heads_of_one) * slots * hd;
    q += (size_t)blockIdx.x * hd, out += (size_t)blockIdx.x * hd, score += (size_t)blockIdx.x * n;
    for (int j = warp; j < n; j += BLOCK / WARP) {               // pass 1: a warp computes a score
        float s = 0;
        for (int i = lane; i < hd; i += WARP) s = fmaf(q[i], __half2float(k[first + (size_t)j * hd + i]), s);
        s = warp_sum(s);
        if (lane == 0) score[j] = scale * s;
    }
    __syncthreads();
    float largest = -INFINITY, total = 0;                        // pass 2: the largest, then the sum
    for (int j = threadIdx.x; j < n; j += BLOCK) largest = fmaxf(largest, score[j]);
    for (int m = 1; m < WARP; m *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, m));
    if (lane == 0) part[warp] = largest;
    __syncthreads();
    for (int i = 0; i < BLOCK / WARP; i++) largest = fmaxf(largest, part[i]);
    __syncthreads();
    for (int j = threadIdx.x; j < n; j += BLOCK) total += score[j] = expf(score[j] - largest);
    total = warp_sum(total);
    if (lane == 0) part[warp] = total;
    __syncthreads();
    total = 0;
    for (int i = 0; i < BLOCK / WARP; i++) total += part[i];
    for (int i = threadIdx.x; i < hd; i += BLOCK) {              // pass 3: a thread computes a value of the output
        float sum = 0;
        for (int j = 0; j < n; j++) sum = fmaf(score[j], __half2float(v[first + (size_t)j * hd + i]), sum);
        out[i] = sum / total;
    }
}

// ==== [3] Measuring ==================================================================================================

static unsigned random_bits(void) {                    // xorshift32
    static unsigned s = 2463534242u;
    s ^= s << 13, s ^= s >> 17;
    return s ^= s << 5;
}
static float random_value(void) { return (float)(random_bits() >> 8) * 0x1p-23f - 1; }

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// Microseconds of run(i), i = 0, 1, 2 ..: the median of five times, each the mean of enough runs for 20 ms.
template <typename Run> static double microseconds(Run run) {
    std::vector<double> times;
    int n = 4, i = 0;
    for (double took = 0; took < 0.02; n *= 2) {
        const double start = seconds();
        for (int k = 0; k < n; k++) run(i++);
        check(cudaDeviceSynchronize());
        took = seconds() - start;
    }
    for (int k = 0; k < 5; k++) {
        const double start = seconds();
        for (int j = 0; j < n; j++) run(i++);
        check(cudaDeviceSynchronize());
        times.push_back((seconds() - start) / n * 1e6);
    }
    std::sort(times.begin(), times.end());
    return times[2];
}

template <typename T> static T *to_device(const std::vector<T> &host) {
    T *p;
    check(cudaMalloc((void **)&p, host.size() * sizeof(T)));
    check(cudaMemcpy(p, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
    return p;
}

static std::vector<float> from_device(const float *p, size_t n) {
    std::vector<float> v(n);
    check(cudaDeviceSynchronize());
    check(cudaMemcpy(v.data(), p, n * sizeof(float), cudaMemcpyDeviceToHost));
    return v;
}

// The norm of the difference from `expected`, relative to its norm.
static double distance(const std::vector<float> &got, const std::vector<float> &expected) {
    double d = 0, norm = 0;
    for (size_t i = 0; i < got.size(); i++) {
        d += pow((double)got[i] - expected[i], 2);
        norm += pow((double)expected[i], 2);
    }
    return sqrt(d / norm);
}

static void row(const char *step, double us, double floor_us, double far) {
    printf("| %s | %.1f | %.1f %% | %.0e |\n", step, us, 100 * floor_us / us, far);
    fflush(stdout);
    require(far < 0.02, "this result is not that of parts/plain.cu");
}

// ==== [4] The ladders ================================================================================================

enum { ROWS = 21504, COLS = 5376, COPIES = 4 };        // gate of the 31B; copies, so that no cache holds the weights

// Random Q4_K blocks whose values are about 1 / sqrt(cols).
static std::vector<uint8_t> random_q4_k(size_t n_blocks) {
    std::vector<uint8_t> w(n_blocks * 144);
    for (size_t i = 0; i < w.size(); i += 4) *(unsigned *)&w[i] = random_bits();
    for (size_t b = 0; b < n_blocks; b++) {
        __half *d = (__half *)&w[b * 144];
        d[0] = __float2half(5e-5f), d[1] = __float2half(4e-4f);
    }
    return w;
}

static void products(const Ops *plain, const Ops *fast, double bandwidth) {
    const std::vector<uint8_t> w = random_q4_k((size_t)ROWS * COLS / 256);
    std::vector<float> x(COLS), s(COLS / 32);
    std::vector<int8_t> q(COLS);
    for (float &v : x) v = random_value();
    for (int g = 0; g < COLS / 32; g++) {              // rule 6 of gemma4.h
        float most = 0;
        for (int i = 0; i < 32; i++) most = fmaxf(most, fabsf(x[32 * g + i]));
        s[g] = most / 127;
        for (int i = 0; i < 32; i++) q[32 * g + i] = (int8_t)rintf(x[32 * g + i] * (127 / most));
    }
    const In in = { .act = { to_device(x), to_device(q), to_device(s) }, .scale = 1 };
    std::vector<float> zero(ROWS);
    float *out = to_device(zero);
    Tensor plain_w[COPIES], fast_w[COPIES];
    Matmul plain_op[COPIES], fast_op[COPIES];
    for (int i = 0; i < COPIES; i++) {
        const Ops *const backends[2] = { plain, fast };
        for (int k = 0; k < 2; k++) {
            Tensor *t = k ? &fast_w[i] : &plain_w[i];
            *t = (Tensor){ .data = w.data(), .type = T_Q4_K, .rows = ROWS, .cols = COLS, .n = 1 };
            backends[k]->upload(t, backends[k]->reserve(backends[k]->weight_bytes(t)));
            (k ? fast_op : plain_op)[i] = (Matmul){ .n_rows = 1, .n = 1, .in = in, .w = { t }, .out = { out } };
        }
    }
    const double floor_us = (double)w.size() / bandwidth * 1e6;
    printf("\nProduct of one row: %d x %d, Q4_K, %.1f MB; floor %.1f us\n\n"
           "| step | us | share of the floor | difference from step 1 |\n|---|---|---|---|\n",
           ROWS, COLS, (double)w.size() / 1e6, floor_us);
    plain->matmul(&plain_op[0]);
    const std::vector<float> expected = from_device(out, ROWS);
    row("1 plain (product_kernel of plain.cu)", microseconds([&](int i) { plain->matmul(&plain_op[i % COPIES]); }),
        floor_us, 0);
    auto wide = [&](int i) {
        wide_kernel<<<ROWS / (BLOCK / WARP), BLOCK>>>((const uint4 *)plain_w[i % COPIES].data, ROWS, COLS, in.act.f,
                                                      out);
    };
    wide(0);
    const double far = distance(from_device(out, ROWS), expected);
    row("2 wide loads (wide_kernel)", microseconds(wide), floor_us, far);
    fast->matmul(&fast_op[0]);
    const double far_fast = distance(from_device(out, ROWS), expected);
    row("3 int8, planes (gemma4_kernels.cu)", microseconds([&](int i) { fast->matmul(&fast_op[i % COPIES]); }),
        floor_us, far_fast);
}

enum { HEADS = 8, KV_HEADS = 2, HEAD_DIM = 512, KEYS = 32768 };      // a global layer of the E4B

static void attentions(const Ops *plain, const Ops *fast, double bandwidth) {
    const int slots = KEYS + STEP_ROWS;
    const size_t values = (size_t)KV_HEADS * slots * HEAD_DIM;
    std::vector<__half> kv(values);
    for (__half &v : kv) v = __float2half(random_value());
    const __half *k = to_device(kv);
    std::reverse(kv.begin(), kv.end());
    const __half *v = to_device(kv);
    std::vector<float> q(HEADS * HEAD_DIM), zero(HEADS * HEAD_DIM), scores((size_t)HEADS * KEYS);
    for (float &x : q) x = random_value();
    const std::vector<Row> rows(1);
    const std::vector<Segment> segs(1, Segment{ .n = 1 });
    const std::vector<int32_t> len(1, KEYS - 1);       // the row itself is in the cache too
    const Batch batch = { to_device(rows), to_device(segs), to_device(len), 1, 1 };
    const Cache cache = { .n_seqs = 1, .n_kv_heads = KV_HEADS, .head_dim = HEAD_DIM, .slots = slots,
                          .k = { KV_F16, HEAD_DIM, (void *)k, NULL }, .v = { KV_F16, HEAD_DIM, (void *)v, NULL } };
    float *out = to_device(zero), *score = to_device(scores);
    const Attend o = { .batch = &batch, .cache = &cache, .n_heads = HEADS, .q = to_device(q), .own = OWN_CAUSAL,
                       .scale = 0.2f, .out = { .f = out } };
    const double floor_us = 2.0 * KV_HEADS * KEYS * HEAD_DIM * sizeof(__half) / bandwidth * 1e6;
    printf("\nAttention of one row: %d heads of %d, %d of K and V, %d keys in f16, %.1f MB; floor %.1f us\n\n"
           "| step | us | share of the floor | difference from step 2 |\n|---|---|---|---|\n",
           HEADS, HEAD_DIM, KV_HEADS, KEYS, floor_us * bandwidth / 1e12, floor_us);
    plain->attend(&o);
    const std::vector<float> expected = from_device(out, q.size());
    auto three = [&](int) {
        three_pass_kernel<<<HEADS, BLOCK>>>(o.q, k, v, HEADS / KV_HEADS, HEAD_DIM, slots, KEYS, o.scale, score, out);
    };
    three(0);
    const double far = distance(from_device(out, q.size()), expected);
    row("1 plain: three passes (three_pass_kernel)", microseconds(three), floor_us, far);
    row("2 online softmax (attend_kernel of plain.cu)", microseconds([&](int) { plain->attend(&o); }), floor_us, 0);
    fast->attend(&o);
    const double far_fast = distance(from_device(out, q.size()), expected);
    row("3 split over the keys (gemma4_kernels.cu)", microseconds([&](int) { fast->attend(&o); }), floor_us, far_fast);
}

int main(void) {
    const Ops *plain = plain_ops(), *fast = cuda_ops();
    const Limits limits = { .max_rows = STEP_ROWS, .max_cols = COLS, .max_experts = 0, .vocab = 1024 };
    require(plain && fast, "expected a GPU that the kernels of gemma4_kernels.cu run on, found none");
    const double bandwidth = fast->bandwidth();
    require(bandwidth > 0, "the bandwidth of this GPU's memory is not known, so there is no floor");
    plain->init(&limits);
    fast->init(&limits);
    printf("%s, %.0f GB/s\n", fast->card()->name, bandwidth / 1e9);
    products(plain, fast, bandwidth);
    attentions(plain, fast, bandwidth);
    return 0;
}
