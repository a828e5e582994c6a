/* chat.h - conversations, and the commands of a chat.
 *
 * Uses engine.h; the callers compress.h, answer.h and lines.h (reads what the user types). Begin with
 * chat_loop() and answer().
 *   [1] Messages and answers    [2] Commands */
#ifndef CHAT_H
#define CHAT_H

// ==== [1] Messages and answers =======================================================================================
// A conversation is a list of messages as in the OpenAI API. Each turn renders all of it and runs the tokens that the
// session does not hold yet. In a chat only /exit, Ctrl-D, or Ctrl-C twice end the program.

typedef struct {
    Session *s;
    TokText  messages;        // JSON list; a system message comes first
    size_t   n_skipped;       // messages after the system message that the model is no longer shown
    TokStr   tools;           // JSON list, or empty
    bool     think, verbose;
    bool     chatting;        // more turns will follow
    const char *session;      // the file that it is saved in, or NULL
    bool     raw;             // a text, not a conversation
    TokIds   pending;         // raw: tokens of the text that follow those the session holds
    bool     changed, unsaved;   // since it was saved; saving it failed
    Compressor compressor;    // ratio 0: prompts are shown as they are
    TokIds   said, shown;     // what the conversation is sure to begin with; what the model was shown instead of it
    TokText  images;          // parts of the user's next message, each after a comma, in JSON
    RowCache rows;            // of pictures that were shown before
    AnswerOptions options;
    ShowOptions show;
    char     err[512];        // why the last turn failed
} Chat;

static bool has_role(const GgufJson *message, const char *role) {
    GgufJson v;
    return gguf_json_get(message, "role", &v) && gguf_json_is(&v, role);
}

static bool is_system(const GgufJson *message) { return has_role(message, "system") || has_role(message, "developer"); }

static GgufJson message_list(const TokText *messages) {           // they are ours or were checked; null: an empty list
    GgufJson list;
    size_t at;
    const char *err;
    if (!messages->n || gguf_json_parse(messages->s, messages->n, &list, &at, &err) < 0 || list.type != GGUF_J_ARRAY)
        list = (GgufJson){ GGUF_J_ARRAY, "[]", 2 };
    return list;
}

static size_t count_messages(const TokText *messages, const char *role) {         // role NULL: all but the system
                                                                                  // message
    GgufJson rest = message_list(messages), m;
    size_t n = 0;
    while (gguf_json_next(&rest, NULL, &m)) n += role ? has_role(&m, role) : !is_system(&m);
    return n;
}

// Appends one message, given as JSON.
static void append_message(TokText *list, TokStr json) {
    if (!tok_open_list(list, json.n + 1) || !tok_text_append(list, json.s, json.n) || !tok_text_append(list, "]", 1))
        die("out of memory for a conversation");
}

// Appends to *to the system message, if `system`, and of the others numbers first to end - 1, counted without it.
static void copy_messages(const TokText *from, bool system, size_t first, size_t end, TokText *to) {
    GgufJson rest = message_list(from), m;
    for (size_t i = 0; gguf_json_next(&rest, NULL, &m); ) {
        if (is_system(&m) ? system : i >= first && i < end) append_message(to, (TokStr){ m.s, m.n });
        i += !is_system(&m);
    }
}

static void keep_messages(TokText *messages, bool system, size_t end) {            // drops the others
    TokText kept = { 0 };
    copy_messages(messages, system, 0, end, &kept);
    tok_text_free(messages);
    *messages = kept;
}

static void append_text(TokText *to, const char *s) {
    if (!tok_text_append(to, s, strlen(s))) die("out of memory for a conversation");
}

// Reads a file to *text, at most MAX_FILE bytes. Returns 0, or errno.
static int load_bytes(const char *path, TokText *text) {
    char block[1 << 14];
    FILE *f = fopen(path, "rb");
    int err = f ? 0 : errno;
    for (size_t n; !err && (n = fread(block, 1, sizeof block, f)) > 0; ) {
        err = tok_text_append(text, block, n) ? 0 : ENOMEM;
        if (text->n > MAX_FILE) err = EFBIG;
    }
    if (!err && ferror(f)) err = errno;
    if (f) fclose(f);
    return err;
}

// Adds the picture of a file to the user's next message. False: c->err says why it cannot.
static bool add_image(Chat *c, const char *path) {
    TokText file = { 0 };
    char why[200];
    int w, h, n;
    const int err = load_bytes(path, &file);
    if (err) snprintf(why, sizeof why, "%s", strerror(err));
    const bool ok = !err && picture_part(session_model(c->s), session_tokenizer(c->s), (TokStr){ file.s, file.n },
                                         &c->images, &w, &h, &n, why, sizeof why);
    if (ok) fprintf(stderr, "# image: %s, %d x %d pixels, %d tokens\n", path, w, h, n);
    else snprintf(c->err, sizeof c->err, "%.200s: %s", path, why);
    tok_text_free(&file);
    return ok;
}

// Adds a message of the user, after the images that were added for it.
static void add_user_message(Chat *c, TokStr text) {
    if (!c->images.n) {
        if (tok_add_message(&c->messages, "user", text) < 0) die("out of memory for a conversation");
        return;
    }
    TokText m = { 0 };
    append_text(&m, "{\"role\":\"user\",\"content\":[");
    if (!tok_text_append(&m, c->images.s + 1, c->images.n - 1)) die("out of memory for a conversation");
    append_text(&m, ",{\"type\":\"text\",\"text\":");
    if (tok_add_json_string(&m, text) < 0) die("out of memory for a conversation");
    append_text(&m, "}]}");
    append_message(&c->messages, (TokStr){ m.s, m.n });
    c->images.n = 0;
    tok_text_free(&m);
}

// The prompt that shows the messages from number first to end, counted without the system message. pictures: those in
// it, for pictures_free(); NULL: not wanted. < 0: t->err says why.
static int render(Chat *c, size_t first, size_t end, bool cue, TokIds *ids, PromptPictures *pictures) {
    TokText shown = { 0 };
    TokPictures at = { 0 };
    PromptPictures in = { 0 };
    size_t n_more;
    copy_messages(&c->messages, true, first, end, &shown);
    const TokChat chat = { .messages = { shown.s, shown.n }, .tools = c->tools, .think = c->think, .add_cue = cue,
                           .pictures = &at };
    ids->n = 0;
    Tokenizer *t = session_tokenizer(c->s);
    int status = tok_chat(t, &chat, ids, NULL);
    if (!status && !read_pictures(session_model(c->s), t, &at, &in, &n_more, t->err, sizeof t->err)) status = -1;
    if (!status && !place_pictures(t, &at, ids, NULL, &in)) status = -1;
    tok_text_free(&shown);
    tok_pictures_free(&at);
    if (pictures) *pictures = in;
    else pictures_free(&in);
    if (status || !cue || c->options.think_budget) return status;
    TokReply open = { 0 };                             // if the cue opens a thought, closes it
    tok_reply_start(t, &open, ids->ids, ids->n);
    if (tok_reply_thinks(&open)) status = tok_push_id(t, ids, t->channel_close);
    tok_reply_free(&open);
    return status;
}

static size_t context_of(const Chat *c) { return (size_t)model_options(session_model(c->s))->n_ctx; }

// The conversation no longer fits: skips its oldest messages. What remains begins with a message of the user's and
// fills at most half of the context; or it begins with the user's last message and fits at all. False: that does not
// fit either.
static bool skip_oldest(Chat *c, TokIds *ids, PromptPictures *pictures) {
    const size_t n_ctx = context_of(c), n = count_messages(&c->messages, NULL), before = c->n_skipped;
    GgufJson rest = message_list(&c->messages), m;
    bool fits = false;
    for (size_t i = 0; !fits && gguf_json_next(&rest, NULL, &m); i += !is_system(&m)) {
        if (i <= c->n_skipped || !has_role(&m, "user")) continue;
        c->n_skipped = i;
        pictures_free(pictures);
        if (render(c, i, n, true, ids, pictures) < 0) return false;
        fits = ids->n <= n_ctx / 2;
    }
    if (c->n_skipped == before || ids->n >= n_ctx) {
        c->n_skipped = before;
        return false;
    }
    fprintf(stderr, "# context full: the model no longer sees the oldest %zu messages\n", c->n_skipped);
    return true;
}

// Replaces a conversation's ids by those that the model is shown: what it was shown before is unchanged, and the last
// message is compressed if it is long. A later prompt is sure to begin with the first p->checkpoint_at ids, before and
// after. False: c->err says why it cannot.
static bool compress_last(Chat *c, size_t n_messages, TokIds *ids, Prompt *p) {
    Tokenizer *t = session_tokenizer(c->s);
    TokIds part = { 0 }, all = { 0 }, out = { 0 };
    const bool known = c->said.n && same_ids(&c->said, ids) == (int)c->said.n;
    const int from = known ? (int)c->said.n : 0;
    if (n_messages) render(c, c->n_skipped, n_messages - 1, false, &part, NULL);
    const int last = max_int(same_ids(&part, ids), from);              // where the last message begins
    for (size_t i = 0; known && i < c->shown.n; i++) push_id(t, &all, c->shown.ids[i]);
    for (size_t i = (size_t)from; i < ids->n; i++) push_id(t, &all, ids->ids[i]);
    const int first = (int)all.n - ((int)ids->n - last);
    const bool ok = compress_prompt(&c->compressor, c->s, all.ids, (int)all.n, first, &out);
    if (!ok) snprintf(c->err, sizeof c->err, "%s", c->compressor.err);
    if (ok) {
        const int n_after = (int)ids->n - p->checkpoint_at;      // the end of the prompt, which is not compressed
        print_compressed((int)out.n, (int)all.n);
        if (out.n < ids->n) p->n_original = (int)ids->n;
        c->said.n = c->shown.n = 0;
        for (int i = 0; i < p->checkpoint_at; i++) push_id(t, &c->said, ids->ids[i]);
        p->checkpoint_at = (int)out.n - n_after;
        for (int i = 0; i < p->checkpoint_at; i++) push_id(t, &c->shown, out.ids[i]);
        ids->n = 0;
        for (size_t i = 0; i < out.n; i++) push_id(t, ids, out.ids[i]);
    }
    tok_ids_free(&part);
    tok_ids_free(&all);
    tok_ids_free(&out);
    return ok;
}

// Answers the conversation, prints the answer and adds it. False: c->err says why it could not.
static bool answer(Chat *c) {
    const size_t n_ctx = context_of(c);
    const size_t n = count_messages(&c->messages, NULL);
    TokIds ids = { 0 }, part = { 0 };
    const bool lossy = c->compressor.ratio > 0;
    Prompt p = { 0 };
    PromptPictures pictures = { 0 };
    bool ok = render(c, c->n_skipped, n, true, &ids, &pictures) == 0;
    if (!ok) snprintf(c->err, sizeof c->err, "%s", session_tokenizer(c->s)->err);
    if (ok && lossy && render(c, c->n_skipped, n, false, &part, NULL) == 0) p.checkpoint_at = same_ids(&part, &ids);
    if (ok && lossy) ok = compress_last(c, n, &ids, &p);
    if (ok && ids.n > n_ctx && !(c->options.shift && !lossy && skip_oldest(c, &ids, &pictures))) {
        snprintf(c->err, sizeof c->err, "context full: the conversation has %zu tokens, but the context only %zu; try "
                                        "-c %zu%s",
                 ids.n, n_ctx, ids.n + 512, c->options.shift || n < 2 ? "" : ", --context-shift or /clear");
        ok = false;
    }
    ok = ok && compute_pictures(c->s, &c->rows, &ids, &pictures, &interrupted, c->err, sizeof c->err);
    if (ok) {
        p.ids = ids.ids, p.n = (int)ids.n, p.pictures = pictures.places, p.n_pictures = pictures.n;
        p.score_seconds = lossy ? c->compressor.seconds : 0;
        if (render(c, 0, 0, false, &part, NULL) == 0) p.n_head = same_ids(&part, &ids);
        if (!lossy && (c->chatting || c->session) && render(c, c->n_skipped, n, false, &part, NULL) == 0)
            p.checkpoint_at = same_ids(&part, &ids);
        const TokReply *reply = session_reply(c->s);
        ok = session_start(c->s, &p, &c->options) && print_answer(c->s, &c->show);
        if (!ok) snprintf(c->err, sizeof c->err, "%s", session_error(c->s));
        const bool empty = !reply->content.n && !reply->thought.n && !reply->n_calls;
        if (ok && !empty && tok_add_reply(&c->messages, reply) < 0) die("out of memory for a conversation");
    }
    tok_ids_free(&ids);
    tok_ids_free(&part);
    pictures_release(&c->rows, &pictures);
    return ok;
}

// Resumes the session of the file; if there is no file yet, begins a new one. own_seed: flags give the seed. False:
// c->err says why it cannot.
static bool resume(Chat *c, bool own_seed) {
    SessionNote note;
    TokIds ids = { 0 };
    Tokenizer *t = session_tokenizer(c->s);
    const int found = session_from_file(c->s, &note, c->session, "session");
    if (found <= 0) {
        if (found < 0) snprintf(c->err, sizeof c->err, "%s", session_error(c->s));
        return found == 0;
    }
    const TokChat chat = { .messages = { note.messages.s, note.messages.n }, .tools = c->tools, .think = c->think };
    bool ok = note.raw == c->raw;
    if (!ok)
        snprintf(c->err, sizeof c->err, "%.300s: expected a session with a %s, got one with a %s; try %s --raw",
                 c->session,
                 c->raw ? "text" : "conversation", c->raw ? "conversation" : "text", c->raw ? "without" : "with");
    else if (note.messages.n && tok_chat(t, &chat, &ids, NULL) < 0)
        ok = snprintf(c->err, sizeof c->err, "%.200s: the conversation: %.200s", c->session, t->err) < 0;
    tok_ids_free(&ids);
    if (!ok) {
        session_note_free(&note);
        return false;
    }
    const size_t n = count_messages(&note.messages, NULL);
    if (c->verbose)
        fprintf(stderr, c->raw ? "# session: %zu tokens of text\n" : "# session: %zu tokens, %zu messages\n",
                session_held(c->s)->n + note.pending.n, n);
    c->messages = note.messages;
    c->pending = note.pending;
    c->n_skipped = note.n_skipped < n ? note.n_skipped : n;
    if (!own_seed) c->options.sampling.seed = note.seed;
    return true;
}

// Saves the session in its file. False: the file is unchanged, and c->err says why.
static bool keep_session(Chat *c) {
    const SessionNote note = { .raw = c->raw, .seed = c->options.sampling.seed, .messages = c->messages,
                               .n_skipped = c->n_skipped, .pending = c->raw ? session_pending(c->s) : (TokIds){ 0 } };
    c->unsaved = !session_to_file(c->s, &note, c->session, "session");
    c->changed = false;
    if (c->unsaved) snprintf(c->err, sizeof c->err, "--session: %.480s", session_error(c->s));
    return !c->unsaved;
}

static void chat_free(Chat *c) {
    session_close(c->s);
    tok_text_free(&c->messages);
    tok_ids_free(&c->pending);
    tok_ids_free(&c->said);
    tok_ids_free(&c->shown);
    tok_text_free(&c->images);
    row_cache_free(&c->rows);
    close_scorer(&c->compressor);
}

// ==== [2] Commands ===================================================================================================

// The number of calls of the last answer that wait for a result; *id: the first one's.
static size_t calls_waiting(const TokText *messages, GgufJson *id) {
    GgufJson rest = message_list(messages), m, calls = { .type = GGUF_J_NULL }, call;
    size_t results = 0, n = 0, waiting = 0;
    while (gguf_json_next(&rest, NULL, &m)) {
        results = has_role(&m, "tool") ? results + 1 : 0;
        if (!results && (!gguf_json_get(&m, "tool_calls", &calls) || calls.type != GGUF_J_ARRAY))
            calls.type = GGUF_J_NULL;
    }
    if (calls.type == GGUF_J_NULL) return 0;
    for (rest = calls; gguf_json_next(&rest, NULL, &call); n++) {
        if (n < results) continue;
        if (!waiting++ && !gguf_json_get(&call, "id", id)) *id = (GgufJson){ GGUF_J_NULL, "null", 4 };
    }
    return waiting;
}

static bool retry(Chat *c) {                           // answers the last message of the user again, with another seed
    GgufJson rest = message_list(&c->messages), m;
    size_t last = 0, i = 0;
    for (; gguf_json_next(&rest, NULL, &m); i += !is_system(&m))
        if (has_role(&m, "user")) last = i + 1;
    if (!last) {
        snprintf(c->err, sizeof c->err, "no message to answer yet");
        return false;
    }
    if (last < i) c->options.sampling.seed++;
    keep_messages(&c->messages, true, last);
    return answer(c);
}

static void set_system(Chat *c, TokStr text) {
    TokText all = { 0 };
    if (text.n && tok_add_message(&all, "system", text) < 0) die("out of memory for a conversation");
    copy_messages(&c->messages, false, 0, SIZE_MAX, &all);
    tok_text_free(&c->messages);
    c->messages = all;
}

// Writes the conversation to a file, which is unchanged if that fails.
static void save_messages(const Chat *c, const char *path) {
    const GgufJson list = message_list(&c->messages);
    char why[160];
    Output o;
    int err = create_output(&o, path, 0600);
    if (!err) err = write_output(&o, list.s, list.n);
    if (!err) err = write_output(&o, "\n", 1);
    err = finish_output(&o, err);
    if (err) fprintf(stderr, "# /save: %s: cannot write: %s\n", path, output_error(&o, err, why));
    else fprintf(stderr, "# %zu messages saved in %s\n", count_messages(&c->messages, NULL), path);
}

// Replaces the conversation by one from a file. False: nothing has changed, and c->err says why.
static bool load_messages(Chat *c, const char *path) {
    TokText text = { 0 };
    TokIds ids = { 0 };
    const int err = load_bytes(path, &text);
    if (err) snprintf(c->err, sizeof c->err, "/load: %s: %s", path, strerror(err));
    bool ok = !err;
    if (ok) {
        const TokText before = c->messages;
        const TokChat chat = { .messages = { text.s, text.n }, .tools = c->tools, .think = c->think };
        Tokenizer *t = session_tokenizer(c->s);
        ok = tok_chat(t, &chat, &ids, NULL) == 0;
        if (ok) c->messages = text, text = before, c->n_skipped = 0;
        else snprintf(c->err, sizeof c->err, "/load: %s: %s", path, t->err);
    }
    tok_text_free(&text);
    tok_ids_free(&ids);
    return ok;
}

// Prints the statistics of an answer that has just ended: a line, or with -v all of them.
static void print_after(const Chat *c) {
    if (c->verbose) print_turn(session_turn(c->s));
    else print_summary(session_turn(c->s));
}

static void print_stats(const Chat *c) {
    if (session_turn(c->s)->why) print_turn(session_turn(c->s));
    fprintf(stderr, "# context: %zu of %zu tokens used; %zu messages", session_held(c->s)->n, context_of(c),
            count_messages(&c->messages, NULL));
    if (c->n_skipped) fprintf(stderr, ", the oldest %zu of them hidden from the model", c->n_skipped);
    fprintf(stderr, "\n");
}

typedef enum {
    CMD_HELP, CMD_SYSTEM, CMD_IMAGE, CMD_SAVE, CMD_LOAD, CMD_CLEAR, CMD_STATS, CMD_RETRY, CMD_SET, CMD_TEMP, CMD_THINK,
    CMD_SHOW, CMD_VERBOSE, CMD_TOOL, CMD_EXIT
} Command;

static const struct { const char *name, *value, *help; Command command; } commands[] = {
    { "/help", NULL, "list of commands", CMD_HELP },
    { "/system", "[TEXT]", "set the system prompt; without TEXT, remove it", CMD_SYSTEM },
    { "/image", "FILE", "show the model a picture (PNG, JPEG, WebP, PPM) with the next message", CMD_IMAGE },
    { "/save", "FILE", "save the conversation as JSON, a list of messages as in the OpenAI API", CMD_SAVE },
    { "/load", "FILE", "replace the conversation with a saved one", CMD_LOAD },
    { "/clear", NULL, "clear the conversation; keep the system prompt", CMD_CLEAR },
    { "/stats", NULL, "speed of the last answer, use of the context", CMD_STATS },
    { "/retry", NULL, "answer the last message again, with another seed", CMD_RETRY },
    { "/regen", NULL, "same as /retry", CMD_RETRY },
    { "/set", "NAME VALUE", "change temp, top-k, top-p, min-p, seed or n for the next answers", CMD_SET },
    { "/temp", "T", "same as /set temp T; 0: greedy", CMD_TEMP },
    { "/think", "[on|off]", "let the model think before it answers; without a word, the other way", CMD_THINK },
    { "/show", NULL, "model, memory, sampling and system prompt", CMD_SHOW },
    { "/verbose", "[on|off]", "all statistics after every answer; without a word, the other way", CMD_VERBOSE },
    { "/tool", "RESULT", "answer a tool call of the model: a JSON object, or any text", CMD_TOOL },
    { "/exit", NULL, "quit (Ctrl-D); Ctrl-C stops the answer, twice quits", CMD_EXIT },
    { "/quit", NULL, "same as /exit", CMD_EXIT },
    { "/bye", NULL, "same as /exit", CMD_EXIT },
    { "/?", NULL, "same as /help", CMD_HELP },
};
enum { N_COMMANDS = sizeof commands / sizeof *commands };

// Adds the result of the first call that waits for one; if it is the last, answers.
static bool add_result(Chat *c, TokStr text) {
    GgufJson id, object;
    size_t at;
    const char *err;
    const size_t waiting = calls_waiting(&c->messages, &id);
    if (!waiting) {
        snprintf(c->err, sizeof c->err, "/tool: the model did not call a tool");
        return false;
    }
    TokText m = { 0 };
    const bool is_object = gguf_json_parse(text.s, text.n, &object, &at, &err) == 0 && object.type == GGUF_J_OBJECT;
    bool ok = tok_text_append(&m, "{\"role\":\"tool\",\"tool_call_id\":", 30) && tok_text_append(&m, id.s, id.n) &&
              tok_text_append(&m, ",\"content\":", 11);
    ok = ok && (is_object ? tok_text_append(&m, object.s, object.n) : tok_add_json_string(&m, text) == 0);
    if (!ok || !tok_text_append(&m, "}", 1)) die("out of memory for a conversation");
    append_message(&c->messages, (TokStr){ m.s, m.n });
    tok_text_free(&m);
    if (waiting == 1) return answer(c);
    fprintf(stderr, "# %zu more %s a result\n", waiting - 1, waiting == 2 ? "tool call needs" : "tool calls need");
    return true;
}

// Changes a parameter of the answers. Ollama's form "parameter NAME VALUE" and its names are understood too.
static bool set_parameter(Chat *c, const char *line) {
    SampleParams *p = &c->options.sampling;
    const struct {
        const char *names;
        double min, max;
        float *real;
        int32_t *whole;
        int *count;
        uint64_t *seed;
    } known[] = {
        { " temp temperature ", 0, 1000, .real = &p->temperature }, { " top-p top_p ", 0, 1, .real = &p->top_p },
        { " min-p min_p ", 0, 1, .real = &p->min_p }, { " top-k top_k ", 0, INT_MAX, .whole = &p->top_k },
        { " seed ", 0, 4294967295.0, .seed = &p->seed },
        { " n num_predict max_tokens ", -1, INT_MAX, .count = &c->options.n_predict } };
    char name[32] = "", word[40], *end;
    double v = 0;
    int used = 0;
    if (!strncmp(line, "parameter ", 10)) line += 10;
    const bool read = sscanf(line, "%31s %n", name, &used) == 1 && line[used];
    if (read) v = strtod(line + used, &end);
    snprintf(word, sizeof word, " %s ", name);
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (!strstr(known[i].names, word)) continue;
        if (!read || end == line + used || *end || !(v >= known[i].min && v <= known[i].max) ||
            (!known[i].real && v != floor(v))) {
            snprintf(c->err, sizeof c->err, "/set %s: expected a number from %.10g to %.10g, got '%.40s'", name,
                     known[i].min, known[i].max, line + used);
            return false;
        }
        if (known[i].real) *known[i].real = (float)v;
        if (known[i].whole) *known[i].whole = (int32_t)v;
        if (known[i].count) *known[i].count = (int)v;
        if (known[i].seed) *known[i].seed = (uint64_t)v;
        fprintf(stderr, "# %s is %.10g\n", name, v);
        return true;
    }
    snprintf(c->err, sizeof c->err, "/set %s: expected temp, top-k, top-p, min-p, seed or n; /system TEXT sets the "
             "system prompt", name);
    return false;
}

// Sets *on by the word on or off, or if there is none, to the other state.
static bool set_switch(Chat *c, const char *name, const char *word, bool *on) {
    const bool is_on = !strcmp(word, "on");
    if (*word && !is_on && strcmp(word, "off")) {
        snprintf(c->err, sizeof c->err, "%s: expected on or off, got '%.40s'", name, word);
        return false;
    }
    *on = *word ? is_on : !*on;
    fprintf(stderr, "# %s is %s\n", name + 1, *on ? "on" : "off");
    return true;
}

static void print_system(const Chat *c) {
    GgufJson rest = message_list(&c->messages), m, text;
    if (!gguf_json_next(&rest, NULL, &m) || !is_system(&m) || !gguf_json_get(&m, "content", &text)) return;
    fprintf(stderr, "# system prompt: %.*s\n", (int)text.n, text.s);
}

static void show_settings(Chat *c) {
    print_plan(session_model(c->s));
    print_sampling(session_model(c->s), &c->options.sampling);
    fprintf(stderr, "# thinking: %s\n", c->think ? "on" : "off");
    print_system(c);
    print_stats(c);
}

// Saves the conversation. On a terminal, asks before it replaces a file.
static void save_command(const Chat *c, const char *path) {
    struct stat st;
    TokText reply = { 0 };
    if (isatty(0) && !stat(path, &st) && S_ISREG(st.st_mode)) {
        char question[300];
        snprintf(question, sizeof question, "%.200s exists; replace it? (y/n) ", path);
        const bool yes = read_line(question, &reply) == LINE_TEXT && reply.n && (*reply.s == 'y' || *reply.s == 'Y');
        tok_text_free(&reply);
        if (!yes) {
            fprintf(stderr, "# /save: not saved\n");
            return;
        }
    }
    save_messages(c, path);
}

// /image, /save and /load: ~ is the home directory.
static bool file_command(Chat *c, Command which, const char *value) {
    char *path = expand_home(value);
    bool ok = true;
    if (which == CMD_SAVE) save_command(c, path);
    else if (which == CMD_IMAGE) ok = add_image(c, path);
    else ok = load_messages(c, path);
    if (ok && which == CMD_LOAD) {
        c->changed = true;
        fprintf(stderr, "# %zu messages loaded from %s\n", count_messages(&c->messages, NULL), path);
    }
    free(path);
    return ok;
}

static void print_commands(void) {
    for (size_t i = 0; i < N_COMMANDS; i++)
        fprintf(stderr, "# %-8s %-10s %s\n", commands[i].name, commands[i].value ? commands[i].value : "",
                commands[i].help);
    fprintf(stderr, "# End a line with \\ to continue it. \"\"\" begins and ends a message of several lines.\n");
}

static const char *command_name(size_t i) { return i < N_COMMANDS ? commands[i].name : NULL; }

// Finds the command of a line and cuts its value out. NULL: there is none, or it lacks its value; the user was told.
static const Command *parse_command(char *line, char **value) {
    const size_t n = strcspn(line, " \t");
    size_t n_value, i = 0;
    *value = line + n + strspn(line + n, " \t");
    n_value = strlen(*value);
    while (n_value && strchr(" \t\r", (*value)[n_value - 1])) (*value)[--n_value] = 0;
    while (i < N_COMMANDS && (strlen(commands[i].name) != n || memcmp(commands[i].name, line, n))) i++;
    if (i == N_COMMANDS) {
        fprintf(stderr, "# %.*s: unknown command; try /help, or // to start a message with a slash\n", (int)n, line);
        return NULL;
    }
    const char *wants = commands[i].value;
    if (wants ? *wants != '[' && !n_value : n_value > 0) {
        fprintf(stderr, "# %s: expected %s\n", commands[i].name, wants ? wants : "no argument");
        return NULL;
    }
    return &commands[i].command;
}

static bool set_command(Chat *c, const char *value) {  // Ollama has commands of this form too
    if (!strcmp(value, "verbose") || !strcmp(value, "quiet"))
        return set_switch(c, "/verbose", *value == 'v' ? "on" : "off", &c->verbose);
    if (!strcmp(value, "think") || !strcmp(value, "nothink"))
        return set_switch(c, "/think", *value == 't' ? "on" : "off", &c->think);
    return set_parameter(c, value);
}

// Runs a line that begins with a slash. False: the chat ends.
static bool command(Chat *c, char *line) {
    char *value, temperature[64];
    const Command *which = parse_command(line, &value);
    const TokStr text = { value, strlen(value) };
    bool ok = true, answered = false;
    if (!which) return true;
    switch (*which) {
    case CMD_HELP: print_commands(); break;
    case CMD_SYSTEM:
        set_system(c, text);
        c->changed = true;
        fprintf(stderr, text.n ? "# system prompt set\n" : "# system prompt removed\n");
        break;
    case CMD_IMAGE: case CMD_SAVE: case CMD_LOAD: ok = file_command(c, *which, value); break;
    case CMD_CLEAR:
        keep_messages(&c->messages, true, 0);
        c->n_skipped = 0;
        c->changed = true;
        fprintf(stderr, "# conversation cleared\n");
        break;
    case CMD_STATS: print_stats(c); break;
    case CMD_RETRY: ok = answered = c->changed = retry(c); break;
    case CMD_SET: ok = set_command(c, value); break;
    case CMD_TEMP:
        snprintf(temperature, sizeof temperature, "temp %.50s", value);
        ok = set_parameter(c, temperature);
        break;
    case CMD_THINK: ok = set_switch(c, "/think", value, &c->think); break;
    case CMD_SHOW: show_settings(c); break;
    case CMD_VERBOSE: ok = set_switch(c, "/verbose", value, &c->verbose); break;
    case CMD_TOOL: ok = answered = c->changed = add_result(c, text); break;
    case CMD_EXIT: return false;
    }
    c->options.may_think = c->think;
    if (!ok) fprintf(stderr, "# %s\n", c->err);
    if (ok && answered) print_after(c);
    return true;
}

// Adds a message of the user and answers it. A message that cannot be answered is removed again.
static void say(Chat *c, TokStr text) {
    GgufJson id;
    const size_t n = count_messages(&c->messages, NULL), skipped = c->n_skipped;
    if (calls_waiting(&c->messages, &id)) {
        fprintf(stderr, "# the model called a tool; answer with /tool RESULT, or /retry\n");
        return;
    }
    add_user_message(c, text);
    const bool ok = answer(c);
    c->changed = true;
    if (!ok) fprintf(stderr, "# %s\n", c->err);
    if (ok) print_after(c);
    if (count_messages(&c->messages, NULL) > n + 1) return;
    if (ok) fprintf(stderr, "# cancelled; message removed (Up recalls it)\n");
    keep_messages(&c->messages, true, n);
    c->n_skipped = skipped;                            // as before
}

// Saves a chat that has changed. An error does not end it.
static void keep_chat(Chat *c) {
    if (c->session && c->changed && !keep_session(c)) fprintf(stderr, "# %s\n", c->err);
}

// Chats until the end of input, /exit, or Ctrl-C twice. first: the first message, s NULL: none, so the user types it.
// history: a file for the lines that were typed, or NULL. Returns the exit status.
static int chat_loop(Chat *c, TokStr first, const char *history) {
    TokText text = { 0 };
    char prompt[40];
    int interrupts = 0;
    open_lines(history, command_name);
    snprintf(prompt, sizeof prompt, "%.30s> ", model_name(session_model(c->s)));
    if (isatty(0)) fprintf(stderr, "# /help lists the commands; Ctrl-C stops an answer, Ctrl-D quits\n");
    if (first.s) say(c, first);
    keep_chat(c);
    for (bool more = true; more && interrupts < 2; ) {
        const LineKind kind = read_message(prompt, &text);
        if (kind == LINE_END) break;
        if (kind == LINE_INTERRUPTED) {
            if (++interrupts == 1) fprintf(stderr, "# press Ctrl-C again to quit\n");
            continue;
        }
        interrupts = 0;
        if (!text.n || !tok_text_append(&text, "", 1)) continue;         // ends it with a NUL
        text.n--;
        remember_line(text.s);
        if (text.s[0] == '/' && text.s[1] != '/') more = command(c, text.s);
        else say(c, text.s[0] == '/' ? (TokStr){ text.s + 1, text.n - 1 } : (TokStr){ text.s, text.n });
        keep_chat(c);
    }
    tok_text_free(&text);
    c->changed = c->unsaved;                           // tries once more: there may be room by now
    keep_chat(c);
    return interrupts == 2 ? 130 : c->unsaved;
}

#endif
