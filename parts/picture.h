/* picture.h - pictures in conversations: from the parts of a message to ids in a prompt and the rows of the tower.
 *
 * Uses engine.h (section [7], which it implements), image.h, vision.h, tokenizer.h, and the hash of session.h. Begin
 * with read_pictures() and compute_pictures().
 *   [1] The bytes of a picture    [2] Places in a prompt    [3] Rows */
#ifndef PICTURE_H
#define PICTURE_H

// ==== [1] The bytes of a picture =====================================================================================

// Appends the bytes of a text in base64; line breaks are skipped. False: it is not base64, or there are none.
static bool decode_base64(TokStr text, TokText *out) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const size_t before = out->n;
    int8_t value[256];
    uint32_t bits = 0;
    int n_bits = 0;
    size_t i = 0;
    memset(value, -1, sizeof value);
    for (int d = 0; d < 64; d++) value[(uint8_t)digits[d]] = (int8_t)d;
    char *bytes = alloc_or_die(text.n / 4 * 3 + 3, 1);
    size_t n = 0;
    for (; i < text.n && text.s[i] != '='; i++) {
        const int d = value[(uint8_t)text.s[i]];
        if (text.s[i] == '\n' || text.s[i] == '\r') continue;
        if (d < 0) break;
        bits = bits << 6 | (uint32_t)d;
        n_bits += 6;
        if (n_bits >= 8) bytes[n++] = (char)(bits >> (n_bits -= 8));
    }
    while (i < text.n && strchr("=\r\n", text.s[i])) i++;
    const bool ok = i == text.n && n && tok_text_append(out, bytes, n);
    free(bytes);
    return ok && out->n > before;
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
    char *url = alloc_or_die(text.n + 1, 1);
    const size_t n = gguf_json_string(&text, url);
    const bool is_data = n > 5 && !memcmp(url, "data:", 5);
    const char *comma = is_data ? memchr(url, ',', n) : NULL, *from = comma ? comma + 1 : url;
    const bool ok = (comma || !memchr(url, ':', n)) && decode_base64((TokStr){ from, n - (size_t)(from - url) }, out);
    if (!ok && !is_data && memchr(url, ':', n))
        snprintf(err, err_size, "an image: expected base64, got the address %.60s; addresses are not opened", url);
    else if (!ok) snprintf(err, err_size, "an image: expected its data in base64, got other text");
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

static bool picture_part(Model *m, TokStr file, TokText *parts, int *w, int *h, int *n, char *err, size_t err_size) {
    static const char begin[] = ",{\"type\":\"image_url\",\"image_url\":{\"url\":\"data:image;base64,";
    ImageSize size;
    if (!has_tower(m, err, err_size)) return false;
    if (!fit_picture(m, file, m->vision->usual_tokens, w, h, &size, err, err_size)) return false;
    *n = size.tokens + 2;                              // with <|image> and <image|>
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
    if (t->image_open < 0 || t->image_close < 0) {
        snprintf(err, err_size, "images: the vocabulary has no tokens <|image> and <image|>");
        return false;
    }
    out->places = alloc_or_die(at->n, sizeof *out->places);
    out->files = alloc_or_die(at->n, sizeof *out->files);
    for (size_t k = 0; k < at->n; k++) {
        PictureFile *f = &out->files[out->n++];
        if (!read_picture(m, at->of[k].part, f, err, err_size)) {
            pictures_free(out);
            return false;
        }
        *n_more += (size_t)f->n + 1;                   // two markers, in place of one
    }
    return true;
}

static void place_pictures(Tokenizer *t, const TokPictures *at, TokIds *ids, size_t *before_cue, PromptPictures *p) {
    TokIds all = { 0 };
    size_t from = 0, cue = before_cue ? *before_cue : 0;
    if (!p->n) return;
    for (size_t k = 0; k < at->n; k++) {
        const PictureFile *f = &p->files[k];
        while (from < at->of[k].at) push_id(t, &all, ids->ids[from++]);
        push_id(t, &all, t->image_open);
        p->places[k] = (Picture){ .first = (int)all.n, .n = f->n };
        for (int i = 0; i < f->n; i++) push_id(t, &all, picture_id(f->hash, i));
        push_id(t, &all, t->image_close);
        if (before_cue && at->of[k].at < cue) *before_cue += (size_t)f->n + 1;
        from++;                                        // the placeholder
    }
    while (from < ids->n) push_id(t, &all, ids->ids[from++]);
    tok_ids_free(ids);
    *ids = all;
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

static void row_cache_add(RowCache *c, uint64_t hash, float *rows, size_t bytes) {
    for (int i = 0; i < c->n; )
        if (!c->of[i].pins && c->bytes + bytes > ROW_CACHE_BYTES) row_cache_drop(c, i);
        else i++;
    if (c->n == c->room) {
        c->room = 2 * c->room + 8;
        c->of = realloc(c->of, (size_t)c->room * sizeof *c->of);
        if (!c->of) die("out of memory for %d pictures", c->room);
    }
    c->of[c->n++] = (KnownRows){ hash, rows, bytes, 1 };
    c->bytes += bytes;
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
    f->rgb = alloc_or_die((size_t)f->w * (size_t)f->h * 3, 1);
    image_resize(&image, f->w, f->h, alone, f->rgb);
    image_free(&image);
    tok_text_free(&f->file);
    return true;
}

static bool decode_picture(PictureFile *f, char *err, size_t err_size) { return decode_with(f, true, err, err_size); }

static bool picture_begin(Model *m, PictureFile *f, char *err, size_t err_size) {
    if (!decode_with(f, false, err, err_size)) return false;
    if (vision_begin(m->vision, f->rgb, f->w, f->h)) return true;
    snprintf(err, err_size, "an image of %d x %d pixels: the tower has no positions for so many", f->w, f->h);
    return false;
}

static float *picture_next(Model *m, PictureFile *f, double until) {
    if (!vision_next(m->vision, until)) return NULL;
    float *rows = alloc_or_die((size_t)f->n * (size_t)m->config.dim, sizeof *rows);
    vision_soft(m->vision, rows);
    free(f->rgb);
    f->rgb = NULL;
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
        row_cache_add(c, f->hash, rows, (size_t)f->n * (size_t)m->config.dim * sizeof *rows);
        p->places[k].rows = rows;
    }
    return true;
}

#endif
