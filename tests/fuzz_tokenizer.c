/* fuzz_tokenizer.c - tokenizer.h on arbitrary bytes, as text and as vocabulary.
 *
 * Even first byte: the rest is text for a small built-in vocabulary. Every text can be encoded in every mode, and
 * decoding gives the text with invalid UTF-8 replaced; encoding that text again gives the same ids. Odd first byte: the
 * rest is a vocabulary. It is either refused with an error line, or it can encode text without a bad access.
 * fuzz_chat.c is the target for the chat. */
#define _GNU_SOURCE                     // gguf.h: open, pread, mmap
#include "fuzz.h"

// Decodes the ids with the stream; checks that the pieces are in bounds.
static char *decode(const Tokenizer *t, const TokIds *ids, bool show_special, size_t *n) {
    char *out = malloc(3 * t->stream_cap + ids->n * t->stream_cap);
    NEED(out);
    TokStream s = { { 0 }, 0 };
    *n = 0;
    for (size_t i = 0; i < ids->n; i++) {
        NEED(ids->ids[i] >= 0 && ids->ids[i] < t->n_tokens);
        *n += tok_stream_push(t, &s, ids->ids[i], show_special, out + *n, t->stream_cap);
        NEED(s.n >= 0 && s.n <= 3);
    }
    *n += tok_stream_flush(&s, out + *n, t->stream_cap);
    return out;
}

static void fuzz_text(const char *text, size_t n) {
    static Tokenizer t;                                // built once, for every input
    if (!t.n_tokens) make_built_in(&t);
    for (TokMode mode = TOK_PLAIN; mode <= TOK_SPECIAL; mode++) {
        TokIds ids = { 0 }, again = { 0 };
        NEED(tok_encode(&t, text, n, mode, &ids) == 0);
        size_t n_back, n_again;
        char *back = decode(&t, &ids, true, &n_back);
        NEED(n_back <= 3 * n);
        NEED(tok_encode(&t, back, n_back, mode, &again) == 0);
        char *twice = decode(&t, &again, true, &n_again);
        NEED(ids.n == again.n && (ids.n == 0 || memcmp(ids.ids, again.ids, ids.n * 4) == 0));
        NEED(n_back == n_again && memcmp(back, twice, n_back) == 0);
        free(back);
        free(twice);
        tok_ids_free(&again);
        tok_ids_free(&ids);
    }
}

// Lines: the first half are tokens, the others merges. The first bytes give the numbers.
static void fuzz_vocabulary(const uint8_t *bytes, size_t size) {
    TokStr line[256];
    int32_t types[256];
    int n_lines = 0;
    if (size < 8) return;
    const char *s = (const char *)bytes + 8, *end = (const char *)bytes + size;
    while (s < end && n_lines < 256) {
        const char *stop = memchr(s, '\n', (size_t)(end - s));
        if (!stop) stop = end;
        types[n_lines] = bytes[n_lines % 8] % 8;
        line[n_lines++] = (TokStr){ s, (size_t)(stop - s) };
        s = stop + 1;
    }
    int n_tokens = n_lines * (bytes[0] % 17) / 16;
    TokVocab v = { line, n_tokens, bytes[1] & 1 ? types : NULL, line + n_tokens, n_lines - n_tokens, bytes[2] % 32 - 1,
                   bytes[3] % 32 - 1, (int8_t)bytes[4], { (const char *)bytes, size }, bytes[5] & 1, NULL, 0 };
    Tokenizer t;
    if (tok_init(&t, &v) < 0) {
        NEED(t.err[0] && !strchr(t.err, '\n'));
        return;
    }
    for (TokMode mode = TOK_PLAIN; mode <= TOK_SPECIAL; mode++) {
        TokIds ids = { 0 };
        if (tok_encode(&t, (const char *)bytes, size, mode, &ids) < 0) NEED(t.err[0] && ids.n == 0);
        size_t n;
        free(decode(&t, &ids, bytes[6] & 1, &n));
        tok_ids_free(&ids);
    }
    TokText messages = { 0 };
    TokIds ids = { 0 };
    NEED(tok_add_message(&messages, "user", (TokStr){ (const char *)bytes, size }) == 0);
    const TokChat chat = { .messages = { messages.s, messages.n }, .think = true, .add_cue = true };
    if (tok_chat(&t, &chat, &ids, NULL) < 0) NEED(ids.n == 0 && t.err[0] && !strchr(t.err, '\n'));
    tok_text_free(&messages);
    for (int32_t id = -2; id < t.n_tokens + 2; id++) NEED(tok_piece(&t, id, true).n <= size);
    tok_ids_free(&ids);
    tok_free(&t);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    if (size == 0) return 0;
    if (bytes[0] & 1) fuzz_vocabulary(bytes + 1, size - 1);
    else fuzz_text((const char *)bytes + 1, size - 1);
    return 0;
}
