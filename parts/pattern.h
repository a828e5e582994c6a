/* pattern.h - sets of texts: regular expressions, numbers in a range, keys of objects, and their intersections and
 * complements, as expressions of a grammar. Part of gemma4.c, which includes it for parts/schema.h.
 *
 * A pattern is the number of a node: a set of characters, a sequence, alternatives, a repetition, an intersection, a
 * complement, or the multiples of a number. Equal nodes have one number. A pattern without intersections and
 * complements is written to the grammar as it is. Any other becomes an automaton: its states are patterns, and the
 * state after a character c is the derivative by c, the pattern of what may follow c in a text (Brzozowski 1964). A
 * length is counted while the automaton runs, so that it needs no states.
 *
 * LOOKAHEAD  (?=x)y is the intersection of y, up to the end of the text, and of x followed by anything.
 * ERRORS     Reading fails with a message in `why`. A pattern that needs too many states or too much work sets `full`;
 *            whoever calls then leaves something out, or gives up. Memory that runs out is an error of the grammar.
 *
 * Uses grammar.h. Begin with read_pattern(), pattern_number() and expr_pattern().
 *   [1] Nodes    [2] Regular expressions    [3] Numbers    [4] Derivatives    [5] Automata    [6] To the grammar */
#ifndef PATTERN_H
#define PATTERN_H

// ==== [1] Nodes ======================================================================================================

typedef enum { P_NOTHING, P_EMPTY, P_SET, P_SEQ, P_ALT, P_AND, P_NOT, P_REPEAT, P_MULTIPLE,
               P_START, P_END, P_AHEAD } PatternKind;                  // the last three: only while reading

enum { NOTHING, EMPTY, ANY_CHAR, ANY_TEXT };           // nodes of every pattern: no text, the empty text, ..

enum { PATTERN_NODES = 1 << 17, PATTERN_WORK = 1 << 21, PATTERN_STATES = 4096, PATTERN_CLASSES = 256,
       PATTERN_ITEMS = 4096,           // items of a regular expression
       DIGITS = 18, DECIMALS = 17 };   // of a number, before and after its decimal point

typedef struct {
    uint8_t kind;
    bool    nullable;                  // it matches the empty text
    bool    plain;                     // nothing in it looks around: no START, END, AHEAD
    bool    simple;                    // no AND, NOT, MULTIPLE in it
    int32_t a, b;                      // SET: first range and their number; SEQ, ALT, AND: items, b the remaining ones;
                                       // NOT, REPEAT, AHEAD: a; MULTIPLE: divisor, remainder of the digits so far
    int32_t min, max;                  // REPEAT: max -1: no bound; AHEAD: min 1: it must not match
    int32_t state, stamp;              // number of its state in the automaton with this stamp
} PatternNode;

typedef struct { int x, min, max, form, rule; } WrittenPattern;        // a rule that an automaton became

typedef struct {
    Grammar     *g;
    PatternNode *nodes;
    WrittenPattern *written;
    CharRange   *ranges;               // of all sets
    int32_t     *sets;                 // the nodes that are sets
    int32_t     *slots;                // hash table of nodes, 0: free
    int          n_nodes, cap_nodes, n_ranges, cap_ranges, n_sets, cap_sets, n_slots, stamp, n_items;
    int          n_written, cap_written;
    int64_t      work;                 // how many more nodes and derivatives may be computed
    bool         full;
    int          negated;              // above 0: what is read must not match
    char         why[200];
    struct { int32_t x, result; uint32_t c; } derived[1 << 12];        // cache of derivatives
} Patterns;

static uint32_t pattern_slot(const Patterns *p, const PatternNode *want) {
    const uint32_t mask = (uint32_t)p->n_slots - 1;
    uint32_t i = mix_hash(mix_hash(mix_hash(mix_hash(mix_hash(want->kind, (uint32_t)want->a), (uint32_t)want->b),
                                            (uint32_t)want->min), (uint32_t)want->max), 7);
    for (;; i++) {
        const PatternNode *x = &p->nodes[p->slots[i & mask]];
        if (!p->slots[i & mask] || (x->kind == want->kind && x->a == want->a && x->b == want->b &&
                                    x->min == want->min && x->max == want->max)) return i & mask;
    }
}

static int pattern_node(Patterns *p, PatternKind kind, int a, int b, int min, int max) {
    PatternNode x = { .kind = (uint8_t)kind, .a = a, .b = b, .min = min, .max = max, .plain = kind < P_START,
                      .simple = kind != P_AND && kind != P_NOT && kind != P_MULTIPLE };
    if (p->full || p->g->failed || --p->work < 0 || p->n_nodes == PATTERN_NODES) return p->full = true, NOTHING;
    uint32_t slot = pattern_slot(p, &x);
    if (p->slots[slot]) return p->slots[slot];
    const int old = p->n_slots;
    p->nodes = grammar_reserve(p->g, p->nodes, p->n_nodes, &p->cap_nodes, sizeof *p->nodes);
    p->slots = grow_slots(p->g, p->slots, &p->n_slots, p->n_nodes);
    if (p->g->failed) return NOTHING;
    for (int i = 1; p->n_slots != old && i < p->n_nodes; i++) p->slots[pattern_slot(p, &p->nodes[i])] = i;
    const bool two = kind == P_SEQ || kind == P_ALT || kind == P_AND, one = kind == P_NOT || kind == P_REPEAT;
    const PatternNode of_a = p->nodes[two || one || kind == P_AHEAD ? a : 0], of_b = p->nodes[two ? b : 0];
    if (two || one) {
        x.plain = of_a.plain && (one || of_b.plain);
        x.simple &= of_a.simple && (one || of_b.simple);
    }
    switch (kind) {
    case P_EMPTY: x.nullable = true; break;
    case P_SEQ: case P_AND: x.nullable = of_a.nullable && of_b.nullable; break;
    case P_ALT: x.nullable = of_a.nullable || of_b.nullable; break;
    case P_NOT: x.nullable = !of_a.nullable; break;
    case P_REPEAT: x.nullable = min == 0 || of_a.nullable; break;
    case P_MULTIPLE: x.nullable = b == 0; break;
    default: break;
    }
    p->nodes[p->n_nodes] = x;
    return p->slots[pattern_slot(p, &x)] = p->n_nodes++;
}

static int pat_set(Patterns *p, Chars *c) {
    sort_chars(c);
    if (c->full) p->full = true;
    if (!c->n) return NOTHING;
    for (int i = 0; i < p->n_sets; i++, p->work--) {
        const PatternNode *x = &p->nodes[p->sets[i]];
        if (x->b == c->n && !memcmp(p->ranges + x->a, c->s, (size_t)c->n * sizeof *c->s)) return p->sets[i];
    }
    p->ranges = grammar_reserve(p->g, p->ranges, p->n_ranges + c->n, &p->cap_ranges, sizeof *p->ranges);
    p->sets = grammar_reserve(p->g, p->sets, p->n_sets, &p->cap_sets, sizeof *p->sets);
    if (p->g->failed) return NOTHING;
    memcpy(p->ranges + p->n_ranges, c->s, (size_t)c->n * sizeof *c->s);
    const int node = pattern_node(p, P_SET, p->n_ranges, c->n, 0, 0);
    if (!node) return NOTHING;
    p->n_ranges += c->n;
    return p->sets[p->n_sets++] = node;
}

static int pat_range(Patterns *p, uint32_t lo, uint32_t hi) {
    Chars c = { .n = 0 };
    add_chars(&c, lo, hi);
    return pat_set(p, &c);
}

static int pat_seq(Patterns *p, int a, int b) {
    const PatternNode x = p->nodes[a], y = p->nodes[b];
    if (a == NOTHING || b == NOTHING) return NOTHING;
    if (a == EMPTY) return b;
    if (b == EMPTY) return a;
    if (a == ANY_TEXT && (b == ANY_TEXT || (y.kind == P_SEQ && y.a == ANY_TEXT))) return b;
    if (x.kind == P_SEQ) return pat_seq(p, x.a, pat_seq(p, x.b, b));
    return pattern_node(p, P_SEQ, a, b, 0, 0);
}

// Alternatives or an intersection of two patterns: a list of items in descending order, so that a new one is the first.
static int pat_join(Patterns *p, PatternKind kind, int a, int b) {
    const int none = kind == P_ALT ? NOTHING : ANY_TEXT, all = kind == P_ALT ? ANY_TEXT : NOTHING;
    if (a == b || b == none) return a;
    if (a == none) return b;
    if (a == all || b == all) return all;
    const PatternNode x = p->nodes[a], y = p->nodes[b];
    if (a == EMPTY && (kind == P_AND || y.nullable)) return kind == P_ALT ? b : y.nullable ? EMPTY : NOTHING;
    if (b == EMPTY && (kind == P_AND || x.nullable)) return kind == P_ALT ? a : x.nullable ? EMPTY : NOTHING;
    if (kind == P_AND && ((x.kind == P_NOT && x.a == b) || (y.kind == P_NOT && y.a == a))) return NOTHING;
    if (x.kind == kind && y.kind != kind) return pat_join(p, kind, b, a);
    if (x.kind == kind) return pat_join(p, kind, x.a, pat_join(p, kind, x.b, b));
    if (y.kind != kind) return pattern_node(p, kind, a > b ? a : b, a > b ? b : a, 0, 0);
    if (a == y.a) return b;
    if (a > y.a) return pattern_node(p, kind, a, b, 0, 0);
    return pattern_node(p, kind, y.a, pat_join(p, kind, a, y.b), 0, 0);
}
static int pat_alt(Patterns *p, int a, int b) { return pat_join(p, P_ALT, a, b); }
static int pat_and(Patterns *p, int a, int b) { return pat_join(p, P_AND, a, b); }

static int pat_not(Patterns *p, int a) {
    if (p->nodes[a].kind == P_NOT) return p->nodes[a].a;
    return a == NOTHING ? ANY_TEXT : a == ANY_TEXT ? NOTHING : pattern_node(p, P_NOT, a, 0, 0, 0);
}

static int pat_repeat(Patterns *p, int a, int min, int max) {          // max -1: no bound
    if (a == EMPTY || max == 0) return EMPTY;
    if (a == NOTHING) return min ? NOTHING : EMPTY;
    if (min == 1 && max == 1) return a;
    if (p->nodes[a].kind == P_REPEAT && p->nodes[a].max < 0 && p->nodes[a].min < 2 && max < 0 && min < 2)
        return pattern_node(p, P_REPEAT, p->nodes[a].a, 0, min && p->nodes[a].min, -1);
    return pattern_node(p, P_REPEAT, a, 0, min, max);
}
static int pat_maybe(Patterns *p, int a) { return pat_alt(p, EMPTY, a); }

static int pat_text(Patterns *p, TokStr s) {           // exactly this text, which is UTF-8
    int x = EMPTY;
    for (size_t i = s.n; i > 0; ) {                    // from its end
        uint32_t c = 0;
        const size_t end = i--;
        while (i > 0 && ((unsigned char)s.s[i] & 0xC0) == 0x80) i--;
        tok_read_utf8((const unsigned char *)s.s + i, end - i, &c);
        x = pat_seq(p, pat_range(p, c, c), x);
    }
    return x;
}

static void patterns_init(Patterns *p, Grammar *g) {
    *p = (Patterns){ .g = g, .work = PATTERN_WORK };
    p->slots = grow_slots(g, NULL, &p->n_slots, 1);
    p->nodes = grammar_reserve(g, NULL, 0, &p->cap_nodes, sizeof *p->nodes);
    if (g->failed) return;
    p->nodes[p->n_nodes++] = (PatternNode){ .kind = P_NOTHING, .plain = true, .simple = true };
    pattern_node(p, P_EMPTY, 0, 0, 0, 0);
    pattern_node(p, P_REPEAT, pat_range(p, 0, LAST_CHAR), 0, 0, -1);
}

static void patterns_free(Patterns *p) {
    free(p->nodes);
    free(p->ranges);
    free(p->sets);
    free(p->written);
    free(p->slots);
}

// ==== [2] Regular expressions =======================================================================================
// Those of ECMA-262, as in the keyword `pattern`, without lookbehind, word boundaries, back references and most names
// of \p{..}; and \A and \Z of other dialects. Without ^ or $, any text may come before or after.

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

// Some characters of \p{NAME}: those that texts usually have. So a name is understood only where fewer characters mean
// fewer texts: not after a ^ in a set, and not in (?!..).
static const struct { const char *names; CharRange some[24]; } properties[] = {
    { " L Letter Alphabetic ",
      { { 'A', 'Z' }, { 'a', 'z' }, { 0xC0, 0xD6 }, { 0xD8, 0xF6 }, { 0xF8, 0x2AF }, { 0x391, 0x3A1 }, { 0x3A3, 0x3F5 },
        { 0x3F7, 0x481 }, { 0x48A, 0x52F }, { 0x531, 0x556 }, { 0x560, 0x588 }, { 0x5D0, 0x5EA }, { 0x620, 0x64A },
        { 0x671, 0x6D3 }, { 0x904, 0x939 }, { 0xE01, 0xE30 }, { 0x10D0, 0x10FA }, { 0x1E00, 0x1F15 },
        { 0x3041, 0x3096 }, { 0x30A1, 0x30FA }, { 0x4E00, 0x9FFF }, { 0xAC00, 0xD7A3 } } },
    { " Lu Uppercase_Letter Uppercase ",
      { { 'A', 'Z' }, { 0xC0, 0xD6 }, { 0xD8, 0xDE }, { 0x391, 0x3A1 }, { 0x3A3, 0x3AB }, { 0x400, 0x42F },
        { 0x531, 0x556 } } },
    { " Ll Lowercase_Letter Lowercase ",
      { { 'a', 'z' }, { 0xDF, 0xF6 }, { 0xF8, 0xFF }, { 0x3AC, 0x3CE }, { 0x430, 0x45F } } },
    { " N Number Nd Decimal_Number ", { { '0', '9' } } },
    { " P Punctuation ",
      { { '!', '#' }, { '%', '*' }, { ',', '/' }, { ':', ';' }, { '?', '@' }, { '[', ']' }, { '_', '_' }, { '{', '{' },
        { '}', '}' }, { 0x2010, 0x2027 } } },
    { " Extended_Pictographic Emoji ",
      { { 0xA9, 0xA9 }, { 0xAE, 0xAE }, { 0x231A, 0x231B }, { 0x23E9, 0x23F3 }, { 0x2600, 0x2604 },
        { 0x2648, 0x2653 }, { 0x26BD, 0x26BE }, { 0x2702, 0x2702 }, { 0x2705, 0x2705 }, { 0x2708, 0x270D },
        { 0x2728, 0x2728 }, { 0x274C, 0x274C }, { 0x2753, 0x2755 }, { 0x2764, 0x2764 }, { 0x2B50, 0x2B50 },
        { 0x1F300, 0x1F321 }, { 0x1F324, 0x1F393 }, { 0x1F400, 0x1F4FD }, { 0x1F4FF, 0x1F53D },
        { 0x1F5FA, 0x1F64F }, { 0x1F680, 0x1F6C5 }, { 0x1F90C, 0x1F93A }, { 0x1F947, 0x1F9FF } } },
    { " Emoji_Component ",
      { { '#', '#' }, { '*', '*' }, { '0', '9' }, { 0x200D, 0x200D }, { 0x20E3, 0x20E3 }, { 0xFE0F, 0xFE0F },
        { 0x1F1E6, 0x1F1FF }, { 0x1F3FB, 0x1F3FF } } },
    { " Regional_Indicator ", { { 0x1F1E6, 0x1F1FF } } },
};

static void read_property(Reader *r, Chars *c, bool exact) {           // after \p
    char name[40] = " ";
    size_t n = 1;
    bool known = false;
    if (take_word(r, "{")) while (n + 2 < sizeof name && peek(r) >= 0 && peek(r) != '}') name[n++] = r->s[r->i++];
    name[n++] = ' ';
    name[n] = 0;
    for (size_t i = 0; !exact && i < sizeof properties / sizeof *properties; i++)
        for (int k = 0; strstr(properties[i].names, name) && k < 24 && properties[i].some[k].hi; k++) {
            add_chars(c, properties[i].some[k].lo, properties[i].some[k].hi);
            known = true;
        }
    if (!take_word(r, "}") || !known) reader_fail(r, "\\p{%.*s} is not supported here", (int)n - 2, name + 1);
}

static uint32_t read_braced_hex(Reader *r) {           // \u{1F600}
    uint32_t x = 0;
    for (int d; (d = peek(r) < 0 ? -1 : tok_hex_digit((unsigned char)peek(r))) >= 0 && x <= LAST_CHAR; r->i++)
        x = x << 4 | (uint32_t)d;
    if (!take_word(r, "}") || x > LAST_CHAR) reader_fail(r, "expected a character after \\u{");
    return x;
}

// Reads an escape sequence and adds its characters to *c. True: it is one character, in *one. exact: see properties.
static bool read_regex_escape(Reader *r, Chars *c, bool in_set, bool exact, uint32_t *one) {
    static const char from[] = "nrtfv0", to[] = "\n\r\t\f\v";
    r->i++;
    const int e = peek(r);
    if (e >= 0) r->i++;
    const char *at = e > 0 ? strchr(from, e) : NULL;
    if (e > 0 && strchr("dDwWsS", e)) {
        add_class(c, e);
        return false;
    }
    if (e == 'p') {
        read_property(r, c, exact);
        return false;
    }
    if (at) *one = (unsigned char)to[at - from];
    else if (e == 'x') *one = read_hex(r, 2);
    else if (e == 'u') *one = take_word(r, "{") ? read_braced_hex(r) : read_hex(r, 4);
    else if (in_set && e == 'b') *one = '\b';
    else if (e > 0 && e < 0x80 && (unsigned)(e | 32) - 'a' > 25 && (unsigned)e - '0' > 9) *one = (uint32_t)e;
    else reader_fail(r, "expected an escape for characters, got \\%c", e > 0x20 && e < 0x7F ? e : '?');
    add_chars(c, *one, *one);
    return true;
}

static int read_regex_set(Patterns *p, Reader *r) {
    Chars c = { .n = 0 };
    r->i++;
    const bool inverted = take_word(r, "^");
    while (peek(r) != ']' && !r->g->failed) {
        uint32_t lo = 0, hi = 0;
        if (peek(r) < 0) return reader_fail(r, "expected a ']'");
        const int before = c.n;
        bool one = true;
        if (peek(r) == '\\') {
            one = read_regex_escape(r, &c, true, inverted || p->negated, &lo);
        } else {
            lo = read_char(r);
            add_chars(&c, lo, lo);
        }
        if (!one || peek(r) != '-' || r->i + 1 >= r->n || r->s[r->i + 1] == ']') continue;
        r->i++;
        c.n = before;
        if (peek(r) == '\\') one = read_regex_escape(r, &(Chars){ .n = 0 }, true, true, &hi);
        else hi = read_char(r);
        if (!one || hi < lo) return reader_fail(r, "expected an ascending range");
        add_chars(&c, lo, hi);
    }
    r->i++;
    if (inverted) invert_chars(&c);
    return pat_set(p, &c);
}

static int read_regex(Patterns *p, Reader *r, int depth);

static int read_regex_group(Patterns *p, Reader *r, int depth) {
    const bool ahead = take_word(r, "?="), not_ahead = !ahead && take_word(r, "?!");
    if (take_word(r, "?<=") || take_word(r, "?<!")) return reader_fail(r, "lookbehind is not supported");
    if (take_word(r, "?P<") || take_word(r, "?<")) {   // a name
        while (peek(r) >= 0 && peek(r) != '>') r->i++;
        r->i++;
    } else if (!ahead && !not_ahead && peek(r) == '?' && !take_word(r, "?:")) {
        return reader_fail(r, "this kind of group is not supported");
    }
    if (depth == GRAMMAR_NESTING) return reader_fail(r, "expected at most %d nested groups", GRAMMAR_NESTING);
    p->negated += not_ahead;
    const int group = read_regex(p, r, depth + 1);
    p->negated -= not_ahead;
    if (!take_word(r, ")")) return reader_fail(r, "expected a ')'");
    return ahead || not_ahead ? pattern_node(p, P_AHEAD, group, 0, not_ahead, 0) : group;
}

static int read_regex_item(Patterns *p, Reader *r, int depth) {
    const int c = peek(r);
    uint32_t one = 0;
    Chars chars = { .n = 0 };
    if (c == '[') return read_regex_set(p, r);
    if (take_word(r, "(")) return read_regex_group(p, r, depth);
    if (take_word(r, "^") || take_word(r, "\\A")) return pattern_node(p, P_START, 0, 0, 0, 0);
    if (take_word(r, "$") || take_word(r, "\\Z") || take_word(r, "\\z")) return pattern_node(p, P_END, 0, 0, 0, 0);
    if (c == '*' || c == '+' || c == '?') return reader_fail(r, "expected something before '%c'", c);
    if (c == '\\') read_regex_escape(r, &chars, false, p->negated, &one);
    else if (take_word(r, ".")) {
        add_chars(&chars, '\n', '\n');
        add_chars(&chars, '\r', '\r');
        add_chars(&chars, 0x2028, 0x2029);
        invert_chars(&chars);
    } else {
        const uint32_t x = read_char(r);
        add_chars(&chars, x, x);
    }
    return r->g->failed ? NOTHING : pat_set(p, &chars);
}

static int read_regex_sequence(Patterns *p, Reader *r, int depth) {
    int min, max;
    if (r->g->failed || peek(r) < 0 || peek(r) == '|' || peek(r) == ')') return EMPTY;
    if (p->n_items++ == PATTERN_ITEMS) return reader_fail(r, "expected at most %d items", PATTERN_ITEMS);
    int item = read_regex_item(p, r, depth);
    for (int k = 0; !r->g->failed && read_repeat(r, &min, &max); k++) {
        take_word(r, "?");                             // a lazy repetition matches the same texts
        if (k == 4) return reader_fail(r, "expected at most 4 repetition operators in a row");
        item = pat_repeat(p, item, min, max);
    }
    return pat_seq(p, item, read_regex_sequence(p, r, depth));
}

static int read_regex(Patterns *p, Reader *r, int depth) {             // alternatives
    int alt = NOTHING;
    do alt = pat_alt(p, alt, read_regex_sequence(p, r, depth)); while (!r->g->failed && take_word(r, "|"));
    return alt;
}

static bool has_start(const Patterns *p, int x) {
    const PatternNode n = p->nodes[x];
    if (n.plain || n.kind >= P_START) return n.kind == P_START;
    return has_start(p, n.a) || ((n.kind == P_SEQ || n.kind == P_ALT) && has_start(p, n.b));
}

// Whether x matches without a character: 0: never, 2: always, 1: it may.
static int matches_empty(const Patterns *p, int x) {
    const PatternNode n = p->nodes[x];
    if (n.plain) return x == EMPTY ? 2 : n.nullable;
    if (n.kind >= P_START) return 2;
    const int a = matches_empty(p, n.a);
    if (n.kind == P_REPEAT) return n.min || a == 2 ? a : 1;
    const int b = matches_empty(p, n.b);
    return n.kind == P_SEQ ? (a < b ? a : b) : a == b ? a : 1;
}

// The pattern x, which may look ahead, followed by `rest` up to the end of the text. start: nothing precedes it.
static int resolve_lookahead(Patterns *p, int x, int rest, bool start) {
    const PatternNode n = p->nodes[x];
    if (p->full || n.plain) return pat_seq(p, x, rest);
    switch ((PatternKind)n.kind) {
    case P_START: return start ? rest : NOTHING;
    case P_END: return pat_and(p, EMPTY, rest);
    case P_AHEAD: {
        const int ahead = resolve_lookahead(p, n.a, ANY_TEXT, start);
        return pat_and(p, n.min ? pat_not(p, ahead) : ahead, rest);
    }
    case P_ALT: {
        const int a = resolve_lookahead(p, n.a, rest, start);
        return pat_alt(p, a, resolve_lookahead(p, n.b, rest, start));
    }
    case P_SEQ: {
        const int empty = start ? matches_empty(p, n.a) : 0;
        if (empty == 1 && has_start(p, n.b)) p->full = true;
        return resolve_lookahead(p, n.a, resolve_lookahead(p, n.b, rest, empty == 2), start);
    }
    case P_REPEAT: {
        if (n.max < 0 || n.max > 16) return p->full = true, NOTHING;
        int all = rest;
        for (int i = n.max - 1; i >= 0; i--) {
            const int more = resolve_lookahead(p, n.a, all, start && i == 0);
            all = i < n.min ? more : pat_alt(p, rest, more);
        }
        return all;
    }
    default: return NOTHING;
    }
}

// Reads a regular expression; the pattern is of the whole text. False: it is not supported; p->why says where and why.
static bool read_pattern(Patterns *p, TokStr s, int *pattern) {
    Reader r = { .g = p->g, .s = s.s, .n = s.n };
    if (p->g->failed) return false;
    p->n_items = 0;
    p->why[0] = 0;
    const int x = read_regex(p, &r, 0);
    if (!p->g->failed && r.i < r.n) reader_fail(&r, "expected the end of the pattern, got ')'");
    if (p->g->failed && r.i <= r.n) {
        memcpy(p->why, p->g->err, sizeof p->why - 1);
        p->g->failed = false;
        return false;
    }
    const int first = resolve_lookahead(p, x, ANY_TEXT, true), later = resolve_lookahead(p, x, ANY_TEXT, false);
    *pattern = first == later ? pat_seq(p, ANY_TEXT, first)
             : pat_alt(p, first, pat_seq(p, pat_repeat(p, ANY_CHAR, 1, -1), later));
    if (p->full) snprintf(p->why, sizeof p->why, "it is too complex");
    return !p->full;
}

// ==== [3] Numbers ===================================================================================================
// Decimal numbers without exponent, by their digits. A bound is compared digit by digit.

enum { WHOLE_DIGITS = 20, PART_DIGITS = 30 };          // of a bound, before and after its point
typedef struct {
    char whole[WHOLE_DIGITS + 1], part[PART_DIGITS + 1];               // digits; no zeros at the start of whole, at the
    int  n, n_part;                                                    // end of part; whole is "0" if there are none
    bool negative;
    bool more;                         // there are more decimals
    bool far;                          // there are more digits before the point
} Decimal;

// Reads a JSON number.
static Decimal read_decimal(TokStr s) {
    Decimal d = { .negative = s.s[0] == '-' };
    size_t n_digits = 0, first = s.n, end = s.n;       // first: of the digits except zeros
    long shift = 0, before = 0;                        // digits before the point
    bool point = false;
    for (size_t i = 0; i < s.n; i++) {
        if (s.s[i] == 'e' || s.s[i] == 'E') {
            for (size_t k = i + 1; k < s.n; k++)
                if (s.s[k] >= '0' && s.s[k] <= '9' && shift < 100000) shift = 10 * shift + (s.s[k] - '0');
            if (i + 1 < s.n && s.s[i + 1] == '-') shift = -shift;
            end = i;
            break;
        }
        point |= s.s[i] == '.';
        if (s.s[i] < '0' || s.s[i] > '9') continue;
        if (s.s[i] != '0' && first == s.n) first = i;
        if (first < s.n) n_digits++;
        if (!point && first < s.n) before++;
        if (point && first == s.n) before--;           // zeros after the point, before other digits
    }
    before += shift;
    d.far = n_digits && before > WHOLE_DIGITS;
    long at = before;                                  // of a digit: how many digits before the point it begins with
    for (long k = before; n_digits && k < 0 && d.n_part < PART_DIGITS; k++) d.part[d.n_part++] = '0';
    for (size_t i = first; i < end && !d.far; i++) {
        if (s.s[i] == '.') continue;
        if (at-- > 0) d.whole[d.n++] = s.s[i];
        else if (d.n_part < PART_DIGITS) d.part[d.n_part++] = s.s[i];
        else d.more |= s.s[i] != '0';
    }
    while (n_digits && !d.far && at-- > 0) d.whole[d.n++] = '0';
    if (!n_digits) d.negative = false;
    while (d.n_part && d.part[d.n_part - 1] == '0' && !d.more) d.n_part--;
    d.part[d.n_part] = 0;
    if (!d.n) d.whole[d.n++] = '0';
    return d;
}

static bool is_zero(const Decimal *d) { return d->whole[0] == '0' && !d->n_part && !d->more && !d->far; }

static int compare_decimals(const Decimal *x, const Decimal *y) {      // below, equal to or above 0
    if (x->negative != y->negative) return x->negative ? -1 : 1;
    int order = (x->far > y->far) - (x->far < y->far);
    if (!order) order = (x->n > y->n) - (x->n < y->n);
    if (!order) order = strcmp(x->whole, y->whole);
    if (!order) order = strcmp(x->part, y->part);
    if (!order) order = x->more - y->more;
    return x->negative ? -order : order;
}

static int pat_digits(Patterns *p, int min, int max) {
    return max < min ? min ? NOTHING : EMPTY : pat_repeat(p, pat_range(p, '0', '9'), min, max);
}

// A whole number of at most DIGITS digits, or, if bounds have more, of as many; and a point and decimals.
static int pat_whole(Patterns *p, int most) {
    return pat_alt(p, pat_range(p, '0', '0'), pat_seq(p, pat_range(p, '1', '9'), pat_digits(p, 0, most - 1)));
}
static int pat_decimals(Patterns *p) {
    return pat_maybe(p, pat_seq(p, pat_range(p, '.', '.'), pat_digits(p, 1, DECIMALS)));
}

// What may follow the whole part of a bound: decimals such that the number is at least, or at most, the bound.
static int pat_bound_decimals(Patterns *p, const Decimal *d, bool least, bool open) {
    const int zero = pat_range(p, '0', '0'), n = d->n_part;
    const int left = n < DECIMALS ? DECIMALS - n : 0;  // decimals after those of the bound
    int tail;                                          // after the point and all decimals of the bound
    if (d->more) open = least;
    if (least && !open) tail = pat_digits(p, !n, left);
    else if (least)
        tail = pat_seq(p, pat_repeat(p, zero, 0, left), pat_seq(p, pat_range(p, '1', '9'), pat_digits(p, 0, left)));
    else tail = open ? NOTHING : pat_repeat(p, zero, !n, left);
    for (int i = n - 1; i >= 0; i--) {
        const unsigned c = (unsigned char)d->part[i];
        const int other = least ? c < '9' ? pat_range(p, c + 1, '9') : NOTHING
                        : c > '0' ? pat_range(p, '0', c - 1) : NOTHING;
        const int others = pat_seq(p, other, pat_digits(p, 0, DECIMALS - 1 - i));
        const bool ends = !least && (i + 1 < n || (!open && !left));   // a shorter number is less
        tail = pat_alt(p, others, pat_seq(p, pat_range(p, c, c), ends ? pat_maybe(p, tail) : tail));
    }
    const int decimals = pat_seq(p, pat_range(p, '.', '.'), tail);
    return (least ? n || open : !n && open) ? decimals : pat_maybe(p, decimals);
}

// Numbers >= 0 that are at least (or else at most) a bound >= 0. most: digits before the point.
static int pat_bound(Patterns *p, const Decimal *d, bool least, bool open, bool whole, int most) {
    const int after = whole ? EMPTY : pat_decimals(p);
    int equal = EMPTY;                                 // the rest of a number with the bound's first digits
    if (!whole) equal = pat_bound_decimals(p, d, least, open);
    else if (least ? d->n_part || d->more || open : open && !d->n_part && !d->more) equal = NOTHING;
    for (int i = d->n - 1; i >= 0; i--) {
        const unsigned c = (unsigned char)d->whole[i], low = i == 0 && d->n > 1 ? '1' : '0';
        const int other = least ? c < '9' ? pat_range(p, c + 1, '9') : NOTHING
                        : c > low ? pat_range(p, low, c - 1) : NOTHING;
        const int same_length = pat_seq(p, other, pat_seq(p, pat_digits(p, d->n - 1 - i, d->n - 1 - i), after));
        equal = pat_alt(p, same_length, pat_seq(p, pat_range(p, c, c), equal));
    }
    if (least && d->n >= most) return equal;
    if (!least && d->n == 1) return equal;
    const int longer = pat_seq(p, pat_range(p, '1', '9'), pat_digits(p, d->n, most - 1));
    return pat_alt(p, equal, pat_seq(p, least ? longer : pat_whole(p, d->n - 1), after));
}

typedef struct { Decimal at; bool given, open; } Bound;                // open: the bound itself is excluded

static int pat_between(Patterns *p, const Bound *lo, const Bound *hi, bool whole) {     // of numbers >= 0
    int most = DIGITS;
    if (lo->given && lo->at.far) return NOTHING;
    if (lo->given && lo->at.n >= most) most = lo->at.n < WHOLE_DIGITS ? lo->at.n + 1 : WHOLE_DIGITS;
    const bool limited = hi->given && !hi->at.far;
    if (limited && hi->at.n > most) most = hi->at.n;
    const int all = pat_seq(p, pat_whole(p, most), whole ? EMPTY : pat_decimals(p));
    const bool from_zero = !lo->given || (is_zero(&lo->at) && !lo->open);
    const int a = from_zero ? ANY_TEXT : pat_bound(p, &lo->at, true, lo->open, whole, most);
    const int b = limited ? pat_bound(p, &hi->at, false, hi->open, whole, most) : a == ANY_TEXT ? all : ANY_TEXT;
    return pat_and(p, a, b);
}

// The numbers between two bounds, or the integers between them, as digits with an optional minus and point.
static int pattern_number(Patterns *p, const Bound *lo, const Bound *hi, bool whole) {
    const Bound zero = { .at = { .whole = "0", .n = 1 }, .given = true };
    const int minus = pat_range(p, '-', '-');
    int all = NOTHING;
    if (!hi->given || !hi->at.negative)
        all = pat_between(p, lo->given && !lo->at.negative ? lo : &zero, hi, whole);
    if (!lo->given || lo->at.negative) {
        Bound from = hi->given && (hi->at.negative || is_zero(&hi->at)) ? *hi : zero;
        from.open |= whole && is_zero(&from.at);       // no integer is -0
        all = pat_alt(p, all, pat_seq(p, minus, pat_between(p, &from, lo, whole)));
    }
    return all;
}

static int64_t common_divisor(int64_t a, int64_t b) { return b ? common_divisor(b, a % b) : a; }

// Digits, perhaps with a minus and a point, that are a multiple of n if the point is ignored.
static int pat_multiple_of(Patterns *p, int64_t n) {
    const int zero = pat_range(p, '0', '0');
    int zeros = 0;                                     // a multiple of 100 is a multiple of 1 followed by 00
    for (; n % 10 == 0; n /= 10) zeros++;
    const int some = n == 1 ? ANY_TEXT : pattern_node(p, P_MULTIPLE, (int)n, 0, 0, 0);
    if (!zeros) return some;
    return pat_alt(p, pat_seq(p, pat_maybe(p, pat_range(p, '-', '-')), zero),
                   pat_seq(p, some, pat_repeat(p, zero, zeros, zeros)));
}

// The numbers of a pattern that are multiples of d > 0. Sets p->full if d has too many digits.
static int pattern_multiples(Patterns *p, int numbers, const Decimal *d, bool whole) {
    int64_t n = 0, scale = 1;
    int all = NOTHING;
    if (d->far || d->more || d->n + d->n_part > 6) return p->full = true, NOTHING;
    for (int i = 0; i < d->n; i++) n = 10 * n + (d->whole[i] - '0');
    for (int i = 0; i < d->n_part; i++) n = 10 * n + (d->part[i] - '0');
    for (int i = d->n_part; i >= 0; i--, scale *= 10) {                // numbers with i decimals
        if (whole && i) continue;
        const int digits = pat_repeat(p, pat_range(p, '0', '9'), 1, -1), signs = pat_maybe(p, pat_range(p, '-', '-'));
        const int point = i ? pat_seq(p, pat_range(p, '.', '.'), pat_digits(p, i, i)) : EMPTY;
        const int form = whole ? ANY_TEXT : pat_seq(p, signs, pat_seq(p, digits, point));
        all = pat_alt(p, all, pat_and(p, form, pat_multiple_of(p, n / common_divisor(n, scale))));
    }
    return pat_and(p, numbers, all);
}

// ==== [4] Derivatives ===============================================================================================

// The pattern of what may follow the character c in a text of pattern x.
static int derive(Patterns *p, int x, uint32_t c) {
    const PatternNode n = p->nodes[x];
    const uint32_t slot = mix_hash(mix_hash(1, (uint32_t)x), c) % (sizeof p->derived / sizeof *p->derived);
    int result = NOTHING;
    if (p->full || p->g->failed || --p->work < 0) return p->full = true, NOTHING;
    if (n.kind == P_SET) {
        for (int i = n.a; i < n.a + n.b; i++)
            if (p->ranges[i].lo <= c && c <= p->ranges[i].hi) return EMPTY;
        return NOTHING;
    }
    if (p->derived[slot].x == x && p->derived[slot].c == c) return p->derived[slot].result;
    switch ((PatternKind)n.kind) {
    case P_SEQ:
        result = pat_seq(p, derive(p, n.a, c), n.b);
        if (p->nodes[n.a].nullable) result = pat_alt(p, result, derive(p, n.b, c));
        break;
    case P_ALT: case P_AND: {
        const int a = derive(p, n.a, c);
        result = a == NOTHING && n.kind == P_AND ? a : pat_join(p, (PatternKind)n.kind, a, derive(p, n.b, c));
        break;
    }
    case P_NOT: result = pat_not(p, derive(p, n.a, c)); break;
    case P_REPEAT:
        result = pat_seq(p, derive(p, n.a, c), pat_repeat(p, n.a, n.min ? n.min - 1 : 0, n.max < 0 ? -1 : n.max - 1));
        break;
    case P_MULTIPLE:
        if (c >= '0' && c <= '9')
            result = pattern_node(p, P_MULTIPLE, n.a, (int)(((int64_t)n.b * 10 + c - '0') % n.a), 0, 0);
        else if (c == '-' || c == '.') result = x;
        break;
    default: break;
    }
    p->derived[slot].x = x;
    p->derived[slot].c = c;
    p->derived[slot].result = result;
    return result;
}

static bool pattern_holds(Patterns *p, int x, TokStr s) {              // for a whole text, which is UTF-8
    uint32_t c = 0;
    for (size_t i = 0; i < s.n && x != NOTHING; x = derive(p, x, c))
        i += (size_t)tok_read_utf8((const unsigned char *)s.s + i, s.n - i, &c);
    return p->nodes[x].nullable;
}

// ==== [5] Automata ==================================================================================================
// Characters that all sets of a pattern treat alike are one class.

typedef struct { CharRange at; int class; } ClassRange;

typedef struct { int32_t from, to; ByteSet classes; } Arc;             // to -1: the text may end

typedef struct {
    ClassRange *ranges;                // of characters that may be written
    uint32_t    example[PATTERN_CLASSES];              // a character of each class
    Arc        *arcs;                  // ascending by `from`
    int32_t    *nodes;                 // of each state
    int32_t    *least, *most;          // of each state: the fewest and most characters up to an end; -1: none, no bound
    int         n_ranges, cap_ranges, n_classes, n_arcs, cap_arcs, n_states, cap_states;
} Machine;

static int by_edge(const void *a, const void *b) {
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

// Lists the nodes that a pattern consists of. Returns their number.
static int list_nodes(Patterns *p, int x, int32_t *list) {
    int n = 0;
    p->stamp++;
    list[n++] = x;
    p->nodes[x].stamp = p->stamp;
    for (int i = 0; i < n; i++) {
        const PatternNode k = p->nodes[list[i]];
        const int parts[2] = { k.kind >= P_SEQ && k.kind <= P_REPEAT ? k.a : 0,
                               k.kind == P_SEQ || k.kind == P_ALT || k.kind == P_AND ? k.b : 0 };
        for (int j = 0; j < 2; j++) {
            if (p->nodes[parts[j]].stamp == p->stamp) continue;
            p->nodes[parts[j]].stamp = p->stamp;
            list[n++] = parts[j];
        }
    }
    return n;
}

// Divides the writable characters into classes. Every class has the same derivatives.
static void find_pattern_classes(Patterns *p, Machine *m, int x, const Chars *writable) {
    Grammar *g = p->g;
    int32_t *list = calloc((size_t)p->n_nodes + 1, sizeof *list);
    uint32_t *edges = NULL;
    int n_edges = 0, cap_edges = 0, n_sets = 0;
    bool by_digit = false;
    int32_t sets[PATTERN_CLASSES];
    ByteSet in[PATTERN_CLASSES];                       // of each class: the sets that it is in
    const int n = list ? list_nodes(p, x, list) : grammar_fail(g, "grammar: out of memory");
    for (int i = 0; i < n && !g->failed; i++) {
        const PatternNode k = p->nodes[list[i]];
        const bool digits = k.kind == P_MULTIPLE;
        by_digit |= digits;
        if (k.kind != P_SET && !digits) continue;
        if (k.kind == P_SET && n_sets == PATTERN_CLASSES) p->full = true;
        else if (k.kind == P_SET) sets[n_sets++] = list[i];
        for (int j = 0; j < (digits ? 10 : k.b); j++) {
            edges = grammar_reserve(g, edges, n_edges + 1, &cap_edges, sizeof *edges);
            if (g->failed) break;
            edges[n_edges++] = digits ? '0' + (uint32_t)j : p->ranges[k.a + j].lo;
            edges[n_edges++] = digits ? '1' + (uint32_t)j : p->ranges[k.a + j].hi + 1;
        }
    }
    if (n_edges) qsort(edges, (size_t)n_edges, sizeof *edges, by_edge);
    for (int w = 0, e = 0; w < writable->n && !g->failed && !p->full; w++)
        for (uint32_t lo = writable->s[w].lo; lo <= writable->s[w].hi; ) {
            ByteSet of = { { 0 } };
            while (e < n_edges && edges[e] <= lo) e++;
            const uint32_t end = e < n_edges && edges[e] <= writable->s[w].hi ? edges[e] - 1 : writable->s[w].hi;
            for (int k = 0; k < n_sets; k++)
                if (derive(p, sets[k], lo) == EMPTY) add_bytes(&of, (unsigned)k, (unsigned)k);
            const bool digit = by_digit && lo >= '0' && lo <= '9';
            int c = 0;
            while (c < m->n_classes && (memcmp(&in[c], &of, sizeof of) || digit ||
                                          (by_digit && m->example[c] - '0' < 10))) c++;
            if (c == PATTERN_CLASSES) {
                p->full = true;
                break;
            }
            if (c == m->n_classes) {
                in[c] = of;
                m->example[m->n_classes++] = lo;
            }
            m->ranges = grammar_reserve(g, m->ranges, m->n_ranges, &m->cap_ranges, sizeof *m->ranges);
            if (g->failed) break;
            m->ranges[m->n_ranges++] = (ClassRange){ { lo, end }, c };
            lo = end + 1;
        }
    free(list);
    free(edges);
}

static int state_of(Patterns *p, Machine *m, int x) {  // the state of a pattern; adds it if it is new
    if (p->nodes[x].stamp == p->stamp) return p->nodes[x].state;
    m->nodes = grammar_reserve(p->g, m->nodes, m->n_states, &m->cap_states, sizeof *m->nodes);
    if (m->n_states == PATTERN_STATES) p->full = true;
    if (p->g->failed || p->full) return 0;
    p->nodes[x].stamp = p->stamp;
    p->nodes[x].state = m->n_states;
    m->nodes[m->n_states] = x;
    return m->n_states++;
}

static void add_arc(Patterns *p, Machine *m, int from, int to, int class) {
    int i = m->n_arcs;
    while (i > 0 && m->arcs[i - 1].from == from && m->arcs[i - 1].to != to) i--;
    if (i > 0 && m->arcs[i - 1].from == from) {
        add_bytes(&m->arcs[i - 1].classes, (unsigned)class, (unsigned)class);
        return;
    }
    m->arcs = grammar_reserve(p->g, m->arcs, m->n_arcs, &m->cap_arcs, sizeof *m->arcs);
    if (p->g->failed) return;
    m->arcs[m->n_arcs] = (Arc){ from, to, { { 0 } } };
    add_bytes(&m->arcs[m->n_arcs++].classes, (unsigned)class, (unsigned)class);
}

// Finds the states, and the arcs between them.
static void find_states(Patterns *p, Machine *m, int x) {
    p->stamp++;
    state_of(p, m, x);
    for (int q = 0; q < m->n_states && !p->full && !p->g->failed; q++) {
        if (p->nodes[m->nodes[q]].nullable) add_arc(p, m, q, -1, 0);
        for (int c = 0; c < m->n_classes && !p->full; c++) {
            const int next = derive(p, m->nodes[q], m->example[c]);
            if (next != NOTHING && !p->full) add_arc(p, m, q, state_of(p, m, next), c);
        }
    }
}

// Lists, for each state, the states with an arc into it: of state q, into[first[q]] .. into[first[q + 1] - 1].
static void reverse_arcs(const Machine *m, int32_t *first, int32_t *into) {
    for (int i = 0; i < m->n_arcs; i++) if (m->arcs[i].to >= 0) first[m->arcs[i].to + 1]++;
    for (int q = 0; q < m->n_states; q++) first[q + 1] += first[q];
    for (int i = m->n_arcs - 1; i >= 0; i--)           // fills from the ends, which become the beginnings
        if (m->arcs[i].to >= 0) into[--first[m->arcs[i].to + 1]] = m->arcs[i].from;
    for (int q = 0; q < m->n_states; q++) first[q] = first[q + 1];
    first[m->n_states] = 0;
    for (int i = 0; i < m->n_arcs; i++) first[m->n_states] += m->arcs[i].to >= 0;
}

// Computes least and most of each state, from the ends backwards.
static void measure_states(Patterns *p, Machine *m) {
    const size_t n = (size_t)m->n_states + 2;
    int32_t *first = calloc(n, sizeof *first), *into = calloc((size_t)m->n_arcs + 1, sizeof *into);
    int32_t *queue = calloc(n, sizeof *queue), *open = calloc(n, sizeof *open);        // open: arcs to states not done
    int head = 0, tail = 0;
    m->least = malloc(n * sizeof *m->least);
    m->most = malloc(n * sizeof *m->most);
    if (!first || !into || !queue || !open || !m->least || !m->most) grammar_fail(p->g, "grammar: out of memory");
    else {
        reverse_arcs(m, first, into);
        memset(m->least, 0xFF, n * sizeof *m->least);
        memset(m->most, 0xFF, n * sizeof *m->most);
        for (int i = 0; i < m->n_arcs; i++) if (m->arcs[i].to < 0) m->least[queue[tail++] = m->arcs[i].from] = 0;
        for (; head < tail; head++)
            for (int i = first[queue[head]]; i < first[queue[head] + 1]; i++)
                if (m->least[into[i]] < 0) m->least[queue[tail++] = into[i]] = m->least[queue[head]] + 1;
        for (int i = 0; i < m->n_arcs; i++)
            open[m->arcs[i].from] += m->arcs[i].to >= 0 && m->least[m->arcs[i].to] >= 0;
        head = tail = 0;
        for (int q = 0; q < m->n_states; q++)
            if (m->least[q] >= 0 && !open[q]) m->most[queue[tail++] = q] = 0;
        for (; head < tail; head++)
            for (int i = first[queue[head]]; i < first[queue[head] + 1]; i++) {
                if (--open[into[i]] == 0) queue[tail++] = into[i];
                if (m->most[into[i]] < m->most[queue[head]] + 1) m->most[into[i]] = m->most[queue[head]] + 1;
            }
        for (int q = 0; q < m->n_states; q++) if (open[q]) m->most[q] = -1;
    }
    free(first);
    free(into);
    free(queue);
    free(open);
}

// True: wherever least and most allow a text of min to max characters to go on, it can really be completed. That is so
// if the bounds are far from each other: a path without circles has fewer characters than there are states.
static bool lengths_have_no_gaps(Patterns *p, const Machine *m, int min, int max) {
    const int64_t work = (int64_t)max * m->n_arcs / 8;
    if (min <= 0 || max < 0 || max - min >= 3 * m->n_states) return true;
    if (work > p->work / 2) return false;
    p->work -= work;
    bool *now = calloc((size_t)m->n_states + 1, 1), *later = calloc((size_t)m->n_states + 1, 1), ok = now && later;
    for (int n = max; ok && n >= 0; n--) {             // now: which states can be completed after n characters
        memset(now, 0, (size_t)m->n_states);
        for (int i = 0; i < m->n_arcs; i++)
            now[m->arcs[i].from] |= m->arcs[i].to < 0 ? n >= min : n < max && later[m->arcs[i].to];
        for (int q = 0; ok && q < m->n_states; q++) {
            const bool may = m->least[q] >= 0 && n + m->least[q] <= max && (m->most[q] < 0 || n + m->most[q] >= min);
            ok = may == now[q];
        }
        bool *swap = now;
        now = later;
        later = swap;
    }
    free(now);
    free(later);
    return ok;
}

// ==== [6] To the grammar ============================================================================================

typedef enum {
    WRITE_STRING,                      // inside a JSON string
    WRITE_CALL,                        // inside a string of a tool call
    WRITE_KEY,                         // as it is, from characters that need no escape: keys and numbers
    WRITE_BARE                         // as it is: letters, digits, _ and -: keys of tool calls
} PatternForm;

static Chars writable_chars(PatternForm form) {
    static const Chars of[] = {
        { .s = { { '\b', '\n' }, { '\f', '\r' }, { ' ', 0xD7FF }, { 0xE000, LAST_CHAR } }, .n = 4 },
        { .s = { { '\t', '\n' }, { '\r', '\r' }, { ' ', 0xD7FF }, { 0xE000, LAST_CHAR } }, .n = 4 },
        { .s = { { ' ', '!' }, { '#', '[' }, { ']', 0xD7FF }, { 0xE000, LAST_CHAR } }, .n = 4 },
        { .s = { { '-', '-' }, { '0', '9' }, { 'A', 'Z' }, { '_', '_' }, { 'a', 'z' } }, .n = 5 } };
    return of[form];
}

// One character of the set c, which is writable.
static int expr_written(Grammar *g, const Chars *c, PatternForm form) {
    static const char escaped[] = "\"\\\b\f\n\r\t", letters[] = "\"\\bfnrt";
    const Chars writable = writable_chars(form == WRITE_STRING ? WRITE_KEY : form);
    Chars raw = common_chars(c, &writable);
    const int one = expr_chars(g, &raw), alt = form == WRITE_STRING ? ALT(one) : one;
    for (size_t i = 0; form == WRITE_STRING && i < sizeof letters - 1; i++) {
        const char text[2] = { '\\', letters[i] };
        if (has_char(c, (unsigned char)escaped[i])) add_expr(g, alt, expr_text(g, text, 2));
    }
    return alt;
}

// A simple pattern as an expression.
static int expr_simple(Patterns *p, int x, PatternForm form) {
    Grammar *g = p->g;
    const PatternNode n = p->nodes[x];
    Chars c = { .n = 0 };
    switch ((PatternKind)n.kind) {
    case P_SET:
        for (int i = n.a; i < n.a + n.b; i++) add_chars(&c, p->ranges[i].lo, p->ranges[i].hi);
        return expr_written(g, &c, form);
    case P_REPEAT: return expr_repeat(g, expr_simple(p, n.a, form), n.min, n.max);
    case P_SEQ: case P_ALT: {
        const int list = new_expr(g, n.kind == P_SEQ ? EXPR_SEQ : EXPR_ALT, 0, 0, 0);
        for (; p->nodes[x].kind == n.kind && !g->failed; x = p->nodes[x].b)
            add_expr(g, list, expr_simple(p, p->nodes[x].a, form));
        add_expr(g, list, expr_simple(p, x, form));
        return list;
    }
    case P_EMPTY: return new_expr(g, EXPR_SEQ, 0, 0, 0);
    default: return expr_nothing(g);
    }
}

// Subtracts the number of expressions that expr_simple() makes. Parts that occur several times are written as often.
static void count_exprs(const Patterns *p, int x, int *left) {
    for (; *left > 0; x = p->nodes[x].b) {
        const PatternNode n = p->nodes[x];
        *left -= 4;
        if (n.kind == P_SET) *left -= n.b;
        if (n.kind == P_SEQ || n.kind == P_ALT || n.kind == P_REPEAT) count_exprs(p, n.a, left);
        if (n.kind != P_SEQ && n.kind != P_ALT) break;
    }
}

// One character of some classes. Equal sets share one expression; a large one is a rule.
static int expr_classes(Grammar *g, const Machine *m, const ByteSet *classes, PatternForm form) {
    Chars c = { .n = 0 };
    for (int i = 0; i < m->n_ranges; i++) {
        const CharRange r = m->ranges[i].at;
        if (!has_byte(classes, (unsigned)m->ranges[i].class)) continue;
        if (c.n && c.s[c.n - 1].hi + 1 == r.lo) c.s[c.n - 1].hi = r.hi;
        else add_chars(&c, r.lo, r.hi);
    }
    const int before = g->n_exprs, e = expr_written(g, &c, form);
    return g->n_exprs - before < 8 ? e : expr_call(g, rule_of(g, e));
}

// Writes the automaton of pattern x, of which texts of min to max characters are allowed.
static int expr_machine(Patterns *p, const Machine *m, int x, int min, int max, PatternForm form) {
    enum { SHARED = 64 };
    Grammar *g = p->g;
    struct { ByteSet classes; int expr; } shared[SHARED];
    const int start = g->n_edges;
    int n_shared = 0;
    for (int i = 0; i < m->n_arcs && !g->failed; i++) {
        const Arc a = m->arcs[i];
        Edge e = { .from = a.from, .to = a.to, .min = min, .max = max };
        if (a.to >= 0) {
            if (m->least[a.to] < 0) continue;
            e.min = m->most[a.to] < 0 || min <= m->most[a.to] + 1 ? 0 : min - m->most[a.to] - 1;
            e.max = max < 0 ? -1 : max - m->least[a.to] - 1;
            if (max >= 0 && e.max < 0) continue;
            int k = 0;
            while (k < n_shared && memcmp(&shared[k].classes, &a.classes, sizeof a.classes) != 0) k++;
            if (k == n_shared) {
                e.expr = expr_classes(g, m, &a.classes, form);
                if (k < SHARED) {
                    shared[k].classes = a.classes;
                    shared[n_shared++].expr = e.expr;
                }
            } else {
                e.expr = shared[k].expr;
            }
        }
        RESERVE(edges, g->n_edges);
        if (!g->failed) g->edges[g->n_edges++] = e;
    }
    const int rule = rule_of(g, new_expr(g, EXPR_MACHINE, start, m->n_states, g->n_edges - start));
    p->written = grammar_reserve(g, p->written, p->n_written, &p->cap_written, sizeof *p->written);
    if (!g->failed) p->written[p->n_written++] = (WrittenPattern){ x, min, max, (int)form, rule };
    return expr_call(g, rule);
}

// Takes repetitions of one character out of an intersection as bounds of the length. A length that is followed by
// something that may be missing, as in (?=.{1,253}\.?$), is taken without it. Returns the pattern without bounds.
static int take_lengths(Patterns *p, int x, int *min, int *max) {
    const PatternNode n = p->nodes[x];
    if (n.kind == P_AND) {
        const int a = take_lengths(p, n.a, min, max);
        return pat_and(p, a, take_lengths(p, n.b, min, max));
    }
    const bool loose = n.kind == P_SEQ && p->nodes[n.b].nullable && p->nodes[n.a].max > 64;
    const PatternNode r = p->nodes[loose ? n.a : x];
    if (loose && r.kind == P_REPEAT && derive(p, r.a, 0x4E00) == NOTHING) return x;    // not nearly any character
    if (r.kind != P_REPEAT || p->nodes[r.a].kind != P_SET || (r.min <= 1 && r.max < 0)) return x;
    if (r.min > *min) *min = r.min;
    if (r.max >= 0 && (*max < 0 || r.max < *max)) *max = r.max;
    return pat_repeat(p, r.a, 0, -1);
}

static int expr_automaton(Patterns *p, int x, int min, int max, PatternForm form) {
    const Chars writable = writable_chars(form);
    int e = 0;
    bool gaps = false;
    for (int i = 0; i < p->n_written; i++) {
        const WrittenPattern w = p->written[i];
        if (w.x == x && w.min == min && w.max == max && w.form == (int)form) return expr_call(p->g, w.rule);
    }
    Machine *m = calloc(1, sizeof *m);
    if (!m) return grammar_fail(p->g, "grammar: out of memory");
    find_pattern_classes(p, m, x, &writable);
    find_states(p, m, x);
    if (!p->full && !p->g->failed) measure_states(p, m);
    if (!p->full && !p->g->failed) {
        gaps = !lengths_have_no_gaps(p, m, min, max);
        const bool never = m->least[0] < 0 || (max >= 0 && m->least[0] > max) || (m->most[0] >= 0 && m->most[0] < min);
        if (never) e = expr_nothing(p->g);
        else if (!gaps) e = expr_machine(p, m, x, min, max, form);
    }
    free(m->ranges);
    free(m->arcs);
    free(m->nodes);
    free(m->least);
    free(m->most);
    free(m);
    if (gaps && !e && !p->g->failed)                   // the length becomes part of the states
        e = expr_automaton(p, pat_and(p, x, pat_repeat(p, ANY_CHAR, min, max)), 0, -1, form);
    return e;
}

// Texts of pattern x with min to max characters; max -1: no bound. Sets p->full if that is too complex.
static int expr_pattern(Patterns *p, int x, int min, int max, PatternForm form) {
    int left = 1 << 14;
    if (p->full || p->g->failed) return 0;
    if (p->nodes[x].kind == P_AND || (p->nodes[x].kind == P_REPEAT && (min > 0 || max >= 0)))
        x = take_lengths(p, x, &min, &max);
    const PatternNode n = p->nodes[x];
    if (max >= 0 && max < min) return expr_nothing(p->g);
    if (n.kind == P_REPEAT && p->nodes[n.a].kind == P_SET && n.max < 0) {
        x = pat_repeat(p, n.a, n.min > min ? n.min : min, max);
        min = 0;
        max = -1;
    }
    if (p->nodes[x].simple && min <= 0 && max < 0) {
        count_exprs(p, x, &left);
        if (left > 0) return expr_simple(p, x, form);
    }
    return expr_automaton(p, x, min, max, form);
}

#endif
