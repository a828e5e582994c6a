/* tokenizer.h - text <-> token ids of Gemma 4, chat prompts, and parsing of the model's answer. Single header; it does
 * not use the model. It needs the JSON reader of gguf.h, which it includes.
 *
 * USE    In exactly one C file: #define GGUF_IMPLEMENTATION (unless another file has it) and TOKENIZER_IMPLEMENTATION
 *        before the #include. Fill a TokVocab from the model file, call tok_init, then
 *          text     tok_encode, tok_piece, tok_stream_push
 *          prompt   tok_add_message ..., tok_chat: a conversation to ids
 *          answer   tok_reply_start, tok_reply_push ..., tok_reply_end: ids to thought, text and tool calls;
 *                   tok_add_reply appends them to the conversation
 *        and tok_free at the end.
 *
 * ENCODE 1. Cut the text at the special strings of the mode ("<|turn>" and 23 others).
 *        2. A space becomes U+2581; each invalid UTF-8 byte becomes U+FFFD. No other change.
 *        3. Every code point becomes its token or, if the vocabulary lacks it, the byte tokens (<0x00>..<0xFF>).
 *        4. Merge the adjacent pair with the lowest rank (its index in the merge list), the leftmost on ties, until no
 *           adjacent pair is in the list.
 *
 * MODES  TOK_PLAIN         no string is special: for untrusted text
 *        TOK_USER_DEFINED  the markers that a model writes around calls and thoughts (llama.cpp's parse_special=false)
 *        TOK_SPECIAL       all special strings: for a rendered prompt (llama.cpp's parse_special=true, Hugging Face)
 *
 * SEAMS  encode(a) + encode(b) is not encode(a + b): join adjacent plain texts before they are encoded.
 *
 * CHAT   A conversation is one JSON text, the "messages" of the OpenAI chat API: a server passes it on, a terminal chat
 *        appends to it. tok_chat renders the whole conversation each time, which is cheap (millions of tokens per
 *        second); the caller compares ids to find what is already in the KV cache. Texts are encoded in TOK_PLAIN mode
 *        and markers are inserted by id, so no message can open or close a turn.
 *
 * ERRORS Functions that can fail return < 0; those that get a Tokenizer write one line, without newline, to its err.
 *        Nothing prints or exits. A failed tok_encode or tok_chat does not change its results.
 *
 * THREADS  After tok_init the tables are read-only; a call that fails writes t->err. Any number of threads may decode.
 *        They may also encode if each has its own copy of the struct (by assignment: the copies share the tables; pass
 *        only one of them to tok_free).
 *
 * MEMORY About 26 MB of tables for 262144 tokens and 514906 merges. Encoding needs 4 bytes per code point for the
 *        result, and 24 more while it merges a piece of more than 32 code points. A prompt needs a copy of its longest
 *        text and 200 bytes per message. */
#ifndef TOKENIZER_H
#define TOKENIZER_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#ifndef GGUF_H                // if gguf.h is already included, its implementation must not be included twice
#include "gguf.h"
#endif

typedef struct { const char *s; size_t n; } TokStr;   // bytes, no terminator; s may be NULL when n is 0
typedef struct { char *s; size_t n, cap; } TokText;   // bytes that grow by realloc, no terminator; start with {0}
void tok_text_free(TokText *v);

// The vocabulary of the model file. The pointers are not needed after tok_init.
typedef struct {
    const TokStr *tokens;     // (n_tokens) id -> text, a space written as U+2581
    int n_tokens;
    const int32_t *types;     // (n_tokens) 1 normal, 3 control, 4 user-defined, 6 byte; NULL: byte tokens have <0xHH>
    const TokStr *merges;     // (n_merges) "LEFT RIGHT"; the index is the rank. A merge of unknown texts is ignored
    int n_merges;
    int bos, eos, eot;        // ids; -1 if the file has none
    TokStr chat_template;     // its source; empty: the file has none. Selects the chat variant
    bool has_ple;             // per-layer embeddings; selects the chat variant if there is no template
    const int32_t *ends;      // (n_ends) further ids that end generation; beyond TOK_MAX_STOPS they are ignored
    int n_ends;
} TokVocab;

// Google's chat templates. tok_init recognises them by words in their source.
typedef enum {
    TOK_TEMPLATE_NONE,        // the file has none
    TOK_TEMPLATE_CANONICAL,   // July 2026 or later: has the input preserve_thinking
    TOK_TEMPLATE_SPRING,      // spring 2026: reads tool_call_id, but not preserve_thinking
    TOK_TEMPLATE_LAUNCH,      // the first release: reads tool_responses only
    TOK_TEMPLATE_OTHER        // not one of Google's
} TokTemplate;

typedef struct { int32_t left, right; uint32_t rank; int32_t merged; } Tok__Merge;   // left -1: free slot

enum { TOK_KIND_NORMAL, TOK_KIND_HIDDEN, TOK_KIND_BYTE };              // Tokenizer.kind: text, control, one byte <0xHH>

enum { TOK_MAX_STOPS = 32 };

typedef struct Tokenizer {
    int n_tokens;
    bool large_variant;       // with thinking off, prompts end in an empty thought block; may be set after tok_init
    TokTemplate chat_template;   // the file's template; tok_chat always renders the canonical one
    int bos, eos, eot;        // from the file, or bos and eos by their text; -1: unknown
    int32_t stop[TOK_MAX_STOPS];      // (n_stop) ids that end generation
    int n_stop;
    int n_skipped;            // merges that are ignored: without space, or with a text that is not a token
    size_t stream_cap;        // size of out[] with which tok_stream_push and tok_stream_flush never lose characters

    // Ids of the special strings; -1 if the vocabulary lacks them.
    int32_t pad, tag_eos, tag_bos, unk, mask;                 // <pad> <eos> <bos> <unk> <mask>
    int32_t tool_open, tool_close;                            // <|tool> <tool|>                    a declaration
    int32_t call_open, call_close;                            // <|tool_call> <tool_call|>
    int32_t response_open, response_close;                    // <|tool_response> <tool_response|>
    int32_t quote;                                            // <|"|>                          around strings in calls
    int32_t think;                                            // <|think|>
    int32_t channel_open, channel_close;                      // <|channel> <channel|>              a thought
    int32_t turn_open, turn_close;                            // <|turn> <turn|>
    int32_t image_open, image_close, audio_open, audio_close; // <|image> <image|> <|audio> <audio|>
    int32_t image, audio, video;                              // <|image|> <|audio|> <|video|>      placeholders

    // Tables, private.
    char *pieces;             // the decoded bytes of all tokens, one after the other
    size_t *piece_at;         // (n_tokens + 1) where each starts
    unsigned char *kind;      // (n_tokens) TOK_KIND_NORMAL, TOK_KIND_HIDDEN, TOK_KIND_BYTE
    int32_t *code_point;      // (0x110000) id + 1 of the token of this code point, 0: none
    int32_t byte_id[256];     // id of <0xHH>, -1 if there is none
    Tok__Merge *merge;        // hash table of (merge_mask + 1) slots, key (left, right)
    size_t merge_mask;
    uint64_t *join;           // hash set of (join_mask + 1) slots: see tok__joins
    size_t join_mask, n_join;

    char err[256];            // the last error
} Tokenizer;

// Builds the tables. Returns 0, or -1 with t->err set and everything freed. If a text occurs twice, the lower id is
// used. If the file lacks special strings, merges or byte tokens, tok_encode and tok_chat fail when they need one.
int tok_init(Tokenizer *t, const TokVocab *v);
void tok_free(Tokenizer *t);

typedef enum { TOK_PLAIN, TOK_USER_DEFINED, TOK_SPECIAL } TokMode;

typedef struct { int32_t *ids; size_t n, cap; } TokIds;   // start with {0}; grows by realloc
void tok_ids_free(TokIds *v);

// Appends the ids of text[0..n) to *out, without BOS. Any bytes are allowed, also NUL. Fails if memory runs out, if the
// vocabulary lacks a byte token that is needed, and for n > 2^31 - 1.
int tok_encode(Tokenizer *t, const char *text, size_t n, TokMode mode, TokIds *out);

// The bytes of one id, owned by t. Byte tokens may be parts of characters. Empty for a control token unless
// show_special, and for an id out of range.
TokStr tok_piece(const Tokenizer *t, int32_t id, bool show_special);

// True for the file's eos, eot and further ends, <eos>, <turn|>, <|tool_response>, and <|turn>, which would begin
// another role's turn.
bool tok_is_stop(const Tokenizer *t, int32_t id);

// Decodes ids one by one to whole characters: an incomplete character waits in pending[]; a byte that cannot be part of
// a character becomes U+FFFD. Start with {0}. Both functions return the number of bytes written to out[0..cap), without
// terminator. cap >= t->stream_cap is always enough; with less, characters that do not fit are lost.
typedef struct { unsigned char pending[4]; int n; } TokStream;
size_t tok_stream_push(const Tokenizer *t, TokStream *s, int32_t id, bool show_special, char *out, size_t cap);
size_t tok_stream_flush(TokStream *s, char *out, size_t cap);   // at the end: pending bytes become U+FFFD

// ---- a conversation to a prompt ----

// A conversation is a JSON array of messages {role, content, ...} as in the OpenAI chat API; empty or null: no
// messages. Fields that are not named here are ignored.
//   role       "system" and "developer" (as first message: the system turn), "user", "assistant", "tool"; any other
//              role opens a turn of that name
//   content    a string, null, or a list of parts {type: text | image | image_url | audio | input_audio | video, text}
//   assistant  reasoning or reasoning_content; tool_calls [{id, function: {name, arguments}}], arguments: an object or
//              a string that holds one; tool_responses [{name, response}]: results inside the same message
//   tool       tool_call_id or name; content, which may also be an object. A result that follows no call is ignored
// tok_add_message appends a text message, with any bytes; tok_add_result the result of a call of the function `name`.
// Both return 0, or -1 if memory runs out; then nothing is appended.
int tok_add_message(TokText *messages, const char *role, TokStr content);
int tok_add_result(TokText *messages, TokStr name, TokStr content);

// Where a picture is in a prompt: ids[at] is <|image|>, in the place of a part of a content (a JSON object); 0 if the
// vocabulary has no such token. The caller replaces it by <|image>, what stands for the picture, and <image|>.
typedef struct { size_t at; TokStr part; } TokPicture;
typedef struct { TokPicture *of; size_t n, cap; } TokPictures;       // start with {0}; grows by realloc
void tok_pictures_free(TokPictures *v);

typedef struct {
    TokStr messages;          // JSON array, see above
    TokStr tools;             // JSON array of [{type: "function", function: {name, description, parameters}}], or none
    bool think;               // thinking on: <|think|> in the system turn
    bool keep_thoughts;       // keep thoughts of earlier turns if they led to tool calls
    bool add_cue;             // end with the opening of the model's turn, so that the model answers
    bool end_thought;         // after a tool result with thinking off: an empty thought block, which some models need
    bool exact;               // follow the published template even where its prompts are broken: a declaration whose
                              // parameters have no type or whose response is not an object; an answer after a message
                              // with content and results
    size_t most;              // fail if the length of a text alone says that there are more ids, or at twice as many,
                              // without encoding the rest; 0: no limit
    TokStr thought, answer;   // prefill: the beginning of the model's turn, with add_cue; s NULL: none. A thought stays
                              // open unless an answer follows, and then needs `think`. An answer continues the turn of
                              // the assistant's message before it
    // Results, unless NULL.
    TokPictures *pictures;    // appends the images, in the order of the prompt; an answer of the assistant's has none
    size_t *before_cue;       // ids before the cue: a later prompt of the same conversation begins with them
    size_t *least;            // if it fails for `most`, how many ids the prompt has at least; else 0
} TokChat;

// Renders the prompt with the canonical template, <bos> first. Appends ids to *ids and, unless text is NULL, the prompt
// as text, with markers, to *text. Errors name the place: "messages[2].content: expected ...".
int tok_chat(Tokenizer *t, const TokChat *c, TokIds *ids, TokText *text);

// The number of ids of a text of n bytes is at least this.
static inline size_t tok_least(const Tokenizer *t, size_t n) { return n / (t->stream_cap / 3); }

// ---- parsing the model's answer ----

typedef struct { TokStr name, arguments; } TokCall;   // arguments: a JSON object, members as the model wrote them
typedef enum { TOK_RUNNING, TOK_STOP, TOK_TOOL_CALLS, TOK_LENGTH } TokFinish;

// The caller pushes ids one at a time. content and thought grow by whole characters and never shrink, so a caller can
// stream the text after the offset that it has already shown. White space at the end of a thought is held back until
// more text follows. A call appears in calls when it is complete. It need not have the form of the template: see "calls
// in an answer" below for all forms that are read. Text that is no call becomes content. In content <|"|> is a quote,
// and other markers are dropped.
typedef struct {
    TokText content, thought;
    TokCall *calls;           // (n_calls)
    int n_calls;
    TokFinish finish;         // TOK_RUNNING until a stop id or tok_reply_end

    // Private.
    enum { TOK__CONTENT, TOK__THOUGHT, TOK__CALL } state;
    bool naming;              // in the first line of a thought, which is the channel's name
    bool after_call;          // white space is dropped
    size_t held;              // bytes after thought.n: white space that is held back
    TokStream stream;
    TokText call;             // text of the open call, TOK__DELIMITER for <|"|>
    TokText piece;            // the characters of one id
} TokReply;

// Starts a reply to this prompt, whose ids decide whether the reply begins inside a thought. Initialise *r with {0}
// before the first use; a reply that is started again keeps its memory.
void tok_reply_start(const Tokenizer *t, TokReply *r, const int32_t *prompt, size_t n);
// Adds the next id. Returns 0: continue; 1: a stop id, r->finish says which kind; -1: out of memory.
int tok_reply_push(Tokenizer *t, TokReply *r, int32_t id);
// Ends a reply without a stop id: finish becomes TOK_LENGTH; of an incomplete call, what has come is a call, or content
// if its name may be incomplete. No effect after a stop id.
int tok_reply_end(Tokenizer *t, TokReply *r);
// True while the model thinks: its next token belongs to a thought or to the thought's name, or closes the thought.
bool tok_reply_thinks(const TokReply *r);
void tok_reply_free(TokReply *r);

// Appends the reply as an assistant message. Its calls get ids that are unique in the list. Returns as tok_add_message.
int tok_add_reply(TokText *messages, const TokReply *r);

// Appends s as a JSON string, with quotes. Bytes of 0x80 and more are copied. Returns 0, or -1 if memory runs out.
int tok_add_json_string(TokText *out, TokStr s);

// Parts of the above, for code that handles ids, texts and conversations itself.
int tok_push_id(Tokenizer *t, TokIds *v, int32_t id);                // appends an id: 0, or -1 with t->err
bool tok_text_append(TokText *v, const char *s, size_t n);           // appends n bytes; false if memory runs out
TokStr tok_trim(TokStr s);                                           // without white space at both ends
int tok_hex_digit(unsigned char c);                                  // 0 .. 15; -1: it is none
// Decodes one code point of s[0..n), n >= 1, strictly (Unicode 15, table 3-7): no surrogates, no overlong forms.
// Returns its length in bytes and sets *cp; 0 if s[0] cannot start a character here; -1 if s ends inside a character.
int tok_read_utf8(const unsigned char *s, size_t n, uint32_t *cp);
int tok_compare_keys(TokStr a, TokStr b, bool fold);                 // as memcmp; fold: ASCII letters without case
// False for an absent field, null, false, 0, "", [] and {}.
bool tok_json_is_set(const GgufJson *v);
// Removes the ']' of the list and makes room for one more message of at most n bytes, so that nothing fails after it.
bool tok_open_list(TokText *messages, size_t n);

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
    TOK__SHORT = 32,                  // up to so many symbols, merging scans for the minimum; longer pieces use a heap
    TOK__MAX_SPECIAL = 16,            // bytes of the longest special string
    TOK__NO_CHAR = 0x110000,          // "no code point before this one"
    TOK__REPLACEMENT = 0xFFFD,
    TOK__SPACE = 0x2581
};
enum { TOK__TYPE_CONTROL = 3, TOK__TYPE_BYTE = 6 };                       // TokVocab.types
#define TOK__NO_RANK UINT32_MAX

// The special strings. Each starts with '<', ends with '>' and has neither inside, so two occurrences cannot overlap.
// They are recognised by text, not by type, because files disagree about the types.
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
    { "<|tool_response>", false, offsetof(Tokenizer, response_open) },    // stops generation: not from untrusted text
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

// Fills t->err and returns -1.
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

int tok_push_id(Tokenizer *t, TokIds *v, int32_t id) {
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

// Makes room for n more bytes. False: out of memory.
static bool tok__room(TokText *v, size_t n) {
    if (n <= v->cap - v->n) return true;
    if (n > SIZE_MAX / 2 - v->n) return false;
    size_t cap = v->n + n < 256 ? 256 : (v->n + n) / 2 * 3;
    char *s = realloc(v->s, cap);
    if (!s) return false;
    v->s = s;
    v->cap = cap;
    return true;
}

void tok_pictures_free(TokPictures *v) {
    free(v->of);
    *v = (TokPictures){ 0 };
}

bool tok_text_append(TokText *v, const char *s, size_t n) {
    if (!tok__room(v, n)) return false;
    if (n) memcpy(v->s + v->n, s, n);
    v->n += n;
    return true;
}

void tok_text_free(TokText *v) {
    free(v->s);
    *v = (TokText){ 0 };
}

// ---- UTF-8 ----------------------------------------------------------------------------------------------------------

int tok_read_utf8(const unsigned char *s, size_t n, uint32_t *cp) {
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

// First and last code point of a text; false unless it is valid UTF-8 and not empty.
static bool tok__ends(TokStr s, uint32_t *first, uint32_t *last) {
    for (size_t i = 0; i < s.n; ) {
        int len = tok_read_utf8((const unsigned char *)s.s + i, s.n - i, last);
        if (len <= 0) return false;
        if (i == 0) *first = *last;
        i += (size_t)len;
    }
    return s.n > 0;
}

// True: white space that the trim filter of chat templates removes.
static bool tok__is_space(uint32_t c) {
    return (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

TokStr tok_trim(TokStr s) {
    uint32_t c = 0;
    int len;
    while (s.n && (len = tok_read_utf8((const unsigned char *)s.s, s.n, &c)) > 0 && tok__is_space(c)) {
        s.s += len;
        s.n -= (size_t)len;
    }
    while (s.n) {
        size_t from = s.n - 1;                        // back to the lead byte; no white space is longer than 3 bytes
        while (from && s.n - from < 3 && ((unsigned char)s.s[from] & 0xC0) == 0x80) from--;
        len = tok_read_utf8((const unsigned char *)s.s + from, s.n - from, &c);
        if (len != (int)(s.n - from) || !tok__is_space(c)) break;
        s.n = from;
    }
    return s;
}

// ---- tables ---------------------------------------------------------------------------------------------------------
// All hash tables use open addressing with linear probing; the number of slots is a power of two, at most half are
// used. The hash depends on the table's address, which the author of a malicious file cannot predict: otherwise a file
// of 6 MB whose keys all hash to one slot would take a minute to load. Results do not depend on the hash.

static size_t tok__slots(size_t n) {
    size_t slots = 16;
    while (slots < 2 * n) slots *= 2;
    return slots;
}

// 2^64 / golden ratio
#define TOK__GOLDEN 0x9E3779B97F4A7C15u

// Two multiplications: with one, keys that collide for one address are often near each other for another address.
static inline size_t tok__mix(const void *table, uint64_t key) {
    key = (key ^ (uint64_t)(uintptr_t)table * TOK__GOLDEN) * TOK__GOLDEN;
    key = (key ^ key >> 32) * TOK__GOLDEN;
    return (size_t)(key ^ key >> 32);
}

// The slot of the merge (left, right), or a free slot, which has the rank TOK__NO_RANK.
static inline const Tok__Merge *tok__find_merge(const Tokenizer *t, int32_t left, int32_t right) {
    size_t i = tok__mix(t->merge, (uint64_t)(uint32_t)left << 32 | (uint32_t)right);
    for (;; i++) {
        const Tok__Merge *m = &t->merge[i & t->merge_mask];
        if (m->left < 0 || (m->left == left && m->right == right)) return m;
    }
}

// The pair of code points (a, b) is in the set if some merge joins a text that ends in a with one that starts with b.
// No merge can cross the boundary between two neighbours that are not in the set, because the first merge that does so
// would put them into the set. So the text can be cut there, without changing the result, into pieces of about one
// word.
static inline uint64_t tok__join_key(uint32_t a, uint32_t b) { return ((uint64_t)a << 21 | b) + 1; }   // 0: free slot

static inline bool tok__joins(const Tokenizer *t, uint32_t a, uint32_t b) {
    uint64_t key = tok__join_key(a, b);
    for (size_t i = tok__mix(t->join, key); ; i++) {
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
        if (!join) return tok__fail(t, "out of memory for %zu character pairs", t->n_join);
        for (size_t j = 0; j <= t->join_mask; j++) {
            if (!t->join[j]) continue;
            size_t i = tok__mix(join, t->join[j]);
            while (join[i & (slots - 1)]) i++;
            join[i & (slots - 1)] = t->join[j];
        }
        free(t->join);
        t->join = join;
        t->join_mask = slots - 1;
    }
    size_t i = tok__mix(t->join, tok__join_key(a, b));
    while (t->join[i & t->join_mask]) i++;
    t->join[i & t->join_mask] = tok__join_key(a, b);
    t->n_join++;
    return 0;
}

// Hash table from text to id, used only while the tables are built.
typedef struct { uint32_t hash; int32_t id; } Tok__Slot;              // id -1: free slot
typedef struct { const TokStr *tokens; Tok__Slot *slot; size_t mask; } Tok__Texts;

static uint64_t tok__hash(uint64_t h, TokStr s) {                     // FNV-1a, continued from h
    for (size_t i = 0; i < s.n; i++) h = (h ^ (unsigned char)s.s[i]) * 0x100000001B3u;
    return h;
}
static uint64_t tok__hash_start(const Tok__Texts *x) {
    return 0xCBF29CE484222325u ^ (uint64_t)(uintptr_t)x->slot * TOK__GOLDEN;
}

// The slot of the token whose text is a followed by b, or a free slot. h is the hash of both.
static Tok__Slot *tok__find_text(const Tok__Texts *x, uint64_t h, TokStr a, TokStr b) {
    size_t i = tok__mix(x->slot, h);
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
    return a.n ? tok__find_text(x, tok__hash(tok__hash_start(x), a), a, (TokStr){ NULL, 0 })->id : -1;
}

int tok_hex_digit(unsigned char c) {
    return c >= '0' && c <= '9' ? c - '0' : c >= 'A' && c <= 'F' ? c - 'A' + 10 : c >= 'a' &&
        c <= 'f' ? c - 'a' + 10 : -1;
}

// The byte of a text of the form <0xHH>, or -1.
static int tok__byte_of(TokStr s) {
    if (s.n != 6 || memcmp(s.s, "<0x", 3) != 0 || s.s[5] != '>') return -1;
    int high = tok_hex_digit((unsigned char)s.s[3]), low = tok_hex_digit((unsigned char)s.s[4]);
    return high < 0 || low < 0 ? -1 : high * 16 + low;
}

// Fills x, kind[], byte_id[], the special ids and the code point table.
static int tok__index_tokens(Tokenizer *t, const TokVocab *v, Tok__Texts *x) {
    size_t slots = tok__slots((size_t)v->n_tokens);
    x->tokens = v->tokens;
    x->mask = slots - 1;
    x->slot = malloc(slots * sizeof *x->slot);
    t->kind = calloc((size_t)v->n_tokens, 1);
    t->code_point = calloc(0x110000, sizeof *t->code_point);          // pages that are never written use no memory
    if (!x->slot || !t->kind || !t->code_point) return tok__fail(t, "out of memory for %d tokens", v->n_tokens);
    memset(x->slot, 0xFF, slots * sizeof *x->slot);

    for (int id = 0; id < v->n_tokens; id++) {
        TokStr text = v->tokens[id];
        if (!text.n) continue;                                        // never encoded; decodes to nothing
        if (!text.s) return tok__fail(t, "token %d: expected %zu bytes of text, got none", id, text.n);
        uint64_t h = tok__hash(tok__hash_start(x), text);
        Tok__Slot *slot = tok__find_text(x, h, text, (TokStr){ NULL, 0 });
        if (slot->id < 0) *slot = (Tok__Slot){ (uint32_t)(h >> 32), id };   // a repeated text: the first id is used

        int byte = tok__byte_of(text);
        if (v->types && v->types[id] == TOK__TYPE_CONTROL) t->kind[id] = TOK_KIND_HIDDEN;
        if (v->types ? v->types[id] == TOK__TYPE_BYTE : byte >= 0) {
            if (byte < 0) return tok__fail(t, "token %d: expected a byte token <0x00>..<0xFF>, got another text", id);
            t->kind[id] = TOK_KIND_BYTE;
            if (t->byte_id[byte] < 0) t->byte_id[byte] = id;
        }
    }
    for (int i = 0; i < TOK__N_SPECIALS; i++) {
        TokStr text = { tok__specials[i].text, strlen(tok__specials[i].text) };
        int32_t id = *tok__special_id(t, i) = tok__id_of(x, text);
        if (id >= 0) t->kind[id] = TOK_KIND_HIDDEN;
    }
    for (int id = v->n_tokens - 1; id >= 0; id--) {                   // descending, so that the lowest id is used
        uint32_t first = 0;
        TokStr text = v->tokens[id];
        if (text.n && text.n <= 4 && t->kind[id] == TOK_KIND_NORMAL &&
            tok_read_utf8((const unsigned char *)text.s, text.n, &first) == (int)text.n)
            t->code_point[first] = id + 1;
    }
    return 0;
}

// Fills the merge table and the join set. Merges with byte tokens or hidden tokens are ignored, so that plain text can
// never become a control token.
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
        uint64_t h = tok__hash(tok__hash_start(x), l);
        int32_t left = tok__find_text(x, h, l, (TokStr){ NULL, 0 })->id;
        int32_t right = tok__id_of(x, r);
        int32_t merged = tok__find_text(x, tok__hash(h, r), l, r)->id;
        uint32_t l_first, l_last = 0, r_first = 0, r_last;
        if (left < 0 || right < 0 || merged < 0 || t->kind[left] || t->kind[right] || t->kind[merged] ||
            !tok__ends(l, &l_first, &l_last) || !tok__ends(r, &r_first, &r_last)) { t->n_skipped++; continue; }
        Tok__Merge *slot = &t->merge[tok__find_merge(t, left, right) - t->merge];
        if (slot->left >= 0) continue;                                // a repeated merge: the lower rank is used
        *slot = (Tok__Merge){ left, right, (uint32_t)rank, merged };
        if (tok__add_join(t, l_last, r_first) < 0) return -1;
    }
    return 0;
}

// Fills pieces, piece_at and stream_cap. A byte token decodes to its byte, a hidden token to its text, other tokens to
// their text with spaces for U+2581.
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
        if (t->kind[id] == TOK_KIND_BYTE) {
            t->pieces[at++] = (char)tok__byte_of(text);
        } else for (size_t i = 0; i < text.n; ) {
            if (t->kind[id] == TOK_KIND_NORMAL && text.n - i >= 3 && memcmp(text.s + i, "\xE2\x96\x81", 3) == 0) {
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
    if (id >= 0 && t->n_stop < TOK_MAX_STOPS && !tok_is_stop(t, id)) t->stop[t->n_stop++] = id;
}

static bool tok__contains(TokStr s, const char *what) {
    size_t n = strlen(what);
    for (size_t i = 0; i + n <= s.n; i++)
        if (memcmp(s.s + i, what, n) == 0) return true;
    return false;
}

// Finds the variant and version of the file's chat template by the names in it, because its bytes differ between
// publishers.
static void tok__read_template(Tokenizer *t, const TokVocab *v) {
    const TokStr s = v->chat_template;
    t->large_variant = s.n ? tok__contains(s, "<|channel>thought\\n<channel|>") : !v->has_ple;   // the source has \n
    t->chat_template = !s.n ? TOK_TEMPLATE_NONE
                     : !tok__contains(s, "<|turn>") || !tok__contains(s, "enable_thinking") ? TOK_TEMPLATE_OTHER
                     : tok__contains(s, "preserve_thinking") ? TOK_TEMPLATE_CANONICAL
                     : tok__contains(s, "tool_call_id") ? TOK_TEMPLATE_SPRING
                     : tok__contains(s, "tool_responses") ? TOK_TEMPLATE_LAUNCH : TOK_TEMPLATE_OTHER;
}

static int tok__check(Tokenizer *t, const TokVocab *v) {
    if (v->n_tokens < 1 || !v->tokens) return tok__fail(t, "tokens: expected at least 1, got %d", v->n_tokens);
    if (v->n_merges < 0 || (v->n_merges && !v->merges))
        return tok__fail(t, "merges: expected a list, got %d", v->n_merges);
    const struct { const char *name; int id; } given[] = { { "bos", v->bos }, { "eos", v->eos }, { "eot", v->eot } };
    for (size_t i = 0; i < 3; i++)
        if (given[i].id < -1 || given[i].id >= v->n_tokens)
            return tok__fail(t, "%s token id: expected 0..%d, got %d", given[i].name, v->n_tokens - 1, given[i].id);
    for (int i = 0; i < v->n_ends; i++)
        if (v->ends[i] < 0 || v->ends[i] >= v->n_tokens)
            return tok__fail(t, "end token id: expected 0..%d, got %d", v->n_tokens - 1, v->ends[i]);
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
    for (int i = 0; i < v->n_ends; i++) tok__add_stop(t, v->ends[i]);
    tok__read_template(t, v);
    return 0;
}

void tok_free(Tokenizer *t) {                                         // keeps err
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
// The symbols of a piece are appended to the result and merged in place.

// Merges id[0..n), n <= TOK__SHORT. Returns how many symbols are left. For a word, scanning for the lowest rank is
// faster than a heap.
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
            if (rank[i] < rank[best]) best = i;       // <: the leftmost on ties
        if (rank[best] == TOK__NO_RANK) break;
        id[best] = merged[best];
        n--;
        for (size_t i = best + 1; i < n; i++) {
            id[i] = id[i + 1];
            rank[i - 1] = rank[i];                    // removes rank[best]; set again below unless best is now the last
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
// pair at its position has another rank by now (no two pairs have the same rank). Each merge removes one entry and adds
// at most two, so capacity 2n is enough.
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

// Merges the piece out->ids[start..out->n).
static int tok__merge_piece(Tokenizer *t, TokIds *out, size_t start) {
    size_t n = out->n - start;
    if (n < 2) return 0;
    if (n <= TOK__SHORT) n = tok__merge_short(t, out->ids + start, n);
    else if (tok__merge_long(t, out->ids + start, &n) < 0) return -1;
    out->n = start + n;
    return 0;
}

// Encodes text without special strings.
static int tok__encode_run(Tokenizer *t, const unsigned char *s, size_t n, TokIds *out) {
    size_t start = out->n;                            // where the current piece starts in out
    uint32_t before = TOK__NO_CHAR;                   // its last code point
    for (size_t i = 0; i < n; ) {
        uint32_t c;
        int len = tok_read_utf8(s + i, n - i, &c);
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
            if (tok_push_id(t, out, id) < 0) return -1;
            continue;
        }
        char bytes[4];                                // no token for it: its bytes, which are never merged
        const size_t n_bytes = gguf_utf8(c, bytes);
        for (size_t b = 0; b < n_bytes; b++) {
            const unsigned byte = (unsigned char)bytes[b];
            if (t->byte_id[byte] < 0)
                return tok__fail(t, "cannot encode U+%04X: the vocabulary has no token <0x%02X>", (unsigned)c, byte);
            if (tok_push_id(t, out, t->byte_id[byte]) < 0) return -1;
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
        if (tok__encode_run(t, (const unsigned char *)text + from, i - from, out) < 0 || tok_push_id(t, out, id) < 0)
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
    if (id < 0 || id >= t->n_tokens || (t->kind[id] == TOK_KIND_HIDDEN && !show_special)) return (TokStr){ "", 0 };
    return (TokStr){ t->pieces + t->piece_at[id], t->piece_at[id + 1] - t->piece_at[id] };
}

bool tok_is_stop(const Tokenizer *t, int32_t id) {
    for (int i = 0; i < t->n_stop; i++)
        if (t->stop[i] == id) return true;
    return false;
}

// Appends n bytes if they fit.
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
        while (s->n) {                                // removes whole characters and invalid bytes from the front
            uint32_t c;
            int len = tok_read_utf8(s->pending, (size_t)s->n, &c);
            if (len < 0) break;                       // at most 3 bytes of an incomplete character
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

// ---- chat: JSON -----------------------------------------------------------------------------------------------------

static void tok__escape(TokText *out, unsigned char c) {              // the caller has made room for 6 bytes
    static const char from[] = "\"\\\n\t\r\b\f", to[] = "\"\\ntrbf", hex[] = "0123456789abcdef";
    const char *at = c ? strchr(from, c) : NULL;
    if (at || c < 0x20) out->s[out->n++] = '\\';
    if (at) {
        out->s[out->n++] = to[at - from];
    } else if (c < 0x20) {
        memcpy(out->s + out->n, "u00", 3);
        out->s[out->n + 3] = hex[c >> 4];
        out->s[out->n + 4] = hex[c & 15];
        out->n += 5;
    } else {
        out->s[out->n++] = (char)c;
    }
}

int tok_add_json_string(TokText *out, TokStr s) {
    if (s.n > SIZE_MAX / 16 || !tok__room(out, 6 * s.n + 2)) return -1;
    out->s[out->n++] = '"';
    for (size_t i = 0; i < s.n; i++) tok__escape(out, (unsigned char)s.s[i]);
    out->s[out->n++] = '"';
    return 0;
}

static void tok__literal(TokText *out, const char *s) { tok_text_append(out, s, strlen(s)); }

bool tok_open_list(TokText *messages, size_t n) {
    if (n > SIZE_MAX / 4 || !tok__room(messages, n + 3)) return false;
    while (messages->n && messages->s[messages->n - 1] != ']') messages->n--;     // white space after the list
    if (messages->n) messages->n--;
    else messages->s[messages->n++] = '[';
    size_t last = messages->n;
    while (last && memchr(" \t\r\n", messages->s[last - 1], 4)) last--;
    if (last && messages->s[last - 1] != '[') messages->s[messages->n++] = ',';
    return true;
}

// Appends a message with a role and a text, and a name unless its s is NULL.
static int tok__add_text(TokText *messages, TokStr role, TokStr name, TokStr content) {
    const bool fits = role.n < SIZE_MAX / 64 && name.n < SIZE_MAX / 64 && content.n < SIZE_MAX / 64;
    if (!fits || !tok_open_list(messages, 6 * (role.n + name.n + content.n) + 64)) return -1;
    tok__literal(messages, "{\"role\":");
    tok_add_json_string(messages, role);
    if (name.s) {
        tok__literal(messages, ",\"name\":");
        tok_add_json_string(messages, name);
    }
    tok__literal(messages, ",\"content\":");
    tok_add_json_string(messages, content);
    tok__literal(messages, "}]");
    return 0;
}

int tok_add_message(TokText *messages, const char *role, TokStr content) {
    return tok__add_text(messages, (TokStr){ role, strlen(role) }, (TokStr){ NULL, 0 }, content);
}

int tok_add_result(TokText *messages, TokStr name, TokStr content) {
    return tok__add_text(messages, (TokStr){ "tool", 4 }, name, content);
}

int tok_add_reply(TokText *messages, const TokReply *r) {
    size_t n = 256;
    bool fits = r->content.n < SIZE_MAX / 64 && r->thought.n < SIZE_MAX / 64;
    if (fits) n += 6 * (r->content.n + r->thought.n);
    for (int i = 0; i < r->n_calls; i++) n += 6 * r->calls[i].name.n + r->calls[i].arguments.n + 160;
    if (!fits || !tok_open_list(messages, n)) return -1;
    const size_t at = messages->n;                    // makes the ids of the calls unique
    tok__literal(messages, "{\"role\":\"assistant\",\"content\":");
    tok_add_json_string(messages, (TokStr){ r->content.s, r->content.n });
    if (r->thought.n) {
        tok__literal(messages, ",\"reasoning_content\":");
        tok_add_json_string(messages, (TokStr){ r->thought.s, r->thought.n });
    }
    for (int i = 0; i < r->n_calls; i++) {
        char open[128];
        snprintf(open, sizeof open, "%s{\"id\":\"call_%zu_%d\",\"type\":\"function\",\"function\":{\"name\":",
                 i ? "," : ",\"tool_calls\":[", at, i);
        tok__literal(messages, open);
        tok_add_json_string(messages, r->calls[i].name);
        tok__literal(messages, ",\"arguments\":");
        tok_text_append(messages, r->calls[i].arguments.s, r->calls[i].arguments.n);
        tok__literal(messages, "}}");
    }
    tok__literal(messages, r->n_calls ? "]}]" : "}]");
    return 0;
}

enum { TOK__MISSING = -1 };                                           // GgufJson.type of an absent field

// Looks up n names of an object in one pass. A value that is not an object has no fields.
static void tok__fields(const GgufJson *object, const char *const *names, GgufJson *out, int n) {
    GgufJson rest = *object, name, value;
    for (int i = 0; i < n; i++) out[i] = (GgufJson){ TOK__MISSING, NULL, 0 };
    if (object->type != GGUF_J_OBJECT) return;
    while (gguf_json_next(&rest, &name, &value))
        for (int i = 0; i < n; i++)
            if (gguf_json_is(&name, names[i])) out[i] = value;
}

bool tok_json_is_set(const GgufJson *v) {
    GgufJson rest = *v, value;
    double x = 1;
    switch (v->type) {
    case GGUF_J_TRUE: return true;
    case GGUF_J_NUMBER: return !gguf_json_float(v, &x) || x != 0;
    case GGUF_J_STRING: return v->n > 2;
    case GGUF_J_ARRAY: case GGUF_J_OBJECT: return gguf_json_next(&rest, NULL, &value);
    default: return false;
    }
}

// True: a string equal to `word`, which is in capitals, ignoring case.
static bool tok__is_word(const GgufJson *v, const char *word) {
    char s[64];
    if (v->type != GGUF_J_STRING || v->n > sizeof s) return false;
    size_t n = gguf_json_string(v, s);
    for (size_t i = 0; i < n; i++) if (s[i] >= 'a' && s[i] <= 'z') s[i] = (char)(s[i] - 32);
    return n == strlen(word) && memcmp(s, word, n) == 0;
}

// ---- chat: prompt ---------------------------------------------------------------------------------------------------
// A prompt is a list of markers, inserted by id, and plain texts. The text between two markers is collected in `run`
// and encoded as one text, in TOK_PLAIN mode: if a user writes "<turn|>", it becomes characters, not the token. The
// rules are those of Google's template. After a failure nothing more is written.

typedef struct {
    Tokenizer *t;
    TokIds *ids;
    TokText *text;            // the prompt as text, or NULL
    TokText run;              // plain text that is not encoded yet
    const TokChat *c;
    size_t first;             // ids that were there before the prompt
    bool failed;              // t->err says why
} Tok__Prompt;

#define TOK__REFUSE(p, ...) do { if (!(p)->failed) tok__fail((p)->t, __VA_ARGS__); (p)->failed = true; } while (0)

static bool tok__room_in_run(Tok__Prompt *p, size_t n) {
    if (!p->failed && !tok__room(&p->run, n)) TOK__REFUSE(p, "out of memory for a text of %zu bytes", p->run.n + n);
    return !p->failed;
}

static void tok__put_bytes(Tok__Prompt *p, const char *s, size_t n) {
    if (tok__room_in_run(p, n)) tok_text_append(&p->run, s, n);
}

static void tok__put(Tok__Prompt *p, const char *s) { tok__put_bytes(p, s, strlen(s)); }

static void tok__put_string(Tok__Prompt *p, const GgufJson *v) {      // the decoded characters of a JSON string
    if (tok__room_in_run(p, v->n)) p->run.n += gguf_json_string(v, p->run.s + p->run.n);
}

// Refuses a prompt that has too many ids for sure: by the length of the text to come alone, or twice as many in all.
// Others are encoded, so that their length is known exactly.
static void tok__check_most(Tok__Prompt *p) {
    const size_t more = tok_least(p->t, p->run.n), least = p->ids->n - p->first + more, most = p->c->most;
    if (!most || (more <= most && least <= 2 * most)) return;
    if (p->c->least) *p->c->least = least;
    TOK__REFUSE(p, "chat: expected a prompt of at most %zu tokens, got at least %zu", most, least);
}

static void tok__end_run(Tok__Prompt *p) {
    if (p->failed || !p->run.n) return;
    tok__check_most(p);
    if (p->failed) return;
    if (tok_encode(p->t, p->run.s, p->run.n, TOK_PLAIN, p->ids) < 0) p->failed = true;
    else if (p->text && !tok_text_append(p->text, p->run.s, p->run.n))
        TOK__REFUSE(p, "out of memory for the text of a prompt");
    p->run.n = 0;
}

static void tok__put_id(Tok__Prompt *p, int32_t id, const char *text) {
    tok__end_run(p);
    if (p->failed) return;
    if (id < 0) TOK__REFUSE(p, "chat: the vocabulary has no token %s", text);
    else if (tok_push_id(p->t, p->ids, id) < 0) p->failed = true;
    else if (p->text && !tok_text_append(p->text, text, strlen(text)))
        TOK__REFUSE(p, "out of memory for the text of a prompt");
}

// A marker, named by its field: tok__put_tag(p, &p->t->turn_open).
static void tok__put_tag(Tok__Prompt *p, const int32_t *field) {
    for (int i = 0; i < TOK__N_SPECIALS; i++)
        if (tok__special_id(p->t, i) == field) tok__put_id(p, *field, tok__specials[i].text);
}

// A quoted string value.
static void tok__put_quoted(Tok__Prompt *p, const GgufJson *v) {
    tok__put_tag(p, &p->t->quote);
    if (v->type == GGUF_J_STRING) tok__put_string(p, v);
    else if (v->type > GGUF_J_NULL) tok__put_bytes(p, v->s, v->n);
    tok__put_tag(p, &p->t->quote);
}

// Trims the text in run from offset `from` on. In an assistant's text it also removes thoughts: everything from
// "<|channel>" to "<channel|>".
static void tok__tidy(Tok__Prompt *p, size_t from, bool cut_thoughts) {
    if (p->failed) return;
    char *s = p->run.s;
    size_t n = p->run.n, to = from;
    bool inside = false;
    for (size_t i = from; cut_thoughts && i < n; ) {
        const bool tag = s[i] == '<' && n - i >= 10;
        if (tag && memcmp(s + i, "<channel|>", 10) == 0) inside = false, i += 10;
        else if (tag && memcmp(s + i, "<|channel>", 10) == 0) inside = true, i += 10;
        else if (inside) i++;
        else s[to++] = s[i++];
    }
    if (cut_thoughts) p->run.n = to;
    const TokStr trimmed = tok_trim((TokStr){ s + from, p->run.n - from });
    if (trimmed.n) memmove(s + from, trimmed.s, trimmed.n);
    p->run.n = from + trimmed.n;
}

// The members of an object in the order of the template: sorted by key with ASCII letters in lower case; equal ones
// keep their order. A repeated key has its last value, at its first position.
typedef struct { TokStr key; size_t at; GgufJson name, value; } Tok__Member;

int tok_compare_keys(TokStr a, TokStr b, bool fold) {
    for (size_t i = 0; i < a.n && i < b.n; i++) {
        int x = (unsigned char)a.s[i], y = (unsigned char)b.s[i];
        if (fold && x >= 'A' && x <= 'Z') x += 32;
        if (fold && y >= 'A' && y <= 'Z') y += 32;
        if (x != y) return x - y;
    }
    return (a.n > b.n) - (a.n < b.n);
}

static int tok__by_key(const void *a, const void *b) {
    const Tok__Member *x = a, *y = b;
    const int c = tok_compare_keys(x->key, y->key, false);
    return c ? c : (x->at > y->at) - (x->at < y->at);
}

static int tok__by_folded_key(const void *a, const void *b) {
    const Tok__Member *x = a, *y = b;
    const int c = tok_compare_keys(x->key, y->key, true);
    return c ? c : (x->at > y->at) - (x->at < y->at);
}

static Tok__Member *tok__members(Tok__Prompt *p, const GgufJson *object, size_t *n) {      // the caller frees it
    GgufJson rest = *object, name, value;
    size_t key_bytes = 0, n_all = 0, at = 0;
    *n = 0;
    if (p->failed || object->type != GGUF_J_OBJECT) return NULL;
    for (; gguf_json_next(&rest, &name, &value); n_all++) key_bytes += name.n;
    Tok__Member *m = malloc(n_all * sizeof *m + key_bytes + 1);
    if (!m) {
        TOK__REFUSE(p, "out of memory for %zu members of an object", n_all);
        return NULL;
    }
    char *keys = (char *)(m + n_all);
    for (rest = *object; gguf_json_next(&rest, &name, &value); at++) {
        m[at] = (Tok__Member){ { keys, gguf_json_string(&name, keys) }, at, name, value };
        keys += m[at].key.n;
    }
    qsort(m, n_all, sizeof *m, tok__by_key);
    for (size_t i = 0; i < n_all; i++) {
        if (*n && tok_compare_keys(m[*n - 1].key, m[i].key, false) == 0) m[*n - 1].value = m[i].value;
        else m[(*n)++] = m[i];
    }
    qsort(m, *n, sizeof *m, tok__by_folded_key);
    return m;
}

// Writes a number as Python prints it: integers unchanged, others with the fewest digits that parse to the same value.
static void tok__put_number(Tok__Prompt *p, const GgufJson *v) {
    double x;
    char digits[32], out[64];
    bool whole = true;
    for (size_t i = 0; i < v->n; i++) whole &= v->s[i] != '.' && v->s[i] != 'e' && v->s[i] != 'E';
    if (whole || !gguf_json_float(v, &x)) {
        if (whole && v->n == 2 && memcmp(v->s, "-0", 2) == 0) tok__put(p, "0");
        else tok__put_bytes(p, v->s, v->n);
        return;
    }
    for (int n = 0; n < 17; n++) {
        snprintf(digits, sizeof digits, "%.*e", n, x);
        if (strtod(digits, NULL) == x) break;
    }
    const int exponent = atoi(strchr(digits, 'e') + 1);
    if (exponent < -4 || exponent >= 16) {                            // d.ddde+XX, unchanged
        tok__put(p, digits);
        return;
    }
    int n_digits = 0;
    for (const char *s = digits; *s != 'e'; s++) n_digits += *s >= '0' && *s <= '9';
    snprintf(out, sizeof out, "%.*f", n_digits - 1 - exponent > 0 ? n_digits - 1 - exponent : 1, x);
    tok__put(p, out);
}

static void tok__put_value(Tok__Prompt *p, const GgufJson *v, bool wrap_keys);

// The members of an object, without its braces.
static void tok__put_members(Tok__Prompt *p, const GgufJson *object, bool wrap_keys) {
    size_t n;
    Tok__Member *m = tok__members(p, object, &n);
    for (size_t i = 0; i < n && !p->failed; i++) {
        if (i) tok__put(p, ",");
        if (wrap_keys) tok__put_quoted(p, &m[i].name);
        else tok__put_string(p, &m[i].name);
        tok__put(p, ":");
        tok__put_value(p, &m[i].value, wrap_keys);
    }
    free(m);
}

// wrap_keys: the keys of objects are quoted too, as in declarations. The depth of recursion is bounded by JSON's depth.
static void tok__put_value(Tok__Prompt *p, const GgufJson *v, bool wrap_keys) {
    GgufJson rest = *v, value;
    bool first = true;
    switch (v->type) {
    case GGUF_J_STRING: tok__put_quoted(p, v); break;
    case GGUF_J_NUMBER: tok__put_number(p, v); break;
    case GGUF_J_TRUE:   tok__put(p, "true"); break;
    case GGUF_J_FALSE:  tok__put(p, "false"); break;
    case GGUF_J_ARRAY:
        tok__put(p, "[");
        for (; !p->failed && gguf_json_next(&rest, NULL, &value); first = false) {
            if (!first) tok__put(p, ",");
            tok__put_value(p, &value, wrap_keys);
        }
        tok__put(p, "]");
        break;
    case GGUF_J_OBJECT:
        tok__put(p, "{");
        tok__put_members(p, v, wrap_keys);
        tok__put(p, "}");
        break;
    default: tok__put(p, "null");
    }
}

// A schema's type in capitals (of ASCII letters); a list of types as Python prints it.
static void tok__put_type(Tok__Prompt *p, const GgufJson *type) {
    GgufJson rest = *type, value;
    const size_t from = p->run.n;
    bool first = true;
    if (type->type == GGUF_J_STRING) tok__put_string(p, type);
    if (type->type == GGUF_J_ARRAY) {
        tok__put(p, "[");
        for (; gguf_json_next(&rest, NULL, &value); first = false) {
            tok__put(p, first ? "'" : ", '");
            if (value.type == GGUF_J_STRING) tok__put_string(p, &value);
            tok__put(p, "'");
        }
        tok__put(p, "]");
    }
    for (size_t i = from; i < p->run.n; i++)
        if (p->run.s[i] >= 'a' && p->run.s[i] <= 'z') p->run.s[i] = (char)(p->run.s[i] - 32);
}

static void tok__put_quoted_type(Tok__Prompt *p, const GgufJson *type) {
    tok__put_tag(p, &p->t->quote);
    tok__put_type(p, type);
    tok__put_tag(p, &p->t->quote);
}

static void tok__put_required(Tok__Prompt *p, const GgufJson *names) {
    GgufJson rest = *names, name;
    bool first = true;
    tok__put(p, "required:[");
    for (; names->type == GGUF_J_ARRAY && gguf_json_next(&rest, NULL, &name); first = false) {
        if (!first) tok__put(p, ",");
        tok__put_quoted(p, &name);
    }
    tok__put(p, "]");
}

static void tok__put_properties(Tok__Prompt *p, const GgufJson *object, bool is_schema);

// items:{...} of an array's schema.
static void tok__put_items(Tok__Prompt *p, const GgufJson *items) {
    size_t n;
    Tok__Member *m = tok__members(p, items, &n);
    bool first = true;
    tok__put(p, "items:{");
    for (size_t i = 0; i < n && !p->failed; i++) {
        GgufJson rest = m[i].value, value;
        if (m[i].value.type == GGUF_J_NULL) continue;
        if (!first) tok__put(p, ",");
        first = false;
        if (gguf_json_is(&m[i].name, "properties")) {
            tok__put(p, "properties:{");
            tok__put_properties(p, &m[i].value, false);
            tok__put(p, "}");
        } else if (gguf_json_is(&m[i].name, "required")) {
            tok__put_required(p, &m[i].value);
        } else if (gguf_json_is(&m[i].name, "type") && m[i].value.type == GGUF_J_ARRAY) {
            tok__put(p, "type:[");
            for (bool one = false; gguf_json_next(&rest, NULL, &value); one = true) {
                if (one) tok__put(p, ",");
                tok__put_quoted_type(p, &value);
            }
            tok__put(p, "]");
        } else if (gguf_json_is(&m[i].name, "type")) {
            tok__put(p, "type:");
            tok__put_quoted_type(p, &m[i].value);
        } else {
            tok__put_string(p, &m[i].name);
            tok__put(p, ":");
            tok__put_value(p, &m[i].value, true);
        }
    }
    tok__put(p, "}");
    free(m);
}

// KEY:{...} of each property. is_schema: the object is a schema without properties; as in the template, its other keys
// are treated as properties.
static void tok__put_properties(Tok__Prompt *p, const GgufJson *object, bool is_schema) {
    static const char *const names[] = { "description", "type", "properties", "required", "nullable", "enum", "items" };
    enum { DESCRIPTION, TYPE, PROPERTIES, REQUIRED, NULLABLE, ENUM, ITEMS, N_FIELDS };
    size_t n;
    Tok__Member *m = tok__members(p, object, &n);
    bool first = true;
    for (size_t i = 0; i < n && !p->failed; i++) {
        GgufJson f[N_FIELDS];
        bool standard = false;
        for (int k = 0; k <= NULLABLE; k++) standard |= gguf_json_is(&m[i].name, names[k]);
        if (is_schema && standard) continue;
        if (!first) tok__put(p, ",");
        first = false;
        tok__fields(&m[i].value, names, f, N_FIELDS);
        tok__put_string(p, &m[i].name);
        tok__put(p, ":{");
        if (tok_json_is_set(&f[DESCRIPTION])) {
            tok__put(p, "description:");
            tok__put_quoted(p, &f[DESCRIPTION]);
            tok__put(p, ",");
        }
        if (tok__is_word(&f[TYPE], "STRING") && tok_json_is_set(&f[ENUM])) {
            tok__put(p, "enum:");
            tok__put_value(p, &f[ENUM], true);
            tok__put(p, ",");
        }
        if (tok__is_word(&f[TYPE], "ARRAY") && f[ITEMS].type == GGUF_J_OBJECT && tok_json_is_set(&f[ITEMS])) {
            tok__put_items(p, &f[ITEMS]);
            tok__put(p, ",");
        }
        if (tok_json_is_set(&f[NULLABLE])) tok__put(p, "nullable:true,");
        if (tok__is_word(&f[TYPE], "OBJECT")) {
            const bool own = f[PROPERTIES].type == GGUF_J_OBJECT;
            tok__put(p, "properties:{");
            tok__put_properties(p, own ? &f[PROPERTIES] : &m[i].value, !own);
            tok__put(p, "},");
            if (tok_json_is_set(&f[REQUIRED])) {
                tok__put_required(p, &f[REQUIRED]);
                tok__put(p, ",");
            }
        }
        tok__put(p, "type:");
        tok__put_quoted_type(p, &f[TYPE]);
        tok__put(p, "}");
    }
    free(m);
}

// The declaration of tool i. A missing type is written as object: in the template, a missing type leaves a brace open.
static void tok__put_tool(Tok__Prompt *p, const GgufJson *tool, size_t i) {
    static const char *const wrapper[] = { "function" };
    static const char *const names[] = { "name", "description", "parameters", "response" };
    static const char *const schema[] = { "type", "properties", "required", "description" };
    enum { NAME, DESCRIPTION, PARAMETERS, RESPONSE };
    enum { TYPE, PROPERTIES, REQUIRED, ABOUT };
    const GgufJson object = { GGUF_J_STRING, "\"object\"", 8 };
    GgufJson function, f[4], s[4];
    tok__fields(tool, wrapper, &function, 1);
    tok__fields(function.type == TOK__MISSING ? tool : &function, names, f, 4);
    if (f[NAME].type != GGUF_J_STRING) TOK__REFUSE(p, "tools[%zu].function.name: expected a string", i);
    if (tok_json_is_set(&f[PARAMETERS]) && f[PARAMETERS].type != GGUF_J_OBJECT)
        TOK__REFUSE(p, "tools[%zu].function.parameters: expected an object", i);
    if (p->failed) return;

    tok__put_tag(p, &p->t->tool_open);
    tok__put(p, "declaration:");
    tok__put_string(p, &f[NAME]);
    tok__put(p, "{description:");
    tok__put_quoted(p, &f[DESCRIPTION]);
    if (tok_json_is_set(&f[PARAMETERS])) {
        tok__fields(&f[PARAMETERS], schema, s, 4);
        tok__put(p, ",parameters:{");
        if (tok_json_is_set(&s[PROPERTIES])) {
            tok__put(p, "properties:{");
            tok__put_properties(p, &s[PROPERTIES], false);
            tok__put(p, "},");
        }
        if (tok_json_is_set(&s[REQUIRED])) {
            tok__put_required(p, &s[REQUIRED]);
            tok__put(p, ",");
        }
        if (!tok_json_is_set(&s[TYPE]) && !p->c->exact) s[TYPE] = object;
        if (tok_json_is_set(&s[TYPE])) {
            tok__put(p, "type:");
            tok__put_quoted_type(p, &s[TYPE]);
            tok__put(p, "}");
        }
    }
    if (f[RESPONSE].type == GGUF_J_OBJECT) {
        tok__fields(&f[RESPONSE], schema, s, 4);
        tok__put(p, ",response:{");
        if (tok_json_is_set(&s[ABOUT])) {
            tok__put(p, "description:");
            tok__put_quoted(p, &s[ABOUT]);
            tok__put(p, ",");
        }
        if (!tok_json_is_set(&s[TYPE]) && !p->c->exact) s[TYPE] = object;
        if (tok__is_word(&s[TYPE], "OBJECT") || !p->c->exact) {
            tok__put(p, "type:");
            tok__put_quoted_type(p, &s[TYPE]);
            tok__put(p, "}");
        }
    }
    tok__put(p, "}");
    tok__put_tag(p, &p->t->tool_close);
}

// The placeholder of a content part, or NULL: text and unknown parts.
static const int32_t *tok__placeholder(const Tokenizer *t, const GgufJson *type) {
    return gguf_json_is(type, "image") || gguf_json_is(type, "image_url") ? &t->image
         : gguf_json_is(type, "audio") || gguf_json_is(type, "input_audio") ? &t->audio
         : gguf_json_is(type, "video") ? &t->video : NULL;
}

enum { TOK__ROLE, TOK__TEXT, TOK__REASONING, TOK__REASONING_CONTENT, TOK__CALLS, TOK__RESPONSES, TOK__CALL_ID,
       TOK__NAME, TOK__N_FIELDS };
static const char *const tok__field_names[TOK__N_FIELDS] = {
    "role", "content", "reasoning", "reasoning_content", "tool_calls", "tool_responses", "tool_call_id", "name"
};
typedef struct { size_t number; GgufJson f[TOK__N_FIELDS]; } Tok__Message;     // number: its index in the caller's list

// The next part of a content list: its type; if that is text, its text; the whole part.
static bool tok__next_part(Tok__Prompt *p, const Tok__Message *m, GgufJson *rest, GgufJson part[3]) {
    static const char *const names[] = { "type", "text" };
    GgufJson value;
    if (p->failed || !gguf_json_next(rest, NULL, &value)) return false;
    tok__fields(&value, names, part, 2);
    part[2] = value;
    const bool is_text = gguf_json_is(&part[0], "text");
    if (is_text && part[1].type != GGUF_J_STRING)
        TOK__REFUSE(p, "messages[%zu].content: a text part: expected a string in \"text\"", m->number);
    if (!is_text && !tok__placeholder(p->t, &part[0]))
        TOK__REFUSE(p,
                    "messages[%zu].content: a part: expected type text, image, image_url, audio, input_audio or video",
                    m->number);
    return !p->failed;
}

// Writes the placeholder of a part, and notes where an image stands. An image that the caller puts there needs no token
// <|image|>: any id keeps its place.
static void tok__put_placeholder(Tok__Prompt *p, const int32_t *placeholder, const GgufJson *part) {
    TokPictures *v = placeholder == &p->t->image ? p->c->pictures : NULL;
    if (v) tok__put_id(p, *placeholder < 0 ? 0 : *placeholder, "<|image|>");
    else tok__put_tag(p, placeholder);
    if (p->failed || !v) return;
    if (v->n == v->cap) {
        const size_t cap = v->cap ? 2 * v->cap : 8;
        TokPicture *of = realloc(v->of, cap * sizeof *of);
        if (!of) {
            TOK__REFUSE(p, "out of memory for %zu images", cap);
            return;
        }
        v->of = of;
        v->cap = cap;
    }
    v->of[v->n++] = (TokPicture){ p->ids->n - 1, { part->s, part->n } };
}

// Writes the content of a turn. False: it is empty after trimming.
static bool tok__put_content(Tok__Prompt *p, const Tok__Message *m, bool is_model, bool is_system) {
    const GgufJson *content = &m->f[TOK__TEXT];
    GgufJson rest = *content, part[3];
    size_t from = p->run.n;
    bool any = false;
    switch (content->type) {
    case TOK__MISSING: case GGUF_J_NULL: return false;
    case GGUF_J_STRING:
        tok__put_string(p, content);
        tok__tidy(p, from, is_model);
        return p->run.n > from;
    case GGUF_J_ARRAY:
        while (tok__next_part(p, m, &rest, part)) {
            const int32_t *placeholder = tok__placeholder(p->t, &part[0]);
            from = p->run.n;
            if (placeholder) {
                if (is_system)
                    TOK__REFUSE(p, "messages[%zu].content: expected text parts in the system message", m->number);
                if (is_model && p->c->pictures)
                    TOK__REFUSE(p, "messages[%zu].content: expected text parts in an answer", m->number);
                tok__put_placeholder(p, placeholder, &part[2]);
            } else {
                tok__put_string(p, &part[1]);
                tok__tidy(p, from, is_model);
                if (is_system) tok__put(p, " ");
            }
            any |= placeholder || p->run.n > from;
        }
        return any;
    default:
        TOK__REFUSE(p, "messages[%zu].content: expected a string, null or a list of parts", m->number);
        return false;
    }
}

static void tok__put_thought(Tok__Prompt *p, const Tok__Message *m) {
    const GgufJson *r = &m->f[tok_json_is_set(&m->f[TOK__REASONING]) ? TOK__REASONING : TOK__REASONING_CONTENT];
    if (!tok_json_is_set(r)) return;
    if (r->type != GGUF_J_STRING) TOK__REFUSE(p, "messages[%zu].reasoning: expected a string", m->number);
    if (p->failed) return;
    tok__put_tag(p, &p->t->channel_open);
    tok__put(p, "thought\n");
    tok__put_string(p, r);
    tok__put(p, "\n");
    tok__put_tag(p, &p->t->channel_close);
}

typedef struct { GgufJson id, name; size_t at; } Tok__Called;        // call `at`, to find the function of a result

// Orders ids, the shorter first; absent and null ids are equal.
static int tok__compare_ids(const GgufJson *a, const GgufJson *b) {
    const size_t na = a->type > GGUF_J_NULL ? a->n : 0, nb = b->type > GGUF_J_NULL ? b->n : 0;
    return na != nb ? (na > nb) - (na < nb) : na ? memcmp(a->s, b->s, na) : 0;
}

static int tok__by_id(const void *a, const void *b) {
    const Tok__Called *x = a, *y = b;
    const int c = tok__compare_ids(&x->id, &y->id);
    return c ? c : (x->at > y->at) - (x->at < y->at);
}

// The function name of the last call with this id. The calls are sorted by id. NULL: none has it.
static const GgufJson *tok__called_name(const Tok__Called *called, size_t n, const GgufJson *id) {
    size_t low = 0, high = n;                         // ids of [0, low) are <= id, of [high, n) > id
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (tok__compare_ids(&called[middle].id, id) > 0) high = middle;
        else low = middle + 1;
    }
    return low && tok__compare_ids(&called[low - 1].id, id) == 0 ? &called[low - 1].name : NULL;
}

// Writes one call. Its arguments are an object, or a string that holds one.
static void tok__put_call(Tok__Prompt *p, const GgufJson *call, const Tok__Message *m, size_t i, Tok__Called *called) {
    static const char *const wrapper[] = { "function", "id" };
    static const char *const names[] = { "name", "arguments" };
    GgufJson outer[2], f[2], parsed;
    const char *err = "an object";
    size_t err_at = 0;
    TokText inner = { 0 };
    tok__fields(call, wrapper, outer, 2);
    tok__fields(&outer[0], names, f, 2);
    if (f[0].type != GGUF_J_STRING)
        TOK__REFUSE(p, "messages[%zu].tool_calls[%zu].function.name: expected a string", m->number, i);
    *called = (Tok__Called){ outer[1], f[0], i };
    if (!p->failed && f[1].type == GGUF_J_STRING && tok_json_is_set(&f[1])) {
        if (!tok__room(&inner, f[1].n)) TOK__REFUSE(p, "out of memory for arguments of %zu bytes", f[1].n);
        else if (gguf_json_parse(inner.s, gguf_json_string(&f[1], inner.s), &parsed, &err_at, &err) == 0) f[1] = parsed;
        else
            TOK__REFUSE(p, "messages[%zu].tool_calls[%zu].function.arguments: byte %zu: expected %s", m->number, i,
                        err_at, err);
    }
    if (tok_json_is_set(&f[1]) && f[1].type != GGUF_J_OBJECT)
        TOK__REFUSE(p, "messages[%zu].tool_calls[%zu].function.arguments: expected an object", m->number, i);
    tok__put_tag(p, &p->t->call_open);
    if (!p->failed) {
        tok__put(p, "call:");
        tok__put_string(p, &f[0]);
        tok__put(p, "{");
        tok__put_members(p, &f[1], false);
        tok__put(p, "}");
    }
    tok__put_tag(p, &p->t->call_close);
    tok_text_free(&inner);
}

// Write the beginning response:NAME{ of a result, and its end.
static void tok__open_result(Tok__Prompt *p, const GgufJson *name) {
    tok__put_tag(p, &p->t->response_open);
    tok__put(p, "response:");
    if (name->type == GGUF_J_STRING && tok_json_is_set(name)) tok__put_string(p, name);
    else tok__put(p, "unknown");
    tok__put(p, "{");
}

static void tok__close_result(Tok__Prompt *p) {
    tok__put(p, "}");
    tok__put_tag(p, &p->t->response_close);
}

static void tok__put_result(Tok__Prompt *p, const GgufJson *name, const GgufJson *result) {
    tok__open_result(p, name);
    if (result->type == GGUF_J_OBJECT) {
        tok__put_members(p, result, false);
    } else {
        tok__put(p, "value:");
        tok__put_value(p, result, false);
    }
    tok__close_result(p);
}

// Writes a tool message. Its name is that of the last call with its id, or else its own. The texts of a list of parts
// become one string; placeholders come after the result.
static void tok__put_tool_message(Tok__Prompt *p, const Tok__Message *m, const Tok__Called *called, size_t n_called) {
    const GgufJson *name = tok__called_name(called, n_called, &m->f[TOK__CALL_ID]), *content = &m->f[TOK__TEXT];
    GgufJson rest = *content, part[3];
    if (!name) name = &m->f[TOK__NAME];
    if (content->type != GGUF_J_ARRAY) {
        tok__put_result(p, name, content);
        return;
    }
    tok__open_result(p, name);
    tok__put(p, "value:");
    tok__put_tag(p, &p->t->quote);
    while (tok__next_part(p, m, &rest, part))
        if (!tok__placeholder(p->t, &part[0])) tok__put_string(p, &part[1]);
    tok__put_tag(p, &p->t->quote);
    tok__close_result(p);
    for (rest = *content; tok__next_part(p, m, &rest, part); ) {
        const int32_t *placeholder = tok__placeholder(p->t, &part[0]);
        if (placeholder) tok__put_placeholder(p, placeholder, &part[2]);
    }
}

// Writes the calls of message i and their results: those in the message, or the tool messages after it, m[1..next).
static void tok__put_calls(Tok__Prompt *p, const Tok__Message *m, size_t n_follow, bool *calls, bool *results) {
    static const char *const names[] = { "name", "response" };
    const GgufJson *list = &m->f[TOK__CALLS], *responses = &m->f[TOK__RESPONSES];
    GgufJson rest = *list, value, f[2];
    size_t n = 0, i = 0;
    *calls = tok_json_is_set(list);
    *results = tok_json_is_set(responses);
    if (*calls && list->type != GGUF_J_ARRAY) TOK__REFUSE(p, "messages[%zu].tool_calls: expected a list", m->number);
    if (*results && responses->type != GGUF_J_ARRAY)
        TOK__REFUSE(p, "messages[%zu].tool_responses: expected a list", m->number);
    if (p->failed) return;
    if (*calls) while (gguf_json_next(&rest, NULL, &value)) n++;
    Tok__Called *called = malloc(n * sizeof *called + 1);
    if (!called) {
        TOK__REFUSE(p, "out of memory for %zu calls", n);
        return;
    }
    rest = *list;
    for (; i < n && !p->failed && gguf_json_next(&rest, NULL, &value); i++) tok__put_call(p, &value, m, i, &called[i]);
    if (*results) {
        rest = *responses;
        while (!p->failed && gguf_json_next(&rest, NULL, &value)) {
            tok__fields(&value, names, f, 2);
            tok__put_result(p, &f[0], &f[1]);
        }
    } else if (*calls && !p->failed) {
        qsort(called, n, sizeof *called, tok__by_id);
        for (size_t k = 1; k <= n_follow && !p->failed; k++) tok__put_tool_message(p, &m[k], called, n);
        *results = n_follow > 0;
    }
    free(called);
}

static bool tok__has_role(const Tok__Message *m, const char *role) { return gguf_json_is(&m->f[TOK__ROLE], role); }

// The state of the last turn after all messages are written.
typedef enum { TOK__CLOSED, TOK__AFTER_RESULT, TOK__CALL_OPEN } Tok__End;

static Tok__End tok__put_messages(Tok__Prompt *p, const TokChat *c, const Tok__Message *m, size_t n, bool *closed) {
    Tok__End end = TOK__CLOSED;
    size_t after_user = 0, next;                      // messages from here on come after the last one of the user
    bool goes_on = false;                             // the previous message was the assistant's
    for (size_t i = 0; i < n; i++) if (tok__has_role(&m[i], "user")) after_user = i + 1;
    *closed = true;
    for (size_t i = 0; i < n && !p->failed; i = next) {
        for (next = i + 1; next < n && tok__has_role(&m[next], "tool"); ) next++;
        if (tok__has_role(&m[i], "tool")) continue;   // a result that follows no call
        const bool is_assistant = tok__has_role(&m[i], "assistant"), is_model = is_assistant ||
            tok__has_role(&m[i], "model");
        if (!is_model || !goes_on) {
            tok__put_tag(p, &p->t->turn_open);
            if (is_model) tok__put(p, "model");
            else tok__put_string(p, &m[i].f[TOK__ROLE]);
            tok__put(p, "\n");
        }
        goes_on = is_assistant;
        if (i >= after_user || (c->keep_thoughts && tok_json_is_set(&m[i].f[TOK__CALLS]))) tok__put_thought(p, &m[i]);
        bool calls, results;
        tok__put_calls(p, &m[i], next - i - 1, &calls, &results);
        const bool content = tok__put_content(p, &m[i], is_model, false);
        const bool joined = next < n ? is_model && tok__has_role(&m[next], "assistant") : is_assistant && c->answer.s;
        end = calls && !results ? TOK__CALL_OPEN : results ? TOK__AFTER_RESULT : TOK__CLOSED;
        *closed = false;
        if (end == TOK__CALL_OPEN) {
            tok__put_tag(p, &p->t->response_open);
        } else if (!joined && !(results && !content && next == n)) {
            tok__put_tag(p, &p->t->turn_close);
            tok__put(p, "\n");
            *closed = true;
        }
    }
    return end;
}

// Writes the opening of the model's turn, and the prefill of its answer if there is one.
static void tok__put_cue(Tok__Prompt *p, const TokChat *c, Tok__End end, bool closed) {
    const bool after_result = end == TOK__AFTER_RESULT && !(closed && !c->exact);
    const bool new_turn = closed && !after_result && end != TOK__CALL_OPEN;
    const bool opens_thought = c->thought.s || (after_result && (c->think || c->end_thought)) ||
        (new_turn && !c->think && p->t->large_variant);
    if (new_turn || opens_thought || !c->answer.s) tok__end_run(p);    // else the answer continues a text
    if (c->before_cue) *c->before_cue = p->ids->n - p->first;
    if (end == TOK__CALL_OPEN && (c->thought.s || c->answer.s))
        TOK__REFUSE(p, "chat: the last tool call has no result yet");
    if (new_turn) {
        tok__put_tag(p, &p->t->turn_open);
        tok__put(p, "model\n");
    }
    if (opens_thought) {
        tok__put_tag(p, &p->t->channel_open);
        tok__put(p, "thought\n");
    }
    if (c->thought.s) tok__put_bytes(p, c->thought.s, c->thought.n);
    if (opens_thought && (!c->think || c->answer.s)) {
        if (c->thought.s) tok__put(p, "\n");
        tok__put_tag(p, &p->t->channel_close);
    }
    if (c->answer.s) tok__put_bytes(p, c->answer.s, c->answer.n);
}

// Parses a text that must be a list. An empty text and null, which clients send for tools, are an empty list.
static bool tok__parse_list(Tok__Prompt *p, const char *what, TokStr text, GgufJson *list) {
    const GgufJson none = { GGUF_J_ARRAY, "[]", 2 };
    const char *err;
    size_t err_at;
    *list = none;
    if (!text.n) return true;
    if (gguf_json_parse(text.s, text.n, list, &err_at, &err) < 0)
        TOK__REFUSE(p, "%s: byte %zu: expected %s", what, err_at, err);
    else if (list->type == GGUF_J_NULL)
        *list = none;
    else if (list->type != GGUF_J_ARRAY)
        TOK__REFUSE(p, "%s: expected a JSON list", what);
    return !p->failed;
}

// The messages of a list; the caller frees them.
static Tok__Message *tok__read_messages(Tok__Prompt *p, const GgufJson *list, size_t *n) {
    GgufJson rest = *list, value;
    *n = 0;
    while (gguf_json_next(&rest, NULL, &value)) ++*n;
    Tok__Message *m = malloc(*n * sizeof *m + 1);
    if (!m) {
        TOK__REFUSE(p, "out of memory for %zu messages", *n);
        return NULL;
    }
    rest = *list;
    for (size_t i = 0; i < *n && gguf_json_next(&rest, NULL, &value); i++) {
        m[i].number = i;
        tok__fields(&value, tok__field_names, m[i].f, TOK__N_FIELDS);
        if (m[i].f[TOK__ROLE].type != GGUF_J_STRING) TOK__REFUSE(p, "messages[%zu].role: expected a string", i);
    }
    return m;
}

int tok_chat(Tokenizer *t, const TokChat *c, TokIds *ids, TokText *text) {
    Tok__Prompt p = { .t = t, .ids = ids, .text = text, .c = c, .first = ids->n };
    const size_t n_ids = ids->n, n_text = text ? text->n : 0;
    GgufJson list, tools, tool;
    Tok__Message *m = NULL;
    size_t n = 0, first = 0, n_tools = 0;
    bool closed;
    if (c->least) *c->least = 0;
    if (tok__parse_list(&p, "messages", c->messages, &list) && tok__parse_list(&p, "tools", c->tools, &tools))
        m = tok__read_messages(&p, &list, &n);
    if ((c->thought.s || c->answer.s) && !c->add_cue)
        TOK__REFUSE(&p, "chat: the start of an answer needs the generation prompt");
    if (c->thought.s && !c->answer.s && !c->think)
        TOK__REFUSE(&p, "chat: the start of a thought needs thinking enabled");
    if (!p.failed) {
        tok__put_id(&p, t->bos, "<bos>");
        const bool system = n && (tok__has_role(&m[0], "system") || tok__has_role(&m[0], "developer"));
        if (c->think || tok_json_is_set(&tools) || system) {
            tok__put_tag(&p, &t->turn_open);
            tok__put(&p, "system\n");
            if (c->think) {
                tok__put_tag(&p, &t->think);
                tok__put(&p, "\n");
            }
            if (system) tok__put_content(&p, &m[first++], false, true);
            while (!p.failed && gguf_json_next(&tools, NULL, &tool)) tok__put_tool(&p, &tool, n_tools++);
            tok__put_tag(&p, &t->turn_close);
            tok__put(&p, "\n");
        }
        const Tok__End end = tok__put_messages(&p, c, m + first, n - first, &closed);
        if (c->add_cue) tok__put_cue(&p, c, end, closed);
        tok__end_run(&p);
    }
    free(m);
    tok_text_free(&p.run);
    if (!p.failed) return 0;
    ids->n = n_ids;
    if (text) text->n = n_text;
    return -1;
}

// ---- chat: calls in an answer ---------------------------------------------------------------------------------------
// A block is the text between <|tool_call> and <tool_call|>. It is UTF-8, so the byte 0xFF, which UTF-8 never uses, can
// represent the mark <|"|>. A model may write a call in another form than the template's, so all this is read:
//
//   block    { call | text }                  text is no call: it becomes content
//   call     [prefix] NAME body               without `call:` only first in the block or after another call
//            call: NAME                       first in the block or after another call: no arguments
//            OBJECT                           {"name": .., "arguments" or "parameters": ..}, or a list of such objects,
//                                             also inside {"type": "function", "function": ..}; first in the block
//   prefix   call:   call   :                 in any case
//   body     { members }   ( members )   or an object inside these brackets
//   members  KEY : value   KEY = value        a comma separates them; it may be missing
//   value    "string"  'string'  mark string mark  {members}  [values]  number  true  True  null  None  or bare text
//
// Blanks may stand anywhere; a code fence may surround calls. What is read in doubt:
//   - A quote ends a string only where a value can end: before a comma and a key, a closing bracket, a key, or the end.
//     So quotes inside a string need no escape. A string without end is bare text.
//   - Bare text ends at a closing bracket, or where the next member begins: a comma or line break and a word with the
//     same separator (: or =), or a blank, a word, the separator and the value, with no blanks between them. In a list
//     it ends at a comma. Brackets and quotes that close again inside the text are part of it, with all that is in
//     them. Marks in it are dropped.
//   - A closing bracket closes the innermost open one if one of its kind is open, or if it is one of the last brackets
//     of the block and they are not too many. What is still open at the end is closed there.
//   - A value that is followed by other text is bare text as a whole. So are an object without keys, and a number that
//     JSON cannot have, such as 007.
//   - Arguments without names, as in f("x"), are no call. NAME has no blanks, unless `call:` and { are around it.
//   - If the answer is cut off, an open string has the text so far, a key without value has "", and a name without body
//     is content.
// Every byte that is no syntax reaches the client in a name, in an argument or as content. Syntax of a call that was
// read are brackets, colons, commas, equals signs, quotes, marks, escapes, the words above, and a code fence.

enum { TOK__DELIMITER = 0xFF, TOK__CALL_DEPTH = 251 };   // depth: 256 of gguf_json_parse less 5 levels of a message
enum { TOK__CALL_TRIES = 16 };                        // failed searches per block, which makes the time O(n)

static bool tok__is_blank(char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\n'; }
static bool tok__is_one_of(char c, const char *set) { return c && strchr(set, c); }

// ASCII letters and digits, _, and all other characters.
static bool tok__is_word_byte(char c) {
    const unsigned char u = (unsigned char)c;
    return (u >= '0' && u <= '9') || ((u | 32) >= 'a' && (u | 32) <= 'z') || u == '_' ||
           (u >= 0x80 && u != TOK__DELIMITER);
}

typedef struct {
    const char *s;
    size_t n, i;              // s[i..n) is not read yet
    size_t tail;              // s[tail..n) is blanks and at most TOK__CALL_DEPTH closing brackets
    TokText *out;             // JSON; it has enough room
    char open[TOK__CALL_DEPTH];                       // (depth) the open brackets
    int depth;
    int tries;                // how many more searches may fail
    bool cut;                 // the answer ended inside the block
} Tok__CallReader;

typedef struct {
    size_t from, to, next;    // s[from..to) is the key, its value starts at next
    char quote;               // 0: bare
    char sep;                 // ':' or '='; 0: cut off
    bool tight;               // neither blank nor end before and after the separator
} Tok__CallKey;

static void tok__search_failed(Tok__CallReader *c) { if (c->tries > 0) c->tries--; }

static size_t tok__skip(const Tok__CallReader *c, size_t i, bool commas) {  // to the next byte that is not blank
    while (i < c->n && (tok__is_blank(c->s[i]) || (commas && c->s[i] == ','))) i++;
    return i;
}

static char tok__quote_at(const Tok__CallReader *c, size_t i) {
    if (i >= c->n) return 0;
    return tok__is_one_of(c->s[i], "\"'") || (unsigned char)c->s[i] == TOK__DELIMITER ? c->s[i] : 0;
}

// True if s[i] closes the innermost open bracket.
static bool tok__closes(const Tok__CallReader *c, size_t i) {
    if (i >= c->n || !tok__is_one_of(c->s[i], "}])")) return false;
    const char open = c->s[i] == '}' ? '{' : c->s[i] == ']' ? '[' : '(';
    if (memchr(c->open, open, (size_t)c->depth)) return true;
    if (i < c->tail) return false;
    int left = 0;                                     // closing brackets from here on
    for (size_t k = i; k < c->n; k++) left += !tok__is_blank(c->s[k]);
    return left <= c->depth;
}

static bool tok__is_key_byte(char c, bool any) {
    return any ? !tok__is_one_of(c, ":=,{}()\"\n") && (unsigned char)c != TOK__DELIMITER
               : tok__is_word_byte(c) || tok__is_one_of(c, "-.$@");
}

// The end of the key in quotes at s[i], or of the bare one. 0: there is none.
static size_t tok__key_end(const Tok__CallReader *c, size_t i, bool any, Tok__CallKey *k) {
    const char *s = c->s;
    size_t j = i, n = c->n;
    *k = (Tok__CallKey){ .from = i, .quote = tok__quote_at(c, i) };
    if (k->quote) {
        const bool escapes = (unsigned char)k->quote != TOK__DELIMITER;
        for (j++; j < n && s[j] != k->quote && s[j] != '\n'; j++) j += escapes && s[j] == '\\' && j + 1 < n;
        k->from = i + 1;
        k->to = j;
        return j < n && s[j] == k->quote ? j + 1 : j == n && c->cut ? n : 0;
    }
    const bool begins = i < n && (any ? !tok__is_one_of(s[i], "[]")
                                      : tok__is_word_byte(s[i]) && !(s[i] >= '0' && s[i] <= '9'));
    while (begins && j < n && tok__is_key_byte(s[j], any)) j++;
    for (k->to = j; k->to > i && tok__is_blank(s[k->to - 1]); ) k->to--;
    return k->to == i ? 0 : any && j < n && (unsigned char)s[j] == TOK__DELIMITER ? j + 1 : j;
}

// True if a key and its separator are at s[i]. any: a key is certain to begin here, so it may have any characters, or a
// quote or mark without partner; else only an identifier, since this may be text such as "see https://..".
static bool tok__key_at(const Tok__CallReader *c, size_t i, bool any, Tok__CallKey *k) {
    const char *s = c->s;
    const size_t j = tok__key_end(c, i, any, k), n = c->n;
    const size_t at = tok__skip(c, j, false);
    const bool sep = j && at < n && tok__is_one_of(s[at], ":=");
    if (k->quote && !sep && any && !(j && at == n)) return !tok__quote_at(c, i + 1) && tok__key_at(c, i + 1, true, k);
    if (!j) return false;
    k->next = at;
    if (at == n) return any && c->cut;
    k->next++;
    k->sep = s[at];
    k->tight = at == j && at + 1 < n && !tok__is_blank(s[at + 1]);
    if (!sep) return false;
    const bool url = n - at >= 3 && !memcmp(s + at + 1, "//", 2);
    return any || at + 1 == n || !(url || tok__is_one_of(s[at + 1], k->sep == ':' ? ":\\" : "="));
}

// True if a complete value can end before s[i].
static bool tok__value_ends(const Tok__CallReader *c, size_t i) {
    const bool list = c->open[c->depth - 1] == '[';
    const size_t j = tok__skip(c, i, false), next = tok__skip(c, j, true);
    Tok__CallKey k;
    if (j == c->n || tok__closes(c, j)) return true;
    if (next > j) return list || next == c->n || tok__closes(c, next) || tok__key_at(c, next, true, &k);
    if (list) return tok__quote_at(c, j) || tok__is_one_of(c->s[j], "{[");
    return tok__key_at(c, j, false, &k);
}

// The length of the escape at s[i]; 0: there is none, so a backslash is a backslash.
static size_t tok__escape_at(const Tok__CallReader *c, size_t i, size_t to) {
    if (c->s[i] != '\\' || to - i < 2) return 0;
    if (c->s[i + 1] != 'u') return tok__is_one_of(c->s[i + 1], "\"'\\/bfnrt") ? 2 : 0;
    for (size_t k = 2; k < 6; k++) if (k >= to - i || tok_hex_digit((unsigned char)c->s[i + k]) < 0) return 0;
    return 6;
}

// Writes s[from..to) as a JSON string, without marks. A text in quotes may have escapes.
static void tok__call_write(Tok__CallReader *c, size_t from, size_t to, char quote) {
    c->out->s[c->out->n++] = '"';
    for (size_t i = from, len; i < to; i += len) {
        len = tok__is_one_of(quote, "\"'") ? tok__escape_at(c, i, to) : 0;
        if (len && c->s[i + 1] != '\'') {
            tok_text_append(c->out, c->s + i, len);
            continue;
        }
        if (len) i++, len = 1;                        // \' is no escape of JSON
        else len = 1;
        if ((unsigned char)c->s[i] != TOK__DELIMITER) tok__escape(c->out, (unsigned char)c->s[i]);
    }
    c->out->s[c->out->n++] = '"';
}

// True if s[from..i) ends with a comma or line break, a key and its separator: a string that is open has no end.
static bool tok__follows_key(const Tok__CallReader *c, size_t from, size_t i) {
    const char *s = c->s;
    while (i > from && tok__is_blank(s[i - 1])) i--;
    if (i == from || !tok__is_one_of(s[--i], ":=")) return false;
    while (i > from && tok__is_blank(s[i - 1])) i--;
    const size_t end = i;
    while (i > from && tok__is_key_byte(s[i - 1], false)) i--;
    if (i == end) return false;
    while (i > from && (s[i - 1] == ' ' || s[i - 1] == '\t')) i--;
    return i > from && (s[i - 1] == ',' || s[i - 1] == '\n');
}

// True if the quote s[i] of a string that starts at s[from] is a part of it: it's, or "{"a":"b"}".
static bool tok__is_inner_quote(const Tok__CallReader *c, size_t from, size_t i) {
    const char *s = c->s;
    size_t next = i + 1;
    const bool inside = i > from && next < c->n && tok__is_word_byte(s[i - 1]) && tok__is_word_byte(s[next]);
    if (s[i] == '\'' && inside) return true;
    while (next < c->n && tok__is_one_of(s[next], "}])")) next++;
    return tok__is_one_of(s[i], "\"'") && next > i + 1 && next < c->n && s[next] == s[i];
}

// Reads the string at s[i]. False: it has no end, and nothing is read.
static bool tok__call_string(Tok__CallReader *c) {
    const size_t from = c->i + 1;
    const char quote = c->s[c->i], *s = c->s;
    bool ends = false, fails = false;
    size_t j = from;
    for (; j < c->n && !ends && !fails; j++) {
        if (s[j] == '\\' && (unsigned char)quote != TOK__DELIMITER) j++;
        if (j >= c->n || s[j] != quote) continue;
        ends = tok__value_ends(c, j + 1) && !tok__is_inner_quote(c, from, j);
        fails = !ends && (!c->tries || tok__follows_key(c, from, j));
    }
    if (!ends && (fails || !c->cut)) {
        tok__search_failed(c);
        return false;
    }
    c->i = ends ? j : c->n;
    tok__call_write(c, from, ends ? j - 1 : c->n, quote);
    return true;
}

// Reads a number or a word of JSON or Python. False: another word.
static bool tok__call_literal(Tok__CallReader *c) {
    static const char *const python[] = { "True", "False", "None" }, *const json[] = { "true", "false", "null" };
    size_t j = c->i, err_at;
    const char *err;
    GgufJson v;
    while (j < c->n && (tok__is_word_byte(c->s[j]) || tok__is_one_of(c->s[j], "+-."))) j++;
    TokStr word = { c->s + c->i, j - c->i };
    for (int k = 0; k < 3; k++)
        if (word.n == strlen(python[k]) && !memcmp(word.s, python[k], word.n))
            word = (TokStr){ json[k], strlen(json[k]) };
    if (gguf_json_parse(word.s, word.n, &v, &err_at, &err) < 0 || v.type > GGUF_J_NUMBER) return false;
    tok_text_append(c->out, v.s, v.n);
    c->i = j;
    return true;
}

// True if a text in quotes begins at s[i] inside of bare text: after a blank and before another character.
static bool tok__opens_quote(const Tok__CallReader *c, size_t i) {
    return tok__quote_at(c, i) && tok__is_blank(c->s[i - 1]) && i + 1 < c->n && !tok__is_blank(c->s[i + 1]) &&
           !tok__is_one_of(c->s[i + 1], ",)]}");
}

// The end of a text in quotes inside of bare text: the next such quote after which no word goes on. None: after s[i].
static size_t tok__quoted_end(Tok__CallReader *c, size_t i) {
    for (size_t j = i + 1; j < c->n; j++)
        if (c->s[j] == c->s[i] && !(j + 1 < c->n && tok__is_word_byte(c->s[j + 1]))) return j + 1;
    tok__search_failed(c);
    return i + 1;
}

// Where bare text ends, at s[i] or later. sep: of its key; 0: an item of a list.
static size_t tok__text_end(Tok__CallReader *c, char sep) {
    static const char opening[] = "([{", closing[] = ")]}";
    size_t open[3] = { 0 }, first = c->n;             // first: an end inside brackets; it counts if they do not close
    Tok__CallKey k;
    for (size_t i = c->i, next; i < c->n; i = next) {
        const char ch = c->s[i];
        bool comma = false, line = false;
        for (next = i; next < c->n && (tok__is_blank(c->s[next]) || c->s[next] == ','); next++) {
            comma |= c->s[next] == ',';
            line |= c->s[next] == '\n';
        }
        bool end = next == i ? tok__closes(c, i) : next == c->n || tok__closes(c, next);
        if (next == i) {
            next++;
            if (c->tries && i > c->i && tok__opens_quote(c, i)) next = tok__quoted_end(c, i);
            if (tok__is_one_of(ch, opening) && c->tries) open[strchr(opening, ch) - opening]++;
            if (tok__is_one_of(ch, closing) && open[strchr(closing, ch) - closing]) {
                open[strchr(closing, ch) - closing]--;
                continue;
            }
        } else if (!sep) {
            end |= comma;
        } else if (!end) {
            end = tok__key_at(c, next, false, &k) && k.sep == sep && (comma || line || k.tight);
        }
        if (end && !open[0] && !open[1] && !open[2]) return i;
        if (end && first == c->n) first = i;
    }
    if (first == c->n || (!open[0] && !open[1] && !open[2])) return c->n;
    tok__search_failed(c);
    return first;
}

// Reads bare text from s[from] on; it ends at s[i] or later. A quote at its start has lost its partner, or the text
// after its partner belongs to the value.
static void tok__call_text(Tok__CallReader *c, size_t from, char sep) {
    size_t to = c->i = tok__text_end(c, sep);
    const char quote = tok__quote_at(c, from), *s = c->s;
    while (from < to && (tok__is_blank(s[from]) || (unsigned char)s[from] == TOK__DELIMITER)) from++;
    while (from < to && (tok__is_blank(s[to - 1]) || (unsigned char)s[to - 1] == TOK__DELIMITER)) to--;
    if (tok__quote_at(c, from) == quote && quote && from < to && !memchr(s + from + 1, quote, to - from - 1)) from++;
    const char last = from < to ? tok__quote_at(c, to - 1) : 0;
    if (quote && last && !memchr(s + from, last, to - 1 - from)) to--;
    tok__call_write(c, from, to, 0);
}

static void tok__call_value(Tok__CallReader *c, char sep);

// Reads the object, the list or the arguments in brackets at s[i]. False: it is deeper than a message can be, or it has
// no key where one must be.
static bool tok__call_brackets(Tok__CallReader *c) {
    Tok__CallKey k;
    const bool list = c->s[c->i] == '[';
    if (c->depth == TOK__CALL_DEPTH) return false;
    c->open[c->depth++] = c->s[c->i++];
    c->out->s[c->out->n++] = list ? '[' : '{';
    for (bool first = true; ; first = false) {
        c->i = tok__skip(c, c->i, true);
        if (c->i == c->n) break;
        if (tok__closes(c, c->i)) {
            c->i++;
            break;
        }
        if (!first) c->out->s[c->out->n++] = ',';
        if (list) {
            tok__call_value(c, 0);
            continue;
        }
        if (!tok__key_at(c, c->i, true, &k)) return false;
        tok__call_write(c, k.from, k.to, k.quote);
        c->out->s[c->out->n++] = ':';
        c->i = tok__skip(c, k.next, false);
        tok__call_value(c, k.sep ? k.sep : ':');
    }
    c->out->s[c->out->n++] = list ? ']' : '}';
    c->depth--;
    return true;
}

// Reads the value at s[i] of a key with this separator; 0: an item of a list.
static void tok__call_value(Tok__CallReader *c, char sep) {
    const size_t start = c->i, n_out = c->out->n;
    const int depth = c->depth;
    const bool brackets = c->i < c->n && tok__is_one_of(c->s[c->i], "{[");
    const bool ok = tok__quote_at(c, c->i) ? tok__call_string(c) : brackets ? tok__call_brackets(c)
                  : tok__call_literal(c);
    if (ok && tok__value_ends(c, c->i)) return;
    if (!ok || !brackets) c->i = start;               // else nothing is read twice, which would take O(2^depth)
    c->out->n = n_out;
    c->depth = depth;
    tok__call_text(c, start, sep);
}

// Reads the arguments of a call at s[i], in brackets, perhaps an object in brackets.
static bool tok__call_body(Tok__CallReader *c, size_t i) {
    if (i >= c->n || !tok__is_one_of(c->s[i], "{(")) return false;
    const size_t inner = tok__skip(c, i + 1, false);
    for (int k = 0; k < 2; k++) {
        c->i = k ? inner : i;
        c->depth = 0;
        c->out->n = 0;
        if (k && (inner == c->n || c->s[inner] != '{')) break;
        if (!tok__call_brackets(c)) continue;
        const size_t next = tok__skip(c, c->i, true);
        if (k && next < c->n && tok__is_one_of(c->s[next], "})")) c->i = next + 1;
        return true;
    }
    return false;
}

// Adds a call. Returns 1, or -1 if memory runs out.
static int tok__add_call(Tokenizer *t, TokReply *r, TokStr name, TokStr arguments) {
    TokCall *calls = realloc(r->calls, ((size_t)r->n_calls + 1) * sizeof *calls);
    if (calls) r->calls = calls;
    char *s = calls ? malloc(name.n + arguments.n) : NULL;
    if (!s) return tok__fail(t, "out of memory for a tool call");
    memcpy(s, name.s, name.n);
    memcpy(s + name.n, arguments.s, arguments.n);
    r->calls[r->n_calls++] = (TokCall){ { s, name.n }, { s + name.n, arguments.n } };
    return 1;
}

// Finds the name and the arguments of a call that is a JSON object. inner: it is a member of another one. False: it is
// no call, or it has other members, which would be lost.
static bool tok__call_fields(const GgufJson *object, bool inner, GgufJson *name, GgufJson *arguments) {
    GgufJson rest = *object, key, v;
    bool typed = false;
    if (object->type != GGUF_J_OBJECT) return false;
    while (gguf_json_next(&rest, &key, &v)) {
        const bool text = v.type == GGUF_J_STRING, none = arguments->type == TOK__MISSING;
        const bool is_arguments = gguf_json_is(&key, "arguments") || gguf_json_is(&key, "parameters");
        if (gguf_json_is(&key, "name") && text && name->type == TOK__MISSING) *name = v;
        else if (is_arguments && (text || v.type == GGUF_J_OBJECT) && none) *arguments = v;
        else if (gguf_json_is(&key, "type") && gguf_json_is(&v, "function") && !typed) typed = true;
        else if (inner || !gguf_json_is(&key, "function") || !none || !tok__call_fields(&v, true, name, arguments))
            return false;
    }
    return name->type != TOK__MISSING && arguments->type != TOK__MISSING;
}

// Adds a call that is a JSON object; its arguments may be JSON in a string. Returns 1; 0: no call; -1: out of memory.
static int tok__add_object(Tokenizer *t, TokReply *r, const GgufJson *object) {
    GgufJson name = { TOK__MISSING, NULL, 0 }, arguments = name, v;
    TokText text = { 0 };
    const char *err;
    size_t err_at;
    if (!tok__call_fields(object, false, &name, &arguments)) return 0;
    if (!tok__room(&text, name.n + arguments.n)) return tok__fail(t, "out of memory for a tool call");
    const size_t n_name = gguf_json_string(&name, text.s);
    char *s = text.s + n_name;
    size_t n = arguments.n;
    if (arguments.type == GGUF_J_STRING) n = gguf_json_string(&arguments, s);
    else memcpy(s, arguments.s, n);
    const bool ok = n_name && gguf_json_parse(s, n, &v, &err_at, &err) == 0 && v.type == GGUF_J_OBJECT;
    const int rc = ok ? tok__add_call(t, r, (TokStr){ text.s, n_name }, (TokStr){ s, n }) : 0;
    tok_text_free(&text);
    return rc;
}

// Reads a call that is an object, or a list of them, at s[i]. Returns as tok__add_object.
static int tok__read_object(Tokenizer *t, TokReply *r, Tok__CallReader *c) {
    const int before = r->n_calls;
    const char *err;
    size_t err_at;
    GgufJson v, rest;
    c->depth = 0;
    c->out->n = 0;
    if (!tok__call_brackets(c) || gguf_json_parse(c->out->s, c->out->n, &v, &err_at, &err) < 0) return 0;
    if (v.type == GGUF_J_OBJECT) return tok__add_object(t, r, &v);
    int rc = 0;
    for (rest = v; gguf_json_next(&rest, NULL, &v) && (rc = tok__add_object(t, r, &v)) > 0; ) { }
    while (rc <= 0 && r->n_calls > before) free((void *)(uintptr_t)r->calls[--r->n_calls].name.s);
    return rc;
}

// The length of `call:` at s[i], with blanks; 0: there is none. *word: the bytes of `call` and the blanks after it.
static size_t tok__call_prefix(const Tok__CallReader *c, size_t i, size_t *word) {
    *word = 0;
    if (i > 0 && tok__is_word_byte(c->s[i - 1])) return 0;
    for (size_t k = 0; k < 4; k++) if (i + k >= c->n || (c->s[i + k] | 32) != "call"[k]) return 0;
    const size_t j = tok__skip(c, i + 4, false);
    *word = j - i;
    return j < c->n && c->s[j] == ':' ? tok__skip(c, j + 1, false) - i : 0;
}

// Reads a call at s[i]. first: at the beginning of the block, or after another call. Returns as tok__add_object.
static int tok__read_call(Tokenizer *t, TokReply *r, Tok__CallReader *c, bool first) {
    const char *s = c->s;
    const size_t start = c->i;
    if (first && tok__is_one_of(s[start], "{[")) return tok__read_object(t, r, c);
    size_t word, from = start, next;
    const size_t prefix = tok__call_prefix(c, start, &word);
    if (!prefix && !first) return 0;
    if (prefix) from += prefix;
    else if (s[from] == ':') from = tok__skip(c, from + 1, false);
    else if (word > 4 && from + word < c->n && tok__is_word_byte(s[from + word])) from += word;
    const char quote = tok__quote_at(c, from);
    const char *end = quote ? memchr(s + from + 1, quote, c->n - from - 1) : NULL;
    size_t to = from;
    while (!end && to < c->n && (tok__is_word_byte(s[to]) || tok__is_one_of(s[to], "-./:$@#+"))) to++;
    if (end) from++, to = (size_t)(end - s);
    next = tok__skip(c, to + (end != NULL), false);
    if (next < c->n && (unsigned char)s[next] == TOK__DELIMITER) next++;
    while (!end && to > from && s[to - 1] == ':') to--;

    TokStr arguments = { "{}", 2 };
    bool ok = to > from && tok__call_body(c, next);
    if (ok) {
        arguments = (TokStr){ c->out->s, c->out->n };
    } else if (prefix && first && to > from && ((next >= c->tail && !c->cut) ||
                                                tok__call_prefix(c, tok__skip(c, next, true), &word))) {
        ok = true;
        c->i = next;
    } else if (prefix) {
        const char *brace = from < c->n ? memchr(s + from, '{', c->n - from) : NULL;
        next = to = brace ? (size_t)(brace - s) : from;
        while (to > from && (tok__is_blank(s[to - 1]) || tok__is_one_of(s[to - 1], ":="))) to--;
        ok = to > from && tok__call_body(c, next);
        for (size_t i = from; ok && i < to; i++) ok = (unsigned char)s[i] >= 0x20;
        arguments = (TokStr){ c->out->s, c->out->n };
    }
    ok &= !memchr(s + from, TOK__DELIMITER, to - from);
    return ok ? tok__add_call(t, r, (TokStr){ s + from, to - from }, arguments) : 0;
}

// ---- chat: answer ---------------------------------------------------------------------------------------------------

// Appends characters to the content, the thought or the call, by state.
static bool tok__reply_text(TokReply *r, const char *s, size_t n) {
    if (r->state == TOK__CALL) return tok_text_append(&r->call, s, n);
    if (r->state == TOK__CONTENT) {
        for (; r->after_call && n && tok__is_blank(*s); n--) s++;
        if (n) r->after_call = false;
        return tok_text_append(&r->content, s, n);
    }
    if (r->naming) {
        const char *end = n ? memchr(s, '\n', n) : NULL;
        if (!end) return true;
        r->naming = false;
        n -= (size_t)(end + 1 - s);
        s = end + 1;
    }
    size_t shown = n;
    while (shown && tok__is_blank(s[shown - 1])) shown--;
    if (!tok__room(&r->thought, r->held + n)) return false;
    if (n) memcpy(r->thought.s + r->thought.n + r->held, s, n);
    if (shown) r->thought.n += r->held + shown;
    r->held = shown ? n - shown : r->held + n;
    return true;
}

// Skips what may be around calls: blanks, commas, closing brackets, quotes, marks and code fences.
static size_t tok__skip_around(const Tok__CallReader *c, size_t i) {
    for (; i < c->n; i++) {
        const bool fence = c->n - i >= 3 && !memcmp(c->s + i, "```", 3);
        size_t word = i + 3;                          // the line of an opening fence names the language
        while (fence && word < c->n && tok__is_word_byte(c->s[word])) word++;
        if (fence) i = word < c->n && c->s[word] == '\n' ? word : i + 2;
        else if (!tok__is_blank(c->s[i]) && !tok__is_one_of(c->s[i], ",}])") && !tok__quote_at(c, i)) break;
    }
    return i;
}

// Passes s[from..to) of the block on as content, a mark as a quote.
static bool tok__call_content(TokReply *r, size_t from, size_t to) {
    while (from < to && tok__is_blank(r->call.s[from])) from++;
    for (size_t i = from; i < to; i++)
        if ((unsigned char)r->call.s[i] == TOK__DELIMITER) r->call.s[i] = '"';
    return from == to || tok__reply_text(r, r->call.s + from, to - from);
}

// Reads the block that has ended: its calls are added, other text becomes content. The reply is in TOK__CONTENT. cut:
// the answer ended inside the block.
static int tok__end_call(Tokenizer *t, TokReply *r, bool cut) {
    TokText out = { 0 };
    Tok__CallReader c = { .s = r->call.s, .n = r->call.n, .tail = r->call.n, .out = &out, .tries = TOK__CALL_TRIES,
                          .cut = cut };
    // A byte becomes at most 6; an opening bracket or a member may add six quotes, brackets, commas and colons.
    if (c.n > SIZE_MAX / 32 || !tok__room(&out, 10 * c.n + 16)) return tok__fail(t, "out of memory for a tool call");
    for (int k = 0; c.tail > 0; c.tail--) {
        const char last = c.s[c.tail - 1];
        if (!tok__is_blank(last) && !(tok__is_one_of(last, "}])") && k++ < TOK__CALL_DEPTH)) break;
    }
    size_t from = 0, word;                            // s[from..) is not passed on yet
    int depth = 0, rc = 0;                            // depth: brackets that are open in text
    bool first = true;                                // a call may begin here without `call:`
    for (size_t i = tok__skip_around(&c, 0); i < c.n && rc >= 0; ) {
        c.i = i;
        const bool begins = c.tries && (first || (!depth && tok__call_prefix(&c, i, &word)));
        rc = begins ? tok__read_call(t, r, &c, first) : 0;
        if (rc > 0) {
            if (!first && !tok__call_content(r, from, i)) rc = tok__fail(t, "out of memory for a reply");
            r->after_call = true;
            from = c.i;
            i = tok__skip_around(&c, from);
            if (i == c.n) from = c.n;
            first = true;
            depth = 0;
        } else {
            if (begins) tok__search_failed(&c);
            first &= c.s[i] == '[';                   // perhaps of a list of calls
            depth += !first && tok__is_one_of(c.s[i], "([{");
            depth -= depth && tok__is_one_of(c.s[i], ")]}");
            i++;
        }
    }
    tok_text_free(&out);
    if (rc >= 0 && !tok__call_content(r, from, c.n)) rc = tok__fail(t, "out of memory for a reply");
    return rc < 0 ? -1 : 0;
}

// Enters a state. Pending bytes of the old state are flushed: they are not a character.
static int tok__reply_enter(Tokenizer *t, TokReply *r, int state) {
    const size_t n = tok_stream_flush(&r->stream, r->piece.s, r->piece.cap);
    if (!tok__reply_text(r, r->piece.s, n)) return tok__fail(t, "out of memory for a reply");
    r->state = state;
    r->naming = state == TOK__THOUGHT;
    return 0;
}

void tok_reply_start(const Tokenizer *t, TokReply *r, const int32_t *prompt, size_t n) {
    for (int i = 0; i < r->n_calls; i++) free((void *)(uintptr_t)r->calls[i].name.s);
    TokReply fresh = { .content = r->content, .thought = r->thought, .call = r->call, .piece = r->piece,
                       .calls = r->calls };
    fresh.content.n = fresh.thought.n = fresh.call.n = 0;
    *r = fresh;
    bool named = false;                               // a line ends after position i: the thought has its name
    while (n-- > 0) {
        if (prompt[n] < 0 || prompt[n] >= t->n_tokens) continue;
        if (t->kind[prompt[n]] == TOK_KIND_HIDDEN) {
            if (prompt[n] != t->channel_open) return;
            r->state = TOK__THOUGHT;
            r->naming = !named;
            return;
        }
        const TokStr piece = tok_piece(t, prompt[n], false);
        named |= piece.n && memchr(piece.s, '\n', piece.n);
    }
}

int tok_reply_push(Tokenizer *t, TokReply *r, int32_t id) {
    if (r->finish != TOK_RUNNING) return 1;
    if (id < 0 || id >= t->n_tokens) return 0;        // not a token; an absent marker has id -1
    if (!tok__room(&r->piece, t->stream_cap)) return tok__fail(t, "out of memory for a reply");
    const bool in_call = r->state == TOK__CALL;
    if (tok_is_stop(t, id)) {
        if (tok__reply_enter(t, r, TOK__CONTENT) < 0 || (in_call && tok__end_call(t, r, false) < 0)) return -1;
        r->finish = r->n_calls ? TOK_TOOL_CALLS : TOK_STOP;
        return 1;
    }
    if (id == t->channel_open) {                      // after a whole call, ends it
        const TokStr call = tok_trim((TokStr){ r->call.s, r->call.n });
        if (in_call && !(call.n && tok__is_one_of(call.s[call.n - 1], "})"))) return 0;
        if (tok__reply_enter(t, r, TOK__CONTENT) < 0 || (in_call && tok__end_call(t, r, false) < 0)) return -1;
        r->after_call = false;
        return tok__reply_enter(t, r, TOK__THOUGHT);
    }
    if (id == t->channel_close) return r->state == TOK__THOUGHT ? tok__reply_enter(t, r, TOK__CONTENT) : 0;
    if (id == t->call_open) {                         // ends a call that is still open
        if (tok__reply_enter(t, r, TOK__CONTENT) < 0 || (in_call && tok__end_call(t, r, false) < 0)) return -1;
        r->call.n = 0;
        return tok__reply_enter(t, r, TOK__CALL);
    }
    if (id == t->call_close) {
        if (!in_call) return 0;
        return tok__reply_enter(t, r, TOK__CONTENT) < 0 ? -1 : tok__end_call(t, r, false);
    }
    size_t n;
    if (id == t->quote) {
        n = tok_stream_flush(&r->stream, r->piece.s, r->piece.cap);
        r->piece.s[n++] = in_call ? (char)TOK__DELIMITER : '"';
    } else {
        n = tok_stream_push(t, &r->stream, id, false, r->piece.s, r->piece.cap);
    }
    return tok__reply_text(r, r->piece.s, n) ? 0 : tok__fail(t, "out of memory for a reply");
}

int tok_reply_end(Tokenizer *t, TokReply *r) {
    if (r->finish != TOK_RUNNING) return 0;
    const bool in_call = r->state == TOK__CALL;
    if (!tok__room(&r->piece, t->stream_cap)) return tok__fail(t, "out of memory for a reply");
    if (tok__reply_enter(t, r, TOK__CONTENT) < 0 || (in_call && tok__end_call(t, r, true) < 0)) return -1;
    r->finish = TOK_LENGTH;
    return 0;
}

bool tok_reply_thinks(const TokReply *r) { return r->finish == TOK_RUNNING && r->state == TOK__THOUGHT; }

void tok_reply_free(TokReply *r) {
    for (int i = 0; i < r->n_calls; i++) free((void *)(uintptr_t)r->calls[i].name.s);
    free(r->calls);
    tok_text_free(&r->content);
    tok_text_free(&r->thought);
    tok_text_free(&r->call);
    tok_text_free(&r->piece);
    *r = (TokReply){ 0 };
}

#endif // TOKENIZER_IMPLEMENTED
#endif // TOKENIZER_IMPLEMENTATION
