/* lines.h - reads what the user types, as UTF-8: a line editor for terminals, plain lines from everything else.
 * Part of gemma4.c, which includes it; tests/lines.c includes it alone.
 *
 * Uses base.h, tokenizer.h (TokText) and answer.h (signals). Begin with read_message() and edit_line().
 *   [1] Characters    [2] The screen    [3] Input    [4] History    [5] Editing    [6] Lines and messages */
#ifndef LINES_H
#define LINES_H
#include <glob.h>
#include <langinfo.h>
#include <locale.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <wchar.h>
#ifndef GLOB_TILDE
#define GLOB_TILDE 0
#endif

// ==== [1] Characters =================================================================================================
// The model's text is UTF-8, and the chat writes it to the terminal unchanged, so typed text is read as UTF-8 too. The
// C library knows how many columns a character takes, in a UTF-8 locale. use_utf8() sets LC_CTYPE to the user's locale
// if that is one, else to a UTF-8 locale of the system. A terminal with another character set, such as ISO-8859-1,
// could not show the answers; then the chat prints a warning. No other locale category is set, so numbers keep their
// decimal point.

// False: this system has no UTF-8 locale.
static bool use_utf8(void) {
    static const char *const names[] = { "", "C.UTF-8", "C.utf8", "en_US.UTF-8", "UTF-8" };      // the last: macOS
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *locale = setlocale(LC_CTYPE, names[i]);
        if (locale && !strcmp(nl_langinfo(CODESET), "UTF-8")) return true;
        if (!i && locale && strcmp(locale, "C") && strcmp(locale, "POSIX"))
            fprintf(stderr, "# locale %s uses the character set %s; the chat reads and writes UTF-8\n", locale,
                    nl_langinfo(CODESET));
    }
    setlocale(LC_CTYPE, "C");
    return false;
}

// Reads the character at s, of n > 0 bytes. Returns its length; 0: the bytes are not UTF-8; -1: they are the beginning
// of a character. *code: its code point.
static int read_character(const char *s, size_t n, uint32_t *code) {
    static const uint32_t least[] = { 0, 0, 0x80, 0x800, 0x10000 };
    const unsigned char c = (unsigned char)s[0];
    const int len = c < 0x80 ? 1 : c < 0xc2 ? 0 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : c < 0xf5 ? 4 : 0;
    *code = len == 1 ? c : c & (0xffu >> (len + 1));
    for (int i = 1; i < len; i++) {
        if ((size_t)i == n) return -1;
        if (((unsigned char)s[i] & 0xc0) != 0x80) return 0;
        *code = *code << 6 | ((unsigned char)s[i] & 0x3f);
    }
    return len && (*code < least[len] || *code > 0x10ffff || (*code >= 0xd800 && *code < 0xe000)) ? 0 : len;
}

// The columns that a character takes on a terminal.
static int character_width(uint32_t code) {
    const int width = wcwidth((wchar_t)code);
    return width >= 0 ? width : code >= 0x1f300 && code < 0x1fb00 ? 2 : 1;       // an emoji newer than the C library
}

// The end of what the user sees as one character at byte `at` of a text: with the marks on it, and if characters are
// joined (U+200D), have a skin tone or are two letters of a flag, all of them.
static size_t cluster_end(const char *s, size_t n, size_t at) {
    enum { JOINER = 0x200d };
    uint32_t code, first, last;
    int len = read_character(s + at, n - at, &first);
    at += (size_t)(len > 0 ? len : 1);
    for (last = first; first >= ' ' && at < n; last = code) {
        len = read_character(s + at, n - at, &code);
        const bool flag = first >= 0x1f1e6 && first < 0x1f200 && last == first && code >= 0x1f1e6 && code < 0x1f200;
        const bool mark = code >= ' ' && !character_width(code), tone = code >= 0x1f3fb && code < 0x1f400;
        if (len < 1 || code < ' ' || !(flag || mark || tone || last == JOINER)) break;
        at += (size_t)len;
        if (flag) break;
    }
    return at;
}

// The beginning of the cluster that ends at byte `at` > 0.
static size_t cluster_begin(const char *s, size_t at) {
    size_t begin = 0;
    for (size_t end = 0; end < at; ) begin = end, end = cluster_end(s, at, end);
    return begin;
}

// ==== [2] The screen =================================================================================================
// The line that is edited is drawn again after every key that changes it, from its first row on. Long lines are wrapped
// by the terminal. A character's columns are known only nearly, as terminals differ for joined emoji, so the cursor is
// placed by the terminal itself: the text before it is written once more.

static struct {
    TokText     text;         // what is edited; line breaks come from pasted text
    size_t      at;           // the cursor, in bytes
    const char *prompt;
    int         columns, height;       // of the terminal
    int         row;          // the cursor's row on the screen, counted from the first row that is drawn
    int         top;          // rows of a text higher than the screen that are above the first one that is drawn
} edit;

enum { TAB_COLUMNS = 4 };
typedef struct { int row, col; } Spot;

static void put_bytes(TokText *out, const char *s, size_t n) {
    if (!tok_text_append(out, s, n)) die("out of memory for a line");
}

// Adds what shows the prompt and the first `end` bytes of the text to *out, if it is not NULL, without the rows above
// edit.top and those below the screen. Returns where the cursor is then.
static Spot lay_out(size_t end, TokText *out) {
    Spot spot = { 0, 0 };
    const char *texts[] = { edit.prompt, edit.text.s };
    const size_t sizes[] = { strlen(edit.prompt), end };
    for (int i = 0; i < 2; i++)
        for (size_t at = 0, len; at < sizes[i]; at += len) {
            uint32_t code;
            const char *s = texts[i] + at;
            len = (size_t)max_int(read_character(s, sizes[i] - at, &code), 1);
            for (int k = *s == '\t' ? TAB_COLUMNS : 1; k; k--) {       // a tab is that many spaces
                const int width = *s == '\t' ? 1 : character_width(code);
                if (*s == '\n') spot = (Spot){ spot.row + 1, 2 };
                else if (spot.col + width > edit.columns) spot = (Spot){ spot.row + 1, 0 };
                const bool seen = out && spot.row >= edit.top && spot.row < edit.top + edit.height;
                if (*s != '\n') spot.col += width;
                if (!seen) continue;
                if (*s == '\n') put_bytes(out, spot.row > edit.top ? "\r\n. " : ". ", spot.row > edit.top ? 4 : 2);
                else put_bytes(out, *s == '\t' ? " " : s, *s == '\t' ? 1 : len);
            }
        }
    return spot;
}

static void move_up(TokText *out, int rows) {
    char s[32];
    put_bytes(out, s, (size_t)(rows ? snprintf(s, sizeof s, "\r\033[%dA", rows) : snprintf(s, sizeof s, "\r")));
}

static void show_bytes(const TokText *out) {
    for (size_t at = 0; at < out->n; ) {
        const ssize_t done = write(2, out->s + at, out->n - at);
        if (done < 0 && errno != EINTR) break;         // the terminal is gone
        at += (size_t)(done > 0 ? done : 0);
    }
}

// Where the cursor belongs: where the next character is, or at the end of the text, will be.
static Spot cursor_spot(void) {
    const Spot spot = lay_out(edit.at, NULL);
    uint32_t code = 'x';
    if (edit.at < edit.text.n) read_character(edit.text.s + edit.at, edit.text.n - edit.at, &code);
    const int width = code == '\n' ? 0 : code == '\t' ? 1 : character_width(code);
    return spot.col + width > edit.columns ? (Spot){ spot.row + 1, 0 } : spot;
}

// Draws the line again, with the cursor where it belongs.
static void draw_line(void) {
    static TokText out;
    out.n = 0;
    move_up(&out, edit.row);
    put_bytes(&out, "\033[J", 3);
    const Spot cursor = cursor_spot();
    if (cursor.row < edit.top) edit.top = cursor.row;
    if (cursor.row >= edit.top + edit.height) edit.top = cursor.row - edit.height + 1;
    Spot end = lay_out(edit.text.n, &out);
    const int last = edit.top + edit.height - 1;
    if (end.col == edit.columns && end.row < last) {
        put_bytes(&out, " \r", 2);                           // the terminal goes on in the next row
        end = (Spot){ end.row + 1, 0 };
    }
    if (edit.at < edit.text.n) {
        move_up(&out, min_int(end.row, last) - edit.top);
        if (lay_out(edit.at, &out).row < cursor.row) put_bytes(&out, "\r\n", 2);
    }
    edit.row = cursor.row - edit.top;
    show_bytes(&out);
}

static void measure_terminal(void) {
    struct winsize w;
    edit.columns = terminal_columns(2);
    edit.height = ioctl(2, TIOCGWINSZ, &w) || !w.ws_row ? 24 : w.ws_row;
}

// The terminal has another width. It has wrapped the rows of the line again, so the cursor is in another row; a text
// higher than the screen is drawn on an empty one.
static void adapt_line(void) {
    const int height = edit.height;
    const bool stays = edit.at == edit.text.n && lay_out(edit.at, NULL).col < edit.columns;
    measure_terminal();
    const Spot end = lay_out(edit.text.n, NULL);
    edit.row = stays ? end.row : cursor_spot().row;    // after a row that is full only now, the cursor is still in it
    if (edit.top || end.row >= min_int(height, edit.height)) {
        show_bytes(&(TokText){ .s = (char[]){ "\033[H\033[2J" }, .n = 7 });
        edit.row = edit.top = 0;
    }
}

// ==== [3] Input ======================================================================================================

typedef enum { LINE_TEXT, LINE_END, LINE_INTERRUPTED } LineKind;

static volatile sig_atomic_t resized, continued;       // by SIGWINCH, by SIGCONT
static struct termios usual;                           // the terminal's settings before the first line

static void on_terminal(int signal_number) {
    if (signal_number == SIGWINCH) resized = 1;
    else continued = 1;
}

// Tells the terminal driver, which edits lines when we do not, that characters are UTF-8, so that it erases whole
// characters. True: the setting was different before.
static bool set_driver_utf8(bool on) {
    (void)on;
#ifdef IUTF8
    struct termios t;
    if (isatty(0) && !tcgetattr(0, &t) && !(t.c_iflag & IUTF8) == on) {
        t.c_iflag ^= IUTF8;
        return !tcsetattr(0, TCSANOW, &t);
    }
#endif
    return false;
}

// From the first line on keys arrive one by one and are not shown, and pasted text is marked; Ctrl-C and Ctrl-Z stay
// signals. So what is typed during an answer, also Ctrl-D, waits for the next line, and does not mix with the answer.
static void begin_keys(void) {
    struct termios t = usual;
    t.c_lflag &= ~(tcflag_t)(ICANON | ECHO | IEXTEN);
    t.c_cc[VMIN] = 1;
    t.c_cc[VTIME] = 0;
    t.c_cc[VQUIT] = _POSIX_VDISABLE;
    tcsetattr(0, TCSADRAIN, &t);
    show_bytes(&(TokText){ .s = (char[]){ "\033[?2004h" }, .n = 8 });
}

// Takes a Ctrl-D that was typed, with nothing before it, while the driver edited lines: as a key it would be a zero.
static bool take_early_end(void) {
    struct pollfd p = { .fd = 0, .events = POLLIN };
    char none;
    int n;
    return poll(&p, 1, 0) == 1 && !ioctl(0, FIONREAD, &n) && !n && read(0, &none, 1) == 0;
}

static void end_keys(void) {
    show_bytes(&(TokText){ .s = (char[]){ "\033[?2004l" }, .n = 8 });
    tcsetattr(0, TCSADRAIN, &usual);
}

// Waits for standard input. False: the user pressed Ctrl-C. The signals are blocked everywhere else, so that none is
// lost. editing: a line is drawn, which has to fit the terminal.
static bool wait_for_input(const sigset_t *unblocked, bool editing) {
    fd_set set;
    for (;;) {
        FD_ZERO(&set);
        FD_SET(0, &set);
        const bool again = !interrupted && pselect(1, &set, NULL, NULL, NULL, unblocked) < 0 && errno == EINTR;
        if (interrupted || !again) return !interrupted;
        if (!editing || !(resized || continued)) continue;
        if (continued) begin_keys(), edit.row = 0;     // after Ctrl-Z: the shell has written below the line
        else adapt_line();
        resized = continued = 0;
        draw_line();
    }
}

static struct { char bytes[4096]; size_t n, at; } pending;             // bytes that were read, but not used yet

enum { INPUT_END = -1, INPUT_INTERRUPTED = -2 };

// Returns the next byte of standard input, or one of the values above. Draws the line before it waits.
static int next_byte(const sigset_t *unblocked, bool editing) {
    while (pending.at == pending.n) {
        if (editing) draw_line();
        if (!wait_for_input(unblocked, editing)) return INPUT_INTERRUPTED;
        const ssize_t got = read(0, pending.bytes, sizeof pending.bytes);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 && errno != EIO) die("standard input: %s", strerror(errno));
        if (got <= 0) return INPUT_END;                // EIO: the terminal is gone
        pending.n = (size_t)got;
        pending.at = 0;
    }
    return (unsigned char)pending.bytes[pending.at++];
}

// ==== [4] History ====================================================================================================

enum { MAX_HISTORY = 1000 };
static struct { char *entries[MAX_HISTORY]; int n, at; const char *path; } history;    // at: the entry that is shown

static void keep_entry(const char *s, size_t n) {
    const char *last = history.n ? history.entries[history.n - 1] : "";
    if (!n || (strlen(last) == n && !memcmp(last, s, n))) return;
    if (history.n == MAX_HISTORY) {
        free(history.entries[0]);
        memmove(history.entries, history.entries + 1, (MAX_HISTORY - 1) * sizeof *history.entries);
        history.n--;
    }
    char *copy = alloc_or_die(n + 1, 1);
    memcpy(copy, s, n);
    history.entries[history.n++] = copy;
}

// A file has an entry on each line. A line break in an entry follows a backslash, as when a line is continued.
static void load_history(const char *path) {
    struct stat st;
    size_t n = 0, from = 0;
    history.path = path;
    if (stat(path, &st)) return;                       // the first chat
    if (!S_ISREG(st.st_mode)) {                        // such as /dev/null
        history.path = NULL;
        return;
    }
    char *text = read_file(path, &n, "--history");
    TokText entry = { 0 };
    for (size_t i = 0; i < n; i++) {
        if (text[i] != '\n') continue;
        size_t end = i;
        const bool more = end > from && text[end - 1] == '\\';
        put_bytes(&entry, text + from, end - from - more);
        if (more) put_bytes(&entry, "\n", 1);
        else keep_entry(entry.s, entry.n), entry.n = 0;
        from = i + 1;
    }
    tok_text_free(&entry);
    free(text);
}

// Adds a message to the history, which Up recalls, and to its file: a new one is readable by the user only.
static void remember_line(const char *line) {
    if (!isatty(0)) return;
    const int before = history.n;
    keep_entry(line, strlen(line));
    if (!history.path || history.n == before) return;
    TokText out = { 0 };
    for (; *line; line++) put_bytes(&out, *line == '\n' ? "\\\n" : line, *line == '\n' ? 2 : 1);
    put_bytes(&out, "\n", 1);
    const int err = append_to_file(history.path, out.s, out.n, 0600);
    if (err) {
        fprintf(stderr, "# --history: %s: %s; later messages are not kept in it\n", history.path, strerror(err));
        history.path = NULL;
    }
    tok_text_free(&out);
}

// ==== [5] Editing ====================================================================================================

static const char *(*completed_word)(size_t i);        // Tab completes these at the beginning of a line; NULL: the end

static void replace_text(size_t from, size_t to, const char *s, size_t n) { // bytes from .. to - 1 by a text
    TokText *t = &edit.text;
    const size_t after = t->n - to;
    put_bytes(t, s, n);                                      // makes room
    memmove(t->s + from + n, t->s + to, after);
    memcpy(t->s + from, s, n);
    t->n = from + n + after;
    edit.at = from + n;
}

static void show_entry(int entry) {                    // of the history
    if (entry < 0 || entry > history.n) return;
    static char *typed;                                // the line that was edited before an entry was shown
    if (history.at == history.n) {
        free(typed);
        typed = alloc_or_die(edit.text.n + 1, 1);
        if (edit.text.n) memcpy(typed, edit.text.s, edit.text.n);
    }
    const char *s = entry == history.n ? typed : history.entries[entry];
    history.at = entry;
    replace_text(0, edit.text.n, s, strlen(s));
}

// Shows the newest older entry that contains the text.
static void search_entry(const char *text) {
    for (int i = history.at - 1; i >= 0; i--) {
        if (!strstr(history.entries[i], text)) continue;
        show_entry(i);
        return;
    }
}

static bool in_word(char c) {
    return (c & 0x80) || (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
}

static size_t word_end(size_t at) {
    while (at < edit.text.n && !in_word(edit.text.s[at])) at++;
    while (at < edit.text.n && in_word(edit.text.s[at])) at++;
    return at;
}

static size_t word_begin(size_t at) {
    while (at && !in_word(edit.text.s[at - 1])) at--;
    while (at && in_word(edit.text.s[at - 1])) at--;
    return at;
}

// Returns the path with ~ or ~user at its beginning replaced by that home directory. The caller frees it.
static char *expand_home(const char *path) {
    const size_t n = *path == '~' ? strcspn(path, "/") : 0;
    TokText out = { 0 };
    glob_t found = { 0 };
    put_bytes(&out, path, n);
    put_bytes(&out, "", 1);
    const bool known = n && !glob(out.s, GLOB_TILDE, NULL, &found) && found.gl_pathc == 1;
    out.n = 0;
    if (known) put_bytes(&out, found.gl_pathv[0], strlen(found.gl_pathv[0]));
    put_bytes(&out, path + (known ? n : 0), strlen(path + (known ? n : 0)) + 1);
    globfree(&found);
    return out.s;
}

// The paths that begin like this one; folders end in a slash.
static glob_t find_paths(const char *path) {
    glob_t found = { 0 };
    TokText pattern = { 0 };
    for (const char *c = path; *c; c++) {
        if (strchr("*?[\\", *c)) put_bytes(&pattern, "\\", 1);
        put_bytes(&pattern, c, 1);
    }
    put_bytes(&pattern, "*", 2);                       // with a NUL
    if (glob(pattern.s, GLOB_MARK, NULL, &found)) found.gl_pathc = 0;
    tok_text_free(&pattern);
    return found;
}

// Completes the word before the cursor to what all n candidates have in common; if that is no more, lists them.
static void complete_with(size_t from, char *const *words, size_t n, bool paths) {
    size_t common = n ? strlen(words[0]) : 0;
    for (size_t i = 1; i < n; i++)
        for (size_t k = 0; k < common; k++) if (words[i][k] != words[0][k]) common = k;
    if (common > edit.at - from || (n && memcmp(words[0], edit.text.s + from, common))) {
        replace_text(from, edit.at, words[0], common);
        if (n == 1 && !paths) replace_text(edit.at, edit.at, " ", 1);
    } else if (n > 1) {
        TokText out = { 0 };
        put_bytes(&out, "\r\n", 2);
        for (size_t i = 0; i < n && i < 200; i++) {
            const size_t len = strlen(words[i]);
            const char *name = words[i] + len;         // of a path the last part
            while (name > words[i] && (!paths || name[-1] != '/' || !*name)) name--;
            put_bytes(&out, name, strlen(name));
            put_bytes(&out, "  ", 2);
        }
        put_bytes(&out, "\r\n", 2);
        edit.at = edit.text.n;
        draw_line();
        show_bytes(&out);
        tok_text_free(&out);
        edit.row = 0;
    }
}

static void complete_word(void) {
    size_t from = edit.at, n = 0;
    while (from && edit.text.s[from - 1] != ' ' && edit.text.s[from - 1] != '\n') from--;
    char *word = alloc_or_die(edit.at - from + 1, 1);
    if (edit.at > from) memcpy(word, edit.text.s + from, edit.at - from);
    if (!from && *word == '/') {
        char *words[64];
        for (size_t i = 0; completed_word && completed_word(i) && n < 64; i++)
            if (!strncmp(completed_word(i), word, strlen(word))) words[n++] = (char *)(uintptr_t)completed_word(i);
        complete_with(0, words, n, false);
    } else if (from) {
        char *path = expand_home(word);
        glob_t found = find_paths(path);
        free(path);
        complete_with(from, found.gl_pathv, found.gl_pathc, true);
        globfree(&found);
    }
    free(word);
}

typedef enum {                // keys that are not characters; Ctrl with a letter is 1 .. 26
    KEY_NONE = 0x110000, KEY_UP, KEY_DOWN, KEY_RIGHT, KEY_LEFT, KEY_HOME, KEY_END, KEY_DELETE, KEY_PASTE,
    KEY_WORD_RIGHT, KEY_WORD_LEFT, KEY_DELETE_WORD, KEY_ERASE_WORD, KEY_BREAK
} Key;

// Reads an escape sequence, of which the first byte was read. < 0: as next_byte().
static int read_escape(const sigset_t *unblocked) {
    static const struct { char end; int number, key; } keys[] = {
        { 'A', 0, KEY_UP }, { 'B', 0, KEY_DOWN }, { 'C', 0, KEY_RIGHT }, { 'D', 0, KEY_LEFT }, { 'H', 0, KEY_HOME },
        { 'F', 0, KEY_END }, { '~', 1, KEY_HOME }, { '~', 7, KEY_HOME }, { '~', 4, KEY_END }, { '~', 8, KEY_END },
        { '~', 3, KEY_DELETE }, { '~', 200, KEY_PASTE } };
    static const struct { char byte; int key; } alts[] = { { 'b', KEY_WORD_LEFT }, { 'f', KEY_WORD_RIGHT },
        { 'd', KEY_DELETE_WORD }, { 0x7f, KEY_ERASE_WORD }, { '\b', KEY_ERASE_WORD }, { '\r', KEY_BREAK },
        { '\n', KEY_BREAK } };
    int number = 0, modifier = 0, c = next_byte(unblocked, true);
    for (size_t i = 0; i < sizeof alts / sizeof *alts; i++) if (alts[i].byte == c) return alts[i].key;
    if (c != '[' && c != 'O') return c < 0 ? c : KEY_NONE;
    while ((c = next_byte(unblocked, true)) >= '0' && c <= ';')
        if (c == ';') modifier = 1;
        else if (c <= '9' && !modifier) number = number * 10 % 10000 + c - '0';
    if (c < 0) return c;
    if (modifier && (c == 'C' || c == 'D')) return c == 'C' ? KEY_WORD_RIGHT : KEY_WORD_LEFT;
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (keys[i].end == c && (c != '~' || keys[i].number == number)) return keys[i].key;
    return KEY_NONE;
}

// Reads a key: a character's code point, or one of the keys above. Bytes that are not UTF-8 are dropped. < 0: as
// next_byte(). s: the bytes of the character (*n).
static int read_key_press(const sigset_t *unblocked, char s[4], size_t *n) {
    uint32_t code;
    for (*n = 0; ; ) {
        const int c = next_byte(unblocked, true);
        if (c < 0) return c;
        if (c < 0x80) *n = 0;                          // the bytes before were no character
        s[(*n)++] = (char)c;
        int len = read_character(s, *n, &code);
        if (!len && *n > 1) s[0] = (char)c, *n = 1, len = read_character(s, 1, &code);
        if (!len) *n = 0;
        if (len > 0) return code == 0x1b ? read_escape(unblocked) : (int)code;
    }
}

// Inserts pasted text up to its end mark, with its line breaks and tabs, without other control characters. < 0: as
// next_byte().
static int read_paste(const sigset_t *unblocked) {
    static const char mark[] = "\033[201~";
    TokText text = { 0 }, clean = { 0 };
    uint32_t code;
    int c = 0;
    while ((c = next_byte(unblocked, false)) >= 0) {
        const char byte = (char)c;
        put_bytes(&text, &byte, 1);
        if (text.n >= 6 && !memcmp(text.s + text.n - 6, mark, 6)) break;
    }
    if (c >= 0) text.n -= 6;
    for (size_t at = 0; at < text.n; ) {
        const int len = read_character(text.s + at, text.n - at, &code);
        if (code == '\r' && len == 1) {
            if (at + 1 == text.n || text.s[at + 1] != '\n') put_bytes(&clean, "\n", 1);
        } else if (len > 0 && (code == '\n' || code == '\t' || (code >= ' ' && code != 0x7f)))
            put_bytes(&clean, text.s + at, (size_t)len);
        at += (size_t)(len > 0 ? len : 1);
    }
    if (clean.n && clean.s[clean.n - 1] == '\n') clean.n--;            // Enter ends the message
    if (clean.n) replace_text(edit.at, edit.at, clean.s, clean.n);
    tok_text_free(&text);
    tok_text_free(&clean);
    return c < 0 ? c : 0;
}

static size_t line_begin(void) {                       // of the row of a text of several lines
    size_t at = edit.at;
    while (at && edit.text.s[at - 1] != '\n') at--;
    return at;
}

static size_t line_end(void) {
    size_t at = edit.at;
    while (at < edit.text.n && edit.text.s[at] != '\n') at++;
    return at;
}

static size_t after_cursor(void) {                     // the end of the character at the cursor
    return edit.at < edit.text.n ? cluster_end(edit.text.s, edit.text.n, edit.at) : edit.at;
}

#define KEY_CTRL(letter) ((letter) - 'A' + 1)

// Does what a key is for; a character is inserted.
static void press_key(int key, const char *s, size_t n) {
    const size_t at = edit.at, before = at ? cluster_begin(edit.text.s, at) : 0;
    size_t from = at;
    switch (key) {
    case KEY_LEFT: case KEY_CTRL('B'): edit.at = before; break;
    case KEY_RIGHT: case KEY_CTRL('F'): edit.at = after_cursor(); break;
    case KEY_HOME: case KEY_CTRL('A'): edit.at = line_begin(); break;
    case KEY_END: case KEY_CTRL('E'): edit.at = line_end(); break;
    case KEY_WORD_LEFT: edit.at = word_begin(at); break;
    case KEY_WORD_RIGHT: edit.at = word_end(at); break;
    case 0x7f: case KEY_CTRL('H'): replace_text(before, at, "", 0); break;
    case KEY_DELETE: case KEY_CTRL('D'): replace_text(at, after_cursor(), "", 0); break;
    case KEY_CTRL('K'): replace_text(at, line_end(), "", 0); break;
    case KEY_CTRL('U'): replace_text(line_begin(), at, "", 0); break;
    case KEY_DELETE_WORD: replace_text(at, word_end(at), "", 0); break;
    case KEY_ERASE_WORD: replace_text(word_begin(at), at, "", 0); break;
    case KEY_CTRL('W'):
        while (from && edit.text.s[from - 1] == ' ') from--;
        while (from && edit.text.s[from - 1] != ' ' && edit.text.s[from - 1] != '\n') from--;
        replace_text(from, at, "", 0);
        break;
    case KEY_CTRL('L'): show_bytes(&(TokText){ .s = (char[]){ "\033[H\033[2J" }, .n = 7 }), edit.row = 0; break;
    case KEY_UP: case KEY_CTRL('P'): show_entry(history.at - 1); break;
    case KEY_DOWN: case KEY_CTRL('N'): show_entry(history.at + 1); break;
    case '\t': complete_word(); break;
    case KEY_BREAK: replace_text(at, at, "\n", 1); break;
    default: if (key >= ' ' && key < KEY_NONE) replace_text(at, at, s, n);
    }
}

// Edits a line, which may get line breaks from pasted text, and appends it to *line.
static LineKind edit_line(const char *prompt, const sigset_t *unblocked, TokText *line) {
    char s[4], *sought = NULL;                         // sought: what Ctrl-R looks for
    size_t n;
    int key;
    edit.text.n = edit.at = 0;
    edit.prompt = prompt;
    edit.row = edit.top = 0;
    history.at = history.n;
    put_bytes(&edit.text, "", 1);                            // so that it is never NULL
    edit.text.n = 0;
    measure_terminal();
    begin_keys();
    while ((key = read_key_press(unblocked, s, &n)) >= 0 && key != '\r' && key != '\n') {
        if (key == KEY_CTRL('D') && !edit.text.n) break;
        if (key == KEY_CTRL('R')) {
            if (!sought) {
                sought = alloc_or_die(edit.text.n + 1, 1);
                memcpy(sought, edit.text.s, edit.text.n);
            }
            search_entry(sought);
            continue;
        }
        free(sought);
        sought = NULL;
        if (key != KEY_PASTE) press_key(key, s, n);
        else if ((key = read_paste(unblocked)) < 0) break;
    }
    free(sought);
    edit.at = edit.text.n;
    draw_line();
    if (key == INPUT_INTERRUPTED) return LINE_INTERRUPTED;
    if (key == KEY_CTRL('D') || (key == INPUT_END && !edit.text.n)) return LINE_END;
    fputs("\r\n", stderr);
    put_bytes(line, edit.text.s, edit.text.n);
    return LINE_TEXT;
}

// ==== [6] Lines and messages =========================================================================================

static bool edits_lines;                               // standard input and error are a terminal that can do it
static bool early_end;                                 // Ctrl-D was typed before the first line

// Reads a line that is not edited here. Bytes after its end are kept for the next line.
static LineKind take_line(const sigset_t *unblocked, TokText *line) {
    for (const size_t start = line->n; ; ) {
        const char *end = memchr(pending.bytes + pending.at, '\n', pending.n - pending.at);
        const size_t got = end ? (size_t)(end - pending.bytes) - pending.at : pending.n - pending.at;
        put_bytes(line, pending.bytes + pending.at, got);
        pending.at += got + (end != NULL);
        if (end) return LINE_TEXT;
        const int c = next_byte(unblocked, false);
        if (c == INPUT_INTERRUPTED) return LINE_INTERRUPTED;
        if (c == INPUT_END) return line->n == start ? LINE_END : LINE_TEXT;
        pending.at--;
    }
}

// Reads the next line of standard input and appends it, without its end, to *line. Shows the prompt on a terminal only.
static LineKind read_line(const char *prompt, TokText *line) {
    sigset_t blocked, before;
    LineKind kind;
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGINT);
    sigaddset(&blocked, SIGWINCH);
    sigaddset(&blocked, SIGCONT);
    sigprocmask(SIG_BLOCK, &blocked, &before);
    interrupted = 0;
    fflush(stderr);
    if (early_end) {
        early_end = false;
        fputs(prompt, stderr);
        kind = LINE_END;
    } else if (edits_lines) {
        kind = edit_line(prompt, &before, line);
    } else {
        const bool changed = set_driver_utf8(true);
        if (isatty(0)) fputs(prompt, stderr);
        kind = take_line(&before, line);
        if (changed) set_driver_utf8(false);
    }
    if (kind != LINE_TEXT && isatty(0)) fputs(edits_lines ? "\r\n" : "\n", stderr);
    sigprocmask(SIG_SETMASK, &before, NULL);
    return kind;
}

// Called before the first line. path: a file for the typed lines, or NULL. words: what Tab completes, or NULL.
static void open_lines(const char *path, const char *(*words)(size_t i)) {
    const struct sigaction act = { .sa_handler = on_terminal, .sa_flags = (int)SA_RESTART };
    const bool utf8 = use_utf8();
    edits_lines = utf8 && isatty(0) && obeys_escapes(2) && !tcgetattr(0, &usual);
    completed_word = words;
    if (edits_lines) {
        early_end = take_early_end();
        restore_terminal = end_keys;
        atexit(end_keys);
        begin_keys();
    }
    if (path) load_history(path);
    if (edits_lines) sigaction(SIGWINCH, &act, NULL), sigaction(SIGCONT, &act, NULL);
    if (!utf8 && isatty(0)) fprintf(stderr, "# no line editing: this system has no UTF-8 locale\n");
}

// The next line of a message of several; the end of the input ends the message.
static LineKind read_more(TokText *text) {
    put_bytes(text, "\n", 1);
    const LineKind kind = read_line(". ", text);
    return kind == LINE_END ? LINE_TEXT : kind;
}

static bool text_ends(const TokText *text, size_t from, const char *end) {
    const size_t n = strlen(end);
    return text->n >= from + n && !memcmp(text->s + text->n - n, end, n);
}

// Reads a message. Three quotes begin a message of several lines, which three quotes end. Otherwise a backslash at the
// end of a line becomes a line break, and the next line is appended.
static LineKind read_message(const char *prompt, TokText *text) {
    text->n = 0;
    LineKind kind = read_line(prompt, text);
    if (kind == LINE_TEXT && text->n >= 3 && !memcmp(text->s, "\"\"\"", 3)) {
        size_t before = 0;                             // at the end of the input nothing more comes
        while (kind == LINE_TEXT && !text_ends(text, 3, "\"\"\"") && text->n != before + 1)
            before = text->n, kind = read_more(text);
        const size_t end = text_ends(text, 3, "\"\"\"") ? text->n - 3 : text->n;
        text->n = end - 3;
        memmove(text->s, text->s + 3, text->n);
        if (text->n && text->s[0] == '\n') memmove(text->s, text->s + 1, --text->n);
        if (text->n && text->s[text->n - 1] == '\n') text->n--;
        return kind;
    }
    while (kind == LINE_TEXT && text->n && text->s[text->n - 1] == '\\') {
        text->n--;
        kind = read_more(text);
    }
    return kind;
}

#endif
