/* request.h - the body of an HTTP request as a struct, and JSON written.
 *
 * Uses engine.h, tokenizer.h and gguf.h (JSON). Begin with read_request().
 *   [1] JSON written    [2] What a request says
 *
 * TRUST  Every byte of a request is untrusted: it is checked before use, and an error in it is answered by a 4xx. */
#ifndef REQUEST_H
#define REQUEST_H

typedef struct {
    const char *host, *alias;          // address to listen on; name of the model, NULL: its file name
    const char *api_key;               // NULL: no key is needed
    TextList    origins;               // of web pages that may use the API; *: of all
    const char *public_url;            // where a proxy offers the server, or NULL
    int         port, max_queue, timeout;          // 0: any free port; jobs that wait; seconds for one answer
    size_t      max_body;              // bytes of a request
    size_t      memory;                // bytes of all requests and answers; 0: half of what is free
    int         n_predict, think_budget;           // if the request does not say
    int         chunk;                 // tokens of a prompt in one step; 0: as many as the model allows
    bool        think;
    SampleParams sampling;
    Drafting    drafting;
    bool        fixed_seed;            // a request without a seed gets sampling.seed; false: a random one
    const char *session_dir;           // where sessions are kept; NULL: in memory only
    size_t      cache_ram, session_disk;   // bytes: of host memory for sessions, of that folder
    bool        log_text;              // the log has prompts and answers too
    float       compress;              // part of a long prompt that the model is shown; 0: all
    int         compress_from;         // tokens of such a prompt
    const char *scorer;                // file; NULL: the model scores with its own first layers
} ServeOptions;

#ifdef USE_MICROHTTPD
enum { MAX_STOPS = 16, STOP_BYTES = 1024, MAX_TOP = 20 };

// ==== [1] JSON written ===============================================================================================
// put() appends numbers, strings and pieces of JSON to a text. Strings that may not be UTF-8 are repaired.

// Memory is counted before it is used (budget.h). If it runs out all the same, what is written lacks something, and
// `starved` is set: whoever sends an answer sends an error in its place.
static _Thread_local bool starved;

static void append(TokText *out, const char *s, size_t n) {
    if (!tok_text_append(out, s, n)) starved = true;
}

// Zeroed memory; NULL: there is none, and the thread is `starved`.
static void *alloc_or_starve(size_t n, size_t size) {
    void *p = calloc(n ? n : 1, size);
    if (!p) starved = true;
    return p;
}

// Returns a list with room for n elements. NULL: the list stays as it is, and the thread is `starved`.
static void *resize_list(void *list, int n, size_t size) {
    void *p = realloc(list, (size_t)n * size);
    if (!p) starved = true;
    return p;
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
    if (tok_add_json_string(out, start ? text_of(&clean) : s) < 0) starved = true;
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
    GgufJson root;                     // the whole body
    double   max_tokens, temperature, top_k, top_p, min_p, repeat, presence, frequency, seed, top_logprobs;
    double   think_budget, n, best_of; // NAN: not given
    double   other;                    // of features that do not exist: only the value without effect is accepted
    bool     stream, progress, timed, no_cache, ignore_eos, echo, add_special, parse_special, with_pieces, no_cue;
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
    { "n", IS_INT, AT(n), 1, INT_MAX }, { "best_of", IS_INT, AT(best_of), 1, INT_MAX },
    { "typical_p", IS_REAL, AT(other), 1, 1 },
    { "mirostat", IS_INT, AT(other), 0, 0 }, { "dry_multiplier", IS_REAL, AT(other), 0, 0 },
    { "xtc_probability", IS_REAL, AT(other), 0, 0 }, { "dynatemp_range", IS_REAL, AT(other), 0, 0 },
    { "top_logprobs", IS_INT, AT(top_logprobs), 0, MAX_TOP },
    { "reasoning_budget", IS_INT, AT(think_budget), -1, INT_MAX },
    { "parallel_tool_calls", IS_FALSE, AT(one_call), 0, 0 },
    { "stream", IS_TRUE, AT(stream), 0, 0 }, { "return_progress", IS_TRUE, AT(progress), 0, 0 },
    { "timings_per_token", IS_TRUE, AT(timed), 0, 0 },
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
    size_t n_prompt;          // tokens of a prompt that is too long; 0: it is not
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

// Refuses a request for want of memory, whatever else it may be refused for: that may be a consequence. Returns false.
static bool refuse_starved(Fault *f) {
    f->status = 0;
    starved = false;
    return refuse(f, 503, "", "the server has no memory for this request now; try again later");
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
                    .presence = NAN, .frequency = NAN, .seed = NAN, .top_logprobs = NAN, .think_budget = NAN,
                    .n = NAN, .best_of = NAN };
    if (gguf_json_parse(body.s ? body.s : "", body.n, &root, &at, &err) < 0)
        return refuse(f, 400, "", "the request body is not JSON: byte %zu: expected %s", at, err);
    if (root.type != GGUF_J_OBJECT) return refuse(f, 400, "", "the request body: expected a JSON object");
    r->root = root;
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

// The bytes of a string, ended by a NUL; the caller frees them. NULL: no memory; *n is 0.
static char *copy_string(const GgufJson *v, size_t *n) {
    char *s = alloc_or_starve(v->n + 1, 1);
    *n = s ? gguf_json_string(v, s) : 0;
    return s;
}

static bool is_role(const GgufJson *role) {
    static const char *const roles[] = { "system", "developer", "user", "assistant", "tool", "function" };
    for (size_t i = 0; i < sizeof roles / sizeof *roles; i++) if (gguf_json_is(role, roles[i])) return true;
    return false;
}

#endif
#endif
