/* openai.h - the APIs /v1/chat/completions, /v1/completions and llama.cpp's /completion.
 *
 * Uses engine.h, request.h, schedule.h, exchange.h, dialects.h, history.h; the caller chat.h [1] (lists of messages).
 * Begin with chat_api.
 *   [1] /v1/chat/completions    [2] /v1/completions    [3] /completion */
#ifndef OPENAI_H
#define OPENAI_H

#ifdef USE_MICROHTTPD
enum { PLAIN_TOP = 5 };                                // logprobs of /v1/completions, at most

// ==== [1] /v1/chat/completions =======================================================================================

static void chunk(Exchange *x) {                       // begins an event of a stream; its delta follows
    put(&x->out, "data: {");
    put_head(&x->out, x, "chat.completion.chunk");
    put(&x->out, ",'choices':[{'index':%d,'delta':{", x->choice->index);
}

static void put_logprobs(TokText *out, const Exchange *x, int first) {
    put(out, "{'content':");
    put_likely(out, x, first);
    put(out, ",'refusal':null}");
}

static void put_new_likely(Exchange *x) {              // of tokens that no event has reported yet, if requested
    if (x->job->n_top < 0) return;
    put(&x->out, ",'logprobs':");
    put_logprobs(&x->out, x, x->choice->n_likely);
    x->choice->n_likely = x->job->n_likely;
}

static void put_event_end(Exchange *x) {
    const bool timed = x->timed && x->job->turn.made;
    if (timed) put(&x->out, ",");
    if (timed) put_timings(&x->out, x);
    put(&x->out, "}\n\n");
}

static void chunk_end(Exchange *x, bool likely) {
    put(&x->out, "}");
    if (likely) put_new_likely(x);
    put(&x->out, ",'finish_reason':null}]");
    put_event_end(x);
}

static void chat_begin(Exchange *x) {                  // an answer that has to be a call has no text, not an empty one
    chunk(x);
    put(&x->out, "'role':'assistant','content':");
    put(&x->out, x->forced ? "null" : "''");
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

static void put_chat_call(TokText *out, const Exchange *x, const Call *call) {
    const ClientTool as = client_tool(x, call);
    if (!as.custom) {
        put_call(out, call);
        return;
    }
    put(out, "'id':%s,'type':'custom','custom':{'name':%r,'input':", call->id, raw(&as.name));
    put_custom_input(out, call);
    put(out, "}");
}

static void chat_call(Exchange *x, int i) {
    chunk(x);
    put(&x->out, "'tool_calls':[{'index':%d,", i);
    put_chat_call(&x->out, x, &x->job->calls[i]);
    put(&x->out, "}]");
    chunk_end(x, false);
}

static void done_marker(Exchange *x) { put(&x->out, "data: [DONE]\n\n"); }

// The last events of both kinds of completion: usage has an event of its own, if it was requested.
static void completion_end(Exchange *x, const char *object) {
    put(&x->out, ",");
    put_finish(&x->out, x->job);
    put(&x->out, "}]");
    if (x->ended) put(&x->out, ",");
    if (x->ended) put_timings(&x->out, x);
    put(&x->out, "}\n\n");
    if (!x->ended) return;
    if (x->include_usage) {
        put(&x->out, "data: {");
        put_head(&x->out, x, object);
        put(&x->out, ",'choices':[],");
        put_usage(&x->out, x);
        put(&x->out, "}\n\n");
    }
    done_marker(x);
}

static void chat_end(Exchange *x) {
    chunk(x);
    put(&x->out, "}");
    if (x->choice->n_likely < x->job->n_likely) put_new_likely(x);   // those of a stop string and of calls
    completion_end(x, "chat.completion.chunk");
}

static void chat_choice(Exchange *x, TokText *out) {
    const Job *job = x->job;
    put(out, "{'index':%d,'message':{'role':'assistant','refusal':null,'content':", x->choice->index);
    if (job->content.n || (!job->n_calls && !x->forced)) put(out, "%t", text_of(&job->content));
    else put(out, "null");
    if (job->thought.n) put(out, ",'reasoning_content':%t", text_of(&job->thought));
    for (int i = 0; i < job->n_calls; i++) {
        put(out, i ? ",{" : ",'tool_calls':[{");
        put_chat_call(out, x, &job->calls[i]);
        put(out, i + 1 == job->n_calls ? "}]" : "}");
    }
    put(out, "},'logprobs':");
    if (job->n_top >= 0) put_logprobs(out, x, 0);
    else put(out, "null");
    put(out, ",");
    put_finish(out, job);
    put(out, "}");
}

// Appends the choices in order.
static void put_choices(Exchange *x, TokText *out, void (*put_choice)(Exchange *, TokText *)) {
    for (int i = 0; i < x->n_prompts * x->n_shown; i++) {
        choose(x, i % x->n_shown * x->n_prompts + i / x->n_shown);
        if (i) put(out, ",");
        put_choice(x, out);
    }
}

// Appends a whole answer.
static void put_completion(Exchange *x, TokText *out, const char *object, void (*put_choice)(Exchange *, TokText *)) {
    put(out, "{");
    put_head(out, x, object);
    put(out, ",'choices':[");
    put_choices(x, out, put_choice);
    put(out, "],");
    put_usage(out, x);
    put(out, ",");
    put_timings(out, x);
    put(out, "}");
}

static void chat_whole(Exchange *x, TokText *out) { put_completion(x, out, "chat.completion", chat_choice); }

static bool same_value(const GgufJson *a, const GgufJson *b, int depth) {
    GgufJson rest = *a, other = *b, key, x, y;
    double m, n;
    size_t n_a = 0, n_b = 0, bytes[2];
    if (a->type != b->type || !depth) return false;
    if (a->type == GGUF_J_NUMBER) return gguf_json_float(a, &m) && gguf_json_float(b, &n) && m == n;
    if (a->type == GGUF_J_STRING) {
        char *s = copy_string(a, &bytes[0]), *t = copy_string(b, &bytes[1]);
        const bool same = s && t && bytes[0] == bytes[1] && !memcmp(s, t, bytes[0]);
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
        const bool same = name && strlen(name) == n_key && gguf_json_get(b, name, &y) && same_value(&x, &y, depth - 1);
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
            if (tok_reply_push(t, &reply[i], ids[i].ids[k]) < 0) starved = true;
        ok = ok && reply[i].n_calls == 1 && !reply[i].content.n &&
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
                if (tok_push_id(srv->t, &ids, srv->replays[i].ids.ids[k]) < 0) starved = true;
    pthread_mutex_unlock(&srv->lock);
    return ids;
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

// Fields without effect, which need no word in the log.
static const char *const chat_fields[] = {
    "model", "store", "metadata", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
    "verbosity", "reasoning_format", "samplers", NULL
};

// Puts the pictures of a conversation into its prompt, which may have `most` ids (0: no limit; then the prompt is only
// counted). False: they are refused.
static bool add_pictures(Exchange *x, const TokPictures *at, size_t most, size_t *before_cue) {
    Job *job = x->job;
    char err[300];
    if (most && at->n > most) return refuse_long(x, at->n, true);
    if (!read_pictures(x->srv->m, &x->t, at, &job->pictures, &x->more, err, sizeof err))
        return refuse_text(x, "messages", NULL, err);
    const size_t n = job->ids.n + x->more;
    if (!most) return true;
    if (n > most) return refuse_long(x, n, false);
    for (int k = 0; k < job->pictures.n; k++) {
        const PictureFile *f = &job->pictures.files[k];
        job->picture_bytes += f->file.cap + 3 * (size_t)f->w * (size_t)f->h +
                              (size_t)f->n * (size_t)model_shape(x->srv->m).dim * sizeof(float);
    }
    if (!more_work(x, 8 * n)) return false;
    if (!place_pictures(&x->t, at, &job->ids, before_cue, &job->pictures)) return refuse_starved(&x->fault);
    return true;
}

// Makes the prompt of a conversation. A later prompt begins with it up to the cue.
static bool chat_ask(Exchange *x, Request *r) {
    Job *job = x->job;
    if (!x->api->convert) check_fields(x, &r->root, chat_fields, true);
    if (!convert_tools(x, r) || !read_messages(x, r)) return false;
    const bool tools = is_given(&r->tools) && !gguf_json_is(&r->tool_choice, "none");
    size_t least = 0, before_cue = 0;
    TokPictures at = { 0 };
    TokChat chat = { .messages = { r->messages.s, r->messages.n }, .think = r->think, .add_cue = true,
                     .most = x->counts ? 0 : (size_t)prompt_room(x->srv), .least = &least, .before_cue = &before_cue,
                     .pictures = &at };
    if (tools) chat.tools = (TokStr){ r->tools.s, r->tools.n };
    Begun begun = { 0 };
    bool ok = !r->continues || take_begun(r, &x->fault, &begun, &chat);
    if (ok && tok_chat(&x->t, &chat, &job->ids, NULL) < 0)
        ok = least ? refuse_long(x, least, true) :
             refuse_text(x, strncmp(x->t.err, "tools", 5) ? "messages" : "tools", NULL, x->t.err);
    ok = ok && add_pictures(x, &at, chat.most, &before_cue);
    tok_pictures_free(&at);
    const size_t cue = job->ids.n - before_cue;        // no calls are in it
    if (ok && !r->no_cache) replay_calls(x, &r->messages, &job->ids);
    if (ok) job->checkpoint_at = (int)(job->ids.n - cue);
    begun_free(&begun);
    if (!ok) return false;
    if (r->echo) return refuse(&x->fault, 400, "echo", "echo is a field of /v1/completions");
    const bool asked = r->logprobs.type == GGUF_J_TRUE;
    if (is_given(&r->logprobs) && r->logprobs.type != GGUF_J_TRUE && r->logprobs.type != GGUF_J_FALSE)
        return refuse(&x->fault, 400, "logprobs", "logprobs: expected true or false");
    if (r->top_logprobs > 0 && !asked)
        return refuse(&x->fault, 400, "top_logprobs", "top_logprobs needs logprobs");
    if (asked) job->n_top = isnan(r->top_logprobs) ? 0 : (int)r->top_logprobs;
    return true;
}

static const Api chat_api = { "chatcmpl-", NULL, chat_ask, chat_begin, chat_text, chat_call, chat_end, chat_whole,
                              NULL, NULL };

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

// Appends the probabilities of the next tokens, those of the first `end` characters; leaves out those of a stop string.
// The first token of a prompt has none.
static void put_plain_likely(TokText *out, Exchange *x, size_t end) {
    const Job *job = x->job;
    Choice *c = x->choice;
    const Likely *l = job->likely ? job->likely + c->n_likely : NULL;
    TokText offsets = { 0 };
    int n = 0;
    if (job->n_top < 0) {
        put(out, "null");
        return;
    }
    for (; c->n_likely + n < job->n_likely; n++) {
        const size_t chars = n_chars(tok_piece(&x->t, l[n].id, false));        // 0: the rest of a character
        if (c->chars >= end && chars && !(job->scores && job->done)) break;
        put(&offsets, n ? ",%z" : "%z", c->chars);
        c->chars += chars;
    }
    put(out, "{'tokens':[");
    for (int i = 0; i < n; i++) {
        put(out, i ? "," : "");
        put_piece(out, tok_piece(&x->t, l[i].id, true));
    }
    put(out, "],'token_logprobs':[");
    for (int i = 0; i < n; i++) {
        put(out, i ? "," : "");
        if (isnan(l[i].logprob)) put(out, "null");
        else put(out, "%f", (double)l[i].logprob);
    }
    put(out, job->n_top ? "],'top_logprobs':[" : "],'top_logprobs':null");
    for (int i = 0; job->n_top && i < n; i++) {
        put(out, i ? "," : "");
        if (isnan(l[i].logprob)) put(out, "null");
        else put_plain_top(out, &x->t, &l[i]);
    }
    put(out, job->n_top ? "],'text_offset':[%r]}" : ",'text_offset':[%r]}", text_of(&offsets));
    c->n_likely += n;
    tok_text_free(&offsets);
}

// Appends the text of ids.
static void append_ids(Exchange *x, TokText *text, const TokIds *ids, bool special) {
    TokStream stream = { 0 };
    char *piece = alloc_or_starve(x->t.stream_cap, 1);
    if (!piece) return;
    for (size_t i = 0; i < ids->n; i++)
        append(text, piece, tok_stream_push(&x->t, &stream, ids->ids[i], special, piece, x->t.stream_cap));
    append(text, piece, tok_stream_flush(&stream, piece, x->t.stream_cap));
    free(piece);
}

// Appends the choice at hand up to its finish_reason: its next text, before that the prompt if it is to be repeated,
// and the probabilities of all tokens up to the end of the text, `said` bytes of the answer.
static void put_plain(Exchange *x, TokText *out, TokStr next, size_t said) {
    Choice *c = x->choice;
    TokText text = { 0 };
    if (x->echo && !c->echoed) append_ids(x, &text, &c->job->ids, false);
    if (!c->echoed) c->n_echo = n_chars(text_of(&text));
    c->echoed = true;
    append(&text, next.s, next.n);
    put(out, "{'index':%d,'text':%t,'logprobs':", c->index, text_of(&text));
    if (c->ended && c->n_likely == c->job->n_likely) put(out, "null");           // the stream has them all
    else put_plain_likely(out, x, c->n_echo + n_chars((TokStr){ c->job->content.s, said }));
    tok_text_free(&text);
}

static void plain_text(Exchange *x, TokStr thought, TokStr content) {
    (void)thought;
    if (!content.n) return;
    put(&x->out, "data: {");
    put_head(&x->out, x, "text_completion");
    put(&x->out, ",'choices':[");
    put_plain(x, &x->out, content, (size_t)(content.s - x->job->content.s) + content.n);
    put(&x->out, ",'finish_reason':null}]");
    put_event_end(x);
}

static void plain_call(Exchange *x, int i) { (void)x, (void)i; }

static void plain_end(Exchange *x) {
    put(&x->out, "data: {");
    put_head(&x->out, x, "text_completion");
    put(&x->out, ",'choices':[");
    put_plain(x, &x->out, str(""), x->job->content.n);               // probabilities of tokens without text
    completion_end(x, "text_completion");
}

static void plain_choice(Exchange *x, TokText *out) {
    put_plain(x, out, text_of(&x->job->content), x->job->content.n);
    put(out, ",");
    put_finish(out, x->job);
    put(out, "}");
}

static void plain_whole(Exchange *x, TokText *out) { put_completion(x, out, "text_completion", plain_choice); }

// Reads ids given as a list of numbers.
static bool read_ids(Exchange *x, const char *name, const GgufJson *list, TokIds *ids) {
    GgufJson rest = *list, v;
    int64_t id;
    for (size_t i = 0; gguf_json_next(&rest, NULL, &v); i++) {
        if (v.type != GGUF_J_NUMBER || !gguf_json_int(&v, 0, x->t.n_tokens - 1, &id))
            return refuse(&x->fault, 400, name, "%s[%zu]: expected a token id from 0 to %d", name, i,
                          x->t.n_tokens - 1);
        if (tok_push_id(&x->t, ids, (int32_t)id) < 0) starved = true;
    }
    return !starved;
}

// Makes the prompt of a text, <bos> and a string, or of ids. name: what errors call it.
static bool read_one_prompt(Exchange *x, const char *name, const GgufJson *v, Job *job) {
    if (v->type == GGUF_J_ARRAY) {
        job->by_ids = true;
        return read_ids(x, name, v, &job->ids) &&
               (job->ids.n || refuse(&x->fault, 400, "prompt", "%s: expected at least one token", name));
    }
    if (v->type != GGUF_J_STRING)
        return refuse(&x->fault, 400, "prompt", "%s: expected a string, a list of token ids, or a list of these", name);
    size_t n;
    char *text = copy_string(v, &n);
    const size_t least = tok_least(&x->t, n);
    if (least > (size_t)prompt_room(x->srv)) {         // measured before it is encoded
        free(text);
        return refuse_long(x, least, true);
    }
    const bool ok = (x->t.bos < 0 || tok_push_id(&x->t, &job->ids, x->t.bos) == 0) &&
                    tok_encode(&x->t, text, n, TOK_PLAIN, &job->ids) == 0;
    free(text);
    return ok || refuse_text(x, "prompt", name, x->t.err);
}

// Makes one prompt, or one of each element of a list.
static bool plain_ask(Exchange *x, Request *r) {
    Job *job = x->job;
    check_fields(x, &r->root, chat_fields, true);
    GgufJson rest = r->prompt, v;
    char name[32];
    bool ok = true;
    const bool is_list = rest.type == GGUF_J_ARRAY && gguf_json_next(&rest, NULL, &v) && v.type != GGUF_J_NUMBER;
    if (!is_list) ok = read_one_prompt(x, "prompt", &r->prompt, job);
    rest = r->prompt;
    for (int i = 0; is_list && ok && gguf_json_next(&rest, NULL, &v); i++) {
        if (i == MAX_CHOICES)
            return refuse(&x->fault, 400, "prompt", "prompt: expected at most %d prompts", MAX_CHOICES);
        snprintf(name, sizeof name, "prompt[%d]", i);
        Job *next = i ? add_choice(x) : job;
        ok = next && read_one_prompt(x, name, &v, next);
    }
    choose(x, 0);
    if (!ok) return false;
    int64_t n_top = -1;
    if (is_given(&r->logprobs) &&
        (r->logprobs.type != GGUF_J_NUMBER || !gguf_json_int(&r->logprobs, 0, PLAIN_TOP, &n_top)))
        return refuse(&x->fault, 400, "logprobs", "logprobs: expected an integer from 0 to %d", PLAIN_TOP);
    job->n_top = (int)n_top;
    x->echo = r->echo;
    job->scores = r->echo && n_top >= 0;
    return true;
}

static const Api plain_api = { "cmpl-", NULL, plain_ask, plain_begin, plain_text, plain_call, plain_end, plain_whole,
                               NULL, NULL };

// ==== [3] /completion ================================================================================================
// llama.cpp's own form: a request is that of /v1/completions; one answer is an object, several are a list.

static void native_begin(Exchange *x) { (void)x; }

static void native_text(Exchange *x, TokStr thought, TokStr content) {
    (void)thought;
    if (!content.n) return;
    put(&x->out, "data: {'index':%d,'content':%t,'tokens':[],'stop':false", x->choice->index, content);
    put_event_end(x);
}

static void put_native(Exchange *x, TokText *out, TokStr content) {
    const Job *job = x->job;
    const char *why = is_cut(job) ? "limit" : job->stop ? "word" : "eos";
    TokText prompt = { 0 };
    append_ids(x, &prompt, &job->ids, true);
    put(out, "{'index':%d,'content':%t,'tokens':[],'stop':true,'model':%s,'tokens_predicted':%d,'tokens_evaluated':%d,",
        x->choice->index, content, x->srv->name, job->turn.made, job->turn.n_prompt);
    put(out, "'tokens_cached':%d,'prompt':%t,'truncated':false,'stop_type':%s,'stopping_word':%s,", job->cached,
        text_of(&prompt), why, job->stop ? job->stop : "");
    put_timings(out, x);
    put(out, "}");
    tok_text_free(&prompt);
}

static void native_end(Exchange *x) {
    put(&x->out, "data: ");
    put_native(x, &x->out, str(""));
    put(&x->out, "\n\n");
}

static void native_choice(Exchange *x, TokText *out) { put_native(x, out, text_of(&x->job->content)); }

static void native_whole(Exchange *x, TokText *out) {
    const bool one = x->n_prompts * x->n_shown == 1;
    put(out, one ? "" : "[");
    put_choices(x, out, native_choice);
    put(out, one ? "" : "]");
}

static const Api native_api = { "cmpl-", NULL, plain_ask, native_begin, native_text, plain_call, native_end,
                                native_whole, NULL, NULL };

static void route_native(Exchange *x) { complete(x, &native_api); }
static void route_chat(Exchange *x) { complete(x, &chat_api); }
static void route_completions(Exchange *x) { complete(x, &plain_api); }

#endif
#endif
