/* engine.h - the engine as its callers see it: the types and functions that server.h, chat.h, store.h, compress.h and
 * niah.h may use. To them Model and Session are opaque; how they look inside is the business of gemma4.c and its parts.
 *
 * Uses base.h, gemma4.h (KvType, Ops, SampleParams), tokenizer.h and grammar.h. Begin with model_open(),
 * session_open(), session_start() and session_next(): an answer is these four, the last one in a loop.
 *
 * THREADS  One thread uses a model and its sessions. Any thread, and a signal handler, may call session_cancel(). Any
 *          thread may read model_options(), model_shape(), model_size() and model_path(), which do not change.
 * ERRORS   Bad files and options end the process with one line while a model is opened. Later a function that fails
 *          returns false or -1, and session_error() says why.
 *   [1] A model    [2] Drafts    [3] Prompts, answers, events    [4] Sessions
 *   [5] Sessions in files    [6] Scores of tokens    [7] Pictures
 *   [8] Lists of ids, texts, logits */
#ifndef ENGINE_H
#define ENGINE_H

// ==== [1] A model ===================================================================================================

#define VERSION "0.1"         // of this program

enum { MAX_SESSIONS = 64,     // of a model, and so of a step
       MAX_CONTEXT = 1 << 24 };

// Marks the public functions. A build may leave some of them unused, which is no reason for a warning.
#define API __attribute__((unused)) static

typedef struct Model Model;

static const char *const kv_names[] = { "f32", "f16", "bf16", "q8_0", "q4_0", "tq4", "tq3" };       // of KvType

enum { CTX_FIT = -1 };        // n_ctx: as many tokens as fit in memory, at most the trained length
// BATCH_FIT: as many rows as a 16th of the memory has room for, from SMALL_BATCH to LARGE_BATCH; a quarter, if weights
// are in host memory. Large steps are faster: a backend may convert or copy its weights once for each step.
enum { BATCH_FIT = 0, SMALL_BATCH = 512, LARGE_BATCH = 4096 };

typedef struct {
    int    n_ctx;             // tokens a session can hold; 0: the trained length, at most 8192; CTX_FIT
    int    n_seqs;            // sessions
    int    n_batch;           // most rows of a step, >= STEP_ROWS; BATCH_FIT
    int    n_logits;          // most rows of a step that need logits
    KvType k_type, v_type;    // of global layers
    KvType ring_type;         // of sliding layers; KV_F32: f16, unless k_type is f32
    int    tail;              // newest rows that quantised global layers keep in f16 too; 0: none
    bool   untied;            // store K and V separately even if they come from one projection
    bool   penalties, bias;   // sampling counts tokens; adds a bias to logits
    float  pflash;            // alpha of block_select in prompts of at least pflash_from tokens in all; 0: dense
    float  pflash_density;    // for measurements: the part of the blocks that stays, instead; 0: alpha decides
    int    pflash_from;
    bool   interleave;        // decode steps may run while a prompt pauses between layers; then at most one row of a
                              // prompt's step needs logits
    bool   can_score;         // it may score tokens, for prompt compression
    bool   scorer_only;       // and does nothing else: only the layers that scoring runs are loaded
    Limits shared_limits;     // of another model that uses the same backend
    const char *drafter;      // file of a drafter; NULL: none
    bool   lazy_draft;        // its weights have room, but are uploaded when it drafts first
    int    draft_width;       // candidates for each token that it drafts; 1: chains
    int    draft_depth;       // most tokens that it drafts at once
    const char *projector;    // file of an image tower (mmproj); "": the one in the model's folder; NULL: no images
    int    image_tokens;      // soft rows of a picture, at most; 0: 280
    int    image_most;        // likewise, of a message that asks for fine detail; 0: image_tokens
    size_t memory;            // bytes that the backend is taken to have; 0: what it has
    const char *place;        // where matrices lie, "REGEX=CPU,REGEX=GPU,..", as -ot has it; NULL: the plan decides
    size_t host_memory;       // bytes of host memory that the caller needs; they count if the device shares that memory
    const char *ctx_from;     // the flags that n_ctx follows from, for advice: "-p, -n or -d"; "": no flag; NULL: -c
} ModelOptions;

typedef struct {              // bytes
    size_t weights;           // that the backend keeps itself; 0: read in the mapped file
    size_t in_host;           // host memory for weights for which the backend has no room
    size_t from_host;         // of these, what a token reads
    size_t kv_global, kv_rings, staging, activations, scratch;
    size_t drafter;           // its weights, if the backend keeps them itself, and its activations and caches
    size_t vision;            // likewise of the image tower
} MemoryPlan;

typedef struct {              // what the file says of the model
    int vocab, dim;           // tokens; width of the residual stream
    int window;               // tokens that a sliding layer attends to
    int trained;              // tokens of the longest text that it was trained with
} ModelShape;

typedef struct {              // weights in the file
    double bytes, params, on_device;   // on_device: bytes that the backend keeps itself
    const char *type;         // that of most parameters
} ModelSize;

// Opens a file, checks it, plans and reserves memory. Dies with one line if that fails. dump_dir: see dump.h, or NULL.
API Model *model_open(const char *path, const Ops *ops, ModelOptions o, const char *dump_dir);
API void model_close(Model *m);                                      // its sessions are closed before
API void model_tokenizer(Model *m, Tokenizer *t);                    // the tokenizer of the file; dies if there is none
API void read_weights(Model *m, bool check);                         // reads the file ahead; check: dies at NaN, Inf
API void print_plan(Model *m);                                       // model, memory and device, on stderr
API void print_model(Model *m);                                      // the same in one line, and warnings
API void print_sampling(const Model *m, const SampleParams *p);      // the sampling steps, on stderr

API const ModelOptions *model_options(const Model *m);               // as the plan has settled them: n_ctx, n_batch
API ModelShape model_shape(const Model *m);
API ModelSize model_size(const Model *m);
API const char *model_path(const Model *m);
API TokStr model_template(Model *m);                                 // Jinja source of the chat template; or none
API const char *model_name(const Model *m);                          // for people; until the next call
API size_t snapshot_bytes(Model *m);                                 // of a prefix snapshot; 0: a session needs none
API bool chunk_is_free(const Model *m, int chunk);                   // true if the chunk size cannot change results
API int model_paused(const Model *m);                                // the session whose prompt is paused; -1: none
// The part of the key blocks that prompts have attended to since the last call; 0: dense prompts, or none.
API double read_density(Model *m);
API double read_joules(const Model *m);                // energy that the device has used so far; < 0: not known

// ==== [2] Drafts ====================================================================================================

typedef enum {
    SPEC_OFF, SPEC_NGRAM, SPEC_NGRAM_MOD, SPEC_GRAMMAR, SPEC_MTP, SPEC_DFLASH, SPEC_AUTO, SPEC_KINDS
} SpecKind;
static const char *const spec_names[] = { "off", "ngram", "ngram-mod", "grammar", "mtp", "dflash", "auto" };

enum { DRAFT_MAX = STEP_ROWS - 1,      // tokens drafted for one step
       DRAFT_DEPTHS = 16,              // depths that statistics are kept for
       DRAFT_WIDTH = 8 };              // candidates per depth

typedef struct {              // options
    SpecKind kind;            // AUTO: drafter, n-grams and grammar, if they save time; others: always n_max tokens
    int      n_max;           // tokens drafted for a step, 1 .. DRAFT_MAX
    int      tree;            // tokens of a tree; 0: chains
    float    p_min;           // the chain ends before a draft less probable than this; 0: off
} Drafting;

typedef struct {              // statistics of an answer
    int    n_steps;           // steps that had drafts
    int    by_source[SPEC_KINDS];      // of these, by source of the drafts
    int    drafted, accepted; // tokens
    int    tried[DRAFT_DEPTHS];        // by depth: drafts whose parents were all accepted
    int    accepted_at[DRAFT_DEPTHS];  // of these, accepted ones
    double draft_seconds, verify_seconds;
} DraftCount;

API SpecKind drafter_of(const Model *m);               // SPEC_MTP, SPEC_DFLASH; SPEC_OFF: it has no draft model

// Measures how long steps and drafts take, if how->kind is SPEC_AUTO. No session may be open.
API void measure_pace(Model *m, Tokenizer *t, const Drafting *how);

// ==== [3] Prompts, answers, events ==================================================================================

// A picture in a prompt is n rows that take the place of embeddings. At its places the ids of the prompt are
// picture_id(), which are below -1. So equal ids are equal pictures, and whoever compares ids, or keeps them in memory
// or in a file, needs to know nothing of pictures. Text must follow a picture.
typedef struct {
    int          first, n;    // ids[first] .. ids[first + n - 1]
    const float *rows;        // (n, dim) of the model, read until the prompt has run; NULL: the session keeps them
} Picture;

// The id at the place of row i of a picture. hash: of all that its rows depend on.
static inline int32_t picture_id(uint64_t hash, int i) {
    const uint64_t z = (hash + ((uint64_t)i + 1) * 0x9E3779B97F4A7C15u) * 0xBF58476D1CE4E5B9u;
    return -2 - (int32_t)((z ^ z >> 31) >> 34);
}

typedef struct {
    const int32_t *ids;       // (n), n >= 1
    int            n;
    int            n_head;    // the first of them that stay when the context shifts: <bos> and the system turn
    int            checkpoint_at;      // later prompts begin with the first checkpoint_at ids, so a snapshot is taken
                                       // after them; 0: not known
    int            n_original;         // tokens before the prompt was compressed; 0: it was not
    double         score_seconds;      // that this took: they count as time of the prompt
    const Picture *pictures;           // (n_pictures) in the order of their places; all ids below 0 are theirs
    int            n_pictures;
} Prompt;

typedef struct {              // how to answer
    int          n_predict;   // tokens to generate; -1: until the turn ends or the context is full
    bool         ignore_eos;
    bool         keep_logits; // session_logits() is called after every token: no step is issued ahead
    TextList     stops;       // stop strings: the answer ends before the first one
    Grammar     *grammar;     // the form of the answer; used by this session alone while it answers. NULL: any text
    bool         may_think;   // a thought may come before that form
    int          think_budget;   // tokens of thought, after which it is closed; -1: no limit
    bool         shift;       // a full context drops its oldest tokens; false: it ends the answer
    SampleParams sampling;
    Drafting     drafting;
} AnswerOptions;

typedef enum { END_TURN, END_CALLS, END_STOP_STRING, END_LENGTH, END_CONTEXT, END_CANCELLED, END_ERROR } EndReason;
static const char *const end_text[] = { "end of turn", "tool call", "stop string", "-n reached", "context full",
                                        "interrupted", "error" };

typedef enum { EVENT_PROMPT, EVENT_TOKEN, EVENT_SHIFT, EVENT_END } EventKind;

typedef struct {              // result of one session_next(); its texts and ids are valid until the next one
    EventKind      kind;
    int            done, total;        // PROMPT: tokens of the prompt that have run; that are to run
    const int32_t *ids;                // TOKEN: (n_ids) the new tokens, and those that close a thought over its budget
    int            n_ids;
    TokStr         content, thought;   // TOKEN, END: new text of the answer, new text of a thought
    int            dropped, head, kept;   // SHIFT: tokens that were dropped; the first and the newest tokens that stay
    EndReason      end;                // END
    const char    *error;              // END_ERROR: why; the session can be used again
} Event;

typedef struct {              // statistics of an answer
    int         n_prompt, n_cached;    // tokens of the prompt, and those of them that were in the cache
    int         n_run;                 // and those that have run: the rest, unless the answer was cancelled
    int         n_original;            // tokens of the prompt before it was compressed; 0: it was not
    double      score_seconds;         // of prompt_seconds: what compressing it took
    int         made, steps;           // tokens generated, decoding steps
    int         thought_tokens;        // of those generated; set at the end
    int         shifts;                // times the context was full
    double      prompt_seconds, decode_seconds, read;     // read: bytes that the decoding steps had to read
    uint64_t    hash;                  // of the last logits, if the caller has filled it in
    DraftCount  drafts;
    double      density;               // read_density() of its prompt, if the caller has filled it in
    double      joules;                // energy of the device meanwhile, if the caller has filled it in; 0: not known
    int         loop;                  // tokens of the loop that the text ends in; 0: no loop
    const char *why;                   // why the answer ended; NULL: it has not ended
    EndReason   end;                   // the same; set at the end
    const char *stop;                  // the stop string that ended it, or NULL; set at the end
} Turn;

// Tokens that a decoding step has made on average; 1 without drafts, 0 if there was no step.
static inline double tokens_per_step(const Turn *t) { return t->steps ? (double)(t->made - 1) / t->steps : 0; }

// ==== [4] Sessions ==================================================================================================
// A session holds the tokens of one conversation in a slot of the model's caches. A prompt that begins with these
// tokens runs only from the first token that differs. Sliding layers keep only the last tokens, so a session cannot
// always go back. It can go back to a prefix snapshot, a copy of what the sliding layers held after some token.

enum { MAX_SNAPSHOTS = 32 };  // of a session

typedef struct Session Session;

typedef struct {
    bool   running;           // it answers, and was not cancelled
    bool   prompting;         // what it runs next is a prompt, or the rest of one
    int    n_left, n_next;    // tokens that are to run; how many of them the next step takes
    double work_done;         // multiplications in the last piece of a prompt's step: session_set_budget()
} SessionState;

API Session *session_open(Model *m, Tokenizer *t, int seq);          // seq: 0 .. n_seqs - 1, a slot without a session
API void session_close(Session *s);
API int session_keeps(const Session *s, const int32_t *ids, int n);  // tokens of a prompt that need not run again
API bool session_start(Session *s, const Prompt *p, const AnswerOptions *o);           // begins to answer
API void session_next(Session *s, Event *e);                         // until EVENT_END
// session_next() of n different sessions of one model at once: they share steps.
API void sessions_next(Session *const *sessions, int n, Event *events);
API void session_cancel(Session *s);                                 // the next event is the end
API void session_forget(Session *s);                                 // drops its tokens and snapshots

API Model *session_model(const Session *s);
API Tokenizer *session_tokenizer(const Session *s);
API const TokIds *session_held(const Session *s);                    // tokens that are in the cache
API TokIds session_pending(const Session *s);                        // after an answer: tokens of the text that are not
API const TokReply *session_reply(const Session *s);                 // the answer so far
API Turn *session_turn(Session *s);                                  // statistics of the last answer, so far
API SessionState session_state(const Session *s);
API const char *session_error(const Session *s);                     // why the last call of this session failed

// The logits (vocab) that the last token was sampled from. False: there are none.
API bool session_logits(Session *s, float *logits);
API void session_set_bias(Session *s, const float *bias);            // (vocab) added to logits; NULL: none
// A prompt's step runs `chunk` tokens at most, and pauses between layers after `work` multiplications, so that other
// sessions can run; INFINITY: it does not pause. A finite `work` needs ModelOptions.interleave.
API void session_set_budget(Session *s, int chunk, double work);
// Keeps at most `max` snapshots. A prompt takes one every `every` tokens; 0: only at its checkpoint.
API void session_set_snapshots(Session *s, int max, int every);
API void session_snapshot(Session *s);                               // takes a snapshot of the tokens that it holds now
API void session_rollback(Session *s);                               // goes back to the newest snapshot
// Runs n tokens and keeps them, without an answer. n_later: tokens of the same prompt that follow in another call; 0:
// none, and session_logits() gives those of the last token.
API void session_append(Session *s, const int32_t *ids, int n, int n_later);
// Runs the first of n >= 1 tokens, as many as a step can have logits of, and keeps them. Returns their number.
// session_row_logits() then gives the logits (vocab) after token i of these, until the next step of any session.
API int session_append_rows(Session *s, const int32_t *ids, int n);
API void session_row_logits(Session *s, int i, float *logits);

// ==== [5] Sessions in files =========================================================================================

typedef struct {              // what a file holds besides the session
    bool     raw;             // the session is a text (--raw), not a conversation
    bool     by_ids;          // a client gave its prompt as token ids, which may differ from those of its text
    uint64_t seed;
    TokText  messages;        // JSON list
    size_t   n_skipped;       // of them, after the system message, that the model is no longer shown
    TokIds   pending;         // the text continues with these; they are not in the cache
} SessionNote;

typedef struct {              // a session's file, without its cache
    TokIds   ids;             // tokens in its cache
    bool     by_ids;
    uint64_t bytes;           // of the file
    int64_t  time;            // of its last change, in nanoseconds
} SessionPeek;

// Writes what a session holds, and the note, to an open file -> 0, or errno. what: names a progress bar; NULL: none.
API int session_to_fd(Session *s, const SessionNote *note, int fd, const char *what);
// The same to a file of that name, which stays as it was if that fails.
API bool session_to_file(Session *s, const SessionNote *note, const char *path, const char *what);
// Replaces what the session holds by the contents of a file, and fills the note, which the caller frees. False: that
// failed, and the session is empty. No answer may be under way. path: the file's name in errors.
API bool session_from_fd(Session *s, SessionNote *note, int fd, const char *path, const char *what);
// Does the same with a file of that name. 1: done; 0: there is no such file, and nothing was done; -1: as False above.
API int session_from_file(Session *s, SessionNote *note, const char *path, const char *what);
API void session_note_free(SessionNote *note);
// Inspects a file without loading it. 1: session_from_file() can read it; *peek is set, and the caller frees its ids.
// 0: the file belongs to another model or type of cache. -1: it is not a complete session file.
API int session_peek(Session *s, const char *path, SessionPeek *peek);
API uint64_t session_key(Session *s);                  // a hash of its tokens, the model and the layout of its cache

// ==== [6] Scores of tokens ==========================================================================================
// For prompt compression. The score of a token is the attention that the last SCORE_ROWS tokens of the prompt pay to
// it.

// A model that scores tokens for `target` on the same backend, with room for prompts of n tokens. Dies if that fails.
API Model *scorer_open(Model *target, const char *file, int n);
API void scorer_check(const char *file, Model *target);              // dies if the two vocabularies differ
// Scores the n tokens of a prompt, of which the first `first` need no score. scorer: from scorer_open(); NULL: the
// session's model scores with its own first layers. The session keeps what it holds of those first tokens, and nothing
// else.
API void score_prompt(Session *s, Model *scorer, const int32_t *ids, int n, int first, float *score);

// ==== [7] Pictures ==================================================================================================
// From the parts of a message to a Prompt. tok_chat() says where pictures stand; read_pictures() reads their headers,
// so a prompt can be counted, and with place_pictures() compared, before a picture is decoded; compute_pictures()
// decodes and runs the tower, or decode_picture(), picture_begin() and picture_next() for one of them.

typedef struct {              // a picture of a prompt
    uint64_t hash;            // of the bytes of its file, its number of tokens and the tower
    int      w, h, n;         // pixels in which the tower sees it; tokens
    size_t   memory;          // bytes that decode_picture() needs, at most
    TokText  file;            // those bytes, until it is decoded
    uint8_t *rgb;             // (h, w, 3) from then on, until its rows are computed; else NULL
    float   *rows;            // (n, dim) room for these, while they are computed; else NULL
} PictureFile;

typedef struct {              // the pictures of a prompt, in the order of their places; start with {0}
    int          n;
    Picture     *places;      // (n) for Prompt.pictures; rows are NULL until compute_pictures()
    PictureFile *files;       // (n)
} PromptPictures;

typedef struct {              // rows of pictures that were computed, the newest last; start with {0}
    struct KnownRows *of;     // (n)
    int    n, room;
    size_t bytes;
} RowCache;

// Replaces n characters in base64 by the bytes that they stand for; line breaks are skipped. Returns how many bytes
// there are; 0: it is not base64, or empty. Any thread.
API size_t decode_base64(char *s, size_t n);
// Appends ", " and the part of a message that is this picture, as in the OpenAI API; sets *w and *h to its size and *n
// to its tokens. Returns false and writes one line to err if the file is no picture, or no tower is loaded.
API bool picture_part(Model *m, const Tokenizer *t, TokStr file, TokText *parts, int *w, int *h, int *n, char *err,
                      size_t err_size);
// What the rows of a picture depend on besides the picture; 0: no tower is loaded. Call it once before other threads
// call read_pictures().
API uint64_t tower_hash(Model *m);
// Reads the headers of the pictures that tok_chat() has found; *n_more: ids that they add to its prompt. Returns false
// and writes one line to err if one cannot be read; then *out is empty. Any thread.
API bool read_pictures(Model *m, const Tokenizer *t, const TokPictures *at, PromptPictures *out, size_t *n_more,
                       char *err, size_t err_size);
// Puts the ids of pictures to their places in the prompt; *before_cue, unless NULL, is moved with them. False: there is
// no memory (t->err); the ids stay as they were. Any thread.
API bool place_pictures(Tokenizer *t, const TokPictures *at, TokIds *ids, size_t *before_cue, PromptPictures *p);
// Finds the places of n pictures again in a prompt whose other ids have changed.
API void find_pictures(const TokIds *ids, Picture *places, int n);
// Decodes a picture, unless it is decoded, on this thread alone. False: err says why it cannot; "out of memory" if that
// is why, here and in the next ones. Any thread.
API bool decode_picture(PictureFile *f, char *err, size_t err_size);
// Begins to compute the rows of a picture, after decoding it if it is not; another one that is in work is given up.
// False: err says why it cannot. f->rgb has to stay until the rows are there.
API bool picture_begin(Model *m, PictureFile *f, char *err, size_t err_size);
// Goes on with it until the time `until` (seconds()), as vision_next() does. Returns (n, dim) rows; NULL: there is more
// to do.
API float *picture_next(Model *m, PictureFile *f, double until);
// Computes the rows of those pictures of a prompt (ids) that a session will not keep, if they are not known yet. They
// stay until pictures_release(). Returns false and writes one line to err if it cannot, or if *stop is set meanwhile;
// stop NULL: it is never set.
API bool compute_pictures(Session *s, RowCache *c, const TokIds *ids, PromptPictures *p,
                          const volatile sig_atomic_t *stop, char *err, size_t err_size);
API void pictures_release(RowCache *c, PromptPictures *p);           // frees p; c may now forget its rows
API void pictures_free(PromptPictures *p);             // of a prompt whose rows were not computed
API const float *row_cache_pin(RowCache *c, uint64_t hash);          // rows, to be released; NULL: they are not known
// Adds rows of this many bytes, pinned; drops the oldest ones that no prompt uses, if there are too many. False: there
// is no memory for the list.
API bool row_cache_add(RowCache *c, uint64_t hash, float *rows, size_t bytes);
API void row_cache_free(RowCache *c);

// ==== [8] Lists of ids, texts, logits ===============================================================================

// Appends an id. Dies if memory is out.
static inline void push_id(Tokenizer *t, TokIds *ids, int32_t id) {
    if (tok_push_id(t, ids, id) < 0) die("%s", t->err);
}

static inline int same_ids(const TokIds *a, const TokIds *b) {       // how many are equal at the beginning
    size_t n = 0;
    while (n < a->n && n < b->n && a->ids[n] == b->ids[n]) n++;
    return (int)n;
}

// The end of a text, from a byte on, 0 <= from <= text->n. The bytes of an empty text may be NULL.
static inline TokStr text_from(const TokText *text, size_t from) {
    return from < text->n ? (TokStr){ text->s + from, text->n - from } : (TokStr){ "", 0 };
}

double logsumexp(const float *logits, int vocab);       // log(sum of exp(logits)), in f64; parts/cpu.h

#endif
