/* ollama.h - the API of Ollama: /api/chat, /api/generate, and what its clients ask about the model.
 *
 * Uses engine.h, request.h, schedule.h, exchange.h, openai.h, dialects.h. Begin with ollama_chat_convert().
 *   [1] A request as a chat's    [2] The answer    [3] The model; what is refused */
#ifndef OLLAMA_H
#define OLLAMA_H

#ifdef USE_MICROHTTPD
#include <ctype.h>
#include <sys/stat.h>

#define OLLAMA_VERSION "0.13.0"         // of Ollama, whose API this is; clients look for features by it

// ==== [1] A request as a chat's ======================================================================================
// Messages and options have other names and places than in a chat's request. Calls and results often have no id: then
// they get one here, because a prompt needs the name of the function that a result belongs to.

typedef struct {              // the calls of the last message that had any
    GgufJson calls;           // the list
    int      message;         // its number
    uint64_t answered;        // bit k: call k has its result; more calls than that have no id
} Asked;

// Writes the id of call k as a JSON string: its own, or one made of two numbers. Returns it.
static GgufJson call_id(const GgufJson *call, int message, int k, char text[40]) {
    GgufJson id;
    if (member(call, "id", &id) && id.type == GGUF_J_STRING && id.n > 2) return id;
    const int n = snprintf(text, 40, "\"call_%d_%d\"", message, k);
    return (GgufJson){ GGUF_J_STRING, text, (size_t)n };
}

static bool same_json(const GgufJson *a, const GgufJson *b) { return a->n == b->n && !memcmp(a->s, b->s, a->n); }

// Finds the call with this id; without one, the first that has no result yet, of this name if it is given. False: there
// is none.
static bool find_asked(Asked *asked, const GgufJson *id, const GgufJson *name, GgufJson *found, char text[40]) {
    GgufJson rest = asked->calls, call, function, v;
    for (int k = 0; k < 64 && asked->calls.type == GGUF_J_ARRAY && gguf_json_next(&rest, NULL, &call); k++) {
        if (!member(&call, "function", &function) || !member(&function, "name", &v)) continue;
        *found = call_id(&call, asked->message, k, text);
        if (id ? !same_json(id, found) : asked->answered >> k & 1 || (name && !same_json(name, &v))) continue;
        asked->answered |= (uint64_t)1 << k;
        return true;
    }
    return false;
}

// Appends which call a result belongs to: by its id, by the name of its function, or by its place.
static void put_result_of(TokText *out, const GgufJson *m, Asked *asked) {
    GgufJson id, name = { .type = GGUF_J_NULL }, found;
    char text[40];
    const bool named = member(m, "tool_name", &name) || member(m, "name", &name);
    const bool by_id = member(m, "tool_call_id", &id) && find_asked(asked, &id, NULL, &found, text);
    if (named) put(out, ",'name':%r", raw(&name));
    if (by_id || find_asked(asked, NULL, named ? &name : NULL, &found, text))
        put(out, ",'tool_call_id':%r", raw(&found));
}

static bool put_asked(Exchange *x, TokText *out, const Asked *asked) {
    GgufJson rest = asked->calls, call, function, name = { .type = GGUF_J_NULL }, arguments;
    TokText list = { 0 };
    char text[40];
    bool ok = rest.type == GGUF_J_ARRAY ||
              refuse(&x->fault, 400, "messages", "messages[%d].tool_calls: expected a list", asked->message);
    for (int k = 0; ok && gguf_json_next(&rest, NULL, &call); k++) {
        const GgufJson id = call_id(&call, asked->message, k, text);
        ok = (member(&call, "function", &function) && member(&function, "name", &name)) ||
             refuse(&x->fault, 400, "messages", "messages[%d].tool_calls[%d]: expected a function with a name",
                    asked->message, k);
        if (ok && !member(&function, "arguments", &arguments)) arguments = (GgufJson){ GGUF_J_OBJECT, "{}", 2 };
        if (ok) put_past_call(&list, &id, &name, &arguments);
    }
    if (ok && list.n) put(out, ",'tool_calls':[%r]", text_of(&list));
    tok_text_free(&list);
    return ok;
}

// Appends a content, which follows the images of the object if it has some. where: what errors call the object.
static bool put_seen(Exchange *x, TokText *out, const GgufJson *object, const GgufJson *content, const char *where) {
    GgufJson images, v, rest = *content;
    TokText parts = { 0 };
    bool ok = true;
    if (!member(object, "images", &images) || (images.type == GGUF_J_ARRAY && images.n == 2))
        return put_content(x, out, content, "messages");
    if (images.type != GGUF_J_ARRAY) return refuse(&x->fault, 400, "images", "%simages: expected a list", where);
    if (!x->srv->sees && gguf_json_next(&images, NULL, &v))
        return refuse(&x->fault, 400, "images", "%simages: this model reads text only; start the server with --mmproj "
                      "FILE for images", where);
    for (int i = 0; ok && gguf_json_next(&images, NULL, &v); i++) {
        ok = v.type == GGUF_J_STRING ||
             refuse(&x->fault, 400, "images", "%simages[%d]: expected a string in base64", where, i);
        put(&parts, parts.n ? ",{'type':'image_url','image_url':%r}" : "{'type':'image_url','image_url':%r}", raw(&v));
    }
    if (rest.type == GGUF_J_STRING)
        put(&parts, parts.n ? ",{'type':'text','text':%r}" : "{'type':'text','text':%r}", raw(content));
    while (rest.type == GGUF_J_ARRAY && gguf_json_next(&rest, NULL, &v)) put(&parts, parts.n ? ",%r" : "%r", raw(&v));
    put(out, "[%r]", text_of(&parts));
    tok_text_free(&parts);
    return ok;
}

// Appends the messages. *continues: the last one is text of the assistant, which the answer continues.
static bool put_ollama_messages(Exchange *x, TokText *out, GgufJson rest, bool *continues) {
    Asked asked = { .calls.type = GGUF_J_NULL };
    GgufJson m, role, call, v;
    char where[40];
    for (int i = 0; gguf_json_next(&rest, NULL, &m); i++) {
        snprintf(where, sizeof where, "messages[%d].", i);
        if (!member(&m, "role", &role) || role.type != GGUF_J_STRING)
            return refuse(&x->fault, 400, "messages", "%srole: expected a string", where);
        const bool is_assistant = gguf_json_is(&role, "assistant");
        put(out, i ? ",{'role':%r,'content':" : "{'role':%r,'content':", raw(&role));
        if (!member(&m, "content", &v)) v = (GgufJson){ GGUF_J_STRING, "\"\"", 2 };
        if (!put_seen(x, out, &m, &v, where)) return false;
        *continues = is_assistant && v.n > 2;
        if (member(&m, "thinking", &v)) put(out, ",'reasoning_content':%r", raw(&v));
        if (is_assistant && member(&m, "tool_calls", &v)) {
            asked = (Asked){ .calls = v, .message = i };
            if (!put_asked(x, out, &asked)) return false;
            *continues = *continues && !gguf_json_next(&v, NULL, &call);
        }
        if (gguf_json_is(&role, "tool")) put_result_of(out, &m, &asked);
        put(out, "}");
    }
    return true;
}

static int shown_bytes(const GgufJson *s) { return s->type != GGUF_J_STRING ? 0 : s->n > 42 ? 40 : (int)s->n - 2; }

// Appends the sampling options; a warning names those that this server does not have.
static bool put_options(Exchange *x, TokText *out, const GgufJson *options) {
    static const char *const same[] = { "temperature", "top_k", "top_p", "min_p", "repeat_penalty", "presence_penalty",
                                        "frequency_penalty", "seed", "stop" };
    const int n_ctx = context_size(x->srv);
    GgufJson rest = *options, key, v;
    double n;
    while (gguf_json_next(&rest, &key, &v)) {
        bool known = !is_given(&v);
        for (size_t i = 0; !known && i < sizeof same / sizeof *same; i++)
            if ((known = gguf_json_is(&key, same[i]))) put(out, ",%s:%r", same[i], raw(&v));
        if (known) continue;
        const bool is_length = gguf_json_is(&key, "num_predict"), is_context = gguf_json_is(&key, "num_ctx");
        if ((is_length || is_context) && (v.type != GGUF_J_NUMBER || !gguf_json_float(&v, &n) || n != floor(n)))
            return refuse(&x->fault, 400, "options", "options.%s: expected an integer",
                          is_length ? "num_predict" : "num_ctx");
        if (is_length && n > 0) put(out, ",'n_predict':%r", raw(&v));
        else if (is_length) put(out, ",'n_predict':-1");             // as many as the context has room for
        else if (is_context && n > n_ctx) warn(x, "options.num_ctx: the context has %d tokens", n_ctx);
        else if (!is_context) warn(x, "options.%.*s: left out", shown_bytes(&key), key.s + 1);
    }
    return true;
}

// Warns of fields that Ollama does not have, for example of options that stand outside of `options`.
static void warn_of_fields(Exchange *x, const GgufJson *root) {
    static const char *const known[] = {
        "model", "messages", "tools", "prompt", "suffix", "images", "format", "options", "system", "template", "stream",
        "raw", "keep_alive", "context", "think", "truncate", "shift", "logprobs", "top_logprobs"
    };
    GgufJson rest = *root, key, v;
    while (gguf_json_next(&rest, &key, &v)) {
        bool is_known = !is_given(&v);
        for (size_t i = 0; i < sizeof known / sizeof *known; i++) is_known |= gguf_json_is(&key, known[i]);
        if (!is_known) warn(x, "%.*s: left out", shown_bytes(&key), key.s + 1);
    }
}

// Appends what is the same in both endpoints, and ends the object.
static bool put_ollama_rest(Exchange *x, TokText *out, const GgufJson *root) {
    GgufJson v;
    warn_of_fields(x, root);
    if (object_member(x, root, "options", &v) && !put_options(x, out, &v)) return false;
    if (x->fault.status) return false;
    if (member(root, "format", &v) && !gguf_json_is(&v, "")) {
        if (gguf_json_is(&v, "json")) put(out, ",'response_format':{'type':'json_object'}");
        else if (v.type == GGUF_J_OBJECT) put(out, ",'response_format':{'type':'json_schema','schema':%r}", raw(&v));
        else return refuse(&x->fault, 400, "format", "format: expected \"json\" or a JSON schema");
    }
    if (member(root, "think", &v)) {
        const bool effort = gguf_json_is(&v, "high") || gguf_json_is(&v, "medium") || gguf_json_is(&v, "low");
        if (!effort && v.type != GGUF_J_TRUE && v.type != GGUF_J_FALSE)
            return refuse(&x->fault, 400, "think", "think: expected \"high\", \"medium\", \"low\", true or false");
        put(out, ",'chat_template_kwargs':{'enable_thinking':%b}", v.type != GGUF_J_FALSE);
    }
    if (!member(root, "stream", &v)) put(out, ",'stream':true");
    take_member(out, root, "stream", "stream");
    take_member(out, root, "logprobs", "logprobs");
    take_member(out, root, "top_logprobs", "top_logprobs");
    put(out, "}");
    return true;
}

static bool ollama_chat_convert(Exchange *x, TokText *out) {
    GgufJson root, messages;
    bool continues = false;
    if (!parse_body(x, &root)) return false;
    if (!member(&root, "messages", &messages) || messages.type != GGUF_J_ARRAY)
        return refuse(&x->fault, 400, "messages", "messages: expected a list");
    put(out, "{'messages':[");
    if (!put_ollama_messages(x, out, messages, &continues)) return false;
    put(out, continues ? "],'continue_final_message':true" : "]");
    take_member(out, &root, "tools", "tools");
    return put_ollama_rest(x, out, &root);
}

static bool wants_raw(const GgufJson *root) {
    GgufJson v;
    return member(root, "raw", &v) && v.type == GGUF_J_TRUE;
}

// A prompt is the message of the user, or with `raw` the text that the model continues.
static bool ollama_generate_convert(Exchange *x, TokText *out) {
    GgufJson root, prompt, system, v;
    if (!parse_body(x, &root)) return false;
    if (!member(&root, "prompt", &prompt) || prompt.type != GGUF_J_STRING)
        return refuse(&x->fault, 400, "prompt", "prompt: expected a string");
    const bool is_raw = wants_raw(&root);
    const bool has_system = member(&root, "system", &system) && !gguf_json_is(&system, "");
    const bool has_context = member(&root, "context", &v) && v.n > 2;
    if (member(&root, "suffix", &v) && !gguf_json_is(&v, ""))
        return refuse(&x->fault, 400, "suffix", "suffix: %s does not support insert", x->srv->name);
    if (member(&root, "template", &v) && !gguf_json_is(&v, ""))
        return refuse(&x->fault, 400, "template", "template: the model's own is built in; try raw");
    if (is_raw && (has_system || has_context))
        return refuse(&x->fault, 400, "raw", "raw mode does not support template, system, or context");
    if (is_raw && member(&root, "images", &v) && v.n > 2)
        return refuse(&x->fault, 400, "images", "images: not with raw, whose prompt has no places for them");
    if (is_raw) {
        put(out, "{'prompt':%r", raw(&prompt));
    } else {
        put(out, "{'messages':[");
        if (has_system) put(out, "{'role':'system','content':%r},", raw(&system));
        put(out, "{'role':'user','content':");
        if (!put_seen(x, out, &root, &prompt, "")) return false;
        put(out, "}]");
        take_member(out, &root, "context", "tokens");
    }
    return put_ollama_rest(x, out, &root);
}

// Makes the prompt of a raw text, which may have the template's marks in it.
static bool ollama_raw_ask(Exchange *x, Request *r) {
    size_t n;
    char *text = copy_string(&r->prompt, &n);
    const size_t least = tok_least(&x->t, n);
    if (least > (size_t)prompt_room(x->srv)) {
        free(text);
        return refuse_long(x, least, true);
    }
    const bool begins = (n >= 5 && !strncmp(text, "<bos>", 5)) || x->t.bos < 0;
    const bool ok = (begins || tok_push_id(&x->t, &x->job->ids, x->t.bos) == 0) &&
                    tok_encode(&x->t, text, n, TOK_SPECIAL, &x->job->ids) == 0;
    free(text);
    return ok || refuse_text(x, "prompt", "prompt", x->t.err);
}

// Makes the prompt of a message. `tokens` are those of the conversation so far, which come before it.
static bool ollama_generate_ask(Exchange *x, Request *r) {
    Job *job = x->job;
    TokIds ids = { 0 };
    if (!chat_ask(x, r)) return false;
    if (!is_given(&r->tokens)) return true;
    const size_t skip = job->ids.n && job->ids.ids[0] == x->t.bos;
    const bool ok = read_ids(x, "context", &r->tokens, &ids);
    if (ok && ids.n) {
        if (job->checkpoint_at) job->checkpoint_at += (int)(ids.n - skip);
        push_ids(&x->t, &ids, job->ids.ids + skip, job->ids.n - skip);
        const TokIds asked = job->ids;
        job->ids = ids;
        ids = asked;
        job->by_ids = true;
    }
    tok_ids_free(&ids);
    return ok;
}

// ==== [2] The answer =================================================================================================

static void put_time(TokText *out, const char *name, struct timespec t) {
    char day[32], text[64];
    struct tm utc;
    strftime(day, sizeof day, "%Y-%m-%dT%H:%M:%S", gmtime_r(&t.tv_sec, &utc));
    snprintf(text, sizeof text, "%s.%06ldZ", day, t.tv_nsec / 1000);
    put(out, "%s:%s", name, text);
}

// The model's name, with the tag that Ollama's names have.
static const char *tagged_name(const Server *srv, char name[160]) {
    snprintf(name, 160, strchr(srv->name, ':') ? "%s" : "%s:latest", srv->name);
    return name;
}

static void ollama_head(TokText *out, const Exchange *x) {
    struct timespec now;
    char name[160];
    clock_gettime(CLOCK_REALTIME, &now);
    put(out, "{'model':%s,", tagged_name(x->srv, name));
    put_time(out, "created_at", now);
}

// Appends the probabilities of tokens that were not reported yet, if requested.
static void put_ollama_likely(TokText *out, Exchange *x) {
    if (x->job->n_top < 0 || x->choice->n_likely == x->job->n_likely) return;
    put(out, ",'logprobs':");
    put_likely(out, x, x->choice->n_likely);
    x->choice->n_likely = x->job->n_likely;
}

static size_t nanoseconds(double s) { return s > 1e-9 ? (size_t)(1e9 * s) : 1; }     // clients divide by them

// Ends the last object. load_duration is the time before a session was free.
static void put_done(TokText *out, const Exchange *x) {
    const Turn *t = &x->job->turn;
    const double total = seconds() - x->started, load = total - t->prompt_seconds - t->decode_seconds;
    put(out, ",'done':true,'done_reason':%s,'total_duration':%z,'load_duration':%z,'prompt_eval_count':%d,",
        !strcmp(finish_text(x->job), "length") ? "length" : "stop", nanoseconds(total), nanoseconds(load), t->n_prompt);
    put(out, "'prompt_eval_duration':%z,'eval_count':%d,'eval_duration':%z}", nanoseconds(t->prompt_seconds), t->made,
        nanoseconds(t->decode_seconds));
}

static void ollama_begin(Exchange *x) { (void)x; }

static void ollama_chat_line(Exchange *x, TokStr thought, TokStr content) {
    ollama_head(&x->out, x);
    put(&x->out, ",'message':{'role':'assistant','content':%t", content);
    if (thought.n) put(&x->out, ",'thinking':%t", thought);
    put(&x->out, "}");
    if (!thought.n) put_ollama_likely(&x->out, x);
}

static void ollama_chat_text(Exchange *x, TokStr thought, TokStr content) {
    if (thought.n) {
        ollama_chat_line(x, thought, str(""));
        put(&x->out, ",'done':false}\n");
    }
    if (thought.n && !content.n) return;
    ollama_chat_line(x, str(""), content);
    put(&x->out, ",'done':false}\n");
}

static void put_ollama_call(TokText *out, const Job *job, int i) {
    const Call *call = &job->calls[i];
    put(out, "{'id':%s,'function':{'index':%d,'name':%t,'arguments':%r}}", call->id, i, text_of(&call->name),
        text_of(&call->arguments));
}

static void ollama_chat_call(Exchange *x, int i) {
    ollama_head(&x->out, x);
    put(&x->out, ",'message':{'role':'assistant','content':'','tool_calls':[");
    put_ollama_call(&x->out, x->job, i);
    put(&x->out, "]},'done':false}\n");
}

static void ollama_chat_end(Exchange *x) {
    ollama_chat_line(x, str(""), str(""));
    put_done(&x->out, x);
    put(&x->out, "\n");
}

static void ollama_chat_whole(Exchange *x, TokText *out) {
    const Job *job = x->job;
    ollama_head(out, x);
    put(out, ",'message':{'role':'assistant','content':%t", text_of(&job->content));
    if (job->thought.n) put(out, ",'thinking':%t", text_of(&job->thought));
    for (int i = 0; i < job->n_calls; i++) {
        put(out, i ? "," : ",'tool_calls':[");
        put_ollama_call(out, job, i);
    }
    put(out, job->n_calls ? "]}" : "}");
    put_ollama_likely(out, x);
    put_done(out, x);
}

static void ollama_generate_line(Exchange *x, TokStr thought, TokStr content) {
    ollama_head(&x->out, x);
    put(&x->out, ",'response':%t", content);
    if (thought.n) put(&x->out, ",'thinking':%t", thought);
    if (!thought.n) put_ollama_likely(&x->out, x);
}

static void ollama_generate_text(Exchange *x, TokStr thought, TokStr content) {
    if (thought.n) {
        ollama_generate_line(x, thought, str(""));
        put(&x->out, ",'done':false}\n");
    }
    if (thought.n && !content.n) return;
    ollama_generate_line(x, str(""), content);
    put(&x->out, ",'done':false}\n");
}

// A call that no tools were offered for is text here.
static void put_call_text(TokText *out, const Job *job, int i) {
    put(out, "{'name':%t,'arguments':%r}", text_of(&job->calls[i].name), text_of(&job->calls[i].arguments));
}

static void ollama_generate_call(Exchange *x, int i) {
    TokText text = { 0 };
    put_call_text(&text, x->job, i);
    ollama_generate_text(x, str(""), text_of(&text));
    tok_text_free(&text);
}

// Adds the tokens without thoughts.
static void push_spoken(Tokenizer *t, TokIds *to, const TokIds *ids) {
    bool thinks = false;
    for (size_t i = 0; i < ids->n; i++) {
        thinks |= ids->ids[i] == t->channel_open;
        if (!thinks) push_ids(t, to, &ids->ids[i], 1);
        thinks &= ids->ids[i] != t->channel_close;
    }
}

// Appends the tokens of the conversation as a later prompt has them, for its `context`. A raw prompt has none, nor one
// with images, whose rows could not be found by its tokens.
static void put_context(TokText *out, Exchange *x) {
    static const char line[] = "\n";
    TokIds ids = { 0 };
    if (x->api->ask == ollama_raw_ask || x->job->lead->pictures.n) return;
    push_spoken(&x->t, &ids, &x->job->ids);
    push_spoken(&x->t, &ids, &x->job->said);
    if (ids.n && tok_is_stop(&x->t, ids.ids[ids.n - 1])) ids.n--;
    if (x->t.turn_close >= 0) push_ids(&x->t, &ids, &x->t.turn_close, 1);
    if (tok_encode(&x->t, line, 1, TOK_PLAIN, &ids) < 0) starved = true;
    put(out, ",'context':[");
    for (size_t i = 0; i < ids.n; i++) put(out, i ? ",%d" : "%d", (int)ids.ids[i]);
    put(out, "]");
    tok_ids_free(&ids);
}

static void ollama_generate_end(Exchange *x) {
    ollama_generate_line(x, str(""), str(""));
    put_context(&x->out, x);
    put_done(&x->out, x);
    put(&x->out, "\n");
}

static void ollama_generate_whole(Exchange *x, TokText *out) {
    const Job *job = x->job;
    TokText text = { 0 };
    append(&text, job->content.s, job->content.n);
    for (int i = 0; i < job->n_calls; i++) put_call_text(&text, job, i);
    ollama_head(out, x);
    put(out, ",'response':%t", text_of(&text));
    if (job->thought.n) put(out, ",'thinking':%t", text_of(&job->thought));
    tok_text_free(&text);
    put_ollama_likely(out, x);
    put_context(out, x);
    put_done(out, x);
}

static const Api ollama_chat_api = { "", ollama_chat_convert, chat_ask, ollama_begin, ollama_chat_text,
                                     ollama_chat_call, ollama_chat_end, ollama_chat_whole, NULL, NULL };
static const Api ollama_generate_api = { "", ollama_generate_convert, ollama_generate_ask, ollama_begin,
                                         ollama_generate_text, ollama_generate_call, ollama_generate_end,
                                         ollama_generate_whole, NULL, NULL };
static const Api ollama_raw_api = { "", ollama_generate_convert, ollama_raw_ask, ollama_begin, ollama_generate_text,
                                    ollama_generate_call, ollama_generate_end, ollama_generate_whole, NULL,
                                    NULL };

// A request without a prompt asks to load the model, or with keep_alive 0 to unload it. It is always loaded.
static void answer_load(Exchange *x, const GgufJson *root, const char *empty) {
    TokText out = { 0 };
    GgufJson v;
    const bool unload = member(root, "keep_alive", &v) && (gguf_json_is(&v, "0") || gguf_json_is(&v, "0s") ||
                                                           (v.type == GGUF_J_NUMBER && v.n == 1 && *v.s == '0'));
    ollama_head(&out, x);
    put(&out, ",%r,'done':true,'done_reason':%s}", str(empty), unload ? "unload" : "load");
    respond_json(x, &out);
}

static void route_ollama_chat(Exchange *x) {
    GgufJson root, v, first;
    if (!parse_body(x, &root)) return;
    const bool none = !member(&root, "messages", &v) || (v.type == GGUF_J_ARRAY && !gguf_json_next(&v, NULL, &first));
    if (none) answer_load(x, &root, "\"message\":{\"role\":\"assistant\",\"content\":\"\"}");
    else complete(x, &ollama_chat_api);
}

static void route_ollama_generate(Exchange *x) {
    GgufJson root, v;
    if (!parse_body(x, &root)) return;
    if (!member(&root, "prompt", &v) || gguf_json_is(&v, "")) answer_load(x, &root, "\"response\":\"\"");
    else complete(x, wants_raw(&root) ? &ollama_raw_api : &ollama_generate_api);
}

// ==== [3] The model; what is refused =================================================================================

static void put_details(TokText *out, const Server *srv) {
    const ModelSize size = model_size(srv->m);
    char count[32], type[32];
    const bool small = size.params < 1e9;
    snprintf(count, sizeof count, small ? "%.2fM" : "%.1fB", size.params / (small ? 1e6 : 1e9));
    snprintf(type, sizeof type, "%s", size.type);
    for (char *c = type; *c; c++) *c = (char)toupper((unsigned char)*c);
    put(out, "'details':{'parent_model':'','format':'gguf','family':'gemma4','families':['gemma4'],"
        "'parameter_size':%s,'quantization_level':%s}", count, type);
}

static void put_modified(TokText *out, const Server *srv) {
    struct stat st;
    struct timespec t = { .tv_sec = (time_t)srv->created };
    if (!stat(model_path(srv->m), &st)) t = st.st_mtim;
    put_time(out, "modified_at", t);
}

// Appends the model as an entry of a list, which the caller ends. The digest is one of name and sizes, since that of a
// whole file takes minutes.
static void put_entry(TokText *out, const Server *srv) {
    const ModelSize size = model_size(srv->m);
    char name[160], digest[65];
    struct { double bytes, params; uint64_t last; } of = { size.bytes, size.params,
                                                           hash_bytes(srv->name, strlen(srv->name)) };
    for (int i = 0; i < 4; i++) {
        of.last = hash_bytes(&of, sizeof of);
        snprintf(digest + 16 * i, 17, "%016" PRIx64, of.last);
    }
    tagged_name(srv, name);
    put(out, "{'name':%s,'model':%s,'size':%z,'digest':%s,", name, name, (size_t)size.bytes, digest);
    put_details(out, srv);
}

static void route_tags(Exchange *x) {
    TokText out = { 0 };
    put(&out, "{'models':[");
    put_entry(&out, x->srv);
    put(&out, ",");
    put_modified(&out, x->srv);
    put(&out, "}]}");
    respond_json(x, &out);
}

static void route_ps(Exchange *x) {
    TokText out = { 0 };
    put(&out, "{'models':[");
    put_entry(&out, x->srv);
    put(&out, ",'expires_at':'2262-01-01T00:00:00Z','size_vram':%z,'context_length':%d}]}",
        (size_t)model_size(x->srv->m).on_device, context_size(x->srv));
    respond_json(x, &out);
}

static void route_version(Exchange *x) {
    TokText out = { 0 };
    put(&out, "{'version':'" OLLAMA_VERSION "'}");
    respond_json(x, &out);
}

// The parameters of a Modelfile, each after `before`.
static void put_parameters(TokText *out, const Server *srv, const char *before) {
    const SampleParams *p = &srv->o.sampling;
    char text[400];
    const int n = snprintf(text, sizeof text, "%snum_ctx %d\n%stemperature %g\n%stop_k %d\n%stop_p %g\n%smin_p %g\n",
                           before, context_size(srv), before, (double)p->temperature, before, (int)p->top_k, before,
                           (double)p->top_p, before, (double)p->min_p);
    append(out, text, (size_t)n);
}

// The context length is that of this server, which bounds every prompt.
static void route_show(Exchange *x) {
    const Server *srv = x->srv;
    const ModelSize size = model_size(srv->m);
    GgufJson root, v;
    TokText out = { 0 }, parameters = { 0 }, file = { 0 };
    char name[160];
    if (!parse_body(x, &root)) return;
    if (!member(&root, "model", &v) && !member(&root, "name", &v)) {
        refuse(&x->fault, 400, "model", "model: expected a name");
        return;
    }
    if (!gguf_json_is(&v, srv->name) && !gguf_json_is(&v, tagged_name(srv, name))) {
        refuse(&x->fault, 404, "model", "model '%.*s' not found; this server has %s", shown_bytes(&v), v.s + 1,
               srv->name);
        return;
    }
    put_parameters(&parameters, srv, "");
    append(&file, "FROM ", 5);
    append(&file, srv->name, strlen(srv->name));
    append(&file, "\n", 1);
    put_parameters(&file, srv, "PARAMETER ");
    put(&out, "{'modelfile':%t,'parameters':%t,", text_of(&file), text_of(&parameters));
    put(&out, "'template':'{{- /* built in */ -}}{{ .System }}{{ .Tools }}{{ .Messages }}',");
    put_details(&out, srv);
    put(&out, ",'model_info':{'general.architecture':'gemma4','general.basename':%s,'general.parameter_count':%z,",
        srv->name, (size_t)size.params);
    put(&out, "'gemma4.context_length':%d,'gemma4.embedding_length':%d},", context_size(srv), model_shape(srv->m).dim);
    put(&out, "'capabilities':['completion'%r%r%r],", str(srv->t->call_open >= 0 ? ",\"tools\"" : ""),
        str(srv->t->channel_close >= 0 ? ",\"thinking\"" : ""), str(srv->sees ? ",\"vision\"" : ""));
    put_modified(&out, srv);
    put(&out, "}");
    tok_text_free(&parameters);
    tok_text_free(&file);
    respond_json(x, &out);
}

// Everything else below /api/.
static void route_ollama_absent(Exchange *x) {
    static const char *const others[] = { "pull", "push", "create", "copy", "delete" };
    if (!strcmp(x->rest, "embed") || !strcmp(x->rest, "embeddings")) {
        refuse(&x->fault, 400, "", "this model does not support embeddings");
        return;
    }
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (!strcmp(x->rest, others[i])) {
            refuse(&x->fault, 400, "", "%s is not supported: this server has one model, %s", others[i], x->srv->name);
            return;
        }
    refuse(&x->fault, 404, "", "/api/%.100s: unknown endpoint; docs/server.md lists them", x->rest);
}

#endif
#endif
