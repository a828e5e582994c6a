/* store.h - idle conversations: sessions whose slot the server needed for others, in host memory and, with
 * --session-dir, in files.
 *
 * Uses engine.h alone. Begin with store_park() and store_resume().
 *   [1] What a prompt shares with a session    [2] The list    [3] Parking, resuming    [4] Files
 *
 * A parked session has the same form in memory as in a file (session.h): one writer, one reader, one checksum. If
 * memory is full, the least recently used sessions leave it. With a folder, a session may leave memory only when it is
 * in a file or could not be written. One thread writes the files, so that no answer waits for the disk, unless far too
 * much is queued for it. Only the engine's thread, which calls store_park() and store_resume(), uses sessions and the
 * model; the writing thread sees bytes.
 *
 * OWNERSHIP  The store owns every Parked. Store.lock guards the list and all fields, except those that a pin protects:
 *   - A pin (Parked.pins) keeps a Parked and its memory alive. store_find() returns a pinned one, and the caller unpins
 *     it with store_resume() or store_release(); the writing thread pins what it writes. Without the lock only a pinned
 *     Parked may be read, and of it only ids, key, bytes, by_ids and fd, which do not change while it is pinned.
 *   - Dropping takes a Parked out of the list at once (gone) and frees it, and its file, when the last pin ends. So a
 *     pointer without a pin is invalid as soon as the lock is released.
 *   - trim_store() does not touch pinned entries.
 *   - With a folder, a conversation that is the beginning of a longer one is dropped only when the longer one is in a
 *     file. */
#ifndef STORE_H
#define STORE_H
#ifdef USE_MICROHTTPD
#include <dirent.h>
#include <sys/file.h>

// ==== [1] What a prompt shares with a session ========================================================================
// A client sends the model's answer back as text, and the next prompt is tokenized from that text. The model may have
// written the same text in other tokens. If so, the tokens that the session holds replace the new ones, and need not
// run again. A prompt given as token ids runs unchanged, and its ids never replace those of a text prompt.

typedef struct { size_t held, ids; } Shared;           // tokens from the beginning of each

// True if the same text follows in other tokens; then *at moves to its end.
static bool same_text(const Tokenizer *t, const TokIds *held, const TokIds *ids, Shared *at) {
    enum { MOST = 64 };       // tokens
    Shared to = *at;
    TokStr a = { 0 }, b = { 0 };
    for (int n = 0; n < MOST; n++) {
        if (!a.n && to.held < held->n) a = tok_piece(t, held->ids[to.held++], false);
        if (!b.n && to.ids < ids->n) b = tok_piece(t, ids->ids[to.ids++], false);
        const size_t some = a.n < b.n ? a.n : b.n;
        if (!some || memcmp(a.s, b.s, some)) return false;           // one has ended, or has no text
        a = (TokStr){ a.s + some, a.n - some };
        b = (TokStr){ b.s + some, b.n - some };
        if (a.n || b.n) continue;
        *at = to;
        return true;
    }
    return false;
}

// How much of a session a prompt begins with. t: NULL if only equal ids count.
static Shared shared(const Tokenizer *t, const TokIds *held, const TokIds *ids) {
    Shared at = { 0, 0 };
    do {
        while (at.held < held->n && at.ids < ids->n && held->ids[at.held] == ids->ids[at.ids]) at.held++, at.ids++;
    } while (t && at.held < held->n && at.ids < ids->n && same_text(t, held, ids, &at));
    return at;
}

// ==== [2] The list ===================================================================================================

typedef struct Parked {
    struct Parked *next;      // the one used before this one
    TokIds   ids;
    uint64_t key;             // session_key(), the name of its file; only with a folder
    uint64_t bytes;
    bool     by_ids;          // see SessionNote
    int      fd;              // the memory file that holds it; -1: none
    char    *path;            // of its file; NULL: none
    bool     failed;          // it is in no file because there was no room or writing failed
    int      pins;            // how many use it without the lock
    bool     gone;            // out of the list; freed when the last pin ends
    int64_t  time;            // of the file, in nanoseconds
} Parked;

typedef struct {
    const char  *dir;         // NULL: no files
    char         err[512];    // why the last store_park() or store_resume() failed
    uint64_t     room, file_room;        // bytes, of memory and of files
    uint64_t     used, file_used;
    Parked      *first;       // the most recently used
    int          n, n_open, n_resumed;   // n_open: those in memory
    int          dir_fd;
    bool         ending;
    pthread_mutex_t lock;     // of all of the above except dir, err and the rooms
    pthread_cond_t  news;     // for the writer: there is something to write, or it is the end
    pthread_cond_t  written;  // for the engine: the writer has finished one
    pthread_t    writer;
} Store;

enum { PARK_LEAST = 64,       // tokens; shorter sessions are not parked
       PARK_MOST = 128,       // in memory: each needs a file descriptor, and connections need some too
       SLACK = 1 << 30 };     // bytes that may wait to be written

static void leave_memory(Store *st, Parked *p) {       // with the lock held
    if (p->fd < 0) return;
    close(p->fd);
    p->fd = -1;
    st->used -= p->bytes;
    st->n_open--;
}

static void parked_free(Store *st, Parked *p) {        // it is not in the list any more; with the lock held
    leave_memory(st, p);
    if (p->path) unlink(p->path), st->file_used -= p->bytes;
    tok_ids_free(&p->ids);
    free(p->path);
    free(p);
}

static void unlink_parked(Store *st, Parked *p) {      // takes it out of the list; with the lock held
    Parked **at = &st->first;
    while (*at != p) at = &(*at)->next;
    *at = p->next;
    st->n--;
}

static void link_parked(Store *st, Parked *p) {        // puts it first, as the most recently used; with the lock held
    p->next = st->first;
    st->first = p;
    st->n++;
}

static void drop_parked(Store *st, Parked *p) {        // with the lock held
    if (p->gone) return;
    unlink_parked(st, p);
    p->gone = true;
    if (!p->pins) parked_free(st, p);
}

static void unpin(Store *st, Parked *p) {              // with the lock held
    if (!--p->pins && p->gone) parked_free(st, p);
}

static bool is_unwritten(const Store *st, const Parked *p) { return st->dir && !p->path && !p->failed; }

// The least recently used one in memory that may leave it: not pinned, not waiting to be written. NULL: none. With the
// lock held, like the next two.
static Parked *oldest_in_memory(const Store *st) {
    Parked *oldest = NULL;
    for (Parked *p = st->first; p; p = p->next) if (!p->pins && p->fd >= 0 && !is_unwritten(st, p)) oldest = p;
    return oldest;
}

static Parked *oldest_file(const Store *st) {
    Parked *oldest = NULL;
    for (Parked *p = st->first; p; p = p->next) if (!p->pins && p->path) oldest = p;
    return oldest;
}

// Removes the oldest sessions from memory that is over its limit, and drops those that are in no file; deletes the
// oldest files if they are over theirs.
static void trim_store(Store *st) {
    Parked *p;
    while (st->file_used > st->file_room && (p = oldest_file(st))) {
        unlink(p->path);
        free(p->path);
        p->path = NULL;
        p->failed = true;
        st->file_used -= p->bytes;
        if (p->fd < 0) drop_parked(st, p);
    }
    while ((st->used > st->room || st->n_open > PARK_MOST) && (p = oldest_in_memory(st))) {
        if (st->dir && !p->path)
            fprintf(stderr, "# --session-dir: a session of %zu tokens is dropped: it is not in a file, and "
                            "--cache-ram is "
                    "full\n", p->ids.n);
        if (p->path) leave_memory(st, p);
        else drop_parked(st, p);
    }
}

// Waits for the disk while memory is far over its limit and some of it waits to be written.
static void wait_for_writer(Store *st) {
    pthread_mutex_lock(&st->lock);
    for (bool waits = true; waits; ) {
        waits = false;
        if (st->used > 2 * st->room + SLACK || st->n_open > 2 * PARK_MOST)
            for (const Parked *p = st->first; p; p = p->next) waits |= is_unwritten(st, p);
        if (waits) pthread_cond_wait(&st->written, &st->lock);
    }
    pthread_mutex_unlock(&st->lock);
}

// ==== [3] Parking, resuming ==========================================================================================

// Returns the session that shares most tokens with (ids), pinned, and their number in *most. NULL: none shares any. t:
// see shared().
static Parked *store_find(Store *st, const Tokenizer *t, const TokIds *ids, size_t *most) {
    Parked *best = NULL;
    *most = 0;
    pthread_mutex_lock(&st->lock);
    for (Parked *p = st->first; p; p = p->next) {
        const size_t same = shared(p->by_ids ? NULL : t, &p->ids, ids).held;
        if (same > *most) *most = same, best = p;
    }
    if (best) best->pins++;
    pthread_mutex_unlock(&st->lock);
    return best;
}

// Ends the pin of store_find(). p may be NULL.
static void store_release(Store *st, Parked *p) {
    if (!p) return;
    pthread_mutex_lock(&st->lock);
    unpin(st, p);
    trim_store(st);
    pthread_mutex_unlock(&st->lock);
}

// True if a parked session begins with these tokens. With a folder: one that is in a file or will be.
static bool is_covered(Store *st, const TokIds *ids) {
    bool covered = false;
    pthread_mutex_lock(&st->lock);
    for (const Parked *p = st->first; p; p = p->next)
        covered |= !(st->dir && p->failed) && (size_t)same_ids(&p->ids, ids) == ids->n;
    pthread_mutex_unlock(&st->lock);
    return covered;
}

// Drops other sessions that are the beginning of this one. With the lock held.
static void drop_beginnings(Store *st, const Parked *of) {
    for (Parked *p = st->first, *next; p; p = next) {
        next = p->next;
        if (p != of && p->ids.n <= of->ids.n && (size_t)same_ids(&p->ids, &of->ids) == p->ids.n) drop_parked(st, p);
    }
}

// Copies what a session holds to the store, if there is room and it is not there yet. by_ids: see SessionNote. False:
// it could not be kept, and st->err says why.
static bool store_park(Store *st, Session *s, bool by_ids) {
    const TokIds *held = session_held(s);
    if (held->n < PARK_LEAST || (!st->room && !st->dir) || is_covered(st, held)) return true;
    if (st->dir) wait_for_writer(st);
    Parked *p = alloc_or_die(1, sizeof *p);
    struct stat file;
    *p = (Parked){ .by_ids = by_ids, .fd = memfd_create("gemma4-session", MFD_CLOEXEC) };
    int err = p->fd < 0 ? errno : session_to_fd(s, &(SessionNote){ .by_ids = by_ids }, p->fd, NULL);
    if (!err && fstat(p->fd, &file)) err = errno;
    if (err || (!st->dir && (uint64_t)file.st_size > st->room)) {
        if (p->fd >= 0) close(p->fd);
        free(p);
        if (!err) return true;                         // it would evict all others, and then itself
        snprintf(st->err, sizeof st->err, "cannot keep a session of %zu tokens: %s", held->n, strerror(err));
        return false;
    }
    for (size_t i = 0; i < held->n; i++) push_id(session_tokenizer(s), &p->ids, held->ids[i]);
    p->bytes = (uint64_t)file.st_size;
    if (st->dir) p->key = session_key(s);
    pthread_mutex_lock(&st->lock);
    if (st->dir) pthread_cond_signal(&st->news);       // the writer drops the shorter ones when this one is in a file
    else drop_beginnings(st, p);
    link_parked(st, p);
    st->used += p->bytes;
    st->n_open++;
    trim_store(st);
    pthread_mutex_unlock(&st->lock);
    return true;
}

// Copies p to a session and ends the pin of store_find(); p stays in the store. False: st->err says why it cannot; the
// session is empty and p is dropped, but its file stays, since it may be readable another time.
static bool store_resume(Store *st, Session *s, Parked *p) {
    SessionNote note;
    char name[400] = "a session in memory";
    pthread_mutex_lock(&st->lock);
    if (!p->gone) {
        unlink_parked(st, p);
        link_parked(st, p);
    }
    if (p->fd < 0) snprintf(name, sizeof name, "%s", p->path);
    const int fd = p->fd >= 0 ? dup(p->fd) : open(p->path, O_RDONLY | O_CLOEXEC);
    pthread_mutex_unlock(&st->lock);
    bool ok = fd >= 0;
    if (!ok) snprintf(st->err, sizeof st->err, "%s: %s", name, strerror(errno));
    else ok = session_from_fd(s, &note, fd, name, NULL);
    if (!ok && fd >= 0) snprintf(st->err, sizeof st->err, "%s", session_error(s));
    if (ok) session_note_free(&note);
    else session_forget(s);
    if (fd >= 0) close(fd);
    pthread_mutex_lock(&st->lock);
    if (ok) st->n_resumed++;
    if (!ok && p->path) {
        st->file_used -= p->bytes;
        free(p->path);
        p->path = NULL;
    }
    if (!ok) drop_parked(st, p);
    unpin(st, p);
    trim_store(st);
    pthread_mutex_unlock(&st->lock);
    return ok;
}

// ==== [4] Files ======================================================================================================

// Copies a session from memory to a file. False: why says why it cannot.
static bool write_parked(const Parked *p, const char *path, char why[160]) {
    enum { PIECE = 1 << 20 };
    uint8_t *piece = alloc_or_die(PIECE, 1);
    Output out;
    int err = create_output(&out, path, 0600);
    for (uint64_t at = 0; at < p->bytes && !err; ) {
        const ssize_t n = pread(p->fd, piece, PIECE, (off_t)at);
        err = n > 0 ? write_output(&out, piece, (size_t)n) : n ? errno : EIO;
        at += n > 0 ? (uint64_t)n : 0;
    }
    free(piece);
    err = finish_output(&out, err);
    if (err) output_error(&out, err, why);
    return !err;
}

// The file of a session. To be freed.
static char *parked_path(const Store *st, const Parked *p) {
    char *path = alloc_or_die(strlen(st->dir) + 32, 1);
    sprintf(path, "%s/%016" PRIx64 ".session", st->dir, p->key);
    return path;
}

// The writing thread. When it ends, it has written everything that can be written.
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
        p->pins++;
        pthread_mutex_unlock(&st->lock);
        char *path = parked_path(st, p), why[160] = "the session exceeds --session-disk";
        const bool ok = p->bytes <= st->file_room && write_parked(p, path, why);
        if (!ok) fprintf(stderr, "# --session-dir: %s: cannot write: %s\n", path, why);
        pthread_mutex_lock(&st->lock);
        p->failed = !ok;
        p->path = ok ? path : NULL;
        if (!ok) free(path);
        else st->file_used += p->bytes;
        if (ok && !p->gone) drop_beginnings(st, p);
        unpin(st, p);
        trim_store(st);
        pthread_cond_signal(&st->written);
    }
    pthread_mutex_unlock(&st->lock);
    return NULL;
}

// The session of a file, if this model can resume it. NULL: it cannot; a message names a file that is no complete
// session.
static Parked *read_parked(Session *s, const char *path) {
    SessionPeek peek;
    const int found = session_peek(s, path, &peek);
    if (found < 0) fprintf(stderr, "# --session-dir: %s\n", session_error(s));
    if (found <= 0) return NULL;
    Parked *p = alloc_or_die(1, sizeof *p);
    *p = (Parked){ .by_ids = peek.by_ids, .fd = -1, .bytes = peek.bytes, .ids = peek.ids, .time = peek.time };
    p->path = alloc_or_die(strlen(path) + 1, 1);
    strcpy(p->path, path);
    return p;
}

// True for the names that the store gives files: 16 hex digits and ".session"; half: create_output()'s name for one
// that is not complete.
static bool is_session_name(const char *name, bool *half) {
    static const char hex[] = "0123456789abcdef";
    if (strspn(name, hex) != 16 || strncmp(name + 16, ".session", 8)) return false;
    name += 24;
    *half = *name;
    if (!*name) return true;
    const size_t n = strspn(name + 1, hex);
    return *name == '.' && n && n <= 8 && !strcmp(name + 1 + n, ".tmp");
}

// Lists the files of the folder that this model can resume, the newest first. Deletes files that a killed process left
// half written; does not touch files of any other name.
static void read_folder(Store *st, Session *s) {
    DIR *d = opendir(st->dir);
    const struct dirent *e;
    int n_others = 0;
    if (!d) die("--session-dir: %s: %s", st->dir, strerror(errno));
    while ((e = readdir(d))) {
        bool half;
        if (!is_session_name(e->d_name, &half)) continue;
        char *path = alloc_or_die(strlen(st->dir) + strlen(e->d_name) + 2, 1);
        sprintf(path, "%s/%s", st->dir, e->d_name);
        Parked *p = half ? NULL : read_parked(s, path);
        if (half) unlink(path);
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
            n_others ? "; sessions of other models or settings are left alone" : "");
}

// room, file_room: bytes of host memory and of files. s: an empty session of the model, to check files with.
static void store_open(Store *st, Session *s, const char *dir, uint64_t room, uint64_t file_room) {
    *st = (Store){ .dir = dir, .room = room, .file_room = file_room, .dir_fd = -1,
                   .lock = PTHREAD_MUTEX_INITIALIZER, .news = PTHREAD_COND_INITIALIZER,
                   .written = PTHREAD_COND_INITIALIZER };
    if (!dir) return;
    if (mkdir(dir, 0700) && errno != EEXIST) die("--session-dir: %s: %s", dir, strerror(errno));
    st->dir_fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (st->dir_fd < 0 || access(dir, R_OK | W_OK | X_OK)) die("--session-dir: %s: %s", dir, strerror(errno));
    if (flock(st->dir_fd, LOCK_EX | LOCK_NB))
        die("--session-dir: %s: %s", dir, errno == EWOULDBLOCK ? "in use by another server" : strerror(errno));
    read_folder(st, s);
    trim_store(st);
    if (pthread_create(&st->writer, NULL, store_writer, st)) die("--session-dir: cannot start its writer thread");
}

// Sets the files' times in the order of use, which the next start reads.
static void date_files(const Store *st) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    int64_t at = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    for (const Parked *p = st->first; p; p = p->next, at -= 1000) {
        const struct timespec t = { (time_t)(at / 1000000000), (long)(at % 1000000000) };
        if (p->path && utimensat(AT_FDCWD, p->path, (const struct timespec[2]){ t, t }, 0)) {}        // a hint, no more
    }
}

// If there is a folder, writes to files what is in memory only, and tries again what could not be written before.
static void store_close(Store *st) {
    if (st->dir) {
        pthread_mutex_lock(&st->lock);
        for (Parked *p = st->first; p; p = p->next) p->failed = false;
        st->ending = true;
        pthread_cond_signal(&st->news);
        pthread_mutex_unlock(&st->lock);
        pthread_join(st->writer, NULL);
        date_files(st);
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
