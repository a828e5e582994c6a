/* files.h - files for tests: a temporary directory, programs to run, models of make_gguf, and a rewriter of GGUF files.
 *
 * Include after gemma4.c and test.h. main() calls make_tmp() first; the directory is removed at the end.
 * Environment: BUILD (build: where make put make_gguf), CC (used if it is not there), TMPDIR (/tmp). */
#ifndef FILES_H
#define FILES_H
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static char tmp[512];                                  // the temporary directory, removed at exit
static pid_t main_pid;

static int remove_entry(const char *path, const struct stat *st, int kind, struct FTW *at) {
    (void)st, (void)kind, (void)at;
    return remove(path);
}
static void remove_tree(const char *path) { nftw(path, remove_entry, 16, FTW_DEPTH | FTW_PHYS); }
static void remove_tmp(void) {                         // also if gemma4.c ends the process; not in a child process
    if (getpid() == main_pid) remove_tree(tmp);
}

// The path of a file in the temporary directory, in one of a few static buffers that are used in rotation.
__attribute__((format(printf, 1, 2))) static const char *in_tmp(const char *fmt, ...) {
    static char path[8][1024];
    static int turn;
    char *p = path[turn = (turn + 1) % 8];
    const int n = snprintf(p, 600, "%s/", tmp);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(p + n, 1024 - (size_t)n, fmt, ap);
    va_end(ap);
    return p;
}

static const char *kept(const char *path) {            // a copy of a path that stays valid
    static char paths[32][1024];
    static int n;
    snprintf(paths[n %= 32], sizeof *paths, "%s", path);
    return paths[n++];
}

static void *must(void *p) {
    if (!p) {
        printf("out of memory, or a file that cannot be opened: %s\n", strerror(errno));
        exit(1);
    }
    return p;
}

// Makes the temporary directory.
static void make_tmp(void) {
    const char *base = getenv("TMPDIR") && *getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp";
    snprintf(tmp, sizeof tmp, "%.400s/gemma4-test-XXXXXX", base);
    must(mkdtemp(tmp));
    main_pid = getpid();
    atexit(remove_tmp);
}

// Runs a program with its output in files (NULL: inherited). Returns the exit status, or 1000 + the signal that killed
// it.
static int run_program(const char *const argv[], const char *out, const char *err) {
    fflush(stdout);
    const pid_t child = fork();
    if (!child) {
        const char *path[2] = { out, err };
        for (int i = 0; i < 2; i++) {
            const int fd = path[i] ? open(path[i], O_WRONLY | O_CREAT | O_TRUNC, 0600) : -1;
            if (path[i] && (fd < 0 || dup2(fd, i + 1) < 0)) _exit(126);
        }
        execvp(argv[0], (char *const *)(uintptr_t)argv);
        _exit(127);
    }
    int status = -1;
    while (child > 0 && waitpid(child, &status, 0) < 0 && errno == EINTR) {}
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

static char *text_of(const char *path) {               // the file's bytes and a NUL
    FILE *f = must(fopen(path, "rb"));
    size_t n = 0, got;
    char *s = NULL;
    do {
        s = must(realloc(s, n + 65536 + 1));
        n += got = fread(s + n, 1, 65536, f);
    } while (got);
    fclose(f);
    s[n] = 0;
    return s;
}

// Writes a model to NAME.gguf in the temporary directory. Further arguments go to make_gguf; NULL ends them.
static const char *make_model(const char *name, const char *preset, const char *quant, ...) {
    static char program[1024];
    if (!program[0]) {
        snprintf(program, sizeof program, "%s/make_gguf", getenv("BUILD") ? getenv("BUILD") : "build");
        if (access(program, X_OK)) {
            snprintf(program, sizeof program, "%s", in_tmp("make_gguf"));
            const char *cc[] = { getenv("CC") ? getenv("CC") : "cc", "-std=c11", "-O2", "tests/make_gguf.c", "-o",
                                 program, "-lm", NULL };
            CHECK(run_program(cc, NULL, NULL) == 0, "tests/make_gguf.c does not compile");
        }
    }
    const char *path = in_tmp("%s.gguf", name);
    const char *argv[20] = { program, "--preset", preset, "--quant", quant, "--seed", "11", "--separate-pools", "--out",
                             path };
    va_list ap;
    va_start(ap, quant);
    for (int n = 10; n < 19 && (argv[n] = va_arg(ap, const char *)) != NULL; n++) {}
    va_end(ap);
    const int status = run_program(argv, in_tmp("stdout"), NULL);
    CHECK(status == 0, "make_gguf for %s: exit status %d", path, status);
    return path;
}

// ---- editing a GGUF file -------------------------------------------------------------------------------------------
// Keys as raw bytes, tensors as names, shapes and copies of their data: enough to write the file again with changes.

typedef struct { uint8_t *data; size_t n, cap; } Bytes;

static void put(Bytes *b, const void *data, size_t n) {
    if (b->n + n > b->cap) b->data = must(realloc(b->data, b->cap = (b->n + n) * 2));
    if (n) memcpy(b->data + b->n, data, n);
    b->n += n;
}
static void put_u32(Bytes *b, uint32_t v) { put(b, &v, 4); }
static void put_u64(Bytes *b, uint64_t v) { put(b, &v, 8); }
static void put_text(Bytes *b, const char *s) {
    put_u64(b, strlen(s));
    put(b, s, strlen(s));
}
static void put_padding(Bytes *b, size_t to) {
    static const uint8_t zeros[65536];
    put(b, zeros, (to - b->n % to) % to);
}

typedef struct {
    char  name[128];
    Bytes value;              // type and value as in the file
} DraftKey;

typedef struct {
    char     name[64];        // "": not written
    int      type, n_dims;
    uint64_t ne[4];
    Bytes    data;
} DraftTensor;

typedef struct {
    DraftKey    *keys;
    DraftTensor *tensors;
    size_t       n_keys, n_tensors, alignment;
} Draft;

static Draft read_draft(const char *path) {
    Gguf g;
    Draft d = { 0 };
    if (gguf_open(&g, path) < 0) die("%s: %s", path, g.err);
    d.alignment = g.alignment;
    d.keys = must(calloc(g.n_kvs + 8, sizeof *d.keys));                // room for added keys
    d.tensors = must(calloc(3 * g.n_tensors + 8, sizeof *d.tensors));  // room for two more per tensor
    for (; d.n_keys < g.n_kvs; d.n_keys++) {                           // an entry ends where the next one starts
        const GgufStr key = g.kvs[d.n_keys].key, next = d.n_keys + 1 < g.n_kvs ? g.kvs[d.n_keys + 1].key
            : g.tensors[0].name;
        snprintf(d.keys[d.n_keys].name, sizeof d.keys->name, "%.*s", (int)key.n, key.s);
        put(&d.keys[d.n_keys].value, key.s + key.n, (size_t)(next.s - 8 - (key.s + key.n)));
    }
    for (; d.n_tensors < g.n_tensors; d.n_tensors++) {
        const GgufTensor *from = &g.tensors[d.n_tensors];
        DraftTensor *t = &d.tensors[d.n_tensors];
        snprintf(t->name, sizeof t->name, "%.*s", (int)from->name.n, from->name.s);
        t->type = from->type;
        t->n_dims = from->n_dims;
        memcpy(t->ne, from->ne, sizeof t->ne);
        put(&t->data, from->data, (size_t)from->size);
    }
    gguf_close(&g);
    return d;
}

static void free_draft(Draft *d) {
    for (size_t i = 0; i < d->n_keys; i++) free(d->keys[i].value.data);
    for (size_t i = 0; i < d->n_tensors; i++) free(d->tensors[i].data.data);
    free(d->keys);
    free(d->tensors);
}

// Writes the file and frees the draft. A tensor's data is truncated or padded with zeros to the size of its shape and
// type.
static const char *write_draft(Draft *d, const char *path) {
    Bytes b = { 0 };
    uint64_t n_keys = 0, n_tensors = 0, offset = 0;
    for (size_t i = 0; i < d->n_keys; i++) n_keys += d->keys[i].name[0] != 0;
    for (size_t i = 0; i < d->n_tensors; i++) n_tensors += d->tensors[i].name[0] != 0;
    put(&b, "GGUF", 4);
    put_u32(&b, 3);
    put_u64(&b, n_tensors);
    put_u64(&b, n_keys);
    for (size_t i = 0; i < d->n_keys; i++) {
        if (!d->keys[i].name[0]) continue;
        put_text(&b, d->keys[i].name);
        put(&b, d->keys[i].value.data, d->keys[i].value.n);
    }
    for (size_t i = 0; i < d->n_tensors; i++) {
        DraftTensor *t = &d->tensors[i];
        if (!t->name[0]) continue;
        const size_t size = gguf_row_size(t->type, (size_t)t->ne[0]) * (size_t)(t->ne[1] * t->ne[2] * t->ne[3]);
        static const uint8_t zeros[4096];
        while (t->data.n < size)
            put(&t->data, zeros, size - t->data.n < sizeof zeros ? size - t->data.n : sizeof zeros);
        t->data.n = size;
        put_text(&b, t->name);
        put_u32(&b, (uint32_t)t->n_dims);
        for (int k = 0; k < t->n_dims; k++) put_u64(&b, t->ne[k]);
        put_u32(&b, (uint32_t)t->type);
        put_u64(&b, offset);
        offset += round_up(size, d->alignment);
    }
    for (size_t i = 0; i < d->n_tensors; i++) {
        if (!d->tensors[i].name[0]) continue;
        put_padding(&b, d->alignment);
        put(&b, d->tensors[i].data.data, d->tensors[i].data.n);
    }
    put_padding(&b, d->alignment);
    FILE *f = must(fopen(path, "wb"));
    const bool ok = fwrite(b.data, 1, b.n, f) == b.n;
    CHECK(!fclose(f) && ok, "%s: %s", path, strerror(errno));
    free(b.data);
    free_draft(d);
    return path;
}

static DraftKey *draft_key(Draft *d, const char *name) {               // adds the key if there is none
    for (size_t i = 0; i < d->n_keys; i++)
        if (!strcmp(d->keys[i].name, name)) return &d->keys[i];
    DraftKey *k = &d->keys[d->n_keys++];
    snprintf(k->name, sizeof k->name, "%s", name);
    return k;
}

static DraftTensor *draft_tensor(Draft *d, const char *name) {         // NULL: no such tensor
    for (size_t i = 0; i < d->n_tensors; i++)
        if (!strcmp(d->tensors[i].name, name)) return &d->tensors[i];
    return NULL;
}

static DraftTensor *draft_add(Draft *d, const char *name, uint64_t n) {            // n zeros
    DraftTensor *t = &d->tensors[d->n_tensors++];
    *t = (DraftTensor){ .type = GGUF_F32, .n_dims = 1, .ne = { n, 1, 1, 1 } };
    snprintf(t->name, sizeof t->name, "%s", name);
    return t;
}

// Sets a key to a u16.
static void draft_u16(Draft *d, const char *name, unsigned v) {
    Bytes *b = &draft_key(d, name)->value;
    b->n = 0;
    put_u32(b, GGUF_V_U16);
    put(b, &(uint16_t){ (uint16_t)v }, 2);
}

// Sets all values of a tensor of floats to v.
static void fill(DraftTensor *t, float v) {
    t->data.n = 0;
    for (uint64_t i = 0; i < t->ne[0] * t->ne[1]; i++) put(&t->data, &v, sizeof v);
}
#endif
