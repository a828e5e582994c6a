/* test_ops.c - every operation of gemma4.h against a reference in double.
 *
 * run_all() takes a table of operations, so that each backend goes through the same cases: buffers are made with
 * op->reserve and filled and read with op->copy, weights are placed as the backend wants them. The references follow the
 * comments of gemma4.h and the block table of gguf.h; they share no code with gemma4.c or gguf.h.
 *
 *   matrix products   int8 activations are made by the contract's rule in f32, everything else is summed in double. Where
 *                     a norm precedes the product, the backend's y may differ from the reference in its last bits and a
 *                     rounding to int8 may go the other way: an element that lies that close to a tie widens the tolerance
 *                     by its own share, s * |w|, and no other element does
 *   rows              products, norms and experts run with 1 to 100 rows, attention with up to 200; a row alone
 *                     must give the bits it gives among 64 (contract 7)
 *   attention         softmax in double over the values as they are stored; slots that no row may see hold large values
 *   buffers           outputs start as NaN (all bits set) and have guards behind them; inputs must come back unchanged
 *
 * Arguments: the operations to test, for example `build/test_ops attend route`; none: all. -cuda before them: the CUDA backend
 * only; -cuda -few: without the 100 rows that cuBLAS multiplies, and less of the rest. TEST_TIMES=1 prints
 * seconds. */
#define TESTING
#include "../gemma4.c"
#include "test.h"
#include <sys/wait.h>

// Bounds on |got - want|. Where nothing is listed the bits must be equal: copies, q and s of an Act, stored cache rows
// against the checkpoint of the same row, choices.
#define TOL_PRODUCT 4e-6                // * sum |term|      products; both halves of a Q4_K term count
#define TOL_FACTOR  5e-7                // * |value|         roundings after a product: scale of a matrix, weight of an expert
#define TOL_NORM    2e-6                // * max |row|       norms, residual sums, rope, per-layer rows, router weights
#define TOL_ACT     1e-6                // * |argument|      GELU, SiLU; * cap: the cap of logits
#define TOL_EMBED   2.5e-7              // * |value|         two roundings
#define TOL_TINY    1e-7                // +                 cache rows of 16 bits near 0; else half a unit in the last place
#define TOL_ATTEND  2e-5                // * max |v| in sight, f32 caches; the CPU computes in f32 from every cache type
#define TOL_ATTEND_16 4e-3              // * max |v| in sight, other backends on caches of 16 bits: q and p may be rounded
#define TOL_PROMPT  0x1p-7              // * sum |term|      instead of TOL_PRODUCT: other backends, more than STEP_ROWS rows (bf16)
#define TOL_LOGPROB 1e-6                // * max(1, |value|)   logprob, logsumexp
#define CHI_Z       4.75                // standard deviations: a right sampler fails once in a million cases

static const Ops *op;
static char now[240];                   // "backend operation: case", the head of every message

#define CASE(name, ...) case_is(name, __VA_ARGS__)
__attribute__((format(printf, 2, 3))) static void case_is(const char *name, const char *fmt, ...) {
    int n = snprintf(now, sizeof now, "%s %s: ", op->name, name);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(now + n, sizeof now - (size_t)n, fmt, ap);
    va_end(ap);
}

static bool on_cpu(void) { return strcmp(op->name, "cpu") == 0; }

// The CPU backend runs on one thread here, which is faster where other programs want the cores too, except for the 64 rows
// that come first in most cases: so their bits are also those of another number of threads.
static void set_threads(int n_rows) {
    start_threads(3);
    pool.n_threads = n_rows == 64 ? 3 : 1;
}

// ---- memory ---------------------------------------------------------------------------------------------------------
// Everything lives until sweep(), which ends a case: it looks at guards and inputs, then frees all.

enum { GUARD = 64, MAX_BUFFERS = 20000 };

typedef struct {
    char  *dev;
    void  *src;                         // inputs: what was put there, and must still be there; else NULL
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
        bool whole = memcmp(image + b->bytes, guard, GUARD) == 0, same = !b->src || memcmp(image, b->src, b->bytes) == 0;
        if (!whole || !same)
            CHECK(false, "%s: %s: got %s, want %s", now, b->name, whole ? "a changed input" : "a write behind its end",
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

// got (rows, stride) against want and bound (rows, cols); one message for the worst element. NaN is never near.
static void compare(const char *what, const float *got, size_t stride, const double *want, const double *bound, int rows,
                    int cols) {
    int bad = 0, at_r = 0, at_i = 0;
    double worst = -1;
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < cols; i++) {
            const size_t j = (size_t)r * (size_t)cols + (size_t)i;
            const double off = fabs((double)got[(size_t)r * stride + (size_t)i] - want[j]);
            if (off <= bound[j]) continue;
            bad++;
            const double ratio = isnan(off) ? INFINITY : off / (bound[j] + 1e-300);
            if (ratio > worst) worst = ratio, at_r = r, at_i = i;
        }
    const size_t j = (size_t)at_r * (size_t)cols + (size_t)at_i;
    CHECK(!bad, "%s: %s (%d, %d): got %.9g, want %.9g, tolerance %.2g; %d of %d differ", now, what, at_r, at_i,
          (double)got[(size_t)at_r * stride + (size_t)at_i], want[j], bound[j], bad, rows * cols);
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

// (rows, cols) like activations are: groups of 32 of very different size, some of them zero or as good as that.
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

// ---- numbers of 16 bits, from their definition ----------------------------------------------------------------------

static double value_f16(unsigned h) {
    const int e = h >> 10 & 31, m = h & 1023;
    const double v = e == 31 ? (m ? NAN : INFINITY) : e ? ldexp(1024 + m, e - 25) : ldexp(m, -24);
    return h & 0x8000 ? -v : v;
}

static double value_bf16(unsigned h) {
    const int e = h >> 7 & 255, m = h & 127;
    const double v = e == 255 ? (m ? NAN : INFINITY) : e ? ldexp(128 + m, e - 134) : ldexp(m, -133);
    return h & 0x8000 ? -v : v;
}

// The nearest number with `bits` mantissa bits and exponents from 1 - bias on, ties to even; no overflow here.
static unsigned encode_16(double x, int bits, int bias) {
    const double ax = fabs(x);
    const unsigned sign = signbit(x) ? 0x8000 : 0;
    if (ax < ldexp(1, 1 - bias)) return sign | (unsigned)rint(ldexp(ax, bits + bias - 1));
    const int e = ilogb(ax);
    return sign | (((unsigned)(e + bias) << bits) + (unsigned)rint(ldexp(ax, bits - e)) - (1u << bits));
}

// ---- matrices -------------------------------------------------------------------------------------------------------

typedef struct {
    Tensor   t;
    uint8_t *bytes;                     // as in a file
    double  *v, *a;                     // (n, rows, cols) values and what counts as |w|: Q4_K adds the sizes of its two parts
    float   *factor;                    // (n) what t.scale holds, or NULL
} Matrix;

static const DType all_types[] = { T_F32, T_F16, T_BF16, T_Q8_0, T_Q4_0, T_Q5_0, T_Q4_K, T_Q6_K, T_Q4_1, T_Q5_1, T_Q2_K, T_Q3_K,
                                   T_Q5_K, T_IQ4_NL, T_IQ4_XS, T_MXFP4, T_NVFP4 };
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
        b[80] = (uint8_t)d, b[81] = (uint8_t)((d | 5 << 10) >> 8 & 0x7f);
        b[82] = (uint8_t)d_min, b[83] = (uint8_t)((d_min | 5 << 10) >> 8 & 0x7f);
        return;
    default:     b[208] = (uint8_t)d; b[209] = (uint8_t)((d | 1 << 10) >> 8); return;
    }
    b[0] = (uint8_t)d;
    b[1] = (uint8_t)(d >> 8);
    if (t == T_Q4_K || t == T_Q5_K || t == T_Q4_1 || t == T_Q5_1) b[2] = (uint8_t)d_min, b[3] = (uint8_t)(d_min >> 8);
}

// Values of one block, and their sizes (gguf.h, BLOCKS). The rarer formats take their values from gguf.h itself, which
// test_blocks holds against golden ones; where those have a minimum, the size of both parts is at most three times the largest.
static void decode_block(DType t, const uint8_t *b, double *v, double *a) {
    const unsigned h = b[0] | (unsigned)b[1] << 8;
    const double d = value_f16(h);
    const int n = block_elems(t);
    float f;
    switch (t) {
    case T_F32:  memcpy(&f, b, 4); v[0] = (double)f; break;
    case T_F16:  v[0] = d; break;
    case T_BF16: v[0] = value_bf16(h); break;
    case T_Q8_0: for (int i = 0; i < 32; i++) v[i] = d * (int8_t)b[2 + i]; break;
    case T_Q4_0: for (int i = 0; i < 32; i++) v[i] = d * ((i < 16 ? b[2 + i] & 15 : b[2 + i - 16] >> 4) - 8); break;
    case T_Q5_0:
        for (int i = 0; i < 32; i++) {
            const int code = (i < 16 ? b[6 + i] & 15 : b[6 + i - 16] >> 4) + 16 * (b[2 + i / 8] >> (i % 8) & 1);
            v[i] = d * (code - 16);
        }
        break;
    case T_Q4_K: {
        const double d_min = value_f16(b[2] | (unsigned)b[3] << 8);
        const uint8_t *s = b + 4, *q = b + 16;
        for (int i = 0; i < 256; i++) {
            const int g = i / 32, code = g % 2 ? q[g / 2 * 32 + i % 32] >> 4 : q[g / 2 * 32 + i % 32] & 15;
            const int sc = g < 4 ? s[g] & 63 : (s[g + 4] & 15) + (s[g - 4] >> 6) * 16;
            const int mn = g < 4 ? s[g + 4] & 63 : (s[g + 4] >> 4) + (s[g] >> 6) * 16;
            v[i] = d * sc * code - d_min * mn;
            a[i] = fabs(d * sc * code) + fabs(d_min * mn);
        }
        return;
    }
    default: {
        float values[256], top = 0;
        const bool has_min = t == T_Q4_1 || t == T_Q5_1 || t == T_Q2_K || t == T_Q5_K;
        gguf_dequantize((int)t, b, values, (size_t)n);
        for (int i = 0; i < n; i++) v[i] = (double)values[i], top = fmaxf(top, fabsf(values[i]));
        for (int i = 0; i < n; i++) a[i] = has_min ? 3 * (double)top : fabs(v[i]);
        return;
    }
    case T_Q6_K: {
        const double d6 = value_f16(b[208] | (unsigned)b[209] << 8);
        for (int i = 0; i < 256; i++) {
            const int half = i / 128, k = i % 128 / 32, l = i % 32, low = b[64 * half + 32 * (k % 2) + l];
            const int code = (k < 2 ? low & 15 : low >> 4) + 16 * (b[128 + 32 * half + l] >> (2 * k) & 3);
            v[i] = d6 * (int8_t)b[192 + i / 16] * (code - 32);
        }
    }
    }
    for (int i = 0; i < n; i++) a[i] = fabs(v[i]);
}

static Matrix random_matrix(DType type, int n, int rows, int cols) {
    const size_t blocks = (size_t)n * (size_t)rows * (size_t)cols / (size_t)block_elems(type);
    Matrix w = { .t = { .type = type, .rows = rows, .cols = cols, .n = n } };
    if (cols % block_elems(type)) die("test_ops: %s of %d columns", type_name(type), cols);
    w.bytes = keep(blocks * (size_t)block_bytes(type), 1);
    for (size_t i = 0; i < blocks; i++) random_block(type, w.bytes + i * (size_t)block_bytes(type));
    return w;
}

// Decodes the bytes and hands them to the backend.
static void place(Matrix *w) {
    const size_t blocks = (size_t)w->t.n * (size_t)w->t.rows * (size_t)w->t.cols / (size_t)block_elems(w->t.type);
    const size_t elems = (size_t)block_elems(w->t.type);
    w->v = keep(blocks * elems, sizeof(double));
    w->a = keep(blocks * elems, sizeof(double));
    for (size_t i = 0; i < blocks; i++)
        decode_block(w->t.type, w->bytes + i * (size_t)block_bytes(w->t.type), w->v + i * elems, w->a + i * elems);
    w->t.data = w->bytes;
    const size_t bytes = op->weight_bytes(&w->t);
    op->upload(&w->t, bytes ? room("weights", bytes, 1) : NULL);
    if (w->factor) w->t.scale = put_f("scale", w->factor, (size_t)w->t.n);
}

static Matrix matrix(DType type, int n, int rows, int cols) {
    Matrix w = random_matrix(type, n, rows, cols);
    place(&w);
    return w;
}

static Matrix table(DType type, int rows, int cols, bool in_host) {         // rows are gathered, never multiplied
    Matrix w = random_matrix(type, 1, rows, cols);
    w.t.in_host = in_host;
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
    int     cols;
    double *z[2];                       // what matrices of floats and quantised ones are multiplied with
    double *t[2];                       // what an element of |w| adds to the tolerance
    double *y, *x;                      // y and x' of In
    double *y_bound, *x_bound;
} Input;

static double largest(const double *v, int n) {
    double m = 0;
    for (int i = 0; i < n; i++) m = fabs(v[i]) > m ? fabs(v[i]) : m;
    return m;
}

// out = w * u / rms(u); w NULL: no weight.
static void ref_norm(double *out, const double *u, const float *w, int n, double eps) {
    double ss = 0;
    for (int i = 0; i < n; i++) ss += u[i] * u[i];
    const double scale = 1 / sqrt(ss / n + eps);
    for (int i = 0; i < n; i++) out[i] = (w ? (double)w[i] : 1) * u[i] * scale;
}

// Contract 6, in f32; x is finite.
static float ref_group(const float *x, int8_t *q) {
    float max = 0;
    for (int i = 0; i < 32; i++) max = fabsf(x[i]) > max ? fabsf(x[i]) : max;
    const bool zero = max < ldexpf(1, -120);
    const float inv = zero ? 0 : 127 / max;
    for (int i = 0; i < 32; i++) q[i] = zero ? 0 : (int8_t)rintf(x[i] * inv);
    return zero ? 0 : max / 127;
}

// y (cols) as both kinds of matrix see it, when it is known to +-near.
static void ref_forms(Input *in, size_t at, int cols, const double *y, double near) {
    for (int i = 0; i < cols; i++) {
        in->z[AS_F32][at + (size_t)i] = y[i];
        in->t[AS_F32][at + (size_t)i] = TOL_PRODUCT * fabs(y[i]) + near;
    }
    for (int g = 0; cols % 32 == 0 && g < cols / 32; g++) {
        float x[32];
        int8_t q[32];
        for (int i = 0; i < 32; i++) x[i] = (float)y[g * 32 + i];
        const double s = (double)ref_group(x, q), max = 127 * s, unsure = max > 0 ? 2 * near * 127 / max : 0;
        for (int i = 0; i < 32; i++) {
            const size_t j = at + (size_t)(g * 32 + i);
            const double exact = max > 0 ? (double)x[i] * 127 / max : 0, to_tie = fabs(exact - floor(exact) - 0.5);
            in->z[AS_INT8][j] = s * q[i];
            const double size = s * abs(q[i]);
            in->t[AS_INT8][j] = TOL_PRODUCT * size + (max > 0 ? size * near / max : 0) + (to_tie < unsure ? s : 0);
        }
    }
}

// The formulas above In in gemma4.h; pointers in `in` are to host memory.
static Input ref_in(const In *in, int rows, int cols) {
    const size_t n = (size_t)rows * (size_t)cols;
    Input out = { .cols = cols };
    double **all[] = { &out.z[0], &out.z[1], &out.t[0], &out.t[1], &out.y, &out.x, &out.y_bound, &out.x_bound };
    for (int i = 0; i < 8; i++) *all[i] = keep(n, sizeof(double));
    double *d = keep(cols, sizeof *d), *u = keep(cols, sizeof *u);
    const bool exact = !in->delta[0] && !in->delta[1] && in->scale == 1 && !in->w_pre;
    for (int r = 0; r < rows; r++) {
        const size_t at = (size_t)r * (size_t)cols;
        double *x = out.x + at, *y = out.y + at;
        if (in->act.f || in->act.q) {
            for (int i = 0; in->act.f && i < cols; i++) y[i] = (double)in->act.f[at + (size_t)i];
            if (in->act.f) ref_forms(&out, at, cols, y, 0);
            for (int i = 0; in->act.q && i < cols; i++) {
                out.z[AS_INT8][at + (size_t)i] = (double)in->act.s[(at + (size_t)i) / 32] * in->act.q[at + (size_t)i];
                out.t[AS_INT8][at + (size_t)i] = TOL_PRODUCT * fabs(out.z[AS_INT8][at + (size_t)i]);
            }
            continue;
        }
        for (int i = 0; i < cols; i++) d[i] = 0;
        for (int k = 0; k < 2; k++) {
            if (!in->delta[k]) continue;
            for (int i = 0; i < cols; i++) u[i] = (double)in->delta[k][at + (size_t)i];
            if (in->w_delta[k]) ref_norm(u, u, in->w_delta[k], cols, (double)in->eps);
            for (int i = 0; i < cols; i++) d[i] += u[i];
        }
        if ((in->delta[0] || in->delta[1]) && in->w_post) ref_norm(d, d, in->w_post, cols, (double)in->eps);
        // the largest sum |term| of x': what cancels is not lost from the tolerance
        double terms = 0;
        for (int i = 0; i < cols; i++) {
            const double xi = in->x ? (double)in->x[at + (size_t)i] : 0,
                         size = fabs((double)in->scale) * (fabs(xi) + fabs(d[i]));
            x[i] = y[i] = (double)in->scale * (xi + d[i]);
            terms = size > terms ? size : terms;
        }
        if (in->w_pre) ref_norm(y, x, in->w_pre, cols, (double)in->eps);
        const double x_max = largest(x, cols), x_near = exact ? 0 : TOL_NORM * terms;
        const double near = exact || x_max == 0 ? 0 : TOL_NORM * largest(y, cols) * (terms / x_max);
        for (int i = 0; i < cols; i++) out.y_bound[at + (size_t)i] = near, out.x_bound[at + (size_t)i] = x_near;
        ref_forms(&out, at, cols, y, near);
    }
    return out;
}

typedef struct { double v, bound; } Ref;

// Row i of matrix e times row r of the input. Not under sanitizers, where it would take a third of the time.
__attribute__((no_sanitize("address"), no_sanitize("undefined")))
static Ref product(const Matrix *w, int e, int i, const Input *in, size_t r) {
    const size_t cols = (size_t)w->t.cols, at = ((size_t)e * (size_t)w->t.rows + (size_t)i) * cols;
    const int form = takes_int8(w->t.type) ? AS_INT8 : AS_F32;
    const double *v = w->v + at, *a = w->a + at, *z = in->z[form] + r * cols, *t = in->t[form] + r * cols;
    double sum[4] = { 0 }, bound[4] = { 0 };
    size_t k = 0;
    for (; k + 4 <= cols; k += 4)
        for (size_t j = 0; j < 4; j++) sum[j] += v[k + j] * z[k + j], bound[j] += a[k + j] * t[k + j];
    for (; k < cols; k++) sum[0] += v[k] * z[k], bound[0] += a[k] * t[k];
    Ref y = { sum[0] + sum[1] + sum[2] + sum[3], bound[0] + bound[1] + bound[2] + bound[3] };
    // Contract 6: other backends round activations to the precision of a matrix of floats.
    if (!on_cpu() && (w->t.type == T_F16 || w->t.type == T_BF16))
        y.bound *= 1 + ldexp(1, w->t.type == T_F16 ? -11 : -8) / TOL_PRODUCT;
    if (w->factor) {
        const double f = (double)w->factor[e];
        y.bound = fabs(f) * y.bound + TOL_FACTOR * fabs(f * y.v);
        y.v *= f;
    }
    return y;
}

// act(g) * u
static Ref gated(ActFn fn, Ref g, Ref u) {
    const double x = g.v;
    const double gelu = 0.5 * x * (1 + tanh(sqrt(2 / 3.14159265358979323846) * (x + 0.044715 * x * x * x)));
    const double act = fn == ACT_SILU ? x / (1 + exp(-x)) : gelu;
    const double slope = 1.13;          // neither function is steeper
    return (Ref){ act * u.v, (slope * g.bound + TOL_ACT * fabs(x)) * (fabs(u.v) + u.bound) + fabs(act) * u.bound };
}

static float *at_row(const float *p, int r, int cols) { return p ? (float *)(uintptr_t)p + (size_t)r * (size_t)cols : NULL; }

// The same input from row `first` on.
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

// Bits of a combination of what an In may hold.
enum { IN_X = 1, IN_DELTA = 2, IN_DELTA_2 = 4, IN_W_DELTA = 8, IN_W_DELTA_2 = 16, IN_W_POST = 32, IN_SCALE = 64, IN_W_PRE = 128,
       IN_X_OUT = 256, IN_ALL = 512 };

static In random_in(int rows, int cols, int bits) {
    In in = { .scale = bits & IN_SCALE ? 0.3f : 1, .eps = 1e-6f };
    if (bits & IN_X) in.x = activations(rows, cols);
    for (int k = 0; k < 2; k++) {
        if (bits & IN_DELTA << k) in.delta[k] = floats((size_t)rows * (size_t)cols, k ? 0.2 : 3, 0);
        if (bits & IN_W_DELTA << k) in.w_delta[k] = floats(cols, 0.5, 1);
    }
    if (bits & IN_W_POST) in.w_post = floats(cols, 0.5, 1);
    if (bits & IN_W_PRE) in.w_pre = floats(cols, 0.5, 1);
    if (bits & IN_X_OUT) in.x_out = keep(1, sizeof(float));        // put_in makes the real one
    return in;
}

// An Act as a producer leaves it: f, int8, or both.
static Act random_act(int rows, int cols, bool f, bool q) {
    const size_t n = (size_t)rows * (size_t)cols;
    Act a = { .f = activations(rows, cols) };
    if (q) {
        a.q = keep(n, 1);
        a.s = keep(n / 32 + 1, sizeof(float));
        for (size_t g = 0; g < n / 32; g++) a.s[g] = ref_group(a.f + 32 * g, a.q + 32 * g);
    }
    if (!f) a.f = NULL;
    return a;
}

// ---- rows -----------------------------------------------------------------------------------------------------------

typedef struct { int first, n; } Run;
static const Run runs_100[] = { { 0, 64 }, { 0, 1 }, { 0, 2 }, { 0, 7 }, { 63, 1 }, { 20, 9 }, { 31, 33 },      // -few: these
                                { 5, 1 }, { 33, 7 }, { 40, 3 }, { 60, 4 }, { 0, 17 }, { 0, 100 } };
static const Run runs_7[] = { { 0, 7 }, { 0, 1 }, { 0, 2 }, { 3, 3 }, { 6, 1 } };
enum { N_RUNS_7 = 5 };
static int n_runs_100 = sizeof runs_100 / sizeof *runs_100;
static int in_step = 1, shape_step = 1, draws = 400;    // -few: of the combinations of In each seventh, of matmul's shapes each
                                                        // third, of the calls that draw from a distribution a tenth

typedef struct {                        // what all rows should be; the first run's result is what later ones must repeat
    int     cols;
    double *want, *bound;               // (rows, cols)
    float  *base;
    int     base_n;
} Expect;

static Expect expect(int rows, int cols) {
    Expect e = { .cols = cols };
    e.want = keep((size_t)rows * (size_t)cols, sizeof(double));
    e.bound = keep((size_t)rows * (size_t)cols, sizeof(double));
    return e;
}

static void set(Expect *e, size_t i, Ref y) {
    e->want[i] = y.v;
    e->bound[i] = y.bound;
}

// Contract 6: such a step may take both factors of a product as bf16.
static bool prompt_rounding(int n_rows) { return !on_cpu() && n_rows > STEP_ROWS; }

static void check_rows(const char *what, Expect *e, float *got, Run run) {
    const size_t at = (size_t)run.first * (size_t)e->cols;
    if (prompt_rounding(run.n)) {
        const size_t n = (size_t)run.n * (size_t)e->cols;
        double *bound = keep(n, sizeof *bound);
        for (size_t i = 0; i < n; i++) bound[i] = e->bound[at + i] * (TOL_PROMPT / TOL_PRODUCT);
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
    for (size_t g = 0; g < n / 32; g++) want_s[g] = ref_group(f + 32 * g, want_q + 32 * g);
    char text[120];
    snprintf(text, sizeof text, "%s.s", what);
    same_bits(text, s, want_s, n / 32, sizeof(float));
    snprintf(text, sizeof text, "%s.q", what);
    same_bits(text, q, want_q, n, 1);
}

// Room for an Act; the forms alternate with the number of the run: both, f, int8, both ..
static Act act_room(int rows, int cols, int run) {
    const size_t n = (size_t)rows * (size_t)cols;
    Act a = { 0 };
    if (run % 3 != 2 || cols % 32) a.f = room_f("out.f", n);
    if (run % 3 != 1 && cols % 32 == 0) a.q = room("out.q", n, 1), a.s = room_f("out.s", n / 32);
    return a;
}

static void check_act(Expect *e, Act out, Run run) {
    const size_t n = (size_t)run.n * (size_t)e->cols;
    float *f = out.f ? fetch_f(out.f, n) : NULL;
    if (f) check_rows("out.f", e, f, run);
    else if (run.first + run.n <= e->base_n) f = e->base + (size_t)run.first * (size_t)e->cols;
    if (out.q && f && (out.f || !prompt_rounding(run.n))) check_quantised("out", fetch(out.q, n, 1), fetch_f(out.s, n / 32), f, n);
}

// ---- the batch ------------------------------------------------------------------------------------------------------

enum { MAX_STEP = 512, MAX_SEGS = 4 };

typedef struct {
    Row     rows[MAX_STEP];
    Segment segs[MAX_SEGS];
    int32_t len[MAX_SEGS];
    int     n_rows, n_segs;
} Step;

static void add_chain(Step *s, int seq, int len, int n) {
    Segment *seg = &s->segs[s->n_segs];
    *seg = (Segment){ .seq = seq, .first = s->n_rows, .n = n, .kind = SEG_CHAIN };
    s->len[seq] = len;
    for (int i = 0; i < n; i++) s->rows[s->n_rows++] = (Row){ .seg = s->n_segs, .index = i, .depth = i };
    s->n_segs++;
}

// Row i hangs on a random row before it, `wide` rows back at most; wide 0: on row (i - 1) / 2.
static void add_tree(Step *s, int seq, int len, int n, int wide) {
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

static void random_tokens(Step *s, int vocab) {
    for (int r = 0; r < s->n_rows; r++) s->rows[r].token = r == 0 ? vocab - 1 : r == 1 ? 0 : (int32_t)rnd((uint32_t)vocab);
}

static Batch put_batch(const Step *s) {
    return (Batch){ .rows = put("batch.rows", s->rows, (size_t)s->n_rows, sizeof(Row)), .n_rows = s->n_rows,
                    .segs = put("batch.segs", s->segs, MAX_SEGS, sizeof(Segment)), .n_segs = s->n_segs,
                    .len = put("batch.len", s->len, MAX_SEGS, sizeof(int32_t)) };
}

static Batch batch_from(Batch b, Run run) {            // the view that forward() goes on with when rows are dropped
    b.rows += run.first;
    b.n_rows = run.n;
    return b;
}

// ---- body -----------------------------------------------------------------------------------------------------------

static void test_embed(void) {
    static const int widths[] = { 2816, 1536, 704, 2112, 33, 7 };
    for (int t = 0; t < N_TYPES; t++)
        for (int k = 0; k < 6; k++) {
            const int cols = widths[k], vocab = 50, stride = k % 2 ? cols : 2 * cols + 3;
            if (cols % block_elems(all_types[t])) continue;
            CASE("embed", "%s, cols %d, stride %d", type_name(all_types[t]), cols, stride);
            Matrix w = table(all_types[t], vocab, cols, k % 3 == 1);
            Step *s = keep(1, sizeof *s);
            add_chain(s, 0, 0, 64);
            random_tokens(s, vocab);
            const Batch batch = put_batch(s);
            const float scale = sqrtf((float)cols);
            for (int run = 0; run < N_RUNS_7; run++) {
                const Run rows = run ? runs_7[run] : (Run){ 0, 64 };
                const Batch b = batch_from(batch, rows);
                const size_t n = (size_t)rows.n * (size_t)stride;
                float *out = room_f("out", n);
                set_threads(rows.n);
                op->embed(&(Embed){ .batch = &b, .table = &w.t, .scale = scale, .out = out, .out_stride = stride });
                const float *got = fetch_f(out, n);
                Expect e = expect(rows.n, cols);
                int touched = 0;
                for (int r = 0; r < rows.n; r++) {
                    for (int i = 0; i < cols; i++) {
                        const double v = w.v[(size_t)s->rows[rows.first + r].token * (size_t)cols + (size_t)i] * (double)scale;
                        set(&e, (size_t)r * (size_t)cols + (size_t)i, (Ref){ v, TOL_EMBED * fabs(v) });
                    }
                    for (int i = cols; i < stride; i++) touched += !isnan(got[(size_t)r * (size_t)stride + (size_t)i]);
                }
                compare("out", got, stride, e.want, e.bound, rows.n, cols);
                CHECK(!touched, "%s: out: got %d values written between the rows, want 0", now, touched);
            }
            sweep();
        }
}

static void test_ple_rows(void) {
    for (int t = 0; t < N_TYPES; t++) {
        const int n_layers = 3, ple_dim = 256, vocab = 20, cols = n_layers * ple_dim;
        CASE("ple_rows", "%s, %d x %d", type_name(all_types[t]), n_layers, ple_dim);
        Matrix w = table(all_types[t], vocab, cols, t % 2);
        Step *s = keep(1, sizeof *s);
        add_chain(s, 0, 3, 100);
        random_tokens(s, vocab);
        const Batch batch = put_batch(s);
        PleRows o = { .table = &w.t, .n_layers = n_layers, .ple_dim = ple_dim, .proj_scale = 0.0255f, .table_scale = 16,
                      .out_scale = 0.70710678f, .eps = 1e-6f };
        const float *w_norm = floats(ple_dim, 0.5, 1), *proj = floats(100 * (size_t)cols, 30, 0);
        o.w_norm = put_f("w_norm", w_norm, ple_dim);
        Expect e = expect(100, cols);
        for (int r = 0; r < 100; r++)
            for (int l = 0; l < n_layers; l++) {
                double c[256];
                const size_t at = (size_t)(r * cols + l * ple_dim);
                for (int i = 0; i < ple_dim; i++) c[i] = (double)proj[at + (size_t)i] * (double)o.proj_scale;
                ref_norm(c, c, w_norm, ple_dim, (double)o.eps);
                for (int i = 0; i < ple_dim; i++)
                    c[i] += w.v[(size_t)(s->rows[r].token * cols + l * ple_dim + i)] * (double)o.table_scale;
                for (int i = 0; i < ple_dim; i++) c[i] *= (double)o.out_scale;
                const double bound = TOL_NORM * largest(c, ple_dim);
                for (int i = 0; i < ple_dim; i++) set(&e, at + (size_t)i, (Ref){ c[i], bound });
            }
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
        compare("in.x_out", fetch_f(dev + at, (size_t)rows * (size_t)ref->cols), ref->cols, ref->x + at, ref->x_bound + at,
                rows, ref->cols);
}

// One input, n matrices, every run; host In.
static void matmul_case(int n, Matrix *w, const In *in, int rows, const Run *runs, int n_runs) {
    const int cols = w[0].t.cols;
    const Input ref = ref_in(in, rows, cols);
    const In dev = put_in(in, rows, cols);
    Expect e[4];
    for (int k = 0; k < n; k++) {
        const int out = w[k].t.rows;
        e[k] = expect(rows, out);
        for (int i = 0; i < out; i++)
            for (int r = 0; r < rows; r++) set(&e[k], (size_t)r * (size_t)out + (size_t)i, product(&w[k], 0, i, &ref, r));
    }
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
    static const struct { int rows, cols; } shapes[] = { { 64, 2816 }, { 33, 1536 }, { 200, 704 }, { 7, 2112 }, { 1, 256 },
                                                         { 300, 512 }, { 40, 4352 }, { 5, 4128 },
                                                         { 33, 77 }, { 7, 1000 }, { 64, 1 }, { 1, 2817 } };
    for (int t = 0; t < N_TYPES; t++)
        for (int k = t % shape_step; k < (int)(sizeof shapes / sizeof *shapes); k += shape_step) {
            static const int ins[] = { IN_X, IN_X | IN_W_PRE, IN_X | IN_DELTA | IN_W_POST | IN_W_PRE | IN_X_OUT };
            const int cols = shapes[k].cols, bits = ins[k % 3];
            if (cols % block_elems(all_types[t])) continue;
            CASE("matmul", "%s (%d, %d), In 0x%x", type_name(all_types[t]), shapes[k].rows, cols, bits);
            Matrix w = (k % 2 ? scaled_matrix : matrix)(all_types[t], 1, shapes[k].rows, cols);
            const In in = random_in(100, cols, bits);
            matmul_case(1, &w, &in, 100, runs_100, n_runs_100);
        }

    // Every combination of In, 1 to 4 matrices of mixed types.
    for (int bits = 0; bits < IN_ALL; bits += in_step) {
        Matrix w[4];
        const int n = 1 + bits % 4, cols = 512;
        CASE("matmul", "n %d of types %s .., In 0x%x", n, type_name(all_types[bits % N_TYPES]), bits);
        for (int k = 0; k < n; k++) w[k] = matrix(all_types[(bits + 3 * k) % N_TYPES], 1, k ? 1 + 2 * k : 8, cols);
        const In in = random_in(7, cols, bits);
        matmul_case(n, w, &in, 7, runs_7, N_RUNS_7);
    }

    // What a producer left.
    for (int t = 0; t < N_TYPES; t++)
        for (int form = 0; form < 2; form++) {
            const bool q = takes_int8(all_types[t]), both = form == 1;
            const int cols = t % 2 || block_elems(all_types[t]) == 256 ? 1536 : 2112;
            CASE("matmul", "%s (40, %d), Act in %s", type_name(all_types[t]), cols, both ? "both forms" : q ? "int8" : "f32");
            Matrix w = matrix(all_types[t], 1, 40, cols);
            const In in = { .act = random_act(100, cols, !q || both, q || both), .scale = 1 };
            matmul_case(1, &w, &in, 100, runs_100, n_runs_100);
        }
    for (int t = 0; t < N_TYPES; t++) {                // a NaN or an infinity shows, in its row only
        const int cols = 512, rows = 5;
        CASE("matmul", "%s, NaN and Inf in rows 1 and 3", type_name(all_types[t]));
        Matrix w = matrix(all_types[t], 1, 9, cols);
        const In in = { .x = floats(rows * cols, 1, 0), .scale = 1 };
        at_row(in.x, 1, cols)[77] = NAN;
        at_row(in.x, 3, cols)[300] = -INFINITY;
        float *out = room_f("out", 9 * 5);
        op->matmul(&(Matmul){ .n_rows = rows, .n = 1, .in = put_in(&in, rows, cols), .w = { &w.t }, .out = { out } });
        const float *got = fetch_f(out, 9 * 5);
        int wrong = 0;
        for (int i = 0; i < rows * 9; i++) wrong += isfinite(got[i]) != (i / 9 % 2 == 0);
        CHECK(!wrong, "%s: out: got %d values that are finite where they should not be, or the reverse, want 0", now, wrong);
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

enum { CASE_EXPERTS = 128 };

typedef struct {                        // a router beside other work
    Route  o;                           // its outputs have room for `rows`
    Matrix w;
    Input  ref;
    float *expert_scale;
} Router;

// Two equal rows in the matrix make ties; row 3 of x is zero.
static Router router(DType type, int n_experts, int cols, int n_used, bool scale, const In *in, const float *w_pre, In dev,
                     int rows) {
    Router t = { .w = random_matrix(type, 1, n_experts, cols) };
    const size_t row_bytes = (size_t)cols / (size_t)block_elems(type) * (size_t)block_bytes(type);
    for (int i = 3; i + 2 < n_experts; i += 5)
        memcpy(t.w.bytes + (size_t)(i + 2) * row_bytes, t.w.bytes + (size_t)i * row_bytes, row_bytes);
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

// Logits against the reference; the choice against the operation's own logits.
static void check_route(Router *t, Run run) {
    const int n = t->w.t.rows, used = t->o.n_used;
    const float *logits = fetch_f(t->o.logits, (size_t)run.n * (size_t)n);
    const int32_t *ids = fetch(t->o.ids, (size_t)run.n * (size_t)used, sizeof(int32_t));
    const float *weights = fetch_f(t->o.weights, (size_t)run.n * (size_t)used);
    Expect e = expect(run.n, n), ew = expect(run.n, used);
    int32_t *want = keep((size_t)run.n * (size_t)used, sizeof *want);
    for (int r = 0; r < run.n; r++) {
        const float *z = logits + (size_t)(r * n);
        for (int i = 0; i < n; i++) set(&e, r * n + i, product(&t->w, 0, i, &t->ref, (size_t)(run.first + r)));
        bool taken[CASE_EXPERTS] = { false };
        double all = 0, sum = 0, p[CASE_EXPERTS];
        for (int i = 0; i < n; i++) all += exp((double)z[i]);
        for (int j = 0; j < used; j++) {
            int best = -1;
            for (int i = 0; i < n; i++)
                if (!taken[i] && (best < 0 || z[i] > z[best])) best = i;
            taken[best] = true;
            want[r * used + j] = best;
            sum += p[j] = exp((double)z[best]) / all;
        }
        for (int j = 0; j < used; j++) {
            const double scale = t->expert_scale ? (double)t->expert_scale[want[r * used + j]] : 1;
            set(&ew, r * used + j, (Ref){ p[j] / sum * scale, TOL_NORM * fabs(scale) });
        }
    }
    compare("logits", logits, n, e.want, e.bound, run.n, n);
    same_ints("ids", ids, want, run.n * used);
    compare("weights", weights, used, ew.want, ew.bound, run.n, used);
}

static void test_route(void) {
    static const struct { DType type; int n, cols, used; bool scale; } cases[] = {
        { T_F32, 128, 2816, 8, true }, { T_F32, 128, 704, 8, false }, { T_F16, 16, 1536, 16, true },
        { T_BF16, 33, 77, 1, false },
        { T_F32, 7, 33, 7, true }, { T_Q8_0, 32, 2112, 4, true }, { T_F32, 1, 64, 1, true }
    };
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        const int cols = cases[k].cols, rows = 100;
        CASE("route", "%s, %d of %d experts, cols %d, expert_scale %d", type_name(cases[k].type), cases[k].used, cases[k].n,
             cols, cases[k].scale);
        In in = random_in(rows, cols, IN_X);
        memset(at_row(in.x, 3, cols), 0, (size_t)cols * sizeof(float));
        const In dev = put_in(&in, rows, cols);
        Router t = router(cases[k].type, cases[k].n, cols, cases[k].used, cases[k].scale, &in, floats(cols, 0.5, 1), dev, rows);
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

static void test_gate_up(void) {
    static const struct { DType gate, up; int rows, cols; ActFn fn; bool route; } cases[] = {
        { T_Q8_0, T_Q8_0, 64, 2816, ACT_GELU, true }, { T_Q4_0, T_Q4_0, 64, 1536, ACT_GELU, false },
        { T_Q5_0, T_Q5_0, 704, 256, ACT_SILU, false },
        { T_Q4_K, T_Q4_K, 64, 1536, ACT_GELU, false }, { T_Q4_K, T_Q6_K, 32, 2816, ACT_SILU, false },
        { T_Q6_K, T_Q6_K, 2112, 256, ACT_GELU, false },
        { T_F16, T_F16, 32, 2816, ACT_GELU, true }, { T_BF16, T_BF16, 33, 1000, ACT_SILU, false },
        { T_F32, T_F32, 7, 77, ACT_GELU, true },
        { T_F16, T_Q8_0, 64, 704, ACT_GELU, false }, { T_Q8_0, T_Q4_0, 8480, 32, ACT_GELU, true }, { T_Q8_0, T_BF16, 1, 64, ACT_SILU, true }
    };
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        const int cols = cases[k].cols, n = cases[k].rows, rows = 100;
        CASE("gate_up", "%s, %s (%d, %d), %s, route %d", type_name(cases[k].gate), type_name(cases[k].up), n, cols,
             cases[k].fn == ACT_GELU ? "GELU" : "SiLU", cases[k].route);
        Matrix gate = (k % 2 ? scaled_matrix : matrix)(cases[k].gate, 1, n, cols), up = matrix(cases[k].up, 1, n, cols);
        const In in = random_in(rows, cols, IN_X | IN_DELTA | IN_W_POST | IN_W_PRE | IN_X_OUT);
        const Input ref = ref_in(&in, rows, cols);
        const In dev = put_in(&in, rows, cols);
        Expect e = expect(rows, n);
        for (int i = 0; i < n; i++)
            for (int r = 0; r < rows; r++)
                set(&e, r * n + i, gated(cases[k].fn, product(&gate, 0, i, &ref, r), product(&up, 0, i, &ref, r)));
        Router t = { 0 };
        if (cases[k].route) t = router(T_F32, 16, cols, 4, true, &in, floats(cols, 0.5, 1), dev, rows);
        for (int run = 0; run < n_runs_100; run++) {
            Router part = t;
            part.o.in = in_from(t.o.in, runs_100[run].first, cols);
            if (cases[k].route) route_room(&part, runs_100[run]);
            const Act out = act_room(runs_100[run].n, n, run);
            set_threads(runs_100[run].n);
            op->gate_up(&(GateUp){ .n_rows = runs_100[run].n, .in = in_from(dev, runs_100[run].first, cols),
                                   .gate = &gate.t, .up = &up.t,
                                   .fn = cases[k].fn, .out = out, .route = cases[k].route ? &part.o : NULL });
            check_act(&e, out, runs_100[run]);
            check_x_out(&ref, dev.x_out, runs_100[run].first, runs_100[run].n);
            if (cases[k].route) check_route(&part, runs_100[run]);
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
        CASE("expert_gate_up", "%s %s, %d of %d experts, (%d, %d), beside %d, scale %d", cases[k].fused ? "fused" : "split",
             type_name(cases[k].gate),
             used, n, dim, cols, cases[k].beside, cases[k].scaled);
        Matrix gate = random_matrix(cases[k].gate, n, cases[k].fused ? 2 * dim : dim, cols), up = { 0 },
               dense = matrix(T_Q8_0, 1, 20, 96);
        if (cases[k].scaled) gate.factor = floats(n, 0.5, 1);
        place(&gate);
        if (!cases[k].fused) up = (cases[k].scaled ? scaled_matrix : matrix)(cases[k].up, n, dim, cols);
        const int32_t *ids = random_ids(rows, used, n), *dev_ids = put("ids", ids, (size_t)(rows * used), sizeof(int32_t));
        const In in = random_in(rows, cols, IN_X | IN_DELTA | IN_W_POST | IN_W_PRE);
        const Input ref = ref_in(&in, rows, cols);
        const In dev = put_in(&in, rows, cols);
        const In dense_in = { .act = random_act(rows, 96, false, true), .scale = 1 }, dense_dev = put_in(&dense_in, rows, 96);
        const Input dense_ref = ref_in(&dense_in, rows, 96);
        Expect e = expect(rows, used * dim), e_dense = expect(rows, 20);
        for (int r = 0; r < rows; r++) {
            for (int j = 0; j < used; j++)
                for (int i = 0; i < dim; i++) {
                    const int x = ids[r * used + j];
                    const Ref u = product(cases[k].fused ? &gate : &up, x, cases[k].fused ? dim + i : i, &ref, r);
                    set(&e, (r * used + j) * dim + i, gated(cases[k].fn, product(&gate, x, i, &ref, r), u));
                }
            for (int i = 0; i < 20; i++) set(&e_dense, r * 20 + i, product(&dense, 0, i, &dense_ref, r));
        }
        for (int run = 0; run < n_runs_100; run++) {
            const Run part = runs_100[run];
            const Matmul beside = { .n_rows = part.n, .n = 1, .in = in_from(dense_dev, part.first, 96), .w = { &dense.t },
                                    .out = { room_f("beside", (size_t)part.n * 20) } };
            const Act out = act_room(part.n, used * dim, dim % 32 ? 1 : run);
            set_threads(part.n);
            op->expert_gate_up(&(ExpertGateUp){ .n_rows = part.n, .n_used = used, .in = in_from(dev, part.first, cols),
                                                .gate = &gate.t,
                                                .up = cases[k].fused ? NULL : &up.t, .fn = cases[k].fn,
                                                .ids = dev_ids + part.first * used, .out = out,
                                                .beside = cases[k].beside ? &beside : NULL });
            check_act(&e, out, part);
            if (cases[k].beside) check_rows("beside", &e_dense, fetch_f(beside.out[0], (size_t)part.n * 20), part);
        }
        sweep();
    }
}

static void test_expert_down(void) {
    static const int dims[] = { 704, 704, 64, 512, 96, 77, 33, 256 };
    for (int t = 0; t < N_TYPES; t++)
        for (int k = 0; k < 8; k++) {
            const int dim = dims[k], n = 6, used = k == 0 ? 1 : k == 1 ? 6 : 3, out = k == 3 ? 100 : k == 4 ? 1 : 33,
                      rows = k < 2 ? 100 : 64;
            const DType type = all_types[t];
            if (dim % block_elems(type)) continue;
            CASE("expert_down", "%s, %d of %d experts, (%d, %d)", type_name(type), used, n, out, dim);
            Matrix down = (k % 2 ? scaled_matrix : matrix)(type, n, out, dim);
            const In in = { .act = random_act(rows * used, dim, !takes_int8(type), takes_int8(type)), .scale = 1 };
            const Input ref = ref_in(&in, rows * used, dim);
            const In dev = put_in(&in, rows * used, dim);
            int32_t *ids = random_ids(rows, used, n);
            if (k == 2)                                // what a router without numbers leaves: one expert again and again
                for (int i = 0; i < rows / 2 * used; i++) ids[i] = 1;
            const int32_t *dev_ids = put("ids", ids, (size_t)(rows * used), sizeof(int32_t));
            const float *weights = floats(rows * used, 0.5, 0.5);
            const float *dev_weights = put_f("weights", weights, rows * used);
            Expect e = expect(rows, out);
            for (int r = 0; r < rows; r++)
                for (int i = 0; i < out; i++) {
                    Ref y = { 0, 0 };
                    for (int j = r * used; j < (r + 1) * used; j++) {
                        const Ref p = product(&down, ids[j], i, &ref, j);
                        const double w = (double)weights[j];
                        y.v += w * p.v;
                        y.bound += fabs(w) * p.bound + TOL_FACTOR * fabs(w * p.v);
                    }
                    set(&e, r * out + i, y);
                }
            for (int run = 0; run < n_runs_100; run++) {
                const Run part = runs_100[run];
                if (part.first + part.n > rows) continue;
                float *y = room_f("out", part.n * out);
                set_threads(part.n);
                op->expert_down(&(ExpertDown){ .n_rows = part.n, .n_used = used,
                                               .in = in_from(dev, part.first * used, dim).act, .down = &down.t,
                                               .ids = dev_ids + part.first * used, .weights = dev_weights + part.first * used, .out = y });
                check_rows("out", &e, fetch_f(y, part.n * out), part);
            }
            sweep();
        }
}

static void test_ple_inject(void) {
    for (int t = 0; t < N_TYPES; t++)
        for (int k = 0; k < 3; k++) {
            const DType type = all_types[t];
            const int n = k == 0 ? 256 : k == 1 ? 32 : 33, cols = k == 0 ? 512 : k == 1 ? 1536 : 77;
            const int rows = k == 0 ? 64 : 100, stride = k == 1 ? n : 3 * n + 1;
            if (cols % block_elems(type)) continue;
            CASE("ple_inject", "%s (%d, %d), u_stride %d", type_name(type), n, cols, stride);
            Matrix w = matrix(type, 1, n, cols);
            const In in = random_in(rows, cols, k == 0 ? IN_X | IN_DELTA | IN_W_POST | IN_X_OUT : IN_X);
            const Input ref = ref_in(&in, rows, cols);
            const In dev = put_in(&in, rows, cols);
            const float *u = floats(rows * stride, 1, 0), *dev_u = put_f("u", u, rows * stride);
            Expect e = expect(rows, n);
            for (int i = 0; i < n; i++)
                for (int r = 0; r < rows; r++)
                    set(&e, r * n + i, gated(ACT_GELU, product(&w, 0, i, &ref, r), (Ref){ (double)u[r * stride + i], 0 }));
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
    CASE("close", "cols %d, In 0x%x, out %d", cols, bits, with_out);
    const In in = random_in(rows, cols, bits);
    const Input ref = ref_in(&in, rows, cols);
    const In dev = put_in(&in, rows, cols);
    Expect e = expect(rows, cols);
    memcpy(e.want, ref.y, (size_t)rows * (size_t)cols * sizeof(double));
    memcpy(e.bound, ref.y_bound, (size_t)rows * (size_t)cols * sizeof(double));
    for (int run = 0; run < n_runs; run++) {
        float *out = with_out ? room_f("out", (size_t)runs[run].n * (size_t)cols) : NULL;
        op->close(&(Close){ .n_rows = runs[run].n, .cols = cols, .in = in_from(dev, runs[run].first, cols), .out = out });
        if (out) check_rows("out", &e, fetch_f(out, (size_t)runs[run].n * (size_t)cols), runs[run]);
        check_x_out(&ref, dev.x_out, runs[run].first, runs[run].n);
    }
    sweep();
}

static void test_close(void) {
    static const int widths[] = { 2816, 1536, 704, 2112, 1000, 33, 1 };
    for (int bits = 0; bits < IN_ALL; bits += in_step) close_case(7, 100, bits, true, runs_7, N_RUNS_7);
    for (int k = 0; k < 4; k++) {                      // rows that a backend may hold, and wider ones
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
        CASE("gather_rows", "%d rows, cols %d, strides %d %d, index %d", rows, cols, src_stride, dst_stride, indexed);
        int32_t index[64];
        for (int i = 0; i < rows; i++) index[i] = indexed ? (int32_t)rnd((uint32_t)n_src) : i;
        const float *src = floats(n_src * src_stride, 1, 0);
        float *dst = room_f("dst", rows * dst_stride);
        op->gather_rows(&(GatherRows){ .n_rows = rows, .cols = cols, .src = put_f("src", src, n_src * src_stride),
                                       .index = indexed ? put("index", index, (size_t)rows, sizeof(int32_t)) : NULL, .dst = dst,
                                       .src_stride = src_stride, .dst_stride = dst_stride });
        const float *got = fetch_f(dst, rows * dst_stride);
        int touched = 0;
        for (int r = 0; r < rows; r++) {
            same_bits("dst", got + r * dst_stride, src + index[r] * src_stride, (size_t)cols, sizeof(float));
            for (int i = cols; i < dst_stride; i++) touched += !isnan(got[r * dst_stride + i]);
        }
        CHECK(!touched, "%s: dst: got %d values written between the rows, want 0", now, touched);
        sweep();
    }
}

// ---- cache ----------------------------------------------------------------------------------------------------------

typedef struct {
    Cache    c;                         // planes in backend memory once put
    uint8_t *k, *v;                     // host images
    float   *fold;
} TestCache;

static size_t kv_bytes(KvType t) { return t == KV_F32 ? 4 : 2; }

static void store_value(KvType t, uint8_t *p, size_t i, double x) {
    const float f = (float)x;
    const uint16_t h = (uint16_t)(t == KV_F32 ? 0 : t == KV_F16 ? encode_16(x, 10, 15) : encode_16(x, 7, 127));
    if (t == KV_F32) memcpy(p + 4 * i, &f, 4);
    else memcpy(p + 2 * i, &h, 2);
}

static double load_value(KvType t, const uint8_t *p, size_t i) {
    float f;
    uint16_t h;
    if (t == KV_F32) {
        memcpy(&f, p + 4 * i, 4);
        return (double)f;
    }
    memcpy(&h, p + 2 * i, 2);
    return t == KV_F16 ? value_f16(h) : value_bf16(h);
}

// Number of row `slot` of a head among all rows of a plane.
static size_t row_of(const Cache *c, int seq, int head, int slot) {
    return (size_t)((seq * c->n_kv_heads + head) * c->slots + slot);
}

static size_t plane_bytes(const Cache *c, const KvPlane *p) {
    return (size_t)(c->n_seqs * c->n_kv_heads * c->slots * p->dim) * kv_bytes(p->type);
}

// All rows alike: what no row may see. Large, so that a trace of it shows.
static TestCache new_cache(KvType type, int n_seqs, int n_kv_heads, int head_dim, int slots, int n_rot) {
    TestCache t = { .c = { .n_seqs = n_seqs, .n_kv_heads = n_kv_heads, .head_dim = head_dim, .slots = slots, .n_rot = n_rot } };
    t.c.k = (KvPlane){ .type = type, .dim = n_rot ? 2 * n_rot : head_dim };
    t.c.v = (KvPlane){ .type = type, .dim = head_dim };
    uint8_t **image[2] = { &t.k, &t.v };
    for (int i = 0; i < 2; i++) {
        const KvPlane *p = i ? &t.c.v : &t.c.k;
        const size_t rows = row_of(&t.c, n_seqs, 0, 0), row_bytes = (size_t)p->dim * kv_bytes(type);
        *image[i] = keep(rows, row_bytes);
        for (int j = 0; j < p->dim; j++) store_value(type, *image[i], (size_t)j, i ? 1000 : j % 3 ? -8 : 8);
        for (size_t r = 1; r < rows; r++) memcpy(*image[i] + r * row_bytes, *image[i], row_bytes);
    }
    if (n_rot) t.fold = floats(head_dim, 0.5, 1);
    return t;
}

static void random_row(TestCache *t, int seq, int slot) {
    for (int g = 0; g < t->c.n_kv_heads; g++) {
        const size_t row = row_of(&t->c, seq, g, slot);
        for (int i = 0; i < t->c.k.dim; i++)
            store_value(t->c.k.type, t->k, row * (size_t)t->c.k.dim + (size_t)i, (double)uniform());
        for (int i = 0; i < t->c.v.dim; i++)
            store_value(t->c.v.type, t->v, row * (size_t)t->c.v.dim + (size_t)i, (double)uniform());
    }
}

static void fill_cache(TestCache *t) {
    for (int seq = 0; seq < t->c.n_seqs; seq++)
        for (int slot = 0; slot < t->c.slots; slot++) random_row(t, seq, slot);
}

static void put_cache(TestCache *t, bool fixed) {
    t->c.k.data = buffer("cache.k", t->k, plane_bytes(&t->c, &t->c.k), fixed);
    t->c.v.data = buffer("cache.v", t->v, plane_bytes(&t->c, &t->c.v), fixed);
    t->c.fold = put_f("cache.fold", t->fold, (size_t)t->c.head_dim);
}

// Where value i of a head lies in tied order; natural order when n_rot is 0 (gemma4.h, Cache).
static int place_of(int i, int n_rot, int head_dim) {
    const int half = head_dim / 2;
    if (!n_rot || i >= half + n_rot) return i;
    return i < n_rot ? i : i < half ? i + n_rot : n_rot + i - half;
}

typedef struct {
    KvType type;
    int    head_dim, n_heads, n_kv_heads, slots, n_rot, n_pairs;
    bool   v_is_k, v_norm, with_q, with_k, staged, dumps;
} QkvCase;

// w * u / rms(u), then rotated; both results (head_dim).
static void ref_head(double *normed, double *turned, const float *u, const float *w, const double *inv_freq,
                     const QkvCase *t, int pos) {
    const int half = t->head_dim / 2;
    for (int i = 0; i < t->head_dim; i++) normed[i] = (double)u[i];
    ref_norm(normed, normed, w, t->head_dim, 1e-6);
    memcpy(turned, normed, (size_t)t->head_dim * sizeof *turned);
    for (int i = 0; i < t->n_pairs; i++) {
        const double c = cos(pos * inv_freq[i]), s = sin(pos * inv_freq[i]), a = normed[i], b = normed[i + half];
        turned[i] = a * c - b * s;
        turned[i + half] = a * s + b * c;
    }
}

static void set_head(Expect *e, size_t at, const double *v, int n) {
    const double bound = TOL_NORM * largest(v, n);
    for (int i = 0; i < n; i++) set(e, at + (size_t)i, (Ref){ v[i], bound });
}

static void qkv_case(QkvCase t, const Step *s) {
    const int hd = t.head_dim, n = s->n_rows, q_dim = t.n_heads * hd, kv_dim = t.n_kv_heads * hd;
    CASE("qkv_store", "%s, head_dim %d, heads %d/%d, slots %d, n_rot %d, pairs %d, v %s%s, q %d, k %d, stage %d, dumps %d, %d rows in %d segments "
         "at %d",
         kv_name(t.type), hd, t.n_heads, t.n_kv_heads, t.slots, t.n_rot, t.n_pairs, t.v_is_k ? "= k" : "own",
             t.v_norm ? "" : " unnormed",
         t.with_q, t.with_k, t.staged, t.dumps, n, s->n_segs, s->len[s->segs[0].seq]);
    TestCache ring = new_cache(t.type, 3, t.n_kv_heads, hd, t.slots, t.n_rot);
    TestCache stage = new_cache(t.type, 1, t.n_kv_heads, hd, 256, t.n_rot);
    put_cache(&ring, t.staged || !t.with_k);
    put_cache(&stage, !t.staged);
    const Batch batch = put_batch(s);
    const float *q = floats(n * q_dim, 3, 0), *k = floats(n * kv_dim, 2, 0), *own_v = floats(n * kv_dim, 0.7, 0.1);
    const float *v = t.v_is_k ? k : own_v;
    const float *w_q = floats(hd, 0.5, 1), *w_k = t.n_rot ? ring.fold : floats(hd, 0.5, 1);
    double *inv_freq = keep(t.n_pairs, sizeof *inv_freq);
    for (int i = 0; i < t.n_pairs; i++) inv_freq[i] = pow(1e4, -2.0 * i / hd);
    QkvStore o = { .batch = &batch, .cache = &ring.c, .stage = t.staged ? &stage.c : NULL, .n_heads = t.n_heads,
                   .v_norm = t.v_norm, .eps = 1e-6f,
                   .rope = { put("inv_freq", inv_freq, (size_t)t.n_pairs, sizeof(double)), t.n_pairs },
                   .w_q = put_f("w_q", w_q, hd), .w_k = put_f("w_k", w_k, hd) };
    if (t.with_q) o.q = change_f("q", q, n * q_dim);
    if (t.with_k) {
        o.k = put_f("k", k, n * kv_dim);
        o.v = t.v_is_k ? o.k : put_f("v", v, n * kv_dim);
    }
    if (t.dumps) {
        o.dump_q = room_f("dump_q", n * q_dim);
        o.dump_q_pos = room_f("dump_q_pos", n * q_dim);
        o.dump_k = room_f("dump_k", n * kv_dim);
        o.dump_v = room_f("dump_v", n * kv_dim);
        o.dump_k_pos = room_f("dump_k_pos", n * kv_dim);
    }
    set_threads(n);
    op->qkv_store(&o);

    Expect e_q = expect(n, q_dim), e_qn = expect(n, q_dim), e_qp = expect(n, q_dim), e_kn = expect(n, kv_dim),
           e_kp = expect(n, kv_dim), e_v = expect(n, kv_dim);
    for (int r = 0; r < n; r++) {
        const Segment *seg = &s->segs[s->rows[r].seg];
        const int pos = s->len[seg->seq] + s->rows[r].depth;
        double normed[512], turned[512], stored[512];
        for (int h = 0; h < t.n_heads; h++) {
            const size_t at = (size_t)(r * q_dim + h * hd);
            ref_head(normed, turned, q + at, w_q, inv_freq, &t, pos);
            set_head(&e_qn, at, normed, hd);
            set_head(&e_qp, at, turned, hd);
            for (int i = 0; i < hd; i++)
                stored[place_of(i, t.n_rot, hd)] = turned[i] * (t.n_rot && i % (hd / 2) >= t.n_rot ? (double)ring.fold[i] : 1);
            set_head(&e_q, at, stored, hd);
        }
        for (int g = 0; g < t.n_kv_heads; g++) {
            const size_t at = (size_t)(r * kv_dim + g * hd);
            ref_head(normed, turned, k + at, w_k, inv_freq, &t, pos);
            set_head(&e_kn, at, normed, hd);
            set_head(&e_kp, at, turned, hd);
            for (int i = 0; i < hd; i++) stored[i] = (double)v[at + (size_t)i];
            if (t.v_norm) ref_norm(stored, stored, NULL, hd, 1e-6);
            set_head(&e_v, at, stored, hd);
        }
    }
    if (t.with_q) {
        const float *got = fetch_f(o.q, n * q_dim);
        compare("q", got, q_dim, e_q.want, e_q.bound, n, q_dim);
        if (n <= 64) {                  // the last row on its own, as a view and without k
            const Batch view = batch_from(batch, (Run){ n - 1, 1 });
            QkvStore last = { .batch = &view, .cache = &ring.c, .stage = o.stage, .n_heads = t.n_heads, .v_norm = t.v_norm,
                              .eps = o.eps, .rope = o.rope,
                              .w_q = o.w_q, .w_k = o.w_k, .q = change_f("last q", q + (n - 1) * q_dim, q_dim) };
            op->qkv_store(&last);
            same_bits("q of the last row alone", fetch_f(last.q, q_dim), got + (n - 1) * q_dim, (size_t)q_dim, sizeof(float));
        }
    }
    if (t.dumps && t.with_q) {
        compare("dump_q", fetch_f(o.dump_q, n * q_dim), q_dim, e_qn.want, e_qn.bound, n, q_dim);
        compare("dump_q_pos", fetch_f(o.dump_q_pos, n * q_dim), q_dim, e_qp.want, e_qp.bound, n, q_dim);
    }
    if (t.with_k) {
        const float *dump_k = t.dumps ? fetch_f(o.dump_k_pos, n * kv_dim) : NULL;
        const float *dump_v = t.dumps ? fetch_f(o.dump_v, n * kv_dim) : NULL;
        if (t.dumps) {
            compare("dump_k", fetch_f(o.dump_k, n * kv_dim), kv_dim, e_kn.want, e_kn.bound, n, kv_dim);
            compare("dump_v", dump_v, kv_dim, e_v.want, e_v.bound, n, kv_dim);
            compare("dump_k_pos", dump_k, kv_dim, e_kp.want, e_kp.bound, n, kv_dim);
        }
        // The planes: rows of the step where they belong, all others as they were.
        TestCache *dst = t.staged ? &stage : &ring;
        const KvPlane *planes[2] = { &dst->c.k, &dst->c.v };
        uint8_t *images[2] = { dst->k, dst->v };
        for (int p = 0; p < 2; p++) {
            const int dim = planes[p]->dim;
            const Expect *e = p ? &e_v : &e_kp;
            const float *dump = p ? dump_v : dump_k;
            const uint8_t *got = fetch(planes[p]->data, plane_bytes(&dst->c, planes[p]), 1);
            float *value = keep(n * kv_dim, sizeof *value);
            Expect stored = expect(n, t.n_kv_heads * dim);
            for (int r = 0; r < n; r++) {
                const Segment *seg = &s->segs[s->rows[r].seg];
                const int slot = t.staged ? seg->first + s->rows[r].index : (s->len[seg->seq] + s->rows[r].index) % t.slots;
                for (int g = 0; g < t.n_kv_heads; g++) {
                    const size_t row = row_of(&dst->c, t.staged ? 0 : seg->seq, g, slot) * (size_t)dim;
                    for (int i = 0; i < hd; i++) {
                        const int to = place_of(i, t.n_rot, hd);
                        const size_t from = (size_t)(r * kv_dim + g * hd + i), at = (size_t)((r * t.n_kv_heads + g) * dim + to);
                        if (to >= dim) continue;
                        const double unit = t.type == KV_F32 ? 0 : t.type == KV_F16 ? ldexp(1, -11) : ldexp(1, -8);
                        value[at] = (float)load_value(t.type, got, row + (size_t)to);
                        const double rounding = unit > 0 ? unit * (fabs(e->want[from]) + e->bound[from]) + TOL_TINY : 0;
                        set(&stored, at, (Ref){ e->want[from], e->bound[from] + rounding });
                        store_value(t.type, images[p], row + (size_t)to, dump ? (double)dump[from] : (double)value[at]);
                    }
                }
            }
            compare(p ? "v plane" : "k plane", value, (size_t)(t.n_kv_heads * dim), stored.want, stored.bound, n,
                    t.n_kv_heads * dim);
            const size_t size = kv_bytes(t.type);
            same_bits(p ? "v plane, all rows" : "k plane, all rows", got, images[p], plane_bytes(&dst->c, planes[p]) / size,
                      size);
        }
    }
    sweep();
}

static void test_qkv_store(void) {
    static const KvType types[] = { KV_F32, KV_F16, KV_BF16 };
    for (int k = 0; k < 3; k++) {
        static Step one, two, many, far;
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
        const KvType t = types[k];
        qkv_case((QkvCase){ t, 256, 8, 2, 128, 0, 128, false, true, true, true, false, true }, &two);       // sliding layer
        qkv_case((QkvCase){ t, 256, 4, 1, 128, 0, 128, false, true, true, true, false, false }, &many);
        qkv_case((QkvCase){ t, 256, 8, 2, 128, 0, 128, false, true, true, true, false, true }, &far);
        // global layer, untied
        qkv_case((QkvCase){ t, 512, 8, 1, 256, 0, 64, true, true, true, true, false, true }, &two);
        qkv_case((QkvCase){ t, 512, 8, 2, 256, 64, 64, true, true, true, true, false, true }, &two);        // tied
        qkv_case((QkvCase){ t, 512, 2, 1, 256, 64, 64, true, true, true, true, false, false }, &many);
        qkv_case((QkvCase){ t, 128, 2, 2, 192, 16, 16, true, true, true, true, false, true }, &one);
        // DFlash: V as it is
        qkv_case((QkvCase){ t, 128, 4, 4, 128, 0, 64, false, false, true, true, false, true }, &two);
        // a reader of a donor's cache
        qkv_case((QkvCase){ t, 128, 4, 1, 128, 0, 64, false, true, true, false, false, true }, &two);
        qkv_case((QkvCase){ t, 128, 4, 1, 128, 16, 16, true, true, true, false, false, false }, &two);
        qkv_case((QkvCase){ t, 128, 4, 2, 128, 0, 32, false, true, false, true, false, true }, &two);       // no q
        qkv_case((QkvCase){ t, 256, 4, 2, 128, 0, 128, false, true, true, true, true, true }, &two);        // stage
    }
    Step *chunk = alloc_or_die(1, sizeof *chunk);
    add_chain(chunk, 1, 60, 150);
    add_chain(chunk, 0, 0, 50);
    // a prompt longer than the ring
    qkv_case((QkvCase){ KV_F16, 256, 4, 1, 128, 0, 128, false, true, true, true, true, false }, chunk);
    free(chunk);
}

typedef struct {
    KvType  type;
    int     head_dim, n_heads, n_kv_heads, slots, n_rot, window;
    OwnMask own;
    bool    staged, twins;              // twins: sessions 0 and 1 hold the same, and their segments ask the same
    float   scale;
} AttendCase;

static void attend_case(AttendCase t, const Step *s) {
    static const char *own_name[] = { "causal", "all", "none" };
    const int hd = t.head_dim, n = s->n_rows, q_dim = t.n_heads * hd, group = t.n_heads / t.n_kv_heads;
    int n_seqs = 0;
    for (int i = 0; i < s->n_segs; i++) n_seqs = max_int(n_seqs, s->segs[i].seq + 1);
    CASE("attend", "%s, head_dim %d, heads %d/%d, slots %d, n_rot %d, window %d, own %s, stage %d, scale %g, %s of %d "
         "rows at %d (%d segments)", kv_name(t.type),
         hd, t.n_heads, t.n_kv_heads, t.slots, t.n_rot, t.window, own_name[t.own], t.staged, (double)t.scale,
             s->segs[0].kind == SEG_TREE ? "tree" : "chain",
         s->segs[0].n, s->len[s->segs[0].seq], s->n_segs);
    TestCache ring = new_cache(t.type, n_seqs, t.n_kv_heads, hd, t.slots, t.n_rot);
    TestCache stage = new_cache(t.type, 1, t.n_kv_heads, hd, 256, t.n_rot);
    for (int k = 0; k < s->n_segs; k++) {
        const Segment *seg = &s->segs[k];
        const int len = s->len[seg->seq];
        for (int p = t.window ? max_int(0, len - t.window + 1) : 0; p < len; p++) random_row(&ring, seg->seq, p % t.slots);
        for (int i = 0; t.own != OWN_NONE && i < seg->n; i++)
            if (t.staged) random_row(&stage, 0, seg->first + i);
            else random_row(&ring, seg->seq, (len + i) % t.slots);
    }
    if (t.twins) {
        memcpy(ring.k + plane_bytes(&ring.c, &ring.c.k) / 2, ring.k, plane_bytes(&ring.c, &ring.c.k) / 2);
        memcpy(ring.v + plane_bytes(&ring.c, &ring.c.v) / 2, ring.v, plane_bytes(&ring.c, &ring.c.v) / 2);
    }
    put_cache(&ring, true);
    put_cache(&stage, true);
    const Batch batch = put_batch(s);

    // Scores of a few units. The query goes in as qkv_store leaves it: in the cache's order, its unrotated part times fold.
    float *q = floats(n * q_dim, 7.5 / sqrt(hd) / (double)t.scale, 0), *q_in = keep(n * q_dim, sizeof *q);
    if (t.twins) memcpy(q + n / 2 * q_dim, q, (size_t)(n / 2 * q_dim) * sizeof *q);
    for (int h = 0; h < n * t.n_heads; h++)
        for (int i = 0; i < hd; i++)
            q_in[h * hd + place_of(i, t.n_rot, hd)] = q[h * hd + i] * (t.n_rot && i % (hd / 2) >= t.n_rot ? ring.fold[i] : 1);
    const float *q_dev = put_f("q", q_in, n * q_dim);

    // Keys and values in natural order, (seq, head, slot, head_dim): the cache's, then the stage's.
    const size_t n_ring = row_of(&ring.c, n_seqs, 0, 0), n_all = n_ring + row_of(&stage.c, 1, 0, 0);
    double *keys = keep(n_all * (size_t)hd, sizeof *keys), *values = keep(n_all * (size_t)hd, sizeof *values);
    for (size_t row = 0; row < n_all; row++) {
        const TestCache *c = row < n_ring ? &ring : &stage;
        const size_t at = row < n_ring ? row : row - n_ring;
        if (!t.staged && c == &stage) break;
        for (int i = 0; i < hd; i++) {
            const int from = place_of(i, t.n_rot, hd);
            const double v = load_value(t.type, c->v, at * (size_t)hd + (size_t)from);
            values[row * (size_t)hd + (size_t)i] = v;
            const bool in_k = from < c->c.k.dim;
            keys[row * (size_t)hd + (size_t)i] =
                in_k ? load_value(t.type, c->k, at * (size_t)c->c.k.dim + (size_t)from) : v * (double)ring.fold[i];
        }
    }

    Expect e = expect(n, q_dim);
    const double tolerance = t.type == KV_F32 || on_cpu() ? TOL_ATTEND : TOL_ATTEND_16;
    const int max_keys = t.slots + 256;
    double *weights = keep(n * t.n_kv_heads * max_keys, sizeof *weights);
    size_t *rows = keep(n * t.n_kv_heads * max_keys, sizeof *rows);
    for (int rg = 0; rg < n * t.n_kv_heads; rg++) {
        const int r = rg / t.n_kv_heads, g = rg % t.n_kv_heads;
        const Row *row = &s->rows[r];
        const Segment *seg = &s->segs[row->seg];
        const int len = s->len[seg->seq], pos = len + row->depth;
        size_t *seen = rows + (size_t)rg * (size_t)max_keys;
        double *p = weights + (size_t)rg * (size_t)max_keys;
        int n_keys = 0;
        for (int j = 0; j < len; j++)
            if (!t.window || pos - j < t.window) seen[n_keys++] = row_of(&ring.c, seg->seq, g, j % t.slots);
        for (int i = 0; i < seg->n; i++) {
            const bool chain = i <= row->index && (!t.window || row->index - i < t.window),
                       path = row->ancestors >> (i % 64) & 1;
            if (t.own == OWN_NONE || (t.own == OWN_CAUSAL && !(seg->kind == SEG_CHAIN ? chain : path))) continue;
            if (t.staged) seen[n_keys++] = n_ring + row_of(&stage.c, 0, g, seg->first + i);
            else seen[n_keys++] = row_of(&ring.c, seg->seq, g, (len + i) % t.slots);
        }
        double v_max = 0;
        for (int j = 0; j < n_keys; j++) {
            const double m = largest(values + seen[j] * (size_t)hd, hd);
            v_max = m > v_max ? m : v_max;
        }
        for (int h = g * group; h < (g + 1) * group; h++) {
            double max = -INFINITY, sum = 0, out[512] = { 0 };
            for (int j = 0; j < n_keys; j++) {
                double score = 0;
                for (int i = 0; i < hd; i++)
                    score += (double)q[r * q_dim + h * hd + i] * keys[seen[j] * (size_t)hd + (size_t)i];
                p[j] = score * (double)t.scale;
                max = p[j] > max ? p[j] : max;
            }
            for (int j = 0; j < n_keys; j++) {
                sum += p[j] = exp(p[j] - max);
                for (int i = 0; i < hd; i++) out[i] += p[j] * values[seen[j] * (size_t)hd + (size_t)i];
            }
            for (int i = 0; i < hd; i++)                // nothing in sight: 0
                set(&e, r * q_dim + h * hd + i, (Ref){ n_keys ? out[i] / sum : 0, n_keys ? tolerance * v_max : 0 });
        }
    }

    const Run runs[] = { { 0, min_int(n, 64) }, { n - 1, 1 }, { n / 2, 1 }, { 0, n }, { n / 3, min_int(9, n - n / 3) },
                         { 0, min_int(n, 3) }, { n / 3, n - n / 3 } };
    for (int k = 0; k < 7; k++) {
        const Batch view = batch_from(batch, runs[k]);
        const Act out = act_room(runs[k].n, q_dim, k);
        set_threads(runs[k].n);
        op->attend(&(Attend){ .batch = &view, .cache = &ring.c, .stage = t.staged ? &stage.c : NULL, .n_heads = t.n_heads,
                              .q = q_dev + runs[k].first * q_dim,
                              .window = t.window, .own = t.own, .scale = t.scale, .out = out });
        check_act(&e, out, runs[k]);
    }
    if (t.twins)
        same_bits("the same rows in two sessions", e.base + n / 2 * q_dim, e.base, (size_t)(n / 2 * q_dim), sizeof(float));
    sweep();
}

static void attend_chain(AttendCase t, int len, int n) {
    Step *s = alloc_or_die(1, sizeof *s);
    add_chain(s, 0, len, n);
    attend_case(t, s);
    free(s);
}

// attend with a store of its own against qkv_store and then attend: all rows at once, in two views of the step, and right behind a
// product, as in a layer, where a backend may begin with it earlier.
static void attend_store_case(AttendCase t, bool reader, const Step *s) {
    const int hd = t.head_dim, n = s->n_rows, q_dim = t.n_heads * hd, kv_dim = t.n_kv_heads * hd,
              n_pairs = t.n_rot ? t.n_rot : hd / 2;
    CASE("attend", "store in its launch: %s, head_dim %d, heads %d/%d, n_rot %d, window %d, stage %d, k %d, %d rows",
         kv_name(t.type), hd, t.n_heads,
         t.n_kv_heads, t.n_rot, t.window, t.staged, !reader, n);
    TestCache ring[4] = { new_cache(t.type, 2, t.n_kv_heads, hd, t.slots, t.n_rot) };
    TestCache stage[4] = { new_cache(t.type, 1, t.n_kv_heads, hd, 256, t.n_rot) };
    fill_cache(&ring[0]);
    fill_cache(&stage[0]);
    for (int path = 1; path < 4; path++) ring[path] = ring[0], stage[path] = stage[0];
    const Batch batch = put_batch(s);
    const float *w_q = floats(hd, 0.05, 0.2), *w_k = t.n_rot ? ring[0].fold : floats(hd, 0.5, 1);      // scores of a few units
    const float *q = floats(n * q_dim, 3, 0), *k = floats(n * kv_dim, 2, 0);
    double *inv_freq = keep(n_pairs, sizeof *inv_freq);
    for (int i = 0; i < n_pairs; i++) inv_freq[i] = pow(1e4, -2.0 * i / hd);
    QkvStore store = { .batch = &batch, .n_heads = t.n_heads, .v_norm = true, .eps = 1e-6f,
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
        store.stage = t.staged ? &stage[path].c : NULL;
        store.q = change_f("q", q, n * q_dim);
        float *y = room_f("out", n * q_dim);
        if (path == 0) op->qkv_store(&store);
        if (path == 3)
            op->matmul(&(Matmul){ .n_rows = n, .n = 1, .in = in_dev, .w = { &w.t }, .out = { room_f("product", n * 40) } });
        for (int from = 0, to; from < n; from = to) {
            to = path == 2 && !from && n > 1 ? n / 2 : n;
            const Batch view = batch_from(batch, (Run){ from, to - from });
            QkvStore part = store;
            part.batch = &view;
            part.q += from * q_dim;
            if (part.k) part.k += from * kv_dim, part.v += from * kv_dim;
            op->attend(&(Attend){ .batch = &view, .cache = part.cache, .stage = part.stage, .n_heads = t.n_heads, .q = part.q,
                                  .window = t.window, .own = t.own, .scale = t.scale, .store = path ? &part : NULL,
                                  .out = { .f = y + from * q_dim } });
        }
        out[path] = fetch_f(y, n * q_dim);
    }
    for (int i = 0; i < 6; i++) {
        const int p = i % 2, path = 1 + i / 2;
        const TestCache *a = t.staged ? stage : ring;
        const KvPlane *plane[2] = { p ? &a[0].c.v : &a[0].c.k, p ? &a[path].c.v : &a[path].c.k };
        const char *what = path == 1 ? "out" : path == 2 ? "out of views" : "out behind a product";
        if (!p) same_bits(what, out[path], out[0], (size_t)(n * q_dim), sizeof(float));
        const size_t bytes = plane_bytes(&a->c, plane[0]);
        same_bits(p ? "v plane" : "k plane", fetch(plane[1]->data, bytes, 1), fetch(plane[0]->data, bytes, 1),
                  bytes / kv_bytes(t.type), kv_bytes(t.type));
    }
    sweep();
}

static void test_attend(void) {
    static const KvType types[] = { KV_F32, KV_F16, KV_BF16 };
    static const int lens[] = { 0, 1, 63, 64, 65, 128 }, edges[] = { 1023, 1024, 1025, 1026 };
    Step *s = alloc_or_die(1, sizeof *s);
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
            attend_chain((AttendCase){ types[k], 128 << k, group, 1, 192, 16 << k, 0, OWN_CAUSAL, false, false, 0.0625f },
                         100, 2);
        }
    attend_chain((AttendCase){ KV_F32, 256, 4, 2, 256, 0, 0, OWN_CAUSAL, false, false, 1 }, 130, 64);
    attend_chain((AttendCase){ KV_F16, 512, 4, 1, 256, 64, 0, OWN_CAUSAL, false, false, 1 }, 70, 64);
    attend_chain((AttendCase){ KV_F32, 128, 2, 1, 1152, 0, 0, OWN_CAUSAL, false, false, 1 }, 1026, 2);
    // sliding layers: the window's edge, and rings of 1024 and 1088 slots where they wrap
    for (int k = 0; k < 4; k++) {
        attend_chain((AttendCase){ KV_F32, 256, 2, 1, 1024, 0, 961, OWN_CAUSAL, false, false, 1 }, edges[k], k % 2 ? 1 : 4);
        attend_chain((AttendCase){ types[k % 3], 128, 2, 1, 1088, 0, 1024, OWN_CAUSAL, false, false, 1 }, edges[k],
                     k % 2 ? 5 : 2);
        attend_chain((AttendCase){ KV_F32, 128, 2, 1, 1088, 0, 1024, OWN_CAUSAL, false, false, 1 }, edges[k] + 62, k + 1);
        // a narrower reader
        attend_chain((AttendCase){ KV_F16, 128, 4, 2, 1088, 0, 512, OWN_CAUSAL, false, false, 1 }, edges[k] + 2000, 3);
    }
    attend_chain((AttendCase){ KV_F32, 256, 2, 1, 1088, 0, 1024, OWN_CAUSAL, false, false, 1 }, 1060, 64);
    // own rows leave the window
    attend_chain((AttendCase){ KV_F32, 128, 2, 2, 128, 0, 16, OWN_CAUSAL, false, false, 1 }, 100, 64);
    attend_chain((AttendCase){ KV_F32, 128, 2, 1, 128, 0, 1, OWN_CAUSAL, false, false, 1 }, 100, 3);

    for (int k = 0; k < 6; k++) {                      // trees: bushy, narrow, balanced; with a session beside them
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
    for (int k = 0; k < 5; k++) {                      // prompt steps: rows of the step in the stage
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
        attend_case((AttendCase){ types[k], 256, 4, 2, 128, k == 1 ? 32 : 0, k == 2 ? 40 : 0, OWN_CAUSAL, false, true, 1 }, s);
    }
    for (int k = 0; k < 12; k++) {                     // one launch for store and attention
        memset(s, 0, sizeof *s);
        if (k % 3 == 2) add_tree(s, 1, 30, 20, 4);
        else add_chain(s, 1, 30 + k, k % 3 ? 5 : 1);
        if (k >= 6) add_chain(s, 0, 60, 3);
        attend_store_case((AttendCase){ types[k % 3], 128 << k % 2, 4, 2, 128, k % 2 && k > 3 ? 32 : 0, k == 2 ? 25 : 0,
                                        OWN_CAUSAL, k == 1, false, 1 }, k % 4 == 3, s);
    }
    // Caches of f16, on tensor cores: more keys than one round of parts has, narrow and wide groups, trees behind many keys.
    for (int k = 0; k < 4; k++) {
        static const int far[] = { 2047, 2080, 2175, 4300 };
        attend_chain((AttendCase){ KV_F16, 128, 4, 2, 4416, k % 2 ? 32 : 0, 0, OWN_CAUSAL, false, false, 1 }, far[k], 1 + k * 3);
        attend_chain((AttendCase){ KV_F16, 256, k % 2 ? 3 : 5, 1, 576, 0, 512, OWN_CAUSAL, false, false, 1 }, far[k], k * 11 + 1);
        memset(s, 0, sizeof *s);
        add_tree(s, 1, far[k], 30, 6);
        add_chain(s, 0, 31 * k, 2);
        attend_case((AttendCase){ KV_F16, 128, 2, 2, k < 3 ? 2240 : 4416, 0, k == 1 ? 700 : 0, OWN_CAUSAL, false, false, 1 }, s);
    }
    attend_chain((AttendCase){ KV_F16, 512, 16, 2, 2176, 64, 0, OWN_CAUSAL, false, false, 1 }, 200, 9);
    attend_chain((AttendCase){ KV_F16, 128, 18, 9, 1088, 0, 1024, OWN_CAUSAL, false, false, 1 }, 1500, 3);
    for (int k = 0; k < 12; k++) {                     // few rows at the edges of tiles and parts; sessions side by side
        static const int at[] = { 0, 29, 31, 32, 60, 63, 64, 127, 500, 1090, 2030, 2111 };
        memset(s, 0, sizeof *s);
        if (k % 4 == 3) add_tree(s, 1, at[k], 5, 2);
        else add_chain(s, 1, at[k], k % 3 == 0 ? 1 : k % 3 == 1 ? 8 : 4);
        if (k % 4 == 2) add_chain(s, 0, 95, 2);
        attend_store_case((AttendCase){ KV_F16, 128 << k % 3, 8, k % 2 ? 2 : 1, k < 9 ? 576 : 2240, k % 3 == 2 ? 64 : 0,
                                        k == 8 ? 300 : 0, OWN_CAUSAL, false, false, 1 }, k == 4, s);
    }
    // Prompts: the heads of all five models, rings that wrap and pass the stage, windows that end within a tile.
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
    for (int k = 0; k < 4; k++) {                      // sessions side by side in one block
        memset(s, 0, sizeof *s);
        add_chain(s, 1, 70, 66);
        if (k % 2) add_tree(s, 2, 100, 13, 5);
        add_chain(s, 0, k < 2 ? 130 : 500, k < 2 ? 1 : 70);
        attend_case((AttendCase){ KV_F16, k < 2 ? 512 : 256, 8, 1, k < 2 ? 256 : 128, k == 1 ? 64 : 0, k < 2 ? 0 : 65,
                                  OWN_CAUSAL, k > 1, false, 1 }, s);
    }
    free(s);
}

// Bytes of row `slot` of one head in a host image.
static uint8_t *image_row(const TestCache *t, int plane, int seq, int head, int slot, size_t *bytes) {
    const KvPlane *p = plane ? &t->c.v : &t->c.k;
    *bytes = (size_t)p->dim * kv_bytes(p->type);
    return (plane ? t->v : t->k) + row_of(&t->c, seq, head, slot) * *bytes;
}

static void check_planes(const TestCache *t, const char *name) {
    char what[80];
    for (int p = 0; p < 2; p++) {
        const KvPlane *plane = p ? &t->c.v : &t->c.k;
        const size_t bytes = plane_bytes(&t->c, plane);
        snprintf(what, sizeof what, "%s, %s plane", name, p ? "v" : "k");
        same_bits(what, fetch(plane->data, bytes, 1), p ? t->v : t->k, bytes / kv_bytes(plane->type), kv_bytes(plane->type));
    }
}

static void test_kv_commit(void) {
    for (int k = 0; k < 12; k++) {
        Step *s = keep(1, sizeof *s);
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
        TestCache caches[3] = { new_cache(KV_F16, 3, 2, 64, ring_slots, 0), new_cache(KV_F32, 3, 1, 128, 320, 0),
                                new_cache(KV_BF16, 3, 2, 64, 320, 8) };
        Cache list[3];
        for (int l = 0; l < 3; l++) {
            fill_cache(&caches[l]);
            put_cache(&caches[l], false);
            list[l] = caches[l].c;
        }
        enum { COUNTED = 2048 };                       // tokens of the counted vocabulary
        int32_t *counts = keep(MAX_SEGS * COUNTED, sizeof *counts), *want_counts = keep(MAX_SEGS * COUNTED, sizeof *counts);
        for (int i = 0; i < s->n_segs; i++)
            for (int j = 0; j < s->segs[i].n; j++) s->rows[s->segs[i].first + j].token = (int32_t)rnd(COUNTED);
        int32_t n_accept[MAX_SEGS] = { 0 }, *path = keep(MAX_SEGS * STEP_ROWS, sizeof *path), want_len[MAX_SEGS];
        memcpy(want_len, s->len, sizeof want_len);
        for (int i = 0; i < s->n_segs; i++) {
            const Segment *seg = &s->segs[i];
            int on_path = 0;
            if (seg->kind == SEG_TREE) {               // down to a random leaf, or to its start
                const uint64_t ancestors = s->rows[seg->first + seg->n - 1 - (int)rnd((uint32_t)seg->n / 2)].ancestors;
                for (int j = 0; j < seg->n; j++)
                    if (ancestors >> j & 1) path[i * STEP_ROWS + on_path++] = j;
            } else {
                on_path = seg->n;
                for (int j = 0; j < STEP_ROWS; j++) path[i * STEP_ROWS + j] = -1;      // not read
            }
            n_accept[i] = k == 5 ? 0 : k == 7 ? 1 : k % 2 ? on_path : 1 + (int32_t)rnd((uint32_t)on_path);
            want_len[seg->seq] += n_accept[i];
            for (int j = 0; j < n_accept[i]; j++)
                want_counts[seg->seq * COUNTED + s->rows[seg->first + (seg->kind == SEG_TREE ? path[i * STEP_ROWS + j] : j)].token]++;
        }
        Batch batch = put_batch(s);
        int32_t *counts_there = k % 2 ? put_changing("counts", counts, MAX_SEGS * COUNTED, sizeof *counts) : NULL;
        batch.len = put_changing("len", s->len, MAX_SEGS, sizeof(int32_t));
        op->kv_commit(&(KvCommit){ .batch = &batch, .caches = list, .n_caches = 3,
                                   .n_accept = put("n_accept", n_accept, MAX_SEGS, sizeof(int32_t)),
                                   .path = k % 4 == 3 ? NULL : put("path", path, MAX_SEGS * STEP_ROWS, sizeof(int32_t)),
                                   .counts = counts_there, .vocab = COUNTED });
        if (counts_there)
            same_ints("counts", fetch(counts_there, MAX_SEGS * COUNTED, sizeof(int32_t)), want_counts, MAX_SEGS * COUNTED);
        same_ints("len", fetch(batch.len, MAX_SEGS, sizeof(int32_t)), want_len, MAX_SEGS);
        for (int l = 0; l < 3; l++) {
            TestCache *t = &caches[l];
            for (int i = 0; i < s->n_segs; i++)
                for (int p = 0; p < 2; p++)
                    for (int g = 0; g < t->c.n_kv_heads; g++) {
                        const Segment *seg = &s->segs[i];
                        const int len = s->len[seg->seq];
                        size_t bytes;
                        for (int j = 0; seg->kind == SEG_TREE && j < n_accept[i]; j++) {
                            const uint8_t *from = image_row(t, p, seg->seq, g, (len + path[i * STEP_ROWS + j]) % t->c.slots,
                                                            &bytes);
                            memmove(image_row(t, p, seg->seq, g, (len + j) % t->c.slots, &bytes), from, bytes);
                        }
                        // What rejected rows leave behind is the backend's business.
                        const KvPlane *plane = p ? &t->c.v : &t->c.k;
                        for (int j = n_accept[i]; j < seg->n; j++) {
                            uint8_t *row = image_row(t, p, seg->seq, g, (len + j) % t->c.slots, &bytes);
                            memcpy(row, fetch((const char *)plane->data + (row - (p ? t->v : t->k)), bytes, 1), bytes);
                        }
                    }
            check_planes(t, l == 0 ? "ring" : l == 1 ? "global" : "tied");
        }
        sweep();
    }
}

static void test_kv_copy(void) {
    static const KvType types[] = { KV_F32, KV_F16, KV_BF16 };
    static const struct { int len, n, len_2, n_2; } cases[] = { { 77, 300, 100, 50 }, { 0, 128, 0, 1 },
                                                                { 0, 129, 1000, 64 }, { 1000, 7, 127, 2 }, { 5, 320, 3, 190 } };
    for (int k = 0; k < 5; k++) {
        Step *s = keep(1, sizeof *s);
        add_chain(s, 1, cases[k].len, cases[k].n);
        add_chain(s, 0, cases[k].len_2, cases[k].n_2);
        CASE("kv_copy", "%s, %d rows at %d and %d at %d into 128 slots", kv_name(types[k % 3]), cases[k].n, cases[k].len,
             cases[k].n_2, cases[k].len_2);
        TestCache ring = new_cache(types[k % 3], 3, 2, 64, 128, 0), stage = new_cache(types[k % 3], 1, 2, 64, MAX_STEP, 0);
        fill_cache(&ring);
        fill_cache(&stage);
        put_cache(&ring, false);
        put_cache(&stage, true);
        const Batch batch = put_batch(s);
        op->kv_copy(&(KvCopy){ .batch = &batch, .cache = &ring.c, .stage = &stage.c });
        for (int r = 0; r < s->n_rows; r++)            // in order: a later row of the same slot wins
            for (int p = 0; p < 2; p++)
                for (int g = 0; g < 2; g++) {
                    const Segment *seg = &s->segs[s->rows[r].seg];
                    size_t bytes;
                    const uint8_t *from = image_row(&stage, p, 0, g, seg->first + s->rows[r].index, &bytes);
                    memcpy(image_row(&ring, p, seg->seq, g, (s->len[seg->seq] + s->rows[r].index) % 128, &bytes), from, bytes);
                }
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
            const double cap = k == 1 ? 0 : t % 2 ? 30 : 1.5;      // 1.5: logits of this test's size reach its bend
            if (cols % block_elems(type)) continue;
            CASE("head", "%s (%d, %d), cap %g, hidden %d", type_name(type), vocab, cols, cap, k < 2);
            Matrix w = matrix(type, 1, vocab, cols);
            const In in = random_in(rows, cols, k == 0 ? IN_X | IN_DELTA | IN_W_POST | IN_SCALE | IN_W_PRE : IN_X | IN_W_PRE);
            const Input ref = ref_in(&in, rows, cols);
            const In dev = put_in(&in, rows, cols);
            Expect e = expect(rows, vocab);
            for (int i = 0; i < vocab; i++)
                for (int r = 0; r < rows; r++) {
                    Ref z = product(&w, 0, i, &ref, r);
                    if (cap > 0) z = (Ref){ cap * tanh(z.v / cap), z.bound + TOL_ACT * cap };
                    set(&e, r * vocab + i, z);
                }
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

// The k largest logits and their sum, beside whole rows and without them.
static void test_head_top(void) {
    static const struct { int vocab, top_k; } cases[] = { { 100, 1 }, { 500, 8 }, { 500, 100 }, { 33, 33 }, { 3000, 64 } };
    for (int k = 0; k < 10; k++) {
        const int vocab = cases[k / 2].vocab, top_k = cases[k / 2].top_k, rows = 7, cols = 64, like = vocab / 3;
        const bool whole = k % 2;
        CASE("head", "top-k %d of %d, logits %d", top_k, vocab, whole);
        float *values = floats((size_t)vocab * cols, 0.5, 0);
        // ties: some rows are alike; k 6: a row of NaN
        for (int i = 0; i < 3; i++) memcpy(values + (like + 7 * i) * cols, values + like * cols, (size_t)cols * sizeof *values);
        if (k == 6) for (int i = 0; i < cols; i++) values[5 * cols + i] = NAN;
        const Tensor w = { .data = put_f("w", values, vocab * cols), .type = T_F32, .rows = vocab, .cols = cols, .n = 1 };
        float *x = floats(rows * cols, 1, 0), *norm = floats(cols, 0.2, 1);
        for (int i = 0; i < cols; i++) x[i] = values[like * cols + i];         // row 0: the ties come first
        const In in = { .x = put_f("x", x, rows * cols), .scale = 1, .w_pre = put_f("w_pre", norm, cols), .eps = 1e-6f };
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
        double *sums = keep(rows, sizeof *sums), *bounds = keep(rows, sizeof *bounds);
        for (int r = 0; r < rows; r++) {
            const float *z = logits + r * vocab;
            bool *taken = keep(vocab, 1);
            for (int j = 0; j < top_k; j++) {
                int best = -1;
                for (int i = 0; i < vocab; i++)                                // a NaN comes after all numbers
                    if (!taken[i] && (best < 0 || z[i] > z[best] || (isnan(z[best]) && !isnan(z[i])))) best = i;
                taken[best] = true;
                ids[r * top_k + j] = best;
                top[r * top_k + j] = z[best];
            }
            for (int i = 0; i < vocab; i++) sums[r] += exp((double)z[i]);
            sums[r] = log(sums[r]);
            bounds[r] = TOL_LOGPROB * fmax(1, fabs(sums[r]));
        }
        same_ints("top_ids", fetch(o.top_ids, (size_t)(rows * top_k), sizeof *ids), ids, rows * top_k);
        same_bits("top_logits", fetch_f(o.top_logits, rows * top_k), top, (size_t)(rows * top_k), sizeof *top);
        const float *got = fetch_f(o.logsumexp, rows);
        if (k != 6) {
            compare("logsumexp", got, 1, sums, bounds, rows, 1);
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

static void test_logprob(void) {
    static const int sizes[] = { 1, 77, 4000 };
    for (int k = 0; k < 6; k++) {
        const int vocab = sizes[k % 3], n = 9;
        CASE("logprob", "vocab %d, case %d", vocab, k);
        float *logits = floats(n * vocab, k < 3 ? 8 : 80, k < 3 ? 0 : 500);    // exp alone would overflow
        int32_t *ids = keep(n, sizeof *ids);
        double *want = keep(n, sizeof *want), *bound = keep(n, sizeof *bound);
        for (int r = 0; r < n; r++) {
            float *z = logits + r * vocab;
            ids[r] = r == 1 ? vocab - 1 : (int32_t)rnd((uint32_t)vocab);
            if (vocab > 1 && r == 2) for (int i = 0; i < vocab; i += 2) z[i] = -INFINITY, ids[r] = 1;
            double sum = 0, largest = -INFINITY;
            for (int i = 0; i < vocab; i++) largest = fmax(largest, (double)z[i]);
            for (int i = 0; i < vocab; i++) sum += exp((double)z[i] - largest);
            want[r] = (double)z[ids[r]] - largest - log(sum);
            bound[r] = TOL_LOGPROB * fmax(1, fabs(want[r]));
        }
        float *out = room_f("out", n);
        op->logprob(&(Logprob){ .n_rows = n, .vocab = vocab, .logits = put_f("logits", logits, n * vocab),
                                .ids = put("ids", ids, (size_t)n, sizeof *ids), .out = out });
        compare("out", fetch_f(out, n), 1, want, bound, n, 1);
        ids[0] = -1, ids[1] = vocab;
        op->logprob(&(Logprob){ .n_rows = n, .vocab = vocab, .logits = put_f("logits", logits, n * vocab),
                                .ids = put("ids", ids, (size_t)n, sizeof *ids), .out = out });
        const float *got = fetch_f(out, n);
        CHECK(isnan(got[0]) && isnan(got[1]), "%s: out: got %g and %g for ids outside the vocabulary, want NaN", now, (double)got[0],
              (double)got[1]);
        sweep();
    }
}

static void sample_greedy(void) {
    for (int k = 0; k < 4; k++) {
        const int vocab = k < 2 ? 77 : 3000, n = 12, words = (vocab + 31) / 32;
        const bool masked = k % 2;
        CASE("sample", "greedy, vocab %d, mask %d", vocab, masked);
        Step *s = keep(1, sizeof *s);
        add_chain(s, 1, 9, 5);
        add_tree(s, 0, 3, 7, 2);
        const Batch batch = put_batch(s);
        float *logits = floats(n * vocab, 3, 0);
        uint32_t *mask = keep(n * words, sizeof *mask);
        int32_t want[12];
        for (int r = 0; r < n; r++) {
            float *z = logits + r * vocab;
            z[rnd((uint32_t)vocab)] = r % 2 ? 5.0f : 4.0f;         // ties among the largest, also at the ends
            z[rnd((uint32_t)vocab)] = z[vocab - 1] = 5;
            if (r % 3 == 0) z[0] = 5;
            if (r == 4) for (int i = 0; i < vocab; i++) z[i] = i % 2 ? -INFINITY : -7;
            if (r == 5) for (int i = 0; i < vocab; i++) z[i] = -0.5f;
            for (int w = 0; w < words; w++) mask[r * words + w] = masked ? rnd(1u << 31) << 1 | rnd(2) : ~0u;
            if (masked && r == 7) {                                // one token alone
                for (int w = 0; w < words; w++) mask[r * words + w] = 0;
                mask[r * words + (vocab - 2) / 32] = 1u << ((vocab - 2) % 32);
            }
            want[r] = -1;
            for (int i = 0; i < vocab; i++)
                if ((!masked || mask[r * words + i / 32] >> (i % 32) & 1) && (want[r] < 0 || z[i] > z[want[r]])) want[r] = i;
        }
        const SampleParams params[2] = { { .seed = 1, .temperature = 0, .top_p = 1, .repeat = 1 },
                                         { .seed = 2, .temperature = -1, .top_k = 5, .top_p = 0.5f, .repeat = 1 } };
        Row *feed = put_changing("feed", s->rows, (size_t)n, sizeof(Row));
        int32_t *out = room("out", (size_t)n, sizeof(int32_t));
        op->sample(&(Sample){ .batch = &batch, .vocab = vocab, .logits = put_f("logits", logits, n * vocab),
                              .params = put("params", params, 2, sizeof *params),
                              .mask = masked ? put("mask", mask, (size_t)(n * words), sizeof *mask) : NULL, .out = out,
                              .feed = k >= 2 ? feed : NULL });
        same_ints("out", fetch(out, (size_t)n, sizeof(int32_t)), want, n);
        for (int r = 0; k >= 2 && r < n; r++) s->rows[r].token = want[r];
        same_bits("feed", fetch(feed, (size_t)n, sizeof(Row)), s->rows, (size_t)n, sizeof(Row));
        sweep();
    }
}

// Probabilities of gemma4.h: mask, temperature, top-k, top-p, min-p. Returns how many tokens stay.
static int ref_probabilities(double *p, const float *logits, const uint32_t *mask, int vocab, const SampleParams *s) {
    int order[4096], n = 0, kept;
    for (int i = 0; i < vocab; i++) {
        p[i] = 0;
        if (!mask || mask[i / 32] >> (i % 32) & 1) order[n++] = i;
    }
    for (int i = 1; i < n; i++)                        // descending logit, lower id first
        for (int j = i; j > 0 && logits[order[j]] > logits[order[j - 1]]; j--) {
            const int t = order[j];
            order[j] = order[j - 1];
            order[j - 1] = t;
        }
    kept = s->top_k > 0 && s->top_k < n ? s->top_k : n;
    double total = 0, mass = 0;
    for (int i = 0; i < kept; i++)
        total += p[order[i]] = exp(((double)logits[order[i]] - (double)logits[order[0]]) / (double)s->temperature);
    int stay = 0;
    for (; stay < kept && (stay == 0 || mass < (double)s->top_p * total); stay++) mass += p[order[stay]];
    while (stay > 1 && p[order[stay - 1]] < (double)s->min_p) mass -= p[order[--stay]];
    for (int i = stay; i < kept; i++) p[order[i]] = 0;
    for (int i = 0; i < stay; i++) p[order[i]] /= mass;
    return stay;
}

static void sample_distribution(void) {
    static const struct { int vocab; float temperature; int top_k; float top_p, min_p; bool mask; } cases[] = {
        { 40, 1, 0, 1, 0, false }, { 40, 0.7f, 0, 1, 0, true }, { 77, 1.5f, 10, 1, 0, false }, { 77, 1, 0, 0.8f, 0, false },
        { 40, 1, 0, 1, 0.1f, false }, { 77, 1.2f, 20, 0.9f, 0.05f, true }, { 33, 2, 1, 1, 0, false },
        { 7, 100, 0, 0.5f, 0, false }, { 5, 1, 64, 0, 0, false }
    };
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        const int vocab = cases[k].vocab, words = (vocab + 31) / 32, n = 64, calls = draws;
        const SampleParams params = { .seed = 1000 + k, .temperature = cases[k].temperature, .top_k = cases[k].top_k,
                                      .top_p = cases[k].top_p, .min_p = cases[k].min_p, .repeat = 1 };
        CASE("sample", "vocab %d, temperature %g, top-k %d, top-p %g, min-p %g, mask %d", vocab, (double)params.temperature,
             (int)params.top_k, (double)params.top_p,
             (double)params.min_p, cases[k].mask);
        Step *s = keep(1, sizeof *s);
        add_chain(s, 0, 0, n);
        Batch batch = put_batch(s);
        batch.len = put_changing("len", s->len, MAX_SEGS, sizeof(int32_t));
        float *row = floats(vocab, 2.5, 0);
        row[vocab - 1] = 2.4f;          // the last token counts
        float *logits = keep(n * vocab, sizeof *logits);
        uint32_t *mask = keep(n * words, sizeof *mask);
        for (int i = 0; i < vocab; i++) mask[i / 32] |= (uint32_t)(i % 5 != 2) << (i % 32);
        for (int r = 0; r < n; r++) {
            memcpy(logits + r * vocab, row, (size_t)vocab * sizeof *row);
            memcpy(mask + r * words, mask, (size_t)words * sizeof *mask);
        }
        int32_t *out = room("out", (size_t)n, sizeof(int32_t));
        const Sample o = { .batch = &batch, .vocab = vocab, .logits = put_f("logits", logits, n * vocab),
                           .params = put("params", &params, 1, sizeof params),
                           .mask = cases[k].mask ? put("mask", mask, (size_t)(n * words), sizeof *mask) : NULL, .out = out };
        double p[128], chi = 0, rest_p = 0, rest_n = 0;
        int count[128] = { 0 }, bins = 0, outside = 0, first_bad = -1;
        const int stay = ref_probabilities(p, row, cases[k].mask ? mask : NULL, vocab, &params);
        for (int c = 0; c < calls; c++) {
            const int32_t len = c * n;
            int32_t got[64];
            op->copy(&(Copy){ batch.len, &len, sizeof len, COPY_IN });
            op->sample(&o);
            op->copy(&(Copy){ got, out, sizeof got, COPY_OUT });
            op->wait();
            for (int r = 0; r < n; r++) {
                const bool allowed = got[r] >= 0 && got[r] < vocab && p[got[r]] > 0;
                if (allowed) count[got[r]]++;
                else if (outside++ == 0) first_bad = got[r];
            }
        }
        CHECK(!outside, "%s: out: got token %d, which cannot be drawn, %d of %d times, want 0", now, first_bad, outside,
              calls * n);
        for (int i = 0; i < vocab; i++) {
            const double want = p[i] * calls * n;
            if (want >= 8) chi += (count[i] - want) * (count[i] - want) / want, bins++;
            else rest_p += want, rest_n += count[i];
        }
        if (rest_p >= 8) chi += (rest_n - rest_p) * (rest_n - rest_p) / rest_p, bins++;
        // Wilson and Hilferty: the cube root of chi / df is nearly normal.
        const double df = bins - 1, a = 2 / (9 * (df > 0 ? df : 1)), root = 1 - a + CHI_Z * sqrt(a),
                     limit = df > 0 ? df * root * root * root : 1e-9;
        CHECK(chi <= limit, "%s: chi-square of %d draws over %d of %d tokens: got %.1f, want at most %.1f", now, calls * n,
              bins, stay, chi, limit);
        sweep();
    }
}

// The token depends on seed, position and logits alone.
static void sample_same(void) {
    const int vocab = 3000, n = 40;
    for (int k = 0; k < 3; k++) {
        const int top_k = k == 0 ? 0 : k == 1 ? 500 : 1500;
        const SampleParams one = { .seed = 7, .temperature = 1, .top_k = top_k, .top_p = 0.95f, .repeat = 1 },
                           params[3] = { one, one, one };
        CASE("sample", "same seed and position, top-k %d", top_k);
        const float *dev_params = put("params", params, 3, sizeof one);
        // By position, 100 .. 100 + n - 1, in a chain of one session; then other rows, segments and sessions.
        const float *by_pos = floats(n * vocab, 4, 0);
        double *p = keep(vocab, sizeof *p);
        int32_t want[64];
        for (int layout = 0; layout < 4; layout++) {
            Step *s = keep(1, sizeof *s);
            if (layout == 0) add_chain(s, 0, 100, n);
            if (layout == 1) add_chain(s, 2, 117, 1);
            if (layout == 2) add_chain(s, 1, 120, 5), add_chain(s, 2, 103, 3), add_chain(s, 0, 139, 1);
            if (layout == 3) add_chain(s, 2, 130, 2), add_tree(s, 1, 100, 20, 3);
            const Batch batch = put_batch(s);
            float *logits = keep(s->n_rows * vocab, sizeof *logits);
            int32_t *out = room("out", (size_t)s->n_rows, sizeof *out);
            int32_t expected[64];
            for (int r = 0; r < s->n_rows; r++) {
                const int pos = s->len[s->segs[s->rows[r].seg].seq] + s->rows[r].depth;
                memcpy(logits + r * vocab, by_pos + (pos - 100) * vocab, (size_t)vocab * sizeof *logits);
                expected[r] = layout ? want[pos - 100] : 0;
            }
            op->sample(&(Sample){ .batch = &batch, .vocab = vocab, .logits = put_f("logits", logits, s->n_rows * vocab),
                                  .params = (const SampleParams *)(const void *)dev_params, .out = out });
            const int32_t *got = fetch(out, (size_t)s->n_rows, sizeof *out);
            if (layout) same_ints("out", got, expected, s->n_rows);
            else memcpy(want, got, (size_t)n * sizeof *want);
        }
        int outside = 0, changes = 0;
        for (int r = 0; r < n; r += 8) {
            ref_probabilities(p, by_pos + r * vocab, NULL, vocab, &one);
            outside += want[r] < 0 || want[r] >= vocab || p[want[r]] <= 0;
        }
        for (int r = 1; r < n; r++) changes += want[r] != want[r - 1];
        CHECK(!outside && changes > n / 2, "%s: out: got %d tokens that cannot be drawn and %d changes, want 0 and more than %d",
              now, outside, changes, n / 2);
        sweep();
    }
}

static void sample_refused(void) {
    const int vocab = 77, n = 4;
    for (int k = 0; k < 2; k++) {
        CASE("sample", "rows without an answer, temperature %d", k);
        Step *s = keep(1, sizeof *s);
        add_chain(s, 0, 3, n);
        const Batch batch = put_batch(s);
        float *logits = floats(n * vocab, 1, 0);
        // 3 words a row; bits behind the vocabulary mean nothing
        uint32_t mask[12] = { 0, 0, 1, ~0u, ~1u, ~0u, 0, 0, 0, 4, 0, 0 };
        mask[8] = 1u << 20;
        logits[vocab + 32] = NAN;                      // row 1, not allowed there, and all the same
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
    sample_greedy();
    sample_refused();
    sample_distribution();
    sample_same();
}

// ---- all ------------------------------------------------------------------------------------------------------------

// only: names of operations, NULL after the last; none: all.
static void run_all(const Ops *table, char **only) {
    op = table;
    const Limits lim = { .max_rows = MAX_STEP, .max_cols = 4352, .max_experts = 8, .vocab = 4096 };
    op->init(&lim);
    size_t free_bytes = 1, total = 0;
    op->memory(&free_bytes, &total);
    CHECK(total && free_bytes <= total, "%s memory: got %zu bytes free of %zu", op->name, free_bytes, total);
    const struct { const char *name; bool filled; void (*test)(void); } tests[] = {
        { "embed", op->embed, test_embed }, { "ple_rows", op->ple_rows, test_ple_rows }, { "matmul", op->matmul, test_matmul },
        { "route", op->route, test_route }, { "gate_up", op->gate_up, test_gate_up },
        { "expert_gate_up", op->expert_gate_up, test_expert_gate_up },
        { "expert_down", op->expert_down, test_expert_down }, { "ple_inject", op->ple_inject, test_ple_inject },
        { "close", op->close, test_close },
        { "gather_rows", op->gather_rows, test_gather_rows }, { "qkv_store", op->qkv_store, test_qkv_store },
        { "attend", op->attend, test_attend },
        { "kv_commit", op->kv_commit, test_kv_commit }, { "kv_copy", op->kv_copy, test_kv_copy },
        { "head", op->head, test_head }, { "logprob", op->logprob, test_logprob }, { "sample", op->sample, test_sample }
    };
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) {
        const double start = seconds();
        char why[80];
        bool wanted = !*only;
        for (char **name = only; *name; name++) wanted |= strcmp(*name, tests[i].name) == 0;
        if (!wanted) continue;
        random_state = i + 1;           // a test gives the same numbers whichever others run
        snprintf(why, sizeof why, "%s has no %s", op->name, tests[i].name);
        if (tests[i].filled) tests[i].test();
        else SKIP(why);
        if (getenv("TEST_TIMES")) printf("%-16s %6.2f s\n", tests[i].name, seconds() - start);
    }
}

// Every item of a job is done once, whatever the number of items, threads and the size of a piece, and before parallel()
// returns; also in a child process, which has no threads to help it.
static int item_done[1000];

static void do_items(const void *task, int first, int end) {
    for (int i = first; i < end; i++) item_done[i] += *(const int *)task;
}

static void test_parallel(void) {
    for (int job = 0; job < 20000; job++) {
        const int n = job < 1000 ? job : 1 + job % 40, step = 1 + job % 7, one = 1;
        pool.n_threads = 1 + job % 4;
        memset(item_done, 0, sizeof item_done);
        parallel(n, step, do_items, &one);
        int bad = 0;
        for (int i = 0; i < 1000; i++) bad += item_done[i] != (i < n);
        if (bad || job % 100 == 0) CHECK(!bad, "parallel: job %d of %d items in pieces of %d: %d done wrongly", job, n, step, bad);
    }
    pool.n_threads = 3;
    const pid_t child = fork();
    if (!child) {
        memset(item_done, 0, sizeof item_done);
        parallel(1000, 1, do_items, &(int){ 1 });
        for (int i = 0; i < 1000; i++)
            if (item_done[i] != 1) _exit(1);
        _exit(0);
    }
    int status = 1;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && !status, "parallel: in a child process: status %d", status);
}

int main(int argc, char **argv) {
    const bool cpu = argc < 2 || strcmp(argv[1], "-cuda") != 0, few = argc > 2 && strcmp(argv[2], "-few") == 0;
    char **only = argv + (cpu ? 1 : few ? 3 : 2);
    if (!cpu && few) n_runs_100 = 7, in_step = 7, shape_step = 3, draws = 40;
    if (argc == 1) {
        start_threads(3);
        test_parallel();
    }
    if (cpu) run_all(cpu_ops(), only);
#ifdef USE_CUDA
    if (cuda_ops()) run_all(cuda_ops(), only);
    else SKIP("no GPU: the CUDA backend's operations");
#else
    SKIP("built without CUDA: the CUDA backend's operations");
#endif
    return test_done("ops");
}
