/* test_gguf.c - gguf.h: malformed and unusual files, key access, block formats and their dots.
 *
 * Run from the top of the repository. Files are built in memory, one change each to a small valid one, and parsed from a
 * heap copy of exactly their length, so that AddressSanitizer sees every read past the end. Block formats are compared
 * with tests/golden/quants.txt and with formulas written out again here, element by element, in double. */
#define _GNU_SOURCE
#define GGUF_IMPLEMENTATION
#include "gguf.h"
#include "test.h"

// ---- building files ----------------------------------------------------------------------------------------------

static uint8_t file[1 << 22];
static size_t file_n;

static void put(const void *p, size_t n) {
    memcpy(file + file_n, p, n);
    file_n += n;
}
static void put_u8(unsigned v) { file[file_n++] = (uint8_t)v; }
static void put_u16(uint16_t v) { put(&v, 2); }
static void put_u32(uint32_t v) { put(&v, 4); }
static void put_u64(uint64_t v) { put(&v, 8); }
static void put_str(const char *s) {
    put_u64(strlen(s));
    put(s, strlen(s));
}
static void put_zeros(size_t n) {
    memset(file + file_n, 0, n);
    file_n += n;
}
static void set_u32(size_t at, uint32_t v) { memcpy(file + at, &v, 4); }
static void set_u64(size_t at, uint64_t v) { memcpy(file + at, &v, 8); }

static void begin(uint64_t n_tensors, uint64_t n_kvs) {
    file_n = 0;
    put("GGUF", 4);
    put_u32(3);
    put_u64(n_tensors);
    put_u64(n_kvs);
}
static void kv(const char *key, uint32_t type) {
    put_str(key);
    put_u32(type);
}
static void kv_arch(void) {
    kv("general.architecture", GGUF_V_STR);
    put_str("gemma4");
}
static void kv_array(const char *key, uint32_t elem_type, uint64_t count) {
    kv(key, GGUF_V_ARRAY);
    put_u32(elem_type);
    put_u64(count);
}
static void tensor(const char *name, uint32_t type, uint32_t n_dims, const uint64_t *ne, uint64_t offset) {
    put_str(name);
    put_u32(n_dims);
    for (uint32_t d = 0; d < n_dims && d < 8; d++) put_u64(ne[d]);
    put_u32(type);
    put_u64(offset);
}
static void tensor_1d(const char *name, uint32_t type, uint64_t ne0, uint64_t offset) { tensor(name, type, 1, &ne0, offset); }
static void data(size_t align, size_t n) {
    while (file_n % align) put_u8(0);
    put_zeros(n);
}

// The valid file that the cases change: one key, one tensor of 32 f32. Offsets of its fields:
enum { AT_KEY = 24, AT_KV_TYPE = 52, AT_VALUE = 56, AT_TENSOR = 70, AT_NDIMS = 79, AT_DIM = 83, AT_TYPE = 91, AT_OFFSET = 95,
       AT_INFOS_END = 103, AT_DATA = 128, BASE_SIZE = 256 };
static void base(void) {
    begin(1, 1);
    kv_arch();
    tensor_1d("a", GGUF_F32, 32, 0);
    data(32, 128);
}
// The same with another tensor info, and n bytes of data.
static void base_tensor(const char *name, uint32_t type, uint32_t n_dims, const uint64_t *ne, uint64_t offset, size_t n) {
    begin(1, 1);
    kv_arch();
    tensor(name, type, n_dims, ne, offset);
    data(32, n);
}
// The same with room for one more key, which the caller appends, then calls tail().
static void base_kv(const char *key, uint32_t type) {
    begin(1, 2);
    kv_arch();
    kv(key, type);
}
static void tail(void) {
    tensor_1d("a", GGUF_F32, 32, 0);
    data(32, 128);
}

// ---- checking files ----------------------------------------------------------------------------------------------

static volatile uint8_t sink;

static void touch(const Gguf *g) {                  // first and last byte of everything that was accepted
    for (size_t i = 0; i < g->n_kvs; i++) {
        const GgufKv *k = &g->kvs[i];
        size_t size = k->elem_type == GGUF_V_STR ? 1 : gguf__values[k->elem_type].bytes;
        sink ^= (uint8_t)(k->key.s[0] ^ k->key.s[k->key.n - 1]);
        if (k->strs) {
            for (size_t j = 0; j < k->count; j++)
                if (k->strs[j].n) sink ^= (uint8_t)(k->strs[j].s[0] ^ k->strs[j].s[k->strs[j].n - 1]);
        } else if (k->count) {
            sink ^= (uint8_t)(k->data[0] ^ k->data[k->count * size - 1]);
        }
    }
    for (size_t i = 0; i < g->n_tensors; i++) {
        const GgufTensor *t = &g->tensors[i];
        sink ^= (uint8_t)(t->name.s[t->name.n - 1] ^ t->data[0] ^ t->data[t->size - 1]);
    }
}

static int one_line(const char *s) {
    if (!*s) return 0;
    for (; *s; s++)
        if (*s < 0x20 || *s > 0x7e) return 0;
    return 1;
}

// Does err carry one of the codes ("E_A|E_B", "" for any), a byte position and the name?
static int err_ok(const char *err, const char *codes, const char *name) {
    const char *got = strstr(err, "(E_");
    size_t n = got ? strcspn(got + 1, " ") : 0;
    int found = !*codes;
    for (const char *p = codes; *p && n > 0 && !found; p += strcspn(p, "|"), p += *p == '|')
        found = strcspn(p, "|") == n && memcmp(p, got + 1, n) == 0 && strncmp(got + 1 + n, " at byte ", 9) == 0;
    return found && one_line(err) && strlen(err) < 500 && (!name || strstr(err, name));
}

static void rejects(const char *what, const char *codes, const char *name) {
    uint8_t *copy = malloc(file_n ? file_n : 1);
    memcpy(copy, file, file_n);
    Gguf g;
    int r = gguf_parse(&g, copy, file_n);
    CHECK(r < 0, "%s: accepted, expected %s", what, codes);
    CHECK(r >= 0 || err_ok(g.err, codes, name),
          "%s: expected %s naming '%s', got \"%s\"", what, codes, name ? name : "", g.err);
    gguf_close(&g);
    free(copy);
}

static void loads(const char *what) {
    uint8_t *copy = malloc(file_n ? file_n : 1);
    memcpy(copy, file, file_n);
    Gguf g;
    int r = gguf_parse(&g, copy, file_n);
    CHECK(r == 0, "%s: refused: %s", what, g.err);
    if (r == 0) touch(&g);
    gguf_close(&g);
    gguf_close(&g);
    free(copy);
}

static void test_header(void) {
    static const size_t sizes[] = {0, 1, 3, 4, 23};
    for (int i = 0; i < 5; i++) base(), file_n = sizes[i], rejects("1 short file", "E_TRUNC", "header");
    base(), memcpy(file, "FUGG", 4), rejects("2 magic FUGG", "E_MAGIC", "46 55 47 47");
    base(), memcpy(file, "GGUf", 4), rejects("2 magic GGUf", "E_MAGIC", NULL);
    base(), set_u32(4, 0), rejects("3 version 0", "E_ENDIAN|E_VERSION", "version");
    base(), set_u32(4, 1), rejects("4 version 1", "E_VERSION", "got 1");
    base(), set_u32(4, 4), rejects("5 version 4", "E_VERSION", "got 4");
    base(), set_u32(4, 0xffffffff), rejects("5 version 2^32-1", "E_VERSION", NULL);
    base(), set_u32(4, 0x03000000), rejects("6 big-endian", "E_ENDIAN", "big-endian");
    base(), set_u64(8, UINT64_MAX), rejects("7 n_tensors 2^64-1", "E_NTENSORS", "tensor count");
    base(), set_u64(8, (uint64_t)1 << 62), rejects("7 n_tensors 2^62", "E_NTENSORS", NULL);
    base(), set_u64(8, 65537), rejects("7 n_tensors 65537", "E_NTENSORS", "65537");
    base(), set_u64(16, UINT64_MAX), rejects("8 n_kvs 2^64-1", "E_NKV", "key count");
    base(), set_u64(16, (uint64_t)1 << 40), rejects("8 n_kvs 2^40", "E_NKV", NULL);
    base(), set_u64(16, 2), rejects("8 one key more than present", "", NULL);
    base(), set_u64(16, (BASE_SIZE - 24 - 33) / 14 + 1), rejects("9 counts just above the size", "E_NKV|E_NTENSORS", NULL);
    base(), set_u64(16, (BASE_SIZE - 24) / 14 + 1), rejects("9 keys just above the size", "E_NKV", NULL);
}

static void test_keys(void) {
    base(), set_u64(AT_KEY, 0), rejects("10 key length 0", "E_KEY_LEN", "key");
    base(), set_u64(AT_KEY, (uint64_t)1 << 63), rejects("11 key length 2^63", "E_KEY_LEN", NULL);
    base(), set_u64(AT_KEY, UINT64_MAX), rejects("11 key length 2^64-1", "E_KEY_LEN", NULL);
    base(), set_u64(AT_KEY, BASE_SIZE - AT_KEY - 8 + 1), rejects("11 key length rest+1", "E_TRUNC", NULL);
    base(), file[AT_KEY + 9] = 0, rejects("12 NUL in key", "E_KEY_CHAR", "g\\x00neral");
    base(), file[AT_KEY + 9] = ' ', rejects("12 space in key", "E_KEY_CHAR", "g\\x20neral");
    base(), file[AT_KEY + 9] = 0x80, rejects("12 0x80 in key", "E_KEY_CHAR", "g\\x80neral");
    begin(1, 2), kv_arch(), kv_arch(), tail(), rejects("13 same key twice", "E_KEY_DUP", "general.architecture");
    base_kv("general.architecture", GGUF_V_U8), put_u8(1), tail();
    rejects("13 same key, other type", "E_KEY_DUP", "general.architecture");
    base(), set_u32(AT_KV_TYPE, 13), rejects("14 value type 13", "E_KV_TYPE", "general.architecture");
    base(), set_u32(AT_KV_TYPE, 0xffffffff), rejects("14 value type -1", "E_KV_TYPE", "got -1");
    base(), set_u32(AT_KV_TYPE, 0x7fffffff), rejects("14 value type 2^31-1", "E_KV_TYPE", NULL);
    base_kv("k", GGUF_V_BOOL), put_u8(2), tail(), rejects("15 bool 2", "E_KV_BOOL", "'k'");
    begin(1, 2), kv_arch(), kv_array("k", GGUF_V_BOOL, 3), put_u8(1), put_u8(0), put_u8(255), tail();
    rejects("15 bool 255 in an array", "E_KV_BOOL", "'k'");
    base(), set_u64(AT_VALUE, UINT64_MAX), rejects("16 string of 2^64-1", "E_TRUNC", "general.architecture");
    base(), set_u64(AT_VALUE, BASE_SIZE - AT_VALUE - 8 + 1), rejects("16 string of rest+1", "E_TRUNC", NULL);
    begin(1, 2), kv_arch(), kv_array("k", GGUF_V_U64, (uint64_t)1 << 61), tail(), rejects("17 u64 * 2^61", "E_ARR_LEN", "'k'");
    begin(1, 2), kv_arch(), kv_array("k", GGUF_V_U8, 0);
    size_t at = file_n;
    tail(), set_u64(at - 8, file_n - at + 1), rejects("18 u8 * (rest+1)", "E_ARR_LEN", "'k'");
    begin(1, 2), kv_arch(), kv_array("k", GGUF_V_STR, (uint64_t)1 << 60), tail(), rejects("19 2^60 strings", "E_ARR_LEN", "'k'");
    begin(0, 1), kv_array("k", GGUF_V_STR, 3), put_str("first string"), put_str("second string");
    rejects("20 2 strings of 3", "E_TRUNC", "'k'");
    begin(1, 2), kv_arch(), kv_array("k", GGUF_V_STR, 2), put_str("x"), put_u64((uint64_t)-8), tail();
    rejects("21 string of 2^64-8 in an array", "E_TRUNC", "'k'");
    begin(1, 2), kv_arch(), kv_array("k", GGUF_V_ARRAY, 1), put_u32(GGUF_V_U8), put_u64(1), put_u8(1), tail();
    rejects("22 array of arrays", "E_ARR_NEST", "'k'");
    begin(0, 1), kv_array("k", GGUF_V_ARRAY, 1);
    for (int i = 0; i < 10000; i++) put_u32(GGUF_V_ARRAY), put_u64(1);
    rejects("22 arrays 10000 deep", "E_ARR_NEST", "'k'");
    begin(1, 2), kv_arch(), kv_array("k", 13, 0), tail(), rejects("23 empty array of type 13", "E_ARR_TYPE", "'k'");
    begin(1, 2), kv_arch(), kv_array("k", 0xffffffff, 0), tail(), rejects("23 empty array of type -1", "E_ARR_TYPE", "got -1");

    base_kv("general.alignment", GGUF_V_U64), put_u64(32), tail();
    rejects("24 alignment u64", "E_ALIGN_TYPE", "general.alignment");
    base_kv("general.alignment", GGUF_V_I32), put_u32(32), tail(), rejects("24 alignment i32", "E_ALIGN_TYPE", "got i32");
    base_kv("general.alignment", GGUF_V_STR), put_str("32"), tail();
    rejects("24 alignment string", "E_ALIGN_TYPE", "got string");
    static const uint32_t bad[] = {0, 24, 33, 1, 4, 0x80000000, 131072};
    for (int i = 0; i < 7; i++) {
        base_kv("general.alignment", GGUF_V_U32), put_u32(bad[i]), tail();
        rejects("25, 26 alignment", "E_ALIGN", "general.alignment");
    }
    begin(2, 1), kv("general.alignment", GGUF_V_U32), put_u32(64);
    tensor_1d("a", GGUF_F32, 8, 0), tensor_1d("b", GGUF_F32, 8, 32), data(64, 64);
    rejects("27 alignment 64, laid out for 32", "E_OFF_ALIGN|E_OFF_SEQ", "'b'");

    // Parts of a split model lie in files; test_split opens them.
    base_kv("split.count", GGUF_V_U16), put_u16(3), tail(), rejects("split model in memory", "E_SPLIT_COUNT", "3 parts");
    base_kv("split.count", GGUF_V_STR), put_str("3"), tail(), rejects("split.count string", "E_SPLIT_COUNT", "split.count");
    base_kv("split.count", GGUF_V_U16), put_u16(1), tail(), loads("one part of one");
}

static void test_tensors(void) {
    static const uint64_t d32[8] = {32, 1, 1, 1, 1, 1, 1, 1};
    char long_name[65] = {0};
    memset(long_name, 'n', 64);
    base_tensor("", GGUF_F32, 1, d32, 0, 128), rejects("28 empty name", "E_NAME_LEN", "tensor");
    base_tensor(long_name, GGUF_F32, 1, d32, 0, 128), rejects("29 name of 64 bytes", "E_NAME_LEN", "got 64");
    base(), set_u64(AT_TENSOR, (uint64_t)1 << 63), rejects("29 name of 2^63 bytes", "E_NAME_LEN", NULL);
    begin(2, 0);
    put_u64(3), put("a\0x", 3), put_u32(1), put_u64(8), put_u32(0), put_u64(0);
    put_u64(3), put("a\0y", 3), put_u32(1), put_u64(8), put_u32(0), put_u64(32);
    data(32, 64), rejects("30 NUL in names", "E_NAME_CHAR", "a\\x00x");
    begin(2, 0), tensor_1d("same", GGUF_F32, 8, 0), tensor_1d("same", GGUF_F32, 8, 32), data(32, 64);
    rejects("31 same name twice", "E_NAME_DUP", "'same'");
    base_tensor("a", GGUF_F32, 0, d32, 0, 128), rejects("32 n_dims 0", "E_NDIMS", "'a'");
    base_tensor("a", GGUF_F32, 5, d32, 0, 128), rejects("33 n_dims 5", "E_NDIMS", "got 5");
    base(), set_u32(AT_NDIMS, 0xffffffff), rejects("33 n_dims 2^32-1", "E_NDIMS", "'a'");
    base(), set_u64(AT_DIM, 0), rejects("34 dimension 0 is 0", "E_DIM", "'a'");
    base_tensor("a", GGUF_F32, 2, (uint64_t[]){32, 0}, 0, 128), rejects("34 dimension 1 is 0", "E_DIM", "dimension 1");

    static const struct { const char *what; uint32_t n_dims; uint64_t ne[4]; } wraps[] = {
        {"35 dimension 2^63", 1, {(uint64_t)1 << 63}},
        {"36 2^32 * 2^32", 2, {(uint64_t)1 << 32, (uint64_t)1 << 32}},
        {"37 2^31 * 2^31 * 4", 3, {(uint64_t)1 << 31, (uint64_t)1 << 31, 4}},
        {"38 2^32 * 2^31", 2, {(uint64_t)1 << 32, (uint64_t)1 << 31}},
        {"39 byte size 2^64-16", 3, {4, ((uint64_t)1 << 30) - 1, ((uint64_t)1 << 30) + 1}},
        {"40 dimension 2^61", 1, {(uint64_t)1 << 61}},
    };
    for (size_t i = 0; i < sizeof wraps / sizeof *wraps; i++)
        base_tensor("a", GGUF_F32, wraps[i].n_dims, wraps[i].ne, 0, 128), rejects(wraps[i].what, "E_NELEM", "'a'");
    base_tensor("a", GGUF_F32, 2, (uint64_t[]){2048, 2}, 0, 128);
    rejects("product just above the limit", "E_NELEM", "dimension 1");
    base_tensor("a", GGUF_F32, 4, (uint64_t[]){65536, 65536, 65536, 65536}, 0, 8192);
    rejects("2^16 four times: each below the limit, product 0 mod 2^64", "E_NELEM", "dimension 1");
    uint64_t huge = ((uint64_t)1 << 63) - 64;
    begin(2, 0), tensor_1d("a", GGUF_I8, huge, 0), tensor_1d("b", GGUF_I8, huge, huge), data(32, 64);
    rejects("41 two I8 of 2^63-64", "E_NELEM", "'a'");

    static const uint32_t unknown[] = {43, 1000, 0xffffffff}, removed[] = {4, 5, 31, 32, 33, 36, 37, 38};
    for (int i = 0; i < 3; i++) base(), set_u32(AT_TYPE, unknown[i]), rejects("42 unknown type", "E_TYPE_UNKNOWN", "'a'");
    for (int i = 0; i < 8; i++) base(), set_u32(AT_TYPE, removed[i]), rejects("43 removed type", "E_TYPE_REMOVED", "'a'");
    // 44: known types without code here are the binder's to refuse, by gguf_type_supported; unused tensors may have them.
    static const struct { uint32_t type, elems, bytes; } codeless[] = {
        {GGUF_Q8_1, 32, 36}, {GGUF_Q8_K, 256, 292}, {GGUF_I8, 1, 1}, {GGUF_F64, 1, 8}, {GGUF_IQ1_S, 256, 50}};
    for (int i = 0; i < 5; i++) {
        uint64_t ne[] = {codeless[i].elems};
        base_tensor("a", codeless[i].type, 1, ne, 0, codeless[i].bytes), loads("44 known type without code");
        CHECK(!gguf_type_supported((int)codeless[i].type), "type %u is called supported", codeless[i].type);
    }
    static const struct { uint32_t type; uint64_t ne0; } ragged[] = {
        {GGUF_Q4_K, 100}, {GGUF_Q4_K, 128}, {GGUF_Q4_K, 255}, {GGUF_Q4_0, 16}, {GGUF_NVFP4, 32}};
    for (int i = 0; i < 5; i++)
        base_tensor("a", ragged[i].type, 1, &ragged[i].ne0, 0, 256), rejects("45 ragged row", "E_ROW", "'a'");

    base(), set_u64(AT_OFFSET, 4), rejects("46 offset 4", "E_OFF_ALIGN", "'a'");
    base(), set_u64(AT_OFFSET, 32), rejects("47 first offset 32", "E_OFF_SEQ", "'a'");
    begin(2, 0), tensor_1d("a", GGUF_F32, 8, 0), tensor_1d("b", GGUF_F32, 8, 0), data(32, 64);
    rejects("48 overlap", "E_OFF_SEQ", "'b'");
    begin(2, 0), tensor_1d("a", GGUF_F32, 8, 32), tensor_1d("b", GGUF_F32, 8, 0), data(32, 64);
    rejects("49 reversed", "E_OFF_SEQ", "'a'");
    base(), set_u64(AT_OFFSET, (uint64_t)-32), rejects("50 offset 2^64-32", "E_OFF_SEQ", "'a'");
    base(), file_n--, rejects("51 cut before the last byte", "E_OFF_RANGE", "'a'");
    base(), file_n = AT_INFOS_END, rejects("52 cut after the infos", "E_DATA_START|E_OFF_RANGE", NULL);
    base(), file_n = AT_DATA, rejects("52 cut after the padding", "E_OFF_RANGE", "'a'");
    begin(2, 0), tensor_1d("a", GGUF_F32, 8, 0), tensor_1d("b", GGUF_F32, 8, 32), data(32, 32);
    rejects("second tensor missing", "E_OFF_RANGE", "'b'");

    // err shows what it quotes in one short line, whatever the file calls its keys.
    begin(0, 2);
    for (int i = 0; i < 2; i++) {
        put_u64(65535);
        memset(file + file_n, '\\', 65535), file_n += 65535;
        put_u32(GGUF_V_U8), put_u8(0);
    }
    rejects("longest key, escaped", "E_KEY_DUP", "\\x5c");
}

static void test_loads(void) {
    base(), loads("base");
    CHECK(file_n == BASE_SIZE, "base file: expected %d bytes, got %zu", BASE_SIZE, file_n);
    base(), set_u32(4, 2), loads("version 2");
    begin(0, 1), kv_arch(), loads("no tensors, no padding");
    begin(0, 0), loads("24-byte file");
    for (uint32_t type = 0; type <= GGUF_V_F64; type++)
        if (type != GGUF_V_ARRAY) begin(0, 1), kv_array("k", type, 0), loads("empty array");
    base_tensor("a", GGUF_F32, 1, (uint64_t[]){33}, 0, 132), loads("last tensor without padding");
    base(), put_zeros(100), loads("bytes after the last tensor");
    static const uint32_t aligns[] = {8, 64, 65536};
    for (int i = 0; i < 3; i++) {
        begin(2, 1), kv("general.alignment", GGUF_V_U32), put_u32(aligns[i]), tensor_1d("a", GGUF_F32, 1, 0);
        tensor_1d("b", GGUF_F32, 1, aligns[i]), data(aligns[i], aligns[i] + 4), loads("alignment with matching layout");
    }
    base_tensor("a23456789012345678901234567890123456789012345678901234567890123", GGUF_F32, 1, (uint64_t[]){32}, 0, 128);
    loads("name of 63 bytes");
    begin(0, 1), kv_array("tokenizer.ggml.tokens", GGUF_V_STR, 3), put_str("\xff\xfe"), put_str(""), put_u64(3), put("a\0b", 3);
    loads("tokens that are not UTF-8");
    base_tensor("a", GGUF_F32, 4, (uint64_t[]){2, 3, 4, 5}, 0, 480), loads("4 dimensions");
}

// 53, 54: every cut and every change of a small file with all kinds of fields.
static void test_damage(void) {
    begin(2, 6);
    kv_arch();
    kv_array("k.strs", GGUF_V_STR, 3), put_str("one"), put_str(""), put_str("three");
    kv_array("k.bools", GGUF_V_BOOL, 3), put_u8(0), put_u8(1), put_u8(1);
    kv("general.alignment", GGUF_V_U32), put_u32(32);
    kv_array("k.u64s", GGUF_V_U64, 2), put_u64(1), put_u64(2);
    kv("k.f64", GGUF_V_F64), put_u64(0x3ff0000000000000);
    tensor("token_embd.weight", GGUF_Q8_0, 2, (uint64_t[]){64, 3}, 0);
    tensor_1d("norm", GGUF_F32, 5, 224);
    size_t meta = file_n;
    data(32, 224 + 20);
    loads("damage: undamaged");
    size_t whole = file_n, accepted = 0;
    for (size_t n = 0; n < whole; n++) {
        file_n = n;
        rejects("53 cut", "", NULL);
    }
    file_n = whole;
    uint8_t *copy = malloc(whole);
    for (size_t at = 0; at < meta; at++)
        for (int change = 0; change < 10; change++) {
            memcpy(copy, file, whole);
            if (change < 8) copy[at] ^= (uint8_t)(1 << change);
            else copy[at] = change == 8 ? 0 : 0xff;
            Gguf g;
            int r = gguf_parse(&g, copy, whole);
            CHECK(r == 0 || one_line(g.err), "54 byte %zu, change %d: no error text", at, change);
            if (r == 0) touch(&g), accepted++;
            gguf_close(&g);
        }
    free(copy);
    CHECK(accepted > 0, "54: nothing was accepted");
}

// Files on disk: what is not a regular file, and metadata longer than the first piece that gguf_open reads.
static void open_rejects(const char *path, const char *code) {
    Gguf g;
    int r = gguf_open(&g, path);
    CHECK(r < 0 && err_ok(g.err, code, NULL), "55 %s: expected %s, got %d \"%s\"", path, code, r, g.err);
    gguf_close(&g);
}

static void test_open(void) {
    open_rejects("tests", "E_NOTFILE");
    open_rejects("/dev/zero", "E_NOTFILE");
    open_rejects("tests/no_such_file.gguf", "E_OPEN");
    char dir[] = "/tmp/test_gguf.XXXXXX", path[64];
    if (!mkdtemp(dir)) {
        SKIP("no writable /tmp for files on disk");
        return;
    }
    snprintf(path, sizeof path, "%s/f", dir);
    if (mkfifo(path, 0600) == 0) open_rejects(path, "E_NOTFILE");
    unlink(path);

    uint32_t n = 100000;                            // 2.8 MB: pieces of 1, 2 and 4 MB
    begin(1, 2), kv_arch(), kv_array("k", GGUF_V_STR, n);
    for (uint32_t i = 0; i < n; i++) put_u64(20), put_u32(i), put_zeros(16);
    tensor_1d("a", GGUF_F32, 32, 0), data(32, 128);
    file[file_n - 1] = 0x5a;
    for (size_t cut = 0; cut <= file_n; cut = cut ? cut * 2 : 1) {
        FILE *f = fopen(path, "wb");
        size_t size = file_n - cut;
        if (!CHECK(f && fwrite(file, 1, size, f) == size && fclose(f) == 0, "cannot write %s", path)) break;
        Gguf g;
        int r = gguf_open(&g, path);
        CHECK((r == 0) == (cut == 0), "open, cut by %zu: got %d \"%s\"", cut, r, g.err);
        if (r == 0) {
            const GgufStr *strs = NULL;
            size_t got = 0;
            uint32_t last = 0;
            touch(&g);
            CHECK(gguf_get_strs(&g, "k", &strs, &got) == 1 && got == n, "open: expected %u strings, got %zu", n, got);
            memcpy(&last, strs[n - 1].s, 4);
            CHECK(last == n - 1, "open: last string: expected %u, got %u", n - 1, last);
            CHECK(g.tensors[0].data[127] == 0x5a, "open: wrong last byte of data");
            CHECK(g.file_size == size && g.path == path, "open: wrong size or path");
        }
        gguf_close(&g);
    }
    unlink(path);
    rmdir(dir);
}

// Split models: parts of three in a folder. Part i (from 0) holds a tensor of eight f32 for each letter, whose bytes are the
// letter; part 1 has an alignment of its own. no < 0: without split.no; total < 0: without split.tensors.count.
static char split_dir[] = "/tmp/test_gguf.XXXXXX";

static const char *split_path(const char *name) {
    static char path[128];
    snprintf(path, sizeof path, "%s/%s", split_dir, name);
    return path;
}

static void write_to(const char *name) {
    FILE *f = fopen(split_path(name), "wb");
    int ok = f && fwrite(file, 1, file_n, f) == file_n;
    CHECK(f && fclose(f) == 0 && ok, "cannot write %s", name);
}

static void part(int i, int no, int count, int total, const char *letters) {
    size_t n = strlen(letters), align = i == 1 ? 64 : 32;
    begin(n, (uint64_t)(i == 0) + (i == 1) + 1 + (no >= 0) + (total >= 0));
    if (i == 0) kv_arch();
    if (no >= 0) kv("split.no", GGUF_V_U16), put_u16((uint16_t)no);
    kv("split.count", GGUF_V_U16), put_u16((uint16_t)count);
    if (total >= 0) kv("split.tensors.count", GGUF_V_I32), put_u32((uint32_t)total);
    if (i == 1) kv("general.alignment", GGUF_V_U32), put_u32(64);
    for (size_t k = 0; k < n; k++) tensor_1d((char[]){letters[k], 0}, GGUF_F32, 8, k * align);
    for (size_t k = 0; k < n; k++) {
        while (file_n % align) put_u8(0);
        memset(file + file_n, letters[k], 32), file_n += 32;
    }
    char name[64];
    snprintf(name, sizeof name, "m-%05d-of-00003.gguf", i + 1);
    write_to(name);
}

static void parts(void) { part(0, 0, 3, 4, "a"), part(1, 1, 3, 4, "bc"), part(2, 2, 3, 4, "d"); }

static void split_loads(const char *what, const char *letters) {
    Gguf g;
    int r = gguf_open(&g, split_path("m-00001-of-00003.gguf"));
    if (!CHECK(r == 0, "%s: refused: %s", what, g.err)) return;
    touch(&g);
    CHECK(g.n_tensors == strlen(letters) && g.n_maps == 3, "%s: got %zu tensors of %zu files", what, g.n_tensors, g.n_maps);
    size_t size = 0;
    for (int i = 0; i < 3; i++) {
        struct stat st;
        char name[64];
        snprintf(name, sizeof name, "m-%05d-of-00003.gguf", i + 1);
        if (stat(split_path(name), &st) == 0) size += (size_t)st.st_size;
    }
    CHECK(g.file_size == size, "%s: expected %zu bytes in all, got %zu", what, size, g.file_size);
    for (size_t i = 0; letters[i]; i++) {
        const GgufTensor *t = gguf_find_tensor(&g, (char[]){letters[i], 0});
        CHECK(t && t->data[0] == letters[i] && t->data[31] == letters[i], "%s: tensor %c: not found, or other data", what,
              letters[i]);
    }
    GgufStr arch = {0};
    int64_t v;
    CHECK(gguf_get_str(&g, "general.architecture", &arch) == 1 && arch.n == 6, "%s: the first part's keys are lost", what);
    CHECK(gguf_get_int(&g, "split.count", 5, 9, &v) < 0 && err_ok(g.err, "E_META_RANGE", "split.count"), "%s: %s", what,
          g.err);
    gguf_close(&g);
    gguf_close(&g);
}

static void split_rejects(const char *what, const char *name, const char *code, const char *names) {
    Gguf g;
    int r = gguf_open(&g, split_path(name));
    CHECK(r < 0 && err_ok(g.err, code, names), "%s: expected %s naming '%s', got %d \"%s\"", what, code, names, r, g.err);
    CHECK(g.n_tensors == 0 && g.n_maps == 0 && g.n_copies == 0, "%s: something stayed open", what);
    gguf_close(&g);
}

static void test_split(void) {
    static const char first[] = "m-00001-of-00003.gguf", second[] = "m-00002-of-00003.gguf";
    static const char third[] = "m-00003-of-00003.gguf", other[] = "m-00001-of-00004.gguf", whole[] = "whole.gguf";
    if (!mkdtemp(split_dir)) {
        SKIP("no writable /tmp for the parts of a split model");
        return;
    }
    parts(), split_loads("three parts", "abcd");
    part(0, 0, 3, 3, ""), part(1, 1, 3, 3, "bc"), part(2, 2, 3, 3, "d"), split_loads("first part without tensors", "bcd");
    part(0, 0, 3, 0, ""), part(1, 1, 3, 0, ""), part(2, 2, 3, 0, ""), split_loads("no tensors at all", "");
    parts(), part(1, 1, 3, -1, "bc"), split_loads("split.tensors.count in the first part only", "abcd");

    part(0, 0, 3, 4, "a"), write_to(whole);
    split_rejects("56 name without a suffix", whole, "E_SPLIT_NAME", "-00001-of-00003.gguf");
    write_to(other), split_rejects("56 suffix of another count", other, "E_SPLIT_NAME", "-00001-of-00003.gguf");
    parts(), split_rejects("57 started from the second part", second, "E_SPLIT_NO", "-00001-of-00003.gguf");
    parts(), unlink(split_path(third)), split_rejects("58 third part missing", first, "E_SPLIT_MISSING", third);
    parts(), unlink(split_path(second));
    if (symlink("nowhere", split_path(second)) == 0)
        split_rejects("58 second part unreadable", first, "E_SPLIT_MISSING", second);
    unlink(split_path(second));
    if (mkdir(split_path(second), 0700) == 0) split_rejects("second part is a folder", first, "E_NOTFILE", second);
    rmdir(split_path(second));
    parts(), part(1, 2, 3, 4, "bc"), split_rejects("59 split.no 2 in the second part", first, "E_SPLIT_NO", second);
    parts(), part(1, -1, 3, 4, "bc"), split_rejects("59 no split.no in the second part", first, "E_SPLIT_NO", second);
    parts(), begin(0, 2), kv("split.count", GGUF_V_U16), put_u16(3), kv("split.no", GGUF_V_STR), put_str("1");
    write_to(second), split_rejects("59 split.no as a string", first, "E_SPLIT_NO", second);
    parts(), part(0, -1, 3, 4, "a"), split_rejects("59 no split.no in the first part", first, "E_SPLIT_NO", "split.no");
    parts(), part(1, 1, 4, 4, "bc"), split_rejects("60 another split.count", first, "E_SPLIT_COUNT", second);
    parts(), begin(0, 0), write_to(second), split_rejects("60 no split.count", first, "E_SPLIT_COUNT", second);
    parts(), part(2, 2, 3, 4, "b"), split_rejects("61 the same tensor in two parts", first, "E_NAME_DUP", third);
    split_rejects("61 the same tensor in two parts", first, "E_NAME_DUP", "'b'");
    parts(), part(0, 0, 3, 5, "a"), split_rejects("62 one tensor too few", first, "E_SPLIT_TENSORS", "got 5");
    parts(), part(0, 0, 3, 3, "a"), split_rejects("62 one tensor too many", first, "E_SPLIT_TENSORS", third);
    parts(), part(0, 0, 3, 0, "a"), split_rejects("62 more in the first part than in all", first, "E_SPLIT_TENSORS", "got 1");
    parts(), part(0, 0, 3, -1, "a"), split_rejects("62 no split.tensors.count", first, "E_SPLIT_TENSORS", "split.tensors");
    parts(), part(0, 0, 3, 65537, "a"), split_rejects("62 more tensors than a model has", first, "E_SPLIT_TENSORS", "65537");
    part(0, 0, 65535, 1, "a"), split_rejects("63 65535 parts", first, "E_SPLIT_COUNT", "65535");
    part(0, 0, 257, 1, "a"), split_rejects("63 257 parts", first, "E_SPLIT_COUNT", "257");
    parts(), part(1, 1, 3, 4, "bc"), file_n--, write_to(second);
    split_rejects("second part cut", first, "E_OFF_RANGE", second);
    file_n = 30, write_to(second), split_rejects("second part cut in its keys", first, "E_TRUNC|E_NKV|E_NTENSORS", second);

    static const char *const names[] = {first, second, third, other, whole};
    for (int i = 0; i < 5; i++) unlink(split_path(names[i]));
    CHECK(rmdir(split_path("")) == 0, "%s: %s", split_dir, strerror(errno));
}

// 70: every number that a block may not hold, in every place, and what it may hold.
static void test_payload(void) {
    static const struct { int type, at, size; uint32_t bad, good; } fields[] = {
        {GGUF_F32, 0, 4, 0x7f800000, 0x7f7fffff}, {GGUF_F32, 0, 4, 0xffc00000, 0x80000000}, {GGUF_F16, 0, 2, 0x7c00, 0x7bff},
        {GGUF_F16, 0, 2, 0xfe01, 0x8001}, {GGUF_BF16, 0, 2, 0x7f80, 0x7f7f}, {GGUF_BF16, 0, 2, 0xffff, 0x8000},
        {GGUF_Q4_0, 0, 2, 0x7c00, 0x7bff}, {GGUF_Q4_1, 0, 2, 0x7c00, 0}, {GGUF_Q4_1, 2, 2, 0xfc00, 0xfbff},
        {GGUF_Q5_0, 0, 2, 0x7e00, 0}, {GGUF_Q5_1, 0, 2, 0x7c00, 0}, {GGUF_Q5_1, 2, 2, 0x7c00, 0},
        {GGUF_Q8_0, 0, 2, 0x7c00, 0x3c00}, {GGUF_Q8_0, 0, 2, 0x7e00, 0xbc00}, {GGUF_Q2_K, 80, 2, 0x7c00, 0},
        {GGUF_Q2_K, 82, 2, 0x7c00, 0}, {GGUF_Q3_K, 108, 2, 0x7c00, 0}, {GGUF_Q4_K, 0, 2, 0x7c00, 0},
        {GGUF_Q4_K, 2, 2, 0x7c00, 0}, {GGUF_Q5_K, 0, 2, 0x7c00, 0}, {GGUF_Q5_K, 2, 2, 0x7c00, 0},
        {GGUF_Q6_K, 208, 2, 0x7c00, 0}, {GGUF_IQ4_NL, 0, 2, 0x7c00, 0}, {GGUF_IQ4_XS, 0, 2, 0x7c00, 0},
        {GGUF_MXFP4, 0, 1, 0xff, 0xfe}, {GGUF_NVFP4, 0, 1, 0x80, 0x7f}, {GGUF_NVFP4, 3, 1, 0xff, 0x7e},
    };
    static const size_t at[] = {0, 1, 255, 256, 299};
    enum { N = 300 };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        const int type = fields[i].type, bytes = gguf_block_bytes(type);
        uint8_t *blocks = malloc((size_t)(N * bytes));
        for (int good = 0; good < 2; good++)
            for (size_t k = 0; k < 5; k++) {
                for (int j = 0; j < N * bytes; j++) blocks[j] = gguf_block_elems(type) > 1 ? 0x55 : 0x22;
                memcpy(blocks + at[k] * (size_t)bytes + fields[i].at, good ? &fields[i].good : &fields[i].bad,
                       (size_t)fields[i].size);
                size_t want = good ? N : at[k], got = gguf_find_bad_block(type, blocks, N);
                CHECK(got == want, "70 %s, bytes at %d %s: expected block %zu, got %zu", gguf_type_name(type), fields[i].at,
                      good ? "good" : "bad", want, got);
            }
        free(blocks);
    }
    for (int type = -1; type <= GGUF_N_TYPES; type++)
        CHECK(gguf_find_bad_block(type, "", 0) == 0, "70 type %d: nothing is not nothing", type);
}

static void test_keys_get(void) {
    float nan_f = NAN, f = 0.5f;
    double df = 0.25;
    begin(0, 15);
    kv("u8", GGUF_V_U8), put_u8(200);
    kv("i8", GGUF_V_I8), put_u8(0xfe);
    kv("u16", GGUF_V_U16), put_u16(65535);
    kv("i16", GGUF_V_I16), put_u16(0x8000);
    kv("u32", GGUF_V_U32), put_u32(0xffffffff);
    kv("i32", GGUF_V_I32), put_u32(0x80000000);
    kv("u64", GGUF_V_U64), put_u64(UINT64_MAX);
    kv("i64", GGUF_V_I64), put_u64((uint64_t)INT64_MIN);
    kv("bool", GGUF_V_BOOL), put_u8(1);
    kv("f32", GGUF_V_F32), put(&f, 4);
    kv("f64", GGUF_V_F64), put(&df, 8);
    kv("nan", GGUF_V_F32), put(&nan_f, 4);
    kv("str", GGUF_V_STR), put_str("text");
    kv_array("i16s", GGUF_V_I16, 3), put_u16(1), put_u16(0xffff), put_u16(3);
    kv_array("strs", GGUF_V_STR, 2), put_str("x"), put_str("yz");
    Gguf g;
    if (!CHECK(gguf_parse(&g, file, file_n) == 0, "accessors: %s", g.err)) return;
    static const struct { const char *key; int64_t want; } ints[] = {
        {"u8", 200}, {"i8", -2}, {"u16", 65535}, {"i16", -32768}, {"u32", 4294967295}, {"i32", -2147483647 - 1},
        {"i64", INT64_MIN}, {"bool", 1}};
    int64_t v = 0, v3[3];
    for (int i = 0; i < 8; i++) {
        int r = gguf_get_int(&g, ints[i].key, INT64_MIN, INT64_MAX, &v);
        CHECK(r == 1 && v == ints[i].want, "get_int %s: got %d, %lld \"%s\"", ints[i].key, r, (long long)v, g.err);
    }
    v = 77;
    CHECK(gguf_get_int(&g, "absent", 0, 9, &v) == 0 && v == 77, "get_int absent");
    CHECK(gguf_get_int(&g, "u64", INT64_MIN, INT64_MAX, &v) == -1 && err_ok(g.err, "E_META_RANGE", "18446744073709551615"),
          "get_int u64: \"%s\"", g.err);
    CHECK(gguf_get_int(&g, "u8", 0, 199, &v) == -1 &&
              err_ok(g.err, "E_META_RANGE", "'u8': expected an integer in 0..199, got 200"),
          "get_int u8: \"%s\"", g.err);
    CHECK(gguf_get_int(&g, "f32", 0, 9, &v) == -1 && err_ok(g.err, "E_META_TYPE", "'f32'"),
          "get_int f32: \"%s\"", g.err);
    CHECK(gguf_get_int(&g, "i16s", 0, 9, &v) == -1 && err_ok(g.err, "E_META_TYPE", "got array"),
          "get_int array: \"%s\"", g.err);

    double d = 0;
    CHECK(gguf_get_float(&g, "f32", &d) == 1 && d == 0.5, "get_float f32");
    CHECK(gguf_get_float(&g, "f64", &d) == 1 && d == 0.25, "get_float f64");
    CHECK(gguf_get_float(&g, "absent", &d) == 0 && d == 0.25, "get_float absent");
    CHECK(gguf_get_float(&g, "nan", &d) == -1 && err_ok(g.err, "E_META_RANGE", "'nan'"),
          "get_float nan: \"%s\"", g.err);
    CHECK(gguf_get_float(&g, "u8", &d) == -1 && err_ok(g.err, "E_META_TYPE", "got u8"), "get_float u8: \"%s\"", g.err);

    GgufStr s = {0};
    CHECK(gguf_get_str(&g, "str", &s) == 1 && s.n == 4 && memcmp(s.s, "text", 4) == 0, "get_str");
    CHECK(gguf_get_str(&g, "absent", &s) == 0 && s.n == 4, "get_str absent");
    CHECK(gguf_get_str(&g, "strs", &s) == -1 && err_ok(g.err, "E_META_TYPE", "'strs'"), "get_str array: \"%s\"", g.err);

    CHECK(gguf_get_ints(&g, "i16s", -1, 3, v3, 3) == 1 && v3[0] == 1 && v3[1] == -1 && v3[2] == 3, "get_ints array");
    CHECK(gguf_get_ints(&g, "u8", 0, 255, v3, 3) == 1 && v3[0] == 200 && v3[2] == 200, "get_ints scalar");
    CHECK(gguf_get_ints(&g, "absent", 0, 255, v3, 3) == 0, "get_ints absent");
    CHECK(gguf_get_ints(&g, "i16s", -1, 3, v3, 2) == -1 && err_ok(g.err, "E_META_ARRAY", "expected 2 elements, got 3"),
          "get_ints length: \"%s\"", g.err);
    CHECK(gguf_get_ints(&g, "i16s", 0, 3, v3, 3) == -1 && err_ok(g.err, "E_META_RANGE", "got -1"),
          "get_ints range: \"%s\"", g.err);
    CHECK(gguf_get_ints(&g, "strs", 0, 3, v3, 2) == -1 && err_ok(g.err, "E_META_TYPE", "an array of string"),
          "get_ints strings: \"%s\"", g.err);

    const GgufStr *strs = NULL;
    size_t n = 0;
    CHECK(gguf_get_strs(&g, "strs", &strs, &n) == 1 && n == 2 && strs[1].n == 2 && strs[1].s[0] == 'y', "get_strs");
    CHECK(gguf_get_strs(&g, "str", &strs, &n) == -1 && err_ok(g.err, "E_META_TYPE", "got string"),
          "get_strs string: \"%s\"", g.err);
    CHECK(gguf_find_kv(&g, "absent") == NULL && gguf_find_tensor(&g, "absent") == NULL, "find absent");
    gguf_close(&g);
    CHECK(gguf_find_kv(&g, "str") == NULL, "find after close");
}

static void test_model(void) {
    Gguf g;
    GgufStr arch = {0};
    const GgufStr *tokens;
    size_t n_tokens = 0;
    if (!CHECK(gguf_open(&g, "models/gemma4-mini-q8_0.gguf") == 0, "model: %s", g.err)) return;
    touch(&g);
    CHECK(gguf_get_str(&g, "general.architecture", &arch) == 1 && arch.n == 6 && memcmp(arch.s, "gemma4", 6) == 0,
          "model: architecture");
    CHECK(gguf_get_strs(&g, "tokenizer.ggml.tokens", &tokens, &n_tokens) == 1, "model: %s", g.err);
    const GgufTensor *t = gguf_find_tensor(&g, "token_embd.weight");
    CHECK(t && t->ne[1] == n_tokens, "model: expected token_embd.weight of %zu rows", n_tokens);
    for (size_t i = 0; i < g.n_tensors; i++) {
        t = &g.tensors[i];
        size_t want = gguf_row_size(t->type, (size_t)t->ne[0]) * (size_t)(t->ne[1] * t->ne[2] * t->ne[3]);
        CHECK(t->size == want && gguf_type_supported(t->type), "model: %.*s: expected %zu bytes, got %llu", (int)t->name.n,
              t->name.s, want, (unsigned long long)t->size);
    }
    gguf_close(&g);
}

// ---- block formats -----------------------------------------------------------------------------------------------

static uint32_t bits_of(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}
static float float_of(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static uint64_t rng_state = 1;
static uint32_t rng(void) {
    rng_state = rng_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(rng_state >> 33);
}
static float uniform(void) { return (float)rng() * 0x1p-30f - 1; }          // -1..1

static const int types[] = {GGUF_F32, GGUF_F16, GGUF_BF16, GGUF_Q8_0, GGUF_Q4_0, GGUF_Q5_0, GGUF_Q4_K, GGUF_Q6_K};
enum { N_TYPES = 8 };

static int type_by_name(const char *name) {
    for (int i = 0; i < N_TYPES; i++)
        if (strcmp(gguf_type_name(types[i]), name) == 0) return types[i];
    return -1;
}

static void test_table(void) {
    int supported = 0, known = 0;
    for (int type = -1; type <= GGUF_N_TYPES; type++) {
        supported += gguf_type_supported(type);
        known += gguf_block_elems(type) > 0;
        CHECK((gguf_block_elems(type) > 0) == (gguf_block_bytes(type) > 0), "type %d: half known", type);
        CHECK((strcmp(gguf_type_name(type), "unknown") == 0) == (gguf_block_elems(type) == 0),
              "type %d: name %s", type, gguf_type_name(type));
    }
    CHECK(supported == N_TYPES && known == 35, "types: expected %d with code of 35, got %d of %d", N_TYPES, supported, known);
    CHECK(gguf_row_size(GGUF_Q4_K, 512) == 288 && gguf_row_size(GGUF_Q4_K, 128) == 0, "row size Q4_K");
    CHECK(gguf_row_size(GGUF_F32, SIZE_MAX / 2) == 0 && gguf_row_size(4, 32) == 0 && gguf_row_size(-1, 32) == 0,
          "row size limits");
}

// The value of a binary16, and the binary16 nearest to a float, by arithmetic.
static double f16_value(uint16_t h) {
    int e = h >> 10 & 31, m = h & 1023;
    double v = e == 31 ? (m ? NAN : INFINITY) : e ? ldexp(1024 + m, e - 25) : ldexp(m, -24);
    return h >> 15 ? -v : v;
}
static uint16_t f16_nearest(float f) {
    double a = fabs((double)f);
    uint16_t sign = (uint16_t)(signbit(f) ? 0x8000 : 0);
    if (a >= 65520) return sign | 0x7c00;
    int e = a < 0x1p-14 ? -24 : ilogb(a) - 10;                              // exponent of the last mantissa bit
    double m = nearbyint(ldexp(a, -e));                                     // 0..2048, exact
    return (uint16_t)(sign + (e == -24 ? 0 : (e + 24) << 10) + (int)m);     // a full mantissa carries into the exponent
}

static void test_scalars(void) {
    for (uint32_t h = 0; h < 65536; h++) {
        double want = f16_value((uint16_t)h);
        float got = gguf_f16_to_f32((uint16_t)h);
        uint16_t back = gguf_f32_to_f16(got);
        if (isnan(want)) {
            CHECK(isnan(got) && (back & 0x7fff) > 0x7c00 && (bits_of(got) & 0x00400000),
                  "f16 %04x: got %08x, back %04x", h, bits_of(got), back);
        } else {
            CHECK((double)got == want && !!signbit(got) == (int)(h >> 15),
                  "f16 %04x: expected %a, got %a", h, want, got);
            CHECK(back == h, "f16 %04x: back %04x", h, back);
        }
        uint16_t b = gguf_f32_to_bf16(gguf_bf16_to_f32((uint16_t)h));
        CHECK(b == h || ((h & 0x7fff) > 0x7f80 && b == (h | 64)), "bf16 %04x: back %04x", h, b);
    }
    for (int i = 0; i < 200000; i++) {
        uint32_t u = rng() ^ rng() << 16;
        if (i & 1) u = (u & 0x80000000) | (0x32000000 + u % 0x16000000);    // around the range of f16
        if (i & 2) u &= 0xfffff000;                                         // ties
        float f = float_of(u);
        if (isnan(f)) {
            CHECK((gguf_f32_to_f16(f) & 0x7fff) > 0x7c00 && (gguf_f32_to_bf16(f) & 0x7fff) > 0x7f80, "NaN %08x is lost", u);
            continue;
        }
        CHECK(gguf_f32_to_f16(f) == f16_nearest(f),
              "f32 %08x to f16: expected %04x, got %04x", u, f16_nearest(f), gguf_f32_to_f16(f));
        uint32_t rest = u & 0xffff, bf = u >> 16;
        bf += rest > 0x8000 || (rest == 0x8000 && (bf & 1));
        CHECK(gguf_f32_to_bf16(f) == bf, "f32 %08x to bf16: expected %04x, got %04x", u, bf, gguf_f32_to_bf16(f));
    }
}

static void test_quantize(void) {
    float x[64] = {0}, scale[2];
    int8_t q[64];
    memset(q, 1, sizeof q);
    gguf_quantize_q8(x, q, scale, 64);
    CHECK(bits_of(scale[0]) == 0 && bits_of(scale[1]) == 0 && q[0] == 0 && q[63] == 0, "quantize zeros");
    static const float xs[] = {127, -127, 0.5f, 1.5f, 2.5f, -0.5f, -2.5f, 3.25f, 126.5f, -125.5f};
    static const int8_t want[] = {127, -127, 0, 2, 2, 0, -2, 3, 126, -126};
    memcpy(x, xs, sizeof xs);
    x[32] = 0x1p-121f, x[33] = -0x1p-149f;          // too small for 127 / max
    gguf_quantize_q8(x, q, scale, 64);
    for (int i = 0; i < 10; i++) CHECK(q[i] == want[i], "quantize %g: expected %d, got %d", x[i], want[i], q[i]);
    CHECK(scale[0] == 1 && scale[1] == 0 && q[32] == 0, "quantize scales: got %g, %g", scale[0], scale[1]);
    x[32] = 0x1p-120f;
    gguf_quantize_q8(x, q, scale, 64);
    CHECK(q[32] == 127 && scale[1] > 0, "quantize the smallest group: got %d, %g", q[32], scale[1]);
    x[5] = NAN, x[40] = -INFINITY;
    gguf_quantize_q8(x, q, scale, 64);
    CHECK(isnan(scale[0]) && isnan(scale[1]) && q[0] == 0 && q[40] == 0, "quantize NaN, Inf: got %g, %g", scale[0], scale[1]);
    for (int i = 0; i < 32; i++) x[i] = uniform() * 1e38f;
    x[7] = 3.4028235e38f;
    gguf_quantize_q8(x, q, scale, 32);
    CHECK(q[7] == 127 && isfinite(scale[0]), "quantize the largest float: got %d, %g", q[7], scale[0]);
}

static size_t read_words(const char *p, float *out, size_t max) {
    size_t n = 0;
    for (char *end; n < max; n++, p = end) {
        uint32_t u = (uint32_t)strtoul(p, &end, 16);
        if (end == p) break;
        out[n] = float_of(u);
    }
    return n;
}
static size_t read_hex(const char *p, uint8_t *out, size_t max) {
    size_t n = 0;
    for (unsigned v; n < max && sscanf(p + 2 * n, "%2x", &v) == 1; n++) out[n] = (uint8_t)v;
    return n;
}

static void test_golden(void) {
    static char line[1 << 14];
    float x[256], scale[8], want_scale[8], want[256], got[256];
    uint8_t want_q[256], block[1024];
    int8_t q[256];
    char name[16] = "";
    int elems = 0, type = -1, n_blocks = 0;
    FILE *f = fopen("tests/golden/quants.txt", "r");
    if (!CHECK(f, "cannot open tests/golden/quants.txt; run from the top of the repository")) return;
    while (fgets(line, sizeof line, f)) {
        int hex = 0;
        if (strncmp(line, "x ", 2) == 0) {
            CHECK(read_words(line + 2, x, 256) == 256, "golden x");
            gguf_quantize_q8(x, q, scale, 256);
        } else if (strncmp(line, "scale ", 6) == 0) {
            CHECK(read_words(line + 6, want_scale, 8) == 8, "golden scale");
            for (int g = 0; g < 8; g++)
                CHECK(bits_of(scale[g]) == bits_of(want_scale[g]), "scale %d: expected %a, got %a", g, want_scale[g], scale[g]);
        } else if (strncmp(line, "q ", 2) == 0) {
            CHECK(read_hex(line + 2, want_q, 256) == 256, "golden q");
            for (int i = 0; i < 256; i++)
                CHECK((uint8_t)q[i] == want_q[i], "q %d: expected %d, got %d", i, (int8_t)want_q[i], q[i]);
        } else if (sscanf(line, "block %15s %d %n", name, &elems, &hex) == 2 && hex > 0) {
            type = type_by_name(name);
            if (!CHECK(type >= 0 && elems <= 256, "golden block %s", name)) break;
            size_t n = read_hex(line + hex, block, sizeof block);
            CHECK(n == gguf_row_size(type, (size_t)elems), "golden block %s: %zu bytes", name, n);
            n_blocks++;
        } else if (strncmp(line, "f32 ", 4) == 0) {
            CHECK((int)read_words(line + 4, want, 256) == elems, "golden f32 of %s", name);
            gguf_dequantize(type, block, got, (size_t)elems);
            for (int i = 0; i < elems; i++)
                CHECK(bits_of(got[i]) == bits_of(want[i]) || (got[i] == 0 && want[i] == 0),
                      "%s block %d [%d]: expected %a, got %a", name, n_blocks, i, want[i], got[i]);
        } else if (strncmp(line, "dot ", 4) == 0) {
            double y64 = strtod(line + 4, NULL), size = 0;
            for (int i = 0; i < elems; i++) size += fabs((double)want[i] * scale[i / 32] * q[i]);
            float y = gguf_dot_q8(type, block, q, scale, (size_t)elems);
            CHECK(fabs(y - y64) <= 2e-6 * size, "%s block %d dot: expected %a, got %a", name, n_blocks, y64, y);
        }
    }
    fclose(f);
    CHECK(n_blocks == 37, "golden: expected 37 blocks, got %d", n_blocks);
}

// One element, from the format's definition: code, scale of the code, and what is subtracted.
typedef struct { int code, sub; double d, min; int sub_min; } Element;
static Element element(int type, const uint8_t *row, size_t i) {
    const uint8_t *b = row + i / (size_t)gguf_block_elems(type) * (size_t)gguf_block_bytes(type);
    int j = (int)(i % (size_t)gguf_block_elems(type));
    uint16_t d, dmin;
    uint32_t h;
    memcpy(&d, type == GGUF_Q6_K ? b + 208 : b, 2);
    memcpy(&dmin, b + 2, 2);
    Element e = {0, 1, f16_value(d), 0, 0};
    switch (type) {
    case GGUF_Q8_0: e.code = (int8_t)b[2 + j]; break;
    case GGUF_Q4_0: e.code = (b[2 + j % 16] >> (j < 16 ? 0 : 4) & 15) - 8; break;
    case GGUF_Q5_0:
        memcpy(&h, b + 2, 4);
        e.code = (b[6 + j % 16] >> (j < 16 ? 0 : 4) & 15) + 16 * (int)(h >> j & 1) - 16;
        break;
    case GGUF_Q4_K: {
        const uint8_t *s = b + 4;
        int g = j / 32;
        e.sub = g < 4 ? s[g] & 63 : (s[g + 4] & 15) | s[g - 4] >> 6 << 4;
        e.sub_min = g < 4 ? s[g + 4] & 63 : s[g + 4] >> 4 | s[g] >> 6 << 4;
        e.min = f16_value(dmin);
        e.code = b[16 + 32 * (j / 64) + j % 32] >> (g % 2 ? 4 : 0) & 15;
        break;
    }
    case GGUF_Q6_K: {
        int n = j / 128, k = j / 32 % 4, l = j % 32;
        e.sub = (int8_t)b[192 + j / 16];
        e.code = ((b[64 * n + 32 * (k & 1) + l] >> 4 * (k >> 1) & 15) | (b[128 + 32 * n + l] >> 2 * k & 3) << 4) - 32;
        break;
    }
    }
    return e;
}

// Random blocks with scales of a sane size and either sign.
static void random_row(int type, uint8_t *row, size_t n) {
    size_t bytes = (size_t)gguf_block_bytes(type), size = gguf_row_size(type, n);
    for (size_t i = 0; i < size; i++) row[i] = (uint8_t)rng();
    for (size_t b = 0; b < size; b += bytes) {
        float f = uniform();
        uint16_t d = type == GGUF_BF16 ? gguf_f32_to_bf16(f) : gguf_f32_to_f16(f), dmin = gguf_f32_to_f16(uniform());
        if (type == GGUF_F32) memcpy(row + b, &f, 4);
        else memcpy(row + b + (type == GGUF_Q6_K ? 208 : 0), &d, 2);
        if (type == GGUF_Q4_K) memcpy(row + b + 2, &dmin, 2);
    }
}

// The dots: against double within 2e-6 of the sum of terms, and, bit for bit, against their definition in plain loops
// (which needs -ffp-contract=off, like every build).
static void test_dots(void) {
    static const size_t blocks[] = {1, 2, 3, 7, 8, 9, 11, 22, 64, 65, 66, 88};
    static const size_t lengths[] = {0, 1, 7, 31, 32, 33, 63, 64, 65, 100, 704, 2112, 2817};
    enum { MAX = 88 * 256 };
    uint8_t *memory = malloc(MAX * 4 + 1), *row = memory + 1;               // rows need no alignment
    float *x = malloc(MAX * sizeof *x), *values = malloc(MAX * sizeof *values), *scale = malloc(MAX / 32 * sizeof *scale);
    int8_t *q = malloc(MAX);
    for (int t = 0; t < N_TYPES; t++)
        for (int k = 0; k < 13; k++) {
            int type = types[t], is_float = gguf_block_elems(type) == 1;
            if (!is_float && k == 12) break;
            size_t n = is_float ? lengths[k] : blocks[k] * (size_t)gguf_block_elems(type);
            const char *name = gguf_type_name(type);
            random_row(type, row, n);
            for (size_t i = 0; i < n; i++) x[i] = uniform() * uniform() * 4;
            double y64 = 0, size = 0;
            float acc[32] = {0}, y;
            gguf_dequantize(type, row, values, n);
            if (is_float) {
                for (size_t i = 0; i < n; i++) {
                    acc[i % 32] += values[i] * x[i];
                    y64 += (double)values[i] * x[i];
                    size += fabs((double)values[i] * x[i]);
                }
                for (int h = 16; h; h /= 2)
                    for (int j = 0; j < h; j++) acc[j] += acc[j + h];
                y = gguf_dot_f32(type, row, x, n);
            } else {
                gguf_quantize_q8(x, q, scale, n);
                for (size_t g = 0; g < n / 32; g++) {
                    int dot = 0, min = 0;
                    Element e = {0};
                    for (size_t i = 32 * g; i < 32 * g + 32; i++) {
                        e = element(type, row, i);
                        dot += e.sub * e.code * q[i], min += e.sub_min * q[i];
                        float want = (float)(e.d * e.sub * e.code - e.min * e.sub_min);
                        CHECK(values[i] == want, "%s [%zu]: expected %a, got %a", name, i, want, values[i]);
                    }
                    y64 += e.d * scale[g] * dot - e.min * scale[g] * min;
                    size += fabs(e.d * scale[g] * dot) + fabs(e.min * scale[g] * min);
                    float term = ((float)e.d * scale[g]) * (float)dot;
                    if (type == GGUF_Q4_K) term -= ((float)e.min * scale[g]) * (float)min;
                    acc[g % 8] += term;
                }
                for (int h = 4; h; h /= 2)
                    for (int j = 0; j < h; j++) acc[j] += acc[j + h];
                y = gguf_dot_q8(type, row, q, scale, n);
            }
            CHECK(fabs(y - y64) <= 2e-6 * size,
                  "%s dot of %zu: expected %a, got %a, tolerance %g", name, n, y64, y, 2e-6 * size);
            CHECK(y == acc[0], "%s dot of %zu: by definition %a, got %a", name, n, acc[0], y);
        }
    // Extremes: the largest codes and scales, where the integers are widest.
    memset(q, 127, 256);
    for (int g = 0; g < 8; g++) scale[g] = 1;
    for (int sign = 0; sign < 2; sign++) {
        memset(row, sign ? 0x80 : 0x7f, 34);
        row[0] = 0, row[1] = 0x3c;
        float want = sign ? -128 * 127 * 32 : 127 * 127 * 32, y = gguf_dot_q8(GGUF_Q8_0, row, q, scale, 32);
        CHECK(y == want, "Q8_0 extreme: expected %g, got %g", want, y);
        memset(row, sign ? 0x00 : 0xff, 192), memset(row + 192, 0x80, 16);
        row[208] = 0, row[209] = 0x3c;
        want = sign ? 128 * 32 * 127 * 256.f : -128 * 31 * 127 * 256.f, y = gguf_dot_q8(GGUF_Q6_K, row, q, scale, 256);
        CHECK(y == want, "Q6_K extreme: expected %g, got %g", want, y);
        memset(q, -127, 256);
        memset(row, 0xff, 144);
        row[0] = row[2] = 0, row[1] = row[3] = 0x3c;
        want = -(63 * 15 - 63) * 127 * 256.f, y = gguf_dot_q8(GGUF_Q4_K, row, q, scale, 256);
        CHECK(y == want, "Q4_K extreme: expected %g, got %g", want, y);
        memset(q, 127, 256);
    }
    free(memory);
    free(x);
    free(values);
    free(scale);
    free(q);
}

int main(void) {
    test_header();
    test_keys();
    test_tensors();
    test_loads();
    test_damage();
    test_open();
    test_split();
    test_payload();
    test_keys_get();
    test_model();
    test_table();
    test_scalars();
    test_quantize();
    test_golden();
    test_dots();
    return test_done("gguf");
}
