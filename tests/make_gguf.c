/* make_gguf.c - writes synthetic Gemma 4 GGUF files: real shapes and metadata, random weights.
 *
 * The tests need models, and the golden data needs exactly the models that it was computed with, but weights are too
 * large to commit. So a file is defined by its arguments: the same preset, quant, kind, seed, vocabulary and layer
 * count give the same bytes on every machine; tests/golden/SHA256 has their hashes. Every random number comes from a
 * published bit-exact generator (PCG64, seeded through numpy's SeedSequence from a SHA-256). Each tensor or pool has
 * its own stream, so the order of calls does not matter. Values are computed with +, -, *, / and sqrt of IEEE floats in
 * a fixed order, without exp and log.
 *
 *   make_gguf --preset P --quant Q --out FILE [--kind target|mtp|dflash] [--seed N] [--vocab N] [--layers N]
 *             [--drop-shared-kv] [--split-experts] [--separate-pools] [--sparse] [--sha256]
 *
 * The head of the file is built in memory and the weights are streamed, so any file needs at most about 250 MB of
 * memory. The models generate nonsense; drafters cannot predict their targets.
 *
 * HOW TO READ  main [9] -> build_* [5] -> assign_types [6] -> make_pools [7] -> write_file [8].
 * CONTENTS     search for "[n]"
 *   [1] Limits, helpers, die()             [6]  The type of each tensor
 *   [2] Random bytes: SHA-256, PCG64       [7]  Pools of random blocks
 *   [3] Presets and layers                 [8]  Writing
 *   [4] Metadata and tokenizer             [9]  Command line
 *   [5] Tensors of the three kinds
 * WEIGHTS      matrices: mean 0, standard deviation sigma = gain / sqrt(fan-in). Vectors: a mean and 10 % jitter, so
 *              that a swapped or omitted vector is noticed. The means are chosen so that the model behaves (see
 *              build_target). */
#define _POSIX_C_SOURCE 200809L      // stat, to remove only regular files after a failed write; ftruncate
#define _FILE_OFFSET_BITS 64
#include <errno.h>
#include <float.h>
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

// ==== [1] Limits, helpers, die() ===================================================================================
// Bad arguments, lack of memory and a failed write print one line and exit 1. All memory is allocated before the output
// file is created, so the only thing that can fail after that is writing.

#ifdef __clang__
#pragma STDC FP_CONTRACT OFF         // a*b + c rounds twice; gcc -std=c11 does so anyway and warns of the pragma
#endif
_Static_assert(FLT_EVAL_METHOD == 0, "float must be computed as float; on 32-bit x86 use -msse2 -mfpmath=sse");

enum { MAX_LAYERS = 512, ALIGNMENT = 32, HEAD_SWA = 256, HEAD_FULL = 512, MTP_LAYERS = 4, DFLASH_LAYERS = 5,
       DFLASH_BLOCK = 16 };

#if defined(__GNUC__)
__attribute__((format(printf, 1, 2), noreturn))
#endif
static void die(const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    fputs("make_gguf: error: ", stderr);
    vfprintf(stderr, fmt, ap);
    fputc('\n', stderr);
    va_end(ap);
    exit(1);
}

static void *alloc(size_t n, size_t size) {            // zeroed
    void *p = calloc(n ? n : 1, size);
    if (!p) die("out of memory: %zu bytes wanted", n * size);
    return p;
}

typedef struct { uint8_t *data; size_t len, cap; } Buf;

static void put(Buf *b, const void *data, size_t n) {
    if (b->len + n > b->cap) {
        b->cap = (b->len + n) * 2;
        b->data = realloc(b->data, b->cap);
        if (!b->data) die("out of memory: %zu bytes wanted", b->cap);
    }
    memcpy(b->data + b->len, data, n);
    b->len += n;
}

static void put_u32(Buf *b, uint32_t v) { put(b, &v, 4); }
static void put_u64(Buf *b, uint64_t v) { put(b, &v, 8); }
static void put_str(Buf *b, const char *s) {
    put_u64(b, strlen(s));
    put(b, s, strlen(s));
}

static uint64_t pad(uint64_t n) { return (ALIGNMENT - n % ALIGNMENT) % ALIGNMENT; }

static bool ends_with(const char *s, const char *end) {
    size_t n = strlen(s), m = strlen(end);
    return n >= m && strcmp(s + n - m, end) == 0;
}

// ==== [2] Random bytes: SHA-256, PCG64 =============================================================================
// stream(seed, tag) = PCG64(SeedSequence(first 16 bytes of SHA-256("seed/tag"), little-endian)), raw 64-bit outputs as
// little-endian bytes. Equal to numpy.random.PCG64(key).random_raw(), which numpy keeps stable between versions.

typedef struct { uint32_t h[8]; uint8_t block[64]; uint64_t len; } Sha256;      // FIPS 180-4

static void sha256_init(Sha256 *s) {
    static const uint32_t h0[8] = { 0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19 };
    memcpy(s->h, h0, sizeof h0);
    s->len = 0;
}

static uint32_t ror32(uint32_t x, int n) { return x >> n | x << (32 - n); }

static void sha256_block(uint32_t h[8], const uint8_t *p) {
    static const uint32_t K[64] = {
        0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
        0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
        0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
        0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
        0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
        0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
        0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
        0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2 };
    uint32_t w[64], a = h[0], b = h[1], c = h[2], d = h[3], e = h[4], f = h[5], g = h[6], k = h[7];
    for (int i = 0; i < 16; i++)
        w[i] = (uint32_t)p[4 * i] << 24 | (uint32_t)p[4 * i + 1] << 16 | (uint32_t)p[4 * i + 2] << 8 | p[4 * i + 3];
    for (int i = 16; i < 64; i++) {
        uint32_t s0 = ror32(w[i - 15], 7) ^ ror32(w[i - 15], 18) ^ w[i - 15] >> 3;
        uint32_t s1 = ror32(w[i - 2], 17) ^ ror32(w[i - 2], 19) ^ w[i - 2] >> 10;
        w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    for (int i = 0; i < 64; i++) {
        uint32_t t1 = k + (ror32(e, 6) ^ ror32(e, 11) ^ ror32(e, 25)) + ((e & f) ^ (~e & g)) + K[i] + w[i];
        uint32_t t2 = (ror32(a, 2) ^ ror32(a, 13) ^ ror32(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
        k = g; g = f; f = e; e = d + t1;
        d = c; c = b; b = a; a = t1 + t2;
    }
    h[0] += a; h[1] += b; h[2] += c; h[3] += d; h[4] += e; h[5] += f; h[6] += g; h[7] += k;
}

static void sha256_add(Sha256 *s, const void *data, size_t n) {
    const uint8_t *p = data;
    while (n) {
        size_t at = s->len % 64, m = n < 64 - at ? n : 64 - at;
        if (m == 64) {
            sha256_block(s->h, p);
        } else {
            memcpy(s->block + at, p, m);
            if (at + m == 64) sha256_block(s->h, s->block);
        }
        s->len += m;
        p += m;
        n -= m;
    }
}

static void sha256_end(Sha256 *s, uint8_t out[32]) {
    uint64_t bits = s->len * 8;
    uint8_t length[8], zero = 0, one = 0x80;
    for (int i = 0; i < 8; i++) length[i] = (uint8_t)(bits >> (56 - 8 * i));
    sha256_add(s, &one, 1);
    while (s->len % 64 != 56) sha256_add(s, &zero, 1);
    sha256_add(s, length, 8);
    for (int i = 0; i < 32; i++) out[i] = (uint8_t)(s->h[i / 4] >> (24 - 8 * (i % 4)));
}

// 128-bit numbers in two words, so that no compiler extension is needed.
typedef struct { uint64_t hi, lo; } U128;

static U128 add128(U128 a, U128 b) {
    uint64_t lo = a.lo + b.lo;
    return (U128){ a.hi + b.hi + (lo < a.lo), lo };
}

static U128 mul128(U128 a, U128 b) {                    // modulo 2^128
    uint64_t al = a.lo & 0xffffffff, ah = a.lo >> 32, bl = b.lo & 0xffffffff, bh = b.lo >> 32;
    uint64_t mid = ah * bl + (al * bl >> 32), mid2 = al * bh + (mid & 0xffffffff);
    uint64_t carry = ah * bh + (mid >> 32) + (mid2 >> 32);
    return (U128){ carry + a.hi * b.lo + a.lo * b.hi, a.lo * b.lo };
}

// PCG XSL-RR 128/64 (M. E. O'Neill, 2014): state = state * A + inc; output = rotr(hi ^ lo, top 6 bits of the new state)
typedef struct { U128 state, inc; uint8_t spare[8]; int n_spare; } Stream;

static uint64_t stream_next(Stream *s) {
    const U128 A = { 2549297995355413924u, 4865540595714422341u };
    s->state = add128(mul128(s->state, A), s->inc);
    uint64_t x = s->state.hi ^ s->state.lo;
    int rot = (int)(s->state.hi >> 58);
    return x >> rot | x << (-rot & 63);
}

// SeedSequence: 32-bit hash steps with a running multiplier, after M. E. O'Neill's seed_seq_fe.
static uint32_t seed_hash(uint32_t v, uint32_t *c, uint32_t mult) {
    v ^= *c;
    *c *= mult;
    v *= *c;
    return v ^ v >> 16;
}

static void hash_text(uint8_t out[32], uint32_t seed, const char *tag) {        // SHA-256("seed/tag")
    char text[160];
    Sha256 sha;
    int n = snprintf(text, sizeof text, "%lu/%s", (unsigned long)seed, tag);
    sha256_init(&sha);
    sha256_add(&sha, text, (size_t)n);
    sha256_end(&sha, out);
}

static Stream stream_open(uint32_t seed, const char *tag) {
    uint8_t key[32];
    uint32_t pool[4], c = 0x43b0d7e5;
    uint64_t word[4];
    hash_text(key, seed, tag);
    memcpy(pool, key, 16);
    for (int i = 0; i < 4; i++) pool[i] = seed_hash(pool[i], &c, 0x931e8875);
    for (int src = 0; src < 4; src++)
        for (int dst = 0; dst < 4; dst++)
            if (src != dst) {
                uint32_t v = 0xca01f9ddu * pool[dst] - 0x4973f715u * seed_hash(pool[src], &c, 0x931e8875);
                pool[dst] = v ^ v >> 16;
            }
    c = 0x8b51f9dd;
    for (int i = 0; i < 4; i++) {
        uint32_t lo = seed_hash(pool[2 * i % 4], &c, 0x58f38ded);
        word[i] = lo | (uint64_t)seed_hash(pool[(2 * i + 1) % 4], &c, 0x58f38ded) << 32;
    }
    Stream s = { .inc = { word[2] << 1 | word[3] >> 63, word[3] << 1 | 1 } };   // pcg64_srandom: step, add, step
    s.state = add128(s.inc, (U128){ word[0], word[1] });
    stream_next(&s);
    return s;
}

static void stream_bytes(Stream *s, uint8_t *out, size_t n) {
    for (; n && s->n_spare; n--) *out++ = s->spare[8 - s->n_spare--];
    for (; n >= 8; n -= 8, out += 8) {
        uint64_t v = stream_next(s);
        memcpy(out, &v, 8);
    }
    if (n) {
        uint64_t v = stream_next(s);
        memcpy(s->spare, &v, 8);
        memcpy(out, s->spare, n);
        s->n_spare = 8 - (int)n;
    }
}

// ==== [3] Presets and layers =======================================================================================
// Layer l has full attention when l % period == period - 1, and so have the last layer and the last one that owns KV.
// tiny-* and micro-* keep the true head sizes (256 sliding, 512 full) and every structural feature of their family.

typedef struct { int dim, ffn_dim, n_heads; } MtpPreset;
typedef struct { int ffn_dim, n_heads, n_kv_heads, head_dim, n_swa, n_target; } DflashPreset;
typedef struct {
    const char *name, *label;
    int  n_layers, dim, n_heads;
    int  n_kv_heads[2];              // sliding, full
    bool kv_array;                   // head_count_kv is written as one number per layer
    bool k_eq_v;                     // full layers have no attn_v: K is used as V
    int  ffn_dim, expert_ffn_dim, n_experts, n_experts_used;         // no experts: 0
    int  n_shared;                   // last layers that reuse the KV of earlier ones
    bool wide;                       // those layers have a double-width FFN
    int  ple_dim;                    // width of per-layer embeddings, 0 = none
    int  n_swa, period, n_ctx, n_vocab;
    MtpPreset mtp;
    DflashPreset dflash;
} Preset;

static const Preset PRESETS[] = {
    { "26b-a4b", "26B-A4B", .n_layers = 30, .dim = 2816, .n_heads = 16, .n_kv_heads = { 8, 2 }, .kv_array = true,
      .k_eq_v = true,
      .ffn_dim = 2112, .expert_ffn_dim = 704, .n_experts = 128, .n_experts_used = 8, .n_swa = 1024, .period = 6,
      .n_ctx = 262144, .n_vocab = 262144, .mtp = { 1024, 8192, 16 }, .dflash = { 5632, 32, 8, 128, 2048, 6 } },
    { "31b", "31B", .n_layers = 60, .dim = 5376, .n_heads = 32, .n_kv_heads = { 16, 4 }, .kv_array = true,
      .k_eq_v = true, .ffn_dim = 21504, .n_swa = 1024, .period = 6,
      .n_ctx = 262144, .n_vocab = 262144, .mtp = { 1024, 8192, 32 }, .dflash = { 10752, 64, 8, 128, 2048, 6 } },
    { "e2b", "E2B", .n_layers = 35, .dim = 1536, .n_heads = 8, .n_kv_heads = { 1, 1 },
      .ffn_dim = 6144, .n_shared = 20, .wide = true, .ple_dim = 256, .n_swa = 512, .period = 5,
      .n_ctx = 131072, .n_vocab = 262144, .mtp = { 256, 2048, 4 }, .dflash = { 3072, 16, 4, 128, 2048, 6 } },
    { "e4b", "E4B", .n_layers = 42, .dim = 2560, .n_heads = 8, .n_kv_heads = { 2, 2 },
      .ffn_dim = 10240, .n_shared = 18, .ple_dim = 256, .n_swa = 512, .period = 6,
      .n_ctx = 131072, .n_vocab = 262144, .mtp = { 256, 2048, 4 }, .dflash = { 5120, 32, 8, 128, 2048, 6 } },
    { "tiny-dense", "tiny", .n_layers = 6, .dim = 256, .n_heads = 4, .n_kv_heads = { 2, 1 }, .kv_array = true,
      .k_eq_v = true, .ffn_dim = 768, .n_swa = 64, .period = 3,
      .n_ctx = 8192, .n_vocab = 2048, .mtp = { 512, 512, 4 }, .dflash = { 512, 4, 2, 128, 128, 3 } },
    { "tiny-moe", "tiny", .n_layers = 6, .dim = 256, .n_heads = 4, .n_kv_heads = { 2, 1 }, .kv_array = true,
      .k_eq_v = true,
      .ffn_dim = 320, .expert_ffn_dim = 64, .n_experts = 16, .n_experts_used = 4, .n_swa = 64, .period = 3,
      .n_ctx = 8192, .n_vocab = 2048, .mtp = { 512, 512, 4 }, .dflash = { 512, 4, 2, 128, 128, 3 } },
    { "tiny-e", "tiny", .n_layers = 8, .dim = 256, .n_heads = 4, .n_kv_heads = { 1, 1 },
      .ffn_dim = 512, .n_shared = 4, .wide = true, .ple_dim = 256, .n_swa = 64, .period = 4,
      .n_ctx = 8192, .n_vocab = 2048, .mtp = { 512, 512, 4 }, .dflash = { 512, 4, 2, 128, 128, 3 } },
    { "micro-dense", "micro", .n_layers = 4, .dim = 64, .n_heads = 2, .n_kv_heads = { 2, 1 }, .kv_array = true,
      .k_eq_v = true, .ffn_dim = 192, .n_swa = 32, .period = 2,
      .n_ctx = 8192, .n_vocab = 512, .mtp = { 128, 128, 2 }, .dflash = { 128, 2, 1, 128, 64, 2 } },
    { "micro-moe", "micro", .n_layers = 4, .dim = 64, .n_heads = 2, .n_kv_heads = { 2, 1 }, .kv_array = true,
      .k_eq_v = true,
      .ffn_dim = 96, .expert_ffn_dim = 32, .n_experts = 8, .n_experts_used = 3, .n_swa = 32, .period = 2,
      .n_ctx = 8192, .n_vocab = 512, .mtp = { 128, 128, 2 }, .dflash = { 128, 2, 1, 128, 64, 2 } },
    { "micro-e", "micro", .n_layers = 6, .dim = 64, .n_heads = 2, .n_kv_heads = { 1, 1 },
      .ffn_dim = 128, .n_shared = 3, .wide = true, .ple_dim = 32, .n_swa = 32, .period = 3,
      .n_ctx = 8192, .n_vocab = 512, .mtp = { 128, 128, 2 }, .dflash = { 128, 2, 1, 128, 64, 2 } },
};
enum { N_PRESETS = sizeof PRESETS / sizeof *PRESETS };

typedef struct {                     // a target resolved to layers, after --layers and --vocab
    const Preset *p;
    int  n_layers, n_vocab;
    int  first_shared;               // layers from here on reuse KV; n_layers when none does
    bool is_swa[MAX_LAYERS];
    int  n_kv_heads[MAX_LAYERS], ffn_dim[MAX_LAYERS];
} Config;

static int head_dim(bool is_swa) { return is_swa ? HEAD_SWA : HEAD_FULL; }

static void config_init(Config *c, const Preset *p, int n_layers, int n_vocab) {
    c->p = p;
    c->n_layers = n_layers ? n_layers : p->n_layers;
    c->n_vocab = n_vocab ? n_vocab : p->n_vocab;
    int n = c->n_layers, n_shared = p->n_shared;
    if (n_shared && n != p->n_layers) {                 // keep the proportion, end the owners with a full layer
        int own = (int)rint((double)n * (p->n_layers - n_shared) / p->n_layers);        // ties to even
        own = own >= p->period ? own / p->period * p->period : own > 2 ? own : 2;
        n_shared = n - own >= 2 ? n - own : 0;
    }
    c->first_shared = n - n_shared;
    for (int l = 0; l < n; l++) c->is_swa[l] = l % p->period != p->period - 1;
    // The two layers before the shared ones are their KV sources, one of each kind; a cut model ends in the same way.
    for (int i = 0, end = c->first_shared; i < 2; i++, end = n) {
        c->is_swa[end - 1] = false;
        c->is_swa[end - 2] = true;
    }
    for (int l = 0; l < n; l++) {
        c->n_kv_heads[l] = p->n_kv_heads[c->is_swa[l] ? 0 : 1];
        c->ffn_dim[l] = p->ffn_dim * (p->wide && l >= c->first_shared ? 2 : 1);
    }
}

// The layers whose outputs a DFlash draft reads, counted from 0; never the last one. Returns how many.
static int target_layers(const Config *c, int out[]) {
    int k = c->p->dflash.n_target, n = c->n_layers, first = 1, last = n - 3;
    if (last - first < k - 1) {
        k = k < n - 1 ? k : n - 1;
        first = 0;
        last = n - 2;
    }
    for (int i = 0; i < k; i++) out[i] = k == 1 ? last : (int)(first + (double)(i * (last - first)) / (k - 1) + 0.5);
    return k;
}

// ==== [4] Metadata and tokenizer ===================================================================================
// A key that starts with "." belongs to the architecture: ".block_count" is written as "gemma4.block_count".

enum { KV_U32 = 4, KV_I32 = 5, KV_F32 = 6, KV_BOOL = 7, KV_STR = 8, KV_ARR = 9 };

typedef struct { Buf b; uint64_t n; const char *arch; } Meta;

static void md_key(Meta *md, const char *key, uint32_t type) {
    char full[96];
    snprintf(full, sizeof full, "%s%s", key[0] == '.' ? md->arch : "", key);
    put_str(&md->b, full);
    put_u32(&md->b, type);
    md->n++;
}
static void md_u32(Meta *md, const char *key, uint32_t v) { md_key(md, key, KV_U32); put_u32(&md->b, v); }
static void md_f32(Meta *md, const char *key, double v) {
    float f = (float)v; md_key(md, key, KV_F32); put(&md->b, &f, 4);
}
static void md_bool(Meta *md, const char *key, bool v) { uint8_t b = v; md_key(md, key, KV_BOOL); put(&md->b, &b, 1); }
static void md_str(Meta *md, const char *key, const char *v) { md_key(md, key, KV_STR); put_str(&md->b, v); }
static void md_array(Meta *md, const char *key, uint32_t type, int n) {         // the n elements follow
    md_key(md, key, KV_ARR);
    put_u32(&md->b, type);
    put_u64(&md->b, (uint64_t)n);
}
static void md_ints(Meta *md, const char *key, const int v[], int n) {
    md_array(md, key, KV_I32, n);
    for (int i = 0; i < n; i++) put_u32(&md->b, (uint32_t)v[i]);
}
static void md_bools(Meta *md, const char *key, const bool v[], int n) {
    md_array(md, key, KV_BOOL, n);
    for (int i = 0; i < n; i++) put(&md->b, &(uint8_t){ v[i] }, 1);
}

#define SPACE "\xe2\x96\x81"         // U+2581, which stands for a space
enum { NORMAL = 1, CONTROL = 3, USER = 4, BYTE = 6 };
typedef struct { char text[96]; int type; } Token;      // the longest text is a run of 31 SPACEs: 93 bytes

static const struct { int id; const char *text; int type; } SPECIAL[] = {
    { 0, "<pad>", CONTROL }, { 1, "<eos>", CONTROL }, { 2, "<bos>", CONTROL }, { 3, "<unk>", CONTROL },
    { 4, "<mask>", CONTROL }, { 5, "[multimodal]", NORMAL },
    { 46, "<|tool>", CONTROL }, { 47, "<tool|>", CONTROL }, { 48, "<|tool_call>", USER }, { 49, "<tool_call|>", USER },
    { 50, "<|tool_response>", USER }, { 51, "<tool_response|>", USER }, { 52, "<|\"|>", USER },
    { 98, "<|think|>", CONTROL },
    { 100, "<|channel>", USER }, { 101, "<channel|>", USER }, { 105, "<|turn>", CONTROL }, { 106, "<turn|>", CONTROL },
    { 255999, "<|image>", CONTROL }, { 256000, "<|audio>", CONTROL }, { 258880, "<|image|>", CONTROL },
    { 258881, "<|audio|>", CONTROL }, { 258882, "<image|>", CONTROL }, { 258883, "<audio|>", CONTROL },
    { 258884, "<|video|>", CONTROL } };

static const char *HTML[] = {
    "table caption thead tbody tfoot tr th td", "h1 h2 h3 h4 h5 h6 blockquote", "strong em b i u s sub sup code",
    "a html body img span bbox ul li div iframe footer" };

static const char *WORDS =           // their prefixes are tokens, built letter by letter by the merges
    "the of and to in is that it for was on are as with his they be at one have this from or had by hot but some what there "
    "we can out other were all your when up use how said an each she which do their time if will way about many then them "
    "would write like so these her long make thing see him two has look more day could go come did my sound no most number "
    "who over know water than call first people may down side been now find hello world once upon list code model token "
    "layer int return void def class import while print";

static const char *CHAT_TEMPLATE =
    "{{ bos_token }}"
    "{%- for message in messages -%}"
    "{{ '<|turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' }}"
    "{{ message['content'] | trim }}"
    "{{ '<turn|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|turn>model\\n' }}{%- endif -%}";

static void repeat(char *out, const char *s, int n) {
    for (*out = 0; n > 0; n--) strcat(out, s);
}

static const char *next_word(const char *s, char *word, size_t cap) {   // NULL after the last one
    size_t n = strcspn(s, " ");
    if (!n) return NULL;
    snprintf(word, cap, "%.*s", (int)n, s);
    return s + n + (s[n] == ' ');
}

// Special, unused, newline, HTML and byte tokens have the ids of the published vocabulary; below 1024 tokens the ASCII
// ones take the places of the HTML ones. Then ASCII, word prefixes, fillers. Merges: runs first, longest first, then
// the words.
static void add_tokenizer(Meta *md, int n) {
    Token *tok = alloc((size_t)n, sizeof *tok);
    Buf merges = { 0 };
    char text[256], left[96], right[96], word[32];
    int n_merges = 0, n_unused = 0, at, longest_space = n >= 1024 ? 31 : 5;

    for (int i = 0; i < n; i++) tok[i].type = NORMAL;
    for (size_t i = 0; i < sizeof SPECIAL / sizeof *SPECIAL; i++)
        if (SPECIAL[i].id < n) {
            strcpy(tok[SPECIAL[i].id].text, SPECIAL[i].text);
            tok[SPECIAL[i].id].type = SPECIAL[i].type;
        }
    for (int i = 6; i < n; i++)
        if ((i < 107 || i > 256000) && !tok[i].text[0])
            snprintf(tok[i].text, sizeof tok->text, "<unused%d>", n_unused++);
    for (int k = 1; k <= 31; k++) repeat(tok[106 + k].text, "\n", k);
    for (int b = 0; b < 256; b++) {
        snprintf(tok[238 + b].text, sizeof tok->text, "<0x%02X>", (unsigned)b);
        tok[238 + b].type = BYTE;
    }
    at = 138 + (n >= 1024 ? 0 : 96);                    // after the ASCII tokens of a small vocabulary
    for (int k = 2; k <= longest_space; k++) repeat(tok[at++].text, SPACE, k);
    if (n >= 1024)
        for (size_t r = 0; r < sizeof HTML / sizeof *HTML; r++)
            for (int close = 0; close < 2; close++)
                for (const char *s = HTML[r]; (s = next_word(s, word, sizeof word)) != NULL; )
                    snprintf(tok[at++].text, sizeof tok->text, "<%s%s>", close ? "/" : "", word);
    at = n >= 1024 ? 494 : 138;
    strcpy(tok[at++].text, SPACE);
    for (char c = 33; c < 127; c++) tok[at++].text[0] = c;
    tok[at++].text[0] = '\t';
    if (at < 494) at = 494;

    for (int total = 31; total > 1; total--)
        for (int k = total - 1; k > 0; k--)
            for (int space = 0; space < (total <= longest_space ? 2 : 1); space++) {
                repeat(left, space ? SPACE : "\n", k);
                repeat(right, space ? SPACE : "\n", total - k);
                snprintf(text, sizeof text, "%s %s", left, right);
                put_str(&merges, text);
                n_merges++;
            }
    int first_word = at, end = n < 255999 ? n : 255999;
    for (const char *s = WORDS; (s = next_word(s, word, sizeof word)) != NULL; )
        for (int k = 1; word[k - 1]; k++) {
            int i = first_word;
            snprintf(text, sizeof text, SPACE "%.*s", k, word);
            while (i < at && strcmp(tok[i].text, text) != 0) i++;
            if (i < at) continue;                       // an earlier word began like this
            if (at >= end) break;                       // no token left for this prefix, so none for the longer ones
            strcpy(tok[at++].text, text);
            snprintf(text, sizeof text, SPACE "%.*s %c", k - 1, word, word[k - 1]);
            put_str(&merges, text);
            n_merges++;
        }
    for (int i = 0; i < n; i++)
        if (!tok[i].text[0]) snprintf(tok[i].text, sizeof tok->text, SPACE "w%d", i);

    md_str(md, "tokenizer.ggml.model", "gemma4");
    md_array(md, "tokenizer.ggml.tokens", KV_STR, n);
    for (int i = 0; i < n; i++) put_str(&md->b, tok[i].text);
    md_array(md, "tokenizer.ggml.scores", KV_F32, n);
    for (int i = 0; i < n; i++) put(&md->b, &(float){ -1000.0f }, 4);
    md_array(md, "tokenizer.ggml.token_type", KV_I32, n);
    for (int i = 0; i < n; i++) put_u32(&md->b, (uint32_t)tok[i].type);
    md_array(md, "tokenizer.ggml.merges", KV_STR, n_merges);
    put(&md->b, merges.data, merges.len);
    md_u32(md, "tokenizer.ggml.bos_token_id", 2);
    md_u32(md, "tokenizer.ggml.eos_token_id", 1);
    md_u32(md, "tokenizer.ggml.unknown_token_id", 3);
    md_u32(md, "tokenizer.ggml.padding_token_id", 0);
    md_u32(md, "tokenizer.ggml.mask_token_id", 4);
    md_str(md, "tokenizer.chat_template", CHAT_TEMPLATE);
    md_bool(md, "tokenizer.ggml.add_space_prefix", false);
    md_bool(md, "tokenizer.ggml.add_bos_token", true);
    free(merges.data);
    free(tok);
}

// The keys that the target and the MTP assistant have in common.
static void add_gemma4_params(Meta *md, const Preset *p, int n_layers, int dim, int n_heads, const int ffn_dim[],
                              const int n_kv_heads[], const bool is_swa[], int n_shared, int ple_dim) {
    bool one_ffn_dim = true;
    for (int l = 1; l < n_layers; l++) one_ffn_dim &= ffn_dim[l] == ffn_dim[0];
    md_u32(md, ".block_count", (uint32_t)n_layers);
    md_u32(md, ".context_length", (uint32_t)p->n_ctx);
    md_u32(md, ".embedding_length", (uint32_t)dim);
    if (one_ffn_dim) md_u32(md, ".feed_forward_length", (uint32_t)ffn_dim[0]);
    else md_ints(md, ".feed_forward_length", ffn_dim, n_layers);
    md_u32(md, ".attention.head_count", (uint32_t)n_heads);
    if (p->kv_array) md_ints(md, ".attention.head_count_kv", n_kv_heads, n_layers);
    else md_u32(md, ".attention.head_count_kv", (uint32_t)n_kv_heads[0]);
    md_f32(md, ".rope.freq_base", 1000000.0);
    md_f32(md, ".rope.freq_base_swa", 10000.0);
    md_f32(md, ".attention.layer_norm_rms_epsilon", 1e-6);
    md_u32(md, ".attention.key_length", HEAD_FULL);
    md_u32(md, ".attention.value_length", HEAD_FULL);
    md_u32(md, ".attention.sliding_window", (uint32_t)p->n_swa);
    md_u32(md, ".attention.shared_kv_layers", (uint32_t)n_shared);
    md_u32(md, ".embedding_length_per_layer_input", (uint32_t)ple_dim);
    md_bools(md, ".attention.sliding_window_pattern", is_swa, n_layers);
    md_u32(md, ".attention.key_length_swa", HEAD_SWA);
    md_u32(md, ".attention.value_length_swa", HEAD_SWA);
    md_u32(md, ".rope.dimension_count", HEAD_FULL);
    md_u32(md, ".rope.dimension_count_swa", HEAD_SWA);
}

// ==== [5] Tensors of the three kinds ===============================================================================

#define LOGIT_SIGMA  3.0             // standard deviation of the logits before the soft-cap: mean of output_norm
#define ATTN_SIGMA   2.0             // of the attention scores, which have no 1/sqrt(head_dim)
#define ROUTER_SIGMA 1.5             // of the router logits

typedef struct {
    char     name[64], source[64];   // source: name that the random numbers belong to; differs after split_experts
    int      layer;                  // -1 for a tensor of no layer
    int      n_dims, type, pool;     // pool: index of the pool that fills a matrix
    uint64_t ne[3];                  // ne[0] is the row length
    double   sigma;                  // matrices: standard deviation of the weights
    double   mean, jitter;           // vectors: mean * (1 +- jitter)
    int      n_rotated;              // rope_freqs: so many 1.0 (rotated pairs), then 1e30 (pairs left as they are)
    int      part;                   // 0 whole; 1, 2: first, second half of the rows of each expert of `source`
} Tensor;

typedef struct { Tensor *t; int n, cap; int layer; } TensorList;     // layer: that of the tensors to come

static Tensor *add_tensor(TensorList *list, const char *stem, const char *end, int n_dims) {
    if (list->n == list->cap) {
        list->cap = list->cap ? 2 * list->cap : 256;
        list->t = realloc(list->t, (size_t)list->cap * sizeof *list->t);
        if (!list->t) die("out of memory: %d tensors", list->cap);
    }
    Tensor *t = &list->t[list->n++];
    memset(t, 0, sizeof *t);
    t->layer = list->layer;
    t->n_dims = n_dims;
    if (t->layer < 0) snprintf(t->name, sizeof t->name, "%s%s", stem, end);
    else snprintf(t->name, sizeof t->name, "blk.%d.%s%s", t->layer, stem, end);
    memcpy(t->source, t->name, sizeof t->name);
    return t;
}

static Tensor *mat_gain(TensorList *list, const char *stem, int cols, int rows, double gain) {
    Tensor *t = add_tensor(list, stem, ".weight", 2);
    t->ne[0] = (uint64_t)cols;
    t->ne[1] = (uint64_t)rows;
    t->ne[2] = 1;
    t->sigma = gain / sqrt(cols);
    return t;
}
static Tensor *mat(TensorList *list, const char *stem, int cols,
                   int rows) { return mat_gain(list, stem, cols, rows, 1.0); }
static void mat_experts(TensorList *list, const char *stem, int cols, int rows, int n_experts) {
    Tensor *t = mat(list, stem, cols, rows);
    t->n_dims = 3;
    t->ne[2] = (uint64_t)n_experts;
}

static Tensor *vec_mean(TensorList *list, const char *stem, int n, double mean) {
    Tensor *t = add_tensor(list, stem, ends_with(stem, ".scale") ? "" : ".weight", 1);
    t->ne[0] = (uint64_t)n;
    t->ne[1] = t->ne[2] = 1;
    t->mean = mean;
    t->jitter = 0.1;
    return t;
}
static Tensor *vec(TensorList *list, const char *stem, int n) { return vec_mean(list, stem, n, 1.0); }

// A quarter of the pairs of a full-attention head is rotated.
static void rope_freqs(TensorList *list) { vec(list, "rope_freqs", HEAD_FULL / 2)->n_rotated = HEAD_FULL / 8; }

// Size of what each of n_adds additions brings to the residual stream: so large that the input token pulls its own
// logit by one standard deviation only. Without it greedy decoding repeats the last token for ever.
static double residual_gain(int dim, double n_adds) {
    double gain = sqrt((dim - 1.0) / n_adds);
    return gain > 1.0 ? gain : 1.0;
}

static int build_target(const Config *c, Meta *md, TensorList *b, bool drop_shared_kv) {
    const Preset *p = c->p;
    int n = c->n_layers, dim = p->dim, fx = p->expert_ffn_dim;
    add_gemma4_params(md, p, n, dim, p->n_heads, c->ffn_dim, c->n_kv_heads, c->is_swa, n - c->first_shared, p->ple_dim);
    md_f32(md, ".final_logit_softcapping", 30.0);
    if (p->n_experts) {
        md_u32(md, ".expert_count", (uint32_t)p->n_experts);
        md_u32(md, ".expert_used_count", (uint32_t)p->n_experts_used);
        md_u32(md, ".expert_feed_forward_length", (uint32_t)fx);
    }

    double gain = residual_gain(dim, (p->ple_dim ? 3 : 2) * n);
    mat(b, "token_embd", dim, c->n_vocab);
    vec_mean(b, "output_norm", dim, LOGIT_SIGMA);
    rope_freqs(b);
    if (p->ple_dim) {    // the fan-in of per_layer_token_embd is one layer's part of a row
        mat(b, "per_layer_token_embd", p->ple_dim * n, c->n_vocab)->sigma = 1.0 / sqrt(p->ple_dim);
        mat(b, "per_layer_model_proj", dim, p->ple_dim * n);
        vec(b, "per_layer_proj_norm", p->ple_dim);
    }
    for (int l = 0; l < n; l++) {
        int hd = head_dim(c->is_swa[l]), kv_dim = c->n_kv_heads[l] * hd, q_dim = p->n_heads * hd,
            ffn_dim = c->ffn_dim[l];
        b->layer = l;
        vec(b, "attn_norm", dim);
        mat(b, "attn_q", dim, q_dim);
        vec(b, "attn_q_norm", hd);
        if (l < c->first_shared || !drop_shared_kv) {   // published files keep the unused K and V of sharing layers
            mat(b, "attn_k", dim, kv_dim);
            vec_mean(b, "attn_k_norm", hd, ATTN_SIGMA / sqrt(hd));
            if (c->is_swa[l] || !p->k_eq_v) mat(b, "attn_v", dim, kv_dim);
        }
        mat(b, "attn_output", q_dim, dim);
        vec_mean(b, "post_attention_norm", dim, gain);
        vec(b, "ffn_norm", dim);
        mat(b, "ffn_gate", dim, ffn_dim);
        mat(b, "ffn_up", dim, ffn_dim);
        mat(b, "ffn_down", ffn_dim, dim);
        vec_mean(b, "post_ffw_norm", dim, gain);
        vec(b, "layer_output_scale", 1);
        if (p->n_experts) {
            mat(b, "ffn_gate_inp", dim, p->n_experts);
            vec_mean(b, "ffn_gate_inp.scale", dim, ROUTER_SIGMA * sqrt(dim));
            vec(b, "pre_ffw_norm_2", dim);
            vec(b, "post_ffw_norm_1", dim);
            vec(b, "post_ffw_norm_2", dim);
            mat_experts(b, "ffn_gate_up_exps", dim, 2 * fx, p->n_experts);
            mat_experts(b, "ffn_down_exps", fx, dim, p->n_experts);
            vec(b, "ffn_down_exps.scale", p->n_experts)->jitter = 0.2;
        }
        if (p->ple_dim) {
            mat(b, "inp_gate", dim, p->ple_dim);
            mat(b, "proj", p->ple_dim, dim);
            vec_mean(b, "post_norm", dim, gain);
        }
    }
    return n;
}

// The Gemma 4 assistant: four layers without K and V that read the KV of the target.
static int build_mtp(const Config *c, Meta *md, TensorList *b) {
    const Preset *p = c->p;
    const MtpPreset *m = &p->mtp;
    bool is_swa[MTP_LAYERS];
    int ffn_dim[MTP_LAYERS], n_kv_heads[MTP_LAYERS], dim = m->dim;
    for (int l = 0; l < MTP_LAYERS; l++) {
        is_swa[l] = l < MTP_LAYERS - 1;
        ffn_dim[l] = m->ffn_dim;
        n_kv_heads[l] = p->n_kv_heads[is_swa[l] ? 0 : 1];
    }
    add_gemma4_params(md, p, MTP_LAYERS, dim, m->n_heads, ffn_dim, n_kv_heads, is_swa, MTP_LAYERS, 0);
    md_u32(md, ".embedding_length_out", (uint32_t)p->dim);
    md_u32(md, ".nextn_predict_layers", MTP_LAYERS);

    mat(b, "token_embd", dim, c->n_vocab);
    vec_mean(b, "output_norm", dim, LOGIT_SIGMA);
    rope_freqs(b);
    mat(b, "nextn.pre_projection", 2 * p->dim, dim);
    mat(b, "nextn.post_projection", dim, p->dim);
    for (int l = 0; l < MTP_LAYERS; l++) {
        int q_dim = m->n_heads * head_dim(is_swa[l]);
        b->layer = l;
        vec(b, "attn_norm", dim);
        mat(b, "attn_q", dim, q_dim);
        vec(b, "attn_q_norm", head_dim(is_swa[l]));
        mat(b, "attn_output", q_dim, dim);
        vec(b, "post_attention_norm", dim);
        vec(b, "ffn_norm", dim);
        mat(b, "ffn_gate", dim, m->ffn_dim);
        mat(b, "ffn_up", dim, m->ffn_dim);
        mat(b, "ffn_down", m->ffn_dim, dim);
        vec(b, "post_ffw_norm", dim);
        vec(b, "layer_output_scale", 1);
    }
    return MTP_LAYERS;
}

// The DFlash draft: shares embeddings and output head with the target. It has no norms after attention and FFN, so
// their last matrices carry the gain (before it they add vectors of mean square about 1/3).
static int build_dflash(const Config *c, Meta *md, TensorList *b) {
    const Preset *p = c->p;
    const DflashPreset *d = &p->dflash;
    int dim = p->dim, hd = d->head_dim, layers[MAX_LAYERS], n_target = target_layers(c, layers);
    bool is_swa[DFLASH_LAYERS];
    for (int l = 0; l < DFLASH_LAYERS; l++) is_swa[l] = l < DFLASH_LAYERS - 1;
    // the key counts "input of layer i", one above the layer that made it
    for (int i = 0; i < n_target; i++) layers[i]++;
    md_u32(md, ".block_count", DFLASH_LAYERS);
    md_u32(md, ".context_length", (uint32_t)p->n_ctx);
    md_u32(md, ".embedding_length", (uint32_t)dim);
    md_u32(md, ".feed_forward_length", (uint32_t)d->ffn_dim);
    md_u32(md, ".attention.head_count", (uint32_t)d->n_heads);
    md_u32(md, ".attention.head_count_kv", (uint32_t)d->n_kv_heads);
    md_f32(md, ".rope.freq_base", 1000000.0);
    md_f32(md, ".attention.layer_norm_rms_epsilon", 1e-6);
    md_u32(md, ".attention.key_length", (uint32_t)hd);
    md_u32(md, ".attention.value_length", (uint32_t)hd);
    md_u32(md, ".block_size", DFLASH_BLOCK);
    md_f32(md, ".final_logit_softcapping", 30.0);
    md_f32(md, ".embedding_scale", sqrt(dim));
    md_ints(md, ".target_layers", layers, n_target);
    md_u32(md, ".attention.sliding_window", (uint32_t)d->n_swa);
    md_bools(md, ".attention.sliding_window_pattern", is_swa, DFLASH_LAYERS);

    double gain = residual_gain(dim, 2 * DFLASH_LAYERS / 3.0);
    mat(b, "fc", n_target * dim, dim);
    vec(b, "enc.output_norm", dim);
    vec_mean(b, "output_norm", dim, LOGIT_SIGMA);
    for (int l = 0; l < DFLASH_LAYERS; l++) {
        b->layer = l;
        vec(b, "attn_norm", dim);
        mat(b, "attn_q", dim, d->n_heads * hd);
        mat(b, "attn_k", dim, d->n_kv_heads * hd);
        mat(b, "attn_v", dim, d->n_kv_heads * hd);
        mat_gain(b, "attn_output", d->n_heads * hd, dim, gain);
        vec_mean(b, "attn_q_norm", hd, ATTN_SIGMA);
        vec(b, "attn_k_norm", hd);
        vec(b, "ffn_norm", dim);
        mat(b, "ffn_gate", dim, d->ffn_dim);
        mat(b, "ffn_up", dim, d->ffn_dim);
        mat_gain(b, "ffn_down", d->ffn_dim, dim, gain);
    }
    return DFLASH_LAYERS;
}

// An image tower without layers (gemma4uv): the embedder of 48 x 48 pixels. width: of its rows.
static void build_tower(const Config *c, Meta *md, TensorList *b) {
    const int width = 32, patch = 48 * 48 * 3, positions = 1120;
    md_bool(md, ".has_vision_encoder", true);
    md_str(md, ".vision.projector_type", "gemma4uv");
    md_u32(md, ".vision.projection_dim", (uint32_t)c->p->dim);
    md_u32(md, ".vision.patch_size", 16);
    md_u32(md, ".vision.embedding_length", (uint32_t)width);
    mat(b, "v.patch_embd", patch, width);
    mat_experts(b, "v.position_embd", width, positions, 2);
    mat(b, "mm.input_projection", width, c->p->dim);
    for (int i = 0; i < 4; i++) {
        static const char *const stems[] = { "v.patch_embd", "v.patch_norm.1", "v.patch_norm.2", "v.patch_norm.3" };
        const int n = i == 1 ? patch : width;
        if (i) vec(b, stems[i], n);
        Tensor *bias = add_tensor(b, stems[i], ".bias", 1);
        bias->ne[0] = (uint64_t)n;
        bias->ne[1] = bias->ne[2] = 1;
        bias->mean = bias->jitter = 0.1;
    }
}

static int tensor_order(const void *a, const void *b) {  // the order of a quantized file
    const Tensor *x = a, *y = b;
    return x->layer != y->layer ? (x->layer > y->layer) - (x->layer < y->layer) : strcmp(x->name, y->name);
}
static void sort_tensors(TensorList *list) { qsort(list->t, (size_t)list->n, sizeof *list->t, tensor_order); }

// Replaces each fused ffn_gate_up_exps (dim, 2*fx, n_experts) by ffn_gate_exps and ffn_up_exps (dim, fx, n_experts): of
// every expert the first half of the rows is gate, the second up. The weights stay those of the fused tensor.
static void split_experts(TensorList *list) {
    for (int i = 0, n = list->n; i < n; i++) {
        if (!ends_with(list->t[i].name, "ffn_gate_up_exps.weight")) continue;
        list->t[i].ne[1] /= 2;
        list->layer = list->t[i].layer;
        Tensor *up = add_tensor(list, "ffn_up_exps", ".weight", 3), *gate = &list->t[i];        // may move the list
        char name[sizeof up->name];
        memcpy(name, up->name, sizeof name);
        *up = *gate;
        memcpy(up->name, name, sizeof name);
        up->part = 2;
        gate->part = 1;
        snprintf(gate->name, sizeof gate->name, "blk.%d.ffn_gate_exps.weight", gate->layer);
    }
    sort_tensors(list);
}

// ==== [6] The type of each tensor ==================================================================================
// The mixture that llama.cpp's quantizer picks without an importance matrix.

enum { T_F32, T_F16, T_BF16, T_Q4_0, T_Q5_0, T_Q8_0, T_Q4_K, T_Q6_K, N_TYPES };
static const struct { const char *name; uint32_t id; int per_block, bytes; } TYPES[N_TYPES] = {
    { "F32", 0, 1, 4 },    { "F16", 1, 1, 2 },    { "BF16", 30, 1, 2 },     { "Q4_0", 2, 32, 18 },
    { "Q5_0", 6, 32, 22 }, { "Q8_0", 8, 32, 34 }, { "Q4_K", 12, 256, 144 }, { "Q6_K", 14, 256, 210 } };

typedef struct { const char *name; uint32_t file_type; int base; } Quant;       // base: type of most matrices
static const Quant QUANTS[] = { { "f32", 0, T_F32 },  { "f16", 1, T_F16 },      { "bf16", 32, T_BF16 },
                                { "q8_0", 7, T_Q8_0 },
                                { "q4_0", 2, T_Q4_0 }, { "q4_k_m", 15, T_Q4_K }, { "q6_k", 18, T_Q6_K } };
enum { N_QUANTS = sizeof QUANTS / sizeof *QUANTS };

static bool more_bits(int i, int n) { return i < n / 8 || i >= 7 * n / 8 || (i - n / 8) % 3 == 2; }
static bool fits(const Tensor *t, int type) { return t->ne[0] % (uint64_t)TYPES[type].per_block == 0; }
static bool is_dense(int type) { return type <= T_BF16; }

static void assign_types(TensorList *list, const Quant *q, int n_layers) {  // needs the list sorted: attn_v are counted
    int n_attn_v = 0, i_attn_v = 0;
    for (int i = 0; i < list->n; i++) n_attn_v += ends_with(list->t[i].name, "attn_v.weight");
    for (int i = 0; i < list->n; i++) {
        Tensor *t = &list->t[i];
        bool q4_k_m = q->base == T_Q4_K;
        t->type = q->base;
        if (t->n_dims < 2 || !ends_with(t->name, ".weight") || strstr(t->name, "ffn_gate_inp")) {
            t->type = T_F32;
        } else if (is_dense(q->base)) {
            continue;
        } else if (strstr(t->name, "per_layer_model_proj")) {
            t->type = T_BF16;                           // never quantized
        } else {
            if (ends_with(t->name, "token_embd.weight")) {      // also per_layer_token_embd
                if (!fits(t, q->base)) t->type = T_Q8_0;
                else if (q->base != T_Q8_0) t->type = T_Q6_K;
            } else if (ends_with(t->name, "attn_v.weight")) {
                if (q4_k_m && more_bits(i_attn_v, n_attn_v)) t->type = T_Q6_K;
                i_attn_v++;
            } else if (strstr(t->name, "ffn_down")) {
                if (q4_k_m && more_bits(t->layer, n_layers)) t->type = T_Q6_K;
            }
            if (!fits(t, t->type)) {                    // a row is no multiple of 256
                t->type = t->type == T_Q4_K ? T_Q5_0 : t->type == T_Q6_K ? T_Q8_0 : t->type;
                if (!fits(t, t->type)) t->type = T_F16;
            }
        }
    }
}

static uint64_t tensor_bytes(const Tensor *t) {
    return t->ne[0] / (uint64_t)TYPES[t->type].per_block * t->ne[1] * t->ne[2] * (uint64_t)TYPES[t->type].bytes;
}

// ==== [7] Pools of random blocks ===================================================================================
// One pool per type, repeated to fill the tensors of that type, each from a start of its own. The length in blocks is
// prime, so it shares no factor with any row length and no two rows of a tensor are equal. F32, F16 and BF16 draw on
// one pool: their files hold the same weights up to rounding. With --separate-pools each has its own, whose length is
// counted without the others: other weights where a file mixes them, as the F32 routers and F16 matrices of a MoE file
// do. The reference results of tests/golden for micro-moe-f16 belong to a file made so.

typedef struct {
    uint64_t n;    // blocks in the pool: prime, about 32 MiB, no more than needed, never fewer than rows
    uint64_t wanted, rows;           // all blocks of this pool in the file; most rows of a tensor
    uint8_t *block;                  // (n, bytes) ready to write for `type` and `sigma`
    int      type;
    double   sigma;                  // 0: not scaled yet
    double   unit;                   // standard deviation of the weights at block scale 1
    float   *scale;                  // (n) scale of a block relative to the mean scale
    float   *min_ratio;              // (n) Q4_K: dmin / d
    uint16_t *sum;                   // (n) dense: sum of four random bytes, near Gaussian, 0..1020
} Pool;

static uint16_t f16_bits(float f) {    // round to nearest even; subnormals, overflow to infinity, no NaN
    uint32_t u;
    memcpy(&u, &f, 4);
    uint32_t sign = u >> 16 & 0x8000;
    u &= 0x7fffffff;
    if (u >= 0x47800000) return (uint16_t)(sign | 0x7c00);
    if (u >= 0x38800000) return (uint16_t)(sign | ((u + 0xfff + (u >> 13 & 1) - 0x38000000) >> 13));
    if (u < 0x33000000) return (uint16_t)sign;
    int shift = 126 - (int)(u >> 23);                   // 14..24: the value is m * 2^-(24 + shift)
    uint32_t m = (u & 0x7fffff) | 0x800000, rest = m & ((1u << shift) - 1), half = 1u << (shift - 1);
    m >>= shift;
    return (uint16_t)(sign | (m + (rest > half || (rest == half && (m & 1)))));
}

static uint16_t bf16_bits(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

static uint64_t next_prime(uint64_t n) {
    for (n = n < 2 ? 2 : n; ; n++) {
        uint64_t f = 2;
        while (f * f <= n && n % f) f++;
        if (f * f > n) return n;
    }
}

static double mean_square_of_range(int first, int last, int count) {
    double sum = 0;                                     // integers: exact in any order
    for (int i = first; i <= last; i++) sum += i * i;
    return sum / count;
}

// Codes of the K-quants as functions of one random byte.
static int q4k_scale(int b) { return 24 + b % 37; }                                     // 24..60
static int q4k_delta(int b) { return (b & 7) < 7 ? (b & 7) - 3 : 0; }                   // min code - scale code
static int q6k_scale(int b) { return (b < 128 ? 1 : -1) * (32 + (b & 127) * 3 / 4); }

static double mean_square_of_code(int (*code)(int)) {
    double sum = 0;
    for (int b = 0; b < 256; b++) sum += code(b) * code(b);
    return sum / 256;
}

static Stream pool_stream(uint32_t seed, int type, const char *what) {
    char tag[32];
    snprintf(tag, sizeof tag, "%s/%s", TYPES[type].name, what);
    return stream_open(seed, tag);
}

#define JITTER     0.25              // block scales vary by this much around their mean
#define MIN_RATIO  7.5               // Q4_K: dmin / d, so that the mean of a sub-block is near 0
#define MIN_JITTER 0.05

// Fills everything of a block but its scales. Q4_0 and Q5_0 have one code more below zero than above: a random sign of
// the scale removes the bias.
static void make_blocks(Pool *p, int type, uint32_t seed) {
    size_t bytes = (size_t)TYPES[type].bytes;
    Stream jitter = pool_stream(seed, type, "jitter"), q = pool_stream(seed, type, "q"), s = pool_stream(seed, type,
            "s");
    Stream m = pool_stream(seed, type, "m"), ratio = pool_stream(seed, type, "ratio"), sign = pool_stream(seed, type,
            "sign");
    uint8_t u[16];
    double ms = type == T_Q4_0 ? mean_square_of_range(-8, 7, 16) : type == T_Q5_0 ? mean_square_of_range(-16, 15, 32) :
                type == T_Q8_0 ? mean_square_of_range(-127, 127, 256) :
                                 mean_square_of_range(-32, 31, 64) * mean_square_of_code(q6k_scale);
    if (type == T_Q4_K) {
        double codes = mean_square_of_code(q4k_scale);
        double offset = mean_square_of_code(q4k_delta) + MIN_JITTER * MIN_JITTER / 3 * codes;
        ms = codes * (16 * 16 - 1) / 12.0 + MIN_RATIO * MIN_RATIO * offset;
    }
    p->unit = sqrt(ms * (1.0 + JITTER * JITTER / 3.0));

    for (uint64_t b = 0; b < p->n; b++) {
        uint8_t *block = p->block + b * bytes;
        stream_bytes(&jitter, u, 2);
        p->scale[b] = (float)(1.0 - JITTER) + (float)(u[0] | u[1] << 8) * (float)(2 * JITTER / 65535.0);
        switch (type) {
        case T_Q4_0: case T_Q5_0:                       // f16 d, codes
            stream_bytes(&q, block + 2, bytes - 2);
            stream_bytes(&sign, u, 1);
            if (u[0] & 1) p->scale[b] = -p->scale[b];
            break;
        case T_Q8_0:                                    // f16 d, 32 codes; -128 is not used
            stream_bytes(&q, block + 2, 32);
            for (int i = 2; i < 34; i++) block[i] = block[i] == 0x80 ? 0 : block[i];
            break;
        case T_Q4_K:                                    // f16 d, f16 dmin, 8 scale and 8 min codes of 6 bits, codes
            stream_bytes(&q, block + 16, 128);
            stream_bytes(&s, u, 8);
            stream_bytes(&m, u + 8, 8);
            for (int i = 0; i < 8; i++) {
                u[i] = (uint8_t)q4k_scale(u[i]);
                u[8 + i] = (uint8_t)(u[i] + q4k_delta(u[8 + i]));
            }
            for (int i = 0; i < 4; i++) {
                block[4 + i] = (uint8_t)(u[i] | u[4 + i] >> 4 << 6);
                block[8 + i] = (uint8_t)(u[8 + i] | u[12 + i] >> 4 << 6);
                block[12 + i] = (uint8_t)((u[4 + i] & 15) | (u[12 + i] & 15) << 4);
            }
            stream_bytes(&ratio, u, 1);
            p->min_ratio[b] = (float)(MIN_RATIO * (1.0 - MIN_JITTER)) +
                (float)u[0] * (float)(MIN_RATIO * 2 * MIN_JITTER / 255.0);
            break;
        case T_Q6_K:                                    // codes, 16 scale codes, f16 d
            stream_bytes(&q, block, 192);
            stream_bytes(&s, u, 16);
            for (int i = 0; i < 16; i++) block[192 + i] = (uint8_t)q6k_scale(u[i]);
            break;
        }
    }
}

static void make_pools(Pool pools[N_TYPES], TensorList *list, uint32_t seed, bool separate) {
    memset(pools, 0, N_TYPES * sizeof *pools);
    for (int i = 0; i < list->n; i++) {
        Tensor *t = &list->t[i];
        if (t->n_dims == 1) continue;
        t->pool = is_dense(t->type) && !separate ? T_F32 : t->type;
        Pool *p = &pools[t->pool];
        p->wanted += tensor_bytes(t) / (uint64_t)TYPES[t->type].bytes;
        if (p->rows < t->ne[1] * t->ne[2]) p->rows = t->ne[1] * t->ne[2];
    }
    for (int type = 0; type < N_TYPES; type++) {
        Pool *p = &pools[type];
        if (!p->wanted) continue;
        uint64_t bytes = is_dense(type) ? 4 : (uint64_t)TYPES[type].bytes, n = (32u << 20) / bytes;
        n = n < p->rows ? p->rows : n;
        p->n = next_prime(n < p->wanted ? n : p->wanted);
        p->block = alloc(p->n, bytes);
        if (is_dense(type)) {
            Stream r = stream_open(seed, "dense");
            p->sum = alloc(p->n, sizeof *p->sum);
            for (uint64_t i = 0; i < p->n; i++) {
                uint8_t u[4];
                stream_bytes(&r, u, 4);
                p->sum[i] = (uint16_t)(u[0] + u[1] + u[2] + u[3]);
            }
            p->unit = sqrt(4 * (256 * 256 - 1) / 12.0);
        } else {
            p->scale = alloc(p->n, sizeof *p->scale);
            if (type == T_Q4_K) p->min_ratio = alloc(p->n, sizeof *p->min_ratio);
            make_blocks(p, type, seed);
        }
    }
}

// Sets the block scales (or the dense weights) of a pool so that its weights have standard deviation sigma.
static void scale_pool(Pool *p, int type, double sigma) {
    size_t bytes = (size_t)TYPES[type].bytes, d_at = type == T_Q6_K ? 208 : 0;
    float d = (float)(sigma / p->unit);
    if (p->type == type && p->sigma == sigma) return;
    p->type = type;
    p->sigma = sigma;
    if (is_dense(type)) {
        float value[1021];                              // dense weights take 1021 values only
        uint16_t half[1021];
        for (int i = 0; i <= 1020; i++) {
            value[i] = (float)(i - 510) * d;
            half[i] = type == T_F16 ? f16_bits(value[i]) : bf16_bits(value[i]);
        }
        if (type == T_F32) for (uint64_t i = 0; i < p->n; i++) memcpy(p->block + 4 * i, &value[p->sum[i]], 4);
        else for (uint64_t i = 0; i < p->n; i++) memcpy(p->block + 2 * i, &half[p->sum[i]], 2);
        return;
    }
    for (uint64_t b = 0; b < p->n; b++) {
        float db = p->scale[b] * d;
        uint16_t h = f16_bits(db);
        memcpy(p->block + b * bytes + d_at, &h, 2);
        if (type != T_Q4_K) continue;
        h = f16_bits(db * p->min_ratio[b]);
        memcpy(p->block + b * bytes + 2, &h, 2);
    }
}

// ==== [8] Writing ==================================================================================================

typedef struct { FILE *f; const char *path; bool hash; Sha256 sha; } Out;

// Reports a failed write and removes what was written (never a device or pipe): a partial model must not look like one.
static void write_failed(Out *o) {
    const char *why = strerror(errno ? errno : EIO);
    struct stat st;
    bool regular = stat(o->path, &st) == 0 && S_ISREG(st.st_mode);
    if (o->f) fclose(o->f);
    if (regular && remove(o->path) == 0) die("%s: cannot write: %s; the partial file was removed", o->path, why);
    die("%s: cannot write: %s", o->path, why);
}

static void out(Out *o, const void *data, uint64_t n) {
    errno = 0;
    if (n && fwrite(data, 1, (size_t)n, o->f) != (size_t)n) write_failed(o);
    if (o->hash) sha256_add(&o->sha, data, (size_t)n);
}

static void out_zeros(Out *o, uint64_t n) {             // n < ALIGNMENT
    static const uint8_t zeros[ALIGNMENT];
    out(o, zeros, n);
}

// n bytes of the endless repetition of a pool, from byte `at` of it
static void out_pool(Out *o, const Pool *p, uint64_t at, uint64_t n) {
    uint64_t size = p->n * (uint64_t)TYPES[p->type].bytes;
    for (at %= size; n; at = 0) {
        uint64_t m = n < size - at ? n : size - at;
        out(o, p->block + at, m);
        n -= m;
    }
}

static void write_matrix(Out *o, Pool pools[], const Tensor *t, uint32_t seed) {
    Pool *p = &pools[t->pool];
    char tag[80];
    uint8_t hash[32];
    uint64_t start;                                     // first block, from SHA-256("seed/start/name")
    snprintf(tag, sizeof tag, "start/%s", t->source);
    hash_text(hash, seed, tag);
    memcpy(&start, hash, 8);
    scale_pool(p, t->type, t->sigma);
    uint64_t at = start % p->n * (uint64_t)TYPES[t->type].bytes, size = tensor_bytes(t);
    if (!t->part) {
        out_pool(o, p, at, size);
        return;
    }
    uint64_t half = size / t->ne[2];                    // bytes of one expert's gate, or up
    for (uint64_t e = 0; e < t->ne[2]; e++) out_pool(o, p, at + (2 * e + (t->part == 2)) * half, half);
}

static void write_vector(Out *o, const Tensor *t, uint32_t seed) {
    Stream s = stream_open(seed, t->source);
    for (uint64_t i = 0; i < t->ne[0]; i++) {
        uint8_t u[2];
        float v = i < (uint64_t)t->n_rotated ? 1.0f : 1e30f;
        if (!t->n_rotated) {
            stream_bytes(&s, u, 2);
            v = (float)(t->mean * (1.0 + t->jitter * (2.0 * ((u[0] | u[1] << 8) / 65535.0) - 1.0)));
        }
        out(o, &v, 4);
    }
}

// pools NULL: matrices are left as holes, which read as zeros and take no room on the disk.
static void write_file(Out *o, const Meta *md, const TensorList *list, Pool pools[], uint32_t seed) {
    Buf head = { 0 };
    uint64_t offset = 0;
    put(&head, "GGUF", 4);
    put_u32(&head, 3);
    put_u64(&head, (uint64_t)list->n);
    put_u64(&head, md->n);
    put(&head, md->b.data, md->b.len);
    for (int i = 0; i < list->n; i++) {
        const Tensor *t = &list->t[i];
        put_str(&head, t->name);
        put_u32(&head, (uint32_t)t->n_dims);
        for (int d = 0; d < t->n_dims; d++) put_u64(&head, t->ne[d]);
        put_u32(&head, TYPES[t->type].id);
        put_u64(&head, offset);
        offset += tensor_bytes(t) + pad(tensor_bytes(t));
    }

    errno = 0;
    sha256_init(&o->sha);
    o->f = fopen(o->path, "wb");
    if (!o->f) die("%s: cannot create: %s", o->path, strerror(errno));
    setvbuf(o->f, NULL, _IOFBF, 1 << 20);    // on failure stdio keeps its own buffer, which is slower but correct
    out(o, head.data, head.len);
    out_zeros(o, pad(head.len));
    for (int i = 0; i < list->n; i++) {
        const Tensor *t = &list->t[i];
        if (t->n_dims == 1) write_vector(o, t, seed);
        else if (pools) write_matrix(o, pools, t, seed);
        else if (fseeko(o->f, (off_t)tensor_bytes(t), SEEK_CUR)) write_failed(o);
        out_zeros(o, pad(tensor_bytes(t)));
    }
    errno = 0;
    FILE *f = o->f;
    if (!pools && (fflush(f) || ftruncate(fileno(f), (off_t)(head.len + pad(head.len) + offset)))) write_failed(o);
    if (fflush(f) != 0) write_failed(o);
    o->f = NULL;
    if (fclose(f) != 0) write_failed(o);
    free(head.data);
}

// ==== [9] Command line =============================================================================================

static const char USAGE[] =
    "usage: make_gguf --preset P --quant Q --out FILE [options]\n"
    "  --preset P        26b-a4b 31b e2b e4b (true sizes), tiny-dense tiny-moe tiny-e, micro-dense micro-moe micro-e\n"
    "  --quant Q         f32 f16 bf16 q8_0 q4_0 q4_k_m q6_k\n"
    "  --out FILE        the file to write; an existing one is replaced\n"
    "  --kind K          target (default), mtp (Gemma 4 assistant), dflash (DFlash draft) or tower (of images; --quant f32)\n"
    "  --seed N          0 to 4294967295, default 1\n"
    "  --vocab N         tokens, 512 to 262144; default: that of the preset\n"
    "  --layers N        layers of the target, 2 to 512; give drafts the --vocab and --layers of their target\n"
    "  --drop-shared-kv  leave out the unused K and V tensors of layers that share KV\n"
    "  --split-experts   ffn_gate_exps and ffn_up_exps with the weights of the fused ffn_gate_up_exps\n"
    "  --separate-pools  F32, F16 and BF16 matrices do not share one pool of weights (golden micro-moe-f16 only)\n"
    "  --sparse          matrices are holes in the file: true sizes without the disk space; all weights are 0\n"
    "  --sha256          print the SHA-256 of the written bytes and the file name\n";

static uint32_t parse_number(const char *flag, const char *s, uint32_t min, uint32_t max) {
    char *end;
    errno = 0;
    unsigned long long v = strtoull(s, &end, 10);
    if (s[0] < '0' || s[0] > '9' || *end || errno || v < min || v > max)
        die("%s: expected a number from %lu to %lu, got '%s'", flag, (unsigned long)min, (unsigned long)max, s);
    return (uint32_t)v;
}

enum { TARGET, MTP, DFLASH, TOWER, N_KINDS };
static const char *KINDS[] = { "target", "mtp", "dflash", "tower" };
static const char *ARCHS[] = { "gemma4", "gemma4-assistant", "dflash", "clip" };

static const char *preset_name(int i) { return i < N_PRESETS ? PRESETS[i].name : NULL; }
static const char *quant_name(int i) { return i < N_QUANTS ? QUANTS[i].name : NULL; }
static const char *kind_name(int i) { return i < N_KINDS ? KINDS[i] : NULL; }

static int parse_choice(const char *flag, const char *s, const char *(*name)(int)) {
    char all[200] = "";
    for (int i = 0; name(i); i++) {
        if (strcmp(s, name(i)) == 0) return i;
        strcat(strcat(all, " "), name(i));
    }
    die("%s: expected one of%s; got '%s'", flag, all, s);
}

int main(int argc, char **argv) {
    int preset = -1, quant = -1, kind = 0, n_vocab = 0, n_layers = 0;
    uint32_t seed = 1;
    bool drop_shared_kv = false, split = false, separate = false, sparse = false;
    Out o = { 0 };
    if (*(const uint8_t *)&(uint16_t){ 1 } != 1) die("this program needs a little-endian machine");

    for (int i = 1; i < argc; i++) {
        const char *flag = argv[i], *arg = i + 1 < argc ? argv[i + 1] : NULL;
        if (!strcmp(flag, "--help")) { fputs(USAGE, stdout); return fflush(stdout) != 0; }
        if (!strcmp(flag, "--drop-shared-kv")) { drop_shared_kv = true; continue; }
        if (!strcmp(flag, "--split-experts")) { split = true; continue; }
        if (!strcmp(flag, "--separate-pools")) { separate = true; continue; }
        if (!strcmp(flag, "--sparse")) { sparse = true; continue; }
        if (!strcmp(flag, "--sha256")) { o.hash = true; continue; }
        bool known = !strcmp(flag, "--preset") || !strcmp(flag, "--quant") || !strcmp(flag, "--out") ||
            !strcmp(flag, "--kind")
                  || !strcmp(flag, "--seed") || !strcmp(flag, "--vocab") || !strcmp(flag, "--layers");
        if (!known) die("unknown argument '%s'; try --help", flag);
        if (!arg) die("%s: expected a value after it", flag);
        if (!strcmp(flag, "--preset")) preset = parse_choice(flag, arg, preset_name);
        else if (!strcmp(flag, "--quant")) quant = parse_choice(flag, arg, quant_name);
        else if (!strcmp(flag, "--kind")) kind = parse_choice(flag, arg, kind_name);
        else if (!strcmp(flag, "--seed")) seed = parse_number(flag, arg, 0, UINT32_MAX);
        else if (!strcmp(flag, "--vocab")) n_vocab = (int)parse_number(flag, arg, 512, 262144);
        else if (!strcmp(flag, "--layers")) n_layers = (int)parse_number(flag, arg, 2, MAX_LAYERS);
        else o.path = arg;
        i++;
    }
    if (preset < 0) die("--preset is missing; try --help");
    if (quant < 0) die("--quant is missing; try --help");
    if (!o.path) die("--out is missing; try --help");
    if (sparse && o.hash) die("--sha256: a --sparse file has no bytes to hash");

    const Preset *p = &PRESETS[preset];
    if (split && (!p->n_experts || kind != 0))
        die("--split-experts: the %s of preset %s has no experts", KINDS[kind], p->name);
    static Config c;
    static Pool pools[N_TYPES];
    TensorList list = { .layer = -1 };
    Meta md = { .arch = ARCHS[kind] };
    char name[64];
    config_init(&c, p, n_layers, n_vocab);
    snprintf(name, sizeof name, "Synthetic Gemma 4 %s %s", p->name, KINDS[kind]);
    md_str(&md, "general.architecture", md.arch);
    md_str(&md, "general.type", kind == TOWER ? "mmproj" : "model");
    md_str(&md, "general.name", name);
    md_str(&md, "general.basename", "gemma-4-synthetic");
    md_str(&md, "general.size_label", p->label);
    md_str(&md, "general.description", "random weights with true shapes; not a trained model");
    md_u32(&md, "general.file_type", QUANTS[quant].file_type);
    md_u32(&md, "general.quantization_version", 2);
    md_str(&md, "synthetic.preset", p->name);
    md_str(&md, "synthetic.kind", KINDS[kind]);
    md_u32(&md, "synthetic.seed", seed);
    int n = 0;
    if (kind == TARGET) n = build_target(&c, &md, &list, drop_shared_kv);
    else if (kind == MTP) n = build_mtp(&c, &md, &list);
    else if (kind == DFLASH) n = build_dflash(&c, &md, &list);
    else build_tower(&c, &md, &list);
    if (kind != TOWER) add_tokenizer(&md, c.n_vocab);
    sort_tensors(&list);
    assign_types(&list, &QUANTS[quant], n);
    // sized by the fused tensors, so splitting changes no weight
    if (!sparse) make_pools(pools, &list, seed, separate);
    if (split) split_experts(&list);
    write_file(&o, &md, &list, sparse ? NULL : pools, seed);

    if (o.hash) {
        uint8_t hash[32];
        sha256_end(&o.sha, hash);
        for (int i = 0; i < 32; i++) printf("%02x", (unsigned)hash[i]);
        printf("  %s\n", o.path);
        if (fflush(stdout) != 0) die("standard output: cannot write: %s", strerror(errno));
    }
    for (int i = 0; i < N_TYPES; i++) {
        free(pools[i].block);
        free(pools[i].scale);
        free(pools[i].min_ratio);
        free(pools[i].sum);
    }
    free(list.t);
    free(md.b.data);
    return 0;
}
