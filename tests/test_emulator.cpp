/* test_emulator.cpp - proves that tests/cuda_on_cpu finds planted faults, and that it computes what CUDA's documents say.
 *
 *   faults    each in a process of its own, which has to end with a line that names the launch and says what is wrong
 *   numbers   faults that nothing but wrong results can show: in one of 16 launches at the latest
 *   right     the same kernels without the fault: no complaint, right results in every launch
 *   values    shuffles, reductions, matrices, small floats, atomics, graphs, the product, each against a plain computation
 *
 * Run by tests/test_kernels.sh. */
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
#include "cublas_v2.h"
#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "instructions.h"
#include "../parts/cards.h"
#include "test.h"

extern __shared__ __align__(16) char shared_bytes[];

template <typename... P, typename... A> static void launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared, A... a) {
    cudaLaunchConfig_t config = { };
    config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = shared;
    cudaLaunchKernelEx(&config, kernel, static_cast<P>(a)...);
}

template <typename T> static T *on_device(size_t n) {
    void *p;
    if (cudaMalloc(&p, n * sizeof(T))) abort();
    return (T *)p;
}

// ---- kernels with and without a fault -------------------------------------------------------------------------------

enum Fault { NONE, NO_BARRIER, NO_SYNCWARP, NO_WAIT, NO_COMMIT, NO_BARRIER_AFTER, NO_ZERO, NO_ATOMIC };

// Every thread's neighbour in the next warp, through shared memory, twice.
__global__ void neighbours(int *out, Fault fault) {
    int *all = (int *)shared_bytes;
    const int i = threadIdx.x, next = (i + 32) % blockDim.x;
    all[i] = i;
    if (fault != NO_BARRIER) __syncthreads();
    const int a = all[next];
    if (fault != NO_BARRIER_AFTER) __syncthreads();
    all[i] = 2 * i;
    __syncthreads();
    out[i] = a + all[next];
}
__global__ void lanes(int *out, Fault fault) {
    __shared__ int all[32];
    const int i = threadIdx.x;
    all[i] = blockIdx.x;
    if (fault != NO_SYNCWARP) __syncwarp();
    atomicAdd(&out[i], all[31 - i] - (int)blockIdx.x);
}
__global__ void copies(const int4 *in, int4 *out, Fault fault) {
    int4 *all = (int4 *)shared_bytes;
    const int i = threadIdx.x;
    copy_ahead(&all[i], &in[i]);
    if (fault != NO_COMMIT) copy_commit();
    copy_ahead(&all[i + 32], &in[i + 32]);
    copy_commit();
    if (fault == NONE) wait_for_copies<1>();
    else if (fault == NO_COMMIT) wait_for_copies<1>();
    __syncwarp();
    const int4 a = all[31 - i];
    wait_for_copies<0>();
    __syncwarp();
    const int4 b = all[63 - i];
    out[i] = { a.x, a.w, b.x, b.w };
}
__global__ void sums(float *out, Fault fault) {
    float *sum = (float *)shared_bytes;
    if (fault != NO_ZERO && threadIdx.x == 0) *sum = 0;
    __syncthreads();
    atomicAdd(sum, 1);
    __syncthreads();
    out[0] = *sum;
}
__global__ void counts(int *out, Fault fault) {
    if (fault == NO_ATOMIC) {
        const int v = *(volatile int *)out;
        __syncwarp();
        *(volatile int *)out = v + 1;
    } else {
        atomicAdd(out, 1);
    }
}

static bool neighbours_right(Fault fault) {
    int *out = on_device<int>(128);
    launch(neighbours, 1, 128, 512, out, fault);
    cudaDeviceSynchronize();
    for (int i = 0; i < 128; i++)
        if (out[i] != 3 * ((i + 32) % 128)) return false;
    return true;
}
static bool lanes_right(Fault fault) {
    int *out = on_device<int>(32);
    cudaMemset(out, 0, 128);
    launch(lanes, 8, 32, 0, out, fault);
    cudaDeviceSynchronize();
    for (int i = 0; i < 32; i++)
        if (out[i]) return false;
    return true;
}
static bool copies_right(Fault fault) {
    int4 *in = on_device<int4>(64), *out = on_device<int4>(32);
    for (int i = 0; i < 64; i++) in[i] = { i, 0, 0, -i };
    launch(copies, 1, 32, 1024, in, out, fault);
    cudaDeviceSynchronize();
    for (int i = 0; i < 32; i++)
        if (out[i].x != 31 - i || out[i].y != i - 31 || out[i].z != 63 - i || out[i].w != i - 63) return false;
    return true;
}
static bool sums_right(Fault fault) {
    float *out = on_device<float>(1);
    launch(sums, 1, 100, 4, out, fault);
    cudaDeviceSynchronize();
    return out[0] == 100;
}
static bool counts_right(Fault fault) {
    int *out = on_device<int>(1);
    cudaMemset(out, 0, 4);
    launch(counts, 100, 256, 0, out, fault);
    cudaDeviceSynchronize();
    return out[0] == 25600;
}

// ---- kernels that have to be stopped --------------------------------------------------------------------------------

__global__ void plain_load(const char *p, uint4 *out) { out[0] = *(const uint4 *)p; }
__global__ void single_load(const char *p, uint4 *out) { out[0] = load_once(p); }
__global__ void matrix_load(int at, unsigned *out) {
    unsigned r[4];
    load_matrices(r, shared_bytes + at + threadIdx.x % 8 * 16);
    out[threadIdx.x] = r[0];
}
__global__ void copy_to(const char *from, int at) { copy_ahead(shared_bytes + at, from); }
__global__ void store(char *p, ptrdiff_t at) { p[at] = 1; }
__global__ void store_shared(int at) { shared_bytes[at] = 1; }
__global__ void store_static(int at, int *out) {
    __shared__ int few[8];
    few[at] = 1;
    __syncthreads();
    out[0] = few[0];
}
__global__ void some_lanes(int *out) {
    if (threadIdx.x != 37) out[threadIdx.x] = __shfl_xor_sync(~0u, 1, 1);
    else __syncthreads();
}
__global__ void wrong_mask(int *out) { out[threadIdx.x] = __shfl_sync(0xffff, 1, 0); }
__global__ void two_calls(int *out) {
    if (threadIdx.x < 16) out[threadIdx.x] = __shfl_xor_sync(~0u, 1, 1);
    else __syncwarp();
}
__global__ void some_warps(int *out) {
    if (threadIdx.x / 32 == 1) __syncwarp(), out[0] = __any_sync(~0u, threadIdx.x == 40);
    if (threadIdx.x != 5) __syncthreads();
    else __ballot_sync(~0u, 1);
}
__global__ void two_barriers(int *out) {
    if (threadIdx.x < 32) __syncthreads();
    else out[0] = __syncthreads_or(1);
}
__global__ void ended_lanes(int *out) {                // right: who has ended is not waited for
    if (threadIdx.x % 32 >= 20) return;
    const int v = __shfl_xor_sync(0xfffff, (int)threadIdx.x, 1);
    if (threadIdx.x >= 64) return;
    __syncthreads();
    out[threadIdx.x] = v;
}
static int deep(volatile int *p, int n) {
    volatile int room[1000];
    room[n % 1000] = *p;
    return n == 0 ? 0 : deep(room, n - 1) + room[n % 1000];
}
__global__ void much_stack(int *out) { out[0] = deep(out, 1000); }
__global__ void nothing(void) { }
__global__ void part_of_matrix(int *out) {
    const unsigned a[4] = { }, b[2] = { };
    int c[4] = { };
    if (threadIdx.x < 16) multiply_int8(c, a, b);
    out[0] = c[0];
}

static const struct { const char *name; void (*run)(void); const char *kernel, *says; } faults[] = {
    { "vector load", [] { launch(plain_load, 1, 1, 0, on_device<char>(64) + 4, on_device<uint4>(1)); }, "plain_load",
      "not aligned" },
    { "load_once", [] { launch(single_load, 1, 1, 0, on_device<char>(64) + 8, on_device<uint4>(1)); }, "single_load",
      "not aligned" },
    { "load_matrices", [] { launch(matrix_load, 1, 32, 512, 8, on_device<unsigned>(32)); }, "matrix_load", "not aligned" },
    { "load_matrices behind", [] { launch(matrix_load, 1, 32, 64, 0, on_device<unsigned>(32)); }, "matrix_load", "of 64 bytes" },
    { "copy_ahead from", [] { launch(copy_to, 1, 1, 64, on_device<char>(64) + 4, 0); }, "copy_to", "not aligned" },
    { "copy_ahead to", [] { launch(copy_to, 1, 1, 64, on_device<char>(64), 4); }, "copy_to", "not aligned" },
    { "copy_ahead behind", [] { launch(copy_to, 1, 1, 64, on_device<char>(64), 64); }, "copy_to", "byte 64 of 64" },
    { "behind an allocation", [] { launch(store, 3, 1, 0, on_device<char>(1024), 1024); }, "store",
      "byte 1024 of an allocation of 1024" },
    { "before an allocation", [] { launch(store, 3, 1, 0, on_device<char>(1 << 16), -1); }, "store",
      "byte -1 of an allocation of 65536" },
    { "close behind it", [] { char *p = on_device<char>(100); launch(store, 3, 1, 0, p, 100); cudaFree(p); }, "outside",
      "was written to" },
    { "after free", [] { char *p = on_device<char>(100); cudaFree(p); launch(store, 1, 1, 0, p, 0); }, "store",
      "freed allocation" },
    { "host memory freed", [] { void *p; cudaMallocHost(&p, 100); cudaFreeHost(p); launch(store, 1, 1, 0, (char *)p, 0); }, "store",
      "no device" },
    { "null pointer", [] { launch(store, 1, 1, 0, (char *)nullptr, 0); }, "store", "(nil)" },
    { "behind shared memory", [] { launch(store_shared, 1, 1, 100, 100); }, "store_shared", "behind its 100 bytes" },
    { "index of an array", [] { launch(store_static, 1, 1, 0, 8, on_device<int>(1)); }, "store_static", "index 8 is outside" },
    { "lane missing", [] { launch(some_lanes, 1, 64, 0, on_device<int>(64)); }, "some_lanes", "for ever" },
    { "lane not in mask", [] { launch(wrong_mask, 1, 32, 0, on_device<int>(32)); }, "wrong_mask", "not in its own mask" },
    { "two functions of a warp", [] { launch(two_calls, 1, 32, 0, on_device<int>(32)); }, "two_calls", "for ever" },
    { "thread missing", [] { launch(some_warps, 1, 64, 0, on_device<int>(1)); }, "some_warps", "for ever" },
    { "two barriers", [] { launch(two_barriers, 1, 64, 0, on_device<int>(1)); }, "two_barriers", "meets" },
    { "half a warp multiplies", [] { launch(part_of_matrix, 1, 32, 0, on_device<int>(1)); }, "part_of_matrix", "lanes 0000ffff" },
    { "stack", [] { launch(much_stack, 1, 1, 0, on_device<int>(1)); }, "much_stack", "access to" },
    { "shared memory", [] { launch(nothing, 1, 1, 49153); }, "nothing", "49152 bytes of shared memory are allowed" },
    { "tile too large for the card", [] {
          cuda_on_cpu("rtx3090");
          cudaFuncSetAttribute(nothing, cudaFuncAttributeMaxDynamicSharedMemorySize, 100 << 10);
          launch(nothing, 1, 1, 100 << 10);
      }, "nothing", "shared memory are allowed" },
    { "too many threads", [] { launch(nothing, 1, 1025, 0); }, "nothing", "1 to 1024 threads" },
    { "empty grid", [] { launch(nothing, dim3(1, 0), 1, 0); }, "nothing", "a grid has" },
    { "grid too high", [] { launch(nothing, dim3(1, 65536), 1, 0); }, "nothing", "a grid has" },
    { "memset behind", [] { cudaMemset(on_device<char>(100), 0, 101); }, "outside", "memset: 101 bytes" },
    { "copy from nowhere", [] { char c[4] = { }; cudaMemcpy(c, &c, 4, cudaMemcpyDeviceToHost); }, "outside", "no device memory" },
};

// What a process that runs `run` says; its exit status in *status.
static const char *said(void (*run)(void), int *status) {
    static char text[2000];
    int pipe_ends[2];
    fflush(stdout);
    if (pipe(pipe_ends)) abort();
    const pid_t child = fork();
    if (child == 0) {
        dup2(pipe_ends[1], 2);
        run();
        cudaDeviceSynchronize();
        _exit(0);
    }
    close(pipe_ends[1]);
    size_t n = 0;
    for (ssize_t got; n < sizeof text - 1 && (got = read(pipe_ends[0], text + n, sizeof text - 1 - n)) > 0; ) n += (size_t)got;
    text[n] = 0;
    close(pipe_ends[0]);
    waitpid(child, status, 0);
    return text;
}

static void test_faults(void) {
    for (const auto &f : faults) {
        int status;
        const char *text = said(f.run, &status);
        CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT && strstr(text, f.kernel) && strstr(text, f.says) &&
              strchr(text, '\n') == text + strlen(text) - 1, "%s: ended with status %x, said '%s'", f.name, status, text);
    }
}

static void test_numbers(void) {
    static const struct { const char *name; bool (*right)(Fault); Fault fault[3]; } cases[] = {
        { "barrier", neighbours_right, { NO_BARRIER, NO_BARRIER_AFTER } }, { "warp", lanes_right, { NO_SYNCWARP } },
        { "copies", copies_right, { NO_WAIT, NO_COMMIT } }, { "sum", sums_right, { NO_ZERO } },
        { "count", counts_right, { NO_ATOMIC } },
    };
    for (const auto &c : cases) {
        for (int k = 0; c.fault[k]; k++) {
            int n = 0;
            while (n < 16 && c.right(c.fault[k])) n++;
            CHECK(n < 16, "%s: fault %d did not show in 16 launches", c.name, (int)c.fault[k]);
        }
        for (int n = 0; n < 16; n++) CHECK(c.right(NONE), "%s: wrong without a fault", c.name);
    }
}

// ---- values ---------------------------------------------------------------------------------------------------------

__global__ void warp_values(int *out) {                // (12, 32)
    const int l = threadIdx.x;
    const long long wide = ((long long)l << 40) + 1;
    out[l] = __shfl_sync(~0u, l, l * 7, 8);
    out[32 + l] = __shfl_up_sync(~0u, l, 3, 16);
    out[64 + l] = (int)(__shfl_down_sync(~0u, wide, 5) >> 40);
    out[96 + l] = __shfl_xor_sync(~0u, (float)l, 9) == (float)(l ^ 9);
    out[128 + l] = (int)__ballot_sync(~0u, l % 3 == 0);
    out[160 + l] = __reduce_min_sync(~0u, 5 - l);
    out[192 + l] = (int)__reduce_max_sync(~0u, (unsigned)-l);
    out[224 + l] = (int)__match_any_sync(~0u, l % 5);
    out[256 + l] = l % 2 ? __any_sync(0xaaaaaaaa, l == 7) : __all_sync(0x55555555, l != 8);
    out[288 + l] = __syncthreads_count(l < 9);
    out[320 + l] = (int)__reduce_add_sync(~0u, (unsigned)l);
    out[352 + l] = (int)transpose_matrix((unsigned)(2 * l | (2 * l + 1) << 16));       // values 8 row + column
}

static void test_warp(void) {
    int *out = on_device<int>(12 * 32);
    launch(warp_values, 1, 32, 0, out);
    cudaDeviceSynchronize();
    for (int l = 0; l < 32; l++) {
        unsigned same = 0;
        for (int i = 0; i < 32; i++) same |= (unsigned)(i % 5 == l % 5) << i;
        const int want[] = { l / 8 * 8 + l * 7 % 8, l % 16 < 3 ? l : l - 3, l + 5 < 32 ? l + 5 : l, 1, 0x49249249, -26, -1,
                             (int)same, l % 2, 9, 496, (l % 4 * 16 + l / 4) | (l % 4 * 16 + 8 + l / 4) << 16 };
        for (int k = 0; k < 12; k++)
            CHECK(out[k * 32 + l] == want[k], "warp function %d, lane %d: got %d, want %d", k, l, out[k * 32 + l], want[k]);
    }
    int *ended = on_device<int>(96);
    launch(ended_lanes, 1, 96, 0, ended);
    cudaDeviceSynchronize();
    CHECK(ended[4] == 5 && ended[51] == 50 && ended[64] == -1, "lanes that have ended: got %d, %d, %d",
          ended[4], ended[51], ended[64]);
    CHECK(__byte_perm(0x33221100, 0x77665544, 0x7250) == 0x77225500 && __byte_perm(0x80, 0, 0x8888) == 0xffffffff, "__byte_perm");
    CHECK(__dp4a(0x7f80ff01, 0x7f800203, 10) == 10 + 127 * 127 + 128 * 128 - 2 + 3 && __vsub4(0x00800110, 0x01010101) == 0xff7f000f,
          "__dp4a, __vsub4");
    CHECK(__float2int_rn(2.5f) == 2 && __float2int_rn(-1e10f) == INT32_MIN && __float2int_rn(NAN) == 0 && __clz(1) == 31,
          "conversions");
}

// One warp: ldmatrix of a and b as they lie, then the product, for int8 and for halves, and the transposed b.
__global__ void products(const int8_t *a8, const int8_t *b8, int *c8, const __half *a16, const __half *b16, float *c16) {
    const int l = threadIdx.x;
    char *s = shared_bytes;
    unsigned a[4], b[4];
    memcpy(s + 16 * l, a8 + 16 * l, 16);
    if (l < 16) memcpy(s + 512 + 16 * l, b8 + 16 * l, 16);
    __syncwarp();
    load_matrices(a, s + l % 16 * 32 + l / 16 * 16);
    load_matrices(b, s + 512 + l % 8 * 32 + l / 8 % 2 * 16);
    int sum8[4] = { 1, 1, 1, 1 };
    multiply_int8(sum8, a, b);
    for (int i = 0; i < 4; i++) c8[(l / 4 + i / 2 * 8) * 8 + l % 4 * 2 + i % 2] = sum8[i];
    __syncwarp();
    memcpy(s + 16 * l, a16 + 8 * l, 16);
    if (l < 16) memcpy(s + 512 + 16 * l, b16 + 8 * l, 16);             // (16, 8): rows of b, which the transposed load turns
    __syncwarp();
    load_matrices(a, s + l % 16 * 32 + l / 16 * 16);
    load_matrices_transposed(b, s + 512 + l % 16 * 16);
    float sum16[4] = { 1, 1, 1, 1 };
    multiply_half(sum16, a, b);
    for (int i = 0; i < 4; i++) c16[(l / 4 + i / 2 * 8) * 8 + l % 4 * 2 + i % 2] = sum16[i];
}

static void test_products(void) {
    int8_t *a8 = on_device<int8_t>(512), *b8 = on_device<int8_t>(256);
    __half *a16 = on_device<__half>(256), *b16 = on_device<__half>(128);
    int *c8 = on_device<int>(128);
    float *c16 = on_device<float>(128);
    for (int i = 0; i < 512; i++) a8[i] = (int8_t)(i * 37 % 256), b8[i / 2] = (int8_t)(i * 91 % 256);
    for (int i = 0; i < 256; i++) a16[i] = (float)(i * 7 % 31 - 15), b16[i / 2] = (float)(i * 5 % 29 - 14) / 4;
    launch(products, 1, 32, 1024, a8, b8, c8, a16, b16, c16);
    cudaDeviceSynchronize();
    for (int r = 0; r < 16; r++)
        for (int c = 0; c < 8; c++) {
            int want8 = 1;
            float want16 = 1;
            for (int k = 0; k < 32; k++) want8 += a8[r * 32 + k] * b8[c * 32 + k];
            for (int k = 0; k < 16; k++) want16 += (float)a16[r * 16 + k] * (float)b16[k * 8 + c];
            CHECK(c8[r * 8 + c] == want8 && c16[r * 8 + c] == want16, "product (%d, %d): got %d and %g, want %d and %g", r, c,
                  c8[r * 8 + c], (double)c16[r * 8 + c], want8, (double)want16);
        }
}

static double rounded(double x, int bits, int least) { // to `bits` of mantissa, not below 2^least
    if (x == 0 || x != x) return x;
    const int e = ilogb(x), step = (e < least ? least : e) - bits;
    return ldexp(nearbyint(ldexp(x, -step)), step);
}

static void test_small_floats(void) {
    uint32_t r = 1;
    int bad = 0, bad_sums = 0;
    for (int i = 0; i < 65536; i++) {
        __half h = __ushort_as_half((unsigned short)i);
        const float f = h;
        if (f == f) bad += __half_as_ushort(__float2half_rn(f)) != i;
        else bad += !__hisnan(__float2half_rn(f));
    }
    for (int i = 0; i < 1000000; i++) {
        r = r * 1664525 + 1013904223;
        const float f = __uint_as_float(r);
        if (f != f || isinf(f)) continue;
        const double h = rounded(f, 10, -14), b = rounded(f, 7, -126);
        bad += __half2float(__float2half_rn(f)) != (fabs(h) > 65504 ? copysign(INFINITY, h) : h);
        bad += __bfloat162float(__float2bfloat16_rn(f)) != (float)b;
        const __half x = __ushort_as_half((unsigned short)(r >> 16 & 0xbfff)), y = __ushort_as_half((unsigned short)(r & 0xbfff));
        const __half z = __ushort_as_half((unsigned short)(r >> 5 & 0xbfff));
        const double product = (double)(float)x * (float)y;
        bad_sums += (float)(x + y) != rounded((double)(float)x + (float)y, 10, -14) || (float)(x * y) != rounded(product, 10, -14);
        bad_sums += (float)__hfma(x, y, z) != rounded(product + (float)z, 10, -14);
    }
    CHECK(!bad, "small floats: %d conversions are wrong", bad);
    CHECK(!bad_sums, "small floats: %d sums and products are wrong", bad_sums);
}

__global__ void last_block(int *count, int *out) {     // the block that comes last sees what all others wrote
    out[blockIdx.x + 1] = blockIdx.x;
    __threadfence();
    if (atomicInc((unsigned *)count, gridDim.x - 1) != gridDim.x - 1) return;
    int sum = 0;
    for (unsigned i = 0; i < gridDim.x; i++) sum += out[i + 1];
    out[0] = sum;
}
__global__ void add_one(int *p) { *p += 1; }

static void test_streams(void) {
    int *count = on_device<int>(1), *out = on_device<int>(5001), *pinned;
    cudaMemset(count, 0, 4);
    for (int i = 0; i < 3; i++) {
        launch(last_block, 5000, 1, 0, count, out);
        cudaDeviceSynchronize();
        CHECK(out[0] == 4999 * 2500 && *count == 0, "last block: got %d, want %d", out[0], 4999 * 2500);
    }
    cudaMallocHost((void **)&pinned, 4);
    *pinned = 5;
    cudaStream_t s, other;
    cudaEvent_t e;
    cudaGraph_t g;
    cudaGraphExec_t exec;
    cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking);
    cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking);
    cudaEventCreate(&e);
    cudaLaunchConfig_t config = { };
    config.stream = s;
    cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal);
    cudaMemcpyAsync(count, pinned, 4, cudaMemcpyHostToDevice, s);
    cudaLaunchKernelEx(&config, add_one, count);
    cudaStreamEndCapture(s, &g);
    cudaGraphInstantiate(&exec, g);
    cudaGraphDestroy(g);
    CHECK(*count == 0, "graph: ran when it was captured");
    cudaGraphLaunch(exec, s);
    cudaLaunchKernelEx(&config, add_one, count);
    cudaEventRecord(e, s);
    CHECK(*count == 0 && cudaEventQuery(e) == cudaErrorNotReady, "stream: ran before it was waited for");
    *pinned = 6;
    cudaStreamWaitEvent(other, e);
    cudaStreamSynchronize(other);
    CHECK(*count == 8, "graph: got %d, want 8", *count);
    cudaGraphLaunch(exec, s);
    cudaGraphExecDestroy(exec);
    cudaStreamSynchronize(s);
    CHECK(*count == 7, "graph: got %d, want 7", *count);
    cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal);
    CHECK(cudaStreamSynchronize(s) != cudaSuccess && cudaStreamEndCapture(s, &g) != cudaSuccess &&
          cudaGetLastError() != cudaSuccess, "graph: a wait inside of it was let pass");
    CHECK(cudaFuncSetAttribute(neighbours, cudaFuncAttributeMaxDynamicSharedMemorySize, 228 << 10) != cudaSuccess &&
          cudaFuncSetAttribute(neighbours, cudaFuncAttributeMaxDynamicSharedMemorySize, 227 << 10) == cudaSuccess,
          "shared memory above 227 KB");
    launch(neighbours, 1, 128, 227 << 10, on_device<int>(128), NONE);
    void *none;
    CHECK(cudaMalloc(&none, (size_t)1 << 40) == cudaErrorMemoryAllocation && !none, "an allocation of 1 TB");
}

static void test_cards(void) {
    for (const Card &c : cards) {
        int n_sm = 0, shared = 0, major = 0;
        CHECK(cuda_on_cpu(c.name), "%s: is not emulated", c.name);
        cudaDeviceGetAttribute(&n_sm, cudaDevAttrMultiProcessorCount, 0);
        cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0);
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
        CHECK(n_sm == c.n_sm && shared == c.block_shared && major == c.major, "%s: %d SMs, %d bytes, %d", c.name, n_sm, shared, major);
        CHECK(cudaFuncSetAttribute(nothing, cudaFuncAttributeMaxDynamicSharedMemorySize, c.block_shared) == cudaSuccess &&
              cudaFuncSetAttribute(nothing, cudaFuncAttributeMaxDynamicSharedMemorySize, c.block_shared + 1) != cudaSuccess,
              "%s: shared memory of %d bytes and more", c.name, c.block_shared);
    }
    int n_sm = 0;
    CHECK(cuda_on_cpu("h100:16"), "a part of a card");
    cudaDeviceGetAttribute(&n_sm, cudaDevAttrMultiProcessorCount, 0);
    CHECK(n_sm == 16, "16 SMs of a card: got %d", n_sm);
    const char *const none[] = { "rtx2080", "h100:133", "h100:-1", "h100:", "h100:1x", ":4", "" };
    for (const char *name : none)
        CHECK(!cuda_on_cpu(name), "'%s': a card that is not in the table", name);
    cuda_on_cpu("h100");
}

static void test_gemm(void) {
    enum { M = 19, N = 7, K = 33 };
    cublasHandle_t handle;
    cublasCreate(&handle);
    __nv_bfloat16 *a = on_device<__nv_bfloat16>(M * K), *b = on_device<__nv_bfloat16>(N * K);
    float *c = on_device<float>(M * N);
    for (int i = 0; i < M * K; i++) a[i] = (float)(i * 7 % 23 - 11);
    for (int i = 0; i < N * K; i++) b[i] = (float)(i * 5 % 19 - 9);
    for (int turn = 0; turn < 4; turn++) {
        const bool ta = turn & 1, tb = turn & 2;
        const float alpha = 0.5f, beta = turn == 3;
        for (int i = 0; i < M * N; i++) c[i] = beta ? 8 : NAN;
        const cublasOperation_t op_a = ta ? CUBLAS_OP_T : CUBLAS_OP_N, op_b = tb ? CUBLAS_OP_T : CUBLAS_OP_N;
        const cublasStatus_t status = cublasGemmEx(handle, op_a, op_b, M, N, K, &alpha, a, CUDA_R_16BF, ta ? K : M, b, CUDA_R_16BF,
                                                   tb ? N : K, &beta, c, CUDA_R_32F, M, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
        cudaDeviceSynchronize();
        int bad = status != CUBLAS_STATUS_SUCCESS;
        for (int i = 0; i < M; i++)
            for (int j = 0; j < N; j++) {
                float sum = 0;
                for (int k = 0; k < K; k++) sum += (float)a[ta ? i * K + k : k * M + i] * (float)b[tb ? k * N + j : j * K + k];
                bad += c[j * M + i] != 0.5f * sum + 8 * beta;
            }
        CHECK(!bad, "gemm, turned %d: %d wrong", turn, bad);
    }
}

int main(void) {
    test_faults();                                     // first: processes are forked before there are threads
    test_numbers();
    test_warp();
    test_products();
    test_small_floats();
    test_streams();
    test_cards();
    test_gemm();
    return test_done("emulator");
}
