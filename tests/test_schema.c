/* test_schema.c - schemas as generators write them: those of tests/schemas.jsonl (zod 4's for each of its types, and
 * forms of pydantic, C# and TypeScript) become grammars; texts drawn from them satisfy the validator of validate.h. All
 * integers near many bounds, decimal numbers, multiples, and random regular expressions against the same validator.
 * build/test_schema -samples prints drawn texts, for other validators. */
#define _GNU_SOURCE
#include <math.h>
#include "../gguf.h"
#include "../tokenizer.h"
#include "../parts/grammar.h"
#include "../parts/pattern.h"
#include "../parts/schema.h"
#include "test.h"
#include "vocab.h"
#include "validate.h"

#define MODEL "models/gemma4-mini-q8_0.gguf"

static Tokenizer t;
static GrammarVocab vocab;

// Feeds a text by bytes. True: it is complete.
static bool accepts(Grammar *g, const char *s) {
    GrammarState state = grammar_start(g, START_ANSWER);
    for (g->work = GRAMMAR_WORK; *s && state; s++) state = next_set(g, state, g->class_of[(unsigned char)*s]);
    return state && g->stack_sets[state].complete;
}

// Draws a text byte by byte. False: it became too long. There is always a byte that may follow, or the text may end.
static bool draw(Grammar *g, const char *what, char *text, size_t room) {
    GrammarState s = grammar_start(g, START_ANSWER);
    for (size_t n = 0; n + 1 < room; n++) {
        unsigned char allowed[256], closing[8];
        int n_allowed = 0, n_ascii = 0, n_closing = 0;
        g->work = GRAMMAR_WORK;
        for (int b = 0; b < 256; b++) {
            if (!next_set(g, s, g->class_of[b])) continue;
            if (b < 128) n_ascii++;
            allowed[n_allowed++] = (unsigned char)b;
            if (b == '"' || b == ']' || b == '}') closing[n_closing++] = (unsigned char)b;
        }
        text[n] = 0;
        const bool complete = g->stack_sets[s].complete;
        if (!CHECK(n_allowed || complete, "%s: nothing may follow %s (%s)", what, text, g->err)) return false;
        if (complete && (!n_allowed || rnd(n > 100 ? 2 : 6) == 0)) return true;
        int b = allowed[rnd((uint32_t)(n_ascii && rnd(8) ? n_ascii : n_allowed))];
        if (n_closing && rnd(n > 100 ? 2 : 12) == 0) b = closing[rnd((uint32_t)n_closing)];
        text[n] = (char)b;
        s = next_set(g, s, g->class_of[b]);
        grammar_keep_states(g, &s, 1);
    }
    return false;
}

// ---- schemas of generators ------------------------------------------------------------------------------------------

static void test_file(bool print) {
    static char line[1 << 16], text[1024];
    FILE *f = fopen("tests/schemas.jsonl", "rb");
    int n = 0, n_drawn = 0;
    if (!CHECK(f, "tests/schemas.jsonl: cannot open")) return;
    while (fgets(line, sizeof line, f)) {
        GgufJson row, schema, v;
        size_t at;
        const char *err;
        Grammar g;
        if (!CHECK(gguf_json_parse(line, strlen(line), &row, &at, &err) == 0 && gguf_json_get(&row, "schema", &schema),
                   "line %d", n + 1)) break;
        const TokStr name = text_field(&row, "name");
        n++;
        v_formats = !strstr(line, "\"zod email_unicode") && !strstr(line,
            "\"zod {email_unicode");    // not with its pattern
        if (CHECK(grammar_from_schema(&g, &vocab, (TokStr){ schema.s, schema.n }, false), "%s: %s", name.s, g.err))
            for (int k = 0; k < 8; k++) {
                if (!draw(&g, name.s, text, sizeof text)) continue;
                n_drawn++;
                const bool json = gguf_json_parse(text, strlen(text), &v, &at, &err) == 0;
                CHECK(json && fits(&schema, &schema, &v), "%s: %s: %s", name.s, text, json ? "does not fit" : err);
                if (print) printf("{\"name\":\"%s\",\"value\":%s}\n", name.s, text);
            }
        CHECK(!g.failed, "%s: %s", name.s, g.err);
        grammar_free(&g);
        free_str(name);
    }
    v_formats = true;
    fclose(f);
    CHECK(n > 400 && n_drawn > 7 * n, "%d schemas, %d texts", n, n_drawn);
}

// Schemas with texts that they accept (+) and refuse (-), and the warning they give.
static const struct { const char *schema, *warning, *texts[12]; } cases[] = {
    { "{\"type\":\"string\",\"format\":\"email\",\"pattern\":\"^[a-z]+@[a-z]+\\\\.[a-z]{2,}$\"}", "",
      { "+\"ab@cd.ef\"", "-\"a1@cd.ef\"", "-\"a@b\"" } },
    { "{\"type\":\"string\",\"pattern\":\"^[a-z]+$\",\"maxLength\":3}", "",
      { "+\"abc\"", "-\"abcd\"", "-\"\"", "-\"aB\"" } },
    { "{\"type\":\"string\",\"pattern\":\"^\\u00e9+$\",\"minLength\":2,\"maxLength\":300}", "",
      { "+\"\xc3\xa9\xc3\xa9\"", "-\"\xc3\xa9\"" } },
    { "{\"type\":\"string\",\"pattern\":\"^(?!\\\\.)(?!.*\\\\.\\\\.)[a-z.]+$\"}", "",
      { "+\"a.b\"", "-\".a\"", "-\"a..b\"" } },
    { "{\"type\":\"string\",\"pattern\":\"^(?=.*\\\\d)(?=.*[A-Z])\\\\w{4,}$\"}", "",
      { "+\"aA1b\"", "-\"aaa1\"", "-\"A1b\"", "+\"____1A\"" } },
    { "{\"type\":\"string\",\"pattern\":\"\\\\p{Zl}\",\"maxLength\":2}", "#/pattern: byte 6: \\p{Zl} is not",
      { "+\"1\"", "-\"abc\"" } },
    { "{\"type\":\"string\",\"pattern\":\"^[\\\\p{Lu}\\\\d][\\\\p{L}' -]*$\"}", "",
      { "+\"Zo\xc3\xab O'N\xc3\xa9il\"", "-\"zo\"", "+\"\xd0\x90\xd0\xb1\"", "-\"Z1\"" } },
    { "{\"type\":\"string\",\"pattern\":\"^[^\\\\p{L}]$\"}", "#/pattern: byte 8: \\p{L} is not", { "+\"1\"" } },
    { "{\"type\":\"string\",\"pattern\":\"^(?!\\\\p{L})\"}", "#/pattern: byte 9: \\p{L} is not", { "+\"1\"" } },
    { "{\"type\":\"string\",\"format\":\"color\"}", "#/format: this format is unknown", { "+\"x\"" } },
    { "{\"type\":\"string\",\"format\":\"uri\"}", "",
      { "+\"https://example.com/a?b=c#d\"", "+\"mailto:a@b.c\"", "-\"a b\"",
      "-\"example.com\"", "+\"urn:isbn:1\"" } },
    { "{\"type\":\"string\",\"format\":\"hostname\"}", "", { "+\"a-b.example\"", "-\"-a\"", "-\"a..b\"" } },
    { "{\"type\":\"string\",\"format\":\"ipv6\"}", "", { "+\"::1\"", "+\"fe80::1:2\"", "-\"1::2::3\"", "-\"12345::\"",
      "+\"1:2:3:4:5:6:7:8\"" } },
    { "{\"type\":\"string\",\"format\":\"duration\"}", "",
      { "+\"P1Y2M3D\"", "+\"PT5S\"", "+\"P2W\"", "-\"P\"", "-\"PT\"", "-\"P1DT\"", "+\"P1DT2H\"" } },
    { "{\"type\":\"integer\",\"minimum\":-9223372036854775808,\"maximum\":9223372036854775807}", "",
      { "+9223372036854775807", "-9223372036854775808", "+-9223372036854775808", "--9223372036854775809", "+0" } },
    { "{\"type\":\"number\",\"minimum\":0.01}", "", { "+0.01", "-0.001", "-0", "+0.1", "+7", "-0.00999" } },
    { "{\"type\":\"number\",\"minimum\":1e-2,\"maximum\":2.5E+1}", "",
      { "+0.01", "-0.001", "+25", "+25.0", "-25.01" } },
    { "{\"type\":\"number\",\"minimum\":-3.4e38,\"maximum\":3.4e38}", "", { "+1.5", "+-3", "-1e39" } },
    { "{\"type\":\"integer\",\"minimum\":3,\"exclusiveMinimum\":true,\"maximum\":5,\"exclusiveMaximum\":false}", "",
      { "-3", "+4", "+5", "-6" } },
    { "{\"type\":\"integer\",\"minimum\":2.5,\"exclusiveMaximum\":4.5}", "", { "-2", "+3", "+4", "-5" } },
    { "{\"type\":\"array\",\"uniqueItems\":true,\"items\":{\"type\":\"integer\"}}",
      "#/uniqueItems: different items are not enforced", { "+[1,1]" } },
    { "{\"type\":\"object\",\"properties\":{\"a\":{\"if\":true,\"type\":\"integer\"}},\"minLenght\":1}",
      "#/minLenght: this keyword",
      { "+{\"a\":1}" } },
    { "{\"oneOf\":[{\"type\":\"number\"},{\"type\":\"integer\"}]}", "#/oneOf/1: a value may match both",
      { "+1", "+1.5" } },
    { "{\"type\":\"object\",\"properties\":{\"a\":{},\"b\":{},\"c\":{}},\"minProperties\":1,\"maxProperties\":2}", "",
      { "-{}", "+{\"a\":1}", "+{\"b\":1,\"c\":2}", "-{\"a\":1,\"b\":1,\"c\":1}" } },
    { "{\"type\":\"object\",\"additionalProperties\":{\"type\":\"null\"},\"minProperties\":1,\"maxProperties\":2}", "",
      { "-{}", "+{\"a\":null}", "+{\"a\":null,\"b\":null}", "-{\"a\":null,\"b\":null,\"c\":null}" } },
    { "{\"type\":\"object\",\"patternProperties\":{\"^a\":{\"type\":\"null\"},\"z$\":{\"type\":\"integer\"}}}", "",
      { "+{\"ab\":null}", "-{\"ab\":1}", "+{\"z\":1,\"az2\":null}", "-{\"az\":1}", "-{\"b\":1}" } },
    { "{\"type\":\"object\",\"propertyNames\":{\"enum\":[\"x\",\"y\"]},\"additionalProperties\":{\"type\":\"integer\"}}", "",
      { "+{}", "+{\"x\":1,\"y\":2}", "-{\"z\":1}", "-{\"x\":1,\"x\":1}" } },
    { "{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"integer\"},\"b\":{\"not\":{}}},\"required\":[\"a\"]}", "",
      { "+{\"a\":1}", "-{\"a\":1,\"b\":1}" } },
    { "{\"not\":{\"anyOf\":[{\"type\":\"string\"},{\"enum\":[true,null,5]}]},\"type\":[\"string\",\"boolean\",\"null\",\"integer\"]}", "",
      { "+false", "-true", "-null", "-5", "+55", "+4", "-\"\"" } },
    { "{\"type\":\"string\",\"not\":{\"enum\":[\"ab\",\"\"]},\"maxLength\":3}", "",
      { "+\"abc\"", "-\"ab\"", "+\"a\"", "-\"\"" } },
    { "{\"type\":\"number\",\"not\":{\"const\":2.5}}", "", { "+2", "-2.5", "-2.50", "+2.51", "+-2.5" } },
    { "{\"type\":\"object\",\"propertyNames\":{\"not\":{\"const\":\"id\"}}}", "",
      { "+{\"i\":1}", "-{\"id\":1}", "+{\"id2\":1}" } },
    { "{\"type\":\"string\",\"pattern\":\"^[\\\"\\\\\\\\\\n\u00e9]+$\",\"maxLength\":4}", "",
      { "+\"\\\"\\\\\\n\"", "+\"\xc3\xa9\xc3\xa9\"", "-\"\\t\"", "-\"\\n\\n\\n\\n\\n\"" } },
    { "{\"$ref\":\"#/$defs/A%20B%3Cc%3E\",\"$defs\":{\"A B<c>\":{\"type\":\"null\"}}}", "", { "+null", "-1" } },
    { "{\"$ref\":\"#x\",\"definitions\":{\"a\":{\"b\":{\"$id\":\"#x\",\"type\":\"null\"}}}}", "", { "+null", "-1" } },
    { "{\"$id\":\"http://h/a/b\",\"$ref\":\"../c#/$defs/d\",\"$defs\":{\"k\":{\"$id\":\"/c\",\"$defs\":{\"d\":{\"const\":7}}}}}", "",
      { "+7", "-8" } },
    { "{\"allOf\":[{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"integer\"}},\"additionalProperties\":{\"type\":\"null\"}},"
      "{\"properties\":{\"b\":{}},\"required\":[\"b\"]}]}", "",
      { "+{\"b\":null}", "-{\"b\":1}", "+{\"a\":1,\"b\":null}" } },
    { "{\"type\":\"string\",\"enum\":[\"ab\",\"abc\",\"x\"],\"pattern\":\"^a\",\"maxLength\":2}", "",
      { "+\"ab\"", "-\"abc\"", "-\"x\"" } },
};

static void test_cases(void) {
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Grammar g;
        const bool ok = grammar_from_schema(&g, &vocab, str(cases[i].schema), false);
        CHECK(ok && (*cases[i].warning ? strstr(g.warnings, cases[i].warning) != NULL : !*g.warnings),
              "%s: '%s%s', want '%s'", cases[i].schema, g.err, g.warnings, cases[i].warning);
        for (int k = 0; ok && cases[i].texts[k]; k++) {
            const bool want = cases[i].texts[k][0] == '+', got = accepts(&g, cases[i].texts[k] + 1);
            CHECK(got == want, "%s: %s: %d", cases[i].schema, cases[i].texts[k] + 1, got);
        }
        grammar_free(&g);
        const bool strict = grammar_from_schema(&g, &vocab, str(cases[i].schema), true);
        const bool refused = *cases[i].warning && !strstr(cases[i].warning, "format");
        CHECK(strict != refused && (strict || strstr(g.err, cases[i].warning)), "strict: %s: %s", cases[i].schema,
            g.err);
        grammar_free(&g);
    }
}

// In tool calls strings have no escapes, and undeclared keys no quotes.
static void test_calls(void) {
    static const char tools[] = "[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"strict\":%s,\"parameters\":{\"type\":\"object\","
        "\"properties\":{\"s\":{\"type\":\"string\",\"pattern\":\"^(?!ab)[a-c\\\"]+$\",\"maxLength\":3},"
        "\"u\":{\"type\":\"array\",\"uniqueItems\":%s,\"items\":{\"type\":\"integer\",\"minimum\":15}}},"
        "\"patternProperties\":{\"^n_\":{\"type\":\"number\",\"maximum\":1.5}}}}}]";
    static const char *const texts[] = { "+s:<|\"|>ac\"<|\"|>", "-s:<|\"|>abc<|\"|>", "-s:<|\"|>aaaa<|\"|>",
        "+n_x:1.25", "-n_x:1.51",
                                         "-x:1", "+u:[15,15]", "-u:[14]", "+s:<|\"|>b<|\"|>,n_1:-3,n_2:0" };
    for (int round = 0; round < 4; round++) {
        char text[1024];
        Grammar g;
        snprintf(text, sizeof text, tools, round & 1 ? "true" : "false", round & 2 ? "true" : "false");
        const bool ok = grammar_from_tools(&g, &vocab, str(text), NULL, false, (TokStr){ NULL, 0 }, false);
        const char *place = "tools[0].parameters: #/properties/u/uniqueItems: different";
        CHECK(ok == (round < 3) && strstr(ok ? g.warnings : g.err, round < 2 ? "" : place), "%d: %s%s", round, g.err,
            g.warnings);
        for (size_t i = 0; ok && i < sizeof texts / sizeof *texts; i++) {
            TokIds ids = { 0 };
            GrammarState s = grammar_start(&g, START_ANSWER);
            snprintf(text, sizeof text, "<|tool_call>call:f{%s}<tool_call|>", texts[i] + 1);
            tok_encode(&t, text, strlen(text), TOK_SPECIAL, &ids);
            for (size_t k = 0; k < ids.n && s; k++) grammar_advance(&g, &s, ids.ids[k]);
            const bool complete = s && g.stack_sets[s].complete;
            CHECK(complete == (texts[i][0] == '+'), "%s: %d (%s)", text, complete, g.err);
            tok_ids_free(&ids);
        }
        grammar_free(&g);
    }
}

// ---- numbers --------------------------------------------------------------------------------------------------------

__extension__ typedef __int128 Wide;                   // bounds, and one above and below them

static const char *wide_text(Wide x, char out[48]) {
    char *at = out + 47;
    const bool negative = x < 0;
    *at = 0;
    do *--at = (char)('0' + (int)(negative ? -(x % 10) : x % 10)); while (x /= 10);
    if (negative) *--at = '-';
    return at;
}

// Integers in a range, with each kind of bound: those near the bounds, near 0 and near powers of ten.
static void check_range(Wide lo, Wide hi, bool open_lo, bool open_hi) {
    char schema[256], text[3][48];
    Grammar g;
    snprintf(schema, sizeof schema, "{\"type\":\"integer\",\"%s\":%s,\"%s\":%s}", open_lo ?
        "exclusiveMinimum" : "minimum",
             wide_text(lo, text[0]), open_hi ? "exclusiveMaximum" : "maximum", wide_text(hi, text[1]));
    const bool ok = grammar_from_schema(&g, &vocab, str(schema), false);
    CHECK(ok == (lo + open_lo <= hi - open_hi), "%s: %s", schema, g.err);
    const Wide near[] = { lo, hi, 0, 10, 100, 1000, -10, -100, lo / 10, hi / 10, lo * 10, hi * 10, (lo + hi) / 2 };
    for (size_t i = 0; ok && i < sizeof near / sizeof *near; i++)
        for (int d = -12; d <= 12; d++) {
            const Wide x = near[i] + d;
            const bool want = lo + open_lo <= x && x <= hi - open_hi, got = accepts(&g, wide_text(x, text[2]));
            if (want != got) CHECK(0, "%s: %s: %d", schema, wide_text(x, text[2]), got);
        }
    CHECK(!ok || !g.failed, "%s: %s", schema, g.err);
    grammar_free(&g);
}

static void test_integers(void) {
    const Wide top = INT64_MAX, safe = 9007199254740991;
    const Wide edges[] = { -top - 1, -safe, -1000, -101, -15, -1, 0, 1, 9, 10, 15, 99, 100, 250, 1000, 4294967295,
        safe, top };
    enum { N = sizeof edges / sizeof *edges };
    for (int i = 0; i < N; i++)
        for (int k = i; k < N; k++) check_range(edges[i], edges[k], (i + k) % 3 == 0, (i + k) % 4 == 1);
    for (int i = 0; i < 60; i++) {
        const Wide lo = (Wide)rnd(4000) - 2000;
        check_range(lo, lo + rnd(i % 2 ? 40 : 3000), rnd(2), rnd(2));
    }
}

// All ranges between small integers: exactly the integers in them, of all with up to four digits, and no other texts.
static void test_small_integers(void) {
    static const int edges[] = { -120, -101, -100, -99, -21, -20, -19, -16, -15, -14, -11, -10, -9, -8, -6, -5, -2, -1, 0, 1, 2,
        4, 5, 6, 9, 10, 11, 12, 14, 15, 16, 19, 20, 21, 49, 50, 51, 89, 90, 98, 99, 100, 101, 109, 110, 115, 199, 200, 999, 1000 };
    static const char *const others[] = { "", "-", "-0", "00", "01", "-01", "015", "1.5", "1e1", "+1", " 1", "0.0", "1_0" };
    enum { N = sizeof edges / sizeof *edges, MOST = 1210 };
    static char texts[2 * MOST + 1][8];
    for (int x = -MOST; x <= MOST; x++) snprintf(texts[x + MOST], sizeof *texts, "%d", x);
    for (int i = 0; i <= N; i++)                       // N: no minimum, no maximum
        for (int k = i; k <= N; k++) {
            char schema[128];
            Grammar g;
            const int lo = i < N ? edges[i] : -9999, hi = k < N ? edges[k] : 9999;
            int n = snprintf(schema, sizeof schema, "{\"type\":\"integer\"");
            if (i < N) n += snprintf(schema + n, sizeof schema - (size_t)n, ",\"minimum\":%d", lo);
            if (k < N) n += snprintf(schema + n, sizeof schema - (size_t)n, ",\"maximum\":%d", hi);
            snprintf(schema + n, sizeof schema - (size_t)n, "}");
            if (!CHECK(grammar_from_schema(&g, &vocab, str(schema), false), "%s: %s", schema, g.err)) continue;
            const int step = i % 7 == k % 7 ? 1 : 3;   // and those at the bounds
            for (int x = -MOST; x <= MOST; x += step) {
                const bool want = lo <= x && x <= hi, got = accepts(&g, texts[x + MOST]);
                if (want != got) CHECK(0, "%s: %d: %d", schema, x, got);
            }
            for (int d = -1; d < 2; d++) {
                if (i < N && accepts(&g, texts[lo + d + MOST]) != (d >= 0 && lo + d <= hi)) CHECK(0, "%s: %d", schema, lo + d);
                if (k < N && accepts(&g, texts[hi + d + MOST]) != (d <= 0 && hi + d >= lo)) CHECK(0, "%s: %d", schema, hi + d);
            }
            for (size_t o = 0; o < sizeof others / sizeof *others; o++)
                if (accepts(&g, others[o]) && !(o == 2 && i == N && k == N))   // any integer may be -0
                    CHECK(0, "%s: '%s' is accepted", schema, others[o]);
            grammar_free(&g);
        }
}

// Numbers with up to three decimals, and one bound or two, against the validator.
static void test_decimals(void) {
    static const char *const bounds[] = { "0", "0.5", "-0.25", "1", "-1", "0.01", "1.005", "12.34", "-3.999",
        "2.5e-1", "9.99" };
    static const char *const steps[] = { "", ",\"multipleOf\":0.25", ",\"multipleOf\":0.01", ",\"multipleOf\":0.5",
        ",\"multipleOf\":3",
                                         ",\"multipleOf\":0.075" };
    enum { N = sizeof bounds / sizeof *bounds };
    for (int i = 0; i < N * N; i++) {
        char schema[256], text[32];
        Grammar g;
        GgufJson s, v;
        size_t at;
        const char *err;
        int n_in = 0;
        const bool open_lo = rnd(2), open_hi = rnd(2), one = rnd(4) == 0;
        int n = snprintf(schema, sizeof schema, "{\"type\":\"number\",\"%s\":%s", open_lo ?
            "exclusiveMinimum" : "minimum",
                         bounds[i / N]);
        if (!one) n += snprintf(schema + n, sizeof schema - (size_t)n, ",\"%s\":%s", open_hi ?
            "exclusiveMaximum" : "maximum",
                                bounds[i % N]);
        snprintf(schema + n, sizeof schema - (size_t)n, "%s}", steps[rnd(6)]);
        gguf_json_parse(schema, strlen(schema), &s, &at, &err);
        const bool ok = grammar_from_schema(&g, &vocab, str(schema), false);
        for (int x = -4100; x <= 13000; x += x > -1100 && x < 1100 ? 1 : 7)
            for (int digits = 0; digits <= 3; digits++) {
                const int scale = digits == 0 ? 1000 : digits == 1 ? 100 : digits == 2 ? 10 : 1, u = x < 0 ? -x : x;
                if (u % scale || (digits > 1 && u > 1300)) continue;
                snprintf(text, sizeof text, "%s%d.%03d", x < 0 ? "-" : "", u / 1000, u % 1000);
                text[strlen(text) - (size_t)(digits ? 3 - digits : 4)] = 0;
                gguf_json_parse(text, strlen(text), &v, &at, &err);
                const bool want = fits(&s, &s, &v), got = ok && accepts(&g, text);
                const bool zeros = digits && text[strlen(text) - 1] == '0';    // of multiples they are not written
                n_in += got;
                if (want != got && !(want && zeros && strstr(schema, "multiple")))
                    CHECK(0, "%s: %s: %d (%s)", schema, text, got, g.err);
            }
        CHECK(ok ? !g.failed && (n_in || strstr(schema, "multiple")) : !strcmp(g.err, "grammar: no text matches it"),
              "%s: %d texts (%s)", schema, n_in, g.err);
        grammar_free(&g);
    }
}

static void test_multiples(void) {
    static const int steps[] = { 2, 3, 5, 7, 10, 12, 25, 64, 100, 144, 250, 1000 };
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        char schema[128], text[32];
        Grammar g;
        snprintf(schema, sizeof schema, "{\"type\":\"integer\",\"multipleOf\":%d,\"minimum\":-1200,\"maximum\":3011}",
            steps[i]);
        CHECK(grammar_from_schema(&g, &vocab, str(schema), false), "%s: %s", schema, g.err);
        for (int x = -1300; x < 3100; x++) {
            const bool want = x % steps[i] == 0 && x >= -1200 && x <= 3011;
            snprintf(text, sizeof text, "%d", x);
            if (accepts(&g, text) != want) CHECK(0, "%s: %s: %d", schema, text, !want);
        }
        CHECK(!g.failed, "%s: %s", schema, g.err);
        grammar_free(&g);
    }
}

// ---- regular expressions --------------------------------------------------------------------------------------------

static void random_regex(TokText *out, int depth) {
    static const char *const items[] = { "a", "b", "c", "[ab]", "[^a]", ".", "\\w" };
    static const char *const repeats[] = { "", "", "", "*", "+", "?", "{2}", "{1,3}", "{2,}" };
    static const char *const groups[] = { "(", "(?:", "(?=", "(?!" };
    for (int n = 1 + (int)rnd(3); n > 0; n--) {
        const char *repeat = repeats[rnd(9)];
        if (depth && rnd(3) == 0) {
            const uint32_t kind = rnd(4);
            tok_text_append(out, groups[kind], strlen(groups[kind]));
            random_regex(out, depth - 1);
            if (rnd(2)) {
                tok_text_append(out, "|", 1);
                random_regex(out, depth - 1);
            }
            tok_text_append(out, ")", 1);
            if (kind > 1) repeat = "";
        } else if (rnd(14) == 0) {
            tok_text_append(out, rnd(2) ? "$" : "^", 1);
            repeat = "";
        } else {
            const char *item = items[rnd(7)];
            tok_text_append(out, item, strlen(item));
        }
        tok_text_append(out, repeat, strlen(repeat));
    }
}

// Random regular expressions, some with bounds of the length: all texts of up to 5 letters against the validator.
static void test_regexes(void) {
    int n_used = 0, n_matches = 0;
    random_state = 3;
    for (int round = 0; round < 400; round++) {
        TokText pattern = { 0 };
        char schema[1024], text[16];
        Grammar g;
        const int min = rnd(3) ? 0 : (int)rnd(4), max = rnd(3) ? 99 : min + (int)rnd(3);
        if (rnd(3)) tok_text_append(&pattern, "^", 1);
        random_regex(&pattern, 2);
        if (rnd(3)) tok_text_append(&pattern, "$", 1);
        int n = snprintf(schema, sizeof schema, "{\"type\":\"string\",\"pattern\":\"");
        for (size_t i = 0; i < pattern.n && n < 900; i++)
            n += snprintf(schema + n, sizeof schema - (size_t)n, pattern.s[i] == '\\' ? "\\\\" : "%c", pattern.s[i]);
        n += snprintf(schema + n, sizeof schema - (size_t)n, "\"");
        if (min) n += snprintf(schema + n, sizeof schema - (size_t)n, ",\"minLength\":%d", min);
        if (max < 99) n += snprintf(schema + n, sizeof schema - (size_t)n, ",\"maxLength\":%d", max);
        snprintf(schema + n, sizeof schema - (size_t)n, "}");
        const bool ok = grammar_from_schema(&g, &vocab, str(schema), false);
        const bool left_out = *g.warnings;
        n_used += ok && !left_out;
        for (int code = 1; code < 243 * 3 && !left_out; code++) {      // base 3, the first digit is 1 or 2
            int len = 0;
            text[len++] = '"';
            for (int rest = code; rest >= 3; rest /= 3) text[len++] = "abc"[rest % 3];
            text[len] = 0;
            const int letters = len - 1;
            const bool fits_length = letters >= min && letters <= max;
            const bool want = fits_length && v_matches((TokStr){ pattern.s, pattern.n }, str(text + 1)) == 1;
            strcat(text, "\"");
            const bool got = ok && accepts(&g, text);
            n_matches += got;
            if (want != got) CHECK(0, "%s: %s: %d (%s)", schema, text, got, g.err);
        }
        CHECK(ok ? !g.failed : !strcmp(g.err, "grammar: no text matches it"), "%s: %s", schema, g.err);
        if (ok && !left_out)
            for (int k = 0; k < 2; k++) {
                char drawn[256];
                if (!draw(&g, schema, drawn, sizeof drawn)) continue;
                GgufJson s, v;
                size_t at;
                const char *err;
                gguf_json_parse(schema, strlen(schema), &s, &at, &err);
                CHECK(gguf_json_parse(drawn, strlen(drawn), &v, &at, &err) == 0 && fits(&s, &s, &v), "%s: %s", schema,
                    drawn);
            }
        grammar_free(&g);
        tok_text_free(&pattern);
    }
    CHECK(n_used > 200 && n_matches > 10000, "%d expressions, %d matches", n_used, n_matches);
}

int main(int argc, char **argv) {
    File f;
    if (!open_vocab(&f, MODEL) || !CHECK(tok_init(&t, &f.v) == 0, "%s", t.err) || !CHECK(grammar_vocab_init(&vocab, &t),
        "vocabulary")) return test_done("schema");
    test_file(argc > 1 && strcmp(argv[1], "-samples") == 0);
    test_cases();
    test_calls();
    test_integers();
    test_small_integers();
    test_decimals();
    test_multiples();
    test_regexes();
    grammar_vocab_free(&vocab);
    tok_free(&t);
    close_vocab(&f);
    return test_done("schema");
}
