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

#endif
#endif
