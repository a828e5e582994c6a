/* fuzz_safetensors.c - gguf_parse_safetensors on arbitrary bytes; then reads the first and last byte of all tensors.
 *
 * With clang's -fsanitize=fuzzer,address define FUZZER. Without it, main() runs the target on its file arguments.
 * Seeds: tests/seeds/safetensors. */
#define _GNU_SOURCE
#include "fuzz.h"

static volatile uint8_t sink;

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    Gguf g;
    if (gguf_parse_safetensors(&g, bytes, size) < 0) {
        if (!g.err[0] || strpbrk(g.err, "\r\n") || g.n_tensors) abort();
        return 0;
    }
    uint64_t sum = 0;
    for (size_t i = 0; i < g.n_tensors; i++) {
        const GgufTensor *t = &g.tensors[i];
        char name[256];
        sum += t->size;
        if (t->size) sink ^= (uint8_t)(t->data[0] ^ t->data[t->size - 1]);
        const uint64_t n = t->ne[0] * t->ne[1] * t->ne[2] * t->ne[3];
        if (t->type >= 0 && t->size != n * (uint64_t)gguf_block_bytes(t->type)) abort();
        snprintf(name, sizeof name, "%.*s", (int)t->name.n, t->name.s);
        if (gguf_find_tensor(&g, name) != t) abort();
    }
    if (sum > size) abort();                            // tensors must not overlap
    gguf_close(&g);
    return 0;
}
