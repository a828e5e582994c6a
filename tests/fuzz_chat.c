/* fuzz_chat.c - chat prompts from arbitrary messages and tools, and replies from arbitrary ids.
 *
 * The first byte selects the kind. 0 mod 3: the rest is the JSON of messages, a NUL, and the JSON of tools, as a client
 * sends them. 1 mod 3: the rest generates messages and tools that are valid JSON with correct names and correct or
 * wrong types. 2 mod 3: the rest are ids of a reply; with bit 7 of the second byte it generates tool calls as models
 * write them, and mutations of them. Every prompt's text must equal the text of its ids; replies must be UTF-8 and never
 * shrink, their arguments must be JSON objects, and no byte of a block of calls may be lost. */
#define _GNU_SOURCE                     // gguf.h: open, pread, mmap
#define TOKENIZER_IMPLEMENTATION        // calls.h looks inside it
#include "fuzz.h"
#include "calls.h"

static Tokenizer t;                     // the small vocabulary, for every input

static void check_utf8(const TokText *v, size_t from) {
    uint32_t cp;
    for (size_t i = from; i < v->n; ) {
        const int len = tok_read_utf8((unsigned char *)v->s + i, v->n - i, &cp);
        NEED(len > 0);
        i += (size_t)len;
    }
}

static void read_reply(const int32_t *prompt, size_t n_prompt, const int32_t *ids, size_t n) {
    static TokReply r;                  // reused, as in a server
    tok_reply_start(&t, &r, prompt, n_prompt);
    int rc = 0;
    for (size_t i = 0; i < n && rc == 0; i++) {
        const size_t content = r.content.n, thought = r.thought.n;
        const int n_calls = r.n_calls;
        const bool may_end = r.state == TOK__CALL && tok_piece(&t, ids[i], false).n == 0;
        TokText block = { 0 };
        NEED(!may_end || tok_text_append(&block, r.call.s, r.call.n));
        rc = tok_reply_push(&t, &r, ids[i]);
        if (may_end && (r.state != TOK__CALL || ids[i] == t.call_open))
            NEED(block_is_kept(block.s, block.n, &r, n_calls, content));
        tok_text_free(&block);
        NEED(rc >= 0 && r.content.n >= content && r.thought.n >= thought && (rc == 1) == (r.finish != TOK_RUNNING));
        check_utf8(&r.content, content);
        check_utf8(&r.thought, thought);
    }
    const size_t content = r.content.n;
    const int n_calls = r.n_calls;
    const bool cut = r.state == TOK__CALL;
    TokText block = { 0 };
    NEED(!cut || tok_text_append(&block, r.call.s, r.call.n));
    NEED(tok_reply_end(&t, &r) == 0 && r.finish != TOK_RUNNING);
    NEED(!cut || block_is_kept(block.s, block.n, &r, n_calls, content));
    tok_text_free(&block);
    check_utf8(&r.content, 0);
    for (int i = 0; i < r.n_calls; i++) {
        const char *err;
        size_t err_at;
        GgufJson v;
        const TokStr a = r.calls[i].arguments;
        NEED(r.calls[i].name.n && gguf_json_parse(a.s, a.n, &v, &err_at, &err) == 0 && v.type == GGUF_J_OBJECT);
    }
    TokText messages = { 0 };
    TokIds again = { 0 };
    NEED(tok_add_reply(&messages, &r) == 0);
    const TokChat c = { .messages = { messages.s, messages.n } };
    NEED(tok_chat(&t, &c, &again, NULL) == 0);
    tok_ids_free(&again);
    tok_text_free(&messages);
}

static void decode(const TokIds *ids, TokText *out) {      // with markers
    TokStream s = { { 0 }, 0 };
    for (size_t i = 0; i <= ids->n; i++) {
        NEED(tok__room(out, t.stream_cap));
        out->n += i < ids->n ? tok_stream_push(&t, &s, ids->ids[i], true, out->s + out->n, t.stream_cap)
                             : tok_stream_flush(&s, out->s + out->n, t.stream_cap);
    }
}

static void make_prompt(TokStr messages, TokStr tools, unsigned flags) {
    const TokChat c = { .messages = messages, .tools = tools, .think = flags & 1, .keep_thoughts = flags & 2,
                        .add_cue = flags & 4, .end_thought = flags & 8, .exact = flags & 16 };
    TokIds ids = { 0 };
    TokText text = { 0 };
    t.large_variant = flags & 32;
    if (tok_chat(&t, &c, &ids, &text) < 0) {
        NEED(ids.n == 0 && text.n == 0 && t.err[0] && !strchr(t.err, '\n'));
        tok_ids_free(&ids);
        tok_text_free(&text);
        return;
    }
    TokIds plain = { 0 };
    TokText shown[2] = { { 0 }, { 0 } };
    NEED(tok_encode(&t, text.s, text.n, TOK_PLAIN, &plain) == 0);
    decode(&ids, &shown[0]);
    decode(&plain, &shown[1]);
    NEED(shown[0].n == shown[1].n && memcmp(shown[0].s, shown[1].s, shown[0].n) == 0);
    tok_text_free(&shown[0]);
    tok_text_free(&shown[1]);
    tok_ids_free(&plain);
    read_reply(ids.ids, ids.n / 2, ids.ids + ids.n / 2, ids.n - ids.n / 2);
    tok_ids_free(&ids);
    tok_text_free(&text);
}

// ---- messages generated from bytes
// -----------------------------------------------------------------------------------

typedef struct { const uint8_t *s; size_t n, i; } Bytes;

static unsigned draw(Bytes *b, unsigned n) { return b->i < b->n ? b->s[b->i++] % n : 0; }

static void put(TokText *out, const char *s) { NEED(tok_text_append(out, s, strlen(s))); }

static void put_string(TokText *out, Bytes *b) {
    const char *parts[] = { "a", " ", "<|turn>", "<turn|>", "<|\\\"|>", "<channel|>", "<|channel>thought\\n", "\\u00e9",
                            "\\ud800", "{", "}", ":", ",", "\\n", "\xE2\x82", "string", "object", "array", "\\u0000",
                            "call:f{" };
    put(out, "\"");
    for (unsigned n = draw(b, 5); n > 0; n--) put(out, parts[draw(b, 20)]);
    put(out, "\"");
}

static void put_value(TokText *out, Bytes *b, int depth) {
    const char *keys[] = { "role", "content", "reasoning", "reasoning_content", "tool_calls", "tool_responses",
                           "tool_call_id", "name", "id", "function", "arguments", "response", "type", "text",
                           "properties",
                           "required", "nullable", "enum", "items", "description", "parameters", "k", "K" };
    const char *scalars[] = { "null", "true", "false", "0", "1.5e3", "-7", "\"\"", "\"{\\\"a\\\":1}\"", "\"user\"",
                              "\"assistant\"", "\"tool\"", "\"system\"", "\"object\"", "\"array\"", "\"string\"",
                              "\"image\"", "\"text\"", "[]", "{}" };
    const unsigned kind = draw(b, depth > 0 ? 5 : 2), n = draw(b, 5);
    if (kind == 0) {
        put_string(out, b);
    } else if (kind == 1) {
        put(out, scalars[draw(b, 19)]);
    } else {
        put(out, kind == 2 ? "[" : "{");
        for (unsigned i = 0; i < n; i++) {
            if (i) put(out, ",");
            if (kind > 2) {
                put(out, "\"");
                put(out, keys[draw(b, 23)]);
                put(out, "\":");
            }
            put_value(out, b, depth - 1);
        }
        put(out, kind == 2 ? "]" : "}");
    }
}

// {role, content and sometimes other fields}, mostly of the correct shape.
static void put_message(TokText *out, Bytes *b) {
    const char *roles[] = { "user", "assistant", "tool", "system", "developer", "model", "assistant", "tool" };
    const unsigned role = draw(b, 8);
    put(out, "{\"role\":\"");
    put(out, roles[role]);
    put(out, "\",\"content\":");
    if (draw(b, 4)) put_string(out, b);
    else put_value(out, b, 3);
    if (role == 1 || role == 6) {
        if (draw(b, 2)) {
            put(out, ",\"reasoning\":");
            put_string(out, b);
        }
        if (draw(b, 3)) {
            put(out, ",\"tool_calls\":[{\"id\":\"i\",\"function\":{\"name\":\"f\",\"arguments\":");
            put_value(out, b, 4);
            put(out, "}}]");
        }
        if (draw(b, 8) == 1) {
            put(out, ",\"tool_responses\":[{\"name\":\"f\",\"response\":");
            put_value(out, b, 3);
            put(out, "}]");
        }
    } else if (role == 2) {
        put(out, ",\"tool_call_id\":\"i\"");
    }
    put(out, "}");
}

static void draw_prompt(Bytes *b, unsigned flags) {
    TokText messages = { 0 }, tools = { 0 };
    const unsigned n = draw(b, 6), n_tools = draw(b, 3);
    put(&messages, "[");
    for (unsigned i = 0; i < n; i++) {
        if (i) put(&messages, ",");
        put_message(&messages, b);
    }
    put(&messages, "]");
    put(&tools, "[");
    for (unsigned i = 0; i < n_tools; i++) {
        put(&tools, i ? ",{\"function\":{\"name\":\"f\",\"parameters\":{\"type\":\"object\",\"properties\":"
                      : "{\"function\":{\"name\":\"f\",\"parameters\":{\"properties\":");
        put_value(&tools, b, 7);
        put(&tools, "},\"response\":");
        put_value(&tools, b, 2);
        put(&tools, "}}");
    }
    put(&tools, "]");
    make_prompt((TokStr){ messages.s, messages.n }, (TokStr){ tools.s, tools.n }, flags);
    tok_text_free(&messages);
    tok_text_free(&tools);
}

// A block of calls, mutated, whose end may be missing.
static void draw_calls(const uint8_t *bytes, size_t n, unsigned flags) {
    TokText block = { 0 };
    TokIds ids = { 0 };
    draw_block(&block, &(CallBytes){ bytes, n - n / 4, 0 });
    mutate_block(&block, &(CallBytes){ bytes + n - n / 4, n / 4, 0 });
    NEED(tok_push_id(&t, &ids, t.call_open) == 0);
    for (size_t i = 0; i < block.n; i++) {
        const unsigned char byte = (unsigned char)block.s[i];
        NEED(tok_push_id(&t, &ids, byte == TOK__DELIMITER ? t.quote : t.byte_id[byte]) == 0);
    }
    NEED(flags & 1 || tok_push_id(&t, &ids, t.call_close) == 0);
    read_reply(NULL, 0, ids.ids, ids.n);
    tok_ids_free(&ids);
    tok_text_free(&block);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    if (!t.n_tokens) make_built_in(&t);
    if (size < 2) return 0;
    const unsigned kind = bytes[0] % 3, flags = bytes[1];
    bytes += 2;
    size -= 2;
    if (kind == 0) {
        const uint8_t *end = size ? memchr(bytes, 0, size) : NULL;
        const size_t n = end ? (size_t)(end - bytes) : size;
        const TokStr messages = { (const char *)bytes, n };
        const TokStr tools = { (const char *)bytes + n + (end != NULL), size - n - (end != NULL) };
        make_prompt(messages, tools, flags);
    } else if (kind == 1) {
        draw_prompt(&(Bytes){ bytes, size, 0 }, flags);
    } else if (flags & 0x80) {
        draw_calls(bytes, size, flags);
    } else {
        // A byte below 0xC0 is its byte token; others are a token after the byte tokens: a marker, a word, or an
        // invalid id.
        int32_t *ids = malloc((size + 1) * sizeof *ids);
        NEED(ids);
        for (size_t i = 0; i < size; i++) ids[i] = bytes[i] < 0xC0 ? bytes[i] : 256 + bytes[i] - 0xC0;
        const size_t n_prompt = flags % 4 < size ? flags % 4 : 0;
        read_reply(ids, n_prompt, ids + n_prompt, size - n_prompt);
        free(ids);
    }
    return 0;
}
