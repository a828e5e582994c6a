/* test_chat.c - rendering prompts and parsing answers: tokenizer.h against the reference results in
 * tests/golden/gemma4-chat.jsonl.gz and gemma4-parse.jsonl.gz, and against properties: a rendered answer is parsed back
 * to the same, no text can insert a marker, the pieces of a stream do not change the result, tool calls are read in all
 * the forms in which models write them and lose no byte, running out of memory is always reported.
 *
 * Uses models/gemma4-mini-q8_0.gguf for the properties and Gemma 4's vocabulary for the test vectors. */
#define _GNU_SOURCE                     // gguf.h: open, pread, mmap; popen
#include "../gguf.h"
#include <stdlib.h>

// Allocations of tokenizer.h. From number fail_at on they fail; -1: never.
static long fail_at = -1;
static bool out_of_memory(void) { return fail_at >= 0 && fail_at-- == 0 ? fail_at = 0, true : false; }
static void *test_malloc(size_t n) { return out_of_memory() ? NULL : malloc(n); }
static void *test_realloc(void *p, size_t n) { return out_of_memory() ? NULL : realloc(p, n); }
#define malloc test_malloc
#define realloc test_realloc
#define TOKENIZER_IMPLEMENTATION
#include "../tokenizer.h"
#undef malloc
#undef realloc
#include "test.h"
#include "vocab.h"
#include "calls.h"

#define MODEL "models/gemma4-mini-q8_0.gguf"
#define Q "<|\"|>"

// ---- vectors --------------------------------------------------------------------------------------------------------

static TokStr text_of(const TokText *v) { return (TokStr){ v->s, v->n }; }
static bool flag(const GgufJson *row, const char *name) { return field(row, name).type == GGUF_J_TRUE; }

// The prefilled beginning of an answer, as the rows write it: [<|channel>thought\n THOUGHT [\n<channel|> TEXT]] or
// TEXT.
static void split_prefill(TokStr s, TokChat *c) {
    const char *open = "<|channel>thought\n", *close = "\n<channel|>";
    if (!s.n) return;
    if (strncmp(s.s, open, strlen(open)) != 0) {
        c->answer = s;
        return;
    }
    const char *thought = s.s + strlen(open), *end = strstr(thought, close);
    c->thought = (TokStr){ thought, end ? (size_t)(end - thought) : strlen(thought) };
    if (end) c->answer = str(end + strlen(close));
}

static void put(TokText *out, const char *s) { if (!tok_text_append(out, s, strlen(s))) exit(1); }

// The prompt of a prefilled answer must be the prompt of the whole answer without its end. For the large variant with
// thinking off, the empty thought of the cue is removed first.
static void check_begun(Tokenizer *t, const TokChat *whole, TokStr before, TokStr thought, TokStr answer,
                        const char *name) {
    const char *empty = "<|channel>thought\n<channel|>", *end = "<turn|>\n";
    TokChat begun = *whole;
    begun.messages = before;
    begun.add_cue = true;
    begun.answer = answer;
    if (thought.n) begun.thought = thought;
    TokIds ids[2] = { { 0 } };
    TokText text[2] = { { 0 } };
    const bool ok = tok_chat(t, whole, &ids[0], &text[0]) == 0 && tok_chat(t, &begun, &ids[1], &text[1]) == 0;
    if (CHECK(ok, "%s: begun: %s", name, t->err)) {
        const size_t n_empty = strlen(empty), from = text[1].n - answer.n - n_empty;
        if (t->large_variant && !whole->think && !thought.n && text[1].n >= answer.n + n_empty &&
            !memcmp(text[1].s + from, empty, n_empty)) {
            memmove(text[1].s + from, text[1].s + from + n_empty, answer.n);
            text[1].n -= n_empty;
        }
        put(&text[1], end);
        CHECK(same_text(text_of(&text[0]), text_of(&text[1])), "%s: the whole answer\n%.*s\none that is begun\n%.*s",
              name, (int)text[0].n, text[0].s, (int)text[1].n, text[1].s);
    }
    for (int i = 0; i < 2; i++) {
        tok_ids_free(&ids[i]);
        tok_text_free(&text[i]);
    }
}

static TokText cut_list(const GgufJson *list, const char *end) {      // the part before end
    TokText out = { 0 };
    if (!tok_text_append(&out, list->s, (size_t)(end - list->s))) exit(1);
    put(&out, "]");
    return out;
}

// Tests each answer of a row that is only text as a prefilled one. Returns how many there are.
static size_t check_answers(Tokenizer *t, const TokChat *row, const GgufJson *messages, const char *name) {
    GgufJson rest = *messages, m;
    size_t n = 0;
    for (const char *end = messages->s + 1; gguf_json_next(&rest, NULL, &m); end = m.s + m.n) {
        const TokStr role = text_field(&m, "role"), answer = text_field(&m, "content");
        const TokStr thought = text_field(&m, "reasoning_content");
        const bool calls = field(&m, "tool_calls").n > 4 || field(&m, "tool_responses").n > 4;
        const bool trimmed = answer.n && !strchr(" \n", answer.s[0]) && !strchr(" \n", answer.s[answer.n - 1]);
        if (!strcmp(role.s, "assistant") && trimmed && !calls && !strstr(answer.s, "channel")) {
            TokText before = cut_list(messages, end), with = cut_list(messages, m.s + m.n);
            const TokChat whole = { .messages = text_of(&with), .tools = row->tools, .think = row->think,
                                    .keep_thoughts = row->keep_thoughts, .exact = true };
            check_begun(t, &whole, text_of(&before), thought, answer, name);
            tok_text_free(&before);
            tok_text_free(&with);
            n++;
        }
        free_str(role);
        free_str(answer);
        free_str(thought);
    }
    return n;
}

static void check_chat_vectors(Tokenizer *t, char *file) {
    GgufJson row;
    size_t n_rows = 0, n_injected = 0, n_answers = 0;
    for (char *at = file; file && *at && next_row(&at, &row); n_rows++) {
        const TokStr name = text_field(&row, "name"), variant = text_field(&row, "variant");
        const TokStr prefill = text_field(&row, "prefill"), rendered = text_field(&row, "rendered");
        const GgufJson messages = field(&row, "messages"), tools = field(&row, "tools");
        TokIds want = ids_field(&row, "ids"), got = { 0 }, encoded = { 0 };
        TokText text = { 0 };
        TokChat c = { .messages = { messages.s, messages.n },
                      .tools = { tools.s, tools.type == GGUF_J_NULL ? 0 : tools.n },
                      .think = flag(&row, "enable_thinking"), .keep_thoughts = flag(&row, "preserve_thinking"),
                      .add_cue = flag(&row, "add_generation_prompt"), .exact = true };
        split_prefill(prefill, &c);
        t->large_variant = !strcmp(variant.s, "large");
        CHECK(tok_chat(t, &c, &got, &text) == 0, "%s, %s: %s", name.s, variant.s, t->err);
        CHECK(same_text(text_of(&text), rendered), "%s, %s: want\n%s\ngot\n%.*s", name.s, variant.s, rendered.s,
              (int)text.n, text.s);
        CHECK(tok_encode(t, rendered.s, rendered.n, TOK_SPECIAL, &encoded) == 0 && same_ids(encoded, want),
              "%s, %s: ids of the rendered text", name.s, variant.s);
        // the reference lets the user write markers; tokenizer.h does not
        if (!strcmp(name.s, "user_special_tokens")) {
            int n_special = 0;
            for (size_t i = 0; i < got.n; i++) n_special += tok_piece(t, got.ids[i], false).n == 0;
            CHECK(n_special == (t->large_variant ? 6 : 4), "%s: %d markers", name.s, n_special);
            n_injected++;
        } else {
            CHECK(same_ids(got, want), "%s, %s: ids", name.s, variant.s);
            n_answers += check_answers(t, &c, &messages, name.s);
        }
        tok_text_free(&text);
        tok_ids_free(&want);
        tok_ids_free(&got);
        tok_ids_free(&encoded);
        free_str(name);
        free_str(variant);
        free_str(prefill);
        free_str(rendered);
    }
    CHECK(n_rows == 124 && n_injected == 2, "chat: %zu rows, want 124, %zu of them injected", n_rows, n_injected);
    CHECK(n_answers == 28, "chat: %zu answers that are begun, want 28", n_answers);
    free(file);
}

// Pushes one id. The text so far must not change, and all of it must be whole characters. Counts as a case if it fails.
static int push(Tokenizer *t, TokReply *r, int32_t id) {
    const size_t content = r->content.n, thought = r->thought.n;
    const int rc = tok_reply_push(t, r, id);
    if (rc < 0) CHECK(false, "push: %s", t->err);
    if (r->content.n < content || r->thought.n < thought) CHECK(false, "push: text is taken back");
    for (int k = 0; k < 2; k++) {
        const TokText *v = k ? &r->thought : &r->content;
        uint32_t cp;
        int len = 1;
        for (size_t i = k ? thought : content; i < v->n && len > 0; i += (size_t)len)
            len = tok_read_utf8((unsigned char *)v->s + i, v->n - i, &cp);
        if (len <= 0) CHECK(false, "push: half a character");
    }
    return rc;
}

// Every id as byte tokens: the same text in the smallest pieces.
static int push_bytes(Tokenizer *t, TokReply *r, int32_t id) {
    const TokStr piece = tok_piece(t, id, false);
    int rc = 0;
    if (!piece.n) return push(t, r, id);
    for (size_t i = 0; i < piece.n && rc == 0; i++) rc = push(t, r, t->byte_id[(unsigned char)piece.s[i]]);
    return rc;
}

static void check_reply(const TokReply *r, const GgufJson *row, const char *name) {
    static const char *const finish[] = { "running", "stop", "tool_calls", "length" };
    const TokStr content = text_field(row, "content"), thought = text_field(row, "reasoning");
    const TokStr why = text_field(row, "finish");
    // the reference drops a text that is no call, and shows <|"|> in content
    const char *want = !strcmp(name, "call_bad") ? "nonsense" : !strcmp(name, "literal_delim_in_content") ? "a\"b"
                     : content.s;
    CHECK(same_text(str(want), text_of(&r->content)), "%s: content \"%.*s\", want \"%s\"", name,
          (int)r->content.n, r->content.s, want);
    CHECK(same_text(thought, text_of(&r->thought)), "%s: thought \"%.*s\", want \"%s\"", name,
          (int)r->thought.n, r->thought.s, thought.s);
    CHECK(!strcmp(finish[r->finish], why.s), "%s: finish %s, want %s", name, finish[r->finish], why.s);
    GgufJson rest = field(row, "tool_calls"), call;
    int n = 0;
    for (; gguf_json_next(&rest, NULL, &call); n++) {
        const TokStr call_name = text_field(&call, "name"), arguments = text_field(&call, "arguments");
        CHECK(n < r->n_calls && same_text(r->calls[n].name, call_name) && same_text(r->calls[n].arguments, arguments),
              "%s: call %d: got %.*s, want %s %s", name, n, n < r->n_calls ? (int)r->calls[n].arguments.n : 0,
              n < r->n_calls ? r->calls[n].arguments.s : "", call_name.s, arguments.s);
        free_str(call_name);
        free_str(arguments);
    }
    CHECK(n == r->n_calls, "%s: %d calls, want %d", name, r->n_calls, n);
    free_str(content);
    free_str(thought);
    free_str(why);
}

static void check_parse_vectors(Tokenizer *t, char *file) {
    GgufJson row;
    size_t n_rows = 0;
    TokReply r = { 0 };                                // reused for each row
    for (char *at = file; file && *at && next_row(&at, &row); n_rows++) {
        const int32_t prompt[] = { 2, 105, 4368, 107, 100, 45518, 107 };
        const TokStr name = text_field(&row, "name"), start = text_field(&row, "start");
        TokIds ids = ids_field(&row, "ids");
        for (int bytes = 0; bytes < 2; bytes++) {
            tok_reply_start(t, &r, prompt, strcmp(start.s, "thought") ? 4 : 7);
            int rc = 0;
            for (size_t i = 0; i < ids.n && rc == 0; i++) rc = (bytes ? push_bytes : push)(t, &r, ids.ids[i]);
            CHECK(tok_reply_end(t, &r) == 0, "%s: end: %s", name.s, t->err);
            check_reply(&r, &row, name.s);
            CHECK(push(t, &r, 9259) == 1, "%s: a push after the end", name.s);
        }
        tok_ids_free(&ids);
        free_str(name);
        free_str(start);
    }
    tok_reply_free(&r);
    CHECK(n_rows == 41, "parse: %zu rows, want 41", n_rows);
    free(file);
}

static void test_vectors(void) {
    File f;
    Tokenizer t;
    size_t n;
    if (!has_gzip()) {
        SKIP("chat vectors on Gemma 4's vocabulary: gzip is missing");
        return;
    }
    if (!open_real_vocab(&f)) return;
    if (CHECK(tok_init(&t, &f.v) == 0, "%s", t.err)) {
        CHECK(t.chat_template == TOK_TEMPLATE_LAUNCH && t.large_variant, "the template of the vocabulary file");
        check_chat_vectors(&t, read_gz("tests/golden/gemma4-chat.jsonl.gz", &n));
        check_parse_vectors(&t, read_gz("tests/golden/gemma4-parse.jsonl.gz", &n));
        tok_free(&t);
    }
    close_vocab(&f);
}

// ---- rules without test vectors -------------------------------------------------------------------------------------

// JSON written with ' for ", which is easier to read in C. Valid until the program ends.
static TokStr json(const char *s) {
    static char pool[1 << 14];
    static size_t used;
    const size_t n = strlen(s), at = used;
    if (n > sizeof pool - used) exit(1);
    for (size_t i = 0; i < n; i++) pool[used++] = s[i] == '\'' ? '"' : s[i];
    return (TokStr){ pool + at, n };
}

// What comes before the cue must be the prompt without a cue.
static void check_cue(Tokenizer *t, const TokChat *c) {
    size_t before = SIZE_MAX, same = 0;
    TokChat cued = *c, plain = *c;
    TokIds ids[2] = { { 0 } };
    cued.add_cue = true;
    cued.before_cue = &before;
    plain.add_cue = false;
    const bool ok = tok_chat(t, &cued, &ids[0], NULL) == 0 && tok_chat(t, &plain, &ids[1], NULL) == 0;
    while (same < ids[0].n && same < ids[1].n && ids[0].ids[same] == ids[1].ids[same]) same++;
    CHECK(ok && before == same && before == ids[1].n, "%.*s: the cue begins at %zu, want %zu", (int)c->messages.n,
          c->messages.s, before, same);
    for (int i = 0; i < 2; i++) tok_ids_free(&ids[i]);
}

// The text of a prompt must be `want`; NULL: it must fail, with `error` in the message, and append nothing.
static void check_render(Tokenizer *t, const TokChat *c, const char *want, const char *error) {
    TokIds ids = { 0 };
    TokText text = { 0 };
    append(&ids, 7);
    const int rc = tok_chat(t, c, &ids, &text);
    if (want) {
        CHECK(rc == 0, "%.*s: %s", (int)c->messages.n, c->messages.s, t->err);
        CHECK(same_text(text_of(&text), str(want)), "%.*s: want\n%s\ngot\n%.*s", (int)c->messages.n, c->messages.s,
              want, (int)text.n, text.s);
        CHECK(ids.n > 1 && ids.ids[0] == 7, "ids are appended");
        if (!c->answer.s && !c->thought.s) check_cue(t, c);
    } else {
        CHECK(rc < 0 && strstr(t->err, error) && !strchr(t->err, '\n'),
              "%.*s %.*s: want an error with \"%s\", got %d \"%s\"",
              (int)c->messages.n, c->messages.s, (int)c->tools.n, c->tools.s, error, rc, rc < 0 ? t->err : "");
        CHECK(ids.n == 1 && text.n == 0, "a failure leaves %zu ids, %zu bytes", ids.n, text.n);
    }
    tok_ids_free(&ids);
    tok_text_free(&text);
}

#define USER   "{'role':'user','content':'q'}"
#define CALL   "{'role':'assistant','content':'','tool_calls':[{'id':'a','function':{'name':'f','arguments':{}}}]}"
#define ARGS   "[{'role':'assistant','tool_calls':[{'function':{'name':'f','arguments':"       // and END_ARGS
#define END_ARGS "}}]}]"
#define RESULT "{'role':'tool','tool_call_id':'a','content':'r'}"
#define CALLED "<bos><|turn>user\nq<turn|>\n<|turn>model\n<|tool_call>call:f{}<tool_call|>"
#define ANSWER "<|tool_response>response:f{value:" Q "r" Q "}<tool_response|>"

static void render_answers(Tokenizer *t) {
    TokChat c = { .messages = json("[" USER "," CALL "," RESULT "]"), .add_cue = true };
    check_render(t, &c, CALLED ANSWER, NULL);
    c.end_thought = true;
    check_render(t, &c, CALLED ANSWER "<|channel>thought\n<channel|>", NULL);
    c.think = true;
    check_render(t, &c,
                 "<bos><|turn>system\n<|think|>\n<turn|>\n<|turn>user\nq<turn|>\n<|turn>model\n<|tool_call>call:f{}"
                 "<tool_call|>" ANSWER "<|channel>thought\n", NULL);
    c.answer = str(" so");
    check_render(t, &c,
                 "<bos><|turn>system\n<|think|>\n<turn|>\n<|turn>user\nq<turn|>\n<|turn>model\n<|tool_call>call:f{}"
                 "<tool_call|>" ANSWER "<|channel>thought\n<channel|> so", NULL);

    // Prefill: unchanged; in the turn of the assistant's message before it; after a thought also with thinking off.
    c = (TokChat){ .messages = json("[" USER "]"), .add_cue = true, .thought = str("t"), .answer = str(" so\n") };
    check_render(t, &c, "<bos><|turn>user\nq<turn|>\n<|turn>model\n<|channel>thought\nt\n<channel|> so\n", NULL);
    c = (TokChat){ .messages = json("[" USER ",{'role':'assistant','content':'a'}]"), .add_cue = true,
                   .answer = str(" so") };
    check_render(t, &c, "<bos><|turn>user\nq<turn|>\n<|turn>model\na so", NULL);

    // A message with results and content is closed; the answer to it gets a new turn, unless `exact`.
    c = (TokChat){ .messages = json("[" USER ",{'role':'assistant','content':'t','tool_calls':[{'id':'a','function':"
                                   "{'name':'f'}}]}," RESULT "]"), .add_cue = true };
    check_render(t, &c, CALLED ANSWER "t<turn|>\n<|turn>model\n<|channel>thought\n<channel|>", NULL);
    c.exact = true;
    check_render(t, &c, CALLED ANSWER "t<turn|>\n", NULL);
}

static void render_tools(Tokenizer *t) {
    // Parameters and responses without a type, and one that is not an object.
    TokChat c = { .messages = str(""), .tools = json("[{'function':{'name':'f','parameters':{'required':['a']},"
                                                     "'response':{'description':'d','type':'string'}}}]") };
    check_render(t, &c, "<bos><|turn>system\n<|tool>declaration:f{description:" Q Q ",parameters:{required:[" Q "a" Q
                 "],type:" Q "OBJECT" Q "},response:{description:" Q "d" Q ",type:" Q "STRING" Q
                 "}}<tool|><turn|>\n", NULL);
    c.exact = true;
    check_render(t, &c, "<bos><|turn>system\n<|tool>declaration:f{description:" Q Q ",parameters:{required:[" Q "a" Q
                 "],,response:{description:" Q "d" Q ",}<tool|><turn|>\n", NULL);

    // Schemas: a wrapped key, a nested items list, a type without properties, null members, and a value that is not an
    // object.
    c = (TokChat){ .tools = json("[{'name':'f','parameters':{'type':'object','properties':{'a':{'type':'array','items':"
                   "{'type':['string','null'],'enum':[{'k':1}],'x':null,'required':['r'],'properties':{'p':3}}},"
                   "'b':{'type':'OBJECT','title':{'type':'string'},'required':['t']},'B':{'nullable':true}}}}]") };
    check_render(t, &c,
                 "<bos><|turn>system\n<|tool>declaration:f{description:" Q Q ",parameters:{properties:{a:{items:{"
                 "enum:[{" Q "k" Q ":1}],properties:{p:{type:" Q Q "}},required:[" Q "r" Q "],type:[" Q
                 "STRING" Q "," Q "NULL" Q "]},type:" Q "ARRAY" Q "},b:{properties:{title:{type:" Q "STRING" Q
                 "}},required:[" Q "t" Q "],type:" Q "OBJECT" Q "},B:{nullable:true,type:" Q Q "}},type:" Q
                 "OBJECT" Q "}}<tool|><turn|>\n", NULL);
}

static void render_calls(Tokenizer *t) {
    // Arguments as a string that holds an object; repeated keys; numbers as Python prints them.
    TokChat c = { .messages = json(ARGS
                   "'{\\'b\\': 1, \\'A\\': \\'x\\\\u0041\\', \\'b\\': [2]}'}}]}]") };
    check_render(t, &c, "<bos><|turn>model\n<|tool_call>call:f{A:" Q "xA" Q ",b:[2]}<tool_call|><|tool_response>",
                 NULL);
    c.messages = json(ARGS "{'n':[1.50,2.0,1e20,1E-5,"
                     "0.0001,123456789012345678901234567890,-0,-0.0,1e15,1e16,0.1,1e400,5e-324,3.14159]}}}]}]");
    check_render(t, &c,
                 "<bos><|turn>model\n<|tool_call>call:f{n:[1.5,2.0,1e+20,1e-05,0.0001,123456789012345678901234567890,"
                 "0,-0.0,1000000000000000.0,1e+16,0.1,1e400,5e-324,3.14159]}<tool_call|><|tool_response>", NULL);

    // Results: an object, a list of parts with a picture, with its own name, null; and one that follows no call.
    c.messages =
        json("[" CALL ",{'role':'tool','tool_call_id':'a','content':{'k':null}},{'role':'tool','name':'g','content':"
                     "[{'type':'image'},{'type':'text','text':' t '}]},{'role':'tool'}]");
    check_render(t, &c, "<bos><|turn>model\n<|tool_call>call:f{}<tool_call|>"
                 "<|tool_response>response:f{k:null}<tool_response|>"
                 "<|tool_response>response:g{value:" Q " t " Q "}<tool_response|><|image|>"
                 "<|tool_response>response:unknown{value:null}<tool_response|>", NULL);
    c.messages = json("[" RESULT "," USER "]");
    check_render(t, &c, "<bos><|turn>user\nq<turn|>\n", NULL);
}

static void render_order(Tokenizer *t) {
    // Results in another order than their calls, ids of any kind, and one without call: each finds its call; of equal
    // ids the last one.
    TokChat c = { .messages = json("[{'role':'assistant','tool_calls':[{'id':'b','function':{'name':'f'}},"
                      "{'id':7,'function':{'name':'g'}},{'id':'b','function':{'name':'h'}},{'function':{'name':'i'}},"
                      "{'id':'aa','function':{'name':'j'}},{'id':null,'function':{'name':'k'}},"
                      "{'id':'a','function':{'name':'l'}}]},{'role':'tool','tool_call_id':'a'},"
                      "{'role':'tool','tool_call_id':7},{'role':'tool'},{'role':'tool','tool_call_id':'c','name':'o'},"
                      "{'role':'tool','tool_call_id':'b'},{'role':'tool','tool_call_id':'aa','name':'o'}]") };
#define RAN(name)  "<|tool_call>call:" name "{}<tool_call|>"
#define GAVE(name) "<|tool_response>response:" name "{value:null}<tool_response|>"
    check_render(t, &c, "<bos><|turn>model\n" RAN("f") RAN("g") RAN("h") RAN("i") RAN("j") RAN("k") RAN("l")
                 GAVE("l") GAVE("g") GAVE("k") GAVE("o") GAVE("h") GAVE("j"), NULL);

    // Of two calls with the same id the last one gives the name. A turn of role model is not continued by one of role
    // assistant.
    c.messages = json("[{'role':'assistant','tool_calls':[{'id':'a','function':{'name':'f'}},"
                      "{'id':'a','function':{'name':'g'}}]}," RESULT "]");
    check_render(t, &c, "<bos><|turn>model\n<|tool_call>call:f{}<tool_call|><|tool_call>call:g{}<tool_call|>"
                 "<|tool_response>response:g{value:" Q "r" Q "}<tool_response|>", NULL);
    c.messages = json("[{'role':'model','content':'a'},{'role':'assistant','content':'b'}]");
    check_render(t, &c, "<bos><|turn>model\na<|turn>model\nb<turn|>\n", NULL);

    // Any role; empty input; white space in JSON.
    c.messages = json(" [ {'content' : ' x ' , 'role' : 'critic'} ] ");
    check_render(t, &c, "<bos><|turn>critic\nx<turn|>\n", NULL);
    c.messages = str("");
    check_render(t, &c, "<bos>", NULL);
    c.messages = c.tools = str(" null");
    check_render(t, &c, "<bos>", NULL);
}

static void refuse_messages(Tokenizer *t) {
    const struct { const char *messages, *tools, *error; } bad[] = {
        { "{}", "", "messages: expected a JSON list" }, { "[", "", "messages: byte 1" },
        { "[1]", "", "messages[0].role" },
        { "[{'role':1}]", "", "messages[0].role" },
        { "[" USER ",{'role':'user','content':5}]", "", "messages[1].content" },
        { "[{'role':'user','content':{}}]", "", "messages[0].content" },
        { "[{'role':'user','content':[{'type':'text'}]}]", "", "messages[0].content" },
        { "[{'role':'user','content':[{'type':'smell'}]}]", "", "messages[0].content" },
        { "[{'role':'user','content':[1]}]", "", "messages[0].content" },
        { "[{'role':'system','content':[{'type':'image'}]}]", "", "messages[0].content" },
        { "[{'role':'assistant','reasoning':[1]}]", "", "messages[0].reasoning" },
        { "[{'role':'assistant','tool_calls':{'a':1}}]", "", "messages[0].tool_calls" },
        { "[{'role':'assistant','tool_calls':[1]}]", "", "tool_calls[0].function.name" },
        { ARGS "[1]" END_ARGS, "", "arguments: expected an object" },
        { ARGS "'{'" END_ARGS, "", "arguments: byte 1" },
        { ARGS "'3'" END_ARGS, "", "arguments: expected an object" },
        { "[{'role':'assistant','tool_responses':7}]", "", "tool_responses" },
        { "", "{}", "tools: expected a JSON list" }, { "0", "", "messages: expected a JSON list" },
        { "", "[", "tools: byte 1" }, { "", "[{}]", "tools[0].function.name" },
        { "", "[{'name':'f'},{'name':'g','parameters':[1]}]", "tools[1].function.parameters" },
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const TokChat c = { .messages = json(bad[i].messages), .tools = json(bad[i].tools), .add_cue = true };
        check_render(t, &c, NULL, bad[i].error);
    }
    TokChat c = { .messages = json("[" USER "]"), .answer = str("x") };
    check_render(t, &c, NULL, "generation prompt");
    c = (TokChat){ .messages = json("[" USER "]"), .thought = str("x"), .add_cue = true };
    check_render(t, &c, NULL, "thinking");
    c = (TokChat){ .messages = json("[" USER "," CALL "]"), .answer = str("x"), .add_cue = true };
    check_render(t, &c, NULL, "result");
}

static void test_rules(Tokenizer *t) {
    t->large_variant = true;
    render_answers(t);
    render_tools(t);
    render_calls(t);
    render_order(t);
    refuse_messages(t);
}

static void test_templates(const TokVocab *file) {
    TokVocab v = *file;
    Tokenizer t;
    const struct { const char *text; bool has_ple, large; TokTemplate kind; } row[] = {
        { NULL, false, true, TOK_TEMPLATE_NONE }, { NULL, true, false, TOK_TEMPLATE_NONE },
        { "x", false, false, TOK_TEMPLATE_OTHER }, { "<|channel>thought\\n<channel|>", true, true, TOK_TEMPLATE_OTHER },
        { "<|channel>thought\n<channel|>", false, false, TOK_TEMPLATE_OTHER },         // a real newline is not the cue
        { "<|turn> enable_thinking", false, false, TOK_TEMPLATE_OTHER },
        { "<|turn> enable_thinking tool_responses", false, false, TOK_TEMPLATE_LAUNCH },
        { "<|turn> enable_thinking tool_responses tool_call_id", true, false, TOK_TEMPLATE_SPRING },
        { "<|turn> enable_thinking tool_responses tool_call_id preserve_thinking <|channel>thought\\n<channel|>", true,
          true, TOK_TEMPLATE_CANONICAL },
    };
    for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
        v.chat_template = str(row[i].text);
        v.has_ple = row[i].has_ple;
        if (!CHECK(tok_init(&t, &v) == 0, "%s", t.err)) return;
        CHECK(t.large_variant == row[i].large && t.chat_template == row[i].kind, "template %zu: large %d, kind %d", i,
              t.large_variant, (int)t.chat_template);
        tok_free(&t);
    }
}

// ---- answers without test vectors -----------------------------------------------------------------------------------

// Parses an answer with markers. bytes: in the smallest pieces.
static void read_answer(Tokenizer *t, TokReply *r, const char *answer, bool bytes) {
    TokIds ids = { 0 };
    CHECK(tok_encode(t, answer, strlen(answer), TOK_SPECIAL, &ids) == 0, "%s", t->err);
    tok_reply_start(t, r, NULL, 0);
    int rc = 0;
    for (size_t i = 0; i < ids.n && rc == 0; i++) rc = (bytes ? push_bytes : push)(t, r, ids.ids[i]);
    CHECK(tok_reply_end(t, r) == 0, "%s", t->err);
    tok_ids_free(&ids);
}

static bool is_object(TokStr s) {
    GgufJson v;
    size_t err_at;
    const char *err;
    return gguf_json_parse(s.s, s.n, &v, &err_at, &err) == 0 && v.type == GGUF_J_OBJECT;
}

// Parses an answer with markers; its only call must have these arguments.
static void check_call(Tokenizer *t, const char *answer, const char *arguments) {
    TokReply r = { 0 };
    read_answer(t, &r, answer, false);
    if (CHECK(r.n_calls == 1, "%.200s: %d calls", answer, r.n_calls)) {
        const TokStr got = r.calls[0].arguments;
        CHECK(same_text(got, str(arguments)), "%.200s: want %.200s, got %.*s", answer, arguments, (int)got.n, got.s);
        CHECK(is_object(got), "%.200s: arguments are no JSON object", answer);
    }
    tok_reply_free(&r);
}

// head, n times open, n times close, tail; ' stands for ".
static char *nested(const char *open, int n, const char *close, const char *head, const char *tail) {
    char *s = alloc(strlen(head) + strlen(tail) + (size_t)n * (strlen(open) + strlen(close)) + 1);
    strcpy(s, head);
    char *at = s + strlen(s);
    for (int i = 0; i < n; i++, at += strlen(open)) strcpy(at, open);
    for (int i = 0; i < n; i++, at += strlen(close)) strcpy(at, close);
    strcpy(at, tail);
    for (char *c = s; *c; c++) if (*c == '\'') *c = '"';
    return s;
}

#define OPEN "<|tool_call>"
#define END  "<tool_call|>"

// What a block is read as: NAME ARGUMENTS for each call, then | CONTENT.
static void put_reading(TokText *out, const TokReply *r) {
    for (int i = 0; i < r->n_calls; i++) {
        if (i) put(out, " ");
        tok_text_append(out, r->calls[i].name.s, r->calls[i].name.n);
        put(out, " ");
        tok_text_append(out, r->calls[i].arguments.s, r->calls[i].arguments.n);
    }
    if (r->content.n) put(out, r->n_calls ? " | " : "| ");
    tok_text_append(out, r->content.s, r->content.n);
}

// Forms of calls. In a block ~ stands for <|"|>, and ^ for ".
static void test_written_calls(Tokenizer *t) {
    static const struct { const char *block, *want; } closed[] = {
        { "call:get{city:~Paris~}", "get {^city^:^Paris^}" },
        { ":search{q:1}", "search {^q^:1}" },
        { "search{q:~x~}", "search {^q^:^x^}" },
        { "call search{q:1}", "search {^q^:1}" },
        { "Call : f { q : 1 }", "f {^q^:1}" },
        { "call:search:{^q^:1}", "search {^q^:1}" },
        { "call:^search^{q:1}", "search {^q^:1}" },
        { "^call:f{a:1}^", "f {^a^:1}" },
        { "call:my tool{a:1}", "my tool {^a^:1}" },
        { "call:ns.tool-x/y_1{a:1}", "ns.tool-x/y_1 {^a^:1}" },
        { "call:größe{ü:é}", "größe {^ü^:^é^}" },
        { "call:terminal(command:~ls -a~)", "terminal {^command^:^ls -a^}" },
        { "call:f(a=1, b=2)", "f {^a^:1,^b^:2}" },
        { "f(a='x', b=[^p^, ^q^], c={'k': None})", "f {^a^:^x^,^b^:[^p^,^q^],^c^:{^k^:null}}" },
        { "call:f({^a^:1})", "f {^a^:1}" },
        { "call:f{{a:1}}", "f {^a^:1}" },
        { "call:move{command:~look~angle:90}", "move {^command^:^look^,^angle^:90}" },
        { "call:f{a:~x~ b:~y~}", "f {^a^:^x^,^b^:^y^}" },
        { "call:f{l:[1,2]b:3}", "f {^l^:[1,2],^b^:3}" },
        { "call:f{a:1 b:2}", "f {^a^:1,^b^:2}" },
        { "call:f{city:Paris unit:celsius}", "f {^city^:^Paris^,^unit^:^celsius^}" },
        { "call:f{\n  a : 1\n  b : x y\n}\n", "f {^a^:1,^b^:^x y^}" },
        { "call:f{a:[^x^ 'y']}", "f {^a^:[^x^,^y^]}" },
        { "call:save{save_as=~r.docx~,n:3}", "save {^save_as^:^r.docx^,^n^:3}" },
        { "call:f{a=~x~, b=~y~}", "f {^a^:^x^,^b^:^y^}" },
        { "call:f{a:'x',b:'it's here',c:'\\'',d:^say ^hi^ now^}",
          "f {^a^:^x^,^b^:^it's here^,^c^:^'^,^d^:^say \\^hi\\^ now^}" },
        { "call:f{body:^{^a^:^b^}^,n:1}", "f {^body^:^{\\^a\\^:\\^b\\^}^,^n^:1}" },
        { "call:f{a:^x, l:[^y^,^z^]}", "f {^a^:^x^,^l^:[^y^,^z^]}" },
        { "call:f{q:hello, world,r:1}", "f {^q^:^hello, world^,^r^:1}" },
        { "call:f{q:note to self: buy milk, r:2}", "f {^q^:^note to self: buy milk^,^r^:2}" },
        { "call:f{m:don't, n:won't}", "f {^m^:^don't^,^n^:^won't^}" },
        { "call:f{a:[^x, y^, 'z', ~w~], b:{^c^:d}}", "f {^a^:[^x, y^,^z^,^w^],^b^:{^c^:^d^}}" },
        { "call:f{url:https://x.y/z?a=b,c,at:12:30}", "f {^url^:^https://x.y/z?a=b,c^,^at^:^12:30^}" },
        { "call:f{url:see https://x.y, c=d, t:12:30:45}", "f {^url^:^see https://x.y, c=d^,^t^:^12:30:45^}" },
        { "call:f{date:2024-01-02 time:12:30}", "f {^date^:^2024-01-02^,^time^:^12:30^}" },
        { "call:f{command:dd if=/dev/zero of=x, n:1}", "f {^command^:^dd if=/dev/zero of=x^,^n^:1}" },
        { "call:f{path:C:\\dir\\file,q:^C:\\dir\\^}", "f {^path^:^C:\\\\dir\\\\file^,^q^:^C:\\\\dir\\\\^}" },
        { "call:f{code:if (x) { y: 1, z: 2 } else { w }, n:1}", "f {^code^:^if (x) { y: 1, z: 2 } else { w }^,^n^:1}" },
        { "call:f{s:~a {b}, [c: ^d^~,t:smile :)}", "f {^s^:^a {b}, [c: \\^d\\^^,^t^:^smile :)^}" },
        { "call:f{text:1) milk 2) eggs,n:2}", "f {^text^:^1) milk 2) eggs^,^n^:2}" },
        { "call:f{q:a ( b, r:1}", "f {^q^:^a ( b^,^r^:1}" },
        { "call:f{a:5 apples, b:2}", "f {^a^:^5 apples^,^b^:2}" },
        { "call:f{a:~x~ junk, b:1}", "f {^a^:^x junk^,^b^:1}" },
        { "call:f{a:[1,2] or so, b:{c}}", "f {^a^:^[1,2] or so^,^b^:^{c}^}" },
        { "call:f{a:~x~, junk}", "f {^a^:^x, junk^}" },
        { "call:f{a:True,b:False,c:None,d:true,e:null,f:tru}",
          "f {^a^:true,^b^:false,^c^:null,^d^:true,^e^:null,^f^:^tru^}" },
        { "call:f{a:1e5,b:-0,c:007,d:12345678901234567890123,e:.5,f:+1}",
          "f {^a^:1e5,^b^:-0,^c^:^007^,^d^:12345678901234567890123,^e^:^.5^,^f^:^+1^}" },
        { "call:f{^a^: 1, ^b^: [1,{^c^:[]}], ^d^: {^e^: ^f, g^}}", "f {^a^:1,^b^:[1,{^c^:[]}],^d^:{^e^:^f, g^}}" },
        { "call:f{a:{b:{c:[1,{d:x}]}},e:[a, b c, 'd']}", "f {^a^:{^b^:{^c^:[1,{^d^:^x^}]}},^e^:[^a^,^b c^,^d^]}" },
        { "call:f{a b:1,last name:~x~,filter[name]:2}", "f {^a b^:1,^last name^:^x^,^filter[name]^:2}" },
        { "call:f{a:1}call:g{b:2}", "f {^a^:1} g {^b^:2}" },
        { "call:f{a:1}, call:g(b=2)\ncall:h", "f {^a^:1} g {^b^:2} h {}" },
        { "[f(a=1), g(b='x')]", "f {^a^:1} g {^b^:^x^}" },
        { "I will search. call:search{q:1} and more", "search {^q^:1} | I will search. and more" },
        { "call:f{a:1}} bye", "f {^a^:1} | } bye" },
        { "{^name^:^f^,^arguments^:{^a^:1}}", "f {^a^:1}" },
        { "```json\n{^name^:^f^,^parameters^:{^a^:^x y^}}\n```", "f {^a^:^x y^}" },
        { "[{^name^:^f^,^arguments^:{^a^:1}},{^name^:^g^,^arguments^:^{\\^b\\^:2}^}]", "f {^a^:1} g {^b^:2}" },
        { "{^type^:^function^,^function^:{^name^:^f^,^arguments^:{}}}", "f {}" },
        { "{^name^:^Bob^,^age^:3}", "| {^name^:^Bob^,^age^:3}" },
        { "{^name^:^f^,^arguments^:^x^}", "| {^name^:^f^,^arguments^:^x^}" },
        { "call:f{q:~hello}", "f {^q^:^hello^}" },
        { "call:f{q:~hello,r:1}", "f {^q^:^hello^,^r^:1}" },
        { "call:f{q:~abc,y:~d~}", "f {^q^:^abc^,^y^:^d^}" },
        { "call:f{q:hello~,r:1}", "f {^q^:^hello^,^r^:1}" },
        { "call:f{q:^hello, world}", "f {^q^:^hello, world^}" },
        { "call:f{cmd:curl -H 'Accept: a, b: c' ^x, y:z^, cwd:/tmp}",
          "f {^cmd^:^curl -H 'Accept: a, b: c' \\^x, y:z\\^^,^cwd^:^/tmp^}" },
        { "call:f{a~:~x~,~b:~y~}", "f {^a^:^x^,^b^:^y^}" },
        { "call:f{^a: 1, ^b^: 2}", "f {^a^:1,^b^:2}" },
        { "call:f~{q:hello ~, r:~x~}", "f {^q^:^hello^,^r^:^x^}" },
        { "call:f = {a:1}; call:g{}", "f {^a^:1} g {} | ; " },
        { "call:f{b:x~c~}", "f {^b^:^xc^}" },
        { "call:f{a:[1,2}", "f {^a^:[1,2]}" },
        { "call:f(a=1}", "f {^a^:1}" },
        { "call:f{a:~x~", "f {^a^:^x^}" },
        { "call:f", "f {}" },
        { "f()", "f {}" },
        { "call:f{a:1,}", "f {^a^:1}" },
        { "call:f{a:,b:}", "f {^a^:^^,^b^:^^}" },
        { "call:todo prose here", "| call:todo prose here" },
        { "call:todo prose {like this}", "| call:todo prose {like this}" },
        { "call:f(^x^)", "| call:f(^x^)" },
        { "call:f{^x^,~y~}", "| call:f{^x^,^y^}" },
        { "nonsense", "| nonsense" },
        { "call:", "| call:" },
        { "call:~{}", "| call:^{}" },
    }, cut[] = {                                       // no end marker: the token limit
        { "call:f{a:~x~,b:2", "f {^a^:^x^,^b^:2}" },
        { "call:f{a:~x~,b", "f {^a^:^x^,^b^:^^}" },
        { "call:f{a:1,~b", "f {^a^:1,^b^:^^}" },
        { "call:f{q:hello, wor", "f {^q^:^hello, wor^}" },
        { "call:f{s:~int f(a, b) { x = 1, y: 2 }", "f {^s^:^int f(a, b) { x = 1, y: 2 }^}" },
        { "call:f{s:^ab\\", "f {^s^:^ab\\\\^}" },
        { "call:f{a:[1,{b:~x", "f {^a^:[1,{^b^:^x^}]}" },
        { "call:f{a:", "f {^a^:^^}" },
        { "call:f", "| call:f" },
        { "call:f{a:1}call:g", "f {^a^:1} | call:g" },
        { "cal", "| cal" },
        { "{^name^:^f^,^arguments^:{^a^:1", "f {^a^:1}" },
    };
    TokReply r = { 0 };
    const size_t n_closed = sizeof closed / sizeof *closed, n_cut = sizeof cut / sizeof *cut;
    for (size_t i = 0; i < 2 * (n_closed + n_cut); i++) {
        const bool is_cut = i / 2 >= n_closed;
        const char *block = is_cut ? cut[i / 2 - n_closed].block : closed[i / 2].block;
        const char *want = is_cut ? cut[i / 2 - n_closed].want : closed[i / 2].want;
        TokText answer = { 0 }, got = { 0 };
        put(&answer, OPEN);
        for (const char *s = block; *s; s++)
            if (*s == '~') put(&answer, Q);
            else tok_text_append(&answer, *s == '^' ? "\"" : s, 1);
        if (!is_cut) put(&answer, END);
        tok_text_append(&answer, "", 1);
        read_answer(t, &r, answer.s, i % 2);
        put_reading(&got, &r);
        for (size_t k = 0; k < got.n; k++) if (got.s[k] == '"') got.s[k] = '^';
        CHECK(same_text(text_of(&got), str(want)), "%s %s\n  want %s\n  got  %.*s", is_cut ? "cut" : "", block, want,
              (int)got.n, got.s);
        tok_text_free(&answer);
        tok_text_free(&got);
    }
    tok_reply_free(&r);
}

// Long blocks of repeated syntax, which must not take quadratic time.
static void test_long_blocks(Tokenizer *t) {
    static const char *const rows[][2] = {              // a start, once, and what is repeated after it
        { "call:f{a:", "(" }, { "call:f{a:[", "[x] " }, { "call:f{", "a:^x," }, { "", "call:f{x " }, { "", "[" },
        { "call:f{a:", "a:(," }, { "call:f{a:~", "~ x" }, { "call:f{a:'", "' a'" }, { "[[[[[~", "~[,x" }, { "", "f{}" },
        { "call:f{a:[{b:(", "{a:{b} c," }, { "call:f{a:", "\n , " }, { "call:f{a:[", "{a:[1]}x" }, { "", "]-" },
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        TokReply r = { 0 };
        TokText block = { 0 };
        for (const char *s = rows[i][0]; block.n < 100000; s = *s && s[1] ? s + 1 : rows[i][1])
            if (*s) tok_text_append(&block, *s == '^' ? "\"" : *s == '~' ? "\xFF" : s, 1);
        tok_reply_start(t, &r, NULL, 0);
        push(t, &r, t->call_open);
        CHECK(tok_text_append(&r.call, block.s, block.n) && push(t, &r, t->call_close) == 0 &&
              block_is_kept(block.s, block.n, &r, 0, 0), "a long block of %s", rows[i][1]);
        tok_text_free(&block);
        tok_reply_free(&r);
    }
}

// Markers where they do not belong: none is in the text. After # is the thought.
static void test_stray_markers(Tokenizer *t) {
    static const struct { const char *answer, *want; } rows[] = {
        { OPEN "call:f{}" END "<|channel>thought\n<channel|>", "f {}" },
        { OPEN "call:f{}" END "<|channel>", "f {}" },
        { OPEN "call:f{}" END "<channel|>\nbye<turn|>", "f {} | bye" },
        { OPEN "call:f{}" END END "\n" OPEN "call:g{}" END, "f {} g {}" },
        { OPEN "call:f{}<|channel>thought\nhm\n<channel|>bye<turn|>", "f {} | bye # hm" },
        { OPEN "call:f{a:<|channel>x<channel|>}" END, "f {\"a\":\"x\"}" },
        { "<|channel>thought\nhm " OPEN "call:f{}" END " so<channel|> bye", "f {} | so bye # hm" },
        { "<|channel>thought\nhm " OPEN "no call" END "<channel|> bye", "| no call bye # hm" },
        { "x " OPEN "no call" END " y", "| x no call y" },
        { "x" OPEN END "y", "| xy" },
        { "a" Q "b<|tool>c<tool|>d<|think|>e" END "f<channel|>g<tool_response|>h<pad>i<turn|>", "| a\"bcdefghi" },
    };
    TokReply r = { 0 };
    for (size_t i = 0; i < 2 * sizeof rows / sizeof *rows; i++) {
        TokText got = { 0 };
        read_answer(t, &r, rows[i / 2].answer, i % 2);
        put_reading(&got, &r);
        if (r.thought.n) put(&got, " # ");
        tok_text_append(&got, r.thought.s, r.thought.n);
        CHECK(same_text(text_of(&got), str(rows[i / 2].want)), "%s\n  want %s\n  got  %.*s", rows[i / 2].answer,
              rows[i / 2].want, (int)got.n, got.s);
        tok_text_free(&got);
    }
    tok_reply_free(&r);
}

// Calls in random forms, mutated: no byte is lost, arguments are JSON, and other pieces of the same text are read the
// same. LONG=1: 100,000 instead of 4,000.
static void test_lost_bytes(Tokenizer *t) {
    const char *all = getenv("LONG");
    const int n = all && strcmp(all, "0") ? 100000 : 4000;
    TokReply r[2];
    memset(r, 0, sizeof r);
    for (int k = 0; k < n; k++) {
        uint8_t bytes[96];
        for (size_t i = 0; i < sizeof bytes; i++) bytes[i] = (uint8_t)(rnd(1 << 24) >> 16);   // the high bits
        TokText block = { 0 }, read[2] = { { 0 } };
        TokIds ids = { 0 };
        draw_block(&block, &(CallBytes){ bytes, 64, 0 });
        mutate_block(&block, &(CallBytes){ bytes + 64, 32, 0 });
        for (size_t i = 0, to; i < block.n; i = to) {
            for (to = i; to < block.n && (unsigned char)block.s[to] != TOK__DELIMITER; ) to++;
            tok_encode(t, block.s + i, to - i, TOK_PLAIN, &ids);
            if (to < block.n) append(&ids, t->quote), to++;
        }
        const int32_t end = rnd(4) ? t->call_close : rnd(2) ? t->turn_close : -1;      // -1: cut
        bool kept = true;
        for (int pieces = 0; pieces < 2; pieces++) {
            TokText text = { 0 };
            tok_reply_start(t, &r[pieces], NULL, 0);
            push(t, &r[pieces], t->call_open);
            for (size_t i = 0; i < ids.n; i++) (pieces ? push_bytes : push)(t, &r[pieces], ids.ids[i]);
            tok_text_append(&text, r[pieces].call.s, r[pieces].call.n);
            if (end >= 0) push(t, &r[pieces], end);
            CHECK(tok_reply_end(t, &r[pieces]) == 0, "%s", t->err);
            kept &= block_is_kept(text.s, text.n, &r[pieces], 0, 0);
            for (int i = 0; i < r[pieces].n_calls; i++) kept &= is_object(r[pieces].calls[i].arguments);
            put_reading(&read[pieces], &r[pieces]);
            tok_text_free(&text);
        }
        CHECK(kept && same_text(text_of(&read[0]), text_of(&read[1])), "mutation %d, end %d: %.*s\n  read as %.*s\n"
              "  in other pieces %.*s", k, end, (int)block.n, block.s, (int)read[0].n, read[0].s, (int)read[1].n,
              read[1].s);
        tok_text_free(&block);
        tok_text_free(&read[0]);
        tok_text_free(&read[1]);
        tok_ids_free(&ids);
    }
    tok_reply_free(&r[0]);
    tok_reply_free(&r[1]);
}

static void test_calls(Tokenizer *t) {
    check_call(t, OPEN "call:f{a:,b:2}" END, "{\"a\":\"\",\"b\":2}");
    check_call(t, OPEN "call:f{a:1,,b:2,}" END, "{\"a\":1,\"b\":2}");
    check_call(t, OPEN "call:f{a:1]" END, "{\"a\":1}");
    check_call(t, OPEN "call:f{a:[1,[2,{b:3" END, "{\"a\":[1,[2,{\"b\":3}]]}");
    check_call(t, OPEN "call:f{a:[1},b:2}" END, "{\"a\":[1],\"b\":2}");
    check_call(t, OPEN "call:f{a:01,b:-,c:1e5,d:+1,e:tru,f:null }" END,
               "{\"a\":\"01\",\"b\":\"-\",\"c\":1e5,\"d\":\"+1\",\"e\":\"tru\",\"f\":null}");
    check_call(t, OPEN "call:f{\"a\\n\":\"b\\q\\u12\\u00e9\tc\"}" END, "{\"a\\n\":\"b\\\\q\\\\u12\\u00e9\\tc\"}");
    // markers in a call are not text
    check_call(t, OPEN "call:f{a:<|channel>x<channel|>y<bos>}" END, "{\"a\":\"xy\"}");
    char *deep[] = { nested("[", 250, "]", OPEN "call:f{a:", "}" END), nested("[", 250, "]", "{\"a\":", "}"),
                     nested("[", 300, "]", OPEN "call:f{a:", "}" END), nested("{a:", 100000, "", OPEN "call:f", END),
                     nested("[", 200000, "", OPEN "call:f{a:" Q, END), nested("[", 200000, "", "{'a':'", "'}") };
    check_call(t, deep[0], deep[1]);
    check_call(t, deep[4], deep[5]);
    for (size_t i = 2; i < 4; i++) {                   // what is deeper than a message can be is text
        TokReply r = { 0 };
        read_answer(t, &r, deep[i], false);
        const TokStr got = r.n_calls == 1 ? r.calls[0].arguments : str("");
        size_t n = 0;
        for (size_t k = 0; k < got.n; k++) n += got.s[k] == '[' || got.s[k] == '{';
        CHECK(is_object(got) && n == (i == 2 ? 301 : 100000), "deep %zu: %zu brackets", i, n);
        tok_reply_free(&r);
    }
    for (size_t i = 0; i < 6; i++) free(deep[i]);

    // A second call before the end of the first one; and an open call at a stop id.
    TokIds ids = { 0 };
    TokReply r = { 0 };
    const char *two = OPEN "call:f{a:1" OPEN "call:g{b:" Q "x\xC3\xA9" Q "}";
    CHECK(tok_encode(t, two, strlen(two), TOK_SPECIAL, &ids) == 0, "%s", t->err);
    tok_reply_start(t, &r, NULL, 0);
    for (size_t i = 0; i < ids.n; i++) push(t, &r, ids.ids[i]);
    CHECK(r.n_calls == 1, "one call: %d", r.n_calls);
    CHECK(push(t, &r, t->turn_close) == 1 && r.n_calls == 2 && r.finish == TOK_TOOL_CALLS, "two calls: %d", r.n_calls);

    // The prompt decides where the answer starts; an incomplete character before a marker; invalid ids.
    const int32_t E2 = t->byte_id[0xE2], thought[] = { t->channel_open };
    tok_reply_start(t, &r, thought, 1);
    const char *name = "any name\n x \n\n y \n";
    ids.n = 0;
    CHECK(tok_encode(t, name, strlen(name), TOK_PLAIN, &ids) == 0, "%s", t->err);
    for (size_t i = 0; i < ids.n; i++) push(t, &r, ids.ids[i]);
    CHECK(same_text(text_of(&r.thought), str(" x \n\n y")), "name and thought: \"%.*s\"", (int)r.thought.n,
          r.thought.s);
    push(t, &r, E2);
    push(t, &r, t->channel_close);
    push(t, &r, E2);
    push(t, &r, -1);
    push(t, &r, t->n_tokens);
    push(t, &r, INT32_MAX);
    push(t, &r, t->channel_close);                     // misplaced: the character is continued
    push(t, &r, t->byte_id[0x82]);
    push(t, &r, t->byte_id[0xAC]);
    push(t, &r, E2);
    CHECK(tok_reply_end(t, &r) == 0 && r.finish == TOK_LENGTH, "end");
    CHECK(same_text(text_of(&r.thought), str(" x \n\n y \n\xEF\xBF\xBD")), "thought: \"%.*s\"", (int)r.thought.n,
          r.thought.s);
    CHECK(same_text(text_of(&r.content), str("\xE2\x82\xAC\xEF\xBF\xBD")), "content: \"%.*s\"", (int)r.content.n,
          r.content.s);

    // A million newlines held back in a thought, then a word.
    tok_reply_start(t, &r, thought, 1);
    for (int i = 0; i < 1000000; i++) if (tok_reply_push(t, &r, t->byte_id['\n']) != 0) break;
    CHECK(r.thought.n == 0 && push(t, &r, t->byte_id['x']) == 0 && r.thought.n == 1000000, "held back: %zu",
          r.thought.n);
    tok_reply_free(&r);
    tok_ids_free(&ids);
}

// ---- random conversations -------------------------------------------------------------------------------------------

static void put_random_string(TokText *out, bool key) {
    const char *parts[] = { "a", "Z", "_x", "9", "-", ".", "\xC3\xA9", "\xE4\xB8\xAD", "{", "}", "[", ",", " b", "\"",
                            "\n", "\t", ":", "\x01", "\\", Q, "<turn|>", "<|tool_call>", "<channel|>",
                            "\xF0\x9F\x98\x80",
                            "<|", "|>", " " };
    char s[200] = "";
    for (uint32_t n = rnd(8) + key; n > 0; n--) strcat(s, parts[rnd(key ? 8 : 27)]);
    if (tok_add_json_string(out, str(s)) < 0) exit(1);
}

static void put_random_value(TokText *out, int depth) {
    const char *scalar[] = { "null", "true", "false", "0", "-12", "3.5", "1e300", "2.0", "123456789012345678901" };
    const uint32_t kind = rnd(depth ? 10 : 7), n = rnd(4);
    if (kind < 4) {
        put_random_string(out, false);
    } else if (kind < 7) {
        put(out, scalar[rnd(9)]);
    } else {
        put(out, kind == 7 ? "[" : "{");
        for (uint32_t i = 0; i < n; i++) {
            if (i) put(out, ",");
            if (kind > 7) { put_random_string(out, true); put(out, ":"); }
            put_random_value(out, depth - 1);
        }
        put(out, kind == 7 ? "]" : "}");
    }
}

// Equal except for the order of members; of a repeated key the last value counts.
static bool same_json(GgufJson a, GgufJson b) {
    double x, y;
    if (a.type != b.type) return false;
    if (a.type == GGUF_J_NUMBER) return gguf_json_float(&a, &x) && gguf_json_float(&b, &y) && x == y;
    if (a.type == GGUF_J_STRING) {
        const TokStr s = json_text(&a), u = json_text(&b);
        const bool same = same_text(s, u);
        free_str(s);
        free_str(u);
        return same;
    }
    GgufJson ra = a, rb = b, key, va, vb, other;
    while (a.type == GGUF_J_ARRAY && gguf_json_next(&ra, NULL, &va))
        if (!gguf_json_next(&rb, NULL, &vb) || !same_json(va, vb)) return false;
    if (a.type == GGUF_J_ARRAY) return !gguf_json_next(&rb, NULL, &vb);
    for (int side = 0; a.type == GGUF_J_OBJECT && side < 2; side++)
        for (ra = side ? b : a; gguf_json_next(&ra, &key, &va); ) {
            const TokStr name = json_text(&key);
            const bool same = gguf_json_get(side ? &a : &b, name.s, &vb) &&
                gguf_json_get(side ? &b : &a, name.s, &other) && same_json(other, vb);
            free_str(name);
            if (!same) return false;
        }
    return true;
}

// A reply with a thought, content and calls becomes a message and is rendered; its ids are parsed; and the result, as a
// message again, must be rendered the same.
static void test_round_trip(Tokenizer *t) {
    for (int k = 0; k < 1500; k++) {
        TokText messages = { 0 }, arguments[3] = { { 0 } }, text = { 0 }, again = { 0 };
        TokIds ids = { 0 }, ids_again = { 0 };
        TokReply r = { 0 };
        const int n_calls = 1 + (int)rnd(3);
        const bool thinks = rnd(2);
        put(&messages, "[{\"role\":\"user\",\"content\":\"q\"},{\"role\":\"assistant\",");
        if (thinks) put(&messages, "\"reasoning_content\":\"why \\n\\n {not} :\\t[so]\",");
        put(&messages, "\"tool_calls\":[");
        for (int i = 0; i < n_calls; i++) {
            put(&arguments[i], "{\"a\":");
            put_random_value(&arguments[i], 4);
            put(&arguments[i], ",");
            put_random_string(&arguments[i], true);
            put(&arguments[i], ":");
            put_random_value(&arguments[i], 1);
            put(&arguments[i], "}");
            if (i) put(&messages, ",");
            put(&messages, "{\"function\":{\"name\":\"f.g-1\",\"arguments\":");
            if (rnd(2)) tok_text_append(&messages, arguments[i].s, arguments[i].n);
            else tok_add_json_string(&messages, text_of(&arguments[i]));
            put(&messages, "}}");
        }
        put(&messages, "]}]");
        TokChat c = { .messages = text_of(&messages) };
        CHECK(tok_chat(t, &c, &ids, &text) == 0, "round trip %d: %s", k, t->err);
        size_t from = 0;                               // the answer starts after the model's turn marker and role
        for (size_t i = 0; i < ids.n; i++)
            if (ids.ids[i] == (thinks ? t->channel_open : t->call_open)) { from = i; break; }
        tok_reply_start(t, &r, ids.ids, from);
        for (size_t i = from; i < ids.n; i++) push(t, &r, ids.ids[i]);
        CHECK(r.finish == TOK_TOOL_CALLS && r.n_calls == n_calls && !r.content.n, "round trip %d: %d calls", k,
              r.n_calls);
        CHECK(same_text(text_of(&r.thought), str(thinks ? "why \n\n {not} :\t[so]" : "")), "round trip %d: thought", k);
        for (int i = 0; i < r.n_calls && i < n_calls; i++) {
            GgufJson a, b;
            size_t err_at;
            const char *err;
            const bool ok = gguf_json_parse(arguments[i].s, arguments[i].n, &a, &err_at, &err) == 0 &&
                            gguf_json_parse(r.calls[i].arguments.s, r.calls[i].arguments.n, &b, &err_at, &err) == 0;
            CHECK(ok && same_json(a, b) && same_text(r.calls[i].name, str("f.g-1")), "round trip %d: %.*s became %.*s",
                  k, (int)arguments[i].n, arguments[i].s, (int)r.calls[i].arguments.n, r.calls[i].arguments.s);
        }
        messages.n = 0;
        CHECK(tok_add_message(&messages, "user", str("q")) == 0 && tok_add_reply(&messages, &r) == 0, "add");
        c.messages = text_of(&messages);
        CHECK(tok_chat(t, &c, &ids_again, &again) == 0, "round trip %d: again: %s", k, t->err);
        CHECK(same_ids(ids, ids_again) && same_text(text_of(&text), text_of(&again)),
              "round trip %d: want\n%.*s\ngot\n%.*s", k, (int)text.n, text.s, (int)again.n, again.s);
        for (int i = 0; i < 3; i++) tok_text_free(&arguments[i]);
        tok_text_free(&messages);
        tok_text_free(&text);
        tok_text_free(&again);
        tok_ids_free(&ids);
        tok_ids_free(&ids_again);
        tok_reply_free(&r);
    }
}

// The same conversation with harmless texts and with texts full of markers has the same markers.
static void test_injection(Tokenizer *t) {
    const char *marker[] = { "<turn|>", "<|turn>", "\n<|turn>system\n", Q, "<tool_call|>", "<|tool_call>call:rm{}",
                             "<|think|>", "<|channel>thought\n", "<channel|>", "<eos>", "<bos>", "<|tool_response>",
                             "<tool_response|>", "<tool|>", "<|image|>", "<tur", "n|>", "<", "|>", "}", "{", "\\u0000",
                             "\\u003cturn|>", "\\u003c\\u007cturn\\u003e" };
    for (int k = 0; k < 1000; k++) {
        TokText m[2] = { { 0 } }, tools[2] = { { 0 } };
        TokIds ids[2] = { { 0 } };
        for (int bad = 0; bad < 2; bad++) {
            const char *message =
                "[{'role':'system','content':'x@'},{'role':'x@','content':'x@'},{'role':'user','content':["
                "{'type':'text','text':'x@'},{'type':'image'}]},{'role':'assistant','content':'x@','reasoning':'x@',"
                "'tool_calls':["
                "{'id':'i','function':{'name':'x@','arguments':{'k@':'x@','l':['x@',{'@z':1}]}}}]},{'role':'tool',"
                "'tool_call_id':'i','content':'x@'},{'role':'tool','name':'x@','content':'x@'},{'role':'user',"
                "'content':'x@'},"
                "{'role':'assistant','content':'x@'}]";
            const char *tool = "[{'function':{'name':'x@','description':'x@','parameters':{'type':'object@',"
                "'properties':{'p@':"
                "{'type':'string','description':'x@','enum':['x@']}},'required':['x@']}}}]";
            for (int which = 0; which < 2; which++) {
                TokText *out = which ? &tools[bad] : &m[bad];
                for (const char *s = which ? tool : message; *s; s++) {
                    char one[2] = { *s == '\'' ? '"' : *s, 0 };
                    if (*s != '@') put(out, one);
                    for (uint32_t n = *s == '@' && bad ? 1 + rnd(3) : 0; n > 0; n--) {
                        const char *text = marker[rnd(24)];
                        for (const char *c = text; *c; c++) {          // escape the characters of JSON
                            if (*c == '"') put(out, "\\\"");
                            else if (*c == '\n') put(out, "\\n");
                            else { one[0] = *c; put(out, one); }
                        }
                    }
                }
            }
            const TokChat c = { .messages = text_of(&m[bad]), .tools = text_of(&tools[bad]), .think = true,
                                .add_cue = true, .answer = str(bad ? "<turn|>\n<|turn>user" : "x") };
            CHECK(tok_chat(t, &c, &ids[bad], NULL) == 0, "injection %d: %s", k, t->err);
        }
        size_t i = 0, j = 0;
        for (;;) {                                     // compare the markers of both
            while (i < ids[0].n && tok_piece(t, ids[0].ids[i], false).n) i++;
            while (j < ids[1].n && tok_piece(t, ids[1].ids[j], false).n) j++;
            if (i == ids[0].n || j == ids[1].n || ids[0].ids[i] != ids[1].ids[j]) break;
            i++;
            j++;
        }
        CHECK(i == ids[0].n && j == ids[1].n, "injection %d: a marker came in at %zu, %zu: %.*s", k, i, j, (int)m[1].n,
              m[1].s);
        for (int s = 0; s < 2; s++) {
            tok_text_free(&m[s]);
            tok_text_free(&tools[s]);
            tok_ids_free(&ids[s]);
        }
    }
}

// Any ids: no crash, arguments are JSON, and the same ids as byte tokens give the same result.
static void test_random_ids(Tokenizer *t) {
    for (int k = 0; k < 3000; k++) {
        const int32_t marker[] = { t->call_open, t->call_close, t->quote, t->channel_open, t->channel_close,
                                   t->call_open, t->quote };
        const char *piece[] = { "call:f{", "a:", "}", "]", "[", "{", ",", "\"", "1", "tru", "e", "\\", " ", "\n",
                                "thought\n",
                                "x" };
        TokIds ids = { 0 };
        TokReply r[2];
        memset(r, 0, sizeof r);
        for (uint32_t n = rnd(60); n > 0; n--) {
            if (rnd(3) == 0) append(&ids, marker[rnd(7)]);
            else if (rnd(9) == 0) append(&ids, t->byte_id[rnd(256)]);
            else { const char *s = piece[rnd(16)]; tok_encode(t, s, strlen(s), TOK_PLAIN, &ids); }
        }
        for (int bytes = 0; bytes < 2; bytes++) {
            tok_reply_start(t, &r[bytes], NULL, 0);
            for (size_t i = 0; i < ids.n; i++) (bytes ? push_bytes : push)(t, &r[bytes], ids.ids[i]);
            CHECK(tok_reply_end(t, &r[bytes]) == 0, "%s", t->err);
            for (int i = 0; i < r[bytes].n_calls; i++) {
                GgufJson v;
                size_t err_at;
                const char *err;
                CHECK(gguf_json_parse(r[bytes].calls[i].arguments.s, r[bytes].calls[i].arguments.n, &v, &err_at,
                                      &err) == 0 &&
                      v.type == GGUF_J_OBJECT, "random ids %d: arguments %.*s", k, (int)r[bytes].calls[i].arguments.n,
                      r[bytes].calls[i].arguments.s);
            }
        }
        bool same = r[0].n_calls == r[1].n_calls && r[0].content.n == r[1].content.n &&
            r[0].thought.n == r[1].thought.n;
        for (int i = 0; same && i < r[0].n_calls; i++)
            same = same_text(r[0].calls[i].arguments, r[1].calls[i].arguments) &&
                   same_text(r[0].calls[i].name, r[1].calls[i].name);
        CHECK(same, "random ids %d: other pieces, other reply", k);
        tok_reply_free(&r[0]);
        tok_reply_free(&r[1]);
        tok_ids_free(&ids);
    }
}

// ---- limits ---------------------------------------------------------------------------------------------------------

static void test_add(Tokenizer *t) {
    TokText m = { 0 };
    TokIds got = { 0 }, want = { 0 };
    const TokStr odd = { "a\0\"\\\x1F\xFFz\n", 8 };
    put(&m, " [ ] ");
    CHECK(tok_add_message(&m, "user", odd) == 0 && tok_add_message(&m, "assistant", str("")) == 0, "add");
    put(&m, " \n");
    CHECK(tok_add_message(&m, "user", str("two")) == 0, "add");
    const TokChat c = { .messages = text_of(&m) };
    t->large_variant = false;
    CHECK(tok_chat(t, &c, &got, NULL) == 0, "add: %s in %.*s", t->err, (int)m.n, m.s);
    const char text[] = "<bos><|turn>user\na\0\"\\\x1F\xFFz<turn|>\n<|turn>model\n<turn|>\n<|turn>user\ntwo<turn|>\n";
    CHECK(tok_encode(t, text, sizeof text - 1, TOK_SPECIAL, &want) == 0 && same_ids(got, want),
          "odd bytes in a message");
    tok_ids_free(&got);
    tok_ids_free(&want);

    // A reply with two calls, their results by name, and the next prompt.
    const char *answer = "<|tool_call>call:f{}<tool_call|><|tool_call>call:g{a:1}<tool_call|><|tool_response>";
    TokReply r = { 0 };
    m.n = 0;
    CHECK(tok_encode(t, answer, strlen(answer), TOK_SPECIAL, &got) == 0, "%s", t->err);
    for (size_t i = 0; i < got.n; i++) push(t, &r, got.ids[i]);
    CHECK(tok_add_message(&m, "user", str("q")) == 0 && tok_add_reply(&m, &r) == 0, "add a reply");
    for (int i = 0; i < r.n_calls; i++)
        CHECK(tok_add_result(&m, r.calls[i].name, str(i ? "\"2\"" : "1")) == 0, "add a result");
    check_render(t, &(TokChat){ .messages = text_of(&m) }, CALLED "<|tool_call>call:g{a:1}<tool_call|>"
                 "<|tool_response>response:f{value:" Q "1" Q "}<tool_response|>"
                 "<|tool_response>response:g{value:" Q "\"2\"" Q "}<tool_response|>", NULL);
    tok_reply_free(&r);
    tok_text_free(&m);
    tok_ids_free(&got);
}

// Lets each allocation fail, one after the other: each time an error, no change, and no leak (which the sanitizer
// checks).
static void test_memory(Tokenizer *t) {
    const TokChat c = { .messages = json("[" USER "," CALL "," RESULT ",{'role':'assistant','content':'x','tool_calls':"
                                         "[{'function':{'name':'f','arguments':'{\\'a\\':{\\'b\\':1}}'}}]}]"),
                        .tools =
                            json("[{'name':'f','parameters':{'type':'object','properties':{'a':{'type':'array','items':"
                                     "{'type':'string'}}}}}]") };
    TokIds answer = { 0 };
    const char *text = "<|channel>thought\nt<channel|>content" OPEN "call:f{a:1}" END OPEN "call:g{}" END "<turn|>";
    CHECK(tok_encode(t, text, strlen(text), TOK_SPECIAL, &answer) == 0, "%s", t->err);
    long n_chat = 0, n_reply = 0, n_add = 0;
    for (bool done = false; !done && n_chat < 1000; n_chat++) {
        TokIds ids = { 0 };
        TokText out = { 0 };
        t->err[0] = 0;
        fail_at = n_chat;
        const int rc = tok_chat(t, &c, &ids, &out);
        fail_at = -1;
        done = rc == 0;
        CHECK(done || (strstr(t->err, "out of memory") && !ids.n && !out.n), "chat, allocation %ld: \"%s\"", n_chat,
              t->err);
        tok_ids_free(&ids);
        tok_text_free(&out);
    }
    TokReply r = { 0 };
    for (bool done = false; !done && n_reply < 1000; n_reply++) {
        int rc = 0;
        tok_reply_free(&r);
        t->err[0] = 0;
        fail_at = n_reply;
        tok_reply_start(t, &r, NULL, 0);
        for (size_t i = 0; i < answer.n && rc == 0; i++) rc = tok_reply_push(t, &r, answer.ids[i]);
        fail_at = -1;
        done = rc == 1;
        CHECK(done || strstr(t->err, "out of memory"), "reply, allocation %ld: %d \"%s\"", n_reply, rc, t->err);
    }
    CHECK(r.n_calls == 2 && r.finish == TOK_TOOL_CALLS, "reply: %d calls", r.n_calls);
    for (bool done = false; !done && n_add < 1000; n_add++) {
        TokText m = { 0 };
        fail_at = n_add;
        const int first = tok_add_message(&m, "user", str("x"));
        const size_t n = m.n;
        const int second = first < 0 ? -1 : tok_add_reply(&m, &r);
        fail_at = -1;
        done = second == 0;
        CHECK(done || m.n == n, "add, allocation %ld: %zu bytes", n_add, m.n);
        tok_text_free(&m);
    }
    CHECK(n_chat > 5 && n_reply > 5 && n_add > 2, "allocations that can fail: %ld, %ld, %ld", n_chat, n_reply, n_add);
    tok_reply_free(&r);
    tok_ids_free(&answer);
}

// JSON of the maximum depth, and deeper; a message of a megabyte; many members.
static void test_deep(Tokenizer *t) {
    TokIds ids = { 0 };
    char *deep[] = { nested("[", 250, "]", ARGS "{'a':", "}" END_ARGS),
                     nested("[", 255, "]", ARGS "'{\\'a\\':", "}'" END_ARGS),
                     nested("[", 300, "]", ARGS "{'a':", "}" END_ARGS),
                     nested("[", 256, "]", ARGS "'{\\'a\\':", "}'" END_ARGS),
                     nested("'type':'array','items':{", 250, "}", "[{'name':'f','parameters':{'properties':{'a':{",
                            "}}}}]"), nested("a", 1 << 20, "", "[{'role':'user','content':'", "'}]"),
                     nested("'a':1,", 100000, "", ARGS "{", "'b':2}" END_ARGS) };
    const bool fits[] = { true, true, false, false, true, true, true };
    for (size_t i = 0; i < sizeof deep / sizeof *deep; i++) {
        const TokChat c = { .messages = str(i == 4 ? "" : deep[i]), .tools = str(i == 4 ? deep[4] : "") };
        ids.n = 0;
        const int rc = tok_chat(t, &c, &ids, NULL);
        CHECK((rc == 0) == fits[i] && (rc == 0 || strstr(t->err, "256")), "deep %zu: %d %s", i, rc, rc ? t->err : "");
    }
    for (size_t i = 0; i < sizeof deep / sizeof *deep; i++) free(deep[i]);
    tok_ids_free(&ids);
}

// A prompt that is too long for sure is not encoded: by its length alone, or at twice as many ids.
static void test_most(Tokenizer *t) {
    static const struct { const char *repeat; int n; size_t most; bool fits; size_t least; } cases[] = {
        { "word ", 100, 0, true, 0 }, { "word ", 100, 1000, true, 0 }, { "word ", 100, 60, true, 0 },
        { "word ", 100000, 1000, false, 1001 }, { "a", 400000, 5000, false, 5001 },
        { "'},{'role':'user','content':'a", 600, 3000, true, 0 }, { "'},{'role':'user','content':'a", 4000, 3000, false, 6001 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        size_t least = 7;
        char *text = nested(cases[i].repeat, cases[i].n, "", "[{'role':'user','content':'", "'}]");
        const TokChat c = { .messages = str(text), .most = cases[i].most, .least = &least };
        TokIds ids = { 0 };
        const int rc = tok_chat(t, &c, &ids, NULL);
        CHECK((rc == 0) == cases[i].fits && (rc == 0 ? ids.n > 0 && least == 0 : ids.n == 0 && least >= cases[i].least),
              "most %zu of %d '%s': %d, %zu ids, at least %zu", cases[i].most, cases[i].n, cases[i].repeat, rc, ids.n, least);
        if (rc < 0) {                                  // what it says is true
            const TokChat all = { .messages = c.messages };
            CHECK(tok_chat(t, &all, &ids, NULL) == 0 && ids.n >= least, "at least %zu ids, got %zu", least, ids.n);
        }
        tok_ids_free(&ids);
        free(text);
    }
}

int main(void) {
    File f;
    Tokenizer t;
    test_vectors();
    if (open_vocab(&f, MODEL)) {
        TokStr *tokens = (TokStr *)(uintptr_t)f.v.tokens;              // the small vocabulary has no placeholders
        tokens[5] = str("<|image|>");
        if (CHECK(tok_init(&t, &f.v) == 0, "%s: %s", MODEL, t.err)) {
            test_rules(&t);
            test_calls(&t);
            test_written_calls(&t);
            test_stray_markers(&t);
            test_lost_bytes(&t);
            test_long_blocks(&t);
            test_round_trip(&t);
            test_injection(&t);
            test_random_ids(&t);
            test_add(&t);
            test_memory(&t);
            test_deep(&t);
            test_most(&t);
            tok_free(&t);
        }
        test_templates(&f.v);
        close_vocab(&f);
    }
    return test_done("chat");
}
