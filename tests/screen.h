/* screen.h - what a terminal shows: a small emulator for tests of what programs draw.
 *
 * Call screen_open, feed it what a program writes with screen_put, and read it with screen_text. Rows that the terminal
 * has wrapped are joined again when its width changes (screen_resize), as most terminals do. It knows the few escape
 * sequences that are used here; any other makes `unknown` true. */
#ifndef SCREEN_H
#define SCREEN_H
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <wchar.h>

enum { SCREEN_COLUMNS = 256, SCREEN_ROWS = 2000 };

typedef struct { char s[48]; bool half, pad; } Cell;   // half: the second half of a wide character; pad: too narrow for one
typedef struct { Cell cells[SCREEN_COLUMNS]; bool wraps; } ScreenRow;

typedef struct {
    ScreenRow *row;            // (SCREEN_ROWS) all rows so far; the screen is the last `rows` of them
    int  n, columns, rows;
    int  r, c;                 // the cursor; c == columns: the next character goes to the next row
    bool joins;                // emoji joined by U+200D take two columns
    bool joined;               // the last character was U+200D
    bool marks_pastes;         // ESC[?2004h
    bool unknown;
    char sequence[32], character[8];
    int  n_sequence, n_character;
} Screen;

static inline void screen_open(Screen *s, int columns, int rows) {
    *s = (Screen){ .row = calloc(SCREEN_ROWS, sizeof(ScreenRow)), .n = 1, .columns = columns, .rows = rows };
    if (!s->row) exit(1);
}

static inline int screen_top(const Screen *s) { return s->n > s->rows ? s->n - s->rows : 0; }

static inline void screen_clear(Screen *s, int r, int c) {             // from there to the end of the row
    memset(&s->row[r].cells[c < s->columns ? c : s->columns - 1], 0,
           (size_t)(s->columns - (c < s->columns ? c : s->columns - 1)) * sizeof(Cell));
    s->row[r].wraps = false;
}

static inline void screen_feed_line(Screen *s) {
    if (++s->r < s->n) return;
    if (s->n == SCREEN_ROWS) exit(1);
    memset(&s->row[s->n++], 0, sizeof(ScreenRow));
}

// Finishes a sequence that began with ESC[.
static inline void screen_sequence(Screen *s) {
    const char end = s->sequence[s->n_sequence - 1];
    const int number = atoi(s->sequence + (s->sequence[0] == '?')), n = number ? number : 1;
    if (end == 'A') s->r = s->r - n > screen_top(s) ? s->r - n : screen_top(s);
    else if (end == 'K' && !number) screen_clear(s, s->r, s->c);
    else if (end == 'J' && !number) {
        screen_clear(s, s->r, s->c);
        s->n = s->r + 1;
    } else if (end == 'J' && number == 2) {
        for (int i = 0; i < s->rows; i++) s->r = s->n - 1, screen_feed_line(s);
        s->r = screen_top(s);
    } else if (end == 'H' && s->n_sequence == 1) s->r = screen_top(s), s->c = 0;
    else if (end == 'h' && number == 2004) s->marks_pastes = true;
    else if (end == 'l' && number == 2004) s->marks_pastes = false;
    else if (end != 'm') s->unknown = true;
    if (s->c >= s->columns) s->c = s->columns - 1;
}

static inline void screen_character(Screen *s, const char *text, int width) {
    const bool joins = s->joined && s->joins;
    s->joined = !strcmp(text, "\xe2\x80\x8d");
    if (!width || joins) {
        int c = s->c - 1;
        while (c > 0 && s->row[s->r].cells[c].half) c--;
        char *cell = c < 0 ? NULL : s->row[s->r].cells[c].s;
        if (cell && strlen(cell) + strlen(text) < sizeof s->row[0].cells[0].s) strcat(cell, text);
        return;
    }
    if (s->c + width > s->columns) {
        while (s->c < s->columns) s->row[s->r].cells[s->c++] = (Cell){ .pad = true };
        s->row[s->r].wraps = true;
        screen_feed_line(s);
        s->c = 0;
    }
    Cell *cell = &s->row[s->r].cells[s->c];
    *cell = (Cell){ .pad = false };
    strcpy(cell->s, text);
    if (width == 2) cell[1] = (Cell){ .half = true };
    s->c += width;
}

static inline void screen_put(Screen *s, const char *text, size_t n) {
    for (size_t i = 0; i < n; i++) {
        const unsigned char c = (unsigned char)text[i];
        if (s->n_sequence < 0) {                       // after ESC
            s->n_sequence = c == '[' ? 0 : -2;
            if (c != '[') s->unknown = true;
            s->sequence[0] = 'x';
            if (c == '[') s->sequence[31] = 1;         // inside a sequence
            else s->n_sequence = 0;
        } else if (s->sequence[31]) {
            if (s->n_sequence < 30) s->sequence[s->n_sequence++] = (char)c;
            if (c < '@' || c == '[') continue;
            s->sequence[s->n_sequence] = 0;
            screen_sequence(s);
            s->n_sequence = s->sequence[31] = 0;
        } else if (c == 0x1b) s->n_sequence = -1;
        else if (c == '\r') s->c = 0;
        else if (c == '\n') screen_feed_line(s);
        else if (c < ' ') s->unknown |= c != 7;
        else {
            mbstate_t state;
            wchar_t wide;
            if (c < 0x80 || c >= 0xc0) s->n_character = 0;
            if (s->n_character < 7) s->character[s->n_character++] = (char)c;
            s->character[s->n_character] = 0;
            memset(&state, 0, sizeof state);
            const size_t got = mbrtowc(&wide, s->character, (size_t)s->n_character, &state);
            if (got == (size_t)-1) s->unknown = true;
            if (got != (size_t)-2 && got != (size_t)-1) screen_character(s, s->character, wcwidth(wide));
        }
    }
}

// The text from row `from` up to row r, column c: wrapped rows are joined, rows end in "\n", cells without text are
// spaces. The caller frees it.
static inline char *screen_text(const Screen *s, int from, int r, int c) {
    char *text = calloc((size_t)(r - from + 1) * SCREEN_COLUMNS * 4 + 4096, 1);
    size_t n = 0;
    for (int i = from; i <= r; i++) {
        const size_t begin = n;
        for (int k = 0; k < (i < r ? s->columns : c); k++) {
            const Cell *cell = &s->row[i].cells[k];
            if (cell->half || cell->pad) continue;
            const char *t = cell->s[0] ? cell->s : " ";
            memcpy(text + n, t, strlen(t));
            n += strlen(t);
        }
        if (i < r && s->row[i].wraps) continue;
        while (i < r && n > begin && text[n - 1] == ' ') n--;
        if (i < r) text[n++] = '\n';
    }
    text[n] = 0;
    return text;
}

// Gives the screen another width, and wraps the rows again.
static inline void screen_resize(Screen *s, int columns) {
    Screen to = *s;
    screen_open(&to, columns, s->rows);
    to.joins = s->joins, to.marks_pastes = s->marks_pastes, to.unknown = s->unknown;
    int cursor_r = 0, cursor_c = 0;
    for (int r = 0; r < s->n; r++) {
        int used = s->columns;
        while (!s->row[r].wraps && used && !s->row[r].cells[used - 1].s[0] && !s->row[r].cells[used - 1].half) used--;
        if (r == s->r && used < s->c) used = s->c;
        for (int c = 0; c <= used; c++) {
            if (r == s->r && c == s->c) cursor_r = to.r, cursor_c = to.c;
            if (c == used) break;
            const Cell *cell = &s->row[r].cells[c];
            if (cell->half || cell->pad) continue;
            to.joined = false;
            screen_character(&to, cell->s[0] ? cell->s : " ", c + 1 < s->columns && cell[1].half ? 2 : 1);
            if (r == s->r && c == s->c) cursor_r = to.r, cursor_c = to.c - 1 - (cell[1].half && c + 1 < s->columns);
        }
        if (!s->row[r].wraps && r + 1 < s->n) screen_feed_line(&to), to.c = 0;
    }
    to.r = cursor_r, to.c = cursor_c;
    free(s->row);
    *s = to;
}
#endif
