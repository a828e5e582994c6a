/* gemma4_kernels.cu - the CUDA backend: every operation of gemma4.h as kernels, each with its host wrapper below it.
 *
 * HOW TO READ  cuda_ops() at the end lists the operations. Operation <op> is the function cuda_<op>; ref_<op> in
 *              parts/reference.h defines what it computes, and "see" in the head of a kernel names it. Nothing here
 *              knows about files, text or the model. Five headers in parts/ hold what a first reader can skip:
 *              attend_coded.cuh, sparse.cuh, vision.cuh, sample.cuh, device.cuh.
 * CONTENTS     search for "[n]"
 *   [1] Errors, the stream, state           [6] Products of a prompt: cuBLAS
 *   [2] Launch; warp and block helpers      [7] Cache: store, commit, copy
 *   [3] Weights: layout, upload             [8] Attention
 *   [4] Inputs: embedding, norms            [9] Output: head, sampling
 *   [5] Products of 1 to 64 rows            [10] The device, the table of operations
 * INVARIANTS   one stream; no operation allocates or synchronises; index products are size_t; for 1..64 rows the order
 *              of every sum depends on shapes alone. sm_80 and up.
 *
 * WORDS        each has one meaning
 *   lane       one of the 32 threads of a warp
 *   early      before wait_for_previous_kernel() returns [programmatic dependent launch, PDL]
 *   prefetch   to request data before it is needed, and to do something else until it arrives
 *   stage      one slot of a pipeline buffer in shared memory: copies fill it while the other slots are used. The Cache
 *              named `stage` in gemma4.h is another thing: it holds the new rows of a long prompt
 *   group      32 consecutive values of a row: they share a scale, in quantised weights and in int8 activations
 *   octet      8 consecutive groups of a row; the 8 lanes of a feature read one octet at once
 *   chunk      16 consecutive bytes of a row: one load of a lane
 *   plane      the same bits of all groups of a matrix, one group after the other; a matrix has up to four planes
 *   feature    one output of a product: a row of the weight matrix
 *   panel      rows of a weight matrix, converted to f16 for cuBLAS
 *   job        one matrix of a launch of products, with what to do with the result
 *   work item  what a warp or a block computes at a time in a kernel that loops; it ends with finished outputs
 *   tile       a rectangle of a matrix, or 32 consecutive keys, that a block processes together
 *   slice      the groups l, l + 8, l + 16, ... of a row, added up by one lane or warp; a sum has 8 slices
 *   split      a part of a reduction that runs in another warp or block; its partial result is combined later
 *   span       consecutive tiles of keys; the unit in which keys are dealt to the splits
 *   subtile    16 consecutive keys: what one warp of attend_coded_kernel processes at a time
 *   record     how one octet of one feature lies in a stage
 *   column     in attention, one query: a row of the step times one of its heads. flash_kernel calls it a line
 *   slot       the place of a position in a cache
 *   strip      128 tokens of the vocabulary, in sampling
 *   bin        tokens with similar logits, in sampling */
#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <atomic>
#include <type_traits>
#include "gemma4.h"

// ==== [1] Errors, the stream, state ==================================================================================
// A device error ends the process with one line that names the operation and its shapes. All state of the backend is
// here: one stream, scratch memory that each operation may overwrite, a pinned buffer for copies, and recorded steps.

enum { PINNED_BYTES = 4 << 20, MAX_STEPS = 256, RECORD_AFTER = 8, MAX_PENDING = 256, MAX_FENCES = 1024,
       PANEL_BYTES = 64 << 20, PARTIAL_BYTES = 64 << 20, BLAS_BYTES = 32 << 20, MAX_ARRIVED = 4096,
       STATIC_SHARED = 3 << 10 };       // shared memory that a kernel may declare in addition to shared_bytes
enum { EVENT_FLAGS = cudaEventDisableTiming | cudaEventBlockingSync };     // the host sleeps while it waits

typedef struct {              // a step whose key was seen at least once
    StepKey key;
    cudaGraphExec_t exec;     // NULL: not recorded yet
    int     n_launched;       // steps that ran without a recording; the one after RECORD_AFTER is recorded
    size_t  n_nodes;          // kernels in the graph
    int64_t used;             // number of the last begin() with this key
} Recorded;

typedef struct {              // a copy from device to host, delivered to dst when its data has arrived
    void  *dst;
    const char *src;          // in the pinned buffer
    size_t bytes;
} Pending;

typedef struct {              // a point in the stream
    cudaEvent_t event;
    size_t   pinned_at;       // values of the state below at that point
    unsigned n_pending;
} Fence;

typedef struct HostMatrix {   // a matrix in pinned host memory
    const void *file, *owner; // the uploaded data; the last memory reserved before the upload
    char  *data;
    size_t bytes;
    bool   is_stack;          // of experts
    struct HostMatrix *next;  // uploaded after this one
    char  *copy;              // in cuda.ring; NULL: none
    struct HostMatrix *behind;        // the next copy in the ring
    cudaEvent_t arrived;      // the copy is complete
} HostMatrix;

typedef struct {              // what the next launch has to know about this one
    int      blocks;
    unsigned writes;          // WRITES_.. below
} Launched;

typedef struct {              // pairs order[first .. first + n - 1], all of one expert; n = 0: unused
    int32_t expert, first, n;
} PairTile;

static struct {
    cudaStream_t stream;
    cublasHandle_t blas;
    Card   card;              // launches are planned for this card
    const Card *pretended;    // NULL: the real card
    void (*watch)(const LaunchPlan *); // called for every planned launch; NULL: no caller
    bool   plans_only;        // plan and report launches, but do not run them
    Limits lim;
    char  *scratch;           // (scratch_size) divided by scratch_layout()
    size_t scratch_size;
    float *y;                 // (3, prepared_rows, max_cols) prepared inputs: of the operation, of the job in the same
                              // launch, of the experts that follow (these up to STEP_ROWS rows)
    int8_t *yq;               // (3, prepared_rows, max_cols)
    float *ys;                // (3, prepared_rows, max_cols / 32)
    __half *y16;              // (max_rows, max_cols) for cuBLAS, times PROMPT_SCALE
    int32_t *order;           // (max_rows * max_experts) pairs (row, chosen expert), sorted by expert
    PairTile *tiles;          // (most_tiles)
    __half *panel;            // (PANEL_BYTES) rows of a matrix for cuBLAS
    float *wide;              // (wide_values) gate and up of a prompt
    float *partial;           // (PARTIAL_BYTES) attention: results of splits before they are combined
    unsigned *arrived;        // (MAX_ARRIVED) counts blocks of a launch that have finished; 0 between launches
    char  *blas_work;         // (BLAS_BYTES)
    char  *pinned;            // (PINNED_BYTES) given out in order, then from the start again
    size_t pinned_at, pinned_free;             // bytes given out so far; how many of them are free again
    Pending pending[MAX_PENDING];              // entry n lies at n % MAX_PENDING
    unsigned n_pending, n_handed;              // copies issued and delivered so far
    Recorded steps[MAX_STEPS];
    int    n_steps;
    int64_t n_begun;          // calls of begin() so far
    Recorded *step; // between begin() and end(): being recorded or replayed; NULL: operations run as they are called
    bool   recording;
    int64_t n_launches;       // so far
    Launched last;            // the last launch
    Fence   fences[MAX_FENCES];
    int    n_fences;          // so far
    void  *reserved;          // the last reservation
    HostMatrix *in_host;      // in the order of upload
    char  *ring;              // (lim.host_bytes) copies of such matrices
    int32_t *slots;           // (STEP_ROWS, max_experts) the chosen experts' numbers among those that were fetched
    HostMatrix *oldest, *newest;       // copies in the ring; NULL: none
    cudaStream_t copies;      // the stream that fills it
    cudaEvent_t used;
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
HOST_DEVICE static inline int div_up(int n, int by) { return (n + by - 1) / by; }
HOST_DEVICE static constexpr int round_16(int n) { return (n + 15) / 16 * 16; }
static int min_int(int a, int b) { return a < b ? a : b; }
static int max_int(int a, int b) { return a > b ? a : b; }
static size_t min_size(size_t a, size_t b) { return a < b ? a : b; }

// ==== [2] Launch; warp and block helpers =============================================================================
// Launches overlap: the blocks of a launch start while the last blocks of the launch before it still run (programmatic
// dependent launch, PDL). wait_for_previous_kernel() holds them until they may read its results.

extern __shared__ __align__(16) char shared_bytes[];   // dynamic shared memory of the running kernel

// The first statement of every kernel, or the last one before the kernel writes, or reads something that the launch
// before it may have written.
__device__ static inline void wait_for_previous_kernel(void) {
#if __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize();                   // all earlier launches have ended and their writes are visible
    cudaTriggerProgrammaticLaunchCompletion();         // the next launch may start once all blocks are here
#endif
}

// What a launch may write; every launch states it.
enum { WRITES_ACTIVATIONS = 1,          // results of operations, chosen experts, scratch
       WRITES_ROWS = 2,                 // rows and segments of a step, lengths of sessions
       WRITES_CACHE = 4,                // rows of K and V
       WRITES_WEIGHTS = 8,
       WRITES_NOTHING = 0, WRITES_ALL_BUT_WEIGHTS = WRITES_ACTIVATIONS | WRITES_ROWS | WRITES_CACHE };

// May the next kernel read, before its wait_for_previous_kernel(), data of launches that state `written`? Only the last
// launch matters: it lets the next one start only after its own wait, when all launches before it have ended. After a
// copy or a cuBLAS call the next kernel starts when that has ended.
static bool may_read_early(unsigned written) { return !(cuda.last.writes & written); }

// Launches one kernel; CHECK_LAUNCH after it names the operation. writes: as above; shared: bytes of dynamic shared
// memory. Every kernel may read weights early, so no kernel overlaps one that writes weights.
template <typename... Parameters, typename... Arguments>
static void launch(unsigned writes, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared,
                   Arguments... arguments) {
    if (cuda.plans_only) return;
    cudaLaunchConfig_t config = { };
    cudaLaunchAttribute early = { };
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared;
    config.stream = cuda.stream;
    config.attrs = &early;
    config.numAttrs = cuda.card.starts_early && may_read_early(WRITES_WEIGHTS);
    cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
    cuda.last = (Launched){ (int)(grid.x * grid.y * grid.z), writes };
    cuda.n_launches += !cuda.recording;
}

// Called where a launch is planned; fmt says in words what was chosen. per_sm: as in LaunchPlan
__attribute__((format(printf, 6, 7)))
static void report_plan(const char *family, dim3 grid, int threads, size_t shared, int per_sm, const char *fmt, ...) {
    if (!cuda.watch) return;
    LaunchPlan plan = { family, "", (int)(grid.x * grid.y * grid.z), threads, per_sm, shared };
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(plan.choice, sizeof plan.choice, fmt, ap);
    va_end(ap);
    cuda.watch(&plan);
}

// Once at start, for each kernel that needs it: allows all shared memory that a block can have, less `fixed` bytes that
// the kernel declares statically.
template <typename Kernel> static void allow_shared(Kernel kernel, int fixed = STATIC_SHARED) {
    const int bytes = cuda.card.block_shared - fixed;
    const cudaFuncAttribute which = cudaFuncAttributeMaxDynamicSharedMemorySize;
    CHECK_CUDA(cudaFuncSetAttribute(kernel, which, bytes), "shared memory of a kernel");
}

// ---- instructions without a name in CUDA C++ ----
// Loads four matrices of 8 rows of 16 bytes. Lanes 8 i .. 8 i + 7 pass the addresses of the rows of matrix i. Of each
// matrix every lane gets word lane % 4 of row lane / 4:
//
//              bytes 0..3   4..7   8..11   12..15
//     row 0    lane  0      1      2       3
//     row 1    lane  4      5      6       7
//     ...                                               row r, word w -> lane 4 r + w
//     row 7    lane 28      29     30      31
#ifdef __CUDACC__
__device__ static inline void load_matrices(unsigned r[4], const void *shared_row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((unsigned)__cvta_generic_to_shared(shared_row)) : "memory");
}
// The same, but each matrix of 8 x 8 halves is transposed.
__device__ static inline void load_matrices_transposed(unsigned r[4], const void *shared_row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((unsigned)__cvta_generic_to_shared(shared_row)) : "memory");
}
// Transposes a matrix of 8 x 8 halves: lane l holds row l / 4, columns 2 (l % 4) and 2 (l % 4) + 1, before and after.
__device__ static inline unsigned transpose_matrix(unsigned a) {
    unsigned r;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(a));
    return r;
}
// c (16 x 8) += a (16 x 32, row-major) b (32 x 8, column-major), int8 with int32 sums. Lane l holds, with t = l / 4 and
// k = l % 4:
//   a[0], a[1]: values 4k .. 4k + 3 of rows t and t + 8; a[2], a[3]: values 16 + 4k .. 16 + 4k + 3 of the same rows
//   b[0], b[1]: values 4k .. and 16 + 4k .. of column t
//   c[0], c[1]: row t, columns 2k and 2k + 1; c[2], c[3]: the same columns of row t + 8
__device__ static inline void multiply_int8(int c[4], const unsigned a[4], const unsigned b[2]) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// The same with 16 values: a (16 x 16), b (16 x 8).
//   a[0], a[1]: values 4k .. 4k + 3 of rows t and t + 8; b: values 4k .. 4k + 3 of column t
__device__ static inline void multiply_int8_half(int c[4], const unsigned a[2], unsigned b) {
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(b));
}
// c (16 x 8) += a (16 x 16, row-major) b (16 x 8, column-major), halves with f32 sums.
//   a[0], a[1]: values 2k and 2k + 1 of rows t and t + 8; a[2], a[3]: values 8 + 2k and 9 + 2k of the same rows
//   b[0], b[1]: values 2k .. and 8 + 2k .. of column t;   c as above
__device__ static inline void multiply_half(float c[4], const unsigned a[4], const unsigned b[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// Starts to copy 16 bytes from global to shared memory, both addresses multiples of 16, and returns. copy_commit()
// closes a set of copies. wait_for_copies<N>() returns when all sets of this thread but the last N have arrived; a
// barrier then makes them visible to the block.
__device__ static inline void copy_ahead(void *shared, const void *global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 :: "r"((unsigned)__cvta_generic_to_shared(shared)), "l"(global) : "memory");
}
// The same; L2 fetches the whole line of 128 bytes.
__device__ static inline void copy_line_ahead(void *shared, const void *global) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;"
                 :: "r"((unsigned)__cvta_generic_to_shared(shared)), "l"(global) : "memory");
}
// The same if `there`, else writes 16 bytes of zeros. The address must be valid in both cases.
__device__ static inline void copy_or_zero(void *shared, const void *global, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"((unsigned)__cvta_generic_to_shared(shared)), "l"(global), "r"(there ? 16 : 0) : "memory");
}
// The same for 4 bytes, address a multiple of 4.
__device__ static inline void copy_word_ahead(void *shared, const void *global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
                 :: "r"((unsigned)__cvta_generic_to_shared(shared)), "l"(global) : "memory");
}
__device__ static inline void copy_commit(void) { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ static inline void wait_for_copies(void) { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }
// A barrier in shared memory at which some threads arrive and others wait. Phase n ends after `count` arrivals.
// mbarrier_wait waits for the end of the phase with this parity. mbarrier_arrive_on_copies arrives when all copies that
// this thread has started are complete.
__device__ static inline void mbarrier_init(uint64_t *b, unsigned count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"((unsigned)__cvta_generic_to_shared(b)),
                 "r"(count) : "memory");
}
__device__ static inline void mbarrier_arrive(uint64_t *b) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }"
                 :: "r"((unsigned)__cvta_generic_to_shared(b)) : "memory");
}
__device__ static inline void mbarrier_arrive_on_copies(uint64_t *b) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: "r"((unsigned)__cvta_generic_to_shared(b))
                 : "memory");
}
__device__ static inline void mbarrier_wait(uint64_t *b, unsigned parity) {
    unsigned there;
    do {
#if __CUDA_ARCH__ >= 900
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(there) : "r"((unsigned)__cvta_generic_to_shared(b)), "r"(parity) : "memory");
#else
        asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(there) : "r"((unsigned)__cvta_generic_to_shared(b)), "r"(parity) : "memory");
#endif
    } while (!there);
}
// Returns v, but the compiler cannot know that. Values computed from it are computed here and not kept in registers
// from earlier.
__device__ static inline int opaque(int v) {
    asm volatile("" : "+r"(v));
    return v;
}
// A barrier of the first N threads of the block; the other threads continue.
template <int N>
__device__ static inline void sync_first(void) { asm volatile("bar.sync 1, %0;" :: "n"(N) : "memory"); }
// Loads 16 bytes that are read once: bypasses L1 and evicts nothing there.
__device__ static inline uint4 load_once(const void *p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
// Prefetches global memory into L2; address and size are multiples of 16.
__device__ static inline void prefetch_l2(const void *p, unsigned bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(p), "r"(bytes) : "memory");
#else
    (void)p, (void)bytes;
#endif
}
// 2^x, with an error of up to 2 ulp; 0 for -Inf and for results below 2^-126.
__device__ static inline float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// Four bytes of a (numbers 0 .. 3) and b (4 .. 7), selected by the nibbles of the low half of `which`. Nibble 8 + n
// gives a byte filled with the highest bit of byte n.
__device__ static inline unsigned permute_bytes(unsigned a, unsigned b, unsigned which) {
    unsigned r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(which));
    return r;
}
// sum + the dot product of four unsigned bytes (a) with four signed bytes (b).
__device__ static inline int dot_unsigned(unsigned a, unsigned b, int sum) {
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(sum));
    return sum;
}
// The address of a kernel parameter in memory. Loads from this address run in parallel. Through the constant bank, a
// warp waits for each line of 64 bytes, and the first read of a line goes to memory.
__device__ static inline const void *address_of_parameter(const void *parameter) {
    asm volatile("" : "+l"(parameter));
    return parameter;
}
// Loads a parameter of up to 64 blockDim.x bytes into L2, for a kernel that reads it through the constant bank. The
// result is not used, so nothing waits for it.
__device__ static inline unsigned prefetch_parameter(const void *parameter, int bytes) {
    unsigned word = 0;
    if (64 * (int)threadIdx.x < bytes)
        asm volatile("ld.u32 %0, [%1];"
                     : "=r"(word) : "l"((const char *)address_of_parameter(parameter) + 64 * threadIdx.x));
    return word;
}
#else
#include "instructions.h"     // the same functions for g++: tests/cuda_on_cpu
#endif

// ---- division ----
// Division by a number that the host knows, as a multiplication and a shift.

typedef struct {
    unsigned by, factor, shift;
} Divisor;

static Divisor divisor(unsigned by) {
    unsigned shift = 0;
    while (1u << shift < by) shift++;
    return (Divisor){ by, (unsigned)(((((uint64_t)1 << shift) - by) << 32) / by + 1), shift };
}

// x / d, for 0 <= x < 2^31
__device__ static inline int quotient(int x, Divisor d) {
    return (int)((__umulhi((unsigned)x, d.factor) + x) >> d.shift);
}
__device__ static inline int modulo(int x, Divisor d) { return x - quotient(x, d) * (int)d.by; }

// ---- order ----
// Floats as unsigned integers in the same order; -0 equals 0.

__device__ static inline unsigned ordered_bits(float z) {
    const unsigned bits = __float_as_uint(z + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ static inline float from_ordered_bits(unsigned n) { return __uint_as_float(n >> 31 ? n & 0x7fffffffu : ~n); }

// ---- halves ----
// Two f16 in a word, the first one in the low bits.

__device__ static inline unsigned half_bits(__half2 v) {
    unsigned bits;
    memcpy(&bits, &v, sizeof bits);
    return bits;
}
__device__ static inline __half2 two_halves(unsigned bits) {
    __half2 v;
    memcpy(&v, &bits, sizeof v);
    return v;
}

// ---- sums ----
// The order of a sum is fixed: lane l adds lane l + 16, then 8, 4, 2, 1. All lanes get the result.

__device__ static inline float warp_sum(float v) {
    for (int h = 16; h > 0; h /= 2) v += __shfl_xor_sync(~0u, v, h);
    return v;
}

__device__ static inline float warp_max(float v) {
    for (int h = 16; h > 0; h /= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, h));
    return v;
}

// Sum over the block, for all threads. blockDim.x is a multiple of 32. Two barriers: one before `part` is read, one
// before the next call may overwrite it.
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

// Each step is rounded by name: the compiler may not contract differently in different kernels (contract 7).
__device__ static inline float activate(ActFn fn, float x) {
    if (fn == ACT_SILU) return x / (1.0f + expf(-x));
    const float inner = __fmaf_rn(__fmul_rn(0.044715f, x), __fmul_rn(x, x), x);
    return __fmul_rn(__fmul_rn(0.5f, x), __fadd_rn(1.0f, tanhf(__fmul_rn(0.7978845608028654f, inner))));
}

// The scale of a group, from `top`: the bits of its largest |x| (compared as integers, NaN is above Inf). The rule of
// contract 6, bit for bit. *inv: factor from values to codes; 0: all codes are 0.
__device__ static inline float group_scale(unsigned top, float *inv) {
    const float a = __uint_as_float(top);
    *inv = 0;
    if (top >= 0x7f800000u) return __uint_as_float(0x7fc00000u);
    if (a < 0x1p-120f) return 0;
    *inv = __fdiv_rn(127.0f, a);
    return __fdiv_rn(a, 127.0f);
}

// One warp quantises one group: lane l holds x, value l of the group.
__device__ static inline void quantise_group(float x, int8_t *q, float *s) {
    const int lane = threadIdx.x % 32;
    float inv;
    const float scale = group_scale(__reduce_max_sync(~0u, __float_as_uint(x) & 0x7fffffffu), &inv);
    q[lane] = inv ? (int8_t)__float2int_rn(__fmul_rn(x, inv)) : 0;
    if (lane == 0) *s = scale;
}

// ==== [3] Weights: layout, upload ====================================================================================
// Quantised matrices are repacked once, at upload, into planes that lanes read with wide, aligned loads; a lane reads a
// whole group. No bit of the file is lost or converted.
//
//   plane   per group of 32 values, row after row             Q8  4-bit  5-bit  6-bit  2-bit  3-bit
//   lo      the low bits of the codes                bytes    32     16     16     16      8      8
//   hi      the bits above them                      bytes     -      -      4      8      -      4
//   head    what scales the group, or its block of 256 values, as in the file: see the list of formats below
//   sup     f16 values of a block of 256 that the file keeps apart
//
//   4-bit lo   low nibble of byte j: value j; high nibble: value j + 16. As four words v[0..3]: values 4w .. 4w + 3 are
//              the bytes of v[w] & 0x0f0f0f0f, values 16 + 4w .. 16 + 4w + 3 those of v[w] >> 4 & 0x0f0f0f0f
//   2-bit lo, and hi of 6-bit: two words, one for each half of the group; bits 2w, 2w + 1 of byte b: value 4w + b
//   1-bit hi   one word; bit w of byte b: value 4w + b
// Planes follow each other, each at a multiple of 256 bytes. A stack of n matrices is stored as one matrix of n * rows
// rows. A table from which rows are only gathered may stay in pinned host memory, in the same layout.

typedef struct {              // the planes of an uploaded matrix; floats: only lo, as in the file
    const uint8_t *lo, *hi, *head, *sup;
} Planes;

// One line for each type. In addition a type has a case in file_code() (where the file keeps its codes) and one in
// group_scales() (what scales a group). integer = code - offset, or the table's entry; value = a * integer - m, with a
// and m for each half of a group.
//     file       values and bytes of a block
//     code       bits in lo and in hi, code = lo + (hi << bits of lo); TABLE_IQ4, TABLE_FP4 or none; offset
//     head       bytes for each group, or for each block of 256 values; offset in the block; bytes that one group needs
//     sup        bytes for 256 values; offset in the block
//     traits     HAS_MIN: m is not 0; HAS_HALVES: the halves of a group differ; HAS_WIDE: a may be 2^104 or more
enum { TABLE_NONE, TABLE_IQ4, TABLE_FP4, HAS_MIN = 1, HAS_HALVES = 2, HAS_WIDE = 4 };
//     type       file      code                       head         sup     traits
#define USUAL_TYPES(X) \
    X(T_Q4_K,     256, 144, 4, 0, TABLE_NONE,  0,      16,   0, 16, 0,   0, HAS_MIN) \
    X(T_Q6_K,     256, 210, 4, 2, TABLE_NONE, 32,      16, 192,  2, 2, 208, HAS_HALVES) \
    X(T_Q8_0,      32,  34, 8, 0, TABLE_NONE,  0,       2,   0,  2, 0,   0, 0) \
    X(T_Q5_0,      32,  22, 4, 1, TABLE_NONE, 16,       2,   0,  2, 0,   0, 0) \
    X(T_Q4_0,      32,  18, 4, 0, TABLE_NONE,  8,       2,   0,  2, 0,   0, 0) \
    X(T_Q5_K,     256, 176, 4, 1, TABLE_NONE,  0,      16,   0, 16, 0,   0, HAS_MIN)
#define OTHER_TYPES(X) \
    X(T_Q4_1,      32,  20, 4, 0, TABLE_NONE,  0,       4,   0,  4, 0,   0, HAS_MIN) \
    X(T_Q5_1,      32,  24, 4, 1, TABLE_NONE,  0,       4,   0,  4, 0,   0, HAS_MIN) \
    X(T_IQ4_NL,    32,  18, 4, 0, TABLE_IQ4,   0,       2,   0,  2, 0,   0, 0) \
    X(T_IQ4_XS,   256, 136, 4, 0, TABLE_IQ4,   0,       8,   0,  8, 0,   0, 0) \
    X(T_Q2_K,     256,  84, 2, 0, TABLE_NONE,  0,      16,   0,  2, 4,  80, HAS_MIN | HAS_HALVES) \
    X(T_Q3_K,     256, 110, 2, 1, TABLE_NONE,  4,      12,  96, 12, 2, 108, HAS_HALVES) \
    X(T_MXFP4,     32,  17, 4, 0, TABLE_FP4,   0,       1,   0,  1, 0,   0, HAS_WIDE) \
    X(T_NVFP4,     64,  36, 4, 0, TABLE_FP4,   0,       2,   0,  2, 0,   0, HAS_HALVES)
#define FLOAT_TYPES(X) \
    X(T_F32,        1,   4, 32, 0, TABLE_NONE, 0,       0,   0,  0, 0,   0, 0) \
    X(T_F16,        1,   2, 16, 0, TABLE_NONE, 0,       0,   0,  0, 0,   0, 0) \
    X(T_BF16,       1,   2, 16, 0, TABLE_NONE, 0,       0,   0,  0, 0,   0, 0)
#define QUANTISED_TYPES(X) USUAL_TYPES(X) OTHER_TYPES(X)       // most files use only the usual ones

typedef struct {              // a line of the list
    int values, bytes;
    int lo_bits, hi_bits, table, offset;
    int head, head_at, head_read;
    int sup, sup_at;
    int traits;
} Format;

__host__ __device__ static constexpr Format format_of(DType t) {       // values 0: not in the list
    switch (t) {
#define CASE(T, ...) case T: return { __VA_ARGS__ };
    QUANTISED_TYPES(CASE) FLOAT_TYPES(CASE)
#undef CASE
    default: return { };
    }
}

__host__ __device__ static constexpr bool is_float(DType t) { return t == T_F32 || t == T_F16 || t == T_BF16; }

// Bytes of n values (whole blocks) in plane 0 lo, 1 hi, 2 head, 3 sup.
__host__ __device__ static constexpr size_t plane_bytes(const Format &f, int plane, size_t n) {
    if (plane < 2) return n * (plane ? f.hi_bits : f.lo_bits) / 8;
    if (plane == 3) return n / 256 * f.sup;
    return n / (f.values == 256 ? 256 : 32) * f.head;
}

static Planes planes_at(const void *base, DType t, size_t values, size_t *bytes) {
    const Format f = format_of(t);
    if (!f.values) cuda_die("matrices of type %d are not supported", (int)t);
    Planes p = { };
    size_t at = 0;
    for (int i = 0; i < 4; i++) {
        (&p.lo)[i] = (const uint8_t *)base + at;
        at += plane_bytes(f, i, values);
        if (!is_float(t)) at = round_up(at, 256);
    }
    *bytes = at;
    return p;
}

static Planes planes_of(const Tensor *w) {
    size_t bytes;
    return planes_at(w->data, w->type, (size_t)w->n * w->rows * w->cols, &bytes);
}

// The whole code of value i (0..255) of a block in the layout of the file.
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
    case T_Q6_K:
        return (b[64 * half + 32 * (k & 1) + l] >> 4 * (k >> 1) & 15) | (b[128 + 32 * half + l] >> 2 * k & 3) << 4;
    case T_Q2_K: return b[16 + 32 * half + l] >> 2 * k & 3;
    case T_Q3_K: return (b[32 + 32 * half + l] >> 2 * k & 3) | (b[l] >> g & 1) << 2;
    case T_IQ4_XS: return b[8 + 16 * g + l % 16] >> 4 * (l / 16) & 15;
    default: return 0;
    }
}

// repack: blocks of the file -> planes, one thread for each group.
//   shapes    src: n_groups / (block / 32) blocks; planes: n_groups groups from first_group on
//   launch    grid n_groups / 128, block 128
//   traffic   reads and writes every byte once, byte by byte: the bus that delivers them is slower
__global__ void repack_kernel(DType t, Format f, const uint8_t *src, Planes p, size_t first_group, size_t n_groups) {
    wait_for_previous_kernel();
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n_groups) return;
    const size_t first = i * 32, g = first_group + i;
    const uint8_t *b = src + first / f.values * f.bytes;
    const int in_block = (int)(first % f.values), head_values = f.values == 256 ? 256 : 32;
    unsigned lo[8] = { 0 }, hi[2] = { 0 };
    for (int v = 0; v < 32; v++) {
        const unsigned code = file_code(t, b, in_block + v), low = code & ((1u << f.lo_bits) - 1);
        const unsigned high = code >> f.lo_bits;
        const int h = v / 16, w = v % 16 / 4, byte = v % 4;
        if (f.lo_bits == 8) lo[v / 4] |= low << 8 * byte;
        if (f.lo_bits == 4) lo[w] |= low << (8 * byte + 4 * h);
        if (f.lo_bits == 2) lo[h] |= low << (8 * byte + 2 * w);
        if (f.hi_bits == 2) hi[h] |= high << (8 * byte + 2 * w);
        if (f.hi_bits == 1) hi[0] |= high << (8 * byte + (v / 4));
    }
    memcpy((uint8_t *)p.lo + g * 4 * f.lo_bits, lo, 4 * f.lo_bits);
    memcpy((uint8_t *)p.hi + g * 4 * f.hi_bits, hi, 4 * f.hi_bits);
    if (in_block % head_values) return;
    memcpy((uint8_t *)p.head + g * 32 / head_values * f.head, b + f.head_at + in_block / head_values * f.head, f.head);
    memcpy((uint8_t *)p.sup + g / 8 * f.sup, b + f.sup_at, f.sup);
}

// ---- reading a group ----

typedef struct {              // a group, ready for dp4a: value = a[h] * integer - m[h]; h = 0 for values 0..15, else 1
    unsigned c[8];            // four integers in each word. With an offset they are codes: integer = code - offset
    float a[2], m[2];
} Group;

// Constants of a type. lo, hi, head, sup: bytes of an octet in each plane.
template <DType T> struct Type {
    static constexpr Format form = format_of(T);
    static constexpr int  offset = form.offset;
    static constexpr bool min = form.traits & HAS_MIN, halves = form.traits & HAS_HALVES;
    static constexpr bool nibbles = form.lo_bits == 4 && !form.hi_bits && form.table == TABLE_NONE;
    static constexpr bool blocks = form.values == 256;                 // a row is a whole number of octets
    static constexpr bool one_head = blocks && form.head_read == form.head; // one head for the eight groups of an octet
    static constexpr int  lo = plane_bytes(form, 0, 256), hi = plane_bytes(form, 1, 256),
        head = plane_bytes(form, 2, 256), sup = plane_bytes(form, 3, 256);
    static constexpr int  chunk = 16 / (form.bytes < 16 ? form.bytes : 16);        // floats: values in 16 bytes
    // Groups that a lane prefetches. More make the loop longer than the instruction cache likes.
    static constexpr int  depth = form.lo_bits == 8 ? 3 : 4;
};

// Looks up four codes 0..15, the bytes of x, in a table of 16 bytes: four entries in each of t0 .. t3.
__device__ static inline unsigned lookup4(unsigned x, unsigned t0, unsigned t1, unsigned t2, unsigned t3) {
    const unsigned sel = (x & 0x7) | (x >> 4 & 0x70) | (x >> 8 & 0x700) | (x >> 12 & 0x7000);
    const unsigned upper = (x >> 3 & 0x01010101u) * 0xff;
    return (__byte_perm(t0, t1, sel) & ~upper) | (__byte_perm(t2, t3, sel) & upper);
}

__device__ static inline float e4m3(unsigned x) {      // unsigned; 0x7f means 0 here
    x &= 127;
    const int e = x >> 3, m = x & 7;
    if (x == 127) return 0;
    return e ? ldexpf(1 + m * 0.125f, e - 7) : m * 0x1p-9f;
}

// Sub-scale and sub-minimum of group g in Q4_K and Q5_K, 6 bits each, from the three words that follow d and dmin:
//
//            bits 7 6             bits 5 .. 0            of byte j, j = 0..3
//   s0       high bits of sc[4+j]   sc[j]
//   s1       high bits of mn[4+j]   mn[j]
//   s2       byte j: low 4 bits of sc[4+j], above them low 4 bits of mn[4+j]
__device__ static inline void k_scales(unsigned s0, unsigned s1, unsigned s2, int g, unsigned *sc, unsigned *mn) {
    // g does not change in a lane's loop, so the compiler moves all but six instructions out of it.
    const int shift = 8 * (g & 3), more = g < 4 ? shift : shift + 2;
    const unsigned upper = g < 4 ? 0x3f : 0x30, lower = g < 4 ? 0 : 15;
    *sc = (s0 >> more & upper) | (s2 >> shift & lower);
    *mn = (s1 >> more & upper) | (s2 >> shift >> 4 & lower);
}

// The bytes of a group as they lie in memory. Fields that the type does not have are never set.
template <DType T> struct Fetched {
    uint4 lo[Type<T>::form.lo_bits == 8 ? 2 : 1];
    uint2 hi;
    uint4 head;
    unsigned sup;
};

// The planes from group g on.
template <DType T> __device__ static inline Planes planes_from(const Planes &p, size_t g) {
    Planes at = { p.lo + g * (Type<T>::lo / 8), p.hi, p.head, p.sup };
    if constexpr (Type<T>::hi != 0) at.hi += g * (Type<T>::hi / 8);
    at.head += Type<T>::one_head ? g / 8 * Type<T>::head : g * (Type<T>::head / 8);
    if constexpr (Type<T>::sup != 0) at.sup += g / 8 * Type<T>::sup;
    return at;
}

// Loads the group that follows the first group of p by `on` groups; with blocks of 256 values `on` is a multiple of 8.
template <DType T> __device__ static inline void fetch_group(const Planes &p, int on, Fetched<T> *f) {
    constexpr Format form = Type<T>::form;
    const uint8_t *lo = p.lo + on * (Type<T>::lo / 8), *hi = p.hi + on * (Type<T>::hi / 8);
    const uint8_t *sup = p.sup + on / 8 * Type<T>::sup;
    const uint8_t *head = p.head + (Type<T>::blocks ? on / 8 * Type<T>::head : on * (Type<T>::head / 8));
    if constexpr (form.lo_bits == 2) {
        const uint2 v = __ldg((const uint2 *)lo);
        f->lo[0].x = v.x, f->lo[0].y = v.y;
    } else {
        f->lo[0] = load_once(lo);
        if constexpr (form.lo_bits == 8) f->lo[1] = load_once(lo + 16);
    }
    if constexpr (form.hi_bits == 2) f->hi = __ldg((const uint2 *)hi);
    if constexpr (form.hi_bits == 1) f->hi.x = __ldg((const unsigned *)hi);
    if constexpr (form.head_read == 16) {
        f->head = __ldg((const uint4 *)head);
    } else if constexpr (form.head_read == 12) {
        const unsigned *s = (const unsigned *)head;
        f->head.x = __ldg(s), f->head.y = __ldg(s + 1), f->head.z = __ldg(s + 2);
    } else if constexpr (form.head_read == 8) {
        const uint2 v = __ldg((const uint2 *)head);
        f->head.x = v.x, f->head.y = v.y;
    } else if constexpr (form.head_read == 4) {
        f->head.x = __ldg((const unsigned *)head);
    } else if constexpr (form.head_read == 2) {
        f->head.x = __ldg((const unsigned short *)head);
    } else {
        f->head.x = __ldg(head);
    }
    if constexpr (form.sup == 2) f->sup = __ldg((const unsigned short *)sup);
    if constexpr (form.sup == 4) f->sup = __ldg((const unsigned *)sup);
}

__device__ static inline float half_in(unsigned bits) { return __half2float(__ushort_as_half((unsigned short)bits)); }

// What scales a group, from the words of its head and sup. in_256: number of the group among the eight of its 256
// values; types with smaller blocks ignore it.
template <DType T>
__device__ static inline void group_scales(uint4 head, unsigned sup, int in_256, float a[2], float m[2]) {
    m[0] = m[1] = 0;
    if constexpr (T == T_Q8_0 || T == T_Q4_0 || T == T_Q5_0 || T == T_IQ4_NL) {
        a[0] = a[1] = half_in(head.x);
    } else if constexpr (T == T_Q4_1 || T == T_Q5_1) {
        a[0] = a[1] = half_in(head.x);
        m[0] = m[1] = -half_in(head.x >> 16);          // these formats add the minimum
    } else if constexpr (T == T_MXFP4) {
        const unsigned e = head.x;                     // 2^(e - 128); 0 and 1 are subnormal, 255 is NaN
        const unsigned power = e >= 2 ? (e - 1) << 23 : 0x00200000u << e;
        a[0] = a[1] = __uint_as_float(e == 255 ? 0x7fc00000u : power);
    } else if constexpr (T == T_NVFP4) {
        for (int h = 0; h < 2; h++) a[h] = 0.5f * e4m3(head.x >> 8 * h & 255);
    } else if constexpr (T == T_Q4_K || T == T_Q5_K) {
        unsigned sc, mn;
        k_scales(head.y, head.z, head.w, in_256, &sc, &mn);
        a[0] = a[1] = half_in(head.x) * sc;
        m[0] = m[1] = half_in(head.x >> 16) * mn;
    } else if constexpr (T == T_Q6_K) {
        const float d = half_in(sup);
        for (int h = 0; h < 2; h++) a[h] = d * (int8_t)(head.x >> 8 * h);
    } else if constexpr (T == T_Q2_K) {
        for (int h = 0; h < 2; h++) {
            const unsigned s = head.x >> 8 * h;
            a[h] = half_in(sup) * (s & 15);
            m[h] = half_in(sup >> 16) * (s >> 4 & 15);
        }
    } else if constexpr (T == T_Q3_K) {
        // 16 scales of 6 bits: the low four bits in words 0 and 1, the high two in word 2
        const float d = half_in(sup);
        for (int h = 0; h < 2; h++) {
            const int j = 2 * in_256 + h;
            const unsigned low = (j & 4 ? head.y : head.x) >> (8 * (j & 3) + (j >= 8 ? 4 : 0)) & 15;
            a[h] = d * ((int)(low | (head.z >> (8 * (j & 3) + 2 * (j >> 2)) & 3) << 4) - 32);
        }
    } else if constexpr (T == T_IQ4_XS) {              // d, eight times 2 high bits, eight times 4 low bits
        const unsigned ls = (head.y >> 4 * in_256 & 15) | (head.x >> (16 + 2 * in_256) & 3) << 4;
        a[0] = a[1] = half_in(head.x) * ((int)ls - 32);
    }
}

// Four codes, the bytes of a word, as integers before the offset is subtracted.
template <DType T> __device__ static inline unsigned code_integers(unsigned codes) {
    // -127 -104 -83 -65 | -49 -35 -22 -10 | 1 13 25 38 | 53 69 89 113
    if constexpr (Type<T>::form.table == TABLE_IQ4) return lookup4(codes, 0xbfad9881u, 0xf6eaddcfu, 0x26190d01u,
                                                                   0x71594535u);
    // twice 0 0.5 1 1.5 | 2 3 4 6, then the same with a minus
    if constexpr (Type<T>::form.table == TABLE_FP4) return lookup4(codes, 0x03020100u, 0x0c080604u, 0xfdfeff00u,
                                                                   0xf4f8fafcu);
    return codes;
}

// in_256: as in group_scales. UPPER: codes that are nibbles stay in the high nibble in the second half, 16 times as
// large.
template <DType T, bool UPPER = false>
__device__ static inline void unpack_group(const Fetched<T> &f, int in_256, Group *out) {
    constexpr Format form = Type<T>::form;
    unsigned *c = out->c;
    if constexpr (form.lo_bits == 8) {
        c[0] = f.lo[0].x, c[1] = f.lo[0].y, c[2] = f.lo[0].z, c[3] = f.lo[0].w;
        c[4] = f.lo[1].x, c[5] = f.lo[1].y, c[6] = f.lo[1].z, c[7] = f.lo[1].w;
    } else if constexpr (form.lo_bits == 2) {
        for (int w = 0; w < 4; w++)
            c[w] = f.lo[0].x >> 2 * w & 0x03030303u, c[4 + w] = f.lo[0].y >> 2 * w & 0x03030303u;
    } else {
        const unsigned word[4] = { f.lo[0].x, f.lo[0].y, f.lo[0].z, f.lo[0].w };
        for (int w = 0; w < 4; w++) {
            c[w] = word[w] & 0x0f0f0f0fu;
            c[4 + w] = UPPER && Type<T>::nibbles ? word[w] & 0xf0f0f0f0u : word[w] >> 4 & 0x0f0f0f0fu;
        }
    }
    if constexpr (form.hi_bits == 1) {                 // bit w of each byte goes to the bit above lo
        const int to = form.lo_bits;
        for (int w = 0; w < 8; w++) c[w] |= (w < to ? f.hi.x << (to - w) : f.hi.x >> (w - to)) & 0x01010101u << to;
    }
    if constexpr (form.hi_bits == 2)                   // bits 2w, 2w + 1 go to bits 4, 5
        for (int w = 0; w < 4; w++) {
            c[w] |= (w < 2 ? f.hi.x << (4 - 2 * w) : f.hi.x >> (2 * w - 4)) & 0x30303030u;
            c[4 + w] |= (w < 2 ? f.hi.y << (4 - 2 * w) : f.hi.y >> (2 * w - 4)) & 0x30303030u;
        }
    for (int w = 0; w < 8; w++) c[w] = code_integers<T>(c[w]);
    group_scales<T>(f.head, f.sup, in_256, out->a, out->m);
}

// Loads and unpacks group g of the whole matrix.
template <DType T> __device__ static inline void load_group(const Planes &p, size_t g, Group *out) {
    Fetched<T> f;
    fetch_group<T>(planes_from<T>(p, g), 0, &f);
    unpack_group<T>(f, (int)(g & 7), out);
}

// A group times 32 activations, before the scale of the activations. dot0, dot1: integers times int8 activations in
// each half; sum0, sum1: the activations in each half. All are whole numbers. Where the halves share scales, dot0 and
// sum0 are those of the whole group.
template <DType T>
__device__ static inline float scaled_term(const float a[2], const float m[2], float dot0, float dot1, float sum0,
                                           float sum1) {
    if (!Type<T>::halves) return Type<T>::min ? __fmaf_rn(-m[0], sum0, __fmul_rn(a[0], dot0)) : __fmul_rn(a[0], dot0);
    const float term = __fmaf_rn(a[1], dot1, __fmul_rn(a[0], dot0));
    return Type<T>::min ? __fmaf_rn(-m[0], sum0, __fmaf_rn(-m[1], sum1, term)) : term;
}

// The same from codes: dot0 and dot1 still contain the offset.
template <DType T>
__device__ static inline float group_term(const float a[2], const float m[2], int dot0, int dot1, float sum0,
                                          float sum1) {
    constexpr float offset = Type<T>::offset;
    const float d0 = (float)dot0, d1 = (float)dot1;    // whole numbers below 2^24, like the sums: exact
    if (!offset) return scaled_term<T>(a, m, d0, d1, sum0, sum1);
    return scaled_term<T>(a, m, __fmaf_rn(-offset, sum0, d0), __fmaf_rn(-offset, sum1, d1), sum0, sum1);
}

// Value i of a group in f32: exact, or correctly rounded if the type has a minimum.
template <DType T> __device__ static inline float value_of(const Group &x, int i) {
    const int code = (int8_t)(x.c[i / 4] >> 8 * (i % 4)) - Type<T>::offset;
    return Type<T>::min ? __fsub_rn(__fmul_rn(x.a[i / 16], (float)code), x.m[i / 16]) : x.a[i / 16] * code;
}

template <DType T> __device__ static inline void group_values(const Planes &p, size_t g, float *v) {
    Group x;
    load_group<T>(p, g, &x);
    for (int i = 0; i < 32; i++) v[i] = value_of<T>(x, i);
}

__device__ static inline float float_value(DType t, const uint8_t *p, size_t i) {
    if (t == T_F32) return ((const float *)p)[i];
    return t == T_F16 ? __half2float(((const __half *)p)[i]) : __bfloat162float(((const __nv_bfloat16 *)p)[i]);
}

// Up to 32 values of a matrix in f32, from value `first` on, a multiple of 32.
__device__ static inline void values_at(DType t, const Planes &p, size_t first, int n, float *v) {
    switch (t) {
#define CASE(T, ...) case T: group_values<T>(p, first / 32, v); return;
    QUANTISED_TYPES(CASE)
#undef CASE
    default:
        for (int i = 0; i < n; i++) v[i] = float_value(t, p.lo, first + i);
    }
}

// ---- upload ----

enum { UPLOAD_PORTION = 8 << 20, UPLOAD_THREADS = 8, MIN_UPLOAD_THREADS = 3 };
static_assert(UPLOAD_PORTION * UPLOAD_THREADS <= PANEL_BYTES && UPLOAD_PORTION * UPLOAD_THREADS <= PARTIAL_BYTES,
              "portions pass through the panel, for host memory then through cuda.partial");

static size_t planes_bytes(const Tensor *w) {
    size_t bytes;
    planes_at(NULL, w->type, (size_t)w->n * w->rows * w->cols, &bytes);
    return bytes + (w->scale ? round_up(w->n * sizeof(float), 256) : 0);
}

static size_t cuda_weight_bytes(const Tensor *w) { return w->in_host ? 0 : planes_bytes(w); }

// Copies the file's bytes into planes. Several threads take portions of a matrix, one after the other. Each thread has
// a pinned buffer and a part of cuda.panel: it copies a portion out of the mapped file (its pages come from memory or
// disk) and leaves the transfer and the repacking to the device. A page that has vanished raises SIGBUS in that thread.
typedef struct {
    const Tensor *w;
    char   *dst;
    Planes  p;
    Format  f;
    size_t  n_blocks, portion;                         // of the matrix; of a portion, a multiple of 256 values
    std::atomic<size_t> next;                          // the next portion that no thread has taken
} Uploading;

static struct {
    char *host[UPLOAD_THREADS];                        // (UPLOAD_PORTION) pinned
    cudaEvent_t free[UPLOAD_THREADS];
    pthread_mutex_t issue;                             // one thread at a time uses the stream
    std::atomic<int> n_threads;                        // threads that upload this matrix
} uploads = { { }, { }, PTHREAD_MUTEX_INITIALIZER, { 0 } };

// n blocks from block `at` on. Host memory is written in large pieces: planes of the portion are made on the device.
static void repack_portion(const Uploading *u, const char *raw, char *room, size_t at, size_t n) {
    const Tensor *w = u->w;
    const size_t groups = n * u->f.values / 32, first = at * u->f.values;
    size_t bytes;
    const Planes to = w->in_host ? planes_at(room, w->type, n * u->f.values, &bytes) : u->p;
    launch(WRITES_WEIGHTS, repack_kernel, (unsigned)((groups + 127) / 128), 128, 0, w->type, u->f,
           (const uint8_t *)raw, to, w->in_host ? 0 : first / 32, groups);
    CHECK_LAUNCH("repack of %d x %d, type %d", w->rows, w->cols, (int)w->type);
    for (int i = 0; w->in_host && i < 4; i++)
        CHECK_CUDA(cudaMemcpyAsync((char *)(&u->p.lo)[i] + plane_bytes(u->f, i, first), (&to.lo)[i],
                                   plane_bytes(u->f, i, n * u->f.values), cudaMemcpyDefault, cuda.stream),
                   "upload of %d x %d to host memory", w->rows, w->cols);
}

static void *upload_portions(void *uploading) {
    Uploading *u = (Uploading *)uploading;
    const Tensor *w = u->w;
    const int thread = uploads.n_threads++;
    char *host = uploads.host[thread], *raw = (char *)cuda.panel + (size_t)thread * UPLOAD_PORTION;
    for (size_t k; (k = u->next++) * u->portion < u->n_blocks; ) {
        const size_t at = k * u->portion, n = u->n_blocks - at < u->portion ? u->n_blocks - at : u->portion;
        CHECK_CUDA(cudaEventSynchronize(uploads.free[thread]), "upload of %d x %d", w->rows, w->cols);
        memcpy(host, (const char *)w->data + at * u->f.bytes, n * u->f.bytes);
        pthread_mutex_lock(&uploads.issue);
        void *to = is_float(w->type) ? u->dst + at * u->f.bytes : raw;
        CHECK_CUDA(cudaMemcpyAsync(to, host, n * u->f.bytes, cudaMemcpyDefault, cuda.stream),
                   "upload of %d x %d", w->rows, w->cols);
        if (!is_float(w->type)) repack_portion(u, raw, (char *)cuda.partial + (size_t)thread * UPLOAD_PORTION, at, n);
        CHECK_CUDA(cudaEventRecord(uploads.free[thread], cuda.stream), "upload of %d x %d", w->rows, w->cols);
        pthread_mutex_unlock(&uploads.issue);
    }
    return NULL;
}

// Pinned memory for a matrix that stays on the host, in the layout of the device, which reads it over the bus. *is_new:
// the caller has to fill it.
static char *host_matrix(const Tensor *w, bool *is_new) {
    HostMatrix **at = &cuda.in_host, *m;
    while ((m = *at) && (m->file != w->data || m->owner != cuda.reserved)) at = &m->next;
    *is_new = !m;
    if (m) return m->data;
    m = (HostMatrix *)calloc(1, sizeof *m);
    if (!m) cuda_die("upload: out of memory");
    m->bytes = round_up(planes_bytes(w), 256);
    const cudaError_t e = cudaMallocHost((void **)&m->data, m->bytes);
    if (e != cudaSuccess)
        cuda_die("upload: the system refused %zu bytes of pinned host memory for a matrix of %d x %d, for which the "
                 "GPU has no room (%s); try ulimit -l unlimited (docker: --ulimit memlock=-1), more host memory, or a "
                 "smaller model", m->bytes, w->rows, w->cols, cudaGetErrorString(e));
    CHECK_CUDA(cudaEventCreateWithFlags(&m->arrived, EVENT_FLAGS), "upload: event");
    m->file = w->data, m->owner = cuda.reserved, m->is_stack = w->n > 1;
    *at = m;
    return m->data;
}

static void cuda_upload(Tensor *w, void *dst) {
    const size_t values = (size_t)w->n * w->rows * w->cols;
    bool fill = true;
    if (w->in_host && !dst) dst = host_matrix(w, &fill);
    if (!dst) cuda_die("upload: a matrix of %d x %d was given no memory", w->rows, w->cols);
    for (int i = 0; i < UPLOAD_THREADS && !uploads.host[i]; i++) {
        CHECK_CUDA(cudaMallocHost((void **)&uploads.host[i], UPLOAD_PORTION), "upload: %d pinned bytes",
                   UPLOAD_PORTION);
        CHECK_CUDA(cudaEventCreateWithFlags(&uploads.free[i], EVENT_FLAGS), "upload: event");
    }
    size_t bytes;
    Uploading u = { w, (char *)dst, planes_at(dst, w->type, values, &bytes), format_of(w->type) };
    const size_t unit = 256 / u.f.values;
    u.n_blocks = fill ? values / u.f.values : 0;
    u.portion = (UPLOAD_PORTION - 4 * 256) / (unit * u.f.bytes) * unit;            // planes begin at multiples of 256
    const int n_portions = (int)((u.n_blocks + u.portion - 1) / u.portion);
    const int n_cores = (int)sysconf(_SC_NPROCESSORS_ONLN);
    const int n_threads = min_int(n_portions, min_int(UPLOAD_THREADS, max_int(MIN_UPLOAD_THREADS, n_cores)));
    pthread_t others[UPLOAD_THREADS];
    int n_others = 0;
    uploads.n_threads = 0;
    while (n_others < n_threads - 1 && !pthread_create(&others[n_others], NULL, upload_portions, &u)) n_others++;
    upload_portions(&u);                                 // does all of it if no thread can be created
    for (int i = 0; i < n_others; i++) pthread_join(others[i], NULL);
    if (w->scale) {
        float *scale = (float *)((char *)dst + bytes);
        CHECK_CUDA(cudaMemcpyAsync(scale, w->scale, w->n * sizeof(float), cudaMemcpyDefault, cuda.stream),
                   "upload: scales");
        w->scale = scale;
    }
    w->data = dst;
}

// ---- weights in host memory ----
// Before an operation multiplies with a matrix in host memory, bring() copies it into a ring of device memory, and then
// those that were uploaded after it, as far as there is room. The ring has room for a layer: the copies for the next
// operations run beside this one.
//
//     ring    | gate and up of layer l: used now | down of layer l: has arrived |
//     then    | those of layer l + 1: under way  | down of layer l: used now    |
//
// A step of few rows needs few experts, and does not know them before the router has chosen: fetch_experts() copies
// them. A recorded step begins and ends with an empty ring, so that it can be replayed at any time.

static void empty_ring(void) {
    for (HostMatrix *m = cuda.oldest; m; m = m->behind) m->copy = NULL;
    cuda.oldest = cuda.newest = NULL;
}

// What the operations write into the ring from now on follows all copies.
static void join_copies(void) {
    if (cuda.newest) CHECK_CUDA(cudaStreamWaitEvent(cuda.stream, cuda.newest->arrived, 0), "weights in host memory");
    empty_ring();
}

// Copies a matrix into the ring, behind the newest copy or at the ring's beginning. False: there is no room.
static bool copy_to_ring(HostMatrix *m) {
    const HostMatrix *oldest = cuda.oldest, *newest = cuda.newest;
    size_t at = newest ? newest->copy + newest->bytes - cuda.ring : 0, end = cuda.lim.host_bytes;
    const size_t used_from = oldest ? oldest->copy - cuda.ring : 0;
    if (newest && newest->copy < oldest->copy) end = used_from;
    else if (newest && at + m->bytes > end) at = 0, end = used_from;
    if (at + m->bytes > end) return false;
    m->copy = cuda.ring + at;
    m->behind = NULL;
    CHECK_CUDA(cudaMemcpyAsync(m->copy, m->data, m->bytes, cudaMemcpyDefault, cuda.copies),
               "copy of %zu bytes of weights", m->bytes);
    CHECK_CUDA(cudaEventRecord(m->arrived, cuda.copies), "copy of weights");
    *(newest ? &cuda.newest->behind : &cuda.oldest) = m;
    cuda.newest = m;
    return true;
}

// Finds those of n matrices that are in host memory. Returns how many there are.
static int find_in_host(Tensor *w, int n, Tensor *found[MAX_PRODUCTS], HostMatrix *m[MAX_PRODUCTS]) {
    int n_host = 0;
    for (int i = 0; i < n && !cuda.plans_only; i++) {
        if (!w[i].in_host) continue;
        found[n_host] = &w[i];
        for (m[n_host] = cuda.in_host; m[n_host]->data != w[i].data; m[n_host] = m[n_host]->next) { }
        n_host++;
    }
    return n_host;
}

// Replaces those of up to MAX_PRODUCTS matrices that are in host memory by their copies in the ring. What was there
// before the first of them is no longer used.
static void bring(Tensor *w, int n, int n_rows) {
    HostMatrix *m[MAX_PRODUCTS];
    Tensor *in_host[MAX_PRODUCTS];
    const int n_host = find_in_host(w, n, in_host, m);
    if (!n_host) return;
    CHECK_CUDA(cudaEventRecord(cuda.used, cuda.stream), "weights in host memory");
    CHECK_CUDA(cudaStreamWaitEvent(cuda.copies, cuda.used, 0), "weights in host memory");
    if (!m[0]->copy) empty_ring();
    for (; cuda.oldest && cuda.oldest != m[0]; cuda.oldest = cuda.oldest->behind) cuda.oldest->copy = NULL;
    for (int i = 0, again = 0; i < n_host; i++) {
        if (m[i]->copy || copy_to_ring(m[i])) continue;
        if (again++)
            cuda_die("%zu bytes of weights do not fit into the ring of %zu", m[i]->bytes, cuda.lim.host_bytes);
        empty_ring();
        i = -1;
    }
    for (HostMatrix *next = cuda.newest->next; next && next->owner == m[0]->owner && !next->copy; next = next->next)
        if ((next->is_stack && n_rows <= STEP_ROWS) || !copy_to_ring(next)) break;
    for (int i = 0; i < n_host; i++) {
        CHECK_CUDA(cudaStreamWaitEvent(cuda.stream, m[i]->arrived, 0), "weights in host memory");
        in_host[i]->data = m[i]->copy;
        in_host[i]->in_host = false;
    }
    cuda.last.writes |= WRITES_WEIGHTS;
}

static Tensor brought(const Tensor *w, int n_rows) {
    Tensor here = *w;
    bring(&here, 1, n_rows);
    return here;
}

typedef struct {              // one matrix of fetch_experts()
    Planes from, to;
    unsigned quads[4];        // 16 bytes each, of an expert in each plane
    const float *scale;       // (n_experts) or NULL
    float *scale_to;
    const int32_t *ids;       // (n_pairs)
    int32_t *slots;           // (n_pairs)
    int n_pairs;
} Fetch;

// fetch: copies the chosen experts of a matrix from host memory, the lowest first, and numbers them: slots.
//   shapes    from (n_experts, ..), to (number of chosen experts, ..), planes of both; ids, slots (n_pairs)
//   launch    grid (16, experts at most), block 256
//   traffic   each chosen expert once, over the bus; a warp reads 512 contiguous bytes: smaller requests cost as much
//   numerics  exact
//   see       run_experts, cuda_expert_down
__global__ void __launch_bounds__(256) fetch_kernel(const __grid_constant__ Fetch o) {
    __shared__ unsigned chosen[MAX_EXPERTS / 32];
    constexpr int UNDER_WAY = 8;
    const int thread = threadIdx.x;
    wait_for_previous_kernel();
    for (int i = thread; i < MAX_EXPERTS / 32; i += blockDim.x) chosen[i] = 0;
    __syncthreads();
    for (int i = thread; i < o.n_pairs; i += blockDim.x) atomicOr(&chosen[o.ids[i] / 32], 1u << o.ids[i] % 32);
    __syncthreads();
    auto slot_of = [&](int expert) {
        int n = __popc(chosen[expert / 32] & ((1u << expert % 32) - 1));
        for (int i = 0; i < expert / 32; i++) n += __popc(chosen[i]);
        return n;
    };
    if (blockIdx.x == 0 && blockIdx.y == 0)
        for (int i = thread; i < o.n_pairs; i += blockDim.x) o.slots[i] = slot_of(o.ids[i]);
    int slot = blockIdx.y, word = 0;
    for (int before = 0; word < MAX_EXPERTS / 32; word++) {            // find the expert of this slot
        before = __popc(chosen[word]);
        if (slot < before) break;
        slot -= before;
    }
    if (word == MAX_EXPERTS / 32) return;
    unsigned rest = chosen[word];
    for (; slot; slot--) rest &= rest - 1;
    const int expert = 32 * word + __ffs(rest) - 1;
    slot = blockIdx.y;
    if (o.scale && blockIdx.x == 0 && thread == 0) o.scale_to[slot] = o.scale[expert];
    const unsigned first = blockIdx.x * blockDim.x + thread, stride = gridDim.x * blockDim.x;
    for (int p = 0; p < 4; p++) {
        const uint4 *from = (const uint4 *)(&o.from.lo)[p] + (size_t)expert * o.quads[p];
        uint4 *to = (uint4 *)(&o.to.lo)[p] + (size_t)slot * o.quads[p];
        for (unsigned i = first; i < o.quads[p]; i += UNDER_WAY * stride) {
            uint4 v[UNDER_WAY];
#pragma unroll
            for (int k = 0; k < UNDER_WAY; k++)
                if (i + k * stride < o.quads[p]) v[k] = load_once(from + i + k * stride);
#pragma unroll
            for (int k = 0; k < UNDER_WAY; k++)
                if (i + k * stride < o.quads[p]) to[i + k * stride] = v[k];
        }
    }
}

// Replaces n stacks of experts in host memory by those experts that a step of few rows has chosen; for a prompt, by all
// of them. Returns the numbers (n_rows, n_used) by which the pairs find them; ids, and the stacks as they are, if not
// all of them are in host memory.
static const int32_t *fetch_experts(Tensor *w, int n, const int32_t *ids, int n_rows, int n_used) {
    const int n_pairs = n_rows * n_used;
    char *at = cuda.ring;
    if (n_rows > STEP_ROWS) {
        bring(w, n, n_rows);
        return ids;
    }
    for (int i = 0; i < n; i++) {
        const Format f = format_of(w[i].type);
        bool whole = w[i].in_host && w[i].n <= MAX_EXPERTS && !cuda.plans_only;
        for (int p = 0; p < 4; p++) whole &= plane_bytes(f, p, (size_t)w[i].rows * w[i].cols) % 16 == 0;
        if (!whole) return ids;
    }
    join_copies();
    for (int i = 0; i < n; i++) {
        const Format f = format_of(w[i].type);
        const size_t values = (size_t)w[i].rows * w[i].cols;
        const int n_slots = min_int(n_pairs, w[i].n);
        size_t bytes;
        Fetch o = { planes_of(&w[i]), planes_at(at, w[i].type, n_slots * values, &bytes) };
        for (int p = 0; p < 4; p++) o.quads[p] = (unsigned)(plane_bytes(f, p, values) / 16);
        o.scale = w[i].scale, o.scale_to = (float *)(at + bytes);
        o.ids = ids, o.slots = cuda.slots, o.n_pairs = n_pairs;
        launch(WRITES_WEIGHTS | WRITES_ACTIVATIONS, fetch_kernel, dim3(16, n_slots), 256, 0, o);
        CHECK_LAUNCH("fetch of %d of %d experts, %d x %d", n_slots, w[i].n, w[i].rows, w[i].cols);
        w[i].data = at, w[i].n = n_slots, w[i].in_host = false;
        if (o.scale) w[i].scale = o.scale_to;
        at += round_up(bytes + (o.scale ? n_slots * sizeof(float) : 0), 256);
    }
    return cuda.slots;
}

// ==== [4] Inputs: embedding, norms ===================================================================================
// The input of a product (In of gemma4.h) is made by one function, from x' to int8. Up to MANY_ROWS - 1 rows: every
// block of the product makes it for itself. More rows, or rows wider than ROW_COLS: a kernel of its own makes it once.

// Prompts multiply in f16, whose 11 bits give an eighth of the error of bf16. Activations are multiplied with
// PROMPT_SCALE, so that values up to a million fit; larger ones are clamped.
#define PROMPT_SCALE 0.0625f
__device__ static inline __half prompt_half(float y) {
    y *= PROMPT_SCALE;
    return __float2half_rn(y != y ? y : fminf(fmaxf(y, -65504.0f), 65504.0f));
}
// Two values as halves, the first one in the low bits.
__device__ static inline unsigned prompt_halves(float a, float b) {
    const __half2 both = __halves2half2(prompt_half(a), prompt_half(b));
    unsigned word;
    memcpy(&word, &both, sizeof word);
    return word;
}

typedef struct {              // where a prepared input is written; NULL: not needed
    float *f;                 // (n_rows, cols)
    int8_t *q;                // (n_rows, cols)
    float *s;                 // (n_rows, cols / 32)
    __half *h;                // (n_rows, cols) times PROMPT_SCALE
    bool   by_fragment;       // value i of a row of h lies at fragment_at(i); cols is a multiple of 16
} Prepared;

// Permutes 16 activations to match the order of quantised weights. In a word of codes, lane l holds values 4k .. 4k + 3
// (k = l % 4), but multiply_half() takes them as values 2k, 2k + 1, 8 + 2k and 9 + 2k. So activation i goes to:
//
//     i               0  1  2  3 | 4  5  6  7 | 8  9 10 11 | 12 13 14 15
//     fragment_at(i)  0  1  8  9 | 2  3 10 11 | 4  5 12 13 |  6  7 14 15
__device__ static inline int fragment_at(int i) { return (i & ~15) | (i & 2) << 2 | (i >> 1 & 6) | (i & 1); }

enum { ROW_THREADS = 512, ROW_QUADS = 3, ROW_COLS = 4 * ROW_QUADS * ROW_THREADS, NARROW_QUADS = 2,
       NARROW_COLS = 4 * NARROW_QUADS * ROW_THREADS, MAX_READERS = 3, DELTA = 0, POST = 2, PRE = 3,
       NORM_WEIGHTS = PRE + MAX_READERS };

// Up to MAX_READERS inputs with the same x'. quads: all rows lie at multiples of 16 bytes.
typedef struct {
    In   in;
    const float *norm[NORM_WEIGHTS];   // weights: DELTA in.w_delta, POST in.w_post, PRE w_pre of each input; NULL: none
    int  n, cols;
    float by;                 // 1 / cols
    int  quads;
} RowInputs;

// Four values from value i on; 0 after the end of the row.
__device__ static inline float4 load4(const float *p, int i, int cols, int quads) {
    if (quads) return i < cols ? __ldcg((const float4 *)(p + i)) : make_float4(0, 0, 0, 0);
    return make_float4(i < cols ? __ldcg(p + i) : 0, i + 1 < cols ? __ldcg(p + i + 1) : 0,
                       i + 2 < cols ? __ldcg(p + i + 2) : 0, i + 3 < cols ? __ldcg(p + i + 3) : 0);
}
__device__ static inline void store4(float *p, int i, int cols, int quads, float4 v) {
    if (quads) {
        if (i < cols) *(float4 *)(p + i) = v;
        return;
    }
    if (i < cols) p[i] = v.x;
    if (i + 1 < cols) p[i + 1] = v.y;
    if (i + 2 < cols) p[i + 2] = v.z;
    if (i + 3 < cols) p[i + 3] = v.w;
}

// Every rounding is written out, nothing is left to the compiler to contract: the same bits in every kernel.
__device__ static inline float4 scale4(float4 a, float s) {
    return make_float4(__fmul_rn(a.x, s), __fmul_rn(a.y, s), __fmul_rn(a.z, s), __fmul_rn(a.w, s));
}
__device__ static inline float4 multiply4(float4 a, float4 b) {
    return make_float4(__fmul_rn(a.x, b.x), __fmul_rn(a.y, b.y), __fmul_rn(a.z, b.z), __fmul_rn(a.w, b.w));
}
__device__ static inline float4 add4(float4 a, float4 b) {
    return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w));
}
__device__ static inline float squares4(float4 a, float sum) {
    return __fmaf_rn(a.w, a.w, __fmaf_rn(a.z, a.z, __fmaf_rn(a.y, a.y, __fmaf_rn(a.x, a.x, sum))));
}

// 1 / rms of N rows; each thread passes its part of the N sums of squares. by: 1 / values of a row. Calls alternate
// between two sets of shared memory, so one barrier is enough: a thread that overwrites a set has passed the barrier of
// the next call, and every reader of that set has arrived there. phase: counts the calls.
template <int N>
__device__ static inline void block_rms(const float *sum, float by, float eps, int *phase, float *out) {
    __shared__ __align__(16) float part[2][2][ROW_THREADS / 32];
    const int own = (*phase)++ % 2;
    float v[N];
#pragma unroll
    for (int k = 0; k < N; k++) v[k] = warp_sum(sum[k]);
#pragma unroll
    for (int k = 0; k < N; k++)
        if (threadIdx.x % 32 == 0) part[own][k][threadIdx.x / 32] = v[k];
    __syncthreads();
#pragma unroll
    for (int k = 0; k < N; k++) {
        float4 all = *(const float4 *)&part[own][k][0];
        for (int i = 4; i < ROW_THREADS / 32; i += 4) all = add4(all, *(const float4 *)&part[own][k][i]);
        out[k] = rsqrtf(__fmaf_rn(__fadd_rn(__fadd_rn(all.x, all.y), __fadd_rn(all.z, all.w)), by, eps));
    }
}

// Makes row `row` of the inputs; a block of ROW_THREADS. Thread t has values 4 (t + 512 j) .. + 3, so 8 lanes hold a
// group.
//   emit(k)(i, y)   takes four values of input k from value i on; called by a whole warp or not at all; y is 0 after
//                   the end of the row
//   weight(k, j)    four values of norm weights k, for the thread's values j; they are constant and may come early
//   store_x         writes x' where In wants it
//   QUADS > 0       j < QUADS; rows lie at multiples of 16 bytes; x and both deltas are loaded at once and stay in
//                   registers; meanwhile() runs during these loads
//   QUADS = 0       every pass loads them again; d and x' are kept in `wide` (cols) in shared memory
//   READERS         the largest number of inputs, 2 or 3.   phase: of block_rms
//   latency         one load from L2, then one reduction each for the deltas' norms (both at once), w_post and w_pre
template <int QUADS, int READERS = 2, typename Weight, typename Meanwhile, typename Emit>
__device__ static inline void prepare_row(const RowInputs &o, size_t row, Weight weight, float *wide, bool store_x,
                                          int *phase, Meanwhile meanwhile, Emit emit) {
    const In in = o.in;
    constexpr bool WIDE = QUADS == 0;
    const int cols = o.cols, stride = (cols + 3) / 4 * 4, n_quads = WIDE ? INT_MAX : QUADS, quads = WIDE ? o.quads : 1;
    const int warp_first = threadIdx.x / 32 * 128;     // a warp whose values lie after the end has no work
    const size_t at = row * cols;
    const unsigned first = (unsigned)row * (unsigned)cols / 4 + threadIdx.x;   // a step has less than 2^32 values
    const float4 none = make_float4(0, 0, 0, 0);
    float4 x[WIDE ? 1 : QUADS], d[2][WIDE ? 1 : QUADS];
    auto fetch = [&](const float *p, int j) {
        const int i = 4 * (threadIdx.x + ROW_THREADS * j);
        if (WIDE) return p ? load4(p + at, i, cols, quads) : none;
        return p && i < cols ? __ldcg((const float4 *)p + (first + ROW_THREADS * j)) : none;
    };
    auto held = [&](int j) {
        const int i = 4 * (threadIdx.x + ROW_THREADS * j);
        return i < cols ? *(const float4 *)(wide + i) : none;
    };
    if (!WIDE) {
#pragma unroll
        for (int j = 0; j < QUADS; j++) {
            if (warp_first + 4 * ROW_THREADS * j >= cols) break;
            x[j] = fetch(in.x, j);
            d[0][j] = fetch(in.delta[0], j);
            d[1][j] = fetch(in.delta[1], j);
        }
        meanwhile();
    }
    const bool normed0 = in.delta[0] && in.w_delta[0], normed1 = in.delta[1] && in.w_delta[1];
    float scale[2] = { 1, 1 };
    if (normed0 || normed1) {
        float sum[2] = { 0, 0 };
#pragma unroll
        for (int j = 0; j < n_quads; j++) {
            if (warp_first + 4 * ROW_THREADS * j >= cols) break;
            sum[0] = squares4(WIDE ? fetch(in.delta[0], j) : d[0][j], sum[0]);
            if (normed1) sum[1] = squares4(WIDE ? fetch(in.delta[1], j) : d[1][j], sum[1]);
        }
        if (normed1) block_rms<2>(sum, o.by, in.eps, phase, scale);
        else block_rms<1>(sum, o.by, in.eps, phase, scale);
    }
    // d[0], or `wide`, becomes the sum of the deltas.
    float sum = 0, post_scale = 1, pre_scale = 1;
    const bool post = in.w_post && (in.delta[0] || in.delta[1]);
#pragma unroll
    for (int j = 0; j < n_quads; j++) {
        if (warp_first + 4 * ROW_THREADS * j >= cols) break;
        float4 a = WIDE ? fetch(in.delta[0], j) : d[0][j], b = WIDE ? fetch(in.delta[1], j) : d[1][j];
        if (normed0) a = multiply4(weight(DELTA, j), scale4(a, scale[0]));
        if (normed1) b = multiply4(weight(DELTA + 1, j), scale4(b, scale[1]));
        a = in.delta[1] ? add4(a, b) : a;
        sum = squares4(a, sum);
        if (WIDE) store4(wide, 4 * (threadIdx.x + ROW_THREADS * j), stride, 1, a);
        else d[0][j] = a;
    }
    if (post) block_rms<1>(&sum, o.by, in.eps, phase, &post_scale);
    sum = 0;
#pragma unroll
    for (int j = 0; j < n_quads; j++) {
        if (warp_first + 4 * ROW_THREADS * j >= cols) break;
        float4 a = WIDE ? held(j) : d[0][j];
        if (post) a = multiply4(weight(POST, j), scale4(a, post_scale));
        a = scale4(add4(WIDE ? fetch(in.x, j) : x[j], a), in.scale);
        sum = squares4(a, sum);
        if (store_x && in.x_out) store4(in.x_out + at, 4 * (threadIdx.x + ROW_THREADS * j), cols, quads, a);
        if (WIDE) store4(wide, 4 * (threadIdx.x + ROW_THREADS * j), stride, 1, a);
        else x[j] = a;
    }
    if (o.norm[PRE] || o.norm[PRE + 1] || (READERS > 2 && o.norm[PRE + 2]))
        block_rms<1>(&sum, o.by, in.eps, phase, &pre_scale);
#pragma unroll 1
    for (int k = 0; k < o.n; k++) {
        const bool normed = o.norm[PRE + k];
        auto put = emit(k);
#pragma unroll
        for (int j = 0; j < n_quads; j++) {
            if (warp_first + 4 * ROW_THREADS * j >= cols) break;
            float4 y = WIDE ? held(j) : x[j];
            if (normed)
                y = multiply4(READERS > 2 && k > 1 ? weight(PRE + 2, j) : k ? weight(PRE + 1, j) : weight(PRE, j),
                              scale4(y, pre_scale));
            put(4 * (threadIdx.x + ROW_THREADS * j), y);
        }
    }
}

// Quantises a group that 8 lanes hold, four values each: returns the lane's four as int8 in a word; all lanes get the
// scale.
__device__ static inline unsigned quantise4(float4 v, float *s) {
    auto size = [](float x) { return __float_as_uint(x) & 0x7fffffffu; };
    unsigned top = max(max(size(v.x), size(v.y)), max(size(v.z), size(v.w)));
    for (int h = 1; h < 8; h *= 2) top = max(top, __shfl_xor_sync(~0u, top, h));
    float inv;
    *s = group_scale(top, &inv);
    if (!inv) return 0;
    auto code = [inv](float x) { return (unsigned)__float2int_rn(__fmul_rn(x, inv)) & 255; };
    return code(v.x) | code(v.y) << 8 | code(v.z) << 16 | code(v.w) << 24;
}

typedef struct { Prepared of[MAX_READERS]; } Prepareds;

// prepare: In of gemma4.h, up to three inputs with the same x'; d, x' and y as defined there.
//   shapes    as In; cols <= 49152
//   launch    grid n_rows, block 512, dynamic shared memory 4 * cols: once if QUADS = 0, else for each norm weight
//   traffic   reads up to 3 rows of f32 and the norm weights, writes x' and y in the requested forms
//   numerics  f32; sums over 512 threads, then over the lanes of a warp, then over 16 warps
//   see       ref_input in parts/reference.h; tests/test_ops.c "close" and every product
template <int QUADS> __global__ void __launch_bounds__(ROW_THREADS, 2)
prepare_kernel(const __grid_constant__ RowInputs o, const __grid_constant__ Prepareds outs) {
    prefetch_parameter(&o, sizeof o);
    prefetch_parameter(&outs, sizeof outs);
    float *const room = (float *)shared_bytes;         // norm weights; QUADS = 0: the row
    const float *w[NORM_WEIGHTS];
    int phase = 0, used = 0;
#pragma unroll
    for (int k = 0; QUADS && k < NORM_WEIGHTS; k++) {  // a thread copies only what it uses itself
        w[k] = room + used;
        if (!o.norm[k]) continue;
#pragma unroll 1
        for (int i = 4 * threadIdx.x; i < o.cols; i += 4 * ROW_THREADS) copy_ahead(room + used + i, o.norm[k] + i);
        used += o.cols;
    }
    copy_commit();
    wait_for_previous_kernel();
    auto weight = [&](int k, int j) {
        const int i = 4 * (threadIdx.x + ROW_THREADS * j);
        if (!QUADS) return load4(o.norm[k], i, o.cols, o.quads);
        return i < o.cols ? *(const float4 *)(w[k] + i) : make_float4(0, 0, 0, 0);
    };
    const size_t at = (size_t)blockIdx.x * o.cols;
    prepare_row<QUADS, MAX_READERS>(o, blockIdx.x, weight, room, true, &phase, [] { wait_for_copies<0>(); },
                                    [&](int k) {
        return [&o, at, out = outs.of[k]](int i, float4 y) {
            if (out.f) store4(out.f + at, i, o.cols, o.quads, y);
            if (out.h && o.quads) {
                const uint2 two = make_uint2(prompt_halves(y.x, y.y), prompt_halves(y.z, y.w));
                unsigned *const to = (unsigned *)(out.h + at + (out.by_fragment ? fragment_at(i) : i));
                if (i < o.cols) to[0] = two.x, to[out.by_fragment ? 4 : 1] = two.y;
            } else if (out.h) {
                const float v[4] = { y.x, y.y, y.z, y.w };
                for (int c = 0; c < 4; c++)
                    if (i + c < o.cols) out.h[at + (out.by_fragment ? fragment_at(i + c) : i + c)] = prompt_half(v[c]);
            }
            if (out.q) {
                float s;
                const unsigned word = quantise4(y, &s);
                if (i < o.cols) *(unsigned *)(out.q + at + i) = word;
                if (i < o.cols && i % 32 == 0) out.s[(at + i) / 32] = s;
            }
        };
    });
}

// in (n): inputs with the same x'; the first one says how to make it.
static RowInputs row_inputs(const In *const *in, int n, int cols) {
    RowInputs o = { *in[0], { in[0]->w_delta[0], in[0]->w_delta[1], in[0]->w_post }, n, cols, 1.0f / cols, 0 };
    for (int k = 0; k < n; k++) o.norm[PRE + k] = in[k]->w_pre;
    size_t bits = (size_t)cols * sizeof(float) | (size_t)o.in.x | (size_t)o.in.delta[0] | (size_t)o.in.delta[1] |
                  (size_t)o.in.x_out;
    for (const float *w : o.norm) bits |= (size_t)w;
    o.quads = bits % 16 == 0;
    return o;
}

// in, out (n). Long rows that are only rounded, not normed, are cut into parts: each part is handled like a row.
static void launch_prepare(const In *const *in, const Prepared *out, int n, int n_rows, int cols) {
    int parts = div_up(cols, ROW_COLS);
    while (parts < cols / 32 && cols % (32 * parts)) parts++;
    const bool by_n = n == 1 && !in[0]->delta[0] && !in[0]->delta[1] && !in[0]->w_pre && cols % (32 * parts) == 0;
    if (by_n) n_rows *= parts, cols /= parts;
    RowInputs o = row_inputs(in, n, cols);
    Prepareds outs = { };
    int n_weights = 0;
    for (int k = 0; k < n; k++) {
        outs.of[k] = out[k];
        if ((size_t)out[k].f % 16) o.quads = 0;
        if (out[k].q && cols % 32) cuda_die("prepare: expected a multiple of 32 columns for int8, got %d", cols);
    }
    if (cols > 49152) cuda_die("prepare: rows of %d values are not supported", cols);
    for (const float *w : o.norm) n_weights += w != NULL;
    const size_t row_bytes = round_up(cols, 4) * sizeof(float);
    if (o.quads && cols <= NARROW_COLS)
        launch(WRITES_ACTIVATIONS, prepare_kernel<NARROW_QUADS>, n_rows, ROW_THREADS, n_weights * row_bytes, o, outs);
    else if (o.quads && cols <= ROW_COLS)
        launch(WRITES_ACTIVATIONS, prepare_kernel<ROW_QUADS>, n_rows, ROW_THREADS, n_weights * row_bytes, o, outs);
    else launch(WRITES_ACTIVATIONS, prepare_kernel<0>, n_rows, ROW_THREADS, row_bytes, o, outs);
    CHECK_LAUNCH("prepare n_rows=%d cols=%d", n_rows, cols);
}

// The same for one input.
static void launch_prepare(const In *in, Prepared out, int n_rows, int cols) {
    launch_prepare(&in, &out, 1, n_rows, cols);
}

// act_to_half: converts an activation that an earlier operation left (f, or q * s) to f16 for prompts.
//   shapes    n values, row after row; f, q and out at multiples of 16 bytes; by_fragment: as in Prepared
//   launch    grid ceil(n / 2048), block 256: a thread converts eight values
//   traffic   reads 4 bytes or 1 1/8 a value, writes 2
__global__ void act_to_half_kernel(Act a, __half *out, size_t n, bool by_fragment) {
    wait_for_previous_kernel();
    const size_t i = 8 * ((size_t)blockIdx.x * blockDim.x + threadIdx.x);
    if (i + 8 > n) {
        for (size_t k = i; k < n; k++) out[k] = prompt_half(a.f ? a.f[k] : a.q[k] * a.s[k / 32]);
        return;
    }
    float v[8];
    if (a.f) {
        *(float4 *)v = __ldcg((const float4 *)(a.f + i));
        *(float4 *)(v + 4) = __ldcg((const float4 *)(a.f + i + 4));
    } else {
        const uint2 q = __ldcg((const uint2 *)(a.q + i));
        const float s = a.s[i / 32];
        for (int k = 0; k < 8; k++) v[k] = (int8_t)((k < 4 ? q.x : q.y) >> 8 * (k % 4)) * s;
    }
    const uint4 all = make_uint4(prompt_halves(v[0], v[1]), prompt_halves(v[2], v[3]), prompt_halves(v[4], v[5]),
                                 prompt_halves(v[6], v[7]));
    if (!by_fragment) {
        *(uint4 *)(out + i) = all;
        return;
    }
    uint2 *const to = (uint2 *)(out + (i & ~(size_t)15) + fragment_at((int)(i & 15)));
    to[0] = make_uint2(all.x, all.z), to[2] = make_uint2(all.y, all.w);
}

// The most rows that the products of 1 to 64 rows get: experts get all rows of the step. The third scratch belongs to
// the experts alone and has STEP_ROWS rows.
static int prepared_rows(const Limits *lim) {
    return lim->max_experts ? lim->max_rows : min_int(lim->max_rows, STEP_ROWS);
}

// The int8 and f32 forms of an input for the 1..64-row products, in scratch number `number`.
static Prepared prepared_at(int number, int cols, bool f, bool q, bool h) {
    const size_t rows = prepared_rows(&cuda.lim), all = rows * cuda.lim.max_cols;
    return (Prepared){ f ? cuda.y + number * all : NULL, q ? cuda.yq + number * all : NULL,
                       q ? cuda.ys + number * (all / 32 + rows) : NULL, h ? cuda.y16 : NULL };
}

// embed: out[r] = scale * table[token of r].
//   shapes    table (vocab, cols), out (n_rows, cols)
//   launch    grid (n_rows, ceil(cols / 32 / 128)), block 128: a thread takes a group
//   traffic   reads one row of the table per row
//   see       ref_embed
__global__ void embed_kernel(Batch b, Planes table, DType type, int vocab, int cols, float scale, float *out) {
    wait_for_previous_kernel();
    const int g = blockIdx.y * blockDim.x + threadIdx.x, first = g * 32;
    if (first >= cols) return;
    int token = b.rows[blockIdx.x].token;
    if (token < 0 || token >= vocab) token = 0;
    float v[32];
    const int n = min(32, cols - first);
    values_at(type, table, (size_t)token * cols + first, n, v);
    for (int i = 0; i < n; i++) out[(size_t)blockIdx.x * cols + first + i] = v[i] * scale;
}
static void cuda_embed(const Embed *o) {
    const Tensor *t = o->table;
    launch(WRITES_ACTIVATIONS, embed_kernel, dim3(o->batch->n_rows, div_up(div_up(t->cols, 32), 128)), 128, 0,
           *o->batch, planes_of(t), t->type, t->rows, t->cols, o->scale, o->out);
    CHECK_LAUNCH("embed n_rows=%d cols=%d", o->batch->n_rows, t->cols);
}

// pair: the embedding of a token followed by a row of hidden, as Act.
//   shapes    as Pair; cols a multiple of 32
//   launch    grid (n_rows, ceil(2 * cols / 32 / 64)), block 64: a thread takes a group
//   traffic   reads one row of the table and one of hidden per row
//   see       ref_pair
__global__ void pair_kernel(Pair o, Planes table, DType type, int vocab, int cols) {
    wait_for_previous_kernel();
    const int g = blockIdx.y * blockDim.x + threadIdx.x, first = g * 32, from = o.of ? o.of[blockIdx.x] : blockIdx.x;
    if (first >= 2 * cols) return;
    float v[32];
    if (first < cols) {
        int token = o.tokens[(size_t)from * o.token_stride];
        if (token < 0 || token >= vocab) token = 0;
        values_at(type, table, (size_t)token * cols + first, 32, v);
        for (int i = 0; i < 32; i++) v[i] *= o.scale;
    } else {
        const float *row = o.hidden + (size_t)(o.row ? o.row[from] : from) * cols + first - cols;
        for (int i = 0; i < 32; i += 4) *(float4 *)(v + i) = __ldcg((const float4 *)(row + i));
    }
    const size_t at = (size_t)blockIdx.x * 2 * cols + first;
    for (int i = 0; o.out.f && i < 32; i += 4) *(float4 *)(o.out.f + at + i) = *(const float4 *)(v + i);
    if (!o.out.q) return;
    unsigned top = 0;
    for (int i = 0; i < 32; i++) top = max(top, __float_as_uint(v[i]) & 0x7fffffffu);
    float inv;
    o.out.s[at / 32] = group_scale(top, &inv);
    for (int i = 0; i < 32; i += 4) {
        unsigned word = 0;
        for (int k = 0; inv && k < 4; k++) word |= ((unsigned)__float2int_rn(__fmul_rn(v[i + k], inv)) & 255) << 8 * k;
        *(unsigned *)(o.out.q + at + i) = word;
    }
}
static void cuda_pair(const Pair *o) {
    const Tensor *t = o->table;
    if (t->cols % 32) cuda_die("pair: rows of %d values are not supported", t->cols);
    launch(WRITES_ACTIVATIONS, pair_kernel, dim3(o->n_rows, div_up(2 * t->cols / 32, 64)), 64, 0, *o, planes_of(t),
           t->type, t->rows, t->cols);
    CHECK_LAUNCH("pair n_rows=%d cols=%d", o->n_rows, t->cols);
}

// ple_rows: u = out_scale * (norm(proj_scale * u; w_norm) + table_scale * table[token]), per row and layer.
//   shapes    u (n_rows, n_layers, ple_dim); table (vocab, n_layers * ple_dim)
//   launch    grid (n_rows, n_layers), block 256, dynamic shared memory 4 * ple_dim
//   traffic   reads and writes u, reads one row of the table per row
//   see       ref_ple_rows
__global__ void ple_rows_kernel(Batch b, Planes table, DType type, int vocab, const float *w_norm, float *u,
                                int n_layers, int dim, float proj_scale, float table_scale, float out_scale,
                                float eps) {
    wait_for_previous_kernel();
    float *embedding = (float *)shared_bytes;
    int token = b.rows[blockIdx.x].token;
    if (token < 0 || token >= vocab) token = 0;
    float *row = u + ((size_t)blockIdx.x * n_layers + blockIdx.y) * dim;
    const size_t at = ((size_t)token * n_layers + blockIdx.y) * dim;       // first value; its group may begin before it
    float ss = 0;
    for (int i = threadIdx.x; i < dim; i += blockDim.x) ss += row[i] * proj_scale * (row[i] * proj_scale);
    for (size_t g = at / 32 + threadIdx.x; g * 32 < at + dim; g += blockDim.x) {
        float v[32];
        const size_t row_end = ((size_t)token + 1) * n_layers * dim;
        values_at(type, table, g * 32, (int)min((size_t)32, row_end - g * 32), v);
        for (int i = 0; i < 32; i++)
            if (g * 32 + i >= at && g * 32 + i < at + dim) embedding[g * 32 + i - at] = v[i];
    }
    const float scale = rsqrtf(block_sum(ss) / dim + eps);                 // the barrier also completes `embedding`
    for (int i = threadIdx.x; i < dim; i += blockDim.x)
        row[i] = (w_norm[i] * (row[i] * proj_scale * scale) + embedding[i] * table_scale) * out_scale;
}
static void cuda_ple_rows(const PleRows *o) {
    launch(WRITES_ACTIVATIONS, ple_rows_kernel, dim3(o->batch->n_rows, o->n_layers), 256, o->ple_dim * sizeof(float),
        *o->batch, planes_of(o->table), o->table->type, o->table->rows, o->w_norm, o->u, o->n_layers, o->ple_dim,
        o->proj_scale, o->table_scale, o->out_scale, o->eps);
    CHECK_LAUNCH("ple_rows n_rows=%d n_layers=%d ple_dim=%d", o->batch->n_rows, o->n_layers, o->ple_dim);
}

static void cuda_close(const Close *o) {
    launch_prepare(&o->in, (Prepared){ .f = o->out }, o->n_rows, o->cols);
}

// gather_rows: dst[i] = src[index[i]], words of 32 bits.
//   launch    grid (n_rows, ceil(cols / 256)), block 256
//   see       ref_gather_rows
__global__ void gather_rows_kernel(const uint32_t *src, const int32_t *index, uint32_t *dst, int cols, int src_stride,
                                   int dst_stride) {
    wait_for_previous_kernel();
    const int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= cols) return;
    const size_t from = index ? index[blockIdx.x] : blockIdx.x;
    dst[(size_t)blockIdx.x * dst_stride + i] = src[from * src_stride + i];
}
static void cuda_gather_rows(const GatherRows *o) {
    launch(WRITES_ACTIVATIONS | WRITES_ROWS, gather_rows_kernel, dim3(o->n_rows, div_up(o->cols, 256)), 256, 0,
        (const uint32_t *)o->src, o->index, (uint32_t *)o->dst, o->cols, o->src_stride, o->dst_stride);
    CHECK_LAUNCH("gather_rows n_rows=%d cols=%d", o->n_rows, o->cols);
}

// ==== [5] Products of 1 to 64 rows ===================================================================================
// product_kernel runs a list of jobs: matrices of different types and shapes in one launch. A warp computes four
// features at a time, 8 lanes each. Lane l of the 8 reads groups l, l + 8, ... of its row, so neighbouring lanes read
// neighbouring 16 bytes. Of a float matrix a warp computes one feature. Each lane prefetches a few groups. One row
// times few features, or times floats, has kernels of its own (gemv_kernel); three and more rows have tile_kernel.
//
// Order of a sum, wherever quantised matrices meet 1 to 64 rows: slice l = groups l, l + 8, ... ascending,
//     sum_l = fma(scale of the activations, group_term, sum_l)
//     result = ((sum_0 + sum_4) + (sum_2 + sum_6)) + ((sum_1 + sum_5) + (sum_3 + sum_7))
// Float matrices: the same with chunks of 16 bytes instead of groups and 32 lanes instead of 8. A lane has four sums
// (value i of a chunk goes to sum i % 4), added as (0 + 1) + (2 + 3); then the lanes are added, l to l + 16, 8, 4, 2,
// 1.
//
// A block of 16 warps fills an SM and makes the input for itself in shared memory (Input). While it waits for the
// previous kernel and while it makes the input, the first weights of every warp are prefetched into L2 (prefetch_item).
// If the launch reads little, the weights of the next item are prefetched as well; of experts those of all items, once
// the experts are chosen (prefetch_experts). Prefetching more is slower: L2 would carry the bytes twice, and the output
// matrix reached its limit. What a launch takes beyond bytes / bandwidth is the
// chain of dependent instructions of one warp, five to ten cycles each. So short code, laid out in the order of its use
// and without calls, matters more than bytes in flight.

typedef enum {
    JOB_STORE,                // out = w y, soft-capped when cap > 0
    JOB_GATED,                // out = fn(gate y) * (up y), stored as Act
    JOB_INJECT,               // out = gelu(w y) * u, stored as Act
    JOB_DOWN                  // out = sum over j of weights[j] * (w_e y_j): the experts of a row
} JobKind;

typedef struct {              // what is done with the product of a matrix
    JobKind  kind;
    int      rows;            // output features
    const float *factor, *up_factor;           // (n) Tensor.scale
    float    cap;             // JOB_STORE
    float   *out;             // JOB_STORE, JOB_DOWN
    Act      act;             // JOB_GATED, JOB_INJECT
    ActFn    fn;
    const float *u;           // JOB_INJECT
    int      u_stride;
} Result;

struct Job : Result {
    DType    type, up_type;
    Planes   w, up;
    size_t   up_first; // JOB_GATED: first row of `up` within its expert (matrix with gate and up: expert_dim, up = w)
    size_t   rows_e;          // rows of one expert of w
    int      cols;            // input width
    int      n_rows;          // rows of the input; JOB_GATED with ids: n_rows * n_used outputs
    int      source;          // number of the launch's input that it reads
    Prepared in;              // that input in global memory; no pointers: each block makes it
    const int32_t *ids;       // experts; NULL: a single matrix
    int      n_experts;       // matrices stacked in w
    const float *weights;     // JOB_DOWN
    int      n_used;
    bool     by_blocks;       // its work items are computed by a whole block; else by one warp each
    int      item_features;   // features of a work item: 32 (GATED, INJECT), 8 (DOWN), 4, or 1: floats
    int      row_items, n_items;               // work items of a row or pair; of a chunk of rows
    int      row_bytes[2][4]; // of each plane of w and up
    int      prefetch_bytes[2][4];             // how many of these prefetch_item prefetches
    const uint8_t *prefetch_from[2][4];        // row 0 of each plane
    int      quads;           // floats: rows lie at multiples of 16 bytes
};

enum { MAX_JOBS = 6, MAX_INPUTS = 2, PRODUCT_WARPS = ROW_THREADS / 32, WARP_FEATURES = 4,
       BLOCK_FEATURES = 32, MATRIX_WARPS = BLOCK_FEATURES / WARP_FEATURES, DOWN_FEATURES = 2 * WARP_FEATURES,
       MANY_ROWS = 3,         // from this number of rows on, inputs are prepared in global memory
       FEW_ROWS = 3,          // rows that a block computes at once
       // Octets of a row prefetched into L2 before its launch multiplies: an octet is 9 KB of Q4_K for each block.
       // Cards with PDL have 390 KB of L2 or more for each SM.
       PREFETCH_OCTETS = 24,
       PREFETCH_BYTES = 32 << 20,      // later items are prefetched if the launch reads no more than this and 2/3 of L2
       OCTET_BYTES = 384 };   // bytes of 8 groups of an int8 row in shared memory

// Block items whose sums are kept until all warps meet to finish them, so that barriers are rare: as many as there are
// warps to finish them, one warp for each row.
HOST_DEVICE static constexpr int waiting_items(int rows) { return rows == 1 ? 8 : PRODUCT_WARPS / rows; }

// An input in the shared memory of a block. f32: rows of f_row bytes, padded with zeros. int8: for every octet
//
//     byte 0     first halves of groups 0..7, 16 bytes each
//     byte 128   second halves of groups 0..7
//     byte 256   { scale, sum of all integers, of the first half, of the second half } of groups 0..7, 16 bytes each
//
// So the 8 lanes of a feature read 128 consecutive bytes each time, at fixed distances from one pointer.
typedef struct {
    Prepared from;            // in global memory, (n_rows * rows_each, cols); no pointers: the block makes it
    int cols, rows_each;      // input rows for each row of the step: 1; JOB_DOWN: n_used
    int f_at, f_row, q_at, q_row;              // offsets and bytes of a row; 0 bytes: this form is not needed
    Divisor by_chunks;        // chunks of an int8 row
} Input;

typedef struct {              // a router's choice of experts: Route without the product
    int   n, n_used;          // n = 0: none
    const float *logits, *expert_scale;        // (n_rows, n), (n) or NULL
    int32_t *ids;             // (n_rows, n_used)
    float *weights;           // (n_rows, n_used)
} Choice;

typedef struct {
    Job job[MAX_JOBS];
    int n;
    int n_rows;
    Input input[MAX_INPUTS];
    int n_inputs;
    RowInputs made;           // the first made.n inputs, which every block makes; n = 0: none
    Choice choice;            // made first, by every block for itself: `ids` below are its ids
    int n_block_items, n_warp_items;           // of a chunk of rows
    const int32_t *ids;       // experts of the pairs (row, choice) and, JOB_DOWN, their weights; NULL: none
    const float *pair_weights;
    int n_used;
    int longer_blocks;        // blocks with one block item more than the others, and no warp items
    int prefetch_all;         // prefetch the weights of each item during the one before it
    int prefetch_early;       // prefetch the first weights before the launch may read its input, also if it makes it
    int pairs_at, results_at, n_results;  // offsets in shared memory; floats of results of a warp
} Jobs;

// ---- inputs ----

__device__ static inline void put_meta(char *group, float s, int sum0, int sum1) {
    *(float4 *)(group + 256) = make_float4(s, (float)(sum0 + sum1), (float)sum0, (float)sum1);
}
__device__ static inline int sum_of_bytes(uint4 v) {
    const int ones = 0x01010101;
    return __dp4a(ones, (int)v.x, __dp4a(ones, (int)v.y, __dp4a(ones, (int)v.z, __dp4a(ones, (int)v.w, 0))));
}

// Writes chunk c of an int8 row to its place in `row` (shared memory), with the scale and the sums of its group. Called
// by whole warps; lanes c and c + 1 hold the two chunks of a group. there: the chunk exists.
__device__ static inline void put_chunk(char *row, int c, uint4 v, float scale, bool there) {
    char *group = row + c / 16 * OCTET_BYTES + c / 2 % 8 * 16;
    const int sum = sum_of_bytes(v), other = __shfl_xor_sync(~0u, sum, 1);
    if (!there) return;
    *(uint4 *)(group + c % 2 * 128) = v;
    if (c % 2 == 0) put_meta(group, scale, sum, other);
}

// Copies rows first .. first + n_rows - 1 of an input from global memory. A thread has four loads in flight.
__device__ static inline void copy_input(const Input &o, unsigned first, int n_rows) {
    if (o.q_row) {
        constexpr int COPIES = 4;
        const unsigned n = n_rows * o.by_chunks.by, from = first * o.by_chunks.by;
        const uint4 *q = (const uint4 *)o.from.q + from;
        const float *s = o.from.s + from / 2;
#pragma unroll 1
        for (unsigned base = 0; base + threadIdx.x / 32 * 32 < n; base += COPIES * ROW_THREADS) {
            const unsigned i = base + threadIdx.x;
            uint4 v[COPIES];
            float scale[COPIES];
#pragma unroll
            for (int k = 0; k < COPIES; k++) {
                if (base + k * ROW_THREADS >= n) break;
                const unsigned c = i + k * ROW_THREADS;
                v[k] = c < n ? __ldcg(q + c) : make_uint4(0, 0, 0, 0);
                scale[k] = c < n ? __ldcg(s + c / 2) : 0;
            }
#pragma unroll
            for (int k = 0; k < COPIES; k++) {
                if (base + k * ROW_THREADS >= n) break;
                const unsigned c = i + k * ROW_THREADS, r = quotient(c, o.by_chunks);
                put_chunk(shared_bytes + o.q_at + r * o.q_row, c - r * o.by_chunks.by, v[k], scale[k], c < n);
            }
        }
    }
    if (o.f_row) {
        const int per_row = o.f_row / 16, n = n_rows * per_row;
        const int quads = o.cols % 4 == 0 && (size_t)o.from.f % 16 == 0;
        for (int i = threadIdx.x; i < n; i += ROW_THREADS)
            *(float4 *)(shared_bytes + o.f_at + (size_t)i * 16) =
                load4(o.from.f + (size_t)(first + i / per_row) * o.cols, i % per_row * 4, o.cols, quads);
    }
}

// Writes four values of row r of an input, from value i on; called by whole warps.
__device__ static inline void put_values(const Input &o, int r, unsigned i, float4 y) {
    if (4 * (int)i < o.f_row) *(float4 *)(shared_bytes + o.f_at + r * o.f_row + 4 * i) = y;
    if (!o.q_row) return;
    float s;
    const unsigned word = quantise4(y, &s);
    int sum = __dp4a(0x01010101, (int)word, 0);
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const int other = __shfl_xor_sync(~0u, sum, 4);
    if ((int)i >= o.cols) return;
    char *group = shared_bytes + o.q_at + r * o.q_row + i / 256 * OCTET_BYTES + i / 32 % 8 * 16;
    *(unsigned *)(group + i / 16 % 2 * 128 + i % 16) = word;
    if (i % 32 == 0) put_meta(group, s, sum, other);
}

// Copies rows first_row .. first_row + n - 1 of the step, of all inputs in global memory. The launch's jobs lie at the
// start of shared memory.
__device__ static inline void copy_inputs(int first_row, int n) {
    const Jobs &jobs = *(const Jobs *)shared_bytes;
    for (int k = jobs.made.n; k < jobs.n_inputs; k++)
        copy_input(jobs.input[k], first_row * jobs.input[k].rows_each, n * jobs.input[k].rows_each);
}
// Loads the norm weights that this thread uses in prepare_row.
template <int QUADS> __device__ static inline void load_norm_weights(const RowInputs &o, float4 (*w)[QUADS]) {
    const int cols = o.cols;
#pragma unroll
    for (int k = 0; k < NORM_WEIGHTS; k++) {
        const float *const from = o.norm[k];
#pragma unroll
        for (int j = 0; j < QUADS; j++) {
            const int i = 4 * (threadIdx.x + ROW_THREADS * j);
            w[k][j] = from && i < cols ? __ldg((const float4 *)(from + i)) : make_float4(0, 0, 0, 0);
        }
    }
}

// ---- the loop of a warp ----

// A quantised row is read by 8 lanes, a group each; a float row by 32 lanes, 16 bytes each. Returns chunk c of a float
// row; values after its end are 0.
template <DType T> __device__ static inline uint4 fetch_chunk(const uint8_t *row, int c, int cols, int quads) {
    constexpr int n = Type<T>::chunk;
    if (quads) return load_once((const uint4 *)row + c);
    unsigned v[4] = { 0, 0, 0, 0 };
    for (int i = 0; i < n; i++)
        if (c * n + i < cols) {
            if (T == T_F32) v[i] = ((const unsigned *)row)[c * n + i];
            else v[i / 2] |= (unsigned)((const unsigned short *)row)[c * n + i] << 16 * (i % 2);
        }
    return make_uint4(v[0], v[1], v[2], v[3]);
}

template <DType T> __device__ static inline float chunk_value(const uint4 &v, int i) {
    const unsigned word[4] = { v.x, v.y, v.z, v.w };
    if (T == T_F32) return __uint_as_float(word[i]);
    const unsigned w = word[i / 2];
    if (T == T_BF16) return __uint_as_float(i % 2 ? w & 0xffff0000u : w << 16);
    return half_in(w >> 16 * (i % 2));
}

// A float row times an input, by a warp: four sums in each lane, value i of a chunk goes to sum i % 4. y: the input's
// values that match the chunk.
struct FloatSum { float part[4]; };
template <DType T> __device__ static inline void add_chunk(FloatSum *sum, const uint4 &w, const float4 *y) {
#pragma unroll
    for (int k = 0; k < Type<T>::chunk; k += 4) {
        const float4 v = y[k / 4];
        sum->part[0] = __fmaf_rn(chunk_value<T>(w, k), v.x, sum->part[0]);
        sum->part[1] = __fmaf_rn(chunk_value<T>(w, k + 1), v.y, sum->part[1]);
        sum->part[2] = __fmaf_rn(chunk_value<T>(w, k + 2), v.z, sum->part[2]);
        sum->part[3] = __fmaf_rn(chunk_value<T>(w, k + 3), v.w, sum->part[3]);
    }
}
__device__ static inline float total(const FloatSum &sum) {
    return warp_sum((sum.part[0] + sum.part[1]) + (sum.part[2] + sum.part[3]));
}

// ---- results of a product ----

// Stores one feature of a row.
__device__ static inline void store_product(const Result &o, size_t row, int feature, float v) {
    if (o.factor) v *= *o.factor;
    if (o.cap > 0) v = o.cap * tanhf(v / o.cap);
    o.out[row * o.rows + feature] = v;
}

// Stores 32 features of a row from `first` on as Act, by a warp, one lane each: fn(v) * other. Both are scaled already.
__device__ static inline void store_activated(const Result &o, size_t row, int first, float v, float other) {
    const int lane = threadIdx.x % 32;
    const bool inside = first + lane < o.rows;
    const size_t at = row * o.rows + first;
    v = inside ? activate(o.fn, v) * other : 0;
    if (o.act.f && inside) o.act.f[at + lane] = v;
    if (o.act.q) quantise_group(v, o.act.q + at, o.act.s + at / 32);
}

// A work item: its job, its first feature, its pair (JOB_GATED with ids) or row (JOB_DOWN) within the chunk of rows,
// else 0.
typedef struct { int job, first, pair; } WorkItem;

__device__ static inline WorkItem item_at(const Jobs &jobs, bool of_block, int i) {
    int k = 0, pair = 0;
    while (jobs.job[k].by_blocks != of_block || i >= jobs.job[k].n_items) {
        if (jobs.job[k].by_blocks == of_block) i -= jobs.job[k].n_items;
        k++;
    }
    for (; i >= jobs.job[k].row_items; pair++) i -= jobs.job[k].row_items;
    return { k, i * jobs.job[k].item_features, pair };
}

// Does the item belong to a row after the n rows of the last chunk?
__device__ static inline bool past_rows(const Job &o, WorkItem item, int n) {
    return o.ids && item.pair >= (o.kind == JOB_DOWN ? n : n * o.n_used);
}

// Prefetches this warp's weights of an item: prefetch_bytes of each row of each plane. Rows that are prefetched whole
// are contiguous and requested at once. Not for experts: prefetch_experts.
__device__ static inline void prefetch_item(const Jobs &jobs, bool of_block, int number) {
    const WorkItem item = item_at(jobs, of_block, number);
    const Job &o = jobs.job[item.job];
    const int warp = threadIdx.x / 32, row = threadIdx.x % 4, plane = threadIdx.x / 4 % 4;
    const int up = of_block ? warp / MATRIX_WARPS : 0;
    const unsigned feature = item.first + (of_block ? WARP_FEATURES * (warp % MATRIX_WARPS) : 0) + row;
    const unsigned row_bytes = o.row_bytes[up][plane];
    const int ahead = o.prefetch_bytes[up][plane], rows = min(o.item_features, WARP_FEATURES);
    const int left = o.rows - (int)feature;
    const bool whole = ahead == (int)row_bytes;
    if (threadIdx.x % 32 >= 16 || !ahead || left <= 0 || row >= (whole ? 1 : rows)) return;
    const size_t from = (size_t)o.prefetch_from[up][plane] + (size_t)feature * row_bytes;
    const unsigned bytes = whole ? min(left, rows) * row_bytes : ahead;
    prefetch_l2((const void *)(from & ~(size_t)15), ((unsigned)from % 16 + bytes + 15) & ~15u);
}

// Prefetches the weights of all items of this block that belong to row `row`, whose experts are ids[0 .. n_used - 1];
// by a warp. The rows of an item are contiguous in each plane: one region for each plane of gate and up.
__device__ static inline void prefetch_experts(const Jobs &jobs, int row, const int *ids) {
    const int plane = threadIdx.x % 4, up = threadIdx.x / 4 % 2;
#pragma unroll 1
    for (int t = blockIdx.x; t < jobs.n_block_items; t += gridDim.x) {
        const WorkItem item = item_at(jobs, true, t);
        const Job &o = jobs.job[item.job];
        const unsigned row_bytes = o.row_bytes[up][plane];
        const unsigned bytes = min(o.item_features, o.rows - item.first) * row_bytes;
        if (item.pair / o.n_used != row || threadIdx.x % 32 >= 8 || !bytes) continue;
        const size_t from = (size_t)o.prefetch_from[up][plane] +
                            ((size_t)ids[item.pair % o.n_used] * o.rows_e + item.first) * row_bytes;
        prefetch_l2((const void *)(from & ~(size_t)15), round_16((unsigned)from % 16 + bytes));
    }
}

// One float row of weights times n <= R rows of an input, by a warp: results[r * WARP_FEATURES] for input row r. row:
// its number in the planes; y_at: offset of the first row of the input.
template <DType T, int R>
__device__ static inline void multiply_floats_row(const Planes &w, unsigned row, int cols, int quads, int y_at,
                                                  int y_row, int n, float *results) {
    constexpr int depth = 4, chunk = Type<T>::chunk, round_bytes = 32 * chunk * (int)sizeof(float);
    const int lane = threadIdx.x % 32, n_chunks = div_up(cols, chunk), n_rounds = div_up(n_chunks, 32);
    const char *y = shared_bytes + y_at + lane * (round_bytes / 32);
    const uint8_t *from = w.lo + (size_t)row * cols * (16 / chunk);
    uint4 held[depth];
    FloatSum sum[R] = { };
    auto fetch = [&](int i, int round) {                // after the end the last chunk again; its value is not used
        held[i] = fetch_chunk<T>(from, min(lane + 32 * round, n_chunks - 1), cols, quads);
    };
#pragma unroll
    for (int i = 0; i < depth; i++) fetch(i, i);
#pragma unroll 1
    for (int round = 0; round < n_rounds; round += depth, y += depth * round_bytes) {
#pragma unroll
        for (int i = 0; i < depth; i++) {
            if (round + i >= n_rounds) break;
#pragma unroll
            for (int r = 0; lane + 32 * (round + i) < n_chunks && r < R; r++) {
                if (R > 1 && r >= n) break;
                add_chunk<T>(&sum[r], held[i], (const float4 *)(y + i * round_bytes + r * y_row));
            }
            if (round + i + depth < n_rounds) fetch(i, round + i + depth);
        }
    }
#pragma unroll
    for (int r = 0; r < R; r++) {
        if (R > 1 && r >= n) break;
        const float v = total(sum[r]);
        if (lane == 0) results[r * WARP_FEATURES] = v;
    }
}

// A group of weights, unpacked with UPPER, times the same group of an input row in shared memory, without the input's
// scale.
template <DType T> __device__ static inline float input_term(const Group &x, const char *in, float *scale) {
    constexpr bool upper = Type<T>::nibbles;
    const uint4 q0 = *(const uint4 *)in, q1 = *(const uint4 *)(in + 128);
    const float4 meta = *(const float4 *)(in + 256);
    const unsigned qs[8] = { q0.x, q0.y, q0.z, q0.w, q1.x, q1.y, q1.z, q1.w };
    int dot[2] = { 0, 0 };
    for (int k = 0; k < 8; k++)
        dot[k / 4] = upper && k >= 4 ? dot_unsigned(x.c[k], qs[k], dot[1])
            : __dp4a((int)x.c[k], (int)qs[k], dot[k / 4]);
    if (upper) dot[1] >>= 4;
    *scale = meta.x;
    return Type<T>::halves ? group_term<T>(x.a, x.m, dot[0], dot[1], meta.z, meta.w)
                             : group_term<T>(x.a, x.m, dot[0] + dot[1], 0, meta.y, 0);
}

// A lane's position in a row of weights: n octets that begin at `at`; `left` groups from there to the end of the row. A
// few groups are always prefetched into `held`.
template <DType T> struct RowWalk {
    Planes at;
    int    n, left;
    Fetched<T> held[Type<T>::depth];
};
template <DType T>
__device__ static inline RowWalk<T> begin_walk(const Planes &w, unsigned row, int n_groups, int first, int n) {
    const int l = threadIdx.x % 8;
    RowWalk<T> walk = { planes_from<T>(w, (size_t)row * n_groups + l + 8 * first), n, n_groups - 8 * first };
#pragma unroll
    for (int i = 0; i < Type<T>::depth; i++) {         // after the end the last group again; it is not used
        const int on = 8 * min(i, max(n, 1) - 1);
        fetch_group<T>(walk.at, Type<T>::blocks ? on : min(on, walk.left - 1 - l), &walk.held[i]);
    }
    return walk;
}
// Calls use(group, y + OCTET_BYTES * k, k) for this lane's group of each octet k.
template <DType T, typename Use> __device__ static inline void each_group(RowWalk<T> &walk, const char *y, Use use) {
    constexpr int depth = Type<T>::depth;
    const int l = threadIdx.x % 8;
    auto is_there = [&](int octet) { return octet < walk.n && (Type<T>::blocks || l + 8 * octet < walk.left); };
#pragma unroll 1
    for (int octet = 0; octet < walk.n; octet += depth, y += depth * OCTET_BYTES) {
#pragma unroll
        for (int i = 0; i < depth; i++) {
            if (octet + i >= walk.n) break;
            if (is_there(octet + i)) {
                Group x;
                unpack_group<T, true>(walk.held[i], l, &x);
                use(x, y + i * OCTET_BYTES, octet + i);
            }
            if (is_there(octet + i + depth)) fetch_group<T>(walk.at, 8 * (i + depth), &walk.held[i]);
        }
        walk.at.lo += depth * Type<T>::lo, walk.at.hi += depth * Type<T>::hi;
        walk.at.head += depth * Type<T>::head, walk.at.sup += depth * Type<T>::sup;
    }
}

// Adds up the sums of the eight lanes of a feature; the first lane gets the result.
__device__ static inline float feature_sum(float v) {
    for (int h = 4; h > 0; h /= 2) v += __shfl_xor_sync(~0u, v, h);
    return v;
}

// Four consecutive quantised rows of weights, 8 lanes each, times n <= R rows of an input: results[r * WARP_FEATURES +
// f] for input row r and feature f. row: number of this lane's row in the planes; y_at: offset of the first row of the
// input.
template <DType T, int R>
__device__ static inline void multiply_rows(const Planes &w, unsigned row, int cols, int y_at, int y_row, int n,
                                            float *results) {
    const int lane = threadIdx.x % 32, n_groups = cols / 32;
    RowWalk<T> walk = begin_walk<T>(w, row, n_groups, 0, div_up(n_groups, 8));
    float sum[R] = { };
    each_group(walk, shared_bytes + y_at + lane % 8 * 16, [&](const Group &x, const char *y, int) {
#pragma unroll
        for (int r = 0; r < R; r++) {
            if (R > 1 && r >= n) break;
            float scale;
            const float term = input_term<T>(x, y + r * y_row, &scale);
            sum[r] = __fmaf_rn(scale, term, sum[r]);
        }
    });
#pragma unroll
    for (int r = 0; r < R; r++) {
        if (R > 1 && r >= n) break;
        const float v = feature_sum(sum[r]);
        if (lane % 8 == 0) results[r * WARP_FEATURES + lane / 8] = v;
    }
}

// The same for any type; float matrices `count` rows one after the other. The usual types are compiled into the kernel
// and compared one after the other. Instructions come to an SM line by line, so a call costs more than the comparisons,
// and so does a switch, whose table lies in the constant bank (docs/decode.md). opaque() keeps the compiler from making
// one.
template <int R>
__device__ __noinline__ static void multiply_other(DType type, const Planes *w, unsigned row, int count, int cols,
                                                   int quads, int y_at, int y_row, int n, float *results) {
    switch (type) {
#define CASE(T, ...) case T: multiply_rows<T, R>(*w, row, cols, y_at, y_row, n, results); break;
    OTHER_TYPES(CASE)
#undef CASE
#define CASE(T, ...) case T: \
        for (int k = 0; k < count; k++) \
            multiply_floats_row<T, R>(*w, row + k, cols, quads, y_at, y_row, n, results + k); \
        break;
    FLOAT_TYPES(CASE)
#undef CASE
    default: break;
    }
}
template <int R>
__device__ static inline void multiply(DType type, const Planes *w, unsigned row, int count, int cols, int quads,
                                       int y_at, int y_row, int n, float *results) {
#define CASE(T, ...) if (opaque(type) == T) multiply_rows<T, R>(*w, row, cols, y_at, y_row, n, results); else
    USUAL_TYPES(CASE)
#undef CASE
    multiply_other<R>(type, w, row, count, cols, quads, y_at, y_row, n, results);
}

// The n_used largest router logits of a row, the lower expert first on ties, with their softmax weights; by a warp,
// n_used <= 32. Lane j < n_used gets choice j. A lane sorts its four keys, so a round compares only the first key of
// each lane. More than 128 experts are taken in parts: the chosen ones compete with the next 96.
//   see       ref_route
struct Chosen { int id; float weight; };
__device__ static inline Chosen choose_experts(const Choice &o, size_t row) {
    constexpr int KEYS = 4;
    const int lane = threadIdx.x % 32;
    const float *logits = o.logits + row * o.n;
    auto key_of = [&](int i) -> unsigned {             // written by other blocks; 0: a NaN, or none
        const float z = i < o.n ? __ldcg(logits + i) : __uint_as_float(0x7fc00000u);
        return z != z ? 0 : ordered_bits(z);
    };
    unsigned mine = 0;
    Chosen chosen = { 0, 0 };
#pragma unroll 1
    for (int base = 0; base == 0 || base + 32 < o.n; base += 32 * (KEYS - 1)) {
        unsigned key[KEYS];
        int at[KEYS];
#pragma unroll
        for (int k = 0; k < KEYS; k++) {
            const bool held = base && k == 0;
            at[k] = held ? chosen.id : base + lane + 32 * k;
            key[k] = held ? mine : key_of(at[k]);
        }
#pragma unroll
        for (int end = KEYS - 1; end > 0; end--)       // equal keys keep their order
#pragma unroll
            for (int k = 0; k < end; k++)
                if (key[k + 1] > key[k]) {
                    const unsigned larger = key[k + 1];
                    const int larger_at = at[k + 1];
                    key[k + 1] = key[k], at[k + 1] = at[k];
                    key[k] = larger, at[k] = larger_at;
                }
#pragma unroll 1
        for (int j = 0; j < o.n_used; j++) {
            const unsigned top = __reduce_max_sync(~0u, key[0]);
            const int first = (int)__reduce_min_sync(~0u, (unsigned)(key[0] == top ? at[0] : INT_MAX));
            if (lane == j) mine = top, chosen.id = top ? first : 0;    // 0: only NaN is left: any expert, weight NaN
            if (at[0] != first) continue;
#pragma unroll
            for (int k = 0; k + 1 < KEYS; k++) key[k] = key[k + 1], at[k] = at[k + 1];
            key[KEYS - 1] = 0;
        }
    }
    const float z = mine ? from_ordered_bits(mine) : __uint_as_float(0x7fc00000u);
    const float w = expf(z - __shfl_sync(~0u, z, 0));
    float sum = 0;
    for (int j = 0; j < o.n_used; j++) sum += __shfl_sync(~0u, w, j);
    if (lane < o.n_used) chosen.weight = w / sum * (o.expert_scale ? o.expert_scale[chosen.id] : 1);
    return chosen;
}

__device__ static inline void store_choice(const Choice &o, size_t row, Chosen c) {
    const int lane = threadIdx.x % 32;
    if (lane >= o.n_used) return;
    o.ids[row * o.n_used + lane] = c.id;
    o.weights[row * o.n_used + lane] = c.weight;
}

// choose: the experts of each row, for launches whose blocks do not choose for themselves
//   shapes    logits (n_rows, n), ids and weights (n_rows, n_used)
//   launch    grid n_rows, block 32
//   traffic   reads the logits once if n <= 128
//   numerics  as ref_route
//   see       ref_route
__global__ void __launch_bounds__(32) choose_kernel(Choice o) {
    wait_for_previous_kernel();
    store_choice(o, blockIdx.x, choose_experts(o, blockIdx.x));
}

// Finishes row r of n of a block item, by a warp: act(gate) * up, or gelu(sum) * u, as Act, 32 features; or the
// weighted sum of a row's experts. Contains the barrier after which all sums of the block are complete. Most warps
// arrive early, so everything that does not depend on the sums is computed before it.
template <int R>
__device__ static inline void finish_block_item(WorkItem item, int first_row, int r, int n, const float *results) {
    const Jobs &jobs = *(const Jobs *)shared_bytes;
    const Job &o = jobs.job[item.job];
    const int lane = threadIdx.x % 32, *ids = (const int *)(shared_bytes + jobs.pairs_at);
    const bool pairs = o.kind == JOB_GATED && o.ids, inside = item.first + lane < o.rows;
    if (r >= n || (r && o.ids) || past_rows(o, item, n)) {
        sync_first<ROW_THREADS>();
        return;
    }
    if (o.kind == JOB_DOWN) {
        ids += item.pair * o.n_used;
        const float *weights = (const float *)ids + R * jobs.n_used, *factor = o.factor;
        sync_first<ROW_THREADS>();
        if (lane >= DOWN_FEATURES || !inside) return;
        float v = 0;
        for (int j = 0; j < o.n_used; j++) {
            const float sum = results[j * DOWN_FEATURES + lane];
            v = __fmaf_rn(weights[j], factor ? factor[ids[j]] * sum : sum, v);
        }
        o.out[(size_t)(first_row + item.pair) * o.rows + item.first + lane] = v;
        return;
    }
    const bool gated = o.kind == JOB_GATED;
    const float *sum = results + lane / WARP_FEATURES * jobs.n_results + r * WARP_FEATURES + lane % WARP_FEATURES;
    const float *up = sum + (gated ? MATRIX_WARPS * jobs.n_results : 0);
    const int e = pairs ? ids[item.pair] : 0;
    const size_t row = pairs ? (size_t)first_row * o.n_used + item.pair : first_row + r;
    const float factor = o.factor ? o.factor[e] : 1, up_factor = gated && o.up_factor ? o.up_factor[e] : 1;
    const float u = !gated && inside ? o.u[row * o.u_stride + item.first + lane] : 0;
    sync_first<ROW_THREADS>();
    store_activated(o, row, item.first, factor * *sum, gated ? up_factor * *up : u);
}

// Stores n rows of a warp item, by the warp that has their sums.
__device__ static inline void finish_warp_item(const Job &o, WorkItem item, int first_row, int n,
                                               const float *results) {
    const int lane = threadIdx.x % 32, r = lane / WARP_FEATURES, feature = item.first + lane % WARP_FEATURES;
    if (r >= n || lane % WARP_FEATURES >= o.item_features || feature >= o.rows) return;
    store_product(o, first_row + r, feature, results[lane]);
}

// product: the jobs of a launch.
//   shapes    w (rows, cols) per expert, y (n_rows, cols), out (n_rows, rows)
//   launch    grid (a block per SM, or fewer where the SMs stay busy; chunks of R rows), block 512, dynamic shared
//             memory: jobs, inputs, sums
//   traffic   weights once per chunk of rows; every block reads the rows of the input and the norm weights from L2
//   numerics  integer dot products per group, exact; f32 sums in the order above
//   see       ref_matmul, ref_gate_up, ref_route, ref_expert_gate_up, ref_expert_down, ref_ple_inject, ref_head
//
// A block first computes its block items (GATED and INJECT: 32 features; DOWN: 8 features, all experts of a row), then
// each of its warps computes warp items (STORE: 4 features, or one of floats). Example with 2 blocks: gate and up with
// 64 features are 2 block items, a router with 10 features is 3 warp items.
//
//              block item (barriers between warps)                  warp items (no barrier)
//     block 0  features 0..31                                       warp 0: router 0..3    warp 1: router 8, 9
//     block 1  features 32..63                                      warp 0: router 4..7
//
//     one block item            lanes 0..7   8..15   16..23  24..31
//     warp 0   gate, feature         0         1       2       3        lane l reads groups l % 8, l % 8 + 8, ...
//     warp 7   gate, feature        28        29      30      31
//     warp 8   up,   feature         0         1       2       3
//     warp 15  up,   feature        28        29      30      31
//     barrier, then warp r stores row r: lane f has act(gate) * up of feature f
//
// In an item of DOWN, warp w sums features 4 (w % 2) .. + 3 of experts w / 2, w / 2 + 8, ... of the row.
template <int R>
__global__ void __launch_bounds__(ROW_THREADS, 1) product_kernel(const __grid_constant__ Jobs parameters) {
    const Jobs &jobs = *(const Jobs *)shared_bytes;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first_row = blockIdx.y * R;
    const uint2 *words = (const uint2 *)address_of_parameter(&parameters);     // of all jobs, loaded in parallel
    for (int i = threadIdx.x; i < (int)(sizeof(Jobs) / sizeof(uint2)); i += ROW_THREADS)
        ((uint2 *)shared_bytes)[i] = words[i];
    __syncthreads();
    const int n = min(R, jobs.n_rows - first_row), n_blocks = gridDim.x - jobs.longer_blocks;
    const int first_warp_item = (int)blockIdx.x < jobs.longer_blocks
        ? jobs.n_warp_items : blockIdx.x - jobs.longer_blocks + n_blocks * warp;
    const bool makes = jobs.made.n;
    float4 norm_weights[NORM_WEIGHTS][ROW_QUADS];
    const bool early = !makes || (R == 1 && jobs.prefetch_early);
    auto prefetch_first = [&] {                        // which experts are read is not known yet
        if ((int)blockIdx.x < jobs.n_block_items && !jobs.n_used) prefetch_item(jobs, true, blockIdx.x);
        else if (first_warp_item < jobs.n_warp_items) prefetch_item(jobs, false, first_warp_item);
    };
    if (makes) load_norm_weights(jobs.made, norm_weights);
    if (early) prefetch_first();
    wait_for_previous_kernel();
    int *ids = (int *)(shared_bytes + jobs.pairs_at);
    const int row = PRODUCT_WARPS - 1 - warp;          // the last warps do this: they have the least to copy
    if (jobs.n_used && row < n) {
        const size_t at = (size_t)(first_row + row) * jobs.n_used;
        int *own = ids + row * jobs.n_used;
        if (jobs.choice.n) {
            const Chosen c = choose_experts(jobs.choice, first_row + row);
            if (lane < jobs.n_used) own[lane] = c.id;
            if (blockIdx.x == gridDim.x - 1) store_choice(jobs.choice, first_row + row, c);
            __syncwarp();
            prefetch_experts(jobs, row, own);
        } else {
            for (int j = lane; j < jobs.n_used; j += 32) {
                own[j] = __ldcg(jobs.ids + at + j);
                if (jobs.pair_weights) ((float *)own)[R * jobs.n_used + j] = jobs.pair_weights[at + j];
            }
        }
    }
    copy_inputs(first_row, n);
    if (makes) {                       // the last block has the least work, so it also stores x'
        int phase = 0;
#pragma unroll 1
        for (int r = 0; R == 1 ? r < 1 : r < n; r++)
            prepare_row<ROW_QUADS>(jobs.made, first_row + r, [&](int k, int j) { return norm_weights[k][j]; }, NULL,
                                   blockIdx.x == gridDim.x - 1, &phase, [&] { if (r == 0 && !early) prefetch_first(); },
                                   [&](int k) {
                                       return [r, o = jobs.input[k]](int i, float4 y) { put_values(o, r, i, y); }; });
    }
    __syncthreads();

    // One loop for both kinds of items, so that the code that multiplies exists once.
    __shared__ WorkItem own_item[PRODUCT_WARPS];       // the item that each warp will finish
    float *all_results = (float *)(shared_bytes + jobs.results_at);
    int t = blockIdx.x, warp_item = first_warp_item, waiting = 0;
    while (t < jobs.n_block_items || warp_item < jobs.n_warp_items) {
        const bool of_block = t < jobs.n_block_items;
        const WorkItem item = item_at(jobs, of_block, of_block ? t : warp_item);
        const Job &o = jobs.job[item.job];
        float *results = all_results;
        bool more = false;
        if (!of_block) warp_item += n_blocks * PRODUCT_WARPS;
        else {
            if (lane == 0 && warp / R == waiting) own_item[warp] = item;
            results += waiting++ * PRODUCT_WARPS * jobs.n_results;
            more = t + (int)gridDim.x < jobs.n_block_items;
            if (!jobs.n_used && (more ? jobs.prefetch_all : first_warp_item < jobs.n_warp_items))
                prefetch_item(jobs, more, more ? t + gridDim.x : first_warp_item);
            t += gridDim.x;
        }
        const bool down = o.kind == JOB_DOWN, up = of_block && !down && warp >= MATRIX_WARPS;
        if (!down) results += warp * jobs.n_results;
        const DType type = up ? o.up_type : o.type;
        const Input &in = jobs.input[o.source];
        const bool floats = is_float(type);
        const int y_row = floats ? in.f_row : in.q_row;
        int n_sums = down ? 2 * o.n_used : 1;
        if (past_rows(o, item, n) || (up && o.kind != JOB_GATED)) n_sums = 0;
#pragma unroll 1
        for (int i = down ? warp : 0; i < n_sums; i += PRODUCT_WARPS) {
            const int pair = down ? item.pair * o.n_used + i / 2 : item.pair;
            const int quad = of_block ? (down ? i : warp) % (down ? 2 : MATRIX_WARPS) : 0;
            const int first = item.first + WARP_FEATURES * quad;
            if (first >= o.rows) break;
            const int e = o.ids ? ids[pair] : 0;
            int y_first = R > 1 && o.ids ? pair / o.n_used : 0;
            if (down) y_first = pair;
            const unsigned row = (unsigned)(e * o.rows_e) + (up ? (unsigned)o.up_first : 0) +
                                 min(first + (floats ? 0 : lane / 8), o.rows - 1);
            multiply<R>(type, up ? &o.up : &o.w, row, min(min(o.item_features, WARP_FEATURES), o.rows - first), o.cols,
                        o.quads,
                        (floats ? in.f_at : in.q_at) + y_first * y_row, y_row, o.ids ? 1 : n,
                        results + (down ? i / 2 * DOWN_FEATURES + i % 2 * WARP_FEATURES : 0));
        }
        __syncwarp();                  // own_item and the sums are written
        if (of_block) {
            if (waiting < waiting_items(R) && more) continue;
            if (warp < waiting * R)
                finish_block_item<R>(own_item[warp], first_row, warp % R, n,
                               all_results + warp / R * PRODUCT_WARPS * jobs.n_results);
            else sync_first<ROW_THREADS>();            // the sums of all kept items are complete
            if (more || jobs.n_warp_items) sync_first<ROW_THREADS>();           // and have been read
            waiting = 0;
            continue;
        }
        finish_warp_item(o, item, first_row, n, results);
        __syncwarp();                  // the sums have been read
    }
}

// ---- one row ----
// Most launches of a token multiply one row with few features and end within microseconds. Here a warp has one split of
// one work item, known before the previous kernel ends. If the input is there already (Act), the warp loads its first
// weights into registers before it waits: after the wait it can multiply at once. If there are fewer items than warps,
// a split is some of the octets of an item. Its terms go to shared memory and are added in the order of the octets, so
// the bits are those of product_kernel. A launch that does not need all SMs leaves the others to the blocks of the next
// launch.

enum { GEMV_JOBS = 3 };

typedef struct {
    DType  type;
    Planes w;
    int    n_warp_items;      // of 4 features
    unsigned row_bytes[4], octet_bytes[4];     // bytes of a row and of an octet in each plane
    Result to;                // JOB_STORE or JOB_INJECT
} GemvJob;

typedef struct {
    GemvJob job[GEMV_JOBS];
    int    n, n_groups, n_octets;              // jobs; groups and octets of a row
    int    block_items;       // warp items of a block; JOB_INJECT: 8, a group of the result
    int    n_splits, split_octets;             // splits of an item; octets of a split
    Input  input;
    RowInputs made;           // MADE
    int    terms_at, sums_at; // offsets in shared memory
} Gemv;

// The work of a warp: octets first .. first + n - 1 of an item, number `nth` of the block; n = 0: nothing.
typedef struct { int job, item, nth, first, n; } GemvSplit;

// Split number `split` of the block's item number `nth`.
__device__ static inline GemvSplit gemv_split(const Gemv &o, int nth, int split) {
    GemvSplit s = { 0, (int)blockIdx.x * o.block_items + nth, nth, split * o.split_octets, 0 };
    while (s.job < o.n && s.item >= o.job[s.job].n_warp_items) s.item -= o.job[s.job++].n_warp_items;
    if (nth >= o.block_items || s.job == o.n) return { };
    s.n = min(o.split_octets, o.n_octets - s.first);
    return s;
}

// Prefetches the weights of a split from its octet `from` on.
__device__ static inline void prefetch_split(const Gemv &o, const GemvSplit &s, int from) {
    const GemvJob &job = o.job[s.job];
    const int plane = threadIdx.x / 4 % 4, feature = WARP_FEATURES * s.item + threadIdx.x % 4;
    const int begin = s.first + from, end = s.first + min(s.n, PREFETCH_OCTETS);
    const unsigned octet = job.octet_bytes[plane], row_bytes = job.row_bytes[plane];
    if (threadIdx.x % 32 >= 16 || begin >= end || feature >= job.to.rows || !octet) return;
    const size_t at = (size_t)(&job.w.lo)[plane] + (size_t)feature * row_bytes + begin * octet;
    const unsigned bytes = min((end - begin) * octet, row_bytes - begin * octet);
    prefetch_l2((const void *)(at & ~(size_t)15), ((unsigned)at % 16 + bytes + 15) & ~15u);
}

// Copies the row of a launch whose input is in global memory, like copy_input.
__device__ static inline void copy_row(const Gemv &o) {
    const int n = 2 * o.n_groups;
    for (int i = threadIdx.x; i / 32 * 32 < n; i += ROW_THREADS) {
        const int own = min(i, n - 1);
        const uint4 v = __ldcg((const uint4 *)o.input.from.q + own);
        put_chunk(shared_bytes + o.input.q_at, own, v, __ldcg(o.input.from.s + own / 2), i < n);
    }
}

// Adds up each feature of an item from its 8 lanes and stores it.
__device__ static inline void finish_gemv(const Gemv &o, const GemvSplit &s, float sum) {
    const Result &to = o.job[s.job].to;
    const int lane = threadIdx.x % 32, feature = WARP_FEATURES * s.item + lane / 8;
    sum = feature_sum(sum);
    if (lane % 8 || feature >= to.rows) return;
    if (to.kind == JOB_STORE) store_product(to, 0, feature, sum);
    else ((float *)(shared_bytes + o.sums_at))[WARP_FEATURES * s.nth + lane / 8] = to.factor ? *to.factor * sum : sum;
}

// Computes a split: its sums, or its terms if the item has several splits. Unless MADE, the input is copied here.
template <DType T, bool MADE> __device__ static inline void multiply_split(const Gemv &o, const GemvSplit &s) {
    const GemvJob &job = o.job[s.job];
    const int lane = threadIdx.x % 32;
    const bool whole = o.n_splits == 1;
    const int feature = WARP_FEATURES * s.item + lane / 8;
    RowWalk<T> walk = begin_walk<T>(job.w, min(feature, job.to.rows - 1), o.n_groups, s.first, s.n);
    if (!MADE) {
        prefetch_split(o, s, Type<T>::depth);
        wait_for_previous_kernel();
        copy_row(o);
    }
    __syncthreads();                                   // the input is complete
    const char *row = shared_bytes + o.input.q_at + lane % 8 * 16 + s.first * OCTET_BYTES;
    float *terms = (float *)(shared_bytes + o.terms_at) + (s.nth * o.n_octets + s.first) * 32 + lane, sum = 0;
    each_group(walk, row, [&](const Group &x, const char *y, int octet) {
        float scale;
        const float term = input_term<T>(x, y, &scale);
        if (whole) sum = __fmaf_rn(scale, term, sum);
        else terms[octet * 32] = term;
    });
    if (whole && s.n) finish_gemv(o, s, sum);
}
template <bool MADE> __device__ __noinline__ static void multiply_other_split(const Gemv &o, GemvSplit s) {
    switch (o.job[s.job].type) {
#define CASE(T, ...) case T: multiply_split<T, MADE>(o, s); break;
    OTHER_TYPES(CASE)
#undef CASE
    default: break;
    }
}

// Adds up an item whose terms lie in shared memory, by a warp.
__device__ static inline void join_splits(const Gemv &o, const GemvSplit &s) {
    const int lane = threadIdx.x % 32, l = lane % 8;
    const char *scales = shared_bytes + o.input.q_at + l * 16 + 256;
    const float *terms = (const float *)(shared_bytes + o.terms_at) + s.nth * o.n_octets * 32 + lane;
    float sum = 0;
#pragma unroll 8
    for (int octet = 0; octet < o.n_octets; octet++)
        if (l + 8 * octet < o.n_groups)
            sum = __fmaf_rn(*(const float *)(scales + octet * OCTET_BYTES), terms[octet * 32], sum);
    finish_gemv(o, s, sum);
}

// gemv: out = w y for one row and quantised matrices with few features that share their input; or out = gelu(w y) * u,
// as Act.
//   shapes    w (rows, cols), y (cols), out (rows)
//   launch    grid ceil(items / items of a block), block 512, dynamic shared memory: parameters, the row, terms, sums
//   traffic   weights once; every block reads the row and, where it makes it, the norm weights from L2
//   numerics  as product_kernel
//   see       ref_matmul, ref_ple_inject
template <bool MADE>
__global__ void __launch_bounds__(ROW_THREADS, 1) gemv_kernel(const __grid_constant__ Gemv parameters) {
    const Gemv &o = *(const Gemv *)shared_bytes;
    const int warp = threadIdx.x / 32;
    const uint2 *words = (const uint2 *)address_of_parameter(&parameters);
    for (int i = threadIdx.x; i < (int)(sizeof(Gemv) / sizeof(uint2)); i += ROW_THREADS)
        ((uint2 *)shared_bytes)[i] = words[i];
    __syncthreads();
    const GemvSplit s = gemv_split(o, warp / o.n_splits, warp % o.n_splits);
    const Result &first = o.job[0].to;
    const bool injects = first.kind == JOB_INJECT;
    float u = 0;
    if (MADE) {
        float4 norm_weights[NORM_WEIGHTS][NARROW_QUADS];
        int phase = 0;
        load_norm_weights(o.made, norm_weights);
        prefetch_split(o, s, 0);
        wait_for_previous_kernel();
        if (injects && threadIdx.x < BLOCK_FEATURES) u = __ldcg(first.u + BLOCK_FEATURES * blockIdx.x + threadIdx.x);
        prepare_row<NARROW_QUADS>(o.made, 0, [&](int k, int j) { return norm_weights[k][j]; }, NULL,
                                  blockIdx.x == gridDim.x - 1, &phase, [] { },
                                  [&](int) { return [in = o.input](int i, float4 y) { put_values(in, 0, i, y); }; });
    }
    const DType type = o.job[s.job].type;
#define CASE(T, ...) if (opaque(type) == T) multiply_split<T, MADE>(o, s); else
    USUAL_TYPES(CASE)
#undef CASE
    multiply_other_split<MADE>(o, s);
    if (o.n_splits > 1) {
        __syncthreads();                               // all terms are there
        const GemvSplit whole = gemv_split(o, warp, 0);
        if (whole.n) join_splits(o, whole);
    }
    if (!injects) return;
    __syncthreads();
    if (threadIdx.x >= BLOCK_FEATURES) return;
    store_activated(first, 0, BLOCK_FEATURES * blockIdx.x, ((const float *)(shared_bytes + o.sums_at))[threadIdx.x], u);
}

typedef struct {              // one row times a float matrix, whose rows lie at multiples of 16 bytes
    const uint8_t *w;
    int    cols;
    Result to;                // JOB_STORE
    Input  input;
    RowInputs made;           // n = 0: the input is in global memory
} GemvFloats;

// gemv_floats: the same for a float matrix.
//   launch    grid: one block per SM or fewer, block 512, dynamic shared memory: the row. A warp computes one feature
//             at a time and loads the next row of weights while this one ends
//   numerics  as product_kernel
template <DType T>
__global__ void __launch_bounds__(ROW_THREADS, 1) gemv_floats_kernel(const __grid_constant__ GemvFloats o) {
    constexpr int chunk = Type<T>::chunk, depth = 8;
    prefetch_parameter(&o, sizeof o);
    const int lane = threadIdx.x % 32, n_chunks = o.cols / chunk, n_rounds = div_up(n_chunks, 32);
    const int stride = PRODUCT_WARPS * gridDim.x;
    int row = blockIdx.x + gridDim.x * (threadIdx.x / 32), round = 0, ahead = 0;
    const int n = row < o.to.rows ? div_up(o.to.rows - row, stride) * n_rounds : 0;
    const uint4 *from = (const uint4 *)o.w + (size_t)row * n_chunks + lane;
    uint4 held[depth];
    auto fetch = [&](int i) {                          // after the end the last chunk again; it is not used
        held[i] = load_once(from + min(32 * ahead, n_chunks - 1 - lane));
        if (++ahead == n_rounds) ahead = 0, from += (size_t)stride * n_chunks;
    };
#pragma unroll
    for (int i = 0; i < depth; i++)
        if (i < n) fetch(i);
    if (o.made.n) {
        float4 norm_weights[NORM_WEIGHTS][NARROW_QUADS];
        int phase = 0;
        load_norm_weights(o.made, norm_weights);
        wait_for_previous_kernel();
        prepare_row<NARROW_QUADS>(o.made, 0, [&](int k, int j) { return norm_weights[k][j]; }, NULL,
                                  blockIdx.x == gridDim.x - 1, &phase, [] { },
                                  [&](int) { return [&o](int i, float4 y) { put_values(o.input, 0, i, y); }; });
    } else {
        wait_for_previous_kernel();
        copy_input(o.input, 0, 1);
    }
    __syncthreads();
    const float *y = (const float *)(shared_bytes + o.input.f_at) + lane * chunk;
    FloatSum sum = { };
#pragma unroll 1
    for (int first = 0; first < n; first += depth) {
#pragma unroll
        for (int i = 0; i < depth; i++) {
            if (first + i >= n) break;
            if (lane + 32 * round < n_chunks) add_chunk<T>(&sum, held[i], (const float4 *)(y + 32 * chunk * round));
            if (first + i + depth < n) fetch(i);
            if (++round < n_rounds) continue;
            const float v = total(sum);
            if (lane == 0) store_product(o.to, 0, row, v);
            row += stride, round = 0;
            sum = { };
        }
    }
}

// ---- 3 to 64 rows: tensor cores -------------------------------------------------------------------------------------
// From MANY_ROWS rows on, a block computes 64 or 32 features of a matrix for all rows of the step, so a weight is read
// once for all of them. Its 8 consumer warps are the 8 slices of a sum: warp w multiplies the groups g with g mod 8 =
// w, ascending; at the end the slices are added in the order given above. So the bits are those of few rows.
//
// Two producer warps copy weights and rows to a pipeline buffer in shared memory. A stage holds one octet of 64
// features and the same octet of the rows. If 64 features would not reach all SMs, it holds two octets of 32 features
// (`deep`); if a stage would be too large, it may hold one octet of 32 features (`half`).
//
//     stage      record of feature 0, of feature 1, ... of feature 63; then the rows: int8 values, scales
//     consumer   warp w reads group w of every record and of every row
//     producer   warp 8 copies steps 0, 2, 4, ... and warp 9 steps 1, 3, 5, ... of all work items of the block
//     full[s]    barrier: the copies to stage s are complete       consumers wait, the producer's 32 lanes arrive
//     empty[s]   barrier: all 8 consumers have used stage s        the producer waits, consumers arrive
//
// Sums have their own shared memory, or (IN_STAGE) use the stage of the last step of a work item. Then that stage is
// empty only after the sums have been read; meanwhile the producers fill the other stages with the next work item.
//
// No barrier stops the whole block, addresses are computed once per stage, and the copies of the next work item run
// while this one ends. A block computes its work items one after the other. Weights that do not depend on chosen
// experts are copied before wait_for_previous_kernel().
//
// Experts: each block lists the chosen experts, each with the rows that chose it. A work item is one expert with up to
// 8 NT of its rows; NT fits the rows that an expert has on average. Another matrix in the same launch takes as many
// rows at a time. JOB_DOWN: a block computes 64 features (half: 32) of every n-th listed expert, n = expert_splits, and
// writes the product of every pair to global memory. The last block with these features adds up the pairs of each row,
// j ascending.

enum { CONSUMER_WARPS = 8, CONSUMER_THREADS = 32 * CONSUMER_WARPS, PRODUCER_WARPS = 2,
       TILE_BLOCK = CONSUMER_THREADS + 32 * PRODUCER_WARPS,
       TILE_STAGES = 4, TILE_EXPERTS = CONSUMER_THREADS, INPUT_PITCH = 8 * 32 + 16,
       ROW_AREA = 8 * (INPUT_PITCH + 8 * (int)sizeof(float)),
       SUMS_PITCH = 68, SUMS_BYTES = CONSUMER_WARPS * 8 * SUMS_PITCH * 4,
       TILE_STATIC = 512,     // static shared memory of tile_kernel, at most
       FEW_ITEMS = 8 };       // work items of a block

// How an octet of one feature lies in a stage: one plane after the other (lo at 0), copied from the multiple of 16
// bytes at or before its first byte. The size is an odd number of 16 bytes, so that 8 features use different banks.
typedef struct { int hi, head, sup, size; } Record;

__host__ __device__ static constexpr Record record_of(DType t) {
    const Format f = format_of(t);
    const bool blocks = f.values == 256;
    const int hi = (int)plane_bytes(f, 1, 256), head = (int)plane_bytes(f, 2, 256);
    Record r = { };
    if (is_float(t)) return r;
    r.hi = (int)plane_bytes(f, 0, 256);
    r.head = r.hi + round_16(hi + (hi && !blocks ? 15 : 0));
    r.sup = r.head + round_16(head % 16 || !blocks ? head + 15 : head);
    r.size = r.sup + round_16(f.sup);
    if (r.size / 16 % 2 == 0) r.size += 16;
    return r;
}

typedef struct {              // the parameters of a launch
    Jobs   jobs;
    int    record[MAX_JOBS];  // bytes of a record; 0: a float matrix
    int    features[MAX_JOBS];                 // of the result, in a work item
    bool   deep[MAX_JOBS];    // the second half of a stage is the next octet; else 32 more features (JOB_GATED: of up)
    bool   half[MAX_JOBS];    // half stages: `deep`, without the second half
    int    items[MAX_JOBS];   // work items of a matrix, for one chunk of rows
    int    rows_at_once, row_chunks;           // a matrix next to experts: rows of an item, chunks; else 0, 1
    bool   floats;            // there are float matrices
    int    expert_job, n_pairs;                // -1: none
    int    expert_splits;     // JOB_DOWN: blocks that share the experts of the same features; else 0
    float *results;           // JOB_DOWN: (n_pairs, rows)
    int   *arrived;           // JOB_DOWN: (items) 0 between launches
    int    stages, stage_bytes;                // of the pipeline buffer, which is at 0
    int    sums_at, lists_at, barriers_at;     // offsets in shared memory
} Tiling;

// The pairs (row, expert) of a launch, sorted by expert, as lists in shared memory. An entry is an expert with as many
// of its pairs as a work item has rows; an expert may have several entries. Example: 4 rows with 2 experts each, 2
// pairs at once:
//
//     ids           row 0: 5 2   row 1: 2 7   row 2: 2 5   row 3: 7 2          pair p = 2 * row + j
//     LIST_PAIR     1  2  4  7 | 0  5 | 3  6                                   expert 2, 5, 7
//     LIST_EXPERT   2     2      5      7                                      4 entries: LIST_SIZE
//     LIST_FIRST    0     2      4      6      8
typedef enum {
    LIST_PAIR,                // row * n_used + j
    LIST_ROW,                 // the row of the input
    LIST_EXPERT, LIST_FIRST,  // of an entry: its expert, its first pair; the next entry's first pair ends it
    LIST_SIZE                 // (1) number of entries
} List;
__device__ static inline uint16_t *list_of(const Tiling &t, List list) {
    return (uint16_t *)(shared_bytes + t.lists_at) + list * (t.n_pairs + 1);
}

typedef struct {              // a work item of a block
    int job, first;           // first feature
    int expert;               // 0 if there are no experts
    int from, n;              // rows, or positions in LIST_PAIR
    bool last;                // JOB_DOWN: the last expert of this split
} TileItem;

typedef struct { int next, split, stride; } ItemCursor;        // a block's next work item, one of every `stride`

// Blocks that share the experts of the same features; each of them has an expert.
__device__ static inline int expert_splits_of(const Tiling &t) {
    return min(t.expert_splits, (int)*list_of(t, LIST_SIZE));
}

__device__ static inline int items_of_job(const Tiling &t, int k) {
    if (k != t.expert_job) return t.items[k] * t.row_chunks;
    return t.items[k] * (t.expert_splits ? expert_splits_of(t) : *list_of(t, LIST_SIZE));
}

__device__ static inline bool next_item(const Tiling &t, ItemCursor *w, TileItem *p) {
    int i = w->next, k = 0;
    for (;; k++) {
        if (k == t.jobs.n) return false;
        const int n = items_of_job(t, k);
        if (i < n) break;
        i -= n;
    }
    const Job &o = t.jobs.job[k];
    const bool experts = k == t.expert_job;
    int entry = experts || t.rows_at_once ? (unsigned)i / (unsigned)t.items[k] : 0;
    *p = (TileItem){ k, (i - entry * t.items[k]) * t.features[k], 0, 0, o.n_rows, true };
    if (t.rows_at_once) p->from = entry * t.rows_at_once, p->n = min(t.rows_at_once, o.n_rows - p->from);
    if (experts) {
        if (t.expert_splits) {                         // a split has every n-th entry
            const int expert_splits = expert_splits_of(t);
            entry += w->split * expert_splits;
            p->last = entry + expert_splits >= *list_of(t, LIST_SIZE);
        }
        const uint16_t *first = list_of(t, LIST_FIRST) + entry;
        p->expert = list_of(t, LIST_EXPERT)[entry];
        p->from = first[0];
        p->n = first[1] - first[0];
    }
    if (p->last) w->next += w->stride, w->split = 0;
    else w->split++;
    return true;
}

// Shared memory that list_pairs needs besides the lists: for each set of 32 pairs, how many pairs of an expert it has,
// then how many precede it; where an expert's pairs begin; of each pair its expert, and its number in the set.
__host__ __device__ static constexpr int sets_of_pairs(int n_pairs) { return (n_pairs + 31) / 32; }
__host__ __device__ static constexpr int list_bytes(int n_pairs) {
    return (int)sizeof(uint16_t) * (TILE_EXPERTS * (sets_of_pairs(n_pairs) + 1) + 32 * sets_of_pairs(n_pairs));
}

// Makes the lists; every block makes the same. A warp finds which of 32 pairs have the same expert; thread e adds up
// expert e. counts: list_bytes() bytes, of which the counts are 0.
__device__ static inline void list_pairs(const Tiling &t, int at_once, uint16_t *counts) {
    __shared__ unsigned sums[TILE_BLOCK / 32];
    const Job &o = t.jobs.job[t.expert_job];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, n_pairs = t.n_pairs, n_sets = sets_of_pairs(n_pairs);
    uint16_t *const begin_of = counts + TILE_EXPERTS * n_sets, *const pairs = begin_of + TILE_EXPERTS;
#pragma unroll 1
    for (int set = warp; set < n_sets; set += TILE_BLOCK / 32) {
        const int i = 32 * set + lane;
        const unsigned expert = i < n_pairs ? __ldcg(o.ids + i) : 0;
        unsigned same = __ballot_sync(~0u, i < n_pairs);
#pragma unroll
        for (int bit = 1; bit < TILE_EXPERTS; bit *= 2) {
            const unsigned set = __ballot_sync(~0u, expert & bit);
            same &= expert & bit ? set : ~set;
        }
        const int before = __popc(same & ((1u << lane) - 1));
        if (i >= n_pairs) continue;
        pairs[i] = (uint16_t)(before * TILE_EXPERTS + expert);
        if (!before) counts[set * TILE_EXPERTS + expert] = (uint16_t)__popc(same);
    }
    __syncthreads();
    int n = 0;
#pragma unroll 1
    for (int set = 0; threadIdx.x < TILE_EXPERTS && set < n_sets; set++) {
        uint16_t *count = counts + set * TILE_EXPERTS + threadIdx.x;
        const int own = *count;
        *count = (uint16_t)n;
        n += own;
    }
    const unsigned mine = (unsigned)div_up(n, at_once) << 16 | n;          // entries, pairs
    unsigned end = mine;
    for (int by = 1; by < 32; by *= 2) {
        const unsigned before = __shfl_up_sync(~0u, end, by);
        if (lane >= by) end += before;
    }
    if (lane == 31) sums[warp] = end;
    __syncthreads();
    for (int w = 0; w < warp; w++) end += sums[w];
    int entry = (end - mine) >> 16;
    const int first = (end - mine) & 0xffff;
    if (threadIdx.x < TILE_EXPERTS) begin_of[threadIdx.x] = (uint16_t)first;
    for (int k = 0; k < n; k += at_once)
        list_of(t, LIST_EXPERT)[entry] = threadIdx.x, list_of(t, LIST_FIRST)[entry++] = first + k;
    if (threadIdx.x == blockDim.x - 1) {
        *list_of(t, LIST_SIZE) = end >> 16;
        list_of(t, LIST_FIRST)[end >> 16] = end & 0xffff;
    }
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < n_pairs; i += TILE_BLOCK) {
        const int expert = pairs[i] % TILE_EXPERTS;
        const int at = begin_of[expert] + counts[i / 32 * TILE_EXPERTS + expert] + pairs[i] / TILE_EXPERTS;
        list_of(t, LIST_PAIR)[at] = i;
        list_of(t, LIST_ROW)[at] = o.kind == JOB_DOWN ? i : i / o.n_used;
    }
    __syncthreads();                                   // all threads read the lists, and counts may be overwritten
}

// The row of the planes with the first of 32 features of a work item, half 0 or 1.
__device__ static inline unsigned item_row(const Job &o, const TileItem &p, int half) {
    const unsigned first = (unsigned)(p.expert * o.rows_e) + p.first;
    if (!half) return first;
    return first + (o.kind == JOB_GATED ? (unsigned)o.up_first : 32);
}

// ---- copies: producer warps ----

// Lanes of a consumer warp that arrive at `empty`, after a __syncwarp. If all 32 did, steps of 4 and 8 rows would take
// 5 % longer. compute-sanitizer's racecheck only knows lanes that arrive themselves, so `make sanitize` sets 32.
#ifndef ARRIVING_LANES
#define ARRIVING_LANES 1
#endif

// For each stage: its copies are complete; all consumers have used it.
typedef struct { uint64_t full[TILE_STAGES], empty[TILE_STAGES]; } StageBarriers;
__device__ static inline StageBarriers *barriers_of(const Tiling &t) {
    return (StageBarriers *)(shared_bytes + t.barriers_at);
}

typedef struct {              // the position of a producer warp
    ItemCursor cursor;
    int  step;                // its next step in the next work item
    int  stage;               // the stage for it
    bool reused;              // this stage held another step before
    unsigned parity;          // of the round of the buffer in which it did
} Producer;

// How a plane is copied to a stage: `octet` bytes of each feature, 16 bytes by each of `lanes` lanes, `at_once`
// features at once. Rows may begin anywhere, but whole 16 bytes are copied, so some bytes before the octet are copied
// as well.
typedef struct { int octet, at, lanes, at_once; bool aligned; } CopyShape;
__host__ __device__ static constexpr CopyShape copy_shape(DType type, int plane) {
    const Record r = record_of(type);
    const bool blocks = format_of(type).values == 256;
    const int at[4] = { 0, r.hi, r.head, r.sup };
    CopyShape p = { };
    p.octet = (int)plane_bytes(format_of(type), plane, 256);
    p.at = at[plane];
    p.aligned = plane == 0 || (blocks && p.octet % 16 == 0);
    const int before = 16 - (blocks ? p.octet & -p.octet : 1), most = p.aligned ? p.octet : p.octet + before;
    for (p.lanes = 1; 16 * p.lanes < most; ) p.lanes *= 2;
    p.at_once = 32 / p.lanes;
    return p;
}

// What a lane copies of a plane: features f, f + at_once, ... of both halves of a stage.
template <DType T, int PLANE> struct PlaneCopy {
    const uint8_t *from[2];   // of the first of them, in the warp's next step
    unsigned apart;           // bytes from one to the next
    int      left;            // bytes from that step to the end of a row
};
template <DType T, int PLANE>
__device__ static inline void begin_copy(PlaneCopy<T, PLANE> *c, const Job &o, const TileItem &p, bool deep, bool half,
                                         int step) {
    constexpr CopyShape shape = copy_shape(T, PLANE);
    const int lane = threadIdx.x % 32, bytes = o.row_bytes[0][PLANE];
    const int done = (deep && !half ? 2 : 1) * step * shape.octet;
    c->apart = shape.at_once * bytes;
    c->left = bytes - done;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const Planes &w = h && o.kind == JOB_GATED ? o.up : o.w;
        c->from[h] = (&w.lo)[PLANE] + (size_t)(item_row(o, p, h && !deep) + lane / shape.lanes) * bytes + done +
                     (h && deep ? shape.octet : 0) + lane % shape.lanes * 16;
    }
}
// Starts the copies of a step and advances to the warp's next one. there: features that exist in each half.
template <DType T, int PLANE>
__device__ static inline void copy_plane(PlaneCopy<T, PLANE> *c, char *to, bool deep, bool half, const int there[2]) {
    constexpr CopyShape shape = copy_shape(T, PLANE);
    if (!shape.octet) return;
    const int lane = threadIdx.x % 32, first = lane / shape.lanes, chunk = lane % shape.lanes * 16;
    const int on = (deep && !half ? 2 : 1) * PRODUCER_WARPS * shape.octet;
    char *at = to + first * record_of(T).size + shape.at + chunk;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (h && half) break;
        const int left = c->left - (h && deep ? shape.octet : 0), need = left > 0 ? min(shape.octet, left) : -16;
#pragma unroll
        for (int i = 0; i < shape.lanes; i++) {
            const uint8_t *p = c->from[h] + i * c->apart;
            const int before = shape.aligned ? 0 : (int)((size_t)p & 15);
            if (first + i * shape.at_once < there[h] && chunk < need + before)
                copy_line_ahead(at + (32 * h + i * shape.at_once) * record_of(T).size, p - before);
        }
        c->from[h] += on;
    }
    c->left -= on;
}

// The steps of a producer warp in a work item: every second one, each when its stage is empty. Rows are int8,
// INPUT_PITCH bytes apart, followed by their scales, (8 groups, 8 NT rows): a lane copies 16 bytes of every second row
// and a scale of every fourth. `deep` steps have the same again for the next octet, except with half stages.
//
// early: the first work item of a block. Weights do not depend on the previous kernel, rows do. With 4 stages, warp 8
// copies:
//
//     step      0         2         | wait for the        0      2      4               6
//     stage     0         2         | previous kernel     0      2      0, when empty   2, when empty
//     copies    weights   weights   |                     rows   rows   weights, rows   weights, rows
//                         (*f = begin: starts again with step 0)
template <DType T, int NT, bool HALVES>
__device__ static inline void produce_item(const Tiling &t, const TileItem &p, Producer *f, bool early) {
    const Job &o = t.jobs.job[p.job];
    const bool deep = t.deep[p.job], half = HALVES && t.half[p.job], listed = p.job == t.expert_job;
    const int lane = threadIdx.x % 32, n_groups = (int)((unsigned)o.cols / 32), each = deep && !half ? 16 : 8;
    const int n = div_up(n_groups, each);
    const int features = o.rows - p.first;
    const int there[2] = { min(32, features), min(32, features - (deep || o.kind == JOB_GATED ? 0 : 32)) };
    StageBarriers *barriers = barriers_of(t);
    PlaneCopy<T, 0> lo;
    PlaneCopy<T, 1> hi;
    PlaneCopy<T, 2> head;
    PlaneCopy<T, 3> sup;
    begin_copy(&lo, o, p, deep, half, f->step);
    begin_copy(&hi, o, p, deep, half, f->step);
    begin_copy(&head, o, p, deep, half, f->step);
    begin_copy(&sup, o, p, deep, half, f->step);
    auto row_of = [&](int r) {
        const int row = listed && r < p.n ? list_of(t, LIST_ROW)[p.from + r] : p.from + r;
        return (r < p.n ? row : 0) * n_groups + each * f->step;
    };
    unsigned row[4 * NT], scale[2 * NT];               // offsets in the input
#pragma unroll
    for (int i = 0; i < 4 * NT; i++) row[i] = row_of(lane / 16 + 2 * i) * 32 + lane % 16 * 16;
#pragma unroll
    for (int i = 0; i < 2 * NT; i++) scale[i] = row_of(lane / 8 + 4 * i) + lane % 8;
    const int8_t *in_q = o.in.q;
    const float *in_s = o.in.s;
    const Producer begin = *f;
    int ahead = early ? min(n, t.stages) : 0, end = early ? ahead : n;
#pragma unroll 1
    for (;;) {
        if (f->step >= end) {
            if (!early) break;
            wait_for_previous_kernel();
            *f = begin, early = false, end = n;
            continue;
        }
        char *to = shared_bytes + f->stage * t.stage_bytes;
        if (f->reused) mbarrier_wait(&barriers->empty[f->stage], f->parity);
        if (early || f->step >= ahead) {               // weights
            copy_plane(&lo, to, deep, half, there);
            copy_plane(&hi, to, deep, half, there);
            copy_plane(&head, to, deep, half, there);
            copy_plane(&sup, to, deep, half, there);
        }
        if (!early) {                                  // rows
            char *q = to + (half ? 32 : 64) * record_of(T).size;
#pragma unroll 1
            for (int first = 0; first < each; first += 8, q += ROW_AREA * NT) {
                const int group = each * f->step + first;
                const bool q_there = group + lane % 16 / 2 < n_groups, s_there = group + lane % 8 < n_groups;
#pragma unroll
                for (int i = 0; i < 4 * NT; i++) {
                    const int r = lane / 16 + 2 * i;
                    if (r < p.n && q_there)
                        copy_ahead(q + r * INPUT_PITCH + lane % 16 * 16, in_q + row[i] + 32 * first);
                }
#pragma unroll
                for (int i = 0; i < 2 * NT; i++) {
                    const int r = lane / 8 + 4 * i;
                    if (r < p.n && s_there)
                        copy_word_ahead(q + 8 * NT * INPUT_PITCH + (lane % 8 * 8 * NT + r) * 4,
                                        in_s + scale[i] + first);
                }
            }
#pragma unroll
            for (int i = 0; i < 4 * NT; i++) row[i] += PRODUCER_WARPS * each * 32;
#pragma unroll
            for (int i = 0; i < 2 * NT; i++) scale[i] += PRODUCER_WARPS * each;
            mbarrier_arrive_on_copies(&barriers->full[f->stage]);
        }
        f->step += PRODUCER_WARPS;
        f->stage += PRODUCER_WARPS;
        if (f->stage >= t.stages) f->stage -= t.stages, f->reused = true, f->parity ^= 1;
    }
    f->step -= n;
}

// A producer warp: its steps of all work items of the block. early: as above. stride: of ItemCursor.
template <int NT, bool HALVES> __device__ static inline void produce(const Tiling &t, bool early, int stride) {
    const int own = threadIdx.x / 32 - CONSUMER_WARPS;
    Producer f = { { (int)blockIdx.x, 0, stride }, own, own, false, 1 };
    TileItem p;
    while (next_item(t, &f.cursor, &p)) {
        if (early && !t.record[p.job]) wait_for_previous_kernel(), early = false;
        switch (t.jobs.job[p.job].type) {
#define CASE(T, ...) case T: produce_item<T, NT, HALVES>(t, p, &f, early); break;
        QUANTISED_TYPES(CASE)
#undef CASE
        default: break;
        }
        early = false;
    }
    wait_for_copies<0>();                              // copies must not arrive after their warp has ended
}

// ---- arithmetic: consumer warps ----

// Integers of this warp's group of 32 features in the layout of multiply_int8. row: the planes' row of the first
// feature.
template <DType T>
__device__ static inline void tile_codes(unsigned (*a)[4], const char *records, unsigned row, int n_groups, int octet,
                                         int slice, int lane) {
    constexpr Record rec = record_of(T);
    constexpr Format form = format_of(T);
    const int t = lane / 4, k = lane % 4;
    if constexpr (form.lo_bits == 8) {
        for (int m = 0; m < 2; m++)
            load_matrices(a[m], records + (16 * m + lane % 16) * rec.size + 32 * slice + lane / 16 * 16);
    } else if constexpr (form.lo_bits == 4) {
        unsigned v[4];
        load_matrices(v, records + lane * rec.size + 16 * slice);
        for (int i = 0; i < 4; i++) {
            a[i / 2][i % 2] = v[i] & 0x0f0f0f0fu;
            a[i / 2][i % 2 + 2] = v[i] >> 4 & 0x0f0f0f0fu;
        }
    } else {
        for (int i = 0; i < 4; i++) {
            const uint2 v = *(const uint2 *)(records + (8 * i + t) * rec.size + 8 * slice);
            a[i / 2][i % 2] = v.x >> 2 * k & 0x03030303u;
            a[i / 2][i % 2 + 2] = v.y >> 2 * k & 0x03030303u;
        }
    }
    if constexpr (form.hi_bits) {
        // 8 features on, the plane is a multiple of 16 bytes on. The bits of hi are rotated to the place above
        // lo; the mask removes what comes from the neighbouring byte.
        const unsigned before = Type<T>::blocks ? 0 : ((row + t) * n_groups + 8 * octet) * 4 * form.hi_bits & 15;
        const char *p = records + t * rec.size + rec.hi + before + 4 * form.hi_bits * slice;
        constexpr unsigned mask = (form.hi_bits == 1 ? 0x01010101u : 0x03030303u) << form.lo_bits;
        for (int i = 0; i < 4; i++, p += 8 * rec.size) {
            unsigned low, high;
            if constexpr (form.hi_bits == 1) {
                const unsigned h = *(const unsigned *)p;
                low = __funnelshift_l(h, h, form.lo_bits - k), high = __funnelshift_l(h, h, form.lo_bits - 4 - k);
            } else {
                const uint2 h = *(const uint2 *)p;
                low = __funnelshift_l(h.x, h.x, form.lo_bits - 2 * k),
                    high = __funnelshift_l(h.y, h.y, form.lo_bits - 2 * k);
            }
            a[i / 2][i % 2] |= low & mask;
            a[i / 2][i % 2 + 2] |= high & mask;
        }
    }
    for (int i = 0; i < 8; i++) a[i / 4][i % 4] = code_integers<T>(a[i / 4][i % 4]);
}

// What scales this warp's group of one feature. row: its row of the planes.
template <DType T>
__device__ static inline void tile_scales(const char *record, unsigned row, int n_groups, int octet, int slice,
                                          float a[2], float m[2]) {
    constexpr Record rec = record_of(T);
    constexpr Format form = format_of(T);
    const unsigned block = row * (n_groups / 8) + octet, group = row * n_groups + 8 * octet;
    const char *p = record + rec.head + ((Type<T>::blocks ? block : group) * form.head & 15);
    const unsigned *word = (const unsigned *)p;
    uint4 head = { };
    unsigned sup = 0;
    if constexpr (form.head_read == 16) head = *(const uint4 *)p;
    else if constexpr (form.head_read == 12) head.x = word[0], head.y = word[1], head.z = word[2];
    else if constexpr (form.head_read == 8) head.x = word[0], head.y = word[1];
    else if constexpr (form.head_read == 4) head.x = word[slice];
    else if constexpr (form.head_read == 2) head.x = ((const uint16_t *)p)[slice];
    else head.x = ((const uint8_t *)p)[slice];
    if constexpr (form.sup == 2) sup = *(const uint16_t *)(record + rec.sup + (block * 2 & 15));
    if constexpr (form.sup == 4) sup = *(const unsigned *)(record + rec.sup + (block * 4 & 15));
    group_scales<T>(head, sup, slice, a, m);
}

// Integer sums start at INT_START, the bits of the float START. Adding an integer n below 2^22 to these bits gives the
// bits of the float START + n, so no conversion is needed.
#define INT_START 0x4b400000
#define START 12582912.0f     // 1.5 * 2^23
__device__ static inline float from_start(int c) { return __fsub_rn(__int_as_float(c), START); }

// Eight rows of a group, in the layout of multiply_int8.
template <DType T> struct InputRows {
    unsigned b[2];
    float2   scale;           // of rows 2k, 2k + 1
    // where the sums of a feature start: INT_START minus the code's offset times the activations, [half]
    int      start[2][4];
    float    sum[2][2];       // sums of the activations, [half][row 2k, 2k + 1]
};
template <DType T> __device__ static inline void input_rows(InputRows<T> *y, const char *q, const float *s) {
    constexpr bool halves = Type<T>::halves, min = Type<T>::min;
    constexpr int offset = Type<T>::offset;
    y->b[0] = *(const unsigned *)q, y->b[1] = *(const unsigned *)(q + 16);
    y->scale = *(const float2 *)s;
    for (int half = 0; half < (halves ? 2 : 1); half++) {
        for (int j = 0; j < 4; j++) y->start[half][j] = INT_START;
        const unsigned each = (offset ? 0x100u - offset : 1u) * 0x01010101u, same[4] = { each, each, each, each };
        if (!offset && !min) continue;
        int c[4] = { INT_START, INT_START, INT_START, INT_START };
        if (halves) multiply_int8_half(c, same, y->b[half]);
        else multiply_int8(c, same, y->b);
        for (int j = 0; j < 4; j++)
            if (offset) y->start[half][j] = c[j];
        for (int j = 0; j < 2; j++)
            if (min) y->sum[half][j] = from_start(c[j]);
    }
}

// acc += one group of 64 features, or (DEEP) two groups of 32 features (half: one), times n rows. row, up: the planes'
// rows of the first feature of both halves of the stage.
//
//     32 features x 8 rows       rows 8 i + 2k, 8 i + 2k + 1                 lane l: t = l / 4, k = l % 4
//     features t,      t + 8     acc[0][i][0], [1];  acc[0][i][2], [3]       multiply_int8: codes a[m] (16 x 32)
//     features t + 16, t + 24    acc[1][i][0], [1];  acc[1][i][2], [3]       times activations y.b (32 x 8)
//
// The other half of the stage gives acc[2], acc[3]; with DEEP it is the next group of the same features. Lane l
// computes the scales of feature l; lane 8 j + t then hands them to the lanes that have feature 8 j + t.
//
// A term is that of scaled_term, without an int-to-float conversion. Example: scale a = 0.5, dot product n = 100:
//     dot = INT_START + 100 = the bits of 12583012.0;   term = fma(a, 12583012.0, -(a * START)) = 50, rounded once
// This is exactly a * n rounded, because a * START is exact: a has 22 bits at most and is less than 2^104 (else
// HAS_WIDE).
template <DType T, int NT, bool DEEP>
__device__ static inline void multiply_group(float (&acc)[4][NT][4], const char *records, const char *rows,
                                             unsigned row, unsigned up, int n_groups, int octet, int n, int slice,
                                             int lane, bool half) {
    constexpr bool halves = Type<T>::halves, min = Type<T>::min, folds = !(Type<T>::form.traits & HAS_WIDE);
    const int t = lane / 4, k = lane % 4;
    const char *q = rows + t * INPUT_PITCH + 32 * slice + 4 * k;
    const float *s = (const float *)(rows + 8 * NT * INPUT_PITCH) + slice * 8 * NT + 2 * k;
    constexpr int held = NT <= 2 ? NT : 1;             // tiles of 8 rows kept in registers
    InputRows<T> y[held];
    auto take_rows = [&] { for (int i = 0; i < held; i++) input_rows(&y[i], q + 8 * i * INPUT_PITCH, s + 8 * i); };
    if (held == NT) take_rows();
#pragma unroll
    for (int h = 0; h < 2; h++, records += 32 * record_of(T).size, row = up) {
        if (DEEP && h) {
            if (half || 8 * ++octet + slice >= n_groups) break;
            q += ROW_AREA * NT, s += ROW_AREA * NT / 4;
            if (held == NT) take_rows();
        }
        unsigned a[2][4];
        float own[2], own_least[2], scale[2][2][2], least[2][2][2];          // [tile of 16][features t, t + 8][half]
        tile_codes<T>(a, records, row, n_groups, octet, slice, lane);
        tile_scales<T>(records + lane * record_of(T).size, row + lane, n_groups, octet, slice, own, own_least);
        for (int i = 0; i < 4; i++)                    // a lane computes the scales of one feature and hands them out
            for (int half = 0; half < (halves ? 2 : 1); half++) {
                scale[i / 2][i % 2][half] = __shfl_sync(~0u, own[half], 8 * i + t);
                if (min) least[i / 2][i % 2][half] = -__shfl_sync(~0u, own_least[half], 8 * i + t);
            }
#pragma unroll
        for (int i = 0; i < NT; i++) {
            if (held < NT && i && 8 * i >= n) break;
            if (held < NT) input_rows(&y[0], q + 8 * i * INPUT_PITCH, s + 8 * i);
            const InputRows<T> &y8 = y[i % held];
            for (int m = 0; m < 2; m++) {
                int dot[2][4];
                for (int j = 0; j < 4; j++) dot[0][j] = y8.start[0][j], dot[1][j] = y8.start[1][j];
                if (halves) multiply_int8_half(dot[0], a[m], y8.b[0]), multiply_int8_half(dot[1], a[m] + 2, y8.b[1]);
                else multiply_int8(dot[0], a[m], y8.b);
                for (int j = 0; j < 4; j++) {
                    const float *x = scale[m][j / 2], *z = least[m][j / 2];
                    float term = folds ? __fmaf_rn(x[0], __int_as_float(dot[0][j]), __fmul_rn(x[0], -START))
                                       : __fmul_rn(x[0], from_start(dot[0][j]));
                    if (halves) term = __fmaf_rn(x[1], from_start(dot[1][j]), term);
                    if (halves && min) term = __fmaf_rn(z[1], y8.sum[1][j % 2], term);
                    if (min) term = __fmaf_rn(z[0], y8.sum[0][j % 2], term);
                    float *sum = &acc[DEEP ? m : 2 * h + m][i][j];
                    *sum = __fmaf_rn(j % 2 ? y8.scale.y : y8.scale.x, term, *sum);
                }
            }
        }
    }
}

// All steps of a work item. stage: the next one; parity: of its round. KEEP: the last stage is not released, it will
// hold sums
template <DType T, int NT, bool DEEP, bool KEEP>
__device__ static inline void multiply_item(const Tiling &t, int *stage, unsigned *parity, float (&acc)[4][NT][4],
                                            const Job &o, const TileItem &p) {
    StageBarriers *barriers = barriers_of(t);
    const int n_groups = (int)((unsigned)o.cols / 32);
    const unsigned row = item_row(o, p, 0), up = DEEP ? row : item_row(o, p, 1);
    const int thread = NT <= 2 ? opaque(threadIdx.x) : threadIdx.x, slice = thread / 32, lane = thread % 32;
    const bool half = KEEP && DEEP && t.half[p.job];
    const int octets = DEEP && !half ? 2 : 1;
#pragma unroll 1
    for (int octet = 0; 8 * octet < n_groups; octet += octets) {
        const char *records = shared_bytes + *stage * t.stage_bytes;
        mbarrier_wait(&barriers->full[*stage], *parity);
        if (8 * octet + slice < n_groups)
            multiply_group<T, NT, DEEP>(acc, records, records + (half ? 32 : 64) * record_of(T).size, row, up, n_groups,
                                        octet, p.n, slice, lane, half);
        __syncwarp();
        const bool kept = KEEP && 8 * (octet + octets) >= n_groups;
        if (!kept && lane < ARRIVING_LANES) mbarrier_arrive(&barriers->empty[*stage]);
        if (++*stage == t.stages) *stage = 0, *parity ^= 1;
    }
}

// One feature times one row, from its eight slices.   sums (CONSUMER_WARPS, 8, SUMS_PITCH)
__device__ static inline float join_slices(const float *sums, int row, int feature) {
    const float *p = sums + row * SUMS_PITCH + feature;
    float v[8];
    for (int w = 0; w < 8; w++) v[w] = p[w * 8 * SUMS_PITCH];
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

// The same with half the memory: slices w and w + 4 are added while they are written, and join_added adds the four
// results.   sums (CONSUMER_WARPS / 2, 8, SUMS_PITCH)
//
//     sums[w][row]     features 0 .. 31 (deep: 0 .. 15)     features 32 .. 63 (deep: 16 .. 31)
//     write            warp w + 4                           warp w
//     barrier
//     add              warp w                               warp w + 4
__device__ static inline void add_slices(float *sums, const float (&acc)[4][4], bool deep, int warp, int lane) {
    const bool upper = warp >= CONSUMER_WARPS / 2;
    const int half = deep ? 16 : 32, tiles = deep ? 1 : 2;
    float *own = sums + (warp % (CONSUMER_WARPS / 2) * 8 + lane % 4 * 2) * SUMS_PITCH + lane / 4;
    float *give = own + (upper ? 0 : half), *keep = own + (upper ? half : 0), rest[2][4];
#pragma unroll
    for (int m = 0; m < 2; m++)
        for (int j = 0; m < tiles && j < 4; j++) {
            const float low = acc[m][j], high = deep ? acc[1][j] : acc[m + 2][j];
            give[j % 2 * SUMS_PITCH + 16 * m + 8 * (j / 2)] = upper ? low : high;
            rest[m][j] = upper ? high : low;
        }
    sync_first<CONSUMER_THREADS>();
#pragma unroll
    for (int m = 0; m < 2; m++)
        for (int j = 0; m < tiles && j < 4; j++) keep[j % 2 * SUMS_PITCH + 16 * m + 8 * (j / 2)] += rest[m][j];
}
__device__ static inline float join_added(const float *sums, int row, int feature) {
    const float *p = sums + row * SUMS_PITCH + feature;
    float v[4];
    for (int w = 0; w < 4; w++) v[w] = p[w * 8 * SUMS_PITCH];
    return (v[0] + v[2]) + (v[1] + v[3]);
}

// A work item of a float matrix: one feature, all rows; a warp computes a row at a time, in the order of sums given
// above. Loads of 16 weights and of their activations are in flight at a time.
template <DType T> __device__ static inline void multiply_floats(const Job &o, const TileItem &p) {
    constexpr int chunk = Type<T>::chunk, depth = 16 / chunk;
    const int lane = threadIdx.x % 32, n_chunks = div_up(o.cols, chunk);
    const int quads = o.cols % 4 == 0 && (size_t)o.in.f % 16 == 0;
    const uint8_t *w = o.w.lo + (size_t)p.first * o.cols * (16 / chunk);
#pragma unroll 1
    for (int r = threadIdx.x / 32; r < p.n; r += CONSUMER_WARPS) {
        const float *row = o.in.f + (size_t)(p.from + r) * o.cols;
        FloatSum sum = { };
#pragma unroll 1
        for (int first = lane; first < n_chunks; first += 32 * depth) {
            uint4 x[depth];
            float4 y[depth][chunk / 4];
#pragma unroll
            for (int j = 0; j < depth; j++) {          // after the end the last chunk again; it is not used
                const int c = min(first + 32 * j, n_chunks - 1);
                x[j] = fetch_chunk<T>(w, c, o.cols, o.quads);
#pragma unroll
                for (int k = 0; k < chunk; k += 4) y[j][k / 4] = load4(row, c * chunk + k, o.cols, quads);
            }
#pragma unroll
            for (int j = 0; j < depth; j++)
                if (first + 32 * j < n_chunks) add_chunk<T>(&sum, x[j], y[j]);
        }
        const float v = total(sum);
        if (lane == 0) store_product(o, p.from + r, p.first, v);
    }
}

// Prefetches a work item of a float matrix into L2.
__device__ static inline void prefetch_floats(const Job &o, const TileItem &p) {
    if (threadIdx.x == 0 && o.quads) prefetch_l2(o.w.lo + (size_t)p.first * o.row_bytes[0][0], o.row_bytes[0][0]);
}

// Is this block the last of n to call this? Then it can read what the others wrote before. Called by all consumer
// warps.
__device__ static inline bool last_of(int *arrived, int n) {
    __shared__ bool last;
    __threadfence();                                   // publish the results, then count
    sync_first<CONSUMER_THREADS>();
    if (threadIdx.x == 0) {
        last = atomicAdd(arrived, 1) == n - 1;
        if (last) *arrived = 0;
    }
    sync_first<CONSUMER_THREADS>();
    __threadfence();                                   // count, then read the results of others
    return last;
}

// The weighted sum over each row's experts, for the features of a work item.
template <bool HALVES>
__device__ static inline void join_experts(const Tiling &t, const Job &o, int first, bool half) {
    const int n = HALVES && half ? 32 : 64;
    for (int i = threadIdx.x; i < o.n_rows * n; i += CONSUMER_THREADS) {
        const int r = i / n, feature = first + i % n;
        if (feature >= o.rows) continue;
        const float *result = t.results + (size_t)r * o.n_used * o.rows + feature;
        float sum = 0;
#pragma unroll 8
        for (int j = 0; j < o.n_used; j++)
            sum = __fmaf_rn(o.weights[r * o.n_used + j], __ldcg(result + (size_t)j * o.rows), sum);
        o.out[(size_t)r * o.rows + feature] = sum;
    }
}

// tile: the jobs of a launch with 3 rows and more.
//   shapes    w (rows, cols) per expert, y (n_rows, cols) int8 with scales, out (n_rows, rows); 8 NT rows at a time
//   launch    grid: the blocks that are resident at once, or fewer if each then has as many work items; block 256 + 64;
//             dynamic shared memory: stages, sums, lists of experts, barriers
//   IN_STAGE  sums use the last stage of a work item, after all warps have used it; matrices may have half stages
//   traffic   a weight once (of experts: those that some row chose), the rows once per work item, from L2; JOB_DOWN: 8
//             more bytes per feature and pair, in L2
//   numerics  integer products per group, exact; f32 sums in the order given above. No bit depends on the number of
//             rows
//   time      a stage of 64 features costs each consumer warp about 170 instructions with 8 rows of Q4_K, 240 of Q6_K;
//             with 16 rows 240 and 340; and a producer warp 175 or 290
//   see       product_kernel; ref_matmul, ref_gate_up, ref_expert_gate_up, ref_expert_down, ref_ple_inject, ref_head
//
// One block, over time (P: producer warps, C: consumer warps):
//
//     P   weights of item 0 | wait for the previous kernel | rows of item 0 | weights and rows of item 1 | ...
//     C                     | wait for the previous kernel | multiply item 0          | finish item 0 | multiply item 1
//
// To finish an item, 8 rows at a time: every warp writes its slice of the sums to shared memory, [slice][row][feature];
// after a barrier warp w adds the 8 slices of row w and stores the row, lane l features l and l + 32. IN_STAGE: slices
// w and w + 4 use the same memory, see add_slices.
template <int NT, bool IN_STAGE> __global__ void __launch_bounds__(TILE_BLOCK, NT <= 2 ? 2 : 1)
tile_kernel(const __grid_constant__ Tiling t) {
    constexpr int room = 8 * NT;
    prefetch_parameter(&t, sizeof t);
    if ((int)threadIdx.x < t.stages) {
        mbarrier_init(&barriers_of(t)->full[threadIdx.x], 32);
        mbarrier_init(&barriers_of(t)->empty[threadIdx.x], CONSUMER_WARPS * ARRIVING_LANES);
    }
    float *sums = (float *)(shared_bytes + (IN_STAGE ? 0 : t.sums_at));        // first used by list_pairs
    const int n_counts = t.n_pairs ? TILE_EXPERTS * sets_of_pairs(t.n_pairs) / 2 : 0;
    for (int i = threadIdx.x; i < n_counts; i += TILE_BLOCK) ((unsigned *)sums)[i] = 0;        // counts of list_pairs
    __syncthreads();
    ItemCursor cursor = { (int)blockIdx.x, 0, (int)gridDim.x };
    TileItem p;
    const bool early = t.expert_job < 0;               // the previous kernel does not decide which weights are read
    if (early) {
        ItemCursor first = cursor;
        if (t.floats && next_item(t, &first, &p) && !t.record[p.job]) prefetch_floats(t.jobs.job[p.job], p);
    } else {
        wait_for_previous_kernel();
        list_pairs(t, room, (uint16_t *)sums);
        int n = 0;            // the same number of items for each block; the other SMs are for the next launch
        for (int k = 0; k < t.jobs.n; k++) n += items_of_job(t, k);
        cursor.stride = div_up(n, div_up(n, gridDim.x));
        if ((int)blockIdx.x >= cursor.stride) return;
    }
    if (threadIdx.x >= CONSUMER_THREADS) {
        produce<NT, IN_STAGE>(t, early, cursor.stride);
        return;
    }
    if (early) wait_for_previous_kernel();
    // With 9 to 16 rows registers are short: the cursor is kept in shared memory during the multiplication.
    constexpr bool in_shared = NT == 2;
    __shared__ ItemCursor cursors[in_shared ? CONSUMER_WARPS : 1];
    __shared__ TileItem items[in_shared ? CONSUMER_WARPS : 1];
    int stage = 0;
    unsigned parity = 0;
    while (next_item(t, &cursor, &p)) {
        const Job &o = t.jobs.job[p.job];
        if (in_shared) __syncwarp();
        if (in_shared && threadIdx.x % 32 == 0) cursors[threadIdx.x / 32] = cursor, items[threadIdx.x / 32] = p;
        const bool floats = !t.record[p.job], gated = o.kind == JOB_GATED, down = o.kind == JOB_DOWN;
        const bool deep = t.deep[p.job];
        float acc[4][NT][4] = { };                     // [tile of 16 features][tile of 8 rows]
        switch (o.type) {
#define CASE(T, ...) case T: multiply_floats<T>(o, p); break;
        FLOAT_TYPES(CASE)
#undef CASE
#define CASE(T, ...) case T: deep ? multiply_item<T, NT, true, IN_STAGE>(t, &stage, &parity, acc, o, p) \
                             : multiply_item<T, NT, false, IN_STAGE>(t, &stage, &parity, acc, o, p); break;
        QUANTISED_TYPES(CASE)
#undef CASE
        default: break;
        }
        const int thread = in_shared ? opaque(threadIdx.x) : threadIdx.x, warp = thread / 32, lane = thread % 32;
        if (in_shared) __syncwarp();
        if (in_shared) cursor = cursors[warp], p = items[warp];
        const bool listed = p.job == t.expert_job;
        // 8 rows at a time: a warp stores one row, a lane features l and l + 32
        const int last = (stage ? stage : t.stages) - 1;
        if (IN_STAGE) sums = (float *)(shared_bytes + last * t.stage_bytes);
        for (int i = 0; !floats && 8 * i < p.n; i++) {
            sync_first<CONSUMER_THREADS>();            // all have read the stage, or the sums of the last 8 rows
            float *own = sums + (warp * 8 + lane % 4 * 2) * SUMS_PITCH + lane / 4;
#pragma unroll
            for (int at = 0; at < NT; at++)
                for (int m = 0; !IN_STAGE && at == i && m < (deep ? 2 : 4); m++)
                    for (int j = 0; j < 4; j++) own[j % 2 * SUMS_PITCH + 16 * m + 8 * (j / 2)] = acc[m][at][j];
            if (IN_STAGE) {
                float own8[4][4];                      // acc of these 8 rows
#pragma unroll
                for (int k = 0; k < 16; k++) {
                    own8[k / 4][k % 4] = acc[k / 4][0][k % 4];
                    if (NT > 1 && i) own8[k / 4][k % 4] = acc[k / 4][NT - 1][k % 4];
                }
                add_slices(sums, own8, deep, warp, lane);
            }
            sync_first<CONSUMER_THREADS>();
            const int n = 8 * i + warp;
            if (n >= p.n) continue;
            const size_t r = listed ? list_of(t, LIST_PAIR)[p.from + n] : p.from + n;
            float v[2] = { };
            for (int h = 0; h <= !deep; h++) {
                const float *factor = h && gated ? o.up_factor : o.factor;
                v[h] = IN_STAGE ? join_added(sums, warp, 32 * h + lane) : join_slices(sums, warp, 32 * h + lane);
                if (factor && o.kind != JOB_STORE) v[h] = factor[p.expert] * v[h];
            }
#pragma unroll 1
            for (int h = 0; h <= (!deep && !gated); h++) {
                const int first = p.first + 32 * h, feature = first + lane;
                const float own = h ? v[1] : v[0];
                if (first >= o.rows) break;
                if (gated || o.kind == JOB_INJECT) {
                    const float u = !gated && feature < o.rows ? o.u[r * o.u_stride + feature] : 0;
                    store_activated(o, r, first, own, gated ? v[1] : u);
                } else if (feature < o.rows) {
                    if (down) t.results[r * o.rows + feature] = own;
                    else store_product(o, r, feature, own);
                }
            }
        }
        if (IN_STAGE && !floats) {
            __syncwarp();                              // the sums have been read
            if (lane < ARRIVING_LANES) mbarrier_arrive(&barriers_of(t)->empty[last]);
        }
        const bool half = IN_STAGE && t.half[p.job];
        if (down && p.last && last_of(t.arrived + p.first / (half ? 32 : 64), expert_splits_of(t)))
            join_experts<IN_STAGE>(t, o, p.first, half);
    }
}

// ---- a launch ----

static Job job_of(const Tensor *w, Prepared in, int n_rows) {
    Job o = { };
    o.type = w->type;
    o.w = planes_of(w);
    o.rows_e = o.rows = w->rows;
    o.cols = w->cols;
    o.n_rows = n_rows;
    o.in = in;
    o.factor = w->scale;
    o.n_experts = w->n;
    return o;
}

typedef struct {              // an input, and the forms that are needed
    const In *in;
    bool f, q;
} Wanted;

// Provides n inputs with the same x' for a launch; a third one is for the next launch. Few rows: each block makes the
// inputs and out stays empty. Else a kernel makes them, or they exist already, and out says where.
static void prepare(Jobs *jobs, const Wanted *wanted, int n, int n_rows, int cols, Prepared out[MAX_READERS]) {
    const In *in[MAX_READERS], *first = wanted[0].in;
    for (int k = 0; k < MAX_READERS; k++) out[k] = (Prepared){ };
    out[0] = (Prepared){ first->act.f, first->act.q, first->act.s, NULL };
    if (out[0].f || out[0].q) return;
    for (int k = 0; k < n; k++) in[k] = wanted[k].in;
    const RowInputs made = row_inputs(in, min_int(n, MAX_INPUTS), cols);
    if (n_rows < MANY_ROWS && cols <= ROW_COLS && made.quads) {
        jobs->made = made;
        jobs->n_inputs = jobs->made.n;
        return;
    }
    if (n_rows > prepared_rows(&cuda.lim))
        cuda_die("prepare: expected up to %d rows, got %d", prepared_rows(&cuda.lim), n_rows);
    for (int k = 0; k < n; k++) out[k] = prepared_at(k, cols, wanted[k].f, wanted[k].q, false);
    launch_prepare(in, out, n, n_rows, cols);
}

// The same for one input.
static Prepared prepare_one(Jobs *jobs, const In *in, int n_rows, int cols, bool f, bool q) {
    Prepared out[MAX_READERS];
    const Wanted wanted = { in, f, q };
    prepare(jobs, &wanted, 1, n_rows, cols, out);
    return out[0];
}

// Adds a job. If o.in has no pointers, it reads input number `source` of those that blocks make (jobs->made).
static void add_job(Jobs *jobs, Job o) {
    if (jobs->n == MAX_JOBS) cuda_die("product: more than %d jobs", MAX_JOBS);
    if (!is_float(o.type) && (o.cols % 32 || (size_t)o.in.q % 16))
        cuda_die("product %d x %d: int8 rows must be whole groups at multiples of 16 bytes", o.rows, o.cols);
    if (o.act.q && o.rows % 32) cuda_die("product %d x %d: an int8 result must be whole groups", o.rows, o.cols);
    o.by_blocks = o.kind != JOB_STORE;
    o.item_features = is_float(o.type) ? 1 : WARP_FEATURES;
    if (o.by_blocks) o.item_features = o.kind == JOB_DOWN ? DOWN_FEATURES : BLOCK_FEATURES;
    o.row_items = div_up(o.rows, o.item_features);
    o.quads = 1;
    for (int k = 0; k < (o.kind == JOB_GATED ? 2 : 1); k++) {
        const DType t = k ? o.up_type : o.type;
        const Format f = format_of(t);
        const Planes &w = k ? o.up : o.w;
        const int octets = div_up(o.cols, 256), ahead = is_float(t) ? octets : min_int(PREFETCH_OCTETS, octets);
        for (int i = 0; i < 4; i++) {
            o.row_bytes[k][i] = (int)plane_bytes(f, i, o.cols);
            o.prefetch_bytes[k][i] = (int)((size_t)o.row_bytes[k][i] * ahead / octets);
            o.prefetch_from[k][i] = (&w.lo)[i] + (k ? o.up_first : 0) * o.row_bytes[k][i];
        }
        if (is_float(t) && (o.row_bytes[k][0] | (size_t)w.lo) % 16) o.quads = 0;
    }
    if (o.in.f || o.in.q) {
        int k = jobs->made.n;
        while (k < jobs->n_inputs && (jobs->input[k].from.f != o.in.f || jobs->input[k].from.q != o.in.q)) k++;
        if (k == MAX_INPUTS) cuda_die("product %d x %d: more than %d inputs", o.rows, o.cols, MAX_INPUTS);
        jobs->n_inputs = max_int(jobs->n_inputs, k + 1);
        jobs->input[k].from = o.in;
        o.source = k;
    }
    Input *in = &jobs->input[o.source];
    const bool gated = o.kind == JOB_GATED;
    in->cols = o.cols;
    in->by_chunks = divisor(max_int(1, o.cols / 16));
    in->rows_each = o.kind == JOB_DOWN ? o.n_used : 1;
    if (is_float(o.type) || (gated && is_float(o.up_type))) in->f_row = (int)round_up(o.cols, 8) * (int)sizeof(float);
    if (!is_float(o.type) || (gated && !is_float(o.up_type))) in->q_row = div_up(o.cols, 256) * OCTET_BYTES;
    if (o.source >= jobs->made.n && ((in->f_row && !in->from.f) || (in->q_row && !in->from.q)))
        cuda_die("product %d x %d, type %d: the input is not there in the form that this type reads", o.rows, o.cols,
                 (int)o.type);
    if (o.ids) jobs->ids = o.ids, jobs->pair_weights = o.weights, jobs->n_used = o.n_used;
    jobs->job[jobs->n++] = o;
}

typedef enum { BY_ROWS, BY_GEMV, BY_GEMV_FLOATS, BY_TILES } ProductKernel;

static void (*const product_kernels[])(Jobs) = { product_kernel<1>, product_kernel<FEW_ROWS> };
static void (*const gemv_kernels[])(Gemv) = { gemv_kernel<false>, gemv_kernel<true> };
static void (*const gemv_floats_kernels[])(GemvFloats) = { gemv_floats_kernel<T_F32>, gemv_floats_kernel<T_F16>,
                                                           gemv_floats_kernel<T_BF16> };
enum { TILE_SIZES = 4 };      // numbers of rows; then the kernels with IN_STAGE
static void (*const tile_kernels[])(Tiling) = {
    tile_kernel<1, false>, tile_kernel<2, false>, tile_kernel<4, false>, tile_kernel<8, false>,
    tile_kernel<1, true>, tile_kernel<2, true> };

static void allow_products(void) {
    for (auto k : product_kernels) allow_shared(k);
    for (auto k : gemv_kernels) allow_shared(k);
    for (auto k : gemv_floats_kernels) allow_shared(k);
    for (auto k : tile_kernels) allow_shared(k, TILE_STATIC);
}

typedef struct {              // how a launch is run
    ProductKernel kernel;
    int    variant;           // in the list of those kernels
    int    blocks, chunks;    // grid
    int    threads;
    int    resident;          // blocks of an SM at once
    size_t shared;            // bytes
    union {                   // parameters; BY_ROWS: the jobs themselves
        Gemv gemv;
        GemvFloats floats;
        Tiling tiling;
    };
} Plan;

static const char *const product_names[] = { "product", "gemv", "gemv_floats", "tile" };

// A plan in words, for the message about a failed launch, and for a debugger.
static const char *plan_text(const Plan *p) {
    static char text[128];
    snprintf(text, sizeof text, "%s kernel %d, grid %d x %d, block %d, %zu bytes of shared memory",
             product_names[p->kernel], p->variant, p->blocks, p->chunks, p->threads, p->shared);
    return text;
}

static void report_products(const Plan *p) {
    const dim3 grid(p->blocks, p->chunks);
    if (p->kernel == BY_TILES)
        report_plan("tile", grid, p->threads, p->shared, p->resident, "%d rows, %d stages of %d bytes%s",
                    8 << p->variant % TILE_SIZES, p->tiling.stages, p->tiling.stage_bytes,
                    p->variant < TILE_SIZES ? "" : ", sums in one");
    else report_plan(product_names[p->kernel], grid, p->threads, p->shared, p->resident, "%d rows",
                   p->kernel == BY_ROWS && p->variant ? FEW_ROWS : 1);
}

// The plan_.. functions plan a launch for one kernel, if plan_product allows it; false: it does not fit, or another is
// better.

// Splits of the experts of JOB_DOWN: `same` work items with different features for `slots` blocks. The fewest splits
// with which all blocks are busy for 15/16 of the time.
static int choose_expert_splits(int same, int slots) {
    int best = 1;
    for (int n = 2; n <= max_int(1, 4 * slots / same); n++)
        if (15 * div_up(best * same, slots) * n > 16 * div_up(n * same, slots) * best) best = n;
    return best;
}

// How a block uses shared memory; the planner takes the first choice that is allowed and fits. Two blocks of an SM are
// better than one: while one waits, the other works. From 17 rows on, registers allow one block only; its sums have
// their own memory.
//
//     blocks of an SM   stages   sums are in   allowed
//     2                 3 or 4   own memory
//     2                 4        a stage
//     1                 4        a stage       if no block has two work items; not for JOB_DOWN
//     2                 3 or 4   a stage       here matrices may have half stages
//     1                 4        a stage       if a block has up to FEW_STEPS steps
//     1                 3 or 4   own memory
//     1                 2 to 4   own memory    not with `deep` stages
//
// Sums use a stage where there is no memory for both. Single blocks do so as well, because a launch takes 4 to 5 us
// longer if the launch before it used the other kernel (H100; perhaps its instructions are loaded then). But a block
// with many steps needs the stage that would wait for the sums, so its sums have their own memory.
enum { BUFFERS_IN_STAGE = 1,                   // sums use a stage
       BUFFERS_ONE_ITEM = 2,                   // if no block has two work items
       BUFFERS_FEW_STEPS = 4,                  // if a block has up to FEW_STEPS steps
       BUFFERS_HALVES = 8,                     // matrices may have half stages
       FEW_STEPS = 64 };
typedef struct {
    int      resident, stages;                 // blocks of an SM at once; at least so many stages
    unsigned flags;
} BufferChoice;
static const BufferChoice buffer_choices[] = {
    { 2, 3, 0 }, { 2, 4, BUFFERS_IN_STAGE }, { 1, 4, BUFFERS_IN_STAGE | BUFFERS_ONE_ITEM },
    { 2, 3, BUFFERS_IN_STAGE | BUFFERS_HALVES }, { 1, 4, BUFFERS_IN_STAGE | BUFFERS_FEW_STEPS }, { 1, 3, 0 },
    { 1, 2, 0 } };

// Bytes of shared memory that are left for stages. *sums: bytes for the sums. *lists: bytes for the lists.
static int stages_room(const Tiling *t, const BufferChoice *c, int *sums, int *lists) {
    *lists = t->n_pairs ? round_16((LIST_SIZE * (t->n_pairs + 1) + 1) * (int)sizeof(uint16_t)) : 0;
    *sums = c->flags & BUFFERS_IN_STAGE ? 0 : SUMS_BYTES;
    const int most = min_int(cuda.card.sm_shared / c->resident - BLOCK_SYSTEM, cuda.card.block_shared) - TILE_STATIC;
    return most - *sums - *lists - (int)sizeof(StageBarriers);
}

// Sets the offsets in shared memory; false: too little for the stages, for the sums, or for list_pairs.
static bool place_buffers(Tiling *t, const BufferChoice *c) {
    const bool in_stage = c->flags & BUFFERS_IN_STAGE;
    int sums, lists;
    const int room = stages_room(t, c, &sums, &lists);
    t->stages = min_int(TILE_STAGES, room / t->stage_bytes);
    t->sums_at = t->stages * t->stage_bytes;
    t->lists_at = t->sums_at + sums;
    t->barriers_at = t->lists_at + lists;
    return t->stages >= c->stages &&
           (!in_stage || t->stage_bytes >= SUMS_BYTES / 2) && list_bytes(t->n_pairs) <= (in_stage ? t->sums_at : sums);
}

// Sets the work items of each matrix and the bytes of a stage; returns the number of items (JOB_DOWN: of one split).
// *steps: the most steps of an item. With BUFFERS_HALVES, a matrix has half stages, of one octet of 32 features
//     if it is `deep` or JOB_DOWN, and three of its stages would not fit;
//     if it is in a launch with experts, and its stages would be larger than theirs.
static int set_items(Tiling *t, const Jobs *jobs, const BufferChoice *c, bool deep, int row_tiles, int *steps) {
    int sums, lists, n_items = 0;
    const int third = stages_room(t, c, &sums, &lists) / 3, area = ROW_AREA * row_tiles;
    const Job *experts = t->expert_job >= 0 ? &jobs->job[t->expert_job] : NULL;
    *steps = t->stage_bytes = 0;
    for (int k = 0; k < jobs->n; k++) {
        const Job *o = &jobs->job[k];
        const bool gated = o->kind == JOB_GATED, down = o->kind == JOB_DOWN;
        t->record[k] = record_of(o->type).size;
        t->half[k] = false;
        t->features[k] = 1;
        t->deep[k] = deep && !gated && !down && !is_float(o->type);
        if (!is_float(o->type)) {
            const int bytes = 64 * t->record[k] + (t->deep[k] ? 2 : 1) * area;
            int most = t->deep[k] || down ? third : bytes;
            if (experts && o != experts && !gated) most = 64 * record_of(experts->type).size + area;
            t->half[k] = c->flags & BUFFERS_HALVES && bytes > most;
            t->deep[k] |= t->half[k];
            t->features[k] = gated || t->deep[k] ? 32 : 64;
            t->stage_bytes = max_int(t->stage_bytes, t->half[k] ? 32 * t->record[k] + area : bytes);
            *steps = max_int(*steps, div_up(o->cols, t->deep[k] && !t->half[k] ? 512 : 256));
        }
        t->items[k] = div_up(o->rows, t->features[k]);
        n_items += t->items[k] * (o->ids && gated ? t->n_pairs : t->row_chunks);
    }
    return n_items;
}

// A plan for tile_kernel. deep: with stages of two octets of 32 features, for matrices where that reaches more SMs.
//
// Example: gate and up of Gemma 4 31B (21504 features each, Q4_K), 8 rows, H100 (132 SMs with 228 KB):
//     a stage    64 records of 144 bytes, and 8 rows (2432)            11648 bytes
//     a block    4 stages, sums (17408), barriers (64)                 64064 bytes: two blocks fit on an SM
//     items      21504 / 32 = 672, for 2 * 132 = 264 blocks at once    2.5 for each, so 3
//     grid       672 / 3 = 224 blocks, 3 items each; room for 40 blocks of the next launch
static bool plan_tiles_of(const Jobs *jobs, int n_rows, bool deep, Plan *p) {
    Tiling &t = p->tiling;
    int rows = 1, of_expert = 0, wide = 0, n_items = 0, down = -1;
    t = { };
    t.expert_job = -1;
    for (int k = 0; k < jobs->n; k++) {
        const Job *o = &jobs->job[k];
        const int n_pairs = o->n_rows * o->n_used, n_experts = o->ids ? min_int(n_pairs, o->n_experts) : 1;
        rows = max_int(rows, o->n_rows);
        if (o->ids) t.expert_job = k, t.n_pairs = n_pairs, of_expert = div_up(n_pairs, o->n_experts);
        if (o->kind == JOB_DOWN) down = k;
        if (is_float(o->type)) t.floats = true;
        else wide += n_experts * div_up((o->kind == JOB_GATED ? 2 : 1) * o->rows, 64);
    }
    // An expert has few of the rows. A kernel made for few rows spends less time on each weight; another matrix in the
    // launch is computed some rows at a time.
    if (of_expert) rows = min_int(rows, 2 * of_expert);
    p->variant = (rows > 8) + (rows > 16) + (rows > 32);
    const int row_tiles = 1 << p->variant;             // of 8 rows
    t.row_chunks = 1;
    if (of_expert && jobs->n > 1) t.rows_at_once = 8 * row_tiles, t.row_chunks = div_up(n_rows, t.rows_at_once);
    // Items of 64 features need less work per weight and read the rows less often. If there is at most one for each SM,
    // items of 32 features reach more SMs.
    if (deep && wide > cuda.card.n_sm) return false;
    const BufferChoice *buffers = NULL;
    for (const BufferChoice &c : buffer_choices) {
        if (row_tiles > 2 && (c.resident > 1 || c.flags & BUFFERS_IN_STAGE)) continue;
        if (deep && c.stages < 3) continue;            // deep stages are twice as large
        int steps;
        n_items = set_items(&t, jobs, &c, deep, row_tiles, &steps);
        if (!t.stage_bytes) return false;              // only floats
        if (c.flags & BUFFERS_ONE_ITEM && (down >= 0 || n_items > cuda.card.n_sm)) continue;
        if (c.flags & BUFFERS_FEW_STEPS && div_up(n_items, cuda.card.n_sm) * steps > FEW_STEPS) continue;
        if (!place_buffers(&t, &c)) continue;
        buffers = &c;
        break;
    }
    if (!buffers) return false;
    if (buffers->flags & BUFFERS_IN_STAGE) p->variant += TILE_SIZES;
    const int slots = cuda.card.n_sm * buffers->resident;
    if (down >= 0) {
        const int same = t.items[down], n_features = jobs->job[down].rows;
        if (same > MAX_ARRIVED || (size_t)t.n_pairs * n_features * sizeof(float) > PARTIAL_BYTES) return false;
        t.expert_splits = choose_expert_splits(same, slots);
        t.results = cuda.partial;
        t.arrived = (int *)cuda.arrived;
        n_items += (t.expert_splits - 1) * same;
    }
    t.jobs = *jobs;
    // Few items for each block: the same number for all blocks; the other SMs are for the next launch.
    const int items_each = div_up(n_items, slots);
    p->kernel = BY_TILES;
    p->blocks = min_int(n_items, slots);
    if (!t.n_pairs && items_each > 2 && items_each <= FEW_ITEMS) p->blocks = div_up(n_items, items_each);
    p->threads = TILE_BLOCK;
    p->resident = buffers->resident;
    p->shared = (size_t)t.barriers_at + sizeof(StageBarriers);
    return true;
}

static bool plan_tiles(const Jobs *jobs, int n_rows, Plan *p) {
    return plan_tiles_of(jobs, n_rows, true, p) || plan_tiles_of(jobs, n_rows, false, p);
}

static bool plan_gemv_floats(const Jobs *jobs, Plan *p) {
    const Job *o = &jobs->job[0];
    if (!o->quads || o->cols % (16 / format_of(o->type).bytes)) return false;
    p->floats = { o->w.lo, o->cols, *o, jobs->input[0], jobs->made };
    p->floats.input.f_at = p->floats.input.q_row = 0;
    p->kernel = BY_GEMV_FLOATS;
    p->variant = o->type == T_F32 ? 0 : 1 + (o->type == T_BF16);
    p->blocks = min_int(cuda.card.n_sm, div_up(o->rows, PRODUCT_WARPS));
    p->threads = ROW_THREADS;
    p->shared = jobs->input[0].f_row;
    return true;
}

// busy: SMs on which blocks of this launch would start late.
static bool plan_gemv(const Jobs *jobs, int busy, Plan *p) {
    const Job *first = &jobs->job[0];
    Gemv &g = p->gemv;
    int n_warp_items = 0;
    g = { };
    for (int k = 0; k < jobs->n; k++) {
        const Job *o = &jobs->job[k];
        GemvJob *job = &g.job[k];
        *job = (GemvJob){ o->type, o->w, div_up(o->rows, WARP_FEATURES), { }, { }, *o };
        for (int i = 0; i < 4; i++) {
            job->row_bytes[i] = o->row_bytes[0][i];
            job->octet_bytes[i] = (unsigned)plane_bytes(format_of(o->type), i, 256);
        }
        n_warp_items += job->n_warp_items;
    }
    g.n = jobs->n;
    g.n_groups = first->cols / 32;
    g.n_octets = div_up(g.n_groups, 8);
    g.block_items = first->kind == JOB_INJECT ? MATRIX_WARPS : div_up(n_warp_items, max_int(1, cuda.card.n_sm - busy));
    // The launch ends at once: few SMs, the others are for the next launch.
    if (g.n_octets == 1) g.block_items = max_int(g.block_items, PRODUCT_WARPS / 2);
    if (g.block_items > PRODUCT_WARPS) return false;   // a warp has at most one split
    g.split_octets = div_up(g.n_octets, min_int(PRODUCT_WARPS / g.block_items, g.n_octets));
    g.n_splits = div_up(g.n_octets, g.split_octets);
    // Many items with long rows: product_kernel is as fast.
    if (g.n_splits == 1 && g.n_octets > 1 && !jobs->made.n) return false;
    g.input = jobs->input[0];
    g.made = jobs->made;
    size_t at = round_up(sizeof(Gemv), 16);
    g.input.q_at = (int)at;
    at += g.input.q_row;
    g.terms_at = (int)at;
    if (g.n_splits > 1) at += (size_t)g.block_items * g.n_octets * 32 * sizeof(float);
    g.sums_at = (int)at;
    p->kernel = BY_GEMV;
    p->variant = g.made.n > 0;
    p->blocks = div_up(n_warp_items, g.block_items);
    p->threads = ROW_THREADS;
    p->shared = at + (size_t)g.block_items * WARP_FEATURES * sizeof(float);
    return true;
}

// Sets the offsets in shared memory of a block that computes up to `rows` rows, of which the step has `there`; returns
// the bytes in all.
static size_t place_shared(Jobs *jobs, int rows, int there) {
    size_t at = round_up(sizeof(Jobs), 16);
    for (int k = 0; k < jobs->n_inputs; k++) {
        Input *in = &jobs->input[k];
        in->q_at = (int)at;
        at += (size_t)there * in->rows_each * in->q_row;
        in->f_at = (int)at;
        at += (size_t)there * in->rows_each * in->f_row;
    }
    jobs->pairs_at = (int)at;
    at = round_up(at + (size_t)rows * jobs->n_used * 8, 16);
    jobs->n_results = max_int(rows * WARP_FEATURES, div_up(jobs->n_used * DOWN_FEATURES, PRODUCT_WARPS));
    jobs->results_at = (int)at;
    return at + waiting_items(rows) * PRODUCT_WARPS * jobs->n_results * sizeof(float);
}

// Rows are computed together if they take no more shared memory than this; else one after the other.
enum { FEW_ROWS_SHARED = 110 << 10 };

static void plan_rows(Jobs *jobs, int n_rows, int busy, Plan *p) {
    const size_t room = min_size(cuda.card.block_shared - STATIC_SHARED, FEW_ROWS_SHARED);
    int r = n_rows == 1 ? 1 : FEW_ROWS;
    p->shared = place_shared(jobs, r, r);
    if (r > 1 && p->shared > room) p->shared = place_shared(jobs, r, min_int(r, n_rows));
    if (r > 1 && p->shared > room) p->shared = place_shared(jobs, r = 1, 1);
    const int chunk = min_int(r, n_rows);
    size_t block_item_bytes = 0, all_bytes = 0;
    jobs->n_rows = n_rows;
    jobs->n_block_items = jobs->n_warp_items = 0;
    for (int k = 0; k < jobs->n; k++) {
        Job *o = &jobs->job[k];
        o->n_items = o->row_items;
        if (o->kind == JOB_DOWN) o->n_items *= chunk;
        if (o->kind == JOB_GATED && o->ids) o->n_items *= chunk * o->n_used;
        if (o->by_blocks) jobs->n_block_items += o->n_items;
        else jobs->n_warp_items += o->n_items;
        for (int i = 0; i < 8; i++) {
            const size_t bytes = (size_t)o->row_bytes[i / 4][i % 4] * o->rows;
            all_bytes += bytes;
            if (o->by_blocks) block_item_bytes += bytes;
        }
    }
    const size_t few = min_size(PREFETCH_BYTES, cuda.card.l2 / 3 * 2);
    jobs->prefetch_all = block_item_bytes <= few;
    jobs->prefetch_early = all_bytes <= few;
    p->kernel = BY_ROWS;
    p->variant = r > 1;
    p->threads = ROW_THREADS;
    p->chunks = div_up(n_rows, r);
    int most = max_int(1, (cuda.card.n_sm - busy) / p->chunks);
    // Where memory bandwidth is the limit: the same number of items for each block; the other SMs are for the next
    // launch.
    const int n_items = jobs->n_block_items;
    if (n_items && !jobs->prefetch_all) most = div_up(n_items, div_up(n_items, most));
    p->blocks = min_int(jobs->n_block_items + jobs->n_warp_items, most);
    jobs->longer_blocks = jobs->n_block_items % p->blocks;
    if (jobs->n_warp_items > 2 * PRODUCT_WARPS * (p->blocks - jobs->longer_blocks)) jobs->longer_blocks = 0;
}

// Chooses the kernel of a launch, and the number of its blocks.
//   tile_kernel         MANY_ROWS to STEP_ROWS rows, quantised matrices (gate and up of one type), together with float
//                       matrices of JOB_STORE
//   gemv_floats_kernel  one row, one float matrix, JOB_STORE
//   gemv_kernel         one row, quantised matrices with few features on one input, JOB_STORE or one JOB_INJECT
//   product_kernel      everything else
static void plan_product(Jobs *jobs, int n_rows, Plan *p) {
    const Job *first = &jobs->job[0];
    const size_t most = cuda.card.block_shared - STATIC_SHARED;
    bool tiles = n_rows >= MANY_ROWS, quantised = true, store = true;
    for (int k = 0; k < jobs->n; k++) {
        const Job *o = &jobs->job[k];
        const bool stores = o->kind == JOB_STORE, one_type = o->kind != JOB_GATED || o->up_type == o->type;
        tiles &= o->n_rows <= STEP_ROWS && (!o->ids || o->n_experts <= TILE_EXPERTS);
        tiles &= is_float(o->type) ? stores : one_type;
        quantised &= !is_float(o->type);
        store &= stores;
    }
    const bool one_row = n_rows == 1 && jobs->n_inputs == 1 && jobs->made.cols <= NARROW_COLS;
    const bool inject = first->kind == JOB_INJECT && jobs->n == 1 && first->rows % BLOCK_FEATURES == 0 && jobs->made.n;
    // A block fills an SM. If the launch before has very few blocks and may overlap this one, a block on one of their
    // SMs would start late, and the next launch would wait for it.
    const int busy = cuda.card.starts_early && cuda.last.blocks <= cuda.card.n_sm / 16 ? cuda.last.blocks : 0;
    p->chunks = p->resident = 1;
    if (tiles && plan_tiles(jobs, n_rows, p)) return;
    if (one_row && !quantised && store && jobs->n == 1 && plan_gemv_floats(jobs, p) && p->shared <= most) return;
    if (one_row && quantised && (store || inject) && jobs->n <= GEMV_JOBS && plan_gemv(jobs, busy, p) &&
        p->shared <= most) return;
    plan_rows(jobs, n_rows, busy, p);
}

static void launch_jobs(Jobs *jobs, const char *what, int n_rows) {
    Plan p;
    plan_product(jobs, n_rows, &p);
    const dim3 grid(p.blocks, p.chunks);
    const int v = p.variant;
    report_products(&p);
    switch (p.kernel) {
    case BY_ROWS: launch(WRITES_ACTIVATIONS, product_kernels[v], grid, p.threads, p.shared, *jobs); break;
    case BY_GEMV: launch(WRITES_ACTIVATIONS, gemv_kernels[v], grid, p.threads, p.shared, p.gemv); break;
    case BY_GEMV_FLOATS:
        launch(WRITES_ACTIVATIONS, gemv_floats_kernels[v], grid, p.threads, p.shared, p.floats);
        break;
    case BY_TILES: launch(WRITES_ACTIVATIONS, tile_kernels[v], grid, p.threads, p.shared, p.tiling); break;
    }
    const Job *o = &jobs->job[0];
    CHECK_LAUNCH("%s n_rows=%d rows=%d cols=%d: %s", what, n_rows, o->rows, o->cols, plan_text(&p));
}

// ==== [6] Products of a prompt: cuBLAS ===============================================================================
// More than STEP_ROWS rows: a panel of features is converted to f16, cuBLAS multiplies it with the rows in f16 (sums in
// f32), then comes the next panel. Gate and up share a panel; their products go to scratch, where the activation reads
// them.

enum { PANEL_UNIT = 256 };    // a panel begins at a multiple of this many features: whole tiles and octets

// dequantise: converts n_groups groups of a matrix to f16, from group `first` on. Both are whole rows; out is a
// multiple of 16 bytes.
//   launch    grid ceil(n_groups / 512), block 256: a lane converts two groups, a warp 64 consecutive groups
//   traffic   reads the weights once, writes 2 bytes a value. The values of 32 groups pass through shared memory, so
//             that every store of a warp writes 512 contiguous bytes. Both groups of a lane are loaded before the first
//             is unpacked
//   numerics  value_of, rounded once
template <DType T>
__global__ void __launch_bounds__(256) dequantise_kernel(Planes w, size_t first, int n_groups, __half *out) {
    // For each warp: four words of 16 bytes of each lane. Pairs of lanes order their words differently, so that 8 lanes
    // that store together use all banks.
    __shared__ uint4 passing[8][128];
    uint4 *const mine = passing[threadIdx.x / 32];
    const int lane = threadIdx.x % 32, from = (blockIdx.x * 8 + threadIdx.x / 32) * 64;
    Fetched<T> fetched[2];
#pragma unroll
    for (int k = 0; k < 2; k++) {
        const int g = min(from + 32 * k + lane, n_groups - 1);
        fetch_group<T>(planes_from<T>(w, first + g), 0, &fetched[k]);
    }
    wait_for_previous_kernel();
#pragma unroll
    for (int k = 0; k < 2; k++) {
        Group x;
        unpack_group<T>(fetched[k], (int)(first + from + 32 * k + lane) & 7, &x);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            __half2 h[4];
#pragma unroll
            for (int j = 0; j < 4; j++)
                h[j] = __floats2half2_rn(value_of<T>(x, 8 * i + 2 * j), value_of<T>(x, 8 * i + 2 * j + 1));
            uint4 v;
            memcpy(&v, h, sizeof v);
            mine[4 * lane + (i ^ (lane / 2 & 3))] = v;
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int at = 32 * i + lane, g = at / 4;
            if (from + 32 * k + g < n_groups)
                ((uint4 *)out)[(size_t)(from + 32 * k) * 4 + at] = mine[4 * g + ((at ^ g / 2) & 3)];
        }
        __syncwarp();
    }
}

// float_to_half: converts n values of a float matrix to f16, from value `first` on, a multiple of 256.
//   launch    grid ceil(n / 2048), block 256: a thread converts eight values
template <DType T> __global__ void float_to_half_kernel(const uint8_t *w, size_t first, size_t n, __half *out) {
    constexpr int words = 8 / Type<T>::chunk;          // of 16 bytes
    wait_for_previous_kernel();
    const size_t i = 8 * ((size_t)blockIdx.x * blockDim.x + threadIdx.x);
    if (i + 8 > n) {
        for (size_t k = i; k < n; k++) out[k] = __float2half_rn(float_value(T, w, first + k));
        return;
    }
    uint4 raw[words], v;
    for (int k = 0; k < words; k++) raw[k] = load_once(w + (first + i) / Type<T>::chunk * 16 + 16 * k);
    const uint8_t *values = (const uint8_t *)raw;
    __half2 h[4];
    for (int k = 0; k < 4; k++)
        h[k] = __floats2half2_rn(float_value(T, values, 2 * k), float_value(T, values, 2 * k + 1));
    memcpy(&v, h, sizeof v);
    *(uint4 *)(out + i) = v;
}

// Converts n features of a matrix to f16, from feature `first` on, a multiple of PANEL_UNIT.
static void to_half(const Tensor *w, int first, int n, __half *out) {
    const size_t from = (size_t)first * w->cols, values = (size_t)n * w->cols;
    const Planes p = planes_of(w);
    const int groups = (int)(values / 32), blocks = (int)((values + 2047) / 2048);
    void (*of_groups)(Planes, size_t, int, __half *) = NULL;
    void (*of_floats)(const uint8_t *, size_t, size_t, __half *) = NULL;
    switch (w->type) {
#define CASE(T, ...) case T: of_groups = dequantise_kernel<T>; break;
    QUANTISED_TYPES(CASE)
#undef CASE
    case T_F32: of_floats = float_to_half_kernel<T_F32>; break;
    case T_F16: of_floats = float_to_half_kernel<T_F16>; break;
    case T_BF16: of_floats = float_to_half_kernel<T_BF16>; break;
    }
    if (of_groups) launch(WRITES_ACTIVATIONS, of_groups, div_up(groups, 512), 256, 0, p, from / 32, groups, out);
    if (of_floats) launch(WRITES_ACTIVATIONS, of_floats, blocks, 256, 0, p.lo, from, values, out);
    CHECK_LAUNCH("to_half rows=%d cols=%d", n, w->cols);
}

// out[r][i] = panel[i] . y[r] for n features and all rows; out has row stride `stride` floats.
static void multiply_panel(int n, int cols, const __half *y, int n_rows, float *out, int stride) {
    const float back = 1 / PROMPT_SCALE, zero = 0;
    CHECK_BLAS(cublasGemmEx(cuda.blas, CUBLAS_OP_T, CUBLAS_OP_N, n, n_rows, cols, &back, cuda.panel, CUDA_R_16F, cols,
                            y, CUDA_R_16F, cols, &zero, out, CUDA_R_32F, stride, CUBLAS_COMPUTE_32F,
                            CUBLAS_GEMM_DEFAULT), "gemm");
}

static size_t panel_rows(int cols) { return PANEL_BYTES / sizeof(__half) / cols; }

// Features in a panel when there is room for `most` of `rows`: as few panels as possible, as equal as multiples of
// PANEL_UNIT allow.
static int panel_step(int rows, size_t most) {
    const int room = max_int((int)(most / PANEL_UNIT), 1), all = div_up(rows, PANEL_UNIT);
    return div_up(all, div_up(all, room)) * PANEL_UNIT;
}

// out *= *factor. launch: grid ceil(n / 256), block 256.
__global__ void scale_kernel(float *out, const float *factor, size_t n) {
    wait_for_previous_kernel();
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] *= *factor;
}

static void multiply_prompt(const Tensor *w, const __half *y, int n_rows, float *out) {
    const int step = panel_step(w->rows, panel_rows(w->cols));
    for (int i = 0; i < w->rows; i += step) {
        const int n = min_int(step, w->rows - i);
        to_half(w, i, n, cuda.panel);
        multiply_panel(n, w->cols, y, n_rows, out + i, w->rows);
    }
    if (!w->scale) return;
    const size_t n = (size_t)n_rows * w->rows;
    launch(WRITES_ACTIVATIONS, scale_kernel, (unsigned)((n + 255) / 256), 256, 0, out, w->scale, n);
    CHECK_LAUNCH("scale n_rows=%d rows=%d", n_rows, w->rows);
}

// gated: columns first .. first + n - 1 of act(gate) * up, as Act. quads: all rows lie at multiples of four values.
//   launch    grid (n_rows, ceil(n / 1024)), block 256: a thread has four values, so 8 lanes hold a group
//   traffic   reads 8 bytes a value, writes 4 or 1 1/8
__global__ void gated_kernel(const float *gate, int gate_stride, const float *gate_factor, const float *up,
                             int up_stride, const float *up_factor, ActFn fn, Act out, int cols, int first, int n,
                             int quads) {
    wait_for_previous_kernel();
    const int i = 4 * (blockIdx.y * blockDim.x + threadIdx.x);
    const size_t r = blockIdx.x, at = r * cols + first;
    const float4 g = scale4(load4(gate + r * gate_stride, i, n, quads), gate_factor ? *gate_factor : 1);
    const float4 u = scale4(load4(up + r * up_stride, i, n, quads), up_factor ? *up_factor : 1);
    const float4 v =
        multiply4(make_float4(activate(fn, g.x), activate(fn, g.y), activate(fn, g.z), activate(fn, g.w)), u);
    if (out.f) store4(out.f + at, i, n, quads, v);
    if (!out.q) return;
    float s;
    const unsigned word = quantise4(v, &s);
    if (i < n) *(unsigned *)(out.q + at + i) = word;
    if (i < n && i % 32 == 0) out.s[(at + i) / 32] = s;
}

// Products of gate and up that scratch holds, in values of both together.
static size_t wide_values(int max_rows) { return max_int(16 << 20, 2 * PANEL_UNIT * max_rows); }

// out = act(gate y) * (up y); up == NULL: out = act(gate y) * u, whose rows lie u_stride floats apart.
static void multiply_gated(const Tensor *gate, const Tensor *up, const float *u, int u_stride, ActFn fn,
                           const __half *y, int n_rows, Act out) {
    const int rows = gate->rows, cols = gate->cols;
    const size_t room = wide_values(cuda.lim.max_rows) / n_rows, panel = panel_rows(cols);
    const int step = panel_step(rows, (room < panel ? room : panel) / (up ? 2 : 1));
    const float *up_factor = up ? up->scale : NULL;
    for (int i = 0; i < rows; i += step) {
        const int n = min_int(step, rows - i), place = up ? (int)round_up(n, 8) : 0, stride = place + n;
        to_half(gate, i, n, cuda.panel);
        // Features n .. place - 1 of the product are not used.
        if (up) to_half(up, i, n, cuda.panel + (size_t)place * cols);
        multiply_panel(stride, cols, y, n_rows, cuda.wide, stride);
        const float *second = up ? cuda.wide + place : u + i;
        const int second_stride = up ? stride : u_stride;
        const bool quads = (rows | n | second_stride | (int)((size_t)second / sizeof(float))) % 4 == 0;
        launch(WRITES_ACTIVATIONS, gated_kernel, dim3(n_rows, div_up(n, 1024)), 256, 0, cuda.wide, stride, gate->scale,
               second, second_stride, up_factor, fn, out, rows, i, n, quads);
        CHECK_LAUNCH("gated n_rows=%d n=%d", n_rows, n);
    }
}

static const __half *prompt_input(const In *in, int n_rows, int cols, bool by_fragment) {
    if (in->act.f || in->act.q) {
        const size_t n = (size_t)n_rows * cols;
        launch(WRITES_ACTIVATIONS, act_to_half_kernel, (unsigned)((n + 2047) / 2048), 256, 0, in->act, cuda.y16, n,
               by_fragment);
        CHECK_LAUNCH("act_to_half n_rows=%d cols=%d", n_rows, cols);
    } else {
        launch_prepare(in, (Prepared){ NULL, NULL, NULL, cuda.y16, by_fragment }, n_rows, cols);
    }
    return cuda.y16;
}

// ---- experts of a prompt ----
// The pairs (row, chosen expert) of a step are sorted by expert. Then each expert multiplies all of its rows, a tile of
// rows at a time, like a dense matrix: weights are converted to f16 between shared memory and the tensor cores, sums
// are f32. A warp has 32 features in two halves of 16: of gate and of up, or 32 consecutive ones. It multiplies them
// with all rows of the tile, so a weight is decoded once for all of them. Stages hold 64 values of the features and of
// the rows.
//
// Word k of a chunk of codes holds values 4k .. 4k + 3 of a feature, but multiply_half() takes a lane's values as 2k,
// 2k + 1, 8 + 2k and 9 + 2k. The rows are stored in the order of fragment_at() to match, so codes need no reordering.

enum { STAGE_VALUES = 64, MMA_ROWS = 16, SORT_THREADS = 512, MAX_PROMPT_EXPERTS = 1024, SMALL_TILE = 64,
       LARGE_TILE = 128 };      // pairs

// The most tiles that sort_pairs_kernel makes.
static int most_tiles(int n_pairs, int n_experts, int tile) { return n_pairs / tile + n_experts; }

// sort_pairs: order = the pairs by expert, ascending; tiles = up to `tile` consecutive pairs of one expert.
//   shapes    ids (n_pairs), order (n_pairs), tiles (most_tiles())
//   launch    grid n_experts, block 512: a warp handles consecutive pairs
//   traffic   the ids twice per expert, from the L2 cache
//   see       tests/test_ops.c expert_prompt()
//
// Every expert writes its tiles without knowing how many the others have. If its pairs begin at s in `order`, its tiles
// begin at s / tile + its number; there is room for all of them and may be an empty one. Example, tile = 64:
//
//     expert   pairs   s     tiles, with their pairs
//     0        100     0     0 (64)  1 (36)
//     1        0       100   2 (0)
//     2        60      100   3 (60)  4 (0)
__global__ void __launch_bounds__(SORT_THREADS)
sort_pairs_kernel(const int32_t *ids, int n_pairs, int tile, int32_t *order, PairTile *tiles) {
    wait_for_previous_kernel();
    constexpr int WARPS = SORT_THREADS / 32;
    __shared__ int own_of[WARPS], less_of[WARPS];
    const int e = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int each = div_up(div_up(n_pairs, WARPS), 32) * 32, from = warp * each, end = min(from + each, n_pairs);
    int own = 0, less = 0;
#pragma unroll 4
    for (int i = from + lane; i < end; i += 32) {
        const int id = ids[i];
        own += id == e;
        less += id < e;
    }
    own = __reduce_add_sync(~0u, own), less = __reduce_add_sync(~0u, less);
    if (lane == 0) own_of[warp] = own, less_of[warp] = less;
    __syncthreads();                                   // all counts are there
    int start = 0, before = 0, all = 0;
    for (int w = 0; w < WARPS; w++) {
        start += less_of[w];
        before += w < warp ? own_of[w] : 0;
        all += own_of[w];
    }
    int at = start + before;
#pragma unroll 4
    for (int i = from; i < end; i += 32) {
        const bool mine = i + lane < end && ids[i + lane] == e;
        const unsigned set = __ballot_sync(~0u, mine);
        if (mine) order[at + __popc(set & ((1u << lane) - 1))] = i + lane;
        at += __popc(set);
    }
    const int first = start / tile + e, n_tiles = (start + all) / tile + e + 1 - first;
    for (int i = threadIdx.x; i < n_tiles; i += SORT_THREADS)
        tiles[first + i] = (PairTile){ e, start + i * tile, max(0, min(tile, all - i * tile)) };
}

typedef struct {
    Planes w[2];              // of the two halves of a warp's features
    size_t rows_e;            // rows of an expert
    int    first[2];          // first row of each half within its expert
    int    rows, cols;        // output features, input width
    int    step;              // features of a warp: 16 with gate and up, else 32
    int    n_blocks;          // blocks that share a tile of rows, each with other features
    const __half *y;          // (n_rows or n_pairs, cols) times PROMPT_SCALE, by fragment
    Divisor pairs_each;       // consecutive pairs that read the same row of y
    const int32_t *order;     // (n_pairs) from sort_pairs
    const PairTile *tiles;
    const float *factor[2];   // (n_experts) or NULL
    ActFn  fn;
    Act    out;               // (n_pairs, rows) of gate and up
    float *products;          // (n_pairs, rows) of another matrix; NULL: gate and up
} Experts;

// 32 features in a stage: bytes of their fields in shared memory, and where they lie.
template <DType T> struct StageLayout {
    static constexpr Format form = Type<T>::form;
    static constexpr bool one_head = Type<T>::one_head;                // one for four stages
    static constexpr int lo = STAGE_VALUES * form.lo_bits / 8;         // bytes of a feature
    static constexpr int hi = STAGE_VALUES * form.hi_bits / 8;
    static constexpr int head = one_head ? form.head : Type<T>::head * STAGE_VALUES / 256;
    static constexpr int head_words = (head + 3) / 4;
    static constexpr int hi_at = 32 * lo, head_at = hi_at + 32 * hi, sup_at = head_at + 128 * head_words;
    static constexpr int bytes = sup_at + 128 * (form.sup != 0);
    // The place of chunk c of lo of feature f: chunks that are read at once lie in different banks.
    __device__ static int chunk_at(int f, int c) {
        int bits = 0;
        if (lo == 32) bits = f >> 2 & 1;
        if (lo == 64) bits = f >> 1 & 3;
        if (lo == 128) bits = 2 * (f & 3);
        if (lo == 256) bits = 4 * (f & 1);
        return f * lo + 16 * (c ^ bits);
    }
};

// A warp's 32 features of one expert: copies their stages to shared memory and reads the scales there.
template <DType T> struct Features {
    typedef StageLayout<T> S;
    const uint8_t *lo[2];                      // first feature of each half
    const uint8_t *hi, *head, *sup;            // feature number `lane`
    int lo_row;                                // bytes from one feature to the next

    __device__ Features(const Experts &o, int expert, int feature) : lo_row(o.cols / STAGE_VALUES * S::lo) {
        for (int h = 0; h < 2; h++) {
            const size_t row = (size_t)expert * o.rows_e + o.first[h] + feature;
            lo[h] = o.w[h].lo + row * lo_row;
            if (is_float(T) || h != (int)threadIdx.x % 32 / MMA_ROWS) continue;
            const Planes p = planes_from<T>(o.w[h], (row + threadIdx.x % MMA_ROWS) * (o.cols / 32));
            hi = p.hi, head = p.head, sup = p.sup;
        }
    }
    // The first byte of stage s. What is shorter than a word is copied with the word that contains it.
    __device__ const uint8_t *head_of(int s) const { return head + (S::one_head ? s / 4 : s) * S::head; }
    __device__ const uint8_t *sup_of(int s) const { return sup + s / 4 * S::form.sup; }
    __device__ static int in_word(const uint8_t *p) { return (int)((size_t)p & 2); }

    __device__ void fetch(char *to, int s) const {
        constexpr int CHUNKS = S::lo / 16;
        const int lane = threadIdx.x % 32, c = lane % CHUNKS;
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            const int f = (i * 32 + lane) / CHUNKS, half = CHUNKS == 1 ? f / MMA_ROWS : i * 32 / CHUNKS / MMA_ROWS;
            copy_line_ahead(to + S::chunk_at(f, c), lo[half] + f % MMA_ROWS * lo_row + s * S::lo + 16 * c);
        }
        if constexpr (S::hi == 16) copy_ahead(to + S::hi_at + 16 * lane, hi + s * 16);
        if constexpr (S::hi == 8)
            for (int i = 0; i < 8; i += 4) copy_word_ahead(to + S::hi_at + 8 * lane + i, hi + s * 8 + i);
        if constexpr (S::head == 16) copy_ahead(to + S::head_at + 16 * lane, head_of(s));
        else if constexpr (S::head == 2) copy_word_ahead(to + S::head_at + 4 * lane, head_of(s) - in_word(head_of(s)));
        else for (int i = 0; i < S::head; i += 4) copy_word_ahead(to + S::head_at + S::head * lane + i, head_of(s) + i);
        if constexpr (S::form.sup == 2) copy_word_ahead(to + S::sup_at + 4 * lane, sup_of(s) - in_word(sup_of(s)));
        if constexpr (S::form.sup == 4) copy_word_ahead(to + S::sup_at + 4 * lane, sup_of(s));
    }

    // Factors and minima of group j of stage s of feature `lane`: am[0] = { a, -m }; if the halves of a group differ,
    // am[0] = { a[0], a[1] } and am[1] = { -m[0], -m[1] }.
    __device__ void scales(const char *stage, int s, int j, __half2 am[2]) const {
        const int lane = threadIdx.x % 32;
        const unsigned *w = (const unsigned *)(stage + S::head_at) + S::head_words * lane;
        uint4 x = { };
        unsigned top = 0;
        float a[2], m[2];
        if constexpr (S::head == 16) x = *(const uint4 *)w;
        else if constexpr (S::head == 12) x.x = w[0], x.y = w[1], x.z = w[2];
        else if constexpr (S::head == 8 && S::one_head) x.x = w[0], x.y = w[1];
        else if constexpr (S::head == 8) x.x = w[j];
        else if constexpr (S::head == 4) x.x = w[0] >> 16 * j;
        else x.x = w[0] >> (8 * in_word(head_of(s)) + 8 * j) & 255;
        if constexpr (S::form.sup != 0) top = ((const unsigned *)(stage + S::sup_at))[lane];
        if constexpr (S::form.sup == 2) top >>= 8 * in_word(sup_of(s));
        group_scales<T>(x, top, (2 * s + j) & 7, a, m);
        am[0] = __floats2half2_rn(a[0], Type<T>::halves ? a[1] : -m[0]);
        am[1] = __floats2half2_rn(-m[0], -m[1]);
    }
};

// Four codes, the bytes of a word, as f16 weights: the first two in *low, the others in *high. a: the factor twice; m:
// minus the minimum, twice.
template <DType T>
__device__ static inline void code_weights(unsigned codes, __half2 a, __half2 m, unsigned *low, unsigned *high) {
    constexpr bool is_signed = Type<T>::form.lo_bits == 8 || Type<T>::form.table != TABLE_NONE;
    codes = code_integers<T>(codes) ^ (is_signed ? 0x80808080u : 0);
    // a code as the low byte of 0x6400 is the f16 number 1024 + code
    const __half2 zero = __float2half2_rn(1024.0f + (is_signed ? 128 : Type<T>::offset));
    const __half2 v0 = __hsub2(two_halves(__byte_perm(codes, 0x64646464u, 0x4140)), zero);     // exact in f16
    const __half2 v1 = __hsub2(two_halves(__byte_perm(codes, 0x64646464u, 0x4342)), zero);
    *low = half_bits(Type<T>::min ? __hfma2(v0, a, m) : __hmul2(v0, a));
    *high = half_bits(Type<T>::min ? __hfma2(v1, a, m) : __hmul2(v1, a));
}

// The codes of group j of features t and t + 8 of a half: code[h][i] of half h of the group and feature t + 8 i.
template <DType T> __device__ static inline void staged_codes(const char *stage, int half, int j, unsigned code[2][2]) {
    typedef StageLayout<T> S;
    const int lane = threadIdx.x % 32, t = lane / 4, k = lane % 4;
    if constexpr (S::lo == 64) {
        unsigned r[4];
        load_matrices(r, stage + S::chunk_at(half * MMA_ROWS + lane % 16, 2 * j + lane / 16));
        code[0][0] = r[0], code[0][1] = r[1], code[1][0] = r[2], code[1][1] = r[3];
    }
    for (int i = 0; i < 2; i++) {
        const int f = half * MMA_ROWS + t + 8 * i;
        if constexpr (S::lo == 32) {
            const unsigned w = *(const unsigned *)(stage + S::chunk_at(f, j) + 4 * k);
            code[0][i] = w & 0x0f0f0f0fu, code[1][i] = w >> 4 & 0x0f0f0f0fu;
        } else if constexpr (S::lo == 16) {
            const uint2 w = *(const uint2 *)(stage + S::chunk_at(f, 0) + 8 * j);
            code[0][i] = w.x >> 2 * k & 0x03030303u, code[1][i] = w.y >> 2 * k & 0x03030303u;
        }
        if constexpr (S::hi == 16) {
            const uint2 w = *(const uint2 *)(stage + S::hi_at + 16 * f + 8 * j);
            code[0][i] |= (w.x >> 2 * k & 0x03030303u) << 4, code[1][i] |= (w.y >> 2 * k & 0x03030303u) << 4;
        } else if constexpr (S::hi == 8) {
            const unsigned w = *(const unsigned *)(stage + S::hi_at + 8 * f + 4 * j) >> k;
            constexpr int to = S::form.lo_bits;
            code[0][i] |= (w & 0x01010101u) << to, code[1][i] |= (w >> 4 & 0x01010101u) << to;
        }
    }
}

// Group j of a half of a warp's features in the layout of multiply_half(): a[h] is half h of the group. am: from
// scales().
template <DType T> __device__ static inline void staged_weights(const char *stage, int half, int j, const __half2 am[2],
                                                                unsigned a[2][4]) {
    typedef StageLayout<T> S;
    const int lane = threadIdx.x % 32, t = lane / 4, k = lane % 4;
    if constexpr (!is_float(T)) {
        unsigned code[2][2];
        staged_codes<T>(stage, half, j, code);
        for (int i = 0; i < 2; i++) {
            const int f = half * MMA_ROWS + t + 8 * i;
            const __half2 x = two_halves(__shfl_sync(~0u, half_bits(am[0]), f));
            if constexpr (Type<T>::halves) {
                const __half2 m = two_halves(__shfl_sync(~0u, half_bits(am[1]), f));
                code_weights<T>(code[0][i], __low2half2(x), __low2half2(m), &a[0][i], &a[0][i + 2]);
                code_weights<T>(code[1][i], __high2half2(x), __high2half2(m), &a[1][i], &a[1][i + 2]);
            } else {
                for (int h = 0; h < 2; h++)
                    code_weights<T>(code[h][i], __low2half2(x), __high2half2(x), &a[h][i], &a[h][i + 2]);
            }
        }
    } else for (int h = 0; h < 2; h++)
        for (int i = 0; i < 2; i++) {
            const int f = half * MMA_ROWS + t + 8 * i;
            if constexpr (T == T_F32) {
                const float4 v = *(const float4 *)(stage + S::chunk_at(f, 8 * j + 4 * h + k));
                a[h][i] = half_bits(__floats2half2_rn(v.x, v.y)), a[h][i + 2] = half_bits(__floats2half2_rn(v.z, v.w));
            } else if constexpr (is_float(T)) {
                const uint2 v = *(const uint2 *)(stage + S::chunk_at(f, 4 * j + 2 * h + k / 2) + 8 * (k & 1));
                auto from_bf16 = [](unsigned x) {
                    return half_bits(__floats2half2_rn(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)));
                };
                a[h][i] = T == T_F16 ? v.x : from_bf16(v.x), a[h][i + 2] = T == T_F16 ? v.y : from_bf16(v.y);
            }
        }
}

// The shape of a block: rows (pairs) of its tile, warps, and bytes of shared memory for its stages. On an SM with 228
// KB two blocks of four warps run together. With less, one block has as many warps as leave room for three stages.
typedef struct { int pairs, warps, shared; } ExpertsTile;
enum { WIDE_SHARED = 108 << 10, NARROW_SHARED = 98 << 10 };
template <DType T> static constexpr int experts_stage(ExpertsTile t) {     // bytes: rows of 128, features of warps
    return t.pairs * STAGE_VALUES * 2 + t.warps * StageLayout<T>::bytes;
}
template <DType T> static constexpr ExpertsTile experts_tile(bool large, bool wide) {
    const ExpertsTile narrow[] = { { LARGE_TILE, 8, NARROW_SHARED }, { 96, 8, NARROW_SHARED },
                                   { LARGE_TILE, 4, NARROW_SHARED },
                                   { SMALL_TILE, 8, NARROW_SHARED }, { SMALL_TILE, 4, NARROW_SHARED } };
    if (wide) return { large ? LARGE_TILE : SMALL_TILE, 4, WIDE_SHARED };
    for (int i = large ? 0 : 3; i < (large ? 3 : 5); i++)
        if (3 * experts_stage<T>(narrow[i]) <= NARROW_SHARED) return narrow[i];
    return { large ? LARGE_TILE : SMALL_TILE, 2, NARROW_SHARED };
}

// Shared memory: stages, later results.
template <DType T, bool LARGE, bool WIDE> struct ExpertsShape {
    static constexpr ExpertsTile tile = experts_tile<T>(LARGE, WIDE);
    static constexpr int pairs = tile.pairs, warps = tile.warps, threads = 32 * warps;
    static constexpr int features_at = pairs * STAGE_VALUES * 2, stage = experts_stage<T>(tile);
    static constexpr int fits = tile.shared / stage, stages = fits > 5 ? 5 : fits < 3 ? 3 : fits;
    // floats of a row of results; the padding puts the lanes of a warp in different banks
    static constexpr int stride = MMA_ROWS * warps + 4;
    static constexpr int results = pairs * stride * 4;
    static constexpr int bytes = stages * stage > results ? stages * stage : results;
    static constexpr int resident = !WIDE ? 1 : LARGE ? 2 : 3;         // blocks for which an SM has registers
};

// experts: one tile of features times one tile of pairs; gate and up with the activation, or one matrix.
//   shapes    w (n_experts * rows_e, cols), y (n_rows or n_pairs, cols), out or products (n_pairs, rows)
//   launch    grid most_tiles() * n_blocks, block ExpertsShape::threads
//   traffic   a tile reads its rows of y and its features once; y comes from L2, and so do features for the second tile
//             of an expert
//   numerics  weights and rows rounded to f16, sums f32, ascending: a result does not depend on the tile
//   see       ref_expert_gate_up, ref_expert_down
//
// A stage has 64 values (2 groups) of the rows and of the features:
//
//     rows      PAIRS x 128 bytes; chunk c of row r lies at c ^ r % 8          copied by all threads
//     warp 0    its 32 features: lo, hi, head, sup                             copied and decoded by warp 0 only
//     warp 1    ...
//
// Each warp decodes one group while the tensor cores multiply another (s: stage, g: group, h: half of the group):
//
//     decode     s, g1                             |  s + 1, g0
//     multiply   s, g0, h0   s, g0, h1   s, g1, h0 |  s, g1, h1
//                                                  barrier
//
// At the barrier stage s + 1 has arrived and stage s - 1 is free: the copy of stage s + stages - 1 starts there.
template <DType T, bool LARGE, bool WIDE>
__global__ void __launch_bounds__(ExpertsShape<T, LARGE, WIDE>::threads, ExpertsShape<T, LARGE, WIDE>::resident)
experts_kernel(const __grid_constant__ Experts o) {
    typedef ExpertsShape<T, LARGE, WIDE> Shape;
    constexpr int PAIRS = Shape::pairs, ROW_TILES = PAIRS / 16, AT_ONCE = Shape::threads / 8, COPIES = PAIRS / AT_ONCE;
    static_assert(PAIRS % AT_ONCE == 0, "a thread copies as many rows as any other");
    __shared__ int pair_of[PAIRS];
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, t = lane / 4, k = lane % 4;
    wait_for_previous_kernel();
    const PairTile tile = o.tiles[blockIdx.x / o.n_blocks];
    if (!tile.n) return;
    const int block_feature = blockIdx.x % o.n_blocks * Shape::warps * o.step, feature = block_feature + warp * o.step;
    const int n_row_tiles = div_up(tile.n, 16), n_stages = o.cols / STAGE_VALUES;
    for (int i = thread; i < PAIRS; i += Shape::threads) pair_of[i] = o.order[tile.first + min(i, tile.n - 1)];
    __syncthreads();                                   // pair_of
    unsigned from[COPIES];                             // first chunk of y for each row that the thread copies
    for (int i = 0; i < COPIES; i++)
        from[i] = (unsigned)quotient(pair_of[i * AT_ONCE + thread / 8], o.pairs_each) * (unsigned)(o.cols / 8) +
                  thread % 8;
    // after the last feature: computed and discarded
    const Features<T> features(o, tile.expert, feature < o.rows ? feature : 0);
    auto fetch = [&](int s) {
        char *stage = shared_bytes + s % Shape::stages * Shape::stage;
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            const int r = i * AT_ONCE + thread / 8;
            if (r < 16 * n_row_tiles)
                copy_ahead(stage + r * 128 + ((thread ^ r) & 7) * 16,
                           (const uint4 *)o.y + from[i] + s * (STAGE_VALUES / 8));
        }
        features.fetch(stage + Shape::features_at + warp * StageLayout<T>::bytes, s);
    };
#pragma unroll
    for (int s = 0; s < Shape::stages - 1; s++) {
        if (s < n_stages) fetch(s);
        copy_commit();
    }
    float sum[2][2 * ROW_TILES][4] = { };
    const int row_at = (lane / 16 * 8 + lane % 8) * 128, chunk_at = ((lane / 8 & 1) ^ (lane & 7)) * 16;
    auto stage_of = [&](int s) { return shared_bytes + s % Shape::stages * Shape::stage; };
    auto decode = [&](int s, int j, unsigned a[2][2][4]) {             // group j of a stage
        const char *own = stage_of(s) + Shape::features_at + warp * StageLayout<T>::bytes;
        __half2 am[2];
        if constexpr (!is_float(T)) features.scales(own, s, j, am);
        for (int half = 0; half < 2; half++) staged_weights<T>(own, half, j, am, a[half]);
    };
    auto multiply = [&](int s, int j, int h, unsigned a[2][2][4], auto all) {       // the h-th half of the group
        const char *const values = stage_of(s) + row_at + (chunk_at ^ (64 * j + 32 * h));
        unsigned b[2][4];
        load_matrices(b[0], values);
#pragma unroll
        for (int n = 0; n < ROW_TILES; n++) {
            if (!decltype(all)::value && n >= n_row_tiles) break;
            if (n + 1 < ROW_TILES) load_matrices(b[(n + 1) & 1], values + (n + 1) * 16 * 128);
            for (int half = 0; half < 2; half++)
                for (int i = 0; i < 2; i++) multiply_half(sum[half][2 * n + i], a[half][h], b[n & 1] + 2 * i);
        }
    };
    auto run = [&](auto all) {     // decodes weights while the tensor cores use the previous ones
        unsigned a[2][2][2][4];
        wait_for_copies<Shape::stages - 2>();
        __syncthreads();                               // all threads have the first stage
        decode(0, 0, a[0]);
#pragma unroll 1
        for (int s = 0; s < n_stages; s++) {
            decode(s, 1, a[1]);
            multiply(s, 0, 0, a[0], all);
            multiply(s, 0, 1, a[0], all);
            multiply(s, 1, 0, a[1], all);
            wait_for_copies<Shape::stages - 3>();
            __syncthreads();       // all have the next stage, and are done with the one before this
            if (s + Shape::stages - 1 < n_stages) fetch(s + Shape::stages - 1);
            copy_commit();
            decode(s + 1, 0, a[0]);                    // after the last stage: an old one, discarded
            multiply(s, 1, 1, a[1], all);
        }
    };
    if (n_row_tiles == ROW_TILES) run(std::true_type());
    else run(std::false_type());
    float factor[2];
    for (int h = 0; h < 2; h++) factor[h] = (o.factor[h] ? o.factor[h][tile.expert] : 1) / PROMPT_SCALE;
    if (o.products) {
#pragma unroll
        for (int n = 0; n < 2 * ROW_TILES; n++)
            for (int i = 0; i < 2; i++) {
                const int r = 8 * n + 2 * k + i;
                if (r >= tile.n || feature >= o.rows) continue;
                float *to = o.products + (size_t)pair_of[r] * o.rows + feature + t;
                for (int h = 0; h < 4; h++) to[8 * h] = factor[h / 2] * sum[h / 2][n][i + h % 2 * 2];
            }
        return;
    }
    float *const results = (float *)shared_bytes;
    wait_for_copies<0>();
    __syncthreads();                                   // the stages are no longer used
#pragma unroll
    for (int n = 0; n < 2 * ROW_TILES; n++)
        for (int i = 0; n < 2 * n_row_tiles && i < 4; i++)
            results[(8 * n + 2 * k + i % 2) * Shape::stride + MMA_ROWS * warp + t + i / 2 * 8] =
                activate(o.fn, factor[0] * sum[0][n][i]) * (factor[1] * sum[1][n][i]);
    __syncthreads();                                   // results are there
    constexpr int QUADS = MMA_ROWS * Shape::warps / 4;
    for (int i = thread; i < 16 * n_row_tiles * QUADS; i += Shape::threads) {   // the 8 lanes of a group stay together
        const int r = i / QUADS, c = i % QUADS * 4;
        const float4 v = *(const float4 *)(results + r * Shape::stride + c);
        const bool there = r < tile.n && block_feature + c < o.rows;
        const size_t to = (size_t)pair_of[r] * o.rows + block_feature + c;
        if (o.out.f && there) *(float4 *)(o.out.f + to) = v;
        if (!o.out.q) continue;
        float scale;
        const unsigned word = quantise4(v, &scale);
        if (there) *(unsigned *)(o.out.q + to) = word;
        if (there && c % 32 == 0) o.out.s[to / 32] = scale;
    }
}

// sum_pairs: out[r] = sum over j, ascending, of weights[r][j] * products[r][j]
//   shapes    products (n_rows, n_used, rows), weights (n_rows, n_used), out (n_rows, rows) with row stride `stride`
//   launch    grid (n_rows, ceil(rows / 1024)), block 256 or less: a thread takes four features
//   traffic   reads products once, from L2 if they fit there
__global__ void sum_pairs_kernel(const float *products, const float *weights, int n_used, int rows, float *out,
                                 int stride) {
    wait_for_previous_kernel();
    const int i = (blockIdx.y * blockDim.x + threadIdx.x) * 4;
    if (i >= rows) return;
    const size_t pair = (size_t)blockIdx.x * n_used;
    float4 sum = { 0, 0, 0, 0 };
#pragma unroll 8
    for (int j = 0; j < n_used; j++) {
        const float4 product = __ldcg((const float4 *)(products + (pair + j) * rows + i));
        sum = add4(sum, scale4(product, weights[pair + j]));
    }
    *(float4 *)(out + (size_t)blockIdx.x * stride + i) = sum;
}

typedef struct {              // an instance of experts_kernel
    void (*run)(Experts);
    int    tile, warps, stages, shared;        // pairs of a tile, warps of a block, stages; bytes of shared memory
} ExpertsPlan;

template <bool LARGE, bool WIDE> static ExpertsPlan experts_plan_of(DType t) {
    switch (t) {
#define CASE(T, ...) \
    case T: { \
        typedef ExpertsShape<T, LARGE, WIDE> Shape; \
        return (ExpertsPlan){ experts_kernel<T, LARGE, WIDE>, Shape::pairs, Shape::warps, Shape::stages, \
                              Shape::bytes }; \
    }
    QUANTISED_TYPES(CASE) FLOAT_TYPES(CASE)
#undef CASE
    }
    return (ExpertsPlan){ };
}

// Wide blocks where two of them fit on an SM; large tiles where experts have enough rows.
static ExpertsPlan experts_plan(DType t, bool large) {
    const bool wide = 2 * ((int)WIDE_SHARED + (int)BLOCK_SYSTEM) <= cuda.card.sm_shared;
    return large ? wide ? experts_plan_of<true, true>(t) : experts_plan_of<true, false>(t)
                 : wide ? experts_plan_of<false, true>(t) : experts_plan_of<false, false>(t);
}

static void allow_experts(void) {
    for (int t = 0; t <= T_NVFP4; t++)
        for (const ExpertsPlan p : { experts_plan((DType)t, false), experts_plan((DType)t, true) })
            if (p.run) CHECK_CUDA(cudaFuncSetAttribute(p.run, cudaFuncAttributeMaxDynamicSharedMemorySize, p.shared),
                                  "shared memory of experts");
}

// Does experts_kernel compute this step? w, and `up` if it is a matrix of its own, with `rows` output features; n_each:
// rows of the input for each row of the step. If not, the kernels of few rows do.
static bool takes_prompt(const Tensor *w, const Tensor *up, int rows, int n_rows, int n_each) {
    return n_rows > STEP_ROWS && rows % 32 == 0 && w->cols % STAGE_VALUES == 0 && w->n <= MAX_PROMPT_EXPERTS &&
           (!up || up->type == w->type) && n_each * w->cols <= cuda.lim.max_cols;
}

// Sorts the pairs and sets what gate and up share with down. y has one row for n_each pairs.
static Experts sorted_experts(const Tensor *w, const int32_t *ids, int n_pairs, const __half *y, int n_each,
                              ExpertsPlan *plan) {
    Experts o = { };
    o.w[0] = o.w[1] = planes_of(w);
    o.rows_e = w->rows;
    o.cols = w->cols;
    o.y = y;
    o.pairs_each = divisor(n_each);
    o.order = cuda.order;
    o.tiles = cuda.tiles;
    o.factor[0] = o.factor[1] = w->scale;
    *plan = experts_plan(w->type, n_pairs > SMALL_TILE * w->n);
    launch(WRITES_ACTIVATIONS, sort_pairs_kernel, w->n, SORT_THREADS, 0, ids, n_pairs, plan->tile, cuda.order,
           cuda.tiles);
    CHECK_LAUNCH("sort_pairs n_pairs=%d experts=%d", n_pairs, w->n);
    return o;
}

static void launch_experts(const ExpertsPlan *p, Experts *o, const Tensor *w, int n_pairs, const char *what) {
    o->n_blocks = div_up(o->rows, o->step * p->warps);
    const int blocks = o->n_blocks * most_tiles(n_pairs, w->n, p->tile);
    report_plan("experts", blocks, 32 * p->warps, p->shared, 0, "%d pairs, %d stages", p->tile, p->stages);
    launch(WRITES_ACTIVATIONS, p->run, blocks, 32 * p->warps, p->shared, *o);
    CHECK_LAUNCH("%s n_pairs=%d rows=%d cols=%d type=%d", what, n_pairs, o->rows, o->cols, (int)w->type);
}

static void expert_gate_up_prompt(const ExpertGateUp *op) {
    const int n_pairs = op->n_rows * op->n_used;
    Tensor w[2] = { *op->gate, op->up ? *op->up : (Tensor){ } };
    bring(w, 2, op->n_rows);
    const __half *y = prompt_input(&op->in, op->n_rows, op->gate->cols, true);
    ExpertsPlan plan;
    Experts o = sorted_experts(&w[0], op->ids, n_pairs, y, op->n_used, &plan);
    o.step = MMA_ROWS;
    o.rows = op->up ? op->gate->rows : op->gate->rows / 2;
    if (op->up) o.w[1] = planes_of(&w[1]), o.factor[1] = op->up->scale;
    else o.first[1] = o.rows;
    o.fn = op->fn;
    o.out = op->out;
    launch_experts(&plan, &o, op->gate, n_pairs, "expert_gate_up");
}

// As many features at a time as scratch holds products of all pairs.
static void expert_down_prompt(const ExpertDown *op) {
    const int n_pairs = op->n_rows * op->n_used, rows = op->down->rows;
    const int most = (int)(PARTIAL_BYTES / sizeof(float) / n_pairs);
    const In in = { .act = op->in };
    const __half *y = prompt_input(&in, n_pairs, op->down->cols, true);
    const Tensor down = brought(op->down, op->n_rows);
    ExpertsPlan plan;
    Experts o = sorted_experts(&down, op->ids, n_pairs, y, 1, &plan);
    o.step = 2 * MMA_ROWS;
    o.products = cuda.partial;
    const int whole = 32 * plan.warps, unit = most < whole ? 32 : whole, step = most / unit * unit;
    for (int first = 0; first < rows; first += step) {
        o.first[0] = first, o.first[1] = first + MMA_ROWS;
        o.rows = min_int(step, rows - first);
        launch_experts(&plan, &o, op->down, n_pairs, "expert_down");
        launch(WRITES_ACTIVATIONS, sum_pairs_kernel, dim3(op->n_rows, div_up(o.rows, 1024)),
               min_int(256, div_up(o.rows, 128) * 32),
               0, o.products, op->weights, op->n_used, o.rows, op->out + first, rows);
        CHECK_LAUNCH("sum_pairs n_rows=%d rows=%d", op->n_rows, o.rows);
    }
}

// ---- the operations made of products ----

static void cuda_matmul(const Matmul *o) {
    if (o->n_rows > STEP_ROWS) {
        const __half *y = prompt_input(&o->in, o->n_rows, o->w[0]->cols, false);
        for (int k = 0; k < o->n; k++) {
            const Tensor w = brought(o->w[k], o->n_rows);
            multiply_prompt(&w, y, o->n_rows, o->out[k]);
        }
        return;
    }
    bool f = false, q = false;
    Tensor w[MAX_PRODUCTS];
    for (int k = 0; k < o->n; k++) {
        w[k] = *o->w[k];
        f |= is_float(w[k].type), q |= !is_float(w[k].type);
    }
    bring(w, o->n, o->n_rows);
    Jobs jobs = { };
    const Prepared y = prepare_one(&jobs, &o->in, o->n_rows, w[0].cols, f, q);
    for (int k = 0; k < o->n; k++) {
        Job job = job_of(&w[k], y, o->n_rows);
        job.out = o->out[k];
        add_job(&jobs, job);
    }
    launch_jobs(&jobs, "matmul", o->n_rows);
}

// Adds the router's product to a launch, on input number `source`, or on y if that is in global memory.
static void add_router(Jobs *jobs, const Route *o, Prepared y, int source) {
    Job job = job_of(o->w, y, o->n_rows);
    job.out = o->logits;
    job.source = source;
    add_job(jobs, job);
}

static Choice choice_of(const Route *o) {
    if (o->n_used > 32) cuda_die("route: expected up to 32 experts for a row, got %d", o->n_used);
    return (Choice){ o->w->rows, o->n_used, o->logits, o->expert_scale, o->ids, o->weights };
}

static void launch_choice(const Choice *o, int n_rows) {
    launch(WRITES_ACTIVATIONS, choose_kernel, n_rows, 32, 0, *o);
    CHECK_LAUNCH("route n_rows=%d experts=%d", n_rows, o->n);
}

static void cuda_route(const Route *o) {
    const bool f = is_float(o->w->type);
    const Choice choice = choice_of(o);
    Jobs jobs = { };
    add_router(&jobs, o, prepare_one(&jobs, &o->in, o->n_rows, o->w->cols, f, !f), 0);
    launch_jobs(&jobs, "route", o->n_rows);
    launch_choice(&choice, o->n_rows);
}

static DType up_type_of(const ExpertGateUp *o) { return o->up ? o->up->type : o->gate->type; }

// An input that matrices of these types are multiplied with.
static Wanted wanted_by(const In *in, DType a, DType b) {
    return (Wanted){ in, is_float(a) || is_float(b), !is_float(a) || !is_float(b) };
}

// choice: the router's, which is not made yet; NULL: it is. Blocks that compute one or two rows make it for themselves:
// that ends earlier than a launch, or than a block that waits until it is the last.
static void run_experts(const ExpertGateUp *o, const Choice *choice) {
    const bool fused = !o->up;
    if (choice && (o->n_rows >= MANY_ROWS || o->gate->in_host)) launch_choice(choice, o->n_rows), choice = NULL;
    if (takes_prompt(o->gate, o->up, fused ? o->gate->rows / 2 : o->gate->rows, o->n_rows, 1)) {
        expert_gate_up_prompt(o);
        if (o->dense_down) cuda_matmul(o->dense_down);
        return;
    }
    const bool with = o->dense_down && o->dense_down->n_rows <= STEP_ROWS &&
        (o->dense_down->in.act.f || o->dense_down->in.act.q);
    const DType up_type = up_type_of(o);
    Tensor w[2] = { *o->gate, fused ? *o->gate : *o->up };
    const int32_t *ids = fetch_experts(w, fused ? 1 : 2, o->ids, o->n_rows, o->n_used);
    Jobs jobs = { };
    const Wanted in = wanted_by(&o->in, o->gate->type, up_type);
    Job job = job_of(&w[0], prepare_one(&jobs, in.in, o->n_rows, o->gate->cols, in.f, in.q), o->n_rows);
    job.kind = JOB_GATED;
    job.rows = fused ? o->gate->rows / 2 : o->gate->rows;
    job.up_first = fused ? job.rows : 0;
    job.up_type = up_type;
    job.up = fused ? job.w : planes_of(&w[1]);
    job.up_factor = w[fused ? 0 : 1].scale;
    job.fn = o->fn;
    job.ids = ids;
    job.n_used = o->n_used;
    job.act = o->out;
    add_job(&jobs, job);
    if (choice) jobs.choice = *choice;
    if (with)
        for (int k = 0; k < o->dense_down->n; k++) {
            const Act a = o->dense_down->in.act;
            Job down = job_of(o->dense_down->w[k], (Prepared){ a.f, a.q, a.s, NULL }, o->dense_down->n_rows);
            down.out = o->dense_down->out[k];
            add_job(&jobs, down);
        }
    launch_jobs(&jobs, "expert_gate_up", o->n_rows);
    if (o->dense_down && !with) cuda_matmul(o->dense_down);
}

static void cuda_expert_gate_up(const ExpertGateUp *o) { run_experts(o, NULL); }

// The experts that follow read the same x'. If a kernel prepares the input of gate and up, it prepares theirs as well.
static void cuda_gate_up(const GateUp *o) {
    const int cols = o->gate->cols;
    Tensor w[2] = { *o->gate, *o->up };
    bring(w, 2, o->n_rows);
    if (o->n_rows > STEP_ROWS) {
        const __half *y = prompt_input(&o->in, o->n_rows, cols, false);
        multiply_gated(&w[0], &w[1], NULL, 0, o->fn, y, o->n_rows, o->out);
        if (o->route) cuda_route(o->route);
        if (o->experts) cuda_expert_gate_up(o->experts);
        return;
    }
    const Route *route = o->in.act.f || o->in.act.q ? NULL : o->route;     // in the same launch
    ExpertGateUp experts = { };
    Wanted wanted[MAX_READERS] = { wanted_by(&o->in, o->gate->type, o->up->type) };
    int n = 1;
    if (route) wanted[n++] = wanted_by(&route->in, route->w->type, route->w->type);
    if (o->experts) experts = *o->experts;
    if (o->experts && route) wanted[n++] = wanted_by(&experts.in, experts.gate->type, up_type_of(&experts));
    Jobs jobs = { };
    Prepared y[MAX_READERS];
    prepare(&jobs, wanted, n, o->n_rows, cols, y);
    Job job = job_of(&w[0], y[0], o->n_rows);
    job.kind = JOB_GATED;
    job.up_type = o->up->type;
    job.up = planes_of(&w[1]);
    job.up_factor = o->up->scale;
    job.fn = o->fn;
    job.act = o->out;
    add_job(&jobs, job);
    if (route) add_router(&jobs, route, y[1], 1);
    launch_jobs(&jobs, "gate_up", o->n_rows);
    if (o->route && !route) cuda_route(o->route);
    const Choice choice = route ? choice_of(route) : (Choice){ };
    const bool chosen = route && o->experts && experts.ids == route->ids && experts.n_used == route->n_used;
    if (route && !chosen) launch_choice(&choice, o->n_rows);
    if (y[2].f || y[2].q) experts.in = (In){ .act = { y[2].f, y[2].q, y[2].s } };
    if (o->experts) run_experts(&experts, chosen ? &choice : NULL);
}

static void cuda_expert_down(const ExpertDown *o) {
    if (takes_prompt(o->down, NULL, o->down->rows, o->n_rows, o->n_used)) {
        expert_down_prompt(o);
        return;
    }
    Jobs jobs = { };
    Tensor w = *o->down;
    const int32_t *ids = fetch_experts(&w, 1, o->ids, o->n_rows, o->n_used);
    Job job = job_of(&w, (Prepared){ o->in.f, o->in.q, o->in.s, NULL }, o->n_rows);
    job.kind = JOB_DOWN;
    job.ids = ids;
    job.weights = o->weights;
    job.n_used = o->n_used;
    job.out = o->out;
    add_job(&jobs, job);
    launch_jobs(&jobs, "expert_down", o->n_rows);
}

static void cuda_ple_inject(const PleInject *o) {
    const Tensor w = brought(o->w, o->n_rows);
    if (o->n_rows > STEP_ROWS) {
        const __half *y = prompt_input(&o->in, o->n_rows, o->w->cols, false);
        multiply_gated(&w, NULL, o->u, o->u_stride, ACT_GELU, y, o->n_rows, o->out);
        return;
    }
    const bool f = is_float(o->w->type);
    Jobs jobs = { };
    Job job = job_of(&w, prepare_one(&jobs, &o->in, o->n_rows, o->w->cols, f, !f), o->n_rows);
    job.kind = JOB_INJECT;
    job.fn = ACT_GELU;
    job.u = o->u;
    job.u_stride = o->u_stride;
    job.act = o->out;
    add_job(&jobs, job);
    launch_jobs(&jobs, "ple_inject", o->n_rows);
}

// ==== [7] Cache: store, commit, copy =================================================================================
// A row is written once, in the type of the cache, and read from there.

#define KV_CODE __device__ static inline
#define KV_LANE ((int)threadIdx.x % 32)
#define KV_LANES 32
#define KV_SUM(n) __reduce_add_sync(~0u, n)
#define KV_MAX(x) warp_max(x)
#define KV_SYNC() __syncwarp()
#define KV_TO_HALF(x) __half_as_ushort(__float2half_rn(x))
#define KV_FROM_HALF(h) __half2float(__ushort_as_half(h))
#include "parts/kv.h"

static bool is_coded(const Cache *c) { return kv_group(c->k.type) || kv_group(c->v.type); }

// Row `slot` of one head, and its scales.
__device__ static inline char *kv_row(const Cache &c, const KvPlane &p, int seq, int head, int slot) {
    return (char *)p.data + (((size_t)seq * c.n_kv_heads + head) * c.slots + slot) * kv_row_bytes(p.type, p.dim);
}
__device__ static inline uint16_t *kv_scales(const Cache &c, const KvPlane &p, int seq, int head, int slot) {
    return (uint16_t *)p.scale +
        (((size_t)seq * c.n_kv_heads + head) * c.slots + slot) * (kv_scale_bytes(p.type, p.dim) / 2);
}

// The tail of a cache (its newest rows in f16) as a cache of its own.
HOST_DEVICE static inline Cache tail_of(const Cache &c) {
    Cache tail = c;
    tail.k = c.k_tail, tail.v = c.v_tail, tail.slots = c.tail_slots;
    return tail;
}

// Four values as halves, the first one in the low bits.
__device__ static inline uint2 halves_of(float4 v) {
    const __half2 h[2] = { __halves2half2(__float2half_rn(v.x), __float2half_rn(v.y)),
                           __halves2half2(__float2half_rn(v.z), __float2half_rn(v.w)) };
    uint2 both;
    memcpy(&both, h, sizeof both);
    return both;
}

// Writes values i .. i + 3 of a row; i is a multiple of 4.
__device__ static inline void kv_write4(const KvPlane &p, char *row, int i, float4 v) {
    if (p.type == KV_F32) {
        *(float4 *)((float *)row + i) = v;
    } else if (p.type == KV_F16) {
        *(uint2 *)((__half *)row + i) = halves_of(v);
    } else {
        __nv_bfloat16 *to = (__nv_bfloat16 *)row + i;
        to[0] = __float2bfloat16_rn(v.x), to[1] = __float2bfloat16_rn(v.y);
        to[2] = __float2bfloat16_rn(v.z), to[3] = __float2bfloat16_rn(v.w);
    }
}

// What remains of four values after they are rounded to f16.
__device__ static inline float4 half_residue(float4 v) {
    auto less = [](float v) { return __fsub_rn(v, __half2float(__float2half_rn(v))); };
    return make_float4(less(v.x), less(v.y), less(v.z), less(v.w));
}

// Values i and i + 1 of a row as stored (quantised rows are Hadamard-rotated); i is even.   scales: of the row
__device__ static inline float2 kv_read2(KvType t, const char *row, const uint16_t *scales, int i) {
    if (kv_group(t)) return make_float2(kv_value(t, row, scales, i), kv_value(t, row, scales, i + 1));
    if (t == KV_F32) return *(const float2 *)((const float *)row + i);
    if (t == KV_F16) return __half22float2(*(const __half2 *)((const __half *)row + i));
    return __bfloat1622float2(*(const __nv_bfloat162 *)((const __nv_bfloat16 *)row + i));
}

// The place of value i of a head in the tied order (gemma4.h, Cache).
__device__ static inline int tied_place(int i, int head_dim, int n_rot) {
    const int half = head_dim / 2, second = i >= half, j = i - second * half;
    return j < n_rot ? second * n_rot + j : 2 * n_rot + second * (half - n_rot) + j - n_rot;
}

// ---- one head of q, k or v, held by a warp ----
// If a step has few rows, attention itself makes q and the new rows of K and V with the same functions, so the bits are
// those of qkv_store. Every rounding is written out, so the compiler contracts the same way everywhere.

// Lane l holds values 4 l + 128 m + 0..3 of the first half of the head (lo) and of the second half (hi): both members
// of a RoPE pair. M of each cover half = head_dim / 2 values. Values after the end are 0. A head is a multiple of 8
// values; the number of pairs that RoPE rotates is a multiple of 4.
template <int M> struct HeadValues { float4 lo[M], hi[M]; };

template <int M> __device__ static inline void head_load(HeadValues<M> &x, const float *from, int half) {
#pragma unroll
    for (int m = 0; m < M; m++) {
        const int i = 4 * (threadIdx.x % 32) + 128 * m;
        x.lo[m] = i < half ? *(const float4 *)(from + i) : make_float4(0, 0, 0, 0);
        x.hi[m] = i < half ? *(const float4 *)(from + i + half) : make_float4(0, 0, 0, 0);
    }
}

// u becomes w * u / rms(u); w == NULL: w is 1.
template <int M> __device__ static inline void head_norm(HeadValues<M> &x, const float *w, int half, float eps) {
    float ss = 0;
    auto add = [&](float lo, float hi) { ss = __fmaf_rn(hi, hi, __fmaf_rn(lo, lo, ss)); };
#pragma unroll
    for (int m = 0; m < M; m++) {
        add(x.lo[m].x, x.hi[m].x);
        add(x.lo[m].y, x.hi[m].y);
        add(x.lo[m].z, x.hi[m].z);
        add(x.lo[m].w, x.hi[m].w);
    }
    const float scale = __frcp_rn(__fsqrt_rn(__fadd_rn(__fdiv_rn(warp_sum(ss), 2 * half), eps)));
#pragma unroll
    for (int m = 0; m < M; m++) {
        const int i = 4 * (threadIdx.x % 32) + 128 * m;
        const float4 all = make_float4(scale, scale, scale, scale);
        x.lo[m] = multiply4(x.lo[m], all);
        x.hi[m] = multiply4(x.hi[m], all);
        if (!w || i >= half) continue;
        x.lo[m] = multiply4(x.lo[m], *(const float4 *)(w + i));
        x.hi[m] = multiply4(x.hi[m], *(const float4 *)(w + i + half));
    }
}

// Cosine and sine of the angle pos * inv_freq of a pair. The angle is reduced to a part of a revolution in f64; the
// rest is f32.
__device__ static inline void angle_of(double inv_freq, int pos, float *cosine, float *sine) {
    const double revolutions = __dmul_rn(__dmul_rn(pos, inv_freq), 0.15915494309189535);
    sincospif(2 * (float)(revolutions - rint(revolutions)), sine, cosine);
}

// RoPE: rotates the pairs by their angles: `half` cosines, then `half` sines, in shared memory. One table serves all
// heads of a row.
template <int M> __device__ static inline void head_rope(HeadValues<M> &x, const float *angles, int n_pairs, int half) {
    auto rotate = [](float &p, float &q, float cosine, float sine) {
        const float u = p, v = q;
        p = __fmaf_rn(u, cosine, -__fmul_rn(v, sine));
        q = __fmaf_rn(u, sine, __fmul_rn(v, cosine));
    };
#pragma unroll
    for (int m = 0; m < M; m++) {
        const int i = 4 * (threadIdx.x % 32) + 128 * m;
        if (i >= n_pairs) continue;
        const float4 cosine = *(const float4 *)(angles + i), sine = *(const float4 *)(angles + half + i);
        rotate(x.lo[m].x, x.hi[m].x, cosine.x, sine.x);
        rotate(x.lo[m].y, x.hi[m].y, cosine.y, sine.y);
        rotate(x.lo[m].z, x.hi[m].z, cosine.z, sine.z);
        rotate(x.lo[m].w, x.hi[m].w, cosine.w, sine.w);
    }
}

// Calls f(place in the cache's order, index in the head, four values) for all values of a head. n_rot 0: both are
// equal.
template <int M, typename F> __device__ static inline void head_each(const HeadValues<M> &x, int half, int n_rot, F f) {
#pragma unroll
    for (int m = 0; m < M; m++) {
        const int i = 4 * (threadIdx.x % 32) + 128 * m;
        if (i >= half) continue;
        f(i + (i < n_rot ? 0 : n_rot), i, x.lo[m]);
        f(i + (i < n_rot ? n_rot : half), i + half, x.hi[m]);
    }
}

// Values i .. i + 3 of a query. Tied: the part of K without RoPE is r * fold; q is multiplied with fold instead.
__device__ static inline float4 folded(int n_rot, const float *fold, int half, int i, float4 v) {
    return n_rot && (i < half ? i : i - half) >= n_rot ? multiply4(v, *(const float4 *)(fold + i)) : v;
}

static __device__ inline void dump_head(float *dump, size_t at, const HeadValues<2> &x, int half) {
    if (dump) head_each(x, half, 0, [&](int, int i, float4 v) { *(float4 *)(dump + at + i) = v; });
}

// Warps that write a head of a plane: one, or one for each group of 128 values of a quantised type.
HOST_DEVICE static inline int groups_of(const KvPlane &p) { return kv_group(p.type) ? p.dim / KV_ROTATION : 1; }

// Shared memory of a warp that rotates and encodes a head.
typedef struct { float y[512]; uint8_t code[KV_ROTATION]; } StoreSmem;

// Writes a row of K or V (of a quantised plane: one group of it) to its slot and to the tail. x: the head.
template <bool CODED, int M>
__device__ static inline void store_row(const HeadValues<M> &x, const Cache &c, const Cache &dst, bool is_k, int seq,
                                        int h, int slot, int tail_slot, int group, StoreSmem *room) {
    const KvPlane &p = is_k ? dst.k : dst.v;
    const int half = c.head_dim / 2, lane = threadIdx.x % 32;
    char *row = kv_row(dst, p, seq, h, slot);
    const Cache tail = CODED ? tail_of(c) : Cache{};
    const KvPlane &tail_plane = is_k ? tail.k : tail.v;
    char *tail_row = CODED && tail_slot >= 0 ? kv_row(tail, tail_plane, seq, h, tail_slot) : NULL;
    if (!CODED || !kv_group(p.type)) {
        head_each(x, half, c.n_rot, [&](int to, int, float4 v) {
            if (to >= p.dim) return;
            kv_write4(p, row, to, v);
            if (tail_row) kv_write4(tail_plane, tail_row, to, v);
        });
        return;
    }
    float *y = room->y + group * KV_ROTATION;
    head_each(x, half, c.n_rot, [&](int to, int, float4 v) { *(float4 *)(room->y + to) = v; });
    kv_rotate(y, 0.0625f);
    if (tail_row) kv_write4(tail_plane, tail_row, group * KV_ROTATION + 4 * lane, *(const float4 *)(y + 4 * lane));
    kv_encode(p.type, is_k || c.n_rot, y, room->code, (uint32_t *)(row + kv_row_bytes(p.type, group * KV_ROTATION)),
              kv_scales(dst, p, seq, h, slot) + group * KV_ROTATION / kv_group(p.type));
}

// qkv_store: head norms, RoPE, order of the cache, Hadamard rotation, write. A warp handles a head of q, K or V; in
// quantised types one group of 128 values of it.
//   shapes    as QkvStore; head_dim <= 512, a multiple of 8
//   launch    grid (n_rows, ceil(warps / 4)), block 128; warps: a head of q each, and for every KV head groups_of(k) +
//             groups_of(v)
//   traffic   reads and writes q, reads k and v (CODED: once per group), writes a row of each plane
//   numerics  f32; angles are reduced to a revolution in f64; sine and cosine are f32, made once for the four heads
//   see       ref_qkv_store
template <bool CODED>
__global__ void qkv_store_kernel(QkvStore o, Batch b, Cache c, Cache dst, bool staged) {
    wait_for_previous_kernel();
    __shared__ __align__(16) float angles[512];
    __shared__ __align__(16) StoreSmem rooms[CODED ? 4 : 1];
    const int hd = c.head_dim, half = hd / 2, r = blockIdx.x, n_q = o.q ? o.n_heads : 0, n_kv = o.k ? c.n_kv_heads : 0;
    const int job = blockIdx.y * 4 + threadIdx.x / 32, k_jobs = n_kv * (CODED ? groups_of(dst.k) : 1);
    const int v_jobs = n_kv * (CODED ? groups_of(dst.v) : 1);
    const Row row = b.rows[r];
    const Segment seg = b.segs[row.seg];
    const int len = b.len[seg.seq], pos = len + row.depth;
    StoreSmem *room = &rooms[CODED ? threadIdx.x / 32 : 0];
    for (int i = threadIdx.x; i < o.rope.n_pairs; i += blockDim.x)
        angle_of(o.rope.inv_freq[i], pos, &angles[i], &angles[half + i]);
    __syncthreads();
    if (job >= n_q + k_jobs + v_jobs) return;
    HeadValues<2> x;
    if (job < n_q) {
        const size_t at = ((size_t)r * n_q + job) * hd;
        const bool rotates = CODED && kv_group(c.k.type);
        float *q = o.q + at, *to_q = rotates ? room->y : q;
        head_load(x, q, half);
        head_norm(x, o.w_q, half, o.eps);
        dump_head(o.dump_q, at, x, half);
        head_rope(x, angles, o.rope.n_pairs, half);
        dump_head(o.dump_q_pos, at, x, half);
        // in place: all values were loaded before the norm's sum was known
        head_each(x, half, c.n_rot, [&](int to, int i, float4 v) {
            *(float4 *)(to_q + to) = folded(c.n_rot, c.fold, half, i, v);
        });
        for (int g = 0; rotates && g < hd; g += KV_ROTATION) kv_rotate(room->y + g, 0.125f);
        for (int i = 4 * (threadIdx.x % 32); rotates && i < hd; i += 128)
            *(float4 *)(q + i) = *(const float4 *)(room->y + i);
        return;
    }
    const bool is_k = job - n_q < k_jobs;
    const int number = job - n_q - (is_k ? 0 : k_jobs), groups = CODED ? groups_of(is_k ? dst.k : dst.v) : 1;
    const int h = number / groups, group = number - h * groups;
    const int slot = staged ? seg.first + row.index : (len + row.index) % c.slots;
    const size_t at = ((size_t)r * n_kv + h) * hd;
    head_load(x, (is_k ? o.k : o.v) + at, half);
    if (is_k || o.v_norm) head_norm(x, is_k ? o.w_k : NULL, half, o.eps);
    if (group == 0) dump_head(is_k ? o.dump_k : o.dump_v, at, x, half);
    if (is_k) {
        head_rope(x, angles, o.rope.n_pairs, half);
        if (group == 0) dump_head(o.dump_k_pos, at, x, half);
    }
    const int tail_slot = CODED && c.tail_slots ? (len + row.index) % c.tail_slots : -1;
    store_row<CODED>(x, c, dst, is_k, staged ? 0 : seg.seq, h, slot, tail_slot, group, room);
}
static void cuda_qkv_store(const QkvStore *o) {
    const Cache *c = o->cache, *dst = o->staging ? o->staging : c;
    const int heads = (o->q ? o->n_heads : 0) + (o->k ? c->n_kv_heads * (groups_of(dst->k) + groups_of(dst->v)) : 0);
    if (c->head_dim > 512 || c->head_dim % 8 || c->n_rot % 4 || o->rope.n_pairs % 4)
        cuda_die("qkv_store: heads of %d values, %d pairs with RoPE, are not supported", c->head_dim, o->rope.n_pairs);
    if (!heads) return;
    launch(WRITES_ACTIVATIONS | WRITES_CACHE, is_coded(c) ? qkv_store_kernel<true> : qkv_store_kernel<false>,
           dim3(o->batch->n_rows, div_up(heads, 4)), 128, 0, *o, *o->batch, *c, *dst, o->staging != NULL);
    CHECK_LAUNCH("qkv_store n_rows=%d heads=%d head_dim=%d", o->batch->n_rows, heads, c->head_dim);
}

enum { CACHES_AT_ONCE = 12 }; // caches that fit in the arguments of one launch
typedef struct { Cache c[CACHES_AT_ONCE]; } Caches;

// One field of a plane as kv_move sees it: the rows, or their scales, of head `head` of a session, n words of 16 bits
// each.
typedef struct { uint16_t *rows; int n; } KvWords;

__device__ static inline KvWords words_of(const Cache &c, const KvPlane &p, bool scales, int seq, int head) {
    if (scales) return (KvWords){ kv_scales(c, p, seq, head, 0), (int)(kv_scale_bytes(p.type, p.dim) / 2) };
    return (KvWords){ (uint16_t *)kv_row(c, p, seq, head, 0), (int)(kv_row_bytes(p.type, p.dim) / 2) };
}

// kv_move: moves the rows of an accepted tree path to slots len, len + 1, ...
//   launch    grid (n_segs, caches, kv heads), block 256: a thread moves one word of 16 bits of every row
//   traffic   reads and writes the accepted rows once
//   see       ref_kv_commit
//
// Example: len = 10, a ring of 12 slots, path = rows 0, 2, 5 of the segment:
//
//     slot     10   11   0    1    2    3           row i lies in slot (len + i) % slots
//     before   r0   r1   r2   r3   r4   r5
//     after    r0   r2   r5   ..                    row path[k] moves to slot (len + k) % slots
//
// path[k] ascends, so path[k] >= k: step k overwrites row k, which no later step reads. A thread moves its word in all
// steps, so no barrier is needed. The fields of a cache, and of its tail, are numbered:
//
//     field   0 K rows   1 K scales   2 V rows   3 V scales   4..7 the same of the tail
__global__ void kv_move_kernel(Batch b, const __grid_constant__ Caches caches, const int32_t *n_accept,
                               const int32_t *path) {
    wait_for_previous_kernel();
    const Segment seg = b.segs[blockIdx.x];
    const Cache &cache = caches.c[blockIdx.y];
    if (seg.kind != SEG_TREE || (int)blockIdx.z >= cache.n_kv_heads) return;
    const int len = b.len[seg.seq];
    for (int field = 0; field < (cache.tail_slots ? 8 : 4); field++) {
        const Cache c = field < 4 ? cache : tail_of(cache);
        const KvWords w = words_of(c, field / 2 % 2 ? c.v : c.k, field % 2, seg.seq, blockIdx.z);
        for (int i = threadIdx.x; i < w.n; i += blockDim.x)
            for (int k = 0; k < n_accept[blockIdx.x]; k++) {
                const int from = path[blockIdx.x * STEP_ROWS + k];
                w.rows[(size_t)((len + k) % c.slots) * w.n + i] = w.rows[(size_t)((len + from) % c.slots) * w.n + i];
            }
    }
}

// kv_lengths: adds the accepted tokens to counts and len, after all kernels that read len.
//   launch    grid n_segs, block 32
__global__ void kv_lengths_kernel(Batch b, const int32_t *n_accept, const int32_t *path, int32_t *counts, int vocab) {
    wait_for_previous_kernel();
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
            heads = max_int(heads, caches.c[k].n_kv_heads);
        }
        launch(WRITES_CACHE, kv_move_kernel, dim3(o->batch->n_segs, n, heads), 256, 0, *o->batch, caches, o->n_accept,
               o->path);
        CHECK_LAUNCH("kv_commit n_segs=%d n_caches=%d", o->batch->n_segs, o->n_caches);
    }
    launch(WRITES_ROWS, kv_lengths_kernel, o->batch->n_segs, 32, 0, *o->batch, o->n_accept, o->path, o->counts,
           o->vocab);
    CHECK_LAUNCH("kv_commit n_segs=%d", o->batch->n_segs);
}

// kv_copy: staged rows -> ring, the last min(n, slots) rows of every segment.
//   shapes    a row of a head is a multiple of 16 bytes
//   launch    grid n_rows, block 256: one row of the step; threads copy 16 bytes of its heads, then 2 bytes of scales
//   traffic   reads and writes every copied row once
//   see       ref_kv_copy
__global__ void kv_copy_kernel(Batch b, Cache c, Cache stage) {
    wait_for_previous_kernel();
    const Row row = b.rows[blockIdx.x];
    const Segment seg = b.segs[row.seg];
    if (row.index < seg.n - c.slots) return;
    const int slot = (b.len[seg.seq] + row.index) % c.slots, from_slot = seg.first + row.index;
    for (int plane = 0; plane < 2; plane++) {
        const KvPlane &p = plane ? c.v : c.k, &from = plane ? stage.v : stage.k;
        const int words = (int)(kv_row_bytes(p.type, p.dim) / sizeof(uint4));
        const int scales = (int)(kv_scale_bytes(p.type, p.dim) / 2);
        for (int i = threadIdx.x; i < c.n_kv_heads * words; i += blockDim.x)
            ((uint4 *)kv_row(c, p, seg.seq, i / words, slot))[i % words] =
                ((const uint4 *)kv_row(stage, from, 0, i / words, from_slot))[i % words];
        for (int i = threadIdx.x; i < c.n_kv_heads * scales; i += blockDim.x)
            kv_scales(c, p, seg.seq, i / scales, slot)[i % scales] =
                kv_scales(stage, from, 0, i / scales, from_slot)[i % scales];
    }
}
static void cuda_kv_copy(const KvCopy *o) {
    launch(WRITES_CACHE, kv_copy_kernel, o->batch->n_rows, 256, 0, *o->batch, *o->cache, *o->staging);
    CHECK_LAUNCH("kv_copy n_rows=%d", o->batch->n_rows);
}

// ==== [8] Attention ==================================================================================================
// Keys are numbered in the order of the cache: committed positions, then the rows of the step. Key j below len is
// position j, key len + i is row i of the segment. Tiles of KEYS keys are aligned to key 0; 2^span_bits tiles are a
// span; span s belongs to split s mod n. A block computes one split, its tiles in ascending order; then the splits are
// combined in the order of their spans. All this follows from the shape of the cache alone. So a row's result depends
// neither on the other rows of the step, nor on how many keys are committed already, nor on the card.
//
// Example: spans of 2 tiles, 3 splits, a row that sees keys 100..299, that is tiles 3..9:
//
//     tile     0  1  |  2  3  |  4  5  |  6  7  |  8  9  | 10 11
//     span       0   |    1   |    2   |    3   |    4   |   5
//     split      0   |    1   |    2   |    0   |    1   |   2
//     seen           |     x  |  x  x  |  x  x  |  x  x  |            spans_of: first 1, n 4, first_split 1, live 3
//
//     Split 1 has spans 1 and 4. Its tiles number 0, 1, 2, 3 are tiles 2, 3, 8, 9, of which it computes 1, 2, 3
//     (split_tiles: span 1, from 1, to 4).
//
// Prompts use flash_kernel, with one split. Other steps use one of three kernels: attend_half_kernel on tensor cores
// for caches in f16, attend_coded_kernel for caches of quantised types (which flash_kernel reads as well),
// attend_plain_kernel for all others. The last block of a head to finish combines the splits; where they are large,
// attend_join_kernel does.

enum { KEYS = 32, ATTEND_WARPS = 8, ATTEND_THREADS = 32 * ATTEND_WARPS, HEADS = 8,
       MAX_STAGES = 4,        // of the pipeline buffer of a block
       FUSED_ROWS = 8,        // up to this many rows, attention itself makes q and the new rows of K and V
       RING_SLOTS = 2048,     // a cache up to this size is treated as a ring, of which all keys may be visible
       // Splits times KV heads of a long cache: a block for each SM of a large card. A tile of tied f16 is small, there
       // are two blocks.
       FULL_GRID = 128,
       MAX_SPLITS = FULL_GRID,
       JOIN_BYTES = 40 << 10 };        // up to so many bytes of splits the last block combines, more attend_join

typedef struct {              // how the tiles of a cache are dealt to splits
    int     n, span_bits;     // 2^span_bits tiles in a span
    Divisor by_n;
} Splits;

static Splits plan_splits(const Cache *c, int n_rows) {
    Splits s = { 1, 0, divisor(1) };
    if (n_rows > STEP_ROWS) return s;                  // rows enough to fill the device
    if (c->slots > RING_SLOTS) {
        s.n = min_int(MAX_SPLITS, max_int(1, (c->n_rot && !is_coded(c) ? 2 : 1) * FULL_GRID / c->n_kv_heads));
    } else {
        s.span_bits = c->n_kv_heads > 8 ? 2 : 1;
        s.n = div_up(c->slots / KEYS, 1 << s.span_bits);
    }
    s.by_n = divisor(s.n);
    return s;
}

typedef struct {              // a row of the step, and the keys that it sees
    int seg, seq, seg_first, kind, len, index, pos;
    int first;                // lowest visible position
    int low, end;             // visible keys are among low .. end - 1
    uint64_t ancestors;
} RowMask;

// With one segment and one session, no load waits for another.
__device__ static inline RowMask row_mask(const Batch &b, int n_seqs, int window, OwnMask own, int r) {
    const Row row = b.rows[r];
    const Segment seg = b.segs[b.n_segs == 1 ? 0 : row.seg];
    const int len = b.len[n_seqs == 1 ? 0 : seg.seq], pos = len + row.depth;
    const int first = window ? max(0, pos - window + 1) : 0;
    int n_own = own == OWN_ALL ? seg.n : rows_in_sight(&row, &seg, window);
    if (own == OWN_NONE) n_own = 0;
    return (RowMask){ row.seg, seg.seq, seg.first, seg.kind, len, row.index, pos, first, min(first, len), len + n_own,
                    row.ancestors };
}

__device__ static inline bool is_visible(const RowMask &v, OwnMask own, int j) {
    if (j >= v.end) return false;
    if (j < v.len) return j >= v.first;
    if (own == OWN_ALL) return true;
    return v.kind == SEG_TREE ? v.ancestors >> (j - v.len) & 1 : j >= v.first;
}

typedef struct {              // the spans that hold keys low .. end - 1: first, first + 1, ...
    int first, n;
    int first_split, live;    // splits that have some of them: first mod n, and those that follow it
} Spans;

__device__ static inline Spans spans_of(int low, int end, const Splits &s) {
    if (end <= low) return (Spans){ 0, 0, 0, 0 };
    const int first = (low / KEYS) >> s.span_bits, n = (((end - 1) / KEYS) >> s.span_bits) - first + 1;
    return (Spans){ first, n, modulo(first, s.by_n), min(n, s.n) };
}

typedef struct {              // the tiles of one split: number k, from <= k < to, is tile_of(k)
    int span, from, to;
} SplitTiles;

__device__ static inline SplitTiles split_tiles(const Spans &s, int low, int end, const Splits &splits, int split) {
    const int skip = split - s.first_split + (split < s.first_split ? splits.n : 0), bits = splits.span_bits;
    if (skip >= s.n) return (SplitTiles){ 0, 0, 0 };
    const int n = quotient(s.n - 1 - skip, splits.by_n) + 1, span = s.first + skip;
    const int last = span + (n - 1) * splits.n;
    const int before = max(0, low / KEYS - (span << bits));
    const int after = max(0, ((last + 1) << bits) - 1 - (end - 1) / KEYS);
    return (SplitTiles){ span, before, (n << bits) - after };
}

__device__ static inline int tile_of(const SplitTiles &s, const Splits &splits, int k) {
    return ((s.span + (k >> splits.span_bits) * splits.n) << splits.span_bits) + (k & ((1 << splits.span_bits) - 1));
}

// ---- combining splits ----
// For each query head a split leaves (head_dim) values, the maximum of its scores and the sum of its weights. A head is
// the sum of weight * values over the splits in the order of their spans, divided by the sum of all weights.

__device__ static inline int nth_split(const Spans &s, int n_splits, int k) {
    return s.first_split + k < n_splits ? s.first_split + k : s.first_split + k - n_splits;
}

// Weights of the splits of one head in their order, by a warp; returns 1 / (sum of all weights), or 0 if no key was
// visible.
//   stats (splits) of the head;   weights (live) in shared memory; readers need a barrier
__device__ static inline float weigh_splits(float2 *weights, const float2 *stats, const Spans &s, int n_splits) {
    float top = -INFINITY, sum = 0;
#pragma unroll 1
    for (int k = threadIdx.x % 32; k < s.live; k += 32) {
        weights[k] = __ldcg(stats + nth_split(s, n_splits, k));        // a lane reads only its own entries
        top = fmaxf(top, weights[k].x);
    }
    top = warp_max(top);
#pragma unroll 1
    for (int k = threadIdx.x % 32; k < s.live; k += 32) {
        const float w = weights[k].y == 0 ? 0 : expf(weights[k].x - top);      // a split may have seen no key
        sum = __fmaf_rn(w, weights[k].y, sum);
        weights[k].x = w;
    }
    sum = warp_sum(sum);
    return sum == 0 ? 0 : __frcp_rn(sum);
}

// Stores four values of one head as Act, at `at` .. at + 3; by all lanes of a warp, 8 lanes hold a group.
__device__ static inline void store_four(const Act &out, size_t at, float4 y) {
    if (out.f) *(float4 *)(out.f + at) = y;
    if (!out.q) return;
    float s;
    *(unsigned *)(out.q + at) = quantise4(y, &s);
    if (threadIdx.x % 8 == 0) out.s[at / 32] = s;
}

// The index in the head of the value at `place` in the tied order.
__device__ static inline int tied_value(int place, int head_dim, int n_rot) {
    const int half = head_dim / 2, rest = place - 2 * n_rot, second = rest < 0 ? place >= n_rot : rest >= half - n_rot;
    return second * half + (rest < 0 ? place - second * n_rot : n_rot + rest - second * (half - n_rot));
}

// attend_join: combines the splits of all query heads, result as Act.
//   shapes    values (n_rows, n_heads, splits, head_dim), stats (n_rows, n_heads, splits), out (n_rows, n_heads,
//             head_dim). ROTATED: values are Hadamard-rotated
//   launch    grid (n_rows, n_heads, ceil(head_dim / VALUES)), block 128: 64 values, or 128 that are rotated back
//             together; dynamic shared memory 4 * splits * VALUES, for all splits at once
//   traffic   reads once what the splits with a visible key wrote
//   see       ref_attend
HOST_DEVICE static constexpr int join_values(bool rotated) { return rotated ? KV_ROTATION : 64; }
template <bool ROTATED>
__global__ void __launch_bounds__(128) attend_join_kernel(Attend o, Batch b, Cache c, Splits splits,
                                                          const float *values,
                                                          const float2 *stats) {
    constexpr int VALUES = join_values(ROTATED);
    wait_for_previous_kernel();
    float *x = (float *)shared_bytes;                  // (splits, VALUES)
    __shared__ __align__(16) float rotated[ROTATED ? VALUES : 4];
    __shared__ float2 weights[MAX_SPLITS];
    __shared__ float scale;
    const int hd = c.head_dim, first = blockIdx.z * VALUES, chunk = threadIdx.x % (VALUES / 4);
    const size_t head = (size_t)blockIdx.x * o.n_heads + blockIdx.y;
    const RowMask v = row_mask(b, c.n_seqs, o.window, o.own, blockIdx.x);
    const Spans spans = spans_of(v.low, v.end, splits);
    if (first + 4 * chunk < hd) {                      // to the tied order, where the values are in it
        const int place = c.n_rot && !ROTATED ? tied_place(first + 4 * chunk, hd, c.n_rot) : first + 4 * chunk;
#pragma unroll 1
        for (int k = threadIdx.x / (VALUES / 4); k < spans.live; k += 128 / (VALUES / 4))
            copy_ahead(&x[k * VALUES + 4 * chunk],
                       values + (head * splits.n + nth_split(spans, splits.n, k)) * hd + place);
    }
    copy_commit();
    if (threadIdx.x < 32) {
        const float s = weigh_splits(weights, stats + head * splits.n, spans, splits.n);
        if (threadIdx.x == 0) scale = s;
    }
    wait_for_copies<0>();
    __syncthreads();
    int i = first + threadIdx.x;
    if (threadIdx.x >= VALUES || i - i % 32 >= hd) return;
    float sum = 0;
#pragma unroll 4
    for (int k = 0; k < spans.live; k++) sum = __fmaf_rn(weights[k].x, x[k * VALUES + threadIdx.x], sum);
    if (ROTATED) {                                     // no thread has returned
        rotated[threadIdx.x] = sum;
        __syncthreads();
        if (threadIdx.x < 32) kv_rotate_back(rotated);
        __syncthreads();                               // one warp has rotated them
        sum = rotated[threadIdx.x] + 0.0f;             // no -0, like in store_columns
        if (c.n_rot) i = tied_value(i, hd, c.n_rot);
    }
    const float y = __fmul_rn(sum, scale);
    if (o.out.f && i < hd) o.out.f[head * hd + i] = y;
    if (o.out.q) quantise_group(y, o.out.q + head * hd + (i - i % 32), o.out.s + (head * hd + i) / 32);
}

// ---- caches of f16 ----

// The parameters of attend_half: only what it uses, since it waits for each 64 bytes of them. Shapes as in Attend,
// QkvStore and Cache.
typedef struct {
    Batch    b;
    int      n_seqs, window;
    OwnMask  own;
    int      rows, heads;     // rows of the step, query heads of a KV head: a block has up to rows * heads columns
    int      head_tiles;      // a KV head's query heads are cut into this many tiles
    int      group;           // heads of a KV head
    int      n_heads, n_kv_heads;
    Divisor  by_tiles, by_heads;       // head_tiles, heads
    bool     makes_q, makes_rows;      // the kernel makes q, or new rows, itself
    uint8_t  fused;           // rows that it has shared memory to make; FULL: FUSED_ROWS
    bool     early;           // all but q and the new rows may be read early
    bool     v_norm;
    bool     staged;
    bool     joins;           // the last block of a head combines its splits
    const float *q;           // ready to use, or the products from which q is made
    const float *new_k, *new_v;        // the products from which new rows are made
    const float *w_q, *w_k;   // tied: w_k is fold; NULL: not needed
    const double *inv_freq;
    Divisor  by_pairs;        // pairs that RoPE rotates
    float    eps;
    Splits    splits;
    int      n_k, n_rot;
    int      k_bits;          // a row of K is 2^k_bits chunks of 16 bytes
    int      n_stages;
    int      slots, stage_slots;
    Divisor  by_slots;
    const __half *stage_k, *stage_v;
    __half  *cache_k, *cache_v;
    float    scale;
    int      at_once;         // columns whose splits fit in the stages
    Act      out;
    float   *values;          // (n_rows, n_heads, splits, head_dim)
    float2  *stats;           // (n_rows, n_heads, splits)
    unsigned *arrived;        // (n_rows, gridDim.y) 0 between launches
} AttendTask;

// Rows of q, scores and weights in shared memory are padded, so that eight rows that are read together lie in different
// banks.
enum { ROW_PAD = 8, SCORE_ROW = KEYS + 4, WEIGHT_ROW = KEYS + 8 };

// Blocks for which an SM has the registers, without spills.
static constexpr int attend_blocks(int hd, int nc) { return nc <= 16 || hd <= 256 ? 2 : 1; }
// Scores. Before them the angles of the rows that the block makes and the frequencies of pairs use the same place,
// after them the weights of splits.
HOST_DEVICE static constexpr int attend_score_bytes(int hd, int nc, int fused) {
    return 4 * nc * SCORE_ROW * 4 > (fused + 1) * hd * 4 ? 4 * nc * SCORE_ROW * 4 : (fused + 1) * hd * 4;
}
static size_t attend_fixed_bytes(int hd, int n_k, int nc, int fused) {
    return (size_t)nc * (2 * (hd + ROW_PAD) * sizeof(__half) + WEIGHT_ROW * sizeof(__half)) +
        attend_score_bytes(hd, nc, fused) + (size_t)fused * (n_k + hd) * sizeof(__half) + 2 * hd * sizeof(float);
}
static size_t attend_stage_bytes(int hd, int n_k) { return (size_t)KEYS * (hd + n_k + 2 * ROW_PAD) * sizeof(__half); }

// Dynamic shared memory of attend_half: first what the columns need, then the stages.
template <int HD, int NC> struct AttendSmem {
    __half *q_hi, *q_lo;      // (NC, HD + ROW_PAD) each
    float  *scores;           // (4, NC, SCORE_ROW)
    float  *angles;           // (fused, HD), in the place of scores
    double *inv_freq;         // (HD / 2), of the first segment, follows angles
    __half *weights;          // (NC, WEIGHT_ROW)
    float  *w_q, *w_k;        // (HD) each; tied: w_k is fold
    __half *new_rows;         // (fused, n_k + HD), in the order of the batch
    __half *stages;           // (n_stages): K (KEYS, n_k + ROW_PAD), V (KEYS, HD + ROW_PAD)

    __device__ AttendSmem(int n_k, int fused) {
        q_hi = (__half *)shared_bytes, q_lo = q_hi + NC * (HD + ROW_PAD);
        scores = angles = (float *)(q_lo + NC * (HD + ROW_PAD));
        inv_freq = (double *)(angles + fused * HD);
        weights = (__half *)(scores + attend_score_bytes(HD, NC, fused) / 4);
        w_q = (float *)(weights + NC * WEIGHT_ROW), w_k = w_q + HD;
        new_rows = (__half *)(w_k + HD), stages = new_rows + fused * (n_k + HD);
    }
};

// Rows of a block, at most.
HOST_DEVICE static constexpr int block_rows(int nc) { return nc <= 32 ? nc : FUSED_ROWS; }

template <int NC> struct Columns {     // of a block; in shared memory
    RowMask masks[block_rows(NC)];     // of the block's rows; if the block makes rows, of all rows of the batch
    int   row_of[NC];         // row of a column, in the block; -1: not used
    int   head_of[NC];        // number of its query head in out
    float top[NC], sum[NC];   // of softmax_keys; in the end sum is its reciprocal
    float rescale[NC];        // factor for acc before the next tile is added
    Spans seen_by[NC];        // splits of a column
    int   n_live;             // splits with a visible key; here because registers are short
    bool  last;               // this block is the last one of its head
};

typedef struct {              // the work of a block
    int  r0, n_rows;          // rows of the batch, the longest first
    int  g, tile;             // KV head; which of its head_tiles
    int  head, n_heads;       // query heads
    int  n_columns;
    int  known, n_known;      // rows of the batch that Columns.masks has
    bool makes;               // it makes q or rows
    int  n_new, n_jobs;       // new rows of K (and as many of V) in the batch; these rows and the columns of q
} AttendBlock;

__device__ static inline AttendBlock attend_block(const AttendTask &a) {
    AttendBlock b;
    b.g = quotient(blockIdx.y, a.by_tiles), b.tile = blockIdx.y - b.g * a.head_tiles;
    b.head = b.g * a.group + b.tile * a.heads, b.n_heads = min(a.heads, a.group - b.tile * a.heads);
    b.r0 = (gridDim.x - 1 - blockIdx.x) * a.rows, b.n_rows = min(a.rows, a.b.n_rows - b.r0);
    b.makes = a.makes_q || a.makes_rows;
    b.n_columns = b.n_rows * a.heads;
    b.n_new = a.makes_rows ? a.b.n_rows : 0, b.n_jobs = b.n_columns + 2 * b.n_new;
    b.known = b.makes ? 0 : b.r0, b.n_known = b.makes ? a.b.n_rows : b.n_rows;
    return b;
}

// Rows from .. to - 1 of a block, all of one segment, and their keys in the block's split. New rows of the batch are
// consecutive keys; the block may have to make them.
typedef struct {
    int   from, to;
    int   seg, seq, len, seg_first;    // as in RowMask
    int   head;               // KV head
    int   low, end;           // keys that some row sees
    int   new_from, new_to;   // keys that the block makes
    Spans spans;
    SplitTiles tiles;
} KeyRange;

// The key number of row 0 of the batch, if it were of the same segment; row r has this + r.
__device__ static inline int number_of_0(const AttendBlock &b, const RowMask *rows, int from) {
    return rows[from].len + rows[from].index - b.r0 - from;
}

// `from` and the rows after it that are of the same segment.   rows: of the block
__device__ static inline KeyRange key_range_of(const AttendTask &a, const AttendBlock &b, const RowMask *rows,
                                               int from) {
    const RowMask &self = rows[from];
    int to, low = self.low, end = self.end;
#pragma unroll 1
    for (to = from + 1; to < b.n_rows && rows[to].seg == self.seg; to++)
        low = min(low, rows[to].low), end = max(end, rows[to].end);
    const int number0 = number_of_0(b, rows, from);
    const Spans spans = spans_of(low, end, a.splits);
    return (KeyRange){ from, to, self.seg, self.seq, self.len, self.seg_first, b.g, low, end,
                   a.makes_rows ? max(self.len, number0) : 0, a.makes_rows ? min(end, number0 + b.n_new) : 0, spans,
                   split_tiles(spans, low, end, a.splits, blockIdx.z) };
}

// The first key of tile i of the block's split.
__device__ static inline int first_key(const AttendTask &a, const KeyRange &s, int i) {
    return tile_of(s.tiles, a.splits, s.tiles.from + i) * KEYS;
}

// Sets rows and heads of the columns, before the first tile.
template <int NC>
__device__ static inline void set_columns(const AttendTask &a, const AttendBlock &b, const KeyRange &s,
                                          Columns<NC> &c) {
    if (threadIdx.x < NC) {
        const int row = quotient(threadIdx.x, a.by_heads), h = threadIdx.x - row * a.heads;
        c.row_of[threadIdx.x] = row >= s.from && row < s.to && h < b.n_heads ? row : -1;
        c.head_of[threadIdx.x] = (b.r0 + row) * a.n_heads + b.head + h;
        c.top[threadIdx.x] = -INFINITY, c.sum[threadIdx.x] = 0;
    }
    if (threadIdx.x == 0) c.n_live = s.spans.live;
}

// ---- rows that a block makes ----
// A warp makes a column of q, or a row of K or V; the jobs have this order. The values of the next job are prefetched.
template <int HD> using JobValues = HeadValues<(HD + 255) / 256>;

// Copies norm weights and frequencies to shared memory, while the previous kernel ends.
template <int HD, int NC>
__device__ static inline void copy_norm_weights(const AttendTask &a, const AttendSmem<HD, NC> &smem) {
    const int i = 4 * threadIdx.x;
    if (i >= HD) return;
    if (a.makes_q) copy_ahead(smem.w_q + i, a.w_q + i);
    if (a.w_k) copy_ahead(smem.w_k + i, a.w_k + i);
    if (i < 2 * (int)a.by_pairs.by) copy_ahead(smem.inv_freq + i / 2, a.inv_freq + i / 2);
}

template <int HD>
__device__ static inline void load_job(const AttendTask &a, const AttendBlock &b, int job, JobValues<HD> &x) {
    const float *from;
    if (job < b.n_columns) {
        const int row = quotient(job, a.by_heads), h = job - row * a.heads;
        from = a.q + ((size_t)(b.r0 + row) * a.n_heads + b.head + min(h, b.n_heads - 1)) * HD;
    } else {
        const int k = job - b.n_columns;
        from = k < b.n_new ? a.new_k + ((size_t)k * a.n_kv_heads + b.g) * HD
                           : a.new_v + ((size_t)(k - b.n_new) * a.n_kv_heads + b.g) * HD;
    }
    head_load(x, from, HD / 2);
}

// Cosines and sines for the rows in masks.
template <int HD, int NC>
__device__ static inline void make_angles(const AttendTask &a, const AttendBlock &b, const KeyRange &s,
                                          const AttendSmem<HD, NC> &smem, const RowMask *masks) {
    const int n_pairs = (int)a.by_pairs.by;
    const double *frequency = s.from ? a.inv_freq : smem.inv_freq;     // scores have overwritten the copy
    for (int k = threadIdx.x; k < b.n_known * n_pairs; k += ATTEND_THREADS) {
        const int row = quotient(k, a.by_pairs), pair = k - row * n_pairs;
        float *angle = smem.angles + row * HD + pair;
        angle_of(frequency[pair], masks[row].pos, angle, angle + HD / 2);
    }
}

// Makes the columns of q (to q_hi and q_lo) and the new rows of K and V of the block's split (to new_rows, and to the
// cache if this block has the query of that row).   next_job: the values of the warp's first job
template <int HD, int NC>
__device__ static inline void make_rows(const AttendTask &a, const AttendBlock &b, const KeyRange &s,
                                        const AttendSmem<HD, NC> &smem, const RowMask *masks, JobValues<HD> &next_job) {
    constexpr int ROW = HD + ROW_PAD, HALF = HD / 2;
    const int n_k = a.n_k;
#pragma unroll 1
    for (int job = threadIdx.x / 32; job < b.n_jobs; job += ATTEND_WARPS) {
        const bool is_q = job < b.n_columns, is_k = !is_q && job < b.n_columns + b.n_new;
        JobValues<HD> x = next_job;
        if (job + ATTEND_WARPS < b.n_jobs) load_job<HD>(a, b, job + ATTEND_WARPS, next_job);
        const int made = job - b.n_columns - (is_k ? 0 : b.n_new);
        const int r = is_q ? b.r0 + quotient(job, a.by_heads) : made;
        const int key = number_of_0(b, masks + b.r0 - b.known, s.from) + r;                 // key number of a new row
        if (masks[r - b.known].seg != s.seg) continue;
        if (!is_q && modulo((key / KEYS) >> a.splits.span_bits, a.splits.by_n) != (int)blockIdx.z) continue;
        const float *w_kv = is_k ? smem.w_k : NULL;
        if (is_q ? a.makes_q : is_k || a.v_norm) head_norm(x, is_q ? smem.w_q : w_kv, HALF, a.eps);
        if (is_q ? a.makes_q : is_k)
            head_rope(x, smem.angles + (r - b.known) * HD, (int)a.by_pairs.by, HALF);
        const bool writes = !is_q && r >= b.r0 && r < b.r0 + b.n_rows && b.tile == 0;
        const int dim = is_k ? n_k : HD;
        __half *put = is_q ? smem.q_hi + job * ROW : smem.new_rows + r * (n_k + HD) + (is_k ? 0 : n_k);
        __half *cached = (is_k ? a.cache_k : a.cache_v) +
                         (((size_t)s.seq * a.n_kv_heads + b.g) * a.slots + modulo(key, a.by_slots)) * dim;
        head_each(x, HALF, is_q && !a.makes_q ? 0 : a.n_rot, [&](int at, int i, float4 v) {
            if (is_q && a.makes_q) v = folded(a.n_rot, smem.w_k, HALF, i, v);
            if (at >= dim) return;
            const uint2 h = halves_of(v);
            *(uint2 *)(put + at) = h;
            if (writes) *(uint2 *)(cached + at) = h;
            if (is_q) *(uint2 *)(put + NC * ROW + at) = halves_of(half_residue(v));
        });
    }
}

// Copies new rows of tile k of the split to its stage.
__device__ static inline void copy_new_rows(const AttendTask &a, const AttendBlock &b, const KeyRange &s,
                                            const RowMask *rows,
                                           int k, const __half *new_rows, int v_row, __half *k_tile) {
    const int n_k = a.n_k, k_row = n_k + ROW_PAD, dims = n_k + v_row - ROW_PAD;
    const int j0 = first_key(a, s, k), chunk = threadIdx.x * 8;
    for (int j = max(j0, s.new_from); j < min(j0 + KEYS, s.new_to) && chunk < dims; j++)
        *(uint4 *)(chunk < n_k ? k_tile + (j - j0) * k_row + chunk
                               : k_tile + KEYS * k_row + (j - j0) * v_row + chunk - n_k) =
            *(const uint4 *)(new_rows + (j - number_of_0(b, rows, s.from)) * dims + chunk);
}

// ---- tiles ----

// Starts to copy KEYS keys from j0 on to a stage: K (KEYS, n_k + ROW_PAD), V (KEYS, HD + ROW_PAD). Keys that no row
// sees become zeros, whatever the cache has there.
template <int HD> __device__ static inline void copy_keys(const AttendTask &a, const KeyRange &s, int j0, __half *to) {
    constexpr int ROW = HD + ROW_PAD, V_BITS = 4 + (HD > 128) + (HD > 256);
    const int n_k = a.n_k, k_row = n_k + ROW_PAD;
    const size_t cache_row = ((size_t)s.seq * a.n_kv_heads + s.head) * a.slots + modulo(j0, a.by_slots);
    const size_t stage_row = (size_t)s.head * a.stage_slots + s.seg_first;     // of row 0 of the segment
    if (j0 >= s.low && j0 + KEYS <= min(s.end, s.len)) {  // nearly all tiles of a long cache: complete and contiguous
        const int i = threadIdx.x, k_step = ATTEND_THREADS >> a.k_bits, v_step = ATTEND_THREADS >> V_BITS;
        const __half *k_data = a.cache_k + cache_row * n_k + 8 * i, *v_data = a.cache_v + cache_row * HD + 8 * i;
        __half *k_to = to + (i >> a.k_bits) * k_row + (i & ((1 << a.k_bits) - 1)) * 8;
        __half *v_to = to + KEYS * k_row + (i >> V_BITS) * ROW + (i & ((1 << V_BITS) - 1)) * 8;
#pragma unroll 1
        for (int k = i; k < KEYS << a.k_bits; k += ATTEND_THREADS, k_to += k_step * k_row, k_data += 8 * ATTEND_THREADS)
            copy_ahead(k_to, k_data);
#pragma unroll
        for (int n = 0; n < KEYS / v_step; n++) copy_ahead(v_to + n * v_step * ROW, v_data + n * 8 * ATTEND_THREADS);
        return;
    }
#pragma unroll 1
    for (int plane = 0; plane < 2; plane++, to += KEYS * k_row) {
        const int bits = plane ? V_BITS : a.k_bits, dim = 8 << bits, chunk = (threadIdx.x & ((1 << bits) - 1)) * 8;
        const __half *data = (plane ? a.cache_v : a.cache_k) + cache_row * dim + chunk;
        const __half *staged = (plane ? a.stage_v : a.stage_k) + stage_row * dim + chunk;
#pragma unroll 1
        for (int key = threadIdx.x >> bits; key < KEYS; key += ATTEND_THREADS >> bits) {
            const int j = j0 + key;
            if (j >= s.new_from && j < s.new_to) continue;
            const bool seen = j >= s.low && j < s.end;
            copy_or_zero(to + key * (dim + ROW_PAD) + chunk,
                         a.staged && seen && j >= s.len ? staged + (size_t)(j - s.len) * dim : data + (size_t)key * dim,
                             seen);
        }
    }
}

// Waits until the oldest tile in flight has arrived, for this thread.
__device__ static inline void wait_for_tile(int n_stages) {
    if (n_stages == 4) wait_for_copies<3>();
    else if (n_stages == 3) wait_for_copies<2>();
    else if (n_stages == 2) wait_for_copies<1>();
    else wait_for_copies<0>();
}

// scores (4, NC, SCORE_ROW) = q k for the keys of a tile; a warp has 16 keys and a quarter of the dims.
template <int HD, int NC>
__device__ static inline void score_keys(const AttendTask &a, const __half *k_tile, const __half *v_tile,
                                         const __half *q_hi, const __half *q_lo, float *scores) {
    constexpr int ROW = HD + ROW_PAD, N = NC / 8;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane / 4, k2 = lane % 4 * 2, n_k = a.n_k;
    const int key0 = warp % 2 * 16, quarter = warp / 2, key = key0 + lane % 16, d = quarter * (HD / 4);
    // tied: the rest of K is V
    const __half *k_row = (d < n_k ? k_tile + key * (n_k + ROW_PAD) : v_tile + key * ROW) + d + lane / 16 * 8;
    const int q_at = lane % 8 * ROW + d + lane / 8 * 8;
    float s_hi[N][4] = { }, s_lo[N][4] = { };
#pragma unroll HD < 512 ? 1 : NC == 16 ? 2 : 4          // as registers allow
    for (int at = 0; at < HD / 4; at += 32) {
        unsigned k[2][4], q[4];
        load_matrices(k[0], k_row + at);
        load_matrices(k[1], k_row + at + 16);
#pragma unroll
        for (int n = 0; n < N; n++) {
            load_matrices(q, q_hi + q_at + 8 * n * ROW + at);
            multiply_half(s_hi[n], k[0], q);
            multiply_half(s_hi[n], k[1], q + 2);
            load_matrices(q, q_lo + q_at + 8 * n * ROW + at);
            multiply_half(s_lo[n], k[0], q);
            multiply_half(s_lo[n], k[1], q + 2);
        }
    }
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            scores[(quarter * NC + 8 * n + k2 + e % 2) * SCORE_ROW + key0 + t + e / 2 * 8] = s_hi[n][e] + s_lo[n][e];
}

// Softmax of a tile of keys from j0 on. LANES lanes share a column; each has KEYS / LANES keys that follow each other.
// Eight columns have a warp each, which takes least time; of more columns a warp has four at once, which takes fewest
// instructions. Pairs of keys are added, then pairs of pairs, .., so the sums have the same bits. Writes the weights in
// f16, and for each column the sum of weights, the factor for what was added before this tile, and the top: the score
// whose weight is 1. A top below the maximum does no harm while weights stay within e^SOFTMAX_SLACK, where f16 is as
// exact as below 1. So the top seldom changes, and sums are seldom rescaled.
//   sees(row, key): is the key visible to the row?
enum { SOFTMAX_SLACK = 8 };
template <int NC, typename Sees>
__device__ static inline void softmax_keys(const AttendTask &a, const RowMask *rows, int j0, const float *scores,
                                         __half *weights, Columns<NC> &c, Sees sees) {
    constexpr int LANES = NC == 8 ? 32 : 8, N = KEYS / LANES, next = NC * SCORE_ROW;
    const int key = threadIdx.x % LANES * N;
#pragma unroll 1
    for (int col = threadIdx.x / LANES; col < NC; col += ATTEND_THREADS / LANES) {
        const int row = c.row_of[col];
        const float *s = scores + col * SCORE_ROW + key;
        const float old = c.top[col], old_sum = c.sum[col];
        float score[N], w[N], most = -INFINITY;
#pragma unroll
        for (int i = 0; i < N; i++) {
            const bool seen = row >= 0 && sees(rows[max(row, 0)], j0 + key + i);
            const float sum = (s[i] + s[next + i]) + (s[2 * next + i] + s[3 * next + i]);
            score[i] = seen ? __fmul_rn(sum, a.scale) : -INFINITY;
            most = fmaxf(most, score[i]);
        }
#pragma unroll
        for (int n = 1; n < LANES; n *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, n));
        const float now = most - old > SOFTMAX_SLACK ? most : old, base = now == -INFINITY ? 0 : now;
#pragma unroll
        for (int i = 0; i < N; i++) {
            const __half p = __float2half_rn(expf(score[i] - base));
            weights[col * WEIGHT_ROW + key + i] = p, w[i] = __half2float(p);
        }
#pragma unroll
        for (int n = 1; n < N; n *= 2)
#pragma unroll
            for (int i = 0; i < N; i += 2 * n) w[i] += w[i + n];
#pragma unroll
        for (int n = 1; n < LANES; n *= 2) w[0] += __shfl_xor_sync(~0u, w[0], n);
        const float f = now == old ? 1 : expf(old - base);
        __syncwarp();                                  // all lanes have read top and sum
        if (key == 0) c.rescale[col] = f, c.top[col] = now, c.sum[col] = __fmaf_rn(old_sum, f, w[0]);
    }
}

// acc += V^T weights for a tile, after acc is multiplied with rescale; a warp has all keys and an eighth of the dims.
template <int HD, int NC>
__device__ static inline void add_values(float (&acc)[HD / 128][NC / 8][4], const __half *v_tile, const __half *weights,
                                         const float *rescale) {
    constexpr int ROW = HD + ROW_PAD, M = HD / 128, N = NC / 8;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, k2 = lane % 4 * 2;
    unsigned p[N][4];
    float f[N][2];
    bool same = true;
#pragma unroll
    for (int n = 0; n < N; n++) {
        load_matrices(p[n], weights + (8 * n + lane % 8) * WEIGHT_ROW + lane / 8 * 8);
        f[n][0] = rescale[8 * n + k2], f[n][1] = rescale[8 * n + k2 + 1];
        same = same && f[n][0] == 1 && f[n][1] == 1;
    }
    if (__any_sync(~0u, !same))
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int m = 0; m < M; m++)
                acc[m][n][0] *= f[n][0], acc[m][n][1] *= f[n][1], acc[m][n][2] *= f[n][0], acc[m][n][3] *= f[n][1];
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int u = 0; u < KEYS / 16; u++) {
            unsigned v[4];
            load_matrices_transposed(v, v_tile + (16 * u + lane / 16 * 8 + lane % 8) * ROW + warp * (HD / 8) + 16 * m +
                                            lane / 8 % 2 * 8);
#pragma unroll
            for (int n = 0; n < N; n++) multiply_half(acc[m][n], v, p[n] + 2 * u);
        }
}

// By the last block of a head: o (NC, ROW) = the weighted sum of all splits of its columns, c.sum = the factor for it.
// scores, found: shared memory for weights and values of splits.
template <int HD, int NC>
__device__ static inline void join_columns(const AttendTask &a, int n_columns, Columns<NC> &c, float *scores,
                                           float *found, float *o) {
    constexpr int ROW = HD + ROW_PAD;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n_splits = a.splits.n;
    float2 *weight_of = (float2 *)scores;              // (NC, splits)
#pragma unroll 1
    for (int col0 = 0; col0 < n_columns; col0 += a.at_once) {          // found: (at_once, splits, HD)
        const int col1 = min(n_columns, col0 + a.at_once);
#pragma unroll 1
        for (int col = col0 + warp; col < col1; col += ATTEND_WARPS) { // starts to copy all splits
            if (c.row_of[col] < 0) continue;
            const Spans s = c.seen_by[col];
            const float *values = a.values + (size_t)c.head_of[col] * n_splits * HD;
#pragma unroll 1
            for (int k = 0; k < s.live; k++)
#pragma unroll
                for (int i = 4 * lane; i < HD; i += 128)
                    copy_ahead(found + ((size_t)(col - col0) * n_splits + k) * HD + i,
                               values + nth_split(s, n_splits, k) * HD + i);
        }
        copy_commit();
#pragma unroll 1
        for (int col = col0 + warp; col < col1; col += ATTEND_WARPS) {
            if (c.row_of[col] < 0) continue;
            const float scale =
                weigh_splits(weight_of + col * n_splits, a.stats + (size_t)c.head_of[col] * n_splits, c.seen_by[col],
                             n_splits);
            if (lane == 0) c.sum[col] = scale;
        }
        wait_for_copies<0>();
        __syncthreads();                               // weights and values are there
#pragma unroll 1
        for (int at = 2 * threadIdx.x; at < (col1 - col0) * HD; at += 2 * ATTEND_THREADS) {
            const int col = col0 + at / HD, i = at % HD;
            if (c.row_of[col] < 0) continue;
            const float *values = found + (size_t)(col - col0) * n_splits * HD + i;
            float2 v = make_float2(0, 0);
#pragma unroll 4
            for (int k = 0; k < c.seen_by[col].live; k++) {
                const float w = weight_of[col * n_splits + k].x;
                const float2 y = *(const float2 *)(values + k * HD);
                v.x = __fmaf_rn(w, y.x, v.x), v.y = __fmaf_rn(w, y.y, v.y);
            }
            *(float2 *)(o + col * ROW + i) = v;
        }
        __syncthreads();                               // and have been read
    }
}

// Rotates the columns in o (NC, HD + ROW_PAD) back (Hadamard); a warp handles a group at a time.
template <int HD, int NC>
__device__ static inline void unrotate_columns(int n_columns, const Columns<NC> &c, float *o) {
#pragma unroll 1
    for (int job = threadIdx.x / 32; job < n_columns * (HD / KV_ROTATION); job += ATTEND_WARPS)
        if (c.row_of[job / (HD / KV_ROTATION)] >= 0)
            kv_rotate_back(o + job / (HD / KV_ROTATION) * (HD + ROW_PAD) + job % (HD / KV_ROTATION) * KV_ROTATION);
    __syncthreads();                                   // values are there
}

// Stores the columns in o (NC, HD + ROW_PAD), times their factor, as results of attention; a warp handles 128 values at
// a time.
template <int HD, int NC>
__device__ static inline void store_columns(const AttendTask &a, int n_columns, const Columns<NC> &c, const float *o) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int job = warp; job < n_columns * (HD / 128); job += ATTEND_WARPS) {
        const int col = job / (HD / 128), i = job % (HD / 128) * 128 + 4 * lane;
        if (c.row_of[col] < 0) continue;
        const float4 v = *(const float4 *)(o + col * (HD + ROW_PAD) + (a.n_rot ? tied_place(i, HD, a.n_rot) : i));
        const float scale = c.sum[col];                // no -0, like where splits are added
        store_four(a.out, (size_t)c.head_of[col] * HD + i,
                 make_float4(__fmul_rn(v.x + 0.0f, scale), __fmul_rn(v.y + 0.0f, scale), __fmul_rn(v.z + 0.0f, scale),
                             __fmul_rn(v.w + 0.0f, scale)));
    }
}

// Stores the result of a block for the columns of a run of rows: to out if this block has all splits or is the last one
// and combines them, else values and stats.   put(where): writes the values of a column to where(column), NULL:
// nowhere; rotated: they are Hadamard-rotated
template <int HD, int NC, typename Put>
__device__ static inline void finish_columns(const AttendTask &a, const AttendBlock &b, const KeyRange &s,
                                             const RowMask *rows,
                                            Columns<NC> &c, float *scores, float *found, bool rotated, Put put) {
    const int n_splits = a.splits.n;
    const bool direct = n_splits == 1 || (a.joins && c.n_live < 2);
    float *o = (float *)shared_bytes;                  // in the place of q
    put([&](int col) -> float * {
        if (c.row_of[col] < 0) return NULL;
        return direct ? o + col * (HD + ROW_PAD) : a.values + ((size_t)c.head_of[col] * n_splits + blockIdx.z) * HD;
    });
    const int col = threadIdx.x;
    const bool used = col < NC && c.row_of[col] >= 0;
    if (used && !direct)
        a.stats[(size_t)c.head_of[col] * n_splits + blockIdx.z] = make_float2(c.top[col], c.sum[col]);
    if (used && direct) c.sum[col] = c.sum[col] == 0 ? 0 : __frcp_rn(c.sum[col]);
    if (!direct && !a.joins) return;
    __syncthreads();                                   // the result of this block is written
    if (!direct) {
        if (threadIdx.x == 0) {
            __threadfence();                           // visible to all blocks before it is counted
            c.last = atomicInc(&a.arrived[(size_t)(b.r0 + s.from) * gridDim.y + blockIdx.y], c.n_live - 1) ==
                     (unsigned)c.n_live - 1;
            __threadfence();
        }
        if (used) c.seen_by[col] = spans_of(rows[c.row_of[col]].low, rows[c.row_of[col]].end, a.splits);
        __syncthreads();
        if (!c.last) return;
        join_columns<HD>(a, b.n_columns, c, scores, found, o);
    }
    if (rotated) unrotate_columns<HD>(b.n_columns, c, o);
    store_columns<HD>(a, b.n_columns, c, o);
}

// Writes acc of add_values to where(column).
template <int HD, int NC, typename Where>
__device__ static inline void put_values(const float (&acc)[HD / 128][NC / 8][4], Where where) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane / 4, k2 = lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < NC / 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float *to = where(8 * n + k2 + e);
            if (!to) continue;
            to += warp * (HD / 8) + t;
#pragma unroll
            for (int m = 0; m < HD / 128; m++) to[16 * m] = acc[m][n][e], to[16 * m + 8] = acc[m][n][2 + e];
        }
}

// attend, f16: softmax(scale * q k) v over the keys of one split, for NC columns: some rows times query heads of one KV
// head. For up to FUSED_ROWS rows it includes qkv_store (Qcur_pos, Kcur_pos, Vcur_normed): each block makes its own
// columns; blocks whose split has a new row make it in shared memory; the block with the row's query writes it to the
// cache.
//   shapes    q (n_rows, n_heads, HD), cache as in gemma4.h; tied: the tile of V serves the rest of K
//   launch    grid (ceil(n_rows / rows), n_kv_heads * head_tiles, splits), block 256: 8 warps, dynamic shared memory
//             attend_fixed_bytes + n_stages * attend_stage_bytes
//   FULL      there is shared memory to make FUSED_ROWS rows; else for a.fused
//   traffic   every visible key once for NC columns: 2 * (n_k + HD) B, up to n_stages tiles in flight. Blocks of other
//             rows are neighbours in the grid and share tiles in L2. Writes and reads 4 * HD B for each column and
//             split with a visible key
//   numerics  S = K q on tensor cores with f32 sums, q as the sum of two f16. Online softmax in f32, by tiles of KEYS.
//             Weights are rounded to f16 and summed so; O += V^T P with f32 sums. Columns do not mix, so NC is free
//   time      with few keys a chain of latencies: rows of the step; angles, norms and the first tiles; the splits. So
//             loads start as early as possible, all but q and the new rows before wait_for_previous_kernel() if
//             `early`. Loops whose instructions run only once stay rolled, and there are no divisions
//   see       ref_attend, ref_qkv_store
//
// The 8 warps divide the work of a tile three times; HD = 256:
//
//     scores      dims 0..63   64..127   128..191   192..255
//     keys 0..15     warp 0    warp 2    warp 4     warp 6         K times q; the four partial sums of a score are
//     keys 16..31    warp 1    warp 3    warp 5     warp 7         added in this order
//
//     softmax     8 columns: warp w has column w, lane j key j; more: 4 columns a warp, 4 keys a lane
//     values      warp w: dims 32 w .. 32 w + 31 of all columns, all keys; sums stay in registers (acc)
//
// Tiles go through n_stages stages, here 3. Iterations with i < 0 only start copies; iteration 0 also makes q and new
// rows:
//
//     i           -2       -1       0        1        2
//     copies      tile 0   tile 1   tile 2   tile 3   tile 4       into the stage of tile i - 1, after a barrier
//     computes    -        -        tile 0   tile 1   tile 2
template <int HD, int NC, bool FULL>
__global__ void __launch_bounds__(ATTEND_THREADS,
                                  attend_blocks(HD, NC)) attend_half_kernel(const __grid_constant__ AttendTask a) {
    constexpr int ROW = HD + ROW_PAD, M = HD / 128, N = NC / 8;        // tiles of 16 dims, tiles of 8 columns of a warp
    __shared__ Columns<NC> columns;
    const AttendSmem<HD, NC> smem(a.n_k, FULL ? FUSED_ROWS : a.fused);
    const AttendBlock block = attend_block(a);
    const RowMask *rows = columns.masks + block.r0 - block.known;
    const int warp = threadIdx.x / 32, k_row = a.n_k + ROW_PAD, stage_halves = KEYS * (k_row + ROW);
    if (block.makes) copy_norm_weights(a, smem);
    copy_commit();
    if (!a.early) wait_for_previous_kernel();
    if ((int)threadIdx.x < block.n_known)
        columns.masks[threadIdx.x] = row_mask(a.b, a.n_seqs, a.window, a.own, block.known + threadIdx.x);
    JobValues<HD> next_job;
    if (NC == 8 && !a.early && warp < block.n_jobs)    // with more columns, registers are short
        load_job<HD>(a, block, warp, next_job);
    wait_for_copies<0>();
    __syncthreads();                                   // rows and weights are there

    bool must_wait = a.early;                          // wait_for_previous_kernel() is still to come
    for (int from = 0, to; from < block.n_rows; from = to) {   // rows of one segment at a time; mostly there is one
        if (from) __syncthreads();                     // all are done with the last segment
        const KeyRange keys = key_range_of(a, block, rows, from);
        const SplitTiles &tiles = keys.tiles;
        to = keys.to;
        if (tiles.from == tiles.to && (blockIdx.z || keys.spans.n || (a.splits.n > 1 && !a.joins)))
            continue;                                  // no visible key in this split
        const int n_tiles = max(1, tiles.to - tiles.from);     // if no key is visible, a tile of zeros
        set_columns(a, block, keys, columns);

        float acc[M][N][4];
        int stage = a.n_stages > 1;                    // stage of tile i: i mod n_stages
#pragma unroll 1
        for (int i = 1 - a.n_stages; i < n_tiles; i++, stage = stage + 1 == a.n_stages ? 0 : stage + 1) {
            const int ahead = i - 1 + a.n_stages, stage_ahead = (stage ? stage : a.n_stages) - 1;
            if (i > 0) __syncthreads();                // all are done with tile i - 1
            if (ahead < n_tiles)
                copy_keys<HD>(a, keys, first_key(a, keys, ahead), smem.stages + stage_ahead * stage_halves);
            copy_commit();
            if (i < 0) continue;
            if (i == 0) {
                if ((NC > 8 || from) && !must_wait && warp < block.n_jobs) load_job<HD>(a, block, warp, next_job);
                if (block.makes) {
                    make_angles(a, block, keys, smem, columns.masks);
                    __syncthreads();                   // angles are there
                }
                if (must_wait) {
                    wait_for_previous_kernel();
                    must_wait = false;
                    if (warp < block.n_jobs) load_job<HD>(a, block, warp, next_job);
                }
                make_rows(a, block, keys, smem, columns.masks, next_job);
                if (keys.new_to > keys.new_from) __syncthreads();      // new rows are there
#pragma unroll
                for (int n = 0; n < N; n++)
#pragma unroll
                    for (int m = 0; m < M; m++) acc[m][n][0] = acc[m][n][1] = acc[m][n][2] = acc[m][n][3] = 0;
            }
            for (int k = i ? ahead : 0; keys.new_to > keys.new_from && k <= ahead && k < n_tiles; k++)
                copy_new_rows(a, block, keys, rows, k, smem.new_rows, ROW,
                             smem.stages + (i ? stage_ahead : k) * stage_halves);
            wait_for_tile(a.n_stages);
            __syncthreads();                           // tile i and q are there
            const int j0 = first_key(a, keys, i);
            const __half *k_tile = smem.stages + stage * stage_halves, *v_tile = k_tile + KEYS * k_row;

            score_keys<HD, NC>(a, k_tile, v_tile, smem.q_hi, smem.q_lo, smem.scores);
            __syncthreads();                           // scores are complete

            softmax_keys<NC>(a, rows, j0, smem.scores, smem.weights, columns,
                           [&](const RowMask &v, int j) { return is_visible(v, a.own, j); });
            __syncthreads();                           // weights are complete

            add_values<HD, NC>(acc, v_tile, smem.weights, columns.rescale);
        }
        __syncthreads();                               // q is no longer read; tops, sums and row_of are there
        finish_columns<HD>(a, block, keys, rows, columns, smem.scores, (float *)smem.stages, false,
                          [&](auto where) { put_values<HD, NC>(acc, where); });
    }
}

typedef void (*AttendHalf)(AttendTask);
static AttendHalf attend_half_of(int hd, int nc, bool full) {          // NULL: there is none
    static const AttendHalf kernels[3][3] = {
        { attend_half_kernel<128, 8, true>, attend_half_kernel<128, 16, true>, attend_half_kernel<128, 32, true> },
        { attend_half_kernel<256, 8, true>, attend_half_kernel<256, 16, true>, attend_half_kernel<256, 32, true> },
        { attend_half_kernel<512, 8, true>, attend_half_kernel<512, 16, true>, attend_half_kernel<512, 32, true> } };
    if (hd != 128 && hd != 256 && hd != 512) return NULL;
    if (nc == 40) return full && hd == 512 ? attend_half_kernel<512, 40, true> : NULL;
    if (full) return kernels[hd / 256][nc / 16];
    if (hd < 512 || nc > 16) return NULL;
    return nc == 16 ? attend_half_kernel<512, 16, false> : attend_half_kernel<512, 8, false>;
}

#include "parts/attend_coded.cuh"

// Once at start: allows the largest blocks all shared memory.
static void allow_attend(void) {
    for (int hd = 128; hd <= 512; hd *= 2) {
        for (int nc : { 8, 16, 32, 40 })
            for (int full = 0; full < 2; full++)
                if (attend_half_of(hd, nc, full)) allow_shared(attend_half_of(hd, nc, full));
        if (attend_coded_of(hd)) allow_shared(attend_coded_of(hd));
    }
    allow_shared(attend_join_kernel<true>);
}

// ---- prompts: f16 and quantised caches ----
// Steps of more than STEP_ROWS rows. A line is a row of the step times one of the query heads that share a KV head. The
// FLASH_LINES lines of a block share its tiles of keys, so that a warp uses often what it loads.

// The parameters of flash. Shapes as in Attend and Cache.
typedef struct {
    Batch    b;
    int      n_seqs, window;
    int      rows, group;     // rows of the step in a block; query heads of a KV head
    Divisor  by_group;
    int      n_heads, n_kv_heads;
    int      n_rot;
    int      n_v;             // tiles of V in shared memory: 1 or 2
    bool     prefetches;      // codes are copied to shared memory a tile ahead, if there is room
    int      slots, stage_slots;
    Divisor  by_slots;
    bool     staged;
    const __half *stage_k, *stage_v, *cache_k, *cache_v;
    CodedPlane k, v;          // quantised caches: instead of these
    bool     rotated;         // V is Hadamard-rotated
    bool     large_only;      // segments of up to STEP_ROWS rows are computed by attend_coded
    const float *q;
    float    scale;           // of scores, times log2(e)
    Act      out;
    BlockList blocks;         // LISTED: blocks of keys that rows attend to
} FlashTask;

typedef struct {              // what a row sees: keys first .. end - 1; in a tree not those of other branches
    int      seg, first, end, tree;
    uint64_t ancestors;
} FlashRow;

typedef struct {              // rows of a block, all of one segment
    int      seq, len, seg_first;      // as in RowMask
    int      head, from, to;           // KV head; rows of the block
    int      low, end;        // keys that some row sees
    int      whole_low, whole_end;     // keys that all rows see
} FlashRun;

// The work of a block, heads of HD values and tiles of N keys. Example: HD = 512, N = 64, 8 warps:
//
//     scores (64 lines x 64 keys)                     keys 0..31              keys 32..63
//     lines 0..31     dims 0..255 | 256..511          warp 0 | warp 4         warp 1 | warp 5
//     lines 32..63                                    warp 2 | warp 6         warp 3 | warp 7
//
//     output (64 lines x 512 dims)                    warp w: all lines, dims 64 w .. 64 w + 63
//
// Two warps have the halves of the dims of the same scores. Each sends the other half of its partial scores (Exchange),
// adds what it receives, and does the softmax of its own half of the lines: a thread has OWN lines, 8 apart.
// With tiles of 64 keys q lies in shared memory. With tiles of 32 each warp keeps its part of q in registers: a block
// needs less than half of the shared memory (for cards that have no more) and reads K twice as often from there.
enum { FLASH_LINES = 64 };
template <int HD, int N> struct Flash {
    static constexpr bool SHARED_Q = N == 64;
    static constexpr int WARPS = HD / 64, THREADS = 32 * WARPS, HALVES = HD / 256, TILES = WARPS / HALVES;
    static constexpr int COLUMNS = N / 32;     // of 32 keys
    static constexpr int M = COLUMNS, LINES = 16 * M, OWN = 2 * M / HALVES;
    static constexpr int STORED = SHARED_Q ? FLASH_LINES : 16;         // lines that are stored at once
    struct __align__(8 * OWN) Exchange { float2 line[OWN]; };          // scores that a lane sends to the other half
    static constexpr int EXCHANGE_BYTES = HALVES == 2 ? TILES * 2 * 4 * 32 * (int)sizeof(Exchange) : 0;
    // Weights and Exchange. With two columns a barrier separates their use, and they share a place.
    static constexpr int EXCHANGE_AT = COLUMNS == 2 ? 0 : FLASH_LINES * N * 2;
    static constexpr int BOTH = EXCHANGE_AT + EXCHANGE_BYTES, TILE_WEIGHTS = FLASH_LINES * N * 2;
    static constexpr int WEIGHT_BYTES = BOTH > TILE_WEIGHTS ? BOTH : TILE_WEIGHTS;
    static_assert((N == 64 || N == 32) && (HD == 256 || HD == 512), "tiles of 32 keys and half dims of 256");

    int columns, tile, half, line0;    // which 32 keys; which of TILES and of HALVES; first of LINES lines
    int out_dim0;

    __device__ Flash() {
        const int warp = threadIdx.x / 32;
        columns = warp % COLUMNS, tile = warp % TILES, half = warp / TILES, line0 = tile / COLUMNS * LINES;
        out_dim0 = warp * 64;
    }
    __device__ int line(int l) const { return line0 + 8 * (half * OWN + l) + threadIdx.x % 32 / 4; }   // of the thread
    static size_t bytes(int n_k, int n_v) {
        return (size_t)(SHARED_Q ? FLASH_LINES * HD * 2 : 0) + (size_t)n_v * N * HD * 2 + (size_t)N * n_k * 2 +
               WEIGHT_BYTES + FLASH_LINES * (3 * sizeof(float) + sizeof(FlashRow));
    }
};

// Chunk c (16 bytes) of row r lies at c ^ r % 8 (rows of 64 bytes: c ^ r / 2 % 4), so that eight rows that are read
// together lie in different banks.
__device__ static inline int flash_place(int row, int chunk, int dim) {
    return row * dim + ((chunk ^ (dim == 32 ? row >> 1 & 3 : row & 7)) << 3);
}

// The rows of the block that follow `from` in its segment.
__device__ static inline FlashRun flash_run(const FlashTask &a, const FlashRow *rows, int r0, int n_here, int from) {
    const RowMask self = row_mask(a.b, a.n_seqs, a.window, OWN_CAUSAL, r0 + from);
    int n = 0, low = INT_MAX, end = 0, whole_low = 0, whole_end = INT_MAX;
    for (int r = from + threadIdx.x % 32; r < n_here && rows[r].seg == self.seg; r += 32) {
        const FlashRow &v = rows[r];
        n++;
        low = min(low, v.tree ? min(v.first, self.len) : v.first), end = max(end, v.end);
        whole_low = max(whole_low, v.first), whole_end = min(whole_end, v.tree ? min(v.end, self.len) : v.end);
    }
    n = __reduce_add_sync(~0u, n);
    low = __reduce_min_sync(~0u, low), end = __reduce_max_sync(~0u, end);
    whole_low = __reduce_max_sync(~0u, whole_low), whole_end = __reduce_min_sync(~0u, whole_end);
    return (FlashRun){ self.seq, self.len, self.seg_first, (int)blockIdx.y, from, from + n, low, end, whole_low,
                       whole_end };
}

// Starts to copy N keys from j0 on, rows of DIM values; zeros for keys that no row sees.
template <int DIM, int THREADS, int N>
__device__ static inline void flash_copy(const FlashTask &a, const FlashRun &s, const __half *cache,
                                         const __half *stage, int j0, __half *to) {
    constexpr int STEP = THREADS / (DIM / 8);          // keys at a time
    const int chunk = threadIdx.x % (DIM / 8), key0 = threadIdx.x / (DIM / 8);
    const bool staged = a.staged && j0 + N > s.len;
    const size_t slot = ((size_t)s.seq * a.n_kv_heads + s.head) * a.slots + modulo(j0, a.by_slots);
    const __half *data = cache + slot * DIM + 8 * chunk;
    const __half *stage_data = stage + ((ptrdiff_t)s.head * a.stage_slots + s.seg_first + j0 - s.len) * DIM + 8 * chunk;
    if (j0 >= s.low && j0 + N <= s.end && (!staged || j0 >= s.len)) { // nearly all tiles: complete and contiguous
        const __half *from = (staged ? stage_data : data) + key0 * DIM;
        to += key0 * DIM;
#pragma unroll
        for (int k = 0; k < N; k += STEP)     // key0 < STEP, so key0 and k have no bit in common
            copy_ahead(to + k * DIM + ((chunk ^ key0 % 8 ^ k % 8) << 3), from + k * DIM);
        return;
    }
#pragma unroll 1
    for (int key = key0; key < N; key += STEP) {
        const int j = j0 + key;
        const bool seen = j >= s.low && j < s.end;
        const __half *from = staged && seen && j >= s.len ? stage_data : data;
        copy_or_zero(to + flash_place(key, chunk, DIM), from + key * DIM, seen);
    }
}

// Are all keys of the tile from j0 on visible to some row, and in the cache?
template <int N> __device__ static inline bool flash_in_cache(const FlashTask &a, const FlashRun &s, int j0) {
    return j0 >= s.low && j0 + N <= (a.staged ? min(s.end, s.len) : s.end);
}

// Starts to copy the quantised rows of a plane from key j0 on to raw, then their scales.
template <int THREADS, int N>
__device__ static inline void flash_prefetch(const FlashTask &a, const FlashRun &s, const CodedPlane &p, int j0,
                                             char *raw) {
    const int bytes = N * 16 * p.chunks, scale_bytes = N * p.scale_bytes;
    const size_t slot = ((size_t)s.seq * a.n_kv_heads + s.head) * a.slots + modulo(j0, a.by_slots);
    const char *codes = p.codes + slot * (16 * p.chunks), *scales = p.scales + slot * p.scale_bytes;
    for (int i = 16 * threadIdx.x; i < bytes; i += 16 * THREADS) copy_ahead(raw + i, codes + i);
    for (int i = 16 * threadIdx.x; i < scale_bytes; i += 16 * THREADS) copy_ahead(raw + bytes + i, scales + i);
}

// Decodes N keys from j0 on to the layout of flash_copy; a thread decodes its 8 values of a row at a time.   raw: where
// flash_prefetch copied them; NULL: read them from the cache
template <int DIM, int THREADS, int N>
__device__ static inline void flash_decode(const FlashTask &a, const FlashRun &s, const CodedPlane &p, int j0,
                                           const char *raw, __half *to) {
    constexpr int STEP = THREADS / (DIM / 8);          // keys at a time
    const int chunk = threadIdx.x % (DIM / 8), row_bytes = 16 * p.chunks;
    const size_t slot = ((size_t)s.seq * a.n_kv_heads + s.head) * a.slots + modulo(j0, a.by_slots);
    const ptrdiff_t stage_slot = (ptrdiff_t)s.head * a.stage_slots + s.seg_first + j0 - s.len;
    const char *codes = raw ? raw : p.codes + slot * row_bytes;
    const char *scales = raw ? raw + N * row_bytes : p.scales + slot * p.scale_bytes;
    with_type(p.type, [&](auto t) {
#pragma unroll 4
        for (int key = threadIdx.x / (DIM / 8); key < N; key += STEP) {
            const int j = j0 + key;
            const bool seen = j >= s.low && j < s.end, there = a.staged && seen && j >= s.len;
            const ptrdiff_t at = there ? stage_slot + key : key;
            unsigned h[4] = { };
            if (seen)
                read_halves<decltype(t)::type>((there ? p.stage_codes : codes) + at * row_bytes,
                                             (there ? p.stage_scales : scales) + at * p.scale_bytes, 8 * chunk, h);
            *(uint4 *)(to + flash_place(key, chunk, DIM)) = make_uint4(h[0], h[1], h[2], h[3]);
        }
    });
}

// q of a line of the block; NULL: the line is not of the run.
template <int HD>
__device__ static inline const float *flash_query(const FlashTask &a, const FlashRun &s, int r0, int line) {
    const int row = quotient(line, a.by_group), h = line - row * a.group;
    return row >= s.from && row < s.to ? a.q + ((size_t)(r0 + row) * a.n_heads + s.head * a.group + h) * HD : NULL;
}

// Writes q of the block's lines as halves; zeros for lines that are not of the run.
template <int HD, int N>
__device__ static inline void flash_queries(const FlashTask &a, const FlashRun &s, int r0, __half *q) {
    for (int i = threadIdx.x; i < FLASH_LINES * HD / 8; i += Flash<HD, N>::THREADS) {
        const int line = i / (HD / 8), chunk = i % (HD / 8);
        const float4 *x = (const float4 *)flash_query<HD>(a, s, r0, line);
        uint4 v = make_uint4(0, 0, 0, 0);
        if (x) {
            const uint2 lo = halves_of(x[2 * chunk]), hi = halves_of(x[2 * chunk + 1]);
            v = make_uint4(lo.x, lo.y, hi.x, hi.y);
        }
        *(uint4 *)(q + flash_place(line, chunk, HD)) = v;
    }
}

// Loads the warp's part of q as multiply_half() takes it: 16 lines and 256 dims, from dim 0 or 256 on. line[i]: q of
// the thread's lines, NULL: zeros. dim: its number of dims
enum { FLASH_QUERIES = 256 / 16 };
__device__ static inline void flash_own_queries(const float *const line[2], int half, int dim,
                                                unsigned (&q)[FLASH_QUERIES][4]) {
#pragma unroll
    for (int i = 0; i < 4 * FLASH_QUERIES; i++) {
        const int at = half * 256 + i / 4 * 16 + i / 2 % 2 * 8 + threadIdx.x % 4 * 2;
        const float2 x = line[i % 2] && at < dim ? *(const float2 *)(line[i % 2] + at) : make_float2(0, 0);
        q[i / 4][i % 4] = half_bits(__floats2half2_rn(x.x, x.y));
    }
}

// s (LINES lines, 32 keys) += q k for 64 dims. k: first key and dim, `dim` values to a row. lines(m, d, r): gives lines
// 16 m .. of dims d .. d + 15 as multiply_half() takes them
template <int M, typename Lines>
__device__ static inline void flash_scores(float (&s)[M][4][4], const __half *k, int dim, Lines lines) {
    const int lane = threadIdx.x % 32, right = (lane / 8 % 2 ^ lane % 8) << 3;
    k += (lane / 16 * 8 + lane % 8) * dim;
#pragma unroll
    for (int d = 0; d < 64; d += 16) {
        unsigned line[M][4], key[2][4];
#pragma unroll
        for (int m = 0; m < M; m++) lines(m, d, line[m]);
#pragma unroll
        for (int n = 0; n < 2; n++) load_matrices(key[n], k + (right ^ d) + 16 * n * dim);
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < 4; n++) multiply_half(s[m][n], line[m], key[n / 2] + n % 2 * 2);
    }
}

// flash_send_half writes the partial scores of the lines that the warp of the other half keeps. After a barrier of the
// block, flash_add_half adds what this warp received: the first OWN lines of s become complete scores.
//   room      (TILES, 2, 4, 32) Exchange
template <int HD, int N>
__device__ static inline void flash_send_half(const Flash<HD, N> &f, const float (&s)[Flash<HD, N>::M][4][4],
                                              char *room) {
    typedef Flash<HD, N> Shape;
    typedef typename Shape::Exchange Exchange;
    Exchange *other = (Exchange *)room + (f.tile * 2 + 1 - f.half) * 128 + threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < 4; n++) {
        typename Shape::Exchange exchange;
#pragma unroll
        for (int l = 0; l < Shape::OWN; l++) {
            const float *low = &s[l / 2][n][l % 2 * 2], *high = &s[(Shape::OWN + l) / 2][n][(Shape::OWN + l) % 2 * 2];
            exchange.line[l] = f.half ? make_float2(low[0], low[1]) : make_float2(high[0], high[1]);
        }
        other[32 * n] = exchange;
    }
}
template <int HD, int N>
__device__ static inline void flash_add_half(const Flash<HD, N> &f, float (&s)[Flash<HD, N>::M][4][4],
                                             const char *room) {
    typedef Flash<HD, N> Shape;
    typedef typename Shape::Exchange Exchange;
    const Exchange *mine = (const Exchange *)room + (f.tile * 2 + f.half) * 128 + threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const typename Shape::Exchange exchange = mine[32 * n];
#pragma unroll
        for (int l = 0; l < Shape::OWN; l++) {
            float *low = &s[l / 2][n][l % 2 * 2];
            const float *high = &s[(Shape::OWN + l) / 2][n][(Shape::OWN + l) % 2 * 2];
            low[0] = (f.half ? high[0] : low[0]) + exchange.line[l].x;
            low[1] = (f.half ? high[1] : low[1]) + exchange.line[l].y;
        }
    }
}

// Sets scores of keys that a line does not see to -Inf. j0: first key of the tile.
template <int HD, int N>
__device__ static inline void flash_mask(const FlashTask &a, const Flash<HD, N> &f, const FlashRun &s,
                                         const FlashRow *rows,
                                         int n_here, int j0, float (&score)[Flash<HD, N>::M][4][4]) {
#pragma unroll
    for (int l = 0; l < Flash<HD, N>::OWN; l++) {
        const FlashRow v = rows[min(quotient(f.line(l), a.by_group), n_here - 1)];
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const int j = j0 + f.columns * 32 + n / 2 * 8 + threadIdx.x % 4 * 2 + n % 2;
            const bool seen = v.tree && j >= s.len ? v.ancestors >> (j - s.len) & 1 : j >= v.first;
            if (!seen || j >= v.end) score[l / 2][n / 2][l % 2 * 2 + n % 2] = -INFINITY;
        }
    }
}

// The maximum of line l over the warp's keys.
template <int M> __device__ static inline float flash_top(const float (&s)[M][4][4], int l) {
    float most = -INFINITY;
#pragma unroll
    for (int n = 0; n < 4; n++) most = fmaxf(most, fmaxf(s[l / 2][n][l % 2 * 2], s[l / 2][n][l % 2 * 2 + 1]));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    return fmaxf(most, __shfl_xor_sync(~0u, most, 2));
}

// Softmax of a tile: writes the weights (FLASH_LINES, N) of its keys, and the factor for what was added before
// (rescale). tops: (2, FLASH_LINES) maxima, where two warps have the keys of a line. top, sum: of the thread's lines;
// sum is over its own keys. A weight is exp2(scale * score - scale * top). A top that is too low does no harm while
// weights stay within 2^FLASH_SLACK, where f16 is as exact as below 1. So top seldom changes, and acc is seldom
// rescaled.
enum { FLASH_SLACK = 8 };
template <int HD, int N>
__device__ static inline void flash_softmax(const Flash<HD, N> &f, const float (&s)[Flash<HD, N>::M][4][4], float scale,
                                          const float *tops, float (&top)[Flash<HD, N>::OWN],
                                          float (&sum)[Flash<HD, N>::OWN],
                                          __half *weights, float *rescale) {
    const int k2 = threadIdx.x % 4 * 2;
#pragma unroll
    for (int l = 0; l < Flash<HD, N>::OWN; l++) {
        const int line = f.line(l);
        const float most = Flash<HD, N>::COLUMNS == 2 ? fmaxf(tops[line], tops[FLASH_LINES + line]) : flash_top(s, l);
        const float now = (most - top[l]) * scale > FLASH_SLACK ? most : top[l];
        const float base = now == -INFINITY ? 0 : now * scale, less = fast_exp2(__fmaf_rn(top[l], scale, -base));
        float more = 0;
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const float *x = &s[l / 2][n][l % 2 * 2];
            const __half2 p = __floats2half2_rn(fast_exp2(__fmaf_rn(x[0], scale, -base)),
                                                fast_exp2(__fmaf_rn(x[1], scale, -base)));
            more += __low2float(p) + __high2float(p);
            *(__half2 *)(weights + flash_place(line, f.columns * 4 + n, N) + k2) = p;
        }
        sum[l] = __fmaf_rn(sum[l], less, more), top[l] = now;
        if (f.columns == 0 && k2 == 0) rescale[line] = less;
    }
}

// acc (64 lines, 64 dims) += weights v, after acc is multiplied with rescale. v: first of the dims.
template <int HD, int N>
__device__ static inline void flash_values(float (&acc)[4][8][4], const __half *weights, const float *rescale,
                                           const __half *v) {
    const int lane = threadIdx.x % 32, right_v = (lane / 16 ^ lane % 8) << 3;
    const int right_p = N == 32 ? (lane / 16 ^ (lane >> 1 & 3)) << 3 : right_v;
    float less[4][2];
    bool shrinks = false;
    weights += lane % 16 * N, v += lane % 16 * HD;
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
        for (int e = 0; e < 2; e++) less[m][e] = rescale[16 * m + 8 * e + lane / 4], shrinks |= less[m][e] != 1;
    if (__any_sync(~0u, shrinks))
#pragma unroll
        for (int m = 0; m < 4; m++)
#pragma unroll
            for (int n = 0; n < 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) acc[m][n][e] *= less[m][e / 2];
#pragma unroll
    for (int k = 0; k < N; k += 16) {
        unsigned p[4][4], x[4];
#pragma unroll
        for (int m = 0; m < 4; m++) load_matrices(p[m], weights + (right_p ^ k) + 16 * m * N);
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
            load_matrices_transposed(x, v + (right_v ^ 8 * n) + k * HD);
#pragma unroll
            for (int m = 0; m < 4; m++) {
                multiply_half(acc[m][n], p[m], x);
                multiply_half(acc[m][n + 1], p[m], x + 2);
            }
        }
    }
}

// Stores the lines of a run: acc divided by the sums.
//   o (STORED, HD + ROW_PAD), in the place of q and tiles; sums (2, FLASH_LINES)
template <int HD, int N, bool CODED>
__device__ static inline void flash_store(const FlashTask &a, const Flash<HD, N> &f, const FlashRun &s, int r0,
                                         const float (&acc)[4][8][4], float (&sum)[Flash<HD, N>::OWN], float *sums,
                                         float *o) {
    typedef Flash<HD, N> Shape;
    constexpr int ROW = HD + ROW_PAD, STORED = Shape::STORED;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int l = 0; l < Shape::OWN; l++) {
        sum[l] += __shfl_xor_sync(~0u, sum[l], 1);
        sum[l] += __shfl_xor_sync(~0u, sum[l], 2);
        if (lane % 4 == 0) sums[f.columns * FLASH_LINES + f.line(l)] = sum[l];
    }
    __syncthreads();                                   // tiles have been read
#pragma unroll
    for (int line0 = 0; line0 < FLASH_LINES; line0 += STORED) {
#pragma unroll
        for (int m = 0; m < STORED / 16; m++)
#pragma unroll
            for (int n = 0; n < 8; n++) {
                const float *x = acc[line0 / 16 + m][n];
                float *at = o + (16 * m + lane / 4) * ROW + f.out_dim0 + 8 * n + lane % 4 * 2;
                *(float2 *)at = make_float2(x[0], x[1]);
                *(float2 *)(at + 8 * ROW) = make_float2(x[2], x[3]);
            }
        __syncthreads();                               // values and sums are there
        if (CODED && a.rotated) {
#pragma unroll 1
            for (int job = threadIdx.x / 32; job < STORED * (HD / KV_ROTATION); job += Shape::WARPS)
                kv_rotate_back(o + job / (HD / KV_ROTATION) * ROW + job % (HD / KV_ROTATION) * KV_ROTATION);
            __syncthreads();                           // values are there
        }
#pragma unroll 1
        for (int job = threadIdx.x / 32; job < STORED * (HD / 128); job += Shape::WARPS) {
            const int at = job / (HD / 128), line = line0 + at, i = job % (HD / 128) * 128 + 4 * lane;
            const int row = quotient(line, a.by_group);
            if (row < s.from || row >= s.to) continue;
            const float all = Shape::COLUMNS == 2 ? sums[line] + sums[FLASH_LINES + line] : sums[line];
            const float factor = CODED && a.n_rot ? kv_tied_factor(a.v.type) : 1;
            const float scale = all == 0 ? 0 : __frcp_rn(all) * factor;
            const float4 y = *(const float4 *)(o + at * ROW + (a.n_rot ? tied_place(i, HD, a.n_rot) : i));
            store_four(a.out, ((size_t)(r0 + row) * a.n_heads + s.head * a.group + line - row * a.group) * HD + i,
                     make_float4(y.x * scale, y.y * scale, y.z * scale, y.w * scale));
        }
        __syncthreads();                               // shared memory is free for the next lines or the next run
    }
}

// flash: softmax(scale * q k) v for the rows of a prompt, FLASH_LINES lines of one KV head.
//   shapes    q (n_rows, n_heads, HD), cache and stage as in gemma4.h; N_K < HD: tied, V serves the rest of K
//   launch    grid (ceil(n_rows / rows), n_kv_heads), block Flash::THREADS, dynamic shared memory Flash::bytes
//   CODED     the cache is quantised: tiles are decoded before they are used, from codes prefetched a tile ahead if
//             `prefetches`
//   LISTED    only the tiles of listed blocks, in their order; if all are listed, the bits of the unlisted kernel
//   traffic   every visible key once for FLASH_LINES lines, 2 * (N_K + HD) B for 4 * HD FLOP a line. Neighbouring
//             blocks read the same keys and share them in L2
//   numerics  q in f16, scores on tensor cores with f32 sums, the HALVES of the dims added. Online softmax in f32, by
//             tiles of N keys, aligned to key 0; weights are rounded to f16 and summed so; O += P V with f32 sums.
//             Lines do not mix: a row's result depends only on what it sees
//   see       ref_attend
//
// One tile of an untied f16 cache with HALVES 2; the arrows are copies, from their start to the wait for them:
//
//     steps    wait K(i) | scores | send | barrier | add, mask, softmax | wait V(i) | output += weights V | next tile
//     V(i)              >------------------------------------------------->
//     K(i + 1)                                    >---------------------------------------------------------->
//
// K(i + 1) may overwrite K(i) after the first barrier that follows the last read of K(i). Tied caches (n_v 2) have two
// buffers for V, because scores read V too: there V(i + 1) starts where V(i) does here.
template <int HD, int N, int N_K, bool CODED, bool LISTED>
__global__ void __launch_bounds__(Flash<HD, N>::THREADS, 256 / Flash<HD, N>::THREADS)
    flash_kernel(const __grid_constant__ FlashTask a) {
    typedef Flash<HD, N> Shape;
    constexpr int HALVES = Shape::HALVES, THREADS = Shape::THREADS;
    constexpr bool TIED = N_K < HD, TWO_COLUMNS = Shape::COLUMNS == 2;
    // The barrier after the last read of K(i): of the halves, of the maxima, or else of the weights.
    constexpr bool K_BEFORE_V = HALVES == 2 || TWO_COLUMNS;
    wait_for_previous_kernel();
    const Shape f;
    const int n_v = a.n_v;
    __half *q = (__half *)shared_bytes;                // (FLASH_LINES, HD), or none
    __half *v_tiles = q + (Shape::SHARED_Q ? FLASH_LINES * HD : 0);    // (n_v, N, HD)
    __half *k_tile = v_tiles + n_v * N * HD, *weights = k_tile + N * N_K;              // (N, N_K); (FLASH_LINES, N)
    char *exchange = (char *)weights + Shape::EXCHANGE_AT;
    float *tops = (float *)((char *)weights + Shape::WEIGHT_BYTES);    // (2, FLASH_LINES)
    float *rescale = tops + 2 * FLASH_LINES;           // (FLASH_LINES)
    FlashRow *rows = (FlashRow *)(rescale + FLASH_LINES);              // of the block
    const int r0 = (gridDim.x - 1 - blockIdx.x) * a.rows;              // the longest rows first
    const int n_here = min(a.rows, a.b.n_rows - r0);
    if ((int)threadIdx.x < n_here) {
        const RowMask v = row_mask(a.b, a.n_seqs, a.window, OWN_CAUSAL, r0 + threadIdx.x);
        rows[threadIdx.x] = (FlashRow){ v.seg, v.first, v.end, v.kind == SEG_TREE, v.ancestors };
    }
    __syncthreads();

    for (int from = 0; from < n_here;) {               // rows of one segment at a time; mostly there is one
        const FlashRun run = flash_run(a, rows, r0, n_here, from);
        if (CODED && a.large_only && a.b.segs[rows[from].seg].n <= STEP_ROWS) {
            from = run.to;
            continue;
        }
        const int first = run.low / N, list = LISTED ? r0 / SELECT_ROWS * a.n_kv_heads + blockIdx.y : 0;
        const bool listed = LISTED && a.blocks.n[list] >= 0;
        const int32_t *block = listed ? a.blocks.block + (size_t)list * a.blocks.n_blocks : NULL;
        int n_tiles = (run.end - 1) / N - first + 1;
        auto key0 = [&](int i) {                       // first key of tile i
            if (!LISTED || !block) return (first + i) * N;
            return block[i / (SELECT_KEYS / N)] * SELECT_KEYS + i % (SELECT_KEYS / N) * N;
        };
        if (LISTED && block) {
            n_tiles = a.blocks.n[list] * (SELECT_KEYS / N);
            while (n_tiles && key0(n_tiles - 1) >= run.end) n_tiles--; // visible only to later rows
        }
        auto copy_k = [&](int i) {
            if (i < n_tiles) flash_copy<N_K, THREADS, N>(a, run, a.cache_k, a.stage_k, key0(i), k_tile);
            copy_commit();
        };
        char *k_raw = (char *)(rows + FLASH_LINES), *v_raw = k_raw + N * (16 * a.k.chunks + a.k.scale_bytes);
        auto prefetched = [&](int i) { return CODED && a.prefetches && flash_in_cache<N>(a, run, key0(i)); };
        auto prefetch = [&](int i) {
            if (i < n_tiles && prefetched(i)) {
                flash_prefetch<THREADS, N>(a, run, a.k, key0(i), k_raw);
                flash_prefetch<THREADS, N>(a, run, a.v, key0(i), v_raw);
            }
            copy_commit();
        };
        auto copy_v = [&](int i) {
            __half *to = v_tiles + i % n_v * N * HD;
            if (i < n_tiles) flash_copy<HD, THREADS, N>(a, run, a.cache_v, a.stage_v, key0(i), to);
            copy_commit();
        };
        if (CODED) prefetch(0);
        else copy_k(0);
        if (TIED && !CODED) copy_v(0);
        unsigned own_q[FLASH_QUERIES][4];
        if constexpr (Shape::SHARED_Q) flash_queries<HD, N>(a, run, r0, q);
        else {
            const int line = f.line0 + threadIdx.x % 32 / 4;
            const float *const lines[2] = { flash_query<HD>(a, run, r0, line), flash_query<HD>(a, run, r0, line + 8) };
            flash_own_queries(lines, f.half, HD, own_q);
        }

        float acc[4][8][4] = { }, sum[Shape::OWN] = { }, top[Shape::OWN];
#pragma unroll
        for (int l = 0; l < Shape::OWN; l++) top[l] = -INFINITY;
#pragma unroll 1
        for (int i = 0; i < n_tiles; i++) {
            const __half *v_tile = v_tiles + (CODED ? 0 : i % n_v * N * HD);
            wait_for_copies<0>();
            __syncthreads();                           // K has arrived, and V if TIED; all are done with tile i - 1
            if (CODED) {
                flash_decode<N_K, THREADS, N>(a, run, a.k, key0(i), prefetched(i) ? k_raw : NULL, k_tile);
                flash_decode<HD, THREADS, N>(a, run, a.v, key0(i), prefetched(i) ? v_raw : NULL, v_tiles);
                __syncthreads();                       // tile i is there
                prefetch(i + 1);
            } else if (n_v == 2) copy_v(i + 1);
            else if (!TIED) copy_v(i);

            float s[Shape::M][4][4] = { };
            const int column0 = f.columns * 32;
            if constexpr (Shape::SHARED_Q) {
                const int lane = threadIdx.x % 32, right = (lane / 16 ^ lane % 8) << 3;
                const __half *line = q + (f.line0 + lane % 16) * HD;
#pragma unroll 2
                for (int d = f.half * (HD / HALVES); d < (f.half + 1) * (HD / HALVES); d += 64) {
                    auto lines = [&](int m, int e, unsigned r[4]) {
                        load_matrices(r, line + d + (right ^ e) + 16 * m * HD);
                    };
                    if (d < N_K) flash_scores(s, k_tile + column0 * N_K + d, N_K, lines);
                    else flash_scores(s, v_tile + column0 * HD + d, HD, lines);
                }
            } else {
#pragma unroll
                for (int d = 0; d < 256; d += 64) {
                    const int dim = f.half * 256 + d;
                    auto lines = [&](int, int e, unsigned r[4]) {
#pragma unroll
                        for (int k = 0; k < 4; k++) r[k] = own_q[(d + e) / 16][k];
                    };
                    flash_scores(s, (dim < N_K ? k_tile : v_tile) + dim, dim < N_K ? N_K : HD, lines);
                }
            }
            if (HALVES == 2) {
                flash_send_half(f, s, exchange);
                __syncthreads();                       // all scores are there
                if (!CODED) copy_k(i + 1);
                flash_add_half(f, s, exchange);
            }
            const int j0 = key0(i);
            if (j0 < run.whole_low || j0 + N > run.whole_end) flash_mask(a, f, run, rows, n_here, j0, s);
            if (TWO_COLUMNS) {
#pragma unroll
                for (int l = 0; l < Shape::OWN; l++) {
                    const float most = flash_top(s, l);
                    if (threadIdx.x % 4 == 0) tops[f.columns * FLASH_LINES + f.line(l)] = most;
                }
                __syncthreads();                       // the maxima of both warps of a line are there
                if (HALVES == 1 && !CODED) copy_k(i + 1);
            }
            flash_softmax(f, s, a.scale, tops, top, sum, weights, rescale);
            if (!TIED && !CODED) wait_for_copies<K_BEFORE_V ? 1 : 0>();        // for V, not for the next K
            __syncthreads();                           // weights are there
            if (!K_BEFORE_V && !CODED) copy_k(i + 1);
            flash_values<HD, N>(acc, weights, rescale, v_tile + f.out_dim0);
            if (TIED && n_v == 1 && !CODED) {
                __syncthreads();                       // V has been read
                copy_v(i + 1);
            }
        }
        flash_store<HD, N, CODED>(a, f, run, r0, acc, sum, tops, (float *)shared_bytes);
        from = run.to;
    }
}

typedef struct {              // how flash computes an attend; kernel NULL: it cannot
    void (*kernel)(FlashTask);
    int    keys, threads, n_v;         // keys of a tile
    int    resident;          // blocks of an SM at once
    bool   prefetches;
    size_t bytes;             // of shared memory
} FlashPlan;

// The plan with tiles of N keys; kernel NULL: an SM of this card lacks shared memory for as many blocks as it has
// registers.
template <int HD, int N, int N_K, bool LISTED> static FlashPlan flash_plan_of(const Cache *c) {
    typedef Flash<HD, N> Shape;
    const bool coded = is_coded(c);
    const size_t row = kv_row_bytes(c->k.type, N_K) + kv_scale_bytes(c->k.type, N_K) + kv_row_bytes(c->v.type, HD) +
        kv_scale_bytes(c->v.type, HD);
    FlashPlan f = { };
    f.keys = N, f.threads = Shape::THREADS, f.resident = 256 / Shape::THREADS;
    auto fits = [&](size_t bytes) {
        return bytes <= (size_t)cuda.card.block_shared &&
            f.resident * (bytes + BLOCK_SYSTEM) <= (size_t)cuda.card.sm_shared;
    };
    f.n_v = N_K < HD && !coded ? 2 : 1;                // if scores read V too, it is copied a tile ahead
    while (f.n_v && !fits(Shape::bytes(N_K, f.n_v))) f.n_v--;
    if (!f.n_v) return f;
    f.kernel = coded ? flash_kernel<HD, N, N_K, true, LISTED> : flash_kernel<HD, N, N_K, false, LISTED>;
    f.bytes = Shape::bytes(N_K, f.n_v);
    // Smaller blocks share an SM: the others work while one waits.
    f.prefetches = coded && f.resident == 1 && fits(f.bytes + N * row);
    if (f.prefetches) f.bytes += N * row;
    return f;
}
template <int HD, int N_K, bool LISTED> static FlashPlan flash_plan(const Cache *c) {
    const FlashPlan f = flash_plan_of<HD, 64, N_K, LISTED>(c);
    return f.kernel ? f : flash_plan_of<HD, 32, N_K, LISTED>(c);
}

// flash_kernel computes prompts with the head sizes of Gemma 4 on f16 and quantised caches, if segments have enough
// rows; it reads no tail, so of a cache with one it computes sparse prompts alone.
//   nc: columns of attend_half or attend_coded; 0: they cannot read this cache
static FlashPlan flash_of(const Attend *o, int nc) {
    const Cache *c = o->cache;
    const int n_rows = o->batch->n_rows, group = o->n_heads / c->n_kv_heads;
    FlashPlan f = { };
    if (n_rows <= STEP_ROWS || n_rows < 8 * o->batch->n_segs || o->own != OWN_CAUSAL || group > FLASH_LINES) return f;
    if (!is_readable(&c->k) || !is_readable(&c->v) || (c->tail_slots && !(nc && o->blocks))) return f;
    if (c->head_dim == 256 && c->k.dim == 256 && !o->blocks) f = flash_plan<256, 256, false>(c);
    if (c->head_dim == 512 && c->k.dim == 512)
        f = o->blocks ? flash_plan<512, 512, true>(c) : flash_plan<512, 512, false>(c);
    if (c->head_dim == 512 && c->k.dim == 128)
        f = o->blocks ? flash_plan<512, 128, true>(c) : flash_plan<512, 128, false>(c);
    return f;
}

static void attend_flash(const Attend *o, const FlashPlan *f) {
    const Cache *c = o->cache, *stage = o->staging ? o->staging : c;
    const int n_rows = o->batch->n_rows;
    FlashTask task = { };
    task.b = *o->batch, task.n_seqs = c->n_seqs, task.window = o->window;
    task.group = o->n_heads / c->n_kv_heads, task.rows = FLASH_LINES / task.group, task.by_group = divisor(task.group);
    task.n_heads = o->n_heads, task.n_kv_heads = c->n_kv_heads;
    task.n_rot = c->n_rot, task.n_v = f->n_v, task.prefetches = f->prefetches;
    task.slots = c->slots, task.by_slots = divisor(c->slots);
    task.staged = o->staging != NULL, task.stage_slots = stage->slots;
    task.stage_k = (const __half *)stage->k.data, task.stage_v = (const __half *)stage->v.data;
    task.cache_k = (const __half *)c->k.data, task.cache_v = (const __half *)c->v.data;
    task.k = coded_plane(&c->k, o->staging ? &stage->k : NULL);
    task.v = coded_plane(&c->v, o->staging ? &stage->v : NULL);
    task.rotated = kv_group(c->v.type), task.large_only = c->tail_slots;
    task.q = o->q, task.scale = o->scale * 1.44269504f, task.out = o->out;
    if (o->blocks) task.blocks = *o->blocks;
    while (o->blocks && SELECT_ROWS % task.rows) task.rows--;          // the rows of a block share one list
    const dim3 grid(div_up(n_rows, task.rows), c->n_kv_heads);
    report_plan("flash", grid, f->threads, f->bytes, 0, "tiles of %d keys, %d of V%s", f->keys, f->n_v,
              f->prefetches ? ", codes a tile ahead" : "");
    launch(WRITES_ACTIVATIONS, f->kernel, grid, f->threads, f->bytes, task);
    CHECK_LAUNCH("attend n_rows=%d n_heads=%d head_dim=%d", n_rows, o->n_heads, c->head_dim);
}

// Once at start.
template <int HD, int N, int N_K, bool LISTED> static void allow_flash_of(void) {
    allow_shared(flash_kernel<HD, N, N_K, false, LISTED>, 0);
    allow_shared(flash_kernel<HD, N, N_K, true, LISTED>, 0);
}
template <int N> static void allow_flash(void) {
    allow_flash_of<256, N, 256, false>();
    allow_flash_of<512, N, 512, false>(), allow_flash_of<512, N, 512, true>();
    allow_flash_of<512, N, 128, false>(), allow_flash_of<512, N, 128, true>();
}

#include "parts/sparse.cuh"

// ---- caches of any types ----

typedef struct {              // the place of a key; k NULL: not visible
    const char *k, *v;
    const uint16_t *k_scales, *v_scales;
    KvType k_type, v_type;
} PlainKey;

__device__ static inline PlainKey plain_key(const Cache &c, int seq, int head, int slot) {
    return (PlainKey){ kv_row(c, c.k, seq, head, slot), kv_row(c, c.v, seq, head, slot),
                       kv_scales(c, c.k, seq, head, slot), kv_scales(c, c.v, seq, head, slot), c.k.type, c.v.type };
}

// attend, plain: softmax(scale * q k) v over the keys of one split, for a row and up to HEADS query heads that share a
// KV head.
//   shapes    q (n_rows, n_heads, head_dim), cache as in gemma4.h, of any types; values and stats as in attend_join;
//             blocks as in Attend, n NULL: none; row0: rows of the step before these
//   launch    grid (n_rows, n_kv_heads * ceil(group / HEADS), splits), block 256
//   traffic   reads K and V of the visible positions once per row and KV head (tied: V's row serves both)
//   numerics  f32 throughout; online softmax per tile
//   see       ref_attend
__global__ void __launch_bounds__(ATTEND_THREADS, 2) attend_plain_kernel(Attend o, Batch b, Cache c, Cache stage,
                                                                         bool staged, Splits splits, float *values,
                                                                         float2 *stats, BlockList blocks, int row0) {
    wait_for_previous_kernel();
    float *q = (float *)shared_bytes;                  // (HEADS, head_dim)
    __shared__ float p[HEADS][KEYS];                   // scores, then weights
    __shared__ float max_of[HEADS], sum_of[HEADS], rescale[HEADS];
    __shared__ PlainKey keys[KEYS];                    // of a tile
    const int hd = c.head_dim, group = o.n_heads / c.n_kv_heads, per_kv = (group + HEADS - 1) / HEADS, r = blockIdx.x;
    const int g = blockIdx.y / per_kv, head = g * group + blockIdx.y % per_kv * HEADS;
    const int n_heads = min(HEADS, group - (int)blockIdx.y % per_kv * HEADS), split = blockIdx.z;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const RowMask self = row_mask(b, c.n_seqs, o.window, o.own, r);
    const bool has_tail = reads_tail(&c, &b.segs[self.seg], blocks.n != NULL);
    const SplitTiles tiles = split_tiles(spans_of(self.low, self.end, splits), self.low, self.end, splits, split);
    if (tiles.from == tiles.to) return;                // attend_join does not read this split
    for (int i = threadIdx.x; i < n_heads * hd; i += blockDim.x) q[i] = o.q[((size_t)r * o.n_heads + head) * hd + i];
    if (threadIdx.x < HEADS) max_of[threadIdx.x] = -INFINITY, sum_of[threadIdx.x] = 0;
    float acc[HEADS][2] = { };                         // values 2 * thread and 2 * thread + 1
    for (int t = tiles.from; t < tiles.to; t++) {
        __syncthreads();                               // the weights of the last tile have been read
        if (threadIdx.x < KEYS) {
            const int j = tile_of(tiles, splits, t) * KEYS + threadIdx.x;
            const bool in_stage = j >= self.len && staged, in_tail = !in_stage && has_tail &&
                j > self.pos - c.tail_reach;
            const bool seen = is_visible(self, o.own, j) &&
                (!blocks.n || key_listed(blocks, (row0 + r) / SELECT_ROWS * c.n_kv_heads + g, j));
            keys[threadIdx.x] = !seen ? PlainKey{ }
                : in_stage ? plain_key(stage, 0, g, self.seg_first + j - self.len)
                : in_tail ? plain_key(tail_of(c), self.seq, g, j % c.tail_slots)
                          : plain_key(c, self.seq, g, j % c.slots);
        }
        __syncthreads();
        for (int k = warp; k < KEYS; k += ATTEND_WARPS) {
            const PlainKey &key = keys[k];
            if (!key.k) {
                if (lane < HEADS) p[lane][k] = -INFINITY;
                continue;
            }
            float dot[HEADS] = { };
            for (int i = 2 * lane; i < hd; i += 64) {  // tied: the rest of K is V
                const float2 x = i < c.k.dim ? kv_read2(key.k_type, key.k, key.k_scales, i)
                                             : kv_read2(key.v_type, key.v, key.v_scales, i);
                for (int h = 0; h < HEADS; h++)
                    if (h < n_heads) dot[h] = __fmaf_rn(q[h * hd + i + 1], x.y, __fmaf_rn(q[h * hd + i], x.x, dot[h]));
            }
            for (int h = 0; h < n_heads; h++) {
                const float s = warp_sum(dot[h]) * o.scale;
                if (lane == 0) p[h][k] = s;
            }
        }
        __syncthreads();
        if (warp < n_heads) {                          // a warp for each head, a lane for each key
            float *w = p[warp];
            const float s = w[lane], old = max_of[warp], now = fmaxf(old, warp_max(s));
            const float e = s == -INFINITY ? 0 : expf(s - now), more = warp_sum(e);
            w[lane] = e;
            __syncwarp();                              // all lanes have read max_of
            if (lane == 0) {
                rescale[warp] = now == -INFINITY ? 1 : expf(old - now);
                max_of[warp] = now;
                sum_of[warp] = sum_of[warp] * rescale[warp] + more;
            }
        }
        __syncthreads();
        const int i = 2 * threadIdx.x;
        if (i >= hd) continue;
        for (int h = 0; h < HEADS; h++)
            if (h < n_heads) acc[h][0] *= rescale[h], acc[h][1] *= rescale[h];
        for (int k = 0; k < KEYS; k++) {
            const PlainKey &key = keys[k];
            if (!key.k) continue;                      // not visible: the memory may contain anything
            float2 x = kv_read2(key.v_type, key.v, key.v_scales, i);
            if (c.n_rot) x.x *= kv_tied_factor(key.v_type), x.y *= kv_tied_factor(key.v_type);
            for (int h = 0; h < HEADS; h++)
                if (h < n_heads)
                    acc[h][0] = __fmaf_rn(p[h][k], x.x, acc[h][0]), acc[h][1] = __fmaf_rn(p[h][k], x.y, acc[h][1]);
        }
    }
    __syncthreads();
    for (int h = 0; h < HEADS; h++) {
        if (h >= n_heads) break;
        const size_t at = ((size_t)r * o.n_heads + head + h) * splits.n + split;
        if (threadIdx.x == 0) stats[at] = make_float2(max_of[h], sum_of[h]);
        if (2 * threadIdx.x < (unsigned)hd)
            values[at * hd + 2 * threadIdx.x] = acc[h][0], values[at * hd + 2 * threadIdx.x + 1] = acc[h][1];
    }
}

// Shared memory of a block for its stages.
static size_t attend_buffer_bytes(const Cache *c, int n_stages) {
    return is_coded(c) ? coded_block_buffer_bytes(c, n_stages) : n_stages * attend_stage_bytes(c->head_dim, c->k.dim);
}
static size_t attend_shared(const Cache *c, int nc, int fused, int n_stages) {
    return (is_coded(c) ? coded_fixed_bytes(c->head_dim) : attend_fixed_bytes(c->head_dim, c->k.dim, nc, fused)) +
        attend_buffer_bytes(c, n_stages);
}

typedef struct {              // a block of attend_half or attend_coded
    int columns;              // 0: these kernels cannot read this cache
    int fused;                // rows that it has shared memory to make
} AttendShape;

// As many of the wanted columns as fit, with one stage and `fused` rows.
static int attend_columns(const Cache *c, int wanted, int fused) {
    const int hd = c->head_dim;
    const size_t most = cuda.card.block_shared - STATIC_SHARED;
    if (is_coded(c))
        return is_readable(&c->k) && is_readable(&c->v) && c->k.dim % KV_ROTATION == 0 && attend_coded_of(hd) &&
            attend_shared(c, CODED_COLUMNS, 0, 0) <= most ? CODED_COLUMNS : 0;
    if (c->k.type != KV_F16 || c->v.type != KV_F16 || c->k.dim % (hd / 4) ||
        ATTEND_THREADS % (c->k.dim / 8) || c->n_rot % 4)
        return 0;
    // A block of 40 columns has an SM to itself, so it needs two stages: a tile is copied while another one is used.
    int nc = wanted > 32 ? 40 : 8 << ((wanted > 8) + (wanted > 16));
    const bool full = fused == FUSED_ROWS;
    while (nc && (!attend_half_of(hd, nc, full) || attend_shared(c, nc, fused, nc > 32 ? 2 : 1) > most))
        nc = nc > 32 ? 32 : nc > 8 ? nc / 2 : 0;
    return nc;
}

// If shared memory is short: room for the rows of this step only, or for none (then another launch makes them). That is
// worth more columns if the cache is long.
static AttendShape attend_shape(const Cache *c, int wanted, int n_rows) {
    const int rooms[] = { FUSED_ROWS, min_int(n_rows, FUSED_ROWS), 0 };
    AttendShape s = { 0, FUSED_ROWS };
    for (int i = 0; i < 3; i++) {
        const int nc = attend_columns(c, wanted, rooms[i]);
        if (nc > s.columns && (i < 2 || !s.columns || c->slots > RING_SLOTS)) s = (AttendShape){ nc, rooms[i] };
    }
    return s;
}

// Stages: as many as leave shared memory for the blocks that an SM gets, or can hold. 0: see coded_warp_buffer_bytes
static int attend_stages(const Cache *c, AttendShape s, size_t n_blocks) {
    const int most = (int)((n_blocks + cuda.card.n_sm - 1) / cuda.card.n_sm), least = !is_coded(c);
    auto fewer = [&](int n) { return is_coded(c) ? n / 2 : n - 1; };
    auto fit = [&](int n, int blocks) {
        const size_t bytes = attend_shared(c, s.columns, s.fused, n) + STATIC_SHARED;
        return bytes <= (size_t)cuda.card.block_shared &&
            blocks * (bytes + BLOCK_SYSTEM) <= (size_t)cuda.card.sm_shared;
    };
    int wanted = min_int(is_coded(c) ? 1 : attend_blocks(c->head_dim, s.columns), most), n = MAX_STAGES;
    if (!fit(max_int(least, 1), wanted)) wanted = 1;   // fewer stages would not make room for another block
    while (n > least && !fit(n, wanted)) n = fewer(n);
    return n;
}

// The attend of the rows from r on: their q and out.
static Attend attend_from(const Attend *o, int r) {
    const size_t at = (size_t)r * o->n_heads * o->cache->head_dim;
    Attend from_r = *o;
    if (from_r.q) from_r.q += at;
    if (from_r.out.f) from_r.out.f += at;
    if (from_r.out.q) from_r.out.q += at, from_r.out.s += at / 32;
    return from_r;
}

// Does attend_half include the store of this attend? step: rows of a launch.
static bool makes_store(const Attend *o, int step, int fused) {
    const QkvStore *s = o->store;
    if (!s || s->dump_q || s->dump_q_pos || s->dump_k || s->dump_k_pos || s->dump_v) return false;
    // Rows that no query sees would not be made.
    return s->rope.n_pairs && s->rope.n_pairs % 4 == 0 && !o->staging && (o->own != OWN_NONE || !s->k) &&
        o->batch->n_rows <= min_int(fused, step);
}

// Arguments of attend_half for some rows of a step. makes: it includes o->store
static AttendTask attend_task(const Attend *o, const Batch *b, const Splits *splits, AttendShape shape, int alone,
                              bool makes) {
    const Cache *c = o->cache, *stage = o->staging ? o->staging : c;
    const QkvStore *store = o->store;
    const int group = o->n_heads / c->n_kv_heads, nc = shape.columns, heads = min_int(group, nc);
    AttendTask t = { };
    t.b = *b, t.n_seqs = c->n_seqs, t.window = o->window, t.own = o->own;
    t.rows = div_up(alone, div_up(alone, min_int(nc / heads, block_rows(nc))));    // equally many in each block
    t.heads = heads, t.head_tiles = div_up(group, heads);
    t.group = group, t.n_heads = o->n_heads, t.n_kv_heads = c->n_kv_heads;
    t.by_tiles = divisor(t.head_tiles), t.by_heads = divisor(heads);
    t.makes_q = makes && store->q, t.makes_rows = makes && store->k, t.fused = (uint8_t)shape.fused;
    t.early = makes && may_read_early(WRITES_ROWS | WRITES_CACHE);
    t.staged = o->staging != NULL;
    t.q = o->q;
    t.by_pairs = divisor(1);
    if (makes) {
        if (store->q) t.q = store->q;
        t.new_k = store->k, t.new_v = store->v, t.v_norm = store->v_norm;
        t.w_q = store->w_q, t.w_k = store->k ? store->w_k : NULL;
        if (c->n_rot) t.w_k = c->fold;
        t.inv_freq = store->rope.inv_freq, t.by_pairs = divisor(store->rope.n_pairs), t.eps = store->eps;
    }
    t.splits = *splits, t.n_k = c->k.dim, t.n_rot = c->n_rot;
    while (8 << t.k_bits < c->k.dim) t.k_bits++;
    t.slots = c->slots, t.by_slots = divisor(c->slots), t.stage_slots = stage->slots;
    t.stage_k = (const __half *)stage->k.data, t.stage_v = (const __half *)stage->v.data;
    t.cache_k = (__half *)c->k.data, t.cache_v = (__half *)c->v.data;
    t.scale = o->scale, t.out = o->out, t.arrived = cuda.arrived;
    t.values = cuda.partial;
    t.stats = (float2 *)(t.values + (size_t)b->n_rows * o->n_heads * splits->n * c->head_dim);
    return t;
}

// The same for attend_coded_kernel.
static CodedTask coded_task(const AttendTask *t, const Attend *o, bool with_flash) {
    const Cache *c = o->cache, tail = tail_of(*c);
    CodedTask task = { };
    task.a = *t;
    task.keys = coded_keys(c, o->staging);
    if (c->tail_slots) task.tail = coded_keys(&tail, NULL), task.tail_reach = c->tail_reach;
    task.n_in_flight = t->n_stages ? 2 * t->n_stages : 1, task.v_at = t->n_stages ? (int)subtile_bytes(&c->k) : 0;
    task.stage_bytes = (int)coded_warp_buffer_bytes(c, 1);
    task.buffer_bytes = (int)coded_warp_buffer_bytes(c, t->n_stages);
    task.rotated = kv_group(c->v.type);
    task.with_flash = with_flash;
    return task;
}

// Launches attend_half or attend_coded; returns whether the launch also combines the splits.
static bool launch_attend(AttendTask *t, const Attend *o, AttendShape shape, bool with_flash) {
    const Cache *c = o->cache;
    const int nc = shape.columns, hd = c->head_dim, n_splits = t->splits.n;
    const dim3 grid(div_up(t->b.n_rows, t->rows), c->n_kv_heads * t->head_tiles, n_splits);
    t->n_stages = attend_stages(c, shape, (size_t)grid.x * grid.y * grid.z);
    // The last block of a head combines its splits if shared memory holds them at once, or nearly.
    const size_t part_bytes = (size_t)n_splits * hd * sizeof(float), columns = (size_t)t->rows * t->heads;
    const size_t room = attend_buffer_bytes(c, t->n_stages), shared = attend_shared(c, nc, shape.fused, t->n_stages);
    const size_t weights = is_coded(c) ? WEIGHTED_SPLITS : attend_score_bytes(hd, nc, shape.fused) / sizeof(float2);
    t->joins = (size_t)t->b.n_rows * grid.y <= MAX_ARRIVED && part_bytes <= room &&
        columns * part_bytes <= JOIN_BYTES && columns * n_splits <= weights;
    t->at_once = t->joins ? (int)(room / part_bytes) : 0;
    report_plan(is_coded(c) ? "attend_coded" : "attend_half", grid, ATTEND_THREADS, shared, 0,
              "%d columns, %d parts, %d stages%s", nc, n_splits, t->n_stages, t->joins ? ", joins" : "");
    if (is_coded(c))
        launch(WRITES_ACTIVATIONS, attend_coded_of(hd), grid, ATTEND_THREADS, shared, coded_task(t, o, with_flash));
    else
        launch(WRITES_ACTIVATIONS | WRITES_CACHE, attend_half_of(hd, nc, shape.fused == FUSED_ROWS), grid,
               ATTEND_THREADS, shared, *t);
    return t->joins || n_splits == 1;
}

static void cuda_attend(const Attend *o) {
    const Cache *c = o->cache;
    const int hd = c->head_dim, n_rows = o->batch->n_rows, group = o->n_heads / c->n_kv_heads;
    const Splits splits = plan_splits(c, n_rows);
    if (hd > 2 * ATTEND_THREADS || hd % 8 || c->n_rot % 4) cuda_die("attend: heads of %d values are not supported", hd);
    if (o->out.q && hd % 32) cuda_die("attend: expected heads of whole groups for int8, got %d values", hd);
    // If there are many rows, some at a time, as many as scratch holds splits of.
    const size_t row_bytes = (size_t)o->n_heads * splits.n * (hd + 2) * sizeof(float);
    if (row_bytes > PARTIAL_BYTES) cuda_die("attend: n_heads=%d head_dim=%d is not supported", o->n_heads, hd);
    const int alone = div_up(n_rows, max_int(1, o->batch->n_segs));    // rows of a segment, roughly
    AttendShape shape = attend_shape(c, min_int(alone, STEP_ROWS) * group, n_rows);
    const FlashPlan flash = flash_of(o, shape.columns);
    if (o->blocks && !flash.kernel) shape.columns = 0; // attend_plain reads all caches; the other two know no lists
    const int step = shape.columns && splits.n == 1 ? n_rows : (int)(PARTIAL_BYTES / row_bytes);
    const bool makes = shape.columns && !is_coded(c) && makes_store(o, step, shape.fused);
    if (o->store && !makes) cuda_qkv_store(o->store);
    if (flash.kernel) attend_flash(o, &flash);
    if (flash.kernel && !c->tail_slots) return;        // flash does not compute segments that read a tail
    for (int r = 0; r < n_rows; r += step) {
        const int n = min_int(step, n_rows - r);
        const Attend some = attend_from(o, r);
        const Cache stage = o->staging ? *o->staging : *c;
        Batch b = *o->batch;
        b.rows += r;
        b.n_rows = n;
        float2 *stats = (float2 *)(cuda.partial + (size_t)n * o->n_heads * splits.n * hd);
        bool joined = false;
        if (shape.columns) {
            AttendTask task = attend_task(&some, &b, &splits, shape, alone, makes);
            joined = launch_attend(&task, &some, shape, flash.kernel != NULL);
        } else {
            const dim3 grid(n, c->n_kv_heads * div_up(group, HEADS), splits.n);
            const size_t shared = HEADS * hd * sizeof(float);
            report_plan("attend_plain", grid, ATTEND_THREADS, shared, 0, "%d heads, %d parts", HEADS, splits.n);
            launch(WRITES_ACTIVATIONS, attend_plain_kernel, grid, ATTEND_THREADS, shared, some, b, *c, stage,
                   o->staging != NULL, splits, cuda.partial, stats, o->blocks ? *o->blocks : BlockList{ }, r);
        }
        CHECK_LAUNCH("attend n_rows=%d n_heads=%d head_dim=%d", n, o->n_heads, hd);
        if (joined) continue;
        const bool rotated = kv_group(c->v.type);
        const int values = join_values(rotated);
        launch(WRITES_ACTIVATIONS, rotated ? attend_join_kernel<true> : attend_join_kernel<false>,
               dim3(n, o->n_heads, div_up(hd, values)), 128, splits.n * values * sizeof(float), some, b, *c, splits,
               cuda.partial, stats);
        CHECK_LAUNCH("attend_join n_rows=%d n_heads=%d head_dim=%d", n, o->n_heads, hd);
    }
}

// ---- pictures ----
// Attention without a mask or a cache, and the other operations of image towers. A first reader can skip it.
#include "parts/vision.cuh"

// ==== [9] Output: head, sampling =====================================================================================
// Logits, top-k, sampling, verification of drafts. A first reader can skip it.
#include "parts/sample.cuh"

// ==== [10] The device, the table of operations =======================================================================
#include "parts/device.cuh"

static Ops all_operations(void) {
    Ops ops = { };
    ops.name = "cuda";
    ops.memory = cuda_memory, ops.weight_bytes = cuda_weight_bytes, ops.upload = cuda_upload;
    ops.scratch_bytes = cuda_scratch_bytes, ops.init = cuda_init, ops.reserve = cuda_reserve;
    ops.release = cuda_release;
    ops.copy = cuda_copy, ops.begin = cuda_begin, ops.end = cuda_end, ops.wait = cuda_wait, ops.fence = cuda_fence;
    ops.wait_for = cuda_wait_for, ops.bandwidth = cuda_bandwidth, ops.bus = cuda_bus, ops.joules = cuda_joules;
    ops.launches = cuda_launches;
    ops.card = cuda_card;
    ops.embed = cuda_embed, ops.pair = cuda_pair, ops.ple_rows = cuda_ple_rows, ops.matmul = cuda_matmul;
    ops.gate_up = cuda_gate_up, ops.route = cuda_route, ops.expert_gate_up = cuda_expert_gate_up;
    ops.expert_down = cuda_expert_down, ops.ple_inject = cuda_ple_inject, ops.close = cuda_close;
    ops.gather_rows = cuda_gather_rows, ops.qkv_store = cuda_qkv_store, ops.block_select = cuda_block_select;
    ops.attn_mass = cuda_attn_mass, ops.attend = cuda_attend, ops.kv_commit = cuda_kv_commit;
    ops.kv_copy = cuda_kv_copy, ops.clamp = cuda_clamp, ops.gelu_product = cuda_gelu_product;
    ops.layer_norm = cuda_layer_norm, ops.rope_2d = cuda_rope_2d, ops.attend_all = cuda_attend_all;
    ops.pool = cuda_pool;
    ops.head = cuda_head, ops.logprob = cuda_logprob, ops.sample = cuda_sample;
    ops.verify_walk = cuda_verify_walk, ops.head_centroid = cuda_head_centroid;
    return ops;
}

const Ops *cuda_ops(void) {
    static Ops ops;
    if (!find_device()) return NULL;
    ops = all_operations();
    return &ops;
}

// ---- plans without a GPU ----
// Sizes of weights and scratch need no GPU. Loading a model calls init and reserve first, which end the process here.

static void die_without_gpu(void) {
    cuda_die("there is no GPU to run on: without one the card can only be planned for");
}
static void init_nothing(const Limits *) { die_without_gpu(); }
static void *reserve_nothing(size_t) { die_without_gpu(); return NULL; }
static const Card *pretended_card(void) { return &cuda.card; }
static void pretended_memory(size_t *free_bytes, size_t *total) { *free_bytes = *total = cuda.card.memory; }

const Ops *cuda_plan_ops(void) {
    static Ops ops;
    if (!cuda.pretended) return NULL;
    cuda.card = *cuda.pretended;
    ops = all_operations();
    ops.name = "cuda, plans only";
    ops.memory = pretended_memory, ops.card = pretended_card, ops.init = init_nothing, ops.reserve = reserve_nothing;
    ops.bandwidth = NULL, ops.bus = NULL;
    return &ops;
}
