/* test_cuda.c - compares whole models on the CUDA backend with the CPU backend, on the same files.
 *
 * test_ops tests every operation alone; this tests them together, as step() and commit() issue them. test_forward
 * checks the CPU's logits, so the difference to them is the error of the CUDA backend.
 *
 *   logits    chunks of 1, 7 and 64 rows: within 1e-3 of max |logit|, and equal bits among themselves (contract 7)
 *   prompt    one chunk of 400 rows: KL divergence of the next token at most 1e-3 on average
 *             Quantised random models: if a last bit makes an activation round the other way, their logits change much.
 *             There the bound is ten times the change in the CPU backend when its norms change in their seventh digit;
 *             for prompts, which multiply in f16 where the CPU rounds to int8, it is the cost of that rounding
 *             (docs/quality.md)
 *   trees     drafts that are accepted in part, then plain tokens: the same as without drafts
 *   choices   greedy text of the trained mini: the CPU's text, or a near tie at the first difference; next-token KL at
 *             most 1e-3
 *   memory    the memory that loading a model takes on the device: as planned, within 1 % and the driver's granularity
 *
 * Arguments: -few for short texts and no step of more than 64 rows; -host: all weights of layers are in host memory;
 * then the models to test, as a preset or a preset
 * and a type (`build/test_cuda micro-e tiny-moe-q4_0`), `choices`, `memory`; none: all. Skipped, and counted, when
 * built without CUDA or where there is no GPU. */
#define TESTING
#include "../gemma4.c"
#include "steps.h"
#include "card.h"
#include "test.h"

#define MINI "models/gemma4-mini-q8_0.gguf"
enum { N_TEXT = 512, N_CHOICES = 500 };

#ifdef USE_CUDA
static char dir[200];
static bool few;

static const char *make_file(const char *preset, const char *quant, const char *more) {
    static char path[300];
    char command[1200];
    const char *build = getenv("BUILD");
    snprintf(path, sizeof path, "%s/%s-%s.gguf", dir, preset, quant);
    snprintf(command, sizeof command, "'%.300s/make_gguf' --preset %s --quant %s --seed 11 %s --out '%s'",
             build ? build : "build", preset, quant, more, path);
    if (system(command)) die("cannot make a model: %s", command);
    return path;
}

static Model *open_for(const char *path, const Ops *ops, ModelOptions o) {
    Model *m = alloc_or_die(1, sizeof *m);
    load_model(m, path, ops, o, NULL);
    return m;
}

static void close_for(Model *m) {
    free_model(m);
    free(m);
}

static const char *place;               // where weights lie: ModelOptions.place

static ModelOptions plan(KvType type) {
    return (ModelOptions){ .n_ctx = 1024, .n_seqs = 2, .n_batch = 512, .n_logits = 512, .k_type = type,
                           .v_type = type, .place = place };
}

static void random_text(int32_t *ids, int n, int vocab) {
    uint32_t r = 5;
    for (int i = 0; i < n; i++) {
        r = r * 1664525u + 1013904223u;
        ids[i] = (int32_t)((r >> 8) % (uint32_t)vocab);
    }
}

// Logits (n, vocab) of a text in chunks, which are committed; the caller frees them.
static float *logits_of(Model *m, const int32_t *ids, int n, int chunk) {
    const size_t vocab = (size_t)m->config.vocab;
    float *out = alloc_or_die((size_t)n * vocab, sizeof *out);
    reset_session(m, 0);
    for (int at = 0; at < n; at += chunk) {
        const int rows = min_int(chunk, n - at);
        for (int i = 0; i < rows; i++) m->step_rows[i] = (StepRow){ .token = ids[at + i], .output = true };
        step(m, &(StepSeg){ .seq = 0, .kind = SEG_CHAIN, .n = rows, .rows = m->step_rows }, 1);
        for (int i = 0; i < rows; i++) read_logits(m, i, out + (size_t)(at + i) * vocab);
        commit_all(m);
    }
    return out;
}

static double largest_difference(const float *a, const float *b, size_t n, double *scale) {
    double worst = 0;
    *scale = 0;
    for (size_t i = 0; i < n; i++) {
        const double d = fabs((double)a[i] - (double)b[i]);
        if (!(d <= worst)) worst = d;                  // keeps a NaN
        if (fabs((double)a[i]) > *scale) *scale = fabs((double)a[i]);
    }
    return worst;
}

static double kl(const float *p, const float *q, int n) {    // KL divergence of softmax(p) from softmax(q), in nats
    double top[2] = { -INFINITY, -INFINITY }, sum[2] = { 0, 0 }, d = 0;
    for (int i = 0; i < n; i++) {
        top[0] = fmax(top[0], (double)p[i]);
        top[1] = fmax(top[1], (double)q[i]);
    }
    for (int i = 0; i < n; i++) {
        sum[0] += exp((double)p[i] - top[0]);
        sum[1] += exp((double)q[i] - top[1]);
    }
    for (int i = 0; i < n; i++) {
        const double lp = (double)p[i] - top[0] - log(sum[0]), lq = (double)q[i] - top[1] - log(sum[1]);
        d += exp(lp) * (lp - lq);
    }
    return d;
}

static double mean_kl(const float *p, const float *q, int rows, int vocab) {
    double sum = 0;
    for (int r = 0; r < rows; r++) sum += kl(p + (size_t)r * (size_t)vocab, q + (size_t)r * (size_t)vocab, vocab);
    return sum / rows;
}

static void test_logits(const char *preset, const char *quant, const char *more, KvType type) {
    char name[120];
    snprintf(name, sizeof name, "%s %s %s KV type %d", preset, quant, more, (int)type);
    const char *path = make_file(preset, quant, more);
    Model *cpu_m = open_for(path, cpu_ops(), plan(type)), *m = open_for(path, cuda_ops(), plan(type));
    const int vocab = m->config.vocab;
    int32_t ids[N_TEXT];
    random_text(ids, N_TEXT, vocab);

    const int n_short = few ? 24 : 96, n_prompt = few ? STEP_ROWS : 400, n_before = few ? 20 : 100;
    const bool exact = !is_quantised(m->weights.layer[0].attn_q.type);
    float *want = logits_of(cpu_m, ids, n_short, STEP_ROWS), *base = logits_of(m, ids, n_short, STEP_ROWS);
    double scale;
    const double off = mean_kl(want, base, n_short, vocab),
        far = largest_difference(want, base, (size_t)n_short * (size_t)vocab, &scale);
    cpu_m->config.eps *= 1.1f;                         // changes a norm by 1e-7
    float *moved_a_bit = logits_of(cpu_m, ids, n_short, STEP_ROWS);
    cpu_m->config.eps /= 1.1f;
    const double own = mean_kl(want, moved_a_bit, n_short, vocab);
    printf("# %s: chunks of 64: %.2g of max |logit|, mean KL %.2g; the CPU's own %.2g\n", name, far / scale, off, own);
    if (exact)
        CHECK(far <= 1e-3 * scale, "%s: got a difference of %.3g of max |logit|, want at most 1e-3", name, far / scale);
    else CHECK(off <= 10 * own + 1e-6, "%s: got a mean KL of %.3g, want at most ten times %.3g", name, off, own);
    free(moved_a_bit);
    static const int chunks[] = { 1, 7 };
    for (int k = 0; k < 2; k++) {
        const int n = !few ? n_short : chunks[k] == 1 ? 3 : 10;
        float *got = logits_of(m, ids, n, chunks[k]);
        CHECK(!memcmp(got, base, (size_t)n * (size_t)vocab * sizeof *got),
              "%s: chunks of %d: other bits than in chunks of 64", name, chunks[k]);
        free(got);
    }
    free(want);
    free(base);

    // Twice around the ring, and the kernels for prompts.
    want = logits_of(cpu_m, ids, n_prompt, n_prompt);
    float *got = logits_of(m, ids, n_prompt, n_prompt);
    const double mean = mean_kl(want, got, n_prompt, vocab);
    const double most = exact ? 1e-3 : 0.15;
    CHECK(mean <= most, "%s: prompt of %d rows: got a mean KL of %.3g, want at most %g", name, n_prompt, mean, most);
    printf("# %s: chunk of %d: mean KL %.2g\n", name, n_prompt, mean);
    free(want);
    free(got);

    // A tree of drafts: half a path is committed. The reference is a session that got only that half path.
    StepRow tree[40];
    for (int i = 0; i < 40; i++)
        tree[i] = (StepRow){ .token = ids[100 + i], .parent = i < 3 ? i - 1 : i - 3, .output = true };
    int32_t path_rows[STEP_ROWS] = { 0, 1, 4, 7, 10 }, n_accept = 5;
    logits_of(m, ids, n_before, 50);
    step(m, &(StepSeg){ .seq = 0, .kind = SEG_TREE, .n = 40, .rows = tree }, 1);
    commit(m, &n_accept, path_rows);
    for (int i = 0; i < 10; i++) m->step_rows[i] = (StepRow){ .token = ids[200 + i], .output = true };
    step(m, &(StepSeg){ .seq = 0, .kind = SEG_CHAIN, .n = 10, .rows = m->step_rows }, 1);
    got = alloc_or_die((size_t)10 * vocab, sizeof *got);
    for (int i = 0; i < 10; i++) read_logits(m, i, got + (size_t)i * (size_t)vocab);
    int32_t plain[N_TEXT];
    memcpy(plain, ids, n_before * sizeof *ids);
    for (int k = 0; k < 5; k++) plain[n_before + k] = tree[path_rows[k]].token;
    memcpy(plain + n_before + 5, ids + 200, 10 * sizeof *ids);
    want = logits_of(m, plain, n_before + 15, 50);
    const double moved = largest_difference(want + (size_t)(n_before + 5) * (size_t)vocab, got,
                                            (size_t)10 * (size_t)vocab, &scale);
    if (exact)
        CHECK(moved <= 1e-3 * scale, "%s: after a tree: got a difference of %.3g of max |logit|, want at most 1e-3",
              name, moved / scale);
    const double tree_kl = mean_kl(want + (size_t)(n_before + 5) * (size_t)vocab, got, 10, vocab);
    CHECK(tree_kl <= 10 * own + 1e-6, "%s: after a tree: got a mean KL of %.3g, the CPU's own is %.3g", name, tree_kl,
          own);
    free(want);
    free(got);
    close_for(cpu_m);
    close_for(m);
    unlink(path);
}

// Generates n tokens; top2[i]: the difference of the two best logits.
static void choose(Model *m, const int32_t *prompt, int n_prompt, const SampleParams *p, int n, int32_t *out,
                   float *top2) {
    const int vocab = m->config.vocab;
    float *logits = alloc_or_die((size_t)vocab, sizeof *logits);
    reset_session(m, 0);
    m->ops->copy(&(Copy){ m->s.params, p, sizeof *p, COPY_IN });
    run_prompt(m, 0, prompt, n_prompt);
    for (int i = 0; i < n; i++) {
        const Batch b = { .rows = m->s.out_rows, .segs = m->s.segs, .len = m->s.len, .n_rows = 1, .n_segs = 1 };
        if (m->ops->begin((StepKey){ .kind = STEP_SAMPLE, .rows = 1, .logits = 1 }))
            m->ops->sample(&(Sample){ .batch = &b, .vocab = vocab, .logits = m->s.logits, .params = m->s.params,
                                      .mask = m->s.mask, .out = m->s.chosen });
        m->ops->end();
        commit_all(m);
        m->ops->copy(&(Copy){ &out[i], m->s.chosen, sizeof out[i], COPY_OUT });
        read_logits(m, 0, logits);
        float best = -INFINITY, second = -INFINITY;
        for (int k = 0; k < vocab; k++) {
            if (logits[k] > best) second = best, best = logits[k];
            else if (logits[k] > second) second = logits[k];
        }
        top2[i] = best - second;
        step(m, &(StepSeg){ .seq = 0, .kind = SEG_CHAIN, .n = 1,
                            .rows = &(StepRow){ .token = out[i], .output = true } }, 1);
    }
    free(logits);
}

static void test_choices(void) {
    static int32_t want[N_CHOICES], got[N_CHOICES];
    static float top2[N_CHOICES];
    ModelOptions o = plan(KV_F16);
    Model *cpu_m = open_for(MINI, cpu_ops(), o), *m = open_for(MINI, cuda_ops(), o);
    const int32_t prompt[] = { 2, 1000, 1001, 1002, 700, 701 };
    const SampleParams p = { .top_p = 1, .repeat = 1 };
    choose(cpu_m, prompt, 6, &p, N_CHOICES, want, top2);
    choose(m, prompt, 6, &p, N_CHOICES, got, top2);
    int i = 0;
    while (i < N_CHOICES && got[i] == want[i]) i++;
    CHECK(i == N_CHOICES || top2[i] < 0.02f, "choices: token %d: got %d, want %d, top two %.4g apart", i, (int)got[i],
          (int)want[i], (double)top2[i]);
    printf("# choices: %d of %d tokens equal\n", i, N_CHOICES);
    float *a = logits_of(cpu_m, want, 256, STEP_ROWS), *b = logits_of(m, want, 256, STEP_ROWS);
    const double off = mean_kl(a, b, 256, m->config.vocab);
    CHECK(off <= 1e-3, "mini: got a mean KL of %.3g, want at most 1e-3", off);
    printf("# mini: mean KL %.2g over 256 positions of its own text\n", off);
    free(a);
    free(b);
    close_for(cpu_m);
    close_for(m);
}

// A trained model: a prompt longer than a decode step, which uses the kernels for prompts, then single rows.
static void test_mini(const char *path) {
    enum { PROMPT = 96, ALL = PROMPT + 4 };
    Model *cpu_m = open_for(path, cpu_ops(), plan(KV_F16)), *m = open_for(path, cuda_ops(), plan(KV_F16));
    int32_t ids[ALL], first[] = { 2, 1000, 1001, 1002, 700, 701 };
    float top2[ALL];
    const SampleParams p = { .top_p = 1, .repeat = 1 };
    memcpy(ids, first, sizeof first);
    choose(cpu_m, first, 6, &p, ALL - 6, ids + 6, top2);
    float *want = logits_of(cpu_m, ids, ALL, PROMPT), *got = logits_of(m, ids, PROMPT, PROMPT);
    const size_t vocab = (size_t)m->config.vocab;
    got = realloc(got, ALL * vocab * sizeof *got);
    for (int i = PROMPT; i < ALL; i++) {
        step(m, &(StepSeg){ .seq = 0, .kind = SEG_CHAIN, .n = 1,
                            .rows = &(StepRow){ .token = ids[i], .output = true } }, 1);
        read_logits(m, 0, got + (size_t)i * vocab);
        commit_all(m);
    }
    const double off = mean_kl(want, got, ALL, (int)vocab);
    CHECK(off <= 1e-3, "%s: got a mean KL of %.3g, want at most 1e-3", path, off);
    printf("# %s: mean KL %.2g over %d positions\n", path, off, ALL);
    free(want);
    free(got);
    close_for(cpu_m);
    close_for(m);
}

static void test_memory(void) {
    const char *path = make_file("tiny-moe", "q4_k_m", "");
    size_t before = 0, after = 0, total = 0;
    close_for(open_for(path, cuda_ops(), plan(KV_F16)));           // so that the driver's first allocations are done
    cuda_ops()->memory(&before, &total);
    ModelOptions o = plan(KV_F16);
    o.n_ctx = 200000;
    Model *m = open_for(path, cuda_ops(), o);
    cuda_ops()->memory(&after, &total);
    const double planned = (double)(m->plan.weights + m->plan.kv_global + m->plan.kv_rings + m->plan.staging +
                                    m->plan.activations);
    const double taken = (double)before - (double)after, slack = 0.01 * planned + (4 << 20);
    const bool shared = cuda_ops()->card()->host_memory;               // shared with other programs
    CHECK(shared || fabs(taken - planned) <= slack, "memory: got %.0f bytes taken, want the planned %.0f within 1 %%",
          taken, planned);
    close_for(m);
    unlink(path);
}

// only: names of the tests to run, NULL after the last; none: all.
static bool wanted(char **only, const char *name) {
    for (char **o = only; *o; o++)
        if (strncmp(*o, name, strlen(*o)) == 0) return true;
    return !*only;
}
#endif

int main(int argc, char **argv) {
    take_card(&argc, argv);
    (void)argc, (void)argv;
#ifdef USE_CUDA
    if (!cuda_ops()) {
        SKIP("no GPU: whole models on the CUDA backend");
        return test_done("cuda");
    }
    const char *tmp = getenv("TMPDIR");
    snprintf(dir, sizeof dir, "%.150s/test_cuda.XXXXXX", tmp ? tmp : "/tmp");
    if (!mkdtemp(dir)) die("%s: %s", dir, strerror(errno));
    few = argc > 1 && strcmp(argv[1], "-few") == 0;
    char **only = argv + (few ? 2 : 1);
    if (*only && !strcmp(*only, "-host")) place = ".=CPU", only++;
    static const struct { const char *preset, *quant, *more; KvType type; } models[] = {
        { "micro-dense", "f32", "", KV_F32 }, { "micro-dense", "f16", "", KV_F16 }, { "micro-moe", "f32", "", KV_F32 },
        { "micro-moe", "q8_0", "--split-experts", KV_F16 }, { "micro-e", "f32", "", KV_F32 },
        { "micro-e", "q8_0", "", KV_BF16 },
        { "tiny-dense", "q4_k_m", "", KV_F16 }, { "tiny-moe", "q4_k_m", "", KV_F16 },
        { "tiny-e", "q4_k_m", "", KV_F16 },
        { "tiny-moe", "q4_0", "", KV_F16 }
    };
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        char name[100];
        snprintf(name, sizeof name, "%s-%s", models[i].preset, models[i].quant);
        if (wanted(only, name)) test_logits(models[i].preset, models[i].quant, models[i].more, models[i].type);
    }
    if (wanted(only, "mini")) {
        test_mini(MINI);
        test_mini("models/gemma4-mini-e-q8_0.gguf");
    }
    if (wanted(only, "choices")) test_choices();
    if (wanted(only, "memory")) test_memory();
    rmdir(dir);
#else
    SKIP("built without CUDA: whole models on the CUDA backend");
#endif
    return test_done("cuda");
}
