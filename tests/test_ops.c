/* test_ops.c - compares every operation of gemma4.h, in each backend, with its definition in parts/reference.h.
 *
 * run_all() takes a table of operations, so that all backends run the same cases: buffers come from op->reserve and are
 * filled and read with op->copy; weights are uploaded if the backend has its own memory. The reference gets the same
 * structs with pointers to host memory; only the tolerances are computed here.
 *
 *   matrix products   the error of an activation is known; multiplied with the magnitudes of the weights it is the
 *                     tolerance. If a norm precedes the product, the backend's y may differ from the reference in its
 *                     last bits, and a rounding to int8 may go the other way: only an element that is so close to a tie
 *                     increases the tolerance, by s * |w|
 *   rows              products, norms and experts run with 1 to 100 rows, attention with up to 200; a row alone must
 *                     give the same bits as among 64 (rule 7 of gemma4.h)
 *   attention         slots that no row may see have large values
 *   images            backends of 16 bits (not exact_prompts) may round q, k, v and the weights of attend_all
 *   buffers           outputs start as NaN (all bits set) and are followed by guard bytes; inputs must stay unchanged
 *
 * Arguments: the operations to test, for example `build/test_ops attend route`; none: all. -NAME before them: only the
 * backend of make BACKEND=parts/NAME.h, every fifth case. -cuda: the CUDA backend only; -plain: the plain CUDA backend
 * only; -few after it: every 23rd case, without the 100 rows for cuBLAS; plain: every 199th; -host: every eleventh.
 * Without them the CPU backend runs every fifth case, with LONG=1 all, the plain one every tenth. TEST_TIMES=1 prints
 * seconds. */
#define TESTING
#include "../gemma4.c"
#include "card.h"
#include "test.h"
#include <sys/wait.h>

// Bounds on |got - want|. Everything else must be equal bit for bit: copies, q and s of an Act, stored cache rows
// against the checkpoint of the same row, sampled tokens.
#define TOL_PRODUCT 4e-6                // * sum |term|      products; both halves of a Q4_K term count
#define TOL_FACTOR  5e-7    // * |value|  roundings after a product: scale of a matrix, weight of an expert
#define TOL_NORM    2e-6                // * max |row|       norms, residual sums, rope, per-layer rows, router weights
#define TOL_ACT     1e-6                // * |argument|      GELU, SiLU; * cap: the cap of logits
#define TOL_EMBED   2.5e-7              // * |value|         two roundings
#define TOL_TINY    1e-7    // +  cache rows of 16 bits near 0; else half a unit in the last place
#define TOL_ATTEND  2e-5    // * max |v| of visible keys, f32 caches; the CPU computes in f32 from every cache type
#define TOL_ATTEND_16 4e-3    // * max |v| of visible keys, other backends on 16-bit caches: q and p may be rounded
#define TOL_PROMPT  0x1p-7    // * sum |term|  instead of TOL_PRODUCT: other backends, more than STEP_ROWS rows (bf16)
#define TOL_LOGPROB 1e-6                // * max(1, |value|)   logprob, logsumexp

static const Ops *op;
static char now[240];                   // "backend operation: case", the beginning of every message

#define CASE(name, ...) case_is(name, __VA_ARGS__)
static int every = 1, n_cases;          // runs the first and then every `every`-th case of an operation
static int attend_every;                // the same for attend; 0: no other number

// Names the next case. True: it is run.
__attribute__((format(printf, 2, 3))) static bool case_is(const char *name, const char *fmt, ...) {
    int n = snprintf(now, sizeof now, "%s %s: ", op->name, name);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(now + n, sizeof now - (size_t)n, fmt, ap);
    va_end(ap);
    return n_cases++ % (attend_every && !strcmp(name, "attend") ? attend_every : every) == 0;
}

// The CPU backend uses one thread here, which is faster if other programs use the cores too. The first 64 rows of most
// cases use more threads, so the bits are compared between numbers of threads.
static void set_threads(int n_rows) {
    start_threads(3);
    use_threads(n_rows == 64 ? 3 : 1);
}

// ---- memory ---------------------------------------------------------------------------------------------------------
// Everything is valid until sweep(), which ends a case: it checks guards and inputs, then frees all.

enum { GUARD = 64, MAX_BUFFERS = 20000 };

typedef struct {
    char  *dev;
    void  *src;                         // inputs: their contents, which must not change; else NULL
    size_t bytes;
    const char *name;
} Buffer;

static Buffer buffers[MAX_BUFFERS];
static void *host_blocks[MAX_BUFFERS * 4];
static int n_buffers, n_host_blocks;

static void *keep(size_t n, size_t size) {             // host memory, zeroed
    if (n_host_blocks == MAX_BUFFERS * 4) die("test_ops: too many host blocks in one case");
    return host_blocks[n_host_blocks++] = alloc_or_die(n, size);
}

static void *buffer(const char *name, const void *src, size_t bytes, bool fixed) {
    if (n_buffers == MAX_BUFFERS) die("test_ops: too many buffers in one case");
    Buffer *b = &buffers[n_buffers++];
    char *image = alloc_or_die(bytes + GUARD, 1);
    memset(image, 0xff, bytes + GUARD);
    if (src && bytes) memcpy(image, src, bytes);
    *b = (Buffer){ .dev = op->reserve(bytes + GUARD), .bytes = bytes, .name = name };
    if (!b->dev) die("test_ops: no room for %zu bytes", bytes + GUARD);
    op->copy(&(Copy){ b->dev, image, bytes + GUARD, COPY_IN });
    if (fixed) b->src = image;
    else free(image);
    return b->dev;
}

static void *room(const char *name, size_t n, size_t size) { return buffer(name, NULL, n * size, false); }
static void *put(const char *name, const void *src, size_t n, size_t size) {
    return src ? buffer(name, src, n * size, true) : NULL;
}

static void *put_changing(const char *name, const void *src, size_t n, size_t size) {
    return buffer(name, src, n * size, false);
}

static float *room_f(const char *name, size_t n) { return room(name, n, sizeof(float)); }
static float *change_f(const char *name, const float *src, size_t n) {
    return put_changing(name, src, n, sizeof(float));
}
static float *put_f(const char *name, const float *src, size_t n) { return put(name, src, n, sizeof(float)); }

static void *fetch(const void *dev, size_t n, size_t size) {
    void *p = keep(n, size);
    op->copy(&(Copy){ p, dev, n * size, COPY_OUT });
    op->wait();
    return p;
}

static float *fetch_f(const float *dev, size_t n) { return fetch(dev, n, sizeof(float)); }

static void sweep(void) {
    char guard[GUARD];
    for (int i = 0; i < n_buffers; i++) {
        Buffer *b = &buffers[i];
        char *image = alloc_or_die(b->bytes + GUARD, 1);
        op->copy(&(Copy){ image, b->dev, b->bytes + GUARD, COPY_OUT });
        op->wait();
        memset(guard, 0xff, GUARD);
        bool whole = memcmp(image + b->bytes, guard, GUARD) == 0, same = !b->src ||
            memcmp(image, b->src, b->bytes) == 0;
        if (!whole || !same)
            CHECK(false, "%s: %s: got %s, want %s", now, b->name, whole ? "a changed input" : "a write after its end",
                  whole ? "the bytes put there" : "none");
        free(image);
        free(b->src);
        op->release(b->dev);
    }
    CHECK(true, "buffers");
    n_buffers = 0;
    while (n_host_blocks) free(host_blocks[--n_host_blocks]);
}

// ---- comparison -----------------------------------------------------------------------------------------------------

// Compares got (rows, stride) with want within bound (rows, cols); one message for the worst element. NaN always fails.
static void compare(const char *what, const float *got, size_t stride, const float *want, const float *bound, int rows,
                    int cols) {
    int bad = 0, at_r = 0, at_i = 0;
    double worst = -1;
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < cols; i++) {
            const size_t j = (size_t)r * (size_t)cols + (size_t)i;
            const double off = fabs((double)got[(size_t)r * stride + (size_t)i] - (double)want[j]);
            if (off <= (double)bound[j]) continue;
            bad++;
            const double ratio = isnan(off) ? INFINITY : off / ((double)bound[j] + 1e-300);
            if (ratio > worst) {
                worst = ratio;
                at_r = r;
                at_i = i;
            }
        }
    const size_t j = (size_t)at_r * (size_t)cols + (size_t)at_i;
    CHECK(!bad, "%s: %s (%d, %d): got %.9g, want %.9g, tolerance %.2g; %d of %d differ", now, what, at_r, at_i,
          (double)got[(size_t)at_r * stride + (size_t)at_i], (double)want[j], (double)bound[j], bad, rows * cols);
}

static void same_bits(const char *what, const void *got, const void *want, size_t n, size_t size) {
    size_t i = 0;
    while (i < n && memcmp((const char *)got + i * size, (const char *)want + i * size, size) == 0) i++;
    if (i == n) i = 0;
    else if (size == 4) {
        float g, w;
        memcpy(&g, (const char *)got + i * 4, 4);
        memcpy(&w, (const char *)want + i * 4, 4);
        CHECK(false, "%s: %s, index %zu of %zu: got %a, want %a, tolerance 0", now, what, i, n, (double)g, (double)w);
        return;
    } else {
        const unsigned char *g = (const unsigned char *)got + i * size, *w = (const unsigned char *)want + i * size;
        CHECK(false, "%s: %s, index %zu of %zu: got byte 0x%02x, want 0x%02x, tolerance 0", now, what, i, n, *g, *w);
        return;
    }
    CHECK(true, "%s", what);
}

static void same_ints(const char *what, const int32_t *got, const int32_t *want, int n) {
    for (int i = 0; i < n; i++)
        if (got[i] != want[i]) {
            CHECK(false, "%s: %s, index %d: got %d, want %d, tolerance 0", now, what, i, (int)got[i], (int)want[i]);
            return;
        }
    CHECK(true, "%s", what);
}

// ---- random values --------------------------------------------------------------------------------------------------

static uint64_t random_state = 1;

static uint32_t rnd(uint32_t n) {                      // 0 .. n - 1
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((random_state >> 33) % n);
}

static float uniform(void) { return (float)((double)rnd(1u << 24) / (1 << 23) - 1); }      // [-1, 1)

static float *floats(size_t n, double scale, double offset) {
    float *v = keep(n, sizeof *v);
    for (size_t i = 0; i < n; i++) v[i] = (float)(offset + scale * (double)uniform());
    return v;
}

// (rows, cols) values like activations: groups of 32 of very different magnitude, some of them zero or nearly zero.
static float *activations(int rows, int cols) {
    float *v = floats((size_t)rows * (size_t)cols, 1, 0);
    for (int r = 0; r < rows; r++)
        for (int g = 0; cols > 128 && g < cols / 32; g++) {
            const float zero = r % 2 ? 1e-37f : 0;
            const float scale = (g + r) % 7 == 3 ? zero : (g + r) % 11 == 5 ? 12 : (g + r) % 5 == 1 ? 0.03f : 1;
            for (int i = 0; i < 32; i++) v[(size_t)r * (size_t)cols + (size_t)(g * 32 + i)] *= scale;
        }
    return v;
}

// ---- matrices -------------------------------------------------------------------------------------------------------

typedef struct {
    Tensor   t;                         // in the backend
    Tensor   host;                      // as in a file, for the reference
    // (n, rows, cols) f32: the magnitudes |w| for tolerances. For a type with a minimum: the sum of both parts' magnitudes,
    // at most three times the largest value of the block
    Tensor   size;
    float   *factor;                    // (n) the values of t.scale, or NULL
} Matrix;

static const DType all_types[] = { T_F32, T_F16, T_BF16, T_Q8_0, T_Q4_0, T_Q5_0, T_Q4_K, T_Q6_K, T_Q4_1, T_Q5_1, T_Q2_K,
                                   T_Q3_K, T_Q5_K, T_IQ4_NL, T_IQ4_XS, T_MXFP4, T_NVFP4 };
enum { N_TYPES = sizeof all_types / sizeof *all_types };

static const char *type_name(DType t) { return gguf_type_name((int)t); }
static bool takes_int8(DType t) { return t != T_F32 && t != T_F16 && t != T_BF16; }
static int block_elems(DType t) { return gguf_block_elems((int)t); }
static int block_bytes(DType t) { return gguf_block_bytes((int)t); }

static void random_block(DType t, uint8_t *b) {
    unsigned d = (rnd(2) << 15) | rnd(1024), d_min = (rnd(2) << 15) | rnd(1024);       // sign and mantissa
    const float f = uniform() * 0.05f;
    for (int i = 0; i < block_bytes(t); i++) b[i] = (uint8_t)rnd(256);
    switch (t) {                        // exponents that make values of about 0.03
    case T_F32:  memcpy(b, &f, 4); return;
    case T_F16:  d |= rnd(20) ? (6 + rnd(5)) << 10 : 0; break;          // one in twenty is subnormal
    case T_BF16: d = (d & 0x807f) | (117 + rnd(6)) << 7; break;
    case T_Q8_0: d |= 4 << 10; break;
    case T_Q4_0: d |= 8 << 10; break;
    case T_Q5_0: d |= 7 << 10; break;
    case T_Q4_K: case T_Q5_K: d = (d & 0x7fff) | 2 << 10; d_min = (d_min & 0x7fff) | 5 << 10; break;
    case T_Q4_1: case T_Q5_1: d |= 7 << 10; d_min |= 9 << 10; break;
    case T_IQ4_NL: d |= 4 << 10; break;
    case T_IQ4_XS: break;                              // subnormal: 2^-14 and less
    case T_MXFP4: b[0] = (uint8_t)(119 + rnd(6)); return;
    case T_NVFP4: for (int i = 0; i < 4; i++) b[i] = (uint8_t)rnd(48); return;
    case T_Q3_K: b[108] = (uint8_t)d; b[109] = (uint8_t)((d | 3 << 10) >> 8); return;
    case T_Q2_K:
        b[80] = (uint8_t)d;
        b[81] = (uint8_t)((d | 5 << 10) >> 8 & 0x7f);
        b[82] = (uint8_t)d_min;
        b[83] = (uint8_t)((d_min | 5 << 10) >> 8 & 0x7f);
        return;
    default:     b[208] = (uint8_t)d; b[209] = (uint8_t)((d | 1 << 10) >> 8); return;
    }
    b[0] = (uint8_t)d;
    b[1] = (uint8_t)(d >> 8);
    if (t == T_Q4_K || t == T_Q5_K || t == T_Q4_1 || t == T_Q5_1) {
        b[2] = (uint8_t)d_min;
        b[3] = (uint8_t)(d_min >> 8);
    }
}

static Matrix random_matrix(DType type, int n, int rows, int cols) {
    const size_t blocks = (size_t)n * (size_t)rows * (size_t)cols / (size_t)block_elems(type);
    Matrix w = { .host = { .type = type, .rows = rows, .cols = cols, .n = n } };
    if (cols % block_elems(type)) die("test_ops: %s of %d columns", type_name(type), cols);
    uint8_t *bytes = keep(blocks * (size_t)block_bytes(type), 1);
    for (size_t i = 0; i < blocks; i++) random_block(type, bytes + i * (size_t)block_bytes(type));
    w.host.data = bytes;
    return w;
}

static bool all_in_host;                // every matrix is in host memory

// Computes the magnitudes of the values and uploads the matrix to the backend.
static void place(Matrix *w) {
    const DType t = w->host.type;
    const bool has_min = t == T_Q4_1 || t == T_Q5_1 || t == T_Q2_K || t == T_Q4_K || t == T_Q5_K;
    const size_t n = (size_t)w->host.n * (size_t)w->host.rows * (size_t)w->host.cols, elems = (size_t)block_elems(t);
    float *size = keep(n, sizeof *size);
    gguf_dequantize((int)t, w->host.data, size, n);
    for (size_t b = 0; b < n; b += elems) {
        float top = 0;
        for (size_t i = b; i < b + elems; i++) {
            size[i] = fabsf(size[i]);
            top = fmaxf(top, size[i]);
        }
        for (size_t i = b; has_min && i < b + elems; i++) size[i] = 3 * top;
    }
    w->size = w->t = w->host;
    w->size.type = T_F32;
    w->size.data = size;
    w->t.in_host |= all_in_host;
    const size_t bytes = op->weight_bytes(&w->t);
    op->upload(&w->t, bytes ? room("weights", bytes, 1) : NULL);
    w->host.scale = w->factor;
    if (w->factor) w->t.scale = put_f("scale", w->factor, (size_t)w->t.n);
}

static Matrix matrix(DType type, int n, int rows, int cols) {
    Matrix w = random_matrix(type, n, rows, cols);
    place(&w);
    return w;
}

static Matrix table(DType type, int rows, int cols, bool in_host) {         // rows are gathered, never multiplied
    Matrix w = random_matrix(type, 1, rows, cols);
    w.host.in_host = in_host;
    place(&w);
    return w;
}

static Matrix scaled_matrix(DType type, int n, int rows, int cols) {
    Matrix w = random_matrix(type, n, rows, cols);
    w.factor = floats(n, 0.5, 1);
    place(&w);
    return w;
}

// ---- the input of a product, and the product ------------------------------------------------------------------------

enum { AS_F32, AS_INT8 };

typedef struct {                        // (rows, cols) each
    In     in;                          // the input itself, in host memory
    int    cols;
    float *t[2];                        // factor of |w| in the tolerance, for matrices of floats and quantised ones
    float *y, *x;                       // y and x' of In
    float *y_bound, *x_bound;
} Input;

static double largest(const float *v, int n) {
    double m = 0;
    for (int i = 0; i < n; i++) m = fmax(m, fabs((double)v[i]));
    return m;
}

// The tolerances of row y (cols), which is exact within +-near.
static void input_bounds(Input *in, size_t at, const float *y, double near) {
    for (int i = 0; i < in->cols; i++) in->t[AS_F32][at + (size_t)i] = (float)(TOL_PRODUCT * fabs((double)y[i]) + near);
    for (int g = 0; in->cols % 32 == 0 && g < in->cols; g += 32) {
        int8_t q[32];
        float scale;
        ref_quantise(y + g, 32, q, &scale);
        const double s = (double)scale, max = 127 * s, unsure = max > 0 ? 2 * near * 127 / max : 0;
        for (int i = 0; i < 32; i++) {
            const double exact = max > 0 ? (double)y[g + i] * 127 / max : 0, to_tie = fabs(exact - floor(exact) - 0.5);
            const double size = s * abs(q[i]), share = max > 0 ? size * near / max : 0;
            in->t[AS_INT8][at + (size_t)(g + i)] = (float)(TOL_PRODUCT * size + share + (to_tie < unsure ? s : 0));
        }
    }
}

// The reference's result for an In, and the tolerances.
static Input ref_in(const In *in, int rows, int cols) {
    const size_t n = (size_t)rows * (size_t)cols;
    Input out = { .in = *in, .cols = cols };
    float **all[] = { &out.t[0], &out.t[1], &out.y, &out.x, &out.y_bound, &out.x_bound }, *d = keep(n, sizeof *d);
    for (int i = 0; i < 6; i++) *all[i] = keep(n, sizeof(float));
    out.in.x_out = NULL;
    if (in->act.f || in->act.q) {
        for (size_t i = 0; i < n; i++) {
            if (in->act.f) out.t[AS_F32][i] = (float)(TOL_PRODUCT * fabs((double)in->act.f[i]));
            if (in->act.q) out.t[AS_INT8][i] = (float)(TOL_PRODUCT * fabs((double)in->act.s[i / 32] * in->act.q[i]));
        }
        return out;
    }
    In whole = *in, only_d = *in;
    whole.x_out = out.x;
    only_d.x = only_d.w_pre = only_d.x_out = NULL;
    only_d.scale = 1;
    reference_ops()->close(&(Close){ .n_rows = rows, .cols = cols, .in = whole, .out = out.y });
    reference_ops()->close(&(Close){ .n_rows = rows, .cols = cols, .in = only_d, .out = d });
    const bool exact = !in->delta[0] && !in->delta[1] && in->scale == 1 && !in->w_pre;
    for (size_t at = 0; at < n; at += (size_t)cols) {
        // the largest sum |term| of x': the tolerance does not shrink by cancellation
        double terms = 0;
        for (size_t i = at; i < at + (size_t)cols; i++)
            terms = fmax(terms, fabs((double)in->scale) * (fabs(in->x ? (double)in->x[i] : 0) + fabs((double)d[i])));
        const double x_max = largest(out.x + at, cols), x_near = exact ? 0 : TOL_NORM * terms;
        const double near = exact || x_max == 0 ? 0 : TOL_NORM * largest(out.y + at, cols) * (terms / x_max);
        for (size_t i = at; i < at + (size_t)cols; i++) {
            out.y_bound[i] = (float)near;
            out.x_bound[i] = (float)x_near;
        }
        input_bounds(&out, at, out.y + at, near);
    }
    return out;
}

static float *at_row(const float *p, int r, int cols) {
    return p ? (float *)(uintptr_t)p + (size_t)r * (size_t)cols : NULL;
}

// The same input, starting at row `first`.
static In in_from(In in, int first, int cols) {
    in.x = at_row(in.x, first, cols);
    for (int k = 0; k < 2; k++) in.delta[k] = at_row(in.delta[k], first, cols);
    in.act.f = at_row(in.act.f, first, cols);
    in.act.s = at_row(in.act.s, first, cols / 32);
    if (in.act.q) in.act.q += (size_t)first * (size_t)cols;
    in.x_out = at_row(in.x_out, first, cols);
    return in;
}

static In put_in(const In *in, int rows, int cols) {
    const size_t n = (size_t)rows * (size_t)cols, f = sizeof(float);
    In d = { .scale = in->scale, .eps = in->eps };
    d.x = put("in.x", in->x, n, f);
    d.act.f = put("in.act.f", in->act.f, n, f);
    d.act.q = put("in.act.q", in->act.q, n, 1);
    d.act.s = put("in.act.s", in->act.s, n / 32, f);
    for (int k = 0; k < 2; k++) {
        d.delta[k] = put("in.delta", in->delta[k], n, f);
        d.w_delta[k] = put("in.w_delta", in->w_delta[k], (size_t)cols, f);
    }
    d.w_post = put("in.w_post", in->w_post, (size_t)cols, f);
    d.w_pre = put("in.w_pre", in->w_pre, (size_t)cols, f);
    if (in->x_out) d.x_out = room("in.x_out", n, f);
    return d;
}

// Bits that select the fields of an In.
enum { IN_X = 1, IN_DELTA = 2, IN_DELTA_2 = 4, IN_W_DELTA = 8, IN_W_DELTA_2 = 16, IN_W_POST = 32, IN_SCALE = 64,
       IN_W_PRE = 128, IN_X_OUT = 256, IN_ALL = 512 };

static In random_in(int rows, int cols, int bits) {
    In in = { .scale = bits & IN_SCALE ? 0.3f : 1, .eps = 1e-6f };
    if (bits & IN_X) in.x = activations(rows, cols);
    for (int k = 0; k < 2; k++) {
        if (bits & IN_DELTA << k) in.delta[k] = floats((size_t)rows * (size_t)cols, k ? 0.2 : 3, 0);
        if (bits & IN_W_DELTA << k) in.w_delta[k] = floats(cols, 0.5, 1);
    }
    if (bits & IN_W_POST) in.w_post = floats(cols, 0.5, 1);
    if (bits & IN_W_PRE) in.w_pre = floats(cols, 0.5, 1);
    if (bits & IN_X_OUT) in.x_out = keep(1, sizeof(float));    // put_in makes the backend's; the reference gets none
    return in;
}

// An Act as a producer writes it: f, int8, or both.
static Act random_act(int rows, int cols, bool f, bool q) {
    const size_t n = (size_t)rows * (size_t)cols;
    Act a = { .f = activations(rows, cols) };
    if (q) {
        a.q = keep(n, 1);
        a.s = keep(n / 32 + 1, sizeof(float));
        ref_quantise(a.f, (int)n, a.q, a.s);
    }
    if (!f) a.f = NULL;
    return a;
}

// ---- rows -----------------------------------------------------------------------------------------------------------

typedef struct { int first, n; } Run;
static const Run runs_100[] = { { 0, 64 }, { 0, 1 }, { 0, 2 }, { 20, 9 }, { 63, 1 },       // -few: these
                                { 0, 7 }, { 31, 33 }, { 5, 1 }, { 33, 7 }, { 40, 3 }, { 60, 4 }, { 0, 17 },
                                { 0, 100 } };
static const Run runs_7[] = { { 0, 7 }, { 0, 1 }, { 0, 2 }, { 3, 3 }, { 6, 1 } };
enum { N_RUNS_7 = 5 };
static int n_runs_100 = sizeof runs_100 / sizeof *runs_100;

typedef struct {                        // the expected rows; later runs must repeat the bits of the first run
    int    cols;
    float *want, *bound;                // (rows, cols)
    float *base;
    int    base_n;
    bool   any_rows;                    // the bounds are valid for prompts too, because there is no product
} Expect;

static Expect expect(int rows, int cols) {
    const size_t n = (size_t)rows * (size_t)cols;
    return (Expect){ .cols = cols, .want = keep(n, sizeof(float)), .bound = keep(n, sizeof(float)) };
}

// The tolerance of norms, for each group of n of the n_all values.
static void set_norm_bounds(Expect *e, size_t n_all, int n) {
    for (size_t at = 0; at < n_all; at += (size_t)n) {
        const float bound = (float)(TOL_NORM * largest(e->want + at, n));
        for (size_t i = at; i < at + (size_t)n; i++) e->bound[i] = bound;
    }
}

// Matrix e times the rows of an input from `first` on. The bound is a product too: of the magnitudes of the weights and
// the tolerances of the activations.
static Expect product(const Matrix *w, int e, const Input *in, int first, int rows) {
    const int out = w->host.rows, cols = w->host.cols;
    const size_t at = (size_t)e * (size_t)out;
    Tensor v = w->host, size = w->size;
    Expect p = expect(rows, out);
    v.data = (const uint8_t *)v.data + at * gguf_row_size((int)v.type, (size_t)cols);
    size.data = (const float *)size.data + at * (size_t)cols;
    if (v.scale) v.scale += e;
    const In bounds = { .act.f = in->t[takes_int8(v.type) ? AS_INT8 : AS_F32], .scale = 1 };
    reference_ops()->matmul(&(Matmul){ .n_rows = rows, .n = 1, .in = in_from(in->in, first, cols), .w = { &v },
                                       .out = { p.want } });
    reference_ops()->matmul(&(Matmul){ .n_rows = rows, .n = 1, .in = in_from(bounds, first, cols), .w = { &size },
                                       .out = { p.bound } });
    // Rule 6: other backends round activations to the precision of a matrix of floats.
    const bool rounded = !op->on_host && (v.type == T_F16 || v.type == T_BF16);
    for (size_t i = 0; i < (size_t)rows * (size_t)out; i++) {
        if (rounded) p.bound[i] *= (float)(1 + ldexp(1, v.type == T_F16 ? -11 : -8) / TOL_PRODUCT);
        if (v.scale)
            p.bound[i] = (float)(fabs((double)*v.scale) * (double)p.bound[i] + TOL_FACTOR * fabs((double)p.want[i]));
    }
    return p;
}

// The tolerance of act(g) * u.
static float gated_bound(ActFn fn, float g, float g_bound, float u, float u_bound) {
    const double slope = 1.13;          // neither function is steeper
    const double of_act = slope * (double)g_bound + TOL_ACT * fabs((double)g), act = ref_activation(fn, (double)g);
    return (float)(of_act * (fabs((double)u) + (double)u_bound) + fabs(act) * (double)u_bound);
}

// Rule 6: such a step may round both factors of a product to bf16.
static bool prompt_rounding(int n_rows) { return !op->on_host && n_rows > STEP_ROWS; }

static void check_rows(const char *what, Expect *e, float *got, Run run) {
    const size_t at = (size_t)run.first * (size_t)e->cols;
    if (prompt_rounding(run.n) && !e->any_rows) {
        const size_t n = (size_t)run.n * (size_t)e->cols;
        float *bound = keep(n, sizeof *bound);
        for (size_t i = 0; i < n; i++) bound[i] = e->bound[at + i] * (float)(TOL_PROMPT / TOL_PRODUCT);
        compare(what, got, e->cols, e->want + at, bound, run.n, e->cols);
    } else {
        compare(what, got, e->cols, e->want + at, e->bound + at, run.n, e->cols);
    }
    if (!e->base) e->base = got, e->base_n = run.n;
    else if (run.first + run.n <= e->base_n) {
        char text[120];
        snprintf(text, sizeof text, "%s: rows %d..%d alone against the same among %d", what, run.first,
                 run.first + run.n - 1, e->base_n);
        same_bits(text, got, e->base + at, (size_t)run.n * (size_t)e->cols, sizeof(float));
    }
}

static void check_quantised(const char *what, const int8_t *q, const float *s, const float *f, size_t n) {
    int8_t *want_q = keep(n, 1);
    float *want_s = keep(n / 32, sizeof(float));
    ref_quantise(f, (int)n, want_q, want_s);
    char text[120];
    snprintf(text, sizeof text, "%s.s", what);
    same_bits(text, s, want_s, n / 32, sizeof(float));
    snprintf(text, sizeof text, "%s.q", what);
    same_bits(text, q, want_q, n, 1);
}

// Buffers for an Act; the formats depend on the number of the run: both, f, int8, both ..
static Act act_room(int rows, int cols, int run) {
    const size_t n = (size_t)rows * (size_t)cols;
    Act a = { 0 };
    if (run % 3 != 2 || cols % 32) a.f = room_f("out.f", n);
    if (run % 3 != 1 && cols % 32 == 0) {
        a.q = room("out.q", n, 1);
        a.s = room_f("out.s", n / 32);
    }
    return a;
}

static void check_act(Expect *e, Act out, Run run) {
    const size_t n = (size_t)run.n * (size_t)e->cols;
    float *f = out.f ? fetch_f(out.f, n) : NULL;
    if (f) check_rows("out.f", e, f, run);
    else if (run.first + run.n <= e->base_n) f = e->base + (size_t)run.first * (size_t)e->cols;
    if (out.q && f && (out.f || !prompt_rounding(run.n)))
        check_quantised("out", fetch(out.q, n, 1), fetch_f(out.s, n / 32), f, n);
}

// ---- the batch ------------------------------------------------------------------------------------------------------

enum { MAX_STEP = 512, MAX_SEGS = 4 };

typedef struct {
    Row     rows[MAX_STEP];
    Segment segs[MAX_SEGS];
    int32_t len[MAX_SEGS];
    int     n_rows, n_segs;
} TestStep;

static void add_chain(TestStep *s, int seq, int len, int n) {
    Segment *seg = &s->segs[s->n_segs];
    *seg = (Segment){ .seq = seq, .first = s->n_rows, .n = n, .kind = SEG_CHAIN };
    s->len[seq] = len;
    for (int i = 0; i < n; i++) s->rows[s->n_rows++] = (Row){ .seg = s->n_segs, .index = i, .depth = i };
    s->n_segs++;
}

// Of the chain's rows, those from .. from + n - 1 are a picture.
static void add_picture(TestStep *s, int from, int n) {
    Row *row = &s->rows[s->segs[s->n_segs - 1].first + from];
    for (int i = 0; i < n; i++) row[i].ahead = n - 1 - i;
}

// The parent of row i is a random row before it, at most `wide` rows back; wide 0: row (i - 1) / 2.
static void add_tree(TestStep *s, int seq, int len, int n, int wide) {
    const int first = s->n_rows;
    add_chain(s, seq, len, n);
    s->segs[s->n_segs - 1].kind = SEG_TREE;
    for (int i = 0; i < n; i++) {
        Row *row = &s->rows[first + i];
        const int parent = !i ? -1 : wide ? i - 1 - (int)rnd((uint32_t)min_int(i, wide)) : (i - 1) / 2;
        row->depth = parent < 0 ? 0 : s->rows[first + parent].depth + 1;
        row->ancestors = (parent < 0 ? 0 : s->rows[first + parent].ancestors) | (uint64_t)1 << i;
    }
}

static void random_tokens(TestStep *s, int vocab) {
    for (int r = 0; r < s->n_rows; r++)
        s->rows[r].token = r == 0 ? vocab - 1 : r == 1 ? 0 : (int32_t)rnd((uint32_t)vocab);
}

static Batch put_batch(const TestStep *s) {
    return (Batch){ .rows = put("batch.rows", s->rows, (size_t)s->n_rows, sizeof(Row)), .n_rows = s->n_rows,
                    .segs = put("batch.segs", s->segs, MAX_SEGS, sizeof(Segment)), .n_segs = s->n_segs,
                    .len = put("batch.len", s->len, MAX_SEGS, sizeof(int32_t)) };
}

// The same step for the reference.
static Batch host_batch(TestStep *s) {
    return (Batch){ .rows = s->rows, .segs = s->segs, .len = s->len, .n_rows = s->n_rows, .n_segs = s->n_segs };
}

static Batch batch_from(Batch b, Run run) {    // the view with which forward() continues after it has dropped rows
    b.rows += run.first;
    b.n_rows = run.n;
    return b;
}

// ---- body -----------------------------------------------------------------------------------------------------------

static void test_embed(void) {
    static const int widths[] = { 2816, 1536, 704, 2112, 33, 7 };
    for (int t = 0; t < N_TYPES; t++)
        for (int k = 0; k < 6; k++) {
            const int cols = widths[k], vocab = 50;
            if (cols % block_elems(all_types[t])) continue;
            if (!CASE("embed", "%s, cols %d", type_name(all_types[t]), cols)) continue;
            Matrix w = table(all_types[t], vocab, cols, k % 3 == 1);
            TestStep *s = keep(1, sizeof *s);
            add_chain(s, 0, 0, 64);
            random_tokens(s, vocab);
            const Batch batch = put_batch(s);
            const Batch host = host_batch(s);
            const float scale = sqrtf((float)cols);
            Expect e = expect(64, cols);
            reference_ops()->embed(&(Embed){ .batch = &host, .table = &w.host, .scale = scale, .out = e.want });
            for (int i = 0; i < 64 * cols; i++) e.bound[i] = (float)TOL_EMBED * fabsf(e.want[i]);
            for (int run = 0; run < N_RUNS_7; run++) {
                const Run rows = run ? runs_7[run] : (Run){ 0, 64 };
                const Batch b = batch_from(batch, rows);
                float *out = room_f("out", (size_t)rows.n * (size_t)cols);
                set_threads(rows.n);
                op->embed(&(Embed){ .batch = &b, .table = &w.t, .scale = scale, .out = out });
                check_rows("out", &e, fetch_f(out, (size_t)rows.n * (size_t)cols), rows);
            }
            sweep();
        }
}

// The first step of a chain, from tokens and rows of verification, some of them outside the vocabulary; and the next
// steps.
static void test_pair(void) {
    static const int widths[] = { 2048, 1376, 256, 32 };
    enum { ROWS = 64, FOUND = 80, VOCAB = 50, HIDDEN = 9 };
    for (int t = 0; t < N_TYPES; t++)
        for (int k = 0; k < 4; k++) {
            const int cols = widths[k], stride = 1 + k % 3;
            if (cols % block_elems(all_types[t])) continue;
            if (!CASE("pair", "%s, cols %d, stride %d", type_name(all_types[t]), cols, stride)) continue;
            Matrix w = table(all_types[t], VOCAB, cols, k % 3 == 1);
            int32_t *of = keep(ROWS, sizeof *of), *row = keep(FOUND, sizeof *row),
                *tokens = keep((size_t)(FOUND * stride), sizeof *tokens);
            for (int r = 0; r < ROWS; r++) of[r] = (int32_t)rnd(FOUND);
            for (int i = 0; i < FOUND; i++) row[i] = (int32_t)rnd(HIDDEN);
            for (int i = 0; i < FOUND * stride; i++) tokens[i] = (int32_t)rnd(VOCAB + 2) - 1;
            const bool chosen = k % 2 == 0;
            const float *hidden = activations(chosen ? HIDDEN : ROWS, cols);
            Pair o = { .n_rows = ROWS, .table = &w.host, .scale = sqrtf((float)cols), .of = chosen ? of : NULL,
                       .tokens = tokens, .token_stride = stride, .hidden = hidden, .row = chosen ? row : NULL };
            Expect e = expect(ROWS, 2 * cols);
            o.out.f = e.want;
            reference_ops()->pair(&o);
            for (int i = 0; i < ROWS * 2 * cols; i++)
                e.bound[i] = i % (2 * cols) < cols ? (float)TOL_EMBED * fabsf(e.want[i]) : 0;
            o.table = &w.t;
            o.tokens = put("tokens", tokens, (size_t)(FOUND * stride), sizeof *tokens);
            o.hidden = put_f("hidden", hidden, (size_t)(chosen ? HIDDEN : ROWS) * (size_t)cols);
            if (chosen) {
                o.of = put("of", of, ROWS, sizeof *of);
                o.row = put("row", row, FOUND, sizeof *row);
            }
            for (int run = 0; run < 3; run++) {
                o.n_rows = run ? run : ROWS;
                o.out = act_room(o.n_rows, 2 * cols, run);
                set_threads(o.n_rows);
                op->pair(&o);
                check_act(&e, o.out, (Run){ 0, o.n_rows });
            }
            sweep();
        }
}

static void test_ple_rows(void) {
    for (int t = 0; t < N_TYPES; t++) {
        const int n_layers = 3, ple_dim = 256, vocab = 20, cols = n_layers * ple_dim;
        if (!CASE("ple_rows", "%s, %d x %d", type_name(all_types[t]), n_layers, ple_dim)) continue;
        Matrix w = table(all_types[t], vocab, cols, t % 2);
        TestStep *s = keep(1, sizeof *s);
        add_chain(s, 0, 3, 100);
        random_tokens(s, vocab);
        const Batch batch = put_batch(s), host = host_batch(s);
        const float *w_norm = floats(ple_dim, 0.5, 1), *proj = floats(100 * (size_t)cols, 30, 0);
        Expect e = expect(100, cols);
        memcpy(e.want, proj, 100 * (size_t)cols * sizeof *proj);
        PleRows o = { .batch = &host, .table = &w.host, .w_norm = w_norm, .u = e.want, .n_layers = n_layers,
                      .ple_dim = ple_dim,
                      .proj_scale = 0.0255f, .table_scale = 16, .out_scale = 0.70710678f, .eps = 1e-6f };
        reference_ops()->ple_rows(&o);
        set_norm_bounds(&e, 100 * (size_t)cols, ple_dim);
        o.table = &w.t;
        o.w_norm = put_f("w_norm", w_norm, ple_dim);
        for (int run = 0; run < n_runs_100; run++) {
            const Run rows = runs_100[run];
            const Batch b = batch_from(batch, rows);
            o.batch = &b;
            o.u = change_f("u", proj + (size_t)(rows.first * cols), rows.n * cols);
            set_threads(rows.n);
            op->ple_rows(&o);
            check_rows("u", &e, fetch_f(o.u, rows.n * cols), rows);
        }
        sweep();
    }
}

static void check_x_out(const Input *ref, const float *dev, int first, int rows) {
    const size_t at = (size_t)first * (size_t)ref->cols;
    if (dev)
        compare("in.x_out", fetch_f(dev + at, (size_t)rows * (size_t)ref->cols), ref->cols, ref->x + at,
                ref->x_bound + at, rows, ref->cols);
}

// One input, n matrices, every run; host In.
static void matmul_case(int n, Matrix *w, const In *in, int rows, const Run *runs, int n_runs) {
    const int cols = w[0].t.cols;
    const Input ref = ref_in(in, rows, cols);
    const In dev = put_in(in, rows, cols);
    Expect e[MAX_PRODUCTS];
    for (int k = 0; k < n; k++) e[k] = product(&w[k], 0, &ref, 0, rows);
    for (int run = 0; run < n_runs; run++) {
        Matmul o = { .n_rows = runs[run].n, .n = n, .in = in_from(dev, runs[run].first, cols) };
        for (int k = 0; k < n; k++) {
            o.w[k] = &w[k].t;
            o.out[k] = room_f("out", (size_t)runs[run].n * (size_t)w[k].t.rows);
        }
        set_threads(o.n_rows);
        op->matmul(&o);
        for (int k = 0; k < n; k++) {
            char what[32];
            snprintf(what, sizeof what, "out[%d]", k);
            check_rows(what, &e[k], fetch_f(o.out[k], (size_t)runs[run].n * (size_t)w[k].t.rows), runs[run]);
        }
        check_x_out(&ref, dev.x_out, runs[run].first, runs[run].n);
    }
    sweep();
}

static void test_matmul(void) {
    // Real widths, one matrix; odd ones for floats.
    static const struct { int rows, cols; } shapes[] = { { 64, 2816 }, { 33, 1536 }, { 200, 704 }, { 7, 2112 },
                                                         { 1, 256 },
                                                         { 300, 512 }, { 40, 4352 }, { 5, 4128 },
                                                         { 33, 77 }, { 7, 1000 }, { 64, 1 }, { 1, 2817 },
                                                         { 9, 10752 }, { 9, 4304 } };
    for (int t = 0; t < N_TYPES; t++)
        for (int k = 0; k < (int)(sizeof shapes / sizeof *shapes); k++) {
            static const int ins[] = { IN_X, IN_X | IN_W_PRE, IN_X | IN_DELTA | IN_W_POST | IN_W_PRE | IN_X_OUT };
            const int cols = shapes[k].cols, bits = ins[k % 3];
            if (cols % block_elems(all_types[t])) continue;
            if (!CASE("matmul", "%s (%d, %d), In 0x%x", type_name(all_types[t]), shapes[k].rows, cols, bits)) continue;
            Matrix w = (k % 2 ? scaled_matrix : matrix)(all_types[t], 1, shapes[k].rows, cols);
            const In in = random_in(100, cols, bits);
            matmul_case(1, &w, &in, 100, runs_100, n_runs_100);
        }

    // Every combination of In, 1 to 6 matrices of mixed types.
    for (int bits = 0; bits < IN_ALL; bits++) {
        Matrix w[MAX_PRODUCTS];
        const int n = 1 + bits % MAX_PRODUCTS, cols = 512;
        if (!CASE("matmul", "n %d of types %s .., In 0x%x", n, type_name(all_types[bits % N_TYPES]), bits)) continue;
        for (int k = 0; k < n; k++) w[k] = matrix(all_types[(bits + 3 * k) % N_TYPES], 1, k ? 1 + 2 * k : 8, cols);
        const In in = random_in(7, cols, bits);
        matmul_case(n, w, &in, 7, runs_7, N_RUNS_7);
    }

    // An Act from a producer.
    for (int t = 0; t < N_TYPES; t++)
        for (int form = 0; form < 2; form++) {
            const bool q = takes_int8(all_types[t]), both = form == 1;
            const int cols = t % 2 || block_elems(all_types[t]) == 256 ? 1536 : 2112;
            if (!CASE("matmul", "%s (40, %d), Act in %s", type_name(all_types[t]), cols,
                      both ? "both forms" : q ? "int8" : "f32")) continue;
            Matrix w = matrix(all_types[t], 1, 40, cols);
            const In in = { .act = random_act(100, cols, !q || both, q || both), .scale = 1 };
            matmul_case(1, &w, &in, 100, runs_100, n_runs_100);
        }
    for (int t = 0; t < N_TYPES; t++) {                // a NaN or an infinity affects its row, and no other
        const int cols = 512, rows = 5;
        if (!CASE("matmul", "%s, NaN and Inf in rows 1 and 3", type_name(all_types[t]))) continue;
        Matrix w = matrix(all_types[t], 1, 9, cols);
        const In in = { .x = floats(rows * cols, 1, 0), .scale = 1 };
        at_row(in.x, 1, cols)[77] = NAN;
        at_row(in.x, 3, cols)[300] = -INFINITY;
        float *out = room_f("out", 9 * 5);
        op->matmul(&(Matmul){ .n_rows = rows, .n = 1, .in = put_in(&in, rows, cols), .w = { &w.t }, .out = { out } });
        const float *got = fetch_f(out, 9 * 5);
        int wrong = 0;
        for (int i = 0; i < rows * 9; i++) wrong += isfinite(got[i]) != (i / 9 % 2 == 0);
        CHECK(!wrong, "%s: out: got %d values that are finite where they should not be, or the reverse, want 0", now,
              wrong);
        sweep();
    }

    CASE("matmul", "rows wider than a backend may hold, mixed types");
    Matrix wide[2] = { matrix(T_Q4_K, 1, 5, 6400), matrix(T_F16, 1, 3, 6400) };
    const In wide_in = random_in(7, 6400, IN_X | IN_DELTA | IN_W_POST | IN_W_PRE | IN_X_OUT);
    matmul_case(2, wide, &wide_in, 7, runs_7, N_RUNS_7);

    CASE("matmul", "more rows than a backend may work on at once");
    Matrix many[2] = { matrix(T_Q8_0, 1, 9001, 32), matrix(T_BF16, 1, 2003, 32) };
    const In many_in = random_in(7, 32, IN_X | IN_W_PRE | IN_X_OUT);
    matmul_case(2, many, &many_in, 7, runs_7, N_RUNS_7);

    CASE("matmul", "Act in both forms, mixed types");
    Matrix w[4] = { matrix(T_Q8_0, 1, 33, 256), matrix(T_F16, 1, 7, 256), matrix(T_Q6_K, 1, 64, 256),
                    matrix(T_F32, 1, 1, 256) };
    const In in = { .act = random_act(7, 256, true, true), .scale = 1 };
    matmul_case(4, w, &in, 7, runs_7, N_RUNS_7);
}

typedef struct {                        // a router together with other work
    Route  o;                           // its outputs have `rows` rows
    Matrix w;
    Input  ref;
    float *expert_scale;
} Router;

// Two equal rows in the matrix make ties; row 3 of x is zero.
static Router router(DType type, int n_experts, int cols, int n_used, bool scale, const In *in, const float *w_pre,
                     In dev, int rows) {
    Router t = { .w = random_matrix(type, 1, n_experts, cols) };
    const size_t row_bytes = (size_t)cols / (size_t)block_elems(type) * (size_t)block_bytes(type);
    for (int i = 3; i + 2 < n_experts; i += 5)
        memcpy((char *)(uintptr_t)t.w.host.data + (size_t)(i + 2) * row_bytes,
               (const char *)t.w.host.data + (size_t)i * row_bytes, row_bytes);
    place(&t.w);
    In own = *in;
    own.w_pre = w_pre;
    own.x_out = NULL;
    t.ref = ref_in(&own, rows, cols);
    if (scale) t.expert_scale = floats(n_experts, 0.9, 1);
    t.o = (Route){ .n_used = n_used, .in = dev, .expert_scale = put_f("expert_scale", t.expert_scale, n_experts) };
    t.o.in.w_pre = put_f("router w_pre", w_pre, cols);
    t.o.in.x_out = NULL;
    return t;
}

static void route_room(Router *t, Run run) {
    t->o.w = &t->w.t;
    t->o.n_rows = run.n;
    t->o.logits = room_f("logits", (size_t)run.n * (size_t)t->w.t.rows);
    t->o.ids = room("ids", (size_t)run.n * (size_t)t->o.n_used, sizeof(int32_t));
    t->o.weights = room_f("weights", (size_t)run.n * (size_t)t->o.n_used);
}

// Compares logits with the reference, and the chosen experts with the operation's own logits.
static void check_route(Router *t, Run run) {
    const int n = t->w.t.rows, used = t->o.n_used;
    const float *logits = fetch_f(t->o.logits, (size_t)run.n * (size_t)n);
    const int32_t *ids = fetch(t->o.ids, (size_t)run.n * (size_t)used, sizeof(int32_t));
    const float *weights = fetch_f(t->o.weights, (size_t)run.n * (size_t)used);
    const Expect e = product(&t->w, 0, &t->ref, run.first, run.n), ew = expect(run.n, used);
    int32_t *want = keep((size_t)run.n * (size_t)used, sizeof *want);
    const Route choice = { .n_used = used, .w = &t->w.host, .expert_scale = t->expert_scale,
                           .logits = (float *)(uintptr_t)logits, .ids = want, .weights = ew.want };
    for (int r = 0; r < run.n; r++) ref_choose_experts(&choice, r);
    for (int i = 0; i < run.n * used; i++)
        ew.bound[i] = (float)TOL_NORM * (t->expert_scale ? fabsf(t->expert_scale[want[i]]) : 1);
    compare("logits", logits, n, e.want, e.bound, run.n, n);
    same_ints("ids", ids, want, run.n * used);
    compare("weights", weights, used, ew.want, ew.bound, run.n, used);
}

static void test_route(void) {
    static const struct { DType type; int n, cols, used; bool scale; } cases[] = {
        { T_F32, 128, 2816, 8, true }, { T_F32, 128, 704, 8, false }, { T_F16, 16, 1536, 16, true },
        { T_BF16, 33, 77, 1, false },
        { T_F32, 7, 33, 7, true }, { T_Q8_0, 32, 2112, 4, true }, { T_F32, 1, 64, 1, true }, { T_F32, 300, 33, 32, true }
    };
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        const int cols = cases[k].cols, rows = 100;
        if (!CASE("route", "%s, %d of %d experts, cols %d, expert_scale %d", type_name(cases[k].type), cases[k].used,
                  cases[k].n, cols, cases[k].scale)) continue;
        In in = random_in(rows, cols, IN_X);
        memset(at_row(in.x, 3, cols), 0, (size_t)cols * sizeof(float));
        const In dev = put_in(&in, rows, cols);
        Router t = router(cases[k].type, cases[k].n, cols, cases[k].used, cases[k].scale, &in, floats(cols, 0.5, 1),
                          dev, rows);
        for (int run = 0; run < n_runs_100; run++) {
            Router part = t;
            part.o.in = in_from(t.o.in, runs_100[run].first, cols);
            route_room(&part, runs_100[run]);
            set_threads(runs_100[run].n);
            op->route(&part.o);
            check_route(&part, runs_100[run]);
        }
        sweep();
    }
}

// (rows, used) different experts per row
static int32_t *random_ids(int rows, int used, int n) {
    int32_t *ids = keep((size_t)rows * (size_t)used, sizeof *ids);
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < used; j++) {
            bool again = true;
            while (again) {
                again = false;
                ids[r * used + j] = (int32_t)rnd((uint32_t)n);
                for (int k = 0; k < j; k++) again |= ids[r * used + k] == ids[r * used + j];
            }
        }
    return ids;
}

// The expected result of expert_gate_up for n rows; up NULL: fused.
static Expect expect_gate_up(const Matrix *gate, const Matrix *up, ActFn fn, const int32_t *ids, const Input *ref,
                             int n, int used) {
    const int dim = up ? gate->host.rows : gate->host.rows / 2;
    Expect e = expect(n, used * dim);
    reference_ops()->expert_gate_up(&(ExpertGateUp){ .n_rows = n, .n_used = used, .in = ref->in, .gate = &gate->host,
                                                     .up = up ? &up->host
                                                         : NULL, .fn = fn, .ids = ids, .out.f = e.want });
    for (int j = 0; j < n * used; j++) {
        const Expect g = product(gate, ids[j], ref, j / used, 1);
        const Expect u = up ? product(up, ids[j], ref, j / used, 1) : g;
        const int behind = up ? 0 : dim;
        for (int i = 0; i < dim; i++)
            e.bound[j * dim + i] = gated_bound(fn, g.want[i], g.bound[i], u.want[behind + i], u.bound[behind + i]);
    }
    return e;
}

// With a router there are experts too: of the type of gate, two of four for each row.
static void test_gate_up(void) {
    static const struct { DType gate, up; int rows, cols; ActFn fn; bool route; } cases[] = {
        { T_Q8_0, T_Q8_0, 64, 2816, ACT_GELU, true }, { T_Q4_0, T_Q4_0, 64, 1536, ACT_GELU, false },
        { T_Q5_0, T_Q5_0, 704, 256, ACT_SILU, false },
        { T_Q4_K, T_Q4_K, 64, 1536, ACT_GELU, false }, { T_Q4_K, T_Q6_K, 32, 2816, ACT_SILU, false },
        { T_Q6_K, T_Q6_K, 2112, 256, ACT_GELU, false },
        { T_F16, T_F16, 32, 2816, ACT_GELU, true }, { T_BF16, T_BF16, 33, 1000, ACT_SILU, false },
        { T_F32, T_F32, 7, 77, ACT_GELU, true },
        { T_F16, T_Q8_0, 64, 704, ACT_GELU, false }, { T_Q8_0, T_Q4_0, 8480, 32, ACT_GELU, true },
        { T_Q8_0, T_BF16, 1, 64, ACT_SILU, true }, { T_F16, T_F16, 4304, 48, ACT_GELU, false },
        { T_Q8_0, T_Q8_0, 4304, 96, ACT_GELU, false }
    };
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        const int cols = cases[k].cols, n = cases[k].rows, rows = 100;
        if (!CASE("gate_up", "%s, %s (%d, %d), %s, route %d", type_name(cases[k].gate), type_name(cases[k].up), n, cols,
             cases[k].fn == ACT_GELU ? "GELU" : "SiLU", cases[k].route)) continue;
        Matrix gate = (k % 2 ? scaled_matrix : matrix)(cases[k].gate, 1, n, cols), up = matrix(cases[k].up, 1, n, cols);
        const In in = random_in(rows, cols, IN_X | IN_DELTA | IN_W_POST | IN_W_PRE | IN_X_OUT);
        const Input ref = ref_in(&in, rows, cols);
        const In dev = put_in(&in, rows, cols);
        Expect e = expect(rows, n);
        const Expect g = product(&gate, 0, &ref, 0, rows), u = product(&up, 0, &ref, 0, rows);
        reference_ops()->gate_up(&(GateUp){ .n_rows = rows, .in = ref.in, .gate = &gate.host, .up = &up.host,
                                            .fn = cases[k].fn, .out.f = e.want });
        for (int i = 0; i < rows * n; i++)
            e.bound[i] = gated_bound(cases[k].fn, g.want[i], g.bound[i], u.want[i], u.bound[i]);
        Router t = { 0 };
        if (cases[k].route) t = router(T_F32, 16, cols, 4, true, &in, floats(cols, 0.5, 1), dev, rows);
        const int used = 2, dim = 32;
        const int32_t *ids = random_ids(rows, used, 4),
            *dev_ids = put("ids", ids, (size_t)(rows * used), sizeof(int32_t));
        Matrix expert = matrix(cases[k].gate, 4, 2 * dim, cols);
        In expert_in = in;
        expert_in.w_pre = floats(cols, 0.5, 1);
        expert_in.x_out = NULL;
        const Input expert_ref = ref_in(&expert_in, rows, cols);
        Expect e_experts = expect_gate_up(&expert, NULL, cases[k].fn, ids, &expert_ref, rows, used);
        const In expert_dev = { .x = dev.x_out, .scale = 1, .w_pre = put_f("experts w_pre", expert_in.w_pre,
                                                                           cols), .eps = in.eps };
        for (int run = 0; run < n_runs_100; run++) {
            Router part = t;
            part.o.in = in_from(t.o.in, runs_100[run].first, cols);
            if (cases[k].route) route_room(&part, runs_100[run]);
            const Act out = act_room(runs_100[run].n, n, run), experts_out = act_room(runs_100[run].n, used * dim, run);
            const ExpertGateUp experts = { .n_rows = runs_100[run].n, .n_used = used,
                                           .in = in_from(expert_dev, runs_100[run].first, cols), .gate = &expert.t,
                                           .fn = cases[k].fn, .ids = dev_ids +
                                               runs_100[run].first * used, .out = experts_out };
            set_threads(runs_100[run].n);
            op->gate_up(&(GateUp){ .n_rows = runs_100[run].n, .in = in_from(dev, runs_100[run].first, cols),
                                   .gate = &gate.t, .up = &up.t,
                                   .fn = cases[k].fn, .out = out, .route = cases[k].route ? &part.o : NULL,
                                   .experts = cases[k].route ? &experts : NULL });
            check_act(&e, out, runs_100[run]);
            if (cases[k].route) check_act(&e_experts, experts_out, runs_100[run]);
            check_x_out(&ref, dev.x_out, runs_100[run].first, runs_100[run].n);
            if (cases[k].route) check_route(&part, runs_100[run]);
        }
        sweep();
    }
}

static Expect expect_down(const Matrix *down, const int32_t *ids, const float *weights, Act in, const Input *ref, int n,
                          int used) {
    const int out = down->host.rows;
    Expect e = expect(n, out);
    reference_ops()->expert_down(&(ExpertDown){ .n_rows = n, .n_used = used, .in = in, .down = &down->host, .ids = ids,
                                                .weights = weights, .out = e.want });
    for (int j = 0; j < n * used; j++) {
        const Expect y = product(down, ids[j], ref, j, 1);
        const float size = fabsf(weights[j]);
        for (int i = 0; i < out; i++)
            e.bound[j / used * out + i] += size * (y.bound[i] + (float)TOL_FACTOR * fabsf(y.want[i]));
    }
    return e;
}

// A prompt where every row chose expert 0 and no row expert 1. All types, one to eight experts per row, numbers of rows
// and features that do not fill tiles.
typedef struct { int rows, n, used, cols, out; const int32_t *ids, *dev_ids; } ExpertPrompt;

static ExpertPrompt expert_prompt(int k, DType type) {
    static const int rows[] = { 65, 150, 300 }, features[] = { 32, 96, 160 };
    ExpertPrompt p = { .rows = rows[k % 3], .n = 10, .used = 1 + k % 8, .out = features[k / 2 % 3] };
    p.cols = block_elems(type) == 256 ? 256 + k % 2 * 512 : 64 + k % 2 * 640;
    int32_t *ids = random_ids(p.rows, p.used, p.n - 2);
    for (int i = 0; i < p.rows * p.used; i++) ids[i] += 2;
    for (int r = 0; r < p.rows; r++) ids[r * p.used + r % p.used] = 0;
    p.ids = ids;
    p.dev_ids = put("ids", ids, (size_t)(p.rows * p.used), sizeof(int32_t));
    return p;
}

static void expert_gate_up_prompt(int k, DType type) {
    const ExpertPrompt p = expert_prompt(k, type);
    const bool fused = k % 4 != 3;
    if (!CASE("expert_gate_up", "%s %s, %d rows, %d of %d experts, (%d, %d)", fused ? "fused" : "split",
              type_name(type), p.rows, p.used, p.n, p.out, p.cols)) return;
    Matrix gate = (k % 3 ? matrix : scaled_matrix)(type, p.n, fused ? 2 * p.out : p.out, p.cols), up = { 0 };
    if (!fused) up = scaled_matrix(type, p.n, p.out, p.cols);
    const In in = k % 5 ? random_in(p.rows, p.cols, IN_X | IN_W_PRE) :
                          (In){ .act = random_act(p.rows, p.cols, !takes_int8(type), takes_int8(type)), .scale = 1 };
    const Input ref = ref_in(&in, p.rows, p.cols);
    const In dev = put_in(&in, p.rows, p.cols);
    const ActFn fn = k % 2 ? ACT_SILU : ACT_GELU;
    Expect e = expect_gate_up(&gate, fused ? NULL : &up, fn, p.ids, &ref, p.rows, p.used);
    const Run runs[] = { { 0, p.rows }, { p.rows - 65, 65 } };
    for (int run = 0; run < 2; run++) {
        const Act out = act_room(runs[run].n, p.used * p.out, run);
        op->expert_gate_up(&(ExpertGateUp){ .n_rows = runs[run].n, .n_used = p.used, .in = in_from(dev, runs[run].first,
                p.cols), .gate = &gate.t, .up = fused ? NULL : &up.t, .fn = fn,
                                            .ids = p.dev_ids + runs[run].first * p.used, .out = out });
        check_act(&e, out, runs[run]);
    }
    sweep();
}

static void expert_down_prompt(int k, DType type) {
    const ExpertPrompt p = expert_prompt(k, type);
    if (!CASE("expert_down", "%s, %d rows, %d of %d experts, (%d, %d)", type_name(type), p.rows, p.used, p.n, p.out,
              p.cols)) return;
    Matrix down = (k % 3 ? matrix : scaled_matrix)(type, p.n, p.out, p.cols);
    const In in = { .act = random_act(p.rows * p.used, p.cols, !takes_int8(type), takes_int8(type)), .scale = 1 };
    const Input ref = ref_in(&in, p.rows * p.used, p.cols);
    const In dev = put_in(&in, p.rows * p.used, p.cols);
    const float *weights = floats(p.rows * p.used, 0.5, 0.5), *dev_weights = put_f("weights", weights, p.rows * p.used);
    Expect e = expect_down(&down, p.ids, weights, in.act, &ref, p.rows, p.used);
    const Run runs[] = { { 0, p.rows }, { p.rows - 65, 65 } };
    for (int run = 0; run < 2; run++) {
        const int at = runs[run].first * p.used;
        float *y = room_f("out", runs[run].n * p.out);
        op->expert_down(&(ExpertDown){ .n_rows = runs[run].n, .n_used = p.used, .in = in_from(dev, at, p.cols).act,
                                       .down = &down.t, .ids = p.dev_ids + at, .weights = dev_weights + at, .out = y });
        check_rows("out", &e, fetch_f(y, runs[run].n * p.out), runs[run]);
    }
    sweep();
}

static void test_expert_gate_up(void) {
    static const struct { DType gate, up; int n, used, dim, cols; bool fused, beside, scaled; ActFn fn; } cases[] = {
        { T_Q4_K, T_Q4_K, 8, 4, 32, 2816, true, true, false, ACT_GELU },
        { T_Q4_0, T_Q4_0, 8, 8, 32, 704, true, false, true, ACT_GELU },
        { T_Q8_0, T_Q8_0, 4, 1, 64, 704, false, true, true, ACT_SILU },
        { T_Q5_0, T_Q5_0, 4, 2, 704, 64, true, true, false, ACT_GELU },
        { T_Q6_K, T_Q4_K, 4, 2, 96, 256, false, false, false, ACT_GELU },
        { T_Q6_K, T_Q6_K, 4, 2, 96, 256, true, false, true, ACT_GELU },
        { T_F16, T_F16, 4, 2, 33, 77, true, true, false, ACT_GELU },
        { T_BF16, T_F32, 4, 3, 7, 100, false, false, true, ACT_SILU },
        { T_F32, T_F32, 3, 3, 1, 33, true, false, false, ACT_GELU },
        { T_BF16, T_BF16, 4, 2, 64, 256, true, false, false, ACT_GELU }
    };
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        const int cols = cases[k].cols, dim = cases[k].dim, used = cases[k].used, n = cases[k].n, rows = 100;
        if (!CASE("expert_gate_up", "%s %s, %d of %d experts, (%d, %d), beside %d, scale %d",
                  cases[k].fused ? "fused" : "split", type_name(cases[k].gate),
             used, n, dim, cols, cases[k].beside, cases[k].scaled)) continue;
        Matrix gate = random_matrix(cases[k].gate, n, cases[k].fused ? 2 * dim : dim, cols), up = { 0 },
               dense = matrix(T_Q8_0, 1, 20, 96);
        if (cases[k].scaled) gate.factor = floats(n, 0.5, 1);
        place(&gate);
        if (!cases[k].fused) up = (cases[k].scaled ? scaled_matrix : matrix)(cases[k].up, n, dim, cols);
        const int32_t *ids = random_ids(rows, used, n),
            *dev_ids = put("ids", ids, (size_t)(rows * used), sizeof(int32_t));
        const In in = random_in(rows, cols, IN_X | IN_DELTA | IN_W_POST | IN_W_PRE);
        const Input ref = ref_in(&in, rows, cols);
        const In dev = put_in(&in, rows, cols);
        const In dense_in = { .act = random_act(rows, 96, false, true), .scale = 1 },
        dense_dev = put_in(&dense_in, rows, 96);
        const Input dense_ref = ref_in(&dense_in, rows, 96);
        Expect e = expect_gate_up(&gate, cases[k].fused ? NULL : &up, cases[k].fn, ids, &ref, rows, used);
        Expect e_dense = product(&dense, 0, &dense_ref, 0, rows);
        for (int run = 0; run < n_runs_100; run++) {
            const Run part = runs_100[run];
            const Matmul beside = { .n_rows = part.n, .n = 1, .in = in_from(dense_dev, part.first,
                    96), .w = { &dense.t }, .out = { room_f("beside", (size_t)part.n * 20) } };
            const Act out = act_room(part.n, used * dim, dim % 32 ? 1 : run);
            set_threads(part.n);
            op->expert_gate_up(&(ExpertGateUp){ .n_rows = part.n, .n_used = used, .in = in_from(dev, part.first, cols),
                                                .gate = &gate.t,
                                                .up = cases[k].fused ? NULL : &up.t, .fn = cases[k].fn,
                                                .ids = dev_ids + part.first * used, .out = out,
                                                .dense_down = cases[k].beside ? &beside : NULL });
            check_act(&e, out, part);
            if (cases[k].beside) check_rows("beside", &e_dense, fetch_f(beside.out[0], (size_t)part.n * 20), part);
        }
        sweep();
    }
    for (int k = 0; k < N_TYPES; k++) expert_gate_up_prompt(k, all_types[k]);
}

static void test_expert_down(void) {
    static const int dims[] = { 704, 704, 64, 512, 96, 77, 33, 256 };
    for (int t = 0; t < N_TYPES; t++)
        for (int k = 0; k < 8; k++) {
            const int dim = dims[k], n = 6, used = k == 0 ? 1 : k == 1 ? 6 : 3, out = k == 3 ? 100 : k == 4 ? 1 : 33,
                      rows = k < 2 ? 100 : 64;
            const DType type = all_types[t];
            if (dim % block_elems(type)) continue;
            if (!CASE("expert_down", "%s, %d of %d experts, (%d, %d)", type_name(type), used, n, out, dim)) continue;
            Matrix down = (k % 2 ? scaled_matrix : matrix)(type, n, out, dim);
            const In in = { .act = random_act(rows * used, dim, !takes_int8(type), takes_int8(type)), .scale = 1 };
            const Input ref = ref_in(&in, rows * used, dim);
            const In dev = put_in(&in, rows * used, dim);
            int32_t *ids = random_ids(rows, used, n);
            if (k == 2)                                // the result of a router with NaN: the same expert repeated
                for (int i = 0; i < rows / 2 * used; i++) ids[i] = 1;
            const int32_t *dev_ids = put("ids", ids, (size_t)(rows * used), sizeof(int32_t));
            const float *weights = floats(rows * used, 0.5, 0.5);
            const float *dev_weights = put_f("weights", weights, rows * used);
            Expect e = expect_down(&down, ids, weights, in.act, &ref, rows, used);
            for (int run = 0; run < n_runs_100; run++) {
                const Run part = runs_100[run];
                if (part.first + part.n > rows) continue;
                float *y = room_f("out", part.n * out);
                set_threads(part.n);
                op->expert_down(&(ExpertDown){ .n_rows = part.n, .n_used = used,
                                               .in = in_from(dev, part.first * used, dim).act, .down = &down.t,
                                               .ids = dev_ids + part.first * used, .weights = dev_weights +
                                                   part.first * used, .out = y });
                check_rows("out", &e, fetch_f(y, part.n * out), part);
            }
            sweep();
        }
    for (int k = 0; k < N_TYPES; k++) expert_down_prompt(k, all_types[k]);
}

static void test_ple_inject(void) {
    for (int t = 0; t < N_TYPES; t++)
        for (int k = 0; k < 3; k++) {
            const DType type = all_types[t];
            const int n = k == 0 ? 256 : k == 1 ? 32 : 33, cols = k == 0 ? 512 : k == 1 ? 1536 : 77;
            const int rows = k == 0 ? 64 : 100, stride = k == 1 ? n : 3 * n + 1;
            if (cols % block_elems(type)) continue;
            if (!CASE("ple_inject", "%s (%d, %d), u_stride %d", type_name(type), n, cols, stride)) continue;
            Matrix w = matrix(type, 1, n, cols);
            const In in = random_in(rows, cols, k == 0 ? IN_X | IN_DELTA | IN_W_POST | IN_X_OUT : IN_X);
            const Input ref = ref_in(&in, rows, cols);
            const In dev = put_in(&in, rows, cols);
            const float *u = floats(rows * stride, 1, 0), *dev_u = put_f("u", u, rows * stride);
            Expect e = expect(rows, n);
            const Expect g = product(&w, 0, &ref, 0, rows);
            reference_ops()->ple_inject(&(PleInject){ .n_rows = rows, .in = ref.in, .w = &w.host, .u = u,
                                                      .u_stride = stride, .out.f = e.want });
            for (int i = 0; i < rows * n; i++)
                e.bound[i] = gated_bound(ACT_GELU, g.want[i], g.bound[i], u[i / n * stride + i % n], 0);
            for (int run = 0; run < n_runs_100; run++) {
                const Run part = runs_100[run];
                if (part.first + part.n > rows) continue;
                const Act out = act_room(part.n, n, run);
                set_threads(part.n);
                op->ple_inject(&(PleInject){ .n_rows = part.n, .in = in_from(dev, part.first, cols), .w = &w.t,
                                             .u = dev_u + part.first * stride,
                                             .u_stride = stride, .out = out });
                check_act(&e, out, part);
                check_x_out(&ref, dev.x_out, part.first, part.n);
            }
            sweep();
        }
}

static void close_case(int rows, int cols, int bits, bool with_out, const Run *runs, int n_runs) {
    if (!CASE("close", "cols %d, In 0x%x, out %d", cols, bits, with_out)) return;
    const In in = random_in(rows, cols, bits);
    const Input ref = ref_in(&in, rows, cols);
    const In dev = put_in(&in, rows, cols);
    Expect e = { .cols = cols, .want = ref.y, .bound = ref.y_bound };
    for (int run = 0; run < n_runs; run++) {
        float *out = with_out ? room_f("out", (size_t)runs[run].n * (size_t)cols) : NULL;
        op->close(&(Close){ .n_rows = runs[run].n, .cols = cols, .in = in_from(dev, runs[run].first,
                cols), .out = out });
        if (out) check_rows("out", &e, fetch_f(out, (size_t)runs[run].n * (size_t)cols), runs[run]);
        check_x_out(&ref, dev.x_out, runs[run].first, runs[run].n);
    }
    sweep();
}

static void test_close(void) {
    static const int widths[] = { 2816, 1536, 704, 2112, 1000, 33, 1 };
    for (int bits = 0; bits < IN_ALL; bits++) close_case(7, 100, bits, true, runs_7, N_RUNS_7);
    for (int k = 0; k < 4; k++) {                      // row sizes up to a backend's limit, and larger ones
        static const int wide[] = { 6144, 6145, 6148, 10752 };
        close_case(7, wide[k], IN_ALL - 1, true, runs_7, N_RUNS_7);
    }
    for (int k = 0; k < 7; k++) {
        close_case(100, widths[k], IN_ALL - 1, true, runs_100, n_runs_100);
        close_case(100, widths[k], IN_X | IN_DELTA | IN_W_POST | IN_SCALE | IN_X_OUT, false, runs_100, n_runs_100);
    }
}

static void test_gather_rows(void) {
    static const int widths[] = { 2816, 1536, 33, 7, 1 };
    for (int k = 0; k < 10; k++) {
        const int cols = widths[k % 5], src_stride = cols + k % 3 * 5, dst_stride = cols + (k + 1) % 3 * 4;
        const int n_src = 70, rows = k % 4 == 0 ? 64 : k % 4 == 1 ? 1 : 33;
        const bool indexed = k % 2 == 0;
        if (!CASE("gather_rows", "%d rows, cols %d, strides %d %d, index %d", rows, cols, src_stride, dst_stride,
                  indexed)) continue;
        int32_t index[64];
        for (int i = 0; i < rows; i++) index[i] = indexed ? (int32_t)rnd((uint32_t)n_src) : i;
        const float *src = floats(n_src * src_stride, 1, 0);
        float *dst = room_f("dst", rows * dst_stride), *want = keep(rows * dst_stride, sizeof *want);
        memset(want, 0xff, (size_t)(rows * dst_stride) * sizeof *want);    // nothing is written between the rows
        GatherRows o = { .n_rows = rows, .cols = cols, .src = src, .index = indexed ? index : NULL, .dst = want,
                         .src_stride = src_stride, .dst_stride = dst_stride };
        reference_ops()->gather_rows(&o);
        o.src = put_f("src", src, n_src * src_stride);
        o.index = indexed ? put("index", index, (size_t)rows, sizeof(int32_t)) : NULL;
        o.dst = dst;
        op->gather_rows(&o);
        same_bits("dst", fetch_f(dst, rows * dst_stride), want, (size_t)(rows * dst_stride), sizeof(float));
        sweep();
    }
}

// ---- cache ----------------------------------------------------------------------------------------------------------

typedef struct {
    Cache  c;                           // in backend memory, after put
    Cache  host;                        // the reference's
    float *fold;
} TestCache;

static size_t plane_rows(const Cache *c) { return (size_t)(c->n_seqs * c->n_kv_heads * c->slots); }
static size_t value_bytes(KvType t) { return kv_group(t) ? 1 : kv_row_bytes(t, 1); }
static KvPlane *plane_of(Cache *c, int p) { return p ? &c->v : &c->k; }
enum { N_KV = 7 };
static const KvType kv_types[N_KV] = { KV_F32, KV_F16, KV_BF16, KV_Q8_0, KV_Q4_0, KV_TQ4, KV_TQ3 };

// All rows equal: for slots that no row may see. Large, so that reading them is noticed.
static void spoil_plane(Cache *c, int p) {
    KvPlane *plane = plane_of(c, p);
    float v[REF_HEAD_DIM];
    for (int i = 0; i < plane->dim; i++) v[i] = p ? 1000 : i % 3 ? -8 : 8;
    plane->data = keep(plane_rows(c), kv_row_bytes(plane->type, plane->dim));
    if (kv_group(plane->type)) plane->scale = keep(plane_rows(c), kv_scale_bytes(plane->type, plane->dim));
    for (int r = 0; r < (int)plane_rows(c); r++)
        ref_kv_write(c, plane, ref_kv_row(c, plane, 0, 0, r), v);
}

// If the head size does not fit a quantised type, rows are f16.
static TestCache new_cache(KvType type, int n_seqs, int n_kv_heads, int head_dim, int slots, int n_rot) {
    TestCache t = { .host = { .n_seqs = n_seqs, .n_kv_heads = n_kv_heads, .head_dim = head_dim, .slots = slots,
                              .n_rot = n_rot } };
    if (kv_group(type) && (head_dim % KV_ROTATION || 2 * n_rot % KV_ROTATION)) type = KV_F16;
    t.host.k = (KvPlane){ .type = type, .dim = n_rot ? 2 * n_rot : head_dim };
    t.host.v = (KvPlane){ .type = type, .dim = head_dim };
    for (int p = 0; p < 2; p++) spoil_plane(&t.host, p);
    if (n_rot) t.host.fold = t.fold = floats(head_dim, 0.5, 1);
    return t;
}

// Adds a tail whose rows differ from k and v, so that reading the wrong one is noticed.
static void add_tail(TestCache *t, int slots, int reach) {
    Cache tail = t->host;
    tail.slots = slots;
    for (int p = 0; p < 2; p++) {
        plane_of(&tail, p)->type = KV_F16;
        plane_of(&tail, p)->scale = NULL;
        spoil_plane(&tail, p);
    }
    t->host.k_tail = tail.k;
    t->host.v_tail = tail.v;
    t->host.tail_slots = slots;
    t->host.tail_reach = reach;
}

static void random_row(Cache *c, int seq, int slot) {
    for (int g = 0; g < c->n_kv_heads; g++)
        for (int p = 0; p < 2; p++) {
            float v[REF_HEAD_DIM];
            for (int i = 0; i < plane_of(c, p)->dim; i++) v[i] = uniform();
            ref_kv_write(c, plane_of(c, p), ref_kv_row(c, plane_of(c, p), seq, g, slot), v);
        }
}

static void fill_cache(TestCache *t) {
    Cache tail = ref_tail(&t->host);
    for (int seq = 0; seq < t->host.n_seqs; seq++) {
        for (int slot = 0; slot < t->host.slots; slot++) random_row(&t->host, seq, slot);
        for (int slot = 0; slot < tail.slots; slot++) random_row(&tail, seq, slot);
    }
}

static KvPlane put_plane(const char *name, const Cache *c, const KvPlane *p, bool fixed) {
    KvPlane there = *p;
    there.data = buffer(name, p->data, plane_rows(c) * kv_row_bytes(p->type, p->dim), fixed);
    if (p->scale) there.scale = buffer(name, p->scale, plane_rows(c) * kv_scale_bytes(p->type, p->dim), fixed);
    return there;
}

static void put_cache(TestCache *t, bool fixed) {
    const Cache tail = ref_tail(&t->host);
    t->c = t->host;
    t->c.k = put_plane("cache.k", &t->host, &t->host.k, fixed);
    t->c.v = put_plane("cache.v", &t->host, &t->host.v, fixed);
    t->c.fold = put_f("cache.fold", t->fold, (size_t)t->host.head_dim);
    if (!tail.slots) return;
    t->c.k_tail = put_plane("cache.k_tail", &tail, &tail.k, fixed);
    t->c.v_tail = put_plane("cache.v_tail", &tail, &tail.v, fixed);
}

// Copies a plane of the backend to the host.
static KvPlane fetch_plane(const Cache *c, const KvPlane *p) {
    KvPlane here = *p;
    here.data = (void *)fetch(p->data, plane_rows(c) * kv_row_bytes(p->type, p->dim), 1);
    if (p->scale) here.scale = (void *)fetch(p->scale, plane_rows(c) * kv_scale_bytes(p->type, p->dim), 1);
    return here;
}

// Compares the backend's planes with the reference's, or with those of another cache of the backend, bit by bit.
static void same_planes(Cache a, Cache b, bool b_is_host, const char *name) {
    char what[96];
    for (int p = 0; p < 2 * (1 + (a.tail_slots > 0)); p++) {
        if (p == 2) {
            a = ref_tail(&a);
            b = ref_tail(&b);
        }
        const KvPlane got = fetch_plane(&a, plane_of(&a, p % 2)), *other = plane_of(&b, p % 2);
        const KvPlane want = b_is_host ? *other : fetch_plane(&b, other);
        const size_t rows = plane_rows(&a), bytes = rows * kv_row_bytes(got.type, got.dim),
            size = value_bytes(got.type);
        snprintf(what, sizeof what, "%s, %s plane%s", name, p % 2 ? "v" : "k", p > 1 ? " of the tail" : "");
        same_bits(what, got.data, want.data, bytes / size, size);
        if (got.scale) same_bits(what, got.scale, want.scale, rows * kv_scale_bytes(got.type, got.dim) / 2, 2);
    }
}
static void check_planes(const TestCache *t, const char *name) { same_planes(t->c, t->host, true, name); }

// The same if both have rounded their own values: a difference of one unit in the last place, or of one code.
static void compare_planes(TestCache *t) {
    static const float units[N_KV] = { 0, 0x1p-10f, 0x1p-7f, 1, 1, 7, 3 };
    for (int p = 0; p < 2; p++) {
        const KvPlane *plane = plane_of(&t->c, p), *host = plane_of(&t->host, p);
        const int rows = (int)plane_rows(&t->c), dim = plane->dim, group = kv_group(plane->type);
        const KvPlane got = fetch_plane(&t->c, plane);
        float *values = keep((size_t)(rows * dim), sizeof *values);
        Expect e = expect(rows, dim);
        kv_read_rows(got.type, rows, dim, got.data, got.scale, values);
        kv_read_rows(host->type, rows, dim, host->data, host->scale, e.want);
        set_norm_bounds(&e, (size_t)(rows * dim), dim);
        for (int i = 0; i < rows * dim && plane->type != KV_F32; i++) {
            const float unit = group ? gguf_f16_to_f32(((uint16_t *)host->scale)[i / group]) : e.want[i];
            e.bound[i] += units[plane->type] * 1.02f * fabsf(unit) + (group ? 0.02f * fabsf(e.want[i]) : 0) +
                (float)TOL_TINY;
        }
        compare(p ? "v plane" : "k plane", values, (size_t)dim, e.want, e.bound, rows, dim);
    }
}

typedef struct {
    KvType type;
    int    head_dim, n_heads, n_kv_heads, slots, n_rot, n_pairs;
    bool   v_is_k, v_norm, with_q, with_k, staged, dumps;
} QkvCase;

static void qkv_case_tail(QkvCase t, int tail_slots, TestStep *s) {
    const int hd = t.head_dim, n = s->n_rows, q_dim = t.n_heads * hd, kv_dim = t.n_kv_heads * hd;
    if (!CASE("qkv_store",
              "%s, head_dim %d, heads %d/%d, slots %d, n_rot %d, pairs %d, v %s%s, q %d, k %d, stage %d, dumps %d, "
              "%d rows in %d segments at %d",
              kv_names[t.type], hd, t.n_heads, t.n_kv_heads, t.slots, t.n_rot, t.n_pairs, t.v_is_k ? "= k" : "own",
              t.v_norm ? "" : " unnormed", t.with_q, t.with_k, t.staged, t.dumps, n, s->n_segs,
              s->len[s->segs[0].seq])) return;
    TestCache ring = new_cache(t.type, 3, t.n_kv_heads, hd, t.slots, t.n_rot);
    TestCache stage = new_cache(t.type, 1, t.n_kv_heads, hd, 256, t.n_rot);
    if (tail_slots) add_tail(&ring, tail_slots, tail_slots - STEP_ROWS);
    put_cache(&ring, t.staged || !t.with_k);
    put_cache(&stage, !t.staged);
    const Batch batch = put_batch(s), host = host_batch(s);
    const float *q = floats(n * q_dim, 3, 0), *k = floats(n * kv_dim, 2, 0), *own_v = floats(n * kv_dim, 0.7, 0.1);
    const float *w_q = floats(hd, 0.5, 1), *w_k = t.n_rot ? ring.fold : floats(hd, 0.5, 1);
    double *inv_freq = keep(t.n_pairs, sizeof *inv_freq);
    for (int i = 0; i < t.n_pairs; i++) inv_freq[i] = pow(1e4, -2.0 * i / hd);
    enum { Q, Q_NORMED, Q_POS, K_NORMED, K_POS, V_NORMED, N_RESULTS };
    Expect e[N_RESULTS];
    for (int i = 0; i < N_RESULTS; i++) e[i] = expect(n, i < K_NORMED ? q_dim : kv_dim);
    memcpy(e[Q].want, q, (size_t)(n * q_dim) * sizeof *q);

    QkvStore o = { .batch = &host, .cache = &ring.host, .staging = t.staged ? &stage.host : NULL, .n_heads = t.n_heads,
                   .q = t.with_q ? e[Q].want : NULL, .k = t.with_k ? k : NULL,
                   .v = !t.with_k ? NULL : t.v_is_k ? k : own_v, .w_q = w_q, .w_k = w_k,
                   .v_norm = t.v_norm, .rope = { inv_freq, t.n_pairs }, .eps = 1e-6f, .dump_q = e[Q_NORMED].want,
                   .dump_q_pos = e[Q_POS].want, .dump_k = e[K_NORMED].want, .dump_k_pos = e[K_POS].want,
                   .dump_v = e[V_NORMED].want };
    reference_ops()->qkv_store(&o);
    for (int i = 0; i < N_RESULTS; i++) set_norm_bounds(&e[i], (size_t)(n * e[i].cols), hd);

    QkvStore d = { .batch = &batch, .cache = &ring.c, .staging = t.staged ? &stage.c : NULL, .n_heads = t.n_heads,
                   .v_norm = t.v_norm, .eps = 1e-6f,
                   .rope = { put("inv_freq", inv_freq, (size_t)t.n_pairs, sizeof(double)), t.n_pairs },
                   .w_q = put_f("w_q", w_q, hd), .w_k = put_f("w_k", w_k, hd) };
    if (t.with_q) d.q = change_f("q", q, n * q_dim);
    if (t.with_k) {
        d.k = put_f("k", k, n * kv_dim);
        d.v = t.v_is_k ? d.k : put_f("v", own_v, n * kv_dim);
    }
    if (t.dumps) {
        d.dump_q = room_f("dump_q", n * q_dim);
        d.dump_q_pos = room_f("dump_q_pos", n * q_dim);
        d.dump_k = room_f("dump_k", n * kv_dim);
        d.dump_v = room_f("dump_v", n * kv_dim);
        d.dump_k_pos = room_f("dump_k_pos", n * kv_dim);
    }
    set_threads(n);
    const int step = t.staged ? n : min_int(n, t.slots);               // rows per call
    for (int from = 0; from < n; from += step) {
        const Batch view = batch_from(batch, (Run){ from, min_int(step, n - from) });
        QkvStore part = d;
        part.batch = &view;
        part.q = at_row(d.q, from, q_dim);
        part.k = at_row(d.k, from, kv_dim);
        part.v = at_row(d.v, from, kv_dim);
        part.dump_q = at_row(d.dump_q, from, q_dim);
        part.dump_q_pos = at_row(d.dump_q_pos, from, q_dim);
        part.dump_k = at_row(d.dump_k, from, kv_dim);
        part.dump_k_pos = at_row(d.dump_k_pos, from, kv_dim);
        part.dump_v = at_row(d.dump_v, from, kv_dim);
        op->qkv_store(&part);
    }
    if (t.with_q) {
        const float *got = fetch_f(d.q, n * q_dim);
        compare("q", got, q_dim, e[Q].want, e[Q].bound, n, q_dim);
        if (n <= 64) {                  // the last row on its own, as a view and without k
            const Batch view = batch_from(batch, (Run){ n - 1, 1 });
            QkvStore last = { .batch = &view, .cache = &ring.c, .staging = d.staging, .n_heads = t.n_heads,
                              .v_norm = t.v_norm, .eps = d.eps, .rope = d.rope,
                              .w_q = d.w_q, .w_k = d.w_k, .q = change_f("last q", q + (n - 1) * q_dim, q_dim) };
            op->qkv_store(&last);
            same_bits("q of the last row alone", fetch_f(last.q, q_dim), got + (n - 1) * q_dim, (size_t)q_dim,
                      sizeof(float));
        }
    }
    const float *const dumps[] = { NULL, d.dump_q, d.dump_q_pos, d.dump_k, d.dump_k_pos, d.dump_v };
    static const char *const names[] = { "", "dump_q", "dump_q_pos", "dump_k", "dump_k_pos", "dump_v" };
    for (int i = 1; i < N_RESULTS; i++)
        if (t.dumps && (i < K_NORMED ? t.with_q : t.with_k))
            compare(names[i], fetch_f(dumps[i], n * e[i].cols), e[i].cols, e[i].want, e[i].bound, n, e[i].cols);
    compare_planes(&ring);
    compare_planes(&stage);
    // The backend's rows must be its own checkpoints, rounded.
    TestCache *to = t.staged ? &stage : &ring;
    Cache tail = ref_tail(&to->host);
    for (int i = 0; t.dumps && t.with_k && i < 2 * n * t.n_kv_heads; i++) {
        const int p = i % 2, r = i / 2 / t.n_kv_heads, g = i / 2 % t.n_kv_heads;
        const Segment *seg = &s->segs[s->rows[r].seg];
        const int slot = t.staged ? seg->first + s->rows[r].index : (s->len[seg->seq] + s->rows[r].index) % t.slots;
        const float *v = fetch_f((p ? d.dump_v : d.dump_k_pos) + (r * t.n_kv_heads + g) * hd, hd);
        KvPlane *plane = plane_of(&to->host, p), *tail_plane = p ? &tail.v : &tail.k;
        float placed[REF_HEAD_DIM];
        for (int k = 0; k < hd; k++) placed[ref_tied_index(&to->host, k)] = v[k];
        ref_kv_write(&to->host, plane, ref_kv_row(&to->host, plane, t.staged ? 0 : seg->seq, g, slot), placed);
        const int tail_slot = tail.slots ? (s->len[seg->seq] + s->rows[r].index) % tail.slots : 0;
        if (tail.slots)
            ref_tail_write(plane, tail_plane, ref_kv_row(&tail, tail_plane, seg->seq, g, tail_slot), placed);
    }
    if (t.dumps && t.with_k) check_planes(to, "the checkpoints");
    sweep();
}

static void qkv_case(QkvCase t, TestStep *s) { qkv_case_tail(t, 0, s); }

static void test_qkv_store(void) {
    for (int k = 0; k < N_KV; k++) {
        static TestStep one, two, many, far;
        memset(&one, 0, sizeof one);
        memset(&two, 0, sizeof two);
        memset(&many, 0, sizeof many);
        memset(&far, 0, sizeof far);
        add_chain(&one, 0, 5, 1);
        add_chain(&two, 2, 125, 7);      // wraps in a ring of 128
        add_tree(&two, 0, 40, 9, 3);
        add_chain(&many, 1, 90, 64);
        add_chain(&far, 1, 200003, 2);   // f32 angles would be off by 0.01
        add_chain(&far, 2, 0, 1);
        const KvType t = kv_types[k];
        qkv_case((QkvCase){ t, 256, 8, 2, 128, 0, 128, false, true, true, true, false, true }, &two);   // sliding layer
        qkv_case((QkvCase){ t, 256, 4, 1, 128, 0, 128, false, true, true, true, false, false }, &many);
        qkv_case((QkvCase){ t, 256, 8, 2, 128, 0, 128, false, true, true, true, false, true }, &far);
        // global layer, untied
        qkv_case((QkvCase){ t, 512, 8, 1, 256, 0, 64, true, true, true, true, false, true }, &two);
        qkv_case((QkvCase){ t, 512, 8, 2, 256, 64, 64, true, true, true, true, false, true }, &two);        // tied
        if (kv_group(t)) {                             // with a tail of f16
            qkv_case_tail((QkvCase){ t, 512, 8, 2, 256, 64, 64, true, true, true, true, false, true }, 128, &two);
            qkv_case_tail((QkvCase){ t, 256, 4, 1, 256, 0, 128, false, true, true, true, false, true }, 128, &far);
        }
        qkv_case((QkvCase){ t, 512, 2, 1, 256, 64, 64, true, true, true, true, false, false }, &many);
        qkv_case((QkvCase){ t, 128, 2, 2, 192, 16, 16, true, true, true, true, false, true }, &one);
        // DFlash: V without norm
        qkv_case((QkvCase){ t, 128, 4, 4, 128, 0, 64, false, false, true, true, false, true }, &two);
        // a layer that reads a donor's cache
        qkv_case((QkvCase){ t, 128, 4, 1, 128, 0, 64, false, true, true, false, false, true }, &two);
        qkv_case((QkvCase){ t, 128, 4, 1, 128, 16, 16, true, true, true, false, false, false }, &two);
        qkv_case((QkvCase){ t, 128, 4, 2, 128, 0, 32, false, true, false, true, false, true }, &two);       // no q
        qkv_case((QkvCase){ t, 256, 4, 2, 128, 0, 128, false, true, true, true, true, true }, &two);        // stage
    }
    TestStep *chunk = alloc_or_die(1, sizeof *chunk);
    add_chain(chunk, 1, 60, 150);
    add_chain(chunk, 0, 0, 50);
    // a prompt longer than the ring
    qkv_case((QkvCase){ KV_F16, 256, 4, 1, 128, 0, 128, false, true, true, true, true, false }, chunk);
    // the same without staging, in parts: for a drafter, which has no q
    qkv_case((QkvCase){ KV_F16, 128, 4, 2, 128, 0, 64, false, false, false, true, false, true }, chunk);
    qkv_case((QkvCase){ KV_F16, 128, 4, 2, 64, 0, 64, false, false, true, true, false, true }, chunk);
    free(chunk);
}

typedef struct {
    KvType  type;
    int     head_dim, n_heads, n_kv_heads, slots, n_rot, window;
    OwnMask own;
    bool    staged, twins;              // twins: sessions 0 and 1 have equal caches and equal segments
    float   scale;
} AttendCase;

static void attend_case_tail(AttendCase t, int tail_slots, int reach, TestStep *s) {
    static const char *own_name[] = { "causal", "all", "none" };
    const int hd = t.head_dim, n = s->n_rows, q_dim = t.n_heads * hd;
    int n_seqs = 0;
    for (int i = 0; i < s->n_segs; i++) n_seqs = max_int(n_seqs, s->segs[i].seq + 1);
    if (!CASE("attend",
              "%s, head_dim %d, heads %d/%d, slots %d, n_rot %d, window %d, own %s, stage %d, scale %g, %s of %d "
         "rows at %d (%d segments)", kv_names[t.type],
         hd, t.n_heads, t.n_kv_heads, t.slots, t.n_rot, t.window, own_name[t.own], t.staged, (double)t.scale,
             s->segs[0].kind == SEG_TREE ? "tree" : "chain",
         s->segs[0].n, s->len[s->segs[0].seq], s->n_segs)) return;
    TestCache ring = new_cache(t.type, n_seqs, t.n_kv_heads, hd, t.slots, t.n_rot);
    TestCache stage = new_cache(t.type, 1, t.n_kv_heads, hd, 256, t.n_rot);
    if (tail_slots) add_tail(&ring, tail_slots, reach);
    Cache tail = ref_tail(&ring.host);
    for (int k = 0; k < s->n_segs; k++) {
        const Segment *seg = &s->segs[k];
        const int len = s->len[seg->seq];
        const int first = t.window ? max_int(0, len - t.window + 1) : 0, end = len + (t.own == OWN_NONE ? 0 : seg->n);
        for (int p = first; p < end; p++) {
            if (t.staged && p >= len) random_row(&stage.host, 0, seg->first + p - len);
            else random_row(&ring.host, seg->seq, p % t.slots);
            if (tail_slots && p >= end - tail_slots) random_row(&tail, seg->seq, p % tail_slots);
        }
    }
    for (int p = 0; p < 2 && t.twins; p++) {
        const KvPlane *plane = plane_of(&ring.host, p);
        const size_t half = plane_rows(&ring.host) / 2;
        const size_t bytes = half * kv_row_bytes(plane->type, plane->dim),
            scales = half * kv_scale_bytes(plane->type, plane->dim);
        memcpy((char *)plane->data + bytes, plane->data, bytes);
        if (plane->scale) memcpy((char *)plane->scale + scales, plane->scale, scales);
    }
    put_cache(&ring, true);
    put_cache(&stage, true);
    const Batch batch = put_batch(s), host = host_batch(s);

    // Scores of a few units. Values are below 1, so results of visible keys are too.
    float *q = floats(n * q_dim, 7.5 / sqrt(hd) / (double)t.scale, 0);
    if (t.twins) memcpy(q + n / 2 * q_dim, q, (size_t)(n / 2 * q_dim) * sizeof *q);
    const float *q_dev = put_f("q", q, n * q_dim);
    Expect e = expect(n, q_dim);
    reference_ops()->attend(&(Attend){ .batch = &host, .cache = &ring.host, .staging = t.staged ? &stage.host : NULL,
                                       .q = q, .n_heads = t.n_heads, .window = t.window, .own = t.own, .scale = t.scale,
                                       .out.f = e.want });
    e.any_rows = true;
    const double tolerance = t.type == KV_F32 || op->on_host ? TOL_ATTEND : TOL_ATTEND_16;
    for (int h = 0; h < n * t.n_heads; h++) {          // no visible key: 0
        const bool blind = largest(e.want + h * hd, hd) == 0;
        for (int i = h * hd; i < (h + 1) * hd; i++) e.bound[i] = blind ? 0 : (float)tolerance;
    }

    const Run runs[] = { { 0, min_int(n, 64) }, { n - 1, 1 }, { n / 2, 1 }, { 0, n }, { n / 3, min_int(9, n - n / 3) },
                         { 0, min_int(n, 3) }, { n / 3, n - n / 3 } };
    for (int k = 0; k < 7; k++) {
        const Batch view = batch_from(batch, runs[k]);
        const Act out = act_room(runs[k].n, q_dim, k);
        set_threads(runs[k].n);
        op->attend(&(Attend){ .batch = &view, .cache = &ring.c, .staging = t.staged ? &stage.c : NULL,
                              .n_heads = t.n_heads, .q = q_dev + runs[k].first * q_dim,
                              .window = t.window, .own = t.own, .scale = t.scale, .out = out });
        check_act(&e, out, runs[k]);
    }
    if (t.twins)
        same_bits("the same rows in two sessions", e.base + n / 2 * q_dim, e.base, (size_t)(n / 2 * q_dim),
                  sizeof(float));
    sweep();
}

static void attend_case(AttendCase t, TestStep *s) { attend_case_tail(t, 0, 0, s); }

static void attend_chain_tail(AttendCase t, int tail_slots, int reach, int len, int n) {
    TestStep *s = alloc_or_die(1, sizeof *s);
    add_chain(s, 0, len, n);
    attend_case_tail(t, tail_slots, reach, s);
    free(s);
}
static void attend_chain(AttendCase t, int len, int n) { attend_chain_tail(t, 0, 0, len, n); }

// attend with `store` compared with qkv_store and then attend: all rows at once, in two views of the step, and directly
// after a product, as in a layer, where a backend may start it earlier.
static void attend_store_case(AttendCase t, bool reader, const TestStep *s) {
    const int hd = t.head_dim, n = s->n_rows, q_dim = t.n_heads * hd, kv_dim = t.n_kv_heads * hd,
              n_pairs = t.n_rot ? t.n_rot : hd / 2;
    if (!CASE("attend",
              "store in its launch: %s, head_dim %d, heads %d/%d, n_rot %d, window %d, own %d, stage %d, k %d, %d rows",
         kv_names[t.type], hd, t.n_heads,
         t.n_kv_heads, t.n_rot, t.window, t.own, t.staged, !reader, n)) return;
    TestCache ring[4] = { new_cache(t.type, 2, t.n_kv_heads, hd, t.slots, t.n_rot) };
    TestCache stage[4] = { new_cache(t.type, 1, t.n_kv_heads, hd, 256, t.n_rot) };
    fill_cache(&ring[0]);
    fill_cache(&stage[0]);
    for (int path = 1; path < 4; path++) {
        ring[path] = ring[0];
        stage[path] = stage[0];
    }
    const Batch batch = put_batch(s);
    // scores of a few units
    const float *w_q = floats(hd, 0.05, 0.2), *w_k = t.n_rot ? ring[0].fold : floats(hd, 0.5, 1);
    const float *q = floats(n * q_dim, 3, 0), *k = floats(n * kv_dim, 2, 0);
    double *inv_freq = keep(n_pairs, sizeof *inv_freq);
    for (int i = 0; i < n_pairs; i++) inv_freq[i] = pow(1e4, -2.0 * i / hd);
    QkvStore store = { .batch = &batch, .n_heads = t.n_heads, .v_norm = t.own != OWN_ALL, .eps = 1e-6f,
                       .rope = { put("inv_freq", inv_freq, (size_t)n_pairs, sizeof(double)), n_pairs },
                       .w_q = put_f("w_q", w_q, hd), .w_k = put_f("w_k", w_k, hd) };
    if (!reader) store.k = store.v = put_f("k", k, n * kv_dim);
    const Matrix w = matrix(T_Q8_0, 1, 40, 64);
    const In in = random_in(n, 64, IN_X), in_dev = put_in(&in, n, 64);
    const float *out[4];
    for (int path = 0; path < 4; path++) {
        put_cache(&ring[path], false);
        put_cache(&stage[path], false);
        store.cache = &ring[path].c;
        store.staging = t.staged ? &stage[path].c : NULL;
        store.q = change_f("q", q, n * q_dim);
        float *y = room_f("out", n * q_dim);
        if (path == 0) op->qkv_store(&store);
        if (path == 3)
            op->matmul(&(Matmul){ .n_rows = n, .n = 1, .in = in_dev, .w = { &w.t },
                                  .out = { room_f("product", n * 40) } });
        for (int from = 0, to; from < n; from = to) {
            // if rows see later rows, those must be stored before
            to = path == 2 && !from && n > 1 && t.own != OWN_ALL && !s->rows[n / 2 - 1].ahead ? n / 2 : n;
            const Batch view = batch_from(batch, (Run){ from, to - from });
            QkvStore part = store;
            part.batch = &view;
            part.q += from * q_dim;
            if (part.k) {
                part.k += from * kv_dim;
                part.v += from * kv_dim;
            }
            op->attend(&(Attend){ .batch = &view, .cache = part.cache, .staging = part.staging, .n_heads = t.n_heads,
                                  .q = part.q,
                                  .window = t.window, .own = t.own, .scale = t.scale, .store = path ? &part : NULL,
                                  .out = { .f = y + from * q_dim } });
        }
        out[path] = fetch_f(y, n * q_dim);
    }
    for (int path = 1; path < 4; path++) {
        const char *what = path == 1 ? "out" : path == 2 ? "out of views" : "out after a product";
        same_bits(what, out[path], out[0], (size_t)(n * q_dim), sizeof(float));
        same_planes(t.staged ? stage[path].c : ring[path].c, t.staged ? stage[0].c : ring[0].c, false, what);
    }
    sweep();
}

// Quantised rows: global layers of both layouts and rings, from one row to prompts, trees, sessions, tails that end
// inside a tile.
static void attend_quantised(KvType type, TestStep *s) {
    attend_chain((AttendCase){ type, 512, 8, 1, 256, 64, 0, OWN_CAUSAL, false, false, 1 }, 130, 3);
    attend_chain((AttendCase){ type, 512, 16, 2, 2240, 64, 0, OWN_CAUSAL, false, false, 1 }, 2100 + type, 1);
    attend_chain((AttendCase){ type, 512, 4, 1, 192, 0, 0, OWN_CAUSAL, false, false, 1 }, 100, 9);
    attend_chain((AttendCase){ type, 256, 4, 2, 128, 0, 65, OWN_CAUSAL, false, false, 1 }, 1000 + type, 5);
    attend_chain((AttendCase){ type, 128, 4, 2, 128, 0, 0, OWN_NONE, false, false, 1 }, 65, 2);
    // prompts
    attend_chain((AttendCase){ type, 512, 4, 1, 192, 64, 0, OWN_CAUSAL, false, false, 1 }, 37 * (type % 4), 66);
    attend_chain((AttendCase){ type, 512, 2, 2, 192, 0, 0, OWN_CAUSAL, false, false, 1 }, 31, 67);
    attend_chain((AttendCase){ type, 256, 2, 1, 192, 0, 129, OWN_CAUSAL, true, false, 1 }, 200, 70);
    attend_chain((AttendCase){ type, 256, 2, 2, 192, 0, 64, OWN_CAUSAL, true, false, 1 }, 0, 130);
    for (int k = 0; k < 2; k++) {
        memset(s, 0, sizeof *s);
        add_tree(s, 1, 75, 30, 4);
        add_chain(s, 0, 75 + 40 * k, 5);
        attend_case((AttendCase){ type, k ? 512 : 256, 4, 1, 192, k ? 64 : 0, k ? 0 : 70, OWN_CAUSAL, false, false, 1 },
                    s);
        attend_case_tail((AttendCase){ type, k ? 512 : 256, 4, 1, 192, k ? 64 : 0, 0, OWN_CAUSAL, false, false, 1 },
                         128, 64, s);
        memset(s, 0, sizeof *s);
        add_chain(s, 0, 75, 5);
        add_chain(s, 1, 75, 5);
        attend_case((AttendCase){ type, 256, 4, 2, 128, 0, 0, OWN_CAUSAL, false, true, 1 }, s);
        attend_store_case((AttendCase){ type, k ? 512 : 256, 4, 2, 192, k ? 64 : 0, 0, OWN_CAUSAL, false, false, 1 }, k,
                          s);
        attend_chain_tail((AttendCase){ type, 512, 8 >> 2 * k, 1, 512, k ? 64 : 0, 0, OWN_CAUSAL, false, false, 1 },
                          128, 64, 200 + 7 * k, 1 + 63 * k);
    }
    attend_chain_tail((AttendCase){ type, 512, 8, 1, 512, 64, 0, OWN_CAUSAL, false, false, 1 }, 192, 128, 10, 4);
    // of a prompt the last rows read the first ones as codes; the tail wraps within it
    attend_chain_tail((AttendCase){ type, 256, 2, 1, 512, 0, 0, OWN_CAUSAL, false, false, 1 }, 192, 64, 100, 70);
    attend_chain_tail((AttendCase){ type, 512, 4, 2, 512, 64, 0, OWN_CAUSAL, false, false, 1 }, 256, 64, 31, 150);
}

// attend with lists of blocks, some of them empty, compared with the reference; with all blocks listed: the bits of
// attend without lists.
static void attend_blocks_case(AttendCase t, TestStep *s, bool all) {
    const int hd = t.head_dim, n = s->n_rows, q_dim = t.n_heads * hd, rows = (n + SELECT_ROWS - 1) / SELECT_ROWS;
    const int n_blocks = (t.slots + SELECT_KEYS - 1) / SELECT_KEYS, lists = rows * t.n_kv_heads;
    if (!CASE("attend", "%s of %d blocks: %s, head_dim %d, heads %d/%d, n_rot %d, %d rows at %d, %d segments",
              all ? "all" : "some",
         n_blocks, kv_names[t.type], hd, t.n_heads, t.n_kv_heads, t.n_rot, n, s->len[s->segs[0].seq], s->n_segs)) return;
    TestCache cache = new_cache(t.type, 2, t.n_kv_heads, hd, t.slots, t.n_rot);
    fill_cache(&cache);
    put_cache(&cache, true);
    const Batch batch = put_batch(s), host = host_batch(s);
    const float *q = floats(n * q_dim, 7.5 / sqrt(hd), 0);
    int32_t *n_listed = keep(lists, sizeof *n_listed), *listed = keep(lists * n_blocks, sizeof *listed);
    for (int i = 0; i < lists; i++) {
        for (int b = 0; b < n_blocks; b++)
            if (all || rnd(3) == 0) listed[i * n_blocks + n_listed[i]++] = b;
        const int first = i / t.n_kv_heads * SELECT_ROWS, last = min_int(first + SELECT_ROWS, n) - 1;
        const bool one = s->rows[first].seg == s->rows[last].seg && s->segs[s->rows[first].seg].n > STEP_ROWS;
        if (!one || (!all && i % 7 == 6)) n_listed[i] = -1;
    }
    BlockList blocks = { n_blocks, n_listed, listed };
    Expect e = expect(n, q_dim);
    Attend o = { .batch = &host, .cache = &cache.host, .q = q, .n_heads = t.n_heads, .own = OWN_CAUSAL, .scale = 1,
                 .blocks = &blocks, .out.f = e.want };
    if (!all) reference_ops()->attend(&o);
    const double tolerance = t.type == KV_F32 || op->on_host ? TOL_ATTEND : TOL_ATTEND_16;
    for (int i = 0; i < n * q_dim; i++) e.bound[i] = (float)tolerance;
    blocks.n = put("list lengths", n_listed, lists, sizeof *n_listed);
    blocks.block = put("lists", listed, lists * n_blocks, sizeof *listed);
    o.batch = &batch;
    o.cache = &cache.c;
    o.q = put_f("q", q, n * q_dim);
    o.out = act_room(n, q_dim, 0);
    set_threads(n);
    op->attend(&o);
    if (!all) {
        check_act(&e, o.out, (Run){ 0, n });
    } else {
        const float *got = fetch_f(o.out.f, n * q_dim);
        o.blocks = NULL;
        o.out = act_room(n, q_dim, 0);
        op->attend(&o);
        same_bits("all blocks", got, fetch_f(o.out.f, n * q_dim), (size_t)(n * q_dim), sizeof(float));
    }
    sweep();
}

static void attend_blocks(TestStep *s) {
    for (int k = 0; k < 2 * N_KV; k++) {   // all blocks: head shapes with only one kernel in a backend
        const KvType t = kv_types[k % N_KV];
        const bool tied = k >= N_KV;
        memset(s, 0, sizeof *s);
        add_chain(s, 1, 61 * k % 400, 66 + k);
        attend_blocks_case((AttendCase){ .type = t, 512, 2 << tied, 1 + tied, 512, tied ? 64 : 0 }, s, k % 4 == 1);
        if (k % 3) add_chain(s, 0, 300, k % 3 == 1 ? 3 : 67);
        attend_blocks_case((AttendCase){ .type = t, k % 2 ? 512 : 256, k % 5 ? 2 : 3, 1, 512, tied ? 64 : 0 }, s,
                           k % 4 == 3);
    }
    for (int k = 0; k < 6; k++) {          // groups of heads of all models, and other ones
        memset(s, 0, sizeof *s);
        add_chain(s, 0, 90 * (6 - k), 130 - 12 * k);
        attend_blocks_case((AttendCase){ .type = KV_F16, k == 5 ? 128 : 512, 1 << k, 1, 768, k % 2 ? 64 : 0 }, s,
                           k == 4);
    }
}

// Drafters. A DFlash block of up to 16 rows, and of 64: heads of 128 on a ring with a window, and on a ring where every
// row sees all others. MTP: its own rows are in no cache, its heads are those of its target.
static void attend_drafters(TestStep *s) {
    static const int far[] = { 2040, 2100, 4300 }, mtp_rot[] = { 0, 0, 64 };
    const float scale = 0.08838835f;
    for (int k = 0; k < 3; k++) {
        memset(s, 0, sizeof *s);
        add_chain(s, 1, far[k], k == 1 ? 16 : 5);
        if (k == 1) add_chain(s, 0, 300, 7);
        attend_case((AttendCase){ KV_F16, 128, k ? 8 : 4, k == 1 ? 2 : 1, 2112, 0, 2048, OWN_CAUSAL, false, false,
                                  scale }, s);
        attend_case((AttendCase){ KV_F16, 128, k ? 4 : 8, 1, 2240, 0, 2176, OWN_ALL, false, false, scale }, s);
        memset(s, 0, sizeof *s);
        add_chain(s, 0, 130 * k, 64);
        if (k == 1) add_chain(s, 1, 5, 64);
        attend_case((AttendCase){ KV_F16, 128, 4, 1, 320, 0, k ? 250 : 0, OWN_ALL, false, false, scale }, s);
        for (int own = OWN_ALL; own <= OWN_NONE; own++)
            for (int t = 0; t < 2; t++) {              // f16, and a quantised type
                const KvType type = t ? kv_types[3 + (k + 2 * own) % 4] : KV_F16;
                memset(s, 0, sizeof *s);
                add_chain(s, 0, t ? 33 * k : 600 * k, own == OWN_NONE ? 1 : 9);
                if (k == 2) add_chain(s, 1, 70, 2);
                attend_case((AttendCase){ type, 512, t ? 4 : 16, 2, k == 2 && !t ? 2240 : 1088, mtp_rot[k], 0,
                                          (OwnMask)own, false, false, 1 }, s);
                attend_case((AttendCase){ type, 256, 8, 2 << t, 576, 0, k ? 512 : 31, (OwnMask)own, false, false, 1 },
                            s);
            }
        memset(s, 0, sizeof *s);                       // one launch for store and attention
        add_chain(s, 1, 60 * k, 1 + 3 * k);
        attend_store_case((AttendCase){ KV_F16, 128, 8, 2, k ? 192 : 2240, 0, k == 2 ? 100 : 0, OWN_ALL, false, false,
                                        scale }, false, s);
        for (int reader = 0; reader < 2; reader++) {
            attend_store_case((AttendCase){ KV_F16, 512, 8, 1, 256, mtp_rot[k], 0, OWN_NONE, false, false, 1 }, reader,
                              s);
            attend_store_case((AttendCase){ KV_F16, 256, 4, 2, 576, 0, 50, OWN_NONE, false, false, 1 }, reader, s);
        }
    }
}

// Lengths, groups of heads, head dimensions, types, both layouts.
static void attend_shapes(void) {
    static const KvType types[] = { KV_F32, KV_F16, KV_BF16 };
    static const int lens[] = { 0, 1, 63, 64, 65, 128 };
    for (int k = 0; k < 6; k++) {                      // global layer: lengths, groups, head dimensions, types
        const AttendCase t = { types[k % 3], 128 << k % 3, 4, 2, 256, 0, 0, OWN_CAUSAL, false, false, 1 };
        attend_chain(t, lens[k], 1);
        attend_chain(t, lens[k], 7);
        // tied
        attend_chain((AttendCase){ types[(k + 1) % 3], 512, 4, 1, 256, 64, 0, OWN_CAUSAL, false, false, 1 }, lens[k],
                     k % 2 ? 2 : 5);
    }
    for (int group = 1; group <= 16; group *= 2)
        for (int k = 0; k < 3; k++) {
            attend_chain((AttendCase){ types[k], 128 << k, group * (group < 4 ? 2 : 1), group < 4 ? 2 : 1, 256, 0, 0,
                                       OWN_CAUSAL, false, false, 1 }, 150, 3);
            attend_chain((AttendCase){ types[k], 128 << k, group, 1, 192, 16 << k, 0, OWN_CAUSAL, false, false,
                                       0.0625f }, 100, 2);
        }
    attend_chain((AttendCase){ KV_F32, 256, 4, 2, 256, 0, 0, OWN_CAUSAL, false, false, 1 }, 130, 64);
    attend_chain((AttendCase){ KV_F16, 512, 4, 1, 256, 64, 0, OWN_CAUSAL, false, false, 1 }, 70, 64);
    attend_chain((AttendCase){ KV_F32, 128, 2, 1, 1152, 0, 0, OWN_CAUSAL, false, false, 1 }, 1026, 2);
}

static void attend_windows(void) {
    static const KvType types[] = { KV_F32, KV_F16, KV_BF16 };
    static const int edges[] = { 1023, 1024, 1025, 1026 };
    // sliding layers: the window's edge, and rings of 1024 and 1088 slots where they wrap
    for (int k = 0; k < 4; k++) {
        attend_chain((AttendCase){ KV_F32, 256, 2, 1, 1024, 0, 961, OWN_CAUSAL, false, false, 1 }, edges[k],
                     k % 2 ? 1 : 4);
        attend_chain((AttendCase){ types[k % 3], 128, 2, 1, 1088, 0, 1024, OWN_CAUSAL, false, false, 1 }, edges[k],
                     k % 2 ? 5 : 2);
        attend_chain((AttendCase){ KV_F32, 128, 2, 1, 1088, 0, 1024, OWN_CAUSAL, false, false, 1 }, edges[k] + 62,
                     k + 1);
        // a reader with a smaller window
        attend_chain((AttendCase){ KV_F16, 128, 4, 2, 1088, 0, 512, OWN_CAUSAL, false, false, 1 }, edges[k] + 2000, 3);
    }
    attend_chain((AttendCase){ KV_F32, 256, 2, 1, 1088, 0, 1024, OWN_CAUSAL, false, false, 1 }, 1060, 64);
    // own rows outside the window
    attend_chain((AttendCase){ KV_F32, 128, 2, 2, 128, 0, 16, OWN_CAUSAL, false, false, 1 }, 100, 64);
    attend_chain((AttendCase){ KV_F32, 128, 2, 1, 128, 0, 1, OWN_CAUSAL, false, false, 1 }, 100, 3);
}

// Trees, rows that see all rows of their segment, rows that see none of it.
static void attend_own_rows(TestStep *s) {
    static const KvType types[] = { KV_F32, KV_F16, KV_BF16 };
    for (int k = 0; k < 6; k++) {                      // trees: wide, narrow, balanced; together with another session
        memset(s, 0, sizeof *s);
        add_tree(s, 0, k % 2 ? 100 : 0, k < 3 ? 64 : 17, k % 3 == 0 ? 60 : k % 3 == 1 ? 2 : 0);
        if (k >= 3) add_chain(s, 2, 33, 2);
        attend_case((AttendCase){ types[k % 3], 128, 4, 2, 192, k == 4 ? 16 : 0, k == 5 || k == 2 ? 65 : 0, OWN_CAUSAL,
                                  false, false, 1 }, s);
    }
    // OWN_ALL: a block of drafts; OWN_NONE: a reader of another model's cache
    for (int k = 0; k < 3; k++) {
        memset(s, 0, sizeof *s);
        add_chain(s, 1, 65 * k, 16);
        add_chain(s, 0, 7, 3);
        attend_case((AttendCase){ types[k], 128, 8, 2, 256, 0, 0, OWN_ALL, false, false, 0.08838835f }, s);
        attend_case((AttendCase){ types[k], 256, 4, 2, 128, 0, 50, OWN_NONE, false, false, 1 }, s);
        attend_case((AttendCase){ types[k], 256, 4, 1, 192, 32, 0, OWN_NONE, false, false, 1 }, s);
    }
}

// Staging, equal sessions, attention that stores its rows in the same launch.
static void attend_staged(TestStep *s) {
    static const KvType types[] = { KV_F32, KV_F16, KV_BF16 };
    for (int k = 0; k < 5; k++) {                      // prompt steps with staging
        static const int starts[] = { 0, 10, 63, 127, 1000 };
        memset(s, 0, sizeof *s);
        add_chain(s, 1, starts[k], 100);
        add_chain(s, 0, 5, 30);
        attend_case((AttendCase){ types[k % 3], 128, 2, 1, 128, 0, k % 2 ? 65 : 40, OWN_CAUSAL, true, false, 1 }, s);
    }
    attend_chain((AttendCase){ KV_F16, 256, 4, 2, 128, 0, 65, OWN_CAUSAL, true, false, 1 }, 70, 200);
    for (int k = 0; k < 3; k++) {
        memset(s, 0, sizeof *s);
        add_chain(s, 0, 75, 5);
        add_chain(s, 1, 75, 5);
        attend_case((AttendCase){ types[k], 256, 4, 2, 128, k == 1 ? 32 : 0, k == 2 ? 40 : 0, OWN_CAUSAL, false, true,
                                  1 }, s);
    }
    for (int k = 0; k < 12; k++) {                     // one launch for store and attention
        memset(s, 0, sizeof *s);
        if (k % 3 == 2) add_tree(s, 1, 30, 20, 4);
        else add_chain(s, 1, 30 + k, k % 3 ? 5 : 1);
        if (k >= 6) add_chain(s, 0, 60, 3);
        attend_store_case((AttendCase){ types[k % 3], 128 << k % 2, 4, 2, 128, k % 2 && k > 3 ? 32 : 0, k == 2 ? 25 : 0,
                                        OWN_CAUSAL, k == 1, false, 1 }, k % 4 == 3, s);
    }
}

static void attend_tensor_cores(TestStep *s) {
    // Caches of f16, on tensor cores: more keys than one round of splits, narrow and wide groups, trees after many
    // keys.
    for (int k = 0; k < 4; k++) {
        static const int far[] = { 2047, 2080, 2175, 4300 };
        attend_chain((AttendCase){ KV_F16, 128, 4, 2, 4416, k % 2 ? 32 : 0, 0, OWN_CAUSAL, false, false, 1 }, far[k],
                     1 + k * 3);
        attend_chain((AttendCase){ KV_F16, 256, k % 2 ? 3 : 5, 1, 576, 0, 512, OWN_CAUSAL, false, false, 1 }, far[k],
                     k * 11 + 1);
        memset(s, 0, sizeof *s);
        add_tree(s, 1, far[k], 30, 6);
        add_chain(s, 0, 31 * k, 2);
        attend_case((AttendCase){ KV_F16, 128, 2, 2, k < 3 ? 2240 : 4416, 0, k == 1 ? 700 : 0, OWN_CAUSAL, false, false,
                                  1 }, s);
    }
    attend_chain((AttendCase){ KV_F16, 512, 16, 2, 2176, 64, 0, OWN_CAUSAL, false, false, 1 }, 200, 9);
    attend_chain((AttendCase){ KV_F16, 128, 18, 9, 1088, 0, 1024, OWN_CAUSAL, false, false, 1 }, 1500, 3);
    for (int k = 0; k < 12; k++) {                     // few rows at the edges of tiles and splits; several sessions
        static const int at[] = { 0, 29, 31, 32, 60, 63, 64, 127, 500, 1090, 2030, 2111 };
        memset(s, 0, sizeof *s);
        if (k % 4 == 3) add_tree(s, 1, at[k], 5, 2);
        else add_chain(s, 1, at[k], k % 3 == 0 ? 1 : k % 3 == 1 ? 8 : 4);
        if (k % 4 == 2) add_chain(s, 0, 95, 2);
        attend_store_case((AttendCase){ KV_F16, 128 << k % 3, 8, k % 2 ? 2 : 1, k < 9 ? 576 : 2240, k % 3 == 2 ? 64 : 0,
                                        k == 8 ? 300 : 0, OWN_CAUSAL, false, false, 1 }, k == 4, s);
    }
}

static void attend_prompts(TestStep *s) {
    // Prompts: the heads of all five models, rings that wrap, with and without staging, windows that end inside a tile.
    static const int global[][3] = { { 8, 1, 0 }, { 8, 2, 0 }, { 16, 1, 64 }, { 16, 2, 64 }, { 8, 1, 32 } };
    for (int k = 0; k < 5; k++) {
        const int *g = global[k];                      // heads, KV heads, n_rot
        attend_chain((AttendCase){ KV_F16, 512, g[0], g[1], 320, g[2], 0, OWN_CAUSAL, false, false, 1 }, k * 37,
                     k % 2 ? 67 : 100);
    }
    for (int k = 0; k < 4; k++) {
        static const int starts[] = { 0, 63, 200, 1000 };
        attend_chain((AttendCase){ KV_F16, 256, 2 << k, k < 2 ? 2 : 1, 192, 0, k == 1 ? 64 : 129, OWN_CAUSAL, true,
                                   false, 1 }, starts[k], k == 3 ? 180 : 65 + k);
        attend_chain((AttendCase){ KV_F16, 256, 3, 1, 512, 0, k < 2 ? 0 : 101 + k, OWN_CAUSAL, false, false, 0.5f },
                     starts[k], 160);
    }
    for (int k = 0; k < 4; k++) {                      // several sessions in one block
        memset(s, 0, sizeof *s);
        add_chain(s, 1, 70, 66);
        if (k % 2) add_tree(s, 2, 100, 13, 5);
        add_chain(s, 0, k < 2 ? 130 : 500, k < 2 ? 1 : 70);
        attend_case((AttendCase){ KV_F16, k < 2 ? 512 : 256, 8, 1, k < 2 ? 256 : 128, k == 1 ? 64 : 0, k < 2 ? 0 : 65,
                                  OWN_CAUSAL, k > 1, false, 1 }, s);
    }
}

// Pictures, of which every row sees all in the window: larger and smaller than it, at both ends of a step, several in
// a chain, at the edges of tiles, in rings that wrap, staged or not, in steps of a few rows and in prompts.
static void attend_pictures(TestStep *s) {
    static const KvType types[] = { KV_F32, KV_F16, KV_BF16, KV_F16 };
    for (int k = 0; k < 12; k++) {
        static const int n[] = { 5, 9, 64, 40, 64, 130, 200, 70, 100, 66, 220, 130 };
        const KvType type = k % 4 == 3 ? kv_types[3 + k / 4] : types[k % 4];
        const int window = 24 << k % 5, at = (int)rnd(500), first = (int)rnd((uint32_t)n[k] / 2);
        const int hd = type == KV_F16 && n[k] > STEP_ROWS ? 256 : 128 << k % 2, many = 1 + (int)rnd((uint32_t)n[k] / 2);
        memset(s, 0, sizeof *s);
        add_chain(s, 1, at, n[k]);
        add_picture(s, first, many);
        if (first + many + 2 < n[k]) add_picture(s, first + many + 1, n[k] - first - many - 1);        // to the end
        if (k % 3 == 2) add_chain(s, 0, 70, n[k] > STEP_ROWS ? 30 : 4), add_picture(s, 0, 3);
        if (k == 10) add_tree(s, 2, 40, 12, 5);
        const int slots = (window + STEP_ROWS + TILE_SLOTS - 1) / TILE_SLOTS * TILE_SLOTS;
        attend_case((AttendCase){ type, hd, 4, 1 + k % 2, slots, 0, window, OWN_CAUSAL, n[k] > STEP_ROWS, false, 1 },
                    s);
        if (n[k] <= STEP_ROWS)
            attend_store_case((AttendCase){ type, hd, 4, 2, slots, 0, window, OWN_CAUSAL, k == 3, false, 1 }, false, s);
        if (k % 4) continue;                           // a global layer does not look ahead
        attend_case((AttendCase){ type, hd, 4, 1, 1088, 0, 0, OWN_CAUSAL, false, false, 1 }, s);
    }
}

static void test_attend(void) {
    TestStep *s = alloc_or_die(1, sizeof *s);
    attend_pictures(s);
    attend_shapes();
    attend_windows();
    attend_own_rows(s);
    attend_staged(s);
    attend_tensor_cores(s);
    attend_drafters(s);
    for (int k = 3; k < N_KV; k++) attend_quantised(kv_types[k], s);
    attend_prompts(s);
    attend_blocks(s);
    free(s);
}

typedef struct {
    KvType type;
    int    head_dim, n_heads, n_kv_heads, slots, n_rot, n_dense;
    float  alpha, density;
} SelectCase;

// K of each block of keys around another mean, and scores of a few units, so that blocks differ.
static void random_blocks(TestCache *t) {
    for (int seq = 0; seq < t->host.n_seqs; seq++)
        for (int g = 0; g < t->host.n_kv_heads; g++)
            for (int p = 0; p < 2; p++) {
                const KvPlane *plane = plane_of(&t->host, p);
                float around[REF_HEAD_DIM], v[REF_HEAD_DIM];
                for (int slot = 0; slot < t->host.slots; slot++) {
                    for (int i = 0; i < plane->dim && slot % SELECT_KEYS == 0; i++) around[i] = 0.5f * uniform();
                    for (int i = 0; i < plane->dim; i++) v[i] = around[i] + 0.5f * uniform();
                    ref_kv_write(&t->host, plane, ref_kv_row(&t->host, plane, seq, g, slot), v);
                }
            }
}

// Compares weights with the reference's, and lists with the definition applied to the backend's own weights.
static void select_case(SelectCase t, TestStep *s) {
    int n_seqs = 0;
    for (int i = 0; i < s->n_segs; i++) n_seqs = max_int(n_seqs, s->segs[i].seq + 1);
    const int hd = t.head_dim, n = s->n_rows, q_dim = t.n_heads * hd, rows = (n + SELECT_ROWS - 1) / SELECT_ROWS;
    const int n_blocks = (t.slots + SELECT_KEYS - 1) / SELECT_KEYS + 1, lists = rows * t.n_kv_heads;
    if (!CASE("block_select",
              "%s, head_dim %d, heads %d/%d, n_rot %d, alpha %g, density %g, %d rows at %d, the last %d dense, "
         "%d segments", kv_names[t.type], hd, t.n_heads, t.n_kv_heads, t.n_rot, (double)t.alpha, (double)t.density,
         s->segs[0].n, s->len[s->segs[0].seq], t.n_dense, s->n_segs)) return;
    TestCache cache = new_cache(t.type, n_seqs, t.n_kv_heads, hd, t.slots, t.n_rot);
    random_blocks(&cache);
    put_cache(&cache, true);
    s->segs[0].n_dense = t.n_dense;
    const Batch batch = put_batch(s), host = host_batch(s);
    const float *q = floats(n * q_dim, 20 / sqrt(hd), 0);
    const size_t n_means = (size_t)s->n_segs * t.n_kv_heads * n_blocks * hd,
        n_scores = (size_t)rows * t.n_heads * n_blocks;
    BlockSelect o = { .batch = &host, .cache = &cache.host, .n_heads = t.n_heads, .q = q, .scale = 1, .alpha = t.alpha,
                      .density = t.density, .means = keep(n_means, sizeof(float)),
                      .scores = keep(n_scores, sizeof(float)),
                      .weights = keep(lists * n_blocks, sizeof(float)), .count = keep(2, sizeof(int64_t)),
                      .out = { n_blocks, keep(lists, sizeof(int32_t)), keep(lists * n_blocks, sizeof(int32_t)) } };
    reference_ops()->block_select(&o);
    const int64_t before[2] = { 5, 7 };
    BlockSelect there = o;
    there.batch = &batch;
    there.cache = &cache.c;
    there.q = put_f("q", q, n * q_dim);
    there.means = room_f("means", n_means);
    there.scores = room_f("scores", n_scores);
    there.weights = room_f("weights", lists * n_blocks);
    there.count = put_changing("count", before, 2, sizeof *before);
    there.out.n = room("list lengths", lists, sizeof(int32_t));
    there.out.block = room("lists", lists * n_blocks, sizeof(int32_t));
    op->block_select(&there);

    const float *w = fetch_f(there.weights, lists * n_blocks);
    const int32_t *n_listed = fetch(there.out.n, lists, sizeof *n_listed);
    const int32_t *listed = fetch(there.out.block, lists * n_blocks, sizeof *listed);
    const int64_t *count = fetch(there.count, 2, sizeof *count);
    int64_t want_count[2] = { before[0], before[1] };
    int32_t want[64];
    for (int i = 0; i < lists; i++) {
        const RefRowBlock v = ref_row_block(&o, i / t.n_kv_heads * SELECT_ROWS);
        for (int b = 0; b < v.n && !v.all; b++) {
            const float right = o.weights[i * n_blocks + b], got = w[i * n_blocks + b],
                bound = op->on_host ? 1e-4f : 0.03f;
            CHECK(fabsf(got - right) <= bound * right + 1e-6f,
                  "%s: weight of block %d for list %d: expected %g, got %g", now, b,
                  i, (double)right, (double)got);
        }
        const int n_want = v.all ? -1 : ref_select(&o, &v, w + i * n_blocks, want);
        CHECK(n_listed[i] == n_want, "%s: list %d: expected %d blocks of %d, got %d", now, i, n_want, v.n, n_listed[i]);
        if (n_listed[i] == n_want && n_want > 0) same_ints("list", listed + i * n_blocks, want, n_want);
        want_count[0] += !v.of_prompt ? 0 : v.all ? v.n : n_want;
        want_count[1] += v.of_prompt ? v.n : 0;
    }
    CHECK(count[0] == want_count[0] && count[1] == want_count[1], "%s: expected %lld blocks of %lld, got %lld of %lld",
          now, (long long)want_count[0], (long long)want_count[1], (long long)count[0], (long long)count[1]);
    sweep();
}

static void test_block_select(void) {
    TestStep *s = alloc_or_die(1, sizeof *s);
    for (int k = 0; k < N_KV; k++) {
        const KvType t = kv_types[k];
        memset(s, 0, sizeof *s);
        add_chain(s, 0, 1000 + 37 * k, 200);           // lengths that are not multiples of a tile
        select_case((SelectCase){ t, 512, 4, 1, 1408, 64, 70, 0.3f, 0 }, s);
        select_case((SelectCase){ t, 512, 4, 2, 1408, 0, 0, k % 2 ? 0 : 0.3f, k % 2 ? 0.2f * (float)k : 0 }, s);
    }
    for (int k = 0; k < 6; k++) {                      // no key before, several sessions, one with a tree
        static const float alphas[] = { 0, 0.02f, 0.5f, 0.999f, 1, 0.1f };
        memset(s, 0, sizeof *s);
        add_chain(s, 0, k % 2 ? 640 : 0, 65 + 61 * k);
        if (k % 3) add_chain(s, 1, 1024, 70 - k);
        if (k % 3 == 2) add_tree(s, 2, 700, 12, 3);
        select_case((SelectCase){ KV_F16, 64 << k % 4, 3, 3, 1152, k == 3 ? 64 : 0, k == 4 ? 300 : 0, alphas[k], 0 },
                    s);
        select_case((SelectCase){ KV_F32, 128, 8, 1, 1152, 0, 0, 0, (float)(k + 1) / 7 }, s);
    }
    free(s);
}

// Compared with the reference; and with one head, the reference's attention must be the probabilities times V.
static void mass_case(SelectCase t, TestStep *s) {
    int n_seqs = 0;
    for (int i = 0; i < s->n_segs; i++) n_seqs = max_int(n_seqs, s->segs[i].seq + 1);
    const int hd = t.head_dim, n = s->n_rows, q_dim = t.n_heads * hd, n_keys = t.slots + 5;
    if (!CASE("attn_mass", "%s, head_dim %d, heads %d/%d, n_rot %d, %d rows at %d, %d segments", kv_names[t.type], hd,
              t.n_heads, t.n_kv_heads, t.n_rot, n, s->len[s->segs[0].seq], s->n_segs)) return;
    TestCache cache = new_cache(t.type, n_seqs, t.n_kv_heads, hd, t.slots, t.n_rot);
    random_blocks(&cache);
    put_cache(&cache, true);
    const Batch batch = put_batch(s), host = host_batch(s);
    const float *q = floats(n * q_dim, 8 / sqrt(hd), 0), *mass = floats(n * n_keys, 0.01, 0);
    AttnMass o = { .batch = &host, .cache = &cache.host, .n_heads = t.n_heads, .q = q, .scale = 0.7f, .n_keys = n_keys,
                   .probs = keep((size_t)n * t.n_heads * n_keys, sizeof(float)), .mass = keep(n * n_keys,
                           sizeof(float)) };
    memcpy(o.mass, mass, (size_t)(n * n_keys) * sizeof *mass);
    reference_ops()->attn_mass(&o);
    AttnMass there = o;
    there.batch = &batch;
    there.cache = &cache.c;
    there.q = put_f("q", q, n * q_dim);
    there.probs = room_f("shares", (size_t)n * t.n_heads * n_keys);
    there.mass = put_changing("mass", mass, n * n_keys, sizeof *mass);
    op->attn_mass(&there);
    const float *got = fetch_f(there.mass, n * n_keys), bound = op->on_host ? 2e-5f : 2e-4f;
    for (int i = 0; i < n * n_keys; i++)
        CHECK(fabsf(got[i] - o.mass[i]) <= bound * fabsf(o.mass[i]) + 1e-7f,
              "%s: key %d of row %d: expected %g, got %g", now,
              i % n_keys, i / n_keys, (double)o.mass[i], (double)got[i]);
    if (t.n_heads == 1 && !t.n_rot && !kv_group(t.type)) {
        const Attend a = { .batch = &host, .cache = &cache.host, .n_heads = 1, .q = q, .own = OWN_CAUSAL, .scale = 0.7f,
                           .out = { .f = keep(n * hd, sizeof(float)) } };
        const float *shares = fetch_f(there.probs, n * n_keys);
        reference_ops()->attend(&a);
        for (int r = 0; r < n; r++) {
            const Segment *seg = &s->segs[s->rows[r].seg];
            double sum[REF_HEAD_DIM] = { 0 };
            float v[REF_HEAD_DIM];
            for (int j = 0; j <= s->len[seg->seq] + s->rows[r].index; j++) {
                ref_kv_read(&cache.host.v, ref_kv_row(&cache.host, &cache.host.v, seg->seq, 0, j), v);
                for (int i = 0; i < hd; i++) sum[i] += (double)shares[r * n_keys + j] * v[i];
            }
            for (int i = 0; i < hd; i++)
                CHECK(fabs(sum[i] - a.out.f[r * hd + i]) < 1e-4,
                      "%s: value %d of row %d: expected attention's %g, got %g", now, i,
                      r, (double)a.out.f[r * hd + i], sum[i]);
        }
    }
    sweep();
}

static void test_attn_mass(void) {
    TestStep *s = alloc_or_die(1, sizeof *s);
    for (int k = 0; k < N_KV; k++) {
        memset(s, 0, sizeof *s);
        add_chain(s, 0, 200 + 37 * k, 8);
        mass_case((SelectCase){ kv_types[k], 512, 4, 1, 512, 64, 0, 0, 0 }, s);
        mass_case((SelectCase){ kv_types[k], 512, 4, 2, 512, 0, 0, 0, 0 }, s);
    }
    for (int k = 0; k < 4; k++) {                      // few keys, several sessions
        memset(s, 0, sizeof *s);
        add_chain(s, 0, 63 * k, 1 + k);
        if (k % 2) add_chain(s, 1, 300, 17);
        mass_case((SelectCase){ k % 2 ? KV_F16 : KV_F32, 64 << k, 1, 1, 448, 0, 0, 0, 0 }, s);
        mass_case((SelectCase){ KV_F16, 64 << k, 6, 3, 448, 16, 0, 0, 0 }, s);
    }
    free(s);
}

static void test_kv_commit(void) {
    for (int k = 0; k < 12; k++) {
        TestStep *s = keep(1, sizeof *s);
        // session 0 wraps in the ring
        const int n_tree = k % 3 == 0 ? 64 : 20, ring_slots = 128, lens[3] = { 120 + k, k % 4 == 0 ? 0 : 30, 200 };
        if (k % 4 == 3) {
            add_chain(s, 1, lens[1], 64);
            add_chain(s, 0, lens[0], 3);
        } else {
            add_tree(s, 0, lens[0], n_tree, k % 2 ? 3 : 40);
            add_chain(s, 2, lens[2], 5);
            add_tree(s, 1, lens[1], 9, 0);
        }
        CASE("kv_commit", "case %d, %d segments", k, s->n_segs);
        const KvType coded = kv_types[3 + k % 4];
        TestCache caches[] = { new_cache(KV_F16, 3, 2, 64, ring_slots, 0), new_cache(KV_F32, 3, 1, 128, 320, 0),
                               new_cache(KV_BF16, 3, 2, 64, 320, 8), new_cache(coded, 3, 2, 256, 320, 64) };
        enum { N_CACHES = sizeof caches / sizeof *caches };
        Cache list[N_CACHES], host_list[N_CACHES];
        if (k % 2) add_tail(&caches[3], 128, 64);
        for (int l = 0; l < N_CACHES; l++) {
            fill_cache(&caches[l]);
            put_cache(&caches[l], false);
            list[l] = caches[l].c;
            host_list[l] = caches[l].host;
        }
        enum { COUNTED = 2048 };                       // tokens of the counted vocabulary
        int32_t *counts = keep(MAX_SEGS * COUNTED, sizeof *counts),
            *want_counts = keep(MAX_SEGS * COUNTED, sizeof *counts);
        for (int i = 0; i < s->n_segs; i++)
            for (int j = 0; j < s->segs[i].n; j++) s->rows[s->segs[i].first + j].token = (int32_t)rnd(COUNTED);
        int32_t n_accept[MAX_SEGS] = { 0 }, *path = keep(MAX_SEGS * STEP_ROWS, sizeof *path), want_len[MAX_SEGS];
        memcpy(want_len, s->len, sizeof want_len);
        for (int i = 0; i < s->n_segs; i++) {
            const Segment *seg = &s->segs[i];
            int on_path = 0;
            if (seg->kind == SEG_TREE) {               // the path to a random row, or an empty path
                const uint64_t ancestors = s->rows[seg->first + seg->n - 1 - (int)rnd((uint32_t)seg->n / 2)].ancestors;
                for (int j = 0; j < seg->n; j++)
                    if (ancestors >> j & 1) path[i * STEP_ROWS + on_path++] = j;
            } else {
                on_path = seg->n;
                for (int j = 0; j < STEP_ROWS; j++) path[i * STEP_ROWS + j] = -1;      // not read
            }
            n_accept[i] = k == 5 ? 0 : k == 7 ? 1 : k % 2 ? on_path : 1 + (int32_t)rnd((uint32_t)on_path);
        }
        Batch host = host_batch(s);
        host.len = want_len;
        KvCommit o = { .batch = &host, .caches = host_list, .n_caches = N_CACHES, .n_accept = n_accept, .path = path,
                       .counts = k % 2 ? want_counts : NULL, .vocab = COUNTED };
        reference_ops()->kv_commit(&o);
        Batch batch = put_batch(s);
        int32_t *counts_there = k % 2 ? put_changing("counts", counts, MAX_SEGS * COUNTED, sizeof *counts) : NULL;
        batch.len = put_changing("len", s->len, MAX_SEGS, sizeof(int32_t));
        o.batch = &batch;
        o.caches = list;
        o.n_accept = put("n_accept", n_accept, MAX_SEGS, sizeof(int32_t));
        o.path = k % 4 == 3 ? NULL : put("path", path, MAX_SEGS * STEP_ROWS, sizeof(int32_t));
        o.counts = counts_there;
        op->kv_commit(&o);
        if (counts_there)
            same_ints("counts", fetch(counts_there, MAX_SEGS * COUNTED, sizeof(int32_t)), want_counts,
                      MAX_SEGS * COUNTED);
        same_ints("len", fetch(batch.len, MAX_SEGS, sizeof(int32_t)), want_len, MAX_SEGS);
        for (int l = 0; l < N_CACHES; l++) {
            TestCache *t = &caches[l];
            // The contents of rejected rows are unspecified.
            for (int i = 0; i < 4 * s->n_segs * t->c.n_kv_heads; i++) {
                const int g = i / 4 % t->c.n_kv_heads, a = i / 4 / t->c.n_kv_heads;
                Cache to = i % 4 < 2 ? t->host : ref_tail(&t->host), from = i % 4 < 2 ? t->c : ref_tail(&t->c);
                const KvPlane *host_plane = plane_of(&to, i % 2), *plane = plane_of(&from, i % 2);
                const Segment *seg = &s->segs[a];
                for (int j = n_accept[a]; j < seg->n && to.slots; j++) {
                    const int slot = (s->len[seg->seq] + j) % to.slots;
                    const size_t bytes = kv_row_bytes(plane->type, plane->dim),
                        scales = kv_scale_bytes(plane->type, plane->dim);
                    const RefRow here = ref_kv_row(&to, host_plane, seg->seq, g, slot),
                        there = ref_kv_row(&from, plane, seg->seq, g, slot);
                    memcpy(here.data, fetch(there.data, bytes, 1), bytes);
                    if (scales) memcpy(here.scales, fetch(there.scales, scales, 1), scales);
                }
            }
            check_planes(t, l == 0 ? "ring" : l == 1 ? "global" : l == 2 ? "tied" : kv_names[coded]);
        }
        sweep();
    }
}

static void test_kv_copy(void) {
    static const struct { int len, n, len_2, n_2; } cases[] = { { 77, 300, 100, 50 }, { 0, 128, 0, 1 },
                                                                { 0, 129, 1000, 64 }, { 1000, 7, 127, 2 },
                                                                { 5, 320, 3, 190 } };
    for (int i = 0; i < 5 + N_KV; i++) {
        const int k = i % 5;
        const KvType type = kv_types[i % N_KV];
        TestStep *s = keep(1, sizeof *s);
        add_chain(s, 1, cases[k].len, cases[k].n);
        add_chain(s, 0, cases[k].len_2, cases[k].n_2);
        if (!CASE("kv_copy", "%s, %d rows at %d and %d at %d into 128 slots", kv_names[type], cases[k].n, cases[k].len,
             cases[k].n_2, cases[k].len_2)) continue;
        TestCache ring = new_cache(type, 3, 2, 128, 128, 0), stage = new_cache(type, 1, 2, 128, MAX_STEP, 0);
        fill_cache(&ring);
        fill_cache(&stage);
        put_cache(&ring, false);
        put_cache(&stage, true);
        const Batch batch = put_batch(s), host = host_batch(s);
        op->kv_copy(&(KvCopy){ .batch = &batch, .cache = &ring.c, .staging = &stage.c });
        reference_ops()->kv_copy(&(KvCopy){ .batch = &host, .cache = &ring.host, .staging = &stage.host });
        check_planes(&ring, "ring");
        sweep();
    }
}

// ---- output ---------------------------------------------------------------------------------------------------------

static void test_head_rows(void) {
    for (int t = 0; t < N_TYPES; t++)
        for (int k = 0; k < 3; k++) {
            const DType type = all_types[t];
            const int vocab = k == 0 ? 100 : k == 1 ? 500 : 33, cols = k == 0 ? 1536 : k == 1 ? 256 : 77;
            const int rows = k == 0 ? 64 : 100;
            const double cap = k == 1 ? 0 : t % 2 ? 30 : 1.5;      // with 1.5 the cap matters for logits of this test
            if (cols % block_elems(type)) continue;
            if (!CASE("head", "%s (%d, %d), cap %g, hidden %d", type_name(type), vocab, cols, cap, k < 2)) continue;
            Matrix w = matrix(type, 1, vocab, cols);
            const In in = random_in(rows, cols, k == 0 ? IN_X | IN_DELTA | IN_W_POST | IN_SCALE | IN_W_PRE
                                    : IN_X | IN_W_PRE);
            const Input ref = ref_in(&in, rows, cols);
            const In dev = put_in(&in, rows, cols);
            Expect e = expect(rows, vocab);
            const Expect z = product(&w, 0, &ref, 0, rows);
            reference_ops()->head(&(Head){ .n_rows = rows, .in = ref.in, .w = &w.host, .cap = (float)cap,
                                           .logits = e.want });
            for (int i = 0; i < rows * vocab; i++) e.bound[i] = z.bound[i] + (float)(TOL_ACT * cap);
            for (int run = 0; run < n_runs_100; run++) {
                const Run part = runs_100[run];
                if (part.first + part.n > rows) continue;
                float *logits = room_f("logits", part.n * vocab);
                float *hidden = k < 2 ? room_f("hidden", part.n * cols) : NULL;
                set_threads(part.n);
                op->head(&(Head){ .n_rows = part.n, .in = in_from(dev, part.first, cols), .w = &w.t, .cap = (float)cap,
                                  .logits = logits, .hidden = hidden });
                check_rows("logits", &e, fetch_f(logits, part.n * vocab), part);
                if (hidden)
                    compare("hidden", fetch_f(hidden, part.n * cols), cols, ref.y + part.first * cols,
                            ref.y_bound + part.first * cols, part.n, cols);
            }
            sweep();
        }
}

// The k largest logits and logsumexp, with and without all logits.
static void test_head_top(void) {
    static const struct { int vocab, top_k; } cases[] = { { 100, 1 }, { 500, 8 }, { 500, 100 }, { 33, 33 },
                                                          { 3000, 64 } };
    for (int k = 0; k < 10; k++) {
        const int vocab = cases[k / 2].vocab, top_k = cases[k / 2].top_k, rows = 7, cols = 64, like = vocab / 3;
        const bool whole = k % 2;
        if (!CASE("head", "top-k %d of %d, logits %d", top_k, vocab, whole)) continue;
        float *values = floats((size_t)vocab * cols, 0.5, 0);
        // ties: some rows are equal; k 6: a row of NaN
        for (int i = 0; i < 3; i++)
            memcpy(values + (like + 7 * i) * cols, values + like * cols, (size_t)cols * sizeof *values);
        if (k == 6) for (int i = 0; i < cols; i++) values[5 * cols + i] = NAN;
        const Tensor w = { .data = put_f("w", values,
                                         vocab * cols), .type = T_F32, .rows = vocab, .cols = cols, .n = 1 };
        float *x = floats(rows * cols, 1, 0), *norm = floats(cols, 0.2, 1);
        for (int i = 0; i < cols; i++) x[i] = values[like * cols + i];         // row 0: the ties come first
        const In in = { .x = put_f("x", x, rows * cols), .scale = 1, .w_pre = put_f("w_pre", norm,
                cols), .eps = 1e-6f };
        Head o = { .n_rows = rows, .in = in, .w = &w, .cap = 30, .logits = room_f("logits", rows * vocab) };
        op->head(&o);
        const float *logits = fetch_f(o.logits, rows * vocab);
        if (!whole) o.logits = NULL;
        o.top_k = top_k;
        o.top_ids = room("top_ids", (size_t)(rows * top_k), sizeof(int32_t));
        o.top_logits = room_f("top_logits", rows * top_k);
        o.logsumexp = room_f("logsumexp", rows);
        op->head(&o);
        if (whole) same_bits("logits", fetch_f(o.logits, rows * vocab), logits, (size_t)(rows * vocab), sizeof(float));
        int32_t *ids = keep(rows * top_k, sizeof *ids);
        float *top = keep(rows * top_k, sizeof *top);
        Expect e = expect(rows, 1);
        const Head want = { .w = &w, .top_k = top_k, .top_ids = ids, .top_logits = top, .logsumexp = e.want };
        for (int r = 0; r < rows; r++) {
            ref_summary(&want, r, logits + r * vocab);
            e.bound[r] = (float)TOL_LOGPROB * fmaxf(1, fabsf(e.want[r]));
        }
        same_ints("top_ids", fetch(o.top_ids, (size_t)(rows * top_k), sizeof *ids), ids, rows * top_k);
        same_bits("top_logits", fetch_f(o.top_logits, rows * top_k), top, (size_t)(rows * top_k), sizeof *top);
        const float *got = fetch_f(o.logsumexp, rows);
        if (k != 6) {
            compare("logsumexp", got, 1, e.want, e.bound, rows, 1);
        } else {
            int numbers = 0;
            for (int r = 0; r < rows; r++) numbers += !isnan(got[r]);
            CHECK(!numbers, "%s: logsumexp: got a number in %d of %d rows with a NaN", now, numbers, rows);
        }
        sweep();
    }
}

static void test_head(void) {
    test_head_rows();
    test_head_top();
}

// The head of centroids: compares scores with the reference; the other results must follow from them and from the
// results of head for the same rows.
static void head_centroid_case(DType type, DType c_type, int n_centroids, int per, int n_used, int top_k, int cols,
                               int bits) {
    const int vocab = n_centroids * per, n = n_used * per, rows = 64;
    if (!CASE("head_centroid", "%s (%d, %d), centroids %s (%d, %d), %d used, top-k %d", type_name(type), vocab, cols,
              type_name(c_type), n_centroids, cols, n_used, top_k)) return;
    Matrix w = random_matrix(type, 1, vocab, cols), c = random_matrix(c_type, 1, n_centroids, cols);
    const size_t w_row = gguf_row_size((int)type, (size_t)cols), c_row = gguf_row_size((int)c_type, (size_t)cols);
    char *w_data = (char *)(uintptr_t)w.host.data, *c_data = (char *)(uintptr_t)c.host.data;
    for (int i = 0; i < vocab / 3; i++)                // ties: of tokens, and of centroids
        memcpy(w_data + rnd((uint32_t)vocab) * w_row, w_data + rnd((uint32_t)vocab) * w_row, w_row);
    for (int i = 0; i < n_centroids / 2; i++)
        memcpy(c_data + rnd((uint32_t)n_centroids) * c_row, c_data + rnd((uint32_t)n_centroids) * c_row, c_row);
    if (type == T_F32) memset(w_data + vocab / 2 * w_row, 0xff, 3 * w_row);           // NaN
    if (bits & IN_SCALE) w.factor = floats(1, 0.5, 1);
    place(&w);
    place(&c);
    int32_t *order = keep(vocab, sizeof *order);
    for (int i = 0; i < vocab; i++) order[i] = i;
    for (int i = vocab - 1; i > 0; i--) {
        const int j = (int)rnd((uint32_t)i + 1), other = order[i];
        order[i] = order[j];
        order[j] = other;
    }
    const In in = random_in(rows, cols, bits);
    const Input input = ref_in(&in, rows, cols);
    const In dev = put_in(&in, rows, cols);
    const int32_t *order_dev = put("order", order, (size_t)vocab, sizeof *order);
    Expect e = product(&c, 0, &input, 0, rows);
    float *dense = room_f("dense", rows * vocab);
    set_threads(rows);
    op->head(&(Head){ .n_rows = rows, .in = dev, .w = &w.t, .logits = dense });
    const float *all = fetch_f(dense, rows * vocab);
    for (int run = 0; run < 7; run++) {
        const Run part = runs_100[run];
        HeadCentroid o = { .n_rows = part.n, .in = in_from(dev, part.first,
                                                           cols), .centroids = &c.t, .w = &w.t, .order = order_dev,
                           .n_used = n_used, .hidden = run % 2 ? NULL : room_f("hidden", part.n * cols),
                           .scores = room_f("scores", part.n * n_centroids), .logits = room_f("logits", part.n * n),
                           .top_k = top_k, .top_ids = room("top_ids", (size_t)(part.n * top_k), sizeof(int32_t)),
                           .top_logits = room_f("top_logits", part.n * top_k),
                           .logsumexp = run == 1 ? NULL : room_f("logsumexp", part.n) };
        set_threads(part.n);
        op->head_centroid(&o);
        float *scores = fetch_f(o.scores, part.n * n_centroids), *top = keep(part.n * top_k, sizeof *top);
        int32_t *ids = keep(part.n * top_k, sizeof *ids);
        Expect sums = expect(part.n, 1);
        check_rows("scores", &e, scores, part);
        if (o.hidden)
            compare("hidden", fetch_f(o.hidden, part.n * cols), cols, input.y + part.first * cols,
                    input.y_bound + part.first * cols, part.n, cols);
        for (int r = 0; r < part.n; r++) {
            float *z = keep(n, sizeof *z);
            ref_rank(scores + r * n_centroids, n_centroids);
            for (int k = n - 1; k >= 0; k--) {         // backwards, so that no centroid is overwritten too early
                const int id = order[ref.tokens[k / per].id * per + k % per];
                z[k] = all[(part.first + r) * vocab + id];
                ref.tokens[k] = (RefToken){ .z = isnan(z[k]) ? -INFINITY : z[k], .id = id };
            }
            qsort(ref.tokens, n, sizeof *ref.tokens, ref_compare);
            for (int k = 0; k < top_k; k++) {
                ids[r * top_k + k] = ref.tokens[k].id;
                top[r * top_k + k] = ref.tokens[k].z;
            }
            sums.want[r] = (float)ref_logsumexp(z, n);
            sums.bound[r] = (float)TOL_LOGPROB * fmaxf(1, fabsf(sums.want[r]));
        }
        same_ints("top_ids", fetch(o.top_ids, (size_t)(part.n * top_k), sizeof *ids), ids, part.n * top_k);
        same_bits("top_logits", fetch_f(o.top_logits, part.n * top_k), top, (size_t)(part.n * top_k), sizeof *top);
        float *got = o.logsumexp ? fetch_f(o.logsumexp, part.n) : sums.want;
        for (int r = 0; r < part.n; r++)
            if (isnan(sums.want[r]) && isnan(got[r])) got[r] = sums.want[r] = sums.bound[r] = 0;
        compare("logsumexp", got, 1, sums.want, sums.bound, part.n, 1);
    }
    sweep();
}

static void test_head_centroid(void) {
    static const DType c_types[] = { T_F32, T_BF16, T_F16, T_Q8_0, T_Q6_K };
    for (int t = 0; t < N_TYPES; t++)
        head_centroid_case(all_types[t], c_types[t % 5], 64, 16, 8, t ? 1 + t * 7 % 128 : 128, 256,
                           t % 2 ? IN_X | IN_W_PRE
                           : IN_X | IN_DELTA | IN_W_POST | IN_SCALE | IN_W_PRE);
    head_centroid_case(T_Q6_K, T_BF16, 32, 128, 32, 64, 256, IN_X | IN_W_PRE);         // all centroids: equals head
    head_centroid_case(T_Q8_0, T_F16, 256, 16, 32, 512, 256, IN_X | IN_W_PRE);
    head_centroid_case(T_BF16, T_F32, 300, 3, 5, 15, 1027, IN_X | IN_W_PRE);           // odd sizes
    head_centroid_case(T_Q4_0, T_Q4_0, 7, 1, 3, 1, 1056, IN_X | IN_W_PRE);
}

static void test_logprob(void) {
    static const int sizes[] = { 1, 77, 4000 };
    for (int k = 0; k < 6; k++) {
        const int vocab = sizes[k % 3], n = 9;
        if (!CASE("logprob", "vocab %d, case %d", vocab, k)) continue;
        float *logits = floats(n * vocab, k < 3 ? 8 : 80, k < 3 ? 0 : 500);    // exp alone would overflow
        int32_t *ids = keep(n, sizeof *ids);
        Expect e = expect(n, 1);
        for (int r = 0; r < n; r++) {
            float *z = logits + r * vocab;
            ids[r] = r == 1 ? vocab - 1 : (int32_t)rnd((uint32_t)vocab);
            if (vocab > 1 && r == 2) for (int i = 0; i < vocab; i += 2) {
                z[i] = -INFINITY;
                ids[r] = 1;
            }
        }
        reference_ops()->logprob(&(Logprob){ .n_rows = n, .vocab = vocab, .logits = logits, .ids = ids,
                                             .out = e.want });
        for (int r = 0; r < n; r++) e.bound[r] = (float)TOL_LOGPROB * fmaxf(1, fabsf(e.want[r]));
        float *out = room_f("out", n);
        op->logprob(&(Logprob){ .n_rows = n, .vocab = vocab, .logits = put_f("logits", logits, n * vocab),
                                .ids = put("ids", ids, (size_t)n, sizeof *ids), .out = out });
        compare("out", fetch_f(out, n), 1, e.want, e.bound, n, 1);
        ids[0] = -1;
        ids[1] = vocab;
        op->logprob(&(Logprob){ .n_rows = n, .vocab = vocab, .logits = put_f("logits", logits, n * vocab),
                                .ids = put("ids", ids, (size_t)n, sizeof *ids), .out = out });
        const float *got = fetch_f(out, n);
        CHECK(isnan(got[0]) && isnan(got[1]), "%s: out: got %g and %g for ids outside the vocabulary, want NaN", now,
              (double)got[0], (double)got[1]);
        sweep();
    }
}

// Rows of a chain, a tree and another session, in a view: greedy, from all, and from the best; masks, bias, counts,
// ties.
static void sample_rows(void) {
    static const SampleParams kinds[] = { { .temperature = 0, .top_p = 1, .repeat = 1 },
                                          { .temperature = -1, .top_k = 5, .top_p = 0.5f, .repeat = 1.2f },
                                          { .temperature = 1, .top_p = 1, .repeat = 1 },
                                          { .temperature = 1, .top_k = 500, .top_p = 0.95f, .repeat = 1,
                                            .presence = 0.5f },
                                          { .temperature = 1.5f, .top_k = 1500, .top_p = 0.9f, .min_p = 0.05f,
                                            .repeat = 1.1f, .frequency = 0.1f } };
    enum { N_KINDS = sizeof kinds / sizeof *kinds };
    for (int k = 0; k < 8 * N_KINDS; k++) {
        const int vocab = k / N_KINDS % 2 ? 3000 : 77, words = (vocab + 31) / 32;
        const bool masked = k / N_KINDS & 2, counted = k / N_KINDS & 4;
        CASE("sample", "vocab %d, kind %d, mask %d, bias and counts %d", vocab, k % N_KINDS, masked, counted);
        TestStep *s = keep(1, sizeof *s);
        add_chain(s, 1, 9, 5);
        add_tree(s, 0, 3, 17, 2);
        add_chain(s, 2, 200, 12);
        random_tokens(s, vocab);
        const int n = s->n_rows, first = 2;
        float *logits = floats(n * vocab, 3, 0), *bias = floats(3 * vocab, 0.5, 0);
        uint32_t *mask = keep(n * words, sizeof *mask);
        int32_t *counts = keep(3 * vocab, sizeof *counts), *want = keep(n, sizeof *want);
        for (int i = 0; i < 3 * vocab; i++) counts[i] = max_int(0, (int)rnd(8) - 5);
        for (int r = 0; r < n; r++) {
            float *z = logits + r * vocab;
            z[rnd((uint32_t)vocab)] = r % 2 ? 5.0f : 4.0f;         // ties of the largest, also at the ends
            z[rnd((uint32_t)vocab)] = z[vocab - 1] = 5;
            if (r % 3 == 0) z[0] = 5;
            if (r == 4) for (int i = 0; i < vocab; i++) z[i] = i % 2 ? -INFINITY : -7;
            if (r == 5) for (int i = 0; i < vocab; i++) z[i] = -0.5f;
            for (int w = 0; w < words; w++) mask[r * words + w] = rnd(1u << 31) << 1 | rnd(2);
            if (r == 7) {                                          // only one token is allowed
                for (int w = 0; w < words; w++) mask[r * words + w] = 0;
                mask[r * words + (vocab - 2) / 32] = 1u << ((vocab - 2) % 32);
            }
        }
        SampleParams params[3];
        for (int i = 0; i < 3; i++) {
            params[i] = kinds[(k + i) % N_KINDS];
            params[i].seed = (uint64_t)(k + 7 * i);
        }
        const Run run = { first, n - first };
        const Batch all = put_batch(s), batch = batch_from(all, run), host = batch_from(host_batch(s), run);
        int32_t *out = room("out", (size_t)run.n, sizeof(int32_t));
        logits += first * vocab;
        mask += first * words;
        reference_ops()->sample(&(Sample){ .batch = &host, .vocab = vocab, .logits = logits, .params = params,
                                           .mask = masked ? mask : NULL, .bias = counted ? bias : NULL,
                                           .counts = counted ? counts : NULL, .step_rows = s->rows, .out = want });
        op->sample(&(Sample){ .batch = &batch, .vocab = vocab, .logits = put_f("logits", logits, run.n * vocab),
                              .params = put("params", params, 3, sizeof *params),
                              .mask = masked ? put("mask", mask, (size_t)(run.n * words), sizeof *mask) : NULL,
                              .bias = counted ? put_f("bias", bias, 3 * vocab) : NULL,
                              .counts = counted ? put("counts", counts, (size_t)(3 * vocab), sizeof *counts) : NULL,
                              .step_rows = counted ? all.rows : NULL, .out = out });
        same_ints("out", fetch(out, (size_t)run.n, sizeof(int32_t)), want, run.n);
        sweep();
    }
}

static void sample_refused(void) {
    const int vocab = 77, n = 4;
    for (int k = 0; k < 2; k++) {
        CASE("sample", "rows without an answer, temperature %d", k);
        TestStep *s = keep(1, sizeof *s);
        add_chain(s, 0, 3, n);
        const Batch batch = put_batch(s);
        float *logits = floats(n * vocab, 1, 0);
        // 3 words per row; bits after the vocabulary are ignored
        uint32_t mask[12] = { 0, 0, 1, ~0u, ~1u, ~0u, 0, 0, 0, 4, 0, 0 };
        mask[8] = 1u << 20;
        logits[vocab + 32] = NAN;                      // row 1: the token is masked, but its NaN counts
        const SampleParams params = { .seed = 5, .temperature = (float)k, .top_p = 1, .repeat = 1 };
        int32_t *out = room("out", (size_t)n, sizeof(int32_t));
        op->sample(&(Sample){ .batch = &batch, .vocab = vocab, .logits = put_f("logits", logits, n * vocab),
                              .params = put("params", &params, 1, sizeof params),
                              .mask = put("mask", mask, 12, sizeof *mask), .out = out });
        same_ints("out", fetch(out, (size_t)n, sizeof(int32_t)), (int32_t[]){ 64, -1, -1, 2 }, n);
        sweep();
    }
}

static void test_sample(void) {
    sample_rows();
    sample_refused();
}

// The parent of row j of a segment: the last of its proper ancestors. -1: none.
static int parent_row(const TestStep *s, const Segment *seg, int j) {
    const Row *rows = s->rows + seg->first;
    if (seg->kind == SEG_CHAIN) return j - 1;
    for (int i = 0; i < j; i++)
        if (rows[i].ancestors == (rows[j].ancestors ^ (uint64_t)1 << j)) return i;
    return -1;
}

// A segment of a random kind, and how many of its last rows are output rows.
static int add_drafts(TestStep *s, int seq) {
    const int kind = (int)rnd(6), n = 1 + (int)rnd(STEP_ROWS), all = rnd(4) ? n : 1 + (int)rnd((uint32_t)n);
    if (kind == 0) add_chain(s, seq, 10, STEP_ROWS + 1 + (int)rnd(30));
    else if (kind < 3) add_chain(s, seq, 10, n);
    else add_tree(s, seq, 10, n, (int)rnd(5));
    return rnd(8) == 0 ? 0 : kind == 0 ? 1 + (int)rnd(3) : all;
}

// The expected result of verify_walk for segment i.
static void walk_by_hand(const TestStep *s, int i, const Row *kept, int n_out, const int32_t *chosen, int32_t *path,
                         int32_t end[3]) {
    const Segment *seg = &s->segs[i];
    int of_row[STEP_ROWS + 40], n = 0, at = -1, next = seg->n;         // of_row: the output row of a row, or -1
    for (int j = 0; j < seg->n; j++) of_row[j] = -1;
    for (int k = 0; k < n_out; k++)
        if (kept[k].seg == i) of_row[kept[k].index] = k;
    while (n < seg->n && of_row[n] < 0) {
        path[n] = n;
        n++;
    }
    if (n < seg->n) next = n;
    while (next < seg->n) {
        path[n++] = next;
        at = of_row[next];
        for (next = 0; next < seg->n; next++)
            if (parent_row(s, seg, next) == kept[at].index && chosen[at] != -1 &&
                s->rows[seg->first + next].token == chosen[at]) break;
    }
    end[0] = n;
    end[1] = at;
    end[2] = at < 0 ? 0 : chosen[at];
}

static void test_verify_walk(void) {
    for (int k = 0; k < 200; k++) {
        TestStep *s = keep(1, sizeof *s);
        Row *kept = keep(MAX_SEGS * STEP_ROWS, sizeof *kept);
        int32_t *chosen = keep(MAX_SEGS * STEP_ROWS, sizeof *chosen),
            *want_path = keep(MAX_SEGS * STEP_ROWS + 40, sizeof *want_path);
        const int n_segs = 1 + k % MAX_SEGS;
        int n_out = 0, n_trees = 0;
        for (int i = 0; i < n_segs; i++) {
            const int n = add_drafts(s, n_segs - 1 - i);
            const Segment *seg = &s->segs[i];
            n_trees += seg->kind == SEG_TREE;
            for (int j = 0; j < seg->n; j++) s->rows[seg->first + j].token = (int32_t)rnd(4) - 1;
            for (int j = seg->n - n; j < seg->n; j++) {
                const int child = j + 1 + (int)rnd(3);                 // most sampled tokens are those of a later row
                chosen[n_out] = child < seg->n && rnd(8) ? s->rows[seg->first + child].token : (int32_t)rnd(4) - 1;
                kept[n_out] = s->rows[seg->first + j];
                kept[n_out++].token = 0;
            }
        }
        CASE("verify_walk", "case %d: %d segments, %d rows, %d kept", k, n_segs, s->n_rows, n_out);
        const Batch batch = put_batch(s);
        VerifyWalk o = { .batch = &batch, .out_rows = n_out ? put("out_rows", kept, (size_t)n_out, sizeof *kept) : NULL,
                         .n_out = n_out, .chosen = n_out ? put("chosen", chosen, (size_t)n_out, sizeof *chosen) : NULL,
                         .n_accept = room("n_accept", (size_t)n_segs, sizeof(int32_t)),
                         .path = n_trees ? room("path", (size_t)n_segs * STEP_ROWS, sizeof(int32_t)) : NULL,
                         .last = room("last", (size_t)n_segs, sizeof(int32_t)), .next = room("next", (size_t)n_segs,
                                 sizeof(int32_t)) };
        op->verify_walk(&o);
        const int32_t *path = n_trees ? fetch(o.path, (size_t)n_segs * STEP_ROWS, sizeof(int32_t)) : NULL;
        const int32_t *got[3] = { fetch(o.n_accept, (size_t)n_segs, sizeof(int32_t)), fetch(o.last, (size_t)n_segs,
                sizeof(int32_t)), fetch(o.next, (size_t)n_segs, sizeof(int32_t)) };
        for (int i = 0; i < n_segs; i++) {
            int32_t want[3];
            walk_by_hand(s, i, kept, n_out, chosen, want_path, want);
            same_ints("n_accept", &got[0][i], &want[0], 1);
            same_ints("last", &got[1][i], &want[1], 1);
            same_ints("next", &got[2][i], &want[2], 1);
            const bool tree = s->segs[i].kind == SEG_TREE;
            for (int j = 0; !tree && j < STEP_ROWS; j++) want_path[j] = -1;            // unchanged
            if (path) same_ints("path", path + i * STEP_ROWS, want_path, tree ? want[0] : STEP_ROWS);
        }
        sweep();
    }
}

// ---- images ---------------------------------------------------------------------------------------------------------

static void test_clamp(void) {
    static const Range ranges[] = { { -0.5f, 0.25f }, { -INFINITY, INFINITY }, { 0, INFINITY }, { -INFINITY, -1 } };
    for (int k = 0; k < 8; k++) {
        const int rows = k % 2 ? 65 : 3, cols = k < 4 ? 176 : 1001;
        const bool in_place = k & 4;
        if (!CASE("clamp", "%d rows, cols %d, case %d", rows, cols, k)) continue;
        const size_t n = (size_t)(rows * cols);
        float *x = floats(n, 2, 0), *want = keep(n, sizeof *want);
        x[5] = NAN;
        x[6] = INFINITY;
        Clamp o = { .n_rows = rows, .cols = cols, .x = x, .range = ranges[k % 4], .out = want };
        reference_ops()->clamp(&o);
        o.out = in_place ? change_f("x", x, n) : room_f("out", n);
        o.x = in_place ? o.out : put_f("x", x, n);
        op->clamp(&o);
        const float *got = fetch_f(o.out, n);
        CHECK(isnan(got[5]) && isnan(want[5]), "%s: got %g for NaN, want NaN", now, (double)got[5]);
        same_bits("out", got + 6, want + 6, n - 6, sizeof(float));
        same_bits("out", got, want, 5, sizeof(float));
        sweep();
    }
}

static void test_gelu_product(void) {
    for (int k = 0; k < 4; k++) {
        const int rows = k % 2 ? 70 : 3, cols = k < 2 ? 160 : 333;
        if (!CASE("gelu_product", "%d rows, cols %d", rows, cols)) continue;
        const size_t n = (size_t)(rows * cols);
        const float *gate = floats(n, 6, 0), *up = floats(n, 3, 0);
        Expect e = expect(rows, cols);
        GeluProduct o = { .n_rows = rows, .cols = cols, .gate = gate, .up = up, .out = e.want };
        reference_ops()->gelu_product(&o);
        for (size_t i = 0; i < n; i++) e.bound[i] = (float)TOL_ACT * fabsf(gate[i] * up[i]) + 1e-9f;
        o.out = k % 2 ? room_f("out", n) : change_f("gate", gate, n);
        o.gate = k % 2 ? put_f("gate", gate, n) : o.out;
        o.up = put_f("up", up, n);
        op->gelu_product(&o);
        compare("out", fetch_f(o.out, n), (size_t)cols, e.want, e.bound, rows, cols);
        sweep();
    }
}

static void test_layer_norm(void) {
    static const int widths[] = { 6912, 32, 3840, 77 };
    for (int k = 0; k < 8; k++) {
        const int rows = k % 3 ? 5 : 66, cols = widths[k % 4];
        const bool in_place = k & 1;
        if (!CASE("layer_norm", "%d rows, cols %d, case %d", rows, cols, k)) continue;
        const size_t n = (size_t)(rows * cols), wide = (size_t)cols;
        float *x = floats(n, 1, k < 4 ? 0.5 : 30), *add = floats(wide, 1, 0), *add_rows = floats(n, 1, 0);
        const float *w = floats(wide, 1, 1), *bias = floats(wide, 1, 0);
        for (int i = 0; i < cols; i++) x[i] = 3;       // row 0: no variance, unless something is added
        Expect e = expect(rows, cols);
        LayerNorm o = { .n_rows = rows, .cols = cols, .x = x, .add = k & 2 ? add : NULL,
                        .add_rows = k & 4 ? add_rows : NULL, .w = w, .bias = bias, .eps = 1e-5f, .out = e.want };
        reference_ops()->layer_norm(&o);
        for (size_t i = 0; i < n; i++)                 // the mean that is subtracted, over the deviation
            e.bound[i] = (float)(TOL_NORM * (k < 4 ? 8 : 200) * (1 + fabsf(e.want[i])));
        for (int i = 0; i < cols && !(k & 6); i++) e.bound[i] += 1e-3f;
        o.out = in_place ? change_f("x", x, n) : room_f("out", n);
        o.x = in_place ? o.out : put_f("x", x, n);
        if (o.add) o.add = put_f("add", add, wide);
        if (o.add_rows) o.add_rows = put_f("add_rows", add_rows, n);
        o.w = put_f("w", w, wide);
        o.bias = put_f("bias", bias, wide);
        op->layer_norm(&o);
        compare("out", fetch_f(o.out, n), wide, e.want, e.bound, rows, cols);
        sweep();
    }
}

static void test_rope_2d(void) {
    static const int sizes[][2] = { { 2, 64 }, { 16, 72 }, { 12, 64 }, { 1, 128 }, { 3, 8 } };     // heads, head_dim
    for (int k = 0; k < 10; k++) {
        const int rows = k % 2 ? 67 : 3, heads = sizes[k % 5][0], hd = sizes[k % 5][1];
        if (!CASE("rope_2d", "%d rows, %d heads of %d", rows, heads, hd)) continue;
        const size_t n = (size_t)(rows * heads * hd);
        float *const v[3] = { floats(n, 2, 0), floats(n, 2, 0), floats(n, 2, 0) };
        const float *w_q = floats((size_t)hd, 1, 1), *w_k = floats((size_t)hd, 1, 1);
        int32_t *pos = keep((size_t)rows * 2, sizeof *pos);
        double *inv_freq = keep((size_t)hd / 4, sizeof *inv_freq);
        for (int r = 0; r < rows; r++) {
            pos[2 * r] = r == 2 ? 3359 : (int32_t)rnd(60);
            pos[2 * r + 1] = r == 1 ? 3359 : (int32_t)rnd(60);
        }
        for (int i = 0; i < hd / 4; i++) inv_freq[i] = pow(100, -4.0 * i / hd);
        Rope2d o = { .n_rows = rows, .n_heads = heads, .head_dim = hd, .w_q = put_f("w_q", w_q, (size_t)hd),
                     .w_k = put_f("w_k", w_k, (size_t)hd), .pos = put("pos", pos, (size_t)rows * 2, sizeof *pos),
                     .inv_freq = put("inv_freq", inv_freq, (size_t)hd / 4, sizeof *inv_freq), .eps = 1e-6f };
        o.q = change_f("q", v[0], n);
        o.k = change_f("k", v[1], n);
        o.v = change_f("v", v[2], n);
        op->rope_2d(&o);
        const float *const got[3] = { o.q, o.k, o.v };
        reference_ops()->rope_2d(&(Rope2d){ .n_rows = rows, .n_heads = heads, .head_dim = hd, .q = v[0], .k = v[1],
                                            .v = v[2], .w_q = w_q, .w_k = w_k, .pos = pos, .inv_freq = inv_freq,
                                            .eps = 1e-6f });
        for (int i = 0; i < 3; i++) {
            Expect e = expect(rows * heads, hd);
            memcpy(e.want, v[i], n * sizeof *e.want);
            set_norm_bounds(&e, n, hd);
            compare(i == 0 ? "q" : i == 1 ? "k" : "v", fetch_f(got[i], n), (size_t)hd, e.want, e.bound, rows * heads,
                    hd);
        }
        sweep();
    }
}

// Scores of up to about `size`: from nearly equal weights to one key that takes all.
static void attend_all_case(int rows, int keys, int heads, int hd, double size) {
    if (!CASE("attend_all", "%d rows, %d keys, %d heads of %d, scores of %g", rows, keys, heads, hd, size)) return;
    const int cols = heads * hd;
    const size_t n = (size_t)(rows * cols), n_kv = (size_t)(keys * cols);
    const double deviation = sqrt(size * 3 / hd);
    const float *q = floats(n, deviation, 0), *k = floats(n_kv, deviation, 0), *v = floats(n_kv, 3, 0.5);
    Expect e = expect(rows, cols);
    AttendAll o = { .n_rows = rows, .n_keys = keys, .n_heads = heads, .head_dim = hd, .q = q, .k = k, .v = v,
                    .scale = 0.75f, .out = e.want };
    reference_ops()->attend_all(&o);
    const double exact = TOL_ATTEND * (1 + size), rounded = TOL_ATTEND_16 * (1 + size / 8);
    for (size_t i = 0; i < n; i++) e.bound[i] = (float)(3.5 * (op->exact_prompts ? exact : rounded));
    o.q = put_f("q", q, n);
    o.k = put_f("k", k, n_kv);
    o.v = put_f("v", v, n_kv);
    o.out = room_f("out", n);
    op->attend_all(&o);
    compare("out", fetch_f(o.out, n), (size_t)cols, e.want, e.bound, rows, cols);
    sweep();
}

static void test_attend_all(void) {
    static const int sizes[][2] = { { 2, 64 }, { 2, 72 }, { 1, 128 }, { 3, 8 }, { 1, 80 } };
    static const int rows[] = { 130, 1, 64, 65, 9, 200 };
    for (int k = 0; k < 5; k++)
        for (int r = 0; r < 6; r++) {
            const int keys = r % 2 ? rows[r] : rows[(r + k) % 6];      // 1, 3, 5: as many as rows
            attend_all_case(rows[r], keys, sizes[k][0], sizes[k][1], r % 3 == 0 ? 1 : r % 3 * 8);
        }
}

static void test_pool(void) {
    for (int k = 0; k < 8; k++) {
        const int side = k % 3 == 2 ? 2 : 3, w = side * (k % 2 ? 1 : 7), h = side * (k % 3 ? 5 : 2);
        const int cols = k % 2 ? 72 : 333, rows = w * h / (side * side);
        const bool standardised = k & 4;
        if (!CASE("pool", "%d x %d by %d, cols %d, std %d", w, h, side, cols, standardised)) continue;
        const size_t n = (size_t)(w * h * cols), wide = (size_t)cols;
        const float *x = floats(n, 2, 0), *sub = floats(wide, 90000, 0), *mul = floats(wide, 1, 0);
        Expect e = expect(rows, cols);
        Pool o = { .w = w, .h = h, .side = side, .cols = cols, .x = x, .factor = 12, .sub = standardised ? sub : NULL,
                   .mul = standardised ? mul : NULL, .out = e.want };
        reference_ops()->pool(&o);
        for (size_t i = 0; i < (size_t)rows * wide; i++)
            e.bound[i] = 4e-7f * (24 + (standardised ? fabsf(sub[i % wide]) : 0));
        o.x = put_f("x", x, n);
        if (standardised) o.sub = put_f("sub", sub, wide), o.mul = put_f("mul", mul, wide);
        o.out = room_f("out", (size_t)rows * wide);
        op->pool(&o);
        compare("out", fetch_f(o.out, (size_t)rows * wide), wide, e.want, e.bound, rows, cols);
        sweep();
    }
}

// ---- all ------------------------------------------------------------------------------------------------------------

// only: names of the operations to test, NULL after the last; none: all.
static void run_all(const Ops *table, char **only) {
    op = table;
    const Limits lim = { .max_rows = MAX_STEP, .max_cols = 10752, .max_experts = 8, .vocab = 4096,
                         .host_bytes = all_in_host ? 64 << 20 : 0 };
    op->init(&lim);
    reference_ops()->init(&(Limits){ .max_rows = MAX_STEP, .max_cols = 16384, .max_experts = 8, .vocab = 16384 });
    size_t free_bytes = 1, total = 0;
    op->memory(&free_bytes, &total);
    CHECK(total && free_bytes <= total, "%s memory: got %zu bytes free of %zu", op->name, free_bytes, total);
    const struct { const char *name; bool filled; void (*test)(void); } tests[] = {
        { "embed", op->embed, test_embed }, { "ple_rows", op->ple_rows, test_ple_rows },
        { "matmul", op->matmul, test_matmul },
        { "route", op->route, test_route }, { "gate_up", op->gate_up, test_gate_up },
        { "expert_gate_up", op->expert_gate_up, test_expert_gate_up },
        { "expert_down", op->expert_down, test_expert_down }, { "ple_inject", op->ple_inject, test_ple_inject },
        { "close", op->close, test_close },
        { "gather_rows", op->gather_rows, test_gather_rows }, { "qkv_store", op->qkv_store, test_qkv_store },
        { "block_select", op->block_select, test_block_select }, { "attn_mass", op->attn_mass, test_attn_mass },
        { "attend", op->attend, test_attend },
        { "kv_commit", op->kv_commit, test_kv_commit }, { "kv_copy", op->kv_copy, test_kv_copy },
        { "head", op->head, test_head }, { "logprob", op->logprob, test_logprob },
        { "sample", op->sample, test_sample },
        { "verify_walk", op->verify_walk, test_verify_walk },
        { "head_centroid", op->head_centroid, test_head_centroid },
        { "pair", op->pair, test_pair },
        { "clamp", op->clamp, test_clamp }, { "gelu_product", op->gelu_product, test_gelu_product },
        { "layer_norm", op->layer_norm, test_layer_norm }, { "rope_2d", op->rope_2d, test_rope_2d },
        { "attend_all", op->attend_all, test_attend_all }, { "pool", op->pool, test_pool }
    };
    for (char **name = only; *name; name++) {
        bool known = false;
        for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) known |= strcmp(*name, tests[i].name) == 0;
        CHECK(known, "%s: expected the name of an operation of gemma4.h", *name);
    }
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) {
        const double start = seconds();
        char why[80];
        bool wanted = !*only;
        for (char **name = only; *name; name++) wanted |= strcmp(*name, tests[i].name) == 0;
        if (!wanted) continue;
        random_state = i + 1, n_cases = 0;             // so that each test's random numbers do not depend on the others
        snprintf(why, sizeof why, "%s has no %s", op->name, tests[i].name);
        if (tests[i].filled) tests[i].test();
        else SKIP(why);
        if (getenv("TEST_TIMES")) printf("%-16s %6.2f s\n", tests[i].name, seconds() - start);
    }
}

// parallel() processes every item of a job exactly once, before it returns, for any number of items and threads and any
// size of pieces; also in a child process, which has no other threads.
static int item_done[1000];

static void do_items(const void *task, int first, int end) {
    for (int i = first; i < end; i++) item_done[i] += *(const int *)task;
}

static void test_parallel(void) {
    for (int job = 0; job < 20000; job++) {
        const int n = job < 1000 ? job : 1 + job % 40, step = 1 + job % 7, one = 1;
        use_threads(1 + job % 4);
        memset(item_done, 0, sizeof item_done);
        parallel(n, step, do_items, &one);
        int bad = 0;
        for (int i = 0; i < 1000; i++) bad += item_done[i] != (i < n);
        if (bad || job % 100 == 0)
            CHECK(!bad, "parallel: job %d of %d items in pieces of %d: %d done wrongly", job, n, step, bad);
    }
    use_threads(3);
    const pid_t child = fork();
    if (!child) {
        memset(item_done, 0, sizeof item_done);
        parallel(1000, 1, do_items, &(int){ 1 });
        for (int i = 0; i < 1000; i++)
            if (item_done[i] != 1) _exit(1);
        _exit(0);
    }
    int status = 1;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && !status, "parallel: in a child process: status %d",
          status);
}

int main(int argc, char **argv) {
    take_card(&argc, argv);
#ifdef BACKEND_OPS
    if (argc > 1 && !strcmp(argv[1], "-" BACKEND_NAME)) {
        if (!getenv("LONG")) n_runs_100 = 5, every = 5;
        if (BACKEND_OPS()) run_all(BACKEND_OPS(), argv + 2);
        else SKIP("no device that " BACKEND_NAME " can use");
        return test_done("ops");
    }
#endif
    const bool plain = argc > 1 && strcmp(argv[1], "-plain") == 0;
    const bool cpu = !plain && (argc < 2 || strcmp(argv[1], "-cuda") != 0);
    const bool few = argc > 2 && strcmp(argv[2], "-few") == 0;
    char **only = argv + (cpu ? 1 : few ? 3 : 2);
    all_in_host = !cpu && *only && !strcmp(*only, "-host");
    only += all_in_host;
    const char *whole = getenv("LONG");
    if (!cpu && few) {                                 // chosen so that each kernel runs
        n_runs_100 = 5;
        every = plain ? 199 : all_in_host ? 11 : 23;
        attend_every = plain ? 123 : 22;
    } else if (cpu && (!whole || !strcmp(whole, "0"))) every = 5;
    if (argc == 1) {
        start_threads(3);
        test_parallel();
    }
    if (cpu) run_all(cpu_ops(), only);
    if (cpu) every = 1;
#ifdef USE_CUDA
    const Ops *gpu = plain ? plain_ops() : cuda_ops();
    if (gpu) run_all(gpu, only);
    if (gpu && cpu) every = 10, run_all(plain_ops(), only);
    if (!gpu) SKIP("no GPU: the CUDA backend's operations");
#else
    SKIP("built without CUDA: the CUDA backend's operations");
#endif
    return test_done("ops");
}
