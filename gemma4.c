/* gemma4.c - Gemma 4 inference, the model itself: configuration, weights, KV cache, forward pass, step, a plain loop.
 *
 * HOW TO READ  From top to bottom. Four names carry the whole program:
 *                generate_greedy [6]  step, choose the best token, commit, again: `gemma4 MODEL -p TEXT --greedy`
 *                step [5]             takes rows (tokens of one or more sessions) through the layers
 *                forward [4]          the layers: attention, feed-forward, per-layer embedding, as formulas
 *                Ops (gemma4.h)       the operations that forward uses; every backend implements the same table
 *              The forward pass is written once. parts/reference.h defines each operation in plain loops, parts/cpu.h
 *              is the fast CPU backend, gemma4_kernels.cu the CUDA backend.
 * CONTENTS     search for "[n]"
 *   [1]  Configuration: the model and its layers
 *   [2]  Weights
 *   [3]  Activations, cache, model
 *   [4]  The forward pass
 *   [5]  Step: rows in, logits out, commit
 *   [6]  The plain loop
 *   [7]  The rest of the program
 * PARTS        in parts/. Each head says what it holds and what it may use; docs/design.md draws who includes whom.
 *                base.h      errors, memory, progress, threads      draft.h     draft models (MTP, DFlash); verifying
 *                engine.h    the public functions                   guess.h     n-grams, trees, how far to draft
 *                load.h      reading a model file                   generate.h  sessions and events
 *                plan.h      how much memory everything gets        dump.h      intermediate results
 *                cpu.h       the CPU backend                        kv.h        rows of the KV cache
 *                vision.h    the image tower                        session.h   sessions in files
 *                score.h     scores of tokens
 * INVARIANTS   Activations are f32. Matrices are (rows = out, cols = in), row-major, y = W x. Index products are
 *              size_t. A step allocates nothing, unless --dump is given.
 * TRAPS        The list before forward: every way in which this model differs from Llama. */
#define _GNU_SOURCE
#ifndef ENGINE_LINKED         // else build/engine.a has these bodies
#define BASE_IMPLEMENTATION
#define GGUF_IMPLEMENTATION
#define TOKENIZER_IMPLEMENTATION
#define CPU_IMPLEMENTATION
#endif
#include "parts/base.h"
#include "gemma4.h"
#include "gguf.h"
#include "tokenizer.h"
#include "parts/kv.h"
#include "parts/grammar.h"
#include "parts/pattern.h"
#include "parts/schema.h"
#include "parts/engine.h"

// ==== [1] Configuration: the model and its layers ====================================================================
// Everything here is read from the file's metadata; load_config() in parts/load.h checks each value against a range
// before anything is computed from it. Gemma 4 layers differ from each other: sliding-window or global attention, the
// size of a head, whether a layer owns a KV cache, and (E2B) the width of the feed-forward network.

enum { MAX_LAYERS = 512, MAX_VOCAB = 1 << 24 };

typedef struct {              // of one layer: everything that is not the same for all layers
    bool is_swa;              // true: sliding window of n_swa tokens; false: global, all positions
    int  head_dim;            // values of a head: 256 in sliding layers, 512 in global layers
    int  n_kv_heads;          // key and value heads; divides n_heads
    int  ffn_dim;             // rows of ffn_gate and ffn_up
    int  kv_layer;            // the layer whose cache this layer reads; its own index if it has K and V weights
    int  last_reader;         // the last layer that reads this layer's cache; only for layers that own one
} LayerConfig;

typedef struct {              // GGUF keys begin with "gemma4."
    int    dim;               // embedding_length: width of the residual stream
    int    n_layers;          // block_count
    int    n_heads;           // attention.head_count: query heads
    int    vocab;             // rows of token_embd.weight
    int    n_swa;             // attention.sliding_window: tokens, the row's own included
    int    first_shared;      // layers from here on own no cache (attention.shared_kv_layers); n_layers if all do
    int    ple_dim;           // embedding_length_per_layer_input: width of per-layer embeddings (E2B, E4B); 0: none
    int    n_experts;         // expert_count (26B-A4B); 0: dense
    int    n_experts_used;    // expert_used_count: experts that a token is sent to
    int    expert_dim;        // expert_feed_forward_length
    int    n_ctx_train;       // context_length
    float  eps;               // attention.layer_norm_rms_epsilon
    float  logit_cap;         // final_logit_softcapping; 0: none
    double rope_base;         // rope.freq_base: theta of global layers
    double rope_base_swa;     // rope.freq_base_swa: theta of sliding layers
    double rope_factor;       // rope.scaling.factor: divides the frequencies of global layers; 1: not scaled
    LayerConfig layer[MAX_LAYERS];
} Config;

// ==== [2] Weights ====================================================================================================
// Names are those of the GGUF tensors. A Tensor (gemma4.h) points into the mapped file; a backend with memory of its
// own gets each one through upload(), once. bind_weights() in parts/load.h looks every tensor up and checks its shape
// before the first byte is used.

typedef struct {                        // shapes are (rows, cols); vectors are f32
    const float *attn_norm;             // (dim)
    Tensor attn_q;                      // (n_heads * head_dim, dim)
    Tensor attn_k;                      // (n_kv_heads * head_dim, dim); data NULL: K is in an earlier layer's cache
    Tensor attn_v;                      // as attn_k; data NULL too in global layers whose V is the K projection
    const float *attn_q_norm;           // (head_dim)
    const float *attn_k_norm;           // (head_dim) NULL where attn_k is absent
    Tensor attn_output;                 // (dim, n_heads * head_dim)
    const float *post_attention_norm;   // (dim)
    const float *ffn_norm;              // (dim)
    Tensor ffn_gate, ffn_up;            // (ffn_dim, dim)
    Tensor ffn_down;                    // (dim, ffn_dim)
    const float *post_ffw_norm;         // (dim)
    float layer_output_scale;           // 1 if the file has none
    // mixture of experts (26B-A4B), in addition to the dense feed-forward network
    Tensor ffn_gate_inp;                // (n_experts, dim) router
    const float *router_norm;           // (dim) ffn_gate_inp.scale / sqrt(dim): a norm weight
    Tensor ffn_gate_exps, ffn_up_exps;  // (expert_dim, dim) x n_experts; fused in the file: ffn_gate_exps is
                                        // (2 * expert_dim, dim), gate rows first, and ffn_up_exps.data is NULL
    Tensor ffn_down_exps;               // (dim, expert_dim) x n_experts
    const float *ffn_down_exps_scale;   // (n_experts) or NULL
    const float *pre_ffw_norm_2;        // (dim) before the experts
    const float *post_ffw_norm_1;       // (dim) after the dense network
    const float *post_ffw_norm_2;       // (dim) after the experts
    // per-layer embeddings (E2B, E4B)
    Tensor inp_gate;                    // (ple_dim, dim)
    Tensor proj;                        // (dim, ple_dim)
    const float *post_norm;             // (dim)
} LayerWeights;

typedef struct {
    Tensor token_embd;                  // (vocab, dim)
    Tensor output;                      // (vocab, dim) LM head; data NULL: token_embd is the head too
    const float *output_norm;           // (dim)
    Tensor per_layer_token_embd;        // (vocab, n_layers * ple_dim)
    Tensor per_layer_model_proj;        // (n_layers * ple_dim, dim)
    const float *per_layer_proj_norm;   // (ple_dim)
    double inv_freq[2][MAX_HEAD_DIM / 2];   // (n_pairs) radians per position: global, sliding layers; on the host
    int n_pairs[2];                     // pairs that RoPE rotates
    LayerWeights *layer;                // (n_layers)
} Weights;

static size_t matrix_bytes(const Tensor *t) { return gguf_row_size(t->type, t->cols) * (size_t)t->rows * t->n; }

// ==== [3] Activations, cache, model ==================================================================================
// A model serves n_seqs sessions ("sequences"). Each owns a slice of every layer's cache and a length. Sliding layers
// are rings; global layers hold the whole context. If V is the K projection, the two are stored once ("tied": Cache in
// gemma4.h). parts/plan.h computes how much memory all of it takes and reserves it in one piece.

enum { SCORE_ROWS = 32 };     // a token's score is the attention that the last 32 tokens of the prompt pay to it

typedef struct {              // what forward works on; all in backend memory
    // the rows of a step
    Row     *rows, *out_rows;          // (n_batch), (n_logits): all rows; the rows that need logits, "output rows"
    Segment *segs;                     // (n_seqs)
    int32_t *out_index;                // (n_logits) output row -> row
    int32_t *len;                      // (n_seqs) committed tokens of each session
    // activations
    float   *x[2];                     // (n_batch, dim) the residual stream, and its next state
    float   *q;                        // (n_batch, n_heads * head_dim)
    float   *k, *v;                    // (n_batch, n_kv_heads * head_dim)
    Act      att_out;                  // (n_batch, n_heads * head_dim)
    float   *y;                        // (n_batch, dim) what attention, or the per-layer embedding, adds to x
    Act      ffn;                      // (n_batch, ffn_dim)
    float   *mlp, *moe;                // (n_batch, dim) what the dense network and the experts add to x
    Act      expert;                   // (n_batch, n_experts_used, expert_dim)
    float   *router, *expert_weights;  // (n_batch, n_experts), (n_batch, n_experts_used)
    int32_t *expert_ids;               // (n_batch, n_experts_used)
    float   *ple, *ple_out;            // (n_batch, n_layers, ple_dim), (n_logits, n_layers, ple_dim)
    Act      ple_gate;                 // (n_batch, ple_dim)
    double  *inv_freq[2];              // (n_pairs) radians per position: global, sliding layers
    float   *logits, *hidden;          // (n_logits, vocab), (n_logits, dim)
    float   *tapped;                   // (n_batch, n_taps * dim) layer outputs for a DFlash drafter, or NULL
    // sampling and verification
    uint32_t *mask;                    // (n_logits, vocab / 32) tokens that may be sampled
    int32_t *chosen;                   // (n_logits) the sampled token of each output row
    SampleParams *params;              // (n_seqs)
    int32_t *counts;                   // (n_seqs, vocab) how often a token was committed; NULL without penalties
    float   *bias;                     // (n_seqs, vocab) 0 until set; NULL without biases
    int32_t *n_accept, *path;          // (n_seqs), (n_seqs, STEP_ROWS) rows to commit, as the host says
    int32_t *walked;                   // (n_seqs) rows of each segment that verification accepted
    int32_t *last;                     // (n_seqs) by segment: the output row where verification ended
    int32_t *next;                     // (n_seqs) the token sampled there; then the drafts: move_tokens() reads both
    float   *found_logits, *found_logsumexp;           // logits of the drafter's tokens: Drafter.logits, .logsumexp
    int32_t *token_source;             // (STEP_ROWS) where in next a row's token is, if the host does not know it yet
    // sparse prompts (pFlash)
    BlockList blocks;                  // blocks of keys that a prompt's rows attend to; NULL: all keys
    void    *block_means;              // (n_seqs, n_kv_heads, n_blocks, head_dim) floats
    float   *block_scores, *block_weights;     // (n_batch / SELECT_ROWS, n_heads or n_kv_heads, n_blocks)
    int64_t *block_count;              // (2) blocks attended to, blocks in sight
    // token scores (prompt compression)
    float   *probs, *mass;             // (SCORE_ROWS, n_heads, n_keys), (SCORE_ROWS, n_keys) of AttnMass, or NULL
    int      n_keys;                   // slots of the longest cache
    float   *dump[5];                  // (n_batch, widest) only with --dump
} State;

enum { MAX_LAYERS_QUEUED = 2 };        // layers of a prompt that a device gets ahead of the host: check_prompt()

typedef struct {              // one pass of a step's rows through the layers
    Batch all, batch;         // all rows of the step; the rows that later layers still compute
    In    stream;             // the residual stream, and what its next reader adds to it
    const float *ple;         // (n_rows, n_layers, ple_dim)
    int   layer;              // the next layer
    int   last_full;          // in this layer K and V of all rows are stored; from its q on only output rows continue.
                              // -1: all rows go through all layers
    int   last_scored;        // token scoring: the pass ends with the scores of this layer. -1: no scoring
    QkvStore qkv;             // the layer's q, k and v, and how they go to its cache
    bool  stored;             // true: K and V are in the cache; false: attend stores them first, in one launch
    const BlockList *blocks;  // keys that the layer's rows attend to; NULL: all
    // prompts, whose sliding layers keep the rows of the step in m->staging until their last reader is done
    bool  is_prompt;
    Cache staging;            // m->staging in the shape of the layer's ring
    int   staged_layer;       // the layer whose rows are there; -1: none
    double work_done;         // multiplications since the pass began or was resumed
    int   fences[MAX_LAYERS_QUEUED + 1];       // where the newest layers begin in the device's queue
} Pass;

typedef struct StepRow {      // one row as the caller of step() describes it
    int32_t token;            // an id; or ON_DEVICE, in all rows of a step or in none
    int32_t parent;           // TREE: index within the segment of the row that it follows; -1: the last committed token
    bool    output;           // the row needs logits
    int32_t ahead;            // CHAIN: as in Row
    const float *soft;        // (dim) a row of a picture, which takes the place of the token's embedding; NULL: none
} StepRow;

// A token that was sampled on the device and that the host does not know yet. The first row of segment i: the token
// sampled last in that segment. The rows after it: the tokens drafted next.
enum { ON_DEVICE = -1 };

typedef struct {              // the step in progress, or the last one, on the host
    Row     *rows, *out_rows;          // (n_rows), (n_out) as in State
    Segment *segs;                     // (n_segs)
    int32_t *out_index;                // (n_out)
    const float **soft;                // (n_rows) as in StepRow
    bool     has_soft;                 // some are not NULL
    // the last copies that were uploaded: upload_changes(). Operations write only tokens that are ON_DEVICE
    struct {
        Row     *rows, *out_rows;
        Segment *segs;
        int32_t *out_index;
    } uploaded;
    int      n_rows, n_segs, n_out;
    bool     ahead;                    // its tokens are ON_DEVICE: it runs before the host knows whether it is needed
    int64_t  number;                   // of all steps
    StepKey  key;
    Pass     pass;
} Step;

typedef struct {              // layers whose outputs a DFlash drafter reads
    int n, layer[MAX_LAYERS];
    int end;                  // the last of them + 1; 0: none
} Taps;

struct Model {
    Gguf         gguf;
    Config       config;
    Weights      weights;
    const Ops   *ops;                  // the backend
    ModelOptions options;
    State        s;
    Cache        caches[MAX_LAYERS];   // (n_caches) of the layers that own one, in order
    int          cache_of[MAX_LAYERS]; // layer -> index into caches; the owner's for layers that share
    int          n_caches;
    Cache        staging;              // rows of a prompt's step in sliding layers, until they go to the ring
    int         *len;                  // (n_seqs) committed tokens of each session; the host's copy of s.len
    int         *n_written;            // (n_seqs) end of the rows ever written: a ring has lost rows `slots` before it
    Step         step;
    struct { State s; Step step; } other;      // the buffers of the other kind of steps: select_buffers()
    bool         prompt_buffers;       // s and step are those of prompts
    int          paused_seq;           // session whose prompt is paused between two layers; -1: none
    struct { int32_t *n_accept, *token_source; } uploaded;     // as in Step
    StepRow     *step_rows;            // (n_batch) where callers of step() may write rows
    int64_t      steps;                // so far
    int          number;               // StepKey.model: recorded steps belong to one model. Its drafter has number + 1
    const volatile sig_atomic_t *stop; // a prompt's pass is cancelled between two layers if this is set; NULL: never
    Taps         taps;
    int          scorer_pass;          // 0; or, while tokens are scored, SCORER_PASS or COLLECT_ATTENTION
    int          n_scored;             // layers that token scoring runs; the last one is global
    uint32_t    *allowed, *fitting;    // (vocab / 32) tokens that the file lets be sampled; a buffer for grammars
    int          n_suppressed;         // tokens that the file forbids
    uint64_t     masked;               // rows of s.mask that allow less than `allowed`
    // what other parts keep with a model
    struct Binder     *binder;         // load.h: the tensors that were bound
    struct Drafter    *drafter;        // draft.h: a draft model; kind DRAFTER_NONE: there is none
    struct Vision     *vision;         // vision.h: an image tower; NULL: there is none
    struct StepResult *result;         // draft.h: what verification found
    struct Pace       *pace;           // guess.h: how long steps and drafts take
    MemoryPlan   plan;                 // plan.h
    void        *arena;                // plan.h: all backend memory of the model, one piece
    double       upload_seconds;
    const char  *dump_dir;             // dump.h: a folder; "": memory; NULL: no dump
    struct Checkpoint *checkpoints;    // (n_checkpoints) in memory, so far
    int          n_checkpoints;
    const struct Checkpoint *follow;   // of another run: each layer starts with that run's stream; NULL: with its own
    uint64_t     hash[3];              // session.h: of the file, once it was computed
    uint64_t     tower_hash;           // picture.h: of the image tower
};

// Defined in the parts named, which are included at the end of this file.
static void shorten_drafter(Model *m, int seq, int n);                        // draft.h
static void drafter_committed(Model *m, const int32_t *n_accept);             // draft.h
static void dump_embeddings(Model *m, const Pass *p);                         // dump.h: nothing, unless --dump is given
static void dump_attention(Model *m, int l, const Pass *p);
static void dump_feed_forward(Model *m, int l, const Pass *p);
static void dump_per_layer_embedding(Model *m, int l, const Pass *p);
static void dump_layer(Model *m, int l, Pass *p);
static void dump_output(Model *m);

// Uploads an array that the backend does not hold yet. In plain decoding nothing changes but lengths, which the device
// counts itself, so nothing is uploaded. `uploaded` is the last copy.
static void upload_changes(Model *m, void *dst, void *uploaded, const void *src, size_t bytes) {
    if (!memcmp(uploaded, src, bytes)) return;
    memcpy(uploaded, src, bytes);
    m->ops->copy(&(Copy){ dst, src, bytes, COPY_IN });
}

// True: session seq can be cut back to n tokens. False: a ring has already overwritten rows that are still needed.
static bool can_shorten(const Model *m, int seq, int n) {
    for (int i = 0; i < m->n_caches; i++) {
        const Cache *c = &m->caches[i];
        const int slots = c->slots, beyond = m->n_written[seq] - n;
        if (slots < m->n_written[seq] && beyond > slots - (m->config.n_swa - 1)) return false;
        if (c->tail_slots && c->tail_reach + STEP_ROWS < m->n_written[seq] && beyond > STEP_ROWS) return false;
    }
    return true;
}

// Cuts session seq back to n <= len tokens. ids are those tokens, which penalties count; rows of pictures count as
// token 0 (padding). False: it cannot be, and nothing was done.
static bool shorten_session(Model *m, int seq, const int32_t *ids, int n) {
    const int32_t len = n;
    if (!can_shorten(m, seq, n)) return false;
    shorten_drafter(m, seq, n);
    m->len[seq] = n;
    m->ops->copy(&(Copy){ m->s.len + seq, &len, sizeof len, COPY_IN });
    if (!m->s.counts) return true;
    const size_t vocab = (size_t)m->config.vocab;
    int32_t *counts = alloc_or_die(vocab, sizeof *counts);
    for (int i = 0; i < n; i++) counts[max_int(ids[i], 0)]++;
    m->ops->copy(&(Copy){ m->s.counts + (size_t)seq * vocab, counts, vocab * sizeof *counts, COPY_IN });
    free(counts);
    return true;
}

static void reset_session(Model *m, int seq) {         // an empty session; no cached row needs to be erased
    m->n_written[seq] = 0;
    shorten_session(m, seq, NULL, 0);
}

// ==== [4] The forward pass ===========================================================================================
// Written once, against the table of operations. The rows of a step may belong to several sessions, and may be a
// prompt, plain decoding or a tree of drafts: the code is the same. Every layer is attention, feed-forward, per-layer
// embedding (E2B, E4B), scale.
//
// Norms and residual additions are part of the product that reads them (In in gemma4.h). So a block does not add to the
// stream itself: it leaves what is to be added as a delta of the stream, and the next product adds it while reading.

// What else the operations of a step depend on: StepKey.variant.
enum { PLAIN, TOKENS_ON_DEVICE, DRAFTS_ON_DEVICE, COMMITS_CHAINS, COMMITS_PATHS, WALKS_CHAINS, WALKS_PATHS,
       SCORER_PASS, COLLECT_ATTENTION };

// The stream as the input of a product; w_norm is the norm's weight, or NULL. If a delta or a scale is pending, the
// product also writes the sum to the other buffer, which is the stream from here on.
static In stream_input(float *const buffers[2], In *stream, const float *w_norm) {
    In in = *stream;
    in.w_pre = w_norm;
    if (in.delta[0] || in.scale != 1) {
        in.x_out = buffers[stream->x == buffers[0]];
        *stream = (In){ .x = in.x_out, .scale = 1, .eps = in.eps };
    }
    return in;
}

// x += norm(y; w_norm), when the stream is read next.
static void add_to_stream(In *stream, const float *y, const float *w_norm) {
    stream->delta[0] = y;
    stream->w_post = w_norm;
}

// out (n_rows, w->rows) = w in.
static void multiply(const Model *m, int n_rows, In in, const Tensor *w, float *out) {
    m->ops->matmul(&(Matmul){ .n_rows = n_rows, .in = in, .n = 1, .w = { w }, .out = { out } });
}

static void add_product(Matmul *products, const Tensor *w, float *out) {       // one more of the same input
    products->w[products->n] = w;
    products->out[products->n++] = out;
}

// Moves 32-bit words on the device: dst[i] = src[index[i]], n rows of `cols` words.
static void move_rows(const Model *m, int n, int cols, const void *src, int src_stride, const int32_t *index, void *dst,
                      int dst_stride) {
    m->ops->gather_rows(&(GatherRows){ .n_rows = n, .cols = cols, .src = src, .src_stride = src_stride, .index = index,
                                       .dst = dst, .dst_stride = dst_stride });
}

// An activation in the form that the matrix w reads: f32, or int8 for quantised matrices.
static Act act_for(const Tensor *w, Act a) {
    if (is_quantised(w->type)) a.f = NULL;
    else a.q = NULL, a.s = NULL;
    return a;
}

static Batch step_batch(const Model *m, int32_t *len) {                        // all rows of the step
    return (Batch){ .rows = m->s.rows, .segs = m->s.segs, .len = len, .n_rows = m->step.n_rows,
                    .n_segs = m->step.n_segs };
}

// ---- the blocks of a layer ----

// x = the soft row of a picture, which is not scaled. What is embedded per layer is that of token 0 (padding).
static void embed_pictures(Model *m) {
    const size_t dim = (size_t)m->config.dim;
    const float *const *soft = m->step.soft;
    for (int r = 0, n; r < m->step.n_rows; r += n) {   // rows that follow each other in memory at once
        for (n = 1; soft[r] && r + n < m->step.n_rows && soft[r + n] == soft[r] + (size_t)n * dim; n++) {}
        if (soft[r])
            m->ops->copy(&(Copy){ m->s.x[0] + (size_t)r * dim, soft[r], (size_t)n * dim * sizeof(float), COPY_IN });
    }
}

// x = embedding * sqrt(dim); per-layer embeddings: u = (norm(Wp x / sqrt(dim)) + table * sqrt(ple_dim)) / sqrt(2).
static void embed_tokens(Model *m, Pass *p) {
    const Config *c = &m->config;
    const Weights *w = &m->weights;
    State *s = &m->s;
    p->batch = p->all = step_batch(m, s->len);
    p->stream = (In){ .x = s->x[0], .scale = 1, .eps = c->eps };
    p->ple = s->ple;
    m->ops->embed(&(Embed){ .batch = &p->all, .table = &w->token_embd, .scale = sqrtf((float)c->dim), .out = s->x[0] });
    if (m->step.has_soft) embed_pictures(m);
    if (c->ple_dim) {
        multiply(m, p->all.n_rows, p->stream, &w->per_layer_model_proj, s->ple);
        m->ops->ple_rows(&(PleRows){ .batch = &p->all, .table = &w->per_layer_token_embd,
                                     .w_norm = w->per_layer_proj_norm, .u = s->ple, .n_layers = c->n_layers,
                                     .ple_dim = c->ple_dim, .eps = c->eps, .proj_scale = 1 / sqrtf((float)c->dim),
                                     .table_scale = sqrtf((float)c->ple_dim), .out_scale = 1 / sqrtf(2) });
    }
    dump_embeddings(m, p);
}

static Cache staging_for(const Model *m, const Cache *ring) {                  // staging rows in a ring's shape
    Cache c = m->staging;
    c.n_kv_heads = ring->n_kv_heads;
    c.head_dim = c.k.dim = c.v.dim = ring->head_dim;
    return c;
}

// Where the output of layer l is written if the step has a single row and a DFlash drafter reads it there; NULL: to the
// stream's own buffer, from which tap() copies.
static float *tapped_row(const Model *m, int l) {
    for (int i = 0; m->step.n_rows == 1 && i < m->taps.n; i++)
        if (m->taps.layer[i] == l) return m->s.tapped + (size_t)i * m->config.dim;
    return NULL;
}

// q, k, v = Wq, Wk, Wv norm(x). A layer that reads an earlier layer's cache computes q alone; a global layer without Wv
// takes V from the K projection. p->qkv says how they are normed, rotated by RoPE and stored.
static void project_qkv(Model *m, int l, Pass *p) {
    const Config *c = &m->config;
    const LayerConfig *lc = &c->layer[l];
    const LayerWeights *w = &m->weights.layer[l];
    State *s = &m->s;
    const bool own = lc->kv_layer == l, has_v = w->attn_v.data != NULL;
    const bool wants_q = l != p->last_full;            // else only output rows need q: keep_output_rows()
    const bool staged = p->is_prompt && lc->is_swa;
    const Cache *cache = &m->caches[m->cache_of[l]];

    float *const tapped = tapped_row(m, l - 1);
    Matmul qkv = { .n_rows = p->batch.n_rows,
                   .in = stream_input(tapped ? (float *[]){ tapped, tapped } : s->x, &p->stream, w->attn_norm) };
    if (wants_q) add_product(&qkv, &w->attn_q, s->q);
    if (own) add_product(&qkv, &w->attn_k, s->k);
    if (own && has_v) add_product(&qkv, &w->attn_v, s->v);
    if (qkv.n) m->ops->matmul(&qkv);
    else m->ops->close(&(Close){ .n_rows = qkv.n_rows, .cols = c->dim, .in = qkv.in });

    if (staged) p->staging = staging_for(m, cache);
    if (staged && own) p->staged_layer = l;
    p->stored = false;
    p->blocks = NULL;
    p->qkv = (QkvStore){
        .batch = &p->batch, .cache = cache, .staging = staged ? &p->staging : NULL, .n_heads = c->n_heads,
        .q = wants_q ? s->q : NULL, .k = own ? s->k : NULL, .v = own ? (has_v ? s->v : s->k) : NULL,
        .w_q = w->attn_q_norm, .w_k = w->attn_k_norm, .v_norm = true, .eps = c->eps,
        .rope = { s->inv_freq[lc->is_swa], m->weights.n_pairs[lc->is_swa] },
        .dump_q = s->dump[0], .dump_q_pos = s->dump[1], .dump_k = s->dump[2], .dump_v = s->dump[3],
        .dump_k_pos = s->dump[4]
    };
}

// x += norm(Wo softmax(q K) V), where q, K and V of the step's rows come from p->qkv, older rows from the cache.
// RoPE happens where p->qkv is carried out: inside attend() below, or before it, in qkv_store(), if p->stored is true.
static void attention(Model *m, int l, Pass *p) {
    const Config *c = &m->config;
    const LayerConfig *lc = &c->layer[l];
    const LayerWeights *w = &m->weights.layer[l];
    State *s = &m->s;
    const Act att_out = act_for(&w->attn_output, s->att_out);
    m->ops->attend(&(Attend){ .batch = &p->batch, .cache = p->qkv.cache, .staging = p->qkv.staging,
                              .n_heads = c->n_heads, .q = s->q, .window = lc->is_swa ? c->n_swa : 0,
                              .own = OWN_CAUSAL, .scale = 1, .blocks = p->blocks,
                              .store = p->stored ? NULL : &p->qkv, .out = att_out });
    multiply(m, p->batch.n_rows, (In){ .act = att_out }, &w->attn_output, s->y);
    add_to_stream(&p->stream, s->y, w->post_attention_norm);
    dump_attention(m, l, p);
}

// x += norm(mlp), mlp = Wdown (gelu(Wgate norm(x)) * Wup norm(x)).
// With experts: x += norm(norm(mlp) + norm(moe)), moe = sum of weight[e] * expert_e(norm(x)) over the chosen experts e.
static void feed_forward(Model *m, int l, Pass *p) {
    const Config *c = &m->config;
    const LayerWeights *w = &m->weights.layer[l];
    State *s = &m->s;
    const int n = p->batch.n_rows;
    const Act ffn = act_for(&w->ffn_down, s->ffn), expert = act_for(&w->ffn_down_exps, s->expert);
    const In in = stream_input(s->x, &p->stream, w->ffn_norm);
    const Matmul down = { .n_rows = n, .in = { .act = ffn }, .n = 1, .w = { &w->ffn_down }, .out = { s->mlp } };
    GateUp gate_up = { .n_rows = n, .in = in, .gate = &w->ffn_gate, .up = &w->ffn_up, .fn = ACT_GELU, .out = ffn };
    if (!c->n_experts) {
        m->ops->gate_up(&gate_up);
        m->ops->matmul(&down);
    } else {                                           // router, dense network and experts have norms of their own
        Route route = { .n_rows = n, .n_used = c->n_experts_used, .in = in, .w = &w->ffn_gate_inp,
                        .expert_scale = w->ffn_down_exps_scale, .logits = s->router, .ids = s->expert_ids,
                        .weights = s->expert_weights };
        route.in.w_pre = w->router_norm;
        route.in.x_out = NULL;
        gate_up.route = &route;
        gate_up.experts = &(ExpertGateUp){
            .n_rows = n, .n_used = c->n_experts_used, .in = stream_input(s->x, &p->stream, w->pre_ffw_norm_2),
            .gate = &w->ffn_gate_exps, .up = w->ffn_up_exps.data ? &w->ffn_up_exps : NULL, .fn = ACT_GELU,
            .ids = s->expert_ids, .out = expert, .dense_down = &down };
        m->ops->gate_up(&gate_up);
        m->ops->expert_down(&(ExpertDown){ .n_rows = n, .n_used = c->n_experts_used, .in = expert,
                                           .down = &w->ffn_down_exps, .ids = s->expert_ids,
                                           .weights = s->expert_weights, .out = s->moe });
        p->stream.delta[1] = s->moe;
        p->stream.w_delta[0] = w->post_ffw_norm_1;
        p->stream.w_delta[1] = w->post_ffw_norm_2;
    }
    add_to_stream(&p->stream, s->mlp, w->post_ffw_norm);
    dump_feed_forward(m, l, p);
}

// x += norm(Wproj (gelu(Wgate x) * u[l])), with u from embed_tokens(). This x is read without a norm.
static void per_layer_embedding(Model *m, int l, Pass *p) {
    const Config *c = &m->config;
    const LayerWeights *w = &m->weights.layer[l];
    State *s = &m->s;
    const Act gate = act_for(&w->proj, s->ple_gate);
    m->ops->ple_inject(&(PleInject){ .n_rows = p->batch.n_rows, .in = stream_input(s->x, &p->stream, NULL),
                                     .w = &w->inp_gate, .u = p->ple + (size_t)l * c->ple_dim,
                                     .u_stride = c->n_layers * c->ple_dim, .out = gate });
    multiply(m, p->batch.n_rows, (In){ .act = gate }, &w->proj, s->y);
    add_to_stream(&p->stream, s->y, w->post_norm);
    dump_per_layer_embedding(m, l, p);
}

// ---- what a pass may do between the blocks ----

// Only output rows continue: their part of the stream, and of the per-layer embeddings. The stream has nothing pending.
static void gather_output_rows(Model *m, Pass *p) {
    const Config *c = &m->config;
    State *s = &m->s;
    float *x = p->stream.x == s->x[0] ? s->x[1] : s->x[0];
    const int n = m->step.n_out, ple = c->n_layers * c->ple_dim;
    move_rows(m, n, c->dim, p->stream.x, c->dim, s->out_index, x, c->dim);
    if (ple) {
        move_rows(m, n, ple, s->ple, ple, s->out_index, s->ple_out, ple);
        p->ple = s->ple_out;
    }
    p->stream.x = x;
    p->batch.rows = s->out_rows;
    p->batch.n_rows = n;
}

// In layer p->last_full: all caches are complete once its K and V are stored, so only output rows need its q and what
// follows. False: there are none, the pass is done.
static bool keep_output_rows(Model *m, int l, Pass *p) {
    const LayerWeights *w = &m->weights.layer[l];
    if (p->qkv.k) m->ops->qkv_store(&p->qkv);
    if (!m->step.n_out) return false;
    gather_output_rows(m, p);
    multiply(m, m->step.n_out, stream_input(m->s.x, &p->stream, w->attn_norm), &w->attn_q, m->s.q);
    p->qkv.q = m->s.q;
    p->qkv.k = p->qkv.v = NULL;
    return true;
}

// Before attention in a global layer: a sparse prompt (pFlash) chooses the blocks of keys that its rows attend to.
static void select_blocks(Model *m, int l, Pass *p) {
    const ModelOptions *o = &m->options;
    State *s = &m->s;
    const bool sparse = s->blocks.n && p->is_prompt && !m->scorer_pass && p->batch.n_rows == m->step.n_rows;
    if (!sparse || m->config.layer[l].is_swa) return;
    m->ops->qkv_store(&p->qkv);
    m->ops->block_select(&(BlockSelect){ .batch = &p->batch, .cache = p->qkv.cache, .n_heads = p->qkv.n_heads,
                                         .q = s->q, .scale = 1, .alpha = o->pflash, .density = o->pflash_density,
                                         .means = s->block_means, .scores = s->block_scores,
                                         .weights = s->block_weights, .out = s->blocks, .count = s->block_count });
    p->stored = true;
    p->blocks = &s->blocks;
}

// Before attention in a global layer, while tokens are scored: how much attention the rows pay to every key.
static void collect_attention(Model *m, int l, Pass *p) {
    State *s = &m->s;
    if (m->scorer_pass != COLLECT_ATTENTION || m->config.layer[l].is_swa) return;
    m->ops->qkv_store(&p->qkv);
    m->ops->attn_mass(&(AttnMass){ .batch = &p->batch, .cache = p->qkv.cache, .n_heads = p->qkv.n_heads, .q = s->q,
                                   .scale = 1, .n_keys = s->n_keys, .probs = s->probs, .mass = s->mass });
    p->stored = true;
}

// The output of layer l, all rows, goes to where a DFlash drafter reads it. The stream has nothing pending.
static void tap(Model *m, int l, const Pass *p) {
    const Taps *t = &m->taps;
    const int dim = m->config.dim;
    for (int i = 0; i < t->n; i++) {
        float *to = m->s.tapped + (size_t)i * dim;
        if (t->layer[i] == l && p->stream.x != to)     // tapped_row(): it is there already
            move_rows(m, m->step.n_rows, dim, p->stream.x, dim, NULL, to, t->n * dim);
    }
}

// After layer l, if it is the last reader of the staged rows, moves them to their ring. l = n_layers: all that is
// staged.
static void flush_staging(Model *m, int l, Pass *p) {
    const int staged = p->staged_layer;
    if (staged < 0 || (l < m->config.n_layers && m->config.layer[staged].last_reader != l)) return;
    const Cache *ring = &m->caches[m->cache_of[staged]], staging = staging_for(m, ring);
    m->ops->kv_copy(&(KvCopy){ .batch = &p->all, .cache = ring, .staging = &staging });
    p->staged_layer = -1;
}

// The size of the matrices that a row is multiplied with in a layer (of experts: only the chosen ones), in bytes or
// values.
static double layer_size(const Config *c, const LayerWeights *w, bool bytes) {
    const Tensor *all[] = { &w->attn_q, &w->attn_k, &w->attn_v, &w->attn_output, &w->ffn_gate, &w->ffn_up, &w->ffn_down,
                            &w->ffn_gate_inp, &w->ffn_gate_exps, &w->ffn_up_exps, &w->ffn_down_exps, &w->inp_gate,
                            &w->proj };
    double size = 0;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        const Tensor *t = all[i];
        if (!t->data) continue;
        const double row = bytes ? (double)gguf_row_size(t->type, t->cols) : t->cols;
        size += row * t->rows * (t->n > 1 ? c->n_experts_used : 1);
    }
    return size;
}

// Multiplications that layer l of a prompt's pass takes. A prompt's step is one chain.
static double layer_work(const Model *m, int l, const Pass *p) {
    const Config *c = &m->config;
    const LayerConfig *lc = &c->layer[l];
    const int keys = m->len[m->step.segs[0].seq] + p->all.n_rows, seen = lc->is_swa ? min_int(keys, c->n_swa) : keys;
    return p->batch.n_rows * (layer_size(c, &m->weights.layer[l], false) + 2.0 * c->n_heads * lc->head_dim * seen);
}

typedef enum { DONE = 0, STOPPED = -1, PAUSED = -2 } PassStatus;

enum { MANY_ROWS = 512 };     // shorter passes finish too soon to be worth cancelling

// Before layer l of a prompt's pass. PAUSED: this layer would raise the multiplications since the last pause above
// `work`. STOPPED: m->stop is set. A device that works ahead of the host gets at most MAX_LAYERS_QUEUED layers ahead,
// so that there is something left to cancel.
static PassStatus check_prompt(const Model *m, int l, Pass *p, double work) {
    const Ops *op = m->ops;
    if (!p->is_prompt) return DONE;
    const double more = layer_work(m, l, p);
    if (p->work_done && p->work_done + more > work) return PAUSED;
    if (m->stop && op->fence && m->step.n_rows >= MANY_ROWS) {
        p->fences[l % (MAX_LAYERS_QUEUED + 1)] = op->fence();
        if (l >= MAX_LAYERS_QUEUED) op->wait_for(p->fences[(l + 1) % (MAX_LAYERS_QUEUED + 1)]);
    }
    if (m->stop && *m->stop) return STOPPED;
    p->work_done += more;
    return DONE;
}

// ---- the pass ----

static void begin_pass(Model *m, Pass *p) {
    const Config *c = &m->config;
    const int last = m->scorer_pass ? m->n_scored - 1 : max_int(c->first_shared - 1, m->taps.end);
    const bool collects = m->scorer_pass == COLLECT_ATTENTION && !c->layer[min_int(last, c->n_layers - 1)].is_swa;
    assert(m->scorer_pass || !m->options.scorer_only); // else some layers are not loaded
    p->staged_layer = -1;
    p->last_scored = collects ? last : -1;
    p->last_full = m->step.n_out < m->step.n_rows && !m->dump_dir && !collects ? last : -1;
    embed_tokens(m, p);
}

// logits = cap * tanh(Wout norm(x) / cap) of the output rows.
static void end_pass(Model *m, Pass *p) {
    const Config *c = &m->config;
    const Weights *w = &m->weights;
    State *s = &m->s;
    const int n_out = m->step.n_out;
    const bool tapped = m->taps.end == c->n_layers;    // the last layer's output
    flush_staging(m, c->n_layers, p);
    if (tapped || (n_out && p->batch.n_rows > n_out))
        m->ops->close(&(Close){ .n_rows = p->batch.n_rows, .cols = c->dim,
                                .in = stream_input(s->x, &p->stream, NULL) });
    if (tapped) tap(m, c->n_layers - 1, p);
    if (n_out && p->batch.n_rows > n_out) gather_output_rows(m, p);
    if (n_out) {
        p->stream.w_pre = w->output_norm;
        m->ops->head(&(Head){ .n_rows = n_out, .in = p->stream, .w = w->output.data ? &w->output : &w->token_embd,
                              .cap = c->logit_cap, .logits = s->logits, .hidden = s->hidden });
    }
    dump_output(m);
}

/* TRAPS  what differs from Llama, and the test that sees it when it is wrong (all: the golden logits of test_forward.c)
 *  1. embedding times sqrt(dim); the LM head uses the same table without it                      golden
 *  2. norm weights as stored, no "1 + w"                                                         golden
 *  3. attention scale 1, not 1/sqrt(head_dim); per-head norms of q and k carry the temperature   golden
 *  4. V is normed without a weight, and never rotated                                            golden
 *  5. a global layer without attn_v takes V from the raw K projection, before k's norm and rope  golden moe; test_cache
 *  6. sliding layers: head_dim 256, base 1e4, all pairs turn; global: head_dim 512, base 1e6,
 *     pairs (i, i + 256), i < 64 turn with exponent 2i/512, the others stay                      golden; test_ops rope
 *  7. the window holds n_swa keys, the row's own included                                        golden; test_cache
 *  8. layers that share K and V read the last owner of their kind, as it is after this step      golden e; test_cache
 *  9. residual: x + norm(attention), x + norm(FFN): norms before and after each block            golden
 * 10. GELU in its tanh form, in the FFN, the experts and the per-layer gate                      test_ops
 * 11. FFN width differs by layer (E2B: doubled in layers that share K and V)                     golden e
 * 12. MoE: router, dense FFN and experts all read x, each through its own norm; the router's norm
 *     weight is scale / sqrt(dim); outputs are normed apart, added, normed again                 golden moe
 * 13. chosen experts' weights are renormalised, then times ffn_down_exps.scale                   golden moe; test_ops
 * 14. fused expert tensors hold the rows of gate first                                           test_forward
 * 15. per-layer embeddings: table times 16, projection times 1/sqrt(dim) then normed per layer,
 *     sum times 1/sqrt(2); the gate reads x without a norm                                       golden e
 * 16. layer_output_scale multiplies the whole stream, last                                       golden
 * 17. logits = 30 tanh(z / 30)                                                                   golden
 * 18. positions are len + depth, taken before anything is stored                                 test_cache */

// Takes the rows of a step through the layers. A prompt's pass may end early: PAUSED before the layer that would exceed
// `work` multiplications, after at least one layer; called again, it continues there. STOPPED: some rows are already in
// the caches after the end of the session; a ring may have lost older rows.
static PassStatus forward(Model *m, double work) {
    const Config *c = &m->config;
    Pass *p = &m->step.pass;
    p->work_done = 0;
    if (!p->layer) begin_pass(m, p);
    for (; p->layer < c->n_layers; p->layer++) {
        const int l = p->layer;
        const PassStatus status = check_prompt(m, l, p, work);
        if (status != DONE) return status;
        project_qkv(m, l, p);
        tap(m, l - 1, p);                              // the output of the layer before, which is complete now
        if (l == p->last_full && !keep_output_rows(m, l, p)) break;
        select_blocks(m, l, p);
        collect_attention(m, l, p);
        if (l == p->last_scored) break;
        attention(m, l, p);
        flush_staging(m, l, p);
        feed_forward(m, l, p);
        if (c->ple_dim) per_layer_embedding(m, l, p);
        p->stream.scale = m->weights.layer[l].layer_output_scale;
        dump_layer(m, l, p);
    }
    end_pass(m, p);
    return DONE;
}

// ==== [5] Step: rows in, logits out, commit ==========================================================================
// A step takes rows of one or more sessions through the model. Their K and V are in the caches afterwards, but the
// sessions are as long as before: commit(), or verification (parts/draft.h), decides how many rows, along which path,
// become part of a session. Rows that are not committed need no undo. A segment of more than STEP_ROWS rows is a chunk
// of a prompt and is committed whole.

typedef struct {
    int seq;                  // session
    SegKind kind;
    int n;
    const StepRow *rows;      // (n)
    int more;                 // of a prompt: rows that follow in later steps
    bool dense;               // its rows attend to all keys even if prompts are sparse
} StepSeg;

enum { DENSE_ROWS = 256 };    // the last rows of a prompt: they attend to all keys even if the prompt is sparse

// The number of last rows of a segment that attend to all keys.
static int n_dense(const Model *m, const StepSeg *seg) {
    if (seg->dense || m->len[seg->seq] + seg->n + seg->more < m->options.pflash_from) return seg->n;
    return max_int(0, min_int(seg->n, DENSE_ROWS - seg->more));
}

// Prompts (steps of more than STEP_ROWS rows) and other steps have buffers of their own for what lasts from one layer
// to the next, if the plan says so (ModelOptions.interleave): then decode steps may run while a prompt is paused
// between layers. Makes the buffers of one kind m->s and m->step.
static void select_buffers(Model *m, bool prompts) {
    if (!m->options.interleave || m->prompt_buffers == prompts) return;
    const State s = m->s;
    const Step step = m->step;
    m->s = m->other.s;
    m->step = m->other.step;
    m->other.s = s;
    m->other.step = step;
    m->prompt_buffers = prompts;
}

static void add_segment(Model *m, int i, const StepSeg *in) {
    Step *t = &m->step;
    assert(t->n_rows + in->n <= m->options.n_batch && (in->kind == SEG_CHAIN || in->n <= STEP_ROWS));
    assert(m->len[in->seq] + in->n <= m->options.n_ctx + STEP_ROWS);
    m->n_written[in->seq] = max_int(m->n_written[in->seq], m->len[in->seq] + in->n);
    t->segs[i] = (Segment){ .seq = in->seq, .first = t->n_rows, .n = in->n, .kind = (int32_t)in->kind,
                            .n_dense = n_dense(m, in) };
    for (int j = 0; j < in->n; j++) {
        Row *row = &t->rows[t->n_rows];
        const float *soft = in->rows[j].soft;
        t->soft[t->n_rows] = soft;
        t->has_soft |= soft != NULL;
        *row = (Row){ .token = soft ? 0 : in->rows[j].token, .seg = i, .index = j, .depth = j,
                      .ahead = in->rows[j].ahead };
        assert(in->rows[j].ahead < in->n - j);
        if (in->kind == SEG_TREE) {
            const int parent = in->rows[j].parent;
            assert(parent < j);
            const Row *above = row - j + parent;
            row->depth = parent < 0 ? 0 : above->depth + 1;
            assert(row->depth < m->config.n_swa);
            row->ancestors = (parent < 0 ? 0 : above->ancestors) | (uint64_t)1 << j;
        }
        if (in->rows[j].output) {
            assert(t->n_out < (m->prompt_buffers ? 1 : m->options.n_logits));
            t->out_rows[t->n_out] = *row;
            t->out_rows[t->n_out].token = 0;           // the row is embedded by then, so nothing reads its token
            t->out_index[t->n_out++] = t->n_rows;
        }
        t->n_rows++;
    }
}

// For rows whose tokens are ON_DEVICE: each segment's sampled token, then the tokens drafted after it, are in s.next.
static void upload_token_sources(Model *m) {
    const int n_seqs = m->options.n_seqs, width = m->options.draft_width;
    int32_t source[STEP_ROWS];
    for (int r = 0; r < m->step.n_rows; r++) {
        const Row *row = &m->step.rows[r];
        source[r] = row->index ? n_seqs + ((row->index - 1) * m->step.n_segs + row->seg) * width : row->seg;
    }
    upload_changes(m, m->s.token_source, m->uploaded.token_source, source, (size_t)m->step.n_rows * sizeof *source);
}

static void move_tokens(Model *m, bool drafts) {       // from where the last step left them into the rows of this one
    const State *s = &m->s;
    move_rows(m, m->step.n_rows, 1, drafts ? s->next : s->chosen, 1, drafts ? s->token_source : NULL, &s->rows->token,
              sizeof(Row) / sizeof(int32_t));
}

// Makes a step of the rows of n_segs segments of different sessions, for run_prepared(). The caller has checked that
// token ids are in the vocabulary and that len + n fits the session.
static void prepare_step(Model *m, const StepSeg *segs, int n_segs) {
    const bool on_device = segs[0].rows[0].token == ON_DEVICE, drafts = on_device && segs[0].n > 1;
    bool is_prompt = false;
    int rows = 0;
    for (int i = 0; i < n_segs; i++) {
        rows += segs[i].n;
        is_prompt |= segs[i].n > STEP_ROWS;
    }
    select_buffers(m, rows > STEP_ROWS);
    State *s = &m->s;
    Step *t = &m->step;
    assert(!on_device || drafts || n_segs == t->n_out);                        // of the step before
    assert(n_segs <= m->options.n_seqs);
    t->ahead = on_device;
    t->n_segs = n_segs;
    t->n_rows = t->n_out = 0;
    t->has_soft = false;
    for (int i = 0; i < n_segs; i++) add_segment(m, i, &segs[i]);
    upload_changes(m, s->rows, t->uploaded.rows, t->rows, (size_t)t->n_rows * sizeof(Row));
    upload_changes(m, s->segs, t->uploaded.segs, t->segs, (size_t)t->n_segs * sizeof(Segment));
    upload_changes(m, s->out_rows, t->uploaded.out_rows, t->out_rows, (size_t)t->n_out * sizeof(Row));
    upload_changes(m, s->out_index, t->uploaded.out_index, t->out_index, (size_t)t->n_out * sizeof(int32_t));
    if (drafts) upload_token_sources(m);
    const int32_t variant = m->scorer_pass ? m->scorer_pass : drafts ? DRAFTS_ON_DEVICE :
                            on_device ? TOKENS_ON_DEVICE : PLAIN;
    t->key = (StepKey){ .model = m->number, .kind = is_prompt ? STEP_PROMPT : STEP_DECODE, .rows = t->n_rows,
                        .segs = n_segs, .out_rows = t->n_out, .logits = t->n_out, .variant = variant };
    t->pass = (Pass){ .is_prompt = is_prompt };
    t->number = ++m->steps;
}

// Runs the prepared step, or continues it after a pause. Returns the number of rows of logits, in the order of the
// output rows; STOPPED: m->stop was set, nothing may be committed; PAUSED: see forward().
static int run_prepared(Model *m, double work) {
    const Ops *op = m->ops;
    const bool record = !m->dump_dir && !m->step.has_soft;             // both copy in the middle of the step
    PassStatus status = DONE;
    if (!record || op->begin(m->step.key)) {
        if (m->step.ahead) move_tokens(m, m->step.key.variant == DRAFTS_ON_DEVICE);
        status = forward(m, work);
    }
    if (record) op->end();
    return status == DONE ? m->step.n_out : (int)status;
}

static int step(Model *m, const StepSeg *segs, int n_segs) {
    prepare_step(m, segs, n_segs);
    return run_prepared(m, INFINITY);
}

// The tokens that may be sampled at one row of logits: bits (vocab / 32), in which this clears what the file forbids;
// NULL: all that the file allows.
static void mask_row(Model *m, int row, uint32_t *bits) {
    const size_t words = round_up((size_t)m->config.vocab, 32) / 32;
    const uint64_t bit = (uint64_t)1 << row;
    if (!bits && !(m->masked & bit)) return;
    for (size_t w = 0; bits && w < words; w++) bits[w] &= m->allowed[w];
    m->masked = bits ? m->masked | bit : m->masked & ~bit;
    m->ops->copy(&(Copy){ m->s.mask + (size_t)row * words, bits ? bits : m->allowed, words * sizeof *bits, COPY_IN });
}

static void issue_sample(Model *m) {                   // one token per output row of the step, into s.chosen
    const State *s = &m->s;
    Batch out = step_batch(m, s->len);
    out.rows = s->out_rows;
    out.n_rows = m->step.n_out;
    m->ops->sample(&(Sample){ .batch = &out, .vocab = m->config.vocab, .logits = s->logits, .params = s->params,
                              .mask = s->mask, .bias = s->bias, .counts = s->counts,
                              .step_rows = s->counts ? s->rows : NULL, .out = s->chosen });
}

static void issue_commit(Model *m, const int32_t *n_accept, const int32_t *path) {
    const State *s = &m->s;
    const Batch all = step_batch(m, s->len);
    m->ops->kv_commit(&(KvCommit){ .batch = &all, .caches = m->caches, .n_caches = m->n_caches, .n_accept = n_accept,
                                   .path = path, .counts = s->counts, .vocab = m->config.vocab });
}

// Makes n_accept[i] rows of the step's segment i part of its session: of a CHAIN the first ones, of a TREE the rows
// path[i * STEP_ROWS ...], root first; path may be NULL if all segments are chains. sample: first a token is sampled at
// every output row, into s.chosen. In plain decoding the two follow each other, so they are recorded as one.
static void finish_step(Model *m, const int32_t *n_accept, const int32_t *path, bool sample) {
    const Ops *op = m->ops;
    State *s = &m->s;
    for (int i = 0; i < m->step.n_segs; i++) {
        const Segment *seg = &m->step.segs[i];
        assert(n_accept[i] >= 0 && n_accept[i] <= seg->n && (seg->n <= STEP_ROWS || n_accept[i] == seg->n));
        m->len[seg->seq] += n_accept[i];
    }
    upload_changes(m, s->n_accept, m->uploaded.n_accept, n_accept, (size_t)m->step.n_segs * sizeof *n_accept);
    if (path) op->copy(&(Copy){ s->path, path, (size_t)m->step.n_segs * STEP_ROWS * sizeof *path, COPY_IN });
    if (op->begin((StepKey){ .model = m->number, .kind = sample ? STEP_SAMPLE : STEP_COMMIT, .rows = m->step.n_rows,
                             .segs = m->step.n_segs, .logits = sample ? m->step.n_out : 0,
                             .variant = path ? COMMITS_PATHS : COMMITS_CHAINS })) {
        if (sample) issue_sample(m);
        issue_commit(m, s->n_accept, path ? s->path : NULL);
    }
    op->end();
    drafter_committed(m, n_accept);
}

static void commit(Model *m, const int32_t *n_accept, const int32_t *path) { finish_step(m, n_accept, path, false); }

static void commit_all(Model *m) {                     // every row of the last step, which is one chain
    commit(m, &(int32_t){ m->step.n_rows }, NULL);
}

static void read_logits(Model *m, int row, float *host) {                      // (vocab) of an output row, last step
    const size_t n = (size_t)m->config.vocab;
    m->ops->copy(&(Copy){ host, m->s.logits + (size_t)row * n, n * sizeof *host, COPY_OUT });
    m->ops->wait();
}

// Runs as many of n tokens through session seq as one step has room for, and returns how many; the caller commits them.
// If these are all n, the last one's logits are row 0.
static int run_chunk(Model *m, int seq, const int32_t *tokens, int n) {
    const int chunk = min_int(n, m->options.n_batch);
    for (int i = 0; i < chunk; i++) m->step_rows[i] = (StepRow){ .token = tokens[i], .output = i == n - 1 };
    step(m, &(StepSeg){ .seq = seq, .kind = SEG_CHAIN, .n = chunk, .rows = m->step_rows, .more = n - chunk }, 1);
    return chunk;
}

// ==== [6] The plain loop =============================================================================================
// Text generation without sessions, drafts or sampling: `gemma4 MODEL -p TEXT --greedy`. parts/generate.h does the same
// for many sessions at once, with drafts, and without waiting for the device after every token. Its greedy text is the
// same, except that this loop prints thoughts too.

// The largest logit among the tokens that the file allows; the lower id if two are equal. -1: none is a number.
static int32_t best_token(const Model *m, const float *logits) {
    int32_t best = -1;
    for (int32_t i = 0; i < m->config.vocab; i++) {
        const bool allowed = m->allowed[i / 32] >> (i % 32) & 1;
        if (allowed && (best < 0 ? logits[i] > -INFINITY : logits[i] > logits[best])) best = i;
    }
    return best;
}

// Writes the greedy answer to a prompt (ids, n) to stdout, at most n_predict tokens; -1: as many as fit. Returns their
// number, the stop token included; logits (vocab) are those that the last token was chosen from. Session 0 is empty.
static int generate_greedy(Model *m, Tokenizer *t, const int32_t *ids, int n, int n_predict, float *logits) {
    int made = 0;
    for (int at = 0; at < n; ) {                       // the prompt, a chunk at a time
        at += run_chunk(m, 0, ids + at, n - at);
        commit_all(m);
    }
    for (;;) {
        read_logits(m, 0, logits);
        const int32_t token = best_token(m, logits);
        if (token < 0) die("%s: position %d: the logits are not numbers", m->gguf.path, n + made);
        made++;
        if (tok_is_stop(t, token)) break;
        const TokStr text = tok_piece(t, token, false);
        fwrite(text.s, 1, text.n, stdout);
        flush_output();
        if (made == n_predict || n + made > m->options.n_ctx) break;
        const StepRow row = { .token = token, .output = true };
        step(m, &(StepSeg){ .seq = 0, .kind = SEG_CHAIN, .n = 1, .rows = &row }, 1);
        commit_all(m);
    }
    return made;
}

// ==== [7] The rest of the program ====================================================================================
// Each part uses what stands above it, and what its head says. The callers know the engine by engine.h alone.

#include "parts/dump.h"
#include "parts/folder.h"
#include "parts/load.h"
#include "parts/guess.h"
#include "parts/draft.h"
#include "parts/image.h"
#include "parts/vision.h"
#include "parts/plan.h"
#include "parts/generate.h"
#include "parts/score.h"
#include "parts/cpu.h"
#include "parts/reference.h"
#ifdef BACKEND_FILE           // make BACKEND=FILE
#include BACKEND_FILE
#endif
#include "parts/answer.h"
#include "parts/advice.h"
#include "parts/text.h"
#include "parts/convert.h"
#include "parts/session.h"
#include "parts/picture.h"
#include "parts/bench.h"
#include "parts/plot.h"
#include "parts/sweep.h"
#include "parts/compress.h"
#include "parts/niah.h"
#include "parts/judge.h"
#include "parts/eval.h"
#include "parts/view.h"
#include "parts/lines.h"
#include "parts/chat.h"
#include "parts/store.h"
#include "parts/request.h"
#include "parts/recent.h"
#include "parts/budget.h"
#include "parts/schedule.h"
#include "parts/exchange.h"
#include "parts/dialects.h"
#include "parts/history.h"
#include "parts/openai.h"
#include "parts/anthropic.h"
#include "parts/responses.h"
#include "parts/ollama.h"
#include "parts/server.h"
#ifndef TESTING
#include "parts/flags.h"
#include "parts/cli.h"

int main(int argc, char **argv) {
    return command_line(argc, argv);                   // one verb of the command line -> exit status
}
#endif
