/* picture.h - pictures in conversations: from the parts of a message to ids in a prompt and the rows of the tower.
 *
 * Uses engine.h (section [7], which it implements), image.h, vision.h, tokenizer.h, and the hash of session.h. Begin
 * with read_pictures() and compute_pictures().
 *   [1] The bytes of a picture    [2] Places in a prompt    [3] Rows */
#ifndef PICTURE_H
#define PICTURE_H

// ==== [1] The bytes of a picture =====================================================================================

static size_t decode_base64(char *s, size_t n) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    int8_t value[256];
    uint32_t bits = 0;
    int n_bits = 0;
    size_t i = 0, n_bytes = 0;
    memset(value, -1, sizeof value);
    for (int d = 0; d < 64; d++) value[(uint8_t)digits[d]] = (int8_t)d;
    for (; i < n && s[i] != '='; i++) {
        const int d = value[(uint8_t)s[i]];
        if (s[i] == '\n' || s[i] == '\r') continue;
        if (d < 0) return 0;
        bits = bits << 6 | (uint32_t)d;
        n_bits += 6;
        if (n_bits >= 8) s[n_bytes++] = (char)(bits >> (n_bits -= 8));
    }
    while (i < n && (s[i] == '=' || s[i] == '\n' || s[i] == '\r')) i++;
    return i == n ? n_bytes : 0;
}

static void encode_base64(const uint8_t *data, size_t n, TokText *out) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (size_t i = 0; i < n; i += 3) {
        const size_t more = n - i;                     // 1 and 2: the last characters are =
        const uint32_t x = (uint32_t)data[i] << 16 | (more > 1 ? (uint32_t)data[i + 1] << 8 : 0) |
                           (more > 2 ? data[i + 2] : 0);
        const char four[4] = { digits[x >> 18], digits[x >> 12 & 63], more > 1 ? digits[x >> 6 & 63] : '=',
                               more > 2 ? digits[x & 63] : '=' };
        if (!tok_text_append(out, four, 4)) die("out of memory for a picture of %zu bytes", n);
    }
}

// The words by which the server knows that it is not the request's fault.
static bool no_memory(char *err, size_t err_size) {
    snprintf(err, err_size, "out of memory for a picture");
    return false;
}

// Where the text of a picture's file is in a part of a message: {type: image_url, image_url: {url}} or {image_url: url}
// as in the OpenAI APIs, {type: image, source: {data}} as in Anthropic's.
static bool picture_text(const GgufJson *part, GgufJson *text) {
    GgufJson inner;
    if (gguf_json_get(part, "image_url", &inner))
        return inner.type == GGUF_J_OBJECT ? gguf_json_get(&inner, "url", text) : (*text = inner, true);
    return gguf_json_get(part, "source", &inner) && gguf_json_get(&inner, "data", text);
}

// The most tokens of a picture that a part of a message asks for by its `detail`.
static int picture_most(const Model *m, const GgufJson *part) {
    GgufJson inner, v = { 0 };
    if (gguf_json_get(part, "image_url", &inner) && inner.type == GGUF_J_OBJECT) gguf_json_get(&inner, "detail", &v);
    return gguf_json_is(&v, "low") ? 70 : gguf_json_is(&v, "high") ? MAX_IMAGE_TOKENS : m->vision->usual_tokens;
}

// Reads the bytes of a picture's file from a part of a message. Returns false and writes one line to err if there are
// none.
static bool picture_bytes(const GgufJson *part, TokText *out, char *err, size_t err_size) {
    GgufJson text = { 0 };
    if (!picture_text(part, &text) || text.type != GGUF_J_STRING) {
        snprintf(err, err_size, "an image: expected {\"type\": \"image_url\", \"image_url\": {\"url\": \"data:..\"}}");
        return false;
    }
    char *url = malloc(text.n + 1);
    if (!url) return no_memory(err, err_size);
    const size_t n = gguf_json_string(&text, url);
    url[n] = 0;
    const bool is_data = n > 5 && !memcmp(url, "data:", 5), is_address = !is_data && memchr(url, ':', n);
    char *comma = is_data ? memchr(url, ',', n) : NULL, *from = comma ? comma + 1 : url;
    if (is_address)
        snprintf(err, err_size, "an image: expected base64, got the address %.60s; addresses are not opened", url);
    const size_t n_bytes = is_address || (is_data && !comma) ? 0 : decode_base64(from, n - (size_t)(from - url));
    bool ok = n_bytes;
    if (!ok && !is_address) snprintf(err, err_size, "an image: expected its data in base64, got other text");
    if (ok && !tok_text_append(out, from, n_bytes)) ok = no_memory(err, err_size);
    free(url);
    return ok;
}

static bool has_tower(const Model *m, char *err, size_t err_size) {
    if (!m->vision) snprintf(err, err_size, "images: no image tower is loaded; try --mmproj FILE");
    return m->vision != NULL;
}

// Reads the header of a picture's file, which gives its size, and its size for the tower. most: of its tokens.
static bool fit_picture(const Model *m, TokStr file, int most, int *w, int *h, ImageSize *size, char *err,
                        size_t err_size) {
    if (!image_dims(file.s, file.n, w, h, err, err_size)) return false;
    if (image_fit(*w, *h, min_int(most, m->vision->max_tokens), size)) return true;
    snprintf(err, err_size, "an image of %d x %d pixels has no size for the tower", *w, *h);
    return false;
}

// The tokens <|image> and <image|> that a vocabulary has. Without them the rows of a picture stand alone.
static int picture_markers(const Tokenizer *t) { return (t->image_open >= 0) + (t->image_close >= 0); }

static bool picture_part(Model *m, const Tokenizer *t, TokStr file, TokText *parts, int *w, int *h, int *n, char *err,
                         size_t err_size) {
    static const char begin[] = ",{\"type\":\"image_url\",\"image_url\":{\"url\":\"data:image;base64,";
    ImageSize size;
    if (!has_tower(m, err, err_size)) return false;
    if (!fit_picture(m, file, m->vision->usual_tokens, w, h, &size, err, err_size)) return false;
    *n = size.tokens + picture_markers(t);
    const bool ok = tok_text_append(parts, begin, sizeof begin - 1);
    encode_base64((const uint8_t *)file.s, file.n, parts);
    if (!ok || !tok_text_append(parts, "\"}}", 3)) die("out of memory for a picture");
    return true;
}

// ==== [2] Places in a prompt =========================================================================================

static uint64_t tower_hash(Model *m) {
    uint64_t h[3];
    if (m->vision && !m->tower_hash) {
        hash_model(&m->vision->gguf, &h[0], &h[1], &h[2]);
        m->tower_hash = hash_mix(h[0], h[2]) | 1;
    }
    return m->tower_hash;
}

static void pictures_free(PromptPictures *p) {
    for (int i = 0; i < p->n; i++) {
        tok_text_free(&p->files[i].file);
        free(p->files[i].rgb);
        free(p->files[i].rows);
    }
    free(p->places);
    free(p->files);
    *p = (PromptPictures){ 0 };
}

// Reads what is needed of a part before its picture is decoded. False: err says why it cannot be a picture.
static bool read_picture(Model *m, TokStr json, PictureFile *f, char *err, size_t err_size) {
    int w, h;
    ImageSize size;
    Hash hash = hash_new();
    GgufJson part = { 0 };
    size_t byte;
    const char *why;
    gguf_json_parse(json.s, json.n, &part, &byte, &why);
    if (!picture_bytes(&part, &f->file, err, err_size) ||
        !fit_picture(m, (TokStr){ f->file.s, f->file.n }, picture_most(m, &part), &w, &h, &size, err, err_size))
        return false;
    f->w = size.w, f->h = size.h, f->n = size.tokens;
    f->memory = 12 * (size_t)w * (size_t)h;
    const uint64_t key[2] = { tower_hash(m), (uint64_t)f->n };
    hash_add(&hash, key, sizeof key);
    hash_add(&hash, f->file.s, f->file.n);
    f->hash = hash_end(&hash);
    return true;
}

static bool read_pictures(Model *m, const Tokenizer *t, const TokPictures *at, PromptPictures *out, size_t *n_more,
                          char *err, size_t err_size) {
    *out = (PromptPictures){ 0 };
    *n_more = 0;
    if (!at->n) return true;
    if (!has_tower(m, err, err_size)) return false;
    out->places = calloc(at->n, sizeof *out->places);
    out->files = calloc(at->n, sizeof *out->files);
    if (!out->places || !out->files) {
        pictures_free(out);
        return no_memory(err, err_size);
    }
    for (size_t k = 0; k < at->n; k++) {
        PictureFile *f = &out->files[out->n++];
        if (!read_picture(m, at->of[k].part, f, err, err_size)) {
            pictures_free(out);
            return false;
        }
        *n_more += (size_t)(f->n + picture_markers(t)) - 1;            // in place of one
    }
    return true;
}

static bool place_pictures(Tokenizer *t, const TokPictures *at, TokIds *ids, size_t *before_cue, PromptPictures *p) {
    TokIds all = { 0 };
    size_t from = 0, cue = before_cue ? *before_cue : 0;
    bool ok = true;
    if (!p->n) return true;
    for (size_t k = 0; k < at->n && ok; k++) {
        const PictureFile *f = &p->files[k];
        while (ok && from < at->of[k].at) ok = tok_push_id(t, &all, ids->ids[from++]) == 0;
        if (t->image_open >= 0) ok = ok && tok_push_id(t, &all, t->image_open) == 0;
        p->places[k] = (Picture){ .first = (int)all.n, .n = f->n };
        for (int i = 0; ok && i < f->n; i++) ok = tok_push_id(t, &all, picture_id(f->hash, i)) == 0;
        if (t->image_close >= 0) ok = ok && tok_push_id(t, &all, t->image_close) == 0;
        if (before_cue && at->of[k].at < cue) *before_cue += (size_t)(f->n + picture_markers(t)) - 1;
        from++;                                        // the placeholder
    }
    while (ok && from < ids->n) ok = tok_push_id(t, &all, ids->ids[from++]) == 0;
    tok_ids_free(ok ? ids : &all);
    if (ok) *ids = all;
    return ok;
}

static void find_pictures(const TokIds *ids, Picture *places, int n) {
    for (int k = 0, i = 0; k < n; i = places[k].first + places[k].n, k++) {
        while (i < (int)ids->n && ids->ids[i] >= 0) i++;
        places[k].first = i;
    }
}

// ==== [3] Rows =======================================================================================================

enum { ROW_CACHE_BYTES = 256 << 20 };

typedef struct KnownRows {    // the rows of a picture
    uint64_t hash;
    float   *rows;
    size_t   bytes;
    int      pins;            // places of prompts that use them
} KnownRows;

static void row_cache_drop(RowCache *c, int i) {
    free(c->of[i].rows);
    c->bytes -= c->of[i].bytes;
    memmove(&c->of[i], &c->of[i + 1], (size_t)(--c->n - i) * sizeof *c->of);
}

static void row_cache_free(RowCache *c) {
    while (c->n) row_cache_drop(c, c->n - 1);
    free(c->of);
    *c = (RowCache){ 0 };
}

static bool row_cache_add(RowCache *c, uint64_t hash, float *rows, size_t bytes) {
    for (int i = 0; i < c->n; )
        if (!c->of[i].pins && c->bytes + bytes > ROW_CACHE_BYTES) row_cache_drop(c, i);
        else i++;
    if (c->n == c->room) {
        KnownRows *of = realloc(c->of, (size_t)(2 * c->room + 8) * sizeof *of);
        if (!of) return false;
        c->of = of;
        c->room = 2 * c->room + 8;
    }
    c->of[c->n++] = (KnownRows){ hash, rows, bytes, 1 };
    c->bytes += bytes;
    return true;
}

static const float *row_cache_pin(RowCache *c, uint64_t hash) {
    int i = 0;
    while (i < c->n && c->of[i].hash != hash) i++;
    if (i == c->n) return NULL;
    KnownRows rows = c->of[i];
    rows.pins++;
    memmove(&c->of[i], &c->of[i + 1], (size_t)(c->n - 1 - i) * sizeof *c->of);
    c->of[c->n - 1] = rows;                            // the newest
    return rows.rows;
}

static bool decode_with(PictureFile *f, bool alone, char *err, size_t err_size) {
    Image image;
    if (f->rgb) return true;
    if (!image_decode(f->file.s, f->file.n, &image, err, err_size)) return false;
    f->rgb = malloc((size_t)f->w * (size_t)f->h * 3);
    const bool ok = f->rgb && image_resize(&image, f->w, f->h, alone, f->rgb);
    image_free(&image);
    if (!ok) {
        free(f->rgb);
        f->rgb = NULL;
        return no_memory(err, err_size);
    }
    tok_text_free(&f->file);
    return true;
}

static bool decode_picture(PictureFile *f, char *err, size_t err_size) { return decode_with(f, true, err, err_size); }

static bool picture_begin(Model *m, PictureFile *f, char *err, size_t err_size) {
    if (!decode_with(f, false, err, err_size)) return false;
    if (!f->rows) f->rows = malloc((size_t)f->n * (size_t)m->config.dim * sizeof *f->rows);
    if (!f->rows) return no_memory(err, err_size);
    if (vision_begin(m->vision, f->rgb, f->w, f->h)) return true;
    snprintf(err, err_size, "an image of %d x %d pixels: the tower has no positions for so many", f->w, f->h);
    return false;
}

static float *picture_next(Model *m, PictureFile *f, double until) {
    float *rows = f->rows;
    if (!vision_next(m->vision, until)) return NULL;
    vision_soft(m->vision, rows);
    free(f->rgb);
    f->rgb = NULL;
    f->rows = NULL;
    return rows;
}

static void pictures_release(RowCache *c, PromptPictures *p) {
    for (int k = 0; k < p->n; k++)
        for (int i = 0; i < c->n && p->places[k].rows; i++) c->of[i].pins -= c->of[i].rows == p->places[k].rows;
    pictures_free(p);
}

static bool compute_pictures(Session *s, RowCache *c, const TokIds *ids, PromptPictures *p,
                             const volatile sig_atomic_t *stop, char *err, size_t err_size) {
    Model *m = session_model(s);
    const int kept = session_keeps(s, ids->ids, (int)ids->n);
    for (int k = 0; k < p->n; k++) {
        PictureFile *f = &p->files[k];
        if (p->places[k].first < kept) continue;
        p->places[k].rows = row_cache_pin(c, f->hash);
        if (p->places[k].rows) continue;
        if (!picture_begin(m, f, err, err_size)) return false;
        m->stop = stop;
        float *rows = picture_next(m, f, INFINITY);
        m->stop = NULL;
        if (!rows) {
            snprintf(err, err_size, "cancelled");
            return false;
        }
        if (!row_cache_add(c, f->hash, rows, (size_t)f->n * (size_t)m->config.dim * sizeof *rows)) {
            free(rows);
            return no_memory(err, err_size);
        }
        p->places[k].rows = rows;
    }
    return true;
}

#endif
