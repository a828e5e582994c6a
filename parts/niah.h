/* niah.h - needle-in-a-haystack test: verb_niah() puts codes into long texts and asks the model for them.
 *
 * Uses engine.h, compress.h and plot.h (the heat map). Begin with verb_niah().
 *
 * A text is prose of a given number of tokens, made up or from a file, in a user's turn. It contains sentences "The
 * secret code of NAME is 12345."; after the text the turn asks for one of them. The answer is greedy, without thoughts,
 * and right if it contains the code. If a text has several codes, the first is at the depth of its cell and the others
 * follow in equal steps, from the end on to the beginning; each is asked for on its own, after the same cached text.
 * Everything is computed from the number of the run, so all settings get the same questions.
 *   [1] Texts    [2] Asking    [3] Tables, heat map */
#ifndef NIAH_H
#define NIAH_H

typedef struct {
    IntList lengths, depths;           // tokens of a prompt; percent of the text before the code
    int     n_needles, n_runs;
    bool    csv;
    const char *svg;                   // file of the heat map; NULL: none
    Compressor compressor;             // ratio 0: prompts are shown as they are
    const char *hay;                   // (n_hay) what texts are cut from, at a place that differs by run; NULL: made up
    size_t  n_hay;
} NiahOptions;

enum { MAX_NEEDLES = 16, ANSWER_TOKENS = 40, QUESTION_ROOM = 64 };

typedef struct { char name[8], code[8]; } Needle;

typedef struct { int asked, right; double seconds, density, kept; } NiahCell;

typedef struct {
    Model      *m;
    Tokenizer   tok;
    const NiahOptions *o;
    Session    *session;               // the model's only one
    Compressor  compressor;
    TokIds      ids, shown;            // of the text and the question; what is left of them after compression
    float      *logits;                // (vocab)
    Output      svg;                   // the heat map, if there is one
    uint64_t    random;
    NiahCell    cells[32][32];         // length, depth
} Niah;

// ==== [1] Texts ======================================================================================================

static int niah_random(Niah *t, int n) {               // 0 .. n - 1
    t->random++;
    return (int)(random_unit(t->random, 1) * (float)n);
}

static void name_needle(Niah *t, Needle *x) {          // two or three syllables, five digits
    const int n = 2 + niah_random(t, 2);
    for (int i = 0; i < n; i++) {
        x->name[2 * i] = "bdfghklmnprstvz"[niah_random(t, 15)];
        x->name[2 * i + 1] = "aeiou"[niah_random(t, 5)];
    }
    x->name[0] = (char)(x->name[0] - 'a' + 'A');
    x->name[2 * n] = 0;
    snprintf(x->code, sizeof x->code, "%05d", niah_random(t, 100000));
}

// Makes a sentence of prose, or takes one from the file at *at.
static void next_sentence(Niah *t, size_t *at, char *text, size_t room) {
    static const char *const who[] = { "The baker", "An old sailor", "The girl", "A farmer", "The teacher", "My uncle",
                                       "The king", "A young fox", "The doctor", "A tall man", "The cook",
                                           "Her brother" };
    static const char *const does[] = { "walked to", "looked at", "came back from", "painted", "waited beside",
                                        "told us about", "sat down near", "ran around", "thought of", "never found",
                                        "slept near", "cleaned" };
    static const char *const what[] = { "the harbor", "a green hill", "the old bridge", "the small house",
                                        "an empty boat",
                                        "the garden wall", "a quiet street", "the blue lake", "the tower",
                                        "a field of flowers" };
    static const char *const when[] = { "", " in the morning", " when it rained", " before the sun went down",
                                        " for a while",
                                        " on the last day of summer", " with a friend", " and went home" };
    if (!t->o->hay) {
        snprintf(text, room, "%s %s %s%s.", who[niah_random(t, 12)], does[niah_random(t, 12)], what[niah_random(t, 10)],
                 when[niah_random(t, 8)]);
        return;
    }
    size_t n = 0;
    for (; n + 1 < room; ) {
        const char c = t->o->hay[*at];
        *at = (*at + 1) % t->o->n_hay;
        text[n++] = c == '\n' ? ' ' : c;
        if (n > 1 && (c == '.' || c == '!' || c == '?' || c == '\n')) break;
    }
    text[n] = 0;
}

static void niah_add(Niah *t, const char *text) {
    if (tok_encode(&t->tok, text, strlen(text), TOK_SPECIAL, &t->ids) < 0) die("niah: %s", t->tok.err);
}

// Makes the text of a run: n tokens less those of a question, with the needles in it.
static void make_haystack(Niah *t, int n, int depth, const Needle *x) {
    const int n_needles = t->o->n_needles, last = n - QUESTION_ROOM - 24;
    size_t at = t->o->hay ? (size_t)niah_random(t, (int)t->o->n_hay) : 0;
    int place[MAX_NEEDLES];
    bool done[MAX_NEEDLES] = { false };
    char text[600], spaced[604];
    for (int i = 0; i < n_needles; i++) place[i] = (int)((int64_t)last * ((depth + 100 * i / n_needles) % 101) / 100);
    t->ids.n = 0;
    niah_add(t, "<bos><|turn>user\n");
    for (bool first = true, more = true; more; first = false) {
        int now = -1;
        for (int i = 0; i < n_needles; i++) if (!done[i] && (int)t->ids.n >= place[i]) now = i;
        more = now >= 0 || (int)t->ids.n < last;
        if (!more) break;
        if (now >= 0) snprintf(text, sizeof text, "The secret code of %s is %s.", x[now].name, x[now].code);
        else next_sentence(t, &at, text, sizeof text);
        if (now >= 0) done[now] = true;
        snprintf(spaced, sizeof spaced, "%s%s", first || *text == ' ' ? "" : " ", text);
        niah_add(t, spaced);
    }
}

// ==== [2] Asking =====================================================================================================

static int32_t best_next(Niah *t) {                    // the token of the largest logit after the last one
    const int vocab = model_shape(t->m).vocab;
    int32_t best = 0;
    session_logits(t->session, t->logits);
    for (int i = 1; i < vocab; i++) if (t->logits[i] > t->logits[best]) best = i;
    return best;
}

// Asks for a needle after the text, of which the session has a snapshot, and goes back to that. True: the answer has
// the code.
static bool ask_needle(Niah *t, const Needle *x, const int32_t *question, int n) {
    char answer[1024] = "";
    size_t at = 0;
    session_append(t->session, question, n, 0);
    for (int i = 0; i < ANSWER_TOKENS; i++) {
        const int32_t id = best_next(t);
        const TokStr piece = tok_piece(&t->tok, id, false);
        if (tok_is_stop(&t->tok, id) || at + piece.n >= sizeof answer) break;
        memcpy(answer + at, piece.s, piece.n);
        at += piece.n;
        session_append(t->session, &id, 1, 0);
    }
    answer[at] = 0;
    session_rollback(t->session);
    return strstr(answer, x->code) != NULL;
}

// Runs one text and asks all questions about it.
static void niah_run(Niah *t, int n, int depth, uint64_t run, NiahCell *cell) {
    Needle x[MAX_NEEDLES];
    char question[160];
    t->random = run << 32;
    for (int i = 0; i < t->o->n_needles; i++) {
        name_needle(t, &x[i]);
        for (int j = 0; j < i; j++) if (!strcmp(x[i].name, x[j].name)) name_needle(t, &x[i]), j = -1;
    }
    make_haystack(t, n, depth, x);
    const int n_text = (int)t->ids.n;
    const bool lossy = t->compressor.ratio > 0;
    double start = seconds();
    session_forget(t->session);
    if (!lossy) session_append(t->session, t->ids.ids, n_text, QUESTION_ROOM);      // the prompt ends with the question
    cell->seconds += (seconds() - start) / t->o->n_runs;
    cell->density += read_density(t->m) / t->o->n_runs;
    session_snapshot(t->session);
    for (int i = 0; i < t->o->n_needles; i++) {
        snprintf(question, sizeof question, "\n\nWhat is the secret code of %s?<turn|>\n<|turn>model\n%s", x[i].name,
                 t->tok.large_variant ? "<|channel>thought\n<channel|>" : "");
        t->ids.n = (size_t)n_text;
        niah_add(t, question);
        cell->asked++;
        start = seconds();
        if (lossy && !compress_prompt(&t->compressor, t->session, t->ids.ids, (int)t->ids.n, 1, &t->shown))
            die("%s", t->compressor.err);
        if (lossy) cell->seconds += (seconds() - start) / t->o->n_runs / t->o->n_needles;
        if (lossy) cell->kept += (double)t->shown.n / (double)t->ids.n / t->o->n_runs / t->o->n_needles;
        cell->right += lossy ? ask_needle(t, &x[i], t->shown.ids, (int)t->shown.n)
                             : ask_needle(t, &x[i], t->ids.ids + n_text, (int)t->ids.n - n_text);
    }
}

// ==== [3] Tables, heat map ===========================================================================================

static double niah_share(const NiahCell *c) { return c->asked ? 100.0 * c->right / c->asked : 0; }

// Writes what was measured, in words.
static void niah_setting(const Niah *t, char *text, size_t room) {
    const ModelOptions *o = model_options(t->m);
    int n = snprintf(text, room, "%s, cache %s", model_name(t->m), kv_names[o->k_type]);
    if (o->v_type != o->k_type) n += snprintf(text + n, room - (size_t)n, "/%s", kv_names[o->v_type]);
    if (o->pflash_density > 0)
        n += snprintf(text + n, room - (size_t)n, ", pFlash density fixed at %g %%", (double)o->pflash_density * 100);
    else if (o->pflash > 0) n += snprintf(text + n, room - (size_t)n, ", pFlash alpha %g", (double)o->pflash);
    else n += snprintf(text + n, room - (size_t)n, ", dense");
    if (t->compressor.ratio > 0)
        n += snprintf(text + n, room - (size_t)n, ", compressed (lossy) to %g by %s", (double)t->compressor.ratio,
                      t->compressor.scorer ? model_name(t->compressor.scorer) : "its own first layers");
    snprintf(text + n, room - (size_t)n, ", %d needle%s per text, %d text%s per cell", t->o->n_needles,
             t->o->n_needles > 1 ? "s" : "", t->o->n_runs, t->o->n_runs > 1 ? "s" : "");
}

static bool niah_is_sparse(const Niah *t) {
    const ModelOptions *m = model_options(t->m);
    return m->pflash > 0 || m->pflash_density > 0;
}

static void print_niah_head(const Niah *t) {
    const NiahOptions *o = t->o;
    const bool sparse = niah_is_sparse(t), lossy = t->compressor.ratio > 0;
    char setting[400];
    niah_setting(t, setting, sizeof setting);
    if (o->csv) printf("length,depth,needles,asked,right,prompt_seconds,pflash_density,kept\n");
    if (o->csv) return;
    printf("%s: percent of needles found\n\n| tokens |", setting);
    for (int d = 0; d < o->depths.count; d++) printf(" %d %% |", o->depths.n[d]);
    printf(" all | %s |%s%s\n| ---: |", lossy ? "scoring s" : "prompt s", sparse ? " blocks |" : "",
           lossy ? " kept |" : "");
    for (int d = 0; d < o->depths.count; d++) printf(" ---: |");
    printf(" ---: | ---: |%s%s\n", sparse ? " ---: |" : "", lossy ? " ---: |" : "");
}

static void print_niah_row(const Niah *t, int l) {     // of the table: a length
    const NiahOptions *o = t->o;
    NiahCell row = { 0 };
    printf("| %d |", o->lengths.n[l]);
    for (int d = 0; d < o->depths.count; d++) {
        const NiahCell *c = &t->cells[l][d];
        printf(" %.0f |", niah_share(c));
        row.asked += c->asked, row.right += c->right;
        row.seconds += c->seconds / o->depths.count, row.density += c->density / o->depths.count;
        row.kept += c->kept / o->depths.count;
    }
    printf(" %.1f | %.2f |", niah_share(&row), row.seconds);
    if (niah_is_sparse(t) && row.density > 0) printf(" %.1f %% |", 100 * row.density);
    else if (niah_is_sparse(t)) printf(" dense |");
    if (t->compressor.ratio > 0) printf(" %.1f %% |", 100 * row.kept);
    printf("\n");
}

// Prints what is known after a cell, so that a run that ends early has not run for nothing: a row of the CSV; the
// table's row after its last cell. The head names the scorer, which the first cell has loaded.
static void print_niah_cell(const Niah *t, int l, int d) {
    const NiahOptions *o = t->o;
    const NiahCell *c = &t->cells[l][d];
    if (bar_shown) draw_status("");
    if (!l && !d) print_niah_head(t);
    if (o->csv)
        printf("%d,%d,%d,%d,%d,%.4f,%.6f,%.6f\n", o->lengths.n[l], o->depths.n[d], o->n_needles, c->asked, c->right,
               c->seconds, c->density, t->compressor.ratio > 0 ? c->kept : 1);
    else if (d == o->depths.count - 1) print_niah_row(t, l);
    flush_output();
}

static void print_niah_total(const Niah *t) {
    const NiahOptions *o = t->o;
    NiahCell all = { 0 };
    for (int l = 0; l < o->lengths.count; l++)
        for (int d = 0; d < o->depths.count; d++) {
            all.asked += t->cells[l][d].asked;
            all.right += t->cells[l][d].right;
        }
    printf("\n%d of %d needles found, %.1f %%.\n", all.right, all.asked, niah_share(&all));
    flush_output();
}

// Draws the table as gemma4 plot does.
static void write_heat_map(Niah *t) {
    const NiahOptions *o = t->o;
    char setting[400], *text = NULL;
    Table table = { .path = "--svg" };
    size_t n = 0;
    FILE *f = open_memstream(&table.text, &n);
    if (!f) die("out of memory for --svg");
    fprintf(f, "length,depth,asked,right\n");
    for (int l = 0; l < o->lengths.count; l++)
        for (int d = 0; d < o->depths.count; d++)
            fprintf(f, "%d,%d,%d,%d\n", o->lengths.n[l], o->depths.n[d], t->cells[l][d].asked, t->cells[l][d].right);
    if (fclose(f) || !(f = open_memstream(&text, &n))) die("out of memory for --svg");
    split_table(&table);
    niah_setting(t, setting, sizeof setting);
    draw_heat_map(f, &table, setting);
    fprintf(f, "</svg>\n");
    if (ferror(f) || fclose(f)) die("out of memory for --svg");
    const int err = finish_output(&t->svg, write_output(&t->svg, text, n));
    if (err) die_output("--svg", &t->svg, err);
    free_table(&table);
    free(text);
}

static void verb_niah(const char *model, const Ops *ops, ModelOptions o, const NiahOptions *options) {
    Niah *t = alloc_or_die(1, sizeof *t);
    t->o = options;
    int longest = 0, done = 0;
    for (int i = 0; i < options->lengths.count; i++) {
        if (options->lengths.n[i] < 256)
            die("-p: expected prompts of at least 256 tokens, got %d", options->lengths.n[i]);
        longest = max_int(longest, options->lengths.n[i]);
    }
    if (longest > MAX_CONTEXT - ANSWER_TOKENS - QUESTION_ROOM)
        die("-p: expected prompts of at most %d tokens, got %d", MAX_CONTEXT - ANSWER_TOKENS - QUESTION_ROOM, longest);
    for (int i = 0; i < options->depths.count; i++)
        if (options->depths.n[i] > 100) die("-d: expected depths from 0 to 100 percent, got %d", options->depths.n[i]);
    const int err = options->svg ? create_output(&t->svg, options->svg, 0666) : 0;     // before hours of answers
    if (err) die_output("--svg", &t->svg, err);
    o.n_ctx = longest + ANSWER_TOKENS + QUESTION_ROOM;
    o.ctx_from = "-p";
    t->m = model_open(model, ops, o, NULL);
    model_tokenizer(t->m, &t->tok);
    print_plan(t->m);
    read_weights(t->m, false);
    t->session = session_open(t->m, &t->tok, 0);
    t->compressor = options->compressor;
    if (t->compressor.file) scorer_check(t->compressor.file, t->m);
    t->logits = alloc_or_die((size_t)model_shape(t->m).vocab, sizeof *t->logits);
    const int total = options->lengths.count * options->depths.count * options->n_runs;
    progress("niah", 0, (size_t)total, "texts");
    for (int l = 0; l < options->lengths.count; l++)
        for (int d = 0; d < options->depths.count; d++) {
            for (int run = 0; run < options->n_runs; run++) {
                niah_run(t, options->lengths.n[l], options->depths.n[d], (uint64_t)(1 + run + 1000 * d),
                         &t->cells[l][d]);
                progress("niah", (size_t)++done, (size_t)total, "texts");
            }
            print_niah_cell(t, l, d);
        }
    if (!options->csv) print_niah_total(t);
    if (options->svg) write_heat_map(t);
    tok_ids_free(&t->ids);
    tok_ids_free(&t->shown);
    session_close(t->session);
    close_scorer(&t->compressor);
    tok_free(&t->tok);
    model_close(t->m);
    free(t->logits);
    free(t);
}

#endif
