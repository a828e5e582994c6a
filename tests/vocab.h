/* vocab.h - vocabularies for tests: from a GGUF file, and the real one of Gemma 4, rebuilt in memory.
 *
 * The real vocabulary and its test vectors are in tests/golden as .gz files, which gzip unpacks; without gzip their
 * tests are skipped. Include after gguf.h, tokenizer.h and test.h. */
#ifndef VOCAB_H
#define VOCAB_H
#define VOCAB_NO_MAIN
#include "make_vocab.c"

#define REAL_VOCAB "tests/golden/gemma4-tokens.txt.gz"

static void *alloc(size_t n) {
    void *p = malloc(n ? n : 1);
    if (!p) {
        printf("out of memory\n");
        exit(1);
    }
    return p;
}

static uint32_t random_state = 1;
static uint32_t rnd(uint32_t n) {                      // 0..n-1
    random_state = random_state * 1664525u + 1013904223u;
    return (random_state >> 8) % n;
}

// Reads a whole stream; a 0 follows the bytes.
static char *read_stream(FILE *f, size_t *n) {
    size_t cap = 1 << 16;
    char *s = alloc(cap + 1);
    *n = 0;
    for (size_t got; (got = fread(s + *n, 1, cap - *n, f)) > 0; ) {
        *n += got;
        if (*n < cap) continue;
        s = realloc(s, (cap *= 2) + 1);
        if (!s) exit(1);
    }
    s[*n] = 0;
    return s;
}

static char *read_gz(const char *path, size_t *n) {    // NULL: cannot be read
    char command[512];
    snprintf(command, sizeof command, "gzip -dc %s", path);
    FILE *f = popen(command, "r");
    if (!f) return NULL;
    char *s = read_stream(f, n);
    if (pclose(f) == 0) return s;
    free(s);
    return NULL;
}

static bool has_gzip(void) { return system("gzip --version >/dev/null 2>&1") == 0; }

typedef struct {
    Gguf g;
    TokVocab v;
    uint8_t *bytes;           // a file in memory
} File;

static TokStr *copy_strs(Gguf *g, const char *key, int *n_out) {
    const GgufStr *s = NULL;
    size_t n = 0;
    if (gguf_get_strs(g, key, &s, &n) <= 0) n = 0;
    TokStr *copy = alloc(n * sizeof *copy);
    for (size_t i = 0; i < n; i++) copy[i] = (TokStr){ s[i].s, s[i].n };
    *n_out = (int)n;
    return copy;
}

static bool read_vocab(File *f, const char *path) {
    f->v.tokens = copy_strs(&f->g, "tokenizer.ggml.tokens", &f->v.n_tokens);
    f->v.merges = copy_strs(&f->g, "tokenizer.ggml.merges", &f->v.n_merges);
    size_t n = (size_t)f->v.n_tokens;
    int64_t *wide = alloc(n * sizeof *wide);
    int32_t *types = alloc(n * sizeof *types);
    bool ok = gguf_get_ints(&f->g, "tokenizer.ggml.token_type", 0, 100, wide, n) > 0;
    for (size_t i = 0; i < n; i++) types[i] = ok ? (int32_t)wide[i] : 1;
    free(wide);
    f->v.types = types;
    int64_t bos = -1, eos = -1, eot = -1;
    GgufStr chat = { NULL, 0 };
    gguf_get_int(&f->g, "tokenizer.ggml.bos_token_id", 0, INT32_MAX, &bos);
    gguf_get_int(&f->g, "tokenizer.ggml.eos_token_id", 0, INT32_MAX, &eos);
    gguf_get_int(&f->g, "tokenizer.ggml.eot_token_id", 0, INT32_MAX, &eot);
    gguf_get_str(&f->g, "tokenizer.chat_template", &chat);
    f->v.bos = (int)bos;
    f->v.eos = (int)eos;
    f->v.eot = (int)eot;
    f->v.chat_template = (TokStr){ chat.s, chat.n };
    return CHECK(ok && n, "%s: %zu tokens with types", path, n);
}

static bool open_vocab(File *f, const char *path) {
    memset(f, 0, sizeof *f);
    return CHECK(gguf_open(&f->g, path) >= 0, "%s: %s", path, f->g.err) && read_vocab(f, path);
}

// Gemma 4's own vocabulary of 262144 tokens. Call has_gzip() first.
static bool open_real_vocab(File *f) {
    const char *why = "gzip cannot read it";
    size_t n = 0;
    memset(f, 0, sizeof *f);
    FILE *in = popen("gzip -dc " REAL_VOCAB, "r");
    if (in) {
        f->bytes = vocab_make(in, &n, &why);
        pclose(in);
    }
    return CHECK(f->bytes, "%s: %s", REAL_VOCAB, why) &&
           CHECK(gguf_parse(&f->g, f->bytes, n) >= 0, "%s: %s", REAL_VOCAB, f->g.err) && read_vocab(f, REAL_VOCAB);
}

static void close_vocab(File *f) {
    free((void *)(uintptr_t)f->v.tokens);
    free((void *)(uintptr_t)f->v.merges);
    free((void *)(uintptr_t)f->v.types);
    gguf_close(&f->g);
    free(f->bytes);
}

// ---- rows of JSON, one per line -------------------------------------------------------------------------------------

static bool next_row(char **at, GgufJson *row) {
    const char *err;
    size_t err_at;
    char *end = strchr(*at, '\n');
    if (!end) return false;
    const bool ok = gguf_json_parse(*at, (size_t)(end - *at), row, &err_at, &err) == 0;
    CHECK(ok, "a row of JSON: byte %zu: expected %s", ok ? 0 : err_at, ok ? "" : err);
    *at = end + 1;
    return ok;
}

static GgufJson field(const GgufJson *row, const char *name) {
    GgufJson v;
    return gguf_json_get(row, name, &v) ? v : (GgufJson){ GGUF_J_NULL, "null", 4 };
}

static TokStr json_text(const GgufJson *v) {           // a string's decoded characters, for free_str()
    char *s = alloc(v->n + 1);
    const size_t n = v->type == GGUF_J_STRING ? gguf_json_string(v, s) : 0;
    s[n] = 0;
    return (TokStr){ s, n };
}

static TokStr text_field(const GgufJson *row, const char *name) {
    const GgufJson v = field(row, name);
    return json_text(&v);
}

static void free_str(TokStr s) { free((void *)(uintptr_t)s.s); }
static bool same_text(TokStr a, TokStr b) { return a.n == b.n && (a.n == 0 || memcmp(a.s, b.s, a.n) == 0); }
static TokStr str(const char *s) { return (TokStr){ s, s ? strlen(s) : 0 }; }

// ---- ids ------------------------------------------------------------------------------------------------------------

static void append(TokIds *out, int32_t id) {
    if (out->n == out->cap) {
        out->cap = out->cap * 2 + 64;
        out->ids = realloc(out->ids, out->cap * sizeof *out->ids);
        if (!out->ids) exit(1);
    }
    out->ids[out->n++] = id;
}

static TokIds ids_field(const GgufJson *row, const char *name) {
    GgufJson rest = field(row, name), v;
    TokIds ids = { 0 };
    int64_t id = 0;
    while (rest.type == GGUF_J_ARRAY && gguf_json_next(&rest, NULL, &v))
        if (CHECK(gguf_json_int(&v, 0, INT32_MAX, &id), "a row's %s: no id", name)) append(&ids, (int32_t)id);
    return ids;
}

static bool same_ids(TokIds a, TokIds b) { return a.n == b.n && (a.n == 0 || memcmp(a.ids, b.ids, a.n * 4) == 0); }

static void print_ids(const char *what, TokIds v) {
    printf("    %s (%zu):", what, v.n);
    for (size_t i = 0; i < v.n && i < 40; i++) printf(" %d", v.ids[i]);
    printf("\n");
}
#endif
