/* responses.h - the API /v1/responses. The server stores none, so each request contains its whole conversation.
 *
 * Uses request.h, schedule.h, exchange.h, openai.h, dialects.h. Begin with responses_convert(). */
#ifndef RESPONSES_H
#define RESPONSES_H

#ifdef USE_MICROHTTPD

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
    x->asked = root;
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

// Each piece of an answer is an item: a thought, a text or a call. AnswerPiece i is item number i.
static void item_id(const Exchange *x, int i, char out[64]) {
    static const char *const prefixes[] = { "rs_", "msg_", "fc_" };    // of PieceKind
    snprintf(out, 64, "%s%s_%d", prefixes[x->job->pieces[i].kind], x->id + 5, i);
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
        const Call *call = &job->calls[p->from];
        put(out, "{'type':'function_call','id':%s,'call_id':%s,'name':%t,'arguments':%t,'status':%s}", id, call->id,
            text_of(&call->name), done ? text_of(&call->arguments) : str(""), status);
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
    put(out, "},'temperature':%f,'top_p':%f,'top_logprobs':0,'parallel_tool_calls':%b,'previous_response_id':null,"
        "'conversation':null,'prompt':null,'background':false,'service_tier':'default','store':false",
        (double)p->temperature, (double)p->top_p, !x->one_call);
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

static void responses_call(Exchange *x, int i) {
    const Call *call = &x->job->calls[i];
    close_item(x);
    output_event(x, "response.output_item.added", false);
    item_event(x, "response.function_call_arguments.delta", NULL);
    put(&x->out, ",'delta':%t}\n\n", text_of(&call->arguments));
    item_event(x, "response.function_call_arguments.done", NULL);
    put(&x->out, ",'name':%t,'arguments':%t}\n\n", text_of(&call->name), text_of(&call->arguments));
    output_event(x, "response.output_item.done", true);
    x->n_blocks++;
}

static void responses_end(Exchange *x) {
    close_item(x);
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
    put_response(out, x, is_cut(x->job) ? "incomplete" : "completed");
}

static const Api responses_api = { "resp_", responses_convert, chat_ask, responses_begin, responses_text,
                                   responses_call, responses_end, responses_whole, responses_fail, NULL };

static void route_responses(Exchange *x) { complete(x, &responses_api); }

#endif
#endif
