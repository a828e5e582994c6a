/* plan.h - how much backend memory everything gets, and loading a model into it.
 *
 * Uses load.h and draft.h. Begin with plan_memory() and load_model().
 * All backend memory of a model and its drafter, but the backend's own scratch, is planned here and reserved in one
 * piece at start. Forward's activations are sized for n_batch rows; what has to fit decides how many these are, and how
 * long a context.
 *   [1] The plan    [2] Loading    [3] Reading ahead */
#ifndef PLAN_H
#define PLAN_H

// ==== [1] The plan ==================================================================================================

// Rows of quantised types are whole groups, and a tied row has one type.
static void check_kv_types(const Model *m, int layer, const Cache *c) {
    const KvPlane *planes[] = { &c->k, &c->v };
    if (c->n_rot && c->k.type != c->v.type)
        die("-ctk, -ctv: expected the same type, since layer %d stores K and V as one row, got %s and %s; try --kv-layout "
            "untied", layer, kv_names[c->k.type], kv_names[c->v.type]);
    for (int i = 0; i < 2; i++)
        if (kv_group(planes[i]->type) && planes[i]->dim % KV_TURN)
            die("%s: a cache of type %s: expected rows of a multiple of %d values, got %d in layer %d; try -ctk f16%s",
                m->gguf.path, kv_names[planes[i]->type], KV_TURN, planes[i]->dim, layer,
                c->n_rot ? " or --kv-layout untied" : "");
}

// The caches of all layers that own one, and the stage that their rows pass through in prompt steps.
static void plan_caches(Model *m, Arena *a) {
    const Config *c = &m->config;
    const ModelOptions *o = &m->options;
    const KvType ring_type = o->ring_type != KV_F32 ? o->ring_type : o->k_type == KV_F32 ? KV_F32 : KV_F16;
    int stage_dim = 0;                                 // values of a row of all heads, in the widest ring
    m->n_caches = 0;
    for (int l = 0; l < c->first_shared; l++) {
        const LayerConfig *lc = &c->layer[l];
        const LayerWeights *w = &m->weights.layer[l];
        Cache k = { .n_seqs = o->n_seqs, .n_kv_heads = lc->n_kv_heads, .head_dim = lc->head_dim };
        k.slots = (int)round_up((size_t)o->n_ctx + STEP_ROWS, TILE_SLOTS);
        k.k = (KvPlane){ .type = o->k_type, .dim = lc->head_dim };
        k.v = (KvPlane){ .type = o->v_type, .dim = lc->head_dim };
        if (lc->is_swa) {
            k.slots = min_int(k.slots, (int)round_up((size_t)c->n_swa - 1 + STEP_ROWS, TILE_SLOTS));
            k.k.type = k.v.type = ring_type;
            stage_dim = max_int(stage_dim, lc->n_kv_heads * lc->head_dim);
        } else if (!w->attn_v.data && !o->untied) {
            k.n_rot = m->weights.n_pairs[0];
            k.k.dim = 2 * k.n_rot;
            k.fold = w->attn_k_norm;
        }
        check_kv_types(m, l, &k);
        if (!lc->is_swa && o->tail && (kv_group(k.k.type) || kv_group(k.v.type))) {
            k.tail_slots = (int)round_up((size_t)o->tail + STEP_ROWS, TILE_SLOTS);
            k.k_tail = (KvPlane){ .type = KV_F16, .dim = k.k.dim };
            k.v_tail = (KvPlane){ .type = KV_F16, .dim = k.v.dim };
        }
        const size_t before = a->used;
        take_cache(a, &k);
        *(lc->is_swa ? &m->plan.kv_rings : &m->plan.kv_global) += a->used - before;
        m->cache_of[l] = m->n_caches;
        m->caches[m->n_caches++] = k;
    }
    for (int l = c->first_shared; l < c->n_layers; l++) m->cache_of[l] = m->cache_of[c->layer[l].kv_layer];

    const size_t before = a->used;
    m->staging = (Cache){ .n_seqs = 1, .n_kv_heads = 1, .slots = (int)round_up(o->n_batch, TILE_SLOTS),
                        .k = { .type = ring_type, .dim = stage_dim }, .v = { .type = ring_type, .dim = stage_dim } };
    take_cache(a, &m->staging);
    m->plan.staging = a->used - before;
}

// What a step of at most n rows needs from one layer to the next, and behind the last.
static void plan_stream(const Model *m, Arena *a, State *s, size_t n, size_t kept) {
    const Config *c = &m->config;
    const size_t dim = (size_t)c->dim, ple = (size_t)c->n_layers * (size_t)c->ple_dim, f = sizeof(float);
    s->rows = take(a, n, sizeof(Row));
    s->out_rows = take(a, kept, sizeof(Row));
    s->segs = take(a, (size_t)m->options.n_seqs, sizeof(Segment));
    s->out_index = take(a, kept, sizeof(int32_t));
    for (int i = 0; i < 2; i++) s->x[i] = take(a, n * dim, f);
    s->y = take(a, n * dim, f);
    s->mlp = take(a, n * dim, f);
    s->moe = c->n_experts ? take(a, n * dim, f) : NULL;
    s->ple = ple ? take(a, n * ple, f) : NULL;
    s->ple_out = ple ? take(a, kept * ple, f) : NULL;
    s->logits = take(a, kept * (size_t)c->vocab, f);
    s->hidden = take(a, kept * dim, f);
    const size_t taps = (size_t)m->taps.n * (size_t)m->drafter->config.dim;
    s->tapped = taps ? take(a, n * taps, f) : NULL;
}

static void plan_state(Model *m, Arena *a) {
    const Config *c = &m->config;
    const ModelOptions *o = &m->options;
    State *s = &m->s;
    size_t q_dim = 0, kv_dim = 0, ffn_dim = 0;
    Forms att_out = { 0 }, ffn = { 0 }, expert = { 0 }, ple_gate = { 0 };
    for (int l = 0; l < c->n_layers; l++) {
        const LayerConfig *lc = &c->layer[l];
        const LayerWeights *w = &m->weights.layer[l];
        add_reader(&att_out, &w->attn_output);
        add_reader(&ffn, &w->ffn_down);
        add_reader(&expert, &w->ffn_down_exps);
        add_reader(&ple_gate, &w->proj);
        q_dim = (size_t)max_int((int)q_dim, c->n_heads * lc->head_dim);
        kv_dim = (size_t)max_int((int)kv_dim, lc->n_kv_heads * lc->head_dim);
        ffn_dim = (size_t)max_int((int)ffn_dim, lc->ffn_dim);
    }
    const size_t n = (size_t)o->n_batch, kept = (size_t)o->n_logits, seqs = (size_t)o->n_seqs;
    const size_t used = (size_t)c->n_experts_used, f = sizeof(float);
    plan_stream(m, a, s, o->interleave ? STEP_ROWS : n, kept);
    s->len = take(a, seqs, sizeof(int32_t));
    s->n_accept = take(a, seqs, sizeof(int32_t));
    s->path = take(a, seqs * STEP_ROWS, sizeof(int32_t));
    s->last = take(a, 2 * seqs, sizeof(int32_t));
    s->walked = s->last ? s->last + seqs : NULL;       // from here on what a StepResult reads, in one piece
    s->chosen = take(a, kept, sizeof(int32_t));
    const size_t drafted = o->drafter ? (size_t)o->draft_depth * seqs : 0, found = drafted * (size_t)o->draft_width;
    s->next = take(a, seqs + found, sizeof(int32_t));
    s->found_logits = take(a, found, f);
    s->found_logsumexp = take(a, drafted, f);
    s->token_source = take(a, STEP_ROWS, sizeof(int32_t));
    s->q = take(a, n * q_dim, f);
    s->k = take(a, n * kv_dim, f);
    s->v = take(a, n * kv_dim, f);
    s->att_out = take_act(a, att_out, n, q_dim);
    s->ffn = take_act(a, ffn, n, ffn_dim);
    if (c->n_experts) {
        s->expert = take_act(a, expert, n * used, c->expert_dim);
        s->router = take(a, n * (size_t)c->n_experts, f);
        s->expert_weights = take(a, n * used, f);
        s->expert_ids = take(a, n * used, sizeof(int32_t));
    }
    if (c->ple_dim) s->ple_gate = take_act(a, ple_gate, n, c->ple_dim);
    s->mask = take(a, kept * round_up((size_t)c->vocab, 32) / 32, sizeof(uint32_t));
    s->params = take(a, seqs, sizeof(SampleParams));
    s->counts = o->penalties ? take(a, seqs * (size_t)c->vocab, sizeof(int32_t)) : NULL;
    s->bias = o->bias ? take(a, seqs * (size_t)c->vocab, f) : NULL;
    for (int t = 0; t < 2; t++) s->inv_freq[t] = take(a, (size_t)m->weights.n_pairs[t], sizeof(double));
    const size_t widest = (size_t)max_int(max_int((int)q_dim, (int)kv_dim), c->dim);
    for (int i = 0; i < 5; i++) s->dump[i] = m->dump_dir ? take(a, n * widest, f) : NULL;
}

// What block_select works on, where prompts are sparse.
static void plan_blocks(Model *m, Arena *a) {
    const ModelOptions *o = &m->options;
    State *s = &m->s;
    size_t kv_heads = 0, head_dim = 0;
    if (!o->pflash && !o->pflash_density) return;
    for (int i = 0; i < m->n_caches; i++) {            // rings are seen whole, and have no more slots than others
        kv_heads = (size_t)max_int((int)kv_heads, m->caches[i].n_kv_heads);
        head_dim = (size_t)max_int((int)head_dim, m->caches[i].head_dim);
    }
    s->blocks.n_blocks = (o->n_ctx + STEP_ROWS + TILE_SLOTS) / SELECT_KEYS + 1;
    const size_t n_blocks = (size_t)s->blocks.n_blocks, rows = ((size_t)o->n_batch + SELECT_ROWS - 1) / SELECT_ROWS;
    s->blocks.n = take(a, rows * kv_heads, sizeof(int32_t));
    s->blocks.block = take(a, rows * kv_heads * n_blocks, sizeof(int32_t));
    s->block_means = take(a, (size_t)o->n_seqs * kv_heads * n_blocks * head_dim, sizeof(float));
    s->block_scores = take(a, rows * (size_t)m->config.n_heads * n_blocks, sizeof(float));
    s->block_weights = take(a, rows * kv_heads * n_blocks, sizeof(float));
    s->block_count = take(a, 2, sizeof(int64_t));
}

// What scoring tokens works on.
static void plan_scores(Model *m, Arena *a) {
    const Config *c = &m->config;
    State *s = &m->s;
    if (!m->options.can_score) return;
    m->n_scored = layers_scored(c);
    s->n_keys = (int)round_up((size_t)m->options.n_ctx + STEP_ROWS, TILE_SLOTS);
    s->probs = take(a, (size_t)SCORE_ROWS * (size_t)c->n_heads * (size_t)s->n_keys, sizeof(float));
    s->mass = take(a, (size_t)SCORE_ROWS * (size_t)s->n_keys, sizeof(float));
}

static Limits plan_limits(const Model *m) {
    const Config *c = &m->config;
    const Limits *with = &m->options.shared_limits;
    Limits lim = { .max_rows = m->options.n_batch, .max_experts = c->n_experts_used, .vocab = c->vocab,
                   .max_cols = max_int(max_int(c->dim, c->expert_dim), c->n_layers * c->ple_dim) };
    for (int l = 0; l < c->n_layers; l++)
        lim.max_cols = max_int(lim.max_cols, max_int(c->layer[l].ffn_dim, c->n_heads * c->layer[l].head_dim));
    const Config *d = &m->drafter->config;
    for (int l = 0; l < d->n_layers; l++)
        lim.max_cols = max_int(lim.max_cols, max_int(d->layer[l].ffn_dim, d->n_heads * d->layer[l].head_dim));
    if (m->drafter->kind == DRAFTER_MTP) lim.max_cols = max_int(lim.max_cols, 2 * c->dim);
    if (m->drafter->kind == DRAFTER_DFLASH) {
        lim.max_cols = max_int(lim.max_cols, m->taps.n * c->dim);
        lim.max_rows = max_int(lim.max_rows, m->options.n_seqs * m->options.draft_depth);
    }
    lim.max_rows = max_int(lim.max_rows, with->max_rows), lim.max_cols = max_int(lim.max_cols, with->max_cols);
    lim.max_experts = max_int(lim.max_experts, with->max_experts), lim.vocab = max_int(lim.vocab, with->vocab);
    return lim;
}

// Everything that lives in backend memory, in one pass: weights, caches, activations. Called to count, as often as
// plans are compared, and then once to place.
static void plan_memory(Model *m, Arena *a) {
    const size_t to_upload = m->plan.weights + m->plan.in_host;    // known once it was counted
    m->plan = (MemoryPlan){ 0 };
    if (a->base && to_upload) progress(model_name(m), 0, to_upload, "B");
    for (int i = 0; i < m->binder->n_uploads; i++) {
        Upload *u = &m->binder->uploads[i];
        Tensor on_device = u->tensor;
        on_device.in_host = false;
        const size_t bytes = m->ops->weight_bytes(&u->tensor);
        void *dst = bytes ? take(a, bytes, 1) : NULL;
        m->plan.weights += bytes;
        m->plan.in_host += u->tensor.in_host ? m->ops->weight_bytes(&on_device) : 0;
        if (!a->base) continue;
        upload(m->ops, &m->gguf, u, dst);
        if (to_upload) progress(model_name(m), m->plan.weights + m->plan.in_host, to_upload, "B");
    }
    plan_caches(m, a);
    const size_t before = a->used;
    plan_state(m, a);
    plan_blocks(m, a);
    plan_scores(m, a);
    m->other.s = m->s;
    if (m->options.interleave) plan_stream(m, a, &m->other.s, (size_t)m->options.n_batch, 1);
    m->plan.activations = a->used - before;
    if (m->drafter->kind != DRAFTER_NONE) plan_drafter(m, a);
    const Limits lim = plan_limits(m);
    m->plan.scratch = m->ops->scratch_bytes(&lim);
}

// Tokens that the file forbids to sample (tokenizer.ggml.suppress_tokens) leave the mask; all others stay.
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
        if (gguf_get_ints(&m->gguf, "tokenizer.ggml.suppress_tokens", 0, m->config.vocab - 1, ids, kv->count) < 0)
            die_gguf(&m->gguf);
        for (uint64_t i = 0; i < kv->count; i++) {
            m->n_suppressed += mask[ids[i] / 32] >> (ids[i] % 32) & 1;
            mask[ids[i] / 32] &= ~(1u << (ids[i] % 32));
        }
        free(ids);
    }
    for (int r = 0; r < m->options.n_logits; r++)
        m->ops->copy(&(Copy){ m->s.mask + (size_t)r * words, mask, words * sizeof *mask, COPY_IN });
}

// Plans for a context of n_ctx tokens. Returns the bytes that have to be there: the arena, the backend's scratch, and
// weights that are read in the mapped file.
static size_t plan_context(Model *m, int n_ctx) {
    Arena arena = { 0 };
    m->options.n_ctx = n_ctx;
    plan_memory(m, &arena);
    return arena.used + m->plan.scratch + (m->plan.weights ? 0 : m->binder->bytes + m->drafter->binder->bytes);
}

// Leaves the table of per-layer embeddings, of which a token reads one row, in host memory, or puts it back. False:
// there is none, or the backend reads weights where they lie, or its memory is the host's.
static bool table_in_host(Model *m, bool in_host) {
    if (in_host && shares_memory(m->ops)) return false;
    for (int i = 0; i < m->binder->n_uploads && m->plan.weights; i++) {
        Upload *u = &m->binder->uploads[i];
        if (u->matrix != &m->weights.per_layer_token_embd) continue;
        u->tensor.in_host = in_host;
        return true;
    }
    return false;
}

// Plans for a context of n_ctx tokens in a budget: what does not fit with that table on the device gets it in host
// memory. Returns the bytes that have to be there, more than the budget if there is no room.
static size_t fit_context(Model *m, int n_ctx, size_t budget) {
    table_in_host(m, false);
    const size_t needed = plan_context(m, n_ctx);
    return needed > budget && table_in_host(m, true) ? plan_context(m, n_ctx) : needed;
}

// Bytes that a plan may take: what is free, less a 32nd part for what others take meanwhile. Where the user says how
// much there is: that, less what is taken already of a device's memory, as by the driver itself. In shared memory what the
// host will take counts as taken.
static size_t plan_budget(const Model *m) {
    size_t free_bytes, total;
    m->ops->memory(&free_bytes, &total);
    if (shares_memory(m->ops)) free_bytes -= free_bytes < m->options.host_memory ? free_bytes : m->options.host_memory;
    if (!m->options.memory) return free_bytes - free_bytes / 32;
    const size_t taken = m->ops->weight_bytes(&m->weights.token_embd) ? total - free_bytes : 0;
    return m->options.memory > taken ? m->options.memory - taken : 0;
}

// Finds n_batch for a context of n_ctx tokens, which has to have room, and prompts of up to `longest`.
static void fit_batch(Model *m, int n_ctx, int longest, size_t budget) {
    for (m->options.n_batch = LARGE_BATCH; m->options.n_batch > SMALL_BATCH; m->options.n_batch /= 2) {
        const size_t needed = fit_context(m, n_ctx, budget);
        const MemoryPlan *p = &m->plan;
        if (p->weights && m->options.n_batch / 2 < longest && needed <= budget &&
            p->activations + p->staging + p->scratch <= budget / 16) return;
    }
}

// The longest context, at most `most`, that the budget has room for; 0: not even the smallest.
static int largest_context(Model *m, int most, size_t budget) {
    int low = 0, high = (most - 1) / TILE_SLOTS + 1;   // in tiles: has room, has none
    if (fit_context(m, most, budget) <= budget) return most;
    while (high - low > 1) {
        const int mid = low + (high - low) / 2;
        *(fit_context(m, mid * TILE_SLOTS, budget) <= budget ? &low : &high) = mid;
    }
    return low * TILE_SLOTS;
}

// The plan has no room: what it needs, what there is, and what would have room.
__attribute__((noreturn)) static void die_no_room(Model *m) {
    const int n_ctx = m->options.n_ctx;
    const size_t budget = plan_budget(m);
    const double gib = 1 << 30, needed = (double)fit_context(m, n_ctx, budget), room = (double)budget;
    const MemoryPlan p = m->plan;
    const char *from = m->options.ctx_from;
    int most = largest_context(m, n_ctx, budget);
    if (most == n_ctx) most = n_ctx / 2 / TILE_SLOTS * TILE_SLOTS;   // free in pieces, or somebody was quicker
    char advice[96] = "";
    bool tailed = false;
    for (int i = 0; i < m->n_caches; i++) tailed |= m->caches[i].tail_slots > 0;
    if (most && !from) snprintf(advice, sizeof advice, "-c %d, ", most);
    if (most && from && *from) snprintf(advice, sizeof advice, "a smaller %.24s, ", from);
    if (m->options.k_type != KV_TQ3) {
        const KvType smaller = m->options.k_type == KV_F32 || m->options.k_type == KV_BF16 ? KV_F16 :
                               m->options.k_type == KV_F16 ? KV_Q8_0 : KV_TQ3;
        snprintf(advice + strlen(advice), 16, "-ctk %s, ", kv_names[smaller]);
    }
    if (tailed) strcat(advice, "a smaller --kv-tail, ");
    const bool refused = m->options.memory && needed <= room;          // --vram grants more than there is
    const size_t drafter_bytes = p.drafter + (p.weights ? 0 : m->drafter->binder->bytes);
    char drafter[32] = "";
    if (drafter_bytes) snprintf(drafter, sizeof drafter, ", draft model %.2f", (double)drafter_bytes / gib);
    const char *whose = refused ? " allowed by --vram, but the device has less" :
                        m->options.memory ? " allowed by --vram" : " free";
    die("out of memory: a context of %d needs %.2f GiB (weights %.2f, KV cache %.2f, activations and scratch %.2f%s) "
        "of %.2f GiB%s; try %s%s%sa smaller model", n_ctx, needed / gib,
        (double)(p.weights ? p.weights : m->binder->bytes) / gib, (double)(p.kv_global + p.kv_rings) / gib,
        (double)(p.activations + p.staging + p.scratch) / gib, drafter, room / gib,
        whose, advice, m->options.drafter ? "no -md, " : "", m->options.memory && !refused ? "a larger --vram, " : "");
}

// ==== [2] Loading ===================================================================================================

// Opens and checks a model and plans its memory, of which nothing is reserved yet. Dies with one line on bad input.
// dump_dir may be NULL.
static void plan_model(Model *m, const char *path, const Ops *ops, ModelOptions o, const char *dump_dir) {
    static int n_models;
    *m = (Model){ .ops = ops, .dump_dir = dump_dir, .number = 2 * n_models++ };
    m->binder = alloc_or_die(1, sizeof *m->binder);
    m->drafter = alloc_or_die(1, sizeof *m->drafter);
    m->drafter->binder = alloc_or_die(1, sizeof *m->drafter->binder);
    m->result = alloc_or_die(1, sizeof *m->result);
    m->pace = alloc_or_die(1, sizeof *m->pace);
    open_model_file(&m->gguf, path);
    if (dump_dir && *dump_dir && ((mkdir(dump_dir, 0777) && errno != EEXIST) || access(dump_dir, W_OK | X_OK)))
        die("--dump: %s: %s", dump_dir, strerror(errno));
    load_config(&m->config, &m->gguf);
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
    if (o.can_score && !ops->attn_mass) die("--compress: the %s backend cannot score tokens", ops->name);
    if (o.n_batch != BATCH_FIT) o.n_batch = max_int(o.n_batch, STEP_ROWS);
    o.n_logits = max_int(o.n_logits, o.n_seqs);
    m->options = o;
    if (o.drafter) open_drafter(m, o.drafter);
    const size_t budget = plan_budget(m);
    int n_ctx = o.n_ctx ? o.n_ctx : min_int(c->n_ctx_train, 8192);
    if (o.n_batch == BATCH_FIT)
        fit_batch(m, n_ctx == CTX_FIT ? TILE_SLOTS : n_ctx, n_ctx == CTX_FIT ? c->n_ctx_train : n_ctx, budget);
    if (n_ctx == CTX_FIT) n_ctx = max_int(largest_context(m, c->n_ctx_train, budget), TILE_SLOTS);
    fit_context(m, n_ctx, budget);
}

// Room for a verdict, as its parts lie on the device.
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
    free(step->uploaded.rows);
    free(step->uploaded.out_rows);
    free(step->uploaded.segs);
    free(step->uploaded.out_index);
}

// Open, check, plan, reserve. Dies with one line on bad input or when there is no room. dump_dir may be NULL.
static void load_model(Model *m, const char *path, const Ops *ops, ModelOptions o, const char *dump_dir) {
    plan_model(m, path, ops, o, dump_dir);
    const bool strict = o.memory || o.n_ctx == CTX_FIT || m->plan.weights;         // else memory may be had by swapping
    const size_t budget = plan_budget(m);
    if (strict && fit_context(m, m->options.n_ctx, budget) > budget) die_no_room(m);
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
    m->chunk = alloc_or_die(n_batch, sizeof *m->chunk);
    open_result(m);
    for (int i = 0; i < n_seqs; i++) reset_session(m, i);
    load_mask(m);
    for (int t = 0; t < 2; t++)
        ops->copy(&(Copy){ m->s.inv_freq[t], m->weights.inv_freq[t], m->weights.n_pairs[t] * sizeof(double), COPY_IN });
    if (m->drafter->kind != DRAFTER_NONE) start_drafter(m);
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
    free(m->chunk);
    free(m->result->accepted);
    free(m->result->path);
    free_drafter(m->drafter);
    free(m->binder);
    free(m->drafter->binder);
    free(m->drafter);
    free(m->result);
    free(m->pace);
    gguf_close(&m->gguf);
}

// ==== [3] Reading ahead =============================================================================================

// Bytes that can be had without swapping: what is free and what the page cache would give back.
static size_t available_memory(void) {
    char line[128];
    unsigned long long kb = 0;
    FILE *f = fopen("/proc/meminfo", "r");
    while (f && !kb && fgets(line, sizeof line, f)) sscanf(line, "MemAvailable: %llu kB", &kb);
    if (f) fclose(f);
    return kb ? (size_t)kb * 1024 : (size_t)sysconf(_SC_AVPHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
}

typedef struct {
    const GgufTensor *t;
    size_t first, n;          // blocks of it
} Piece;

typedef struct {
    const Piece *pieces;
    int          n;
    bool         check;
    const char  *what;        // the bar's
    size_t       total;       // bytes
    size_t      *done;        // under the lock, like what follows
    int         *bad_piece;   // the first one that has a bad block
    size_t      *bad_block;
    pthread_mutex_t *lock;
    pthread_t    caller;      // draws the bar
} ReadJob;

static void read_pieces(const void *task, int begin, int end) {
    enum { AHEAD = 8 };                                // pieces that the kernel is told of in advance
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
        if (so_far < job->total && pthread_equal(pthread_self(), job->caller)) progress(job->what, so_far, job->total, "B");
    }
}

// Reads a file's data from one end to the other, with all threads and under a progress bar: for the pages, which the
// first prompt would otherwise wait for one by one, or, with check, for what stands in them (every tensor of the file).
// Left out without check: what nobody reads or what rows are only taken from; and all when it is more than memory can
// hold or the backend keeps weights of its own. Takes next to no time when the pages are in memory already.
static void read_file_weights(const Model *m, const Gguf *g, const Binder *b, const char *name, bool check) {
    enum { PIECE = 4 << 20 };                          // bytes
    const Weights *w = &m->weights;
    size_t total = 0, done = 0, bad_block = 0;
    int n_pieces = 0, bad_piece = INT_MAX;
    if (!check && m->plan.weights) return;
    Piece *pieces = alloc_or_die(g->n_tensors + g->file_size / (PIECE / 2), sizeof *pieces);
    for (size_t i = 0; i < g->n_tensors; i++) {
        const GgufTensor *t = &g->tensors[i];
        const bool table = t->data == w->per_layer_token_embd.data || (w->output.data && t->data == w->token_embd.data);
        if (!check && (b->status[i] != BOUND || table)) continue;
        const size_t bytes = (size_t)gguf_block_bytes(t->type), n = (size_t)t->size / bytes, most = PIECE / bytes;
        for (size_t at = 0; at < n; at += most)
            pieces[n_pieces++] = (Piece){ t, at, n - at < most ? n - at : most };
        total += (size_t)t->size;
    }
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
    if (bad_piece < INT_MAX) {
        const GgufTensor *t = pieces[bad_piece].t;
        const size_t elems = (size_t)gguf_block_elems(t->type);
        die("%s: tensor '%.*s': expected finite numbers, got NaN, Inf or a reserved value in block %zu of type %s, elements "
            "%zu to %zu (E_PAYLOAD)", g->path, (int)t->name.n, t->name.s, bad_block, gguf_type_name(t->type),
            bad_block * elems, (bad_block + 1) * elems - 1);
    }
    if (check)
        fprintf(stderr, "# checked %zu tensors, %s at %s/s: all weights are finite\n", g->n_tensors,
                amount(size[0], (double)total, "B"), amount(size[1], (double)total / (seconds() - start + 1e-9), "B"));
    free(pieces);
}

static void read_weights(Model *m, bool check) {
    const Drafter *d = m->drafter;
    read_file_weights(m, &m->gguf, m->binder, model_name(m), check);
    if (d->kind != DRAFTER_NONE) read_file_weights(m, &d->gguf, d->binder, "the draft model", check);
}

#endif
