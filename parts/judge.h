/* judge.h - whether an answer is right: a text, a number, a choice, a formula, a program that has to pass tests.
 *
 * Uses base.h and tokenizer.h (texts). Begin with judge_text() and judge_program().
 *   [1] Texts    [2] A confined child    [3] Programs */
#ifndef JUDGE_H
#define JUDGE_H

#include <ftw.h>
#include <sys/resource.h>
#include <sys/wait.h>
#ifdef __linux__
#include <sys/prctl.h>
#include <sys/syscall.h>
#if __has_include(<linux/landlock.h>)
#include <linux/landlock.h>
#endif
#else
extern char **environ;
#endif

// ==== [1] Texts =====================================================================================================

typedef enum { JUDGE_NONE, JUDGE_EXACT, JUDGE_NUMBER, JUDGE_CHOICE, JUDGE_MATH, JUDGE_CODE, JUDGE_KINDS } JudgeKind;
static const char *const judge_names[] = { "none", "exact", "number", "choice", "math", "code" };

typedef enum { NOT_JUDGED, RIGHT, WRONG, VERDICTS } Verdict;
static const char *const verdict_names[] = { "", "right", "wrong" };

static bool is_digit(char c) { return c >= '0' && c <= '9'; }
static bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

// What follows the last occurrence of a text; s NULL: there is none. Letters of any case match small ones.
static TokStr after_last(TokStr s, const char *text) {
    const size_t n = strlen(text);
    for (size_t i = s.n + 1; i-- > 0; )
        if (i + n <= s.n && !strncasecmp(s.s + i, text, n)) return (TokStr){ s.s + i + n, s.n - i - n };
    return (TokStr){ NULL, 0 };
}

// The contents of the last \boxed{..}; s NULL: there is none.
static TokStr last_boxed(TokStr s) {
    const TokStr at = after_last(s, "\\boxed{");
    int open = 1;
    for (size_t i = 0; i < at.n; i++) {
        open += (at.s[i] == '{') - (at.s[i] == '}');
        if (!open) return (TokStr){ at.s, i };
    }
    return (TokStr){ NULL, 0 };
}

// Reads the first number from byte *at on: 42, -1.5, .5, 1,234,567. *at: the byte after it. False: there is none.
static bool next_number(TokStr s, size_t *at, double *out) {
    char word[64];
    size_t n = 0, i = *at;
    bool point = false;
    while (i < s.n && !is_digit(s.s[i])) i++;
    if (i == s.n) return false;
    size_t before = i;
    if (before > *at && s.s[before - 1] == '.') before--, point = true;
    const char far = before > 1 ? s.s[before - 2] : ' ';               // before a sign, which may be a minus
    if (before && s.s[before - 1] == '-' && !is_letter(far) && !is_digit(far)) word[n++] = '-';
    if (point) word[n++] = '.';
    for (; i < s.n && n + 1 < sizeof word; i++) {
        size_t digits = 0;                             // that follow
        while (i + 1 + digits < s.n && is_digit(s.s[i + 1 + digits])) digits++;
        if (s.s[i] == ',' && digits == 3 && !point) continue;
        const bool is_point = s.s[i] == '.' && digits && !point;
        if (!is_digit(s.s[i]) && !is_point) break;
        point |= is_point;
        word[n++] = s.s[i];
    }
    word[n] = 0;
    *at = i;
    *out = strtod(word, NULL);
    return true;
}

// The number that a text ends with: in \boxed{}, or after "####", or the last one.
static bool final_number(TokStr s, double *out) {
    TokStr part = last_boxed(s);
    size_t at = 0;
    bool found = false;
    if (!part.s) part = after_last(s, "####");
    if (part.s) return next_number(part, &at, out);
    while (next_number(s, &at, out)) found = true;
    return found;
}

static bool same_number(double a, double b) { return fabs(a - b) <= 1e-9 * fmax(1, fabs(b)); }

// The letter, A to J, that stands alone in a text; an article ("A cat") does not count. 0: there is none.
static char lone_letter(TokStr s) {
    for (size_t i = 0; i < s.n; i++) {
        const char before = i ? s.s[i - 1] : ' ', after = i + 1 < s.n ? s.s[i + 1] : '.';
        const bool article = s.s[i] == 'A' && after == ' ' && i + 2 < s.n && s.s[i + 2] >= 'a' && s.s[i + 2] <= 'z';
        if (s.s[i] < 'A' || s.s[i] > 'J' || is_letter(before) || is_digit(before) || article) continue;
        if (!is_letter(after) && !is_digit(after) && after != '\'') return s.s[i];
    }
    return 0;
}

// The choice of an answer: in \boxed{}, or after the last "answer", or the first letter that stands alone. 0: none.
static char final_choice(TokStr s) {
    const TokStr parts[] = { last_boxed(s), after_last(s, "answer"), s };
    for (int i = 0; i < 3; i++) {
        const char letter = parts[i].s ? lone_letter(parts[i]) : 0;
        if (letter) return letter;
    }
    return 0;
}

// A formula without what does not change its meaning: spaces, sizes of brackets, dollars, the end of a sentence.
static void plain_formula(TokStr s, TokText *out) {
    static const char *const rules[][2] = {
        { "\\left", "" }, { "\\right", "" }, { "\\!", "" }, { "\\,", "" }, { "\\;", "" }, { "\\ ", "" }, { "\\$", "" },
        { "\\%", "" }, { "%", "" }, { "$", "" }, { " ", "" }, { "\n", "" }, { "\\dfrac", "\\frac" },
        { "\\tfrac", "\\frac" }, { "^{\\circ}", "" }, { "^\\circ", "" }, { "\\text", "" }, { "\\mathrm", "" } };
    out->n = 0;
    for (size_t i = 0; i < s.n; ) {
        size_t k = 0;
        for (; k < sizeof rules / sizeof *rules; k++)
            if (s.n - i >= strlen(rules[k][0]) && !memcmp(s.s + i, rules[k][0], strlen(rules[k][0]))) break;
        const bool ruled = k < sizeof rules / sizeof *rules;
        if (!tok_text_append(out, ruled ? rules[k][1] : s.s + i, ruled ? strlen(rules[k][1]) : 1))
            die("out of memory for a formula");
        i += ruled ? strlen(rules[k][0]) : 1;
    }
    while (out->n && out->s[out->n - 1] == '.') out->n--;
}

static bool whole_number(TokStr s, double *out) {      // the text is a number and nothing else
    size_t at = 0;
    const bool begins = s.n && (is_digit(*s.s) || *s.s == '-' || *s.s == '.');
    return begins && next_number(s, &at, out) && at == s.n && (*s.s != '-' || *out <= 0);
}

// Compares the last \boxed{} of an answer with a formula: as text, or as numbers.
static bool same_formula(TokStr want, TokStr got) {
    TokText a = { 0 }, b = { 0 };
    double x, y;
    plain_formula(want, &a);
    plain_formula(got, &b);
    const TokStr s = { a.s, a.n }, t = { b.s, b.n };
    const bool same = (s.n == t.n && s.n && !memcmp(s.s, t.s, s.n)) ||
                      (whole_number(s, &x) && whole_number(t, &y) && same_number(x, y));
    tok_text_free(&a);
    tok_text_free(&b);
    return same;
}

// Judges the text of an answer by the one that is wanted. Not for JUDGE_CODE.
static Verdict judge_text(JudgeKind kind, TokStr want, TokStr got) {
    const TokStr a = tok_trim(want), b = tok_trim(got), formula = last_boxed(a).s ? last_boxed(a) : a;
    double x, y;
    bool right = false;
    switch (kind) {
    case JUDGE_EXACT: right = a.n == b.n && (!a.n || !memcmp(a.s, b.s, a.n)); break;
    case JUDGE_NUMBER: right = final_number(a, &x) && final_number(b, &y) && same_number(y, x); break;
    case JUDGE_CHOICE: right = final_choice(b) && final_choice(b) == final_choice(a); break;
    case JUDGE_MATH: right = last_boxed(b).s && same_formula(formula, last_boxed(b)); break;
    default: return NOT_JUDGED;
    }
    return right ? RIGHT : WRONG;
}

// ==== [2] A confined child ==========================================================================================
// What a model wrote may do anything. It runs as a child with limits of time, memory and files, in a folder of its own,
// where the system allows it without a network and without writing anywhere else. It can read what the user can read.

enum { CODE_SECONDS = 10, CODE_WALL_SECONDS = 30, CODE_MIB = 1024, CODE_FILE_MIB = 16, CODE_FILES = 64,
       CODE_PROCESSES = 64 };
enum { NO_NETWORK = 1, NO_WRITES = 2 };                // what a child may not use; NO_WRITES: outside its folder

// From now on this process changes files in the folder alone. False: the system cannot do that.
static bool write_only_in(const char *folder) {
#if defined(LANDLOCK_ACCESS_FS_MAKE_SYM) && defined(SYS_landlock_create_ruleset)
    const uint64_t writing = LANDLOCK_ACCESS_FS_WRITE_FILE | LANDLOCK_ACCESS_FS_REMOVE_DIR |
        LANDLOCK_ACCESS_FS_REMOVE_FILE | LANDLOCK_ACCESS_FS_MAKE_CHAR | LANDLOCK_ACCESS_FS_MAKE_DIR |
        LANDLOCK_ACCESS_FS_MAKE_REG | LANDLOCK_ACCESS_FS_MAKE_SOCK | LANDLOCK_ACCESS_FS_MAKE_FIFO |
        LANDLOCK_ACCESS_FS_MAKE_BLOCK | LANDLOCK_ACCESS_FS_MAKE_SYM;
    const struct landlock_ruleset_attr all = { .handled_access_fs = writing };
    const int rules = (int)syscall(SYS_landlock_create_ruleset, &all, sizeof all, 0);
    if (rules < 0) return false;
    const struct landlock_path_beneath_attr own = { .allowed_access = writing,
                                                    .parent_fd = open(folder, O_PATH | O_CLOEXEC) };
    return own.parent_fd >= 0 && !syscall(SYS_landlock_add_rule, rules, LANDLOCK_RULE_PATH_BENEATH, &own, 0) &&
           !syscall(SYS_landlock_restrict_self, rules, 0);
#else
    (void)folder;
    return false;
#endif
}

// Takes from this process, a child after fork(), what it does not need. Returns what could be taken.
static int confine(const char *folder) {
    int taken = 0;
    setsid();
#ifdef __linux__
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    if (!unshare(CLONE_NEWUSER | CLONE_NEWNET) || !unshare(CLONE_NEWNET)) taken |= NO_NETWORK;
#endif
    if (write_only_in(folder)) taken |= NO_WRITES;
    const struct { int what; rlim_t most; } limits[] = {
        { RLIMIT_CPU, CODE_SECONDS }, { RLIMIT_AS, (rlim_t)CODE_MIB << 20 }, { RLIMIT_CORE, 0 },
        { RLIMIT_FSIZE, (rlim_t)CODE_FILE_MIB << 20 }, { RLIMIT_NOFILE, CODE_FILES },
        { RLIMIT_NPROC, CODE_PROCESSES } };
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
        const struct rlimit limit = { limits[i].most, limits[i].most };
        if (setrlimit((int)limits[i].what, &limit) && limits[i].what != RLIMIT_NPROC) _exit(127);
    }
    return taken;
}

static void end_child(pid_t child, int *status) {      // and the processes that it has started
    kill(child, SIGKILL);
    kill(-child, SIGKILL);
    while (waitpid(child, status, 0) < 0 && errno == EINTR) {}
}

// Waits for a child, at most CODE_WALL_SECONDS, and until *stop. Returns its exit status; -1: it did not end by itself.
static int wait_for_program(pid_t child, const volatile sig_atomic_t *stop) {
    const double start = seconds();
    int status = 0;
    for (pid_t ended; (ended = waitpid(child, &status, WNOHANG)) != child; ) {
        if ((ended < 0 && errno != EINTR) || *stop || seconds() - start > CODE_WALL_SECONDS) {
            end_child(child, &status);
            return -1;
        }
        nanosleep(&(struct timespec){ .tv_nsec = 2000000 }, NULL);
    }
    kill(-child, SIGKILL);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// Tries what the system can take from a child: NO_NETWORK, NO_WRITES.
static int try_confinement(void) {
    static const volatile sig_atomic_t never;
    fflush(stdout);
    const pid_t child = fork();
    if (!child) _exit(confine("/tmp"));
    return child < 0 ? 0 : max_int(wait_for_program(child, &never), 0);
}

// ==== [3] Programs ==================================================================================================

// The code of an answer: the first block between ``` that contains a text, else the first block, else all of it.
static TokStr code_block(TokStr answer, const char *with) {
    TokStr first = { NULL, 0 };
    for (size_t i = 0; i + 3 <= answer.n; i++) {
        if (memcmp(answer.s + i, "```", 3)) continue;
        size_t from = i + 3, to;
        while (from < answer.n && answer.s[from] != '\n') from++;      // the name of the language
        from += from < answer.n;
        for (to = from; to < answer.n && !(to + 3 <= answer.n && !memcmp(answer.s + to, "```", 3)); ) to++;
        const TokStr block = { answer.s + from, to - from };
        if (!first.s) first = block;
        if (*with && after_last(block, with).s) return block;
        i = to + 2;
    }
    return first.s ? first : answer;
}

static void add_code(TokText *out, TokStr s, const char *end) {
    if (!tok_text_append(out, s.s, s.n) || !tok_text_append(out, end, strlen(end))) die("out of memory for a program");
}

// Writes the program that tests an answer. given: code that the answer continues, unless it defines the function
// itself; a definition whose body is a docstring is complete. entry: the function's name, or "". The program prints
// `word` last, so that an early exit is no success.
static void make_program(TokText *out, TokStr given, TokStr answer, TokStr tests, const char *entry,
                         const char *word) {
    char define[140], last[200];
    snprintf(define, sizeof define, *entry ? "def %s" : "%s", entry);
    const TokStr code = code_block(answer, define);
    const bool whole = !given.n || !*entry || after_last(code, define).s;
    out->n = 0;
    add_code(out, given, whole ? "\n" : "");
    add_code(out, code, "\n\n");
    add_code(out, tests, "\n");
    if (*entry) snprintf(last, sizeof last, "check(%s)\n", entry);
    if (*entry) add_code(out, (TokStr){ last, strlen(last) }, "");
    snprintf(last, sizeof last, "print(\"\\n%s\")\n", word);
    add_code(out, (TokStr){ last, strlen(last) }, "");
}

__attribute__((noreturn)) static void run_python(const char *folder, int out) {        // in a child
    char *argv[] = { "python3", "-I", "-B", "program.py", NULL };
    char *environment[] = { "PATH=/usr/local/bin:/usr/bin:/bin", "LANG=C.UTF-8", "HOME=/nonexistent", NULL };
    const int in = open("/dev/null", O_RDWR);
    if (chdir(folder) || in < 0 || dup2(in, 0) < 0 || dup2(out, 1) < 0 || dup2(in, 2) < 0) _exit(127);
    for (int fd = 3; fd < 1024; fd++) close(fd);
    confine(".");
#ifdef __linux__
    execvpe(argv[0], argv, environment);
#else
    environ = environment;
    execvp(argv[0], argv);
#endif
    _exit(127);
}

static int remove_from_child(const char *path, const struct stat *st, int type, struct FTW *at) {
    (void)st, (void)type, (void)at;
    return remove(path);
}

// Runs a program with python3 in a folder of its own. True: it ended well, and its last line is `word`. *stop ends it.
static bool run_confined(TokStr program, const char *word, const volatile sig_atomic_t *stop) {
    char folder[] = "/tmp/gemma4-eval-XXXXXX", path[64], end[80] = "";
    if (!mkdtemp(folder)) die("--run-code: %s: %s", folder, strerror(errno));
    snprintf(path, sizeof path, "%s/program.py", folder);
    write_output_file("--run-code", path, program.s, program.n, false);
    FILE *const file = tmpfile();
    if (!file) die("--run-code: a temporary file: %s", strerror(errno));
    const int out = fileno(file);
    fflush(stdout);
    const pid_t child = fork();
    if (child < 0) die("--run-code: cannot start a process: %s", strerror(errno));
    if (!child) run_python(folder, out);
    const int status = wait_for_program(child, stop);
    const off_t size = lseek(out, 0, SEEK_END), n = (off_t)strlen(word) + 1;
    const bool read_all = size >= n && pread(out, end, (size_t)n, size - n) == n;
    fclose(file);
    nftw(folder, remove_from_child, 16, FTW_DEPTH | FTW_PHYS);
    return !status && read_all && !strncmp(end, word, strlen(word));
}

// Dies unless python3 runs here, so that a missing one is not taken for wrong answers.
static void need_python(const volatile sig_atomic_t *stop) {
    static const char program[] = "print(\"\\nit runs\")\n";
    if (!run_confined((TokStr){ program, sizeof program - 1 }, "it runs", stop))
        die("--run-code: python3 does not run; install it, or leave --run-code out");
}

// Judges an answer by a program that tests it. The word is random enough that no answer prints it by chance.
static Verdict judge_program(TokStr given, TokStr answer, TokStr tests, const char *entry,
                             const volatile sig_atomic_t *stop) {
    TokText program = { 0 };
    char word[40];
    snprintf(word, sizeof word, "passed-%08x%08x", (unsigned)getpid(), (unsigned)(seconds() * 1e6));
    make_program(&program, given, answer, tests, entry, word);
    const bool right = run_confined((TokStr){ program.s, program.n }, word, stop);
    tok_text_free(&program);
    return right ? RIGHT : WRONG;
}

#endif
