/* schedule.h - the jobs of the server: a queue, and one engine thread that answers all of them together.
 *
 * Uses engine.h, grammar.h, request.h, recent.h, budget.h; the callers store.h (idle conversations), compress.h and
 * answer.h (hashes). Begin with run_engine().
 *   [1] How much of a prompt a round runs    [2] Jobs    [3] Slots    [4] Compressed prompts    [5] Rounds
 *
 * THREADS  The main thread is the engine: only it touches the model and the sessions, and changes slots. Another
 *          thread writes files of sessions (store.h, which has its own lock).
 *          Server.lock guards the queue, the counters, the peers, the remembered calls and items, the rows of pictures,
 *          Slot.job if others than the engine read it, and the answer and the ids of every queued job. */
#ifndef SCHEDULE_H
#define SCHEDULE_H

// ==== [1] How much of a prompt a round runs ==========================================================================

#if defined USE_MICROHTTPD || defined TESTING
// While answers are under way, a round that also runs a part of a prompt should take at most SHARE_MOST times as long
// as one without. The times of rounds show how much of a prompt that is, in rows or in multiplications. One round in
// SHARE_ROUNDS runs without a prompt, to measure that time too.
typedef struct {
    double amount;            // of a prompt, in the next round with a prompt
    double least, most;       // least > 0: no prompt starves
    int    n;                 // rounds with a prompt since the last one without
    double plain;             // seconds of a round without, 0: not known
} Share;

enum { SHARE_MOST = 3, SHARE_LEAST = 8, SHARE_ROUNDS = 32 };         // SHARE_LEAST: rows

static inline Share share_of(double least, double most) {
    return (Share){ .amount = least, .least = least, .most = most };
}

static inline bool share_looks(const Share *s) { return s->plain <= 0 || s->n >= SHARE_ROUNDS; }

// Learns from a round that took `taken` seconds. with: how much of a prompt it ran, s->amount or the least that can run
// at once; 0: it ran no prompt.
static inline void share_learn(Share *s, double with, double taken) {
    if (with <= 0) {
        const double more = fmin(taken, 2 * s->plain) - s->plain;    // one round may be slow by chance
        s->plain += s->plain > 0 ? more * (more > 0 ? 0.25 : 0.5) : taken;
        s->n = 0;
        return;
    }
    const double change = 0.9 * SHARE_MOST * s->plain / taken;       // a tenth is left for variation
    s->amount = fmin(fmax(fmax(s->amount, with) * fmin(fmax(change, 0.5), 1.25), s->least), s->most);
    s->n++;
}
#endif

#ifdef USE_MICROHTTPD
#include <poll.h>
#include <semaphore.h>
#include <sys/random.h>
#include <sys/socket.h>

enum { IDLE_SECONDS = 30, KEEP_ALIVE_SECONDS = 10, DRAIN_SECONDS = 30, CLIENT_LEFT = 499, REPLAYS = 4096 };

// ==== [2] Jobs =======================================================================================================
// A job is a prompt and its answer. Jobs wait in a queue. When a session is free, it goes to the first job of the
// clients that have fewest jobs under way. If several sessions are free, the job gets the one that holds most of its
// prompt. All sessions with a job advance together: each round decodes one token of each, and runs one chunk of one
// long prompt; long prompts alternate. If the chunk size cannot change results, chunks are smaller while answers are
// under way; else a chunk ends at the same tokens, no matter which other jobs run. Decoded rows do not depend on each
// other, so an answer does not depend on other answers.

typedef struct { TokText name, arguments; char id[40]; } Call;
typedef struct { TokIds ids; char id[40]; } Replay;                  // a call as the model wrote it
// A token of the answer, its probability, and the most probable tokens at its place.
typedef struct { int32_t id, n_top, top[MAX_TOP]; float logprob, top_logprob[MAX_TOP]; } Likely;

typedef enum { PIECE_THOUGHT, PIECE_TEXT, PIECE_CALL } PieceKind;
typedef struct {              // a part of an answer; all of them are in the order in which the model wrote them
    PieceKind kind;
    size_t    from, to;       // its bytes in Job.thought or Job.content; CALL: its number in Job.calls and the next one
} AnswerPiece;

typedef struct Job {
    struct Job   *next;       // in the queue
    struct Job   *lead;       // the first job of the same request, which may be the job itself: its `news`, stop
                              // strings and biases serve all of them, and only it counts in the queue
    // the question: not changed after it is queued, except the ids: see take_held()
    TokIds        ids;
    int           checkpoint_at;       // see Prompt
    AnswerOptions options;
    float        *bias;       // (vocab), or NULL
    bool          no_cache;
    bool          by_ids;     // the client gave the prompt as token ids: they are run as they are
    TokIds        original;   // a prompt that is compressed: the ids that the client sent, up to the checkpoint
    int           n_original, n_known;           // all of them, 0: not compressed; ids that an earlier prompt had
    PromptPictures pictures;           // of the lead, for all its jobs: see [5]
    size_t        picture_bytes;       // what they take at most
    Picture      *places;              // (pictures.n of the lead) in this job's ids; NULL before its session begins
    RowCache     *rows;                // that has the rows
    double        score_seconds;                 // what compressing it took
    int           n_top;      // most probable tokens to report with each token; -1: no probabilities
    bool          ranked;     // logprob_sum is needed
    bool          scores;     // the tokens of the prompt have probabilities too: the first entries of `likely`
    int           fd;         // of the client
    Budget       *budget;     // that counts
    size_t        held;       // these bytes of it: see job_bytes()
    uint64_t      client;     // equal for jobs of the same client
    double        queued, deadline;        // seconds()
    // the answer
    TokIds        said;
    TokText       content, thought;
    Call         *calls;
    AnswerPiece        *pieces;
    Likely       *likely;     // (n_likely) tokens of the content
    int           n_calls, n_pieces, n_likely, room_likely;
    double        logprob_sum;         // of n_summed tokens
    int           n_summed;
    bool          thinks;     // its last token is part of a thought that goes on
    bool          cut;        // the end of the answer has cut its last piece
    int           run, total, cached;      // tokens of the prompt
    int           n_scored;   // of the prompt: tokens that have theirs
    bool          started, done;
    EndReason     end;
    Turn          turn;
    double        joules;     // its part of the energy that the device has used; 0: not known
    int           thought_tokens;
    const char   *stop;       // the stop string that ended it, or NULL
    Fault         fault;      // status 0: there is an answer
    // owners
    bool          gone;       // its client has left
    int           n_owners;   // the connection, the engine, and the jobs that it leads
    pthread_cond_t news;      // something was added to one of the jobs
} Job;

typedef struct {
    Session *s;
    Job     *job;             // NULL: free
    int64_t  used;            // number of its last job, 0: none
    size_t   asked;           // tokens of that job's prompt that the next prompt of its conversation begins with
    bool     biased;          // its biases are not 0
    bool     by_ids;          // see SessionNote: of the tokens that it holds
} Slot;

typedef struct {              // since the start
    uint64_t jobs, refused, cancelled, prompt_tokens, cached_tokens, made, http[6];     // http: by hundreds of status
    uint64_t left_out;        // tokens of compressed prompts
    uint64_t pictures;        // that went through the tower
    uint64_t steps, drafted, accepted;
    double   prompt_seconds, decode_seconds, joules;
} Totals;

// The beginning of a conversation, as a client sends it, and what the model was shown instead.
typedef struct { TokIds said, shown; int64_t used; } Shortened;
enum { SHORTENED = 16 };

typedef struct Peer {         // a connection
    struct Peer *next, **link;         // link: what points to it
    int          fd;
    double       quiet;       // seconds() since when the head of a request is due; INFINITY: none is
} Peer;

typedef struct {
    Model          *m;
    Tokenizer      *t;
    GrammarVocab    vocab;
    ServeOptions    o;
    struct MHD_Daemon *daemon;
    char            address[128];      // http://HOST:PORT
    atomic_size_t   max_body;          // bytes of a request's body at most
    atomic_bool     ready;             // the model is loaded; until then m, t and what follows from them are not set
    char            name[128];         // of the model
    int64_t         created;           // time() of the start
    Budget          budget;
    uint64_t        salt;              // so that ids of this run differ from those of others
    atomic_ullong   n_ids;
    Slot           *slots;             // (n_seqs)
    Store           store;             // idle conversations
    Compressor      compressor;
    Shortened       shortened[SHORTENED];
    double          joules;            // read_joules() when it was shared out last
    float          *logits;            // (vocab)
    int             last_prompt;       // slot of the prompt that advanced last
    int             chunk;             // rows of a prompt in a round without answers
    bool            by_rows;           // share.amount counts rows of a prompt; false: multiplications
    Share           share;             // how much of a prompt runs in a round with answers
    bool            loopback;
    pthread_mutex_t lock;
    Job            *first, **last;     // the queue
    Peer           *peers;
    int             n_peers, n_queued, n_running;
    int             n_open;            // requests whose answer is not complete
    int64_t         n_jobs;
    Replay         *replays;           // (REPLAYS) the last calls
    int             n_replays;         // since the start
    Recent          items, responses;  // of /v1/responses, by their ids
    RowCache        rows;              // of pictures: clients send all of a conversation again in each turn
    Slot           *seeing;            // whose picture is in the tower; NULL: none is
    bool            sees;              // an image tower is loaded
    uint64_t        unknown[128];      // hashes of unknown fields of requests that the log has named
    int             n_unknown;
    bool            draining;
    Totals          totals;
} Server;

static int n_slots(const Server *srv) { return model_options(srv->m)->n_seqs; }
static int context_size(const Server *srv) { return model_options(srv->m)->n_ctx; }

// Tokens of a prompt at most. A scorer may read more than the context holds, since the model is shown less.
static int prompt_room(const Server *srv) {
    const Model *scorer = srv->compressor.scorer;
    return max_int(context_size(srv), scorer ? model_options(scorer)->n_ctx : 0);
}

static sem_t wake;                                     // wakes the engine: a job or a signal came, or a client left
static atomic_int stop_asked;                          // the signal that asks to stop; any thread may set it

static void on_stop(int signal_number) {
    if (stop_asked) _exit(128 + signal_number);
    stop_asked = signal_number;
    sem_post(&wake);
}

// A new id, different from those of all other answers of this and other runs: prefix, 24 digits.
static void new_id(Server *srv, const char *prefix, char out[40]) {
    const uint64_t n[2] = { srv->salt, atomic_fetch_add(&srv->n_ids, 1) };
    snprintf(out, 40, "%.12s%016" PRIx64 "%08" PRIx32, prefix, hash_bytes(n, sizeof n), (uint32_t)n[1]);
}

static void drop_grammar(Job *job) {
    if (job->options.grammar) grammar_free(job->options.grammar);
    free(job->options.grammar);
    job->options.grammar = NULL;
}

// The memory of a job: prompt, grammar, answer.
static size_t job_bytes(const Job *job) {
    return sizeof *job + (job->ids.cap + job->said.cap + job->original.cap) * sizeof(int32_t) + job->content.cap +
           job->thought.cap + (size_t)job->n_calls * sizeof *job->calls + (size_t)job->n_pieces * sizeof *job->pieces +
           (size_t)job->room_likely * sizeof *job->likely + job->picture_bytes +
           (job->options.grammar ? grammar_memory(job->options.grammar) : 0);
}

static bool job_count(Job *job) { return budget_set(job->budget, FOR_ANSWERS, &job->held, job_bytes(job)); }

static void job_free(Job *job) {                       // the caller holds the lock
    for (int i = 0; i < job->n_calls; i++) {
        tok_text_free(&job->calls[i].name);
        tok_text_free(&job->calls[i].arguments);
    }
    const TextList *stops = &job->options.stops;
    for (int i = 0; i < stops->n && job->lead == job; i++) free((char *)(uintptr_t)stops->text[i]);
    if (job->lead == job) free(stops->text);
    if (job->lead == job) free(job->bias);
    if (job->lead == job) pictures_release(job->rows, &job->pictures);
    free(job->places);
    free(job->calls);
    free(job->pieces);
    free(job->likely);
    drop_grammar(job);
    budget_set(job->budget, FOR_ANSWERS, &job->held, 0);
    tok_ids_free(&job->ids);
    tok_ids_free(&job->original);
    tok_ids_free(&job->said);
    tok_text_free(&job->content);
    tok_text_free(&job->thought);
    pthread_cond_destroy(&job->news);
    free(job);
}

static void job_drop(Job *job) {                       // one owner less; the caller holds the lock
    Job *lead = job->lead;
    if (--job->n_owners) return;
    job_free(job);
    if (lead != job) job_drop(lead);
}

// Puts the jobs of a request, a list that begins with their lead, at the end of the queue. False: they are refused.
static bool submit(Server *srv, Job *job, Fault *f) {
    bool ok = true;
    pthread_mutex_lock(&srv->lock);
    if (srv->draining) {
        ok = refuse(f, 503, "", "the server is shutting down");
    } else if (srv->n_queued >= srv->o.max_queue + (n_slots(srv) - srv->n_running)) {
        srv->totals.refused++;
        ok = refuse(f, 429, "", "the queue is full with %d requests; try again later", srv->n_queued);
    } else {
        *srv->last = job;
        srv->n_queued++;
        srv->totals.jobs++;
        for (const double now = seconds(); job; job = job->next) {
            job->queued = now;
            job->deadline = now + srv->o.timeout;
            job->n_owners++;
            srv->last = &job->next;
        }
    }
    pthread_mutex_unlock(&srv->lock);
    if (ok) sem_post(&wake);
    return ok;
}

static void job_done(Server *srv, Job *job) {          // the engine has finished it; the caller holds the lock
    job->done = true;
    drop_grammar(job);
    srv->totals.cancelled += job->gone && job->lead == job;
    if (job->gone) refuse(&job->fault, CLIENT_LEFT, "", "the client closed the connection");
    pthread_cond_broadcast(&job->lead->news);
    job_drop(job);
}

static bool has_left(const Job *job) {                 // the client has closed its end of the connection
    struct pollfd p = { .fd = job->fd, .events = POLLRDHUP };
    return job->gone || (poll(&p, 1, 0) > 0 && p.revents & (POLLRDHUP | POLLHUP | POLLERR));
}

// Finds jobs whose client has left. The caller holds the lock.
static void look_for_clients(Server *srv) {
    for (int i = 0; i < n_slots(srv); i++)
        if (srv->slots[i].job) srv->slots[i].job->gone = has_left(srv->slots[i].job);
    for (Job *job = srv->first; job; job = job->next) job->gone = has_left(job);
}

// Closes connections that do not complete their request. libmicrohttpd closes those that send nothing; these send a
// byte now and then.
static void end_slow_peers(Server *srv, double now) {
    for (const Peer *p = srv->peers; p; p = p->next)
        if (now - p->quiet > IDLE_SECONDS) shutdown(p->fd, SHUT_RDWR);
}

// Removes from the queue jobs whose client has left, or that waited too long. The caller holds the lock.
static void clean_queue(Server *srv, double now) {
    srv->last = &srv->first;
    for (Job *job; (job = *srv->last); ) {
        if (!job->gone && now < job->deadline) {
            srv->last = &job->next;
            continue;
        }
        if (!job->gone) refuse(&job->fault, 503, "", "no session became free within %d seconds", srv->o.timeout);
        *srv->last = job->next;
        srv->n_queued -= job->lead == job;
        job_done(srv, job);
    }
}

// ==== [3] Slots ======================================================================================================

// Returns how many tokens of the session the job's prompt begins with, if they are at least half of the session's
// tokens or half of the prompt. Else returns 0: reuse would save little, and the session's other tokens would be lost.
static size_t worth(Server *srv, const Slot *slot, const Job *job) {
    const TokIds *held = session_held(slot->s);
    if (job->no_cache) return 0;
    const Shared same = shared(job->by_ids || slot->by_ids ? NULL : srv->t, held, &job->ids);
    return 2 * same.held >= held->n || 2 * same.ids >= job->ids.n ? same.held : 0;
}

// Returns the free slot whose session saves the job most tokens by worth(), and sets *most to their number. If several
// slots are equal, returns the least recently used one. Returns NULL if no slot is free.
static Slot *choose_slot(Server *srv, const Job *job, size_t *most) {
    Slot *best = NULL;
    *most = 0;
    for (int i = 0; i < n_slots(srv); i++) {
        Slot *slot = &srv->slots[i];
        if (slot->job) continue;
        const size_t n = worth(srv, slot, job);
        if (best && (n < *most || (n == *most && slot->used >= best->used))) continue;
        best = slot;
        *most = n;
    }
    return best;
}

static Slot *oldest_slot(Server *srv) {                // the least recently used free slot; NULL: none
    Slot *best = NULL;
    for (int i = 0; i < n_slots(srv); i++) {
        Slot *slot = &srv->slots[i];
        if (!slot->job && (!best || slot->used < best->used)) best = slot;
    }
    return best;
}

// Puts what a slot holds into the store, unless the next job continues it. same: tokens that the two share.
static void park(Server *srv, Slot *slot, size_t same) {
    if (slot->used && same >= slot->asked) return;
    if (!store_park(&srv->store, slot->s, slot->by_ids)) fprintf(stderr, "# %s\n", srv->store.err);
}

// Returns the slot that holds most of the job's prompt. If a session in the store holds more of it, resumes that
// session in the least recently used slot. Returns NULL if no slot is free.
static Slot *make_ready(Server *srv, Job *job) {
    enum { GAIN = 64 };       // more tokens that justify resuming a session from the store
    size_t most, stored = 0;
    Slot *slot = choose_slot(srv, job, &most);
    if (!slot) return NULL;
    Parked *p = job->no_cache ? NULL : store_find(&srv->store, job->by_ids ? NULL : srv->t, &job->ids, &stored);
    const bool resumes = p && stored > most + GAIN;
    if (resumes) slot = oldest_slot(srv);
    park(srv, slot, resumes ? 0 : most);               // may drop p, which stays valid while it is pinned
    if (resumes) slot->by_ids = p->by_ids;
    if (!resumes) store_release(&srv->store, p);
    else if (!store_resume(&srv->store, slot->s, p)) fprintf(stderr, "# %s\n", srv->store.err);
    return slot;
}

// Gives the energy that the device has used since the last call to a job, or if that is NULL, in equal parts to the
// jobs under way. The caller holds the lock.
static void share_energy(Server *srv, Job *job) {
    const double now = read_joules(srv->m), used = now - srv->joules;
    if (now < 0) return;
    srv->joules = now;
    if (job) job->joules += used;
    for (int i = 0; i < n_slots(srv) && !job; i++)
        if (srv->slots[i].job) srv->slots[i].job->joules += used / srv->n_running;
    if (job || srv->n_running) srv->totals.joules += used;
}

// Replaces the tokens of a prompt, and frees the old ones. checkpoint_at: see Prompt.
static void set_prompt_ids(Server *srv, Job *job, TokIds *ids, int checkpoint_at) {
    pthread_mutex_lock(&srv->lock);
    const TokIds old = job->ids;
    job->ids = *ids;
    job->checkpoint_at = checkpoint_at;
    *ids = old;
    pthread_mutex_unlock(&srv->lock);
    tok_ids_free(ids);
}

// Replaces tokens of the prompt by those that the session holds, if their text is the same.
static void take_held(Server *srv, const Session *s, Job *job) {
    const TokIds *held = session_held(s);
    const Shared same = shared(srv->t, held, &job->ids);
    TokIds ids = { 0 };
    for (size_t i = 0; i < same.held; i++) push_id(srv->t, &ids, held->ids[i]);
    for (size_t i = same.ids; i < job->ids.n; i++) push_id(srv->t, &ids, job->ids.ids[i]);
    const bool whole = (size_t)job->checkpoint_at >= same.ids;
    const int checkpoint_at = whole ? job->checkpoint_at + (int)same.held - (int)same.ids : 0;
    if (ids.n <= (size_t)context_size(srv)) set_prompt_ids(srv, job, &ids, checkpoint_at);
    else tok_ids_free(&ids);
}

// The session of the slot begins to answer its job.
static void begin_answer(Server *srv, Slot *slot) {
    Job *job = slot->job;
    const PromptPictures *pictures = &job->lead->pictures;
    for (int k = 0; k < pictures->n && job->places; k++) job->places[k].rows = pictures->places[k].rows;
    const Prompt p = { .ids = job->ids.ids, .n = (int)job->ids.n, .checkpoint_at = job->checkpoint_at,
                       .n_original = job->n_original, .score_seconds = job->score_seconds, .pictures = job->places,
                       .n_pictures = pictures->n };
    const bool ok = !job->fault.status && session_start(slot->s, &p, &job->options);
    pthread_mutex_lock(&srv->lock);
    job->started = true;
    job->cached = ok && !job->scores ? job->total - session_state(slot->s).n_left : 0;
    job->run = job->cached;
    if (!ok) {
        refuse(&job->fault, 400, "", "%s", session_error(slot->s));
        slot->job = NULL;
        srv->n_running--;
        job_done(srv, job);
    }
    pthread_mutex_unlock(&srv->lock);
}

// ==== [4] Compressed prompts =========================================================================================
// With --compress the model is shown a part of a long prompt. Later prompts of the same conversation begin with the
// same tokens: these are replaced by what the model was shown then, which the cache may hold, and only what follows may
// be compressed. The head of a prompt, <bos> and the system turn, is never compressed.

static bool may_compress(const Server *srv, const Job *job) {
    return srv->compressor.ratio > 0 && !job->by_ids && !job->scores && !job->lead->pictures.n;
}

static int head_tokens(const Tokenizer *t, const TokIds *ids) {
    char role[32] = "";
    size_t n = 0, i = ids->n && ids->ids[0] == t->bos;
    const size_t first = i;
    if (i >= ids->n || ids->ids[i] != t->turn_open) return (int)first;
    for (i++; i < ids->n && n < 7; i++) {
        const TokStr piece = tok_piece(t, ids->ids[i], false);
        if (!piece.n || n + piece.n >= sizeof role) break;
        memcpy(role + n, piece.s, piece.n);
        n += piece.n;
    }
    if (n < 7 || memcmp(role, "system\n", 7)) return (int)first;
    while (i < ids->n && ids->ids[i] != t->turn_close) i++;
    return (int)(i + (i < ids->n));
}

static void copy_ids(Tokenizer *t, TokIds *to, const TokIds *from, size_t n) {         // the first n of them
    to->n = 0;
    for (size_t i = 0; i < n; i++) push_id(t, to, from->ids[i]);
}

// The longest known beginning of a prompt; NULL: none.
static Shortened *find_shortened(Server *srv, const TokIds *ids) {
    Shortened *best = NULL;
    for (Shortened *s = srv->shortened; s < srv->shortened + SHORTENED; s++)
        if (s->said.n && same_ids(&s->said, ids) == (int)s->said.n && (!best || s->said.n > best->said.n)) best = s;
    return best;
}

// Replaces what is known of a job's prompt by what the model was shown.
static void take_shortened(Server *srv, Job *job) {
    const Shortened *known = find_shortened(srv, &job->ids);
    TokIds ids = { 0 };
    if (!known) return;
    const int more = (int)known->shown.n - (int)known->said.n, checkpoint_at = job->checkpoint_at + more;
    copy_ids(srv->t, &job->original, &job->ids, (size_t)job->checkpoint_at);
    job->n_original = (int)job->ids.n;
    job->n_known = (int)known->shown.n;
    copy_ids(srv->t, &ids, &known->shown, known->shown.n);
    for (size_t i = known->said.n; i < job->ids.n; i++) push_id(srv->t, &ids, job->ids.ids[i]);
    set_prompt_ids(srv, job, &ids, job->checkpoint_at >= (int)known->said.n ? checkpoint_at : 0);
}

// Remembers what the model is shown of a conversation: in place of an earlier part of it, or of the oldest one.
static void keep_shortened(Server *srv, const Job *job) {
    Shortened *s = find_shortened(srv, &job->original);
    if (!job->original.n || !job->checkpoint_at) return;
    for (int i = 0; !s && i < SHORTENED; i++) {
        Shortened *oldest = srv->shortened;
        for (int k = 1; k < SHORTENED; k++) if (srv->shortened[k].used < oldest->used) oldest = &srv->shortened[k];
        s = oldest;
    }
    copy_ids(srv->t, &s->said, &job->original, job->original.n);
    copy_ids(srv->t, &s->shown, &job->ids, (size_t)job->checkpoint_at);
    s->used = ++srv->n_jobs;
}

// Compresses what is not known of a job's prompt, if that is long. Other answers wait meanwhile.
static void compress_job(Server *srv, Session *s, Job *job) {
    enum { KEPT_END = CHUNK };                         // tokens at the end that are never left out
    Compressor *c = &srv->compressor;
    const int n = (int)job->ids.n, first = job->n_known ? job->n_known : head_tokens(srv->t, &job->ids);
    const int n_after = n - job->checkpoint_at;
    TokIds out = { 0 };
    if (!job->n_known && !is_long(c, n - first)) return;
    if (!job->n_known) copy_ids(srv->t, &job->original, &job->ids, (size_t)job->checkpoint_at);
    pthread_mutex_lock(&srv->lock);
    share_energy(srv, NULL);
    pthread_mutex_unlock(&srv->lock);
    if (!compress_prompt(c, s, job->ids.ids, n, first, &out)) {
        refuse(&job->fault, 400, "", "%s", c->err);
        return;
    }
    if (!job->n_original) job->n_original = n;
    job->score_seconds = c->seconds;
    if (out.n > (size_t)context_size(srv)) {
        job->fault.code = "context_length_exceeded";
        refuse(&job->fault, 400, "messages", "This model's maximum context length is %d tokens. However, your prompt "
               "of %d tokens has %zu when it is compressed.", context_size(srv), job->n_original, out.n);
    }
    const bool keeps = job->checkpoint_at && n_after <= KEPT_END;
    set_prompt_ids(srv, job, &out, keeps ? (int)out.n - n_after : 0);
    keep_shortened(srv, job);
}

// Finds the pictures in the ids of a job, which are the last ones now.
static void place_again(Job *job) {
    const PromptPictures *p = &job->lead->pictures;
    if (!p->n) return;
    job->places = calloc((size_t)p->n, sizeof *job->places);
    if (!job->places) {
        refuse_starved(&job->fault);
        return;
    }
    memcpy(job->places, p->places, (size_t)p->n * sizeof *job->places);
    find_pictures(&job->ids, job->places, p->n);
}

static void start_job(Server *srv, Slot *slot, Job *job) {
    Session *s = slot->s;
    if (job->bias || slot->biased) session_set_bias(s, job->bias);
    slot->biased = job->bias;
    if (job->no_cache || job->scores) session_forget(s);
    if (may_compress(srv, job)) compress_job(srv, s, job);
    if (!job->no_cache && !job->scores && !job->by_ids && !slot->by_ids) take_held(srv, s, job);
    slot->by_ids = job->by_ids;
    place_again(job);
    pthread_mutex_lock(&srv->lock);
    share_energy(srv, job->score_seconds > 0 ? job : NULL);
    job->total = (int)job->ids.n;
    slot->used = ++srv->n_jobs;
    slot->asked = (size_t)(job->checkpoint_at ? job->checkpoint_at : job->total);
    slot->job = job;
    srv->n_running++;
    pthread_mutex_unlock(&srv->lock);
    if (!job->scores && !job->places) begin_answer(srv, slot);
}

// Returns the pointer to the next job: the first one of a client with fewest jobs under way. The caller holds the lock.
static Job **next_in_line(Server *srv) {
    Job **best = &srv->first;
    int least = INT_MAX;
    for (Job **at = &srv->first; *at; at = &(*at)->next) {
        int n = 0;
        for (int i = 0; i < n_slots(srv); i++)
            n += srv->slots[i].job && srv->slots[i].job->client == (*at)->client;
        if (n < least) least = n, best = at;
    }
    return best;
}

// Gives free sessions to waiting jobs. Tokens of a prompt are not scored while another prompt is paused between layers.
static void admit(Server *srv) {
    if (srv->compressor.ratio > 0 && model_paused(srv->m) >= 0) return;
    for (;;) {
        pthread_mutex_lock(&srv->lock);
        Job **at = oldest_slot(srv) ? next_in_line(srv) : NULL, *job = at ? *at : NULL;
        if (job) {
            *at = job->next;
            if (!job->next) srv->last = at;
            srv->n_queued -= job->lead == job;
            job->next = NULL;
        }
        pthread_mutex_unlock(&srv->lock);
        if (!job) return;
        if (may_compress(srv, job)) take_shortened(srv, job);
        start_job(srv, make_ready(srv, job), job);
    }
}

// ==== [5] Rounds =====================================================================================================

typedef enum { ROUND_OTHER, ROUND_PLAIN, ROUND_SHARED } Round;       // PLAIN: only answers; SHARED: also a prompt

// True if the tokens of the slot's prompt are still to get their probabilities, before the answer begins.
static bool is_scoring(const Slot *slot) { return slot->job && slot->job->scores && !slot->job->started; }

static bool has_answers(const Server *srv) {           // under way, after their prompts
    bool answers = false;
    for (int i = 0; i < n_slots(srv); i++) {
        const SessionState state = session_state(srv->slots[i].s);
        answers |= state.running && !state.prompting;
    }
    return answers;
}

// Chooses the sessions of the next round. Returns their number, and sets *round to the kind of the round. If there are
// several long prompts, only one of them runs.
static int pick(Server *srv, Session **sessions, Slot **slots, Round *round) {
    const int n_seqs = n_slots(srv), after = srv->last_prompt, paused = model_paused(srv->m);
    bool long_one = false;
    int n = 0;
    const bool answers = has_answers(srv);
    const bool looks = answers && share_looks(&srv->share);
    const int chunk = answers && srv->by_rows ? (int)srv->share.amount : srv->chunk;
    *round = answers ? ROUND_PLAIN : ROUND_OTHER;
    for (int k = 1; k <= n_seqs; k++) {
        const int i = (after + k) % n_seqs;
        Slot *slot = &srv->slots[i];
        if (!slot->job || !slot->job->started) continue;
        session_set_budget(slot->s, chunk, answers && !srv->by_rows ? srv->share.amount : INFINITY);
        const SessionState state = session_state(slot->s);
        const bool is_prompt = state.running && state.prompting;
        const bool is_long = is_prompt && state.n_left > min_int(chunk, STEP_ROWS);
        if (is_long && (long_one || (paused >= 0 && paused != i))) continue;
        if (is_prompt && looks) continue;
        if (is_prompt) *round = *round == ROUND_PLAIN && state.n_next == chunk ? ROUND_SHARED : ROUND_OTHER;
        if (is_long) srv->last_prompt = i;
        long_one |= is_long;
        sessions[n] = slot->s;
        slots[n++] = slot;
    }
    return n;
}

// Learns from the time of a round that ran no prompt, or that ran as much of one as the share allows.
static void learn_share(Server *srv, Round round, double taken) {
    const double with = srv->by_rows ? srv->share.amount : session_state(srv->slots[srv->last_prompt].s).work_done;
    const bool whole = srv->by_rows || model_paused(srv->m) >= 0;         // else the chunk had ended before
    if (round == ROUND_PLAIN) share_learn(&srv->share, 0, taken);
    if (round == ROUND_SHARED && whole) share_learn(&srv->share, with, taken);
}

// The probability of token `id`, and the n most probable tokens; of equal ones the first.
static void weigh(const float *logits, int vocab, int32_t id, int n, Likely *l) {
    const double sum = logsumexp(logits, vocab);
    *l = (Likely){ .id = id, .n_top = min_int(n, vocab), .logprob = (float)(logits[id] - sum) };
    for (int i = 0, have = 0; i < vocab && l->n_top; i++) {            // one pass: other sessions wait
        int k = have;
        if (have == l->n_top && !(logits[i] > logits[l->top[k - 1]])) continue;
        have += have < l->n_top;
        if (k == l->n_top) k--;
        for (; k > 0 && logits[i] > logits[l->top[k - 1]]; k--) l->top[k] = l->top[k - 1];
        l->top[k] = i;
    }
    for (int k = 0; k < l->n_top; k++) l->top_logprob[k] = (float)(logits[l->top[k]] - sum);
}

static void push_likely(Job *job, const Likely *l) {   // the caller holds the lock
    if (job->n_likely == job->room_likely) {
        const int room = 2 * job->room_likely + 64;
        Likely *list = resize_list(job->likely, room, sizeof *list);
        if (!list) return;
        job->likely = list;
        job->room_likely = room;
    }
    job->likely[job->n_likely++] = *l;
}

// Only tokens that the client sees have probabilities. After a prompt that has them, all tokens have them, also the end
// of the turn: programs that measure models expect as many as they asked for.
static void add_likely(Server *srv, Slot *slot, const Event *e) {
    Job *job = slot->job;
    if ((job->n_top < 0 && !job->ranked) || e->kind != EVENT_TOKEN || e->n_ids != 1) return;
    const bool hidden = tok_reply_thinks(session_reply(slot->s)) || tok_is_stop(srv->t, e->ids[0]);
    if (hidden && !job->scores) return;
    Likely l;
    if (!session_logits(slot->s, srv->logits)) return;
    weigh(srv->logits, model_shape(srv->m).vocab, e->ids[0], job->n_top, &l);
    pthread_mutex_lock(&srv->lock);
    job->logprob_sum += (double)l.logprob;
    job->n_summed++;
    if (job->n_top >= 0) push_likely(job, &l);
    pthread_mutex_unlock(&srv->lock);
}

// Counts the memory of a job that has grown. If there is not so much, the answer that takes most of it ends with an
// error. The caller holds the lock.
static void keep_to_budget(Server *srv, Slot *slot) {
    Slot *largest = slot;
    if (!starved && job_count(slot->job)) return;
    for (int i = 0; i < n_slots(srv); i++) {
        Slot *other = &srv->slots[i];
        if (other->job && !other->job->fault.status && other->job->held > largest->job->held) largest = other;
    }
    refuse_starved(&largest->job->fault);
    session_cancel(largest->s);
}

// Runs the next tokens of a prompt that have to have probabilities: few, because other sessions wait. Then, with the
// last token, or if it has to stop, the answer begins.
static void run_scoring(Server *srv, Slot *slot, bool stop) {
    enum { ROWS = 8 };
    Job *job = slot->job;
    const int vocab = model_shape(srv->m).vocab, at = job->n_scored, left = job->total - 1 - at;
    const Likely first = { .id = job->ids.ids[0], .logprob = NAN };
    Likely likely[ROWS];
    starved = false;
    const bool ends = left <= 0 || stop || job->gone || job->fault.status;
    const int n = ends ? 0 : session_append_rows(slot->s, job->ids.ids + at, min_int(left, ROWS));
    for (int i = 0; i < n; i++) {
        session_row_logits(slot->s, i, srv->logits);
        weigh(srv->logits, vocab, job->ids.ids[at + i + 1], job->n_top, &likely[i]);
    }
    pthread_mutex_lock(&srv->lock);
    if (!job->n_likely) push_likely(job, &first);
    for (int i = 0; i < n; i++) push_likely(job, &likely[i]);
    job->n_scored += n;
    keep_to_budget(srv, slot);
    pthread_mutex_unlock(&srv->lock);
    if (ends || n == left) begin_answer(srv, slot);
}

// ---- pictures ----
// A picture is decoded on the thread of its connection (exchange.h) and goes through the tower here, one after the
// other, a part in each round: so other answers go on meanwhile, and a picture is given up when its client leaves. Its
// rows are kept for later prompts. Those that the session holds need not be computed. When all rows are there, the
// answer begins.

enum { TOWER_MS = 100 };      // of a round without answers

// The slot whose picture is in the tower; else the one whose job has waited longest for the rows of its pictures; NULL:
// none waits.
static Slot *next_seeing(Server *srv) {
    Slot *best = srv->seeing;
    if (best) return best;
    for (int i = 0; i < n_slots(srv); i++) {
        Slot *slot = &srv->slots[i];
        const bool sees = slot->job && !slot->job->started && slot->job->places;
        if (sees && (!best || slot->job->queued < best->job->queued)) best = slot;
    }
    return best;
}

// Goes on with the rows of the picture of a slot's job. Returns them if they are there. While answers are under way, a
// round may take SHARE_MOST times as long as without.
static const float *rows_of(Server *srv, Slot *slot, PictureFile *f) {
    char err[300];
    pthread_mutex_lock(&srv->lock);
    const float *known = srv->seeing ? NULL : row_cache_pin(&srv->rows, f->hash);
    pthread_mutex_unlock(&srv->lock);
    if (known) return known;
    if (!srv->seeing && !picture_begin(srv->m, f, err, sizeof err)) {
        if (strstr(err, "out of memory")) refuse_starved(&slot->job->fault);
        else refuse(&slot->job->fault, 400, "messages", "%s", err);
        return NULL;
    }
    srv->seeing = slot;
    const double most = has_answers(srv) ? (SHARE_MOST - 1) * srv->share.plain : TOWER_MS / 1e3;
    float *rows = picture_next(srv->m, f, seconds() + most);
    if (!rows) return NULL;
    srv->seeing = NULL;
    pthread_mutex_lock(&srv->lock);
    srv->totals.pictures++;
    if (!row_cache_add(&srv->rows, f->hash, rows, (size_t)f->n * (size_t)model_shape(srv->m).dim * sizeof *rows)) {
        refuse_starved(&slot->job->fault);
        free(rows);
        rows = NULL;
    }
    pthread_mutex_unlock(&srv->lock);
    return rows;
}

// Goes on with the next picture of a job; after the last one, or if it has to stop, the answer begins.
static void run_tower(Server *srv, Slot *slot, bool stop) {
    Job *job = slot->job;
    PromptPictures *p = &job->lead->pictures;
    const int kept = session_keeps(slot->s, job->ids.ids, (int)job->ids.n);
    int k = 0;
    while (k < p->n && (p->places[k].rows || job->places[k].first < kept)) k++;
    if (job->gone) refuse(&job->fault, CLIENT_LEFT, "", "the client closed the connection");
    if (stop) refuse(&job->fault, 503, "", "the answer did not begin in time");
    if (k < p->n && !job->fault.status) p->places[k].rows = rows_of(srv, slot, &p->files[k]);
    if (k < p->n && !job->fault.status) return;
    srv->seeing = NULL;
    begin_answer(srv, slot);
}

// Remembers the tokens of the answer's last call. The caller holds the lock.
static void remember(Server *srv, const Job *job, const char *id) {
    Replay *replay = &srv->replays[srv->n_replays++ % REPLAYS];
    size_t first = job->said.n;
    while (first > 0 && job->said.ids[first - 1] != srv->t->call_open) first--;
    replay->ids.n = 0;
    snprintf(replay->id, sizeof replay->id, "%s", id);
    for (size_t i = first ? first - 1 : 0; first && i < job->said.n; i++)
        if (tok_push_id(srv->t, &replay->ids, job->said.ids[i]) < 0) starved = true;
    if (starved) replay->ids.n = 0;
}

// Adds bytes from .. to - 1 of the thought or the content, or a call. Texts that follow each other are one piece.
static void add_piece(Job *job, PieceKind kind, size_t from, size_t to) {
    AnswerPiece *last = job->n_pieces ? &job->pieces[job->n_pieces - 1] : NULL;
    if (from == to) return;
    if (last && last->kind == kind && kind != PIECE_CALL) {
        last->to = to;
        return;
    }
    AnswerPiece *list = resize_list(job->pieces, job->n_pieces + 1, sizeof *list);
    if (!list) return;
    job->pieces = list;
    job->pieces[job->n_pieces++] = (AnswerPiece){ kind, from, to };
}

static void add_calls(Server *srv, Job *job, const TokReply *r) {
    for (; job->n_calls < r->n_calls; job->n_calls++) {
        Call *list = resize_list(job->calls, job->n_calls + 1, sizeof *list);
        if (!list) return;
        job->calls = list;
        const TokCall *from = &r->calls[job->n_calls];
        Call *call = &job->calls[job->n_calls];
        *call = (Call){ 0 };
        append(&call->name, from->name.s, from->name.n);
        append(&call->arguments, from->arguments.s, from->arguments.n);
        new_id(srv, "call_", call->id);
        remember(srv, job, call->id);
        add_piece(job, PIECE_CALL, (size_t)job->n_calls, (size_t)job->n_calls + 1);
    }
}

// True if the end of the answer has cut its last piece. n_calls: of complete calls.
static bool is_cut_short(const Job *job, EndReason end, int n_calls) {
    const AnswerPiece *last = job->n_pieces ? &job->pieces[job->n_pieces - 1] : NULL;
    if (!last || (end != END_LENGTH && end != END_CONTEXT && end != END_CANCELLED)) return false;
    return last->kind == PIECE_CALL ? last->from >= (size_t)n_calls : last->kind == PIECE_TEXT || job->thinks;
}

static void end_job(Server *srv, Slot *slot, const Event *e) {       // the caller holds the lock
    Job *job = slot->job;
    const Turn *turn = session_turn(slot->s);
    share_energy(srv, NULL);
    job->end = e->end;
    job->turn = *turn;
    job->turn.joules = job->joules;
    if (job->scores) job->turn.n_run = turn->n_prompt;
    job->thought_tokens = turn->thought_tokens;
    job->stop = turn->stop;
    if (e->end == END_ERROR && job->bias)
        refuse(&job->fault, 400, "logit_bias", "logit_bias: it excludes every token");
    if (e->end == END_ERROR && job->options.grammar) refuse(&job->fault, 400, "", "%s", e->error);
    if (e->end == END_ERROR) refuse(&job->fault, 500, "", "%s", e->error);
    if (e->end == END_CANCELLED && srv->draining) refuse(&job->fault, 503, "", "the server is shutting down");
    srv->totals.prompt_tokens += (uint64_t)turn->n_prompt;
    srv->totals.cached_tokens += (uint64_t)job->cached;
    srv->totals.made += (uint64_t)turn->made;
    srv->totals.left_out += (uint64_t)max_int(turn->n_original - turn->n_prompt, 0);
    srv->totals.steps += (uint64_t)turn->steps;
    srv->totals.drafted += (uint64_t)turn->drafts.drafted;
    srv->totals.accepted += (uint64_t)turn->drafts.accepted;
    srv->totals.prompt_seconds += turn->prompt_seconds;
    srv->totals.decode_seconds += turn->decode_seconds;
    slot->job = NULL;
    srv->n_running--;
    job_done(srv, job);
}

static void tell(Server *srv, Slot *slot, const Event *e) {
    Job *job = slot->job;
    starved = false;
    add_likely(srv, slot, e);
    pthread_mutex_lock(&srv->lock);
    const size_t content = job->content.n, thought = job->thought.n;
    const int n_calls = job->n_calls;
    append(&job->content, e->content.s, e->content.n);
    append(&job->thought, e->thought.s, e->thought.n);
    add_piece(job, PIECE_THOUGHT, thought, job->thought.n);
    add_piece(job, PIECE_TEXT, content, job->content.n);
    for (int i = 0; i < e->n_ids && srv->t->call_open >= 0; i++)
        if (tok_push_id(srv->t, &job->said, e->ids[i]) < 0) starved = true;
    add_calls(srv, job, session_reply(slot->s));
    if (e->kind == EVENT_PROMPT) job->run = job->total - (e->total - e->done);
    if (e->kind == EVENT_TOKEN) job->run = job->total;
    if (e->kind == EVENT_TOKEN) job->thinks = tok_reply_thinks(session_reply(slot->s));
    if (e->kind == EVENT_TOKEN) job->turn = *session_turn(slot->s);
    if (e->kind == EVENT_END) {
        job->cut = is_cut_short(job, e->end, n_calls);
        end_job(srv, slot, e);
    } else {
        keep_to_budget(srv, slot);
        pthread_cond_broadcast(&job->lead->news);
    }
    pthread_mutex_unlock(&srv->lock);
}

// Runs until a signal asks to stop and the jobs that came before it are answered, or have had DRAIN_SECONDS.
static void run_engine(Server *srv) {
    Session *sessions[MAX_SESSIONS];
    Slot *slots[MAX_SESSIONS];
    Event events[MAX_SESSIONS];
    double give_up = INFINITY;
    Round round;
    for (;;) {
        const double now = seconds();
        const int stop = stop_asked;                   // the same value for the whole round
        if (stop && isinf(give_up)) {
            fprintf(stderr, "# signal %d: finishing running requests, refusing new ones\n", stop);
            give_up = now + DRAIN_SECONDS;
        }
        pthread_mutex_lock(&srv->lock);
        srv->draining = stop;
        look_for_clients(srv);
        end_slow_peers(srv, now);
        clean_queue(srv, now < give_up ? now : INFINITY);
        for (int i = 0; i < n_slots(srv); i++) {
            const Job *job = srv->slots[i].job;
            if (job && (job->gone || now >= job->deadline || now >= give_up)) session_cancel(srv->slots[i].s);
        }
        pthread_mutex_unlock(&srv->lock);
        admit(srv);
        bool scored = false;
        for (int i = 0; i < n_slots(srv); i++) {
            if (!is_scoring(&srv->slots[i])) continue;
            run_scoring(srv, &srv->slots[i], now >= give_up || now >= srv->slots[i].job->deadline);
            scored = true;
        }
        Slot *seeing = next_seeing(srv);
        if (seeing) run_tower(srv, seeing, now >= give_up || now >= seeing->job->deadline);
        scored |= seeing != NULL;
        const int n = pick(srv, sessions, slots, &round);
        if (n) {
            const double start = seconds();
            sessions_next(sessions, n, events);
            learn_share(srv, round, seconds() - start);
            for (int i = 0; i < n; i++) tell(srv, slots[i], &events[i]);
        } else if (scored) {
            continue;
        } else if (stop) {
            break;
        } else {
            struct timespec until;
            clock_gettime(CLOCK_REALTIME, &until);
            until.tv_sec += KEEP_ALIVE_SECONDS;
            while (sem_timedwait(&wake, &until) && errno == EINTR) {}
        }
    }
}

#endif
#endif
