/* test_terminal.c - the chat as a user sees it, on a pseudoterminal: its prompt, lines, commands, Ctrl-C and Ctrl-D,
 * pasted text, completions, colours, progress.
 *
 * Run from the top of the repository. test_cli.sh tests chats that need no terminal, test_lines.c what the line editor
 * draws. tests/lines.c, which make builds, is the editor alone. Environment: GEMMA4 (./gemma4), BUILD (build), TMPDIR
 * (/tmp). */
#define _GNU_SOURCE
#include <stdint.h>
#include <sys/stat.h>
#include "test.h"
#include "pty.h"
#include "screen.h"
#include <locale.h>

#define MODEL "models/gemma4-mini-q8_0.gguf"

static const char *gemma4;
static char tmp[512];
static Pty p;

// Starts a chat with a few more arguments; NULL ends them.
static bool start(const char *a, const char *b, const char *c, const char *d) {
    const char *argv[] = { gemma4, MODEL, "--temp", "0", "-t", "1", a, b, c, d, NULL };
    return CHECK(pty_start(&p, argv, PTY_ALL, NULL), "no terminal") &&
           CHECK(pty_expect(&p, "/help lists the commands") && pty_expect(&p, "> "), "no prompt: %s", pty_tail(&p));
}

// Types a line, and waits for a text.
static bool says(const char *line, const char *expected) {
    return CHECK(pty_send(&p, line) && pty_expect(&p, expected), "after '%s': expected '%s', got: %s", line, expected,
                 pty_tail(&p));
}

static void ends(const char *what, int expected) {
    bool sane;
    const int status = pty_end(&p, &sane);
    CHECK(status == expected, "%s: expected exit status %d, got %d: %s", what, expected, status, pty_tail(&p));
    CHECK(sane, "%s: the terminal is left in another mode", what);
}

// an umlaut, CJK, several emoji joined to one, a combining mark, Hebrew, Arabic
#define GRUEN  "gr\xc3\xbcn"
#define CJK    "\xe4\xb8\xad\xe6\x96\x87"
#define EMOJI  "\xf0\x9f\x98\x80"
#define FAMILY "\xf0\x9f\x91\xa8\xe2\x80\x8d\xf0\x9f\x91\xa9\xe2\x80\x8d\xf0\x9f\x91\xa7"
#define ACUTE  "\xcc\x81"
#define SHALOM "\xd7\xa9\xd7\x9c\xd7\x95\xd7\x9d"
#define ARABIC "\xd8\xb9\xd8\xb1\xd8\xa8\xd9\x8a"
#define WORLD  GRUEN " " CJK " " EMOJI " " FAMILY " e" ACUTE " " SHALOM " " ARABIC

// The locale that programs are started with; NULL: the variable is not set.
static void set_locale(const char *all, const char *lang) {
    unsetenv("LC_CTYPE");
    if (all ? setenv("LC_ALL", all, 1) : unsetenv("LC_ALL")) exit(1);
    if (lang ? setenv("LANG", lang, 1) : unsetenv("LANG")) exit(1);
}

static void test_talk(void) {
    char line[700];
    set_locale("C", NULL);
    if (!start("-n", "40", NULL, NULL)) return;
    says("Tell me a story about a fox.\n", "Once upon a time");
    CHECK(pty_expect(&p, "mini> "), "no prompt after the answer: %s", pty_tail(&p));
    says("What was its name?\n", "mini> ");
    says("/stats\n", "were cached");
    CHECK(pty_expect(&p, "; 4 messages"), "/stats counts no messages: %s", pty_tail(&p));
    says("/help\n", "# /system  [TEXT]");
    CHECK(pty_expect(&p, "# /exit"), "/help has no /exit: %s", pty_tail(&p));
    snprintf(line, sizeof line, "/save %s/talk.json\n", tmp);
    says(line, "4 messages saved");
    says("/clear\n", "> ");
    says("/stats\n", "; 0 messages");
    snprintf(line, sizeof line, "/load %s/talk.json\n", tmp);
    says(line, "4 messages loaded from");
    says("one \\\n", ". ");                             // continues on the next line
    says("two " WORLD "\n", "mini> ");
    snprintf(line, sizeof line, "/save %s/lines.json\n", tmp);
    says(line, "6 messages saved");
    says("/exit\n", "");
    ends("/exit", 0);
    snprintf(line, sizeof line, "grep -qF 'one \\ntwo " WORLD "\"' %s/lines.json", tmp);
    CHECK(system(line) == 0, "a line that ends in a backslash is not continued, or characters are lost");
}

static void test_end_of_input(void) {
    if (!start("-n", "8", NULL, NULL)) return;
    says("hi\n", "mini> ");
    says("\004", "");
    ends("Ctrl-D", 0);
    set_locale("C.UTF-8", NULL);
    for (int edits = 0; edits < 2; edits++) {          // while the model is loaded
        pty_term = edits ? "xterm" : "dumb";
        pty_early = "\004";
        if (start("-n", "8", NULL, NULL)) ends("Ctrl-D before the first line", 0);
        pty_early = "hi\n";
        if (start("-n", "8", NULL, NULL)) {
            says("", "8 tokens, ");
            CHECK(pty_expect(&p, "mini> "), "no prompt: %s", pty_tail(&p));
            says("\004", "");
            ends("a line before the first one", 0);
        }
    }
    pty_early = NULL;
    pty_term = "dumb";
}

static void test_interrupt(void) {
    if (!start("-n", "8000", "--ignore-eos", NULL)) return;
    says("Tell me a story about a fox.\n", "Once upon");
    says("\003", "> ");                                // ends the answer, not the chat
    says("/stats\n", "stopped: interrupted");
    CHECK(pty_expect(&p, "; 2 messages"), "the answer so far is not kept: %s", pty_tail(&p));
    CHECK(pty_expect(&p, "> "), "no prompt: %s", pty_tail(&p));
    says("/nothing", "/nothing");
    says("\003", "press Ctrl-C again to quit");         // removes the line
    CHECK(pty_expect(&p, "> "), "no prompt: %s", pty_tail(&p));
    says("/stats\n", "; 2 messages");
    CHECK(pty_expect(&p, "> "), "no prompt: %s", pty_tail(&p));
    says("\003", "press Ctrl-C again to quit");
    says("\003", "");
    ends("Ctrl-C twice", 130);
    CHECK(!strstr(p.shows, "unknown command"), "Ctrl-C leaves the line: %s", pty_tail(&p));

    // Repeated Ctrl-C during an answer: the program ends, whether the answer stops first or not.
    if (!start("-n", "8000", "--ignore-eos", NULL)) return;
    says("Tell me a story about a fox.\n", "Once upon");
    for (int i = 0; i < 1200 && pty_running(&p); i++) {
        if (!pty_send(&p, "\003")) break;
        poll(NULL, 0, 50);                             // signals at the same time would be merged
    }
    ends("Ctrl-C again and again", 130);
}

// Keys typed during an answer wait for the next line, and are not shown in the answer. Every end of the program leaves
// the terminal as it was.
static void test_keys_during_answer(void) {
    pty_term = "xterm";
    if (start("-n", "60", "--ignore-eos", NULL)) {
        says("Tell me a story about a fox.\n", "Once upon");
        const size_t from = p.at;
        says("/statt\177", "mini> ");
        const char *typed = strstr(p.shows + from, "/st"), *prompt = strstr(p.shows + from, "mini> ");
        CHECK(!typed || typed > prompt, "what was typed is in the answer: %s", pty_tail(&p));
        CHECK(pty_expect(&p, "/stat"), "what was typed is gone: %s", pty_tail(&p));
        says("s\n", "; 2 messages");
        says("", "mini> ");
        says("Tell me a story about a fox.\n", "Once upon");
        says("\004", "; prompt ");                     // after the statistics of the answer the chat ends
        ends("Ctrl-D during an answer", 0);
    }
    if (start("-n", "8000", "--ignore-eos", NULL)) {
        says("Tell me a story about a fox.\n", "Once upon");
        for (int i = 0; i < 1200 && pty_running(&p); i++) {
            if (!pty_send(&p, "\003")) break;
            poll(NULL, 0, 50);
        }
        ends("Ctrl-C again and again, with edited lines", 130);
    }
    pty_term = "dumb";
}

// A single answer on a terminal is not a chat and ends with status 130 after Ctrl-C.
static void test_one_answer(void) {
    const char *argv[] = { gemma4, MODEL, "-p", "Tell me a story.", "--temp", "0", "-t", "1", "--ignore-eos", "-n",
                           "8000", NULL };
    if (!CHECK(pty_start(&p, argv, PTY_ALL, NULL), "no terminal")) return;
    CHECK(pty_expect(&p, "Once upon"), "no answer: %s", pty_tail(&p));
    pty_send(&p, "\003");
    ends("-p and Ctrl-C", 130);
    CHECK(strstr(p.shows, "stopped: interrupted"), "-p and Ctrl-C: %s", pty_tail(&p));
    const char *piped[] = { gemma4, MODEL, "-n", "4", NULL };    // stdout is not a terminal: no chat without -i
    if (!CHECK(pty_start(&p, piped, PTY_IN | PTY_ERR, NULL), "no terminal")) return;
    ends("no prompt", 1);
    CHECK(strstr(p.shows, "-p: expected a prompt"), "no prompt: %s", pty_tail(&p));
}

// The history is kept from one chat to the next.
static void test_history(void) {
    char file[600];
    snprintf(file, sizeof file, "%s/history", tmp);
    pty_term = "xterm";
    if (start("-n", "4", "--history", file)) {
        says("remember me\n", "; prompt ");
        says("", "mini> ");
        says("\004", "");
        ends("--history", 0);
    }
    if (start("-n", "4", "--history", file)) {
        says("\020", "remember me");                   // Ctrl-P: the previous line
        says("\003", "press Ctrl-C again");
        says("", "mini> ");                            // only then Ctrl-D is a key, and not the driver's
        says("\004", "");
        ends("--history again", 0);
    }
    pty_term = "dumb";
}

// Pasted lines are one message; Tab completes; /save asks; ~ is the home directory; the model is named in the prompt.
static void test_editor(void) {
    char line[1200];
    struct stat st;
    pty_term = "xterm";
    pty_columns = 40;
    setenv("HOME", tmp, 1);
    set_locale("C", NULL);
    if (!start("-n", "4", "-sys", "Be kind.")) return;
    CHECK(strstr(p.shows, "Gemma 4 mini> "), "the model's name is not in the prompt: %s", pty_tail(&p));
    says("\033[200~one\rtwo\r\tthree " WORLD "\r\033[201~", "three");
    says("\r", "; prompt ");
    says("\"\"\"four\r", "");
    says("five\r", "");
    says("\"\"\"\r", "; prompt ");
    says("/sa\t", "/save ");
    says("~/kept.json\r", "4 messages saved in ");     // the system prompt does not count
    snprintf(line, sizeof line, "grep -qF 'one\\ntwo\\n\\tthree " WORLD "\"' %s/kept.json && grep -qF '\"four\\nfive\"' "
             "%s/kept.json", tmp, tmp);
    CHECK(system(line) == 0, "the pasted lines are not one message, or characters are lost");
    says("/save ~/ke\t", "kept.json");
    says("\r", "exists; replace it? (y/n) ");
    says("n\r", "not saved");
    says("/save ~/kept.json\r", "exists; replace it? (y/n) ");
    says("y\r", "4 messages saved");
    says("/clear\r", "# conversation cleared");
    says("/system Be short.\r", "# system prompt set");
    says("/show\r", "# system prompt: \"Be short.\"");
    says("/system\r", "# system prompt removed");
    says("/set temp 0.5\r", "# temp is 0.5");
    says("/set parameter num_predict 2\r", "# num_predict is 2");
    says("/temp 0\r", "# temp is 0");
    says("/set heat 1\r", "expected temp, top-k");
    says("/temp hot\r", "expected a number from 0 to 1000, got 'hot'");
    says("/think\r", "# think is on");
    says("/think off\r", "# think is off");
    says("/verbose\r", "# verbose is on");
    says("hi\r", "2 tokens generated");
    says("/set quiet\r", "# verbose is off");
    says("/regen\r", "2 tokens, ");
    says("/?\r", "/bye");
    says("/bye\r", "");
    ends("/bye", 0);
    snprintf(line, sizeof line, "%s/kept.json", tmp);
    CHECK(!stat(line, &st), "~ is not the home directory");
    pty_columns = 0;
    pty_term = "dumb";
}

// What the terminal shows of all that a program has written.
static char *shown(int columns) {
    static Screen screen;
    free(screen.row);
    screen_open(&screen, columns, 50);
    screen_put(&screen, p.shows, p.n);
    CHECK(!screen.unknown, "an unknown escape sequence");
    return screen_text(&screen, 0, screen.n - 1, columns);
}

// One answer on a terminal: progress bars leave nothing behind in any width, thinking is counted and then erased.
static void test_progress(int columns, const char *want) {
    const char *argv[] = { gemma4, MODEL, "-p", "What is 22 minus 2?", "--think", "--temp", "0", "-t", "1", NULL };
    pty_columns = columns;
    pty_term = "xterm";
    if (CHECK(pty_start(&p, argv, PTY_ALL, NULL), "no terminal")) {
        ends("--think", 0);
        CHECK(strstr(p.shows, "# prompt  ") && strstr(p.shows, "# thinking.. "), "no progress: %s", pty_tail(&p));
        char *text = shown(columns), *last = strstr(text, "\n# 25 tokens, ");
        CHECK(last && strstr(last, " tok/s; prompt 25, "), "no line after the answer: %s", text);
        if (last) last[1] = 0;                         // its figures differ
        CHECK(!strcmp(text, want), "%d columns: expected '%s', got '%s'", columns, want, text);
        free(text);
    }
    pty_columns = 0;
    pty_term = "dumb";
}

// --help fits the terminal: in a narrow one the text is below the names.
static void test_help(int columns, int indent) {
    const char *argv[] = { gemma4, "serve", "--help", NULL };
    int n = 0, longest = 0;
    pty_columns = columns;
    if (!CHECK(pty_start(&p, argv, PTY_ALL, NULL), "no terminal")) return;
    ends("--help", 0);
    for (const char *line = p.shows; *line; line += strcspn(line, "\n"), line += *line == '\n') {
        const int length = (int)strcspn(line, "\r\n"), spaces = (int)strspn(line, " ");
        if (spaces != indent) continue;
        n++;
        if (length > longest) longest = length;
    }
    CHECK(n > 20 && longest <= columns && longest > columns - 20, "--help in %d columns: %d lines of text, up to %d long",
          columns, n, longest);
    pty_columns = 0;
}

static bool has_colors(const char *color, const char *term, const char *no_color) {
    const char *argv[] = { gemma4, MODEL, "-p", "What is 22 minus 2?", "--think", "--show-thoughts", "--temp", "0", "-t",
                           "1", "--color", color, NULL };
    pty_term = term;
    if (no_color ? setenv("NO_COLOR", no_color, 1) : unsetenv("NO_COLOR")) exit(1);
    if (!CHECK(pty_start(&p, argv, PTY_ALL, NULL), "no terminal")) return false;
    ends("--color", 0);
    CHECK(strstr(p.shows, "# thought:") && strstr(p.shows, "\n# end of the thought\r\n22 - 2 = 20\r\n"),
          "a thought is not closed: %s", p.shows);
    unsetenv("NO_COLOR");
    pty_term = "dumb";
    return strstr(p.shows, "\033[2m") && strstr(p.shows, "\033[0m");
}

static void test_colors(void) {
    CHECK(has_colors("auto", "xterm", NULL), "no colours on a terminal: %s", p.shows);
    CHECK(!has_colors("auto", "xterm", "1"), "NO_COLOR: colours: %s", p.shows);
    CHECK(has_colors("on", "xterm", "1"), "--color on: no colours: %s", p.shows);
    CHECK(!has_colors("off", "xterm", NULL), "--color off: colours: %s", p.shows);
    CHECK(!has_colors("auto", "dumb", NULL), "TERM=dumb: colours: %s", p.shows);
}

// ---- the line editor alone, and the terminal driver's, in several locales -----------------

static bool start_lines(const char *file) {
    char program[600];
    const char *build = getenv("BUILD") ? getenv("BUILD") : "build";
    const char *argv[] = { program, file, NULL };
    snprintf(program, sizeof program, "%s/lines", build);
    return CHECK(pty_start(&p, argv, PTY_ALL, NULL), "no terminal") &&
           CHECK(pty_expect(&p, "> "), "TERM=%s: no prompt: %s", pty_term, pty_tail(&p));
}

// Types a line, in two parts if cut > 0, and waits for a message with one of two ends.
static void types(const char *line, size_t cut, const char *want, const char *or) {
    const size_t from = p.at;
    const char *locale = getenv("LC_ALL") ? getenv("LC_ALL") : getenv("LANG") ? getenv("LANG") : "(none)";
    if (!CHECK(pty_send_cut(&p, line, cut) && pty_expect(&p, "numbers: C\r\n") && pty_expect(&p, "> "),
               "TERM=%s, locale %s: '%s' is no message: %s", pty_term, locale, line, pty_tail(&p))) return;
    p.shows[p.at - 2] = 0;
    const char *got = strstr(p.shows + from, "got [");
    CHECK(got && (strstr(got, want) || (or && strstr(got, or))), "TERM=%s, locale %s: '%s': expected '%s', got: %s",
          pty_term, locale, line, want, got ? got : "");
    p.shows[p.at - 2] = '>';
}

static void test_lines(bool edits) {
    static const struct { const char *all, *lang; } locales[] = {
        { "C", NULL }, { "POSIX", "C.UTF-8" }, { NULL, NULL }, { "C.UTF-8", NULL }, { "xx_YY.UTF-8", NULL },
        { NULL, "xx_YY.UTF-8" } };
    static const struct { const char *line; size_t cut; const char *want, *or; } lines[] = {
        { WORLD "\n", 0, "got [" WORLD "]", NULL },
        { "a\xc3\xbc\x7f" "b\n", 0, "got [ab]", NULL },                      // Backspace
        { "a" CJK "\x7f" "b\n", 0, "got [a\xe4\xb8\xad" "b]", NULL },
        { "a" EMOJI "\x7f" "b\n", 0, "got [ab]", NULL },
        { "ae" ACUTE "\x7f" "b\n", 0, "got [aeb]", "got [ab]" },            // erases the mark, or the whole character
        { "a\xc3\xbc" "b\n", 2, "got [a\xc3\xbc" "b]", NULL },               // arrives in parts
        { "a" EMOJI "b\n", 2, "got [a" EMOJI "b]", NULL },
        { "a" EMOJI "b\n", 4, "got [a" EMOJI "b]", NULL },
        { "a\xff" "b\x80\xc3(d\n", 0, "(d]", NULL },                         // not UTF-8
        { "a\xf0\x9f" "b\n", 0, "b]", NULL },
        { "a\xed\xa0\x80\xc0\xaf" "b\n", 0, "b]", NULL },
        { "a\xc3\n", 0, "got [a", NULL },
        { WORLD "\n", 0, "got [" WORLD "]", NULL },                           // the next line is correct
        { GRUEN "\\\n" CJK "\n", 0, "got [" GRUEN "\r\n" CJK "]", NULL },
        { "\"\"\"" GRUEN "\n" CJK "\"\"\"\n", 0, "got [" GRUEN "\r\n" CJK "]", NULL },
        { "\"\"\"one line\"\"\"\n", 0, "got [one line]", NULL },
    };
    char file[600];
    struct stat st;
    pty_term = edits ? "xterm" : "dumb";
    for (size_t k = 0; k < sizeof locales / sizeof *locales; k++) {
        set_locale(locales[k].all, locales[k].lang);
        if (!start_lines(NULL)) return;
        for (size_t i = 0; i < (k ? 2 : sizeof lines / sizeof *lines); i++)
            types(lines[i].line, lines[i].cut, lines[i].want, lines[i].or);
        if (edits) types("\020\n", 0, k ? "got [ab]" : "got [one line", NULL);            // Ctrl-P: the previous line
        says("\004", "");
        ends("lines", 0);
    }
    snprintf(file, sizeof file, "%s/lines", tmp);
    set_locale(NULL, NULL);
    for (int mode = 0600; edits && mode <= 0640; mode += 040) {            // an existing file keeps its mode
        if (!start_lines(file)) return;
        types(mode == 0600 ? WORLD "\\\nmore\n" : "\020\n", 0, "got [" WORLD "\r\nmore]", NULL);
        says("\004", "");
        ends("lines", 0);
        CHECK(!stat(file, &st) && (int)(st.st_mode & 0777) == mode, "expected a history of mode %o, got %o",
              (unsigned)mode, (unsigned)st.st_mode & 0777);
        chmod(file, 0640);
    }
    pty_term = "dumb";
}

// The terminal gets another width while a line is edited: the line is drawn again, and after the program was
// stopped too.
static void test_resize(void) {
    static char line[200];
    memset(line, 'x', 150);
    strcpy(line + 150, "end");
    pty_term = "xterm";
    pty_columns = 200;
    if (!start_lines(NULL)) return;
    says(line, "end");
    for (int columns = 40; columns <= 200; columns += 160) {
        pty_resize(&p, columns);
        CHECK(pty_expect(&p, "end"), "%d columns: the line is not drawn again: %s", columns, pty_tail(&p));
    }
    int status = 0;
    kill(p.pid, SIGSTOP);                              // as Ctrl-Z does where a shell can go on with it
    CHECK(waitpid(p.pid, &status, WUNTRACED) == p.pid && WIFSTOPPED(status), "it does not stop");
    kill(p.pid, SIGCONT);
    CHECK(pty_expect(&p, "end"), "after a stop: the line is not drawn again: %s", pty_tail(&p));
    says("!\r", "end!]");
    says("\033[D\033[C\t\033[3~\033[200~/x\ty\033[201~\r", "got [/x\ty]");       // keys without effect
    says("/s\t", "/save  /set  /show");
    says("\003", "interrupted");
    says("", "> ");
    says("\004", "");
    ends("another width", 0);
    pty_columns = 0;
    pty_term = "dumb";
}

int main(void) {
    const char *base = getenv("TMPDIR") && *getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp";
    gemma4 = getenv("GEMMA4") ? getenv("GEMMA4") : "./gemma4";
    snprintf(tmp, sizeof tmp, "%.400s/gemma4-test-XXXXXX", base);
    if (access(gemma4, X_OK) || access(MODEL, R_OK)) {
        SKIP("no gemma4 to run, or no model");
        return test_done("terminal");
    }
    if (!mkdtemp(tmp)) return 1;
    const char *probe[] = { "true", NULL };
    if (!pty_start(&p, probe, PTY_ALL, NULL)) {
        SKIP("no terminal to be had");
    } else {
        pty_end(&p, NULL);
        test_talk();
        test_end_of_input();
        test_interrupt();
        test_keys_during_answer();
        test_one_answer();
        test_history();
        test_editor();
        setlocale(LC_CTYPE, "C.UTF-8");
        test_progress(80, "# Gemma 4 mini (Q8_0) on cpu, context 8192\n22 - 2 = 20\n");
        test_progress(30, "# Gemma 4 mini (Q8_0) on cpu, context 8192\n22 - 2 = 20\n");
        test_colors();
        test_help(50, 6);
        test_help(110, 31);
        test_lines(true);
        test_lines(false);
        test_resize();
    }
    char command[600];
    snprintf(command, sizeof command, "rm -rf '%s'", tmp);
    return (system(command) != 0) | test_done("terminal");
}
