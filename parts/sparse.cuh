/* sparse.cuh - which keys matter: the choice of blocks of keys for sparse prompt attention (block_select), and the
 * attention that each key receives (attn_mass, for prompt compression). A part of gemma4_kernels.cu, which includes it
 * in its section [8].
 *
 * HOLDS        the two operations with their kernels, and key_listed(), with which attend_plain_kernel reads a list of
 * blocks
 * MAY USE      what precedes the include in gemma4_kernels.cu: the Flash tiles of [8], kv_read2 and kv_row of [7]
 * BEGIN        with cuda_block_select() at the end of [1] and cuda_attn_mass() at the end of [2]
 *   [1] Blocks of keys that a prompt attends to      [2] Attention that each key receives */
#ifndef SPARSE_CUH
#define SPARSE_CUH

// ==== [1] Blocks of keys that a prompt attends to ====================================================================

typedef struct {              // a block of rows
    int  seg, first, n;       // rows first .. first + n - 1 of the batch
    int  pos, n_blocks;       // position of the first row; blocks of keys that are visible
    bool all, of_prompt;      // the rows attend to all blocks; the segment is a prompt
} RowBlock;

__device__ static inline RowBlock row_block(const Batch &b, int number) {
    const int first = number * SELECT_ROWS, last = min(first + SELECT_ROWS, b.n_rows) - 1;
    const Row from = b.rows[first], to = b.rows[last];
    const Segment seg = b.segs[from.seg];
    const int len = b.len[seg.seq];
    const bool of_prompt = from.seg == to.seg && seg.n > STEP_ROWS;
    return (RowBlock){ from.seg, first, last - first + 1, len + from.index, (len + to.index) / SELECT_KEYS + 1,
                       !of_prompt || to.index >= seg.n - seg.n_dense, of_prompt };
}

// block_mean: the mean of the rows of K of a block of keys, as halves.
//   shapes    means (n_segs, n_kv_heads, n_blocks, head_dim) halves; head_dim <= 512, even
//   launch    grid (n_blocks, n_kv_heads, n_segs), block 256: two values a thread; incomplete blocks are skipped
//   traffic   reads K once (tied: V, which is K except for the dims with RoPE)
//   numerics  f32, keys ascending
//   see       ref_mean_key in parts/reference.h
__global__ void block_mean_kernel(Batch b, Cache c, int n_blocks, __half *means) {
    wait_for_previous_kernel();
    const Segment seg = b.segs[blockIdx.z];
    const int i = 2 * threadIdx.x, slot = blockIdx.x * SELECT_KEYS, g = blockIdx.y;
    if (slot + SELECT_KEYS > b.len[seg.seq] + seg.n || i >= c.head_dim) return;
    const KvPlane &p = i < c.k.dim ? c.k : c.v;
    float2 sum = make_float2(0, 0);
#pragma unroll 8
    for (int k = 0; k < SELECT_KEYS; k++) {
        const float2 x = kv_read2(p.type, kv_row(c, p, seg.seq, g, slot + k), kv_scales(c, p, seg.seq, g, slot + k), i);
        sum.x += x.x, sum.y += x.y;
    }
    const size_t row = ((size_t)blockIdx.z * c.n_kv_heads + g) * n_blocks + blockIdx.x;
    *(__half2 *)(means + row * c.head_dim + i) = __floats2half2_rn(sum.x / SELECT_KEYS, sum.y / SELECT_KEYS);
}

typedef Flash<512, 32> ScoreShape;                     // here a line is a row, and a key is the mean of a block
enum { SCORE_BLOCKS = 32,                              // blocks of a tile
       SCORE_GROUPS = SELECT_ROWS / 8,                 // a warp has the scores of 8 rows
       SCORE_BYTES = SCORE_BLOCKS * 512 * 2 + ScoreShape::EXCHANGE_BYTES + SCORE_GROUPS * SCORE_BLOCKS * 8 };
static_assert((int)SELECT_ROWS == (int)FLASH_LINES, "rows of a block");

// For each of the 8 blocks of a thread: the maximum of the scores of 8 rows, and the sum of exp(score - maximum).
// s: of row `line`. stats (SCORE_BLOCKS) of these rows; j0: first block of the thread
__device__ static inline void score_stats(const float (&s)[4][4], const RowBlock &v, float scale, int line, int j0,
                                          float2 *stats) {
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const int at = n / 2 * 8 + n % 2;
        const int sees_all = (j0 + at + 1) * SELECT_KEYS - 1 - v.pos;  // the first row that sees the whole block
        const float x = line >= sees_all && line < v.n ? s[n / 2][n % 2] * scale : -INFINITY;
        float most = x;
        for (int h = 4; h < 32; h *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, h));
        float sum = x == -INFINITY ? 0 : expf(x - most);
        for (int h = 4; h < 32; h *= 2) sum += __shfl_xor_sync(~0u, sum, h);
        if (threadIdx.x % 32 < 4) stats[at] = make_float2(most, sum);
    }
}

// block_score: s of BlockSelect for one block of rows and one head.
//   shapes    q (n_rows, n_heads, head_dim), means from block_mean, scores (row blocks, n_heads, n_blocks)
//   launch    grid (row blocks, n_heads), block ScoreShape::THREADS, dynamic shared memory SCORE_BYTES
//   traffic   q once; the means of visible blocks once for 64 rows, mostly from L2: 1 / SELECT_KEYS of attention's K
//   numerics  q in f16, scores on tensor cores with f32 sums; exp in f32
//   see       ref_block_score in parts/reference.h
__global__ void __launch_bounds__(ScoreShape::THREADS, 1) block_score_kernel(BlockSelect o, Batch b, Cache c) {
    wait_for_previous_kernel();
    const ScoreShape f;
    const RowBlock v = row_block(b, blockIdx.x);
    if (v.all) return;
    const Segment seg = b.segs[v.seg];
    const int hd = c.head_dim, h = blockIdx.y, whole = (b.len[seg.seq] + seg.n) / SELECT_KEYS;
    __half *k = (__half *)shared_bytes;  // (SCORE_BLOCKS, 512), zeros after the last dim and after the last block
    char *exchange = (char *)(k + SCORE_BLOCKS * 512);
    float2 *stats = (float2 *)(exchange + ScoreShape::EXCHANGE_BYTES);       // (SCORE_GROUPS, SCORE_BLOCKS)
    const float *from = o.q + ((size_t)v.first * o.n_heads + h) * hd;
    const size_t row = ((size_t)v.seg * c.n_kv_heads + h / (o.n_heads / c.n_kv_heads)) * o.out.n_blocks;
    const __half *mean = (const __half *)o.means + row * hd;
    const int line = f.line0 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    const float *const lines[2] = { line < v.n ? from + (size_t)line * o.n_heads * hd : NULL,
                                    line + 8 < v.n ? from + (size_t)(line + 8) * o.n_heads * hd : NULL };
    unsigned own_q[FLASH_QUERIES][4];
    flash_own_queries(lines, f.half, hd, own_q);
    for (int j0 = 0; j0 < v.n_blocks; j0 += SCORE_BLOCKS) {
        for (int i = threadIdx.x; i < SCORE_BLOCKS * 64; i += ScoreShape::THREADS) {
            const int block = i / 64, at = i % 64 * 8;
            *(uint4 *)(k + flash_place(block, at / 8, 512)) = block < whole - j0 && at < hd
                ? *(const uint4 *)(mean + (size_t)(j0 + block) * hd + at) : make_uint4(0, 0, 0, 0);
        }
        __syncthreads();                               // means are there
        float s[1][4][4] = { };
#pragma unroll
        for (int d = 0; d < 256; d += 64) {
            auto own = [&](int, int e, unsigned r[4]) {
#pragma unroll
                for (int i = 0; i < 4; i++) r[i] = own_q[(d + e) / 16][i];
            };
            flash_scores(s, k + f.half * 256 + d, 512, own);
        }
        flash_send_half(f, s, exchange);
        __syncthreads();                               // all scores are there
        flash_add_half(f, s, exchange);
        score_stats(s[0], v, o.scale, f.line(0), j0 + column, stats + (f.tile * 2 + f.half) * SCORE_BLOCKS + column);
        __syncthreads();                               // stats are there
        if (threadIdx.x < SCORE_BLOCKS && j0 + (int)threadIdx.x < v.n_blocks) {
            float most = -INFINITY, sum = 0;
            for (int i = 0; i < SCORE_GROUPS; i++) most = fmaxf(most, stats[i * SCORE_BLOCKS + threadIdx.x].x);
            for (int i = 0; i < SCORE_GROUPS; i++) {
                const float2 x = stats[i * SCORE_BLOCKS + threadIdx.x];
                sum += x.y == 0 ? 0 : x.y * expf(x.x - most);
            }
            o.scores[((size_t)blockIdx.x * o.n_heads + h) * o.out.n_blocks + j0 + threadIdx.x] = most + logf(sum);
        }
    }
}

// The smallest weight >= 0 that at most `most` of w (n) exceed. All lanes of a warp.
__device__ static inline float weight_of_rank(const float *w, int n, int most) {
    unsigned low = 0, high = 0x7f800000u;  // the bits of floats from 0 to infinity have the order of the floats
    while (low < high) {
        const unsigned mid = low + (high - low) / 2;
        int above = 0;
        for (int i = threadIdx.x % 32; i < n; i += 32) above += w[i] > __uint_as_float(mid);
        if (__reduce_add_sync(~0u, above) > most) low = mid + 1;
        else high = mid;
    }
    return __uint_as_float(low);
}

// block_list: weights and lists of one block of rows and one KV head, and how many blocks these list.
//   shapes    scores (row blocks, n_heads, n_blocks); weights and lists as in BlockSelect
//   launch    grid (row blocks, n_kv_heads), block 256: a warp adds up a head, the first warp makes the list
//   traffic   reads the scores three times, mostly from L2, writes weights and lists once
//   numerics  f32; the weight of a block is the maximum over the heads of its softmax share
//   see       ref_select in parts/reference.h
enum { MAX_GROUP = 64 };
__global__ void block_list_kernel(BlockSelect o, Batch b, int n_kv_heads) {
    wait_for_previous_kernel();
    __shared__ float2 sums[MAX_GROUP];                 // of a head: maximum, 1 / sum of exp(score - maximum)
    const RowBlock v = row_block(b, blockIdx.x);
    const int lane = threadIdx.x % 32, group = o.n_heads / n_kv_heads, list = blockIdx.x * n_kv_heads + blockIdx.y;
    const int near = max(v.pos / SELECT_KEYS - SELECT_NEAR + 1, 0), n_blocks = o.out.n_blocks;
    const float *scores = o.scores + (size_t)list * group * n_blocks;
    float *w = o.weights + (size_t)list * n_blocks, largest = 0;
    int32_t *out = o.out.block + (size_t)list * n_blocks;
    int n = v.all ? v.n_blocks : 0;
    for (int h = threadIdx.x / 32; h < group && !v.all; h += 8) {
        const float *s = scores + (size_t)h * n_blocks;
        float top = -INFINITY, sum = 0;
        for (int i = lane; i < v.n_blocks; i += 32) top = fmaxf(top, s[i]);
        top = warp_max(top);
        for (int i = lane; i < v.n_blocks && top > -INFINITY; i += 32) sum += expf(s[i] - top);
        sum = warp_sum(sum);
        if (lane == 0) sums[h] = make_float2(top, sum > 0 ? 1 / sum : 0);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < v.n_blocks && !v.all; i += 256) {
        float most = 0;
        for (int h = 0; h < group; h++)
            if (sums[h].y > 0) most = fmaxf(most, expf(scores[(size_t)h * n_blocks + i] - sums[h].x) * sums[h].y);
        w[i] = most;
    }
    __syncthreads();                                   // weights are there
    if (threadIdx.x >= 32) return;
    for (int i = lane; i < v.n_blocks && !v.all; i += 32) largest = fmaxf(largest, w[i]);
    largest = warp_max(largest);
    const bool ranked = o.density > 0;
    const int n_ranked = max(near - SELECT_FIRST, 0);
    int room = (int)ceilf(o.density * (float)v.n_blocks) - min(v.n_blocks, v.n_blocks - near + SELECT_FIRST), above = 0;
    const float edge = v.all ? 0 : ranked ? weight_of_rank(w + SELECT_FIRST, n_ranked, max(room, 0))
                                          : o.alpha * largest;
    for (int i = lane; i < n_ranked && ranked && !v.all; i += 32) above += w[SELECT_FIRST + i] > edge;
    room -= __reduce_add_sync(~0u, above);             // left for blocks whose weight equals edge
    for (int first = 0; first < v.n_blocks && !v.all; first += 32) {
        const int i = first + lane;
        const bool here = i < v.n_blocks, always = i < SELECT_FIRST || i >= near;
        const float weight = here ? w[i] : 0;
        const unsigned ties = __ballot_sync(~0u, here && ranked && !always && weight == edge);
        const unsigned before = (1u << lane) - 1;
        const bool heavy = ranked ? weight > edge || (weight == edge && __popc(ties & before) < room)
                                  : o.alpha >= 1 || weight >= edge;
        const unsigned kept = __ballot_sync(~0u, here && (always || heavy));
        if (kept >> lane & 1) out[n + __popc(kept & before)] = i;
        n += __popc(kept);
        room -= __popc(ties);
    }
    if (lane) return;
    o.out.n[list] = v.all ? -1 : n;
    if (!v.of_prompt) return;
    atomicAdd((unsigned long long *)&o.count[0], (unsigned long long)n);
    atomicAdd((unsigned long long *)&o.count[1], (unsigned long long)v.n_blocks);
}
static void cuda_block_select(const BlockSelect *o) {
    const Cache *c = o->cache;
    const Batch *b = o->batch;
    const int blocks = div_up(b->n_rows, SELECT_ROWS);
    if (c->head_dim > 512 || c->head_dim % 8 || o->n_heads / c->n_kv_heads > MAX_GROUP)
        cuda_die("block_select: %d heads of %d values are not supported", o->n_heads, c->head_dim);
    launch(WRITES_ACTIVATIONS, block_mean_kernel, dim3(o->out.n_blocks, c->n_kv_heads, b->n_segs), 256, 0, *b, *c,
           o->out.n_blocks, (__half *)o->means);
    report_plan("block_score", dim3(blocks, o->n_heads), ScoreShape::THREADS, SCORE_BYTES, 0, "tiles of %d blocks",
                SCORE_BLOCKS);
    launch(WRITES_ACTIVATIONS, block_score_kernel, dim3(blocks, o->n_heads), ScoreShape::THREADS, SCORE_BYTES, *o, *b,
           *c);
    launch(WRITES_ACTIVATIONS, block_list_kernel, dim3(blocks, c->n_kv_heads), 256, 0, *o, *b, c->n_kv_heads);
    CHECK_LAUNCH("block_select n_rows=%d n_heads=%d head_dim=%d", b->n_rows, o->n_heads, c->head_dim);
}

// ==== [2] Attention that each key receives ===========================================================================

// mass_scores: scale * q . k of some rows and all visible keys.
//   shapes    AttnMass; head_dim <= 512, even; probs (n_rows, n_heads, n_keys)
//   launch    grid (slots / MASS_KEYS, n_kv_heads, n_segs), block 256: a warp for each key, all rows and heads that
//             read it
//   traffic   reads K once (tied: V, which is K except for the dims with RoPE); q comes from L2 for each key
//   numerics  f32
//   see       ref_attn_mass in parts/reference.h
enum { MASS_KEYS = 64 };
__global__ void mass_scores_kernel(AttnMass o, Batch b, Cache c) {
    wait_for_previous_kernel();
    const Segment seg = b.segs[blockIdx.z];
    const int lane = threadIdx.x % 32, len = b.len[seg.seq], g = blockIdx.y, group = o.n_heads / c.n_kv_heads;
    const int end = min((int)(blockIdx.x + 1) * MASS_KEYS, len + seg.n);
    for (int j = blockIdx.x * MASS_KEYS + threadIdx.x / 32; j < end; j += 8) {
        float2 k[8];                                   // values 2 * lane + 64 * i and 2 * lane + 64 * i + 1 of the key
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int d = 2 * lane + 64 * i;
            const KvPlane &p = d < c.k.dim ? c.k : c.v;
            k[i] = d < c.head_dim ? kv_read2(p.type, kv_row(c, p, seg.seq, g, j), kv_scales(c, p, seg.seq, g, j), d)
                                  : make_float2(0, 0);
        }
        for (int q = max(j - len, 0) * group; q < seg.n * group; q++) {
            const size_t head = (size_t)(seg.first + q / group) * o.n_heads + g * group + q % group;
            const float *x = o.q + head * c.head_dim + 2 * lane;
            float sum = 0;
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (2 * lane + 64 * i < c.head_dim) sum += x[64 * i] * k[i].x + x[64 * i + 1] * k[i].y;
            sum = warp_sum(sum);
            if (lane == 0) o.probs[head * o.n_keys + j] = sum * o.scale;
        }
    }
}

// mass_softmax: softmax of the scores of a row and head, in place.
//   shapes    probs (n_rows, n_heads, n_keys)
//   launch    grid (n_heads, n_rows), block 256
//   traffic   reads and writes the scores three times, mostly in L2
//   numerics  f32; sums over the lanes, then over 8 warps
//   see       ref_attn_mass in parts/reference.h
__global__ void mass_softmax_kernel(AttnMass o, Batch b) {
    wait_for_previous_kernel();
    __shared__ float tops[8], sums[8];
    const Row row = b.rows[blockIdx.y];
    const int n = b.len[b.segs[row.seg].seq] + row.index + 1;
    float *s = o.probs + ((size_t)blockIdx.y * o.n_heads + blockIdx.x) * o.n_keys, top = -INFINITY, sum = 0;
    for (int j = threadIdx.x; j < n; j += 256) top = fmaxf(top, s[j]);
    top = warp_max(top);
    if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = top;
    __syncthreads();                                   // maxima are there
    for (int i = 0; i < 8; i++) top = fmaxf(top, tops[i]);
    for (int j = threadIdx.x; j < n; j += 256) sum += expf(s[j] - top);
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();                                   // sums are there
    sum = 0;
    for (int i = 0; i < 8; i++) sum += sums[i];
    for (int j = threadIdx.x; j < n; j += 256) s[j] = expf(s[j] - top) / sum;
}

// mass_max: mass = max(mass, the largest softmax share of the heads).
//   shapes    probs (n_rows, n_heads, n_keys), mass (n_rows, n_keys)
//   launch    grid (n_keys / 256, n_rows), block 256: a thread for each key
//   traffic   reads the probabilities of all heads, reads and writes mass once
//   numerics  exact
//   see       ref_attn_mass in parts/reference.h
__global__ void mass_max_kernel(AttnMass o, Batch b) {
    wait_for_previous_kernel();
    const Row row = b.rows[blockIdx.y];
    const int j = blockIdx.x * 256 + threadIdx.x;
    if (j > b.len[b.segs[row.seg].seq] + row.index) return;
    float *mass = o.mass + (size_t)blockIdx.y * o.n_keys + j, most = *mass;
    for (int h = 0; h < o.n_heads; h++)
        most = fmaxf(most, o.probs[((size_t)blockIdx.y * o.n_heads + h) * o.n_keys + j]);
    *mass = most;
}
static void cuda_attn_mass(const AttnMass *o) {
    const Cache *c = o->cache;
    const Batch *b = o->batch;
    if (c->head_dim > 512 || c->head_dim % 2) cuda_die("attn_mass: a head of %d values is not supported", c->head_dim);
    launch(WRITES_ACTIVATIONS, mass_scores_kernel, dim3(div_up(c->slots, MASS_KEYS), c->n_kv_heads, b->n_segs), 256, 0,
           *o, *b, *c);
    launch(WRITES_ACTIVATIONS, mass_softmax_kernel, dim3(o->n_heads, b->n_rows), 256, 0, *o, *b);
    launch(WRITES_ACTIVATIONS, mass_max_kernel, dim3(div_up(o->n_keys, 256), b->n_rows), 256, 0, *o, *b);
    CHECK_LAUNCH("attn_mass n_rows=%d n_heads=%d head_dim=%d", b->n_rows, o->n_heads, c->head_dim);
}

// Is key j in a listed block?
__device__ static inline bool key_listed(const BlockList &blocks, int list, int j) {
    const int32_t *block = blocks.block + (size_t)list * blocks.n_blocks, n = blocks.n[list];
    int low = 0, high = n;
    while (low < high) {                               // finds the first listed block that is not before the block of j
        const int mid = (low + high) / 2;
        if (block[mid] < j / SELECT_KEYS) low = mid + 1;
        else high = mid;
    }
    return n < 0 || (low < n && block[low] == j / SELECT_KEYS);
}

#endif
