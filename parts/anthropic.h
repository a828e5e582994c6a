/* anthropic.h - the API /v1/messages of Anthropic's clients.
 *
 * Uses request.h, schedule.h, exchange.h, dialects.h, history.h, openai.h. Begin with messages_convert(). */
#ifndef ANTHROPIC_H
#define ANTHROPIC_H

#ifdef USE_MICROHTTPD

// Appends the results of calls in a message, each as a message of its own.
static bool put_results(Exchange *x, TokText *out, const GgufJson *content) {
    GgufJson rest = *content, part, text;
    while (content->type == GGUF_J_ARRAY && gguf_json_next(&rest, NULL, &part)) {
        if (!is_type(&part, "tool_result")) continue;
        put(out, ",{'role':'tool'");
        take_member(out, &part, "tool_use_id", "tool_call_id");
        put(out, ",'content':");
        if (!member(&part, "content", &text)) put(out, "''");
        else if (!put_content(x, out, &text, "tool_result")) return false;
        put(out, "}");
    }
    return true;
}

// Appends the content, thoughts and calls of a message; put_results() has done the rest of it.
static void put_blocks(Exchange *x, TokText *out, const GgufJson *content) {
    GgufJson rest = *content, part, id, name, v;
    TokText parts = { 0 }, thought = { 0 }, calls = { 0 };
    while (gguf_json_next(&rest, NULL, &part)) {
        if (is_type(&part, "thinking") && member(&part, "thinking", &v) && v.type == GGUF_J_STRING) {
            thought.n = 0;
            put(&thought, "%r", raw(&v));
        } else if (is_type(&part, "tool_use") && member(&part, "id", &id) && member(&part, "name", &name)) {
            if (!member(&part, "input", &v)) v = (GgufJson){ GGUF_J_OBJECT, "{}", 2 };
            put_past_call(&calls, &id, &name, &v);
        } else if (is_type(&part, "redacted_thinking")) {
            warn(x, "redacted_thinking: left out, it is encrypted");
        } else if (!is_type(&part, "tool_result")) {
            put(&parts, parts.n ? ",%r" : "%r", raw(&part));
        }
    }
    if (parts.n) put(out, ",'content':[%r]", text_of(&parts));
    if (thought.n) put(out, ",'reasoning_content':%r", text_of(&thought));
    if (calls.n) put(out, ",'tool_calls':[%r]", text_of(&calls));
    tok_text_free(&parts);
    tok_text_free(&thought);
    tok_text_free(&calls);
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

// Appends a text of the system, a string, without a first line that says what is billed: it has a number that changes
// with each request, so the prompt would begin with other tokens each time, and nothing of it would be cached. False:
// nothing else is in the text.
static bool put_system_text(TokText *out, const GgufJson *string) {
    static const char head[] = "x-anthropic-billing-header:";
    TokText text = { 0 };
    append_content(&text, string);
    const bool billed = text.n >= sizeof head - 1 && !memcmp(text.s, head, sizeof head - 1);
    const char *end = billed ? memchr(text.s, '\n', text.n) : NULL;
    if (!billed) put(out, "%r", raw(string));
    else if (end) put(out, "%t", text_from(&text, (size_t)(end + 1 - text.s)));
    tok_text_free(&text);
    return !billed || end;
}

// Appends a system message; none if nothing of it is left.
static bool put_system(Exchange *x, TokText *out, const GgufJson *content) {
    GgufJson rest = *content, part, v;
    TokText said = { 0 }, text = { 0 };
    if (content->type == GGUF_J_STRING) {
        put_system_text(&said, content);
    } else if (content->type == GGUF_J_ARRAY) {
        while (gguf_json_next(&rest, NULL, &part)) {
            const bool is_text = member(&part, "text", &v) && v.type == GGUF_J_STRING;
            text.n = 0;
            if (is_text && !put_system_text(&text, &v)) continue;
            put(&said, said.n ? "," : "[");
            if (is_text) put(&said, "{'type':'text','text':%r}", text_of(&text));
            else put(&said, "%r", raw(&part));
        }
        if (said.n) put(&said, "]");
    } else {
        refuse(&x->fault, 400, "system", "system: expected a string or a list");
    }
    if (said.n) put(out, ",{'role':'system','content':%r}", text_of(&said));
    tok_text_free(&said);
    tok_text_free(&text);
    return !x->fault.status;
}

// *continues: the last message is an answer of the assistant to be continued, and not empty.
static bool put_messages(Exchange *x, TokText *out, const GgufJson *root, bool *continues) {
    GgufJson rest, m, role, content;
    if (member(root, "system", &content) && !put_system(x, out, &content)) return false;
    if (!member(root, "messages", &rest) || rest.type != GGUF_J_ARRAY)
        return refuse(&x->fault, 400, "messages", "messages: expected a list");
    for (int i = 0; gguf_json_next(&rest, NULL, &m); i++) {
        if (!member(&m, "role", &role) ||
            !(gguf_json_is(&role, "user") || gguf_json_is(&role, "assistant") || gguf_json_is(&role, "system")))
            return refuse(&x->fault, 400, "messages", "messages[%d].role: expected user, assistant or system", i);
        if (!member(&m, "content", &content)) content = (GgufJson){ GGUF_J_STRING, "\"\"", 2 };
        if (content.type != GGUF_J_STRING && content.type != GGUF_J_ARRAY)
            return refuse(&x->fault, 400, "messages", "messages[%d].content: expected a string or a list", i);
        GgufJson after = rest, next;
        *continues = gguf_json_is(&role, "assistant") && content.n > 2;
        if (content.n == 2 && gguf_json_is(&role, "assistant") && !gguf_json_next(&after, NULL, &next)) break;
        if (gguf_json_is(&role, "system")) {
            if (!put_system(x, out, &content)) return false;
            continue;
        }
        if (!put_results(x, out, &content)) return false;
        if (only_results(&content)) continue;
        put(out, ",{'role':%r", raw(&role));
        if (content.type == GGUF_J_STRING) put(out, ",'content':%r", raw(&content));
        else put_blocks(x, out, &content);
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
    static const char *const known[] = {
        "model", "system", "messages", "tools", "tool_choice", "max_tokens", "temperature", "top_p", "top_k",
        "stop_sequences", "stream", "output_format", "output_config", "metadata", "thinking", "service_tier",
        "context_management", "mcp_servers", "container", "inference_geo", "speed", "betas", "cache_control",
        "diagnostics", NULL
    };
    GgufJson root, v;
    TokText list = { 0 };
    if (!parse_body(x, &root)) return false;
    if (member(&root, "thread", &v)) {                 // with it a client sends only what is new in its next request
        x->fault.code = "thread_unsupported_request";
        return refuse(&x->fault, 400, "thread", "thread: this server stores no conversations; send all messages");
    }
    check_fields(x, &root, known, false);
    if (member(&root, "mcp_servers", &v) && v.n > 2) warn(x, "mcp_servers: left out, this server does not call them");
    bool continues = false, ok = put_messages(x, &list, &root, &continues);
    put(out, "{'messages':[%r]", (TokStr){ list.n ? list.s + 1 : "", list.n - (list.n > 0) });
    tok_text_free(&list);
    if (!ok) return false;
    take_member(out, &root, "tools", "tools");
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
    if (job->end == END_CONTEXT) return "model_context_window_exceeded";
    return is_cut(job) ? "max_tokens" : job->end == END_STOP_STRING ? "stop_sequence" : "end_turn";
}

static void put_reason(TokText *out, const Job *job) {
    put(out, "'stop_reason':%s,'stop_sequence':", messages_reason(job));
    put_or_null(out, job->stop);
    put(out, ",'stop_details':null,'container':null");
}

static void messages_head(TokText *out, const Exchange *x) {
    put(out, "'id':%s,'type':'message','role':'assistant','model':%s", x->id, x->srv->name);
}

// n_input: tokens of the prompt that were not cached.
static void messages_usage(TokText *out, size_t n_input, int n_cached, int n_output) {
    put(out, "'usage':{'input_tokens':%z,'cache_creation_input_tokens':0,'cache_read_input_tokens':%d,"
        "'cache_creation':{'ephemeral_5m_input_tokens':0,'ephemeral_1h_input_tokens':0},'output_tokens':%d,"
        "'server_tool_use':null,'service_tier':'standard'}", n_input, n_cached, n_output);
}

static const char messages_ping[] = "event: ping\ndata: {'type':'ping'}\n\n";
static const char thinking_block[] = "thinking", plain_block[] = "text", tool_block[] = "tool_use";

static void messages_begin(Exchange *x) {
    open_event(x, "message_start");
    put(&x->out, ",'message':{");
    messages_head(&x->out, x);
    put(&x->out, ",'content':[],'stop_reason':null,'stop_sequence':null,'stop_details':null,'container':null,");
    messages_usage(&x->out, x->job->ids.n, 0, 0);      // how many are cached is not known yet; message_delta says it
    put(&x->out, "}}\n\n");
    put(&x->out, messages_ping);
}

static void close_block(Exchange *x) {
    if (!x->block) return;
    if (x->block == thinking_block) {
        open_event(x, "content_block_delta");
        put(&x->out, ",'index':%d,'delta':{'type':'signature_delta','signature':", x->n_blocks);
        put_signature(&x->out, piece_text(x->job, &x->job->pieces[x->n_blocks], 0));
        put(&x->out, "}}\n\n");
    }
    open_event(x, "content_block_stop");
    put(&x->out, ",'index':%d}\n\n", x->n_blocks++);
    x->block = NULL;
}

static void messages_delta(Exchange *x, const char *block, TokStr text) {
    const bool is_text = block == plain_block;
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
    messages_delta(x, thinking_block, thought);
    messages_delta(x, plain_block, content);
}

static void messages_call(Exchange *x, int i) {
    const Call *call = &x->job->calls[i];
    close_block(x);
    x->block = tool_block;
    open_event(x, "content_block_start");
    put(&x->out, ",'index':%d,'content_block':{'type':'tool_use','id':%s,'name':%t,'input':{}}}\n\n", x->n_blocks,
        call->id, text_of(&call->name));
    open_event(x, "content_block_delta");
    put(&x->out, ",'index':%d,'delta':{'type':'input_json_delta','partial_json':%t}}\n\n", x->n_blocks,
        text_of(&call->arguments));
    close_block(x);
}

static void put_messages_usage(TokText *out, const Job *job) {
    messages_usage(out, (size_t)(job->turn.n_prompt - job->cached), job->cached, job->turn.made);
}

static void messages_end(Exchange *x) {
    close_block(x);
    open_event(x, "message_delta");
    put(&x->out, ",'delta':{");
    put_reason(&x->out, x->job);
    put(&x->out, "},");
    put_messages_usage(&x->out, x->job);
    put(&x->out, "}\n\n");
    open_event(x, "message_stop");
    put(&x->out, "}\n\n");
}

static void put_block(TokText *out, const Job *job, const AnswerPiece *p) {
    if (p->kind == PIECE_CALL) {
        const Call *call = &job->calls[p->from];
        put(out, "{'type':'tool_use','id':%s,'name':%t,'input':%r}", call->id, text_of(&call->name),
            text_of(&call->arguments));
    } else if (p->kind == PIECE_THOUGHT) {
        put(out, "{'type':'thinking','thinking':%t,'signature':", piece_text(job, p, 0));
        put_signature(out, piece_text(job, p, 0));
        put(out, "}");
    } else {
        put(out, "{'type':'text','text':%t}", piece_text(job, p, 0));
    }
}

static void messages_whole(Exchange *x, TokText *out) {
    const Job *job = x->job;
    put(out, "{");
    messages_head(out, x);
    put(out, ",'content':[");
    for (int i = 0; i < job->n_pieces; i++) {
        if (i) put(out, ",");
        put_block(out, job, &job->pieces[i]);
    }
    put(out, "],");
    put_reason(out, job);
    put(out, ",");
    put_messages_usage(out, job);
    put(out, "}");
}

static void messages_fail(Exchange *x) {
    put(&x->out, "event: error\ndata: ");
    put_fault(&x->out, x, &x->job->fault);
    put(&x->out, "\n\n");
}

static const Api messages_api = { "msg_", messages_convert, chat_ask, messages_begin, messages_text, messages_call,
                                  messages_end, messages_whole, messages_fail, messages_ping };

static void route_messages(Exchange *x) { complete(x, &messages_api); }

static void route_count(Exchange *x) {
    Request r;
    TokText out = { 0 };
    x->counts = true;
    if (!add_choice(x) || !read_question(x, &messages_api, &r)) return;
    put(&out, "{'input_tokens':%z}", x->job->ids.n + x->more);
    respond(x, 200, "application/json", &out);
}

#endif
#endif
