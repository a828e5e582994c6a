/* eval.h - the prompt harness: eval_prompts() answers the prompts of a JSONL file, plainly and with drafts, and judges.
 *
 * Uses engine.h, answer.h (signals, hashes) and judge.h. Begin with eval_prompts().
 *
 * Each line of the file is a JSON object. Each prompt is answered twice, without drafts and with them, from an empty
 * cache; the two texts have to be equal, which is what speculative decoding promises. One row for each prompt holds
 * tokens, speeds, the hashes of the texts and whether the answer is right. With --csv the rows are kept in a file, and
 * the same command continues with the first prompt that has no row.
 *   [1] Prompts    [2] Answers    [3] Rows in a file    [4] Tables, JSON */
#ifndef EVAL_H
#define EVAL_H

// ==== [1] Prompts ===================================================================================================

typedef enum { EVAL_MD, EVAL_CSV, EVAL_JSON } EvalFormat;

typedef struct {
    const char *prompts;               // the JSONL file
    const char *csv;                   // file of rows; NULL: none
    const char *system;                // system prompt of all; NULL: none
    int         limit;                 // the first lines alone; 0: all
    bool        run_code;              // run programs of the model
    bool        think;
    EvalFormat  format;
    AnswerOptions answer;              // drafting.kind SPEC_OFF: each prompt is answered once
} EvalOptions;

typedef struct {              // a line of the file
    TokText   messages;       // JSON list
    TokText   id, kind;       // kind empty: the file names none
    TokIds    ids;            // of the prompt
    JudgeKind judge;
    TokText   want;           // the answer; JUDGE_CODE: tests
    TokText   given, entry;   // JUDGE_CODE: code that the answer continues, or nothing; the function that check() gets
} EvalTask;

// What is measured. A number that is not known is NAN.
enum { TOKENS, PLAIN_SPEED, SPEC_SPEED, SPEED_UP, PER_STEP, ACCEPTED, PLAIN_JOULES, SPEC_JOULES, EVAL_COLUMNS };
static const struct { const char *name, *title; int decimals; bool drafts, energy; } eval_columns[] = {
    { "tokens", "tokens", 0, false, false }, { "plain_tok_s", "tok/s", 1, false, false },
    { "spec_tok_s", "tok/s, drafts", 1, true, false }, { "speed_up", "speed-up", 2, true, false },
    { "tokens_per_step", "tokens/step", 2, true, false }, { "accept_rate", "accepted", 3, true, false },
    { "plain_j_per_tok", "J/token", 3, false, true }, { "spec_j_per_tok", "J/token, drafts", 3, true, true } };

typedef struct {
    bool     done;
    double   v[EVAL_COLUMNS];
    uint64_t plain_hash, spec_hash;    // of the texts; equal if there are no drafts
    Verdict  verdict;
    TokText  end;                      // why the answer ended
} EvalRow;

typedef struct {
    const EvalOptions *o;
    Model     *m;
    Tokenizer *t;
    Session   *session;
    EvalTask  *tasks;         // (n)
    EvalRow   *rows;          // (n)
    int        n;
    bool       has_kinds, drafts, has_joules;
    char       setting[700];  // what rows depend on, as words NAME=VALUE
} Eval;

static void eval_text(TokText *out, const char *s, size_t n) {
    if (!tok_text_append(out, s, n)) die("--prompts: out of memory");
}

static void eval_word(TokText *out, const char *s) { eval_text(out, s, strlen(s)); }

static TokStr str_of(const TokText *t) { return (TokStr){ t->n ? t->s : "", t->n }; }

// Sets the text of the first of these fields, whose names spaces separate, that is a string or a number; a list gives
// its texts as lines. False: the object has none of them.
static bool take_field(const GgufJson *object, const char *names, TokText *out) {
    char name[24];
    for (const char *at = names; *at; at += strspn(at, " ")) {
        GgufJson v, item, rest;
        const int n = (int)strcspn(at, " ");
        snprintf(name, sizeof name, "%.*s", n, at);
        at += n;
        if (!gguf_json_get(object, name, &v) || v.type == GGUF_J_NULL) continue;
        out->n = 0;
        for (rest = v; v.type == GGUF_J_ARRAY && gguf_json_next(&rest, NULL, &item); ) {
            if (item.type != GGUF_J_STRING) return false;
            char *text = alloc_or_die(item.n + 1, 1);
            eval_text(out, text, gguf_json_string(&item, text));
            eval_word(out, "\n");
            free(text);
        }
        if (v.type == GGUF_J_ARRAY) return true;
        if (v.type != GGUF_J_STRING && v.type != GGUF_J_NUMBER) continue;
        char *text = alloc_or_die(v.n + 1, 1);
        const size_t size = v.type == GGUF_J_STRING ? gguf_json_string(&v, text) : v.n;
        eval_text(out, v.type == GGUF_J_STRING ? text : v.s, size);
        free(text);
        return true;
    }
    return false;
}

// How an answer is judged if the line does not say it in "check".
static JudgeKind guess_judge(const GgufJson *line, const EvalTask *task, bool has_answer) {
    GgufJson v;
    double number;
    const TokStr want = tok_trim(str_of(&task->want));
    if (gguf_json_get(line, "test", &v) || gguf_json_get(line, "tests", &v)) return JUDGE_CODE;
    if (!has_answer) return last_boxed(want).s ? JUDGE_MATH : JUDGE_NONE;
    if (after_last(want, "####").s) return JUDGE_NUMBER;
    if (gguf_json_get(line, "problem", &v)) return JUDGE_MATH;
    if (want.n == 1 && *want.s >= 'A' && *want.s <= 'J') return JUDGE_CHOICE;
    return whole_number(want, &number) ? JUDGE_NUMBER : JUDGE_EXACT;
}

// Makes the messages of a task. Public data sets get a sentence that says in which form the answer is to be.
static bool take_messages(const GgufJson *line, EvalTask *task, const char *system) {
    TokText text = { 0 };
    GgufJson list, v;
    if (gguf_json_get(line, "messages", &list) && list.type == GGUF_J_ARRAY) {
        eval_text(&task->messages, list.s, list.n);
        return true;
    }
    if (!take_field(line, "prompt question problem", &text)) return false;
    const bool humaneval = task->entry.n > 0;
    if (humaneval) {
        eval_text(&task->given, text.s, text.n);
        text.n = 0;
        eval_word(&text, "Complete this function. Answer with the whole function in one block of code.\n\n```python\n");
        eval_text(&text, task->given.s, task->given.n);
        eval_word(&text, "```");
    } else if (after_last(str_of(&task->want), "####").s) {
        eval_word(&text, "\n\nEnd with a line \"#### N\", where N is the result as a number.");
    } else if (gguf_json_get(line, "problem", &v)) {
        eval_word(&text, "\n\nPut the result in \\boxed{}.");
    }
    if ((system && tok_add_message(&task->messages, "system", (TokStr){ system, strlen(system) }) < 0) ||
        tok_add_message(&task->messages, "user", str_of(&text)) < 0) die("--prompts: out of memory");
    tok_text_free(&text);
    return true;
}

// Reads a line. Returns what is wrong with it, or NULL.
static const char *read_task(Eval *e, const GgufJson *line, EvalTask *task) {
    TokText check = { 0 };
    GgufJson tools;
    const bool has_answer = take_field(line, "answer", &task->want);
    if (!has_answer) take_field(line, "solution", &task->want);
    take_field(line, "task_id unique_id id", &task->id);
    take_field(line, "kind category subject type", &task->kind);
    take_field(line, "entry_point", &task->entry);
    task->judge = guess_judge(line, task, has_answer);
    if (task->judge == JUDGE_CODE) take_field(line, "test tests", &task->want);
    if (take_field(line, "check", &check)) {
        int k = 0;
        while (k < JUDGE_KINDS && (check.n != strlen(judge_names[k]) || memcmp(check.s, judge_names[k], check.n))) k++;
        tok_text_free(&check);
        if (k == JUDGE_KINDS) return "\"check\": expected none, exact, number, choice, math or code";
        if (k != JUDGE_NONE && !task->want.n) return "\"check\" needs an \"answer\" or \"tests\"";
        task->judge = (JudgeKind)k;
    }
    if (!take_messages(line, task, e->o->system)) return "expected a field prompt, question, problem or messages";
    TokChat chat = { .messages = str_of(&task->messages), .think = e->o->think, .add_cue = true };
    if (gguf_json_get(line, "tools", &tools)) chat.tools = (TokStr){ tools.s, tools.n };
    return tok_chat(e->t, &chat, &task->ids, NULL) < 0 ? e->t->err : NULL;
}

static void free_task(EvalTask *t) {
    TokText *const texts[] = { &t->messages, &t->id, &t->kind, &t->want, &t->given, &t->entry };
    for (size_t k = 0; k < sizeof texts / sizeof *texts; k++) tok_text_free(texts[k]);
    tok_ids_free(&t->ids);
}

// Reads the prompts of a file (text, n). All errors come before the first answer.
static void read_tasks(Eval *e, const char *text, size_t n) {
    const char *path = e->o->prompts, *err, *wrong;
    const int n_ctx = model_options(e->m)->n_ctx;
    size_t lines = 1, at;
    for (size_t i = 0; i < n; i++) lines += text[i] == '\n';
    e->tasks = alloc_or_die(lines, sizeof *e->tasks);
    for (size_t i = 0, number = 1; i < n && !(e->o->limit && e->n == e->o->limit); number++) {
        size_t to = i;
        while (to < n && text[to] != '\n') to++;
        const TokStr line = tok_trim((TokStr){ text + i, to - i });
        GgufJson object;
        i = to + 1;
        if (!line.n) continue;
        EvalTask *task = &e->tasks[e->n];
        if (gguf_json_parse(line.s, line.n, &object, &at, &err) < 0)
            die("--prompts: %s: line %zu, byte %zu: %s", path, number, at, err);
        if (object.type != GGUF_J_OBJECT) die("--prompts: %s: line %zu: expected a JSON object", path, number);
        if ((wrong = read_task(e, &object, task))) die("--prompts: %s: line %zu: %s", path, number, wrong);
        if (task->ids.n >= (size_t)n_ctx)
            die("--prompts: %s: line %zu: the prompt has %zu tokens, but the context only %d; try -c %zu", path, number,
                task->ids.n, n_ctx, task->ids.n + 512);
        e->has_kinds |= task->kind.n > 0;
        e->n++;
    }
    if (!e->n) die("--prompts: %s: expected lines of JSON objects, got none", path);
    e->rows = alloc_or_die((size_t)e->n, sizeof *e->rows);
}

// ==== [2] Answers ===================================================================================================

typedef struct {
    TokIds  ids;              // that were generated
    TokText text;             // what the user would read: content, then calls as lines
    Turn    turn;
    double  joules;           // for each token after the first; NAN: not known
} EvalAnswer;

static void free_answer(EvalAnswer *a) {
    tok_ids_free(&a->ids);
    tok_text_free(&a->text);
}

static void take_reply(const TokReply *r, TokText *out) {
    eval_text(out, r->content.s, r->content.n);
    for (int i = 0; i < r->n_calls; i++) {
        if (out->n && out->s[out->n - 1] != '\n') eval_word(out, "\n");
        eval_word(out, "{\"name\":");
        if (tok_add_json_string(out, r->calls[i].name) < 0) die("out of memory for a tool call");
        eval_word(out, ",\"arguments\":");
        eval_text(out, r->calls[i].arguments.s, r->calls[i].arguments.n);
        eval_word(out, "}\n");
    }
}

// Answers a prompt from an empty cache. Dies if that fails. The caller frees the answer.
static EvalAnswer answer_task(Eval *e, const EvalTask *task, SpecKind kind, int n_predict) {
    EvalAnswer a = { .joules = NAN };
    AnswerOptions o = e->o->answer;
    Event event = { .kind = EVENT_PROMPT };
    double before = -1;
    o.drafting.kind = kind;
    o.n_predict = n_predict;
    session_forget(e->session);
    if (!session_start(e->session, &(Prompt){ .ids = task->ids.ids, .n = (int)task->ids.n }, &o))
        die("--prompts: %.*s: %s", (int)task->id.n, task->id.s, session_error(e->session));
    answering = e->session;
    if (interrupted) session_cancel(e->session);
    while (event.kind != EVENT_END) {
        session_next(e->session, &event);
        for (int i = 0; i < event.n_ids; i++) push_id(e->t, &a.ids, event.ids[i]);
        if (before < 0 && event.n_ids) before = read_joules(e->m);
    }
    answering = NULL;
    if (event.end == END_ERROR) die("--prompts: %.*s: %s", (int)task->id.n, task->id.s, session_error(e->session));
    a.turn = *session_turn(e->session);
    if (before >= 0 && a.turn.made > 1) a.joules = (read_joules(e->m) - before) / (a.turn.made - 1);
    take_reply(session_reply(e->session), &a.text);
    return a;
}

static uint64_t answer_hash(const Eval *e, const EvalAnswer *a) {      // of its text with special tokens
    TokText text = { 0 };
    for (size_t i = 0; i < a->ids.n; i++) {
        const TokStr piece = tok_piece(e->t, a->ids.ids[i], true);
        eval_text(&text, piece.s, piece.n);
    }
    const uint64_t h = hash_bytes(text.s, text.n);
    tok_text_free(&text);
    return h;
}

static double decode_speed(const Turn *t) { return t->steps ? (t->made - 1) / t->decode_seconds : NAN; }

// Names a prompt for people: its number from 1 on, and its id.
static const char *task_name(const Eval *e, int i) {
    static char name[120];
    const TokText *id = &e->tasks[i].id;
    snprintf(name, sizeof name, id->n ? "prompt %d (%.*s)" : "prompt %d%.*s", i + 1, (int)id->n, id->n ? id->s : "");
    return name;
}

static void report_difference(const Eval *e, int i, const EvalAnswer *plain, const EvalAnswer *spec) {
    if (bar_shown) draw_status("");
    fprintf(stderr, "# DIFFERENT TEXTS: %s: %016" PRIx64 " without drafts, %016" PRIx64 " with; the first %d tokens "
            "are equal\n", task_name(e, i), e->rows[i].plain_hash, e->rows[i].spec_hash,
            same_ids(&plain->ids, &spec->ids));
}

static Verdict judge_answer(const Eval *e, const EvalTask *task, const EvalAnswer *a) {
    char entry[100];
    if (task->judge != JUDGE_CODE) return judge_text(task->judge, str_of(&task->want), str_of(&a->text));
    if (!e->o->run_code) return NOT_JUDGED;
    snprintf(entry, sizeof entry, "%.*s", (int)task->entry.n, task->entry.n ? task->entry.s : "");
    return judge_program(str_of(&task->given), str_of(&a->text), str_of(&task->want), entry, &interrupted);
}

// Answers prompt number i, and fills its row. False: the user has interrupted it.
static bool eval_task(Eval *e, int i) {
    const EvalTask *task = &e->tasks[i];
    const int n_predict = e->o->answer.n_predict;
    EvalRow *row = &e->rows[i];
    EvalAnswer plain = answer_task(e, task, SPEC_OFF, n_predict), spec = { .joules = NAN };
    if (e->drafts && !interrupted) spec = answer_task(e, task, e->o->answer.drafting.kind, n_predict);
    const DraftCount *d = &spec.turn.drafts;
    for (int k = 0; k < EVAL_COLUMNS; k++) row->v[k] = NAN;
    row->v[TOKENS] = plain.turn.made;
    row->v[PLAIN_SPEED] = decode_speed(&plain.turn);
    row->v[PLAIN_JOULES] = plain.joules;
    row->plain_hash = row->spec_hash = answer_hash(e, &plain);
    if (e->drafts) {
        row->spec_hash = answer_hash(e, &spec);
        row->v[SPEC_SPEED] = decode_speed(&spec.turn);
        row->v[SPEED_UP] = row->v[SPEC_SPEED] / row->v[PLAIN_SPEED];
        if (spec.turn.steps) row->v[PER_STEP] = tokens_per_step(&spec.turn);
        if (d->drafted) row->v[ACCEPTED] = (double)d->accepted / d->drafted;
        row->v[SPEC_JOULES] = spec.joules;
    }
    if (!interrupted) row->verdict = judge_answer(e, task, &plain);
    row->end.n = 0;
    eval_word(&row->end, plain.turn.why ? plain.turn.why : "");
    row->done = !interrupted;
    if (row->done && row->plain_hash != row->spec_hash) report_difference(e, i, &plain, &spec);
    free_answer(&plain);
    free_answer(&spec);
    return row->done;
}

// ==== [3] Rows in a file ============================================================================================

enum { EVAL_FIELDS = 5 + EVAL_COLUMNS + 5 };           // of a line

static void eval_format(TokText *out, const char *format, ...) {
    char text[800];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    eval_word(out, text);
}

static void put_csv_text(TokText *out, TokStr s) {     // in quotes; line breaks become spaces
    eval_word(out, "\"");
    for (size_t i = 0; i < s.n; i++) {
        const char c = (unsigned char)s.s[i] < ' ' ? ' ' : s.s[i];
        eval_text(out, c == '"' ? "\"\"" : &c, c == '"' ? 2 : 1);
    }
    eval_word(out, "\",");
}

static void put_csv_head(TokText *out) {
    eval_word(out, "prompt,id,kind,prompt_hash,prompt_tokens,");
    for (int k = 0; k < EVAL_COLUMNS; k++) eval_format(out, "%s,", eval_columns[k].name);
    eval_word(out, "plain_hash,spec_hash,result,stopped,setting\n");
}

static void put_csv_row(const Eval *e, int i, TokText *out) {
    const EvalTask *task = &e->tasks[i];
    const EvalRow *row = &e->rows[i];
    eval_format(out, "%d,", i + 1);
    put_csv_text(out, str_of(&task->id));
    put_csv_text(out, str_of(&task->kind));
    eval_format(out, "%016" PRIx64 ",%zu,", hash_bytes(task->ids.ids, task->ids.n * sizeof *task->ids.ids),
                task->ids.n);
    for (int k = 0; k < EVAL_COLUMNS; k++) eval_format(out, isnan(row->v[k]) ? "," : "%.9g,", row->v[k]);
    eval_format(out, "%016" PRIx64 ",%016" PRIx64 ",%s,", row->plain_hash, row->spec_hash, verdict_names[row->verdict]);
    put_csv_text(out, str_of(&row->end));
    put_csv_text(out, (TokStr){ e->setting, strlen(e->setting) });
    out->s[out->n - 1] = '\n';
}

static void keep_row(const Eval *e, int i) {
    TokText line = { 0 };
    if (!e->o->csv) return;
    put_csv_row(e, i, &line);
    const int err = append_to_file(e->o->csv, line.s, line.n, 0666);
    if (err) die("--csv: %s: cannot write: %s; the rows before are kept", e->o->csv, strerror(err));
    tok_text_free(&line);
}

// Splits a line of CSV, which it overwrites. Returns the number of fields, at most `most` of which it stores.
static int split_csv(char *line, char **fields, int most) {
    int n = 0;
    for (char *at = line, *to; ; at++) {
        const bool quoted = *at == '"';
        at += quoted;
        char *const first = to = at;
        for (; *at && (quoted || *at != ','); at++) {
            if (quoted && *at == '"' && *++at != '"') break;
            *to++ = *at;
        }
        const bool more = *at == ',';
        *to = 0;
        if (n < most) fields[n] = first;
        n++;
        if (!more) return n;
    }
}

// Dies because a row was made with another model or other options: names the first word that differs.
__attribute__((noreturn)) static void refuse_setting(const Eval *e, const char *theirs) {
    const char *ours = e->setting;
    while (*ours && *theirs) {
        const int n = (int)strcspn(ours, " "), k = (int)strcspn(theirs, " ");
        if (n != k || memcmp(ours, theirs, (size_t)n))
            die("--csv: %s: its rows have %.*s, this run has %.*s; try another file", e->o->csv, k, theirs, n, ours);
        ours += n + (ours[n] == ' ');
        theirs += k + (theirs[k] == ' ');
    }
    die("--csv: %s: its rows are of another version of gemma4 eval; try another file", e->o->csv);
}

static void take_row(Eval *e, char **f, int number) {  // f: the fields of a line of that number
    const long i = strtol(f[0], NULL, 10) - 1;
    if (i < 0 || i >= e->n) {                          // beyond --limit
        if (e->o->limit && i >= e->n) return;
        die("--csv: %s: line %d: expected a prompt from 1 to %d, got '%s'", e->o->csv, number, e->n, f[0]);
    }
    const EvalTask *task = &e->tasks[i];
    EvalRow *row = &e->rows[i];
    if (strcmp(f[EVAL_FIELDS - 1], e->setting)) refuse_setting(e, f[EVAL_FIELDS - 1]);
    if (strtoull(f[3], NULL, 16) != hash_bytes(task->ids.ids, task->ids.n * sizeof *task->ids.ids))
        die("--csv: %s: line %d: prompt %ld is another one in %s; try another file", e->o->csv, number, i + 1,
            e->o->prompts);
    for (int k = 0; k < EVAL_COLUMNS; k++) row->v[k] = *f[5 + k] ? strtod(f[5 + k], NULL) : NAN;
    char **const rest = f + 5 + EVAL_COLUMNS;
    row->plain_hash = strtoull(rest[0], NULL, 16);
    row->spec_hash = strtoull(rest[1], NULL, 16);
    row->verdict = NOT_JUDGED;
    for (int k = 0; k < VERDICTS; k++) if (!strcmp(rest[2], verdict_names[k])) row->verdict = (Verdict)k;
    row->end.n = 0;
    eval_word(&row->end, rest[3]);
    row->done = true;
}

// Takes the rows of an earlier run from the file, or begins it. A line that was not written to its end is cut off.
static void read_rows(Eval *e) {
    const char *path = e->o->csv;
    TokText head = { 0 };
    size_t n = 0;
    struct stat st;
    put_csv_head(&head);
    const bool found = path && !stat(path, &st);
    if (found && !S_ISREG(st.st_mode)) die("--csv: %s: expected a regular file", path);
    char *text = found && st.st_size ? read_text(path, &n, "--csv") : NULL;
    if (path && !n) {
        const int err = append_to_file(path, head.s, head.n, 0666);
        if (err) die("--csv: %s: cannot write: %s", path, strerror(err));
    }
    if (n && (n < head.n || memcmp(text, head.s, head.n)))
        die("--csv: %s: expected a file of gemma4 eval, got another one", path);
    size_t whole = n;
    while (whole && text[whole - 1] != '\n') whole--;
    if (whole < n && truncate(path, (off_t)whole)) die("--csv: %s: cannot write: %s", path, strerror(errno));
    int number = 2;
    for (char *line = n ? text + head.n : NULL, *end; line && line < text + whole; line = end + 1, number++) {
        char *f[EVAL_FIELDS];
        end = memchr(line, '\n', (size_t)(text + whole - line));
        *end = 0;
        if (split_csv(line, f, EVAL_FIELDS) != EVAL_FIELDS)
            die("--csv: %s: line %d: expected %d fields", path, number, EVAL_FIELDS);
        take_row(e, f, number);
    }
    tok_text_free(&head);
    free(text);
}

// ==== [4] Tables, JSON ==============================================================================================

typedef struct {              // of the rows of a kind
    int    rows, judged, right, same;
    double mean[EVAL_COLUMNS], median[EVAL_COLUMNS];
} EvalSums;

static int compare_values(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static bool same_kind(const TokText *a, const TokText *b) {
    return a->n == b->n && (!a->n || !memcmp(a->s, b->s, a->n));
}

static EvalSums sum_rows(const Eval *e, const TokText *kind) {         // kind NULL: all rows
    EvalSums sums = { 0 };
    double *known = alloc_or_die((size_t)e->n, sizeof *known);
    for (int k = 0; k < EVAL_COLUMNS; k++) {
        int n = 0;
        double sum = 0;
        for (int i = 0; i < e->n; i++) {
            const EvalRow *row = &e->rows[i];
            if (!row->done || (kind && !same_kind(kind, &e->tasks[i].kind))) continue;
            sums.rows += !k;
            sums.judged += !k && row->verdict != NOT_JUDGED;
            sums.right += !k && row->verdict == RIGHT;
            sums.same += !k && row->plain_hash == row->spec_hash;
            if (!isnan(row->v[k])) known[n++] = row->v[k], sum += row->v[k];
        }
        qsort(known, (size_t)n, sizeof *known, compare_values);
        sums.mean[k] = n ? sum / n : NAN;
        sums.median[k] = n ? (known[(n - 1) / 2] + known[n / 2]) / 2 : NAN;
    }
    free(known);
    return sums;
}

static bool has_column(const Eval *e, int k) {
    return (!eval_columns[k].drafts || e->drafts) && (!eval_columns[k].energy || e->has_joules);
}

static void print_cells(const Eval *e, const double *v) {
    for (int k = 0; k < EVAL_COLUMNS; k++)
        if (has_column(e, k)) printf(isnan(v[k]) ? " |" : " %.*f |", eval_columns[k].decimals, v[k]);
}

static void print_cell(TokStr s) {                     // a bar would end it
    for (size_t i = 0; i < s.n; i++) putchar(s.s[i] == '|' || (unsigned char)s.s[i] < ' ' ? '/' : s.s[i]);
}

static void print_eval_head(const Eval *e) {
    TokText head = { 0 };
    if (e->o->format == EVAL_JSON) printf("{\"rows\": [");
    put_csv_head(&head);
    if (e->o->format == EVAL_CSV) printf("%.*s", (int)head.n, head.s);
    tok_text_free(&head);
    if (e->o->format != EVAL_MD) return;
    printf("%s\n\n| prompt | kind |", e->setting);
    for (int k = 0; k < EVAL_COLUMNS; k++) if (has_column(e, k)) printf(" %s |", eval_columns[k].title);
    printf(" text | result |\n| --- | --- |");
    for (int k = 0; k < EVAL_COLUMNS; k++) if (has_column(e, k)) printf(" ---: |");
    printf(" --- | --- |\n");
}

static void print_json_fields(const double *v) {
    for (int k = 0; k < EVAL_COLUMNS; k++) printf(isnan(v[k]) ? ", \"%s\": null" : ", \"%s\": %.9g",
                                                  eval_columns[k].name, v[k]);
}

static void print_json_text(const char *name, TokStr s) {
    TokText text = { 0 };
    if (tok_add_json_string(&text, s) < 0) die("out of memory");
    printf("\"%s\": %.*s", name, (int)text.n, text.s);
    tok_text_free(&text);
}

static void print_eval_row(const Eval *e, int i) {
    const EvalTask *task = &e->tasks[i];
    const EvalRow *row = &e->rows[i];
    const bool same = row->plain_hash == row->spec_hash;
    TokText line = { 0 };
    if (bar_shown) draw_status("");
    if (e->o->format == EVAL_CSV) {
        put_csv_row(e, i, &line);
        printf("%.*s", (int)line.n, line.s);
    } else if (e->o->format == EVAL_JSON) {
        printf("%s\n  {\"prompt\": %d, ", i ? "," : "", i + 1);
        print_json_text("id", str_of(&task->id));
        printf(", ");
        print_json_text("kind", str_of(&task->kind));
        printf(", \"prompt_tokens\": %zu", task->ids.n);
        print_json_fields(row->v);
        printf(", \"plain_hash\": \"%016" PRIx64 "\", \"spec_hash\": \"%016" PRIx64 "\", \"result\": \"%s\", ",
               row->plain_hash, row->spec_hash, verdict_names[row->verdict]);
        print_json_text("stopped", str_of(&row->end));
        printf("}");
    } else {
        printf("| %d%s", i + 1, task->id.n ? " " : "");
        print_cell(str_of(&task->id));
        printf(" | ");
        print_cell(str_of(&task->kind));
        printf(" |");
        print_cells(e, row->v);
        printf(" %016" PRIx64 "%s | %s |\n", row->plain_hash, same ? "" : " DIFFERENT", verdict_names[row->verdict]);
    }
    tok_text_free(&line);
    flush_output();
}

static void print_sums(const Eval *e, TokStr kind, const EvalSums *s, bool median) {
    const double *v = median ? s->median : s->mean;
    if (e->o->format == EVAL_JSON) {
        printf("%s\n  {", median || kind.n ? "," : "");
        print_json_text("kind", kind);
        printf(", \"value\": \"%s\", \"prompts\": %d", median ? "median" : "mean", s->rows);
        print_json_fields(v);
        printf(", \"judged\": %d, \"right\": %d, \"same\": %d}", s->judged, s->right, s->same);
        return;
    }
    printf("| %s of %d | ", median ? "median" : "mean", s->rows);
    print_cell(kind.n ? kind : (TokStr){ "all", 3 });
    printf(" |");
    print_cells(e, v);
    if (e->drafts) printf(" %d same |", s->same);
    else printf(" |");
    if (s->judged) printf(" %d of %d right, %.1f %% |\n", s->right, s->judged, 100.0 * s->right / s->judged);
    else printf(" |\n");
}

// Prints the mean and the median of all rows, then the mean of each kind.
static void print_eval_end(const Eval *e) {
    const EvalSums all = sum_rows(e, NULL);
    if (e->o->format == EVAL_CSV) return;
    if (e->o->format == EVAL_JSON) printf("\n], \"summary\": [");
    print_sums(e, (TokStr){ "", 0 }, &all, false);
    print_sums(e, (TokStr){ "", 0 }, &all, true);
    for (int i = 0; i < e->n && e->has_kinds; i++) {
        bool seen = !e->rows[i].done;
        for (int j = 0; j < i; j++) seen |= e->rows[j].done && same_kind(&e->tasks[i].kind, &e->tasks[j].kind);
        if (seen || !e->tasks[i].kind.n) continue;
        const EvalSums sums = sum_rows(e, &e->tasks[i].kind);
        print_sums(e, str_of(&e->tasks[i].kind), &sums, false);
    }
    if (e->o->format == EVAL_JSON) {
        printf("\n], ");
        print_json_text("setting", (TokStr){ e->setting, strlen(e->setting) });
        printf("}\n");
    }
    flush_output();
}

// Writes what the rows depend on.
static void write_setting(Eval *e) {
    const ModelOptions *o = model_options(e->m);
    const AnswerOptions *a = &e->o->answer;
    const SampleParams *s = &a->sampling;
    struct stat st = { 0 };
    if (o->drafter) stat(o->drafter, &st);
    snprintf(e->setting, sizeof e->setting,
             "model=%s model-hash=%016" PRIx64 " draft-model=%s draft-bytes=%lld spec=%s draft-max=%d draft-min-p=%g "
             "tree=%d cache=%s/%s c=%d n=%d temp=%g top-k=%d top-p=%g min-p=%g penalties=%g/%g/%g seed=%" PRIu64
             " think=%d/%d system=%016" PRIx64 " pflash=%g/%d template=%s code=%s",
             base_name(model_path(e->m)), session_key(e->session), o->drafter ? base_name(o->drafter) : "",
             (long long)st.st_size, spec_names[a->drafting.kind], a->drafting.n_max, (double)a->drafting.p_min,
             a->drafting.tree, kv_names[o->k_type], kv_names[o->v_type], o->n_ctx, a->n_predict,
             (double)s->temperature, (int)s->top_k, (double)s->top_p, (double)s->min_p, (double)s->repeat,
             (double)s->presence, (double)s->frequency, s->seed, e->o->think, a->think_budget,
             e->o->system ? hash_bytes(e->o->system, strlen(e->o->system)) : 0, (double)o->pflash, o->pflash_from,
             e->t->large_variant ? "large" : "small", e->o->run_code ? "run" : "");
    for (char *c = e->setting; *c; c++) if ((unsigned char)*c < ' ' || *c == '"') *c = '?';
}

// Says what happens to programs of the model.
static void print_code_note(const Eval *e) {
    int n = 0;
    for (int i = 0; i < e->n; i++) n += e->tasks[i].judge == JUDGE_CODE;
    if (!n) return;
    if (!e->o->run_code) {
        fprintf(stderr, "# %d prompts have tests; --run-code runs the model's programs with them\n", n);
        return;
    }
    need_python(&interrupted);
    const int taken = try_confinement();
    fprintf(stderr, "# the model's programs run in a child: %d s, %d MiB, %s, %s\n", CODE_SECONDS, CODE_MIB,
            taken & NO_NETWORK ? "no network" : "WITH THE NETWORK (this system cannot take it away)",
            taken & NO_WRITES ? "writing only to a folder of its own" :
            "WITH ALL RIGHTS OF THIS USER TO WRITE FILES (this system cannot take them away)");
}

static void free_eval(Eval *e) {
    for (int i = 0; i < e->n; i++) {
        free_task(&e->tasks[i]);
        tok_text_free(&e->rows[i].end);
    }
    free(e->tasks);
    free(e->rows);
    session_close(e->session);
}

// Answers all prompts. Returns the exit status: 1 if a text with drafts differs from the one without, 130 if it was
// interrupted. No session of the model may be open.
static int eval_prompts(Model *m, Tokenizer *t, const EvalOptions *o) {
    Eval e = { .o = o, .m = m, .t = t, .drafts = o->answer.drafting.kind != SPEC_OFF,
               .has_joules = read_joules(m) >= 0 };
    size_t n;
    char *text = read_text(o->prompts, &n, "--prompts");
    measure_pace(m, t, &o->answer.drafting);
    e.session = session_open(m, t, 0);
    read_tasks(&e, text, n);
    write_setting(&e);
    read_rows(&e);
    print_model(m);                                    // after the last error
    print_code_note(&e);
    stop_on(SIGINT);
    int n_done = 0, n_known = 0, n_different = 0;
    for (int i = 0; i < e.n; i++) n_known += e.rows[i].done;
    if (n_known) fprintf(stderr, "# --csv: %s: %d of %d prompts are done already\n", o->csv, n_known, e.n);
    for (int k = 0; k < 1 + e.drafts && n_known < e.n; k++) {          // the first steps of each kind are slow
        EvalAnswer a = answer_task(&e, &e.tasks[0], k ? o->answer.drafting.kind : SPEC_OFF, 8);
        free_answer(&a);
    }
    print_eval_head(&e);
    progress("eval", 0, (size_t)e.n, "prompts");
    for (int i = 0; i < e.n && !interrupted; i++) {
        if (!e.rows[i].done && eval_task(&e, i)) keep_row(&e, i);
        if (!e.rows[i].done) break;
        print_eval_row(&e, i);
        n_different += e.rows[i].plain_hash != e.rows[i].spec_hash;
        progress("eval", (size_t)++n_done, (size_t)e.n, "prompts");
    }
    if (bar_shown) draw_status("");
    print_eval_end(&e);
    if (interrupted)
        fprintf(stderr, "# interrupted: %d of %d prompts are done%s\n", n_done, e.n,
                o->csv ? "; the same command continues" : "");
    if (n_different) fprintf(stderr, "# DIFFERENT TEXTS: %d of %d prompts\n", n_different, n_done);
    for (int i = 0; i < e.n && n_different; i++)
        if (e.rows[i].done && e.rows[i].plain_hash != e.rows[i].spec_hash)
            fprintf(stderr, "#   %s\n", task_name(&e, i));
    free_eval(&e);
    free(text);
    return n_different ? 1 : interrupted ? 130 : 0;
}

#endif
