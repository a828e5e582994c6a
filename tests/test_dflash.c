/* test_dflash.c - DFlash block drafters: a block against plain double loops, contexts against themselves however they came
 * about, files in all dialects, pairs that are refused, and how often the trained drafter is right.
 *
 *   test_dflash           on the CPU, and on the GPU where there is one
 *   test_dflash -few      on the GPU, one pair and little else: for the emulated one
 *
 * Run from the top of the repository: the trained models lie there. Environment: BUILD (build: where make put make_gguf),
 * TMPDIR (/tmp). */
#define _GNU_SOURCE
#define TESTING
#include "../gemma4.c"
#include "steps.h"
#include "test.h"
#include "files.h"

enum { WIDTH = 4, DEPTH = 7, MOST_TOKENS = 1024 };
#define MINI "models/gemma4-mini-q8_0.gguf"
#define MINI_DFLASH "models/gemma4-mini-dflash-q8_0.gguf"

static bool on_gpu;

static const Ops *gpu_ops(void) {                      // NULL: none
#ifdef USE_CUDA
    return cuda_ops();
#else
    return NULL;
#endif
}

static PlanOptions plan(const char *drafter, int n_seqs) {
    return (PlanOptions){ .n_ctx = 1024, .n_seqs = n_seqs, .n_batch = 512, .n_logits = STEP_ROWS, .k_type = KV_F16,
                          .v_type = KV_F16, .drafter = drafter, .draft_width = WIDTH, .draft_depth = DEPTH };
}

static Model *open_pair(const char *path, PlanOptions o) {
    Model *m = alloc_or_die(1, sizeof *m);
    load_model(m, path, on_gpu ? gpu_ops() : cpu_ops(), o, NULL);
    return m;
}

static void close_model(Model *m) {
    free_model(m);
    free(m);
}

static const char *kept(const char *path) {            // a copy of a path: those of in_tmp() do not last
    static char paths[32][1024];
    static int n;
    snprintf(paths[n %= 32], sizeof *paths, "%s", path);
    return paths[n++];
}

static void read_back(Model *m, void *host, const void *data, size_t bytes) {
    m->ops->copy(&(Copy){ host, data, bytes, COPY_OUT });
    m->ops->wait();
}

// What a step that chooses leaves for a draft: the token of each segment.
static void set_next(Model *m, const int32_t *next, int n) {
    m->ops->copy(&(Copy){ m->s.next, next, (size_t)n * sizeof *next, COPY_IN });
}

static int best_of(const float *logits, int n) {
    int best = 0;
    for (int i = 1; i < n; i++)
        if (logits[i] > logits[best]) best = i;
    return best;
}

static int32_t best_token(Model *m) {                  // of row 0 of the logits
    float *logits = alloc_or_die((size_t)m->config.vocab, sizeof *logits);
    read_logits(m, 0, logits);
    const int32_t best = best_of(logits, m->config.vocab);
    free(logits);
    return best;
}

typedef struct {
    int32_t ids[DEPTH * WIDTH];
    float   logits[DEPTH * WIDTH], logsumexp[DEPTH];
} Block;

// What is drafted for segment `seg` of the last step, alone, behind token `next`.
static Block draft_alone(Model *m, int seg, int32_t next) {
    Block b;
    m->ops->copy(&(Copy){ m->s.next + seg, &next, sizeof next, COPY_IN });
    issue_draft(m, &seg, 1, DEPTH);
    read_back(m, b.ids, m->drafter.ids, sizeof b.ids);
    read_back(m, b.logits, m->drafter.logits, sizeof b.logits);
    read_back(m, b.logsumexp, m->drafter.logsumexp, sizeof b.logsumexp);
    return b;
}

// ---- trained models --------------------------------------------------------------------------------------------------------

// Greedy text, and at every token a block: how many are right at each depth, those before them too. least: what models/
// acceptance.md says of this kind of text, less what few prompts may differ.
static void test_acceptance(const char *question, int n_ids, int depth, const double *least) {
    enum { MOST = 256, ALL = 15 };
    char text[512];
    PlanOptions o = plan(MINI_DFLASH, 1);
    o.draft_depth = depth;
    o.draft_width = 1;
    Model *m = open_pair(MINI, o);
    Tokenizer tok;
    TokIds prompt = { 0 };
    int32_t said[MOST + 1] = { 0 }, drafts[MOST][ALL];
    int right[ALL] = { 0 }, tried[ALL] = { 0 }, n = 0;
    load_tokenizer(&tok, &m->gguf, m->config.vocab);
    tok__push(&tok, &prompt, tok.bos);
    snprintf(text, sizeof text, "<|turn>user\n%s<turn|>\n<|turn>model\n", question);
    if (tok_encode(&tok, text, strlen(text), TOK_SPECIAL, &prompt) < 0) die("%s", tok.err);
    run_prompt(m, 0, prompt.ids, (int)prompt.n);
    said[n++] = best_token(m);
    commit_all(m);
    while (n < n_ids && !tok_is_stop(&tok, said[n - 1])) {
        set_next(m, &said[n - 1], 1);
        issue_draft(m, &(int32_t){ 0 }, 1, depth);
        read_back(m, drafts[n - 1], m->drafter.ids, (size_t)depth * sizeof **drafts);
        run_prompt(m, 0, &said[n - 1], 1);
        said[n++] = best_token(m);
        commit_all(m);
    }
    for (int i = 0; i + 1 < n; i++)
        for (int k = 0, good = 1; k < depth && i + 1 + k < n; k++) {
            good = good && drafts[i][k] == said[i + 1 + k];
            tried[k]++, right[k] += good;
        }
    for (int k = 0; k < depth; k++)
        CHECK(tried[k] && right[k] >= least[k] * tried[k], "%s: depth %d: %d of %d are right, expected %.2f", question, k + 1, right[k],
              tried[k], least[k]);
    if (getenv("SHOW")) for (int k = 0; k < depth; k++) printf("%s %d: %d of %d\n", question, k + 1, right[k], tried[k]);
    tok_ids_free(&prompt);
    tok_free(&tok);
    close_model(m);
}

int main(int argc, char **argv) {
    const bool few = argc > 1 && !strcmp(argv[1], "-few");
    make_tmp();
    start_threads(0);
    on_gpu = few;
    static const double story[15] = { .9, .9, .9, .9, .9, .9, .9, .9, .8, .8, .8, .8, .8, .8, .8 }, some[15] = { .6, .4 };
    test_acceptance("Tell me a story about a fox.", 200, 15, story);
    test_acceptance("Tell me a story about a robot.", 200, 8, story);
    test_acceptance("What is the capital of France?", 60, 2, some);
    (void)kept;
    (void)draft_alone;
    return test_done("dflash");
}
