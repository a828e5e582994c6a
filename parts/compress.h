/* compress.h - prompt compression (speculative prefill): the model reads only a part of a long prompt. Lossy.
 *
 * Uses engine.h alone: scores of tokens are its section [6]. Begin with compress_prompt().
 *
 * Each token gets a score, and then the mean of the scores of its SMOOTH neighbours. A chunk of CHUNK tokens scores the
 * mean of its tokens. Of the part that may be shortened, some chunks at the start and at the end are kept, then those
 * with the best scores, as many as the ratio says. Each run of kept tokens is extended to whole words. The result is a
 * shorter prompt like any other: its positions have no gaps. */
#ifndef COMPRESS_H
#define COMPRESS_H

// The scorer stays loaded together with the target, in the memory that the target's plan has left.
typedef struct {
    float       ratio;        // part of the tokens that is kept; 0: no compression
    int         from;         // prompts with fewer tokens stay as they are; 0: COMPRESS_FROM
    const char *file;         // of the scorer; NULL: the target scores with its own first layers
    Model      *scorer;       // NULL: not loaded yet, or the target
    double      seconds;      // that the last prompt took
    char        err[512];
} Compressor;

enum { CHUNK = 32, SMOOTH = 13, COMPRESS_FROM = 512, WORD_TOKENS = 16 };

static void close_scorer(Compressor *c) {
    if (c->scorer) model_close(c->scorer);
    c->scorer = NULL;
}

// Loads the scorer's file, with room for n tokens. NULL: the target scores with its own first layers.
static Model *open_scorer(Compressor *c, Model *target, int n) {
    if (!c->file) return NULL;
    if (c->scorer && model_options(c->scorer)->n_ctx >= n) return c->scorer;
    close_scorer(c);
    return c->scorer = scorer_open(target, c->file, n);
}

static bool begins_word(const Tokenizer *t, int32_t id) {
    const TokStr s = tok_piece(t, id, true);
    return !s.n || s.s[0] == ' ' || s.s[0] == '\n' || s.s[0] == '<';
}

// Makes each score (n) the mean of its neighbours.
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

// Marks in keep (n) the part `ratio` of the tokens with these scores, in chunks.
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

// Extends runs of kept tokens until they begin and end with a word, by WORD_TOKENS at most, so that numbers stay whole.
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

// Keeps the marks between messages, and the role after <|turn>: a conversation stays one.
static void keep_marks(const Tokenizer *t, const int32_t *ids, int n, bool *keep) {
    enum { ROLE_TOKENS = 8 };
    for (int i = 0; i < n; i++) {
        if (!tok_piece(t, ids[i], false).n) keep[i] = true;
        for (int j = i + 1; ids[i] == t->turn_open && j < n && j <= i + ROLE_TOKENS; j++) {
            const TokStr piece = tok_piece(t, ids[j], false);
            keep[j] = true;
            if (piece.n && memchr(piece.s, '\n', piece.n)) break;
        }
    }
}

static bool is_long(const Compressor *c, int n) { return n >= (c->from ? c->from : COMPRESS_FROM); }

// Writes to *out the ids that the target reads instead of a prompt (ids, n): the first `first` tokens unchanged, and of
// the others, if they are at least c->from, the part that the ratio says, and the marks between messages. s is the
// target's session; it keeps only tokens that it shares with the prompt. False: c->err says why it cannot.
static bool compress_prompt(Compressor *c, Session *s, const int32_t *ids, int n, int first, TokIds *out) {
    for (int i = 0; i < n; i++) {
        if (ids[i] >= 0) continue;
        snprintf(c->err, sizeof c->err, "--compress: a prompt with images cannot be compressed");
        return false;
    }
    Model *target = session_model(s);
    Tokenizer *t = session_tokenizer(s);
    const int n_ctx = model_options(target)->n_ctx;
    const double start = seconds();
    out->n = 0;
    c->seconds = 0;
    if (!is_long(c, n - first)) {
        for (int i = 0; i < n; i++) push_id(t, out, ids[i]);
        return true;
    }
    if (!c->file && n > n_ctx) {
        snprintf(c->err, sizeof c->err, "--compress: a prompt of %d tokens to score exceeds the context of %d; try "
                 "-c %d or --scorer FILE", n, n_ctx, n + 512);
        return false;
    }
    Model *scorer = open_scorer(c, target, n);
    float *score = alloc_or_die(n, sizeof *score);
    bool *keep = alloc_or_die(n, sizeof *keep);
    score_prompt(s, scorer, ids, n, first, score);
    smooth(score + first, n - first);
    keep_chunks(score + first, n - first, c->ratio, keep + first);
    keep_words(t, ids + first, n - first, keep + first);
    keep_marks(t, ids + first, n - first, keep + first);
    for (int i = 0; i < n; i++) if (i < first || keep[i]) push_id(t, out, ids[i]);
    free(score);
    free(keep);
    c->seconds = seconds() - start;
    return true;
}

static void print_compressed(int kept, int n) {
    if (kept < n) fprintf(stderr, "# prompt compressed (lossy): kept %d of %d tokens\n", kept, n);
}

#endif
