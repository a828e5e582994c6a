/* history.h - conversations that began elsewhere and tools that are no functions, made into what the template takes.
 *
 * A client sends what other servers, and other versions of itself, have written: parts that are no text, results far
 * from their calls, arguments that are no JSON, tools that a server would have to run. What has a text is read. What
 * has none becomes a short placeholder, with a warning: one strange old message must not end a conversation. Only in
 * the message that is to be answered now, a file is refused. Images are shown to a model that has a tower; without
 * one, they are like files.
 *
 * Uses engine.h, request.h, exchange.h, dialects.h. Begin with read_messages().
 *   [1] Parts of a content    [2] Messages    [3] Tools */
#ifndef HISTORY_H
#define HISTORY_H

#ifdef USE_MICROHTTPD

// ==== [1] Parts of a content =========================================================================================

static void put_comma(TokText *out) {                  // between the members of a list or an object
    if (out->n && out->s[out->n - 1] != '[' && out->s[out->n - 1] != '{') put(out, ",");
}

// The type of a part or an item as a word of letters, digits, '_', '-' and '.'; "part" if it has none.
static void type_word(const GgufJson *object, char out[64]) {
    GgufJson type;
    size_t n = 0;
    if (member(object, "type", &type) && type.type == GGUF_J_STRING)
        for (size_t i = 1; i + 1 < type.n && n < 63; i++)
            if (is_alphanumeric(type.s[i]) || memchr("_-.", type.s[i], 3)) out[n++] = type.s[i];
    out[n] = 0;
    if (!n) snprintf(out, 64, "part");
}

// Appends the text of a string, or of the parts of a list that have one. False: it is neither.
static bool append_content(TokText *out, const GgufJson *v) {
    GgufJson rest = *v, part, text;
    if (v->type == GGUF_J_ARRAY) {
        while (gguf_json_next(&rest, NULL, &part))
            if (member(&part, "text", &text) && text.type == GGUF_J_STRING) append_content(out, &text);
        return true;
    }
    if (v->type != GGUF_J_STRING) return false;
    size_t n;
    char *s = copy_string(v, &n);
    append(out, s, n);
    free(s);
    return true;
}

// True if these bytes are a text: UTF-8 without control characters, and no PDF.
static bool is_plain(TokStr s) {
    uint32_t c;
    if (s.n >= 5 && !memcmp(s.s, "%PDF-", 5)) return false;
    for (size_t i = 0; i < s.n; ) {
        const int n = tok_read_utf8((const unsigned char *)s.s + i, s.n - i, &c);
        if (n <= 0 || (c < ' ' && !strchr("\t\n\r\f", (int)c)) || !c) return false;
        i += (size_t)n;
    }
    return true;
}

// Appends the text of a file, in base64 after an optional "data:TYPE;base64,". False: it is no base64, or no text.
static bool append_file(TokText *out, const GgufJson *v) {
    if (v->type != GGUF_J_STRING) return false;
    size_t n;
    char *s = copy_string(v, &n);
    if (!s) return false;
    char *comma = n > 5 && !memcmp(s, "data:", 5) ? memchr(s, ',', n) : NULL, *from = comma ? comma + 1 : s;
    const size_t n_bytes = decode_base64(from, n - (size_t)(from - s));
    const bool ok = n_bytes && is_plain((TokStr){ from, n_bytes });
    if (ok) append(out, from, n_bytes);
    free(s);
    return ok;
}

// Appends the text of a document, a search result or a file, after its title. False: it has none.
static bool append_document(TokText *out, const GgufJson *part) {
    static const char *const types[] = { "document", "search_result", "input_file", "file", "compaction" };
    GgufJson inner = *part, source = { 0 }, title, v;
    TokText text = { 0 };
    bool known = false;
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) known |= is_type(part, types[i]);
    if (!known) return false;
    if (member(part, "file", &v) && v.type == GGUF_J_OBJECT) inner = v;          // of /v1/chat/completions
    bool ok = member(&inner, "file_data", &v) && append_file(&text, &v);
    if (!ok && member(&inner, "source", &source) && member(&source, "data", &v))
        ok = is_type(&source, "text") ? append_content(&text, &v) : append_file(&text, &v);
    if (!ok)
        ok = (member(&source, "content", &v) || member(&inner, "content", &v)) && append_content(&text, &v) && text.n;
    if (ok && (member(&inner, "title", &title) || member(&inner, "filename", &title)) && append_content(out, &title))
        append(out, "\n", 1);
    if (ok) append(out, text.s, text.n);
    tok_text_free(&text);
    return ok;
}

static bool is_image(const GgufJson *part) {
    static const char *const types[] = { "image_url", "image", "input_image", "computer_screenshot" };
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) if (is_type(part, types[i])) return true;
    return false;
}

// Appends an image in any API's form as a part with image_url {url, detail}, which picture.h reads.
static bool put_image_part(Exchange *x, TokText *out, const GgufJson *part) {
    static const char *const details[] = { "low", "high", "auto", "original" };
    const char *param = x->api && x->api->convert ? "input" : "messages";
    GgufJson inner, url = { 0 }, detail;
    bool known = false;
    const bool deep = member(part, "image_url", &inner) && inner.type == GGUF_J_OBJECT;
    if (deep) member(&inner, "url", &url);
    else if (member(part, "image_url", &inner)) url = inner;
    else if (member(part, "source", &inner) && !member(&inner, "data", &url)) member(&inner, "url", &url);
    if (url.type != GGUF_J_STRING)
        return refuse(&x->fault, 400, param, "an image: expected its data in base64, as image_url.url or source.data");
    if (!member(deep ? &inner : part, "detail", &detail)) detail = (GgufJson){ GGUF_J_STRING, "\"auto\"", 6 };
    for (int i = 0; i < 4; i++) known |= gguf_json_is(&detail, details[i]);
    if (!known) return refuse(&x->fault, 400, param, "detail: expected low, high or auto");
    if (gguf_json_is(&detail, "original")) detail = (GgufJson){ GGUF_J_STRING, "\"high\"", 6 };
    put_comma(out);
    put(out, "{'type':'image_url','image_url':{'url':%r,'detail':%r}}", raw(&url), raw(&detail));
    return true;
}

// Appends a part of a content as one that is text, or an image if the model sees. A thought among the parts is left
// out. is_new: it is refused if it is neither.
static bool put_part_of(Exchange *x, TokText *out, const GgufJson *part, bool is_new) {
    GgufJson v;
    TokText text = { 0 };
    char type[64];
    if (is_type(part, "thinking") || is_type(part, "redacted_thinking") || is_type(part, "reasoning")) {
        warn(x, "thoughts among the parts of a content: left out");
        return true;
    }
    if (x->srv->sees && is_image(part)) return put_image_part(x, out, part);
    put_comma(out);
    put(out, "{'type':'text','text':");
    const bool has_text = part->type == GGUF_J_STRING || ((member(part, "text", &v) || member(part, "refusal", &v)) &&
                                                         v.type == GGUF_J_STRING);
    if (has_text) {
        put(out, "%r", raw(part->type == GGUF_J_STRING ? part : &v));
    } else if (append_document(&text, part)) {
        put(out, "%t", text_of(&text));
    } else if (!is_new && !member(part, "type", &v)) { // a value of a tool
        put(out, "%t", raw(part));
    } else {
        type_word(part, type);
        if (is_new && is_image(part))
            return refuse(&x->fault, 400, x->api && x->api->convert ? "input" : "messages",
                          "%s: this model reads text only; start the server with --mmproj FILE for images", type);
        if (is_new)
            return refuse(&x->fault, 400, x->api && x->api->convert ? "input" : "messages",
                          "%s: expected text; audio, video and files are not supported", type);
        warn(x, "%s: replaced by a placeholder", type);
        append(&text, "[", 1);
        append(&text, type, strlen(type));
        append(&text, " left out]", 10);
        put(out, "%t", text_of(&text));
    }
    put(out, "}");
    tok_text_free(&text);
    return true;
}

// ==== [2] Messages ===================================================================================================

typedef struct {
    GgufJson m, role;
    size_t   first, last, next;        // messages with results of its calls; next one of the same calls. SIZE_MAX: none
    bool     calls, placed;            // it has calls; it is a result of a call, or is written before its place
} Past;

typedef struct { GgufJson id; size_t at; } PastCall;                 // message `at` has a call with this id

static int by_call_id(const void *a, const void *b) {
    const PastCall *p = a, *q = b;
    const int c = p->id.n != q->id.n ? (p->id.n > q->id.n) - (p->id.n < q->id.n) : memcmp(p->id.s, q->id.s, p->id.n);
    return c ? c : (p->at > q->at) - (p->at < q->at);
}

// The message that has the call of a result: the last one before it with that id, else the first one after it; else the
// message that it follows, if that has calls. previous: the last message before it that is no result. SIZE_MAX: none.
static size_t find_call(const PastCall *calls, size_t n, const Past *list, size_t i, size_t previous) {
    PastCall want = { .at = i };
    size_t low = 0, high = n;                          // calls before low are before `want`, from high on after it
    const bool has_id = member(&list[i].m, "tool_call_id", &want.id) && want.id.type == GGUF_J_STRING;
    while (has_id && low < high) {
        const size_t middle = low + (high - low) / 2;
        if (by_call_id(&calls[middle], &want) < 0) low = middle + 1;
        else high = middle;
    }
    const size_t near[2] = { low - 1, low };
    for (int k = 0; has_id && k < 2; k++)
        if (near[k] < n && calls[near[k]].id.n == want.id.n && !memcmp(calls[near[k]].id.s, want.id.s, want.id.n))
            return calls[near[k]].at;
    return previous != SIZE_MAX && list[previous].calls ? previous : SIZE_MAX;
}

// The calls of the messages, sorted by their ids; to be freed. NULL: there is no memory.
static PastCall *list_calls(const Past *list, size_t n, size_t *n_calls) {
    PastCall *calls = NULL;
    GgufJson rest, call, id;
    for (int pass = 0; pass < 2; pass++) {             // counts them, then lists them
        if (pass) calls = alloc_or_starve(*n_calls + 1, sizeof *calls);
        if (pass && !calls) return NULL;
        *n_calls = 0;
        for (size_t i = 0; i < n; i++) {
            if (!member(&list[i].m, "tool_calls", &rest) || rest.type != GGUF_J_ARRAY) continue;
            while (gguf_json_next(&rest, NULL, &call)) {
                if (!member(&call, "id", &id) || id.type != GGUF_J_STRING) continue;
                if (pass) calls[*n_calls] = (PastCall){ id, i };
                ++*n_calls;
            }
        }
    }
    qsort(calls, *n_calls, sizeof *calls, by_call_id);
    return calls;
}

// Gives each result to the message with its call.
static void place_results(Past *list, size_t n) {
    size_t n_calls, previous = SIZE_MAX;
    PastCall *calls = list_calls(list, n, &n_calls);
    for (size_t i = 0; calls && i < n; i++) {
        if (!gguf_json_is(&list[i].role, "tool")) {
            previous = i;
            continue;
        }
        const size_t owner = find_call(calls, n_calls, list, i, previous);
        if (owner == SIZE_MAX) continue;
        Past *p = &list[owner];
        if (p->first == SIZE_MAX) p->first = i;
        else list[p->last].next = i;
        p->last = i;
        list[i].placed = true;
    }
    free(calls);
}

// Reads the list of messages, to be freed. NULL: it is refused.
static Past *list_messages(Exchange *x, const GgufJson *messages, size_t *n) {
    GgufJson rest = *messages, m, role, v, call;
    size_t room = 0;
    if (!is_given(messages)) return refuse(&x->fault, 400, "messages", "messages: expected a list, got none"), NULL;
    while (gguf_json_next(&rest, NULL, &m)) room++;
    if (!room) return refuse(&x->fault, 400, "messages", "messages: expected at least one message"), NULL;
    Past *list = alloc_or_starve(room, sizeof *list);
    rest = *messages;
    for (*n = 0; list && gguf_json_next(&rest, NULL, &m); ++*n) {
        if (m.type != GGUF_J_OBJECT || !gguf_json_get(&m, "role", &role) || !is_role(&role)) {
            refuse(&x->fault, 400, "messages", m.type != GGUF_J_OBJECT ? "messages[%zu]: expected an object" :
                   "messages[%zu].role: expected system, developer, user, assistant or tool", *n);
            free(list);
            return NULL;
        }
        if (gguf_json_is(&role, "developer")) role = (GgufJson){ GGUF_J_STRING, "\"system\"", 8 };
        if (gguf_json_is(&role, "function")) role = (GgufJson){ GGUF_J_STRING, "\"tool\"", 6 };
        const bool calls = gguf_json_is(&role, "assistant") &&
            ((member(&m, "tool_calls", &v) && v.type == GGUF_J_ARRAY && gguf_json_next(&v, NULL, &call)) ||
             member(&m, "function_call", &v));
        list[*n] = (Past){ m, role, SIZE_MAX, SIZE_MAX, SIZE_MAX, calls, false };
    }
    return list;
}

// Appends the arguments of a call: an object, or a string that holds one; anything else as the argument `arguments`.
static void put_arguments(TokText *out, const GgufJson *v) {
    GgufJson parsed = *v;
    char *s = NULL;
    size_t n = 0, at;
    const char *err;
    if (v->type == GGUF_J_STRING) {
        s = copy_string(v, &n);
        const TokStr text = tok_trim((TokStr){ s, n });
        if (!text.n) parsed.type = GGUF_J_NULL;
        else if (gguf_json_parse(s, n, &parsed, &at, &err) < 0) parsed = *v;
    }
    if (parsed.type == GGUF_J_OBJECT) put(out, "%r", raw(v));
    else if (parsed.type == GGUF_J_NULL) put(out, "{}");
    else put(out, "{'arguments':%r}", raw(v));
    free(s);
}

// Appends a call of the assistant: of a function, of a custom tool, or in the form that OpenAI's API had first.
static void put_old_call(TokText *out, const GgufJson *call) {
    const GgufJson none = { GGUF_J_OBJECT, "{}", 2 };
    GgufJson id, inner = *call, name, v = none;
    const bool custom = member(call, "custom", &inner) && inner.type == GGUF_J_OBJECT;
    if (!custom && !(member(call, "function", &inner) && inner.type == GGUF_J_OBJECT)) inner = *call;
    put_comma(out);
    put(out, "{");
    if (member(call, "id", &id) && id.type == GGUF_J_STRING) put(out, "'id':%r,", raw(&id));
    if (!member(&inner, "name", &name) || name.type != GGUF_J_STRING) name = (GgufJson){ GGUF_J_STRING, "\"tool\"", 6 };
    put(out, "'type':'function','function':{'name':%r,'arguments':", raw(&name));
    if (custom && member(&inner, "input", &v)) put(out, "{'input':%r}", raw(&v));
    else if (custom || !member(&inner, "arguments", &v)) put(out, "{}");
    else put_arguments(out, &v);
    put(out, "}}");
}

static void put_old_calls(TokText *out, const GgufJson *m) {
    GgufJson rest, v;
    put(out, ",'tool_calls':[");
    if (member(m, "tool_calls", &rest) && rest.type == GGUF_J_ARRAY)
        while (gguf_json_next(&rest, NULL, &v)) put_old_call(out, &v);
    if (member(m, "function_call", &v)) put_old_call(out, &v);
    put(out, "]");
}

// Appends a message in the form of the template. is_new: see put_part_of().
static bool put_message(Exchange *x, TokText *out, const Past *p, bool is_new) {
    static const char *const names[] = { "reasoning", "reasoning_content", "tool_call_id", "name" };
    const bool is_tool = gguf_json_is(&p->role, "tool");
    GgufJson content, part, v;
    put_comma(out);
    put(out, "{'role':%r", raw(&p->role));
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (member(&p->m, names[i], &v) && v.type == GGUF_J_STRING) put(out, ",%s:%r", names[i], raw(&v));
    take_member(out, &p->m, "tool_responses", "tool_responses");
    if (p->calls) put_old_calls(out, &p->m);
    if (member(&p->m, "content", &content)) {
        put(out, ",'content':");
        if (content.type == GGUF_J_ARRAY) {
            put(out, "[");
            while (gguf_json_next(&content, NULL, &part)) if (!put_part_of(x, out, &part, is_new)) return false;
            put(out, "]");
        } else if (content.type == GGUF_J_OBJECT && !is_tool) {
            put(out, "[");
            if (!put_part_of(x, out, &content, is_new)) return false;
            put(out, "]");
        } else {
            put(out, "%r", raw(&content));
        }
    }
    put(out, "}");
    return true;
}

// Appends a result whose call is not there, as a text of the user and its images.
static bool put_lost_result(Exchange *x, TokText *out, const GgufJson *m) {
    TokText text = { 0 };
    GgufJson v = { 0 }, part;
    append(&text, "[result of a tool] ", 19);
    if (member(m, "content", &v) && !append_content(&text, &v)) append(&text, v.s, v.n);
    put_comma(out);
    put(out, "{'role':'user','content':[{'type':'text','text':%t}", text_of(&text));
    warn(x, "a tool result without its call: read as a text of the user");
    tok_text_free(&text);
    while (x->srv->sees && v.type == GGUF_J_ARRAY && gguf_json_next(&v, NULL, &part))
        if (is_image(&part) && !put_image_part(x, out, &part)) return false;
    put(out, "]}");
    return true;
}

// The number of the user's message that is to be answered now: nothing but instructions follows it, and it does not
// follow results, for then an agent has added it. SIZE_MAX: there is none.
static size_t new_message(const Past *list, size_t n) {
    while (n > 0 && gguf_json_is(&list[n - 1].role, "system")) n--;
    const bool is_new = n > 0 && gguf_json_is(&list[n - 1].role, "user") &&
        !(n > 1 && gguf_json_is(&list[n - 2].role, "tool"));
    return is_new ? n - 1 : SIZE_MAX;
}

// Appends all messages. Results follow their calls at once. A text of the assistant between the two comes before the
// call, for the model writes it so; other messages between them come after the results.
static bool put_messages_of(Exchange *x, TokText *out, Past *list, size_t n) {
    const size_t now = new_message(list, n);
    for (size_t i = 0; i < n; i++) {
        if (list[i].placed) continue;
        if (gguf_json_is(&list[i].role, "tool")) {
            if (!put_lost_result(x, out, &list[i].m)) return false;
            continue;
        }
        for (size_t k = i + 1; list[i].first != SIZE_MAX && k < list[i].last && !list[k].calls; k++) {
            if (list[k].placed || !gguf_json_is(&list[k].role, "assistant")) continue;
            if (!put_message(x, out, &list[k], false)) return false;
            list[k].placed = true;
        }
        if (!put_message(x, out, &list[i], i == now)) return false;
        for (size_t k = list[i].first; k != SIZE_MAX; k = list[k].next)
            if (!put_message(x, out, &list[k], false)) return false;
    }
    return true;
}

// Replaces the messages of a request by those that the template takes. False: they are refused.
static bool read_messages(Exchange *x, Request *r) {
    size_t n;
    Past *list = list_messages(x, &r->messages, &n);
    if (!list) return false;
    place_results(list, n);
    x->messages.n = 0;
    put(&x->messages, "[");
    const bool ok = put_messages_of(x, &x->messages, list, n);
    put(&x->messages, "]");
    r->messages = (GgufJson){ GGUF_J_ARRAY, x->messages.s, x->messages.n };
    free(list);
    return ok;
}

// ==== [3] Tools ======================================================================================================
// The model calls functions. A custom tool becomes a function with the argument `input`; a tool of a namespace gets a
// name that begins with the namespace. x->renamed is an object that has, by the name that the model uses, what the
// client calls it: {kind, name, namespace}.

// Appends the name that the model uses for a tool of a namespace, as a string in JSON. space NULL: it has none.
static void put_flat_name(TokText *out, const GgufJson *space, const GgufJson *name) {
    TokText flat = { 0 };
    if (space && append_content(&flat, space) && flat.n && flat.s[flat.n - 1] != '_') append(&flat, "__", 2);
    append_content(&flat, name);
    put(out, "%t", text_of(&flat));
    tok_text_free(&flat);
}

typedef struct { bool custom; GgufJson name, space; } ClientTool;    // name, space: GGUF_J_NULL if not given

// What the client calls the tool that the model calls. Points into x.
static ClientTool client_tool(const Exchange *x, const Call *call) {
    ClientTool as = { .name = { .type = GGUF_J_NULL }, .space = { .type = GGUF_J_NULL } };
    GgufJson all, tool;
    const char *err;
    size_t at;
    char name[256];
    if (!x->renamed.n || call->name.n >= sizeof name || memchr(call->name.s, 0, call->name.n)) return as;
    memcpy(name, call->name.s, call->name.n);
    name[call->name.n] = 0;
    if (gguf_json_parse(x->renamed.s, x->renamed.n, &all, &at, &err) < 0 || !member(&all, name, &tool)) return as;
    as.custom = is_type(&tool, "custom");
    if (!member(&tool, "name", &as.name)) as.name.type = GGUF_J_NULL;
    if (!member(&tool, "namespace", &as.space)) as.space.type = GGUF_J_NULL;
    return as;
}

// Appends the input of a call of a custom tool as a string: the argument `input`, else all arguments.
static void put_custom_input(TokText *out, const Call *call) {
    GgufJson args, v;
    const char *err;
    size_t at;
    const bool ok = gguf_json_parse(call->arguments.s, call->arguments.n, &args, &at, &err) == 0 &&
        member(&args, "input", &v) && v.type == GGUF_J_STRING;
    if (ok) put(out, "%r", raw(&v));
    else put(out, "%t", text_of(&call->arguments));
}

// Tools whose parameters the clients of Anthropic's API do not send, for its models know them. The client runs them.
static const struct { const char *type, *about, *parameters; } known_tools[] = {
    { "bash_", "Runs a command in a shell. `restart` starts a new shell.",
      "{'type':'object','properties':{'command':{'type':'string'},'restart':{'type':'boolean'}}}" },
    { "text_editor_", "Shows, creates and edits text files.",
      "{'type':'object','properties':{'command':{'type':'string','enum':['view','create','str_replace','insert']},"
      "'path':{'type':'string'},'view_range':{'type':'array','items':{'type':'integer'}},'file_text':{'type':'string'},"
      "'old_str':{'type':'string'},'new_str':{'type':'string'},'insert_line':{'type':'integer'},"
      "'insert_text':{'type':'string'}},'required':['command','path']}" },
    { "memory_", "Shows and changes files under /memories, which outlast the conversation.",
      "{'type':'object','properties':{'command':{'type':'string','enum':['view','create','str_replace','insert',"
      "'delete','rename']},'path':{'type':'string'},'view_range':{'type':'array','items':{'type':'integer'}},"
      "'file_text':{'type':'string'},'old_str':{'type':'string'},'new_str':{'type':'string'},"
      "'insert_line':{'type':'integer'},'insert_text':{'type':'string'},'old_path':{'type':'string'},"
      "'new_path':{'type':'string'}},'required':['command']}" },
};
enum { N_KNOWN_TOOLS = sizeof known_tools / sizeof *known_tools };

// Appends the description and the parameters of a custom tool. The model reads the grammar of its input.
static void put_custom_tool(TokText *out, const GgufJson *tool) {
    GgufJson format, inner, syntax, v;
    TokText about = { 0 };
    if (member(tool, "description", &v)) append_content(&about, &v);
    const bool given = member(tool, "format", &format);
    if (!given || !member(&format, "grammar", &inner)) inner = format;
    if (given && member(&inner, "definition", &v)) {
        const TokStr head = str(about.n ? "\n\nThe input matches this grammar" : "The input matches this grammar");
        append(&about, head.s, head.n);
        if (member(&inner, "syntax", &syntax)) {
            append(&about, " (", 2);
            append_content(&about, &syntax);
            append(&about, ")", 1);
        }
        append(&about, ":\n", 2);
        append_content(&about, &v);
    }
    put(out, ",'description':%t,'parameters':{'type':'object','properties':{'input':{'type':'string'}},"
        "'required':['input']}", text_of(&about));
    tok_text_free(&about);
}

static void put_renamed(Exchange *x, bool custom, const GgufJson *space, const GgufJson *name) {
    put_comma(&x->renamed);
    put_flat_name(&x->renamed, space, name);
    put(&x->renamed, ":{'type':%s,'name':%r", custom ? "custom" : "function", raw(name));
    if (space) put(&x->renamed, ",'namespace':%r", raw(space));
    put(&x->renamed, "}");
}

// Appends tool i, in the form of any API, as a function. space: the name of its namespace, or NULL. False: refused.
static bool put_tool(Exchange *x, const GgufJson *tool, const GgufJson *space, int i) {
    TokText *out = &x->tools;
    GgufJson fn, name, v, type = { .type = GGUF_J_NULL };
    char word[64];
    int known = 0;
    if (tool->type != GGUF_J_OBJECT) return refuse(&x->fault, 400, "tools", "tools[%d]: expected an object", i);
    const bool deep = (member(tool, "function", &fn) || (is_type(tool, "custom") && member(tool, "custom", &fn))) &&
        fn.type == GGUF_J_OBJECT;
    if (!deep) fn = *tool;
    type_word(tool, word);
    while (known < N_KNOWN_TOOLS && strncmp(word, known_tools[known].type, strlen(known_tools[known].type))) known++;
    const bool custom = is_type(tool, "custom") && !member(&fn, "input_schema", &v);
    const bool typed = member(tool, "type", &type) && !is_type(tool, "function") && !is_type(tool, "custom");
    if (typed && known == N_KNOWN_TOOLS) {
        warn(x, "tools[%d] %s: left out, this server does not run it", i, word);
        return true;
    }
    if (!member(&fn, "name", &name) || name.type != GGUF_J_STRING)
        return refuse(&x->fault, 400, "tools", "tools[%d]: expected a function with a name", i);
    put_comma(out);
    if (deep && !custom && !space) {                   // the form of /v1/chat/completions
        put(out, "%r", raw(tool));
        return true;
    }
    put(out, "{'type':'function','function':{'name':");
    put_flat_name(out, space, &name);
    if (typed) {
        put(out, ",'description':%s,'parameters':", known_tools[known].about);
        put(out, known_tools[known].parameters);
    } else if (custom) {
        put_custom_tool(out, &fn);
    } else {
        take_member(out, &fn, "description", "description");
        take_member(out, &fn, member(&fn, "input_schema", &v) ? "input_schema" : "parameters", "parameters");
        take_member(out, &fn, "strict", "strict");
    }
    put(out, "}}");
    if (custom || space) put_renamed(x, custom, space, &name);
    return true;
}

// Appends the choice of a tool that has another name for the model. False: it has not.
static bool put_renamed_choice(TokText *out, const GgufJson *choice) {
    GgufJson inner, name, space;
    const bool custom = is_type(choice, "custom"), spaced = member(choice, "namespace", &space);
    if (!custom && !(is_type(choice, "function") && spaced)) return false;
    if (!member(choice, custom ? "custom" : "function", &inner)) inner = *choice;
    if (!member(&inner, "name", &name) || name.type != GGUF_J_STRING) return false;
    put(out, "{'type':'function','name':");
    put_flat_name(out, spaced ? &space : NULL, &name);
    put(out, "}");
    return true;
}

// Replaces the tools and the choice of one by those that the template takes. Tools that the server would have to run
// are left out. False: they are refused.
static bool convert_tools(Exchange *x, Request *r) {
    GgufJson rest = r->tools, tool, inner, name;
    bool ok = true;
    if (!is_given(&r->tools)) return true;
    put(&x->tools, "[");
    put(&x->renamed, "{");
    for (int i = 0; ok && gguf_json_next(&rest, NULL, &tool); i++) {
        const bool spaced = is_type(&tool, "namespace") && member(&tool, "tools", &inner) &&
            inner.type == GGUF_J_ARRAY && member(&tool, "name", &name) && name.type == GGUF_J_STRING;
        if (!spaced) ok = put_tool(x, &tool, NULL, i);
        while (ok && spaced && gguf_json_next(&inner, NULL, &tool)) ok = put_tool(x, &tool, &name, i);
    }
    put(&x->tools, "]");
    put(&x->renamed, "}");
    const size_t n = x->tools.n;
    const bool renamed = put_renamed_choice(&x->tools, &r->tool_choice);
    r->tools = (GgufJson){ GGUF_J_ARRAY, x->tools.s, n };
    if (renamed) r->tool_choice = (GgufJson){ GGUF_J_OBJECT, x->tools.s + n, x->tools.n - n };
    return ok;
}

#endif
#endif
