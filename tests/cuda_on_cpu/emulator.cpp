/* emulator.cpp - carries out what cuda_runtime.h declares; what that means, and what it does not, is told there.
 *
 *   [1] Faults                 [4] Blocks on threads of the system
 *   [2] Threads of a block     [5] Memory
 *   [3] Meetings               [6] Streams, events, graphs
 *                              [7] cuBLAS
 *
 * Needs g++ or clang++, pthreads and x86-64 or aarch64. No exceptions, no C++ run time: C programs link it as it is. */
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include "../../parts/cards.h"
#include "cublas_v2.h"
#include "cuda_fp16.h"
#include "instructions.h"

enum { MAX_THREADS = 1024, MAX_WARPS = 32, STACK_BYTES = 128 << 10, PAGE = 64 << 10, MAX_WORKERS = 8, SHARED_BYTES = 227 << 10,
       SHARED_USUAL = 48 << 10, SHARED_GUARD = 1 << 10, MAX_COPIES = 256, UNWRITTEN = 0xff };


thread_local uint3 threadIdx, blockIdx;
thread_local dim3 blockDim, gridDim;
extern thread_local __align__(1024) char shared_bytes[];
thread_local __align__(1024) char shared_bytes[SHARED_BYTES + SHARED_GUARD];

static const Card *card = &cards[0];                   // the GPU that there is

struct Copies {               // cp.async of a thread that have not arrived, oldest first
    struct { void *to; const void *from; int bytes, lot; } copy[MAX_COPIES];
    int n, lot;               // copies, closed lots
};
struct Thread {
    void *sp;                 // of its stack while another thread runs
    char *stack;              // NULL: not begun
    Copies *copies;
    uint3 index;
};
struct Warp {
    unsigned live, ready, waiting, at_barrier, at_first, at_mbarrier;   // sets of lanes
    unsigned turn;            // who of the ready is next: 32 * backwards + the first
    bool mixed;               // not all who wait do so in the same call
    uint64_t call[32];        // what << 32 | mask
    int parameter[32];
    uint64_t value[32], result[32];
    const uint64_t *mbarrier[32];              // that a lane waits at
};

static size_t round16(size_t n) { return (n + 15) / 16 * 16; }

struct Block {                // what runs on a thread of the system
    const CudaLaunch *launch; // NULL: none
    uint32_t random;
    bool restless;            // warps take turns at their meetings; else each runs as far as it gets
    int n_threads, n_live, n_at_barrier, n_at_first;
    Warp *warp;               // of who runs
    int lane;
    unsigned ready_warps;
    CudaMeeting barrier;
    int barrier_sum, barrier_result;
    Thread *now, *thread;     // thread: (MAX_THREADS)
    Warp warps[MAX_WARPS];
    void *outside;            // stack of whoever runs the block
    char *stacks, *free_stack[MAX_THREADS];
    int n_free_stacks;
    char *signal_stack;
};
static thread_local Block block;

// ==== [1] Faults =====================================================================================================

static const char *kernel_name(const void *kernel) {
    static thread_local char name[100];
    Dl_info info;
    if (!dladdr(kernel, &info) || !info.dli_sname) {
        snprintf(name, sizeof name, "kernel at %p", kernel);
        return name;
    }
    const char *from = info.dli_sname;                 // _Z14product_kernelILi8EEv4Jobs: the length, the name, its arguments
    int n = 0, used = 0;
    if (sscanf(from, "_Z%d%n", &n, &used) != 1 || n <= 0) return from;
    snprintf(name, sizeof name, "%.*s", n, from + used);
    int value;
    if (sscanf(from + used + n, "IL%*[a-z0-9A-Z_]E%n", &value) == 0 && from[used + n] == 'I')
        snprintf(name + strlen(name), sizeof name - strlen(name), " (%.40s)", from);
    return name;
}

static void tell_launch(const CudaLaunch *l, char *out, size_t size) {
    snprintf(out, size, "%s, grid (%u, %u, %u), block (%u, %u, %u), %zu bytes of shared memory", kernel_name(l->kernel), l->grid.x,
             l->grid.y, l->grid.z, l->block.x, l->block.y, l->block.z, l->shared);
}

__attribute__((noreturn)) static void stop(const char *why) {
    char launch[300] = "outside of kernels", where[120] = "";
    if (block.launch) {
        tell_launch(block.launch, launch, sizeof launch);
        snprintf(where, sizeof where, ": block (%u, %u, %u), thread (%u, %u, %u)", blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x,
                 threadIdx.y, threadIdx.z);
    }
    fflush(stdout);
    fprintf(stderr, "cuda_on_cpu: error: %s%s: %s\n", launch, where, why);
    abort();
}

void cuda_fault(const char *fmt, ...) {
    char why[400];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(why, sizeof why, fmt, ap);
    va_end(ap);
    stop(why);
}

// What -fsanitize=alignment,bounds calls, so that its library is not needed.
struct Place { const char *file; uint32_t line, column; };
extern "C" void __ubsan_handle_type_mismatch_v1_abort(const Place *at, const void *p) {
    if (!p) cuda_fault("%s:%u: access through a null pointer", at->file, at->line);
    cuda_fault("%s:%u: access to %p, which is not aligned", at->file, at->line, p);
}
extern "C" void __ubsan_handle_out_of_bounds_abort(const Place *at, size_t index) {
    cuda_fault("%s:%u: index %lld is outside of the array", at->file, at->line, (long long)index);
}

static const char *about_address(const void *p);
static void on_signal(int signal, siginfo_t *info, void *) {
    if (!block.launch) {                               // not ours: the usual end
        struct sigaction usual = { };
        usual.sa_handler = SIG_DFL;
        sigaction(signal, &usual, nullptr);
        return;
    }
    cuda_fault("access to %p, %s", info->si_addr, about_address(info->si_addr));
}

// ==== [2] Threads of a block =========================================================================================
// Every thread has a stack; a switch saves what a call must keep. A thread that has not begun takes over the stack of one that
// has ended, so kernels without meetings run as loops. Stacks begin at different places of their pages, or else the same few
// lines of the CPU's cache would have to hold all of them.

extern "C" void cuda_swap_stacks(void **save, void *next);
#if defined(__x86_64__)
__asm__(".text\n.globl cuda_swap_stacks\n.type cuda_swap_stacks, @function\ncuda_swap_stacks:\n"
        "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
        "movq %rsp, (%rdi)\nmovq %rsi, %rsp\n"
        "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n.size cuda_swap_stacks, .-cuda_swap_stacks\n");
static void *new_stack(char *top, void (*entry)(void)) {
    void **sp = (void **)top - 8;                      // six registers, where to return to, and what keeps the stack aligned
    memset((void *)sp, 0, 64);
    sp[6] = (void *)entry;
    return sp;
}
#elif defined(__aarch64__)
__asm__(".text\n.globl cuda_swap_stacks\n.type cuda_swap_stacks, %function\ncuda_swap_stacks:\n"
        "sub sp, sp, #160\nstp x19, x20, [sp]\nstp x21, x22, [sp, #16]\nstp x23, x24, [sp, #32]\nstp x25, x26, [sp, #48]\n"
        "stp x27, x28, [sp, #64]\nstp x29, x30, [sp, #80]\nstp d8, d9, [sp, #96]\nstp d10, d11, [sp, #112]\n"
        "stp d12, d13, [sp, #128]\nstp d14, d15, [sp, #144]\nmov x9, sp\nstr x9, [x0]\nmov sp, x1\n"
        "ldp x19, x20, [sp]\nldp x21, x22, [sp, #16]\nldp x23, x24, [sp, #32]\nldp x25, x26, [sp, #48]\n"
        "ldp x27, x28, [sp, #64]\nldp x29, x30, [sp, #80]\nldp d8, d9, [sp, #96]\nldp d10, d11, [sp, #112]\n"
        "ldp d12, d13, [sp, #128]\nldp d14, d15, [sp, #144]\nadd sp, sp, #160\nret\n.size cuda_swap_stacks, .-cuda_swap_stacks\n");
static void *new_stack(char *top, void (*entry)(void)) {
    void **sp = (void **)top - 20;
    memset((void *)sp, 0, 160);
    sp[11] = (void *)entry;
    return sp;
}
#else
#error "cuda_on_cpu: the switch of stacks is written for x86-64 and aarch64"
#endif

static uint32_t next_random(void) {
    uint32_t r = block.random;
    r ^= r << 13, r ^= r >> 17, r ^= r << 5;
    return block.random = r;
}

static int any_of(unsigned set) {                      // a member, by chance
    const unsigned by = next_random() >> 7 & 31;
    return (int)((unsigned)__builtin_ctz(set >> by | set << (-by & 31)) + by) & 31;
}

static void make_ready(Block &b, Warp *w, unsigned lanes) {
    w->ready |= lanes;
    w->turn = next_random() >> 11;
    b.ready_warps |= 1u << (w - b.warps);
}

static const char *meeting_name(CudaMeeting what) {
    static const char *const names[] = { "__syncwarp", "__shfl_sync", "__shfl_up_sync", "__shfl_down_sync", "__shfl_xor_sync",
        "__ballot_sync", "__any_sync", "__all_sync", "__reduce_add_sync", "__reduce_min_sync", "__reduce_max_sync",
        "__reduce_min_sync", "__reduce_max_sync", "__reduce_and_sync", "__reduce_or_sync", "__reduce_xor_sync", "__match_any_sync",
        "load_matrices", "load_matrices_transposed", "transpose_matrix", "multiply_int8", "multiply_half", "__syncthreads",
        "__syncthreads_or", "__syncthreads_and", "__syncthreads_count", "sync_first", "mbarrier_wait" };
    return names[what];
}

// Nobody can go on. Names the threads that wait for different things.
__attribute__((noreturn)) static void deadlock(void) {
    char why[400] = "", one[100];
    unsigned told = 0;
    for (int i = 0, n_told = 0; i < block.n_threads && n_told < 3; i++) {
        const auto waits_in = [](int thread) {
            const Warp *w = &block.warps[thread / 32];
            return w->at_barrier >> thread % 32 & 1 ? block.barrier : w->at_first >> thread % 32 & 1 ? MEET_FIRST
                 : w->at_mbarrier >> thread % 32 & 1 ? MEET_MBARRIER : (CudaMeeting)(w->call[thread % 32] >> 32);
        };
        const CudaMeeting what = waits_in(i);
        if (!(block.warps[i / 32].live >> i % 32 & 1) || told >> what & 1) continue;
        told |= 1u << what;
        int n = 0;
        for (int k = 0; k < block.n_threads; k++) n += (block.warps[k / 32].live >> k % 32 & 1) && waits_in(k) == what;
        if (what >= MEET_BARRIER) snprintf(one, sizeof one, "%d in %s, such as thread %d", n, meeting_name(what), i);
        else snprintf(one, sizeof one, "%d in %s, such as thread %d with mask %08x", n, meeting_name(what), i,
                      (unsigned)block.warps[i / 32].call[i % 32]);
        snprintf(why + strlen(why), sizeof why - strlen(why), "%s%s", n_told++ ? "; " : "", one);
    }
    cuda_fault("threads wait for each other for ever: %s; %d have ended", why, block.n_threads - block.n_live);
}

// The thread that goes on, taken out of those that are ready; NULL when all have ended.
static inline Thread *next_thread(Block &b) {
    Warp *w = b.warp;
    if (!w->ready) {
        if (!b.ready_warps) {
            if (b.n_live) deadlock();
            return nullptr;
        }
        w = b.warp = &b.warps[any_of(b.ready_warps)];
    }
    const unsigned first = w->turn & 31, set = w->ready >> first | w->ready << (-first & 31);
    b.lane = (int)((w->turn & 32 ? 31 - __builtin_clz(set) : __builtin_ctz(set)) + first) & 31;
    w->ready &= ~(1u << b.lane);
    if (!w->ready) b.ready_warps &= ~(1u << (w - b.warps));
    Thread *t = b.now = &b.thread[(w - b.warps) * 32 + b.lane];
    threadIdx = t->index;
    return t;
}

static void thread_ended(void);
static void thread_main(void) {
    for (;;) {
        block.launch->call(block.launch->kernel, block.launch->arguments);
        thread_ended();
        char *stack = block.now->stack;
        void *unused;
        Thread *t = next_thread(block);
        if (t && !t->stack) {
            t->stack = stack;
            continue;
        }
        block.free_stack[block.n_free_stacks++] = stack;
        cuda_swap_stacks(&unused, t ? t->sp : block.outside);
    }
}

static void begin_thread(Thread *t) {
    t->stack = block.free_stack[--block.n_free_stacks];
    t->sp = new_stack(t->stack + STACK_BYTES - (t - block.thread) % 64 * 704, thread_main);
}

// The thread that runs waits; others go on until it is ready and its turn.
static inline void wait_for_others(Block &b) {
    Thread *self = b.now, *t = next_thread(b);
    if (t == self) return;
    if (!t->stack) begin_thread(t);
    cuda_swap_stacks(&self->sp, t->sp);
}

void cuda_yield(void) {
    make_ready(block, block.warp, 1u << block.lane);
    wait_for_others(block);
}

// ==== [3] Meetings ===================================================================================================
// Whoever comes last works the result out for all and goes on; the others become ready.

static void multiply_int8_warp(Warp *w) {
    int8_t a[16][32], b[8][32];
    for (int l = 0; l < 32; l++) {
        const CudaMultiply *m = (const CudaMultiply *)w->value[l];
        const int t = l / 4, k = l % 4 * 4;
        memcpy(&a[t][k], &m->a[0], 4), memcpy(&a[t + 8][k], &m->a[1], 4);
        memcpy(&a[t][16 + k], &m->a[2], 4), memcpy(&a[t + 8][16 + k], &m->a[3], 4);
        memcpy(&b[t][k], &m->b[0], 4), memcpy(&b[t][16 + k], &m->b[1], 4);
    }
    for (int l = 0; l < 32; l++) {
        int *c = (int *)((const CudaMultiply *)w->value[l])->c;
        for (int i = 0; i < 4; i++) {
            const int8_t *x = a[l / 4 + i / 2 * 8], *y = b[l % 4 * 2 + i % 2];
            int sum = 0;
            for (int k = 0; k < 32; k++) sum += x[k] * y[k];
            c[i] += sum;
        }
    }
}

static void multiply_half_warp(Warp *w) {
    float a[16][16], b[16][8], c[16][8];
    const auto put = [](float *x, float *y, unsigned bits) {
        *x = CudaHalf::wide((uint16_t)bits), *y = CudaHalf::wide((uint16_t)(bits >> 16));
    };
    for (int l = 0; l < 32; l++) {
        const CudaMultiply *m = (const CudaMultiply *)w->value[l];
        const int t = l / 4, k = l % 4 * 2;
        for (int i = 0; i < 4; i++) {
            put(&a[t + i % 2 * 8][i / 2 * 8 + k], &a[t + i % 2 * 8][i / 2 * 8 + k + 1], m->a[i]);
            c[t + i / 2 * 8][k + i % 2] = ((const float *)m->c)[i];
        }
        for (int i = 0; i < 2; i++) put(&b[i * 8 + k][t], &b[i * 8 + k + 1][t], m->b[i]);
    }
    for (int i = 0; i < 16; i++)
        for (int k = 0; k < 16; k++)
            for (int j = 0; j < 8; j++) c[i][j] += a[i][k] * b[k][j];
    for (int l = 0; l < 32; l++)
        for (int i = 0; i < 4; i++) ((float *)((const CudaMultiply *)w->value[l])->c)[i] = c[l / 4 + i / 2 * 8][l % 4 * 2 + i % 2];
}

static void load_matrices_warp(Warp *w, bool transposed) {
    for (int l = 0; l < 32; l++)
        for (int i = 0; i < 4; i++) {
            unsigned *r = ((const CudaMatrices *)w->value[l])->r;
            const auto row = [&](int k) { return (const char *)((const CudaMatrices *)w->value[8 * i + k])->row; };
            if (transposed) r[i] = 0;
            if (!transposed) memcpy(&r[i], row(l / 4) + l % 4 * 4, 4);
            else for (int k = 0; k < 2; k++) memcpy((char *)&r[i] + 2 * k, row(l % 4 * 2 + k) + l / 4 * 2, 2);
        }
}

static void transpose_matrix_warp(Warp *w) {
    for (int l = 0; l < 32; l++) {
        w->result[l] = 0;
        for (int k = 0; k < 2; k++)
            w->result[l] |= (w->value[(l % 4 * 2 + k) * 4 + l / 8] >> (l / 4 % 2 * 16) & 0xffff) << 16 * k;
    }
}

static void shuffle(Warp *w, unsigned mask, CudaMeeting what) {
    for (unsigned set = mask; set; set &= set - 1) {
        const int l = __builtin_ctz(set);
        const int width = w->parameter[l] >> 8, by = w->parameter[l] & 255, first = l & ~(width - 1), end = first + width;
        int from = l;
        if (what == MEET_SHUFFLE) from = first | (by & (width - 1));
        if (what == MEET_SHUFFLE_UP) from = l - by < first ? l : l - by;
        if (what == MEET_SHUFFLE_DOWN) from = l + by >= end ? l : l + by;
        if (what == MEET_SHUFFLE_XOR) from = (l ^ by) >= end ? l : l ^ by;
        w->result[l] = mask >> (from & 31) & 1 ? w->value[from & 31] : 0xa5a5a5a5a5a5a5a5u;            // nobody's value
    }
}

static void reduce(Warp *w, unsigned mask, CudaMeeting what) {
    uint64_t all = w->value[__builtin_ctz(mask)];
    if (what == MEET_BALLOT || what == MEET_ANY || what == MEET_ALL) {
        all = 0;
        for (unsigned set = mask; set; set &= set - 1) all |= w->value[__builtin_ctz(set)] << __builtin_ctz(set);
        all = what == MEET_ANY ? all != 0 : what == MEET_ALL ? all == mask : all;
    } else if (what != MEET_MATCH) {
        for (unsigned set = mask & (mask - 1); set; set &= set - 1) {
            const uint32_t v = (uint32_t)w->value[__builtin_ctz(set)], a = (uint32_t)all;
            switch (what) {
            case MEET_ADD: all = a + v; break;
            case MEET_MIN: all = v < a ? v : a; break;
            case MEET_MAX: all = v > a ? v : a; break;
            case MEET_MIN_SIGNED: all = (int)v < (int)a ? v : a; break;
            case MEET_MAX_SIGNED: all = (int)v > (int)a ? v : a; break;
            case MEET_AND: all = a & v; break;
            case MEET_OR: all = a | v; break;
            default: all = a ^ v; break;
            }
        }
    }
    for (unsigned set = mask; set; set &= set - 1) {
        const int l = __builtin_ctz(set);
        w->result[l] = all;
        if (what != MEET_MATCH) continue;
        w->result[l] = 0;
        for (unsigned other = mask; other; other &= other - 1)
            if (w->value[__builtin_ctz(other)] == w->value[l]) w->result[l] |= other & -other;
    }
}

static void hold_meeting(Block &b, Warp *w, unsigned who, CudaMeeting what) {
    w->waiting &= ~who;
    if (what >= MEET_MATRICES && who != ~0u) cuda_fault("%s with lanes %08x only", meeting_name(what), who);
    if (what == MEET_MULTIPLY_INT8) multiply_int8_warp(w);
    else if (what == MEET_MULTIPLY_HALF) multiply_half_warp(w);
    else if (what == MEET_TRANSPOSE) transpose_matrix_warp(w);
    else if (what >= MEET_MATRICES) load_matrices_warp(w, what == MEET_TRANSPOSED);
    else if (what > MEET_SHUFFLE_XOR) reduce(w, who, what);
    else if (what != MEET_SYNC) shuffle(w, who, what);
    make_ready(b, w, who);
    if (b.restless && !(next_random() >> 9 & 7)) b.warp = &b.warps[any_of(b.ready_warps)];
}

// Holds the meeting that a lane called for when everybody is there: all lanes of the mask that have not ended.
static inline void try_meeting(Block &b, Warp *w, uint64_t call) {
    const unsigned who = (unsigned)call & w->live;
    if ((w->waiting & who) != who) return;
    for (unsigned set = w->mixed ? who : 0; set; set &= set - 1)
        if (w->call[__builtin_ctz(set)] != call) return;
    hold_meeting(b, w, who, (CudaMeeting)(call >> 32));
}

uint64_t cuda_meet(CudaMeeting what, unsigned mask, uint64_t value, int parameter) {
    Block &b = block;
    Warp *w = b.warp;
    const int l = b.lane;
    const uint64_t call = (uint64_t)what << 32 | mask;
    if (!(mask >> l & 1)) cuda_fault("%s: lane %d is not in its own mask %08x", meeting_name(what), l, mask);
    w->mixed = w->waiting && (w->mixed || call != w->call[__builtin_ctz(w->waiting)]);
    w->call[l] = call, w->value[l] = value, w->parameter[l] = parameter;
    w->waiting |= 1u << l;
    try_meeting(b, w, call);
    wait_for_others(b);
    return w->result[l];
}

static void try_barrier(void) {
    if (!block.n_at_barrier || block.n_at_barrier < block.n_live) return;
    block.barrier_result = block.barrier_sum;
    if (block.barrier == MEET_BARRIER_OR) block.barrier_result = block.barrier_sum != 0;
    if (block.barrier == MEET_BARRIER_AND) block.barrier_result = block.barrier_sum == block.n_at_barrier;
    for (Warp *w = block.warps; w < block.warps + (block.n_threads + 31) / 32; w++) {
        if (w->at_barrier) make_ready(block, w, w->at_barrier);
        w->at_barrier = 0;
    }
    block.n_at_barrier = block.barrier_sum = 0;
    block.warp = &block.warps[any_of(block.ready_warps)];
}

int cuda_barrier(CudaMeeting what, int value) {
    if (block.n_at_barrier && block.barrier != what)
        cuda_fault("%s meets %s of other threads", meeting_name(what), meeting_name(block.barrier));
    block.barrier = what;
    block.warp->at_barrier |= 1u << block.lane;
    block.n_at_barrier++;
    block.barrier_sum += value != 0;
    try_barrier();
    wait_for_others(block);
    return block.barrier_result;                       // nobody gets past the next barrier before
}

// A barrier of the first n threads of the block, whatever the others do.
void cuda_barrier_of(int n) {
    const int thread = (int)(block.warp - block.warps) * 32 + block.lane;
    if (n % 32 || n > block.n_threads || thread >= n) cuda_fault("sync_first<%d> by thread %d of %d", n, thread, block.n_threads);
    block.warp->at_first |= 1u << block.lane;
    if (++block.n_at_first == n) {
        for (Warp *w = block.warps; w < block.warps + n / 32; w++) {
            make_ready(block, w, w->at_first);
            w->at_first = 0;
        }
        block.n_at_first = 0;
        block.warp = &block.warps[any_of(block.ready_warps)];
    }
    wait_for_others(block);
}

// A barrier of 64 bits in shared memory: how many arrive in a phase, how many of them are still to come, the phase.
struct Mbarrier { uint16_t count, missing; uint32_t phase; };
void cuda_mbarrier_init(uint64_t *b, unsigned count) {
    const Mbarrier m = { (uint16_t)count, (uint16_t)count, 0 };
    if (!count || count > MAX_THREADS) cuda_fault("mbarrier_init of %u threads", count);
    memcpy(b, &m, sizeof m);
}

void cuda_mbarrier_arrive(uint64_t *b, bool copies) {
    Mbarrier m;
    if (copies) cuda_copy_commit(), cuda_copied(0);
    memcpy(&m, b, sizeof m);
    if (!m.missing || m.missing > m.count) cuda_fault("mbarrier_arrive where nobody is missing");
    if (--m.missing == 0) {
        m.missing = m.count, m.phase++;
        for (Warp *w = block.warps; w < block.warps + (block.n_threads + 31) / 32; w++) {
            unsigned here = 0;
            for (unsigned set = w->at_mbarrier; set; set &= set - 1)
                if (w->mbarrier[__builtin_ctz(set)] == b) here |= set & -set;
            w->at_mbarrier &= ~here;
            if (here) make_ready(block, w, here);      // they look again
        }
    }
    memcpy(b, &m, sizeof m);
}

void cuda_mbarrier_wait(uint64_t *b, unsigned parity) {
    for (Mbarrier m; memcpy(&m, b, sizeof m), (m.phase & 1) == parity; ) {
        block.warp->at_mbarrier |= 1u << block.lane;
        block.warp->mbarrier[block.lane] = b;
        wait_for_others(block);
    }
}

static void thread_ended(void) {
    Warp *w = block.warp;
    w->live &= ~(1u << block.lane);
    block.n_live--;
    for (unsigned set = w->waiting; set; set &= w->waiting & (set - 1)) try_meeting(block, w, w->call[__builtin_ctz(set)]);
    try_barrier();
}

// ---- instructions.h ----

static bool outside_shared(const void *p, size_t n) {  // static shared memory is elsewhere
    const char *c = (const char *)p;
    return c >= shared_bytes && c < shared_bytes + sizeof shared_bytes && c + n > shared_bytes + block.launch->shared;
}

void cuda_check_shared(const char *what, const void *p, int bytes) {
    if ((uintptr_t)p % bytes) cuda_fault("%s: %p is not aligned to %d bytes", what, p, bytes);
    if (outside_shared(p, bytes))
        cuda_fault("%s: byte %td of %zu bytes of shared memory", what, (const char *)p - shared_bytes, block.launch->shared);
}

void cuda_copy_ahead(void *shared, const void *global, int bytes) {
    cuda_check_shared("copy_ahead", shared, bytes);
    if ((uintptr_t)global % bytes) cuda_fault("copy_ahead: %p is not aligned to %d bytes", global, bytes);
    if (!block.now->copies) block.now->copies = (Copies *)calloc(1, sizeof(Copies));
    Copies *c = block.now->copies;
    if (c->n == MAX_COPIES) cuda_fault("copy_ahead: more than %d copies of a thread that it did not wait for", MAX_COPIES);
    memset(shared, UNWRITTEN, bytes);
    c->copy[c->n].to = shared, c->copy[c->n].from = global, c->copy[c->n].bytes = bytes, c->copy[c->n++].lot = c->lot;
}

void cuda_copy_commit(void) {
    if (block.now->copies) block.now->copies->lot++;
}

void cuda_copied(int n) {
    Copies *c = block.now->copies;
    if (!c) return;
    int done = 0;
    for (; done < c->n && c->copy[done].lot < c->lot - n; done++) {
        const auto &copy = c->copy[done];
        if (copy.bytes == 16) memcpy(copy.to, copy.from, 16);          // most of them: without a call
        else memcpy(copy.to, copy.from, copy.bytes);
    }
    if (!done) return;
    c->n -= done;
    memmove(c->copy, c->copy + done, c->n * sizeof c->copy[0]);
}

// ==== [4] Blocks on threads of the system ============================================================================

static void *map_memory(size_t bytes) {
    void *p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? nullptr : p;
}

static void prepare_worker(void) {                     // once for each thread of the system
    if (block.thread) return;
    const size_t each = STACK_BYTES + PAGE;            // what no thread may touch lies below its stack
    block.thread = (Thread *)calloc(MAX_THREADS, sizeof(Thread));
    block.stacks = (char *)map_memory(MAX_THREADS * each);
    block.signal_stack = (char *)malloc(64 << 10);
    if (!block.thread || !block.stacks || !block.signal_stack) cuda_fault("no memory for stacks");
    for (int i = 0; i < MAX_THREADS; i++) {
        mprotect(block.stacks + i * each, PAGE, PROT_NONE);
        block.free_stack[block.n_free_stacks++] = block.stacks + i * each + PAGE;
    }
    const stack_t stack = { block.signal_stack, 0, 64 << 10 };
    sigaltstack(&stack, nullptr);
}

static void run_block(const CudaLaunch *l, uint32_t seed, size_t number) {
    block.launch = l;
    block.random = (uint32_t)(((uint64_t)seed << 32 | number) * 0x9E3779B97F4A7C15u >> 31) | 1;
    for (int i = 0; i < 3; i++) next_random();
    block.restless = seed & 1;
    const size_t row = number / l->grid.x;
    blockIdx = { (unsigned)(number % l->grid.x), (unsigned)(row % l->grid.y), (unsigned)(row / l->grid.y) };
    blockDim = l->block;
    gridDim = l->grid;
    block.n_threads = block.n_live = (int)(l->block.x * l->block.y * l->block.z);
    block.n_at_barrier = block.barrier_sum = block.n_at_first = 0;
    block.ready_warps = 0;
    uint3 index = { 0, 0, 0 };
    for (Thread *t = block.thread; t < block.thread + block.n_threads; t++) {
        t->stack = nullptr;
        t->index = index;
        if (t->copies) t->copies->n = t->copies->lot = 0;
        if (++index.x == l->block.x) index.x = 0, index.y++;
        if (index.y == l->block.y) index.y = 0, index.z++;
    }
    for (int w = 0; w * 32 < block.n_threads; w++) {
        const int n = block.n_threads - w * 32;
        const unsigned lanes = n >= 32 ? ~0u : (1u << n) - 1;
        block.warps[w].live = lanes;
        block.warps[w].ready = block.warps[w].waiting = block.warps[w].at_barrier = 0;
        block.warps[w].at_first = block.warps[w].at_mbarrier = 0;
        make_ready(block, &block.warps[w], lanes);
    }
    block.warp = &block.warps[any_of(block.ready_warps)];
    memset(shared_bytes, UNWRITTEN, l->shared + SHARED_GUARD);
    Thread *t = next_thread(block);
    begin_thread(t);
    cuda_swap_stacks(&block.outside, t->sp);
    const char *behind = shared_bytes + l->shared;     // memcmp with itself, one byte on: all of it is as it was
    if ((unsigned char)*behind != UNWRITTEN || memcmp(behind, behind + 1, SHARED_GUARD - 1))
        cuda_fault("the block wrote behind its %zu bytes of shared memory", l->shared);
    block.launch = nullptr;
}

static struct {
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t work = PTHREAD_COND_INITIALIZER, done = PTHREAD_COND_INITIALIZER;
    int n_workers;            // besides the host's thread
    int running;
    uint64_t round;
    const CudaLaunch *launch;
    uint32_t seed, n_launches;
    size_t n_blocks, next, first, step;
} grid;

static void run_blocks(void) {
    prepare_worker();
    for (size_t i; (i = __atomic_fetch_add(&grid.next, 1, __ATOMIC_SEQ_CST)) < grid.n_blocks; )
        run_block(grid.launch, grid.seed, (grid.first + (unsigned __int128)i * grid.step) % grid.n_blocks);
}

static void *worker_main(void *) {
    pthread_mutex_lock(&grid.lock);
    for (uint64_t seen = 0;;) {
        while (grid.round == seen) pthread_cond_wait(&grid.work, &grid.lock);
        seen = grid.round;
        pthread_mutex_unlock(&grid.lock);
        run_blocks();
        pthread_mutex_lock(&grid.lock);
        if (--grid.running == 0) pthread_cond_signal(&grid.done);
    }
}

static void start_workers(void) {
    static bool started;
    if (started) return;
    started = true;
    struct sigaction action = { };
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, nullptr);
    sigaction(SIGBUS, &action, nullptr);
    const char *threads = getenv("CUDA_ON_CPU_THREADS"), *seed = getenv("CUDA_ON_CPU_SEED");
    grid.n_launches = seed ? (uint32_t)atoi(seed) : 0;
    long n = threads ? atol(threads) : sysconf(_SC_NPROCESSORS_ONLN);
    for (n = min(n, (long)MAX_WORKERS); n > 1; n--) {
        pthread_t thread;
        if (pthread_create(&thread, nullptr, worker_main, nullptr)) break;
        pthread_detach(thread);
        grid.n_workers++;
    }
}

static void run_launch(const void *bytes) {
    CudaLaunch l = *(const CudaLaunch *)bytes;
    l.arguments = (const char *)bytes + round16(sizeof l);
    start_workers();
    grid.launch = &l;
    grid.seed = ++grid.n_launches * 2654435761u >> 7;
    grid.n_blocks = (size_t)l.grid.x * l.grid.y * l.grid.z;
    grid.first = grid.seed % grid.n_blocks;
    grid.step = grid.n_blocks * 618 / 1000 + 1;        // without a common factor, so that every block has its turn
    for (size_t a = grid.step, b = grid.n_blocks; b != 1 && a != 1; ) {
        const size_t r = a % b;
        if (r) a = b, b = r;
        else a = ++grid.step, b = grid.n_blocks;
    }
    grid.next = 0;
    const bool alone = !grid.n_workers || grid.n_blocks == 1 || grid.n_blocks * l.block.x * l.block.y * l.block.z < 2048;
    if (!alone) {
        pthread_mutex_lock(&grid.lock);
        grid.running = grid.n_workers;
        grid.round++;
        pthread_cond_broadcast(&grid.work);
        pthread_mutex_unlock(&grid.lock);
    }
    run_blocks();
    if (alone) return;
    pthread_mutex_lock(&grid.lock);
    while (grid.running) pthread_cond_wait(&grid.done, &grid.lock);
    pthread_mutex_unlock(&grid.lock);
}

static struct { const void *kernel; int bytes; } allowed[256];
static int n_allowed;

bool cuda_allow_shared(const void *kernel, int bytes) {
    int i = 0;
    if (bytes < 0 || bytes > card->block_shared) return false;
    while (i < n_allowed && allowed[i].kernel != kernel) i++;
    if (i == 256) cuda_fault("cudaFuncSetAttribute: more than 256 kernels");
    if (i == n_allowed) n_allowed++;
    allowed[i] = { kernel, bytes };
    return true;
}

bool cuda_on_cpu(const char *name) {                   // NAME or NAME:SMS
    static Card some;                                  // a part of a card
    char whole[20];
    int n_sm = 0, end = 0;
    if (sscanf(name, "%19[^:]%n:%d%n", whole, &end, &n_sm, &end) < 1 || name[end]) return false;
    const Card *named = find_card(whole);
    if (!named || n_sm < 0 || n_sm > named->n_sm) return false;
    some = *named;
    if (n_sm) some.n_sm = n_sm;
    card = &some;
    return true;
}

void cuda_launch(cudaStream_t stream, const CudaLaunch *l) {
    char what[300], copy[32 << 10];
    tell_launch(l, what, sizeof what);
    size_t most = SHARED_USUAL;
    for (int i = 0; i < n_allowed; i++)
        if (allowed[i].kernel == l->kernel && (size_t)allowed[i].bytes > most) most = (size_t)allowed[i].bytes;
    const dim3 g = l->grid, b = l->block;
    if (!b.x || !b.y || !b.z || b.x > 1024 || b.y > 1024 || b.z > 64 || (size_t)b.x * b.y * b.z > MAX_THREADS)
        cuda_fault("launch of %s: a block has 1 to %d threads", what, MAX_THREADS);
    if (!g.x || !g.y || !g.z || g.x > 0x7fffffff || g.y > 65535 || g.z > 65535)
        cuda_fault("launch of %s: a grid has 1 to 2^31 - 1, 65535 and 65535 blocks", what);
    if (l->shared > most) cuda_fault("launch of %s: %zu bytes of shared memory are allowed", what, most);
    if (l->argument_bytes > 4096) cuda_fault("launch of %s: %zu bytes of arguments, 4096 are allowed", what, l->argument_bytes);
    const size_t at = round16(sizeof *l);
    memcpy(copy, l, sizeof *l);
    memcpy(copy + at, l->arguments, l->argument_bytes);
    cuda_submit(stream, run_launch, copy, at + l->argument_bytes);
}

// ==== [5] Memory =====================================================================================================
// An allocation ends, to 256 bytes, where a page begins that nobody may touch; another lies before it. What is left over in its
// own pages is checked when it is freed, and what was freed stays out of bounds.

static const size_t FILL_BYTES = 32 << 20;
typedef struct { char *map, *p; size_t map_bytes, bytes; bool freed; } Allocation;
static struct { Allocation *at; int n, room; size_t used; } device, pinned;

static Allocation *allocation_of(const void *p, bool on_device) {
    for (int i = (on_device ? device.n : pinned.n) - 1; i >= 0; i--) {
        Allocation *a = on_device ? &device.at[i] : &pinned.at[i];
        if ((char *)p >= a->map && (char *)p < a->map + a->map_bytes) return a;
    }
    return nullptr;
}

static const char *about_address(const void *p) {
    static char text[200];
    const Allocation *a = allocation_of(p, true);
    if (!a) snprintf(text, sizeof text, "which is no device memory");
    else if (a->freed) snprintf(text, sizeof text, "byte %td of a freed allocation of %zu bytes", (char *)p - a->p, a->bytes);
    else snprintf(text, sizeof text, "byte %td of an allocation of %zu bytes", (char *)p - a->p, a->bytes);
    return text;
}

static bool has_fault(const char *name) {
    const char *fault = getenv("CUDA_ON_CPU_FAULT");
    return fault && !strcmp(fault, name);
}

static size_t device_bytes(void) { return has_fault("little") ? (size_t)400 << 20 : (size_t)8 << 30; }

static cudaError_t allocate(void **p, size_t bytes, bool on_device) {
    auto &list = on_device ? device : pinned;
    const size_t rounded = (bytes + 255) / 256 * 256, pages = (rounded + PAGE - 1) / PAGE * PAGE;
    *p = nullptr;
    if (!bytes || (on_device && (bytes > device_bytes() || device.used + rounded > device_bytes()))) return cudaErrorMemoryAllocation;
    Allocation a = { (char *)map_memory(pages + 2 * PAGE), nullptr, pages + 2 * PAGE, bytes, false };
    if (!a.map) return cudaErrorMemoryAllocation;
    if (list.n == list.room) list.at = (Allocation *)realloc(list.at, (list.room += 256) * sizeof a);
    mprotect(a.map, PAGE, PROT_NONE);
    mprotect(a.map + PAGE + pages, PAGE, PROT_NONE);
    a.p = a.map + PAGE + pages - rounded;
    if (pages <= 2 * FILL_BYTES) memset(a.map + PAGE, UNWRITTEN, pages);
    else memset(a.map + PAGE, UNWRITTEN, FILL_BYTES), memset(a.p + rounded - FILL_BYTES, UNWRITTEN, FILL_BYTES);
    list.at[list.n++] = a;
    list.used += rounded;
    *p = a.p;
    return cudaSuccess;
}

static void check_margin(const Allocation *a, const char *from, const char *end) {
    for (; from < end; from++)
        if ((unsigned char)*from != UNWRITTEN)
            cuda_fault("byte %td of an allocation of %zu bytes was written to", from - a->p, a->bytes);
}

static cudaError_t release(void *p, bool on_device) {
    auto &list = on_device ? device : pinned;
    if (!p) return cudaSuccess;
    cudaDeviceSynchronize();
    Allocation *a = allocation_of(p, on_device);
    if (!a || a->p != p || a->freed) cuda_fault("free of %p, which is no allocation", p);
    check_margin(a, a->map + PAGE, a->p);
    check_margin(a, a->p + a->bytes, a->map + a->map_bytes - PAGE);
    mmap(a->map, a->map_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    a->freed = true;
    list.used -= (a->bytes + 255) / 256 * 256;
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **p, size_t bytes) { return allocate(p, bytes, true); }
cudaError_t cudaFree(void *p) { return release(p, true); }
cudaError_t cudaMallocHost(void **p, size_t bytes) {   // the backend's own buffers are larger than matrices of small models
    if (has_fault("pinned") && bytes < 1 << 20) return cudaErrorMemoryAllocation;
    return allocate(p, bytes, false);
}
cudaError_t cudaFreeHost(void *p) { return release(p, false); }
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    *free_bytes = device_bytes() - device.used;
    *total = device_bytes();
    return cudaSuccess;
}

static void check_device(const char *what, const void *p, size_t bytes) {
    const Allocation *a = allocation_of(p, true);
    if (!a || a->freed || (char *)p < a->p || (char *)p + bytes > a->p + a->bytes)
        cuda_fault("%s: %zu bytes at %p, %s", what, bytes, p, about_address(p));
}

// ==== [6] Streams, events, graphs ====================================================================================
// A stream is a list of work. It is done when the host waits for it, in order: what the host does too early then shows.

enum { MOST_WAITING = 1024 };
struct Node {
    Node *next;
    void (*work)(const void *bytes);
    size_t n;
    __align__(16) char bytes[];
};
struct CudaGraph { Node *first, **end; int n_users; };
// While a stream is captured, streams that wait for an event of it are captured into the same list, in the order of the
// calls, until it waits for an event of theirs. forked: such a stream, with work that nobody has waited for yet.
struct CudaStream { CudaGraph list; CudaGraph *captured; bool spoiled, origin, forked; uint64_t issued, done; CudaStream *next; };
struct CudaEvent { CudaStream *stream; uint64_t after; double time; CudaGraph *graph; };      // graph: recorded in a capture

static CudaStream usual = { { nullptr, &usual.list.first, 0 }, nullptr, false, false, false, 0, 0, nullptr };       // the first of all streams
static cudaError_t last_error;

static cudaError_t fail(cudaError_t e) { return last_error = e; }

static Node *add_node(CudaGraph *g, void (*work)(const void *), const void *bytes, size_t n) {
    Node *node = (Node *)aligned_alloc(16, round16(sizeof(Node) + n));
    if (!node) cuda_fault("no memory for the work of a stream");
    node->next = nullptr, node->work = work, node->n = n;
    memcpy(node->bytes, bytes, n);
    *g->end = node;
    g->end = &node->next;
    return node;
}

// Several threads of the host may issue work, and wait for it: one at a time.
static pthread_mutex_t host = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
struct Alone {
    Alone() { pthread_mutex_lock(&host); }
    ~Alone() { pthread_mutex_unlock(&host); }
};

static void finish(CudaStream *s, uint64_t upto) {
    const Alone alone;
    while (s->done < upto) {
        Node *node = s->list.first;
        s->list.first = node->next;
        if (!s->list.first) s->list.end = &s->list.first;
        node->work(node->bytes);
        s->done++;
        free(node);
    }
}

void cuda_submit(cudaStream_t stream, void (*work)(const void *), const void *bytes, size_t n) {
    const Alone alone;
    CudaStream *s = stream ? stream : &usual;
    if (s->captured) {
        add_node(s->captured, work, bytes, n);
        s->forked = !s->origin;
        return;
    }
    add_node(&s->list, work, bytes, n);
    s->issued++;
    if (s->issued - s->done > MOST_WAITING) finish(s, s->issued);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    CudaStream *s = stream ? stream : &usual;
    if (s->captured) {
        s->spoiled = true;
        return fail(cudaErrorStreamCaptureUnsupported);
    }
    finish(s, s->issued);
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize(void) {
    for (CudaStream *s = &usual; s; s = s->next) finish(s, s->issued);
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) {
    CudaStream *s = (CudaStream *)calloc(1, sizeof *s);
    s->list.end = &s->list.first;
    s->next = usual.next;
    usual.next = s;
    *stream = s;
    return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithFlags(stream, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return cudaStreamSynchronize(stream); }

struct CopyWork { void *to; const void *from; size_t bytes; };
static void do_copy(const void *bytes) {
    const CopyWork *w = (const CopyWork *)bytes;
    memmove(w->to, w->from, w->bytes);
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
    const CopyWork w = { to, from, bytes };
    if (!bytes) return cudaSuccess;
    if (kind == cudaMemcpyDefault) {
        const bool in = allocation_of(to, true), out = allocation_of(from, true);
        kind = in && out ? cudaMemcpyDeviceToDevice : in ? cudaMemcpyHostToDevice
                         : out ? cudaMemcpyDeviceToHost : cudaMemcpyHostToHost;
    }
    if (kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice) check_device("copy to", to, bytes);
    if (kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice) check_device("copy from", from, bytes);
    cuda_submit(stream, do_copy, &w, sizeof w);
    const void *host = kind == cudaMemcpyHostToDevice ? from : to;
    if (kind == cudaMemcpyDeviceToDevice || (stream && stream->captured) || allocation_of(host, false)) return cudaSuccess;
    return cudaStreamSynchronize(stream);              // not pinned: the host waits
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    cudaMemcpyAsync(to, from, bytes, kind, nullptr);
    return cudaStreamSynchronize(nullptr);
}

struct FillWork { char *to; int byte; size_t bytes; };
static void do_fill(const void *bytes) {
    FillWork w = *(const FillWork *)bytes;
    char *first = (char *)(((uintptr_t)w.to + PAGE - 1) / PAGE * PAGE), *end = (char *)((uintptr_t)(w.to + w.bytes) / PAGE * PAGE);
    if (w.byte == 0 && w.bytes > 1 << 20) {            // new pages are zero, and take no room until they are written
        memset(w.to, 0, first - w.to);
        memset(end, 0, w.to + w.bytes - end);
        if (madvise(first, end - first, MADV_DONTNEED) == 0) return;
    }
    memset(w.to, w.byte, w.bytes);
}
cudaError_t cudaMemsetAsync(void *to, int byte, size_t bytes, cudaStream_t stream) {
    const FillWork w = { (char *)to, byte, bytes };
    if (!bytes) return cudaSuccess;
    check_device("memset", to, bytes);
    cuda_submit(stream, do_fill, &w, sizeof w);
    return cudaSuccess;
}
cudaError_t cudaMemset(void *to, int byte, size_t bytes) {
    cudaMemsetAsync(to, byte, bytes, nullptr);
    return cudaStreamSynchronize(nullptr);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
    *event = (CudaEvent *)calloc(1, sizeof **event);
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    cudaEventSynchronize(event);
    free(event);
    return cudaSuccess;
}
static void do_record(const void *bytes) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    (*(CudaEvent *const *)bytes)->time = (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    CudaStream *s = stream ? stream : &usual;
    event->stream = s;
    event->graph = s->captured;
    if (s->captured) return cudaSuccess;
    cuda_submit(s, do_record, &event, sizeof event);
    event->after = s->issued;
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    if (event->stream && !event->graph) finish(event->stream, event->after);
    return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    return !event->stream || event->graph || event->stream->done >= event->after ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
    *ms = (float)((to->time - from->time) * 1e3);
    return cudaSuccess;
}
static void do_wait(const void *bytes) {
    const CudaEvent *e = (const CudaEvent *)bytes;
    if (e->stream) finish(e->stream, e->after);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    bool ongoing = false;
    for (const CudaStream *s = &usual; s; s = s->next) ongoing |= event->graph && s->captured == event->graph;
    if (event->graph ? !ongoing || (stream->captured && stream->captured != event->graph)
                     : stream->captured && event->stream) return fail(cudaErrorStreamCaptureUnsupported);
    if (!ongoing) {
        cuda_submit(stream, do_wait, event, sizeof *event);
    } else if (!stream->captured) {
        stream->captured = event->graph;
        stream->forked = true;
    } else {
        event->stream->forked = false;
    }
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    if (!stream || stream->captured) return fail(cudaErrorStreamCaptureUnsupported);
    stream->captured = (CudaGraph *)calloc(1, sizeof *stream->captured);
    stream->captured->end = &stream->captured->first;
    stream->captured->n_users = 1;
    stream->spoiled = false;
    stream->origin = true;
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    *graph = stream->captured;
    for (CudaStream *s = &usual; s; s = s->next) {
        if (!*graph || s->captured != *graph) continue;
        stream->spoiled |= s->spoiled || s->forked;
        s->captured = nullptr;
        s->forked = s->origin = false;
    }
    return !*graph || stream->spoiled ? fail(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, void *, size_t *n) {
    *n = 0;
    for (const Node *node = graph->first; node; node = node->next) ++*n;
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long) {
    graph->n_users++;
    *exec = graph;
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    if (--graph->n_users) return cudaSuccess;
    for (Node *node = graph->first, *next; node; node = next) {
        next = node->next;
        free(node);
    }
    free(graph);
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) { return cudaGraphDestroy(exec); }
static void do_graph(const void *bytes) {
    CudaGraph *g = *(CudaGraph *const *)bytes;
    for (const Node *node = g->first; node; node = node->next) node->work(node->bytes);
    cudaGraphDestroy(g);
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
    exec->n_users++;                                   // until it has run
    cuda_submit(stream, do_graph, &exec, sizeof exec);
    return cudaSuccess;
}

const char *cudaGetErrorString(cudaError_t e) {
    return e == cudaSuccess ? "no error" : e == cudaErrorMemoryAllocation ? "out of memory" : e == cudaErrorNotReady ? "not ready"
         : e == cudaErrorNoKernelImageForDevice ? "no kernel image is available for execution on the device"
         : e == cudaErrorStreamCaptureUnsupported ? "not allowed while a stream is captured" : "invalid argument";
}
cudaError_t cudaGetLastError(void) {
    const cudaError_t e = last_error;
    last_error = cudaSuccess;
    return e;
}
cudaError_t cudaPeekAtLastError(void) { return last_error; }
cudaError_t cudaDriverGetVersion(int *version) {
    *version = has_fault("none") ? 0 : has_fault("driver") ? 11040 : CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int *n) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    *n = !visible || *visible;
    if (has_fault("driver") || has_fault("none")) return fail(cudaErrorInsufficientDriver);
    return *n ? cudaSuccess : fail(cudaErrorNoDevice);
}
cudaError_t cudaSetDevice(int device) { return device ? fail(cudaErrorInvalidValue) : cudaSuccess; }
cudaError_t cuda_code_of(cudaFuncAttributes *a) {
    a->ptxVersion = a->binaryVersion = 10 * card->major + card->minor;
    return has_fault("image") ? fail(cudaErrorNoKernelImageForDevice) : cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int) {
    snprintf(p->name, sizeof p->name, "emulated %s", card->name);
    return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char *id, int size, int) {
    snprintf(id, (size_t)size, "0000:00:00.0");
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr which, int) {
    switch (which) {
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = SHARED_USUAL; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = has_fault("shared") ? SHARED_USUAL : card->block_shared; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = card->sm_shared; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = card->sm_threads; break;
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = card->sm_registers; break;
    case cudaDevAttrMultiProcessorCount: *value = card->n_sm; break;
    case cudaDevAttrComputeCapabilityMajor: *value = has_fault("old") ? 7 : card->major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = card->minor; break;
    case cudaDevAttrL2CacheSize: *value = (int)card->l2; break;
    case cudaDevAttrIntegrated: *value = card->host_memory; break;
    default: return fail(cudaErrorInvalidValue);
    }
    return cudaSuccess;
}

// ==== [7] cuBLAS =====================================================================================================
// c = alpha op(a) op(b) + beta c, column-major; f32 sums in ascending k. Sixteen rows of c and four columns at a time.

struct CublasHandle { cudaStream_t stream; };
struct GemmWork {
    bool turn_a, turn_b;
    int m, n, k, lda, ldb, ldc;
    float alpha, beta;
    const uint16_t *a, *b;
    cudaDataType_t type_a, type_b;
    float *c;
};
typedef float Lanes __attribute__((vector_size(64)));

static float value_of(cudaDataType_t t, uint16_t bits) { return t == CUDA_R_16F ? CudaHalf::wide(bits) : CudaBfloat::wide(bits); }

static void do_gemm(const void *bytes) {
    const GemmWork w = *(const GemmWork *)bytes;
    const int columns = (w.n + 3) / 4 * 4;
    Lanes *rows = (Lanes *)aligned_alloc(64, (size_t)w.k * sizeof(Lanes));             // op(a): (k, 16)
    float *right = (float *)calloc((size_t)w.k * columns, sizeof *right);              // op(b): (columns / 4, k, 4)
    if (!rows || !right) cuda_fault("no memory for a product");
    for (int j = 0; j < w.n; j++)
        for (int p = 0; p < w.k; p++) {
            const size_t at = w.turn_b ? j + (size_t)p * w.ldb : p + (size_t)j * w.ldb;
            right[((size_t)(j / 4) * w.k + p) * 4 + j % 4] = value_of(w.type_b, w.b[at]);
        }
    for (int i = 0; i < w.m; i += 16) {
        const int n_rows = w.m - i < 16 ? w.m - i : 16;
        if (n_rows < 16) memset((void *)rows, 0, (size_t)w.k * sizeof *rows);
        for (int r = 0; r < n_rows; r++)
            for (int p = 0; p < w.k; p++)
                rows[p][r] = value_of(w.type_a, w.a[w.turn_a ? p + (size_t)(i + r) * w.lda : i + r + (size_t)p * w.lda]);
        for (int j = 0; j < w.n; j += 4) {
            Lanes sum[4] = { };
            const float *y = right + (size_t)j * w.k;
            for (int p = 0; p < w.k; p++, y += 4)
                for (int q = 0; q < 4; q++) sum[q] += rows[p] * y[q];
            for (int q = 0; q < 4 && j + q < w.n; q++)
                for (int r = 0; r < n_rows; r++) {
                    float *c = &w.c[i + r + (size_t)(j + q) * w.ldc];
                    *c = w.alpha * sum[q][r] + (w.beta ? w.beta * *c : 0);
                }
        }
    }
    free(rows);
    free(right);
}

cublasStatus_t cublasCreate(cublasHandle_t *handle) {
    *handle = (CublasHandle *)calloc(1, sizeof **handle);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasDestroy(cublasHandle_t handle) {
    free(handle);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream) {
    handle->stream = stream;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetWorkspace(cublasHandle_t, void *work, size_t bytes) {
    check_device("cublasSetWorkspace", work, bytes);
    return (uintptr_t)work % 256 ? CUBLAS_STATUS_INVALID_VALUE : CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int m, int n, int k,
                            const void *alpha, const void *a, cudaDataType_t type_a, int lda, const void *b, cudaDataType_t type_b,
                            int ldb, const void *beta, void *c, cudaDataType_t type_c, int ldc, cublasComputeType_t,
                            cublasGemmAlgo_t) {
    const bool turn_a = op_a == CUBLAS_OP_T, turn_b = op_b == CUBLAS_OP_T;
    if (type_a != type_b || type_a == CUDA_R_32F || type_c != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (m <= 0 || n <= 0 || k <= 0 || lda < (turn_a ? k : m) || ldb < (turn_b ? n : k) || ldc < m)
        return CUBLAS_STATUS_INVALID_VALUE;
    check_device("cublasGemmEx, a", a, 2 * ((size_t)lda * ((turn_a ? m : k) - 1) + (turn_a ? k : m)));
    check_device("cublasGemmEx, b", b, 2 * ((size_t)ldb * ((turn_b ? k : n) - 1) + (turn_b ? n : k)));
    check_device("cublasGemmEx, c", c, 4 * ((size_t)ldc * (n - 1) + m));
    const GemmWork w = { turn_a, turn_b, m, n, k, lda, ldb, ldc, *(const float *)alpha, *(const float *)beta, (const uint16_t *)a,
                         (const uint16_t *)b, type_a, type_b, (float *)c };
    cuda_submit(handle->stream, do_gemm, &w, sizeof w);
    return CUBLAS_STATUS_SUCCESS;
}
