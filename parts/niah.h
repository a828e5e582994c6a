/* niah.h - needles in a haystack: verb_niah() plants codes in long texts and asks for them. A part of gemma4.c, which
 * includes it.
 *
 * A text is plain prose of as many tokens as asked for, made up or from a file, in a user's turn. In it stand sentences "The
 * secret code of NAME is 12345."; behind it the turn asks for one of them. The answer is greedy, without thoughts, and right
 * when the code is in it. With several codes in a text the first stands at the depth of its cell, the others in equal steps
 * behind it, round the end; all are asked for, one by one, of the same cached text. Everything follows from the number of the
 * run, so any two settings are asked the same.
 *   [1] Texts    [2] Asking    [3] Tables, heat map */
#ifndef NIAH_H
#define NIAH_H

typedef struct {
    IntList lengths, depths;           // tokens of a prompt; percent of the text before the code
    int     n_needles, n_runs;
    bool    csv;
    const char *svg;                   // file of the heat map; NULL: none
    Compressor compressor;             // ratio 0: prompts are shown as they are
    const char *hay;                   // (n_hay) what texts are made of, from a place that differs by run; NULL: made up
    size_t  n_hay;
} NiahOptions;

enum { MAX_NEEDLES = 16, ANSWER_TOKENS = 40, QUESTION_ROOM = 64 };

typedef struct { char name[8], code[8]; } Needle;

typedef struct { int asked, right; double seconds, density, kept; } NiahCell;

typedef struct {
    Model      *m;
    Tokenizer   tok;
    const NiahOptions *o;
    Session     session;               // the model's only one
    Compressor  compressor;
    TokIds      ids, shown;            // of the text; what is left of it, compressed
    uint8_t    *rings;                 // behind the text
    float      *logits;                // (vocab)
    FILE       *svg;                   // NULL: no heat map is wanted
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

// A sentence of prose; at: how far into the haystack, where there is one.
static void next_sentence(Niah *t, size_t *at, char *text, size_t room) {
    static const char *const who[] = { "The baker", "An old sailor", "The girl", "A farmer", "The teacher", "My uncle",
                                       "The king", "A young fox", "The doctor", "A tall man", "The cook", "Her brother" };
    static const char *const does[] = { "walked to", "looked at", "came back from", "painted", "waited beside",
                                        "told us about", "sat down near", "ran around", "thought of", "never found",
                                        "slept near", "cleaned" };
    static const char *const what[] = { "the harbor", "a green hill", "the old bridge", "the small house", "an empty boat",
                                        "the garden wall", "a quiet street", "the blue lake", "the tower",
                                        "a field of flowers" };
    static const char *const when[] = { "", " in the morning", " when it rained", " before the sun went down", " for a while",
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

// The text of a run: n tokens, less what a question takes, with the needles in it.
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

static int32_t likeliest(Niah *t) {                    // after the last row of the last step
    int32_t best = 0;
    read_logits(t->m, 0, t->logits);
    for (int i = 1; i < t->m->config.vocab; i++) if (t->logits[i] > t->logits[best]) best = i;
    return best;
}

// Asks for a needle behind the text, which the session holds, and leaves it as it was. True: the code is in the answer.
static bool ask_needle(Niah *t, const Needle *x, const int32_t *question, int n) {
    Model *m = t->m;
    char answer[1024] = "";
    size_t at = 0;
    const int n_text = m->len[0];
    for (int done = run_chunk(m, 0, question, n); done < n; done += run_chunk(m, 0, question + done, n - done)) commit_all(m);
    for (int i = 0; i < ANSWER_TOKENS; i++) {
        const int32_t id = likeliest(t);
        const TokStr piece = tok_piece(&t->tok, id, false);
        commit_all(m);
        if (tok_is_stop(&t->tok, id) || at + piece.n >= sizeof answer) break;
        memcpy(answer + at, piece.s, piece.n);
        at += piece.n;
        run_chunk(m, 0, &id, 1);
    }
    answer[at] = 0;
    copy_rings(m, 0, t->rings, COPY_IN);
    set_length(m, 0, n_text);
    return strstr(answer, x->code) != NULL;
}

// One text, and all questions of it.
static void niah_run(Niah *t, int n, int depth, uint64_t run, NiahCell *cell) {
    Model *m = t->m;
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
    reset_session(m, 0);
    for (int at = lossy ? n_text : 0, rows; at < n_text; at += rows) {  // the question is the end of the prompt
        rows = min_int(m->options.n_batch, n_text - at);
        for (int i = 0; i < rows; i++) m->chunk[i] = (StepRow){ .token = t->ids.ids[at + i] };
        step(m, &(StepSeg){ .seq = 0, .kind = SEG_CHAIN, .n = rows, .rows = m->chunk,
                            .more = n_text - at - rows + QUESTION_ROOM }, 1);
        commit_all(m);
    }
    m->ops->wait();
    cell->seconds += (seconds() - start) / t->o->n_runs;
    cell->density += read_density(m) / t->o->n_runs;
    copy_rings(m, 0, t->rings, COPY_OUT);
    for (int i = 0; i < t->o->n_needles; i++) {
        snprintf(question, sizeof question, "\n\nWhat is the secret code of %s?<turn|>\n<|turn>model\n%s", x[i].name,
                 t->tok.large_variant ? "<|channel>thought\n<channel|>" : "");
        t->ids.n = (size_t)n_text;
        niah_add(t, question);
        cell->asked++;
        start = seconds();
        if (lossy && !compress_prompt(&t->compressor, &t->session, t->ids.ids, (int)t->ids.n, 1, &t->shown))
            die("%s", t->compressor.err);
        if (lossy) cell->seconds += (seconds() - start) / t->o->n_runs / t->o->n_needles;
        if (lossy) cell->kept += (double)t->shown.n / (double)t->ids.n / t->o->n_runs / t->o->n_needles;
        cell->right += lossy ? ask_needle(t, &x[i], t->shown.ids, (int)t->shown.n)
                             : ask_needle(t, &x[i], t->ids.ids + n_text, (int)t->ids.n - n_text);
    }
}

// ==== [3] Tables, heat map ===========================================================================================

static double niah_share(const NiahCell *c) { return c->asked ? 100.0 * c->right / c->asked : 0; }

// What was measured, in words.
static void niah_setting(const Niah *t, char *text, size_t room) {
    const ModelOptions *o = &t->m->options;
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

static void print_niah(const Niah *t) {
    const NiahOptions *o = t->o;
    const bool sparse = t->m->s.block_count != NULL, lossy = t->compressor.ratio > 0;
    char setting[400];
    NiahCell all = { 0 };
    niah_setting(t, setting, sizeof setting);
    if (o->csv) printf("length,depth,needles,asked,right,prompt_seconds,pflash_density,kept\n");
    else printf("%s: percent of needles found\n\n| tokens |", setting);
    for (int d = 0; d < o->depths.count && !o->csv; d++) printf(" %d %% |", o->depths.n[d]);
    if (!o->csv)
        printf(" all | %s |%s%s\n| ---: |", lossy ? "scoring s" : "prompt s", sparse ? " blocks |" : "",
               lossy ? " kept |" : "");
    for (int d = 0; d < o->depths.count && !o->csv; d++) printf(" ---: |");
    if (!o->csv) printf(" ---: | ---: |%s%s\n", sparse ? " ---: |" : "", lossy ? " ---: |" : "");
    for (int l = 0; l < o->lengths.count; l++) {
        NiahCell row = { 0 };
        if (!o->csv) printf("| %d |", o->lengths.n[l]);
        for (int d = 0; d < o->depths.count; d++) {
            const NiahCell *c = &t->cells[l][d];
            if (o->csv)
                printf("%d,%d,%d,%d,%d,%.4f,%.6f,%.6f\n", o->lengths.n[l], o->depths.n[d], o->n_needles, c->asked,
                       c->right, c->seconds, c->density, lossy ? c->kept : 1);
            else printf(" %.0f |", niah_share(c));
            row.asked += c->asked, row.right += c->right;
            row.seconds += c->seconds / o->depths.count, row.density += c->density / o->depths.count;
            row.kept += c->kept / o->depths.count;
        }
        all.asked += row.asked, all.right += row.right;
        if (!o->csv) printf(" %.1f | %.2f |", niah_share(&row), row.seconds);
        if (!o->csv && sparse && row.density > 0) printf(" %.1f %% |", 100 * row.density);
        else if (!o->csv && sparse) printf(" dense |");
        if (!o->csv && lossy) printf(" %.1f %% |", 100 * row.kept);
        if (!o->csv) printf("\n");
    }
    if (!o->csv) printf("\n%d of %d needles found, %.1f %%.\n", all.right, all.asked, niah_share(&all));
    flush_output();
}

static void print_xml(FILE *f, const char *s) {
    for (; *s; s++) {
        if (*s == '&' || *s == '<') fputs(*s == '&' ? "&amp;" : "&lt;", f);
        else fputc(*s, f);
    }
}

// The table as an image: a row a length, a column a depth, from red (none found) over yellow to green (all).
static void write_heat_map(const Niah *t) {
    enum { W = 64, H = 34, LEFT = 84, TOP = 64 };
    const NiahOptions *o = t->o;
    const int width = LEFT + W * o->depths.count + 20, height = TOP + H * o->lengths.count + 24;
    char setting[400];
    FILE *f = t->svg;
    niah_setting(t, setting, sizeof setting);
    fprintf(f, "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" font-family=\"sans-serif\" "
            "font-size=\"12\">\n<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n"
            "<text x=\"10\" y=\"20\" font-size=\"11\">",
            max_int(max_int(width, 450), 20 + 6 * (int)strlen(setting)), height);
    print_xml(f, setting);
    fprintf(f, "</text>\n<text x=\"10\" y=\"38\">percent of needles found; columns: depth of the %sneedle in the text</text>\n"
            "<text x=\"10\" y=\"%d\">tokens</text>\n", o->n_needles > 1 ? "first " : "", TOP - 6);
    for (int d = 0; d < o->depths.count; d++)
        fprintf(f, "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">%d %%</text>\n", LEFT + W * d + W / 2, TOP - 6,
                o->depths.n[d]);
    for (int l = 0; l < o->lengths.count; l++) {
        const int y = TOP + H * l;
        fprintf(f, "<text x=\"%d\" y=\"%d\" text-anchor=\"end\">%d</text>\n", LEFT - 8, y + H / 2 + 4, o->lengths.n[l]);
        for (int d = 0; d < o->depths.count; d++) {
            const double share = niah_share(&t->cells[l][d]);
            fprintf(f, "<rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" fill=\"hsl(%.0f,65%%,68%%)\"/>\n"
                    "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">%.0f</text>\n", LEFT + W * d + 1, y + 1, W - 2, H - 2,
                    1.2 * share, LEFT + W * d + W / 2, y + H / 2 + 4, share);
        }
    }
    fprintf(f, "</svg>\n");
    if (ferror(f) || fclose(f)) die("--svg: %s: %s", o->svg, strerror(errno));
}

static void verb_niah(const char *model, const Ops *ops, ModelOptions o, const NiahOptions *options) {
    Niah *t = alloc_or_die(1, sizeof *t);
    t->o = options;
    t->m = alloc_or_die(1, sizeof *t->m);
    int longest = 0, done = 0;
    for (int i = 0; i < options->lengths.count; i++) {
        if (options->lengths.n[i] < 256) die("-p: expected prompts of at least 256 tokens, got %d", options->lengths.n[i]);
        longest = max_int(longest, options->lengths.n[i]);
    }
    if (longest > MAX_CONTEXT - ANSWER_TOKENS - QUESTION_ROOM)
        die("-p: expected prompts of at most %d tokens, got %d", MAX_CONTEXT - ANSWER_TOKENS - QUESTION_ROOM, longest);
    for (int i = 0; i < options->depths.count; i++)
        if (options->depths.n[i] > 100) die("-d: expected depths from 0 to 100 percent, got %d", options->depths.n[i]);
    t->svg = options->svg ? fopen(options->svg, "w") : NULL;           // better known before the answers than behind them
    if (options->svg && !t->svg) die("--svg: %s: %s", options->svg, strerror(errno));
    o.n_ctx = longest + ANSWER_TOKENS + QUESTION_ROOM;
    o.ctx_from = "-p";
    load_model(t->m, model, ops, o, NULL);
    load_tokenizer(&t->tok, &t->m->gguf, t->m->config.vocab);
    print_plan(t->m);
    read_weights(t->m, false);
    session_open(&t->session, t->m, &t->tok, 0);
    t->compressor = options->compressor;
    if (t->compressor.file) check_scorer(t->compressor.file, &t->m->gguf);
    t->rings = alloc_or_die(copy_rings(t->m, 0, NULL, COPY_OUT), 1);
    t->logits = alloc_or_die((size_t)t->m->config.vocab, sizeof *t->logits);
    const int total = options->lengths.count * options->depths.count * options->n_runs;
    progress("niah", 0, (size_t)total, "texts");
    for (int l = 0; l < options->lengths.count; l++)
        for (int d = 0; d < options->depths.count; d++)
            for (int run = 0; run < options->n_runs; run++) {
                niah_run(t, options->lengths.n[l], options->depths.n[d], (uint64_t)(1 + run + 1000 * d), &t->cells[l][d]);
                progress("niah", (size_t)++done, (size_t)total, "texts");
            }
    print_niah(t);
    if (t->svg) write_heat_map(t);
    tok_ids_free(&t->ids);
    tok_ids_free(&t->shown);
    session_close(&t->session);
    close_scorer(&t->compressor);
    tok_free(&t->tok);
    free_model(t->m);
    free(t->m);
    free(t->rings);
    free(t->logits);
    free(t);
}

#endif
