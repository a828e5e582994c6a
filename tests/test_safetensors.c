/* test_safetensors.c - gguf.h: malformed and unusual safetensors files, sets of files, and the writer of a GGUF head.
 *
 * Run from the top of the repository. Headers are text, so a case is one line: the JSON, the bytes of data after it,
 * and the expected result. Files are parsed from a heap copy of their exact length: AddressSanitizer finds every read
 * past it. */
#define _GNU_SOURCE
#include <sys/stat.h>
#include <unistd.h>
#include "gguf.h"
#include "test.h"

static volatile uint8_t sink;

static void touch(const Gguf *g) {                  // reads the first and last byte of everything that was accepted
    for (size_t i = 0; i < g->n_tensors; i++) {
        const GgufTensor *t = &g->tensors[i];
        sink ^= (uint8_t)(t->name.s[0] ^ t->name.s[t->name.n - 1]);
        if (t->size) sink ^= (uint8_t)(t->data[0] ^ t->data[t->size - 1]);
    }
}

// True: err is one printable line with the code, a byte position unless the whole file is meant, and the word.
static bool err_ok(const char *err, const char *code, const char *word) {
    const char *at = strstr(err, code);
    for (const char *p = err; *p; p++)
        if (*p < 0x20 || *p > 0x7e) return false;
    const char *after = at ? at + strlen(code) : "";
    return at && at > err && at[-1] == '(' && (!strcmp(after, ")") || !strncmp(after, " at byte ", 9)) && strstr(err, word);
}

// Length field `length` (-1: the correct one), then the header, then `data` bytes.
static int parse(Gguf *g, uint8_t **copy, const char *header, size_t n, int64_t length, size_t data) {
    const uint64_t field = length < 0 ? n : (uint64_t)length;
    *copy = malloc(8 + n + data);
    memcpy(*copy, &field, 8);
    memcpy(*copy + 8, header, n);
    memset(*copy + 8 + n, 0x11, data);
    return gguf_parse_safetensors(g, *copy, 8 + n + data);
}

#define T(dtype, shape, offsets) "{\"dtype\":\"" dtype "\",\"shape\":[" shape "],\"data_offsets\":[" offsets "]}"
#define A(dtype, shape, offsets) "{\"a\":" T(dtype, shape, offsets) "}"
#define TWO(first, second) "{\"a\":" T("F32", "2", first) ",\"b\":" T("F32", "2", second) "}"

static const struct { const char *what, *header; size_t data; const char *code, *word; } bad[] = {
    { "empty header", "", 0, "E_JSON", "{" },
    { "not an object", "[]", 0, "E_JSON", "{" },
    { "space first", " {}", 0, "E_JSON", "{" },
    { "cut JSON", "{\"a\":{", 0, "E_JSON", "expected" },
    { "bytes after the JSON", "{} x", 0, "E_JSON", "nothing" },
    { "entry is a number", "{\"a\":1}", 0, "E_ST_FIELD", "'a'" },
    { "no dtype", "{\"a\":{\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "E_ST_FIELD", "dtype" },
    { "dtype is a number", "{\"a\":{\"dtype\":7,\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "E_ST_FIELD", "dtype" },
    { "no shape", "{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4, "E_ST_FIELD", "shape" },
    { "shape is null", "{\"a\":{\"dtype\":\"F32\",\"shape\":null,\"data_offsets\":[0,4]}}", 4, "E_ST_FIELD", "shape" },
    { "no offsets", "{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "E_ST_FIELD", "data_offsets" },
    { "one offset", A("F32", "1", "0"), 4, "E_ST_FIELD", "data_offsets" },
    { "three offsets", A("F32", "1", "0,4,4"), 4, "E_ST_FIELD", "data_offsets" },
    { "offset is text", A("F32", "1", "0,\"4\""), 4, "E_ST_FIELD", "data_offsets" },
    { "offset is negative", A("F32", "1", "-4,0"), 4, "E_ST_FIELD", "data_offsets" },
    { "offset is a fraction", A("F32", "1", "0,4.5"), 4, "E_ST_FIELD", "data_offsets" },
    { "unknown dtype", A("F33", "1", "0,4"), 4, "E_DTYPE", "dtype" },
    { "lower-case dtype", A("f32", "1", "0,4"), 4, "E_DTYPE", "dtype" },
    { "negative dimension", A("F32", "-1", "0,4"), 4, "E_DIM", "shape" },
    { "fractional dimension", A("F32", "1.0", "0,4"), 4, "E_DIM", "shape" },
    { "dimension is text", A("F32", "\"1\"", "0,4"), 4, "E_DIM", "shape" },
    { "dimension 2^63", A("F32", "9223372036854775808", "0,4"), 4, "E_DIM", "shape" },
    { "dimension larger than the file", A("F32", "100", "0,4"), 4, "E_NELEM", "shape" },
    { "product 2^64", A("F32", "4294967296,4294967296", "0,4"), 4, "E_NELEM", "shape" },
    { "product wraps to 1 element", A("U8", "3,6148914691236517206", "0,2"), 2, "E_NELEM", "shape" },
    { "a zero does not hide a huge product", A("U8", "4611686018427387904,4,0", "0,0"), 0, "E_NELEM", "shape" },
    { "one byte too many", A("F32", "1", "0,5"), 5, "E_NBYTES", "1 elements" },
    { "one byte too few", A("F32", "2", "0,7"), 7, "E_NBYTES", "2 elements" },
    { "empty shape is one element", A("F32", "", "0,0"), 0, "E_NBYTES", "1 elements" },
    { "half a byte", A("F4", "3", "0,1"), 1, "E_NBYTES", "3 elements" },
    { "end before begin", A("F32", "1", "4,0"), 4, "E_OFF_RANGE", "data_offsets" },
    { "end after the end of the file", A("F32", "2", "0,8"), 7, "E_OFF_RANGE", "<= 7" },
    { "offsets near 2^63", A("F32", "1", "9223372036854775803,9223372036854775807"), 4, "E_OFF_RANGE", "data_offsets" },
    { "data before the first", A("F32", "1", "4,8"), 8, "E_OFF_SEQ", "'a'" },
    { "data after the last tensor", A("F32", "1", "0,4"), 5, "E_OFF_SEQ", "5" },
    { "data without tensors", "{}", 1, "E_OFF_SEQ", "cover 1" },
    { "overlap", TWO("0,8", "4,12"), 12, "E_OFF_SEQ", "'b'" },
    { "the same bytes twice", TWO("0,8", "0,8"), 8, "E_OFF_SEQ", "data" },
    { "gap", TWO("0,8", "9,17"), 17, "E_OFF_SEQ", "'b'" },
    { "name twice", "{\"a\":" T("F32", "1", "0,4") ",\"a\":" T("F32", "1", "4,8") "}", 8, "E_NAME_DUP", "'a'" },
    { "empty name", "{\"\":" T("F32", "1", "0,4") "}", 4, "E_NAME_LEN", "1..255" },
    { "space in a name", "{\"a b\":" T("F32", "1", "0,4") "}", 4, "E_NAME_CHAR", "0x20" },
    { "escape in a name", "{\"\\u0061\":" T("F32", "1", "0,4") "}", 4, "E_NAME_CHAR", "0x5c" },
    { "byte 0xe9 in a name", "{\"\xe9\":" T("F32", "1", "0,4") "}", 4, "E_NAME_CHAR", "0xe9" },
};

static void test_bad(void) {
    Gguf g;
    uint8_t *copy;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const int r = parse(&g, &copy, bad[i].header, strlen(bad[i].header), -1, bad[i].data);
        CHECK(r < 0, "%s: accepted", bad[i].what);
        CHECK(r >= 0 || err_ok(g.err, bad[i].code, bad[i].word), "%s: expected %s and '%s', got: %s", bad[i].what,
              bad[i].code, bad[i].word, g.err);
        gguf_close(&g);
        free(copy);
    }
    static const struct { size_t size; int64_t length; const char *code; } lengths[] = {
        { 0, 0, "E_JSON" }, { 2, 3, "E_TRUNC" }, { 2, INT64_MAX, "E_ST_HEADER" }, { 2, 100000001, "E_ST_HEADER" },
        { 2, 100000000, "E_TRUNC" }, { 2, 0, "E_JSON" } };
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        CHECK(parse(&g, &copy, "{}", lengths[i].size, lengths[i].length, 0) < 0 &&
              err_ok(g.err, lengths[i].code, "expected"),
              "length %lld: %s", (long long)lengths[i].length, g.err);
        free(copy);
    }
    for (size_t n = 0; n < 8; n++) {
        copy = calloc(n ? n : 1, 1);
        CHECK(gguf_parse_safetensors(&g, copy, n) < 0 && err_ok(g.err, "E_TRUNC", "8 bytes"), "%zu bytes: %s", n,
              g.err);
        free(copy);
    }
    char name[400] = "{\"";
    memset(name + 2, 'n', 256);
    strcpy(name + 258, "\":" T("U8", "0", "0,0") "}");
    CHECK(parse(&g, &copy, name, strlen(name), -1, 0) < 0 && err_ok(g.err, "E_NAME_LEN", "256"), "long name: %s",
          g.err);
    free(copy);
}

static void test_good(void) {
    const char *header = "{\"__metadata__\":{\"format\":\"pt\"},"
        "\"m\":" T("BF16", "2,3", "16,28") ",\"s\":" T("F32", "", "0,4") ",\"e\":" T("F16", "0,5", "4,4") ","
        "\"six\":" T("U8", "1,2,3,1,2,1", "4,16") ",\"f4\":" T("F4", "3,2", "28,31") "}   ";
    Gguf g;
    uint8_t *copy;
    if (!CHECK(parse(&g, &copy, header, strlen(header), -1, 31) == 0, "refused: %s", g.err)) return;
    touch(&g);
    const GgufTensor *m = gguf_find_tensor(&g, "m"), *s = gguf_find_tensor(&g, "s"), *e = gguf_find_tensor(&g, "e");
    const GgufTensor *six = gguf_find_tensor(&g, "six"), *f4 = gguf_find_tensor(&g, "f4");
    CHECK(g.n_tensors == 5 && g.n_kvs == 0 && !gguf_find_tensor(&g, "__metadata__"), "%zu tensors", g.n_tensors);
    CHECK(m && m->type == GGUF_BF16 && m->n_dims == 2 && m->ne[0] == 3 && m->ne[1] == 2 && m->size == 12,
          "m: rows first");
    CHECK(m && m->data == copy + 8 + strlen(header) + 16, "m: data");
    CHECK(s && s->type == GGUF_F32 && s->n_dims == 0 && s->ne[0] == 1 && s->size == 4, "a scalar");
    CHECK(e && e->ne[0] == 5 && e->ne[1] == 0 && e->size == 0, "an empty tensor");
    CHECK(six && six->type == -1 && six->n_dims == 4 && six->ne[0] == 1 && six->ne[1] == 2 && six->ne[2] == 1 &&
          six->ne[3] == 6, "six dimensions");
    CHECK(f4 && f4->type == -1 && f4->size == 3, "two elements a byte");
    gguf_close(&g);
    free(copy);
    CHECK(parse(&g, &copy, "{}", 2, -1, 0) == 0 && g.n_tensors == 0, "no tensors: %s", g.err);
    CHECK(!gguf_find_tensor(&g, "a"), "found in an empty file");
    gguf_close(&g);
    free(copy);
}

// Every cut and every changed byte of a good file ends in a tensor table or an error.
static void test_damage(void) {
    const char *header = "{\"a\":" T("F32", "2,1", "0,8") ",\"b\":" T("BF16", "4", "8,16") "}";
    const size_t n = strlen(header), size = 8 + n + 16;
    static const unsigned char values[] = { 0, 0xff, '"', '\\', '{', '}', '[', ']', ',', ':', '0', '9', '-' };
    size_t accepted = 0, tried = 0;
    for (size_t cut = 0; cut < size; cut++) {
        Gguf g;
        uint8_t *copy = malloc(cut ? cut : 1), whole[512] = { 0 };
        memcpy(whole, &(uint64_t){ n }, 8);
        memcpy(whole + 8, header, n);
        memcpy(copy, whole, cut);
        if (gguf_parse_safetensors(&g, copy, cut) == 0) CHECK(0, "cut at %zu: accepted", cut);
        gguf_close(&g);
        free(copy);
        for (size_t v = 0; v < sizeof values; v++) {
            copy = malloc(size);
            memcpy(copy, whole, size);
            copy[cut] = values[v];
            const int r = gguf_parse_safetensors(&g, copy, size);
            if (r == 0) touch(&g);
            else if (!strstr(g.err, "(E_")) CHECK(0, "byte %zu = %d: %s", cut, values[v], g.err);
            accepted += r == 0;
            tried++;
            gguf_close(&g);
            free(copy);
        }
    }
    CHECK(accepted > 16 && accepted < tried / 2, "%zu of %zu damaged files accepted", accepted, tried);
}

// ---- sets --------------------------------------------------------------------------------------------------------

static char folder[] = "/tmp/test_safetensors.XXXXXX", path[300];

static const char *in_folder(const char *name) {
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static void write_file(const char *name, const char *header, size_t data) {
    FILE *f = fopen(in_folder(name), "wb");
    if (!f) return;
    const uint64_t n = strlen(header);
    fwrite(&n, 8, 1, f);
    fwrite(header, 1, n, f);
    while (data-- > 0) fputc(0x22, f);
    fclose(f);
}

static void write_text(const char *name, const char *text) {
    FILE *f = fopen(in_folder(name), "wb");
    if (!f) return;
    fputs(text, f);
    fclose(f);
}

static void expect_set(const char *what, const char *name, int n_tensors, const char *code, const char *word) {
    Gguf g;
    const int r = gguf_open_safetensors(&g, *name ? in_folder(name) : folder);
    if (n_tensors >= 0) {
        CHECK(r == 0 && g.n_tensors == (size_t)n_tensors, "%s: expected %d tensors, got %s", what, n_tensors,
              r ? g.err : "others");
        if (r == 0) touch(&g);
    } else {
        CHECK(r < 0 && err_ok(g.err, code, word), "%s: expected %s and '%s', got: %s", what, code, word,
              r ? g.err : "accepted");
    }
    gguf_close(&g);
}

// Files of 1 to 9 tensors: the hash table grows with some of them, and every tensor is found in it.
static void test_many_files(void) {
    enum { FILES = 9 };
    char file[64], header[1000], name[16];
    for (int dup = 0; dup < 2; dup++) {
        for (int i = 1; i <= FILES; i++) {
            size_t n = 0;
            for (int k = 0; k < i; k++)
                n += (size_t)sprintf(header + n,
                                     "%c\"t%d.%d\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[%d,%d]}",
                                     k ? ',' : '{', i, k, k, k + 1);
            if (dup && i == FILES) memcpy(strstr(header, "t9.8"), "t1.0", 4);
            strcpy(header + n, "}");
            snprintf(file, sizeof file, "many-%05d-of-%05d.safetensors", i, FILES);
            write_file(file, header, (size_t)i);
        }
        if (dup) {
            expect_set("a name of the first file in the last", "", -1, "E_NAME_DUP", "'t1.0'");
            continue;
        }
        Gguf g;
        if (!CHECK(gguf_open_safetensors(&g, folder) == 0 && g.n_tensors == 45, "%d files: %s", FILES, g.err)) continue;
        for (int i = 1; i <= FILES; i++)
            for (int k = 0; k < i; k++) {
                snprintf(name, sizeof name, "t%d.%d", i, k);
                const GgufTensor *t = gguf_find_tensor(&g, name);
                CHECK(t && t->offset == (uint64_t)k && t->size == 1, "%d files: %s", FILES, name);
            }
        CHECK(!gguf_find_tensor(&g, "t0.0"), "found in no file");
        touch(&g);
        gguf_close(&g);
    }
    for (int i = 1; i <= FILES; i++) {
        snprintf(file, sizeof file, "many-%05d-of-%05d.safetensors", i, FILES);
        unlink(in_folder(file));
    }
}

static void test_sets(void) {
    if (!mkdtemp(folder)) {
        SKIP("no folder for files can be made");
        return;
    }
    test_many_files();
    const char *one = "model-00001-of-00002.safetensors", *two = "model-00002-of-00002.safetensors";
    expect_set("an empty folder", "", -1, "E_OPEN", "none");
    expect_set("no such file", "none.safetensors", -1, "E_OPEN", "cannot open");
    write_file(one, "{\"a\":" T("F32", "1", "0,4") "}", 4);
    expect_set("a part is missing", "", -1, "E_OPEN", two);
    write_file(two, "{\"b\":" T("F32", "2", "0,8") "}", 8);
    expect_set("a numbered set, by its folder", "", 2, NULL, NULL);
    expect_set("a numbered set, by its first file", one, 2, NULL, NULL);
    expect_set("one part by itself", two, 1, NULL, NULL);
    write_file("other-00001-of-00001.safetensors", "{}", 0);
    expect_set("two sets", "", -1, "E_OPEN", "several");
    write_text("model.safetensors.index.json", "{\"weight_map\":{\"a\":\"model-00001-of-00002.safetensors\","
               "\"b\":\"model-00002-of-00002.safetensors\"}}");
    expect_set("an index", "", 2, NULL, NULL);
    write_text("model.safetensors.index.json", "{\"weight_map\":{\"c\":\"model-00001-of-00002.safetensors\"}}");
    expect_set("a tensor of the index is missing", "", -1, "E_TENSOR_MISSING", "'c'");
    write_text("model.safetensors.index.json", "{\"weight_map\":{\"a\":\"../model-00001-of-00002.safetensors\"}}");
    expect_set("a path in the index", "", -1, "E_SPLIT_NAME", "in this directory");
    write_text("model.safetensors.index.json", "{\"weight_map\":{\"a\":7}}");
    expect_set("a number in the index", "", -1, "E_SPLIT_NAME", "in this directory");
    write_text("model.safetensors.index.json", "{\"weight_map\":{\"a\":\"\x7f\xe9.safetensors\"}}");
    expect_set("unprintable bytes in the index", "", -1, "E_OPEN", "\\x7f\\xe9.safetensors: ");
    write_text("model.safetensors.index.json", "{\"weight_map\":[]}");
    expect_set("an index without a map", "", -1, "E_ST_FIELD", "weight_map");
    write_text("model.safetensors.index.json", "{\"weight_map\":");
    expect_set("an index that is cut", "", -1, "E_JSON", "expected");
    write_text("model.safetensors.index.json", "");
    expect_set("an empty index", "", -1, "E_JSON", "expected");
    char *many = malloc((size_t)65537 * 16 + 64), *end = many + sprintf(many, "{\"weight_map\":{");
    for (int i = 0; i <= 65536; i++) end += sprintf(end, "%s\"%d\":\"f\"", i ? "," : "", i);
    strcpy(end, "}}");
    write_text("model.safetensors.index.json", many);
    free(many);
    expect_set("an index of 65,537 tensors", "", -1, "E_NTENSORS", "65536");
    unlink(in_folder("model.safetensors.index.json"));
    if (mkfifo(path, 0600) == 0) expect_set("an index that is a FIFO", "", -1, "E_NOTFILE", "regular");
    unlink(in_folder("model.safetensors.index.json"));
    unlink(in_folder("other-00001-of-00001.safetensors"));
    write_file(two, "{\"a\":" T("F32", "2", "0,8") "}", 8);
    expect_set("a name in two parts", "", -1, "E_NAME_DUP", two);
    write_file(two, "{\"b\":" T("F32", "2", "0,8") "}", 7);
    expect_set("a damaged part", "", -1, "E_OFF_RANGE", two);
    write_file("model.safetensors", "{\"x\":" T("F32", "1", "0,4") "}", 4);
    expect_set("one file goes before a set", "", 1, NULL, NULL);
    unlink(in_folder("model.safetensors"));
    mkdir(in_folder("model.safetensors"), 0777);
    expect_set("a folder in a file's place", "", -1, "E_NOTFILE", "regular");
    rmdir(path);
    unlink(in_folder(one));
    unlink(in_folder(two));
    rmdir(folder);
}

// ---- the writer --------------------------------------------------------------------------------------------------

static void test_writer(void) {
    static const GgufStr strs[3] = { { "left", 4 }, { "", 0 }, { "\0\xff", 2 } };
    static const int32_t ints[4] = { 1, -2, 3, 4 };
    GgufWriter w = { 0 };
    gguf_put_str(&w, "general.architecture", strs[0]);
    gguf_put_u32(&w, "general.alignment", 64);
    gguf_put_u32(&w, "u", 7);
    gguf_put_f32(&w, "f", 0.5f);
    gguf_put_bool(&w, "b", true);
    gguf_put_array(&w, "strs", GGUF_V_STR, strs, 3);
    gguf_put_array(&w, "ints", GGUF_V_I32, ints, 4);
    gguf_put_array(&w, "none", GGUF_V_F32, NULL, 0);
    gguf_put_tensor(&w, (GgufStr){ "v", 1 }, GGUF_F32, 1, (uint64_t[]){ 3 });
    gguf_put_tensor(&w, (GgufStr){ "m", 1 }, GGUF_Q8_0, 3, (uint64_t[]){ 64, 2, 5 });
    CHECK(w.n_kvs == 7 && w.n_tensors == 2 && w.data_size == 32 + 704, "%llu keys, %llu bytes of data",
          (unsigned long long)w.n_kvs, (unsigned long long)w.data_size);
    size_t size, again_size;
    uint8_t *head = gguf_writer_head(&w, &size), *file = head ? realloc(head, size + w.data_size) : NULL;
    if (!CHECK(file && size % 32 == 0, "head of %zu bytes", size)) return;
    memset(file + size, 1, w.data_size);
    Gguf g;
    if (!CHECK(gguf_parse(&g, file, size + w.data_size) == 0, "its own file: %s", g.err)) return;
    int64_t v = 0, read[4];
    double d = 0;
    const GgufStr *s;
    size_t n = 0;
    CHECK(gguf_get_int(&g, "u", 0, 9, &v) == 1 && v == 7 && gguf_get_float(&g, "f", &d) == 1 && d == 0.5, "scalars");
    CHECK(gguf_get_int(&g, "b", 0, 1, &v) == 1 && v == 1 && !gguf_find_kv(&g, "general.alignment"), "bool; alignment");
    CHECK(gguf_get_strs(&g, "strs", &s, &n) == 1 && n == 3 && s[1].n == 0 && s[2].n == 2 &&
          !memcmp(s[2].s, "\0\xff", 2),
          "strings");
    CHECK(gguf_get_ints(&g, "ints", -9, 9, read, 4) == 1 && read[1] == -2 && gguf_find_kv(&g, "none")->count == 0,
          "arrays");
    const GgufTensor *m = gguf_find_tensor(&g, "m");
    CHECK(m && m->offset == 32 && m->size == 680 && m->ne[2] == 5 && m->n_dims == 3, "tensor");

    // Reading a file and writing it again gives the same bytes.
    GgufWriter copy = { 0 };
    for (size_t i = 0; i < g.n_kvs; i++) gguf_put_kv(&copy, &g.kvs[i]);
    for (size_t i = 0; i < g.n_tensors; i++)
        gguf_put_tensor(&copy, g.tensors[i].name, g.tensors[i].type, g.tensors[i].n_dims, g.tensors[i].ne);
    uint8_t *again = gguf_writer_head(&copy, &again_size);
    CHECK(again && again_size == size && !memcmp(again, file, size), "a copy differs: %zu and %zu bytes", again_size,
          size);
    free(again);

    // The same without writing the file: the data is in private memory, which closing releases.
    Gguf from = { .path = "from" }, mem;
    uint8_t *data = gguf_private(&from, 1000);
    const uint8_t *const at[2] = { data, data + 100 };
    CHECK(gguf_from_writer(&mem, &copy, at, &from) == 0, "in memory: %s", mem.err);
    m = gguf_find_tensor(&mem, "m");
    CHECK(m && m->data == data + 100 && m->data[679] == 0 && !strcmp(mem.path, "from") && from.n_maps == 0,
          "memory: data");
    gguf_close(&mem);
    gguf_put_tensor(&copy, (GgufStr){ "v", 1 }, GGUF_F32, 1, (uint64_t[]){ 3 });
    CHECK(gguf_from_writer(&mem, &copy, at, &from) < 0 && err_ok(mem.err, "E_NAME_DUP", "'v'"), "a name twice: %s",
          mem.err);
    gguf_writer_free(&copy);
    gguf_writer_free(&w);
    gguf_close(&g);
    free(file);
}

int main(void) {
    test_bad();
    test_good();
    test_damage();
    test_sets();
    test_writer();
    return test_done("safetensors");
}
