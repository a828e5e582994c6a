/* vision.cuh - the operations of image towers: clamp, gelu_product, layer_norm, rope_2d, attend_all, pool. A part of
 * gemma4_kernels.cu, which includes it in its section [8].
 *
 * HOLDS        the six operations with their kernels. Their rows are the patches of one picture
 * MAY USE      what precedes the include in gemma4_kernels.cu: sums over warps and blocks and the instructions of [2],
 *              angle_of() of [7]
 * BEGIN        with cuda_attend_all() at the end of [2]; the rest is one value after the other
 *   [1] Values and rows      [2] Attention of a picture */
#ifndef VISION_CUH
#define VISION_CUH

// ==== [1] Values and rows ============================================================================================

enum { IMAGE_ROW_THREADS = 256 };

// clamp: out = x, not below lo and not above hi; a NaN stays
//   shapes    x, out n values, may be the same memory
//   launch    grid ceil(n / 256), block 256
//   traffic   8 bytes a value
//   numerics  exact
//   see       ref_clamp
__global__ void clamp_kernel(const float *x, Range range, size_t n, float *out) {
    wait_for_previous_kernel();
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float v = __ldcg(x + i);
    out[i] = v < range.lo ? range.lo : v > range.hi ? range.hi : v;
}

static dim3 blocks_of_values(size_t n) { return dim3((unsigned)((n + IMAGE_ROW_THREADS - 1) / IMAGE_ROW_THREADS)); }

static void cuda_clamp(const Clamp *o) {
    const size_t n = (size_t)o->n_rows * o->cols;
    launch(WRITES_ACTIVATIONS, clamp_kernel, blocks_of_values(n), IMAGE_ROW_THREADS, 0, o->x, o->range, n, o->out);
    CHECK_LAUNCH("clamp n_rows=%d cols=%d", o->n_rows, o->cols);
}

// gelu_product: out = gelu(gate) * up
//   shapes    gate, up, out n values; out may be gate or up
//   launch    grid ceil(n / 256), block 256
//   traffic   12 bytes a value
//   numerics  f32
//   see       ref_gelu_product
__global__ void gelu_product_kernel(const float *gate, const float *up, size_t n, float *out) {
    wait_for_previous_kernel();
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = activate(ACT_GELU, __ldcg(gate + i)) * __ldcg(up + i);
}

static void cuda_gelu_product(const GeluProduct *o) {
    const size_t n = (size_t)o->n_rows * o->cols;
    launch(WRITES_ACTIVATIONS, gelu_product_kernel, blocks_of_values(n), IMAGE_ROW_THREADS, 0, o->gate, o->up, n,
           o->out);
    CHECK_LAUNCH("gelu_product n_rows=%d cols=%d", o->n_rows, o->cols);
}

// layer_norm: u = x + add + add_rows;  out = w * (u - mean(u)) / sqrt(var(u) + eps) + bias
//   shapes    x, add_rows, out (n_rows, cols); add, w, bias (cols)
//   launch    grid n_rows, block 256: a block computes a row
//   traffic   reads x and add_rows three times (twice from L2), writes out once
//   numerics  f32; the mean first, then the squares of what is left
//   see       ref_layer_norm
__device__ static inline float layer_norm_input(const LayerNorm &o, size_t row, int i) {
    const float x = __ldcg(o.x + row + i), more = o.add_rows ? __ldcg(o.add_rows + row + i) : 0;
    return x + (o.add ? o.add[i] : 0) + more;
}

__global__ void __launch_bounds__(IMAGE_ROW_THREADS) layer_norm_kernel(LayerNorm o) {
    wait_for_previous_kernel();
    const size_t row = (size_t)blockIdx.x * o.cols;
    float sum = 0, squares = 0;
    for (int i = threadIdx.x; i < o.cols; i += blockDim.x) sum += layer_norm_input(o, row, i);
    const float mean = block_sum(sum) / o.cols;
    for (int i = threadIdx.x; i < o.cols; i += blockDim.x) {
        const float d = layer_norm_input(o, row, i) - mean;
        squares += d * d;
    }
    const float factor = rsqrtf(block_sum(squares) / o.cols + o.eps);
    for (int i = threadIdx.x; i < o.cols; i += blockDim.x)
        o.out[row + i] = o.w[i] * ((layer_norm_input(o, row, i) - mean) * factor) + o.bias[i];
}

static void cuda_layer_norm(const LayerNorm *o) {
    launch(WRITES_ACTIVATIONS, layer_norm_kernel, o->n_rows, IMAGE_ROW_THREADS, 0, *o);
    CHECK_LAUNCH("layer_norm n_rows=%d cols=%d", o->n_rows, o->cols);
}

// rope_2d: q = rope(norm(q; w_q)), k = rope(norm(k; w_k)), v = v / rms(v), of the heads of each row
//   shapes    q, k, v (n_rows, n_heads, head_dim); pos (n_rows, 2)
//   launch    grid n_rows, block 256: the row's angles are computed once; then a warp takes one head after the other
//   traffic   reads and writes q, k, v once
//   numerics  f32; angles as angle_of()
//   see       ref_rope_2d
__global__ void __launch_bounds__(IMAGE_ROW_THREADS) rope_2d_kernel(Rope2d o) {
    constexpr int WARPS = IMAGE_ROW_THREADS / 32, M = MAX_IMAGE_HEAD_DIM / 32;
    __shared__ float cosine[MAX_IMAGE_HEAD_DIM / 2], sine[MAX_IMAGE_HEAD_DIM / 2];     // of x, then of y
    __shared__ float heads[WARPS][MAX_IMAGE_HEAD_DIM];
    const int hd = o.head_dim, n = hd / 4, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    wait_for_previous_kernel();
    for (int i = threadIdx.x; i < 2 * n; i += blockDim.x)
        angle_of(o.inv_freq[i % n], __ldcg(o.pos + 2 * blockIdx.x + i / n), &cosine[i], &sine[i]);
    __syncthreads();                                   // the angles are there
    for (int h = warp; h < 3 * o.n_heads; h += WARPS) {
        const int which = h / o.n_heads;
        float *head = (which == 0 ? o.q : which == 1 ? o.k : o.v) +
                      ((size_t)blockIdx.x * o.n_heads + h % o.n_heads) * hd;
        const float *w = which == 0 ? o.w_q : o.w_k;
        float v[M], squares = 0;
        for (int m = 0; m < M; m++) {
            v[m] = lane + 32 * m < hd ? __ldcg(head + lane + 32 * m) : 0;
            squares += v[m] * v[m];
        }
        const float factor = rsqrtf(warp_sum(squares) / hd + o.eps);
        for (int m = 0; m < M; m++) {
            const int i = lane + 32 * m;
            if (i < hd) heads[warp][i] = v[m] * factor * (which < 2 ? w[i] : 1);
        }
        __syncwarp();                                  // the normed head is there
        for (int i = lane; i < hd; i += 32) {
            const int j = i % (hd / 2), at = i - j;    // in a half of the head, which begins at `at`
            const int pair = j % n + (at ? n : 0);
            const float a = heads[warp][at + j % n], b = heads[warp][at + j % n + n];
            head[i] = which == 2 ? heads[warp][i] : j < n ? a * cosine[pair] - b * sine[pair]
                                                          : a * sine[pair] + b * cosine[pair];
        }
        __syncwarp();                                  // before the next head overwrites it
    }
}

static void cuda_rope_2d(const Rope2d *o) {
    if (o->head_dim > MAX_IMAGE_HEAD_DIM || o->head_dim % 8)
        cuda_die("rope_2d: heads of %d values are not supported", o->head_dim);
    launch(WRITES_ACTIVATIONS, rope_2d_kernel, o->n_rows, IMAGE_ROW_THREADS, 0, *o);
    CHECK_LAUNCH("rope_2d n_rows=%d n_heads=%d head_dim=%d", o->n_rows, o->n_heads, o->head_dim);
}

// pool: out[Y][X] = (factor * mean of the side x side rows of a square - sub) * mul
//   shapes    x (h, w, cols), out (h / side, w / side, cols); sub, mul (cols)
//   launch    grid (h w / side^2, ceil(cols / 256)), block 256: a thread computes one value
//   traffic   reads x once, writes out once
//   numerics  f32, row by row of the square
//   see       ref_pool
__global__ void pool_kernel(Pool o) {
    wait_for_previous_kernel();
    const int width = o.w / o.side, i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= o.cols) return;
    const int y0 = blockIdx.x / width * o.side, x0 = blockIdx.x % width * o.side;
    float sum = 0;
    for (int y = y0; y < y0 + o.side; y++)
        for (int x = x0; x < x0 + o.side; x++) sum += __ldcg(o.x + ((size_t)y * o.w + x) * o.cols + i);
    const float v = o.factor * (sum / (float)(o.side * o.side));
    o.out[(size_t)blockIdx.x * o.cols + i] = o.sub ? (v - o.sub[i]) * o.mul[i] : v;
}

static void cuda_pool(const Pool *o) {
    const int n = o->w / o->side * (o->h / o->side);
    launch(WRITES_ACTIVATIONS, pool_kernel, dim3(n, div_up(o->cols, IMAGE_ROW_THREADS)), IMAGE_ROW_THREADS, 0, *o);
    CHECK_LAUNCH("pool w=%d h=%d cols=%d", o->w, o->h, o->cols);
}

// ==== [2] Attention of a picture =====================================================================================
// Every row sees every row: no mask, no cache, one head of K and V for each head of q. A block holds 64 queries of one
// head and goes through all keys, 64 at a time, as flash_kernel does; but head sizes are 64 and 72, and q, k and v are
// f32 rows that other operations wrote. A tile is converted to f16 on its way to shared memory, with heads padded by
// zeros to whole steps of 16 values: q, k and v are normed, so f16 holds them, and its 11 bits give an eighth of the
// error of bf16.

enum { IMAGE_TILE = 64, IMAGE_ATTEND_THREADS = 2 * IMAGE_TILE };       // keys or queries; a warp has 16 queries

// Two values as f16, the first in the low bits; what f16 cannot hold becomes its largest number.
__device__ static inline unsigned image_halves(float a, float b) {
    const float most = 65504;
    return half_bits(__floats2half2_rn(fminf(fmaxf(a, -most), most), fminf(fmaxf(b, -most), most)));
}

// Rows of a tile lie 8 halves further apart than they are long: eight rows then begin in different banks.
template <int STEPS> __device__ static constexpr int image_stride(void) { return 16 * STEPS + 8; }

// What a thread holds of a tile of 64 rows of a head: every other group of four values of one row, so that two threads
// read whole sectors of 32 bytes and all addresses have constant distances.
template <int STEPS> struct ImageRows {
    static constexpr int N = 2 * STEPS;
    float4 v[N];

    // Starts to load rows first .. first + 63; zeros after the last row and beyond hd.
    __device__ void load(const float *head, size_t stride, int first, int n, int hd) {
        const int row = first + threadIdx.x / 2;
        const float *from = head + (size_t)row * stride + threadIdx.x % 2 * 4;
#pragma unroll
        for (int k = 0; k < N; k++)
            v[k] = row < n && 8 * k < hd ? __ldcg((const float4 *)(from + 8 * k)) : make_float4(0, 0, 0, 0);
    }
    __device__ void store(__half *to) const {          // as halves
        to += threadIdx.x / 2 * image_stride<STEPS>() + threadIdx.x % 2 * 4;
#pragma unroll
        for (int k = 0; k < N; k++)
            *(uint2 *)(to + 8 * k) = make_uint2(image_halves(v[k].x, v[k].y), image_halves(v[k].z, v[k].w));
    }
};

// s[c] = scores of a warp's 16 queries and 64 keys: tile c has keys 8 c .. 8 c + 7, in the layout of multiply_half().
template <int STEPS>
__device__ static inline void image_scores(float s[8][4], const unsigned q[STEPS][4], const __half *k) {
    const int lane = threadIdx.x % 32, row = lane % 8 + lane / 16 * 8, column = lane / 8 % 2 * 8;
#pragma unroll
    for (int c = 0; c < 8; c++)
        for (int i = 0; i < 4; i++) s[c][i] = 0;
#pragma unroll
    for (int step = 0; step < STEPS; step++)
#pragma unroll
        for (int c = 0; c < 8; c += 2) {
            unsigned b[4];
            load_matrices(b, k + (8 * c + row) * image_stride<STEPS>() + 16 * step + column);
            multiply_half(s[c], q[step], b);
            multiply_half(s[c + 1], q[step], b + 2);
        }
}

// Scores become weights 2^(factor * (score - largest so far)); acc and sum are scaled down when the largest grows. n:
// keys of the tile that there are. Lines 0 and 1 of a lane are the queries lane / 4 and lane / 4 + 8 of its warp.
template <int STEPS>
__device__ static inline void image_softmax(float s[8][4], float factor, int n, float top[2], float sum[2],
                                            float acc[2 * STEPS][4]) {
    const int first = 2 * (threadIdx.x % 4);
#pragma unroll
    for (int line = 0; line < 2; line++) {
        float most = top[line], total = 0;
#pragma unroll
        for (int c = 0; c < 8; c++)
            for (int i = 0; i < 2; i++) {
                float &x = s[c][2 * line + i];
                x = 8 * c + first + i < n ? x * factor : -INFINITY;
                most = fmaxf(most, x);
            }
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        const float shrink = fast_exp2(top[line] - most);              // 0 the first time: top is -Inf
        top[line] = most;
#pragma unroll
        for (int c = 0; c < 8; c++)
            for (int i = 0; i < 2; i++) {
                float &x = s[c][2 * line + i];
                x = fast_exp2(x - most);
                total += x;
            }
        sum[line] = sum[line] * shrink + total;        // of this lane's keys
#pragma unroll
        for (int c = 0; c < 2 * STEPS; c++) {
            acc[c][2 * line] *= shrink;
            acc[c][2 * line + 1] *= shrink;
        }
    }
}

// acc[c] += weights times values 8 c .. 8 c + 7 of the tile's rows of v. Two neighbouring tiles of scores are the first
// factor of a product over 16 keys, without moving anything.
template <int STEPS>
__device__ static inline void image_values(float acc[2 * STEPS][4], const float s[8][4], const __half *v) {
    const int lane = threadIdx.x % 32, row = lane % 16, column = lane / 16 * 8;
#pragma unroll
    for (int c = 0; c < 8; c += 2) {
        const unsigned a[4] = { image_halves(s[c][0], s[c][1]), image_halves(s[c][2], s[c][3]),
                                image_halves(s[c + 1][0], s[c + 1][1]), image_halves(s[c + 1][2], s[c + 1][3]) };
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            unsigned b[4];
            load_matrices_transposed(b, v + (8 * c + row) * image_stride<STEPS>() + 16 * step + column);
            multiply_half(acc[2 * step], a, b);
            multiply_half(acc[2 * step + 1], a, b + 2);
        }
    }
}

// attend_all: out[r][h] = sum over all keys j of softmax_j(scale * q[r][h] . k[j][h]) v[j][h]
//   shapes    q, out (n_rows, n_heads, head_dim), k, v (n_keys, n_heads, head_dim), head_dim a multiple of 8, up to
//             16 STEPS
//   launch    grid (ceil(n_rows / 64), n_heads), block 128: a warp has 16 queries
//   traffic   a block reads its queries once and all rows of k and v of its head, from L2. The rows of v are on their
//             way while scores are computed, the next rows of k while values are
//   numerics  q, k, v and weights f16, sums f32; the largest score of each query so far is subtracted
//   see       ref_attend_all
template <int STEPS>
__global__ void __launch_bounds__(IMAGE_ATTEND_THREADS, STEPS <= 5 ? 3 : 2) attend_all_kernel(AttendAll o) {
    __shared__ __align__(16) __half tiles[2][IMAGE_TILE * image_stride<STEPS>()];      // of q, then k; of v
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = blockIdx.x * IMAGE_TILE, hd = o.head_dim;
    const size_t stride = (size_t)o.n_heads * hd, head = (size_t)blockIdx.y * hd;
    unsigned q[STEPS][4];
    float acc[2 * STEPS][4] = { }, top[2] = { -INFINITY, -INFINITY }, sum[2] = { };
    ImageRows<STEPS> rows;
    wait_for_previous_kernel();
    rows.load(o.q + head, stride, first, o.n_rows, hd);
    rows.store(tiles[0]);
    __syncthreads();                                   // the queries are there
#pragma unroll
    for (int step = 0; step < STEPS; step++)
        load_matrices(q[step], tiles[0] + (16 * warp + lane % 16) * image_stride<STEPS>() + 16 * step + lane / 16 * 8);
    rows.load(o.k + head, stride, 0, o.n_keys, hd);
    __syncthreads();                                   // all warps have their queries
    for (int j = 0; j < o.n_keys; j += IMAGE_TILE) {
        float s[8][4];
        rows.store(tiles[0]);
        rows.load(o.v + head, stride, j, o.n_keys, hd);
        __syncthreads();                               // k is there; all warps have used v of the round before
        image_scores<STEPS>(s, q, tiles[0]);
        rows.store(tiles[1]);
        rows.load(o.k + head, stride, j + IMAGE_TILE, o.n_keys, hd);
        image_softmax<STEPS>(s, o.scale * 1.44269504f, o.n_keys - j, top, sum, acc);
        __syncthreads();                               // v is there; all warps have used k
        image_values<STEPS>(acc, s, tiles[1]);
    }
#pragma unroll
    for (int line = 0; line < 2; line++) {
        sum[line] += __shfl_xor_sync(~0u, sum[line], 1);
        sum[line] += __shfl_xor_sync(~0u, sum[line], 2);
        const int r = first + 16 * warp + lane / 4 + 8 * line;
        if (r >= o.n_rows) continue;
        float *out = o.out + (size_t)r * stride + head;
#pragma unroll
        for (int c = 0; c < 2 * STEPS; c++) {
            const int d = 8 * c + 2 * (lane % 4);
            if (d < hd)
                *(float2 *)(out + d) = make_float2(acc[c][2 * line] / sum[line], acc[c][2 * line + 1] / sum[line]);
        }
    }
}

static void cuda_attend_all(const AttendAll *o) {
    const int hd = o->head_dim;
    if (hd > MAX_IMAGE_HEAD_DIM || hd % 8) cuda_die("attend_all: heads of %d values are not supported", hd);
    launch(WRITES_ACTIVATIONS, hd <= 64 ? attend_all_kernel<4> : hd <= 80 ? attend_all_kernel<5> : attend_all_kernel<8>,
           dim3(div_up(o->n_rows, IMAGE_TILE), o->n_heads), IMAGE_ATTEND_THREADS, 0, *o);
    CHECK_LAUNCH("attend_all n_rows=%d n_keys=%d n_heads=%d head_dim=%d", o->n_rows, o->n_keys, o->n_heads, hd);
}

#endif
