/* instructions.h - the instructions that gemma4_kernels.cu [2] wraps, on the CPU (cuda_runtime.h). Layouts: see there. */
#ifndef INSTRUCTIONS_H
#define INSTRUCTIONS_H
#include "cuda_runtime.h"

struct CudaMatrices { unsigned *r; const void *row; };         // of a lane
struct CudaMultiply { void *c; const unsigned *a, *b; };
void cuda_check_shared(const char *what, const void *p, int bytes);    // aligned, inside of what the launch asked for
void cuda_copy_ahead(void *shared, const void *global, int bytes);
void cuda_copy_commit(void);
void cuda_copied(int n);
void cuda_mbarrier_init(uint64_t *b, unsigned count);
void cuda_mbarrier_arrive(uint64_t *b, bool copies);      // copies: when those of this thread are there, which it lets happen
void cuda_mbarrier_wait(uint64_t *b, unsigned parity);

static inline void load_matrices(unsigned r[4], const void *shared_row) {
    const CudaMatrices lane = { r, shared_row };
    cuda_check_shared("load_matrices", shared_row, 16);
    cuda_meet(MEET_MATRICES, ~0u, (uintptr_t)&lane);
}
static inline void load_matrices_transposed(unsigned r[4], const void *shared_row) {
    const CudaMatrices lane = { r, shared_row };
    cuda_check_shared("load_matrices_transposed", shared_row, 16);
    cuda_meet(MEET_TRANSPOSED, ~0u, (uintptr_t)&lane);
}
static inline unsigned transpose_matrix(unsigned a) {
    return (unsigned)cuda_meet(MEET_TRANSPOSE, ~0u, a);
}
static inline void multiply_int8(int c[4], const unsigned a[4], const unsigned b[2]) {
    const CudaMultiply lane = { c, a, b };
    cuda_meet(MEET_MULTIPLY_INT8, ~0u, (uintptr_t)&lane);
}
static inline void multiply_int8_half(int c[4], const unsigned a[2], unsigned b) {      // the other 16 values are 0
    const unsigned all_a[4] = { a[0], a[1], 0, 0 }, all_b[2] = { b, 0 };
    multiply_int8(c, all_a, all_b);
}
static inline void multiply_half(float c[4], const unsigned a[4], const unsigned b[2]) {
    const CudaMultiply lane = { c, a, b };
    cuda_meet(MEET_MULTIPLY_HALF, ~0u, (uintptr_t)&lane);
}
static inline void copy_ahead(void *shared, const void *global) { cuda_copy_ahead(shared, global, 16); }
static inline void copy_line_ahead(void *shared, const void *global) { cuda_copy_ahead(shared, global, 16); }
static inline void copy_word_ahead(void *shared, const void *global) { cuda_copy_ahead(shared, global, 4); }
static inline void copy_or_zero(void *shared, const void *global, bool there) {
    alignas(16) static const char zeros[16] = { };
    cuda_copy_ahead(shared, there ? global : zeros, 16);
}
static inline void prefetch_l2(const void *p, unsigned bytes) {
    if ((uintptr_t)p % 16 || bytes % 16) cuda_fault("prefetch_l2: %p, %u bytes: not multiples of 16", p, bytes);
}
static inline float fast_exp2(float x) { return x < -126 ? 0 : exp2f(x); }
static inline unsigned permute_bytes(unsigned a, unsigned b, unsigned which) { return __byte_perm(a, b, which); }
static inline int dot_unsigned(unsigned a, unsigned b, int sum) {
    for (int i = 0; i < 32; i += 8) sum += (int)(a >> i & 255) * (int8_t)(b >> i);
    return sum;
}
static inline const void *address_of_parameter(const void *parameter) { return parameter; }
static inline unsigned prefetch_parameter(const void *, int) { return 0; }
static inline void copy_commit(void) { cuda_copy_commit(); }
template <int N> static inline void wait_for_copies(void) { cuda_copied(N); }
static inline int opaque(int v) { return v; }
template <int N> static inline void sync_first(void) { cuda_barrier_of(N); }
static inline void mbarrier_init(uint64_t *b, unsigned count) { cuda_mbarrier_init(b, count); }
static inline void mbarrier_arrive(uint64_t *b) { cuda_mbarrier_arrive(b, false); }
static inline void mbarrier_arrive_on_copies(uint64_t *b) { cuda_mbarrier_arrive(b, true); }
static inline void mbarrier_wait(uint64_t *b, unsigned parity) { cuda_mbarrier_wait(b, parity); }
static inline uint4 load_once(const void *p) {
    if ((uintptr_t)p % 16) cuda_fault("load_once: %p is not aligned to 16 bytes", p);
    return *(const uint4 *)p;
}
#endif
