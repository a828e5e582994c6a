/* test_gguf.c - gguf.h: malformed and unusual files, key access. Block formats: test_blocks.c.
 *
 * Run from the top of the repository. Each file is built in memory, as a small valid file with one change, and parsed
 * from a heap copy of its exact length, so that AddressSanitizer finds every read past the end. */
#define _GNU_SOURCE
#include <errno.h>
#include <math.h>
#include <sys/stat.h>
#include <unistd.h>
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
static void tensor_1d(const char *name, uint32_t type, uint64_t ne0, uint64_t offset) {
    tensor(name, type, 1, &ne0, offset);
}
static void data(size_t align, size_t n) {
    while (file_n % align) put_u8(0);
    put_zeros(n);
}

// The valid file that the cases change: one key, one tensor of 32 f32. Offsets of its fields:
enum { AT_KEY = 24, AT_KV_TYPE = 52, AT_VALUE = 56, AT_TENSOR = 70, AT_NDIMS = 79, AT_DIM = 83, AT_TYPE = 91,
       AT_OFFSET = 95, AT_INFOS_END = 103, AT_DATA = 128, BASE_SIZE = 256 };
static void base(void) {
    begin(1, 1);
    kv_arch();
    tensor_1d("a", GGUF_F32, 32, 0);
    data(32, 128);
}
// The same with a different tensor info and n bytes of data.
static void base_tensor(const char *name, uint32_t type, uint32_t n_dims, const uint64_t *ne, uint64_t offset,
                        size_t n) {
    begin(1, 1);
    kv_arch();
    tensor(name, type, n_dims, ne, offset);
    data(32, n);
}
// The same without the end: the caller appends one more key and calls tail().
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

static void touch(const Gguf *g) {                  // reads the first and last byte of everything that was accepted
    for (size_t i = 0; i < g->n_kvs; i++) {
        const GgufKv *k = &g->kvs[i];
        size_t size = k->elem_type == GGUF_V_STR ? 1 : gguf_value_bytes(k->elem_type);
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

// True: err has one of the codes ("E_A|E_B", "" for any), a byte position unless the whole file is meant, and the name.
static int err_ok(const char *err, const char *codes, const char *name) {
    const char *got = strstr(err, "(E_");
    size_t n = got ? strcspn(got + 1, " )") : 0;
    int found = !*codes;
    for (const char *p = codes; *p && n > 0 && !found; p += strcspn(p, "|"), p += *p == '|')
        found = strcspn(p, "|") == n && memcmp(p, got + 1, n) == 0 &&
                (strcmp(got + 1 + n, ")") == 0 || strncmp(got + 1 + n, " at byte ", 9) == 0);
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
    base(), set_u64(16, (BASE_SIZE - 24 - 33) / 14 + 1);
    rejects("9 counts just above the size", "E_NKV|E_NTENSORS", NULL);
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
    base(), file[AT_KEY + 9] = 0x7f, rejects("12 DEL in key", "E_KEY_CHAR", "g\\x7fneral");
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
    begin(1, 2), kv_arch(), kv_array("k", GGUF_V_U64, (uint64_t)1 << 61), tail();
    rejects("17 u64 * 2^61", "E_ARR_LEN", "'k'");
    begin(1, 2), kv_arch(), kv_array("k", GGUF_V_U8, 0);
    size_t at = file_n;
    tail(), set_u64(at - 8, file_n - at + 1), rejects("18 u8 * (rest+1)", "E_ARR_LEN", "'k'");
    begin(1, 2), kv_arch(), kv_array("k", GGUF_V_STR, (uint64_t)1 << 60), tail();
    rejects("19 2^60 strings", "E_ARR_LEN", "'k'");
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
    begin(1, 2), kv_arch(), kv_array("k", 0xffffffff, 0), tail();
    rejects("23 empty array of type -1", "E_ARR_TYPE", "got -1");

    base_kv("general.alignment", GGUF_V_U64), put_u64(32), tail();
    rejects("24 alignment u64", "E_ALIGN_TYPE", "general.alignment");
    base_kv("general.alignment", GGUF_V_I32), put_u32(32), tail();
    rejects("24 alignment i32", "E_ALIGN_TYPE", "got i32");
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

    // The parts of a split model are files; test_split opens them.
    base_kv("split.count", GGUF_V_U16), put_u16(3), tail();
    rejects("split model in memory", "E_SPLIT_COUNT", "3 parts");
    base_kv("split.count", GGUF_V_STR), put_str("3"), tail();
    rejects("split.count string", "E_SPLIT_COUNT", "split.count");
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
    for (int i = 0; i < 3; i++)
        base(), set_u32(AT_TYPE, unknown[i]), rejects("42 unknown type", "E_TYPE_UNKNOWN", "'a'");
    for (int i = 0; i < 8; i++)
        base(), set_u32(AT_TYPE, removed[i]), rejects("43 removed type", "E_TYPE_REMOVED", "'a'");
    // 44: known types without decoder are accepted here and refused by gguf_type_supported; unused tensors may have
    // them.
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

    // err is one short line, whatever the names of the keys are.
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
    base_tensor("a23456789012345678901234567890123456789012345678901234567890123", GGUF_F32, 1, (uint64_t[]){32}, 0,
                128);
    loads("name of 63 bytes");
    begin(0, 1);
    kv_array("tokenizer.ggml.tokens", GGUF_V_STR, 3), put_str("\xff\xfe"), put_str(""), put_u64(3), put("a\0b", 3);
    loads("tokens that are not UTF-8");
    base_tensor("a", GGUF_F32, 4, (uint64_t[]){2, 3, 4, 5}, 0, 480), loads("4 dimensions");
}

// 53, 54: a small file with all kinds of fields, cut at every length and with every byte changed.
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

// Files on disk: not a regular file, and metadata longer than the first piece that gguf_open reads.
static void open_rejects(const char *path, const char *code) {
    Gguf g;
    int r = gguf_open(&g, path);
    CHECK(r < 0 && err_ok(g.err, code, NULL), "%s: expected %s, got %d \"%s\"", path, code, r, g.err);
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

    // Metadata that claims to be longer than any model's: a hole of 1 GB takes no disk space.
    begin(0, 1), kv("k", GGUF_V_STR), put_u64((uint64_t)1 << 29);
    FILE *hole = fopen(path, "wb");
    if (CHECK(hole && fwrite(file, 1, file_n, hole) == file_n && fclose(hole) == 0, "cannot write %s", path)) {
        if (truncate(path, (off_t)1 << 30) == 0) open_rejects(path, "E_STR_LEN");
        else SKIP("no files with holes here: endless metadata");
    }

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

// Split models: three parts in a folder. Part i (from 0) has a tensor of eight f32 for each letter, whose bytes are the
// letter; part 1 has another alignment. no < 0: without split.no; total < 0: without split.tensors.count.
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
    CHECK(g.n_tensors == strlen(letters) && g.n_maps == 3, "%s: got %zu tensors of %zu files", what, g.n_tensors,
          g.n_maps);
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
        CHECK(t && t->data[0] == letters[i] && t->data[31] == letters[i], "%s: tensor %c: not found, or other data",
              what, letters[i]);
    }
    GgufStr arch = {0};
    int64_t v;
    CHECK(gguf_get_str(&g, "general.architecture", &arch) == 1 && arch.n == 6, "%s: the first part's keys are lost",
          what);
    CHECK(gguf_get_int(&g, "split.count", 5, 9, &v) < 0 && err_ok(g.err, "E_META_RANGE", "split.count"), "%s: %s", what,
          g.err);
    gguf_close(&g);
    gguf_close(&g);
}

static void split_rejects(const char *what, const char *name, const char *code, const char *names) {
    Gguf g;
    int r = gguf_open(&g, split_path(name));
    CHECK(r < 0 && err_ok(g.err, code, names), "%s: expected %s naming '%s', got %d \"%s\"", what, code, names, r,
          g.err);
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
    part(0, 0, 3, 3, ""), part(1, 1, 3, 3, "bc"), part(2, 2, 3, 3, "d"), split_loads("first part without tensors",
            "bcd");
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
    parts(), part(0, 0, 3, 0, "a"), split_rejects("62 more in the first part than in all", first, "E_SPLIT_TENSORS",
                                                  "got 1");
    parts(), part(0, 0, 3, -1, "a"), split_rejects("62 no split.tensors.count", first, "E_SPLIT_TENSORS",
                                                   "split.tensors");
    parts(), part(0, 0, 3, 65537, "a"), split_rejects("62 more tensors than a model has", first, "E_SPLIT_TENSORS",
                                                      "65537");
    part(0, 0, 65535, 1, "a"), split_rejects("63 65535 parts", first, "E_SPLIT_COUNT", "65535");
    part(0, 0, 257, 1, "a"), split_rejects("63 257 parts", first, "E_SPLIT_COUNT", "257");
    parts(), part(1, 1, 3, 4, "bc"), file_n--, write_to(second);
    split_rejects("second part cut", first, "E_OFF_RANGE", second);
    file_n = 30, write_to(second), split_rejects("second part cut in its keys", first, "E_TRUNC|E_NKV|E_NTENSORS",
                                                 second);

    static const char *const names[] = {first, second, third, other, whole};
    for (int i = 0; i < 5; i++) unlink(split_path(names[i]));
    CHECK(rmdir(split_path("")) == 0, "%s: %s", split_dir, strerror(errno));
}

// 70: every invalid number, at every place of a block, and the valid ones next to it.
static void test_payload(void) {
    static const struct { int type, at, size; uint32_t bad, good; } fields[] = {
        {GGUF_F32, 0, 4, 0x7f800000, 0x7f7fffff}, {GGUF_F32, 0, 4, 0xffc00000, 0x80000000},
        {GGUF_F16, 0, 2, 0x7c00, 0x7bff},
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
                CHECK(got == want, "70 %s, bytes at %d %s: expected block %zu, got %zu", gguf_type_name(type),
                      fields[i].at, good ? "good" : "bad", want, got);
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
    CHECK(gguf_get_int(&g, "u64", INT64_MIN, INT64_MAX, &v) == -1 &&
          err_ok(g.err, "E_META_RANGE", "18446744073709551615"),
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
        CHECK(t->size == want && gguf_type_supported(t->type), "model: %.*s: expected %zu bytes, got %llu",
              (int)t->name.n, t->name.s, want, (unsigned long long)t->size);
    }
    gguf_close(&g);
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
    return test_done("gguf");
}
