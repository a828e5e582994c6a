/* generate.h - generation: sessions, prompts, answers, snapshots and drafts over step().
 *
 * Uses engine.h (whose sessions it implements), plan.h, draft.h, guess.h, grammar.h and tokenizer.h. Begin with
 * sessions_next() [5] and run_sessions() above it.
 *
 * A session keeps its tokens in one slot of the model's caches. session_start() gives it a prompt to answer. Each
 * session_next() does one piece of work, a chunk of the prompt or a token, and reports it as an event. sessions_next()
 * does so for several sessions, which share their decoding steps. Nothing here prints.
 *
 * Speculative decoding: a draft model or the text itself proposes the next tokens. They run in the same step as the
 * last token, and the model samples a token of its own at every row. As long as drafts and samples agree, a step yields
 * several tokens. Each sample is, bit for bit, the one that a step of a single row would make, greedy or not. So the
 * text is the same with any drafter, and without one.
 *
 * A prompt runs only from the first token that the session does not hold. If the backend runs asynchronously
 * (Ops.fence), the host does not wait for it: the device passes its tokens to the next step, and the host reads them
 * while that step runs. If the answer turns out to end there, or to continue with other tokens, that step is discarded:
 * it was not committed.
 *   [1] Stop strings    [2] Sessions, snapshots    [3] An answer: text, its end, its form
 *   [4] Drafts    [5] Steps of several sessions    [6] Without an answer: measuring, appending, logits */
#ifndef GENERATE_H
#define GENERATE_H

// ==== [1] Stop strings ==============================================================================================

// Text passes through byte by byte, so it makes no difference where tokens begin. Bytes that may be the beginning of a
// stop string are held back. The stop string that is complete first ends the text before it; of several that end at the
// same byte, the longest. A byte costs a few steps for each stop string, however long they are (Knuth, Morris, Pratt).
typedef struct {
    const TextList *strings;  // none is empty
    size_t         *len;      // (n) their lengths
    size_t         *same;     // (n) how many bytes at the end of the text are the beginning of each one
    size_t         *shorter;  // of each string, for its first 1, 2, .. bytes: the longest shorter beginning of the
                              // string with which these bytes end
    char           *held;     // (longest) the last bytes of the text, not passed on yet
    size_t          n_held, longest;
    const char     *hit;      // the stop string that was found; no more text passes
} Stops;

static void stops_free(Stops *s) {
    free(s->len);
    free(s->held);
    *s = (Stops){ 0 };
}

static Stops stops_new(const TextList *strings) {      // stops_free() when done
    const size_t n = (size_t)strings->n;
    size_t longest = 0, total = 0;
    for (size_t k = 0; k < n; k++) {
        const size_t len = strlen(strings->text[k]);
        total += len;
        if (len > longest) longest = len;
    }
    size_t *len = alloc_or_die(2 * n + total, sizeof *len), *at = len + 2 * n;
    for (size_t k = 0; k < n; k++) {
        const char *stop = strings->text[k];
        len[k] = strlen(stop);
        for (size_t i = 1, same = 0; i < len[k]; i++) {
            while (same && stop[i] != stop[same]) same = at[same - 1];
            at[i] = same += stop[i] == stop[same];
        }
        at += len[k];
    }
    return (Stops){ .strings = strings, .len = len, .same = len + n, .shorter = len + 2 * n,
                    .held = alloc_or_die(longest + 1, 1), .longest = longest };
}

// Takes n bytes of text and returns how many are written to out, at most n + longest.
static size_t stops_push(Stops *s, const char *text, size_t n, char *out) {
    size_t used = 0, keep = s->n_held, found = 0;      // bytes at the end: the beginning of one, a whole one
    while (used < n && !s->hit) {
        const size_t *at = s->shorter;
        const char c = text[used++];
        keep = 0;
        for (int k = 0; k < s->strings->n; at += s->len[k++]) {
            const char *stop = s->strings->text[k];
            size_t same = s->same[k];
            while (same && stop[same] != c) same = at[same - 1];
            s->same[k] = same += stop[same] == c;
            if (same == s->len[k] && same > found) found = same, s->hit = stop;
            if (same > keep) keep = same;
        }
    }
    const size_t pass = s->n_held + used - (found ? found : keep), first = pass < s->n_held ? pass : s->n_held;
    memcpy(out, s->held, first);
    memcpy(out + first, text, pass - first);
    memmove(s->held, s->held + first, s->n_held -= first);
    memcpy(s->held + s->n_held, text + (pass - first), used - (pass - first));
    s->n_held += used - (pass - first);
    return pass;
}

static size_t stops_flush(Stops *s, char *out) {       // at the end: the bytes held back are no stop string
    const size_t n = s->hit ? 0 : s->n_held;
    memcpy(out, s->held, n);
    s->n_held = 0;
    return n;
}

// ==== [2] Sessions, snapshots =======================================================================================

typedef struct {              // rows of a cache, or their scales
    uint8_t *data;
    size_t  bytes;
    KvType  type;
    bool    is_scale, is_tail;
} CachePart;

enum { CACHE_PARTS = 6 };     // at most

// Where the rows of session seq are in a cache. Returns the number of parts.
static int cache_parts(const Cache *c, int seq, CachePart *parts) {
    const KvPlane *planes[] = { &c->k, &c->v, &c->k_tail, &c->v_tail };
    int n = 0;
    for (int k = 0; k < (c->tail_slots ? 4 : 2); k++) {
        const KvPlane *p = planes[k];
        const size_t rows = (size_t)c->n_kv_heads * (size_t)(k < 2 ? c->slots : c->tail_slots);
        const size_t bytes = rows * kv_row_bytes(p->type, p->dim), scale = p->scale ? rows * kv_scale_bytes(p->type,
                                                                                                            p->dim) : 0;
        if (bytes) parts[n++] = (CachePart){ (uint8_t *)p->data + (size_t)seq * bytes, bytes, p->type, false, k > 1 };
        if (scale) parts[n++] = (CachePart){ (uint8_t *)p->scale + (size_t)seq * scale, scale, p->type, true, false };
    }
    return n;
}

// Copies the rows of session seq that a cache will overwrite, a ring's or a tail's, to host memory (COPY_OUT) or back
// (COPY_IN); the caller calls wait(). Returns their bytes. host NULL: copies nothing.
static size_t copy_ring(Model *m, int cache, int seq, uint8_t *host, CopyKind kind) {
    const Cache *c = &m->caches[cache];
    const bool is_ring = c->slots < m->options.n_ctx + STEP_ROWS;
    CachePart parts[CACHE_PARTS];
    const int n_parts = cache_parts(c, seq, parts);
    size_t n = 0;
    for (int k = 0; k < n_parts; k++) {
        if (!is_ring && !parts[k].is_tail) continue;
        if (host) {
            void *there = parts[k].data, *here = host + n;
            const bool out = kind == COPY_OUT;
            m->ops->copy(&(Copy){ out ? here : there, out ? there : here, parts[k].bytes, kind });
        }
        n += parts[k].bytes;
    }
    return n;
}

// The same for all caches; waits.
static size_t copy_rings(Model *m, int seq, uint8_t *host, CopyKind kind) {
    size_t n = 0;
    for (int i = 0; i < m->n_caches; i++) n += copy_ring(m, i, seq, host ? host + n : NULL, kind);
    if (host) m->ops->wait();
    return n;
}

typedef struct {              // a prefix snapshot: rings and tails as they were when the session held n tokens
    uint8_t *rings;
    int      n, n_written;    // n_written: Model.n_written at that time
} Snapshot;

struct Session {
    Model     *m;
    Tokenizer *t;
    int        seq;           // its slot in the model's caches
    TokIds     held;          // (m->len[seq]) the committed tokens
    Snapshot   snapshots[MAX_SNAPSHOTS];       // (n_snapshots) ascending; entries after them keep memory for later ones
    int        n_snapshots;
    int        max_snapshots; // 1 .. MAX_SNAPSHOTS
    bool       saving;        // one more is being copied, and the session runs nothing. So far these are copied:
    int        saved_caches;
    size_t     saved_bytes;
    int        snapshot_every;    // a prompt takes one every so many tokens; 0: only at Prompt.checkpoint_at
    int        chunk;         // most tokens of a prompt in one step
    double     work;          // multiplications after which a prompt's step pauses, with ModelOptions.interleave;
                              // INFINITY: it does not
    double     worked;        // multiplications in the last piece of such a step
    // the answer under way, or the last one
    AnswerOptions options;
    TokReply   reply;         // so far; when it has ended, cut where a stop string began
    Turn       turn;
    GrammarState state;       // of options.grammar, after the tokens of todo
    TokIds     todo;          // tokens to run: the prompt, later the last token; the first `at` of them have run
    int        at, checkpoint_at, n_head;
    bool       prompting;     // todo is a prompt
    bool       has_pictures;  // it has some, or what is held
    const Picture *pictures;  // (n_pictures) of the prompt
    int        n_pictures;
    bool       issued_ahead;  // the step that runs the last token was issued before the host knew that token
    bool       waited;        // it was not, because of drafts
    bool       answering, ending;      // EVENT_END is still to come; it is the next event
    volatile sig_atomic_t cancelled;
    EndReason  end;
    Event      shifted;       // an EVENT_SHIFT still to be reported, if it dropped tokens
    TokIds     said, thought_name;     // ids of the last event; the first line of a thought
    Speculator    speculator;
    int        named, thought_tokens;  // ids of that line so far; of thoughts so far
    size_t     content, thought, passed;   // bytes of the reply that events have taken; that passed the stop strings
    Stops      stops;
    char      *text;          // (text_room) the last event's text after the stop strings
    size_t     text_room, n_text;
    size_t     thought_start; // where the last event's thought begins in the reply
    int        row;           // the last token was sampled from this row of logits of step number `step`; -1: from none
    int64_t    step;
    double     started, first_token;                   // seconds()
    double     step_seconds, draft_seconds;            // of the last step: StepDone
    char       err[512];
};

// ---- facts about a model and a session, for callers that do not see into them ----

static const ModelOptions *model_options(const Model *m) { return &m->options; }
static const char *model_path(const Model *m) { return m->gguf.path; }
static int model_paused(const Model *m) { return m->paused_seq; }
static size_t snapshot_bytes(Model *m) { return copy_rings(m, 0, NULL, COPY_OUT); }

static ModelShape model_shape(const Model *m) {
    return (ModelShape){ .vocab = m->config.vocab, .dim = m->config.dim, .window = m->config.n_swa,
                         .trained = m->config.n_ctx_train };
}

static TokStr model_template(Model *m) {
    GgufStr s = { "", 0 };
    return gguf_get_str(&m->gguf, "tokenizer.chat_template", &s) > 0 ? (TokStr){ s.s, s.n } : (TokStr){ "", 0 };
}

static ModelSize model_size(const Model *m) {
    ModelSize size = { .on_device = (double)m->plan.weights, .type = "none" };
    double of_type[GGUF_N_TYPES] = { 0 }, most = 0;
    for (size_t i = 0; i < m->gguf.n_tensors; i++) {
        const GgufTensor *t = &m->gguf.tensors[i];
        const double n = (double)t->ne[0] * (double)t->ne[1] * (double)t->ne[2] * (double)t->ne[3];
        size.bytes += (double)t->size;
        size.params += n;
        if ((of_type[t->type] += n) <= most) continue;
        most = of_type[t->type];
        size.type = gguf_type_name(t->type);
    }
    return size;
}

static Model *model_open(const char *path, const Ops *ops, ModelOptions o, const char *dump_dir) {
    Model *m = alloc_or_die(1, sizeof *m);
    load_model(m, path, ops, o, dump_dir);
    return m;
}

static void model_close(Model *m) {
    free_model(m);
    free(m);
}

// Steps of few rows; on some backends all steps, unless prompts are sparse.
static bool chunk_is_free(const Model *m, int chunk) {
    const ModelOptions *o = &m->options;
    return chunk <= STEP_ROWS || (m->ops->exact_prompts && !o->pflash);
}

static void set_times(Session *s) {                    // of an answer, up to now
    s->turn.prompt_seconds = (s->turn.made ? s->first_token : seconds()) - s->started;
    s->turn.decode_seconds = s->turn.made ? seconds() - s->first_token : 0;
}

static Model *session_model(const Session *s) { return s->m; }
static Tokenizer *session_tokenizer(const Session *s) { return s->t; }
static const TokIds *session_held(const Session *s) { return &s->held; }
static const TokReply *session_reply(const Session *s) { return &s->reply; }

static Turn *session_turn(Session *s) {
    if (s->answering) set_times(s);
    return &s->turn;
}

static const char *session_error(const Session *s) { return s->err; }

static void session_set_budget(Session *s, int chunk, double work) {
    s->chunk = chunk;
    s->work = work;
}

static void session_set_snapshots(Session *s, int max, int every) {
    s->max_snapshots = max;
    s->snapshot_every = every;
}

// ---- opening, closing ----

static double row_bytes_of(const KvPlane *p) {
    return (double)(kv_row_bytes(p->type, p->dim) + kv_scale_bytes(p->type, p->dim));
}

static double cache_bytes(const Cache *k, int n) {     // of the newest n rows of a session, all heads
    return (double)n * k->n_kv_heads * (row_bytes_of(&k->k) + row_bytes_of(&k->v));
}

// Bytes of weights and cache that decoding a token at position pos has to read. Divided by the bandwidth: its least
// time.
static double bytes_per_token(const Model *m, int pos) {
    const Config *c = &m->config;
    double bytes = (double)matrix_bytes(m->weights.output.data ? &m->weights.output : &m->weights.token_embd);
    if (c->ple_dim) bytes += (double)matrix_bytes(&m->weights.per_layer_model_proj);
    for (int l = 0; l < c->n_layers; l++)
        bytes += layer_size(c, &m->weights.layer[l], true) +
                 cache_bytes(&m->caches[m->cache_of[l]], c->layer[l].is_swa ? min_int(pos, c->n_swa) : pos);
    return bytes;
}

// The same for each token that an MTP assistant drafts in one session of pos tokens, or each block that DFlash drafts.
static double bytes_per_draft(const Model *m, int pos) {
    const Drafter *d = m->drafter;
    const Config *c = &d->config;
    const bool is_block = d->kind == DRAFTER_DFLASH;
    const Tensor *head = d->weights.output.data ? &d->weights.output : !is_block ? &d->weights.token_embd :
                         m->weights.output.data ? &m->weights.output : &m->weights.token_embd;
    double bytes = (double)matrix_bytes(head);
    if (d->centroids.data) bytes = (double)matrix_bytes(&d->centroids) + bytes / c->vocab * centroid_tokens(d);
    if (!is_block) bytes += (double)matrix_bytes(&d->pre_projection) + (double)matrix_bytes(&d->post_projection);
    for (int l = 0; l < c->n_layers; l++) {
        bytes += layer_size(c, &d->weights.layer[l], true);
        const int seen = is_block ? min_int(pos, draft_window(d, l)) : c->layer[l].is_swa ?
            min_int(pos, d->window[1] - 1) : pos;
        bytes += cache_bytes(is_block ? &d->caches[l] : &m->caches[m->cache_of[d->donor[l]]], seen);
    }
    return bytes;
}

static void init_session(Session *s, Model *m, Tokenizer *t, int seq) {
    *s = (Session){ .m = m, .t = t, .seq = seq, .row = -1, .max_snapshots = 1, .chunk = m->options.n_batch,
                     .work = INFINITY };
    speculator_init(&s->speculator);
    m->pace->records = m->ops->fence != NULL;
    if (m->drafter->kind != DRAFTER_NONE) m->pace->draft_share = bytes_per_draft(m, 0) / bytes_per_token(m, 0);
    reset_session(m, seq);
}

static void free_session(Session *s) {
    tok_ids_free(&s->held);
    tok_ids_free(&s->todo);
    tok_ids_free(&s->said);
    speculator_free(&s->speculator);
    tok_ids_free(&s->thought_name);
    tok_reply_free(&s->reply);
    for (int i = 0; i < MAX_SNAPSHOTS; i++) free(s->snapshots[i].rings);
    stops_free(&s->stops);
    free(s->text);
}

static Session *session_open(Model *m, Tokenizer *t, int seq) {
    Session *s = alloc_or_die(1, sizeof *s);
    init_session(s, m, t, seq);
    return s;
}

static void session_close(Session *s) {
    free_session(s);
    free(s);
}

static void session_forget(Session *s) {
    reset_session(s->m, s->seq);
    s->held.n = 0;
    s->n_snapshots = 0;
    s->row = -1;
}

static void session_cancel(Session *s) { s->cancelled = 1; }         // any thread or signal handler may call it

static void session_set_bias(Session *s, const float *bias) {
    Model *m = s->m;
    const size_t vocab = (size_t)m->config.vocab;
    float *none = bias ? NULL : alloc_or_die(vocab, sizeof *none);
    m->ops->copy(&(Copy){ m->s.bias + (size_t)s->seq * vocab, bias ? bias : none, vocab * sizeof *bias, COPY_IN });
    m->ops->wait();
    free(none);
}

// ---- going back: prefix snapshots ----

static void set_length(Model *m, int seq, int32_t len) {
    m->len[seq] = len;
    m->ops->copy(&(Copy){ m->s.len + seq, &len, sizeof len, COPY_IN });
}

// Puts rings and tails back as they were at a snapshot. ids are the tokens that the session held then.
static void restore_snapshot(Session *s, const Snapshot *snapshot, const int32_t *ids) {
    copy_rings(s->m, s->seq, snapshot->rings, COPY_IN);
    s->m->n_written[s->seq] = snapshot->n_written;
    shorten_session(s->m, s->seq, ids, snapshot->n);
}

// True: ids[i - 1] and ids[i] are of one picture. Between two pictures there is text.
static bool in_picture(const int32_t *ids, int i) { return i > 0 && ids[i - 1] < 0 && ids[i] < 0; }

// The session keeps of a prompt what it shares with it, less the last token, which has to run for its logits. If the
// rings have lost rows that this needs, it goes back to the last snapshot before it; without one, to nothing. A picture
// is kept whole or not at all.
static int session_keeps(const Session *s, const int32_t *ids, int n) {
    int same = 0, k = s->n_snapshots;
    while (same < min_int(n - 1, s->m->len[s->seq]) && s->held.ids[same] == ids[same]) same++;
    while (in_picture(ids, same)) same--;
    while (k && s->snapshots[k - 1].n > same) k--;
    return can_shorten(s->m, s->seq, same) ? same : k ? s->snapshots[k - 1].n : 0;
}

// Cuts the session back to what it keeps of a prompt (ids, n >= 1).
static void session_keep(Session *s, const int32_t *ids, int n) {
    Model *m = s->m;
    const int kept = session_keeps(s, ids, n);
    while (s->n_snapshots && s->snapshots[s->n_snapshots - 1].n > kept) s->n_snapshots--;
    if (!shorten_session(m, s->seq, ids, kept)) {
        if (kept) restore_snapshot(s, &s->snapshots[s->n_snapshots - 1], ids);
        else reset_session(m, s->seq);
    }
    s->held.n = (size_t)kept;
}

// If the session has as many snapshots as it may have, drops the one that is closest to the next; the new one takes its
// memory.
static void evict_snapshot(Session *s) {
    Snapshot *snapshots = s->snapshots;
    int least = 0;
    if (s->n_snapshots < s->max_snapshots) return;
    for (int i = 0, best = INT_MAX; i < s->n_snapshots; i++) {
        const int gap = (i + 1 < s->n_snapshots ? snapshots[i + 1].n : s->m->len[s->seq]) - snapshots[i].n;
        if (gap < best) best = gap, least = i;
    }
    const Snapshot out = snapshots[least];
    memmove(snapshots + least, snapshots + least + 1, (size_t)(--s->n_snapshots - least) * sizeof *snapshots);
    snapshots[s->n_snapshots] = out;
}

// Takes a snapshot of what the rings hold now. whole: of all caches at once; else of the next one, and the session is
// `saving` until all are copied.
static void take_snapshot(Session *s, bool whole) {
    Model *m = s->m;
    if (!s->saving) {
        if (s->n_snapshots && s->snapshots[s->n_snapshots - 1].n == m->len[s->seq]) return;
        evict_snapshot(s);
        s->saved_caches = 0;
        s->saved_bytes = 0;
    }
    Snapshot *snapshot = &s->snapshots[s->n_snapshots];
    if (!snapshot->rings) snapshot->rings = alloc_large(copy_rings(m, s->seq, NULL, COPY_OUT));
    for (size_t n = 0; s->saved_caches < m->n_caches && (whole || !n); s->saved_bytes += n)
        n = copy_ring(m, s->saved_caches++, s->seq, snapshot->rings + s->saved_bytes, COPY_OUT);
    m->ops->wait();
    s->saving = s->saved_caches < m->n_caches;
    if (s->saving) return;
    snapshot->n = m->len[s->seq];
    snapshot->n_written = m->n_written[s->seq];
    s->n_snapshots++;
}

static void session_snapshot(Session *s) { take_snapshot(s, true); }

static void session_rollback(Session *s) {
    const Snapshot *snapshot = &s->snapshots[s->n_snapshots - 1];
    assert(s->n_snapshots > 0 && snapshot->n <= s->m->len[s->seq]);
    restore_snapshot(s, snapshot, s->held.ids);
    s->held.n = (size_t)snapshot->n;
    s->row = -1;
}

// ---- a prompt begins ----

// Makes the session run a prompt (ids, n), but for the tokens that it holds already.
static void set_prompt(Session *s, const int32_t *ids, int n) {
    session_keep(s, ids, n);
    s->todo.n = 0;
    s->at = 0;
    s->has_pictures = false;
    for (int i = 0; i < n; i++) s->has_pictures |= ids[i] < 0;
    for (int i = s->m->len[s->seq]; i < n; i++) push_id(s->t, &s->todo, ids[i]);
    s->prompting = true;
}

// False: s->err says what is wrong with the pictures of a prompt.
static bool check_pictures(Session *s, const Prompt *p) {
    const int most = vision_whole_blocks(&s->m->config) ? s->m->options.n_batch : INT_MAX;
    int end = 0, k = 0;                                // the pictures before number k end at ids[end]
    for (int i = session_keeps(s, p->ids, p->n); i < p->n; i++) {
        if (p->ids[i] >= 0) continue;
        while (k < p->n_pictures && i >= end) end = p->pictures[k].first + p->pictures[k].n, k++;
        const Picture *x = i < end ? &p->pictures[k - 1] : NULL;
        if (!x || !x->rows || i < x->first || end >= p->n || p->ids[end] < 0) {
            snprintf(s->err, sizeof s->err, "prompt: expected rows of a picture for id %d, and text after it", i);
            return false;
        }
        if (x->n > most) {
            snprintf(s->err, sizeof s->err, "a picture of %d tokens: expected at most %d, the rows of a step; try "
                     "--chunk %d or a smaller --image-tokens", x->n, most, x->n);
            return false;
        }
    }
    return true;
}

static bool session_start(Session *s, const Prompt *p, const AnswerOptions *o) {
    Model *m = s->m;
    if (p->n < 1 || p->n > m->options.n_ctx) {
        snprintf(s->err, sizeof s->err, "expected a prompt of 1 to %d tokens, got %d", m->options.n_ctx, p->n);
        return false;
    }
    if (!check_pictures(s, p)) return false;
    s->pictures = p->pictures;
    s->n_pictures = p->n_pictures;
    s->thought_name.n = 0;
    if (tok_encode(s->t, "thought\n", 8, TOK_PLAIN, &s->thought_name) < 0) die("%s", s->t->err);
    tok_reply_start(s->t, &s->reply, p->ids, (size_t)p->n);
    stops_free(&s->stops);
    s->options = *o;
    s->stops = stops_new(&s->options.stops);
    s->turn = (Turn){ .n_prompt = p->n, .n_original = p->n_original, .score_seconds = p->score_seconds };
    s->first_token = seconds();
    s->started = s->first_token - p->score_seconds;
    s->answering = true;
    s->ending = s->issued_ahead = s->waited = false;
    s->cancelled = 0;
    s->content = s->thought = s->passed = 0;
    s->named = tok_reply_thinks(&s->reply) ? (int)s->thought_name.n : 0;
    s->thought_tokens = 0;
    if (o->grammar) s->state = grammar_start(o->grammar, tok_reply_thinks(&s->reply) ? START_THINKING :
                                                         o->may_think ? START_MAY_THINK : START_ANSWER);
    speculator_start(&s->speculator, &o->drafting);
    s->n_head = p->n_head;
    s->row = -1;
    s->shifted = (Event){ .kind = EVENT_SHIFT };
    m->ops->copy(&(Copy){ m->s.params + s->seq, &s->options.sampling, sizeof s->options.sampling, COPY_IN });
    set_prompt(s, p->ids, p->n);
    s->turn.n_cached = (int)s->held.n;
    s->checkpoint_at = p->checkpoint_at < p->n && copy_rings(m, s->seq, NULL, COPY_OUT) ? p->checkpoint_at : 0;
    return true;
}

// ==== [3] An answer: text, its end, its form ========================================================================

// Abandons a prompt's step that is paused. Its rows may have overwritten rows of the rings that the session's last
// logits depend on, so these cannot be had any more.
static void give_up(Session *s) {
    s->row = -1;
    s->m->paused_seq = -1;
}

static void end_answer(Session *s, EndReason end) {
    if (s->m->paused_seq == s->seq) give_up(s);
    s->saving = false;
    s->ending = true;
    s->end = end;
    s->issued_ahead = false;
}

// Adds to an event the text that the reply has gained: thoughts unchanged, content up to where a stop string may begin.
static void pass_text(Session *s, Event *e) {
    const TokReply *r = &s->reply;
    const size_t n = r->content.n - s->content, room = s->n_text + n + 2 * s->stops.longest + 1;
    if (room > s->text_room) {
        s->text = realloc(s->text, s->text_room = 2 * room);
        if (!s->text) die("out of memory: cannot allocate %zu bytes", s->text_room);
    }
    const size_t before = s->n_text;
    if (n) s->n_text += stops_push(&s->stops, r->content.s + s->content, n, s->text + s->n_text);
    if (e->kind == EVENT_END) s->n_text += stops_flush(&s->stops, s->text + s->n_text);
    s->passed += s->n_text - before;
    s->content = r->content.n;
    s->thought = r->thought.n;
    e->content = (TokStr){ s->text, s->n_text };
    e->thought = text_from(&r->thought, s->thought_start);
    e->ids = s->said.ids;
    e->n_ids = (int)s->said.n;
}

static void begin_event(Session *s, Event *e, EventKind kind) {
    *e = (Event){ .kind = kind };
    s->said.n = s->n_text = 0;
    s->thought_start = s->thought;
}

// The period of a loop at the end of ids (n): the last 96 tokens or four periods, whichever is more, repeat. 0: no
// loop.
static int loop_of(const int32_t *ids, int n) {
    for (int period = 1; period <= 64; period++) {
        const int span = max_int(4 * period, 96);
        int same = 0;
        while (n > span && same < span - period && ids[n - 1 - same] == ids[n - 1 - same - period]) same++;
        if (n > span && same == span - period) return period;
    }
    return 0;
}

static void tell_end(Session *s, Event *e) {
    const int made = min_int(s->turn.made, (int)s->held.n);            // tokens of the answer that are held
    begin_event(s, e, EVENT_END);
    e->end = s->end;
    e->error = s->end == END_ERROR ? s->err : NULL;
    if (!s->answering) return;
    if (tok_reply_end(s->t, &s->reply) < 0) die("%s", s->t->err);     // out of memory
    pass_text(s, e);
    s->reply.content.n = s->passed;
    s->turn.why = end_text[s->end];
    s->turn.end = s->end;
    s->turn.stop = s->stops.hit;
    s->turn.thought_tokens = s->thought_tokens;
    s->turn.loop = loop_of(s->held.ids + (int)s->held.n - made, made);
    set_times(s);
    s->answering = false;
}

// The thought has used up its budget: closes it, on a line of its own, as if the model had. Returns as
// tok_reply_push().
static int close_thought(Session *s) {
    Tokenizer *t = s->t;
    const size_t first = s->said.n;
    const TokStr last = tok_piece(t, s->said.ids[first - 1], false);
    int over = 0;
    if (!(last.n && last.s[last.n - 1] == '\n') && tok_encode(t, "\n", 1, TOK_PLAIN, &s->said) < 0) return -1;
    push_id(s->t, &s->said, t->channel_close);
    for (size_t i = first; i < s->said.n && !over; i++, s->turn.made++)
        over = tok_reply_push(t, &s->reply, s->said.ids[i]);
    return over;
}

// Removes from the cache accepted drafts that follow the last token of the answer.
static void drop_drafts(Session *s) {
    if (s->m->len[s->seq] > (int)s->held.n) shorten_session(s->m, s->seq, s->held.ids, (int)s->held.n);
}

// Makes room in a full context: keeps the first n_head tokens and the newest ones, which fill half of the room after
// the head; but none before the end of a picture, whose rows are not known any more. These run again, then the tokens
// said last (n). False: the head takes more than half of the context or has a picture, or those do not fit, so nothing
// was done.
static bool shift_context(Session *s, const int32_t *said, int n) {
    const int n_ctx = s->m->options.n_ctx, n_head = s->n_head, len = (int)s->held.n;
    int half = (n_ctx - n_head) / 2;
    if (n_head > n_ctx / 2 || half < n) return false;
    for (int i = 0; i < n_head; i++) if (s->held.ids[i] < 0) return false;
    for (int i = len - half; i < len; i++) if (s->held.ids[i] < 0) half = max_int(len - i - 2, 0);     // less its end
    drop_drafts(s);
    int32_t *ids = alloc_or_die((size_t)(n_head + half + n), sizeof *ids);
    memcpy(ids, s->held.ids, (size_t)n_head * sizeof *ids);
    memcpy(ids + n_head, s->held.ids + len - half, (size_t)half * sizeof *ids);
    memcpy(ids + n_head + half, said, (size_t)n * sizeof *ids);
    s->shifted = (Event){ .kind = EVENT_SHIFT, .dropped = len - n_head - half, .head = n_head, .kept = half };
    s->turn.shifts++;
    set_prompt(s, ids, n_head + half + n);
    free(ids);
    return true;
}

// Writes to s->err why the answer cannot continue in its form.
static void explain_form(Session *s) {
    Model *m = s->m;
    Grammar *g = s->options.grammar;
    const bool fits = !g->failed && s->state && grammar_mask(g, s->state, m->fitting, m->config.vocab);
    snprintf(s->err, sizeof s->err, "%s", g->failed ? g->err :
             fits ? "grammar: all tokens that the grammar allows are suppressed" :
             "grammar: a thought was closed where none may end");
}

// Advances the grammar by new tokens of the answer. False: s->err says why it cannot.
static bool follow_grammar(Session *s, const int32_t *ids, int n) {
    Grammar *g = s->options.grammar;
    bool ok = true;
    for (int i = 0; g && ok && i < n; i++) ok = grammar_advance(g, &s->state, ids[i]);
    if (!ok) explain_form(s);
    return ok;
}

// Adds the token that the model sampled to the answer and the event. It runs next, unless the answer ends here.
static void take_token(Session *s, int32_t token, Event *e) {
    const AnswerOptions *o = &s->options;
    Model *m = s->m;
    const size_t first = s->said.n;
    if (!s->turn.made) s->first_token = seconds();
    s->prompting = false;
    s->todo.n = 0;
    s->at = 0;
    if (token < 0) {
        if (o->grammar) explain_form(s);
        else snprintf(s->err, sizeof s->err, "%s: no token can be chosen at position %zu: the logits are NaN, so the "
                      "file is damaged, or every token is suppressed", m->gguf.path, s->held.n - 1);
        end_answer(s, END_ERROR);
        return;
    }
    if (!o->n_predict) {                               // the caller wanted the prompt to run, and no answer
        end_answer(s, END_LENGTH);
        return;
    }
    const int name = (int)s->thought_name.n;
    const bool thought_before = tok_reply_thinks(&s->reply);
    int over = o->ignore_eos && tok_is_stop(s->t, token) ? 0 : tok_reply_push(s->t, &s->reply, token);
    s->turn.made++;
    push_id(s->t, &s->said, token);
    const bool thinks = tok_reply_thinks(&s->reply);
    if (!thinks) s->named = 0;
    else if (thought_before && s->named < name) s->named++;
    else if (thought_before) s->thought_tokens++;
    if (!over && thinks && o->think_budget >= 0 && s->thought_tokens >= o->think_budget && s->named == name)
        over = close_thought(s);
    const int32_t *said = s->said.ids + first;
    const int n = (int)(s->said.n - first);
    if (over < 0) snprintf(s->err, sizeof s->err, "%s", s->t->err);
    if (over < 0 || !follow_grammar(s, said, n)) {
        end_answer(s, END_ERROR);
        return;
    }
    pass_text(s, e);
    if (s->stops.hit) end_answer(s, END_STOP_STRING);
    else if (over) end_answer(s, s->reply.finish == TOK_TOOL_CALLS ? END_CALLS : END_TURN);
    else if (s->turn.made >= o->n_predict && o->n_predict >= 0) end_answer(s, END_LENGTH);
    else if ((int)s->held.n + n > m->options.n_ctx) {
        if (!o->shift || !shift_context(s, said, n)) end_answer(s, END_CONTEXT);
    }
    for (int i = 0; i < n && !s->prompting; i++) push_id(s->t, &s->todo, said[i]);    // also if the answer has ended
    s->issued_ahead &= !s->ending && !s->prompting && n == 1;
}

// ==== [4] Drafts ====================================================================================================

// The most tokens that may be drafted after a text of n tokens, of which the answer has generated `made`.
static int room_for_drafts(const Session *s, int n, int made) {
    const AnswerOptions *o = &s->options;
    const int room = min_int(s->m->options.n_ctx - n, s->m->options.n_logits - 1);
    const int most = min_int(max_int(o->drafting.n_max, o->drafting.tree), room);
    return o->keep_logits ? 0 : o->n_predict < 0 ? most : min_int(most, o->n_predict - made - 1);
}

static SpecKind drafter_of(const Model *m) {
    return m->drafter->kind == DRAFTER_MTP ? SPEC_MTP : m->drafter->kind == DRAFTER_DFLASH ? SPEC_DFLASH : SPEC_OFF;
}

// Drafts the text that the grammar requires next, if it allows only one. This text is tokenized on its own; its last
// token may be the beginning of a longer one, so it is left out.
static void guess_grammar(Session *s, int most) {
    Speculator *g = &s->speculator;
    Grammar *grammar = s->options.grammar;
    GrammarState state = s->state;
    TokIds ids = { 0 };
    char text[128];
    size_t n = 0;
    for (int next = 0; next >= 0 && (int)ids.n < most; ) {
        next = n < sizeof text ? grammar_forced(grammar, state) : -1;
        if (next >= 0 && next < 256) text[n++] = (char)next;
        if (next < 0 || next >= 256) {
            if (tok_encode(s->t, text, n, TOK_PLAIN, &ids) < 0) die("%s", s->t->err);
            if (next < 0 && n) ids.n--;
            n = 0;
        }
        if (next >= 256) push_id(s->t, &ids, grammar->named[next - 256]);
        if (next >= 0) state = grammar_after_forced(grammar, state, next);
    }
    if (grammar->failed) grammar_recover(grammar, &s->state, 1);       // the answer may take another way
    g->n_grammar_ids = min_int((int)ids.n, most);
    if (g->n_grammar_ids) memcpy(g->grammar_ids, ids.ids, (size_t)g->n_grammar_ids * sizeof *g->grammar_ids);
    tok_ids_free(&ids);
}

// Drafts tokens that follow the one that runs next, if that one runs alone and the host knows it. rows: of other
// sessions.
static void draft(Session *s, int rows) {
    Speculator *g = &s->speculator;
    const double start = seconds();
    const int under_way = g->candidates.depth;              // drafts in the step that was issued ahead, if one was
    g->drafts.n = 0;
    if (g->options.kind == SPEC_OFF || s->prompting || s->todo.n != 1) return;
    push_id(s->t, &s->held, s->todo.ids[0]);              // only while it is looked up
    const int most = room_for_drafts(s, (int)s->held.n, s->turn.made);
    if (s->options.grammar && uses_grammar(&g->options)) guess_grammar(s, most);
    make_drafts(g, s->m->pace, drafter_of(s->m), s->held.ids, (int)s->held.n, most, rows);
    s->held.n--;
    if (s->issued_ahead && under_way) {
        g->candidates.depth = under_way;
        g->drafts.source = drafter_of(s->m);
        make_tree(&g->drafts, &g->candidates, under_way, 0);
    } else if (s->issued_ahead) {
        g->drafts.n = 0;
    }
    s->turn.drafts.draft_seconds += seconds() - start;
}

// Reads what the drafter has proposed after segment i of n: its best tokens at each depth.
static void read_candidates(const Model *m, int i, int n, int depth, Candidates *c) {
    const StepResult *v = m->result;
    const int width = m->options.draft_width;
    c->depth = depth, c->width = width;
    for (int d = 0; d < depth; d++)
        for (int k = 0; k < width; k++) {
            const size_t at = ((size_t)d * n + i) * width + k;
            c->id[d][k] = v->ids[at];
            c->logprob[d][k] = v->logits[at] - v->logsumexp[(size_t)d * n + i];
        }
}

static void count_drafts(Session *s, int right) {
    DraftCount *count = &s->turn.drafts;
    const Drafts *d = &s->speculator.drafts;
    for (int k = 0; k < min_int(d->depth, DRAFT_DEPTHS) && k <= right; k++)
        count->tried[k]++, count->accepted_at[k] += k < right;
    count->n_steps++;
    count->by_source[d->source]++;
    count->drafted += d->n;
    count->accepted += right;
}

// Takes the tokens that were sampled at the last token's row (`row` of logits) and along the accepted path of its
// drafts (path i). rows: of other sessions in the step.
static void take_tokens(Session *s, int i, int row, int rows, Event *e) {
    Speculator *g = &s->speculator;
    const StepResult *v = s->m->result;
    const int32_t *chosen = v->chosen + row, *path = v->path + (size_t)i * STEP_ROWS;
    const int right = g->drafts.n ? v->accepted[i] - 1 : 0;
    int taken = 0, at = 0;
    begin_event(s, e, EVENT_TOKEN);
    take_token(s, chosen[0], e);
    while (taken < right) {
        if (s->ending || s->prompting || s->todo.n != 1) break;        // it ended, or continues with other tokens
        push_id(s->t, &s->held, chosen[at]);
        at = g->drafts.branches ? path[++taken] : ++taken;
        take_token(s, chosen[at], e);
    }
    s->row = row + at;
    if (s->ending || s->prompting || s->todo.n != 1) g->candidates.depth = 0;
    if (!s->prompting) drop_drafts(s);
    if (g->drafts.n) count_drafts(s, right);
    speculator_learn(g, s->m->pace, drafter_of(s->m),
                     &(StepDone){ right, rows, s->step_seconds, s->draft_seconds, s->waited });
    g->drafts.n = 0;
}

// ==== [5] Steps of several sessions =================================================================================

// The length of the session at which its next snapshot is to be taken; INT_MAX: at none.
static int next_snapshot(const Session *s) {
    const int len = s->m->len[s->seq], every = s->prompting ? s->snapshot_every : 0;
    return min_int(s->checkpoint_at > len ? s->checkpoint_at : INT_MAX, every ? len - len % every + every : INT_MAX);
}

// Rows of the next step: of a prompt a chunk, which ends where a snapshot is to be taken. If rows see their whole
// picture, a chunk ends before a picture that it would cut, or has more rows.
static int next_rows(const Session *s) {
    const int n = (int)s->todo.n - s->at, most = min_int(min_int(n, next_snapshot(s) - s->m->len[s->seq]), s->chunk);
    const int32_t *ids = s->todo.ids + s->at;
    int rows = most;
    if (!s->has_pictures || !vision_whole_blocks(&s->m->config) || most == n) return most;
    while (in_picture(ids, rows)) rows--;
    if (rows) return rows;
    for (rows = most; in_picture(ids, rows); rows++) {}
    return rows;
}

static SessionState session_state(const Session *s) {
    return (SessionState){ .running = s->answering && !s->ending && !s->cancelled, .prompting = s->prompting,
                           .n_left = (int)s->todo.n - s->at, .n_next = next_rows(s), .work_done = s->worked };
}

enum { PATIENCE = 4 };        // steps without drafts after which the next one is issued ahead again

// True if steps of this answer are issued ahead: a device works by itself, and the caller does not look at each step.
static bool goes_ahead(const Session *s) {
    return s->m->ops->fence && !s->options.keep_logits && !s->m->dump_dir;
}

// True if the step after the one that was just sampled can be issued before the host knows its tokens, with `depth`
// drafts. False after a prompt: a discarded step is repaired by running the last token again, and a prompt's rows are
// rounded differently. False too if nothing follows.
static bool could_go_ahead(const Session *s, int depth) {
    const Model *m = s->m;
    const int n = s->options.n_predict, most = 2 + s->speculator.drafts.n + depth; // rows of the two steps
    return goes_ahead(s) && m->step.n_rows <= STEP_ROWS && m->len[s->seq] + most <= m->options.n_ctx &&
           (n < 0 || s->turn.made + most <= n) && !s->cancelled;
}

// True if it is to be issued then: all drafts come from the drafter, as a chain. N-grams or the grammar may have some.
static bool may_go_ahead(const Session *s, int depth) {
    const Speculator *g = &s->speculator;
    const bool reads = uses_ngrams(&g->options) || (uses_grammar(&g->options) && s->options.grammar);
    const bool as_wanted = g->options.kind == SPEC_OFF || g->idle_lookups >= PATIENCE || !reads;
    return could_go_ahead(s, depth) && g->depth == depth && as_wanted &&
           (!depth || (!g->options.tree && g->options.p_min <= 0));
}

// True if the session has an event to report without running anything; false if it has tokens to run.
static bool is_settled(Session *s, Event *e) {
    if (s->answering && s->cancelled && !s->ending) end_answer(s, END_CANCELLED);
    if (s->ending || !s->answering) {
        tell_end(s, e);
        return true;
    }
    *e = s->shifted;
    s->shifted.dropped = 0;
    return e->dropped > 0;
}

// The row of the next step for token i of those that are to run.
static StepRow prompt_row(const Session *s, int i) {
    const int at = (int)s->held.n + i - s->at;         // in the prompt
    StepRow row = { .token = s->todo.ids[i], .parent = -1, .output = i + 1 == (int)s->todo.n };
    for (int k = 0; row.token < 0 && !row.soft && k < s->n_pictures; k++) {
        const Picture *p = &s->pictures[k];
        if (at >= p->first + p->n) continue;
        row.soft = p->rows + (size_t)(at - p->first) * (size_t)s->m->config.dim;
        row.ahead = vision_whole_blocks(&s->m->config) ? p->first + p->n - 1 - at : 0;
    }
    return row;
}

// Writes the rows that n sessions run in the next step, a segment for each. Returns true if some are drafts.
static bool fill_rows(Session *const *sessions, StepSeg *segs, int n) {
    Model *m = sessions[0]->m;
    StepRow *row = m->step_rows;
    bool drafted = false;
    for (int i = 0; i < n; i++) {
        Session *s = sessions[i];
        const Drafts *d = &s->speculator.drafts;
        const int n_todo = next_rows(s);
        segs[i] = (StepSeg){ .seq = s->seq, .kind = d->n && d->branches ? SEG_TREE : SEG_CHAIN, .n = n_todo + d->n,
                             .rows = row,
                             .more = (int)s->todo.n - s->at - n_todo, .dense = s->has_pictures };
        for (int k = 0; k < n_todo; k++) *row++ = prompt_row(s, s->at + k);
        for (int k = 0; k < d->n; k++)
            *row++ = (StepRow){ .token = d->token[k], .parent = d->parent[k], .output = true };
        drafted |= d->n > 0;
    }
    return drafted;
}

// Decides for each session how many tokens the drafter is to propose after this step, and lists the sessions that want
// some. Returns the most.
static int ask_drafter(Session *const *sessions, const StepSeg *segs, int n_sessions, int32_t *drafting,
                       int *n_drafting) {
    Model *m = sessions[0]->m;
    int depth = 0;
    *n_drafting = 0;
    for (int k = 0; k < n_sessions; k++) {
        Session *s = sessions[k];
        Speculator *g = &s->speculator;
        const int n_todo = (int)s->todo.n - s->at, n = (int)s->held.n + n_todo + 1;
        const int room = min_int(room_for_drafts(s, n, s->turn.made + 1), m->options.draft_depth);
        const int most = segs[k].n - g->drafts.n < n_todo ? 0 : room;
        g->depth = choose_depth(g, m->pace, drafter_of(m), most, m->step.n_rows - segs[k].n);
        g->candidates.depth = 0;
        if (g->depth) drafting[(*n_drafting)++] = k;
        depth = max_int(depth, g->depth);
    }
    return depth;
}

// Issues the next step of n sessions before the host knows their tokens, each with `depth` drafts.
static void step_ahead(Model *m, StepSeg *segs, int n, int depth) {
    for (int i = 0; i < n; i++) {
        StepRow *rows = m->step_rows + (size_t)i * (1 + depth);
        for (int r = 0; r <= depth; r++) rows[r] = (StepRow){ .token = ON_DEVICE, .output = true };
        segs[i] = (StepSeg){ .seq = segs[i].seq, .kind = SEG_CHAIN, .n = 1 + depth, .rows = rows };
    }
    step(m, segs, n);
}

// Learns how long a step takes. A plain step that was not issued ahead, but could have been, takes longer than others.
static void add_step_of(const Session *s, int rows, bool issued_ahead, double seconds) {
    if (rows > 1 || issued_ahead || !goes_ahead(s)) add_step_time(s->m->pace, rows, seconds);
}

// Issues the rest of a step that began at `start`: sampling, commit, drafts. Then issues the next step ahead if it can,
// and waits for the result of this one. in_time: this one was issued ahead. Returns true if the next step is under way.
static bool finish_steps(Session *const *sessions, StepSeg *segs, int n, bool drafted, bool in_time, double start) {
    Model *m = sessions[0]->m;
    const Ops *op = m->ops;
    StepResult *v = m->result;
    int32_t drafting[MAX_SESSIONS];
    int n_drafting;
    const int depth = ask_drafter(sessions, segs, n, drafting, &n_drafting), n_rows = m->step.n_rows;
    bool ahead = n * (1 + depth) <= min_int(STEP_ROWS, m->options.n_logits) && (!drafted || depth);
    int kept = 0;                                      // rows of logits if all sessions have some
    for (int i = 0; i < n; i++) kept += 1 + sessions[i]->speculator.drafts.n;
    for (int i = 0; i < n; i++) ahead = ahead && kept == m->step.n_out && may_go_ahead(sessions[i], depth);
    if (drafted || depth) {
        const bool late = n_drafting && m->drafter->n_backlog[segs[drafting[0]].seq] > 8;      // it reads those first
        issue_verification(m, drafting, n_drafting, depth, NULL);
        if (ahead) step_ahead(m, segs, n, depth);
        read_result(m);
        if (n == 1 && n_rows <= STEP_ROWS) add_step_of(sessions[0], n_rows, in_time, v->verified - start);
        if (n_drafting == 1 && !late) add_draft_time(m->pace, drafter_of(m), depth, v->drafted - v->verified);
        for (int k = 0; k < n_drafting; k++)
            read_candidates(m, k, n_drafting, depth, &sessions[drafting[k]]->speculator.candidates);
        return ahead;
    }
    for (int i = 0; i < n; i++) v->accepted[i] = segs[i].n;
    finish_step(m, v->accepted, NULL, m->step.n_out > 0);
    if (m->step.n_out) op->copy(&(Copy){ v->chosen, m->s.chosen, (size_t)m->step.n_out * sizeof *v->chosen, COPY_OUT });
    if (ahead) {
        const int fence = op->fence();
        step_ahead(m, segs, n, 0);
        op->wait_for(fence);
    } else if (m->step.n_out) {
        op->wait();
    }
    return ahead;
}

// Sets the mask of each row of logits in the step under way: the tokens that may be sampled there. For an answer with a
// grammar these are the tokens that fit after the last token and after each draft; none after a draft that does not
// fit, and none if the grammar fails.
static void mask_rows(Session *const *sessions, const StepSeg *segs, int n) {
    Model *m = sessions[0]->m;
    const size_t words = round_up((size_t)m->config.vocab, 32) / 32;
    int row = 0;
    for (int i = 0; i < n; i++) {
        Session *s = sessions[i];
        const Drafts *d = &s->speculator.drafts;
        Grammar *g = s->options.grammar;
        GrammarState state[STEP_ROWS] = { s->state };
        if (s->at + segs[i].n - d->n < (int)s->todo.n) continue;       // a part of a prompt: nothing is sampled
        for (int k = 0; k <= d->n; k++) {
            if (!g) {
                mask_row(m, row++, NULL);
                continue;
            }
            if (k) state[k] = state[d->parent[k - 1]], grammar_advance(g, &state[k], d->token[k - 1]);
            grammar_keep_states(g, state, k + 1);
            if (!state[k] || !grammar_mask(g, state[k], m->fitting, m->config.vocab))
                memset(m->fitting, 0, words * sizeof *m->fitting);
            if (k && g->failed) grammar_recover(g, state, k), state[k] = 0;        // the draft may be rejected
            mask_row(m, row++, m->fitting);
        }
        s->state = state[0];
    }
}

static Event prompt_event(const Session *s) {
    return (Event){ .kind = EVENT_PROMPT, .done = s->at, .total = (int)s->todo.n };
}

// Runs the step of n sessions, or continues one that is paused. False: it was cancelled, or is paused between two
// layers, and event says so.
static bool run_step(Session *const *sessions, const StepSeg *segs, int n, Event *event) {
    Session *s = sessions[0];
    Model *m = s->m;
    const bool continues = n == 1 && m->paused_seq == s->seq, is_prompt = n == 1 && segs[0].n > STEP_ROWS;
    if (!continues) prepare_step(m, segs, n);
    assert(m->step.n_rows == segs[0].n || n > 1);
    m->stop = n == 1 ? &s->cancelled : NULL;
    const int end = run_prepared(m, is_prompt ? s->work : INFINITY);
    m->stop = NULL;
    if (is_prompt) s->worked = m->step.pass.work_done;
    if (is_prompt) m->paused_seq = end == PAUSED ? s->seq : -1;
    if (end == PAUSED) *event = prompt_event(s);
    if (end == STOPPED) give_up(s), is_settled(s, event);
    return end >= 0;
}

// Runs the next rows of n sessions in one step, and writes the event of each.
static void run_sessions(Session *const *sessions, Event *const *events, int n) {
    Model *m = sessions[0]->m;
    StepSeg segs[MAX_SESSIONS] = { { 0 } };
    int32_t n_todo[MAX_SESSIONS];
    int snapshot_at[MAX_SESSIONS];
    const double start = seconds();
    const bool drafted = fill_rows(sessions, segs, n);
    select_buffers(m, n == 1 && segs[0].n > STEP_ROWS);
    bool runs_already = m->step.ahead && m->step.n_segs == n;
    for (int i = 0; i < n; i++) {
        Session *s = sessions[i];
        n_todo[i] = segs[i].n - s->speculator.drafts.n;
        snapshot_at[i] = next_snapshot(s);
        const Segment *issued = &m->step.segs[i];
        runs_already = runs_already && s->issued_ahead && issued->seq == s->seq && issued->n == segs[i].n;
        s->turn.steps += !s->prompting;
        s->turn.read += s->prompting ? 0 : bytes_per_token(m, m->len[s->seq]);
    }
    if (!runs_already && !run_step(sessions, segs, n, events[0])) return;
    const int64_t step_number = m->step.number;
    const int n_step = m->step.n_rows;
    const double returned = m->pace->returned, began = runs_already || drafted ? returned : start;
    mask_rows(sessions, segs, n);                      // while a GPU computes
    const bool ahead = finish_steps(sessions, segs, n, drafted, runs_already, began);
    const double now = m->pace->returned = seconds();
    if (n == 1 && n_step == 1 && !sessions[0]->speculator.depth) add_step_of(sessions[0], 1, runs_already, now - began);
    for (int i = 0, row = 0; i < n; i++) {
        Session *s = sessions[i];
        const int n_rows = 1 + s->speculator.drafts.n;
        s->step_seconds = now - returned;
        s->draft_seconds = s->speculator.depth ? m->result->drafted - m->result->verified : 0;
        s->waited = s->waited && !runs_already;
        if (n_rows > 1) s->turn.drafts.verify_seconds += m->result->verified - began;
        if (s->speculator.depth) {
            const bool block = m->drafter->kind == DRAFTER_DFLASH;
            s->turn.drafts.draft_seconds += s->draft_seconds;
            s->turn.read += bytes_per_draft(m, m->len[s->seq]) * (block ? 1 : s->speculator.depth);
        }
        for (int r = 0; r < n_todo[i]; r++) push_id(s->t, &s->held, s->todo.ids[s->at++]);
        s->turn.n_run += s->prompting && !s->turn.shifts ? n_todo[i] : 0;
        s->issued_ahead = ahead;
        if (snapshot_at[i] == m->len[s->seq]) take_snapshot(s, s->at == (int)s->todo.n || isinf(s->work));
        if (s->at == (int)s->todo.n) {
            s->step = step_number;
            take_tokens(s, i, row, n_step - n_rows, events[i]);
            s->waited = !ahead && could_go_ahead(s, 0);
            row += n_rows;
        } else {
            *events[i] = prompt_event(s);
        }
    }
}

// Does one piece of work for each of n different sessions of one model, and reports it in events[i]: a chunk of a
// prompt, some layers of a chunk (Session.work), a part of a snapshot, or a token. Sessions with few rows share steps.
// A longer chunk has a step of its own, so that a session's events do not depend on the others. While one prompt is
// paused between two layers, other prompts wait.
static void sessions_next(Session *const *sessions, int n, Event *events) {
    Session *some[MAX_SESSIONS];
    Event *theirs[MAX_SESSIONS];
    int n_some = 0, rows = 0, wanted = 0;
    for (int i = 0; i < n; i++) {
        Session *s = sessions[i];
        Event *e = &events[i];
        if (is_settled(s, e)) continue;
        if (s->saving) {
            take_snapshot(s, isinf(s->work));
            *e = prompt_event(s);
            continue;
        }
        draft(s, rows);
        const int more = next_rows(s) + s->speculator.drafts.n;
        if (more > STEP_ROWS) {
            const bool waits = s->m->paused_seq >= 0 && s->m->paused_seq != s->seq;
            if (waits) *e = prompt_event(s);
            else run_sessions(&s, &e, 1);
            continue;
        }
        const int wants = 1 + s->speculator.drafts.n;
        if (n_some && (rows + more > STEP_ROWS || wanted + wants > s->m->options.n_logits)) {
            run_sessions(some, theirs, n_some);
            n_some = rows = wanted = 0;
        }
        some[n_some] = s;
        theirs[n_some++] = e;
        rows += more;
        wanted += wants;
    }
    if (n_some) run_sessions(some, theirs, n_some);
}

static void session_next(Session *s, Event *e) { sessions_next(&s, 1, e); }

// ==== [6] Without an answer: measuring, appending, logits ============================================================

// Times a step of n drafts of session 0, which is empty before and after it.
static void time_guesses(Model *m, int32_t id, int n) {
    const double start = seconds();
    for (int r = 0; r <= n; r++) m->step_rows[r] = (StepRow){ .token = id, .parent = r - 1, .output = true };
    step(m, &(StepSeg){ .seq = 0, .kind = SEG_CHAIN, .n = n + 1, .rows = m->step_rows }, 1);
    issue_verification(m, NULL, 0, 0, NULL);
    read_result(m);
    add_step_time(m->pace, n + 1, m->result->verified - start);
    reset_session(m, 0);
}

// Measures the time of steps and drafts of every depth, in session 0, which is empty. A backend that records steps
// takes longer until it has; that happens here and not in an answer that chooses its depth by these times.
static void measure_pace(Model *m, Tokenizer *t, const Drafting *how) {
    enum { RECORDED = 3, STEPS = 4 };                  // RECORDED: rounds before the one that counts
    const SpecKind who = drafter_of(m);
    const int most = min_int(how->n_max, who == SPEC_OFF ? m->options.n_logits - 1 : m->options.draft_depth);
    const int32_t id = t->bos >= 0 ? t->bos : 0;
    Session s;
    if (how->kind != SPEC_AUTO || !m->ops->fence || m->options.lazy_draft) return;
    init_session(&s, m, t, 0);
    for (int k = 0; k <= RECORDED; k++) {
        m->pace->step = m->pace->draft = (Times){ 0 };
        for (int n = 0; n <= most; n = next_depth(n, most)) {
            Event e = { .kind = EVENT_PROMPT };
            const AnswerOptions o = { .n_predict = -1, .ignore_eos = true, .think_budget = -1, .sampling.repeat = 1,
                                      .drafting = { .kind = n ? who : SPEC_OFF, .n_max = n } };
            for (int i = 0; n && who == SPEC_OFF && i < STEPS; i++) time_guesses(m, id, n);
            if (n && who == SPEC_OFF) continue;
            if (!session_start(&s, &(Prompt){ .ids = &id, .n = 1 }, &o)) die("%s", s.err);
            for (; e.kind != EVENT_END; session_next(&s, &e)) if (s.turn.steps >= STEPS) session_cancel(&s);
            session_forget(&s);
        }
    }
    free_session(&s);
    reset_session(m, 0);
}

static void session_append(Session *s, const int32_t *ids, int n, int n_later) {
    Model *m = s->m;
    for (int at = 0, rows; at < n; at += rows) {
        rows = min_int(m->options.n_batch, n - at);
        for (int i = 0; i < rows; i++)
            m->step_rows[i] = (StepRow){ .token = ids[at + i], .output = !n_later && at + i == n - 1 };
        step(m, &(StepSeg){ .seq = s->seq, .kind = SEG_CHAIN, .n = rows, .rows = m->step_rows,
                            .more = n - at - rows + n_later }, 1);
        commit_all(m);
        for (int i = 0; i < rows; i++) push_id(s->t, &s->held, ids[at + i]);
    }
    m->ops->wait();
    s->row = n_later ? -1 : 0;
    s->step = m->step.number;
}

static int session_append_rows(Session *s, const int32_t *ids, int n) {
    Model *m = s->m;
    const int rows = min_int(n, min_int(m->options.n_logits, STEP_ROWS));
    for (int i = 0; i < rows; i++) m->step_rows[i] = (StepRow){ .token = ids[i], .parent = -1, .output = true };
    step(m, &(StepSeg){ .seq = s->seq, .kind = SEG_CHAIN, .n = rows, .rows = m->step_rows }, 1);
    commit_all(m);
    for (int i = 0; i < rows; i++) push_id(s->t, &s->held, ids[i]);
    s->row = rows - 1;
    s->step = m->step.number;
    return rows;
}

static void session_row_logits(Session *s, int i, float *logits) { read_logits(s->m, i, logits); }

// If another step has run since, runs the token before the last one once more.
static bool session_logits(Session *s, float *logits) {
    Model *m = s->m;
    if (s->row < 0) return false;
    if (s->step == m->other.step.number) select_buffers(m, !m->prompt_buffers);
    if (s->step != m->step.number) {
        const int n = m->len[s->seq] - 1;
        const StepRow last = { .token = s->held.ids[n], .output = true };
        shorten_session(m, s->seq, s->held.ids, n);
        step(m, &(StepSeg){ .seq = s->seq, .kind = SEG_CHAIN, .n = 1, .rows = &last }, 1);
        commit_all(m);
        s->row = 0;
        s->step = m->step.number;
        s->issued_ahead = false;
    }
    read_logits(m, s->row, logits);
    return true;
}

static double read_density(Model *m) {
    int64_t n[2] = { 0 };
    if (!m->s.block_count) return 0;
    m->ops->copy(&(Copy){ n, m->s.block_count, sizeof n, COPY_OUT });
    m->ops->wait();
    m->ops->copy(&(Copy){ m->s.block_count, &(int64_t[2]){ 0 }, sizeof n, COPY_IN });
    return n[1] ? (double)n[0] / (double)n[1] : 0;
}

static double read_joules(const Model *m) { return m->ops->joules ? m->ops->joules() : -1; }

#endif
