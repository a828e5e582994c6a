/* schema.h - makes grammars (parts/grammar.h) from JSON schemas and from declarations of tools. Part of gemma4.c, which
 * includes it.
 *
 * A schema is a list of parts that must all hold: the schema itself, the target of its $ref, the schemas in its allOf.
 * A part is a position in the schema's text, so parts are compared by address. Each list of parts becomes one rule, so
 * a schema that contains itself makes a recursive rule.
 *
 * A text that matches the grammar satisfies the schema, except for what g->warnings names: a restriction that cannot be
 * enforced is an error if the schema is strict, else a warning. Not every text that satisfies the schema matches the
 * grammar: properties come in the order of the schema (in calls: in the order of the chat template), undeclared
 * properties come last; without additionalProperties only declared properties are allowed, and without items only the
 * items of prefixItems. A schema that is not valid, or too large, is an error.
 *
 * Uses grammar.h, pattern.h and gguf.h (JSON). Begin with grammar_from_schema() and grammar_from_tools().
 *   [1] JSON values    [2] Schemas: parts and keywords    [3] References    [4] Collecting keywords
 *   [5] Strings, numbers, arrays    [6] Objects    [7] Alternatives    [8] Tools */
#ifndef SCHEMA_H
#define SCHEMA_H

// ==== [1] JSON values ===============================================================================================
// Values are written in one of two forms. JSON: at most one space after a comma or colon, so that a text cannot be
// endless white space, and numbers of bounded length. A tool call, as the chat template writes it: strings are between
// <|"|> without escapes, keys are without quotes, and there are no spaces.

typedef enum { JSON_STRING, JSON_INTEGER, JSON_NUMBER, JSON_VALUE, JSON_ARRAY, JSON_OBJECT, JSON_KEY } Builtin;

static int expr_hex(Grammar *g, int n) {
    ByteSet b = { { 0 } };
    add_bytes(&b, '0', '9');
    add_bytes(&b, 'A', 'F');
    add_bytes(&b, 'a', 'f');
    return expr_repeat(g, expr_bytes(g, &b), n, n);
}

// Any character inside a string, also as an escape. \u escapes of surrogates are not allowed.
static int expr_string_char(Grammar *g, bool call) {
    Chars raw = writable_chars(WRITE_KEY);
    if (call) {
        raw = writable_chars(WRITE_CALL);
        return expr_chars(g, &raw);
    }
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

// The rule of a value that does not depend on a schema. Each grammar has it at most once.
static int builtin(Grammar *g, Builtin what, bool call) {
    int32_t *cached = &g->builtin[8 * call + what];
    if (*cached) return *cached;
    const int rule = *cached = new_rule(g);
    if (!rule) return 0;
    Chars bare = writable_chars(WRITE_BARE);
    int e = 0;
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

// ==== [2] Schemas: parts and keywords ===============================================================================

enum { SCHEMA_PARTS = 16, SCHEMA_DONE = 8, SCHEMA_PROPERTIES = 1024, SCHEMA_PREFIX = 64, SCHEMA_FORMATS = 24,
       SCHEMA_NOT = 16, SCHEMA_WARNED = 32, SCHEMA_URI = 512 };

enum { IS_A_NULL = 1, IS_A_BOOL = 2, IS_A_INTEGER = 4, IS_A_NUMBER = 8, IS_A_STRING = 16, IS_A_ARRAY = 32,
       IS_A_OBJECT = 64, IS_ANY_TYPE = 127 };

typedef enum {
    K_TYPE, K_NULLABLE, K_ENUM, K_CONST, K_ANY_OF, K_ONE_OF, K_ALL_OF, K_REF, K_NOT, K_PROPERTIES, K_REQUIRED,
    K_ADDITIONAL, K_UNEVALUATED, K_PATTERN_PROPERTIES, K_PROPERTY_NAMES, K_MIN_PROPERTIES, K_MAX_PROPERTIES, K_ITEMS,
    K_PREFIX, K_ADDITIONAL_ITEMS, K_MIN_ITEMS, K_MAX_ITEMS, K_UNIQUE, K_MIN_LENGTH, K_MAX_LENGTH, K_PATTERN, K_FORMAT,
    K_MIN, K_MAX, K_OPEN_MIN, K_OPEN_MAX, K_MULTIPLE, N_KEYWORDS, ANNOTATION
} Keyword;

static const struct { const char *name; int types; } keywords[N_KEYWORDS] = {    // types that it restricts; 0: all
    { "type", 0 }, { "nullable", 0 }, { "enum", 0 }, { "const", 0 }, { "anyOf", 0 }, { "oneOf", 0 }, { "allOf", 0 },
    { "$ref", 0 }, { "not", 0 }, { "properties", IS_A_OBJECT }, { "required", IS_A_OBJECT },
    { "additionalProperties", IS_A_OBJECT }, { "unevaluatedProperties", IS_A_OBJECT },
    { "patternProperties", IS_A_OBJECT }, { "propertyNames", IS_A_OBJECT }, { "minProperties", IS_A_OBJECT },
    { "maxProperties", IS_A_OBJECT }, { "items", IS_A_ARRAY }, { "prefixItems", IS_A_ARRAY },
    { "additionalItems", IS_A_ARRAY }, { "minItems", IS_A_ARRAY }, { "maxItems", IS_A_ARRAY },
    { "uniqueItems", IS_A_ARRAY }, { "minLength", IS_A_STRING }, { "maxLength", IS_A_STRING },
    { "pattern", IS_A_STRING }, { "format", IS_A_STRING | IS_A_NUMBER | IS_A_INTEGER },
    { "minimum", IS_A_INTEGER | IS_A_NUMBER }, { "maximum", IS_A_INTEGER | IS_A_NUMBER },
    { "exclusiveMinimum", IS_A_INTEGER | IS_A_NUMBER }, { "exclusiveMaximum", IS_A_INTEGER | IS_A_NUMBER },
    { "multipleOf", IS_A_INTEGER | IS_A_NUMBER },
};

static const char *const annotations[] = {             // keywords that restrict nothing
    "title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly", "$schema", "$id",
    "id", "$comment", "$defs", "definitions", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary",
    "contentEncoding", "contentMediaType", "contentSchema", "discriminator", "externalDocs", "xml", "then", "else",
    "minContains", "maxContains", "enumNames", "enumDescriptions", "markdownDescription", "propertyOrdering",
    "errorMessage", "tsType", "strict",
};                                                     // then and else restrict only with if, which is not supported

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

typedef struct {                       // the keywords of all parts
    GgufJson     v[N_KEYWORDS];        // of the last part that has it; s NULL: keyword k is absent
    const Parts *parts;
    int          types;
    bool         never, unknown;       // no value satisfies it; it has a keyword that is not supported
    GgufJson     not_value[SCHEMA_NOT], not_string[SCHEMA_NOT];        // lists of values; schemas of strings
    int          n_not_value, n_not_string;
} Fields;

typedef struct {
    Grammar    *g;
    GgufJson    root;
    const char *what;                  // for error messages
    bool        strict;                // what cannot be enforced is an error
    bool        call;                  // values are written as in a tool call, not as JSON
    SchemaItem *items;                 // that become rules
    int         n_items, cap_items;
    int64_t     work;                  // bytes that were searched for $ref, and pairs of oneOf that were compared
    int         depth;                 // of schemas in `not` and propertyNames
    const char *warned[SCHEMA_WARNED];                 // places that have a warning
    int         n_warned;
    Patterns    patterns;
    int         format[SCHEMA_FORMATS];                // patterns that were read; 0: not yet
} Schema;

static const GgufJson any_value = { GGUF_J_TRUE, "true", 4 };
static const GgufJson no_value = { GGUF_J_FALSE, "false", 5 };
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

// Adds "what: path: text" to the grammar's warnings, once for each place.
static void add_warning(Schema *sc, const char *at, const char *text) {
    char path[120];
    Grammar *g = sc->g;
    const size_t n = strlen(g->warnings), room = sizeof g->warnings - n;
    for (int i = 0; i < sc->n_warned; i++) if (sc->warned[i] == at) return;
    if (sc->n_warned == SCHEMA_WARNED || g->failed) return;
    sc->warned[sc->n_warned++] = at;
    write_path(&sc->root, at, path, sizeof path);
    const int more = snprintf(g->warnings + n, room, "%s%s: %s: %s", n ? "; " : "", sc->what, path, text);
    if (more < 0 || (size_t)more >= room) g->warnings[n] = 0;          // no room for it
    for (char *c = g->warnings + n; *c; c++) if (*c < 0x20 || *c > 0x7E) *c = '?';
}

// A restriction that cannot be enforced: an error if the schema is strict, else a warning.
#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
static void leave_out(Schema *sc, const char *at, const char *fmt, ...) {
    char what[160];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(what, sizeof what, fmt, ap);
    va_end(ap);
    if (sc->strict) schema_fail(sc, at, "%s; without strict it is left out", what);
    else add_warning(sc, at, what);
}

// Bounds the time: a schema of 200 KB may be searched 600 times.
static void add_work(Schema *sc, const char *at, size_t n) {
    sc->work += (int64_t)n;
    if (sc->work > 1 << 27) schema_fail(sc, at, "too complex: too many references and alternatives");
}

static int find_keyword(const GgufJson *key) {         // -1: unknown
    for (int k = 0; k < N_KEYWORDS; k++)
        if (gguf_json_is(key, keywords[k].name)) return k;
    if (gguf_json_is(key, "$dynamicRef") || gguf_json_is(key, "$recursiveRef")) return K_REF;
    for (size_t i = 0; i < sizeof annotations / sizeof *annotations; i++)
        if (gguf_json_is(key, annotations[i])) return ANNOTATION;
    return key->n > 3 && key->s[1] == 'x' && key->s[2] == '-' ? ANNOTATION : -1;
}

// ==== [3] References ================================================================================================
// A $ref is a URI. Its fragment is empty, a JSON pointer, or an $anchor; what precedes it names a schema by $id. A
// relative URI is resolved against the $id around it.

// The bytes of s without its %HH escapes, in place. Returns their number.
static size_t decode_percent(char *s, size_t n) {
    size_t out = 0;
    for (size_t i = 0; i < n; i++) {
        const int hi = i + 2 < n && s[i] == '%' ? tok_hex_digit((unsigned char)s[i + 1]) : -1;
        const int lo = hi < 0 ? -1 : tok_hex_digit((unsigned char)s[i + 2]);
        s[out++] = lo < 0 ? s[i] : (char)(hi << 4 | lo);
        if (lo >= 0) i += 2;
    }
    return out;
}

// Resolves the reference `uri` against a base URI. Both end with a 0; a fragment is dropped.
static void resolve_uri(const char *base, const char *uri, char out[SCHEMA_URI]) {
    const size_t scheme = strspn(uri, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+.-");
    const char *host = strstr(base, "://"), *path = host ? strchr(host + 3, '/') : base;
    const char *last = path ? strrchr(path, '/') : NULL;
    size_t keep = last ? (size_t)(last - base) + 1 : host ? strlen(base) : 0;
    if (scheme && uri[scheme] == ':') keep = 0;
    else if (!strncmp(uri, "//", 2)) keep = host ? (size_t)(host - base) + 1 : 0;
    else if (*uri == '/') keep = path ? (size_t)(path - base) : strlen(base);
    else if (!*uri || *uri == '#') keep = strlen(base);
    while (!strncmp(uri, "./", 2)) uri += 2;
    for (; !strncmp(uri, "../", 3); uri += 3) {
        while (keep && base[keep - 1] == '/') keep--;
        while (keep && base[keep - 1] != '/') keep--;
    }
    snprintf(out, SCHEMA_URI, "%.*s%s%s", (int)keep, base,
             keep && !last && host && *uri && *uri != '/' && *uri != '#' ? "/" : "", uri);
    out[strcspn(out, "#")] = 0;
}

// Reads the URI of a schema, its $id (draft 4: id), resolved against the one around it. False: it has none.
static bool read_id(const GgufJson *v, const char *base, char out[SCHEMA_URI]) {
    GgufJson id;
    char text[SCHEMA_URI];
    if (v->type != GGUF_J_OBJECT || (!gguf_json_get(v, "$id", &id) && !gguf_json_get(v, "id", &id))) return false;
    if (id.type != GGUF_J_STRING || id.n >= sizeof text) return false;
    text[gguf_json_string(&id, text)] = 0;
    if (!*text || *text == '#') return false;
    resolve_uri(base, text, out);
    return true;
}

// The innermost schema with an $id around the place `at`, and its URI.
static GgufJson enclosing_schema(const Schema *sc, const char *at, char base[SCHEMA_URI]) {
    GgufJson v = sc->root, found = v, key, child;
    char uri[SCHEMA_URI];
    *base = 0;
    for (bool inside = true; inside; ) {
        GgufJson rest = v;
        if (read_id(&v, base, uri)) {
            memcpy(base, uri, sizeof uri);
            found = v;
        }
        inside = false;
        while (v.type >= GGUF_J_ARRAY && !inside && gguf_json_next(&rest, &key, &child))
            inside = at >= child.s && at < child.s + child.n;
        if (inside) v = child;
    }
    return found;
}

// Searches a value and those inside for the schema with a URI or, if uri is NULL, with an $anchor.
static bool search_schema(Schema *sc, const GgufJson *v, const char *base, const char *uri, const char *anchor,
                          GgufJson *found) {
    static const char *const names[] = { "$anchor", "$dynamicAnchor", "$id", "id" };
    GgufJson rest = *v, key = { 0 }, child;
    char own[SCHEMA_URI];
    add_work(sc, sc->root.s, v->n / 4 + 64);
    if (v->type < GGUF_J_ARRAY || sc->g->failed) return false;
    const char *here = read_id(v, base, own) ? own : base;
    bool is = uri && here == own && strcmp(own, uri) == 0;
    for (int i = 0; anchor && v->type == GGUF_J_OBJECT && i < 4; i++)  // draft 7: "$id": "#anchor"
        is |= gguf_json_get(v, names[i], &child) && gguf_json_is(&child, i < 2 ? anchor + 1 : anchor);
    if (is) *found = *v;
    while (!is && gguf_json_next(&rest, &key, &child)) is = search_schema(sc, &child, here, uri, anchor, found);
    return is;
}

// Follows a JSON pointer, "" or "/a/0/..", from a value.
static bool follow_pointer(GgufJson v, const char *s, size_t n, GgufJson *found) {
    GgufJson child = v;
    char key[256];
    for (size_t i = 0; i < n; v = child) {
        size_t len = 0;
        for (i++; i < n && s[i] != '/' && len + 1 < sizeof key; i++) {
            const bool escape = s[i] == '~' && i + 1 < n && (s[i + 1] == '0' || s[i + 1] == '1');
            key[len++] = escape ? s[++i] == '0' ? '~' : '/' : s[i];
        }
        key[len] = 0;
        if (i < n && s[i] != '/') return false;
        bool is = v.type == GGUF_J_OBJECT && gguf_json_get(&v, key, &child);
        if (v.type == GGUF_J_ARRAY) {
            GgufJson rest = v;
            const long k = len && len < 6 && strspn(key, "0123456789") == len ? strtol(key, NULL, 10) : -1;
            for (long at = 0; !is && gguf_json_next(&rest, NULL, &child); at++) is = at == k;
        }
        if (!is) return false;
    }
    *found = v;
    return true;
}

// The target of a $ref.
static GgufJson follow_ref(Schema *sc, const GgufJson *ref) {
    char base[SCHEMA_URI], uri[SCHEMA_URI];
    GgufJson target = any_value, root;
    const TokStr s = ref->type == GGUF_J_STRING ? json_chars(sc->g, ref) : (TokStr){ NULL, 0 };
    char *text = (char *)(uintptr_t)s.s;
    bool found = s.n < SCHEMA_URI && text && !memchr(text, 0, s.n);
    add_work(sc, ref->s, sc->root.n);
    if (found) {
        const char *fragment = text + strcspn(text, "#");
        GgufJson nearest = enclosing_schema(sc, ref->s, base);
        root = sc->root;
        resolve_uri(base, text, uri);
        if (*text != '#') found = search_schema(sc, &sc->root, "", uri, NULL, &root);
        if (*text != '#') nearest = root;
        for (int decode = 0, done = 0; found && decode < 2 && !done; decode++) {
            size_t n = *fragment ? strlen(fragment + 1) : 0;
            if (decode) n = decode_percent(text + (fragment - text) + 1, n);
            if (decode) text[fragment - text + 1 + (ptrdiff_t)n] = 0;
            if (n && fragment[1] != '/') done = search_schema(sc, &sc->root, "", NULL, fragment, &target);
            else done = follow_pointer(nearest, n ? fragment + 1 : "", n, &target) ||
                        follow_pointer(root, n ? fragment + 1 : "", n, &target);
            if (decode || !n) found = done;
        }
    }
    if (!found)
        schema_fail(sc, ref->s, "expected # or a path in this schema, such as #/$defs/name, or an $id or $anchor");
    free(text);
    return found ? target : any_value;
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
    if (gguf_json_get(v, "$ref", &x) || gguf_json_get(v, "$dynamicRef", &x) || gguf_json_get(v, "$recursiveRef", &x)) {
        const GgufJson target = follow_ref(sc, &x);
        add_parts(sc, &target, p, depth + 1);
    }
    if (p->n < SCHEMA_PARTS) p->part[p->n++] = *v;
    if (!gguf_json_get(v, "allOf", &rest)) return;
    if (rest.type != GGUF_J_ARRAY) schema_fail(sc, rest.s, "expected a list");
    while (!sc->g->failed && gguf_json_next(&rest, NULL, &x)) add_parts(sc, &x, p, depth + 1);
}

// The next part that has a keyword; *i begins at 0.
static bool next_keyword(const Parts *p, int *i, Keyword k, GgufJson *v) {
    while (*i < p->n)
        if (gguf_json_get(&p->part[(*i)++], keywords[k].name, v)) return true;
    return false;
}

// ==== [4] Collecting keywords =======================================================================================

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
    if (v->type != GGUF_J_NUMBER) return types[v->type];
    const Decimal d = read_decimal((TokStr){ v->s, v->n });
    return d.n_part || d.more ? IS_A_NUMBER : IS_A_INTEGER;
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

// The next of a list of values; or, once, a single value. *rest begins as the list or value, which may be absent.
static bool next_value(bool is_list, GgufJson *rest, GgufJson *v) {
    if (is_list) return rest->type == GGUF_J_ARRAY && gguf_json_next(rest, NULL, v);
    *v = *rest;
    rest->s = NULL;
    return v->s != NULL;
}

static void read_not(Schema *sc, Fields *f, const GgufJson *v);

// Collects the keywords of all parts. A keyword of several parts restricts as each of them says. Of several anyOf and
// oneOf the first is collected: add_branches() expands it, and then the next one.
static void gather_fields(Schema *sc, const SchemaItem *it, const Parts *p, Fields *f) {
    bool typed = false;
    int implied = 0;
    *f = (Fields){ .types = IS_ANY_TYPE, .parts = p };
    for (int i = 0; i < p->n; i++) {
        GgufJson rest = p->part[i], key, v;
        while (!sc->g->failed && gguf_json_next(&rest, &key, &v)) {
            const int k = find_keyword(&key);
            bool done = k == K_REF || k == K_ALL_OF;
            for (int j = 0; j < it->n_done; j++) done |= v.s == it->done[j];
            if (k < 0) leave_out(sc, key.s, "this keyword is not supported");
            f->unknown |= k < 0;
            if (k < 0 || k == ANNOTATION || done) continue;
            if (k == K_TYPE) {
                f->types &= read_types(sc, &v);
                typed = true;
            }
            implied |= keywords[k].types;
            const bool one = k == K_PREFIX || k == K_ADDITIONAL_ITEMS || (k == K_ITEMS && v.type == GGUF_J_ARRAY);
            if (one && f->v[k].s && (f->v[k].n != v.n || memcmp(f->v[k].s, v.s, v.n) != 0))
                leave_out(sc, key.s, "two combined schemas both have it");
            if (!((one || k == K_ANY_OF || k == K_ONE_OF) && f->v[k].s)) f->v[k] = v;
        }
    }
    if (f->v[K_ANY_OF].s) f->v[K_ONE_OF] = (GgufJson){ 0 };
    const bool values = f->v[K_ENUM].s || f->v[K_CONST].s || f->v[K_ANY_OF].s || f->v[K_ONE_OF].s;
    if (!typed && implied && !values) f->types = implied;
    GgufJson v;
    for (int i = 0; !sc->g->failed && next_keyword(p, &i, K_NOT, &v); ) read_not(sc, f, &v);
}

static bool has_only(const Fields *f, int a, int b, int c, int d, int e) {     // no keywords but these
    for (int k = 0; k < N_KEYWORDS; k++)
        if (f->v[k].s && k != a && k != b && k != c && k != d && k != e) return false;
    return true;
}

// Excludes what a schema in `not` describes: values, types, or strings.
static void read_not(Schema *sc, Fields *f, const GgufJson *v) {
    Parts p = { .n = 0 };
    Fields n;
    GgufJson rest, x;
    if (sc->depth == 4) {
        leave_out(sc, v->s, "it is nested too deeply");
        return;
    }
    sc->depth++;
    add_work(sc, v->s, v->n);
    add_parts(sc, v, &p, 0);
    gather_fields(sc, &(SchemaItem){ .n = 0 }, &p, &n);
    sc->depth--;
    if (sc->g->failed || p.never || n.never || n.unknown) return;
    const GgufJson values = n.v[K_ENUM].s ? n.v[K_ENUM] : n.v[K_CONST];
    const bool strings = n.types == IS_A_STRING &&
                         has_only(&n, K_TYPE, K_MIN_LENGTH, K_MAX_LENGTH, K_PATTERN, K_FORMAT);
    bool containers = false;                           // a value is an array or object
    rest = values;
    while (next_value(n.v[K_ENUM].s && values.type == GGUF_J_ARRAY, &rest, &x)) containers |= x.type >= GGUF_J_ARRAY;
    const bool room = f->n_not_value < SCHEMA_NOT && f->n_not_string < SCHEMA_NOT;
    if (has_only(&n, -1, -1, -1, -1, -1)) {
        f->never = true;
    } else if (has_only(&n, K_ANY_OF, -1, -1, -1, -1) && n.v[K_ANY_OF].type == GGUF_J_ARRAY) {
        for (rest = n.v[K_ANY_OF]; !sc->g->failed && gguf_json_next(&rest, NULL, &x); ) read_not(sc, f, &x);
    } else if (has_only(&n, K_TYPE, -1, -1, -1, -1) && (n.types & IS_A_NUMBER || !(n.types & IS_A_INTEGER) ||
                                                       !(f->types & IS_A_NUMBER))) {
        f->types &= ~n.types;
    } else if (has_only(&n, K_TYPE, K_ENUM, K_CONST, -1, -1) && room && !containers &&
               !(n.v[K_ENUM].s && n.v[K_CONST].s)) {
        f->not_value[f->n_not_value++] = values;
    } else if (strings && room) {
        if (!n.v[K_TYPE].s) f->types &= IS_A_STRING;   // it holds for everything else
        f->not_string[f->n_not_string++] = *v;
    } else {
        leave_out(sc, v->s, "only values, types and restrictions of strings can be excluded");
    }
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
            else only &= word == ANNOTATION;
        }
        if (!ref.s || !only) break;
        if (k == SCHEMA_PARTS)
            return schema_fail(sc, ref.s, "it refers only to itself, or through %d others", SCHEMA_PARTS);
        v = follow_ref(sc, &ref);
    }
    if (v.type == GGUF_J_TRUE) return expr_call(sc->g, builtin(sc->g, JSON_VALUE, sc->call));
    return expr_call(sc->g, schema_rule(sc, &(SchemaItem){ .value = { v }, .n = 1 }));
}

// A value of all these schemas; n may be 0.
static int expr_schemas(Schema *sc, const GgufJson *schema, int n) {
    SchemaItem it = { .n = n };
    if (n < 2) return expr_schema(sc, n ? *schema : any_value);
    memcpy(it.value, schema, (size_t)n * sizeof *schema);
    return expr_call(sc->g, schema_rule(sc, &it));
}

// The count of a keyword, or `absent` if no schema has it: of several a minimum is the largest, a maximum the smallest.
static int read_count(Schema *sc, const Fields *f, Keyword k, int absent) {
    const bool largest = k == K_MAX_ITEMS || k == K_MAX_LENGTH || k == K_MAX_PROPERTIES;
    int count = absent;
    GgufJson v;
    for (int i = 0; next_keyword(f->parts, &i, k, &v); ) {
        int64_t n;
        const Decimal d = v.type == GGUF_J_NUMBER ? read_decimal((TokStr){ v.s, v.n }) : (Decimal){ .negative = true };
        if (d.negative || d.n_part || d.more) return schema_fail(sc, v.s, "expected an integer that is not negative");
        n = d.far || d.n > 9 ? INT32_MAX : strtol(d.whole, NULL, 10);
        if (n > GRAMMAR_COUNT && !largest) return schema_fail(sc, v.s, "expected at most %d", GRAMMAR_COUNT);
        if (n > GRAMMAR_COUNT) n = GRAMMAR_COUNT;
        if (count == absent || (largest ? n < count : n > count)) count = (int)n;
    }
    return count;
}

// ==== [5] Strings, numbers, arrays ==================================================================================

#define DATE_TEXT "(?:\\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\\d|30)|" \
                  "02-(?:0[1-9]|1\\d|2[0-8]))|(?:\\d\\d(?:0[48]|[2468][048]|[13579][26])|" \
                  "(?:[02468][048]|[13579][26])00)-02-29)"
#define TIME_TEXT "(?:[01]\\d|2[0-3]):[0-5]\\d:[0-5]\\d(?:\\.\\d{1,9})?(?:Z|[+-](?:[01]\\d|2[0-3]):[0-5]\\d)"
#define OCTET_TEXT "(?:25[0-5]|2[0-4]\\d|1\\d\\d|[1-9]?\\d)"
#define HEX_TEXT "[0-9a-fA-F]{1,4}"
#define LABEL_TEXT "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
#define HOST_TEXT "(?:" LABEL_TEXT "\\.)*" LABEL_TEXT
#define URI_CHAR_TEXT "(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
#define URI_TEXT "^[A-Za-z][A-Za-z0-9+.-]{0,19}:(?://" HOST_TEXT "(?::[1-5]?\\d{1,4})?(?:/" URI_CHAR_TEXT "*)*|" \
                 URI_CHAR_TEXT "(?:" URI_CHAR_TEXT "|/)*)(?:\\?(?:" URI_CHAR_TEXT "|[/?])*)?" \
                 "(?:#(?:" URI_CHAR_TEXT "|[/?])*)?$"
#define UUID_TEXT "^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$"
#define EMAIL_TEXT "^[A-Za-z0-9_+-]+(?:\\.[A-Za-z0-9_+-]+)*@(?:" LABEL_TEXT "\\.)+[A-Za-z]{2,24}$"
#define BASE64_TEXT "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"

// Formats that are enforced. Some texts of a format may be missing here, but all these texts have it.
static const struct { const char *name, *pattern; } formats[SCHEMA_FORMATS] = {
    { "date", "^" DATE_TEXT "$" }, { "time", "^" TIME_TEXT "$" }, { "date-time", "^" DATE_TEXT "T" TIME_TEXT "$" },
    { "duration", "^P(?:\\d{1,9}W|(?!T?$)(?:\\d{1,9}Y(?:\\d{1,9}M(?:\\d{1,9}D)?)?|\\d{1,9}M(?:\\d{1,9}D)?|\\d{1,9}D)?"
                  "(?:T(?:\\d{1,9}H(?:\\d{1,9}M(?:\\d{1,9}S)?)?|\\d{1,9}M(?:\\d{1,9}S)?|\\d{1,9}S))?)$" },
    { "uuid", UUID_TEXT }, { "guid", UUID_TEXT }, { "ipv4", "^(?:" OCTET_TEXT "\\.){3}" OCTET_TEXT "$" },
    { "ipv6", "^(?:(?:" HEX_TEXT ":){7}" HEX_TEXT "|(?:" HEX_TEXT ":){1,7}:|(?:" HEX_TEXT ":){1,6}:" HEX_TEXT "|"
              "(?:" HEX_TEXT ":){1,5}(?::" HEX_TEXT "){1,2}|(?:" HEX_TEXT ":){1,4}(?::" HEX_TEXT "){1,3}|"
              "(?:" HEX_TEXT ":){1,3}(?::" HEX_TEXT "){1,4}|(?:" HEX_TEXT ":){1,2}(?::" HEX_TEXT "){1,5}|"
              HEX_TEXT ":(?::" HEX_TEXT "){1,6}|:(?:(?::" HEX_TEXT "){1,7}|:))$" },
    { "email", EMAIL_TEXT }, { "idn-email", EMAIL_TEXT }, { "hostname", "^(?=.{1,253}$)" HOST_TEXT "$" },
    { "idn-hostname", "^(?=.{1,253}$)" HOST_TEXT "$" }, { "uri", URI_TEXT }, { "url", URI_TEXT },
    { "uri-reference", URI_TEXT }, { "iri", URI_TEXT }, { "iri-reference", URI_TEXT },
    { "json-pointer", "^(?:/(?:[^~/]|~[01])*)*$" }, { "byte", BASE64_TEXT }, { "base64", BASE64_TEXT },
};

static const struct { const char *name, *min, *max; } number_formats[] = {     // NULL: no bound of its own
    { "int8", "-128", "127" }, { "uint8", "0", "255" }, { "int16", "-32768", "32767" }, { "uint16", "0", "65535" },
    { "int32", "-2147483648", "2147483647" }, { "uint32", "0", "4294967295" },
    { "int64", "-9223372036854775808", "9223372036854775807" }, { "uint64", "0", "18446744073709551615" },
    { "uint", "0", "18446744073709551615" }, { "float", NULL, NULL }, { "double", NULL, NULL },
};

static int find_number_format(const GgufJson *name) {  // -1: none
    for (int i = 0; i < (int)(sizeof number_formats / sizeof *number_formats); i++)
        if (gguf_json_is(name, number_formats[i].name)) return i;
    return -1;
}

static int find_format(const GgufJson *name) {         // of strings; -1: none
    for (int i = 0; i < SCHEMA_FORMATS && formats[i].name; i++)
        if (gguf_json_is(name, formats[i].name)) return i;
    return -1;
}

// The strings that satisfy format; for JSON Schema it is an annotation, so an unknown one is never an error. *at: it.
static int format_pattern(Schema *sc, const Fields *f, const char **at) {
    Patterns *p = &sc->patterns;
    int all = ANY_TEXT;
    GgufJson v;
    for (int i = 0; !sc->g->failed && next_keyword(f->parts, &i, K_FORMAT, &v); ) {
        const int k = find_format(&v);
        if (k < 0 && find_number_format(&v) < 0 && !f->v[K_PATTERN].s) add_warning(sc, v.s, "this format is unknown");
        if (k < 0) continue;
        if (!sc->format[k]) read_pattern(p, (TokStr){ formats[k].pattern, strlen(formats[k].pattern) }, &sc->format[k]);
        all = pat_and(p, all, sc->format[k]);
        *at = v.s;
    }
    return all;
}

// The strings that satisfy pattern and not. *min, *max: how many characters, max -1: no bound. *at: a keyword that
// restricts them.
static int string_pattern(Schema *sc, const Fields *f, int *min, int *max, const char **at) {
    Patterns *p = &sc->patterns;
    int all = ANY_TEXT, one;
    GgufJson v, x;
    *min = read_count(sc, f, K_MIN_LENGTH, 0);
    *max = read_count(sc, f, K_MAX_LENGTH, -1);
    for (int i = 0; !sc->g->failed && next_keyword(f->parts, &i, K_PATTERN, &v); ) {
        if (v.type != GGUF_J_STRING) return schema_fail(sc, v.s, "expected a string");
        const TokStr s = json_chars(sc->g, &v);
        if (!sc->g->failed && read_pattern(p, s, &one)) {
            all = pat_and(p, all, one);
            *at = v.s;
        } else {
            p->full = false;
            leave_out(sc, v.s, "%s", p->why);
        }
        free((void *)(uintptr_t)s.s);
    }
    for (int i = 0; !sc->g->failed && i < f->n_not_value; i++) {
        GgufJson rest = f->not_value[i];
        while (next_value(f->not_value[i].type == GGUF_J_ARRAY, &rest, &x)) {
            if (x.type != GGUF_J_STRING) continue;
            const TokStr s = json_chars(sc->g, &x);
            if (!sc->g->failed) all = pat_and(p, all, pat_not(p, pat_text(p, s)));
            *at = x.s;
            free((void *)(uintptr_t)s.s);
        }
    }
    for (int i = 0; !sc->g->failed && i < f->n_not_string; i++) {
        Parts parts = { .n = 0 };
        Fields n;
        int from = 0, to = -1;
        const char *inside = NULL;
        add_parts(sc, &f->not_string[i], &parts, 0);
        gather_fields(sc, &(SchemaItem){ .n = 0 }, &parts, &n);
        p->negated++;
        one = string_pattern(sc, &n, &from, &to, &inside);
        p->negated--;
        one = pat_and(p, one, format_pattern(sc, &n, &inside));
        if (!inside && from == 0 && to < 0) continue;  // it was left out
        *at = f->not_string[i].s;
        all = pat_and(p, all, pat_not(p, pat_and(p, one, pat_repeat(p, ANY_CHAR, from, to))));
    }
    return all;
}

static int expr_string(Schema *sc, const Fields *f) {
    Grammar *g = sc->g;
    Patterns *p = &sc->patterns;
    const PatternForm form = sc->call ? WRITE_CALL : WRITE_STRING;
    int min, max, e = 0;
    const char *at = NULL, *format_at = NULL;
    p->full = false;
    const int strings = string_pattern(sc, f, &min, &max, &at), format = format_pattern(sc, f, &format_at);
    if (g->failed || (max >= 0 && max < min)) return expr_nothing(g);
    if (format_at) e = expr_pattern(p, pat_and(p, strings, format), min, max, form);
    if (format_at && p->full) {
        add_warning(sc, format_at, "too complex together with the other restrictions of this string");
        p->full = false;
        format_at = NULL;
    }
    if (at && !format_at) e = expr_pattern(p, strings, min, max, form);
    if (at && p->full) {
        leave_out(sc, at, "the restrictions of this string are too complex; only its length is enforced");
        at = NULL;
    }
    if (!at && !format_at && min == 0 && max < 0) return expr_call(g, builtin(g, JSON_STRING, sc->call));
    if (!at && !format_at) e = expr_repeat(g, expr_string_char(g, sc->call), min, max);
    return SEQ(expr_quote(g, sc->call), e, expr_quote(g, sc->call));
}

// Makes a bound tighter.
static void add_bound(Bound *b, Decimal d, bool open, bool is_low) {
    const int order = b->given ? compare_decimals(&d, &b->at) : 0;
    if (!b->given || (is_low ? order > 0 : order < 0)) *b = (Bound){ d, true, open };
    else if (order == 0) b->open |= open;
}

// Reads the bounds of a number from minimum, exclusiveMinimum and so on, and format. exclusiveMinimum is a number or,
// before draft 6, true.
static void read_bounds(Schema *sc, const Fields *f, Bound *lo, Bound *hi) {
    static const Keyword closed[] = { K_MIN, K_MAX }, opened[] = { K_OPEN_MIN, K_OPEN_MAX };
    GgufJson v, open;
    *lo = *hi = (Bound){ .given = false };
    for (int i = 0; i < f->parts->n; i++)
        for (int k = 0; k < 4; k++) {
            const Keyword word = k < 2 ? closed[k] : opened[k - 2];
            if (!gguf_json_get(&f->parts->part[i], keywords[word].name, &v)) continue;
            const bool flag = k > 1 && (v.type == GGUF_J_TRUE || v.type == GGUF_J_FALSE);
            if (v.type != GGUF_J_NUMBER && !flag) schema_fail(sc, v.s, "expected a number");
            if (v.type != GGUF_J_NUMBER) continue;
            const bool is_open = k > 1 || (gguf_json_get(&f->parts->part[i], keywords[opened[k]].name, &open) &&
                                           open.type == GGUF_J_TRUE);
            add_bound(k % 2 ? hi : lo, read_decimal((TokStr){ v.s, v.n }), is_open, k % 2 == 0);
        }
    for (int i = 0; !sc->g->failed && next_keyword(f->parts, &i, K_FORMAT, &v); ) {
        const int k = find_number_format(&v);
        if (k < 0 && find_format(&v) < 0 && !(f->types & IS_A_STRING)) add_warning(sc, v.s, "this format is unknown");
        if (k < 0 || !number_formats[k].min) continue;
        const char *min = number_formats[k].min, *max = number_formats[k].max;
        add_bound(lo, read_decimal((TokStr){ min, strlen(min) }), false, true);
        add_bound(hi, read_decimal((TokStr){ max, strlen(max) }), false, false);
    }
}

static int expr_numeric(Schema *sc, const Fields *f, bool whole) {
    Grammar *g = sc->g;
    Patterns *p = &sc->patterns;
    Bound lo, hi;
    GgufJson v, x;
    bool any = true;
    p->full = false;
    read_bounds(sc, f, &lo, &hi);
    int all = pattern_number(p, &lo, &hi, whole);
    for (int i = 0; !g->failed && next_keyword(f->parts, &i, K_MULTIPLE, &v); ) {
        if (v.type != GGUF_J_NUMBER || *v.s == '-') return schema_fail(sc, v.s, "expected a number above 0");
        const Decimal d = read_decimal((TokStr){ v.s, v.n });
        if (is_zero(&d)) return schema_fail(sc, v.s, "expected a number above 0");
        const int some = pattern_multiples(p, all, &d, whole);
        if (p->full)
            leave_out(sc, v.s, d.n + d.n_part > 6 ? "expected at most 6 digits" : "too complex: too many restrictions");
        else all = some;
        any &= p->full;
        p->full = false;
    }
    for (int i = 0; !g->failed && i < f->n_not_value; i++) {
        GgufJson rest = f->not_value[i];
        while (next_value(f->not_value[i].type == GGUF_J_ARRAY, &rest, &x)) {
            if (x.type != GGUF_J_NUMBER) continue;
            const Bound at = { read_decimal((TokStr){ x.s, x.n }), true, false };
            all = pat_and(p, all, pat_not(p, pattern_number(p, &at, &at, false)));
            any = false;
        }
    }
    if (any && !lo.given && !hi.given) return expr_call(g, builtin(g, whole ? JSON_INTEGER : JSON_NUMBER, sc->call));
    const int e = expr_pattern(p, all, 0, -1, WRITE_KEY);
    if (!p->full) return e;
    p->full = false;
    const GgufJson at = f->v[K_MULTIPLE].s ? f->v[K_MULTIPLE] : f->v[K_MIN].s ? f->v[K_MIN] : f->v[K_MAX];
    leave_out(sc, at.s ? at.s : sc->root.s, "the restrictions of this number are too complex");
    return expr_call(g, builtin(g, whole ? JSON_INTEGER : JSON_NUMBER, sc->call));
}

static int expr_array(Schema *sc, const Fields *f) {
    Grammar *g = sc->g;
    const bool old = f->v[K_ITEMS].s && f->v[K_ITEMS].type == GGUF_J_ARRAY;    // before 2020, items was prefixItems
    const GgufJson list = old ? f->v[K_ITEMS] : f->v[K_PREFIX];
    GgufJson walk = list, prefix[SCHEMA_PREFIX], rest[SCHEMA_PARTS], v;
    const int min = read_count(sc, f, K_MIN_ITEMS, 0);
    int n = 0, n_rest = 0, max = read_count(sc, f, K_MAX_ITEMS, -1);
    bool closed = false;
    if (f->v[K_UNIQUE].s && f->v[K_UNIQUE].type != GGUF_J_FALSE && (max < 0 || max > 1))
        leave_out(sc, f->v[K_UNIQUE].s, "different items are not enforced");
    if (list.s && list.type != GGUF_J_ARRAY) return schema_fail(sc, list.s, "expected a list of schemas");
    while (list.s && gguf_json_next(&walk, NULL, &v)) {
        if (n == SCHEMA_PREFIX) return schema_fail(sc, list.s, "expected at most %d schemas", SCHEMA_PREFIX);
        prefix[n++] = v;
    }
    for (int i = 0; next_keyword(f->parts, &i, old ? K_ADDITIONAL_ITEMS : K_ITEMS, &v); ) {
        if (v.type == GGUF_J_ARRAY) continue;
        closed |= v.type == GGUF_J_FALSE;
        rest[n_rest++] = v;
    }
    closed |= !n_rest && n > 0 && min <= n;
    if (closed && (max < 0 || max > n)) max = n;
    if (max >= 0 && max < min) return expr_nothing(g);
    const int first = n ? n : 1;                       // these items are written one by one, the others as a repetition
    int tail = max >= 0 && max <= first ? new_expr(g, EXPR_SEQ, 0, 0, 0)
             : expr_repeat(g, SEQ(expr_comma(g, sc->call), expr_schemas(sc, rest, n_rest)),
                           min > first ? min - first : 0, max < 0 ? -1 : max - first);
    for (int i = first - 1; i >= 0; i--) {
        const int item = n ? expr_schema(sc, prefix[i]) : expr_schemas(sc, rest, n_rest);
        const int some = i ? SEQ(expr_comma(g, sc->call), item, tail) : SEQ(item, tail);
        tail = i < min ? some : expr_maybe(g, some);
        if (max >= 0 && i >= max) tail = new_expr(g, EXPR_SEQ, 0, 0, 0);
    }
    return SEQ(expr_word(g, "["), tail, expr_word(g, "]"));
}

// ==== [6] Objects ===================================================================================================

enum { MEMBER_SCHEMAS = 8, KEY_KINDS = 16, MEMBER_RULES = 4096 };

typedef struct {                       // a declared property
    TokStr      name;
    const char *at;
    GgufJson    schema[MEMBER_SCHEMAS];
    int         n, part;               // part: the last one that declares it
    bool        required;
} Property;

typedef struct { int keys, n; GgufJson schema[MEMBER_SCHEMAS]; } KeyKind;      // undeclared properties with these keys

typedef struct {
    Property   *p;                     // (SCHEMA_PROPERTIES)
    int         n, n_kinds;
    KeyKind     kind[KEY_KINDS];
    bool        closed;                // the schema allows no undeclared property
} Members;

static void free_members(Members *m) {
    for (int i = 0; m->p && i < m->n; i++) free((void *)(uintptr_t)m->p[i].name.s);
    free(m->p);
}

static int by_template_order(const void *a, const void *b) {           // the order of keys in tool calls
    const Property *x = a, *y = b;
    return tok_compare_keys(x->name, y->name, true);
}

// The property of a key; adds it if it is new. NULL: a failure.
static Property *find_property(Schema *sc, Members *m, const GgufJson *key) {
    const TokStr name = json_chars(sc->g, key);
    for (int i = 0; i < m->n; i++)
        if (tok_compare_keys(m->p[i].name, name, false) == 0) {
            free((void *)(uintptr_t)name.s);
            return &m->p[i];
        }
    if (m->n == SCHEMA_PROPERTIES) schema_fail(sc, key->s, "expected at most %d properties", SCHEMA_PROPERTIES);
    if (sc->g->failed) {
        free((void *)(uintptr_t)name.s);
        return NULL;
    }
    m->p[m->n] = (Property){ .name = name, .at = key->s, .part = -1 };
    return &m->p[m->n++];
}

static void add_member_schema(Schema *sc, GgufJson *list, int *n, GgufJson v) {
    if (v.type == GGUF_J_TRUE) return;
    if (*n == MEMBER_SCHEMAS) schema_fail(sc, v.s, "expected at most %d schemas of a property", MEMBER_SCHEMAS);
    else list[(*n)++] = v;
}

// Adds the properties that `properties`, `required` and an enum in propertyNames name.
static void find_properties(Schema *sc, const Parts *parts, Members *m) {
    static const Keyword words[] = { K_PROPERTIES, K_REQUIRED, K_PROPERTY_NAMES };
    GgufJson v, key, x;
    for (int k = 0; k < 3; k++)
        for (int i = 0; !sc->g->failed && next_keyword(parts, &i, words[k], &v); ) {
            if (k == 2 && (v.type != GGUF_J_OBJECT || !gguf_json_get(&v, "enum", &x))) continue;
            if (k == 2) v = x;
            if (v.type != (k ? GGUF_J_ARRAY : GGUF_J_OBJECT))
                schema_fail(sc, v.s, k ? "expected a list of names" : "expected an object");
            while (!sc->g->failed && gguf_json_next(&v, &key, &x)) {
                if (k && x.type != GGUF_J_STRING) schema_fail(sc, x.s, "expected a name");
                Property *one = sc->g->failed ? NULL : find_property(sc, m, k ? &x : &key);
                if (one && k == 1) one->required = true;
            }
        }
}

// The names that propertyNames of all parts allow.
static int allowed_names(Schema *sc, const Parts *parts) {
    Patterns *p = &sc->patterns;
    int all = ANY_TEXT;
    GgufJson v, x;
    for (int i = 0; !sc->g->failed && next_keyword(parts, &i, K_PROPERTY_NAMES, &v); ) {
        Parts names = { .n = 0 };
        Fields f;
        int min, max, one = NOTHING;
        const char *at;
        add_parts(sc, &v, &names, 0);
        gather_fields(sc, &(SchemaItem){ .n = 0 }, &names, &f);
        if (sc->g->failed || names.never || f.never || !(f.types & IS_A_STRING)) return NOTHING;
        if (f.v[K_ANY_OF].s || f.v[K_ONE_OF].s) leave_out(sc, v.s, "anyOf and oneOf of names are not supported");
        const GgufJson values = f.v[K_ENUM].s ? f.v[K_ENUM] : f.v[K_CONST];
        GgufJson rest = values;
        while (!sc->g->failed && next_value(values.s && values.type == GGUF_J_ARRAY, &rest, &x)) {
            if (x.type != GGUF_J_STRING) continue;
            const TokStr s = json_chars(sc->g, &x);
            if (!sc->g->failed) one = pat_alt(p, one, pat_text(p, s));
            free((void *)(uintptr_t)s.s);
        }
        const int strings = pat_and(p, string_pattern(sc, &f, &min, &max, &at), format_pattern(sc, &f, &at));
        all = pat_and(p, all, pat_and(p, strings, pat_repeat(p, ANY_CHAR, min, max)));
        if (values.s) all = pat_and(p, all, one);
    }
    return all;
}

typedef struct { int names[KEY_KINDS], part[KEY_KINDS], n; GgufJson schema[KEY_KINDS]; } NamePatterns;

// Reads patternProperties of all parts. A pattern that cannot be read is left out.
static void read_name_patterns(Schema *sc, const Parts *parts, NamePatterns *np) {
    GgufJson rest, key, v;
    np->n = 0;
    for (int i = 0; i < parts->n && !sc->g->failed; i++) {
        if (!gguf_json_get(&parts->part[i], "patternProperties", &rest)) continue;
        if (rest.type != GGUF_J_OBJECT) schema_fail(sc, rest.s, "expected an object");
        while (!sc->g->failed && gguf_json_next(&rest, &key, &v)) {
            const TokStr s = json_chars(sc->g, &key);
            if (np->n == KEY_KINDS - 1) schema_fail(sc, key.s, "expected at most %d patterns", KEY_KINDS - 1);
            sc->patterns.full = false;
            np->part[np->n] = i;
            np->schema[np->n] = v;
            sc->patterns.negated++;                    // other names must not match it
            const bool ok = !sc->g->failed && read_pattern(&sc->patterns, s, &np->names[np->n]);
            sc->patterns.negated--;
            if (ok) np->n++;
            else if (!sc->g->failed) leave_out(sc, key.s, "%s", sc->patterns.why);
            free((void *)(uintptr_t)s.s);
        }
    }
}

// Collects the schemas of each declared property: those of all parts that declare it or have a pattern for its name; of
// a part with neither, its additionalProperties.
static void read_declared(Schema *sc, const Parts *parts, const NamePatterns *np, int names, Members *m) {
    GgufJson rest, key, v;
    for (int i = 0; i < parts->n && !sc->g->failed; i++) {
        const bool more = gguf_json_get(&parts->part[i], "additionalProperties", &v);
        if (gguf_json_get(&parts->part[i], "properties", &rest))
            for (GgufJson x; !sc->g->failed && gguf_json_next(&rest, &key, &x); ) {
                Property *one = find_property(sc, m, &key);
                if (!one) return;
                one->part = i;
                add_member_schema(sc, one->schema, &one->n, x);
            }
        for (int k = 0; k < m->n && !sc->g->failed; k++) {
            bool known = m->p[k].part == i;
            for (int j = 0; j < np->n; j++) {
                if (np->part[j] != i || !pattern_holds(&sc->patterns, np->names[j], m->p[k].name)) continue;
                add_member_schema(sc, m->p[k].schema, &m->p[k].n, np->schema[j]);
                known = true;
            }
            if (more && !known) add_member_schema(sc, m->p[k].schema, &m->p[k].n, v);
        }
    }
    for (int k = 0; k < m->n && names != ANY_TEXT && !sc->g->failed; k++)
        if (!pattern_holds(&sc->patterns, names, m->p[k].name))
            add_member_schema(sc, m->p[k].schema, &m->p[k].n, no_value);
}

// The schemas of undeclared properties with the name pattern k of np, or with none if k < 0. False: there are none.
static bool read_undeclared(Schema *sc, const Parts *parts, const NamePatterns *np, int k, KeyKind *kind) {
    static const Keyword words[] = { K_ADDITIONAL, K_UNEVALUATED };
    bool described = k >= 0, declares = false, allowed = true;
    GgufJson v;
    for (int j = 0; k >= 0 && j < np->n; j++)
        if (np->names[j] == np->names[k]) add_member_schema(sc, kind->schema, &kind->n, np->schema[j]);
    for (int i = 0; i < parts->n; i++) {
        bool own = false;
        for (int j = 0; k >= 0 && j < np->n; j++) own |= np->part[j] == i && np->names[j] == np->names[k];
        declares |= gguf_json_get(&parts->part[i], "properties", &v);
        declares |= k < 0 && gguf_json_get(&parts->part[i], "patternProperties", &v);
        for (int w = 0; w < (k < 0 ? 2 : 1); w++) {
            if (own || !gguf_json_get(&parts->part[i], keywords[words[w]].name, &v)) continue;
            described = true;
            allowed &= v.type != GGUF_J_FALSE;
            add_member_schema(sc, kind->schema, &kind->n, v);
        }
    }
    return allowed && (described || !declares);
}

// Collects what all parts say about the members of an object. A name longer than GRAMMAR_NESTING characters excludes
// all undeclared names that begin with its first ones; an undeclared name fits at most one pattern.
static void read_members(Schema *sc, const Parts *parts, Members *m) {
    Patterns *p = &sc->patterns;
    NamePatterns np;
    GgufJson v;
    *m = (Members){ .p = calloc(SCHEMA_PROPERTIES, sizeof *m->p) };
    if (!m->p) grammar_fail(sc->g, "grammar: out of memory");
    if (sc->g->failed) return;
    find_properties(sc, parts, m);
    read_name_patterns(sc, parts, &np);
    p->full = false;
    const int names = allowed_names(sc, parts);
    read_declared(sc, parts, &np, names, m);
    if (p->full && !sc->g->failed) schema_fail(sc, parts->part[0].s, "too complex: too many patterns and names");
    int declared = sc->call ? EMPTY : NOTHING;         // in a call, a key without quotes is not empty
    for (int i = 0; i < m->n && !sc->g->failed; i++) {
        size_t n = 0;
        int chars = 0;
        for (; n < m->p[i].name.n && chars < GRAMMAR_NESTING; chars++)
            for (n++; n < m->p[i].name.n && ((unsigned char)m->p[i].name.s[n] & 0xC0) == 0x80; ) n++;
        const int one = pat_text(p, (TokStr){ m->p[i].name.s, n });
        declared = pat_alt(p, declared, n < m->p[i].name.n ? pat_seq(p, one, ANY_TEXT) : one);
    }
    for (int k = -1; k < np.n && !sc->g->failed; k++) {
        KeyKind *kind = &m->kind[m->n_kinds];
        bool again = false;
        for (int j = 0; j < k; j++) again |= np.names[j] == np.names[k];
        kind->n = 0;
        kind->keys = pat_and(p, names, pat_not(p, declared));
        for (int j = 0; j < np.n; j++)
            if (k < 0 || np.names[j] != np.names[k]) kind->keys = pat_and(p, kind->keys, pat_not(p, np.names[j]));
        if (k >= 0) kind->keys = pat_and(p, kind->keys, np.names[k]);
        if (!again && read_undeclared(sc, parts, &np, k, kind) && kind->keys != NOTHING && !p->full) m->n_kinds++;
    }
    for (int i = 0; i < parts->n; i++)
        m->closed |= !np.n && gguf_json_get(&parts->part[i], "additionalProperties", &v) && v.type == GGUF_J_FALSE;
}

// The rule of an undeclared member. Its key is written without escapes. 0: there is none, because none is allowed or
// because the keys are too complex.
static int expr_other_member(Schema *sc, const Members *m) {
    Grammar *g = sc->g;
    const int alt = new_expr(g, EXPR_ALT, 0, 0, 0);
    int n = 0;
    for (int i = 0; i < m->n_kinds && !g->failed; i++) {
        sc->patterns.full = false;
        const int key = expr_pattern(&sc->patterns, m->kind[i].keys, 0, -1, sc->call ? WRITE_BARE : WRITE_KEY);
        if (sc->patterns.full) continue;
        const int quoted = sc->call ? key : SEQ(expr_word(g, "\""), key, expr_word(g, "\""));
        add_expr(g, alt, SEQ(quoted, expr_colon(g, sc->call), expr_schemas(sc, m->kind[i].schema, m->kind[i].n)));
        n++;
    }
    return n ? rule_of(g, alt) : 0;
}

// The undeclared members at the end of an object that has c members; min and max of all members, max -1: no bound.
static int expr_last_members(Schema *sc, int other, int c, int min, int max) {
    Grammar *g = sc->g;
    const int lo = min > c ? min - c : 0, hi = max < 0 ? -1 : max - c;
    if (!other && lo) return expr_nothing(g);
    if (!other || hi == 0) return new_expr(g, EXPR_SEQ, 0, 0, 0);
    if (c) return expr_repeat(g, SEQ(expr_comma(g, sc->call), expr_call(g, other)), lo, hi);
    const int more = expr_repeat(g, SEQ(expr_comma(g, sc->call), expr_call(g, other)), lo ? lo - 1 : 0,
                                 hi < 0 ? -1 : hi - 1);
    const int some = SEQ(expr_call(g, other), more);
    return lo ? some : expr_maybe(g, some);
}

// The members of an object, in order. Rule rules[i * width + c] matches properties i .. n - 1 and the undeclared ones,
// after c members; c stops at `most` if more make no difference.
static int expr_members(Schema *sc, const Members *m, int other, int min, int max) {
    Grammar *g = sc->g;
    const int n = m->n, most = max >= 0 ? max : min > 1 ? min : 1, width = (most < n ? most : n) + 1;
    int *rules = calloc((size_t)(n + 1) * (size_t)width, sizeof *rules), *value = calloc((size_t)n + 1, sizeof *value);
    int n_required = 0, e = 0;
    if (!rules || !value) grammar_fail(g, "grammar: out of memory");
    for (int i = 0; i <= n && !g->failed; i++) {       // rules are used before they are defined: see analyse_rules()
        for (int c = n_required < most ? n_required : most; c <= i && c < width; c++)
            rules[i * width + c] = new_rule(g);
        if (i < n) value[i] = new_rule(g);
        if (i < n) n_required += m->p[i].required;
    }
    for (int i = 0; i <= n && !g->failed; i++)
        for (int c = 0; c < width && !g->failed; c++) {
            const int rule = rules[i * width + c];
            if (!rule) continue;
            if (i == n) {
                e = expr_last_members(sc, other, c, min, max);
            } else {
                const int next = c < most ? c + 1 : most, more = expr_call(g, value[i]);
                const int after = (i + 1) * width;
                e = new_expr(g, EXPR_ALT, 0, 0, 0);
                if (max < 0 || c < max)
                    add_expr(g, e, c ? SEQ(expr_comma(g, sc->call), more, expr_call(g, rules[after + next]))
                                     : SEQ(more, expr_call(g, rules[after + next])));
                if (!m->p[i].required) add_expr(g, e, expr_call(g, rules[after + c]));
            }
            if (!g->failed) g->rules[rule].expr = e;
        }
    for (int i = 0; i < n && !g->failed; i++) {
        const int of = expr_schemas(sc, m->p[i].schema, m->p[i].n);
        e = SEQ(expr_key(g, m->p[i].name, sc->call), expr_colon(g, sc->call), of);
        if (!g->failed) g->rules[value[i]].expr = e;
    }
    e = g->failed ? 0 : expr_call(g, rules[0]);
    free(rules);
    free(value);
    return e;
}

static int expr_object(Schema *sc, const Fields *f, const Parts *parts) {
    Grammar *g = sc->g;
    int e = 0, n_required = 0;
    int min = read_count(sc, f, K_MIN_PROPERTIES, 0), max = read_count(sc, f, K_MAX_PROPERTIES, -1);
    Members m;
    bool any = true;
    for (int k = K_PROPERTIES; k <= K_MAX_PROPERTIES; k++) any &= !f->v[k].s;
    if (any) return expr_call(g, builtin(g, JSON_OBJECT, sc->call));
    read_members(sc, parts, &m);
    const int other = g->failed ? 0 : expr_other_member(sc, &m);
    for (int i = 0; i < m.n && !g->failed; i++) n_required += m.p[i].required;
    if (sc->call && !g->failed) qsort(m.p, (size_t)m.n, sizeof *m.p, by_template_order);
    if (min <= n_required) min = 0;
    if (max >= 0 && max >= m.n && !other) max = -1;
    const bool never = (max >= 0 && (max < n_required || max < min)) || (!other && min > m.n);
    const int counted = max >= 0 ? max : min;
    if ((m.n + 1) * ((counted < m.n ? counted : m.n) + 1) > MEMBER_RULES) {
        const GgufJson at = min ? f->v[K_MIN_PROPERTIES] : f->v[K_MAX_PROPERTIES];
        if (at.s) leave_out(sc, at.s, "too many properties to count them");
        min = 0;
        max = -1;
    }
    if (never) e = expr_nothing(g);
    else if (!g->failed) e = SEQ(expr_word(g, "{"), expr_members(sc, &m, other, min, max), expr_word(g, "}"));
    free_members(&m);
    return e;
}

// ==== [7] Alternatives ==============================================================================================

static bool equal_values(Schema *sc, const GgufJson *a, const GgufJson *b) {
    if (a->type != b->type) return false;
    if (a->type == GGUF_J_NUMBER) {
        const Decimal x = read_decimal((TokStr){ a->s, a->n }), y = read_decimal((TokStr){ b->s, b->n });
        return compare_decimals(&x, &y) == 0;
    }
    if (a->type != GGUF_J_STRING) return a->n == b->n && memcmp(a->s, b->s, a->n) == 0;
    const TokStr x = json_chars(sc->g, a), y = json_chars(sc->g, b);
    const bool same = x.s && y.s && x.n == y.n && memcmp(x.s, y.s, x.n) == 0;
    free((void *)(uintptr_t)x.s);
    free((void *)(uintptr_t)y.s);
    return same;
}

static bool has_value(Schema *sc, const GgufJson *list, const GgufJson *v) {   // list: an array, or the value itself
    GgufJson rest = *list, x;
    if (list->type != GGUF_J_ARRAY) return equal_values(sc, list, v);
    add_work(sc, list->s, list->n);
    while (gguf_json_next(&rest, NULL, &x)) if (equal_values(sc, &x, v)) return true;
    return false;
}

typedef struct { int strings, min, max; Bound lo, hi; } Restrictions;  // of strings, of their lengths; of numbers

// True: a string or number satisfies the keywords that restrict strings or numbers.
static bool fits_restrictions(Schema *sc, const Fields *f, const GgufJson *v, const Restrictions *r) {
    GgufJson x;
    if (v->type == GGUF_J_STRING) {
        const TokStr s = json_chars(sc->g, v);
        int n = 0;
        for (size_t i = 0; s.s && i < s.n; i++) n += ((unsigned char)s.s[i] & 0xC0) != 0x80;
        add_work(sc, v->s, 64 * v->n);
        const bool ok = s.s && n >= r->min && (r->max < 0 || n <= r->max) &&
                        pattern_holds(&sc->patterns, r->strings, s);
        free((void *)(uintptr_t)s.s);
        return ok;
    }
    if (v->type != GGUF_J_NUMBER) return true;
    const Decimal d = read_decimal((TokStr){ v->s, v->n });
    const int low = r->lo.given ? compare_decimals(&d, &r->lo.at) : 1;
    const int high = r->hi.given ? compare_decimals(&d, &r->hi.at) : -1;
    if (f->v[K_MULTIPLE].s) add_work(sc, v->s, f->parts->part[0].n);
    for (int i = 0; f->v[K_MULTIPLE].s && next_keyword(f->parts, &i, K_MULTIPLE, &x); ) {
        double a, b;
        if (!gguf_json_float(v, &a) || !gguf_json_float(&x, &b) || b <= 0) return false;
        if (fabs(a / b - round(a / b)) > 1e-9) return false;
    }
    return low >= (r->lo.open ? 1 : 0) && high <= (r->hi.open ? -1 : 0);
}

// True: a value of enum or const satisfies the other keywords.
static bool is_allowed(Schema *sc, const Fields *f, const GgufJson *v, const Restrictions *r) {
    GgufJson x;
    if (!(json_type(v) & f->types)) return false;
    if (f->parts->n > 1 || f->v[K_CONST].s) add_work(sc, v->s, f->parts->part[0].n);
    for (int i = 0; f->parts->n > 1 && next_keyword(f->parts, &i, K_ENUM, &x); )
        if ((v->s < x.s || v->s >= x.s + x.n) && !has_value(sc, &x, v)) return false;
    for (int i = 0; f->v[K_CONST].s && next_keyword(f->parts, &i, K_CONST, &x); )
        if (!equal_values(sc, &x, v)) return false;
    for (int i = 0; i < f->n_not_value; i++) if (has_value(sc, &f->not_value[i], v)) return false;
    return fits_restrictions(sc, f, v, r);
}

// One of the values of enum or const that all keywords allow. Strings, which may be many, become one prefix tree.
static int expr_enum(Schema *sc, const Fields *f) {
    Grammar *g = sc->g;
    GgufJson rest = f->v[K_ENUM].s ? f->v[K_ENUM] : f->v[K_CONST], v;
    const GgufJson values = rest;
    TokStr *strings = NULL;
    int n = 0, cap = 0;
    Restrictions r;
    const char *at;
    const int alt = new_expr(g, EXPR_ALT, 0, 0, 0);
    for (int k = K_PROPERTIES; k < K_MIN_LENGTH; k++)
        if (f->v[k].s && (keywords[k].types & f->types))
            leave_out(sc, f->v[k].s, "not enforced together with enum or const");
    if (f->v[K_ENUM].s && rest.type != GGUF_J_ARRAY) return schema_fail(sc, rest.s, "expected a list of values");
    sc->patterns.full = false;
    r.strings = string_pattern(sc, f, &r.min, &r.max, &at);
    r.strings = pat_and(&sc->patterns, r.strings, format_pattern(sc, f, &at));
    read_bounds(sc, f, &r.lo, &r.hi);
    while (!g->failed && next_value(f->v[K_ENUM].s, &rest, &v)) {
        if (!is_allowed(sc, f, &v, &r)) continue;
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
    if (sc->patterns.full) schema_fail(sc, values.s, "too complex together with a pattern");
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

static bool has_values(const Fields *f) { return f->v[K_ENUM].s || f->v[K_CONST].s; }

static int possible_types(const Fields *f) {
    int types = 0;
    GgufJson rest = f->v[K_ENUM].s ? f->v[K_ENUM] : f->v[K_CONST], v;
    if (!has_values(f)) types = f->types;
    else while (next_value(f->v[K_ENUM].s, &rest, &v)) types |= json_type(&v) & f->types;
    return types | (f->v[K_NULLABLE].s && f->v[K_NULLABLE].type == GGUF_J_TRUE ? IS_A_NULL : 0);
}

static bool has_one_spelling(const GgufJson *v) {      // false: another JSON text may be the same value, as 1.0 and 1
    return v->type <= GGUF_J_STRING && json_type(v) != IS_A_NUMBER && !memchr(v->s, '\\', v->n);
}

// True: two enums certainly have no common value. Values that may be spelled differently count as common.
static bool enums_disjoint(const Fields *a, const Fields *b) {
    GgufJson of_a = a->v[K_ENUM].s ? a->v[K_ENUM] : a->v[K_CONST], x, y;
    while (next_value(a->v[K_ENUM].s, &of_a, &x)) {
        GgufJson of_b = b->v[K_ENUM].s ? b->v[K_ENUM] : b->v[K_CONST];
        while (next_value(b->v[K_ENUM].s, &of_b, &y))
            if (x.type == y.type && (!has_one_spelling(&x) || !has_one_spelling(&y) ||
                                     (x.n == y.n && !memcmp(x.s, y.s, x.n)))) return false;
    }
    return true;
}

static bool may_overlap(Schema *sc, const SchemaItem *it, const GgufJson *a, const GgufJson *b, int depth);

// True: an object that the grammar of one schema writes may satisfy the other schema.
static bool objects_overlap(Schema *sc, const Parts *a, const Parts *b, int depth) {
    Members of[2] = { { 0 }, { 0 } };
    bool misses[2] = { false, false };                 // schema k lacks a property that the other one requires
    bool disjoint = false;
    for (int k = 0; k < 2; k++) read_members(sc, k ? b : a, &of[k]);
    for (int k = 0; k < 2 && !sc->g->failed; k++)
        for (int i = 0; i < of[!k].n; i++) {
            const Property *want = &of[!k].p[i], *have = of[k].p, *end = have + of[k].n;
            if (!want->required) continue;
            while (have < end && tok_compare_keys(have->name, want->name, false) != 0) have++;
            if (have == end) misses[k] = true;
            else if (have->required && have->n == 1 && want->n == 1)
                disjoint |= !may_overlap(sc, &(SchemaItem){ .n = 0 }, &have->schema[0], &want->schema[0], depth + 1);
        }
    for (int k = 0, both = 0; k < 2; k++) {            // closed: by the schema; no kinds: in its grammar
        both += (misses[k] && !of[k].n_kinds) || (misses[!k] && of[!k].closed);
        disjoint |= both == 2;
    }
    for (int k = 0; k < 2; k++) free_members(&of[k]);
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
    if (sc->g->failed || of_a.never || of_b.never || fa.never || fb.never || !both) return false;
    if (has_values(&fa) && has_values(&fb)) return !enums_disjoint(&fa, &fb);
    return both != IS_A_OBJECT || depth == 2 || has_values(&fa) || has_values(&fb) ||
           objects_overlap(sc, &of_a, &of_b, depth);
}

// Adds an alternative for each schema of anyOf or oneOf, together with the other restrictions of the item.
static void add_branches(Schema *sc, const SchemaItem *it, const Fields *f, int alt) {
    GgufJson list = f->v[K_ANY_OF].s ? f->v[K_ANY_OF] : f->v[K_ONE_OF], rest = list, v;
    bool restricts = false;
    int n = 0;
    if (list.type != GGUF_J_ARRAY) schema_fail(sc, list.s, "expected a list of schemas");
    if (it->n_done == SCHEMA_DONE)
        schema_fail(sc, list.s, "expected at most %d nested lists of schemas", SCHEMA_DONE);
    for (int k = 0; k < N_KEYWORDS; k++) restricts |= f->v[k].s && k != K_ANY_OF && k != K_ONE_OF && k != K_NULLABLE;
    for (int i = 0, n_lists = 0; i < f->parts->n; i++)
        for (int k = K_ANY_OF; k <= K_ONE_OF; k++)
            restricts |= gguf_json_get(&f->parts->part[i], keywords[k].name, &v) && n_lists++;
    SchemaItem base = { .n = 0 };
    if (restricts) base = *it;
    if (sc->g->failed) return;
    if (restricts) base.done[base.n_done++] = list.s;
    for (; !sc->g->failed && gguf_json_next(&rest, NULL, &v); n++) {
        SchemaItem branch = base;
        GgufJson earlier = list, w;
        for (int i = 0; f->v[K_ONE_OF].s && i < n && gguf_json_next(&earlier, NULL, &w); i++)
            if (may_overlap(sc, &base, &w, &v, 0))
                leave_out(sc, v.s, "a value may match both this and number %d of oneOf; try anyOf", i);
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
    if (p.never || f.never || g->failed) return expr_nothing(g);
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
    for (int i = 0; i < 3; i++) {
        static const GgufJson words[] = { { GGUF_J_NULL, "null", 4 }, { GGUF_J_FALSE, "false", 5 },
                                          { GGUF_J_TRUE, "true", 4 } };
        bool allowed = f.types & (i ? IS_A_BOOL : IS_A_NULL);
        for (int k = 0; k < f.n_not_value; k++) allowed &= !has_value(sc, &f.not_value[k], &words[i]);
        if (allowed) add_expr(g, alt, expr_word(g, words[i].s));
    }
    if (f.types & IS_A_ARRAY) add_expr(g, alt, expr_array(sc, &f));
    if (f.types & IS_A_OBJECT) add_expr(g, alt, expr_object(sc, &f, &p));
    return alt;
}

// A value for which the schema holds and, if it is not NULL, the schema `also`. Makes all rules that it needs.
static int read_schema(Grammar *g, const GgufJson *schema, const GgufJson *also, const char *what, bool call,
                       bool strict) {
    Schema sc = { .g = g, .root = *schema, .what = what, .call = call, .strict = strict };
    SchemaItem first = { .value = { *schema }, .n = 1 };
    if (also) first.value[first.n++] = *also;
    patterns_init(&sc.patterns, g);
    const int e = also ? expr_call(g, schema_rule(&sc, &first)) : expr_schema(&sc, *schema);
    for (int i = 0; i < sc.n_items && !g->failed; i++) {
        const SchemaItem it = sc.items[i];
        const int expr = expr_item(&sc, &it);
        if (!g->failed) g->rules[it.rule].expr = expr;
    }
    patterns_free(&sc.patterns);
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
    GgufJson fn, name, parameters, strict;
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
    const bool is_strict = gguf_json_get(&fn, "strict", &strict) && strict.type == GGUF_J_TRUE;
    const bool any = !gguf_json_get(&fn, "parameters", &parameters) || parameters.type == GGUF_J_NULL ||
                     (parameters.type == GGUF_J_OBJECT && parameters.n == 2);
    const int arguments = any ? expr_word(g, "{}") : read_schema(g, &parameters, &any_object, what, true, is_strict);
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

// strict: what cannot be enforced is an error; else g->warnings names it, and it is left out.
static bool grammar_from_schema(Grammar *g, const GrammarVocab *v, TokStr schema, bool strict) {
    GgufJson root;
    grammar_init(g, v);
    return parse_json(g, "schema", schema, &root) &&
           grammar_ready(g, read_schema(g, &root, NULL, "schema", false, strict));
}

// tools: a JSON list as in the OpenAI API; one with "strict": true is strict. wanted: the only function that may be
// called; NULL: any. several: one or more calls. schema: an answer that satisfies this schema is allowed instead of
// calls; empty: only calls are allowed. strict: of the schema.
static bool grammar_from_tools(Grammar *g, const GrammarVocab *v, TokStr tools, const char *wanted, bool several,
                               TokStr schema, bool strict) {
    GgufJson list, root;
    grammar_init(g, v);
    if (!parse_json(g, "tools", tools, &list) || (schema.n && !parse_json(g, "schema", schema, &root))) return false;
    const int calls = read_tools(g, &list, wanted, several);
    const bool either = schema.n && !g->failed;
    return grammar_ready(g, either ? ALT(calls, read_schema(g, &root, NULL, "schema", false, strict)) : calls);
}

#endif
