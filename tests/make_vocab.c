/* make_vocab.c - Gemma 4's real vocabulary as a GGUF file without tensors, rebuilt from the list of its tokens.
 *
 *   gzip -dc tests/golden/gemma4-tokens.txt.gz | make_vocab OUT.gguf
 *
 * llama.cpp's file has 15.8 MB. Everything in it except the texts of the tokens follows from rules:
 *   scores   all -1000
 *   types    normal, except the special strings and the byte tokens
 *   merges   every way to split a normal token between two characters into two tokens, the longer left part first;
 *            tokens in the order of ids. Before them the runs of newlines, spaces and tabs: by the length of the left
 *            part, then of the right part, both descending, then in this order
 * One pair is at another place in the published list: the first merge of words, "_ t", before the last one of runs, two
 * tabs. The result equals the published file byte for byte; its hash is checked at the end.
 *
 * Input: the 262144 texts, one per line, with a space for U+2581 and empty lines for 1, 2, 3 ... newlines. The rest is
 * the chat template. A test that includes this file calls vocab_make. */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { VOCAB_TOKENS = 262144, VOCAB_MERGES = 514906, VOCAB_SLOTS = 1 << 20, VOCAB_MAX_RUN = 31 };
#define VOCAB_HASH 0x4749266C4489355Au        // FNV-1a 64 of the published file

typedef struct { uint8_t *s; size_t n, cap; } VocabBytes;
typedef struct { const char *s; size_t n; } VocabText;

static void *vocab_alloc(void *p, size_t n) {
    p = realloc(p, n);
    if (!p) {
        fprintf(stderr, "make_vocab: error: out of memory: %zu bytes wanted\n", n);
        exit(1);
    }
    return p;
}

static void vocab_put(VocabBytes *b, const void *s, size_t n) {
    if (n > b->cap - b->n) b->s = vocab_alloc(b->s, b->cap = (b->n + n) * 2);
    memcpy(b->s + b->n, s, n);
    b->n += n;
}

static void vocab_u32(VocabBytes *b, uint32_t v) { vocab_put(b, &v, 4); }
static void vocab_u64(VocabBytes *b, uint64_t v) { vocab_put(b, &v, 8); }
static void vocab_text(VocabBytes *b, VocabText a, VocabText c) {     // the string a c
    vocab_u64(b, a.n + c.n);
    vocab_put(b, a.s, a.n);
    vocab_put(b, c.s, c.n);
}

// A key and the type of its value: 4 u32, 5 i32, 6 f32, 7 bool, 8 string, 9 array.
static void vocab_key(VocabBytes *b, const char *key, uint32_t type) {
    vocab_text(b, (VocabText){ key, strlen(key) }, (VocabText){ "", 0 });
    vocab_u32(b, type);
}
static void vocab_key_array(VocabBytes *b, const char *key, uint32_t type, uint64_t n) {
    vocab_key(b, key, 9);
    vocab_u32(b, type);
    vocab_u64(b, n);
}
static void vocab_key_u32(VocabBytes *b, const char *key, uint32_t v) { vocab_key(b, key, 4); vocab_u32(b, v); }
static void vocab_key_f32(VocabBytes *b, const char *key, float v) { vocab_key(b, key, 6); vocab_put(b, &v, 4); }
static void vocab_key_bool(VocabBytes *b, const char *key, uint8_t v) { vocab_key(b, key, 7); vocab_put(b, &v, 1); }
static void vocab_key_str(VocabBytes *b, const char *key, const char *v) {
    vocab_key(b, key, 8);
    vocab_text(b, (VocabText){ v, strlen(v) }, (VocabText){ "", 0 });
}

// The file's keys for the model 26B-A4B.
static void vocab_model_keys(VocabBytes *b) {
    vocab_key_str(b, "general.architecture", "gemma4");
    vocab_key_str(b, "general.type", "model");
    vocab_key_str(b, "general.name", "47b6801b24d15ff9bcd8c96dfaea0be9ed3a0301");
    vocab_key_str(b, "general.finetune", "47b6801b24d15ff9bcd8c96dfaea0be9ed3a0301");
    vocab_key_u32(b, "gemma4.block_count", 30);
    vocab_key_u32(b, "gemma4.context_length", 262144);
    vocab_key_u32(b, "gemma4.embedding_length", 2816);
    vocab_key_u32(b, "gemma4.feed_forward_length", 2112);
    vocab_key_u32(b, "gemma4.attention.head_count", 16);
    vocab_key_array(b, "gemma4.attention.head_count_kv", 5, 30);
    for (int l = 0; l < 30; l++) vocab_u32(b, l % 6 == 5 ? 2 : 8);
    vocab_key_f32(b, "gemma4.rope.freq_base", 1000000.0f);
    vocab_key_f32(b, "gemma4.rope.freq_base_swa", 10000.0f);
    vocab_key_f32(b, "gemma4.attention.layer_norm_rms_epsilon", 1e-6f);
    vocab_key_u32(b, "gemma4.expert_count", 128);
    vocab_key_u32(b, "gemma4.expert_used_count", 8);
    vocab_key_u32(b, "gemma4.attention.key_length", 512);
    vocab_key_u32(b, "gemma4.attention.value_length", 512);
    vocab_key_u32(b, "general.file_type", 1);
    vocab_key_f32(b, "gemma4.final_logit_softcapping", 30.0f);
    vocab_key_u32(b, "gemma4.attention.sliding_window", 1024);
    vocab_key_u32(b, "gemma4.attention.shared_kv_layers", 0);
    vocab_key_u32(b, "gemma4.embedding_length_per_layer_input", 0);
    vocab_key_array(b, "gemma4.attention.sliding_window_pattern", 7, 30);
    for (int l = 0; l < 30; l++) vocab_put(b, &(uint8_t){ l % 6 != 5 }, 1);
    vocab_key_u32(b, "gemma4.attention.key_length_swa", 256);
    vocab_key_u32(b, "gemma4.attention.value_length_swa", 256);
    vocab_key_u32(b, "gemma4.expert_feed_forward_length", 704);
    vocab_key_u32(b, "gemma4.rope.dimension_count", 512);
    vocab_key_u32(b, "gemma4.rope.dimension_count_swa", 256);
    vocab_key_u32(b, "general.quantization_version", 2);
}

// 3 control, 4 user-defined, 6 byte, 1 normal.
static uint32_t vocab_type(uint32_t id) {
    static const uint32_t control[] = { 0, 1, 2, 3, 4, 46, 47, 98, 105, 106, 255999, 256000, 258880, 258881, 258882,
                                        258883, 258884 };
    static const uint32_t user_defined[] = { 48, 49, 50, 51, 52, 100, 101 };
    for (size_t i = 0; i < sizeof control / sizeof *control; i++) if (control[i] == id) return 3;
    for (size_t i = 0; i < sizeof user_defined / sizeof *user_defined; i++) if (user_defined[i] == id) return 4;
    return id >= 238 && id <= 493 ? 6 : 1;
}

static uint64_t vocab_hash(const void *s, size_t n) {
    uint64_t h = 0xCBF29CE484222325u;
    for (size_t i = 0; i < n; i++) h = (h ^ ((const uint8_t *)s)[i]) * 0x100000001B3u;
    return h;
}

// True: this is the text of a token. slot: a hash table of token number + 1.
static uint32_t *vocab_find(uint32_t *slot, const VocabText *token, VocabText s) {
    size_t i = (size_t)(vocab_hash(s.s, s.n) * 0x9E3779B97F4A7C15u >> 44);
    for (;; i++) {
        uint32_t *id = &slot[i % VOCAB_SLOTS];
        if (!*id || (token[*id - 1].n == s.n && memcmp(token[*id - 1].s, s.s, s.n) == 0)) return id;
    }
}

static void vocab_merge(VocabBytes *b, VocabText left, VocabText right) {
    vocab_u64(b, left.n + 1 + right.n);
    vocab_put(b, left.s, left.n);
    vocab_put(b, " ", 1);
    vocab_put(b, right.s, right.n);
}

// The merges of runs, and of all other tokens.
static void vocab_merges(VocabBytes *b, const VocabText *token, uint32_t *slot, const char *run[3]) {
    const size_t char_len[3] = { 1, 3, 1 };
    const VocabText tab = { run[2], 1 };
    for (size_t left = VOCAB_MAX_RUN - 1; left > 0; left--)
        for (size_t right = VOCAB_MAX_RUN - left; right > 0; right--)
            for (int k = 0; k < 3; k++)
                if (left > 1 || right > 1 || k < 2)
                    vocab_merge(b, (VocabText){ run[k], left * char_len[k] },
                                (VocabText){ run[k], right * char_len[k] });
    bool tabs_are_due = true;
    for (uint32_t id = 0; id < VOCAB_TOKENS; id++) {
        const VocabText t = token[id];
        bool is_run = false;
        for (int k = 0; k < 3; k++) is_run |= t.n <= VOCAB_MAX_RUN * char_len[k] && memcmp(t.s, run[k], t.n) == 0;
        if (is_run || vocab_type(id) == 6) continue;
        for (size_t at = t.n; at-- > 1; ) {
            const VocabText left = { t.s, at }, right = { t.s + at, t.n - at };
            const bool inside = ((uint8_t)t.s[at] & 0xC0) == 0x80;    // inside a character
            if (inside || !*vocab_find(slot, token, left) || !*vocab_find(slot, token, right)) continue;
            vocab_merge(b, left, right);
            if (tabs_are_due) vocab_merge(b, tab, tab);
            tabs_are_due = false;
        }
    }
}

// Makes the bytes of the file from the input; the caller frees them. NULL: *why says why.
static uint8_t *vocab_make(FILE *in, size_t *size, const char **why) {
    static VocabText token[VOCAB_TOKENS];
    static char runs[3][VOCAB_MAX_RUN * 3 + 1];
    const char *run[3] = { runs[0], runs[1], runs[2] };
    VocabBytes input = { 0 }, text = { 0 }, b = { 0 };
    char chunk[1 << 16];
    for (size_t n; (n = fread(chunk, 1, sizeof chunk, in)) > 0; ) vocab_put(&input, chunk, n);
    for (int i = 0; i < VOCAB_MAX_RUN; i++) {
        runs[0][i] = '\n';
        memcpy(runs[1] + 3 * i, "\xE2\x96\x81", 3);
        runs[2][i] = '\t';
    }

    text.s = vocab_alloc(NULL, text.cap = 3 * input.n + 1);           // large enough: texts point into it
    size_t at = 0, n_newlines = 0;
    for (uint32_t id = 0; id < VOCAB_TOKENS; id++, at++) {
        const size_t start = text.n;
        for (; at < input.n && input.s[at] != '\n'; at++) {
            if (input.s[at] == ' ') vocab_put(&text, "\xE2\x96\x81", 3);
            else vocab_put(&text, input.s + at, 1);
        }
        token[id] = (VocabText){ (char *)text.s + start, text.n - start };
        if (text.n == start && n_newlines < VOCAB_MAX_RUN) token[id] = (VocabText){ runs[0], ++n_newlines };
    }
    *why = "the list of tokens is cut short or damaged";
    const bool complete = at < input.n;

    uint32_t *slot = vocab_alloc(NULL, VOCAB_SLOTS * sizeof *slot);
    memset(slot, 0, VOCAB_SLOTS * sizeof *slot);
    for (uint32_t id = 0; id < VOCAB_TOKENS; id++) *vocab_find(slot, token, token[id]) = id + 1;
    vocab_put(&b, "GGUF\3\0\0\0", 8);
    vocab_u64(&b, 0);                                                 // tensors
    vocab_u64(&b, 42);                                                // keys
    vocab_model_keys(&b);
    vocab_key_str(&b, "tokenizer.ggml.model", "gemma4");
    vocab_key_array(&b, "tokenizer.ggml.tokens", 8, VOCAB_TOKENS);
    for (uint32_t id = 0; id < VOCAB_TOKENS; id++) vocab_text(&b, token[id], (VocabText){ "", 0 });
    vocab_key_array(&b, "tokenizer.ggml.scores", 6, VOCAB_TOKENS);
    for (uint32_t id = 0; id < VOCAB_TOKENS; id++) vocab_put(&b, &(float){ -1000.0f }, 4);
    vocab_key_array(&b, "tokenizer.ggml.token_type", 5, VOCAB_TOKENS);
    for (uint32_t id = 0; id < VOCAB_TOKENS; id++) vocab_u32(&b, vocab_type(id));
    vocab_key_array(&b, "tokenizer.ggml.merges", 8, VOCAB_MERGES);
    vocab_merges(&b, token, slot, run);
    vocab_key_u32(&b, "tokenizer.ggml.bos_token_id", 2);
    vocab_key_u32(&b, "tokenizer.ggml.eos_token_id", 1);
    vocab_key_u32(&b, "tokenizer.ggml.unknown_token_id", 3);
    vocab_key_u32(&b, "tokenizer.ggml.padding_token_id", 0);
    vocab_key_u32(&b, "tokenizer.ggml.mask_token_id", 4);
    vocab_key(&b, "tokenizer.chat_template", 8);
    vocab_text(&b, (VocabText){ (char *)input.s + (complete ? at : 0), complete ? input.n - at : 0 },
               (VocabText){ "", 0 });
    vocab_key_bool(&b, "tokenizer.ggml.add_space_prefix", 0);
    vocab_key_bool(&b, "tokenizer.ggml.add_bos_token", 1);
    free(slot);
    free(text.s);
    free(input.s);
    *size = b.n;
    if (complete && vocab_hash(b.s, b.n) == VOCAB_HASH) return b.s;
    free(b.s);
    return NULL;
}

#ifndef VOCAB_NO_MAIN
int main(int argc, char **argv) {
    const char *why;
    size_t n;
    if (argc != 2) {
        fprintf(stderr,
                "make_vocab: error: expected: gzip -dc tests/golden/gemma4-tokens.txt.gz | make_vocab OUT.gguf\n");
        return 1;
    }
    uint8_t *bytes = vocab_make(stdin, &n, &why);
    if (!bytes) {
        fprintf(stderr, "make_vocab: error: %s\n", why);
        return 1;
    }
    FILE *f = fopen(argv[1], "wb");
    if (!f || fwrite(bytes, 1, n, f) != n || fclose(f)) {
        fprintf(stderr, "make_vocab: error: %s: cannot write\n", argv[1]);
        return 1;
    }
    free(bytes);
    return 0;
}
#endif
