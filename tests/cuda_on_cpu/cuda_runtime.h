/* cuda_runtime.h - CUDA on the CPU, for tests: gemma4_kernels.cu compiled by g++ and run without a GPU or the toolkit.
 *
 * The headers in this folder take the place of the toolkit's; emulator.cpp beside them carries the kernels out. What is
 * emulated: grids, blocks and warps; barriers and functions of a warp, which meet exactly the lanes that they name; shared
 * memory; ldmatrix, mma, cp.async and mbarrier as instructions.h names them; streams, events, graphs; the memory calls; a cuBLAS
 * product.
 *
 * It looks for faults, and ends the process with one line that names the launch, the block and the thread:
 *   - a barrier or function of a warp that not all who are meant get to; different ones that meet
 *   - vector accesses that are not aligned, an index outside of an array (compile with -fsanitize=alignment,bounds)
 *   - accesses outside of what cudaMalloc returned (what an allocation is divided into later is not known here), after cudaFree,
 *     and writes after the end of dynamic shared memory
 *   - launches that a GPU refuses: too many threads, an empty or too large grid, shared memory above what was asked for
 * Others it makes show as wrong numbers: threads and blocks run in an order that changes from launch to launch (equal in every
 * run), a warp until it must wait, then the next one; dynamic shared memory and new allocations hold NaNs; what cp.async
 * brings is there when it was waited for and not before; work on a stream begins when the host waits for it, not before.
 *
 * Not emulated, so nothing here proves it: time; the memory model (within a block threads take turns, between blocks it is
 * the CPU's); lanes of a warp that run in step; static shared memory: its size, and reads before it is written (it holds what
 * the last block left); what the tensor cores do inside a sum (here f32, ascending k), contraction of a*b + c to one rounding,
 * expf and its like to the last bit; how many blocks are resident, so nothing may wait for another block (and who spins
 * for another thread without __nanosleep spins for ever); overlap of launches; several devices.
 *
 * It is a card of parts/cards.h: an H100 before cuda_on_cpu(name), to be called before anything else; "h100:16" is 16 of its
 * multiprocessors, as MIG divides it: small models take less time, since each multiprocessor computes norms of its own.
 * CUDA_ON_CPU_FAULT=driver, none, old, image, shared, pinned or little: the driver is too old, or missing; the card is older than
 * 8.0; there is no code for it; it has too little shared memory; small pieces of pinned memory are refused; 400 MiB of memory.
 * CUDA_ON_CPU_THREADS=1 runs the blocks one after another on the host's thread; CUDA_ON_CPU_SEED=n changes the order. */
#ifndef CUDA_RUNTIME_H
#define CUDA_RUNTIME_H
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <tuple>
#include <type_traits>

#define __global__
#define __device__
#define __noinline__
#define __host__
#define __constant__
#define __shared__ thread_local            // a block's threads are fibers of one thread of the system
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __forceinline__ inline __attribute__((always_inline))
#define CUDART_VERSION 12000
#define CUDART_INF_F INFINITY
#define CUDART_NAN_F NAN

// ---- vector types ----
#define CUDA_VECTORS(type, name, align2, align4) \
    struct name##1 { type x; }; \
    struct __align__(align2) name##2 { type x, y; }; \
    struct name##3 { type x, y, z; }; \
    struct __align__(align4) name##4 { type x, y, z, w; }; \
    static inline name##1 make_##name##1(type x) { return { x }; } \
    static inline name##2 make_##name##2(type x, type y) { return { x, y }; } \
    static inline name##3 make_##name##3(type x, type y, type z) { return { x, y, z }; } \
    static inline name##4 make_##name##4(type x, type y, type z, type w) { return { x, y, z, w }; }
CUDA_VECTORS(signed char, char, 2, 4)
CUDA_VECTORS(unsigned char, uchar, 2, 4)
CUDA_VECTORS(short, short, 4, 8)
CUDA_VECTORS(unsigned short, ushort, 4, 8)
CUDA_VECTORS(int, int, 8, 16)
CUDA_VECTORS(unsigned, uint, 8, 16)
CUDA_VECTORS(long long, longlong, 16, 16)
CUDA_VECTORS(unsigned long long, ulonglong, 16, 16)
CUDA_VECTORS(float, float, 8, 16)
CUDA_VECTORS(double, double, 16, 16)
#undef CUDA_VECTORS
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) { }
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) { }
};
extern thread_local uint3 threadIdx, blockIdx;
extern thread_local dim3 blockDim, gridDim;
static constexpr int warpSize = 32;

template <typename A, typename B> static inline std::common_type_t<A, B> min(A a, B b) {
    typedef std::common_type_t<A, B> T;
    if constexpr (std::is_floating_point_v<T>) return (T)a != (T)a || (T)b < (T)a ? (T)b : (T)a;
    else return (T)b < (T)a ? (T)b : (T)a;
}
template <typename A, typename B> static inline std::common_type_t<A, B> max(A a, B b) {
    typedef std::common_type_t<A, B> T;
    if constexpr (std::is_floating_point_v<T>) return (T)a != (T)a || (T)b > (T)a ? (T)b : (T)a;
    else return (T)b > (T)a ? (T)b : (T)a;
}

// ---- meetings of threads ----
enum CudaMeeting { MEET_SYNC, MEET_SHUFFLE, MEET_SHUFFLE_UP, MEET_SHUFFLE_DOWN, MEET_SHUFFLE_XOR, MEET_BALLOT, MEET_ANY, MEET_ALL,
                   MEET_ADD, MEET_MIN, MEET_MAX, MEET_MIN_SIGNED, MEET_MAX_SIGNED, MEET_AND, MEET_OR, MEET_XOR, MEET_MATCH,
                   MEET_MATRICES, MEET_TRANSPOSED, MEET_TRANSPOSE, MEET_MULTIPLY_INT8, MEET_MULTIPLY_HALF,
                   MEET_BARRIER, MEET_BARRIER_OR, MEET_BARRIER_AND, MEET_BARRIER_COUNT, MEET_FIRST,
                   MEET_MBARRIER };
uint64_t cuda_meet(CudaMeeting what, unsigned mask, uint64_t value, int parameter = 0);      // lanes of a warp
int  cuda_barrier(CudaMeeting what, int value);                                                  // threads of a block
void cuda_barrier_of(int n);                                                                     // the first n of them
void cuda_yield(void);                                                                           // another thread may go on
__attribute__((noreturn, format(printf, 1, 2))) void cuda_fault(const char *fmt, ...);

static inline void __syncthreads(void) { cuda_barrier(MEET_BARRIER, 0); }
static inline int __syncthreads_or(int v) { return cuda_barrier(MEET_BARRIER_OR, v); }
static inline int __syncthreads_and(int v) { return cuda_barrier(MEET_BARRIER_AND, v); }
static inline int __syncthreads_count(int v) { return cuda_barrier(MEET_BARRIER_COUNT, v); }
static inline void __syncwarp(unsigned mask = ~0u) { cuda_meet(MEET_SYNC, mask, 0); }
static inline void __nanosleep(unsigned) { cuda_yield(); }

template <typename T> static inline T cuda_shuffle(CudaMeeting what, unsigned mask, T v, int by, int width) {
    static_assert(sizeof v <= 8);
    uint64_t bits = 0;
    memcpy(&bits, &v, sizeof v);
    if (width <= 0 || width > 32 || (width & (width - 1))) cuda_fault("a shuffle of width %d", width);
    bits = cuda_meet(what, mask, bits, width << 8 | (what == MEET_SHUFFLE ? by & 31 : min((unsigned)by, 32u)));
    memcpy((void *)&v, &bits, sizeof v);
    return v;
}
template <typename T> static inline T __shfl_sync(unsigned mask, T v, int lane, int width = 32) {
    return cuda_shuffle(MEET_SHUFFLE, mask, v, lane, width);
}
template <typename T> static inline T __shfl_up_sync(unsigned mask, T v, unsigned by, int width = 32) {
    return cuda_shuffle(MEET_SHUFFLE_UP, mask, v, (int)by, width);
}
template <typename T> static inline T __shfl_down_sync(unsigned mask, T v, unsigned by, int width = 32) {
    return cuda_shuffle(MEET_SHUFFLE_DOWN, mask, v, (int)by, width);
}
template <typename T> static inline T __shfl_xor_sync(unsigned mask, T v, int by, int width = 32) {
    return cuda_shuffle(MEET_SHUFFLE_XOR, mask, v, by, width);
}
static inline unsigned __ballot_sync(unsigned mask, int v) { return (unsigned)cuda_meet(MEET_BALLOT, mask, v != 0); }
static inline int __any_sync(unsigned mask, int v) { return (int)cuda_meet(MEET_ANY, mask, v != 0); }
static inline int __all_sync(unsigned mask, int v) { return (int)cuda_meet(MEET_ALL, mask, v != 0); }
static inline unsigned __reduce_add_sync(unsigned mask, unsigned v) { return (unsigned)cuda_meet(MEET_ADD, mask, v); }
static inline unsigned __reduce_min_sync(unsigned mask, unsigned v) { return (unsigned)cuda_meet(MEET_MIN, mask, v); }
static inline unsigned __reduce_max_sync(unsigned mask, unsigned v) { return (unsigned)cuda_meet(MEET_MAX, mask, v); }
static inline unsigned __reduce_and_sync(unsigned mask, unsigned v) { return (unsigned)cuda_meet(MEET_AND, mask, v); }
static inline unsigned __reduce_or_sync(unsigned mask, unsigned v) { return (unsigned)cuda_meet(MEET_OR, mask, v); }
static inline unsigned __reduce_xor_sync(unsigned mask, unsigned v) { return (unsigned)cuda_meet(MEET_XOR, mask, v); }
static inline int __reduce_add_sync(unsigned mask, int v) { return (int)cuda_meet(MEET_ADD, mask, (unsigned)v); }
static inline int __reduce_min_sync(unsigned mask, int v) { return (int)cuda_meet(MEET_MIN_SIGNED, mask, (unsigned)v); }
static inline int __reduce_max_sync(unsigned mask, int v) { return (int)cuda_meet(MEET_MAX_SIGNED, mask, (unsigned)v); }
template <typename T> static inline unsigned __match_any_sync(unsigned mask, T v) {
    uint64_t bits = 0;
    memcpy(&bits, &v, sizeof v);
    return (unsigned)cuda_meet(MEET_MATCH, mask, bits);
}

// ---- atomic operations, fences, loads ----
template <typename T> using CudaSame = std::type_identity_t<T>;
template <typename T, typename F> static inline T cuda_atomic(T *p, F next) {
    if ((uintptr_t)p % sizeof(T)) cuda_fault("atomic operation on %p, which is not aligned to %zu", (void *)p, sizeof(T));
    T was, now;
    __atomic_load(p, &was, __ATOMIC_SEQ_CST);
    do now = next(was); while (!__atomic_compare_exchange(p, &was, &now, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    return was;
}
template <typename T> static inline T atomicAdd(T *p, CudaSame<T> v) { return cuda_atomic(p, [=](T x) { return (T)(x + v); }); }
template <typename T> static inline T atomicSub(T *p, CudaSame<T> v) { return cuda_atomic(p, [=](T x) { return (T)(x - v); }); }
template <typename T> static inline T atomicMin(T *p, CudaSame<T> v) { return cuda_atomic(p, [=](T x) { return v < x ? v : x; }); }
template <typename T> static inline T atomicMax(T *p, CudaSame<T> v) { return cuda_atomic(p, [=](T x) { return v > x ? v : x; }); }
template <typename T> static inline T atomicAnd(T *p, CudaSame<T> v) { return cuda_atomic(p, [=](T x) { return (T)(x & v); }); }
template <typename T> static inline T atomicOr(T *p, CudaSame<T> v) { return cuda_atomic(p, [=](T x) { return (T)(x | v); }); }
template <typename T> static inline T atomicXor(T *p, CudaSame<T> v) { return cuda_atomic(p, [=](T x) { return (T)(x ^ v); }); }
template <typename T> static inline T atomicExch(T *p, CudaSame<T> v) { return cuda_atomic(p, [=](T) { return v; }); }
template <typename T> static inline T atomicCAS(T *p, CudaSame<T> from, CudaSame<T> to) {
    return cuda_atomic(p, [=](T x) { return x == from ? to : x; });
}
static inline unsigned atomicInc(unsigned *p, unsigned top) {
    return cuda_atomic(p, [=](unsigned x) { return x >= top ? 0 : x + 1; });
}
static inline unsigned atomicDec(unsigned *p, unsigned top) {
    return cuda_atomic(p, [=](unsigned x) { return x == 0 || x > top ? top : x - 1; });
}
static inline void __threadfence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline void __threadfence_block(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline void __threadfence_system(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
template <typename T> static inline T __ldg(const T *p) { return *p; }
template <typename T> static inline T __ldcs(const T *p) { return *p; }
template <typename T> static inline T __ldcg(const T *p) {
    __asm__ volatile("" ::: "memory");              // what another block wrote meanwhile
    return *p;
}
template <typename T> static inline T __ldlu(const T *p) { return *p; }
template <typename T> static inline void __stcs(T *p, CudaSame<T> v) { *p = v; }
template <typename T> static inline void __stcg(T *p, CudaSame<T> v) { *p = v; }
static inline void __trap(void) { cuda_fault("__trap()"); }

// ---- numbers ----
template <typename To, typename From> static inline To cuda_bits(From v) {
    static_assert(sizeof(To) == sizeof(From));
    To t;
    memcpy(&t, &v, sizeof t);
    return t;
}
static inline unsigned __float_as_uint(float v) { return cuda_bits<unsigned>(v); }
static inline int __float_as_int(float v) { return cuda_bits<int>(v); }
static inline float __uint_as_float(unsigned v) { return cuda_bits<float>(v); }
static inline float __int_as_float(int v) { return cuda_bits<float>(v); }
static inline long long __double_as_longlong(double v) { return cuda_bits<long long>(v); }
static inline double __longlong_as_double(long long v) { return cuda_bits<double>(v); }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __frcp_rn(float a) { return 1 / a; }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline double __ddiv_rn(double a, double b) { return a / b; }
static inline float __double2float_rn(double a) { return (float)a; }
#define __expf expf               // glibc has declared functions of these names
#define __exp10f exp10f
#define __logf logf
#define __log2f log2f
#define __powf powf
#define __sinf sinf
#define __cosf cosf
static inline float __saturatef(float a) { return a > 0 ? a < 1 ? a : 1 : 0; }
static inline float rsqrtf(float a) { return (float)(1 / sqrt((double)a)); }
static inline double rsqrt(double a) { return 1 / sqrt(a); }
static inline void sincospif(float a, float *s, float *c) {
    const double turn = a - 2 * rint(a / 2.0);         // exact
    *s = (float)sin(turn * M_PI);
    *c = (float)cos(turn * M_PI);
}
static inline int cuda_to_int(double v) {
    return v != v ? 0 : v >= 2147483647.0 ? INT32_MAX : v <= -2147483648.0 ? INT32_MIN : (int)v;
}
static inline unsigned cuda_to_uint(double v) { return !(v > 0) ? 0 : v >= 4294967295.0 ? UINT32_MAX : (unsigned)v; }
static inline int __float2int_rn(float v) { return cuda_to_int(rint((double)v)); }
static inline int __float2int_rz(float v) { return cuda_to_int(trunc((double)v)); }
static inline int __float2int_rd(float v) { return cuda_to_int(floor((double)v)); }
static inline int __float2int_ru(float v) { return cuda_to_int(ceil((double)v)); }
static inline unsigned __float2uint_rn(float v) { return cuda_to_uint(rint((double)v)); }
static inline unsigned __float2uint_rz(float v) { return cuda_to_uint(trunc((double)v)); }
static inline float __int2float_rn(int v) { return (float)v; }
static inline float __uint2float_rn(unsigned v) { return (float)v; }
// ---- bits and bytes ----
static inline int __popc(unsigned v) { return __builtin_popcount(v); }
static inline int __popcll(uint64_t v) { return __builtin_popcountll(v); }
static inline int __ffs(int v) { return __builtin_ffs(v); }
static inline int __ffsll(long long v) { return __builtin_ffsll(v); }
static inline int __clz(int v) { return v ? __builtin_clz((unsigned)v) : 32; }
static inline int __clzll(long long v) { return v ? __builtin_clzll((uint64_t)v) : 64; }
static inline unsigned __brev(unsigned v) {
    unsigned r = 0;
    for (int i = 0; i < 32; i++) r |= (v >> i & 1) << (31 - i);
    return r;
}
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
static inline int __mulhi(int a, int b) { return (int)((int64_t)a * b >> 32); }
static inline uint64_t __umul64hi(uint64_t a, uint64_t b) { return (uint64_t)((unsigned __int128)a * b >> 64); }
static inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned by) {
    return (unsigned)(((uint64_t)hi << 32 | lo) << (by & 31) >> 32);
}
static inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned by) {
    return (unsigned)(((uint64_t)hi << 32 | lo) >> (by & 31));
}
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned select) {
    const uint64_t all = (uint64_t)b << 32 | a;
    unsigned r = 0;
    for (int i = 0; i < 4; i++) {
        const unsigned s = select >> 4 * i & 15, byte = (unsigned)(all >> 8 * (s & 7)) & 255;
        r |= (s & 8 ? (byte >> 7) * 255 : byte) << 8 * i;
    }
    return r;
}
static inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 32; i += 8) c += (int8_t)(a >> i) * (int8_t)(b >> i);
    return c;
}
static inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
    for (int i = 0; i < 32; i += 8) c += (unsigned)(uint8_t)(a >> i) * (uint8_t)(b >> i);
    return c;
}
// Four bytes, or two halves of a word, each for itself.
template <typename T, typename F> static inline unsigned cuda_each(unsigned a, unsigned b, F f) {
    T x[4 / sizeof(T)], y[4 / sizeof(T)];
    memcpy(x, &a, 4);
    memcpy(y, &b, 4);
    for (size_t i = 0; i < 4 / sizeof(T); i++) x[i] = (T)f(x[i], y[i]);
    memcpy(&a, x, 4);
    return a;
}
#define CUDA_EACH(name, type, expression) \
    static inline unsigned name(unsigned a, unsigned b) { return cuda_each<type>(a, b, [](int x, int y) { return expression; }); }
CUDA_EACH(__vmins4, int8_t, x < y ? x : y)
CUDA_EACH(__vminu4, uint8_t, x < y ? x : y)
CUDA_EACH(__vmaxs4, int8_t, x > y ? x : y)
CUDA_EACH(__vmaxu4, uint8_t, x > y ? x : y)
CUDA_EACH(__vcmpgts4, int8_t, x > y ? -1 : 0)
CUDA_EACH(__vcmpgtu4, uint8_t, x > y ? -1 : 0)
CUDA_EACH(__vcmpeq4, uint8_t, x == y ? -1 : 0)
CUDA_EACH(__vcmpne4, uint8_t, x != y ? -1 : 0)
CUDA_EACH(__vabsdiffs4, int8_t, x > y ? x - y : y - x)
CUDA_EACH(__vabsdiffu4, uint8_t, x > y ? x - y : y - x)
CUDA_EACH(__vadd4, uint8_t, x + y)
CUDA_EACH(__vsub4, uint8_t, x - y)
CUDA_EACH(__vadd2, uint16_t, x + y)
CUDA_EACH(__vsub2, uint16_t, x - y)
#undef CUDA_EACH
static inline unsigned __vneg4(unsigned a) { return __vsub4(0, a); }
static inline unsigned __vabs4(unsigned a) { return cuda_each<int8_t>(a, 0, [](int x, int) { return x < 0 ? -x : x; }); }

// ---- the host's side ----
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorMemoryAllocation = 2, cudaErrorInsufficientDriver = 35,
                   cudaErrorNoDevice = 100, cudaErrorNoKernelImageForDevice = 209, cudaErrorNotReady = 600,
                   cudaErrorStreamCaptureUnsupported = 900 };
enum cudaMemcpyKind { cudaMemcpyHostToHost, cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice,
                      cudaMemcpyDefault };
enum cudaDeviceAttr { cudaDevAttrMaxSharedMemoryPerBlock = 8, cudaDevAttrMultiProcessorCount = 16, cudaDevAttrIntegrated = 18,
                      cudaDevAttrL2CacheSize = 38, cudaDevAttrMaxThreadsPerMultiProcessor = 39,
                      cudaDevAttrComputeCapabilityMajor = 75, cudaDevAttrComputeCapabilityMinor = 76,
                      cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81, cudaDevAttrMaxRegistersPerMultiprocessor = 82,
                      cudaDevAttrMaxSharedMemoryPerBlockOptin = 97 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8, cudaFuncAttributePreferredSharedMemoryCarveout = 9 };
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeRelaxed };
enum cudaLaunchAttributeID { cudaLaunchAttributeIgnore = 0, cudaLaunchAttributeProgrammaticStreamSerialization = 6 };
enum { cudaStreamNonBlocking = 1, cudaEventBlockingSync = 1, cudaEventDisableTiming = 2 };
typedef struct CudaStream *cudaStream_t;
typedef struct CudaEvent *cudaEvent_t;
typedef struct CudaGraph *cudaGraph_t;
typedef struct CudaGraph *cudaGraphExec_t;
union cudaLaunchAttributeValue { int programmaticStreamSerializationAllowed; char pad[64]; };
struct cudaLaunchAttribute { cudaLaunchAttributeID id; cudaLaunchAttributeValue val; };
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute *attrs;
    unsigned numAttrs;
};
const char *cudaGetErrorString(cudaError_t e);
cudaError_t cudaGetLastError(void);
cudaError_t cudaPeekAtLastError(void);
cudaError_t cudaGetDeviceCount(int *n);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr which, int device);
struct cudaDeviceProp { char name[256]; };
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int device);
cudaError_t cudaDeviceGetPCIBusId(char *id, int size, int device);
cudaError_t cudaDeviceSynchronize(void);
cudaError_t cudaMalloc(void **p, size_t bytes);
cudaError_t cudaFree(void *p);
cudaError_t cudaMallocHost(void **p, size_t bytes);
cudaError_t cudaFreeHost(void *p);
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total);
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream = nullptr);
cudaError_t cudaMemset(void *to, int byte, size_t bytes);
cudaError_t cudaMemsetAsync(void *to, int byte, size_t bytes, cudaStream_t stream = nullptr);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags);
cudaError_t cudaStreamCreate(cudaStream_t *stream);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags);
cudaError_t cudaEventCreate(cudaEvent_t *event);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to);
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph);
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, void *nodes, size_t *n);      // nodes: NULL
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags = 0);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec);
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream);

cudaError_t cudaDriverGetVersion(int *version);
cudaError_t cudaRuntimeGetVersion(int *version);

extern "C" bool cuda_on_cpu(const char *card);     // false: there is no card of that name

// Work for a stream: a function and a copy of the bytes that it is given.
void cuda_submit(cudaStream_t stream, void (*work)(const void *), const void *bytes, size_t n);
bool cuda_allow_shared(const void *kernel, int bytes);         // false: more than a block can have

template <typename F> cudaError_t cudaFuncSetAttribute(F *kernel, cudaFuncAttribute which, int value) {
    if (which != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
    return cuda_allow_shared((const void *)kernel, value) ? cudaSuccess : cudaErrorInvalidValue;
}

struct cudaFuncAttributes { int ptxVersion, binaryVersion; };
cudaError_t cuda_code_of(cudaFuncAttributes *a);
template <typename F> cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *a, F *) { return cuda_code_of(a); }

struct CudaLaunch {           // a kernel, how to call it, and its arguments
    const void *kernel;
    void (*call)(const void *kernel, const void *arguments);
    const void *arguments;
    size_t argument_bytes, shared;
    dim3 grid, block;
};
void cuda_launch(cudaStream_t stream, const CudaLaunch *launch);

template <typename... P, typename... A>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(P...), A &&...a) {
    typedef std::tuple<P...> Arguments;
    const Arguments arguments(static_cast<P>(a)...);
    const auto call = [](const void *k, const void *p) { std::apply((void (*)(P...))k, *(const Arguments *)p); };
    const CudaLaunch launch = { (const void *)kernel, call, &arguments, sizeof arguments, config->dynamicSmemBytes, config->gridDim,
                                config->blockDim };
    cuda_launch(config->stream, &launch);
    return cudaSuccess;
}
#endif
