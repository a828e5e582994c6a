/* fuzz_tokenizer.c - tokenizer.h on arbitrary bytes, as text and as vocabulary.
 *
 * Even first byte: the rest is text for a small built-in vocabulary. Every text encodes in every mode, and what comes
 * back is the text as UTF-8 repair leaves it; encoding that again changes nothing.
 * Odd first byte: the rest is a vocabulary. It is either refused with an error line or encodes without a bad access.
 *
 * clang -fsanitize=fuzzer links it with -DFUZZER; otherwise main() runs it once for each file named. */
#define TOKENIZER_IMPLEMENTATION
#include "../tokenizer.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NEED(cond) do { if (!(cond)) { fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #cond); abort(); } } while (0)

// Text of the ids, through the stream; checks that pieces stay in bounds.
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

static void make_built_in(Tokenizer *t) {
    static const char *texts[] = {
        "<bos>", "<eos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_response>", "<|\"|>", "a", "b", "c", "<",
        "|", ">", "\n", "\342\226\201", "\303\251", "\357\277\275", "ab", "bc", "abc", "aa", "aaa", "aaaa", "\n\n",
        "\342\226\201\342\226\201", "\342\226\201a", "<|", "|>", "\357\277\275\357\277\275", "\303\251a",
    };
    static const char *lines[] = {
        "\n \n", "\342\226\201 \342\226\201", "b c", "aa aa", "a b", "a a", "a bc", "aa a", "\342\226\201 a", "< |", "| >",
        "\357\277\275 \357\277\275", "\303\251 a", "ab c",
    };
    char bytes[256][8];
    TokStr tokens[320], merges[24];
    int n_tokens = 0, n_merges = 0;
    for (; n_tokens < 256; n_tokens++) {
        snprintf(bytes[n_tokens], sizeof bytes[n_tokens], "<0x%02X>", (unsigned)n_tokens);
        tokens[n_tokens] = (TokStr){ bytes[n_tokens], 6 };
    }
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        tokens[n_tokens++] = (TokStr){ texts[i], strlen(texts[i]) };
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++)
        merges[n_merges++] = (TokStr){ lines[i], strlen(lines[i]) };
    TokVocab v = { tokens, n_tokens, NULL, merges, n_merges, 256, 257, -1, { NULL, 0 }, false };
    NEED(tok_init(t, &v) == 0 && t->n_skipped == 0);
}

static void fuzz_text(const char *text, size_t n) {
    static Tokenizer t;                                // built once: it is the same for every input
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
    TokIds ids = { 0 };
    NEED(tok_chat_turn(&t, (TokStr){ text, n / 2 }, (TokStr){ text + n / 2, n - n / 2 }, &ids) == 0);
    int n_turns = 0;
    for (size_t i = 0; i < ids.n; i++) n_turns += ids.ids[i] == t.turn_open;
    NEED(n_turns == 3);
    tok_ids_free(&ids);
}

// Lines: the first half are tokens, the others merges. Numbers come from the first bytes.
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
                   bytes[3] % 32 - 1, (int8_t)bytes[4], { (const char *)bytes, size }, bytes[5] & 1 };
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
    TokIds ids = { 0 };
    if (tok_chat_turn(&t, (TokStr){ NULL, 0 }, (TokStr){ (const char *)bytes, size }, &ids) < 0) NEED(ids.n == 0);
    for (int32_t id = -2; id < t.n_tokens + 2; id++) NEED(tok_piece(&t, id, true).n <= size);
    tok_ids_free(&ids);
    tok_free(&t);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    if (size == 0) return 0;
    if (bytes[0] & 1) fuzz_vocabulary(bytes + 1, size - 1);
    else fuzz_text((const char *)bytes + 1, size - 1);
    return 0;
}

#ifndef FUZZER
int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        static uint8_t bytes[1 << 20];
        FILE *f = fopen(argv[i], "rb");
        if (!f) {
            fprintf(stderr, "%s: cannot read\n", argv[i]);
            return 1;
        }
        LLVMFuzzerTestOneInput(bytes, fread(bytes, 1, sizeof bytes, f));
        fclose(f);
    }
    return 0;
}
#endif
