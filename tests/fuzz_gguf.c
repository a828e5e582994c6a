/* fuzz_gguf.c - gguf_parse on arbitrary bytes; then reads the first and last byte of everything it accepted and checks
 * all blocks.
 *
 * An input that starts with "SPLT" and a little-endian u32 n is a split model instead: n bytes of its first part, then
 * the second, which are written to files and opened. tests/seeds/gguf has a small example of each. With clang's
 * -fsanitize=fuzzer,address define FUZZER. Without it, main() runs the target on its file arguments. */
#define _GNU_SOURCE
#include "fuzz.h"
#include <unistd.h>

static volatile uint8_t sink;

static void use(Gguf *g) {                             // reads everything that was accepted, then closes
    int64_t v;
    for (size_t i = 0; i < g->n_kvs; i++) {
        const GgufKv *kv = &g->kvs[i];
        sink ^= (uint8_t)(kv->key.s[0] ^ kv->key.s[kv->key.n - 1]);
        for (size_t j = 0; kv->strs && j < kv->count; j++)
            if (kv->strs[j].n) sink ^= (uint8_t)(kv->strs[j].s[0] ^ kv->strs[j].s[kv->strs[j].n - 1]);
        if (kv->strs || kv->count == 0) continue;
        const size_t elem = kv->elem_type == GGUF_V_STR ? 1 : gguf_value_bytes(kv->elem_type);
        sink ^= (uint8_t)(kv->data[0] ^ kv->data[kv->count * elem - 1]);
    }
    for (size_t i = 0; i < g->n_tensors; i++) {
        const GgufTensor *t = &g->tensors[i];
        size_t n = (size_t)t->size / (size_t)gguf_block_bytes(t->type);
        sink ^= (uint8_t)(t->name.s[t->name.n - 1] ^ t->data[0] ^ t->data[t->size - 1]);
        if (gguf_find_bad_block(t->type, t->data, n) > n) abort();
    }
    if (gguf_get_int(g, "general.alignment", 8, 65536, &v) < 0) abort();       // parsing has accepted it
    if (gguf_get_int(g, "k", -1, 1, &v) < 0 && !g->err[0]) abort();
    gguf_close(g);
}

static void check_error(const Gguf *g) {
    if (!g->err[0] || strpbrk(g->err, "\r\n") || strlen(g->err) + 1 >= sizeof g->err || g->n_tensors || g->n_maps)
        abort();
}

static void split(const uint8_t *bytes, size_t size) {
    static char dir[] = "/tmp/fuzz_gguf.XXXXXX", path[2][64];
    static int made;
    uint32_t n;
    if (!made && !mkdtemp(dir)) abort();
    made = 1;
    memcpy(&n, bytes, 4);
    bytes += 4;
    size -= 4;
    if (n > size) n = (uint32_t)size;
    for (int i = 0; i < 2; i++) {
        snprintf(path[i], sizeof path[i], "%s/m-%05d-of-00002.gguf", dir, i + 1);
        FILE *f = fopen(path[i], "wb");
        if (!f || fwrite(i ? bytes + n : bytes, 1, i ? size - n : n, f) != (i ? size - n : n) || fclose(f)) abort();
    }
    Gguf g;
    if (gguf_open(&g, path[0]) < 0) check_error(&g);
    else use(&g);
    for (int i = 0; i < 2; i++) unlink(path[i]);
    if (rmdir(dir) == 0) {                             // each input makes a new directory
        memcpy(dir + sizeof dir - 7, "XXXXXX", 6);
        made = 0;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    Gguf g;
    if (size >= 8 && memcmp(bytes, "SPLT", 4) == 0) split(bytes + 4, size - 4);
    else if (gguf_parse(&g, bytes, size) < 0) check_error(&g);
    else use(&g);
    return 0;
}
