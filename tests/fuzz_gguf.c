/* fuzz_gguf.c - gguf_parse on arbitrary bytes; then the first and last byte of all that it accepted.
 *
 * With clang's -fsanitize=fuzzer,address define FUZZER. Without it, main() runs the same over the files it is given. */
#define _GNU_SOURCE
#define GGUF_IMPLEMENTATION
#include "gguf.h"

static volatile uint8_t sink;

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    Gguf g;
    int64_t v;
    if (gguf_parse(&g, bytes, size) < 0) {
        if (!g.err[0] || strpbrk(g.err, "\r\n")) abort();
        return 0;
    }
    for (size_t i = 0; i < g.n_kvs; i++) {
        const GgufKv *kv = &g.kvs[i];
        sink ^= (uint8_t)(kv->key.s[0] ^ kv->key.s[kv->key.n - 1]);
        for (size_t j = 0; kv->strs && j < kv->count; j++)
            if (kv->strs[j].n) sink ^= (uint8_t)(kv->strs[j].s[0] ^ kv->strs[j].s[kv->strs[j].n - 1]);
        if (kv->strs || kv->count == 0) continue;
        size_t elem = kv->elem_type == GGUF_V_STR ? 1 : gguf__values[kv->elem_type].bytes;
        sink ^= (uint8_t)(kv->data[0] ^ kv->data[kv->count * elem - 1]);
    }
    for (size_t i = 0; i < g.n_tensors; i++) {
        const GgufTensor *t = &g.tensors[i];
        sink ^= (uint8_t)(t->name.s[t->name.n - 1] ^ t->data[0] ^ t->data[t->size - 1]);
    }
    if (gguf_get_int(&g, "general.alignment", 8, 65536, &v) < 0) abort();      // what parsing accepted
    if (gguf_get_int(&g, "k", -1, 1, &v) < 0 && !g.err[0]) abort();
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
            fprintf(stderr, "fuzz_gguf: error: %s: cannot read\n", argv[i]);
            return 1;
        }
        fclose(f);
        LLVMFuzzerTestOneInput(bytes, (size_t)size);
        free(bytes);
    }
    printf("# fuzz_gguf: %d files\n", argc - 1);
    return 0;
}
#endif
