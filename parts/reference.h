/* reference.h - the definition of every operation of gemma4.h: one plain function each, and reference_ops(), their
 * table.
 *
 * Nothing here is fast: one thread, one value after the other, sums in f64. Every weight is dequantised to f32 by
 * gguf_dequantize. Backend memory is host memory, and weights are read in place from the mapped file. The tests compare
 * every backend with this table, and `gemma4 check --against reference` does so on a model. tools/new_backend.sh copies
 * this file, as the start of a port: replace one function, run the tests, continue with the next (docs/porting.md). So
 * it compiles as C11 and as C++20.
 *
 * Uses gemma4.h, gguf.h, kv.h and the math library. Begin with reference_ops().
 *
 *   #define _GNU_SOURCE            // before every include: sysconf
 *   #include "gemma4.h"
 *   #include "gguf.h"
 *   #include "parts/kv.h"
 *   #include "parts/reference.h"
 *
 *   [1] Rows: weights, norms, inputs, products      [4] Images
 *   [2] Body                                        [5] Output
 *   [3] Cache                                       [6] Run time, the table */
#ifndef REFERENCE_H
#define REFERENCE_H
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

// ==== [1] Rows: weights, norms, inputs, products =====================================================================
// Every operation processes the rows of a step one by one. They share no sums, so the number of rows changes no bit.

enum { REF_HEAD_DIM = 512, REF_EXPERTS = 1024 };       // upper bounds

typedef struct { float z; int32_t id; uint64_t weight; } RefToken;     // a token or expert: logit, id, sampling weight

static struct {               // scratch, allocated by ref_init
    double   *x, *d;          // (max_cols) one row of In while it is computed
    Act       y;              // (max_cols) the result: y of In
    float    *w;              // (max_cols) one row of a matrix
    float    *out;            // (max_cols) one row of a result, before it is stored as an Act
    float    *logits;         // (vocab)
    RefToken *tokens;         // (vocab or REF_EXPERTS)
} ref;

static void ref_refuse(const char *what, int got) {
    fprintf(stderr, "gemma4: error: reference: %s: got %d\n", what, got);
    exit(1);
}

// Row i of matrix e as f32 (cols); valid until the next call.
static const float *ref_weights(const Tensor *w, int e, int i) {
    const size_t row_size = gguf_row_size(w->type, w->cols), row = (size_t)e * w->rows + i;
    gguf_dequantize(w->type, (const uint8_t *)w->data + row * row_size, ref.w, w->cols);
    return ref.w;
}

// u[i] = w[i] * u[i] / rms(u), rms(u) = sqrt(mean(u^2) + eps); w NULL: no weight.
static void ref_norm(double *u, const float *w, int n, float eps) {
    double squares = 0;
    for (int i = 0; i < n; i++) squares += u[i] * u[i];
    for (int i = 0; i < n; i++) u[i] *= (w ? w[i] : 1) / sqrt(squares / n + eps);
}

static void ref_load(double *u, const float *from, int n) {
    for (int i = 0; i < n; i++) u[i] = from[i];
}

static void ref_save(float *to, const double *u, int n) {
    for (int i = 0; i < n; i++) to[i] = (float)u[i];
}

// Quantises n floats, a multiple of 32, to int8 and scales as rule 6 of gemma4.h says. All in f32.
static void ref_quantise(const float *x, int n, int8_t *q, float *s) {
    for (int g = 0; g < n / 32; g++) {
        float largest = 0;
        bool finite = true;
        for (int i = 32 * g; i < 32 * g + 32; i++) {
            largest = fmaxf(largest, fabsf(x[i]));
            finite = finite && isfinite(x[i]);
        }
        s[g] = largest < 0x1p-120f ? 0 : largest / 127;
        if (!finite) s[g] = NAN;
        for (int i = 32 * g; i < 32 * g + 32; i++) q[i] = s[g] > 0 ? (int8_t)rintf(x[i] * (127 / largest)) : 0;
    }
}

// Stores v (cols) in row r of an Act: as f32, as int8, or both.
static void ref_store(const Act *out, size_t r, int cols, const float *v) {
    if (out->f) memcpy(out->f + r * cols, v, (size_t)cols * sizeof *v);
    if (out->q) ref_quantise(v, cols, out->q + r * cols, out->s + r * cols / 32);
}

static Act ref_act_row(const Act *a, size_t r, int cols) {
    return (Act){ .f = a->f ? a->f + r * cols : NULL, .q = a->q ? a->q + r * cols : NULL,
                  .s = a->s ? a->s + r * cols / 32 : NULL };
}

// Row r of an In: stores x' if the operation asks for it and returns y as f32 and int8, valid until the next call.
static Act ref_input(const In *in, int r, int cols) {
    const size_t at = (size_t)r * cols;
    if (in->act.f || in->act.q) return ref_act_row(&in->act, r, cols);
    for (int i = 0; i < cols; i++) ref.x[i] = 0;
    for (int k = 0; k < 2; k++) {                      // d
        if (!in->delta[k]) continue;
        ref_load(ref.d, in->delta[k] + at, cols);
        if (in->w_delta[k]) ref_norm(ref.d, in->w_delta[k], cols, in->eps);
        for (int i = 0; i < cols; i++) ref.x[i] += ref.d[i];
    }
    if (in->w_post && (in->delta[0] || in->delta[1])) ref_norm(ref.x, in->w_post, cols, in->eps);
    // x' is rounded to f32, so that y has the same bits whether x' is stored or not
    for (int i = 0; i < cols; i++) ref.x[i] = (float)(in->scale * ((in->x ? in->x[at + i] : 0) + ref.x[i]));
    if (in->x_out) ref_save(in->x_out + at, ref.x, cols);
    if (in->w_pre) ref_norm(ref.x, in->w_pre, cols, in->eps);
    ref_save(ref.y.f, ref.x, cols);                    // y
    if (cols % 32 == 0) ref_quantise(ref.y.f, cols, ref.y.q, ref.y.s);
    return ref.y;
}

// Row i of matrix e times y. A matrix of floats is multiplied with f32, a quantised one with int8.
static double ref_product(const Tensor *w, int e, int i, Act y) {
    const bool floats = w->type == T_F32 || w->type == T_F16 || w->type == T_BF16;
    const float *v = ref_weights(w, e, i);
    double sum = 0;
    for (int k = 0; k < w->cols; k++) sum += v[k] * (floats ? (double)y.f[k] : (double)y.s[k / 32] * y.q[k]);
    return w->scale ? w->scale[e] * sum : sum;
}

static double ref_activation(ActFn fn, double x) {
    if (fn == ACT_SILU) return x / (1 + exp(-x));
    return 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

// The order of tokens: descending z; on ties the lower id first.
static int ref_compare(const void *a, const void *b) {
    const RefToken *x = (const RefToken *)a, *y = (const RefToken *)b;
    if (x->z != y->z) return x->z > y->z ? -1 : 1;
    return x->id < y->id ? -1 : 1;
}

static void ref_rank(const float *z, int n) {          // sorts z into ref.tokens; a NaN counts as -Inf
    for (int i = 0; i < n; i++) ref.tokens[i] = (RefToken){ .z = isnan(z[i]) ? -INFINITY : z[i], .id = i };
    qsort(ref.tokens, n, sizeof *ref.tokens, ref_compare);
}

// ==== [2] Body =======================================================================================================

// The token id of a row, or 0 if it is outside the vocabulary.
static int ref_token(const Row *row, int vocab) { return row->token < 0 || row->token >= vocab ? 0 : row->token; }

static void ref_embed(const Embed *o) {
    for (int r = 0; r < o->batch->n_rows; r++) {
        const float *v = ref_weights(o->table, 0, ref_token(&o->batch->rows[r], o->table->rows));
        for (int i = 0; i < o->table->cols; i++) o->out[(size_t)r * o->table->cols + i] = v[i] * o->scale;
    }
}

static void ref_pair(const Pair *o) {
    const int cols = o->table->cols;
    for (int r = 0; r < o->n_rows; r++) {
        const int i = o->of ? o->of[r] : r;
        const Row row = { .token = o->tokens[(size_t)i * o->token_stride] };
        const float *v = ref_weights(o->table, 0, ref_token(&row, o->table->rows));
        for (int c = 0; c < cols; c++) ref.out[c] = v[c] * o->scale;
        memcpy(ref.out + cols, o->hidden + (size_t)(o->row ? o->row[i] : i) * cols, (size_t)cols * sizeof(float));
        ref_store(&o->out, r, 2 * cols, ref.out);
    }
}

static void ref_ple_rows(const PleRows *o) {
    for (int r = 0; r < o->batch->n_rows; r++) {
        const float *v = ref_weights(o->table, 0, ref_token(&o->batch->rows[r], o->table->rows));
        for (int l = 0; l < o->n_layers; l++, v += o->ple_dim) {
            float *u = o->u + ((size_t)r * o->n_layers + l) * o->ple_dim;
            for (int i = 0; i < o->ple_dim; i++) ref.x[i] = (double)o->proj_scale * u[i];
            ref_norm(ref.x, o->w_norm, o->ple_dim, o->eps);
            for (int i = 0; i < o->ple_dim; i++)
                u[i] = (float)(o->out_scale * (ref.x[i] + (double)o->table_scale * v[i]));
        }
    }
}

static void ref_matmul(const Matmul *o) {
    for (int r = 0; r < o->n_rows; r++) {
        const Act y = ref_input(&o->in, r, o->w[0]->cols);
        for (int k = 0; k < o->n; k++)
            for (int i = 0; i < o->w[k]->rows; i++)
                o->out[k][(size_t)r * o->w[k]->rows + i] = (float)ref_product(o->w[k], 0, i, y);
    }
}

// Chooses the experts of row r from its logits. The denominator of softmax cancels, since the weights of the chosen
// experts are normalised to sum 1.
static void ref_choose_experts(const Route *o, int r) {
    const float *logits = o->logits + (size_t)r * o->w->rows;
    float *weights = o->weights + (size_t)r * o->n_used;
    int32_t *ids = o->ids + (size_t)r * o->n_used;
    double sum = 0;
    ref_rank(logits, o->w->rows);
    for (int j = 0; j < o->n_used; j++) {
        ids[j] = ref.tokens[j].id;
        sum += exp((double)logits[ids[j]] - logits[ids[0]]);
    }
    for (int j = 0; j < o->n_used; j++) {
        const double p = exp((double)logits[ids[j]] - logits[ids[0]]) / sum;
        weights[j] = (float)(o->expert_scale ? p * o->expert_scale[ids[j]] : p);
    }
}

static void ref_route(const Route *o) {
    const int n = o->w->rows;
    if (n > REF_EXPERTS) ref_refuse("route: expected at most 1024 experts", n);
    for (int r = 0; r < o->n_rows; r++) {
        const Act y = ref_input(&o->in, r, o->w->cols);
        for (int i = 0; i < n; i++) o->logits[(size_t)r * n + i] = (float)ref_product(o->w, 0, i, y);
        ref_choose_experts(o, r);
    }
}

static void ref_expert_gate_up(const ExpertGateUp *o) {
    const int n = o->up ? o->gate->rows : o->gate->rows / 2;
    const Tensor *up = o->up ? o->up : o->gate;
    const int first_up = o->up ? 0 : n;
    for (int r = 0; r < o->n_rows; r++) {
        const Act y = ref_input(&o->in, r, o->gate->cols);
        for (int j = r * o->n_used; j < (r + 1) * o->n_used; j++) {
            const int e = o->ids[j];
            for (int i = 0; i < n; i++) {
                const double act = ref_activation(o->fn, ref_product(o->gate, e, i, y));
                ref.out[i] = (float)(act * ref_product(up, e, first_up + i, y));
            }
            ref_store(&o->out, j, n, ref.out);
        }
    }
    if (o->dense_down) ref_matmul(o->dense_down);
}

static void ref_gate_up(const GateUp *o) {
    for (int r = 0; r < o->n_rows; r++) {
        const Act y = ref_input(&o->in, r, o->gate->cols);
        for (int i = 0; i < o->gate->rows; i++) {
            const double act = ref_activation(o->fn, ref_product(o->gate, 0, i, y));
            ref.out[i] = (float)(act * ref_product(o->up, 0, i, y));
        }
        ref_store(&o->out, r, o->gate->rows, ref.out);
    }
    if (o->route) ref_route(o->route);
    if (o->experts) ref_expert_gate_up(o->experts);
}

static void ref_expert_down(const ExpertDown *o) {
    for (int r = 0; r < o->n_rows; r++)
        for (int i = 0; i < o->down->rows; i++) {
            double sum = 0;
            for (int j = r * o->n_used; j < (r + 1) * o->n_used; j++)
                sum += o->weights[j] * ref_product(o->down, o->ids[j], i, ref_act_row(&o->in, j, o->down->cols));
            o->out[(size_t)r * o->down->rows + i] = (float)sum;
        }
}

static void ref_ple_inject(const PleInject *o) {
    for (int r = 0; r < o->n_rows; r++) {
        const Act y = ref_input(&o->in, r, o->w->cols);
        for (int i = 0; i < o->w->rows; i++) {
            const double act = ref_activation(ACT_GELU, ref_product(o->w, 0, i, y));
            ref.out[i] = (float)(act * o->u[(size_t)r * o->u_stride + i]);
        }
        ref_store(&o->out, r, o->w->rows, ref.out);
    }
}

static void ref_close(const Close *o) {
    for (int r = 0; r < o->n_rows; r++) {
        const Act y = ref_input(&o->in, r, o->cols);
        if (o->out) memcpy(o->out + (size_t)r * o->cols, y.f, (size_t)o->cols * sizeof(float));
    }
}

static void ref_gather_rows(const GatherRows *o) {
    for (int r = 0; r < o->n_rows; r++)
        for (int i = 0; i < o->cols; i++)
            ((uint32_t *)o->dst)[(size_t)r * o->dst_stride + i] =
                ((const uint32_t *)o->src)[(size_t)(o->index ? o->index[r] : r) * o->src_stride + i];
}

// ==== [3] Cache ======================================================================================================

// Row `slot` of one head of one session, and its scales.
typedef struct { void *data; uint16_t *scales; } RefRow;
static RefRow ref_kv_row(const Cache *c, const KvPlane *p, int seq, int head, int slot) {
    const size_t row = ((size_t)seq * c->n_kv_heads + head) * c->slots + slot;
    return (RefRow){ (char *)p->data + row * kv_row_bytes(p->type, p->dim),
                     p->scale ? (uint16_t *)((char *)p->scale + row * kv_scale_bytes(p->type, p->dim)) : NULL };
}

// Writes the first dim values of v to a row. Rows that enter scores, K and tied V, get unbiased scales.
static void ref_kv_write(const Cache *c, const KvPlane *p, RefRow row, const float *v) {
    kv_write_row(p->type, p == &c->k || c->n_rot > 0, p->dim, v, row.data, row.scales);
}

static void ref_kv_read(const KvPlane *p, RefRow row, float *v) {              // (dim)
    kv_read_rows(p->type, 1, p->dim, row.data, row.scales, v);
}

// The tail of a cache (its newest rows in f16) as a Cache.
static Cache ref_tail(const Cache *c) {
    Cache t = *c;
    t.k = c->k_tail;
    t.v = c->v_tail;
    t.slots = c->tail_slots;
    return t;
}

// Writes the first dim values of v to the tail. They get the Hadamard rotation if the plane is quantised.
static void ref_tail_write(const KvPlane *plane, const KvPlane *tail, RefRow row, const float *v) {
    float y[REF_HEAD_DIM];
    memcpy(y, v, (size_t)tail->dim * sizeof *y);
    for (int i = 0; kv_group(plane->type) && i < tail->dim; i += KV_ROTATION) kv_rotate(y + i, 0.0625f);
    kv_write_row(tail->type, false, tail->dim, y, row.data, row.scales);
}

// Where a cache row holds value i of a head. A tied cache has first the values that RoPE rotates, of both halves, then
// the others.
static int ref_tied_index(const Cache *c, int i) {
    const int half = c->head_dim / 2;
    if (!c->n_rot || i < c->n_rot || i >= half + c->n_rot) return i;
    return i < half ? i + c->n_rot : i - half + c->n_rot;
}

// RoPE: rotates each pair (i, i + half) of a head by its angle at a position.
static void ref_rope(double *u, int half, const Rope *rope, int pos) {
    for (int i = 0; i < rope->n_pairs; i++) {
        const double c = cos(pos * rope->inv_freq[i]), s = sin(pos * rope->inv_freq[i]), a = u[i], b = u[i + half];
        u[i] = a * c - b * s;
        u[i + half] = a * s + b * c;
    }
}

static void ref_dump(float *dump, size_t head, const double *u, int head_dim) {
    if (dump) ref_save(dump + head * head_dim, u, head_dim);
}

static void ref_qkv_store(const QkvStore *o) {
    const Cache *c = o->cache, *dst = o->staging ? o->staging : c, tail = ref_tail(c);
    const int hd = c->head_dim, half = hd / 2;
    double u[REF_HEAD_DIM];
    float in_order[REF_HEAD_DIM];                      // u in the order of the cache
    if (hd > REF_HEAD_DIM) ref_refuse("head_dim: expected at most 512", hd);
    for (int r = 0; r < o->batch->n_rows; r++) {
        const Row *row = &o->batch->rows[r];
        const Segment *seg = &o->batch->segs[row->seg];
        const int len = o->batch->len[seg->seq], pos = len + row->depth;
        for (int h = r * o->n_heads; o->q && h < (r + 1) * o->n_heads; h++) {
            float *q = o->q + (size_t)h * hd;
            ref_load(u, q, hd);
            ref_norm(u, o->w_q, hd, o->eps);
            ref_dump(o->dump_q, h, u, hd);
            ref_rope(u, half, &o->rope, pos);
            ref_dump(o->dump_q_pos, h, u, hd);
            for (int i = 0; i < hd; i++) {             // tied: K's factor fold is applied to q instead
                const bool folded = c->n_rot && i % half >= c->n_rot;
                in_order[ref_tied_index(c, i)] = (float)(folded ? u[i] * c->fold[i] : u[i]);
            }
            if (kv_group(c->k.type)) kv_rotate_query(in_order, hd);
            memcpy(q, in_order, (size_t)hd * sizeof *q);
        }
        if (!o->k) continue;
        const int seq = o->staging ? 0 : seg->seq;
        const int slot = o->staging ? seg->first + row->index : (len + row->index) % c->slots;
        const int tail_slot = tail.slots ? (len + row->index) % tail.slots : 0;
        for (int g = 0; g < c->n_kv_heads; g++) {
            const size_t head = (size_t)r * c->n_kv_heads + g;
            ref_load(u, o->k + head * hd, hd);
            ref_norm(u, o->w_k, hd, o->eps);
            ref_dump(o->dump_k, head, u, hd);
            ref_rope(u, half, &o->rope, pos);
            ref_dump(o->dump_k_pos, head, u, hd);
            for (int i = 0; i < hd; i++) in_order[ref_tied_index(c, i)] = (float)u[i];
            ref_kv_write(dst, &dst->k, ref_kv_row(dst, &dst->k, seq, g, slot), in_order);      // tied: 2 * n_rot values
            if (tail.slots) ref_tail_write(&c->k, &tail.k, ref_kv_row(&tail, &tail.k, seq, g, tail_slot), in_order);
            ref_load(u, o->v + head * hd, hd);
            if (o->v_norm) ref_norm(u, NULL, hd, o->eps);
            ref_dump(o->dump_v, head, u, hd);
            for (int i = 0; i < hd; i++) in_order[ref_tied_index(c, i)] = (float)u[i];
            ref_kv_write(dst, &dst->v, ref_kv_row(dst, &dst->v, seq, g, slot), in_order);
            if (tail.slots) ref_tail_write(&c->v, &tail.v, ref_kv_row(&tail, &tail.v, seq, g, tail_slot), in_order);
        }
    }
}

// True: the block of key j is in list number `list` (of a block of rows and a KV head).
static bool ref_is_listed(const BlockList *b, int list, int j) {
    for (int i = 0; i < b->n[list]; i++)
        if (b->block[(size_t)list * b->n_blocks + i] == j / SELECT_KEYS) return true;
    return b->n[list] < 0;
}

// True: the row sees key j. Keys are numbered: j < len is the committed position j, len + i is row i of the segment.
static bool ref_is_visible(const Attend *o, const Row *row, const Segment *seg, int len, int j) {
    const int i = j - len;
    if (i < 0) return !o->window || j > len + row->depth - o->window;
    if (o->own != OWN_CAUSAL) return o->own == OWN_ALL;
    if (seg->kind == SEG_TREE) return row->ancestors >> i & 1;
    return i <= row->index + (o->window ? row->ahead : 0) && (!o->window || i > row->index - o->window);
}

// Reads K and V of key j (head_dim), in the order of the cache, as a row of the segment sees them. Returns the factor
// of V (kv_tied_factor).
static double ref_read_key(const Attend *o, const Row *row, const Segment *seg, int len, int j, int head, float *k,
                           float *v) {
    const bool staged = o->staging && j >= len;
    const bool newest = reads_tail(o->cache, seg, o->blocks) && j > len + row->depth - o->cache->tail_reach;
    const Cache tail = ref_tail(o->cache), *c = staged ? o->staging : newest ? &tail : o->cache;
    const int seq = staged ? 0 : seg->seq, slot = staged ? seg->first + j - len : j % c->slots;
    ref_kv_read(&c->v, ref_kv_row(c, &c->v, seq, head, slot), v);
    memcpy(k, v, (size_t)c->head_dim * sizeof *k);     // tied: K is V except for the values that RoPE rotates
    ref_kv_read(&c->k, ref_kv_row(c, &c->k, seq, head, slot), k);
    return c->n_rot ? kv_tied_factor(c->v.type) : 1;
}

// Attention of one head of one row; out (head_dim).
static void ref_attend_head(const Attend *o, int r, int h, float *out) {
    const Row *row = &o->batch->rows[r];
    const Segment *seg = &o->batch->segs[row->seg];
    const int len = o->batch->len[seg->seq], hd = o->cache->head_dim, g = h / (o->n_heads / o->cache->n_kv_heads);
    const float *q = o->q + ((size_t)r * o->n_heads + h) * hd;
    float k[REF_HEAD_DIM], v[REF_HEAD_DIM], in_order[REF_HEAD_DIM];
    double largest = -INFINITY, total = 0, sum[REF_HEAD_DIM] = { 0 };
    for (int pass = 0; pass < 2; pass++)               // the largest score, so that exp cannot overflow; then the sums
        for (int j = 0; j < len + seg->n; j++) {
            if (!ref_is_visible(o, row, seg, len, j)) continue;
            if (o->blocks && !ref_is_listed(o->blocks, r / SELECT_ROWS * o->cache->n_kv_heads + g, j)) continue;
            double score = 0;
            const double factor = ref_read_key(o, row, seg, len, j, g, k, v);
            for (int i = 0; i < hd; i++) score += (double)q[i] * k[i];
            score *= o->scale;
            if (pass == 0) largest = fmax(largest, score);
            if (pass == 0) continue;
            const double p = exp(score - largest);
            total += p;
            for (int i = 0; i < hd; i++) sum[i] += p * factor * v[i];
        }
    for (int i = 0; i < hd; i++) in_order[i] = total == 0 ? 0 : (float)(sum[i] / total);       // no visible key: 0
    if (kv_group(o->cache->v.type)) kv_rotate_rows_back(in_order, hd);
    for (int i = 0; i < hd; i++) out[i] = in_order[ref_tied_index(o->cache, i)];
}

static void ref_attend(const Attend *o) {
    const int hd = o->cache->head_dim;
    if (hd > REF_HEAD_DIM) ref_refuse("head_dim: expected at most 512", hd);
    if (o->store) ref_qkv_store(o->store);
    for (int r = 0; r < o->batch->n_rows; r++) {
        for (int h = 0; h < o->n_heads; h++) ref_attend_head(o, r, h, ref.out + (size_t)h * hd);
        ref_store(&o->out, r, o->n_heads * hd, ref.out);
    }
}

// A block of rows, which share their selected blocks of keys.
typedef struct {
    int seg, len;             // segment; committed positions of its session
    int pos, end;             // position of the first row; position after the last row
    int n;                    // visible blocks of keys
    bool all, of_prompt;      // the rows attend to all keys; they are rows of one prompt
} RefRowBlock;

static RefRowBlock ref_row_block(const BlockSelect *o, int first) {
    const Row *rows = o->batch->rows;
    const int last = (first + SELECT_ROWS < o->batch->n_rows ? first + SELECT_ROWS : o->batch->n_rows) - 1;
    const Segment *seg = &o->batch->segs[rows[first].seg];
    const int len = o->batch->len[seg->seq];
    const bool one = rows[last].seg == rows[first].seg, prompt = one && seg->n > STEP_ROWS;
    return (RefRowBlock){ rows[first].seg, len, len + rows[first].index, len + rows[last].index + 1,
                      (len + rows[last].index) / SELECT_KEYS + 1,
                      !prompt || rows[last].index >= seg->n - seg->n_dense, prompt };
}

// mean (head_dim) of the keys of a block, in the order of the cache.
static void ref_mean_key(const BlockSelect *o, int seq, int head, int block, float *mean) {
    const Cache *c = o->cache;
    double sum[REF_HEAD_DIM] = { 0 };
    float k[REF_HEAD_DIM];
    for (int slot = block * SELECT_KEYS; slot < (block + 1) * SELECT_KEYS; slot++) {
        ref_kv_read(&c->v, ref_kv_row(c, &c->v, seq, head, slot), k);
        ref_kv_read(&c->k, ref_kv_row(c, &c->k, seq, head, slot), k);
        for (int i = 0; i < c->head_dim; i++) sum[i] += k[i];
    }
    for (int i = 0; i < c->head_dim; i++) mean[i] = (float)(sum[i] / (int)SELECT_KEYS);
}

// s[h][n] of BlockSelect, for one block of rows and one block of keys.
static float ref_block_score(const BlockSelect *o, const RefRowBlock *v, int first, int h, int block,
                             const float *mean) {
    const int hd = o->cache->head_dim;
    double sum = 0, largest = -INFINITY;
    for (int pass = 0; pass < 2; pass++)
        for (int r = first; r < first + v->end - v->pos; r++) {
            const float *q = o->q + ((size_t)r * o->n_heads + h) * hd;
            double score = 0;
            if (v->pos + r - first < (block + 1) * SELECT_KEYS - 1) continue;
            for (int i = 0; i < hd; i++) score += (double)q[i] * mean[i];
            score *= o->scale;
            if (pass == 0) largest = fmax(largest, score);
            else sum += exp(score - largest);
        }
    return sum == 0 ? -INFINITY : (float)(largest + log(sum));
}

// Selects the blocks of keys of one block of rows and a KV head, from their weights w (v->n). Returns their number.
static int ref_select(const BlockSelect *o, const RefRowBlock *v, const float *w, int32_t *list) {
    const int near = v->pos / SELECT_KEYS - SELECT_NEAR + 1;
    int n = 0, room = (int)ceilf(o->density * (float)v->n);
    double largest = 0;
    for (int b = 0; b < v->n; b++) {
        largest = fmax(largest, w[b]);
        room -= b < SELECT_FIRST || b >= near;
    }
    for (int b = 0; b < v->n; b++) {
        bool listed = o->alpha >= 1 || w[b] >= o->alpha * largest;
        int before = 0;                                // blocks that rank above b
        for (int i = SELECT_FIRST; i < near && o->density > 0; i++) before += w[i] > w[b] || (w[i] == w[b] && i < b);
        if (o->density > 0) listed = before < room;
        if (listed || b < SELECT_FIRST || b >= near) list[n++] = b;
    }
    return n;
}

static void ref_block_select(const BlockSelect *o) {
    const Cache *c = o->cache;
    const int hd = c->head_dim, n_blocks = o->out.n_blocks, group = o->n_heads / c->n_kv_heads;
    float *means = (float *)o->means;
    for (int i = 0; i < o->batch->n_segs; i++) {
        const Segment *seg = &o->batch->segs[i];
        for (int g = 0; g < c->n_kv_heads; g++)
            for (int b = 0; (b + 1) * SELECT_KEYS <= o->batch->len[seg->seq] + seg->n; b++)
                ref_mean_key(o, seg->seq, g, b, means + (((size_t)i * c->n_kv_heads + g) * n_blocks + b) * hd);
    }
    for (int first = 0; first < o->batch->n_rows; first += SELECT_ROWS) {
        const RefRowBlock v = ref_row_block(o, first);
        for (int g = 0; g < c->n_kv_heads; g++) {
            const int list = first / SELECT_ROWS * c->n_kv_heads + g;
            const float *mean = means + ((size_t)v.seg * c->n_kv_heads + g) * n_blocks * hd;
            float *w = o->weights + (size_t)list * n_blocks;
            for (int b = 0; b < v.n && !v.all; b++) w[b] = 0;
            for (int h = g * group; h < (g + 1) * group && !v.all; h++) {
                float *s = o->scores + ((size_t)(first / SELECT_ROWS) * o->n_heads + h) * n_blocks;
                double largest = -INFINITY, sum = 0;
                for (int b = 0; b < v.n; b++) {
                    s[b] = ref_block_score(o, &v, first, h, b, mean + (size_t)b * hd);
                    largest = fmax(largest, s[b]);
                }
                for (int b = 0; b < v.n; b++) sum += exp(s[b] - largest);
                for (int b = 0; b < v.n && sum > 0; b++) w[b] = fmaxf(w[b], (float)(exp(s[b] - largest) / sum));
            }
            o->out.n[list] = v.all ? -1 : ref_select(o, &v, w, o->out.block + (size_t)list * n_blocks);
            o->count[0] += !v.of_prompt ? 0 : v.all ? v.n : o->out.n[list];
            o->count[1] += v.of_prompt ? v.n : 0;
        }
    }
}

static double ref_logsumexp(const float *z, int n) {
    double largest = -INFINITY, sum = 0;
    for (int i = 0; i < n; i++) largest = fmax(largest, z[i]);
    if (isinf(largest)) largest = 0;                   // all z -Inf, or one +Inf: the result is that Inf
    for (int i = 0; i < n; i++) sum += exp(z[i] - largest);
    return largest + log(sum);
}

static void ref_attn_mass(const AttnMass *o) {
    Cache codes = *o->cache;                           // without its tail
    codes.tail_slots = 0;
    const Cache *c = &codes;
    const int hd = c->head_dim;
    const Attend attend = { .batch = o->batch, .cache = c };
    float k[REF_HEAD_DIM], v[REF_HEAD_DIM];
    for (int r = 0; r < o->batch->n_rows; r++) {
        const Segment *seg = &o->batch->segs[o->batch->rows[r].seg];
        const int len = o->batch->len[seg->seq], n = len + o->batch->rows[r].index + 1;
        for (int h = 0; h < o->n_heads; h++) {
            const float *q = o->q + ((size_t)r * o->n_heads + h) * hd;
            float *probs = o->probs + ((size_t)r * o->n_heads + h) * o->n_keys, *mass = o->mass + (size_t)r * o->n_keys;
            for (int j = 0; j < n; j++) {
                double score = 0;
                ref_read_key(&attend, &o->batch->rows[r], seg, len, j, h / (o->n_heads / c->n_kv_heads), k, v);
                for (int i = 0; i < hd; i++) score += (double)q[i] * k[i];
                probs[j] = (float)(score * o->scale);
            }
            const double lse = ref_logsumexp(probs, n);
            for (int j = 0; j < n; j++) {
                probs[j] = (float)exp(probs[j] - lse);
                mass[j] = fmaxf(mass[j], probs[j]);
            }
        }
    }
}

// Copies one cached row of all heads.
static void ref_kv_move(const Cache *dst, int dst_seq, int dst_slot, const Cache *src, int src_seq, int src_slot) {
    for (int g = 0; g < dst->n_kv_heads; g++)
        for (int plane = 0; plane < 2; plane++) {
            const KvPlane *to = plane ? &dst->v : &dst->k, *from = plane ? &src->v : &src->k;
            const RefRow a = ref_kv_row(dst, to, dst_seq, g, dst_slot), b = ref_kv_row(src, from, src_seq, g, src_slot);
            memmove(a.data, b.data, kv_row_bytes(to->type, to->dim));
            if (to->scale) memmove(a.scales, b.scales, kv_scale_bytes(to->type, to->dim));
        }
}

static void ref_kv_commit(const KvCommit *o) {
    for (int i = 0; i < o->batch->n_segs; i++) {
        const Segment *seg = &o->batch->segs[i];
        int32_t *len = &o->batch->len[seg->seq];
        for (int k = 0; k < o->n_accept[i]; k++) {     // path[k] >= k, so a row is copied before it is overwritten
            const int from = seg->kind == SEG_TREE ? o->path[i * STEP_ROWS + k] : k;
            for (int l = 0; l < o->n_caches; l++) {
                const Cache *c = &o->caches[l];
                ref_kv_move(c, seg->seq, (*len + k) % c->slots, c, seg->seq, (*len + from) % c->slots);
                const Cache tail = ref_tail(c);
                if (tail.slots)
                    ref_kv_move(&tail, seg->seq, (*len + k) % tail.slots, &tail, seg->seq, (*len + from) % tail.slots);
            }
            const int token = ref_token(&o->batch->rows[seg->first + from], o->vocab);
            if (o->counts) o->counts[(size_t)seg->seq * o->vocab + token]++;
        }
        *len += o->n_accept[i];
    }
}

static void ref_kv_copy(const KvCopy *o) {
    for (int i = 0; i < o->batch->n_segs; i++) {
        const Segment *seg = &o->batch->segs[i];
        const int len = o->batch->len[seg->seq];
        for (int j = 0; j < seg->n; j++)               // ascending, so that each slot ends with its newest row
            ref_kv_move(o->cache, seg->seq, (len + j) % o->cache->slots, o->staging, 0, seg->first + j);
    }
}

// ==== [4] Images =====================================================================================================

static void ref_clamp(const Clamp *o) {
    for (size_t i = 0; i < (size_t)o->n_rows * o->cols; i++)
        o->out[i] = o->x[i] < o->range.lo ? o->range.lo : o->x[i] > o->range.hi ? o->range.hi : o->x[i];
}

static void ref_gelu_product(const GeluProduct *o) {
    for (size_t i = 0; i < (size_t)o->n_rows * o->cols; i++)
        o->out[i] = (float)(ref_activation(ACT_GELU, o->gate[i]) * o->up[i]);
}

static void ref_layer_norm(const LayerNorm *o) {
    const int n = o->cols;
    for (int r = 0; r < o->n_rows; r++) {
        double mean = 0, squares = 0;
        for (int i = 0; i < n; i++) {
            const size_t at = (size_t)r * n + i;
            ref.x[i] = (double)o->x[at] + (o->add ? o->add[i] : 0) + (o->add_rows ? o->add_rows[at] : 0);
            mean += ref.x[i] / n;
        }
        for (int i = 0; i < n; i++) squares += (ref.x[i] - mean) * (ref.x[i] - mean);
        for (int i = 0; i < n; i++)
            o->out[(size_t)r * n + i] =
                (float)(o->w[i] * (ref.x[i] - mean) / sqrt(squares / n + o->eps) + o->bias[i]);
    }
}

// Rotates the pairs (i, i + n) of a half of a head by their angles at a position.
static void ref_rope_half(double *u, int n, const double *inv_freq, int pos) {
    for (int i = 0; i < n; i++) {
        const double a = u[i], b = u[i + n], angle = pos * inv_freq[i];
        u[i] = a * cos(angle) - b * sin(angle);
        u[i + n] = b * cos(angle) + a * sin(angle);
    }
}

static void ref_rope_2d(const Rope2d *o) {
    const int hd = o->head_dim;
    double u[MAX_IMAGE_HEAD_DIM];
    for (int r = 0; r < o->n_rows; r++)
        for (int h = 0; h < o->n_heads; h++) {
            float *const heads[3] = { o->q, o->k, o->v };
            const float *const w[3] = { o->w_q, o->w_k, NULL };
            for (int k = 0; k < 3; k++) {
                float *head = heads[k] + ((size_t)r * o->n_heads + h) * hd;
                ref_load(u, head, hd);
                ref_norm(u, w[k], hd, o->eps);
                for (int axis = 0; axis < 2 && k < 2; axis++)
                    ref_rope_half(u + axis * hd / 2, hd / 4, o->inv_freq, o->pos[2 * r + axis]);
                ref_save(head, u, hd);
            }
        }
}

static double ref_dot(const float *a, const float *b, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += (double)a[i] * b[i];
    return sum;
}

static void ref_attend_all(const AttendAll *o) {
    const int hd = o->head_dim;
    const size_t stride = (size_t)o->n_heads * hd;
    for (int r = 0; r < o->n_rows; r++)
        for (int h = 0; h < o->n_heads; h++) {
            const float *q = o->q + r * stride + h * hd, *k = o->k + h * hd, *v = o->v + h * hd;
            double out[MAX_IMAGE_HEAD_DIM] = { 0 }, largest = -INFINITY, sum = 0;
            for (int j = 0; j < o->n_keys; j++) largest = fmax(largest, o->scale * ref_dot(q, k + j * stride, hd));
            for (int j = 0; j < o->n_keys; j++) {
                const double p = exp(o->scale * ref_dot(q, k + j * stride, hd) - largest);
                sum += p;
                for (int i = 0; i < hd; i++) out[i] += p * v[j * stride + i];
            }
            for (int i = 0; i < hd; i++) o->out[r * stride + h * hd + i] = (float)(out[i] / sum);
        }
}

static void ref_pool(const Pool *o) {
    const int side = o->side, cols = o->cols;
    for (int y = 0; y < o->h / side; y++)
        for (int x = 0; x < o->w / side; x++)
            for (int i = 0; i < cols; i++) {
                double sum = 0;
                for (int k = 0; k < side * side; k++)
                    sum += o->x[((size_t)(y * side + k / side) * o->w + x * side + k % side) * cols + i];
                const double v = o->factor * sum / (side * side);
                o->out[((size_t)y * (o->w / side) + x) * cols + i] =
                    (float)(o->sub ? (v - o->sub[i]) * o->mul[i] : v);
            }
}

// ==== [5] Output =====================================================================================================

// The other results of Head for row r with logits z (vocab): top_k and logsumexp.
static void ref_summary(const Head *o, int r, const float *z) {
    const int vocab = o->w->rows;
    if (o->top_k) ref_rank(z, vocab);
    for (int j = 0; j < o->top_k; j++) {
        o->top_ids[(size_t)r * o->top_k + j] = ref.tokens[j].id;
        o->top_logits[(size_t)r * o->top_k + j] = z[ref.tokens[j].id];
    }
    if (o->logsumexp) o->logsumexp[r] = (float)ref_logsumexp(z, vocab);
}

static void ref_head(const Head *o) {
    const int vocab = o->w->rows, cols = o->w->cols;
    for (int r = 0; r < o->n_rows; r++) {
        const Act y = ref_input(&o->in, r, cols);
        float *z = o->logits ? o->logits + (size_t)r * vocab : ref.logits;
        if (o->hidden) memcpy(o->hidden + (size_t)r * cols, y.f, (size_t)cols * sizeof(float));
        for (int i = 0; i < vocab; i++) {
            const double v = ref_product(o->w, 0, i, y);
            z[i] = (float)(o->cap > 0 ? o->cap * tanh(v / o->cap) : v);
        }
        ref_summary(o, r, z);
    }
}

// Replaces the n_used best centroids in ref.tokens by their tokens, `per` each, with logits.
static void ref_candidates(const HeadCentroid *o, Act y, int per) {
    for (int k = o->n_used - 1; k >= 0; k--) {         // backwards, so that no centroid is overwritten too early
        const int32_t *ids = o->order + (size_t)ref.tokens[k].id * per;
        for (int i = per - 1; i >= 0; i--)
            ref.tokens[k * per + i] = (RefToken){ .z = (float)ref_product(o->w, 0, ids[i], y), .id = ids[i] };
    }
}

static void ref_head_centroid(const HeadCentroid *o) {
    const int n_centroids = o->centroids->rows, per = o->w->rows / n_centroids, n = o->n_used * per, cols = o->w->cols;
    for (int r = 0; r < o->n_rows; r++) {
        const Act y = ref_input(&o->in, r, cols);
        float *scores = o->scores + (size_t)r * n_centroids, *z = o->logits + (size_t)r * n;
        if (o->hidden) memcpy(o->hidden + (size_t)r * cols, y.f, (size_t)cols * sizeof(float));
        for (int i = 0; i < n_centroids; i++) scores[i] = (float)ref_product(o->centroids, 0, i, y);
        ref_rank(scores, n_centroids);
        ref_candidates(o, y, per);
        for (int i = 0; i < n; i++) z[i] = ref.tokens[i].z;
        if (o->logsumexp) o->logsumexp[r] = (float)ref_logsumexp(z, n);
        for (int i = 0; i < n; i++)
            if (isnan(z[i])) ref.tokens[i].z = -INFINITY;
        qsort(ref.tokens, n, sizeof *ref.tokens, ref_compare);
        for (int j = 0; j < o->top_k; j++) {
            o->top_ids[(size_t)r * o->top_k + j] = ref.tokens[j].id;
            o->top_logits[(size_t)r * o->top_k + j] = ref.tokens[j].z;
        }
    }
}

static void ref_logprob(const Logprob *o) {
    for (int r = 0; r < o->n_rows; r++) {
        const float *z = o->logits + (size_t)r * o->vocab;
        const int32_t id = o->ids[r];
        o->out[r] = id < 0 || id >= o->vocab ? NAN : (float)(z[id] - ref_logsumexp(z, o->vocab));
    }
}

// How often a token occurs: in the committed text, and in the step in the row and its ancestors.
static int32_t ref_count(const Sample *o, const Row *row, int id) {
    const Segment *seg = &o->batch->segs[row->seg];
    int32_t n = o->counts[(size_t)seg->seq * o->vocab + id];
    for (int j = 0; j <= row->index; j++) {
        const bool on_path = seg->kind == SEG_CHAIN || row->ancestors >> j & 1;
        n += on_path && ref_token(&o->step_rows[seg->first + j], o->vocab) == id;
    }
    return n;
}

// The steps of Sample for row r. Returns the token or -1.
static int32_t ref_sample_row(const Sample *o, int r) {
    const Row *row = &o->batch->rows[r];
    const int seq = o->batch->segs[row->seg].seq, vocab = o->vocab;
    const SampleParams *p = &o->params[seq];
    const uint32_t *mask = o->mask ? o->mask + (size_t)r * ((vocab + 31) / 32) : NULL;
    RefToken *t = ref.tokens;
    int n = 0;
    for (int i = 0; i < vocab; i++) {                  // 1 to 3: mask, bias, penalties
        const bool allowed = !mask || mask[i / 32] >> (i % 32) & 1;
        const int32_t count = o->counts ? ref_count(o, row, i) : 0;
        float z = o->logits[(size_t)r * vocab + i];
        if (o->bias) z += o->bias[(size_t)seq * vocab + i];
        if (count > 0) z = sample_penalised(z, count, p);
        if (isnan(z)) return -1;
        if (allowed && z > -INFINITY) t[n++] = (RefToken){ .z = z, .id = i };
    }
    if (!n) return -1;
    qsort(t, n, sizeof *t, ref_compare);
    if (p->temperature <= 0) return t[0].id;           // 4: temperature
    for (int i = 0; i < n; i++) t[i].weight = sample_weight(t[i].z, t[0].z, 1.44269504f / p->temperature);
    if (p->top_k > 0 && p->top_k < n) n = p->top_k;    // 5: top-k

    uint64_t total = 0, before = 0;                    // 6: top-p
    for (int i = 0; i < n; i++) total += t[i].weight;
    for (int i = 0; i < n; before += t[i++].weight)
        if (i && before >= sample_share(total, p->top_p)) n = i;
    while (t[n - 1].weight < sample_share(SAMPLE_ONE, p->min_p)) n--;          // 7: min-p; the first weighs most

    total = 0;                                         // 8: draw
    for (int i = 0; i < n; i++) total += t[i].weight;
    const uint64_t drawn = sample_share(total, random_unit(p->seed, o->batch->len[seq] + row->depth));
    int i = 0;
    for (before = t[0].weight; before <= drawn; before += t[i].weight) i++;
    return t[i].id;
}

static void ref_sample(const Sample *o) {
    for (int r = 0; r < o->batch->n_rows; r++) o->out[r] = ref_sample_row(o, r);
}

// Index of the parent of a row in its segment; -1: it follows the committed text.
static int ref_parent(const Segment *seg, const Row *row) {
    int i = row->index - 1;
    while (seg->kind == SEG_TREE && i >= 0 && !(row->ancestors >> i & 1)) i--;
    return i;
}

static void ref_verify_walk(const VerifyWalk *o) {
    for (int i = 0; i < o->batch->n_segs; i++) {
        const Segment *seg = &o->batch->segs[i];
        int n = 0, first = 0, at = -1;                 // at: the last output row that was accepted
        while (first < o->n_out && o->out_rows[first].seg != i) first++;
        const int before = first < o->n_out ? o->out_rows[first].index : seg->n;
        for (; n < before; n++)
            if (seg->kind == SEG_TREE) o->path[i * STEP_ROWS + n] = n;
        for (int k = first; k < o->n_out; k++) {       // a parent comes before its children
            const Row *row = &o->out_rows[k];
            if (row->seg != i) continue;
            const bool follows = k == first || (ref_parent(seg, row) == o->out_rows[at].index && o->chosen[at] >= 0 &&
                                                o->batch->rows[seg->first + row->index].token == o->chosen[at]);
            if (!follows) continue;
            if (seg->kind == SEG_TREE) o->path[i * STEP_ROWS + n] = row->index;
            at = k;
            n++;
        }
        o->n_accept[i] = n;
        o->last[i] = at;
        o->next[i] = at < 0 ? 0 : o->chosen[at];
    }
}

// ==== [6] Run time, the table ========================================================================================

static void ref_memory(size_t *free_bytes, size_t *total) {            // all counts as free: the page cache can shrink
    *free_bytes = *total = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
}

static size_t ref_weight_bytes(const Tensor *w) {      // rows are read in place
    (void)w;
    return 0;
}

static void ref_upload(Tensor *w, void *dst) {
    (void)w;
    (void)dst;
}

static size_t ref_n_tokens(const Limits *lim) { return lim->vocab > REF_EXPERTS ? lim->vocab : REF_EXPERTS; }

static size_t ref_scratch_bytes(const Limits *lim) {
    const size_t of_cols = 2 * sizeof(double) + 3 * sizeof(float) + 1;
    return lim->max_cols * of_cols + (lim->max_cols / 32 + 1) * sizeof(float) + lim->vocab * sizeof(float) +
           ref_n_tokens(lim) * sizeof(RefToken);
}

static void *ref_alloc(void *old, size_t n, size_t size) {
    free(old);
    void *p = calloc(n ? n : 1, size);
    if (!p) ref_refuse("no memory for so many KiB", (int)(n * size / 1024));
    return p;
}

static void ref_init(const Limits *lim) {
    const size_t cols = (size_t)lim->max_cols;
    ref.x = (double *)ref_alloc(ref.x, cols, sizeof *ref.x);
    ref.d = (double *)ref_alloc(ref.d, cols, sizeof *ref.d);
    ref.y.f = (float *)ref_alloc(ref.y.f, cols, sizeof *ref.y.f);
    ref.y.q = (int8_t *)ref_alloc(ref.y.q, cols, sizeof *ref.y.q);
    ref.y.s = (float *)ref_alloc(ref.y.s, cols / 32 + 1, sizeof *ref.y.s);
    ref.w = (float *)ref_alloc(ref.w, cols, sizeof *ref.w);
    ref.out = (float *)ref_alloc(ref.out, cols, sizeof *ref.out);
    ref.logits = (float *)ref_alloc(ref.logits, lim->vocab, sizeof *ref.logits);
    ref.tokens = (RefToken *)ref_alloc(ref.tokens, ref_n_tokens(lim), sizeof *ref.tokens);
}

static void *ref_reserve(size_t bytes) {
    bytes = (bytes + 255) / 256 * 256;
    void *p = aligned_alloc(256, bytes ? bytes : 256);
    return p ? memset(p, 0, bytes) : NULL;
}

static void ref_release(void *p) { free(p); }
static void ref_copy(const Copy *c) { memcpy(c->dst, c->src, c->bytes); }

static bool ref_begin(StepKey key) {                   // true: this backend records no steps, so issue the operations
    (void)key;
    return true;
}

static void ref_end(void) {}
static void ref_wait(void) {}                          // an operation is finished when it returns

const Ops *reference_ops(void) {
    static const Ops ops = {
        .name = "reference", .on_host = true, .exact_prompts = true, .memory = ref_memory,
        .weight_bytes = ref_weight_bytes, .upload = ref_upload,
        .scratch_bytes = ref_scratch_bytes, .init = ref_init, .reserve = ref_reserve, .release = ref_release,
        .copy = ref_copy, .begin = ref_begin, .end = ref_end, .wait = ref_wait,
        .embed = ref_embed, .pair = ref_pair, .ple_rows = ref_ple_rows, .matmul = ref_matmul, .gate_up = ref_gate_up,
        .route = ref_route,
        .expert_gate_up = ref_expert_gate_up, .expert_down = ref_expert_down, .ple_inject = ref_ple_inject,
        .close = ref_close, .gather_rows = ref_gather_rows, .qkv_store = ref_qkv_store,
        .block_select = ref_block_select, .attn_mass = ref_attn_mass, .attend = ref_attend,
        .kv_commit = ref_kv_commit, .kv_copy = ref_kv_copy,
        .clamp = ref_clamp, .gelu_product = ref_gelu_product, .layer_norm = ref_layer_norm, .rope_2d = ref_rope_2d,
        .attend_all = ref_attend_all, .pool = ref_pool, .head = ref_head, .logprob = ref_logprob,
        .sample = ref_sample, .verify_walk = ref_verify_walk, .head_centroid = ref_head_centroid
    };
    return &ops;
}

#endif
