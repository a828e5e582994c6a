/* test_layout.c - the CUDA backend's layout of weights has exactly the bits of the file.
 *
 *   round trip  random bytes of every type are uploaded, read back and reassembled with the table of planes in
 *               gemma4_kernels.cu [3]: they must equal the file's blocks, byte for byte; a matrix grows by less than
 *               0.5 % plus the alignment of its planes. One matrix takes several chunks and threads
 *   in_host     a table in host memory has the same bytes as one on the device, and is filled once
 *   shorter     a file that is truncated before its chunks are read ends the process with the usual line
 *   model       logits are equal bit for bit with the per-layer table in host or device memory; the plan lists it
 *               separately
 *
 * Skipped, and counted, when built without CUDA or where there is no GPU. LONG=1: all models on the emulated card too. */
#define TESTING
#include "../gemma4.c"
#include "card.h"
#include "test.h"
#include "files.h"

#ifdef USE_CUDA
// A type of the table: bits of codes, bytes of planes, and the position of the scales in the file's block.
typedef struct {
    DType type;
    int   values, bytes;                // of a block in the file
    int   lo_bits, hi_bits;
    int   head, head_values, head_at;   // bytes per head_values values; at offset head_at of the file's block
    int   sup, sup_at;                  // bytes per 256 values; offset in the file's block
} Layout;

static const Layout layouts[] = {
    { T_Q8_0,    32,  34, 8, 0,  2,  32,   0, 0,   0 }, { T_Q4_0,    32,  18, 4, 0,  2,  32,   0, 0,   0 },
    { T_IQ4_NL,  32,  18, 4, 0,  2,  32,   0, 0,   0 }, { T_Q4_1,    32,  20, 4, 0,  4,  32,   0, 0,   0 },
    { T_Q5_0,    32,  22, 4, 1,  2,  32,   0, 0,   0 }, { T_Q5_1,    32,  24, 4, 1,  4,  32,   0, 0,   0 },
    { T_MXFP4,   32,  17, 4, 0,  1,  32,   0, 0,   0 }, { T_NVFP4,   64,  36, 4, 0,  2,  32,   0, 0,   0 },
    { T_Q4_K,   256, 144, 4, 0, 16, 256,   0, 0,   0 }, { T_Q5_K,   256, 176, 4, 1, 16, 256,   0, 0,   0 },
    { T_Q6_K,   256, 210, 4, 2, 16, 256, 192, 2, 208 }, { T_Q2_K,   256,  84, 2, 0, 16, 256,   0, 4,  80 },
    { T_Q3_K,   256, 110, 2, 1, 12, 256,  96, 2, 108 }, { T_IQ4_XS, 256, 136, 4, 0,  8, 256,   0, 0,   0 },
};

// Bits of value v of a group in a plane of `bits` bits a value.
static unsigned plane_bits(const uint8_t *group, int bits, int v) {
    if (bits == 8) return group[v];
    if (bits == 4) return group[v % 16] >> 4 * (v / 16) & 15;
    if (bits == 2) return group[4 * (v / 16) + v % 4] >> 2 * (v % 16 / 4) & 3;
    return bits ? group[v % 4] >> v / 4 & 1 : 0;
}

// Writes code c of value i to its place in the file's block.
static void put_code(DType t, uint8_t *b, int i, unsigned c) {
    const int half = i / 128, quarter = i / 32 % 4, l = i % 32;
    uint8_t *at = NULL;
    int shift = 4 * (i / 16);
    switch (t) {
    case T_Q8_0: b[2 + i] = (uint8_t)c; return;
    case T_Q4_0: case T_IQ4_NL: at = b + 2 + i % 16; break;
    case T_Q4_1: at = b + 4 + i % 16; break;
    case T_Q5_0: at = b + 6 + i % 16, b[2 + i / 8] |= (uint8_t)((c >> 4) << i % 8); break;
    case T_Q5_1: at = b + 8 + i % 16, b[4 + i / 8] |= (uint8_t)((c >> 4) << i % 8); break;
    case T_MXFP4: at = b + 1 + i % 16; break;
    case T_NVFP4: at = b + 4 + 8 * (i / 16) + i % 8, shift = 4 * (i / 8 % 2); break;
    case T_Q4_K: at = b + 16 + 32 * (i / 64) + l, shift = 4 * (i / 32 % 2); break;
    case T_Q5_K: at = b + 48 + 32 * (i / 64) + l, shift = 4 * (i / 32 % 2), b[16 +
            l] |= (uint8_t)((c >> 4) << i / 32); break;
    case T_Q6_K:
        at = b + 64 * half + 32 * (quarter % 2) + l;
        shift = 4 * (quarter / 2);
        b[128 + 32 * half + l] |= (uint8_t)((c >> 4) << 2 * quarter);
        break;
    case T_Q2_K: at = b + 16 + 32 * half + l, shift = 2 * quarter; break;
    case T_Q3_K: at = b + 32 + 32 * half + l, shift = 2 * quarter, b[l] |= (uint8_t)((c >> 2) << i / 32); break;
    case T_IQ4_XS: at = b + 8 + 16 * (i / 32) + i % 16, shift = 4 * (l / 16); break;
    default: return;
    }
    const unsigned mask = t == T_Q2_K || t == T_Q3_K ? 3 : 15;
    *at |= (uint8_t)((c & mask) << shift);
}

// Builds the file's blocks of n values from planes. Returns the bytes of the planes.
static size_t blocks_of(const Layout *f, const uint8_t *planes, size_t n, uint8_t *out) {
    const size_t n_groups = n / 32;
    const size_t size[4] = { n_groups * (size_t)(4 * f->lo_bits), n_groups * (size_t)(4 * f->hi_bits),
                             n / (size_t)f->head_values * (size_t)f->head, n / 256 * (size_t)f->sup };
    const uint8_t *plane[4];
    size_t at = 0;
    for (int i = 0; i < 4; i++) {
        plane[i] = planes + at;
        at = round_up(at + size[i], 256);
    }
    for (size_t k = 0; out && k < n / (size_t)f->values; k++) {
        uint8_t *b = out + k * (size_t)f->bytes;
        const size_t first = k * (size_t)f->values, heads = (size_t)f->values / (size_t)f->head_values;
        memset(b, 0, (size_t)f->bytes);
        memcpy(b + f->head_at, plane[2] + k * heads * (size_t)f->head, heads * (size_t)f->head);
        memcpy(b + f->sup_at, plane[3] + first / 256 * (size_t)f->sup, (size_t)f->sup);
        for (int i = 0; i < f->values; i++) {
            const size_t g = (first + (size_t)i) / 32;
            const unsigned lo = plane_bits(plane[0] + g * (size_t)(4 * f->lo_bits), f->lo_bits, i % 32);
            const unsigned hi = plane_bits(plane[1] + g * (size_t)(4 * f->hi_bits), f->hi_bits, i % 32);
            put_code(f->type, b, i, lo | hi << f->lo_bits);
        }
    }
    return at;
}

static uint8_t *random_bytes(size_t n) {
    static uint64_t state = 9;
    uint8_t *p = alloc_or_die(n + 8, 1);
    for (size_t i = 0; i < n; i += 8) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        const uint64_t mixed = state ^ state >> 29;
        memcpy(p + i, &mixed, 8);
    }
    return p;
}

static uint8_t *read_back(const Ops *op, const void *from, size_t bytes) {
    uint8_t *p = alloc_or_die(bytes, 1);
    op->copy(&(Copy){ p, from, bytes, COPY_OUT });
    op->wait();
    return p;
}

static void test_round_trip(const Layout *f, int n, int rows, int cols) {
    const Ops *op = cuda_ops();
    const size_t values = (size_t)n * (size_t)rows * (size_t)cols,
        file_bytes = values / (size_t)f->values * (size_t)f->bytes;
    uint8_t *file = random_bytes(file_bytes), *back = alloc_or_die(file_bytes, 1);
    Tensor w = { .data = file, .type = f->type, .rows = rows, .cols = cols, .n = n }, in_host = w;
    const size_t bytes = op->weight_bytes(&w);
    const char *name = gguf_type_name((int)f->type);
    void *room = op->reserve(bytes);
    op->upload(&w, room);
    uint8_t *planes = read_back(op, w.data, bytes);
    const size_t taken = blocks_of(f, planes, values, back);
    CHECK(taken == bytes, "%s: got %zu bytes, the table says %zu", name, bytes, taken);
    CHECK((double)bytes <= (double)file_bytes * 1.005 + 4 * 256, "%s: %zu bytes of the file take %zu", name, file_bytes,
          bytes);
    size_t off = 0;
    while (off < file_bytes && file[off] == back[off]) off++;
    CHECK(off == file_bytes, "%s, %d x %d x %d: byte %zu of block %zu: got %02x, want %02x", name, n, rows, cols,
          off % (size_t)f->bytes, off / (size_t)f->bytes, back[off % file_bytes], file[off % file_bytes]);

    in_host.in_host = true;
    CHECK(op->weight_bytes(&in_host) == 0, "%s: a table in host memory takes room on the device", name);
    Tensor again = in_host;
    op->upload(&in_host, NULL);
    op->upload(&again, NULL);
    op->wait();
    CHECK(in_host.data == again.data, "%s: a table in host memory is uploaded twice", name);
    const uint8_t *host = in_host.data;
    bool same = true;
    for (size_t i = 0, at = 0; i < 4; i++) {           // bytes between planes are not used
        const size_t size[4] = { values / 32 * (size_t)(4 * f->lo_bits), values / 32 * (size_t)(4 * f->hi_bits),
                                 values / (size_t)f->head_values * (size_t)f->head, values / 256 * (size_t)f->sup };
        same &= !memcmp(host + at, planes + at, size[i]);
        at = round_up(at + size[i], 256);
    }
    CHECK(same, "%s: a table in host memory has other bytes", name);
    op->release(room);
    free(file);
    free(back);
    free(planes);
}

static void test_floats(DType type) {
    const Ops *op = cuda_ops();
    const size_t values = 3 * 5 * 70, bytes = values * (type == T_F32 ? 4 : 2);
    uint8_t *file = random_bytes(bytes);
    Tensor w = { .data = file, .type = type, .rows = 5, .cols = 70, .n = 3 };
    void *room = op->reserve(op->weight_bytes(&w));
    op->upload(&w, room);
    uint8_t *back = read_back(op, w.data, bytes);
    CHECK(op->weight_bytes(&w) >= bytes && !memcmp(back, file, bytes), "%s: other bytes", gguf_type_name((int)type));
    op->release(room);
    free(file);
    free(back);
}

// In a child that initialises the device: uploads three chunks of a mapped file that was truncated to a quarter.
static void lose_pages(void) {
    const size_t bytes = (size_t)34 * 72 * 8200;
    const int err = open(in_tmp("err"), O_WRONLY | O_CREAT | O_TRUNC, 0600),
        fd = open(in_tmp("weights"), O_RDWR | O_CREAT, 0600);
    if (err < 0 || dup2(err, 2) < 0 || fd < 0 || ftruncate(fd, (off_t)bytes)) _exit(126);
    void *file = mmap(NULL, bytes, PROT_READ, MAP_PRIVATE, fd, 0);
    if (file == MAP_FAILED || ftruncate(fd, (off_t)bytes / 4)) _exit(126);
    const Ops *op = cuda_ops();
    if (!op) _exit(77);
    signal(SIGBUS, on_lost_pages);
    op->init(&(Limits){ .max_rows = STEP_ROWS, .max_cols = 1024, .vocab = 1024 });
    Tensor w = { .data = file, .type = T_Q8_0, .rows = 8200, .cols = 2304, .n = 1 };
    op->upload(&w, op->reserve(op->weight_bytes(&w)));
    op->wait();
    _exit(0);
}

static void test_shorter(void) {                       // before this process initialises the device
    fflush(stdout);
    const pid_t child = fork();
    if (!child) lose_pages();
    int status = -1;
    while (child > 0 && waitpid(child, &status, 0) < 0 && errno == EINTR) {}
    if (WIFEXITED(status) && WEXITSTATUS(status) == 77) return;
    char *err = text_of(in_tmp("err"));
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 1 && strstr(err, "gemma4: error: a model file was truncated"),
          "upload of a file that got shorter: status %d and: %s", status, err);
    free(err);
}

// Logits of a step, with this much memory for the plan; 0: all that there is.
static float *logits_of(const char *path, size_t memory, MemoryPlan *plan, size_t *needed, size_t *bytes) {
    Model *m = alloc_or_die(1, sizeof *m);
    const ModelOptions o = { .n_ctx = 64, .n_seqs = 1, .n_batch = STEP_ROWS, .n_logits = 3, .k_type = KV_F16,
                             .v_type = KV_F16, .memory = memory };
    load_model(m, path, cuda_ops(), o, NULL);
    float *logits = alloc_or_die(3 * (size_t)m->config.vocab, sizeof *logits);
    for (int i = 0; i < 3; i++) m->step_rows[i] = (StepRow){ .token = (17 + 101 * i) % m->config.vocab, .output = true };
    step(m, &(StepSeg){ .seq = 0, .kind = SEG_CHAIN, .n = 3, .rows = m->step_rows }, 1);
    for (int i = 0; i < 3; i++) read_logits(m, i, logits + (size_t)i * (size_t)m->config.vocab);
    *plan = m->plan;
    *needed = planned_memory(m);
    *bytes = 3 * (size_t)m->config.vocab * sizeof *logits;
    free_model(m);
    free(m);
    return logits;
}

static void test_model(const char *preset, const char *quant) {
    const char *path = make_model("layout", preset, quant, NULL);
    MemoryPlan plan[2];
    size_t needed[2], bytes, free_bytes, total;
    float *on_device = logits_of(path, 0, &plan[0], &needed[0], &bytes);
    if (cuda_ops()->card()->host_memory) {             // a table in host memory would save nothing; see test_device
        CHECK(!plan[0].in_host, "%s %s: a table is planned in host memory, which is the device's", preset, quant);
        free(on_device);
        return;
    }
    cuda_ops()->memory(&free_bytes, &total);           // memory used by other processes counts
    float *in_host = logits_of(path, needed[0] - 1 + total - free_bytes, &plan[1], &needed[1], &bytes);
    CHECK(!plan[0].in_host && plan[1].in_host, "%s %s: %zu and %zu bytes are planned in host memory", preset, quant,
          plan[0].in_host, plan[1].in_host);
    CHECK(plan[0].weights == plan[1].weights + plan[1].in_host,
          "%s %s: weights take %zu bytes, or %zu and %zu in host memory", preset,
          quant, plan[0].weights, plan[1].weights, plan[1].in_host);
    CHECK(needed[1] < needed[0], "%s %s: the plan is no smaller", preset, quant);
    CHECK(!memcmp(on_device, in_host, bytes), "%s %s: other logits with the table in host memory", preset, quant);
    free(on_device);
    free(in_host);
}

enum { PROMPT_ROWS = 66, N_STEPS = 10, STEP_TOKENS = 2 };

// Logits after a prompt and after each of some steps, of which the last ones are recorded and replayed.
static float *logits_with(const char *path, const char *place, size_t *bytes) {
    Model *m = alloc_or_die(1, sizeof *m);
    const ModelOptions o = { .n_ctx = 256, .n_seqs = 1, .n_batch = PROMPT_ROWS, .n_logits = 3, .k_type = KV_F16,
                             .v_type = KV_F16, .place = place };
    load_model(m, path, cuda_ops(), o, NULL);
    const size_t vocab = (size_t)m->config.vocab;
    float *logits = alloc_or_die((N_STEPS * STEP_TOKENS + 1) * vocab, sizeof *logits), *at = logits;
    for (int k = 0; k <= N_STEPS; k++) {
        const int n = k ? STEP_TOKENS : PROMPT_ROWS;
        for (int i = 0; i < n; i++)
            m->step_rows[i] = (StepRow){ .token = (17 + 101 * i + k) % m->config.vocab, .output = k || i == n - 1 };
        step(m, &(StepSeg){ .seq = 0, .kind = SEG_CHAIN, .n = n, .rows = m->step_rows }, 1);
        for (int i = 0; i < (k ? n : 1); i++, at += vocab) read_logits(m, i, at);
        commit_all(m);
    }
    CHECK(!place == !m->plan.in_host, "-ot %s: %zu bytes in host memory", place ? place : "", m->plan.in_host);
    *bytes = (size_t)(at - logits) * sizeof *logits;
    free_model(m);
    free(m);
    return logits;
}

// Weights in host memory give the same bits: all matrices, and with n = 4 experts of some layers, all experts, FFNs.
static void test_places(const char *preset, const char *quant, int n) {
    const char *path = make_model("places", preset, quant, NULL);
    const char *const places[] = { ".=CPU", "blk.[13].*exps=CPU", "exps=CPU", "ffn=CPU" };
    size_t bytes, same_bytes;
    float *on_device = logits_with(path, NULL, &bytes);
    for (int i = 0; i < n && !cuda_ops()->card()->host_memory; i++) {
        float *in_host = logits_with(path, places[i], &same_bytes);
        CHECK(same_bytes == bytes && !memcmp(on_device, in_host, bytes), "%s %s -ot %s: other logits", preset, quant,
              places[i]);
        free(in_host);
    }
    free(on_device);
}
#endif

int main(int argc, char **argv) {
    take_card(&argc, argv);
#ifdef USE_CUDA
    make_tmp();
    test_shorter();
    if (!cuda_ops()) {
        SKIP("no GPU: the layout of weights");
        return test_done("layout");
    }
    const Limits lim = { .max_rows = STEP_ROWS, .max_cols = 1024, .vocab = 1024 };
    cuda_ops()->init(&lim);
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) test_round_trip(&layouts[i], 2, 13, 512);
    test_round_trip(&layouts[12], 1, 6, 256);
    test_round_trip(&layouts[0], 1, 8200, 2304);       // three chunks, 20 MB
    test_floats(T_F32);
    test_floats(T_F16);
    test_floats(T_BF16);
    test_model("micro-e", "q8_0");
    bool few = false;
#ifdef EMULATED
    few = !getenv("LONG") || !strcmp(getenv("LONG"), "0");          // the emulator takes a second for each of these models
#endif
    test_places("micro-moe", "q4_0", few ? 2 : 4);
    if (!few) {
        test_model("micro-e", "f16");
        test_places("micro-e", "q8_0", 1);
    }
#else
    SKIP("built without CUDA: the layout of weights");
#endif
    return test_done("layout");
}
