/* dialects.h - what the APIs of other clients share: a request is rewritten as one for /v1/chat/completions; the answer
 *              has the form of the API that was called.
 *
 * Uses request.h, exchange.h. Begin with put_content(). */
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
        take_member(out, &tool, "strict", "strict");
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

#endif
#endif
