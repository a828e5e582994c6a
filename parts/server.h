/* server.h - the HTTP API: requests come in as JSON, wait in a queue, are answered together by one engine thread, and
 * the answers go out as JSON or as a stream of events.
 *
 * Uses engine.h, grammar.h, schema.h; the callers store.h (idle conversations), chat.h [1] (lists of messages) and
 * answer.h (hashes). Begin with serve() and run_engine().
 *   [1] JSON written    [2] What a request says    [3] Jobs and the scheduler    [4] Answers, whole and as streams
 *   [5] Dialects: /v1/messages and /v1/responses   [6] Other endpoints    [7] HTTP: checks, routes    [8] The verb
 *
 * THREADS  The main thread is the engine: only it touches the model and the sessions, and changes slots. Each
 *          connection has a thread of libmicrohttpd, which reads the request, tokenizes it, queues a job, and waits
 *          for what the engine adds to that job. Another thread writes files of sessions (store.h, which has its own
 *          lock).
 *          Server.lock guards the queue, the counters, the peers, the remembered calls, Slot.job if others than the
 *          engine read it, and the answer and the ids of every queued job.
 * TRUST    Every byte of a request is untrusted: it is checked before use, and an error in it is answered by a 4xx. */
#ifndef SERVER_H
#define SERVER_H

typedef struct {
    const char *host, *alias;          // address to listen on; name of the model, NULL: its file name
    const char *api_key;               // NULL: no key is needed
    int         port, max_queue, timeout;          // 0: any free port; jobs that wait; seconds for one answer
    size_t      max_body;              // bytes of a request
    int         n_predict, think_budget;           // if the request does not say
    int         chunk;                 // tokens of a prompt in one step; 0: as many as the model allows
    bool        think;
    SampleParams sampling;
    Drafting    drafting;
    bool        fixed_seed;            // a request without a seed gets sampling.seed; false: a random one
    const char *session_dir;           // where sessions are kept; NULL: in memory only
    size_t      cache_ram, session_disk;   // bytes: of host memory for sessions, of that folder
    bool        log_text;              // the log has prompts and answers too
} ServeOptions;

#if defined USE_MICROHTTPD || defined TESTING
// While answers are under way, a round that also runs a part of a prompt should take at most SHARE_MOST times as long
// as one without. The times of rounds show how much of a prompt that is, in rows or in multiplications. One round in
// SHARE_ROUNDS runs without a prompt, to measure that time too.
typedef struct {
    double amount;            // of a prompt, in the next round with a prompt
    double least, most;       // least > 0: no prompt starves
    int    n;                 // rounds with a prompt since the last one without
    double plain;             // seconds of a round without, 0: not known
} Share;

enum { SHARE_MOST = 3, SHARE_LEAST = 8, SHARE_ROUNDS = 32 };         // SHARE_LEAST: rows

static inline Share share_of(double least, double most) {
    return (Share){ .amount = least, .least = least, .most = most };
}

static inline bool share_looks(const Share *s) { return s->plain <= 0 || s->n >= SHARE_ROUNDS; }

// Learns from a round that took `taken` seconds. with: how much of a prompt it ran, s->amount or the least that can run
// at once; 0: it ran no prompt.
static inline void share_learn(Share *s, double with, double taken) {
    if (with <= 0) {
        const double more = fmin(taken, 2 * s->plain) - s->plain;    // one round may be slow by chance
        s->plain += s->plain > 0 ? more * (more > 0 ? 0.25 : 0.5) : taken;
        s->n = 0;
        return;
    }
    const double change = 0.9 * SHARE_MOST * s->plain / taken;       // a tenth is left for variation
    s->amount = fmin(fmax(fmax(s->amount, with) * fmin(fmax(change, 0.5), 1.25), s->least), s->most);
    s->n++;
}
#endif

#ifndef USE_MICROHTTPD
static void need_http(void) {
    die("serve: this build has no HTTP support: install libmicrohttpd-dev (Debian, Ubuntu), libmicrohttpd-devel "
        "(Fedora) or "
        "libmicrohttpd (Arch, Homebrew) and pkg-config, then run make again");
}
static void serve(Model *m, Tokenizer *t, const ServeOptions *o) { (void)m, (void)t, (void)o; }
#else
#include <arpa/inet.h>
#include <microhttpd.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <semaphore.h>
#include <sys/random.h>
#include <sys/socket.h>

enum { MAX_CONNECTIONS = 512, IDLE_SECONDS = 30, BODY_SECONDS = 120, KEEP_ALIVE_SECONDS = 10, DRAIN_SECONDS = 30,
       CLIENT_LEFT = 499, MAX_STOPS = 16, MAX_TOP = 20, PLAIN_TOP = 5, REPLAYS = 4096 };

static void need_http(void) {}

// ==== [1] JSON written ===============================================================================================
// put() appends numbers, strings and pieces of JSON to a text. Strings that may not be UTF-8 are repaired.

static void append(TokText *out, const char *s, size_t n) {
    if (!tok_text_append(out, s, n)) die("out of memory for %zu bytes of an answer", n);
}

static TokStr str(const char *s) { return (TokStr){ s, strlen(s) }; }
static TokStr text_of(const TokText *t) { return (TokStr){ t->s, t->n }; }

static void put_string(TokText *out, TokStr s) {
    TokText clean = { 0 };
    size_t start = 0;                                  // of the bytes that are UTF-8 and not copied yet
    uint32_t cp;
    for (size_t i = 0; i < s.n; ) {
        const int n = tok_read_utf8((const unsigned char *)s.s + i, s.n - i, &cp);
        i += n > 0 ? (size_t)n : 1;
        if (n > 0) continue;
        append(&clean, s.s + start, i - 1 - start);
        append(&clean, "\xef\xbf\xbd", 3);
        start = i;
    }
    if (start) append(&clean, s.s + start, s.n - start);
    if (tok_add_json_string(out, start ? text_of(&clean) : s) < 0) die("out of memory for an answer");
    tok_text_free(&clean);
}

// Appends fmt with each ' as ", and for
//   %s char *, %t TokStr   a string in quotes      %r TokStr   JSON as it is
//   %d int, %z size_t, %f double                   %b int      true or false
static void put(TokText *out, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    for (; *fmt; fmt++) {
        char number[64] = "";
        const size_t n = strcspn(fmt, "%'");
        TokStr json;
        append(out, fmt, n);
        fmt += n;
        if (!*fmt) break;
        if (*fmt == '\'') {
            append(out, "\"", 1);
            continue;
        }
        switch (*++fmt) {
        case 's': put_string(out, str(va_arg(ap, const char *))); break;
        case 't': put_string(out, va_arg(ap, TokStr)); break;
        case 'r':
            json = va_arg(ap, TokStr);
            append(out, json.s, json.n);
            break;
        case 'd': snprintf(number, sizeof number, "%d", va_arg(ap, int)); break;
        case 'z': snprintf(number, sizeof number, "%zu", va_arg(ap, size_t)); break;
        case 'b': snprintf(number, sizeof number, "%s", va_arg(ap, int) ? "true" : "false"); break;
        case 'f': {
            const double v = va_arg(ap, double);
            snprintf(number, sizeof number, "%.6g", isfinite(v) ? v : 0.0);
            break;
        }
        default: assert(!"a letter that put() knows");
        }
        append(out, number, strlen(number));
    }
    va_end(ap);
}

// ==== [2] What a request says ========================================================================================
// One table lists the fields of all endpoints; one pass over the body fills them in. Fields that are not listed are
// ignored; fields that ask for a feature that does not exist are refused.

typedef struct {
    // type GGUF_J_NULL: not given
    GgufJson messages, tools, prompt, stop, logit_bias, tool_choice, stream_options, response_format, modalities;
    GgufJson kwargs, reasoning_effort, logprobs, content, tokens, functions, grammar, json_schema, suffix, audio, user;
    double   max_tokens, temperature, top_k, top_p, min_p, repeat, presence, frequency, seed, top_logprobs;
    double   think_budget;             // NAN: not given
    double   other;                    // of features that do not exist: only the value without effect is accepted
    bool     stream, progress, no_cache, ignore_eos, echo, add_special, parse_special, with_pieces, no_cue;
    bool     one_call;                 // parallel_tool_calls: false
    bool     cue, continues;           // add_generation_prompt and continue_final_message: true
    bool     include_usage, think;     // derived
} Request;

typedef enum { IS_INT, IS_REAL, IS_TRUE, IS_FALSE, IS_STRING, IS_ARRAY, IS_OBJECT, IS_ANY } FieldKind;

#define AT(name) offsetof(Request, name)
static const struct { const char *name; FieldKind kind; size_t at; double min, max; } fields[] = {
    { "messages", IS_ARRAY, AT(messages), 0, 0 }, { "tools", IS_ARRAY, AT(tools), 0, 0 },
    { "prompt", IS_ANY, AT(prompt), 0, 0 }, { "stop", IS_ANY, AT(stop), 0, 0 },
    { "content", IS_STRING, AT(content), 0, 0 }, { "tokens", IS_ARRAY, AT(tokens), 0, 0 },
    { "logit_bias", IS_OBJECT, AT(logit_bias), 0, 0 }, { "tool_choice", IS_ANY, AT(tool_choice), 0, 0 },
    { "stream_options", IS_OBJECT, AT(stream_options), 0, 0 },
    { "response_format", IS_OBJECT, AT(response_format), 0, 0 },
    { "modalities", IS_ARRAY, AT(modalities), 0, 0 }, { "chat_template_kwargs", IS_OBJECT, AT(kwargs), 0, 0 },
    { "reasoning_effort", IS_STRING, AT(reasoning_effort), 0, 0 }, { "logprobs", IS_ANY, AT(logprobs), 0, 0 },
    { "functions", IS_ANY, AT(functions), 0, 0 }, { "grammar", IS_STRING, AT(grammar), 0, 0 },
    { "json_schema", IS_ANY, AT(json_schema), 0, 0 }, { "suffix", IS_STRING, AT(suffix), 0, 0 },
    { "audio", IS_ANY, AT(audio), 0, 0 }, { "user", IS_ANY, AT(user), 0, 0 },
    { "max_tokens", IS_INT, AT(max_tokens), -1, INT_MAX }, { "n_predict", IS_INT, AT(max_tokens), -1, INT_MAX },
    { "max_completion_tokens", IS_INT, AT(max_tokens), -1, INT_MAX },
    { "temperature", IS_REAL, AT(temperature), 0, 100 }, { "top_k", IS_INT, AT(top_k), -1, INT_MAX },
    { "top_p", IS_REAL, AT(top_p), 0, 1 }, { "min_p", IS_REAL, AT(min_p), 0, 1 },
    { "repeat_penalty", IS_REAL, AT(repeat), 0.001, 1000 }, { "repetition_penalty", IS_REAL, AT(repeat), 0.001, 1000 },
    { "presence_penalty", IS_REAL, AT(presence), -1000, 1000 },
    { "frequency_penalty", IS_REAL, AT(frequency), -1000, 1000 }, { "seed", IS_INT, AT(seed), -9e15, 9e15 },
    { "n", IS_INT, AT(other), 1, 1 }, { "best_of", IS_INT, AT(other), 1, 1 }, { "typical_p", IS_REAL, AT(other), 1, 1 },
    { "mirostat", IS_INT, AT(other), 0, 0 }, { "dry_multiplier", IS_REAL, AT(other), 0, 0 },
    { "xtc_probability", IS_REAL, AT(other), 0, 0 }, { "dynatemp_range", IS_REAL, AT(other), 0, 0 },
    { "top_logprobs", IS_INT, AT(top_logprobs), 0, MAX_TOP },
    { "reasoning_budget", IS_INT, AT(think_budget), -1, INT_MAX },
    { "parallel_tool_calls", IS_FALSE, AT(one_call), 0, 0 },
    { "stream", IS_TRUE, AT(stream), 0, 0 }, { "return_progress", IS_TRUE, AT(progress), 0, 0 },
    { "cache_prompt", IS_FALSE, AT(no_cache), 0, 0 }, { "ignore_eos", IS_TRUE, AT(ignore_eos), 0, 0 },
    { "echo", IS_TRUE, AT(echo), 0, 0 }, { "add_special", IS_TRUE, AT(add_special), 0, 0 },
    { "parse_special", IS_TRUE, AT(parse_special), 0, 0 }, { "with_pieces", IS_TRUE, AT(with_pieces), 0, 0 },
    { "add_generation_prompt", IS_FALSE, AT(no_cue), 0, 0 }, { "add_generation_prompt", IS_TRUE, AT(cue), 0, 0 },
    { "continue_final_message", IS_TRUE, AT(continues), 0, 0 },
};

typedef struct {              // why a request is refused
    int  status;              // 0: it is not refused
    char param[64];           // the field at fault, or empty
    const char *code;         // or NULL
    char text[400];
} Fault;

// Refuses the request, with the first reason only. Returns false.
__attribute__((format(printf, 4, 5)))
static bool refuse(Fault *f, int status, const char *param, const char *fmt, ...) {
    va_list ap;
    if (f->status) return false;
    f->status = status;
    snprintf(f->param, sizeof f->param, "%s", param);
    va_start(ap, fmt);
    vsnprintf(f->text, sizeof f->text, fmt, ap);
    va_end(ap);
    return false;
}

static bool is_given(const GgufJson *v) { return v->type != GGUF_J_NULL; }

static bool read_field(Request *r, Fault *f, size_t i, const GgufJson *v) {
    static const char *const wants[] = { "an integer", "a number", "true or false", "true or false", "a string",
                                         "a list", "an object" };
    void *to = (char *)r + fields[i].at;
    const FieldKind kind = fields[i].kind;
    const char *name = fields[i].name;
    const double min = fields[i].min, max = fields[i].max;
    if (!is_given(v)) return true;
    if (kind == IS_INT || kind == IS_REAL) {
        double n;
        if (v->type != GGUF_J_NUMBER || !gguf_json_float(v, &n) || (kind == IS_INT && n != floor(n)))
            return refuse(f, 400, name, "%s: expected %s", name, wants[kind]);
        if (min == max && n != min)
            return refuse(f, 400, name, "%s: only %.10g is supported, got %.10g", name, min, n);
        if (n < min || n > max)
            return refuse(f, 400, name, "%s: expected %.10g to %.10g, got %.10g", name, min, max, n);
        *(double *)to = n;
        return true;
    }
    const bool is_bool = v->type == GGUF_J_TRUE || v->type == GGUF_J_FALSE;
    if ((kind == IS_TRUE || kind == IS_FALSE) ? !is_bool : (kind == IS_STRING && v->type != GGUF_J_STRING) ||
        (kind == IS_ARRAY && v->type != GGUF_J_ARRAY) || (kind == IS_OBJECT && v->type != GGUF_J_OBJECT))
        return refuse(f, 400, name, "%s: expected %s", name, wants[kind]);
    if (kind == IS_TRUE || kind == IS_FALSE) *(bool *)to = v->type == (kind == IS_TRUE ? GGUF_J_TRUE : GGUF_J_FALSE);
    else *(GgufJson *)to = *v;
    return true;
}

// Refuses requests for features that do not exist.
static bool refuse_absent(const Request *r, Fault *f) {
    GgufJson rest = r->modalities, v;
    if (is_given(&r->functions)) return refuse(f, 400, "functions", "functions is not supported; use tools");
    if (is_given(&r->audio)) return refuse(f, 400, "audio", "audio is not supported; this server is text only");
    if (r->echo) return refuse(f, 400, "echo", "echo is not supported");
    if (is_given(&r->suffix) && r->suffix.n > 2) return refuse(f, 400, "suffix", "suffix is not supported");
    while (is_given(&rest) && gguf_json_next(&rest, NULL, &v))
        if (!gguf_json_is(&v, "text")) return refuse(f, 400, "modalities", "modalities: only text is supported");
    return true;
}

// Reads a member of a field, true or false, if it is given.
static bool read_switch(Fault *f, const char *field, const GgufJson *object, const char *name, bool *to) {
    GgufJson v;
    if (!is_given(object) || !gguf_json_get(object, name, &v) || !is_given(&v)) return true;
    if (v.type != GGUF_J_TRUE && v.type != GGUF_J_FALSE)
        return refuse(f, 400, field, "%s.%s: expected true or false", field, name);
    *to = v.type == GGUF_J_TRUE;
    return true;
}

// Reads a body. False: it is refused. The request points into the body.
static bool read_request(Request *r, Fault *f, TokStr body, const ServeOptions *o) {
    GgufJson root, key, v;
    size_t at;
    const char *err;
    *r = (Request){ .max_tokens = NAN, .temperature = NAN, .top_k = NAN, .top_p = NAN, .min_p = NAN, .repeat = NAN,
                    .presence = NAN, .frequency = NAN, .seed = NAN, .top_logprobs = NAN, .think_budget = NAN };
    if (gguf_json_parse(body.s ? body.s : "", body.n, &root, &at, &err) < 0)
        return refuse(f, 400, "", "the request body is not JSON: byte %zu: expected %s", at, err);
    if (root.type != GGUF_J_OBJECT) return refuse(f, 400, "", "the request body: expected a JSON object");
    while (gguf_json_next(&root, &key, &v))
        for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
            if (gguf_json_is(&key, fields[i].name) && !read_field(r, f, i, &v)) return false;
    r->think = is_given(&r->reasoning_effort) ? !gguf_json_is(&r->reasoning_effort, "none") : o->think;
    if (!read_switch(f, "stream_options", &r->stream_options, "include_usage", &r->include_usage) ||
        !read_switch(f, "chat_template_kwargs", &r->kwargs, "enable_thinking", &r->think)) return false;
    if (isnan(r->think_budget)) r->think_budget = o->think_budget;
    if (r->think_budget == 0) r->think = false;
    return refuse_absent(r, f);
}

// The bytes of a string, ended by a NUL; the caller frees them.
static char *copy_string(const GgufJson *v, size_t *n) {
    char *s = alloc_or_die(v->n + 1, 1);
    *n = gguf_json_string(v, s);
    return s;
}

static bool is_role(const GgufJson *role) {
    static const char *const roles[] = { "system", "developer", "user", "assistant", "tool" };
    for (size_t i = 0; i < sizeof roles / sizeof *roles; i++) if (gguf_json_is(role, roles[i])) return true;
    return false;
}

// Checks that messages have known roles and text contents, and that results follow their calls.
static bool check_messages(const GgufJson *messages, Fault *f) {
    GgufJson rest = *messages, m, role, calls, content, part, type;
    bool called = false;
    int i = 0;
    if (!is_given(messages)) return refuse(f, 400, "messages", "messages: expected a list, got none");
    for (; gguf_json_next(&rest, NULL, &m); i++) {
        if (m.type != GGUF_J_OBJECT) return refuse(f, 400, "messages", "messages[%d]: expected an object", i);
        if (!gguf_json_get(&m, "role", &role) || !is_role(&role))
            return refuse(f, 400, "messages", "messages[%d].role: expected system, developer, user, assistant or tool",
                          i);
        if (!gguf_json_is(&role, "tool"))
            called = gguf_json_get(&m, "tool_calls", &calls) && calls.type == GGUF_J_ARRAY &&
                     gguf_json_next(&calls, NULL, &part);
        else if (!called)
            return refuse(f, 400, "messages", "messages[%d]: expected tool_calls before a tool result", i);
        if (!gguf_json_get(&m, "content", &content) || content.type != GGUF_J_ARRAY) continue;
        GgufJson parts = content;
        for (int k = 0; gguf_json_next(&parts, NULL, &part); k++)
            if (part.type != GGUF_J_OBJECT || !gguf_json_get(&part, "type", &type) || !gguf_json_is(&type, "text"))
                return refuse(f, 400, "messages", "messages[%d].content[%d]: expected a part of type text; images, "
                              "audio and files are not supported", i, k);
    }
    return i > 0 || refuse(f, 400, "messages", "messages: expected at least one message");
}

// ==== [3] Jobs and the scheduler =====================================================================================
// A job is a prompt and its answer. Jobs wait in a queue. When a session is free, it goes to the first job of the
// clients that have fewest jobs under way. If several sessions are free, the job gets the one that holds most of its
// prompt. All sessions with a job advance together: each round decodes one token of each, and runs one chunk of one
// long prompt; long prompts alternate. If the chunk size cannot change results, chunks are smaller while answers are
// under way; else a chunk ends at the same tokens, no matter which other jobs run. Decoded rows do not depend on each
// other, so an answer does not depend on other answers.

typedef struct { TokText name, arguments; char id[40]; } Call;
typedef struct { TokIds ids; char id[40]; } Replay;                  // a call as the model wrote it
// A token of the answer, its probability, and the most probable tokens at its place.
typedef struct { int32_t id, n_top, top[MAX_TOP]; float logprob, top_logprob[MAX_TOP]; } Likely;

typedef struct Job {
    struct Job   *next;       // in the queue
    // the question: not changed after it is queued, except the ids: see take_held()
    TokIds        ids;
    int           checkpoint_at;       // see Prompt
    AnswerOptions options;
    float        *bias;       // (vocab), or NULL
    bool          no_cache;
    bool          by_ids;     // the client gave the prompt as token ids: they are run as they are
    int           n_top;      // most probable tokens to report with each token; -1: no probabilities
    int           fd;         // of the client
    uint64_t      client;     // equal for jobs of the same client
    double        queued, deadline;        // seconds()
    // the answer
    TokIds        said;
    TokText       content, thought;
    Call         *calls;
    Likely       *likely;     // (n_likely) tokens of the content
    int           n_calls, n_likely, room_likely;
    int           run, total, cached;      // tokens of the prompt
    bool          started, done;
    EndReason     end;
    Turn          turn;
    int           thought_tokens;
    const char   *stop;       // the stop string that ended it, or NULL
    Fault         fault;      // status 0: there is an answer
    // owners
    bool          gone;       // its client has left
    int           n_owners;   // the connection and the engine
    pthread_cond_t news;      // something was added
} Job;

typedef struct {
    Session *s;
    Job     *job;             // NULL: free
    int64_t  used;            // number of its last job, 0: none
    size_t   asked;           // tokens of that job's prompt that the next prompt of its conversation begins with
    bool     biased;          // its biases are not 0
    bool     by_ids;          // see SessionNote: of the tokens that it holds
} Slot;

typedef struct {              // since the start
    uint64_t jobs, refused, cancelled, prompt_tokens, cached_tokens, made, http[6];     // http: by hundreds of status
    double   prompt_seconds, decode_seconds;
} Totals;

typedef struct Peer {         // a connection
    struct Peer *next, **link;         // link: what points to it
    int          fd;
    double       quiet;       // seconds() since when the head of a request is due; INFINITY: none is
} Peer;

typedef struct {
    Model          *m;
    Tokenizer      *t;
    GrammarVocab    vocab;
    ServeOptions    o;
    char            name[128];         // of the model
    int64_t         created;           // time() of the start
    uint64_t        salt;              // so that ids of this run differ from those of others
    atomic_ullong   n_ids;
    Slot           *slots;             // (n_seqs)
    Store           store;             // idle conversations
    float          *logits;            // (vocab)
    int             last_prompt;       // slot of the prompt that advanced last
    int             chunk;             // rows of a prompt in a round without answers
    bool            by_rows;           // share.amount counts rows of a prompt; false: multiplications
    Share           share;             // how much of a prompt runs in a round with answers
    bool            loopback;
    pthread_mutex_t lock;
    Job            *first, **last;     // the queue
    Peer           *peers;
    int             n_peers, n_queued, n_running;
    int             n_open;            // requests whose answer is not complete
    int64_t         n_jobs;
    Replay         *replays;           // (REPLAYS) the last calls
    int             n_replays;         // since the start
    bool            draining;
    Totals          totals;
} Server;

static int n_slots(const Server *srv) { return model_options(srv->m)->n_seqs; }
static int context_size(const Server *srv) { return model_options(srv->m)->n_ctx; }

static sem_t wake;                                     // wakes the engine: a job or a signal came, or a client left
static atomic_int stop_asked;                          // the signal that asks to stop; any thread may set it

static void on_stop(int signal_number) {
    if (stop_asked) _exit(128 + signal_number);
    stop_asked = signal_number;
    sem_post(&wake);
}

// A new id, different from those of all other answers of this and other runs: prefix, 24 digits.
static void new_id(Server *srv, const char *prefix, char out[40]) {
    const uint64_t n[2] = { srv->salt, atomic_fetch_add(&srv->n_ids, 1) };
    snprintf(out, 40, "%.12s%016" PRIx64 "%08" PRIx32, prefix, hash_bytes(n, sizeof n), (uint32_t)n[1]);
}

static void job_free(Job *job) {
    for (int i = 0; i < job->n_calls; i++) {
        tok_text_free(&job->calls[i].name);
        tok_text_free(&job->calls[i].arguments);
    }
    for (int i = 0; i < job->options.stops.n; i++) free((char *)(uintptr_t)job->options.stops.text[i]);
    free(job->options.stops.text);
    free(job->calls);
    free(job->likely);
    free(job->bias);
    if (job->options.grammar) grammar_free(job->options.grammar);
    free(job->options.grammar);
    tok_ids_free(&job->ids);
    tok_ids_free(&job->said);
    tok_text_free(&job->content);
    tok_text_free(&job->thought);
    pthread_cond_destroy(&job->news);
    free(job);
}

static void job_drop(Job *job) {                       // one owner less; the caller holds the lock
    if (!--job->n_owners) job_free(job);
}

// Puts a job at the end of the queue. False: it is refused.
static bool submit(Server *srv, Job *job, Fault *f) {
    bool ok = true;
    pthread_mutex_lock(&srv->lock);
    if (srv->draining) {
        ok = refuse(f, 503, "", "the server is shutting down");
    } else if (srv->n_queued >= srv->o.max_queue + (n_slots(srv) - srv->n_running)) {
        srv->totals.refused++;
        ok = refuse(f, 429, "", "the queue is full with %d requests; try again later", srv->n_queued);
    } else {
        job->queued = seconds();
        job->deadline = job->queued + srv->o.timeout;
        job->n_owners = 2;
        *srv->last = job;
        srv->last = &job->next;
        srv->n_queued++;
        srv->totals.jobs++;
    }
    pthread_mutex_unlock(&srv->lock);
    if (ok) sem_post(&wake);
    return ok;
}

static void job_done(Server *srv, Job *job) {          // the engine has finished it; the caller holds the lock
    job->done = true;
    srv->totals.cancelled += job->gone;
    if (job->gone) refuse(&job->fault, CLIENT_LEFT, "", "the client closed the connection");
    pthread_cond_broadcast(&job->news);
    job_drop(job);
}

static bool has_left(const Job *job) {                 // the client has closed its end of the connection
    struct pollfd p = { .fd = job->fd, .events = POLLRDHUP };
    return job->gone || (poll(&p, 1, 0) > 0 && p.revents & (POLLRDHUP | POLLHUP | POLLERR));
}

// Finds jobs whose client has left. The caller holds the lock.
static void look_for_clients(Server *srv) {
    for (int i = 0; i < n_slots(srv); i++)
        if (srv->slots[i].job) srv->slots[i].job->gone = has_left(srv->slots[i].job);
    for (Job *job = srv->first; job; job = job->next) job->gone = has_left(job);
}

// Closes connections that do not complete their request. libmicrohttpd closes those that send nothing; these send a
// byte now and then.
static void end_slow_peers(Server *srv, double now) {
    for (const Peer *p = srv->peers; p; p = p->next)
        if (now - p->quiet > IDLE_SECONDS) shutdown(p->fd, SHUT_RDWR);
}

// Removes from the queue jobs whose client has left, or that waited too long. The caller holds the lock.
static void clean_queue(Server *srv, double now) {
    srv->last = &srv->first;
    for (Job *job; (job = *srv->last); ) {
        if (!job->gone && now < job->deadline) {
            srv->last = &job->next;
            continue;
        }
        if (!job->gone) refuse(&job->fault, 503, "", "no session became free within %d seconds", srv->o.timeout);
        *srv->last = job->next;
        srv->n_queued--;
        job_done(srv, job);
    }
}

// Returns how many tokens of the session the job's prompt begins with, if they are at least half of the session's
// tokens or half of the prompt. Else returns 0: reuse would save little, and the session's other tokens would be lost.
static size_t worth(Server *srv, const Slot *slot, const Job *job) {
    const TokIds *held = session_held(slot->s);
    if (job->no_cache) return 0;
    const Shared same = shared(job->by_ids || slot->by_ids ? NULL : srv->t, held, &job->ids);
    return 2 * same.held >= held->n || 2 * same.ids >= job->ids.n ? same.held : 0;
}

// Returns the free slot whose session saves the job most tokens by worth(), and sets *most to their number. If several
// slots are equal, returns the least recently used one. Returns NULL if no slot is free.
static Slot *choose_slot(Server *srv, const Job *job, size_t *most) {
    Slot *best = NULL;
    *most = 0;
    for (int i = 0; i < n_slots(srv); i++) {
        Slot *slot = &srv->slots[i];
        if (slot->job) continue;
        const size_t n = worth(srv, slot, job);
        if (best && (n < *most || (n == *most && slot->used >= best->used))) continue;
        best = slot;
        *most = n;
    }
    return best;
}

static Slot *oldest_slot(Server *srv) {                // the least recently used free slot; NULL: none
    Slot *best = NULL;
    for (int i = 0; i < n_slots(srv); i++) {
        Slot *slot = &srv->slots[i];
        if (!slot->job && (!best || slot->used < best->used)) best = slot;
    }
    return best;
}

// Puts what a slot holds into the store, unless the next job continues it. same: tokens that the two share.
static void park(Server *srv, Slot *slot, size_t same) {
    if (slot->used && same >= slot->asked) return;
    if (!store_park(&srv->store, slot->s, slot->by_ids)) fprintf(stderr, "# %s\n", srv->store.err);
}

// Returns the slot that holds most of the job's prompt. If a session in the store holds more of it, resumes that
// session in the least recently used slot. Returns NULL if no slot is free.
static Slot *make_ready(Server *srv, Job *job) {
    enum { GAIN = 64 };       // more tokens that justify resuming a session from the store
    size_t most, stored = 0;
    Slot *slot = choose_slot(srv, job, &most);
    if (!slot) return NULL;
    Parked *p = job->no_cache ? NULL : store_find(&srv->store, job->by_ids ? NULL : srv->t, &job->ids, &stored);
    const bool resumes = p && stored > most + GAIN;
    if (resumes) slot = oldest_slot(srv);
    park(srv, slot, resumes ? 0 : most);               // may drop p, which stays valid while it is pinned
    if (resumes) slot->by_ids = p->by_ids;
    if (!resumes) store_release(&srv->store, p);
    else if (!store_resume(&srv->store, slot->s, p)) fprintf(stderr, "# %s\n", srv->store.err);
    return slot;
}

// Replaces tokens of the prompt by those that the session holds, if their text is the same.
static void take_held(Server *srv, const Session *s, Job *job) {
    const TokIds *held = session_held(s);
    const Shared same = shared(srv->t, held, &job->ids);
    TokIds ids = { 0 };
    for (size_t i = 0; i < same.held; i++) push_id(srv->t, &ids, held->ids[i]);
    for (size_t i = same.ids; i < job->ids.n; i++) push_id(srv->t, &ids, job->ids.ids[i]);
    if (ids.n <= (size_t)context_size(srv)) {
        pthread_mutex_lock(&srv->lock);
        if ((size_t)job->checkpoint_at >= same.ids) job->checkpoint_at += (int)same.held - (int)same.ids;
        else job->checkpoint_at = 0;
        const TokIds old = job->ids;
        job->ids = ids;
        ids = old;
        pthread_mutex_unlock(&srv->lock);
    }
    tok_ids_free(&ids);
}

static void start_job(Server *srv, Slot *slot, Job *job) {
    Session *s = slot->s;
    if (job->bias || slot->biased) session_set_bias(s, job->bias);
    slot->biased = job->bias;
    if (job->no_cache) session_forget(s);
    else if (!job->by_ids && !slot->by_ids) take_held(srv, s, job);
    slot->by_ids = job->by_ids;
    const Prompt p = { .ids = job->ids.ids, .n = (int)job->ids.n, .checkpoint_at = job->checkpoint_at };
    const bool ok = session_start(s, &p, &job->options);
    pthread_mutex_lock(&srv->lock);
    job->total = (int)job->ids.n;
    slot->used = ++srv->n_jobs;
    slot->asked = (size_t)(job->checkpoint_at ? job->checkpoint_at : job->total);
    job->started = true;
    job->cached = ok ? job->total - session_state(s).n_left : 0;
    job->run = job->cached;
    if (ok) {
        slot->job = job;
        srv->n_running++;
    } else {
        refuse(&job->fault, 400, "", "%s", session_error(s));
        job_done(srv, job);
    }
    pthread_mutex_unlock(&srv->lock);
}

// Returns the pointer to the next job: the first one of a client with fewest jobs under way. The caller holds the lock.
static Job **next_in_line(Server *srv) {
    Job **best = &srv->first;
    int least = INT_MAX;
    for (Job **at = &srv->first; *at; at = &(*at)->next) {
        int n = 0;
        for (int i = 0; i < n_slots(srv); i++)
            n += srv->slots[i].job && srv->slots[i].job->client == (*at)->client;
        if (n < least) least = n, best = at;
    }
    return best;
}

// Gives free sessions to waiting jobs.
static void admit(Server *srv) {
    for (;;) {
        pthread_mutex_lock(&srv->lock);
        Job **at = oldest_slot(srv) ? next_in_line(srv) : NULL, *job = at ? *at : NULL;
        if (job) {
            *at = job->next;
            if (!job->next) srv->last = at;
            srv->n_queued--;
            job->next = NULL;
        }
        pthread_mutex_unlock(&srv->lock);
        if (!job) return;
        start_job(srv, make_ready(srv, job), job);
    }
}

typedef enum { ROUND_OTHER, ROUND_PLAIN, ROUND_SHARED } Round;       // PLAIN: only answers; SHARED: also a prompt

// Chooses the sessions of the next round. Returns their number, and sets *round to the kind of the round. If there are
// several long prompts, only one of them runs.
static int pick(Server *srv, Session **sessions, Slot **slots, Round *round) {
    const int n_seqs = n_slots(srv), after = srv->last_prompt, paused = model_paused(srv->m);
    bool long_one = false, answers = false;
    int n = 0;
    for (int i = 0; i < n_seqs; i++) {
        const SessionState state = session_state(srv->slots[i].s);
        answers |= state.running && !state.prompting;
    }
    const bool looks = answers && share_looks(&srv->share);
    const int chunk = answers && srv->by_rows ? (int)srv->share.amount : srv->chunk;
    *round = answers ? ROUND_PLAIN : ROUND_OTHER;
    for (int k = 1; k <= n_seqs; k++) {
        const int i = (after + k) % n_seqs;
        Slot *slot = &srv->slots[i];
        if (!slot->job) continue;
        session_set_budget(slot->s, chunk, answers && !srv->by_rows ? srv->share.amount : INFINITY);
        const SessionState state = session_state(slot->s);
        const bool is_prompt = state.running && state.prompting;
        const bool is_long = is_prompt && state.n_left > min_int(chunk, STEP_ROWS);
        if (is_long && (long_one || (paused >= 0 && paused != i))) continue;
        if (is_prompt && looks) continue;
        if (is_prompt) *round = *round == ROUND_PLAIN && state.n_next == chunk ? ROUND_SHARED : ROUND_OTHER;
        if (is_long) srv->last_prompt = i;
        long_one |= is_long;
        sessions[n] = slot->s;
        slots[n++] = slot;
    }
    return n;
}

// Learns from the time of a round that ran no prompt, or that ran as much of one as the share allows.
static void learn_share(Server *srv, Round round, double taken) {
    const double with = srv->by_rows ? srv->share.amount : session_state(srv->slots[srv->last_prompt].s).work_done;
    const bool whole = srv->by_rows || model_paused(srv->m) >= 0;         // else the chunk had ended before
    if (round == ROUND_PLAIN) share_learn(&srv->share, 0, taken);
    if (round == ROUND_SHARED && whole) share_learn(&srv->share, with, taken);
}

// The probability of the last token, and the n most probable tokens. Overwrites the logits.
static void weigh(float *logits, int vocab, int32_t id, int n, Likely *l) {
    const double sum = logsumexp(logits, vocab);
    *l = (Likely){ .id = id, .n_top = min_int(n, vocab), .logprob = (float)(logits[id] - sum) };
    for (int k = 0; k < l->n_top; k++) {
        int best = 0;
        for (int i = 1; i < vocab; i++) if (logits[i] > logits[best]) best = i;
        l->top[k] = best;
        l->top_logprob[k] = (float)(logits[best] - sum);
        logits[best] = -INFINITY;
    }
}

// Only tokens that the client sees have probabilities.
static void add_likely(Server *srv, Slot *slot, const Event *e) {
    Job *job = slot->job;
    if (job->n_top < 0 || e->kind != EVENT_TOKEN || e->n_ids != 1 || tok_reply_thinks(session_reply(slot->s)) ||
        tok_is_stop(srv->t, e->ids[0])) return;
    Likely l;
    if (!session_logits(slot->s, srv->logits)) return;
    weigh(srv->logits, model_shape(srv->m).vocab, e->ids[0], job->n_top, &l);
    pthread_mutex_lock(&srv->lock);
    if (job->n_likely == job->room_likely) {
        job->room_likely = 2 * job->room_likely + 64;
        job->likely = realloc(job->likely, (size_t)job->room_likely * sizeof *job->likely);
        if (!job->likely) die("out of memory for %d probabilities", job->room_likely);
    }
    job->likely[job->n_likely++] = l;
    pthread_mutex_unlock(&srv->lock);
}

// Remembers the tokens of the answer's last call. The caller holds the lock.
static void remember(Server *srv, const Job *job, const char *id) {
    Replay *replay = &srv->replays[srv->n_replays++ % REPLAYS];
    size_t first = job->said.n;
    while (first > 0 && job->said.ids[first - 1] != srv->t->call_open) first--;
    replay->ids.n = 0;
    snprintf(replay->id, sizeof replay->id, "%s", id);
    for (size_t i = first ? first - 1 : 0; first && i < job->said.n; i++)
        if (tok_push_id(srv->t, &replay->ids, job->said.ids[i]) < 0) die("out of memory for a call");
}

static void add_calls(Server *srv, Job *job, const TokReply *r) {
    for (; job->n_calls < r->n_calls; job->n_calls++) {
        job->calls = realloc(job->calls, (size_t)(job->n_calls + 1) * sizeof *job->calls);
        if (!job->calls) die("out of memory for a tool call");
        const TokCall *from = &r->calls[job->n_calls];
        Call *call = &job->calls[job->n_calls];
        *call = (Call){ 0 };
        append(&call->name, from->name.s, from->name.n);
        append(&call->arguments, from->arguments.s, from->arguments.n);
        new_id(srv, "call_", call->id);
        remember(srv, job, call->id);
    }
}

static void end_job(Server *srv, Slot *slot, const Event *e) {       // the caller holds the lock
    Job *job = slot->job;
    const Turn *turn = session_turn(slot->s);
    job->end = e->end;
    job->turn = *turn;
    job->thought_tokens = turn->thought_tokens;
    job->stop = turn->stop;
    if (e->end == END_ERROR && job->bias)
        refuse(&job->fault, 400, "logit_bias", "logit_bias: it excludes every token");
    if (e->end == END_ERROR && job->options.grammar) refuse(&job->fault, 400, "", "%s", e->error);
    if (e->end == END_ERROR) refuse(&job->fault, 500, "", "%s", e->error);
    if (e->end == END_CANCELLED && srv->draining) refuse(&job->fault, 503, "", "the server is shutting down");
    srv->totals.prompt_tokens += (uint64_t)turn->n_prompt;
    srv->totals.cached_tokens += (uint64_t)job->cached;
    srv->totals.made += (uint64_t)turn->made;
    srv->totals.prompt_seconds += turn->prompt_seconds;
    srv->totals.decode_seconds += turn->decode_seconds;
    slot->job = NULL;
    srv->n_running--;
    job_done(srv, job);
}

static void tell(Server *srv, Slot *slot, const Event *e) {
    Job *job = slot->job;
    add_likely(srv, slot, e);
    pthread_mutex_lock(&srv->lock);
    append(&job->content, e->content.s, e->content.n);
    append(&job->thought, e->thought.s, e->thought.n);
    for (int i = 0; i < e->n_ids && srv->t->call_open >= 0; i++)
        if (tok_push_id(srv->t, &job->said, e->ids[i]) < 0) die("out of memory for an answer");
    add_calls(srv, job, session_reply(slot->s));
    if (e->kind == EVENT_PROMPT) job->run = job->total - (e->total - e->done);
    if (e->kind == EVENT_TOKEN) job->run = job->total;
    if (e->kind == EVENT_END) end_job(srv, slot, e);
    else pthread_cond_broadcast(&job->news);
    pthread_mutex_unlock(&srv->lock);
}

// Runs until a signal asks to stop and the jobs that came before it are answered, or have had DRAIN_SECONDS.
static void run_engine(Server *srv) {
    Session *sessions[MAX_SESSIONS];
    Slot *slots[MAX_SESSIONS];
    Event events[MAX_SESSIONS];
    double give_up = INFINITY;
    Round round;
    for (;;) {
        const double now = seconds();
        const int stop = stop_asked;                   // the same value for the whole round
        if (stop && isinf(give_up)) {
            fprintf(stderr, "# signal %d: finishing running requests, refusing new ones\n", stop);
            give_up = now + DRAIN_SECONDS;
        }
        pthread_mutex_lock(&srv->lock);
        srv->draining = stop;
        look_for_clients(srv);
        end_slow_peers(srv, now);
        clean_queue(srv, now < give_up ? now : INFINITY);
        for (int i = 0; i < n_slots(srv); i++) {
            const Job *job = srv->slots[i].job;
            if (job && (job->gone || now >= job->deadline || now >= give_up)) session_cancel(srv->slots[i].s);
        }
        pthread_mutex_unlock(&srv->lock);
        admit(srv);
        const int n = pick(srv, sessions, slots, &round);
        if (n) {
            const double start = seconds();
            sessions_next(sessions, n, events);
            learn_share(srv, round, seconds() - start);
            for (int i = 0; i < n; i++) tell(srv, slots[i], &events[i]);
        } else if (stop) {
            break;
        } else {
            struct timespec until;
            clock_gettime(CLOCK_REALTIME, &until);
            until.tv_sec += KEEP_ALIVE_SECONDS;
            while (sem_timedwait(&wake, &until) && errno == EINTR) {}
        }
    }
}

// ==== [4] Answers, whole and as streams ==============================================================================

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

struct Exchange {             // a request and its answer
    Server     *srv;
    struct MHD_Connection *connection;
    const char *method;
    const struct Endpoint *route;        // NULL: there is none
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

// ---- /v1/chat/completions ----

static void chunk(Exchange *x) {                       // begins an event of a stream; its delta follows
    put(&x->out, "data: {");
    put_head(&x->out, x, "chat.completion.chunk");
    put(&x->out, ",'choices':[{'index':0,'delta':{");
}

static void put_new_likely(Exchange *x) {              // of tokens that no event has reported yet, if requested
    if (x->job->n_top < 0) return;
    put(&x->out, ",'logprobs':");
    put_likely(&x->out, x, x->n_likely);
    x->n_likely = x->job->n_likely;
}

static void chunk_end(Exchange *x, bool likely) {
    put(&x->out, "}");
    if (likely) put_new_likely(x);
    put(&x->out, ",'finish_reason':null}]}\n\n");
}

static void chat_begin(Exchange *x) {
    chunk(x);
    put(&x->out, "'role':'assistant','content':''");
    chunk_end(x, false);
}

static void chat_text(Exchange *x, TokStr thought, TokStr content) {
    if (thought.n) {
        chunk(x);
        put(&x->out, "'reasoning_content':%t", thought);
        chunk_end(x, false);
    }
    if (!content.n) return;
    chunk(x);
    put(&x->out, "'content':%t", content);
    chunk_end(x, true);
}

static void chat_call(Exchange *x, int i) {
    chunk(x);
    put(&x->out, "'tool_calls':[{'index':%d,", i);
    put_call(&x->out, &x->job->calls[i]);
    put(&x->out, "}]");
    chunk_end(x, false);
}

static void done_marker(Exchange *x) { put(&x->out, "data: [DONE]\n\n"); }

// The last events of both kinds of completion: usage has an event of its own, if it was requested.
static void completion_end(Exchange *x, const char *object) {
    put(&x->out, ",'finish_reason':%s}],", finish_text(x->job));
    put_timings(&x->out, x->job);
    put(&x->out, "}\n\n");
    if (x->include_usage) {
        put(&x->out, "data: {");
        put_head(&x->out, x, object);
        put(&x->out, ",'choices':[],");
        put_usage(&x->out, x->job);
        put(&x->out, "}\n\n");
    }
    done_marker(x);
}

static void chat_end(Exchange *x) {
    chunk(x);
    put(&x->out, "}");
    if (x->n_likely < x->job->n_likely) put_new_likely(x);           // those of a stop string and of calls
    completion_end(x, "chat.completion.chunk");
}

static void chat_whole(Exchange *x, TokText *out) {
    const Job *job = x->job;
    put(out, "{");
    put_head(out, x, "chat.completion");
    put(out, ",'choices':[{'index':0,'message':{'role':'assistant','content':");
    if (job->content.n || !job->n_calls) put(out, "%t", text_of(&job->content));
    else put(out, "null");
    if (job->thought.n) put(out, ",'reasoning_content':%t", text_of(&job->thought));
    for (int i = 0; i < job->n_calls; i++) {
        put(out, i ? ",{" : ",'tool_calls':[{");
        put_call(out, &job->calls[i]);
        put(out, i + 1 == job->n_calls ? "}]" : "}");
    }
    put(out, "},'logprobs':");
    if (job->n_top >= 0) put_likely(out, x, 0);
    else put(out, "null");
    put(out, ",'finish_reason':%s}],", finish_text(job));
    put_usage(out, job);
    put(out, ",");
    put_timings(out, job);
    put(out, "}");
}

static bool same_value(const GgufJson *a, const GgufJson *b, int depth) {
    GgufJson rest = *a, other = *b, key, x, y;
    double m, n;
    size_t n_a = 0, n_b = 0, bytes[2];
    if (a->type != b->type || !depth) return false;
    if (a->type == GGUF_J_NUMBER) return gguf_json_float(a, &m) && gguf_json_float(b, &n) && m == n;
    if (a->type == GGUF_J_STRING) {
        char *s = copy_string(a, &bytes[0]), *t = copy_string(b, &bytes[1]);
        const bool same = bytes[0] == bytes[1] && !memcmp(s, t, bytes[0]);
        free(s);
        free(t);
        return same;
    }
    if (a->type == GGUF_J_ARRAY) {
        bool more;
        while ((more = gguf_json_next(&rest, NULL, &x)) && gguf_json_next(&other, NULL, &y))
            if (!same_value(&x, &y, depth - 1)) return false;
        return !more && !gguf_json_next(&other, NULL, &y);
    }
    if (a->type != GGUF_J_OBJECT) return true;
    while (gguf_json_next(&other, NULL, &y)) n_b++;
    for (; gguf_json_next(&rest, &key, &x); n_a++) {
        size_t n_key;
        char *name = copy_string(&key, &n_key);
        const bool same = strlen(name) == n_key && gguf_json_get(b, name, &y) && same_value(&x, &y, depth - 1);
        free(name);
        if (!same) return false;
    }
    return n_a == n_b;
}

// Finds the first call in ids from token *at on; its tokens are first .. *at - 1. False: there is none.
static bool next_call(const Tokenizer *t, const TokIds *ids, size_t *first, size_t *at) {
    for (*first = *at; *first < ids->n && ids->ids[*first] != t->call_open; ) ++*first;
    for (*at = *first; *at < ids->n && ids->ids[*at] != t->call_close; ) ++*at;
    return *at < ids->n && ++*at;
}

// True if two calls have the same name and arguments.
static bool same_call(Tokenizer *t, TokIds a, TokIds b) {
    const TokIds ids[2] = { a, b };
    TokReply reply[2];
    GgufJson args[2];
    const char *why;
    size_t byte;
    bool ok = true;
    memset(reply, 0, sizeof reply);
    for (int i = 0; i < 2; i++) {
        tok_reply_start(t, &reply[i], NULL, 0);
        for (size_t k = 0; k < ids[i].n; k++)
            if (tok_reply_push(t, &reply[i], ids[i].ids[k]) < 0) die("%s", t->err);
        ok = ok && reply[i].n_calls == 1 && !reply[i].content.n &&
             gguf_json_parse(reply[i].calls->arguments.s, reply[i].calls->arguments.n, &args[i], &byte, &why) == 0;
    }
    ok = ok && reply[0].calls->name.n == reply[1].calls->name.n &&
         !memcmp(reply[0].calls->name.s, reply[1].calls->name.s, reply[0].calls->name.n) &&
         same_value(&args[0], &args[1], 100);
    tok_reply_free(&reply[0]);
    tok_reply_free(&reply[1]);
    return ok;
}

// The tokens of the call with this id, as the model wrote it, to be freed; none: it is not remembered.
static TokIds recall(Server *srv, const char *id) {
    TokIds ids = { 0 };
    pthread_mutex_lock(&srv->lock);
    for (int i = 0; i < REPLAYS && !ids.n; i++)
        if (srv->replays[i].ids.n && !strcmp(srv->replays[i].id, id))
            for (size_t k = 0; k < srv->replays[i].ids.n; k++)
                if (tok_push_id(srv->t, &ids, srv->replays[i].ids.ids[k]) < 0) die("out of memory for a call");
    pthread_mutex_unlock(&srv->lock);
    return ids;
}

static void push_ids(Tokenizer *t, TokIds *to, const int32_t *ids, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (tok_push_id(t, to, ids[i]) < 0) die("%s", t->err);
}

// A prompt has the calls of its messages in the form of the template. The model may have written them in another form,
// with other spaces or another order of arguments. If a call is remembered by its id, and is still the same call, its
// original tokens replace those of the template.
static void replay_calls(Exchange *x, const GgufJson *messages, TokIds *ids) {
    GgufJson rest = *messages, m, calls, call, id;
    TokIds out = { 0 };
    size_t at = 0, first, before = 0;
    bool more = x->t.call_open >= 0 && x->t.call_close >= 0;
    while (more && gguf_json_next(&rest, NULL, &m)) {
        if (!gguf_json_get(&m, "tool_calls", &calls) || calls.type != GGUF_J_ARRAY) continue;
        while (more && gguf_json_next(&calls, NULL, &call)) {
            char name[40];
            more = next_call(&x->t, ids, &first, &at);
            if (!more || call.type != GGUF_J_OBJECT || !gguf_json_get(&call, "id", &id) || id.type != GGUF_J_STRING ||
                id.n >= sizeof name) continue;
            name[gguf_json_string(&id, name)] = 0;
            TokIds said = recall(x->srv, name);
            if (said.n && same_call(&x->t, said, (TokIds){ .ids = ids->ids + first, .n = at - first })) {
                push_ids(&x->t, &out, ids->ids + before, first - before);
                push_ids(&x->t, &out, said.ids, said.n);
                before = at;
            }
            tok_ids_free(&said);
        }
    }
    push_ids(&x->t, &out, ids->ids + before, ids->n - before);
    tok_ids_free(ids);
    *ids = out;
}

typedef struct { TokText messages, thought, answer; } Begun;         // a conversation, and the beginning of its answer

static void begun_free(Begun *b) {
    tok_text_free(&b->messages);
    tok_text_free(&b->thought);
    tok_text_free(&b->answer);
}

// Appends the text of a string, or of the parts of a list. False: it is neither.
static bool append_content(TokText *out, const GgufJson *v) {
    GgufJson rest = *v, part, text;
    if (v->type == GGUF_J_ARRAY) {
        bool ok = true;
        while (ok && gguf_json_next(&rest, NULL, &part))
            ok = gguf_json_get(&part, "text", &text) && text.type == GGUF_J_STRING && append_content(out, &text);
        return ok;
    }
    if (v->type != GGUF_J_STRING) return false;
    size_t n;
    char *s = copy_string(v, &n);
    append(out, s, n);
    free(s);
    return true;
}

// The last message is an answer of the model to be continued: its text becomes the beginning of the next answer.
static bool take_begun(const Request *r, Fault *f, Begun *b, TokChat *chat) {
    GgufJson rest = r->messages, m, last = { 0 }, v;
    if (r->cue)
        return refuse(f, 400, "add_generation_prompt",
                      "add_generation_prompt: expected false with continue_final_message");
    for (; gguf_json_next(&rest, NULL, &m); last = m)
        if (is_given(&last)) append_message(&b->messages, (TokStr){ last.s, last.n });
    const bool calls = (gguf_json_get(&last, "tool_calls", &v) && tok_json_is_set(&v)) ||
                       (gguf_json_get(&last, "tool_responses", &v) && tok_json_is_set(&v));
    const bool text = gguf_json_get(&last, "content", &v) && append_content(&b->answer, &v) && b->answer.n;
    const bool thought = (gguf_json_get(&last, "reasoning", &v) && tok_json_is_set(&v)) ||
                         (gguf_json_get(&last, "reasoning_content", &v) && tok_json_is_set(&v));
    if (!has_role(&last, "assistant") || calls || !text || (thought && !append_content(&b->thought, &v)))
        return refuse(f, 400, "messages", "messages: continue_final_message: expected the last message to be the "
                      "assistant's, with text and without calls");
    chat->messages = text_of(&b->messages);
    chat->thought = text_of(&b->thought);
    chat->answer = text_of(&b->answer);
    return true;
}

// Makes the prompt of a conversation. A later prompt begins with it up to the cue.
static bool chat_ask(Exchange *x, const Request *r) {
    Job *job = x->job;
    const bool tools = is_given(&r->tools) && !gguf_json_is(&r->tool_choice, "none");
    TokChat chat = { .messages = { r->messages.s, r->messages.n }, .think = r->think, .add_cue = true };
    if (tools) chat.tools = (TokStr){ r->tools.s, r->tools.n };
    TokIds part = { 0 };
    Begun begun = { 0 };
    bool ok = check_messages(&r->messages, &x->fault) && (!r->continues || take_begun(r, &x->fault, &begun, &chat));
    if (ok && tok_chat(&x->t, &chat, &job->ids, NULL) < 0)
        ok = refuse(&x->fault, 400, strncmp(x->t.err, "tools", 5) ? "messages" : "tools", "%s", x->t.err);
    if (ok && !r->no_cache) replay_calls(x, &r->messages, &job->ids);
    chat.add_cue = false;
    chat.thought = chat.answer = (TokStr){ NULL, 0 };
    if (ok && tok_chat(&x->t, &chat, &part, NULL) == 0) {
        if (!r->no_cache) replay_calls(x, &r->messages, &part);
        job->checkpoint_at = same_ids(&part, &job->ids);
    }
    tok_ids_free(&part);
    begun_free(&begun);
    if (!ok) return false;
    const bool asked = r->logprobs.type == GGUF_J_TRUE;
    if (is_given(&r->logprobs) && r->logprobs.type != GGUF_J_TRUE && r->logprobs.type != GGUF_J_FALSE)
        return refuse(&x->fault, 400, "logprobs", "logprobs: expected true or false");
    if (r->top_logprobs > 0 && !asked)
        return refuse(&x->fault, 400, "top_logprobs", "top_logprobs needs logprobs");
    if (asked) job->n_top = isnan(r->top_logprobs) ? 0 : (int)r->top_logprobs;
    return true;
}

static const Api chat_api = { "chatcmpl-", NULL, chat_ask, chat_begin, chat_text, chat_call, chat_end, chat_whole };

// ---- /v1/completions ----

static void plain_begin(Exchange *x) { (void)x; }

static size_t n_chars(TokStr s) {                      // code points, counted by their first bytes
    size_t n = 0;
    for (size_t i = 0; i < s.n; i++) n += ((unsigned char)s.s[i] & 0xC0) != 0x80;
    return n;
}

// Appends a token's text as a string; a part of a character as its bytes, bytes:\xe2\x82.
static void put_piece(TokText *out, TokStr piece) {
    TokText bytes = { 0 };
    uint32_t cp;
    int n = 1;
    for (size_t i = 0; i < piece.n && n > 0; i += (size_t)n)
        n = tok_read_utf8((const unsigned char *)piece.s + i, piece.n - i, &cp);
    append(&bytes, "bytes:", 6);
    for (size_t i = 0; n <= 0 && i < piece.n; i++) {
        char hex[8];
        append(&bytes, hex, (size_t)snprintf(hex, sizeof hex, "\\x%02x", (unsigned char)piece.s[i]));
    }
    put(out, "%t", n > 0 ? piece : text_of(&bytes));
    tok_text_free(&bytes);
}

// Appends the most probable tokens by their text, and the sampled one; of tokens with equal text the most probable.
static void put_plain_top(TokText *out, const Tokenizer *t, const Likely *l) {
    put(out, "{");
    for (int k = 0; k <= l->n_top; k++) {
        const TokStr piece = tok_piece(t, k < l->n_top ? l->top[k] : l->id, true);
        bool said = false;
        for (int i = 0; i < k; i++) {
            const TokStr other = tok_piece(t, l->top[i], true);
            said |= other.n == piece.n && !memcmp(other.s, piece.s, piece.n);
        }
        if (said) continue;
        put(out, k ? "," : "");
        put_piece(out, piece);
        put(out, ":%f", (double)(k < l->n_top ? l->top_logprob[k] : l->logprob));
    }
    put(out, "}");
}

// Appends the probabilities of the next tokens whose text was sent; leaves out those of a stop string.
static void put_plain_likely(TokText *out, Exchange *x, TokStr text) {
    const Job *job = x->job;
    const Likely *l = job->likely ? job->likely + x->n_likely : NULL;
    const size_t end = n_chars(text);
    TokText offsets = { 0 };
    int n = 0;
    if (job->n_top < 0) {
        put(out, "null");
        return;
    }
    for (; x->n_likely + n < job->n_likely; n++) {
        const size_t chars = n_chars(tok_piece(&x->t, l[n].id, false));        // 0: the rest of a character
        if (x->chars >= end && chars) break;
        put(&offsets, n ? ",%z" : "%z", x->chars);
        x->chars += chars;
    }
    put(out, "{'tokens':[");
    for (int i = 0; i < n; i++) {
        put(out, i ? "," : "");
        put_piece(out, tok_piece(&x->t, l[i].id, true));
    }
    put(out, "],'token_logprobs':[");
    for (int i = 0; i < n; i++) put(out, i ? ",%f" : "%f", (double)l[i].logprob);
    put(out, job->n_top ? "],'top_logprobs':[" : "],'top_logprobs':null");
    for (int i = 0; job->n_top && i < n; i++) {
        put(out, i ? "," : "");
        put_plain_top(out, &x->t, &l[i]);
    }
    put(out, job->n_top ? "],'text_offset':[%r]}" : ",'text_offset':[%r]}", text_of(&offsets));
    x->n_likely += n;
    tok_text_free(&offsets);
}

static void plain_text(Exchange *x, TokStr thought, TokStr content) {
    (void)thought;
    if (!content.n) return;
    put(&x->out, "data: {");
    put_head(&x->out, x, "text_completion");
    put(&x->out, ",'choices':[{'index':0,'text':%t,'logprobs':", content);
    put_plain_likely(&x->out, x, (TokStr){ x->job->content.s, x->content + content.n });
    put(&x->out, ",'finish_reason':null}]}\n\n");
}

static void plain_call(Exchange *x, int i) { (void)x, (void)i; }

static void plain_end(Exchange *x) {
    put(&x->out, "data: {");
    put_head(&x->out, x, "text_completion");
    put(&x->out, ",'choices':[{'index':0,'text':'','logprobs':");
    if (x->n_likely == x->job->n_likely) put(&x->out, "null");
    else put_plain_likely(&x->out, x, text_of(&x->job->content));    // of tokens without text
    completion_end(x, "text_completion");
}

static void plain_whole(Exchange *x, TokText *out) {
    const Job *job = x->job;
    put(out, "{");
    put_head(out, x, "text_completion");
    put(out, ",'choices':[{'index':0,'text':%t,'logprobs':", text_of(&job->content));
    put_plain_likely(out, x, text_of(&job->content));
    put(out, ",'finish_reason':%s}],", finish_text(job));
    put_usage(out, job);
    put(out, ",");
    put_timings(out, job);
    put(out, "}");
}

// Reads ids given as a list of numbers.
static bool read_ids(Exchange *x, const char *name, const GgufJson *list, TokIds *ids) {
    GgufJson rest = *list, v;
    int64_t id;
    for (size_t i = 0; gguf_json_next(&rest, NULL, &v); i++) {
        if (v.type != GGUF_J_NUMBER || !gguf_json_int(&v, 0, x->t.n_tokens - 1, &id))
            return refuse(&x->fault, 400, name, "%s[%zu]: expected a token id from 0 to %d", name, i,
                          x->t.n_tokens - 1);
        if (tok_push_id(&x->t, ids, (int32_t)id) < 0) die("%s", x->t.err);
    }
    return true;
}

// Makes the prompt of a text, <bos> and a string, or of ids.
static bool plain_ask(Exchange *x, const Request *r) {
    Job *job = x->job;
    GgufJson rest = r->prompt, first = r->prompt, more;
    if (r->prompt.type == GGUF_J_ARRAY && gguf_json_next(&rest, NULL, &first) && first.type == GGUF_J_STRING) {
        if (gguf_json_next(&rest, NULL, &more))
            return refuse(&x->fault, 400, "prompt", "prompt: expected one prompt, got several");
    } else {
        first = r->prompt;
    }
    if (first.type == GGUF_J_ARRAY) {
        job->by_ids = true;
        if (!read_ids(x, "prompt", &first, &job->ids)) return false;
        if (!job->ids.n) return refuse(&x->fault, 400, "prompt", "prompt: expected at least one token");
    } else if (first.type == GGUF_J_STRING) {
        size_t n;
        char *text = copy_string(&first, &n);
        const bool ok = (x->t.bos < 0 || tok_push_id(&x->t, &job->ids, x->t.bos) == 0) &&
                        tok_encode(&x->t, text, n, TOK_PLAIN, &job->ids) == 0;
        free(text);
        if (!ok) return refuse(&x->fault, 400, "prompt", "prompt: %s", x->t.err);
    } else {
        return refuse(&x->fault, 400, "prompt", "prompt: expected a string or a list of token ids");
    }
    int64_t n_top = -1;
    if (is_given(&r->logprobs) &&
        (r->logprobs.type != GGUF_J_NUMBER || !gguf_json_int(&r->logprobs, 0, PLAIN_TOP, &n_top)))
        return refuse(&x->fault, 400, "logprobs", "logprobs: expected an integer from 0 to %d", PLAIN_TOP);
    job->n_top = (int)n_top;
    return true;
}

static const Api plain_api = { "cmpl-", NULL, plain_ask, plain_begin, plain_text, plain_call, plain_end, plain_whole };

// ---- from a request to a job ----

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
// none.
static bool read_format(Exchange *x, const GgufJson *format, TokStr *schema) {
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
    bool required, ok;
    if (!read_format(x, &r->response_format, &schema) || !read_choice(x, &r->tool_choice, &required, wanted))
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
        ok = !calls ? grammar_from_schema(g, &x->srv->vocab, schema) :
             grammar_from_tools(g, &x->srv->vocab, tools, *wanted ? wanted : NULL, !r->one_call, schema);
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

static void add_event_fault(Exchange *x);
static void respond(Exchange *x, int status, const char *type, TokText *body);

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

static void route_chat(Exchange *x) { complete(x, &chat_api); }
static void route_completions(Exchange *x) { complete(x, &plain_api); }

// ==== [5] Dialects: /v1/messages and /v1/responses ===================================================================
// The APIs of other clients. A request is rewritten as one for /v1/chat/completions; the answer has the form of the API
// that was called.

static bool member(const GgufJson *object, const char *name, GgufJson *v) {
    return object->type == GGUF_J_OBJECT && gguf_json_get(object, name, v) && is_given(v);
}

static bool is_type(const GgufJson *object, const char *type) {
    GgufJson v;
    return member(object, "type", &v) && gguf_json_is(&v, type);
}

// Gets a member that has to be an object, if it is there.
static bool object_member(Exchange *x, const GgufJson *root, const char *name, GgufJson *v) {
    if (!member(root, name, v)) return false;
    return v->type == GGUF_J_OBJECT || refuse(&x->fault, 400, name, "%s: expected an object", name);
}

static TokStr raw(const GgufJson *v) { return (TokStr){ v->s, v->n }; }

// Appends the member `from` of an object, if it is there, as the member `to` of the object at the end of *out.
static void take_member(TokText *out, const GgufJson *object, const char *from, const char *to) {
    GgufJson v;
    if (member(object, from, &v)) put(out, ",%s:%r", to, raw(&v));
}

// Parses the body of a dialect. False: it is not an object.
static bool parse_body(Exchange *x, GgufJson *root) {
    size_t at;
    const char *err;
    if (gguf_json_parse(x->body.s ? x->body.s : "", x->body.n, root, &at, &err) < 0)
        return refuse(&x->fault, 400, "", "the request body is not JSON: byte %zu: expected %s", at, err);
    return root->type == GGUF_J_OBJECT || refuse(&x->fault, 400, "", "the request body: expected a JSON object");
}

// Appends a content as the value of "content": a string, or a list of parts of a type that has text.
static bool put_content(Exchange *x, TokText *out, const GgufJson *content, const char *where) {
    GgufJson rest = *content, part, text;
    bool first = true;
    if (content->type != GGUF_J_ARRAY) {
        if (content->type != GGUF_J_STRING)
            return refuse(&x->fault, 400, where, "%s: expected a string or a list", where);
        put(out, "%r", raw(content));
        return true;
    }
    put(out, "[");
    while (gguf_json_next(&rest, NULL, &part)) {
        const bool is_text = is_type(&part, "text") || is_type(&part, "input_text") || is_type(&part, "output_text");
        if (!is_text || !member(&part, "text", &text) || text.type != GGUF_J_STRING)
            return refuse(&x->fault, 400, where, "%s: expected text parts; images and files are not supported",
                          where);
        put(out, first ? "{'type':'text','text':%r}" : ",{'type':'text','text':%r}", raw(&text));
        first = false;
    }
    put(out, "]");
    return true;
}

// Appends the tools, whose parameters have another name in each API. Tools that the server itself would have to run are
// refused.
static bool put_tools(Exchange *x, TokText *out, const GgufJson *root, const char *type, const char *parameters) {
    GgufJson rest, tool, v;
    if (!member(root, "tools", &rest)) return true;
    if (rest.type != GGUF_J_ARRAY) return refuse(&x->fault, 400, "tools", "tools: expected a list");
    put(out, ",'tools':[");
    for (int i = 0; gguf_json_next(&rest, NULL, &tool); i++) {
        const bool ours = !member(&tool, "type", &v) || gguf_json_is(&v, type);
        if (tool.type != GGUF_J_OBJECT || !ours || !member(&tool, "name", &v))
            return refuse(&x->fault, 400, "tools", "tools[%d]: expected a function with a name", i);
        put(out, i ? ",{'type':'function','function':{'name':%r" : "{'type':'function','function':{'name':%r", raw(&v));
        take_member(out, &tool, "description", "description");
        take_member(out, &tool, parameters, "parameters");
        put(out, "}}");
    }
    put(out, "]");
    return true;
}

// Adds a call that the model made before to a list.
static void put_past_call(TokText *list, const GgufJson *id, const GgufJson *name, const GgufJson *arguments) {
    put(list, list->n ? ",{'id':%r,'type':'function'," : "{'id':%r,'type':'function',", raw(id));
    put(list, "'function':{'name':%r,'arguments':%r}}", raw(name), raw(arguments));
}

static void open_event(Exchange *x, const char *type) {              // the caller appends its members and "}\n\n"
    append(&x->out, "event: ", 7);
    append(&x->out, type, strlen(type));
    put(&x->out, "\ndata: {'type':%s", type);
}

// ---- /v1/messages ----

// Appends the results of calls in a message, each as a message of its own.
static bool put_results(Exchange *x, TokText *out, const GgufJson *content) {
    GgufJson rest = *content, part, id, text;
    while (content->type == GGUF_J_ARRAY && gguf_json_next(&rest, NULL, &part)) {
        if (!is_type(&part, "tool_result")) continue;
        if (!member(&part, "tool_use_id", &id))
            return refuse(&x->fault, 400, "messages", "tool_result: expected a tool_use_id");
        put(out, ",{'role':'tool','tool_call_id':%r,'content':", raw(&id));
        if (!member(&part, "content", &text)) put(out, "''");
        else if (!put_content(x, out, &text, "tool_result")) return false;
        put(out, "}");
    }
    return true;
}

// Appends the text, thoughts and calls of a message; put_results() has done the rest of it.
static bool put_blocks(Exchange *x, TokText *out, const GgufJson *content) {
    GgufJson rest = *content, part, id, name, v;
    TokText text = { 0 }, thought = { 0 }, calls = { 0 };
    bool ok = true;
    while (ok && gguf_json_next(&rest, NULL, &part)) {
        if (is_type(&part, "text") && member(&part, "text", &v) && v.type == GGUF_J_STRING) {
            put(&text, text.n ? ",{'type':'text','text':%r}" : "{'type':'text','text':%r}", raw(&v));
        } else if (is_type(&part, "thinking") && member(&part, "thinking", &v) && v.type == GGUF_J_STRING) {
            thought.n = 0;
            put(&thought, "%r", raw(&v));
        } else if (is_type(&part, "tool_use") && member(&part, "id", &id) && member(&part, "name", &name)) {
            if (!member(&part, "input", &v)) v = (GgufJson){ GGUF_J_OBJECT, "{}", 2 };
            put_past_call(&calls, &id, &name, &v);
        } else if (!is_type(&part, "tool_result") && !is_type(&part, "redacted_thinking")) {
            ok = refuse(&x->fault, 400, "messages",
                        "messages: expected text, thinking, tool_use or tool_result; images are not supported");
        }
    }
    if (ok && text.n) put(out, ",'content':[%r]", text_of(&text));
    if (ok && thought.n) put(out, ",'reasoning_content':%r", text_of(&thought));
    if (ok && calls.n) put(out, ",'tool_calls':[%r]", text_of(&calls));
    tok_text_free(&text);
    tok_text_free(&thought);
    tok_text_free(&calls);
    return ok;
}

static bool only_results(const GgufJson *content) {
    GgufJson rest = *content, part;
    size_t n = 0;
    while (content->type == GGUF_J_ARRAY && gguf_json_next(&rest, NULL, &part)) {
        if (!is_type(&part, "tool_result")) return false;
        n++;
    }
    return n > 0;
}

// *continues: the last message is an answer of the assistant to be continued, and not empty.
static bool put_messages(Exchange *x, TokText *out, const GgufJson *root, bool *continues) {
    GgufJson rest, m, role, content;
    if (member(root, "system", &content)) {
        put(out, ",{'role':'system','content':");
        if (!put_content(x, out, &content, "system")) return false;
        put(out, "}");
    }
    if (!member(root, "messages", &rest) || rest.type != GGUF_J_ARRAY)
        return refuse(&x->fault, 400, "messages", "messages: expected a list");
    for (int i = 0; gguf_json_next(&rest, NULL, &m); i++) {
        if (!member(&m, "role", &role) || !(gguf_json_is(&role, "user") || gguf_json_is(&role, "assistant")))
            return refuse(&x->fault, 400, "messages", "messages[%d].role: expected user or assistant", i);
        if (!member(&m, "content", &content) || (content.type != GGUF_J_STRING && content.type != GGUF_J_ARRAY))
            return refuse(&x->fault, 400, "messages", "messages[%d].content: expected a string or a list", i);
        GgufJson after = rest, next;
        *continues = gguf_json_is(&role, "assistant") && content.n > 2;
        if (content.n == 2 && gguf_json_is(&role, "assistant") && !gguf_json_next(&after, NULL, &next)) break;
        if (!put_results(x, out, &content)) return false;
        if (only_results(&content)) continue;
        put(out, ",{'role':%r", raw(&role));
        if (content.type == GGUF_J_STRING) put(out, ",'content':%r", raw(&content));
        else if (!put_blocks(x, out, &content)) return false;
        put(out, "}");
    }
    return true;
}

// Reads which tool to call: auto, none, any, or one by its name.
static void put_choice(TokText *out, const GgufJson *choice) {
    GgufJson name, v;
    if (is_type(choice, "tool") && member(choice, "name", &name))
        put(out, ",'tool_choice':{'type':'function','name':%r}", raw(&name));
    else if (is_type(choice, "any")) put(out, ",'tool_choice':'required'");
    else take_member(out, choice, "type", "tool_choice");
    if (member(choice, "disable_parallel_tool_use", &v)) put(out, ",'parallel_tool_calls':%b", v.type != GGUF_J_TRUE);
}

static bool messages_convert(Exchange *x, TokText *out) {
    GgufJson root, v;
    TokText list = { 0 };
    if (!parse_body(x, &root)) return false;
    bool continues = false, ok = put_messages(x, &list, &root, &continues);
    put(out, "{'messages':[%r]", (TokStr){ list.n ? list.s + 1 : "", list.n - (list.n > 0) });
    tok_text_free(&list);
    if (!ok || !put_tools(x, out, &root, "custom", "input_schema")) return false;
    if (continues) put(out, ",'continue_final_message':true");
    take_member(out, &root, "max_tokens", "max_tokens");
    take_member(out, &root, "temperature", "temperature");
    take_member(out, &root, "top_p", "top_p");
    take_member(out, &root, "top_k", "top_k");
    take_member(out, &root, "stop_sequences", "stop");
    take_member(out, &root, "stream", "stream");
    take_member(out, &root, "output_format", "response_format");
    if (object_member(x, &root, "output_config", &v)) take_member(out, &v, "format", "response_format");
    if (object_member(x, &root, "metadata", &v)) take_member(out, &v, "user_id", "user");
    if (object_member(x, &root, "tool_choice", &v)) put_choice(out, &v);
    if (object_member(x, &root, "thinking", &v)) {
        put(out, ",'chat_template_kwargs':{'enable_thinking':%b}", !is_type(&v, "disabled"));
        take_member(out, &v, "budget_tokens", "reasoning_budget");
    }
    put(out, "}");
    return !x->fault.status;
}

static const char *messages_reason(const Job *job) {
    if (!strcmp(finish_text(job), "tool_calls")) return "tool_use";
    if (!strcmp(finish_text(job), "length")) return "max_tokens";
    return job->end == END_STOP_STRING ? "stop_sequence" : "end_turn";
}

static void put_reason(TokText *out, const Job *job) {
    put(out, "'stop_reason':%s,'stop_sequence':", messages_reason(job));
    if (job->stop) put(out, "%s", job->stop);
    else put(out, "null");
}

static void messages_head(TokText *out, const Exchange *x) {
    put(out, "'id':%s,'type':'message','role':'assistant','model':%s", x->id, x->srv->name);
}

static void messages_begin(Exchange *x) {
    open_event(x, "message_start");
    put(&x->out, ",'message':{");
    messages_head(&x->out, x);
    put(&x->out, ",'content':[],'stop_reason':null,'stop_sequence':null,");
    put(&x->out, "'usage':{'input_tokens':%z,'output_tokens':0}}}\n\n", x->job->ids.n);
}

static void close_block(Exchange *x) {
    if (!x->block) return;
    open_event(x, "content_block_stop");
    put(&x->out, ",'index':%d}\n\n", x->n_blocks++);
    x->block = NULL;
}

static void messages_delta(Exchange *x, const char *block, TokStr text) {
    const bool is_text = !strcmp(block, "text");
    if (!text.n) return;
    if (x->block != block) {
        close_block(x);
        x->block = block;
        open_event(x, "content_block_start");
        put(&x->out, ",'index':%d,'content_block':{'type':%s,%s:''", x->n_blocks, block, block);
        put(&x->out, is_text ? "}}\n\n" : ",'signature':''}}\n\n");
    }
    open_event(x, "content_block_delta");
    put(&x->out, ",'index':%d,'delta':{'type':%s,%s:%t}}\n\n", x->n_blocks, is_text ? "text_delta" : "thinking_delta",
        block, text);
}

static void messages_text(Exchange *x, TokStr thought, TokStr content) {
    static const char thinking[] = "thinking", text[] = "text";
    messages_delta(x, thinking, thought);
    messages_delta(x, text, content);
}

static void messages_call(Exchange *x, int i) {
    static const char tool[] = "tool_use";
    const Call *call = &x->job->calls[i];
    close_block(x);
    x->block = tool;
    open_event(x, "content_block_start");
    put(&x->out, ",'index':%d,'content_block':{'type':'tool_use','id':%s,'name':%t,'input':{}}}\n\n", x->n_blocks,
        call->id, text_of(&call->name));
    open_event(x, "content_block_delta");
    put(&x->out, ",'index':%d,'delta':{'type':'input_json_delta','partial_json':%t}}\n\n", x->n_blocks,
        text_of(&call->arguments));
    close_block(x);
}

static void messages_usage(TokText *out, const Job *job) {
    put(out, "'usage':{'input_tokens':%d,'cache_creation_input_tokens':0,'cache_read_input_tokens':%d,"
        "'output_tokens':%d}", job->turn.n_prompt - job->cached, job->cached, job->turn.made);
}

static void messages_end(Exchange *x) {
    close_block(x);
    open_event(x, "message_delta");
    put(&x->out, ",'delta':{");
    put_reason(&x->out, x->job);
    put(&x->out, "},");
    messages_usage(&x->out, x->job);
    put(&x->out, "}\n\n");
    open_event(x, "message_stop");
    put(&x->out, "}\n\n");
}

static void messages_whole(Exchange *x, TokText *out) {
    const Job *job = x->job;
    put(out, "{");
    messages_head(out, x);
    put(out, ",'content':[");
    const size_t start = out->n;
    if (job->thought.n) put(out, "{'type':'thinking','thinking':%t,'signature':''}", text_of(&job->thought));
    if (job->content.n) {
        put(out, out->n > start ? "," : "");
        put(out, "{'type':'text','text':%t}", text_of(&job->content));
    }
    for (int i = 0; i < job->n_calls; i++) {
        const Call *call = &job->calls[i];
        put(out, out->n > start ? "," : "");
        put(out, "{'type':'tool_use','id':%s,'name':%t,'input':%r}", call->id, text_of(&call->name),
            text_of(&call->arguments));
    }
    put(out, "],");
    put_reason(out, job);
    put(out, ",");
    messages_usage(out, job);
    put(out, "}");
}

static const Api messages_api = { "msg_", messages_convert, chat_ask, messages_begin, messages_text, messages_call,
                                  messages_end, messages_whole };

static void route_messages(Exchange *x) { complete(x, &messages_api); }

static void route_count(Exchange *x) {
    Request r;
    TokText out = { 0 };
    x->job = new_job(x);
    if (!read_question(x, &messages_api, &r)) return;
    put(&out, "{'input_tokens':%z}", x->job->ids.n);
    respond(x, 200, "application/json", &out);
}

// ---- /v1/responses: the server stores none, so each request contains its whole conversation ----

// Earlier answers are items; the thoughts and calls of a turn are collected here until they make one message.
typedef struct { TokText thought, calls; } Said;

static void put_said(TokText *out, Said *said) {       // appends the thought as a member of a message
    if (said->thought.n) put(out, ",'reasoning_content':%r", text_of(&said->thought));
    said->thought.n = 0;
}

static void put_said_calls(TokText *out, Said *said) {
    if (!said->calls.n) return;
    put(out, ",{'role':'assistant','tool_calls':[%r]", text_of(&said->calls));
    put_said(out, said);
    put(out, "}");
    said->calls.n = 0;
}

// Takes item i of the input if it is a thought or a call; it may be refused. False: it is neither.
static bool take_said(Exchange *x, Said *said, const GgufJson *item, int i) {
    GgufJson id = { .type = GGUF_J_NULL }, name = id, v, part;
    if (is_type(item, "reasoning")) {
        const bool any = member(item, "content", &v) && v.type == GGUF_J_ARRAY && gguf_json_next(&v, NULL, &part);
        said->thought.n = 0;
        if (any && member(&part, "text", &v)) put(&said->thought, "%r", raw(&v));
        return true;
    }
    if (!is_type(item, "function_call")) return false;
    if (!member(item, "call_id", &id) || !member(item, "name", &name) || !member(item, "arguments", &v))
        return !refuse(&x->fault, 400, "input", "input[%d]: expected call_id, name and arguments", i);
    put_past_call(&said->calls, &id, &name, &v);
    return true;
}

// Appends item i of the input as a message.
static bool put_item(Exchange *x, TokText *out, Said *said, const GgufJson *item, int i) {
    GgufJson role = { GGUF_J_STRING, "\"tool\"", 6 }, id, v;
    if (take_said(x, said, item, i)) return !x->fault.status;
    put_said_calls(out, said);
    if (is_type(item, "function_call_output")) {
        if (!member(item, "call_id", &id) || !member(item, "output", &v))
            return refuse(&x->fault, 400, "input", "input[%d]: expected call_id and output", i);
        put(out, ",{'role':'tool','tool_call_id':%r,'content':", raw(&id));
    } else {
        if ((member(item, "type", &v) && !gguf_json_is(&v, "message")) || !member(item, "role", &role))
            return refuse(&x->fault, 400, "input", "input[%d]: expected a message, a function_call or its output", i);
        if (!member(item, "content", &v)) return refuse(&x->fault, 400, "input", "input[%d]: expected content", i);
        put(out, ",{'role':%r,'content':", raw(&role));
    }
    if (!put_content(x, out, &v, "input")) return false;
    if (gguf_json_is(&role, "assistant")) put_said(out, said);
    said->thought.n = 0;
    put(out, "}");
    return true;
}

static bool put_input(Exchange *x, TokText *out, const GgufJson *root) {
    GgufJson rest, item, v;
    Said said = { 0 };
    if (member(root, "instructions", &v)) put(out, ",{'role':'system','content':%r}", raw(&v));
    if (!member(root, "input", &rest) || (rest.type != GGUF_J_STRING && rest.type != GGUF_J_ARRAY))
        return refuse(&x->fault, 400, "input", "input: expected a string or a list");
    if (rest.type == GGUF_J_STRING) {
        put(out, ",{'role':'user','content':%r}", raw(&rest));
        return true;
    }
    bool ok = true;
    for (int i = 0; ok && gguf_json_next(&rest, NULL, &item); i++) ok = put_item(x, out, &said, &item, i);
    put_said_calls(out, &said);
    tok_text_free(&said.thought);
    tok_text_free(&said.calls);
    return ok;
}

static bool responses_convert(Exchange *x, TokText *out) {
    static const char *const absent[] = { "previous_response_id", "conversation", "prompt" };
    GgufJson root, v;
    TokText list = { 0 };
    if (!parse_body(x, &root)) return false;
    for (size_t i = 0; i < sizeof absent / sizeof *absent; i++)
        if (member(&root, absent[i], &v))
            return refuse(&x->fault, 400, absent[i], "%s: this server stores no conversations; send the whole "
                                                     "conversation",
                          absent[i]);
    if (member(&root, "background", &v) && v.type == GGUF_J_TRUE)
        return refuse(&x->fault, 400, "background", "background is not supported");
    const bool ok = put_input(x, &list, &root);
    put(out, "{'messages':[%r]", (TokStr){ list.n ? list.s + 1 : "", list.n - (list.n > 0) });
    tok_text_free(&list);
    if (!ok || !put_tools(x, out, &root, "function", "parameters")) return false;
    take_member(out, &root, "max_output_tokens", "max_tokens");
    take_member(out, &root, "user", "user");
    take_member(out, &root, "temperature", "temperature");
    take_member(out, &root, "top_p", "top_p");
    take_member(out, &root, "stream", "stream");
    take_member(out, &root, "tool_choice", "tool_choice");
    take_member(out, &root, "parallel_tool_calls", "parallel_tool_calls");
    if (object_member(x, &root, "reasoning", &v)) take_member(out, &v, "effort", "reasoning_effort");
    if (object_member(x, &root, "text", &v)) take_member(out, &v, "format", "response_format");
    put(out, "}");
    return !x->fault.status;
}

static bool is_cut(const Job *job) { return !strcmp(finish_text(job), "length"); }

// The parts of an answer are items: number 0 is the thought, if there is one, then the text, then the calls.
static void item_id(const Exchange *x, const char *prefix, int i, char out[64]) {
    snprintf(out, 64, "%s%s_%d", prefix, x->id + 5, i);
}

static void put_thought_item(TokText *out, const Exchange *x, int i) {
    char id[64];
    item_id(x, "rs_", i, id);
    put(out, "{'type':'reasoning','id':%s,'summary':[],'content':[{'type':'reasoning_text','text':%t}]}", id,
        text_of(&x->job->thought));
}

static void put_text_item(TokText *out, const Exchange *x, int i) {
    char id[64];
    item_id(x, "msg_", i, id);
    put(out, "{'type':'message','id':%s,'status':'completed','role':'assistant','content':[", id);
    put(out, "{'type':'output_text','text':%t,'annotations':[]}]}", text_of(&x->job->content));
}

static void put_call_item(TokText *out, const Exchange *x, int i, const Call *call, bool whole) {
    char id[64];
    item_id(x, "fc_", i, id);
    put(out, "{'type':'function_call','id':%s,'call_id':%s,'name':%t,'arguments':%t,'status':%s}", id, call->id,
        text_of(&call->name), whole ? text_of(&call->arguments) : str(""), whole ? "completed" : "in_progress");
}

// Appends the response as an object; it has output when it is complete.
static void put_response(TokText *out, const Exchange *x, bool done) {
    const Job *job = x->job;
    const Turn *t = &job->turn;
    int n = 0;
    put(out, "{'id':%s,'object':'response','created_at':%z,'model':%s,'status':%s,'error':null", x->id,
        x->created, x->srv->name, !done ? "in_progress" : is_cut(job) ? "incomplete" : "completed");
    put(out, ",'incomplete_details':");
    put(out, done && is_cut(job) ? "{'reason':'max_output_tokens'}" : "null");
    put(out, ",'parallel_tool_calls':%b,'store':false,'tools':[],'output':[", !x->one_call);
    if (done && job->thought.n) put_thought_item(out, x, n++);
    if (done && (job->content.n || !job->n_calls)) {
        put(out, n ? "," : "");
        put_text_item(out, x, n++);
    }
    for (int i = 0; done && i < job->n_calls; i++) {
        put(out, n ? "," : "");
        put_call_item(out, x, n++, &job->calls[i], true);
    }
    put(out, "]");
    if (done)
        put(out, ",'usage':{'input_tokens':%d,'input_tokens_details':{'cached_tokens':%d},'output_tokens':%d,"
            "'output_tokens_details':{'reasoning_tokens':%d},'total_tokens':%d}", t->n_prompt, job->cached, t->made,
            job->thought_tokens, t->n_prompt + t->made);
    put(out, "}");
}

static void event(Exchange *x, const char *type) {     // like open_event(), with its number
    open_event(x, type);
    put(&x->out, ",'sequence_number':%d", x->n_events++);
}

static void responses_begin(Exchange *x) {
    event(x, "response.created");
    put(&x->out, ",'response':");
    put_response(&x->out, x, false);
    put(&x->out, "}\n\n");
    event(x, "response.in_progress");
    put(&x->out, ",'response':");
    put_response(&x->out, x, false);
    put(&x->out, "}\n\n");
}

static const char text_block[] = "output_text", thought_block[] = "reasoning_text";

static void put_part(Exchange *x, const char *id, TokStr text) {
    put(&x->out, ",'item_id':%s,'output_index':%d,'content_index':0,'part':", id, x->n_blocks);
    put(&x->out, "{'type':'output_text','text':%t,'annotations':[]}}\n\n", text);
}

// Closes the open item. Its full text is all text of that kind so far.
static void close_item(Exchange *x) {
    const bool is_text = x->block == text_block;
    char id[64];
    if (!x->block) return;
    item_id(x, is_text ? "msg_" : "rs_", x->n_blocks, id);
    event(x, is_text ? "response.output_text.done" : "response.reasoning_text.done");
    put(&x->out, ",'item_id':%s,'output_index':%d,'content_index':0,'text':%t}\n\n", id, x->n_blocks,
        text_of(is_text ? &x->job->content : &x->job->thought));
    if (is_text) {
        event(x, "response.content_part.done");
        put_part(x, id, text_of(&x->job->content));
    }
    event(x, "response.output_item.done");
    put(&x->out, ",'output_index':%d,'item':", x->n_blocks);
    if (is_text) put_text_item(&x->out, x, x->n_blocks);
    else put_thought_item(&x->out, x, x->n_blocks);
    put(&x->out, "}\n\n");
    x->block = NULL;
    x->n_blocks++;
}

static void responses_delta(Exchange *x, const char *block, TokStr text) {
    const bool is_text = block == text_block;
    char id[64];
    if (!text.n) return;
    if (x->block != block) close_item(x);
    item_id(x, is_text ? "msg_" : "rs_", x->n_blocks, id);
    if (!x->block) {
        event(x, "response.output_item.added");
        put(&x->out, ",'output_index':%d,'item':{'id':%s,", x->n_blocks, id);
        put(&x->out, is_text ? "'type':'message','status':'in_progress','role':'assistant','content':[]}}\n\n"
                             : "'type':'reasoning','summary':[],'content':[]}}\n\n");
    }
    if (!x->block && is_text) {
        event(x, "response.content_part.added");
        put_part(x, id, str(""));
    }
    x->block = block;
    event(x, is_text ? "response.output_text.delta" : "response.reasoning_text.delta");
    put(&x->out, ",'item_id':%s,'output_index':%d,'content_index':0,'delta':%t}\n\n", id, x->n_blocks, text);
}

static void responses_text(Exchange *x, TokStr thought, TokStr content) {
    responses_delta(x, thought_block, thought);
    responses_delta(x, text_block, content);
}

static void responses_call(Exchange *x, int i) {
    const Call *call = &x->job->calls[i];
    char id[64];
    close_item(x);
    item_id(x, "fc_", x->n_blocks, id);
    event(x, "response.output_item.added");
    put(&x->out, ",'output_index':%d,'item':", x->n_blocks);
    put_call_item(&x->out, x, x->n_blocks, call, false);
    put(&x->out, "}\n\n");
    event(x, "response.function_call_arguments.delta");
    put(&x->out, ",'item_id':%s,'output_index':%d,'delta':%t}\n\n", id, x->n_blocks, text_of(&call->arguments));
    event(x, "response.function_call_arguments.done");
    put(&x->out, ",'item_id':%s,'output_index':%d,'name':%t,'arguments':%t}\n\n", id, x->n_blocks, text_of(&call->name),
        text_of(&call->arguments));
    event(x, "response.output_item.done");
    put(&x->out, ",'output_index':%d,'item':", x->n_blocks);
    put_call_item(&x->out, x, x->n_blocks++, call, true);
    put(&x->out, "}\n\n");
}

static void responses_end(Exchange *x) {
    close_item(x);
    event(x, is_cut(x->job) ? "response.incomplete" : "response.completed");
    put(&x->out, ",'response':");
    put_response(&x->out, x, true);
    put(&x->out, "}\n\n");
}

static void responses_whole(Exchange *x, TokText *out) { put_response(out, x, true); }

static const Api responses_api = { "resp_", responses_convert, chat_ask, responses_begin, responses_text,
                                   responses_call, responses_end, responses_whole };

static void route_responses(Exchange *x) { complete(x, &responses_api); }

// ==== [6] Other endpoints ============================================================================================

static const char *header(const Exchange *x, const char *name) {
    return MHD_lookup_connection_value(x->connection, MHD_HEADER_KIND, name);
}

static bool is_anthropic(const Exchange *x) { return header(x, "anthropic-version"); }

static void respond_json(Exchange *x, TokText *out) { respond(x, 200, "application/json", out); }

static void route_health(Exchange *x) {
    TokText out = { 0 };
    pthread_mutex_lock(&x->srv->lock);
    const bool draining = x->srv->draining;
    pthread_mutex_unlock(&x->srv->lock);
    put(&out, "{'status':%s}", draining ? "draining" : "ok");
    respond(x, draining ? 503 : 200, "application/json", &out);
}

static void put_model(TokText *out, const Server *srv, bool anthropic) {
    if (anthropic) {
        char day[32];
        struct tm utc;
        const time_t created = (time_t)srv->created;
        strftime(day, sizeof day, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&created, &utc));
        put(out, "{'type':'model','id':%s,'display_name':%s,'created_at':%s}", srv->name, srv->name, day);
        return;
    }
    const ModelShape shape = model_shape(srv->m);
    put(out, "{'id':%s,'object':'model','created':%z,'owned_by':'gemma4','meta':", srv->name, (size_t)srv->created);
    put(out, "{'n_vocab':%d,'n_ctx':%d,'n_embd':%d}}", shape.vocab, context_size(srv), shape.dim);
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

static void route_props(Exchange *x) {
    const Server *srv = x->srv;
    const SampleParams *p = &srv->o.sampling;
    TokText out = { 0 };
    put(&out, "{'model':%s,'n_ctx':%d,'total_slots':%d,'chat_template':%s,'modalities':{'vision':false,'audio':false},"
        "'default_generation_settings':{'n_predict':%d,'temperature':%f,'top_k':%d,'top_p':%f,'min_p':%f,"
        "'repeat_penalty':%f,'presence_penalty':%f,'frequency_penalty':%f,'thinking':%b}}", srv->name,
        context_size(srv), n_slots(srv), srv->t->large_variant ? "large" : "small", srv->o.n_predict,
        (double)p->temperature, (int)p->top_k, (double)p->top_p, (double)p->min_p, (double)p->repeat,
        (double)p->presence, (double)p->frequency, srv->o.think);
    respond_json(x, &out);
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
    metric(&out, "requests_running", "gauge", "Requests running.", running);
    metric(&out, "requests_waiting", "gauge", "Requests waiting in the queue.", queued);
    metric(&out, "slots", "gauge", "Sessions.", n_slots(srv));
    metric(&out, "connections", "gauge", "Open connections, including this one.", peers);
    pthread_mutex_lock(&srv->store.lock);
    const int parked = srv->store.n, resumed = srv->store.n_resumed;
    const double memory = (double)srv->store.used, files = (double)srv->store.file_used;
    pthread_mutex_unlock(&srv->store.lock);
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
    refuse(&x->fault, 400, "content", "content: %s", x->t.err);
}

static void route_detokenize(Exchange *x) {
    Request r;
    TokIds ids = { 0 };
    TokText text = { 0 }, out = { 0 };
    TokStream stream = { 0 };
    if (!read_request(&r, &x->fault, text_of(&x->body), &x->srv->o)) return;
    if (!is_given(&r.tokens)) {
        refuse(&x->fault, 400, "tokens", "tokens: expected a list of token ids, got none");
        return;
    }
    if (read_ids(x, "tokens", &r.tokens, &ids)) {
        char *piece = alloc_or_die(x->t.stream_cap, 1);
        for (size_t i = 0; i < ids.n; i++)
            append(&text, piece, tok_stream_push(&x->t, &stream, ids.ids[i], true, piece, x->t.stream_cap));
        append(&text, piece, tok_stream_flush(&stream, piece, x->t.stream_cap));
        free(piece);
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
    if (!read_request(&r, &x->fault, text_of(&x->body), &x->srv->o) || !check_messages(&r.messages, &x->fault)) return;
    TokChat chat = { .messages = { r.messages.s, r.messages.n }, .think = r.think, .add_cue = r.continues ||
                     !r.no_cue };
    if (is_given(&r.tools)) chat.tools = (TokStr){ r.tools.s, r.tools.n };
    const bool ok = !r.continues || take_begun(&r, &x->fault, &begun, &chat);
    if (ok && tok_chat(&x->t, &chat, &ids, &text) == 0) {
        put(&out, "{'prompt':%t,'n_tokens':%z}", text_of(&text), ids.n);
        respond_json(x, &out);
    } else if (ok) {
        refuse(&x->fault, 400, strncmp(x->t.err, "tools", 5) ? "messages" : "tools", "%s", x->t.err);
    }
    begun_free(&begun);
    tok_text_free(&text);
    tok_ids_free(&ids);
}

// The chat page, web/index.html. It is self-contained, asks the user for the key, and may connect to this server only.
// A browser that has it cached asks whether it has changed.
static const char chat_page[] =
#include "page.h"
;

static void route_page(Exchange *x) {
    static const char policy[] = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src "
                                 "data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'";
    char tag[24];
    snprintf(tag, sizeof tag, "\"%016" PRIx64 "\"", hash_bytes(chat_page, sizeof chat_page));
    const char *held = header(x, "If-None-Match");
    const bool same = held && strstr(held, tag);
    struct MHD_Response *r =
        MHD_create_response_from_buffer(same ? 0 : sizeof chat_page - 1, (void *)chat_page, MHD_RESPMEM_PERSISTENT);
    if (!r) die("out of memory for a page");
    MHD_add_response_header(r, "Content-Type", "text/html; charset=utf-8");
    MHD_add_response_header(r, "Content-Security-Policy", policy);
    MHD_add_response_header(r, "X-Content-Type-Options", "nosniff");
    MHD_add_response_header(r, "Referrer-Policy", "no-referrer");
    MHD_add_response_header(r, "Cache-Control", "no-cache");
    MHD_add_response_header(r, "ETag", tag);
    x->answered = true;
    x->status = same ? 304 : 200;
    MHD_queue_response(x->connection, (unsigned)x->status, r);
    MHD_destroy_response(r);
}

// ==== [7] HTTP: checks, routes =======================================================================================

typedef struct Endpoint {
    const char *method, *path;         // a path that ends in / matches all that begin with it, except /
    void (*answer)(Exchange *x);
    bool open;                // needs no key
} Endpoint;

static const Endpoint routes[] = {
    { "GET", "/", route_page, true }, { "GET", "/index.html", route_page, true },
    { "GET", "/health", route_health, true }, { "GET", "/v1/models", route_models, false },
    { "GET", "/v1/models/", route_model, false },
    { "GET", "/props", route_props, false }, { "GET", "/slots", route_slots, false },
    { "GET", "/metrics", route_metrics, false }, { "POST", "/tokenize", route_tokenize, false },
    { "POST", "/detokenize", route_detokenize, false }, { "POST", "/apply-template", route_template, false },
    { "POST", "/v1/chat/completions", route_chat, false }, { "POST", "/v1/completions", route_completions, false },
    { "POST", "/v1/messages", route_messages, false }, { "POST", "/v1/messages/count_tokens", route_count, false },
    { "POST", "/v1/responses", route_responses, false },
};

static void respond(Exchange *x, int status, const char *type, TokText *body) {
    struct MHD_Response *r = MHD_create_response_from_buffer(body->n, body->s, MHD_RESPMEM_MUST_FREE);
    if (!r) die("out of memory for a response");
    MHD_add_response_header(r, "Content-Type", type);
    MHD_add_response_header(r, "X-Content-Type-Options", "nosniff");
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

// True for names of this machine's loopback and for the name given to listen at, with or without a port.
static bool is_local_name(const char *host, const char *own) {
    const char *const names[] = { "localhost", "127.0.0.1", "[::1]", own };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const size_t n = strlen(names[i]);
        if (!strncasecmp(host, names[i], n) && (!host[n] || host[n] == ':')) return true;
    }
    return false;
}

static bool same_key(const char *a, const char *b) {   // its time does not depend on where they differ
    const size_t n = strlen(a), m = strlen(b);
    unsigned char differ = n != m;
    for (size_t i = 0; i < n; i++) differ |= (unsigned char)(a[i] ^ b[m ? i % m : 0]);
    return !differ;
}

// Admits a request. On a loopback address the Host header has to name it, which keeps out web pages whose name points
// to it (DNS rebinding); web pages have to be of our own origin; the key has to be right.
static bool check_caller(Exchange *x) {
    const char *host = header(x, "Host"), *origin = header(x, "Origin"), *key = x->srv->o.api_key;
    if (x->srv->loopback && !(host && is_local_name(host, x->srv->o.host)))
        return refuse(&x->fault, 403, "", "Host: expected localhost or a loopback address");
    if (origin) {
        const char *at = strstr(origin, "://");
        if (!at || !host || strcasecmp(at + 3, host))
            return refuse(&x->fault, 403, "", "Origin: expected none or the address of this server");
    }
    if (!key || (x->route && x->route->open)) return true;
    const char *bearer = header(x, "Authorization"), *other = header(x, "x-api-key");
    if (bearer && !strncasecmp(bearer, "Bearer ", 7) && same_key(bearer + 7, key)) return true;
    if (other && same_key(other, key)) return true;
    return refuse(&x->fault, 401, "", "expected the API key: Authorization: Bearer KEY");
}

static void find_route(Exchange *x, const char *method, const char *url) {
    static const char *const known[] = { "GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS" };
    x->method = "other";
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) if (!strcmp(known[i], method)) x->method = known[i];
    for (size_t i = 0; i < sizeof routes / sizeof *routes; i++) {
        const char *path = routes[i].path;
        const size_t n = strlen(path);
        const bool takes_more = n > 1 && path[n - 1] == '/' && !strncmp(path, url, n) && url[n];
        if (takes_more) snprintf(x->rest, sizeof x->rest, "%s", url + n);
        if (takes_more || !strcmp(path, url)) x->route = &routes[i];
    }
}

static bool check_route(Exchange *x) {
    if (!x->route) return refuse(&x->fault, 404, "", "unknown endpoint; docs/server.md lists them");
    if (strcmp(x->route->method, strcmp(x->method, "HEAD") ? x->method : "GET"))
        return refuse(&x->fault, 405, "", "%s: expected method %s", x->route->path, x->route->method);
    return true;
}

static void on_connection(void *cls, struct MHD_Connection *connection, void **context,
                          enum MHD_ConnectionNotificationCode code) {
    Server *srv = cls;
    pthread_mutex_lock(&srv->lock);
    if (code == MHD_CONNECTION_NOTIFY_STARTED) {
        Peer *p = alloc_or_die(1, sizeof *p);
        const union MHD_ConnectionInfo *info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
        *p = (Peer){ .next = srv->peers, .link = &srv->peers, .fd = info ? info->connect_fd : -1, .quiet = seconds() };
        if (p->next) p->next->link = &p->next;
        srv->peers = p;
        srv->n_peers++;
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

static Exchange *new_exchange(Server *srv, struct MHD_Connection *connection, const char *method, const char *url) {
    Exchange *x = alloc_or_die(1, sizeof *x);
    *x = (Exchange){ .srv = srv, .connection = connection, .started = seconds(), .created = (size_t)time(NULL),
                     .t = *srv->t };
    pthread_mutex_lock(&srv->lock);
    srv->n_open++;
    set_quiet(connection, INFINITY);
    pthread_mutex_unlock(&srv->lock);
    find_route(x, method, url);
    if (check_caller(x)) check_route(x);               // others do not learn which paths exist
    const char *length = header(x, "Content-Length");
    if (length && strtoull(length, NULL, 10) > srv->o.max_body) x->too_large = true;
    return x;
}

static void refuse_large(Exchange *x) {
    x->fault.status = 0;
    refuse(&x->fault, 413, "", "the request body: expected at most %zu bytes", x->srv->o.max_body);
    respond_fault(x);
}

// libmicrohttpd calls this after the headers, for each piece of the body, and at its end.
static enum MHD_Result on_request(void *cls, struct MHD_Connection *connection, const char *url, const char *method,
                                  const char *version, const char *data, size_t *n, void **con_cls) {
    Server *srv = cls;
    Exchange *x = *con_cls;
    (void)version;
    if (!x) {
        *con_cls = x = new_exchange(srv, connection, method, url);
        if (x->too_large) refuse_large(x);
        return MHD_YES;
    }
    if (x->answered) {
        *n = 0;
        return MHD_YES;
    }
    if (*n) {
        if (seconds() - x->started > BODY_SECONDS) return MHD_NO;
        x->too_large |= x->body.n + *n > srv->o.max_body;
        if (!x->too_large && !x->fault.status && !tok_text_append(&x->body, data, *n)) return MHD_NO;
        *n = 0;
        return MHD_YES;
    }
    if (x->too_large) {
        refuse_large(x);
        return MHD_YES;
    }
    if (!x->fault.status) x->route->answer(x);
    if (!x->answered) respond_fault(x);
    return MHD_YES;
}

// Logs one line of JSON for each request; its text only if the options ask for it.
static TokText log_line(const Exchange *x, int status) {
    TokText line = { 0 };
    const Job *job = x->job;
    put(&line, "{'time':%z,'method':%s,'path':%s,'status':%d,'ms':%f", (size_t)time(NULL), x->method,
        x->route ? x->route->path : "other", status, 1e3 * (seconds() - x->started));
    if (job && job->started && job->done)
        put(&line, ",'id':%s,'prompt':%d,'cached':%d,'generated':%d,'prompt_ms':%f,'decode_ms':%f,'end':%s", x->id,
            job->turn.n_prompt, job->cached, job->turn.made, 1e3 * job->turn.prompt_seconds,
            1e3 * job->turn.decode_seconds, end_text[job->end]);
    if (x->srv->o.log_text) put(&line, ",'request':%t", text_of(&x->body));
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
    pthread_mutex_lock(&srv->lock);
    srv->totals.http[status / 100]++;
    TokText line = log_line(x, status);
    if (x->job) {
        x->job->gone = true;
        job_drop(x->job);
    }
    srv->n_open--;
    set_quiet(connection, seconds());
    pthread_mutex_unlock(&srv->lock);
    sem_post(&wake);
    fwrite(line.s, 1, line.n, stderr);                 // a slow log delays this connection alone
    tok_text_free(&line);
    tok_text_free(&x->body);
    tok_text_free(&x->out);
    free(x);
    *con_cls = NULL;
}

// ==== [8] The verb ===================================================================================================

static bool is_loopback(const struct sockaddr *a) {
    const void *in = a;
    if (a->sa_family == AF_INET6) return IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)in)->sin6_addr);
    return ntohl(((const struct sockaddr_in *)in)->sin_addr.s_addr) >> 24 == 127;
}

// Listens where the options say, and reports the address.
static int listen_at(Server *srv) {
    const ServeOptions *o = &srv->o;
    struct addrinfo hints = { .ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV }, *a;
    char port[16], host[64];
    struct sockaddr_storage bound;
    socklen_t n = sizeof bound;
    const int on = 1;
    snprintf(port, sizeof port, "%d", o->port);
    const int err = getaddrinfo(o->host, port, &hints, &a);
    if (err) die("--host: %s: %s", o->host, gai_strerror(err));
    const int fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) || bind(fd, a->ai_addr, a->ai_addrlen) ||
        listen(fd, 128) || getsockname(fd, (struct sockaddr *)&bound, &n) ||
        getnameinfo((struct sockaddr *)&bound, n, host, sizeof host, port, sizeof port,
                    NI_NUMERICHOST | NI_NUMERICSERV))
        die("--port: %s:%d: %s", o->host, o->port, strerror(errno));
    freeaddrinfo(a);
    srv->loopback = is_loopback((struct sockaddr *)&bound);
    if (!srv->loopback && !o->api_key)
        fprintf(stderr, "# warning: --host %s is open to the network and no --api-key is set\n", host);
    fprintf(stderr, strchr(host, ':') ? "# serving at http://[%s]:%s\n" : "# serving at http://%s:%s\n", host, port);
    return fd;
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

// Serves until SIGTERM or SIGINT.
static void serve(Model *m, Tokenizer *t, const ServeOptions *o) {
    Server srv = { .m = m, .t = t, .o = *o, .created = time(NULL), .lock = PTHREAD_MUTEX_INITIALIZER };
    const int n_seqs = n_slots(&srv);
    srv.last = &srv.first;
    srv.slots = alloc_or_die((size_t)n_seqs, sizeof *srv.slots);
    srv.logits = alloc_or_die((size_t)model_shape(m).vocab, sizeof *srv.logits);
    srv.replays = alloc_or_die(REPLAYS, sizeof *srv.replays);
    if (!grammar_vocab_init(&srv.vocab, t)) die("out of memory for the token tree of the grammar");
    measure_pace(m, t, &o->drafting);
    for (int i = 0; i < n_seqs; i++) srv.slots[i].s = session_open(m, t, i);
    srv.chunk = o->chunk ? o->chunk : model_options(m)->n_batch;
    srv.by_rows = chunk_is_free(m, srv.chunk);
    srv.share = srv.by_rows ? share_of(min_int(SHARE_LEAST, srv.chunk), srv.chunk) : share_of(1, INFINITY);
    open_store(&srv);
    if (getrandom(&srv.salt, sizeof srv.salt, 0) != sizeof srv.salt) srv.salt = (uint64_t)time(NULL);
    name_model(&srv);
    sem_init(&wake, 0, 0);
    const struct sigaction act = { .sa_handler = on_stop, .sa_flags = (int)SA_RESTART };
    sigaction(SIGTERM, &act, NULL);
    sigaction(SIGINT, &act, NULL);
    signal(SIGPIPE, SIG_IGN);
    const int fd = listen_at(&srv);
    struct MHD_Daemon *d = MHD_start_daemon(
        MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_THREAD_PER_CONNECTION | MHD_USE_POLL | MHD_USE_ITC, 0, NULL, NULL,
        on_request, &srv, MHD_OPTION_LISTEN_SOCKET, fd, MHD_OPTION_CONNECTION_LIMIT, (unsigned)MAX_CONNECTIONS,
        MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)IDLE_SECONDS, MHD_OPTION_THREAD_STACK_SIZE, (size_t)1 << 20,
        MHD_OPTION_NOTIFY_COMPLETED, on_completed, &srv, MHD_OPTION_NOTIFY_CONNECTION, on_connection, &srv,
        MHD_OPTION_END);
    if (!d) die("--port: libmicrohttpd could not start a server");
    run_engine(&srv);
    for (int open = 1, k = 0; open && k < 500; k++) {  // the last answers are still being sent
        pthread_mutex_lock(&srv.lock);
        open = srv.n_open;
        pthread_mutex_unlock(&srv.lock);
        if (open) usleep(10000);
    }
    MHD_stop_daemon(d);
    for (int i = 0; i < n_seqs && o->session_dir; i++) {             // the most recently used one last
        Slot *slot = oldest_slot(&srv);
        park(&srv, slot, 0);
        slot->used = INT64_MAX;
    }
    store_close(&srv.store);
    for (int i = 0; i < n_seqs; i++) session_close(srv.slots[i].s);
    grammar_vocab_free(&srv.vocab);
    free(srv.slots);
    free(srv.logits);
    for (int i = 0; i < REPLAYS; i++) tok_ids_free(&srv.replays[i].ids);
    free(srv.replays);
    fprintf(stderr, "# stopped: %" PRIu64 " requests answered, %" PRIu64 " tokens generated\n", srv.totals.jobs,
            srv.totals.made);
}
#endif
#endif
