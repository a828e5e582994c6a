/* test_grammar.c - grammars, JSON schemas and tools as constraints: texts that they accept and refuse, by bytes and by
 * tokens; masks compared with trying every token; random grammars against a naive matcher; answers sampled from masks
 * against a schema validator; errors, limits, memory. build/test_grammar [-time] also prints the time of masks. Uses
 * the tokenizer of models/gemma4-mini-q8_0.gguf, and Gemma 4's vocabulary if there is gzip. */
#define _GNU_SOURCE
#include <math.h>
#include "../gguf.h"
#define TOKENIZER_IMPLEMENTATION
#include "../tokenizer.h"
#include "../parts/grammar.h"
#include "../parts/pattern.h"
#include "../parts/schema.h"

static bool is_complete(const Grammar *g, GrammarState s) { return g->stack_sets && g->stack_sets[s].complete; }
#include "test.h"
#include "vocab.h"
#include <time.h>

#define MODEL "models/gemma4-mini-q8_0.gguf"

static Tokenizer t;
static GrammarVocab vocab;

// ---- feeding --------------------------------------------------------------------------------------------------------

// Feeds a text. Returns 2: complete; 1: more must follow; 0: refused.
static int feed_bytes(Grammar *g, const char *s, size_t n) {
    GrammarState state = grammar_start(g, START_ANSWER);
    g->work = GRAMMAR_WORK;
    for (size_t i = 0; i < n && state; i++) state = next_set(g, state, g->class_of[(unsigned char)s[i]]);
    return is_complete(g, state) ? 2 : state != 0;
}

static bool in_mask(const uint32_t *mask, int32_t id) { return mask[id / 32] >> id % 32 & 1; }

// The same by tokens, which the mask must allow.
static int feed_ids(Grammar *g, const TokIds *ids) {
    uint32_t *mask = alloc(((size_t)g->t->n_tokens + 31) / 32 * 4);
    GrammarState state = grammar_start(g, START_ANSWER);
    for (size_t i = 0; i < ids->n && state; i++) {
        const bool allowed = grammar_mask(g, state, mask, g->t->n_tokens) && in_mask(mask, ids->ids[i]);
        const bool taken = grammar_advance(g, &state, ids->ids[i]);
        CHECK(allowed == taken, "token %d of %zu: mask %d, advance %d (%s)", (int)i, ids->n, allowed, taken, g->err);
    }
    free(mask);
    return is_complete(g, state) ? 2 : state != 0;
}

static int feed_tokens(Grammar *g, const char *s, size_t n, TokMode mode) {
    TokIds ids = { 0 };
    CHECK(tok_encode(&t, s, n, mode, &ids) == 0, "%s", t.err);
    const int got = feed_ids(g, &ids);
    tok_ids_free(&ids);
    return got;
}

// Texts one after another, each with a sign: + complete, . incomplete, - refused.
static void check_texts(Grammar *g, const char *what, const char *const *texts) {
    for (; *texts; texts++) {
        const char *s = *texts + 1;
        const int want = **texts == '+' ? 2 : **texts == '.';
        uint32_t c;
        bool utf8 = true;                              // tokens cannot represent invalid UTF-8
        for (size_t i = 0; utf8 && s[i]; ) {
            const int len = tok_read_utf8((const unsigned char *)s + i, strlen(s + i), &c);
            utf8 = len > 0;
            i += utf8 ? (size_t)len : 0;
        }
        const int bytes = feed_bytes(g, s, strlen(s)), tokens = utf8 ? feed_tokens(g, s, strlen(s), TOK_PLAIN) : want;
        CHECK(bytes == want, "%.90s\n    %s: by bytes %d, want %d (%s)", what, s, bytes, want, g->err);
        CHECK(tokens == want, "%.90s\n    %s: by tokens %d, want %d (%s)", what, s, tokens, want, g->err);
        if (want == 2) for (size_t i = 0; i < strlen(s); i++)
            if (!feed_bytes(g, s, i)) CHECK(0, "%.90s\n    %s: refused after %zu bytes", what, s, i);
    }
}

// ---- GBNF -----------------------------------------------------------------------------------------------------------

static void test_gbnf(void) {
    static const struct { const char *text, *texts[16]; } cases[] = {
        { "root ::= \"yes\" | \"no\"", { "+yes", "+no", ".ye", ".", "-x", "-yesno" } },
        { "root ::= a \" \" b # comment\n\na ::= [a-c]+\r\nb ::= [^a-c\\n]*  # more\n", { "+abc xyz", "+a ", ".a",
          "- x", "-a b", "-a \n" } },
        { "root ::= (\n \"x\" # first\n | \"y\"\n)\n  | \"z\"\n", { "+x", "+y", "+z", "-w" } },
        { "root ::=\n  \"a\"{2,3} |\n \"b\"{2} | \"c\"{2,} | \"d\"? \"e\"", { "+aa", "+aaa", "-aaaa", ".a", "+bb",
          "-bbb", "+cc", "+cccc", ".c", "+e", "+de" } },
        { "root ::= \"\\x41\\u00e9\\U0001F600\\\"\\n\\\\\"", { "+A\xc3\xa9\xf0\x9f\x98\x80\"\n\\", ".A\xc3", "-B" } },
        { "root ::= [\\u00e0-\\u00ff\xe2\x82\xac]+ .",
          { "+\xc3\xa0\xc3\xbf!", "+\xe2\x82\xac\xf0\x9f\x98\x80", "-\xc3\x9f" } },
        { "root ::= [a\\-z\\]]+", { "+a-z]", "-b" } },
        { "root ::= [a-]+", { "+a-", "-b" } },
        { "root ::= \"(\" root \")\" | \"\"", { "+", "+()", "+((()))", ".(()", "-)", "-())" } },
        { "root ::= item (\",\" item)*\nitem ::= [0-9]{1,2}", { "+1", "+12,3", ".12,", "-123" } },
        { "root ::= ((\"a\"{2} \"b\"){2} \"c\"){2}", { "+aabaabcaabaabc", ".aabaabc", "-aabaac", "-aabaabcc" } },
        { "root ::= (\"a\"?){3} \"b\"", { "+b", "+ab", "+aaab", "-aaaa" } },
        { "root ::= (\"a\"*)* \"b\"", { "+b", "+aaab", ".aaaa" } },
        { "root ::= list\nlist ::= \"x\" list | \"x\"", { "+x", "+xxxxxxxxxxxxxxxxxxxxxxxxxxxx", "-y" } },
        { "root ::= \"a\" | never | \"c\" never\nnever ::= \"b\" never", { "+a", "-b", "-c" } },
        { "root ::= .", { "+\xed\x9f\xbf", "+\xee\x80\x80", "-\xed\xa0", "-\xc0", "-\xf4\x90", "-\xff" } },
        { "root ::= \"a\" x? \"c\"\nx ::= \"b\" x", { "+ac", "-ab" } },
        { "my-rule_1 ::= \"k\"\nroot ::= my-rule_1{0,2}", { "+", "+k", "+kk", "-kkk" } },
        { "root ::= [0-9]{100,200}", { ".1234567890", "-x" } },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Grammar g;
        if (CHECK(grammar_from_gbnf(&g, &vocab, str(cases[i].text)), "%s: %s", cases[i].text, g.err))
            check_texts(&g, cases[i].text, cases[i].texts);
        grammar_free(&g);
    }
}

// Ranges of characters, at and around their ends and the limits of UTF-8 lengths.
static void test_ranges(void) {
    static const uint32_t edges[] = { 0, 0x7F, 0x80, 0x7FF, 0x800, 0xFFF, 0x1000, 0xD7FF, 0xE000, 0xFFFF, 0x10000,
                                      0x3FFFF, 0x40000, 0x10FFFF };
    enum { N = sizeof edges / sizeof *edges };
    for (int round = 0; round < 200; round++) {
        Grammar g;
        Chars c = { .n = 0 };
        uint32_t ends[2];
        for (int k = 0; k < 2; k++) {
            const int64_t x = (int64_t)edges[rnd(N)] + (int64_t)rnd(200) - 100;
            ends[k] = x < 0 ? 0 : x > LAST_CHAR ? LAST_CHAR : (uint32_t)x;
        }
        const uint32_t lo = ends[ends[0] > ends[1]], hi = ends[ends[0] <= ends[1]];
        const bool inverted = rnd(2);
        grammar_init(&g, &vocab);
        add_chars(&c, lo, hi);
        if (inverted) invert_chars(&c);
        if (grammar_ready(&g, expr_chars(&g, &c)))     // else the set is empty
            for (int k = 0; k < 60; k++) {
                const int64_t near = (int64_t)(k % 3 ? ends[k % 2] : edges[rnd(N)]) + (int64_t)rnd(200) - 100;
                const uint32_t x = near < 0 || near > LAST_CHAR ||
                    (near >= 0xD800 && near < 0xE000) ? 'a' : (uint32_t)near;
                char text[4];
                const bool want = (lo <= x && x <= hi) != inverted, got = feed_bytes(&g, text, gguf_utf8(x, text)) == 2;
                CHECK(got == want, "%sU+%04X..U+%04X: U+%04X is %d", inverted ? "not " : "", lo, hi, x, got);
            }
        grammar_free(&g);
    }
}

static void test_gbnf_errors(void) {
    static const struct { const char *text, *want; } cases[] = {
        { "", "undefined rule 'root'" }, { "x ::= \"a\"", "undefined rule 'root'" },
        { "root ::= x", "line 1: undefined rule 'x'" },
        { "root ::= \"a\"\n\nroot ::= \"b\"", "line 3: the rule 'root' is defined twice" }, { "root = \"a\"",
          "line 1: expected '::='" },
        { "root ::= \"a", "line 1: expected a '\"'" }, { "root ::= [a", "line 1: expected a ']'" },
          { "root ::= (\"a\"\n", "expected a ')'" },
        { "root ::= \"\\q\"", "line 1: expected one of" }, { "root ::= \"\\x4\"", "expected 2 hexadecimal" },
          { "root ::= \"\\ud800\"", "U+D800" },
        { "root ::= [z-a]", "ascending range" }, { "root ::= \"a\"{3,2}", "m <= n" },
        { "root ::= \"a\"{,2}", "expected {m}" },
        { "root ::= \"a\"{99999999}", "at most" }, { "root ::= root \"a\" | \"b\"",
          "line 1: the rule 'root' begins with itself" },
        { "root ::= a\na ::= \"\"? b\nb ::= a \"x\" | \"y\"", "begins with itself" }, { "root ::= \"a\" ]",
          "expected the rest of a rule" },
        { "root ::= <nothing>", "expected a control token" }, { "root ::= <[99999999]>", "expected a control token" },
          { "root ::= never\nnever ::= \"b\" never", "no text matches" },
        { "root ::= \"\xff\"", "expected UTF-8" }, { "root ::= \"a\"*****", "at most 4 repetition operators" },
        { "::= \"a\"",
          "expected the name" },
        { "root ::= (\"a\"?){0,999999}", "may be empty" }, { "root ::= (a b)+ \"c\"\na ::= \"\"\nb ::= root?",
          "begins with itself" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Grammar g;
        const bool ok = grammar_from_gbnf(&g, &vocab, str(cases[i].text));
        CHECK(!ok && strstr(g.err, cases[i].want) && !strchr(g.err, '\n'), "%s: '%s', want '%s'", cases[i].text,
          ok ? "accepted" : g.err, cases[i].want);
        grammar_free(&g);
    }
}

// ---- schemas --------------------------------------------------------------------------------------------------------

#define ADDRESS "\"$defs\":{\"address\":{\"type\":\"object\",\"properties\":{\"zip\":{\"type\":\"string\"," \
                "\"pattern\":\"^[0-9]{5}$\"}},\"required\":[\"zip\"]}}"

static const struct { const char *schema, *texts[16]; } schemas[] = {
    { "{\"type\":\"object\"}", { "+{}", "+{\"a\":1}",
      "+{\"a\": [1, 2.5e-3, \"x\\n\", true, null, {}], \"b\":{\"c\":[]}}", "-[", "-{a", "-{ ", "-{\"a\":1,}" } },
    { "{}", { "+1", "+\"a\"", "+[]", "+null", "+-0.5", "-01", "-+1", "-{\"a\":1}x", "-tru1" } },
    { "true", { "+[[1]]" } },
    { "{\"type\":\"string\"}", { "+\"\"", "+\"a\\u00e9\\\\\\/\"", "-\"\\ud83d", "-\"\n", "-\"\\x", "-a",
      "+\"\xf0\x9f\x98\x80\"", "-\"\xff" } },
    { "{\"type\":\"string\",\"minLength\":2,\"maxLength\":3}", { ".\"a", "+\"ab\"", "+\"a\xc3\xa9\\n\"", "-\"abcd",
      "-\"a\"", "+\"\xf0\x9f\x98\x80\xf0\x9f\x98\x80\"" } },
    { "{\"type\":\"integer\"}", { "+0", "+-12", "+123456789012345678", "-1.0", "-1234567890123456789", "-00" } },
    { "{\"type\":\"number\"}", { "+0.25", "+-1e10", ".1.", "-.5" } },
    { "{\"type\":\"integer\",\"minimum\":-5,\"maximum\":123}", { "+-5", "--6", "+0", "+99", "+100", "+123", "-124",
      "-130", "--10" } },
    { "{\"type\":\"integer\",\"exclusiveMinimum\":9,\"exclusiveMaximum\":21}", { ".1", "+10", "+19", "+20", "-21", "-9",
      "-100" } },
    { "{\"type\":\"integer\",\"minimum\":1}", { "+1", "-0", "--", "+99999", "+987654321012345678",
                                                "-1234567890123456789" } },
    { "{\"type\":\"integer\",\"maximum\":-10}", { "+-10", ".-9", "-1", "+-11", "+-999" } },
    { "{\"type\":\"number\",\"minimum\":0,\"maximum\":1}", { "+0", "+0.5", "+1", "-1.5", "--", "+0.0" } },
    { "{\"type\":\"number\",\"exclusiveMinimum\":0}", { ".0", ".0.0", "+0.01", "+3", "+3.0" } },
    { "{\"type\":\"number\",\"minimum\":-2,\"exclusiveMaximum\":3}",
      { "+-2", "--2.5", "+-1.5", "+2.99", "-3", "+-0.5" } },
    { "{\"type\":\"boolean\"}", { "+true", "+false", "-null" } },
    { "{\"type\":[\"string\",\"null\"]}", { "+null", "+\"x\"", "-1" } },
    { "{\"type\":\"string\",\"nullable\":true}", { "+null", "+\"x\"", "-1" } },
    { "{\"enum\":[\"red\",\"gr\\u00e9y\",1,null,{\"a\":[1,\"b\"]},[]]}", { "+\"red\"", "+\"gr\xc3\xa9y\"", "+1",
      "+null", "+{\"a\":[1,\"b\"]}", "+[]", "-\"r\"" } },
    { "{\"type\":\"string\",\"enum\":[\"a\",\"b\",3]}", { "+\"a\"", "-3" } },
    { "{\"const\":\"x\\\"y\"}", { "+\"x\\\"y\"", "-\"y" } },
    { "{\"type\":\"array\",\"items\":{\"type\":\"integer\"}}",
      { "+[]", "+[1]", "+[1, 2,3]", "-[1,]", "-[ ", "-[1,  2" } },
    { "{\"type\":\"array\",\"items\":{\"type\":\"integer\"},\"minItems\":2,\"maxItems\":3}", { ".[1", "-[1]", "+[1,2]",
      "+[1,2,3]", "-[1,2,3,", "-[]" } },
    { "{\"type\":\"array\",\"items\":{},\"maxItems\":0}", { "+[]", "-[1" } },
    { "{\"type\":\"array\",\"minItems\":1}", { "-[]", "+[null]", "+[1,\"a\"]" } },
    { "{\"type\":\"array\",\"prefixItems\":[{\"type\":\"integer\"},{\"type\":\"string\"}],"
      "\"items\":{\"type\":\"boolean\"}}",
      { "+[]", "+[1]", "+[1,\"a\"]", "+[1,\"a\",true,false]", "-[\"a\"", "-[1,2" } },
    { "{\"type\":\"array\",\"prefixItems\":[{\"type\":\"integer\"},{\"type\":\"string\"}],\"items\":false,"
      "\"minItems\":2}",
      { "-[1]", "+[1,\"a\"]", "-[1,\"a\"," } },
    { "{\"type\":\"array\",\"items\":[{\"type\":\"integer\"},{\"type\":\"null\"}],\"maxItems\":1}",
      { "+[]", "+[1]", "-[1," } },
    { "{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"integer\"},\"b\":{\"type\":\"integer\"},"
      "\"c\":{\"type\":\"integer\"}},\"required\":[\"b\"]}",
      { "+{\"b\":1}", "+{\"a\":1,\"b\":2}", "+{\"a\":1, \"b\": 2, \"c\": 3}", "+{\"b\":2,\"c\":3}", "-{}", "-{\"c\"",
        "-{\"a\":1,\"c\"", "-{\"b\":1,\"d\"", "-{\"a\":1}", "-{\"b\":1,\"a\"" } },
    { "{\"properties\":{\"a\":{\"type\":\"integer\"},\"b\":{\"type\":\"integer\"}},\"additionalProperties\":false}",
      { "+{}", "+{\"a\":1}", "+{\"b\":1}", "+{\"a\":1,\"b\":1}", "-{\"b\":1,\"a\"" } },
    { "{\"type\":\"object\",\"properties\":{\"ab\":{\"type\":\"integer\"}},"
      "\"additionalProperties\":{\"type\":\"string\"}}",
      { "+{}", "+{\"ab\":1}", "+{\"ab\":1,\"abc\":\"x\"}", "+{\"a\":\"x\"}", "+{\"\":\"x\"}", "-{\"ab\":\"x",
        "-{\"a\":1", "+{\"\xc3\xa9\":\"x\",\"b\":\"\"}" } },
    { "{\"properties\":{\"b\":{},\"a\":{},\"bc\":{},\"ab\":{}},\"additionalProperties\":{\"type\":\"null\"}}",
      { "+{\"b\":1,\"bcd\":null}", "+{\"ba\":null}", "+{\"bc\":1}", "-{\"bcd\":1", "-{\"c\":null,\"bc\"",
        "-{\"c\":null,\"ab\"" } },
    { "{\"type\":\"object\",\"additionalProperties\":{\"type\":\"integer\"}}",
      { "+{\"x\":1,\"y\": 2}", "-{\"x\":\"", "+{}" } },
    { "{\"type\":\"object\",\"required\":[\"q\"]}", { "+{\"q\":[1]}", "-{}", "+{\"q\":1,\"r\":2}" } },
    { "{\"anyOf\":[{\"type\":\"integer\"},{\"type\":\"object\",\"properties\":{\"k\":{\"const\":1}},"
      "\"required\":[\"k\"]}]}",
      { "+7", "+{\"k\":1}", "-{}", "-\"" } },
    { "{\"oneOf\":[{\"type\":\"string\"},{\"type\":\"null\"}]}", { "+null", "+\"\"", "-1" } },
    { "{\"oneOf\":[{\"type\":\"object\",\"properties\":{\"t\":{\"const\":\"a\"},\"x\":{}},\"required\":[\"t\"]},"
      "{\"type\":\"object\",\"properties\":{\"t\":{\"const\":\"b\"},\"y\":{}},\"required\":[\"t\"]}]}",
      { "+{\"t\":\"a\"}", "+{\"t\":\"b\",\"y\":1}", "-{\"t\":\"b\",\"x" } },
    { "{\"oneOf\":[{\"type\":\"object\",\"properties\":{\"a\":{}},\"required\":[\"a\"]},{\"type\":\"object\","
      "\"properties\":{\"b\":{}},\"required\":[\"b\"]}]}",
      { "+{\"a\":1}", "+{\"b\":1}", "-{}" } },
    { "{\"type\":\"object\",\"properties\":{\"a\":{},\"b\":{}},\"additionalProperties\":false,"
      "\"anyOf\":[{\"required\":[\"a\"]},{\"required\":[\"b\"]}]}",
      { "+{\"a\":1}", "+{\"b\":1}", "+{\"a\":1,\"b\":2}", "-{}" } },
    { "{\"allOf\":[{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"integer\"}},\"required\":[\"a\"]},"
      "{\"properties\":{\"b\":{\"type\":\"string\"}},\"required\":[\"b\"]}]}",
      { "+{\"a\":1,\"b\":\"\"}", "-{\"a\":1}" } },
    { "{\"allOf\":[{\"$ref\":\"#/$defs/address\"}],\"description\":\"x\"," ADDRESS "}", { "+{\"zip\":\"12345\"}", "-{}",
      "-{\"zip\":\"1234\"", "-{\"zip\":\"123456" } },
    { "{\"allOf\":[{\"properties\":{\"n\":{\"minimum\":3}}},{\"properties\":{\"n\":{\"type\":\"integer\","
      "\"maximum\":5}},\"required\":[\"n\"]}]}",
      { "+{\"n\":3}", "-{\"n\":2", "-{\"n\":6" } },
    { "{\"$ref\":\"#/$defs/node\",\"$defs\":{\"node\":{\"type\":\"object\","
      "\"properties\":{\"v\":{\"type\":\"integer\"},\"next\":{\"anyOf\":[{\"$ref\":\"#/$defs/node\"},"
      "{\"type\":\"null\"}]}},\"required\":[\"v\",\"next\"]}}}",
      { "+{\"v\":1,\"next\":null}", "+{\"v\":1,\"next\":{\"v\":2,\"next\":{\"v\":3,\"next\":null}}}", "-{\"v\":1}" } },
    { "{\"type\":\"object\",\"properties\":{\"c\":{\"type\":\"array\",\"items\":{\"$ref\":\"#\"}}}}", { "+{}",
      "+{\"c\":[{},{\"c\":[]}]}", "-{\"c\":[1" } },
    { "{\"definitions\":{\"a/b~c\":{\"type\":\"null\"}},\"$ref\":\"#/definitions/a~1b~0c\"}", { "+null", "-1" } },
    { "{\"type\":\"string\",\"pattern\":\"^(?:ab|c)+[x-z]?\\\\d{2}$\"}", { "+\"abc12\"", "+\"cx99\"", "-\"ab1\"",
      "-\"d", ".\"ab12" } },
    { "{\"type\":\"string\",\"pattern\":\"b\"}", { "+\"abc\"", "+\"b\"", "-\"ac\"", "+\"\\\\b\\n\"" } },
    { "{\"type\":\"string\",\"pattern\":\"^[^a]\\\\s\\\\.\\\"$|^\\\\W$\"}", { "+\"b .\\\"\"", "+\"\\\\\\t.\\\"\"",
      "-\"a .", "+\"!\"", "-\"a\"" } },
    { "{\"type\":\"string\",\"format\":\"date\"}", { "+\"2024-02-29\"", "-\"2023-02-29", "+\"2000-02-29\"",
      "-\"1900-02-29", "-\"2023-13", "-\"2023-04-31", "+\"2023-12-31\"" } },
    { "{\"type\":\"string\",\"format\":\"time\"}", { "+\"23:59:59Z\"", "+\"00:00:00.25+02:00\"", "-\"24" } },
    { "{\"type\":\"string\",\"format\":\"date-time\"}", { "+\"2024-02-29T01:02:03Z\"", "-\"2024-02-29 " } },
    { "{\"type\":\"string\",\"format\":\"uuid\"}", { "+\"123e4567-e89b-12d3-a456-426614174000\"", "-\"123e4567e" } },
    { "{\"type\":\"string\",\"format\":\"ipv4\"}", { "+\"127.0.0.1\"", "-\"256", "-\"1.2.3\"" } },
    { "{\"type\":\"string\",\"format\":\"email\"}", { "+\"a.b@c-d.org\"", "-\"a@b\"" } },
    { "{\"title\":\"t\",\"x-note\":1,\"default\":3,\"type\":\"integer\",\"examples\":[1]}", { "+5" } },
    { "{\"type\":\"object\",\"properties\":{\"a\":false,\"b\":{\"type\":\"null\"}}}",
      { "+{}", "-{\"a", "+{\"b\":null}" } },
    { "{\"type\":\"object\",\"properties\":{\"a\\\"\\n\":{\"type\":\"null\"},\"a\\u0022\\n\":{\"type\":\"null\"}}}",
      { "+{\"a\\\"\\n\":null}" } },
};

static void test_schemas(void) {
    for (size_t i = 0; i < sizeof schemas / sizeof *schemas; i++) {
        Grammar g;
        if (CHECK(grammar_from_schema(&g, &vocab, str(schemas[i].schema), false), "%s: %s", schemas[i].schema, g.err))
            check_texts(&g, schemas[i].schema, schemas[i].texts);
        grammar_free(&g);
    }
}

static void test_schema_errors(void) {
    static const struct { const char *schema, *want; } cases[] = {
        { "", "schema: byte 0: expected" }, { "{", "schema: byte 1" }, { "3", "schema: #: expected a schema" },
          { "{\"type\":\"strin\"}", "#/type: expected the name of a type" },
        { "{\"properties\":{\"a\":{\"contains\":{}}}}",
          "schema: #/properties/a/contains: this keyword is not supported" },
        { "{\"type\":\"object\",\"patternProperties\":{\"(\":{}}}", "#/patternProperties/(: byte 1: expected a ')'" },
        { "{\"items\":{\"if\":1}}", "#/items/if" },
        { "{\"$ref\":\"#/$defs/x\"}", "#/$ref: expected # or a path" }, { "{\"$ref\":\"http://x\"}", "#/$ref" },
          { "{\"$ref\":\"#\"}", "refers only to itself" },
        { "{\"anyOf\":[{\"$ref\":\"#\"},{\"type\":\"null\"}]}", "refers only to itself" },
          { "{\"type\":\"string\",\"minLength\":-1}", "#/minLength: expected an integer" },
        { "{\"type\":\"string\",\"pattern\":\"^(?<=a)\"}", "#/pattern: byte" },
          { "{\"type\":\"string\",\"pattern\":\"(a\"}", "expected a ')'" },
        { "{\"type\":\"string\",\"pattern\":\"\\\\bx\"}", "#/pattern" }, { "{\"type\":\"string\",\"pattern\":\"a)\"}",
          "expected the end of the pattern" },
        { "{\"type\":\"number\",\"minimum\":\"0\"}", "#/minimum: expected a number" },
          { "{\"type\":\"number\",\"multipleOf\":0}", "#/multipleOf: expected a number above 0" },
        { "{\"type\":\"number\",\"multipleOf\":1.2345678}", "#/multipleOf: expected at most 6 digits; without strict" },
        { "{\"type\":\"array\",\"uniqueItems\":true}", "#/uniqueItems" }, { "{\"type\":\"array\",\"contains\":{}}",
          "#/contains" },
        { "{\"oneOf\":[{\"type\":\"number\"},{\"type\":\"integer\"}]}",
          "#/oneOf/1: a value may match both this and number 0" },
        { "{\"oneOf\":[{\"type\":\"object\",\"properties\":{\"a\":{}}},{\"type\":\"object\","
          "\"properties\":{\"b\":{}}}]}",
          "#/oneOf/1" },
        { "{\"allOf\":[{\"prefixItems\":[{\"type\":\"string\"}]},{\"prefixItems\":[{}]}]}",
          "two combined schemas both have it" },
        { "{\"allOf\":[{\"properties\":{\"a\":{}},\"additionalProperties\":false},{\"properties\":{\"b\":{}},"
          "\"required\":[\"b\"]}]}", "no text matches" },
        { "{\"type\":\"object\",\"properties\":{},\"minProperties\":2}", "no text matches" },
          { "{\"enum\":[{}],\"type\":\"object\",\"maxProperties\":3}",
            "#/maxProperties: not enforced together with enum or const" },
        { "{\"enum\":[]}", "no text matches" }, { "false", "no text matches" },
          { "{\"type\":\"integer\",\"minimum\":5,\"maximum\":4}", "no text matches" },
        { "{\"type\":\"object\",\"properties\":{\"n\":{\"$ref\":\"#\"}},\"required\":[\"n\"]}", "no text matches" },
          { "{\"type\":\"string\",\"\xff\":1}", "expected UTF-8" },
        { "{\"allOf\":[{\"type\":\"string\"},{\"type\":\"integer\"}]}", "no text matches" },
          { "{\"type\":\"object\",\"required\":[\"b\"],\"additionalProperties\":false}", "no text matches" },
        { "{\"type\":\"object\",\"dependentRequired\":{}}", "not supported" },
          { "{\"anyOf\":[{\"type\":\"string\"}],\"oneOf\":[{\"type\":\"null\"}]}", "no text matches" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Grammar g;
        const bool ok = grammar_from_schema(&g, &vocab, str(cases[i].schema), true);
        CHECK(!ok && strstr(g.err, cases[i].want) && !strchr(g.err, '\n'), "%s: '%s', want '%s'", cases[i].schema,
          ok ? "accepted" : g.err, cases[i].want);
        grammar_free(&g);
    }
}

// ---- answers sampled from masks, against a validator ----------------------------------------------------------------

static bool same_json(const GgufJson *a, const GgufJson *b) {          // compares texts, except for escapes
    if (a->type != b->type) return false;
    if (a->type == GGUF_J_STRING) {
        const TokStr x = json_text(a), y = json_text(b);
        const bool same = same_text(x, y);
        free_str(x);
        free_str(y);
        return same;
    }
    return a->n == b->n && memcmp(a->s, b->s, a->n) == 0;
}

static bool fits_type(const GgufJson *v, const GgufJson *type) {
    static const char *const names[] = { "null", "boolean", "boolean", "number", "string", "array", "object" };
    GgufJson rest = *type, one;
    if (type->type == GGUF_J_ARRAY) {
        while (gguf_json_next(&rest, NULL, &one)) if (fits_type(v, &one)) return true;
        return false;
    }
    int64_t n;
    return gguf_json_is(type, names[v->type]) || (gguf_json_is(type, "integer") && v->type == GGUF_J_NUMBER
        && gguf_json_int(v, INT64_MIN, INT64_MAX, &n));
}

static size_t count_chars(const GgufJson *v) {
    const TokStr s = json_text(v);
    size_t n = 0;
    for (size_t i = 0; i < s.n; i++) n += ((unsigned char)s.s[i] & 0xC0) != 0x80;
    free_str(s);
    return n;
}

static bool fits(const GgufJson *root, const GgufJson *schema, const GgufJson *v);

static bool fits_object(const GgufJson *root, const GgufJson *schema, const GgufJson *v) {
    GgufJson rest = field(schema, "required"), key, x, y, properties = field(schema, "properties"),
        other = field(schema, "additionalProperties");
    while (rest.type == GGUF_J_ARRAY && gguf_json_next(&rest, NULL, &x)) {
        const TokStr name = json_text(&x);
        const bool there = gguf_json_get(v, name.s, &y);
        free_str(name);
        if (!there) return false;
    }
    for (rest = *v; gguf_json_next(&rest, &key, &x); ) {
        const TokStr name = json_text(&key);
        const bool known = properties.type == GGUF_J_OBJECT && gguf_json_get(&properties, name.s, &y);
        free_str(name);
        if (known ? !fits(root, &y, &x) : other.type != GGUF_J_NULL && !fits(root, &other, &x)) return false;
    }
    return true;
}

static bool fits_array(const GgufJson *root, const GgufJson *schema, const GgufJson *v) {
    GgufJson rest = *v, x, items = field(schema, "items"), first = field(schema, "prefixItems"), want;
    double lo = 0, hi = 1e9, n = 0;
    GgufJson bound = field(schema, "minItems");
    gguf_json_float(&bound, &lo);
    bound = field(schema, "maxItems");
    gguf_json_float(&bound, &hi);
    if (items.type == GGUF_J_ARRAY) {
        first = items;
        items = (GgufJson){ GGUF_J_NULL, "null", 4 };
    }
    for (; gguf_json_next(&rest, NULL, &x); n++) {
        if (first.type == GGUF_J_ARRAY && gguf_json_next(&first, NULL, &want)) {
            if (!fits(root, &want, &x)) return false;
        } else if (items.type != GGUF_J_NULL && !fits(root, &items, &x)) return false;
    }
    return n >= lo && n <= hi;
}

// A validator for the parts of JSON Schema that are used above, without pattern and format.
static bool fits(const GgufJson *root, const GgufJson *schema, const GgufJson *v) {
    static const struct { const char *name; int what; } bounds[] = { { "minimum", 0 }, { "maximum", 1 },
        { "exclusiveMinimum", 2 }, { "exclusiveMaximum", 3 } };
    GgufJson x, rest, type;
    double a, b;
    int n = 0;
    if (schema->type != GGUF_J_OBJECT) return schema->type == GGUF_J_TRUE;
    if (gguf_json_get(schema, "$ref", &x)) {           // the last part of the path names a definition
        const TokStr path = json_text(&x);
        GgufJson defs = field(root, strstr(path.s, "definitions") ? "definitions" : "$defs");
        const char *name = path.n > 1 ? strrchr(path.s, '/') + 1 : NULL;
        const bool ok = !name ? fits(root, root, v) : gguf_json_get(&defs, strchr(name, '~') || strstr(path.s,
          "~1") ? "a/b~c" : name, &x) && fits(root, &x, v);
        free_str(path);
        if (!ok) return false;
    }
    if (v->type == GGUF_J_NULL && gguf_json_get(schema, "nullable", &x)) return true;
    if (gguf_json_get(schema, "type", &type) && !fits_type(v, &type)) return false;
    if (gguf_json_get(schema, "const", &x) && !same_json(&x, v)) return false;
    if (gguf_json_get(schema, "enum", &rest)) {
        while (!n && gguf_json_next(&rest, NULL, &x)) n = same_json(&x, v);
        if (!n) return false;
    }
    for (int k = 0; k < 3; k++) {
        if (!gguf_json_get(schema, k == 0 ? "allOf" : k == 1 ? "anyOf" : "oneOf", &rest)) continue;
        int held = 0, all = 0;
        while (gguf_json_next(&rest, NULL, &x)) {
            all++;
            held += fits(root, &x, v);
        }
        if (k == 0 ? held < all : k == 1 ? held == 0 : held != 1) return false;
    }
    if (v->type == GGUF_J_NUMBER && gguf_json_float(v, &a))
        for (int k = 0; k < 4; k++)
            if (gguf_json_get(schema, bounds[k].name, &x) && gguf_json_float(&x, &b)
              && (k == 0 ? a < b : k == 1 ? a > b : k == 2 ? a <= b : a >= b)) return false;
    if (v->type == GGUF_J_STRING) {
        if (gguf_json_get(schema, "minLength", &x) && gguf_json_float(&x, &b) && (double)count_chars(v) < b)
            return false;
        if (gguf_json_get(schema, "maxLength", &x) && gguf_json_float(&x, &b) && (double)count_chars(v) > b)
            return false;
    }
    return v->type == GGUF_J_OBJECT ? fits_object(root, schema, v) : v->type == GGUF_J_ARRAY ? fits_array(root, schema,
        v) : true;
}

// A random token of the mask; when a text is long, preferably one that ends it.
static int32_t draw_token(const uint32_t *mask, size_t length) {
    static int32_t allowed[1 << 18], closing[1 << 18];
    int n = 0, n_closing = 0;
    for (int32_t id = 0; id < t.n_tokens; id++) {
        if (!in_mask(mask, id)) continue;
        allowed[n++] = id;
        const TokStr piece = tok_piece(&t, id, true);
        const bool ends = id == t.quote || id == t.channel_close || (piece.n == 1 && strchr("\"]}0", piece.s[0]));
        if (length > 30 && (tok_is_stop(&t, id) || id == t.call_close)) return id;
        if (length > 30 && ends) closing[n_closing++] = id;
    }
    if (!n) return -1;
    return n_closing && rnd(4) ? closing[rnd((uint32_t)n_closing)] : allowed[rnd((uint32_t)n)];
}

// Samples until the text is complete. False: it became too long, which is not a failure.
static bool draw_text(Grammar *g, TokIds *ids, TokText *text, GrammarStart how) {
    uint32_t *mask = alloc(((size_t)t.n_tokens + 31) / 32 * 4);
    GrammarState s = grammar_start(g, how);
    bool done = false;
    text->n = ids->n = 0;
    while (!done && text->n < 600) {
        if (!CHECK(grammar_mask(g, s, mask, t.n_tokens), "no mask: %s after %.*s", g->err, (int)text->n, text->s))
            break;
        const int32_t id = draw_token(mask, text->n);
        if (!CHECK(grammar_advance(g, &s, id), "token %d of the mask is refused", id)) break;
        append(ids, id);
        done = tok_is_stop(&t, id);
        const TokStr piece = tok_piece(&t, id, true);
        if (!done) tok_text_append(text, piece.s, piece.n);
        grammar_keep_states(g, &s, 1);
    }
    free(mask);
    return done;
}

static void test_sampled(void) {
    TokIds ids = { 0 };
    TokText text = { 0 };
    int n_done = 0;
    for (size_t i = 0; i < sizeof schemas / sizeof *schemas; i++) {
        Grammar g;
        GgufJson schema, v;
        size_t at;
        const char *err;
        gguf_json_parse(schemas[i].schema, strlen(schemas[i].schema), &schema, &at, &err);
        grammar_from_schema(&g, &vocab, str(schemas[i].schema), false);
        for (int k = 0; k < 4; k++) {
            if (!draw_text(&g, &ids, &text, START_ANSWER)) continue;
            n_done++;
            const bool json = gguf_json_parse(text.s, text.n, &v, &at, &err) == 0;
            CHECK(json && fits(&schema, &schema, &v), "%s\n    %.*s: %s", schemas[i].schema, (int)text.n, text.s,
              json ? "does not fit" : err);
        }
        grammar_free(&g);
    }
    CHECK(n_done > (int)(sizeof schemas / sizeof *schemas) * 3, "%d texts came to their end", n_done);
    tok_ids_free(&ids);
    tok_text_free(&text);
}

// ---- tools ----------------------------------------------------------------------------------------------------------

#define TOOLS "[{\"type\":\"function\",\"function\":{\"name\":\"get_weather\",\"parameters\":{\"type\":\"object\"," \
              "\"properties\":{\"unit\":{\"type\":\"string\",\"enum\":[\"celsius\",\"fahrenheit\"]}," \
              "\"City\":{\"type\":\"string\"},\"days=\":{\"type\":\"integer\",\"minimum\":1,\"maximum\":14}," \
              "\"odd:key\":{\"type\":\"array\",\"items\":{\"type\":\"boolean\"}}},\"required\":[\"City\"]}}}," \
              "{\"type\":\"function\",\"function\":{\"name\":\"stop\"}}," \
              "{\"type\":\"function\",\"function\":{\"name\":\"any\",\"parameters\":{\"type\":\"object\"," \
              "\"properties\":{\"note\":{}},\"additionalProperties\":{\"type\":\"number\"}}}}]"

static void test_tools(void) {
    static const struct { const char *wanted, *text; int want; bool several; } cases[] = {
        { NULL, "<|tool_call>call:get_weather{City:<|\"|>Paris<|\"|>}<tool_call|>", 2, false },
        { NULL,
          "<|tool_call>call:get_weather{City:<|\"|>a \"quoted\" {city}\n<|\"|>,"
          "<|\"|>days=<|\"|>:14,<|\"|>odd:key<|\"|>:[true,false],unit:<|\"|>celsius<|\"|>}<tool_call|>", 2, false },
        { NULL, "<|tool_call>call:get_weather{City:<|\"|>Paris<|\"|>,<|\"|>days=<|\"|>:15", 0, false },
        { NULL, "<|tool_call>call:get_weather{}", 0, false },
        { NULL, "<|tool_call>call:get_weather{City:\"Paris\"}", 0, false },
        { NULL, "<|tool_call>call:stop{}<tool_call|>", 2, false },
        { NULL, "call:stop{}", 0, false }, { "stop", "<|tool_call>call:get", 0, false },
        { "stop", "<|tool_call>call:stop{}<tool_call|>", 2, false },
        { NULL, "<|tool_call>call:stop{}<tool_call|><|tool_call>call:stop{}<tool_call|>", 2, true },
        { NULL, "<|tool_call>call:stop{}<tool_call|><|tool_call>", 0, false },
        { NULL, "<|tool_call>call:any{note:{a:[1,<|\"|>x<|\"|>,{}],b-2:null},x:1.5}<tool_call|>", 2, false },
        { NULL, "<|tool_call>call:any{x:<|\"|>", 0, false },
        { NULL, "<|tool_call>call:any{note:1,note:", 0, false }, { NULL, "<|tool_call>call:any{:", 0, false },
        { NULL, "", 1, false },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Grammar g;
        if (CHECK(grammar_from_tools(&g, &vocab, str(TOOLS), cases[i].wanted, cases[i].several, (TokStr){ NULL, 0 },
            false),
                  "%s", g.err)) {
            const int got = feed_tokens(&g, cases[i].text, strlen(cases[i].text), TOK_SPECIAL);
            CHECK(got == cases[i].want, "%s: %d, want %d", cases[i].text, got, cases[i].want);
        }
        grammar_free(&g);
    }
    static const struct { const char *tools, *wanted, *want; } errors[] = {
        { "[]", NULL, "at least one" }, { "{}", NULL, "expected a list" }, { TOOLS, "none", "named 'none'" }, { "[{}]",
          NULL, "tools[0]: expected the name" },
        { "[{\"name\":\"a{\"}]", NULL, "tools[0]: expected a name without" },
          { "[{\"name\":\"a\",\"parameters\":{\"not\":1}}]", NULL, "tools[0].parameters: #/not" },
        { "[{\"name\":\"a\",\"parameters\":{\"type\":\"string\"}}]", NULL, "no text matches" },
        { "[", NULL, "tools: byte 1" },
    };
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++) {
        Grammar g;
        const bool ok = grammar_from_tools(&g, &vocab, str(errors[i].tools), errors[i].wanted, false,
                                           (TokStr){ NULL, 0 }, false);
        CHECK(!ok && strstr(g.err, errors[i].want), "%s: '%s', want '%s'", errors[i].tools, ok ? "accepted" : g.err,
          errors[i].want);
        grammar_free(&g);
    }
}

// The tokenizer's parser reads sampled calls back, and their arguments match the parameters.
static void test_sampled_calls(void) {
    Grammar g;
    TokIds ids = { 0 };
    TokText text = { 0 };
    TokReply r = { 0 };
    GgufJson tools, tool, fn, parameters, v;
    size_t at;
    const char *err;
    int n_done = 0;
    gguf_json_parse(TOOLS, strlen(TOOLS), &tools, &at, &err);
    CHECK(grammar_from_tools(&g, &vocab, str(TOOLS), NULL, true, (TokStr){ NULL, 0 }, false), "%s", g.err);
    for (int k = 0; k < 40; k++) {
        if (!draw_text(&g, &ids, &text, k % 2 ? START_MAY_THINK : START_ANSWER)) continue;
        n_done++;
        tok_reply_start(&t, &r, NULL, 0);
        for (size_t i = 0; i < ids.n; i++) tok_reply_push(&t, &r, ids.ids[i]);
        CHECK(r.finish == TOK_TOOL_CALLS && r.n_calls > 0 && r.content.n == 0, "no call, but %.*s", (int)text.n,
              text.s);
        for (int i = 0; i < r.n_calls; i++) {
            const TokStr a = r.calls[i].arguments;
            bool known = false;
            for (GgufJson rest = tools; !known && gguf_json_next(&rest, NULL, &tool); ) {
                const TokStr name = gguf_json_get(&tool, "function", &fn) ? text_field(&fn, "name") : (TokStr){ 0 };
                known = same_text(name, r.calls[i].name);
                free_str(name);
            }
            const bool json = known && gguf_json_parse(a.s, a.n, &v, &at, &err) == 0;
            CHECK(json && (!gguf_json_get(&fn, "parameters", &parameters) || fits(&parameters, &parameters, &v)),
              "%.*s{%.*s}", (int)r.calls[i].name.n, r.calls[i].name.s, (int)a.n, a.s);
        }
    }
    CHECK(n_done > 20, "%d calls came to their end", n_done);
    tok_reply_free(&r);
    tok_ids_free(&ids);
    tok_text_free(&text);
    grammar_free(&g);
}

// ---- masks against every token --------------------------------------------------------------------------------------

static void check_mask(Grammar *g, GrammarState s, const char *what, size_t where) {
    const size_t words = ((size_t)g->t->n_tokens + 31) / 32;
    uint32_t *mask = alloc(words * 4), *parts = alloc(words * 4);
    int wrong = -1;
    const bool ok = grammar_mask(g, s, mask, g->t->n_tokens);
    for (int32_t id = 0; id < g->t->n_tokens; id++) {
        GrammarState copy = s;
        if (grammar_advance(g, &copy, id) != in_mask(mask, id)) wrong = id;
    }
    CHECK(ok && wrong < 0, "%.80s: byte %zu: token %d (%s)", what, where, wrong, g->err);
    g->stack_sets[s].large = true;                          // forces the walk by top frames
    CHECK(grammar_mask(g, s, parts, g->t->n_tokens) && memcmp(mask, parts, words * 4) == 0,
          "%.80s: byte %zu: by parts (%s)", what, where, g->err);
    free(mask);
    free(parts);
}

static void check_masks(Grammar *g, const char *what, const char *text, size_t every) {
    GrammarState s = grammar_start(g, START_ANSWER);
    g->work = GRAMMAR_WORK;
    for (size_t i = 0; s; s = next_set(g, s, g->class_of[(unsigned char)text[i]]), i++) {
        if (i % every == 0) check_mask(g, s, what, i);
        g->work = GRAMMAR_WORK;
        if (!text[i]) break;
    }
}

static void test_masks(void) {
    static const char *const gbnf[][2] = {
        { "root ::= word (\" \" word)*\nword ::= [a-z]+", "the fox is here" },
          { "root ::= [a-z ]+ | [a-m]+ \".\" | \"the \" .*", "the fox" },
        { "root ::= (\"a\" | \"ab\" | \"abc\"){3,40} [a-c]*", "abcab" }, { "root ::= \"(\" root \")\" | [a-z]{0,12}",
          "((ab" }, { "root ::= .{30,60}", "what a day it is" },
        { "root ::= ([a-z]{2,9} \" \"){2,70}", "the fox is" }, { "root ::= <|channel> .* <channel|>", "" },
    };
    for (size_t i = 0; i < sizeof schemas / sizeof *schemas; i++) {
        Grammar g;
        grammar_from_schema(&g, &vocab, str(schemas[i].schema), false);
        for (const char *const *text = schemas[i].texts; *text; text++)
            check_masks(&g, schemas[i].schema, *text + 1, 3);
        grammar_free(&g);
    }
    for (size_t i = 0; i < sizeof gbnf / sizeof *gbnf; i++) {
        Grammar g;
        if (CHECK(grammar_from_gbnf(&g, &vocab, str(gbnf[i][0])), "%s: %s", gbnf[i][0], g.err)) check_masks(&g,
          gbnf[i][0], gbnf[i][1], 3);
        grammar_free(&g);
    }
}

// At every count of a repetition, from 0 over the longest token before its bound to the bound itself.
static void test_counts(void) {
    static const char *const gbnf[] = { "root ::= .{0,%d} \"!\"?", "root ::= .{%d} [a-z]*", "root ::= .{%d,} \"! \"" };
    char text[128], at[128];
    for (size_t i = 0; i < sizeof gbnf / sizeof *gbnf; i++) {
        const int bound = vocab.longest + 6;
        Grammar g;
        snprintf(text, sizeof text, gbnf[i], bound);
        memset(at, 'a', sizeof at);
        at[bound + (i ? 2 : 0)] = 0;
        if (CHECK(grammar_from_gbnf(&g, &vocab, str(text)), "%s: %s", text, g.err)) check_masks(&g, text, at, 1);
        grammar_free(&g);
    }
}

// ---- random grammars against a naive matcher ------------------------------------------------------------------------

static int random_expr(Grammar *g, int depth, int rule, int n_rules) {
    const int kind = (int)rnd(depth > 0 ? 9 : 4);
    if (kind < 2) return expr_range(g, 'a', 'a' + rnd(2));
    if (kind == 2) return expr_word(g, rnd(2) ? "ab" : "ba");
    if (kind == 3) return rule + 1 < n_rules ? expr_call(g,
        rule + 1 + (int)rnd((uint32_t)(n_rules - rule - 1))) : expr_word(g, "a");
    if (kind == 4) return expr_repeat(g, random_expr(g, depth - 1, rule, n_rules), 0, -1);
    if (kind == 5) {
        const int min = (int)rnd(3);
        return expr_repeat(g, random_expr(g, depth - 1, rule, n_rules), min, min + (int)rnd(3));
    }
    const int list = new_expr(g, kind < 8 ? EXPR_SEQ : EXPR_ALT, 0, 0, 0);
    for (int n = 1 + (int)rnd(3); n > 0; n--) add_expr(g, list, random_expr(g, depth - 1, rule, n_rules));
    if (kind == 7 && rnd(3) == 0) {                    // a rule calls itself after something
        add_expr(g, list, expr_word(g, "b"));
        add_expr(g, list, expr_maybe(g, expr_call(g, rule)));
    }
    return list;
}

// The positions, as bits, at which an expression can end if it begins at i of s[0..n).
static uint32_t ends_of(const Grammar *g, int e, const char *s, int n, int i, int depth) {
    const Expr x = g->exprs[e];
    uint32_t at = 0, next;
    if (depth > 24) return 0;
    switch ((ExprKind)x.kind) {
    case EXPR_TEXT: return x.max <= n - i && memcmp(s + i, g->text.s + x.a, (size_t)x.max) == 0 ? 1u << (i + x.max) : 0;
    case EXPR_SET: return i < n && has_byte(&g->sets[x.a], (unsigned char)s[i]) ? 1u << (i + 1) : 0;
    case EXPR_TOKEN: case EXPR_MACHINE: return 0;
    case EXPR_CALL: return ends_of(g, g->rules[x.a].expr, s, n, i, depth + 1);
    case EXPR_ALT:
        for (int k = x.a; k; k = g->exprs[k].prev) at |= ends_of(g, k, s, n, i, depth);
        return at;
    case EXPR_SEQ: {
        int items[16], n_items = 0;
        for (int k = x.a; k; k = g->exprs[k].prev) items[n_items++] = k;
        at = 1u << i;
        while (n_items--) {
            next = 0;
            for (int k = 0; k <= n; k++) if (at >> k & 1) next |= ends_of(g, items[n_items], s, n, k, depth);
            at = next;
        }
        return at;
    }
    case EXPR_REPEAT: {
        uint32_t all = 0;
        at = 1u << i;
        for (int times = 0; at && (x.max < 0 ? times <= n + x.min : times <= x.max); times++) {
            if (times >= x.min) all |= at;
            next = 0;
            for (int k = 0; k <= n; k++) if (at >> k & 1) next |= ends_of(g, x.a, s, n, k, depth);
            at = next;
        }
        return all;
    }
    }
    return 0;
}

static void test_random(void) {
    int n_complete = 0, n_used = 0;
    random_state = 7;
    for (int round = 0; round < 300; round++) {
        Grammar g;
        const int n_rules = 1 + (int)rnd(4);
        grammar_init(&g, &vocab);
        for (int r = 0; r < n_rules; r++) new_rule(&g);
        for (int r = 1; r <= n_rules; r++) {
            const int e = random_expr(&g, 3, r, n_rules + 1);
            g.rules[r].expr = e;
        }
        if (grammar_ready(&g, expr_call(&g, 1))) {
            n_used++;
            for (int code = 1; code < 1 << 8; code++) {            // all texts of up to 7 letters
                char s[8];
                int n = 0;
                for (int rest = code; rest > 1; rest /= 2) s[n++] = "ab"[rest % 2];
                const bool want = ends_of(&g, g.rules[1].expr, s, n, 0, 0) >> n & 1;
                const int got = feed_bytes(&g, s, (size_t)n);
                if ((got == 2) != want) CHECK(0, "grammar %d, text %.*s: %d, want %d", round, n, s, got, want);
                n_complete += want;
            }
            CHECK(!g.failed, "grammar %d: %s", round, g.err);
        }
        grammar_free(&g);
    }
    CHECK(n_used > 200 && n_complete > 3000, "%d grammars, %d texts", n_used, n_complete);
}

// ---- states, thoughts, memory, limits -------------------------------------------------------------------------------

static void test_states(void) {
    Grammar g;
    TokIds ids = { 0 };
    uint32_t *mask = alloc(((size_t)t.n_tokens + 31) / 32 * 4);
    CHECK(grammar_from_schema(&g, &vocab,
        str("{\"type\":\"array\",\"items\":{\"type\":\"array\",\"items\":{\"type\":\"string\",\"maxLength\":40},"
            "\"maxItems\":3},\"maxItems\":1000000}"), false),
          "%s", g.err);
    GrammarState s = grammar_start(&g, START_ANSWER), copy, done;
    grammar_advance(&g, &s, t.code_point['['] - 1);
    copy = s;
    CHECK(grammar_advance(&g, &copy, t.code_point[']'] - 1) && is_complete(&g, copy), "a copy goes its own way");
    CHECK(!is_complete(&g, s), "and leaves the first alone");
    CHECK(grammar_mask(&g, copy, mask, t.n_tokens) && in_mask(mask, t.turn_close) && !in_mask(mask, t.pad),
        "a complete text may end");
    done = copy;
    CHECK(grammar_advance(&g, &done, t.turn_close) && is_complete(&g, done) && !grammar_advance(&g, &done,
        t.code_point['['] - 1), "nothing after the end");
    CHECK(grammar_mask(&g, s, mask, t.n_tokens) && !in_mask(mask, t.turn_close) && !grammar_advance(&g, &done,
        t.turn_close), "no end inside");
    CHECK(!grammar_advance(&g, &(GrammarState){ s }, -1) && !grammar_advance(&g, &(GrammarState){ s }, t.n_tokens),
        "no such token");
    size_t largest = 0;                                // a long list: each item makes a new set
    for (int i = 0; i < 6000 && s; i++) {
        const char *text = i ? ",[\"one two three\"]" : "[\"one two three\"]";
        ids.n = 0;
        tok_encode(&t, text, strlen(text), TOK_PLAIN, &ids);
        for (size_t k = 0; k < ids.n && s; k++) grammar_advance(&g, &s, ids.ids[k]);
        if (grammar_bytes(&g) > largest) largest = grammar_bytes(&g);
        grammar_keep_states(&g, &s, 1);
    }
    CHECK(s && !g.failed, "6000 items: %s", g.err);
    CHECK(largest > GRAMMAR_MEMORY / 8 && largest < GRAMMAR_MEMORY / 4, "%zu bytes at most", largest);
    check_mask(&g, s, "after 6000 items", 0);
    free(mask);
    tok_ids_free(&ids);
    grammar_free(&g);
}

// A list by tail recursion can be longer than any depth; nesting ends at the limit of stacks.
static void test_depth(void) {
    char text[2 * GRAMMAR_DEPTH];
    Grammar g;
    memset(text, 'x', sizeof text);
    CHECK(grammar_from_gbnf(&g, &vocab, str("root ::= list\nlist ::= \"x\" list | \"x\"")), "%s", g.err);
    CHECK(feed_bytes(&g, text, sizeof text) == 2, "%zu letters", sizeof text);
    grammar_free(&g);
    memset(text, '[', sizeof text);
    CHECK(grammar_from_schema(&g, &vocab, str("{}"), false), "%s", g.err);
    int n = 0;
    while (n < (int)sizeof text && feed_bytes(&g, text, (size_t)n + 1)) n++;
    CHECK(n > 200 && n <= GRAMMAR_DEPTH && n < TOK__CALL_DEPTH, "%d levels", n);
    memset(text + n, ']', (size_t)n);
    CHECK(feed_bytes(&g, text, 2 * (size_t)n) == 2, "%d levels, closed", n);
    grammar_free(&g);
}

static void test_thoughts(void) {
    static const struct { GrammarStart how; const char *text; int want; } cases[] = {
        { START_ANSWER, "true", 2 }, { START_ANSWER, "<|channel>", 0 }, { START_MAY_THINK, "true", 2 },
          { START_MAY_THINK, "<|channel>thought\nso {\"it\" is<channel|>true", 2 },
        { START_MAY_THINK, "<|channel>thought\n<|channel>", 0 }, { START_MAY_THINK, "maybe", 0 },
        { START_THINKING, "so<channel|>false", 2 }, { START_THINKING, "true", 1 },
        { START_THINKING, "so<turn|>", 0 }, { START_MAY_THINK, "<|channel>thought\n<channel|><|channel>", 0 },
    };
    Grammar g;
    CHECK(grammar_from_schema(&g, &vocab, str("{\"type\":\"boolean\"}"), false), "%s", g.err);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        TokIds ids = { 0 };
        GrammarState s = grammar_start(&g, cases[i].how);
        tok_encode(&t, cases[i].text, strlen(cases[i].text), TOK_SPECIAL, &ids);
        for (size_t k = 0; k < ids.n; k++) grammar_advance(&g, &s, ids.ids[k]);
        const int got = is_complete(&g, s) ? 2 : s != 0;
        CHECK(got == cases[i].want, "%s: %d, want %d", cases[i].text, got, cases[i].want);
        check_mask(&g, s ? s : grammar_start(&g, cases[i].how), cases[i].text, 0);
        tok_ids_free(&ids);
    }
    grammar_free(&g);
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

// Work is counted in function calls, because times depend on the machine and its load. make builds this test with
// -finstrument-functions, which calls this function at every call.
enum { MANY_CALLS = 50 * 1000 * 1000 };                // the largest count is 24 million
static int64_t n_calls;
__attribute__((no_instrument_function)) void __cyg_profile_func_enter(void *function, void *from);
__attribute__((no_instrument_function)) void __cyg_profile_func_exit(void *function, void *from);
void __cyg_profile_func_enter(void *function, void *from) { (void)function, (void)from, n_calls++; }
void __cyg_profile_func_exit(void *function, void *from) { (void)function, (void)from; }

static void add_text(TokText *out, const char *s) {
    if (!tok_text_append(out, s, strlen(s))) exit(1);
}

// Inputs that try to take much time, memory or recursion are refused or processed without many calls.
static void test_limits(void) {
    // want NULL: accepted; "?": either
    static const struct { const char *first, *each, *last, *want; int n; } cases[] = {
        { "root ::= ", "(", "", "nested groups", 5000 }, { "root ::= \"a\"\n", "x%d ::= \"b\"\n", "", "rules",
          9000 }, { "root ::= ", "\"a\" ", "", NULL, 40000 },
        { "root ::= x0\n", "x%d ::= \"a\" | x%d \"b\"\n", "x4000 ::= \"c\"", NULL, 4000 }, { "root ::= ", "[a%d] ", "",
          "?", 20000 },
        { "", "{\"items\":", "", "schema", 5000 }, { "", "{\"items\":", "{}", NULL, 200 },
        { "{\"anyOf\":[", "{\"type\":\"string\"},", "{}]}", "at most 256", 3000 }, { "{\"allOf\":[",
          "{\"type\":\"string\"},", "{}]}", "at most 16 combined schemas", 3000 },
        { "{\"properties\":{\"x\":{}", ",\"p%d\":{\"$ref\":\"#/properties/x\"}", "}}", "?", 900 }, { "{\"enum\":[0",
          ",\"value number %d\"", "]}", NULL, 5000 },
        { "{\"properties\":{\"x\":{}", ",\"p%d\":{}", "},\"additionalProperties\":{}}", "?", 300 },
          { "{\"$ref\":\"#/$defs/d0\",\"$defs\":{", "\"d%d\":{\"$ref\":\"#/$defs/d%d\"},", "\"x\":{}}}", "?", 3000 },
        { "{\"$ref\":\"#/$defs/d0\",\"$defs\":{",
          "\"d%d\":{\"allOf\":[{\"$ref\":\"#/$defs/d%d\"},{\"$ref\":\"#/$defs/d%d\"}]},", "\"d20\":{}}}",
          "at most 16 combined schemas", 20 },
        { "{\"properties\":{\"x\":{}",
          ",\"p%d\":{\"pattern\":\"^(?=.*a.{0,200}$)(?=.*b.{0,90}$).*%d$\",\"maxLength\":999}", "}}",
          NULL, 60 },
        { "{\"pattern\":\"^(?=.*b)", "(a|ab)?", "$\"}", NULL, 300 },
        { "{\"pattern\":\"^(?=.", "(?=(a*b?)*c", ")", "?", 60 },
        { "{\"patternProperties\":{\"a\":{}", ",\"^(?=.*a.{0,%d}$)\":{}", "}}", NULL, 14 },
        { "{\"not\":{\"anyOf\":[{\"const\":0}", ",{\"enum\":[%d,\"x%d\"]}", "]}}", NULL, 500 },
        { "{\"oneOf\":[{}", ",{\"type\":\"object\",\"properties\":{\"k\":{\"const\":%d}},\"required\":[\"k\"]}", "]}",
          "?", 200 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Grammar g;
        TokText text = { 0 };
        char line[200];
        add_text(&text, cases[i].first);
        for (int k = 0; k < cases[i].n; k++) {
            const char *each = cases[i].each;
            if (strchr(each, '%')) snprintf(line, sizeof line, "%s", "");
            for (char *out = line; ; ) {               // replaces numbers by k and k + 1
                const char *at = strstr(each, "%d");
                if (!at) {
                    snprintf(out, sizeof line - (size_t)(out - line), "%s", each);
                    break;
                }
                out += snprintf(out, sizeof line - (size_t)(out - line), "%.*s%d", (int)(at - each), each,
                                k + (out != line));
                each = at + 2;
            }
            add_text(&text, line);
        }
        add_text(&text, cases[i].last);
        if (strcmp(cases[i].each, "{\"items\":") == 0
          && !cases[i].want) for (int k = 0; k < cases[i].n; k++) add_text(&text, "}");
        const int64_t start = n_calls;
        const bool ok = cases[i].first[0] == 'r' ? grammar_from_gbnf(&g, &vocab, (TokStr){ text.s,
          text.n }) : grammar_from_schema(&g, &vocab, (TokStr){ text.s, text.n }, false);
        const int64_t took = n_calls - start;
        const bool right = !cases[i].want ? ok : cases[i].want[0] == '?' || (!ok && strstr(g.err, cases[i].want));
        CHECK(right, "%s %s x %d: %s, want %s", cases[i].first, cases[i].each, cases[i].n, ok ? "accepted" : g.err,
          cases[i].want ? cases[i].want : "accepted");
        CHECK(took > 0 && took < MANY_CALLS, "%s %s x %d: %lld calls", cases[i].first, cases[i].each, cases[i].n,
              (long long)took);
        if (ok) check_mask(&g, grammar_start(&g, START_ANSWER), cases[i].each, 0);
        grammar_free(&g);
        tok_text_free(&text);
    }
}

// Very ambiguous grammars fail with one line, without many calls.
static void test_ambiguous(void) {
    static const char *const texts[] = { "root ::= (\"a\" | \"aa\" | \"aaa\"){0,100000} \"b\"",
        "root ::= a a a a a a a a\na ::= b b b b b b b b\nb ::= c c c c c c c c\nc ::= \"a\"? \"a\"?",
                                         "root ::= \"a\" root root | \"\"",
                                         "root ::= ((((\"a\"?){256}){256}){256}){256}" };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        Grammar g;
        const int64_t start = n_calls;
        uint32_t *mask = alloc(((size_t)t.n_tokens + 31) / 32 * 4);
        if (grammar_from_gbnf(&g, &vocab, str(texts[i]))) {
            GrammarState s = grammar_start(&g, START_ANSWER);
            for (int k = 0; k < 3000 && s; k++) {
                if (!grammar_mask(&g, s, mask, t.n_tokens)) break;
                grammar_advance(&g, &s, t.code_point['a'] - 1);
                grammar_keep_states(&g, &s, 1);
            }
        }
        CHECK(g.failed ? strstr(g.err, "too ambiguous") || strstr(g.err, "it allows no next token") || strstr(g.err,
          "may be empty") : true, "%s: %s", texts[i], g.err);
        CHECK(n_calls > start && n_calls - start < MANY_CALLS, "%s: %lld calls (%s)", texts[i],
              (long long)(n_calls - start), g.err);
        const GrammarState again = i ? 0 : grammar_start(&g, START_ANSWER);
        CHECK(i || (again && grammar_mask(&g, again, mask, t.n_tokens)), "%s: it does not begin again: %s", texts[i],
              g.err);
        free(mask);
        grammar_free(&g);
    }
}

// ---- the real vocabulary --------------------------------------------------------------------------------------------

static void time_masks(Grammar *g, const char *text) {
    TokIds ids = { 0 };
    uint32_t *mask = alloc(((size_t)t.n_tokens + 31) / 32 * 4);
    tok_encode(&t, text, strlen(text), TOK_PLAIN, &ids);
    for (int pass = 0; pass < 2; pass++) {
        GrammarState s = grammar_start(g, START_ANSWER);
        double sum = 0, most = 0;
        for (size_t i = 0; i < ids.n; i++) {
            const double start = seconds();
            grammar_mask(g, s, mask, t.n_tokens);
            const double took = seconds() - start;
            sum += took;
            if (took > most) most = took;
            grammar_advance(g, &s, ids.ids[i]);
        }
        printf("    %s time: %zu masks, %.3f ms each, %.3f ms the longest, %zu bytes\n", pass ? "second" : "first",
          ids.n, 1e3 * sum / (double)ids.n, 1e3 * most, grammar_bytes(g));
    }
    free(mask);
    tok_ids_free(&ids);
}

static void test_real(bool timed) {
    static const char *const texts[][2] = {
        { "{\"type\":\"object\",\"properties\":{\"name\":{\"type\":\"string\"},\"short\":{\"type\":\"string\","
          "\"maxLength\":500},\"age\":{\"type\":\"integer\",\"minimum\":0,\"maximum\":150},"
          "\"tags\":{\"type\":\"array\",\"items\":{\"type\":\"string\"}},\"any\":{}}}",
          "{\"name\": \"Jos\xc3\xa9 \\\"Pepe\\\" the third\", \"short\": \"something \xe2\x82\xac or other\", "
          "\"age\": 42, \"tags\": [\"one\", \"two and three\"], \"any\": {\"a\": [1, 2.5e3, {\"b\": null}]}}" },
        { "{\"type\":\"object\"}", "{\"text\": \"a long text of some words\", \"list\": [[\"x\"], {\"y\": -1.25}]}" },
    };
    File f;
    Tokenizer mini = t;
    GrammarVocab of_mini = vocab;
    if (!has_gzip()) {
        SKIP("no gzip: masks over Gemma 4's vocabulary");
        return;
    }
    if (open_real_vocab(&f) && CHECK(tok_init(&t, &f.v) == 0, "%s", t.err)) {
        const double start = seconds();
        CHECK(grammar_vocab_init(&vocab, &t) && vocab.longest == 48, "longest token: %d bytes", vocab.longest);
        if (timed) printf("    vocabulary: %.0f ms, %d nodes\n", 1e3 * (seconds() - start), vocab.n_nodes);
        for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
            Grammar g;
            if (CHECK(grammar_from_schema(&g, &vocab, str(texts[i][0]), false), "%s", g.err)) {
                if (timed) time_masks(&g, texts[i][1]);
                check_masks(&g, texts[i][0], texts[i][1], i ? 200 : 70);
                CHECK(feed_tokens(&g, texts[i][1], strlen(texts[i][1]), TOK_PLAIN) == 2, "%s", texts[i][1]);
            }
            grammar_free(&g);
        }
        grammar_vocab_free(&vocab);
        tok_free(&t);
    }
    close_vocab(&f);
    t = mini;
    vocab = of_mini;
}

int main(int argc, char **argv) {
    File f;
    if (!open_vocab(&f, MODEL) || !CHECK(tok_init(&t, &f.v) == 0, "%s", t.err) || !CHECK(grammar_vocab_init(&vocab, &t),
        "vocabulary")) return test_done("grammar");
    test_gbnf();
    test_gbnf_errors();
    test_ranges();
    test_depth();
    test_schemas();
    test_schema_errors();
    test_tools();
    test_thoughts();
    test_random();
    test_sampled();
    test_sampled_calls();
    test_masks();
    test_counts();
    test_states();
    test_limits();
    test_ambiguous();
    test_real(argc > 1 && strcmp(argv[1], "-time") == 0);
    grammar_vocab_free(&vocab);
    tok_free(&t);
    close_vocab(&f);
    return test_done("grammar");
}
