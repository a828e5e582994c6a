/* plot.h - draws tables of measurements: verb_plot() reads CSV, as sweep and niah write it, and makes an SVG picture.
 *
 * Uses base.h. Begin with charts[] and verb_plot().
 *
 * A picture is 600 pixels wide. The legend is below the data. Curves differ in colour (Okabe and Ito's, which people
 * with any colour vision tell apart), in the shape of their points and in their dashes; heat maps go from dark blue to
 * yellow (cividis) and have numbers.
 *   [1] Tables    [2] Charts    [3] Curves and their names    [4] Axes    [5] Drawing    [6] Heat map
 *   [7] The verb */
#ifndef PLOT_H
#define PLOT_H

// ==== [1] Tables =====================================================================================================
// CSV as sweep, bench, niah and spreadsheets write it: the first line names the columns, cells are separated by commas,
// a cell in double quotes may contain commas, line breaks, and quotes written twice. Lines that begin with # are
// comments. An empty cell is a value that is not known.

typedef struct {
    const char  *path;
    char        *text;        // of the file; the cells are in it
    const char **cells;       // (1 + n_rows, n_cols); the first row has the names
    int          n_cols, n_rows;
    bool         ends;        // the last line ends with a line break
} Table;

static const char *table_cell(const Table *t, int row, int col) {      // row -1: the names
    return t->cells[(size_t)(row + 1) * (size_t)t->n_cols + (size_t)col];
}

static int table_column(const Table *t, const char *name) {            // -1: there is none
    for (int c = 0; c < t->n_cols; c++)
        if (!strcmp(table_cell(t, -1, c), name)) return c;
    return -1;
}

// The number in a cell; NAN: it is empty, or the column is -1. Dies if it is something else.
static double table_number(const Table *t, int row, int col) {
    char *end;
    if (col < 0 || !*table_cell(t, row, col)) return NAN;
    const double v = strtod(table_cell(t, row, col), &end);
    if (*end || !isfinite(v))
        die("%s: row %d: %s: expected a number, got '%.40s'", t->path, row + 1, table_cell(t, -1, col),
            table_cell(t, row, col));
    return v;
}

// Ends the cell that begins at `at` with a zero byte, in place, without its quotes. *next: the byte that followed the
// cell, a comma or a line break; 0: the text ended. Returns where that byte is; NULL: a quote has no end.
static char *end_cell(char *at, char **cell, char *next) {
    char *out = *cell = at;
    if (*at == '"') {
        for (at++; *at && (*at != '"' || at[1] == '"'); at++) {
            at += *at == '"';
            *out++ = *at;
        }
        if (!*at++) return NULL;
    } else {
        while (*at && !strchr(",\r\n", *at)) *out++ = *at++;
    }
    if (*at == '\r' && at[1] == '\n') at++;
    *next = *at;
    *out = 0;
    return at;
}

// Finds the cells of t->text. Dies if it is no table; t->path: its name for errors.
static void split_table(Table *t) {
    size_t room = 0, n = 0;
    char next = '\n';
    for (char *at = t->text; *at; ) {
        if (*at == '#' || *at == '\n' || *at == '\r') {                // a comment, an empty line
            at += strcspn(at, "\n");
            at += *at == '\n';
            continue;
        }
        int n_cells = 0;
        for (bool more = true; more; n_cells++) {
            if (n == room) t->cells = realloc(t->cells, (room = 2 * room + 256) * sizeof *t->cells);
            if (!t->cells) die("%s: out of memory", t->path);
            char *cell;
            at = end_cell(at, &cell, &next);
            if (!at || (next && next != ',' && next != '\n'))
                die("%s: row %d: expected cells separated by commas; a quote is missing", t->path, t->n_rows);
            t->cells[n++] = cell;
            more = next == ',';
            at += next != 0;
        }
        if (!t->n_cols) t->n_cols = n_cells;
        else t->n_rows++;
        if (n_cells != t->n_cols)
            die("%s: row %d: expected %d cells, as the first line has, got %d", t->path, t->n_rows, t->n_cols, n_cells);
    }
}

// Reads a file of comma-separated values; flag: for errors. The caller calls free_table(). Dies if it is no table.
static Table read_table(const char *path, const char *flag) {
    size_t n;
    Table t = { .path = path, .text = read_text(path, &n, flag) };
    t.ends = n && t.text[n - 1] == '\n';
    if (strlen(t.text) != n) die("%s: expected a table of comma-separated values, got a zero byte", path);
    split_table(&t);
    if (!t.n_cols) die("%s: expected a table of comma-separated values, got an empty file", path);
    return t;
}

static void free_table(Table *t) {
    free(t->text);
    free(t->cells);
}

// ==== [2] Charts =====================================================================================================

typedef struct {
    const char *kind, *title, *x_title, *y_title;
    const char *x, *y;        // columns; rows in which one of them is empty are left out
    double y_factor;          // from the column to the picture
    bool   log_x, joined;     // joined: the points of a curve are; else each is a choice, and the best ones are joined
    const char *merged;       // columns, separated by spaces, that do not separate curves
} Chart;

#define CONTEXT_AXIS "context, tokens (log scale)"
#define DRAFT_AXIS "draft tokens per step at most (log scale)"
static const Chart charts[] = {                        // without --kind the first that has two places on the x axis
    { "heat", "Needles found, percent", "depth of the needle in the text, percent", "tokens of the text",
      "depth", "right", 1, false, false, "" },
    { "speed", "Generation speed by context", CONTEXT_AXIS, "generated tokens per second", "ctx", "decode_tps", 1,
      true, true, "ctx" },
    { "acceptance", "Accepted drafts by draft length", DRAFT_AXIS, "accepted of the drafted tokens, percent", "dm",
      "accept_rate", 100, true, true, "dm" },
    { "drafts", "Generation speed by draft length", DRAFT_AXIS, "generated tokens per second", "dm", "decode_tps", 1,
      true, true, "dm" },
    { "pareto", "Speed and energy; dashed: the best choices", "generated tokens per second",
      "joules per generated token", "decode_tps", "decode_j_per_tok", 1, false, false, "dm ctx" },
    { "energy", "Energy by context", CONTEXT_AXIS, "joules per generated token", "ctx", "decode_j_per_tok", 1, true,
      true, "ctx" },
    { "prompt", "Prompt speed by context", CONTEXT_AXIS, "prompt tokens per second", "ctx", "prefill_tps", 1, true,
      true, "ctx" },
    { "memory", "Device memory by context", CONTEXT_AXIS, "device memory, GiB", "ctx", "vram_peak_gb", 1, true, true,
      "ctx" } };
enum { N_CHARTS = sizeof charts / sizeof *charts, PLOT_ROWS = 10000, MOST_PLACES = 64 };
#define MOST_NUMBER 1e12
#define CHART_KINDS "heat|speed|acceptance|drafts|pareto|energy|prompt|memory"

typedef struct { double x, y; int row, curve; } PlotPoint;

typedef struct {
    const Table *t;
    const Chart *chart;
    PlotPoint   *points;      // (n) by curve, then by x
    int          n, n_curves;
    bool         any_force;   // rows of different forced acceptance are one curve
    char       **names;       // (n_curves) of the curves
    char         common[256]; // what all rows have in common
    FILE        *f;           // the picture
} Plot;

// Finds the points of a chart, in the order of the rows. Returns their number.
static int find_points(const Table *t, const Chart *chart, PlotPoint *points) {
    const int x = table_column(t, chart->x), y = table_column(t, chart->y);
    int n = 0;
    for (int row = 0; row < t->n_rows && x >= 0 && y >= 0; row++) {
        const PlotPoint p = { table_number(t, row, x), chart->y_factor * table_number(t, row, y), row, 0 };
        if (isnan(p.x) || isnan(p.y)) continue;
        if (!(p.x >= 0 && p.x <= MOST_NUMBER && p.y >= 0 && p.y <= MOST_NUMBER))
            die("%s: row %d: expected numbers from 0 to %g, got %g and %g", t->path, row + 1, MOST_NUMBER, p.x, p.y);
        points[n++] = p;
    }
    return n;
}

// The chart of this kind; kind NULL: the first that the table has two places for. Dies if the table has none.
static const Chart *choose_chart(const Table *t, const char *kind) {
    PlotPoint *points = alloc_or_die(t->n_rows, sizeof *points);
    const Chart *found = NULL;
    for (int k = 0; k < N_CHARTS && !found; k++) {
        const int n = find_points(t, &charts[k], points);
        bool two = k == 0 && n;                        // a heat map may have one column
        for (int i = 1; i < n; i++) two |= points[i].x < points[0].x || points[i].x > points[0].x;
        if (kind ? !strcmp(kind, charts[k].kind) : two) found = &charts[k];
        if (found && !n)
            die("%s: --kind %s: expected rows with numbers in the columns %s and %s, got none", t->path, kind, found->x,
                found->y);
    }
    free(points);
    if (!found)
        die("%s: expected a table of gemma4 sweep, with two contexts or draft lengths, or one of gemma4 niah -o csv; "
            "try --kind " CHART_KINDS, t->path);
    return found;
}

// ==== [3] Curves and their names =====================================================================================
// Two rows belong to one curve if the same words describe them. A curve is named by those of its words that not all
// rows have, "default" if it has none; the others are printed once, below the title.

enum { MOST_WORDS = 24, WORD_ROOM = 96, MOST_CURVES = 28 };

typedef struct { char word[MOST_WORDS][WORD_ROOM]; int n; } PlotWords;

static bool has_plot_word(const PlotWords *w, const char *word) {
    for (int i = 0; i < w->n; i++) if (!strcmp(w->word[i], word)) return true;
    return false;
}

// Adds the words of a cell, which are separated by spaces if `many`, without the end .gguf and after the text `before`.
static void add_plot_words(PlotWords *w, const char *before, const char *cell, bool many) {
    for (size_t n; *cell && w->n < MOST_WORDS; cell += n + (cell[n] == ' ')) {
        n = many ? strcspn(cell, " ") : strlen(cell);
        const size_t shown = n > 5 && !memcmp(cell + n - 5, ".gguf", 5) ? n - 5 : n;
        snprintf(w->word[w->n++], WORD_ROOM, "%s%.*s", before, (int)shown, cell);
    }
}

static bool is_merged(const Plot *p, const char *name, int col) {      // the column varies along a curve
    bool varies = false;
    for (int i = 1; i < p->n && !varies; i++)
        varies = strcmp(table_cell(p->t, p->points[i].row, col), table_cell(p->t, p->points[0].row, col));
    return varies && strstr(p->chart->merged, name);
}

static void drop_word(PlotWords *w, int k) {
    memmove(w->word[k], w->word[k + 1], (size_t)(--w->n - k) * WORD_ROOM);
}

// The words that describe a row of a sweep: "q8_0", "draft 4", "tree=16".
static void row_words(const Plot *p, int row, PlotWords *w) {
    static const struct { const char *column, *before; } columns[] = {
        { "arch", "" }, { "draft", "" }, { "dm", "draft " }, { "kv_k", "cache " }, { "kv_v", "V " }, { "config", "" },
        { "ctx", "context " } };
    w->n = 0;
    for (size_t k = 0; k < sizeof columns / sizeof *columns; k++) {
        const char *name = columns[k].column;
        const int col = table_column(p->t, name), k_col = table_column(p->t, "kv_k");
        if (col < 0 || is_merged(p, name, col)) continue;
        const char *cell = table_cell(p->t, row, col);
        if (!strcmp(name, "kv_v") && k_col >= 0 && !strcmp(cell, table_cell(p->t, row, k_col))) continue;
        if (!strcmp(name, "draft") && !strcmp(cell, "none")) cell = "no draft model";
        add_plot_words(w, columns[k].before, cell, !strcmp(name, "config"));
    }
    for (int k = w->n - 1; k >= 0; k--) if (p->any_force && !strncmp(w->word[k], "force=", 6)) drop_word(w, k);
}

static void append_word(char *text, size_t room, const char *word) {
    const size_t n = strlen(text);
    snprintf(text + n, room - n, "%s%s", n ? ", " : "", word);
}

static int compare_points(const void *a, const void *b) {
    const PlotPoint *p = a, *q = b;
    return p->curve != q->curve ? p->curve - q->curve : (p->x > q->x) - (p->x < q->x);
}

// Whether the rows are those of one curve, each with an acceptance of its own.
static bool has_lone_forces(Plot *p) {
    PlotWords first, words;
    p->any_force = true;
    row_words(p, p->points[0].row, &first);
    for (int i = 1; i < p->n; i++) {
        bool same = true;
        row_words(p, p->points[i].row, &words);
        for (int k = 0; k < words.n; k++) same = same && has_plot_word(&first, words.word[k]);
        for (int j = 0; j < i; j++) same = same && fabs(p->points[i].x - p->points[j].x) > 0;
        if (!same || words.n != first.n) return false;
    }
    return true;
}

// Assigns the points to curves, names these, and sorts the points. Dies if there are too many.
static void name_curves(Plot *p) {
    PlotWords common, words;
    p->names = alloc_or_die(MOST_CURVES, sizeof *p->names);
    p->any_force = p->chart->joined && has_lone_forces(p);
    row_words(p, p->points[0].row, &common);
    for (int i = 1; i < p->n; i++) {
        row_words(p, p->points[i].row, &words);
        for (int k = common.n - 1; k >= 0; k--)
            if (!has_plot_word(&words, common.word[k])) drop_word(&common, k);
    }
    for (int k = 0; k < common.n; k++) append_word(p->common, sizeof p->common, common.word[k]);
    for (int i = 0; i < p->n; i++) {
        char name[256] = "";
        int c = 0;
        row_words(p, p->points[i].row, &words);
        for (int k = 0; k < words.n; k++)
            if (!has_plot_word(&common, words.word[k])) append_word(name, sizeof name, words.word[k]);
        if (!*name) append_word(name, sizeof name, "default");
        while (c < p->n_curves && strcmp(p->names[c], name)) c++;
        p->points[i].curve = c;
        if (c < p->n_curves) continue;
        if (c == MOST_CURVES)
            die("%s: --kind %s: expected at most %d curves; leave rows out, for example with grep", p->t->path,
                p->chart->kind, MOST_CURVES);
        p->names[p->n_curves] = alloc_or_die(strlen(name) + 1, 1);
        strcpy(p->names[p->n_curves++], name);
    }
    qsort(p->points, (size_t)p->n, sizeof *p->points, compare_points);
}

// ==== [4] Axes =======================================================================================================

enum { PIC_WIDTH = 600,       // pixels of the picture
       PIC_LEFT = 64, PIC_RIGHT = 20, PIC_TOP = 66, PIC_HEIGHT = 280,  // around the data; of the data
       PIC_BELOW = 48,        // of the x axis with its texts
       PIC_LETTER = 7 };

typedef struct {
    bool   log;               // logarithmic
    double low, high;         // at the ends, in units of place_on()
    double least;             // log: the smallest positive value; 0 is apart, as far before it as the half of it
    bool   has_zero;
} Axis;

static double place_on(const Axis *a, double v) {      // before it is scaled to pixels
    return !a->log ? v : v > 0 ? log2(v) : log2(a->least) - 1;
}

static double x_pixel(const Axis *a, double v) {
    return PIC_LEFT + (place_on(a, v) - a->low) / (a->high - a->low) * (PIC_WIDTH - PIC_LEFT - PIC_RIGHT);
}

static double y_pixel(const Axis *a, double v) {
    return PIC_TOP + PIC_HEIGHT - (place_on(a, v) - a->low) / (a->high - a->low) * PIC_HEIGHT;
}

// The distance of marks on a linear axis up to `most`: 1, 2 or 5 times a power of ten; at most seven of them.
static double mark_step(double most) {
    double step = pow(10, floor(log10(most)) - 1);
    for (int k = 0; most / step > 7; k++) step *= k % 3 == 1 ? 2.5 : 2;
    return step;
}

// Axes for all points; linear ones begin at 0.
static void fit_axes(const Plot *p, Axis *x, Axis *y) {
    *x = (Axis){ .log = p->chart->log_x, .least = INFINITY, .low = INFINITY, .high = -INFINITY };
    *y = (Axis){ 0 };
    for (int i = 0; i < p->n; i++) {
        x->has_zero |= p->points[i].x <= 0;
        if (p->points[i].x > 0) x->least = fmin(x->least, p->points[i].x);
        y->high = fmax(y->high, p->points[i].y);
    }
    if (isinf(x->least)) x->least = 1;
    for (int i = 0; i < p->n; i++) {
        x->low = fmin(x->low, place_on(x, p->points[i].x));
        x->high = fmax(x->high, place_on(x, p->points[i].x));
    }
    if (x->log) {
        const double room = fmax(0.04 * (x->high - x->low), x->high > x->low ? 0 : 1);
        x->low -= room, x->high += room;
    } else {
        x->low = 0;
        x->high *= 1.06;
    }
    if (!x->log && x->high < 1e-9) x->high = 1;
    if (y->high < 1e-9) y->high = 1;
    y->high = ceil(y->high * 1.04 / mark_step(y->high)) * mark_step(y->high);
    if (!strcmp(p->chart->y, "accept_rate")) y->high = fmin(y->high, 100);
}

// A number as axes show it: 0.25, 40, 1500; binary: of tokens, 64K, 1M.
static const char *axis_text(char out[24], double v, bool binary) {
    if (binary && v >= 0.99 * (1 << 20)) snprintf(out, 24, "%.3gM", v / (1 << 20));
    else if (binary && v >= 1 << 10) snprintf(out, 24, "%.3gK", v / (1 << 10));
    else snprintf(out, 24, "%.6g", v);
    return out;
}

// ==== [5] Drawing ====================================================================================================

static void put_xml(FILE *f, const char *s) {
    for (; *s; s++)
        if (strchr("&<>\"", *s)) fprintf(f, "&#%d;", *s);
        else fputc((unsigned char)*s < ' ' ? ' ' : *s, f);
}

// Writes a text; anchor: which of its points is at x, "start", "middle" or "end". It has at most `most` letters.
static void svg_text(FILE *f, double x, double y, int size, const char *anchor, const char *text, size_t most) {
    char cut[256];
    const bool whole = strlen(text) <= most;
    snprintf(cut, sizeof cut, "%.*s%s", (int)(whole ? most : most - 2), text, whole ? "" : "..");
    fprintf(f, "<text x=\"%.1f\" y=\"%.1f\" font-size=\"%d\" text-anchor=\"%s\">", x, y, size, anchor);
    put_xml(f, cut);
    fprintf(f, "</text>\n");
}

// Begins a picture with a title and, in small letters on up to two lines, what else there is to say.
static void begin_picture(FILE *f, int height, const char *title, const char *more) {
    enum { MORE_LETTERS = 100 };
    size_t first = strlen(more);
    if (first > MORE_LETTERS) for (first = MORE_LETTERS; first && more[first] != ' '; ) first--;
    char line[MORE_LETTERS + 1];
    snprintf(line, sizeof line, "%.*s", (int)first, more);
    fprintf(f, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%d\" height=\"%d\" "
               "font-family=\"Helvetica, Arial, sans-serif\" fill=\"#222\">\n"
               "<rect width=\"%d\" height=\"%d\" fill=\"white\"/>\n", PIC_WIDTH, height, PIC_WIDTH, height, PIC_WIDTH,
            height);
    svg_text(f, 12, 22, 16, "start", title, 60);
    svg_text(f, 12, 39, 11, "start", line, MORE_LETTERS);
    if (more[first]) svg_text(f, 12, 52, 11, "start", more + first, MORE_LETTERS);
}

static void put_y_title(FILE *f, double middle, const char *title) {
    fprintf(f, "<text transform=\"translate(15 %.1f) rotate(-90)\" font-size=\"12\" text-anchor=\"middle\">", middle);
    put_xml(f, title);
    fprintf(f, "</text>\n");
}

static void put_line(FILE *f, double x, double y, double to_x, double to_y, const char *color) {
    fprintf(f, "<path d=\"M%.1f %.1fL%.1f %.1f\" stroke=\"%s\"/>\n", x, y, to_x, to_y, color);
}

// Writes a mark of the x axis, unless its text would touch that of the last one, whose end is *end.
static void put_x_mark(FILE *f, const Axis *x, double v, double *end) {
    char text[24];
    const double at = x_pixel(x, v), half = PIC_LETTER * (double)strlen(axis_text(text, v, x->log)) / 2;
    if (at - half < *end + PIC_LETTER) return;
    put_line(f, at, PIC_TOP, at, PIC_TOP + PIC_HEIGHT + 4, "#e4e4e4");
    svg_text(f, at, PIC_TOP + PIC_HEIGHT + 18, 12, "middle", text, 20);
    *end = at + half;
}

// Draws the marks of both axes and their titles.
static void draw_axes(const Plot *p, const Axis *x, const Axis *y) {
    FILE *f = p->f;
    const double step = mark_step(y->high), x_step = x->log ? 0 : mark_step(x->high);
    double end = 0;
    char text[24], title[96];
    for (double v = 0; v <= y->high * 1.0001; v += step) {
        put_line(f, PIC_LEFT - 4, y_pixel(y, v), PIC_WIDTH - PIC_RIGHT, y_pixel(y, v), "#e4e4e4");
        svg_text(f, PIC_LEFT - 8, y_pixel(y, v) + 4, 12, "end", axis_text(text, v, false), 20);
    }
    for (double v = 0; !x->log && v <= x->high * 1.0001; v += x_step) put_x_mark(f, x, v, &end);
    for (double next = x->log ? -1 : INFINITY, v = -1; isfinite(next); v = next) {     // where points are, ascending
        if (v >= 0) put_x_mark(f, x, v, &end);
        next = INFINITY;
        for (int i = 0; i < p->n; i++) if (p->points[i].x > v) next = fmin(next, p->points[i].x);
    }
    put_line(f, PIC_LEFT, PIC_TOP, PIC_LEFT, PIC_TOP + PIC_HEIGHT, "#666");
    put_line(f, PIC_LEFT, PIC_TOP + PIC_HEIGHT, PIC_WIDTH - PIC_RIGHT, PIC_TOP + PIC_HEIGHT, "#666");
    snprintf(title, sizeof title, "%s%s", p->chart->x_title, x->log && x->has_zero ? "; 0 stands apart" : "");
    svg_text(f, (PIC_LEFT + PIC_WIDTH - PIC_RIGHT) / 2.0, PIC_TOP + PIC_HEIGHT + 38, 12, "middle", title, 80);
    put_y_title(f, PIC_TOP + PIC_HEIGHT / 2.0, p->chart->y_title);
}

static const char *const curve_colors[] = { "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9",
                                            "#000000" };
enum { N_COLORS = sizeof curve_colors / sizeof *curve_colors };

static const char *curve_color(int curve) { return curve_colors[curve % N_COLORS]; }

static void put_shape(FILE *f, int curve, double x, double y) {        // a point of a curve
    static const char *const shapes[] = { "m-4 -4h8v8h-8z", "m0 -5.5l5 9h-10z", "m0 -5.5l5.5 5.5l-5.5 5.5l-5.5 -5.5z",
                                          "m0 5.5l5 -9h-10z" };
    const char *color = curve_color(curve);
    if (curve % 5 == 0) fprintf(f, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"4.2\" fill=\"%s\"/>\n", x, y, color);
    else fprintf(f, "<path d=\"M%.1f %.1f%s\" fill=\"%s\"/>\n", x, y, shapes[curve % 5 - 1], color);
}

static void begin_path(FILE *f, int curve) {
    static const char *const dashes[] = { "none", "7 4", "2 4" };
    fprintf(f, "<path fill=\"none\" stroke=\"%s\" stroke-width=\"2\" stroke-dasharray=\"%s\" d=\"", curve_color(curve),
            dashes[curve / N_COLORS % 3]);
}

// Joins the points that no other one beats in both ways, more tokens per second for fewer joules.
static void draw_frontier(const Plot *p, const Axis *x, const Axis *y) {
    double from = -1;
    char command = 'M';
    fprintf(p->f, "<path fill=\"none\" stroke=\"#888\" stroke-dasharray=\"4 3\" d=\"");
    for (bool more = true; more; command = 'L') {      // the next one to the right with the least energy of all there
        const PlotPoint *best = NULL;
        for (int i = 0; i < p->n; i++) {
            const PlotPoint *q = &p->points[i];
            if (q->x > from && (!best || q->y < best->y || (q->y <= best->y && q->x > best->x))) best = q;
        }
        more = best != NULL;
        if (more) fprintf(p->f, "%c%.1f %.1f", command, x_pixel(x, best->x), y_pixel(y, best->y)), from = best->x;
    }
    fprintf(p->f, "\"/>\n");
}

static void draw_curves(const Plot *p, const Axis *x, const Axis *y) {
    for (int i = 0; i < p->n && p->chart->joined; i++) {
        const bool first = !i || p->points[i - 1].curve != p->points[i].curve;
        const bool last = i + 1 == p->n || p->points[i + 1].curve != p->points[i].curve;
        if (first) begin_path(p->f, p->points[i].curve);
        fprintf(p->f, "%c%.1f %.1f", first ? 'M' : 'L', x_pixel(x, p->points[i].x), y_pixel(y, p->points[i].y));
        if (last) fprintf(p->f, "\"/>\n");
    }
    if (!p->chart->joined) draw_frontier(p, x, y);
    for (int i = 0; i < p->n; i++)
        put_shape(p->f, p->points[i].curve, x_pixel(x, p->points[i].x), y_pixel(y, p->points[i].y));
}

enum { LEGEND_LINE = 20 };

// The columns of the legend: as many as the longest name leaves room for.
static int legend_columns(const Plot *p) {
    size_t longest = 1;
    for (int c = 0; c < p->n_curves; c++) if (strlen(p->names[c]) > longest) longest = strlen(p->names[c]);
    return max_int(1, min_int(3, (PIC_WIDTH - 24) / (36 + PIC_LETTER * (int)longest)));
}

static void draw_legend(const Plot *p, int top) {
    const int columns = legend_columns(p), width = (PIC_WIDTH - 24) / columns;
    for (int c = 0; c < p->n_curves && p->n_curves > 1; c++) {
        const int x = 12 + width * (c % columns), y = top + LEGEND_LINE * (c / columns);
        if (p->chart->joined) begin_path(p->f, c), fprintf(p->f, "M%d %dh24\"/>\n", x, y);
        put_shape(p->f, c, x + 12, y);
        svg_text(p->f, x + 32, y + 4, 12, "start", p->names[c], (size_t)((width - 36) / PIC_LETTER + 6));
    }
}

static void draw_chart(Plot *p) {
    Axis x, y;
    name_curves(p);
    fit_axes(p, &x, &y);
    const int legend = p->n_curves > 1 ? LEGEND_LINE * ((p->n_curves - 1) / legend_columns(p) + 1) : 0;
    begin_picture(p->f, PIC_TOP + PIC_HEIGHT + PIC_BELOW + legend + 8, p->chart->title, p->common);
    draw_axes(p, &x, &y);
    draw_curves(p, &x, &y);
    draw_legend(p, PIC_TOP + PIC_HEIGHT + PIC_BELOW + 12);
    for (int c = 0; c < p->n_curves; c++) free(p->names[c]);
    free(p->names);
}

// ==== [6] Heat map ===================================================================================================

// The color of a share from 0 to 1, of the scale cividis.
static void heat_color(double share, int rgb[3]) {
    static const int scale[][3] = { { 0, 32, 76 }, { 66, 78, 107 }, { 124, 123, 120 }, { 187, 173, 107 },
                                    { 255, 233, 69 } };
    const int k = min_int((int)(4 * share), 3);
    for (int i = 0; i < 3; i++) rgb[i] = (int)(scale[k][i] + (scale[k + 1][i] - scale[k][i]) * (4 * share - k));
}

static void put_heat_cell(FILE *f, double x, double y, double width, double height, double share, const char *text) {
    int c[3];
    heat_color(share, c);
    fprintf(f, "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" fill=\"#%02x%02x%02x\"/>\n<g fill=\"%s\">",
            x, y, width - 2, height - 2, (unsigned)c[0], (unsigned)c[1], (unsigned)c[2],
            share < 0.55 ? "white" : "black");
    svg_text(f, x + (width - 2) / 2, y + height / 2 + 3, 12, "middle", text, 20);
    fprintf(f, "</g>\n");
}

// The different numbers of a column, ascending; returns how many. `list` has room for all rows.
static int list_numbers(const Table *t, const char *name, double *list) {
    int n = 0;
    for (double from = -INFINITY, next; ; from = next) {
        next = INFINITY;
        for (int row = 0; row < t->n_rows; row++) {
            const double v = table_number(t, row, table_column(t, name));
            if (v > from) next = fmin(next, v);
        }
        if (isinf(next)) return n;
        list[n++] = next;
    }
}

// The share of the needles that were found at a length and a depth; NAN: not measured.
static double heat_share(const Table *t, double length, double depth) {
    double asked = 0, right = 0;
    for (int row = 0; row < t->n_rows; row++) {
        const double l = table_number(t, row, table_column(t, "length"));
        const double d = table_number(t, row, table_column(t, "depth"));
        if (l < length || l > length || d < depth || d > depth) continue;
        asked += table_number(t, row, table_column(t, "asked"));
        right += table_number(t, row, table_column(t, "right"));
    }
    if (!(right >= 0 && right <= asked)) die("%s: expected 0 <= right <= asked, got %g and %g", t->path, right, asked);
    return asked > 0 ? right / asked : NAN;
}

// Draws a table of niah: a row for each length, a column for each depth. more: what else there is to say.
static void draw_heat_map(FILE *f, const Table *t, const char *more) {
    enum { HEAT_LEFT = 76, BAR = 36 };
    static const char *const names[] = { "length", "depth", "asked", "right" };
    for (int k = 0; k < 4; k++) if (table_column(t, names[k]) < 0) die("%s: expected a column '%s'", t->path, names[k]);
    double *lengths = alloc_or_die(t->n_rows, sizeof *lengths), *depths = alloc_or_die(t->n_rows, sizeof *depths);
    const int n = list_numbers(t, "length", lengths), m = list_numbers(t, "depth", depths);
    const int height = max_int(30, 120 / max_int(n, 1)), bottom = PIC_TOP + height * n;            // of a row
    const double width = (PIC_WIDTH - HEAT_LEFT - PIC_RIGHT) / (double)m;
    const int every = 1 + (int)(27 / width);           // of so many columns one is labelled
    if (n > MOST_PLACES || m > MOST_PLACES)
        die("%s: expected at most %d lengths and depths, got %d and %d", t->path, MOST_PLACES, n, m);
    char text[24];
    begin_picture(f, bottom + 92, charts->title, more);
    for (int i = 0; i < n; i++) {
        axis_text(text, lengths[i], true);
        svg_text(f, HEAT_LEFT - 8, PIC_TOP + height * i + height / 2 + 3, 12, "end", text, 20);
        for (int k = 0; k < m; k++) {
            const double share = heat_share(t, lengths[i], depths[k]);
            snprintf(text, sizeof text, "%.0f", 100 * share);
            if (every > 1) *text = 0;
            if (isfinite(share))
                put_heat_cell(f, HEAT_LEFT + width * k, PIC_TOP + height * i, width, height, share, text);
        }
    }
    for (int k = 0; k < m; k += every)
        svg_text(f, HEAT_LEFT + width * (k + 0.5), bottom + 16, 12, "middle", axis_text(text, depths[k], false), 20);
    svg_text(f, (HEAT_LEFT + PIC_WIDTH - PIC_RIGHT) / 2.0, bottom + 36, 12, "middle", charts->x_title, 80);
    put_y_title(f, PIC_TOP + height * n / 2.0, charts->y_title);
    svg_text(f, HEAT_LEFT, bottom + 70, 12, "start", "found:", 20);
    for (int k = 0; k <= 4; k++) {
        snprintf(text, sizeof text, "%d", 25 * k);
        put_heat_cell(f, HEAT_LEFT + 44 + BAR * k, bottom + 54, BAR, 24, k / 4.0, text);
    }
    free(lengths);
    free(depths);
}

// ==== [7] The verb ===================================================================================================

// gemma4 plot: draws a table of measurements. kind: one of charts[]; NULL: the first that the table has data for. out:
// file; NULL: standard output.
static void verb_plot(const char *path, const char *kind, const char *out) {
    Table t = read_table(path, "plot");
    if (t.n_rows > PLOT_ROWS) die("%s: expected at most %d rows, got %d", path, PLOT_ROWS, t.n_rows);
    Plot p = { .t = &t, .chart = choose_chart(&t, kind) };
    char *text = NULL;
    size_t n = 0;
    p.f = open_memstream(&text, &n);
    if (!p.f) die("out of memory for a picture");
    p.points = alloc_or_die(t.n_rows, sizeof *p.points);
    p.n = find_points(&t, p.chart, p.points);
    if (p.chart == charts) draw_heat_map(p.f, &t, base_name(path));
    else draw_chart(&p);
    fprintf(p.f, "</svg>\n");
    if (ferror(p.f) || fclose(p.f)) die("out of memory for a picture");
    if (out) write_output_file("-o", out, text, n, false);
    else fwrite(text, 1, n, stdout);
    flush_output();
    free(text);
    free(p.points);
    free_table(&t);
}

#endif
