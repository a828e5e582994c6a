/* image.h - pictures: patches.
 *
 * Uses base.h. Begin with image_patches(). */
#ifndef IMAGE_H
#define IMAGE_H

// Cuts a picture of w x h pixels, multiples of side, into patches: rgb (h, w, 3), out (h / side * w / side,
// side * side * 3), patches row by row, in a patch the order y, x, channel, values 0 to 1.
static inline void image_patches(const uint8_t *rgb, int w, int h, int side, float *out) {
    const size_t width = 3 * (size_t)w, length = 3 * (size_t)side;
    for (int py = 0; py < h; py += side)
        for (size_t at = 0; at < width; at += length)
            for (int y = py; y < py + side; y++) {
                const uint8_t *from = rgb + (size_t)y * width + at;
                for (size_t i = 0; i < length; i++) *out++ = (float)from[i] * (float)(1.0 / 255);
            }
}

#endif
