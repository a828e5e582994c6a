/* convert.h - verb_quantize() writes a model with other block formats.
 *
 * Uses load.h, base.h (threads, output files) and answer.h (signals). Begin with verb_quantize(). */
#ifndef CONVERT_H
#define CONVERT_H

// gemma4 quantize IN OUT TYPE: writes the same model with other block formats. The types of the tensors and the order
// of keys and tensors are those of llama-quantize without an importance matrix, so files are equal byte for byte.
// Tensors are streamed: all threads convert a few megabytes, then these are written.
//
// Matrices whose names end in "weight" are converted, except norms, routers (ffn_gate_inp) and the projection of the
// per-layer embeddings. All other tensors are copied. A recipe of a float type uses this type for all matrices. In the
// other recipes the first line that matches decides:
//   the head: output, or without it token_embd and per_layer_token_embd    Q6_K; Q8_0 in q8_0 files, and if a row is
//                                                                          not a multiple of the base type's blocks
//   attn_k and attn_v of models with exactly 8 experts                     Q8_0
//   attn_output of such models                                             Q5_K if the base type is Q4_K
//   attn_v, ffn_down and ffn_down_exps                                     the better type in some layers: is_better()
//   all others                                                             the base type
// A fused attn_qkv counts as attn_v. If a row is not a whole number of blocks of 256, the matrix gets a type with
// blocks of 32 and at least as many bits; if it is not a whole number of these either, F16. 26B-A4B needs this: its
// ffn_down has 2112 columns, its experts have 704.

typedef enum { NONE_BETTER, MORE_BITS, FIRST_BETTER } Better;       // layers in which attn_v and ffn_down get it

typedef struct {
    const char *name;
    int    file_type;           // general.file_type
    int    base, better;        // type of most matrices; of attn_v and ffn_down in some layers
    Better which;
} Recipe;

static const Recipe recipes[] = {
    { "q8_0",    7, GGUF_Q8_0, GGUF_Q8_0, NONE_BETTER },  { "q6_k",   18, GGUF_Q6_K, GGUF_Q6_K, NONE_BETTER },
    { "q5_k_m", 17, GGUF_Q5_K, GGUF_Q6_K, MORE_BITS },    { "q4_k_m", 15, GGUF_Q4_K, GGUF_Q6_K, MORE_BITS },
    { "q4_k_s", 14, GGUF_Q4_K, GGUF_Q5_K, FIRST_BETTER }, { "q4_0",    2, GGUF_Q4_0, GGUF_Q4_0, NONE_BETTER },
    { "bf16",   32, GGUF_BF16, GGUF_BF16, NONE_BETTER },  { "f16",     1, GGUF_F16,  GGUF_F16,  NONE_BETTER },
    { "f32",     0, GGUF_F32,  GGUF_F32,  NONE_BETTER },
};

typedef struct {
    const Recipe *recipe;
    int  n_layers;
    int  n_attn_v, i_attn_v;    // attn_v tensors of the file; of these, seen so far
    bool has_output, has_8_experts;
} Mixture;

static bool has_part(GgufStr name, const char *part) { return memmem(name.s, name.n, part, strlen(part)) != NULL; }
static bool ends_with(GgufStr name, const char *end) {
    const size_t n = strlen(end);
    return name.n >= n && !memcmp(name.s + name.n - n, end, n);
}

static int layer_of(GgufStr name) {                     // -1: it is outside the layers
    int layer = -1;
    if (name.n > 4 && !memcmp(name.s, "blk.", 4))
        for (size_t i = 4; i < name.n && i < 9 && name.s[i] >= '0' && name.s[i] <= '9'; i++)
            layer = 10 * max_int(layer, 0) + name.s[i] - '0';
    return layer;
}

// True if tensor i of n gets the better type. MORE_BITS: the first and the last eighth, and every third of the others.
// FIRST_BETTER: the first n_first.
static bool is_better(const Recipe *r, int i, int n, int n_first) {
    if (r->which == MORE_BITS) return i < n / 8 || i >= 7 * n / 8 || (i - n / 8) % 3 == 2;
    return r->which == FIRST_BETTER && i < n_first;
}

static bool is_attn_v(GgufStr name) { return has_part(name, "attn_v.weight") || has_part(name, "attn_qkv.weight"); }

static bool divides(const GgufTensor *t, int type) { return t->ne[0] % (uint64_t)gguf_block_elems(type) == 0; }

// Returns the type of a tensor in the new file. Call it once per tensor, in the order of the new file: it counts
// attn_v.
static int mixture_type(Mixture *m, const GgufTensor *t) {
    const Recipe *r = m->recipe;
    const GgufStr name = t->name;
    const bool is_integer = gguf_block_elems(t->type) == 1 && is_quantised((DType)t->type);
    if (t->n_dims < 2 || is_integer || !ends_with(name, "weight") || ends_with(name, "_norm.weight") ||
        has_part(name, "ffn_gate_inp.weight") || has_part(name, "per_layer_model_proj"))
        return t->type;
    if (gguf_block_elems(r->base) == 1) return r->base;

    const bool is_v = is_attn_v(name), is_down = has_part(name, "ffn_down");
    const int l = layer_of(name), n = is_v ? m->n_attn_v : m->n_layers, i = is_v ? m->i_attn_v++ : l;
    int type = r->base;
    if (m->has_output ? l < 0 && ends_with(name, "output.weight") : ends_with(name, "token_embd.weight"))
        type = r->base == GGUF_Q8_0 || !divides(t, r->base) ? GGUF_Q8_0 : GGUF_Q6_K;
    else if (m->has_8_experts && (is_v || has_part(name, "attn_k.weight")))
        type = GGUF_Q8_0;
    else if (r->base == GGUF_Q4_K && m->has_8_experts && has_part(name, "attn_output.weight"))
        type = GGUF_Q5_K;
    else if ((is_v || is_down) && is_better(r, i, n, is_v ? 4 : n / 8))
        type = r->better;

    if (!divides(t, type)) type = type == GGUF_Q4_K ? GGUF_Q5_0 : type == GGUF_Q5_K ? GGUF_Q5_1 : GGUF_Q8_0;
    return divides(t, type) ? type : GGUF_F16;
}

// Sorts as llama-quantize does: tensors outside the layers first, then layer by layer; within these by name.
static int tensor_order(const void *a, const void *b) {
    const GgufTensor *x = *(const GgufTensor *const *)a, *y = *(const GgufTensor *const *)b;
    const int by_layer = layer_of(x->name) - layer_of(y->name);
    const size_t n = x->name.n < y->name.n ? x->name.n : y->name.n;
    const int by_name = by_layer ? by_layer : memcmp(x->name.s, y->name.s, n);
    return by_name ? by_name : (x->name.n > y->name.n) - (x->name.n < y->name.n);
}

// ---- the new model ----

static Output open_model_output(const char *path, const char *in) {
    struct stat old, source;
    Output o;
    const GgufStr name = { path, strlen(path) };
    if (ends_with(name, ".safetensors") ||
        (ends_with(name, ".gguf") && name.n > 14 && !memcmp(path + name.n - 14, "-of-", 4)))
        die("%s: expected a new file name, got the name of one part of a split model", path);
    if (!stat(path, &old)) {
        if (!S_ISREG(old.st_mode)) die("%s: expected a regular file to write, got something else", path);
        if (!stat(in, &source) && old.st_dev == source.st_dev && old.st_ino == source.st_ino)
            die("%s: expected another file, got the model file itself", path);
    }
    const int err = create_model_output(&o, path, 0666);
    if (err) die_output("quantize", &o, err);
    return o;
}

static void write_model_output(const Output *o, const void *bytes, size_t n) {
    const int err = write_output(o, bytes, n);
    if (interrupted) {
        unlink(o->tmp);
        if (bar_shown) fprintf(stderr, "\n");
        _exit(128 + interrupted);
    }
    if (err == EFAULT) on_lost_pages(SIGBUS);           // the page fault happened in the system call
    if (err) die_output("quantize", o, err);
}

static void close_model_output(Output *o) {
    Gguf check;
    if (gguf_open(&check, o->tmp) < 0) die("%s: the written file is damaged: %s", o->path, check.err);
    gguf_close(&check);
    const int err = finish_output(o, 0);
    if (err) die_output("quantize", o, err);
}

enum { PIECE_BYTES = 4 << 20, PIECE_ELEMS = 4096 };     // written, converted at once; a multiple of all block sizes
enum { NOT_FINITE = 1, TOO_LARGE = 2 };                 // bits: a value of the source; a value for the new type

typedef struct {
    const GgufTensor *t;
    const uint8_t    *src;
    uint8_t          *dst;
    int               type;             // of dst
    atomic_int       *bad;              // NOT_FINITE | TOO_LARGE
} ConvertJob;

static void convert_range(const void *task, int first, int end) {
    const ConvertJob *job = task;
    const int from_type = job->t->type, type = job->type;
    const size_t cols = (size_t)job->t->ne[0], in = gguf_row_size(from_type, cols), out = gguf_row_size(type, cols);
    float x[PIECE_ELEMS];
    for (size_t r = (size_t)first; r < (size_t)end; r++)
        for (size_t c = 0; c < cols; c += PIECE_ELEMS) {
            const size_t n = cols - c < PIECE_ELEMS ? cols - c : PIECE_ELEMS;
            const uint8_t *from = job->src + r * in + gguf_row_size(from_type, c);
            uint8_t *to = job->dst + r * out + gguf_row_size(type, c);
            const size_t n_from = n / (size_t)gguf_block_elems(from_type), n_to = n / (size_t)gguf_block_elems(type);
            gguf_dequantize(from_type, from, x, n);
            gguf_quantize(type, x, to, n);
            if (gguf_find_bad_block(from_type, from, n_from) < n_from) atomic_fetch_or(job->bad, NOT_FINITE);
            if (gguf_find_bad_block(type, to, n_to) < n_to) atomic_fetch_or(job->bad, TOO_LARGE);
        }
}

// Converts n_rows rows of a tensor from `src` to `dst`. Returns 0, or NOT_FINITE | TOO_LARGE.
static int convert_rows(const GgufTensor *t, const uint8_t *src, int type, uint8_t *dst, size_t n_rows) {
    atomic_int bad = 0;
    const ConvertJob job = { .t = t, .src = src, .dst = dst, .type = type, .bad = &bad };
    parallel((int)n_rows, chunk_size((int)n_rows, 1), convert_range, &job);
    return bad;
}

static const Recipe *find_recipe(const char *name) {
    for (size_t i = 0; i < sizeof recipes / sizeof *recipes; i++)
        if (!strcasecmp(name, recipes[i].name)) return &recipes[i];
    die("%s: expected a type, one of q8_0 q6_k q5_k_m q4_k_m q4_k_s q4_0 bf16 f16 f32", name);
}

// Returns the integer key "ARCH.KEY", or `fallback` if the file lacks it.
static int arch_int(Gguf *g, const char *key, int fallback) {
    GgufStr arch = { "", 0 };
    char full[128];
    int64_t v = fallback;
    if (gguf_get_str(g, "general.architecture", &arch) < 0) die_gguf(g);
    snprintf(full, sizeof full, "%.*s.%s", (int)(arch.n < 64 ? arch.n : 64), arch.s, key);
    if (gguf_get_int(g, full, 0, INT_MAX, &v) < 0) die_gguf(g);
    return (int)v;
}

typedef struct { const char *what; size_t done, total; } Bar;        // the progress line; in bytes

// Writes a tensor of the file `in` as `type`, padded with zeros to a multiple of 32 bytes. Returns the bytes written.
// *buffer is enlarged if it is too small.
static size_t write_tensor(const Output *o, const GgufTensor *t, int type, uint8_t **buffer, const char *in,
                           const Bar *bar) {
    static const uint8_t zeros[32];
    const size_t row = gguf_row_size(type, (size_t)t->ne[0]), in_row = gguf_row_size(t->type, (size_t)t->ne[0]);
    const size_t n_rows = (size_t)(t->ne[1] * t->ne[2] * t->ne[3]), step = row < PIECE_BYTES ? PIECE_BYTES / row : 1;
    const bool converts = type != t->type;
    if (converts) {
        *buffer = realloc(*buffer, step * row);
        if (!*buffer) die("%s: out of memory: cannot allocate %zu bytes", o->path, step * row);
    }
    for (size_t r = 0; r < n_rows; r += step) {
        const size_t n = n_rows - r < step ? n_rows - r : step, done = bar->done + (r + n) * row;
        const int bad = converts ? convert_rows(t, t->data + r * in_row, type, *buffer, n) : 0;
        if (bad & NOT_FINITE) die("%s: tensor '%s' of %s has NaN or Inf values", o->path, shown(t->name), in);
        if (bad)
            die("%s: tensor '%s' of %s has values too large for %s", o->path, shown(t->name), in,
                gguf_type_name(type));
        write_model_output(o, converts ? *buffer : t->data + r * in_row, n * row);
        if (done < bar->total) progress(bar->what, done, bar->total, "B");
    }
    const size_t pad = round_up(n_rows * row, 32) - n_rows * row;
    write_model_output(o, zeros, pad);
    return n_rows * row + pad;
}

// Puts the keys of the new file: all keys of g but those that describe how it is quantised or split.
static void put_model_keys(GgufWriter *w, const Gguf *g, const Recipe *recipe) {
    for (size_t i = 0; i < g->n_kvs; i++) {
        const GgufStr key = g->kvs[i].key;
        const bool replaced = str_is(key, "general.file_type") || str_is(key, "general.quantization_version");
        if (!replaced && !(key.n > 6 && !memcmp(key.s, "split.", 6))) gguf_put_kv(w, &g->kvs[i]);
    }
    gguf_put_u32(w, "general.quantization_version", 2);
    gguf_put_u32(w, "general.file_type", (uint32_t)recipe->file_type);
}

// Puts the tensors of the new file: their order (g->n_tensors) and types. in: the name of the file g.
static void put_model_tensors(GgufWriter *w, const Gguf *g, const char *in, Mixture *m, const GgufTensor **order,
                              int *types) {
    size_t n_requantised = 0;
    for (size_t i = 0; i < g->n_tensors; i++) {
        order[i] = &g->tensors[i];
        m->n_attn_v += is_attn_v(order[i]->name);
    }
    qsort(order, g->n_tensors, sizeof *order, tensor_order);
    for (size_t i = 0; i < g->n_tensors; i++) {
        const GgufTensor *t = order[i];
        types[i] = mixture_type(m, t);
        if (types[i] != t->type && !gguf_type_supported(t->type))
            die("%s: tensor '%s': expected a type that can be converted, got %s", in, shown(t->name),
                gguf_type_name(t->type));
        n_requantised += types[i] != t->type && is_quantised((DType)t->type) && is_quantised((DType)types[i]);
        gguf_put_tensor(w, t->name, types[i], t->n_dims, t->ne);
    }
    if (n_requantised)
        fprintf(stderr, "# warning: %zu tensors are already quantized; quantizing from f16 gives better quality\n",
                n_requantised);
}

static void print_sizes(const Gguf *g, const char *out, size_t out_bytes, size_t data_bytes, double taken) {
    const double mib = 1 << 20;
    size_t n_elems = 0, in_bytes = 0;
    for (size_t i = 0; i < g->n_tensors; i++) {
        n_elems += n_elements(&g->tensors[i]);
        in_bytes += (size_t)g->tensors[i].size;
    }
    fprintf(stderr, "# %s: %.1f MiB to %.1f MiB, %.2f bits per weight, %.1f s, %.3f GB/s read\n", out,
            (double)in_bytes / mib, (double)out_bytes / mib,
            n_elems ? 8 * (double)data_bytes / (double)n_elems : 0, taken, (double)in_bytes / 1e9 / taken);
}

static void verb_quantize(const char *in, const char *out, const char *type_name) {
    Mixture m = { .recipe = find_recipe(type_name) };
    GgufWriter w = { 0 };
    Gguf g;
    open_model_file(&g, in, false);
    m.n_layers = arch_int(&g, "block_count", 0);
    m.has_8_experts = arch_int(&g, "expert_count", 0) == 8;
    m.has_output = gguf_find_tensor(&g, "output.weight") != NULL;
    const GgufTensor **order = alloc_or_die(g.n_tensors, sizeof *order);
    int *types = alloc_or_die(g.n_tensors, sizeof *types);
    put_model_keys(&w, &g, m.recipe);
    put_model_tensors(&w, &g, in, &m, order, types);
    size_t head_size;
    uint8_t *head = gguf_writer_head(&w, &head_size), *buffer = NULL;
    if (!head) die("out of memory: cannot allocate the header of %s", out);

    stop_on(SIGINT);
    stop_on(SIGTERM);
    stop_on(SIGHUP);
    Output o = open_model_output(out, in);
    const double start = seconds();
    const size_t total = head_size + (size_t)w.data_size;
    size_t at = head_size;
    progress(m.recipe->name, 0, total, "B");
    write_model_output(&o, head, head_size);
    for (size_t i = 0; i < g.n_tensors; i++)
        at += write_tensor(&o, order[i], types[i], &buffer, in, &(Bar){ m.recipe->name, at, total });
    progress(m.recipe->name, total, total, "B");        // erases the progress line
    close_model_output(&o);
    print_sizes(&g, out, total, (size_t)w.data_size, seconds() - start);
    free(buffer);
    free(head);
    free(types);
    free(order);
    gguf_writer_free(&w);
    gguf_close(&g);
}

#endif
