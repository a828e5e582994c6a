/* anthropic.h - the API /v1/messages of Anthropic's clients.
 *
 * Uses request.h, schedule.h, exchange.h, openai.h, dialects.h. Begin with messages_convert(). */
#ifndef ANTHROPIC_H
#define ANTHROPIC_H

#ifdef USE_MICROHTTPD

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

#endif
#endif
