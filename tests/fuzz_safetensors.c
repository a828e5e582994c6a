/* fuzz_safetensors.c - gguf_parse_safetensors on arbitrary bytes; then the first and last byte of all that it accepted.
 *
 * With clang's -fsanitize=fuzzer,address define FUZZER. Without it, main() runs the same over the files it is given.
 * Seeds: tests/seeds/safetensors. */
#define _GNU_SOURCE
#define GGUF_IMPLEMENTATION
#include "gguf.h"

static volatile uint8_t sink;

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

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
    if (sum > size) abort();                            // no byte belongs to two tensors
    gguf_close(&g);
    return 0;
}

#ifndef FUZZER
int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        FILE *f = fopen(argv[i], "rb");
        long size = -1;
        if (f && fseek(f, 0, SEEK_END) == 0) size = ftell(f);
        uint8_t *bytes = size >= 0 ? malloc((size_t)size + !size) : NULL;
        if (!bytes || fseek(f, 0, SEEK_SET) != 0 || fread(bytes, 1, (size_t)size, f) != (size_t)size) {
            fprintf(stderr, "fuzz_safetensors: error: %s: cannot read\n", argv[i]);
            return 1;
        }
        fclose(f);
        LLVMFuzzerTestOneInput(bytes, (size_t)size);
        free(bytes);
    }
    printf("# fuzz_safetensors: %d files\n", argc - 1);
    return 0;
}
#endif
