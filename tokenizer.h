/* tokenizer.h - text <-> token ids of Gemma 4, and the chat turn. Single header, no dependencies, no model knowledge.
 *
 * USE    In exactly one C file: #define TOKENIZER_IMPLEMENTATION before the #include. Fill a TokVocab from the model
 *        file, tok_init, then tok_encode / tok_piece / tok_stream_push; tok_free at the end.
 *
 * ENCODE 1. In the mode asked for, cut the text at the special strings ("<|turn>" and 23 others).
 *        2. A space becomes U+2581; each invalid UTF-8 byte becomes U+FFFD. No other change.
 *        3. Every code point is its own token, or, if the vocabulary lacks it, its bytes are (<0x00>..<0xFF>).
 *        4. Merge the adjacent pair of lowest rank (its index in the merge list), the leftmost of equals, until no
 *           adjacent pair is a merge.
 *
 * MODES  TOK_PLAIN         no string is special: for text that is not trusted
 *        TOK_USER_DEFINED  only the markers a model writes around calls and thoughts (llama.cpp's parse_special=false)
 *        TOK_SPECIAL       all of them: for a rendered prompt (llama.cpp's parse_special=true, Hugging Face)
 *
 * SEAMS  encode(a) + encode(b) is not encode(a + b): join adjacent plain texts before they are encoded.
 *
 * ERRORS Functions that can fail return < 0 and leave one line in t->err, without newline. Nothing prints or exits.
 *        A failed tok_encode or tok_chat_turn leaves the ids as they were.
 *
 * THREADS  After tok_init the tables are read only; t->err is written by a call that fails. Decoding is safe from any
 *        number of threads; encoding too, if each thread has its own copy of the struct (by assignment: the copies share
 *        the tables, and only one of them is given to tok_free).
 *
 * MEMORY About 26 MB of tables for 262144 tokens and 514906 merges. Encoding needs 4 bytes per code point in the
 *        result, and 24 more while it merges a run of more than 32 code points that offers no place to cut. */
#ifndef TOKENIZER_H
#define TOKENIZER_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct { const char *s; size_t n; } TokStr;   // bytes, no terminator; s may be NULL when n is 0

// What the model file says. The pointers need to live during tok_init only.
typedef struct {
    const TokStr *tokens;     // (n_tokens) id -> text, a space written as U+2581
    int n_tokens;
    const int32_t *types;     // (n_tokens) 1 normal, 3 control, 4 user-defined, 6 byte; or NULL: bytes known by their text
    const TokStr *merges;     // (n_merges) "LEFT RIGHT"; the index is the rank. A merge of unknown texts is skipped
    int n_merges;
    int bos, eos, eot;        // ids; -1 when the file has none
    TokStr chat_template;     // its source, empty when absent; decides the chat variant
    bool has_ple;             // per-layer embeddings: decides the chat variant when there is no template
} TokVocab;

typedef struct { int32_t left, right; uint32_t rank; int32_t merged; } Tok__Merge;   // left -1: free slot

typedef struct Tokenizer {
    int n_tokens;
    bool large_variant;       // chat: with thinking off the prompt ends in an empty thought block
    int bos, eos, eot;        // as in the file, bos and eos by their text if the file does not say; -1 when unknown
    int32_t stop[8];          // (n_stop) ids that end generation
    int n_stop;
    int n_skipped;            // merges that can never apply: no space in them, or a text that is no token
    size_t stream_cap;        // bytes of out[] with which tok_stream_push and tok_stream_flush always succeed

    // Ids of the special strings, -1 when the vocabulary lacks them.
    int32_t pad, tag_eos, tag_bos, unk, mask;                 // <pad> <eos> <bos> <unk> <mask>
    int32_t tool_open, tool_close;                            // <|tool> <tool|>                    a declaration
    int32_t call_open, call_close;                            // <|tool_call> <tool_call|>
    int32_t response_open, response_close;                    // <|tool_response> <tool_response|>
    int32_t quote;                                            // <|"|>                              around strings in calls
    int32_t think;                                            // <|think|>
    int32_t channel_open, channel_close;                      // <|channel> <channel|>              a thought
    int32_t turn_open, turn_close;                            // <|turn> <turn|>
    int32_t image_open, image_close, audio_open, audio_close; // <|image> <image|> <|audio> <audio|>
    int32_t image, audio, video;                              // <|image|> <|audio|> <|video|>      placeholders

    // Tables, private.
    char *pieces;             // the decoded bytes of all tokens, one after the other
    size_t *piece_at;         // (n_tokens + 1) where each starts
    unsigned char *kind;      // (n_tokens) TOK__NORMAL, TOK__HIDDEN, TOK__BYTE
    int32_t *code_point;      // (0x110000) id + 1 of the token that is this one code point, 0 if there is none
    int32_t byte_id[256];     // id of <0xHH>, -1 if there is none
    Tok__Merge *merge;        // hash table of (merge_mask + 1) slots, key (left, right)
    size_t merge_mask;
    uint64_t *join;           // hash set of (join_mask + 1) slots: see tok__joins
    size_t join_mask, n_join;

    char err[256];            // the last error
} Tokenizer;

// Build the tables. Returns 0, or -1 with t->err set and nothing left to free. A file may repeat a text (the lowest id
// is used) and may lack specials, merges or byte tokens; tok_encode and tok_chat_turn complain when they need one.
int tok_init(Tokenizer *t, const TokVocab *v);
void tok_free(Tokenizer *t);

typedef enum { TOK_PLAIN, TOK_USER_DEFINED, TOK_SPECIAL } TokMode;

typedef struct { int32_t *ids; size_t n, cap; } TokIds;   // start with {0}; grows by realloc
void tok_ids_free(TokIds *v);

// Append the ids of text[0..n) to *out. No BOS is added. Any bytes are legal, NUL included. Fails when memory runs out,
// when a byte token is needed that the vocabulary lacks, and for n > 2^31 - 1.
int tok_encode(Tokenizer *t, const char *text, size_t n, TokMode mode, TokIds *out);

// The bytes of one id, owned by t: not always whole characters (byte tokens). Empty for a control token unless
// show_special, and for an id out of range.
TokStr tok_piece(const Tokenizer *t, int32_t id, bool show_special);

// True for the file's eos and eot, <eos>, <turn|>, <|tool_response>, and <|turn>: the model opens someone else's turn.
bool tok_is_stop(const Tokenizer *t, int32_t id);

// Ids to text, one by one, never half a character: an unfinished one waits in pending[], a byte that can be part of no
// character comes out as U+FFFD. Start with {0}. Both functions return the number of bytes written to out[0..cap), no
// terminator. cap >= t->stream_cap is always enough; with less, characters that do not fit are lost.
typedef struct { unsigned char pending[4]; int n; } TokStream;
size_t tok_stream_push(const Tokenizer *t, TokStream *s, int32_t id, bool show_special, char *out, size_t cap);
size_t tok_stream_flush(TokStream *s, char *out, size_t cap);   // at the end: what is pending was no character

// Append the prompt of a first turn, thinking off: BOS, a system turn unless system.s is NULL, the user turn, and the
// opening of the model's turn. The texts are trimmed (Unicode white space) and encoded in TOK_PLAIN mode.
int tok_chat_turn(Tokenizer *t, TokStr system, TokStr user, TokIds *out);

#endif // TOKENIZER_H

#ifdef TOKENIZER_IMPLEMENTATION
#ifndef TOKENIZER_IMPLEMENTED
#define TOKENIZER_IMPLEMENTED
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- names, errors, growth ------------------------------------------------------------------------------------------

enum {
    TOK__SHORT = 32,                  // symbols: up to here merging scans for the minimum, above it keeps a heap
    TOK__MAX_SPECIAL = 16,            // bytes of the longest special string
    TOK__NO_CHAR = 0x110000,          // "no code point before this one"
    TOK__REPLACEMENT = 0xFFFD,
    TOK__SPACE = 0x2581
};
enum { TOK__NORMAL, TOK__HIDDEN, TOK__BYTE };                             // kind[]
enum { TOK__TYPE_CONTROL = 3, TOK__TYPE_BYTE = 6 };                       // TokVocab.types
#define TOK__NO_RANK UINT32_MAX

// The special strings. Each starts with '<', ends with '>' and has neither inside, so two occurrences cannot overlap.
// They are known by text, not by type: files disagree about the types.
typedef struct { char text[TOK__MAX_SPECIAL + 1]; bool user_defined; size_t field; } Tok__Special;
static const Tok__Special tok__specials[] = {
    { "<pad>", false, offsetof(Tokenizer, pad) },
    { "<eos>", false, offsetof(Tokenizer, tag_eos) },
    { "<bos>", false, offsetof(Tokenizer, tag_bos) },
    { "<unk>", false, offsetof(Tokenizer, unk) },
    { "<mask>", false, offsetof(Tokenizer, mask) },
    { "<|tool>", false, offsetof(Tokenizer, tool_open) },
    { "<tool|>", false, offsetof(Tokenizer, tool_close) },
    { "<|tool_call>", true, offsetof(Tokenizer, call_open) },
    { "<tool_call|>", true, offsetof(Tokenizer, call_close) },
    { "<|tool_response>", false, offsetof(Tokenizer, response_open) },    // a stop id: never from untrusted text
    { "<tool_response|>", true, offsetof(Tokenizer, response_close) },
    { "<|\"|>", true, offsetof(Tokenizer, quote) },
    { "<|think|>", false, offsetof(Tokenizer, think) },
    { "<|channel>", true, offsetof(Tokenizer, channel_open) },
    { "<channel|>", true, offsetof(Tokenizer, channel_close) },
    { "<|turn>", false, offsetof(Tokenizer, turn_open) },
    { "<turn|>", false, offsetof(Tokenizer, turn_close) },
    { "<|image>", false, offsetof(Tokenizer, image_open) },
    { "<image|>", false, offsetof(Tokenizer, image_close) },
    { "<|audio>", false, offsetof(Tokenizer, audio_open) },
    { "<audio|>", false, offsetof(Tokenizer, audio_close) },
    { "<|image|>", false, offsetof(Tokenizer, image) },
    { "<|audio|>", false, offsetof(Tokenizer, audio) },
    { "<|video|>", false, offsetof(Tokenizer, video) },
};
enum { TOK__N_SPECIALS = sizeof tok__specials / sizeof *tok__specials };

static inline int32_t *tok__special_id(Tokenizer *t, int i) {
    return (int32_t *)(void *)((char *)t + tok__specials[i].field);
}

// Fill t->err and return -1.
#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
static int tok__fail(Tokenizer *t, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(t->err, sizeof t->err, fmt, ap);
    va_end(ap);
    return -1;
}

static int tok__push(Tokenizer *t, TokIds *v, int32_t id) {
    if (v->n == v->cap) {
        size_t cap = v->cap < 256 ? 256 : v->cap * 2;
        int32_t *ids = cap > v->cap && cap <= SIZE_MAX / sizeof *ids ? realloc(v->ids, cap * sizeof *ids) : NULL;
        if (!ids) return tok__fail(t, "out of memory for %zu token ids", cap);
        v->ids = ids;
        v->cap = cap;
    }
    v->ids[v->n++] = id;
    return 0;
}

void tok_ids_free(TokIds *v) {
    free(v->ids);
    *v = (TokIds){ 0 };
}

// ---- UTF-8 ----------------------------------------------------------------------------------------------------------

// Read one code point of s[0..n), n >= 1, strictly (Unicode 15, table 3-7): no surrogates, no overlong forms.
// Returns its length in bytes and sets *cp; 0 if s[0] cannot start a character here; -1 if s ends inside a character.
static inline int tok__utf8(const unsigned char *s, size_t n, uint32_t *cp) {
    unsigned c = s[0], low = 0x80, high = 0xBF;       // bounds of the second byte
    int len;
    if (c < 0x80) { *cp = c; return 1; }
    if (c < 0xC2 || c > 0xF4) return 0;
    if (c < 0xE0) { len = 2; c &= 0x1F; }
    else if (c < 0xF0) {
        len = 3;
        if (c == 0xE0) low = 0xA0;
        if (c == 0xED) high = 0x9F;
        c &= 0x0F;
    } else {
        len = 4;
        if (c == 0xF0) low = 0x90;
        if (c == 0xF4) high = 0x8F;
        c &= 0x07;
    }
    for (int i = 1; i < len; i++, low = 0x80, high = 0xBF) {
        if ((size_t)i == n) return -1;
        if (s[i] < low || s[i] > high) return 0;
        c = c << 6 | (s[i] & 0x3F);
    }
    *cp = c;
    return len;
}

static int tok__put_utf8(unsigned char out[4], uint32_t c) {
    if (c < 0x80) { out[0] = (unsigned char)c; return 1; }
    int len = c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    for (int i = len - 1; i > 0; i--, c >>= 6) out[i] = (unsigned char)(0x80 | (c & 0x3F));
    out[0] = (unsigned char)((0xF00 >> len & 0xFF) | c);              // 110xxxxx, 1110xxxx, 11110xxx
    return len;
}

// First and last code point of a text; false unless it is valid UTF-8 and not empty.
static bool tok__ends(TokStr s, uint32_t *first, uint32_t *last) {
    for (size_t i = 0; i < s.n; ) {
        int len = tok__utf8((const unsigned char *)s.s + i, s.n - i, last);
        if (len <= 0) return false;
        if (i == 0) *first = *last;
        i += (size_t)len;
    }
    return s.n > 0;
}

// White space as a chat template's trim understands it.
static bool tok__is_space(uint32_t c) {
    return (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

static TokStr tok__trim(TokStr s) {
    uint32_t c = 0;
    int len;
    while (s.n && (len = tok__utf8((const unsigned char *)s.s, s.n, &c)) > 0 && tok__is_space(c)) {
        s.s += len;
        s.n -= (size_t)len;
    }
    while (s.n) {
        size_t from = s.n - 1;                        // back to the lead byte; no white space is longer than 3 bytes
        while (from && s.n - from < 3 && ((unsigned char)s.s[from] & 0xC0) == 0x80) from--;
        len = tok__utf8((const unsigned char *)s.s + from, s.n - from, &c);
        if (len != (int)(s.n - from) || !tok__is_space(c)) break;
        s.n = from;
    }
    return s;
}

// ---- tables ---------------------------------------------------------------------------------------------------------
// All hash tables are open-addressed with linear probing, a power of two of slots, at most half full.

static size_t tok__slots(size_t n) {
    size_t slots = 16;
    while (slots < 2 * n) slots *= 2;
    return slots;
}

static inline size_t tok__mix(uint64_t key) {
    key *= 0x9E3779B97F4A7C15u;                       // 2^64 / golden ratio
    return (size_t)(key ^ key >> 32);
}

// The slot of the merge (left, right), or a free slot, whose rank is TOK__NO_RANK.
static inline const Tok__Merge *tok__find_merge(const Tokenizer *t, int32_t left, int32_t right) {
    size_t i = tok__mix((uint64_t)(uint32_t)left << 32 | (uint32_t)right);
    for (;; i++) {
        const Tok__Merge *m = &t->merge[i & t->merge_mask];
        if (m->left < 0 || (m->left == left && m->right == right)) return m;
    }
}

// Code points a, b are in the set if some merge joins a text ending in a with one starting with b. Between neighbours
// that are not in it no merge can ever reach across: the first one to do so would be such a merge. So the text is cut
// there, exactly, into pieces of about a word.
static inline uint64_t tok__join_key(uint32_t a, uint32_t b) { return ((uint64_t)a << 21 | b) + 1; }   // 0: free slot

static inline bool tok__joins(const Tokenizer *t, uint32_t a, uint32_t b) {
    uint64_t key = tok__join_key(a, b);
    for (size_t i = tok__mix(key); ; i++) {
        uint64_t k = t->join[i & t->join_mask];
        if (k == key) return true;
        if (k == 0) return false;
    }
}

static int tok__add_join(Tokenizer *t, uint32_t a, uint32_t b) {
    if (tok__joins(t, a, b)) return 0;
    if (2 * (t->n_join + 1) > t->join_mask + 1) {
        size_t slots = 2 * (t->join_mask + 1);
        uint64_t *join = calloc(slots, sizeof *join);
        if (!join) return tok__fail(t, "out of memory for %zu pairs of characters", t->n_join);
        for (size_t j = 0; j <= t->join_mask; j++) {
            if (!t->join[j]) continue;
            size_t i = tok__mix(t->join[j]);
            while (join[i & (slots - 1)]) i++;
            join[i & (slots - 1)] = t->join[j];
        }
        free(t->join);
        t->join = join;
        t->join_mask = slots - 1;
    }
    size_t i = tok__mix(tok__join_key(a, b));
    while (t->join[i & t->join_mask]) i++;
    t->join[i & t->join_mask] = tok__join_key(a, b);
    t->n_join++;
    return 0;
}

// Text -> id, needed while the tables are built.
typedef struct { uint32_t hash; int32_t id; } Tok__Slot;              // id -1: free slot
typedef struct { const TokStr *tokens; Tok__Slot *slot; size_t mask; } Tok__Texts;

static uint64_t tok__hash(uint64_t h, TokStr s) {                     // FNV-1a, continued from h
    for (size_t i = 0; i < s.n; i++) h = (h ^ (unsigned char)s.s[i]) * 0x100000001B3u;
    return h;
}
#define TOK__HASH_START 0xCBF29CE484222325u

// The slot of the token whose text is a followed by b, or a free slot. h is the hash of both.
static Tok__Slot *tok__find_text(const Tok__Texts *x, uint64_t h, TokStr a, TokStr b) {
    size_t i = tok__mix(h);
    uint32_t check = (uint32_t)(h >> 32);
    for (;; i++) {
        Tok__Slot *slot = &x->slot[i & x->mask];
        if (slot->id < 0) return slot;
        if (slot->hash != check) continue;
        TokStr text = x->tokens[slot->id];
        if (text.n == a.n + b.n && memcmp(text.s, a.s, a.n) == 0 && (b.n == 0 || memcmp(text.s + a.n, b.s, b.n) == 0))
            return slot;
    }
}

static int32_t tok__id_of(const Tok__Texts *x, TokStr a) {
    return a.n ? tok__find_text(x, tok__hash(TOK__HASH_START, a), a, (TokStr){ NULL, 0 })->id : -1;
}

static int tok__hex(unsigned char c) {
    return c >= '0' && c <= '9' ? c - '0' : c >= 'A' && c <= 'F' ? c - 'A' + 10 : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

// The byte that a text of the form <0xHH> stands for, or -1.
static int tok__byte_of(TokStr s) {
    if (s.n != 6 || memcmp(s.s, "<0x", 3) != 0 || s.s[5] != '>') return -1;
    int high = tok__hex((unsigned char)s.s[3]), low = tok__hex((unsigned char)s.s[4]);
    return high < 0 || low < 0 ? -1 : high * 16 + low;
}

// Fill x, kind[], byte_id[], the special ids and the code point table.
static int tok__index_tokens(Tokenizer *t, const TokVocab *v, Tok__Texts *x) {
    size_t slots = tok__slots((size_t)v->n_tokens);
    x->tokens = v->tokens;
    x->mask = slots - 1;
    x->slot = malloc(slots * sizeof *x->slot);
    t->kind = calloc((size_t)v->n_tokens, 1);
    t->code_point = calloc(0x110000, sizeof *t->code_point);          // untouched pages cost nothing
    if (!x->slot || !t->kind || !t->code_point) return tok__fail(t, "out of memory for %d tokens", v->n_tokens);
    memset(x->slot, 0xFF, slots * sizeof *x->slot);

    for (int id = 0; id < v->n_tokens; id++) {
        TokStr text = v->tokens[id];
        if (!text.n) continue;                                        // never encoded; decodes to nothing
        if (!text.s) return tok__fail(t, "token %d: expected %zu bytes of text, got none", id, text.n);
        uint64_t h = tok__hash(TOK__HASH_START, text);
        Tok__Slot *slot = tok__find_text(x, h, text, (TokStr){ NULL, 0 });
        if (slot->id < 0) *slot = (Tok__Slot){ (uint32_t)(h >> 32), id };   // else a repeated text: the first id counts

        int byte = tok__byte_of(text);
        if (v->types && v->types[id] == TOK__TYPE_CONTROL) t->kind[id] = TOK__HIDDEN;
        if (v->types ? v->types[id] == TOK__TYPE_BYTE : byte >= 0) {
            if (byte < 0) return tok__fail(t, "token %d: expected a byte token <0x00>..<0xFF>, got another text", id);
            t->kind[id] = TOK__BYTE;
            if (t->byte_id[byte] < 0) t->byte_id[byte] = id;
        }
    }
    for (int i = 0; i < TOK__N_SPECIALS; i++) {
        TokStr text = { tok__specials[i].text, strlen(tok__specials[i].text) };
        int32_t id = *tok__special_id(t, i) = tok__id_of(x, text);
        if (id >= 0) t->kind[id] = TOK__HIDDEN;
    }
    for (int id = v->n_tokens - 1; id >= 0; id--) {                   // downwards: of equal texts the first id stays
        uint32_t first = 0;
        TokStr text = v->tokens[id];
        if (text.n && text.n <= 4 && t->kind[id] == TOK__NORMAL &&
            tok__utf8((const unsigned char *)text.s, text.n, &first) == (int)text.n)
            t->code_point[first] = id + 1;
    }
    return 0;
}

// Fill the merge table and the join set. Byte tokens and hidden ones take part in no merge, whatever the file says: so
// plain text can never make a control token.
static int tok__index_merges(Tokenizer *t, const TokVocab *v, const Tok__Texts *x) {
    size_t slots = tok__slots((size_t)v->n_merges);
    t->merge_mask = slots - 1;
    t->merge = malloc(slots * sizeof *t->merge);
    t->join_mask = 1023;
    t->join = calloc(t->join_mask + 1, sizeof *t->join);
    if (!t->merge || !t->join) return tok__fail(t, "out of memory for %d merges", v->n_merges);
    memset(t->merge, 0xFF, slots * sizeof *t->merge);                 // left -1, rank TOK__NO_RANK

    for (int rank = 0; rank < v->n_merges; rank++) {
        TokStr m = v->merges[rank];
        const char *space = m.n > 1 && m.s ? memchr(m.s + 1, ' ', m.n - 1) : NULL;
        if (!space) { t->n_skipped++; continue; }
        TokStr l = { m.s, (size_t)(space - m.s) }, r = { space + 1, m.n - l.n - 1 };
        uint64_t h = tok__hash(TOK__HASH_START, l);
        int32_t left = tok__find_text(x, h, l, (TokStr){ NULL, 0 })->id;
        int32_t right = tok__id_of(x, r);
        int32_t merged = tok__find_text(x, tok__hash(h, r), l, r)->id;
        uint32_t l_first, l_last, r_first, r_last;
        if (left < 0 || right < 0 || merged < 0 || t->kind[left] || t->kind[right] || t->kind[merged] ||
            !tok__ends(l, &l_first, &l_last) || !tok__ends(r, &r_first, &r_last)) { t->n_skipped++; continue; }
        Tok__Merge *slot = &t->merge[tok__find_merge(t, left, right) - t->merge];
        if (slot->left >= 0) continue;                                // a repeated merge: the lower rank counts
        *slot = (Tok__Merge){ left, right, (uint32_t)rank, merged };
        if (tok__add_join(t, l_last, r_first) < 0) return -1;
    }
    return 0;
}

// Fill pieces, piece_at and stream_cap. A byte token is its byte, hidden tokens keep their text, others have U+2581 as
// a space.
static int tok__index_pieces(Tokenizer *t, const TokVocab *v) {
    size_t total = 0;
    for (int id = 0; id < v->n_tokens; id++) total += v->tokens[id].n;
    t->pieces = malloc(total + 1);
    t->piece_at = malloc(((size_t)v->n_tokens + 1) * sizeof *t->piece_at);
    if (!t->pieces || !t->piece_at) return tok__fail(t, "out of memory for %zu bytes of token texts", total);

    size_t at = 0, longest = 0;
    for (int id = 0; id < v->n_tokens; id++) {
        TokStr text = v->tokens[id];
        t->piece_at[id] = at;
        if (t->kind[id] == TOK__BYTE) {
            t->pieces[at++] = (char)tok__byte_of(text);
        } else for (size_t i = 0; i < text.n; ) {
            if (t->kind[id] == TOK__NORMAL && text.n - i >= 3 && memcmp(text.s + i, "\xE2\x96\x81", 3) == 0) {
                t->pieces[at++] = ' ';
                i += 3;
            } else {
                t->pieces[at++] = text.s[i++];
            }
        }
        if (at - t->piece_at[id] > longest) longest = at - t->piece_at[id];
    }
    t->piece_at[v->n_tokens] = at;
    t->stream_cap = 3 * (longest + 3);                                // each byte can become U+FFFD, 3 bytes
    return 0;
}

static void tok__add_stop(Tokenizer *t, int32_t id) {
    if (id >= 0 && !tok_is_stop(t, id)) t->stop[t->n_stop++] = id;
}

static bool tok__contains(TokStr s, TokStr what) {
    for (size_t i = 0; i + what.n <= s.n; i++)
        if (memcmp(s.s + i, what.s, what.n) == 0) return true;
    return false;
}

static int tok__check(Tokenizer *t, const TokVocab *v) {
    if (v->n_tokens < 1 || !v->tokens) return tok__fail(t, "tokens: expected at least 1, got %d", v->n_tokens);
    if (v->n_merges < 0 || (v->n_merges && !v->merges)) return tok__fail(t, "merges: expected a list, got %d", v->n_merges);
    const struct { const char *name; int id; } given[] = { { "bos", v->bos }, { "eos", v->eos }, { "eot", v->eot } };
    for (size_t i = 0; i < 3; i++)
        if (given[i].id < -1 || given[i].id >= v->n_tokens)
            return tok__fail(t, "%s token id: expected 0..%d, got %d", given[i].name, v->n_tokens - 1, given[i].id);
    return 0;
}

int tok_init(Tokenizer *t, const TokVocab *v) {
    Tok__Texts x = { 0 };
    memset(t, 0, sizeof *t);
    memset(t->byte_id, 0xFF, sizeof t->byte_id);
    int rc = tok__check(t, v);
    if (rc == 0) rc = tok__index_tokens(t, v, &x);
    if (rc == 0) rc = tok__index_merges(t, v, &x);
    if (rc == 0) rc = tok__index_pieces(t, v);
    free(x.slot);
    if (rc < 0) {
        tok_free(t);
        return -1;
    }
    t->n_tokens = v->n_tokens;
    t->bos = v->bos >= 0 ? v->bos : t->tag_bos;
    t->eos = v->eos >= 0 ? v->eos : t->tag_eos;
    t->eot = v->eot;
    const int32_t stop[] = { t->eos, t->eot, t->tag_eos, t->turn_close, t->response_open, t->turn_open };
    for (size_t i = 0; i < sizeof stop / sizeof *stop; i++) tok__add_stop(t, stop[i]);
    TokStr cue = { "<|channel>thought\\n<channel|>", 29 };            // template source: a backslash and an n
    t->large_variant = v->chat_template.n ? tok__contains(v->chat_template, cue) : !v->has_ple;
    return 0;
}

void tok_free(Tokenizer *t) {                                         // err stays
    free(t->pieces);
    free(t->piece_at);
    free(t->kind);
    free(t->code_point);
    free(t->merge);
    free(t->join);
    t->pieces = NULL;
    t->piece_at = NULL;
    t->kind = NULL;
    t->code_point = NULL;
    t->merge = NULL;
    t->join = NULL;
    t->n_tokens = 0;
}

// ---- encode ---------------------------------------------------------------------------------------------------------
// The symbols of a piece are appended to the result, then merged in place there.

// Merge id[0..n), n <= TOK__SHORT; returns how many are left. Scanning a word for the lowest rank is faster than a heap.
static size_t tok__merge_short(const Tokenizer *t, int32_t *id, size_t n) {
    uint32_t rank[TOK__SHORT];                        // of the pair (i, i + 1)
    int32_t merged[TOK__SHORT];
    for (size_t i = 0; i + 1 < n; i++) {
        const Tok__Merge *m = tok__find_merge(t, id[i], id[i + 1]);
        rank[i] = m->rank;
        merged[i] = m->merged;
    }
    while (n > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < n; i++)
            if (rank[i] < rank[best]) best = i;       // < keeps the leftmost of equals
        if (rank[best] == TOK__NO_RANK) break;
        id[best] = merged[best];
        n--;
        for (size_t i = best + 1; i < n; i++) {
            id[i] = id[i + 1];
            rank[i - 1] = rank[i];                    // rank[best] leaves; refilled below unless best is now the last
            merged[i - 1] = merged[i];
        }
        for (size_t i = best ? best - 1 : 0; i <= best && i + 1 < n; i++) {
            const Tok__Merge *m = tok__find_merge(t, id[i], id[i + 1]);
            rank[i] = m->rank;
            merged[i] = m->merged;
        }
    }
    return n;
}

// A heap entry is rank << 32 | position of the left symbol: the smallest is the lowest rank, leftmost on ties.
static void tok__heap_push(uint64_t *heap, size_t *n, uint64_t entry) {
    size_t i = (*n)++;
    for (; i && heap[(i - 1) / 2] > entry; i = (i - 1) / 2) heap[i] = heap[(i - 1) / 2];
    heap[i] = entry;
}

static uint64_t tok__heap_pop(uint64_t *heap, size_t *n) {
    uint64_t top = heap[0], last = heap[--*n];
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < *n; i = child) {
        if (child + 1 < *n && heap[child + 1] < heap[child]) child++;
        if (heap[child] >= last) break;
        heap[i] = heap[child];
    }
    heap[i] = last;
    return top;
}

// The same for any n, in O(n log n): a linked list of symbols and a heap of candidate pairs. An entry is stale if the
// pair at its position has another rank now (no two pairs have the same rank). Each merge adds at most two entries and
// has taken one out, so 2n are enough.
static int tok__merge_long(Tokenizer *t, int32_t *id, size_t *n_symbols) {
    size_t n = *n_symbols, n_heap = 0;
    uint32_t *next = malloc(n * sizeof *next);        // n: no neighbour
    uint32_t *prev = malloc(n * sizeof *prev);
    uint64_t *heap = malloc(2 * n * sizeof *heap);
    if (!next || !prev || !heap) {
        free(next);
        free(prev);
        free(heap);
        return tok__fail(t, "out of memory for a run of %zu characters", n);
    }
    for (size_t i = 0; i < n; i++) {
        next[i] = (uint32_t)(i + 1);
        prev[i] = (uint32_t)(i ? i - 1 : n);
        uint32_t rank = i + 1 < n ? tok__find_merge(t, id[i], id[i + 1])->rank : TOK__NO_RANK;
        if (rank != TOK__NO_RANK) tok__heap_push(heap, &n_heap, (uint64_t)rank << 32 | i);
    }
    while (n_heap) {
        uint64_t top = tok__heap_pop(heap, &n_heap);
        size_t i = (uint32_t)top, j = next[i];
        if (id[i] < 0 || j == n) continue;            // merged away, or the last symbol
        const Tok__Merge *m = tok__find_merge(t, id[i], id[j]);
        if (m->rank != top >> 32) continue;
        id[i] = m->merged;
        id[j] = -1;
        next[i] = next[j];
        if (next[i] < n) {
            prev[next[i]] = (uint32_t)i;
            uint32_t rank = tok__find_merge(t, id[i], id[next[i]])->rank;
            if (rank != TOK__NO_RANK) tok__heap_push(heap, &n_heap, (uint64_t)rank << 32 | i);
        }
        if (prev[i] < n) {
            uint32_t rank = tok__find_merge(t, id[prev[i]], id[i])->rank;
            if (rank != TOK__NO_RANK) tok__heap_push(heap, &n_heap, (uint64_t)rank << 32 | prev[i]);
        }
    }
    size_t left = 0;
    for (size_t i = 0; i < n; i = next[i]) id[left++] = id[i];
    *n_symbols = left;
    free(next);
    free(prev);
    free(heap);
    return 0;
}

// Merge the piece that is out->ids[start..out->n).
static int tok__merge_piece(Tokenizer *t, TokIds *out, size_t start) {
    size_t n = out->n - start;
    if (n < 2) return 0;
    if (n <= TOK__SHORT) n = tok__merge_short(t, out->ids + start, n);
    else if (tok__merge_long(t, out->ids + start, &n) < 0) return -1;
    out->n = start + n;
    return 0;
}

// Encode text that has no special strings in it.
static int tok__encode_run(Tokenizer *t, const unsigned char *s, size_t n, TokIds *out) {
    size_t start = out->n;                            // of the open piece in out
    uint32_t before = TOK__NO_CHAR;                   // the code point that ends it
    for (size_t i = 0; i < n; ) {
        uint32_t c;
        int len = tok__utf8(s + i, n - i, &c);
        i += len > 0 ? (size_t)len : 1;
        if (len <= 0) c = TOK__REPLACEMENT;
        if (c == ' ') c = TOK__SPACE;
        int32_t id = t->code_point[c] - 1;
        if (id < 0 || before == TOK__NO_CHAR || !tok__joins(t, before, c)) {
            if (tok__merge_piece(t, out, start) < 0) return -1;
            start = out->n;
        }
        before = id < 0 ? TOK__NO_CHAR : c;
        if (id >= 0) {
            if (tok__push(t, out, id) < 0) return -1;
            continue;
        }
        unsigned char byte[4];                        // no such token: its bytes, which take part in no merge
        int n_bytes = tok__put_utf8(byte, c);
        for (int b = 0; b < n_bytes; b++) {
            if (t->byte_id[byte[b]] < 0)
                return tok__fail(t, "cannot encode U+%04X: the vocabulary has no token <0x%02X>", (unsigned)c, byte[b]);
            if (tok__push(t, out, t->byte_id[byte[b]]) < 0) return -1;
        }
        start = out->n;
    }
    return tok__merge_piece(t, out, start);
}

// The id of the special string that s[0..n) starts with, or -1. s[0] is '<'.
static int32_t tok__match_special(Tokenizer *t, const char *s, size_t n, TokMode mode, size_t *len) {
    const char *end = memchr(s, '>', n < TOK__MAX_SPECIAL ? n : TOK__MAX_SPECIAL);
    if (!end) return -1;
    *len = (size_t)(end - s) + 1;
    for (int i = 0; i < TOK__N_SPECIALS; i++) {
        const Tok__Special *sp = &tok__specials[i];
        if (strlen(sp->text) == *len && memcmp(sp->text, s, *len) == 0)
            return mode == TOK_SPECIAL || sp->user_defined ? *tok__special_id(t, i) : -1;
    }
    return -1;
}

int tok_encode(Tokenizer *t, const char *text, size_t n, TokMode mode, TokIds *out) {
    size_t n_before = out->n, from = 0, i = 0;        // text[from..i) is not encoded yet
    if (n > INT32_MAX) return tok__fail(t, "text: expected at most %d bytes, got %zu", INT32_MAX, n);
    while (mode != TOK_PLAIN && i < n) {
        const char *open = memchr(text + i, '<', n - i);
        if (!open) break;
        i = (size_t)(open - text);
        size_t len;
        int32_t id = tok__match_special(t, open, n - i, mode, &len);
        if (id < 0) {
            i++;
            continue;
        }
        if (tok__encode_run(t, (const unsigned char *)text + from, i - from, out) < 0 || tok__push(t, out, id) < 0)
            goto fail;
        from = i += len;
    }
    if (n > from && tok__encode_run(t, (const unsigned char *)text + from, n - from, out) < 0) goto fail;
    return 0;
fail:
    out->n = n_before;
    return -1;
}

// ---- decode ---------------------------------------------------------------------------------------------------------

TokStr tok_piece(const Tokenizer *t, int32_t id, bool show_special) {
    if (id < 0 || id >= t->n_tokens || (t->kind[id] == TOK__HIDDEN && !show_special)) return (TokStr){ "", 0 };
    return (TokStr){ t->pieces + t->piece_at[id], t->piece_at[id + 1] - t->piece_at[id] };
}

bool tok_is_stop(const Tokenizer *t, int32_t id) {
    for (int i = 0; i < t->n_stop; i++)
        if (t->stop[i] == id) return true;
    return false;
}

// Append n bytes if they fit.
static size_t tok__emit(char *out, size_t cap, size_t at, const void *bytes, size_t n) {
    if (n > cap - at) return at;
    memcpy(out + at, bytes, n);
    return at + n;
}

size_t tok_stream_push(const Tokenizer *t, TokStream *s, int32_t id, bool show_special, char *out, size_t cap) {
    TokStr piece = tok_piece(t, id, show_special);
    size_t at = 0;
    for (size_t i = 0; i < piece.n; i++) {
        s->pending[s->n++] = (unsigned char)piece.s[i];
        while (s->n) {                                // take whole characters and impossible bytes off the front
            uint32_t c;
            int len = tok__utf8(s->pending, (size_t)s->n, &c);
            if (len < 0) break;                       // at most 3 bytes wait
            at = len ? tok__emit(out, cap, at, s->pending, (size_t)len) : tok__emit(out, cap, at, "\xEF\xBF\xBD", 3);
            s->n -= len ? len : 1;
            memmove(s->pending, s->pending + (len ? len : 1), (size_t)s->n);
        }
    }
    return at;
}

size_t tok_stream_flush(TokStream *s, char *out, size_t cap) {
    size_t at = 0;
    for (; s->n; s->n--) at = tok__emit(out, cap, at, "\xEF\xBF\xBD", 3);
    return at;
}

// ---- chat -----------------------------------------------------------------------------------------------------------
// A prompt is a list of special ids and plain texts. Texts are encoded in TOK_PLAIN mode: a user who writes "<turn|>"
// gets the characters, not the token.

static int tok__push_special(Tokenizer *t, TokIds *out, int32_t id, const char *name) {
    if (id < 0) return tok__fail(t, "chat: the vocabulary has no token %s", name);
    return tok__push(t, out, id);
}

// "ROLE\nTEXT" as one text: merges may cross the seam.
static int tok__push_role(Tokenizer *t, TokIds *out, const char *role, TokStr text) {
    size_t n_role = strlen(role);
    if (text.n > INT32_MAX) return tok__fail(t, "text: expected at most %d bytes, got %zu", INT32_MAX, text.n);
    char *joined = malloc(n_role + 1 + text.n);
    if (!joined) return tok__fail(t, "out of memory for a message of %zu bytes", text.n);
    memcpy(joined, role, n_role);
    joined[n_role] = '\n';
    if (text.n) memcpy(joined + n_role + 1, text.s, text.n);
    int rc = tok_encode(t, joined, n_role + 1 + text.n, TOK_PLAIN, out);
    free(joined);
    return rc;
}

// <|turn> ROLE \n TEXT <turn|> \n
static int tok__push_turn(Tokenizer *t, TokIds *out, const char *role, TokStr text) {
    if (tok__push_special(t, out, t->turn_open, "<|turn>") < 0) return -1;
    if (tok__push_role(t, out, role, tok__trim(text)) < 0) return -1;
    if (tok__push_special(t, out, t->turn_close, "<turn|>") < 0) return -1;
    return tok_encode(t, "\n", 1, TOK_PLAIN, out);
}

// <|turn> model \n, and on large models <|channel> thought \n <channel|>: nothing was thought.
static int tok__push_cue(Tokenizer *t, TokIds *out) {
    TokStr nothing = { "", 0 };
    if (tok__push_special(t, out, t->turn_open, "<|turn>") < 0) return -1;
    if (tok__push_role(t, out, "model", nothing) < 0) return -1;
    if (!t->large_variant) return 0;
    if (tok__push_special(t, out, t->channel_open, "<|channel>") < 0) return -1;
    if (tok__push_role(t, out, "thought", nothing) < 0) return -1;
    return tok__push_special(t, out, t->channel_close, "<channel|>");
}

int tok_chat_turn(Tokenizer *t, TokStr system, TokStr user, TokIds *out) {
    size_t n_before = out->n;
    if (tok__push_special(t, out, t->bos, "<bos>") < 0 ||
        (system.s && tok__push_turn(t, out, "system", system) < 0) ||
        tok__push_turn(t, out, "user", user) < 0 ||
        tok__push_cue(t, out) < 0) {
        out->n = n_before;
        return -1;
    }
    return 0;
}

#endif // TOKENIZER_IMPLEMENTED
#endif // TOKENIZER_IMPLEMENTATION
