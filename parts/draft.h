/* draft.h - draft models for speculative decoding (MTP assistants, DFlash block drafters), and verification of drafts.
 *
 * Uses load.h and the forward pass of gemma4.c. Begin with issue_draft() and issue_verification().
 *
 * A drafter is a small second model, made for one target model. It has its own file and weights, and its part of the
 * memory plan. It leaves the tokens that it drafts in backend memory, where the target's next step can read them.
 * general.architecture says which kind a drafter is; its sizes have to match the target's.
 *
 * MTP, the assistant of Gemma 4: four layers that compute queries only and attend to the target's caches. Its input is
 * the embedding of the last token together with the target's hidden row from which that token was sampled. It returns a
 * token and the next hidden row, so it can run again on its own output, once for each draft. All runs of it are at the
 * same position: the one after the last committed row. It stores nothing, so rejected drafts need no undo.
 *
 * DFlash: a few layers that draft a whole block of tokens in one pass. The rows of a block are the last token and then
 * mask tokens; each row predicts the token at its own place. The layers attend to a context, which is computed from the
 * target: the outputs of some target layers ("taps") are multiplied by one matrix, which gives one context row per
 * token, and each drafter layer stores its K and V of that row in a cache of its own. So the drafter has a length of
 * its own, and committed tokens have to be added to the context (drafter_committed). Attention depends on the distance
 * between rows only, so a context may begin anywhere in the text, and begins anew if rows of it are lost. K and V of a
 * block's rows are stored after the context, where the next rows overwrite them. Embeddings and head are the target's,
 * unless the file has some.
 *   [1] Types    [2] Files    [3] Memory    [4] Passes    [5] Verification */
#ifndef DRAFT_H
#define DRAFT_H

// ==== [1] Types =====================================================================================================

typedef enum { DRAFTER_NONE, DRAFTER_MTP, DRAFTER_DFLASH } DrafterKind;
enum { LAYERS_AT_ONCE = MAX_PRODUCTS / 2 };            // DFlash: one matmul computes K and V of so many layers

typedef struct Drafter {      // a small second model that drafts tokens for its target
    DrafterKind kind;
    Gguf     gguf;
    Binder  *binder;
    Config   config;          // MTP: its layers own no cache, kv_layer is -1
    Weights  weights;
    char     arch[64];        // general.architecture, the prefix of its keys
    bool     weights_uploaded;
    int      window[2];       // of full layers, of sliding layers: a row at position p reads rows > p - window; 0: all
    OwnMask  own[2];          // likewise: which rows of its own segment a row reads
    float    attention_scale;
    ActFn    activation;      // of the feed-forward network
    // an MTP assistant
    int      donor[MAX_LAYERS];        // (n_layers) the target's layer whose cache a layer reads
    Tensor   pre_projection;           // (dim, 2 * target's dim)
    Tensor   post_projection;          // (target's dim, dim)
    Tensor   centroids;                // (n_centroids, dim); data NULL: every token gets a logit
    int      n_centroids_used;
    int32_t *order;                    // (vocab) tokens sorted by centroid; on the host
    // a DFlash block drafter. It reads the outputs of the layers m->taps, which are next to each other in a row
    int      block_size, mask_id;      // rows of a block at most; the token of rows that are to be drafted
    float    embedding_scale;
    Tensor   fc;                       // (dim, n_taps * dim)
    const float *hidden_norm;          // (dim)
    int      context_start[MAX_SESSIONS];      // token of the session at position 0 of the drafter's context
    int      n_backlog[MAX_SESSIONS];  // last tokens of the session: their taps are in the backlog. Those before
                                       // them, from context_start on, are in the caches
    int      n_written[MAX_SESSIONS];  // end of the rows ever written, in tokens of the session; without
    int      n_draft_rows[MAX_SESSIONS];       // the rows of the last block
    // buffers in backend memory; n is n_seqs, DFlash: n_seqs * (1 + draft_depth), activations at most STEP_ROWS
    Row     *rows;                     // (n) MTP: row i drafts for segment i of segs
    Segment *segs;                     // (n_seqs)
    int32_t *target_segs;              // (n_seqs) the segment of the target's step that each segment drafts for
    int32_t *token_order;              // (vocab)
    Act      pair;                     // (n_seqs, 2 * target's dim) embedding and hidden row
    float   *x[2];                     // (n, dim)
    float   *q;                        // (n, n_heads * head_dim)
    Act      att_out, ffn;             // (n, n_heads * head_dim), (n, ffn_dim)
    float   *y, *mlp;                  // (n, dim) what attention and the feed-forward network add
    float   *hidden;                   // (n_seqs, target's dim) the next hidden row; DFlash: (depth, n_seqs, dim)
    float   *scores, *head_logits;     // (n_seqs, n_centroids), (n_seqs, tokens of the used centroids)
    // results for n segments, with the option draft_width
    int32_t *ids;                      // (depth, n, draft_width) in descending logit
    float   *logits, *logsumexp;       // (depth, n, draft_width), (depth, n)
    // DFlash: the context
    Cache    caches[MAX_LAYERS];       // (n_layers) rings
    int32_t *len;                      // (n_seqs) tokens of it in the caches
    double  *inv_freq;                 // (head_dim / 2)
    float   *backlog;                  // (n_seqs, STEP_ROWS, n_taps * dim)
    Row     *backlog_rows;             // (STEP_ROWS)
    Segment *backlog_seg;              // (1) the session whose backlog is added to the context
    int32_t *backlog_n;                // (1) rows of it
    float   *context;                  // (n_batch, dim)
    float   *k[LAYERS_AT_ONCE], *v[LAYERS_AT_ONCE];    // (n_batch, n_kv_heads * head_dim)
    struct { Row *rows; Segment *segs; int32_t *target_segs; } uploaded;     // as in Step
} Drafter;

typedef struct StepResult {   // the result of a verification step, on the host
    size_t   bytes;           // of all arrays but path, which follow each other from `accepted` on
    int32_t *accepted;        // (n_seqs) rows of each segment that were committed
    int32_t *chosen;          // (n_logits) the token sampled at every output row
    int32_t *path;            // (n_seqs, STEP_ROWS) which rows, for a TREE
    int32_t *ids;             // the next drafts: (depth, n, draft_width) ids, logits; (depth, n) logsumexp
    float   *logits, *logsumexp;
    int      n_segs, seq[MAX_SESSIONS];                // the segments, and their sessions
    int      commit_fence, end_fence;  // after the commit; after everything
    double   verified, drafted;        // seconds() when the host had waited for these fences
} StepResult;

// ==== [2] Files =====================================================================================================

enum { DFLASH_WINDOW = 32768 };         // of full layers

// Returns the kind of the drafter by its architecture. Dies on kinds that are not supported.
static DrafterKind drafter_kind(Drafter *d, const char *target) {
    static const char *const dflash[] = { "dflash", "gemma4-dflash-draft", "dflash-draft" };
    static const char *const others[][2] = { { "eagle3", "EAGLE-3" }, { "gemma4", "whole models as" } };
    Gguf *g = &d->gguf;
    GgufStr arch = { "", 0 };
    if (gguf_get_str(g, "general.architecture", &arch) < 0) die_gguf(g);
    snprintf(d->arch, sizeof d->arch, "%s", shown(arch));
    if (!strcmp(d->arch, "gemma4-assistant") || !strcmp(d->arch, "gemma4_assistant")) return DRAFTER_MTP;
    const char *kind = NULL;
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (!strcmp(d->arch, others[i][0])) kind = others[i][1];
    for (size_t i = 0; i < sizeof dflash / sizeof *dflash; i++) {
        if (strcmp(d->arch, dflash[i])) continue;
        if (gguf_find_tensor(g, "markov_w1.weight")) kind = "DSpark";
        else if (gguf_find_tensor(g, "selector_hidden.weight")) kind = "DFlash2";
        else return DRAFTER_DFLASH;
    }
    if (kind)
        die("%s: draft model for %s: %s draft models are not supported; try an MTP assistant", g->path, target, kind);
    die("%s: this is a %s model; expected a draft model for %s, gemma4-assistant or dflash (E_META_RANGE)", g->path,
        d->arch, target);
}

// Dies if a size of the drafter does not match the target's.
static void must_agree(const Model *m, const char *what, int64_t got, int64_t want) {
    if (got != want)
        die("%s: draft model for %s: %s: expected %" PRId64 ", got %" PRId64 "; try the draft model made for this "
            "model", m->drafter->gguf.path, m->gguf.path, what, want, got);
}

static const char *drafter_key(const Drafter *d, const char *key) { return arch_key(d->arch, key); }

// Files come in two dialects: returns the newer of two names, unless the file has only the older one.
static const char *either_tensor(const Drafter *d, const char *name, const char *older) {
    return !gguf_find_tensor(&d->gguf, name) && gguf_find_tensor(&d->gguf, older) ? older : name;
}

// Sets which of the target's caches each MTP layer reads: the last one of the same kind, sliding or global. Sizes of K
// and V are the target's. head_dim: of global layers, of sliding layers.
static void choose_donors(Model *m, const LayerKeys *keys, const int64_t *head_dim) {
    Drafter *d = m->drafter;
    Config *c = &d->config;
    const Config *t = &m->config;
    for (int l = 0; l < c->n_layers; l++) {
        const bool is_swa = keys->is_swa[l] != 0;
        int donor = t->first_shared - 1;
        while (donor >= 0 && t->layer[donor].is_swa != is_swa) donor--;
        if (donor < 0)
            die("%s: draft model for %s: layer %d reads a %s layer, but the model has none", d->gguf.path,
                m->gguf.path, l, is_swa ? "sliding" : "global");
        const LayerConfig *from = &t->layer[donor];
        must_agree(m, is_swa ? "head size of sliding layers" : "head size of global layers", head_dim[is_swa],
                   from->head_dim);
        must_agree(m, is_swa ? "KV heads of sliding layers" : "KV heads of global layers", keys->n_kv_heads[l],
                   from->n_kv_heads);
        if (c->n_heads % from->n_kv_heads)
            die("%s: key '%s': expected a multiple of %d KV heads, got %d (E_META_RANGE)", d->gguf.path,
                drafter_key(d, "attention.head_count"), from->n_kv_heads, c->n_heads);
        c->layer[l] = (LayerConfig){ .is_swa = is_swa, .head_dim = from->head_dim, .n_kv_heads = from->n_kv_heads,
                                     .ffn_dim = (int)keys->ffn_dim[l], .kv_layer = -1 };
        d->donor[l] = donor;
    }
}

static void load_mtp_config(Model *m) {
    Drafter *d = m->drafter;
    Gguf *g = &d->gguf;
    Config *c = &d->config;
    const Config *t = &m->config;
#define KEY(key) drafter_key(d, key)
    const int64_t older = key_int(g, KEY("n_embd_backbone"), -1, 1 << 20, -1);
    must_agree(m, "hidden size", older >= 0 ? older : key_int(g, KEY("embedding_length_out"), 1, 1 << 20, 0), t->dim);
    c->n_layers = (int)key_int(g, KEY("block_count"), 1, MAX_LAYERS, 0);
    c->dim      = (int)key_int(g, KEY("embedding_length"), 1, 1 << 20, 0);
    c->n_heads  = (int)key_int(g, KEY("attention.head_count"), 1, 1024, 0);
    c->eps      = (float)key_float(g, KEY("attention.layer_norm_rms_epsilon"), 0);
    c->rope_base     = key_float(g, KEY("rope.freq_base"), t->rope_base);
    c->rope_base_swa = key_float(g, KEY("rope.freq_base_swa"), t->rope_base_swa);
    c->rope_factor   = load_rope_factor(g, d->arch, t->rope_factor);
    d->window[1] = (int)key_int(g, KEY("attention.sliding_window"), 1, MAX_CONTEXT, t->n_swa);
    must_agree(m, "sliding window", d->window[1], t->n_swa);
    int64_t head_dim[2];
    head_dim[0] = key_int(g, KEY("attention.key_length"), 1, MAX_HEAD_DIM, 0);
    head_dim[1] = key_int(g, KEY("attention.key_length_swa"), 1, MAX_HEAD_DIM, 0);
#undef KEY
    LayerKeys keys;
    load_layer_keys(g, d->arch, c->n_layers, false, &keys);
    choose_donors(m, &keys, head_dim);
    d->own[0] = d->own[1] = OWN_NONE;
    d->attention_scale = 1;
    d->activation = ACT_GELU;
}

// Copies the order of the tokens by centroid to d->order, and checks that every token occurs once.
static void load_centroid_order(Drafter *d, const GgufTensor *order, const char *name) {
    const int vocab = d->config.vocab;
    const bool wide = order->type == GGUF_I64;
    if (!(wide || order->type == GGUF_I32) || order->ne[0] != (uint64_t)vocab ||
        order->size != (uint64_t)vocab * (wide ? 8 : 4))
        die("%s: tensor '%s': expected %d values of type I32, got %" PRIu64 " of %s (E_SHAPE)", d->gguf.path, name,
            vocab, order->ne[0], gguf_type_name(order->type));
    d->binder->status[order - d->gguf.tensors] = BOUND;
    d->order = alloc_or_die(vocab, sizeof *d->order);
    char *taken = alloc_or_die(vocab, 1);
    for (int i = 0; i < vocab; i++) {
        int64_t id = 0;
        memcpy(&id, order->data + (size_t)i * (wide ? 8 : 4), wide ? 8 : 4);        // little-endian, not negative
        if (id < 0 || id >= vocab || taken[id])
            die("%s: tensor '%s': expected every token once, got %" PRId64 " at %d (E_PAYLOAD)", d->gguf.path, name,
                id, i);
        taken[id] = 1;
        d->order[i] = (int32_t)id;
    }
    free(taken);
}

// Binds the head of small assistants, which computes logits of the tokens of the nearest centroids only; if the file
// has it.
static void bind_centroids(Model *m) {
    Drafter *d = m->drafter;
    Gguf *g = &d->gguf;
    const char *name = either_tensor(d, "masked_embd_centroids.weight", "mtp.centroids.weight");
    const char *order_name = either_tensor(d, "masked_embd_ordering", "mtp.token_ordering.weight");
    const int vocab = d->config.vocab;
    const GgufTensor *t = find_tensor(d->binder, name), *order = find_tensor(d->binder, order_name);
    if (!t || !order || !key_int(g, drafter_key(d, "use_ordered_embeddings"), 0, 1, 1)) return;
    const uint64_t n = t->ne[1];
    if (n < 1 || n > (uint64_t)vocab || (uint64_t)vocab % n)
        die("%s: tensor '%s': expected a number of rows that divides the vocabulary of %d, got %" PRIu64 " (E_SHAPE)",
            g->path, name, vocab, n);
    if (!m->ops->head_centroid)
        die("%s: tensor '%s': the %s backend does not support centroid heads", g->path, name, m->ops->name);
    bind_scaled(d->binder, &d->centroids, name, (int)n, d->config.dim, 1);
    const int per_centroid = vocab / (int)n;           // so many centroids have draft_width tokens at least:
    const int min_used = (m->options.draft_width + per_centroid - 1) / per_centroid;
    d->n_centroids_used = (int)key_int(g, drafter_key(d, "centroid_top_k"), min_used, (int64_t)n,
                                       max_int(min_used, min_int(32, (int)n)));
    load_centroid_order(d, order, order_name);
}

static void bind_mtp(Model *m) {
    Drafter *d = m->drafter;
    Binder *b = d->binder;
    Config *c = &d->config;
    Weights *w = &d->weights;
    const Weights *t = &m->weights;
    const GgufTensor *embd = gguf_find_tensor(b->g, "token_embd.weight");
    if (!embd) die("%s: tensor 'token_embd.weight': missing (E_TENSOR_MISSING)", b->g->path);
    if (!m->ops->pair) die("%s: the %s backend does not support MTP draft models", b->g->path, m->ops->name);
    must_agree(m, "vocabulary", (int64_t)embd->ne[1], m->config.vocab);
    c->vocab = m->config.vocab;
    bind_scaled(b, &w->token_embd, "token_embd.weight", c->vocab, c->dim, 1);  // the head; embeddings: the target's
    bind_vector(b, &w->output_norm, "output_norm.weight", c->dim);
    bind_scaled(b, &d->pre_projection, either_tensor(d, "nextn.pre_projection.weight", "mtp.pre_projection.weight"),
                c->dim, 2 * m->config.dim, 1);
    bind_scaled(b, &d->post_projection, either_tensor(d, "nextn.post_projection.weight", "mtp.post_projection.weight"),
                m->config.dim, c->dim, 1);
    for (int l = 0; l < c->n_layers; l++) bind_layer(b, c, &w->layer[l], l);
    bind_centroids(m);

    // RoPE has to rotate the queries as the target rotates its keys.
    const double base[2] = { c->rope_base, c->rope_base_swa };
    for (int l = 0; l < c->n_layers; l++) {
        const LayerConfig *lc = &c->layer[l];
        const int s = lc->is_swa;
        const bool has_factors = !s && find_tensor(b, "rope_freqs.weight");
        const float *factors = has_factors ? host_vector(b, "rope_freqs.weight", lc->head_dim / 2) : NULL;
        if (s || has_factors) bind_rope(b, w, s, base[s], lc->head_dim, factors, s ? 1 : c->rope_factor);
        if ((s || has_factors) && (w->n_pairs[s] != t->n_pairs[s] ||
                                   memcmp(w->inv_freq[s], t->inv_freq[s], (size_t)t->n_pairs[s] * sizeof(double))))
            die("%s: draft model for %s: expected the model's own RoPE of %s layers, got another one; try the draft "
                "model "
                "made for this model", b->g->path, m->gguf.path, s ? "sliding" : "global");
    }
}

// Sets m->taps, the target's layers whose outputs a DFlash drafter reads. Mainline files (llama.cpp) number the inputs
// of layers instead: the input of layer v is the output of layer v - 1. first: the number of layer 0's output.
static void load_taps(Model *m, const char *key, int first) {
    Drafter *d = m->drafter;
    Gguf *g = &d->gguf;
    int64_t ids[MAX_LAYERS];
    const GgufKv *kv = gguf_find_kv(g, key);
    if (!kv || kv->type != GGUF_V_ARRAY || kv->count < 1 || kv->count > MAX_LAYERS)
        die("%s: key '%s': expected 1 to %d layers of %s that it reads; without them it cannot run (E_META_MISSING)",
            g->path, key, MAX_LAYERS, m->gguf.path);
    m->taps.n = (int)kv->count;
    if (gguf_get_ints(g, key, INT_MIN, INT_MAX, ids, kv->count) < 0) die_gguf(g);
    for (int i = 0; i < m->taps.n; i++) {
        const int64_t layer = ids[i] - first;
        if (layer < 0 || layer >= m->config.n_layers)
            die("%s: draft model for %s: key '%s': expected %d to %d, as the model has %d layers, got %" PRId64 "; try "
                "the draft model made for this model", g->path, m->gguf.path, key, first,
                m->config.n_layers - 1 + first, m->config.n_layers, ids[i]);
        m->taps.layer[i] = (int)layer;
        m->taps.end = max_int(m->taps.end, (int)layer + 1);
    }
}

static void load_dflash_layers(Model *m, int head_dim) {
    Drafter *d = m->drafter;
    Config *c = &d->config;
    LayerKeys keys;
    for (int l = 0; l < c->n_layers; l++) keys.is_swa[l] = l < c->n_layers - 1;  // if the file has no pattern
    load_layer_keys(&d->gguf, d->arch, c->n_layers, true, &keys);
    for (int l = 0; l < c->n_layers; l++) {
        const int n_kv_heads = (int)keys.n_kv_heads[l];
        check_kv_heads(&d->gguf, d->arch, l, c->n_heads, n_kv_heads);
        c->layer[l] = (LayerConfig){ .is_swa = keys.is_swa[l] != 0, .head_dim = head_dim, .n_kv_heads = n_kv_heads,
                                     .ffn_dim = (int)keys.ffn_dim[l], .kv_layer = l, .last_reader = l };
    }
}

// Reads keys in the mainline dialect (llama.cpp) or in an older one. Defaults are the values of published drafters.
static void load_dflash_config(Model *m) {
    Drafter *d = m->drafter;
    Gguf *g = &d->gguf;
    Config *c = &d->config;
    const Config *t = &m->config;
    const bool older = strcmp(d->arch, "dflash") != 0;
#define KEY(key) drafter_key(d, key)
#define EITHER(key, older_key) drafter_key(d, older ? older_key : key)
    must_agree(m, "hidden size", key_int(g, KEY("embedding_length"), 1, 1 << 20, 0), t->dim);
    must_agree(m, "vocabulary", key_int(g, KEY("vocab_size"), 1, INT_MAX, t->vocab), t->vocab);
    c->dim = t->dim;
    c->vocab = t->vocab;
    c->n_layers  = (int)key_int(g, KEY("block_count"), 1, MAX_LAYERS, 0);
    c->n_heads   = (int)key_int(g, KEY("attention.head_count"), 1, 1024, 0);
    c->eps       = (float)key_float(g, KEY("attention.layer_norm_rms_epsilon"), 0);
    const char *cap = EITHER("final_logit_softcapping", "dflash.logit_softcap");
    c->logit_cap = gguf_find_kv(g, cap) ? (float)key_float(g, cap, 0) : t->logit_cap;
    c->rope_base = key_float(g, KEY("rope.freq_base"), 0);
    c->rope_factor = load_rope_factor(g, d->arch, 1);
    d->window[0]  = DFLASH_WINDOW;
    d->window[1]  = (int)key_int(g, EITHER("attention.sliding_window", "dflash.sliding_window"), 1, MAX_CONTEXT, 2048);
    d->block_size = (int)key_int(g, EITHER("block_size", "dflash.block_size"), 2, STEP_ROWS, 0);
    d->mask_id    = (int)key_int(g, older ? KEY("dflash.mask_token_id") : "tokenizer.ggml.mask_token_id", 0,
                                 t->vocab - 1, -1);
    d->embedding_scale = (float)key_float(g, KEY("embedding_scale"), sqrt(c->dim));
    const int head_dim = (int)key_int(g, KEY("attention.key_length"), 32, MAX_HEAD_DIM, 0);
    if (head_dim % 32 || key_int(g, KEY("attention.value_length"), 1, INT_MAX, head_dim) != head_dim)
        die("%s: keys '%s' and value_length: expected the same multiple of 32 (E_META_RANGE)", g->path,
            KEY("attention.key_length"));
    d->attention_scale = (float)key_float(g, KEY("attention.scale"), 1 / sqrt(head_dim));
    const int64_t causal = key_int(g, KEY("attention.causal"), -1, 1, -1);         // -1: only sliding layers are causal
    d->own[0] = causal == 1 ? OWN_CAUSAL : OWN_ALL;
    d->own[1] = causal == 0 ? OWN_ALL : OWN_CAUSAL;
    GgufStr activation = { "silu", 4 };
    if (gguf_get_str(g, KEY("hidden_activation"), &activation) < 0) die_gguf(g);
    if (!str_is(activation, "silu"))
        die("%s: key '%s': expected silu, got '%s' (E_META_RANGE)", g->path, KEY("hidden_activation"),
            shown(activation));
    d->activation = ACT_SILU;
    load_dflash_layers(m, head_dim);
    load_taps(m, EITHER("target_layers", "dflash.target_layer_ids"), !older);
#undef EITHER
#undef KEY
}

static void bind_dflash_layer(Binder *b, const Config *c, LayerWeights *w, int l) {
    const LayerConfig *lc = &c->layer[l];
    const int q_dim = c->n_heads * lc->head_dim, kv_dim = lc->n_kv_heads * lc->head_dim, dim = c->dim;
    char name[80];
    if (find_tensor(b, NAME("attn_sinks.weight")))
        die("%s: tensor '%s': draft models with attention sinks are not supported", b->g->path, name);
    bind_vector(b, &w->attn_norm, NAME("attn_norm.weight"), dim);
    bind_scaled(b, &w->attn_q, NAME("attn_q.weight"), q_dim, dim, 1);
    bind_scaled(b, &w->attn_k, NAME("attn_k.weight"), kv_dim, dim, 1);
    if (find_tensor(b, NAME("attn_v.weight"))) bind_scaled(b, &w->attn_v, name, kv_dim, dim, 1);
    bind_blocks(b, c, w, l, true);
}
#undef NAME

static void bind_dflash(Model *m) {
    Drafter *d = m->drafter;
    Binder *b = d->binder;
    Config *c = &d->config;
    Weights *w = &d->weights;
    const char *fc = either_tensor(d, "fc.weight", either_tensor(d, "dflash.fc.weight", "dflash_fc.weight"));
    const char *norm = either_tensor(d, "enc.output_norm.weight",
                                     either_tensor(d, "dflash.hidden_norm.weight", "dflash_hidden_norm.weight"));
    const GgufTensor *t = find_tensor(b, fc);
    if (t) must_agree(m, "columns of fc, tapped layers times hidden size", (int64_t)t->ne[0],
                      (int64_t)m->taps.n * c->dim);
    if (find_tensor(b, "d2t"))
        die("%s: tensor 'd2t': draft models with their own vocabulary are not supported", b->g->path);
    bind_scaled(b, &d->fc, fc, c->dim, m->taps.n * c->dim, 1);
    bind_vector(b, &d->hidden_norm, norm, c->dim);
    bind_vector(b, &w->output_norm, "output_norm.weight", c->dim);
    if (find_tensor(b, "token_embd.weight")) bind_table(b, &w->token_embd, "token_embd.weight", c->vocab, c->dim);
    if (find_tensor(b, "output.weight")) bind_scaled(b, &w->output, "output.weight", c->vocab, c->dim, 1);
    const int head_dim = c->layer[0].head_dim;
    const bool has_factors = find_tensor(b, "rope_freqs.weight") != NULL;
    bind_rope(b, w, 0, c->rope_base, head_dim, has_factors ? host_vector(b, "rope_freqs.weight", head_dim / 2) : NULL,
              c->rope_factor);
    for (int l = 0; l < c->n_layers; l++) bind_dflash_layer(b, c, &w->layer[l], l);
}

// ==== [3] Memory ====================================================================================================

enum { MTP_DEPTH = 8 };       // tokens drafted at once, by default

// Opens, checks and binds a drafter. Requires: the target's tensors are bound.
static void open_drafter(Model *m, const char *path) {
    Drafter *d = m->drafter;
    Binder *b = d->binder;
    open_model_file(&d->gguf, path, false);
    d->kind = drafter_kind(d, m->gguf.path);
    const bool is_block = d->kind == DRAFTER_DFLASH;
    if (is_block) load_dflash_config(m);
    else load_mtp_config(m);
    if (!m->options.draft_depth) m->options.draft_depth = is_block ? d->block_size - 1 : MTP_DEPTH;
    if (is_block) m->options.draft_depth = min_int(m->options.draft_depth, d->block_size - 1);
    b->g = &d->gguf;
    b->status = alloc_or_die(d->gguf.n_tensors, 1);
    b->uploads = alloc_or_die(d->gguf.n_tensors, sizeof *b->uploads);
    d->weights.layer = alloc_or_die(d->config.n_layers, sizeof *d->weights.layer);
    if (is_block) bind_dflash(m);
    else bind_mtp(m);
    const size_t n_seqs = (size_t)m->options.n_seqs;
    d->uploaded.rows = alloc_or_die(n_seqs * (1 + (size_t)m->options.draft_depth), sizeof *d->uploaded.rows);
    d->uploaded.segs = alloc_or_die(n_seqs, sizeof *d->uploaded.segs);
    d->uploaded.target_segs = alloc_or_die(n_seqs, sizeof *d->uploaded.target_segs);
}

static void free_drafter(Drafter *d) {
    if (d->kind == DRAFTER_NONE) return;
    free(d->binder->status);
    free(d->binder->uploads);
    free(d->weights.layer);
    free(d->order);
    free(d->uploaded.rows);
    free(d->uploaded.segs);
    free(d->uploaded.target_segs);
    gguf_close(&d->gguf);
}

static int centroid_tokens(const Drafter *d) {         // tokens that get a logit; 0: all, there are no centroids
    return d->centroids.data ? d->n_centroids_used * (d->config.vocab / d->centroids.rows) : 0;
}

// Activations of both kinds, for n rows at a time.
static void plan_draft_rows(Drafter *d, Arena *a, size_t n) {
    const Config *c = &d->config;
    const size_t dim = (size_t)c->dim, f = sizeof(float);
    size_t q_dim = 0, ffn_dim = 0;
    Forms att_out = { 0 }, ffn = { 0 };
    for (int l = 0; l < c->n_layers; l++) {
        add_reader(&att_out, &d->weights.layer[l].attn_output);
        add_reader(&ffn, &d->weights.layer[l].ffn_down);
        q_dim = (size_t)max_int((int)q_dim, c->n_heads * c->layer[l].head_dim);
        ffn_dim = (size_t)max_int((int)ffn_dim, c->layer[l].ffn_dim);
    }
    for (int i = 0; i < 2; i++) d->x[i] = take(a, n * dim, f);
    d->q = take(a, n * q_dim, f);
    d->att_out = take_act(a, att_out, n, q_dim);
    d->y = take(a, n * dim, f);
    d->ffn = take_act(a, ffn, n, ffn_dim);
    d->mlp = take(a, n * dim, f);
}

static void plan_mtp(Model *m, Arena *a) {
    Drafter *d = m->drafter;
    const Config *c = &d->config;
    const size_t n = (size_t)m->options.n_seqs, target_dim = (size_t)m->config.dim, f = sizeof(float);
    d->rows = take(a, n, sizeof(Row));
    Forms pair = { 0 };
    add_reader(&pair, &d->pre_projection);
    d->pair = take_act(a, pair, n, 2 * target_dim);
    plan_draft_rows(d, a, n);
    d->hidden = take(a, n * target_dim, f);
    if (!d->centroids.data) return;
    d->token_order = take(a, (size_t)c->vocab, sizeof(int32_t));
    d->scores = take(a, n * (size_t)d->centroids.rows, f);
    d->head_logits = take(a, n * (size_t)centroid_tokens(d), f);
}

static int draft_window(const Drafter *d, int l) { return d->window[d->config.layer[l].is_swa]; }

static void plan_dflash(Model *m, Arena *a) {
    Drafter *d = m->drafter;
    const Config *c = &d->config;
    const ModelOptions *o = &m->options;
    const size_t n_seqs = (size_t)o->n_seqs, n_batch = (size_t)o->n_batch, dim = (size_t)c->dim, f = sizeof(float);
    const size_t n = n_seqs * (1 + (size_t)o->draft_depth), taps = (size_t)m->taps.n * dim;
    const KvType type = o->k_type == KV_F32 ? KV_F32 : KV_F16;
    size_t kv_dim = 0;
    d->rows = take(a, n, sizeof(Row));
    plan_draft_rows(d, a, n < STEP_ROWS ? n : STEP_ROWS);
    d->hidden = take(a, n_seqs * (size_t)o->draft_depth * dim, f);
    for (int l = 0; l < c->n_layers; l++) {
        const LayerConfig *lc = &c->layer[l];
        Cache k = { .n_seqs = o->n_seqs, .n_kv_heads = lc->n_kv_heads, .head_dim = lc->head_dim,
                    .k = { .type = type, .dim = lc->head_dim }, .v = { .type = type, .dim = lc->head_dim } };
        k.slots = (int)round_up((size_t)min_int(o->n_ctx, draft_window(d, l) - 1) + STEP_ROWS, TILE_SLOTS);
        take_cache(a, &k);
        d->caches[l] = k;
        kv_dim = (size_t)max_int((int)kv_dim, lc->n_kv_heads * lc->head_dim);
    }
    d->len = take(a, n_seqs, sizeof(int32_t));
    d->inv_freq = take(a, (size_t)d->weights.n_pairs[0], sizeof(double));
    d->backlog = take(a, n_seqs * STEP_ROWS * taps, f);
    d->backlog_rows = take(a, STEP_ROWS, sizeof(Row));
    d->backlog_seg = take(a, 1, sizeof(Segment));
    d->backlog_n = take(a, 1, sizeof(int32_t));
    d->context = take(a, n_batch * dim, f);
    for (int i = 0; i < LAYERS_AT_ONCE; i++) d->k[i] = take(a, n_batch * kv_dim, f);
    for (int i = 0; i < LAYERS_AT_ONCE; i++) d->v[i] = take(a, n_batch * kv_dim, f);
}

static void plan_drafter(Model *m, Arena *a) {
    Drafter *d = m->drafter;
    const size_t n = (size_t)m->options.n_seqs, before = a->used;
    for (int i = 0; i < d->binder->n_uploads; i++) {
        Upload *u = &d->binder->uploads[i];
        const size_t bytes = m->ops->weight_bytes(&u->tensor);
        u->dst = bytes ? take(a, bytes, 1) : NULL;
    }
    d->segs = take(a, n, sizeof(Segment));
    d->target_segs = take(a, n, sizeof(int32_t));
    if (d->kind == DRAFTER_MTP) plan_mtp(m, a);
    else plan_dflash(m, a);
    d->ids = m->s.next ? m->s.next + n : NULL;
    d->logits = m->s.found_logits;
    d->logsumexp = m->s.found_logsumexp;
    m->plan.drafter = a->used - before;
}

static void upload_drafter(Model *m) {
    Drafter *d = m->drafter;
    for (int i = 0; i < d->binder->n_uploads; i++) {
        Upload *u = &d->binder->uploads[i];
        upload(m->ops, &d->gguf, u, u->dst);
    }
    d->weights_uploaded = true;
}

// Writes what does not change to the drafter's memory.
static void start_drafter(Model *m) {
    Drafter *d = m->drafter;
    Row rows[STEP_ROWS] = { { 0 } };
    _Static_assert((int)MAX_SESSIONS <= (int)STEP_ROWS, "one row for each session");
    if (!m->options.lazy_draft) upload_drafter(m);
    if (d->kind == DRAFTER_DFLASH) {
        for (int i = 0; i < STEP_ROWS; i++) rows[i] = (Row){ .index = i, .depth = i };
        m->ops->copy(&(Copy){ d->backlog_rows, rows, STEP_ROWS * sizeof *rows, COPY_IN });
        m->ops->copy(&(Copy){ d->inv_freq, d->weights.inv_freq[0], (size_t)d->weights.n_pairs[0] * sizeof(double),
                              COPY_IN });
        return;
    }
    for (int i = 0; i < MAX_SESSIONS; i++) rows[i].seg = i;            // row i drafts for segment i
    m->ops->copy(&(Copy){ d->rows, rows, (size_t)m->options.n_seqs * sizeof *rows, COPY_IN });
    if (d->order) m->ops->copy(&(Copy){ d->token_order, d->order, (size_t)d->config.vocab * sizeof *d->order,
                                        COPY_IN });
}

// ==== [4] Passes ====================================================================================================

// A layer of a drafter, on the rows of b. It is a layer of the target with these differences. MTP: it has no K and V;
// it reads the committed rows of its donor's cache. DFlash: each row also reads rows of its own block; V may be the K
// projection; norms of the blocks' outputs may be missing.
static void draft_layer(Model *m, int l, const Batch *b, In *stream) {
    Drafter *d = m->drafter;
    const Config *c = &d->config;
    const LayerWeights *w = &d->weights.layer[l];
    const bool is_swa = c->layer[l].is_swa, stores_kv = w->attn_k.data != NULL, has_v = w->attn_v.data != NULL;
    const Cache *cache = stores_kv ? &d->caches[l] : &m->caches[m->cache_of[d->donor[l]]];
    const Rope rope = stores_kv ? (Rope){ d->inv_freq, d->weights.n_pairs[0] } :
                               (Rope){ m->s.inv_freq[is_swa], m->weights.n_pairs[is_swa] };
    const Act att_out = act_for(&w->attn_output, d->att_out), ffn = act_for(&w->ffn_down, d->ffn);
    const int n = b->n_rows;

    Matmul qkv = { .n_rows = n, .in = stream_input(d->x, stream, w->attn_norm) };
    add_product(&qkv, &w->attn_q, d->q);
    if (stores_kv) add_product(&qkv, &w->attn_k, d->k[0]);
    if (has_v) add_product(&qkv, &w->attn_v, d->v[0]);
    m->ops->matmul(&qkv);
    const QkvStore store = { .batch = b, .cache = cache, .n_heads = c->n_heads, .q = d->q,
                             .k = stores_kv ? d->k[0] : NULL, .v = has_v ? d->v[0] : stores_kv ? d->k[0] : NULL,
                             .w_q = w->attn_q_norm, .w_k = w->attn_k_norm, .v_norm = !has_v, .rope = rope,
                             .eps = c->eps };
    m->ops->attend(&(Attend){ .batch = b, .cache = cache, .n_heads = c->n_heads, .q = d->q,
                              .window = draft_window(d, l), .own = d->own[is_swa], .scale = d->attention_scale,
                              .store = &store, .out = att_out });
    multiply(m, n, (In){ .act = att_out }, &w->attn_output, d->y);
    add_to_stream(stream, d->y, w->post_attention_norm);

    m->ops->gate_up(&(GateUp){ .n_rows = n, .in = stream_input(d->x, stream, w->ffn_norm), .gate = &w->ffn_gate,
                               .up = &w->ffn_up, .fn = d->activation, .out = ffn });
    multiply(m, n, (In){ .act = ffn }, &w->ffn_down, d->mlp);
    add_to_stream(stream, d->mlp, w->post_ffw_norm);
    stream->scale = w->layer_output_scale;
}

// Computes the candidates of draft k from the stream after the last layer.
static void mtp_head(Model *m, int k, int n, In stream) {
    Drafter *d = m->drafter;
    const int width = m->options.draft_width;
    int32_t *ids = d->ids + (size_t)k * n * width;
    float *logits = d->logits + (size_t)k * n * width, *logsumexp = d->logsumexp + (size_t)k * n;
    if (d->centroids.data)
        m->ops->head_centroid(&(HeadCentroid){ .n_rows = n, .in = stream, .centroids = &d->centroids,
                                               .w = &d->weights.token_embd, .order = d->token_order,
                                               .n_used = d->n_centroids_used, .scores = d->scores,
                                               .logits = d->head_logits, .top_k = width, .top_ids = ids,
                                               .top_logits = logits, .logsumexp = logsumexp });
    else
        m->ops->head(&(Head){ .n_rows = n, .in = stream, .w = &d->weights.token_embd, .top_k = width, .top_ids = ids,
                              .top_logits = logits, .logsumexp = logsumexp });
}

// Drafts `depth` tokens for each of n segments, one pass for each token.
static void draft_mtp(Model *m, int n, int depth) {
    Drafter *d = m->drafter;
    const State *s = &m->s;
    const int width = m->options.draft_width;
    const Batch b = { .rows = d->rows, .segs = d->segs, .len = s->len, .n_rows = n, .n_segs = n };
    const Act pair = act_for(&d->pre_projection, d->pair);
    In stream = { 0 };
    for (int k = 0; k < depth; k++) {
        Pair begin = { .n_rows = n, .table = &m->weights.token_embd, .scale = sqrtf((float)m->config.dim),
                       .of = d->target_segs, .tokens = s->next, .token_stride = 1, .hidden = s->hidden, .row = s->last,
                       .out = pair };
        if (k) {                                       // continue from the last pass: its token and hidden row
            multiply(m, n, stream, &d->post_projection, d->hidden);
            begin.of = begin.row = NULL;
            begin.tokens = d->ids + (size_t)(k - 1) * n * width;
            begin.token_stride = width;
            begin.hidden = d->hidden;
        }
        m->ops->pair(&begin);
        multiply(m, n, (In){ .act = pair }, &d->pre_projection, d->x[0]);
        stream = (In){ .x = d->x[0], .scale = 1, .eps = d->config.eps };
        for (int l = 0; l < d->config.n_layers; l++) draft_layer(m, l, &b, &stream);
        stream.w_pre = d->weights.output_norm;
        mtp_head(m, k, n, stream);
    }
}

// The number of first rows of a batch that the last ones would overwrite in the ring of layer l.
static int rows_lost(const Drafter *d, int l, const Batch *b) {
    return b->n_segs == 1 ? max_int(0, b->n_rows - d->caches[l].slots) : 0;
}

// Adds rows to the contexts of their sessions: stores a row of K and V in every layer. taps (n_rows, n_taps * dim) are
// the target's outputs for these rows. Of each segment n_accept rows are committed. A segment with more rows than a
// ring holds is the only one of the batch; its last rows are stored.
static void extend_context(Model *m, const Batch *b, const float *taps, const int32_t *n_accept, const int32_t *path) {
    Drafter *d = m->drafter;
    const Config *c = &d->config;
    multiply(m, b->n_rows, (In){ .x = taps, .scale = 1 }, &d->fc, d->context);
    for (int l = 0, n; l < c->n_layers; l += n) {
        const int skip = rows_lost(d, l, b);
        Batch last = *b;
        last.rows += skip;
        last.n_rows -= skip;
        Matmul kv = { .n_rows = last.n_rows, .in = { .x = d->context + (size_t)skip * (size_t)c->dim, .scale = 1,
                                                     .w_pre = d->hidden_norm, .eps = c->eps } };
        for (n = 0; n < LAYERS_AT_ONCE && l + n < c->n_layers && rows_lost(d, l + n, b) == skip; n++) {
            const LayerWeights *w = &d->weights.layer[l + n];
            add_product(&kv, &w->attn_k, d->k[n]);
            if (w->attn_v.data) add_product(&kv, &w->attn_v, d->v[n]);
        }
        m->ops->matmul(&kv);
        for (int i = 0; i < n; i++) {
            const LayerWeights *w = &d->weights.layer[l + i];
            const bool has_v = w->attn_v.data != NULL;
            m->ops->qkv_store(&(QkvStore){ .batch = &last, .cache = &d->caches[l + i], .n_heads = c->n_heads,
                                           .k = d->k[i], .v = has_v ? d->v[i] : d->k[i], .w_k = w->attn_k_norm,
                                           .v_norm = !has_v, .rope = { d->inv_freq, d->weights.n_pairs[0] },
                                           .eps = c->eps });
        }
    }
    m->ops->kv_commit(&(KvCommit){ .batch = b, .caches = d->caches, .n_caches = c->n_layers, .n_accept = n_accept,
                                   .path = path });
}

// What else the operations that extend a context depend on: StepKey.variant. CONTEXT_PATHS is a flag; the session is
// added to CONTEXT_BACKLOG.
enum { CONTEXT_KNOWN, CONTEXT_WALKED, CONTEXT_PATHS = 2, CONTEXT_BACKLOG = 4 };

static void count_written(Drafter *d, int seq, int end) { d->n_written[seq] = max_int(d->n_written[seq], end); }

// Adds the backlog of a session, which ends at token `end`, to its context. The pass has as many rows as the next power
// of two, so that few kinds of steps are recorded; the rows after the backlog are not committed.
static void flush_backlog(Model *m, int seq, int end) {
    Drafter *d = m->drafter;
    const int32_t n_backlog = d->n_backlog[seq];
    int n = 1;
    if (!n_backlog) return;
    while (n < n_backlog) n *= 2;
    const Segment seg = { .seq = seq, .n = n };
    m->ops->copy(&(Copy){ d->backlog_seg, &seg, sizeof seg, COPY_IN });
    m->ops->copy(&(Copy){ d->backlog_n, &n_backlog, sizeof n_backlog, COPY_IN });
    const Batch b = { .rows = d->backlog_rows, .segs = d->backlog_seg, .len = d->len, .n_rows = n, .n_segs = 1 };
    const size_t taps = (size_t)m->taps.n * (size_t)d->config.dim;
    if (m->ops->begin((StepKey){ .model = m->number + 1, .kind = STEP_COMMIT, .rows = n, .segs = 1,
                                 .variant = CONTEXT_BACKLOG + seq }))
        extend_context(m, &b, d->backlog + (size_t)seq * STEP_ROWS * taps, d->backlog_n, NULL);
    m->ops->end();
    count_written(d, seq, end - n_backlog + n);
    d->n_backlog[seq] = 0;
}

// Copies the taps of the first n rows of a segment, a chain that ends at token `end` of its session, to the backlog. If
// the backlog is full, it is added to the context first; if the weights are not uploaded yet, it is dropped.
static void add_to_backlog(Model *m, const Segment *seg, int n, int end) {
    Drafter *d = m->drafter;
    const int seq = seg->seq;
    const size_t taps = (size_t)m->taps.n * (size_t)d->config.dim;
    if (d->n_backlog[seq] + n > STEP_ROWS && d->weights_uploaded) flush_backlog(m, seq, end - n);
    if (d->n_backlog[seq] + n > STEP_ROWS) {
        d->n_backlog[seq] = 0;
        d->context_start[seq] = end - n;
    }
    const size_t at = (size_t)seq * STEP_ROWS + (size_t)d->n_backlog[seq];
    if (n) move_rows(m, n, (int)taps, m->s.tapped + (size_t)seg->first * taps, (int)taps, NULL, d->backlog + at * taps,
                     (int)taps);
    d->n_backlog[seq] += n;
}

// Adds the committed rows of the last step to the contexts of a DFlash drafter. Call it after every kv_commit and
// before the next step. n_accept: committed rows of each segment; the host has counted them in m->len, and they and the
// paths of trees are in m->s too. NULL: the host does not know them yet, m->s.walked and .path have them in backend
// memory.
//   Short chains, known to the host, go to the backlog: they are added when a draft is needed.
//   If the weights of a lazy drafter are not uploaded yet, the rows of a long prompt are dropped: the context begins
//   after them.
//   All others are added at once.
static void drafter_committed(Model *m, const int32_t *n_accept) {
    Drafter *d = m->drafter;
    State *s = &m->s;
    bool postpone = n_accept != NULL, trees = false;
    if (d->kind != DRAFTER_DFLASH) return;
    for (int i = 0; i < m->step.n_segs; i++) {
        trees |= m->step.segs[i].kind == SEG_TREE;
        postpone = postpone && !trees && n_accept[i] <= STEP_ROWS;
    }
    const bool drop = n_accept && !postpone && !d->weights_uploaded;
    if (!postpone && !drop && !d->weights_uploaded) upload_drafter(m);
    for (int i = 0; i < m->step.n_segs; i++) {
        const Segment *seg = &m->step.segs[i];
        const int seq = seg->seq, before = m->len[seq] - (n_accept ? n_accept[i] : 0);
        assert(m->step.n_segs == 1 || seg->n <= STEP_ROWS);
        count_written(d, seq, before + d->n_draft_rows[seq]);
        d->n_draft_rows[seq] = 0;
        if (postpone) {
            add_to_backlog(m, seg, n_accept[i], m->len[seq]);
        } else if (drop) {
            d->context_start[seq] = m->len[seq];
            d->n_backlog[seq] = 0;
        } else {
            flush_backlog(m, seq, before);
            count_written(d, seq, before + seg->n);
        }
    }
    if (postpone || drop) return;
    const Batch b = step_batch(m, d->len);
    const StepKind kind = m->step.n_rows > STEP_ROWS ? STEP_PROMPT : STEP_COMMIT;
    const int32_t variant = (n_accept ? CONTEXT_KNOWN : CONTEXT_WALKED) | (trees ? CONTEXT_PATHS : 0);
    if (m->ops->begin((StepKey){ .model = m->number + 1, .kind = kind, .rows = m->step.n_rows, .segs = m->step.n_segs,
                                 .variant = variant }))
        extend_context(m, &b, s->tapped, n_accept ? s->n_accept : s->walked, trees ? s->path : NULL);
    m->ops->end();
}

// Cuts the context of session seq back to n tokens. If rows that are needed are overwritten, or the context does not
// cover these tokens, a new context begins after them.
static void shorten_drafter(Model *m, int seq, int n) {
    Drafter *d = m->drafter;
    if (d->kind != DRAFTER_DFLASH) return;
    const int stored = m->len[seq] - d->n_backlog[seq];
    const int written = max_int(d->n_written[seq], m->len[seq] + d->n_draft_rows[seq]);
    bool keeps = n > d->context_start[seq] && n <= m->len[seq];
    for (int l = 0; l < d->config.n_layers && n < stored; l++) {
        const int slots = d->caches[l].slots;
        if (slots < written - d->context_start[seq] && written - n > slots - (draft_window(d, l) - 1)) keeps = false;
    }
    d->n_written[seq] = keeps ? written : n;
    d->n_draft_rows[seq] = 0;
    if (!keeps) d->context_start[seq] = n;
    d->n_backlog[seq] = keeps ? max_int(0, n - stored) : 0;
    const int32_t len = n - d->n_backlog[seq] - d->context_start[seq];
    m->ops->copy(&(Copy){ d->len + seq, &len, sizeof len, COPY_IN });
}

// Drafts `depth` tokens for each of n segments: a block of 1 + depth rows each, as many blocks in a pass as fit into
// STEP_ROWS rows. All rows but the first of each block are the input of the head; they are gathered in d->hidden. The
// rows of a single block follow each other already, so they are read in place.
static void draft_dflash(Model *m, int n, int depth) {
    Drafter *d = m->drafter;
    const int dim = d->config.dim, block = 1 + depth, max_blocks = STEP_ROWS / block;
    const Weights *w = &d->weights, *target = &m->weights;
    const Tensor *head = w->output.data ? &w->output : target->output.data ? &target->output : &target->token_embd;
    In in = { .x = d->hidden, .scale = 1, .eps = d->config.eps };
    move_rows(m, n, 1, m->s.next, 1, d->target_segs, &d->rows->token, block * (int)(sizeof(Row) / sizeof(int32_t)));
    for (int first = 0; first < n; first += max_blocks) {
        const int n_blocks = min_int(max_blocks, n - first);
        const Batch b = { .rows = d->rows + (size_t)first * (size_t)block, .segs = d->segs, .len = d->len,
                          .n_rows = n_blocks * block, .n_segs = n };
        m->ops->embed(&(Embed){ .batch = &b, .table = w->token_embd.data ? &w->token_embd : &target->token_embd,
                                .scale = d->embedding_scale, .out = d->x[0] });
        In stream = { .x = d->x[0], .scale = 1, .eps = d->config.eps };
        for (int l = 0; l < d->config.n_layers; l++) draft_layer(m, l, &b, &stream);
        if (n == 1) {
            in = stream;
            in.x += dim;
            in.delta[0] += dim;
            break;
        }
        m->ops->close(&(Close){ .n_rows = b.n_rows, .cols = dim, .in = stream_input(d->x, &stream, NULL) });
        for (int i = 0; i < n_blocks; i++)
            move_rows(m, depth, dim, stream.x + (size_t)(i * block + 1) * (size_t)dim, dim, NULL,
                      d->hidden + (size_t)(first + i) * (size_t)dim, n * dim);
    }
    in.w_pre = w->output_norm;
    m->ops->head(&(Head){ .n_rows = n * depth, .in = in, .w = head, .cap = d->config.logit_cap,
                          .top_k = m->options.draft_width, .top_ids = d->ids, .top_logits = d->logits,
                          .logsumexp = d->logsumexp });
}

// Issues the drafting of `depth` tokens for n segments of the last step. segs: their numbers, on the host. Requires:
// the step's tokens are sampled, verified and committed. The results are m->drafter->ids, .logits (depth, n,
// draft_width) and .logsumexp (depth, n), in backend memory.
static void issue_draft(Model *m, const int32_t *segs, int n, int depth) {
    Drafter *d = m->drafter;
    const bool is_block = d->kind == DRAFTER_DFLASH;
    const int rows = is_block ? 1 + depth : 1;         // for each segment
    Segment draft_segs[MAX_SESSIONS];
    assert(d->kind != DRAFTER_NONE && n >= 1 && n <= m->step.n_segs && depth >= 1 && depth <= m->options.draft_depth);
    if (!d->weights_uploaded) upload_drafter(m);
    for (int i = 0; i < n; i++) {
        const Segment *seg = &m->step.segs[segs[i]];
        draft_segs[i] = (Segment){ .seq = seg->seq, .first = i * rows, .n = rows, .kind = SEG_CHAIN };
        if (!is_block) continue;
        flush_backlog(m, seg->seq, m->len[seg->seq]);
        d->n_draft_rows[seg->seq] = max_int(d->n_draft_rows[seg->seq], rows);
    }
    if (is_block) {
        Row block[MAX_SESSIONS * STEP_ROWS];
        for (int r = 0; r < n * rows; r++)
            block[r] = (Row){ .token = d->mask_id, .seg = r / rows, .index = r % rows, .depth = r % rows };
        upload_changes(m, d->rows, d->uploaded.rows, block, (size_t)(n * rows) * sizeof *block);
    }
    upload_changes(m, d->segs, d->uploaded.segs, draft_segs, (size_t)n * sizeof *draft_segs);
    upload_changes(m, d->target_segs, d->uploaded.target_segs, segs, (size_t)n * sizeof *segs);
    if (m->ops->begin((StepKey){ .model = m->number + 1, .kind = STEP_DRAFT, .rows = n * rows, .segs = n,
                                 .out_rows = depth })) {
        if (is_block) draft_dflash(m, n, depth);
        else draft_mtp(m, n, depth);
    }
    m->ops->end();
}

// ==== [5] Verification ==============================================================================================

// Fills s.last, s.walked and s.path as if the first forced[i] rows of segment i, in which every row is an output row,
// had been accepted. In a tree they have to follow each other.
static void force_acceptance(Model *m, const int32_t *forced) {
    const size_t n_seqs = (size_t)m->options.n_seqs;
    int32_t last_and_walked[2 * MAX_SESSIONS] = { 0 };
    for (int i = 0; i < m->step.n_segs; i++) {
        last_and_walked[i] = m->step.segs[i].first + forced[i] - 1;
        last_and_walked[n_seqs + (size_t)i] = forced[i];
    }
    m->ops->copy(&(Copy){ m->s.last, last_and_walked, 2 * n_seqs * sizeof *last_and_walked, COPY_IN });
    int32_t path[STEP_ROWS];
    for (int r = 0; r < STEP_ROWS; r++) path[r] = r;
    for (int i = 0; i < m->step.n_segs; i++)
        if (m->step.segs[i].kind == SEG_TREE)
            m->ops->copy(&(Copy){ m->s.path + (size_t)i * STEP_ROWS, path, sizeof path, COPY_IN });
}

// Issues the rest of a step that has drafts, or that drafts follow: samples a token at every output row, accepts drafts
// while they equal the sampled tokens, commits the accepted rows, and drafts `depth` tokens for n of the segments
// (segs: their numbers). The host does not wait between these; read_result() waits for the result. forced: for
// measurements, the number of rows to accept of each segment; NULL: verify.
static void issue_verification(Model *m, const int32_t *segs, int n, int depth, const int32_t *forced) {
    const Ops *op = m->ops;
    State *s = &m->s;
    StepResult *v = m->result;
    const Batch all = step_batch(m, s->len);
    bool trees = false;
    v->n_segs = m->step.n_segs;
    for (int i = 0; i < m->step.n_segs; i++) {
        trees |= m->step.segs[i].kind == SEG_TREE;
        v->seq[i] = m->step.segs[i].seq;
    }
    int32_t *path = trees ? s->path : NULL;
    if (forced) force_acceptance(m, forced);
    if (op->begin((StepKey){ .model = m->number, .kind = STEP_SAMPLE, .rows = m->step.n_rows, .segs = m->step.n_segs,
                             .logits = m->step.n_out, .out_rows = forced != NULL,
                             .variant = trees ? WALKS_PATHS : WALKS_CHAINS })) {
        if (m->step.n_out) issue_sample(m);
        if (forced) move_rows(m, m->step.n_segs, 1, s->chosen, 1, s->last, s->next, 1);
        else op->verify_walk(&(VerifyWalk){ .batch = &all, .out_rows = s->out_rows, .n_out = m->step.n_out,
                                            .chosen = s->chosen, .n_accept = s->walked, .path = path, .last = s->last,
                                            .next = s->next });
        issue_commit(m, s->walked, path);
    }
    op->end();
    if (trees) op->copy(&(Copy){ v->path, s->path, (size_t)m->step.n_segs * STEP_ROWS * sizeof *v->path, COPY_OUT });
    if (op->fence) v->commit_fence = op->fence();
    else v->verified = seconds();
    drafter_committed(m, NULL);
    if (n && depth) issue_draft(m, segs, n, depth);
    op->copy(&(Copy){ v->accepted, s->walked, v->bytes, COPY_OUT });
    if (op->fence) v->end_fence = op->fence();
}

// Waits for the result of issue_verification(), and adds the accepted rows to the host's copy of the lengths. The next
// step may have been issued already.
static void read_result(Model *m) {
    const Ops *op = m->ops;
    StepResult *v = m->result;
    if (op->fence) op->wait_for(v->commit_fence);
    if (op->fence) v->verified = seconds();
    if (op->fence) op->wait_for(v->end_fence);
    else op->wait();
    v->drafted = seconds();
    for (int i = 0; i < v->n_segs; i++) m->len[v->seq[i]] += v->accepted[i];
    for (int i = 0; m->step.ahead && i < m->step.n_segs; i++) {        // the next step writes from the new ends on
        const Segment *seg = &m->step.segs[i];
        m->n_written[seg->seq] = max_int(m->n_written[seg->seq], m->len[seg->seq] + seg->n);
    }
}

#endif
