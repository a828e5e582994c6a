/* compress.h - prompt compression (speculative prefill): the model is shown a part of a long prompt only. Lossy. A part of
 * gemma4.c, which includes it.
 *
 * A scorer reads all of the prompt: a small model of the same vocabulary, or the target's own first layers. What a token scores
 * is the attention that the last SCORE_ROWS tokens give to it, in the layers that see everything: the most that any layer and
 * head gives, its mean over those tokens, and of that the mean over 13 neighbours. A chunk of CHUNK tokens scores the mean of
 * its tokens. Kept are some chunks at the start and the end of what may be left out, then the best, as many as the ratio says;
 * each run of kept tokens grows to whole words. What is kept is a shorter prompt like any other: positions are packed.
 *   [1] Scores    [2] What is kept */
#ifndef COMPRESS_H
#define COMPRESS_H

// The scorer stays loaded, beside the target and in what the target's plan has left: prompts of a chat come one by one,
// and a plan that depends on no prompt is made before the first.
typedef struct {
    float       ratio;        // part of the tokens that is kept
    const char *file;         // of the scorer; NULL: the target scores with its own first layers
    Model      *scorer;       // NULL: not loaded yet, or the target
    char        err[512];
} Compressor;

enum { CHUNK = 32, SMOOTH = 13, COMPRESS_FROM = 512, WORD_TOKENS = 16 };

// ==== [1] Scores =====================================================================================================

// Scores of n > SCORE_ROWS tokens behind what session seq holds, which stays as it is. (n) floats.
static void score_tokens(Model *m, int seq, const int32_t *ids, int n, float *score) {
    const int len = m->len[seq], seen = m->n_written[seq], n_keys = m->s.n_keys;
    uint8_t *rings = alloc_or_die(copy_rings(m, seq, NULL, COPY_OUT) + 1, 1);
    float *mass = alloc_or_die((size_t)SCORE_ROWS * (size_t)n_keys, sizeof *mass);
    copy_rings(m, seq, rings, COPY_OUT);
    m->ops->copy(&(Copy){ m->s.mass, mass, (size_t)SCORE_ROWS * (size_t)n_keys * sizeof *mass, COPY_IN });
    for (int at = 0, rows; at < n; at += rows) {
        const int left = n - SCORE_ROWS - at;
        rows = left > 0 ? min_int(left, m->options.n_batch) : SCORE_ROWS;
        m->scorer_pass = left > 0 ? SCORER_PASS : COLLECT_ATTENTION;
        for (int i = 0; i < rows; i++) m->chunk[i] = (StepRow){ .token = ids[at + i] };
        step(m, &(StepSeg){ .seq = seq, .kind = SEG_CHAIN, .n = rows, .rows = m->chunk, .more = n - at - rows }, 1);
        if (left > 0) set_length(m, seq, len + at + rows);
    }
    m->scorer_pass = 0;
    m->ops->copy(&(Copy){ mass, m->s.mass, (size_t)SCORE_ROWS * (size_t)n_keys * sizeof *mass, COPY_OUT });
    copy_rings(m, seq, rings, COPY_IN);
    set_length(m, seq, len);
    m->ops->wait();
    m->n_written[seq] = seen;
    for (int j = 0; j < n; j++) {
        score[j] = 0;
        for (int r = 0; r < SCORE_ROWS; r++) score[j] += mass[(size_t)r * (size_t)n_keys + (size_t)(len + j)] / SCORE_ROWS;
    }
    free(mass);
    free(rings);
}

static void close_scorer(Compressor *c) {
    if (c->scorer) free_model(c->scorer);
    free(c->scorer);
    c->scorer = NULL;
}

// Dies where the words of the scorer in `file` are not the target's, each under the same number. For the start: it is
// loaded only when a long prompt comes.
static void check_scorer(const char *file, Gguf *target) {
    static const char key[] = "tokenizer.ggml.tokens";
    Gguf g;
    const GgufStr *want = NULL, *got = NULL;
    size_t n = 0, n_got = 0, i = 0;
    open_model_file(&g, file);
    if (gguf_get_strs(target, key, &want, &n) < 1)
        die("--scorer: %s: key '%s': missing (E_META_MISSING)", target->path, key);
    if (gguf_get_strs(&g, key, &got, &n_got) < 1) die("--scorer: %s: key '%s': missing (E_META_MISSING)", file, key);
    if (n != n_got)
        die("--scorer: %s: expected the vocabulary of %s with %zu tokens, got %zu", file, target->path, n, n_got);
    while (i < n && want[i].n == got[i].n && !memcmp(want[i].s, got[i].s, want[i].n)) i++;
    if (i < n)
        die("--scorer: %s: expected the vocabulary of %s: both have %zu tokens, but token %zu differs", file,
            target->path, n, i);
    gguf_close(&g);
}

// The scorer, with room for n tokens. Of a file's layers only those that score are loaded.
static Model *open_scorer(Compressor *c, Model *target, int n) {
    ModelOptions o = { .n_seqs = 1, .n_batch = BATCH_FIT, .n_logits = 1, .k_type = KV_F16, .v_type = KV_F16,
                      .can_score = true, .scorer_only = true, .n_ctx = (int)round_up((size_t)n, 1024),
                      .ctx_from = "prompt for --scorer", .shared_limits = plan_limits(target) };
    if (!c->file) return target;
    if (c->scorer && c->scorer->options.n_ctx >= n) return c->scorer;
    close_scorer(c);
    if (target->options.memory) {                      // what --vram grants is for both
        const MemoryPlan *p = &target->plan;
        const size_t taken = p->weights + p->kv_global + p->kv_rings + p->staging + p->activations + p->scratch + p->drafter +
                             (p->weights ? 0 : target->binder->bytes);
        o.memory = target->options.memory > taken ? target->options.memory - taken : 1;
    }
    c->scorer = alloc_or_die(1, sizeof *c->scorer);
    load_model(c->scorer, c->file, target->ops, o, NULL);
    return c->scorer;
}

// ==== [2] What is kept ===============================================================================================

static bool begins_word(const Tokenizer *t, int32_t id) {
    const TokStr s = tok_piece(t, id, true);
    return !s.n || s.s[0] == ' ' || s.s[0] == '\n' || s.s[0] == '<';
}

// score (n): each the mean of its neighbours.
static void smooth(float *score, int n) {
    float *sums = alloc_or_die((size_t)n + 1, sizeof *sums);
    for (int i = 0; i < n; i++) sums[i + 1] = score[i];
    for (int i = 0; i < n; i++) {
        const int from = max_int(i - SMOOTH / 2, 0), to = min_int(i + SMOOTH / 2 + 1, n);
        score[i] = 0;
        for (int j = from; j < to; j++) score[i] += sums[j + 1] / (float)(to - from);
    }
    free(sums);
}

// keep (n): of tokens with these scores, a part of `ratio`, in chunks.
static void keep_chunks(const float *score, int n, float ratio, bool *keep) {
    const int n_chunks = (n + CHUNK - 1) / CHUNK, n_keep = max_int(1, (int)(ratio * (float)n_chunks));
    float *value = alloc_or_die(n_chunks, sizeof *value);
    for (int i = 0; i < n_chunks; i++) {
        const int from = i * CHUNK, to = min_int(from + CHUNK, n);
        for (int j = from; j < to; j++) value[i] += score[j] / (float)(to - from);
        if (i < max_int(1, n_keep / 16) || i >= n_chunks - max_int(2, n_keep / 8)) value[i] = INFINITY;
    }
    for (int k = 0; k < max_int(n_keep, min_int(n_chunks, 4)); k++) {
        int best = 0;
        for (int i = 1; i < n_chunks; i++) if (value[i] > value[best]) best = i;
        value[best] = -1;
        for (int j = best * CHUNK; j < min_int((best + 1) * CHUNK, n); j++) keep[j] = true;
    }
    free(value);
}

// Runs of kept tokens grow until they begin and end with a word, WORD_TOKENS at most: numbers stay whole.
static void keep_words(const Tokenizer *t, const int32_t *ids, int n, bool *keep) {
    for (int i = n - 1, grown = 0; i > 0; i--) {
        grown = keep[i - 1] ? 0 : grown;
        if (keep[i] && !keep[i - 1] && !begins_word(t, ids[i]) && grown++ < WORD_TOKENS) keep[i - 1] = true;
    }
    for (int i = 1, grown = 0; i < n; i++) {
        if (keep[i]) grown = i + 1 < n && !keep[i + 1] ? grown : 0;
        else if (keep[i - 1] && !begins_word(t, ids[i]) && grown++ < WORD_TOKENS) keep[i] = true;
        else grown = 0;
    }
}

// What of a prompt (ids, n) the target is shown, as ids in *out: the first `first` tokens as they are, and of those
// behind, where they are at least COMPRESS_FROM, the part that the ratio says. s: the target's session, which stays as
// it is, but for what it does not share with the prompt. False: it cannot, and c->err says why.
static bool compress_prompt(Compressor *c, Session *s, const int32_t *ids, int n, int first, TokIds *out) {
    Model *target = s->m;
    out->n = 0;
    if (n - first < COMPRESS_FROM) {
        for (int i = 0; i < n; i++) push_id(s, out, ids[i]);
        return true;
    }
    if (!c->file && n > target->options.n_ctx) {
        snprintf(c->err, sizeof c->err, "--compress: a prompt of %d tokens to score exceeds the context of %d; try "
                 "-c %d or --scorer FILE", n, target->options.n_ctx, n + 512);
        return false;
    }
    Model *m = open_scorer(c, target, n);
    if (m == target) session_keep(s, ids, first + 1);
    else reset_session(m, 0);
    const int seq = m == target ? s->seq : 0, held = m->len[seq];
    float *score = alloc_or_die(n, sizeof *score);
    bool *keep = alloc_or_die(n, sizeof *keep);
    score_tokens(m, seq, ids + held, n - held, score + held);
    smooth(score + first, n - first);
    keep_chunks(score + first, n - first, c->ratio, keep + first);
    keep_words(s->t, ids + first, n - first, keep + first);
    for (int i = 0; i < n; i++) if (i < first || keep[i]) push_id(s, out, ids[i]);
    free(score);
    free(keep);
    return true;
}

static void print_compressed(int kept, int n) {
    if (kept < n) fprintf(stderr, "# prompt compressed (lossy): kept %d of %d tokens\n", kept, n);
}

#endif
