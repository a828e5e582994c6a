/* test_terminal.c - the chat as a user sees it, on a pseudoterminal: its prompt, lines, Ctrl-C and Ctrl-D.
 *
 * Run from the top of the repository. test_cli.sh tests chats that need no terminal. The line editor is tested with
 * each library, with tests/lines.c, which make builds. Environment: GEMMA4 (./gemma4), BUILD (build), TMPDIR (/tmp). */
#define _GNU_SOURCE
#include <stdint.h>
#include <sys/stat.h>
#include "test.h"
#include "pty.h"

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
    CHECK(pty_expect(&p, "\n> "), "no prompt after the answer: %s", pty_tail(&p));
    says("What was its name?\n", "\n> ");
    says("/stats\n", "were cached");
    CHECK(pty_expect(&p, "; 4 messages"), "/stats counts no messages: %s", pty_tail(&p));
    says("/help\n", "# /system [TEXT]");
    CHECK(pty_expect(&p, "# /exit"), "/help has no /exit: %s", pty_tail(&p));
    snprintf(line, sizeof line, "/save %s/talk.json\n", tmp);
    says(line, "4 messages saved");
    says("/clear\n", "> ");
    says("/stats\n", "; 0 messages");
    snprintf(line, sizeof line, "/load %s/talk.json\n", tmp);
    says(line, "4 messages loaded from");
    says("one \\\n", ". ");                             // continues on the next line
    says("two " WORLD "\n", "\n> ");
    snprintf(line, sizeof line, "/save %s/lines.json\n", tmp);
    says(line, "6 messages saved");
    says("/exit\n", "");
    ends("/exit", 0);
    snprintf(line, sizeof line, "grep -qF 'one \\ntwo " WORLD "\"' %s/lines.json", tmp);
    CHECK(system(line) == 0, "a line that ends in a backslash is not continued, or characters are lost");
}

static void test_end_of_input(void) {
    if (!start("-n", "8", NULL, NULL)) return;
    says("hi\n", "\n> ");
    says("\004", "");
    ends("Ctrl-D", 0);
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

// The history is kept from one chat to the next, if the build has a line editor.
static void test_history(void) {
    char file[600];
    snprintf(file, sizeof file, "%s/history", tmp);
    const char *argv[] = { gemma4, MODEL, "--temp", "0", "-t", "1", "-n", "4", "--history", file, NULL };
    if (!CHECK(pty_start(&p, argv, PTY_ALL, NULL), "no terminal")) return;
    if (!pty_expect(&p, "/help lists")) {
        CHECK(strstr(p.shows, "--history: this build has no line editing"), "--history: %s", pty_tail(&p));
        ends("--history", 1);
        SKIP("no libedit or readline in this build: --history");
        return;
    }
    CHECK(pty_expect(&p, "> "), "no prompt: %s", pty_tail(&p));
    says("remember me\n", "\n> ");
    says("\004", "");
    ends("--history", 0);
    if (!CHECK(pty_start(&p, argv, PTY_ALL, NULL), "no terminal")) return;
    CHECK(pty_expect(&p, "/help lists") && pty_expect(&p, "> "), "no prompt: %s", pty_tail(&p));
    says("\020", "remember me");                       // Ctrl-P: the previous line
    says("\003", "press Ctrl-C again");
    CHECK(pty_expect(&p, "> "), "no prompt: %s", pty_tail(&p));
    says("\004", "");
    ends("--history again", 0);
}

// ---- the line editor with each library, in several locales -----------------

static bool start_lines(const char *library, const char *file) {
    char program[600];
    const char *build = getenv("BUILD") ? getenv("BUILD") : "build";
    const char *argv[] = { program, file, NULL };
    snprintf(program, sizeof program, "%s/lines-%s", build, library);
    return CHECK(pty_start(&p, argv, PTY_ALL, NULL), "no terminal") &&
           CHECK(pty_expect(&p, "> "), "%s: no prompt: %s", library, pty_tail(&p));
}

// Types a line, in two parts if cut > 0, and waits for a message with one of two ends.
static void types(const char *library, const char *line, size_t cut, const char *want, const char *or) {
    const size_t from = p.at;
    const char *locale = getenv("LC_ALL") ? getenv("LC_ALL") : getenv("LANG") ? getenv("LANG") : "(none)";
    if (!CHECK(pty_send_cut(&p, line, cut) && pty_expect(&p, "numbers: C\r\n") && pty_expect(&p, "> "),
               "%s, locale %s: '%s' is no message: %s", library, locale, line, pty_tail(&p))) return;
    p.shows[p.at - 2] = 0;
    const char *got = strstr(p.shows + from, "got [");
    CHECK(got && (strstr(got, want) || (or && strstr(got, or))), "%s, locale %s: '%s': expected '%s', got: %s", library,
          locale, line, want, got ? got : "");
    p.shows[p.at - 2] = '>';
}

static void test_lines(const char *library) {
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
    };
    const bool edits = strcmp(library, "none") != 0;
    char program[600], file[600];
    struct stat st;
    snprintf(program, sizeof program, "%s/lines-%s", getenv("BUILD") ? getenv("BUILD") : "build", library);
    if (access(program, X_OK)) {
        snprintf(file, sizeof file, "no %s here: lines with it", library);
        SKIP(file);
        return;
    }
    for (size_t k = 0; k < sizeof locales / sizeof *locales; k++) {
        set_locale(locales[k].all, locales[k].lang);
        if (!start_lines(library, NULL)) return;
        for (size_t i = 0; i < (k ? 2 : sizeof lines / sizeof *lines); i++)
            types(library, lines[i].line, lines[i].cut, lines[i].want, lines[i].or);
        if (edits) types(library, "\020\n", 0, k ? "got [ab]" : "got [" GRUEN, NULL);       // Ctrl-P: the previous line
        says("\004", "");
        ends(library, 0);
    }
    snprintf(file, sizeof file, "%s/lines-%s", tmp, library);
    set_locale(NULL, NULL);
    for (int mode = 0600; edits && mode <= 0640; mode += 040) {            // an existing file keeps its mode
        if (!start_lines(library, file)) return;
        types(library, mode == 0600 ? WORLD "\n" : "\020\n", 0, "got [" WORLD "]", NULL);
        says("\004", "");
        ends(library, 0);
        CHECK(!stat(file, &st) && (int)(st.st_mode & 0777) == mode, "%s: expected a history of mode %o, got %o",
              library, (unsigned)mode, (unsigned)st.st_mode & 0777);
        chmod(file, 0640);
    }
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
        test_one_answer();
        test_history();
        test_lines("editline");
        test_lines("readline");
        test_lines("none");
    }
    char command[600];
    snprintf(command, sizeof command, "rm -rf '%s'", tmp);
    return (system(command) != 0) | test_done("terminal");
}
