/* grammar.h - constrained generation: a grammar decides which tokens may come next. Part of gemma4.c, which includes
 * it; it uses tokenizer.h only. parts/schema.h builds such grammars from JSON schemas and from declarations of tools.
 *
 * USE      Call grammar_vocab_init once. For each answer call grammar_from_gbnf, grammar_from_schema or
 *          grammar_from_tools; then grammar_start, and for each token grammar_mask and grammar_advance; at the end
 *          grammar_free.
 * STATES   A state is an integer, copied by assignment. To look ahead, copy it and advance the copy. States stay valid
 *          until grammar_keep_states, whose caller lists the states that are still in use. After a failure,
 *          grammar_recover makes the grammar usable again, so looking ahead may fail. One thread at a time per Grammar.
 * BYTES    Texts are matched byte by byte, so a token may begin or end inside a character. A control token is allowed
 *          only where the grammar names it, a token that ends generation only where the text is complete.
 * HOW      Each rule is compiled to a program of instructions: match bytes, branch, call a rule, count for {m,n}. A
 *          Stack is an instruction, a count, and the stack to return to. Equal stacks are stored once. After some text,
 *          the parser is in a set of stacks (StackSet); equal sets are stored once too, and transitions between sets
 *          are cached. So this is a deterministic automaton that is built when it is needed. A mask walks the automaton
 *          over the tree of all tokens. If that walk visits many nodes, it is done for the top frame of each stack
 *          only, as if the stack had no other frame, and cached; only tokens that leave the top frame need the frames
 *          below.
 * NEVER    Rules that match no text are removed, so every allowed text can be completed. Stacks deeper than
 *          GRAMMAR_DEPTH are the exception; then grammar_mask fails with a message.
 * ERRORS   A function returns false and err holds one line. Sizes, depths, time and memory are bounded for any grammar.
 *
 * Uses tokenizer.h. Begin with grammar_from_gbnf(), grammar_mask() and grammar_advance().
 *   [1] Grammars, errors, growth    [2] Expressions    [3] Characters    [4] GBNF    [5] Checks and programs
 *   [6] Stacks and sets    [7] Vocabulary, masks */
#ifndef GRAMMAR_H
#define GRAMMAR_H
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ==== [1] Grammars, errors, growth ===================================================================================

enum {
    GRAMMAR_RULES = 1 << 13, GRAMMAR_EXPRS = 1 << 18, GRAMMAR_CODE = 1 << 18, GRAMMAR_SETS = 1 << 10,
    GRAMMAR_SOURCE = 1 << 18,          // bytes of a grammar, a schema, or a list of tools
    GRAMMAR_TEXT = 1 << 21,            // bytes of literals
    GRAMMAR_NAMED = 32,                // control tokens that a grammar may name
    GRAMMAR_NESTING = 64,              // groups in groups
    GRAMMAR_COUNT = 1 << 24,           // largest m and n of {m,n}
    GRAMMAR_DEPTH = 240,               // frames of a stack; usual JSON parsers accept no deeper nesting
    GRAMMAR_STACKS = 1024,             // stacks of a set; a grammar that needs more is too ambiguous
    GRAMMAR_WORK = 1 << 20,            // stacks that one mask or token may visit
    GRAMMAR_MEMORY = 64 << 20,         // bytes of stacks and sets
    GRAMMAR_WALKS = 96,                // cached walks, of n_tokens / 8 bytes each
    TOKEN_BYTES = 256                  // longer tokens are never allowed
};

typedef enum { EXPR_TEXT, EXPR_SET, EXPR_TOKEN, EXPR_CALL, EXPR_SEQ, EXPR_ALT, EXPR_REPEAT, EXPR_MACHINE } ExprKind;

typedef struct {
    uint8_t kind;
    bool    productive, nullable;      // it matches some text; it matches the empty text
    int32_t a;                         // TEXT: offset; SET, TOKEN, CALL: number; SEQ, ALT: last item; REPEAT: its body;
                                       // MACHINE: its first edge
    int32_t prev;                      // the item before this one in its list; 0: none
    int32_t min, max;                  // REPEAT: max -1: no bound; TEXT: max is its length in bytes; MACHINE: the
                                       // number of states, of edges
} Expr;

typedef struct {                       // of a MACHINE, an automaton over characters; ascending by `from`
    int32_t from, to;                  // states; the first is 0; to -1: the text may end in `from`
    int32_t expr;                      // one character
    int32_t min, max;                  // how many characters must precede; max -1: no bound
} Edge;

typedef struct {
    TokStr  name;                      // points into the grammar's text; empty: a generated rule
    int32_t line, expr, entry;         // line of the definition; expression, 0: not defined yet; first instruction
    int32_t link;                      // next rule in the same hash bucket
} Rule;

typedef struct { uint64_t w[4]; } ByteSet;

typedef enum { OP_END, OP_IF, OP_BYTE, OP_SET, OP_TOKEN, OP_SPLIT, OP_CALL, OP_COUNT, OP_LOOP, OP_STEP } OpCode;

typedef struct {
    uint8_t op;
    bool    empty;                     // LOOP: the body may match the empty text
    int32_t next;                      // the next instruction
    int32_t arg;                       // byte, set, named token, rule; SPLIT: the other branch; LOOP: the body
    int32_t min, max;                  // LOOP, IF: bounds of the count; STEP: max, the largest count; -1: no bound
    int32_t loop;                      // the LOOP, or the first IF of a machine, whose counts these are; -1: none
} Code;

typedef struct {                       // number 0: the empty stack; the whole text is matched
    int32_t  pc, count;                // instruction; iterations of its LOOP, or characters of its machine
    int32_t  parent, depth;            // the stack to return to; number of frames
    uint32_t visit;                    // the last close_set() that visited it
} Stack;

typedef struct {
    int32_t kernel, n_kernel;          // in ids: the stacks after a symbol, ascending
    int32_t items, n_items;            // in ids: the stacks that wait for a symbol
    int32_t row;                       // in rows: the next set by symbol; -1: none yet
    bool    complete;                  // the text may end here
    bool    large;                     // a walk of all tokens from here visits many nodes
} StackSet;

typedef struct {                       // a cached walk of all tokens from a set
    int32_t   set;
    uint32_t *bits;                    // the tokens that may follow
    uint32_t *exits;                   // (n_exits) nodes at which the text of this frame may end
    int       n_exits;
    uint64_t  last_used;
} Walk;

typedef struct GrammarVocab {          // the tokens as a tree of their bytes, in depth-first order; node 0 is the root
    const Tokenizer *t;
    int       n_nodes, longest;        // longest: bytes of the longest token
    uint8_t  *byte, *depth;            // (n_nodes) the last byte of the node's text; its length
    uint32_t *skip;                    // (n_nodes) the first node after this node's subtree
    uint32_t *first;                   // (n_nodes + 1) tokens of node i: order[first[i]] .. order[first[i + 1] - 1]
    int32_t  *order;                   // ids in the order of their bytes
} GrammarVocab;

typedef struct Grammar {
    const GrammarVocab *v;
    const Tokenizer *t;
    bool      failed;
    char      err[256];
    char      warnings[1024];          // what of a schema is not enforced, in one line of ASCII; "": nothing
    TokText   text;
    Expr     *exprs;                   // number 0: the empty text
    Rule     *rules;                   // number 0: none
    ByteSet  *sets;
    Edge     *edges;
    Code     *code;                    // number 0: OP_END
    int       n_exprs, n_rules, n_sets, n_edges, n_code, cap_exprs, cap_rules, cap_sets, cap_edges, cap_code;
    int32_t   named[GRAMMAR_NAMED];    // ids
    int       n_named;
    int32_t   buckets[256];            // rules by name
    int32_t   builtin[16];             // rules of schema.h
    int32_t   start[3];                // rules, by GrammarStart

    uint8_t   class_of[256], byte_of[256];   // class of a byte: bytes that no rule distinguishes; a byte of a class
    int       n_classes, n_symbols;    // symbols are classes, then named tokens
    Stack    *stacks;
    StackSet *stack_sets;              // number 0: no text may follow; 1: the text is complete
    int32_t  *ids, *rows;              // stacks of all sets; transitions: the next set by symbol, -1: not computed yet
    int32_t  *stack_slots, *set_slots; // hash tables of numbers, 0: free
    int       n_stacks, n_stack_sets, n_ids, n_rows, n_stack_slots, n_set_slots;
    int       cap_stacks, cap_stack_sets, cap_ids, cap_rows;
    uint32_t  visit;                   // number of the current close_set()
    int64_t   work;                    // stacks that the current call may still visit
    uint64_t  clock;
    Walk      walks[GRAMMAR_WALKS];
    int       n_walks;
    uint32_t *bits;                    // scratch of grammar_mask
} Grammar;

typedef int32_t GrammarState;          // a StackSet; 0: the text does not match

// How an answer begins.
typedef enum {
    START_ANSWER,                      // with the text that the grammar describes
    START_MAY_THINK,                   // optionally with a thought before it
    START_THINKING                     // inside a thought
} GrammarStart;

#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
static int grammar_fail(Grammar *g, const char *fmt, ...) {            // keeps the first message
    va_list ap;
    if (!g->failed) {
        va_start(ap, fmt);
        vsnprintf(g->err, sizeof g->err, fmt, ap);
        va_end(ap);
    }
    g->failed = true;
    return 0;
}

// Grows a list until it has an element n. Returns it, unchanged if memory runs out.
static void *grammar_reserve(Grammar *g, void *list, int n, int *cap, size_t size) {
    if (n < *cap) return list;
    int more = *cap ? 2 * *cap : 64;
    while (more <= n) more *= 2;
    void *grown = realloc(list, (size_t)more * size);
    if (!grown) {
        grammar_fail(g, "grammar: out of memory");
        return list;
    }
    *cap = more;
    return grown;
}
#define RESERVE(list, n) (g->list = grammar_reserve(g, g->list, n, &g->cap_##list, sizeof *g->list))

// ==== [2] Expressions ================================================================================================
// The bodies of rules. An expression is part of one list only. After a failure all of these functions return 0, which
// is the empty text.

static int new_expr(Grammar *g, ExprKind kind, int a, int min, int max) {
    if (!g->failed && g->n_exprs == GRAMMAR_EXPRS)
        grammar_fail(g, "grammar: expected at most %d elements", GRAMMAR_EXPRS);
    if (!g->failed) RESERVE(exprs, g->n_exprs);
    if (g->failed) return 0;
    g->exprs[g->n_exprs] = (Expr){ .kind = (uint8_t)kind, .a = a, .min = min, .max = max };
    return g->n_exprs++;
}

static void add_expr(Grammar *g, int list, int item) {                 // appends to a SEQ or ALT
    if (!list || !item) return;
    g->exprs[item].prev = g->exprs[list].a;
    g->exprs[list].a = item;
}

static int expr_list(Grammar *g, ExprKind kind, const int *items, size_t n) {
    const int list = new_expr(g, kind, 0, 0, 0);
    for (size_t i = 0; i < n; i++) add_expr(g, list, items[i]);
    return list;
}
#define SEQ(...) expr_list(g, EXPR_SEQ, (const int[]){ __VA_ARGS__ }, sizeof (int[]){ __VA_ARGS__ } / sizeof(int))
#define ALT(...) expr_list(g, EXPR_ALT, (const int[]){ __VA_ARGS__ }, sizeof (int[]){ __VA_ARGS__ } / sizeof(int))

static int expr_nothing(Grammar *g) { return new_expr(g, EXPR_ALT, 0, 0, 0); }            // matches no text
static int expr_call(Grammar *g, int rule) { return new_expr(g, EXPR_CALL, rule, 0, 0); }

static int expr_repeat(Grammar *g, int what, int min, int max) { return new_expr(g, EXPR_REPEAT, what, min, max); }
static int expr_maybe(Grammar *g, int what) { return expr_repeat(g, what, 0, 1); }

// Copies bytes into the grammar. Returns their offset.
static int keep_text(Grammar *g, const char *s, size_t n) {
    const size_t at = g->text.n;
    if (n > GRAMMAR_TEXT - at)
        return grammar_fail(g, "grammar: expected at most %d bytes of literals and names", GRAMMAR_TEXT);
    if (!tok_text_append(&g->text, s, n)) return grammar_fail(g, "grammar: out of memory");
    return (int)at;
}

static int expr_text(Grammar *g, const char *s, size_t n) {
    const int at = keep_text(g, s, n);
    return new_expr(g, EXPR_TEXT, at, 0, (int)n);
}
static int expr_word(Grammar *g, const char *s) { return expr_text(g, s, strlen(s)); }

static int expr_bytes(Grammar *g, const ByteSet *b) {                  // one byte of the set
    int i = 0;
    while (i < g->n_sets && memcmp(&g->sets[i], b, sizeof *b) != 0) i++;
    if (i == GRAMMAR_SETS)
        return grammar_fail(g, "grammar: expected at most %d different sets of characters", GRAMMAR_SETS);
    if (i == g->n_sets) {
        RESERVE(sets, g->n_sets);
        if (g->failed) return 0;
        g->sets[g->n_sets++] = *b;
    }
    return new_expr(g, EXPR_SET, i, 0, 0);
}

static void add_bytes(ByteSet *b, unsigned lo, unsigned hi) {
    for (; lo <= hi; lo++) b->w[lo / 64] |= (uint64_t)1 << lo % 64;
}
static bool has_byte(const ByteSet *b, unsigned c) { return b->w[c / 64] >> c % 64 & 1; }

static int expr_range(Grammar *g, unsigned lo, unsigned hi) {          // of bytes
    ByteSet b = { { 0 } };
    add_bytes(&b, lo, hi);
    return expr_bytes(g, &b);
}

static int expr_token(Grammar *g, int32_t id) {                        // a control token
    int i = 0;
    while (i < g->n_named && g->named[i] != id) i++;
    if (i == GRAMMAR_NAMED) return grammar_fail(g, "grammar: expected at most %d control tokens", GRAMMAR_NAMED);
    if (i == g->n_named) g->named[g->n_named++] = id;
    return new_expr(g, EXPR_TOKEN, i, 0, 0);
}

static int new_rule(Grammar *g) {
    if (!g->failed && g->n_rules == GRAMMAR_RULES) grammar_fail(g, "grammar: expected at most %d rules", GRAMMAR_RULES);
    if (!g->failed) RESERVE(rules, g->n_rules);
    if (g->failed) return 0;
    g->rules[g->n_rules] = (Rule){ 0 };
    return g->n_rules++;
}

static int rule_of(Grammar *g, int expr) {                             // a generated rule, without name
    const int r = new_rule(g);
    if (r) g->rules[r].expr = expr;
    return r;
}

static void grammar_free(Grammar *g);

static void grammar_init(Grammar *g, const GrammarVocab *v) {
    *g = (Grammar){ .v = v, .t = v->t };
    new_expr(g, EXPR_SEQ, 0, 0, 0);
    new_rule(g);
}

// ==== [3] Characters =================================================================================================
// Sets of code points, and their UTF-8 encodings.

enum { MAX_CHAR_RANGES = 256, LAST_CHAR = 0x10FFFF };
typedef struct { uint32_t lo, hi; } CharRange;
typedef struct { CharRange s[MAX_CHAR_RANGES]; int n; bool full; } Chars;      // full: there were too many ranges

static void add_chars(Chars *c, uint32_t lo, uint32_t hi) {
    if (c->n == MAX_CHAR_RANGES) c->full = true;
    else if (lo <= hi) c->s[c->n++] = (CharRange){ lo, hi };
}

static int by_lo(const void *a, const void *b) {
    const CharRange *x = a, *y = b;
    return (x->lo > y->lo) - (x->lo < y->lo);
}

static void sort_chars(Chars *c) {                                     // ascending; merges ranges that touch
    int n = 0;
    qsort(c->s, (size_t)c->n, sizeof *c->s, by_lo);
    for (int i = 0; i < c->n; i++) {
        if (n && c->s[i].lo <= c->s[n - 1].hi + 1) {
            if (c->s[i].hi > c->s[n - 1].hi) c->s[n - 1].hi = c->s[i].hi;
        } else {
            c->s[n++] = c->s[i];
        }
    }
    c->n = n;
}

static void invert_chars(Chars *c) {
    Chars out = { .full = c->full };
    uint32_t at = 0;
    sort_chars(c);
    for (int i = 0; i < c->n; i++) {
        if (c->s[i].lo > at) add_chars(&out, at, c->s[i].lo - 1);
        at = c->s[i].hi + 1;
    }
    if (at <= LAST_CHAR) add_chars(&out, at, LAST_CHAR);
    *c = out;
}

static Chars common_chars(const Chars *a, const Chars *b) {
    Chars out = { .full = a->full || b->full };
    for (int i = 0; i < a->n; i++)
        for (int k = 0; k < b->n; k++) {
            const uint32_t lo = a->s[i].lo > b->s[k].lo ? a->s[i].lo : b->s[k].lo;
            const uint32_t hi = a->s[i].hi < b->s[k].hi ? a->s[i].hi : b->s[k].hi;
            if (lo <= hi) add_chars(&out, lo, hi);
        }
    return out;
}

static bool has_char(const Chars *c, uint32_t x) {
    for (int i = 0; i < c->n; i++)
        if (c->s[i].lo <= x && x <= c->s[i].hi) return true;
    return false;
}

// Adds the encodings of lo..hi to a list of alternatives. It splits the range until, in each part, every byte of the
// encoding has a range that does not depend on the bytes before it.
static void add_utf8(Grammar *g, int alt, uint32_t lo, uint32_t hi) {
    static const uint32_t last[] = { 0x7F, 0x7FF, 0xD7FF, 0xDFFF, 0xFFFF };
    for (int i = 0; i < 5; i++)
        if (lo <= last[i] && last[i] < hi) {
            add_utf8(g, alt, lo, last[i]);
            add_utf8(g, alt, last[i] + 1, hi);
            return;
        }
    if (lo >= 0xD800 && hi <= 0xDFFF) return;          // surrogates are not characters
    for (uint32_t m = 0x3F; lo > 0x7F && m < 0x3FFFF + 1; m = m << 6 | 0x3F) {
        if ((lo & ~m) == (hi & ~m)) continue;
        if (lo & m) {
            add_utf8(g, alt, lo, lo | m);
            add_utf8(g, alt, (lo | m) + 1, hi);
            return;
        }
        if ((hi & m) != m) {
            add_utf8(g, alt, lo, (hi & ~m) - 1);
            add_utf8(g, alt, hi & ~m, hi);
            return;
        }
    }
    char a[4], b[4];
    const size_t n = gguf_utf8(lo, a);
    gguf_utf8(hi, b);
    const int seq = new_expr(g, EXPR_SEQ, 0, 0, 0);
    for (size_t i = 0; i < n; i++) add_expr(g, seq, expr_range(g, (unsigned char)a[i], (unsigned char)b[i]));
    add_expr(g, alt, seq);
}

// One character of the set.
static int expr_chars(Grammar *g, Chars *c) {
    ByteSet ascii = { { 0 } };
    bool any = false;
    const int alt = new_expr(g, EXPR_ALT, 0, 0, 0);
    if (c->full) return grammar_fail(g, "grammar: expected at most %d ranges of characters in a set", MAX_CHAR_RANGES);
    sort_chars(c);
    for (int i = 0; i < c->n; i++) {
        const CharRange s = c->s[i];
        if (s.lo < 0x80) {
            add_bytes(&ascii, s.lo, s.hi < 0x7F ? s.hi : 0x7F);
            any = true;
        }
        if (s.hi >= 0x80) add_utf8(g, alt, s.lo > 0x80 ? s.lo : 0x80, s.hi);
    }
    if (any) add_expr(g, alt, expr_bytes(g, &ascii));
    return alt;
}

// ==== [4] GBNF =======================================================================================================
// The grammar format of llama.cpp:  name ::= alternatives  with "literals", [classes], [^classes], . for any character,
// (groups), the repetitions ? * + {m} {m,} {m,n}, | between alternatives, # comments, and control tokens as <text> or
// <[id]>. A rule ends at the end of its line, except inside a group, after ::= or |, and before a line that begins with
// |. The start rule is root.

typedef struct {
    Grammar    *g;
    const char *s;                     // (n) the text
    size_t      n, i;                  // i: the next byte
    int         line;                  // GBNF: the current line; 0: a regular expression
} Reader;

#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
static int reader_fail(Reader *r, const char *fmt, ...) {
    char what[200];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(what, sizeof what, fmt, ap);
    va_end(ap);
    for (char *c = what; *c; c++) if ((unsigned char)*c < 0x20) *c = '?';
    if (r->line) return grammar_fail(r->g, "grammar: line %d: %s", r->line, what);
    return grammar_fail(r->g, "byte %zu: %s", r->i, what);
}

static int peek(const Reader *r) { return r->i < r->n ? (unsigned char)r->s[r->i] : -1; }

static bool take_word(Reader *r, const char *word) {
    const size_t n = strlen(word);
    if (r->n - r->i < n || memcmp(r->s + r->i, word, n) != 0) return false;
    r->i += n;
    return true;
}

static void skip_blanks(Reader *r, bool lines) {
    for (int c; (c = peek(r)) == ' ' || c == '\t' || c == '#' || (lines && (c == '\n' || c == '\r')); ) {
        if (c == '#') while (peek(r) >= 0 && peek(r) != '\n') r->i++;
        else r->i++;
        if (c == '\n') r->line++;
    }
}

static TokStr read_name(Reader *r) {
    const size_t from = r->i;
    for (;;) {
        const int c = peek(r);
        const bool in_name = (unsigned)(c | 32) - 'a' < 26 || (unsigned)c - '0' < 10 || c == '-' || c == '_';
        if (c < 0 || !in_name) break;
        r->i++;
    }
    return (TokStr){ r->s + from, r->i - from };
}

static uint32_t read_hex(Reader *r, int digits) {
    uint32_t x = 0;
    for (int i = 0; i < digits; i++, r->i++) {
        const int d = peek(r) < 0 ? -1 : tok_hex_digit((unsigned char)peek(r));
        if (d < 0) return (uint32_t)reader_fail(r, "expected %d hexadecimal digits", digits);
        x = x << 4 | (uint32_t)d;
    }
    if (x > LAST_CHAR || (x >= 0xD800 && x < 0xE000)) reader_fail(r, "expected a character, got U+%04X", (unsigned)x);
    return x;
}

static uint32_t read_char(Reader *r) {                 // check_text() has checked that the text is UTF-8
    uint32_t c = 0;
    r->i += (size_t)tok_read_utf8((const unsigned char *)r->s + r->i, r->n - r->i, &c);
    return c;
}

// A character or an escape sequence.
static uint32_t read_escaped(Reader *r) {
    if (peek(r) != '\\') return read_char(r);
    r->i++;
    const int c = peek(r);
    if (c >= 0) r->i++;
    switch (c) {
    case 'n': return '\n';
    case 'r': return '\r';
    case 't': return '\t';
    case '\\': case '"': case '[': case ']': case '-': return (uint32_t)c;
    case 'x': return read_hex(r, 2);
    case 'u': return read_hex(r, 4);
    case 'U': return read_hex(r, 8);
    }
    return (uint32_t)reader_fail(r, "expected one of \\n \\r \\t \\\\ \\\" \\[ \\] \\- \\x \\u \\U after a backslash");
}

static int read_literal(Reader *r) {
    char out[4];
    const size_t from = r->g->text.n;
    for (r->i++; peek(r) != '"' && !r->g->failed; ) {
        if (peek(r) < 0 || peek(r) == '\n') return reader_fail(r, "expected a '\"' at the end of a literal");
        keep_text(r->g, out, gguf_utf8(read_escaped(r), out));
    }
    r->i++;
    return new_expr(r->g, EXPR_TEXT, (int)from, 0, (int)(r->g->text.n - from));
}

static int read_set(Reader *r) {
    Chars c = { .n = 0 };
    r->i++;
    const bool inverted = take_word(r, "^");
    while (peek(r) != ']' && !r->g->failed) {
        if (peek(r) < 0 || peek(r) == '\n') return reader_fail(r, "expected a ']' at the end of a set");
        const uint32_t lo = read_escaped(r);
        uint32_t hi = lo;
        if (peek(r) == '-' && r->i + 1 < r->n && r->s[r->i + 1] != ']') {
            r->i++;
            hi = read_escaped(r);
            if (hi < lo)
                return reader_fail(r, "expected an ascending range, got U+%04X to U+%04X", (unsigned)lo, (unsigned)hi);
        }
        add_chars(&c, lo, hi);
    }
    r->i++;
    if (inverted) invert_chars(&c);
    return expr_chars(r->g, &c);
}

static int expr_any_char(Grammar *g) { return expr_chars(g, &(Chars){ .s = { { 0, LAST_CHAR } }, .n = 1 }); }

static int read_token(Reader *r) {                     // <text> or <[id]>
    const Tokenizer *t = r->g->t;
    const size_t from = r->i;
    int id = 0;
    while (peek(r) >= 0 && peek(r) != '>' && peek(r) != '\n') r->i++;
    if (!take_word(r, ">")) return reader_fail(r, "expected a '>' at the end of a token");
    const TokStr text = { r->s + from, r->i - from };
    if (text.n > 4 && text.s[1] == '[' && text.s[text.n - 2] == ']') {
        for (size_t i = 2; i < text.n - 2 && id >= 0; i++)
            id = text.s[i] >= '0' && text.s[i] <= '9' && id < 1 << 26 ? id * 10 + (text.s[i] - '0') : -1;
    } else {
        for (id = t->n_tokens - 1; id >= 0; id--) {
            const TokStr piece = tok_piece(t, id, true);
            if (t->kind[id] == TOK_KIND_HIDDEN && piece.n == text.n && memcmp(piece.s, text.s, text.n) == 0) break;
        }
    }
    if (id < 0 || id >= t->n_tokens || t->kind[id] != TOK_KIND_HIDDEN)
        return reader_fail(r, "expected a control token, got %.*s", (int)(text.n < 40 ? text.n : 40), text.s);
    return expr_token(r->g, id);
}

static int find_rule(Grammar *g, TokStr name) {        // adds the rule, not defined yet, if there is none
    unsigned bucket = 0;
    for (size_t i = 0; i < name.n; i++) bucket = bucket * 31 + (unsigned char)name.s[i];
    int32_t *head = &g->buckets[(bucket ^ bucket >> 8) % 256];
    for (int i = *head; i; i = g->rules[i].link)
        if (g->rules[i].name.n == name.n && memcmp(g->rules[i].name.s, name.s, name.n) == 0) return i;
    const int i = new_rule(g);
    if (!i) return 0;
    g->rules[i].name = name;
    g->rules[i].link = *head;
    *head = i;
    return i;
}

static int read_number(Reader *r) {                    // -1: no digit
    int n = -1;
    for (int c; (c = peek(r)) >= '0' && c <= '9'; r->i++) {
        n = (n < 0 ? 0 : n * 10) + (c - '0');
        if (n > GRAMMAR_COUNT) return reader_fail(r, "expected at most %d repetitions", GRAMMAR_COUNT);
    }
    return n;
}

// Reads one of ? * + {m} {m,} {m,n}. False: there is none.
static bool read_repeat(Reader *r, int *min, int *max) {
    *min = 0;
    *max = -1;
    if (take_word(r, "*")) return true;
    *max = take_word(r, "?") ? 1 : -1;
    *min = *max < 0 && take_word(r, "+");
    if (*max == 1 || *min == 1) return true;
    if (!take_word(r, "{")) return false;
    if ((*min = read_number(r)) < 0) return reader_fail(r, "expected {m}, {m,} or {m,n}");
    *max = take_word(r, ",") ? read_number(r) : *min;
    if (!take_word(r, "}")) return reader_fail(r, "expected {m}, {m,} or {m,n}");
    if (*max >= 0 && *max < *min) return reader_fail(r, "expected {m,n} with m <= n, got {%d,%d}", *min, *max);
    return true;
}

// Applies the repetitions that follow an item to it.
static int read_repeats(Reader *r, int item, bool lines) {
    int min, max;
    skip_blanks(r, lines);
    for (int k = 0; read_repeat(r, &min, &max); k++) {
        if (k == 4) return reader_fail(r, "expected at most 4 repetition operators in a row");
        item = expr_repeat(r->g, item, min, max);
        skip_blanks(r, lines);
    }
    return item;
}

static int read_alternatives(Reader *r, int depth);

static int read_sequence(Reader *r, int depth) {
    Grammar *g = r->g;
    const int seq = new_expr(g, EXPR_SEQ, 0, 0, 0);
    while (!g->failed) {
        int item = 0;
        skip_blanks(r, depth > 0);
        const int c = peek(r);
        if (c == '"') item = read_literal(r);
        else if (c == '[') item = read_set(r);
        else if (c == '<') item = read_token(r);
        else if (take_word(r, ".")) item = expr_any_char(g);
        else if (take_word(r, "(")) {
            if (depth == GRAMMAR_NESTING)
                return reader_fail(r, "expected at most %d nested groups", GRAMMAR_NESTING);
            item = read_alternatives(r, depth + 1);
            if (!take_word(r, ")")) return reader_fail(r, "expected a ')'");
        } else {
            const int line = r->line;
            const TokStr name = read_name(r);
            if (!name.n) break;
            const int rule = find_rule(g, name);
            if (rule && !g->rules[rule].expr && !g->rules[rule].line) g->rules[rule].line = line;
            item = expr_call(g, rule);
        }
        add_expr(g, seq, read_repeats(r, item, depth > 0));
    }
    return seq;
}

static int read_alternatives(Reader *r, int depth) {
    const int alt = new_expr(r->g, EXPR_ALT, 0, 0, 0);
    for (;;) {
        add_expr(r->g, alt, read_sequence(r, depth));
        Reader ahead = *r;
        skip_blanks(&ahead, true);
        if (r->g->failed || !take_word(&ahead, "|")) return alt;
        *r = ahead;
        skip_blanks(r, true);
    }
}

// Checks a text from outside: valid UTF-8, not too long.
static bool check_text(Grammar *g, const char *what, const char *s, size_t n) {
    uint32_t c;
    if (n > GRAMMAR_SOURCE) return grammar_fail(g, "%s: expected at most %d bytes, got %zu", what, GRAMMAR_SOURCE, n);
    for (size_t i = 0; i < n; ) {
        const int len = tok_read_utf8((const unsigned char *)s + i, n - i, &c);
        if (len <= 0) return grammar_fail(g, "%s: byte %zu: expected UTF-8", what, i);
        i += (size_t)len;
    }
    return !g->failed;
}

static void read_gbnf(Grammar *g, const char *text, size_t n) {
    Reader r = { .g = g, .s = text, .n = n, .line = 1 };
    for (skip_blanks(&r, true); r.i < n && !g->failed; skip_blanks(&r, true)) {
        const int line = r.line;
        const TokStr name = read_name(&r);
        if (!name.n) reader_fail(&r, "expected the name of a rule");
        skip_blanks(&r, false);
        if (!take_word(&r, "::=")) reader_fail(&r, "expected '::=' after the name of a rule");
        skip_blanks(&r, true);
        const int rule = find_rule(g, name);
        if (g->rules[rule].expr)
            reader_fail(&r, "the rule '%.*s' is defined twice", (int)(name.n < 60 ? name.n : 60), name.s);
        if (g->failed) return;
        const int expr = read_alternatives(&r, 0);
        g->rules[rule].expr = expr;
        g->rules[rule].line = line;
        if (!g->failed && r.i < n && peek(&r) != '\n' && peek(&r) != '\r')
            reader_fail(&r, "expected the rest of a rule, got '%c'", peek(&r) < 0x7F ? peek(&r) : '?');
    }
    for (int i = 1; i < g->n_rules && !g->failed; i++) {
        const Rule *x = &g->rules[i];
        const int len = (int)(x->name.n < 60 ? x->name.n : 60);
        if (!x->expr) grammar_fail(g, "grammar: line %d: undefined rule '%.*s'", x->line, len, x->name.s);
    }
}

// ==== [5] Checks and programs =======================================================================================

// Computes productive and nullable of an expression from its items. True: something changed. Adds the number of visited
// expressions to *work.
static bool analyse_expr(Grammar *g, int e, int64_t *work) {
    Expr *x = &g->exprs[e];
    bool productive = true, nullable = x->kind == EXPR_TEXT && x->max == 0, changed = false;
    ++*work;
    if (x->kind == EXPR_SEQ || x->kind == EXPR_ALT) {
        const bool all = x->kind == EXPR_SEQ;
        productive = nullable = all;
        for (int i = x->a; i; i = g->exprs[i].prev) {
            changed |= analyse_expr(g, i, work);
            const Expr *item = &g->exprs[i];
            productive = all ? productive && item->productive : productive || item->productive;
            nullable = all ? nullable && item->nullable : nullable || item->nullable;
        }
    } else if (x->kind == EXPR_REPEAT) {
        changed = analyse_expr(g, x->a, work);
        productive = x->min == 0 || g->exprs[x->a].productive;
        nullable = x->min == 0 || g->exprs[x->a].nullable;
    } else if (x->kind == EXPR_MACHINE) {
        const Edge *edges = g->edges + x->a;
        for (int i = 0; i < x->max; i++) {
            changed |= analyse_expr(g, edges[i].expr, work);
            nullable |= edges[i].from == 0 && edges[i].to < 0 && edges[i].min == 0;
        }
    } else if (x->kind == EXPR_CALL) {
        productive = g->exprs[g->rules[x->a].expr].productive;
        nullable = g->exprs[g->rules[x->a].expr].nullable;
    }
    changed |= productive != x->productive || nullable != x->nullable;
    x->productive = productive;
    x->nullable = nullable;
    return changed;
}

static void analyse_rules(Grammar *g) {                // repeats until nothing changes
    int64_t work = 0;
    for (bool changed = true; changed && !g->failed; ) {
        changed = false;
        for (int r = g->n_rules - 1; r > 0; r--) changed |= analyse_expr(g, g->rules[r].expr, &work);
        if (work > 1 << 26) grammar_fail(g, "grammar: too complex: the rules refer to each other too often");
    }
}

static int new_code(Grammar *g, OpCode op, int next, int arg, int loop) {
    if (!g->failed && g->n_code == GRAMMAR_CODE) grammar_fail(g, "grammar: expected at most %d steps", GRAMMAR_CODE);
    if (!g->failed) RESERVE(code, g->n_code);
    if (g->failed) return 0;
    g->code[g->n_code] = (Code){ .op = (uint8_t)op, .next = next, .arg = arg, .loop = loop };
    return g->n_code++;
}

static int compile(Grammar *g, int e, int next, int loop);

// Compiles {m,n}. A frame has one count, so a counted repetition inside another one becomes a rule, with its own frame.
static int compile_count(Grammar *g, int e, int next, int loop) {
    const Expr x = g->exprs[e];
    const bool empty = g->exprs[x.a].nullable;
    if (empty && (x.min > 256 || x.max > 256))
        return grammar_fail(g, "grammar: expected at most 256 repetitions of what may be empty");
    if (loop >= 0) {
        const int rule = rule_of(g, e);
        return new_code(g, OP_CALL, next, rule, loop);
    }
    const int at = new_code(g, OP_LOOP, next, 0, -1), step = new_code(g, OP_STEP, at, 0, at);
    const int body = compile(g, x.a, step, at);
    if (g->failed) return 0;
    g->code[at].loop = at;
    g->code[at].arg = body;
    g->code[at].min = x.min;
    g->code[at].max = x.max;
    g->code[at].empty = empty;
    g->code[step].max = x.max < 0 ? x.min : -1;
    return new_code(g, OP_COUNT, at, 0, -1);
}

// Compiles an automaton; it must be the whole rule, since it has the count of the frame. Each state becomes an IF that
// always holds, followed by a choice of its edges. The IF before them is never executed: it has the bounds of all edges
// for canonical_count(); min is the largest lower bound, arg the smallest except 0, max the smallest upper bound.
static int compile_machine(Grammar *g, int e, int next) {
    const Expr x = g->exprs[e];
    int low = 0, least = 0, high = -1;
    for (int i = 0; i < x.max; i++) {
        const Edge k = g->edges[x.a + i];
        if (k.min > low) low = k.min;
        if (k.min && (!least || k.min < least)) least = k.min;
        if (k.max >= 0 && (high < 0 || k.max < high)) high = k.max;
    }
    const bool counts = low > 0 || high >= 0;
    const int bounds = new_code(g, OP_IF, 0, least, -1), loop = counts ? bounds : -1, first = bounds + 1;
    for (int q = 0; q < x.min; q++) new_code(g, OP_IF, -1, 0, loop);
    if (g->failed) return 0;
    g->code[bounds].min = low;
    g->code[bounds].max = high;
    for (int q = 0; q < x.min; q++) g->code[first + q].max = -1;
    for (int i = 0; i < x.max && !g->failed; i++) {
        const Edge k = g->edges[x.a + i];
        int at = k.to < 0 ? next : first + k.to;
        if (counts && k.to >= 0) {
            at = new_code(g, OP_STEP, at, 0, loop);
            g->code[at].max = high < 0 ? low : -1;
        }
        if (k.to >= 0) at = compile(g, k.expr, at, loop);
        if (k.min > 0 || k.max >= 0) {
            at = new_code(g, OP_IF, at, 0, loop);
            g->code[at].min = k.min;
            g->code[at].max = k.max;
        }
        const int others = g->code[first + k.from].next;
        g->code[first + k.from].next = others >= 0 ? new_code(g, OP_SPLIT, at, others, loop) : at;
    }
    return first;
}

// Compiles a productive expression that is followed by the instruction `next`. Returns its first instruction.
static int compile(Grammar *g, int e, int next, int loop) {
    const Expr x = g->exprs[e];
    if (g->failed) return 0;
    switch ((ExprKind)x.kind) {
    case EXPR_TEXT:
        for (int i = x.max - 1; i >= 0; i--)
            next = new_code(g, OP_BYTE, next, (unsigned char)g->text.s[x.a + i], loop);
        return next;
    case EXPR_SET: return new_code(g, OP_SET, next, x.a, loop);
    case EXPR_TOKEN: return new_code(g, OP_TOKEN, next, x.a, loop);
    case EXPR_CALL: return new_code(g, OP_CALL, next, x.a, loop);
    case EXPR_MACHINE: return compile_machine(g, e, next);
    case EXPR_SEQ:
        for (int i = x.a; i; i = g->exprs[i].prev) next = compile(g, i, next, loop);
        return next;
    case EXPR_ALT: {
        int first = -1;
        for (int i = x.a; i; i = g->exprs[i].prev) {
            if (!g->exprs[i].productive) continue;
            const int one = compile(g, i, next, loop);
            first = first < 0 ? one : new_code(g, OP_SPLIT, one, first, loop);
        }
        return first;
    }
    case EXPR_REPEAT: break;
    }
    if (x.max == 0 || !g->exprs[x.a].productive) return next;
    if (x.min == 1 && x.max == 1) return compile(g, x.a, next, loop);
    if (x.min == 0 && x.max == 1) {
        const int one = compile(g, x.a, next, loop);
        return new_code(g, OP_SPLIT, one, next, loop);
    }
    if (x.min > 1 || x.max > 1) return compile_count(g, e, next, loop);
    const int split = new_code(g, OP_SPLIT, 0, next, loop), body = compile(g, x.a, split, loop);
    if (!g->failed) g->code[split].next = body;
    return x.min ? body : split;
}

// Adds the rules that a rule may call before it has matched a byte or token to a list.
static void add_left_calls(Grammar *g, int rule, int32_t *todo, uint8_t *seen, int32_t *list, int *n) {
    int n_todo = 0;
    todo[n_todo++] = g->rules[rule].entry;
    while (n_todo) {
        const int pc = todo[--n_todo];
        const Code c = g->code[pc];
        if (seen[pc] || c.op == OP_END) continue;
        seen[pc] = 1;
        if (c.op == OP_CALL) list[(*n)++] = c.arg;
        if (c.op == OP_SPLIT || c.op == OP_COUNT || c.op == OP_IF ||
            (c.op == OP_CALL && g->exprs[g->rules[c.arg].expr].nullable) ||
            (c.op == OP_LOOP && (c.min == 0 || c.empty))) todo[n_todo++] = c.next;
        if (c.op == OP_SPLIT || c.op == OP_LOOP) todo[n_todo++] = c.arg;
    }
}

// Fails if a rule can call itself before it has matched a byte or token. Depth-first search over the left calls.
static void refuse_left_recursion(Grammar *g) {
    const size_t n_code = (size_t)g->n_code + 1, n_rules = (size_t)g->n_rules + 1;
    int32_t *todo = malloc(2 * n_code * sizeof *todo), *calls = malloc(n_code * sizeof *calls);
    int32_t *from = calloc(n_rules, sizeof *from), *path = malloc(n_rules * sizeof *path);
    int32_t *at = malloc(n_rules * sizeof *at);
    uint8_t *seen = calloc(n_code, 1), *state = calloc(n_rules, 1);    // of a rule: 1: on the path, 2: finished
    int n_calls = 0;
    if (!todo || !calls || !from || !path || !at || !seen || !state) grammar_fail(g, "grammar: out of memory");
    for (int r = 1; r < g->n_rules && !g->failed; r++) {
        from[r] = n_calls;
        if (g->rules[r].entry) add_left_calls(g, r, todo, seen, calls, &n_calls);
        from[r + 1] = n_calls;
    }
    for (int r = 1; r < g->n_rules && !g->failed; r++) {
        int depth = 0;
        if (state[r]) continue;
        path[0] = r;
        at[0] = from[r];
        state[r] = 1;
        while (depth >= 0 && !g->failed) {
            const int rule = path[depth];
            if (at[depth] == from[rule + 1]) {
                state[rule] = 2;
                depth--;
                continue;
            }
            const int next = calls[at[depth]++];
            const Rule *x = &g->rules[next];
            if (state[next] == 1 && x->name.n)
                grammar_fail(g, "grammar: line %d: the rule '%.*s' begins with itself (left recursion)", x->line,
                             (int)(x->name.n < 60 ? x->name.n : 60), x->name.s);
            else if (state[next] == 1) grammar_fail(g, "schema: it refers only to itself");
            if (state[next]) continue;
            depth++;
            path[depth] = next;
            at[depth] = from[next];
            state[next] = 1;
        }
    }
    free(todo);
    free(calls);
    free(from);
    free(path);
    free(at);
    free(seen);
    free(state);
}

// Divides the bytes into classes: two bytes are in one class if every set and every literal treats them alike.
static void find_classes(Grammar *g) {
    bool single[256] = { false };
    g->n_classes = 1;
    for (int i = 0; i < g->n_code; i++) if (g->code[i].op == OP_BYTE) single[g->code[i].arg] = true;
    for (int k = 0; k < g->n_sets + 256; k++) {
        int number[2][256], n = 0;                     // new class: by old class, of bytes outside and inside the set
        if (k >= g->n_sets && !single[k - g->n_sets]) continue;
        memset(number, 0xFF, sizeof number);
        for (int b = 0; b < 256; b++) {
            int *c = &number[k < g->n_sets ? has_byte(&g->sets[k], (unsigned)b) : b == k - g->n_sets][g->class_of[b]];
            if (*c < 0) *c = n++;
            g->class_of[b] = (uint8_t)*c;
        }
        g->n_classes = n;
    }
    for (int b = 255; b >= 0; b--) g->byte_of[g->class_of[b]] = (uint8_t)b;
    g->n_symbols = g->n_classes + g->n_named;
}

static void reset_stacks(Grammar *g);

// Compiles the rules. The answer is `root`, optionally after a thought. False: err says why.
static bool grammar_ready(Grammar *g, int root) {
    const Tokenizer *t = g->t;
    g->start[START_ANSWER] = g->start[START_MAY_THINK] = g->start[START_THINKING] = rule_of(g, root);
    if (t->channel_open >= 0 && t->channel_close >= 0) {
        const int answer = g->start[START_ANSWER];
        const int any_text = expr_repeat(g, expr_range(g, 0, 255), 0, -1);
        const int thought = rule_of(g, SEQ(any_text, expr_token(g, t->channel_close), expr_call(g, answer)));
        g->start[START_THINKING] = thought;
        g->start[START_MAY_THINK] =
            rule_of(g, ALT(expr_call(g, answer), SEQ(expr_token(g, t->channel_open), expr_call(g, thought))));
    }
    if (!g->failed) analyse_rules(g);
    if (!g->failed && !g->exprs[root].productive) grammar_fail(g, "grammar: no text matches it");
    new_code(g, OP_END, 0, 0, -1);
    for (int r = 1; r < g->n_rules && !g->failed; r++) {
        if (!g->exprs[g->rules[r].expr].productive) continue;
        const int entry = compile(g, g->rules[r].expr, 0, -1);
        if (!g->failed) g->rules[r].entry = entry;
    }
    if (!g->failed) refuse_left_recursion(g);
    if (!g->failed) find_classes(g);
    if (!g->failed) reset_stacks(g);
    return !g->failed;
}

// The functions grammar_from_* return false on failure, with g->err set; call grammar_free in any case. The texts are
// not needed after the call.
static bool grammar_from_gbnf(Grammar *g, const GrammarVocab *v, TokStr text) {
    grammar_init(g, v);
    if (check_text(g, "grammar", text.s, text.n)) read_gbnf(g, text.s, text.n);
    const int root = g->failed ? 0 : find_rule(g, (TokStr){ "root", 4 });
    if (!g->failed && !g->rules[root].expr) grammar_fail(g, "grammar: undefined rule 'root'");
    return !g->failed && grammar_ready(g, expr_call(g, root));
}

// ==== [6] Stacks and sets ===========================================================================================

enum { MAX_VISITED = 8 * GRAMMAR_STACKS };

static size_t grammar_bytes(const Grammar *g) {
    return (size_t)g->n_stacks * sizeof *g->stacks + (size_t)g->n_stack_sets * sizeof *g->stack_sets +
           ((size_t)g->n_ids + (size_t)g->n_rows) * sizeof(int32_t);
}

static bool may_grow(Grammar *g) {
    if (grammar_bytes(g) > GRAMMAR_MEMORY || --g->work < 0)
        grammar_fail(g, "grammar: too ambiguous: the text can be parsed in too many ways");
    return !g->failed;
}

// Returns a larger, empty hash table if n numbers are too many for `old`, which it frees; otherwise `old`.
static int32_t *grow_slots(Grammar *g, int32_t *old, int *slots, int n) {
    if (2 * n < *slots) return old;
    const int more = *slots ? 4 * *slots : 256;
    int32_t *s = calloc((size_t)more, sizeof *s);
    if (!s) {
        grammar_fail(g, "grammar: out of memory");
        return old;
    }
    free(old);
    *slots = more;
    return s;
}

static uint32_t mix_hash(uint32_t h, uint32_t x) {
    h = (h ^ x) * 0x9E3779B1u;
    return h ^ h >> 15;
}

static uint32_t stack_slot(const Grammar *g, int pc, int count, int parent) {     // slot of this stack, or a free one
    const uint32_t mask = (uint32_t)g->n_stack_slots - 1;
    uint32_t i = mix_hash(mix_hash(mix_hash(1, (uint32_t)pc), (uint32_t)count), (uint32_t)parent);
    for (;; i++) {
        const int s = g->stack_slots[i & mask];
        const Stack *k = &g->stacks[s];
        if (!s || (k->pc == pc && k->count == count && k->parent == parent)) return i & mask;
    }
}

static int intern_stack(Grammar *g, int pc, int count, int parent) {
    uint32_t slot = stack_slot(g, pc, count, parent);
    if (g->stack_slots[slot]) return g->stack_slots[slot];
    const int old = g->n_stack_slots;
    if (may_grow(g)) RESERVE(stacks, g->n_stacks);
    if (!g->failed) g->stack_slots = grow_slots(g, g->stack_slots, &g->n_stack_slots, g->n_stacks);
    if (g->failed) return 0;
    for (int s = 1; g->n_stack_slots != old && s < g->n_stacks; s++)
        g->stack_slots[stack_slot(g, g->stacks[s].pc, g->stacks[s].count, g->stacks[s].parent)] = s;
    g->stacks[g->n_stacks] = (Stack){ pc, count, parent, parent ? g->stacks[parent].depth + 1 : 1, 0 };
    slot = stack_slot(g, pc, count, parent);
    return g->stack_slots[slot] = g->n_stacks++;
}

// The number of a stack, after executing the instructions that need no decision: END returns, STEP counts.
static int normal_stack(Grammar *g, int pc, int count, int parent) {
    while (g->code[pc].op == OP_END) {
        if (!parent) return 0;
        const Stack *p = &g->stacks[parent];
        pc = p->pc;
        count = p->count;
        parent = p->parent;
    }
    if (g->code[pc].op != OP_STEP) return intern_stack(g, pc, count, parent);
    const Code *step = &g->code[pc];
    return intern_stack(g, step->next, step->max >= 0 && count >= step->max ? step->max : count + 1, parent);
}

typedef struct { int32_t s[MAX_VISITED]; int n; } Visited;

static void visit_stack(Grammar *g, Visited *v, int stack) {
    if (g->failed || g->stacks[stack].visit == g->visit) return;
    if (v->n == MAX_VISITED || --g->work < 0) {
        grammar_fail(g, "grammar: too ambiguous: the text can be parsed in too many ways");
        return;
    }
    g->stacks[stack].visit = g->visit;
    v->s[v->n++] = stack;
}

// The closure of a set: visits every stack that its stacks reach without a symbol. Those that wait for a symbol become
// the set's items.
static void close_set(Grammar *g, int set, Visited *v) {
    g->visit++;
    v->n = 0;
    for (int i = 0; i < g->stack_sets[set].n_kernel; i++) visit_stack(g, v, g->ids[g->stack_sets[set].kernel + i]);
    g->stack_sets[set].items = g->n_ids;
    for (int i = 0; i < v->n && !g->failed; i++) {
        if (!v->s[i]) {
            g->stack_sets[set].complete = true;
            continue;
        }
        const Stack s = g->stacks[v->s[i]];
        const Code c = g->code[s.pc];
        switch ((OpCode)c.op) {
        case OP_BYTE: case OP_SET: case OP_TOKEN:
            RESERVE(ids, g->n_ids);
            if (g->failed) break;
            g->ids[g->n_ids++] = v->s[i];
            g->stack_sets[set].n_items++;
            break;
        case OP_SPLIT:
            visit_stack(g, v, normal_stack(g, c.next, s.count, s.parent));
            visit_stack(g, v, normal_stack(g, c.arg, s.count, s.parent));
            break;
        case OP_CALL: {
            const int entry = g->rules[c.arg].entry;
            const bool last = g->code[c.next].op == OP_END;            // a tail call needs no frame
            if (!g->exprs[g->rules[c.arg].expr].productive) break;
            if (!last && g->stacks[s.parent].depth + 2 > GRAMMAR_DEPTH) break;
            visit_stack(g, v, normal_stack(g, entry, 0, last ? s.parent : intern_stack(g, c.next, s.count, s.parent)));
            break;
        }
        case OP_COUNT: visit_stack(g, v, normal_stack(g, c.next, 0, s.parent)); break;
        case OP_IF:
            if (s.count >= c.min && (c.max < 0 || s.count <= c.max))
                visit_stack(g, v, normal_stack(g, c.next, s.count, s.parent));
            break;
        case OP_LOOP:
            if (c.max < 0 || s.count < c.max) visit_stack(g, v, normal_stack(g, c.arg, s.count, s.parent));
            if (s.count >= c.min) visit_stack(g, v, normal_stack(g, c.next, 0, s.parent));
            break;
        case OP_END: case OP_STEP: break;
        }
    }
}

static uint32_t set_slot(const Grammar *g, const int32_t *kernel, int n) {
    const uint32_t mask = (uint32_t)g->n_set_slots - 1;
    uint32_t i = 1;
    for (int k = 0; k < n; k++) i = mix_hash(i, (uint32_t)kernel[k]);
    for (;; i++) {
        const int s = g->set_slots[i & mask];
        const StackSet *f = &g->stack_sets[s];
        if (!s || (f->n_kernel == n && memcmp(g->ids + f->kernel, kernel, (size_t)n * sizeof *kernel) == 0))
            return i & mask;
    }
}

// The number of the set of these stacks, which are ascending.
static int intern_set(Grammar *g, const int32_t *kernel, int n) {
    Visited v;
    if (!n || g->failed) return 0;
    uint32_t slot = set_slot(g, kernel, n);
    if (g->set_slots[slot]) return g->set_slots[slot];
    const int old = g->n_set_slots, set = g->n_stack_sets;
    if (may_grow(g)) {
        RESERVE(stack_sets, set);
        RESERVE(ids, g->n_ids + n);
    }
    if (!g->failed) g->set_slots = grow_slots(g, g->set_slots, &g->n_set_slots, set);
    if (g->failed) return 0;
    for (int s = 1; g->n_set_slots != old && s < set; s++)
        g->set_slots[set_slot(g, g->ids + g->stack_sets[s].kernel, g->stack_sets[s].n_kernel)] = s;
    g->stack_sets[set] = (StackSet){ .kernel = g->n_ids, .n_kernel = n, .row = -1 };
    memcpy(g->ids + g->n_ids, kernel, (size_t)n * sizeof *kernel);
    g->n_ids += n;
    g->n_stack_sets++;
    g->set_slots[set_slot(g, kernel, n)] = set;
    close_set(g, set, &v);
    return set;
}

static int by_number(const void *a, const void *b) {
    const int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

// The transitions of a set, by symbol: an offset in rows.
static int row_of(Grammar *g, int set) {
    if (g->stack_sets[set].row >= 0) return g->stack_sets[set].row;
    RESERVE(rows, g->n_rows + g->n_symbols);
    if (g->failed) return 0;
    memset(g->rows + g->n_rows, 0xFF, (size_t)g->n_symbols * sizeof *g->rows);
    g->stack_sets[set].row = g->n_rows;
    g->n_rows += g->n_symbols;
    return g->stack_sets[set].row;
}

// The set after a symbol: a class of bytes, or n_classes + the number of a named token.
static int next_set(Grammar *g, int set, int symbol) {
    int32_t kernel[GRAMMAR_STACKS];
    int n = 0, n_unique = 0;
    const int row = row_of(g, set);
    if (g->failed || !set) return 0;
    if (g->rows[row + symbol] >= 0) return g->rows[row + symbol];
    for (int i = 0; i < g->stack_sets[set].n_items && !g->failed; i++) {
        const Stack s = g->stacks[g->ids[g->stack_sets[set].items + i]];
        const Code c = g->code[s.pc];
        const bool fits = symbol >= g->n_classes ? c.op == OP_TOKEN && c.arg == symbol - g->n_classes
                        : c.op == OP_BYTE ? g->class_of[c.arg] == symbol
                        : c.op == OP_SET && has_byte(&g->sets[c.arg], g->byte_of[symbol]);
        if (!fits) continue;
        if (n == GRAMMAR_STACKS) grammar_fail(g, "grammar: too ambiguous: the text can be parsed in too many ways");
        else kernel[n++] = normal_stack(g, c.next, s.count, s.parent);
    }
    qsort(kernel, (size_t)n, sizeof *kernel, by_number);
    for (int i = 0; i < n; i++)
        if (!n_unique || kernel[n_unique - 1] != kernel[i]) kernel[n_unique++] = kernel[i];
    const int next = intern_set(g, kernel, n_unique);
    if (!g->failed) g->rows[row + symbol] = next;
    return next;
}

static void free_stacks(Grammar *g) {
    free(g->stacks);
    free(g->stack_sets);
    free(g->ids);
    free(g->rows);
    free(g->stack_slots);
    free(g->set_slots);
    g->stacks = NULL;
    g->stack_sets = NULL;
    g->ids = g->rows = g->stack_slots = g->set_slots = NULL;
    g->n_stacks = g->n_stack_sets = g->n_ids = g->n_rows = 0;
    g->cap_stacks = g->cap_stack_sets = g->cap_ids = g->cap_rows = 0;
    g->n_stack_slots = g->n_set_slots = 0;
}

static void reset_stacks(Grammar *g) {
    const int32_t nothing_left = 0;
    RESERVE(stacks, 0);
    RESERVE(stack_sets, 0);
    g->stack_slots = grow_slots(g, NULL, &g->n_stack_slots, 1);
    g->set_slots = grow_slots(g, NULL, &g->n_set_slots, 1);
    if (g->failed) return;
    g->work = GRAMMAR_WORK;
    g->stacks[g->n_stacks++] = (Stack){ 0 };
    g->stack_sets[g->n_stack_sets++] = (StackSet){ .row = -1 };
    intern_set(g, &nothing_left, 1);
}

// Copies a set, its stacks and the stacks below them from the grammar as it was before a reset.
static int copy_set(Grammar *g, const Grammar *before, int set) {
    int32_t kernel[GRAMMAR_STACKS], path[GRAMMAR_DEPTH + 1];
    const StackSet *f = &before->stack_sets[set];
    g->work = GRAMMAR_WORK;
    if (!set) return 0;
    for (int i = 0; i < f->n_kernel; i++) {
        int n = 0, stack = 0;
        for (int s = before->ids[f->kernel + i]; s; s = before->stacks[s].parent) path[n++] = s;
        while (n--) stack = intern_stack(g, before->stacks[path[n]].pc, before->stacks[path[n]].count, stack);
        kernel[i] = stack;
    }
    qsort(kernel, (size_t)f->n_kernel, sizeof *kernel, by_number);
    const int moved = intern_set(g, kernel, f->n_kernel);
    if (!g->failed) g->stack_sets[moved].large = f->large;
    return moved;
}

// Frees all stacks and sets except these states, which get new numbers, and the sets of cached walks.
static void rebuild_states(Grammar *g, GrammarState *states, int n) {
    Grammar before = *g;
    g->stacks = NULL;
    g->stack_sets = NULL;
    g->ids = g->rows = g->stack_slots = g->set_slots = NULL;
    free_stacks(g);
    reset_stacks(g);
    for (int i = 0; i < n && !g->failed; i++) states[i] = copy_set(g, &before, states[i]);
    for (int i = 0; i < g->n_walks && !g->failed; i++) g->walks[i].set = copy_set(g, &before, g->walks[i].set);
    free_stacks(&before);
}

// Says that only these states are still in use. Frees the others if they take much memory; then states get new numbers.
static void grammar_keep_states(Grammar *g, GrammarState *states, int n) {
    if (!g->failed && grammar_bytes(g) > GRAMMAR_MEMORY / 8) rebuild_states(g, states, n);
}

// After a failure: makes the grammar usable again. Only these states stay valid; they get new numbers.
static void grammar_recover(Grammar *g, GrammarState *states, int n) {
    g->failed = false;
    rebuild_states(g, states, n);
}

static GrammarState grammar_start(Grammar *g, GrammarStart how) {
    const Rule *r = &g->rules[g->start[how]];
    if (g->failed && g->stack_sets) grammar_recover(g, NULL, 0);       // an earlier answer failed
    g->work = GRAMMAR_WORK;
    const int32_t stack = g->failed ? 0 : normal_stack(g, r->entry, 0, 0);
    return intern_set(g, &stack, 1);
}

// Advances the state by a token. False, and the state is 0: the token is not allowed here, or a failure, which err
// explains.
static bool grammar_advance(Grammar *g, GrammarState *s, int32_t id) {
    int set = *s;
    g->work = GRAMMAR_WORK;
    *s = 0;
    if (g->failed || id < 0 || id >= g->t->n_tokens) return false;
    if (tok_is_stop(g->t, id)) {
        if (g->stack_sets[set].complete) *s = 1;
        return *s != 0;
    }
    for (int k = 0; k < g->n_named; k++)
        if (g->named[k] == id) return (*s = next_set(g, set, g->n_classes + k)) != 0;
    const TokStr piece = tok_piece(g->t, id, false);
    if (!piece.n || piece.n >= TOKEN_BYTES) return false;
    for (size_t i = 0; i < piece.n && set; i++) set = next_set(g, set, g->class_of[(unsigned char)piece.s[i]]);
    *s = g->failed ? 0 : set;
    return *s != 0;
}

// The symbol that must follow: a byte, or 256 + the number of a named token. -1: there is a choice, or the text may
// end. A space counts as forced if it is one of few possible bytes, as between a key and its value in JSON.
static int grammar_forced(const Grammar *g, GrammarState s) {
    enum { FEW = 32 };
    const StackSet *f = &g->stack_sets[s];
    ByteSet may = { { 0 } };
    int named = -1, n = 0, byte = -1;
    if (g->failed || f->complete) return -1;
    for (int i = 0; i < f->n_items; i++) {
        const Code c = g->code[g->stacks[g->ids[f->items + i]].pc];
        if (c.op == OP_BYTE) may.w[c.arg / 64] |= (uint64_t)1 << c.arg % 64;
        for (int k = 0; c.op == OP_SET && k < 4; k++) may.w[k] |= g->sets[c.arg].w[k];
        if (c.op == OP_TOKEN && named >= 0 && named != c.arg) return -1;
        if (c.op == OP_TOKEN) named = c.arg;
    }
    for (int b = 0; b < 256; b++) {
        if (!has_byte(&may, (unsigned)b)) continue;
        byte = b;
        n++;
    }
    if (named >= 0) return n ? -1 : 256 + named;
    return n == 1 ? byte : n > 1 && n <= FEW && has_byte(&may, ' ') ? ' ' : -1;
}

static GrammarState grammar_after_forced(Grammar *g, GrammarState s, int forced) {     // forced: from grammar_forced()
    g->work = GRAMMAR_WORK;
    return next_set(g, s, forced < 256 ? g->class_of[forced] : g->n_classes + forced - 256);
}

// ==== [7] Vocabulary, masks =========================================================================================

typedef struct { uint64_t head; const uint8_t *s; uint32_t n; int32_t id; } TokenBytes;   // head: first 8 bytes of s

static int by_bytes(const void *a, const void *b) {
    const TokenBytes *x = a, *y = b;
    if (x->head != y->head) return x->head < y->head ? -1 : 1;
    const int c = memcmp(x->s, y->s, x->n < y->n ? x->n : y->n);
    return c ? c : x->n != y->n ? x->n < y->n ? -1 : 1 : (x->id > y->id) - (x->id < y->id);
}

// Builds the tree of sorted tokens. v->byte NULL: only counts the nodes. Returns their number.
static int add_nodes(GrammarVocab *v, const TokenBytes *tokens, int n) {
    int open[TOKEN_BYTES] = { 0 }, n_nodes = 1, n_open = 0;            // open: the path from the root to the last token
    if (v->byte) v->first[0] = 0;
    for (int i = 0; i < n; i++) {
        uint32_t same = 0;
        while (i && same < tokens[i].n && same < tokens[i - 1].n && tokens[i].s[same] == tokens[i - 1].s[same]) same++;
        for (; n_open > (int)same; n_open--)
            if (v->byte) v->skip[open[n_open]] = (uint32_t)n_nodes;
        while (n_open < (int)tokens[i].n) {
            if (v->byte) {
                v->byte[n_nodes] = tokens[i].s[n_open];
                v->depth[n_nodes] = (uint8_t)(n_open + 1);
                v->first[n_nodes] = (uint32_t)i;
            }
            open[++n_open] = n_nodes++;
        }
        if (v->byte) v->order[i] = tokens[i].id;
    }
    for (; v->byte && n_open >= 0; n_open--) v->skip[open[n_open]] = (uint32_t)n_nodes;
    if (v->byte) v->first[n_nodes] = (uint32_t)n;
    return n_nodes;
}

static void grammar_vocab_free(GrammarVocab *v) {
    free(v->byte);
    free(v->depth);
    free(v->skip);
    free(v->first);
    free(v->order);
    *v = (GrammarVocab){ 0 };
}

// Builds the tree of all tokens that are text. It is read-only afterwards; the tokenizer must outlive it. False: out of
// memory.
static bool grammar_vocab_init(GrammarVocab *v, const Tokenizer *t) {
    TokenBytes *tokens = malloc(((size_t)t->n_tokens + 1) * sizeof *tokens);
    int n = 0;
    *v = (GrammarVocab){ .t = t };
    if (!tokens) return false;
    for (int32_t id = 0; id < t->n_tokens; id++) {
        const TokStr piece = tok_piece(t, id, false);
        if (!piece.n || piece.n >= TOKEN_BYTES || tok_is_stop(t, id)) continue;
        TokenBytes x = { 0, (const uint8_t *)piece.s, (uint32_t)piece.n, id };
        for (uint32_t i = 0; i < 8; i++) x.head = x.head << 8 | (i < x.n ? x.s[i] : 0);
        tokens[n++] = x;
        if ((int)x.n > v->longest) v->longest = (int)x.n;
    }
    qsort(tokens, (size_t)n, sizeof *tokens, by_bytes);
    v->n_nodes = add_nodes(v, tokens, n);
    const size_t nodes = (size_t)v->n_nodes;
    v->depth = calloc(nodes, 1);
    v->skip = calloc(nodes, sizeof *v->skip);
    v->first = calloc(nodes + 1, sizeof *v->first);
    v->order = calloc((size_t)n + 1, sizeof *v->order);
    v->byte = calloc(nodes, 1);
    const bool ok = v->byte && v->depth && v->skip && v->first && v->order;
    if (ok) add_nodes(v, tokens, n);
    else grammar_vocab_free(v);
    free(tokens);
    return ok;
}

static size_t mask_words(const Grammar *g) { return ((size_t)g->t->n_tokens + 31) / 32; }

static void set_bit(uint32_t *bits, int32_t id) { bits[id / 32] |= 1u << id % 32; }

// Walks the subtree of a node, whose text leads to `set`, and sets the bits of the allowed tokens. exits: of a walk
// that will be cached; gets the nodes whose set is complete. False: a failure, or the walk needs more than *visits
// nodes.
static bool walk_tokens(Grammar *g, uint32_t node, int set, uint32_t *bits, int64_t *visits, Walk *exits) {
    const GrammarVocab *v = g->v;
    int32_t sets[TOKEN_BYTES], rows[TOKEN_BYTES];      // by depth
    const uint32_t end = v->skip[node];
    int cap = 0;
    sets[v->depth[node]] = set;
    rows[v->depth[node]] = row_of(g, set);
    for (uint32_t i = node + 1; i < end && !g->failed; ) {
        const int d = v->depth[i], symbol = g->class_of[v->byte[i]];
        int next = g->rows[rows[d - 1] + symbol];
        if (--*visits < 0) return false;
        if (next < 0) next = next_set(g, sets[d - 1], symbol);
        if (!next) {
            i = v->skip[i];
            continue;
        }
        for (uint32_t k = v->first[i]; k < v->first[i + 1]; k++) set_bit(bits, v->order[k]);
        if (exits && g->stack_sets[next].complete) {
            exits->exits = grammar_reserve(g, exits->exits, exits->n_exits, &cap, sizeof *exits->exits);
            if (!g->failed) exits->exits[exits->n_exits++] = i;
        }
        if (v->skip[i] > i + 1) {
            sets[d] = next;
            rows[d] = row_of(g, next);
        }
        i++;
    }
    return !g->failed;
}

// The walk of all tokens from a set, from the cache if possible. A new walk replaces the least recently used one.
static const Walk *cached_walk(Grammar *g, int set) {
    Walk *w = g->walks;
    for (int i = 0; i < g->n_walks; i++) {
        if (g->walks[i].set == set) {
            g->walks[i].last_used = ++g->clock;
            return &g->walks[i];
        }
        if (g->walks[i].last_used < w->last_used) w = &g->walks[i];
    }
    if (g->n_walks < GRAMMAR_WALKS) w = &g->walks[g->n_walks];
    Walk fresh = { .set = set, .last_used = ++g->clock, .bits = calloc(mask_words(g), sizeof(uint32_t)) };
    int64_t all = INT64_MAX;
    if (!fresh.bits) grammar_fail(g, "grammar: out of memory");
    if (g->failed || !walk_tokens(g, 0, set, fresh.bits, &all, &fresh)) {
        free(fresh.bits);
        free(fresh.exits);
        return NULL;
    }
    if (g->n_walks < GRAMMAR_WALKS) {
        g->n_walks++;
    } else {
        free(w->bits);
        free(w->exits);
    }
    *w = fresh;
    return w;
}

static void add_bits(const Grammar *g, uint32_t *bits, const uint32_t *more) {
    for (size_t i = 0, n = mask_words(g); i < n; i++) bits[i] |= more[i];
}

// Replaces the count of a stack's top frame by one that allows the same tokens: counts that no token can bring to a
// bound are equivalent. So one cached walk serves many counts.
static int canonical_count(const Grammar *g, const Stack *s) {
    const Code *here = &g->code[s->pc];
    if (here->loop < 0) return s->count;
    const Code *loop = &g->code[here->loop];
    const int far = g->v->longest + 1;                 // more iterations than one token can match
    if (loop->empty) return s->count;
    const int least = loop->op == OP_IF ? loop->arg : loop->min;
    if (s->count + far < least && (loop->max < 0 || loop->max - s->count > far)) return 0;
    return s->count >= loop->min && (loop->max < 0 || loop->max - s->count > far) ? loop->min : s->count;
}

// Sets the bits of the tokens that one stack allows: those of its top frame alone, and, where a token leaves the top
// frame, those that continue in the frame below. False: a failure, or it needs more than *visits nodes.
static bool add_stack_tokens(Grammar *g, int stack, uint32_t *bits, int64_t *visits) {
    const Stack s = g->stacks[stack];
    const int32_t top = intern_stack(g, s.pc, canonical_count(g, &s), 0);
    const Walk *w = g->failed ? NULL : cached_walk(g, intern_set(g, &top, 1));
    if (!w) return false;
    add_bits(g, bits, w->bits);
    if (!s.parent) return true;
    const Stack p = g->stacks[s.parent];
    const int32_t below = normal_stack(g, p.pc, p.count, p.parent);
    const int set = intern_set(g, &below, 1);
    if (g->stack_sets[w->set].complete && !walk_tokens(g, 0, set, bits, visits, NULL)) return false;
    for (int i = 0; i < w->n_exits; i++)
        if (g->v->skip[w->exits[i]] > w->exits[i] + 1 && !walk_tokens(g, w->exits[i], set, bits, visits, NULL))
            return false;
    return !g->failed;
}

// Sets the bits of the text tokens that a set allows: by a short walk, else stack by stack, else by a full walk.
static void add_text_tokens(Grammar *g, int set, uint32_t *bits) {
    int64_t visits = 1 << 12;
    if (!g->stack_sets[set].large && walk_tokens(g, 0, set, bits, &visits, NULL)) return;
    g->stack_sets[set].large = true;
    visits = 1 << 18;
    bool done = g->stack_sets[set].n_kernel <= 8;
    for (int i = 0; done && i < g->stack_sets[set].n_kernel; i++) {
        const int stack = g->ids[g->stack_sets[set].kernel + i];
        if (stack) done = add_stack_tokens(g, stack, bits, &visits);
    }
    const Walk *w = done || g->failed ? NULL : cached_walk(g, set);
    if (w) add_bits(g, bits, w->bits);
}

// Computes which tokens may follow: one bit each in mask, of vocab / 32 words, rounded up. False: a failure, or no
// token may follow.
static bool grammar_mask(Grammar *g, GrammarState s, uint32_t *mask, int vocab) {
    const size_t words = ((size_t)vocab + 31) / 32, own = mask_words(g);
    const Tokenizer *t = g->t;
    bool any = false;
    memset(mask, 0, words * sizeof *mask);
    g->work = GRAMMAR_WORK;
    if (!g->bits) g->bits = malloc(own * sizeof *g->bits);
    if (!g->bits) grammar_fail(g, "grammar: out of memory");
    if (g->failed) return false;
    memset(g->bits, 0, own * sizeof *g->bits);
    if (s) add_text_tokens(g, s, g->bits);
    for (int k = 0; s && k < g->n_named && !g->failed; k++)
        if (next_set(g, s, g->n_classes + k)) set_bit(g->bits, g->named[k]);
    for (int k = 0; g->stack_sets[s].complete && k < t->n_stop; k++) set_bit(g->bits, t->stop[k]);
    for (size_t i = 0; i < own; i++) any |= g->bits[i] != 0;
    if (!any) grammar_fail(g, "grammar: it allows no next token");
    if (!g->failed) memcpy(mask, g->bits, (own < words ? own : words) * sizeof *mask);
    return !g->failed;
}

__attribute__((unused)) static size_t grammar_memory(const Grammar *g) {       // bytes that it takes now
    const size_t words = mask_words(g) * sizeof(uint32_t);
    return sizeof *g + g->text.cap + (size_t)g->cap_exprs * sizeof *g->exprs + (size_t)g->cap_rules * sizeof *g->rules +
           (size_t)g->cap_sets * sizeof *g->sets + (size_t)g->cap_edges * sizeof *g->edges +
           (size_t)g->cap_code * sizeof *g->code + (size_t)g->cap_stacks * sizeof *g->stacks +
           (size_t)g->cap_stack_sets * sizeof *g->stack_sets +
           (size_t)(g->cap_ids + g->cap_rows + g->n_stack_slots + g->n_set_slots) * sizeof(int32_t) +
           (size_t)(g->n_walks + 1) * words;
}

static void grammar_free(Grammar *g) {
    free_stacks(g);
    for (int i = 0; i < g->n_walks; i++) {
        free(g->walks[i].bits);
        free(g->walks[i].exits);
    }
    tok_text_free(&g->text);
    free(g->exprs);
    free(g->rules);
    free(g->sets);
    free(g->edges);
    free(g->code);
    free(g->bits);
    g->exprs = NULL;
    g->rules = NULL;
    g->sets = NULL;
    g->edges = NULL;
    g->code = NULL;
    g->bits = NULL;
    g->n_walks = 0;
}
#endif
