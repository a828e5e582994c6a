/* sweep.h - a table of measurements: verb_sweep() runs all combinations of cache types, draft models, draft lengths,
 * trees and contexts, and writes a row of CSV for each.
 *
 * Uses bench.h, generate.h, plan.h and plot.h (which reads the file). Begin with verb_sweep().
 *
 * A row is a whole run: the model is opened with the context that the row needs and warmed up; a prompt of `ctx` tokens
 * is processed; then tokens are generated, greedily. Each row is written as soon as it is known. If the file has rows
 * already, these are skipped, so that a sweep that was interrupted continues. What is not known is an empty cell:
 * energy where the device does not report it, acceptance without a draft model, prompts where random rows fill the
 * cache.
 *   [1] Rows    [2] Measuring    [3] The file    [4] The verb */
#ifndef SWEEP_H
#define SWEEP_H

// ==== [1] Rows =======================================================================================================

static const char *const sweep_columns[] = {
    "config", "arch", "draft", "kv_k", "kv_v", "ctx", "dm",            // what is measured: these make a row's key
    "wall_s",                 // prompt and generation
    "prefill_ms", "prefill_tps", "decode_ms", "decode_tps",
    "al", "accept_rate",      // tokens of a step with drafts, the model's own included; accepted of the drafted tokens
    "first_tok_ms",           // from the start of the prompt until the host has the first token
    "vram_peak_gb",           // device memory in use since the model was loaded, in 2^30 bytes
    "avg_power_w", "total_energy_j", "prefill_energy_j", "decode_energy_j", "decode_j_per_tok" };
enum { SWEEP_COLUMNS = sizeof sweep_columns / sizeof *sweep_columns, SWEEP_KEYS = 7 };

typedef struct {
    const char *k, *v;        // cache types; v NULL: as k
    const char *drafter;      // file; NULL: none
    int ctx;                  // tokens of the prompt
    int draft_max, tree;      // draft_max 0: no drafts; tree 0: chains
} SweepCell;

typedef struct {              // NAN: not known
    double prefill, decode;   // seconds
    double prefill_joules, decode_joules;
    double al, accept_rate, vram;      // vram: bytes
    int    made;              // tokens in `decode`
} SweepResult;

typedef struct {
    TextList k_types, v_types, drafters;               // a NULL among drafters: a row without draft model
    IntList  depths, draft_max, trees;
    int      n;               // tokens to generate
    bool     random_fill;
    Forced   forced;          // accept_rate of each depth, if `force` is the text that they were parsed from
    const char *force;        // NULL: drafts are verified
    const char *text;         // (n_text) the prompt begins with this text; NULL: random tokens
    size_t   n_text;
    const char *out;          // file; NULL: standard output
    const char *settings;     // what else makes this sweep's rows different from others': " vram=24 pflash=0.1"
} SweepOptions;

typedef struct {
    const char *model;        // file
    const Ops  *ops;
    ModelOptions options;     // of all rows
    const SweepOptions *o;
    SweepCell  *cells;        // (n_cells)
    int         n_cells;
    char        arch[128];
    Table       known;        // rows that the file has
} Sweep;

static int sweep_drafts(const SweepCell *c) { return max_int(c->draft_max, c->tree); }

// The options with which a row's model is opened.
static ModelOptions sweep_options(const Sweep *w, const SweepCell *c) {
    ModelOptions o = w->options;
    o.k_type = o.v_type = KV_F16;
    for (int k = 0; k < (int)(sizeof kv_names / sizeof *kv_names); k++) {
        if (!strcmp(kv_names[k], c->k)) o.k_type = (KvType)k;
        if (!strcmp(kv_names[k], c->v ? c->v : c->k)) o.v_type = (KvType)k;
    }
    o.drafter = c->drafter;
    o.draft_width = c->tree ? DRAFT_WIDTH : 1;
    o.draft_depth = c->draft_max;
    o.n_ctx = max_int(c->ctx, 1) + w->o->n + 2 * (1 + sweep_drafts(c));
    o.ctx_from = "-d or -n";
    o.n_logits = max_int(o.n_logits, 1 + sweep_drafts(c));
    return o;
}

// Writes a text as a cell of CSV.
static void put_cell(FILE *f, const char *text) {
    const bool quoted = strpbrk(text, ",\"\r\n") != NULL || *text == '#';
    if (quoted) fputc('"', f);
    for (; *text; text++) {
        if (*text == '"') fputc('"', f);
        fputc(*text, f);
    }
    if (quoted) fputc('"', f);
}

// The cells that say what a row measures, each followed by a zero byte. Returns memory that the caller frees.
static char *sweep_key(const Sweep *w, const SweepCell *c, const char *cells[SWEEP_KEYS]) {
    char *text = NULL;
    size_t n, at = 0;
    FILE *f = open_memstream(&text, &n);
    if (!f) die("out of memory for a row");
    fprintf(f, "%s n=%d fill=%s", base_name(w->model), w->o->n, w->o->random_fill ? "random" : "prompt");
    if (c->tree) fprintf(f, " tree=%d", c->tree);
    if (c->draft_max && w->o->force) {
        fprintf(f, " force=");
        for (const char *p = w->o->force; *p; p++) fputc(*p == ',' ? '/' : *p, f);
    }
    fprintf(f, "%s%c%s%c%s%c%s%c%s%c%d%c", w->o->settings, 0, w->arch, 0, c->drafter ? base_name(c->drafter) : "none",
            0, c->k, 0, c->v ? c->v : c->k, 0, c->ctx, 0);
    if (c->draft_max) fprintf(f, "%d", c->draft_max);
    fputc(0, f);
    if (fclose(f)) die("out of memory for a row");
    for (int k = 0; k < SWEEP_KEYS; k++, at += strlen(text + at) + 1) cells[k] = text + at;
    return text;
}

// ==== [2] Measuring ==================================================================================================

static double sweep_joules(const Bench *b) { return b->has_joules ? b->m->ops->joules() : NAN; }

// The energy between two readings; NAN: not known. The counter moves some times a second: a phase that is too short for
// it has none.
static double joules_between(double from, double to) { return to > from ? to - from : NAN; }

// Answers a prompt in a session with made + 1 tokens. Fills in times, energy and acceptance.
static void sweep_answer(Bench *b, Session *s, int n_prompt, int made, const Drafting *how, SweepResult *r) {
    const AnswerOptions o = { .n_predict = made + 1, .ignore_eos = true, .think_budget = -1, .sampling.repeat = 1,
                              .drafting = *how };
    Event e = { .kind = EVENT_PROMPT };
    const double start = seconds(), joules = sweep_joules(b);
    double first = 0, first_joules = 0;
    if (!session_start(s, &(Prompt){ .ids = b->ids, .n = n_prompt }, &o)) die("sweep: %s", s->err);
    while (e.kind != EVENT_END) {
        session_next(s, &e);
        if (e.kind == EVENT_TOKEN && first <= 0) first = seconds(), first_joules = sweep_joules(b);
    }
    if (e.end == END_ERROR) die("sweep: %s", e.error);
    const DraftCount *d = &s->turn.drafts;
    r->prefill = first - start;
    r->decode = seconds() - first;
    r->prefill_joules = joules_between(joules, first_joules);
    r->decode_joules = joules_between(first_joules, sweep_joules(b));
    r->made = s->turn.made - 1;
    r->al = d->n_steps ? 1 + (double)d->accepted / d->n_steps : NAN;
    r->accept_rate = d->drafted ? (double)d->accepted / d->drafted : NAN;
}

// Generates n tokens after the session's prompt, in steps whose drafts are accepted at random.
static void sweep_forced(Bench *b, int n, SweepResult *r) {
    const double start = seconds(), joules = sweep_joules(b);
    bench_forced(b, n);
    r->decode = seconds() - start;
    r->decode_joules = joules_between(joules, sweep_joules(b));
    r->made = b->n_made;
    r->al = (double)(b->n_made - 1) / b->n_steps;
    r->accept_rate = (r->al - 1) / max_int(b->forced.depth, b->forced.tree);
}

// Runs steps of every kind that the row needs: the first two of each are slow on a GPU.
static void sweep_warm_up(Bench *b, Session *s, const SweepCell *c, const Drafting *how) {
    enum { TOKENS = 4 };
    SweepResult none;
    const int rounds = b->m->ops->fence ? 3 : 1;
    bench_warm_up(b, &(BenchOptions){ .prompts = { .n = { c->ctx }, .count = c->ctx > 0 }, .depths.count = 1 });
    for (int i = 0; i < rounds; i++) {
        session_forget(s);
        sweep_answer(b, s, 1, b->forced.depth ? 0 : TOKENS, how, &none);
        if (b->forced.depth) sweep_forced(b, TOKENS, &none);
    }
    session_forget(s);
}

// Puts the first n ids into the session, with random numbers in the caches.
static void sweep_fill(Bench *b, Session *s, int n) {
    for (int i = 0; i < n; i++) push_id(s->t, &s->held, b->ids[i]);
    fill_caches(b->m);
    set_length(b->m, 0, n);
    b->m->n_written[0] = n;
}

// The ids of the longest prompt: <bos> and the text, or random ones.
static void sweep_ids(const Sweep *w, Bench *b, Tokenizer *t, int n_ctx, int n_prompt) {
    TokIds ids = { 0 };
    b->ids = alloc_or_die(n_ctx, sizeof *b->ids);
    for (int i = 0; i < n_ctx; i++) b->ids[i] = (int32_t)(random_unit(1, i) * (float)b->m->config.vocab);
    if (!w->o->text) return;
    if (t->bos >= 0) push_id(t, &ids, t->bos);
    if (tok_encode(t, w->o->text, w->o->n_text, TOK_PLAIN, &ids) < 0) die("-f: %s", t->err);
    if ((int)ids.n < n_prompt) die("-f: expected a text of at least %d tokens, as -d says, got %zu", n_prompt, ids.n);
    memcpy(b->ids, ids.ids, (size_t)n_prompt * sizeof *b->ids);
    tok_ids_free(&ids);
}

static SweepResult measure_cell(const Sweep *w, const SweepCell *c) {
    const ModelOptions o = sweep_options(w, c);
    Bench b = { .m = alloc_or_die(1, sizeof *b.m), .forced = w->o->forced };
    Model *m = b.m;
    Tokenizer t;
    SweepResult r = { .prefill = NAN, .prefill_joules = NAN, .al = NAN, .accept_rate = NAN, .vram = NAN };
    const bool forced = c->draft_max && w->o->force, fills = w->o->random_fill && c->ctx > 1;
    size_t total;
    b.forced.depth = forced ? c->draft_max : 0;
    b.forced.tree = forced ? c->tree : 0;
    b.has_joules = w->ops->joules && w->ops->joules() >= 0;
    w->ops->memory(&b.free_before, &total);
    load_model(m, w->model, w->ops, o, NULL);
    model_tokenizer(m, &t);
    read_weights(m, false);
    sweep_ids(w, &b, &t, o.n_ctx, max_int(c->ctx, 1));
    Session *s = session_open(m, &t, 0);
    const Drafting how = { .kind = c->draft_max && !forced ? drafter_of(m) : SPEC_OFF, .n_max = c->draft_max,
                           .tree = c->tree };
    sweep_warm_up(&b, s, c, &how);
    if (fills) sweep_fill(&b, s, c->ctx - 1);
    sweep_answer(&b, s, max_int(c->ctx, 1), forced ? 0 : w->o->n, &how, &r);
    if (forced) sweep_forced(&b, w->o->n, &r);
    if (fills || !c->ctx) r.prefill = r.prefill_joules = NAN;
    if (device_memory(&b)) r.vram = (double)device_memory(&b);
    session_close(s);
    tok_free(&t);
    free(b.ids);
    free_model(m);
    free(m);
    return r;
}

// ==== [3] The file ===================================================================================================

static bool is_row(const Sweep *w, int row, const char *const cells[SWEEP_KEYS]) {
    for (int k = 0; k < SWEEP_KEYS; k++)
        if (strcmp(table_cell(&w->known, row, k), cells[k])) return false;
    return true;
}

static bool has_cell(const Sweep *w, const SweepCell *c) {             // the file has this row
    const char *cells[SWEEP_KEYS];
    char *key = sweep_key(w, c, cells);
    bool found = false;
    for (int row = 0; row < w->known.n_rows && !found; row++) found = is_row(w, row, cells);
    free(key);
    return found;
}

// Reads the rows of the file, if there is one. Dies if it is no sweep of this model.
static void read_known(Sweep *w) {
    const char *path = w->o->out, *name = base_name(w->model);
    struct stat is;
    if (!path || stat(path, &is) || !S_ISREG(is.st_mode) || !is.st_size) return;
    w->known = read_table(path, "-o");
    bool same = w->known.n_cols == SWEEP_COLUMNS;
    for (int k = 0; k < SWEEP_COLUMNS && same; k++) same = !strcmp(table_cell(&w->known, -1, k), sweep_columns[k]);
    if (!same) die("-o: %s: expected a file of gemma4 sweep, got a table with other columns; try another file", path);
    if (!w->known.ends) die("-o: %s: expected a line break at its end; remove its last line, which is cut", path);
    for (int row = 0; row < w->known.n_rows; row++) {
        const char *config = table_cell(&w->known, row, 0), *arch = table_cell(&w->known, row, 1);
        const size_t n = strlen(name);
        if (strncmp(config, name, n) || config[n] != ' ' || strcmp(arch, w->arch))
            die("-o: %s: row %d: expected rows of %s (%s), got %.*s (%s); try another file", path, row + 1, name,
                w->arch, (int)strcspn(config, " "), config, arch);
    }
}

// Adds a line to the file, or prints it.
static void put_sweep(const Sweep *w, const char *line, size_t n) {
    const char *path = w->o->out;
    if (bar_shown) draw_status("");
    const int err = path ? append_to_file(path, line, n, 0666) : 0;
    if (err) die_output("-o", &(Output){ .path = path }, err);
    if (path) return;
    fwrite(line, 1, n, stdout);
    flush_output();
}

static void put_columns(const Sweep *w) {
    char line[512] = "";
    for (int k = 0; k < SWEEP_COLUMNS; k++)
        snprintf(line + strlen(line), sizeof line - strlen(line), "%s%s", k ? "," : "", sweep_columns[k]);
    strcat(line, "\n");
    put_sweep(w, line, strlen(line));
}

static void put_result(const Sweep *w, const SweepCell *c, const SweepResult *r) {
    const char *cells[SWEEP_KEYS];
    char *key = sweep_key(w, c, cells), *line = NULL;
    const double wall = r->decode + (isnan(r->prefill) ? 0 : r->prefill);
    const double joules = isnan(r->prefill) ? r->decode_joules : r->prefill_joules + r->decode_joules;
    const double values[SWEEP_COLUMNS - SWEEP_KEYS] = {
        wall, 1e3 * r->prefill, c->ctx / r->prefill, 1e3 * r->decode, r->made / r->decode, r->al, r->accept_rate,
        1e3 * r->prefill, r->vram / 0x1p30, joules / wall, joules, r->prefill_joules, r->decode_joules,
        r->decode_joules / r->made };
    size_t n;
    FILE *f = open_memstream(&line, &n);
    if (!f) die("out of memory for a row");
    for (int k = 0; k < SWEEP_KEYS; k++) {
        if (k) fputc(',', f);
        put_cell(f, cells[k]);
    }
    for (int k = 0; k < SWEEP_COLUMNS - SWEEP_KEYS; k++)
        if (isfinite(values[k])) fprintf(f, ",%.6g", values[k]);
        else fputc(',', f);
    fputc('\n', f);
    if (fclose(f)) die("out of memory for a row");
    put_sweep(w, line, n);
    free(line);
    free(key);
}

// ==== [4] The verb ===================================================================================================

static void add_cell(Sweep *w, SweepCell c) {
    w->cells = realloc(w->cells, (size_t)(w->n_cells + 1) * sizeof *w->cells);
    if (!w->cells) die("out of memory for the list of rows");
    w->cells[w->n_cells++] = c;
}

// Lists all rows: contexts last, so that the rows of a curve are neighbours.
static void list_cells(Sweep *w) {
    const SweepOptions *o = w->o;
    for (int d = 0; d < o->drafters.n; d++)
        for (int kv = 0; kv < o->k_types.n * o->v_types.n; kv++)
            for (int dm = 0; dm < (o->drafters.text[d] ? o->draft_max.count : 1); dm++)
                for (int tree = 0; tree < (o->drafters.text[d] ? o->trees.count : 1); tree++)
                    for (int ctx = 0; ctx < o->depths.count; ctx++) {
                        SweepCell c = { .k = o->k_types.text[kv / o->v_types.n],
                                        .v = o->v_types.text[kv % o->v_types.n],
                                        .drafter = o->drafters.text[d], .ctx = o->depths.n[ctx] };
                        if (c.drafter) c.draft_max = o->draft_max.n[dm], c.tree = o->trees.n[tree];
                        add_cell(w, c);
                    }
}

// Plans a row's memory, as if it were to be measured; dies on bad input. Returns what is wrong with it: more drafts
// than the draft model makes, a tree that is no tree, too little memory; NULL: nothing.
static const char *plan_cell(Sweep *w, const SweepCell *c) {
    static char why[160];
    Model *m = alloc_or_die(1, sizeof *m);
    plan_model(m, w->model, w->ops, sweep_options(w, c), NULL);
    snprintf(w->arch, sizeof w->arch, "%s", model_name(m));
    const size_t budget = plan_budget(m), needed = fit_context(m, m->options.n_ctx, budget);
    *why = 0;
    if (c->drafter && c->draft_max > m->options.draft_depth)
        snprintf(why, sizeof why, "%s drafts at most %d tokens", base_name(c->drafter), m->options.draft_depth);
    else if (c->tree && c->tree < c->draft_max)
        snprintf(why, sizeof why, "a tree of %d tokens has no path of %d", c->tree, c->draft_max);
    else if (needed > budget || m->plan.in_host > available_memory())
        snprintf(why, sizeof why, "it needs %.2f GiB of %.2f", (double)needed / 0x1p30, (double)budget / 0x1p30);
    free_model(m);
    free(m);
    return *why ? why : NULL;
}

// Removes the rows that the file has, and those that cannot be measured, which it names. Returns how many the file has.
static int drop_cells(Sweep *w) {
    int n = 0, n_known = 0;
    for (int i = 0; i < w->n_cells; i++) {
        const SweepCell c = w->cells[i];
        const char *why = plan_cell(w, &c);
        if (!i) read_known(w);
        if (why)
            fprintf(stderr, "# left out: -ctk %s -d %d%s%s --draft-max %d --tree %d: %s\n", c.k, c.ctx,
                    c.drafter ? " -md " : "", c.drafter ? c.drafter : "", c.draft_max, c.tree, why);
        else if (has_cell(w, &c)) n_known++;
        else w->cells[n++] = c;
    }
    w->n_cells = n;
    return n_known;
}

// Draws the progress line of row i, on a terminal. done, all: work, in tokens; `seconds` have passed.
static void show_sweep(const Sweep *w, int i, double done, double all, double passed) {
    const SweepCell *c = &w->cells[i];
    char line[200], drafts[32] = "", left[48] = "";
    if (!isatty(2)) return;
    if (c->draft_max) snprintf(drafts, sizeof drafts, ", --draft-max %d", c->draft_max);
    if (done > 0) snprintf(left, sizeof left, ", about %.0f s left", ceil(passed / done * (all - done)));
    snprintf(line, sizeof line, "# row %d of %d: %s, context %d%s%s", i + 1, w->n_cells, c->k, c->ctx, drafts, left);
    draw_status(line);
}

// gemma4 sweep: measures all rows that the file does not have.
static void verb_sweep(const char *model, const Ops *ops, ModelOptions options, const SweepOptions *o) {
    Sweep w = { .model = model, .ops = ops, .options = options, .o = o };
    double all = 0, done = 0;
    list_cells(&w);
    const int n_known = drop_cells(&w);
    const bool has_head = w.known.n_cols > 0;
    free_table(&w.known);
    if (!has_head) put_columns(&w);
    const double start = seconds();
    for (int i = 0; i < w.n_cells; i++) all += w.cells[i].ctx + 16 * o->n;         // a generated token is slower
    for (int i = 0; i < w.n_cells; i++) {
        show_sweep(&w, i, done, all, seconds() - start);
        const SweepResult r = measure_cell(&w, &w.cells[i]);
        put_result(&w, &w.cells[i], &r);
        done += w.cells[i].ctx + 16 * o->n;
    }
    if (bar_shown) draw_status("");
    fprintf(stderr, "# %d rows measured, %d were there already\n", w.n_cells, n_known);
    free(w.cells);
}

#endif
