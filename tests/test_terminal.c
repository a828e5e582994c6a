/* test_terminal.c - the chat as a person sees it: a program at a pseudo-terminal, its prompt, lines, Ctrl-C and Ctrl-D.
 *
 * Run from the top of the repository. Chats that need no terminal are in test_cli.sh.
 * Environment: GEMMA4 (./gemma4), TMPDIR (/tmp). */
#define _GNU_SOURCE
#include <stdint.h>
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

static void test_talk(void) {
    char line[700];
    if (!start("-n", "40", NULL, NULL)) return;
    says("Tell me a story about a fox.\n", "Once upon a time");
    CHECK(pty_expect(&p, "\n> "), "no prompt behind the answer: %s", pty_tail(&p));
    says("What was its name?\n", "\n> ");
    says("/stats\n", "were in the cache");
    CHECK(pty_expect(&p, "; 4 messages"), "/stats counts no messages: %s", pty_tail(&p));
    says("/help\n", "# /system [TEXT]");
    CHECK(pty_expect(&p, "# /exit"), "/help has no /exit: %s", pty_tail(&p));
    snprintf(line, sizeof line, "/save %s/talk.json\n", tmp);
    says(line, "4 messages saved");
    says("/clear\n", "> ");
    says("/stats\n", "; 0 messages");
    snprintf(line, sizeof line, "/load %s/talk.json\n", tmp);
    says(line, "4 messages from");
    says("one \\\n", ". ");                             // goes on in the next line
    says("two\n", "\n> ");
    snprintf(line, sizeof line, "/save %s/lines.json\n", tmp);
    says(line, "6 messages saved");
    says("/exit\n", "");
    ends("/exit", 0);
    snprintf(line, sizeof line, "grep -qF 'one \\ntwo' %s/lines.json", tmp);
    CHECK(system(line) == 0, "a line that ends in a backslash does not go on");
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
    says("\003", "once more ends the chat");           // takes the line back
    CHECK(pty_expect(&p, "> "), "no prompt: %s", pty_tail(&p));
    says("/stats\n", "; 2 messages");
    CHECK(pty_expect(&p, "> "), "no prompt: %s", pty_tail(&p));
    says("\003", "once more ends the chat");
    says("\003", "");
    ends("Ctrl-C twice", 130);
    CHECK(!strstr(p.shows, "no such command"), "Ctrl-C leaves the line: %s", pty_tail(&p));

    // Ctrl-C again and again while it works: whether the answer stops first or not, the program ends.
    if (!start("-n", "8000", "--ignore-eos", NULL)) return;
    says("Tell me a story about a fox.\n", "Once upon");
    for (int i = 0; i < 100 && pty_running(&p); i++) {
        if (!pty_send(&p, "\003")) break;
        poll(NULL, 0, 50);                             // signals that come at once are one
    }
    ends("Ctrl-C again and again", 130);
}

// One answer at a terminal is no chat, and ends with 130 after Ctrl-C.
static void test_one_answer(void) {
    const char *argv[] = { gemma4, MODEL, "-p", "Tell me a story.", "--temp", "0", "-t", "1", "--ignore-eos", "-n", "8000",
                           NULL };
    if (!CHECK(pty_start(&p, argv, PTY_ALL, NULL), "no terminal")) return;
    CHECK(pty_expect(&p, "Once upon"), "no answer: %s", pty_tail(&p));
    pty_send(&p, "\003");
    ends("-p and Ctrl-C", 130);
    CHECK(strstr(p.shows, "stopped: interrupted"), "-p and Ctrl-C: %s", pty_tail(&p));
    const char *piped[] = { gemma4, MODEL, "-n", "4", NULL };             // stdout is no terminal: no chat without -i
    if (!CHECK(pty_start(&p, piped, PTY_IN | PTY_ERR, NULL), "no terminal")) return;
    ends("no prompt", 1);
    CHECK(strstr(p.shows, "-p: expected a prompt"), "no prompt: %s", pty_tail(&p));
}

// Lines are kept from one chat to the next, where the build edits lines.
static void test_history(void) {
    char file[600];
    snprintf(file, sizeof file, "%s/history", tmp);
    const char *argv[] = { gemma4, MODEL, "--temp", "0", "-t", "1", "-n", "4", "--history", file, NULL };
    if (!CHECK(pty_start(&p, argv, PTY_ALL, NULL), "no terminal")) return;
    if (!pty_expect(&p, "/help lists")) {
        CHECK(strstr(p.shows, "--history: this build edits no lines"), "--history: %s", pty_tail(&p));
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
    says("\020", "remember me");                       // Ctrl-P: the line before
    says("\003", "once more");
    CHECK(pty_expect(&p, "> "), "no prompt: %s", pty_tail(&p));
    says("\004", "");
    ends("--history again", 0);
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
    }
    char command[600];
    snprintf(command, sizeof command, "rm -rf '%s'", tmp);
    return (system(command) != 0) | test_done("terminal");
}
