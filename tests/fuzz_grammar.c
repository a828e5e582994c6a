/* fuzz_grammar.c - grammars, schemas and tools as clients send them, and the masks that they give. The first byte
 * selects which of them the text is; the text ends at a 0, and the bytes after it select tokens. A text becomes a
 * grammar or is refused with one line. A mask must allow exactly the tokens that grammar_advance accepts, and the end
 * exactly if the text is complete; states that were kept while others were freed must allow the same. A forced symbol
 * must be allowed. Looking ahead may fail; grammar_recover must work after it. A complete JSON text must be valid JSON,
 * a complete call must be parsed as one. */
#define _GNU_SOURCE                     // gguf.h: open, pread, mmap
#include "fuzz.h"
#include <math.h>
#include "../parts/grammar.h"
#include "../parts/pattern.h"
#include "../parts/schema.h"

static Tokenizer t;                     // the small vocabulary, for every input
static GrammarVocab vocab;

enum { WORDS = 16 };

// Checks the text of the ids: JSON, or calls.
static void check_answer(const int32_t *ids, size_t n, bool calls) {
    TokReply r = { 0 };
    GgufJson v;
    size_t at;
    const char *err;
    tok_reply_start(&t, &r, NULL, 0);
    for (size_t i = 0; i < n; i++) NEED(tok_reply_push(&t, &r, ids[i]) == 0);
    NEED(tok_reply_end(&t, &r) == 0);
    if (calls) NEED(r.n_calls > 0 && r.content.n == 0);
    else NEED(gguf_json_parse(r.content.s, r.content.n, &v, &at, &err) == 0);
    tok_reply_free(&r);
}

static void feed(Grammar *g, unsigned kind, const uint8_t *choices, size_t n) {
    uint32_t mask[WORDS], again[WORDS];
    int32_t ids[4096];
    size_t n_ids = 0;
    GrammarState s = grammar_start(g, START_ANSWER);
    for (size_t i = 0; i < n && n_ids < 4096; i++) {
        int32_t id = -1;
        if (!grammar_mask(g, s, mask, t.n_tokens)) break;
        NEED(g->stack_sets[s].complete == (mask[t.eos / 32] >> t.eos % 32 & 1));
        for (int32_t k = 0; k < t.n_tokens; k++) {     // the first allowed token, starting at the byte
            const int32_t one = (choices[i] + k) % t.n_tokens;
            if (mask[one / 32] >> one % 32 & 1) {
                id = one;
                break;
            }
        }
        for (int32_t k = choices[i] % 7; k < t.n_tokens && !g->failed; k += 7) {
            GrammarState copy = s;
            NEED(grammar_advance(g, &copy, k) == (mask[k / 32] >> k % 32 & 1) || g->failed);
        }
        const int only = g->failed ? -1 : grammar_forced(g, s);
        if (only >= 256) NEED(mask[g->named[only - 256] / 32] >> g->named[only - 256] % 32 & 1);
        if (only >= 0) NEED(grammar_after_forced(g, s, only) || g->failed);
        if (g->failed && choices[i] % 2) grammar_recover(g, &s, 1);    // undoes looking ahead
        if (g->failed) break;
        if (i % 8 == 7) {
            rebuild_states(g, &s, 1);
            NEED(g->failed || (grammar_mask(g, s, again, t.n_tokens) &&
                               memcmp(mask, again, (size_t)(t.n_tokens + 31) / 32 * 4) == 0) || g->failed);
        }
        if (tok_is_stop(&t, id)) {
            if (kind) check_answer(ids, n_ids, kind == 2);
            return;
        }
        NEED(grammar_advance(g, &s, id) || g->failed);
        ids[n_ids++] = id;
    }
    NEED(!g->failed || (g->err[0] && !strchr(g->err, '\n')));
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    Grammar g;
    if (!t.n_tokens) {
        make_built_in(&t);
        NEED(grammar_vocab_init(&vocab, &t) && t.n_tokens <= 32 * WORDS);
    }
    if (!size) return 0;
    const unsigned kind = bytes[0] % 3;
    const uint8_t *end = memchr(bytes + 1, 0, size - 1);
    const size_t n = end ? (size_t)(end - bytes) - 1 : size - 1;
    const TokStr text = { (const char *)bytes + 1, n };
    const bool ok = kind == 0 ? grammar_from_gbnf(&g, &vocab, text) : kind == 1 ? grammar_from_schema(&g, &vocab, text, false)
                  : grammar_from_tools(&g, &vocab, text, NULL, bytes[0] & 4, (TokStr){ NULL, 0 }, false);
    if (ok) feed(&g, kind, bytes + 1 + n, size - 1 - n);
    else NEED(g.failed && g.err[0] && !strchr(g.err, '\n'));
    grammar_free(&g);
    return 0;
}
