/* test_load.c - loading a model: split files, damaged data, real sizes, the output on stderr, and mutated files.
 *
 * Run from the top of the repository. Small random models of make_gguf are rewritten, opened by the binary or by a
 * child of this program, which must end with exit status 0, or with 1 and one error line.
 *
 * Environment: BUILD, CC, TMPDIR (see files.h), GEMMA4 (./gemma4), LONG=1 (10,000 mutations instead of 300), SEED
 * (1). */
#define _GNU_SOURCE
#define TESTING
#include "../gemma4.c"
#include "test.h"
#include "files.h"
#include "pty.h"

static const char *gemma4;
static const ModelOptions small = { .n_ctx = 64, .n_seqs = 1, .n_batch = STEP_ROWS, .n_logits = 1, .k_type = KV_F16,
                                   .v_type = KV_F16 };

// Runs the binary on a model for a few greedy tokens, with one more flag or NULL. Its output goes to the files stdout
// and stderr.
static int run_model(const char *path, const char *flag) {
    const char *argv[] = { gemma4, path, "-p", "a b", "--raw", "-n", "8", "-c", "64", "--temp", "0", "--ignore-eos",
                           flag, NULL };
    return run_program(argv, in_tmp("stdout"), in_tmp("stderr"));
}

static bool output_has(const char *file, const char *text) {
    char *s = text_of(in_tmp("%s", file));
    const bool has = strstr(s, text) != NULL;
    free(s);
    return has;
}

// The model must be refused with one line that contains all given texts.
static void check_refused(const char *what, const char *path, const char *flag, const char *code, const char *names) {
    const int status = run_model(path, flag);
    char *err = text_of(in_tmp("stderr")), *line = strstr(err, "gemma4: error: ");
    CHECK(status == 1 && line && strstr(line, code) && strstr(line, names) && strchr(line, '\n') == strrchr(err, '\n'),
          "%s: expected status 1 and one line with %s and '%s', got %d and: %s", what, code, names, status, err);
    free(err);
}

// ---- split models ------------------------------------------------------------------------------------------------

// Writes NAME-00001-of-0000N.gguf etc., with consecutive tensors in each part. Returns the first path.
static const char *write_parts(const char *from, const char *name, int n, bool first_is_empty) {
    for (int i = n - 1; i >= 0; i--) {
        Draft d = read_draft(from);
        const size_t parts = (size_t)(n - first_is_empty), all = d.n_tensors;
        for (size_t k = 0; k < all; k++)
            if ((int)(k * parts / all) + first_is_empty != i) d.tensors[k].name[0] = 0;
        for (size_t k = 0; k < d.n_keys && i > 0; k++) d.keys[k].name[0] = 0;
        draft_u16(&d, "split.no", (unsigned)i);
        draft_u16(&d, "split.count", (unsigned)n);
        draft_u16(&d, "split.tensors.count", (unsigned)all);
        write_draft(&d, in_tmp("%s-%05d-of-%05d.gguf", name, i + 1, n));
    }
    return in_tmp("%s-%05d-of-%05d.gguf", name, 1, n);
}

static void test_split(const char *whole) {
    CHECK(run_model(whole, NULL) == 0, "the whole model does not run");
    char *want = text_of(in_tmp("stdout"));
    CHECK(want[0] != 0, "the whole model writes nothing");
    for (int n = 2; n <= 5; n++) {
        const int status = run_model(write_parts(whole, "m", n, n % 2), NULL);
        char *got = text_of(in_tmp("stdout"));
        CHECK(status == 0 && !strcmp(got, want), "%d parts: exit status %d, and the text of the whole model: %s", n,
              status, strcmp(got, want) ? "no" : "yes");
        CHECK(!output_has("stderr", "split."), "split.* are reported as unknown keys");
        free(got);
    }
    free(want);
    check_refused("the second part", in_tmp("m-00002-of-00003.gguf"), NULL, "(E_SPLIT_NO ", "-00001-of-00003.gguf");
    remove(in_tmp("m-00003-of-00003.gguf"));
    check_refused("a missing part", in_tmp("m-00001-of-00003.gguf"), NULL, "(E_SPLIT_MISSING",
                  "m-00003-of-00003.gguf");
}

// ---- --check-tensors, unknown names ------------------------------------------------------------------------------

// Overwrites bytes of tensor `name` at an offset with v.
static const char *write_damaged(const char *from, const char *name, size_t at, uint16_t v) {
    Draft d = read_draft(from);
    DraftTensor *t = draft_tensor(&d, name);
    if (CHECK(t && at + 2 <= t->data.n, "%s: no byte %zu of tensor '%s'", from, at, name))
        memcpy(t->data.data + at, &v, 2);
    return write_draft(&d, in_tmp("damaged.gguf"));
}

static void test_check_tensors(const char *f16, const char *q8) {
    const char *files[] = { f16, q8 };
    for (int i = 0; i < 2; i++) {
        CHECK(run_model(files[i], "--check-tensors") == 0, "--check-tensors refuses a good model");
        CHECK(output_has("stderr", "# checked "), "--check-tensors says nothing");
        CHECK(run_model(files[i], NULL) == 0 && !output_has("stderr", "# checked "),
              "tensors are checked without the flag");
    }
    check_refused("Q8_0 scale Inf", write_damaged(q8, "blk.1.ffn_up.weight", 34 * 7, 0x7c00), "--check-tensors",
                  "(E_PAYLOAD)", "'blk.1.ffn_up.weight'");
    check_refused("Q8_0 scale Inf", in_tmp("damaged.gguf"), "--check-tensors", "block 7 of type Q8_0",
                  "elements 224 to");
    check_refused("Q8_0 scale NaN", write_damaged(q8, "token_embd.weight", 0, 0x7e00), "--check-tensors",
                  "block 0 of type Q8_0", "'token_embd.weight'");
    check_refused("F16 NaN", write_damaged(f16, "blk.3.attn_q.weight", 2 * 1000, 0xfe00), "--check-tensors",
                  "block 1000 of type F16", "'blk.3.attn_q.weight'");
    check_refused("F32 Inf", write_damaged(f16, "output_norm.weight", 4 * 63 + 2, 0x7f80), "--check-tensors",
                  "block 63 of type F32", "'output_norm.weight'");
}

static void test_unknown(const char *model) {
    Draft d = read_draft(model);
    for (int i = 0; i < 5; i++) {
        char name[64];
        snprintf(name, sizeof name, "extra.%d.weight", i);
        if (i != 1) draft_add(&d, name, 4);
    }
    static const char *const known[] = { "v.blk.0.attn_q.weight", "a.conv.weight", "mm.input.weight",
                                         "blk.0.ffn_up.input_scale" };
    for (int i = 0; i < 4; i++) draft_add(&d, known[i], 4);
    draft_u16(&d, "quantize.imatrix.chunks_count", 1);
    draft_u16(&d, "gemma4.vision.block_count", 1);
    draft_u16(&d, "other.key", 1);
    CHECK(run_model(write_draft(&d, in_tmp("unknown.gguf")), NULL) == 0, "unknown tensors: the model does not run");
    CHECK(output_has("stderr", "# 4 unused tensors: extra.0.weight, extra.2.weight, extra.3.weight, ...\n"),
          "unknown tensors are not named, or others with them");
    CHECK(output_has("stderr", "# 4 unused keys: synthetic.preset, synthetic.kind, synthetic.seed, ...\n"),
          "unknown keys are not named, or others with them");
    CHECK(run_model("models/gemma4-mini-q8_0.gguf", NULL) == 0 && !output_has("stderr", "unused"),
          "an ordinary model is said to have unknown parts");
}

// ---- the table of check ----

// The line of a name shows a NaN or Inf of one layer, whatever the other values and layers are.
static void test_nan_stays(void) {
    float ones[] = { 1, 1, 1 }, nan[] = { 1, NAN, 2 }, tenth[] = { 1, 1.1f, 1 }, zeros[] = { 0, 0, 0 };
    Checkpoint a[] = { { "Qcur_pos", 0, 1, 3, ones }, { "Qcur_pos", 1, 1, 3, ones }, { "Qcur_pos", 2, 1, 3, ones },
                       { "attn_out", 0, 1, 3, zeros }, { "attn_out", 1, 1, 3, ones },
                       { "l_out", 0, 1, 3, zeros }, { "l_out", 1, 1, 3, ones } };
    Checkpoint b[] = { { "Qcur_pos", 0, 1, 3, ones }, { "Qcur_pos", 1, 1, 3, nan }, { "Qcur_pos", 2, 1, 3, tenth },
                       { "attn_out", 0, 1, 3, zeros }, { "attn_out", 1, 1, 3, tenth },
                       { "l_out", 0, 1, 3, ones }, { "l_out", 1, 1, 3, tenth } };
    Model x = { .checkpoints = a, .n_checkpoints = 7, .ops = cpu_ops() }, y = x;
    y.checkpoints = b;
    fflush(stdout);
    const pid_t child = fork();
    if (!child) {
        const int out = open(in_tmp("stdout"), O_WRONLY | O_CREAT | O_TRUNC, 0600);
        if (out < 0 || dup2(out, 1) < 0) _exit(126);
        const bool good = check_compare(&x, &y, "");
        fflush(stdout);
        _exit(good);
    }
    int status = -1;
    while (child > 0 && waitpid(child, &status, 0) < 0 && errno == EINTR) {}
    char *got = text_of(in_tmp("stdout"));
    CHECK(WIFEXITED(status) && !WEXITSTATUS(status), "a NaN passes");
    CHECK(strstr(got, "| Qcur_pos           |     1 |        inf |   1.0e-03 |       inf |   2.0e-02 | FAIL   |"),
          "a NaN is lost: %s", got);
    CHECK(strstr(got, "| attn_out           |     1 |    5.8e-02 |   1.0e-03 |   5.8e-02 |   5.0e-02 | FAIL   |"),
          "0 of 0 is shown: %s", got);
    CHECK(strstr(got, "| l_out              |     0 |        inf |   1.0e-03 |       inf |   5.0e-02 | FAIL   |"),
          "1 of 0 is lost: %s", got);
    CHECK(strstr(got, "first difference: layer 0, l_out: inf in the median row"), "the first layer comes first: %s", got);
    free(got);
}

// ---- too little memory ---------------------------------------------------------------------------------------------

static size_t small_device;                            // its memory in bytes
static void *no_reserve(size_t bytes) {
    (void)bytes;
    return NULL;
}
static void device_memory_of(size_t *free_bytes, size_t *total) { *free_bytes = *total = small_device; }

static size_t device_bytes(const Tensor *w) { return w->in_host ? 0 : matrix_bytes(w); }
static const Card *shared_card(void) { return find_card("gb10"); }

// A backend with its own weight memory of this size, which reserves nothing.
static const Ops *device_of(size_t memory) {
    static Ops ops;
    ops = *cpu_ops();
    ops.weight_bytes = device_bytes;
    ops.reserve = no_reserve;
    ops.memory = device_memory_of;
    small_device = memory;
    return &ops;
}

// Loads in a child process on such a backend. Returns its line on stderr.
static char *refused_plan(const char *path, size_t memory, ModelOptions o) {
    const Ops *ops = device_of(memory);
    fflush(stdout);
    const pid_t child = fork();
    if (!child) {
        const int err = open(in_tmp("stderr"), O_WRONLY | O_CREAT | O_TRUNC, 0600);
        if (err < 0 || dup2(err, 2) < 0) _exit(126);
        Model *m = must(calloc(1, sizeof *m));
        load_model(m, path, ops, o, NULL);
        _exit(0);
    }
    int status = -1;
    while (child > 0 && waitpid(child, &status, 0) < 0 && errno == EINTR) {}
    char *err = text_of(in_tmp("stderr"));
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 1 && strchr(err, '\n') == strrchr(err, '\n'),
          "no room: status %d and: %s", status, err);
    return err;
}

static void test_no_room(const char *path) {
    ModelOptions o = small;
    o.n_ctx = 100000;
    const struct { size_t memory, vram; const char *says[4]; } cases[] = {
        { (size_t)1 << 40, 0, { "gemma4: error: out of memory: a context of 100000 needs ",
                                " of 992.00 GiB free; try -c 49984, -ctk q8_0, a smaller",
                                "", "" } },
        { 20 << 20, 0, { "out of memory: a context of 100000 needs ", "(weights 0.00, KV cache ",
                         " of 0.02 GiB free; try -c ",
                         ", a smaller model\n" } },
        { 1 << 10, 0, { "out of memory", "GiB free; try -ctk q8_0, a smaller model\n", "", "" } },
        { (size_t)1 << 40, 20 << 20, { "of 0.02 GiB allowed by --vram; try -c ",
                                       ", a larger --vram, a smaller model\n", "", "" } },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        o.memory = cases[i].vram;
        char *err = refused_plan(path, cases[i].memory, o);
        for (int k = 0; k < 4; k++)
            CHECK(strstr(err, cases[i].says[k]), "no room, case %zu: expected '%s' in: %s", i, cases[i].says[k], err);
        free(err);
    }
    const struct { const char *from, *says; } froms[] = {
        { "-p, -n or -d", "free; try a smaller -p, -n or -d, -ctk q8_0, a smaller model\n" }, { "",
                 "free; try -ctk q8_0, a smaller model\n" } };
    o.memory = 0;
    for (size_t i = 0; i < sizeof froms / sizeof *froms; i++) {
        o.ctx_from = froms[i].from;
        char *err = refused_plan(path, 20 << 20, o);
        CHECK(strstr(err, froms[i].says), "no room: expected '%s' in: %s", froms[i].says, err);
        free(err);
    }
    o.ctx_from = NULL;
    o.n_ctx = 64;
    o.k_type = o.v_type = KV_F32;
    char *err = refused_plan(path, 1 << 10, o);
    CHECK(strstr(err, "-ctk f16"), "no room: a smaller type is not named: %s", err);
    free(err);
}

// The per-layer table is in host memory if the context does not fit otherwise, and on the device if it does: the
// longest context is the same for every way to request it.
static void test_table(const char *path) {
    Model *m = must(calloc(1, sizeof *m));
    ModelOptions o = small;
    plan_model(m, path, device_of((size_t)1 << 40), o, NULL);
    CHECK(!m->plan.in_host, "the table leaves a device that has room for it");
    o.memory = fit_context(m, 64, SIZE_MAX);
    const int most = largest_context(m, m->config.n_ctx_train, o.memory);
    CHECK(most > 64, "no context above 64 fits without the table");
    CHECK(fit_context(m, most, o.memory) <= o.memory && m->plan.in_host, "%d does not fit, or not without the table",
          most);
    CHECK(most == m->config.n_ctx_train || fit_context(m, most + TILE_SLOTS, o.memory) > o.memory, "more than %d fits",
          most);
    CHECK(fit_context(m, 64, o.memory) == o.memory && !m->plan.in_host, "the table does not come back");
    free_model(m);
    const struct { int n_ctx, is; } asked[] = { { 64, 64 }, { most, most }, { CTX_FIT, most } };
    for (size_t i = 0; i < sizeof asked / sizeof *asked; i++) {
        o.n_ctx = asked[i].n_ctx;
        plan_model(m, path, device_of((size_t)1 << 40), o, NULL);
        CHECK(m->options.n_ctx == asked[i].is && !m->plan.in_host == (asked[i].is == 64),
              "context %d: got %d, %zu bytes of the table in host memory", asked[i].n_ctx, m->options.n_ctx,
              m->plan.in_host);
        const int again = largest_context(m, m->config.n_ctx_train, o.memory);
        CHECK(again == most, "after a plan for %d: the longest is %d, then %d", o.n_ctx, most, again);
        free_model(m);
    }
    free(m);
}

// A device that shares the host's memory: the table stays there, memory for the host is subtracted, and weights can be
// read again after their pages of the file were dropped.
static void test_shared_memory(const char *path) {
    Model *m = must(calloc(1, sizeof *m)), *plain = must(calloc(1, sizeof *plain));
    ModelOptions o = small;
    Ops ops = *device_of((size_t)1 << 30);
    ops.card = shared_card;
    plan_model(m, path, &ops, o, NULL);
    const size_t needed = fit_context(m, 64, SIZE_MAX), budget = plan_budget(m);
    CHECK(budget == ((size_t)1 << 30) / 32 * 31, "shared memory: a budget of %zu bytes", budget);
    CHECK(fit_context(m, 64, needed - 1) == needed && !m->plan.in_host,
          "shared memory: %zu bytes of the table leave it", m->plan.in_host);
    m->options.host_memory = (size_t)1 << 29;
    CHECK(plan_budget(m) == ((size_t)1 << 29) / 32 * 31,
          "shared memory: the host takes half, and the budget is %zu bytes",
          plan_budget(m));
    m->options.host_memory = (size_t)1 << 31;
    CHECK(!plan_budget(m), "shared memory: a budget of %zu bytes where the host takes all", plan_budget(m));
    free_model(m);

    ops = *cpu_ops();
    ops.card = shared_card;
    ops.memory = cpu_ops()->memory;
    load_model(plain, path, cpu_ops(), o, NULL);
    load_model(m, path, &ops, o, NULL);
    float *logits[2];
    for (int i = 0; i < 2; i++) {
        Model *of = i ? plain : m;
        of->step_rows[0] = (StepRow){ .token = 17, .output = true };
        step(of, &(StepSeg){ .seq = 0, .kind = SEG_CHAIN, .n = 1, .rows = of->step_rows }, 1);
        read_logits(of, 0, logits[i] = must(calloc((size_t)of->config.vocab, sizeof(float))));
    }
    CHECK(!memcmp(logits[0], logits[1], (size_t)m->config.vocab * sizeof(float)),
          "other logits after pages were dropped");
    for (int i = 0; i < 2; i++) {
        free(logits[i]);
        free_model(i ? plain : m);
    }
    free(m);
    free(plain);
}

// A file that is truncated while the program reads it, on one thread or several.
static void test_shorter(const char *model) {
    for (int n = 1; n <= 3; n += 2) {
        Draft d = read_draft(model);
        const char *path = write_draft(&d, in_tmp("shorter.gguf"));
        struct stat st;
        if (!CHECK(!stat(path, &st), "%s: %s", path, strerror(errno))) return;
        fflush(stdout);
        const pid_t child = fork();
        if (!child) {
            const int err = open(in_tmp("stderr"), O_WRONLY | O_CREAT | O_TRUNC, 0600);
            if (err < 0 || dup2(err, 2) < 0) _exit(126);
            use_threads(0);
            start_threads(n);
            Model *m = must(calloc(1, sizeof *m));
            load_model(m, path, cpu_ops(), small, NULL);
            if (truncate(path, st.st_size / 4)) _exit(127);
            read_weights(m, true);
            _exit(0);
        }
        int status = -1;
        while (child > 0 && waitpid(child, &status, 0) < 0 && errno == EINTR) {}
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 1 &&
              output_has("stderr", "gemma4: error: a model file was truncated"),
              "a file that got shorter, %d threads: status %d", n, status);
    }
}

// ---- the terminal ------------------------------------------------------------------------------------------------

// Runs the binary with stderr on a terminal. interrupt: Ctrl-C as soon as a progress bar is shown. Returns the exit
// status, or 1000 + signal; -1: no terminal available.
static int run_on_terminal(Pty *p, const char *const argv[], bool interrupt) {
    if (!pty_start(p, argv, PTY_ERR, NULL)) return -1;
    if (interrupt) {
        CHECK(pty_expect(p, "  ["), "no bar to interrupt: %s", p->shows);
        kill(p->pid, SIGINT);
    }
    return pty_end(p, NULL);
}

static void test_terminal(const char *model, const char *large) {
    static Pty p;
    const char *shows = p.shows;
    const char *argv[] = { gemma4, model, "-p", "a b", "--raw", "-n", "2", "-c", "64", NULL };
    int status = run_on_terminal(&p, argv, false);
    if (status == -1) {
        SKIP("no terminal to be had: the bar");
        return;
    }
    CHECK(status == 0, "on a terminal: exit status %d", status);
    CHECK(strstr(shows, "\r# Synthetic Gemma 4 mi  ") && strstr(shows, " MB  [>         ]  0 %"),
          "no bar while loading: %s", shows);
    CHECK(strstr(shows, "\r\033[K# 2 tokens, "), "the bar is still shown after the work: %s", shows);
    CHECK(run_model(model, NULL) == 0 && !output_has("stderr", "\r") && !output_has("stderr", "\033"),
          "a bar goes to a file");
    if (!large) return;
    const char *with_check[] = { gemma4, large, "-p", "a", "-c", "64", "--check-tensors", NULL };    // a file of 17 GB
    status = run_on_terminal(&p, with_check, true);
    CHECK(status == 1000 + SIGINT, "Ctrl-C while reading: expected the end by SIGINT, got status %d", status);
}

// ---- real size ---------------------------------------------------------------------------------------------------

// A 26B model with real shapes whose matrices are holes in the file: 16.8 GB that take 10 MB of disk. NULL: the file
// system has no holes.
static const char *test_true_size(void) {
    const char *path = in_tmp("26b.gguf");
    char program[1024];
    snprintf(program, sizeof program, "%s/make_gguf", getenv("BUILD") ? getenv("BUILD") : "build");
    const char *argv[] = { access(program, X_OK) ? in_tmp("make_gguf") : program, "--preset", "26b-a4b", "--quant",
                           "q4_k_m",
                           "--sparse", "--out", path, NULL };
    struct stat st;
    if (run_program(argv, in_tmp("stdout"), in_tmp("stderr")) || stat(path, &st) || (double)st.st_blocks * 512 > 1e9) {
        SKIP("no sparse files here: a 26B of true size");
        remove(path);
        return NULL;
    }
    // Published files of this type have 658 tensors: F32 392, Q4_K 192, Q5_0 32, Q8_0 28, Q6_K 14.
    static const struct { int type, n; } want[] = {
        { GGUF_F32, 392 }, { GGUF_Q4_K, 192 }, { GGUF_Q5_0, 32 }, { GGUF_Q8_0, 28 }, { GGUF_Q6_K, 14 } };
    const double start = seconds();
    Gguf g;
    if (!CHECK(gguf_open(&g, path) == 0, "26B: %s", g.err)) return NULL;
    const double opened = seconds() - start;
    CHECK(g.n_tensors == 658, "26B: expected 658 tensors, got %zu", g.n_tensors);
    for (int i = 0; i < 5; i++) {
        int n = 0;
        for (size_t k = 0; k < g.n_tensors; k++) n += g.tensors[k].type == want[i].type;
        CHECK(n == want[i].n, "26B: expected %d tensors of type %s, got %d", want[i].n, gguf_type_name(want[i].type),
              n);
    }
    CHECK(g.file_size > (size_t)16700000000 && g.file_size < (size_t)16900000000, "26B: %zu bytes", g.file_size);
    gguf_close(&g);
    fflush(stdout);
    const pid_t child = fork();
    if (!child) {
        const double from = seconds();
        Model *m = must(calloc(1, sizeof *m));
        Tokenizer t;
        load_model(m, path, cpu_ops(), small, NULL);
        const double bound = seconds() - from;
        load_tokenizer(&t, &m->gguf, m->config.vocab);
        printf("26B, %.1f GB: opened and checked in %.3f s; with config, binding and plan %.3f s; "
               "with the tokenizer %.3f "
               "s\n", (double)m->gguf.file_size / 1e9, opened, bound, seconds() - from);
        const bool ok = m->config.n_layers == 30 && m->config.n_experts == 128 && m->config.vocab == 262144;
        fflush(stdout);
        _exit(ok ? 0 : 3);
    }
    int status = -1;
    while (child > 0 && waitpid(child, &status, 0) < 0 && errno == EINTR) {}
    CHECK(status == 0, "26B: config, binding and tokenizer: status %d", status);
    return path;
}

// ---- mutations ---------------------------------------------------------------------------------------------------

static uint64_t rng_state;
static uint64_t rng(void) {
    rng_state = rng_state * 6364136223846793005u + 1442695040888963407u;
    return rng_state >> 29;
}

// A child process runs a mutated file like a user, for three tokens.
static void use_model(const char *path, bool check) {
    Model *m = must(calloc(1, sizeof *m));
    Tokenizer t;
    load_model(m, path, cpu_ops(), small, NULL);
    load_tokenizer(&t, &m->gguf, m->config.vocab);
    print_plan(m);
    read_weights(m, check);
    TokIds ids = { 0 };
    const TokChat chat = { .messages = { "[{\"role\":\"user\",\"content\":\"ab\"}]", 32 }, .add_cue = true };
    if (tok_chat(&t, &chat, &ids, NULL) < 0) die("-p: %s", t.err);
    if (ids.n > 40) die("the prompt has %zu tokens", ids.n);
    const AnswerOptions g = { .n_predict = 3, .ignore_eos = true, .think_budget = -1,
                                .sampling = { .seed = 1, .temperature = 1, .top_k = 64, .top_p = 0.95f, .repeat = 1 } };
    Session s;
    init_session(&s, m, &t, 0);
    if (!session_start(&s, &(Prompt){ .ids = ids.ids, .n = (int)ids.n, .n_head = 1 }, &g)) die("%s", s.err);
    if (!print_answer(&s, &(ShowOptions){ 0 })) die("%s", s.err);
    print_turn(&s.turn);
    free_session(&s);
    tok_ids_free(&ids);
    tok_free(&t);
    free_model(m);
    free(m);
}

// Changes a few bytes of the file, or truncates it. Most changes are in the first 4 KB and in the tensors' names,
// shapes and types.
static void mutate(uint8_t *file, size_t *size, size_t infos, size_t data) {
    static const uint64_t values[] = { 0, 1, 2, 3, 7, 31, 32, 255, 256, 65535, 0x7fffffff, 0x80000000, 0xffffffff,
                                       (uint64_t)1 << 32, (uint64_t)1 << 62, (uint64_t)1 << 63, UINT64_MAX,
                                       UINT64_MAX - 31 };
    for (size_t k = 1 + rng() % 4 / 3; k > 0; k--) {
        const unsigned where = (unsigned)(rng() % 16);
        size_t at = where < 7 ? rng() % 4096 : where < 12 ? infos + rng() % (data - infos)
                                                          : rng() % (where < 14 ? data : *size);
        if (at + 8 > *size) at = *size - 8;
        const uint64_t value = values[rng() % (sizeof values / sizeof *values)];
        switch (rng() % 5) {
        case 0: file[at] ^= (uint8_t)(1 << rng() % 8); break;
        case 1: file[at] = (uint8_t)rng(); break;
        case 2: memcpy(file + at, &value, 4); break;
        case 3: memcpy(file + at, &value, 8); break;
        default: memmove(file + at, file + rng() % (*size - 8), 8); break;
        }
    }
    if (rng() % 30 == 0) *size = 8 + rng() % (*size - 8);
}

static void test_mutations(const char *const *models, int n_models, int n) {
    size_t accepted = 0, refused = 0;
    for (int k = 0; k < n_models; k++) {
        Gguf g;
        if (!CHECK(gguf_open(&g, models[k]) == 0, "%s: %s", models[k], g.err)) continue;
        const size_t infos = (size_t)((const uint8_t *)g.tensors[0].name.s - g.meta), data = g.data_start;
        gguf_close(&g);
        size_t whole = 0;
        uint8_t *good = read_file(models[k], &whole, "test"), *file = must(malloc(whole));
        const char *path = in_tmp("mutant.gguf"), *err_path = in_tmp("stderr");
        for (int i = k; i < n; i += n_models) {
            size_t size = whole;
            rng_state = (getenv("SEED") ? strtoull(getenv("SEED"), NULL, 10) : 1) * 1000003 + (uint64_t)i;
            for (int j = 0; j < 4; j++) rng();
            memcpy(file, good, whole);
            mutate(file, &size, infos, data);
            FILE *f = must(fopen(path, "wb"));
            const bool ok = fwrite(file, 1, size, f) == size;
            if (!CHECK(!fclose(f) && ok, "%s: %s", path, strerror(errno))) break;
            fflush(stdout);
            const pid_t child = fork();
            if (!child) {
                const int err = open(err_path, O_WRONLY | O_CREAT | O_TRUNC, 0600), null = open("/dev/null", O_WRONLY);
                if (err < 0 || null < 0 || dup2(err, 2) < 0 || dup2(null, 1) < 0) _exit(126);
                alarm(60);
                use_model(path, i % 4 == 0);
                _exit(0);
            }
            int status = -1;
            while (child > 0 && waitpid(child, &status, 0) < 0 && errno == EINTR) {}
            char *err = text_of(err_path), *error = strstr(err, "gemma4: error: ");
            const bool fine = status == 0 ? !error : WIFEXITED(status) && WEXITSTATUS(status) == 1 && error &&
                              strchr(error, '\n') == strrchr(err, '\n');
            CHECK(fine, "mutation %d of %s: status %d, stderr: %s", i, models[k], status, err);
            status == 0 ? accepted++ : refused++;
            free(err);
        }
        free(file);
        free(good);
    }
    printf("%zu mutations: %zu ran, %zu refused\n", accepted + refused, accepted, refused);
    CHECK(accepted && refused, "mutations: %zu ran, %zu refused: both should occur", accepted, refused);
}

int main(void) {
    make_tmp();
    gemma4 = getenv("GEMMA4") ? getenv("GEMMA4") : "./gemma4";
    start_threads(1);
    static const char *const presets[] = { "micro-dense", "micro-moe", "micro-e" }, *const quants[] = { "f16", "q8_0" };
    char models[6][1024];
    const char *list[6];
    for (int i = 0; i < 6; i++) {
        char name[32];
        snprintf(name, sizeof name, "%s-%s", presets[i % 3], quants[i / 3]);
        snprintf(models[i], sizeof models[i], "%s", make_model(name, presets[i % 3], quants[i / 3], NULL));
        list[i] = models[i];
    }
    test_nan_stays();
    test_no_room(models[1]);
    test_table(models[2]);
    test_shared_memory(models[2]);
    test_shorter(models[1]);
    const char *large = test_true_size();
    if (access(gemma4, X_OK)) {
        SKIP("no gemma4 to run: split models, --check-tensors, unknown names, the terminal");
    } else {
        char path[1024] = "";
        if (large) snprintf(path, sizeof path, "%s", large);
        for (int i = 0; i < 3; i++) test_split(models[i]);
        test_check_tensors(models[0], models[3]);
        test_unknown(models[1]);
        test_terminal(models[0], path[0] ? path : NULL);
    }
    const char *is_long = getenv("LONG");
    test_mutations(list, 6, is_long && strcmp(is_long, "0") ? 10000 : 300);
    return test_done("load");
}
