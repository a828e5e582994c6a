/* test_json.c - the JSON reader of gguf.h: what it accepts, what it refuses and where, and the values. Every text is
 * parsed from a heap copy of its exact length, so that make asan finds reads past its end. */
#define _GNU_SOURCE                     // gguf.h: open, pread, mmap
#include "../gguf.h"
#include "test.h"

static char *copy;
static int parse(const char *text, size_t n, GgufJson *v, size_t *at, const char **err) {
    free(copy);
    copy = malloc(n ? n : 1);
    memcpy(copy, text, n);
    return gguf_json_parse(copy, n, v, at, err);
}

// The number of values in v. Visits all of them, so that a value with wrong bounds is noticed.
static int count(const GgufJson *v) {
    int n = 1;
    GgufJson rest = *v, key, value;
    if (v->type == GGUF_J_ARRAY || v->type == GGUF_J_OBJECT) {
        while (gguf_json_next(&rest, &key, &value)) n += count(&value);
    } else if (v->type == GGUF_J_STRING) {
        char *out = malloc(v->n);
        gguf_json_string(v, out);
        free(out);
    } else {
        double d;
        gguf_json_float(v, &d);
    }
    return n;
}

static void test_accepted(void) {
    static const struct { const char *text; int type, count; } cases[] = {
        {"null", GGUF_J_NULL, 1}, {" true ", GGUF_J_TRUE, 1}, {"\tfalse\r\n", GGUF_J_FALSE, 1}, {"0", GGUF_J_NUMBER, 1},
        {"-0.5e-3", GGUF_J_NUMBER, 1}, {"12E+2", GGUF_J_NUMBER, 1}, {"\"\"", GGUF_J_STRING, 1}, {"[]", GGUF_J_ARRAY, 1},
        {"{}", GGUF_J_OBJECT, 1}, {"[ ]", GGUF_J_ARRAY, 1}, {"{ }", GGUF_J_OBJECT, 1},
        {"[[],[[]],{}]", GGUF_J_ARRAY, 5},
        {"{\"a\" : [1, \"]}\", {\"b\":null} ] , \"c\\\"\":{} }", GGUF_J_OBJECT, 7},
        {"[\"\\\\\",\"\\\"\"]", GGUF_J_ARRAY, 3},
        {"{\"\":\"\\u00e9\\ud83d\\ude00\"}", GGUF_J_OBJECT, 2}, {"[\"\x80\xff\"]", GGUF_J_ARRAY, 2},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        GgufJson v;
        size_t at = 0;
        const char *err;
        const int failed = parse(cases[i].text, strlen(cases[i].text), &v, &at, &err);
        if (!CHECK(!failed, "%s: refused at %zu: expected %s", cases[i].text, at, err)) continue;
        CHECK(v.type == cases[i].type, "%s: type %d, want %d", cases[i].text, v.type, cases[i].type);
        CHECK(count(&v) == cases[i].count, "%s: %d values, want %d", cases[i].text, count(&v), cases[i].count);
    }
}

static void test_refused(void) {
    static const struct { const char *text; size_t at; } cases[] = {
        {"", 0}, {"  ", 2}, {"[", 1}, {"{", 1}, {"]", 0}, {"[1,]", 3}, {"{\"a\":1,}", 7}, {"[1 2]", 3},
        {"{\"a\" 1}", 5},
        {"{1:2}", 1}, {"{\"a\":}", 5}, {"[}", 1}, {"{]", 1}, {"[1}", 2}, {"nul", 0}, {"nulL", 0}, {"truefalse", 4},
        {"01", 1},
        {"-", 1}, {"+1", 0}, {".5", 0}, {"1.", 2}, {"1e", 2}, {"1e+", 3}, {"\"", 1}, {"\"\\\"", 3}, {"\"\\x\"", 2},
        {"\"\n\"", 1},
        {"\"\\u12g4\"", 5}, {"\"\\u12", 5}, {"1 1", 2}, {"{} []", 3}, {"NaN", 0}, {"'a'", 0}, {"[1,,2]", 3},
        {"{\"a\":1 \"b\":2}", 7},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        GgufJson v;
        size_t at = 0;
        const char *err = NULL;
        const int failed = parse(cases[i].text, strlen(cases[i].text), &v, &at, &err);
        CHECK(failed && err, "%s: accepted", cases[i].text);
        CHECK(at == cases[i].at, "%s: refused at %zu, want %zu (%s)", cases[i].text, at, cases[i].at, err ? err : "");
    }
    for (int depth = 255; depth < 259; depth++) {                       // 256 levels are the limit
        char text[600];
        memset(text, '[', (size_t)depth);
        memset(text + depth, ']', (size_t)depth);
        GgufJson v;
        size_t at;
        const char *err;
        CHECK((parse(text, 2 * (size_t)depth, &v, &at, &err) == 0) == (depth <= 256), "depth %d", depth);
    }
}

static void test_values(void) {
    const char *text =
        "{\"n\": 9007199254740993, \"f\": -2.5e3, \"big\": 1e999, \"s\": \"a\\n\\t\\/\\u0041\\u20ac\\ud83d\\ude00\\ud800x\","
                       "\"n\": 7, \"nul\": \"a\\u0000b\", \"k\\u0065y\": true, \"long\": 123456789012345678901234567890}";
    GgufJson v, m;
    size_t at = 0;
    const char *err = "";
    if (!CHECK(!parse(text, strlen(text), &v, &at, &err), "refused at %zu: %s", at, err)) return;
    int64_t n = 0;
    double d = 0;
    char out[64];
    CHECK(gguf_json_get(&v, "n", &m) && gguf_json_int(&m, 0, INT64_MAX, &n) && n == 7,
          "the last of two equal keys: %lld", (long long)n);
    CHECK(!gguf_json_int(&m, 8, 9, &n), "range");
    CHECK(gguf_json_get(&v, "f", &m) && gguf_json_float(&m, &d) && d == -2500 && !gguf_json_int(&m, -9999, 9999, &n),
          "f %g", d);
    CHECK(gguf_json_get(&v, "big", &m) && !gguf_json_float(&m, &d), "infinite");
    CHECK(gguf_json_get(&v, "long", &m) && !gguf_json_int(&m, INT64_MIN, INT64_MAX, &n), "more than 64 bits");
    CHECK(gguf_json_get(&v, "s", &m), "s");
    const size_t len = gguf_json_string(&m, out);
    const char *want = "a\n\t/A\xe2\x82\xac\xf0\x9f\x98\x80\xef\xbf\xbdx";
    CHECK(len == strlen(want) && !memcmp(out, want, len), "escapes: %zu bytes, want %zu", len, strlen(want));
    CHECK(gguf_json_is(&m, want) && !gguf_json_is(&m, "a\n") &&
          !gguf_json_is(&m, "a\n\t/A\xe2\x82\xac\xf0\x9f\x98\x80\xef\xbf\xbdxy"), "is");
    CHECK(gguf_json_get(&v, "nul", &m) && gguf_json_string(&m, out) == 3 && out[1] == 0 && !gguf_json_is(&m, "a"),
          "NUL inside");
    CHECK(gguf_json_get(&v, "key", &m) && m.type == GGUF_J_TRUE, "an escaped key");
    CHECK(!gguf_json_get(&v, "ke", &m) && !gguf_json_get(&m, "a", &m), "absent");
}

// If the parser accepts a text, all values can be visited within its bytes; if not, it has not read past them.
static void test_damage(void) {
    const char *seed =
        "{\"a\\u00e9\":[1,-2.5e+3,true,false,null,{\"x\":\"\\ud83d\\ude00\\\"\"}],\"b\":{\"c\":[[],{}]}}";
    uint32_t r = 1;
    int accepted = 0;
    for (int i = 0; i < 20000; i++) {
        char text[128];
        size_t n = strlen(seed), at;
        memcpy(text, seed, n);
        for (int k = 0; k < 3; k++) {
            r = r * 1664525u + 1013904223u;
            text[(r >> 8) % n] = (r >> 30) ? seed[(r >> 16) % n] : (char)(r >> 20);
        }
        r = r * 1664525u + 1013904223u;
        if ((r >> 28) == 0) n = (r >> 8) % n;
        GgufJson v;
        const char *err;
        if (parse(text, n, &v, &at, &err) == 0) accepted += count(&v) > 0;
        else if (at > n || !err) CHECK(0, "error at %zu of %zu", at, n);
    }
    CHECK(accepted > 100 && accepted < 19900, "%d of 20000 accepted: the damage does not reach both sides", accepted);
}

int main(void) {
    test_accepted();
    test_refused();
    test_values();
    test_damage();
    free(copy);
    return test_done("json");
}
