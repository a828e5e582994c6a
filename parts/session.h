/* session.h - sessions in files: tokens and KV cache, so that another run can resume where one stopped.
 *
 * Uses engine.h (section [5], which it implements) and generate.h. Begin with session_to_fd() and session_from_fd().
 * Nothing here ends the process: session_error() says what failed.
 *   [1] The file    [2] Writing    [3] Reading
 *
 * Little-endian; the sections follow each other without padding:
 *
 *   offset  bytes  field
 *        0      8  magic "GEMMA4S\n"
 *        8      4  version, 1
 *       12      4  bytes of this header, 168
 *       16      8  bytes of the whole file
 *       24      8  hash of the model's metadata, and of the names, types, shapes and sizes of its tensors
 *       32      8  hash of its tokenizer: the keys tokenizer.*
 *       40      8  hash of samples of its weights: 4 x 64 bytes of each tensor
 *       48      8  hash of the cache's layout: of each layer that owns one heads, types, rows, rotation, tail
 *       56      4  type of cached K, of gemma4.h's KvType       60   4  and of V
 *       64      4  1: K and V of global layers are kept apart   68   4  the sliding window, in tokens
 *       72      4  type of what sliding layers cache            76   4  rows of the f16 tails; 0: none
 *       80      4  n: tokens that are in the cache              84   4  n_pending: tokens of the text that are not yet
 *       88      4  n_written: end of the rows ever written      92   4  ring: slots of a sliding layer; 0: none
 *       96      4  tokens of the prefix snapshot                100  4  n_written at that time. 0 and 0: no snapshot
 *      104      8  bytes of the snapshot
 *      112      8  seed of the sampler, whose random numbers follow from it and a token's position
 *      120      4  bytes of the conversation                   124   4  its oldest messages that are not shown
 *      128      4  1: a text (--raw), 0: a conversation        132   4  1: its prompt was given as token ids (server)
 *      136     24  0
 *      160      8  hash of the header before this field
 *      168         ids, int32 x (n + n_pending); below -1: a row of a picture (picture_id in engine.h)
 *                  the conversation: a JSON list of messages as in the OpenAI API
 *                  the cache, of every layer that owns one: of k, v, and the f16 tails of both, if there are any, the
 *                  codes and then the scales as they are in memory: of each head its rows in the order of positions. A
 *                  global layer has n rows; a ring or a tail has those from position n_written - its slots (of a tail:
 *                  rows) on, at least the last window - 1
 *                  the prefix snapshot: rings and tails (copy_rings in generate.h)
 *   end - 8     8  hash of everything before
 *
 * A file is written under a temporary name in the same folder, synced, and renamed. A reader trusts no number in it:
 * sizes have to add up to the file's before memory is reserved, ids are checked, and rows may hold any bytes. */
#ifndef SESSION_H
#define SESSION_H

// ==== [1] The file ===================================================================================================

typedef struct {
    char     magic[8];
    uint32_t version, header_bytes;
    uint64_t file_bytes, model, tokenizer, weights, layout;
    uint32_t k_type, v_type, untied, window;
    uint32_t ring_type, tail;
    uint32_t n, n_pending, n_written, ring, snapshot_n, snapshot_written;
    uint64_t snapshot_bytes, seed;
    uint32_t n_text, n_skipped, raw, by_ids, zero[6];
    uint64_t hash;
} SessionHeader;
_Static_assert(sizeof(SessionHeader) == 168 && offsetof(SessionHeader, hash) == 160, "the table above");

static const char session_magic[8] = "GEMMA4S\n";
enum { SESSION_VERSION = 1, SESSION_PIECE = 1 << 22 };             // bytes that are written or read at a time

static void session_note_free(SessionNote *note) {
    tok_text_free(&note->messages);
    tok_ids_free(&note->pending);
}

// A 64-bit hash at the speed of memory: each of four lanes takes 8 bytes of every 32. Each step is a one-to-one
// function of the lane's value and of the 8 bytes, so every change within 8 bytes changes the hash. It detects damage,
// not forgery.
typedef struct { uint64_t lane[4], n; } Hash;

static uint64_t hash_mix(uint64_t h, uint64_t word) {
    h = (h ^ word) * 0x9E3779B97F4A7C15u;
    return h ^ h >> 32;
}

static Hash hash_new(void) { return (Hash){ .lane = { 1, 2, 3, 4 } }; }

// Adds n bytes to the hash. If n is not a multiple of 32, zeros fill the last 32 bytes.
static void hash_add(Hash *h, const void *bytes, size_t n) {
    const uint8_t *p = bytes;
    uint64_t a = h->lane[0], b = h->lane[1], c = h->lane[2], d = h->lane[3];
    h->n += n;
    for (; n; p += 32) {
        uint64_t word[4] = { 0 };
        const size_t take = n < 32 ? n : 32;
        if (take == 32) memcpy(word, p, 32);
        else memcpy(word, p, take);
        a = hash_mix(a, word[0]);
        b = hash_mix(b, word[1]);
        c = hash_mix(c, word[2]);
        d = hash_mix(d, word[3]);
        n -= take;
    }
    *h = (Hash){ { a, b, c, d }, h->n };
}

static uint64_t hash_end(const Hash *h) {
    uint64_t all = h->n;
    for (int i = 0; i < 4; i++) all = hash_mix(all, h->lane[i]);
    return hash_mix(all, 0);
}

static uint64_t header_hash(const SessionHeader *header) {
    Hash h = hash_new();
    hash_add(&h, header, offsetof(SessionHeader, hash));
    return hash_end(&h);
}

static void hash_key(Hash *h, const GgufKv *kv) {
    const uint64_t kind[3] = { (uint64_t)kv->type, (uint64_t)kv->elem_type, kv->count };
    hash_add(h, kv->key.s, kv->key.n);
    hash_add(h, kind, sizeof kind);
    for (uint64_t i = 0; kv->strs && i < kv->count; i++) hash_add(h, kv->strs[i].s, kv->strs[i].n);
    const size_t element = kv->elem_type == GGUF_V_STR ? 1 : gguf_value_bytes(kv->elem_type);
    if (!kv->strs && kv->count) hash_add(h, kv->data, kv->count * element);
}

// Identifies a model without reading all of it: every key, every tensor's shape, and four samples of its numbers.
static void hash_model(const Gguf *g, uint64_t *model, uint64_t *tokenizer, uint64_t *weights) {
    Hash m = hash_new(), t = hash_new(), w = hash_new();
    for (size_t i = 0; i < g->n_kvs; i++) {
        const GgufKv *kv = &g->kvs[i];
        hash_key(kv->key.n > 10 && !memcmp(kv->key.s, "tokenizer.", 10) ? &t : &m, kv);
    }
    for (size_t i = 0; i < g->n_tensors; i++) {
        const GgufTensor *x = &g->tensors[i];
        const uint64_t shape[6] = { (uint64_t)x->type, x->ne[0], x->ne[1], x->ne[2], x->ne[3], x->size };
        hash_add(&m, x->name.s, x->name.n);
        hash_add(&m, shape, sizeof shape);
        const size_t sample = x->size < 64 ? (size_t)x->size : 64;
        for (uint64_t k = 0; k < 4; k++) hash_add(&w, x->data + (x->size - sample) / 3 * k, sample);
    }
    *model = hash_end(&m);
    *tokenizer = hash_end(&t);
    *weights = hash_end(&w);
}

// The newest rows that a file has of a tail; the ring in memory has room for a prompt's step more. 0: there is none.
static int tail_rows(const Cache *c) { return c->tail_slots ? c->tail_reach + STEP_ROWS : 0; }

static uint64_t hash_layout(const Model *m) {
    Hash h = hash_new();
    for (int i = 0; i < m->n_caches; i++) {
        const Cache *c = &m->caches[i];
        const int32_t shape[] = { m->config.layer[i].is_swa, c->n_kv_heads, c->head_dim, c->n_rot, tail_rows(c),
            (int32_t)c->k.type, c->k.dim, (int32_t)c->v.type, c->v.dim,
            (int32_t)c->k_tail.type, c->k_tail.dim, (int32_t)c->v_tail.type, c->v_tail.dim };
        hash_add(&h, shape, sizeof shape);
    }
    return hash_end(&h);
}

typedef struct {              // the codes or the scales of a plane, of one session
    uint8_t *data;            // (n_heads, slots, bytes) in backend memory
    int      n_heads, slots;
    size_t   bytes;           // of a row
    bool     wraps;           // a ring, which has lost old rows
    bool     is_tail;
} RowPart;

// The parts of cache i, up to 8. Returns their number.
static int row_parts(const Model *m, int i, int seq, RowPart *parts) {
    const Cache *c = &m->caches[i];
    const struct { const KvPlane *plane; int slots; } planes[] = {
        { &c->k, c->slots }, { &c->v, c->slots }, { &c->k_tail, c->tail_slots }, { &c->v_tail, c->tail_slots } };
    int n = 0;
    for (int k = 0; k < 4; k++) {
        const KvPlane *p = planes[k].plane;
        const size_t bytes[2] = { kv_row_bytes(p->type, p->dim), kv_scale_bytes(p->type, p->dim) };
        void *const data[2] = { p->data, p->scale };
        for (int s = 0; s < 2; s++) {
            if (!data[s] || !bytes[s] || !planes[k].slots) continue;
            const size_t before = (size_t)seq * (size_t)c->n_kv_heads * (size_t)planes[k].slots * bytes[s];
            parts[n++] = (RowPart){ .data = (uint8_t *)data[s] + before, .n_heads = c->n_kv_heads,
                                    .slots = planes[k].slots, .bytes = bytes[s],
                                    .wraps = k > 1 || m->config.layer[i].is_swa, .is_tail = k > 1 };
        }
    }
    return n;
}

static int ring_slots(const Model *m) {                // of the sliding layers, all of the same size; 0: there is none
    for (int i = 0; i < m->n_caches; i++)
        if (m->config.layer[i].is_swa) return m->caches[i].slots;
    return 0;
}

static KvType ring_type(const Model *m) {              // of what sliding layers cache
    for (int i = 0; i < m->n_caches; i++)
        if (m->config.layer[i].is_swa) return m->caches[i].k.type;
    return KV_F32;
}

static int all_tail_rows(const Model *m) {             // of the global layers that have tails
    int rows = 0;
    for (int i = 0; i < m->n_caches; i++) rows = max_int(rows, tail_rows(&m->caches[i]));
    return rows;
}

// The first position whose row a part has in a file.
static int first_row(const RowPart *p, const SessionHeader *h) {
    return p->wraps ? min_int((int)h->n, max_int(0, (int)h->n_written - (int)(p->is_tail ? h->tail : h->ring))) : 0;
}

static uint64_t row_bytes(const Model *m, const SessionHeader *h) {                // of all rows in a file
    uint64_t n = 0;
    for (int i = 0; i < m->n_caches; i++) {
        RowPart parts[8];
        const int n_parts = row_parts(m, i, 0, parts);
        for (int k = 0; k < n_parts; k++)
            n += (uint64_t)((int)h->n - first_row(&parts[k], h)) * parts[k].bytes * (uint64_t)parts[k].n_heads;
    }
    return n;
}

static uint64_t session_bytes(const Model *m, const SessionHeader *h) {
    return sizeof *h + ((uint64_t)h->n + h->n_pending) * sizeof(int32_t) + h->n_text + row_bytes(m, h) +
           h->snapshot_bytes + sizeof(uint64_t);
}

// The header of a file of this model with this kind of cache, without what depends on the session.
static SessionHeader header_of(Model *m) {
    SessionHeader h = { .version = SESSION_VERSION, .header_bytes = sizeof h, .layout = hash_layout(m),
        .k_type = (uint32_t)m->options.k_type, .v_type = (uint32_t)m->options.v_type, .untied = m->options.untied,
        .window = (uint32_t)m->config.n_swa, .ring = (uint32_t)ring_slots(m),
        .ring_type = (uint32_t)ring_type(m), .tail = (uint32_t)all_tail_rows(m) };
    memcpy(h.magic, session_magic, sizeof h.magic);
    if (!m->hash[0]) hash_model(&m->gguf, &m->hash[0], &m->hash[1], &m->hash[2]);
    h.model = m->hash[0];
    h.tokenizer = m->hash[1];
    h.weights = m->hash[2];
    return h;
}

static uint64_t session_key(Session *s) {
    const SessionHeader kind = header_of(s->m);
    Hash h = hash_new();
    hash_add(&h, &kind, sizeof kind);
    hash_add(&h, s->held.ids, s->held.n * sizeof *s->held.ids);
    return hash_end(&h);
}

typedef struct {              // a file that is written or read piece by piece, and its checksum
    const Ops *op;
    int        fd;
    Output     out;
    uint8_t   *piece;         // (SESSION_PIECE), or as large as the file
    size_t     n, at;         // bytes in the piece; of these already read
    uint64_t   done, total;   // bytes of the file
    Hash       hash;
    int        err;           // errno of what failed; after that all calls do nothing
    const char *what;         // names a progress bar; NULL: none
} FileStream;

// ==== [2] Writing ====================================================================================================

static void stream_flush(FileStream *s) {
    if (!s->n || s->err) return;
    s->op->wait();                                     // copies from the backend may be under way
    hash_add(&s->hash, s->piece, s->n);
    s->err = write_output(&s->out, s->piece, s->n);
    s->done += s->n;
    s->n = 0;
    if (s->what) progress(s->what, s->done, s->total, "B");
}

// Writes n bytes from host memory or from the backend's.
static void stream_put(FileStream *s, const void *bytes, size_t n, bool from_backend) {
    for (const uint8_t *p = bytes; n && !s->err; ) {
        const size_t some = n < SESSION_PIECE - s->n ? n : SESSION_PIECE - s->n;
        if (from_backend) s->op->copy(&(Copy){ s->piece + s->n, p, some, COPY_OUT });
        else memcpy(s->piece + s->n, p, some);
        s->n += some;
        p += some;
        n -= some;
        if (s->n == SESSION_PIECE) stream_flush(s);
    }
}

static void put_rows(FileStream *s, const Model *m, int seq, const SessionHeader *h) {
    for (int i = 0; i < m->n_caches; i++) {
        RowPart parts[8];
        const int n_parts = row_parts(m, i, seq, parts);
        for (int k = 0; k < n_parts; k++)
            for (int head = 0; head < parts[k].n_heads; head++)
                for (int pos = first_row(&parts[k], h), n; pos < (int)h->n; pos += n) {
                    const RowPart *p = &parts[k];
                    const int slot = pos % p->slots;
                    n = min_int((int)h->n - pos, p->slots - slot);
                    stream_put(s, p->data + ((size_t)head * (size_t)p->slots + (size_t)slot) * p->bytes,
                               (size_t)n * p->bytes, true);
                }
    }
}

// The caller must not need the result of a step that still runs.
static int session_to_fd(Session *s, const SessionNote *note, int fd, const char *what) {
    Model *m = s->m;
    SessionHeader h = header_of(m);
    h.n = (uint32_t)m->len[s->seq];
    h.n_pending = (uint32_t)note->pending.n;
    h.n_written = (uint32_t)max_int(m->n_written[s->seq], m->len[s->seq]);
    const Snapshot *snapshot = s->n_snapshots ? &s->snapshots[s->n_snapshots - 1] : NULL;
    h.snapshot_bytes = snapshot ? copy_rings(s->m, s->seq, NULL, COPY_OUT) : 0;
    h.snapshot_n = h.snapshot_bytes ? (uint32_t)snapshot->n : 0;
    h.snapshot_written = h.snapshot_bytes ? (uint32_t)snapshot->n_written : 0;
    h.seed = note->seed;
    h.n_text = (uint32_t)note->messages.n;
    h.n_skipped = (uint32_t)note->n_skipped;
    h.raw = note->raw;
    h.by_ids = note->by_ids;
    h.file_bytes = session_bytes(m, &h);
    h.hash = header_hash(&h);

    FileStream f = { .op = m->ops, .out.fd = fd, .total = h.file_bytes, .hash = hash_new(), .what = what };
    f.piece = alloc_or_die(f.total < SESSION_PIECE ? f.total : SESSION_PIECE, 1);
    if (what) progress(what, 0, f.total, "B");
    stream_put(&f, &h, sizeof h, false);
    stream_put(&f, s->held.ids, (size_t)h.n * sizeof *s->held.ids, false);
    stream_put(&f, note->pending.ids, note->pending.n * sizeof *note->pending.ids, false);
    stream_put(&f, note->messages.s, note->messages.n, false);
    put_rows(&f, m, s->seq, &h);
    stream_put(&f, snapshot ? snapshot->rings : NULL, h.snapshot_bytes, false);
    stream_flush(&f);
    const uint64_t hash = hash_end(&f.hash);
    if (!f.err) f.err = write_output(&f.out, &hash, sizeof hash);
    if (what) progress(what, f.total, f.total, "B");
    free(f.piece);
    return f.err;
}

static bool session_to_file(Session *s, const SessionNote *note, const char *path, const char *what) {
    struct stat old;
    Output out;
    char why[160];
    if (!stat(path, &old) && !S_ISREG(old.st_mode)) {
        snprintf(s->err, sizeof s->err, "%.400s: expected a regular file, got a device, a pipe or a directory", path);
        return false;
    }
    int err = create_output(&out, path, 0600);
    if (!err) err = session_to_fd(s, note, out.fd, what);
    err = finish_output(&out, err);
    if (err) snprintf(s->err, sizeof s->err, "%.300s: cannot write: %s", path, output_error(&out, err, why));
    return !err;
}

// ==== [3] Reading ====================================================================================================

// Reads the next piece of the file, without the hash at its end.
static void stream_fill(FileStream *s) {
    const uint64_t left = s->total - sizeof(uint64_t) - s->done;
    const size_t want = left < SESSION_PIECE ? (size_t)left : SESSION_PIECE;
    s->n = s->at = 0;
    while (s->n < want && !s->err) {
        const ssize_t got = read(s->fd, s->piece + s->n, want - s->n);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) s->err = got ? errno : EIO;      // the file has become shorter
        else s->n += (size_t)got;
    }
    if (s->err) return;
    hash_add(&s->hash, s->piece, s->n);
    s->done += s->n;
    if (s->what) progress(s->what, s->done, s->total, "B");
}

// Reads n bytes to host memory or to the backend's; bytes NULL: skips them.
static void stream_get(FileStream *s, void *bytes, uint64_t n, bool to_backend) {
    for (uint8_t *p = bytes; n && !s->err; ) {
        if (s->at == s->n) stream_fill(s);
        if (s->err) return;
        const size_t some = n < s->n - s->at ? (size_t)n : s->n - s->at;
        if (p && to_backend) s->op->copy(&(Copy){ p, s->piece + s->at, some, COPY_IN });
        else if (p) memcpy(p, s->piece + s->at, some);
        s->at += some;
        if (p) p += some;
        n -= some;
    }
}

// Reads the rows; if a ring has another size than the file's, as many of the last ones as it has room for.
static void get_rows(FileStream *s, const Model *m, int seq, const SessionHeader *h) {
    for (int i = 0; i < m->n_caches; i++) {
        RowPart parts[8];
        const int n_parts = row_parts(m, i, seq, parts);
        for (int k = 0; k < n_parts; k++)
            for (int head = 0; head < parts[k].n_heads; head++) {
                const RowPart *p = &parts[k];
                const int first = first_row(p, h), kept = max_int(first, (int)h->n - p->slots);
                stream_get(s, NULL, (uint64_t)(kept - first) * p->bytes, false);
                for (int pos = kept, n; pos < (int)h->n; pos += n) {
                    const int slot = pos % p->slots;
                    n = min_int((int)h->n - pos, p->slots - slot);
                    stream_get(s, p->data + ((size_t)head * (size_t)p->slots + (size_t)slot) * p->bytes,
                               (uint64_t)n * p->bytes, true);
                }
            }
    }
}

__attribute__((format(printf, 3, 4))) static bool refuse_session(Session *s, const char *path, const char *fmt, ...) {
    va_list ap;
    const int n = snprintf(s->err, sizeof s->err, "%.200s: ", path);
    va_start(ap, fmt);
    vsnprintf(s->err + n, sizeof s->err - (size_t)n, fmt, ap);
    va_end(ap);
    return false;
}

static const char *session_type(uint32_t type) { return type <= KV_TQ3 ? kv_names[type] : "an unknown type"; }

// True if the file is complete and of this version. size: the file's.
static bool check_whole(Session *s, const char *path, const SessionHeader *h, uint64_t size) {
    if (memcmp(h->magic, session_magic, sizeof h->magic))
        return refuse_session(s, path, "expected a gemma4 session file, got another file");
    if (h->version != SESSION_VERSION || h->header_bytes != sizeof *h)
        return refuse_session(s, path, "version: expected %d, got %" PRIu32, SESSION_VERSION, h->version);
    if (h->hash != header_hash(h)) return refuse_session(s, path, "the header is damaged: wrong checksum");
    if (h->file_bytes != size)
        return refuse_session(s, path, "expected %" PRIu64 " bytes, got %" PRIu64 ": the file is truncated or damaged",
                              h->file_bytes, size);
    return true;
}

// True if it was written by this model with the same kind of cache.
static bool check_alike(Session *s, const char *path, const SessionHeader *h) {
    Model *m = s->m;
    const SessionHeader own = header_of(m);
    const struct { const char *name; uint64_t got, want; } hashes[] = {
        { "model", h->model, own.model }, { "tokenizer", h->tokenizer, own.tokenizer },
        { "weights", h->weights, own.weights } };
    for (int i = 0; i < 3; i++)
        if (hashes[i].got != hashes[i].want)
            return refuse_session(s, path, "%s: expected that of %.120s (%016" PRIx64 "), got another one (%016"
                                  PRIx64 ")", hashes[i].name, m->gguf.path, hashes[i].want, hashes[i].got);
    const struct { const char *flag; uint32_t got, want; } types[] = {
        { "-ctk", h->k_type, own.k_type }, { "-ctv", h->v_type, own.v_type },
            { "--kv-swa", h->ring_type, own.ring_type } };
    for (int i = 0; i < 3; i++)
        if (types[i].got != types[i].want)
            return refuse_session(s, path, "%s: expected %s, got %s; try %s %s", types[i].flag,
                                  session_type(types[i].want), session_type(types[i].got), types[i].flag,
                                  session_type(types[i].got));
    static const char *const layouts[] = { "tied", "untied" };
    if (h->untied != own.untied)
        return refuse_session(s, path, "--kv-layout: expected %s, got %s; try --kv-layout %s", layouts[own.untied],
                              layouts[h->untied != 0], layouts[h->untied != 0]);
    if (h->window != own.window)
        return refuse_session(s, path, "window: expected %" PRIu32 " tokens, got %" PRIu32, own.window, h->window);
    if (h->tail != own.tail)
        return refuse_session(s, path, "--kv-tail: expected tails of %" PRIu32 " rows, got %" PRIu32, own.tail,
                              h->tail);
    if (h->layout != own.layout || !h->ring != !own.ring)
        return refuse_session(s, path, "cache: expected the layout of this run (%016" PRIx64 "), got another (%016"
                              PRIx64 "); try the KV cache flags it was saved with", own.layout, h->layout);
    return true;
}

// True if n tokens can be continued from rings of h->ring slots in which rows up to n_written were written.
static bool rings_hold(const SessionHeader *h, uint32_t n, uint32_t n_written) {
    if (!h->ring || n_written <= h->ring) return n_written >= n;
    return n_written >= n && h->ring + 1 >= h->window && n_written - n <= h->ring + 1 - h->window;
}

// True if its numbers agree with each other and fit the context.
static bool check_sizes(Session *s, const char *path, const SessionHeader *h) {
    const Model *m = s->m;
    const uint32_t n_ctx = (uint32_t)m->options.n_ctx, most = MAX_CONTEXT + STEP_ROWS;
    if (h->n > n_ctx || (h->n_written > n_ctx + STEP_ROWS && h->n_written <= most))
        return refuse_session(s, path, "it has %" PRIu32 " tokens: expected at most %" PRIu32 "; try -c %d", h->n,
                              n_ctx, max_int((int)h->n, (int)h->n_written - STEP_ROWS) + 512);
    bool ok = h->n_written <= most && h->ring <= most && h->n_pending <= MAX_CONTEXT && h->n_text <= MAX_FILE &&
              h->raw <= 1 && h->by_ids <= 1 && h->snapshot_bytes <= h->file_bytes && rings_hold(h, h->n, h->n_written);
    if (h->snapshot_n)
        ok = ok && h->snapshot_n <= h->n && h->snapshot_written <= h->n_written && h->snapshot_bytes &&
             rings_hold(h, h->snapshot_n, h->snapshot_written);
    else ok = ok && !h->snapshot_written && !h->snapshot_bytes;
    if (ok && session_bytes(m, h) == h->file_bytes) return true;
    return refuse_session(s, path, "the header is damaged: %" PRIu32 " tokens, %" PRIu32 " pending, rows up to %" PRIu32
                          " in windows of %" PRIu32 ", checkpoint at %" PRIu32 ", and %" PRIu64 " bytes do not agree",
                              h->n,
                          h->n_pending, h->n_written, h->ring, h->snapshot_n, h->file_bytes);
}

// Reads the snapshot; if its size is not that of this cache, skips it.
static void read_snapshot(Session *s, FileStream *f, const SessionHeader *h) {
    const bool fits = h->snapshot_n && h->ring == (uint32_t)ring_slots(s->m) &&
                      h->snapshot_bytes == copy_rings(s->m, s->seq, NULL, COPY_OUT);
    Snapshot *snapshot = &s->snapshots[0];
    if (fits && !snapshot->rings) snapshot->rings = alloc_or_die(h->snapshot_bytes, 1);
    stream_get(f, fits ? snapshot->rings : NULL, h->snapshot_bytes, false);
    snapshot->n = (int)h->snapshot_n;
    snapshot->n_written = (int)h->snapshot_written;
    s->n_snapshots = fits && !f->err;
}

// Reads what follows the header, which was checked. False: s->err says why.
static bool read_session(Session *s, FileStream *f, const SessionHeader *h, SessionNote *note, const char *path) {
    Model *m = s->m;
    const size_t n_ids = (size_t)h->n + h->n_pending;
    int32_t *ids = alloc_or_die(n_ids, sizeof *ids);
    stream_get(f, ids, n_ids * sizeof *ids, false);
    bool ok = !f->err;
    for (size_t i = 0; i < n_ids && ok; i++) {
        ok = (ids[i] >= 0 || (ids[i] < -1 && i < h->n)) && ids[i] < m->config.vocab;
        if (!ok)
            refuse_session(s, path, "token %zu: expected an id from 0 to %d, got %" PRId32, i, m->config.vocab - 1,
                           ids[i]);
        else push_id(s->t, i < h->n ? &s->held : &note->pending, ids[i]);
    }
    free(ids);
    if (!f->err && !ok) return false;
    note->messages.s = alloc_or_die(h->n_text, 1);
    note->messages.n = note->messages.cap = h->n_text;
    stream_get(f, note->messages.s, h->n_text, false);
    get_rows(f, m, s->seq, h);
    read_snapshot(s, f, h);
    uint64_t hash = 0;
    if (!f->err && read(f->fd, &hash, sizeof hash) != sizeof hash) f->err = EIO;
    if (f->err) return refuse_session(s, path, "%s", strerror(f->err));
    if (hash != hash_end(&f->hash)) return refuse_session(s, path, "the file is damaged: wrong checksum");
    const int slots = ring_slots(m), first = max_int((int)h->n_written - (int)h->ring, (int)h->n - slots);
    m->n_written[s->seq] = max_int((int)h->n_written, first > 0 ? first + slots : 0);
    if (!shorten_session(m, s->seq, s->held.ids, (int)h->n))
        return refuse_session(s, path, "sliding-window cache: expected its last rows, got fewer");
    note->seed = h->seed;
    note->n_skipped = h->n_skipped;
    note->raw = h->raw;
    note->by_ids = h->by_ids;
    return true;
}

static bool session_from_fd(Session *s, SessionNote *note, int fd, const char *path, const char *what) {
    struct stat st;
    SessionHeader h = { 0 };
    *note = (SessionNote){ 0 };
    bool ok = !fstat(fd, &st);
    if (!ok) refuse_session(s, path, "%s", strerror(errno));
    if (ok && !S_ISREG(st.st_mode))
        ok = refuse_session(s, path, "expected a regular file, got a device, a pipe or a directory");
    if (ok && st.st_size < (off_t)(sizeof h + sizeof(uint64_t)))
        ok = refuse_session(s, path, "expected a gemma4 session file, got %lld bytes", (long long)st.st_size);
    if (ok && pread(fd, &h, sizeof h, 0) != sizeof h) ok = refuse_session(s, path, "%s", strerror(errno));
    ok = ok && check_whole(s, path, &h, (uint64_t)st.st_size) && check_alike(s, path, &h) && check_sizes(s, path, &h);

    FileStream f = { .op = s->m->ops, .fd = fd, .total = h.file_bytes, .hash = hash_new(), .what = what };
    session_forget(s);
    s->answering = s->ending = s->issued_ahead = false;
    if (ok) {
        f.piece = alloc_or_die(f.total < SESSION_PIECE ? f.total : SESSION_PIECE, 1);
        if (what) progress(what, 0, f.total, "B");
        lseek(fd, 0, SEEK_SET);                        // the hash includes the header
        stream_get(&f, NULL, sizeof h, false);
        ok = read_session(s, &f, &h, note, path);
        if (what) progress(what, f.total, f.total, "B");
        free(f.piece);
        if (!ok) session_forget(s);
    }
    if (!ok) session_note_free(note);
    return ok;
}

static int session_from_file(Session *s, SessionNote *note, const char *path, const char *what) {
    *note = (SessionNote){ 0 };
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);      // does not wait for a pipe's writer
    if (fd < 0 && errno == ENOENT) return 0;
    if (fd < 0) {
        refuse_session(s, path, "%s", strerror(errno));
        session_forget(s);
        return -1;
    }
    const bool ok = session_from_fd(s, note, fd, path, what);
    close(fd);
    return ok ? 1 : -1;
}

static int session_peek(Session *s, const char *path, SessionPeek *peek) {
    SessionHeader h;
    struct stat st;
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    int32_t *ids = NULL;
    bool whole = fd >= 0 && !fstat(fd, &st) && S_ISREG(st.st_mode) && pread(fd, &h, sizeof h, 0) == sizeof h;
    if (!whole) refuse_session(s, path, "expected a gemma4 session file, got another file");
    whole = whole && check_whole(s, path, &h, (uint64_t)st.st_size);
    const bool ours = whole && check_alike(s, path, &h) && check_sizes(s, path, &h);
    if (ours) {                                        // the checksum is for session_from_fd()
        const size_t bytes = h.n * sizeof *ids;
        ids = alloc_or_die(bytes, 1);
        whole = pread(fd, ids, bytes, sizeof h) == (ssize_t)bytes;
        if (!whole) refuse_session(s, path, "cannot read its tokens");
    }
    if (fd >= 0) close(fd);
    if (!whole || !ours) {
        free(ids);
        return whole ? 0 : -1;
    }
    *peek = (SessionPeek){ .by_ids = h.by_ids, .bytes = h.file_bytes, .ids = { .ids = ids, .n = h.n, .cap = h.n },
                           .time = (int64_t)st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec };
    return 1;
}

// Returns the tokens of the text that have not run. If a prompt was interrupted, these are its remaining tokens, up to
// the next picture; else it is the last token of the answer. A token that ends the turn is not text and is not
// returned. The session owns the ids.
static TokIds session_pending(const Session *s) {
    TokIds rest = { 0 };
    if (s->end == END_TURN || s->end == END_CALLS || (size_t)s->at >= s->todo.n) return rest;
    rest.ids = s->todo.ids + s->at;
    while ((size_t)s->at + rest.n < s->todo.n && rest.ids[rest.n] >= 0) rest.n++;
    return rest;
}

#endif
