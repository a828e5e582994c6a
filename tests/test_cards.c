/* test_cards.c - the launch plans of the CUDA backend for each card of parts/cards.h, without launching anything.
 *
 * For launches with real shapes it asks each family of kernels for its plan on each card, and checks that the card can
 * run it: shared memory of a block and of an SM, threads, and no more blocks than SMs if a kernel needs that. The check
 * must reject plans for an H100 on an RTX 3090, both for their tiles and for their grids. docs/cards.md has the plans
 * as a table; build/test_cards -table prints it. On a real GPU the other cards are simulated, and the table is not
 * compared. */
#define TESTING
#include "../gemma4.c"
#include <sys/wait.h>
#include "card.h"
#include "test.h"
#ifdef USE_CUDA

enum { MAX_PLANS = 128, WHERE = 1 << 20 };
typedef struct { char launch[48]; LaunchPlan plan; char family[24]; } Planned;
typedef struct { Planned plan[MAX_PLANS]; int n; } Plans;

static Plans *plans;
static const char *launch_name;
static const Ops *op;

static void watch(const LaunchPlan *p) {
    // a launch that is split into several
    const bool again = plans->n && !strcmp(plans->plan[plans->n - 1].launch, launch_name);
    if (plans->n == MAX_PLANS || again) return;
    Planned *to = &plans->plan[plans->n++];
    snprintf(to->launch, sizeof to->launch, "%s", launch_name);
    snprintf(to->family, sizeof to->family, "%s", p->family);          // pointers are not valid in another process
    to->plan = *p;
}

// ---- launches with real shapes; nothing is read or written -

#define NOWHERE ((void *)(uintptr_t)WHERE)

static Tensor matrix(DType type, int rows, int cols, int n) {
    Tensor t = { };
    t.data = NOWHERE;
    t.type = type;
    t.rows = rows;
    t.cols = cols;
    t.n = n;
    return t;
}
static In input(void) { return (In){ .x = NOWHERE, .w_pre = NOWHERE, .scale = 1, .eps = 1e-6f }; }
static Act activation(void) { return (Act){ NOWHERE, NOWHERE, NOWHERE }; }

static void matmul(DType type, int rows, int cols, int n_rows) {
    const Tensor w = matrix(type, rows, cols, 1);
    op->matmul(&(Matmul){ .n_rows = n_rows, .n = 1, .in = input(), .w = { &w }, .out = { NOWHERE } });
}

static void gate_up(int ffn, int cols, int n_rows) {
    const Tensor gate = matrix(T_Q4_K, ffn, cols, 1), up = gate;
    op->gate_up(&(GateUp){ .n_rows = n_rows, .in = input(), .gate = &gate, .up = &up, .out = activation() });
}

static void expert_gate_up(DType type, int n_rows) {    // shapes of 26B, also below
    const Tensor gate_up = matrix(type, 2 * 704, 2816, 128);
    op->expert_gate_up(&(ExpertGateUp){ .n_rows = n_rows, .n_used = 8, .in = { .act = activation() }, .gate = &gate_up,
                                        .ids = NOWHERE, .out = activation() });
}

static void expert_down(DType type, int n_rows) {
    const Tensor down = matrix(type, 2816, 704, 128);
    op->expert_down(&(ExpertDown){ .n_rows = n_rows, .n_used = 8, .in = activation(), .down = &down, .ids = NOWHERE,
                                   .weights = NOWHERE, .out = NOWHERE });
}

typedef struct { int heads, kv_heads, head_dim, n_rot, slots, window; } Heads;
static const Heads local_26b = { 16, 8, 256, 0, 1152, 1024 }, full_26b = { 16, 2, 512, 64, 131072, 0 },
                   full_e4b = { 8, 2, 512, 0, 131072, 0 };

// select: block_select; else attention, of selected blocks if `blocks`.
static void attend(const Heads *h, KvType type, int n_rows, bool select, bool blocks) {
    const Batch batch = { NOWHERE, NOWHERE, NOWHERE, n_rows, 1 };
    const BlockList list = { (h->slots + SELECT_KEYS - 1) / SELECT_KEYS, NOWHERE, NOWHERE };
    Cache c = { .n_seqs = 1, .n_kv_heads = h->kv_heads, .head_dim = h->head_dim, .slots = h->slots, .n_rot = h->n_rot };
    c.k = (KvPlane){ type, h->n_rot ? 2 * h->n_rot : h->head_dim, NOWHERE, NOWHERE };
    c.v = (KvPlane){ type, h->head_dim, NOWHERE, NOWHERE };
    c.fold = NOWHERE;
    const BlockSelect choice = { .batch = &batch, .cache = &c, .n_heads = h->heads, .q = NOWHERE, .scale = 1,
                                 .density = 0.1f,
                                 .means =
                                     NOWHERE, .scores = NOWHERE, .weights = NOWHERE, .out = list, .count = NOWHERE };
    const QkvStore store = { .batch = &batch, .cache = &c, .n_heads = h->heads, .q = NOWHERE, .k = NOWHERE,
                             .v = NOWHERE,
                             .w_q = NOWHERE, .w_k = NOWHERE, .v_norm = true,
                             .rope = { NOWHERE, h->n_rot ? h->n_rot : h->head_dim / 2 }, .eps = 1e-6f };
    if (select) op->block_select(&choice);
    else
        op->attend(&(Attend){ .batch = &batch, .cache = &c, .n_heads = h->heads, .q = NOWHERE, .window = h->window,
                              .scale = 1, .blocks = blocks ? &list : NULL, .store = n_rows <= STEP_ROWS ? &store : NULL,
                               .out = activation() });
}

static void all_launches(void) {
#define LAUNCH(name, ...) launch_name = name, __VA_ARGS__
    LAUNCH("1 row, 26B q", matmul(T_Q4_K, 4096, 2816, 1));
    LAUNCH("1 row, 31B gate and up", gate_up(21504, 5376, 1));
    LAUNCH("1 row, 31B down", matmul(T_Q6_K, 5376, 21504, 1));
    LAUNCH("1 row, 26B router, f32", matmul(T_F32, 128, 2816, 1));
    LAUNCH("1 row, 26B experts gate and up", expert_gate_up(T_Q4_K, 1));
    LAUNCH("1 row, 26B experts down", expert_down(T_Q8_0, 1));
    LAUNCH("2 rows, 31B down", matmul(T_Q4_K, 5376, 21504, 2));
    LAUNCH("8 rows, 31B gate and up", gate_up(21504, 5376, 8));
    LAUNCH("8 rows, 26B experts gate and up", expert_gate_up(T_Q4_K, 8));
    LAUNCH("8 rows, 26B experts down", expert_down(T_Q8_0, 8));
    LAUNCH("16 rows, 31B down", matmul(T_Q4_K, 5376, 21504, 16));
    LAUNCH("64 rows, 31B down", matmul(T_Q4_K, 5376, 21504, 64));
    LAUNCH("512 rows, 26B experts gate and up", expert_gate_up(T_Q4_K, 512));
    LAUNCH("4096 rows, 26B experts gate and up", expert_gate_up(T_Q4_K, 4096));
    LAUNCH("4096 rows, 26B experts down, q5_0", expert_down(T_Q5_0, 4096));
    LAUNCH("4096 rows, 26B experts down, q8_0", expert_down(T_Q8_0, 4096));
    LAUNCH("1 row, 26B window, f16", attend(&local_26b, KV_F16, 1, false, false));
    LAUNCH("1 row, 26B global, f16", attend(&full_26b, KV_F16, 1, false, false));
    LAUNCH("1 row, 26B global, q8_0", attend(&full_26b, KV_Q8_0, 1, false, false));
    LAUNCH("1 row, 26B global, tq3", attend(&full_26b, KV_TQ3, 1, false, false));
    LAUNCH("1 row, E4B global, f16", attend(&full_e4b, KV_F16, 1, false, false));
    LAUNCH("8 rows, 26B window, f16", attend(&local_26b, KV_F16, 8, false, false));
    LAUNCH("8 rows, 26B global, f16", attend(&full_26b, KV_F16, 8, false, false));
    LAUNCH("8 rows, E4B global, f16", attend(&full_e4b, KV_F16, 8, false, false));
    LAUNCH("4096 rows, 26B window, f16", attend(&local_26b, KV_F16, 4096, false, false));
    LAUNCH("4096 rows, 26B window, q8_0", attend(&local_26b, KV_Q8_0, 4096, false, false));
    LAUNCH("4096 rows, 26B global, f16", attend(&full_26b, KV_F16, 4096, false, false));
    LAUNCH("4096 rows, 26B global, q8_0", attend(&full_26b, KV_Q8_0, 4096, false, false));
    LAUNCH("4096 rows, E4B global, f16", attend(&full_e4b, KV_F16, 4096, false, false));
    LAUNCH("4096 rows, E4B global, tq3", attend(&full_e4b, KV_TQ3, 4096, false, false));
    LAUNCH("4096 rows, 26B block_select", attend(&full_26b, KV_F16, 4096, true, false));
    LAUNCH("4096 rows, 26B listed blocks, f16", attend(&full_26b, KV_F16, 4096, false, true));
#undef LAUNCH
}

// The plans for a card, computed in a separate process, because a backend reads its card only once.
static void plan_on(const Card *card, Plans *to) {
    int ends[2];
    if (pipe(ends)) die("pipe: %s", strerror(errno));
    fflush(stdout);
    const pid_t child = fork();
    if (!child) {
#ifdef EMULATED
        cuda_on_cpu(card->name);
#else
        cuda_pretend(card);
#endif
        plans = calloc(1, sizeof *plans);
        op = cuda_ops();
        op->init(&(Limits){ .max_rows = 4096, .max_cols = 21504, .max_experts = 8, .vocab = 262144 });
        cuda_watch(watch, true);
        all_launches();
        _exit(write(ends[1], plans, sizeof *plans) != sizeof *plans);
    }
    close(ends[1]);
    size_t n = 0;
    for (ssize_t got; n < sizeof *to && (got = read(ends[0], (char *)to + n, sizeof *to - n)) > 0; ) n += (size_t)got;
    int status = 1;
    close(ends[0]);
    waitpid(child, &status, 0);
    if (!CHECK(n == sizeof *to && !status && to->n > 20, "%s: plans: status %d, %zu bytes", card->name, status, n))
        to->n = 0;
}

// ---- limits of a card ------------

enum { LARGE_TILE = 1, MANY_BLOCKS = 2, FULL_SM = 4 };
static int faults(const Card *c, const LaunchPlan *p) {
    int found = 0;
    if (p->shared > (size_t)c->block_shared || p->threads > 1024) found |= LARGE_TILE;
    if (p->per_sm && p->blocks > c->n_sm * p->per_sm) found |= MANY_BLOCKS;
    const int at_once = p->per_sm ? p->per_sm : 1;
    if (at_once * (p->shared + BLOCK_SYSTEM) > (size_t)c->sm_shared || at_once * p->threads > c->sm_threads)
        found |= FULL_SM;
    return found;
}

static void test_card(const Card *card, const Plans *p) {
    for (int i = 0; i < p->n; i++) {
        const LaunchPlan *plan = &p->plan[i].plan;
        const int found = faults(card, plan);
        CHECK(!found, "%s: %s: %s kernel, %s, %d blocks of %d threads and %zu bytes, %d an SM: %s", card->name,
              p->plan[i].launch,
              p->plan[i].family, plan->choice, plan->blocks, plan->threads, plan->shared, plan->per_sm,
              found & LARGE_TILE ? "more than a block can have" : found & MANY_BLOCKS ? "more blocks than SMs"
                  : "more than an SM has");
    }
}

// ---- the table ----

static bool same(const Planned *a, const Planned *b) {
    return !strcmp(a->family, b->family) && !strcmp(a->plan.choice, b->plan.choice) &&
        a->plan.blocks == b->plan.blocks && a->plan.threads == b->plan.threads && a->plan.shared == b->plan.shared;
}

static char *table(const Plans *of) {
    char *text = NULL;
    size_t size;
    FILE *f = open_memstream(&text, &size);
    fprintf(f,
            "| launch | cards | kernel | blocks x threads | shared memory, bytes | choice |\n|---|---|---|---|---|---|\n");
    for (int i = 0; i < of[0].n; i++) {
        bool told[N_CARDS] = { false };
        for (int c = 0; c < N_CARDS; c++) {
            const Planned *p = &of[c].plan[i];
            if (told[c]) continue;
            fprintf(f, "| %s | ", c ? "" : p->launch);
            for (int d = c; d < N_CARDS; d++)
                if (same(p, &of[d].plan[i])) fprintf(f, "%s%s", d == c ? "" : ", ", cards[d].name), told[d] = true;
            fprintf(f, " | %s | %d x %d | %zu | %s |\n", p->family, p->plan.blocks, p->plan.threads, p->plan.shared,
                    p->plan.choice);
        }
    }
    fclose(f);
    return text;
}

static bool is_in_file(const char *path, const char *text) {
    FILE *f = fopen(path, "r");
    char *all = calloc(1, 1 << 16);
    if (f) {
        all[fread(all, 1, (1 << 16) - 1, f)] = 0;
        fclose(f);
    }
    const bool found = strstr(all, text);
    free(all);
    return found;
}

static void test_all(bool print) {
    static Plans of[N_CARDS];
    for (int c = 0; c < N_CARDS; c++) {
        plan_on(&cards[c], &of[c]);
        test_card(&cards[c], &of[c]);
        CHECK(of[c].n == of[0].n, "%s plans %d launches, %s %d", cards[c].name, of[c].n, cards[0].name, of[0].n);
    }
#ifdef EMULATED
    char *text = table(of);
    if (print) fputs(text, stdout);
    else
        CHECK(is_in_file("docs/cards.md", text),
              "docs/cards.md: the table of plans is not the one of build/test_cards -table");
    int found = 0;
    for (int i = 0; i < of[0].n; i++) found |= faults(find_card("rtx3090"), &of[0].plan[i].plan);
    CHECK(found & LARGE_TILE, "a tile too large for an RTX 3090 is not found");
    CHECK(found & MANY_BLOCKS, "a grid for 132 SMs is not found on 82");
    free(text);
#else
    (void)table, (void)is_in_file, (void)print;
#endif
}
#endif

int main(int argc, char **argv) {
    const bool print = argc > 1 && !strcmp(argv[1], "-table");
#ifdef USE_CUDA
    if (cuda_ops()) test_all(print);
    else SKIP("no GPU: plans of the CUDA backend");
#else
    (void)print;
    SKIP("built without CUDA: plans of the CUDA backend");
#endif
    return print ? 0 : test_done("cards");
}
