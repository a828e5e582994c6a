/* engine.h - what callers of the engine may know: types and public functions. Callers (chat, server, store, compress, niah)
 * see this file alone; how a session or a model looks inside is the business of gemma4.c and its parts.
 *
 * Uses gemma4.h (KvType, Ops, SampleParams), tokenizer.h and grammar.h. Begin with model_open(), session_open(),
 * session_start() and session_next().
 */
#ifndef ENGINE_H
#define ENGINE_H

enum { MAX_SESSIONS = 64 };   // of a model, and so of a step

typedef struct Model Model;

static const char *const kv_names[] = { "f32", "f16", "bf16", "q8_0", "q4_0", "tq4", "tq3" };       // of KvType

enum { CTX_FIT = -1 };        // n_ctx: as many tokens as memory has room for, at most those the model was trained for
// n_batch: a backend that keeps weights itself may convert them for each large step, so steps are as large as a 16th of
// the memory has room for, from SMALL_BATCH up to LARGE_BATCH rows.
enum { BATCH_FIT = 0, SMALL_BATCH = 512, LARGE_BATCH = 4096 };

typedef struct {
    int    n_ctx;             // tokens a session can hold; 0: as many as it was trained for, 8192 at most; CTX_FIT
    int    n_seqs;            // sessions
    int    n_batch;           // most rows of a step, >= STEP_ROWS; BATCH_FIT
    int    n_logits;          // most rows of a step that need logits
    KvType k_type, v_type;    // of global layers
    KvType ring_type;         // of sliding layers; KV_F32: f16, unless k_type is f32
    int    tail;              // newest rows that quantised global layers keep in f16 too; 0: none
    bool   untied;            // keep K and V apart also where they come from one projection
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
    size_t memory;            // bytes that the backend is taken to have; 0: what it has
    size_t host_memory;       // bytes of host memory that the caller needs; they count if the device shares that memory
    const char *ctx_from;     // the flags that n_ctx follows from, for advice: "-p, -n or -d"; "": no flag; NULL: -c
} ModelOptions;

typedef struct {              // bytes
    size_t weights;           // that the backend keeps itself; 0: read in the mapped file
    size_t in_host;           // host memory for the per-layer table, if the backend has no room for it
    size_t kv_global, kv_rings, staging, activations, scratch;
    size_t drafter;           // its weights, if the backend keeps them itself, and its activations and caches
} MemoryPlan;

#endif
