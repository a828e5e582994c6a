/* gemma4.h - the backend interface: what the forward pass in gemma4.c asks of a backend, and nothing else.
 *
 * The model is written once, against the table of operations at the end of this file (Ops). parts/reference.h defines
 * each operation in plain loops. A backend (parts/cpu.h, CUDA, HIP, Metal, SYCL) is one more file that fills the table.
 * This header knows nothing about files, text or sampling policy; it includes parts/cards.h, <stdbool.h>, <stddef.h>
 * and <stdint.h>.
 *
 * GLOSSARY  terms that have one meaning in all files
 *   row           one token of a step; also its vector of activations
 *   output row    a row that needs logits
 *   step          one pass of some rows through all layers; decode steps have 1 to STEP_ROWS rows
 *   segment       the rows of one session in a step: a chain (each row follows the one before) or a tree
 *   session       one conversation or text in a model: its tokens, its slice of every KV cache
 *   commit        rows of the last step become part of a session; other rows are dropped without any undo
 *   stream        the residual stream x
 *   delta         what a block adds to the stream; the next product that reads the stream adds it
 *   global layer  attends to all positions; a sliding layer attends to the last n_swa positions
 *   slot          a place for one row in a cache; a ring is the cache of a sliding layer, slot = (len + index) mod
 *   slots tail          the newest rows of a quantised cache, kept in f16 too
 *   staging       where a prompt's rows of sliding layers wait until every layer that shares the ring has read them
 *   tied          K and V are one projection and share one stored row (plus the values of K that RoPE rotates)
 *   rotation      of a cached row: the Hadamard rotation before quantising (parts/kv.h); RoPE is always called RoPE
 *   target        the model that is to be run; a drafter is a small model that proposes its next tokens (drafts)
 *   verification  one step runs drafts; those equal to the target's own choices are accepted
 *   taps          outputs of the target's layers that a DFlash drafter reads
 *   split         one of several parts of a reduction that are computed apart and summed in a fixed order
 *   fence         a point in the device's order of work that the host can wait for
 *   snapshot      of a session: what its rings held at some length, so that it can go back there
 *
 * CONTRACT
 *  1. One struct per operation. Batch, Cache, Tensor and the operations' structs are host memory and are read during
 *     the call. All other pointers point into backend memory unless marked "host". n_rows, n_segs and other
 *     counts in the structs are upper bounds that the host knows. Token ids, row positions, lengths, accepted paths and
 *     sampler state live in backend memory and may be written by operations, so a step can follow another before the
 *     host knows which tokens were sampled.
 *  2. No launch geometry depends on a length: grids follow from n_rows and shapes; loops read lengths on the device.
 *  3. An operation does not allocate, synchronise or open files. Only wait() and wait_for() block.
 *  4. begin(key) .. end() brackets a step. Steps with equal keys issue the same operations with the same structs; only
 *     the contents of backend memory differ. So a backend may record a step once per key (a CUDA graph) and replay it:
 *     begin() returns true if the operations have to be issued, false if end() replays a recorded step. Between the two
 *     calls come operations and COPY_WITHIN, no other run-time call. init() and release() forget every recorded step.
 *  5. Activations are f32, (rows, cols) row-major. Matrices are (rows = out, cols = in), row-major, y = W x, no bias.
 *  6. A quantised matrix meets int8 activations in groups of 32: with a = max|x|, s = a / 127, q = rint(x * (127 / a))
 *     in f32, ties to even; a < 2^-120: s = 0 and q = 0; a NaN or Inf in the group: s = NaN and q = 0
 *     (gguf_quantize_q8). Each group is an integer dot product; groups are summed in f32, in one order per weight type.
 *     Matrices of floats meet f32 (CPU) or their own precision with f32 sums (GPU). In steps of more than STEP_ROWS
 *     rows a product may convert both factors to bf16 or f16. An activation that was written as int8 then counts as
 *     its int8 values times their scale.
 *  7. For 1..64 rows the result of a row does not depend on how many rows the step has, nor on its segment or session.
 *     Attention reads the committed positions in ascending order, then the rows of the step; tiles are aligned to cache
 *     slots.
 *  8. Norms and residual additions are computed by the operation that reads them (In, below): every block of threads
 *     computes the whole row again; one block writes x_out. x_out must not overlap any input.
 *  9. GateUp.route, GateUp.experts and ExpertGateUp.dense_down are fields of another operation: independent
 *     work that may run in its launch. NULL: none.
 * 10. A table entry may be NULL: the backend lacks that operation, and gemma4.c refuses the feature that needs it by
 *     name. An unsupported type or shape ends the process with operation and shapes; there is no silent fallback.
 * 11. A fused operation offers the intermediate results that it fuses through its dump_* pointers (NULL in normal use).
 */
#ifndef GEMMA4_H
#define GEMMA4_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "parts/cards.h"
#if defined(__CUDACC__) || defined(__HIPCC__)
#define HOST_DEVICE __host__ __device__  // for functions that both host and device run
#else
#define HOST_DEVICE
#endif
#ifdef __cplusplus
extern "C" {
#endif

enum { MAX_HEAD_DIM = 512, MAX_EXPERTS = 1024 };       // of any layer that an operation is called for
enum { STEP_ROWS = 64,               // the most rows of a step that is not a prompt; also the spare slots of a cache
       TILE_SLOTS = 64 };            // keys of an attention tile; the slots of a cache are a multiple

// ---- matrices ----------------------------------------------------------------------------------------------------
// Element types have their GGUF numbers.
typedef enum {
    T_F32 = 0, T_F16 = 1, T_Q4_0 = 2, T_Q4_1 = 3, T_Q5_0 = 6, T_Q5_1 = 7, T_Q8_0 = 8, T_Q2_K = 10, T_Q3_K = 11,
    T_Q4_K = 12, T_Q5_K = 13, T_Q6_K = 14, T_IQ4_NL = 20, T_IQ4_XS = 23, T_BF16 = 30, T_MXFP4 = 39, T_NVFP4 = 40
} DType;

HOST_DEVICE static inline bool is_quantised(DType t) { return t != T_F32 && t != T_F16 && t != T_BF16; }

typedef struct {
    const void  *data;               // (n, rows, cols) as in the file; the backend's own layout once uploaded
    DType        type;
    int          rows, cols;         // out features, in features (cols = contiguous)
    int          n;                  // matrices, one after the other: experts; else 1
    const float *scale;              // (n) factor of each matrix's product, NULL = 1 (.scale tensors of NVFP4 files)
    bool         in_host;            // the device has no room for it: upload() puts it into host memory, in the
                                     // device's layout, and operations read it there
} Tensor;

// An activation that a matrix product will read. The producer fills what is not NULL: f for float matrices, q and s for
// quantised ones (rule 6). Equal results either way: the rounding is the same.
typedef struct {
    float  *f;                       // (rows, cols)
    int8_t *q;                       // (rows, cols)
    float  *s;                       // (rows, cols / 32)
} Act;

// The input of a matrix product, with the residual addition and the norms before it. With rms(u) = sqrt(mean(u^2) +
// eps) and norm(u; w) = w * u / rms(u), or u itself when w is NULL:
//     d  = norm(delta[0]; w_delta[0]) + norm(delta[1]; w_delta[1])         absent deltas are 0
//     x' = scale * (x + norm(d; w_post))                                   the residual stream after the block before
//     y  = norm(x'; w_pre)                                                 what the matrix is multiplied with
typedef struct {
    const float *x;                  // (rows, cols); NULL = 0
    Act          act;                // instead of x, if a producer wrote an Act: then there is no delta and no norm
    const float *delta[2];           // (rows, cols); NULL = absent
    const float *w_delta[2];         // (cols)
    const float *w_post;             // (cols); not used without delta
    float        scale;              // 1 unless a layer ends here (layer_output_scale)
    const float *w_pre;              // (cols)
    float        eps;
    float       *x_out;              // (rows, cols) x' is stored here; NULL: it is not stored
} In;

// ---- the batch: what every step takes ----------------------------------------------------------------------------
// A step has segments; a segment belongs to one session ("sequence"). Row i of a segment is written at slot len + i of
// the session's caches and has position len + depth; len grows only by kv_commit. So rows carry no position, and a
// recorded step stays valid when the length grows. Between steps the host may set len by copy(), for a new, restored or
// shortened session. (The new length may be at most slots - (window - 1) below the highest row that was
// ever written to a ring.)
typedef enum {
    SEG_CHAIN,                       // row i follows row i - 1: prompt, plain decoding (n = 1), a chain of drafts
    SEG_TREE                         // at most 64 rows; a row sees its ancestors. A tree is not deeper than the window;
                                     // a tree without branches gives the same bits as the CHAIN
} SegKind;

typedef struct {
    int32_t seq;                     // session number, 0 .. n_seqs - 1
    int32_t first, n;                // rows first .. first + n - 1 of the step
    int32_t kind;                    // SegKind. A segment of more than STEP_ROWS rows is a CHAIN and is committed whole
    int32_t n_dense;                 // last rows of a prompt's segment that attend to all blocks (block_select)
} Segment;

typedef struct {
    int32_t  token;                  // an id outside the vocabulary (a sampled -1) counts as 0
    int32_t  seg;                    // index of the segment
    int32_t  index;                  // number within the segment: the row's cache slot is len + index
    int32_t  depth;                  // position - len; CHAIN: index; TREE: number of proper ancestors
    union {
        uint64_t ancestors;          // TREE: bit j = row j of the segment is this row or an ancestor of it
        int64_t  ahead;              // CHAIN: rows after this one that it sees too where there is a window, the rest of
    };                               // its picture; 0: none. Fewer than n - index
} Row;

typedef struct {                     // the rows of a step, or some of them: forward() continues with output rows alone
    const Row     *rows;             // (n_rows)
    const Segment *segs;             // (n_segs)
    int32_t       *len;              // (n_seqs) committed rows of each session; a row's position is len[seq] + depth
    int            n_rows, n_segs;
} Batch;

// With OWN_CAUSAL a row sees none but the first rows of its segment, this many.
HOST_DEVICE static inline int rows_in_sight(const Row *row, const Segment *seg, int window) {
    return row->index + 1 + (window && seg->kind == SEG_CHAIN ? (int)row->ahead : 0);
}

// ---- caches ------------------------------------------------------------------------------------------------------
typedef enum { KV_F32, KV_F16, KV_BF16, KV_Q8_0, KV_Q4_0, KV_TQ4, KV_TQ3 } KvType;

typedef struct {                     // (n_seqs, n_kv_heads, slots, dim): one head of one session is contiguous
    KvType type;
    int    dim;                      // values per row; 0: plane absent
    void  *data;                     // codes or floats, kv_row_bytes() a row
    void  *scale;                    // f16 group scales of quantised types, same order, kv_scale_bytes() a row; or NULL
} KvPlane;

// Bytes of a row. parts/kv.h describes the rows of quantised types.
HOST_DEVICE static inline size_t kv_row_bytes(KvType t, int dim) {
    const int bits = t == KV_F32 ? 32 : t == KV_F16 || t == KV_BF16 ? 16 : t == KV_Q8_0 ? 8 : t == KV_TQ3 ? 3 : 4;
    return (size_t)dim * bits / 8;
}
HOST_DEVICE static inline int kv_group(KvType t) {       // values that share a scale; 0: not quantised
    return t == KV_Q8_0 || t == KV_Q4_0 ? 32 : t == KV_TQ4 ? 64 : t == KV_TQ3 ? 128 : 0;
}
HOST_DEVICE static inline size_t kv_scale_bytes(KvType t, int dim) {
    return kv_group(t) ? (size_t)dim / kv_group(t) * 2 : 0;
}

// One layer's K and V, for all sessions.
// The slot of position p is p mod slots. A sliding layer is a ring with slots >= window - 1 + STEP_ROWS, so rejected
// rows never need to be undone: the slot of a rejected row belongs to a position outside every window. A global layer
// has slots for the context and STEP_ROWS more, and never wraps around.
// Untied: k and v hold head_dim values each: K after norm and rope, V after its norm.
// Tied (n_rot > 0; layers whose V is the K projection): with r = k / rms(k), v holds r, and k holds the 2 * n_rot
// values of K = rope(w_k * r) that RoPE rotates; the other values of K are r * fold. Both are stored in the order
//     [0, n_rot) [half, half + n_rot) | [n_rot, half) [half + n_rot, head_dim),    half = head_dim / 2
// so that no group of a quantised row mixes the two kinds. qkv_store brings q into that order and multiplies its other
// part by fold; attend brings the output back. Rows of quantised types are Hadamard-rotated (parts/kv.h): qkv_store
// rotates q as k is rotated, attend rotates the output back as v was. Scales of k, and of a tied v, keep scores
// unbiased. Nothing else reads a cache.
typedef struct {
    int          n_seqs, n_kv_heads, head_dim;
    int          slots;              // multiple of TILE_SLOTS
    int          n_rot;              // tied: pairs that rotate; 0: untied
    KvPlane      k, v;
    const float *fold;               // (head_dim) w_k of the owning layer, tied only
    KvPlane      k_tail, v_tail;     // the newest rows in f16 too, rotated as k and v: a ring of tail_slots. A row at
                                     // position p reads positions > p - tail_reach there, older ones in k and v:
                                     // reads_tail(). A segment has at most tail_slots - tail_reach rows, so that each
                                     // of its rows finds all of them
    int          tail_slots, tail_reach;     // multiples of TILE_SLOTS; 0: no tail
} Cache;

// True: rows of this segment read the tail. The rows of a sparse prompt (it has a BlockList) read k and v alone.
HOST_DEVICE static inline bool reads_tail(const Cache *c, const Segment *seg, bool sparse) {
    return c->tail_slots && !(sparse && seg->n > STEP_ROWS);
}

typedef struct {                     // rotary embedding of pairs (i, i + head_dim / 2), i < n_pairs
    const double *inv_freq;          // (n_pairs) radians per position
    int           n_pairs;           // the other pairs are not rotated
} Rope;

// ---- body --------------------------------------------------------------------------------------------------------
typedef enum { ACT_GELU, ACT_SILU } ActFn;             // GELU: 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))

typedef struct {                     // out[r] = scale * table[token of r]
    const Batch  *batch;
    const Tensor *table;             // (vocab, cols), any type
    float         scale;
    float        *out;               // (n_rows, cols)
} Embed;

typedef struct {                     // the input of an MTP drafter: scale * table[token], then a row of hidden.
    int            n_rows;           // With i = of[r]:
    const Tensor  *table;            // (vocab, cols), any type
    float          scale;
    const int32_t *of;               // (n_rows); NULL: i = r
    const int32_t *tokens;           // token of r = tokens[i * token_stride]
    int            token_stride;
    const float   *hidden;           // rows of cols: number row[i]
    const int32_t *row;              // NULL: number i
    Act            out;              // (n_rows, 2 * cols)
} Pair;

typedef struct {                     // u[r][l] = out_scale * (norm(proj_scale * proj[r][l]; w_norm)
                                     //                        + table_scale * table[token of r][l])
    const Batch  *batch;
    const Tensor *table;             // (vocab, n_layers * ple_dim), any type; may lie in pinned host memory
    const float  *w_norm;            // (ple_dim)
    float        *u;                 // (n_rows, n_layers, ple_dim): proj on entry, u on return
    int           n_layers, ple_dim;
    float         proj_scale, table_scale, out_scale, eps;
} PleRows;

enum { MAX_PRODUCTS = 6 };
typedef struct {                     // out[i] = w[i] y, independent products of one input: q|k|v
    int           n_rows, n;         // n = 1 .. MAX_PRODUCTS
    In            in;                // cols = w[i]->cols
    const Tensor *w[MAX_PRODUCTS];
    float        *out[MAX_PRODUCTS]; // (n_rows, w[i]->rows)
} Matmul;

typedef struct {                     // router: the n_used largest of softmax(w y), renormalised, times expert_scale
    int           n_rows, n_used;    // equal logits: the lower expert first. Experts in descending order of probability
    In            in;                // w_pre = ffn_gate_inp.scale / sqrt(cols)
    const Tensor *w;                 // (n_experts, cols)
    const float  *expert_scale;      // (n_experts) or NULL
    float        *logits;            // (n_rows, n_experts)
    int32_t      *ids;               // (n_rows, n_used)
    float        *weights;           // (n_rows, n_used)
} Route;

typedef struct {                     // out[r][j] = act(gate_e y) * (up_e y) with e = ids[r][j]
    int           n_rows, n_used;
    In            in;
    const Tensor *gate, *up;         // (expert_dim, cols) x n experts; or fused: up = NULL, gate
                                     // (2 * expert_dim, cols), its first half gate, its second up
    ActFn         fn;
    const int32_t *ids;              // (n_rows, n_used)
    Act           out;               // (n_rows, n_used, expert_dim)
    const Matmul *dense_down;        // ffn_down of the dense network; NULL: none
} ExpertGateUp;

typedef struct {                     // out = act(gate y) * (up y)
    int           n_rows;
    In            in;
    const Tensor *gate, *up;         // (ffn_dim, cols)
    ActFn         fn;
    Act           out;               // (n_rows, ffn_dim)
    const Route  *route;             // same x', own w_pre; may share the launch
    const ExpertGateUp *experts;     // carried out after it: same x', own w_pre; NULL: none
} GateUp;

typedef struct {                     // out[r] = sum over j, ascending, of weights[r][j] * (down_e in[r][j])
    int           n_rows, n_used;
    Act           in;                // (n_rows, n_used, expert_dim)
    const Tensor *down;              // (cols_out, expert_dim) x n experts
    const int32_t *ids;
    const float  *weights;
    float        *out;               // (n_rows, down->rows)
} ExpertDown;

typedef struct {                     // out = gelu(w y) * u, the gate of the per-layer embedding
    int           n_rows;
    In            in;
    const Tensor *w;                 // (ple_dim, cols)
    const float  *u;                 // row r at u + r * u_stride, ple_dim values
    int           u_stride;          // floats
    Act           out;               // (n_rows, ple_dim)
} PleInject;

typedef struct {                     // writes out an In (no Act): x' to in.x_out, y to out
    int    n_rows, cols;
    In     in;
    float *out;                      // (n_rows, cols) or NULL
} Close;

typedef struct {                     // dst[i] = src[index[i]]: words of 32 bits, copied unchanged. Also moves token ids
                                     // into the rows of a step: cols 1, dst = &rows[0].token
    int            n_rows, cols;     // words
    const void    *src;              // row stride src_stride words
    const int32_t *index;            // (n_rows), NULL: identity
    void          *dst;              // row stride dst_stride words; no overlap with src
    int            src_stride, dst_stride;
} GatherRows;

// ---- cache -------------------------------------------------------------------------------------------------------
typedef struct {                     // norms of heads, RoPE, order and rotation of the cache, quantise, write
    const Batch *batch;
    const Cache *cache;              // the layer's own, or the one that it shares (then k = v = NULL)
    const Cache *staging;            // not NULL: a prompt's step on a ring. Rows go to slot = row number of the step in
                                     // this one (n_seqs = 1); kv_copy moves them to the ring after the last reader.
                                     // NULL: a segment has at most cache->slots rows (else several calls)
    int          n_heads;            // query heads
    float       *q;                  // (n_rows, n_heads * head_dim) Wq y on entry; on return the query in the order and
                                     // rotation of the cache, but undefined if attend() carried this out; NULL: none
    const float *k, *v;              // (n_rows, n_kv_heads * head_dim) Wk y and Wv y; v = k where V is the K
                                     // projection; NULL: nothing to store
    const float *w_q, *w_k;          // (head_dim) norm weights
    bool         v_norm;             // V is normed, without weight (Gemma 4); false: stored as it is (DFlash)
    Rope         rope;
    float        eps;
    float       *dump_q, *dump_q_pos;               // checkpoints Qcur_normed, Qcur_pos
    float       *dump_k, *dump_k_pos, *dump_v;      // Kcur_normed, Kcur_pos, Vcur_normed
} QkvStore;

// Which keys of a global layer the rows of a prompt attend to. Rows are taken SELECT_ROWS at a time, in the order of
// the batch, keys SELECT_KEYS at a time, by position; the heads of one KV head share a list.
enum { SELECT_ROWS = 64, SELECT_KEYS = 128,
       SELECT_FIRST = 2, SELECT_NEAR = 4 };            // blocks that are always listed: the first two; the rows' own
                                                       // block and those after it, and the three before it
typedef struct {
    int      n_blocks;               // of the cache: its slots / SELECT_KEYS, rounded up
    int32_t *n;                      // (n_rows / SELECT_ROWS, n_kv_heads) blocks in a list; -1: all that rows can see
    int32_t *block;                  // (n_rows / SELECT_ROWS, n_kv_heads, n_blocks) ascending
} BlockList;

// For each block of rows j and each block of keys n, with mean[n] of its rows of K as the cache stores them:
//     s[h][n] = log sum over j of exp(scale * q[j][h] . mean[n])       over rows that see the last key of n; none: -Inf
//     w[h][n] = exp(s[h][n]) / sum over n of exp(s[h][n]),   w[n] = the largest w[h][n] among the heads of a KV head
// Blocks in sight are those up to the last row's position. The list has the blocks that are always listed and those
// with w[n] >= alpha * the largest w[n]; alpha >= 1: all in sight. With density > 0 instead: the blocks that are always
// listed, then those with the largest w[n] (the lower n if two are equal), up to that part of the blocks in sight,
// rounded up. A block of rows attends to everything, without a list, if its rows are of several segments, or reach into
// the n_dense last rows of their segment, or if the segment has at most STEP_ROWS rows.
typedef struct {
    const Batch *batch;              // its K is stored
    const Cache *cache;
    int          n_heads;
    const float *q;                  // (n_rows, n_heads * head_dim) from qkv_store
    float        scale;              // as in Attend
    float        alpha, density;
    void        *means;              // (n_segs, n_kv_heads, n_blocks, head_dim) floats, a buffer
    float       *scores;             // (n_rows / SELECT_ROWS, n_heads, n_blocks) s ..
    float       *weights;            // (n_rows / SELECT_ROWS, n_kv_heads, n_blocks) .. and w[n], of blocks in sight;
                                     // nothing is written for rows that attend to everything
    BlockList    out;
    int64_t     *count;              // (2) += blocks that rows attend to; blocks in sight, of prompts only
} BlockSelect;

// How much attention rows of chains pay to each key j up to their position:
//     mass[r][j] = max(mass[r][j], the largest of the heads' softmax_j(scale * q[r][h] . k[j]))
typedef struct {
    const Batch *batch;              // its K is stored; at most STEP_ROWS rows
    const Cache *cache;              // of a global layer; k and v are read, not the tail
    int          n_heads;
    const float *q;                  // (n_rows, n_heads * head_dim) from qkv_store
    float        scale;              // as in Attend
    int          n_keys;             // >= slots
    float       *probs;              // (n_rows, n_heads, n_keys) a buffer
    float       *mass;               // (n_rows, n_keys)
} AttnMass;

typedef enum {
    OWN_CAUSAL,                      // CHAIN: the first rows_in_sight(), in the window; TREE: itself and ancestors
    OWN_ALL,                         // every row of the segment sees every other (full layer of a DFlash block)
    OWN_NONE                         // committed rows only (MTP on the target's cache)
} OwnMask;

typedef struct {                     // out[r][h] = sum_j softmax_j(scale * q[r][h] . k[j][g]) v[j][g],
                                     // g = h / (n_heads / n_kv_heads)
    const Batch   *batch;            // j: committed positions p - window < j < len, then rows of the segment as `own`
                                     // says; nothing in sight: 0
    const Cache   *cache;
    const Cache   *staging;          // as in QkvStore: the rows of the step are read here, committed ones in cache
    int            n_heads;
    const float   *q;                // (n_rows, n_heads * head_dim) from qkv_store
    int            window;           // 0: all positions. An MTP drafter's may differ from that of the layer it reads
    OwnMask        own;
    float          scale;            // 1 for Gemma 4
    const BlockList *blocks;         // rows see only keys in these blocks; NULL: all. OWN_CAUSAL, no window
    const QkvStore *store;           // carried out first, on the same batch, may share the launch; NULL: it was done
    Act            out;              // (n_rows, n_heads * head_dim)
} Attend;

typedef struct {                     // for every segment: row path[k] of the segment moves to slot len + k, k
                                     // ascending, and counts[seq][its token] += 1; then len += n_accept. One call for
                                     // all caches that share len, after everything else in the step that reads it
    const Batch   *batch;            // all rows of the step. CHAIN: path is 0, 1, 2 .. and not read, nothing moves
    const Cache   *caches;           // host array, (n_caches): every layer that owns one
    int            n_caches;
    const int32_t *n_accept;         // (n_segs) rows that stay, 0 .. n
    const int32_t *path;             // (n_segs, STEP_ROWS), ascending; NULL when all segments are chains
    int32_t       *counts;           // (n_seqs, vocab) what Sample.counts reads; NULL: none. Who sets len sets these
    int            vocab;
} KvCommit;

typedef struct {                     // staging -> ring: the last min(n, slots) rows of every segment go to their slots
    const Batch *batch;
    const Cache *cache, *staging;
} KvCopy;

// ---- images (parts/vision.h) -------------------------------------------------------------------------------------
// Rows are parts of one picture, not of a step: nothing here has a Batch, and no result depends on the order of calls.
// Any number of rows. Results may differ between backends by the rounding of bf16: products and attention.
typedef struct { float lo, hi; } Range;  // clamps x to lo <= x <= hi; -Inf, Inf: x itself. A NaN stays NaN

typedef struct {                     // out = x, clamped
    int          n_rows, cols;
    const float *x;                  // (n_rows, cols)
    Range        range;
    float       *out;                // (n_rows, cols), may be x
} Clamp;

typedef struct {                     // out = gelu(gate) * up
    int          n_rows, cols;
    const float *gate, *up;          // (n_rows, cols)
    float       *out;                // (n_rows, cols), may be gate or up
} GeluProduct;

typedef struct {                     // u = x + add + add_rows; out = w * (u - mean(u)) / sqrt(mean((u - mean(u))^2) +
    int          n_rows, cols;       // eps) + bias
    const float *x;                  // (n_rows, cols)
    const float *add;                // (cols) or NULL
    const float *add_rows;           // (n_rows, cols) or NULL
    const float *w, *bias;           // (cols)
    float        eps;
    float       *out;                // (n_rows, cols), may be x
} LayerNorm;

enum { MAX_IMAGE_HEAD_DIM = 128 };   // of rope_2d and attend_all; a multiple of 8

// The heads of a row at (x, y) of the picture, in place: q = rope(norm(q; w_q)), k = rope(norm(k; w_k)), v = v /
// rms(v). rope rotates the first half of a head by x, the second by y: in each half the pairs (i, i + head_dim / 4),
// i < head_dim / 4, by the angle position * inv_freq[i].
typedef struct {
    int            n_rows, n_heads, head_dim;
    float         *q, *k, *v;        // (n_rows, n_heads * head_dim)
    const float   *w_q, *w_k;        // (head_dim)
    const int32_t *pos;              // (n_rows, 2) x, y
    const double  *inv_freq;         // (head_dim / 4) radians per position
    float          eps;
} Rope2d;

typedef struct {                     // out[r][h] = sum_j softmax_j(scale * q[r][h] . k[j][h]) v[j][h], of all keys j
    int          n_rows, n_keys, n_heads, head_dim;
    const float *q, *k, *v;          // (n_rows or n_keys, n_heads * head_dim)
    float        scale;
    float       *out;                // (n_rows, n_heads * head_dim)
} AttendAll;

// out[Y][X] = (factor * mean of x[y][x] - sub) * mul, where y is side * Y .. side * Y + side - 1, and x likewise.
typedef struct {
    int          w, h;               // columns and rows of x, multiples of side
    int          side, cols;
    const float *x;                  // (h, w, cols)
    float        factor;
    const float *sub, *mul;          // (cols), or both NULL: 0 and 1
    float       *out;                // (h / side, w / side, cols)
} Pool;

// ---- output ------------------------------------------------------------------------------------------------------
typedef struct {                     // z = w y; logits = cap * tanh(z / cap)
    int           n_rows;
    In            in;                // w_pre = output_norm; no Act
    const Tensor *w;                 // (vocab, cols)
    float         cap;               // 0: none
    float        *logits;            // (n_rows, vocab), or NULL when the top_k largest do
    float        *hidden;            // (n_rows, cols) y, the input of an MTP drafter, or NULL
    int           top_k;             // 0 .. vocab; 0: none
    int32_t      *top_ids;           // (n_rows, top_k) descending logit, lower id first on ties; a NaN counts as -Inf
    float        *top_logits;        // (n_rows, top_k) as in logits
    float        *logsumexp;         // (n_rows) over the vocabulary, as exact as in Logprob, or NULL
} Head;

typedef struct {                     // out[r] = logits[r][ids[r]] - logsumexp(logits[r]); the sum in f64, or as exact
    int            n_rows, vocab;    // as 1e-6 of max(1, |out|). An id outside the vocabulary: NaN
    const float   *logits;           // (n_rows, vocab)
    const int32_t *ids;              // (n_rows)
    float         *out;              // (n_rows)
} Logprob;

typedef struct {                     // of one session; in backend memory
    uint64_t seed;
    float    temperature;            // <= 0: greedy, and nothing below applies but the penalties
    int32_t  top_k;                  // <= 0: off
    float    top_p, min_p;           // off: top_p >= 1, min_p <= 0. top_p <= 0 keeps the best token only
    float    repeat, presence, frequency;   // penalties: 1, 0, 0: off
} SampleParams;

// Samples one token per row. All arithmetic is f32 without contraction, or integer, so that backends choose the same
// token from the same logits, in whatever order and on however many threads they sum. In this order:
//   1. mask         a token whose bit is clear is out
//   2. bias         z = logit + bias
//   3. penalties    z = sample_penalised(z, c) of a token that occurs c > 0 times in the committed text of the session,
//                   its prompt included, and in the step's row itself and its ancestors.
//                   A token with z = -Inf is out. From here on tokens are sorted: descending z, the lower id if z is
//                   equal (-0 equals 0). No token is left, or a NaN is in the row's logits or z, masked or not: -1
//   4. temperature  <= 0: the first token, end. Else every token has a weight, sample_weight(z, largest z left)
//   5. top-k        the first top_k stay
//   6. top-p        with total the weights of 5, a token stays while those before it weigh less than
//                   sample_share(total, top_p); the first always stays
//   7. min-p        a token that weighs less than sample_share(SAMPLE_ONE, min_p) is out
//   8. draw         with total the weights of 7: the first token that together with those before it weighs more than
//                   sample_share(total, random_unit(seed, position of the row))
// So a row's token does not depend on what was drafted or how many rows the step has. It is issued before the step's
// kv_commit, which changes positions and counts.
typedef struct {
    const Batch        *batch;       // the rows of logits
    int                 vocab;
    const float        *logits;      // (n_rows, vocab)
    const SampleParams *params;      // (n_seqs)
    const uint32_t     *mask;        // (n_rows, vocab / 32 rounded up) bit set = allowed; NULL: all
    const float        *bias;        // (n_seqs, vocab); NULL: none
    const int32_t      *counts;      // (n_seqs, vocab) occurrences in the committed text; NULL: no penalties
    const Row          *step_rows;   // all rows of the step, among them the ancestors; NULL without counts
    int32_t            *out;         // (n_rows)
} Sample;

// How far the drafts of each segment are what the model itself samples. The output rows of a segment are some of its
// last rows, in order. The walk begins at the first of them. It goes on to the output row that follows in the segment
// (CHAIN: the next; TREE: a child) if that row's token was sampled at the current one, and ends where there is none.
typedef struct {
    const Batch   *batch;            // all rows of the step
    const Row     *out_rows;         // (n_out) their tokens are read in batch
    int            n_out;
    const int32_t *chosen;           // (n_out) what Sample chose; -1 equals no token
    int32_t       *n_accept;         // (n_segs) rows before the first output row, and those of the walk. None: all rows
    int32_t       *path;             // (n_segs, STEP_ROWS) as in KvCommit, written for TREEs; NULL: there are none
    int32_t       *last;             // (n_segs) output row where the walk ended; -1: none
    int32_t       *next;             // (n_segs) what was sampled there; 0 without output rows
} VerifyWalk;

// Head of an MTP drafter whose tokens are sorted by centroid, 1 to STEP_ROWS rows. With y as in Head, c = centroids y;
// for the n_used largest (the lower index if two are equal) the tokens order[k * per + i], per = vocab / n_centroids,
// have the logits w y; other tokens have none.
typedef struct {
    int            n_rows;
    In             in;               // w_pre = output_norm; no Act
    const Tensor  *centroids, *w;    // (n_centroids, cols), (vocab, cols)
    const int32_t *order;            // (vocab) a permutation
    int            n_used;
    float         *hidden;           // (n_rows, cols) y, or NULL
    float         *scores;           // (n_rows, n_centroids) c
    float         *logits;           // (n_rows, n_used * per) a buffer
    int            top_k;            // 1 .. n_used * per
    int32_t       *top_ids;          // (n_rows, top_k) as in Head
    float         *top_logits;       // (n_rows, top_k) -Inf for a NaN
    float         *logsumexp;        // (n_rows) over the tokens that have logits, or NULL
} HeadCentroid;

// z of a token that occurs count times. In f64 both products are exact, so a fused multiply-add changes nothing.
HOST_DEVICE static inline float sample_penalised(float z, int32_t count, const SampleParams *p) {
    const double y = z > 0 ? (double)z / p->repeat : (double)z * p->repeat;
    return (float)(y - (double)count * p->frequency - p->presence);
}

// exp((z - largest) / temperature) as a whole number, SAMPLE_ONE for 1; 0 below 2^-39. scale = 1.44269504f /
// temperature. So 2^24 tokens sum to less than 2^64. 2^-f for the fraction f of the exponent is a polynomial in 31
// bits, off by less than 1e-8, and never rises.
#define SAMPLE_ONE ((uint64_t)1 << 39)
HOST_DEVICE static inline uint64_t sample_weight(float z, float largest, float scale) {
    if (z == largest) return SAMPLE_ONE;               // infinite ones too
    const float halvings = (largest - z) * scale;
    if (!(halvings < 40)) return 0;
    const uint32_t t = (uint32_t)(halvings * 16777216.0f), f = t << 8;
    uint32_t p = 2737501 - (uint32_t)((uint64_t)f * 234126 >> 32);
    p = 20571132 - (uint32_t)((uint64_t)f * p >> 32);
    p = 119165493 - (uint32_t)((uint64_t)f * p >> 32);
    p = 515877902 - (uint32_t)((uint64_t)f * p >> 32);
    p = 1488521986 - (uint32_t)((uint64_t)f * p >> 32);
    p = 2147483648u - (uint32_t)((uint64_t)f * p >> 32);
    return ((uint64_t)p << 8) >> (t >> 24);
}

// The part of a total that is 24 bits of a fraction, rounded down.
HOST_DEVICE static inline uint64_t sample_share(uint64_t total, float fraction) {
    if (!(fraction < 1)) return total;
    const uint64_t f = fraction > 0 ? (uint64_t)(fraction * 16777216.0f) : 0;
    return (total >> 24) * f + ((total & 0xffffff) * f >> 24);
}

// The random number of one position: uniform in [0, 1), 24 bits, the same on every backend.
HOST_DEVICE static inline float random_unit(uint64_t seed, int32_t pos) {
    uint64_t z = seed + 0x9E3779B97F4A7C15u * ((uint64_t)(uint32_t)pos + 1);          // splitmix64 of (seed, pos)
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    z ^= z >> 31;
    return (float)(z >> 40) * (1.0f / 16777216.0f);
}

// ---- run time ----------------------------------------------------------------------------------------------------
typedef enum {
    COPY_IN,                         // host -> backend; src may be reused when copy() returns
    COPY_OUT,                        // backend -> host; complete after wait(), or after wait_for() a later fence
    COPY_WITHIN                      // backend -> backend
} CopyKind;

typedef struct {                     // in order with the operations
    void       *dst;
    const void *src;
    size_t      bytes;
    CopyKind    kind;
} Copy;

typedef enum { STEP_PROMPT, STEP_DECODE, STEP_DRAFT, STEP_SAMPLE, STEP_COMMIT } StepKind;

typedef struct {                     // everything that decides which operations a step issues; compare as bytes
    int32_t model;                   // models and drafters number themselves
    int32_t kind;                    // StepKind
    int32_t rows, segs;
    int32_t out_rows, logits;        // rows in the last layers (DRAFT: the depth); rows that get logits
    int32_t variant;                 // whatever else the operations depend on, numbered by gemma4.c
} StepKey;

typedef struct {                     // the largest sizes of operations, from which a backend plans its own scratch
    int max_rows;                    // rows of a step
    int max_cols;                    // widest input of a matrix product, or row of the per-layer table
    int max_experts;                 // n_used, 0 without experts
    int vocab;
    size_t host_bytes;               // of the layer with the most weights in host memory, in the device's layout
} Limits;

typedef struct Ops {
    const char *name;
    // What a caller may ask about the backend; it never compares tables
    bool on_host;                    // backend memory is host memory, and an operation is done when it returns
    bool exact_prompts;              // contract 7 holds for any number of rows: prompts compute as short steps do
    // run time. A device error ends the process with one line
    void   (*memory)(size_t *free, size_t *total);  // bytes of backend memory
    size_t (*weight_bytes)(const Tensor *w);        // backend memory that upload() fills; 0: it reads the file
    // w->data (and scale): host bytes in the file's layout -> dst in the backend's layout. Called for every matrix and
    // vector, dst NULL if weight_bytes is 0; again between steps to bring back a model whose memory was lent. A matrix
    // in_host takes host memory that the device reads: weight_bytes of the same tensor without in_host
    void   (*upload)(Tensor *w, void *dst);
    size_t (*scratch_bytes)(const Limits *lim);     // what init() will take for the backend itself
    // before the first operation; may be called again between steps. Limits are those of all models loaded together
    void   (*init)(const Limits *lim);
    void  *(*reserve)(size_t bytes);                // zeroed, 256-byte aligned; only at start; NULL: there is no room
    void   (*release)(void *p);                     // and host memory that upload() has taken since p was reserved
    void   (*copy)(const Copy *c);
    bool   (*begin)(StepKey key);                   // an operation outside begin .. end runs at once
    void   (*end)(void);
    void   (*wait)(void);                           // until everything issued so far is done
    int    (*fence)(void);                          // a fence after everything issued so far
    void   (*wait_for)(int fence);                   // until everything before it is done
    double (*bandwidth)(void);                      // bytes/s of the device's memory at best; 0: not known
    double (*bus)(void);                            // bytes/s from host memory to the device; 0: not known, or no bus
    double (*int8_peak)(void);                      // int8 operations/s of prompts' products at best; 0: not known
    double (*joules)(void);                         // energy used since some moment; < 0: not known
    int64_t (*launches)(void);                      // kernels and copies issued to the device so far
    const Card *(*card)(void);                      // what operations are planned for; NULL: not a GPU
    // body
    void (*embed)(const Embed *o);
    void (*pair)(const Pair *o);                             // MTP drafters
    void (*ple_rows)(const PleRows *o);
    void (*matmul)(const Matmul *o);
    void (*gate_up)(const GateUp *o);
    void (*route)(const Route *o);                           // in a step: by gate_up, which carries it
    void (*expert_gate_up)(const ExpertGateUp *o);           // likewise
    void (*expert_down)(const ExpertDown *o);
    void (*ple_inject)(const PleInject *o);
    void (*close)(const Close *o);
    void (*gather_rows)(const GatherRows *o);
    // cache
    void (*qkv_store)(const QkvStore *o);
    void (*block_select)(const BlockSelect *o);              // sparse prompts
    void (*attn_mass)(const AttnMass *o);                    // prompt compression
    void (*attend)(const Attend *o);
    void (*kv_commit)(const KvCommit *o);
    void (*kv_copy)(const KvCopy *o);
    // images
    void (*clamp)(const Clamp *o);
    void (*gelu_product)(const GeluProduct *o);
    void (*layer_norm)(const LayerNorm *o);
    void (*rope_2d)(const Rope2d *o);
    void (*attend_all)(const AttendAll *o);
    void (*pool)(const Pool *o);
    // output
    void (*head)(const Head *o);
    void (*logprob)(const Logprob *o);                       // perplexity
    void (*sample)(const Sample *o);
    void (*verify_walk)(const VerifyWalk *o);                // drafts
    void (*head_centroid)(const HeadCentroid *o);
} Ops;

#ifdef BACKEND_OPS                   // make BACKEND=parts/NAME.h or .cu: NAME_ops, another backend (docs/porting.md)
const Ops *BACKEND_OPS(void);
#endif
const Ops *reference_ops(void);      // parts/reference.h: the definition
const Ops *cpu_ops(void);            // parts/cpu.h
const Ops *cuda_ops(void);           // gemma4_kernels.cu; NULL: there is no GPU that it could use
const Ops *plain_ops(void);          // parts/plain.cu: plain kernels on any GPU; NULL: there is none
// To be called before anything else of the CUDA backend: plan as for this card (parts/cards.h), its memory included,
// but never for more than the real card has. NULL: plan for the real card.
void cuda_pretend(const Card *card);
const Ops *cuda_plan_ops(void);      // plans for the card of cuda_pretend(), needs no GPU. NULL: no such card

typedef struct {                     // how the CUDA backend launches an operation on the card
    const char *family;              // kernels that are planned together
    char        choice[96];          // what was chosen, in words
    int         blocks, threads;
    int         per_sm;              // blocks that an SM gets at once; 0: as many as fit, and more blocks follow
    size_t      shared;              // bytes of a block
} LaunchPlan;
// Calls `watch` for every planned launch from now on; NULL: no longer. plans_only: nothing is launched, so the pointers
// of operations need not be valid.
void cuda_watch(void (*watch)(const LaunchPlan *), bool plans_only);

#ifdef __cplusplus
}
#endif
#endif
