/* store.h - sessions that have no slot: what the server's slots held before they were needed for other conversations,
 * in host memory and, with --session-dir, in files. A part of gemma4.c, which includes it.
 *   [1] What a prompt shares with a session    [2] What is there    [3] Taking in, giving back    [4] Files
 *
 * Each is in the form of parts/session.h, in memory as in a file: one writer, one reader, one checksum. What memory has
 * no room for goes, those first that were not used for longest; where there is a folder it is in a file by then. A
 * thread writes the files, so that nobody waits for the disk. Sessions and model are touched by the thread that calls
 * store_park() and store_resume() only; the thread that writes sees bytes. */
#ifndef STORE_H
#define STORE_H
#ifdef USE_MICROHTTPD
#include <dirent.h>
#include <sys/file.h>

// ==== [1] What a prompt shares with a session ========================================================================
// A client sends back what the model said as text, from which the prompt is made anew. The model may have put it in
// other tokens. Where these spell the same, those that the session holds take the place of those made anew: they need
// not run again.

typedef struct { size_t held, ids; } Shared;           // tokens from the beginning of each

// Whether the same text follows in other tokens: then *at goes behind it.
static bool same_text(const Tokenizer *t, const TokIds *held, const TokIds *ids, Shared *at) {
    enum { MOST = 64 };       // tokens
    Shared to = *at;
    TokStr a = { 0 }, b = { 0 };
    for (int n = 0; n < MOST; n++) {
        if (!a.n && to.held < held->n) a = tok_piece(t, held->ids[to.held++], false);
        if (!b.n && to.ids < ids->n) b = tok_piece(t, ids->ids[to.ids++], false);
        const size_t some = a.n < b.n ? a.n : b.n;
        if (!some || memcmp(a.s, b.s, some)) return false;           // one is at its end, or is no text
        a = (TokStr){ a.s + some, a.n - some };
        b = (TokStr){ b.s + some, b.n - some };
        if (a.n || b.n) continue;
        *at = to;
        return true;
    }
    return false;
}

// How much of a session a prompt begins with.
static Shared shared(const Tokenizer *t, const TokIds *held, const TokIds *ids) {
    Shared at = { 0, 0 };
    do {
        while (at.held < held->n && at.ids < ids->n && held->ids[at.held] == ids->ids[at.ids]) at.held++, at.ids++;
    } while (at.held < held->n && at.ids < ids->n && same_text(t, held, ids, &at));
    return at;
}

// ==== [2] What is there ==============================================================================================

typedef struct Parked {
    struct Parked *next;      // used before this one
    TokIds   ids;
    uint64_t bytes;
    int      fd;              // memory that holds it; -1: none
    char    *path;            // of its file; NULL: none
    bool     failed;          // it cannot be written to a file
    bool     busy, gone;      // somebody reads it; it is freed when nobody does
    int64_t  time;            // of the file
} Parked;

typedef struct {
    Model       *m;
    const char  *dir;         // NULL: no files
    uint64_t     room, file_room;        // bytes, of memory and of files
    uint64_t     used, file_used;
    Parked      *first;       // the last one used
    int          n, n_open, n_resumed;   // n_open: those in memory
    int          dir_fd;
    bool         ending;
    pthread_mutex_t lock;     // of all of the above but m, dir and room
    pthread_cond_t  news;     // for the writer: there is something to write, or it is the end
    pthread_t    writer;
} Store;

enum { PARK_LEAST = 64,       // fewer tokens are not worth it
       PARK_MOST = 128,       // in memory: each takes a file descriptor, of which connections need some too
       SLACK = 1 << 30 };     // bytes that may wait to be written

static void leave_memory(Store *st, Parked *p) {       // with the lock held
    if (p->fd < 0) return;
    close(p->fd);
    p->fd = -1;
    st->used -= p->bytes;
    st->n_open--;
}

static void parked_free(Store *st, Parked *p) {        // out of the list already; with the lock held
    leave_memory(st, p);
    if (p->path) unlink(p->path), st->file_used -= p->bytes;
    tok_ids_free(&p->ids);
    free(p->path);
    free(p);
}

static void drop_parked(Store *st, Parked *p) {        // with the lock held
    for (Parked **at = &st->first; *at; at = &(*at)->next)
        if (*at == p) {
            *at = p->next;
            st->n--;
            break;
        }
    if (p->busy) p->gone = true;
    else parked_free(st, p);
}

static void release_parked(Store *st, Parked *p) {     // nobody reads it any more; with the lock held
    p->busy = false;
    if (p->gone) parked_free(st, p);
}

static void use_parked(Store *st, Parked *p) {         // it was used last; with the lock held
    for (Parked **at = &st->first; *at; at = &(*at)->next)
        if (*at == p) {
            *at = p->next;
            break;
        }
    p->next = st->first;
    st->first = p;
}

// What is in memory beyond its room goes, what is in files beyond theirs too. With the lock held.
static void trim_store(Store *st) {
    for (;;) {
        const bool memory = st->used > st->room || st->n_open > PARK_MOST;
        if (!memory && st->file_used <= st->file_room) return;
        Parked *oldest = NULL;
        for (Parked *p = st->first; p; p = p->next)
            if (!p->busy && (memory ? p->fd >= 0 : p->path != NULL)) oldest = p;
        if (!oldest) return;
        if (memory && oldest->path) leave_memory(st, oldest);
        else drop_parked(st, oldest);
    }
}

// ==== [3] Taking in, giving back =====================================================================================

// The session that shares most tokens with (ids): how many is in *most. The caller may look at it until it changes the
// store.
static Parked *store_find(Store *st, const Tokenizer *t, const TokIds *ids, size_t *most) {
    Parked *best = NULL;
    *most = 0;
    pthread_mutex_lock(&st->lock);
    for (Parked *p = st->first; p; p = p->next) {
        const size_t same = shared(t, &p->ids, ids).held;
        if (same > *most) *most = same, best = p;
    }
    pthread_mutex_unlock(&st->lock);
    return best;
}

// Whether a session is there that begins with these; those that these begin with are dropped.
static bool is_covered(Store *st, const TokIds *ids) {
    bool covered = false;
    pthread_mutex_lock(&st->lock);
    for (Parked *p = st->first, *next; p; p = next) {
        const size_t same = (size_t)same_ids(&p->ids, ids);
        next = p->next;
        covered |= same == ids->n;
        if (same == p->ids.n && same < ids->n) drop_parked(st, p);
    }
    pthread_mutex_unlock(&st->lock);
    return covered;
}

// Takes in what a session holds, if there is room and it is not there yet. False: it could not be kept, and s->err says
// why.
static bool store_park(Store *st, Session *s) {
    if (s->held.n < PARK_LEAST || (!st->room && !st->dir) || is_covered(st, &s->held)) return true;
    Parked *p = alloc_or_die(1, sizeof *p);
    struct stat file;
    *p = (Parked){ .fd = memfd_create("gemma4-session", MFD_CLOEXEC) };
    int err = p->fd < 0 ? errno : session_to_fd(s, &(SessionNote){ 0 }, p->fd, NULL);
    if (!err && fstat(p->fd, &file)) err = errno;
    if (err) {
        if (p->fd >= 0) close(p->fd);
        free(p);
        snprintf(s->err, sizeof s->err, "a session of %zu tokens could not be kept: %s", s->held.n, strerror(err));
        return false;
    }
    for (size_t i = 0; i < s->held.n; i++) push_id(s, &p->ids, s->held.ids[i]);
    p->bytes = (uint64_t)file.st_size;
    pthread_mutex_lock(&st->lock);
    p->next = st->first;
    st->first = p;
    st->n++;
    st->used += p->bytes;
    st->n_open++;
    if (st->dir) pthread_cond_signal(&st->news);       // the writer trims when it has written, if it is fast enough
    if (!st->dir || st->used > 2 * st->room + SLACK || st->n_open > 2 * PARK_MOST) trim_store(st);
    pthread_mutex_unlock(&st->lock);
    return true;
}

// Gives a session what p holds, which stays here too. False: it cannot, the session holds nothing, and p is gone.
static bool store_resume(Store *st, Session *s, Parked *p) {
    SessionNote note;
    pthread_mutex_lock(&st->lock);
    use_parked(st, p);
    const int fd = p->fd >= 0 ? dup(p->fd) : open(p->path, O_RDONLY | O_CLOEXEC);
    pthread_mutex_unlock(&st->lock);
    bool ok = fd >= 0;
    if (!ok) snprintf(s->err, sizeof s->err, "%.400s: %s", p->path ? p->path : "a session", strerror(errno));
    else ok = session_from_fd(s, &note, fd, p->path ? p->path : "a session in memory", NULL);
    if (ok) session_note_free(&note);
    else session_forget(s);
    if (fd >= 0) close(fd);
    pthread_mutex_lock(&st->lock);
    if (ok) st->n_resumed++;
    else drop_parked(st, p);
    pthread_mutex_unlock(&st->lock);
    return ok;
}

// ==== [4] Files ======================================================================================================

// Copies what memory holds to a file -> 0, or errno.
static int write_parked(const Parked *p, const char *path) {
    enum { PIECE = 1 << 20 };
    uint8_t *piece = alloc_or_die(PIECE, 1);
    Output out;
    int err = create_output(&out, path);
    for (uint64_t at = 0; at < p->bytes && !err; ) {
        const ssize_t n = pread(p->fd, piece, PIECE, (off_t)at);
        err = n > 0 ? write_output(&out, piece, (size_t)n) : n ? errno : EIO;
        at += n > 0 ? (uint64_t)n : 0;
    }
    free(piece);
    return finish_output(&out, err);
}

// The thread that writes. At the end it has written everything that can be.
static void *store_writer(void *store) {
    Store *st = store;
    pthread_mutex_lock(&st->lock);
    for (;;) {
        Parked *p = st->first;
        while (p && (p->path || p->failed)) p = p->next;
        if (!p && st->ending) break;
        if (!p) {
            pthread_cond_wait(&st->news, &st->lock);
            continue;
        }
        p->busy = true;
        pthread_mutex_unlock(&st->lock);
        char *path = alloc_or_die(strlen(st->dir) + 32, 1);
        sprintf(path, "%s/%016" PRIx64 ".session", st->dir, hash_bytes(p->ids.ids, p->ids.n * sizeof *p->ids.ids));
        const int err = write_parked(p, path);
        if (err) fprintf(stderr, "# --session-dir: %s: %s; the session stays in memory only\n", path, strerror(err));
        pthread_mutex_lock(&st->lock);
        p->failed = err;
        p->path = err ? NULL : path;
        if (err) free(path);
        else st->file_used += p->bytes;
        release_parked(st, p);
        trim_store(st);
    }
    pthread_mutex_unlock(&st->lock);
    return NULL;
}

// The ids of a session's file that this model can go on from. NULL: it is none, and s->err says why.
static Parked *read_parked(Session *s, const char *path) {
    SessionHeader h;
    struct stat st;
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    Parked *p = NULL;
    if (fd < 0 || fstat(fd, &st) || !S_ISREG(st.st_mode) || pread(fd, &h, sizeof h, 0) != sizeof h) {
        refuse_session(s, path, "expected a session of gemma4");
    } else if (check_whole(s, path, &h, (uint64_t)st.st_size) && check_alike(s, path, &h) && check_sizes(s, path, &h)) {
        p = alloc_or_die(1, sizeof *p);
        *p = (Parked){ .fd = -1, .bytes = h.file_bytes, .time = st.st_mtime };
        const size_t n = h.n * sizeof(int32_t);
        p->ids = (TokIds){ .ids = alloc_or_die(n, 1), .n = h.n, .cap = h.n };
        p->path = alloc_or_die(strlen(path) + 1, 1);
        strcpy(p->path, path);
        if (pread(fd, p->ids.ids, n, sizeof h) != (ssize_t)n) p->ids.n = 0;        // the checksum is for store_resume()
    }
    if (fd >= 0) close(fd);
    return p;
}

// Files of the folder that can be gone on from, the newest first. What was left half written by a process that was
// killed goes.
static void read_folder(Store *st, Session *s) {
    DIR *d = opendir(st->dir);
    const struct dirent *e;
    int n_others = 0;
    if (!d) die("--session-dir: %s: %s", st->dir, strerror(errno));
    while ((e = readdir(d))) {
        const char *end = strstr(e->d_name, ".session");
        if (end != e->d_name + 16) continue;
        char *path = alloc_or_die(strlen(st->dir) + strlen(e->d_name) + 2, 1);
        sprintf(path, "%s/%s", st->dir, e->d_name);
        Parked *p = end[8] ? NULL : read_parked(s, path);
        if (end[8] == '.') unlink(path);
        else if (!p) n_others++;
        free(path);
        if (!p) continue;
        Parked **at = &st->first;
        while (*at && (*at)->time > p->time) at = &(*at)->next;
        p->next = *at;
        *at = p;
        st->n++;
        st->file_used += p->bytes;
    }
    closedir(d);
    fprintf(stderr, "# --session-dir: %s: %d sessions%s\n", st->dir, st->n,
            n_others ? "; others, which this model cannot go on from, stay there" : "");
}

// room, file_room: bytes of host memory and of files. s: a session of the model that holds nothing, for what is
// checked.
static void store_open(Store *st, Session *s, const char *dir, uint64_t room, uint64_t file_room) {
    *st = (Store){ .m = s->m, .dir = dir, .room = room, .file_room = file_room, .dir_fd = -1,
                   .lock = PTHREAD_MUTEX_INITIALIZER, .news = PTHREAD_COND_INITIALIZER };
    if (!dir) return;
    signal(SIGXFSZ, SIG_IGN);                          // a limit of the file size is an error like a full disk
    if (mkdir(dir, 0700) && errno != EEXIST) die("--session-dir: %s: %s", dir, strerror(errno));
    st->dir_fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (st->dir_fd < 0 || access(dir, R_OK | W_OK | X_OK)) die("--session-dir: %s: %s", dir, strerror(errno));
    if (flock(st->dir_fd, LOCK_EX | LOCK_NB)) die("--session-dir: %s: another server uses it", dir);
    read_folder(st, s);
    trim_store(st);
    if (pthread_create(&st->writer, NULL, store_writer, st)) die("--session-dir: no thread for it");
}

// Writes what is in memory only to files, if there is a folder.
static void store_close(Store *st) {
    if (st->dir) {
        pthread_mutex_lock(&st->lock);
        st->ending = true;
        pthread_cond_signal(&st->news);
        pthread_mutex_unlock(&st->lock);
        pthread_join(st->writer, NULL);
        close(st->dir_fd);
    }
    for (Parked *p = st->first, *next; p; p = next) {
        next = p->next;
        if (p->fd >= 0) close(p->fd);
        tok_ids_free(&p->ids);
        free(p->path);
        free(p);
    }
}
#endif
#endif
