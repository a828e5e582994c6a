/* calls.h - tool calls as models write them, mutated, and the check that reading them loses no byte.
 *
 * The functions draw from bytes: random ones in test_chat.c, those of the fuzzer in fuzz_chat.c. In a block, the byte
 * 0xFF is the mark <|"|>, as in TokReply.call. */
#ifndef CALLS_H
#define CALLS_H
#include <ctype.h>

typedef struct { const uint8_t *s; size_t n, i; } CallBytes;         // when they are used up, 0

static unsigned draw_number(CallBytes *b, unsigned n) { return b->i < b->n ? b->s[b->i++] % n : 0; }
static const char *draw_text(CallBytes *b, const char *const *texts) {
    unsigned n = 0;
    while (texts[n]) n++;
    return texts[draw_number(b, n)];
}

static void put_text(TokText *out, const char *s) { if (!tok_text_append(out, s, strlen(s))) abort(); }

// The styles: the template's, JSON, Python, and no quotes.
typedef struct { const char *open, *close, *colon, *comma, *key, *quote; } CallStyle;
static const CallStyle call_styles[] = {
    { "{", "}", ":", ",", "", "\xFF" }, { "{", "}", ": ", ", ", "\"", "\"" }, { "(", ")", "=", ", ", "", "'" },
    { "{", "}", ":", ",", "", "" }, { "(", ")", ":", ",", "", "\xFF" }, { "{", "}", "=", "\n", "", "\xFF" },
};

static void draw_value(TokText *out, CallBytes *b, const CallStyle *style, int depth);

static void draw_members(TokText *out, CallBytes *b, const CallStyle *style, int depth) {
    static const char *const keys[] = { "a", "q", "path", "save_as", "b-2", "last name", "\xC3\xBC", "list", NULL };
    for (unsigned n = draw_number(b, 4), i = 0; i < n; i++) {
        if (i) put_text(out, style->comma);
        put_text(out, style->key);
        put_text(out, draw_text(b, keys));
        put_text(out, style->key);
        put_text(out, style->colon);
        draw_value(out, b, style, depth);
    }
}

static void draw_value(TokText *out, CallBytes *b, const CallStyle *style, int depth) {
    static const char *const scalars[] = { "1", "-7.5", "1e5", "007", "true", "False", "None", "null", NULL };
    static const char *const texts[] = { "x", "hello, world", "https://x.y/z?a=b,c", "at 12:30", "don't", "{x} [y] (z)",
                                         "a: b, c: d", "", "\xE4\xB8\xAD \xF0\x9F\x98\x80", "f(1)\nreturn", "C:\\d",
                                         "\\n \\u0041 \\", "call:g{a:1}", "k=v", ":) ;]", "say \\\"hi\\\"", NULL };
    const unsigned kind = draw_number(b, depth ? 7 : 5);
    if (kind < 2) {
        put_text(out, draw_text(b, scalars));
    } else if (kind < 5) {
        put_text(out, style->quote);
        put_text(out, draw_text(b, texts));
        put_text(out, style->quote);
    } else if (kind == 5) {
        put_text(out, "[");
        for (unsigned n = draw_number(b, 4), i = 0; i < n; i++) {
            if (i) put_text(out, style->comma);
            draw_value(out, b, style, depth - 1);
        }
        put_text(out, "]");
    } else {
        put_text(out, "{");
        draw_members(out, b, style, depth - 1);
        put_text(out, "}");
    }
}

// Appends a block of one or two calls.
static void draw_block(TokText *out, CallBytes *b) {
    static const char *const names[] = { "f", "get_weather", "ns.tool-x/y", "gr\xC3\xB6\xC3\x9F" "e", "my tool", NULL };
    static const char *const prefixes[] = { "call:", "call:", "call:", "", ":", "Call: ", "I will. call:", NULL };
    static const char *const between[] = { "", ",", "\n", " and then ", NULL };
    for (unsigned n = 1 + (draw_number(b, 4) == 1), i = 0; i < n; i++) {
        const unsigned kind = draw_number(b, 8), style = draw_number(b, 6);
        if (i) put_text(out, draw_text(b, between));
        if (kind == 7) {
            put_text(out, "```json\n{\"name\": \"f\", \"arguments\": {");
            draw_members(out, b, &call_styles[1], 2);
            put_text(out, "}}\n```");
            continue;
        }
        put_text(out, draw_text(b, prefixes));
        put_text(out, draw_text(b, names));
        if (kind == 6) continue;
        put_text(out, call_styles[style].open);
        draw_members(out, b, &call_styles[style], 3);
        put_text(out, call_styles[style].close);
    }
}

// Changes a block in 0 to 4 places: inserts, deletes, replaces, duplicates, swaps or cuts.
static void mutate_block(TokText *v, CallBytes *b) {
    static const char signs[] = "{}[]():=,\"'\\ \n\xFF\xFF" "a1-`;<|";
    for (unsigned n = draw_number(b, 5); n > 0 && v->n > 1; n--) {
        const unsigned kind = draw_number(b, 16), high = draw_number(b, 256);
        const size_t at = (high << 8 | draw_number(b, 256)) % (v->n - 1);
        const char sign = signs[draw_number(b, sizeof signs - 1)];
        put_text(v, " ");                              // room for one byte
        v->n--;
        if (kind < 5 || kind == 15) {
            memmove(v->s + at + 1, v->s + at, v->n++ - at);
            if (kind < 5) v->s[at] = sign;             // else the byte is there twice
        } else if (kind < 10) {
            memmove(v->s + at, v->s + at + 1, --v->n - at);
        } else if (kind < 12) {
            v->s[at] = sign;
        } else if (kind < 14) {
            const char c = v->s[at];
            v->s[at] = v->s[at + 1];
            v->s[at + 1] = c;
        } else {
            v->n = at + 1;
        }
    }
}

// Counts the bytes of a text, letters without case.
static void count_bytes(long count[256], const char *s, size_t n, long by) {
    for (size_t i = 0; i < n; i++) count[tolower((unsigned char)s[i])] += by;
}

static void count_word(long count[256], const char *word) { count_bytes(count, word, strlen(word), 1); }

// Counts what the arguments of a call hold. None has become null, and some control characters are escapes.
static void count_arguments(long count[256], TokStr a) {
    count_bytes(count, a.s, a.n, 1);
    for (size_t i = 0; i + 1 < a.n; i++) {
        if (i + 4 <= a.n && !memcmp(a.s + i, "null", 4)) count_word(count, "none");
        if (a.s[i] != '\\') continue;
        if (a.s[i + 1] == 'b') count['\b']++;
        if (a.s[i + 1] == 'f') count['\f']++;
        if (i + 5 < a.n && !memcmp(a.s + i, "\\u00", 4))
            count[16 * tok_hex_digit((unsigned char)a.s[i + 4]) + tok_hex_digit((unsigned char)a.s[i + 5])]++;
        i++;
    }
}

// True if every byte of a block (n) that is neither blank nor syntax is in the calls from number `first` on or in the
// content from byte `content` on, as often as in the block. Escapes of a JSON string in an object are not followed.
static bool block_is_kept(const char *block, size_t n, const TokReply *r, int first, size_t content) {
    long count[256] = { 0 };
    count_bytes(count, r->content.s + content, r->content.n - content, 1);
    for (int i = first; i < r->n_calls; i++) {
        count_bytes(count, r->calls[i].name.s, r->calls[i].name.n, 1);
        count_arguments(count, r->calls[i].arguments);
        count_word(count, "call");
    }
    for (size_t i = 0; i < n; i++) {                   // a fence with its language; a call that is an object
        const bool fence = r->n_calls > first && n - i >= 3 && !memcmp(block + i, "```", 3);
        for (size_t k = i + 3; fence && k < n && tok__is_word_byte(block[k]); k++) count_bytes(count, block + k, 1, 1);
    }
    TokText plain = { 0 };                             // without marks, which may be anywhere
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)block[i] != TOK__DELIMITER && !tok_text_append(&plain, block + i, 1)) abort();
    const bool object = plain.n && (memmem(plain.s, plain.n, "arguments", 9) || memmem(plain.s, plain.n, "parameters", 10));
    for (int i = first; object && i < r->n_calls; i++) count_word(count, "name arguments parameters type function");
    tok_text_free(&plain);
    count_bytes(count, block, n, -1);
    for (int c = 0x21; c < 256; c++)
        if (count[c] < 0 && c != TOK__DELIMITER && !strchr("{}[]():,=\"'\\`", c)) return false;
    for (int c = 0; c < 0x20; c++)
        if (count[c] < 0 && c != '\t' && c != '\n' && c != '\r') return false;
    return true;
}

#endif
