/* test_device.c - the GPU that is found, or pretended (--card): what the CUDA backend takes it for, what the command line says,
 * what changes where its memory is the host's.
 *
 *   refusals   unknown names; --card without a GPU or without CUDA: one line that says what to do
 *   plans      gemma4 plan --card, on a GPU and without one: the same bytes
 *   cards      each name of parts/cards.h, on each emulated GPU: no more of anything than either has
 *   faults     a driver that is too old, a GPU that is, code for other GPUs: one line each, and the CPU runs where it can
 *   memory     shared with the host: tables stay on the device, pages of the file are dropped once they are uploaded
 *
 * The program runs in children, which start the device anew and hide it as they like. Run from the top of the repository.
 * Environment: BUILD, CC, TMPDIR (see files.h). */
static int main_of_gemma4(int argc, char **argv);
#define main main_of_gemma4
#include "../gemma4.c"
#undef main
#include "card.h"
#include "test.h"
#include "files.h"

#ifdef USE_CUDA
enum { HAS_CUDA = 1 };
#else
enum { HAS_CUDA = 0 };
#endif
#define MINI "models/gemma4-mini-q8_0.gguf"
enum { VISIBLE = 1, HIDDEN = 0 };

// In a child: the GPU that the emulator is, and its fault; NULL: an H100 without one. HIDDEN: there is none.
static void choose_gpu(int visible, const char *card, const char *fault) {
    if (visible) unsetenv("CUDA_VISIBLE_DEVICES");
    else setenv("CUDA_VISIBLE_DEVICES", "", 1);
    if (fault) setenv("CUDA_ON_CPU_FAULT", fault, 1);
#ifdef EMULATED
    if (card) cuda_on_cpu(card);
#else
    (void)card;
#endif
}

static void send_to(const char *name, int fd) {        // in a child: what it writes there goes to a file
    const int file = open(in_tmp("%s", name), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (file < 0 || dup2(file, fd) < 0) _exit(126);
}

static int wait_for_child(pid_t child) {
    int status = -1;
    while (child > 0 && waitpid(child, &status, 0) < 0 && errno == EINTR) {}
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

static char *out, *err;                                // of the last run

// Runs gemma4 with these words, which spaces part, and returns its exit status.
static int gemma4(int visible, const char *card, const char *fault, const char *words) {
    char line[1200], *argv[40] = { "gemma4" }, *rest = line;
    int argc = 1;
    snprintf(line, sizeof line, "%s", words);
    for (char *word; (word = strsep(&rest, " ")); ) argv[argc++] = word;
    fflush(stdout);
    const pid_t child = fork();
    if (!child) {
        send_to("out", 1);
        send_to("err", 2);
        choose_gpu(visible, card, fault);
        const int status = main_of_gemma4(argc, argv);
        fflush(stdout);
        _exit(status);
    }
    const int status = wait_for_child(child);
    free(out), free(err);
    out = text_of(in_tmp("out")), err = text_of(in_tmp("err"));
    return status;
}

static bool is_one_line(const char *s) { return *s && strchr(s, '\n') == s + strlen(s) - 1; }

static void check_refused(int visible, const char *words, const char *says) {
    const int status = gemma4(visible, NULL, NULL, words);
    CHECK(status == 1 && is_one_line(err) && strstr(err, "gemma4: error: --card") && strstr(err, says),
          "gemma4 %s: expected status 1 and a line with '%s', got %d and: %s", words, says, status, err);
}

// ==== Refusals =======================================================================================================

static void test_refusals(void) {
    char names[200] = "";
    for (int i = 0; i < N_CARDS; i++)
        snprintf(names + strlen(names), sizeof names - strlen(names), "%s%s", i ? "|" : "", cards[i].name);
    CHECK(!strcmp(names, CARD_NAMES), "the names of cards are %s, CARD_NAMES %s", names, CARD_NAMES);
    for (int i = 0; i < N_CARDS; i++) CHECK(find_card(cards[i].name) == &cards[i], "%s is there twice", cards[i].name);
    check_refused(HIDDEN, "plan " MINI " --card rtx9999", "expected " CARD_NAMES ", got 'rtx9999'");
    check_refused(HIDDEN, "tokenize " MINI " -p hi --card rtx3090", "is not a tokenize option");
    const char *runs[] = { MINI " -p hi -n 1", "bench " MINI, "check " MINI, "ppl " MINI " -f README.md", "niah " MINI,
                           "logits " MINI " --ids x -o x" };
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) {
        char words[200];
        snprintf(words, sizeof words, "%s --card rtx3090", runs[i]);
        check_refused(HIDDEN, words, HAS_CUDA ? "no GPU found" : "make cuda");
    }
    if (!HAS_CUDA)
        check_refused(HIDDEN, "plan " MINI " --card rtx3090", "this build has no CUDA; build with make cuda");
}

#ifdef USE_CUDA
// ==== Plans ==========================================================================================================

// The line of the last output that begins like this, without its end; "": there is none. Until the next call.
static const char *line_of(const char *text, const char *begin) {
    static char line[2][300];
    static int turn;
    char *to = line[turn ^= 1];
    const size_t n = strlen(begin);
    *to = 0;
    for (const char *at = text; at && *at; at = strchr(at, '\n') ? strchr(at, '\n') + 1 : NULL)
        if (!strncmp(at, begin, n)) snprintf(to, 300, "%.*s", (int)strcspn(at, "\n"), at);
    return to;
}

static void test_plans(bool has_gpu) {
    const char *sizes[] = { "weights ", "global KV ", "window KV ", "activations ", "scratch ", "total " };
    char planned[6][300];
    CHECK(gemma4(HIDDEN, NULL, NULL, "plan " MINI " --card rtx3090") == 0, "a plan without a GPU: %s", err);
    CHECK(!strcmp(line_of(out, "card "), "card         rtx3090 (pretended), compute capability 8.6, 82 SMs, 24.0 GiB"),
          "the plan's card: %s", line_of(out, "card "));
    CHECK(strstr(out, "available       23.250 GiB"), "a plan without a GPU: not the card's memory: %s", line_of(out, "available"));
    CHECK(!*err, "a plan says: %s", err);
    for (int i = 0; i < 6; i++) snprintf(planned[i], sizeof *planned, "%s", line_of(out, sizes[i]));
    CHECK(gemma4(HIDDEN, NULL, NULL, "plan " MINI " --card gb10") == 0 && strstr(out, "128.0 GiB shared with the host\n"),
          "a plan for a GB10: %s%s", out, err);
    CHECK(gemma4(HIDDEN, NULL, NULL, "plan " MINI " --card rtx3090 --vram 0.02 -c 100000") == 1 && is_one_line(err) &&
          strstr(err, "out of memory"), "a plan that does not fit: %s", err);
    CHECK(gemma4(HIDDEN, NULL, NULL, "plan " MINI) == 0 && !strstr(out, "card "), "a plan on the CPU names a card: %s", out);
    if (!has_gpu) return;
    CHECK(gemma4(VISIBLE, NULL, NULL, "plan " MINI " --card rtx3090") == 0, "a plan: %s", err);
    CHECK(!strncmp(line_of(out, "card "), "card         rtx3090 (pretended), compute capability 8.6, 82 SMs, ", 66),
          "the plan's card: %s", line_of(out, "card "));
    for (int i = 0; i < 6; i++)
        CHECK(*planned[i] && !strcmp(planned[i], line_of(out, sizes[i])), "without a GPU: %s; on one: %s", planned[i],
              line_of(out, sizes[i]));
    CHECK(gemma4(VISIBLE, NULL, "little", "plan " MINI) == 0, "a plan: %s", err);
    CHECK(strstr(out, "\ncard         ") && !strstr(out, "pretended"), "the plan's card: %s", line_of(out, "card"));
}

static void test_runs(const char *model) {
    char words[1100], text[300];
    snprintf(words, sizeof words, "%s -p ab --raw -v -n 3 -c 64 --temp 0 --ignore-eos -t 1", model);
    CHECK(gemma4(VISIBLE, NULL, NULL, words) == 0 && strstr(err, "# backend: cuda, ") && strstr(err, "\n# card: "),
          "a run: %s", err);
    CHECK(!strstr(err, "pretended"), "a run: %s", line_of(err, "# card"));
    snprintf(text, sizeof text, "%s", out);
    strcat(words, " --card rtx3090");
    CHECK(gemma4(VISIBLE, NULL, NULL, words) == 0, "a run as on an rtx3090: %s", err);
    CHECK(!strncmp(line_of(err, "# card: "), "# card: rtx3090 (pretended), compute capability 8.6, 82 SMs, ", 60),
          "the card of a run: %s", line_of(err, "# card: "));
    CHECK(!strcmp(text, out), "as on an rtx3090 the text is '%s', else '%s'", out, text);
}

// ==== --backend ======================================================================================================
// The plain kernels tell the CPU's story. In the emulator a token takes a while, so there are few of them.

static void test_backends(void) {
    static const char *minis[] = { MINI, "models/gemma4-mini-e-q8_0.gguf" };
    for (size_t i = 0; i < sizeof minis / sizeof *minis; i++) {
        char words[300];
        snprintf(words, sizeof words, "%s --raw -v -p Once -n 16 -c 64 --temp 0 -t 1 --backend cpu", minis[i]);
        CHECK(gemma4(VISIBLE, NULL, NULL, words) == 0 && strstr(err, "# backend: cpu, "), "--backend cpu: %s", err);
        char *want = strdup(out);
        memcpy(strstr(words, "cpu"), "plain", 6);
        CHECK(gemma4(VISIBLE, NULL, NULL, words) == 0 && strstr(err, "# backend: plain, ") && *want && !strcmp(out, want),
              "%s: got '%s', want '%s': %s", words, out, want, err);
        free(want);
    }
    CHECK(gemma4(HIDDEN, NULL, NULL, MINI " -p hi --backend plain") == 1 && strstr(err, "--backend: plain: no GPU found"),
          "--backend plain without a GPU: %s", err);
    CHECK(gemma4(VISIBLE, NULL, NULL, MINI " -p hi --backend plain --card rtx3090") == 1 &&
          strstr(err, "--card: expected --backend cuda, got plain"), "--backend plain --card: %s", err);
}

#ifdef EMULATED
// ==== Cards ==========================================================================================================

typedef struct {
    Card   card;
    char   name[256];
    size_t free, total;
} Found;

// What the backend takes an emulated GPU for that pretends to be another one, or (NULL) itself.
static bool find(const char *gpu, const char *pretended, Found *f) {
    int ends[2];
    if (pipe(ends)) return false;
    fflush(stdout);
    const pid_t child = fork();
    if (!child) {
        choose_gpu(VISIBLE, gpu, NULL);
        cuda_pretend(pretended ? find_card(pretended) : NULL);
        f->card = *cuda_ops()->card();
        snprintf(f->name, sizeof f->name, "%s", f->card.name);
        cuda_ops()->memory(&f->free, &f->total);
        _exit(write(ends[1], f, sizeof *f) != sizeof *f);
    }
    close(ends[1]);
    const bool all = read(ends[0], f, sizeof *f) == sizeof *f;
    close(ends[0]);
    return wait_for_child(child) == 0 && all;
}

static void test_cards(void) {
    const size_t emulated = (size_t)8 << 30;           // bytes that every emulated GPU has
    for (int g = 0; g < N_CARDS; g++)
        for (int p = -1; p < N_CARDS; p++) {
            const Card *gpu = &cards[g], *as = p < 0 ? gpu : &cards[p];
            char name[64];
            snprintf(name, sizeof name, "%s%s", p < 0 ? "emulated " : "", as->name);
            Found f = { 0 };
            if (!CHECK(find(gpu->name, p < 0 ? NULL : as->name, &f), "%s as %s: the child failed", gpu->name, name)) continue;
            const Card *c = &f.card;
            CHECK(!strcmp(f.name, name), "%s as %s: it is called %s", gpu->name, name, f.name);
            CHECK(c->major == as->major && c->minor == as->minor, "%s as %s: %d.%d", gpu->name, name, c->major, c->minor);
#define LESSER(field) \
            CHECK(c->field == (gpu->field < as->field ? gpu->field : as->field), "%s as %s: " #field, gpu->name, name)
            LESSER(n_sm), LESSER(block_shared), LESSER(sm_shared), LESSER(sm_threads), LESSER(sm_registers), LESSER(l2);
#undef LESSER
            CHECK(c->memory == emulated && f.total == emulated && f.free <= f.total && f.free > 0,
                  "%s as %s: %zu bytes, %zu free of %zu", gpu->name, name, c->memory, f.free, f.total);
            CHECK(c->host_memory == (gpu->host_memory || as->host_memory), "%s as %s: host_memory", gpu->name, name);
            CHECK(c->starts_early == (gpu->starts_early && as->starts_early), "%s as %s: starts_early", gpu->name, name);
        }
    static Card small;                                 // of less memory than is there
    small = cards[0];
    small.memory = (size_t)3 << 30;
    int ends[2];
    size_t memory[2] = { 0, 0 };
    if (pipe(ends)) return;
    const pid_t child = fork();
    if (!child) {
        choose_gpu(VISIBLE, NULL, NULL);
        cuda_pretend(&small);
        void *p = cuda_ops()->reserve((size_t)1 << 30);
        cuda_ops()->memory(&memory[0], &memory[1]);
        _exit(!p || write(ends[1], memory, sizeof memory) != sizeof memory);
    }
    close(ends[1]);
    const bool all = read(ends[0], memory, sizeof memory) == sizeof memory;
    close(ends[0]);
    CHECK(wait_for_child(child) == 0 && all && memory[1] == small.memory && memory[0] == small.memory - ((size_t)1 << 30),
          "a card of 3 GiB, 1 GiB in use: %zu bytes free of %zu", memory[0], memory[1]);
}

// ==== Faults =========================================================================================================

static void test_faults(const char *model) {
    char run[1100], as_card[1200];
    snprintf(run, sizeof run, "%s -p ab --raw -v -n 1 -c 64 --temp 0 --ignore-eos -t 1", model);
    snprintf(as_card, sizeof as_card, "%s --card rtx3090", run);
    static const struct { const char *fault, *says, *backend; } unused[] = {
        { "driver", "# cuda: the driver supports CUDA 11.4, but this program was built with CUDA 12.0: no GPU is used; "
                    "update the driver, or build with an older toolkit\n", "cpu (no GPU usable by this build)" },
        { "old", "# cuda: emulated h100 has compute capability 7.0, but the fast kernels need 8.0 or newer; "
          "--backend plain runs on it\n", "plain" },
        { "none", "", "cpu (no GPU usable by this build)" } };
    for (size_t i = 0; i < sizeof unused / sizeof *unused; i++) {
        const char *fault = unused[i].fault, *says = unused[i].says;
        char backend[80];
        snprintf(backend, sizeof backend, "# backend: %s, ", unused[i].backend);
        CHECK(gemma4(VISIBLE, NULL, fault, run) == 0, "fault %s: no other backend runs: %s", fault, err);
        const char *said = strstr(err, says);
        CHECK(said && !strstr(said + !!*says, "# cuda: ") && strstr(err, backend),
              "fault %s: expected '%s' once in: %s", fault, says, err);
        CHECK(gemma4(VISIBLE, NULL, fault, as_card) == 1 && strstr(err, "--card: rtx3090: no GPU found"),
              "fault %s: --card: %s", fault, err);
        CHECK(gemma4(VISIBLE, NULL, fault, "plan " MINI " --card rtx3090") == 0 && !strcmp(err, says) &&
              strstr(out, "rtx3090 (pretended)"), "fault %s: plan --card: %s", fault, err);
        CHECK(gemma4(VISIBLE, NULL, fault, "tokenize " MINI " -p hi") == 0 && !*err, "fault %s: tokenize asks for a GPU: %s",
              fault, err);
    }
    char in_host[1200];
    snprintf(in_host, sizeof in_host, "%s -ot ffn=CPU", run);
    CHECK(gemma4(VISIBLE, NULL, "pinned", in_host) == 1 && strstr(err, "gemma4: error: cuda: upload: the system refused ") &&
          strstr(err, "pinned host memory") && strstr(err, "ulimit -l"), "refused pinning: %s", err);
    CHECK(gemma4(VISIBLE, NULL, "little", in_host) == 0 && strstr(err, " of weights in host memory (FFNs of "),
          "FFNs in host memory: %s", err);
    static const struct { const char *fault, *says; } fatal[] = {
        { "image", "gemma4: error: cuda: emulated h100, compute capability 9.0: this program was built for other GPUs (no "
                   "kernel image is available for execution on the device); build it with make cuda ARCH=native, or "
                   "ARCH=all-major\n" },
        { "shared", "gemma4: error: cuda: emulated h100: a block may have 49152 bytes of shared memory, but the kernels need "
                    "101376\n" } };
    for (size_t i = 0; i < sizeof fatal / sizeof *fatal; i++)
        CHECK(gemma4(VISIBLE, NULL, fatal[i].fault, run) == 1 && !strcmp(err, fatal[i].says),
              "fault %s: expected '%s', got: %s", fatal[i].fault, fatal[i].says, err);
}

// ==== Memory =========================================================================================================

typedef struct {
    MemoryPlan   plan;
    size_t needed, resident;                           // resident: bytes of the file that are mapped after loading
    float  logits[16];
} Loaded;

// Bytes in memory of the mappings of a file.
static size_t resident_bytes(const char *path) {
    char line[4096];
    size_t sum = 0;
    bool ours = false;
    FILE *f = must(fopen("/proc/self/smaps", "r"));
    while (fgets(line, sizeof line, f)) {
        unsigned long from, to, kb;
        if (sscanf(line, "%lx-%lx ", &from, &to) == 2) ours = strstr(line, path) != NULL;
        else if (ours && sscanf(line, "Rss: %lu kB", &kb) == 1) sum += (size_t)kb << 10;
    }
    fclose(f);
    return sum;
}

// Loads a model on an emulated GPU, and runs a step. status: the child's.
static Loaded load_on(const char *gpu, const char *path, size_t memory, int *status) {
    int ends[2];
    Loaded l = { .needed = 0 };
    must(pipe(ends) ? NULL : ends);
    fflush(stdout);
    const pid_t child = fork();
    if (!child) {
        send_to("err", 2);
        choose_gpu(VISIBLE, gpu, NULL);
        Model *m = must(calloc(1, sizeof *m));
        size_t free_bytes, total;
        cuda_ops()->memory(&free_bytes, &total);
        const ModelOptions o = { .n_ctx = 64, .n_seqs = 1, .n_batch = STEP_ROWS, .n_logits = 1, .k_type = KV_F16,
                                .v_type = KV_F16, .memory = memory ? memory + total - free_bytes : 0 };
        load_model(m, path, cuda_ops(), o, NULL);
        l.plan = m->plan, l.needed = planned_memory(m), l.resident = resident_bytes(path);
        m->step_rows[0] = (StepRow){ .token = 17, .output = true };
        step(m, &(StepSeg){ .seq = 0, .kind = SEG_CHAIN, .n = 1, .rows = m->step_rows }, 1);
        float *logits = alloc_or_die(m->config.vocab, sizeof *logits);
        read_logits(m, 0, logits);
        memcpy(l.logits, logits, sizeof l.logits);
        _exit(write(ends[1], &l, sizeof l) != sizeof l);
    }
    close(ends[1]);
    if (read(ends[0], &l, sizeof l) != sizeof l) l.needed = 0;
    close(ends[0]);
    *status = wait_for_child(child);
    free(err);
    err = text_of(in_tmp("err"));
    return l;
}

static void test_memory(const char *model) {           // on 8 multiprocessors: each takes its time
    int status = 0;
    const Loaded own = load_on("rtx5090:8", model, 0, &status), shared = load_on("gb10:8", model, 0, &status);
    CHECK(own.needed && shared.needed && !status, "a model does not load: %s", err);
    CHECK(!memcmp(own.logits, shared.logits, sizeof own.logits), "other logits where memory is shared");
    CHECK(shared.plan.weights == own.plan.weights && !shared.plan.in_host,
          "shared memory: weights take %zu bytes, else %zu; %zu in host memory", shared.plan.weights, own.plan.weights,
          shared.plan.in_host);
    CHECK(shared.plan.scratch > own.plan.scratch, "shared memory: the plan does not include pinned memory");
    CHECK(own.resident > 3 * shared.resident, "after loading %zu bytes of the file stay in shared memory, else %zu",
          shared.resident, own.resident);
    const Loaded small = load_on("rtx5090:8", model, own.needed - 1, &status);
    CHECK(small.needed && small.plan.in_host, "the table does not go to the host's memory: %s", err);
    load_on("gb10:8", model, shared.needed - 1, &status);
    CHECK(status == 1 && is_one_line(err) && strstr(err, "out of memory"), "shared memory: the table leaves it: %d, %s",
          status, err);
    const Loaded exact = load_on("gb10:8", model, shared.needed + (64 << 20), &status);
    CHECK(exact.needed, "shared memory: the plan does not fit: %s", err);
}
#endif
#endif

int main(void) {
    make_tmp();
    test_refusals();
#ifdef USE_CUDA
    fflush(stdout);
    const pid_t child = fork();
    if (!child) {
        choose_gpu(VISIBLE, NULL, NULL);
        _exit(cuda_ops() != NULL);
    }
    const bool has_gpu = wait_for_child(child) == 1;
    const char *model = kept(make_model("device", "micro-e", "q8_0", NULL));
    test_plans(has_gpu);
    if (has_gpu) test_runs(model), test_backends();
    else SKIP("no GPU: runs with --card");
#ifdef EMULATED
    test_cards();
    test_faults(model);
    test_memory(model);
#endif
#else
    SKIP("built without CUDA: cards");
#endif
    free(out), free(err);
    return test_done("device");
}
