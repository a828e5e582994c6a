/* test_session.c - session files (parts/session.h): reading gives exactly what was written, bit for bit, with caches of
 * every type and rings that have wrapped; files of another model or cache, and truncated or changed files, are refused
 * with one line that names the difference, and the session is then empty. With a tail of f16 rows: log-probabilities
 * do not depend on how a prompt was divided, or on what of it a session held. */
#define TESTING
#include "../gemma4.c"
#include "steps.h"
#include "test.h"
#include "files.h"
#include <sys/resource.h>
#include <sys/uio.h>

static size_t most_written;   // bytes that write() takes at a time; 0: all

// In place of the C library's.
ssize_t write(int fd, const void *bytes, size_t n) {
    const size_t some = most_written && n > most_written ? most_written : n;
    return writev(fd, &(struct iovec){ (void *)(uintptr_t)bytes, some }, 1);
}

enum { N_CTX = 640, N_MORE = 70 };

static int32_t text[N_CTX + N_MORE];

static Model *open_model(const char *path, ModelOptions o) {
    Model *m = must(calloc(1, sizeof *m));
    load_model(m, path, cpu_ops(), o, NULL);
    return m;
}

static void close_model(Model *m) {
    free_model(m);
    free(m);
}

static const ModelOptions f16 = { .n_ctx = N_CTX, .n_seqs = 2, .n_batch = 256, .n_logits = STEP_ROWS, .k_type = KV_F16,
                                 .v_type = KV_F16 };

static ModelOptions with_types(KvType k, KvType v, bool untied) {
    ModelOptions o = f16;
    o.k_type = k;
    o.v_type = v;
    o.untied = untied;
    return o;
}

// Makes a session with the first n ids, as after an answer.
static Session hold(Model *m, int seq, int n) {
    static Tokenizer none;
    Session s;
    init_session(&s, m, &none, seq);
    run_prompt(m, seq, text, n);
    commit_all(m);
    for (int i = 0; i < n; i++) push_id(s.t, &s.held, text[i]);
    return s;
}

// Hash of the logits of n ids after the session's tokens; the session's length does not change. First runs drafts that
// are rejected, then all ids.
static uint64_t next_logits(Model *m, int seq, int n) {
    const size_t vocab = (size_t)m->config.vocab;
    StepRow rows[STEP_ROWS];
    uint64_t hash = 0;
    float *logits = must(malloc(vocab * sizeof *logits));
    for (int at = m->len[seq], i = 0; i < n; i += STEP_ROWS) {
        const int some = min_int(n - i, STEP_ROWS);
        for (int r = 0; r < some; r++) rows[r] = (StepRow){ .token = text[at + i + r], .output = true };
        step(m, &(StepSeg){ .seq = seq, .kind = SEG_CHAIN, .n = some, .rows = rows }, 1);
        for (int r = 0; r < some; r++) {
            read_logits(m, r, logits);
            hash = hash * 31 + hash_bytes(logits, vocab * sizeof *logits);
        }
        commit_all(m);
    }
    free(logits);
    return hash;
}

static char *bytes_of(const char *path, size_t *n) {
    struct stat st = { 0 };
    if (stat(path, &st)) must(NULL);
    *n = (size_t)st.st_size;
    return text_of(path);
}

static void put_file(const char *path, const void *bytes, size_t n) {
    FILE *f = must(fopen(path, "wb"));
    if (fwrite(bytes, 1, n, f) != n || fclose(f)) must(NULL);
}

static SessionNote some_note(void) {
    SessionNote note = { .seed = 0x123456789abcdefu, .n_skipped = 3, .raw = true };
    const char *json = "[{\"role\":\"user\",\"content\":\"hi\"}]";
    if (!tok_text_append(&note.messages, json, strlen(json))) must(NULL);
    static int32_t pending[2] = { 5, 6 };
    note.pending = (TokIds){ .ids = pending, .n = 2 };
    return note;
}

// ---- round trips ----------------------------------------------------------------------------------------------------

// Saves n tokens of session 0 to a file and loads it into session 1 of another model with a context of n_ctx.
static void round_trip(const char *path, ModelOptions o, int n, int n_ctx, bool snapshot) {
    const char *file = in_tmp("there"), *again = in_tmp("again");
    Model *a = open_model(path, o), *b = open_model(path, (o.n_ctx = n_ctx, o));
    Session s = hold(a, 0, snapshot ? n / 2 : n), r;
    if (snapshot) {                                    // ring by ring; the same as all at once
        const size_t bytes = copy_rings(a, 0, NULL, COPY_OUT);
        uint8_t *rings = must(malloc(bytes + 1));
        int pieces = 0;
        do take_snapshot(&s, false), pieces++; while (s.saving);
        copy_rings(a, 0, rings, COPY_OUT);
        CHECK(!memcmp(rings, s.snapshots[0].rings, bytes) && s.n_snapshots == 1 && s.snapshots[0].n == n / 2,
              "%s: the parts saved one by one differ", path);
        CHECK(pieces >= 1 + (bytes > 0), "%s: %d pieces", path, pieces);
        free(rings);
        for (int i = n / 2; i < n; i++) {
            step(a, &(StepSeg){ .kind = SEG_CHAIN, .n = 1, .rows = &(StepRow){ .token = text[i] } }, 1);
            commit_all(a);
            push_id(s.t, &s.held, text[i]);
        }
    }
    SessionNote note = some_note(), got;
    CHECK(session_to_file(&s, &note, file, NULL), "%s: %s", path, s.err);
    r = hold(b, 1, 20);                                // the session had other tokens before
    const int status = session_from_file(&r, &got, file, NULL);
    CHECK(status == 1, "%s: %d tokens into a context of %d: status %d, %s", path, n, n_ctx, status, r.err);
    if (status == 1) {
        CHECK(b->len[1] == n && r.held.n == (size_t)n && !memcmp(r.held.ids, s.held.ids, (size_t)n * 4),
              "%s: %d tokens: ids", path, n);
        CHECK(got.seed == note.seed && got.raw && got.n_skipped == 3 && got.messages.n == note.messages.n &&
              !memcmp(got.messages.s, note.messages.s, got.messages.n), "%s: the note came back otherwise", path);
        CHECK(got.pending.n == 2 && got.pending.ids[0] == 5 && got.pending.ids[1] == 6, "%s: pending ids", path);
        session_to_file(&r, &got, again, NULL);
        size_t n_bytes[2];
        char *bytes[2] = { bytes_of(file, &n_bytes[0]), bytes_of(again, &n_bytes[1]) };
        CHECK(n_ctx != N_CTX || (n_bytes[0] == n_bytes[1] && !memcmp(bytes[0], bytes[1], n_bytes[0])),
              "%s: %d tokens%s: written again they are other bytes", path, n, snapshot ? " with a snapshot" : "");
        free(bytes[0]);
        free(bytes[1]);
        if (snapshot && n_ctx == N_CTX) {                // both go back to the snapshot in the same way
            int32_t other[N_CTX];
            memcpy(other, text, sizeof other);
            other[n / 2 + 1]++;
            session_keep(&s, other, n);
            session_keep(&r, other, n);
            CHECK(a->len[0] == n / 2 + (a->len[0] > n / 2) && a->len[0] == b->len[1],
                  "%s: back to the snapshot: %d tokens, read %d, want %d", path, a->len[0], b->len[1], n / 2);
        }
        if (o.penalties) {
            const size_t vocab = (size_t)a->config.vocab;
            CHECK(!memcmp(a->s.counts, b->s.counts + vocab, vocab * sizeof *a->s.counts), "%s: counts of tokens differ",
                  path);
        }
        const int more = min_int(N_MORE, n_ctx - b->len[1]);
        const uint64_t want = next_logits(a, 0, more), have = next_logits(b, 1, more);
        if (snapshot && a->len[0] == n / 2 + more) {     // and then go on like one that was never longer
            Session fresh = hold(a, 1, n / 2);
            CHECK(next_logits(a, 1, more) == want, "%s: back to the snapshot at %d: other logits after it", path, n / 2);
            free_session(&fresh);
        }
        CHECK(want == have, "%s: %d tokens into a context of %d%s: other logits after them", path, n, n_ctx,
              snapshot ? ", with a snapshot" : "");
    }
    session_note_free(&got);
    tok_text_free(&note.messages);
    free_session(&s);
    free_session(&r);
    close_model(a);
    close_model(b);
}

static void test_round_trips(const char *e, const char *dense, const char *moe) {
    Model *m = open_model(e, f16);
    const int W = m->config.n_swa, R = ring_slots(m);
    close_model(m);
    ModelOptions counted = f16;
    counted.penalties = true;
    const int lengths[] = { 1, W - 1, W, R, R + 1, 2 * R + 17 };
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) round_trip(e, f16, lengths[i], N_CTX, false);
    round_trip(dense, counted, R + 30, N_CTX, false);                        // tied
    round_trip(dense, with_types(KV_F32, KV_F16, true), R + 30, N_CTX, false);
    round_trip(moe, with_types(KV_F32, KV_F32, false), R + 30, N_CTX, false);
    ModelOptions few = with_types(KV_TQ3, KV_TQ3, false);
    few.tail = 40;
    few.ring_type = KV_Q8_0;
    for (int snapshot = 0; snapshot < 2; snapshot++) {
        round_trip(dense, few, 2 * R + 17, N_CTX, snapshot);
        round_trip(e, with_types(KV_Q8_0, KV_TQ4, false), R + 30, N_CTX, snapshot);
    }
    round_trip(e, few, 90, 128, false);                // a shorter ring, and a tail that has wrapped
    round_trip(e, f16, W + 20, N_CTX, true);
    round_trip(dense, f16, 2 * R + 17, N_CTX, true);
    round_trip(e, f16, 20, 64, false);                 // a shorter ring
    round_trip(e, f16, R + 30, R + 128, false);
    printf("window %d, ring %d\n", W, R);
}

// ---- tails ----------------------------------------------------------------------------------------------------------

enum { N_TEXT = 400, N_KEPT = 240, N_JUDGED = 100 };   // tokens; of a prefix; last ones whose probabilities are compared

// Runs the tokens of the text from the end of session seq to `end` in chunks. log_p (N_JUDGED) gets the logarithms of
// the probabilities of the text's last tokens.
static void judge(Model *m, int seq, int end, int chunk, double *log_p) {
    static StepRow rows[N_TEXT];
    float *logits = must(malloc((size_t)m->config.vocab * sizeof *logits));
    for (int at = m->len[seq], n; at < end; at += n) {
        n = min_int(chunk, end - at);
        for (int i = 0; i < n; i++)
            rows[i] = (StepRow){ .token = text[at + i], .output = at + i >= N_TEXT - N_JUDGED };
        step(m, &(StepSeg){ .seq = seq, .kind = SEG_CHAIN, .n = n, .rows = rows, .more = end - at - n }, 1);
        for (int i = 0, r = 0; i < n; i++) {
            if (!rows[i].output) continue;
            read_logits(m, r++, logits);
            log_p[at + i - (N_TEXT - N_JUDGED)] = logits[text[at + i + 1]] - logsumexp(logits, m->config.vocab);
        }
        commit_all(m);
    }
    free(logits);
}

// Compares with log_p, which one chunk of N_TEXT tokens gave: other chunks, a prefix from a file that a model with other
// chunks wrote, a prefix after a rollback.
static void same_probabilities(const char *path, ModelOptions o, const double *log_p) {
    static const int chunks[] = { 1, 7, 64, 65 };
    const char *file = in_tmp("prefix");
    const size_t bytes = N_JUDGED * sizeof *log_p;
    double got[N_JUDGED];
    o.n_batch = 200;
    Model *m = open_model(path, o);
    for (size_t i = 0; i < sizeof chunks / sizeof *chunks; i++) {
        reset_session(m, 0);
        judge(m, 0, N_TEXT, chunks[i], got);
        CHECK(!memcmp(got, log_p, bytes), "%s: tail: chunks of %d: the first log-probability is %.4f, in one chunk %.4f",
              path, chunks[i], got[0], log_p[0]);
    }
    SessionNote note = { 0 };
    Session s = hold(m, 0, N_KEPT), r;
    CHECK(session_to_file(&s, &note, file, NULL), "%s: %s", path, s.err);
    take_snapshot(&s, true);
    judge(m, 0, N_TEXT, 64, got);                       // overwrites rows of the rings and of the tail
    for (int i = N_KEPT; i < N_TEXT; i++) push_id(s.t, &s.held, text[i]);
    session_rollback(&s);
    judge(m, 0, N_TEXT, 130, got);
    CHECK(!memcmp(got, log_p, bytes), "%s: tail: after a rollback: %.4f, in one chunk %.4f", path, got[0], log_p[0]);
    o.n_batch = N_TEXT;
    Model *other = open_model(path, o);
    init_session(&r, other, s.t, 1);
    CHECK(session_from_file(&r, &note, file, NULL) == 1, "%s: tail: with larger chunks: %s", path, r.err);
    judge(other, 1, N_TEXT, N_TEXT, got);
    CHECK(!memcmp(got, log_p, bytes), "%s: tail: after a file: %.4f, in one chunk %.4f", path, got[0], log_p[0]);
    session_note_free(&note);
    free_session(&s);
    free_session(&r);
    close_model(m);
    close_model(other);
}

static void test_tails(const char *path, ModelOptions o) {
    double log_p[N_JUDGED], plain[N_JUDGED];
    o.n_logits = N_JUDGED;
    o.n_batch = N_TEXT;
    Model *m = open_model(path, o);
    judge(m, 0, N_TEXT, N_TEXT, plain);
    close_model(m);
    o.tail = 40;
    m = open_model(path, o);
    judge(m, 0, N_TEXT, N_TEXT, log_p);
    close_model(m);
    CHECK(memcmp(log_p, plain, sizeof plain), "%s: a prompt in one chunk does not read the tail", path);
    same_probabilities(path, o, log_p);
}

// ---- refused files --------------------------------------------------------------------------------------------------

static void expect_refusal(Model *m, const char *file, const char *word, const char *what) {
    SessionNote note;
    Session s = hold(m, 0, 3);
    const int status = session_from_file(&s, &note, file, NULL);
    CHECK(status < 0 && strstr(s.err, word) && !strchr(s.err, '\n') && strstr(s.err, file),
          "%s: status %d, '%s', expected it to say '%s'", what, status, s.err, word);
    CHECK(m->len[0] == 0 && s.held.n == 0 && !note.messages.s && !note.pending.ids, "%s: the session holds %d tokens",
          what, m->len[0]);
    free_session(&s);
}

static void seal(char *bytes, size_t n) {              // new checksums after a change
    SessionHeader h;
    Hash hash = hash_new();
    memcpy(&h, bytes, sizeof h);
    h.hash = header_hash(&h);
    memcpy(bytes, &h, sizeof h);
    for (size_t at = 0; at < n - 8; at += SESSION_PIECE)
        hash_add(&hash, bytes + at, n - 8 - at < SESSION_PIECE ? n - 8 - at : SESSION_PIECE);
    const uint64_t end = hash_end(&hash);
    memcpy(bytes + n - 8, &end, 8);
}

static void test_damage(const char *path) {
    const char *file = in_tmp("damaged");
    Model *m = open_model(path, f16);
    Session s = hold(m, 0, 90);
    take_snapshot(&s, true);
    SessionNote note = some_note(), got;
    CHECK(session_to_file(&s, &note, file, NULL), "%s", s.err);
    size_t n;
    char *bytes = bytes_of(file, &n), *changed = must(malloc(n + 8));
    const SessionHeader *h = (const SessionHeader *)(uintptr_t)bytes;
    const size_t ids = sizeof *h, json = ids + 92 * 4, rows = json + h->n_text,
                 rings = n - 8 - (size_t)h->snapshot_bytes;
    const size_t ends[] = { 0, 1, 8, sizeof *h - 1, sizeof *h, sizeof *h + 8, ids + 1, json, rows, rows + 7, rings,
                            n - 8, n - 1 };
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        put_file(file, bytes, ends[i]);
        expect_refusal(m, file, ends[i] < sizeof *h + 8 ? "expected a gemma4 session file" : "truncated",
                       "a truncated file");
    }
    memcpy(changed, bytes, n);
    memset(changed + n, 0, 8);
    put_file(file, changed, n + 8);
    expect_refusal(m, file, "truncated or damaged", "a file with more bytes after its end");
    for (size_t at = 0; at < n; at += at < json + 8 ? 1 : 1 + n / 150) {
        memcpy(changed, bytes, n);
        changed[at] = (char)(changed[at] ^ (1 << at % 8));
        put_file(file, changed, n);
        expect_refusal(m, file, at < 8 ? "another file" : at < 16 ? "version" : at < sizeof *h ? "damaged" : at < json
                       ? "" : "checksum",
                       "a changed byte");
    }
    static const struct { const char *what, *word; size_t at; uint32_t value; } fields[] = {
        { "another model", "model: expected", 24, 1 }, { "another tokenizer", "tokenizer: expected", 32, 1 },
        { "other weights", "weights: expected", 40, 1 }, { "another layout", "cache: expected", 48, 1 },
        { "f32", "-ctk: expected f16, got f32; try -ctk f32", 56, KV_F32 },
        { "no type", "-ctv: expected f16, got an unknown", 60, 77 },
        { "untied", "--kv-layout: expected tied, got untied", 64, 1 }, { "window", "window: expected", 68, 17 },
        { "rings", "--kv-swa: expected f16, got bf16; try --kv-swa bf16", 72, KV_BF16 },
        { "tails", "--kv-tail: expected tails of 0 rows, got 64", 76, 64 },
        { "too many tokens", "try -c ", 80, N_CTX + 1 }, { "most tokens", "try -c ", 80, UINT32_MAX },
        { "fewer tokens", "do not agree", 80, 89 }, { "more pending", "do not agree", 84, 3 },
        { "huge pending", "do not agree", 84, UINT32_MAX },
        { "seen before the end", "do not agree", 88, 5 }, { "rows far ahead", "try -c ", 88, 100000 },
        { "seen, huge", "do not agree", 88, UINT32_MAX },
        { "no ring", "cache: expected", 92, 0 }, { "a ring too short", "do not agree", 92, 1 },
        { "a huge ring", "do not agree", 92, UINT32_MAX },
        { "a snapshot after the end", "do not agree", 96, 91 }, { "no snapshot", "do not agree", 96, 0 },
        { "a snapshot of fewer rows", "do not agree", 100, 1 },
        { "huge rings", "do not agree", 104, UINT32_MAX }, { "huge rings in 64 bits", "do not agree", 108, UINT32_MAX },
        { "much text", "do not agree", 120, UINT32_MAX }, { "neither text nor conversation", "do not agree", 128, 2 },
        { "a negative id", "token 0: expected an id", 168, UINT32_MAX },
        { "an id too large", "token 1: expected an id", 172, 1 << 30 },
    };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        memcpy(changed, bytes, n);
        memcpy(changed + fields[i].at, &fields[i].value, 4);
        seal(changed, n);
        put_file(file, changed, n);
        expect_refusal(m, file, fields[i].word, fields[i].what);
    }
    memcpy(changed, bytes, n);
    memset(changed + rows, 0xff, n - 8 - rows);        // rows of NaN with a correct checksum: no crash
    seal(changed, n);
    put_file(file, changed, n);
    CHECK(session_from_file(&s, &got, file, NULL) == 1, "rows of any bytes: %s", s.err);
    session_note_free(&got);
    next_logits(m, 0, 2);
    expect_refusal(m, tmp, "expected a regular file", "a folder");
    CHECK(session_from_file(&s, &got, in_tmp("nowhere"), NULL) == 0, "a file that is not there: %s", s.err);
    tok_text_free(&note.messages);
    free_session(&s);
    close_model(m);
    free(bytes);
    free(changed);
}

// Headers with true checksums, of a session of n tokens that has wrapped its rings, with a snapshot: each number is
// accepted up to the last value that is possible, and no further.
static void test_forged(const char *path) {
    const char *file = in_tmp("forged");
    Model *m = open_model(path, f16);
    const int R = ring_slots(m), W = m->config.n_swa, reach = R - (W - 1), n = 2 * R + 17, at = n - 40;
    int32_t pending = 0;
    Session s = hold(m, 0, at);
    take_snapshot(&s, true);
    run_chunk(m, 0, text + at, n - at);
    commit_all(m);
    for (int i = at; i < n; i++) push_id(s.t, &s.held, text[i]);
    SessionNote note = { .pending = { .ids = &pending, .n = 1 } }, got;
    for (int past = 0; past < 2; past++) {             // so many rows of rejected drafts follow the session
        m->n_written[0] = n + reach + past;
        CHECK(session_to_file(&s, &note, file, NULL), "%s", s.err);
        if (past) expect_refusal(m, file, "do not agree", "rings that lack a row of the window");
        else CHECK(session_from_file(&s, &got, file, NULL) == 1 && m->len[0] == n, "rings that are just enough: %s", s.err);
        if (!past) session_note_free(&got);
    }
    free_session(&s);
    s = hold(m, 0, at);
    take_snapshot(&s, true);
    run_chunk(m, 0, text + at, n - at);
    commit_all(m);
    for (int i = at; i < n; i++) push_id(s.t, &s.held, text[i]);
    m->n_written[0] = n + 30;
    CHECK(session_to_file(&s, &note, file, NULL), "%s", s.err);
    size_t n_bytes;
    char *bytes = bytes_of(file, &n_bytes), *changed = must(malloc(n_bytes));
    const int vocab = m->config.vocab;
    const struct { const char *what, *word; size_t at; int value; size_t also; int other; } fields[] = {
        { "a snapshot at the end", NULL, 96, n, 100, n }, { "a snapshot after it", "do not agree", 96, n + 1, 100, n + 1 },
        { "a snapshot whose rings are just enough", NULL, 96, n - reach, 100, n },
        { "a snapshot whose rings lack a row", "do not agree", 96, n - reach - 1, 100, n },
        { "a snapshot of rows that were never written", "do not agree", 96, n, 100, n + 31 },
        { "the last id", NULL, 168, vocab - 1, 168, vocab - 1 },
        { "one more", "token 0: expected an id", 168, vocab, 168, vocab },
        { "the last id, pending", NULL, 168 + 4 * (size_t)n, vocab - 1, 168, 0 },
        { "one more, pending", "expected an id", 168 + 4 * (size_t)n, vocab, 168, 0 } };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        memcpy(changed, bytes, n_bytes);
        memcpy(changed + fields[i].at, &fields[i].value, 4);
        memcpy(changed + fields[i].also, &fields[i].other, 4);
        seal(changed, n_bytes);
        put_file(file, changed, n_bytes);
        if (fields[i].word) {
            expect_refusal(m, file, fields[i].word, fields[i].what);
            continue;
        }
        CHECK(session_from_file(&s, &got, file, NULL) == 1 && s.n_snapshots == 1, "%s: %s", fields[i].what, s.err);
        session_note_free(&got);
        session_rollback(&s);
        CHECK(m->len[0] == s.snapshots[0].n, "%s: back to %d tokens, got %d", fields[i].what, s.snapshots[0].n, m->len[0]);
    }
    free_session(&s);
    close_model(m);
    free(bytes);
    free(changed);
}

// A prompt takes snapshots at its checkpoint and every so many tokens, whatever its chunks are; of too many the one
// closest to the next goes. From each the session continues like one that was never longer.
static void test_snapshots(const char *path) {
    enum { N = 300 };
    static const struct { int chunk, every, checkpoint, most, want[8]; } cases[] = {
        { 100, 64, 150, 8, { 64, 128, 150, 192, 256 } }, { 256, 0, 77, 8, { 77 } }, { 7, 0, 200, 8, { 200 } },
        { 256, 90, 180, 8, { 90, 180, 270 } },
        { 64, 64, 150, 3, { 64, 192, 256 } }, { 256, 0, 0, 8, { 0 } } };
    Model *m = open_model(path, f16);
    Tokenizer tok;
    load_tokenizer(&tok, &m->gguf, m->config.vocab);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const int *want = cases[i].want;
        Event e = { .kind = EVENT_PROMPT };
        Session *s = session_open(m, &tok, 0);
        const Prompt p = { .ids = text, .n = N, .checkpoint_at = cases[i].checkpoint };
        const AnswerOptions o = { .n_predict = 1, .ignore_eos = true, .think_budget = -1, .sampling.repeat = 1 };
        session_set_snapshots(s, cases[i].most, cases[i].every);
        session_set_budget(s, cases[i].chunk, INFINITY);
        CHECK(session_start(s, &p, &o), "%s", s->err);
        while (e.kind != EVENT_END) session_next(s, &e);
        int n = 0;
        while (n < 8 && want[n]) n++;
        CHECK(s->n_snapshots == n, "case %zu: %d snapshots, expected %d", i, s->n_snapshots, n);
        for (int k = n - 1; k >= 0 && s->n_snapshots == n; k--)
            CHECK(s->snapshots[k].n == want[k], "case %zu: snapshot %d at %d, expected %d", i, k, s->snapshots[k].n,
                  want[k]);
        for (int k = s->n_snapshots - 1; k >= 0; k--) {
            const int at = s->snapshots[k].n;
            int32_t other[N];
            memcpy(other, text, sizeof other);
            other[at] = (other[at] + 1) % 256;
            session_keep(s, other, N);                 // the rings may still hold what is needed
            CHECK(m->len[0] == at, "case %zu: a prompt with %d tokens in common: %d are kept", i, at, m->len[0]);
            const uint64_t got = next_logits(m, 0, 20);
            Session fresh = hold(m, 1, at);
            CHECK(next_logits(m, 1, 20) == got, "case %zu: other logits after the snapshot at %d", i, at);
            free_session(&fresh);
            restore_snapshot(s, &s->snapshots[k], text);
        }
        session_close(s);
    }
    tok_free(&tok);
    close_model(m);
}

static void test_others(const char *path, const char *dense) {
    const char *file = in_tmp("mine");
    Model *m = open_model(path, f16);
    Session s = hold(m, 0, 40);
    CHECK(session_to_file(&s, &(SessionNote){ 0 }, file, NULL), "%s", s.err);
    free_session(&s);
    close_model(m);
    const struct { const char *path; ModelOptions o; const char *word; } others[] = {
        { dense, f16, "model: expected" },
        { make_model("q8", "micro-e", "q8_0", NULL), f16, "model: expected" },
        { path, with_types(KV_F32, KV_F32, false), "-ctk: expected f32, got f16" },
        { path, with_types(KV_F16, KV_F32, false), "-ctv: expected f32, got f16" },
        { path, with_types(KV_F16, KV_F16, true), "--kv-layout: expected untied, got tied" },
        { path, (ModelOptions){ .n_ctx = 39, .n_seqs = 1, .n_batch = 64, .n_logits = 1, .k_type = KV_F16,
                                .v_type = KV_F16 },
          "it has 40 tokens: expected at most 39; try -c 552" } };
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        Model *other = open_model(others[i].path, others[i].o);
        expect_refusal(other, file, others[i].word, others[i].word);
        close_model(other);
    }
    Draft d = read_draft(path);                        // a vocabulary with one other text
    DraftKey *tokens = draft_key(&d, "tokenizer.ggml.tokens");
    tokens->value.data[tokens->value.n - 1] ^= 1;
    m = open_model(write_draft(&d, in_tmp("words.gguf")), f16);
    expect_refusal(m, file, "tokenizer: expected", "another vocabulary");
    close_model(m);
    d = read_draft(path);                              // other weights with the same shapes
    d.tensors[d.n_tensors / 2].data.data[0] ^= 1;
    m = open_model(write_draft(&d, in_tmp("weights.gguf")), f16);
    expect_refusal(m, file, "weights: expected", "other weights");
    close_model(m);
}

// A write that fails keeps the old file and leaves no other file.
static void test_failed_write(const char *path) {
    const char *folder = in_tmp("folder"), *file = in_tmp("folder/s");
    if (mkdir(folder, 0700)) must(NULL);
    Model *m = open_model(path, f16);
    Session s = hold(m, 0, 40);
    CHECK(session_to_file(&s, &(SessionNote){ .seed = 1 }, file, NULL), "%s", s.err);
    size_t n, n_after;
    char *before = bytes_of(file, &n);
    struct rlimit limit, low;
    getrlimit(RLIMIT_FSIZE, &limit);
    signal(SIGXFSZ, SIG_IGN);
    low = limit;
    low.rlim_cur = n / 2;
    setrlimit(RLIMIT_FSIZE, &low);
    const bool ok = session_to_file(&s, &(SessionNote){ .seed = 2 }, file, NULL);
    setrlimit(RLIMIT_FSIZE, &limit);
    CHECK(!ok && strstr(s.err, file) && strstr(s.err, "the old file is unchanged"), "a full disk: '%s'", s.err);
    char *after = bytes_of(file, &n_after);
    CHECK(n == n_after && !memcmp(before, after, n), "a full disk: the old file is not as it was");
    put_file(in_tmp("history"), "a line\n", 7);
    low.rlim_cur = 10;
    setrlimit(RLIMIT_FSIZE, &low);
    const int err = append_to_file(in_tmp("history"), "another line\n", 13, 0600);
    setrlimit(RLIMIT_FSIZE, &limit);
    char *lines = text_of(in_tmp("history"));
    CHECK(err == EFBIG && !strcmp(lines, "a line\n"), "half of a line is added: error %d, '%s'", err, lines);
    free(lines);
    CHECK(append_to_file(path, "another line\n", 13, 0600) == EEXIST, "a line is added to a model");
    CHECK(!session_to_file(&s, &(SessionNote){ 0 }, "/dev/full", NULL) && strstr(s.err, "got a device"),
          "/dev/full: '%s'", s.err);
    CHECK(!session_to_file(&s, &(SessionNote){ 0 }, in_tmp("nowhere/s"), NULL) && strstr(s.err, "No such file"),
          "no folder: '%s'", s.err);
    most_written = 1000;                               // as on some network file systems
    CHECK(session_to_file(&s, &(SessionNote){ .seed = 1 }, file, NULL), "write() in pieces: %s", s.err);
    most_written = 0;
    free(after);
    after = bytes_of(file, &n_after);
    CHECK(n == n_after && !memcmp(before, after, n), "write() in pieces: %zu bytes, expected the same %zu", n_after, n);
    CHECK(!unlink(file) && !rmdir(folder), "another file is left");
    free_session(&s);
    close_model(m);
    free(before);
    free(after);
}

int main(void) {
    make_tmp();
    start_threads(1);
    const char *e = make_model("e", "micro-e", "f16", NULL), *dense = make_model("dense", "micro-dense", "f16", NULL);
    const char *moe = make_model("moe", "micro-moe", "f16", NULL);
    char paths[3][700];
    snprintf(paths[0], 700, "%s", e);
    snprintf(paths[1], 700, "%s", dense);
    snprintf(paths[2], 700, "%s", moe);
    for (int i = 0; i < N_CTX + N_MORE; i++) text[i] = (int32_t)(random_unit(3, i) * 256);
    test_round_trips(paths[0], paths[1], paths[2]);
    for (int i = 0; i < 2; i++) test_tails(paths[i], with_types(KV_TQ3, i ? KV_TQ3 : KV_Q8_0, false));
    test_damage(paths[0]);
    test_forged(paths[0]);
    test_snapshots(paths[0]);
    test_others(paths[0], paths[1]);
    test_failed_write(paths[0]);
    return test_done("session");
}
