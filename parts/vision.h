/* vision.h - the image tower: from the pixels of a picture to soft rows, which stand in a prompt like embedded tokens.
 *
 * Uses image.h (patches), load.h, folder.h and the products of gemma4.c [4]. Begin with vision_open() and
 * vision_rows(); vision_part() is the order of the work.
 *
 * A tower is a second model next to the text model. Its weights are in a file of their own (mmproj, a GGUF file) or in
 * the text model's Hugging Face folder; its memory is part of the text model's plan. There are two kinds:
 *
 * The tower of E2B, E4B, 26B-A4B and 31B (gemma4v) is a transformer over patches of 16 x 16 pixels. Every patch sees
 * every other; RoPE rotates one half of a head by the column of the patch, the other by its row. Then 3 x 3 patches are
 * averaged to one row, which a matrix brings to the text model's width. In E2B and E4B every product clamps its input
 * and its output.
 *
 * The embedder of 12B (gemma4uv) has no layers: a block of 48 x 48 pixels is normed, multiplied with one matrix and
 * normed, gets the embedding of its column and that of its row, is normed again and projected.
 *
 * With patch i at (x, y), C(W, u) = W u or, with clamps, clamp(W clamp(u)), and rms(u) a norm without a weight:
 *   tower      X = Win (2 (patch - 0.5)) + columns[x] + rows[y]
 *   a layer    q, k, v = C(Wq, norm(X)) ..; per head q, k = rope(norm(q)), rope(norm(k)), v = rms(v)
 *              X += norm(C(Wout, softmax(q K) V));   X += norm(C(Wdown, gelu(C(Wgate, norm(X))) * C(Wup, norm(X))))
 *   its end    Y = sqrt(dim) * mean of 3 x 3 X;  26B-A4B, 31B: Y = (Y - std_bias) * std_scale;  soft = Wproj rms(Y)
 *   embedder   h = LN3(LN2(Wd LN1(block) + bd) + columns[x] + rows[y]);  soft = Wproj rms(h),   LN: LayerNorm
 *   [1] Types    [2] Files    [3] Memory    [4] Soft rows */
#ifndef VISION_H
#define VISION_H

// ==== [1] Types =====================================================================================================

enum { TOWER_SIDE = 16, EMBEDDER_SIDE = 48,            // pixels of a patch's side; a soft row is one of 48 x 48 pixels
       POOL_SIDE = 3,
       DEFAULT_IMAGE_TOKENS = 280, MAX_IMAGE_TOKENS = 1120 };

typedef struct { Tensor w; Range in, out; } ClampedMatrix;

typedef struct {              // shapes are (rows, cols)
    const float *ln1, *attn_post_norm, *ln2, *ffn_post_norm;           // (dim)
    const float *attn_q_norm, *attn_k_norm;            // (head_dim)
    ClampedMatrix attn_q, attn_k, attn_v, attn_out;    // (dim, dim)
    ClampedMatrix ffn_gate, ffn_up, ffn_down;          // (ffn_dim, dim), (ffn_dim, dim), (dim, ffn_dim)
} VisionLayer;

typedef struct Vision {
    Model   *model;           // the text model
    Gguf     gguf;
    Binder   binder;
    bool     embedder;        // gemma4uv; else a tower
    bool     clamps;          // its products clamp input and output
    int      dim, n_layers, n_heads, head_dim, ffn_dim;        // embedder: dim alone
    int      side, patch;     // pixels of a patch's side; its values, side * side * 3
    float    eps;
    int      max_tokens;      // soft rows of the largest picture,
    int      usual_tokens;    // and at most of one whose size is not asked for
    // weights
    VisionLayer *layer;                // (n_layers)
    Tensor   patch_embd;               // (dim, patch), columns in the order (y, x, channel)
    Tensor   positions;                // (2, n, dim) of columns, of rows; on the host, in the file's type
    Tensor   projection;               // (dim of the text model, dim)
    const float *std_bias, *std_scale;                 // (dim), or NULL
    const float *ones;                 // (dim) weights of a norm that has none
    const float *patch_bias;           // (dim), as the next ones only in embedders
    const float *norm_w[3], *norm_b[3];                // (patch), (dim), (dim)
    // buffers in backend memory. n_rows: patches of the largest picture; n_chunk: rows of a product
    int      n_rows, n_chunk;
    double  *inv_freq;                 // (head_dim / 4)
    int32_t *pos;                      // (n_rows, 2) column and row of each patch
    float   *patches;                  // (n_chunk, patch)
    float   *x[2];                     // (n_rows, dim) the stream, and its next state; embedder: (n_chunk, dim)
    float   *q, *k, *v;                // (n_rows, dim)
    float   *att;                      // (n_rows, dim) attention; what is added to the stream next
    float   *y;                        // (n_chunk, dim) what attention adds to the stream
    float   *normed, *clamped;         // (n_chunk, dim), (n_chunk, ffn_dim or dim) inputs of products, with clamps
    float   *gate, *up;                // (n_chunk, ffn_dim), with clamps
    Act      ffn;                      // (n_chunk, ffn_dim), without
    float   *soft;                     // (max_tokens, dim of the text model)
    // host memory for a part of a picture
    float   *host;                     // (n_chunk, patch or dim) patches or positions; then (dim) positions of a row
    int32_t *host_pos;                 // (n_chunk, 2)
    // the picture in work
    const uint8_t *rgb;                // its pixels
    int      width, height;            // in patches
    int      pass, row;                // what is computed next: see [4]
    In       stream;                   // of all its patches, before this pass
} Vision;

// The rows of a picture see each other, also later ones, in sliding layers of the text model; else they are causal, as
// in E2B and E4B.
API bool vision_whole_blocks(const Config *text) { return !text->ple_dim; }

// ==== [2] Files =====================================================================================================

// Dies unless a file is a projector of images that this program knows. Sets v->embedder.
static void check_projector(Vision *v, const Model *m) {
    Gguf *g = &v->gguf;
    GgufStr arch = { "", 0 }, type = { "", 0 };
    if (gguf_get_str(g, "general.architecture", &arch) < 0) die_gguf(g);
    if (!str_is(arch, "clip"))
        die("%s: expected a projector of images (mmproj), got a %s model; try the mmproj file of %s; key "
            "'general.architecture' (E_META_RANGE)", g->path, arch.n ? shown(arch) : "nameless", m->gguf.path);
    if (!key_int(g, "clip.has_vision_encoder", 0, 1, 0))
        die("%s: expected a projector of images, got one %s; key 'clip.has_vision_encoder' (E_META_RANGE)", g->path,
            key_int(g, "clip.has_audio_encoder", 0, 1, 0) ? "of audio alone" : "without an image tower");
    const char *key = "clip.vision.projector_type";
    if (!gguf_find_kv(g, key)) key = "clip.projector_type";            // of older files
    if (gguf_get_str(g, key, &type) < 0) die_gguf(g);
    v->embedder = str_is(type, "gemma4uv");
    if (!v->embedder && !str_is(type, "gemma4v"))
        die("%s: key '%s': expected gemma4v or gemma4uv, got '%s'; try the mmproj file of %s (E_META_RANGE)", g->path,
            key, shown(type), m->gguf.path);
}

static void load_vision_config(Vision *v, const Model *m) {
    Gguf *g = &v->gguf;
    const int64_t out = key_int(g, "clip.vision.projection_dim", 1, 1 << 20, 0);
    if (out != m->config.dim)
        die("%s: projector for %s: key 'clip.vision.projection_dim': expected the model's width, %d, got %" PRId64
            "; try the mmproj file made for this model (E_META_RANGE)", g->path, m->gguf.path, m->config.dim, out);
    key_int(g, "clip.vision.patch_size", TOWER_SIDE, TOWER_SIDE, TOWER_SIDE);
    key_int(g, "clip.vision.projector.scale_factor", POOL_SIDE, POOL_SIDE, POOL_SIDE);
    v->side = v->embedder ? EMBEDDER_SIDE : TOWER_SIDE;
    v->patch = v->side * v->side * 3;
    v->eps = (float)key_float(g, "clip.vision.attention.layer_norm_epsilon", 1e-6);
    v->dim = (int)key_int(g, "clip.vision.embedding_length", 1, 1 << 16, 0);
    if (v->embedder) return;
    v->n_layers = (int)key_int(g, "clip.vision.block_count", 1, MAX_LAYERS, 0);
    v->n_heads  = (int)key_int(g, "clip.vision.attention.head_count", 1, 1024, 0);
    v->ffn_dim  = (int)key_int(g, "clip.vision.feed_forward_length", 1, 1 << 16, 0);
    v->head_dim = v->dim / v->n_heads;
    if (v->dim % v->n_heads || v->head_dim % 8 || v->head_dim > MAX_IMAGE_HEAD_DIM)
        die("%s: key 'clip.vision.attention.head_count': expected heads of a multiple of 8 values, at most %d, got %d "
            "heads for a width of %d (E_META_RANGE)", g->path, MAX_IMAGE_HEAD_DIM, v->n_heads, v->dim);
}

// Memory for n bytes, which gguf_close() releases.
static void *vision_memory(Vision *v, size_t n) {
    void *p = gguf_private(&v->gguf, n);
    if (!p) die_gguf(&v->gguf);
    return p;
}

// GGUF files have the values of a patch in the order (channel, y, x). Moves n elements of `bytes` bytes to the order
// (y, x, channel).
static void order_patch(const Vision *v, const uint8_t *from, uint8_t *to, size_t bytes) {
    const size_t area = (size_t)v->side * (size_t)v->side;
    for (size_t i = 0; i < area; i++)
        for (size_t c = 0; c < 3; c++) memcpy(to + (3 * i + c) * bytes, from + (c * area + i) * bytes, bytes);
}

// Binds the patch matrix, in GGUF files {16, 16, 3, dim} or {768, dim}, with its columns in the order (y, x, channel).
static void bind_patch_matrix(Vision *v) {
    static const char name[] = "v.patch_embd.weight";
    Binder *b = &v->binder;
    const GgufTensor *t = find_tensor(b, name);
    const size_t cols = (size_t)v->patch, rows = (size_t)v->dim;
    if (!t) die("%s: tensor '%s': missing (E_TENSOR_MISSING)", b->g->path, name);
    const bool flat = t->ne[0] == cols && t->ne[1] == rows && t->ne[2] == 1 && t->ne[3] == 1;
    const bool square = t->ne[0] == (uint64_t)v->side && t->ne[1] == (uint64_t)v->side && t->ne[2] == 3 &&
                        t->ne[3] == rows;
    if (!flat && !square)
        die("%s: tensor '%s': expected shape (%d, %d), got (%" PRIu64 ", %" PRIu64 ", %" PRIu64 ", %" PRIu64
            ") (E_SHAPE)", b->g->path, name, v->patch, v->dim, t->ne[0], t->ne[1], t->ne[2], t->ne[3]);
    if (!gguf_type_supported(t->type) || (square && is_quantised((DType)t->type)))
        die("%s: tensor '%s': type %s is not supported (E_TYPE_UNSUPPORTED)", b->g->path, name,
            gguf_type_name(t->type));
    b->bytes += t->size;
    b->status[t - b->g->tensors] = BOUND;
    v->patch_embd = (Tensor){ .data = t->data, .type = (DType)t->type, .rows = v->dim, .cols = v->patch, .n = 1 };
    if (!b->g->converted) {
        const bool floats = !is_quantised(v->patch_embd.type);         // columns of blocks cannot be moved: then f32
        const size_t bytes = floats ? (size_t)gguf_block_bytes(t->type) : sizeof(float), row = t->size / rows;
        uint8_t *all = vision_memory(v, rows * cols * bytes);
        float *values = alloc_or_die(cols, sizeof *values);
        for (size_t r = 0; r < rows; r++) {
            if (!floats) gguf_dequantize(t->type, t->data + r * row, values, cols);
            order_patch(v, floats ? t->data + r * row : (const uint8_t *)values, all + r * cols * bytes, bytes);
        }
        free(values);
        v->patch_embd.data = all;
        if (!floats) v->patch_embd.type = T_F32;
    }
    add_matrix(b, &v->patch_embd, name);
}

// Binds the tables of positions, (2, n, dim): of columns, of rows. They stay on the host.
static void bind_positions(Vision *v) {
    static const char name[] = "v.position_embd.weight";
    const GgufTensor *t = find_tensor(&v->binder, name);
    if (!t) die("%s: tensor '%s': missing (E_TENSOR_MISSING)", v->gguf.path, name);
    if (t->ne[1] < 1 || t->ne[1] > 1 << 20)
        die("%s: tensor '%s': expected 1 to %d positions, got %" PRIu64 " (E_SHAPE)", v->gguf.path, name, 1 << 20,
            t->ne[1]);
    v->positions = bind_tensor(&v->binder, name, (int)t->ne[1], v->dim, 2);
}

// Binds STEM.weight and, if the file has them, the scalars STEM.input_min, input_max, output_min and output_max.
static void bind_clamped(Vision *v, ClampedMatrix *dst, const char *stem, int rows, int cols) {
    static const char *const ends[4] = { "input_min", "input_max", "output_min", "output_max" };
    Binder *b = &v->binder;
    float *const to[4] = { &dst->in.lo, &dst->in.hi, &dst->out.lo, &dst->out.hi };
    char name[80];
    int n = 0;
    snprintf(name, sizeof name, "%s.weight", stem);
    bind_scaled(b, &dst->w, name, rows, cols, 1);
    dst->in = dst->out = (Range){ -INFINITY, INFINITY };
    for (int i = 0; i < 4; i++) {
        snprintf(name, sizeof name, "%s.%s", stem, ends[i]);
        if (!find_tensor(b, name)) continue;
        *to[i] = *host_vector(b, name, 1);
        if (isnan(*to[i])) die("%s: tensor '%s': expected a number, got NaN (E_PAYLOAD)", b->g->path, name);
        n++;
    }
    if (n != (v->clamps ? 4 : 0))
        die("%s: tensor '%s.%s': %s (E_TENSOR_MISSING)", b->g->path, stem, ends[n % 4],
            v->clamps ? "missing; expected four bounds for every matrix of the layers, or none" :
                        "unexpected; the first matrix of the tower has no bounds");
}

static void bind_vision_layer(Vision *v, int l) {
    VisionLayer *w = &v->layer[l];
    Binder *b = &v->binder;
    char name[80];
#define NAME(end) (snprintf(name, sizeof name, "v.blk.%d." end, l), name)
    bind_vector(b, &w->ln1, NAME("ln1.weight"), v->dim);
    bind_vector(b, &w->attn_post_norm, NAME("attn_post_norm.weight"), v->dim);
    bind_vector(b, &w->ln2, NAME("ln2.weight"), v->dim);
    bind_vector(b, &w->ffn_post_norm, NAME("ffn_post_norm.weight"), v->dim);
    bind_vector(b, &w->attn_q_norm, NAME("attn_q_norm.weight"), v->head_dim);
    bind_vector(b, &w->attn_k_norm, NAME("attn_k_norm.weight"), v->head_dim);
    bind_clamped(v, &w->attn_q, NAME("attn_q"), v->dim, v->dim);
    bind_clamped(v, &w->attn_k, NAME("attn_k"), v->dim, v->dim);
    bind_clamped(v, &w->attn_v, NAME("attn_v"), v->dim, v->dim);
    bind_clamped(v, &w->attn_out, NAME("attn_out"), v->dim, v->dim);
    bind_clamped(v, &w->ffn_gate, NAME("ffn_gate"), v->ffn_dim, v->dim);
    bind_clamped(v, &w->ffn_up, NAME("ffn_up"), v->ffn_dim, v->dim);
    bind_clamped(v, &w->ffn_down, NAME("ffn_down"), v->dim, v->ffn_dim);
#undef NAME
}

// Binds weight and bias of one of the embedder's norms. Those of the first are ordered as a patch.
static void bind_layer_norm(Vision *v, int i, int n) {
    static const char *const ends[2] = { "weight", "bias" };
    const float **const to[2] = { &v->norm_w[i], &v->norm_b[i] };
    char name[80];
    for (int k = 0; k < 2; k++) {
        snprintf(name, sizeof name, "v.patch_norm.%d.%s", i + 1, ends[k]);
        const float *values = host_vector(&v->binder, name, n);
        if (!i && !v->gguf.converted) {
            uint8_t *ordered = vision_memory(v, (size_t)n * sizeof *values);
            order_patch(v, (const uint8_t *)values, ordered, sizeof *values);
            values = (const float *)(const void *)ordered;
        }
        add_vector(&v->binder, to[k], values, n);
    }
}

static void bind_vision(Vision *v, const Model *m) {
    Binder *b = &v->binder;
    bind_patch_matrix(v);
    bind_positions(v);
    bind_scaled(b, &v->projection, "mm.input_projection.weight", m->config.dim, v->dim, 1);
    float *ones = vision_memory(v, (size_t)v->dim * sizeof *ones);
    for (int i = 0; i < v->dim; i++) ones[i] = 1;
    add_vector(b, &v->ones, ones, v->dim);
    if (v->embedder) {
        bind_vector(b, &v->patch_bias, "v.patch_embd.bias", v->dim);
        for (int i = 0; i < 3; i++) bind_layer_norm(v, i, i ? v->dim : v->patch);
        return;
    }
    v->layer = alloc_or_die(v->n_layers, sizeof *v->layer);
    v->clamps = find_tensor(b, "v.blk.0.attn_q.input_min") != NULL;
    for (int l = 0; l < v->n_layers; l++) bind_vision_layer(v, l);
    const bool bias = find_tensor(b, "v.std_bias") != NULL, scale = find_tensor(b, "v.std_scale") != NULL;
    if (bias || scale) {
        bind_vector(b, &v->std_bias, "v.std_bias", v->dim);
        bind_vector(b, &v->std_scale, "v.std_scale", v->dim);
    }
}

// Names the first tensor of the file that should belong to the tower but that nothing reads. Those of audio do not
// count.
static void note_unread_tensors(const Vision *v) {
    static const char *const tower[] = { "v.", "mm.", NULL }, *const audio[] = { "mm.a.", NULL };
    const Gguf *g = &v->gguf;
    size_t n = 0, first = 0;
    for (size_t i = g->n_tensors; i-- > 0; ) {
        const GgufStr name = g->tensors[i].name;
        if (v->binder.status[i] != UNKNOWN || !has_prefix(name, tower) || has_prefix(name, audio)) continue;
        first = i;
        n++;
    }
    if (n)
        fprintf(stderr, "# note: %s: %zu tensor%s of the image tower %s not used, the first: %s\n", g->path, n,
                n == 1 ? "" : "s", n == 1 ? "is" : "are", shown(g->tensors[first].name));
}

static void check_vision_ops(const Ops *op, bool embedder) {
    const bool has = embedder ? op->layer_norm != NULL
                              : op->clamp && op->gelu_product && op->rope_2d && op->attend_all && op->pool;
    if (!has) die("images: the %s backend does not support them; try --backend cpu", op->name);
}

// Opens, checks and binds a tower: a mmproj file, or "", the tower in the model's own Hugging Face folder. Reserves
// nothing: plan_vision() does. Dies on bad input.
static Vision *vision_open(Model *m, const char *file) {
    Vision *v = alloc_or_die(1, sizeof *v);
    const char *own = m->gguf.path;
    if (!*file && !(m->gguf.converted && open_folder_vision(&v->gguf, own)))
        die("%s: the model has no image tower%s; try --mmproj FILE", own,
            gguf_find_tensor(&m->gguf, "v.patch_embd.weight") ? " in a file of its own" : "");
    if (*file && gguf_open(&v->gguf, file) < 0)
        die("%s: %s%s", file, v->gguf.err, strstr(v->gguf.err, "(E_MAGIC") ? other_kind(file) : "");
    signal(SIGBUS, on_lost_pages);
    check_projector(v, m);
    load_vision_config(v, m);
    check_vision_ops(m->ops, v->embedder);
    v->model = m;
    v->usual_tokens = m->options.image_tokens ? m->options.image_tokens : DEFAULT_IMAGE_TOKENS;
    v->max_tokens = max_int(v->usual_tokens, m->options.image_most);
    v->binder.g = &v->gguf;
    v->binder.status = alloc_or_die(v->gguf.n_tensors, 1);
    v->binder.uploads = alloc_or_die(v->gguf.n_tensors + 1, sizeof *v->binder.uploads);
    bind_vision(v, m);
    note_unread_tensors(v);
    return v;
}

static size_t vision_bytes(const Model *m) {           // of the tower's weights in the file
    return m->vision ? m->vision->binder.bytes : 0;
}

static void vision_close(Vision *v) {                  // NULL: does nothing
    if (!v) return;
    free(v->binder.status);
    free(v->binder.uploads);
    free(v->layer);
    free(v->host);
    free(v->host_pos);
    gguf_close(&v->gguf);
    free(v);
}

// ==== [3] Memory ====================================================================================================

// The widest input of a product.
static int vision_cols(const Vision *v) { return max_int(max_int(v->patch, v->dim), v->ffn_dim); }

static void plan_tower(Vision *v, Arena *a) {
    const size_t f = sizeof(float), n = (size_t)v->n_rows, chunk = (size_t)v->n_chunk;
    const size_t dim = (size_t)v->dim, ffn_dim = (size_t)v->ffn_dim;
    Forms ffn = { 0 };
    v->inv_freq = take(a, (size_t)v->head_dim / 4, sizeof *v->inv_freq);
    v->pos = take(a, n * 2, sizeof *v->pos);
    for (int i = 0; i < 2; i++) v->x[i] = take(a, n * dim, f);
    v->q = take(a, n * dim, f);
    v->k = take(a, n * dim, f);
    v->v = take(a, n * dim, f);
    v->att = take(a, n * dim, f);
    v->y = take(a, chunk * dim, f);
    if (v->clamps) {
        v->normed = take(a, chunk * dim, f);
        v->clamped = take(a, chunk * (size_t)max_int(v->dim, v->ffn_dim), f);
        v->gate = take(a, chunk * ffn_dim, f);
        v->up = take(a, chunk * ffn_dim, f);
        return;
    }
    for (int l = 0; l < v->n_layers; l++) add_reader(&ffn, &v->layer[l].ffn_down.w);
    v->ffn = take_act(a, ffn, chunk, ffn_dim);
}

// Plans the tower's weights and buffers. Large pictures are computed in chunks of rows, n_batch at most; only attention
// needs all rows at once.
static void plan_vision(Model *m, Arena *a) {
    Vision *v = m->vision;
    const size_t before = a->used, tokens = (size_t)v->max_tokens, f = sizeof(float);
    for (int i = 0; i < v->binder.n_uploads; i++) {
        Upload *u = &v->binder.uploads[i];
        const size_t bytes = m->ops->weight_bytes(&u->tensor);
        u->dst = bytes ? take(a, bytes, 1) : NULL;
    }
    v->n_rows = v->embedder ? v->max_tokens : v->max_tokens * POOL_SIDE * POOL_SIDE;
    v->n_chunk = min_int(v->n_rows, m->options.n_batch);
    v->patches = take(a, (size_t)v->n_chunk * (size_t)v->patch, f);
    v->soft = take(a, tokens * (size_t)m->config.dim, f);
    if (!v->embedder) {
        plan_tower(v, a);
    } else {
        for (int i = 0; i < 2; i++) v->x[i] = take(a, (size_t)v->n_chunk * (size_t)v->dim, f);
    }
    m->plan.vision = a->used - before;
}

// Uploads the weights, and what does not change; reserves host memory.
static void start_vision(Model *m) {
    Vision *v = m->vision;
    double inv_freq[MAX_IMAGE_HEAD_DIM / 4];
    for (int i = 0; i < v->binder.n_uploads; i++) upload(m->ops, &v->gguf, &v->binder.uploads[i],
                                                         v->binder.uploads[i].dst);
    v->host = alloc_or_die((size_t)v->n_chunk * (size_t)max_int(v->patch, v->dim) + (size_t)v->dim, sizeof *v->host);
    v->host_pos = alloc_or_die((size_t)v->n_chunk * 2, sizeof *v->host_pos);
    if (v->embedder) return;
    for (int i = 0; i < v->head_dim / 4; i++) inv_freq[i] = pow(100, -4.0 * i / v->head_dim);
    m->ops->copy(&(Copy){ v->inv_freq, inv_freq, (size_t)v->head_dim / 4 * sizeof *inv_freq, COPY_IN });
}

// ==== [4] Soft rows =================================================================================================
// A picture goes through the tower in passes: its patches are embedded; in each layer first what attention reads is
// computed for all patches, then attention and the rest; last come pooling and projection. The embedder has one pass. A
// pass is divided into parts of rows, and between two parts the caller may do other work: vision_next().

// Multiplications of a part on the host, at most: about a tenth of a second on two cores. But it has 64 rows at least.
static const double MOST_OF_PART = 2.5e9;

// Multiplications for one row of the picture in work, in its longest pass.
static double vision_row_work(const Vision *v) {
    const double n = (double)v->width * v->height, dim = v->dim;
    return v->embedder ? dim * (v->patch + v->projection.rows) : dim * (2 * n + dim + 3.0 * v->ffn_dim);
}

// Rows of a part: equal parts of n rows, so that none is much smaller than the others.
static int rows_at_once(const Vision *v, int n) {
    const double most = v->model->ops->on_host ? fmax(MOST_OF_PART / vision_row_work(v), STEP_ROWS) : n;
    const int chunk = min_int(v->n_chunk, (int)fmin(most, n)), chunks = (n + chunk - 1) / chunk;
    return (n + chunks - 1) / chunks;
}

// The same input, from row `first` on.
static In from_row(In in, size_t first, int cols) {
    const size_t at = first * (size_t)cols;
    if (in.x) in.x += at;
    if (in.delta[0]) in.delta[0] += at;
    if (in.x_out) in.x_out += at;
    return in;
}

// out[i] = C(w[i], in) for n_w matrices with the same input, n rows.
static void vision_products(const Model *m, int n, In in, int n_w, const ClampedMatrix *const w[],
                            float *const out[]) {
    const Vision *v = m->vision;
    const int cols = w[0]->w.cols;
    Matmul all = { .n_rows = n, .in = in };
    if (!v->clamps) {
        for (int i = 0; i < n_w; i++) add_product(&all, &w[i]->w, out[i]);
        m->ops->matmul(&all);
        return;
    }
    if (in.w_pre || in.delta[0]) {
        m->ops->close(&(Close){ .n_rows = n, .cols = cols, .in = in, .out = v->normed });
        in = (In){ .x = v->normed, .scale = 1 };
    }
    for (int i = 0; i < n_w; i++) {
        m->ops->clamp(&(Clamp){ .n_rows = n, .cols = cols, .x = in.x, .range = w[i]->in, .out = v->clamped });
        multiply(m, n, (In){ .x = v->clamped, .scale = 1 }, &w[i]->w, out[i]);
        m->ops->clamp(&(Clamp){ .n_rows = n, .cols = w[i]->w.rows, .x = out[i], .range = w[i]->out, .out = out[i] });
    }
}

// What attention reads: q, k and v of n patches, from number r on.
static void vision_qkv(const Model *m, const VisionLayer *w, In *stream, int r, int n) {
    Vision *v = m->vision;
    const ClampedMatrix *const qkv[] = { &w->attn_q, &w->attn_k, &w->attn_v };
    const size_t at = (size_t)r * (size_t)v->dim;
    float *const to[] = { v->q + at, v->k + at, v->v + at };
    vision_products(m, n, from_row(stream_input(v->x, stream, w->ln1), (size_t)r, v->dim), 3, qkv, to);
    m->ops->rope_2d(&(Rope2d){ .n_rows = n, .n_heads = v->n_heads, .head_dim = v->head_dim, .q = to[0], .k = to[1],
                               .v = to[2], .w_q = w->attn_q_norm, .w_k = w->attn_k_norm, .pos = v->pos + 2 * r,
                               .inv_freq = v->inv_freq, .eps = v->eps });
}

// v->att[r ..] = C(Wdown, gelu(C(Wgate, in)) * C(Wup, in)), n rows.
static void vision_feed_forward(const Model *m, const VisionLayer *w, int r, int n, In in) {
    Vision *v = m->vision;
    float *out = v->att + (size_t)r * (size_t)v->dim;
    if (!v->clamps) {
        const Act ffn = act_for(&w->ffn_down.w, v->ffn);
        m->ops->gate_up(&(GateUp){ .n_rows = n, .in = in, .gate = &w->ffn_gate.w, .up = &w->ffn_up.w, .fn = ACT_GELU,
                                   .out = ffn });
        multiply(m, n, (In){ .act = ffn }, &w->ffn_down.w, out);
        return;
    }
    vision_products(m, n, in, 2, (const ClampedMatrix *const[]){ &w->ffn_gate, &w->ffn_up },
                    (float *const[]){ v->gate, v->up });
    m->ops->gelu_product(&(GeluProduct){ .n_rows = n, .cols = v->ffn_dim, .gate = v->gate, .up = v->up,
                                         .out = v->gate });
    vision_products(m, n, (In){ .x = v->gate, .scale = 1 }, 1, (const ClampedMatrix *const[]){ &w->ffn_down },
                    &out);
}

// Attention of n patches to all patches, from number r on, in v->att. A device computes all of them at once: a part
// would not fill it.
static void vision_attend(const Model *m, int r, int n) {
    const Vision *v = m->vision;
    const int all = v->width * v->height;
    const size_t at = (size_t)r * (size_t)v->dim;
    if (!m->ops->on_host && r) return;
    m->ops->attend_all(&(AttendAll){ .n_rows = m->ops->on_host ? n : all, .n_keys = all, .n_heads = v->n_heads,
                                     .head_dim = v->head_dim, .q = v->q + at, .k = v->k, .v = v->v, .scale = 1,
                                     .out = v->att + at });
}

// The rest of a layer for n patches, from number r on. It leaves what the feed-forward network adds to the stream in
// v->att.
static void vision_rest(const Model *m, const VisionLayer *w, In *stream, int r, int n) {
    Vision *v = m->vision;
    const size_t at = (size_t)r * (size_t)v->dim;
    vision_attend(m, r, n);
    vision_products(m, n, (In){ .x = v->att + at, .scale = 1 }, 1, (const ClampedMatrix *const[]){ &w->attn_out },
                    &v->y);
    add_to_stream(stream, v->y, w->attn_post_norm);
    In in = stream_input(v->x, stream, w->ln2);
    in.x += at;                                        // y has the rows of this part alone
    in.x_out += at;
    vision_feed_forward(m, w, r, n, in);
    add_to_stream(stream, v->att, w->ffn_post_norm);
}

// Puts the embeddings of the columns and rows of n patches, summed, (n, dim), to backend memory.
static void upload_positions(const Model *m, int r, int n, float *dst) {
    const Vision *v = m->vision;
    const Tensor *t = &v->positions;
    const size_t dim = (size_t)v->dim, row = gguf_row_size(t->type, dim);
    const uint8_t *columns = t->data, *rows = columns + (size_t)t->rows * row;
    float *out = v->host, *of_row = out + (size_t)n * dim;
    for (int i = r; i < r + n; i++, out += dim) {
        const int x = i % v->width, y = i / v->width;
        if (i == r || !x) gguf_dequantize((int)t->type, rows + (size_t)y * row, of_row, dim);
        gguf_dequantize((int)t->type, columns + (size_t)x * row, out, dim);
        for (size_t k = 0; k < dim; k++) out[k] += of_row[k];
    }
    m->ops->copy(&(Copy){ dst, v->host, (size_t)n * dim * sizeof *dst, COPY_IN });
}

// Puts the values of n patches, from number r on, to v->patches: factor * (level / 255 - sub).
static void upload_patches(const Model *m, int r, int n, float factor, float sub) {
    const Vision *v = m->vision;
    const size_t size = (size_t)n * (size_t)v->patch;
    image_patches(v->rgb, v->width * v->side, v->side, r, n, v->host);
    for (size_t i = 0; i < size; i++) v->host[i] = factor * (v->host[i] - sub);
    m->ops->copy(&(Copy){ v->patches, v->host, size * sizeof *v->host, COPY_IN });
}

// The stream of n patches before the first layer, from number r on.
static void vision_embed(const Model *m, In *stream, int r, int n) {
    Vision *v = m->vision;
    const size_t at = (size_t)r * (size_t)v->dim;
    for (int i = 0; i < n; i++) {
        v->host_pos[2 * i] = (r + i) % v->width;
        v->host_pos[2 * i + 1] = (r + i) / v->width;
    }
    m->ops->copy(&(Copy){ v->pos + 2 * r, v->host_pos, (size_t)n * 2 * sizeof *v->pos, COPY_IN });
    upload_patches(m, r, n, 2, 0.5f);
    multiply(m, n, (In){ .x = v->patches, .scale = 1 }, &v->patch_embd, v->x[0] + at);
    upload_positions(m, r, n, v->att + at);
    *stream = (In){ .x = v->x[0], .delta = { v->att }, .scale = 1, .eps = v->eps };
}

// soft[r ..] = Wproj rms(rows), n rows of dim values.
static void project_soft(const Model *m, const float *rows, int r, int n) {
    const Vision *v = m->vision;
    multiply(m, n, (In){ .x = rows, .scale = 1, .w_pre = v->ones, .eps = v->eps }, &v->projection,
             v->soft + (size_t)r * (size_t)m->config.dim);
}

// The stream after the last layer, pooled, in v->q.
static void vision_pool(const Model *m, In *stream) {
    Vision *v = m->vision;
    const In in = stream_input(v->x, stream, NULL);
    const int n = v->width * v->height, step = rows_at_once(v, n);
    for (int r = 0; r < n; r += step)
        m->ops->close(&(Close){ .n_rows = min_int(step, n - r), .cols = v->dim,
                                .in = from_row(in, (size_t)r, v->dim) });
    m->ops->pool(&(Pool){ .w = v->width, .h = v->height, .side = POOL_SIDE, .cols = v->dim, .x = stream->x,
                          .factor = sqrtf((float)v->dim), .sub = v->std_bias, .mul = v->std_scale, .out = v->q });
}

// The embedder: n soft rows, from number r on.
static void vision_embed_blocks(const Model *m, int r, int n) {
    const Vision *v = m->vision;
    const float eps = 1e-5f;                           // of LayerNorm
    upload_patches(m, r, n, 1, 0);
    upload_positions(m, r, n, v->x[1]);
    m->ops->layer_norm(&(LayerNorm){ .n_rows = n, .cols = v->patch, .x = v->patches, .w = v->norm_w[0],
                                     .bias = v->norm_b[0], .eps = eps, .out = v->patches });
    multiply(m, n, (In){ .x = v->patches, .scale = 1 }, &v->patch_embd, v->x[0]);
    m->ops->layer_norm(&(LayerNorm){ .n_rows = n, .cols = v->dim, .x = v->x[0], .add = v->patch_bias,
                                     .w = v->norm_w[1], .bias = v->norm_b[1], .eps = eps, .out = v->x[0] });
    m->ops->layer_norm(&(LayerNorm){ .n_rows = n, .cols = v->dim, .x = v->x[0], .add_rows = v->x[1],
                                     .w = v->norm_w[2], .bias = v->norm_b[2], .eps = eps, .out = v->x[0] });
    project_soft(m, v->x[0], r, n);
}

static int last_pass(const Vision *v) { return v->embedder ? 0 : 2 * v->n_layers + 1; }

// Computes the next part of the current pass.
static void vision_part(Vision *v) {
    const Model *m = v->model;
    const bool pools = !v->embedder && v->pass == last_pass(v);
    const int all = v->width * v->height / (pools ? POOL_SIDE * POOL_SIDE : 1);
    const int r = v->row, n = min_int(rows_at_once(v, all), all - r);
    const VisionLayer *w = v->pass && !pools ? &v->layer[(v->pass - 1) / 2] : NULL;
    In stream = v->stream;                             // of all patches after this pass
    if (pools && !r) vision_pool(m, &v->stream);
    if (v->embedder) vision_embed_blocks(m, r, n);
    else if (pools) project_soft(m, v->q + (size_t)r * (size_t)v->dim, r, n);
    else if (!w) vision_embed(m, &stream, r, n);
    else if (v->pass % 2) vision_qkv(m, w, &stream, r, n);
    else vision_rest(m, w, &stream, r, n);
    v->row += n;
    if (v->row < all) return;
    if (!pools) v->stream = stream;
    v->row = 0;
    v->pass++;
}

// Begins a picture; one that is in work is given up. rgb (h, w, 3): the resized picture, of w x h pixels, multiples of
// 48, which stays until vision_next() is true. False: the file has no positions for so many patches (published files
// have enough). Requires: w / 48 * h / 48 <= max_tokens.
API bool vision_begin(Vision *v, const uint8_t *rgb, int w, int h) {
    assert(w > 0 && h > 0 && w % EMBEDDER_SIDE == 0 && h % EMBEDDER_SIDE == 0);
    assert(w / EMBEDDER_SIDE * (h / EMBEDDER_SIDE) <= v->max_tokens);
    v->rgb = rgb;
    v->width = w / v->side;
    v->height = h / v->side;
    v->pass = v->row = 0;
    return max_int(v->width, v->height) <= v->positions.rows;
}

// Goes on with the picture in work, by one part at least, until it is done, m->stop is set or seconds() is past
// `until`; INFINITY: it does not wait for a device after each part. Returns true when the picture is done. Requires: no
// step is being recorded.
API bool vision_next(Vision *v, double until) {
    const Model *m = v->model;
    const bool shows = m->ops->on_host && v->n_layers;
    const size_t n_layers = (size_t)v->n_layers + 1;
    bool goes_on = true;
    while (goes_on && v->pass <= last_pass(v)) {
        vision_part(v);
        if (shows) progress("picture", (size_t)v->pass / 2, n_layers, "layers");
        if (until < INFINITY) m->ops->wait();
        goes_on = seconds() < until && !(m->stop && *m->stop);
    }
    const bool done = v->pass > last_pass(v);
    if (shows && (done || (m->stop && *m->stop))) progress("picture", n_layers, n_layers, "layers");
    return done;
}

// Copies the soft rows of a picture that is done, (tokens, dim of the text model), to the host: one row for every
// 48 x 48 pixels, row by row. Returns how many.
API int vision_soft(const Vision *v, float *rows) {
    const Model *m = v->model;
    const int n = v->width * v->height * v->side * v->side / (EMBEDDER_SIDE * EMBEDDER_SIDE);
    m->ops->copy(&(Copy){ rows, v->soft, (size_t)n * (size_t)m->config.dim * sizeof *rows, COPY_OUT });
    m->ops->wait();
    return n;
}

// Computes the soft rows of a picture, as vision_begin() and vision_soft() say. Returns how many; 0: the file has no
// positions for the picture; STOPPED: m->stop was set.
API int vision_rows(Vision *v, const uint8_t *rgb, int w, int h, float *rows) {
    if (!vision_begin(v, rgb, w, h)) return 0;
    return vision_next(v, INFINITY) ? vision_soft(v, rows) : STOPPED;
}

#endif
