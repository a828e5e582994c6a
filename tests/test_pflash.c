/* test_pflash.c - sparse and compressed prompts on the trained models.
 *
 *   bits       alpha 1: logits and caches of a dense prompt, bit for bit. Below 1: the same in chunks of any multiple
 *              of SELECT_ROWS rows, and together with another prompt in the same step
 *   density    falls with alpha; a given density is kept, unless the blocks that are always selected exceed it
 *   codes      both models find codes in a text
 *   compress   the compressed prompt has the required tokens, in order and in whole words, as many as the ratio says;
 *              the session is unchanged; in a chat earlier messages stay as they were compressed; of a scorer only the
 *              layers that score are loaded
 *
 * LONG=1: everything; else "bits" of one model, and compression. All rows of a prompt get logits here, so that they go
 * through all layers: otherwise no layer of the small E model is sparse. If there is a GPU, everything is tested there
 * too, except different numbers of rows, which change its products. Run from the top of the repository, where the
 * models are. */
#define TESTING
#include "../gemma4.c"
#include "card.h"
#include "test.h"

static const char *const models[] = { "models/gemma4-mini-q8_0.gguf", "models/gemma4-mini-e-q8_0.gguf" };
enum { N_TEXT = 1152 };

static const Ops *op;
static bool long_run;

static Model *open_model(const char *path, ModelOptions o) {
    Model *m = alloc_or_die(1, sizeof *m);
    if (!o.n_batch) o.n_batch = 512;
    o.n_ctx = N_TEXT + 64;
    o.n_seqs = 2;
    o.n_logits = o.n_batch;
    if (!o.k_type) o.k_type = o.v_type = KV_F16;
    load_model(m, path, op, o, NULL);
    return m;
}

static void close_model(Model *m) {
    free_model(m);
    free(m);
}

// Different sentences, one of which the question at the end asks for: about n ids and those of the question. Returns
// their number.
static int make_text(Model *m, int n, int at, int32_t *ids) {
    static const char *const who[] = { "The fox", "A small bear", "The old baker", "Lucy", "The king", "A grey owl",
                                       "Tom" };
    static const char *const does[] = { "walked to", "looked at", "slept beside", "sang about", "ran around",
                                        "painted" };
    static const char *const what[] = { "the blue lake.", "a tall tree.", "the red house.", "the bridge.",
                                        "an empty boat." };
    Tokenizer tok;
    TokIds v = { 0 };
    char text[160];
    uint32_t r = 9;
    bool planted = false;
    load_tokenizer(&tok, &m->gguf, m->config.vocab);
    tok_encode(&tok, "<bos><|turn>user\n", 17, TOK_SPECIAL, &v);
    while ((int)v.n < n) {
        r = r * 1664525u + 1013904223u;
        snprintf(text, sizeof text, " %s %s %s", who[(r >> 8) % 7], does[(r >> 12) % 6], what[(r >> 16) % 5]);
        if (!planted && (int)v.n >= at) snprintf(text, sizeof text, " The secret code of Bagelu is 48213.");
        planted = planted || (int)v.n >= at;
        tok_encode(&tok, text, strlen(text), TOK_SPECIAL, &v);
    }
    snprintf(text, sizeof text,
             "\n\nWhat is the secret code of Bagelu?<turn|>\n<|turn>model\n%sThe secret code of Bagelu is",
             tok.large_variant ? "<|channel>thought\n<channel|>" : "");
    tok_encode(&tok, text, strlen(text), TOK_SPECIAL, &v);
    memcpy(ids, v.ids, v.n * sizeof *ids);
    const int n_ids = (int)v.n;
    tok_ids_free(&v);
    tok_free(&tok);
    return n_ids;
}

// Runs a prompt through session seq, all of it committed; the last row's logits. Returns a hash of those of all rows.
static uint64_t run_all(Model *m, int seq, const int32_t *ids, int n, float *logits) {
    uint64_t h = 0;
    reset_session(m, seq);
    for (int at = 0, rows; at < n; at += rows) {
        rows = min_int(m->options.n_batch, n - at);
        for (int i = 0; i < rows; i++) m->step_rows[i] = (StepRow){ .token = ids[at + i], .output = true };
        step(m, &(StepSeg){ .seq = seq, .n = rows, .rows = m->step_rows, .more = n - at - rows }, 1);
        for (int i = 0; i < rows; i++) {
            read_logits(m, i, logits);
            h = h * 31 + hash_bytes(logits, (size_t)m->config.vocab * sizeof *logits);
        }
        commit_all(m);
    }
    return h;
}

// The same, including the session's caches.
static uint64_t run_hashed(Model *m, int seq, const int32_t *ids, int n, float *logits) {
    uint64_t h = run_all(m, seq, ids, n, logits);
    for (int i = 0; i < m->n_caches; i++) {
        CachePart parts[CACHE_PARTS];
        const Cache *c = &m->caches[i];
        const int n_parts = cache_parts(c, seq, parts);
        for (int k = 0; k < n_parts; k++) {
            const size_t row = parts[k].bytes / ((size_t)c->n_kv_heads * (size_t)c->slots);
            uint8_t *rows = alloc_or_die(parts[k].bytes, 1);
            op->copy(&(Copy){ rows, parts[k].data, parts[k].bytes, COPY_OUT });
            op->wait();
            for (int g = 0; g < c->n_kv_heads; g++)
                h = h * 31 + hash_bytes(rows + (size_t)g * (size_t)c->slots * row, (size_t)min_int(n, c->slots) * row);
            free(rows);
        }
    }
    return h;
}

static void test_bits(const char *path) {
    static const ModelOptions plans[] = {
        { .n_batch = 192 }, { .pflash = 1, .n_batch = 192 }, { .pflash_density = 0.3f, .n_batch = 192 },
        { .pflash_density = 0.3f, .n_batch = 1280 } };
    enum { N_PLANS = sizeof plans / sizeof *plans };
    int32_t ids[N_TEXT + 64];
    uint64_t hash[N_PLANS];
    int n = 0;
    for (int k = 0; k < (op->on_host && long_run ? N_PLANS : 3); k++) {
        Model *m = open_model(path, plans[k]);
        float *logits = alloc_or_die((size_t)m->config.vocab, sizeof *logits);
        if (!n) n = make_text(m, N_TEXT, 400, ids);
        hash[k] = run_hashed(m, k % 2, ids, n, logits);
        free(logits);
        const int like = k < 2 ? 0 : 2;
        CHECK(hash[k] == hash[like], "%s: logits and caches of plan %d: expected those of plan %d", path, k, like);
        close_model(m);
    }
    CHECK(hash[2] != hash[0], "%s: a density of 0.3: expected other logits than those of a dense prompt", path);
}

// Two prompts in one step, both sparse: each the same as alone, if blocks of rows are not shared.
static void test_together(const char *path) {
    Model *m = open_model(path, (ModelOptions){ .pflash_density = 0.3f, .n_batch = 2304 });
    int32_t ids[N_TEXT + 64];
    const int n = make_text(m, 1090, 200, ids) / SELECT_ROWS * SELECT_ROWS;
    const size_t vocab = (size_t)m->config.vocab;
    float *alone = alloc_or_die(vocab, sizeof *alone), *together = alloc_or_die(vocab, sizeof *together);
    run_hashed(m, 0, ids, n, alone);
    for (int seq = 0; seq < 2; seq++) reset_session(m, seq);
    for (int i = 0; i < 2 * n; i++) m->step_rows[i] = (StepRow){ .token = ids[i % n], .output = true };
    const StepSeg segs[] = { { .seq = 1, .n = n, .rows = m->step_rows }, { .seq = 0, .n = n, .rows = m->step_rows + n } };
    step(m, segs, 2);
    for (int row = 0; row < 2; row++) {
        read_logits(m, (row + 1) * n - 1, together);
        CHECK(!memcmp(alone, together, vocab * sizeof *alone),
              "%s: prompt %d of two in a step: expected the logits it has alone", path,
              row);
    }
    free(alone);
    free(together);
    close_model(m);
}

static void test_density(const char *path) {
    static const float alphas[] = { 0.5f, 0.99f, 1 };
    int32_t ids[N_TEXT + 64];
    double before = 1;
    for (int k = 0; k < 4; k++) {
        ModelOptions o = { .pflash = k < 3 ? alphas[k] : 0, .pflash_density = k < 3 ? 0 : 0.8f };
        Model *m = open_model(path, o);
        float *logits = alloc_or_die((size_t)m->config.vocab, sizeof *logits);
        const int n = make_text(m, N_TEXT, 400, ids);
        run_all(m, 0, ids, n, logits);
        free(logits);
        const double density = read_density(m);
        int in_sight = 0, most = 0;                    // of blocks of rows, by the definition
        for (int first = 0; first < n; first += SELECT_ROWS) {
            const int last = min_int(first + SELECT_ROWS, n) - 1, blocks = last / SELECT_KEYS + 1;
            const int always = min_int(blocks, blocks - max_int(first / SELECT_KEYS - SELECT_NEAR + 1,
                                                                0) + SELECT_FIRST);
            const bool dense = last >= n - DENSE_ROWS;
            in_sight += blocks;
            most += dense ? blocks : max_int(always, (int)ceilf(o.pflash_density * (float)blocks));
        }
        if (k == 2) CHECK(density == 1, "%s: alpha 1: expected a density of 1, got %g", path, density);
        else if (k < 2)
            CHECK(density > 0 && density <= before, "%s: alpha %g: expected a density of at most %g, got %g", path,
                              (double)alphas[k], before, density);
        else
            CHECK(fabs(density - (double)most / in_sight) < 1e-9, "%s: forced %g: expected %d of %d blocks, got %g",
                  path, (double)o.pflash_density, most, in_sight, density);
        CHECK(read_density(m) == 0, "%s: expected nothing to be counted twice", path);
        if (k < 2) before = density;
        close_model(m);
    }
    CHECK(before < 1, "%s: alpha 0.99: expected a density below 1, got %g", path, before);
}

static void test_codes(const char *path, KvType type) {
    int32_t ids[N_TEXT + 64];
    Model *m = open_model(path, (ModelOptions){ .pflash_density = 0.1f, .k_type = type, .v_type = type });
    Tokenizer tok;
    TokIds want = { 0 };
    float *logits = alloc_or_die((size_t)m->config.vocab, sizeof *logits);
    load_tokenizer(&tok, &m->gguf, m->config.vocab);
    tok_encode(&tok, " 48213.", 7, TOK_SPECIAL, &want);
    const int n = make_text(m, N_TEXT - 16, 500, ids);
    run_all(m, 0, ids, n, logits);
    for (size_t i = 0; i < want.n; i++) {
        int best = 0;
        for (int id = 1; id < m->config.vocab; id++) if (logits[id] > logits[best]) best = id;
        CHECK(best == want.ids[i], "%s: -ctk %s: id %zu of the code: expected %d, got %d", path, kv_names[type], i,
              want.ids[i], best);
        step(m, &(StepSeg){ .seq = 0, .n = 1, .rows = &(StepRow){ .token = want.ids[i], .output = true } }, 1);
        read_logits(m, 0, logits);
        commit_all(m);
    }
    const double density = read_density(m);
    CHECK(density > 0 && density < 1, "%s: -ctk %s: expected a sparse prompt, got a density of %g", path,
          kv_names[type], density);
    free(logits);
    tok_ids_free(&want);
    tok_free(&tok);
    close_model(m);
}

// Scores become means of their 13 neighbours, fewer at the ends; 1/10 of 50 chunks, the last one short, are the first
// one, the last two, and the two with the best means.
static void test_chunks(void) {
    enum { N = 49 * 32 + 20 };
    static float score[N], smoothed[N];
    static bool keep[N];
    for (int i = 0; i < N; i++) smoothed[i] = score[i] = (float)(i * 7919 % 101) / 100;
    smooth(smoothed, N);
    for (int i = 0; i < N; i++) {
        double sum = 0;
        int n = 0;
        for (int j = i - 6; j <= i + 6; j++) if (j >= 0 && j < N) sum += (double)score[j], n++;
        if (fabs(sum / n - (double)smoothed[i]) > 1e-5)
            CHECK(0, "score %d of %d: the mean of its neighbours is %.6f, got %.6f", i, N, sum / n, (double)smoothed[i]);
    }
    for (int i = 0; i < N; i++) score[i] = i / 32 == 20 ? 0.5f : i / 32 == 30 ? 0.4f : i / 32 == 31 ? 0.39f : 0.1f;
    score[33 * 32] = 9;                                // one high score in a chunk of low ones: a mean of 0.378
    keep_chunks(score, N, 0.1f, keep);
    for (int i = 0; i < N; i++) {
        const int chunk = i / 32;
        const bool want = chunk == 0 || chunk == 20 || chunk == 30 || chunk >= 48;
        if (keep[i] != want) CHECK(0, "chunk %d, token %d: expected %d, got %d", chunk, i, want, keep[i]);
    }
    CHECK(keep[0] && keep[N - 1], "the first and the last token: expected both");
}

// Compresses a long message between <bos> and the end, with a scorer or the model itself, whose session already has
// tokens.
static void test_compress(const char *path, const char *scorer, float ratio) {
    static const char *const held = "<bos><|turn>user\nHello.<turn|>\n";
    Model *m = alloc_or_die(1, sizeof *m);
    Tokenizer tok;
    Session s;
    TokIds ids = { 0 }, out = { 0 }, again = { 0 };
    int32_t text[N_TEXT + 64];
    load_model(m, path, op, (ModelOptions){ .n_seqs = 1, .n_batch = 256, .n_ctx = N_TEXT + 192, .k_type = KV_F16,
                                            .v_type = KV_F16, .can_score = !scorer }, NULL);
    load_tokenizer(&tok, &m->gguf, m->config.vocab);
    init_session(&s, m, &tok, 0);
    Compressor c = { .ratio = ratio, .file = scorer };
    tok_encode(&tok, held, strlen(held), TOK_SPECIAL, &ids);
    const int first = (int)ids.n, n_text = make_text(m, N_TEXT, 400, text);
    run_chunk(m, 0, ids.ids, first);
    commit_all(m);
    for (int i = 0; i < first; i++) push_id(s.t, &s.held, ids.ids[i]);
    for (int i = 1; i < n_text; i++) push_id(s.t, &ids, text[i]);
    const int n = (int)ids.n;
    CHECK(compress_prompt(&c, &s, ids.ids, n, first, &out), "%s: expected it to be compressed: %s", path, c.err);
    const int kept = (int)out.n;
    CHECK(m->len[0] == first && (int)s.held.n == first, "%s: expected the session as it was, %d tokens, got %d", path,
          first, m->len[0]);
    CHECK(kept - first > ratio * (float)(n - first) - 2 * CHUNK &&
          kept - first < ratio * (float)(n - first) * 1.2f + 2 * CHUNK,
          "%s: ratio %g: got %d of %d tokens after %d", path, (double)ratio, kept - first, n - first, first);
    CHECK(kept >= first && !memcmp(out.ids, ids.ids, (size_t)(first + CHUNK) * sizeof *out.ids),
          "%s: expected the start", path);
    CHECK(!memcmp(out.ids + kept - CHUNK, ids.ids + n - CHUNK, CHUNK * sizeof *out.ids), "%s: expected the end", path);
    int at = 0, breaks = 0;
    for (int i = 0; i < kept; i++, at++) {             // a subsequence with gaps between words
        const int before = at;
        while (at < n && (ids.ids[at] != out.ids[i])) at++;
        breaks += at > before;
        if (at > before && at < n)
            CHECK(begins_word(&tok, out.ids[i]), "%s: token %d after a gap: expected the start of a word", path,
                  i);
    }
    CHECK(at <= n && breaks > 0, "%s: expected the tokens in their order, with gaps", path);
    bool found = false;
    TokIds code = { 0 };
    tok_encode(&tok, " 48213.", 7, TOK_SPECIAL, &code);
    for (int i = 0; i + (int)code.n <= kept; i++) found |= !memcmp(out.ids + i, code.ids, code.n * sizeof *code.ids);
    CHECK(found, "%s, scorer %s: expected the code in the compressed prompt", path, scorer ? scorer : "none");
    CHECK(compress_prompt(&c, &s, ids.ids, n, first, &again) && again.n == out.n &&
          !memcmp(again.ids, out.ids, out.n * sizeof *out.ids), "%s: expected the same again", path);
    CHECK(compress_prompt(&c, &s, ids.ids, n, n - COMPRESS_FROM + 1, &again) && (int)again.n == n,
          "%s: expected a short one as it is", path);
    close_scorer(&c);
    free_session(&s);
    tok_ids_free(&ids);
    tok_ids_free(&out);
    tok_ids_free(&again);
    tok_ids_free(&code);
    tok_free(&tok);
    close_model(m);
}

// Only the layers of a scorer that score are in the plan: not the matrices of the layers after them.
static void test_scorer_plan(const char *path) {
    const ModelOptions o = { .n_ctx = 1024, .n_seqs = 1, .n_batch = 256, .n_logits = 1, .k_type = KV_F16,
                             .v_type = KV_F16, .can_score = true };
    ModelOptions only = o;
    only.scorer_only = true;
    Model *m = alloc_or_die(2, sizeof *m);
    plan_model(&m[0], path, op, o, NULL);
    plan_model(&m[1], path, op, only, NULL);
    size_t unscored = 0, bytes[2];
    for (size_t i = 0; i < m->gguf.n_tensors; i++) {
        const GgufTensor *t = &m->gguf.tensors[i];
        char name[64];
        int l = -1;
        snprintf(name, sizeof name, "%.*s", (int)t->name.n, t->name.s);
        if (m->binder->status[i] == BOUND && sscanf(name, "blk.%d.", &l) == 1 && l >= m->n_scored) unscored += t->size;
    }
    for (int i = 0; i < 2; i++) bytes[i] = m[i].binder->bytes;
    CHECK(m->n_scored < m->config.n_layers && m->config.layer[m->n_scored - 1].kv_layer == m->n_scored - 1 &&
          !m->config.layer[m->n_scored - 1].is_swa,
          "%s: %d of %d layers score, expected some, the last a global one with a cache", path,
          m->n_scored, m->config.n_layers);
    CHECK(unscored && bytes[1] == bytes[0] - unscored, "%s: a scorer's weights: expected %zu bytes less %zu, got %zu",
          path, bytes[0], unscored, bytes[1]);
    CHECK(m[0].plan.weights ? m[1].plan.weights < m[0].plan.weights - unscored / 2 : !m[1].plan.weights,
          "%s: a scorer's plan: expected less than %zu bytes of weights, got %zu", path, m[0].plan.weights,
          m[1].plan.weights);
    for (int i = 0; i < 2; i++) free_model(&m[i]);
    free(m);
}

// Three turns, the first one long: each later prompt begins with what the model got before.
static void test_chat(const char *path) {
    Model *m = alloc_or_die(1, sizeof *m);
    Tokenizer tok;
    Chat c = { .chatting = true, .show = { .newline = true }, .compressor = { .ratio = 0.3f } };
    TokIds shown = { 0 };
    char text[8192] = "";
    load_model(m, path, op, (ModelOptions){ .n_seqs = 1, .n_batch = 256, .n_ctx = 2048, .k_type = KV_F16,
                                            .v_type = KV_F16, .can_score = true }, NULL);
    load_tokenizer(&tok, &m->gguf, m->config.vocab);
    c.s = session_open(m, &tok, 0);
    c.options = (AnswerOptions){ .n_predict = 3, .think_budget = -1, .sampling = { .top_p = 1, .repeat = 1 } };
    for (int i = 0; i < 64; i++)
        snprintf(text + strlen(text), 80, "The king painted house number %d while a fox slept. ", 1000 + 37 * i);
    const char *const says[] = { text, "What did the king do?", "And the fox?" };
    for (int turn = 0; turn < 3; turn++) {
        tok_add_message(&c.messages, "user", (TokStr){ says[turn], strlen(says[turn]) });
        const int before = (int)c.s->held.n;
        CHECK(answer(&c), "chat, turn %d: %s", turn, c.err);
        const int n = c.s->turn.n_prompt;
        if (!turn) CHECK(n > 128 && n < 700, "chat: expected a compressed first prompt, got %d tokens", n);
        else
            CHECK(n > before - 4 && n < before + 64, "chat, turn %d: expected a prompt after %d tokens, got %d", turn,
                  before, n);
        if (turn)
            CHECK(c.s->turn.n_run < 64, "chat, turn %d: expected few tokens to run, got %d of %d", turn,
                  c.s->turn.n_run, n);
        if (turn) CHECK(shown.n < c.shown.n && same_ids(&shown, &c.shown) == (int)shown.n,
                        "chat, turn %d: expected the shown messages to stay", turn);
        shown.n = 0;
        for (size_t i = 0; i < c.shown.n; i++) push_id(c.s->t, &shown, c.shown.ids[i]);
    }
    tok_ids_free(&shown);
    chat_free(&c);
    tok_free(&tok);
    close_model(m);
}

static void test_all(const Ops *ops) {
    op = ops;
    for (int i = 0; i < 2; i++) {
        if (i || long_run) test_bits(models[i]);
        if (op->on_host && i && long_run) test_together(models[i]);
        if (!i && long_run) test_density(models[i]);
        if (long_run) test_codes(models[i], i ? KV_F16 : KV_TQ3);
    }
    test_compress(models[0], models[1], 0.2f);
    for (int i = 0; i < 2; i++) test_scorer_plan(models[i]);
    test_compress(models[0], NULL, 0.3f);
    if (long_run) test_compress(models[1], NULL, 0.5f);
    test_chat(models[0]);
}

int main(int argc, char **argv) {
    take_card(&argc, argv);
    start_threads(2);
    long_run = getenv("LONG") != NULL;
    test_chunks();
    test_all(cpu_ops());
#ifdef USE_CUDA
    if (cuda_ops()) test_all(cuda_ops());
    else SKIP("no GPU: sparse prompts on the CUDA backend");
#else
    SKIP("built without CUDA: sparse prompts on the CUDA backend");
#endif
    return test_done("pflash");
}
