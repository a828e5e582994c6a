/* validate.h - a JSON schema validator for tests: the keywords that grammars enforce,
    and regular expressions. It shares
 * no code with parts/pattern.h and parts/schema.h, which it checks. Include after gguf.h, tokenizer.h and vocab.h. */
#ifndef VALIDATE_H
#define VALIDATE_H
#include <arpa/inet.h>
#include <math.h>

// ---- regular expressions --------------------------------------------------------------------------------------------
// A text is a list of characters. Matching computes, for each node, the set of positions at which a match can end.

enum { V_TEXT = 2048, V_NODES = 8192 };
typedef enum { V_SET, V_SEQ, V_ALT, V_REPEAT, V_AHEAD, V_START, V_END } VKind;
typedef struct { VKind kind; int a, b, min, max; bool no; } VNode;     // SET: ranges a .. b - 1; no: inverted, or ?!

typedef struct {
    const char *s;
    size_t n, i;
    VNode node[V_NODES];
    uint32_t lo[V_NODES], hi[V_NODES];
    int n_nodes, n_ranges;
    bool bad;                                          // it is not understood
    uint32_t text[V_TEXT];
    int n_text;
} VRegex;

static uint32_t v_char(VRegex *r) {
    uint32_t c = 0;
    const int n = r->i < r->n ? tok_read_utf8((const unsigned char *)r->s + r->i, r->n - r->i, &c) : 0;
    if (n <= 0) r->bad = true;
    r->i += n > 0 ? (size_t)n : 0;
    return c;
}
static int v_peek(const VRegex *r) { return r->i < r->n ? (unsigned char)r->s[r->i] : -1; }
static bool v_take(VRegex *r, const char *word) {
    const size_t n = strlen(word);
    if (r->n - r->i < n || memcmp(r->s + r->i, word, n)) return false;
    r->i += n;
    return true;
}
static int v_node(VRegex *r, VNode x) {
    if (r->n_nodes == V_NODES) exit(1);
    r->node[r->n_nodes] = x;
    return r->n_nodes++;
}
static void v_range(VRegex *r, uint32_t lo, uint32_t hi) {
    if (r->n_ranges == V_NODES) exit(1);
    r->lo[r->n_ranges] = lo;
    r->hi[r->n_ranges++] = hi;
}

// After a backslash. Adds the characters; returns the only one, or 0 for a class.
static uint32_t v_escape(VRegex *r) {
    static const char from[] = "nrtfv0", to[] = "\n\r\t\f\v";
    const uint32_t c = v_char(r);
    const char *at = c < 128 ? strchr(from, (int)c) : NULL;
    uint32_t one = at ? (unsigned char)to[at - from] : c, edge[] = { '0', '9', 'A', 'Z', 'a', 'z', '_', '_' };
    if (c == 'd') return v_range(r, '0', '9'), 0;
    if (c == 'D') return v_range(r, 0, '0' - 1), v_range(r, '9' + 1, 0x10FFFF), 0;
    if (c == 'w') {
        for (int k = 0; k < 8; k += 2) v_range(r, edge[k], edge[k + 1]);
        return 0;
    }
    if (c == 'W') return v_range(r, 0, '/'), v_range(r, ':', '@'), v_range(r, '[', '^'), v_range(r, '`', '`'),
                         v_range(r, '{', 0x10FFFF), 0;
    if (c == 's' || c == 'S') {
        static const uint32_t space[] = { 9, 13, 32, 32, 160, 160, 0x1680, 0x1680, 0x2000, 0x200A, 0x2028, 0x2029,
            0x202F,
                                          0x202F, 0x205F, 0x205F, 0x3000, 0x3000, 0xFEFF, 0xFEFF };
        uint32_t after = 0;
        for (int k = 0; k < 20; after = space[k + 1] + 1, k += 2) {
            if (c == 's') v_range(r, space[k], space[k + 1]);
            else v_range(r, after, space[k] - 1);
        }
        if (c == 'S') v_range(r, after, 0x10FFFF);
        return 0;
    }
    if (c == 'u' || c == 'x') {
        char hex[5] = { 0 };
        for (int k = 0; k < (c == 'u' ? 4 : 2); k++) hex[k] = (char)v_char(r);
        one = (uint32_t)strtoul(hex, NULL, 16);
    } else if (!at && ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '1' && c <= '9'))) {
        r->bad = true;
    }
    v_range(r, one, one);
    return one;
}

static int v_regex(VRegex *r);

static int v_item(VRegex *r) {
    VNode x = { .kind = V_SET, .a = r->n_ranges };
    if (v_take(r, "^")) return v_node(r, (VNode){ .kind = V_START });
    if (v_take(r, "$")) return v_node(r, (VNode){ .kind = V_END });
    if (v_take(r, "(")) {
        const bool ahead = v_take(r, "?="), no = !ahead && v_take(r, "?!");
        if (!ahead && !no && !v_take(r, "?:") && v_peek(r) == '?') r->bad = true;
        const int a = v_regex(r);
        if (!v_take(r, ")")) r->bad = true;
        return ahead || no ? v_node(r, (VNode){ .kind = V_AHEAD, .a = a, .no = no }) : a;
    }
    if (v_take(r, ".")) {
        x.no = true;
        v_range(r, '\n', '\n');
        v_range(r, '\r', '\r');
        v_range(r, 0x2028, 0x2029);
    } else if (v_take(r, "\\")) {
        v_escape(r);
    } else if (v_take(r, "[")) {
        x.no = v_take(r, "^");
        while (!r->bad && !v_take(r, "]")) {
            const bool escape = v_take(r, "\\");
            const uint32_t lo = escape ? v_escape(r) : v_char(r);
            if (!escape) v_range(r, lo, lo);
            if (lo && v_peek(r) == '-' && r->i + 1 < r->n && r->s[r->i + 1] != ']') {
                r->i++;
                r->n_ranges--;
                if (v_take(r, "\\")) v_escape(r);
                else {
                    const uint32_t hi = v_char(r);
                    v_range(r, hi, hi);
                }
                r->lo[r->n_ranges - 1] = lo;
            }
        }
    } else {
        const uint32_t c = v_char(r);
        v_range(r, c, c);
    }
    x.b = r->n_ranges;
    return v_node(r, x);
}

static int v_regex(VRegex *r) {
    int alt = -1;
    do {
        int seq = -1;
        while (!r->bad && v_peek(r) >= 0 && v_peek(r) != '|' && v_peek(r) != ')') {
            int x = v_item(r);
            for (;;) {
                int min = 0, max = -1, used = 0;
                if (v_take(r, "+")) min = 1;
                else if (v_take(r, "?")) max = 1;
                else if (v_peek(r) == '{') {
                    if (sscanf(r->s + r->i, "{%d%n", &min, &used) != 1) r->bad = true;
                    r->i += (size_t)used;
                    max = min;
                    if (v_take(r, ",")) max = v_peek(r) == '}' ? -1 : (int)strtol(r->s + r->i, NULL, 10);
                    while (v_peek(r) >= '0' && v_peek(r) <= '9') r->i++;
                    if (!v_take(r, "}")) r->bad = true;
                } else if (!v_take(r, "*")) break;
                v_take(r, "?");
                if (r->bad) break;
                x = v_node(r, (VNode){ .kind = V_REPEAT, .a = x, .min = min, .max = max });
            }
            seq = seq < 0 ? x : v_node(r, (VNode){ .kind = V_SEQ, .a = seq, .b = x });
        }
        if (seq < 0) seq = v_node(r, (VNode){ .kind = V_REPEAT, .a = 0, .min = 0, .max = 0 });
        alt = alt < 0 ? seq : v_node(r, (VNode){ .kind = V_ALT, .a = alt, .b = seq });
    } while (!r->bad && v_take(r, "|"));
    return alt;
}

// Adds to `out` the positions at which x can end if it begins at one of `in`.
static void v_ends(const VRegex *r, int x, const bool *in, bool *out) {
    const VNode k = r->node[x];
    const size_t size = (size_t)r->n_text + 1;
    bool *at = calloc(2 * size, 1), *next = at + size;
    if (!at) exit(1);
    switch (k.kind) {
    case V_SET:
        for (int i = 0; i < r->n_text; i++) {
            bool has = false;
            for (int j = k.a; j < k.b; j++) has |= r->lo[j] <= r->text[i] && r->text[i] <= r->hi[j];
            out[i + 1] |= in[i] && has != k.no;
        }
        break;
    case V_SEQ:
        v_ends(r, k.a, in, at);
        v_ends(r, k.b, at, out);
        break;
    case V_ALT:
        v_ends(r, k.a, in, out);
        v_ends(r, k.b, in, out);
        break;
    case V_REPEAT:
        memcpy(at, in, size);
        for (int n = 0; k.max < 0 ? n <= k.min + r->n_text : n <= k.max; n++) {
            bool any = false;
            for (size_t i = 0; i < size; i++) {
                out[i] |= n >= k.min && at[i];
                any |= at[i];
            }
            if (!any || n == k.max) break;
            memset(next, 0, size);
            v_ends(r, k.a, at, next);
            memcpy(at, next, size);
        }
        break;
    case V_AHEAD:
        for (size_t i = 0; i < size; i++) {
            bool any = false;
            if (!in[i]) continue;
            memset(at, 0, 2 * size);
            at[i] = true;
            v_ends(r, k.a, at, next);
            for (size_t j = 0; j < size; j++) any |= next[j];
            out[i] |= any != k.no;
        }
        break;
    case V_START: out[0] |= in[0]; break;
    case V_END: out[size - 1] |= in[size - 1]; break;
    }
    free(at);
}

// 1: the regular expression matches somewhere in the text; 0: it does not; -1: it is not understood.
static int v_matches(TokStr pattern, TokStr text) {
    static VRegex r;
    static bool in[V_TEXT + 1], out[V_TEXT + 1];
    int found = 0;
    memset(&r, 0, sizeof r);
    r.s = pattern.s;
    r.n = pattern.n;
    const int x = v_regex(&r);
    if (r.bad || r.i < r.n) return -1;
    for (size_t i = 0; i < text.n && r.n_text < V_TEXT; )
        i += (size_t)tok_read_utf8((const unsigned char *)text.s + i, text.n - i, &r.text[r.n_text++]);
    memset(out, 0, sizeof out);
    for (int i = 0; i <= r.n_text; i++) in[i] = true;
    v_ends(&r, x, in, out);
    for (int i = 0; i <= r.n_text; i++) found |= out[i];
    return found;
}

// ---- formats --------------------------------------------------------------------------------------------------------

static bool v_date(const char *s) {
    static const int days[] = { 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31 };
    int y, m, d, n = 0;
    if (sscanf(s, "%4d-%2d-%2d%n", &y, &m, &d, &n) != 3 || n != 10 || m < 1 || m > 12) return false;
    return d >= 1 && d <= days[m - 1] + (m == 2 && y % 4 == 0 && (y % 100 || y % 400 == 0));
}

static bool v_time(const char *s) {
    int h, m, sec, n = 0, zh, zm, used = 0;
    if (sscanf(s, "%2d:%2d:%2d%n", &h, &m, &sec, &n) != 3 || n != 8 || h > 23 || m > 59 || sec > 59) return false;
    if (s[n] == '.') for (n++; s[n] >= '0' && s[n] <= '9'; ) n++;
    if (!strcmp(s + n, "Z")) return true;
    return (s[n] == '+' || s[n] == '-') && sscanf(s + n + 1, "%2d:%2d%n", &zh, &zm, &used) == 2 && used == 5 &&
           !s[n + 6] && zh < 24 && zm < 60;
}

static bool v_hostname(const char *s, size_t n) {
    size_t label = 0;
    for (size_t i = 0; i < n; i++) {
        const bool letter = (s[i] >= 'a' && s[i] <= 'z') || (s[i] >= 'A' && s[i] <= 'Z') || (s[i] >= '0' &&
            s[i] <= '9');
        if (s[i] == '.' ? !label || s[i - 1] == '-' : !letter && !(s[i] == '-' && label)) return false;
        label = s[i] == '.' ? 0 : label + 1;
        if (label > 63) return false;
    }
    return n > 0 && n <= 253 && label && s[n - 1] != '-';
}

static bool v_duration(const char *s) {                // RFC 3339, appendix A
    const char *units = "YMDHMS", *at = units;
    bool time = false, any = false;
    if (*s++ != 'P') return false;
    if (strspn(s, "0123456789") && !strcmp(s + strspn(s, "0123456789"), "W")) return true;
    for (const char *last = NULL; *s; ) {
        if (*s == 'T' && !time) {
            time = true;
            at = units + 3;
            last = NULL;
            s++;
            any = false;
            continue;
        }
        const size_t n = strspn(s, "0123456789");
        const char *unit = n ? strchr(at, s[n]) : NULL;
        if (!unit || !*unit || (!time && unit >= units + 3) || (last && unit != last + 1)) return false;
        last = unit;
        at = unit + 1;
        s += n + 1;
        any = true;
    }
    return any;
}

static bool v_formats = true;                          // formats are checked

static bool v_format(const GgufJson *format, const char *s) {
    char address[16];
    const char *at = strrchr(s, '@');
    if (gguf_json_is(format, "date")) return v_date(s) && strlen(s) == 10;
    if (gguf_json_is(format, "time")) return v_time(s);
    if (gguf_json_is(format, "date-time")) return v_date(s) && s[10] == 'T' && v_time(s + 11);
    if (gguf_json_is(format, "duration")) return v_duration(s);
    if (gguf_json_is(format, "ipv4")) return inet_pton(AF_INET, s, address) == 1;
    if (gguf_json_is(format, "ipv6")) return inet_pton(AF_INET6, s, address) == 1;
    if (gguf_json_is(format, "hostname")) return v_hostname(s, strlen(s));
    if (gguf_json_is(format, "email")) return at && at > s && v_hostname(at + 1, strlen(at + 1)) && strchr(at, '.');
    if (gguf_json_is(format, "uuid")) {
        for (int i = 0; i < 36; i++)
            if (i == 8 || i == 13 || i == 18 || i == 23 ? s[i] != '-' : !s[i] || !strchr("0123456789abcdefABCDEF",
                s[i]))
                return false;
        return !s[36];
    }
    if (gguf_json_is(format, "uri")) {
        const size_t scheme = strspn(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+.-");
        for (const char *c = s; *c; c++) if (*c <= ' ' || *c > '~' || strchr("\"<>\\^`{|}", *c)) return false;
        return scheme && s[scheme] == ':' && s[scheme + 1] && (s[0] | 32) >= 'a' && (s[0] | 32) <= 'z';
    }
    return true;
}

// ---- schemas --------------------------------------------------------------------------------------------------------

static bool fits(const GgufJson *root, const GgufJson *schema, const GgufJson *v);

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

static long double v_number(const GgufJson *v) {
    char text[512];
    snprintf(text, sizeof text, "%.*s", (int)v->n, v->s);
    return strtold(text, NULL);
}

static bool fits_type(const GgufJson *v, const GgufJson *type) {
    static const char *const names[] = { "null", "boolean", "boolean", "number", "string", "array", "object" };
    GgufJson rest = *type, one;
    if (type->type == GGUF_J_ARRAY) {
        while (gguf_json_next(&rest, NULL, &one)) if (fits_type(v, &one)) return true;
        return false;
    }
    if (gguf_json_is(type, names[v->type])) return true;
    return gguf_json_is(type, "integer") && v->type == GGUF_J_NUMBER && v_number(v) == floorl(v_number(v));
}

static long double v_limit(const GgufJson *schema, const char *name, long double absent) {
    GgufJson x;
    return gguf_json_get(schema, name, &x) && x.type == GGUF_J_NUMBER ? v_number(&x) : absent;
}

// True: name and value of a property satisfy patternProperties. *known: it has a pattern.
static bool fits_patterns(const GgufJson *root, const GgufJson *schema, TokStr name, const GgufJson *v, bool *known) {
    GgufJson rest, key, x;
    if (!gguf_json_get(schema, "patternProperties", &rest)) return true;
    while (gguf_json_next(&rest, &key, &x)) {
        const TokStr pattern = json_text(&key);
        const bool is = v_matches(pattern, name) == 1;
        free_str(pattern);
        *known |= is;
        if (is && !fits(root, &x, v)) return false;
    }
    return true;
}

static bool fits_object(const GgufJson *root, const GgufJson *schema, const GgufJson *v) {
    GgufJson rest, key, x, y, properties = field(schema, "properties"), other, names;
    int n = 0;
    if (gguf_json_get(schema, "required", &rest))
        while (gguf_json_next(&rest, NULL, &x)) {
            const TokStr name = json_text(&x);
            const bool there = gguf_json_get(v, name.s, &y);
            free_str(name);
            if (!there) return false;
        }
    for (rest = *v; gguf_json_next(&rest, &key, &x); n++) {
        const TokStr name = json_text(&key);
        bool known = properties.type == GGUF_J_OBJECT && gguf_json_get(&properties, name.s, &y);
        bool ok = !known || fits(root, &y, &x);
        ok = ok && fits_patterns(root, schema, name, &x, &known);
        free_str(name);
        ok = ok && (!gguf_json_get(schema, "propertyNames", &names) || fits(root, &names, &key));
        if (!known && gguf_json_get(schema, "additionalProperties", &other)) ok = ok && fits(root, &other, &x);
        if (!ok) return false;
    }
    return n >= v_limit(schema, "minProperties", 0) && n <= v_limit(schema, "maxProperties", 1e9L);
}

static bool fits_array(const GgufJson *root, const GgufJson *schema, const GgufJson *v) {
    GgufJson rest = *v, x, items = field(schema, "items"), first = field(schema, "prefixItems"), want;
    int n = 0;
    if (items.type == GGUF_J_ARRAY) {
        first = items;
        items = field(schema, "additionalItems");
    }
    for (; gguf_json_next(&rest, NULL, &x); n++) {
        if (first.type == GGUF_J_ARRAY && gguf_json_next(&first, NULL, &want)) {
            if (!fits(root, &want, &x)) return false;
        } else if (items.type != GGUF_J_NULL && !fits(root, &items, &x)) return false;
    }
    return n >= v_limit(schema, "minItems", 0) && n <= v_limit(schema, "maxItems", 1e9L);
}

static bool fits_string(const GgufJson *schema, const GgufJson *v) {
    GgufJson x;
    const TokStr s = json_text(v);
    size_t n = 0;
    for (size_t i = 0; i < s.n; i++) n += ((unsigned char)s.s[i] & 0xC0) != 0x80;
    bool ok = n >= v_limit(schema, "minLength", 0) && n <= v_limit(schema, "maxLength", 1e9L);
    if (ok && gguf_json_get(schema, "pattern", &x)) {
        const TokStr pattern = json_text(&x);
        ok = v_matches(pattern, s) != 0;
        free_str(pattern);
    }
    if (ok && v_formats && gguf_json_get(schema, "format", &x)) ok = v_format(&x, s.s);
    free_str(s);
    return ok;
}

static bool fits_number(const GgufJson *schema, const GgufJson *v) {
    const long double a = v_number(v), step = v_limit(schema, "multipleOf", 0);
    const bool open_min = field(schema, "exclusiveMinimum").type == GGUF_J_TRUE;
    const bool open_max = field(schema, "exclusiveMaximum").type == GGUF_J_TRUE;
    const long double min = v_limit(schema, "minimum", -INFINITY), max = v_limit(schema, "maximum", INFINITY);
    if (a < min || a > max || (open_min && a == min) || (open_max && a == max)) return false;
    if (a <= v_limit(schema, "exclusiveMinimum", -INFINITY) || a >= v_limit(schema, "exclusiveMaximum", INFINITY))
        return false;
    return step == 0 || fabsl(a / step - roundl(a / step)) < 1e-6L;
}

// Searches a schema with this $anchor, or an $id that ends with the text.
static bool v_find(const GgufJson *v, const char *key, const char *text, GgufJson *found) {
    GgufJson rest = *v, x;
    if (v->type < GGUF_J_ARRAY) return false;
    if (v->type == GGUF_J_OBJECT && gguf_json_get(v, key, &x) && x.type == GGUF_J_STRING) {
        const TokStr id = json_text(&x);
        const size_t n = strlen(text);
        const bool is = id.n >= n && !strcmp(id.s + id.n - n, text);
        free_str(id);
        if (is) return *found = *v, true;
    }
    while (gguf_json_next(&rest, &(GgufJson){ 0 }, &x)) if (v_find(&x, key, text, found)) return true;
    return false;
}

static bool fits_ref(const GgufJson *root, const GgufJson *ref, const GgufJson *v) {
    const TokStr s = json_text(ref);
    GgufJson at = *root, x, resource;
    char *hash = strchr(s.s, '#'), *part = hash ? hash + 1 : NULL;
    bool ok = true;
    if (hash) *hash = 0;
    if (*s.s) ok = v_find(root, "$id", s.s, &at);
    resource = at;
    if (part && *part && *part != '/') ok = ok && v_find(&at, "$anchor", part, &at);
    while (ok && part && *part == '/') {
        char key[256];
        size_t n = 0;
        for (part++; *part && *part != '/'; part++) {
            unsigned hex = 0;
            if (*part == '%' && sscanf(part + 1, "%2x", &hex) == 1) part += 2;
            else if (*part == '~') hex = *++part == '0' ? '~' : '/';
            key[n++] = hex ? (char)hex : *part;
        }
        key[n] = 0;
        ok = at.type == GGUF_J_OBJECT && gguf_json_get(&at, key, &x);
        if (at.type == GGUF_J_ARRAY) {
            GgufJson rest = at;
            ok = true;
            for (long k = strtol(key, NULL, 10); ok && k >= 0; k--) ok = gguf_json_next(&rest, NULL, &x);
        }
        at = x;
    }
    ok = ok && fits(&resource, &at, v);
    free_str(s);
    return ok;
}

// True: the value satisfies the schema, as far as grammars can enforce one.
static bool fits(const GgufJson *root, const GgufJson *schema, const GgufJson *v) {
    GgufJson x, rest;
    bool is = false;
    if (schema->type != GGUF_J_OBJECT) return schema->type == GGUF_J_TRUE;
    if (v->type == GGUF_J_NULL && gguf_json_get(schema, "nullable", &x) && x.type == GGUF_J_TRUE) return true;
    if (gguf_json_get(schema, "$ref", &x) && !fits_ref(root, &x, v)) return false;
    if (gguf_json_get(schema, "type", &x) && !fits_type(v, &x)) return false;
    if (gguf_json_get(schema, "const", &x) && !same_json(&x, v)) return false;
    if (gguf_json_get(schema, "not", &x) && fits(root, &x, v)) return false;
    if (gguf_json_get(schema, "enum", &rest)) {
        while (!is && gguf_json_next(&rest, NULL, &x)) is = same_json(&x, v);
        if (!is) return false;
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
    if (v->type == GGUF_J_NUMBER) return fits_number(schema, v);
    if (v->type == GGUF_J_STRING) return fits_string(schema, v);
    return v->type == GGUF_J_OBJECT ? fits_object(root, schema, v) : v->type == GGUF_J_ARRAY ? fits_array(root,
        schema, v)
           : true;
}
#endif
