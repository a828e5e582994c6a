/* plot.h - reads tables of measurements (CSV) and draws them (SVG).
 *
 * Uses base.h. Begin with read_table().
 *   [1] Tables */
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

// Finds the cells of t->text. Dies if it is no table.
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

#endif
