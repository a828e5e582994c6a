/* lines.h - reads the lines that the user types, as UTF-8. libedit or readline edits them, or else the terminal driver.
 * Part of gemma4.c, which includes it; tests/lines.c includes it alone, built with each library.
 *
 * Uses base.h, tokenizer.h (TokText) and answer.h (signals). Begin with read_message().
 *   [1] The character set    [2] One line    [3] Messages and history */
#ifndef LINES_H
#define LINES_H
#include <langinfo.h>
#include <locale.h>
#include <termios.h>
#include <wchar.h>
#if defined(USE_EDITLINE)     // the Makefile found libedit
#include <editline/readline.h>
#define EDITS_LINES
#elif defined(USE_READLINE)   // or readline
#include <readline/readline.h>
#include <readline/history.h>
#define EDITS_LINES
#endif

// ==== [1] The character set ==========================================================================================
// The model's text is UTF-8, and the chat writes it to the terminal unchanged, so typed text is read as UTF-8 too. The
// libraries take the character set from LC_CTYPE. use_utf8() sets it to the user's locale if that is a UTF-8 locale,
// else to a UTF-8 locale of the system. A terminal with another character set, such as ISO-8859-1, could not show the
// answers; then the chat prints a warning. No other locale category is set, so numbers keep their decimal point.

// False: this system has no UTF-8 locale.
static bool use_utf8(void) {
    static const char *const names[] = { "", "C.UTF-8", "C.utf8", "en_US.UTF-8", "UTF-8" };      // the last: macOS
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *locale = setlocale(LC_CTYPE, names[i]);
        if (locale && !strcmp(nl_langinfo(CODESET), "UTF-8")) {
#ifdef USE_READLINE                                    // readline reads the environment again for every line
            if (i) setenv("LC_ALL", names[i], 1);
#endif
            return true;
        }
        if (!i && locale && strcmp(locale, "C") && strcmp(locale, "POSIX"))
            fprintf(stderr, "# locale %s uses the character set %s; the chat reads and writes UTF-8\n", locale,
                    nl_langinfo(CODESET));
    }
    setlocale(LC_CTYPE, "C");
    return false;
}

// Tells the terminal driver, which edits lines when no library does, that characters are UTF-8, so that it erases whole
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

// ==== [2] One line ===================================================================================================

typedef enum { LINE_TEXT, LINE_END, LINE_INTERRUPTED } LineKind;

// Waits for standard input. False: the user pressed Ctrl-C. SIGINT is blocked everywhere else, so that none is lost.
static bool wait_for_input(const sigset_t *unblocked) {
    fd_set set;
    FD_ZERO(&set);
    FD_SET(0, &set);
    while (!interrupted && pselect(1, &set, NULL, NULL, NULL, unblocked) < 0 && errno == EINTR) {}
    return !interrupted;
}

#ifdef EDITS_LINES
static bool edits_lines;                               // the library edits lines on this terminal
static char *edited;                                   // the edited line; NULL at the end of input
static bool edit_ended;

static void on_edited(char *line) {
    edited = line;
    edit_ended = true;
    rl_callback_handler_remove();                      // restores the terminal's settings
}

#ifdef USE_READLINE
// readline gets whole UTF-8 characters only: an incomplete one would corrupt the next line. Invalid bytes are dropped,
// as libedit does. Input is read byte by byte, so that text after the line stays in the terminal's buffer.
static struct { char s[16]; size_t n, at; bool is_whole, ended; } character;

static bool take_byte(void) {                          // reads a byte; true: the character is whole, or input has ended
    mbstate_t state;
    const ssize_t got = read(0, character.s + character.n, 1);
    if (got <= 0) return character.ended = got == 0 || errno != EINTR;
    for (character.n++; ; character.n = 1) {
        memset(&state, 0, sizeof state);
        const size_t status = mbrtowc(NULL, character.s, character.n, &state);
        if (status == (size_t)-2) return false;
        if (status != (size_t)-1) return character.is_whole = true;
        character.s[0] = character.s[character.n - 1];
        if (character.n == 1) {
            character.n = 0;
            return false;
        }
    }
}

static int next_byte(FILE *f) {
    (void)f;
    while (!character.is_whole && !character.ended) take_byte();
    if (!character.is_whole) return EOF;
    const int byte = (unsigned char)character.s[character.at++];
    if (character.at == character.n) memset(&character, 0, sizeof character);
    return byte;
}

static void pass_input(void) {
    if (take_byte()) do rl_callback_read_char(); while (character.is_whole && !edit_ended);
}
#else
static void pass_input(void) { rl_callback_read_char(); }
#endif

static LineKind edit_line(const char *prompt, const sigset_t *unblocked, TokText *line) {
    edit_ended = false;
#ifdef USE_READLINE
    memset(&character, 0, sizeof character);
#endif
    rl_callback_handler_install(prompt, on_edited);
    while (!edit_ended && wait_for_input(unblocked)) pass_input();
    if (!edit_ended) {
        rl_callback_handler_remove();
        return LINE_INTERRUPTED;
    }
    if (!edited) return LINE_END;
    const bool ok = tok_text_append(line, edited, strlen(edited));
    if (!ok) die("out of memory for a line");
    free(edited);
    return LINE_TEXT;
}
#endif

// Reads a line that no library edits. Bytes after its end are kept for the next line.
static LineKind take_line(const sigset_t *unblocked, TokText *line) {
    static char buffer[4096];
    static size_t n, at;                               // bytes in the buffer; bytes of them that are consumed
    for (const size_t start = line->n; ; ) {
        const char *end = memchr(buffer + at, '\n', n - at);
        const size_t got = end ? (size_t)(end - buffer) - at : n - at;
        if (!tok_text_append(line, buffer + at, got)) die("out of memory for a line");
        at += got + (end != NULL);
        if (end) return LINE_TEXT;
        if (!wait_for_input(unblocked)) return LINE_INTERRUPTED;
        const ssize_t bytes = read(0, buffer, sizeof buffer);
        if (bytes < 0 && errno == EINTR) continue;
        if (bytes < 0) die("standard input: %s", strerror(errno));
        n = (size_t)bytes;
        at = 0;
        if (!n) return line->n == start ? LINE_END : LINE_TEXT;
    }
}

// Reads the next line of standard input and appends it, without its end, to *line. Shows the prompt on a terminal only.
static LineKind read_line(const char *prompt, TokText *line) {
    sigset_t blocked, before;
    LineKind kind;
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGINT);
    sigprocmask(SIG_BLOCK, &blocked, &before);
    interrupted = 0;
#ifdef EDITS_LINES
    if (edits_lines) {
        kind = edit_line(prompt, &before, line);
    } else
#endif
    {
        const bool changed = set_driver_utf8(true);
        if (isatty(0)) fputs(prompt, stderr);
        kind = take_line(&before, line);
        if (changed) set_driver_utf8(false);
    }
    if (kind != LINE_TEXT && isatty(0)) fputc('\n', stderr);
    sigprocmask(SIG_SETMASK, &before, NULL);
    return kind;
}

// ==== [3] Messages and history =======================================================================================

#ifdef EDITS_LINES
static const char *history_path;                       // NULL: the history is not saved

// A new file is readable by the user only; an existing file keeps its mode, which the libraries would change. Returns 0
// or errno.
static int save_history(void) {
    struct stat old;
    const bool exists = !stat(history_path, &old);
    if (exists && !S_ISREG(old.st_mode)) return 0;     // such as /dev/null
    const mode_t usual = umask(077);
    int err = write_history(history_path);
    umask(usual);
    if (!err && exists && chmod(history_path, old.st_mode & 07777)) err = errno;
    return err;
}
#endif

// Called before the first line. history: a file for the typed lines, or NULL.
static void open_lines(const char *history) {
    const bool utf8 = use_utf8();
    (void)history;
#ifdef EDITS_LINES
    edits_lines = utf8 && isatty(0) && isatty(2);
    history_path = history;
    rl_readline_name = "gemma4";
    rl_outstream = stderr;
    rl_catch_signals = 0;
#ifdef USE_READLINE
    rl_getc_function = next_byte;
#endif
    using_history();
    if (history) read_history(history);
    if (!utf8 && isatty(0)) fprintf(stderr, "# no line editing: this system has no UTF-8 locale\n");
#else
    (void)utf8;
#endif
}

// Reads a message. If a line ends in a backslash, the backslash becomes a line break and the next line is appended.
static LineKind read_message(TokText *text) {
    text->n = 0;
    LineKind kind = read_line("> ", text);
    while (kind == LINE_TEXT && text->n && text->s[text->n - 1] == '\\') {
        text->s[text->n - 1] = '\n';
        kind = read_line(". ", text);
        if (kind == LINE_END) kind = LINE_TEXT;
    }
    return kind;
}

// Adds a line to the history, which Up recalls, and saves the history.
static void remember_line(const char *line) {
    (void)line;
#ifdef EDITS_LINES
    if (!isatty(0)) return;
    add_history(line);
    const int err = history_path ? save_history() : 0;
    if (err) {
        fprintf(stderr, "# --history: %s: %s\n", history_path, strerror(err));
        history_path = NULL;
    }
#endif
}

#endif
