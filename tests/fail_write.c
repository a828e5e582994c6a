/* fail_write.c - a library for LD_PRELOAD that makes one call that changes a file fail. test_writes.sh uses it.
 *
 * Counted are open() that may create a file, write(), pwrite(), fsync(), ftruncate(), close() and rename(), of files
 * whose path begins with FAIL_UNDER. The one with number FAIL_AT does what FAIL_HOW says:
 *     ENOSPC, EDQUOT   it fails, and so does every later open(), write(), pwrite() and fsync(): a full disk stays full
 *     EIO              it fails, alone; close() closes all the same
 *     EINTR            write(), pwrite(), fsync() and close() fail once without doing anything (close() has closed)
 *     SHORT            write() and pwrite() write half of their bytes
 *     KILL             the process is killed with SIGKILL, after half of a write()
 * FAIL_LOG is a file that gets a line for every counted call: its name and the path. FAIL_AT=0 counts, and nothing fails. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

typedef enum { NOTHING, FAIL, HALF } Effect;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int calls, is_full;                             // calls so far; the disk is

static const char *path_of(int fd, char *path, size_t room) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    const ssize_t n = readlink(link, path, room - 1);
    path[n > 0 ? n : 0] = 0;
    return path;
}

static int is_how(const char *word) {
    const char *how = getenv("FAIL_HOW");
    return how && !strcmp(how, word);
}

static void log_call(const char *name, const char *path) {
    const char *file = getenv("FAIL_LOG");
    char line[4200];
    const int fd = file ? (int)syscall(SYS_openat, AT_FDCWD, file, O_WRONLY | O_CREAT | O_APPEND, 0600) : -1;
    if (fd < 0) return;
    const int n = snprintf(line, sizeof line, "%s %.4000s\n", name, path);
    if (syscall(SYS_write, fd, line, n) < 0) abort();
    syscall(SYS_close, fd);
}

typedef struct {
    const char *name;
    int writes;               // it writes bytes, which may be fewer than wanted
    int waits;                // it may be interrupted
    int fills;                // it needs room on the disk
} Call;

static const Call call_open = { "open", 0, 0, 1 }, call_write = { "write", 1, 1, 1 }, call_pwrite = { "pwrite", 1, 1, 1 },
                  call_fsync = { "fsync", 0, 1, 1 }, call_ftruncate = { "ftruncate", 0, 0, 0 },
                  call_close = { "close", 0, 1, 0 }, call_rename = { "rename", 0, 0, 0 };

// What a call has to do. Sets errno if it is to fail.
static Effect effect_of(Call call, const char *path) {
    const char *under = getenv("FAIL_UNDER"), *at = getenv("FAIL_AT");
    const int no_space = is_how("ENOSPC") || is_how("EDQUOT");
    Effect effect = NOTHING;
    if (!under || !at || strncmp(path, under, strlen(under))) return NOTHING;
    if ((is_how("EINTR") && !call.waits) || (is_how("SHORT") && !call.writes)) return NOTHING;
    pthread_mutex_lock(&lock);
    const int is_the_one = ++calls == atoi(at);
    log_call(call.name, path);
    if (is_the_one && is_how("KILL") && !call.writes) kill(getpid(), SIGKILL);
    if (is_the_one && no_space) is_full = 1;
    if (is_the_one) effect = is_how("SHORT") || is_how("KILL") ? HALF : FAIL;
    if (is_full && call.fills) effect = FAIL;
    pthread_mutex_unlock(&lock);
    if (effect == FAIL) errno = is_how("EDQUOT") ? EDQUOT : no_space ? ENOSPC : is_how("EINTR") ? EINTR : EIO;
    return effect;
}

static Effect effect_on(Call call, int fd) {
    char path[4096];
    return effect_of(call, path_of(fd, path, sizeof path));
}

// How many of n bytes a call writes.
static size_t part(Effect effect, size_t n) { return effect == HALF && n > 1 ? n / 2 : n; }

static ssize_t written(Effect effect, ssize_t n) {
    if (effect == HALF && is_how("KILL")) kill(getpid(), SIGKILL);
    return n;
}

ssize_t write(int fd, const void *bytes, size_t n) {
    const Effect effect = effect_on(call_write, fd);
    return effect == FAIL ? -1 : written(effect, NEXT(write)(fd, bytes, part(effect, n)));
}

ssize_t pwrite(int fd, const void *bytes, size_t n, off_t at) {
    const Effect effect = effect_on(call_pwrite, fd);
    return effect == FAIL ? -1 : written(effect, NEXT(pwrite)(fd, bytes, part(effect, n), at));
}

int fsync(int fd) { return effect_on(call_fsync, fd) == FAIL ? -1 : 0; }       // no test waits for a disk

int ftruncate(int fd, off_t n) { return effect_on(call_ftruncate, fd) == FAIL ? -1 : NEXT(ftruncate)(fd, n); }

int rename(const char *from, const char *to) {
    return effect_of(call_rename, to) == FAIL ? -1 : NEXT(rename)(from, to);
}

int close(int fd) {
    const int fails = (fcntl(fd, F_GETFL) & O_ACCMODE) != O_RDONLY && effect_on(call_close, fd) == FAIL;
    const int number = errno, status = NEXT(close)(fd);
    if (fails) errno = number;
    return fails ? -1 : status;
}

int open(const char *path, int flags, ...) {
    va_list ap;
    va_start(ap, flags);
    const int mode = flags & O_CREAT ? va_arg(ap, int) : 0;
    va_end(ap);
    return flags & O_CREAT && effect_of(call_open, path) == FAIL ? -1 : NEXT(open)(path, flags, mode);
}
