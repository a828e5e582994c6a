/* openai.h - the APIs /v1/chat/completions and /v1/completions.
 *
 * Uses engine.h, request.h, schedule.h, exchange.h; the caller chat.h [1] (lists of messages). Begin with chat_api.
 *   [1] /v1/chat/completions    [2] /v1/completions */
#ifndef OPENAI_H
#define OPENAI_H

#ifdef USE_MICROHTTPD
enum { PLAIN_TOP = 5 };                                // logprobs of /v1/completions, at most

// ==== [1] /v1/chat/completions =======================================================================================

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
        ok = ok && reply[i].n_calls == 1 &&
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

// ==== [2] /v1/completions ============================================================================================

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

static void route_chat(Exchange *x) { complete(x, &chat_api); }
static void route_completions(Exchange *x) { complete(x, &plain_api); }

#endif
#endif
