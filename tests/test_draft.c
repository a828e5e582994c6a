/* test_draft.c - drafters: their drafts against reference results and against themselves, and files that are refused.
 *
 *   test_draft            on the CPU, and on the GPU where there is one
 *   test_draft -few       on the GPU, one pair and few cases: for the emulator; -few -long: also several sessions in a
 *                         draft
 *
 * The reference chains are in tests/golden (see the README there); make_gguf makes their models. All logits of a chain
 * are compared: the drafter is asked for as many candidates as there are tokens. Run from the top of the repository,
 * where the trained models are. Environment: BUILD (build: where make put make_gguf and make_hf), TMPDIR (/tmp). */
#define _GNU_SOURCE
#define TESTING
#include "../gemma4.c"
#include "pairs.h"
#include "card.h"
#include "steps.h"

// reference chains: committed tokens; drafts, one more than in the reference
enum { L = 100, DEPTH = 5, VOCAB = 512, DIM = 64 };
#define MINI "models/gemma4-mini-q8_0.gguf"
#define MINI_MTP "models/gemma4-mini-mtp-q8_0.gguf"

static const char *const families[] = { "micro-dense", "micro-moe", "micro-e" };

static ModelOptions plan(const char *drafter, KvType type, int n_seqs, int width) {
    return (ModelOptions){ .n_ctx = 512, .n_seqs = n_seqs, .n_batch = 256, .n_logits = n_seqs, .k_type = type,
                           .v_type = type,
                          .ring_type = type, .drafter = drafter, .draft_width = width, .draft_depth = DEPTH };
}

static void *golden(const char *family, const char *what, size_t bytes) {
    char path[256];
    size_t n;
    snprintf(path, sizeof path, "tests/golden/%s%s", family, what);
    void *data = read_file(path, &n, "test");
    CHECK(n >= bytes, "%s: expected %zu bytes, got %zu", path, bytes, n);
    return data;
}

static const char *mtp_of(const char *family) {
    char name[64];
    snprintf(name, sizeof name, "%s-mtp", family);
    return make_model(name, family, "f32", "--kind", "mtp", NULL);
}

// ---- chains
// ------------------------------------------------------------------------------------------------------------

typedef struct {
    int32_t ids[DEPTH];
    float   logits[DEPTH][VOCAB], logsumexp[DEPTH];    // by token
} Chain;

// Writes the last accepted output row of each segment and the token sampled there, as verification does.
static void set_choices(Model *m, const int32_t *last, const int32_t *next, int n) {
    m->ops->copy(&(Copy){ m->s.last, last, (size_t)n * sizeof *last, COPY_IN });
    m->ops->copy(&(Copy){ m->s.next, next, (size_t)n * sizeof *next, COPY_IN });
}

static int best_of(const float *logits, int n) {
    int best = 0;
    for (int i = 1; i < n; i++)
        if (logits[i] > logits[best]) best = i;
    return best;
}

// Runs a prompt in session 0, commits it and returns the greedy token.
static int32_t answer_prompt(Model *m, const int32_t *ids, int n) {
    float *logits = alloc_or_die((size_t)m->config.vocab, sizeof *logits);
    run_prompt(m, 0, ids, n);
    read_logits(m, 0, logits);
    const int32_t next = best_of(logits, m->config.vocab);
    free(logits);
    set_choices(m, &(int32_t){ 0 }, &next, 1);
    commit_all(m);
    return next;
}

// The chain of row `row` of n rows that were drafted with as many candidates as there are tokens.
static Chain read_chain(Model *m, int row, int n, int depth) {
    static int32_t ids[DEPTH * 4 * VOCAB];
    static float logits[DEPTH * 4 * VOCAB], logsumexp[DEPTH * 4];
    const size_t width = (size_t)m->options.draft_width, all = (size_t)(depth * n) * width;
    Chain c = { 0 };
    read_back(m, ids, m->drafter->ids, all * sizeof *ids);
    read_back(m, logits, m->drafter->logits, all * sizeof *logits);
    read_back(m, logsumexp, m->drafter->logsumexp, (size_t)(depth * n) * sizeof *logsumexp);
    for (int k = 0; k < depth; k++) {
        const size_t at = (size_t)(k * n + row) * width;
        c.ids[k] = ids[at];
        c.logsumexp[k] = logsumexp[k * n + row];
        for (size_t i = 0; i < width; i++) {
            const bool falls = i == 0 || logits[at + i] < logits[at + i - 1] ||
                               (logits[at + i] == logits[at + i - 1] && ids[at + i] > ids[at + i - 1]);
            if (!falls || ids[at + i] < 0 || ids[at + i] >= VOCAB)
                CHECK(false, "depth %d: candidate %zu is out of order", k, i);
            else c.logits[k][ids[at + i]] = logits[at + i];
        }
    }
    return c;
}

// after the reference prompt; window 0: the model's
static Chain chain_behind(const char *path, ModelOptions o, int window) {
    int32_t *prompt = golden("", "tokens.i32", L * sizeof *prompt);
    Model *m = open_pair(path, o);
    if (window) m->drafter->window[1] = window;
    answer_prompt(m, prompt, L);
    issue_draft(m, &(int32_t){ 0 }, 1, DEPTH);
    const Chain c = read_chain(m, 0, 1, DEPTH);
    close_model(m);
    free(prompt);
    return c;
}

static double difference(const float *got, const float *want, size_t n) {     // of the largest magnitude
    double worst = 0, most = 0;
    for (size_t i = 0; i < n; i++) {
        const double d = fabs((double)got[i] - (double)want[i]);
        worst = isnan(d) ? INFINITY : fmax(worst, d);
        most = fmax(most, fabs((double)want[i]));
    }
    return worst / most;
}

// The reference's window is one row longer (see the README of the golden data).
static void test_golden(const char *family) {
    const double most = on_gpu ? 1e-3 : 1e-4;
    int32_t *prompt = golden("", "tokens.i32", L * sizeof *prompt),
        *draft = golden(family, "-mtp.draft.i32", DEPTH * sizeof *draft);
    float *h0 = golden(family, "-mtp.h0.f32", DIM * sizeof *h0),
        *hidden = golden(family, "-mtp.hidden.f32", 4 * DIM * sizeof *hidden);
    float *logits = golden(family, "-mtp.logits.f32", 4 * VOCAB * sizeof *logits), got[DIM];
    ModelOptions o = plan(mtp_of(family), KV_F32, 1, VOCAB);
    o.n_batch = STEP_ROWS;                             // larger steps of a GPU round more
    Model *m = open_pair(make_model(family, family, "f32", NULL), o);
    m->drafter->window[1] = m->config.n_swa + 2;
    const int32_t next = answer_prompt(m, prompt, L);
    CHECK(next == draft[0], "%s: the target chose %d, expected %d", family, next, draft[0]);
    read_back(m, got, m->s.hidden, sizeof got);
    double d = difference(got, h0, DIM);
    CHECK(d <= most, "%s: the target's hidden row: difference %.3g", family, d);
    for (int depth = 1; depth <= DEPTH; depth++) {     // each depth ends with the hidden row before its last pass
        issue_draft(m, &(int32_t){ 0 }, 1, depth);
        read_back(m, got, m->drafter->hidden, sizeof got);
        d = depth > 1 ? difference(got, hidden + (depth - 2) * DIM, DIM) : 0;
        CHECK(d <= most, "%s: hidden row %d: difference %.3g, expected at most %g", family, depth - 2, d, most);
    }
    const Chain c = read_chain(m, 0, 1, DEPTH);
    for (int k = 0; k < 4; k++) {
        d = difference(c.logits[k], logits + k * VOCAB, VOCAB);
        CHECK(d <= most, "%s: logits at depth %d: difference %.3g, expected at most %g", family, k, d, most);
        CHECK(c.ids[k] == draft[k + 1], "%s: depth %d: got %d, expected %d", family, k, c.ids[k], draft[k + 1]);
        const double sum = logsumexp(c.logits[k], VOCAB);
        CHECK(fabs(sum - (double)c.logsumexp[k]) < 1e-4, "%s: depth %d: logsumexp %g, expected %g", family, k,
              (double)c.logsumexp[k], sum);
    }
    close_model(m);
    free(prompt);
    free(draft);
    free(h0);
    free(hidden);
    free(logits);
}

// The target's caches in f16 or in another layout: only the small loss of the type is allowed. Types that lose more
// change the target's hidden row too much to compare; test_acceptance() tests those.
static void test_caches(const char *family) {
    const char *path = kept(make_model(family, family, "f32", NULL)), *drafter = kept(mtp_of(family));
    const Chain want = chain_behind(path, plan(drafter, KV_F32, 1, VOCAB), 0);
    for (KvType type = KV_F32; type <= KV_F16; type++)
        for (int untied = 0; untied < 2; untied++) {
            ModelOptions o = plan(drafter, type, 1, VOCAB);
            o.untied = untied;
            const Chain c = chain_behind(path, o, 0);
            const double d = difference(c.logits[0], want.logits[0], VOCAB), most = type == KV_F32 &&
                !on_gpu ? 1e-5 : 5e-3;
            CHECK(d <= most, "%s: cache of %s%s: difference %.3g, expected at most %g", family, kv_names[type],
                  untied ? " untied" : "", d, most);
        }
}

enum { N_COMPANY = 4, WIDTH = 8, DEEP = 3 };           // sessions in a draft; its candidates and depth

// Runs text number `text` in session seq; every text has another length.
static void tell(Model *m, int text, int seq) {
    const int n = 20 + 40 * text;
    for (int i = 0; i < n; i++) m->step_rows[i] = (StepRow){ .token = (text * 991 + i * i * 7 + 3) % m->config.vocab };
    step(m, &(StepSeg){ .seq = seq, .kind = SEG_CHAIN, .n = n, .rows = m->step_rows }, 1);
    commit_all(m);
}

// One step of n sessions, which have the texts first, first + 1, ..: each has two rows and commits one or both.
static void two_rows(Model *m, int first, int n) {
    StepRow rows[2 * N_COMPANY];
    StepSeg segs[N_COMPANY];
    int32_t next[N_COMPANY], last[N_COMPANY], n_accept[N_COMPANY];
    for (int i = 0; i < n; i++) {
        const int text = first + i;
        for (int k = 0; k < 2; k++)
            rows[2 * i + k] = (StepRow){ .token = (text * 31 + 5 + k) % m->config.vocab, .output = true };
        segs[i] = (StepSeg){ .seq = n == 1 ? 0 : (i + 1) % n, .kind = SEG_CHAIN, .n = 2, .rows = &rows[2 * i] };
        n_accept[i] = 1 + text % 2;
        last[i] = 2 * i + text % 2;
        next[i] = (text * 77 + 11) % m->config.vocab;
    }
    step(m, segs, n);
    set_choices(m, last, next, n);
    commit(m, n_accept, NULL);
}

// Sessions that are drafted together get the same drafts as alone, also a subset in any order.
static void test_company(const char *path, const char *drafter) {
    enum { N = N_COMPANY };
    static const int32_t groups[][N] = { { 0, 1, 2, 3 }, { 2, 0, -1 }, { 3, 2, 1, 0 }, { 1, -1 } };
    int32_t alone[N][DEEP * WIDTH], got[DEEP * N * WIDTH], ids[N];
    float alone_logits[N][DEEP * WIDTH], logits[DEEP * N * WIDTH];
    ModelOptions o = plan(drafter, KV_F16, 1, WIDTH);
    o.n_logits = 2 * N;
    Model *m = open_pair(path, o);
    for (int text = 0; text < N; text++) {
        reset_session(m, 0);
        tell(m, text, 0);
        two_rows(m, text, 1);
        issue_draft(m, &(int32_t){ 0 }, 1, DEEP);
        read_back(m, alone[text], m->drafter->ids, sizeof alone[text]);
        read_back(m, alone_logits[text], m->drafter->logits, sizeof alone_logits[text]);
        CHECK(!text || memcmp(alone[text], alone[text - 1], sizeof *alone),
              "texts %d and before draft the same: a weak test", text);
    }
    close_model(m);
    o.n_seqs = N;
    m = open_pair(path, o);
    for (int text = 0; text < N; text++) tell(m, text, (text + 1) % N);
    two_rows(m, 0, N);
    for (size_t g = 0; g < sizeof groups / sizeof *groups; g++) {
        int n = 0;
        while (n < N && groups[g][n] >= 0) {
            ids[n] = groups[g][n];
            n++;
        }
        issue_draft(m, ids, n, DEEP);
        read_back(m, got, m->drafter->ids, (size_t)(DEEP * n * WIDTH) * sizeof *got);
        read_back(m, logits, m->drafter->logits, (size_t)(DEEP * n * WIDTH) * sizeof *logits);
        for (int i = 0; i < n; i++)
            for (int k = 0; k < DEEP; k++)
                CHECK(!memcmp(got + (k * n + i) * WIDTH, alone[ids[i]] + k * WIDTH, WIDTH * sizeof *got) &&
                          !memcmp(logits + (k * n + i) * WIDTH, alone_logits[ids[i]] + k * WIDTH,
                                  WIDTH * sizeof *logits),
                      "%s: group %zu, segment %d, depth %d: not what it drafts alone", path, g, ids[i], k);
    }
    close_model(m);
}

// ---- a backend that keeps weights and counts
// -------------------------------------------------------------------------------

static int n_uploads, n_sent, n_steps;
static StepKey last_key;

static size_t kept_bytes(const Tensor *w) { return matrix_bytes(w); }
static void counted_upload(Tensor *w, void *dst) {
    n_uploads++;
    memcpy(dst, w->data, matrix_bytes(w));
    w->data = dst;
}
static void counted_copy(const Copy *c) {
    n_sent += c->kind == COPY_IN;
    cpu_ops()->copy(c);
}
static bool counted_begin(StepKey key) {
    n_steps++;
    last_key = key;
    return cpu_ops()->begin(key);
}

// The weights of a lazy drafter are uploaded at its first draft, once. A chain is one step, which uploads nothing if
// the last one was for the same sessions. The memory is as planned.
static void test_backend(const char *path, const char *drafter) {
    static Ops ops;
    ops = *cpu_ops();
    ops.weight_bytes = kept_bytes;
    ops.upload = counted_upload;
    ops.copy = counted_copy;
    ops.begin = counted_begin;
    int32_t *prompt = golden("", "tokens.i32", L * sizeof *prompt);
    int32_t want[DEPTH], got[DEPTH];
    for (int lazy = 0; lazy < 2; lazy++) {
        ModelOptions o = plan(drafter, KV_F16, 1, 1);
        n_uploads = 0;
        o.lazy_draft = lazy;
        Model *m = open_on(&ops, path, o);
        const int at_start = m->binder->n_uploads + (lazy ? 0 : m->drafter->binder->n_uploads);
        CHECK(n_uploads == at_start, "lazy %d: %d tensors are uploaded at start, expected %d", lazy, n_uploads,
              at_start);
        CHECK(m->plan.drafter > m->drafter->binder->bytes && m->plan.drafter < m->drafter->binder->bytes + (1 << 20),
              "lazy %d: the plan has %zu bytes for %zu of weights", lazy, m->plan.drafter, m->drafter->binder->bytes);
        answer_prompt(m, prompt, L);
        for (int i = 0; i < 2; i++) {
            n_sent = n_steps = 0;
            issue_draft(m, &(int32_t){ 0 }, 1, DEPTH);
            CHECK(n_steps == 1 && last_key.kind == STEP_DRAFT && last_key.model == m->number + 1 &&
                  last_key.out_rows == DEPTH,
                  "a chain is %d steps, the last of kind %d", n_steps, last_key.kind);
            CHECK(n_uploads == m->binder->n_uploads + m->drafter->binder->n_uploads,
                  "lazy %d: %d uploads after draft %d", lazy, n_uploads, i);
        }
        CHECK(n_sent == 0, "a second draft of the same session uploads %d copies", n_sent);
        read_back(m, lazy ? got : want, m->drafter->ids, sizeof got);
        close_model(m);
    }
    CHECK(!memcmp(got, want, sizeof got), "a lazy drafter drafts something else");
    free(prompt);
}

// ---- files
// -----------------------------------------------------------------------------------------------------------------

#define REFUSED(path, drafter, ...) refused(path, plan(drafter, KV_F16, 1, 1), (const char *const[]){ __VA_ARGS__, NULL })

static void set_text(Draft *d, const char *key, const char *text) {
    Bytes *b = &draft_key(d, key)->value;
    b->n = 0;
    put_u32(b, GGUF_V_STR);
    put_text(b, text);
}

static void rename_text(char *name, size_t room, const char *from, const char *to) {         // if it begins with from
    char rest[128];
    if (strncmp(name, from, strlen(from))) return;
    snprintf(rest, sizeof rest, "%s", name + strlen(from));
    snprintf(name, room, "%s%s", to, rest);
}

// The same file in the older notation.
static const char *write_older(const char *from, const char *to) {
    static const char *const keys[][2] = { { "gemma4-assistant.", "gemma4_assistant." },
        { "gemma4_assistant.embedding_length_out", "gemma4_assistant.n_embd_backbone" },
        { "gemma4_assistant.nextn_predict_layers", "gemma4_assistant.n_centroids" } };
    Draft d = read_draft(from);
    for (size_t i = 0; i < d.n_keys; i++)
        for (size_t k = 0; k < sizeof keys / sizeof *keys; k++)
            rename_text(d.keys[i].name, sizeof d.keys->name, keys[k][0], keys[k][1]);
    for (size_t i = 0; i < d.n_tensors; i++) rename_text(d.tensors[i].name, sizeof d.tensors->name, "nextn.", "mtp.");
    Bytes *arch = &draft_key(&d, "general.architecture")->value;
    arch->n = 0;
    put_u32(arch, GGUF_V_STR);
    put_text(arch, "gemma4_assistant");
    return write_draft(&d, to);
}

static void test_forms(const char *family) {
    const char *path = kept(make_model(family, family, "f32", NULL)), *drafter = kept(mtp_of(family));
    const char *folder = kept(in_tmp("%s-folder", family));
    const char *older = kept(write_older(drafter, in_tmp("%s-older.gguf", family)));
    const Chain want = chain_behind(path, plan(drafter, KV_F32, 1, VOCAB), 0);
    Chain got = chain_behind(path, plan(older, KV_F32, 1, VOCAB), 0);
    CHECK(!memcmp(&got, &want, sizeof got), "%s: the older dialect drafts something else", family);
    char make_hf[1024];
    snprintf(make_hf, sizeof make_hf, "%s/make_hf", getenv("BUILD") ? getenv("BUILD") : "build");
    const char *argv[] = { make_hf, drafter, folder, "--prefix", "model.", NULL };
    CHECK(run_program(argv, in_tmp("stdout"), NULL) == 0, "%s fails", make_hf);
    got = chain_behind(path, plan(folder, KV_F32, 1, VOCAB), 0);
    CHECK(!memcmp(&got, &want, sizeof got), "%s: a folder drafts something else", family);
}

// ---- centroids
// ---------------------------------------------------------------------------------------------------------------

enum { N_CENTROIDS = 16, PER = VOCAB / N_CENTROIDS, N_USED = 4, MTP_DIM = 128 };

static float centroid(int k, int i) { return sinf((float)(k * MTP_DIM + i) * 1.7f); }
static int token_at(int i) { return (i * 197 + 31) % VOCAB; }          // a permutation

// A file with centroids, n of which are used. flag: use_ordered_embeddings; -1: the key is missing.
static const char *write_centroids(const char *from, const char *to, int n_used, int flag, bool wide) {
    Draft d = read_draft(from);
    DraftTensor *t = draft_add(&d, "masked_embd_centroids.weight", MTP_DIM);
    t->n_dims = 2;
    t->ne[1] = N_CENTROIDS;
    for (int k = 0; k < N_CENTROIDS; k++)
        for (int i = 0; i < MTP_DIM; i++) put(&t->data, &(float){ centroid(k, i) }, sizeof(float));
    t = draft_add(&d, "masked_embd_ordering", VOCAB);
    t->type = wide ? GGUF_I64 : GGUF_I32;
    for (int i = 0; i < VOCAB; i++) put(&t->data, &(int64_t){ token_at(i) }, wide ? 8 : 4);
    draft_u16(&d, "gemma4-assistant.centroid_top_k", (unsigned)n_used);
    if (flag >= 0) {
        Bytes *b = &draft_key(&d, "gemma4-assistant.use_ordered_embeddings")->value;
        put_u32(b, GGUF_V_BOOL);
        put(b, &(uint8_t){ (uint8_t)flag }, 1);
    }
    return write_draft(&d, to);
}

// All centroids used: equals the dense head. Some: tokens of the nearest centroids, with the logits of the dense head.
// Flag false: the dense head.
static void test_centroids(const char *family) {
    const char *path = kept(make_model(family, family, "f32", NULL)), *drafter = kept(mtp_of(family)),
        *file = kept(in_tmp("centroids.gguf"));
    const Chain dense = chain_behind(path, plan(drafter, KV_F32, 1, VOCAB), 0);
    Chain c = chain_behind(path, plan(write_centroids(drafter, file, N_USED, 0, false), KV_F32, 1, VOCAB), 0);
    CHECK(!memcmp(&c, &dense, sizeof c), "%s: centroids that a flag turns off are used", family);
    const Ops *ops = on_gpu ? gpu_ops() : cpu_ops();
    if (!ops->head_centroid) {
        REFUSED(path, write_centroids(drafter, file, N_USED, -1, false), "centroids.gguf", "does not support centroid heads");
        SKIP("no backend has a head for centroids");
        return;
    }
    c = chain_behind(path, plan(write_centroids(drafter, file, N_CENTROIDS, 1, true), KV_F32, 1, VOCAB), 0);
    for (int k = 0; k < DEPTH; k++) {
        const double d = difference(c.logits[k], dense.logits[k], VOCAB);
        CHECK(d <= (on_gpu ? 1e-3 : 1e-5) && c.ids[k] == dense.ids[k],
              "%s: all centroids, depth %d: token %d, expected %d; difference %.3g", family, k,
              c.ids[k], dense.ids[k], d);
        CHECK(fabs((double)c.logsumexp[k] - (double)dense.logsumexp[k]) < (on_gpu ? 1e-2 : 1e-4),
              "%s: all centroids, depth %d: logsumexp", family, k);
    }
    int32_t *prompt = golden("", "tokens.i32", L * sizeof *prompt);
    Model *m = open_pair(path, plan(write_centroids(drafter, file, N_USED, -1, false), KV_F32, 1, N_USED * PER));
    answer_prompt(m, prompt, L);
    issue_draft(m, &(int32_t){ 0 }, 1, 1);
    const Drafter *drafts = m->drafter;
    const LayerWeights *w = &drafts->weights.layer[drafts->config.n_layers - 1];
    m->ops->close(&(Close){ .n_rows = 1, .cols = MTP_DIM, .out = drafts->y,
                            .in = { .x = drafts->x[1], .delta = { drafts->mlp }, .w_post = w->post_ffw_norm,
                                    .scale = w->layer_output_scale, .w_pre = drafts->weights.output_norm,
                                    .eps = drafts->config.eps } });
    float y[MTP_DIM];
    double scores[N_CENTROIDS] = { 0 };
    bool near[VOCAB] = { false };
    read_back(m, y, drafts->y, sizeof y);
    for (int k = 0; k < N_CENTROIDS; k++)
        for (int i = 0; i < MTP_DIM; i++) scores[k] += (double)centroid(k, i) * (double)y[i];
    for (int k = 0; k < N_CENTROIDS; k++) {
        int above = 0;
        for (int i = 0; i < N_CENTROIDS; i++) above += scores[i] > scores[k];
        for (int i = 0; i < PER && above < N_USED; i++) near[token_at(k * PER + i)] = true;
    }
    c = read_chain(m, 0, 1, 1);                        // a token without logit has 0
    int wrong = 0;
    for (int i = 0; i < VOCAB; i++)
        wrong += !(fabs((double)c.logits[0][i] - (near[i] ? (double)dense.logits[0][i] : 0)) <= (on_gpu ? 1e-2 : 1e-4));
    CHECK(!wrong, "%s: %d of %d centroids: %d tokens have another logit than expected", family, N_USED, N_CENTROIDS,
          wrong);
    close_model(m);
    free(prompt);
    Draft d = read_draft(write_centroids(drafter, file, N_USED, -1, false));
    memcpy(draft_tensor(&d, "masked_embd_ordering")->data.data, &(int32_t){ token_at(1) }, 4);
    REFUSED(path, write_draft(&d, file), "masked_embd_ordering", "expected every token once");
    REFUSED(path, write_centroids(drafter, file, N_CENTROIDS + 1, -1, false), "centroid_top_k");
    REFUSED(path, write_centroids(drafter, file, 0, -1, false), "centroid_top_k");
    d = read_draft(drafter);
    draft_add(&d, "masked_embd_ordering", VOCAB);
    draft_add(&d, "masked_embd_centroids.weight", MTP_DIM);
    DraftTensor *t = draft_tensor(&d, "masked_embd_centroids.weight");
    t->n_dims = 2;
    t->ne[1] = 3;
    REFUSED(path, write_draft(&d, file), "masked_embd_centroids.weight", "divides the vocabulary of 512");
}

static void test_refused(void) {
    const char *path = kept(make_model("micro-dense", "micro-dense", "f32", NULL)),
        *drafter = kept(mtp_of("micro-dense"));
    const char *broken = kept(in_tmp("broken.gguf"));
    REFUSED(path, MINI_MTP, "micro-dense.gguf", MINI_MTP, "hidden size: expected 64, got 256");
    REFUSED(MINI, drafter, MINI, "micro-dense-mtp.gguf", "hidden size: expected 256, got 64");
    REFUSED(path, "models/none.gguf", "models/none.gguf");
    REFUSED(path, path, "whole models as draft models are not supported");
    static const struct { const char *key; unsigned value; const char *says; } keys[] = {
        { "embedding_length_out", 65, "hidden size: expected 64, got 65" },
        { "attention.sliding_window", 33, "sliding window: expected 32, got 33" },
        { "attention.key_length", 256, "head size of global layers: expected 512, got 256" },
        { "attention.key_length_swa", 128, "head size of sliding layers: expected 256, got 128" },
        { "attention.head_count_kv", 3, "KV heads of " }, { "attention.head_count", 4, "attn_q.weight" },
        { "embedding_length", 64, "expected shape (64, " }, { "block_count", 3, "attention.sliding_window_pattern" },
    };
    char key[128];
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        Draft d = read_draft(drafter);
        snprintf(key, sizeof key, "gemma4-assistant.%s", keys[i].key);
        draft_u16(&d, key, keys[i].value);
        write_draft(&d, broken);
        REFUSED(path, broken, "broken.gguf", keys[i].says);
    }
    Draft d = read_draft(drafter);
    draft_tensor(&d, "token_embd.weight")->ne[1]--;
    REFUSED(path, write_draft(&d, broken), "micro-dense.gguf", "vocabulary: expected 512, got 511");
    d = read_draft(drafter);
    draft_tensor(&d, "nextn.post_projection.weight")->name[0] = 0;
    REFUSED(path, write_draft(&d, broken), "nextn.post_projection.weight", "missing");
    d = read_draft(drafter);
    fill(draft_tensor(&d, "rope_freqs.weight"), 1);
    REFUSED(path, write_draft(&d, broken), "micro-dense.gguf", "RoPE of global layers");
    d = read_draft(drafter);
    draft_tensor(&d, "rope_freqs.weight")->type = GGUF_F16;
    REFUSED(path, write_draft(&d, broken), "rope_freqs.weight", "expected type F32, got F16");
    static const struct { const char *arch, *tensor, *says; } others[] = { { "eagle3", NULL, "EAGLE-3 draft models" },
        { "dflash", "markov_w1.weight", "DSpark draft models" }, { "dflash", "selector_hidden.weight", "DFlash2 draft models" },
        { "llama", NULL, "this is a llama model" } };
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        d = read_draft(drafter);
        set_text(&d, "general.architecture", others[i].arch);
        if (others[i].tensor) draft_add(&d, others[i].tensor, 32);
        REFUSED(path, write_draft(&d, broken), "broken.gguf", "micro-dense.gguf", others[i].says);
    }
}

// ---- trained models
// ----------------------------------------------------------------------------------------------------------

// Greedy text with a chain at every token: counts accepted drafts at each depth. models/acceptance.md has the rates for
// stories, which are nearly 1.
static void test_acceptance(ModelOptions o, int n_ids, int depth) {
    enum { MOST = 160 };
    static const char text[] = "<|turn>user\nTell me a story about a fox.<turn|>\n<|turn>model\n";
    Model *m = open_pair(MINI, o);
    Tokenizer tok;
    TokIds prompt = { 0 };
    int32_t said[MOST + DEPTH] = { 0 }, drafts[MOST][DEPTH];
    load_tokenizer(&tok, &m->gguf, m->config.vocab);
    tok_push_id(&tok, &prompt, tok.bos);
    if (tok_encode(&tok, text, strlen(text), TOK_SPECIAL, &prompt) < 0) die("%s", tok.err);
    int n = 0;
    said[n++] = answer_prompt(m, prompt.ids, (int)prompt.n);
    while (n < n_ids + depth && !tok_is_stop(&tok, said[n - 1])) {
        if (n <= n_ids) {
            issue_draft(m, &(int32_t){ 0 }, 1, depth);
            read_back(m, drafts[n - 1], m->drafter->ids, (size_t)depth * sizeof **drafts);
        }
        said[n] = answer_prompt(m, &said[n - 1], 1);
        n++;
    }
    const int all = n - depth;
    char what[64];
    snprintf(what, sizeof what, "cache of %s%s, tail %d", kv_names[o.k_type], o.untied ? " untied" : "", o.tail);
    CHECK(all >= n_ids / 2, "%s: the story has only %d ids", what, n);
    int right[DEPTH] = { 0 };
    for (int i = 0; i < all; i++)
        for (int k = 0; k < depth && drafts[i][k] == said[i + 1 + k]; k++) right[k]++;
    for (int k = 0; k < depth; k++)
        CHECK(right[k] >= 0.9 * all, "%s: depth %d: %d of %d are right", what, k + 1, right[k], all);
    tok_ids_free(&prompt);
    tok_free(&tok);
    close_model(m);
}

// A query in another basis than the cached rows would not match them.
static void test_types(void) {
    for (KvType type = KV_F32; type <= KV_TQ3; type++)
        for (int untied = 0; untied < 2; untied++)
            for (int tail = 0; tail <= (kv_group(type) ? 32 : 0); tail += 32) {
                ModelOptions o = plan(MINI_MTP, type, 1, 1);
                o.untied = untied;
                o.tail = tail;
                test_acceptance(o, 24, 2);
            }
}

int main(int argc, char **argv) {
    take_card(&argc, argv);
    const bool few = argc > 1 && !strcmp(argv[1], "-few");
    make_tmp();
    start_threads(0);
    on_gpu = few;
    if (few && gpu_ops()) {
        test_golden("micro-dense");
        test_centroids("micro-e");
        if (argc > 2 && !strcmp(argv[2], "-long")) test_company(MINI, MINI_MTP);
        return test_done("draft");
    }
    for (int gpu = 0; gpu < 2; gpu++) {
        on_gpu = gpu;
        if (gpu && !gpu_ops()) {
            SKIP("no GPU: drafters on the CUDA backend");
            break;
        }
        for (int i = 0; i < 3; i++) {
            test_golden(families[i]);
            test_caches(families[i]);
        }
        test_company(MINI, MINI_MTP);
        test_centroids("micro-e");
        test_acceptance(plan(MINI_MTP, KV_F16, 1, 1), 160, DEPTH);
        test_types();
    }
    on_gpu = false;
    test_backend(kept(make_model("micro-e", "micro-e", "f32", NULL)), kept(mtp_of("micro-e")));
    for (int i = 0; i < 3; i++) test_forms(families[i]);
    test_refused();
    return test_done("draft");
}
