/* test_slots.c - the server without HTTP (parts/schedule.h, store.h, exchange.h): which requests wait, which are refused and
 * when; whose turn it is; which session a request gets; what happens to the checkpoint of a prompt whose tokens are
 * replaced; which idle conversations stay; what a silent stream sends; how a picture goes through the tower while answers go on.
 * The clock of a waiting stream is simulated.
 *
 * Run from the top of the repository, where the model is. Skipped without libmicrohttpd. */
#define _GNU_SOURCE
#define TESTING
#include <errno.h>
#include <pthread.h>
static int timed_wait(pthread_cond_t *news, pthread_mutex_t *lock, const struct timespec *until);
#define pthread_cond_timedwait timed_wait
#include "../gemma4.c"
#undef pthread_cond_timedwait
#include "test.h"
#define text_of text_of_file                            // request.h has functions of these names
#define put put_in_file
#include "files.h"
#undef text_of
#undef put
#include "steps.h"

static double waited;         // the longest wait of a stream, in seconds

static int timed_wait(pthread_cond_t *news, pthread_mutex_t *lock, const struct timespec *until) {
    struct timespec now;
    (void)news, (void)lock;
    clock_gettime(CLOCK_REALTIME, &now);
    waited = fmax(waited, (double)(until->tv_sec - now.tv_sec) + 1e-9 * (double)(until->tv_nsec - now.tv_nsec));
    return ETIMEDOUT;
}

#ifndef USE_MICROHTTPD
int main(void) {
    SKIP("the server without HTTP: this build has no libmicrohttpd");
    return test_done("slots");
}
#else
#define MINI "models/gemma4-mini-q8_0.gguf"
enum { N_SLOTS = 3, N_CTX = 512 };

static Model *m;
static Tokenizer tok;
static Server srv;

// ---- the queue ------------------------------------------------------------------------------------------------------

static Job *new_job(uint64_t client, double deadline) {
    Job *job = alloc_or_die(1, sizeof *job);
    *job = (Job){ .lead = job, .n_owners = 1, .n_top = -1, .fd = -1, .client = client, .deadline = deadline, .budget = &srv.budget };
    pthread_cond_init(&job->news, NULL);
    return job;
}

static void empty_queue(void) {
    for (Job *job = srv.first, *next; job; job = next) {
        next = job->next;
        job_drop(job);                                 // the engine's
        job_drop(job);                                 // the connection's
    }
    srv.first = NULL;
    srv.last = &srv.first;
    srv.n_queued = 0;
}

// --queue 2 with three sessions: a request that an idle session can take does not count as waiting.
static void test_limit(void) {
    for (int running = 0; running <= N_SLOTS; running++) {
        Fault f = { 0 };
        int n = 0;
        srv.n_running = running;
        while (n < 20) {
            Job *job = new_job(1, 0);
            if (submit(&srv, job, &f)) n++;
            else {
                job_drop(job);
                break;
            }
        }
        CHECK(n == 2 + N_SLOTS - running && f.status == 429 && srv.n_queued == n,
              "%d of %d sessions answer: %d requests wait, then status %d; expected %d, 429", running, N_SLOTS, n, f.status,
              2 + N_SLOTS - running);
        empty_queue();
    }
    Fault f = { 0 };
    Job *job = new_job(1, 0);
    srv.n_running = 0;
    srv.draining = true;
    CHECK(!submit(&srv, job, &f) && f.status == 503, "a server that shuts down: status %d, expected 503", f.status);
    srv.draining = false;
    job_drop(job);
}

// Requests that wait for longer than --timeout are refused, and those whose client has left; the others stay in order.
static void test_waiting(void) {
    Job *job[6];
    Fault f = { 0 };
    for (int i = 0; i < 6; i++) {
        job[i] = new_job((uint64_t)i, 0);
        CHECK(i >= 5 || submit(&srv, job[i], &f), "%s", f.text);
        const double left = job[i]->deadline - job[i]->queued;
        CHECK(i >= 5 || (left > srv.o.timeout - 0.01 && left < srv.o.timeout + 0.01), "a deadline after %g s, expected %d",
              left, srv.o.timeout);
        job[i]->deadline = i == 1 || i == 4 ? 100 : 200;
    }
    job[2]->gone = true;
    clean_queue(&srv, 99);
    CHECK(srv.n_queued == 4 && job[2]->done && !job[1]->done, "before the deadline: %d wait, expected 4", srv.n_queued);
    CHECK(job[2]->fault.status == 499 && srv.totals.cancelled == 1, "a client that left: status %d, expected 499",
          job[2]->fault.status);
    clean_queue(&srv, 100.5);
    for (int i = 0; i < 5; i++)
        CHECK(job[i]->done == (i == 1 || i == 2 || i == 4), "after 100.5 s: request %d is %s", i,
              job[i]->done ? "refused" : "still there");
    CHECK(job[1]->fault.status == 503 && job[4]->fault.status == 503 && strstr(job[1]->fault.text, "within 60 seconds"),
          "a request that waited too long: status %d, '%s', expected 503", job[1]->fault.status, job[1]->fault.text);
    CHECK(submit(&srv, job[5], &f) && srv.n_queued == 3 && srv.first == job[0] && job[0]->next == job[3] &&
          job[3]->next == job[5] && !job[5]->next, "the others are in the queue in their order");
    for (int i = 0; i < 5; i++) if (job[i]->done) job_drop(job[i]);
    empty_queue();
    srv.totals = (Totals){ 0 };
}

// The next request is the first one of the client with fewest under way.
static void test_turns(void) {
    static const uint64_t clients[] = { 7, 7, 8, 9, 8 };
    Fault f = { 0 };
    Job *job[5], busy[2] = { { .client = 7 }, { .client = 8 } };
    for (int i = 0; i < 5; i++) {
        job[i] = new_job(clients[i], 0);
        submit(&srv, job[i], &f);
    }
    CHECK(*next_in_line(&srv) == job[0], "nobody is served: expected the first request");
    srv.slots[0].job = &busy[0];
    CHECK(*next_in_line(&srv) == job[2], "client 7 is served: expected the first one of client 8");
    srv.slots[2].job = &busy[1];
    CHECK(*next_in_line(&srv) == job[3], "7 and 8 are served: expected the one of client 9");
    srv.slots[0].job = srv.slots[2].job = NULL;
    empty_queue();
}

// ---- sessions -------------------------------------------------------------------------------------------------------

static void hold_ids(Session *s, const int32_t *ids, int n) {        // as after a prompt
    session_forget(s);
    run_prompt(m, s->seq, ids, n);
    commit_all(m);
    for (int i = 0; i < n; i++) push_id(&tok, &s->held, ids[i]);
}

static void encode(const char *text, TokIds *ids) {
    ids->n = 0;
    if (tok_encode(&tok, text, strlen(text), TOK_PLAIN, ids) < 0) die("%s", tok.err);
}

static int make_text(int32_t *ids, int n, int number) {              // unlike texts with other numbers
    for (int i = 0; i < n; i++) ids[i] = 300 + (i * 31 + number * 977) % 3000;
    return n;
}

// Of sessions that hold equally much of a prompt, the least recently used one; else the one that holds most. One of which
// the prompt has only a small part is not taken for that.
static void test_choice(void) {
    int32_t ids[100];
    Job *job = new_job(1, 0);
    size_t most;
    static const int64_t used[N_SLOTS] = { 5, 3, 4 };
    for (int i = 0; i < N_SLOTS; i++) {
        hold_ids(srv.slots[i].s, ids, make_text(ids, 20 + 10 * i, i));
        srv.slots[i].used = used[i];
    }
    make_text(ids, 100, 9);
    for (int i = 0; i < 100; i++) push_id(&tok, &job->ids, ids[i]);
    CHECK(choose_slot(&srv, job, &most) == &srv.slots[1] && most == 0, "another text: expected session 1, used least recently");
    make_text(job->ids.ids, 30, 2);
    CHECK(choose_slot(&srv, job, &most) == &srv.slots[2] && most == 30, "expected session 2, which holds 30 tokens, got %zu",
          most);
    hold_ids(srv.slots[2].s, ids, make_text(ids, 61, 2));
    CHECK(choose_slot(&srv, job, &most) == &srv.slots[1] && most == 0, "30 of 61 tokens: expected session 1, got one with %zu",
          most);
    job->ids.n = 60;
    CHECK(choose_slot(&srv, job, &most) == &srv.slots[2] && most == 30, "30 of a prompt of 60: expected session 2, got %zu",
          most);
    job->no_cache = true;
    CHECK(choose_slot(&srv, job, &most) == &srv.slots[1] && most == 0, "no_cache: expected session 1, got one with %zu",
          most);
    for (int i = 0; i < N_SLOTS; i++) session_forget(srv.slots[i].s), srv.slots[i].used = 0;
    job_drop(job);
}

// The session holds the text in other tokens, which replace those of the prompt: its checkpoint stays at the same place in
// the text.
static void test_replaced(void) {
    static const char said[] = "The fox lived in a house.", more[] = " Then it slept. And then it woke up again.";
    Session *s = srv.slots[0].s;
    TokIds held = { 0 }, rest = { 0 };
    encode(said, &held);
    encode(more, &rest);
    for (int at = 0; at <= (int)rest.n; at++) {
        Job *job = new_job(1, 0);
        int n_split = 0;
        session_forget(s);
        for (size_t i = 0; i < held.n; i++) {          // every token of more than a byte becomes two or more
            const TokStr piece = tok_piece(&tok, held.ids[i], false);
            TokIds part = { 0 };
            if (piece.n > 1) {
                char text[64];
                snprintf(text, sizeof text, "%.1s", piece.s);
                encode(text, &part);
                for (size_t k = 0; k < part.n; k++) push_id(&tok, &s->held, part.ids[k]);
                snprintf(text, sizeof text, "%.*s", (int)piece.n - 1, piece.s + 1);
                encode(text, &part);
                n_split += (int)part.n;
            } else {
                push_id(&tok, &part, held.ids[i]);
            }
            for (size_t k = 0; k < part.n; k++) push_id(&tok, &s->held, part.ids[k]);
            push_id(&tok, &job->ids, held.ids[i]);
            tok_ids_free(&part);
        }
        for (size_t i = 0; i < rest.n; i++) push_id(&tok, &job->ids, rest.ids[i]);
        const size_t n_held = s->held.n;
        job->checkpoint_at = (int)held.n + at;
        take_held(&srv, s, job);
        CHECK(n_split > 3 && n_held > held.n && job->ids.n == n_held + rest.n &&
              !memcmp(job->ids.ids, s->held.ids, n_held * sizeof *s->held.ids) &&
              !memcmp(job->ids.ids + n_held, rest.ids, rest.n * sizeof *rest.ids),
              "%zu tokens replaced by %zu: %zu in all", held.n, n_held, job->ids.n);
        CHECK(job->checkpoint_at == (int)n_held + at, "a checkpoint %d tokens after them: now at %d, expected %d", at,
              job->checkpoint_at, (int)n_held + at);
        job_drop(job);
    }
    session_forget(s);
    tok_ids_free(&held);
    tok_ids_free(&rest);
}

// ---- the store ------------------------------------------------------------------------------------------------------

static bool is_stored(Store *st, int number) {
    int32_t ids[80];
    size_t most;
    const TokIds text = { .ids = ids, .n = (size_t)make_text(ids, 80, number), .cap = 80 };
    Parked *p = store_find(st, NULL, &text, &most);
    store_release(st, p);
    return p && most == 80;
}

// Room for two conversations: the least recently used one leaves, and one that was resumed is used.
static void test_store(void) {
    Store st;
    Session *s = srv.slots[0].s;
    int32_t ids[80];
    store_open(&st, srv.slots[1].s, NULL, 1 << 30, 0);
    hold_ids(s, ids, make_text(ids, PARK_LEAST - 1, 1));
    CHECK(store_park(&st, s, false) && !st.n, "a conversation of %d tokens is not worth it", PARK_LEAST - 1);
    for (int i = 0; i < 3; i++) {
        hold_ids(s, ids, make_text(ids, 80, i));
        CHECK(store_park(&st, s, false), "%s", st.err);
        if (!i) st.room = 2 * st.used + st.used / 2;
    }
    CHECK(!is_stored(&st, 0) && is_stored(&st, 1) && is_stored(&st, 2) && st.n == 2 && st.n_open == 2,
          "three conversations, room for two: %d%d%d are stored, expected the last two", is_stored(&st, 0),
          is_stored(&st, 1), is_stored(&st, 2));
    size_t most;
    const TokIds second = { .ids = ids, .n = (size_t)make_text(ids, 80, 1), .cap = 80 };
    session_forget(s);
    CHECK(store_resume(&st, s, store_find(&st, NULL, &second, &most)) && s->held.n == 80 && m->len[s->seq] == 80 &&
          !memcmp(s->held.ids, ids, sizeof ids), "resumed: %zu tokens (%s)", s->held.n, st.err);
    hold_ids(s, ids, make_text(ids, 80, 3));
    CHECK(store_park(&st, s, false), "%s", st.err);
    CHECK(is_stored(&st, 1) && !is_stored(&st, 2) && is_stored(&st, 3) && st.used <= st.room,
          "a fourth, after the second was resumed: 1: %d, 2: %d, 3: %d, expected 1 and 3", is_stored(&st, 1),
          is_stored(&st, 2), is_stored(&st, 3));
    for (int i = 80; i < 90; i++) {
        const int32_t id = 400 + i;
        run_prompt(m, s->seq, &id, 1);
        commit_all(m);
        push_id(&tok, &s->held, id);
    }
    CHECK(store_park(&st, s, false) && st.n == 2 && is_stored(&st, 1) && is_stored(&st, 3),
          "a longer conversation takes the place of its beginning: %d are stored", st.n);
    s->held.n = 85;
    CHECK(store_park(&st, s, false) && st.n == 2 && is_stored(&st, 1), "and its beginning is not stored again: %d", st.n);
    s->held.n = 90;
    store_close(&st);
    session_forget(s);
}

// ---- streams --------------------------------------------------------------------------------------------------------

// After ten seconds without news, a stream sends something that clients ignore.
static void test_silence(void) {
    static const struct { const Api *api; const char *path, *sends; } streams[] = {
        { &chat_api, "/v1/chat/completions", ": keep-alive\n\n" }, { &plain_api, "/v1/completions", ": keep-alive\n\n" },
        { &messages_api, "/v1/messages", "event: ping\ndata: {\"type\":\"ping\"}\n\n" },
        { &responses_api, "/v1/responses", ": keep-alive\n\n" },
        { &ollama_chat_api, "/api/chat", "\"message\":{\"role\":\"assistant\",\"content\":\"\"}" } };
    for (size_t i = 0; i < sizeof streams / sizeof *streams; i++) {
        const Endpoint route = { .path = streams[i].path };
        Exchange *x = alloc_or_die(1, sizeof *x);
        *x = (Exchange){ .srv = &srv, .t = tok, .route = &route, .api = streams[i].api };
        append(&x->body, "{\"model\":\"m\"}", 13);
        add_choice(x);
        x->n_prompts = x->n_shown = 1;
        next_events(x);                                // the beginning, if there is one
        x->out.n = 0;
        for (int k = 0; k < 2; k++) {
            waited = 0;
            next_events(x);
            append(&x->out, "", 1);
            CHECK(strstr(x->out.s, streams[i].sends), "%s, silent: it sends '%s', expected '%s'", streams[i].path, x->out.s,
                  streams[i].sends);
            CHECK(waited > 1 && waited < 15, "%s, silent: it sends something after %g s, expected 10", streams[i].path, waited);
            x->out.n = 0;
        }
        append(&x->job->content, "hi", 2);
        add_piece(x->job, PIECE_TEXT, 0, 2);
        waited = 0;
        next_events(x);
        append(&x->out, "", 1);
        CHECK(strstr(x->out.s, "hi") && !strstr(x->out.s, "keep-alive") && !waited, "%s: text is sent at once: '%s'",
              streams[i].path, x->out.s);
        job_drop(x->choices->job);
        exchange_free(x);
    }
}

// ---- energy ---------------------------------------------------------------------------------------------------------

static double meter;                                   // joules
static double read_meter(void) { return meter; }

// Two jobs share what the device uses while both run; what it uses while none runs is nobody's.
static void test_energy(void) {
    const Ops *real = m->ops;
    Ops metered = *real;
    Job *a = new_job(1, INFINITY), *b = new_job(2, INFINITY);
    metered.joules = read_meter;
    m->ops = &metered;
    srv.joules = meter = 100;
    srv.totals.joules = 0;
    meter += 7;                                        // idle
    share_energy(&srv, NULL);
    srv.slots[0].job = a, srv.n_running = 1;
    meter += 10;
    share_energy(&srv, NULL);
    srv.slots[2].job = b, srv.n_running = 2;
    meter += 6;
    share_energy(&srv, NULL);
    CHECK(a->joules == 13 && b->joules == 3, "shared: %g and %g J, expected 13 and 3", a->joules, b->joules);
    meter += 5;
    share_energy(&srv, b);                             // scoring its prompt
    CHECK(a->joules == 13 && b->joules == 8, "one job's own: %g and %g J, expected 13 and 8", a->joules, b->joules);
    CHECK(srv.totals.joules == 21, "all: %g J, expected 21", srv.totals.joules);
    srv.slots[0].job = srv.slots[2].job = NULL, srv.n_running = 0;
    m->ops = real;
    share_energy(&srv, NULL);
    CHECK(srv.totals.joules == 21, "a device without a meter: %g J, expected 21", srv.totals.joules);
    srv.totals.joules = 0;
    job_free(a);
    job_free(b);
}

// ---- compressed prompts ---------------------------------------------------------------------------------------------

static int32_t chat_ids[200];

// Sets a job's prompt: <bos>, a system turn or none, then a user's turn.
static int ask_ids(Job *job, const char *text) {
    job->ids.n = 0;
    push_id(&tok, &job->ids, tok.bos);
    if (tok_encode(&tok, text, strlen(text), TOK_SPECIAL, &job->ids) < 0) die("%s", tok.err);
    memcpy(chat_ids, job->ids.ids, job->ids.n * sizeof *chat_ids);
    return (int)job->ids.n;
}

static void test_known(void) {
    Job *job = new_job(1, INFINITY);
    int n = ask_ids(job, "<|turn>system\nBe brief.<turn|>\n<|turn>user\nHello<turn|>\n");
    const int head = head_tokens(&tok, &job->ids);
    CHECK(head > 5 && head < n && job->ids.ids[head - 1] == tok.turn_close, "the head ends with the system turn: %d of %d", head, n);
    n = ask_ids(job, "<|turn>user\nThe system is down.<turn|>\n");
    CHECK(head_tokens(&tok, &job->ids) == 1, "no system turn: <bos> alone, got %d", head_tokens(&tok, &job->ids));
    // the first turn was shown as 4 ids in place of n
    job->checkpoint_at = n;
    copy_ids(&tok, &job->original, &job->ids, (size_t)n);
    job->ids.n = 4;
    job->checkpoint_at = 4;
    keep_shortened(&srv, job);
    Job *next = new_job(1, INFINITY);
    const int m_ids = ask_ids(next, "<|turn>user\nThe system is down.<turn|>\n<|turn>model\nYes.<turn|>\n<|turn>user\nWhy?<turn|>\n");
    next->checkpoint_at = m_ids;
    take_shortened(&srv, next);
    CHECK((int)next->ids.n == m_ids - n + 4 && next->n_known == 4 && next->n_original == m_ids, "the next turn: %zu ids, known %d, original %d",
          next->ids.n, next->n_known, next->n_original);
    CHECK(!memcmp(next->ids.ids, job->ids.ids, 4 * sizeof(int32_t)) &&
          !memcmp(next->ids.ids + 4, chat_ids + n, (size_t)(m_ids - n) * sizeof(int32_t)), "the next turn: what was shown, then what is new");
    CHECK(next->checkpoint_at == (int)next->ids.n && (int)next->original.n == m_ids, "the next turn: its checkpoint");
    keep_shortened(&srv, next);
    int used = 0;
    for (int i = 0; i < SHORTENED; i++) used += srv.shortened[i].said.n > 0;
    CHECK(used == 1, "a conversation has one place, got %d", used);
    Job *other = new_job(1, INFINITY);
    ask_ids(other, "<|turn>user\nThe system is up.<turn|>\n");
    take_shortened(&srv, other);
    CHECK(!other->n_known && !other->n_original, "another conversation is not known");
    for (int i = 0; i < SHORTENED; i++) {
        tok_ids_free(&srv.shortened[i].said);
        tok_ids_free(&srv.shortened[i].shown);
    }
    job_free(job);
    job_free(next);
    job_free(other);
}

// ---- pictures -------------------------------------------------------------------------------------------------------

enum { SEEN_W = 336, SEEN_H = 240, SEEN_N = 35 };      // pixels of the picture; its tokens

// Gives slot i a job with one picture of 35 tokens, after one token and before another.
static Job *show_picture(Server *s, int i, int level) {
    Job *job = new_job((uint64_t)i, INFINITY);
    job->rows = &s->rows;
    job->pictures = (PromptPictures){ 1, alloc_or_die(1, sizeof(Picture)), alloc_or_die(1, sizeof(PictureFile)) };
    job->pictures.places[0] = (Picture){ .first = 1, .n = SEEN_N };
    job->pictures.files[0] = (PictureFile){ .hash = (uint64_t)level, .w = SEEN_W, .h = SEEN_H, .n = SEEN_N,
                                            .rgb = alloc_or_die(SEEN_W * SEEN_H * 3, 1) };
    for (int k = 0; k < SEEN_W * SEEN_H * 3; k++) job->pictures.files[0].rgb[k] = (uint8_t)(k * level);
    push_id(s->t, &job->ids, 2);
    for (int k = 0; k < SEEN_N; k++) push_id(s->t, &job->ids, picture_id((uint64_t)level, k));
    push_id(s->t, &job->ids, 5);
    place_again(job);
    job->n_owners++;
    job->total = (int)job->ids.n;
    s->slots[i].job = job;
    s->n_running++;
    return job;
}

// A picture takes many rounds, so an answer goes on meanwhile; it is given up when its client leaves.
static void test_tower(void) {
    char file[1024], tower[1024];
    snprintf(file, sizeof file, "%s", make_model("text", "micro-dense", "f16", NULL));
    snprintf(tower, sizeof tower, "%s", make_model("tower", "micro-dense", "f32", "--kind", "mmproj", NULL));
    Model *sees = model_open(file, cpu_ops(), (ModelOptions){ .n_ctx = 256, .n_seqs = 2, .n_batch = STEP_ROWS, .n_logits = 2,
        .k_type = KV_F16, .v_type = KV_F16, .projector = tower, .image_tokens = 70 }, NULL);
    Tokenizer t;
    load_tokenizer(&t, &sees->gguf, sees->config.vocab);
    Server s = { .m = sees, .t = &t, .lock = PTHREAD_MUTEX_INITIALIZER, .slots = alloc_or_die(2, sizeof *s.slots) };
    for (int i = 0; i < 2; i++) s.slots[i].s = session_open(sees, &t, i);
    Event e;
    session_start(s.slots[0].s, &(Prompt){ .ids = (int32_t[]){ 2, 5 }, .n = 2 }, &(AnswerOptions){ .n_predict = 100 });
    while (!has_answers(&s)) session_next(s.slots[0].s, &e);
    Job *job = show_picture(&s, 1, 7);                 // how long a round takes is not known: a part in each
    const Vision *v = sees->vision;
    const int n = SEEN_W / v->side * (SEEN_H / v->side), parts = (n + STEP_ROWS - 1) / STEP_ROWS;
    const int want = v->embedder ? 1 : parts * (2 * v->n_layers + 1) + 1;
    int rounds = 0;
    for (; !job->pictures.places[0].rows && rounds < 1000; rounds++) {
        CHECK(next_seeing(&s) == &s.slots[1], "round %d: the picture is not in work", rounds);
        run_tower(&s, &s.slots[1], false);
    }
    CHECK(rounds == want && want > 10, "a picture took %d rounds, expected %d", rounds, want);
    const size_t floats = SEEN_N * (size_t)sees->config.dim;
    float *rows = alloc_or_die(floats, sizeof *rows), *copy = alloc_or_die(floats, sizeof *rows);
    memcpy(copy, job->pictures.places[0].rows, floats * sizeof *copy);
    run_tower(&s, &s.slots[1], false);
    CHECK(job->started && !job->fault.status && s.totals.pictures == 1, "its answer does not begin: %s", job->fault.text);
    session_cancel(s.slots[1].s);
    session_next(s.slots[1].s, &e);
    session_forget(s.slots[1].s);
    s.slots[1].job = NULL;
    job->n_owners = 1;
    job_drop(job);

    job = show_picture(&s, 1, 9);
    for (int i = 0; i < 5; i++) run_tower(&s, next_seeing(&s), false);
    CHECK(s.seeing == &s.slots[1] && v->pass > 0, "the picture is not in work");
    job->gone = true;                                  // its client has left
    run_tower(&s, next_seeing(&s), false);
    CHECK(!s.seeing && !s.slots[1].job && job->done && job->fault.status == CLIENT_LEFT && s.totals.pictures == 1,
          "a client that left: status %d, %d pictures", job->fault.status, (int)s.totals.pictures);
    job_drop(job);
    job = show_picture(&s, 1, 11);
    for (rounds = 0; !job->pictures.places[0].rows && rounds < 1000; rounds++) run_tower(&s, next_seeing(&s), false);
    CHECK(rounds == want, "the next picture took %d rounds, expected %d", rounds, want);
    job->fault.status = 400;
    run_tower(&s, &s.slots[1], false);
    job_drop(job);
    job = show_picture(&s, 1, 7);
    CHECK(vision_rows(sees->vision, job->pictures.files[0].rgb, SEEN_W, SEEN_H, rows) == SEEN_N &&
          !memcmp(rows, copy, floats * sizeof *rows), "computed in rounds, it has other rows");
    run_tower(&s, next_seeing(&s), false);
    CHECK(job->pictures.places[0].rows && s.totals.pictures == 2, "its rows are not kept");
    job->n_owners = 1;
    job_drop(job);
    free(rows);
    free(copy);
    row_cache_free(&s.rows);
    for (int i = 0; i < 2; i++) session_close(s.slots[i].s);
    free(s.slots);
    tok_free(&t);
    model_close(sees);
}

int main(void) {
    make_tmp();
    start_threads(1);
    m = model_open(MINI, cpu_ops(), (ModelOptions){ .n_ctx = N_CTX, .n_seqs = N_SLOTS, .n_batch = 128, .n_logits = 4,
                                                    .k_type = KV_F16, .v_type = KV_F16 }, NULL);
    load_tokenizer(&tok, &m->gguf, m->config.vocab);
    srv = (Server){ .m = m, .t = &tok, .o = { .max_queue = 2, .timeout = 60, .n_predict = -1, .think_budget = -1 },
                    .lock = PTHREAD_MUTEX_INITIALIZER, .slots = alloc_or_die(N_SLOTS, sizeof *srv.slots) };
    srv.last = &srv.first;
    sem_init(&wake, 0, 0);
    for (int i = 0; i < N_SLOTS; i++) srv.slots[i].s = session_open(m, &tok, i);
    test_limit();
    test_waiting();
    test_turns();
    test_choice();
    test_replaced();
    test_store();
    test_silence();
    test_energy();
    test_known();
    test_tower();
    for (int i = 0; i < N_SLOTS; i++) session_close(srv.slots[i].s);
    free(srv.slots);
    tok_free(&tok);
    model_close(m);
    return test_done("slots");
}
#endif
