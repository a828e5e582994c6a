/* pictures.h - used by test_image and fuzz_image: picture files, written from scratch or by the encoders of libjpeg and
 * libwebp, and the pictures that they should decode to. */
#ifndef PICTURES_H
#define PICTURES_H

typedef struct { uint8_t p[1 << 17]; size_t n; } Bytes;         // a file under construction

static void put(Bytes *b, const void *p, size_t n) {
    assert(n <= sizeof b->p - b->n);
    memcpy(b->p + b->n, p, n);
    b->n += n;
}

static void put_big(Bytes *b, uint64_t v, int n) {             // a number of n bytes
    while (n-- > 0) put(b, &(uint8_t){ (uint8_t)(v >> 8 * n) }, 1);
}

static void put_little(Bytes *b, uint64_t v, int n) {
    for (int i = 0; i < n; i++) put(b, &(uint8_t){ (uint8_t)(v >> 8 * i) }, 1);
}

static uint32_t crc32_of(const void *data, size_t n) {
    static uint32_t table[256];
    const uint8_t *p = data;
    uint32_t crc = 0xffffffff;
    for (uint32_t i = 0; i < 256 && !table[255]; i++) {
        uint32_t v = i;
        for (int k = 0; k < 8; k++) v = v >> 1 ^ (v & 1 ? 0xedb88320 : 0);
        table[i] = v;
    }
    for (size_t i = 0; i < n; i++) crc = crc >> 8 ^ table[(crc ^ p[i]) & 0xff];
    return ~crc;
}

static unsigned mixed(unsigned a, unsigned b) {                 // a hash of two numbers
    uint64_t v = ((uint64_t)a << 32 | b) * 0x9e3779b97f4a7c15ull;
    v = (v ^ v >> 29) * 0xbf58476d1ce4e5b9ull;
    return (unsigned)(v >> 32);
}

// The pictures of golden/images.txt, by formula; and "smooth", which JPEG keeps nearly unchanged.
static uint8_t formula(const char *name, int w, int h, int x, int y, int c) {
    if (!strcmp(name, "grad")) return (uint8_t)(c == 0 ? x * 255 / (w - 1) : c == 1 ? y * 255 / (h - 1) : 3 * x + 5 * y);
    if (!strcmp(name, "noise"))                                 // top bytes of a linear function, modulo 2^32
        return (uint8_t)((3855819850u + 945920256u * (unsigned)x + 1626714880u * (unsigned)y + 3852659470u * (unsigned)c) >> 24);
    if (!strcmp(name, "smooth")) return (uint8_t)(c == 0 ? 40 + 4 * x : c == 1 ? 200 - 3 * y : 60 + 2 * x + y);
    const int on = (x / 7 + y / 7) & 1 ? 255 : 0;               // "check"
    return (uint8_t)(c == 0 ? on : c == 1 ? 255 - on : on + x / 2);
}

static Image picture(const char *name, int w, int h) {
    Image image = { w, h, malloc(3 * (size_t)w * (size_t)h) };
    uint8_t *p = image.rgb;
    for (int y = 0; y < h; y++)
        for (int x = 0; x < w; x++)
            for (int c = 0; c < 3; c++) *p++ = formula(name, w, h, x, y, c);
    return image;
}

// EXIF data with an orientation, as cameras write it: after an entry of another tag.
static Bytes exif(int orientation, bool big) {
    Bytes b = { .n = 0 };
    void (*const number)(Bytes *, uint64_t, int) = big ? put_big : put_little;
    put(&b, big ? "MM" : "II", 2);
    number(&b, 42, 2), number(&b, 10, 4), put(&b, "??", 2), number(&b, 2, 2);
    number(&b, 0x100, 2), number(&b, 4, 2), number(&b, 1, 4), number(&b, 8, 4);
    number(&b, 0x112, 2), number(&b, 3, 2), number(&b, 1, 4), number(&b, (uint64_t)orientation, 2), number(&b, 0, 2);
    number(&b, 0, 4);
    return b;
}

// ---- PNG ----

typedef struct { int w, h, type, depth; bool interlaced, transparent; int orientation; unsigned seed; } PngForm;

static void put_chunk(Bytes *b, const char *type, const void *data, size_t n) {
    put_big(b, n, 4);
    const size_t from = b->n;
    put(b, type, 4), put(b, data, n);
    put_big(b, crc32_of(b->p + from, n + 4), 4);
}

static void put_ihdr(Bytes *b, uint32_t w, uint32_t h, int depth, int type, bool interlaced) {
    Bytes head = { .n = 0 };
    put_big(&head, w, 4), put_big(&head, h, 4);
    put_big(&head, (uint64_t)depth, 1), put_big(&head, (uint64_t)type, 1), put_big(&head, interlaced, 3);
    put(b, "\211PNG\r\n\032\n", 8);
    put_chunk(b, "IHDR", head.p, head.n);
}

static int png_channels(int type) { return type == 2 ? 3 : type == 4 ? 2 : type == 6 ? 4 : 1; }

// The value that a PNG stores for a channel of a pixel, and the level that it stands for.
static unsigned png_value(const PngForm *f, int x, int y, int c) {
    return mixed(f->seed + (unsigned)(y * f->w + x), (unsigned)c) >> (32 - f->depth);
}

static uint8_t png_level(const PngForm *f, int x, int y, int c) {
    const unsigned v = png_value(f, x, y, f->type & 2 && f->type != 3 ? c : 0);
    if (f->type == 3) return (uint8_t)(mixed(v, 1000 + (unsigned)c) >> 24);             // of the palette
    return (uint8_t)(f->depth == 16 ? v >> 8 : v * 255 / ((1u << f->depth) - 1));
}

// Rows of one pass: each is a filter's number and the differences to what the filter predicts.
static void put_pass(const PngForm *f, int x0, int y0, int dx, int dy, Bytes *out) {
    static uint8_t above[4096], row[4096];
    const int bits = f->depth * png_channels(f->type), bytes = bits < 8 ? 1 : bits / 8;
    const int width = (f->w - x0 + dx - 1) / dx, n = (width * bits + 7) / 8;
    memset(above, 0, sizeof above);
    for (int y = y0, i = 0; y < f->h && width > 0; y += dy, i++) {
        uint64_t packed = 0;
        int used = 0, at = 0;
        for (int x = x0; x < f->w; x += dx)
            for (int c = 0; c < png_channels(f->type); c++) {
                packed = packed << f->depth | png_value(f, x, y, c);
                for (used += f->depth; used >= 8; used -= 8) row[at++] = (uint8_t)(packed >> (used - 8));
            }
        if (used) row[at++] = (uint8_t)(packed << (8 - used));
        assert(at == n);
        const int filter = i % 5;
        put_big(out, (uint64_t)filter, 1);
        for (int k = 0; k < n; k++) {
            const int a = k < bytes ? 0 : row[k - bytes], b = above[k], c = k < bytes ? 0 : above[k - bytes], p = a + b - c;
            const int pa = abs(p - a), pb = abs(p - b), pc = abs(p - c);
            const int guess[5] = { 0, a, b, (a + b) / 2, pa <= pb && pa <= pc ? a : pb <= pc ? b : c };
            put_big(out, (uint64_t)(row[k] - guess[filter]) & 255, 1);
        }
        memcpy(above, row, sizeof above);
    }
}

static void put_png(const PngForm *f, Bytes *b) {
    static const int passes[7][4] = { { 0, 0, 8, 8 }, { 4, 0, 8, 8 }, { 0, 4, 4, 8 }, { 2, 0, 4, 4 }, { 0, 2, 2, 4 },
                                      { 1, 0, 2, 2 }, { 0, 1, 1, 2 } };
    static Bytes raw, packed;
    raw.n = packed.n = b->n = 0;
    for (int i = 0; f->interlaced && i < 7; i++)
        if (passes[i][0] < f->w && passes[i][1] < f->h)
            put_pass(f, passes[i][0], passes[i][1], passes[i][2], passes[i][3], &raw);
    if (!f->interlaced) put_pass(f, 0, 0, 1, 1, &raw);
    put(&packed, "\170\001", 2);                                // zlib: stored blocks
    uint32_t s1 = 1, s2 = 0;
    for (size_t i = 0; i < raw.n; i++) s1 = (s1 + raw.p[i]) % 65521, s2 = (s2 + s1) % 65521;
    for (size_t at = 0; at < raw.n; ) {
        const size_t n = raw.n - at < 50000 ? raw.n - at : 50000;
        put_little(&packed, at + n == raw.n, 1), put_little(&packed, n, 2), put_little(&packed, ~n, 2);
        put(&packed, raw.p + at, n);
        at += n;
    }
    put_big(&packed, s2 << 16 | s1, 4);
    put_ihdr(b, (uint32_t)f->w, (uint32_t)f->h, f->depth, f->type, f->interlaced);
    put_chunk(b, "gAMA", "\0\0\0\1", 4);                        // must not be applied
    if (f->type == 3) {
        uint8_t palette[768];
        for (int i = 0; i < 3 << f->depth; i++) palette[i] = (uint8_t)(mixed((unsigned)i / 3, 1000 + (unsigned)i % 3) >> 24);
        put_chunk(b, "PLTE", palette, (size_t)(3 << f->depth));
    }
    if (f->transparent && f->type < 4) put_chunk(b, "tRNS", "\0\1\0\0\0\2", f->type == 2 ? 6 : 2);
    if (f->orientation) {
        const Bytes e = exif(f->orientation, true);
        put_chunk(b, "eXIf", e.p, e.n);
    }
    put_chunk(b, "IDAT", packed.p, packed.n / 2);
    put_chunk(b, "IDAT", packed.p + packed.n / 2, packed.n - packed.n / 2);
    put_chunk(b, "IEND", "", 0);
}

// ---- JPEG ----

#ifdef USE_JPEG
typedef struct { int channels, sampling; bool progressive; int restart, orientation; } JpegForm;

// Writes a picture with libjpeg. channels: 1 (its red), 3 or 4 (CMYK without black). sampling: 1, or 2 (4:2:0).
static void put_jpeg(const JpegForm *f, const Image *image, Bytes *b) {
    struct jpeg_compress_struct jpeg;
    struct jpeg_error_mgr errors;
    unsigned char *file = NULL;
    unsigned long n = 0;
    uint8_t row[4 * 256], *rows[1] = { row };
    jpeg.err = jpeg_std_error(&errors);
    jpeg_create_compress(&jpeg);
    jpeg_mem_dest(&jpeg, &file, &n);
    jpeg.image_width = (JDIMENSION)image->w;
    jpeg.image_height = (JDIMENSION)image->h;
    jpeg.input_components = f->channels;
    jpeg.in_color_space = f->channels == 1 ? JCS_GRAYSCALE : f->channels == 3 ? JCS_RGB : JCS_CMYK;
    jpeg_set_defaults(&jpeg);
    jpeg_set_quality(&jpeg, 100, TRUE);
    for (int i = 0; i < f->channels; i++) jpeg.comp_info[i].h_samp_factor = jpeg.comp_info[i].v_samp_factor = 1;
    jpeg.comp_info[0].h_samp_factor = jpeg.comp_info[0].v_samp_factor = f->sampling;
    jpeg.restart_interval = (unsigned)f->restart;
    if (f->progressive) jpeg_simple_progression(&jpeg);
    jpeg_start_compress(&jpeg, TRUE);
    if (f->orientation) {
        const Bytes e = exif(f->orientation, f->orientation & 1);
        Bytes app = { .n = 0 };
        put(&app, "Exif\0", 6), put(&app, e.p, e.n);
        jpeg_write_marker(&jpeg, JPEG_APP0 + 1, (const JOCTET *)"http://ns.adobe.com/xap/1.0/", 29);
        jpeg_write_marker(&jpeg, JPEG_APP0 + 1, app.p, (unsigned)app.n);
    }
    for (int y = 0; y < image->h; y++) {
        for (int x = 0; x < image->w; x++)
            for (int c = 0; c < f->channels; c++)
                row[x * f->channels + c] = c == 3 ? 255 : image->rgb[3 * (y * image->w + x) + c];
        jpeg_write_scanlines(&jpeg, rows, 1);
    }
    jpeg_finish_compress(&jpeg);
    jpeg_destroy_compress(&jpeg);
    b->n = 0;
    put(b, file, n);
    free(file);
}
#endif

// ---- WebP ----

#ifdef USE_WEBP
#include <webp/encode.h>

static void put_riff_chunk(Bytes *b, const char *type, const void *data, size_t n) {
    put(b, type, 4), put_little(b, n, 4), put(b, data, n);
    if (n & 1) put(b, "", 1);
}

// The chunks of a picture with libwebp's encoder, "VP8L" or "ALPH" and "VP8 ", without a container.
static Bytes webp_chunks(const Image *image, bool lossless) {
    WebPConfig config;
    WebPPicture p;
    WebPMemoryWriter memory;
    uint8_t *rgba = malloc(4 * (size_t)image->w * (size_t)image->h);
    Bytes b = { .n = 0 };
    for (int i = 0; i < image->w * image->h; i++) {
        memcpy(rgba + 4 * i, image->rgb + 3 * i, 3);
        rgba[4 * i + 3] = (uint8_t)(i % 3 * 100);               // also 0: such a pixel has a colour too
    }
    assert(WebPConfigInit(&config) && WebPPictureInit(&p));
    config.lossless = lossless, config.exact = 1, config.quality = 100;
    p.use_argb = lossless, p.width = image->w, p.height = image->h;
    WebPMemoryWriterInit(&memory);
    p.writer = WebPMemoryWrite, p.custom_ptr = &memory;
    assert(WebPPictureImportRGBA(&p, rgba, 4 * image->w) && WebPEncode(&config, &p));
    for (size_t at = 12; at < memory.size; ) {
        const size_t n = 8 + little_endian(memory.mem + at + 4, 4), even = n + (n & 1);
        if (memcmp(memory.mem + at, "VP8X", 4)) put(&b, memory.mem + at, even);
        at += even;
    }
    WebPPictureFree(&p);
    WebPMemoryWriterClear(&memory);
    free(rgba);
    return b;
}

// A file of these chunks: alone, with EXIF, or as the only frame, at (x, y), of an animation of w x h pixels.
static void put_webp(const Image *image, bool lossless, int orientation, int x, int y, int w, int h, Bytes *b) {
    static Bytes body, frame;
    const Bytes chunks = webp_chunks(image, lossless);
    const bool moves = w > 0;
    body.n = frame.n = b->n = 0;
    if (!moves) w = image->w, h = image->h;
    put_little(&frame, (moves ? 2u : 0) | (orientation ? 8u : 0) | 16, 4);
    put_little(&frame, (uint64_t)w - 1, 3), put_little(&frame, (uint64_t)h - 1, 3);
    if (moves || orientation || !lossless) put_riff_chunk(&body, "VP8X", frame.p, frame.n);
    if (moves) {
        frame.n = 0;
        put_little(&frame, (uint64_t)x / 2, 3), put_little(&frame, (uint64_t)y / 2, 3);
        put_little(&frame, (uint64_t)image->w - 1, 3), put_little(&frame, (uint64_t)image->h - 1, 3);
        put_little(&frame, 100, 4), put(&frame, chunks.p, chunks.n);
        put_riff_chunk(&body, "ANIM", "\377\377\377\377\0\0", 6);
        put_riff_chunk(&body, "ANMF", frame.p, frame.n);
    } else {
        put(&body, chunks.p, chunks.n);
    }
    if (orientation) {
        const Bytes e = exif(orientation, false);
        put_riff_chunk(&body, "EXIF", e.p, e.n);
    }
    put(b, "RIFF", 4), put_little(b, body.n + 4, 4), put(b, "WEBP", 4), put(b, body.p, body.n);
}
#endif
#endif
