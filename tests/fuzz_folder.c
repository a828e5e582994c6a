/* fuzz_folder.c - a Hugging Face folder as it comes from the network: config.json, tokenizer.json, tokenizer_config.json and
 * generation_config.json, separated by a byte 0, next to a small safetensors file. It becomes a model in memory, which has a
 * tokenizer and a configuration in their ranges, or is refused with one line. tests/seeds/folder has small examples.
 *
 * die() jumps back into the target, which then frees what the input has allocated. */
#define _GNU_SOURCE
#define TESTING
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>
static void *map_file(void *at, size_t n, int access, int flags, int fd, off_t from);
static int unmap_file(void *at, size_t n);
#define GGUF_IMPLEMENTATION
#define mmap map_file
#define munmap unmap_file
static FILE *notes;           // in place of stderr, whose lines nobody reads
#undef stderr
#define stderr notes
#define die turn_down
#include "../gemma4.c"
#undef die
#undef mmap
#undef munmap
#undef stderr
#define stderr stderr
#include "fuzz.h"
#ifdef FUZZER
#include <sanitizer/allocator_interface.h>
#endif

static jmp_buf refused;

void turn_down(const char *fmt, ...) {
    char line[4096];
    va_list ap;
    va_start(ap, fmt);
    const int n = vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    NEED(n > 0 && n < (int)sizeof line);
    longjmp(refused, 1);
}

// ---- what an input has allocated -----------------------------------------------------------------------------------

enum { HELD = 1 << 16, MAPS = 16 };
static struct { void *at; size_t n; } maps[MAPS];
static const void *held[HELD];         // by address; NULL: free
static bool counting;

static size_t place_of(const void *p) {
    size_t at = (uintptr_t)p / 16 % HELD;
    while (held[at] && held[at] != p) at = (at + 1) % HELD;
    return at;
}

#ifdef FUZZER
static void hold(const volatile void *p, size_t n) {
    (void)n;
    if (counting && p) held[place_of((const void *)(uintptr_t)p)] = (const void *)(uintptr_t)p;
}

static void release(const volatile void *p) {
    size_t at = p ? place_of((const void *)(uintptr_t)p) : 0;
    if (!p || !held[at]) return;
    for (held[at] = NULL; held[at = (at + 1) % HELD]; ) {            // those after it may belong into this place
        const void *other = held[at];
        held[at] = NULL;
        held[place_of(other)] = other;
    }
}
#endif

static void *map_file(void *at, size_t n, int access, int flags, int fd, off_t from) {
    void *p = mmap(at, n, access, flags, fd, from);
    int i = 0;
    while (maps[i].at) NEED(++i < MAPS);
    if (p != MAP_FAILED) maps[i].at = p, maps[i].n = n;
    return p;
}

static int unmap_file(void *at, size_t n) {
    for (int i = 0; i < MAPS; i++) if (maps[i].at == at) maps[i].at = NULL;
    return munmap(at, n);
}

static void free_all(int first_fd) {
    counting = false;
    for (int i = 0; i < MAPS; i++) if (maps[i].at) unmap_file(maps[i].at, maps[i].n);
    for (size_t i = 0; i < HELD; i++)
        while (held[i]) free((void *)(uintptr_t)held[i]);
    for (int fd = first_fd; fd < first_fd + 8; fd++) close(fd);
}

// ---- the folder -----------------------------------------------------------------------------------------------------

static char folder[] = "/tmp/fuzz_folder.XXXXXX";
static const char *const names[] = { "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
                                     "model.safetensors" };

static void put_file(int i, const void *s, size_t n) {
    char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, names[i]);
    FILE *f = fopen(path, "wb");
    NEED(f && fwrite(s, 1, n, f) == n && fclose(f) == 0);
}

static void remove_folder(void) {
    for (int i = 0; i < 5; i++) {
        char path[128];
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        unlink(path);
    }
    rmdir(folder);
}

// A model of one layer, in BF16 zeros. The shapes are those of tests/seeds/folder/whole.
static void put_tensors(void) {
    static const struct { const char *name; int rows, cols; } t[] = {
        { "embed_tokens", 64, 32 }, { "norm", 1, 32 }, { "layers.0.self_attn.q_proj", 64, 32 },
        { "layers.0.self_attn.k_proj", 32, 32 }, { "layers.0.self_attn.v_proj", 32, 32 },
        { "layers.0.self_attn.o_proj", 32, 64 }, { "layers.0.mlp.gate_proj", 64, 32 }, { "layers.0.mlp.up_proj", 64, 32 },
        { "layers.0.mlp.down_proj", 32, 64 }, { "layers.0.input_layernorm", 1, 32 } };
    static uint8_t file[1 << 16];
    char *head = (char *)file + 8;
    size_t at = 0;
    int n = 0;
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        const size_t bytes = 2 * (size_t)t[i].rows * (size_t)t[i].cols;
        n += snprintf(head + n, 8192 - (size_t)n, "%c\"model.language_model.%s.weight\":{\"dtype\":\"BF16\",\"shape\":[",
                      i ? ',' : '{', t[i].name);
        if (t[i].rows > 1) n += snprintf(head + n, 8192 - (size_t)n, "%d,", t[i].rows);
        n += snprintf(head + n, 8192 - (size_t)n, "%d],\"data_offsets\":[%zu,%zu]}", t[i].cols, at, at + bytes);
        at += bytes;
    }
    head[n++] = '}';
    while (n % 8) head[n++] = ' ';
    memcpy(file, &(uint64_t){ (uint64_t)n }, 8);
    put_file(4, file, 8 + (size_t)n + at);
}

static void set_up(void) {
    NEED((notes = fopen("/dev/null", "w")) && mkdtemp(folder));
    put_tensors();
    atexit(remove_folder);
#ifdef FUZZER
    __sanitizer_install_malloc_and_free_hooks(hold, release);
#endif
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    static Gguf g;
    static Config c;
    static Tokenizer t;
    const uint8_t *volatile at = bytes, *const end = bytes + size;
    if (!notes) set_up();
    for (int i = 0; i < 4; i++) {
        const uint8_t *zero = at < end ? memchr(at, 0, (size_t)(end - at)) : NULL;
        put_file(i, at, (size_t)((zero ? zero : end) - at));
        at = zero ? zero + 1 : end;
    }
    const int first_fd = dup(0);
    close(first_fd);
    memset(&g, 0, sizeof g);
    memset(&t, 0, sizeof t);
    counting = true;
    if (!setjmp(refused)) {
        open_folder(&g, folder, false);
        if (!setjmp(refused)) {
            load_tokenizer(&t, &g, 64);
            NEED(t.n_tokens == 64);
        }
        if (!setjmp(refused)) {
            memset(&c, 0, sizeof c);
            load_config(&c, &g);
            NEED(c.n_layers >= 1 && c.n_layers <= MAX_LAYERS && c.dim >= 1 && c.n_swa >= 1);
        }
    }
    gguf_close(&g);
    free_all(first_fd);
    return 0;
}
