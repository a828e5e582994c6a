/* test_check.c - gemma4 check (parts/bench.h [2]): a correct backend passes with several types of cache; an error of
 * 1 % in one operation of one layer is named at its layer and fails; so is an expert that is not among the best, while
 * two experts that tie may change places, and the key of a row may be off by what an int8 code brings. And the energy
 * that gemma4 sweep reports, on a device that reports some. LONG=1: both models with every type, errors in more layers. */
#define TESTING
#include "../gemma4.c"
#include "test.h"
#include "files.h"

// The CPU's operations with an error in one of them, in one layer. Each layer has one attend, gate_up and expert_down.
static Ops faulty;
static enum { NO_FAULT, Q_FAULT, FFN_FAULT, EXPERT_FAULT, CHOICE_FAULT, TIE_FAULT, ROW_FAULT, KEY_JUMP } fault;
static int fault_layer, layer;        // layer: of the operations that come next
static bool after_gate_up;            // the next matmul of a dense layer is ffn_down

static void scale(float *x, size_t n, size_t every) {
    for (size_t i = 0; i < n; i += every) x[i] *= 1.01f;
}

static void start_pass(const Embed *o) {
    layer = 0;
    cpu_ops()->embed(o);
}

static void wrap_attend(const Attend *o) {
    if (fault == Q_FAULT && layer == fault_layer && o->store)         // 1 % of every second value: a norm follows
        scale(o->store->q, (size_t)o->batch->n_rows * (size_t)(o->n_heads * o->cache->head_dim), 2);
    if (fault == KEY_JUMP && layer == fault_layer && o->store) {      // of one row, as after one other int8 code
        const size_t cols = (size_t)(o->cache->n_kv_heads * o->cache->head_dim);
        float *k = (float *)o->store->k + cols;
        for (size_t i = 0; i < cols; i++) k[i] *= i % 2 ? 1.0005f : 0.9995f;
    }
    cpu_ops()->attend(o);
}

// The router and the experts that gate_up carries run after it, so that the choice can be changed between them.
static void wrap_gate_up(const GateUp *o) {
    GateUp alone = *o;
    alone.route = NULL;
    alone.experts = NULL;
    cpu_ops()->gate_up(&alone);
    if (o->route) {
        cpu_ops()->route(o->route);
        const int n = o->route->w->rows, used = o->route->n_used;
        for (int r = 0; r < o->n_rows && layer == fault_layer; r++) {
            float *logits = o->route->logits + (size_t)r * (size_t)n;
            int32_t *ids = o->route->ids + r * used;
            int next = -1, last = 0;                   // the best expert that was not chosen; the worst expert
            for (int e = 0; e < n; e++) {
                if (!has_id(ids, used, e) && (next < 0 || logits[e] > logits[next])) next = e;
                if (logits[e] < logits[last]) last = e;
            }
            if (fault == CHOICE_FAULT && r == 3) ids[0] = last;
            const double gap = (double)logits[ids[used - 1]] - logits[next];
            if (fault == TIE_FAULT && gap < 0.01 * row_norm(logits, n)) ids[used - 1] = next;
        }
    }
    if (o->experts) cpu_ops()->expert_gate_up(o->experts);
    after_gate_up = !o->experts;
}

static void wrap_matmul(const Matmul *o) {
    cpu_ops()->matmul(o);
    if (!after_gate_up) return;
    after_gate_up = false;
    const size_t cols = (size_t)o->w[0]->rows;
    if (fault == FFN_FAULT && layer == fault_layer) scale(o->out[0], (size_t)o->n_rows * cols, 1);
    if (fault == ROW_FAULT && layer == fault_layer) o->out[0][5 * cols + 7] += 10;
    layer++;
}

static void wrap_expert_down(const ExpertDown *o) {
    cpu_ops()->expert_down(o);
    if (fault == EXPERT_FAULT && layer == fault_layer) scale(o->out, (size_t)o->n_rows * (size_t)o->down->rows, 2);
    layer++;
}

// Runs check with a fault. Returns its output, which the caller frees.
static char *run_check(const char *path, const Ops *other, KvType type, int kind, int at, int *status) {
    fflush(stdout);
    const pid_t child = fork();
    if (!child) {
        const int out = open(in_tmp("stdout"), O_WRONLY | O_CREAT | O_TRUNC, 0600);
        if (out < 0 || dup2(out, 1) < 0 || !freopen("/dev/null", "w", stderr)) _exit(126);
        faulty = *cpu_ops();
        faulty.name = "faulty";
        faulty.embed = start_pass;
        faulty.attend = wrap_attend;
        faulty.gate_up = wrap_gate_up;
        faulty.matmul = wrap_matmul;
        faulty.expert_down = wrap_expert_down;
        fault = kind;
        fault_layer = at;
        const ModelOptions o = { .n_seqs = 1, .k_type = type, .v_type = type,
                                 .ring_type = type == KV_F32 ? KV_F32 : KV_F16 };
        _exit(verb_check(path, &faulty, other, o));
    }
    *status = -1;
    while (child > 0 && waitpid(child, status, 0) < 0 && errno == EINTR) {}
    *status = WIFEXITED(*status) ? WEXITSTATUS(*status) : 1000 + *status;
    return text_of(in_tmp("stdout"));
}

// The fault is named in both tables, at its layer and checkpoint, and nothing else is named.
static void finds(const char *path, KvType type, int kind, int at, const char *name) {
    int status, n = 0;
    char want[80], *text = run_check(path, cpu_ops(), type, kind, at, &status);
    snprintf(want, sizeof want, "first difference: layer %d, %s: ", at, name);
    for (char *s = text; (s = strstr(s, want)); s++) n++;
    CHECK(status == 1 && n == 2, "%s, fault %d in layer %d: expected status 1 and twice '%s', got %d and %d: %s", path,
          kind, at, want, status, n, text);
    free(text);
}

static void passes(const char *path, const Ops *other, KvType type, int kind) {
    int status;
    char *text = run_check(path, other, type, kind, 2, &status);
    CHECK(status == 0 && !strstr(text, "FAIL") && !strstr(text, "first difference"),
          "%s, cache %s: expected status 0, got %d: %s", path, kv_names[type], status, text);
    if (kind == TIE_FAULT) CHECK(strstr(text, "\nexperts: "), "%s: no row chose other experts: %s", path, text);
    free(text);
}

// KL((1/4, 3/4) || (1/2, 1/2)) = ln(3) * 3/4 - ln(2), and a row that is equal: the mean of both.
static void test_divergence(void) {
    const float p[] = { 1, 1 + logf(3), 5, 7 }, q[] = { 2, 2, 5, 7 };
    const double got = mean_divergence(p, q, 2, 2), want = (log(3) * 0.75 - log(2)) / 2;
    CHECK(fabs(got - want) < 1e-6, "divergence of known distributions: %g, expected %g", got, want);
}

static double count_joules(void) {                     // of a device that uses 7 J between two readings
    static int n;
    return 7.0 * n++;
}

static void test_energy(const char *model) {
    Ops ops = *cpu_ops();
    const SweepOptions o = { .n = 4 };
    const SweepCell cell = { .k = "f16", .ctx = 70 };
    ops.joules = count_joules;
    const Sweep w = { .model = model, .ops = &ops, .o = &o,
                      .options = { .n_seqs = 1, .n_batch = BATCH_FIT, .n_logits = 1 } };
    const SweepResult r = measure_cell(&w, &cell);
    CHECK(r.made == 4, "sweep: expected 4 tokens, got %d", r.made);
    CHECK(r.prefill_joules == 7 && r.decode_joules == 7, "sweep: expected 7 J and 7 J, got %g and %g",
          r.prefill_joules, r.decode_joules);
    CHECK(isnan(r.vram) && isnan(r.al), "sweep: expected no memory and no acceptance, got %g and %g", r.vram, r.al);
    CHECK(isnan(joules_between(5, 5)), "sweep: expected no energy if the counter did not move");
}

int main(void) {
    static const char moe[] = "models/gemma4-mini-q8_0.gguf", dense[] = "models/gemma4-mini-e-q8_0.gguf";
    static const KvType types[] = { KV_F32, KV_F16, KV_Q8_0, KV_TQ3 };
    make_tmp();
    const char *all = getenv("LONG");
    const bool few = !all || !strcmp(all, "0");
    for (int i = 0; i < 4; i++) {                      // few: each type with one of the models
        if (!few || i % 2) passes(moe, reference_ops(), types[i], NO_FAULT);
        if (!few || i % 2 == 0) passes(dense, reference_ops(), types[i], NO_FAULT);
        if (!few || i == 3) finds(dense, types[i], FFN_FAULT, 3, "ffn_out");
    }
    finds(moe, KV_F32, EXPERT_FAULT, 3, "ffn_moe");
    for (int l = 0; l < 7; l += few ? 6 : 2) finds(dense, KV_F32, FFN_FAULT, l, "ffn_out");
    finds(dense, KV_F32, Q_FAULT, 1, "Qcur_normed");
    finds(dense, KV_F32, ROW_FAULT, 4, "ffn_out");
    finds(moe, KV_F32, CHOICE_FAULT, 2, "ffn_moe_topk");
    passes(moe, cpu_ops(), KV_F32, TIE_FAULT);
    passes(moe, cpu_ops(), KV_F32, KEY_JUMP);
    passes(dense, cpu_ops(), KV_F32, KEY_JUMP);
    test_divergence();
    test_energy(moe);
    return test_done("check");
}
