/* server.h - the HTTP server: routes, checks of who calls, endpoints that run no job, and the verb `serve`.
 *
 * Requests come in as JSON (request.h), wait in a queue, are answered together by one engine thread (schedule.h), and
 * the answers go out as JSON or as a stream of events (exchange.h) in the form of the API that was called (openai.h,
 * anthropic.h, responses.h, ollama.h).
 *
 * Uses engine.h, grammar.h, budget.h and all of these; the callers store.h (idle conversations), chat.h [1] (lists of
 * messages) and answer.h (hashes). Begin with serve().
 *   [1] Other endpoints    [2] HTTP: checks, routes    [3] The verb
 *
 * TRUST    Every byte of a request is untrusted: it is checked before use, and an error in it is answered by a 4xx. */
#ifndef SERVER_H
#define SERVER_H

#ifndef USE_MICROHTTPD
static void need_http(void) {
    die("serve: this build has no HTTP support: install libmicrohttpd-dev (Debian, Ubuntu), libmicrohttpd-devel "
        "(Fedora) or libmicrohttpd (Arch, Homebrew) and pkg-config, then run make again");
}
static void check_origins(const ServeOptions *o) { (void)o; }
typedef struct Server Server;
static Server *server_open(const ServeOptions *o) { return (void)o, NULL; }
static void serve(Server *srv, Model *m, Tokenizer *t, const ServeOptions *o) { (void)srv, (void)m, (void)t, (void)o; }
#else
#include <arpa/inet.h>
#include <ctype.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif
#include <netdb.h>
#include <netinet/tcp.h>

enum { MAX_CONNECTIONS = 512, BODY_SECONDS = 120, DRAINED_BYTES = 64 << 20 };

#if MHD_VERSION >= 0x00097700                          // 1: as strict as RFC 9112
#define STRICT MHD_OPTION_CLIENT_DISCIPLINE_LVL, 1
#else                                                  // such an old version is not strict; check_head() is
#define STRICT MHD_OPTION_STRICT_FOR_CLIENT, 0
#endif

static void need_http(void) {}

// ==== [1] Other endpoints ============================================================================================

static void route_health(Exchange *x) {
    TokText out = { 0 };
    pthread_mutex_lock(&x->srv->lock);
    const bool draining = x->srv->draining;
    pthread_mutex_unlock(&x->srv->lock);
    const bool ready = atomic_load(&x->srv->ready);
    put(&out, "{'status':%s}", !ready ? "loading" : draining ? "draining" : "ok");
    respond(x, !ready || draining ? 503 : 200, "application/json", &out);
}

static void put_model(TokText *out, const Server *srv, bool anthropic) {
    if (anthropic) {
        char day[32];
        struct tm utc;
        const time_t created = (time_t)srv->created;
        strftime(day, sizeof day, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&created, &utc));
        put(out, "{'type':'model','id':%s,'display_name':%s,'created_at':%s,'max_input_tokens':%d,'max_tokens':%d}",
            srv->name, srv->name, day, context_size(srv), context_size(srv));
        return;
    }
    const ModelShape shape = model_shape(srv->m);
    const ModelSize size = model_size(srv->m);
    put(out, "{'id':%s,'object':'model','created':%z,'owned_by':'gemma4','max_model_len':%d,'meta':", srv->name,
        (size_t)srv->created, context_size(srv));
    put(out, "{'n_vocab':%d,'n_ctx':%d,'n_ctx_train':%d,'n_embd':%d,'n_params':%z,'size':%z},"
        "'modalities':{'vision':%b,'audio':false}}", shape.vocab, context_size(srv), shape.trained, shape.dim,
        (size_t)size.params, (size_t)size.bytes, srv->sees);
}

// The list of models, which has one entry. A request that names a version of Anthropic's API gets that form.
static void route_models(Exchange *x) {
    const Server *srv = x->srv;
    const bool anthropic = is_anthropic(x);
    TokText out = { 0 };
    put(&out, anthropic ? "{'data':[" : "{'object':'list','data':[");
    put_model(&out, srv, anthropic);
    if (anthropic) put(&out, "],'has_more':false,'first_id':%s,'last_id':%s}", srv->name, srv->name);
    else put(&out, "]}");
    respond_json(x, &out);
}

static void route_model(Exchange *x) {
    TokText out = { 0 };
    if (strcmp(x->rest, x->srv->name)) {
        x->fault.code = "model_not_found";
        refuse(&x->fault, 404, "model", "%.100s: unknown model; this server has %s", x->rest, x->srv->name);
        return;
    }
    put_model(&out, x->srv, is_anthropic(x));
    respond_json(x, &out);
}

// Sizes and defaults. Clients of llama.cpp look for the context and the sampling in default_generation_settings.
static void route_props(Exchange *x) {
    const Server *srv = x->srv;
    const SampleParams *p = &srv->o.sampling;
    const Tokenizer *t = srv->t;
    const TokStr none = { "", 0 };
    TokText out = { 0 }, params = { 0 };
    put(&params, "'n_predict':%d,'temperature':%f,'top_k':%d,'top_p':%f,'min_p':%f,'repeat_penalty':%f,"
        "'presence_penalty':%f,'frequency_penalty':%f,'thinking':%b", srv->o.n_predict, (double)p->temperature,
        (int)p->top_k, (double)p->top_p, (double)p->min_p, (double)p->repeat, (double)p->presence,
        (double)p->frequency, srv->o.think);
    put(&out, "{'model':%s,'model_alias':%s,'model_path':%s,'build_info':%s,'n_ctx':%d,'total_slots':%d,", srv->name,
        srv->name, model_path(srv->m), "gemma4 " VERSION, context_size(srv), n_slots(srv));
    put(&out, "'modalities':{'vision':%b,'audio':false},'bos_token':%t,'eos_token':%t,'template_variant':%s,"
        "'chat_template':%t,", srv->sees, t->bos < 0 ? none : tok_piece(t, t->bos, true), t->eos < 0 ? none :
        tok_piece(t, t->eos, true), t->large_variant ? "large" : "small", model_template(srv->m));
    put(&out, "'default_generation_settings':{'n_ctx':%d,%r,'params':{%r}}}", context_size(srv), text_of(&params),
        text_of(&params));
    tok_text_free(&params);
    respond_json(x, &out);
}

static void route_embeddings(Exchange *x) {
    refuse(&x->fault, 404, "", "%s: this server has no embeddings, because its model writes text", x->route->path);
}

static void route_slots(Exchange *x) {
    Server *srv = x->srv;
    TokText out = { 0 };
    pthread_mutex_lock(&srv->lock);
    for (int i = 0; i < n_slots(srv); i++) {
        const Job *job = srv->slots[i].job;
        put(&out, i ? ",{'id':%d,'n_ctx':%d,'is_processing':%b" : "[{'id':%d,'n_ctx':%d,'is_processing':%b", i,
            context_size(srv), job != NULL);
        if (job)
            put(&out, ",'prompt_tokens':%d,'prompt_processed':%d,'prompt_cached':%d", job->total, job->run,
                job->cached);
        put(&out, "}");
    }
    pthread_mutex_unlock(&srv->lock);
    put(&out, "]");
    respond_json(x, &out);
}

static void metric(TokText *out, const char *name, const char *type, const char *help, double value) {
    char line[300];
    const int n = snprintf(line, sizeof line, "# HELP gemma4_%s %s\n# TYPE gemma4_%s %s\ngemma4_%s %.17g\n", name, help,
                           name, type, name, value);
    append(out, line, (size_t)n);
}

static void route_metrics(Exchange *x) {
    Server *srv = x->srv;
    TokText out = { 0 };
    pthread_mutex_lock(&srv->lock);
    const Totals t = srv->totals;
    const int queued = srv->n_queued, running = srv->n_running, peers = srv->n_peers;
    pthread_mutex_unlock(&srv->lock);
    metric(&out, "requests_total", "counter", "Requests accepted into the queue.", (double)t.jobs);
    metric(&out, "requests_refused_total", "counter", "Requests refused because the queue was full.",
           (double)t.refused);
    metric(&out, "requests_cancelled_total", "counter", "Requests cancelled by the client.", (double)t.cancelled);
    metric(&out, "prompt_tokens_total", "counter", "Prompt tokens.", (double)t.prompt_tokens);
    metric(&out, "prompt_tokens_cached_total", "counter", "Prompt tokens found in the cache.", (double)t.cached_tokens);
    metric(&out, "prompt_seconds_total", "counter", "Seconds from the start of a request to its first token.",
           t.prompt_seconds);
    metric(&out, "tokens_generated_total", "counter", "Tokens generated.", (double)t.made);
    metric(&out, "generation_seconds_total", "counter", "Seconds from first to last token.", t.decode_seconds);
    metric(&out, "prompt_tokens_left_out_total", "counter", "Tokens that compressed prompts left out.",
           (double)t.left_out);
    metric(&out, "images_total", "counter", "Images that the tower has computed.", (double)t.pictures);
    metric(&out, "steps_total", "counter", "Decoding steps of answers; a step that several share counts for each.",
           (double)t.steps);
    metric(&out, "draft_tokens_total", "counter", "Tokens drafted.", (double)t.drafted);
    metric(&out, "draft_tokens_accepted_total", "counter", "Drafted tokens that were accepted.", (double)t.accepted);
    if (t.joules > 0) metric(&out, "joules_total", "counter", "Energy of the device while answers ran.", t.joules);
    metric(&out, "requests_running", "gauge", "Answers running.", running);
    metric(&out, "requests_waiting", "gauge", "Requests waiting in the queue.", queued);
    metric(&out, "slots", "gauge", "Sessions.", n_slots(srv));
    metric(&out, "connections", "gauge", "Open connections, including this one.", peers);
    pthread_mutex_lock(&srv->store.lock);
    const int parked = srv->store.n, resumed = srv->store.n_resumed;
    const double memory = (double)srv->store.used, files = (double)srv->store.file_used;
    pthread_mutex_unlock(&srv->store.lock);
    metric(&out, "request_memory_bytes", "gauge", "Host memory of requests and answers.",
           (double)budget_used(&srv->budget));
    metric(&out, "sessions_parked", "gauge", "Idle conversations.", parked);
    metric(&out, "sessions_memory_bytes", "gauge", "Host memory used by idle conversations.", memory);
    metric(&out, "sessions_disk_bytes", "gauge", "Bytes in files of idle conversations.", files);
    metric(&out, "sessions_resumed_total", "counter", "Idle conversations that were resumed.", resumed);
    const TokStr head = str("# HELP gemma4_http_responses_total Responses by status class; 4xx includes disconnected "
                            "clients.\n"
                            "# TYPE gemma4_http_responses_total counter\n");
    append(&out, head.s, head.n);
    for (int i = 2; i < 6; i++) {
        char line[100];
        const int n = snprintf(line, sizeof line, "gemma4_http_responses_total{class=\"%dxx\"} %" PRIu64 "\n", i,
                               t.http[i]);
        append(&out, line, (size_t)n);
    }
    respond(x, 200, "text/plain; version=0.0.4", &out);
}

enum { TOKENIZE_BYTES = 4 << 20 };   // of a text that becomes tokens, or that tokens become

static void route_tokenize(Exchange *x) {
    Request r;
    TokIds ids = { 0 };
    TokText out = { 0 };
    size_t n;
    if (!read_request(&r, &x->fault, text_of(&x->body), &x->srv->o)) return;
    if (!is_given(&r.content)) {
        refuse(&x->fault, 400, "content", "content: expected a string, got none");
        return;
    }
    if (r.content.n > TOKENIZE_BYTES) {
        refuse(&x->fault, 413, "content", "content: expected at most %d bytes, got %zu", TOKENIZE_BYTES, r.content.n);
        return;
    }
    char *text = copy_string(&r.content, &n);
    const bool ok = (!r.add_special || x->t.bos < 0 || tok_push_id(&x->t, &ids, x->t.bos) == 0) &&
                    tok_encode(&x->t, text, n, r.parse_special ? TOK_SPECIAL : TOK_PLAIN, &ids) == 0;
    free(text);
    put(&out, "{'tokens':[");
    for (size_t i = 0; i < ids.n; i++) {
        if (i) put(&out, ",");
        if (r.with_pieces) put(&out, "{'id':%d,'piece':%t}", (int)ids.ids[i], tok_piece(&x->t, ids.ids[i], true));
        else put(&out, "%d", (int)ids.ids[i]);
    }
    put(&out, "]}");
    tok_ids_free(&ids);
    if (ok) {
        respond_json(x, &out);
        return;
    }
    tok_text_free(&out);
    refuse_text(x, "content", "content", x->t.err);
}

static void route_detokenize(Exchange *x) {
    Request r;
    TokIds ids = { 0 };
    TokText text = { 0 }, out = { 0 };
    if (!read_request(&r, &x->fault, text_of(&x->body), &x->srv->o)) return;
    if (!is_given(&r.tokens)) {
        refuse(&x->fault, 400, "tokens", "tokens: expected a list of token ids, got none");
        return;
    }
    bool ok = read_ids(x, "tokens", &r.tokens, &ids);
    size_t n = 0;
    for (size_t i = 0; i < ids.n; i++) n += tok_piece(&x->t, ids.ids[i], true).n;
    if (ok && n > TOKENIZE_BYTES)
        ok = refuse(&x->fault, 413, "tokens", "tokens: expected a text of at most %d bytes, got %zu", TOKENIZE_BYTES,
                    n);
    if (ok) {
        append_ids(x, &text, &ids, true);
        put(&out, "{'content':%t}", text_of(&text));
        respond_json(x, &out);
    }
    tok_text_free(&text);
    tok_ids_free(&ids);
}

static void route_template(Exchange *x) {
    Request r;
    TokIds ids = { 0 };
    TokText text = { 0 }, out = { 0 };
    Begun begun = { 0 };
    if (!read_request(&r, &x->fault, text_of(&x->body), &x->srv->o) || !convert_tools(x, &r) || !read_messages(x, &r))
        return;
    TokPictures at = { 0 };
    PromptPictures pictures = { 0 };
    TokChat chat = { .messages = { r.messages.s, r.messages.n }, .think = r.think, .add_cue = r.continues ||
                     !r.no_cue, .pictures = &at };
    size_t n_more = 0;
    if (is_given(&r.tools)) chat.tools = (TokStr){ r.tools.s, r.tools.n };
    const bool ok = !r.continues || take_begun(&r, &x->fault, &begun, &chat);
    if (ok && tok_chat(&x->t, &chat, &ids, &text) == 0 &&
        read_pictures(x->srv->m, &x->t, &at, &pictures, &n_more, x->t.err, sizeof x->t.err)) {
        put(&out, "{'prompt':%t,'n_tokens':%z}", text_of(&text), ids.n + n_more);
        respond_json(x, &out);
    } else if (ok) {
        refuse_text(x, strncmp(x->t.err, "tools", 5) ? "messages" : "tools", NULL, x->t.err);
    }
    pictures_free(&pictures);
    tok_pictures_free(&at);
    begun_free(&begun);
    tok_text_free(&text);
    tok_ids_free(&ids);
}

// The chat page, web/index.html. It is self-contained, asks the user for the key, and may connect to this server only.
// Its script and its style have a nonce, so that no other would run; the nonce is a new one for each run of the server,
// and part of the tag by which a browser that has the page cached asks whether it has changed.
static const char chat_page[] =
#include "page.h"
;

static struct { TokText text; char nonce[33], tag[24]; } page;

static void make_page(void) {
    static const char *const parts[] = { "<style", "<script", "" };
    const char *at = chat_page;
    uint64_t random[2];
    if (getrandom(random, sizeof random, 0) != sizeof random) die("serve: the system has no random numbers");
    snprintf(page.nonce, sizeof page.nonce, "%016" PRIx64 "%016" PRIx64, random[0], random[1]);
    for (int i = 0; i < 3; i++) {
        const char *to = *parts[i] ? strstr(at, parts[i]) : NULL;
        const size_t n = to ? (size_t)(to - at) + strlen(parts[i]) : strlen(at);
        append(&page.text, at, n);
        if (to) put(&page.text, " nonce=%s", page.nonce);
        at += n;
    }
    snprintf(page.tag, sizeof page.tag, "\"%016" PRIx64 "\"", hash_bytes(page.text.s, page.text.n));
}

static void route_page(Exchange *x) {
    char policy[512];
    snprintf(policy, sizeof policy,
             "default-src 'none'; script-src 'nonce-%s'; style-src 'nonce-%s'; img-src data:; connect-src 'self'; "
             "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
             "trusted-types 'none'", page.nonce, page.nonce);
    const char *held = header(x, "If-None-Match");
    const bool same = held && strstr(held, page.tag);
    struct MHD_Response *r =
        MHD_create_response_from_buffer(same ? 0 : page.text.n, page.text.s, MHD_RESPMEM_PERSISTENT);
    if (!r) {
        send_response(x, 503, NULL);
        return;
    }
    MHD_add_response_header(r, "Content-Type", "text/html; charset=utf-8");
    MHD_add_response_header(r, "Content-Security-Policy", policy);
    MHD_add_response_header(r, "X-Content-Type-Options", "nosniff");
    MHD_add_response_header(r, "Referrer-Policy", "no-referrer");
    MHD_add_response_header(r, "Cache-Control", "no-cache");
    MHD_add_response_header(r, "ETag", page.tag);
    send_response(x, same ? 304 : 200, r);
}

// ==== [2] HTTP: checks, routes =======================================================================================

static void route_options(Exchange *x) {               // the header Allow says which methods the path has
    TokText none = { 0 };
    respond(x, 204, "text/plain", &none);
}

static const Endpoint routes[] = {                     // the last one that matches counts
    { NULL, "/api/", route_ollama_absent, false },
    { "POST", "/api/chat", route_ollama_chat, false }, { "POST", "/api/generate", route_ollama_generate, false },
    { "GET", "/api/tags", route_tags, false }, { "GET", "/api/ps", route_ps, false },
    { "GET", "/api/version", route_version, false }, { "POST", "/api/show", route_show, false },
    { "GET", "/", route_page, true }, { "GET", "/index.html", route_page, true },
    { "GET", "/health", route_health, true }, { "GET", "/v1/models", route_models, false },
    { "GET", "/v1/models/", route_model, false },
    { "GET", "/props", route_props, false }, { "GET", "/slots", route_slots, false },
    { "GET", "/metrics", route_metrics, false }, { "POST", "/tokenize", route_tokenize, false },
    { "POST", "/detokenize", route_detokenize, false }, { "POST", "/apply-template", route_template, false },
    { "POST", "/v1/chat/completions", route_chat, false }, { "POST", "/v1/completions", route_completions, false },
    { "POST", "/completion", route_native, false },
    { "POST", "/v1/messages", route_messages, false }, { "POST", "/v1/messages/count_tokens", route_count, false },
    { "POST", "/v1/responses", route_responses, false }, { "POST", "/v1/embeddings", route_embeddings, false },
};

// ---- the head of a request ----
// A head that two programs may read differently is refused, since a proxy may be one of them: a request could hide
// in the body of another (RFC 9112, 11.2). libmicrohttpd from 0.9.77 on refuses most of these at its strict level.
// Older versions cut the head into texts where it stands in the buffer, so the pointers to these say how each line
// ended.

typedef struct {
    int         hosts, origins, lengths, codings;      // how many of these headers there are
    const char *end;          // of the line before
    const char *fault;        // NULL: none
} HeadLines;

static bool is_word(const char *s) {                   // a token of RFC 9110: a method, the name of a header
    static const char letters[] = "!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
    return *s && !s[strspn(s, letters)];
}

static bool cuts_lines(void) {                         // a version of libmicrohttpd that is as described above
    int major, minor, patch;
    return sscanf(MHD_get_version(), "%d.%d.%d", &major, &minor, &patch) == 3 && !major && minor == 9 && patch < 77;
}

static enum MHD_Result check_header(void *cls, enum MHD_ValueKind kind, const char *name, size_t n_name,
                                    const char *value, size_t n) {
    HeadLines *h = cls;
    (void)kind;
    h->hosts += !strcasecmp(name, "Host");
    h->origins += !strcasecmp(name, "Origin");
    h->lengths += !strcasecmp(name, "Content-Length");
    h->codings += !strcasecmp(name, "Transfer-Encoding");
    if (!value) value = "", n = 0;
    if (!is_word(name) || strlen(name) != n_name) h->fault = "the name of a header: expected letters and digits";
    for (size_t i = 0; i < n; i++)
        if (((unsigned char)value[i] < ' ' && value[i] != '\t') || value[i] == 0x7f)
            h->fault = "a header: expected no control characters";
    if (!strcasecmp(name, "Transfer-Encoding") && strcasecmp(value, "chunked"))
        h->fault = "Transfer-Encoding: expected chunked";
    if (h->end && name != h->end + 2)
        h->fault = "the head: expected lines that end in CR LF, none of them continued, and no NUL";
    if (h->end) h->end = value + n;
    return MHD_YES;
}

// False: the request has a head that must not be trusted, nor what follows it.
static bool check_head(Exchange *x, const char *method, const char *version) {
    const union MHD_ConnectionInfo *size =
        MHD_get_connection_info(x->connection, MHD_CONNECTION_INFO_REQUEST_HEADER_SIZE);
    HeadLines h = { .end = cuts_lines() ? version + strlen(version) : NULL };
    MHD_get_connection_values_n(x->connection, MHD_HEADER_KIND, check_header, &h);
    const char *fault = h.fault;
    if (!is_word(method)) fault = "the method: expected a word";
    if (h.end && size && h.end + 4 != method + size->header_size)
        fault = "the head: expected lines that end in CR LF, none of them continued, and no NUL";
    if (h.hosts > 1 || (!h.hosts && strcmp(version, "HTTP/1.0"))) fault = "Host: expected one";
    if (h.origins > 1) fault = "Origin: expected one";
    if (h.lengths + h.codings > 1) fault = "expected one Content-Length, or one Transfer-Encoding";
    if (h.codings && !strcmp(version, "HTTP/1.0")) fault = "Transfer-Encoding: expected HTTP/1.1";
    return !fault || refuse(&x->fault, 400, "", "%s", fault);
}

// libmicrohttpd calls this for the parts of a URL. A NUL, %00, would cut it.
static size_t unescape(void *cls, struct MHD_Connection *connection, char *s) {
    const size_t n = MHD_http_unescape(s);
    (void)cls, (void)connection;
    for (size_t i = 0; i < n; i++) if (!s[i]) s[i] = '?';
    return n;
}

typedef struct { char scheme[32], host[256]; int port; } Origin;     // in lower case; port 0: the scheme's own

// Reads the origin that a URL begins with: scheme://host, perhaps with a port. Returns the rest; NULL: it has none.
static const char *read_origin(const char *url, Origin *o) {
    static const char letters[] = "_.-+0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
    const size_t n = strspn(url, letters);
    const char *host = url + n + 3;
    if (!n || n >= sizeof o->scheme || strncmp(url + n, "://", 3)) return NULL;
    const size_t n_host = *host == '[' ? strcspn(host, "]") + 1 : strspn(host, letters);
    if (!n_host || n_host >= sizeof o->host || strnlen(host, n_host) < n_host) return NULL;
    *o = (Origin){ .port = 0 };
    for (size_t i = 0; i < n; i++) o->scheme[i] = (char)tolower((unsigned char)url[i]);
    for (size_t i = 0; i < n_host; i++) o->host[i] = (char)tolower((unsigned char)host[i]);
    const char *rest = host + n_host;
    if (*rest == ':') {
        char *end;
        const long port = rest[1] >= '0' && rest[1] <= '9' ? strtol(rest + 1, &end, 10) : 0;
        if (port < 1 || port > 65535) return NULL;
        o->port = (port == 80 && !strcmp(o->scheme, "http")) || (port == 443 && !strcmp(o->scheme, "https")) ? 0
                : (int)port;
        rest = end;
    }
    return *rest && *rest != '/' ? NULL : rest;
}

static bool is_any(const char *origin) { return !strcmp(origin, "*"); }
static bool is_web(const Origin *o) { return !strcmp(o->scheme, "http") || !strcmp(o->scheme, "https"); }

// Dies if --allow-origin or --public-url is no address of its kind.
static void check_origins(const ServeOptions *o) {
    Origin origin;
    for (int i = 0; i < o->origins.n; i++) {
        const char *text = o->origins.text[i], *rest = read_origin(text, &origin);
        if (!is_any(text) && (!rest || (*rest && strcmp(rest, "/"))))
            die("--allow-origin: expected an origin, https://app.example or app://obsidian.md or *, got '%s'", text);
    }
    const char *rest = o->public_url ? read_origin(o->public_url, &origin) : "";
    if (!rest || strpbrk(rest, "?#") || (o->public_url && !is_web(&origin)))
        die("--public-url: expected a URL such as https://chat.example or https://example.org/gemma, got '%s'",
            o->public_url);
}

static bool is_origin(const Origin *a, const char *url) {
    Origin b;
    return url && read_origin(url, &b) && a->port == b.port && !strcmp(a->scheme, b.scheme) && !strcmp(a->host, b.host);
}

// True for names of this machine's loopback, the name given to listen at, and that of the public address, with or
// without a port.
static bool is_own_name(const char *host, const ServeOptions *o) {
    Origin public = { .host = "localhost" };
    if (o->public_url) read_origin(o->public_url, &public);
    const char *const names[] = { "localhost", "127.0.0.1", "[::1]", o->host, public.host };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const size_t n = strlen(names[i]);
        if (!strncasecmp(host, names[i], n) && (!host[n] || host[n] == ':')) return true;
    }
    return false;
}

// Admits the web page that sends the request, if there is one. It must be of this server, at the address that the
// request names or at the public one, or of an origin that the options allow; then it may read the answer.
static bool check_origin(Exchange *x, const char *host) {
    const ServeOptions *o = &x->srv->o;
    const char *text = header(x, "Origin");
    Origin origin;
    if (!text) return true;
    const char *rest = read_origin(text, &origin);
    const bool known = rest && !*rest;
    if (known && host && is_web(&origin)) {
        char own[400];
        snprintf(own, sizeof own, "%s://%.300s", origin.scheme, host);
        if (is_origin(&origin, own)) return true;
    }
    if (known && is_origin(&origin, o->public_url)) return true;
    for (int i = 0; i < o->origins.n && !x->origin; i++) {
        if (is_any(o->origins.text[i])) x->origin = "*";
        else if (known && is_origin(&origin, o->origins.text[i])) x->origin = text;
    }
    if (x->origin) return true;
    return refuse(&x->fault, 403, "", "Origin: web pages of %.100s may not use this server; to allow them, start it "
                  "with --allow-origin %.100s, or with --public-url if that is where a proxy offers it", text, text);
}

static bool is_preflight(const Exchange *x) {
    return !strcmp(x->method, "OPTIONS") && header(x, "Origin") && header(x, "Access-Control-Request-Method");
}

// Answers the question of a browser whether a page that was admitted may send a request, which comes later.
static void route_preflight(Exchange *x) {
    const char *headers = header(x, "Access-Control-Request-Headers");
    struct MHD_Response *r = MHD_create_response_from_buffer(0, (void *)"", MHD_RESPMEM_PERSISTENT);
    if (!r) {
        send_response(x, 503, NULL);
        return;
    }
    MHD_add_response_header(r, "Access-Control-Allow-Methods", "GET, HEAD, POST, DELETE");
    if (headers) MHD_add_response_header(r, "Access-Control-Allow-Headers", headers);
    if (header(x, "Access-Control-Request-Private-Network"))
        MHD_add_response_header(r, "Access-Control-Allow-Private-Network", "true");
    MHD_add_response_header(r, "Access-Control-Max-Age", "7200");
    send_response(x, 204, r);
}

static bool same_key(const char *a, const char *b) {   // its time does not depend on where they differ
    const size_t n = strlen(a), m = strlen(b);
    unsigned char differ = n != m;
    for (size_t i = 0; i < n; i++) differ |= (unsigned char)(a[i] ^ b[m ? i % m : 0]);
    return !differ;
}

// Says which host a request is for, or NULL: it does not say. A URL that is complete, http://HOST/PATH, says it instead
// of the header Host, and *url becomes its path. False: that is no host.
static bool read_host(Exchange *x, const char **url, const char **host) {
    Origin o;
    const char *path = read_origin(*url, &o), *given = header(x, "Host");
    *host = given;
    if (path && is_web(&o)) {
        const char *name = strstr(*url, "://") + 3;
        snprintf(x->host, sizeof x->host, "%.*s", (int)(path - name), name);
        *url = *path ? path : "/";
        *host = x->host;
    } else if (given) {
        char whole[400];
        const int n = snprintf(whole, sizeof whole, "http://%s", given);
        const char *rest = n < (int)sizeof whole ? read_origin(whole, &o) : NULL;
        if (!rest || *rest) return refuse(&x->fault, 400, "", "Host: expected a name, perhaps with a port");
    }
    return true;
}

// Admits a request. On a loopback address the Host header has to name it, which keeps out web pages whose name points
// to it (DNS rebinding); web pages have to be admitted; the key has to be right.
static bool check_caller(Exchange *x, const char *host) {
    const char *key = x->srv->o.api_key;
    if (x->srv->loopback && !(host && is_own_name(host, &x->srv->o)))
        return refuse(&x->fault, 403, "", "Host: expected localhost, a loopback address or the host of --public-url");
    if (!check_origin(x, host)) return false;
    if (!key || (x->route && x->route->open)) return true;
    const char *bearer = header(x, "Authorization"), *other = header(x, "x-api-key");
    if (bearer && !strncasecmp(bearer, "Bearer ", 7) && same_key(bearer + 7, key)) return true;
    if (other && same_key(other, key)) return true;
    return refuse(&x->fault, 401, "", "expected the API key: Authorization: Bearer KEY");
}

// The rest of a URL after a path, which may also be given without its /v1; NULL: it is another path.
static const char *after_path(const char *url, const char *path) {
    const size_t n = strlen(path);
    if (!strncmp(url, path, n)) return url + n;
    return !strncmp(path, "/v1/", 4) && !strncmp(url, path + 3, n - 3) ? url + n - 3 : NULL;
}

static void find_route(Exchange *x, const char *method, const char *url) {
    static const char *const known[] = { "GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS" };
    x->method = "other";
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) if (!strcmp(known[i], method)) x->method = known[i];
    for (size_t i = 0; i < sizeof routes / sizeof *routes; i++) {
        const char *path = routes[i].path, *rest = after_path(url, path);
        const size_t n = strlen(path);
        const bool takes_more = rest && *rest && n > 1 && path[n - 1] == '/';
        if (takes_more) snprintf(x->rest, sizeof x->rest, "%s", rest);
        if (takes_more || (rest && !*rest && (n == 1 || path[n - 1] != '/'))) x->route = &routes[i];
    }
}

// True for OPTIONS, unless the route takes this method itself.
static bool asks_for_methods(const Exchange *x) {
    return !strcmp(x->method, "OPTIONS") && x->route->method && strcmp(x->route->method, "OPTIONS");
}

static bool check_route(Exchange *x, const char *url) {
    if (!x->route)
        return refuse(&x->fault, 404, "", "%s %.100s: this server has no such endpoint; docs/server.md lists them all",
                      x->method, url);
    if (asks_for_methods(x)) return true;
    if (x->route->method && strcmp(x->route->method, strcmp(x->method, "HEAD") ? x->method : "GET"))
        return refuse(&x->fault, 405, "", "%s: expected method %s", x->route->path, x->route->method);
    if (!x->route->open && !atomic_load(&x->srv->ready))
        return refuse(&x->fault, 503, "", "the model is loading; try again later");
    return true;
}

static void on_connection(void *cls, struct MHD_Connection *connection, void **context,
                          enum MHD_ConnectionNotificationCode code) {
    Server *srv = cls;
    pthread_mutex_lock(&srv->lock);
    if (code == MHD_CONNECTION_NOTIFY_STARTED) {
        Peer *p = calloc(1, sizeof *p);                // NULL: it has no memory for its request either
        const union MHD_ConnectionInfo *info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
        if (p) *p = (Peer){ srv->peers, &srv->peers, info ? info->connect_fd : -1, seconds() };
        if (p && p->next) p->next->link = &p->next;
        if (p) srv->peers = p;
        srv->n_peers += p != NULL;
        *context = p;
    } else if (*context) {
        Peer *p = *context;
        *p->link = p->next;
        if (p->next) p->next->link = p->link;
        free(p);
        srv->n_peers--;
        *context = NULL;
    }
    pthread_mutex_unlock(&srv->lock);
}

// Sets Peer.quiet: since when the head of a request is due; INFINITY: it is complete. The caller holds the lock.
static void set_quiet(struct MHD_Connection *connection, double since) {
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    if (info && info->socket_context) ((Peer *)info->socket_context)->quiet = since;
}

static const Endpoint preflight = { "OPTIONS", "preflight", route_preflight, true };     // it carries no key

// Begins a request whose head has come. NULL: there is no memory.
static Exchange *new_exchange(Server *srv, struct MHD_Connection *connection, const char *method, const char *url,
                              const char *version) {
    const char *host = NULL;
    Exchange *x = calloc(1, sizeof *x);
    if (!x) return NULL;
    *x = (Exchange){ .srv = srv, .connection = connection, .started = seconds(), .created = (size_t)time(NULL) };
    pthread_mutex_lock(&srv->lock);
    srv->n_open++;
    set_quiet(connection, INFINITY);
    pthread_mutex_unlock(&srv->lock);
    new_id(srv, "req_", x->request_id);
    x->malformed = !check_head(x, method, version) || !read_host(x, &url, &host);
    find_route(x, method, url);
    if (is_preflight(x)) x->route = &preflight;
    if (atomic_load(&srv->ready)) x->t = *srv->t;
    if (!x->malformed && check_caller(x, host)) check_route(x, url);           // others do not learn which paths exist
    const char *length = header(x, "Content-Length"), *expect = header(x, "Expect");
    if (expect && strcasecmp(expect, "100-continue")) refuse(&x->fault, 417, "", "Expect: expected 100-continue");
    const unsigned long long n = length ? strtoull(length, NULL, 10) : 0;
    x->too_large = n > srv->max_body;
    // Most clients read an answer only after they have sent the body.
    x->early = x->malformed || (x->too_large && (expect || n > DRAINED_BYTES));
    return x;
}

static void refuse_large(Exchange *x) {
    x->fault.status = 0;
    refuse(&x->fault, 413, "", "the request body: expected at most %zu bytes", x->srv->max_body);
    respond_fault(x);
}

// Adds a piece to the body, unless the request is refused already.
static void add_to_body(Exchange *x, const char *data, size_t n) {
    x->too_large |= x->body.n + n > x->srv->max_body;
    if (x->too_large || x->fault.status) return;
    if (!count_texts(x, x->body.n + 2 * n) || !tok_text_append(&x->body, data, n)) {
        refuse_starved(&x->fault);
        tok_text_free(&x->body);
        count_texts(x, 0);
    }
}

// Answers a request that has come as a whole.
static void answer_request(Exchange *x) {
    if (x->too_large) {
        refuse_large(x);
        return;
    }
    if (!x->fault.status && asks_for_methods(x)) route_options(x);
    else if (!x->fault.status && (!x->body.n || begin_work(x, WORK * x->body.n + WORK_MORE))) x->route->answer(x);
    end_work(x);
    if (x->answered) return;
    if (starved) refuse_starved(&x->fault);
    respond_fault(x);
}

// libmicrohttpd calls this after the headers, for each piece of the body, and at its end.
static enum MHD_Result on_request(void *cls, struct MHD_Connection *connection, const char *url, const char *method,
                                  const char *version, const char *data, size_t *n, void **con_cls) {
    Server *srv = cls;
    Exchange *x = *con_cls;
    starved = false;
    if (!x) {
        *con_cls = x = new_exchange(srv, connection, method, url, version);
        if (!x) return MHD_NO;
        if (x->early && x->malformed) respond_fault(x);
        else if (x->early) refuse_large(x);
        return MHD_YES;
    }
    if (x->answered) {
        *n = 0;
        return MHD_YES;
    }
    if (*n) {
        if (seconds() - x->started > BODY_SECONDS) return MHD_NO;
        add_to_body(x, data, *n);
        *n = 0;
        return MHD_YES;
    }
    answer_request(x);
    return x->lost ? MHD_NO : MHD_YES;
}

// Logs one line of JSON for each request; its text only if the options ask for it. asked: that text, as JSON.
static TokText log_line(const Exchange *x, int status, const TokText *asked) {
    TokText line = { 0 };
    const Job *job = x->job;
    put(&line, "{'time':%z,'method':%s,'path':%s,'status':%d,'ms':%f", (size_t)time(NULL), x->method,
        x->route ? x->route->path : "other", status, 1e3 * (seconds() - x->started));
    if (job && job->started && job->done) {
        const Usage u = usage_of(x);
        put(&line, ",'id':%s,'prompt':%d,'cached':%d,'generated':%d,'prompt_ms':%f,'decode_ms':%f,'end':%s", x->id,
            u.prompt, u.cached, u.made, 1e3 * u.prompt_seconds, 1e3 * u.decode_seconds, end_text[job->end]);
    }
    if (*x->warnings) put(&line, ",'warnings':%s", x->warnings);
    if (x->srv->o.log_text) put(&line, ",'request':%r", text_of(asked));
    if (x->srv->o.log_text && job)
        put(&line, ",'thought':%t,'answer':%t", text_of(&job->thought), text_of(&job->content));
    put(&line, "}\n");
    return line;
}

static void on_completed(void *cls, struct MHD_Connection *connection, void **con_cls,
                         enum MHD_RequestTerminationCode code) {
    Server *srv = cls;
    Exchange *x = *con_cls;
    if (!x) return;
    const int status = code == MHD_REQUEST_TERMINATED_COMPLETED_OK ? x->status : CLIENT_LEFT;
    TokText asked = { 0 };
    if (srv->o.log_text) put(&asked, "%t", text_of(&x->body));       // it may be long: not under the lock
    pthread_mutex_lock(&srv->lock);
    srv->totals.http[status / 100]++;
    TokText line = log_line(x, status, &asked);
    for (int i = 0; i < x->n_choices; i++) {
        x->choices[i].job->gone = true;
        job_drop(x->choices[i].job);
    }
    srv->n_open--;
    set_quiet(connection, seconds());
    pthread_mutex_unlock(&srv->lock);
    sem_post(&wake);
    fwrite(line.s, 1, line.n, stderr);                 // a slow log delays this connection alone
    tok_text_free(&line);
    tok_text_free(&asked);
    exchange_free(x);
    *con_cls = NULL;
}

// ==== [3] The verb ===================================================================================================

static bool is_loopback(const struct sockaddr *a) {
    const void *in = a;
    if (a->sa_family == AF_INET6) return IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)in)->sin6_addr);
    return ntohl(((const struct sockaddr_in *)in)->sin_addr.s_addr) >> 24 == 127;
}

// A socket bound to an address; -1: errno says why not.
static int bind_to(const struct addrinfo *a) {
    const int on = 1, fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return -1;
    if (!setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) && !bind(fd, a->ai_addr, a->ai_addrlen)) return fd;
    const int err = errno;
    close(fd);
    errno = err;
    return -1;
}

static struct addrinfo *find_address(const char *name, int port) {
    const struct addrinfo hints = { .ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV };
    struct addrinfo *a;
    char digits[16];
    snprintf(digits, sizeof digits, "%d", port);
    const int err = getaddrinfo(name, digits, &hints, &a);
    if (err) die("--host: %s: %s", name, gai_strerror(err));
    return a;
}

// The first port after this one that a server could have now; 0: none of the next 100.
static int next_free_port(const char *name, int port) {
    for (int next = port + 1; next <= min_int(port + 100, 65535); next++) {
        struct addrinfo *a = find_address(name, next);
        const int fd = bind_to(a);
        freeaddrinfo(a);
        if (fd >= 0) close(fd);
        if (fd >= 0) return next;
    }
    return 0;
}

// Listens where the options say.
static int listen_at(Server *srv) {
    const ServeOptions *o = &srv->o;
    char port[16], host[64];
    struct sockaddr_storage bound;
    socklen_t n = sizeof bound;
    struct addrinfo *a = find_address(o->host, o->port);
    const int fd = bind_to(a);
    if (fd < 0 && errno == EADDRINUSE) {
        const int next = next_free_port(o->host, o->port);
        die("--port: %d is in use; try --port %d", o->port, next);       // 0: any free one
    }
    if (fd < 0 || listen(fd, 128) || getsockname(fd, (struct sockaddr *)&bound, &n) ||
        getnameinfo((struct sockaddr *)&bound, n, host, sizeof host, port, sizeof port,
                    NI_NUMERICHOST | NI_NUMERICSERV))
        die("--port: %s:%d: %s", o->host, o->port, strerror(errno));
    freeaddrinfo(a);
    srv->loopback = is_loopback((struct sockaddr *)&bound);
    snprintf(srv->address, sizeof srv->address, strchr(host, ':') ? "http://[%s]:%s" : "http://%s:%s", host, port);
    if (!srv->loopback && !o->api_key)
        fprintf(stderr, "# warning: --host %s is open to the network and no --api-key is set\n", host);
    if (o->public_url) fprintf(stderr, "# public address: %s\n", o->public_url);
    for (int i = 0; i < o->origins.n; i++)
        if (is_any(o->origins.text[i])) fprintf(stderr, "# warning: --allow-origin *: any web page may use the API\n");
    return fd;
}

// Each connection has a thread with a stack. Of a limited address space (ulimit -v) the model may take half.
static unsigned most_connections(void) {
    enum { STACK = (1 << 20) + (1 << 16), LEAST = 16 };
    const size_t left = address_space_left(), room = left / 16 / STACK;
    return left == SIZE_MAX || room > MAX_CONNECTIONS ? MAX_CONNECTIONS : room > LEAST ? (unsigned)room : LEAST;
}

// Takes the address before the model is loaded, which may take minutes, so that an address in use is an error at once.
// Until serve() the page is served, /health answers "loading", and all else is refused by a 503. The caller passes the
// server to serve(), once. Dies if there is no such address.
static Server *server_open(const ServeOptions *o) {
    enum { WHILE_LOADING = 16 << 20 };
    Server *srv = alloc_or_die(1, sizeof *srv);
    *srv = (Server){ .o = *o, .created = time(NULL), .max_body = o->max_body };
    pthread_mutex_init(&srv->lock, NULL);
    srv->last = &srv->first;
    if (getrandom(&srv->salt, sizeof srv->salt, 0) != sizeof srv->salt) srv->salt = (uint64_t)time(NULL);
#ifdef M_ARENA_MAX
    if (address_space_left() < SIZE_MAX) mallopt(M_ARENA_MAX, 1);
#endif
#ifdef M_MMAP_THRESHOLD
    mallopt(M_MMAP_THRESHOLD, 1 << 20);                // what is large goes back to the system when it is freed
#endif
    budget_open(&srv->budget, WHILE_LOADING);
    make_page();
    sem_init(&wake, 0, 0);
    signal(SIGPIPE, SIG_IGN);
    srv->daemon = MHD_start_daemon(
        MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_THREAD_PER_CONNECTION | MHD_USE_POLL | MHD_USE_ITC, 0, NULL, NULL,
        on_request, srv, MHD_OPTION_LISTEN_SOCKET, listen_at(srv), MHD_OPTION_CONNECTION_LIMIT, most_connections(),
        MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)IDLE_SECONDS, MHD_OPTION_THREAD_STACK_SIZE, (size_t)1 << 20, STRICT,
        MHD_OPTION_UNESCAPE_CALLBACK, unescape, NULL, MHD_OPTION_NOTIFY_COMPLETED, on_completed, srv,
        MHD_OPTION_NOTIFY_CONNECTION, on_connection, srv, MHD_OPTION_END);
    if (!srv->daemon) die("--port: libmicrohttpd could not start a server");
    return srv;
}

static void name_model(Server *srv) {
    const char *path = model_path(srv->m), *slash = strrchr(path, '/'), *name = slash && slash[1] ? slash + 1 : path;
    snprintf(srv->name, sizeof srv->name, "%s", srv->o.alias ? srv->o.alias : name);
    char *end = strstr(srv->name, ".gguf");
    if (end && !end[5] && !srv->o.alias) *end = 0;
}

// Half of the memory is for prefix snapshots of the slots' sessions; idle conversations have the rest.
static void open_store(Server *srv) {
    const ServeOptions *o = &srv->o;
    const int n_seqs = n_slots(srv);
    enum { WINDOWS = 8 };     // between two snapshots of a prompt
    const size_t one = snapshot_bytes(srv->m), half = o->cache_ram / 2 / (size_t)n_seqs;
    const int most = one ? (int)(half / one < MAX_SNAPSHOTS ? half / one : MAX_SNAPSHOTS) : 0;
    for (int i = 0; i < n_seqs && most > 1; i++)
        session_set_snapshots(srv->slots[i].s, most, WINDOWS * model_shape(srv->m).window);
    const size_t snapshots = one * (size_t)(n_seqs * max_int(most, 1));
    const size_t room = o->cache_ram > snapshots ? o->cache_ram - snapshots : 0;
    fprintf(stderr, "# host memory: up to %.1f MiB for %d checkpoints per session, %.1f MiB for idle conversations\n",
            (double)snapshots / (1 << 20), one ? max_int(most, 1) : 0, (double)room / (1 << 20));
    store_open(&srv->store, srv->slots[0].s, o->session_dir, room, o->session_disk);
}

// Divides the memory that the model leaves among requests and idle conversations. If the address space has a limit
// (ulimit -v), all threads allocate in one place: else each would reserve some.
static void open_budget(Server *srv) {
    ServeOptions *o = &srv->o;
    const size_t left = address_space_left(), room = available_memory();
    size_t memory = room > o->cache_ram ? (room - o->cache_ram) / 2 : 0;
    if (left < SIZE_MAX) {
        o->cache_ram = o->cache_ram < left / 8 ? o->cache_ram : left / 8;
        memory = memory < left / 2 ? memory : left / 2;
    }
    budget_limit(&srv->budget, o->memory ? o->memory : memory);
    const size_t body = srv->budget.limit[FOR_WORK] / WORK;
    if (body < o->max_body) srv->max_body = body;
    fprintf(stderr, "# host memory: up to %.1f MiB for requests and answers, requests of up to %.1f MiB\n",
            (double)(o->memory ? o->memory : memory) / (1 << 20), (double)srv->max_body / (1 << 20));
}

// Waits for the end of answers that are being sent, and closes all connections.
static void close_connections(Server *srv) {
    for (int open = 1, k = 0; open && k < 500; k++) {
        pthread_mutex_lock(&srv->lock);
        open = srv->n_open;
        pthread_mutex_unlock(&srv->lock);
        if (open) usleep(10000);
    }
    MHD_stop_daemon(srv->daemon);
}

// Serves until SIGTERM or SIGINT, and frees the server. o: what server_open() got, now with sampling and drafting,
// which depend on the model.
// Loads the scorer now, with room for a prompt that fills the context when it is compressed, and not with the first
// prompt, where it might not fit any more.
static void open_compressor(Server *srv, const ServeOptions *o) {
    const double most = fmin((double)context_size(srv) / (double)o->compress, MAX_CONTEXT - 1024);
    srv->compressor = (Compressor){ .ratio = o->compress, .from = o->compress_from, .file = o->scorer };
    if (!(o->compress > 0)) return;
    if (o->scorer) scorer_check(o->scorer, srv->m);
    open_scorer(&srv->compressor, srv->m, (int)most);
    fprintf(stderr, "# prompts of %d tokens and more are compressed to %g (lossy); at most %d tokens are read\n",
            o->compress_from, (double)o->compress, prompt_room(srv));
}

static void serve(Server *srv, Model *m, Tokenizer *t, const ServeOptions *o) {
    srv->m = m, srv->t = t;
    srv->o.sampling = o->sampling;
    srv->o.drafting = o->drafting;
    srv->sees = tower_hash(m);
    open_compressor(srv, o);
    const int n_seqs = n_slots(srv);
    srv->slots = alloc_or_die((size_t)n_seqs, sizeof *srv->slots);
    srv->logits = alloc_or_die((size_t)model_shape(m).vocab, sizeof *srv->logits);
    srv->replays = alloc_or_die(REPLAYS, sizeof *srv->replays);
    if (!grammar_vocab_init(&srv->vocab, t)) die("out of memory for the token tree of the grammar");
    measure_pace(m, t, &o->drafting);
    for (int i = 0; i < n_seqs; i++) srv->slots[i].s = session_open(m, t, i);
    srv->joules = read_joules(m);
    srv->chunk = o->chunk ? o->chunk : n_seqs > 1 ? min_int(SMALL_BATCH, model_options(m)->n_batch)
                                                  : model_options(m)->n_batch;       // larger steps are for images
    srv->by_rows = chunk_is_free(m, srv->chunk);
    srv->share = srv->by_rows ? share_of(min_int(SHARE_LEAST, srv->chunk), srv->chunk) : share_of(1, INFINITY);
    open_budget(srv);
    open_store(srv);
    name_model(srv);
    const struct sigaction act = { .sa_handler = on_stop, .sa_flags = (int)SA_RESTART };
    sigaction(SIGTERM, &act, NULL);
    sigaction(SIGINT, &act, NULL);
    atomic_store(&srv->ready, true);
    fprintf(stderr, "# serving at %s\n", srv->address);
    run_engine(srv);
    close_connections(srv);
    for (int i = 0; i < n_seqs && o->session_dir; i++) {             // the most recently used one last
        Slot *slot = oldest_slot(srv);
        park(srv, slot, 0);
        slot->used = INT64_MAX;
    }
    store_close(&srv->store);
    for (int i = 0; i < n_seqs; i++) session_close(srv->slots[i].s);
    close_scorer(&srv->compressor);
    for (int i = 0; i < SHORTENED; i++) {
        tok_ids_free(&srv->shortened[i].said);
        tok_ids_free(&srv->shortened[i].shown);
    }
    grammar_vocab_free(&srv->vocab);
    free(srv->slots);
    free(srv->logits);
    recent_free(&srv->items);
    recent_free(&srv->responses);
    row_cache_free(&srv->rows);
    for (int i = 0; i < REPLAYS; i++) tok_ids_free(&srv->replays[i].ids);
    free(srv->replays);
    fprintf(stderr, "# stopped: %" PRIu64 " requests answered, %" PRIu64 " tokens generated\n", srv->totals.jobs,
            srv->totals.made);
    free(srv);
}

#endif
#endif
