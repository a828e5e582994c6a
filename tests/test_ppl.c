/* test_ppl.c - perplexity (parts/bench.h [3]): compared with a simple computation, one id per step and sums in double;
 * the KL divergence of two runs through a base file, compared with that of their logits; base files that do not match
 * the run. */
#define TESTING
#include "../gemma4.c"
#include "test.h"
#include "files.h"

enum { N_IDS = 700 };
static int32_t ids[N_IDS];

static Model *open_model(const char *path, KvType type, PplOptions *p) {
    Model *m = must(calloc(1, sizeof *m));
    const ModelOptions o = { .n_seqs = 1, .n_batch = 128, .k_type = type, .v_type = type };
    load_model(m, path, cpu_ops(), ppl_plan(o, p), NULL);
    return m;
}

static void close_model(Model *m) {
    free_model(m);
    free(m);
}

// log p of every id of the vocabulary after each of the chunk's ids except the last, one per step: (n - 1, vocab).
static double *plain(Model *m, int32_t bos, const int32_t *chunk, int n) {
    const int vocab = m->config.vocab;
    double *out = must(malloc((size_t)(n - 1) * (size_t)vocab * sizeof *out));
    float *z = must(malloc((size_t)vocab * sizeof *z));
    reset_session(m, 0);
    for (int i = 0; i < n - 1; i++) {
        const StepRow row = { .token = i ? chunk[i] : bos, .output = true };
        double sum = 0, *p = out + (size_t)i * (size_t)vocab;
        step(m, &(StepSeg){ .kind = SEG_CHAIN, .n = 1, .rows = &row }, 1);
        read_logits(m, 0, z);
        commit_all(m);
        for (int k = 0; k < vocab; k++) sum += exp((double)z[k]);
        for (int k = 0; k < vocab; k++) p[k] = (double)z[k] - log(sum);
    }
    free(z);
    return out;
}

static bool near(double got, double want, double off) { return fabs(got - want) <= off * fmax(1, fabs(want)); }

static void check_count(const char *path, int n_ctx, int stride, int n_chunks) {
    PplOptions o = { .n_ctx = n_ctx, .stride = stride, .n_chunks = n_chunks };
    Model *m = open_model(path, KV_F16, &o);
    const PplResult r = ppl_measure(m, 2, ids, N_IDS, &o);
    const int length = n_ctx + stride / 2, apart = stride ? stride : n_ctx,
        first = stride ? length - stride - 1 : n_ctx / 2;
    double sum = 0, squares = 0;
    int chunks = 0, n = 0;
    for (int at = 0; at + length <= N_IDS && (!stride || chunks == 0 || at < N_IDS - length) &&
         (!n_chunks || chunks < n_chunks); at += apart, chunks++) {
        double *p = plain(m, 2, ids + at, length);
        for (int i = first; i < length - 1; i++, n++) {
            const double loss = -p[(size_t)i * (size_t)m->config.vocab + (size_t)ids[at + i + 1]];
            sum += loss;
            squares += loss * loss;
        }
        free(p);
    }
    const double mean = sum / n, error = sqrt((squares / n - mean * mean) / (n - 1)) * exp(mean);
    CHECK(o.n_chunks == chunks, "-c %d, stride %d: %d chunks, want %d", n_ctx, stride, o.n_chunks, chunks);
    CHECK(near(r.ppl, exp(mean), 1e-6) && near(r.ppl_error, error, 1e-5),
          "-c %d, stride %d: PPL %.8g +/- %.8g, want %.8g +/- %.8g", n_ctx,
          stride, r.ppl, r.ppl_error, exp(mean), error);
    close_model(m);
}

static int by_size(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

// The base has an f32 cache, the other run f16.
static void check_divergence(const char *path) {
    enum { CHUNK = 100, JUDGED = 49, N = 4 * JUDGED };
    const char *file = in_tmp("base");
    PplOptions write = { .n_ctx = CHUNK, .n_chunks = 4, .base = file }, compare = { .n_ctx = CHUNK, .n_chunks = 4,
             .compare = file };
    Model *a = open_model(path, KV_F32, &write), *b = open_model(path, KV_F16, &compare);
    const size_t vocab = (size_t)a->config.vocab;
    const PplResult base = ppl_measure(a, 2, ids, N_IDS, &write), same = ppl_measure(a, 2, ids, N_IDS, &compare);
    const PplResult r = ppl_measure(b, 2, ids, N_IDS, &compare);
    CHECK(same.divergence >= 0 && same.max < 4e-8 && near(same.same, 1, 1e-12) && same.rms == 0 && same.ratio == 1,
          "a run against itself: divergence %.3g, at most %.3g, same %.6f, RMS %.3g", same.divergence, same.max,
          same.same, same.rms);
    CHECK(near(r.base_ppl, base.ppl, 1e-6), "the base's PPL: %.8g, want %.8g", r.base_ppl, base.ppl);
    double d[N], mean = 0, squares = 0, rms = 0, ratio = 0;
    int n_same = 0, n = 0;
    for (int c = 0; c < 4; c++) {
        double *p = plain(a, 2, ids + c * CHUNK, CHUNK), *q = plain(b, 2, ids + c * CHUNK, CHUNK);
        for (int i = CHUNK / 2; i < CHUNK - 1; i++, n++) {
            const double *x = p + (size_t)i * vocab, *y = q + (size_t)i * vocab;
            const int next = ids[c * CHUNK + i + 1];
            size_t best[2] = { 0, 0 };
            d[n] = 0;
            for (size_t k = 0; k < vocab; k++) {
                d[n] += exp(x[k]) * (x[k] - y[k]);
                if (x[k] > x[best[0]]) best[0] = k;
                if (y[k] > y[best[1]]) best[1] = k;
            }
            n_same += best[0] == best[1];
            mean += d[n] / N;
            squares += d[n] * d[n] / N;
            rms += pow(exp(x[next]) - exp(y[next]), 2) / N;
            ratio += (x[next] - y[next]) / N;
        }
        free(p);
        free(q);
    }
    qsort(d, N, sizeof *d, by_size);
    const double off = 4e-8 + 1e-3 * mean, most = 4e-8 + 1e-3 * d[N - 1];
    CHECK(fabs(r.divergence - mean) < off, "mean divergence %.6g, want %.6g", r.divergence, mean);
    CHECK(fabs(r.divergence_error - sqrt((squares - mean * mean) / (N - 1))) < off, "its error %.6g",
          r.divergence_error);
    CHECK(fabs(r.max - d[N - 1]) < most && fabs(r.median - (d[N / 2 - 1] + d[N / 2]) / 2) < most,
          "largest %.6g, median %.6g, want %.6g, %.6g", r.max, r.median, d[N - 1], (d[N / 2 - 1] + d[N / 2]) / 2);
    CHECK(fabs(r.p99 - (d[193] + 0.05 * (d[194] - d[193]))) < most, "99 %%: %.6g, want %.6g", r.p99,
          d[193] + 0.05 * (d[194] - d[193]));
    CHECK(near(r.same, (double)n_same / N, 1e-12) && near(r.rms, sqrt(rms), 1e-6) && near(r.ratio, exp(ratio), 1e-6),
          "same first choice %.6f of %d/%d, RMS %.6g of %.6g, ratio %.8g of %.8g",
          r.same, n_same, N, r.rms, sqrt(rms), r.ratio, exp(ratio));
    CHECK(mean > 0, "the runs do not differ");
    printf("divergence of an f16 cache from an f32 one: %.3g, same first choice %.3f\n", mean, r.same);
    close_model(a);
    close_model(b);
}

int main(void) {
    make_tmp();
    start_threads(2);
    char e[700], dense[700];
    snprintf(e, sizeof e, "%s", make_model("e", "micro-e", "f16", NULL));
    snprintf(dense, sizeof dense, "%s", make_model("dense", "micro-dense", "q8_0", NULL));
    for (int i = 0; i < N_IDS; i++) ids[i] = i ? (int32_t)(random_unit(3, i) * 256) : 2;
    check_count(e, 100, 0, 0);
    check_count(e, 530, 0, 0);                         // one scored row more than a step can have
    check_count(dense, 128, 0, 3);                     // as many ids as a step can have rows
    check_count(e, 100, 30, 3);
    check_count(dense, 500, 100, 0);
    check_divergence(e);
    check_divergence(dense);
    return test_done("ppl");
}
