/* test_vision.c - the image tower: soft rows against published results and against a plain computation; files; memory.
 *
 * by_hand() computes the soft rows of a GGUF projector in f64, one value after the other, from the formulas alone: it
 * shares no code with parts/vision.h. Small towers with formula weights are compared with it, in every type of file.
 * tests/golden has two towers, a picture and what Hugging Face transformers makes of it; VISION_GOLDEN=FOLDER compares
 * with all of that data (tests/golden/README.md).
 * Arguments: -cuda: the CUDA backend instead of the CPU; -plain: the plain CUDA backend; -few after it: each kind of
 * tower once, with a small picture. */
#define _GNU_SOURCE
#define TESTING
#include "../gemma4.c"
#include "card.h"
#include "test.h"
#include "files.h"

static const Ops *op;
static double tolerance;      // of the largest value: 1e-4 on the CPU, 2e-2 with 16-bit products

// ---- a tower without a text model -----------------------------------------------------------------------------------

// Opens a tower for a text model of `dim` columns that is not there. file "": the tower of the folder `own`.
static Model *open_alone(const char *file, const char *own, int dim, int n_batch, int tokens) {
    Model *m = must(calloc(1, sizeof *m));
    m->ops = op;
    m->config.dim = dim;
    m->options.n_batch = n_batch;
    m->options.image_tokens = tokens;
    m->gguf.path = own;
    m->gguf.converted = !*file;
    m->vision = vision_open(m, file);
    Arena arena = { 0 };
    plan_vision(m, &arena);
    op->init(&(Limits){ .max_rows = n_batch, .max_cols = max_int(vision_cols(m->vision), dim), .vocab = 32 });
    const size_t bytes = arena.used;
    arena = (Arena){ .base = must(op->reserve(bytes)) };
    m->arena = arena.base;
    plan_vision(m, &arena);
    CHECK(arena.used == bytes && m->plan.vision == bytes, "%s: planned %zu bytes, then %zu", file, bytes, arena.used);
    start_vision(m);
    return m;
}

static void close_alone(Model *m) {
    op->release(m->arena);
    vision_close(m->vision);
    free(m);
}

static float *soft_rows(Model *m, const uint8_t *rgb, int w, int h) {
    const int n = w / 48 * (h / 48);
    float *rows = must(calloc((size_t)n * (size_t)m->config.dim, sizeof *rows));
    const int got = vision_rows(m->vision, rgb, w, h, rows);
    CHECK(got == n, "%s: %d x %d pixels: %d rows, expected %d", m->vision->gguf.path, w, h, got, n);
    return rows;
}

// The rows of one file, with its tower opened for them alone.
static float *rows_of(const char *file, const char *own, int dim, int n_batch, const uint8_t *rgb, int w, int h) {
    Model *m = open_alone(file, own, dim, n_batch, w / 48 * (h / 48));
    float *rows = soft_rows(m, rgb, w, h);
    close_alone(m);
    return rows;
}

static void compare(const char *what, const float *got, const float *want, size_t n, double part) {
    double largest = 0, worst = 0;
    size_t at = 0;
    for (size_t i = 0; i < n; i++) largest = fmax(largest, fabs((double)want[i]));
    for (size_t i = 0; i < n; i++) {
        const double off = fabs((double)got[i] - (double)want[i]);
        if (!(off <= worst)) worst = off, at = i;
    }
    CHECK(worst <= part * largest, "%s: value %zu of %zu: got %.8g, want %.8g, off by %.2g of the largest, tolerance %.2g",
          what, at, n, (double)got[at], (double)want[at], worst / largest, part);
    if (getenv("TEST_VERBOSE")) printf("%s: %.2g\n", what, worst / largest);
}

// ---- published results ----------------------------------------------------------------------------------------------

static void *read_bytes(const char *path, size_t n) {  // NULL: there is no such file
    FILE *f = fopen(path, "rb");
    if (!f) return NULL;
    void *p = must(malloc(n));
    CHECK(fread(p, 1, n, f) == n, "%s: expected %zu bytes", path, n);
    fclose(f);
    return p;
}

static char golden[600];      // the folder of published results
static float *golden_floats(const char *kind, const char *name, size_t n) {
    char path[700];
    snprintf(path, sizeof path, "%s/%s/%s.f32", golden, kind, name);
    return read_bytes(path, n * sizeof(float));
}

// The stream, with what is still to be added to it.
static float *stream_now(Model *m) {
    Vision *v = m->vision;
    const size_t n = (size_t)(v->width * v->height) * (size_t)v->dim;
    float *rows = must(malloc(n * sizeof *rows)), *out = must(op->reserve(n * sizeof *rows));
    op->close(&(Close){ .n_rows = v->width * v->height, .cols = v->dim, .in = v->stream, .out = out });
    op->copy(&(Copy){ rows, out, n * sizeof *rows, COPY_OUT });
    op->wait();
    op->release(out);
    return rows;
}

// The checkpoints of a tower: embeddings, layers, the pooled rows.
static void golden_steps(const char *kind, Model *m, const char *picture, const uint8_t *rgb, int w, int h) {
    Vision *v = m->vision;
    const size_t n = (size_t)(w / 16 * (h / 16)), dim = (size_t)v->dim;
    char name[100], what[120];
    CHECK(vision_begin(v, rgb, w, h), "%s: no positions", picture);
    for (int l = -1; l < v->n_layers; l++) {
        while (v->pass < 2 * l + 3) vision_part(v);
        if (l < 0) snprintf(name, sizeof name, "%s.embed", picture);
        else snprintf(name, sizeof name, "%s.layer%d", picture, l);
        float *want = golden_floats(kind, name, n * dim), *got = stream_now(m);
        snprintf(what, sizeof what, "%s %s", kind, name);
        if (want) compare(what, got, want, n * dim, tolerance);
        free(want);
        free(got);
    }
    vision_part(v);
    snprintf(name, sizeof name, "%s.tower", picture);
    snprintf(what, sizeof what, "%s %s", kind, name);
    float *want = golden_floats(kind, name, n / 9 * dim), *got = must(malloc(n / 9 * dim * sizeof *got));
    op->copy(&(Copy){ got, v->q, n / 9 * dim * sizeof *got, COPY_OUT });
    op->wait();
    if (want) compare(what, got, want, n / 9 * dim, tolerance);
    free(want);
    free(got);
}

static void golden_picture(const char *kind, Model *m, const char *picture, int w, int h) {
    char path[700], name[100], what[120];
    const size_t n = (size_t)(w / 48 * (h / 48)) * (size_t)m->config.dim;
    snprintf(path, sizeof path, "%s/P/%s.resized.u8", golden, picture);
    uint8_t *rgb = read_bytes(path, (size_t)w * (size_t)h * 3);
    snprintf(name, sizeof name, "%s.soft", picture);
    float *want = rgb ? golden_floats(kind, name, n) : NULL;
    if (!want) {
        free(rgb);
        return;
    }
    if (!m->vision->embedder) golden_steps(kind, m, picture, rgb, w, h);
    float *got = soft_rows(m, rgb, w, h);
    snprintf(what, sizeof what, "%s %s", kind, name);
    compare(what, got, want, n, tolerance);
    free(got);
    free(want);
    free(rgb);
}

static double *by_hand(const char *file, const uint8_t *rgb, int w, int h, int *out_dim);

// A picture of a kind of tower: by hand too, so that by_hand() can be trusted with other towers.
static void golden_by_hand(const char *kind, const char *file) {
    char path[700];
    int dim;
    snprintf(path, sizeof path, "%s/P/check333x517.resized.u8", golden);
    uint8_t *rgb = read_bytes(path, 288 * 480 * 3);
    float *want = golden_floats(kind, "check333x517.soft", 60 * 32), got[60 * 32];
    if (rgb && want) {
        double *rows = by_hand(file, rgb, 288, 480, &dim);
        for (int i = 0; i < 60 * 32; i++) got[i] = (float)rows[i];
        compare("by hand", got, want, 60 * 32, 1e-4);
        free(rows);
    }
    free(want);
    free(rgb);
}

static void golden_kind(const char *kind) {
    static const struct { const char *name; int w, h; } pictures[] = {
        { "grad333x517", 288, 480 }, { "check333x517", 288, 480 }, { "grad48x48", 384, 384 },
        { "check1000x200", 864, 144 }, { "noise121x77", 480, 288 }, { "noise384x384", 384, 384 } };
    char file[700], folder[700];
    snprintf(file, sizeof file, "%s/%s/mmproj.gguf", golden, kind);
    snprintf(folder, sizeof folder, "%s/%s/hf", golden, kind);
    if (access(file, R_OK)) return;
    Model *m = open_alone(file, "a text model", 32, 512, 70);
    for (size_t i = 0; i < sizeof pictures / sizeof *pictures; i++)
        golden_picture(kind, m, pictures[i].name, pictures[i].w, pictures[i].h);
    close_alone(m);
    if (op->exact_prompts) golden_by_hand(kind, file);
    if (access(folder, R_OK)) return;
    char path[700];
    snprintf(path, sizeof path, "%s/P/check333x517.resized.u8", golden);
    uint8_t *rgb = read_bytes(path, 288 * 480 * 3);
    if (!rgb) return;
    float *a = rows_of(file, "a text model", 32, 512, rgb, 288, 480), *b = rows_of("", folder, 32, 512, rgb, 288, 480);
    CHECK(!memcmp(a, b, 60 * 32 * sizeof *a), "%s: the folder and the GGUF file give different rows", kind);
    free(a);
    free(b);
    free(rgb);
}

static bool unpack(const char *name, const char *to) { // tests/golden/NAME.gz
    char command[1700];
    snprintf(command, sizeof command, "gzip -dc tests/golden/%s.gz > '%s' 2>/dev/null", name, to);
    return system(command) == 0;
}

static void test_golden(void) {
    const char *all = getenv("VISION_GOLDEN");
    static const char *const dirs[] = { "P", "E", "V", "U" };
    if (all && *all) {
        snprintf(golden, sizeof golden, "%s", all);
    } else {
        snprintf(golden, sizeof golden, "%s", tmp);
        for (int i = 0; i < 4; i++) mkdir(in_tmp("%s", dirs[i]), 0777);
        if (!unpack("vision-check333x517.u8", in_tmp("P/check333x517.resized.u8")) ||
            !unpack("vision-E.gguf", in_tmp("E/mmproj.gguf")) || !unpack("vision-U.gguf", in_tmp("U/mmproj.gguf")) ||
            !unpack("vision-E.soft.f32", in_tmp("E/check333x517.soft.f32")) ||
            !unpack("vision-U.soft.f32", in_tmp("U/check333x517.soft.f32"))) {
            SKIP("published results of towers: gzip is missing");
            return;
        }
    }
    const int before = test_passed;
    for (int i = 1; i < 4; i++) golden_kind(dirs[i]);
    CHECK(test_passed > before, "%s: no towers", golden);
}

// ---- towers by formula ----------------------------------------------------------------------------------------------

typedef struct {
    bool embedder, clamps, standard;   // standard: std_bias and std_scale
    int  dim, heads, ffn, layers, positions, out;
    int  type, down_type;              // of matrices; of ffn_down
} Tower;

static uint64_t state = 1;
static float uniform(void) {           // [-1, 1)
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (float)((double)(state >> 40) / (1 << 23) - 1);
}

static DraftTensor *add_tensor(Draft *d, const char *name, int type, uint64_t a, uint64_t b, uint64_t c, uint64_t e,
                               float scale, float offset) {
    DraftTensor *t = draft_add(d, name, a);
    const size_t n = (size_t)(a * b * c * e), bytes = gguf_row_size(type, n);
    t->type = type;
    t->n_dims = e > 1 ? 4 : c > 1 ? 3 : b > 1 ? 2 : 1;
    memcpy(t->ne, (uint64_t[]){ a, b, c, e }, sizeof t->ne);
    float *v = must(malloc(n * sizeof *v));
    uint8_t *data = must(malloc(bytes));
    for (size_t i = 0; i < n; i++) v[i] = offset + scale * uniform();
    gguf_quantize(type, v, data, n);
    put(&t->data, data, bytes);
    free(v);
    free(data);
    return t;
}

static void add_matrix_of(Draft *d, const Tower *t, const char *stem, int l, int type, int rows, int cols) {
    char name[64];
    snprintf(name, sizeof name, "v.blk.%d.%s.weight", l, stem);
    add_tensor(d, name, type, (uint64_t)cols, (uint64_t)rows, 1, 1, 2 / sqrtf((float)cols), 0);
    static const struct { const char *end; float v; } bounds[] = { { "input_min", -0.8f }, { "input_max", 1.1f },
                                                                   { "output_min", -1.3f }, { "output_max", 0.9f } };
    for (int i = 0; i < 4 && t->clamps; i++) {
        snprintf(name, sizeof name, "v.blk.%d.%s.%s", l, stem, bounds[i].end);
        const bool open = l == 1 && !strcmp(stem, "attn_v") && i == 3;         // one bound is infinite
        fill(draft_add(d, name, 1), open ? INFINITY : bounds[i].v * (1 + 0.2f * uniform()));
    }
}

static void put_key_u32(Draft *d, const char *name, uint32_t v) {
    Bytes *b = &draft_key(d, name)->value;
    b->n = 0;
    put_u32(b, GGUF_V_U32);
    put_u32(b, v);
}
static void put_key_bool(Draft *d, const char *name, bool v) {
    Bytes *b = &draft_key(d, name)->value;
    b->n = 0;
    put_u32(b, GGUF_V_BOOL);
    put(b, &(uint8_t){ v }, 1);
}
static void put_key_text(Draft *d, const char *name, const char *v) {
    Bytes *b = &draft_key(d, name)->value;
    b->n = 0;
    put_u32(b, GGUF_V_STR);
    put_text(b, v);
}

static void add_layer(Draft *d, const Tower *t, int l) {
    static const char *const norms[] = { "ln1", "attn_post_norm", "ln2", "ffn_post_norm", "attn_q_norm", "attn_k_norm" };
    char name[64];
    for (int i = 0; i < 6; i++) {
        snprintf(name, sizeof name, "v.blk.%d.%s.weight", l, norms[i]);
        add_tensor(d, name, GGUF_F32, (uint64_t)(i < 4 ? t->dim : t->dim / t->heads), 1, 1, 1, 0.5f, i < 4 ? 1 : 0.6f);
    }
    add_matrix_of(d, t, "attn_q", l, t->type, t->dim, t->dim);
    add_matrix_of(d, t, "attn_k", l, t->type, t->dim, t->dim);
    add_matrix_of(d, t, "attn_v", l, t->type, t->dim, t->dim);
    add_matrix_of(d, t, "attn_out", l, t->type, t->dim, t->dim);
    add_matrix_of(d, t, "ffn_gate", l, t->type, t->ffn, t->dim);
    add_matrix_of(d, t, "ffn_up", l, t->type, t->ffn, t->dim);
    add_matrix_of(d, t, "ffn_down", l, t->down_type, t->dim, t->ffn);
}

static Draft draft_tower(const Tower *t) {
    Draft d = { .alignment = 32, .keys = must(calloc(32, sizeof *d.keys)),
                .tensors = must(calloc(64 + (size_t)t->layers * 64, sizeof *d.tensors)) };
    const uint64_t dim = (uint64_t)t->dim, n = (uint64_t)t->positions;
    const int plain = t->type == GGUF_Q8_0 ? GGUF_F16 : t->type;       // of a matrix in four dimensions
    state = 1;
    put_key_text(&d, "general.architecture", "clip");
    put_key_text(&d, "general.type", "mmproj");
    put_key_bool(&d, "clip.has_vision_encoder", true);
    put_key_text(&d, "clip.vision.projector_type", t->embedder ? "gemma4uv" : "gemma4v");
    put_key_u32(&d, "clip.vision.projection_dim", (uint32_t)t->out);
    put_key_u32(&d, "clip.vision.patch_size", 16);
    put_key_u32(&d, "clip.vision.embedding_length", (uint32_t)t->dim);
    put_key_u32(&d, "clip.vision.feed_forward_length", (uint32_t)t->ffn);
    put_key_u32(&d, "clip.vision.block_count", (uint32_t)t->layers);
    put_key_u32(&d, "clip.vision.attention.head_count", (uint32_t)t->heads);
    if (t->embedder) {
        add_tensor(&d, "v.patch_embd.weight", t->type, 6912, dim, 1, 1, 0.02f, 0);
        add_tensor(&d, "v.patch_embd.bias", GGUF_F32, dim, 1, 1, 1, 0.5f, 0);
        char name[64];
        for (int i = 1; i <= 3; i++) {
            snprintf(name, sizeof name, "v.patch_norm.%d.weight", i);
            add_tensor(&d, name, GGUF_F32, i == 1 ? 6912 : dim, 1, 1, 1, 0.5f, 1);
            snprintf(name, sizeof name, "v.patch_norm.%d.bias", i);
            add_tensor(&d, name, GGUF_F32, i == 1 ? 6912 : dim, 1, 1, 1, 0.5f, 0);
        }
        add_tensor(&d, "mm.a.input_projection.weight", GGUF_F16, 640, (uint64_t)t->out, 1, 1, 1, 0);   // not read
    } else {
        add_tensor(&d, "v.patch_embd.weight", plain, 16, 16, 3, dim, 0.1f, 0);
        for (int l = 0; l < t->layers; l++) add_layer(&d, t, l);
        add_tensor(&d, "a.blk.0.attn_q.weight", GGUF_F16, 32, 32, 1, 1, 1, 0);                          // not read
    }
    add_tensor(&d, "v.position_embd.weight", GGUF_F32, dim, n, 2, 1, 1, 0);
    add_tensor(&d, "mm.input_projection.weight", t->type, dim, (uint64_t)t->out, 1, 1, 1 / sqrtf((float)dim), 0);
    if (t->standard) {
        DraftTensor *bias = add_tensor(&d, "v.std_bias", GGUF_F32, dim, 1, 1, 1, 3, 0);
        DraftTensor *scale = add_tensor(&d, "v.std_scale", GGUF_F32, dim, 1, 1, 1, 0.5f, 1);
        memcpy(bias->data.data + 8, &(float){ 90000 }, 4);             // more than binary16 holds
        memcpy(scale->data.data + 8, &(float){ 2e-5f }, 4);
    }
    return d;
}

static const char *write_tower(const Tower *t, const char *name) {
    Draft d = draft_tower(t);
    return kept(write_draft(&d, in_tmp("%s.gguf", name)));
}

// A picture with structure in every direction, noise and a dark corner.
static uint8_t *picture(int w, int h) {
    uint8_t *rgb = must(malloc((size_t)w * (size_t)h * 3));
    state = 77;
    for (int y = 0; y < h; y++)
        for (int x = 0; x < w; x++)
            for (int c = 0; c < 3; c++) {
                const double v = 128 + 70 * sin(x * 0.11 + c) + 40 * cos(y * 0.07 - c) + 15 * (double)uniform();
                rgb[3 * (y * w + x) + c] = x < 20 && y < 30 ? (uint8_t)(10 * c) : (uint8_t)fmin(255, fmax(0, v));
            }
    return rgb;
}

// ---- by hand --------------------------------------------------------------------------------------------------------

static Gguf hand;             // the file that by_hand() reads
static double *values_of(const char *name, size_t *n) {                // NULL: no such tensor
    const GgufTensor *t = gguf_find_tensor(&hand, name);
    if (!t) return NULL;
    *n = (size_t)(t->ne[0] * t->ne[1] * t->ne[2] * t->ne[3]);
    float *f = must(malloc(*n * sizeof *f));
    double *v = must(malloc(*n * sizeof *v));
    gguf_dequantize(t->type, t->data, f, *n);
    for (size_t i = 0; i < *n; i++) v[i] = (double)f[i];
    free(f);
    return v;
}

static void norm_by_hand(double *u, const double *w, int n) {          // w NULL: no weight
    double squares = 0;
    for (int i = 0; i < n; i++) squares += u[i] * u[i];
    for (int i = 0; i < n; i++) u[i] *= (w ? w[i] : 1) / sqrt(squares / n + 1e-6);
}

static void layer_norm_by_hand(double *u, const char *weight, const char *bias, int n) {
    size_t count;
    double *w = values_of(weight, &count), *b = values_of(bias, &count), mean = 0, var = 0;
    for (int i = 0; i < n; i++) mean += u[i] / n;
    for (int i = 0; i < n; i++) var += (u[i] - mean) * (u[i] - mean) / n;
    for (int i = 0; i < n; i++) u[i] = w[i] * (u[i] - mean) / sqrt(var + 1e-5) + b[i];
    free(w);
    free(b);
}

static double bound(const char *stem, const char *end, double fallback) {
    char name[80];
    size_t n;
    snprintf(name, sizeof name, "%s.%s", stem, end);
    double *v = values_of(name, &n), x = v ? *v : fallback;
    free(v);
    return x;
}

// C(W, rows): n rows of `cols` values times the matrix STEM.weight, with its clamps.
static double *times(const char *stem, const double *rows, int n, int cols) {
    char name[80];
    size_t count;
    snprintf(name, sizeof name, "%s.weight", stem);
    double *w = values_of(name, &count);
    const int m = (int)(count / (size_t)cols);
    const double lo = bound(stem, "input_min", -INFINITY), hi = bound(stem, "input_max", INFINITY);
    const double out_lo = bound(stem, "output_min", -INFINITY), out_hi = bound(stem, "output_max", INFINITY);
    double *out = must(malloc((size_t)(n * m) * sizeof *out)), *u = must(malloc((size_t)cols * sizeof *u));
    for (int r = 0; r < n; r++) {
        for (int k = 0; k < cols; k++) u[k] = fmin(fmax(rows[r * cols + k], lo), hi);
        for (int i = 0; i < m; i++) {
            double sum = 0;
            for (int k = 0; k < cols; k++) sum += w[(size_t)i * (size_t)cols + (size_t)k] * u[k];
            out[r * m + i] = fmin(fmax(sum, out_lo), out_hi);
        }
    }
    free(u);
    free(w);
    return out;
}

static double *normed_rows(const double *x, const char *name, int n, int dim) {
    size_t count;
    double *w = values_of(name, &count), *y = must(malloc((size_t)(n * dim) * sizeof *y));
    memcpy(y, x, (size_t)(n * dim) * sizeof *y);
    for (int r = 0; r < n; r++) norm_by_hand(y + r * dim, w, dim);
    free(w);
    return y;
}

static void add_normed(double *x, double *y, const char *name, int n, int dim) {
    double *d = normed_rows(y, name, n, dim);
    for (int i = 0; i < n * dim; i++) x[i] += d[i];
    free(d);
    free(y);
}

// Rotates one head of a patch at (px, py): its first half by px, the second by py.
static void rotate_by_hand(double *u, int hd, int px, int py) {
    for (int axis = 0; axis < 2; axis++)
        for (int i = 0; i < hd / 4; i++) {
            const double angle = (axis ? py : px) * pow(100, -2.0 * i / (hd / 2));
            double *a = u + axis * hd / 2 + i, *b = a + hd / 4, x = *a, y = *b;
            *a = x * cos(angle) - y * sin(angle);
            *b = x * sin(angle) + y * cos(angle);
        }
}

static double *attention_by_hand(double *const qkv[3], int n, int heads, int hd) {
    const int dim = heads * hd;
    double *out = must(calloc((size_t)(n * dim), sizeof *out)), *p = must(malloc((size_t)n * sizeof *p));
    for (int r = 0; r < n; r++)
        for (int h = 0; h < heads; h++) {
            double sum = 0, top = -INFINITY;
            for (int j = 0; j < n; j++) {
                p[j] = 0;
                for (int i = 0; i < hd; i++) p[j] += qkv[0][r * dim + h * hd + i] * qkv[1][j * dim + h * hd + i];
                top = fmax(top, p[j]);
            }
            for (int j = 0; j < n; j++) sum += p[j] = exp(p[j] - top);
            for (int j = 0; j < n; j++)
                for (int i = 0; i < hd; i++) out[r * dim + h * hd + i] += p[j] / sum * qkv[2][j * dim + h * hd + i];
        }
    free(p);
    return out;
}

static void layer_by_hand(double *x, int l, int n, int width, int dim, int heads, int ffn) {
    static const char *const names[3] = { "attn_q", "attn_k", "attn_v" };
    char name[80];
#define OF(end) (snprintf(name, sizeof name, "v.blk.%d.%s", l, end), name)
    const int hd = dim / heads;
    double *qkv[3], *y = normed_rows(x, OF("ln1.weight"), n, dim);
    for (int k = 0; k < 3; k++) {
        size_t count;
        qkv[k] = times(OF(names[k]), y, n, dim);
        double *w = k < 2 ? values_of(OF(k ? "attn_k_norm.weight" : "attn_q_norm.weight"), &count) : NULL;
        for (int i = 0; i < n * heads; i++) {
            norm_by_hand(qkv[k] + i * hd, w, hd);
            if (k < 2) rotate_by_hand(qkv[k] + i * hd, hd, i / heads % width, i / heads / width);
        }
        free(w);
    }
    free(y);
    y = attention_by_hand(qkv, n, heads, hd);
    double *out = times(OF("attn_out"), y, n, dim);
    add_normed(x, out, OF("attn_post_norm.weight"), n, dim);
    free(y);
    for (int k = 0; k < 3; k++) free(qkv[k]);

    y = normed_rows(x, OF("ln2.weight"), n, dim);
    double *gate = times(OF("ffn_gate"), y, n, dim), *up = times(OF("ffn_up"), y, n, dim);
    for (int i = 0; i < n * ffn; i++) {
        const double g = gate[i];
        gate[i] = 0.5 * g * (1 + tanh(sqrt(2 / M_PI) * (g + 0.044715 * g * g * g))) * up[i];
    }
    double *down = times(OF("ffn_down"), gate, n, ffn);
    add_normed(x, down, OF("ffn_post_norm.weight"), n, dim);
#undef OF
    free(y);
    free(gate);
    free(up);
}

// Patches in the order of GGUF files, (channel, y, x), and the position embedding of each, added to its products.
static double *patches_by_hand(const uint8_t *rgb, int w, int h, int side, double scale, double offset) {
    const int area = side * side;
    double *p = must(malloc((size_t)(w * h * 3) * sizeof *p));
    for (int y = 0; y < h; y++)
        for (int x = 0; x < w; x++)
            for (int c = 0; c < 3; c++)
                p[((size_t)(y / side * (w / side) + x / side) * 3 + (size_t)c) * (size_t)area +
                  (size_t)(y % side * side + x % side)] = scale * (rgb[3 * (y * w + x) + c] / 255.0) + offset;
    return p;
}

static void add_positions(double *x, int n, int width, int dim) {
    size_t count;
    double *table = values_of("v.position_embd.weight", &count);
    const size_t per_axis = count / 2;
    for (int r = 0; r < n; r++)
        for (int i = 0; i < dim; i++)
            x[r * dim + i] += table[r % width * dim + i] + table[per_axis + (size_t)(r / width * dim + i)];
    free(table);
}

static double *blocks_by_hand(const uint8_t *rgb, int w, int h, int dim) {
    const int n = w / 48 * (h / 48);
    size_t count;
    double *p = patches_by_hand(rgb, w, h, 48, 1, 0), *bias = values_of("v.patch_embd.bias", &count);
    for (int r = 0; r < n; r++)
        layer_norm_by_hand(p + (size_t)r * 6912, "v.patch_norm.1.weight", "v.patch_norm.1.bias", 6912);
    double *x = times("v.patch_embd", p, n, 6912);
    for (int r = 0; r < n; r++) {
        for (int i = 0; i < dim; i++) x[r * dim + i] += bias[i];
        layer_norm_by_hand(x + r * dim, "v.patch_norm.2.weight", "v.patch_norm.2.bias", dim);
    }
    add_positions(x, n, w / 48, dim);
    for (int r = 0; r < n; r++) layer_norm_by_hand(x + r * dim, "v.patch_norm.3.weight", "v.patch_norm.3.bias", dim);
    free(p);
    free(bias);
    return x;
}

static double *pool_by_hand(const double *x, int width, int height, int dim) {
    size_t count;
    double *out = must(calloc((size_t)(width / 3 * (height / 3) * dim), sizeof *out));
    double *bias = values_of("v.std_bias", &count), *scale = values_of("v.std_scale", &count);
    for (int r = 0; r < width * height; r++)
        for (int i = 0; i < dim; i++)
            out[(r / width / 3 * (width / 3) + r % width / 3) * dim + i] += x[r * dim + i] / 9 * sqrt(dim);
    for (int i = 0; bias && i < width / 3 * (height / 3) * dim; i++)
        out[i] = (out[i] - bias[i % dim]) * scale[i % dim];
    free(bias);
    free(scale);
    return out;
}

// The soft rows of a file, (n, *out_dim), in f64.
static double *by_hand(const char *file, const uint8_t *rgb, int w, int h, int *out_dim) {
    int64_t dim = 0, layers = 0, heads = 0, ffn = 0, out = 0;
    const int width = w / 16, n = width * (h / 16), n_soft = n / 9;
    if (gguf_open(&hand, file) < 0) die("%s", hand.err);
    gguf_get_int(&hand, "clip.vision.embedding_length", 0, INT_MAX, &dim);
    gguf_get_int(&hand, "clip.vision.block_count", 0, INT_MAX, &layers);
    gguf_get_int(&hand, "clip.vision.attention.head_count", 0, INT_MAX, &heads);
    gguf_get_int(&hand, "clip.vision.feed_forward_length", 0, INT_MAX, &ffn);
    gguf_get_int(&hand, "clip.vision.projection_dim", 0, INT_MAX, &out);
    double *y;
    if (gguf_find_tensor(&hand, "v.patch_norm.1.weight")) {
        y = blocks_by_hand(rgb, w, h, (int)dim);
    } else {
        double *p = patches_by_hand(rgb, w, h, 16, 2, -1), *x = times("v.patch_embd", p, n, 768);
        add_positions(x, n, width, (int)dim);
        for (int l = 0; l < layers; l++) layer_by_hand(x, l, n, width, (int)dim, (int)heads, (int)ffn);
        y = pool_by_hand(x, width, h / 16, (int)dim);
        free(p);
        free(x);
    }
    for (int r = 0; r < n_soft; r++) norm_by_hand(y + r * dim, NULL, (int)dim);
    double *soft = times("mm.input_projection", y, n_soft, (int)dim);
    free(y);
    gguf_close(&hand);
    *out_dim = (int)out;
    return soft;
}

// The names of types are part of the messages.
static void compare_with_hand(const char *what, const char *file, const uint8_t *rgb, int w, int h, double part) {
    int dim;
    double *want = by_hand(file, rgb, w, h, &dim);
    const size_t n = (size_t)(w / 48 * (h / 48) * dim);
    float *rounded = must(malloc(n * sizeof *rounded)), *got = rows_of(file, "a text model", dim, 100, rgb, w, h);
    for (size_t i = 0; i < n; i++) rounded[i] = (float)want[i];
    compare(what, got, rounded, n, part);
    free(want);
    free(rounded);
    free(got);
}

static const Tower clamped = { .clamps = true, .dim = 128, .heads = 2, .ffn = 96, .layers = 2, .positions = 20, .out = 64,
                               .type = GGUF_F32, .down_type = GGUF_F32 };
static const Tower standard = { .standard = true, .dim = 144, .heads = 2, .ffn = 176, .layers = 2, .positions = 20,
                                .out = 64, .type = GGUF_F32, .down_type = GGUF_F32 };
static const Tower embedder = { .embedder = true, .dim = 96, .positions = 9, .out = 64, .type = GGUF_F32 };

// Three kinds of towers in four types of files; few: in F16 alone. Activations of quantised matrices are rounded to 8
// bits.
static void test_by_hand(bool few) {
    static const int types[] = { GGUF_F32, GGUF_F16, GGUF_BF16, GGUF_Q8_0 };
    uint8_t *small = picture(192, 96), *large = picture(240, 144);
    for (int i = few; i < (few ? 2 : 4); i++)
        for (int k = 0; k < 3; k++) {
            const bool wide = i == 1 && !few;
            Tower t = k == 0 ? clamped : k == 1 ? standard : embedder;
            char what[64];
            t.type = t.down_type = types[i];
            if (types[i] == GGUF_Q8_0 && k == 1) t.dim = 288, t.heads = 4, t.down_type = GGUF_F16;      // 176 columns
            const char *file = write_tower(&t, "tower");
            snprintf(what, sizeof what, "kind %d, %s", k, gguf_type_name(types[i]));
            const double part = types[i] == GGUF_Q8_0 ? fmax(0.03, 1.5 * tolerance) : tolerance;
            compare_with_hand(what, file, wide ? large : small, wide ? 240 : 192, wide ? 144 : 96, part);
        }
    free(small);
    free(large);
}

// ---- folders --------------------------------------------------------------------------------------------------------

typedef struct { bool linear, resaved, unified; } Spelling;    // unified: an embedder

// The name of a tensor in a published folder, or in one that was saved again.
static void folder_name(const char *gguf, Spelling s, char *out, size_t room) {
    static const char *const names[][2] = {
        { "ln1", "input_layernorm" }, { "attn_post_norm", "post_attention_layernorm" },
        { "ln2", "pre_feedforward_layernorm" }, { "ffn_post_norm", "post_feedforward_layernorm" },
        { "attn_q_norm", "self_attn.q_norm" }, { "attn_k_norm", "self_attn.k_norm" }, { "attn_q", "self_attn.q_proj" },
        { "attn_k", "self_attn.k_proj" }, { "attn_v", "self_attn.v_proj" }, { "attn_out", "self_attn.o_proj" },
        { "ffn_gate", "mlp.gate_proj" }, { "ffn_up", "mlp.up_proj" }, { "ffn_down", "mlp.down_proj" } };
    int l, end = 0;
    const char *embedder_of = s.resaved ? "embed_vision" : "vision_embedder";
    if (sscanf(gguf, "v.blk.%d.%n", &l, &end) == 1 && end) {
        const char *dot = strrchr(gguf, '.');
        for (size_t i = 0; i < sizeof names / sizeof *names; i++)
            if ((int)strlen(names[i][0]) == (int)(dot - gguf) - end && !strncmp(gguf + end, names[i][0], strlen(names[i][0])))
                snprintf(out, room, "model.vision_tower.encoder.layers.%d.%s%s%s", l, names[i][1],
                         s.linear && strstr(names[i][1], "proj") && !strcmp(dot, ".weight") ? ".linear" : "", dot);
    } else if (!strncmp(gguf, "v.patch_norm.", 13)) {
        static const char *const norms[3] = { "patch_ln1", "patch_ln2", "pos_norm" };
        snprintf(out, room, "model.%s.%s.%s", embedder_of, norms[gguf[13] - '1'], gguf + 15);
    } else if (!strcmp(gguf, "mm.input_projection.weight")) {
        snprintf(out, room, "model.embed_vision.%sembedding_projection.weight", s.resaved ? "multimodal_embedder." : "");
    } else if (!strncmp(gguf, "v.std_", 6)) {
        snprintf(out, room, "model.vision_tower.%s", gguf + 2);
    } else if (!s.unified) {
        const bool matrix = !strncmp(gguf, "v.patch_embd.", 13);
        snprintf(out, room, "model.vision_tower.patch_embedder.%s", matrix ? "input_proj.weight"
                                                                            : "position_embedding_table");
    } else if (!strncmp(gguf, "v.patch_embd.", 13)) {
        snprintf(out, room, "model.%s.patch_dense.%s", embedder_of, gguf + 13);
    } else {
        snprintf(out, room, "model.%s.pos_embedding", embedder_of);
    }
}

// Brings a tensor of a GGUF file into the layout of folders: columns of patches as (y, x, channel), positions of
// embedders as (n, 2, dim). shape: as text, slowest dimension first.
static void folder_layout(const DraftTensor *t, Spelling s, uint8_t *out, char *shape, size_t room) {
    const size_t bytes = (size_t)gguf_block_bytes(t->type);
    snprintf(shape, room, t->n_dims == 1 ? "%d" : t->n_dims == 2 ? "%2$d,%1$d" : "%3$d,%2$d,%1$d", (int)t->ne[0],
             (int)t->ne[1], (int)t->ne[2]);
    if (!strcmp(t->name, "v.patch_embd.weight") || !strncmp(t->name, "v.patch_norm.1.", 15)) {
        const size_t cols = s.unified ? 6912 : 768, area = cols / 3, rows = t->data.n / bytes / cols;
        for (size_t r = 0; r < rows; r++)
            for (size_t i = 0; i < cols; i++)
                memcpy(out + (r * cols + i) * bytes, t->data.data + (r * cols + i % 3 * area + i / 3) * bytes, bytes);
        if (rows > 1) snprintf(shape, room, "%d,%d", (int)rows, (int)cols);
    } else if (!strcmp(t->name, "v.position_embd.weight") && s.unified) {
        const size_t row = (size_t)t->ne[0] * bytes, n = (size_t)t->ne[1];
        for (size_t i = 0; i < 2 * n; i++) memcpy(out + (i % n * 2 + i / n) * row, t->data.data + i * row, row);
        snprintf(shape, room, "%d,2,%d", (int)t->ne[1], (int)t->ne[0]);
    } else {
        memcpy(out, t->data.data, t->data.n);
        if (strstr(t->name, "put_min") || strstr(t->name, "put_max")) *shape = 0;      // scalars have no dimensions
    }
}

// Writes a tower as a Hugging Face folder. config: members of vision_config.
static const char *write_folder(const Tower *t, const char *name, Spelling s, const char *config) {
    Draft d = draft_tower(t);
    Bytes header = { 0 }, data = { 0 };
    char hf[200], shape[64], entry[400];
    s.unified = t->embedder;
    put(&header, "{", 1);
    for (size_t i = 0; i < d.n_tensors; i++) {
        const DraftTensor *from = &d.tensors[i];
        if (!strncmp(from->name, "a.", 2) || !strncmp(from->name, "mm.a.", 5)) continue;
        uint8_t *bytes = must(malloc(from->data.n));
        folder_name(from->name, s, hf, sizeof hf);
        folder_layout(from, s, bytes, shape, sizeof shape);
        const int n = snprintf(entry, sizeof entry, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%zu,%zu]}",
                               data.n ? "," : "", hf, gguf_type_name(from->type), shape, data.n, data.n + from->data.n);
        put(&header, entry, (size_t)n);
        put(&data, bytes, from->data.n);
        free(bytes);
    }
    put(&header, "}", 1);
    free_draft(&d);
    const char *folder = kept(in_tmp("%s", name));
    mkdir(folder, 0777);
    FILE *f = must(fopen(in_tmp("%s/model.safetensors", name), "wb"));
    fwrite(&(uint64_t){ header.n }, 8, 1, f);
    fwrite(header.data, 1, header.n, f);
    fwrite(data.data, 1, data.n, f);
    CHECK(!fclose(f), "%s: %s", folder, strerror(errno));
    f = must(fopen(in_tmp("%s/config.json", name), "w"));
    fprintf(f, "{\"model_type\":\"gemma4\",\"vision_config\":{%s}}", config);
    CHECK(!fclose(f), "%s: %s", folder, strerror(errno));
    free(header.data);
    free(data.data);
    return folder;
}

// A tower gives the same bits from a GGUF file and from folders with all spellings of names.
static void test_folders(void) {
    uint8_t *rgb = picture(144, 96);
    for (int k = 0; k < 3; k++) {
        const Tower *t = k == 0 ? &clamped : k == 1 ? &standard : &embedder;
        const char *file = write_tower(t, "tower");
        float *want = rows_of(file, "a text model", t->out, 512, rgb, 144, 96);
        for (int i = 0; i < 2; i++) {
            const char *folder = write_folder(t, "folder", (Spelling){ .linear = i == 0, .resaved = i == 1 },
                                              i ? "\"patch_size\":16,\"hidden_activation\":\"gelu_pytorch_tanh\"" : "");
            float *got = rows_of("", folder, t->out, 512, rgb, 144, 96);
            CHECK(!memcmp(want, got, 6 * (size_t)t->out * sizeof *got), "kind %d, names %d: other rows than the file's", k, i);
            free(got);
        }
        free(want);
    }
    free(rgb);
}

// ---- properties -----------------------------------------------------------------------------------------------------

// Turns a picture upside down or left to right.
static uint8_t *mirrored(const uint8_t *rgb, int w, int h, bool down) {
    uint8_t *out = must(malloc((size_t)(w * h) * 3));
    for (int y = 0; y < h; y++)
        for (int x = 0; x < w; x++)
            memcpy(out + 3 * (y * w + x), rgb + 3 * ((down ? h - 1 - y : y) * w + (down ? x : w - 1 - x)), 3);
    return out;
}

// A picture that is computed part by part has the same bits, also after one that was given up.
static void test_parts(Model *m, const uint8_t *rgb, int w, int h, const float *want) {
    Vision *v = m->vision;
    const size_t n = (size_t)(w / 48 * (h / 48)) * (size_t)m->config.dim;
    float *got = must(malloc(n * sizeof *got));
    const int chunk = v->n_chunk, patches = w / v->side * (h / v->side);
    if (op->exact_prompts) v->n_chunk = 64;
    uint8_t *other = mirrored(rgb, w, h, true);
    vision_begin(v, other, w, h);
    for (int i = 0; i < 2 * v->n_layers; i++) vision_next(v, 0);
    int parts = 1;
    for (vision_begin(v, rgb, w, h); !vision_next(v, 0); parts++) {}
    vision_soft(v, got);
    CHECK(!memcmp(got, want, n * sizeof *got), "%s: other bits in parts", v->gguf.path);
    const int in_pass = (patches + v->n_chunk - 1) / v->n_chunk;
    CHECK(parts == in_pass * (v->embedder ? 1 : 2 * v->n_layers + 1) + !v->embedder, "%s: %d parts, %d in a pass",
          v->gguf.path, parts, in_pass);
    v->n_chunk = chunk;
    free(other);
    free(got);
}

static void test_properties(void) {
    const int w = 240, h = 144;
    uint8_t *rgb = picture(w, h);
    for (int k = 0; k < 3; k++) {
        const Tower *t = k == 0 ? &clamped : k == 1 ? &standard : &embedder;
        const char *file = write_tower(t, "tower");
        const size_t n = 15 * (size_t)t->out;
        Model *m = open_alone(file, "a text model", t->out, 512, 15);
        float *want = soft_rows(m, rgb, w, h), *again = soft_rows(m, rgb, w, h);
        CHECK(!memcmp(want, again, n * sizeof *want), "kind %d: the same picture twice gives other rows", k);
        free(again);
        for (int down = 0; down < 2; down++) {
            uint8_t *other = mirrored(rgb, w, h, down);
            float *got = soft_rows(m, other, w, h);
            double most = 0;
            for (size_t i = 0; i < n; i++) most = fmax(most, fabs((double)(got[i] - want[i])));
            CHECK(most > 0.05, "kind %d, mirrored %d: rows differ by %g only", k, down, most);
            free(other);
            free(got);
        }
        if (op->exact_prompts) {                       // no row of a product depends on the others
            float *got = rows_of(file, "a text model", t->out, STEP_ROWS, rgb, w, h);
            CHECK(!memcmp(want, got, n * sizeof *got), "kind %d: steps of 64 rows give other bits", k);
            free(got);
        }
        uint8_t *tall = picture(48, 1008);             // more patches in a column than positions
        float *rows = must(calloc(21 * (size_t)t->out, sizeof *rows));
        m->vision->max_tokens = 21;
        CHECK(vision_rows(m->vision, tall, 48, 1008, rows) == 0, "kind %d: a picture beyond the table has rows", k);
        free(rows);
        free(tall);
        m->vision->max_tokens = 15;
        test_parts(m, rgb, w, h, want);
        char layers[64];
        CHECK(!strcmp(layers_of_tower(m->vision, layers), t->embedder ? "one matrix, no layers (gemma4uv)" : "2 layers"),
              "kind %d: it has %s", k, layers);
        volatile sig_atomic_t stop = 1;
        m->stop = &stop;
        CHECK(t->embedder || vision_rows(m->vision, rgb, w, h, want) == STOPPED, "kind %d: cannot be stopped", k);
        close_alone(m);
        free(want);
    }
    free(rgb);
}

// ---- bad files ------------------------------------------------------------------------------------------------------

// Opens a projector in a child process, which has to end with an exit status and one line that contains `want`.
static void opened(const char *what, const char *file, const char *own, int status_wanted, const char *want) {
    fflush(stdout);
    const char *err = in_tmp("stderr");
    const pid_t child = fork();
    if (!child) {
        if (dup2(open(err, O_WRONLY | O_CREAT | O_TRUNC, 0600), 2) < 0) _exit(9);
        free(open_alone(file, own, 64, 512, 70));
        _exit(0);
    }
    int status = -1;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {}
    char *text = text_of(err);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == status_wanted && strstr(text, want) &&
          !strncmp(text, status_wanted ? "gemma4: error: " : "# note: ", status_wanted ? 15 : 8) &&
          strchr(text, '\n') == strrchr(text, '\n'), "%s: expected status %d and one line with '%s', got %d and: %s",
          what, status_wanted, want, status, text);
    free(text);
}

static void refused(const char *what, const char *file, const char *own, const char *want) {
    opened(what, file, own, 1, want);
}
static void noted(const char *what, const char *file, const char *own, const char *want) {
    opened(what, file, own, 0, want);
}

// Files with a few wrong bytes in their heads are opened, or refused with one line; nothing crashes. LONG=1: many more.
static void test_mutated_files(void) {
    const char *whole = getenv("LONG"), *path = kept(in_tmp("mutated.gguf")), *err = kept(in_tmp("stderr"));
    const char *const from[2] = { write_tower(&embedder, "embedder"), write_tower(&clamped, "tower") };
    const int n = whole && strcmp(whole, "0") ? 3000 : 60;
    for (int i = 0; i < n; i++) {
        struct stat st;
        stat(from[i % 2], &st);
        uint8_t *bytes = read_bytes(from[i % 2], (size_t)st.st_size);
        state = (uint64_t)i + 1000;
        for (int k = 0; k <= i % 3; k++)
            bytes[(size_t)((uniform() + 1) * 2200)] = (uint8_t)(i % 5 ? 128 * (uniform() + 1) : 0);
        FILE *f = must(fopen(path, "wb"));
        CHECK(fwrite(bytes, 1, (size_t)st.st_size, f) == (size_t)st.st_size && !fclose(f), "%s", path);
        free(bytes);
        fflush(stdout);
        const pid_t child = fork();
        if (!child) {
            if (dup2(open(err, O_WRONLY | O_CREAT | O_TRUNC, 0600), 2) < 0) _exit(9);
            free(open_alone(path, "a text model", 64, 512, 70));
            _exit(0);
        }
        int status = -1;
        while (waitpid(child, &status, 0) < 0 && errno == EINTR) {}
        char *text = text_of(err);
        const bool has_line = strstr(text, "gemma4: error: ") != NULL;
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == has_line, "file %d: status %d and: %s", i, status, text);
        free(text);
    }
}

static const char *rewritten(Draft *d) { return kept(write_draft(d, in_tmp("bad.gguf"))); }

static void drop(Draft *d, const char *name) { draft_tensor(d, name)->name[0] = 0; }

static void test_bad_files(void) {
    const char *own = "a text model";
    Draft d = draft_tower(&clamped);
    put_key_u32(&d, "clip.vision.projection_dim", 2560);
    refused("another model's", rewritten(&d), own, "expected the model's width, 64, got 2560");
    d = draft_tower(&clamped);
    put_key_text(&d, "clip.vision.projector_type", "gemma3");
    refused("unknown type", rewritten(&d), own, "expected gemma4v or gemma4uv, got 'gemma3'");
    d = draft_tower(&clamped);
    put_key_text(&d, "general.architecture", "gemma4");
    refused("a text model", rewritten(&d), own, "expected a projector of images (mmproj), got a gemma4 model");
    d = draft_tower(&clamped);
    put_key_bool(&d, "clip.has_vision_encoder", false);
    put_key_bool(&d, "clip.has_audio_encoder", true);
    refused("audio", rewritten(&d), own, "of audio alone");
    d = draft_tower(&clamped);
    drop(&d, "v.blk.1.ffn_up.weight");
    refused("no ffn_up", rewritten(&d), own, "tensor 'v.blk.1.ffn_up.weight': missing");
    d = draft_tower(&clamped);
    drop(&d, "v.blk.1.attn_k.output_max");
    refused("27 bounds", rewritten(&d), own, "expected four bounds for every matrix of the layers, or none");
    d = draft_tower(&clamped);
    for (int i = 0; i < 4; i++)
        drop(&d, (const char *const[]){ "v.blk.0.attn_q.input_min", "v.blk.0.attn_q.input_max",
                                        "v.blk.0.attn_q.output_min", "v.blk.0.attn_q.output_max" }[i]);
    refused("bounds from the second matrix on", rewritten(&d), own, "the first matrix of the tower has no bounds");
    d = draft_tower(&clamped);
    fill(draft_tensor(&d, "v.blk.0.attn_q.input_min"), NAN);
    refused("NaN bound", rewritten(&d), own, "expected a number, got NaN");
    d = draft_tower(&standard);
    drop(&d, "v.std_scale");
    refused("no std_scale", rewritten(&d), own, "tensor 'v.std_scale': missing");
    d = draft_tower(&standard);
    draft_tensor(&d, "v.patch_embd.weight")->ne[0] = 14;
    refused("patches of 14", rewritten(&d), own, "tensor 'v.patch_embd.weight': expected shape (768, 144)");
    d = draft_tower(&standard);
    put_key_u32(&d, "clip.vision.patch_size", 14);
    refused("patch_size 14", rewritten(&d), own, "clip.vision.patch_size");
    d = draft_tower(&standard);
    put_key_u32(&d, "clip.vision.attention.head_count", 16);
    refused("heads of 9", rewritten(&d), own, "16 heads for a width of 144");
    d = draft_tower(&embedder);
    drop(&d, "v.patch_norm.2.bias");
    refused("no bias", rewritten(&d), own, "tensor 'v.patch_norm.2.bias': missing");
    d = draft_tower(&embedder);
    fill(draft_tensor(&d, "v.patch_norm.1.weight"), 0);
    refused("norms of zeros", rewritten(&d), own, "expected the weights of a norm, got zeros");
    d = draft_tower(&standard);
    draft_add(&d, "v.blk.1.out_scale", 1);
    noted("a tensor that nothing reads", rewritten(&d), own, "1 tensor of the image tower is not used, the first: v.blk.1.out_scale");
    refused("no file", in_tmp("none.gguf"), own, "none.gguf");
    const Spelling usual = { .linear = true };
    refused("a rope of 1000", "", write_folder(&standard, "rope", usual, "\"rope_parameters\":{\"rope_theta\":1000}"),
            "expected a rope_theta of 100");
    refused("erf-GELU", "", write_folder(&standard, "erf", usual, "\"hidden_activation\":\"gelu\""),
            "expected gelu_pytorch_tanh");
    Tower empty = standard;
    const char *folder = write_folder(&empty, "empty", usual, "");
    FILE *f = must(fopen(in_tmp("empty/model.safetensors"), "wb"));
    fwrite("\2\0\0\0\0\0\0\0{}", 1, 10, f);
    fclose(f);
    refused("a folder without a tower", "", folder, "the model has no image tower; try --mmproj FILE");
}

// ---- with a text model ----------------------------------------------------------------------------------------------

static float *first_logits(Model *m) {
    float *logits = must(malloc((size_t)m->config.vocab * sizeof *logits));
    const int32_t ids[] = { 2, 5, 9, 100 };
    reset_session(m, 0);
    run_chunk(m, 0, ids, 4);
    read_logits(m, 0, logits);
    return logits;
}

// The plan counts the tower, and the text model gives the same bits with and without it.
static void test_with_text(void) {
    const char *text = kept(make_model("text", "micro-dense", "f16", NULL)), *file = write_tower(&standard, "tower");
    ModelOptions o = { .n_ctx = 64, .n_seqs = 1, .n_batch = 128, .n_logits = 1, .k_type = KV_F16, .v_type = KV_F16 };
    Model *m = must(calloc(2, sizeof *m));
    load_model(&m[0], text, op, o, NULL);
    o.projector = file;
    o.image_tokens = 70;
    load_model(&m[1], text, op, o, NULL);
    const size_t rows = 630 * 144 * sizeof(float), weights = m[1].plan.weights ? m[1].vision->binder.bytes : 0;
    CHECK(!m[0].plan.vision && m[1].plan.vision > 6 * rows + weights && m[1].plan.vision < 7 * rows + 2 * weights + (2 << 20),
          "the plan has %zu bytes for 6 buffers of %zu and %zu of weights", m[1].plan.vision, rows, weights);
    float *a = first_logits(&m[0]), *b = first_logits(&m[1]);
    CHECK(!memcmp(a, b, (size_t)m->config.vocab * sizeof *a), "a tower changes the logits of text");
    uint8_t *rgb = picture(240, 144);
    float *want = rows_of(file, text, 64, 128, rgb, 240, 144), *got = soft_rows(&m[1], rgb, 240, 144);
    CHECK(!memcmp(want, got, 15 * 64 * sizeof *got), "a tower next to a text model gives other rows than alone");
    free(a);
    a = first_logits(&m[1]);
    CHECK(!memcmp(a, b, (size_t)m->config.vocab * sizeof *a), "a picture changes the logits of text");
    free(a);
    free(b);
    free(want);
    free(got);
    free(rgb);
    free_model(&m[0]);
    free_model(&m[1]);
    free(m);
}

int main(int argc, char **argv) {
    take_card(&argc, argv);
    const bool plain = argc > 1 && !strcmp(argv[1], "-plain"), cuda = argc > 1 && !strcmp(argv[1], "-cuda");
    const bool few = argc > 2 && !strcmp(argv[2], "-few");
    op = cpu_ops();
#ifdef USE_CUDA
    if (plain || cuda) op = plain ? plain_ops() : cuda_ops();
#else
    if (plain || cuda) op = NULL;
#endif
    if (!op) {
        SKIP("no GPU");
        return test_done("vision");
    }
    make_tmp();
    start_threads(2);
    tolerance = plain || !cuda ? 1e-4 : 2e-2;
    test_by_hand(few);
    if (few) return test_done("vision");
    test_golden();
    test_folders();
    test_properties();
    if (!plain && !cuda) test_bad_files();
    if (!plain && !cuda) test_mutated_files();
    test_with_text();
    return test_done("vision");
}
