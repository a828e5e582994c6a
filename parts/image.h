/* image.h - pictures: files to pixels, the size in which the model sees them, resampling, patches. No model.
 *
 * A picture takes four steps: image_decode() gives 8-bit RGB, image_fit() the size and the number of tokens,
 * image_resize() the pixels in that size, image_patches() the rows that a vision tower reads. The results are those of
 * Hugging Face's image processor, bit for bit.
 *
 * PNG, JPEG and WebP are read by libpng, libjpeg and libwebp, if this was compiled with them (USE_PNG, USE_JPEG,
 * USE_WEBP). The headers of all formats, and PPM and PGM, are read here. No byte of a file is trusted.
 *
 * THREADS  Any thread may decode. image_resize() may share its work with the thread pool, which takes one job at a
 *          time: then call it on the thread that runs the model.
 * MEMORY   image_dims() allocates nothing and tells the size; decoding takes up to 12 bytes a pixel until it returns.
 *
 * Uses base.h. Begin with image_decode(), image_fit() and image_resize().
 *   [1] Files and their headers    [2] PNG, JPEG, WebP, PPM
 *   [3] Decoding                   [4] Size, resampling, patches */
#ifndef IMAGE_H
#define IMAGE_H

// ==== [1] Files and their headers ====================================================================================
// A header gives the size and the orientation before memory is allocated and before a library sees the file.

enum { MAX_PIXELS = 64 * 1000 * 1000, MAX_SIDE = 1 << 20 };          // of a picture that is decoded

typedef struct { int w, h; uint8_t *rgb; } Image;      // rgb: (h, w, 3) levels 0 to 255, top row first; image_free()

typedef struct {
    const uint8_t *data;      // (n) bytes of the file
    size_t n;
    char *err;                // (err_size) gets one line if something fails
    size_t err_size;
    int kind;                 // index of image_kinds
    int w, h;                 // size as it is stored; orientations 5 to 8 swap it
    int orientation;          // of EXIF: 1 (as stored) to 8; 0: not known yet
    size_t at;                // PNG: what libpng read; PPM: the first level
    int max, channels;        // PPM: the largest level; 1 or 3
    const uint8_t *frame;     // WebP: the first frame of an animation, or NULL
    size_t frame_n;
} ImageFile;

// Writes one line to f->err and returns false.
__attribute__((format(printf, 2, 3)))
static bool image_fail(ImageFile *f, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(f->err, f->err_size, fmt, ap);
    va_end(ap);
    return false;
}

static uint32_t big_endian(const uint8_t *p, int n) {  // a number of n bytes, at most 4
    uint32_t v = 0;
    for (int i = 0; i < n; i++) v = v << 8 | p[i];
    return v;
}

static uint32_t little_endian(const uint8_t *p, int n) {
    uint32_t v = 0;
    for (int i = n; i-- > 0; ) v = v << 8 | p[i];
    return v;
}

// The orientation in EXIF data, 1 to 8; 1 if there is none or it is damaged. EXIF is a TIFF file: "II*\0" (little
// endian) or "MM\0*", the offset of a list; a list is a count and entries of 12 bytes: tag, type, count, value.
static int exif_orientation(const uint8_t *p, size_t n) {
    if (n >= 6 && !memcmp(p, "Exif\0", 6)) p += 6, n -= 6;
    if (n < 8 || (memcmp(p, "II*", 4) && memcmp(p, "MM\0*", 4))) return 1;
    uint32_t (*const number)(const uint8_t *, int) = *p == 'M' ? big_endian : little_endian;
    size_t at = number(p + 4, 4);
    if (at > n - 2) return 1;
    int left = (int)number(p + at, 2);
    for (at += 2; left-- > 0 && n - at >= 12; at += 12) {
        const uint32_t type = number(p + at + 2, 2);   // 3: two bytes, 4: four bytes
        if (number(p + at, 2) != 0x112 || (type != 3 && type != 4)) continue;
        const uint32_t value = number(p + at + 8, type == 3 ? 2 : 4);
        return value >= 1 && value <= 8 ? (int)value : 1;
    }
    return 1;
}

// Chunks: length, type, data, checksum. The first one, IHDR, has the size; eXIf may stand anywhere.
static bool png_header(ImageFile *f) {
    if (f->n < 33 || memcmp(f->data + 8, "\0\0\0\rIHDR", 8))
        return image_fail(f, "PNG: damaged or truncated: no header");
    const uint32_t w = big_endian(f->data + 16, 4), h = big_endian(f->data + 20, 4);
    if (w > INT_MAX || h > INT_MAX)
        return image_fail(f, "PNG: expected 1 to %d million pixels, got %" PRIu32 " x %" PRIu32, MAX_PIXELS / 1000000,
                          w, h);
    f->w = (int)w;
    f->h = (int)h;
    for (size_t at = 8; f->n - at >= 12; ) {
        const uint8_t *chunk = f->data + at;
        const size_t n = big_endian(chunk, 4);
        if (n > f->n - at - 12)
            return image_fail(f, "PNG: truncated: a chunk of %zu bytes, %zu left", n, f->n - at - 12);
        if (!memcmp(chunk + 4, "eXIf", 4) && !f->orientation) f->orientation = exif_orientation(chunk + 8, n);
        if (!memcmp(chunk + 4, "IEND", 4)) break;
        at += n + 12;
    }
    return true;
}

// Segments: 0xff, a marker, length, data. SOF0 to SOF15 have the size; after SOS the picture begins. As libjpeg does,
// this skips bytes between segments.
static bool jpeg_header(ImageFile *f) {
    const uint8_t *p = f->data;
    for (size_t at = 2; ; ) {
        while (at < f->n && p[at] != 0xff) at++;
        while (at < f->n && p[at] == 0xff) at++;
        if (at >= f->n) break;
        const int marker = p[at++];
        if (marker < 2 || (marker >= 0xd0 && marker <= 0xd8)) continue;         // these have no length
        const size_t n = f->n - at < 2 ? 0 : big_endian(p + at, 2);
        if (n < 2 || n > f->n - at) break;
        if (marker >= 0xc0 && marker <= 0xcf && marker != 0xc4 && marker != 0xc8 && marker != 0xcc && n >= 7) {
            f->h = (int)big_endian(p + at + 3, 2);
            f->w = (int)big_endian(p + at + 5, 2);
        }
        if (marker == 0xe1 && n >= 8 && !memcmp(p + at + 2, "Exif\0", 6) && !f->orientation)
            f->orientation = exif_orientation(p + at + 2, n - 2);
        if (marker == 0xda) return true;
        at += n;
    }
    return image_fail(f, "JPEG: damaged or truncated: the file ends before the picture begins");
}

// "RIFF", length, "WEBP", then chunks: type, length, data, a byte if the length is odd. VP8 (lossy) or VP8L (lossless)
// hold a picture; VP8X, before them, has the size of an animation, whose frames are in ANMF.
static bool webp_header(ImageFile *f) {
    const size_t riff = little_endian(f->data + 4, 4);
    if (memcmp(f->data, "RIFF", 4)) return image_fail(f, "WebP: damaged: it does not begin with RIFF");
    if (riff > f->n - 8) return image_fail(f, "WebP: truncated: expected %zu bytes, got %zu", riff + 8, f->n);
    f->n = riff + 8;
    for (size_t at = 12; at < f->n && f->n - at >= 8; ) {
        const uint8_t *chunk = f->data + at, *p = chunk + 8;
        const size_t n = little_endian(chunk + 4, 4);
        if (n > f->n - at - 8)
            return image_fail(f, "WebP: truncated: a chunk of %zu bytes, %zu left", n, f->n - at - 8);
        if (!memcmp(chunk, "VP8X", 4) && n >= 10) {
            f->w = 1 + (int)little_endian(p + 4, 3);
            f->h = 1 + (int)little_endian(p + 7, 3);
        } else if (!memcmp(chunk, "VP8 ", 4) && n >= 10 && !f->w) {
            f->w = (int)little_endian(p + 6, 2) & 0x3fff;
            f->h = (int)little_endian(p + 8, 2) & 0x3fff;
        } else if (!memcmp(chunk, "VP8L", 4) && n >= 5 && !f->w) {
            f->w = 1 + (int)(little_endian(p + 1, 4) & 0x3fff);
            f->h = 1 + (int)(little_endian(p + 1, 4) >> 14 & 0x3fff);
        } else if (!memcmp(chunk, "EXIF", 4) && !f->orientation) {
            f->orientation = exif_orientation(p, n);
        } else if (!memcmp(chunk, "ANMF", 4) && !f->frame) {
            f->frame = p;
            f->frame_n = n;
        }
        at += 8 + n + (n & 1 && n < f->n - at - 8);
    }
    return f->w ? true : image_fail(f, "WebP: damaged: no picture in it");
}

static bool is_space(uint8_t c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

// The next number of a PPM header, at most 9 digits; -1: none. Spaces and comments may precede it.
static int ppm_number(ImageFile *f) {
    int v = 0, digits = 0;
    for (bool comment = false; f->at < f->n; f->at++) {
        const uint8_t c = f->data[f->at];
        if (!comment && c != '#' && !is_space(c)) break;
        comment = c == '#' || (comment && c != '\n');
    }
    for (; f->at < f->n && f->data[f->at] >= '0' && f->data[f->at] <= '9' && digits < 9; f->at++, digits++)
        v = 10 * v + f->data[f->at] - '0';
    return digits ? v : -1;
}

// "P6" (RGB) or "P5" (grey), width, height, the largest level, one space, levels: one byte each, or two if the largest
// exceeds 255.
static bool ppm_header(ImageFile *f) {
    f->at = 2;
    f->channels = f->data[1] == '6' ? 3 : 1;
    f->w = ppm_number(f);
    f->h = ppm_number(f);
    f->max = ppm_number(f);
    if (f->max < 1 || f->max > 65535 || f->at >= f->n || !is_space(f->data[f->at]))
        return image_fail(f, "PPM: damaged: expected width, height and the largest level, 1 to 65535");
    f->at++;
    return true;
}

// ==== [2] PNG, JPEG, WebP, PPM =======================================================================================
// Each read_* fills rgb, (f->h, f->w, 3), as it is stored. Transparency is dropped, not composited, and colour profiles
// are ignored, as in the training of the model. A file that ends early is an error, not half a picture.

#include <setjmp.h>

#ifdef USE_PNG
#include <png.h>

static void png_bytes(png_structp png, png_bytep to, size_t n) {
    ImageFile *f = png_get_io_ptr(png);
    if (n > f->n - f->at) png_error(png, "the file ends early");
    memcpy(to, f->data + f->at, n);
    f->at += n;
}

static void png_failed(png_structp png, png_const_charp text) {
    image_fail(png_get_error_ptr(png), "PNG: damaged or truncated: %s", text);
    png_longjmp(png, 1);
}

static void png_warned(png_structp png, png_const_charp text) { (void)png, (void)text; }

// Transforms of libpng make all kinds 8-bit RGB: palettes and bits expanded, of 16 bits the high byte, grey tripled.
static bool read_png(ImageFile *f, uint8_t *rgb) {
    png_structp png = png_create_read_struct(PNG_LIBPNG_VER_STRING, f, png_failed, png_warned);
    png_infop info = png ? png_create_info_struct(png) : NULL;
    if (!info) {
        png_destroy_read_struct(&png, NULL, NULL);
        return image_fail(f, "PNG: out of memory, or a libpng of another version than its header");
    }
    if (setjmp(png_jmpbuf(png))) {                     // where png_failed() goes
        png_destroy_read_struct(&png, &info, NULL);
        return false;
    }
    png_set_read_fn(png, f, png_bytes);
    png_set_user_limits(png, (png_uint_32)f->w, (png_uint_32)f->h);
    png_set_keep_unknown_chunks(png, PNG_HANDLE_CHUNK_NEVER, NULL, -1);         // all that may be left out, is
    png_read_info(png, info);
    png_set_palette_to_rgb(png);
    png_set_expand_gray_1_2_4_to_8(png);
    png_set_strip_16(png);
    png_set_strip_alpha(png);
    png_set_gray_to_rgb(png);
    const int passes = png_set_interlace_handling(png);
    png_read_update_info(png, info);
    if (png_get_rowbytes(png, info) != 3 * (size_t)f->w) png_error(png, "rows of an unexpected length");
    for (int pass = 0; pass < passes; pass++)
        for (int y = 0; y < f->h; y++) png_read_row(png, rgb + 3 * (size_t)f->w * (size_t)y, NULL);
    png_read_end(png, NULL);
    png_destroy_read_struct(&png, &info, NULL);
    return true;
}
#else
#define read_png NULL
#endif

#ifdef USE_JPEG
#include <jpeglib.h>
#include <jerror.h>
#undef FAR                    // a word of old compilers, here a name

enum { MAX_SCANS = 200 };     // of a progressive file; more would only take time

typedef struct {
    struct jpeg_error_mgr manager;                     // first: libjpeg knows only this
    struct jpeg_progress_mgr progress;
    jmp_buf failed;
    ImageFile *file;
} JpegErrors;

static void jpeg_failed(j_common_ptr jpeg) {
    JpegErrors *e = (JpegErrors *)jpeg->err;
    char text[JMSG_LENGTH_MAX];
    e->manager.format_message(jpeg, text);
    image_fail(e->file, "JPEG: damaged, truncated or of an unknown kind: %s", text);
    longjmp(e->failed, 1);
}

static void jpeg_warned(j_common_ptr jpeg, int level) {
    const int code = jpeg->err->msg_code;              // libjpeg fills what is missing with grey
    if (level < 0 && (code == JWRN_JPEG_EOF || code == JWRN_HIT_MARKER || code == JWRN_HUFF_BAD_CODE ||
                      code == JWRN_MUST_RESYNC || code == JWRN_ARITH_BAD_CODE)) jpeg_failed(jpeg);
}

static void jpeg_advanced(j_common_ptr jpeg) {
    JpegErrors *e = (JpegErrors *)jpeg->err;
    if (((j_decompress_ptr)jpeg)->input_scan_number <= MAX_SCANS) return;
    image_fail(e->file, "JPEG: more than %d scans; save it again with another program", MAX_SCANS);
    longjmp(e->failed, 1);
}

// A row of CMYK, which files store inverted, as Adobe does: level = colour * black / 255, rounded.
static void row_of_cmyk(uint8_t *rgb, const uint8_t *cmyk, int w) {
    for (int x = 0; x < w; x++)
        for (int c = 0; c < 3; c++) {
            const int black = cmyk[4 * x + 3];
            rgb[3 * x + c] = (uint8_t)(black - ((255 - cmyk[4 * x + c]) * black + 127) / 255);
        }
}

static bool read_jpeg(ImageFile *f, uint8_t *rgb) {
    struct jpeg_decompress_struct jpeg = { 0 };
    JpegErrors e = { .file = f, .progress.progress_monitor = jpeg_advanced };
    jpeg.err = jpeg_std_error(&e.manager);
    e.manager.error_exit = jpeg_failed;
    e.manager.emit_message = jpeg_warned;
    if (setjmp(e.failed)) {                            // where jpeg_failed() goes
        jpeg_destroy_decompress(&jpeg);
        return false;
    }
    jpeg_create_decompress(&jpeg);
    jpeg.progress = &e.progress;
    jpeg_mem_src(&jpeg, f->data, (unsigned long)f->n);
    jpeg_read_header(&jpeg, TRUE);
    const bool cmyk = jpeg.num_components == 4;
    jpeg.out_color_space = cmyk ? JCS_CMYK : JCS_RGB;
    if (jpeg.image_width != (JDIMENSION)f->w || jpeg.image_height != (JDIMENSION)f->h) ERREXIT(&jpeg, JERR_BAD_LENGTH);
    jpeg_start_decompress(&jpeg);
    JSAMPARRAY row = jpeg.mem->alloc_sarray((j_common_ptr)&jpeg, JPOOL_IMAGE, 4 * jpeg.output_width, 1);
    while (jpeg.output_scanline < jpeg.output_height) {
        uint8_t *to = rgb + 3 * (size_t)f->w * jpeg.output_scanline;
        jpeg_read_scanlines(&jpeg, row, 1);
        if (cmyk) row_of_cmyk(to, row[0], f->w);
        else memcpy(to, row[0], 3 * (size_t)f->w);
    }
    jpeg_finish_decompress(&jpeg);
    jpeg_destroy_decompress(&jpeg);
    return true;
}
#else
#define read_jpeg NULL
#endif

#ifdef USE_WEBP
#include <webp/decode.h>

// A picture, or the first frame of an animation, which may cover a part of it: offsets / 2 and sizes - 1 of three
// bytes, the duration, flags, then chunks as those of a picture. The rest is black.
static bool read_webp(ImageFile *f, uint8_t *rgb) {
    const size_t total = 3 * (size_t)f->w * (size_t)f->h;
    const uint8_t *data = f->data, *p = f->frame;
    size_t n = f->n, first = 0;
    int w = f->w, h = f->h, got_w, got_h;
    if (p) {
        if (f->frame_n < 16) return image_fail(f, "WebP: damaged: the first frame is empty");
        const int x = 2 * (int)little_endian(p, 3), y = 2 * (int)little_endian(p + 3, 3);
        data = p + 16;
        n = f->frame_n - 16;
        w = 1 + (int)little_endian(p + 6, 3);
        h = 1 + (int)little_endian(p + 9, 3);
        if (w > f->w - x || h > f->h - y) return image_fail(f, "WebP: damaged: a frame exceeds the picture");
        first = 3 * ((size_t)y * (size_t)f->w + (size_t)x);
        memset(rgb, 0, total);
    }
    if (!WebPGetInfo(data, n, &got_w, &got_h) || got_w != w || got_h != h ||
        !WebPDecodeRGBInto(data, n, rgb + first, total - first, 3 * f->w))
        return image_fail(f, "WebP: damaged or truncated");
    return true;
}
#else
#define read_webp NULL
#endif

static bool read_ppm(ImageFile *f, uint8_t *rgb) {
    const size_t n = (size_t)f->w * (size_t)f->h * (size_t)f->channels, size = f->max > 255 ? 2 : 1;
    const uint8_t *p = f->data + f->at;
    if (n * size > f->n - f->at)
        return image_fail(f, "PPM: truncated: expected %zu bytes of pixels, got %zu", n * size, f->n - f->at);
    for (size_t i = 0; i < n; i++, p += size) {
        const int v = min_int((int)big_endian(p, (int)size), f->max);
        const int level = f->max == 65535 ? v >> 8 : (v * 255 + f->max / 2) / f->max;
        if (f->channels == 3) rgb[i] = (uint8_t)level;
        else memset(rgb + 3 * i, level, 3);
    }
    return true;
}

// ==== [3] Decoding ===================================================================================================

typedef struct {
    const char *name;
    int at;                                            // where these bytes are
    const char *bytes;
    int n;
    bool (*header)(ImageFile *), (*read)(ImageFile *, uint8_t *rgb);            // read NULL: needs what follows
    const char *advice;                                // packages to install, or how to convert the file
} ImageKind;

#define TO_PNG(type) "convert it: convert 'FILE." type "[0]' FILE.png (ImageMagick)"
static const ImageKind image_kinds[] = {
    { "PNG", 0, "\211PNG\r\n\032\n", 8, png_header, read_png,
      "libpng-dev (Debian, Ubuntu), libpng-devel (Fedora) or libpng (Arch, Homebrew)" },
    { "JPEG", 0, "\377\330\377", 3, jpeg_header, read_jpeg,
      "libjpeg-dev (Debian, Ubuntu), libjpeg-turbo-devel (Fedora), libjpeg-turbo (Arch) or jpeg-turbo (Homebrew)" },
    { "WebP", 8, "WEBP", 4, webp_header, read_webp,
      "libwebp-dev (Debian, Ubuntu), libwebp-devel (Fedora), libwebp (Arch) or webp (Homebrew)" },
    { "PPM", 0, "P6", 2, ppm_header, read_ppm, NULL },
    { "PGM", 0, "P5", 2, ppm_header, read_ppm, NULL },
    { "GIF", 0, "GIF8", 4, NULL, NULL, TO_PNG("gif") },
    { "BMP", 0, "BM", 2, NULL, NULL, TO_PNG("bmp") },
    { "TIFF", 0, "II*\0", 4, NULL, NULL, TO_PNG("tif") },
    { "TIFF", 0, "MM\0*", 4, NULL, NULL, TO_PNG("tif") },
    { "AVIF", 4, "ftypavi", 7, NULL, NULL, "convert it: avifdec FILE.avif FILE.png" },
    { "HEIC", 4, "ftyphe", 6, NULL, NULL, "convert it: heif-convert FILE.heic FILE.jpg" },
    { "HEIC", 4, "ftypmif1", 8, NULL, NULL, "convert it: heif-convert FILE.heic FILE.jpg" },
    { "JPEG XL", 0, "\377\012", 2, NULL, NULL, "convert it: djxl FILE.jxl FILE.png" },
    { "JPEG XL", 4, "JXL ", 4, NULL, NULL, "convert it: djxl FILE.jxl FILE.png" },
    { "JPEG 2000", 4, "jP  ", 4, NULL, NULL, TO_PNG("jp2") },
    { "SVG", 0, "<svg", 4, NULL, NULL, "draw it: rsvg-convert -w 1024 FILE.svg -o FILE.png" },
    { "SVG or other XML", 0, "<?xml", 5, NULL, NULL, "draw it: rsvg-convert -w 1024 FILE.svg -o FILE.png" },
    { "HTML", 0, "<!DOCTYPE", 9, NULL, NULL, "it may be an error page in place of the download" },
    { "HTML", 0, "<html", 5, NULL, NULL, "it may be an error page in place of the download" },
    { "PDF", 0, "%PDF", 4, NULL, NULL, "draw a page: pdftoppm -png -r 100 -f 1 -l 1 FILE.pdf page" },
};
#undef TO_PNG

// Finds out what a file is and reads its header. False: it cannot be decoded, and f->err says why.
static bool image_open(ImageFile *f) {
    const int n_kinds = (int)(sizeof image_kinds / sizeof *image_kinds);
    const char *formats = "a PNG, JPEG, WebP, PPM (P6) or PGM (P5) picture";
    for (f->kind = 0; f->kind < n_kinds; f->kind++) {
        const ImageKind *k = &image_kinds[f->kind];
        if (f->n >= (size_t)(k->at + k->n) && !memcmp(f->data + k->at, k->bytes, (size_t)k->n)) break;
    }
    if (f->n < 4) return image_fail(f, "expected %s, got %zu bytes", formats, f->n);
    if (f->kind == n_kinds)
        return image_fail(f, "expected %s, got a file that begins with the bytes %02x %02x %02x %02x", formats,
                          f->data[0], f->data[1], f->data[2], f->data[3]);
    const ImageKind *k = &image_kinds[f->kind];
    if (!k->header) return image_fail(f, "expected %s, got %s; %s", formats, k->name, k->advice);
    if (!k->read)
        return image_fail(f, "%s: this build cannot read it: install %s, and pkg-config, then run make again", k->name,
                          k->advice);
    if (!k->header(f)) return false;
    if (!f->orientation) f->orientation = 1;
    if (f->w < 1 || f->h < 1 || f->w > MAX_SIDE || f->h > MAX_SIDE || f->w > MAX_PIXELS / f->h)
        return image_fail(f, "%s: expected 1 to %d million pixels, no side over %d, got %d x %d; make it smaller",
                          k->name, MAX_PIXELS / 1000000, MAX_SIDE, f->w, f->h);
    return true;
}

static inline void image_free(Image *image) {
    free(image->rgb);
    *image = (Image){ 0 };
}

// The size of a picture from its header alone, as image_decode() gives it: orientation applied. Returns false and
// writes one line to err if the header is damaged, or the format is one that image_decode() refuses.
static inline bool image_dims(const void *data, size_t n, int *w, int *h, char *err, size_t err_size) {
    ImageFile f = { .data = data, .n = n, .err = err, .err_size = err_size };
    if (!image_open(&f)) return false;
    *w = f.orientation > 4 ? f.h : f.w;
    *h = f.orientation > 4 ? f.w : f.h;
    return true;
}

// Applies an orientation: where the first stored row and column are shown. 2: top, right; 3: bottom, right (rotated by
// 180 degrees); 4: bottom, left; 5: left, top (transposed); 6: right, top (to be rotated clockwise); 7: right, bottom;
// 8: left, bottom (to be rotated counterclockwise). from: (h, w, 3); to: (h, w, 3), or (w, h, 3) for 5 to 8.
static void orient(const uint8_t *from, int w, int h, int orientation, uint8_t *to) {
    const bool swap = orientation > 4;
    const bool flip_x = strchr("\2\3\7\10", orientation), flip_y = strchr("\3\4\6\7", orientation);
    const int out_w = swap ? h : w, out_h = swap ? w : h;
    for (int y = 0; y < out_h; y++)
        for (int x = 0; x < out_w; x++, to += 3) {
            const int at_x = swap ? y : x, at_y = swap ? x : y;
            const size_t column = (size_t)(flip_x ? w - 1 - at_x : at_x), row = (size_t)(flip_y ? h - 1 - at_y : at_y);
            memcpy(to, from + 3 * (row * (size_t)w + column), 3);
        }
}

// Decodes a picture in a file of n bytes, in a format of image_kinds, to 8-bit RGB; of an animation the first frame.
// Grey is tripled, palettes are expanded, of 16 bits the high byte is kept, alpha is dropped without compositing, the
// EXIF orientation is applied. Returns false and writes one line to err if that fails; *out is empty then.
static inline bool image_decode(const void *data, size_t n, Image *out, char *err, size_t err_size) {
    ImageFile f = { .data = data, .n = n, .err = err, .err_size = err_size };
    *out = (Image){ 0 };
    if (!image_open(&f)) return false;
    const size_t size = 3 * (size_t)f.w * (size_t)f.h;
    uint8_t *rgb = malloc(size), *turned = f.orientation > 1 ? malloc(size) : NULL;
    bool ok = rgb && (turned || f.orientation == 1);
    if (!ok) image_fail(&f, "out of memory for a picture of %d x %d pixels", f.w, f.h);
    ok = ok && image_kinds[f.kind].read(&f, rgb);
    if (ok && turned) {
        orient(rgb, f.w, f.h, f.orientation, turned);
        uint8_t *stored = rgb;
        rgb = turned;
        turned = stored;
    }
    free(turned);
    if (!ok) free(rgb);
    else *out = f.orientation > 4 ? (Image){ f.h, f.w, rgb } : (Image){ f.w, f.h, rgb };
    return ok;
}

// ==== [4] Size, resampling, patches ==================================================================================
// The model sees any picture enlarged or reduced until it fills a budget of tokens. A token is 48 x 48 pixels.

enum { TOKEN_SIDE = 48 };     // pixels: 3 x 3 patches of 16 x 16

typedef struct { int w, h, tokens; } ImageSize;        // pixels, multiples of TOKEN_SIDE; w / 48 * h / 48

// The size in which the model sees a picture of w x h pixels, and how many tokens it takes: at most `budget`, which is
// 70, 140, 280, 560 or 1120. The aspect ratio is kept, up to rounding both sides down. False: another budget, or no
// pixels.
static inline bool image_fit(int w, int h, int budget, ImageSize *out) {
    *out = (ImageSize){ 0 };
    if (budget != 70 && budget != 140 && budget != 280 && budget != 560 && budget != 1120) return false;
    if (w < 1 || h < 1) return false;
    const double factor = sqrt((double)budget * TOKEN_SIDE * TOKEN_SIDE / ((double)h * w));
    int rows = (int)floor(factor * h / TOKEN_SIDE), columns = (int)floor(factor * w / TOKEN_SIDE);
    if (!rows) rows = 1, columns = min_int(w / h, budget);       // a side that is less than a token
    if (!columns) columns = 1, rows = min_int(h / w, budget);
    *out = (ImageSize){ columns * TOKEN_SIDE, rows * TOKEN_SIDE, columns * rows };
    return true;
}

// Resampling is bicubic (Keys, a = -0.5) with antialiasing, in fixed point, first rows, then columns, with 8 bits
// between: the rule of PyTorch's interpolate() and torchvision's resize() for 8-bit pictures, bit for bit.

typedef struct {              // how one side is resampled
    int *first, *n;           // (outputs) the pixels that an output is a sum of
    int16_t *weights;         // (outputs, stride) their weights * 2^shift
    int stride, shift;
} Resampler;

static double cubic(double x) {
    const double a = -0.5;
    x = fabs(x);
    if (x < 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
    return x < 2 ? ((a * x - 5 * a) * x + 8 * a) * x - 4 * a : 0;
}

static void free_resampler(Resampler *r) {
    free(r->first);
    free(r->n);
    free(r->weights);
}

// shift is the largest for which the weights, rounded, fit 16 bits, at most 22. Equal sizes give weights of 1 and 0.
// False: there is no memory.
static bool make_resampler(int n_in, int n_out, Resampler *out) {
    const double scale = (double)n_in / n_out, reach = fmax(scale, 1), inverse = 1 / reach;
    const size_t stride = (size_t)ceil(2 * reach) * 2 + 1, n = (size_t)n_out;
    Resampler r = { calloc(n, sizeof *r.first), calloc(n, sizeof *r.n), calloc(n * stride, sizeof *r.weights),
                    (int)stride, 0 };
    double *weights = calloc(n * stride, sizeof *weights), largest = 0;
    *out = r;
    if (!r.first || !r.n || !r.weights || !weights) {
        free(weights);
        return false;
    }
    for (int i = 0; i < n_out; i++) {
        const double center = scale * (i + 0.5);
        const int first = max_int((int)(center - 2 * reach + 0.5), 0);
        const int end = min_int((int)(center + 2 * reach + 0.5), n_in);
        double *w = weights + (size_t)i * stride, sum = 0;
        r.first[i] = first;
        r.n[i] = min_int(end - first, r.stride);
        for (int j = 0; j < r.n[i]; j++) sum += w[j] = cubic((first + j - center + 0.5) * inverse);
        for (int j = 0; j < r.n[i]; j++) largest = fmax(largest, w[j] /= sum);
    }
    while (r.shift < 22 && (int)(0.5 + largest * (1 << (r.shift + 1))) < 1 << 15) r.shift++;
    for (size_t i = 0; i < n * stride; i++) r.weights[i] = (int16_t)round(weights[i] * (1 << r.shift));
    free(weights);
    *out = r;
    return true;
}

static inline uint8_t clamp_level(int32_t sum, int shift) {
    sum >>= shift;
    return (uint8_t)(sum < 0 ? 0 : sum > 255 ? 255 : sum);
}

// One row: from (any, 3) to (w, 3).
static void resample_row(const Resampler *r, const uint8_t *from, int w, uint8_t *to) {
    for (int x = 0; x < w; x++, to += 3) {
        const uint8_t *p = from + 3 * (size_t)r->first[x];
        const int16_t *weight = r->weights + (size_t)x * (size_t)r->stride;
        int32_t sum[3] = { 1 << (r->shift - 1), 1 << (r->shift - 1), 1 << (r->shift - 1) };
        for (int j = 0; j < r->n[x]; j++)
            for (int c = 0; c < 3; c++) sum[c] += weight[j] * p[3 * j + c];
        for (int c = 0; c < 3; c++) to[c] = clamp_level(sum[c], r->shift);
    }
}

typedef struct {
    const Image *in;
    int w;                    // of the output
    Resampler across, down;
    uint8_t *out;
    atomic_bool *failed;      // set if a thread finds no memory
} ResizeTask;

// Rows first .. end - 1 of the output: resamples the input's rows that they need, then combines these.
static void resize_band(const ResizeTask *t, int first, int end) {
    int top = t->down.first[first], bottom = t->down.first[end - 1] + t->down.n[end - 1];
    const size_t width = 3 * (size_t)t->w;
    uint8_t *rows = malloc((size_t)(bottom - top) * width);
    int32_t *sums = malloc(width * sizeof *sums);
    if (!rows || !sums) {
        atomic_store(t->failed, true);
        bottom = top, end = first;
    }
    for (int y = top; y < bottom; y++)
        resample_row(&t->across, t->in->rgb + 3 * (size_t)t->in->w * (size_t)y, t->w, rows + (size_t)(y - top) * width);
    for (int y = first; y < end; y++) {
        const int16_t *weight = t->down.weights + (size_t)y * (size_t)t->down.stride;
        for (size_t i = 0; i < width; i++) sums[i] = 1 << (t->down.shift - 1);
        for (int j = 0; j < t->down.n[y]; j++) {
            const uint8_t *row = rows + (size_t)(t->down.first[y] + j - top) * width;
            for (size_t i = 0; i < width; i++) sums[i] += weight[j] * row[i];
        }
        for (size_t i = 0; i < width; i++) t->out[(size_t)y * width + i] = clamp_level(sums[i], t->down.shift);
    }
    free(rows);
    free(sums);
}

enum { BAND = 16 };           // rows of the output; two bands need the same rows of the input for about 3 of them

static void resize_rows(const void *task, int first, int end) {
    for (; first < end; first += BAND) resize_band(task, first, min_int(first + BAND, end));
}

// Resamples a picture to w x h pixels: out (h, w, 3). alone: on this thread; else the caller has the thread pool.
// False: there is no memory.
static inline bool image_resize(const Image *in, int w, int h, bool alone, uint8_t *out) {
    atomic_bool failed = false;
    ResizeTask t = { .in = in, .w = w, .out = out, .failed = &failed };
    const bool ok = make_resampler(in->w, w, &t.across) && make_resampler(in->h, h, &t.down);
    if (ok && alone) resize_rows(&t, 0, h);
    else if (ok) parallel(h, BAND, resize_rows, &t);
    free_resampler(&t.across);
    free_resampler(&t.down);
    return ok && !failed;
}

// Cuts a picture, w pixels wide, into patches of side x side pixels, row by row, and writes n of them, from number
// `first` on: rgb (h, w, 3), out (n, side * side * 3), in a patch the order y, x, channel, values 0 to 1.
static inline void image_patches(const uint8_t *rgb, int w, int side, int first, int n, float *out) {
    const size_t width = 3 * (size_t)w, length = 3 * (size_t)side;
    const int columns = w / side;
    for (int k = first; k < first + n; k++) {
        const uint8_t *from = rgb + (size_t)(k / columns * side) * width + (size_t)(k % columns) * length;
        for (int y = 0; y < side; y++, from += width)
            for (size_t i = 0; i < length; i++) *out++ = (float)from[i] * (float)(1.0 / 255);
    }
}

#endif
