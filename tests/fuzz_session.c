/* fuzz_session.c - session_from_file on arbitrary bytes, with the caches of a model of two layers: a ring of f16, and a
 * global layer of q8_0 with f16 tails.
 *
 * The first byte selects how the rest is used. 0: unchanged. Otherwise as a file of this model: with its fingerprint,
 * with sizes that are more often in range, and with correct checksums, so that the code after these checks is reached.
 * tests/seeds/session has a file of each kind. */
#define TESTING
#include "../gemma4.c"
#include "fuzz.h"

enum { FUZZ_CTX = 200, FUZZ_RING = 70, FUZZ_TAIL = 128, FUZZ_DIM = 32 };

static void make_plane(KvPlane *p, KvType type, int slots) {
    *p = (KvPlane){ .type = type, .dim = FUZZ_DIM, .data = calloc((size_t)slots, kv_row_bytes(type, FUZZ_DIM)) };
    if (kv_group(type)) p->scale = calloc((size_t)slots, kv_scale_bytes(type, FUZZ_DIM));
    NEED(p->data && (p->scale || !kv_group(type)));
}

static Model *make_caches(void) {
    static Model m;
    static int32_t device_len;
    static int len, seen;
    if (m.ops) return &m;
    m.ops = cpu_ops();
    m.gguf.path = "(none)";
    m.config = (Config){ .n_layers = 2, .first_shared = 2, .vocab = 1000, .n_swa = 7 };
    m.config.layer[0].is_swa = true;
    m.options = (ModelOptions){ .n_ctx = FUZZ_CTX, .n_seqs = 1, .k_type = KV_Q8_0, .v_type = KV_Q8_0 };
    m.n_caches = 2;
    for (int i = 0; i < 2; i++) {
        Cache *c = &m.caches[i];
        const KvType type = i ? KV_Q8_0 : KV_F16;
        *c = (Cache){ .n_seqs = 1, .n_kv_heads = 1, .head_dim = FUZZ_DIM, .slots = i ? FUZZ_CTX + STEP_ROWS : FUZZ_RING,
                      .tail_slots = i ? FUZZ_TAIL : 0 };
        make_plane(&c->k, type, c->slots);
        make_plane(&c->v, type, c->slots);
        if (i) make_plane(&c->k_tail, KV_F16, FUZZ_TAIL);
        if (i) make_plane(&c->v_tail, KV_F16, FUZZ_TAIL);
    }
    m.s.len = &device_len;
    m.len = &len;
    m.n_written = &seen;
    m.drafter = alloc_or_die(1, sizeof *m.drafter);    // DRAFTER_NONE
    return &m;
}

// Writes a header that check_alike() accepts, and correct checksums.
static void make_true(uint8_t *bytes, size_t size, Model *m) {
    SessionHeader h;
    Hash hash = hash_new();
    memcpy(&h, bytes, sizeof h);
    const SessionHeader own = header_of(m);
    const SessionHeader got = h;
    h = own;                                           // the conversation takes what the other sections leave
    h.n = got.n % 512, h.n_written = got.n_written % 512, h.snapshot_n = got.snapshot_n % 512, h.snapshot_written = got.snapshot_written % 512;
    h.ring = got.ring % 512, h.n_pending = got.n_pending, h.snapshot_bytes = got.snapshot_bytes;
    h.n_skipped = got.n_skipped, h.raw = got.raw, h.seed = got.seed;
    h.file_bytes = size;
    if (h.n <= FUZZ_CTX && h.ring && h.n_pending < 1000 && h.snapshot_bytes < size && session_bytes(m, &h) <= size)
        h.n_text = (uint32_t)(size - session_bytes(m, &h));
    h.hash = header_hash(&h);
    memcpy(bytes, &h, sizeof h);
    for (size_t at = 0, n = size - 8; at < n; at += SESSION_PIECE)
        hash_add(&hash, bytes + at, n - at < SESSION_PIECE ? n - at : SESSION_PIECE);
    const uint64_t end = hash_end(&hash);
    memcpy(bytes + size - 8, &end, 8);
}

static char path[] = "/tmp/fuzz_session.XXXXXX";
static void remove_file(void) { unlink(path); }

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    static int fd = -1;
    static Session s;
    Model *m = make_caches();
    SessionNote note;
    if (size == 0) return 0;
    if (fd < 0) {
        NEED((fd = mkstemp(path)) >= 0);
        atexit(remove_file);
        s.m = m;
    }
    uint8_t *file = malloc(size);
    NEED(file);
    memcpy(file, bytes + 1, --size);
    if (bytes[0] && size >= sizeof(SessionHeader) + 8) make_true(file, size, m);
    NEED(ftruncate(fd, 0) == 0 && pwrite(fd, file, size, 0) == (ssize_t)size);
    free(file);
    s.err[0] = 0;
    const int status = session_from_file(&s, &note, path, NULL);
    NEED(status != 0);
    if (status < 0) {
        NEED(s.err[0] && !strchr(s.err, '\n') && s.held.n == 0 && m->len[0] == 0 && s.n_snapshots == 0 && !note.messages.s);
    } else {
        NEED(m->len[0] <= FUZZ_CTX && s.held.n == (size_t)m->len[0] && m->s.len[0] == m->len[0] && (!s.n_snapshots || s.snapshots[0].n <= m->len[0]));
        NEED(m->n_written[0] >= m->len[0]);
        for (size_t i = 0; i < s.held.n; i++) NEED(s.held.ids[i] != -1 && s.held.ids[i] < m->config.vocab);
        for (size_t i = 0; i < note.pending.n; i++)
            NEED(note.pending.ids[i] >= 0 && note.pending.ids[i] < m->config.vocab);
        session_note_free(&note);
    }
    return 0;
}
