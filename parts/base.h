/* base.h - what every part uses: system headers, errors, memory, files, a progress line, a thread pool.
 *
 * Uses no other part. There are two kinds of failure: bad input prints one line and exits 1; a bug of this program is
 * an assert.
 * One file defines BASE_IMPLEMENTATION before it includes this one, and so gets the bodies. Begin with die(),
 * alloc_or_die() and parallel().
 *   [1] Errors, memory, files    [2] Progress    [3] Threads    [4] Bodies */
#ifndef BASE_H
#define BASE_H

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <regex.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

// ==== [1] Errors, memory, files =====================================================================================

enum { MAX_THREADS = 4096, MAX_FILE = 256 << 20 };   // bytes that read_file() takes at most

// Prints one line to stderr and exits with status 1: "<file>: <tensor, key or flag>: expected <x>, got <y>; try <fix>".
// Errors in a model file end with a code, as in gguf.h: E_META_* for keys, E_TENSOR_MISSING, E_SHAPE, E_PAYLOAD.
__attribute__((noreturn, format(printf, 1, 2))) void die(const char *fmt, ...);
void flush_output(void);                               // dies if not all of stdout could be written
extern const char *volatile unfinished;                // an Output's temporary file; who ends the process removes it
// Handles SIGBUS: pages of a mapped model file cannot be read, because the file was shortened or its disk failed.
void on_lost_pages(int signal_number);
void *alloc_or_die(size_t n, size_t size);             // host memory, zeroed
// Bytes of host memory that can be used without swapping: free memory and the page cache. All memory of the machine. If
// the process is in a control group with a limit (a container), both are at most what that leaves.
size_t available_memory(void);
size_t total_memory(void);

typedef struct {
    size_t room, memory;      // bytes that may still be allocated; that may be allocated in all. SIZE_MAX: no limit
    double cores;             // processor time per time; INFINITY: no limit
} GroupLimits;

// The limits of the control groups of this process, versions 1 and 2, and of all groups around them. The page cache
// does not count as used. root: "", or a folder that stands for / in tests.
GroupLimits group_limits(const char *root);

typedef struct { const char **text; int n; } TextList;
typedef struct { int n[32], count; } IntList;

static inline double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }
static inline int min_int(int a, int b) { return a < b ? a : b; }
static inline int max_int(int a, int b) { return a > b ? a : b; }
const char *base_name(const char *path);               // what follows the last slash

// Reads a whole file of at most MAX_FILE bytes; path NULL: the rest of standard input. The caller frees the result.
void *read_file(const char *path, size_t *size, const char *flag);
// Reads a text in the same way: drops the byte order mark of UTF-8, converts UTF-16 that has one to UTF-8. Dies if the
// text is UTF-16 without a mark or incomplete.
char *read_text(const char *path, size_t *size, const char *flag);

// All files that the program writes, it writes through these functions: a file is as it was before, or complete.
//
// An Output gets its name when it is complete. Until then it is called TARGET.(8 hex digits).tmp, and an older TARGET
// is kept. A process that ends early removes this file, after a signal too; only SIGKILL and a crash leave it, which
// does no harm, since the digits are random. What is no regular file (a pipe, /dev/null) is written in place. One
// Output at a time.
typedef struct {
    const char *path;         // as the user wrote it
    char *target, *tmp;       // path with its symbolic links resolved; the temporary name, NULL: in place
    int fd;
    bool replaces;            // there is an older file
    bool durable;             // it survives a power cut, once finish_output() returns; that may take milliseconds
} Output;

// Begins to write the file `path`. Returns 0 or errno; call finish_output() in both cases. An existing file has to be
// writable and keeps its mode; a new one gets `mode`, less the umask. EEXIST: it is a model (GGUF, safetensors), which
// only create_model_output() replaces, so that a mistyped name costs no model.
int create_output(Output *o, const char *path, mode_t mode);
int create_model_output(Output *o, const char *path, mode_t mode);
int write_output(const Output *o, const void *bytes, size_t n); // 0, or errno
// Ends an output: gives the file its name if err is 0, else removes it. Returns err, or the errno of the call that
// failed.
int finish_output(Output *o, int err);
// Writes a whole file; dies if that fails: "FLAG: PATH: cannot write: ..". durable: as in Output.
void write_output_file(const char *flag, const char *path, const void *bytes, size_t n, bool durable);
// Adds n bytes to a file, or none; not to a model. A new file gets `mode`, less the umask. Returns 0 or errno.
int append_to_file(const char *path, const void *bytes, size_t n, mode_t mode);
// What went wrong with an output, which may be finished, and what helps: "No space left on device; the old file is
// unchanged; free some space".
const char *output_error(const Output *o, int err, char out[160]);
__attribute__((noreturn)) void die_output(const char *flag, const Output *o, int err);

// ==== [2] Progress ==================================================================================================

extern bool bar_shown;                                 // progress() has drawn a line and not erased it yet
extern void (*restore_terminal)(void);                 // if not NULL, whoever calls _exit() calls it first

// Columns of the terminal that a file descriptor is; 80 if it is none.
int terminal_columns(int fd);
// True if the descriptor is a terminal that obeys escape sequences: TERM is neither "dumb" nor missing.
bool obeys_escapes(int fd);
bool wants_colors(int fd);                             // it does, and NO_COLOR is not set
// Draws a line of stderr in place of the last one, cut to the width of the terminal; an empty text erases it.
void draw_status(const char *text);

// Formats n of a unit: "7.9 MB", "512 tokens". "B" stands for bytes.
const char *amount(char out[32], double n, const char *unit);

// Draws a progress line, on a terminal only: "# what  7.9 MB  [=====>    ]  56 %  3.2 GB/s  1 s left". done == 0 starts
// it and its clock, done == total erases it. There is one line at a time; one thread draws it.
void progress(const char *what, size_t done, size_t total, const char *unit);

// ==== [3] Threads ===================================================================================================
// A thread pool. A job is divided into chunks of items; the caller and the threads of the pool claim one chunk after
// another. A thread that is preempted delays only its own chunk, and a thread that has not woken up yet delays nothing.
// Idle threads spin for tens of microseconds, then they sleep.

typedef void (*Work)(const void *task, int first, int end);        // processes items first .. end - 1 of a job

// Starts the threads of the pool, once; n = 0: one per core.
void start_threads(int n);
int count_threads(void);
// How many of the started threads, the caller included, share the next jobs; 0: start_threads() may start others.
void use_threads(int n);
// Runs a job of n_items in chunks of `chunk` items, and returns when all are finished. A job must not start another.
void parallel(int n_items, int chunk, Work work, const void *task);
// The number of items that a thread takes at once, a multiple of grain. Each thread gets about 8 chunks, since chunks
// take different times.
int chunk_size(int n_items, int grain);

// ==== [4] Bodies ====================================================================================================

#ifdef BASE_IMPLEMENTATION

bool bar_shown;
void (*restore_terminal)(void);
const char *volatile unfinished;

void die(const char *fmt, ...) {
    char line[4096];
    va_list ap;
    va_start(ap, fmt);
    fflush(stdout);
    vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    if (unfinished) unlink(unfinished);
    for (char *c = line; *c; c++)                      // a value or a path may contain line breaks or terminal escapes
        if ((unsigned char)*c < ' ' || *c == 0x7f) *c = '?';
    fprintf(stderr, "%sgemma4: error: %s\n", bar_shown ? "\r\033[K" : "", line);
    if (restore_terminal) restore_terminal();
    _exit(1);                                          // stdout is flushed already; the system frees the memory
}

void flush_output(void) {
    errno = 0;                                         // an error of an earlier write has left no number
    if (fflush(stdout) || ferror(stdout)) die("standard output: %s", errno ? strerror(errno) : "cannot write");
}

void on_lost_pages(int signal_number) {
    static const char text[] = "\ngemma4: error: a model file was truncated or became unreadable while in use\n";
    (void)signal_number;
    if (unfinished) unlink(unfinished);
    if (write(2, text + !bar_shown, sizeof text - 1 - !bar_shown) < 0) {}
    if (restore_terminal) restore_terminal();
    _exit(1);
}

void *alloc_or_die(size_t n, size_t size) {
    void *p = calloc(n ? n : 1, size);
    if (!p) die("out of memory: cannot allocate %zu bytes", n * size);
    return p;
}

// ---- limits of control groups ----
// /proc/self/cgroup says in which groups the process is, "NUMBER:CONTROLLERS:PATH" ("0::PATH" in version 2), and
// /proc/self/mountinfo where their files are: "ID PARENT DEVICE ROOT MOUNT_POINT ... - cgroup2 SOURCE OPTIONS".

// The number after `label` in a file, or the first one if label is "". False: no such file or number; "max" is none.
static bool file_number(const char *folder, const char *name, const char *label, double *out) {
    char path[2304], line[256];
    bool found = false;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "r");
    const size_t n = strlen(label);
    while (f && !found && fgets(line, sizeof line, f)) {
        char *end = line;
        if (strncmp(line, label, n)) continue;
        *out = strtod(line + n, &end);
        found = end != line + n;
    }
    if (f) fclose(f);
    return found;
}

// Lowers the limits to those of one group, whose files are in a folder.
static void limit_by_group(const char *folder, GroupLimits *lim) {
    static const char *const names[2][2] = { { "memory.max", "memory.current" },
                                             { "memory.limit_in_bytes", "memory.usage_in_bytes" } };
    static const char *const cache[2][2] = { { "active_file ", "inactive_file " },
                                             { "total_active_file ", "total_inactive_file " } };
    double limit, used, quota, period = 100000;
    for (int v = 0; v < 2; v++) {
        if (!file_number(folder, names[v][0], "", &limit) || !(limit >= 0 && limit < 0x1p62)) continue;
        if (!file_number(folder, names[v][1], "", &used)) used = 0;
        for (int k = 0; k < 2; k++) {
            double pages = 0;
            if (file_number(folder, "memory.stat", cache[v][k], &pages)) used -= pages;
        }
        const double room = limit - fmax(used, 0);
        if (limit < (double)lim->memory) lim->memory = (size_t)limit;
        if (room < (double)lim->room) lim->room = room > 0 ? (size_t)room : 0;
    }
    char path[2304], line[64];
    snprintf(path, sizeof path, "%s/cpu.max", folder);
    FILE *f = fopen(path, "r");
    const bool has_quota = f ? fgets(line, sizeof line, f) && sscanf(line, "%lf %lf", &quota, &period) >= 1 :
                           file_number(folder, "cpu.cfs_quota_us", "", &quota);
    if (f) fclose(f);
    else file_number(folder, "cpu.cfs_period_us", "", &period);
    if (has_quota && quota > 0 && period > 0) lim->cores = fmin(lim->cores, quota / period);
}

// Lowers the limits to those of the group `path` of a hierarchy and of the groups around it. at: its mount point. root:
// the group that is mounted there; a container may see a path that is not below it, and then its own group is mounted.
static void limit_by_groups(const char *at, const char *root, const char *path, GroupLimits *lim) {
    char folder[2048];
    const size_t n = strcmp(root, "/") ? strlen(root) : 0, top = strlen(at);
    const bool below = !strncmp(path, root, n) && (path[n] == '/' || !path[n]) && strncmp(path, "/..", 3);
    if ((size_t)snprintf(folder, sizeof folder, "%s%s", at, below ? path + n : "") >= sizeof folder) return;
    for (;;) {
        limit_by_group(folder, lim);
        char *slash = strrchr(folder, '/');
        if (!slash || strlen(folder) <= top) return;
        *slash = 0;
    }
}

GroupLimits group_limits(const char *root) {
    GroupLimits lim = { SIZE_MAX, SIZE_MAX, INFINITY };
    char file[512], line[4096], group[1024], mounted[1024], point[512], at[1024], kind[32], options[512];
    snprintf(file, sizeof file, "%s/proc/self/mountinfo", root);
    FILE *mounts = fopen(file, "r");
    while (mounts && fgets(line, sizeof line, mounts)) {
        const char *dash = strstr(line, " - cgroup");
        if (!dash || sscanf(line, "%*s %*s %*s %1023s %511s", mounted, point) != 2 ||
            sscanf(dash, " - %31s %*s %511s", kind, options) != 2) continue;
        const bool unified = !strcmp(kind, "cgroup2");
        snprintf(at, sizeof at, "%s%s", root, point);
        snprintf(file, sizeof file, "%s/proc/self/cgroup", root);
        FILE *groups = fopen(file, "r");
        while (groups && fgets(line, sizeof line, groups)) {
            char controllers[256] = "", *colon = strchr(line, ':'), *second = colon ? strchr(colon + 1, ':') : NULL;
            if (!second) continue;
            snprintf(controllers, sizeof controllers, "%.*s", (int)(second - colon - 1), colon + 1);
            snprintf(group, sizeof group, "%.*s", (int)strcspn(second + 1, "\n"), second + 1);
            const char *word = strstr(options, controllers);               // "rw,cpu,cpuacct"
            const bool is_of = word && word > options && word[-1] == ',' && strchr(",", word[strlen(controllers)]);
            if (unified ? !*controllers : *controllers && is_of) limit_by_groups(at, mounted, group, &lim);
        }
        if (groups) fclose(groups);
    }
    if (mounts) fclose(mounts);
    return lim;
}

size_t available_memory(void) {
    double kb = 0;
    const size_t room = group_limits("").room;
    const size_t all = file_number("/proc", "meminfo", "MemAvailable:", &kb) ? (size_t)kb * 1024 :
                       (size_t)sysconf(_SC_AVPHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
    return room < all ? room : all;
}

size_t total_memory(void) {
    const size_t limit = group_limits("").memory;
    const size_t all = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
    return limit < all ? limit : all;
}

void *read_file(const char *path, size_t *size, const char *flag) {
    FILE *f = path ? fopen(path, "rb") : stdin;
    if (!path) path = "standard input";
    if (!f) die("%s: %s: %s", flag, path, strerror(errno));
    size_t cap = 1 << 16, n = 0;
    char *data = alloc_or_die(cap, 1);
    for (size_t got; (got = fread(data + n, 1, cap - n, f)) > 0; ) {
        n += got;
        if (n > MAX_FILE) die("%s: %s: expected at most %d MiB, got more", flag, path, MAX_FILE >> 20);
        if (n < cap) continue;
        data = realloc(data, cap *= 2);
        if (!data) die("%s: %s: out of memory at %zu bytes", flag, path, n);
    }
    if (ferror(f)) die("%s: %s: %s", flag, path, strerror(errno));
    if (f != stdin) fclose(f);                         // keep file descriptor 0 open: no later file may get it
    *size = n;
    return data;
}

// Converts n bytes of UTF-16, in little-endian order or not, to UTF-8; half of a pair becomes U+FFFD. *size: its bytes.
static char *text_of_utf16(const uint8_t *s, size_t n, bool little, size_t *size) {
    char *text = alloc_or_die(n / 2 * 3 + 1, 1);
    size_t at = 0;
    for (size_t i = 0; i + 1 < n; i += 2) {
        uint32_t c = little ? s[i] | (uint32_t)s[i + 1] << 8 : s[i + 1] | (uint32_t)s[i] << 8;
        const uint32_t next = i + 3 >= n ? 0 : little ? s[i + 2] | (uint32_t)s[i + 3] << 8
                                                      : s[i + 3] | (uint32_t)s[i + 2] << 8;
        if (c >= 0xd800 && c < 0xdc00 && next >= 0xdc00 && next < 0xe000) {
            c = 0x10000 + ((c - 0xd800) << 10) + (next - 0xdc00);
            i += 2;
        } else if (c >= 0xd800 && c < 0xe000) {
            c = 0xfffd;
        }
        const int more = c < 0x80 ? 0 : c < 0x800 ? 1 : c < 0x10000 ? 2 : 3;       // bytes after the first
        static const uint8_t first[] = { 0, 0xc0, 0xe0, 0xf0 };
        text[at++] = (char)(first[more] | c >> 6 * more);
        for (int k = more - 1; k >= 0; k--) text[at++] = (char)(0x80 | (c >> 6 * k & 0x3f));
    }
    *size = at;
    return text;
}

char *read_text(const char *path, size_t *size, const char *flag) {
    size_t n;
    char *data = read_file(path, &n, flag);
    const uint8_t *s = (const uint8_t *)data;
    const bool little = n >= 2 && s[0] == 0xff && s[1] == 0xfe, big = n >= 2 && s[0] == 0xfe && s[1] == 0xff;
    size_t zeros[2] = { 0, 0 }, looked = n < 128 ? n / 2 * 2 : 128;
    for (size_t i = 0; i < looked; i++) zeros[i % 2] += !s[i];
    if ((little || big) && n % 2)
        die("%s: %s: UTF-16: expected an even number of bytes, got %zu; try a file in UTF-8", flag,
            path ? path : "standard input", n);
    if (!little && !big && looked >= 4 && ((!zeros[0] && zeros[1] == looked / 2) ||
                                           (!zeros[1] && zeros[0] == looked / 2)))
        die("%s: %s: expected UTF-8, got what looks like UTF-16 without a byte order mark; try a file in UTF-8", flag,
            path ? path : "standard input");
    *size = n;
    if (n >= 3 && !memcmp(s, "\xef\xbb\xbf", 3)) memmove(data, data + 3, *size -= 3);
    if (!little && !big) return data;
    char *text = text_of_utf16(s + 2, n - 2, little, size);
    free(data);
    return text;
}

// Resolves the symbolic links of a path; the file need not exist. The caller frees the result; NULL: see errno.
static char *follow_links(const char *path) {
    char *at = alloc_or_die(strlen(path) + 1, 1);
    strcpy(at, path);
    for (int n = 0; n < 40; n++) {
        char to[4096];
        const ssize_t len = readlink(at, to, sizeof to);
        if (len < 0) return at;                        // not a link, or there is no such file
        const char *slash = *to == '/' ? NULL : strrchr(at, '/');
        const size_t folder = slash ? (size_t)(slash + 1 - at) : 0;
        char *next = alloc_or_die(folder + (size_t)len + 1, 1);
        memcpy(next, at, folder);
        memcpy(next + folder, to, (size_t)len);
        free(at);
        at = next;
    }
    free(at);
    errno = ELOOP;
    return NULL;
}

// A signal ends the process. It has to leave no half of a file.
static void on_kill(int signal_number) {
    if (unfinished) unlink(unfinished);
    signal(signal_number, SIG_DFL);
    raise(signal_number);
}

static void handle_kills(void) {                       // but those that the process ignores or handles
    static const int signals[] = { SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGXCPU, SIGPIPE };
    const struct sigaction act = { .sa_handler = on_kill };
    struct sigaction before;
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++)
        if (!sigaction(signals[i], NULL, &before) && before.sa_handler == SIG_DFL) sigaction(signals[i], &act, NULL);
}

int create_model_output(Output *o, const char *path, mode_t mode) {
    struct stat old;
    struct timespec now;
    *o = (Output){ .path = path, .target = follow_links(path), .fd = -1, .durable = true };
    if (!o->target) return errno;
    const bool exists = !stat(path, &old);
    if (exists && !S_ISREG(old.st_mode)) {
        o->fd = open(path, O_WRONLY | O_CLOEXEC | O_NONBLOCK);         // does not wait for a pipe's reader
        return o->fd < 0 || fcntl(o->fd, F_SETFL, 0) ? errno : 0;
    }
    if (exists && access(o->target, W_OK)) return errno;
    o->replaces = exists;
    handle_kills();
    const size_t size = strlen(o->target) + 16;
    o->tmp = alloc_or_die(size, 1);
    for (int k = 0; k < 100 && o->fd < 0; k++) {
        clock_gettime(CLOCK_REALTIME, &now);
        const uint64_t seed = (uint64_t)now.tv_sec << 30 ^ (uint64_t)now.tv_nsec ^ (uint64_t)getpid() << 44;
        snprintf(o->tmp, size, "%s.%08x.tmp", o->target, (unsigned)((seed + (uint64_t)k) * 0x9E3779B97F4A7C15u >> 32));
        unfinished = o->tmp;                           // before it exists: a signal finds a name or no file
        o->fd = open(o->tmp, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, exists ? 0600 : mode);
        if (o->fd < 0 && errno != EEXIST) return errno;
    }
    if (o->fd < 0) return EEXIST;
    if (exists && fchown(o->fd, old.st_uid, old.st_gid)) {}            // only root may change the owner
    if (exists && fchmod(o->fd, old.st_mode & 07777)) {}               // some file systems have no modes
    return 0;
}

static bool is_model(const char *path) {
    static const char json[] = { 0, 0, 0, 0, '{', '"' };               // of safetensors: the length's high half, JSON
    struct stat st;
    char head[10] = "";
    if (stat(path, &st) || !S_ISREG(st.st_mode)) return false;
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    const bool whole = read(fd, head, sizeof head) == sizeof head;
    close(fd);
    return whole && (!memcmp(head, "GGUF", 4) || !memcmp(head + 4, json, sizeof json));
}

int create_output(Output *o, const char *path, mode_t mode) {
    if (!is_model(path)) return create_model_output(o, path, mode);
    *o = (Output){ .path = path, .fd = -1 };
    return EEXIST;
}

static int write_all(int fd, const void *bytes, size_t n) {
    for (const uint8_t *p = bytes; n > 0; ) {
        const ssize_t done = write(fd, p, n < (1 << 30) ? n : 1 << 30);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) return done ? errno : EIO;
        p += done;
        n -= (size_t)done;
    }
    return 0;
}

int write_output(const Output *o, const void *bytes, size_t n) { return write_all(o->fd, bytes, n); }

static void sync_folder(char *path) {                  // of a file whose name has to survive a power cut; cuts path
    char *slash = strrchr(path, '/');
    if (slash) slash[slash == path] = 0;
    const int dir = open(slash ? path : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (dir < 0) return;
    fsync(dir);
    close(dir);
}

int finish_output(Output *o, int err) {
    if (o->fd >= 0) {
        while (!err && o->tmp && o->durable && fsync(o->fd)) err = errno == EINTR ? 0 : errno;
        if (close(o->fd) && !err && errno != EINTR) err = errno;       // Linux has closed it even so
        if (!err && o->tmp && rename(o->tmp, o->target)) err = errno;
        if (err && o->tmp) unlink(o->tmp);
        if (!err && o->tmp && o->durable) sync_folder(o->target);
    }
    unfinished = NULL;
    free(o->target);
    free(o->tmp);
    return err;
}

void write_output_file(const char *flag, const char *path, const void *bytes, size_t n, bool durable) {
    Output o;
    int err = create_output(&o, path, 0666);
    o.durable = durable;
    if (!err) err = write_output(&o, bytes, n);
    err = finish_output(&o, err);
    if (err) die_output(flag, &o, err);
}

int append_to_file(const char *path, const void *bytes, size_t n, mode_t mode) {
    if (is_model(path)) return EEXIST;
    const int fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, mode);
    if (fd < 0) return errno;
    const off_t end = lseek(fd, 0, SEEK_END);
    int err = write_all(fd, bytes, n);
    if (err && end >= 0 && ftruncate(fd, end)) {}      // it may be a pipe
    if (close(fd) && !err && errno != EINTR) err = errno;
    return err;
}

const char *output_error(const Output *o, int err, char out[160]) {
    const char *help = err == ENOSPC || err == EDQUOT ? "; free some space, or try another folder" :
                       err == EFBIG ? "; the file is larger than ulimit -f or the file system allows" :
                       err == EACCES || err == EPERM || err == EROFS ? "; try another folder" : "";
    const char *why = err == EEXIST ? "it is a model file, which only quantize replaces" : strerror(err);
    snprintf(out, 160, "%.60s%s%s", why, o->replaces ? "; the old file is unchanged" : "", help);
    return out;
}

void die_output(const char *flag, const Output *o, int err) {
    char why[160];
    die("%s: %s: cannot write: %s", flag, o->path, output_error(o, err, why));
}

const char *amount(char out[32], double n, const char *unit) {
    static const struct { double size; const char *name; } bytes[] = { { 1e9, "GB" }, { 1e6, "MB" }, { 1e3, "kB" } };
    snprintf(out, 32, "%.*f %.16s", n < 10 && strcmp(unit, "B") ? 1 : 0, n, unit);
    for (int i = 2; i >= 0 && !strcmp(unit, "B"); i--)
        if (n >= bytes[i].size || i == 2) snprintf(out, 32, "%.1f %s", n / bytes[i].size, bytes[i].name);
    return out;
}

int terminal_columns(int fd) {
    struct winsize w;
    return ioctl(fd, TIOCGWINSZ, &w) || !w.ws_col ? 80 : w.ws_col;
}

const char *base_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

bool obeys_escapes(int fd) {
    const char *term = getenv("TERM");
    return isatty(fd) && term && *term && strcmp(term, "dumb");
}

bool wants_colors(int fd) {
    const char *no_color = getenv("NO_COLOR");
    return obeys_escapes(fd) && !(no_color && *no_color);
}

void draw_status(const char *text) {
    static int length;                                 // of the line that is shown
    const int columns = terminal_columns(2), rows = bar_shown && length > columns ? (length - 1) / columns : 0;
    if (rows) fprintf(stderr, "\033[%dA", rows);       // the terminal is narrower now, so the line takes several rows
    length = min_int((int)strlen(text), columns - 1);
    fprintf(stderr, "\r%.*s%s", length, text, rows ? "\033[J" : "\033[K");
    fflush(stderr);
    bar_shown = length > 0;
}

void progress(const char *what, size_t done, size_t total, const char *unit) {
    static double start, drawn;
    const double now = seconds();
    if (done == 0) start = now;
    if (!isatty(2) || (done && done < total && now - drawn < 0.1)) return;
    drawn = now;
    if (done >= total) {
        draw_status("");
        return;
    }
    char line[160], size[32], rate[32] = "", left[32] = "", bar[11] = "          ";
    const double fraction = (double)done / (double)total, speed = (double)done / (now - start + 1e-9);
    memset(bar, '=', (size_t)(fraction * 10));
    bar[(size_t)(fraction * 10)] = '>';
    if (done) {
        amount(rate, speed, unit);
        snprintf(left, sizeof left, "/s  %.0f s left", ceil((double)(total - done) / speed));
    }
    snprintf(line, sizeof line, "# %.20s  %s  [%s]  %d %%  %s%s", what, amount(size, (double)total, unit), bar,
             (int)(fraction * 100), rate, left);
    draw_status(line);
}

enum { SPINS = 2000, STACK_BYTES = 8 << 20 };

static struct {
    int n_threads;                      // the caller's included; 0: not started yet
    Work work;                          // the job; it does not change while a claimed chunk is unfinished
    const void *task;
    int n_items, chunk;                 // items of the job; of a chunk
    uint32_t n_chunks;
    _Atomic uint64_t unclaimed;         // number of the job << 32 | chunks that no thread has claimed
    _Atomic uint32_t n_pending;         // chunks that are not finished
    atomic_int n_sleeping;
    atomic_bool caller_sleeps;
    pthread_mutex_t lock;
    pthread_cond_t wake, done;
} pool = { .lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER, .done = PTHREAD_COND_INITIALIZER };

static int count_cores(void) {                         // cores that this process may use
    const double quota = ceil(group_limits("").cores);
    int n = max_int(1, (int)sysconf(_SC_NPROCESSORS_ONLN));
#ifdef __linux__
    cpu_set_t set;
    if (!sched_getaffinity(0, sizeof set, &set)) n = CPU_COUNT(&set);
#endif
    return quota < n ? max_int(1, (int)quota) : n;
}

static void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void work_on_job(void) {                        // until no chunk is left to claim
    uint64_t unclaimed = atomic_load(&pool.unclaimed);
    while ((uint32_t)unclaimed) {
        if (!atomic_compare_exchange_weak(&pool.unclaimed, &unclaimed, unclaimed - 1)) continue;
        const int first = (int)(pool.n_chunks - (uint32_t)unclaimed) * pool.chunk;
        pool.work(pool.task, first, first + min_int(pool.chunk, pool.n_items - first));
        if (atomic_fetch_sub(&pool.n_pending, 1) == 1 && atomic_load(&pool.caller_sleeps)) {
            pthread_mutex_lock(&pool.lock);
            pthread_cond_signal(&pool.done);
            pthread_mutex_unlock(&pool.lock);
        }
        unclaimed = atomic_load(&pool.unclaimed);
    }
}

static bool no_work(memory_order order) { return !(uint32_t)atomic_load_explicit(&pool.unclaimed, order); }

static void *pool_thread(void *unused) {
    for (;;) {
        for (int i = 0; i < SPINS && no_work(memory_order_relaxed); i++) pause_briefly();
        if (no_work(memory_order_seq_cst)) {
            pthread_mutex_lock(&pool.lock);
            atomic_fetch_add(&pool.n_sleeping, 1);
            while (no_work(memory_order_seq_cst)) pthread_cond_wait(&pool.wake, &pool.lock);
            atomic_fetch_sub(&pool.n_sleeping, 1);
            pthread_mutex_unlock(&pool.lock);
        }
        work_on_job();
    }
    return unused;
}

static void pool_forked(void) { pool.n_threads = 1; }  // fork() does not copy the threads

void start_threads(int n) {
    if (pool.n_threads) return;
    pthread_attr_t attr;
    pthread_t id;
    pool.n_threads = n ? n : count_cores();
    pthread_atfork(NULL, NULL, pool_forked);
    if (pthread_attr_init(&attr) || pthread_attr_setstacksize(&attr, STACK_BYTES)) die("-t: out of memory for threads");
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    sigset_t all, before;                              // signals go to the main thread, which may wait for input
    sigfillset(&all);
    sigdelset(&all, SIGBUS);                           // but SIGBUS goes to the thread that reads a lost page
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int i = 1; i < pool.n_threads; i++) {
        const int error = pthread_create(&id, &attr, pool_thread, NULL);
        if (error) die("-t: cannot start %d threads: %s; try -t %d", pool.n_threads, strerror(error), i);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attr);
}

int count_threads(void) { return pool.n_threads; }
void use_threads(int n) { pool.n_threads = n; }

void parallel(int n_items, int chunk, Work work, const void *task) {
    start_threads(0);
    if (pool.n_threads == 1 || n_items <= chunk) {
        if (n_items > 0) work(task, 0, n_items);
        return;
    }
    pool.work = work;
    pool.task = task;
    pool.n_items = n_items;
    pool.chunk = chunk;
    pool.n_chunks = (uint32_t)((n_items + chunk - 1) / chunk);
    atomic_store(&pool.n_pending, pool.n_chunks);
    atomic_store(&pool.unclaimed, ((atomic_load(&pool.unclaimed) >> 32) + 1) << 32 | pool.n_chunks);
    if (atomic_load(&pool.n_sleeping)) {
        pthread_mutex_lock(&pool.lock);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.lock);
    }
    work_on_job();
    for (int i = 0; i < SPINS && atomic_load(&pool.n_pending); i++) pause_briefly();
    if (!atomic_load(&pool.n_pending)) return;
    pthread_mutex_lock(&pool.lock);
    atomic_store(&pool.caller_sleeps, true);
    while (atomic_load(&pool.n_pending)) pthread_cond_wait(&pool.done, &pool.lock);
    atomic_store(&pool.caller_sleeps, false);
    pthread_mutex_unlock(&pool.lock);
}

int chunk_size(int n_items, int grain) {
    start_threads(0);
    const int n_chunks = 8 * pool.n_threads;
    return (int)round_up((size_t)max_int((n_items + n_chunks - 1) / n_chunks, 1), (size_t)grain);
}

#endif
#endif
