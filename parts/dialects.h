/* dialects.h - what the APIs of other clients share: a request is rewritten as one for /v1/chat/completions; the answer
 *              has the form of the API that was called.
 *
 * Uses request.h, schedule.h, exchange.h; the caller answer.h (hashes). Begin with put_content(). */
#ifndef DIALECTS_H
#define DIALECTS_H

#ifdef USE_MICROHTTPD

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

// Appends a content, a string or a list of parts of any type, as the value of "content": read_messages() reads it.
static bool put_content(Exchange *x, TokText *out, const GgufJson *content, const char *where) {
    if (content->type != GGUF_J_STRING && content->type != GGUF_J_ARRAY)
        return refuse(&x->fault, 400, where, "%s: expected a string or a list", where);
    put(out, "%r", raw(content));
    return true;
}

// Adds a call that the model made before to a list.
static void put_past_call(TokText *list, const GgufJson *id, const GgufJson *name, const GgufJson *arguments) {
    put(list, list->n ? ",{'id':%r,'type':'function'," : "{'id':%r,'type':'function',", raw(id));
    put(list, "'function':{'name':%r,'arguments':%r}}", raw(name), raw(arguments));
}

// The signature of a thought, without which some clients do not send the thought back. It is not checked.
static void put_signature(TokText *out, TokStr thought) {
    char text[32];
    snprintf(text, sizeof text, "gemma4-%016" PRIx64, hash_bytes(thought.s, thought.n));
    put(out, "%s", text);
}

static bool is_alphanumeric(char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

// The small letters and digits of a name: max_tokens, maxTokens and max-tokens have the same.
static void plain_name(const char *name, char out[64]) {
    size_t n = 0;
    for (; *name && n < 63; name++) if (is_alphanumeric(*name)) out[n++] = (char)(*name | 32);
    out[n] = 0;
}

enum { FAR = 3 };

// How many letters of two names differ: letters that are missing, added or other ones. FAR: more than a quarter of the
// letters of the second name, or more than two. Ignores case and '_'.
static int name_distance(const char *name, const char *known) {
    char a[64], b[64];
    int row[65];
    plain_name(name, a);
    plain_name(known, b);
    const int n = (int)strlen(a), m = (int)strlen(b);
    for (int k = 0; k <= m; k++) row[k] = k;
    for (int i = 1; i <= n; i++) {
        int corner = row[0];
        row[0] = i;
        for (int k = 1; k <= m; k++) {
            const int same = corner + (a[i - 1] != b[k - 1]);
            corner = row[k];
            row[k] = min_int(same, min_int(row[k], row[k - 1]) + 1);
        }
    }
    return row[m] <= min_int(m / 4, FAR - 1) ? row[m] : FAR;
}

// The field that is meant by a name: itself, if it is known; else the one that is spelled most like it. NULL: none.
static const char *find_field(const char *name, const char *const *known, bool table) {
    const size_t n_fields = table ? sizeof fields / sizeof *fields : 0;
    const char *best = NULL;
    int least = 1 + FAR;
    for (size_t i = 0; i < n_fields; i++) if (!strcmp(name, fields[i].name)) return fields[i].name;
    for (const char *const *field = known; *field; field++) if (!strcmp(name, *field)) return *field;
    for (size_t i = 0; i < n_fields || *known; i++) {
        const char *field = i < n_fields ? fields[i].name : *known++;
        const int distance = 1 + name_distance(name, field);
        if (distance < least) least = distance, best = field;
    }
    return best;
}

// Names the fields of a body that this server does not know: each once in the log of a run, and in a warning those that
// are nearly a known one. known: ends with NULL; table: also those of request.h are known.
static void check_fields(Exchange *x, const GgufJson *root, const char *const *known, bool table) {
    enum { MOST = 64 };       // of one request
    Server *srv = x->srv;
    GgufJson rest = *root, key, v;
    char name[64];
    for (int n = 0; n < MOST && gguf_json_next(&rest, &key, &v); ) {
        if (key.n >= sizeof name) continue;
        name[gguf_json_string(&key, name)] = 0;
        const char *near = find_field(name, known, table);
        if (near && !strcmp(near, name)) continue;
        n++;
        if (near) warn(x, "%s: unknown field; did you mean %s?", name, near);
        const uint64_t hash = hash_bytes(name, strlen(name));
        pthread_mutex_lock(&srv->lock);
        const int most = (int)(sizeof srv->unknown / sizeof *srv->unknown);
        bool said = srv->n_unknown == most;
        for (int i = 0; i < srv->n_unknown; i++) said |= srv->unknown[i] == hash;
        if (!said) srv->unknown[srv->n_unknown++] = hash;
        pthread_mutex_unlock(&srv->lock);
        for (char *c = name; *c; c++) if (*c < ' ' || *c > '~') *c = '?';
        if (!said) fprintf(stderr, "# unknown field of a request, ignored: %s\n", name);
    }
}

static void open_event(Exchange *x, const char *type) {              // the caller appends its members and "}\n\n"
    append(&x->out, "event: ", 7);
    append(&x->out, type, strlen(type));
    put(&x->out, "\ndata: {'type':%s", type);
}

#endif
#endif
