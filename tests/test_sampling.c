/* test_sampling.c - the sample operation, the token counts of penalties, and stop strings.
 *
 *   distribution   the reference: samples over many positions and seeds compared, by chi-square, with a sampler in
 *                  double that shares no code with gemma4.h, for every step alone and together. Seeds are fixed, so the
 *                  test is deterministic
 *   choice         every backend against the reference, token by token
 *   spread         rows that are divided among many threads
 *   edges          ties, NaN, infinities, empty masks, extreme parameters, odd vocabularies
 *   seen           penalties with ancestors in chains and trees, counts over many steps with rejected rows
 *   position       the same text whether rows are in separate steps or are drafts in one step
 *   stop strings   compared with a plain search, for any division of the text
 *
 * All tests except the first and the last run with any backend. TEST_TIMES=1 prints the time of one row of 262144
 * logits. Arguments: -NAME for the backend of make BACKEND=parts/NAME.h only, -cuda for the CUDA backend only, -plain
 * for the plain CUDA backend only, -few after it for a sixtieth of choice, edges and spread; then the tests to run:
 * distribution (not with these), choice, edges, spread, seen, position; none: all. */
#define TESTING
#include "../gemma4.c"
#include "card.h"
#include "test.h"
#include "chi.h"

enum { BIG = 262144, MAX_ROWS = 64, MAX_BUFFERS = 64 };

static const Ops *op;

// ---- memory ---------------------------------------------------------------------------------------------------------

static void *buffers[MAX_BUFFERS];
static int n_buffers;

static void *put(const void *src, size_t n, size_t size) {         // backend memory, until release_all
    assert(n_buffers < MAX_BUFFERS);
    void *p = buffers[n_buffers++] = op->reserve(n * size);
    if (!p) die("test_sampling: no room for %zu bytes", n * size);
    if (src) op->copy(&(Copy){ p, src, n * size, COPY_IN });
    return p;
}

static void fetch(void *dst, const void *src, size_t n, size_t size) {
    op->copy(&(Copy){ dst, src, n * size, COPY_OUT });
    op->wait();
}

static void release_all(void) {
    while (n_buffers) op->release(buffers[--n_buffers]);
}

static uint64_t random_state = 1;

static uint32_t rnd(uint32_t n) {                      // 0 .. n - 1
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((random_state >> 33) % n);
}

static double normal(void) {
    double s = -6;
    for (int i = 0; i < 12; i++) s += rnd(1 << 24) / 16777216.0;
    return s;
}

// ---- a step of rows -------------------------------------------------------------------------------------------------

typedef struct {                        // one or several sessions, rows without attention
    Row     rows[MAX_ROWS];
    Segment segs[4];
    int32_t parent[MAX_ROWS];           // the parent row in the step, or -1
    int     n_rows, n_segs;
} TestStep;

static void add_rows(TestStep *s, int seq, int n, bool tree) {
    const int first = s->n_rows;
    s->segs[s->n_segs] = (Segment){ .seq = seq, .first = first, .n = n, .kind = tree ? SEG_TREE : SEG_CHAIN };
    for (int i = 0; i < n; i++) {
        const int up = !i ? -1 : tree ? (int)rnd((uint32_t)i) : i - 1;
        Row *row = &s->rows[s->n_rows++];
        *row = (Row){ .seg = s->n_segs, .index = i, .depth = up < 0 ? 0 : s->rows[first + up].depth + 1 };
        if (tree) row->ancestors = (up < 0 ? 0 : s->rows[first + up].ancestors) | (uint64_t)1 << i;
        s->parent[first + i] = up < 0 ? -1 : first + up;
    }
    s->n_segs++;
}

// ---- 1. distribution ------------------------------------------------------------------------------------------------

typedef struct {
    const char  *name;
    int          vocab;
    bool         mask, bias;
    int          seen;                  // tokens id % 3 == 1 occurred up to this many times
    SampleParams p;
} Case;

static const Case cases[] = {
    { "nothing", 40, false, false, 0, { .temperature = 1, .top_p = 1, .repeat = 1 } },
    { "mask", 77, true, false, 0, { .temperature = 1, .top_p = 1, .repeat = 1 } },
    { "bias", 40, false, true, 0, { .temperature = 1, .top_p = 1, .repeat = 1 } },
    { "temperature 0.6", 40, false, false, 0, { .temperature = 0.6f, .top_p = 1, .repeat = 1 } },
    { "temperature 3", 33, false, false, 0, { .temperature = 3, .top_p = 1, .repeat = 1 } },
    { "top-k 7", 77, false, false, 0, { .temperature = 1, .top_k = 7, .top_p = 1, .repeat = 1 } },
    { "top-p 0.8", 77, false, false, 0, { .temperature = 1, .top_p = 0.8f, .repeat = 1 } },
    { "min-p 0.1", 77, false, false, 0, { .temperature = 1, .top_p = 1, .min_p = 0.1f, .repeat = 1 } },
    { "repeat 1.5", 40, false, false, 3, { .temperature = 1, .top_p = 1, .repeat = 1.5f } },
    { "repeat 0.7", 40, false, false, 3, { .temperature = 1, .top_p = 1, .repeat = 0.7f } },
    { "presence 0.9", 40, false, false, 3, { .temperature = 1, .top_p = 1, .repeat = 1, .presence = 0.9f } },
    { "frequency 0.5", 40, false, false, 3, { .temperature = 1, .top_p = 1, .repeat = 1, .frequency = 0.5f } },
    { "penalties", 40, false, false, 4, { .temperature = 1, .top_p = 1, .repeat = 1.2f, .presence = 0.3f,
                                          .frequency = -0.2f } },
    { "Gemma's", 100, false, false, 0, { .temperature = 1, .top_k = 64, .top_p = 0.95f, .repeat = 1 } },
    { "top-k before top-p", 60, false, false, 0, { .temperature = 2, .top_k = 8, .top_p = 0.7f, .repeat = 1 } },
    { "temperature before top-p", 60, false, false, 0, { .temperature = 3, .top_p = 0.6f, .repeat = 1 } },
    { "temperature before min-p", 60, false, false, 0, { .temperature = 3, .top_p = 1, .min_p = 0.3f, .repeat = 1 } },
    { "everything", 90, true, true, 3,
      { .temperature = 1.3f, .top_k = 30, .top_p = 0.9f, .min_p = 0.05f, .repeat = 1.1f, .presence = 0.2f,
        .frequency = 0.1f } },
};

// The probability of every token, in double and as simple as possible: a token's rank is the number of better tokens.
static void ref_probabilities(double *out, const Case *c, const float *logits, const uint32_t *mask, const float *bias,
                              const int32_t *counts) {
    const SampleParams *p = &c->p;
    double z[128], w[128], total = 0, left = 0;
    int place[128];
    for (int i = 0; i < c->vocab; i++) {
        z[i] = (double)logits[i] + (c->bias ? (double)bias[i] : 0);
        if (c->seen && counts[i] > 0) {
            z[i] = z[i] > 0 ? z[i] / (double)p->repeat : z[i] * (double)p->repeat;
            z[i] -= counts[i] * (double)p->frequency + (double)p->presence;
        }
        if (c->mask && !(mask[i / 32] >> i % 32 & 1)) z[i] = -INFINITY;
    }
    for (int i = 0; i < c->vocab; i++) {
        place[i] = 0;
        for (int j = 0; j < c->vocab; j++) place[i] += z[j] > z[i] || (z[j] == z[i] && j < i);
        w[i] = p->top_k > 0 && place[i] >= p->top_k ? 0 : exp(z[i] / (double)p->temperature);
        total += w[i];
    }
    double largest = 0;
    for (int i = 0; i < c->vocab; i++) largest = fmax(largest, w[i]);
    for (int i = 0; i < c->vocab; i++) {
        double before = 0;
        for (int j = 0; j < c->vocab; j++) before += place[j] < place[i] ? w[j] : 0;
        CHECK(p->top_p >= 1 || fabs(before / total - (double)p->top_p) > 1e-5, "%s: token %d lies on the edge of top-p",
              c->name, i);
        const bool stays = (before < (double)p->top_p * total || p->top_p >= 1) && w[i] >= (double)p->min_p * largest;
        left += out[i] = stays ? w[i] : 0;
    }
    for (int i = 0; i < c->vocab; i++) out[i] /= left;
}

#ifndef EMULATED
#define EMULATED 0                                     // 1: the CPU executes CUDA code, where a call is slow
#endif

static void test_distribution(void) {
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++)
        for (int by_seed = 0; by_seed < 2; by_seed++) {
            const Case *c = &cases[k];
            const int vocab = c->vocab, words = (vocab + 31) / 32, n = MAX_ROWS;
            const int calls = EMULATED && !op->on_host ? 30 : 400;
            float row[128], *logits = alloc_or_die((size_t)n * vocab, sizeof *logits), bias[128];
            uint32_t *mask = alloc_or_die((size_t)n * words, sizeof *mask);
            int32_t counts[128] = { 0 };
            random_state = 100 + k;
            for (int i = 0; i < vocab; i++) {
                row[i] = (float)(1.7 * normal());
                bias[i] = (float)(0.8 * normal());
                mask[i / 32] |= (uint32_t)(i % 5 != 2) << (i % 32);
                if (c->seen && i % 3 == 1) counts[i] = 1 + (int32_t)rnd((uint32_t)c->seen);
            }
            row[3] = row[vocab - 1] = 2.5f;            // a tie, and the last token counts
            double p[128];
            ref_probabilities(p, c, row, mask, bias, counts);
            for (int r = 0; r < n; r++) {
                memcpy(logits + (size_t)r * vocab, row, (size_t)vocab * sizeof *row);
                memcpy(mask + (size_t)r * words, mask, (size_t)words * sizeof *mask);
            }
            // A row's own token counts, so subtract one from its count.
            TestStep s = { 0 };
            add_rows(&s, 0, n, true);
            for (int r = 0; r < n; r++) {
                s.rows[r].ancestors = (uint64_t)1 << r;
                s.rows[r].token = 1;
            }
            if (c->seen) counts[1]--;
            const Batch b = { .rows = put(s.rows, (size_t)n, sizeof *s.rows), .segs = put(s.segs, 1, sizeof *s.segs),
                              .len = put(NULL, 1, sizeof(int32_t)), .n_rows = n, .n_segs = 1 };
            SampleParams *params = put(NULL, 1, sizeof *params);
            int32_t *out = put(NULL, (size_t)n, sizeof *out), got[MAX_ROWS];
            const Sample o = { .batch = &b, .vocab = vocab, .params = params, .out = out,
                .logits = put(logits, (size_t)n * vocab, sizeof *logits),
                .mask = c->mask ? put(mask, (size_t)n * words, sizeof *mask) : NULL,
                .bias = c->bias ? put(bias, (size_t)vocab, sizeof *bias) : NULL,
                .counts = c->seen ? put(counts, (size_t)vocab, sizeof *counts) : NULL,
                .step_rows = c->seen ? b.rows : NULL };
            int drawn[128] = { 0 }, outside = 0, first_bad = 0;
            for (int call = 0; call < calls; call++) {
                SampleParams now = c->p;
                now.seed = by_seed ? 1000 + (uint64_t)call : 7;
                for (int r = 0; r < n; r++) s.rows[r].depth = by_seed ? r : call * n + r;
                op->copy(&(Copy){ params, &now, sizeof now, COPY_IN });
                op->copy(&(Copy){ (void *)b.rows, s.rows, (size_t)n * sizeof *s.rows, COPY_IN });
                op->sample(&o);
                fetch(got, out, (size_t)n, sizeof *got);
                for (int r = 0; r < n; r++) {
                    if (got[r] >= 0 && got[r] < vocab && p[got[r]] > 0) drawn[got[r]]++;
                    else if (!outside++) first_bad = got[r];
                }
            }
            CHECK(!outside, "%s: got token %d, which cannot be drawn, %d of %d times, want 0", c->name, first_bad,
                  outside, calls * n);
            int bins;
            const double chi = chi_square(drawn, p, vocab, calls * n, &bins);
            CHECK(bins > 1 && chi <= chi_limit(bins - 1),
                  "%s, many %s: chi-square of %d draws over %d tokens: got %.1f, want at most %.1f",
                  c->name, by_seed ? "seeds" : "positions", calls * n, bins, chi, chi_limit(bins - 1));
            release_all();
            free(logits);
            free(mask);
        }
}

// ---- 2. choice ------------------------------------------------------------------------------------------------------

// The reference's token for a row at position pos, in a step without other rows. mask, bias and counts may be NULL.
static int32_t ref_choice(const float *logits, int vocab, const uint32_t *mask, const float *bias,
                          const int32_t *counts, const SampleParams *p, int32_t pos) {
    const Row row = { .index = -1 };
    const Segment seg = { .n = 1 };
    const Batch b = { .rows = &row, .segs = &seg, .len = &pos, .n_rows = 1, .n_segs = 1 };
    int32_t choice;
    reference_ops()->sample(&(Sample){ .batch = &b, .vocab = vocab, .logits = logits, .params = p, .mask = mask,
                                       .bias = bias, .counts = counts, .step_rows = &row, .out = &choice });
    return choice;
}

// The same for the tested backend.
static int32_t choose(const float *logits, int vocab, const uint32_t *mask, const float *bias, const int32_t *counts,
                      SampleParams p, int32_t pos) {
    const Row row = { .token = vocab - 1 };
    const Segment seg = { .n = 1 };
    int32_t got, *less = NULL;
    if (counts) {                                      // the row's own token counts once more: subtract it
        less = alloc_or_die((size_t)vocab, sizeof *less);
        memcpy(less, counts, (size_t)vocab * sizeof *less);
        less[vocab - 1]--;
    }
    const Batch b = { .rows = put(&row, 1, sizeof row), .segs = put(&seg, 1, sizeof seg), .len = put(&pos, 1,
            sizeof pos), .n_rows = 1, .n_segs = 1 };
    int32_t *out = put(NULL, 1, sizeof *out);
    op->sample(&(Sample){ .batch = &b, .vocab = vocab, .logits = put(logits, (size_t)vocab, sizeof *logits),
                          .params = put(&p, 1, sizeof p), .out = out,
                          .mask = mask ? put(mask, ((size_t)vocab + 31) / 32, sizeof *mask) : NULL,
                          .bias = bias ? put(bias, (size_t)vocab, sizeof *bias) : NULL,
                          .counts = less ? put(less, (size_t)vocab, sizeof *less) : NULL,
                          .step_rows = less ? b.rows : NULL });
    fetch(&got, out, 1, sizeof got);
    release_all();
    free(less);
    return got;
}

static int shares = 1;                                 // 15: only a fifteenth of the runs, but one
static int fewer(int runs) { return runs >= shares ? runs / shares : 1; }

static void test_choice(void) {
    static const int sizes[] = { 1, 2, 31, 32, 33, 100, 1000, 5003, BIG };
    static const char *const shapes[] = { "normal", "peaked", "five levels", "equal", "rising", "falling",
                                          "organ pipe" };
    float *z = alloc_or_die(BIG, sizeof *z), *bias = alloc_or_die(BIG, sizeof *bias);
    int32_t *counts = alloc_or_die(BIG, sizeof *counts);
    uint32_t *mask = alloc_or_die(BIG / 32, sizeof *mask);
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++)
        for (int shape = 0; shape < 7; shape++) {
            const int vocab = sizes[k];
            for (int i = 0; i < vocab; i++) {
                z[i] = shape == 0 ? (float)normal() : shape == 1 ? (float)(4 * normal()) : shape == 2
                    ? (float)rnd(5) - 2 : shape == 3 ? 0.5f :
                       shape == 4 ? (float)i / (float)vocab : shape == 5 ? -(float)i / (float)vocab :
                       (float)(i < vocab / 2 ? i : vocab - i) / (float)vocab;
                if (shape == 2 && z[i] == 0 && rnd(2)) z[i] = -0.0f;
                if (shape == 1 && i % 9 == 4) z[i] = -INFINITY;
                bias[i] = i % 17 ? 0 : (float)normal();
                counts[i] = i % 7 ? 0 : (int32_t)rnd(4);
            }
            for (int i = 0; i < (vocab + 31) / 32; i++) mask[i] = rnd(1u << 31) << 1 | rnd(2);
            int bad = 0, n = 0;
            char first[200] = "";
            for (int run = 0; run < fewer(vocab == BIG ? 10 : 60); run++) {
                static const int top_k[] = { 0, 64, 1, 2, 40, 1000, 200000 };
                static const float top_p[] = { 1, 0.95f, 0.3f, 0, 0.999f }, min_p[] = { 0, 0, 0.05f, 1 };
                static const float temperature[] = { 1, 0.2f, 1.7f, 0, 30 };
                const bool masked = rnd(2), biased = rnd(2), counted = rnd(2);
                const SampleParams p = { .seed = rnd(1000), .temperature = temperature[rnd(5)], .top_k = top_k[rnd(7)],
                                         .top_p = top_p[rnd(5)], .min_p = min_p[rnd(4)], .repeat = rnd(2) ? 1 : 1.3f,
                                         .presence = rnd(2) ? 0 : 0.4f, .frequency = rnd(2) ? 0 : 0.1f };
                const int pos = (int)rnd(100000);
                const int32_t want = ref_choice(z, vocab, masked ? mask : NULL, biased ? bias : NULL,
                                                counted ? counts : NULL, &p, pos);
                const int32_t got = choose(z, vocab, masked ? mask : NULL, biased ? bias : NULL,
                                           counted ? counts : NULL, p, pos);
                n++;
                if (got != want && !bad++)
                    snprintf(first, sizeof first, "temperature %g, top-k %d, top-p %g, min-p %g: got %d, want %d",
                             (double)p.temperature,
                             (int)p.top_k, (double)p.top_p, (double)p.min_p, (int)got, (int)want);
            }
            CHECK(!bad, "%d logits, %s: %d of %d choices differ, the first: %s", vocab, shapes[shape], bad, n, first);
        }
    free(z);
    free(bias);
    free(counts);
    free(mask);
}

// Difficult cases for a backend that divides a row among many threads: the ends, equal logits on both sides of every
// border, good tokens next to each other, masks with few tokens, and every top-k near the sizes at which code paths
// change.
static void test_spread(void) {
    static const int sizes[] = { 127, 129, 1025, 4099, 20001, BIG };
    static const int top_k[] = { 1, 2, 63, 64, 65, 128, 511, 512, 513, 1023, 1024, 1025, 5000, 0 };
    static const char *const shapes[] = { "equal", "all -Inf", "one above -Inf", "NaN first", "NaN last",
                                          "equal at borders", "crowd",
                                          "rising", "one +Inf" };
    float *z = alloc_or_die(BIG, sizeof *z);
    uint32_t *mask = alloc_or_die(BIG / 32, sizeof *mask);
    for (size_t size = 0; size < sizeof sizes / sizeof *sizes; size++)
        for (int shape = 0; shape < 9; shape++) {
            const int vocab = sizes[size], words = (vocab + 31) / 32, crowd = (int)rnd((uint32_t)vocab);
            for (int i = 0; i < vocab; i++) {
                const float any = (float)normal();
                z[i] = shape == 0 ? -1.5f : shape == 1 || shape == 2 ? -INFINITY : shape == 7 ? (float)i / 64 :
                       shape == 5 ? (i % 128 == 0 || i % 128 == 127 ? 5 : any) :
                       shape == 6 ? any + (i >= crowd && i < crowd + 3000 ? 12.0f : 0) : any;
            }
            if (shape == 2) z[crowd] = -3e38f;
            if (shape == 3) z[0] = NAN;
            if (shape == 4) z[vocab - 1] = NAN;
            if (shape == 8) z[crowd] = INFINITY;
            int bad = 0, n = 0;
            char first[200] = "";
            for (int run = 0; run < fewer(vocab == BIG ? 4 : 40); run++) {
                const int masked = (int)rnd(4);        // none; most; all but some neighbours; all but one
                memset(mask, masked == 3 ? 0xff : 0, (size_t)words * sizeof *mask);
                for (int i = masked == 1 ? (int)rnd(4) : 0; i > 0; i--) {
                    const uint32_t t = rnd((uint32_t)vocab);
                    mask[t / 32] |= 1u << t % 32;
                }
                for (int i = words / 3; masked == 2 && i < min_int(words, words / 3 + 60); i++) mask[i] = ~0u;
                if (masked == 3) mask[rnd((uint32_t)words)] ^= 1u << rnd(32);
                const SampleParams p = { .seed = rnd(1000), .temperature = rnd(8) ? 1 : 1e30f, .top_k = top_k[rnd(14)],
                                         .repeat = 1, .top_p = rnd(2) ? 0.95f : 1, .min_p = rnd(4) ? 0 : 1e-4f };
                const int pos = (int)rnd(100000);
                const int32_t want = ref_choice(z, vocab, masked ? mask : NULL, NULL, NULL, &p, pos);
                const int32_t got = choose(z, vocab, masked ? mask : NULL, NULL, NULL, p, pos);
                n++;
                if (got != want && !bad++)
                    snprintf(first, sizeof first,
                             "mask %d, temperature %g, top-k %d, top-p %g, min-p %g: got %d, want %d", masked,
                             (double)p.temperature, (int)p.top_k, (double)p.top_p, (double)p.min_p, (int)got, (int)want);
            }
            CHECK(!bad, "spread: %d logits, %s: %d of %d choices differ, the first: %s", vocab, shapes[shape], bad, n,
                  first);
        }
    free(z);
    free(mask);
}

// The integer weights of tokens.
static void test_weights(void) {
    double worst = 0;
    int rises = 0;
    uint64_t last = SAMPLE_ONE;
    for (int i = 0; i <= 400000; i++) {                // exact powers of 1/2 are among them
        const float z = -(float)i / 16384;
        const uint64_t w = sample_weight(z, 0, 1);
        const double want = ldexp(exp2((double)z), 39);
        worst = fmax(worst, fabs((double)w - want) / (want * 1e-8 + 1));
        rises += w > last;
        last = w;
    }
    CHECK(worst <= 1, "weights: off by %g of 1e-8 and 1", worst);
    CHECK(!rises, "weights: %d rise", rises);
    CHECK(sample_weight(-3, -3, 5) == SAMPLE_ONE && sample_weight(-INFINITY, 1, 1) == 0 &&
          sample_weight(0, 1, INFINITY) == 0 &&
          sample_weight(INFINITY, INFINITY, 1) == SAMPLE_ONE && sample_weight(0, INFINITY, 1) == 0 &&
              sample_weight(0, 1, 0) == SAMPLE_ONE &&
          sample_weight(0, 40, 1) == 0 && sample_weight(0, 39, 1) == 1, "weights: an extreme is wrong");
    const uint64_t total = (uint64_t)0x7fffffffffffffff;
    CHECK(sample_share(total, 0) == 0 && sample_share(total, -1) == 0 && sample_share(total, 1) == total &&
          sample_share(total, 2) == total &&
          sample_share(total, NAN) == total && sample_share(total, 0.5f) == total / 2 &&
              sample_share(1000, 0.25f) == 250 &&
          sample_share(7, 0.5f) == 3 && sample_share(total,
                                                     16777215.0f / 16777216.0f) == total - (total >> 24) - 1, "sample_share: wrong at an extreme");
    const SampleParams p = { .repeat = 2, .presence = 0.5f, .frequency = 0.25f };
    CHECK(sample_penalised(3, 2, &p) == 0.5f && sample_penalised(-3, 1, &p) == -6.75f &&
          sample_penalised(0, 4, &p) == -1.5f &&
          sample_penalised(-INFINITY, 1, &p) == -INFINITY, "penalties: a value is wrong");
}

// ---- 3. edges -------------------------------------------------------------------------------------------------------

static void edge(const char *name, const float *z, int vocab, const uint32_t *mask, const float *bias, SampleParams p,
                 int32_t want) {
    if (!p.repeat) p.repeat = 1;
    const int n = fewer(50);
    int bad = 0;
    int32_t got = 0;
    for (int pos = 0; pos < n; pos++) {
        const int32_t one = choose(z, vocab, mask, bias, NULL, p, pos);
        if (one != want) {
            bad++;
            got = one;
        }
    }
    CHECK(!bad, "%s: got %d, want %d, %d of %d times", name, (int)got, (int)want, bad, n);
}

static void test_edges(void) {
    const SampleParams plain = { .temperature = 1, .top_p = 1 },
    gemma = { .temperature = 1, .top_k = 64, .top_p = 0.95f };
    SampleParams p;
    float z[77], bias[77];
    for (int i = 0; i < 77; i++) {
        z[i] = (float)(i % 10);
        bias[i] = 0;
    }
    // 76; 9 and 39
    const uint32_t none[3] = { 0, 0, 0xffffe000 }, one[3] = { 0, 0, 1u << 12 }, two[3] = { 1u << 9, 1u << 7, 0 };
    edge("temperature 0: the first of the best", z, 77, NULL, NULL, (SampleParams){ .temperature = 0, .top_p = 1 }, 9);
    edge("temperature -1", z, 77, NULL, NULL, (SampleParams){ .temperature = -1, .top_k = 3, .top_p = 0 }, 9);
    edge("top-k 1", z, 77, NULL, NULL, (SampleParams){ .temperature = 1e30f, .top_k = 1, .top_p = 1 }, 9);
    edge("top-p 0", z, 77, NULL, NULL, (SampleParams){ .temperature = 1, .top_p = 0 }, 9);
    edge("top-p below 0", z, 77, NULL, NULL, (SampleParams){ .temperature = 1, .top_p = -1 }, 9);
    edge("nothing allowed", z, 77, none, NULL, plain, -1);
    edge("nothing allowed, temperature 0", z, 77, none, NULL, (SampleParams){ .temperature = 0 }, -1);
    edge("the last token alone", z, 77, one, NULL, gemma, 76);
    edge("a tie of two, top-k 1", z, 77, two, NULL, (SampleParams){ .temperature = 1, .top_k = 1, .top_p = 1 }, 9);
    bias[9] = -INFINITY;
    edge("a bias of -Inf", z, 77, two, bias, plain, 39);
    bias[9] = -1e30f;
    edge("a very low bias", z, 77, two, bias, plain, 39);
    bias[9] = 0;
    bias[39] = 1e30f;
    edge("a very high bias", z, 77, NULL, bias, plain, 39);
    edge("a very high bias, masked out", z, 77, one, bias, plain, 76);
    bias[39] = 0;
    z[5] = 9.001f;
    edge("a tiny temperature", z, 77, NULL, NULL, (SampleParams){ .temperature = 1e-6f, .top_p = 1 }, 5);
    edge("a temperature whose inverse overflows", z, 77, NULL, NULL,
         (SampleParams){ .temperature = 1e-40f, .top_p = 1 }, 5);
    edge("min-p 1", z, 77, NULL, NULL, (SampleParams){ .temperature = 1, .top_p = 1, .min_p = 1 }, 5);
    edge("min-p above 1", z, 77, NULL, NULL, (SampleParams){ .temperature = 1, .top_p = 1, .min_p = 7 }, 5);
    z[6] = INFINITY;
    edge("+Inf", z, 77, NULL, NULL, plain, 6);
    z[20] = NAN;
    edge("a NaN", z, 77, NULL, NULL, plain, -1);
    edge("a NaN that is not allowed", z, 77, one, NULL, gemma, -1);
    edge("a NaN, temperature 0", z, 77, NULL, NULL, (SampleParams){ .temperature = 0 }, -1);
    for (int i = 0; i < 77; i++) z[i] = -INFINITY;
    edge("all -Inf", z, 77, NULL, NULL, plain, -1);
    z[70] = -1e30f;
    edge("all but one -Inf", z, 77, NULL, NULL, (SampleParams){ .temperature = 1e30f, .top_p = 1 }, 70);
    edge("a vocabulary of one", z + 70, 1, NULL, NULL, gemma, 0);
    edge("a vocabulary of one, all -Inf", z, 1, NULL, NULL, gemma, -1);
    edge("top-k above the vocabulary", z, 77, NULL, NULL,
         (SampleParams){ .temperature = 1, .top_k = INT32_MAX, .top_p = 1 }, 70);

    // Random numbers at the border of two tokens: with 256 equal weights, k / 256 chooses token k, and 0 the first.
    static const float equal[256];
    int between = 0;
    for (uint64_t seed = 0; seed < 300000 && between < 3; seed++) {
        const float u = random_unit(seed, 3);
        if (u * 256 != floorf(u * 256)) continue;
        between++;
        p = (SampleParams){ .seed = seed, .temperature = 1, .top_p = 1, .repeat = 1 };
        const int32_t got = choose(equal, 256, NULL, NULL, NULL, p, 3);
        CHECK(got == (int32_t)(u * 256), "a draw between two tokens: got %d, want %d", (int)got, (int)(u * 256));
    }
    CHECK(between == 3, "a draw between two tokens: %d of 3 seeds found", between);
    uint64_t zero = 0;
    while (random_unit(zero, 0) > 0) zero++;
    p = (SampleParams){ .seed = zero, .temperature = 1, .top_p = 1, .repeat = 1 };
    CHECK(choose(equal, 256, NULL, NULL, NULL, p, 0) == 0, "a draw of 0: not the first token");

    // At a huge temperature all 77 tokens are sampled, whatever their logits; min-p 1 keeps exactly the tokens with the
    // best weight.
    int seen[77] = { 0 }, n = 0;
    for (int i = 0; i < 77; i++) z[i] = (float)(i % 10);
    p = (SampleParams){ .temperature = 1e30f, .top_p = 1, .repeat = 1 };
    for (int pos = 0; pos < 2000; pos++) seen[choose(z, 77, NULL, NULL, NULL, p, pos)]++;
    for (int i = 0; i < 77; i++) n += seen[i] > 0;
    CHECK(n == 77, "a huge temperature: %d of 77 tokens come up", n);
    memset(seen, 0, sizeof seen);
    p = (SampleParams){ .temperature = 1, .top_p = 1, .min_p = 1, .repeat = 1 };
    for (int pos = 0; pos < 300; pos++) seen[choose(z, 77, NULL, NULL, NULL, p, pos)]++;
    n = 0;
    for (int i = 0; i < 77; i++) n += (seen[i] > 0) != (z[i] == 9);
    CHECK(!n, "min-p 1 among ties: %d tokens wrongly in or out", n);
}

// ---- 4. counts for penalties ----------------------------------------------------------------------------------------

enum { SEEN_VOCAB = 50, SESSIONS = 3 };

typedef struct { int32_t tokens[4000]; int n; } Text;

static void recount(int32_t *counts, const Text *t) {
    memset(counts, 0, SEEN_VOCAB * sizeof *counts);
    for (int i = 0; i < t->n; i++) counts[t->tokens[i] < 0 ? 0 : t->tokens[i]]++;
}

// Steps of chains and trees in three sessions: checks every row's token against its whole text, and every count after
// each commit.
static void test_seen(void) {
    static Text text[SESSIONS];
    int32_t counts[SESSIONS * SEEN_VOCAB] = { 0 }, want[SESSIONS * SEEN_VOCAB], *dev_counts;
    int bad_choices = 0, bad_counts = 0, changed = 0, choices = 0;
    random_state = 5;
    memset(text, 0, sizeof text);
    for (int step = 0; step < 60; step++) {
        TestStep s = { 0 };
        const int first_seq = (int)rnd(SESSIONS);
        for (int i = 0; i < 2; i++) add_rows(&s, (first_seq + i) % SESSIONS, 1 + (int)rnd(step % 3 ? 12 : 30), rnd(2));
        for (int r = 0; r < s.n_rows; r++) s.rows[r].token = (int32_t)rnd(SEEN_VOCAB / 2);
        if (step % 10 == 7) s.rows[s.n_rows - 1].token = -1;       // a sampled -1 as input counts as token 0
        SampleParams params[SESSIONS];
        int32_t len[SESSIONS];
        for (int i = 0; i < SESSIONS; i++) {
            params[i] = (SampleParams){ .seed = 40 + (uint64_t)i, .temperature = (float)(step % 4),
                                        .top_k = step % 2 ? 20 : 0, .top_p = 0.95f,
                                        .repeat = 1.4f, .presence = 0.5f, .frequency = 0.3f };
            len[i] = text[i].n;
        }
        float logits[MAX_ROWS * SEEN_VOCAB];
        for (int i = 0; i < s.n_rows * SEEN_VOCAB; i++) logits[i] = (float)normal();
        // a view of every other row, as for output rows
        Row kept[MAX_ROWS];
        int n_out = 0;
        for (int r = s.n_rows % 2; r < s.n_rows; r += 2) kept[n_out++] = s.rows[r];
        const Batch all = { .rows = put(s.rows, (size_t)s.n_rows, sizeof(Row)), .segs = put(s.segs, 2, sizeof(Segment)),
                            .len = put(len, SESSIONS, sizeof *len), .n_rows = s.n_rows, .n_segs = 2 };
        Batch view = all;
        view.rows = put(kept, MAX_ROWS, sizeof(Row));
        view.n_rows = n_out;
        dev_counts = put(counts, SESSIONS * SEEN_VOCAB, sizeof *counts);
        int32_t *out = put(NULL, MAX_ROWS, sizeof *out), got[MAX_ROWS];
        op->sample(&(Sample){ .batch = &view, .vocab = SEEN_VOCAB, .logits = put(logits, MAX_ROWS * SEEN_VOCAB,
                sizeof *logits),
                              .params = put(params, SESSIONS,
                                            sizeof *params), .counts = dev_counts, .step_rows = all.rows, .out = out });
        fetch(got, out, (size_t)n_out, sizeof *got);
        for (int i = 0; i < n_out; i++) {             // the text of a row: the committed text, then its ancestors
            const int r = s.n_rows % 2 + 2 * i, seq = s.segs[s.rows[r].seg].seq;
            static Text path;
            path = text[seq];
            for (int up = r; up >= 0; up = s.parent[up]) path.tokens[path.n++] = s.rows[up].token;
            int32_t seen[SEEN_VOCAB];
            recount(seen, &path);
            const float *z = logits + (size_t)i * SEEN_VOCAB;
            const int pos = len[seq] + s.rows[r].depth;
            choices++;
            bad_choices += got[i] != ref_choice(z, SEEN_VOCAB, NULL, NULL, seen, &params[seq], pos);
            changed += got[i] != ref_choice(z, SEEN_VOCAB, NULL, NULL, counts + seq * SEEN_VOCAB, &params[seq], pos);
        }
        int32_t n_accept[2], path[2 * STEP_ROWS] = { 0 };
        for (int i = 0; i < 2; i++) {                  // the path to some row, or an empty path
            const Segment *seg = &s.segs[i];
            const int leaf = seg->first + (int)rnd((uint32_t)seg->n), depth = s.rows[leaf].depth;
            n_accept[i] = rnd(5) ? depth + 1 : 0;
            for (int up = leaf, k = depth; up >= 0; up = s.parent[up], k--) path[i * STEP_ROWS + k] = up - seg->first;
            Text *t = &text[seg->seq];
            for (int k = 0; k < n_accept[i]; k++)
                t->tokens[t->n++] = s.rows[seg->first + path[i * STEP_ROWS + k]].token;
        }
        op->kv_commit(&(KvCommit){ .batch = &all, .n_accept = put(n_accept, 2, sizeof *n_accept), .counts = dev_counts,
                                   .path = put(path, 2 * STEP_ROWS, sizeof *path), .vocab = SEEN_VOCAB });
        fetch(counts, dev_counts, SESSIONS * SEEN_VOCAB, sizeof *counts);
        for (int i = 0; i < SESSIONS; i++) recount(want + i * SEEN_VOCAB, &text[i]);
        bad_counts += memcmp(counts, want, sizeof want) != 0;
        release_all();
    }
    CHECK(choices > 300 && !bad_choices, "seen: %d of %d choices differ from those with the counts of the whole text",
          bad_choices, choices);
    CHECK(changed > 30, "seen: the rows of the step change only %d of %d choices: this test tests nothing", changed,
          choices);
    CHECK(!bad_counts, "seen: counts differ from the committed text after %d of 60 steps", bad_counts);
}

// ---- 5. position ----------------------------------------------------------------------------------------------------

// A text that is sampled token by token, then verified as drafts, as a chain and as a tree with wrong branches: each
// row must sample the next token of the text. Logits depend only on the position, so rows differ only in position and
// penalties.
static void test_position(void) {
    enum { LENGTH = 60, VOCAB = 300 };
    static float logits[LENGTH + 1][VOCAB];
    int32_t text[LENGTH + 1] = { 5 }, counts[VOCAB] = { 0 };
    const SampleParams p = { .seed = 11, .temperature = 1, .top_k = 64, .top_p = 0.95f, .repeat = 1.3f,
                             .presence = 0.2f, .frequency = 0.2f };
    for (int i = 0; i <= LENGTH; i++)
        for (int j = 0; j < VOCAB; j++) logits[i][j] = (float)(2 * normal());
    for (int i = 0; i < LENGTH; i++) {                 // text[i] is the input at position i; its counts include itself
        int32_t seen[VOCAB];
        memcpy(seen, counts, sizeof seen);
        seen[text[i]]++;
        text[i + 1] = choose(logits[i], VOCAB, NULL, NULL, seen, p, i);
        counts[text[i]]++;
    }
    for (int tree = 0; tree < 2; tree++) {
        static const int widths[] = { 1, 2, 7, 20, 31 };
        for (int w = 0; w < 5; w++) {
            int bad = 0;
            memset(counts, 0, sizeof counts);
            for (int at = 0; at < LENGTH; at += widths[w]) {
                const int n = min_int(widths[w], LENGTH - at);
                TestStep s = { 0 };
                if (tree) {                            // every row of the text has a sibling without children
                    add_rows(&s, 0, 2 * n, true);
                    for (int r = 0; r < 2 * n; r++) {
                        const int up = r / 2 * 2 - 2;
                        s.rows[r].depth = r / 2;
                        s.rows[r].ancestors = (up < 0 ? 0 : s.rows[up].ancestors) | (uint64_t)1 << r;
                        s.rows[r].token = r % 2 ? (text[at + r / 2] + 1) % VOCAB : text[at + r / 2];
                    }
                } else {
                    add_rows(&s, 0, n, false);
                    for (int r = 0; r < n; r++) s.rows[r].token = text[at + r];
                }
                static float z[MAX_ROWS][VOCAB];
                for (int r = 0; r < s.n_rows; r++) memcpy(z[r], logits[at + s.rows[r].depth], sizeof z[r]);
                const Batch b = { .rows = put(s.rows, (size_t)s.n_rows, sizeof(Row)), .segs = put(s.segs, 1,
                        sizeof(Segment)), .len = put(&at, 1, sizeof(int32_t)), .n_rows = s.n_rows, .n_segs = 1 };
                int32_t *out = put(NULL, MAX_ROWS, sizeof *out), got[MAX_ROWS];
                op->sample(&(Sample){ .batch = &b, .vocab = VOCAB, .logits = put(z, MAX_ROWS * VOCAB,
                        sizeof(float)), .params = put(&p, 1, sizeof p),
                                      .counts = put(counts, VOCAB, sizeof *counts), .step_rows = b.rows, .out = out });
                fetch(got, out, (size_t)s.n_rows, sizeof *got);
                release_all();
                for (int r = 0; r < s.n_rows; r += 1 + tree) bad += got[r] != text[at + s.rows[r].depth + 1];
                for (int i = 0; i < n; i++) counts[text[at + i]]++;
            }
            CHECK(!bad, "position: %s of %d: %d of %d tokens differ from those made one by one",
                  tree ? "trees" : "chains", widths[w], bad, LENGTH);
        }
    }
}

// ---- 6. stop strings ------------------------------------------------------------------------------------------------

// Where the text ends: before the stop string that is complete first; on ties before the longest. -1: no stop string.
static int ref_stop(const TextList *stops, const char *text, int n) {
    for (int end = 1; end <= n; end++) {
        int longest = 0;
        for (int k = 0; k < stops->n; k++) {
            const int len = (int)strlen(stops->text[k]);
            if (len <= end && len > longest && !memcmp(text + end - len, stops->text[k], (size_t)len)) longest = len;
        }
        if (longest) return end - longest;
    }
    return -1;
}

// Pushes the text in pieces of at most `most` bytes, 0: of any size. Also checks the output after each piece: no
// beginning of a stop string is output, and no more than necessary is held back.
static void check_stops(const TextList *stops, const char *text, int most) {
    const int n = (int)strlen(text), stop = ref_stop(stops, text, n);
    Stops s = stops_new(stops);
    char *out = alloc_or_die((size_t)n + s.longest + 1, 1), all[4096];
    int passed = 0, at = 0;
    bool early = false, late = false;
    while (at < n) {
        const int piece = min_int(n - at, most ? most : 1 + (int)rnd(9));
        const size_t got = stops_push(&s, text + at, (size_t)piece, out);
        at += piece;
        memcpy(all + passed, out, got);
        passed += (int)got;
        if (stop >= 0) early |= passed > stop;
        if (s.hit) continue;
        int held = 0;    // the longest suffix of the text so far that is the beginning of a stop string
        for (int k = 0; k < stops->n; k++)
            for (int len = min_int((int)strlen(stops->text[k]), at); len > held; len--)
                if (!memcmp(text + at - len, stops->text[k], (size_t)len)) held = len;
        late |= at - passed != held;
    }
    const size_t got = stops_flush(&s, out);
    memcpy(all + passed, out, got);
    passed += (int)got;
    const int want = stop < 0 ? n : stop;
    CHECK((s.hit != NULL) == (stop >= 0) && passed == want && !memcmp(all, text, (size_t)want) && !early && !late,
          "stop strings: '%s', first stop '%s', pieces of %d: got '%.*s', want '%.*s'%s", text,
          stops->n ? stops->text[0] : "", most, passed,
          all, want, text, early ? "; part of a stop string was passed on" : late
              ? "; too many or too few bytes were held back" : "");
    free(out);
    stops_free(&s);
}

static void test_stops(void) {
    static const struct { const char *text; const char *stops[4]; int n; } fixed[] = {
        { "the quick fox", { "quick" }, 1 }, { "the quick fox", { "none" }, 1 }, { "the quick fox", { 0 }, 0 },
        { "", { "a" }, 1 },
        { "aaab", { "aab" }, 1 }, { "ababac", { "abac" }, 1 }, { "aabaabaaab", { "aabaaab" }, 1 },
        { "xabcd", { "abcd", "bc" }, 2 },
        { "xabc", { "abc", "bc", "c" }, 3 }, { "abcabd", { "abd", "abcabe" }, 2 },
        { "end of it", { "it", "of it" }, 2 },
        { "stop at the very en", { "end" }, 1 }, { "User:", { "User:" }, 1 },
        { "a\nUser: hi", { "\nUser:", "\nuser:" }, 2 },
        { "caf\xC3\xA8 caf\xC3\xA9 fin", { "caf\xC3\xA9" }, 1 },
        { "\xF0\x9F\x98\x80\xF0\x9F\x98\x81", { "\xF0\x9F\x98\x81" }, 1 },
        { "\xE4\xB8\xAD\xE6\x96\x87\xE5\xAD\x97", { "\xE6\x96\x87", "\xE4\xB8\xAD\xE5" }, 2 },
        { "aXbX", { "X", "X" }, 2 },
    };
    for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++)
        for (int most = 0; most < 8; most++)
            check_stops(&(TextList){ (const char **)(void *)fixed[i].stops, fixed[i].n }, fixed[i].text, most);
    for (int run = 0; run < 3000; run++) {             // few letters, so that partial matches are frequent
        char text[60], stop[4][8];
        const char *stops[4] = { stop[0], stop[1], stop[2], stop[3] };
        const int n = (int)rnd(sizeof text);
        for (int i = 0; i < n; i++) text[i] = (char)('a' + rnd(2 + run % 2));
        text[n] = 0;
        for (int k = 0; k < 4; k++) {
            const int len = 2 + (int)rnd(6);
            for (int i = 0; i < len; i++) stop[k][i] = (char)('a' + rnd(2 + run % 2));
            stop[k][len] = 0;
        }
        check_stops(&(TextList){ stops, (int)rnd(5) }, text, run % 4);
    }

    // Long strings, nearly all of whose beginnings the text ends with at each byte. The time would be hours if a byte
    // cost as much as a string is long.
    enum { N_LONG = 16, LONG_STOP = 200000, LONG_TEXT = 1000000 };
    char *many = alloc_or_die(N_LONG, LONG_STOP + 1), *text_of_a = alloc_or_die(LONG_TEXT + 2 * LONG_STOP, 1);
    const char *long_stops[N_LONG];
    for (int k = 0; k < N_LONG; k++) {
        char *stop = many + k * (LONG_STOP + 1);
        memset(stop, 'a', LONG_STOP);
        stop[LONG_STOP - 1] = (char)('b' + k);
        long_stops[k] = stop;
    }
    const TextList long_list = { long_stops, N_LONG };
    Stops long_one = stops_new(&long_list);
    memset(text_of_a, 'a', LONG_TEXT);
    size_t n_out = 0;
    for (size_t at = 0; at < LONG_TEXT; at += 1000) n_out += stops_push(&long_one, text_of_a + at, 1000, text_of_a + n_out);
    CHECK(n_out == LONG_TEXT - (LONG_STOP - 1) && !long_one.hit, "stop strings: of %d bytes a, %zu were passed on, want %d",
          LONG_TEXT, n_out, LONG_TEXT - (LONG_STOP - 1));
    n_out = stops_push(&long_one, "q", 1, text_of_a);
    CHECK(n_out == 0 && long_one.hit == long_stops[15], "stop strings: the last of %d long ones was not found", N_LONG);
    stops_free(&long_one);
    free(many);
    free(text_of_a);

    // With tokens: characters that are split, and a stop string that ends inside a token.
    static const char *const path = "models/gemma4-mini-q8_0.gguf";
    static const char text[] = "Caf\xC3\xA9 \xE2\x82\xAC 5 \xF0\x9F\xA6\x8A and then \xE4\xB8\xAD\xE6\x96\x87 stops.";
    static const char *const stops[] = { "\xF0\x9F\xA6\x8A", "\xE4\xB8\xAD\xE6\x96\x87", " th", "hen", "\xE2\x82\xAC 5",
                                         "never" };
    Gguf g;
    Tokenizer t;
    if (gguf_open(&g, path) < 0) {
        SKIP("no models/gemma4-mini-q8_0.gguf: stop strings through tokens");
        return;
    }
    load_tokenizer(&t, &g, 0);
    TokIds ids = { 0 };
    CHECK(tok_encode(&t, text, strlen(text), TOK_PLAIN, &ids) >= 0 && ids.n > 20,
          "stop strings: the text has %zu tokens, want many", ids.n);
    for (size_t k = 0; k < sizeof stops / sizeof *stops; k++) {
        const char *one[] = { stops[k] }, *found = strstr(text, stops[k]);
        const TextList list = { one, 1 };
        Stops s = stops_new(&list);
        char *piece = alloc_or_die(t.stream_cap, 1), *out = alloc_or_die(t.stream_cap + s.longest, 1), all[200] = "";
        TokStream stream = { 0 };
        for (size_t i = 0; i < ids.n; i++) {
            const size_t n = stops_push(&s, piece, tok_stream_push(&t, &stream, ids.ids[i], false, piece, t.stream_cap),
                                        out);
            strncat(all, out, n);
        }
        strncat(all, out, stops_push(&s, piece, tok_stream_flush(&stream, piece, t.stream_cap), out));
        strncat(all, out, stops_flush(&s, out));
        const size_t want = found ? (size_t)(found - text) : strlen(text);
        CHECK(strlen(all) == want && !memcmp(all, text, want) && (s.hit != NULL) == (found != NULL),
              "stop string '%s' through tokens: got '%s'", stops[k], all);
        free(piece);
        free(out);
        stops_free(&s);
    }
    tok_ids_free(&ids);
    tok_free(&t);
    gguf_close(&g);
}

// ---- times ----------------------------------------------------------------------------------------------------------

static void print_times(void) {
    static const struct { const char *name; bool counted; SampleParams p; } runs[] = {
        { "greedy", false, { .temperature = 0, .top_p = 1, .repeat = 1 } },
        { "temperature 1, top-k 64, top-p 0.95", false,
          { .temperature = 1, .top_k = 64, .top_p = 0.95f, .repeat = 1 } },
        { "top-k 0, top-p 0.95", false, { .temperature = 1, .top_p = 0.95f, .repeat = 1 } },
        { "top-k 0, top-p 1", false, { .temperature = 1, .top_p = 1, .repeat = 1 } },
        { "top-k 64, top-p 0.95, bias, penalties", true,
          { .temperature = 1, .top_k = 64, .top_p = 0.95f, .repeat = 1.1f, .presence = 0.1f } },
    };
    float *z = alloc_or_die(BIG, sizeof *z), *bias = alloc_or_die(BIG, sizeof *bias);
    uint32_t *mask = alloc_or_die(BIG / 32, sizeof *mask);
    int32_t *counts = alloc_or_die(BIG, sizeof *counts);
    for (int peaks = 0; peaks < 2; peaks++) {
        for (int i = 0; i < BIG; i++) z[i] = (float)((peaks ? 3 : 1) * normal());
        for (int i = 0; peaks && i < 20; i++) z[i * 1000 + 7] = 16 + 0.5f * (float)i;
        for (int i = 0; i < 3000; i++) counts[i * 37] = 1;
        memset(mask, 0xff, BIG / 8);
        const Row row = { .token = 3 };
        const Segment seg = { .n = 1 };
        for (size_t k = 0; k < sizeof runs / sizeof *runs; k++) {
            int32_t len = 0;
            const Batch b = { .rows = put(&row, 1, sizeof row), .segs = put(&seg, 1, sizeof seg), .len = put(&len, 1,
                    sizeof len), .n_rows = 1, .n_segs = 1 };
            const bool counted = runs[k].counted;
            const Sample o = { .batch = &b, .vocab = BIG, .logits = put(z, BIG, sizeof *z), .params = put(&runs[k].p, 1,
                    sizeof runs[k].p),
                               .mask = put(mask, BIG / 32, sizeof *mask),
                               .bias = counted ? put(bias, BIG, sizeof *bias) : NULL,
                               .counts = counted ? put(counts, BIG, sizeof *counts) : NULL,
                               .step_rows = counted ? b.rows : NULL, .out = put(NULL, 1, sizeof(int32_t)) };
            double best = INFINITY, sum = 0;   // per call of a step with IN_A_ROW calls, so that waiting hardly matters
            enum { IN_A_ROW = 20 };
            for (len = 0; len < 50; len++) {
                op->copy(&(Copy){ b.len, &len, sizeof len, COPY_IN });
                op->wait();
                const double start = seconds();
                if (op->begin((StepKey){ .kind = STEP_SAMPLE, .rows = 1, .variant = peaks * 10 + (int)k }))
                    for (int i = 0; i < IN_A_ROW; i++) op->sample(&o);
                op->end();
                op->wait();
                const double took = (seconds() - start) / IN_A_ROW;
                best = fmin(best, took);
                sum += took;
            }
            printf("%-8s %-40s %6.0f us at best, %6.0f on average\n", peaks ? "peaked" : "flat", runs[k].name,
                   best * 1e6, sum / 50 * 1e6);
            release_all();
        }
    }
    free(z);
    free(bias);
    free(mask);
    free(counts);
}

// only: names of the tests to run, NULL after the last; none: all.
static void run_all(const Ops *table, char **only) {
    static const struct { const char *name; bool of_reference, of_others; void (*test)(void); } tests[] = {
        { "distribution", true, false, test_distribution }, { "choice", false, true, test_choice },
        { "spread", false, true, test_spread }, { "edges", true, true, test_edges }, { "seen", true, true, test_seen },
        { "position", true, true, test_position }
    };
    op = table;
    op->init(&(Limits){ .max_rows = MAX_ROWS, .max_cols = 256, .vocab = BIG });
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) {
        bool wanted = !*only;
        for (char **name = only; *name; name++) wanted |= strcmp(*name, tests[i].name) == 0;
        if (wanted && (table == reference_ops() ? tests[i].of_reference : tests[i].of_others)) tests[i].test();
    }
    if (getenv("TEST_TIMES")) print_times();
}

int main(int argc, char **argv) {
    take_card(&argc, argv);
#ifdef BACKEND_OPS
    if (argc > 1 && !strcmp(argv[1], "-" BACKEND_NAME)) {
        reference_ops()->init(&(Limits){ .max_rows = MAX_ROWS, .max_cols = 256, .vocab = BIG });
        if (BACKEND_OPS()) run_all(BACKEND_OPS(), argv + 2);
        else SKIP("no device that " BACKEND_NAME " can use");
        return test_done("sampling");
    }
#endif
    const bool plain = argc > 1 && strcmp(argv[1], "-plain") == 0;
    const bool cpu = !plain && (argc < 2 || strcmp(argv[1], "-cuda") != 0);
    const bool few = !cpu && argc > 2 && strcmp(argv[2], "-few") == 0;
    char **only = argv + (cpu ? 1 : few ? 3 : 2);
    if (few) shares = 60;
    test_weights();
    reference_ops()->init(&(Limits){ .max_rows = MAX_ROWS, .max_cols = 256, .vocab = BIG });
    if (cpu) run_all(reference_ops(), only);
    if (cpu) run_all(cpu_ops(), only);
#ifdef USE_CUDA
    const Ops *gpu = plain ? plain_ops() : cuda_ops();
    if (gpu) run_all(gpu, only);
    if (gpu && cpu) shares = 15, run_all(plain_ops(), only);
    if (!gpu) SKIP("no GPU: the CUDA backend's sampler");
#else
    SKIP("built without CUDA: the CUDA backend's sampler");
#endif
    test_stops();
    return test_done("sampling");
}
