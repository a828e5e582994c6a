/* test_tokenizer.c - encoding and decoding: tokenizer.h against golden ids of other programs, against a naive merge
 * loop, and with bad files. test_chat.c tests chat prompts and answers.
 *
 * The second reference, naive_encode, follows the definition literally: symbols are strings, and it merges the pair
 * whose "LEFT RIGHT" comes first in the merge list until there is none. It shares no code with tokenizer.h.
 *
 * Uses models/gemma4-mini-q8_0.gguf (4096 tokens in Gemma 4 form) with tests/golden/tokenizer-mini.tsv, and Gemma 4's
 * own vocabulary with the vectors in tests/golden/gemma4-*.gz (see the README there). */
#define _GNU_SOURCE                     // gguf.h: open, pread, mmap
#include "../gguf.h"
#define TOKENIZER_IMPLEMENTATION
#include "../tokenizer.h"
#include "test.h"
#include "vocab.h"

#define MODEL  "models/gemma4-mini-q8_0.gguf"
#define GOLDEN "tests/golden/tokenizer-mini.tsv"

static const char *mode_name[] = { "plain", "user_defined", "special" };

// ---- the naive encoder ----------------------------------------------------------------------------------------------

typedef struct { TokStr text; int index; } Entry;
typedef struct { Entry *tokens, *merges; int n_tokens, n_merges; int byte_id[256]; } Judge;

static int compare_text(const Entry *a, TokStr b) {
    size_t n = a->text.n < b.n ? a->text.n : b.n;
    int c = n ? memcmp(a->text.s, b.s, n) : 0;
    return c ? c : (a->text.n > b.n) - (a->text.n < b.n);
}

static int compare_entries(const void *a, const void *b) {
    const Entry *x = a, *y = b;
    int c = compare_text(x, y->text);
    return c ? c : (x->index > y->index) - (x->index < y->index);
}

static Entry *sorted(const TokStr *s, int n) {
    Entry *e = alloc((size_t)n * sizeof *e);
    for (int i = 0; i < n; i++) e[i] = (Entry){ s[i], i };
    qsort(e, (size_t)n, sizeof *e, compare_entries);
    return e;
}

static int lookup(const Entry *e, int n, TokStr text) { // the lowest index with this text, or -1
    int lo = 0, hi = n;
    while (lo < hi) {
        int mid = lo + (hi - lo) / 2;
        if (compare_text(&e[mid], text) < 0) lo = mid + 1;
        else hi = mid;
    }
    return lo < n && compare_text(&e[lo], text) == 0 ? e[lo].index : -1;
}

static Judge make_judge(const TokVocab *v) {
    Judge j = { sorted(v->tokens, v->n_tokens), sorted(v->merges, v->n_merges), v->n_tokens, v->n_merges, { 0 } };
    for (int b = 0; b < 256; b++) {
        char text[8];
        snprintf(text, sizeof text, "<0x%02X>", (unsigned)b);
        j.byte_id[b] = lookup(j.tokens, j.n_tokens, (TokStr){ text, 6 });
    }
    return j;
}

static void free_judge(Judge *j) {
    free(j->tokens);
    free(j->merges);
}

// Bytes of the valid character at s, or 0: decodes by the lead byte, then checks that this is the shortest form of a
// code point and not a surrogate.
static size_t char_len(const unsigned char *s, size_t n) {
    size_t len = s[0] < 0x80 ? 1 : s[0] < 0xC0 ? 0 : s[0] < 0xE0 ? 2 : s[0] < 0xF0 ? 3 : s[0] < 0xF8 ? 4 : 0;
    if (len == 0 || len > n) return 0;
    unsigned long c = len == 1 ? s[0] : s[0] & (0x7Fu >> len);
    for (size_t i = 1; i < len; i++) {
        if ((s[i] & 0xC0) != 0x80) return 0;
        c = c * 64 + (s[i] & 0x3F);
    }
    const unsigned long least[] = { 0, 0, 0x80, 0x800, 0x10000 };
    return c < least[len] || c > 0x10FFFF || (c >= 0xD800 && c <= 0xDFFF) ? 0 : len;
}

// Copies s, with U+FFFD for each byte that is not part of a valid character. The caller frees it.
static TokStr sanitize(const char *s, size_t n) {
    char *out = alloc(3 * n);
    size_t at = 0;
    for (size_t i = 0; i < n; ) {
        size_t len = char_len((const unsigned char *)s + i, n - i);
        memcpy(out + at, len ? s + i : "\xEF\xBF\xBD", len ? len : 3);
        at += len ? len : 3;
        i += len ? len : 1;
    }
    return (TokStr){ out, at };
}

static void naive_plain(const Judge *j, const char *s, size_t n, TokIds *out) {
    TokStr clean = sanitize(s, n);
    char *text = alloc(3 * clean.n), *line = alloc(3 * clean.n + 1);
    size_t n_text = 0;
    for (size_t i = 0; i < clean.n; i++) {
        if (clean.s[i] == ' ') { memcpy(text + n_text, "\xE2\x96\x81", 3); n_text += 3; }
        else text[n_text++] = clean.s[i];
    }
    TokStr *sym = alloc(n_text * sizeof *sym);         // code points that are tokens, or single bytes
    bool *is_byte = alloc(n_text);
    size_t n_sym = 0;
    for (size_t i = 0; i < n_text; ) {
        size_t len = char_len((unsigned char *)text + i, n_text - i);
        bool known = lookup(j->tokens, j->n_tokens, (TokStr){ text + i, len }) >= 0;
        for (size_t b = 0; b < (known ? 1 : len); b++) {
            is_byte[n_sym] = !known;
            sym[n_sym++] = (TokStr){ text + i + b, known ? len : 1 };
        }
        i += len;
    }
    for (;;) {
        int best_rank = -1;
        size_t best = 0;
        for (size_t i = 0; i + 1 < n_sym; i++) {
            if (is_byte[i] || is_byte[i + 1]) continue;
            memcpy(line, sym[i].s, sym[i].n);
            line[sym[i].n] = ' ';
            memcpy(line + sym[i].n + 1, sym[i + 1].s, sym[i + 1].n);
            int rank = lookup(j->merges, j->n_merges, (TokStr){ line, sym[i].n + 1 + sym[i + 1].n });
            if (rank >= 0 && (best_rank < 0 || rank < best_rank)) { best_rank = rank; best = i; }
        }
        if (best_rank < 0) break;
        sym[best].n += sym[best + 1].n;                // symbols are adjacent in text
        n_sym--;
        memmove(sym + best + 1, sym + best + 2, (n_sym - best - 1) * sizeof *sym);
        memmove(is_byte + best + 1, is_byte + best + 2, n_sym - best - 1);
    }
    for (size_t i = 0; i < n_sym; i++)
        append(out, is_byte[i] ? j->byte_id[(unsigned char)sym[i].s[0]] : lookup(j->tokens, j->n_tokens, sym[i]));
    free(sym);
    free(is_byte);
    free(text);
    free(line);
    free_str(clean);
}

static const char *special_texts[] = {                 // the first six belong to mode user_defined
    "<|tool_call>", "<tool_call|>", "<tool_response|>", "<|\"|>", "<|channel>", "<channel|>", "<|tool_response>",
    "<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|tool>", "<tool|>", "<|think|>", "<|turn>", "<turn|>", "<|image>",
    "<image|>", "<|audio>", "<audio|>", "<|image|>", "<|audio|>", "<|video|>",
};

static void naive_encode(const Judge *j, const char *s, size_t n, TokMode mode, TokIds *out) {
    size_t n_special = mode == TOK_PLAIN ? 0 : mode == TOK_USER_DEFINED ? 6 : 24, from = 0;
    for (size_t i = 0; i < n; ) {
        int32_t id = -1;
        size_t len = 1;
        for (size_t k = 0; k < n_special && id < 0; k++) {
            size_t m = strlen(special_texts[k]);
            if (n - i < m || memcmp(s + i, special_texts[k], m) != 0) continue;
            id = lookup(j->tokens, j->n_tokens, (TokStr){ special_texts[k], m });
            if (id >= 0) len = m;
        }
        if (id >= 0) {
            naive_plain(j, s + from, i - from, out);
            append(out, id);
            from = i + len;
        }
        i += len;
    }
    naive_plain(j, s + from, n - from, out);
}

// ---- comparing ------------------------------------------------------------------------------------------------------

static void check_ids(Tokenizer *t, TokStr text, TokMode mode, TokIds want, const char *what) {
    TokIds got = { 0 };
    int rc = tok_encode(t, text.s, text.n, mode, &got);
    if (!CHECK(rc == 0 && same_ids(got, want), "%s: mode %s, %zu bytes \"%.*s\": rc %d %s", what, mode_name[mode],
               text.n,
               (int)(text.n < 60 ? text.n : 60), text.n ? text.s : "", rc, rc ? t->err : "") && test_failed <= 50) {
        print_ids("want", want);
        print_ids("got", got);
    }
    tok_ids_free(&got);
}

static void check_naive(Tokenizer *t, const Judge *j, TokStr text, const char *what) {
    for (TokMode mode = TOK_PLAIN; mode <= TOK_SPECIAL; mode++) {
        TokIds want = { 0 };
        naive_encode(j, text.s, text.n, mode, &want);
        check_ids(t, text, mode, want, what);
        tok_ids_free(&want);
    }
}

// decode(encode(text)) == text, except for U+2581 and invalid bytes, with pieces and with the stream.
static void check_round_trip(Tokenizer *t, TokStr text) {
    TokStr want = sanitize(text.s, text.n);
    char *w = (char *)(uintptr_t)want.s;
    bool marked = false;                               // has U+2581, which is decoded as a space
    for (size_t i = 0; i + 3 <= want.n; i++) marked |= memcmp(w + i, "\xE2\x96\x81", 3) == 0;
    for (TokMode mode = TOK_PLAIN; mode <= TOK_SPECIAL && !marked; mode++) {
        TokIds ids = { 0 };
        CHECK(tok_encode(t, text.s, text.n, mode, &ids) == 0, "encode: %s", t->err);
        char *out = alloc(want.n + t->stream_cap), *piece = alloc(t->stream_cap);
        size_t n = 0, n_raw = 0;
        bool raw_same = true, whole = true;
        TokStream s = { { 0 }, 0 };
        for (size_t i = 0; i < ids.n && n <= want.n; i++) {
            TokStr raw = tok_piece(t, ids.ids[i], true);
            raw_same &= n_raw + raw.n <= want.n && memcmp(w + n_raw, raw.s, raw.n) == 0;
            n_raw += raw.n;
            size_t m = tok_stream_push(t, &s, ids.ids[i], true, piece, t->stream_cap);
            for (size_t at = 0; at < m; ) {
                size_t len = char_len((unsigned char *)piece + at, m - at);
                whole &= len > 0;
                at += len ? len : 1;
            }
            memcpy(out + n, piece, m);
            n += m;
        }
        n += tok_stream_flush(&s, out + n, t->stream_cap);
        CHECK(raw_same && n_raw == want.n, "pieces, mode %s: \"%.*s\"", mode_name[mode], (int)want.n, w);
        CHECK(whole, "stream, mode %s: half a character in \"%.*s\"", mode_name[mode], (int)want.n, w);
        CHECK(n == want.n && memcmp(out, w, n) == 0, "stream, mode %s: want \"%.*s\" got \"%.*s\"", mode_name[mode],
              (int)want.n, w, (int)n, out);
        free(out);
        free(piece);
        tok_ids_free(&ids);
    }

    // The bytes as byte tokens: the stream replaces invalid bytes like encoding.
    char *out = alloc(3 * text.n + t->stream_cap);
    size_t n = 0;
    bool bounded = true;
    TokStream s = { { 0 }, 0 };
    for (size_t i = 0; i < text.n; i++) {
        n += tok_stream_push(t, &s, t->byte_id[(unsigned char)text.s[i]], false, out + n, t->stream_cap);
        bounded &= s.n >= 0 && s.n <= 3;
    }
    CHECK(bounded, "stream of bytes: more than 3 pending");
    n += tok_stream_flush(&s, out + n, t->stream_cap);
    CHECK(n == want.n && memcmp(out, w, n) == 0, "stream of bytes: want \"%.*s\" got \"%.*s\"", (int)want.n, w, (int)n,
          out);
    free(out);
    free_str(want);
}

// ---- golden files ---------------------------------------------------------------------------------------------------

static int hex_digit(char c) { return c <= '9' ? c - '0' : c - 'a' + 10; }

// Checks every row "MODE <tab> HEX <tab> ids" of a file; with a naive encoder also each text in all three modes, and
// decoding.
static void check_golden(Tokenizer *t, const Judge *j, char *file, const char *path, size_t want_rows) {
    size_t n_rows = 0;
    if (!CHECK(file, "%s: cannot read", path)) return;
    for (char *line = file, *end; *line; line = end + 1) {
        end = strchr(line, '\n');
        if (!end) end = line + strlen(line) - 1;
        char *hex = memchr(line, '\t', (size_t)(end - line));
        if (*line == '#' || !hex) continue;
        char *list = memchr(hex + 1, '\t', (size_t)(end - hex - 1));
        if (!CHECK(list, "%s: row %zu has no ids", path, n_rows)) break;
        *end = *hex++ = *list++ = 0;
        TokMode mode = strcmp(line, "plain") == 0 ? TOK_PLAIN : strcmp(line, "special") == 0 ? TOK_SPECIAL
            : TOK_USER_DEFINED;

        size_t n = strlen(hex) / 2;
        char *text = alloc(n);
        for (size_t i = 0; i < n; i++) text[i] = (char)(hex_digit(hex[2 * i]) * 16 + hex_digit(hex[2 * i + 1]));
        TokIds want = { 0 };
        for (char *p = list; *p; ) append(&want, (int32_t)strtol(p, &p, 10));
        check_ids(t, (TokStr){ text, n }, mode, want, "golden");
        if (j) {
            check_naive(t, j, (TokStr){ text, n }, "naive");
            check_round_trip(t, (TokStr){ text, n });
        }
        tok_ids_free(&want);
        free(text);
        n_rows++;
    }
    CHECK(n_rows == want_rows, "%s: %zu rows, want %zu", path, n_rows, want_rows);
    free(file);
}

// Rows of ids with their bytes, with and without specials, and what the stream gives after each id and at the end.
static void check_decode(Tokenizer *t, char *file) {
    GgufJson row, v;
    size_t n_rows = 0;
    for (char *at = file; file && *at && next_row(&at, &row); n_rows++) {
        TokIds ids = ids_field(&row, "ids");
        const TokStr hex[2] = { text_field(&row, "hex"), text_field(&row, "hex_special") },
        flush = text_field(&row, "flush");
        for (int show = 0; show < 2; show++) {
            size_t n = 0;
            bool same = true;
            for (size_t i = 0; i < ids.n; i++) {
                const TokStr piece = tok_piece(t, ids.ids[i], show);
                for (size_t k = 0; k < piece.n && same; k++, n++) {
                    const char *pair = hex[show].s + 2 * n;
                    same = 2 * n + 1 < hex[show].n &&
                           (unsigned char)piece.s[k] == hex_digit(pair[0]) * 16 + hex_digit(pair[1]);
                }
            }
            CHECK(same && 2 * n == hex[show].n, "decode row %zu: bytes, specials %s", n_rows,
                  show ? "shown" : "hidden");
        }
        char *out = alloc(t->stream_cap);
        TokStream s = { { 0 }, 0 };
        GgufJson rest = field(&row, "stream");
        for (size_t i = 0; i < ids.n; i++) {
            const bool there = gguf_json_next(&rest, NULL, &v);
            const TokStr want = there ? json_text(&v) : str(NULL);
            const size_t n = tok_stream_push(t, &s, ids.ids[i], false, out, t->stream_cap);
            CHECK(there && same_text(want, (TokStr){ out, n }), "decode row %zu: stream, id %zu", n_rows, i);
            if (there) free_str(want);
        }
        const size_t n = tok_stream_flush(&s, out, t->stream_cap);
        CHECK(same_text(flush, (TokStr){ out, n }), "decode row %zu: flush", n_rows);
        free(out);
        free_str(hex[0]);
        free_str(hex[1]);
        free_str(flush);
        tok_ids_free(&ids);
    }
    CHECK(n_rows == 70, "decode: %zu rows, want 70", n_rows);
    free(file);
}

static void put_text(TokText *out, const char *s, size_t n) {
    if (out->cap - out->n < n) {
        out->s = realloc(out->s, out->cap = (out->n + n) * 2);
        if (!out->s) exit(1);
    }
    memcpy(out->s + out->n, s, n);
    out->n += n;
}

static void put_scalar(TokText *out, uint32_t c) {
    char s[4];
    put_text(out, s, gguf_utf8(c, s));
}

// The long texts that are made by a rule (see README.md of the golden data).
static TokText make_long(const GgufJson *row, const TokVocab *v) {
    const TokStr name = text_field(row, "name"), repeat = text_field(row, "repeat"),
        alphabet = text_field(row, "alphabet");
    const GgufJson times = field(row, "times");
    int64_t n = 0;
    TokText out = { 0 };
    gguf_json_int(&times, 0, 10000000, &n);
    for (int64_t i = 0; i < n; i++) put_text(&out, repeat.s, repeat.n);
    const bool scalars = !strncmp(name.s, "all_scalars", 11), tokens = !strncmp(name.s, "all_normal", 10);
    const bool nl = name.n > 3 && !strcmp(name.s + name.n - 3, "_nl"), sp = name.n > 3 &&
        !strcmp(name.s + name.n - 3, "_sp");
    for (uint32_t c = 0; scalars && c <= 0x10FFFF; c++) {
        if (c >= 0xD800 && c <= 0xDFFF) continue;
        if (sp) put_text(&out, " ", 1);
        put_scalar(&out, c);
        if (nl) put_text(&out, "\n", 1);
    }
    bool first = true;
    for (int i = 0; tokens && i < v->n_tokens; i++) {
        if (v->types[i] != 1) continue;
        if (nl && !first) put_text(&out, "\n", 1);
        first = false;
        put_text(&out, v->tokens[i].s, v->tokens[i].n);
    }
    uint32_t x = 12345;
    for (int i = 0; alphabet.n && i < 400000; i++) {
        x = (x * 1103515245u + 12345u) & 0x7FFFFFFF;
        put_text(&out, alphabet.s + (x >> 16) % alphabet.n, 1);
    }
    free_str(name);
    free_str(repeat);
    free_str(alphabet);
    return out;
}

static void check_generated(Tokenizer *t, const TokVocab *v, char *file) {
    GgufJson row;
    size_t n_rows = 0;
    for (char *at = file; file && *at && next_row(&at, &row); n_rows++) {
        TokText text = make_long(&row, v);
        const TokStr name = text_field(&row, "name"), want = text_field(&row, "fnv1a64");
        const GgufJson n_bytes = field(&row, "n_bytes"), n_ids = field(&row, "n_ids");
        int64_t bytes = -1, count = -1;
        gguf_json_int(&n_bytes, 0, INT32_MAX, &bytes);
        gguf_json_int(&n_ids, 0, INT32_MAX, &count);
        TokIds ids = { 0 };
        CHECK((int64_t)text.n == bytes, "%s: %zu bytes made, want %lld", name.s, text.n, (long long)bytes);
        CHECK(tok_encode(t, text.s, text.n, TOK_PLAIN, &ids) == 0, "%s: %s", name.s, t->err);
        uint64_t h = 0xCBF29CE484222325u;
        for (size_t i = 0; i < ids.n; i++)
            for (int b = 0; b < 32; b += 8) h = (h ^ (uint8_t)((uint32_t)ids.ids[i] >> b)) * 0x100000001B3u;
        char got[20];
        snprintf(got, sizeof got, "%016llx", (unsigned long long)h);
        CHECK((int64_t)ids.n == count && !strcmp(got, want.s), "%s: %zu ids, hash %s; want %lld, %s", name.s, ids.n,
              got, (long long)count, want.s);
        tok_ids_free(&ids);
        tok_text_free(&text);
        free_str(name);
        free_str(want);
    }
    CHECK(n_rows == 20, "generated texts: %zu rows, want 20", n_rows);
    free(file);
}

static void test_stop(Tokenizer *t) {
    const int32_t stop[] = { 1, 106, 50, 105 }, go[] = { 0, 2, 48, 49, 51, 100, 101, 212, 494, -1, 1 << 20 };
    for (size_t i = 0; i < sizeof stop / 4; i++) CHECK(tok_is_stop(t, stop[i]), "id %d is no stop", stop[i]);
    for (size_t i = 0; i < sizeof go / 4; i++) CHECK(!tok_is_stop(t, go[i]), "id %d is a stop", go[i]);
}

static void test_real_vocabulary(void) {
    File f;
    Tokenizer t;
    size_t n;
    if (!has_gzip()) {
        SKIP("Gemma 4's vocabulary and its vectors: gzip is missing");
        return;
    }
    if (!open_real_vocab(&f)) return;
    if (CHECK(tok_init(&t, &f.v) == 0, "real vocabulary: %s", t.err)) {
        CHECK(t.n_tokens == 262144 && t.n_skipped == 0, "%d tokens, %d merges skipped", t.n_tokens, t.n_skipped);
        check_golden(&t, NULL, read_gz("tests/golden/gemma4-encode.tsv.gz", &n), "gemma4-encode.tsv.gz", 2651);
        check_decode(&t, read_gz("tests/golden/gemma4-decode.jsonl.gz", &n));
        check_generated(&t, &f.v, read_gz("tests/golden/gemma4-encode-generated.jsonl.gz", &n));
        test_stop(&t);
        tok_free(&t);
    }
    close_vocab(&f);
}

// ---- random texts ---------------------------------------------------------------------------------------------------

// Texts of token pieces, words, special strings, letters and raw bytes, against the naive encoder in all modes.
static void test_random_texts(Tokenizer *t, const Judge *j) {
    for (int k = 0; k < 400; k++) {
        char text[2000];
        size_t n = 0, parts = 1 + rnd(24);
        for (size_t p = 0; p < parts; p++) {
            char letters[40];
            TokStr part = { letters, 0 };
            switch (rnd(6)) {
            case 0: case 1: part = tok_piece(t, 494 + (int32_t)rnd((uint32_t)t->n_tokens - 494), true); break;
            case 2: part = (TokStr){ special_texts[rnd(24)], 0 }; part.n = strlen(part.s); break;
            case 3: part.n = rnd(40); for (size_t i = 0; i < part.n; i++) letters[i] = (char)('a' + rnd(26)); break;
            case 4: part.n = rnd(40); memset(letters, " \n\ta.-"[rnd(6)], sizeof letters); break;
            case 5: part.n = rnd(6); for (size_t i = 0; i < part.n; i++) letters[i] = (char)rnd(256); break;
            }
            memcpy(text + n, part.s, part.n);
            n += part.n;
        }
        check_naive(t, j, (TokStr){ text, n }, "random text");
        check_round_trip(t, (TokStr){ text, n });
    }
}

// Random merge lists over five characters, in random order, so that merges apply in all combinations, in short pieces
// and in pieces long enough for the heap.
static void test_random_vocabularies(void) {
    enum { N_CHARS = 5, N_MERGES = 60, MAX_TEXT = 64 };
    for (int k = 0; k < 300; k++) {
        static char pool[N_MERGES][2 * MAX_TEXT], lines[N_MERGES][2 * MAX_TEXT + 1];
        TokStr tokens[256 + N_CHARS + N_MERGES], merges[N_MERGES];
        static char bytes[256][8];
        int n_tokens = 0, n_merges = 0, base = 256;
        for (; n_tokens < 256; n_tokens++) {
            snprintf(bytes[n_tokens], sizeof bytes[n_tokens], "<0x%02X>", (unsigned)n_tokens);
            tokens[n_tokens] = (TokStr){ bytes[n_tokens], 6 };
        }
        const char *chars[N_CHARS] = { "a", "b", "\xC3\xA9", "\xE2\x96\x81", "d" };
        for (int i = 0; i < N_CHARS; i++) tokens[n_tokens++] = (TokStr){ chars[i], strlen(chars[i]) };
        while (n_merges < N_MERGES) {
            TokStr l = tokens[base + (int)rnd((uint32_t)(n_tokens - base))];
            TokStr r = tokens[base + (int)rnd((uint32_t)(n_tokens - base))];
            if (l.n + r.n > MAX_TEXT) continue;
            char *text = pool[n_merges], *line = lines[n_merges];
            memcpy(text, l.s, l.n);
            memcpy(text + l.n, r.s, r.n);
            memcpy(line, l.s, l.n);
            line[l.n] = ' ';
            memcpy(line + l.n + 1, r.s, r.n);
            tokens[n_tokens++] = (TokStr){ text, l.n + r.n };          // a repeated text now and then
            merges[n_merges++] = (TokStr){ line, l.n + r.n + 1 };
        }
        for (int i = N_MERGES - 1; i > 0; i--) {
            int o = (int)rnd((uint32_t)i + 1);
            TokStr m = merges[i];
            merges[i] = merges[o];
            merges[o] = m;
        }
        TokVocab v = { tokens, n_tokens, NULL, merges, n_merges, -1, -1, -1, { NULL, 0 }, false, NULL, 0 };
        Tokenizer t;
        if (!CHECK(tok_init(&t, &v) == 0, "random vocabulary %d: %s", k, t.err)) return;
        Judge j = make_judge(&v);
        for (int i = 0; i < 8; i++) {
            char text[400];
            size_t n = 0, n_char = 1 + rnd(i < 4 ? 40 : 120);
            const char *alphabet[] = { "a", "b", "\xC3\xA9", " ", "d", "c" };
            for (size_t c = 0; c < n_char; c++) {
                const char *s = alphabet[rnd(rnd(20) ? 5 : 6)];
                memcpy(text + n, s, strlen(s));
                n += strlen(s);
            }
            check_naive(&t, &j, (TokStr){ text, n }, "random vocabulary");
        }
        free_judge(&j);
        tok_free(&t);
    }
}

// Pieces of 2 MB without a cut are fast unless the time is quadratic: a quadratic loop would need 10^12 steps.
static void test_long_runs(Tokenizer *t) {
    const size_t n = 2u << 20;
    char *text = alloc(n), *back = alloc(n + t->stream_cap);
    for (int kind = 0; kind < 6; kind++) {
        const char *what[] = { "one letter", "random letters", "spaces", "newlines", "NUL", "open angle brackets" };
        for (size_t i = 0; i < n; i++) text[i] = kind == 1 ? (char)('a' + rnd(26)) : "ea \n\0<"[kind];
        TokIds ids = { 0 };
        CHECK(tok_encode(t, text, n, TOK_SPECIAL, &ids) == 0, "2 MB of %s: %s", what[kind], t->err);
        size_t at = 0;
        TokStream s = { { 0 }, 0 };
        for (size_t i = 0; i < ids.n && at <= n; i++)
            at += tok_stream_push(t, &s, ids.ids[i], true, back + at, t->stream_cap);
        CHECK(at == n && memcmp(text, back, n) == 0, "2 MB of %s: round trip gives %zu bytes", what[kind], at);
        tok_ids_free(&ids);
    }
    free(text);
    free(back);
}

// ---- decode, stop ids -----------------------------------------------------------------------------------------------

static void test_decode(Tokenizer *t) {
    CHECK(tok_piece(t, -1, true).n == 0 && tok_piece(t, t->n_tokens, true).n == 0 &&
          tok_piece(t, INT32_MIN, true).n == 0 && tok_piece(t, INT32_MAX, true).n == 0, "pieces of ids out of range");
    CHECK(tok_piece(t, t->turn_open, false).n == 0, "a hidden special has a piece");
    TokStr shown = tok_piece(t, t->turn_open, true);
    CHECK(shown.n == 7 && memcmp(shown.s, "<|turn>", 7) == 0, "shown special: \"%.*s\"", (int)shown.n, shown.s);

    // Euro sign in byte tokens: nothing until it is whole.
    TokStream s = { { 0 }, 0 };
    char out[64];
    CHECK(t->stream_cap >= 9, "stream_cap %zu", t->stream_cap);
    size_t a = tok_stream_push(t, &s, t->byte_id[0xE2], false, out, sizeof out);
    size_t b = tok_stream_push(t, &s, t->byte_id[0x82], false, out, sizeof out);
    size_t c = tok_stream_push(t, &s, t->byte_id[0xAC], false, out, sizeof out);
    CHECK(a == 0 && b == 0 && c == 3 && memcmp(out, "\xE2\x82\xAC", 3) == 0, "euro sign: %zu %zu %zu", a, b, c);

    // Half of it, then a letter: the two bytes become U+FFFD, the letter is kept.
    tok_stream_push(t, &s, t->byte_id[0xE2], false, out, sizeof out);
    tok_stream_push(t, &s, t->byte_id[0x82], false, out, sizeof out);
    a = tok_stream_push(t, &s, t->byte_id['x'], false, out, sizeof out);
    CHECK(a == 7 && memcmp(out, "\xEF\xBF\xBD\xEF\xBF\xBDx", 7) == 0, "half a euro sign and x: %zu bytes", a);
    tok_stream_push(t, &s, t->byte_id[0xF0], false, out, sizeof out);
    CHECK(tok_stream_flush(&s, out, sizeof out) == 3 && s.n == 0, "flush of one pending byte");
    CHECK(tok_stream_flush(&s, out, sizeof out) == 0, "flush of nothing");

    // Too small a buffer: nothing is written after its end, and no incomplete character.
    for (size_t cap = 0; cap < 12; cap++) {
        s = (TokStream){ { 0xE2, 0x82 }, 2 };
        memset(out, '#', sizeof out);
        size_t n = tok_stream_push(t, &s, t->turn_open, true, out, cap);
        for (size_t i = cap; i < sizeof out; i++) CHECK(out[i] == '#', "cap %zu: wrote byte %zu", cap, i);
        TokStr clean = sanitize(out, n);
        CHECK(n <= cap && clean.n == n, "cap %zu: %zu bytes", cap, n);
        free_str(clean);
    }
}

// ---- hand-made and malicious vocabularies --------------------------------------------------------------------------

typedef struct {
    TokStr tokens[320], merges[64];
    int32_t types[320];
    char bytes[256][8];
    TokVocab v;
} Hand;

static int add_token(Hand *h, const char *text, int32_t type) {
    h->tokens[h->v.n_tokens] = (TokStr){ text, strlen(text) };
    h->types[h->v.n_tokens] = type;
    return h->v.n_tokens++;
}

static void add_merge(Hand *h, const char *line) { h->merges[h->v.n_merges++] = (TokStr){ line, strlen(line) }; }

enum { ID_A = 7, ID_B, ID_C, ID_AB, ID_BC, ID_ABC, ID_SP, ID_SPA, ID_NL, ID_BYTES };  // ids in the hand-made vocabulary

static void make_hand(Hand *h, bool with_bytes) {
    memset(h, 0, sizeof *h);
    h->v = (TokVocab){ h->tokens, 0, h->types, h->merges, 0, 2, 1, -1, { NULL, 0 }, true, NULL, 0 };
    const char *texts[] = { "<pad>", "<eos>", "<bos>", "<|turn>", "<turn|>", "<|\"|>", "<|tool_response>",
                            "a", "b", "c", "ab", "bc", "abc", "\342\226\201", "\342\226\201a", "\n" };
    for (int i = 0; i < ID_BYTES; i++) add_token(h, texts[i], i < ID_A ? 3 : 1);
    add_merge(h, "b c");
    add_merge(h, "a b");
    add_merge(h, "a bc");
    add_merge(h, "\xE2\x96\x81 a");
    for (int b = 0; b < 256 && with_bytes; b++) {
        snprintf(h->bytes[b], sizeof h->bytes[b], "<0x%02X>", (unsigned)b);
        add_token(h, h->bytes[b], 6);
    }
}

// Encode text and compare with the ids before -1.
static void check_hand(Hand *h, const char *text, TokMode mode, const int32_t *ids, const char *what) {
    Tokenizer t;
    if (!CHECK(tok_init(&t, &h->v) == 0, "%s: %s", what, t.err)) return;
    TokIds want = { 0 };
    for (; *ids >= 0; ids++) append(&want, *ids);
    check_ids(&t, (TokStr){ text, strlen(text) }, mode, want, what);
    tok_ids_free(&want);
    tok_free(&t);
}
#define IDS(...) (const int32_t[]){ __VA_ARGS__, -1 }

static void check_refused(Hand *h, const char *want, const char *what) {
    Tokenizer t;
    int rc = tok_init(&t, &h->v);
    CHECK(rc < 0 && strstr(t.err, want) && !strchr(t.err, '\n'), "%s: rc %d, want an error with \"%s\", got \"%s\"",
          what, rc, want, rc < 0 ? t.err : "");
    tok_free(&t);                                      // allowed after a failure
}

static void hand_encode(Hand *h) {
    Tokenizer t;
    make_hand(h, true);
    check_hand(h, "", TOK_PLAIN, IDS(-1), "empty text");
    check_hand(h, "abc", TOK_PLAIN, IDS(ID_ABC), "b c first, then a bc");
    check_hand(h, "abab", TOK_PLAIN, IDS(ID_AB, ID_AB), "ab twice");
    check_hand(h, "bcc", TOK_PLAIN, IDS(ID_BC, ID_C), "bc c");
    check_hand(h, " abc", TOK_PLAIN, IDS(ID_SP, ID_ABC), "space is not merged: a merge of lower rank takes the a");
    check_hand(h, " a", TOK_PLAIN, IDS(ID_SPA), "space joins");
    check_hand(h, "d", TOK_PLAIN, IDS(ID_BYTES + 'd'), "byte fallback");
    check_hand(h, "<|turn>a", TOK_SPECIAL, IDS(3, ID_A), "special");
    check_hand(h, "a<|\"|>b", TOK_USER_DEFINED, IDS(ID_A, 5, ID_B), "user-defined");
    check_hand(h, "\xE2\x82", TOK_PLAIN, IDS(ID_BYTES + 0xEF, ID_BYTES + 0xBF, ID_BYTES + 0xBD, ID_BYTES + 0xEF,
                                             ID_BYTES + 0xBF, ID_BYTES + 0xBD), "invalid bytes");

    // Repeated texts: the first id is used; both are decoded.
    int twin = add_token(h, "ab", 1);
    check_hand(h, "ab", TOK_PLAIN, IDS(ID_AB), "repeated token");
    h->v.types = NULL;                                  // bytes and special strings are recognised by their texts
    check_hand(h, "ab d<|turn>", TOK_SPECIAL, IDS(ID_AB, ID_SP, ID_BYTES + 'd', 3), "no types");
    h->v.types = h->types;
    if (CHECK(tok_init(&t, &h->v) == 0, "%s", t.err)) {
        CHECK(tok_piece(&t, twin, false).n == 2, "piece of the repeated token");
        tok_free(&t);
    }
}

static void hand_merges(Hand *h) {
    Tokenizer t;
    // Merges that cannot apply are ignored: no space, empty sides, unknown texts, half a character, a byte token, and
    // those that would make a special string from plain text.
    make_hand(h, true);
    add_token(h, "<|tu", 1);
    add_token(h, "rn>", 1);
    add_token(h, "\xE2", 1);
    add_token(h, "\x96\x81", 1);
    add_token(h, "", 1);
    add_token(h, "<0x41>b", 1);
    int n_good = h->v.n_merges;
    const char *bad[] = { "", " ", "ab", " a", "a ", "  ", "a  b", "a b c", "x y", "a c", "<|tu rn>", "\xE2 \x96\x81",
                          "<0x41> b", "\n \n" };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) add_merge(h, bad[i]);
    if (CHECK(tok_init(&t, &h->v) == 0, "useless merges: %s", t.err)) {
        CHECK(t.n_skipped == h->v.n_merges - n_good, "skipped %d of %d", t.n_skipped, h->v.n_merges - n_good);
        tok_free(&t);
    }
    check_hand(h, " abc", TOK_PLAIN, IDS(ID_SP, ID_ABC), "useless merges");
    check_hand(h, "Ab", TOK_PLAIN, IDS(ID_BYTES + 'A', ID_B), "a byte token does not merge");
    add_merge(h, "b c");                              // repeated: the lower rank is used
    check_hand(h, "abc", TOK_PLAIN, IDS(ID_ABC), "repeated merge");
    h->v.n_merges = 0;
    check_hand(h, "abc", TOK_PLAIN, IDS(ID_A, ID_B, ID_C), "no merges");
    h->v.merges = NULL;
    check_hand(h, "abc", TOK_PLAIN, IDS(ID_A, ID_B, ID_C), "no merge list");
}

static void hand_types(Hand *h) {
    make_hand(h, true);
    h->types[ID_A] = 3;                                 // plain text never becomes a control token
    check_hand(h, "ab", TOK_PLAIN, IDS(ID_BYTES + 'a', ID_B), "control token of one letter");
    for (int i = 0; i < h->v.n_tokens; i++) if (h->types[i] != 6) h->types[i] = -77 + i;
    h->types[3] = 1000000;
    for (int i = 0; i < h->v.n_tokens; i++) if (h->types[i] == 6 && i < ID_BYTES) h->types[i] = 1;
    check_hand(h, "ab", TOK_PLAIN, IDS(ID_AB), "unknown types are normal");
}

static void hand_no_bytes(Hand *h) {
    Tokenizer t;
    // Missing byte tokens: no error until one is needed; then an error names it, and the result is unchanged.
    make_hand(h, false);
    check_hand(h, "ab\nc", TOK_PLAIN, IDS(ID_AB, ID_NL, ID_C), "no byte tokens, none needed");
    if (CHECK(tok_init(&t, &h->v) == 0, "%s", t.err)) {
        TokIds out = { 0 };
        CHECK(tok_encode(&t, "c", 1, TOK_PLAIN, &out) == 0 && out.n == 1, "append: %s", t.err);
        int rc = tok_encode(&t, "ab<|turn>a\xC3\xA9", 12, TOK_SPECIAL, &out);
        CHECK(rc < 0 && strstr(t.err, "<0xC3>") && out.n == 1, "missing byte: rc %d, %zu ids, \"%s\"", rc, out.n,
              t.err);
        // The chat needs more letters than a, b, c.
        const TokChat chat = { .messages = str("[{\"role\":\"user\",\"content\":\"a\"}]") };
        rc = tok_chat(&t, &chat, &out, NULL);
        CHECK(rc < 0 && strstr(t.err, "<0x75>") && out.n == 1, "chat without bytes: rc %d \"%s\"", rc, t.err);
        tok_ids_free(&out);
        tok_free(&t);
    }
}

static void hand_no_specials(Hand *h) {
    Tokenizer t;
    // Missing special strings.
    make_hand(h, true);
    h->tokens[3] = (TokStr){ "<|turm>", 7 };
    check_hand(h, "a<|turn>", TOK_SPECIAL, IDS(ID_A, ID_BYTES + '<', ID_BYTES + '|', ID_BYTES + 't', ID_BYTES + 'u',
                                                ID_BYTES + 'r', ID_BYTES + 'n', ID_BYTES + '>'), "special missing");
    if (CHECK(tok_init(&t, &h->v) == 0, "%s", t.err)) {
        TokIds out = { 0 };
        const TokChat chat = { .messages = str("[{\"role\":\"user\",\"content\":\"a\"}]") };
        int rc = tok_chat(&t, &chat, &out, NULL);
        CHECK(rc < 0 && strstr(t.err, "<|turn>") && out.n == 0, "chat without <|turn>: rc %d \"%s\"", rc, t.err);
        CHECK(t.turn_open == -1 && t.channel_open == -1 && !tok_is_stop(&t, -1), "missing specials are -1");
        tok_ids_free(&out);
        tok_free(&t);
    }
}

static void hand_refused(Hand *h) {
    // Refused files.
    make_hand(h, true); h->v.n_tokens = 0;           check_refused(h, "tokens", "no tokens");
    make_hand(h, true); h->v.n_tokens = -5;          check_refused(h, "tokens", "negative count");
    make_hand(h, true); h->v.tokens = NULL;          check_refused(h, "tokens", "no list");
    make_hand(h, true); h->v.merges = NULL;          check_refused(h, "merges", "no merge list");
    make_hand(h, true); h->v.n_merges = -1;          check_refused(h, "merges", "negative merges");
    make_hand(h, true); h->v.bos = h->v.n_tokens;     check_refused(h, "bos", "bos out of range");
    make_hand(h, true); h->v.eos = -2;               check_refused(h, "eos", "eos out of range");
    make_hand(h, true); h->v.eot = INT32_MAX;        check_refused(h, "eot", "eot out of range");
    make_hand(h, true); h->types[ID_A] = 6;          check_refused(h, "byte", "byte token of another text");
    make_hand(h, true); h->tokens[ID_BYTES].s = NULL; check_refused(h, "token", "text without bytes");
}

static void hand_stops(Hand *h) {
    Tokenizer t;
    make_hand(h, true);                               // bos and eos absent: found by text; eot counts as a stop
    h->v.bos = h->v.eos = -1;
    h->v.eot = ID_C;
    if (CHECK(tok_init(&t, &h->v) == 0, "%s", t.err)) {
        CHECK(t.bos == 2 && t.eos == 1 && tok_is_stop(&t, 1) && tok_is_stop(&t, ID_C), "bos %d eos %d", t.bos, t.eos);
        tok_free(&t);
    }
}

static void test_hand_made(void) {
    static Hand h;
    hand_encode(&h);
    hand_merges(&h);
    hand_types(&h);
    hand_no_bytes(&h);
    hand_no_specials(&h);
    hand_refused(&h);
    hand_stops(&h);
}

// ---------------------------------------------------------------------------------------------------------------------

// ---- keys that collide ----------------------------------------------------------------------------------------------
// The author of a file can compute the hash of a table at address 0: texts and pairs that collide there must not
// collide in a table at its real address.

enum { N_MADE = 1500, MADE_MASK = 4095, APART = 100 };           // both tables have 4096 slots

// Pairs that share one slot of a table at address 0, in a table at address `at`: they must not collide there.
static void test_made_pairs_at(uintptr_t at) {
    static uint64_t keys[N_MADE];
    for (uint32_t b = 0, n = keys[N_MADE - 1] ? N_MADE : 0; n < N_MADE; b++) {
        const uint64_t key = tok__join_key(0x20 + (b >> 16), b & 0xFFFF);
        if ((tok__mix(NULL, key) & MADE_MASK) == 0) keys[n++] = key;
    }
    bool used[MADE_MASK + 1] = { 0 };
    for (int i = 0; i < N_MADE; i++) {
        size_t slot = tok__mix((const void *)at, keys[i]);
        while (used[slot & MADE_MASK]) slot++;
        used[slot & MADE_MASK] = true;
    }
    int run = 0, longest = 0;
    for (int i = 0; i <= MADE_MASK; i++) longest = (run = used[i] ? run + 1 : 0) > longest ? run : longest;
    CHECK(longest < APART, "pairs made for one slot, table at %p: %d of %d in a row", (const void *)at, longest,
          N_MADE);
}

static void test_made_keys(void) {
    enum { N = N_MADE, MASK = MADE_MASK };
    static char texts[N][8];
    static TokStr tokens[N];
    Tokenizer t = { 0 };
    Tok__Texts x = { 0 };
    int n = 0;
    for (uint32_t i = 0; n < N; i++) {
        for (int k = 0; k < 7; k++) texts[n][k] = (char)('a' + (i >> 4 * k & 15));
        tokens[n] = (TokStr){ texts[n], 7 };
        n += (tok__mix(NULL, tok__hash(0xCBF29CE484222325u, tokens[n])) & MASK) == 0;
    }
    const TokVocab v = { .tokens = tokens, .n_tokens = N, .bos = -1, .eos = -1, .eot = -1 };
    if (CHECK(tok__index_tokens(&t, &v, &x) == 0 && x.mask == MASK, "%zu slots: %s", x.mask + 1, t.err)) {
        size_t run = 0, longest = 0;
        for (size_t i = 0; i <= x.mask; i++)
            if ((run = x.slot[i].id >= 0 ? run + 1 : 0) > longest) longest = run;
        CHECK(longest < APART, "texts made for one slot: %zu of %d in a row", longest, N);
        for (int i = 0; i < N; i++)
            if (tok__id_of(&x, tokens[i]) != i) CHECK(0, "text %d made for one slot: not found", i);
    }
    free(x.slot);
    tok_free(&t);

    t = (Tokenizer){ .join_mask = 1023, .join = calloc(1024, sizeof *t.join) };
    for (uint32_t a = 0x20, b = 0; t.join && t.n_join < N; b++) {
        if (b == 0x10000) {
            a++;
            b = 0;
        }
        if ((tok__mix(NULL, tok__join_key(a, b)) & MASK) == 0 && tok__add_join(&t, a, b) < 0) break;
    }
    if (CHECK(t.n_join == N && t.join_mask == MASK, "%zu pairs in %zu slots", t.n_join, t.join_mask + 1)) {
        size_t run = 0, longest = 0;
        for (size_t i = 0; i <= t.join_mask; i++)
            if ((run = t.join[i] ? run + 1 : 0) > longest) longest = run;
        CHECK(longest < APART, "pairs made for one slot: %zu of %d in a row", longest, N);
    }
    tok_free(&t);
    for (uintptr_t at = 0x7F1200000010; at < 0x7F1200000010 + 2000 * 4096; at += 4096) test_made_pairs_at(at);
}

int main(void) {
    File f;
    Tokenizer t;
    test_hand_made();
    test_made_keys();
    test_random_vocabularies();
    if (open_vocab(&f, MODEL)) {
        if (CHECK(tok_init(&t, &f.v) == 0, "%s: %s", MODEL, t.err)) {
            CHECK(t.n_skipped == 0, "%s: %d merges skipped", MODEL, t.n_skipped);
            Judge j = make_judge(&f.v);
            FILE *golden = fopen(GOLDEN, "rb");
            size_t n;
            check_golden(&t, &j, golden ? read_stream(golden, &n) : NULL, GOLDEN, 395);
            if (golden) fclose(golden);
            test_random_texts(&t, &j);
            test_long_runs(&t);
            test_decode(&t);
            test_stop(&t);
            free_judge(&j);
            tok_free(&t);
        }
        close_vocab(&f);
    }
    test_real_vocabulary();
    return test_done("tokenizer");
}
