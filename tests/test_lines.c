/* test_lines.c - the line editor draws what was typed, in every script and every width.
 *
 * Keys go to the editor of parts/lines.h; what it draws goes through a pseudoterminal to the emulator of screen.h. After
 * every key the screen must show the prompt and the text once, with the cursor where it belongs, and nothing else below
 * the line before. The text is known from a model: a list of what the user sees as characters.
 *
 *   build/test_lines [SEED]      a failure names its seed */
#define _GNU_SOURCE
#include "../parts/base.h"

typedef struct { char *s; size_t n, cap; } TokText;    // as in tokenizer.h
static volatile sig_atomic_t interrupted;

static bool tok_text_append(TokText *v, const char *s, size_t n) {
    if (v->n + n > v->cap) {
        char *more = realloc(v->s, v->cap = 2 * (v->n + n));
        if (!more) return false;
        v->s = more;
    }
    if (n) memcpy(v->s + v->n, s, n);
    v->n += n;
    return true;
}

static void tok_text_free(TokText *v) {
    free(v->s);
    *v = (TokText){ 0 };
}

#include "../parts/lines.h"
#include "screen.h"
#include "test.h"

#define GRUEN "gr\xc3\xbcn"
enum { MOST = 2000 };
static Screen screen;
static int terminal, line_row;                         // the test's side of the terminal; the first row of the line
static uint64_t chance;

static int draw(int n) {                               // 0 .. n - 1
    chance = chance * 6364136223846793005u + 1442695040888963407u;
    return (int)((chance >> 33) % (uint64_t)n);
}

// What the user sees as one character: Latin, umlaut, CJK, kana, emoji, joined emoji, a skin tone, a flag, a combining
// mark, Hebrew with a point, Arabic, Devanagari, Thai, Hangul, a space, a tab, a line break.
static const char *const alphabet[] = {
    "a", "Z", "7", "\xc3\xbc", "\xe4\xb8\xad", "\xe6\x96\x87", "\xe3\x81\x82", "\xf0\x9f\x98\x80",
    "\xf0\x9f\x91\xa8\xe2\x80\x8d\xf0\x9f\x91\xa9\xe2\x80\x8d\xf0\x9f\x91\xa7", "\xf0\x9f\x91\x8d\xf0\x9f\x8f\xbd",
    "\xf0\x9f\x87\xa9\xf0\x9f\x87\xaa", "e\xcc\x81", "\xd7\xa9\xd6\xb8", "\xd7\x9c", "\xd8\xb9", "\xe0\xa4\x95\xe0\xa5\x8d",
    "\xe0\xb8\x81\xe0\xb9\x87", "\xed\x95\x9c", " ", "\t", "\n" };
enum { N_ALPHABET = sizeof alphabet / sizeof *alphabet };

static struct { const char *at[MOST]; int n, cursor; } model;

static void model_insert(const char *s) {
    memmove(model.at + model.cursor + 1, model.at + model.cursor, (size_t)(model.n - model.cursor) * sizeof *model.at);
    model.at[model.cursor++] = s;
    model.n++;
}

static void model_delete(int from, int to) {
    memmove(model.at + from, model.at + to, (size_t)(model.n - to) * sizeof *model.at);
    model.n -= to - from;
    model.cursor = from;
}

// What the screen must show of the first n characters.
static void model_text(int n, char *out) {
    out += sprintf(out, "> ");
    for (int i = 0; i < n; i++)
        out += sprintf(out, "%s", !strcmp(model.at[i], "\n") ? "\n. " : !strcmp(model.at[i], "\t") ? "    " : model.at[i]);
}

// Feeds what was drawn to the emulator. A byte 30 marks its end.
static void take_drawing(void) {
    char bytes[4096];
    if (write(2, "\036", 1) != 1) exit(1);
    for (bool ended = false; !ended; ) {
        const ssize_t got = read(terminal, bytes, sizeof bytes);
        if (got <= 0) exit(1);
        ended = bytes[got - 1] == 30;
        screen_put(&screen, bytes, (size_t)got - ended);
    }
}

static void trim_lines(char *s) {                      // spaces at the ends of lines cannot be told from nothing
    char *to = s;
    for (; *s; s++) {
        if (*s == '\n' || !s[1]) {
            if (*s != '\n' && *s != ' ') *to++ = *s;
            while (to[-1] == ' ') to--;
            if (*s == '\n') *to++ = *s;
        } else *to++ = *s;
    }
    *to = 0;
}

static bool shows_model(const char *what, uint64_t seed) {
    static char want[MOST * 30], before[MOST * 30];
    draw_line();
    take_drawing();
    model_text(model.n, want);
    model_text(model.cursor, before);
    char *got = screen_text(&screen, line_row, screen.n - 1, screen.columns);
    char *upto = screen_text(&screen, line_row, screen.r, screen.c);
    char *above = screen_text(&screen, 0, line_row - 1, screen.columns);
    trim_lines(want);
    trim_lines(got);
    strcat(before, "|");                               // so that spaces before the cursor count
    strcat(upto, "|");
    trim_lines(before);
    trim_lines(upto);
    const bool ok = CHECK(!strcmp(got, want), "seed %llu, %s: %d columns: expected\n%s\ngot\n%s", (unsigned long long)seed,
                          what, screen.columns, want, got) &&
                    CHECK(!strcmp(before, upto), "seed %llu, %s: %d columns: expected the cursor after\n%s\ngot\n%s",
                          (unsigned long long)seed, what, screen.columns, before, upto) &&
                    CHECK(!strncmp(above, "the line before", 15) && !screen.unknown, "seed %llu, %s: above: %s",
                          (unsigned long long)seed, what, above);
    free(got);
    free(upto);
    free(above);
    return ok;
}

static void set_size(int columns, int rows) {
    if (ioctl(2, TIOCSWINSZ, &(struct winsize){ .ws_col = (unsigned short)columns, .ws_row = (unsigned short)rows })) exit(1);
}

static void begin_line(int columns, int rows) {
    free(screen.row);
    screen_open(&screen, columns, rows);
    screen_put(&screen, "the line before\r\n", 17);
    line_row = 1;
    set_size(columns, rows);
    edit.text.n = edit.at = 0;
    edit.prompt = "> ";
    edit.row = edit.top = 0;
    history.at = history.n;
    put_bytes(&edit.text, "", 1);
    edit.text.n = 0;
    measure_terminal();
    model.n = model.cursor = 0;
}

static void resize(int columns) {
    take_drawing();
    screen_resize(&screen, columns);
    line_row = 0;                                      // "the line before" may take several rows now
    while (line_row < screen.n && strncmp(screen.row[line_row].cells[0].s, ">", 1)) line_row++;
    set_size(columns, screen.rows);
    adapt_line();
}

static void type(const char *s) { press_key('x', s, strlen(s)); }       // any character: it is inserted as it is

// One random key, in the editor and in the model. Returns its name.
static const char *random_key(int most) {
    const int kind = draw(20);
    if (kind < 11 && model.n < most) {
        const char *s = alphabet[draw(N_ALPHABET)];
        model_insert(s);
        type(s);
        return "a character";
    }
    switch (kind % 9) {
    case 0: press_key(KEY_LEFT, NULL, 0); model.cursor -= model.cursor > 0; return "Left";
    case 1: press_key(KEY_RIGHT, NULL, 0); model.cursor += model.cursor < model.n; return "Right";
    case 2: press_key(0x7f, NULL, 0); if (model.cursor) model_delete(model.cursor - 1, model.cursor); return "Backspace";
    case 3: {
        const int at = model.cursor;
        press_key(KEY_DELETE, NULL, 0);
        if (at < model.n) model_delete(at, at + 1);
        return "Delete";
    }
    case 4:
        press_key(KEY_HOME, NULL, 0);
        while (model.cursor && strcmp(model.at[model.cursor - 1], "\n")) model.cursor--;
        return "Home";
    case 5:
        press_key(KEY_END, NULL, 0);
        while (model.cursor < model.n && strcmp(model.at[model.cursor], "\n")) model.cursor++;
        return "End";
    case 6: case 7: resize(screen.columns == 40 ? 200 : draw(2) ? 40 : 23 + draw(60)); return "another width";
    default: return "nothing";
    }
}

// Neighbours that would join: a mark after a joiner cannot come from this alphabet, but two flags in a row would, and
// a letter of Thai takes marks; so the model's characters stay apart if the editor finds the same borders.
static bool same_borders(void) {
    static char all[MOST * 30];
    size_t n = 0, at = 0;
    for (int i = 0; i < model.n; i++) n += (size_t)sprintf(all + n, "%s", model.at[i]);
    for (int i = 0; i < model.n; i++) {
        const size_t end = cluster_end(all, n, at);
        if (end != at + strlen(model.at[i])) return false;
        at = end;
    }
    return true;
}

static void test_random(uint64_t seed) {
    chance = seed * 0x9e3779b97f4a7c15u;
    begin_line(draw(3) ? 40 : 200, 50);
    draw_line();
    for (int k = 0; k < 150; k++) {
        const char *what = random_key(120);
        CHECK(same_borders(), "seed %llu: the editor finds other characters", (unsigned long long)seed);
        if (!shows_model(what, seed)) return;
    }
}

// A terminal that draws joined emoji in two columns: the cursor is right, as the terminal places it.
static void test_joining(void) {
    begin_line(40, 24);
    screen.joins = true;
    for (int i = 0; i < 5; i++) model_insert(alphabet[8]), type(alphabet[8]);
    shows_model("joined emoji", 0);
    for (int i = 0; i < 3; i++) {
        press_key(KEY_LEFT, NULL, 0), model.cursor--;
        shows_model("Left over joined emoji", 0);
        CHECK(screen.c == 2 + 2 * model.cursor, "expected the cursor in column %d, got %d", 2 + 2 * model.cursor, screen.c);
    }
}

// A text higher than the screen: the rows around the cursor are shown.
static void test_high(void) {
    begin_line(40, 6);
    for (int i = 0; i < 900; i++) type(i % 2 ? "\xe4\xb8\xad" : "x");
    draw_line();
    take_drawing();
    CHECK(screen.n - screen_top(&screen) <= 6 && screen.r == screen.n - 1, "the cursor is in row %d of %d", screen.r, screen.n);
    for (int i = 0; i < 900; i++) press_key(KEY_LEFT, NULL, 0);
    draw_line();
    take_drawing();
    char *upto = screen_text(&screen, screen_top(&screen), screen.r, screen.c);
    CHECK(!strcmp(upto, "> "), "expected the beginning, got '%s'", upto);
    free(upto);
    CHECK(screen.n - screen_top(&screen) <= 6, "%d rows", screen.n);
}

// Words, the end of the line, history: what the text is after these keys. A capital stands for Ctrl with the letter.
static void test_keys(void) {
    static const struct { const char *typed; int keys[6]; const char *want; } cases[] = {
        { "one two three", { KEY_CTRL('W') }, "one two " },
        { "one two three", { KEY_ERASE_WORD, KEY_ERASE_WORD }, "one " },
        { "one two three", { KEY_WORD_LEFT, KEY_CTRL('K') }, "one two " },
        { "one two three", { KEY_WORD_LEFT, KEY_CTRL('U') }, "three" },
        { "one two three", { KEY_CTRL('A'), KEY_DELETE_WORD }, " two three" },
        { "one two three", { KEY_CTRL('A'), KEY_WORD_RIGHT, KEY_CTRL('K') }, "one" },
        { "abc", { KEY_CTRL('B'), KEY_CTRL('H') }, "ac" },
        { "abc", { KEY_CTRL('A'), KEY_CTRL('F'), KEY_CTRL('D') }, "ac" },
        { "", { KEY_UP }, "second entry" }, { "", { KEY_CTRL('P'), KEY_UP }, "first " GRUEN },
        { "mine", { KEY_UP, KEY_UP, KEY_UP, KEY_DOWN, KEY_DOWN }, "mine" }, { "mine", { KEY_DOWN }, "mine" },
        { "abc", { KEY_LEFT, KEY_BREAK }, "ab\nc" } };
    keep_entry("first " GRUEN, strlen("first " GRUEN));
    keep_entry("second entry", 12);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        begin_line(80, 24);
        for (const char *c = cases[i].typed; *c; c++) press_key(*c, c, 1);
        for (int k = 0; k < 6 && cases[i].keys[k]; k++) press_key(cases[i].keys[k], NULL, 0);
        CHECK(edit.text.n == strlen(cases[i].want) && !memcmp(edit.text.s, cases[i].want, edit.text.n),
              "keys %zu: expected '%s', got '%.*s'", i, cases[i].want, (int)edit.text.n, edit.text.s);
    }
    begin_line(80, 24);
    search_entry("first");
    CHECK(edit.text.n == 11 && !memcmp(edit.text.s, "first ", 6), "the history is not searched");
    history.n = 0;
}

int main(int argc, char **argv) {
    terminal = posix_openpt(O_RDWR | O_NOCTTY);
    const char *name = terminal < 0 || grantpt(terminal) || unlockpt(terminal) ? NULL : ptsname(terminal);
    const int side = name ? open(name, O_RDWR | O_NOCTTY) : -1;
    struct termios raw;
    setlocale(LC_CTYPE, "C.UTF-8");
    if (side < 0 || tcgetattr(side, &raw) || !use_utf8()) {
        SKIP("no terminal to be had, or no UTF-8 locale");
        return test_done("lines");
    }
    cfmakeraw(&raw);
    tcsetattr(side, TCSANOW, &raw);
    const int errors = dup(2);
    dup2(side, 2);
    if (argc > 1) test_random(strtoull(argv[1], NULL, 10));
    for (uint64_t seed = 1; argc < 2 && seed <= 20 && test_failed < 5; seed++) test_random(seed);
    test_joining();
    test_high();
    test_keys();
    dup2(errors, 2);
    return test_done("lines");
}
