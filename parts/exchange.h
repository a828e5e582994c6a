/* exchange.h - a request and its answer: from a body to a queued job, and from what the engine adds to that job to one
 *              answer or a stream of events. The form of each API is a table of functions (Api).
 *
 * Uses engine.h, grammar.h, schema.h, request.h, schedule.h. Begin with complete().
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
    bool (*ask)(Exchange *x, const Request *r);        // makes the prompt. False: it is refused
    void (*begin)(Exchange *x);                        // a stream: its beginning
    void (*text)(Exchange *x, TokStr thought, TokStr content);
    void (*call)(Exchange *x, int i);
    void (*end)(Exchange *x);
    void (*whole)(Exchange *x, TokText *out);          // the whole answer
} Api;

typedef struct Endpoint {
    const char *method, *path;         // a path that ends in / matches all that begin with it, except /
    void (*answer)(Exchange *x);
    bool open;                // needs no key
} Endpoint;

struct Exchange {             // a request and its answer
    Server     *srv;
    struct MHD_Connection *connection;
    const char *method;
    const Endpoint *route;             // NULL: there is none
    char        rest[256];             // of the path, after a route that takes a name
    TokText     body;
    bool        too_large, answered;
    Fault       fault;
    int         status;
    double      started;               // seconds()
    size_t      created;               // time() then
    Tokenizer   t;                     // a copy for this thread: see tokenizer.h
    char        id[40];
    const Api  *api;
    Job        *job;
    bool        include_usage, progress, one_call;
    // a stream
    TokText     out;                   // bytes to send, from byte `at` on
    size_t      at, content, thought;  // content, thought: bytes of the answer that are in it
    int         n_calls, n_likely, run;
    size_t      chars;                 // of the text of tokens 0 .. n_likely - 1, if the form counts them
    bool        begun, ended;
    const char *block;                 // of a dialect: the kind of the open block; NULL: none
    int         n_blocks, n_events;
};

static const char *header(const Exchange *x, const char *name) {
    return MHD_lookup_connection_value(x->connection, MHD_HEADER_KIND, name);
}

static bool is_anthropic(const Exchange *x) { return header(x, "anthropic-version"); }

// Says which restrictions of a schema the answer may not satisfy.
static void add_warning_header(const Exchange *x, struct MHD_Response *r) {
    const Grammar *g = x->job ? x->job->options.grammar : NULL;
    if (g && *g->warnings) MHD_add_response_header(r, "X-Gemma4-Warning", g->warnings);
}

static void respond(Exchange *x, int status, const char *type, TokText *body) {
    struct MHD_Response *r = MHD_create_response_from_buffer(body->n, body->s, MHD_RESPMEM_MUST_FREE);
    if (!r) die("out of memory for a response");
    MHD_add_response_header(r, "Content-Type", type);
    MHD_add_response_header(r, "X-Content-Type-Options", "nosniff");
    add_warning_header(x, r);
    if (status == 401) MHD_add_response_header(r, "WWW-Authenticate", "Bearer");
    if (status == 429 || status == 503) MHD_add_response_header(r, "Retry-After", "1");
    if (status == 405 && x->route) MHD_add_response_header(r, "Allow", x->route->method);
    if (status == 413) MHD_add_response_header(r, "Connection", "close");
    x->answered = true;
    x->status = status;
    MHD_queue_response(x->connection, (unsigned)status, r);
    MHD_destroy_response(r);
    *body = (TokText){ 0 };
}

static void put_fault(TokText *out, const Exchange *x, const Fault *f) {
    static const struct { int status; const char *type; } types[] = {
        { 401, "authentication_error" }, { 403, "permission_error" }, { 404, "not_found_error" },
        { 413, "request_too_large" }, { 429, "rate_limit_error" }, { 500, "api_error" }, { 503, "overloaded_error" }
    };
    const char *type = "invalid_request_error";
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) if (types[i].status == f->status) type = types[i].type;
    if (is_anthropic(x) || (x->route && !strncmp(x->route->path, "/v1/messages", 12))) {
        put(out, "{'type':'error','error':{'type':%s,'message':%s}}", type, f->text);
        return;
    }
    put(out, "{'error':{'message':%s,'type':%s,'param':", f->text, type);
    if (*f->param) put(out, "%s,'code':", f->param);
    else put(out, "null,'code':");
    if (f->code) put(out, "%s}}", f->code);
    else put(out, "%d}}", f->status);
}

static void add_event_fault(Exchange *x) {
    put(&x->out, x->api->convert ? "event: error\ndata: " : "data: ");
    put_fault(&x->out, x, &x->job->fault);
    put(&x->out, "\n\n");
}

static void respond_fault(Exchange *x) {
    TokText out = { 0 };
    put_fault(&out, x, &x->fault);
    respond(x, x->fault.status, "application/json", &out);
}

static void respond_json(Exchange *x, TokText *out) { respond(x, 200, "application/json", out); }

static const char *finish_text(const Job *job) {
    const bool cut = job->end == END_LENGTH || job->end == END_CONTEXT;
    if (job->end == END_CALLS || (job->n_calls && !cut)) return "tool_calls";
    return job->end == END_TURN || job->end == END_STOP_STRING ? "stop" : "length";
}

static void put_usage(TokText *out, const Job *job) {
    const Turn *t = &job->turn;
    put(out, "'usage':{'prompt_tokens':%d,'completion_tokens':%d,'total_tokens':%d,"
        "'prompt_tokens_details':{'cached_tokens':%d},'completion_tokens_details':{'reasoning_tokens':%d}}",
        t->n_prompt, t->made, t->n_prompt + t->made, job->cached, job->thought_tokens);
}

static void put_timings(TokText *out, const Job *job) {
    const Turn *t = &job->turn;
    put(out, "'timings':{'cache_n':%d,'prompt_n':%d,'prompt_ms':%f,'prompt_per_second':%f,'predicted_n':%d,"
        "'predicted_ms':%f,'predicted_per_second':%f,'draft_n':%d,'draft_n_accepted':%d}", job->cached, t->n_run,
        1e3 * t->prompt_seconds, t->n_run / (t->prompt_seconds + 1e-9), t->made, 1e3 * t->decode_seconds,
        max_int(t->made - 1, 0) / (t->decode_seconds + 1e-9), t->drafts.drafted, t->drafts.accepted);
}

static void put_token(TokText *out, const Tokenizer *t, int32_t id, float logprob) {
    const TokStr piece = tok_piece(t, id, true);
    put(out, "'id':%d,'token':%t,'logprob':%f,'bytes':[", (int)id, piece, (double)logprob);
    for (size_t i = 0; i < piece.n; i++) put(out, i ? ",%d" : "%d", (int)(unsigned char)piece.s[i]);
    put(out, "]");
}

// Probabilities of tokens first .. n - 1 of the content.
static void put_likely(TokText *out, const Exchange *x, int first) {
    const Job *job = x->job;
    put(out, "{'content':[");
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
    put(out, "]}");
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
    list->text = alloc_or_die(MAX_STOPS, sizeof *list->text);
    if (!is_given(stop)) return true;
    for (bool is_list = stop->type == GGUF_J_ARRAY; !is_list || gguf_json_next(&rest, NULL, &v); ) {
        size_t n = 0;
        char *text = v.type == GGUF_J_STRING ? copy_string(&v, &n) : NULL;
        if (!n || strlen(text) != n || list->n == MAX_STOPS) {
            free(text);
            return refuse(&x->fault, 400, "stop", "stop: expected a string or at most %d strings, without NUL",
                          MAX_STOPS);
        }
        list->text[list->n++] = text;
        if (!is_list) break;
    }
    return true;
}

static bool read_bias(Exchange *x, const GgufJson *object, Job *job) {
    const int vocab = model_shape(x->srv->m).vocab;
    GgufJson rest = *object, key, v;
    if (!is_given(object)) return true;
    job->bias = alloc_or_die((size_t)vocab, sizeof *job->bias);
    while (gguf_json_next(&rest, &key, &v)) {
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
    if (!by_grammar && !schema.n && !required && !one_call) return true;
    if (r->ignore_eos)
        return refuse(&x->fault, 400, "ignore_eos", "ignore_eos cannot be used with structured output");
    Grammar *g = job->options.grammar = alloc_or_die(1, sizeof *g);
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
    const char *at = by_grammar ? "grammar" : !strncmp(g->err, "tools[", 6) ? "tools" : required ? "tool_choice" :
                     is_given(&r->json_schema) ? "json_schema" : "response_format";
    return ok || refuse(&x->fault, 400, at, "%s", g->err);
}

static double given_or(double given, double otherwise) { return isnan(given) ? otherwise : given; }

static bool read_options(Exchange *x, const Request *r, Job *job) {
    const ServeOptions *o = &x->srv->o;
    const double most = given_or(r->max_tokens, o->n_predict), seed = given_or(r->seed, -1);
    AnswerOptions *a = &job->options;
    *a = (AnswerOptions){ .n_predict = (int)most, .ignore_eos = r->ignore_eos, .keep_logits = job->n_top >= 0,
                          .drafting = o->drafting,
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

static Job *new_job(Exchange *x) {
    Job *job = alloc_or_die(1, sizeof *job);
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(x->connection, MHD_CONNECTION_INFO_CONNECTION_FD);
    job->n_owners = 1;
    job->n_top = -1;
    job->fd = info ? info->connect_fd : -1;
    job->client = address_hash(x->connection);
    pthread_cond_init(&job->news, NULL);
    return job;
}

// ==== [3] The answer, whole or as a stream ===========================================================================

// Waits for news of the job, or until it is time for a keep-alive. False: there are none. The caller holds the lock.
static bool wait_for_news(Exchange *x) {
    const Job *job = x->job;
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += KEEP_ALIVE_SECONDS;
    int late = 0;
    while (!late && !job->done && job->content.n == x->content && job->thought.n == x->thought &&
           job->n_calls == x->n_calls && !(x->progress && job->started && job->run != x->run))
        late = pthread_cond_timedwait(&x->job->news, &x->srv->lock, &until);
    return !late;
}

static void put_progress(Exchange *x) {
    const Job *job = x->job;
    x->run = job->run;
    put(&x->out, "data: {");
    put_head(&x->out, x, "prompt.progress");
    put(&x->out, ",'choices':[],'prompt_progress':{'total':%d,'cache':%d,'processed':%d,'time_ms':%f}}\n\n", job->total,
        job->cached, job->run, 1e3 * (seconds() - job->queued));
}

// Fills x->out with the next events of a stream; after its end with nothing.
static void next_events(Exchange *x) {
    Job *job = x->job;
    if (!x->begun) {
        x->begun = true;
        pthread_mutex_lock(&x->srv->lock);
        x->api->begin(x);
        pthread_mutex_unlock(&x->srv->lock);
        if (x->out.n) return;
    }
    pthread_mutex_lock(&x->srv->lock);
    if (!wait_for_news(x)) put(&x->out, ": keep-alive\n\n");
    if (x->progress && job->started && job->run != x->run) put_progress(x);
    const TokStr thought = text_from(&job->thought, x->thought), content = text_from(&job->content, x->content);
    if (thought.n || content.n) x->api->text(x, thought, content);
    x->thought = job->thought.n;
    x->content = job->content.n;
    while (x->n_calls < job->n_calls) x->api->call(x, x->n_calls++);
    x->ended = job->done;
    pthread_mutex_unlock(&x->srv->lock);
    if (!x->ended) return;
    if (job->fault.status) add_event_fault(x);
    else x->api->end(x);
}

// libmicrohttpd calls this for up to max bytes of a stream.
static ssize_t read_stream(void *cls, uint64_t pos, char *buf, size_t max) {
    Exchange *x = cls;
    (void)pos;
    while (x->at == x->out.n) {
        x->at = x->out.n = 0;
        if (x->ended) return MHD_CONTENT_READER_END_OF_STREAM;
        MHD_set_connection_option(x->connection, MHD_CONNECTION_OPTION_TIMEOUT, 0u);
        next_events(x);
        MHD_set_connection_option(x->connection, MHD_CONNECTION_OPTION_TIMEOUT, (unsigned)IDLE_SECONDS);
    }
    const size_t n = x->out.n - x->at < max ? x->out.n - x->at : max;
    memcpy(buf, x->out.s + x->at, n);
    x->at += n;
    return (ssize_t)n;
}

static void respond_stream(Exchange *x) {
    struct MHD_Response *r = MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 1 << 14, read_stream, x, NULL);
    if (!r) die("out of memory for a stream");
    MHD_add_response_header(r, "Content-Type", "text/event-stream; charset=utf-8");
    MHD_add_response_header(r, "Cache-Control", "no-store");
    MHD_add_response_header(r, "X-Accel-Buffering", "no");
    add_warning_header(x, r);
    x->answered = true;
    x->status = 200;
    MHD_queue_response(x->connection, 200, r);
    MHD_destroy_response(r);
}

// Reads the body into a request and the ids of its prompt. False: it is refused.
static bool read_question(Exchange *x, const Api *api, Request *r) {
    TokText body = { 0 };
    if (api->convert) {
        if (!api->convert(x, &body)) {
            tok_text_free(&body);
            return false;
        }
        tok_text_free(&x->body);
        x->body = body;
    }
    return read_request(r, &x->fault, text_of(&x->body), &x->srv->o) && api->ask(x, r);
}

// Queues the request for the engine, and waits for the end of its answer unless that is streamed.
static void complete(Exchange *x, const Api *api) {
    Server *srv = x->srv;
    Request r;
    const int n_ctx = context_size(srv);
    x->api = api;
    x->job = new_job(x);
    new_id(srv, api->prefix, x->id);
    if (!read_question(x, api, &r) || !read_options(x, &r, x->job)) return;
    if (x->job->ids.n > (size_t)n_ctx) {
        x->fault.code = "context_length_exceeded";
        refuse(&x->fault, 400, "messages", "the prompt has %zu tokens, but the context only %d", x->job->ids.n, n_ctx);
        return;
    }
    x->job->no_cache = r.no_cache;
    if (is_given(&r.user)) x->job->client = hash_bytes(r.user.s, r.user.n);
    x->include_usage = r.include_usage;
    x->one_call = r.one_call;
    x->progress = r.progress;
    if (!submit(srv, x->job, &x->fault)) return;
    if (r.stream) {
        respond_stream(x);
        return;
    }
    MHD_set_connection_option(x->connection, MHD_CONNECTION_OPTION_TIMEOUT, 0u);
    pthread_mutex_lock(&srv->lock);
    while (!x->job->done) pthread_cond_wait(&x->job->news, &srv->lock);
    pthread_mutex_unlock(&srv->lock);
    MHD_set_connection_option(x->connection, MHD_CONNECTION_OPTION_TIMEOUT, (unsigned)IDLE_SECONDS);
    x->fault = x->job->fault;
    if (x->fault.status) return;
    TokText out = { 0 };
    api->whole(x, &out);
    respond(x, 200, "application/json", &out);
}

#endif
#endif
