/* responses.h - the API /v1/responses. A request contains its whole conversation, or names items and responses that the
 *               server still keeps in memory.
 *
 * Uses request.h, recent.h, schedule.h, exchange.h, dialects.h, history.h, openai.h. Begin with responses_convert().
 *   [1] The question    [2] The answer */
#ifndef RESPONSES_H
#define RESPONSES_H

#ifdef USE_MICROHTTPD

// ==== [1] The question ===============================================================================================

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

// True if the type of an item ends with this; *stem: the type without it, as a string.
static bool type_ends(const GgufJson *item, const char *end, TokText *stem) {
    char word[64];
    type_word(item, word);
    const size_t n = strlen(word), n_end = strlen(end);
    if (n <= n_end || strcmp(word + n - n_end, end)) return false;
    word[n - n_end] = 0;
    stem->n = 0;
    put(stem, "%s", word);
    return true;
}

// Takes a call: of a function, of a custom tool, or of a tool that the client runs by the type of the item.
static void take_call(Said *said, const GgufJson *item, const GgufJson *id, TokStr stem) {
    static const char *const inputs[] = { "arguments", "action", "operation" };
    GgufJson name = { GGUF_J_STRING, stem.s, stem.n }, v = { .type = GGUF_J_NULL }, space;
    TokText flat = { 0 }, input = { 0 };
    if (member(item, "name", &v) && v.type == GGUF_J_STRING) name = v;
    put_flat_name(&flat, member(item, "namespace", &space) ? &space : NULL, &name);
    for (size_t i = 0; i < sizeof inputs / sizeof *inputs && !input.n; i++)
        if (member(item, inputs[i], &v)) put(&input, "%r", raw(&v));
    if (!input.n && member(item, "input", &v)) put(&input, "{'input':%r}", raw(&v));
    if (!input.n) put(&input, "{}");
    name = (GgufJson){ GGUF_J_STRING, flat.s, flat.n };
    v = (GgufJson){ input.s[0] == '"' ? GGUF_J_STRING : GGUF_J_OBJECT, input.s, input.n };
    put_past_call(&said->calls, id, &name, &v);
    tok_text_free(&flat);
    tok_text_free(&input);
}

// Takes an item of the input if it is a thought or a call. False: it is neither.
static bool take_said(Exchange *x, Said *said, const GgufJson *item) {
    GgufJson id, v;
    TokText text = { 0 };
    if (is_type(item, "reasoning")) {
        said->thought.n = 0;
        if (member(item, "content", &v)) append_content(&text, &v);
        if (!text.n && member(item, "summary", &v)) append_content(&text, &v);
        if (text.n) put(&said->thought, "%t", text_of(&text));
        else if (member(item, "encrypted_content", &v)) warn(x, "reasoning: left out, it is encrypted");
        tok_text_free(&text);
        return true;
    }
    const bool call = type_ends(item, "_call", &text) && member(item, "call_id", &id) && id.type == GGUF_J_STRING;
    if (call) take_call(said, item, &id, text_of(&text));
    tok_text_free(&text);
    return call;
}

// Appends an item of the input as a message: read_messages() reads its content. An item of a tool that the server ran,
// and any other, becomes a part of its type, which is read as a placeholder.
static bool put_item(Exchange *x, TokText *out, Said *said, const GgufJson *item) {
    const GgufJson none = { GGUF_J_STRING, "\"\"", 2 };
    GgufJson role, id, v = none;
    TokText stem = { 0 };
    if (take_said(x, said, item)) return true;
    put_said_calls(out, said);
    const bool result = type_ends(item, "_output", &stem) && member(item, "call_id", &id) && id.type == GGUF_J_STRING;
    tok_text_free(&stem);
    bool ok = true;
    if (result) {
        if (!member(item, "output", &v)) v = none;
        put(out, ",{'role':'tool','tool_call_id':%r,'content':", raw(&id));
        put(out, v.type == GGUF_J_OBJECT ? "[%r]}" : "%r}", raw(&v));      // an object: a picture of the screen
    } else if (member(item, "role", &role) && (member(item, "content", &v) || !member(item, "type", &id) ||
                                               is_type(item, "message"))) {
        if (!member(item, "content", &v)) v = none;
        put(out, ",{'role':%r,'content':", raw(&role));
        ok = put_content(x, out, &v, "input");
        if (gguf_json_is(&role, "assistant")) put_said(out, said);
        put(out, "}");
    } else {
        put(out, ",{'role':'assistant','content':[%r]", raw(item));
        put_said(out, said);
        put(out, "}");
    }
    said->thought.n = 0;
    return ok;
}

// Appends a copy of the item that this server sent with this id. False: it is not kept.
static bool copy_item(Exchange *x, const char *id, TokText *out) {
    Server *srv = x->srv;
    pthread_mutex_lock(&srv->lock);
    const Kept *k = recent_find(&srv->items, id);
    const bool found = k && more_work(x, WORK * k->text.n);
    if (found) append(out, k->text.s, k->text.n);
    pthread_mutex_unlock(&srv->lock);
    return found;
}

// Appends item i of the input, which may be a reference to one that this server sent, and keeps it.
static bool put_input_item(Exchange *x, TokText *out, Said *said, GgufJson item, int i) {
    TokText copy = { 0 };
    GgufJson v;
    char id[64] = "";
    const char *err;
    size_t at;
    if (item.type != GGUF_J_OBJECT) return refuse(&x->fault, 400, "input", "input[%d]: expected an object", i);
    bool ok = true;
    if (is_type(&item, "item_reference") || (!member(&item, "type", &v) && !member(&item, "role", &v))) {
        if (member(&item, "id", &v) && v.type == GGUF_J_STRING && v.n < sizeof id) id[gguf_json_string(&v, id)] = 0;
        ok = copy_item(x, id, &copy) && gguf_json_parse(copy.s, copy.n, &item, &at, &err) == 0;
        if (!ok)
            refuse(&x->fault, 400, "input", "input[%d]: item '%s' is not kept here (any more); send whole items, as "
                                            "clients do with store: false",
                   i, id);
        if (ok && out->n + copy.n > RECENT_BYTES)      // a short reference may stand for a long item
            ok = refuse(&x->fault, 400, "input", "input[%d]: the items are longer than %d bytes", i, RECENT_BYTES);
    }
    if (ok) {
        if (x->keeps) put(&x->kept, x->kept.n ? ",%r" : "%r", raw(&item));
        ok = put_item(x, out, said, &item);
    }
    tok_text_free(&copy);
    return ok;
}

// Appends the items of the conversation up to the response that this one continues. False: it is not kept.
static bool put_previous(Exchange *x, TokText *out, Said *said) {
    Server *srv = x->srv;
    TokText all = { 0 };
    GgufJson list, item;
    const char *err;
    size_t at, n = 0;
    pthread_mutex_lock(&srv->lock);
    const Kept **chain = alloc_or_starve(RECENT, sizeof *chain);
    const Kept *k = chain ? recent_find(&srv->responses, x->previous) : NULL;
    size_t n_text = 0;
    for (; k && n < RECENT; k = *k->previous ? recent_find(&srv->responses, k->previous) : NULL) {
        chain[n++] = k;
        n_text += k->text.n;
    }
    if (!more_work(x, WORK * n_text)) n = 0;
    const bool whole = n && !*chain[n - 1]->previous;
    put(&all, "[");
    for (size_t i = n; whole && i-- > 0; ) put(&all, i + 1 < n ? ",%r" : "%r", text_of(&chain[i]->text));
    put(&all, "]");
    pthread_mutex_unlock(&srv->lock);
    free(chain);
    bool ok = whole && gguf_json_parse(all.s, all.n, &list, &at, &err) == 0;
    if (!ok)
        refuse(&x->fault, 400, "previous_response_id", "previous_response_id: '%s' is not kept here (any more); send "
                                                       "the whole conversation, as clients do with store: false",
               x->previous);
    while (ok && gguf_json_next(&list, NULL, &item)) ok = put_item(x, out, said, &item);
    tok_text_free(&all);
    return ok;
}

static bool put_input(Exchange *x, TokText *out, const GgufJson *root) {
    GgufJson rest, item, v;
    TokText text = { 0 };
    Said said = { 0 };
    if (member(root, "instructions", &v)) put(out, ",{'role':'system','content':%r}", raw(&v));
    if (!member(root, "input", &rest) || (rest.type != GGUF_J_STRING && rest.type != GGUF_J_ARRAY))
        return refuse(&x->fault, 400, "input", "input: expected a string or a list");
    bool ok = !*x->previous || put_previous(x, out, &said);
    if (rest.type == GGUF_J_STRING) {
        put(&text, "{'role':'user','content':%r}", raw(&rest));
        ok = ok && put_input_item(x, out, &said, (GgufJson){ GGUF_J_OBJECT, text.s, text.n }, 0);
    } else {
        for (int i = 0; ok && gguf_json_next(&rest, NULL, &item); i++) ok = put_input_item(x, out, &said, item, i);
    }
    put_said_calls(out, &said);
    tok_text_free(&text);
    tok_text_free(&said.thought);
    tok_text_free(&said.calls);
    return ok;
}

// Reads which response this one continues, and whether it will be kept for the next one.
static bool read_previous(Exchange *x, const GgufJson *root) {
    GgufJson v;
    x->keeps = !(member(root, "store", &v) && v.type == GGUF_J_FALSE);
    if (!member(root, "previous_response_id", &v)) return true;
    if (v.type != GGUF_J_STRING || v.n >= sizeof x->previous || v.n < 3)
        return refuse(&x->fault, 400, "previous_response_id", "previous_response_id: expected the id of a response");
    x->previous[gguf_json_string(&v, x->previous)] = 0;
    return true;
}

static bool responses_convert(Exchange *x, TokText *out) {
    static const char *const absent[] = { "conversation", "prompt" }, *const known[] = {
        "model", "input", "instructions", "max_output_tokens", "user", "temperature", "top_p", "stream", "tools",
        "tool_choice", "parallel_tool_calls", "reasoning", "text", "previous_response_id", "conversation", "prompt",
        "background", "store", "include", "metadata", "service_tier", "truncation", "prompt_cache_key",
        "prompt_cache_retention", "safety_identifier", "max_tool_calls", "stream_options", "client_metadata",
        "context_management", NULL
    };
    GgufJson root, v;
    TokText list = { 0 };
    if (!parse_body(x, &root)) return false;
    x->asked = root;
    check_fields(x, &root, known, false);
    for (size_t i = 0; i < sizeof absent / sizeof *absent; i++)
        if (member(&root, absent[i], &v))
            return refuse(&x->fault, 400, absent[i], "%s: this server stores no conversations; send the whole "
                                                     "conversation",
                          absent[i]);
    if (member(&root, "background", &v) && v.type == GGUF_J_TRUE)
        return refuse(&x->fault, 400, "background", "background is not supported");
    const bool ok = read_previous(x, &root) && put_input(x, &list, &root);
    put(out, "{'messages':[%r]", (TokStr){ list.n ? list.s + 1 : "", list.n - (list.n > 0) });
    tok_text_free(&list);
    if (!ok) return false;
    take_member(out, &root, "tools", "tools");
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

// ==== [2] The answer =================================================================================================

// Each piece of an answer is an item: a thought, a text or a call. Piece i is item number i.
static void item_id(const Exchange *x, int i, char out[64]) {
    static const char *const prefixes[] = { "rs_", "msg_", "fc_" };    // of PieceKind
    const AnswerPiece *p = &x->job->pieces[i];
    const bool custom = p->kind == PIECE_CALL && client_tool(x, &x->job->calls[p->from]).custom;
    snprintf(out, 64, "%s%s_%d", custom ? "ctc_" : prefixes[p->kind], x->id + 5, i);
}

static void put_part(TokText *out, bool is_thought, TokStr text) {
    if (is_thought) put(out, "{'type':'reasoning_text','text':%t}", text);
    else put(out, "{'type':'output_text','text':%t,'annotations':[],'logprobs':[]}", text);
}

static void put_summary(TokText *out, TokStr text) { put(out, "{'type':'summary_text','text':%t}", text); }

// True if the client asks for a summary of thoughts. There is no other summary than the thought itself.
static bool wants_summary(const Exchange *x) {
    GgufJson reasoning, v;
    return member(&x->asked, "reasoning", &reasoning) &&
           (member(&reasoning, "summary", &v) || member(&reasoning, "generate_summary", &v)) &&
           !gguf_json_is(&v, "none");
}

static void put_call_item(TokText *out, const Exchange *x, const char *id, const Call *call, const char *status) {
    const ClientTool as = client_tool(x, call);
    put(out, "{'type':%s,'id':%s,'call_id':%s,'name':", as.custom ? "custom_tool_call" : "function_call", id, call->id);
    if (is_given(&as.name)) put(out, "%r", raw(&as.name));
    else put(out, "%t", text_of(&call->name));
    if (is_given(&as.space)) put(out, ",'namespace':%r", raw(&as.space));
    put(out, as.custom ? ",'input':" : ",'arguments':");
    if (!strcmp(status, "in_progress")) put(out, "''");
    else if (as.custom) put_custom_input(out, call);
    else put(out, "%t", text_of(&call->arguments));
    put(out, ",'status':%s}", status);
}

// True if the request asks that responses include this.
static bool includes(const Exchange *x, const char *what) {
    GgufJson list, v;
    if (!member(&x->asked, "include", &list) || list.type != GGUF_J_ARRAY) return false;
    while (gguf_json_next(&list, NULL, &v)) if (gguf_json_is(&v, what)) return true;
    return false;
}

// Appends piece i as an item; done: complete, or as complete as it gets.
static void put_output(TokText *out, const Exchange *x, int i, bool done) {
    const Job *job = x->job;
    const AnswerPiece *p = &job->pieces[i];
    const char *status = !done ? "in_progress" : job->cut && i == job->n_pieces - 1 ? "incomplete" : "completed";
    char id[64];
    item_id(x, i, id);
    if (p->kind == PIECE_CALL) {
        put_call_item(out, x, id, &job->calls[p->from], status);
        return;
    }
    const TokStr text = piece_text(job, p, 0);
    if (p->kind == PIECE_THOUGHT) {
        put(out, "{'type':'reasoning','id':%s,'status':%s,'summary':[", id, status);
        if (done && wants_summary(x)) put_summary(out, text);
        put(out, "],'encrypted_content':");
        if (done && includes(x, "reasoning.encrypted_content")) put_signature(out, text);
        else put(out, "null");
        put(out, ",'content':[");
    } else {
        put(out, "{'type':'message','id':%s,'status':%s,'role':'assistant','content':[", id, status);
    }
    if (done) put_part(out, p->kind == PIECE_THOUGHT, text);
    put(out, "]}");
}

// Appends a member of the request, as it was given or as it is if it is not given.
static void put_given(TokText *out, const GgufJson *asked, const char *name, const char *otherwise) {
    GgufJson v;
    put(out, ",%s:", name);
    if (member(asked, name, &v)) put(out, "%r", raw(&v));
    else put(out, otherwise);
}

// Appends what the response says of its request.
static void put_request(TokText *out, const Exchange *x) {
    static const struct { const char *name, *otherwise; } members[] = {
        { "instructions", "null" }, { "max_output_tokens", "null" }, { "max_tool_calls", "null" }, { "metadata", "{}" },
        { "prompt_cache_key", "null" }, { "safety_identifier", "null" }, { "text", "{'format':{'type':'text'}}" },
        { "tool_choice", "'auto'" }, { "tools", "[]" }, { "truncation", "'disabled'" }, { "user", "null" }
    };
    const SampleParams *p = &x->job->options.sampling;
    GgufJson reasoning = { .type = GGUF_J_NULL };
    member(&x->asked, "reasoning", &reasoning);
    for (size_t i = 0; i < sizeof members / sizeof *members; i++)
        put_given(out, &x->asked, members[i].name, members[i].otherwise);
    put(out, ",'reasoning':{'effort':");
    GgufJson v;
    if (member(&reasoning, "effort", &v)) put(out, "%r", raw(&v));
    else put(out, "null");
    put_given(out, &reasoning, "summary", "null");
    put(out, "},'temperature':%f,'top_p':%f,'top_logprobs':0,'parallel_tool_calls':%b,'previous_response_id':",
        (double)p->temperature, (double)p->top_p, !x->one_call);
    put_or_null(out, *x->previous ? x->previous : NULL);
    put(out, ",'conversation':null,'prompt':null,'background':false,'service_tier':'default','store':%b", x->keeps);
}

static const char *error_code(const Fault *f) {        // these errors always have one
    return f->code ? f->code : f->status < 500 ? "invalid_prompt" : "server_error";
}

// Appends the response as an object; it has output and usage when it is complete.
static void put_response(TokText *out, const Exchange *x, const char *status) {
    const Job *job = x->job;
    const bool done = strcmp(status, "in_progress"), failed = job->fault.status;
    put(out, "{'id':%s,'object':'response','created_at':%z,'model':%s,'status':%s", x->id, x->created, x->srv->name,
        status);
    if (!strcmp(status, "completed")) put(out, ",'completed_at':%z", (size_t)time(NULL));
    else put(out, ",'completed_at':null");
    if (failed) put(out, ",'error':{'code':%s,'message':%s}", error_code(&job->fault), job->fault.text);
    else put(out, ",'error':null");
    put(out, ",'incomplete_details':");
    put(out, !strcmp(status, "incomplete") ? "{'reason':'max_output_tokens'}" : "null");
    put_request(out, x);
    put(out, ",'output':[");
    for (int i = 0; done && i < job->n_pieces; i++) {
        if (i) put(out, ",");
        put_output(out, x, i, true);
    }
    put(out, "],'usage':");
    const Usage u = usage_of(x);
    if (done)
        put(out, "{'input_tokens':%d,'input_tokens_details':{'cached_tokens':%d},'output_tokens':%d,"
            "'output_tokens_details':{'reasoning_tokens':%d},'total_tokens':%d}", u.prompt, u.cached, u.made, u.thought,
            u.prompt + u.made);
    else put(out, "null");
    put(out, "}");
}

static void event(Exchange *x, const char *type) {     // like open_event(), with its number
    open_event(x, type);
    put(&x->out, ",'sequence_number':%d", x->n_events++);
}

// An event with the response as it is.
static void response_event(Exchange *x, const char *type, const char *status) {
    event(x, type);
    put(&x->out, ",'response':");
    put_response(&x->out, x, status);
    put(&x->out, "}\n\n");
}

static void responses_begin(Exchange *x) {
    response_event(x, "response.created", "in_progress");
    response_event(x, "response.in_progress", "in_progress");
}

static const char text_block[] = "text", thought_block[] = "thought";

// An event about the open item; the caller appends its other members and "}\n\n".
static void item_event(Exchange *x, const char *type, const char *part_index) {
    char id[64];
    item_id(x, x->n_blocks, id);
    event(x, type);
    put(&x->out, ",'item_id':%s,'output_index':%d", id, x->n_blocks);
    if (part_index) put(&x->out, ",%s:0", part_index);
}

static void output_event(Exchange *x, const char *type, bool done) {
    event(x, type);
    put(&x->out, ",'output_index':%d,'item':", x->n_blocks);
    put_output(&x->out, x, x->n_blocks, done);
    put(&x->out, "}\n\n");
}

// An item has one part, a text, a thought or the summary of one, whose events have these names.
typedef struct { const char *index, *added, *delta, *text_done, *part_done; } PartEvents;

static const PartEvents *part_events(const Exchange *x) {
    static const PartEvents text = { "content_index", "response.content_part.added", "response.output_text.delta",
                                     "response.output_text.done", "response.content_part.done" };
    static const PartEvents thought = { "content_index", "response.content_part.added",
                                        "response.reasoning_text.delta", "response.reasoning_text.done",
                                        "response.content_part.done" };
    static const PartEvents summary = { "summary_index", "response.reasoning_summary_part.added",
                                        "response.reasoning_summary_text.delta",
                                        "response.reasoning_summary_text.done",
                                        "response.reasoning_summary_part.done" };
    if (x->job->pieces[x->n_blocks].kind == PIECE_TEXT) return &text;
    return wants_summary(x) ? &summary : &thought;
}

static void part_event(Exchange *x, const char *type, TokStr text) {
    const bool is_thought = x->job->pieces[x->n_blocks].kind == PIECE_THOUGHT;
    item_event(x, type, part_events(x)->index);
    put(&x->out, ",'part':");
    if (is_thought && wants_summary(x)) put_summary(&x->out, text);
    else put_part(&x->out, is_thought, text);
    put(&x->out, "}\n\n");
}

static void close_item(Exchange *x) {                  // the open item, a text or a thought
    if (!x->block) return;
    const PartEvents *names = part_events(x);
    const AnswerPiece *p = &x->job->pieces[x->n_blocks];
    const TokStr text = piece_text(x->job, p, 0);
    item_event(x, names->text_done, names->index);
    put(&x->out, p->kind == PIECE_TEXT ? ",'logprobs':[],'text':%t}\n\n" : ",'text':%t}\n\n", text);
    part_event(x, names->part_done, text);
    output_event(x, "response.output_item.done", true);
    x->block = NULL;
    x->n_blocks++;
}

static void responses_delta(Exchange *x, const char *block, TokStr text) {
    if (!text.n) return;
    if (x->block != block) close_item(x);
    const PartEvents *names = part_events(x);
    if (!x->block) {
        output_event(x, "response.output_item.added", false);
        part_event(x, names->added, str(""));
    }
    x->block = block;
    item_event(x, names->delta, names->index);
    put(&x->out, block == text_block ? ",'logprobs':[],'delta':%t}\n\n" : ",'delta':%t}\n\n", text);
}

static void responses_text(Exchange *x, TokStr thought, TokStr content) {
    responses_delta(x, thought_block, thought);
    responses_delta(x, text_block, content);
}

// The events of a call between those of its item.
static void responses_custom_call(Exchange *x, const Call *call) {
    item_event(x, "response.custom_tool_call_input.delta", NULL);
    put(&x->out, ",'delta':");
    put_custom_input(&x->out, call);
    put(&x->out, "}\n\n");
    item_event(x, "response.custom_tool_call_input.done", NULL);
    put(&x->out, ",'input':");
    put_custom_input(&x->out, call);
    put(&x->out, "}\n\n");
}

static void responses_function_call(Exchange *x, const Call *call) {
    item_event(x, "response.function_call_arguments.delta", NULL);
    put(&x->out, ",'delta':%t}\n\n", text_of(&call->arguments));
    item_event(x, "response.function_call_arguments.done", NULL);
    put(&x->out, ",'name':%t,'arguments':%t}\n\n", text_of(&call->name), text_of(&call->arguments));
}

static void responses_call(Exchange *x, int i) {
    const Call *call = &x->job->calls[i];
    close_item(x);
    output_event(x, "response.output_item.added", false);
    if (client_tool(x, call).custom) responses_custom_call(x, call);
    else responses_function_call(x, call);
    output_event(x, "response.output_item.done", true);
    x->n_blocks++;
}

// Keeps the items of the answer by their ids, and with those before them by the id of the response: see recent.h.
static void keep_response(Exchange *x) {
    Server *srv = x->srv;
    TokText text = { 0 };
    GgufJson root, rest, item, v;
    const char *err;
    size_t at;
    char id[64];
    if (!x->keeps) return;
    put_response(&text, x, "completed");
    const bool ok = gguf_json_parse(text.s, text.n, &root, &at, &err) == 0 && member(&root, "output", &rest);
    pthread_mutex_lock(&srv->lock);
    while (ok && gguf_json_next(&rest, NULL, &item)) {
        put(&x->kept, x->kept.n ? ",%r" : "%r", raw(&item));
        if (!member(&item, "id", &v) || v.n >= sizeof id) continue;
        id[gguf_json_string(&v, id)] = 0;
        recent_add(&srv->items, id, "", raw(&item));
    }
    recent_add(&srv->responses, x->id, x->previous, text_of(&x->kept));
    pthread_mutex_unlock(&srv->lock);
    tok_text_free(&text);
}

static void responses_end(Exchange *x) {
    close_item(x);
    keep_response(x);
    if (is_cut(x->job)) response_event(x, "response.incomplete", "incomplete");
    else response_event(x, "response.completed", "completed");
}

// The API has two events for an error in a stream; its clients read one or the other.
static void responses_fail(Exchange *x) {
    const Fault *f = &x->job->fault;
    const char *code = error_code(f), *param = *f->param ? f->param : NULL;
    event(x, "error");
    put(&x->out, ",'code':%s,'message':%s,'param':", code, f->text);
    put_or_null(&x->out, param);
    put(&x->out, ",'error':{'type':%s,'code':%s,'message':%s,'param':", f->status < 500 ? "invalid_request_error" :
        "server_error", code, f->text);
    put_or_null(&x->out, param);
    put(&x->out, "}}\n\n");
    response_event(x, "response.failed", "failed");
}

static void responses_whole(Exchange *x, TokText *out) {
    keep_response(x);
    put_response(out, x, is_cut(x->job) ? "incomplete" : "completed");
}

static const Api responses_api = { "resp_", responses_convert, chat_ask, responses_begin, responses_text,
                                   responses_call, responses_end, responses_whole, responses_fail, NULL };

static void route_responses(Exchange *x) { complete(x, &responses_api); }

#endif
#endif
