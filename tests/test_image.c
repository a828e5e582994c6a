/* test_image.c - pictures: sizes, resampled levels and patches against Hugging Face's processor (golden/images.txt);
 * files of every kind, written by pictures.h; truncated, damaged and hostile ones.
 *
 * What this build cannot decode must be refused with the name of the package. `test_image -seeds FOLDER` writes small
 * files for fuzz_image. */
#define _GNU_SOURCE
#ifndef ENGINE_LINKED
#define BASE_IMPLEMENTATION
#endif
#include "../parts/base.h"
#include "../parts/image.h"
#include "pictures.h"
#include "test.h"

static char err[400];

// Decodes a copy that ends where its allocation ends; checks image_dims() too. A failure leaves one line in err.
static bool decode(const void *file, size_t n, Image *out) {
    void *copy = malloc(n ? n : 1);
    int w = 0, h = 0;
    char why[sizeof err];
    memcpy(copy, file, n);
    err[0] = why[0] = 0;
    const bool ok = image_decode(copy, n, out, err, sizeof err), sized = image_dims(copy, n, &w, &h, why, sizeof why);
    free(copy);
    if (ok) CHECK(sized && w == out->w && h == out->h, "image_dims: %d x %d, not %d x %d: %s", w, h, out->w, out->h, why);
    else CHECK(!out->rgb && strlen(err) > 10 && !strchr(err, '\n'), "an error of one line, got '%s'", err);
    CHECK(sized || !strcmp(err, why), "image_dims says '%s', image_decode '%s'", why, err);
    return ok;
}

static void refuse(const void *file, size_t n, const char *what, const char *word) {
    Image out;
    CHECK(!decode(file, n, &out), "%s: decoded", what);
    CHECK(strstr(err, word), "%s: expected '%s' in the error, got '%s'", what, word, err);
    image_free(&out);
}

// Whether this build decodes a format; if not, checks that the file is refused with the package's name.
static bool can_read(bool can, const Bytes *b, const char *name, const char *package) {
    if (!can) {
        refuse(b->p, b->n, name, package);
        CHECK(strstr(err, "make again"), "%s: expected what to do, got '%s'", name, err);
    }
    return can;
}

// The largest difference of a decoded file to a picture; 256 if it is not decoded or has another size.
static int difference(const Bytes *b, const Image *want) {
    Image got;
    int largest = 0;
    if (!decode(b->p, b->n, &got)) return 256;
    if (got.w != want->w || got.h != want->h) largest = 256;
    else for (int i = 0; i < 3 * got.w * got.h; i++) largest = max_int(largest, abs(got.rgb[i] - want->rgb[i]));
    image_free(&got);
    return largest;
}

// ---- sizes, levels, patches ----

static void test_golden(void) {
    FILE *f = fopen("tests/golden/images.txt", "r");
    char line[200], name[16];
    int w, h, budget, side, got_w, got_h, n = 0;
    unsigned crc, resized;
    CHECK(f != NULL, "tests/golden/images.txt: cannot read");
    while (f && fgets(line, sizeof line, f)) {
        ImageSize size;
        n++;
        if (sscanf(line, "size %d %d %d %d %d", &w, &h, &budget, &got_w, &got_h) == 5) {
            const bool fits = image_fit(w, h, budget, &size);
            CHECK(fits && size.w == got_w && size.h == got_h, "%d x %d, budget %d: expected %d x %d, got %d x %d", w, h,
                  budget, got_w, got_h, size.w, size.h);
            CHECK(size.tokens == got_w / 48 * (got_h / 48) && size.tokens <= budget, "%d x %d: %d tokens of %d", w, h,
                  size.tokens, budget);
        } else if (sscanf(line, "picture %15s %d %d %x %d %d %x", name, &w, &h, &crc, &got_w, &got_h, &resized) == 7) {
            Image image = picture(name, w, h);
            uint8_t *out = malloc(3 * (size_t)got_w * (size_t)got_h);
            CHECK(crc32_of(image.rgb, 3 * (size_t)w * (size_t)h) == crc, "%s %d x %d: the formula is wrong", name, w, h);
            const bool fits = image_fit(w, h, 70, &size);
            CHECK(fits && size.w == got_w && size.h == got_h, "%s %d x %d: %d x %d", name, w, h, size.w, size.h);
            for (int threads = 1; threads <= 2; threads++) {
                use_threads(threads);
                image_resize(&image, got_w, got_h, false, out);
                const unsigned got = crc32_of(out, 3 * (size_t)got_w * (size_t)got_h);
                CHECK(got == resized, "%s %d x %d, %d threads: levels: expected CRC %08x, got %08x", name, w, h, threads,
                      resized, got);
            }
            free(out);
            image_free(&image);
        } else if (sscanf(line, "patches %15s %d %d %d %x", name, &w, &h, &side, &crc) == 5) {
            Image image = picture(name, w, h);
            CHECK(image_fit(w, h, 70, &size), "size");
            const size_t count = 3 * (size_t)size.w * (size_t)size.h;
            uint8_t *out = malloc(count);
            float *patches = malloc(count * sizeof *patches);
            image_resize(&image, size.w, size.h, true, out);
            image_patches(out, size.w, side, 0, size.w / side * (size.h / side), patches);
            const unsigned got = crc32_of(patches, count * sizeof *patches);
            CHECK(got == crc, "patches of %s: expected CRC %08x, got %08x", name, crc, got);
            free(out);
            free(patches);
            image_free(&image);
        } else {
            CHECK(*line == '#', "golden/images.txt: unknown line: %s", line);
        }
    }
    CHECK(n > 100, "golden/images.txt: %d lines", n);
    if (f) fclose(f);
}

static void test_sizes(void) {
    static const int budgets[] = { 70, 140, 280, 560, 1120 };
    ImageSize size, mirrored = { 0 };
    CHECK(!image_fit(100, 100, 0, &size) && !image_fit(100, 100, 71, &size) && !image_fit(100, 100, -70, &size), "budgets");
    CHECK(!image_fit(0, 100, 70, &size) && !image_fit(100, -1, 70, &size), "no pixels");
    for (unsigned i = 0; i < 5000; i++) {
        const int w = 1 + (int)(mixed(i, 0) >> (12 + i % 20)), h = 1 + (int)(mixed(i, 1) >> (12 + i / 20 % 20));
        const int b = budgets[i % 5];
        const bool ok = image_fit(w, h, b, &size) && image_fit(h, w, b, &mirrored);
        CHECK(ok && size.w >= 48 && size.h >= 48 && size.w % 48 == 0 && size.h % 48 == 0 && size.tokens <= b &&
              size.tokens == size.w / 48 * (size.h / 48), "%d x %d, budget %d: %d x %d", w, h, b, size.w, size.h);
        CHECK(size.w == mirrored.h && size.h == mirrored.w, "%d x %d: the mirrored size differs", w, h);
    }
}

static void test_patches(void) {                       // 48 x 48, as the 12B cuts them
    enum { W = 96, H = 144, SIDE = 48 };
    Image image = picture("noise", W, H);
    float *out = malloc(3 * W * H * sizeof *out);
    int wrong = 0;
    image_patches(image.rgb, W, SIDE, 0, 4, out);
    image_patches(image.rgb, W, SIDE, 4, 2, out + 4 * SIDE * SIDE * 3);
    for (int y = 0; y < H; y++)
        for (int x = 0; x < W; x++)
            for (int c = 0; c < 3; c++) {
                const int patch = y / SIDE * (W / SIDE) + x / SIDE, at = (y % SIDE * SIDE + x % SIDE) * 3 + c;
                wrong += out[patch * SIDE * SIDE * 3 + at] != (float)formula("noise", W, H, x, y, c) * (1.0f / 255.0f);
            }
    CHECK(wrong == 0, "patches of 48 x 48: %d values are wrong", wrong);
    free(out);
    image_free(&image);
}

static void test_resize(void) {                        // extreme shapes
    static const int shapes[][4] = { { 1, 1, 48, 48 }, { 1, 3000, 48, 96 }, { 3000, 1, 96, 48 }, { 2, 100000, 48, 48 },
                                     { 50, 50, 50, 50 }, { 49, 50, 49, 48 }, { 50, 49, 48, 49 } };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const int *s = shapes[i];
        Image image = { s[0], s[1], malloc(3 * (size_t)s[0] * (size_t)s[1]) };
        uint8_t *out = malloc(3 * (size_t)s[2] * (size_t)s[3]);
        int wrong = 0;
        for (size_t k = 0; k < 3 * (size_t)s[0] * (size_t)s[1]; k++) image.rgb[k] = (uint8_t)(100 + 50 * (k % 3));
        image_resize(&image, s[2], s[3], false, out);
        for (int k = 0; k < 3 * s[2] * s[3]; k++) wrong += out[k] != 100 + 50 * (k % 3);
        CHECK(wrong == 0, "one colour, %d x %d to %d x %d: %d levels are wrong", s[0], s[1], s[2], s[3], wrong);
        free(out);
        image_free(&image);
    }
    Image image = picture("noise", 70, 50);            // the same size: the same bytes
    uint8_t *out = malloc(3 * 70 * 50);
    image_resize(&image, 70, 50, false, out);
    CHECK(!memcmp(out, image.rgb, 3 * 70 * 50), "a picture of the right size changes");
    free(out);
    image_free(&image);
}

// ---- formats ----

static bool png_here, jpeg_here, webp_here;
static Bytes file;

static void test_png(void) {
    static const struct { int type, depths[5]; } kinds[] = {
        { 0, { 1, 2, 4, 8, 16 } }, { 2, { 8, 16 } }, { 3, { 1, 2, 4, 8 } }, { 4, { 8, 16 } }, { 6, { 8, 16 } },
    };
    static const int sizes[][2] = { { 1, 1 }, { 5, 3 }, { 33, 17 }, { 200, 40 } };
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
        for (int d = 0; d < 5 && kinds[k].depths[d]; d++)
            for (unsigned i = 0; i < 16; i++) {
                const PngForm f = { sizes[i % 4][0], sizes[i % 4][1], kinds[k].type, kinds[k].depths[d], i & 4, i & 8, 0, i };
                Image want = { f.w, f.h, malloc(3 * (size_t)f.w * (size_t)f.h) };
                for (int p = 0; p < 3 * f.w * f.h; p++) want.rgb[p] = png_level(&f, p / 3 % f.w, p / 3 / f.w, p % 3);
                put_png(&f, &file);
                if (can_read(png_here, &file, "PNG", "libpng-dev"))
                    CHECK(difference(&file, &want) == 0, "PNG of type %d, %d bits, %d x %d%s%s: %d", f.type, f.depth, f.w, f.h,
                          f.interlaced ? ", interlaced" : "", f.transparent ? ", tRNS" : "", difference(&file, &want));
                image_free(&want);
            }
}

// Lines and columns; chunks before the pixels that are not read, whatever is in them; chunks that are not as they should be.
static void test_png_chunks(void) {
    static const char *const unread[] = { "iCCP", "zTXt", "iTXt", "tEXt", "gAMA", "tIME", "prIv" };
    for (unsigned i = 0; i < 8; i++) {
        const PngForm f = { i & 1 ? 1 : 150, i & 1 ? 150 : 1, 2, i & 2 ? 16 : 8, i & 4, false, 0, i };
        Image want = { f.w, f.h, malloc(3 * 150) };
        for (int p = 0; p < 3 * 150; p++) want.rgb[p] = png_level(&f, p / 3 % f.w, p / 3 / f.w, p % 3);
        put_png(&f, &file);
        CHECK(difference(&file, &want) == 0, "PNG of %d x %d, form %u: %s", f.w, f.h, i, err);
        image_free(&want);
    }
    const PngForm form = { 20, 20, 2, 8, false, false, 0, 1 };
    static Bytes whole, b;
    put_png(&form, &whole);
    Image want;
    CHECK(decode(whole.p, whole.n, &want), "PNG: %s", err);
    enum { HEAD = 33 };                                // the signature and IHDR
    for (size_t i = 0; i < sizeof unread / sizeof *unread; i++) {
        b.n = 0;
        put(&b, whole.p, HEAD), put_chunk(&b, unread[i], "x\0\0\170\332\1\2\3\4\5\6\7", 12), put(&b, whole.p + HEAD, whole.n - HEAD);
        CHECK(difference(&b, &want) == 0, "PNG with a damaged %s: %s", unread[i], err);
    }
    image_free(&want);
    for (int k = 0; k < 4; k++) {
        memcpy(&b, &whole, sizeof b);
        memcpy(b.p + HEAD, k == 0 ? "\377\377\377\377" : k == 1 ? "\0\0\0\5" : k == 2 ? "\0\0\0\0" : "\0\0\4\0", 4);   // the length of IDAT
        refuse(b.p, b.n, "a PNG whose chunk has another length", "PNG: ");
    }
    b.n = 0;
    put(&b, whole.p, HEAD), put(&b, whole.p + 8, whole.n - 8);
    refuse(b.p, b.n, "a PNG with two heads", "out of place");
    b.n = 0;
    put_ihdr(&b, 5, 5, 8, 3, false), put(&b, whole.p + HEAD, whole.n - HEAD);
    refuse(b.p, b.n, "a PNG without its palette", "PLTE");
    b.n = 0;
    put_ihdr(&b, 20, 21, 8, 2, false), put(&b, whole.p + HEAD, whole.n - HEAD);
    refuse(b.p, b.n, "a PNG with too few rows", "Not enough");
}

#ifdef USE_JPEG
static void test_jpeg(void) {
    Image image = picture("smooth", 45, 37), grey = picture("smooth", 45, 37), got[4];
    for (int i = 0; i < 3 * 45 * 37; i++) grey.rgb[i] = grey.rgb[i / 3 * 3];
    for (int channels = 1; channels <= 4; channels++) {
        if (channels == 2) continue;
        for (int sampling = 1; sampling <= (channels == 3 ? 2 : 1); sampling++) {
            for (int i = 0; i < 4; i++) {                       // baseline, progressive, restart markers, both
                const JpegForm f = { channels, sampling, i & 1, i & 2, 0 };
                put_jpeg(&f, &image, &file);
                const int far = difference(&file, channels == 1 ? &grey : &image);
                CHECK(far <= (sampling == 2 ? 8 : 3), "JPEG, %d channels, sampling %d, form %d: off by %d levels: %s",
                      channels, sampling, i, far, err);
                CHECK(decode(file.p, file.n, &got[i]), "JPEG: %s", err);
                CHECK(!memcmp(got[0].rgb, got[i].rgb, 3 * 45 * 37), "JPEG: progressive or restarted differs from baseline");
            }
            for (int i = 0; i < 4; i++) image_free(&got[i]);
        }
    }
    image_free(&image);
    image_free(&grey);
    const uint8_t cmyk[12] = { 255, 0, 128, 255, 200, 100, 50, 128, 255, 77, 0, 0 };
    const uint8_t want[9] = { 255, 0, 128, 100, 50, 25, 0, 0, 0 };           // colour * black / 255
    uint8_t rgb[9];
    row_of_cmyk(rgb, cmyk, 3);
    CHECK(!memcmp(rgb, want, 9), "CMYK: %d %d %d %d %d %d", rgb[0], rgb[1], rgb[2], rgb[3], rgb[4], rgb[5]);
}

// A progressive file whose first scan comes again and again; each costs a pass over the picture.
static void test_scans(void) {
    Image image = picture("smooth", 16, 16);
    put_jpeg(&(JpegForm){ 3, 1, true, 0, 0 }, &image, &file);
    size_t first = 0;
    while (file.p[first] != 0xff || file.p[first + 1] != 0xda) first++;
    size_t end = first + 2;
    while (file.p[end] != 0xff || !file.p[end + 1]) end++;
    const size_t n = end - first;
    for (int repeats = 50; repeats <= 300; repeats += 250) {
        Bytes *many = malloc(sizeof *many);
        many->n = 0;
        put(many, file.p, end);
        for (int i = 0; i < repeats; i++) put(many, file.p + first, n);
        put(many, file.p + end, file.n - end);
        if (repeats > 100) refuse(many->p, many->n, "300 scans", "more than 200 scans");
        else CHECK(difference(many, &image) <= 3, "50 scans: %s", err);
        free(many);
    }
    image_free(&image);
}
#endif

#ifdef USE_WEBP
static void test_webp(void) {
    static const int sizes[][2] = { { 1, 1 }, { 16, 16 }, { 45, 37 } };
    for (int i = 0; i < 3; i++) {
        const int w = sizes[i][0], h = sizes[i][1];
        Image noise = picture("noise", w, h), smooth = picture("smooth", w, h);
        put_webp(&noise, true, 0, 0, 0, 0, 0, &file);
        CHECK(difference(&file, &noise) == 0, "WebP, lossless, %d x %d: %d levels off: %s", w, h, difference(&file, &noise), err);
        put_webp(&smooth, false, 0, 0, 0, 0, 0, &file);
        CHECK(difference(&file, &smooth) <= 8, "WebP, lossy, %d x %d: %d levels off: %s", w, h, difference(&file, &smooth), err);
        Image canvas = { w + 9, h + 8, calloc(3, (size_t)((w + 9) * (h + 8))) };
        for (int y = 0; y < h; y++) memcpy(canvas.rgb + 3 * ((y + 6) * canvas.w + 4), noise.rgb + 3 * y * w, 3 * (size_t)w);
        put_webp(&noise, true, 0, 4, 6, w + 9, h + 8, &file);
        CHECK(difference(&file, &canvas) == 0, "WebP, animated: %d levels off: %s", difference(&file, &canvas), err);
        put_webp(&noise, true, 0, 10, 6, w + 9, h + 8, &file);
        refuse(file.p, file.n, "a frame beyond the picture", "exceeds");
        image_free(&noise);
        image_free(&smooth);
        image_free(&canvas);
    }
}
#endif

// The letters of a picture of 3 x 2 cells after each orientation.
static void test_orientations(void) {
    static const char *const shown[9] = { "ABC DEF", "ABC DEF", "CBA FED", "FED CBA", "DEF ABC", "AD BE CF", "DA EB FC",
                                          "FC EB DA", "CF BE AD" };
    enum { CELL = 8 };                                 // pixels, so that JPEG keeps the colours
    Image stored = { 3 * CELL, 2 * CELL, malloc(3 * 3 * 2 * CELL * CELL) };
    for (int i = 0; i < 3 * 2 * CELL * CELL; i++)
        memset(stored.rgb + 3 * i, 30 + 40 * (i % (3 * CELL) / CELL + 3 * (i / (3 * CELL) / CELL)), 3);
    for (int o = 1; o <= 8; o++) {
        const int columns = o > 4 ? 2 : 3, rows = 5 - columns;
        Image want = { columns * CELL, rows * CELL, malloc(3 * 3 * 2 * CELL * CELL) };
        for (int i = 0; i < 3 * 2 * CELL * CELL; i++) {
            const int letter = shown[o][i / want.w / CELL * (columns + 1) + i % want.w / CELL];
            memset(want.rgb + 3 * i, 30 + 40 * (letter - 'A'), 3);
        }
#ifdef USE_JPEG
        put_jpeg(&(JpegForm){ 3, 1, false, 0, o }, &stored, &file);
        CHECK(difference(&file, &want) <= 2, "JPEG, orientation %d: %d levels off: %s", o, difference(&file, &want), err);
#endif
#ifdef USE_WEBP
        put_webp(&stored, true, o, 0, 0, 0, 0, &file);
        CHECK(difference(&file, &want) == 0, "WebP, orientation %d: %d levels off: %s", o, difference(&file, &want), err);
#endif
        image_free(&want);
        const PngForm plain = { 5, 3, 2, 8, false, false, 0, 1 }, turned = { 5, 3, 2, 8, false, false, o, 1 };
        Image before = { 0 }, after = { 0 };
        put_png(&plain, &file);
        if (!png_here || !CHECK(decode(file.p, file.n, &before), "PNG: %s", err)) continue;
        put_png(&turned, &file);
        CHECK(decode(file.p, file.n, &after), "PNG, orientation %d: %s", o, err);
        const int stored_at[9] = { 0, 0, 4, 14, 10, 0, 10, 14, 4 };          // the pixel that is shown first
        CHECK(after.w == (o > 4 ? 3 : 5) && !memcmp(after.rgb, before.rgb + 3 * stored_at[o], 3),
              "PNG, orientation %d: size or first pixel", o);
        image_free(&before);
        image_free(&after);
    }
    image_free(&stored);
    for (int o = 9; o < 600; o += 197) CHECK(exif_orientation(exif(o, true).p, exif(o, true).n) == 1, "orientation %d", o);
    const Bytes e = exif(6, false);
    for (size_t n = 0; n <= e.n; n++) {
        uint8_t *copy = malloc(n + 1);
        memcpy(copy, e.p, n);
        const int got = exif_orientation(copy, n);
        CHECK(got == (n >= 36 ? 6 : 1), "EXIF of %zu bytes: %d", n, got);
        free(copy);
    }
}

static void put_ppm(Bytes *b, const char *head, const void *pixels, size_t n) {
    b->n = 0;
    put(b, head, strlen(head)), put(b, pixels, n);
}

static void test_ppm(void) {
    static const struct { const char *head, *pixels; int n; const char *want; } good[] = {
        { "P6\n2 1\n255\n", "\1\2\3\375\376\377", 6, "\1\2\3\375\376\377" },
        { "P6 # a comment\n# 9 9\n2 # w\n1\r\n255 ", "\1\2\3\375\376\377", 6, "\1\2\3\375\376\377" },
        { "P6\t2 1 65535\n", "\1\377\2\377\3\0\375\0\376\1\377\377", 12, "\1\2\3\375\376\377" },
        { "P5\n2 1\n255\n", "\12\24", 2, "\12\12\12\24\24\24" },
        { "P5\n2 1\n65535\n", "\12\377\24\0", 4, "\12\12\12\24\24\24" },
        { "P5\n2 1\n1\n", "\0\1", 2, "\0\0\0\377\377\377" },
        { "P5\n2 1\n15\n", "\12\377", 2, "\252\252\252\377\377\377" },           // 10 of 15; too large is the largest
        { "P5\n2 1\n1000\n", "\0\0\1\364", 4, "\0\0\0\200\200\200" },
    };
    static const char *const bad[] = { "P6", "P6\n", "P6\n2 1\n", "P6\n2 1\n255", "P6 2 1 0\n", "P6 2 1 65536\n",
                                       "P6 -2 1 255\n", "P6 2 1 255x", "P6 2 1 1000000000000\n", "P6 2.5 1 255\n" };
    Image want = { 2, 1, NULL };
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        put_ppm(&file, good[i].head, good[i].pixels, (size_t)good[i].n);
        want.rgb = (uint8_t *)(uintptr_t)good[i].want;
        CHECK(difference(&file, &want) == 0, "PPM %zu: %s", i, err);
        refuse(file.p, file.n - 1, "a PPM without its last byte", "truncated");
    }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        put_ppm(&file, bad[i], "", 0);
        refuse(file.p, file.n, bad[i], file.n < 4 ? "bytes" : "damaged");
    }
}

// ---- files that are not good ----

static void test_refused(void) {
    static const struct { const char *bytes; int n; const char *name, *advice; } kinds[] = {
        { "GIF89a\1\0\1\0", 10, "GIF", "convert" }, { "BM\1\2\3\4", 6, "BMP", "convert" }, { "II*\0\10\0", 6, "TIFF", "convert" },
        { "MM\0*\0\0", 6, "TIFF", "convert" }, { "\0\0\0\030ftypheic", 12, "HEIC", "heif-convert" },
        { "\0\0\0\030ftypmif1", 12, "HEIC", "heif-convert" }, { "\0\0\0\034ftypavif", 12, "AVIF", "avifdec" },
        { "\377\012\1\2", 4, "JPEG XL", "djxl" }, { "\0\0\0\014jP  \r\n\207\n", 12, "JPEG 2000", "convert" },
        { "<svg xmlns=", 11, "SVG", "rsvg-convert" }, { "<?xml version", 13, "SVG", "rsvg-convert" },
        { "%PDF-1.7", 8, "PDF", "pdftoppm" }, { "<!DOCTYPE html>", 15, "HTML", "download" },
        { "hello", 5, "68 65 6c 6c", "expected a PNG" }, { "", 0, "0 bytes", "expected a PNG" },
        { "BM", 2, "2 bytes", "expected" },
    };
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        refuse(kinds[i].bytes, (size_t)kinds[i].n, kinds[i].name, kinds[i].name);
        CHECK(strstr(err, kinds[i].advice), "%s: expected '%s' in '%s'", kinds[i].name, kinds[i].advice, err);
    }
}

static void test_hostile(void) {
    static const uint32_t sizes[][2] = { { 0, 1 }, { 1, 0 }, { 1u << 31, 1 }, { 1, 1u << 31 }, { UINT32_MAX, UINT32_MAX },
                                         { INT32_MAX, INT32_MAX }, { 8001, 8000 }, { (1 << 20) + 1, 1 }, { 65535, 65535 } };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        char head[64], name[64];
        snprintf(name, sizeof name, "%u x %u", sizes[i][0], sizes[i][1]);
        snprintf(head, sizeof head, "P6 %u %u 255\n", sizes[i][0], sizes[i][1]);
        put_ppm(&file, head, "abcdef", 6);
        refuse(file.p, file.n, name, sizes[i][0] < 1000000000 && sizes[i][1] < 1000000000 ? "million pixels" : "PPM: ");
        file.n = 0;
        put_ihdr(&file, sizes[i][0], sizes[i][1], 8, 2, false);
        put_chunk(&file, "IDAT", "\170\001\3\0\0\0\0\1", 8), put_chunk(&file, "IEND", "", 0);
        if (can_read(png_here, &file, name, "libpng-dev")) refuse(file.p, file.n, name, "million pixels");
        file.n = 0;
        put(&file, "\377\330\377\300\0\021\10", 7), put_big(&file, sizes[i][1], 2), put_big(&file, sizes[i][0], 2);
        put(&file, "\3\1\021\0\2\021\1\3\021\1\377\332\0\014\3\1\0\2\021\3\021\0\077\0", 24);
        if (can_read(jpeg_here, &file, name, "libjpeg-dev")) refuse(file.p, file.n, name, "");
        file.n = 0;
        put(&file, "RIFF\026\0\0\0WEBPVP8X\12\0\0\0\0\0\0\0", 24);
        put_little(&file, sizes[i][0] - 1, 3), put_little(&file, sizes[i][1] - 1, 3);
        if (can_read(webp_here, &file, name, "libwebp-dev")) refuse(file.p, file.n, name, "");
    }
    file.n = 0;                                        // a bomb: many pixels, no data
    put_ihdr(&file, 8000, 7999, 16, 6, true);
    put_chunk(&file, "IDAT", "\170\001\3\0\0\0\0\1", 8), put_chunk(&file, "IEND", "", 0);
    if (png_here) refuse(file.p, file.n, "a PNG of 64 million pixels without data", "PNG: damaged");
}

// Files of all kinds, small enough to be cut at every byte. False: there is no such file.
static bool small_file(int which, Bytes *b, const char **name) {
    Image noise = picture("noise", 9, 5), smooth = picture("smooth", 17, 9);
    bool is = true;
    (void)noise, (void)smooth;
    switch (which) {
    case 0: *name = "ppm"; put_ppm(b, "P6 3 2 255\n", "abcdefghijklmnopqr", 18); break;
    case 1: *name = "pgm16"; put_ppm(b, "P5\n# 16 bits\n2 2\n65535\n", "abcdefgh", 8); break;
    case 2: *name = "png_palette"; put_png(&(PngForm){ 9, 5, 3, 4, true, true, 6, 1 }, b); break;
    case 3: *name = "png_rgba16"; put_png(&(PngForm){ 3, 2, 6, 16, false, false, 0, 2 }, b); break;
    case 4: *name = "png_grey1"; put_png(&(PngForm){ 11, 3, 0, 1, false, true, 0, 3 }, b); break;
#ifdef USE_JPEG
    case 5: *name = "jpeg"; put_jpeg(&(JpegForm){ 3, 2, false, 1, 6 }, &smooth, b); break;
    case 6: *name = "jpeg_progressive"; put_jpeg(&(JpegForm){ 3, 1, true, 0, 0 }, &smooth, b); break;
    case 7: *name = "jpeg_grey"; put_jpeg(&(JpegForm){ 1, 1, false, 0, 0 }, &smooth, b); break;
    case 8: *name = "jpeg_cmyk"; put_jpeg(&(JpegForm){ 4, 1, false, 0, 0 }, &smooth, b); break;
#endif
#ifdef USE_WEBP
    case 9: *name = "webp_lossless"; put_webp(&noise, true, 0, 0, 0, 0, 0, b); break;
    case 10: *name = "webp_exif"; put_webp(&noise, false, 8, 0, 0, 0, 0, b); break;
    case 11: *name = "webp_animated"; put_webp(&noise, true, 0, 2, 4, 12, 10, b); break;
#endif
    default: is = false;
    }
    image_free(&noise);
    image_free(&smooth);
    return is;
}

enum { SMALL_FILES = 12 };

static void test_cut(void) {
    const char *name;
    for (int i = 0; i < SMALL_FILES; i++) {
        Image out;
        if (!small_file(i, &file, &name)) continue;
        if (!decode(file.p, file.n, &out)) {
            CHECK(strstr(err, "make again"), "%s: %s", name, err);
            continue;
        }
        image_free(&out);
        int decoded = 0;
        for (size_t n = 0; n < file.n; n++) {
            decoded += decode(file.p, n, &out);
            image_free(&out);
        }
        CHECK(decoded == 0, "%s of %zu bytes: decoded when cut at %d places", name, file.n, decoded);
        for (unsigned k = 0; k < 300; k++) {           // damaged: whatever comes, no crash, and image_dims() agrees
            static Bytes damaged;
            damaged.n = file.n;
            memcpy(damaged.p, file.p, file.n);
            for (unsigned m = 0; m <= k % 3; m++) damaged.p[mixed(k, m) % file.n] = (uint8_t)mixed(k, m + 3);
            decode(damaged.p, damaged.n, &out);
            image_free(&out);
        }
    }
}

static int write_seeds(const char *folder) {
    const char *name;
    for (int i = 0; i < SMALL_FILES; i++) {
        char path[512];
        if (!small_file(i, &file, &name)) continue;
        snprintf(path, sizeof path, "%s/%s", folder, name);
        FILE *f = fopen(path, "wb");
        if (!f || fwrite(file.p, 1, file.n, f) != file.n || fclose(f)) return 1;
    }
    return 0;
}

int main(int argc, char **argv) {
    if (argc == 3 && !strcmp(argv[1], "-seeds")) return write_seeds(argv[2]);
#ifdef USE_PNG
    png_here = true;
#endif
    start_threads(2);
    test_golden();
    test_sizes();
    test_patches();
    test_resize();
    test_ppm();
    test_refused();
    test_png();
    if (png_here) test_png_chunks();
#ifdef USE_JPEG
    jpeg_here = true;
    test_jpeg();
    test_scans();
#endif
#ifdef USE_WEBP
    webp_here = true;
    test_webp();
#endif
    test_orientations();
    test_hostile();
    test_cut();
    return test_done("image");
}
