/* answer.h - shows answers on the terminal: text on stdout as it comes, statistics on stderr; handles Ctrl-C.
 *
 * Uses base.h, tokenizer.h and engine.h. Begin with print_answer() and stop_on(). */
#ifndef ANSWER_H
#define ANSWER_H

static volatile sig_atomic_t interrupted;              // the number of the first signal; a second one ends the process
static Session *volatile answering;                    // the session that a signal cancels

static void on_interrupt(int signal_number) {
    if (interrupted) {                                 // the text so far was written
        const char *end = bar_shown ? "\r\033[K" : "";
        if (unfinished) unlink(unfinished);
        if (restore_terminal) restore_terminal();
        if (write(2, end, strlen(end)) < 0) _exit(1);
        _exit(128 + signal_number);
    }
    interrupted = signal_number;
    if (answering) session_cancel(answering);
}

// From now on the signal asks to stop. If the process ignores it (nohup, shells without job control), that stays so.
static void stop_on(int signal_number) {
    const struct sigaction act = { .sa_handler = on_interrupt, .sa_flags = (int)SA_RESTART };
    struct sigaction before;
    if (!sigaction(signal_number, NULL, &before) && before.sa_handler != SIG_IGN) sigaction(signal_number, &act, NULL);
}

// What is printed before and after text that is not the answer: the escape sequences that dim it, or nothing.
static struct { const char *dim, *normal; } style = { "", "" };

// Returns the FNV-1a hash of the bytes, by which two runs can be compared.
static uint64_t hash_bytes(const void *p, size_t n) {
    uint64_t h = 0xcbf29ce484222325u;
    for (size_t i = 0; i < n; i++) h = (h ^ ((const uint8_t *)p)[i]) * 0x100000001b3u;
    return h;
}

static void write_text(const char *s, size_t n) {
    fwrite(s, 1, n, stdout);
    flush_output();
}

// Prints the text of a token in quotes, escaped so that it stays on its line and cannot control the terminal.
static void print_quoted(FILE *f, TokStr s) {
    fputc('"', f);
    for (size_t i = 0; i < s.n; i++) {
        const unsigned char c = (unsigned char)s.s[i];
        if (c == '\n') fputs("\\n", f);
        else if (c == '"' || c == '\\') fprintf(f, "\\%c", c);
        else if (c < 0x20 || c > 0x7e) fprintf(f, "\\x%02x", c);
        else fputc(c, f);
    }
    fputc('"', f);
}

// Prints the n most probable candidates for a token on one line of stderr: id, text, logit and probability, before
// mask, bias, penalties and temperature. Overwrites these candidates in logits (vocab).
static void print_top_logits(const Tokenizer *t, int pos, int32_t chosen, int n, float *logits, int vocab) {
    const double sum = logsumexp(logits, vocab);
    fprintf(stderr, "# position %d, chosen %" PRId32 ":", pos, chosen);
    for (int i = 0; i < min_int(n, vocab); i++) {
        int best = 0;
        for (int id = 1; id < vocab; id++) if (logits[id] > logits[best]) best = id;
        fprintf(stderr, "%s %d ", i ? "," : "", best);
        print_quoted(stderr, tok_piece(t, best, true));
        fprintf(stderr, " %.4f %.4g", (double)logits[best], exp(logits[best] - sum));
        logits[best] = -INFINITY;
    }
    fprintf(stderr, "\n");
}

// Prints each tool call of a finished reply as a line of JSON on stdout: {"name":"f","arguments":{...}}.
static void show_calls(const TokReply *r) {
    for (int i = 0; i < r->n_calls; i++) {
        TokText name = { 0 };
        if (tok_add_json_string(&name, r->calls[i].name) < 0) die("out of memory for a tool call");
        if (i == 0 && r->content.n && r->content.s[r->content.n - 1] != '\n') write_text("\n", 1);
        write_text("{\"name\":", 8);
        write_text(name.s, name.n);
        write_text(",\"arguments\":", 13);
        write_text(r->calls[i].arguments.s, r->calls[i].arguments.n);
        write_text("}\n", 2);
        tok_text_free(&name);
    }
}

// Prints statistics of drafting. If the text repeats itself in a loop, leaves out the acceptance rate, which then means
// nothing.
static void print_drafts(const Turn *t) {
    const DraftCount *d = &t->drafts;
    fprintf(stderr, "# drafts: %d tokens in %d of %d steps", d->drafted, d->n_steps, t->steps);
    for (int k = 0; k < SPEC_KINDS; k++)
        if (d->by_source[k]) fprintf(stderr, ", %s in %d", spec_names[k], d->by_source[k]);
    if (!t->loop) {
        fprintf(stderr, "; draft acceptance %d/%d, %.2f tokens per step; per position:", d->accepted, d->drafted,
                tokens_per_step(t));
        for (int i = 0; i < DRAFT_DEPTHS && d->tried[i]; i++)
            fprintf(stderr, " %.0f", 100.0 * d->accepted_at[i] / d->tried[i]);
        fprintf(stderr, " %%");
    }
    fprintf(stderr, "; %.3f ms to draft and %.3f ms to verify per step\n",
            1e3 * d->draft_seconds / d->n_steps, 1e3 * d->verify_seconds / d->n_steps);
}

// Tokens of the prompt that a cancelled answer has left out.
static int not_run(const Turn *t) {
    return t->end == END_CANCELLED && !t->made ? t->n_prompt - t->n_cached - t->n_run : 0;
}

static void print_loop(const Turn *t) {
    fprintf(stderr, "# warning: the text repeats itself in a loop of %d token%s\n", t->loop, t->loop == 1 ? "" : "s");
}

static void print_turn(const Turn *t) {
    const DraftCount *d = &t->drafts;
    fprintf(stderr, "# prompt: %d tokens in %.3f s, %.1f tok/s", t->n_run, t->prompt_seconds,
            t->n_run / t->prompt_seconds);
    if (t->n_cached) fprintf(stderr, "; %d were cached", t->n_cached);
    if (not_run(t)) fprintf(stderr, "; %d did not run", not_run(t));
    if (t->n_original)
        fprintf(stderr, "; compressed (lossy) from %d tokens, %.3f s of it", t->n_original, t->score_seconds);
    if (t->density > 0) fprintf(stderr, "; pFlash: attended to %.1f %% of the blocks", 100 * t->density);
    if (t->steps)
        fprintf(stderr, "\n# decode: %d tokens in %d steps, %.3f s, %.1f tok/s, %.2f GB/s", t->made - 1, t->steps,
                t->decode_seconds, (t->made - 1) / t->decode_seconds, t->read / t->decode_seconds * 1e-9);
    fprintf(stderr, "\n# %d tokens generated, stopped: %s", t->made, t->why);
    if (t->hash) fprintf(stderr, "; last logits %016" PRIx64, t->hash);
    fprintf(stderr, "\n");
    if (t->loop) print_loop(t);
    if (t->joules > 0)
        fprintf(stderr, "# energy: %.1f J, %.3f J per token\n", t->joules, t->joules / max_int(t->made, 1));
    if (d->n_steps) print_drafts(t);
}

// Prints the answer's tokens, speed and drafts on one line, for readers who want no more.
static void print_summary(const Turn *t) {
    fprintf(stderr, "# %s%d token%s", style.dim, t->made, t->made == 1 ? "" : "s");
    if (t->steps) fprintf(stderr, ", %.1f tok/s", (t->made - 1) / t->decode_seconds);
    fprintf(stderr, "; prompt %d", t->n_prompt);
    if (t->n_original) fprintf(stderr, " of %d", t->n_original);
    if (t->n_cached) fprintf(stderr, " (%d cached)", t->n_cached);
    if (not_run(t)) fprintf(stderr, " (%d did not run)", not_run(t));
    fprintf(stderr, ", %.1f tok/s", t->n_run / t->prompt_seconds);
    if (t->drafts.n_steps && !t->loop)
        fprintf(stderr, "; drafts accepted %d/%d, %.2f tokens per step", t->drafts.accepted, t->drafts.drafted,
                tokens_per_step(t));
    if (t->joules > 0) fprintf(stderr, "; %.1f J, %.3f J per token", t->joules, t->joules / max_int(t->made, 1));
    if (t->end != END_TURN) fprintf(stderr, "; stopped: %s", t->why);
    fprintf(stderr, "%s\n", style.normal);
    if (t->loop) print_loop(t);
}

typedef struct {              // what print_answer() prints
    int  top_logits;          // print this many candidates for every token, on stderr
    bool thoughts;            // print thoughts, on separate lines of stderr
    bool newline;             // end the text with a line break, even an empty one
    bool exact;               // add no line break to a text that goes to a file or a pipe
} ShowOptions;

typedef struct {              // what print_answer() has printed so far
    bool thought, closed;     // a thought was begun, ended
    int  n_thought;           // tokens of thoughts
    char last;                // the last byte of the text; 0: none
    double drawn;             // when the count of these tokens was drawn
} Shown;

static void end_thought(Shown *shown) {
    if (shown->thought && !shown->closed) fprintf(stderr, "%s\n# end of the thought\n", style.normal);
    shown->closed = true;
}

static void show_event(const Event *e, const ShowOptions *o, bool thinks, Shown *shown) {
    if (thinks) shown->n_thought += e->n_ids;
    if (o->thoughts && e->thought.n) {
        if (bar_shown) draw_status("");
        if (!shown->thought) fprintf(stderr, "# thought:\n%s", style.dim);
        fwrite(e->thought.s, 1, e->thought.n, stderr);
        shown->thought = true;
    } else if (thinks && !o->thoughts && isatty(2) && seconds() - shown->drawn > 0.1) {
        char line[64];
        snprintf(line, sizeof line, "# thinking.. %d token%s", shown->n_thought, shown->n_thought == 1 ? "" : "s");
        draw_status(line);
        shown->drawn = seconds();
    }
    if (!thinks && e->kind != EVENT_PROMPT && bar_shown) draw_status("");
    if (!e->content.n) return;
    end_thought(shown);
    write_text(e->content.s, e->content.n);
    shown->last = e->content.s[e->content.n - 1];
}

// Runs the session's answer until it ends or the user presses Ctrl-C, and prints it. False: session_error() says why.
static bool print_answer(Session *s, const ShowOptions *o) {
    const size_t vocab = (size_t)model_shape(session_model(s)).vocab, total = (size_t)session_state(s).n_left;
    const TokReply *reply = session_reply(s);
    const double joules = read_joules(session_model(s));
    float *logits = alloc_or_die(vocab, sizeof *logits);
    Shown shown = { 0 };
    Event e = { .kind = EVENT_PROMPT };
    progress("prompt", 0, total, "tokens");
    answering = s;
    if (interrupted) session_cancel(s);                // the signal came before `answering` was set
    while (e.kind != EVENT_END) {
        session_next(s, &e);
        if (e.kind == EVENT_PROMPT) progress("prompt", (size_t)e.done, (size_t)e.total, "tokens");
        if (e.kind == EVENT_SHIFT) {
            if (bar_shown) draw_status("");
            fprintf(stderr, "%s# context full: %d tokens dropped; kept the first %d and the newest %d\n",
                    isatty(1) && isatty(2) ? "\n" : "", e.dropped, e.head, e.kept);
        }
        if (e.n_ids && o->top_logits && session_logits(s, logits))
            print_top_logits(session_tokenizer(s), (int)session_held(s)->n, e.ids[0], o->top_logits, logits,
                             (int)vocab);
        show_event(&e, o, tok_reply_thinks(reply), &shown);
    }
    answering = NULL;
    if (bar_shown) draw_status("");
    end_thought(&shown);
    show_calls(reply);
    const bool open = shown.last && shown.last != '\n' && (!o->exact || isatty(1));
    if ((o->newline || open) && !reply->n_calls) write_text("\n", 1);
    session_turn(s)->density = read_density(session_model(s));
    if (joules >= 0) session_turn(s)->joules = read_joules(session_model(s)) - joules;
    if (session_logits(s, logits)) session_turn(s)->hash = hash_bytes(logits, vocab * sizeof *logits);
    free(logits);
    return e.end != END_ERROR;
}

#endif
