/* sample.cuh - what happens to logits: the output head, top-k, sampling, verification of drafts. A part of
 * gemma4_kernels.cu, which includes it in its section [9].
 *
 * HOLDS        the operations sample, verify_walk, logprob, head and head_centroid with their kernels
 * MAY USE      sections [1] to [5] of gemma4_kernels.cu: launch(), block helpers, launch_jobs() for the head's product
 * BEGIN        with sample_kernel in [4]; summary_kernel in [6] finds top-k and logsumexp with the same helpers
 *   [1] Keys, strips, shared memory           [5] Drafts
 *   [2] Helpers of a block, top-k             [6] Top logits and logsumexp: head, logprob
 *   [3] Sums over bins of keys                [7] Head of centroids
 *   [4] Sampling */
#ifndef SAMPLE_CUH
#define SAMPLE_CUH

// ==== [1] Keys, strips, shared memory ================================================================================
// The tokens of a row are ordered by a key of 64 bits: logit descending, then id ascending. No two keys are equal; 0 is
// below all.
//
// A row is divided among many blocks. For each strip of STRIP tokens (one load of a warp) they store the best key. The
// last block of a row to finish reads these keys and completes the row. The k best tokens lie in the k strips with the
// best keys, so it reads few tokens again: with k = 64 some 80 of 2048 strips, of which little more than k tokens go to
// a list. If top_k is off, the token may be anywhere: sums over bins tell in which bin, and the tokens of that bin fit
// the list.
//
// Comparisons and weights are exact integers, so the number of blocks does not matter. Sums of exp() round: they are
// computed for each strip, then over the strips in a fixed order.

enum { SAMPLE_THREADS = 512, SAMPLE_WARPS = SAMPLE_THREADS / 32,
       STRIP = 128,                            // tokens; four for each lane
       ROUND = 2 * SAMPLE_WARPS,               // strips that a block reads at a time, two for each warp
       BLOCKS_OF_SM = 2,                       // that an SM holds at once
       BIN_BITS = 11, LIST_BITS = 10,
       BINS = 1 << BIN_BITS, LIST = 1 << LIST_BITS,
       SAMPLE_SHARED = (BINS + LIST) * 8 };    // bytes

typedef unsigned long long u64;

#define COLD __attribute__((noinline))         // code that most launches do not run

__device__ static inline u64 token_key(float z, int id) {
    return (u64)ordered_bits(z) << 32 | (unsigned)~id;
}
__device__ static inline int key_id(u64 key) { return (int)~(unsigned)key; }
__device__ static inline float key_logit(u64 key) { return from_ordered_bits((unsigned)(key >> 32)); }

typedef struct {              // what the blocks of a launch leave for the last block of each row
    u64    *strip;            // (n_rows, n_strips) the best key of a strip; 0: no token of it is allowed
    double *sum;              // (n_rows, n_strips) sum of exp(z - best) of a strip
    float  *z;                // (n_rows, stride) logits with bias and penalties
    int     n_strips, stride;
    int     per_block;        // strips, a multiple of ROUND
} Spread;

typedef struct {              // the tokens of one row
    const float *z;
    const uint32_t *mask;     // NULL: all tokens are allowed
    const u64 *strip;         // of Spread; only the last block reads it
    int vocab, n_strips;
    bool head;                // for summary_kernel: NaN counts as -Inf, no token is excluded
    const int32_t *ids;       // ids of the tokens; NULL: their numbers
} TokenRow;

typedef struct {              // four tokens
    float4   z;
    unsigned in;              // bit j: token j exists and is allowed
} FourTokens;

__device__ static inline float4 four_values(const float *row, int i, int n) {          // 0 after n
    if (i + 4 <= n && (size_t)row % 16 == 0) return *(const float4 *)(row + i);
    return make_float4(i < n ? row[i] : 0, i + 1 < n ? row[i + 1] : 0, i + 2 < n ? row[i + 2] : 0,
                       i + 3 < n ? row[i + 3] : 0);
}

// Tokens i .. i + 3, i a multiple of 4.
__device__ static inline FourTokens four_tokens(const TokenRow &t, int i) {
    FourTokens v = { four_values(t.z, i, t.vocab), i < t.vocab ? 15u >> max(i + 4 - t.vocab, 0) : 0 };
    if (t.mask && v.in) v.in &= t.mask[i / 32] >> (i % 32);
    return v;
}

__device__ static inline u64 key_of(const TokenRow &t, float z, bool in, int id) {
    if (t.head && z != z) z = -INFINITY;
    return in && (t.head || z > -INFINITY) ? token_key(z, t.ids ? t.ids[id] : id) : 0;
}

// ==== [2] Helpers of a block, top-k ==================================================================================
// Shared memory of a block: the sums of the first bins; then a list of keys, or the sums of further bins.
__device__ static inline u64 *bin_words(void) { return (u64 *)shared_bytes; }      // (BINS)
__device__ static inline u64 *key_list(void) { return (u64 *)shared_bytes + BINS; }            // (LIST)

__device__ static inline u64 warp_best(u64 key) {
    const unsigned high = __reduce_max_sync(~0u, (unsigned)(key >> 32));
    return (u64)high << 32 | __reduce_max_sync(~0u, (unsigned)(key >> 32) == high ? (unsigned)key : 0);
}

// The best key of the block, for all threads; needs SAMPLE_THREADS of them, like the functions below.
__device__ static u64 block_best(u64 key) {
    __shared__ u64 part[SAMPLE_WARPS];
    key = warp_best(key);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = key;
    __syncthreads();
    key = warp_best(part[threadIdx.x % SAMPLE_WARPS]);
    __syncthreads();                                   // read before the next call writes
    return key;
}

// The sum of v over the threads before this one; *total: over all threads.
__device__ static u64 sum_before(u64 v, u64 *total) {
    __shared__ u64 part[SAMPLE_WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u64 upto = v, before = 0;
    for (int h = 1; h < 32; h *= 2) {
        const u64 left = __shfl_up_sync(~0u, upto, h);
        if (lane >= h) upto += left;
    }
    if (lane == 31) part[warp] = upto;
    __syncthreads();
    *total = 0;
    for (int i = 0; i < SAMPLE_WARPS; i++) {
        if (i == warp) before = *total;
        *total += part[i];
    }
    __syncthreads();                                   // read before the next call writes
    return before + upto - v;
}

// Is this the last block of its row, for all threads? Then it can read what the others wrote. *any: `some` was true in
// any thread of any block of the row.
__device__ static unsigned blocks_done[STEP_ROWS];     // of each row; 0 between launches

__device__ static bool last_of_row(bool some, bool *any) {
    __shared__ unsigned done;
    const int mine = __syncthreads_or(some);           // all threads of this block have written
    if (threadIdx.x == 0) {
        __threadfence();                               // publish, then count
        done = atomicAdd(&blocks_done[blockIdx.y], mine ? 0x10001u : 1u) + (mine ? 0x10001u : 1u);
        __threadfence();                               // count, then read what others wrote
        if (done % 0x10000 == gridDim.x) blocks_done[blockIdx.y] = 0;
    }
    __syncthreads();
    *any = done >= 0x10000;
    return done % 0x10000 == gridDim.x;
}

// ---- the best tokens of a row ----

// Calls use(key) for all tokens of the strips whose best key is at least `from` (> 0), by whole warps; key 0: not
// allowed.
template <typename Use> __device__ static inline void each_token(const TokenRow &t, u64 from, Use use) {
    enum { AHEAD = 4 };                                // strips that a warp loads at once
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // four consecutive strips for a warp, the next four for the next warp
    for (int first = 4 * warp; first < t.n_strips; first += SAMPLE_THREADS) {
        const int mine = first + lane / 4 * 4 * SAMPLE_WARPS + lane % 4;
        unsigned left = __ballot_sync(~0u, mine < t.n_strips && t.strip[mine] >= from);
        while (left) {
            FourTokens v[AHEAD];
            int at[AHEAD];
#pragma unroll
            for (int u = 0; u < AHEAD; u++) {
                const int l = __ffs(left) - 1;         // the lane that found this strip
                at[u] = left ? (first + l / 4 * 4 * SAMPLE_WARPS + l % 4) * STRIP + 4 * lane : -1;
                left &= left - 1;
                if (at[u] >= 0) v[u] = four_tokens(t, at[u]);
            }
#pragma unroll
            for (int u = 0; u < AHEAD; u++) {
                if (at[u] < 0) break;
                use(key_of(t, v[u].z.x, v[u].in & 1, at[u]));
                use(key_of(t, v[u].z.y, v[u].in & 2, at[u] + 1));
                use(key_of(t, v[u].z.z, v[u].in & 4, at[u] + 2));
                use(key_of(t, v[u].z.w, v[u].in & 8, at[u] + 3));
            }
        }
    }
}

// Collects the keys from .. to in the list, in any order; returns their number, which may be more than the list holds.
// *best: the best key that this thread saw.
__device__ static int gather(const TokenRow &t, u64 from, u64 to, u64 *best) {
    __shared__ int n;
    u64 *list = key_list(), most = 0;
    __syncthreads();                                   // the list is free
    if (threadIdx.x == 0) n = 0;
    __syncthreads();
    each_token(t, from, [&](u64 key) {
        most = max(most, key);
        if (key < from || key > to) return;
        const int at = atomicAdd(&n, 1);
        if (at < LIST) list[at] = key;
    });
    *best = most;
    __syncthreads();
    return n;
}

// A key that at least k of the threads' keys reach, and not many more; 1 if fewer than k of them are not 0. top: the
// best key.
__device__ static u64 bound_of(u64 key, int k, u64 top) {
    u64 low = 1, high = top;                           // the bound
    int n = __syncthreads_count(key >= low);
    while (low < high && n > k + k / 4) {
        const u64 middle = high - (high - low) / 2;
        const int above = __syncthreads_count(key >= middle);
        if (above < k) high = middle - 1;
        else low = middle, n = above;
    }
    return low;
}

// Sorts the first n keys of the list, descending. The place of a key is the number of larger keys. n <= LIST.
__device__ static void sort_list(int n) {
    u64 *list = key_list();
    const int i = threadIdx.x, j = i + SAMPLE_THREADS;
    const u64 a = i < n ? list[i] : 0, b = j < n ? list[j] : 0;
    int a_place = 0, b_place = 0;
    for (int other = 0; other < n && i < n; other++) a_place += list[other] > a;
    for (int other = 0; other < n && j < n; other++) b_place += list[other] > b;
    __syncthreads();
    if (i < n) list[a_place] = a;
    if (j < n) list[b_place] = b;
    __syncthreads();
}

// ==== [3] Sums over bins of keys =====================================================================================
// The tokens of a row are divided into BINS bins by their distance from the best logit. The tokens of a bin with too
// many are divided into LIST bins by their keys, and so on until the rest fits the list. The first bins have sums of
// their own; all later ones use the memory of the list.

typedef struct {
    float largest, scale;     // as in sample_weight
    bool  count;              // every token weighs 1, to count tokens
} Weighing;

__device__ static inline u64 weight_of(const Weighing &w, u64 key) {
    return w.count ? 1 : sample_weight(key_logit(key), w.largest, w.scale);
}

// Does not fall when the logit falls. Tokens more than 40 halvings below the best weigh nothing and share the last bin.
__device__ static inline int first_bin(const Weighing &w, u64 key) {
    const float z = key_logit(key), halvings = z == w.largest ? 0 : (w.largest - z) * w.scale;
    return halvings < 40 ? min((int)(halvings * (BINS / 40.0f)), BINS - 1) : BINS - 1;
}

// The smallest key, up to top, whose logit `holds`. It holds for top, and for every larger logit than one for which it
// holds.
template <typename Holds> __device__ static inline u64 least_key(u64 top, Holds holds) {
    unsigned low = 0x00800000u, high = (unsigned)(top >> 32);  // from the smallest normal float; it holds for `high`
    while (low < high) {                               // each round tests 32 places
        const unsigned step = (high - low) / 32 + 1, at = min(high - low, threadIdx.x % 32 * step) + low;
        const unsigned held = __ballot_sync(~0u, holds((u64)at << 32));
        const int first = held ? __ffs(held) - 1 : 32;
        if (first < 32) high = min(high - low, first * step) + low;
        if (first > 0) low = min(high, low + (first - 1) * step + 1);
    }
    return (u64)high << 32;
}

__device__ static inline unsigned *low_words(int bits) {
    return (unsigned *)(bits == BIN_BITS ? bin_words() : key_list());
}
__device__ static inline unsigned *high_words(int bits) { return low_words(bits) + (1 << bits); }
__device__ static inline u64 bin_sum(int bits, int i) { return (u64)high_words(bits)[i] << 32 | low_words(bits)[i]; }

// Adds a weight of 64 bits; atomics in shared memory add 32 bits.
__device__ static inline void add_to_bin(int bits, int i, u64 weight) {
    const unsigned low = (unsigned)weight, before = atomicAdd(low_words(bits) + i, low);
    const unsigned high = (unsigned)(weight >> 32) + (before + low < low);
    if (high) atomicAdd(high_words(bits) + i, high);
}

// Bins of LIST_BITS for the keys from .. to: bin i has the keys that are (i << shift) .. (i + 1 << shift) - 1 below
// `to`.
__device__ static inline int bin_shift(u64 from, u64 to) {
    return max(0, 64 - __clzll((long long)(to - from)) - LIST_BITS);
}

// Fills 1 << bits bins with the weights of the tokens from .. to: the first bins, or later ones. row: in shared memory.
COLD __device__ static void fill_bins(const TokenRow *row, Weighing w, u64 from, u64 to, int bits) {
    const TokenRow t = *row;
    const int shift = bin_shift(from, to);
    __syncthreads();                                   // the memory is free
    for (int i = threadIdx.x; i < 2 << bits; i += SAMPLE_THREADS) low_words(bits)[i] = 0;
    __syncthreads();
    each_token(t, from, [&](u64 key) {
        const bool in = key >= from && key <= to;
        int bin = -1;
        if (in) bin = bits == BIN_BITS ? first_bin(w, key) : (int)((to - key) >> shift);
        const u64 weight = in ? weight_of(w, key) : 0;
        if (!__all_sync(~0u, bin == __shfl_sync(~0u, bin, 0))) {
            if (weight) add_to_bin(bits, bin, weight);
        } else if (bin >= 0) {                         // for example equal logits: all lanes would add to one word
            const u64 low = __reduce_add_sync(~0u, (unsigned)weight & 0xfffff),        // a weight has 40 bits
                      high = __reduce_add_sync(~0u, (unsigned)(weight >> 20));
            if (threadIdx.x % 32 == 0) add_to_bin(bits, bin, low + (high << 20));
        }
    });
    __syncthreads();
}

// The bin in which the running sum exceeds target, or -1; *before: the sum before that bin, *total: the sum of all
// bins.
__device__ static int bin_above(int bits, u64 target, u64 *before, u64 *total) {
    __shared__ int found;
    __shared__ u64 found_before;                       // undefined if no bin is found
    const int each = (1 << bits) / SAMPLE_THREADS, first = threadIdx.x * each;
    u64 sum = 0;
    for (int i = first; i < first + each; i++) sum += bin_sum(bits, i);
    if (threadIdx.x == 0) found = -1;
    u64 upto = sum_before(sum, total);
    for (int i = first; i < first + each; i++) {
        const u64 here = bin_sum(bits, i);
        if (upto <= target && target - upto < here) found = i, found_before = upto;
        upto += here;
    }
    __syncthreads();
    const int bin = found;
    *before = found_before;
    __syncthreads();                                   // read before the next call writes
    return bin;
}

typedef struct { u64 key, sum; } Cut;

// The first key, best first, of the tokens from .. to at which the running sum of weights exceeds target, with that
// sum; key 0: it never does. The first bins must be filled with these tokens. Uses the list.
COLD __device__ static Cut first_above(const TokenRow *row, Weighing w, u64 from, u64 to, u64 target) {
    __shared__ Cut found;
    const u64 *list = key_list();
    u64 sum = 0, before, total, best;
    for (int bits = BIN_BITS;; bits = LIST_BITS) {
        const int bin = bin_above(bits, target - sum, &before, &total);
        if (bin < 0) return (Cut){ 0, sum };
        sum += before;
        if (bits == BIN_BITS) {
            if (bin < BINS - 1) from = max(from, least_key(to, [&](u64 key) { return first_bin(w, key) <= bin; }));
            if (bin > 0) to = least_key(to, [&](u64 key) { return first_bin(w, key) < bin; }) - 1;
        } else {
            const int shift = bin_shift(from, to);
            to -= (u64)bin << shift;
            if ((to - from) >> shift) from = to - (((u64)1 << shift) - 1);
        }
        const int n = gather(*row, from, to, &best);
        if (n <= LIST) {
            sort_list(n);
            const int i = 2 * threadIdx.x;
            const u64 x = i < n ? weight_of(w, list[i]) : 0, y = i + 1 < n ? weight_of(w, list[i + 1]) : 0;
            const u64 at = sum + sum_before(x + y, &total);
            if (at <= target && target - at < x + y) {
                const bool second = target - at >= x;
                found = (Cut){ list[i + second], at + x + (second ? y : 0) };
            }
            __syncthreads();
            return found;
        }
        fill_bins(row, w, from, to, LIST_BITS);
    }
}

// The k-th best key of a row; 0: fewer than k keys are at least `from`. top: the best key. scale: of Weighing; it only
// spreads the keys over bins.
__device__ static u64 kth_key(const TokenRow *row, int k, u64 from, u64 top, float scale) {
    const Weighing one = { key_logit(top), scale, true };
    fill_bins(row, one, from, top, BIN_BITS);
    return first_above(row, one, from, top, (u64)k - 1).key;
}

// Sorts the k best tokens into the list; returns their number. k <= LIST. mine: the best key of the strips threadIdx.x,
// threadIdx.x + SAMPLE_THREADS, ...; top: the best of all.
//   At least k tokens reach the k-th best of the threads' keys. Few others do, unless the good tokens are in few
//   strips; then the best tokens that each thread saw in these strips give a better bound.
__device__ static int best_tokens(const TokenRow *row, int k, u64 mine, u64 top) {
    int n;
    for (int attempt = k <= SAMPLE_THREADS ? 0 : 2;; attempt++) {
        const u64 from = attempt < 2 ? bound_of(mine, k, top) : max(kth_key(row, k, 1, top, 1), (u64)1);
        n = gather(*row, from, top, &mine);
        if (n <= LIST) break;
    }
    sort_list(n);
    return min(k, n);
}

// Steps 5 to 8 of Sample for the first n <= SAMPLE_THREADS keys of the list: the thread that has the drawn token
// returns it, all others return -1.
__device__ static int draw_from_list(int n, const Weighing &w, float top_p, u64 least, float u) {
    const int i = threadIdx.x;
    const u64 key = i < n ? key_list()[i] : 0;
    u64 total, kept, weight = i < n ? weight_of(w, key) : 0;
    const u64 before = sum_before(weight, &total);
    if ((i > 0 && top_p < 1 && before >= sample_share(total, top_p)) || weight < least) weight = 0;
    const u64 at = sum_before(weight, &kept), target = sample_share(kept, u);
    return at <= target && target - at < weight ? key_id(key) : -1;
}

// The same for a whole row, limited to its k best tokens; all threads return the token. Tokens that weigh nothing
// cannot be drawn and are ignored.
COLD __device__ static int draw_from_row(const TokenRow *row, int k, u64 top, Weighing w, float top_p, u64 least,
                                           float u) {
    const u64 enough = least_key(top, [&](u64 key) { return weight_of(w, key) >= max(least, (u64)1); });
    u64 from = least_key(top, [&](u64 key) { return weight_of(w, key) > 0; }), total, before;
    if (k < row->vocab) from = max(from, kth_key(row, k, from, top, w.scale));
    if (!(top_p < 1)) from = max(from, enough);        // only top-p needs the weight of what min-p removes
    fill_bins(row, w, from, top, BIN_BITS);
    bin_above(BIN_BITS, 0, &before, &total);
    if (top_p < 1) {
        const u64 part = sample_share(total, top_p);
        const Cut last = first_above(row, w, from, top, part ? part - 1 : 0);
        total = last.sum;
        if (enough > last.key) {
            u64 weight = 0;
            each_token(*row, enough, [&](u64 key) { weight += key >= enough ? weight_of(w, key) : 0; });
            sum_before(weight, &total);
        }
    }
    return key_id(first_above(row, w, from, top, sample_share(total, u)).key);
}

// ==== [4] Sampling ===================================================================================================

// Counts in `seen` (shared memory) how often the tokens of ROUND strips from `first` on occur in a row of the step and
// its ancestors.
__device__ static void count_seen(const Row &row, const Segment &seg, const Row *step_rows, int vocab, int first,
                                  int *seen) {
    __syncthreads();                                   // seen is free
    for (int i = threadIdx.x; i < ROUND * STRIP; i += SAMPLE_THREADS) seen[i] = 0;
    __syncthreads();
    for (int j = threadIdx.x; j <= row.index; j += SAMPLE_THREADS) {
        if (seg.kind != SEG_CHAIN && !(row.ancestors >> j & 1)) continue;
        const int token = step_rows[seg.first + j].token;
        const int at = (token < 0 || token >= vocab ? 0 : token) - first * STRIP;
        if (at >= 0 && at < ROUND * STRIP) atomicAdd(&seen[at], 1);
    }
    __syncthreads();
}

// sample: one token per row, steps 1 to 8 of Sample in gemma4.h.
//   shapes    logits (n_rows, vocab)
//   launch    grid (blocks a row, n_rows), block 512, dynamic shared memory SAMPLE_SHARED. The last block of a row
//             chooses
//   traffic   reads the logits once; with bias or penalties writes them once. The last block reads k strips and few
//             more again (top_k up to 512), else all strips with a weight, once or twice
//   numerics  integers after step 3: the same choice as the CPU whenever the logits are equal
//   see       ref_sample
__global__ void __launch_bounds__(SAMPLE_THREADS, BLOCKS_OF_SM) sample_kernel(Sample o, Batch b, Spread s) {
    wait_for_previous_kernel();
    int *seen = (int *)shared_bytes;
    __shared__ int32_t choice;
    __shared__ TokenRow t;                             // the row after steps 2 and 3
    const int r = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first_strip = blockIdx.x * s.per_block, end = min(first_strip + s.per_block, s.n_strips);
    const bool changed = o.bias || o.counts;
    float *z = changed ? s.z + (size_t)r * s.stride : NULL;
    const TokenRow given = { o.logits + (size_t)r * o.vocab, o.mask ? o.mask + r * (((size_t)o.vocab + 31) / 32) : NULL,
                             s.strip + (size_t)r * s.n_strips, o.vocab, s.n_strips, false, NULL };
    FourTokens next[2];                                // loads in flight while row, segment and parameters are read
    for (int h = 0; h < 2; h++)
        next[h] = four_tokens(given, (first_strip + warp + h * SAMPLE_WARPS) * STRIP + 4 * lane);
    const Row row = b.rows[r];
    const Segment seg = b.segs[b.n_segs == 1 ? 0 : row.seg];            // with one segment, no wait for the row
    const int pos = b.len[seg.seq] + row.depth;
    const SampleParams p = o.params[seg.seq];
    bool nan = false;
    for (int first = first_strip; first < end; first += ROUND) {
        if (o.counts) count_seen(row, seg, o.step_rows, o.vocab, first, seen);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int strip = first + warp + h * SAMPLE_WARPS, i = strip * STRIP + 4 * lane;
            const unsigned in = next[h].in;
            float v[4] = { next[h].z.x, next[h].z.y, next[h].z.z, next[h].z.w };
            next[h] = four_tokens(given, first + ROUND < end ? i + ROUND * STRIP : o.vocab);
            if (o.bias) {
                const float4 more = four_values(o.bias + (size_t)seg.seq * o.vocab, i, o.vocab);
                v[0] += more.x, v[1] += more.y, v[2] += more.z, v[3] += more.w;
            }
            u64 best = 0;
            for (int j = 0; j < 4; j++) {
                if (o.counts && i + j < o.vocab) {
                    const int c = o.counts[(size_t)seg.seq * o.vocab + i + j] + seen[i + j - first * STRIP];
                    if (c > 0) v[j] = sample_penalised(v[j], c, &p);
                }
                nan |= v[j] != v[j];
                best = max(best, key_of(given, v[j], in >> j & 1, i + j));
            }
            if (changed && i < o.vocab) *(float4 *)(z + i) = make_float4(v[0], v[1], v[2], v[3]);
            best = warp_best(best);
            if (lane == 0 && strip < end) s.strip[(size_t)r * s.n_strips + strip] = best;
        }
    }
    if (!last_of_row(nan, &nan)) return;

    u64 mine = 0;
    for (int i = threadIdx.x; i < s.n_strips; i += SAMPLE_THREADS) mine = max(mine, given.strip[i]);
    const u64 top = block_best(mine);
    if (threadIdx.x == 0) {
        choice = nan || !top ? -1 : key_id(top);
        t = given;
        if (changed) t.z = z;
    }
    __syncthreads();
    const int k = p.top_k > 0 ? min(p.top_k, o.vocab) : o.vocab;
    if (choice >= 0 && p.temperature > 0 && k > 1) {
        const Weighing w = { key_logit(top), 1.44269504f / p.temperature, false };
        const u64 least = sample_share(SAMPLE_ONE, p.min_p);
        const float u = random_unit(p.seed, pos);
        int drawn;
        if (k <= SAMPLE_THREADS) drawn = draw_from_list(best_tokens(&t, k, mine, top), w, p.top_p, least, u);
        else drawn = draw_from_row(&t, k, top, w, p.top_p, least, u);
        if (drawn >= 0) choice = drawn;
        __syncthreads();
    }
    if (threadIdx.x != 0) return;
    o.out[r] = choice;
}

// Divides a launch of n_rows rows, at most STEP_ROWS, among blocks; *grid. Scratch: cuda.partial, and cuda.panel for
// changed logits.
static Spread spread_of(int n_rows, int vocab, dim3 *grid) {
    Spread s = { };
    s.n_strips = div_up(vocab, STRIP);
    s.stride = (int)round_up(vocab, 4);
    const int rounds = div_up(s.n_strips, ROUND), each = div_up(rounds * n_rows, BLOCKS_OF_SM * cuda.card.n_sm);
    s.per_block = ROUND * each;
    s.strip = (u64 *)cuda.partial;
    s.sum = (double *)(s.strip + (size_t)n_rows * s.n_strips);
    s.z = (float *)cuda.panel;
    *grid = dim3(div_up(rounds, each), n_rows);
    return s;
}

// The most rows of a launch.
static int spread_rows(int vocab) {
    const size_t strips = PARTIAL_BYTES / ((sizeof(u64) + sizeof(double)) * div_up(vocab, STRIP));
    return (int)(strips < STEP_ROWS ? strips : STEP_ROWS);
}

static void cuda_sample(const Sample *o) {
    int at_once = spread_rows(o->vocab);
    if (o->bias || o->counts) at_once = min_int(at_once, (int)(PANEL_BYTES / sizeof(float) / round_up(o->vocab, 4)));
    if (!at_once) cuda_die("sample: a vocabulary of %d is not supported", o->vocab);
    for (int r = 0; r < o->batch->n_rows; r += at_once) {
        const int n = min_int(at_once, o->batch->n_rows - r);
        dim3 grid;
        const Spread spread = spread_of(n, o->vocab, &grid);
        Sample part = *o;
        Batch b = *o->batch;
        b.rows += r;
        part.logits += (size_t)r * o->vocab;
        part.out += r;
        if (o->mask) part.mask += r * (((size_t)o->vocab + 31) / 32);
        launch(WRITES_ACTIVATIONS, sample_kernel, grid, SAMPLE_THREADS, SAMPLE_SHARED, part, b, spread);
        CHECK_LAUNCH("sample n_rows=%d vocab=%d", n, o->vocab);
    }
}

// ==== [5] Drafts =====================================================================================================

// verify_walk: how far the tokens of each segment agree with the tokens that the model chose.
//   shapes    kept_rows, chosen (n_kept); n_accept, last, next (n_segs); path (n_segs, STEP_ROWS)
//   launch    grid n_segs, block 32: 32 kept rows at a time, one a lane; the walk goes from lane to lane
//   traffic   reads kept_rows and chosen once for each segment
//   numerics  whole numbers
//   see       ref_verify_walk
__global__ void verify_walk_kernel(VerifyWalk o, Batch b) {
    wait_for_previous_kernel();
    const int s = blockIdx.x, lane = threadIdx.x;
    const Segment seg = b.segs[s];
    int32_t *path = seg.kind == SEG_TREE ? o.path + s * STEP_ROWS : NULL;
    int at = -1, index = -1, chosen = 0, n = 0;        // of the walk: kept row, its row, the token chosen there
    for (int first = 0; first < o.n_out; first += 32) {
        const bool there = first + lane < o.n_out;
        const Row row = there ? o.out_rows[first + lane] : (Row){ };
        const bool mine = there && row.seg == s;
        const int token = mine ? b.rows[seg.first + row.index].token : -1, choice = mine ? o.chosen[first + lane] : -1;
        const int above = 63 - __clzll((long long)(row.ancestors & (((uint64_t)1 << row.index % 64) - 1)));
        const int parent = seg.kind == SEG_TREE ? above : row.index - 1;
        for (;;) {
            const bool follows = at < 0 || (parent == index && chosen >= 0 && token == chosen);
            const unsigned lanes = __ballot_sync(~0u, mine && follows);
            if (!lanes) break;
            const int to = __ffs(lanes) - 1;
            index = __shfl_sync(~0u, row.index, to);
            chosen = __shfl_sync(~0u, choice, to);
            if (at < 0) {                              // rows before the first kept row are accepted
                for (int i = lane; path && i < index; i += 32) path[i] = i;
                n = index;
            }
            if (path && lane == 0) path[n] = index;
            at = first + to;
            n++;
        }
    }
    for (int i = lane; at < 0 && path && i < seg.n; i += 32) path[i] = i;
    if (lane != 0) return;
    o.n_accept[s] = at < 0 ? seg.n : n;
    o.last[s] = at;
    o.next[s] = chosen;
}
static void cuda_verify_walk(const VerifyWalk *o) {
    launch(WRITES_ACTIVATIONS, verify_walk_kernel, o->batch->n_segs, 32, 0, *o, *o->batch);
    CHECK_LAUNCH("verify_walk n_segs=%d n_out=%d", o->batch->n_segs, o->n_out);
}

// ==== [6] Top logits and logsumexp: head, logprob ====================================================================

typedef struct {
    const float *logits;      // (n_rows, vocab)
    int      vocab;
    int      k;               // 0: none
    int32_t *ids;             // (n_rows, k)
    float   *top;             // (n_rows, k)
    float   *sum;             // (n_rows) logsumexp; with tokens: the log-probability of one token; NULL: none
    const int32_t *tokens;    // (n_rows) or NULL
    const int32_t *names;     // (n_rows, vocab) tokens to which the logits belong; NULL: tokens 0, 1, 2, ...
} Summary;

// summary: top-k and logsumexp of rows of logits, for Head and Logprob.
//   shapes    logits (n_rows, vocab)
//   launch    grid (blocks a row, n_rows), block 512, dynamic shared memory SAMPLE_SHARED. The last block of a row
//             completes it
//   traffic   reads the logits once, then k strips and few more again
//   numerics  exp in f32 of the distance to the best of a strip; sums in f64, in an order that depends only on vocab
//   see       ref_head, ref_head_centroid, ref_logprob, ref_logsumexp
__global__ void __launch_bounds__(SAMPLE_THREADS, BLOCKS_OF_SM) summary_kernel(Summary o, Spread s) {
    wait_for_previous_kernel();
    __shared__ double part[SAMPLE_WARPS];
    __shared__ TokenRow shared_row;
    const int r = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first_strip = blockIdx.x * s.per_block, end = min(first_strip + s.per_block, s.n_strips);
    const TokenRow t =
        { o.logits + (size_t)r * o.vocab, NULL, s.strip + (size_t)r * s.n_strips, o.vocab, s.n_strips, true,
          o.names ? o.names + (size_t)r * o.vocab : NULL };
    double *sums = s.sum + (size_t)r * s.n_strips;
    for (int first = first_strip; first < end; first += ROUND) {
        FourTokens v[2];
        for (int h = 0; h < 2; h++) v[h] = four_tokens(t, (first + warp + h * SAMPLE_WARPS) * STRIP + 4 * lane);
        for (int h = 0; h < 2; h++) {
            const int strip = first + warp + h * SAMPLE_WARPS, i = strip * STRIP + 4 * lane;
            const float z[4] = { v[h].z.x, v[h].z.y, v[h].z.z, v[h].z.w };
            u64 best = 0;
            for (int j = 0; j < 4; j++) best = max(best, key_of(t, z[j], v[h].in >> j & 1, i + j));
            best = warp_best(best);
            if (lane == 0 && strip < end) s.strip[(size_t)r * s.n_strips + strip] = best;
            if (!o.sum || strip >= end) continue;
            const float from = isinf(key_logit(best)) ? 0 : key_logit(best);
            double sum = 0;
            for (int j = 0; j < 4; j++) sum += v[h].in >> j & 1 ? (double)expf(z[j] - from) : 0;
            for (int half = 16; half > 0; half /= 2) sum += __shfl_xor_sync(~0u, sum, half);
            if (lane == 0) sums[strip] = sum;
        }
    }
    bool any;
    if (!last_of_row(false, &any)) return;

    u64 mine = 0;
    for (int i = threadIdx.x; i < s.n_strips; i += SAMPLE_THREADS) mine = max(mine, t.strip[i]);
    if (threadIdx.x == 0) shared_row = t;
    const u64 top = block_best(mine);                  // also the barrier for shared_row
    if (o.k) {
        best_tokens(&shared_row, o.k, mine, top);
        const u64 *list = key_list();
        for (int i = threadIdx.x; i < o.k; i += SAMPLE_THREADS) {
            o.ids[(size_t)r * o.k + i] = key_id(list[i]);
            // NaN is returned as it is, if ids are the numbers of the tokens
            o.top[(size_t)r * o.k + i] = o.names ? key_logit(list[i]) : t.z[key_id(list[i])];
        }
    }
    if (!o.sum) return;
    const float from = isinf(key_logit(top)) ? 0 : key_logit(top);     // all -Inf, or a +Inf: the sum shows it
    double sum = 0;
    for (int i = threadIdx.x; i < s.n_strips; i += SAMPLE_THREADS) {
        const float best = key_logit(t.strip[i]);
        if (sums[i] != 0) sum += sums[i] * (double)expf((isinf(best) ? 0 : best) - from);
    }
    for (int half = 16; half > 0; half /= 2) sum += __shfl_xor_sync(~0u, sum, half);
    if (lane == 0) part[warp] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return;
    sum = 0;
    for (int i = 0; i < SAMPLE_WARPS; i++) sum += part[i];
    const double all = from + log(sum);
    const int id = o.tokens ? o.tokens[r] : 0;
    const bool known = id >= 0 && id < o.vocab;
    o.sum[r] = o.tokens ? (float)((known ? t.z[id] : NAN) - all) : (float)all;
}

// Launches summary_kernel for any number of rows.
static void launch_summary(const Summary *o, int n_rows, const char *what) {
    const int at_once = spread_rows(o->vocab);
    if (!at_once) cuda_die("%s: a vocabulary of %d is not supported", what, o->vocab);
    for (int r = 0; r < n_rows; r += at_once) {
        const int n = min_int(at_once, n_rows - r);
        dim3 grid;
        const Spread spread = spread_of(n, o->vocab, &grid);
        Summary part = *o;
        part.logits += (size_t)r * o->vocab;
        if (o->k) part.ids += (size_t)r * o->k, part.top += (size_t)r * o->k;
        if (o->sum) part.sum += r;
        if (o->tokens) part.tokens += r;
        if (o->names) part.names += (size_t)r * o->vocab;
        report_plan("summary", grid, SAMPLE_THREADS, SAMPLE_SHARED, 0, "%d strips a block", spread.per_block);
        launch(WRITES_ACTIVATIONS, summary_kernel, grid, SAMPLE_THREADS, SAMPLE_SHARED, part, spread);
        CHECK_LAUNCH("%s n_rows=%d vocab=%d", what, n, o->vocab);
    }
}

static void cuda_logprob(const Logprob *o) {
    const Summary s = { .logits = o->logits, .vocab = o->vocab, .sum = o->out, .tokens = o->ids };
    launch_summary(&s, o->n_rows, "logprob");
}

// head: the soft-capped product, STEP_ROWS rows at a time. Logits that the caller does not ask for are kept in
// cuda.panel.
static void cuda_head(const Head *o) {
    const int vocab = o->w->rows, cols = o->w->cols;
    const bool f = is_float(o->w->type);
    const int at_once = o->logits ? STEP_ROWS : min_int(STEP_ROWS, (int)(PANEL_BYTES / sizeof(float) / vocab));
    if (!at_once) cuda_die("head: a vocabulary of %d is not supported", vocab);
    if (o->top_k > LIST) cuda_die("head: expected top_k up to %d, got %d", LIST, o->top_k);
    for (int r = 0; r < o->n_rows; r += at_once) {
        const int n = min_int(at_once, o->n_rows - r);
        const size_t at = (size_t)r * cols;
        float *logits = o->logits ? o->logits + (size_t)r * vocab : (float *)cuda.panel;
        In in = o->in;
        if (in.x) in.x += at;
        for (int k = 0; k < 2; k++)
            if (in.delta[k]) in.delta[k] += at;
        if (in.x_out) in.x_out += at;
        Jobs jobs = { };
        Prepared y = prepared_at(0, cols, f, !f, false);
        if (o->hidden) y.f = o->hidden + at, launch_prepare(&in, y, n, cols);
        else y = prepare_one(&jobs, &in, n, cols, f, !f);
        Job job = job_of(o->w, y, n);
        job.out = logits;
        job.cap = o->cap;
        add_job(&jobs, job);
        launch_jobs(&jobs, "head", n);
        if (!o->top_k && !o->logsumexp) continue;
        const Summary s = { .logits = logits, .vocab = vocab, .k = o->top_k,
                            .ids = o->top_k ? o->top_ids + (size_t)r * o->top_k : NULL,
                            .top = o->top_k ? o->top_logits + (size_t)r * o->top_k : NULL,
                            .sum = o->logsumexp ? o->logsumexp + r : NULL };
        launch_summary(&s, n, "head");
    }
}

// ==== [7] Head of centroids ==========================================================================================

typedef struct {
    DType    type;
    Planes   w;               // (vocab, cols)
    int      quads;           // as in Job
    Input    input;           // (n_rows, cols)
    const int32_t *order, *chosen;     // (vocab); (n_rows, n_used)
    int      n_used;
    Divisor  by_per;          // tokens of a centroid
    int32_t *names;           // (n_rows, n_used * per) the candidates
    Result   to;              // their logits
} Candidates;

// candidates: logits of the tokens of the chosen centroids, by gathered rows of the matrix.
//   shapes    as in HeadCentroid
//   launch    grid (ceil(n_used * per / 4 / warps), n_rows), block 512, dynamic shared memory: the row. A warp computes
//             four candidates, of a float matrix one after the other
//   traffic   reads the rows of the candidates once for each row of the step
//   numerics  as product_kernel
//   see       ref_head_centroid
__global__ void __launch_bounds__(ROW_THREADS, 1) candidates_kernel(const __grid_constant__ Candidates o) {
    wait_for_previous_kernel();
    __shared__ float sums[PRODUCT_WARPS][WARP_FEATURES];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, r = blockIdx.y, n = o.to.rows;
    const int first = WARP_FEATURES * (blockIdx.x * PRODUCT_WARPS + warp), own = min(first + lane / 8, n - 1);
    const int nth = quotient(own, o.by_per), per = (int)o.by_per.by;
    const int token = o.order[o.chosen[r * o.n_used + nth] * per + own - nth * per];
    const bool floats = is_float(o.type);
    copy_input(o.input, r, 1);
    __syncthreads();                                   // the row is there
    if (first >= n) return;
#pragma unroll 1
    for (int k = 0; k < (floats ? WARP_FEATURES : 1); k++)
        multiply<1>(o.type, &o.w, floats ? __shfl_sync(~0u, token, 8 * k) : token, 1, o.input.cols, o.quads,
                    floats ? o.input.f_at : o.input.q_at, 0, 1, sums[warp] + k);
    __syncwarp();                                      // sums are there
    const int name = __shfl_sync(~0u, token, lane % WARP_FEATURES * 8);
    if (lane >= WARP_FEATURES || first + lane >= n) return;
    o.names[(size_t)r * n + first + lane] = name;
    store_product(o.to, r, first + lane, sums[warp][lane]);
}

// y: the input in global memory.   chosen (n_rows, n_used), names (n_rows, n_used * per)
static void launch_candidates(const HeadCentroid *o, Prepared y, const int32_t *chosen, int32_t *names, int per) {
    const Tensor *w = o->w;
    Candidates c = { };
    c.type = w->type, c.w = planes_of(w);
    c.quads = ((size_t)c.w.lo | plane_bytes(format_of(w->type), 0, w->cols)) % 16 == 0;
    c.input.from = y, c.input.cols = w->cols, c.input.rows_each = 1;
    c.input.by_chunks = divisor(max_int(1, w->cols / 16));
    if (is_float(w->type)) c.input.f_row = (int)round_up(w->cols, 8) * (int)sizeof(float);
    else c.input.q_row = div_up(w->cols, 256) * OCTET_BYTES;
    c.order = o->order, c.chosen = chosen, c.n_used = o->n_used, c.by_per = divisor(per);
    c.names = names;
    c.to.rows = o->n_used * per, c.to.out = o->logits, c.to.factor = w->scale;
    const dim3 grid(div_up(c.to.rows, WARP_FEATURES * PRODUCT_WARPS), o->n_rows);
    launch(WRITES_ACTIVATIONS, candidates_kernel, grid, ROW_THREADS, c.input.f_row + c.input.q_row, c);
    CHECK_LAUNCH("head_centroid n_rows=%d candidates=%d cols=%d", o->n_rows, c.to.rows, w->cols);
}

// head_centroid: scores of the centroids, the best centroids, logits of their tokens, the best tokens. The chosen
// centroids and the tokens of the logits are kept in cuda.panel.
static void cuda_head_centroid(const HeadCentroid *o) {
    const Tensor *w = o->w, *centroids = o->centroids;
    const int n_rows = o->n_rows, cols = w->cols, per = w->rows / centroids->rows, n = o->n_used * per;
    const bool f = is_float(w->type) || is_float(centroids->type), q = !is_float(w->type) || !is_float(centroids->type);
    if (n_rows > STEP_ROWS || w->rows % centroids->rows || (q && cols % 32))
        cuda_die("head_centroid: %d rows, %d tokens of %d centroids, %d columns are not supported", n_rows, w->rows,
                 centroids->rows, cols);
    if (o->n_used > LIST || o->top_k > LIST)
        cuda_die("head_centroid: expected n_used and top_k up to %d, got %d and %d", LIST, o->n_used, o->top_k);
    int32_t *chosen = (int32_t *)cuda.panel, *names = chosen + n_rows * o->n_used;
    float *best = (float *)(names + (size_t)n_rows * n);
    if ((size_t)n_rows * (2 * o->n_used + n) * sizeof(int32_t) > PANEL_BYTES)
        cuda_die("head_centroid: %d candidates for %d rows are not supported", n, n_rows);
    Prepared y = prepared_at(0, cols, f, q, false);
    if (o->hidden) y.f = o->hidden;
    launch_prepare(&o->in, y, n_rows, cols);
    Jobs jobs = { };
    Job job = job_of(centroids, y, n_rows);
    job.out = o->scores;
    add_job(&jobs, job);
    launch_jobs(&jobs, "head_centroid", n_rows);
    const Summary choice =
        { .logits = o->scores, .vocab = centroids->rows, .k = o->n_used, .ids = chosen, .top = best };
    launch_summary(&choice, n_rows, "head_centroid");
    launch_candidates(o, y, chosen, names, per);
    const Summary result = { .logits = o->logits, .vocab = n, .k = o->top_k, .ids = o->top_ids, .top = o->top_logits,
                             .sum = o->logsumexp, .names = names };
    launch_summary(&result, n_rows, "head_centroid");
}

#endif
