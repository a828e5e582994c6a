/* plan.h - the memory plan: how much backend memory everything gets, and loading a model into it.
 *
 * Uses load.h, draft.h and vision.h. Begin with plan_memory() and load_model().
 * All backend memory of a model and its drafter, except the backend's own scratch, is planned here and reserved in one
 * piece at start. Activations have n_batch rows; n_batch and the context are chosen so that the plan fits into memory.
 *   [1] The plan    [2] Loading    [3] Reading ahead */
#ifndef PLAN_H
#define PLAN_H

// ==== [1] The plan ==================================================================================================

// A row of a quantised type consists of whole groups; a tied row has one type.
static void check_kv_types(const Model *m, int layer, const Cache *c) {
    const KvPlane *planes[] = { &c->k, &c->v };
    if (c->n_rot && c->k.type != c->v.type)
        die("-ctk, -ctv: expected the same type, since layer %d stores K and V as one row, got %s and %s; try "
            "--kv-layout "
            "untied", layer, kv_names[c->k.type], kv_names[c->v.type]);
    for (int i = 0; i < 2; i++)
        if (kv_group(planes[i]->type) && planes[i]->dim % KV_ROTATION)
            die("%s: a cache of type %s: expected rows of a multiple of %d values, got %d in layer %d; try -ctk f16%s",
                m->gguf.path, kv_names[planes[i]->type], KV_ROTATION, planes[i]->dim, layer,
                c->n_rot ? " or --kv-layout untied" : "");
}

// The caches of all layers that own one, and the staging rows of prompts.
static void plan_caches(Model *m, Arena *a) {
    const Config *c = &m->config;
    const ModelOptions *o = &m->options;
    const KvType ring_type = o->ring_type != KV_F32 ? o->ring_type : o->k_type == KV_F32 ? KV_F32 : KV_F16;
    int staging_dim = 0;                               // values of a row of all heads, in the widest ring
    m->n_caches = 0;
    for (int l = 0; l < c->first_shared; l++) {
        const LayerConfig *lc = &c->layer[l];
        const LayerWeights *w = &m->weights.layer[l];
        Cache cache = { .n_seqs = o->n_seqs, .n_kv_heads = lc->n_kv_heads, .head_dim = lc->head_dim };
        cache.slots = (int)round_up((size_t)o->n_ctx + STEP_ROWS, TILE_SLOTS);
        cache.k = (KvPlane){ .type = o->k_type, .dim = lc->head_dim };
        cache.v = (KvPlane){ .type = o->v_type, .dim = lc->head_dim };
        if (lc->is_swa) {
            cache.slots = min_int(cache.slots, (int)round_up((size_t)c->n_swa - 1 + STEP_ROWS, TILE_SLOTS));
            cache.k.type = cache.v.type = ring_type;
            staging_dim = max_int(staging_dim, lc->n_kv_heads * lc->head_dim);
        } else if (!w->attn_v.data && !o->untied) {
            cache.n_rot = m->weights.n_pairs[0];
            cache.k.dim = 2 * cache.n_rot;
            cache.fold = w->attn_k_norm;
        }
        check_kv_types(m, l, &cache);
        if (!lc->is_swa && o->tail && (kv_group(cache.k.type) || kv_group(cache.v.type))) {
            cache.tail_reach = (int)round_up((size_t)o->tail, TILE_SLOTS);
            cache.tail_slots = min_int(cache.slots, cache.tail_reach + (int)round_up((size_t)o->n_batch, TILE_SLOTS));
            cache.k_tail = (KvPlane){ .type = KV_F16, .dim = cache.k.dim };
            cache.v_tail = (KvPlane){ .type = KV_F16, .dim = cache.v.dim };
        }
        const size_t before = a->used;
        take_cache(a, &cache);
        *(lc->is_swa ? &m->plan.kv_rings : &m->plan.kv_global) += a->used - before;
        m->cache_of[l] = m->n_caches;
        m->caches[m->n_caches++] = cache;
    }
    for (int l = c->first_shared; l < c->n_layers; l++) m->cache_of[l] = m->cache_of[c->layer[l].kv_layer];

    const size_t before = a->used;
    const KvPlane staging = { .type = ring_type, .dim = staging_dim };
    m->staging = (Cache){ .n_seqs = 1, .n_kv_heads = 1, .slots = (int)round_up(o->n_batch, TILE_SLOTS), .k = staging,
                          .v = staging };
    take_cache(a, &m->staging);
    m->plan.staging = a->used - before;
}

// ---- the buffers of State ----

// What the shapes of buffers are made of. Of those from S_N_EXPERTS on, a 0 means that the model or the options do not
// need the buffer: it stays NULL.
typedef enum {
    S_ONE, S_TWO, S_STREAM_ROWS, S_BATCH_ROWS, S_OUT_ROWS, S_SEQS, S_DRAFTS, S_CANDIDATES, S_NEXT, S_DECODE_ROWS, S_DIM,
    S_Q_DIM, S_KV_DIM, S_FFN_DIM, S_VOCAB, S_MASK_WORDS, S_PAIRS, S_PAIRS_SWA,
    S_N_EXPERTS, S_N_USED, S_EXPERT_DIM, S_HAS_EXPERTS, S_PLE_DIM, S_PLE_ROW, S_TAPS_ROW, S_PENALTIES, S_BIAS, S_DUMP,
    S_SPARSE, S_SPARSE_ROWS, S_N_BLOCKS, S_N_HEADS, S_KV_HEADS, S_HEAD_DIM, S_SCORING, S_KEYS, N_SIZES
} Size;

// The matrices that read an activation decide its forms: f32, int8, or both.
typedef enum { NOT_READ, BY_ATTN_OUTPUT, BY_FFN_DOWN, BY_EXPERTS_DOWN, BY_PROJ, N_READERS } Readers;

typedef struct {
    size_t  field, bytes;     // offset in State; of an element
    Readers readers;          // of an Act; NOT_READ: the field is a pointer
    Size    shape[4];
} StateBuffer;

#define BUFFER(field, type, ...) { offsetof(State, field), sizeof(type), NOT_READ, { __VA_ARGS__ } }
#define ACTIVATION(field, readers, ...) { offsetof(State, field), 0, readers, { __VA_ARGS__ } }

// What lasts from one layer to the next: prompts have buffers of their own for these, with ModelOptions.interleave.
static const StateBuffer stream_buffers[] = {
    BUFFER(rows, Row, S_STREAM_ROWS),
    BUFFER(out_rows, Row, S_OUT_ROWS),
    BUFFER(segs, Segment, S_SEQS),
    BUFFER(out_index, int32_t, S_OUT_ROWS),
    BUFFER(x[0], float, S_STREAM_ROWS, S_DIM),
    BUFFER(x[1], float, S_STREAM_ROWS, S_DIM),
    BUFFER(y, float, S_STREAM_ROWS, S_DIM),
    BUFFER(mlp, float, S_STREAM_ROWS, S_DIM),
    BUFFER(moe, float, S_STREAM_ROWS, S_DIM, S_HAS_EXPERTS),
    BUFFER(ple, float, S_STREAM_ROWS, S_PLE_ROW),
    BUFFER(ple_out, float, S_OUT_ROWS, S_PLE_ROW),
    BUFFER(logits, float, S_OUT_ROWS, S_VOCAB),
    BUFFER(hidden, float, S_OUT_ROWS, S_DIM),
    BUFFER(tapped, float, S_STREAM_ROWS, S_TAPS_ROW),
};

static const StateBuffer step_buffers[] = {
    BUFFER(len, int32_t, S_SEQS),
    BUFFER(n_accept, int32_t, S_SEQS),
    BUFFER(path, int32_t, S_SEQS, S_DECODE_ROWS),
    BUFFER(last, int32_t, S_TWO, S_SEQS),                  // the second half is s->walked. From there to
                                                           // found_logsumexp the
    BUFFER(chosen, int32_t, S_OUT_ROWS),                 // buffers follow each other: one copy reads a StepResult
    BUFFER(next, int32_t, S_NEXT),
    BUFFER(found_logits, float, S_CANDIDATES),
    BUFFER(found_logsumexp, float, S_DRAFTS),
    BUFFER(token_source, int32_t, S_DECODE_ROWS),
    BUFFER(q, float, S_BATCH_ROWS, S_Q_DIM),
    BUFFER(k, float, S_BATCH_ROWS, S_KV_DIM),
    BUFFER(v, float, S_BATCH_ROWS, S_KV_DIM),
    ACTIVATION(att_out, BY_ATTN_OUTPUT, S_BATCH_ROWS, S_Q_DIM),
    ACTIVATION(ffn, BY_FFN_DOWN, S_BATCH_ROWS, S_FFN_DIM),
    ACTIVATION(expert, BY_EXPERTS_DOWN, S_BATCH_ROWS, S_N_USED, S_EXPERT_DIM),
    BUFFER(router, float, S_BATCH_ROWS, S_N_EXPERTS),
    BUFFER(expert_weights, float, S_BATCH_ROWS, S_N_USED),
    BUFFER(expert_ids, int32_t, S_BATCH_ROWS, S_N_USED),
    ACTIVATION(ple_gate, BY_PROJ, S_BATCH_ROWS, S_PLE_DIM),
    BUFFER(dump[0], float, S_BATCH_ROWS, S_DUMP),
    BUFFER(dump[1], float, S_BATCH_ROWS, S_DUMP),
    BUFFER(dump[2], float, S_BATCH_ROWS, S_DUMP),
    BUFFER(dump[3], float, S_BATCH_ROWS, S_DUMP),
    BUFFER(dump[4], float, S_BATCH_ROWS, S_DUMP),
    BUFFER(mask, uint32_t, S_OUT_ROWS, S_MASK_WORDS),
    BUFFER(params, SampleParams, S_SEQS),
    BUFFER(counts, int32_t, S_SEQS, S_VOCAB, S_PENALTIES),
    BUFFER(bias, float, S_SEQS, S_VOCAB, S_BIAS),
    BUFFER(inv_freq[0], double, S_PAIRS),
    BUFFER(inv_freq[1], double, S_PAIRS_SWA),
    BUFFER(blocks.n, int32_t, S_SPARSE_ROWS, S_KV_HEADS),
    BUFFER(blocks.block, int32_t, S_SPARSE_ROWS, S_KV_HEADS, S_N_BLOCKS),
    BUFFER(block_means, float, S_SEQS, S_KV_HEADS, S_N_BLOCKS, S_HEAD_DIM),
    BUFFER(block_scores, float, S_SPARSE_ROWS, S_N_HEADS, S_N_BLOCKS),
    BUFFER(block_weights, float, S_SPARSE_ROWS, S_KV_HEADS, S_N_BLOCKS),
    BUFFER(block_count, int64_t, S_TWO, S_SPARSE),
    BUFFER(probs, float, S_SCORING, S_N_HEADS, S_KEYS),
    BUFFER(mass, float, S_SCORING, S_KEYS),
};

// Sizes that follow from the layers and the tensors; and the forms of activations.
static void layer_sizes(const Model *m, size_t size[N_SIZES], Forms forms[N_READERS]) {
    const Config *c = &m->config;
    for (int l = 0; l < c->n_layers; l++) {
        const LayerConfig *lc = &c->layer[l];
        const LayerWeights *w = &m->weights.layer[l];
        add_reader(&forms[BY_ATTN_OUTPUT], &w->attn_output);
        add_reader(&forms[BY_FFN_DOWN], &w->ffn_down);
        add_reader(&forms[BY_EXPERTS_DOWN], &w->ffn_down_exps);
        add_reader(&forms[BY_PROJ], &w->proj);
        size[S_Q_DIM] = (size_t)max_int((int)size[S_Q_DIM], c->n_heads * lc->head_dim);
        size[S_KV_DIM] = (size_t)max_int((int)size[S_KV_DIM], lc->n_kv_heads * lc->head_dim);
        size[S_FFN_DIM] = (size_t)max_int((int)size[S_FFN_DIM], lc->ffn_dim);
        size[S_HEAD_DIM] = (size_t)max_int((int)size[S_HEAD_DIM], lc->head_dim);
        size[S_KV_HEADS] = (size_t)max_int((int)size[S_KV_HEADS], lc->n_kv_heads);
    }
    const size_t widest = (size_t)max_int(max_int((int)size[S_Q_DIM], (int)size[S_KV_DIM]), c->dim);
    size[S_DUMP] = m->dump_dir ? widest : 0;
}

static void buffer_sizes(const Model *m, size_t size[N_SIZES], Forms forms[N_READERS]) {
    const Config *c = &m->config;
    const ModelOptions *o = &m->options;
    const bool sparse = o->pflash || o->pflash_density;
    const size_t batch = (size_t)o->n_batch, seqs = (size_t)o->n_seqs, vocab = (size_t)c->vocab;
    const size_t drafts = o->drafter ? (size_t)o->draft_depth * seqs : 0, candidates = drafts * (size_t)o->draft_width;
    const size_t sizes[N_SIZES] = {
        [S_ONE] = 1, [S_TWO] = 2, [S_STREAM_ROWS] = o->interleave ? STEP_ROWS : batch, [S_BATCH_ROWS] = batch,
        [S_OUT_ROWS] = (size_t)o->n_logits, [S_SEQS] = seqs, [S_DRAFTS] = drafts, [S_CANDIDATES] = candidates,
        [S_NEXT] = seqs + candidates, [S_DECODE_ROWS] = STEP_ROWS, [S_DIM] = (size_t)c->dim, [S_VOCAB] = vocab,
        [S_MASK_WORDS] = round_up(vocab, 32) / 32, [S_PAIRS] = (size_t)m->weights.n_pairs[0],
        [S_PAIRS_SWA] = (size_t)m->weights.n_pairs[1], [S_N_EXPERTS] = (size_t)c->n_experts,
        [S_N_USED] = c->n_experts ? (size_t)c->n_experts_used : 0, [S_EXPERT_DIM] = (size_t)c->expert_dim,
        [S_HAS_EXPERTS] = c->n_experts > 0, [S_PLE_DIM] = (size_t)c->ple_dim,
        [S_PLE_ROW] = (size_t)c->n_layers * (size_t)c->ple_dim,
        [S_TAPS_ROW] = (size_t)m->taps.n * (size_t)m->drafter->config.dim, [S_PENALTIES] = o->penalties,
            [S_BIAS] = o->bias,
        [S_SPARSE] = sparse, [S_SPARSE_ROWS] = sparse ? (batch + SELECT_ROWS - 1) / SELECT_ROWS : 0,
        [S_N_BLOCKS] = sparse ? (size_t)m->s.blocks.n_blocks : 0, [S_N_HEADS] = (size_t)c->n_heads,
        [S_SCORING] = o->can_score ? SCORE_ROWS : 0, [S_KEYS] = (size_t)m->s.n_keys };
    memcpy(size, sizes, sizeof sizes);
    layer_sizes(m, size, forms);
}

static void take_buffers(Arena *a, State *s, const StateBuffer *buffers, size_t n, const size_t *size,
                         const Forms *forms) {
    for (size_t i = 0; i < n; i++) {
        const StateBuffer *b = &buffers[i];
        char *field = (char *)s + b->field;
        size_t count = 1, cols = 1;
        bool absent = false;
        for (int k = 0; k < 4 && b->shape[k] != S_ONE; k++) {
            cols = size[b->shape[k]];
            count *= cols;
            absent |= !cols && b->shape[k] >= S_N_EXPERTS;
        }
        if (b->readers) {
            const Act act = absent ? (Act){ 0 } : take_act(a, forms[b->readers], count / cols, cols);
            memcpy(field, &act, sizeof act);
        } else {
            void *p = absent ? NULL : take(a, count, b->bytes);
            memcpy(field, &p, sizeof p);
        }
    }
}

#define N_OF_BUFFERS(list) (sizeof(list) / sizeof *(list))

// Takes all buffers of State, and those that prompts have apart.
static void plan_state(Model *m, Arena *a) {
    const ModelOptions *o = &m->options;
    State *s = &m->s;
    size_t size[N_SIZES];
    Forms forms[N_READERS] = { { 0 } };
    s->blocks.n_blocks = o->pflash || o->pflash_density ? (o->n_ctx + STEP_ROWS + TILE_SLOTS) / SELECT_KEYS + 1 : 0;
    m->n_scored = o->can_score ? layers_scored(&m->config) : 0;
    s->n_keys = o->can_score ? (int)round_up((size_t)o->n_ctx + STEP_ROWS, TILE_SLOTS) : 0;
    buffer_sizes(m, size, forms);
    take_buffers(a, s, stream_buffers, N_OF_BUFFERS(stream_buffers), size, forms);
    take_buffers(a, s, step_buffers, N_OF_BUFFERS(step_buffers), size, forms);
    s->walked = s->last ? s->last + o->n_seqs : NULL;
    m->other.s = *s;
    if (!o->interleave) return;
    size[S_STREAM_ROWS] = (size_t)o->n_batch;
    size[S_OUT_ROWS] = 1;
    take_buffers(a, &m->other.s, stream_buffers, N_OF_BUFFERS(stream_buffers), size, forms);
}

static size_t most_host_bytes(const Model *m) {        // of the weights of a layer
    size_t most = 0, of_layer = 0;
    int layer = -1;
    for (int i = 0; i < m->binder->n_uploads; i++) {
        const Upload *u = &m->binder->uploads[i];
        Tensor on_device = u->tensor;
        if (u->layer < 0 || !u->tensor.in_host) continue;
        on_device.in_host = false;
        of_layer = (u->layer == layer ? of_layer : 0) + round_up(m->ops->weight_bytes(&on_device), 256);
        layer = u->layer;
        if (most < of_layer) most = of_layer;
    }
    return most;
}

static Limits plan_limits(const Model *m) {
    const Config *c = &m->config;
    const Limits *shared = &m->options.shared_limits;
    Limits lim = { .max_rows = m->options.n_batch, .max_experts = c->n_experts_used, .vocab = c->vocab,
                   .max_cols = max_int(max_int(c->dim, c->expert_dim), c->n_layers * c->ple_dim) };
    for (int l = 0; l < c->n_layers; l++)
        lim.max_cols = max_int(lim.max_cols, max_int(c->layer[l].ffn_dim, c->n_heads * c->layer[l].head_dim));
    const Config *d = &m->drafter->config;
    for (int l = 0; l < d->n_layers; l++)
        lim.max_cols = max_int(lim.max_cols, max_int(d->layer[l].ffn_dim, d->n_heads * d->layer[l].head_dim));
    if (m->vision) lim.max_cols = max_int(lim.max_cols, vision_cols(m->vision));
    if (m->drafter->kind == DRAFTER_MTP) lim.max_cols = max_int(lim.max_cols, 2 * c->dim);
    if (m->drafter->kind == DRAFTER_DFLASH) {
        lim.max_cols = max_int(lim.max_cols, m->taps.n * c->dim);
        lim.max_rows = max_int(lim.max_rows, m->options.n_seqs * m->options.draft_depth);
    }
    lim.max_rows = max_int(lim.max_rows, shared->max_rows);
    lim.max_cols = max_int(lim.max_cols, shared->max_cols);
    lim.max_experts = max_int(lim.max_experts, shared->max_experts);
    lim.vocab = max_int(lim.vocab, shared->vocab);
    lim.host_bytes = most_host_bytes(m);
    if (lim.host_bytes < shared->host_bytes) lim.host_bytes = shared->host_bytes;
    return lim;
}

// Plans everything in backend memory: weights, caches, activations. An arena without memory only counts bytes: so plans
// are compared. The last call assigns addresses and uploads the weights.
static void plan_memory(Model *m, Arena *a) {
    const size_t to_upload = m->plan.weights + m->plan.in_host;    // of the last call, which counted
    m->plan = (MemoryPlan){ 0 };
    if (a->base && to_upload) progress(model_name(m), 0, to_upload, "B");
    for (int i = 0; i < m->binder->n_uploads; i++) {
        Upload *u = &m->binder->uploads[i];
        Tensor on_device = u->tensor;
        on_device.in_host = false;
        const size_t bytes = m->ops->weight_bytes(&u->tensor);
        void *dst = bytes ? take(a, bytes, 1) : NULL;
        const size_t host_bytes = u->tensor.in_host ? m->ops->weight_bytes(&on_device) : 0;
        m->plan.weights += bytes;
        m->plan.in_host += host_bytes;
        if (u->layer >= 0)
            m->plan.from_host += u->tensor.n > 1 ? host_bytes / (size_t)u->tensor.n * (size_t)m->config.n_experts_used
                                                 : host_bytes;
        if (!a->base) continue;
        upload(m->ops, &m->gguf, u, dst);
        if (to_upload) progress(model_name(m), m->plan.weights + m->plan.in_host, to_upload, "B");
    }
    plan_caches(m, a);
    const size_t before = a->used;
    plan_state(m, a);
    m->plan.activations = a->used - before;
    if (m->drafter->kind != DRAFTER_NONE) plan_drafter(m, a);
    if (m->vision) plan_vision(m, a);
    const Limits lim = plan_limits(m);
    m->plan.scratch = m->ops->scratch_bytes(&lim);
}

// Fills the masks: all tokens may be sampled but those that the file forbids (tokenizer.ggml.suppress_tokens).
static void load_mask(Model *m) {
    const size_t words = round_up((size_t)m->config.vocab, 32) / 32;
    uint32_t *mask = m->allowed = alloc_or_die(words, sizeof *mask);
    m->fitting = alloc_or_die(words, sizeof *mask);
    for (int i = 0; i < m->config.vocab; i++) mask[i / 32] |= 1u << (i % 32);
    const GgufKv *kv = gguf_find_kv(&m->gguf, "tokenizer.ggml.suppress_tokens");
    if (kv && kv->type == GGUF_V_ARRAY && kv->count) {
        if (kv->count > (uint64_t)m->config.vocab)
            die("%s: key 'tokenizer.ggml.suppress_tokens': expected at most %d ids (E_META_ARRAY)", m->gguf.path,
                m->config.vocab);
        int64_t *ids = alloc_or_die(kv->count, sizeof *ids);
        if (gguf_get_ints(&m->gguf, "tokenizer.ggml.suppress_tokens", 0, UINT32_MAX, ids, kv->count) < 0)
            die_gguf(&m->gguf);
        for (uint64_t i = 0; i < kv->count; i++) {
            if (ids[i] >= m->config.vocab) {
                fprintf(stderr, "# note: key 'tokenizer.ggml.suppress_tokens': %" PRId64 " is not a token\n", ids[i]);
                continue;
            }
            m->n_suppressed += mask[ids[i] / 32] >> (ids[i] % 32) & 1;
            mask[ids[i] / 32] &= ~(1u << (ids[i] % 32));
        }
        free(ids);
    }
    for (int r = 0; r < m->options.n_logits; r++)
        m->ops->copy(&(Copy){ m->s.mask + (size_t)r * words, mask, words * sizeof *mask, COPY_IN });
}

// Plans for a context of n_ctx tokens. Returns the bytes that the plan needs: the arena, the backend's scratch, and
// weights that are read in the mapped file.
static size_t plan_context(Model *m, int n_ctx) {
    Arena arena = { 0 };
    m->options.n_ctx = n_ctx;
    plan_memory(m, &arena);
    return arena.used + m->plan.scratch +
           (m->plan.weights ? 0 : m->binder->bytes + m->drafter->binder->bytes + vision_bytes(m));
}

// ---- weights in host memory ----
// If a plan does not fit, matrices go to host memory, where the backend reads them: first the table of per-layer
// embeddings, of which a token reads one row, then experts, of which it reads a few, then the other FFNs; the last
// layers first. Attention, router, head and vectors stay.

typedef enum { LEAVES_FIRST, LEAVES_SECOND, LEAVES_LAST, STAYS } Leaving;

static Leaving leaving_of(const Model *m, const Upload *u) {
    if (!u->matrix || u->place == PLACE_DEVICE) return STAYS;
    if (u->matrix == &m->weights.per_layer_token_embd) return LEAVES_FIRST;
    if (u->layer < 0) return STAYS;
    const LayerWeights *w = &m->weights.layer[u->layer];
    if (u->tensor.n > 1) return LEAVES_SECOND;
    const bool ffn = u->matrix == &w->ffn_gate || u->matrix == &w->ffn_up || u->matrix == &w->ffn_down;
    return ffn ? LEAVES_LAST : STAYS;
}

// True: the backend's memory is not the host's.
static bool has_own_memory(const Model *m) {
    return m->ops->weight_bytes(&m->weights.token_embd) && !shares_memory(m->ops);
}

// Plans those matrices in host memory that --override-tensor puts there, and the first n in that order; the others in
// device memory. Returns how many of n there are; 0: if the backend has no memory of its own.
static int put_in_host(Model *m, int n) {
    const bool apart = has_own_memory(m);
    int so_far = 0;
    for (int i = 0; i < m->binder->n_uploads; i++) {
        Upload *u = &m->binder->uploads[i];
        u->tensor.in_host = u->place == PLACE_HOST && apart;
    }
    for (Leaving turn = LEAVES_FIRST; turn < STAYS; turn++)
        for (int i = m->binder->n_uploads - 1; i >= 0 && so_far < n && apart; i--) {
            Upload *u = &m->binder->uploads[i];
            if (leaving_of(m, u) != turn || u->place == PLACE_HOST) continue;
            u->tensor.in_host = true;
            so_far++;
        }
    return so_far;
}

// Plans for a context of n_ctx tokens within a memory budget, with as few matrices in host memory as possible. Returns
// the bytes that the plan needs; more than the budget: it does not fit.
static size_t fit_context(Model *m, int n_ctx, size_t budget) {
    m->binder->n_in_host = 0;
    put_in_host(m, 0);
    size_t needed = plan_context(m, n_ctx);
    int low = 0, high = needed > budget ? put_in_host(m, m->binder->most_in_host) : 0;     // too few matrices; enough
    if (!high || (needed = plan_context(m, n_ctx)) > budget) return needed;
    while (high - low > 1) {
        const int mid = low + (high - low) / 2;
        put_in_host(m, mid);
        *(plan_context(m, n_ctx) <= budget ? &high : &low) = mid;
    }
    m->binder->n_in_host = put_in_host(m, high);
    return plan_context(m, n_ctx);
}

// Puts the matrices whose names a pattern (n) fits to a place, if no earlier pattern fitted. Returns how many it fits.
static int place_matrices(Model *m, const char *pattern, int n, Place place) {
    char text[4096], name[80];
    regex_t compiled;
    int n_fitting = 0;
    snprintf(text, sizeof text, "%.*s", n, pattern);
    if (regcomp(&compiled, text, REG_EXTENDED | REG_NOSUB)) die("-ot: '%s' is not a regular expression", text);
    for (int i = 0; i < m->binder->n_uploads; i++) {
        Upload *u = &m->binder->uploads[i];
        if (!u->matrix || (u->layer < 0 && u->matrix != &m->weights.per_layer_token_embd)) continue;
        snprintf(name, sizeof name, "%.*s", (int)u->name.n, u->name.s);
        if (regexec(&compiled, name, 0, NULL, 0)) continue;
        n_fitting++;
        if (u->place == PLACE_FREE) u->place = place;
    }
    regfree(&compiled);
    return n_fitting;
}

// Reads ModelOptions.place.
static void read_places(Model *m, const char *list) {
    for (const char *at = list; *at; ) {
        const int n = (int)strcspn(at, ",");
        int to = n;
        while (to > 0 && at[to - 1] != '=') to--;
        const char *where = at + to;
        const bool host = n - to == 3 && !strncmp(where, "CPU", 3);
        if (to < 2 || (!host && !(n - to == 3 && !strncmp(where, "GPU", 3)) && strncmp(where, "CUDA", 4)))
            die("-ot: expected PATTERN=CPU or PATTERN=GPU, got '%.*s'; try -ot exps=CPU", min_int(n, 60), at);
        if (!place_matrices(m, at, to - 1, host ? PLACE_HOST : PLACE_DEVICE))
            fprintf(stderr, "# note: -ot: no matrix of a layer has a name with '%.*s'; names are like "
                    "blk.0.ffn_down_exps.weight\n", to - 1, at);
        at += n + (at[n] == ',');
    }
    if (!has_own_memory(m))
        fprintf(stderr, "# note: -ot, --cpu-moe: all weights are in host memory with the %s backend\n", m->ops->name);
}

// Bytes that a plan may use. By default: free memory, less 1/32 for other programs. With --vram: that size, less the
// device memory that is in use already, for example by the driver. If device and host share memory, what the host will
// need is not free.
static size_t plan_budget(const Model *m) {
    size_t free_bytes, total;
    m->ops->memory(&free_bytes, &total);
    if (shares_memory(m->ops)) free_bytes -= free_bytes < m->options.host_memory ? free_bytes : m->options.host_memory;
    if (!m->options.memory) return free_bytes - free_bytes / 32;
    const size_t in_use = m->ops->weight_bytes(&m->weights.token_embd) ? total - free_bytes : 0;
    return m->options.memory > in_use ? m->options.memory - in_use : 0;
}

// Chooses n_batch for prompts of up to max_prompt tokens: the largest, less than twice max_prompt, whose plan with a
// context of n_ctx tokens fits and spends at most 1/16 of the budget on activations; 1/4 if weights are in host memory,
// from where every step of a prompt copies them. If there is none, or the backend
// reads the weights in the mapped file: SMALL_BATCH.
static void fit_batch(Model *m, int n_ctx, int max_prompt, size_t budget) {
    for (m->options.n_batch = LARGE_BATCH; m->options.n_batch > SMALL_BATCH; m->options.n_batch /= 2) {
        const size_t needed = fit_context(m, n_ctx, budget);
        const MemoryPlan *p = &m->plan;
        if (p->weights && m->options.n_batch / 2 < max_prompt && needed <= budget &&
            p->activations + p->staging + p->scratch - plan_limits(m).host_bytes <=
                budget / (p->from_host ? 4 : 16)) return;
    }
}

// The longest context, at most max_ctx tokens, that fits into the budget; 0: none does.
static int largest_context(Model *m, int max_ctx, size_t budget) {
    int low = 0, high = (max_ctx - 1) / TILE_SLOTS + 1;                // in tiles: fits, does not fit
    if (fit_context(m, max_ctx, budget) <= budget) return max_ctx;
    while (high - low > 1) {
        const int mid = low + (high - low) / 2;
        *(fit_context(m, mid * TILE_SLOTS, budget) <= budget ? &low : &high) = mid;
    }
    return low * TILE_SLOTS;
}

// Dies because the plan does not fit. Prints what it needs, what there is, and which flags would help.
__attribute__((noreturn)) static void die_no_room(Model *m) {
    const int n_ctx = m->options.n_ctx;
    const size_t budget = plan_budget(m);
    const double gib = 1 << 30, needed = (double)fit_context(m, n_ctx, budget), room = (double)budget;
    const MemoryPlan p = m->plan;
    const char *from = m->options.ctx_from;
    int max_ctx = largest_context(m, n_ctx, budget);
    if (max_ctx == n_ctx)                              // memory is fragmented, or another program took it meanwhile
        max_ctx = n_ctx / 2 / TILE_SLOTS * TILE_SLOTS;
    char advice[96] = "";
    bool has_tail = false;
    for (int i = 0; i < m->n_caches; i++) has_tail |= m->caches[i].tail_slots > 0;
    if (max_ctx && !from) snprintf(advice, sizeof advice, "-c %d, ", max_ctx);
    if (max_ctx && from && *from) snprintf(advice, sizeof advice, "a smaller %.24s, ", from);
    if (m->options.k_type != KV_TQ3) {
        const KvType smaller = m->options.k_type == KV_F32 || m->options.k_type == KV_BF16 ? KV_F16 :
                               m->options.k_type == KV_F16 ? KV_Q8_0 : KV_TQ3;
        snprintf(advice + strlen(advice), 16, "-ctk %s, ", kv_names[smaller]);
    }
    if (has_tail) strcat(advice, "a smaller --kv-tail, ");
    const bool refused = m->options.memory && needed <= room;          // --vram is larger than the backend's memory
    const size_t drafter_bytes = p.drafter + (p.weights ? 0 : m->drafter->binder->bytes);
    const size_t tower_bytes = p.vision + (p.weights ? 0 : vision_bytes(m));
    char drafter[32] = "", tower[32] = "";
    if (drafter_bytes) snprintf(drafter, sizeof drafter, ", draft model %.2f", (double)drafter_bytes / gib);
    if (tower_bytes) snprintf(tower, sizeof tower, ", image tower %.2f", (double)tower_bytes / gib);
    const char *whose = refused ? " allowed by --vram, but the device has less" :
                        m->options.memory ? " allowed by --vram" : " free";
    die("out of memory: a context of %d needs %.2f GiB (weights %.2f, KV cache %.2f, activations and scratch %.2f%s%s) "
        "of %.2f GiB%s; try %s%s%sa smaller model", n_ctx, needed / gib,
        (double)(p.weights ? p.weights : m->binder->bytes) / gib, (double)(p.kv_global + p.kv_rings) / gib,
        (double)(p.activations + p.staging + p.scratch) / gib, drafter, tower, room / gib,
        whose, advice, m->options.drafter ? "no -md, " : "", m->options.memory && !refused ? "a larger --vram, " : "");
}

__attribute__((noreturn)) static void die_no_host_room(const Model *m) {
    const double gib = 1 << 30;
    die("out of memory: %.2f GiB of weights do not fit on the device, and %.2f GiB of host memory are available; try "
        "%sa smaller model", (double)m->plan.in_host / gib, (double)available_memory() / gib,
        m->options.memory ? "a larger --vram, " : "");
}

// ==== [2] Loading ===================================================================================================

// Opens, checks and binds a model and its drafter, and plans their memory; reserves nothing yet. Dies on bad input.
// dump_dir may be NULL.
static void plan_model(Model *m, const char *path, const Ops *ops, ModelOptions o, const char *dump_dir) {
    static int n_models;
    *m = (Model){ .ops = ops, .dump_dir = dump_dir, .number = 2 * n_models++ };
    m->binder = alloc_or_die(1, sizeof *m->binder);
    m->drafter = alloc_or_die(1, sizeof *m->drafter);
    m->drafter->binder = alloc_or_die(1, sizeof *m->drafter->binder);
    m->result = alloc_or_die(1, sizeof *m->result);
    m->pace = alloc_or_die(1, sizeof *m->pace);
    open_model_file(&m->gguf, path, o.projector && !*o.projector);
    struct stat st;
    if (dump_dir && *dump_dir && mkdir(dump_dir, 0777) && errno == EEXIST && !stat(dump_dir, &st) &&
        !S_ISDIR(st.st_mode))
        die("--dump: %s: expected a folder, got a file; try another name", dump_dir);
    if (dump_dir && *dump_dir && access(dump_dir, W_OK | X_OK)) die("--dump: %s: %s", dump_dir, strerror(errno));
    load_config(&m->config, &m->gguf);
    const GgufKv *repeat = gguf_find_kv(&m->gguf, "general.sampling.penalty_repeat");
    o.penalties |= repeat && !number_is(&m->gguf, repeat, 1, 1);       // the file's default is a penalty
    Binder *b = m->binder;
    b->g = &m->gguf;
    b->status = alloc_or_die(m->gguf.n_tensors, 1);
    b->uploads = alloc_or_die(m->gguf.n_tensors + (size_t)m->config.n_layers * 4, sizeof *b->uploads);
    b->derived = alloc_or_die((size_t)m->config.n_layers * ((size_t)m->config.dim + 2 * (size_t)m->config.n_experts),
                              sizeof *b->derived);
    bind_weights(b, &m->config, &m->weights, o.scorer_only);

    const Config *c = &m->config;
    assert(o.n_seqs >= 1 && o.n_seqs <= MAX_SESSIONS);
    if ((o.pflash || o.pflash_density) && !ops->block_select)
        die("--pflash: the %s backend has no sparse attention", ops->name);
    if ((o.pflash || o.pflash_density) && o.tail && (kv_group(o.k_type) || kv_group(o.v_type)))
        fprintf(stderr, "# note: --kv-tail: with --pflash, chunks of a prompt with more than %d tokens do not "
                "read it\n", STEP_ROWS);
    if (o.can_score && !ops->attn_mass) die("--compress: the %s backend cannot score tokens", ops->name);
    if (o.n_batch != BATCH_FIT) o.n_batch = max_int(o.n_batch, STEP_ROWS);
    o.n_logits = max_int(o.n_logits, o.n_seqs);
    m->options = o;
    if (o.drafter) open_drafter(m, o.drafter);
    if (o.projector) m->vision = vision_open(m, o.projector);
    const size_t budget = plan_budget(m);
    const int usual = min_int(c->n_ctx_train, 8192);
    int n_ctx = o.n_ctx ? o.n_ctx : usual;
    b->most_in_host = INT_MAX;
    if (o.place) read_places(m, o.place);
    if (o.n_batch == BATCH_FIT)
        fit_batch(m, n_ctx == CTX_FIT ? TILE_SLOTS : n_ctx, n_ctx == CTX_FIT ? c->n_ctx_train : n_ctx, budget);
    if (m->vision && vision_whole_blocks(c)) m->options.n_batch = max_int(m->options.n_batch, m->vision->max_tokens);
    if (n_ctx == CTX_FIT) {                            // what the usual context leaves; but a table may leave for more
        fit_context(m, usual, budget);
        b->most_in_host = max_int(b->n_in_host, m->weights.per_layer_token_embd.data != NULL);
        n_ctx = max_int(largest_context(m, c->n_ctx_train, budget), TILE_SLOTS);
    }
    fit_context(m, n_ctx, budget);
}

// Allocates the host's copy of the arrays that follow s->walked in backend memory, at the same offsets.
static void open_result(Model *m) {
    const State *s = &m->s;
    const ModelOptions *o = &m->options;
    StepResult *v = m->result;
    const char *base = (const char *)s->walked;
    v->bytes = (size_t)((const char *)s->found_logsumexp - base) +
               (o->drafter ? (size_t)o->draft_depth : 0) * (size_t)o->n_seqs * sizeof(float);
    char *host = alloc_or_die(v->bytes, 1);
    v->accepted = (int32_t *)host;
    v->chosen = (int32_t *)(host + ((const char *)s->chosen - base));
    v->ids = (int32_t *)(host + ((const char *)s->next - base)) + o->n_seqs;
    v->logits = (float *)(host + ((const char *)s->found_logits - base));
    v->logsumexp = (float *)(host + ((const char *)s->found_logsumexp - base));
    v->path = alloc_or_die((size_t)o->n_seqs * STEP_ROWS, sizeof(int32_t));
}

static void alloc_step(const Model *m, Step *step) {
    const int n_seqs = m->options.n_seqs, n_batch = m->options.n_batch, n_logits = m->options.n_logits;
    step->rows = alloc_or_die(n_batch, sizeof *step->rows);
    step->out_rows = alloc_or_die(n_logits, sizeof *step->out_rows);
    step->segs = alloc_or_die(n_seqs, sizeof *step->segs);
    step->out_index = alloc_or_die(n_logits, sizeof *step->out_index);
    step->soft = alloc_or_die(n_batch, sizeof *step->soft);
    step->uploaded.rows = alloc_or_die(n_batch, sizeof *step->uploaded.rows);
    step->uploaded.out_rows = alloc_or_die(n_logits, sizeof *step->uploaded.out_rows);
    step->uploaded.segs = alloc_or_die(n_seqs, sizeof *step->uploaded.segs);
    step->uploaded.out_index = alloc_or_die(n_logits, sizeof *step->uploaded.out_index);
}

static void free_step(Step *step) {
    free(step->rows);
    free(step->out_rows);
    free(step->segs);
    free(step->out_index);
    free(step->soft);
    free(step->uploaded.rows);
    free(step->uploaded.out_rows);
    free(step->uploaded.segs);
    free(step->uploaded.out_index);
}

// Opens, checks, plans and loads a model. Dies on bad input, or if it does not fit into memory. dump_dir may be NULL.
static void load_model(Model *m, const char *path, const Ops *ops, ModelOptions o, const char *dump_dir) {
    plan_model(m, path, ops, o, dump_dir);
    const bool strict = o.memory || o.n_ctx == CTX_FIT || m->plan.weights;         // else the host can swap
    const size_t budget = plan_budget(m);
    if (strict && fit_context(m, m->options.n_ctx, budget) > budget) die_no_room(m);
    if (m->plan.in_host > available_memory()) die_no_host_room(m);
    Arena arena = { 0 };
    plan_memory(m, &arena);
    const Limits lim = plan_limits(m);
    ops->init(&lim);
    m->arena = ops->reserve(arena.used);
    if (!m->arena) die_no_room(m);
    arena = (Arena){ .base = m->arena };
    const double start = seconds();
    plan_memory(m, &arena);
    ops->wait();
    m->upload_seconds = seconds() - start;

    const int n_seqs = m->options.n_seqs, n_batch = m->options.n_batch;
    m->len = alloc_or_die(n_seqs, sizeof *m->len);
    m->n_written = alloc_or_die(n_seqs, sizeof *m->n_written);
    alloc_step(m, &m->step);
    alloc_step(m, &m->other.step);
    m->paused_seq = -1;
    m->uploaded.n_accept = alloc_or_die(n_seqs, sizeof *m->uploaded.n_accept);
    m->uploaded.token_source = alloc_or_die(STEP_ROWS, sizeof *m->uploaded.token_source);
    m->step_rows = alloc_or_die(n_batch, sizeof *m->step_rows);
    open_result(m);
    for (int i = 0; i < n_seqs; i++) reset_session(m, i);
    load_mask(m);
    for (int t = 0; t < 2; t++)
        ops->copy(&(Copy){ m->s.inv_freq[t], m->weights.inv_freq[t], m->weights.n_pairs[t] * sizeof(double), COPY_IN });
    if (m->drafter->kind != DRAFTER_NONE) start_drafter(m);
    if (m->vision) start_vision(m);
}

static void free_model(Model *m) {
    if (m->arena) m->ops->release(m->arena);
    for (int i = 0; i < m->n_checkpoints; i++) free(m->checkpoints[i].data);
    free(m->checkpoints);
    free(m->weights.layer);
    free(m->binder->status);
    free(m->binder->uploads);
    free(m->binder->derived);
    free(m->len);
    free(m->n_written);
    free(m->allowed);
    free(m->fitting);
    free_step(&m->step);
    free_step(&m->other.step);
    free(m->uploaded.n_accept);
    free(m->uploaded.token_source);
    free(m->step_rows);
    free(m->result->accepted);
    free(m->result->path);
    free_drafter(m->drafter);
    vision_close(m->vision);
    free(m->binder);
    free(m->drafter->binder);
    free(m->drafter);
    free(m->result);
    free(m->pace);
    gguf_close(&m->gguf);
}

// ==== [3] Reading ahead =============================================================================================

typedef struct {              // a few megabytes of a tensor
    const GgufTensor *t;
    size_t first, n;          // blocks
} Piece;

typedef struct {
    const Piece *pieces;
    int          n;
    bool         check;
    const char  *what;        // text of the progress line
    size_t       total;       // bytes
    size_t      *done;        // bytes; protected by the lock, as the next two
    int         *bad_piece;   // the first one that has a bad block
    size_t      *bad_block;
    pthread_mutex_t *lock;
    pthread_t    caller;      // the thread that draws the progress line
} ReadJob;

static void read_pieces(const void *task, int begin, int end) {
    enum { AHEAD = 8 };                                // pieces that the system reads in advance
    const ReadJob *job = task;
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    for (int i = begin; i < end; i++) {
        const Piece *p = &job->pieces[i], *next = &job->pieces[min_int(i + AHEAD, job->n - 1)];
        const size_t bytes = (size_t)gguf_block_bytes(p->t->type), next_bytes = (size_t)gguf_block_bytes(next->t->type);
        const uint8_t *data = p->t->data + p->first * bytes, *from = next->t->data + next->first * next_bytes;
        const size_t before = (size_t)((uintptr_t)from % page);
        size_t bad = p->n;
        madvise((void *)(uintptr_t)(from - before), next->n * next_bytes + before, MADV_WILLNEED);
        if (job->check) bad = gguf_find_bad_block(p->t->type, data, p->n);
        else for (size_t at = 0; at < p->n * bytes; at += page) (void)((const volatile uint8_t *)data)[at];
        pthread_mutex_lock(job->lock);
        const size_t so_far = *job->done += p->n * bytes;
        if (bad < p->n && i < *job->bad_piece) {
            *job->bad_piece = i;
            *job->bad_block = p->first + bad;
        }
        pthread_mutex_unlock(job->lock);
        if (so_far < job->total && pthread_equal(pthread_self(), job->caller))
            progress(job->what, so_far, job->total, "B");
    }
}

enum { READ_BYTES = 4 << 20 };     // of a piece

// Lists the pieces of a file to read, and returns how many; *total: their bytes. check: all tensors; else only bound
// ones, without tables of which a token reads one row.
static int list_pieces(const Model *m, const Gguf *g, const Binder *b, bool check, Piece *pieces, size_t *total) {
    const Weights *w = &m->weights;
    int n_pieces = 0;
    *total = 0;
    for (size_t i = 0; i < g->n_tensors; i++) {
        const GgufTensor *t = &g->tensors[i];
        const bool table = t->data == w->per_layer_token_embd.data || (w->output.data && t->data == w->token_embd.data);
        if (!check && (b->status[i] != BOUND || table)) continue;
        const size_t bytes = (size_t)gguf_block_bytes(t->type), n = (size_t)t->size / bytes;
        const size_t per_piece = READ_BYTES / bytes;
        for (size_t at = 0; at < n; at += per_piece)
            pieces[n_pieces++] = (Piece){ t, at, n - at < per_piece ? n - at : per_piece };
        *total += (size_t)t->size;
    }
    return n_pieces;
}

__attribute__((noreturn)) static void die_bad_block(const Gguf *g, const GgufTensor *t, size_t block) {
    const size_t elems = (size_t)gguf_block_elems(t->type);
    die("%s: tensor '%.*s': expected finite numbers, got NaN, Inf or a reserved value in block %zu of type %s, "
        "elements %zu to %zu (E_PAYLOAD)", g->path, (int)t->name.n, t->name.s, block, gguf_type_name(t->type),
            block * elems,
        (block + 1) * elems - 1);
}

// Reads a file from its beginning to its end, with all threads and a progress line, so that its pages are in memory
// before the first prompt needs them one by one. If they are in memory already, this takes no time. Reads nothing if
// the backend has its own copy of the weights, or if they do not fit into memory. check: reads everything, and dies if
// a tensor contains a number that is not finite.
static void read_file_weights(const Model *m, const Gguf *g, const Binder *b, const char *name, bool check) {
    size_t total, done = 0, bad_block = 0;
    int bad_piece = INT_MAX;
    if (!check && m->plan.weights) return;
    Piece *pieces = alloc_or_die(g->n_tensors + g->file_size / (READ_BYTES / 2), sizeof *pieces);
    int n_pieces = list_pieces(m, g, b, check, pieces, &total);
    char size[2][32];
    if (!check && total > available_memory()) {
        fprintf(stderr, "# warning: %s of weights exceed %s of available memory; they are read from disk as needed\n",
                amount(size[0], (double)total, "B"), amount(size[1], (double)available_memory(), "B"));
        n_pieces = 0;
    }

    const double start = seconds();
    char what[64];
    snprintf(what, sizeof what, "%s%.40s", check ? "checking " : "", name);
    if (n_pieces) progress(what, 0, total, "B");
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    const ReadJob job = { .pieces = pieces, .n = n_pieces, .check = check, .what = what, .total = total, .done = &done,
                          .bad_piece = &bad_piece, .bad_block = &bad_block, .lock = &lock, .caller = pthread_self() };
    parallel(n_pieces, 1, read_pieces, &job);
    if (n_pieces) progress(what, total, total, "B");
    if (bad_piece < INT_MAX) die_bad_block(g, pieces[bad_piece].t, bad_block);
    if (check)
        fprintf(stderr, "# checked %zu tensors, %s at %s/s: all weights are finite\n", g->n_tensors,
                amount(size[0], (double)total, "B"), amount(size[1], (double)total / (seconds() - start + 1e-9), "B"));
    free(pieces);
}

static void read_weights(Model *m, bool check) {
    const Drafter *d = m->drafter;
    read_file_weights(m, &m->gguf, m->binder, model_name(m), check);
    if (d->kind != DRAFTER_NONE) read_file_weights(m, &d->gguf, d->binder, "the draft model", check);
    if (m->vision) read_file_weights(m, &m->vision->gguf, &m->vision->binder, "the image tower", check);
}

#endif
