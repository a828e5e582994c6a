/* schema.h - makes grammars (parts/grammar.h) from JSON schemas and from declarations of tools. Part of gemma4.c, which
 * includes it.
 *
 * A schema is a list of parts that must all hold: the schema itself, the target of its $ref, the schemas in its allOf.
 * A part is a position in the schema's text, so parts are compared by address. Each list of parts becomes one rule, so
 * a schema that contains itself makes a recursive rule.
 *
 * A text that matches the grammar satisfies the schema. A restriction that is not supported is an error that names its
 * path. Not every text that satisfies the schema matches the grammar: properties come in the order of the schema (in
 * calls: in the order of the chat template), undeclared properties come last; without additionalProperties only
 * declared properties are allowed, and without items only the items of prefixItems. oneOf is supported if no two of its
 * schemas can hold for the same value.
 *
 * Uses grammar.h and gguf.h (JSON). Begin with grammar_from_schema() and grammar_from_tools().
 *   [1] Regular expressions    [2] JSON values    [3] Numbers and keys    [4] Schemas: parts and keywords
 *   [5] Schemas: strings, numbers, arrays    [6] Schemas: objects    [7] Schemas: alternatives    [8] Tools */
#ifndef SCHEMA_H
#define SCHEMA_H

// ==== [1] Regular expressions =======================================================================================
// Regular expressions of ECMA-262, as in the keyword `pattern`, without lookaround and back references. An expression
// between ^ and $ matches the whole string; without ^ or $, any text may come before or after. Characters match in the
// form in which [2] writes strings.

static int expr_string_chars(Grammar *g, const Chars *c, bool call);

static void add_class(Chars *c, int name) {            // \d \w \s, and \D \W \S
    static const CharRange space[] = { { 9, 13 }, { 0x20, 0x20 }, { 0xA0, 0xA0 }, { 0x1680, 0x1680 },
                                       { 0x2000, 0x200A }, { 0x2028, 0x2029 }, { 0x202F, 0x202F }, { 0x205F, 0x205F },
                                       { 0x3000, 0x3000 }, { 0xFEFF, 0xFEFF } };
    Chars x = { .n = 0 };
    const int lower = name | 32;
    if (lower != 's') add_chars(&x, '0', '9');
    if (lower == 'w') {
        add_chars(&x, 'A', 'Z');
        add_chars(&x, 'a', 'z');
        add_chars(&x, '_', '_');
    }
    for (size_t i = 0; lower == 's' && i < sizeof space / sizeof *space; i++) add_chars(&x, space[i].lo, space[i].hi);
    if (name != lower) invert_chars(&x);
    for (int i = 0; i < x.n; i++) add_chars(c, x.s[i].lo, x.s[i].hi);
}

// Reads an escape sequence and adds its characters to *c. True: it is one character, in *one.
static bool read_regex_escape(Reader *r, Chars *c, bool in_set, uint32_t *one) {
    static const char from[] = "nrtfv0", to[] = "\n\r\t\f\v";
    r->i++;
    const int e = peek(r);
    if (e >= 0) r->i++;
    const char *at = e > 0 ? strchr(from, e) : NULL;
    if (e > 0 && strchr("dDwWsS", e)) {
        add_class(c, e);
        return false;
    }
    if (at) *one = (unsigned char)to[at - from];
    else if (e == 'x') *one = read_hex(r, 2);
    else if (e == 'u') *one = read_hex(r, 4);
    else if (in_set && e == 'b') *one = '\b';
    else if (e > 0 && strchr("^$\\.*+?()[]{}|/-\"'#&,:;<=>@!%_`~ ", e)) *one = (uint32_t)e;
    else reader_fail(r, "expected an escape for characters, got \\%c", e > 0x20 && e < 0x7F ? e : '?');
    add_chars(c, *one, *one);
    return true;
}

static int read_regex_set(Reader *r) {
    Chars c = { .n = 0 };
    r->i++;
    const bool inverted = take_word(r, "^");
    while (peek(r) != ']' && !r->g->failed) {
        uint32_t lo = 0, hi = 0;
        if (peek(r) < 0) return reader_fail(r, "expected a ']'");
        const int before = c.n;
        bool one = true;
        if (peek(r) == '\\') {
            one = read_regex_escape(r, &c, true, &lo);
        } else {
            lo = read_char(r);
            add_chars(&c, lo, lo);
        }
        if (!one || peek(r) != '-' || r->i + 1 >= r->n || r->s[r->i + 1] == ']') continue;
        r->i++;
        c.n = before;
        if (peek(r) == '\\') one = read_regex_escape(r, &(Chars){ .n = 0 }, true, &hi);
        else hi = read_char(r);
        if (!one || hi < lo) return reader_fail(r, "expected an ascending range");
        add_chars(&c, lo, hi);
    }
    r->i++;
    sort_chars(&c);
    if (inverted) invert_chars(&c);
    return expr_string_chars(r->g, &c, r->call);
}

static int expr_any_text(Grammar *g, bool call) {
    return expr_repeat(g, expr_string_chars(g, &(Chars){ .s = { { 0, LAST_CHAR } }, .n = 1 }, call), 0, -1);
}

static int read_regex(Reader *r, int depth);

static int read_regex_item(Reader *r, int depth) {
    Grammar *g = r->g;
    const int c = peek(r);
    uint32_t one = 0;
    Chars chars = { .n = 0 };
    if (c == '[') return read_regex_set(r);
    if (take_word(r, "(")) {
        if (peek(r) == '?' && !take_word(r, "?:"))
            return reader_fail(r, "lookahead and lookbehind are not supported, got (?");
        if (depth == GRAMMAR_NESTING)
            return reader_fail(r, "expected at most %d nested groups", GRAMMAR_NESTING);
        const int group = read_regex(r, depth + 1);
        if (!take_word(r, ")")) return reader_fail(r, "expected a ')'");
        return group;
    }
    if (c == '^' || c == '$') return reader_fail(r, "expected ^ and $ only at the ends");
    if (c == '*' || c == '+' || c == '?') return reader_fail(r, "expected something before '%c'", c);
    if (c == '\\') read_regex_escape(r, &chars, false, &one);
    else if (take_word(r, ".")) {
        add_chars(&chars, '\n', '\n');
        add_chars(&chars, '\r', '\r');
        add_chars(&chars, 0x2028, 0x2029);
        invert_chars(&chars);
    } else {
        const uint32_t x = read_char(r);
        add_chars(&chars, x, x);
    }
    sort_chars(&chars);
    return expr_string_chars(g, &chars, r->call);
}

static int read_regex(Reader *r, int depth) {          // alternatives; at depth 0 they may have anchors
    Grammar *g = r->g;
    const int alt = new_expr(g, EXPR_ALT, 0, 0, 0);
    do {
        const int seq = new_expr(g, EXPR_SEQ, 0, 0, 0);
        if (depth == 0 && !take_word(r, "^")) add_expr(g, seq, expr_any_text(g, r->call));
        while (!g->failed && peek(r) >= 0 && peek(r) != '|' && peek(r) != ')' && !(depth == 0 && peek(r) == '$'))
            add_expr(g, seq, read_repeats(r, read_regex_item(r, depth), false));
        if (depth == 0 && !take_word(r, "$")) add_expr(g, seq, expr_any_text(g, r->call));
        add_expr(g, alt, seq);
    } while (!g->failed && take_word(r, "|"));
    if (depth == 0 && !g->failed && r->i < r->n)
        reader_fail(r, "expected the end of the pattern, got '%c'", peek(r) < 0x7F ? peek(r) : '?');
    return alt;
}

// ==== [2] JSON values ===============================================================================================
// Values are written in one of two forms. JSON: at most one space after a comma or colon, so that a text cannot be
// endless white space, and numbers of bounded length. A tool call, as the chat template writes it: strings are between
// <|"|> without escapes, keys are without quotes, and there are no spaces.

typedef enum { JSON_STRING, JSON_INTEGER, JSON_NUMBER, JSON_VALUE, JSON_ARRAY, JSON_OBJECT, JSON_KEY } Builtin;

enum { DIGITS = 18, DECIMALS = 17 };                   // of a number, before and after its decimal point

// One character of the set c, as it is written inside a string.
static int expr_string_chars(Grammar *g, const Chars *c, bool call) {
    static const char escaped[] = "\"\\\b\f\n\r\t", letters[] = "\"\\bfnrt";
    const Chars in_json = { .s = { { ' ', '!' }, { '#', '[' }, { ']', LAST_CHAR } }, .n = 3 };
    const Chars in_call = { .s = { { '\t', '\n' }, { '\r', '\r' }, { ' ', LAST_CHAR } }, .n = 3 };
    Chars raw = common_chars(c, call ? &in_call : &in_json);
    const int alt = ALT(expr_chars(g, &raw));
    for (size_t i = 0; !call && i < sizeof letters - 1; i++) {
        const char text[2] = { '\\', letters[i] };
        if (has_char(c, (unsigned char)escaped[i])) add_expr(g, alt, expr_text(g, text, 2));
    }
    return alt;
}

static int expr_hex(Grammar *g, int n) {
    ByteSet b = { { 0 } };
    add_bytes(&b, '0', '9');
    add_bytes(&b, 'A', 'F');
    add_bytes(&b, 'a', 'f');
    return expr_repeat(g, expr_bytes(g, &b), n, n);
}

// Any character inside a string, also as an escape. \u escapes of surrogates are not allowed.
static int expr_string_char(Grammar *g, bool call) {
    Chars raw = { .s = { { ' ', '!' }, { '#', '[' }, { ']', LAST_CHAR } }, .n = 3 };
    if (call) return expr_string_chars(g, &(Chars){ .s = { { 0, LAST_CHAR } }, .n = 1 }, true);
    ByteSet letters = { { 0 } }, below_d = { { 0 } }, d = { { 0 } };
    for (const char *c = "\"\\/bfnrt"; *c; c++) add_bytes(&letters, (unsigned char)*c, (unsigned char)*c);
    add_bytes(&below_d, '0', '9');
    add_bytes(&below_d, 'A', 'F');
    add_bytes(&below_d, 'a', 'f');
    for (const char *c = "Dd"; *c; c++) {
        below_d.w[*c / 64] &= ~((uint64_t)1 << *c % 64);
        add_bytes(&d, (unsigned char)*c, (unsigned char)*c);
    }
    const int unit = ALT(SEQ(expr_bytes(g, &below_d), expr_hex(g, 3)),
                         SEQ(expr_bytes(g, &d), expr_range(g, '0', '7'), expr_hex(g, 2)));
    return ALT(expr_chars(g, &raw),
               SEQ(expr_word(g, "\\"), ALT(expr_bytes(g, &letters), SEQ(expr_word(g, "u"), unit))));
}

static int expr_quote(Grammar *g, bool call) { return call ? expr_token(g, g->t->quote) : expr_word(g, "\""); }

static int expr_comma(Grammar *g, bool call) {
    return call ? expr_word(g, ",") : SEQ(expr_word(g, ","), expr_maybe(g, expr_word(g, " ")));
}

static int expr_colon(Grammar *g, bool call) {
    return call ? expr_word(g, ":") : SEQ(expr_word(g, ":"), expr_maybe(g, expr_word(g, " ")));
}

static int expr_digits(Grammar *g, int min, int max) { return expr_repeat(g, expr_range(g, '0', '9'), min, max); }
static int expr_whole_number(Grammar *g) {
    return ALT(expr_word(g, "0"), SEQ(expr_range(g, '1', '9'), expr_digits(g, 0, DIGITS - 1)));
}
static int expr_decimals(Grammar *g) { return expr_maybe(g, SEQ(expr_word(g, "."), expr_digits(g, 1, DECIMALS))); }

static int expr_exponent(Grammar *g) {
    ByteSet e = { { 0 } }, sign = { { 0 } };
    add_bytes(&e, 'e', 'e');
    add_bytes(&e, 'E', 'E');
    add_bytes(&sign, '+', '+');
    add_bytes(&sign, '-', '-');
    return expr_maybe(g, SEQ(expr_bytes(g, &e), expr_maybe(g, expr_bytes(g, &sign)), expr_digits(g, 1, 2)));
}

static void bare_chars(Chars *c) {                     // the characters of undeclared keys in tool calls
    add_chars(c, '0', '9');
    add_chars(c, 'A', 'Z');
    add_chars(c, 'a', 'z');
    add_chars(c, '_', '_');
    add_chars(c, '-', '-');
    sort_chars(c);
}

// The rule of a value that does not depend on a schema. Each grammar has it at most once.
static int builtin(Grammar *g, Builtin what, bool call) {
    int32_t *cached = &g->builtin[8 * call + what];
    if (*cached) return *cached;
    const int rule = *cached = new_rule(g);
    if (!rule) return 0;
    Chars bare = { .n = 0 };
    int e = 0;
    bare_chars(&bare);
    switch (what) {
    case JSON_STRING:
        e = SEQ(expr_quote(g, call), expr_repeat(g, expr_string_char(g, call), 0, -1), expr_quote(g, call));
        break;
    case JSON_INTEGER: e = SEQ(expr_maybe(g, expr_word(g, "-")), expr_whole_number(g)); break;
    case JSON_NUMBER:
        e = SEQ(expr_maybe(g, expr_word(g, "-")), expr_whole_number(g), expr_decimals(g), expr_exponent(g));
        break;
    case JSON_KEY:
        e = call ? expr_repeat(g, expr_chars(g, &bare), 1, -1) : expr_call(g, builtin(g, JSON_STRING, false));
        break;
    case JSON_VALUE:
        e = ALT(expr_word(g, "true"), expr_word(g, "false"), expr_word(g, "null"),
                expr_call(g, builtin(g, JSON_STRING, call)), expr_call(g, builtin(g, JSON_NUMBER, call)),
                expr_call(g, builtin(g, JSON_ARRAY, call)), expr_call(g, builtin(g, JSON_OBJECT, call)));
        break;
    case JSON_ARRAY: {
        const int value = builtin(g, JSON_VALUE, call);
        e = SEQ(expr_word(g, "["), expr_maybe(g, SEQ(expr_call(g, value),
                expr_repeat(g, SEQ(expr_comma(g, call), expr_call(g, value)), 0, -1))), expr_word(g, "]"));
        break;
    }
    case JSON_OBJECT: {
        const int value = builtin(g, JSON_VALUE, call), key = builtin(g, JSON_KEY, call);
        const int first = SEQ(expr_call(g, key), expr_colon(g, call), expr_call(g, value));
        const int other = SEQ(expr_comma(g, call), expr_call(g, key), expr_colon(g, call), expr_call(g, value));
        e = SEQ(expr_word(g, "{"), expr_maybe(g, SEQ(first, expr_repeat(g, other, 0, -1))), expr_word(g, "}"));
        break;
    }
    }
    g->rules[rule].expr = e;
    return rule;
}

// Decodes a JSON string, with a 0 after it. The caller frees it.
static TokStr json_chars(Grammar *g, const GgufJson *string) {
    char *s = malloc(string->n);
    const size_t n = s ? gguf_json_string(string, s) : 0;
    if (s) s[n] = 0;
    else grammar_fail(g, "grammar: out of memory");
    return (TokStr){ s, n };
}

static int expr_json_string(Grammar *g, TokStr s) {
    TokText out = { 0 };
    if (tok_add_json_string(&out, s) < 0) grammar_fail(g, "grammar: out of memory");
    const int e = expr_text(g, out.s, out.n);
    tok_text_free(&out);
    return e;
}

static int expr_quoted(Grammar *g, TokStr s) {         // a string in a call
    return SEQ(expr_quote(g, true), expr_text(g, s.s, s.n), expr_quote(g, true));
}

// A key. In a call it is quoted only if the parser of calls would misread it without quotes.
static int expr_key(Grammar *g, TokStr s, bool call) {
    if (!call) return expr_json_string(g, s);
    bool bare = s.n > 0;
    for (size_t i = 0; i < s.n; i++) bare &= (unsigned char)s.s[i] > 0x20 && !strchr(":=,{}[]()\"'", s.s[i]);
    return bare ? expr_text(g, s.s, s.n) : expr_quoted(g, s);
}

// A constant value, as an enum or const of the schema has it.
static int expr_value(Grammar *g, const GgufJson *v, bool call) {
    const int seq = new_expr(g, EXPR_SEQ, 0, 0, 0);
    GgufJson rest = *v, key = { 0 }, value;
    if (v->type == GGUF_J_STRING) {
        const TokStr s = json_chars(g, v);
        add_expr(g, seq, call ? expr_quoted(g, s) : expr_json_string(g, s));
        free((void *)(uintptr_t)s.s);
        return seq;
    }
    if (v->type < GGUF_J_STRING) return expr_text(g, v->s, v->n);
    const bool object = v->type == GGUF_J_OBJECT;
    add_expr(g, seq, expr_word(g, object ? "{" : "["));
    for (bool first = true; !g->failed && gguf_json_next(&rest, &key, &value); first = false) {
        if (!first) add_expr(g, seq, expr_word(g, ","));
        if (object) {
            const TokStr s = json_chars(g, &key);
            add_expr(g, seq, expr_key(g, s, call));
            add_expr(g, seq, expr_word(g, ":"));
            free((void *)(uintptr_t)s.s);
        }
        add_expr(g, seq, expr_value(g, &value, call));
    }
    add_expr(g, seq, expr_word(g, object ? "}" : "]"));
    return seq;
}

// ==== [3] Numbers and keys ==========================================================================================

static int by_text(const void *a, const void *b) {
    const TokStr *x = a, *y = b;
    const int c = memcmp(x->s, y->s, x->n < y->n ? x->n : y->n);
    return c ? c : (x->n > y->n) - (x->n < y->n);
}

// One of n sorted texts, whose first `same` bytes are equal and already matched. Builds a prefix tree, so that the
// parser is in few stacks at a time.
static int expr_one_of(Grammar *g, const TokStr *texts, int n, size_t same) {
    const int alt = new_expr(g, EXPR_ALT, 0, 0, 0);
    for (int i = 0, k; i < n && !g->failed; i = k) {
        size_t more = texts[i].n;                      // length of the common prefix of texts i .. k - 1
        for (k = i + 1; k < n && same < more && texts[k].n > same && texts[k].s[same] == texts[i].s[same]; k++)
            for (size_t at = same; at < more; at++) if (at >= texts[k].n || texts[k].s[at] != texts[i].s[at]) more = at;
        const int text = expr_text(g, texts[i].s + same, more - same);
        add_expr(g, alt, k - i == 1 ? text : SEQ(text, expr_one_of(g, texts + i, k - i, more)));
    }
    return alt;
}

// Decimal numbers of n digits from lo to hi.
static int expr_digits_between(Grammar *g, const char *lo, const char *hi, int n) {
    const unsigned a = n ? (unsigned char)lo[0] : 0, b = n ? (unsigned char)hi[0] : 0;
    if (n == 0) return new_expr(g, EXPR_SEQ, 0, 0, 0);
    const bool from_start = strspn(lo, "0") >= (size_t)n, to_end = strspn(hi, "9") >= (size_t)n;
    if (from_start && to_end) return expr_digits(g, n, n);
    if (a == b) return SEQ(expr_range(g, a, a), expr_digits_between(g, lo + 1, hi + 1, n - 1));
    const bool low = strspn(lo + 1, "0") >= (size_t)n - 1, high = strspn(hi + 1, "9") >= (size_t)n - 1;
    const int alt = new_expr(g, EXPR_ALT, 0, 0, 0);
    if (!low) add_expr(g, alt, SEQ(expr_range(g, a, a), expr_digits_between(g, lo + 1, "999999999999999999", n - 1)));
    if (a + !low <= b - !high)
        add_expr(g, alt, SEQ(expr_range(g, a + !low, b - !high), expr_digits(g, n - 1, n - 1)));
    if (!high) add_expr(g, alt, SEQ(expr_range(g, b, b), expr_digits_between(g, "000000000000000000", hi + 1, n - 1)));
    return alt;
}

#define LARGEST (INT64_C(1000000000000000000) - 1)     // DIGITS nines

// Whole numbers from lo to hi, 0 <= lo.
static int expr_whole_range(Grammar *g, int64_t lo, int64_t hi) {
    const int alt = new_expr(g, EXPR_ALT, 0, 0, 0);
    int64_t first = 0, last = 9;                       // of n digits
    for (int n = 1; n <= DIGITS; n++, first = last + 1, last = n <= DIGITS ? last * 10 + 9 : last) {
        char a[24], b[24];
        const int64_t from = lo > first ? lo : first, to = hi < last ? hi : last;
        if (from > to) continue;
        snprintf(a, sizeof a, "%0*lld", n, (long long)from);
        snprintf(b, sizeof b, "%0*lld", n, (long long)to);
        add_expr(g, alt, expr_digits_between(g, a, b, n));
    }
    return alt;
}

static int expr_integer_range(Grammar *g, int64_t lo, int64_t hi) {
    const int alt = new_expr(g, EXPR_ALT, 0, 0, 0);
    if (hi >= 0) add_expr(g, alt, expr_whole_range(g, lo > 0 ? lo : 0, hi));
    if (lo < 0) add_expr(g, alt, SEQ(expr_word(g, "-"), expr_whole_range(g, hi < 0 ? -hi : 1, -lo)));
    return alt;
}

// Numbers between integers lo >= 0 and hi. lo_open, hi_open: the bound itself is excluded.
static int expr_magnitude_range(Grammar *g, int64_t lo, int64_t hi, bool lo_open, bool hi_open) {
    const int alt = new_expr(g, EXPR_ALT, 0, 0, 0);
    if (lo_open && lo < hi)
        add_expr(g, alt, SEQ(expr_whole_range(g, lo, lo), expr_word(g, "."), expr_digits(g, 0, DECIMALS - 1),
                             expr_range(g, '1', '9')));
    if (lo + lo_open < hi) add_expr(g, alt, SEQ(expr_whole_range(g, lo + lo_open, hi - 1), expr_decimals(g)));
    if (!hi_open && lo + lo_open <= hi) add_expr(g, alt, expr_whole_range(g, hi, hi));
    return alt;
}

static int expr_number_range(Grammar *g, int64_t lo, int64_t hi, bool lo_open, bool hi_open) {
    const int alt = new_expr(g, EXPR_ALT, 0, 0, 0);
    if (hi >= 0) add_expr(g, alt, expr_magnitude_range(g, lo > 0 ? lo : 0, hi, lo >= 0 && lo_open, hi_open));
    if (lo < 0)
        add_expr(g, alt, SEQ(expr_word(g, "-"),
                             expr_magnitude_range(g, hi < 0 ? -hi : 0, -lo, hi >= 0 || hi_open, lo_open)));
    return alt;
}

// Any text of `allowed` characters that is not one of the n names. Names are sorted and zero-terminated; their first
// `first` code points are equal and already matched. A name longer than GRAMMAR_NESTING excludes all texts with its
// prefix.
typedef struct { uint32_t c[GRAMMAR_NESTING + 1]; } Name;

static int expr_other_than(Grammar *g, const Name *names, int n, int first, const Chars *allowed) {
    const int alt = new_expr(g, EXPR_ALT, 0, 0, 0);
    Chars other = { .n = 0 };
    bool ends = true;
    for (int i = 0, k; i < n && !g->failed; i = k) {
        const uint32_t c = names[i].c[first];
        for (k = i; k < n && names[k].c[first] == c; ) k++;
        if (!c) {
            ends = false;
            continue;
        }
        add_chars(&other, c, c);
        char out[4];
        const size_t len = gguf_utf8(c, out);
        if (first + 1 < GRAMMAR_NESTING && has_char(allowed, c))
            add_expr(g, alt, SEQ(expr_text(g, out, len), expr_other_than(g, names + i, k - i, first + 1, allowed)));
    }
    invert_chars(&other);
    other = common_chars(&other, allowed);
    Chars any = *allowed;
    add_expr(g, alt, SEQ(expr_chars(g, &other), expr_repeat(g, expr_chars(g, &any), 0, -1)));
    if (ends) add_expr(g, alt, new_expr(g, EXPR_SEQ, 0, 0, 0));
    return alt;
}

// ==== [4] Schemas: parts and keywords ===============================================================================

enum { SCHEMA_PARTS = 16, SCHEMA_DONE = 4, SCHEMA_PROPERTIES = 1024, SCHEMA_PREFIX = 64 };

enum { IS_A_NULL = 1, IS_A_BOOL = 2, IS_A_INTEGER = 4, IS_A_NUMBER = 8, IS_A_STRING = 16, IS_A_ARRAY = 32,
       IS_A_OBJECT = 64, IS_ANY_TYPE = 127 };

typedef enum {
    K_TYPE, K_NULLABLE, K_ENUM, K_CONST, K_ANY_OF, K_ONE_OF, K_ALL_OF, K_REF, K_PROPERTIES, K_REQUIRED, K_ADDITIONAL,
    K_MIN_PROPERTIES, K_MAX_PROPERTIES, K_ITEMS, K_PREFIX, K_ADDITIONAL_ITEMS, K_MIN_ITEMS, K_MAX_ITEMS, K_UNIQUE,
    K_MIN_LENGTH, K_MAX_LENGTH, K_PATTERN, K_FORMAT, K_MIN, K_MAX, K_OPEN_MIN, K_OPEN_MAX, K_MULTIPLE, N_KEYWORDS
} Keyword;

static const struct { const char *name; int types; } keywords[N_KEYWORDS] = {    // types that it restricts; 0: all
    { "type", 0 }, { "nullable", 0 }, { "enum", 0 }, { "const", 0 }, { "anyOf", 0 }, { "oneOf", 0 }, { "allOf", 0 },
    { "$ref", 0 }, { "properties", IS_A_OBJECT }, { "required", IS_A_OBJECT }, { "additionalProperties", IS_A_OBJECT },
    { "minProperties", IS_A_OBJECT }, { "maxProperties", IS_A_OBJECT }, { "items", IS_A_ARRAY },
    { "prefixItems", IS_A_ARRAY }, { "additionalItems", IS_A_ARRAY }, { "minItems", IS_A_ARRAY },
    { "maxItems", IS_A_ARRAY }, { "uniqueItems", IS_A_ARRAY },
    { "minLength", IS_A_STRING }, { "maxLength", IS_A_STRING }, { "pattern", IS_A_STRING },
    { "format", IS_A_STRING | IS_A_NUMBER | IS_A_INTEGER }, { "minimum", IS_A_INTEGER | IS_A_NUMBER },
    { "maximum", IS_A_INTEGER | IS_A_NUMBER }, { "exclusiveMinimum", IS_A_INTEGER | IS_A_NUMBER },
    { "exclusiveMaximum", IS_A_INTEGER | IS_A_NUMBER }, { "multipleOf", IS_A_INTEGER | IS_A_NUMBER },
};

static const char *const annotations[] = {             // keywords that restrict nothing
    "title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly", "$schema", "$id",
    "id", "$comment", "$defs", "definitions", "contentEncoding", "contentMediaType", "discriminator", "externalDocs",
    "xml",
};

typedef struct {                       // schemas that must hold for one value, and their rule
    GgufJson    value[SCHEMA_PARTS];
    int         n;
    const char *done[SCHEMA_DONE];     // anyOf and oneOf of these schemas that are already expanded
    int         n_done, rule;
} SchemaItem;

typedef struct {                       // these schemas, the targets of their $ref and the schemas of their allOf
    GgufJson    part[SCHEMA_PARTS];
    int         n, n_visited;
    bool        never;                 // one is `false`: no value satisfies it
    const char *visited[4 * SCHEMA_PARTS];
} Parts;

typedef struct { GgufJson v[N_KEYWORDS]; int types; } Fields;                  // v[k].s NULL: keyword k is absent

typedef struct {
    Grammar    *g;
    GgufJson    root;
    const char *what;                  // for error messages
    bool        call;                  // values are written as in a tool call, not as JSON
    SchemaItem *items;                 // that become rules
    int         n_items, cap_items;
    int64_t     work;                  // bytes that were searched for $ref, and pairs of oneOf that were compared
} Schema;

static const GgufJson any_value = { GGUF_J_TRUE, "true", 4 };
static const GgufJson any_object = { GGUF_J_OBJECT, "{\"type\":\"object\"}", 17 };

// Writes the JSON pointer of the value that begins at `at`.
static void write_path(const GgufJson *root, const char *at, char *out, size_t room) {
    GgufJson v = *root, key = { 0 }, child;
    size_t n = (size_t)snprintf(out, room, "#");
    for (bool inside = true; inside && n < room && v.s != at; ) {
        GgufJson rest = v;
        inside = false;
        if (v.type < GGUF_J_ARRAY) break;
        const bool object = v.type == GGUF_J_OBJECT;
        for (int i = 0; !inside && gguf_json_next(&rest, &key, &child); i++) {
            if (at < (object ? key.s : child.s) || at >= child.s + child.n) continue;
            inside = true;
            if (object)
                n += (size_t)snprintf(out + n, room - n, "/%.*s", (int)(key.n < 60 ? key.n - 2 : 58), key.s + 1);
            else n += (size_t)snprintf(out + n, room - n, "/%d", i);
        }
        if (inside) v = at < child.s ? (GgufJson){ GGUF_J_NULL, at, 0 } : child;
    }
}

#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
static int schema_fail(Schema *sc, const char *at, const char *fmt, ...) {
    char path[120], what[200];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(what, sizeof what, fmt, ap);
    va_end(ap);
    write_path(&sc->root, at, path, sizeof path);
    for (char *c = what; *c; c++) if ((unsigned char)*c < 0x20) *c = '?';
    for (char *c = path; *c; c++) if ((unsigned char)*c < 0x20) *c = '?';
    return grammar_fail(sc->g, "%s: %s: %s", sc->what, path, what);
}

// Bounds the time: a schema of 200 KB may be searched 600 times.
static void add_work(Schema *sc, const char *at, size_t n) {
    sc->work += (int64_t)n;
    if (sc->work > 1 << 27) schema_fail(sc, at, "too complex: too many references and alternatives");
}

// The target of a $ref: # or a pointer inside the schema.
static GgufJson follow_ref(Schema *sc, const GgufJson *ref) {
    GgufJson v = sc->root, child;
    const TokStr s = ref->type == GGUF_J_STRING ? json_chars(sc->g, ref) : (TokStr){ NULL, 0 };
    bool found = s.n && s.s[0] == '#' && (s.n == 1 || s.s[1] == '/') && !memchr(s.s, 0, s.n);
    char key[256];
    add_work(sc, ref->s, sc->root.n);
    for (size_t i = 1; found && i < s.n; ) {
        size_t n = 0;
        for (i++; i < s.n && s.s[i] != '/' && n + 1 < sizeof key; i++) {
            const bool escape = s.s[i] == '~' && i + 1 < s.n && (s.s[i + 1] == '0' || s.s[i + 1] == '1');
            key[n++] = escape ? s.s[++i] == '0' ? '~' : '/' : s.s[i];
        }
        key[n] = 0;
        found = (i == s.n || s.s[i] == '/') && v.type == GGUF_J_OBJECT && gguf_json_get(&v, key, &child);
        if (v.type == GGUF_J_ARRAY) {
            GgufJson rest = v;
            const long k = n && n < 6 && strspn(key, "0123456789") == n ? strtol(key, NULL, 10) : -1;
            for (long at = 0; !found && gguf_json_next(&rest, NULL, &child); at++) found = at == k;
        }
        v = child;
    }
    if (!found) schema_fail(sc, ref->s, "expected # or a path in this schema, such as #/$defs/name");
    free((void *)(uintptr_t)s.s);
    return found ? v : any_value;
}

static int find_keyword(const GgufJson *key) {         // N_KEYWORDS: an annotation; -1: not supported
    for (int k = 0; k < N_KEYWORDS; k++)
        if (gguf_json_is(key, keywords[k].name)) return k;
    for (size_t i = 0; i < sizeof annotations / sizeof *annotations; i++)
        if (gguf_json_is(key, annotations[i])) return N_KEYWORDS;
    return key->n > 3 && key->s[1] == 'x' && key->s[2] == '-' ? N_KEYWORDS : -1;
}

// Adds a schema, the target of its $ref and its allOf to the parts.
static void add_parts(Schema *sc, const GgufJson *v, Parts *p, int depth) {
    GgufJson x, rest;
    if (v->type == GGUF_J_TRUE || sc->g->failed) return;
    if (v->type == GGUF_J_FALSE) {
        p->never = true;
        return;
    }
    if (v->type != GGUF_J_OBJECT) {
        schema_fail(sc, v->s, "expected a schema");
        return;
    }
    for (int i = 0; i < p->n_visited; i++)
        if (p->visited[i] == v->s) return;
    if (p->n == SCHEMA_PARTS || p->n_visited == 4 * SCHEMA_PARTS || depth == 4 * SCHEMA_PARTS) {
        schema_fail(sc, v->s, "expected at most %d combined schemas", SCHEMA_PARTS);
        return;
    }
    p->visited[p->n_visited++] = v->s;
    if (gguf_json_get(v, "$ref", &x)) {
        const GgufJson target = follow_ref(sc, &x);
        add_parts(sc, &target, p, depth + 1);
    }
    if (p->n < SCHEMA_PARTS) p->part[p->n++] = *v;
    if (!gguf_json_get(v, "allOf", &rest)) return;
    if (rest.type != GGUF_J_ARRAY) schema_fail(sc, rest.s, "expected a list");
    while (!sc->g->failed && gguf_json_next(&rest, NULL, &x)) add_parts(sc, &x, p, depth + 1);
}

static int type_named(const GgufJson *v) {             // 0: no type has this name
    static const struct { const char *name; int bit; } names[] = {
        { "null", IS_A_NULL }, { "boolean", IS_A_BOOL }, { "integer", IS_A_INTEGER },
        { "number", IS_A_NUMBER | IS_A_INTEGER }, { "string", IS_A_STRING }, { "array", IS_A_ARRAY },
        { "object", IS_A_OBJECT } };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (gguf_json_is(v, names[i].name)) return names[i].bit;
    return 0;
}

static int json_type(const GgufJson *v) {
    static const int types[] = { IS_A_NULL, IS_A_BOOL, IS_A_BOOL, IS_A_INTEGER, IS_A_STRING, IS_A_ARRAY, IS_A_OBJECT };
    const bool whole = !memchr(v->s, '.', v->n) && !memchr(v->s, 'e', v->n) && !memchr(v->s, 'E', v->n);
    return v->type == GGUF_J_NUMBER && !whole ? IS_A_NUMBER : types[v->type];
}

static int read_types(Schema *sc, const GgufJson *v) {
    GgufJson rest = *v, x;
    int types = 0;
    if (v->type != GGUF_J_ARRAY) types = type_named(v);
    else while (gguf_json_next(&rest, NULL, &x)) {
        const int bit = type_named(&x);
        if (!bit) return schema_fail(sc, x.s, "expected the name of a type");
        types |= bit;
    }
    return types ? types : schema_fail(sc, v->s, "expected the name of a type, or a list of them");
}

// Collects the keywords of all parts. Only properties, required and additionalProperties may be in several parts;
// read_properties() reads each of those.
static void gather_fields(Schema *sc, const SchemaItem *it, const Parts *p, Fields *f) {
    bool typed = false;
    int implied = 0;
    *f = (Fields){ .types = IS_ANY_TYPE };
    for (int i = 0; i < p->n; i++) {
        GgufJson rest = p->part[i], key, v;
        while (!sc->g->failed && gguf_json_next(&rest, &key, &v)) {
            const int k = find_keyword(&key);
            bool done = k == K_REF || k == K_ALL_OF;
            for (int j = 0; j < it->n_done; j++) done |= v.s == it->done[j];
            if (k < 0) schema_fail(sc, key.s, "this keyword is not supported");
            if (k < 0 || k == N_KEYWORDS || done) continue;
            if (k == K_TYPE) {
                f->types &= read_types(sc, &v);
                typed = true;
            }
            implied |= keywords[k].types;
            const bool each = k == K_TYPE || k == K_PROPERTIES || k == K_REQUIRED || k == K_ADDITIONAL;
            if (f->v[k].s && !each && (f->v[k].n != v.n || memcmp(f->v[k].s, v.s, v.n) != 0))
                schema_fail(sc, key.s, "two combined schemas both have it");
            f->v[k] = v;
        }
    }
    const bool values = f->v[K_ENUM].s || f->v[K_CONST].s || f->v[K_ANY_OF].s || f->v[K_ONE_OF].s;
    if (!typed && implied && !values) f->types = implied;
}

// The rule of a list of schemas. Makes a new rule, whose body read_schema() adds later, if there is none.
static int schema_rule(Schema *sc, const SchemaItem *want) {
    for (int i = 0; i < sc->n_items; i++) {
        const SchemaItem *x = &sc->items[i];
        bool same = x->n == want->n && x->n_done == want->n_done;
        for (int k = 0; same && k < x->n; k++) same = x->value[k].s == want->value[k].s;
        for (int k = 0; same && k < x->n_done; k++) same = x->done[k] == want->done[k];
        if (same) return x->rule;
    }
    sc->items = grammar_reserve(sc->g, sc->items, sc->n_items, &sc->cap_items, sizeof *sc->items);
    const int rule = new_rule(sc->g);
    if (sc->g->failed) return 0;
    sc->items[sc->n_items] = *want;
    sc->items[sc->n_items++].rule = rule;
    return rule;
}

// A value of this schema. A schema that has only a $ref is replaced by its target.
static int expr_schema(Schema *sc, GgufJson v) {
    for (int k = 0; v.type == GGUF_J_OBJECT && !sc->g->failed; k++) {
        GgufJson rest = v, key, x, ref = { 0 };
        bool only = true;
        while (gguf_json_next(&rest, &key, &x)) {
            const int word = find_keyword(&key);
            if (word == K_REF) ref = x;
            else only &= word == N_KEYWORDS;
        }
        if (!ref.s || !only) break;
        if (k == SCHEMA_PARTS)
            return schema_fail(sc, ref.s, "it refers only to itself, or through %d others", SCHEMA_PARTS);
        v = follow_ref(sc, &ref);
    }
    if (v.type == GGUF_J_TRUE) return expr_call(sc->g, builtin(sc->g, JSON_VALUE, sc->call));
    return expr_call(sc->g, schema_rule(sc, &(SchemaItem){ .value = { v }, .n = 1 }));
}

// The integer of a keyword, or absent if the schema does not have it.
static int read_count(Schema *sc, const Fields *f, Keyword k, int absent) {
    int64_t n = absent;
    if (!f->v[k].s) return absent;
    if (!gguf_json_int(&f->v[k], 0, INT64_MAX, &n)) return schema_fail(sc, f->v[k].s, "expected an integer");
    const bool largest = k == K_MAX_ITEMS || k == K_MAX_LENGTH;
    if (n > GRAMMAR_COUNT && !largest) return schema_fail(sc, f->v[k].s, "expected at most %d", GRAMMAR_COUNT);
    return n > GRAMMAR_COUNT ? GRAMMAR_COUNT : (int)n;
}

// ==== [5] Schemas: strings, numbers, arrays =========================================================================

static int expr_pattern(Schema *sc, const char *at, TokStr s) {
    Grammar *g = sc->g;
    Reader r = { .g = g, .s = s.s, .n = s.n, .call = sc->call };
    if (g->failed) return 0;
    const int e = read_regex(&r, 0);
    if (g->failed) {
        char why[sizeof g->err];
        memcpy(why, g->err, sizeof why);
        g->failed = false;
        schema_fail(sc, at, "%s", why);
    }
    return e;
}

static int expr_string(Schema *sc, const Fields *f) {
    static const struct { const char *name, *pattern; } formats[] = {
        { "date", "^(?:\\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\\d|30)|"
                  "02-(?:0[1-9]|1\\d|2[0-8]))|"
                  "(?:\\d\\d(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)$" },
        { "time", "^(?:[01]\\d|2[0-3]):[0-5]\\d:[0-5]\\d(?:\\.\\d{1,9})?(?:Z|[+-](?:[01]\\d|2[0-3]):[0-5]\\d)$" },
        { "uuid", "^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$" },
        { "ipv4", "^(?:(?:25[0-5]|2[0-4]\\d|1\\d\\d|[1-9]?\\d)\\.){3}(?:25[0-5]|2[0-4]\\d|1\\d\\d|[1-9]?\\d)$" },
        { "email", "^[A-Za-z0-9_+-]+(?:\\.[A-Za-z0-9_+-]+)*"
                   "@(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\\.)+[A-Za-z]{2,24}$" },
    };
    Grammar *g = sc->g;
    const int min = read_count(sc, f, K_MIN_LENGTH, 0), max = read_count(sc, f, K_MAX_LENGTH, -1);
    const GgufJson pattern = f->v[K_PATTERN], format = f->v[K_FORMAT];
    int e = 0;
    if ((pattern.s && format.s) || ((pattern.s || format.s) && (f->v[K_MIN_LENGTH].s || f->v[K_MAX_LENGTH].s)))
        return schema_fail(sc, pattern.s ? pattern.s : format.s,
                           "cannot be combined with another restriction of the string");
    if (pattern.s) {
        if (pattern.type != GGUF_J_STRING) return schema_fail(sc, pattern.s, "expected a string");
        const TokStr s = json_chars(g, &pattern);
        e = expr_pattern(sc, pattern.s, s);
        free((void *)(uintptr_t)s.s);
    } else if (format.s) {
        size_t i = 0;
        const size_t n = sizeof formats / sizeof *formats;
        if (gguf_json_is(&format, "date-time")) {      // a date, T, a time
            const char *date = formats[0].pattern, *time = formats[1].pattern;
            e = SEQ(expr_pattern(sc, format.s, (TokStr){ date, strlen(date) }), expr_word(g, "T"),
                    expr_pattern(sc, format.s, (TokStr){ time, strlen(time) }));
        } else {
            while (i < n && !gguf_json_is(&format, formats[i].name)) i++;
            if (i == n) return schema_fail(sc, format.s, "expected date, time, date-time, uuid, ipv4 or email");
            e = expr_pattern(sc, format.s, (TokStr){ formats[i].pattern, strlen(formats[i].pattern) });
        }
    } else if (min == 0 && max < 0) {
        return expr_call(g, builtin(g, JSON_STRING, sc->call));
    } else {
        if (max >= 0 && max < min) return expr_nothing(g);
        e = expr_repeat(g, expr_string_char(g, sc->call), min, max);
    }
    return SEQ(expr_quote(g, sc->call), e, expr_quote(g, sc->call));
}

// Reads one bound of a range of numbers from two keywords; the tighter one counts. *open: the bound itself is excluded.
static void read_bound(Schema *sc, const Fields *f, Keyword closed, Keyword opened, bool is_low, int64_t *at,
                       bool *open) {
    for (int k = 0; k < 2; k++) {
        const GgufJson v = f->v[k ? opened : closed];
        double d;
        if (!v.s) continue;
        if (!gguf_json_float(&v, &d)) {
            schema_fail(sc, v.s, "expected a number");
        } else if (d < -1e15 || d > 1e15 || d != (double)(int64_t)d) {
            schema_fail(sc, v.s, "expected an integer up to 1e15");
        } else if (((int64_t)d == *at && k) || (is_low ? (int64_t)d > *at : (int64_t)d < *at)) {
            *at = (int64_t)d;
            *open = k;
        }
    }
}

static int expr_numeric(Schema *sc, const Fields *f, bool whole) {
    Grammar *g = sc->g;
    int64_t lo = -LARGEST, hi = LARGEST, one = 0;
    bool lo_open = false, hi_open = false;
    const GgufJson format = f->v[K_FORMAT], multiple = f->v[K_MULTIPLE];
    if (multiple.s && !(whole && gguf_json_int(&multiple, 1, 1, &one)))
        return schema_fail(sc, multiple.s, "only multiples of 1 are supported");
    if (format.s && whole && gguf_json_is(&format, "int32")) {
        lo = INT32_MIN;
        hi = INT32_MAX;
    } else if (format.s && !gguf_json_is(&format, "int64") && !gguf_json_is(&format, "float") &&
               !gguf_json_is(&format, "double")) {
        return schema_fail(sc, format.s, "expected int64, float or double, or int32 for integers");
    }
    read_bound(sc, f, K_MIN, K_OPEN_MIN, true, &lo, &lo_open);
    read_bound(sc, f, K_MAX, K_OPEN_MAX, false, &hi, &hi_open);
    if (lo == -LARGEST && hi == LARGEST) return expr_call(g, builtin(g, whole ? JSON_INTEGER : JSON_NUMBER, sc->call));
    return whole ? expr_integer_range(g, lo + lo_open, hi - hi_open) : expr_number_range(g, lo, hi, lo_open, hi_open);
}

static int expr_array(Schema *sc, const Fields *f) {
    Grammar *g = sc->g;
    const bool old = f->v[K_ITEMS].s && f->v[K_ITEMS].type == GGUF_J_ARRAY;    // before 2020, items was prefixItems
    const GgufJson list = old ? f->v[K_ITEMS] : f->v[K_PREFIX], rest = old ? f->v[K_ADDITIONAL_ITEMS] : f->v[K_ITEMS];
    GgufJson walk = list, prefix[SCHEMA_PREFIX], v;
    const int min = read_count(sc, f, K_MIN_ITEMS, 0);
    int n = 0, max = read_count(sc, f, K_MAX_ITEMS, -1);
    if (f->v[K_UNIQUE].s && f->v[K_UNIQUE].type != GGUF_J_FALSE)
        return schema_fail(sc, f->v[K_UNIQUE].s, "uniqueItems is not supported");
    if (list.s && list.type != GGUF_J_ARRAY) return schema_fail(sc, list.s, "expected a list of schemas");
    while (list.s && gguf_json_next(&walk, NULL, &v)) {
        if (n == SCHEMA_PREFIX) return schema_fail(sc, list.s, "expected at most %d schemas", SCHEMA_PREFIX);
        prefix[n++] = v;
    }
    const bool closed = rest.s ? rest.type == GGUF_J_FALSE : n > 0 && min <= n;
    if (closed && (max < 0 || max > n)) max = n;
    if (max >= 0 && max < min) return expr_nothing(g);
    const GgufJson other = rest.s ? rest : any_value;
    const int first = n ? n : 1;                       // these items are written one by one, the others as a repetition
    int tail = max >= 0 && max <= first ? new_expr(g, EXPR_SEQ, 0, 0, 0)
             : expr_repeat(g, SEQ(expr_comma(g, sc->call), expr_schema(sc, other)), min > first ? min - first : 0,
                           max < 0 ? -1 : max - first);
    for (int i = first - 1; i >= 0; i--) {
        const int item = expr_schema(sc, n ? prefix[i] : other);
        const int some = i ? SEQ(expr_comma(g, sc->call), item, tail) : SEQ(item, tail);
        tail = i < min ? some : expr_maybe(g, some);
        if (max >= 0 && i >= max) tail = new_expr(g, EXPR_SEQ, 0, 0, 0);
    }
    return SEQ(expr_word(g, "["), tail, expr_word(g, "]"));
}

// ==== [6] Schemas: objects ==========================================================================================

typedef struct { TokStr name; const char *at; GgufJson schema[4]; int n; bool required; } Property;

static int by_template_order(const void *a, const void *b) {           // the order of keys in tool calls
    const Property *x = a, *y = b;
    return tok_compare_keys(x->name, y->name, true);
}

static Property *find_property(Schema *sc, Property *p, int *n, const GgufJson *key) {
    const TokStr name = json_chars(sc->g, key);
    for (int i = 0; i < *n; i++)
        if (tok_compare_keys(p[i].name, name, false) == 0) {
            free((void *)(uintptr_t)name.s);
            return &p[i];
        }
    if (*n == SCHEMA_PROPERTIES) schema_fail(sc, key->s, "expected at most %d properties", SCHEMA_PROPERTIES);
    if (sc->g->failed) {
        free((void *)(uintptr_t)name.s);
        return NULL;
    }
    p[*n] = (Property){ .name = name, .at = key->s };
    return &p[(*n)++];
}

// Collects the properties of all parts, also those that are only in required. *other: the schema of undeclared
// properties.
static int read_properties(Schema *sc, const Parts *parts, Property *p, GgufJson *other) {
    GgufJson rest, key, v, x;
    int n = 0;
    *other = (GgufJson){ 0 };
    for (int i = 0; i < parts->n; i++) {
        if (gguf_json_get(&parts->part[i], "additionalProperties", &v) && (!other->s || v.type != GGUF_J_TRUE)) {
            if (other->s && other->type != GGUF_J_TRUE && other->type != v.type)
                return schema_fail(sc, v.s, "two combined schemas both have it");
            *other = v;
        }
        if (!gguf_json_get(&parts->part[i], "properties", &rest)) continue;
        if (rest.type != GGUF_J_OBJECT) return schema_fail(sc, rest.s, "expected an object");
        while (gguf_json_next(&rest, &key, &v)) {
            Property *one = find_property(sc, p, &n, &key);
            if (!one) return 0;
            if (one->n == 4) return schema_fail(sc, key.s, "expected at most 4 schemas of a property");
            one->schema[one->n++] = v;
        }
    }
    for (int i = 0; parts->n > 1 && i < parts->n; i++)
        for (int k = 0; k < n; k++) {
            if (!gguf_json_get(&parts->part[i], "additionalProperties", &v) || v.type == GGUF_J_TRUE) break;
            if (!gguf_json_get(&parts->part[i], "properties", &rest) || !gguf_json_get(&rest, p[k].name.s, &x))
                return schema_fail(sc, v.s, "with combined schemas, expected all properties next to it");
        }
    for (int i = 0; i < parts->n; i++) {
        if (!gguf_json_get(&parts->part[i], "required", &rest)) continue;
        if (rest.type != GGUF_J_ARRAY) return schema_fail(sc, rest.s, "expected a list of names");
        while (gguf_json_next(&rest, NULL, &v)) {
            if (v.type != GGUF_J_STRING) return schema_fail(sc, v.s, "expected a name");
            Property *one = find_property(sc, p, &n, &v);
            if (!one) return 0;
            one->required = true;
            if (!one->n) one->schema[one->n++] = other->s ? *other : any_value;
        }
    }
    return n;
}

static int by_name(const void *a, const void *b) {
    const Name *x = a, *y = b;
    for (int i = 0; ; i++)
        if (x->c[i] != y->c[i] || !x->c[i]) return (x->c[i] > y->c[i]) - (x->c[i] < y->c[i]);
}

// A member whose key is none of the properties. Its key is written without escapes.
static int expr_other_member(Schema *sc, const Property *p, int n, GgufJson schema) {
    Grammar *g = sc->g;
    Name *names = calloc((size_t)n + 1, sizeof *names);
    Chars allowed = { .n = 0 };
    if (!names) return grammar_fail(g, "grammar: out of memory");
    for (int i = 0; i < n; i++) {
        int k = 0;
        for (size_t at = 0; at < p[i].name.n && k < GRAMMAR_NESTING; k++) {
            const int len = tok_read_utf8((const unsigned char *)p[i].name.s + at, p[i].name.n - at, &names[i].c[k]);
            at += len > 0 ? (size_t)len : p[i].name.n;
        }
    }
    if (sc->call) {
        bare_chars(&allowed);
    } else {
        add_chars(&allowed, ' ', '!');
        add_chars(&allowed, '#', '[');
        add_chars(&allowed, ']', LAST_CHAR);
    }
    const int n_names = n + sc->call;                  // a bare key is not empty: names[n], the empty name, is excluded
    qsort(names, (size_t)n_names, sizeof *names, by_name);
    const int key = expr_other_than(g, names, n_names, 0, &allowed);
    free(names);
    const int quoted = sc->call ? key : SEQ(expr_word(g, "\""), key, expr_word(g, "\""));
    return SEQ(quoted, expr_colon(g, sc->call), expr_schema(sc, schema));
}

// The members of an object, in order. The rule `rest` matches the members after the current one, each after a comma.
static int expr_members(Schema *sc, const Property *p, int n, GgufJson other) {
    Grammar *g = sc->g;
    const bool open = other.s && other.type != GGUF_J_FALSE;
    const int first = new_expr(g, EXPR_ALT, 0, 0, 0);
    const int free_member = open ? rule_of(g, expr_other_member(sc, p, n, other)) : 0;
    int rest = open ? rule_of(g, expr_repeat(g, SEQ(expr_comma(g, sc->call), expr_call(g, free_member)), 0, -1)) : 0;
    int n_first = 0;                                   // one of these properties is the first member
    while (n_first < n && !p[n_first].required) n_first++;
    const bool may_be_empty = n_first == n;
    if (!may_be_empty) n_first++;
    if (may_be_empty) add_expr(g, first, new_expr(g, EXPR_SEQ, 0, 0, 0));
    if (may_be_empty && open) add_expr(g, first, SEQ(expr_call(g, free_member), expr_call(g, rest)));
    for (int i = n - 1; i >= 0 && !g->failed; i--) {
        SchemaItem it = { .n = p[i].n };
        memcpy(it.value, p[i].schema, sizeof p[i].schema);
        const int value = it.n == 1 ? expr_schema(sc, it.value[0]) : expr_call(g, schema_rule(sc, &it));
        const int member = rule_of(g, SEQ(expr_key(g, p[i].name, sc->call), expr_colon(g, sc->call), value));
        if (i < n_first) {
            const int alone = SEQ(expr_call(g, member));
            if (rest) add_expr(g, alone, expr_call(g, rest));
            add_expr(g, first, alone);
        }
        if (i == 0) break;
        const int more = SEQ(expr_comma(g, sc->call), expr_call(g, member));
        const int seq = SEQ(p[i].required ? more : expr_maybe(g, more));
        if (rest) add_expr(g, seq, expr_call(g, rest));
        rest = rule_of(g, seq);
    }
    return first;
}

static int expr_object(Schema *sc, const Fields *f, const Parts *parts) {
    Grammar *g = sc->g;
    int e = 0;
    GgufJson other;
    bool any = true;
    for (int k = K_PROPERTIES; k <= K_MAX_PROPERTIES; k++) any &= !f->v[k].s;
    if (any) return expr_call(g, builtin(g, JSON_OBJECT, sc->call));
    Property *p = calloc(SCHEMA_PROPERTIES, sizeof *p);
    if (!p) return grammar_fail(g, "grammar: out of memory");
    const int n = read_properties(sc, parts, p, &other);
    int n_required = 0;
    for (int i = 0; i < n; i++) n_required += p[i].required;
    if (!f->v[K_PROPERTIES].s && !other.s) other = any_value;
    const bool open = other.s && other.type != GGUF_J_FALSE;
    if (read_count(sc, f, K_MIN_PROPERTIES, 0) > n_required)
        schema_fail(sc, f->v[K_MIN_PROPERTIES].s, "expected at most %d, the number of required properties", n_required);
    if (f->v[K_MAX_PROPERTIES].s && (open || read_count(sc, f, K_MAX_PROPERTIES, 0) < n))
        schema_fail(sc, f->v[K_MAX_PROPERTIES].s, "only supported if no more properties are possible");
    if (sc->call) qsort(p, (size_t)n, sizeof *p, by_template_order);
    if (!g->failed) e = SEQ(expr_word(g, "{"), expr_members(sc, p, n, other), expr_word(g, "}"));
    for (int i = 0; i < SCHEMA_PROPERTIES && p[i].name.s; i++) free((void *)(uintptr_t)p[i].name.s);
    free(p);
    return e;
}

// ==== [7] Schemas: alternatives =====================================================================================

// One of the values of enum or const that have an allowed type. Strings, which may be many, become one prefix tree.
static int expr_enum(Schema *sc, const Fields *f) {
    Grammar *g = sc->g;
    const GgufJson one = f->v[K_CONST];
    GgufJson rest = f->v[K_ENUM], v;
    TokStr *strings = NULL;
    int n = 0, cap = 0;
    const int alt = new_expr(g, EXPR_ALT, 0, 0, 0);
    for (int k = K_PROPERTIES; k < N_KEYWORDS; k++)
        if (f->v[k].s && (keywords[k].types & f->types))
            return schema_fail(sc, f->v[k].s, "cannot be combined with enum or const");
    if (rest.s && rest.type != GGUF_J_ARRAY) return schema_fail(sc, rest.s, "expected a list of values");
    for (bool first = true; !g->failed && (rest.s ? gguf_json_next(&rest, NULL, &v) : first); first = false) {
        if (!rest.s) v = one;
        if (!(json_type(&v) & f->types) || (one.s && (v.n != one.n || memcmp(v.s, one.s, v.n) != 0))) continue;
        if (v.type != GGUF_J_STRING) {
            add_expr(g, alt, expr_value(g, &v, sc->call));
            continue;
        }
        strings = grammar_reserve(g, strings, n, &cap, sizeof *strings);
        TokText text = { 0 };
        TokStr s = g->failed ? (TokStr){ NULL, 0 } : json_chars(g, &v);
        if (s.s && !sc->call && tok_add_json_string(&text, s) < 0) grammar_fail(g, "grammar: out of memory");
        if (!sc->call) {
            free((void *)(uintptr_t)s.s);
            s = (TokStr){ text.s, text.n };
        }
        if (!g->failed) strings[n++] = s;
        else free((void *)(uintptr_t)s.s);
    }
    if (n) qsort(strings, (size_t)n, sizeof *strings, by_text);
    const int texts = n ? expr_one_of(g, strings, n, 0) : 0;
    if (n) add_expr(g, alt, sc->call ? SEQ(expr_quote(g, true), texts, expr_quote(g, true)) : texts);
    while (n) free((void *)(uintptr_t)strings[--n].s);
    free(strings);
    return alt;
}

// Reads the parts and keywords of schema *v together with the schemas of an item.
static void read_branch(Schema *sc, const SchemaItem *it, const GgufJson *v, SchemaItem *out, Parts *p, Fields *f) {
    *out = *it;
    if (out->n < SCHEMA_PARTS) out->value[out->n++] = *v;
    else schema_fail(sc, v->s, "expected at most %d combined schemas", SCHEMA_PARTS);
    *p = (Parts){ .n = 0 };
    for (int i = 0; i < out->n; i++) add_parts(sc, &out->value[i], p, 0);
    gather_fields(sc, out, p, f);
}

// The next value of enum or const; *rest starts as that keyword's value. False: there are no more.
static bool next_enum_value(const Fields *f, GgufJson *rest, GgufJson *v) {
    if (!f->v[K_ENUM].s || f->v[K_ENUM].type != GGUF_J_ARRAY) {
        *v = f->v[K_CONST];
        const bool more = rest->s != NULL;
        rest->s = NULL;
        return more && v->s;
    }
    return gguf_json_next(rest, NULL, v);
}

static bool has_values(const Fields *f) { return f->v[K_ENUM].s || f->v[K_CONST].s; }

static int possible_types(const Fields *f) {
    int types = 0;
    GgufJson rest = f->v[K_ENUM].s ? f->v[K_ENUM] : f->v[K_CONST], v;
    if (!has_values(f)) types = f->types;
    else while (next_enum_value(f, &rest, &v)) types |= json_type(&v) & f->types;
    return types | (f->v[K_NULLABLE].s && f->v[K_NULLABLE].type == GGUF_J_TRUE ? IS_A_NULL : 0);
}

static bool has_one_spelling(const GgufJson *v) {      // false: another JSON text may be the same value, as 1.0 and 1
    return v->type <= GGUF_J_STRING && json_type(v) != IS_A_NUMBER && !memchr(v->s, '\\', v->n);
}

// True: two enums certainly have no common value. Values that may be spelled differently count as common.
static bool enums_disjoint(const Fields *a, const Fields *b) {
    GgufJson of_a = a->v[K_ENUM].s ? a->v[K_ENUM] : a->v[K_CONST], x, y;
    while (next_enum_value(a, &of_a, &x)) {
        GgufJson of_b = b->v[K_ENUM].s ? b->v[K_ENUM] : b->v[K_CONST];
        while (next_enum_value(b, &of_b, &y))
            if (x.type == y.type && (!has_one_spelling(&x) || !has_one_spelling(&y) ||
                                     (x.n == y.n && !memcmp(x.s, y.s, x.n)))) return false;
    }
    return true;
}

static bool may_overlap(Schema *sc, const SchemaItem *it, const GgufJson *a, const GgufJson *b, int depth);

// True: an object that the grammar of one schema writes may satisfy the other schema.
static bool objects_overlap(Schema *sc, const Parts *a, const Parts *b, int depth) {
    Property *of[2] = { calloc(SCHEMA_PROPERTIES, sizeof(Property)), calloc(SCHEMA_PROPERTIES, sizeof(Property)) };
    GgufJson other[2] = { { 0 }, { 0 } };
    int n[2] = { 0, 0 };
    bool misses[2] = { false, false };                 // schema k lacks a property that the other one requires
    bool disjoint = false;
    if (!of[0] || !of[1]) grammar_fail(sc->g, "grammar: out of memory");
    for (int k = 0; k < 2 && !sc->g->failed; k++) n[k] = read_properties(sc, k ? b : a, of[k], &other[k]);
    for (int k = 0; k < 2 && !sc->g->failed; k++)
        for (int i = 0; i < n[!k]; i++) {
            const Property *want = &of[!k][i], *have = of[k];
            if (!want->required) continue;
            while (have < of[k] + n[k] && tok_compare_keys(have->name, want->name, false) != 0) have++;
            if (have == of[k] + n[k]) misses[k] = true;
            else if (have->required && have->n == 1 && want->n == 1)
                disjoint |= !may_overlap(sc, &(SchemaItem){ .n = 0 }, &have->schema[0], &want->schema[0], depth + 1);
        }
    bool closed[2], strict[2];                         // declared properties only: in its grammar; by the schema
    for (int k = 0; k < 2; k++) {
        strict[k] = other[k].s && other[k].type == GGUF_J_FALSE;
        closed[k] = strict[k] || (!other[k].s && n[k]);
        for (int i = 0; of[k] && i < n[k]; i++) free((void *)(uintptr_t)of[k][i].name.s);
        free(of[k]);
    }
    for (int k = 0, both = 0; k < 2; k++) {
        both += (misses[k] && closed[k]) || (misses[!k] && strict[!k]);
        disjoint |= both == 2;
    }
    return !disjoint;
}

// True: two schemas may hold for one value, together with the schemas of an item.

static bool may_overlap(Schema *sc, const SchemaItem *it, const GgufJson *a, const GgufJson *b, int depth) {
    SchemaItem item;
    Parts of_a, of_b;
    Fields fa, fb;
    read_branch(sc, it, a, &item, &of_a, &fa);
    read_branch(sc, it, b, &item, &of_b, &fb);
    const int both = possible_types(&fa) & possible_types(&fb);
    add_work(sc, b->s, 1 << 15);
    if (sc->g->failed || of_a.never || of_b.never || !both) return false;
    if (has_values(&fa) && has_values(&fb)) return !enums_disjoint(&fa, &fb);
    return both != IS_A_OBJECT || depth == 2 || has_values(&fa) || has_values(&fb) ||
           objects_overlap(sc, &of_a, &of_b, depth);
}

// Adds an alternative for each schema of anyOf or oneOf, together with the other restrictions of the item.
static void add_branches(Schema *sc, const SchemaItem *it, const Fields *f, int alt) {
    GgufJson list = f->v[K_ANY_OF].s ? f->v[K_ANY_OF] : f->v[K_ONE_OF], rest = list, v;
    bool restricts = false;
    int n = 0;
    if (f->v[K_ANY_OF].s && f->v[K_ONE_OF].s) schema_fail(sc, f->v[K_ONE_OF].s, "cannot be combined with anyOf");
    if (list.type != GGUF_J_ARRAY) schema_fail(sc, list.s, "expected a list of schemas");
    if (it->n_done == SCHEMA_DONE)
        schema_fail(sc, list.s, "expected at most %d nested lists of schemas", SCHEMA_DONE);
    for (int k = 0; k < N_KEYWORDS; k++) restricts |= f->v[k].s && k != K_ANY_OF && k != K_ONE_OF && k != K_NULLABLE;
    SchemaItem base = { .n = 0 };
    if (restricts) base = *it;
    if (sc->g->failed) return;
    if (restricts) base.done[base.n_done++] = list.s;
    for (; !sc->g->failed && gguf_json_next(&rest, NULL, &v); n++) {
        SchemaItem branch = base;
        GgufJson earlier = list, w;
        for (int i = 0; f->v[K_ONE_OF].s && i < n && gguf_json_next(&earlier, NULL, &w); i++)
            if (may_overlap(sc, &base, &w, &v, 0))
                schema_fail(sc, v.s, "a value may match both this and number %d; try anyOf", i);
        if (branch.n == SCHEMA_PARTS)
            schema_fail(sc, v.s, "expected at most %d combined schemas", SCHEMA_PARTS);
        if (n == 256) schema_fail(sc, v.s, "expected at most 256 schemas");
        if (sc->g->failed) return;
        branch.value[branch.n++] = v;
        add_expr(sc->g, alt, branch.n == 1 ? expr_schema(sc, v) : expr_call(sc->g, schema_rule(sc, &branch)));
    }
}

static int expr_item(Schema *sc, const SchemaItem *it) {
    Grammar *g = sc->g;
    Parts p = { .n = 0 };
    Fields f;
    for (int i = 0; i < it->n; i++) add_parts(sc, &it->value[i], &p, 0);
    gather_fields(sc, it, &p, &f);
    if (p.never || g->failed) return expr_nothing(g);
    const int alt = new_expr(g, EXPR_ALT, 0, 0, 0);
    if (f.v[K_NULLABLE].s && f.v[K_NULLABLE].type == GGUF_J_TRUE) add_expr(g, alt, expr_word(g, "null"));
    if (f.v[K_ANY_OF].s || f.v[K_ONE_OF].s) {
        add_branches(sc, it, &f, alt);
        return alt;
    }
    if (has_values(&f)) {
        add_expr(g, alt, expr_enum(sc, &f));
        return alt;
    }
    if (f.types & IS_A_STRING) add_expr(g, alt, expr_string(sc, &f));
    if (f.types & (IS_A_NUMBER | IS_A_INTEGER)) add_expr(g, alt, expr_numeric(sc, &f, !(f.types & IS_A_NUMBER)));
    if (f.types & IS_A_BOOL) add_expr(g, alt, ALT(expr_word(g, "true"), expr_word(g, "false")));
    if (f.types & IS_A_NULL) add_expr(g, alt, expr_word(g, "null"));
    if (f.types & IS_A_ARRAY) add_expr(g, alt, expr_array(sc, &f));
    if (f.types & IS_A_OBJECT) add_expr(g, alt, expr_object(sc, &f, &p));
    return alt;
}

// A value for which the schema holds and, if it is not NULL, the schema `also`. Makes all rules that it needs.
static int read_schema(Grammar *g, const GgufJson *schema, const GgufJson *also, const char *what, bool call) {
    Schema sc = { .g = g, .root = *schema, .what = what, .call = call };
    SchemaItem first = { .value = { *schema }, .n = 1 };
    if (also) first.value[first.n++] = *also;
    const int e = also ? expr_call(g, schema_rule(&sc, &first)) : expr_schema(&sc, *schema);
    for (int i = 0; i < sc.n_items && !g->failed; i++) {
        const SchemaItem it = sc.items[i];
        const int expr = expr_item(&sc, &it);
        if (!g->failed) g->rules[it.rule].expr = expr;
    }
    free(sc.items);
    return e;
}

static bool parse_json(Grammar *g, const char *what, TokStr text, GgufJson *v) {
    size_t at;
    const char *err;
    if (!check_text(g, what, text.s, text.n)) return false;
    if (gguf_json_parse(text.s, text.n, v, &at, &err) == 0) return true;
    return grammar_fail(g, "%s: byte %zu: expected %s", what, at, err);
}

// ==== [8] Tools =====================================================================================================

// A call of one tool:  <|tool_call>call:NAME{...}<tool_call|>
static int expr_tool(Grammar *g, const GgufJson *tool, int number, const char *wanted, bool *found) {
    GgufJson fn, name, parameters;
    char what[100];
    if (!gguf_json_get(tool, "function", &fn)) fn = *tool;
    if (!gguf_json_get(&fn, "name", &name) || name.type != GGUF_J_STRING || name.n < 3)
        return grammar_fail(g, "tools[%d]: expected the name of a function", number);
    if (wanted && !gguf_json_is(&name, wanted)) return 0;
    *found = true;
    const TokStr s = json_chars(g, &name);
    bool plain = s.n > 0 && !memchr(s.s, '{', s.n) && tok_trim(s).n == s.n;
    for (size_t i = 0; i < s.n; i++) plain &= (unsigned char)s.s[i] >= 0x20;
    if (!plain)
        grammar_fail(g, "tools[%d]: expected a name without '{', control characters or surrounding blanks", number);
    snprintf(what, sizeof what, "tools[%d].parameters", number);
    const bool any = !gguf_json_get(&fn, "parameters", &parameters) || parameters.type == GGUF_J_NULL ||
                     (parameters.type == GGUF_J_OBJECT && parameters.n == 2);
    const int arguments = any ? expr_word(g, "{}") : read_schema(g, &parameters, &any_object, what, true);
    const int e = SEQ(expr_token(g, g->t->call_open), expr_word(g, "call:"), expr_text(g, s.s, s.n), arguments,
                      expr_token(g, g->t->call_close));
    free((void *)(uintptr_t)s.s);
    return e;
}

// Calls of a list of tools as in the OpenAI API. wanted: the only function that may be called, or NULL.
static int read_tools(Grammar *g, const GgufJson *tools, const char *wanted, bool several) {
    GgufJson rest = *tools, tool;
    bool found = false;
    if (tools->type != GGUF_J_ARRAY) return grammar_fail(g, "tools: expected a list");
    if (g->t->call_open < 0 || g->t->call_close < 0 || g->t->quote < 0)
        return grammar_fail(g, "tools: this model's vocabulary has no token <|tool_call>");
    const int alt = new_expr(g, EXPR_ALT, 0, 0, 0);
    for (int i = 0; !g->failed && gguf_json_next(&rest, NULL, &tool); i++)
        add_expr(g, alt, expr_tool(g, &tool, i, wanted, &found));
    if (!found && wanted) return grammar_fail(g, "tools: expected a tool named '%.100s'", wanted);
    if (!found) return grammar_fail(g, "tools: expected at least one tool");
    return several ? expr_repeat(g, alt, 1, -1) : alt;
}

static bool grammar_from_schema(Grammar *g, const GrammarVocab *v, TokStr schema) {
    GgufJson root;
    grammar_init(g, v);
    return parse_json(g, "schema", schema, &root) && grammar_ready(g, read_schema(g, &root, NULL, "schema", false));
}

// tools: a JSON list as in the OpenAI API. wanted: the only function that may be called; NULL: any. several: one or
// more calls. schema: an answer that satisfies this schema is allowed instead of calls; empty: only calls are allowed.
static bool grammar_from_tools(Grammar *g, const GrammarVocab *v, TokStr tools, const char *wanted, bool several,
                               TokStr schema) {
    GgufJson list, root;
    grammar_init(g, v);
    if (!parse_json(g, "tools", tools, &list) || (schema.n && !parse_json(g, "schema", schema, &root))) return false;
    const int calls = read_tools(g, &list, wanted, several);
    return grammar_ready(g, !schema.n || g->failed ? calls : ALT(calls, read_schema(g, &root, NULL, "schema", false)));
}

#endif
