/* fuzz_image.c - image_dims, image_decode and image_resize on arbitrary bytes: one line of error, or a picture of the size
 * that the header tells.
 *
 * With clang's -fsanitize=fuzzer,address define FUZZER. Without it, main() runs the target on its file arguments.
 * Seeds: tests/seeds/image, written by `test_image -seeds`. The libraries themselves are not instrumented. */
#define _GNU_SOURCE
#include "../parts/base.h"
#include "../parts/image.h"
#include "fuzz.h"

enum { DECODED_PIXELS = 1 << 18 };                     // larger pictures only take time

static volatile uint8_t sink;

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    char why[300] = "", err[300] = "";
    int w = 0, h = 0;
    ImageSize fit;
    Image image;
    start_threads(1);
    if (!image_dims(bytes, size, &w, &h, why, sizeof why)) {
        NEED(why[0] && !strpbrk(why, "\r\n"));
        NEED(!image_decode(bytes, size, &image, err, sizeof err) && !strcmp(why, err));
        return 0;
    }
    NEED(w > 0 && h > 0 && w <= MAX_SIDE && h <= MAX_SIDE && w <= MAX_PIXELS / h);
    NEED(image_fit(w, h, 1120, &fit) && fit.tokens > 0 && fit.tokens <= 1120);
    if (w > DECODED_PIXELS / h) return 0;
    if (!image_decode(bytes, size, &image, err, sizeof err)) {
        NEED(err[0] && !strpbrk(err, "\r\n") && !image.rgb);
        return 0;
    }
    NEED(image.w == w && image.h == h);
    uint8_t small[48 * 96 * 3];
    image_resize(&image, 48, 96, false, small);
    sink ^= small[sizeof small - 1];
    image_free(&image);
    return 0;
}
