/* pty.h - runs a program on a pseudoterminal: a test types input and reads the output.
 *
 * Call pty_start, then pty_send and pty_expect, then pty_end. pty_expect searches only after the last match, so a test
 * reads like a conversation. Nothing waits longer than a minute (PTY_PATIENCE); then the program is killed. */
#ifndef PTY_H
#define PTY_H
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

#ifndef PTY_PATIENCE
#define PTY_PATIENCE 60                                // seconds
#endif
static const char *pty_term = "dumb";                 // TERM of the programs that are started
static int pty_columns;                               // of their terminals; 0: not known
static const char *pty_early;                         // is typed before they start; NULL: nothing

enum { PTY_IN = 1, PTY_OUT = 2, PTY_ERR = 4, PTY_ALL = 7 };

typedef struct {
    int    fd, side;           // the test's side; the program's side, kept open so that no output is lost
    pid_t  pid;
    size_t n, at;              // bytes of output; end of the last match
    struct termios before;
    char   shows[1 << 18];     // the output and a NUL
} Pty;

static inline double pty_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// Starts a program with some of its standard files on a new terminal. Otherwise input is /dev/null, and output goes to
// a file or, if out is NULL, to /dev/null. False: no terminal is available.
static inline bool pty_start(Pty *p, const char *const argv[], int on_terminal, const char *out) {
    memset(p, 0, sizeof *p);
    p->fd = posix_openpt(O_RDWR | O_NOCTTY);
    if (p->fd < 0) return false;
    const char *name = grantpt(p->fd) || unlockpt(p->fd) ? NULL : ptsname(p->fd);
    p->side = name ? open(name, O_RDWR | O_NOCTTY) : -1;
    if (p->side < 0 || tcgetattr(p->side, &p->before)) {
        close(p->fd);
        return false;
    }
    fflush(stdout);
    if (pty_early && write(p->fd, pty_early, strlen(pty_early)) < 0) return false;
    if (pty_columns) ioctl(p->fd, TIOCSWINSZ, &(struct winsize){ .ws_col = (unsigned short)pty_columns, .ws_row = 50 });
    p->pid = fork();
    if (p->pid) return p->pid > 0;
    const int null = open("/dev/null", O_RDONLY), file = open(out ? out : "/dev/null", O_WRONLY | O_CREAT | O_TRUNC,
                                                              0600);
    const int other[3] = { null, file, file };
    signal(SIGINT, SIG_DFL);
    setsid();
    ioctl(p->side, TIOCSCTTY, 0);                      // so that Ctrl-C on this terminal reaches the program
    setenv("TERM", pty_term, 1);
    for (int i = 0; i < 3; i++)
        if (dup2(on_terminal >> i & 1 ? p->side : other[i], i) < 0) _exit(126);
    close(p->side);
    close(p->fd);
    execvp(argv[0], (char *const *)(uintptr_t)argv);
    _exit(127);
}

// Reads output for at most the given time. False: timeout.
static inline bool pty_read(Pty *p, double wait) {
    struct pollfd ready = { .fd = p->fd, .events = POLLIN };
    if (p->n >= sizeof p->shows - 1 || poll(&ready, 1, (int)(wait * 1000)) <= 0) return false;
    const ssize_t got = read(p->fd, p->shows + p->n, sizeof p->shows - 1 - p->n);
    if (got <= 0) return false;
    p->n += (size_t)got;
    p->shows[p->n] = 0;
    return true;
}

static inline bool pty_running(const Pty *p) {
    siginfo_t info = { 0 };
    return waitid(P_PID, (id_t)p->pid, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == 0;
}

// The last part of the output, for messages.
static inline const char *pty_tail(const Pty *p) { return p->shows + (p->n > 600 ? p->n - 600 : 0); }

// Waits until the output after the last match contains a text. A line break is "\r\n" in a terminal's output.
static inline bool pty_expect(Pty *p, const char *text) {
    for (const double end = pty_seconds() + PTY_PATIENCE; ; ) {
        const char *found = strstr(p->shows + p->at, text);
        if (found) {
            p->at = (size_t)(found - p->shows) + strlen(text);
            return true;
        }
        const bool running = pty_running(p);
        if (!pty_read(p, 0.1) && !running) return false;
        if (pty_seconds() > end || p->n == sizeof p->shows - 1) return false;
    }
}

static inline bool pty_send(Pty *p, const char *text) {
    return write(p->fd, text, strlen(text)) == (ssize_t)strlen(text);
}

// Types a text in two parts; the second after the program has read the first.
static inline bool pty_send_cut(Pty *p, const char *text, size_t at) {
    if (write(p->fd, text, at) != (ssize_t)at) return false;
    for (const double end = pty_seconds() + PTY_PATIENCE; pty_seconds() < end; pty_read(p, 0.01)) {
        int waiting = 0;                               // until the terminal driver has no more input for the program
        if (ioctl(p->side, FIONREAD, &waiting) || !waiting) return pty_send(p, text + at);
    }
    return false;
}

// Gives the terminal another width, of which the program is told by a signal.
static inline void pty_resize(Pty *p, int columns) {
    ioctl(p->fd, TIOCSWINSZ, &(struct winsize){ .ws_col = (unsigned short)columns, .ws_row = 50 });
}

// Waits until the program ends. Returns the exit status, or 1000 + the signal that killed it. *sane: the terminal has
// its old settings; may be NULL.
static inline int pty_end(Pty *p, bool *sane) {
    int status = -1;
    for (const double end = pty_seconds() + PTY_PATIENCE; waitpid(p->pid, &status, WNOHANG) == 0; ) {
        if (pty_seconds() > end) kill(p->pid, SIGKILL);
        pty_read(p, 0.05);
    }
    while (pty_read(p, 0.05)) {}
    struct termios after;
    const bool same = !tcgetattr(p->side, &after) && after.c_lflag == p->before.c_lflag &&
                      after.c_iflag == p->before.c_iflag && after.c_oflag == p->before.c_oflag;
    if (sane) *sane = same;
    close(p->side);
    close(p->fd);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}
#endif
