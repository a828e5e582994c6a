/* exchange.h - a request and its answer: from a body to a queued job, and from what the engine adds to that job to one
 *              answer or a stream of events. The form of each API is a table of functions (Api).
 *
 * Uses engine.h, grammar.h, schema.h, request.h, budget.h, schedule.h. Begin with complete().
 *   [1] A request and its answer    [2] From a request to a job    [3] The answer, whole or as a stream
 *
 * THREADS  Each connection has a thread of libmicrohttpd, which reads the request, tokenizes it, queues a job, and
 *          waits for what the engine adds to that job. */
#ifndef EXCHANGE_H
#define EXCHANGE_H

#ifdef USE_MICROHTTPD
#include <microhttpd.h>
#include <netinet/in.h>

// ==== [1] A request and its answer ===================================================================================

typedef struct Exchange Exchange;

typedef struct {              // the form of an endpoint
    const char *prefix;       // of ids
    bool (*convert)(Exchange *x, TokText *out);        // rewrites the body as a chat's; NULL: it is one
    bool (*ask)(Exchange *x, Request *r);              // makes the prompts. False: it is refused
    // a stream: the events of x->choice
    void (*begin)(Exchange *x);
    void (*text)(Exchange *x, TokStr thought, TokStr content);       // one of them; the other is empty
    void (*call)(Exchange *x, int i);
    void (*end)(Exchange *x);                          // x->ended: it is the last one
    void (*whole)(Exchange *x, TokText *out);          // the whole answer: all choices
    void (*fail)(Exchange *x);                         // a stream: an event for x->job->fault; NULL: OpenAI's older one
    const char *idle;                                  // a stream, after 10 seconds without events; NULL: a comment
} Api;

typedef struct Endpoint {
    const char *method, *path;         // method NULL: any; a path that ends in / matches all that begin with it, but /
    void (*answer)(Exchange *x);
    bool open;                // needs no key
} Endpoint;

enum { MAX_CHOICES = 128 };   // answers to one request

typedef struct {              // one of the answers to a request, and what the stream has of it
    Job    *job;
    int     index;            // its number in the answer
    int     piece;            // pieces before this one are in the stream,
    size_t  sent;             // and this one up to this byte of the thought or the content
    int     run, n_likely;
    size_t  chars;            // of the text of tokens 0 .. n_likely - 1, if the form counts them
    size_t  n_echo;           // characters of the prompt that come before the answer
    bool    echoed;           // they are in the stream
    bool    complete, ended;  // all pieces are in the stream; its end too
} Choice;

struct Exchange {             // a request and its answer
    Server     *srv;
    struct MHD_Connection *connection;
    const char *method;
    const Endpoint *route;             // NULL: there is none
    char        rest[256];             // of the path, after a route that takes a name
    TokText     body;
    TokText     messages, tools;       // JSON, in the form of the template: see history.h
    TokText     renamed;               // an object: tools that the client calls by another name than the model
    TokText     kept;                  // a list without brackets: items of this conversation to remember
    char        previous[64];          // the response that this one continues, or empty
    bool        keeps;                 // the response is kept for later requests
    char        host[264];             // of a URL that is complete
    size_t      held, work;            // bytes of Server.budget: for what it holds, for what it does now
    bool        large;                 // it does the work of a large request
    bool        too_large, answered;
    bool        early;                 // it is refused before its body has come
    bool        lost;                  // there was no memory for a response: the connection is closed
    bool        counts;                // only the tokens of the prompt are asked for,
    size_t      more;                  // of which pictures have so many that are not placed
    bool        malformed;             // the head is; what follows it is not read
    Fault       fault;
    char        warnings[2048];        // for the client and the log: see warn()
    int         status;
    double      started;               // seconds()
    size_t      created;               // time() then
    Tokenizer   t;                     // a copy for this thread: see tokenizer.h
    char        id[40], request_id[40];
    const char *origin;                // Access-Control-Allow-Origin of the answer; NULL: none
    const Api  *api;
    Choice     *choices;               // (n_choices) choice i is answer i / n_prompts to prompt i % n_prompts. Of each
    int         n_choices, n_prompts, n_shown;         // prompt the first n_shown are in the answer
    Choice     *choice;                // the one at hand
    Job        *job;                   // its job
    TokText     original;              // the body before Api.convert
    GgufJson    asked;                 // the same, parsed
    bool        include_usage, progress, timed;        // timed: each event of a stream has the timings so far
    bool        one_call, forced, echo;                // forced: the answer has to be a call; echo: the prompt comes
                                                       // before it
    // a stream
    TokText     out;                   // bytes to send, from byte `at` on
    size_t      at;
    bool        begun, ended;
    const char *block;                 // of a dialect: the kind of the open block; NULL: none
    int         n_blocks, n_events, n_ended;           // n_ended: choices
};

// ---- the memory of a request ----
// Work on a body of n bytes takes at most WORK * n, and WORK_MORE: it becomes tokens (4 bytes each, and 24 for each
// character of a long word while it is merged), or a list of messages (300 bytes for one of 16), or a text in which
// each part of 3 bytes has become 40; all of them in buffers that are half as large again, and move when they grow.
// What the answer to a job has takes at most ANSWER_WORK times its bytes as JSON: a token and its probability, 8 bytes,
// are a name, a number and a list of bytes there; a character may become 6.
enum { WORK = 40, WORK_MORE = 1 << 16, ANSWER_WORK = 16, LARGE_WORK = 4 << 20, WORK_SECONDS = 30 };

static void end_work(Exchange *x) {
    if (x->work) budget_rest(&x->srv->budget, x->work, x->large);
    x->work = 0;
}

// Waits until there is memory for n bytes of work, and a thread for it. False: there is none, and it is refused.
static bool begin_work(Exchange *x, size_t n) {
    end_work(x);
    x->large = n > LARGE_WORK;
    if (!budget_work(&x->srv->budget, n, x->large, WORK_SECONDS)) return refuse_starved(&x->fault);
    x->work = n;
    return true;
}

// Counts n more bytes of the work that has begun. False: there is no room, and it is refused.
static bool more_work(Exchange *x, size_t n) {
    return budget_set(&x->srv->budget, FOR_WORK, &x->work, x->work + n) || refuse_starved(&x->fault);
}

// Counts what an exchange holds: its texts, and `more` bytes. False: there is no room, and it is refused.
static bool count_texts(Exchange *x, size_t more) {
    const TokText *const texts[] = { &x->original, &x->body, &x->messages, &x->tools, &x->renamed, &x->kept, &x->out };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) more += texts[i]->cap;
    return budget_set(&x->srv->budget, FOR_BODIES, &x->held, more) || refuse_starved(&x->fault);
}

static void exchange_free(Exchange *x) {               // all but the jobs
    TokText *const texts[] = { &x->original, &x->body, &x->messages, &x->tools, &x->renamed, &x->kept, &x->out };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) tok_text_free(texts[i]);
    end_work(x);
    budget_set(&x->srv->budget, FOR_BODIES, &x->held, 0);
    free(x->choices);
    free(x);
}

static const char *header(const Exchange *x, const char *name) {
    return MHD_lookup_connection_value(x->connection, MHD_HEADER_KIND, name);
}

// Adds a warning: the client gets it in the header x-gemma4-warning, the log in the line of the request. Each text is
// added once. Bytes that a header may not have become '?'; if there are too many, the last one is "..".
__attribute__((format(printf, 2, 3)))
static void warn(Exchange *x, const char *fmt, ...) {
    char text[1024];
    const size_t n = strlen(x->warnings);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    for (char *c = text; *c; c++) if (*c < ' ' || *c > '~') *c = '?';
    if (strstr(x->warnings, text) || (n >= 2 && !strcmp(x->warnings + n - 2, ".."))) return;
    if (n + strlen(text) + sizeof "; ; .." > sizeof x->warnings) snprintf(text, sizeof text, "..");
    snprintf(x->warnings + n, sizeof x->warnings - n, n ? "; %s" : "%s", text);
}

static bool is_anthropic(const Exchange *x) { return header(x, "anthropic-version"); }

// Ollama's streams are lines of JSON, all others server-sent events.
static bool is_ollama(const Exchange *x) { return x->route && !strncmp(x->route->path, "/api/", 5); }

// Sends a response and frees it. A web page of x->origin may read all of its headers.
static void send_response(Exchange *x, int status, struct MHD_Response *r) {
    x->answered = true;
    x->status = status;
    x->lost = !r;
    if (!r) return;
    MHD_add_response_header(r, "Vary", "Origin");
    MHD_add_response_header(r, "request-id", x->request_id);         // by the names of both APIs
    MHD_add_response_header(r, "x-request-id", x->request_id);
    if (x->origin) MHD_add_response_header(r, "Access-Control-Allow-Origin", x->origin);
    if (x->origin) MHD_add_response_header(r, "Access-Control-Expose-Headers", "*");
    if (*x->warnings) MHD_add_response_header(r, "x-gemma4-warning", x->warnings);
    MHD_queue_response(x->connection, (unsigned)status, r);
    MHD_destroy_response(r);
}

static void respond_fault(Exchange *x);

static void respond(Exchange *x, int status, const char *type, TokText *body) {
    if (starved && !x->fault.status) {                 // the body lacks something
        tok_text_free(body);
        refuse_starved(&x->fault);
        respond_fault(x);
        return;
    }
    struct MHD_Response *r = MHD_create_response_from_buffer(body->n, body->s, MHD_RESPMEM_MUST_FREE);
    if (!r) {
        tok_text_free(body);
        send_response(x, 503, NULL);
        return;
    }
    MHD_add_response_header(r, "Content-Type", type);
    MHD_add_response_header(r, "X-Content-Type-Options", "nosniff");
    if (status == 401) MHD_add_response_header(r, "WWW-Authenticate", "Bearer");
    if (status == 429 || status == 503) MHD_add_response_header(r, "Retry-After", "1");
    if ((status == 405 || status == 204) && x->route)
        MHD_add_response_header(r, "Allow", strcmp(x->route->method, "GET") ? "POST, OPTIONS" : "GET, HEAD, OPTIONS");
    if (status == 413 || x->malformed) MHD_add_response_header(r, "Connection", "close");
    send_response(x, status, r);
    *body = (TokText){ 0 };
}

static void put_or_null(TokText *out, const char *text) {
    if (text) put(out, "%s", text);
    else put(out, "null");
}

// True if errors have Anthropic's form.
static bool has_anthropic_errors(const Exchange *x) {
    return is_anthropic(x) || (x->route && !strncmp(x->route->path, "/v1/messages", 12));
}

// An error as the APIs write it. OpenAI's `code` is a word or null; some clients decide by it, or by the text.
static void put_fault(TokText *out, const Exchange *x, const Fault *f) {
    static const struct { int status; const char *anthropic, *openai, *code; } types[] = {
        { 401, "authentication_error", "invalid_request_error", "invalid_api_key" },
        { 403, "permission_error", "invalid_request_error", NULL },
        { 404, "not_found_error", "invalid_request_error", NULL },
        { 413, "request_too_large", "invalid_request_error", NULL },
        { 429, "rate_limit_error", "requests", "rate_limit_exceeded" },
        { 500, "api_error", "server_error", NULL }, { 503, "overloaded_error", "server_error", NULL }
    };
    const char *anthropic = "invalid_request_error", *openai = anthropic, *code = f->code;
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        if (types[i].status != f->status) continue;
        anthropic = types[i].anthropic, openai = types[i].openai;
        if (!code) code = types[i].code;
    }
    if (is_ollama(x)) {
        put(out, "{'error':%s}", f->text);
        return;
    }
    if (has_anthropic_errors(x)) {
        put(out, "{'type':'error','error':{'type':%s,'message':%s", anthropic, f->text);
        if (f->code && !strcmp(f->code, "thread_unsupported_request"))           // its clients read this
            put(out, ",'details':{'error_code':%s,'unsupported':[%s]}", f->code, f->param);
        put(out, "},'request_id':%s}", x->request_id);
        return;
    }
    if (f->n_prompt && x->api && !strcmp(x->route->path, "/completion")) openai = "exceed_context_size_error";
    put(out, "{'error':{'message':%s,'type':%s,'param':", f->text, openai);
    put_or_null(out, *f->param ? f->param : NULL);
    put(out, ",'code':");
    put_or_null(out, code);
    if (f->n_prompt) put(out, ",'n_prompt_tokens':%z,'n_ctx':%d", f->n_prompt, context_size(x->srv));    // llama.cpp's
    put(out, "}}");
}

// Refuses a prompt of n tokens, or at least n, that the context has no room for, in the words by which clients know
// this error. Returns false.
static bool refuse_long(Exchange *x, size_t n, bool at_least) {
    const bool plain = !x->api->convert && !strstr(x->route->path, "/chat/");
    const char *least = at_least ? "at least " : "";
    const char *what = plain ? "prompt" : "messages", *param = x->api->convert ? "input" : what;
    const int n_ctx = prompt_room(x->srv);
    x->fault.code = "context_length_exceeded";
    x->fault.n_prompt = n;
    if (has_anthropic_errors(x))
        return refuse(&x->fault, 400, "", "prompt is too long: %zu tokens > %d maximum%s", n, n_ctx,
                      at_least ? "; the rest of it was not counted" : "");
    return refuse(&x->fault, 400, param, "This model's maximum context length is %d tokens. However, your %s resulted "
                  "in %s%zu tokens. Please reduce the length of the %s.", n_ctx, what, least, n, what);
}

static void add_event_fault(Exchange *x) {
    if (x->api->fail) {
        x->api->fail(x);
        return;
    }
    if (!is_ollama(x)) put(&x->out, "data: ");
    put_fault(&x->out, x, &x->job->fault);
    put(&x->out, is_ollama(x) ? "\n" : "\n\n");
}

static void respond_fault(Exchange *x) {
    TokText out = { 0 };
    put_fault(&out, x, &x->fault);
    respond(x, x->fault.status, "application/json", &out);
}

static void respond_json(Exchange *x, TokText *out) { respond(x, 200, "application/json", out); }

static bool is_cut(const Job *job) {
    return job->end == END_LENGTH || job->end == END_CONTEXT || job->end == END_CANCELLED;
}

static const char *finish_text(const Job *job) {
    return is_cut(job) ? "length" : job->end == END_CALLS || job->n_calls ? "tool_calls" : "stop";
}

// Appends a finish_reason, and next to it what it does not say: the stop string, as in vLLM, or which limit ended it.
static void put_finish(TokText *out, const Job *job) {
    const char *why = job->end == END_LENGTH ? "max_tokens" : job->end == END_CONTEXT ? "context" :
                      job->end == END_CANCELLED ? "time" : job->stop;
    put(out, "'finish_reason':%s", finish_text(job));
    if (why) put(out, ",'stop_reason':%s", why);
}

typedef struct {              // tokens and times of some answers
    int    prompt, cached, run, made, thought, drafted, accepted;      // cached, run: tokens of the prompt
    int    original, steps;   // tokens of prompts before they were compressed, 0: none was
    double prompt_seconds, decode_seconds, score_seconds, joules;
} Usage;

static void add_usage(Usage *u, const Job *job) {
    const Turn *t = &job->turn;
    u->run += t->n_run;
    u->made += t->made;
    u->thought += job->thought_tokens;
    u->drafted += t->drafts.drafted;
    u->accepted += t->drafts.accepted;
    u->prompt_seconds += t->prompt_seconds;
    u->decode_seconds += t->decode_seconds;
    u->score_seconds += t->score_seconds;
    u->joules += t->joules;
    u->steps += t->steps;
}

// Of all answers. A prompt counts once, however many answers it has; what of it was cached for all of them.
static Usage usage_of(const Exchange *x) {
    Usage u = { 0 };
    for (int p = 0; p < x->n_prompts; p++) {
        int cached = INT_MAX;
        for (int i = p; i < x->n_choices; i += x->n_prompts) {
            add_usage(&u, x->choices[i].job);
            cached = min_int(cached, x->choices[i].job->cached);
        }
        u.prompt += x->choices[p].job->turn.n_prompt;
        u.original += x->choices[p].job->turn.n_original;
        u.cached += cached;
    }
    return u;
}

static void put_usage(TokText *out, const Exchange *x) {
    const Usage u = usage_of(x);
    put(out, "'usage':{'prompt_tokens':%d,'completion_tokens':%d,'total_tokens':%d,"
        "'prompt_tokens_details':{'cached_tokens':%d", u.prompt, u.made, u.prompt + u.made, u.cached);
    if (u.original) put(out, ",'original_tokens':%d", u.original);
    put(out, "},'completion_tokens_details':{'reasoning_tokens':%d}}", u.thought);
}

static void put_timings(TokText *out, const Exchange *x) {
    const Usage u = usage_of(x);
    put(out, "'timings':{'cache_n':%d,'prompt_n':%d,'prompt_ms':%f,'prompt_per_second':%f,'predicted_n':%d,"
        "'predicted_ms':%f,'predicted_per_second':%f,'draft_n':%d,'draft_n_accepted':%d,'tokens_per_step':%f", u.cached,
        u.run, 1e3 * u.prompt_seconds, u.run / (u.prompt_seconds + 1e-9), u.made, 1e3 * u.decode_seconds,
        max_int(u.made - x->n_choices, 0) / (u.decode_seconds + 1e-9), u.drafted, u.accepted,
        (double)max_int(u.made - x->n_choices, 0) / max_int(u.steps, 1));
    if (u.original) put(out, ",'prompt_original_n':%d,'prompt_score_ms':%f", u.original, 1e3 * u.score_seconds);
    if (u.joules > 0) put(out, ",'joules':%f,'joules_per_token':%f", u.joules, u.joules / max_int(u.made, 1));
    put(out, "}");
}

static void put_token(TokText *out, const Tokenizer *t, int32_t id, float logprob) {
    const TokStr piece = tok_piece(t, id, true);
    put(out, "'id':%d,'token':%t,'logprob':%f,'bytes':[", (int)id, piece, (double)logprob);
    for (size_t i = 0; i < piece.n; i++) put(out, i ? ",%d" : "%d", (int)(unsigned char)piece.s[i]);
    put(out, "]");
}

// Probabilities of tokens first .. n - 1 of the content, as a list.
static void put_likely(TokText *out, const Exchange *x, int first) {
    const Job *job = x->job;
    put(out, "[");
    for (int i = first; i < job->n_likely; i++) {
        const Likely *l = &job->likely[i];
        put(out, i > first ? ",{" : "{");
        put_token(out, &x->t, l->id, l->logprob);
        put(out, ",'top_logprobs':[");
        for (int k = 0; k < l->n_top; k++) {
            put(out, k ? ",{" : "{");
            put_token(out, &x->t, l->top[k], l->top_logprob[k]);
            put(out, "}");
        }
        put(out, "]}");
    }
    put(out, "]");
}

static void put_call(TokText *out, const Call *call) {
    put(out, "'id':%s,'type':'function','function':{'name':%t,'arguments':%t}", call->id, text_of(&call->name),
        text_of(&call->arguments));
}

static void put_head(TokText *out, const Exchange *x, const char *object) {
    put(out, "'id':%s,'object':%s,'created':%z,'model':%s", x->id, object, x->created, x->srv->name);
}

// ==== [2] From a request to a job ====================================================================================

static bool read_stops(Exchange *x, const GgufJson *stop, TextList *list) {
    GgufJson rest = *stop, v = *stop;
    const bool is_list = stop->type == GGUF_J_ARRAY;
    if (!is_given(stop)) return true;
    list->text = alloc_or_starve(MAX_STOPS, sizeof *list->text);
    while (list->text && (!is_list || gguf_json_next(&rest, NULL, &v))) {
        const int i = list->n;
        size_t n = 0;
        if (i == MAX_STOPS)
            return refuse(&x->fault, 400, "stop", "stop: expected at most %d strings, got more", MAX_STOPS);
        if (v.type != GGUF_J_STRING) return refuse(&x->fault, 400, "stop", "stop: expected a string or a list of them");
        char *text = v.n <= 6 * STOP_BYTES + 2 ? copy_string(&v, &n) : NULL;     // 6: a byte may be written \u00XX
        list->text[list->n] = text;
        list->n += text != NULL;
        if (!text || n > STOP_BYTES)
            return refuse(&x->fault, 400, "stop", "stop[%d]: expected at most %d bytes, got %zu", i, STOP_BYTES,
                          text ? n : v.n - 2);
        if (!n) return refuse(&x->fault, 400, "stop", "stop[%d]: expected a text, got an empty string", i);
        if (memchr(text, 0, n)) return refuse(&x->fault, 400, "stop", "stop[%d]: expected no NUL (\\u0000)", i);
        if (!is_list) break;
    }
    return true;
}

static bool read_bias(Exchange *x, const GgufJson *object, Job *job) {
    const int vocab = model_shape(x->srv->m).vocab;
    GgufJson rest = *object, key, v;
    if (!is_given(object)) return true;
    job->bias = alloc_or_starve((size_t)vocab, sizeof *job->bias);
    while (job->bias && gguf_json_next(&rest, &key, &v)) {
        char name[16] = "", *end = name;
        double value = 0;
        if (key.n < sizeof name) gguf_json_string(&key, name);
        const long id = *name >= '0' && *name <= '9' ? strtol(name, &end, 10) : -1;
        const bool is_number = v.type == GGUF_J_NUMBER && gguf_json_float(&v, &value);
        if (id < 0 || *end || id >= vocab || !is_number || fabs(value) > 100)
            return refuse(&x->fault, 400, "logit_bias",
                          "logit_bias: expected token ids from 0 to %d, with biases from -100 to 100", vocab - 1);
        job->bias[id] = value == -100 ? -INFINITY : (float)value;
    }
    return true;
}

// Refuses a request with the error of another part, after the place if that is given. Returns false.
static bool refuse_text(Exchange *x, const char *param, const char *place, const char *err) {
    if (strstr(err, "out of memory")) starved = true;
    return refuse(&x->fault, 400, param, place ? "%s: %s" : "%s%s", place ? place : "", err);
}

// The schema of a response_format, in any of its forms: those of OpenAI's two APIs, Anthropic's and llama.cpp's; empty:
// none. *strict: what cannot be enforced is an error.
static bool read_format(Exchange *x, const GgufJson *format, TokStr *schema, bool *strict) {
    static const char any_object[] = "{\"type\":\"object\",\"additionalProperties\":true}";
    GgufJson type, inner, v;
    if (!is_given(format) || (gguf_json_get(format, "type", &type) && gguf_json_is(&type, "text"))) return true;
    const bool object = gguf_json_get(format, "type", &type) && gguf_json_is(&type, "json_object");
    if (!object && !(gguf_json_get(format, "type", &type) && gguf_json_is(&type, "json_schema")))
        return refuse(&x->fault, 400, "response_format", "response_format.type: expected text, json_object or "
                                                         "json_schema");
    const bool deep = gguf_json_get(format, "json_schema", &inner) && inner.type == GGUF_J_OBJECT;
    const bool there = gguf_json_get(deep ? &inner : format, "schema", &v) && is_given(&v);
    if (!there && !object) return refuse(&x->fault, 400, "response_format", "response_format: expected a schema");
    *schema = there ? (TokStr){ v.s, v.n } : (TokStr){ any_object, sizeof any_object - 1 };
    *strict = gguf_json_get(deep ? &inner : format, "strict", &v) && v.type == GGUF_J_TRUE;
    return true;
}

// Reads tool_choice. *required: the answer has to be a tool call; name: only this tool may be called, "": any tool.
// OpenAI's newer form has the name one object higher.
static bool read_choice(Exchange *x, const GgufJson *choice, bool *required, char name[128]) {
    GgufJson type, inner, v;
    *name = 0;
    *required = gguf_json_is(choice, "required");
    if (!is_given(choice) || *required || gguf_json_is(choice, "auto") || gguf_json_is(choice, "none")) return true;
    const bool named = choice->type == GGUF_J_OBJECT && gguf_json_get(choice, "type", &type) &&
        gguf_json_is(&type, "function");
    const bool deep = named && gguf_json_get(choice, "function", &inner) && inner.type == GGUF_J_OBJECT;
    if (!named || !gguf_json_get(deep ? &inner : choice, "name", &v) || v.type != GGUF_J_STRING || v.n < 3 || v.n > 128)
        return refuse(&x->fault, 400, "tool_choice", "tool_choice: expected auto, none, required or the name of a "
                                                     "function");
    name[gguf_json_string(&v, name)] = 0;
    return *required = true;
}

// Sets the form of the answer: a grammar, a schema, calls of tools, any text and at most one call, or none.
static bool read_form(Exchange *x, const Request *r, Job *job) {
    static const char text_and_call[] = "root ::= .* (<|tool_call> (. | <|\"|>)* <tool_call|>)?";
    const TokStr tools = { r->tools.s, r->tools.n };
    TokStr schema = { NULL, 0 };
    GgufJson rest = r->tools, tool;
    char wanted[128];
    bool required, ok, strict = false;
    if (!read_format(x, &r->response_format, &schema, &strict) || !read_choice(x, &r->tool_choice, &required, wanted))
        return false;
    if (is_given(&r->json_schema) && schema.n)
        return refuse(&x->fault, 400, "json_schema", "json_schema cannot be used with response_format");
    if (is_given(&r->json_schema)) schema = (TokStr){ r->json_schema.s, r->json_schema.n };
    const bool by_grammar = is_given(&r->grammar) && !gguf_json_is(&r->grammar, "");
    const bool calls = is_given(&r->tools) && !gguf_json_is(&r->tool_choice, "none") &&
        gguf_json_next(&rest, NULL, &tool);
    const bool one_call = calls && r->one_call && !by_grammar && !schema.n && !required && x->t.call_open >= 0;
    if (by_grammar && (schema.n || required))
        return refuse(&x->fault, 400, "grammar", "grammar cannot be used with a schema or a forced tool call");
    if (r->continues && (by_grammar || schema.n))
        return refuse(&x->fault, 400,
                      by_grammar ? "grammar" : is_given(&r->json_schema) ? "json_schema" : "response_format",
                      "continue_final_message cannot be used with a grammar or a schema");
    if (required && !calls) return refuse(&x->fault, 400, "tool_choice", "tool_choice needs tools");
    x->forced = required;
    if (!by_grammar && !schema.n && !required && !one_call) return true;
    if (r->ignore_eos)
        return refuse(&x->fault, 400, "ignore_eos", "ignore_eos cannot be used with structured output");
    Grammar *g = job->options.grammar = alloc_or_starve(1, sizeof *g);
    if (!g) return false;
    if (by_grammar) {
        size_t n;
        char *text = copy_string(&r->grammar, &n);
        ok = grammar_from_gbnf(g, &x->srv->vocab, (TokStr){ text, n });
        free(text);
    } else if (one_call) {
        ok = grammar_from_gbnf(g, &x->srv->vocab, (TokStr){ text_and_call, sizeof text_and_call - 1 });
    } else {
        if (required) schema = (TokStr){ NULL, 0 };
        ok = !calls ? grammar_from_schema(g, &x->srv->vocab, schema, strict) :
             grammar_from_tools(g, &x->srv->vocab, tools, *wanted ? wanted : NULL, !r->one_call, schema, strict);
    }
    job->options.may_think = r->think && is_given(&r->messages);
    if (*g->warnings) warn(x, "%s", g->warnings);
    const char *at = by_grammar ? "grammar" : !strncmp(g->err, "tools[", 6) ? "tools" : required ? "tool_choice" :
                     is_given(&r->json_schema) ? "json_schema" : "response_format";
    return ok || refuse_text(x, at, NULL, g->err);
}

static void push_ids(Tokenizer *t, TokIds *to, const int32_t *ids, size_t n) {
    for (size_t i = 0; i < n && !starved; i++) if (tok_push_id(t, to, ids[i]) < 0) starved = true;
}

static double given_or(double given, double otherwise) { return isnan(given) ? otherwise : given; }

static bool read_options(Exchange *x, const Request *r, Job *job) {
    const ServeOptions *o = &x->srv->o;
    const double most = given_or(r->max_tokens, o->n_predict), seed = given_or(r->seed, -1);
    AnswerOptions *a = &job->options;
    *a = (AnswerOptions){ .n_predict = (int)most, .ignore_eos = r->ignore_eos,
                          .keep_logits = job->n_top >= 0 || job->ranked, .drafting = o->drafting,
                          .think_budget = x->t.channel_close < 0 ? -1 : (int)r->think_budget, .sampling = o->sampling };
    SampleParams *p = &a->sampling;
    p->temperature = (float)given_or(r->temperature, p->temperature);
    p->top_k = max_int((int)given_or(r->top_k, p->top_k), 0);
    p->top_p = (float)given_or(r->top_p, p->top_p);
    p->min_p = (float)given_or(r->min_p, p->min_p);
    p->repeat = (float)given_or(r->repeat, p->repeat);
    p->presence = (float)given_or(r->presence, p->presence);
    p->frequency = (float)given_or(r->frequency, p->frequency);
    if (seed != -1) p->seed = (uint64_t)(int64_t)seed;
    else if (!o->fixed_seed && getrandom(&p->seed, 4, 0) != 4) p->seed = (uint64_t)time(NULL);
    return read_stops(x, &r->stop, &a->stops) && read_bias(x, &r->logit_bias, job) && read_form(x, r, job);
}

// A hash of the address that a connection comes from; in IPv6 of its network.
static uint64_t address_hash(struct MHD_Connection *connection) {
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CLIENT_ADDRESS);
    const struct sockaddr *a = info ? info->client_addr : NULL;
    if (a && a->sa_family == AF_INET) return hash_bytes(&((const struct sockaddr_in *)(const void *)a)->sin_addr, 4);
    if (a && a->sa_family == AF_INET6) return hash_bytes(&((const struct sockaddr_in6 *)(const void *)a)->sin6_addr, 8);
    return 0;
}

// Adds a choice with a new job, and makes it the one at hand. NULL: there is no memory.
static Job *add_choice(Exchange *x) {
    Job *job = alloc_or_starve(1, sizeof *job), *lead = x->n_choices ? x->choices->job : NULL;
    Choice *list = job ? resize_list(x->choices, x->n_choices + 1, sizeof *list) : NULL;
    if (list) x->choices = list;
    if (!list) {
        free(job);
        return NULL;
    }
    *job = (Job){ .lead = lead ? lead : job, .n_owners = 1, .n_top = -1, .fd = -1, .budget = &x->srv->budget,
                  .rows = &x->srv->rows };
    pthread_cond_init(&job->news, NULL);
    if (lead) {
        lead->n_owners++;
        job->fd = lead->fd;
        job->client = lead->client;
    } else if (x->connection) {
        const union MHD_ConnectionInfo *info =
            MHD_get_connection_info(x->connection, MHD_CONNECTION_INFO_CONNECTION_FD);
        job->fd = info ? info->connect_fd : -1;
        job->client = address_hash(x->connection);
    }
    x->choice = &x->choices[x->n_choices++];
    *x->choice = (Choice){ .job = job };
    return x->job = job;
}

static void choose(Exchange *x, int i) {               // makes choice i the one at hand
    x->choice = &x->choices[i];
    x->job = x->choice->job;
}

// Gives a job the options of its lead, and a seed of its own: answer k to one prompt has the seed of the first plus k.
static bool copy_options(Exchange *x, const Request *r, Job *job, int k) {
    const Job *lead = job->lead;
    job->no_cache = lead->no_cache;
    job->client = lead->client;
    job->n_top = lead->n_top;
    job->ranked = lead->ranked;
    job->scores = lead->scores;
    job->bias = lead->bias;
    job->options = lead->options;
    job->options.grammar = NULL;
    job->options.sampling.seed += (uint64_t)k;
    return !lead->options.grammar || read_form(x, r, job);
}

// Reads the options of all answers, and makes the jobs of those after the first to each prompt: of `best_of` answers,
// the `n` most probable are in the answer.
static bool add_answers(Exchange *x, const Request *r) {
    const int n_prompts = x->n_choices, n_shown = (int)given_or(r->n, 1), n_each = (int)given_or(r->best_of, n_shown);
    Job *lead = x->choices->job;
    bool ok = n_each >= n_shown || refuse(&x->fault, 400, "best_of", "best_of: expected at least n, %d", n_shown);
    if (ok && n_each > MAX_CHOICES / n_prompts)
        ok = refuse(&x->fault, 400, n_prompts > 1 ? "prompt" : "n", "expected at most %d answers, got %d for each of "
                    "%d prompts", MAX_CHOICES, n_each, n_prompts);
    if (ok && r->stream && n_each > n_shown)
        ok = refuse(&x->fault, 400, "best_of", "best_of: expected n, %d, in a stream", n_shown);
    lead->ranked = n_each > n_shown;
    ok = ok && read_options(x, r, lead);
    for (int i = 0; ok && i < n_prompts * n_each; i++) {
        const Job *prompt = x->choices[i % n_prompts].job;
        Job *job = i < n_prompts ? x->choices[i].job : add_choice(x);
        if (!job) return false;
        x->choices[i].index = i % n_prompts * n_shown + i / n_prompts;
        if (i >= n_prompts) push_ids(&x->t, &job->ids, prompt->ids.ids, prompt->ids.n);
        job->checkpoint_at = prompt->checkpoint_at;
        job->by_ids = prompt->by_ids;
        ok = job == lead || copy_options(x, r, job, i / n_prompts);
        if (!job_count(job)) starved = true;
        ok = ok && !starved;
    }
    x->n_prompts = n_prompts;
    x->n_shown = n_shown;
    choose(x, 0);
    return ok;
}

// ==== [3] The answer, whole or as a stream ===========================================================================

// True if something of a choice is to be put into the stream.
static bool has_news(const Exchange *x, const Choice *c) {
    const Job *job = c->job;
    const AnswerPiece *p = c->piece < job->n_pieces ? &job->pieces[c->piece] : NULL;
    if (p && (p->kind == PIECE_CALL || c->sent < p->to || c->piece < job->n_pieces - 1)) return true;
    return (job->done && !c->ended) || (x->progress && job->started && job->run != c->run);
}

// Waits for news of an answer, or until it is time for a keep-alive. False: there are none. The caller holds the lock.
static bool wait_for_news(Exchange *x) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += KEEP_ALIVE_SECONDS;
    for (int late = 0; !late; ) {
        for (int i = 0; i < x->n_choices; i++) if (has_news(x, &x->choices[i])) return true;
        late = pthread_cond_timedwait(&x->choices->job->news, &x->srv->lock, &until);
    }
    return false;
}

static void put_progress(Exchange *x) {
    const Job *job = x->job;
    x->choice->run = job->run;
    put(&x->out, "data: {");
    put_head(&x->out, x, "prompt.progress");
    put(&x->out, ",'choices':[],'prompt_progress':{'total':%d,'cache':%d,'processed':%d,'time_ms':%f}}\n\n", job->total,
        job->cached, job->run, 1e3 * (seconds() - job->queued));
}

// The text of a piece, from this byte of the thought or the content on, or from its beginning if that is later.
static TokStr piece_text(const Job *job, const AnswerPiece *p, size_t from) {
    const TokText *text = p->kind == PIECE_THOUGHT ? &job->thought : &job->content;
    if (from < p->from) from = p->from;
    return (TokStr){ text->s + from, p->to - from };
}

// Appends the new pieces of the choice at hand to the stream. The caller holds the lock.
static void put_pieces(Exchange *x) {
    const Job *job = x->job;
    for (Choice *c = x->choice; c->piece < job->n_pieces; c->piece++, c->sent = 0) {
        const AnswerPiece *p = &job->pieces[c->piece];
        if (p->kind == PIECE_CALL) {
            x->api->call(x, (int)p->from);
            continue;
        }
        const TokStr none = { "", 0 }, text = piece_text(job, p, c->sent);
        if (text.n) x->api->text(x, p->kind == PIECE_THOUGHT ? text : none, p->kind == PIECE_TEXT ? text : none);
        c->sent = p->to;
        if (c->piece == job->n_pieces - 1) break;      // it may grow
    }
}

// Appends what is new of all choices. The caller holds the lock.
static void put_news(Exchange *x) {
    for (int i = 0; i < x->n_choices; i++) {
        choose(x, i);
        if (x->progress && x->job->started && x->job->run != x->choice->run) put_progress(x);
        put_pieces(x);
        x->choice->complete = x->job->done;
    }
}

// Appends the ends of choices that are complete. A fault of one ends the stream.
static void put_ends(Exchange *x) {
    for (int i = 0; i < x->n_choices && !x->ended; i++) {
        choose(x, i);
        if (!x->choice->complete || x->choice->ended) continue;
        x->choice->ended = true;
        x->ended = ++x->n_ended == x->n_choices || x->job->fault.status;
        if (x->job->fault.status) add_event_fault(x);
        else x->api->end(x);
    }
}

// Fills x->out with the next events of a stream; after its end with nothing.
static void next_events(Exchange *x) {
    pthread_mutex_lock(&x->srv->lock);
    for (int i = 0; i < x->n_choices && !x->begun; i++) {
        choose(x, i);
        x->api->begin(x);
    }
    x->begun = true;
    choose(x, 0);
    if (!x->out.n) {
        const bool idle = !wait_for_news(x);           // then a comment, or text that is empty
        if (idle && is_ollama(x)) x->api->text(x, str(""), str(""));
        else if (idle) put(&x->out, x->api->idle ? x->api->idle : ": keep-alive\n\n");
        put_news(x);
    }
    pthread_mutex_unlock(&x->srv->lock);
    put_ends(x);
    choose(x, 0);
    if (!count_texts(x, 0)) starved = true;
}

// libmicrohttpd calls this for up to max bytes of a stream.
static ssize_t read_stream(void *cls, uint64_t pos, char *buf, size_t max) {
    Exchange *x = cls;
    (void)pos;
    starved = false;
    while (x->at == x->out.n) {
        x->at = x->out.n = 0;
        if (x->ended) return MHD_CONTENT_READER_END_OF_STREAM;
        MHD_set_connection_option(x->connection, MHD_CONNECTION_OPTION_TIMEOUT, 0u);
        next_events(x);
        if (starved) return MHD_CONTENT_READER_END_WITH_ERROR;
        MHD_set_connection_option(x->connection, MHD_CONNECTION_OPTION_TIMEOUT, (unsigned)IDLE_SECONDS);
    }
    const size_t n = x->out.n - x->at < max ? x->out.n - x->at : max;
    memcpy(buf, x->out.s + x->at, n);
    x->at += n;
    return (ssize_t)n;
}

static void respond_stream(Exchange *x) {
    struct MHD_Response *r = MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 1 << 14, read_stream, x, NULL);
    if (!r) {
        send_response(x, 503, NULL);
        return;
    }
    MHD_add_response_header(r, "Content-Type", is_ollama(x) ? "application/x-ndjson"
                                                            : "text/event-stream; charset=utf-8");
    MHD_add_response_header(r, "Cache-Control", "no-store");
    MHD_add_response_header(r, "X-Accel-Buffering", "no");
    send_response(x, 200, r);
}

// Reads the body into a request and the ids of its prompts. False: it is refused.
static bool read_question(Exchange *x, const Api *api, Request *r) {
    TokText body = { 0 };
    x->api = api;
    if (api->convert) {
        const bool ok = api->convert(x, &body);
        x->original = x->body;
        x->body = body;
        if (!ok) return false;
    }
    return read_request(r, &x->fault, text_of(&x->body), &x->srv->o) && api->ask(x, r);
}

// Waits until all answers are complete, or one has failed, which is then the fault of the request.
static void wait_for_answers(Exchange *x) {
    MHD_set_connection_option(x->connection, MHD_CONNECTION_OPTION_TIMEOUT, 0u);
    pthread_mutex_lock(&x->srv->lock);
    for (int i = 0; i < x->n_choices && !x->fault.status; i++) {
        const Job *job = x->choices[i].job;
        while (!job->done) pthread_cond_wait(&x->choices->job->news, &x->srv->lock);
        x->fault = job->fault;
    }
    pthread_mutex_unlock(&x->srv->lock);
    MHD_set_connection_option(x->connection, MHD_CONNECTION_OPTION_TIMEOUT, (unsigned)IDLE_SECONDS);
}

static double mean_logprob(const Job *job) { return job->logprob_sum / max_int(job->n_summed, 1); }

// Puts the answers to each prompt into the order of their mean log probability, the most probable one first.
static void rank_answers(Exchange *x) {
    for (int i = 0; i < x->n_choices; i++)
        for (int k = i + x->n_prompts; k < x->n_choices; k += x->n_prompts) {
            Job *a = x->choices[i].job, *b = x->choices[k].job;
            if (mean_logprob(b) > mean_logprob(a)) x->choices[i].job = b, x->choices[k].job = a;
        }
}

// Decodes the picture of a file, unless the rows of it are known. Whole pixels take memory only here, and only that of
// one picture: the engine gets it in the size that the tower sees.
static bool decode_one(Exchange *x, PictureFile *f) {
    Budget *b = &x->srv->budget;
    char err[300];
    if (f->memory > b->limit[FOR_WORK])
        return refuse(&x->fault, 400, "messages", "an image takes up to %zu MiB when it is decoded, this server has "
                      "%zu for that; make it smaller", f->memory >> 20, b->limit[FOR_WORK] >> 20);
    if (!more_work(x, f->memory)) return false;
    const bool ok = decode_picture(f, err, sizeof err);
    budget_set(b, FOR_WORK, &x->work, x->work - f->memory);
    return ok || refuse_text(x, "messages", NULL, err);
}

// Prepares the pictures of a prompt. One that is there twice is decoded once.
static bool decode_pictures(Exchange *x) {
    PromptPictures *p = &x->choices->job->pictures;
    for (int k = 0; k < p->n; k++) {
        bool again = false;
        for (int i = 0; i < k; i++) again |= p->files[i].hash == p->files[k].hash;
        pthread_mutex_lock(&x->srv->lock);
        p->places[k].rows = row_cache_pin(&x->srv->rows, p->files[k].hash);
        pthread_mutex_unlock(&x->srv->lock);
        if (!again && !p->places[k].rows && !decode_one(x, &p->files[k])) return false;
    }
    return true;
}

// Makes the jobs of a request. False: it is refused.
static bool make_jobs(Exchange *x, const Api *api, Request *r) {
    Server *srv = x->srv;
    if (!add_choice(x)) return false;
    new_id(srv, api->prefix, x->id);
    if (!read_question(x, api, r) || starved) return false;
    for (int i = 0; i < x->n_choices; i++) {
        const size_t n = x->choices[i].job->ids.n;
        if (n > (size_t)prompt_room(srv)) return refuse_long(x, n, false);
    }
    Job *lead = x->choices->job;
    lead->no_cache = r->no_cache;
    if (is_given(&r->user)) lead->client = hash_bytes(r->user.s, r->user.n);
    if (!add_answers(x, r) || starved || !decode_pictures(x)) return false;
    x->include_usage = r->include_usage;
    x->one_call = r->one_call;
    x->progress = r->progress;
    x->timed = r->timed;
    for (int i = 1; i < x->n_choices; i++) x->choices[i - 1].job->next = x->choices[i].job;
    if (!srv->o.log_text) tok_text_free(&x->body);     // only x->original is still read
    tok_text_free(&x->messages);
    tok_text_free(&x->tools);
    return true;
}

// Queues the request for the engine, and waits for the end of its answers unless they are streamed.
static void complete(Exchange *x, const Api *api) {
    Request r;
    TokText out = { 0 };
    size_t n = WORK_MORE;
    const bool ok = make_jobs(x, api, &r);
    if (starved) refuse_starved(&x->fault);
    end_work(x);
    if (!ok || x->fault.status || !count_texts(x, 0) || !submit(x->srv, x->choices->job, &x->fault)) return;
    if (r.stream) {
        respond_stream(x);
        return;
    }
    wait_for_answers(x);
    if (x->fault.status) return;
    if (x->choices->job->ranked) rank_answers(x);
    choose(x, 0);
    const Usage u = usage_of(x);
    if (u.original)
        warn(x, "the prompt was compressed (lossy): the model was shown %d of %d tokens", u.prompt, u.original);
    for (int i = 0; i < x->n_choices; i++) {
        const Job *job = x->choices[i].job;
        n += ANSWER_WORK * (job->content.n + job->thought.n + (job->ids.n + job->said.n) * sizeof(int32_t) +
                            (size_t)job->n_likely * sizeof *job->likely);
    }
    if (!begin_work(x, n)) return;
    api->whole(x, &out);
    if (count_texts(x, out.cap)) respond(x, 200, "application/json", &out);
    tok_text_free(&out);
    end_work(x);
}

#endif
#endif
