/* bench.h - a model on this machine: verb_bench() measures its speed in the conventions of llama-bench, verb_check()
 * compares two backends on it, checkpoint by checkpoint, verb_ppl() measures how well it foretells a text. A part of
 * gemma4.c, which includes it.
 *
 * Uses the model, generate.h, text.h and dump.h. Begin with verb_bench(), verb_check() or verb_ppl().
 *   [1] Bench    [2] Check    [3] Perplexity */
#ifndef BENCH_H
#define BENCH_H

// ==== [1] Bench ======================================================================================================
// ppN runs a prompt of N random tokens, tgN generates N tokens one by one; "@ dN" after N tokens in the context that have
// really been run, or, "(random fill)", whose cache rows are random numbers: as many bytes to read, and no prompt to wait for.
// vsN takes steps of N rows that all get logits and are never committed, as a verification of drafts does: all at one depth.
// Where a drafter's guesses are taken for right by chance, tgN (forced) makes N tokens in steps with drafts: the text means
// nothing, the time does. A warm-up, then repetitions: mean and standard deviation of tokens (rows) per second.

typedef enum { FORMAT_MD, FORMAT_CSV, FORMAT_JSON, FORMAT_JSONL } Format;

typedef struct {              // shares of guesses to be taken for right, by depth, each where all before are
    float share[DRAFT_MAX];
    int   depth;              // guesses in a step; 0: none
} Forced;

typedef struct {
    IntList prompts, generated, rows, depths;          // 0 among the first three: not that test
    Forced forced;
    int n_runs;
    bool random_fill;
    Format format;
} BenchOptions;

typedef enum { PROMPT_TEST, GENERATE_TEST, VERIFY_TEST, FORCED_TEST } BenchKind;
enum { VERIFY_STEPS = 32 };   // of a run

typedef struct {
    Model   *m;
    int32_t *ids;             // (n_ctx) random
    uint8_t *rings;           // the rings at the depth of the tests; global layers need no copy: rows above len are free
    int      depth;           // tokens of session 0 at which these were taken
    bool     filled;          // its rows are random numbers
    double   bandwidth;       // bytes/s of the memory, 0: not known
    bool     has_joules;      // the device tells what it uses
    size_t   free_before;     // bytes of the device before the model was loaded
    int      n_printed;
    Forced   forced;
    double   draft_seconds, verify_seconds;            // of the last run with drafts
    int      n_passes, n_made;                         // its steps, and the tokens that these made
} Bench;

// Makes n tokens, or a few more, with drafts in one step at least, of which as many are taken for right as chance has
// it. As in sessions, a step is issued before the host knows the result of the one before.
static void bench_forced(Bench *b, int n) {
    Model *m = b->m;
    const StepResult *v = m->result;
    const int depth = b->forced.depth;
    const int32_t seg = 0;
    double began = 0;
    b->draft_seconds = b->verify_seconds = 0;
    b->n_passes = b->n_made = 0;
    for (int pass = 0; b->n_made < n || !b->n_passes; pass++) {        // the first has no drafts yet: it makes one token
        int right = 0;
        while (pass && right < depth && random_unit(3, pass * DRAFT_MAX + right) < b->forced.share[right]) right++;
        for (int r = 0; r <= depth; r++) m->chunk[r] = (StepRow){ .token = pass ? ON_DEVICE : b->ids[0], .output = true };
        if (!pass) step(m, &(StepSeg){ .seq = 0, .kind = SEG_CHAIN, .n = 1, .rows = m->chunk }, 1);
        issue_verification(m, &seg, 1, depth, &(int32_t){ 1 + right });
        for (int r = 0; r <= depth; r++) m->chunk[r].token = ON_DEVICE;
        step(m, &(StepSeg){ .seq = 0, .kind = SEG_CHAIN, .n = 1 + depth, .rows = m->chunk }, 1);
        read_result(m);
        if (pass) {
            b->verify_seconds += v->verified - began;
            b->draft_seconds += v->drafted - v->verified;
            b->n_passes++;
        }
        b->n_made += 1 + right;
        began = v->drafted;
    }
}

// Runs n random tokens from the end of the session on, as a prompt or one by one, or VERIFY_STEPS times as n drafts;
// returns the seconds.
static double bench_run(Bench *b, int n, BenchKind kind, const char *what) {
    Model *m = b->m;
    const Ops *op = m->ops;
    const double start = seconds();
    const int from = m->len[0];
    if (kind == FORCED_TEST) {
        bench_forced(b, n);
        return seconds() - start;
    }
    const int n_steps = kind == GENERATE_TEST ? n : kind == VERIFY_TEST ? VERIFY_STEPS : 0;
    for (int i = 0, before = 0; i < n_steps; i++) {    // as in run_sessions(), a step is issued while one runs
        const int rows = kind == VERIFY_TEST ? n : 1;
        for (int r = 0; r < rows; r++)
            m->chunk[r] = (StepRow){ .token = b->ids[(from + i + r) % m->options.n_ctx], .output = true };
        step(m, &(StepSeg){ .seq = 0, .kind = SEG_CHAIN, .n = rows, .rows = m->chunk }, 1);
        if (kind == GENERATE_TEST) commit_all(m);
        const int mark = op->fence ? op->fence() : 0;
        if (op->fence && i) op->wait_for(before);
        before = mark;
    }
    if (kind == PROMPT_TEST && n) {
        if (what) progress(what, 0, (size_t)n, "tokens");
        for (int at = 0; at < n; ) {
            at += run_chunk(m, 0, b->ids + from + at, n - at);
            commit_all(m);
            if (what) progress(what, (size_t)at, (size_t)n, "tokens");
        }
    }
    op->wait();
    return seconds() - start;
}

// Bytes of random finite rows of a cache's type, as large as normed K and V are; or (scale) of the f16 scales beside them.
static void random_rows(uint8_t *out, size_t bytes, KvType type, bool scale) {
    const bool codes = kv_group(type) && !scale;
    for (size_t i = 0; i < bytes / 4; i++) {
        float v[2];
        for (int k = 0; k < 2; k++) v[k] = (3.4f * random_unit(2 + (uint64_t)k, (int32_t)i) - 1.7f) * (scale ? 0x1p-7f : 1);
        uint16_t halves[2];
        for (int k = 0; k < 2; k++)
            halves[k] = codes ? (uint16_t)(int)(v[k] * 19000) :
                        type == KV_BF16 && !scale ? gguf_f32_to_bf16(v[k]) : gguf_f32_to_f16(v[k]);
        memcpy(out + i * 4, type == KV_F32 ? (const void *)v : halves, 4);
    }
}

// Fills the caches of session 0, all slots of all layers: a piece of random rows, again and again.
static void fill_caches(Model *m) {
    enum { PIECE = 1 << 20 };
    const Ops *op = m->ops;
    uint8_t *piece = alloc_or_die(PIECE, 1);
    for (int i = 0; i < m->n_caches; i++) {
        CachePart parts[CACHE_PARTS];
        const int n_parts = cache_parts(&m->caches[i], 0, parts);
        for (int k = 0; k < n_parts; k++) {
            const CachePart *p = &parts[k];
            const size_t first = p->bytes < PIECE ? p->bytes : PIECE;
            random_rows(piece, first, p->type, p->is_scale);
            op->copy(&(Copy){ p->data, piece, first, COPY_IN });
            for (size_t at = first; at < p->bytes; at += first)
                op->copy(&(Copy){ p->data + at, p->data, p->bytes - at < first ? p->bytes - at : first, COPY_WITHIN });
        }
    }
    op->wait();
    free(piece);
}

static void bench_to_depth(Bench *b, int depth, bool random_fill) {  // n tokens are run and kept, or made up
    Model *m = b->m;
    char what[32];
    snprintf(what, sizeof what, "filling d%d", depth);
    if (random_fill) {
        if (depth && !b->filled) fill_caches(m);       // once for all depths: every slot has a row
        b->filled |= depth > 0;
        set_length(m, 0, depth);
        m->n_written[0] = max_int(m->n_written[0], depth);
    } else {
        if (depth < b->depth) reset_session(m, 0);
        bench_run(b, depth - m->len[0], PROMPT_TEST, what);
    }
    copy_rings(m, 0, b->rings, COPY_OUT);
    b->depth = depth;
}

static void print_text(const char *s, char quote) {    // csv: quotes are doubled, JSON: escaped. s is printable ASCII
    putchar('"');
    for (; *s; s++) {
        if (*s == '"' || (*s == '\\' && quote == '\\')) putchar(quote);
        putchar(*s);
    }
    putchar('"');
}

typedef struct { const char *name; double value; } NamedNumber;
typedef struct { const char *name, *value; } NamedText;

static void print_csv(const NamedText *texts, int n_texts, const NamedNumber *numbers, int n_numbers, bool head) {
    for (int i = 0; i < n_texts && head; i++) printf("%s,", texts[i].name);
    for (int i = 0; i < n_numbers && head; i++) printf("%s%s", numbers[i].name, i + 1 < n_numbers ? "," : "\n");
    for (int i = 0; i < n_texts; i++) {
        print_text(texts[i].value, '"');
        putchar(',');
    }
    for (int i = 0; i < n_numbers; i++) printf("%.12g%s", numbers[i].value, i + 1 < n_numbers ? "," : "\n");
}

// Bytes of this process in memory, the pages of the mapped file among them; 0: not known. Not the largest so far, which
// measuring the bandwidth would decide.
static size_t resident_memory(void) {
    unsigned long long pages = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    if (f && fscanf(f, "%*u %llu", &pages) != 1) pages = 0;
    if (f) fclose(f);
    return (size_t)pages * (size_t)sysconf(_SC_PAGESIZE);
}

static size_t planned_memory(const Model *m) {
    const MemoryPlan *p = &m->plan;
    const size_t mapped = p->weights ? 0 : m->binder->bytes + m->drafter->binder->bytes;
    return p->weights + mapped + p->drafter + p->kv_global + p->kv_rings + p->staging + p->activations + p->scratch;
}

// What a device with memory of its own has lost since before the model was loaded, recorded steps and all; 0: there is none.
static size_t device_memory(const Bench *b) {
    size_t free_bytes = 0, total;
    if (b->m->plan.weights) b->m->ops->memory(&free_bytes, &total);
    return b->m->plan.weights && b->free_before > free_bytes ? b->free_before - free_bytes : 0;
}

typedef struct {              // of one test
    char   name[64];
    int    n;                 // tokens, or rows of a step
    BenchKind kind;
    bool   filled;            // the context was, with random numbers
    const double *speed;      // (n_runs) tokens (rows) per second
    double mean, sd, rate;    // rate: bytes per second that a token's weights and cache rows come to
    double per_step, joules;  // launches of a step, energy of a token; 0: not known
    double density;           // of blocks that a sparse prompt attended to; 0: it was dense
} BenchResult;

static void model_size(const Model *m, double *bytes, double *params) {
    *bytes = *params = 0;
    for (size_t i = 0; i < m->gguf.n_tensors; i++) {
        const GgufTensor *t = &m->gguf.tensors[i];
        *bytes += (double)t->size;
        *params += (double)t->ne[0] * (double)t->ne[1] * (double)t->ne[2] * (double)t->ne[3];
    }
}

static void print_markdown(const Bench *b, const BenchOptions *o, const BenchResult *r, bool first) {
    const Model *m = b->m;
    const Ops *op = m->ops;
    const int width = o->random_fill ? 30 : 15;
    const char *line = "------------------------------";
    double bytes, params;
    char size[32], count[32], mark[48], read_rate[48] = "";
    if (first) {
        printf("| %-30s | %10s | %10s | %-10s | %7s | %*s | %20s | %18s |", "model", "size", "params", "backend",
               "threads", width, "test", "t/s", "GB/s (of memory)");
        if (op->launches) printf(" %8s |", "launches");
        if (b->has_joules) printf(" %7s |", "J/token");
        printf("\n| %s | ---------: | ---------: | ---------- | ------: | %.*s: | -------------------: | "
               "-----------------: |", line, width - 1, line);
        if (op->launches) printf(" -------: |");
        if (b->has_joules) printf(" ------: |");
        printf("\n");
    }
    model_size(m, &bytes, &params);
    snprintf(size, sizeof size, "%.2f %s", bytes / (bytes < 0x1p30 ? 0x1p20 : 0x1p30), bytes < 0x1p30 ? "MiB" : "GiB");
    snprintf(count, sizeof count, "%.2f %s", params / (params < 1e9 ? 1e6 : 1e9), params < 1e9 ? "M" : "B");
    snprintf(mark, sizeof mark, "%.2f ± %.2f", r->mean, r->sd);
    if (r->kind == GENERATE_TEST)
        snprintf(read_rate, sizeof read_rate, b->bandwidth > 0 ? "%.2f (%.0f %%)" : "%.2f", r->rate * 1e-9,
                 b->bandwidth > 0 ? r->rate / b->bandwidth * 100 : 0);
    if (r->density > 0)
        snprintf(read_rate, sizeof read_rate, "pFlash%s: %.1f %%", m->options.pflash_density ? ", forced" : "",
                 100 * r->density);
    printf("| %-30s | %10s | %10s | %-10s | %7d | %*s | %21s | %18s |", model_name(m), size, count, op->name,
           count_threads(), width, r->name, mark, read_rate);
    if (op->launches && r->kind != PROMPT_TEST) printf(" %8.1f |", r->per_step);
    if (op->launches && r->kind == PROMPT_TEST) printf(" %8s |", "");          // what cuBLAS launches is not known
    if (b->has_joules) printf(" %7.3f |", r->joules);
    printf("\n");
}

// The same as CSV or JSON, and more.
static void print_fields(const Bench *b, const BenchOptions *o, const BenchResult *r, bool first) {
    const Model *m = b->m;
    double bytes, params;
    model_size(m, &bytes, &params);
    const NamedNumber numbers[] = {
        { "model_size", bytes }, { "model_n_params", params }, { "n_ubatch", m->options.n_batch },
        { "n_threads", count_threads() }, { "n_prompt", r->kind == PROMPT_TEST ? r->n : 0 },
        { "n_gen", r->kind == GENERATE_TEST || r->kind == FORCED_TEST ? r->n : 0 }, { "n_depth", b->depth },
        { "avg_ts", r->mean }, { "stddev_ts", r->sd }, { "read_bytes_per_s", r->rate },
        { "bandwidth_bytes_per_s", b->bandwidth }, { "planned_bytes", (double)planned_memory(m) },
        { "resident_bytes", (double)resident_memory() }, { "n_verify", r->kind == VERIFY_TEST ? r->n : 0 },
        { "launches_per_step", r->per_step }, { "joules_per_token", r->joules }, { "device_bytes", (double)device_memory(b) },
        { "n_drafted", r->kind == FORCED_TEST ? b->forced.depth : 0 },
        { "forced_tokens_per_step", r->kind == FORCED_TEST ? (double)(b->n_made - 1) / b->n_passes : 0 },
        { "draft_ms", r->kind == FORCED_TEST ? 1e3 * b->draft_seconds / b->n_passes : 0 },
        { "verify_ms", r->kind == FORCED_TEST ? 1e3 * b->verify_seconds / b->n_passes : 0 },
        { "pflash_alpha", m->options.pflash }, { "pflash_forced", m->options.pflash_density },
        { "pflash_density", r->density } };
    const NamedText texts[] = {
        { "model_filename", m->gguf.path }, { "model_type", model_name(m) }, { "backends", m->ops->name },
        { "type_k", kv_names[m->options.k_type] }, { "type_v", kv_names[m->options.v_type] },
        { "fill", !b->depth ? "none" : r->filled ? "random" : "prompt" }, { "card", card_name(m->ops) } };
    enum { N_TEXTS = sizeof texts / sizeof *texts, N_NUMBERS = sizeof numbers / sizeof *numbers };
    if (o->format == FORMAT_CSV) {
        print_csv(texts, N_TEXTS, numbers, N_NUMBERS, first);
        return;
    }
    printf(first ? "[\n  {" : ",\n  {");
    for (int i = 0; i < N_TEXTS; i++) {
        printf("%s\n    \"%s\": ", i ? "," : "", texts[i].name);
        print_text(texts[i].value, '\\');
    }
    for (int i = 0; i < N_NUMBERS; i++) printf(",\n    \"%s\": %.12g", numbers[i].name, numbers[i].value);
    printf(",\n    \"samples_ts\": [");
    for (int i = 0; i < o->n_runs; i++) printf("%s%.12g", i ? ", " : "", r->speed[i]);
    printf("]\n  }");
}

// One test: runs it, prints its line.
static void bench_test(Bench *b, const BenchOptions *o, int n, BenchKind kind) {
    static const char *const kinds[] = { "pp", "tg", "vs", "tg" };
    Model *m = b->m;
    const Ops *op = m->ops;
    double *speed = alloc_or_die(o->n_runs, sizeof *speed);
    BenchResult r = { .n = n, .kind = kind, .filled = b->depth && o->random_fill, .speed = speed };
    const int n_steps = kind == GENERATE_TEST ? n : kind == VERIFY_TEST ? VERIFY_STEPS : 0;
    const int n_rows = kind == VERIFY_TEST ? VERIFY_STEPS * n : n;
    const int at = snprintf(r.name, sizeof r.name, "%s%d", kinds[kind], n);
    if (b->depth) snprintf(r.name + at, sizeof r.name - (size_t)at, " @ d%d%s", b->depth, r.filled ? " (random fill)" : "");
    if (kind == FORCED_TEST) strcat(r.name, " (forced)");
    read_density(m);                                   // forgets what filled the context
    int64_t launches = 0;                              // before the last run, whose steps are all recorded
    for (int i = 0; i < o->n_runs; i++) {
        progress(r.name, i, o->n_runs, "runs");
        copy_rings(m, 0, b->rings, COPY_IN);
        set_length(m, 0, b->depth);
        op->wait();
        const double before = b->has_joules ? op->joules() : 0;
        if (i + 1 == o->n_runs && op->launches) launches = op->launches();
        speed[i] = 1 / bench_run(b, n, kind, NULL);
        speed[i] *= kind == FORCED_TEST ? b->n_made : n_rows;
        if (b->has_joules) r.joules += (op->joules() - before) / ((double)n_rows * o->n_runs);
        r.mean += speed[i] / o->n_runs;
    }
    r.density = kind == PROMPT_TEST ? read_density(m) : 0;
    const int n_issued = kind == FORCED_TEST ? b->n_passes : n_steps;  // with drafts: a step and all that follows it
    r.per_step = op->launches && n_issued ? (double)(op->launches() - launches) / n_issued : 0;
    progress(r.name, o->n_runs, o->n_runs, "runs");
    for (int i = 0; i < o->n_runs; i++) r.sd += (speed[i] - r.mean) * (speed[i] - r.mean);
    r.sd = o->n_runs > 1 ? sqrt(r.sd / (o->n_runs - 1)) : 0;
    for (int i = 0; i < n && kind == GENERATE_TEST; i++) r.rate += bytes_per_token(m, b->depth + i) / n * r.mean;
    const bool first = !b->n_printed++;
    if (o->format == FORMAT_MD) print_markdown(b, o, &r, first);
    else print_fields(b, o, &r, first);
    if (o->format == FORMAT_MD && kind == FORCED_TEST)
        fprintf(stderr, "# forced acceptance: %d draft tokens per step, %.2f tokens per step; %.3f ms to draft, %.3f ms to verify\n", b->forced.depth,
                (double)(b->n_made - 1) / b->n_passes, 1e3 * b->draft_seconds / b->n_passes,
                1e3 * b->verify_seconds / b->n_passes);
    flush_output();
    free(speed);
}

static void verb_bench(const char *model, const Ops *ops, ModelOptions o, const BenchOptions *b) {
    int longest = 1, deepest = 0, widest = 0;
    for (int i = 0; i < b->prompts.count; i++) longest = max_int(longest, b->prompts.n[i]);
    for (int i = 0; i < b->generated.count; i++) longest = max_int(longest, b->generated.n[i]);
    for (int i = 0; i < b->rows.count; i++) widest = max_int(widest, b->rows.n[i]);
    if (b->forced.depth) widest = max_int(widest, b->forced.depth + 1);
    for (int i = 0; i < b->depths.count; i++) deepest = max_int(deepest, b->depths.n[i]);
    if (widest > STEP_ROWS) die("--rows: expected at most %d rows per step, got %d", STEP_ROWS, widest);
    if (widest) longest = max_int(longest, widest + VERIFY_STEPS);     // so many ids are drafted
    if (b->forced.depth) longest += b->forced.depth + 2;
    if (deepest > MAX_CONTEXT - longest)
        die("-d: expected at most %d tokens in total, got %d and %d", MAX_CONTEXT, deepest, longest);
    o.n_ctx = deepest + longest;
    o.ctx_from = "-p, -n or -d";
    o.n_logits = max_int(o.n_logits, widest);
    Bench bench = { .m = alloc_or_die(1, sizeof *bench.m), .forced = b->forced };
    Model *m = bench.m;
    size_t total;
    bench.bandwidth = ops->bandwidth ? ops->bandwidth() : 0;
    bench.has_joules = ops->joules && ops->joules() >= 0;
    ops->memory(&bench.free_before, &total);
    load_model(m, model, ops, o, NULL);
    if (b->forced.depth > m->options.draft_depth && o.drafter)
        die("--draft-max: %s: expected at most %d draft tokens, got %d", o.drafter, m->options.draft_depth, b->forced.depth);
    print_plan(m);
    read_weights(m, false);
    bench.ids = alloc_or_die(o.n_ctx, sizeof *bench.ids);
    for (int i = 0; i < o.n_ctx; i++) bench.ids[i] = (int32_t)(random_unit(1, i) * (float)m->config.vocab);
    bench.rings = alloc_or_die(copy_rings(m, 0, NULL, COPY_OUT), 1);
    for (int k = 0; k < b->prompts.count; k++) {       // every number of rows has products of its own, to be found or loaded:
        const int n = b->prompts.n[k], batch = m->options.n_batch;     // a whole chunk and the last one
        bench_run(&bench, n > 2 * batch ? batch + 1 + (n - 1) % batch : n, PROMPT_TEST, "warming up");
        set_length(m, 0, 0);
    }
    bench_run(&bench, min_int(longest, 4), GENERATE_TEST, NULL);
    reset_session(m, 0);
    for (int i = 0; i < b->depths.count; i++) {
        bench_to_depth(&bench, b->depths.n[i], b->random_fill);
        for (int k = 0; k < b->prompts.count; k++)
            if (b->prompts.n[k]) bench_test(&bench, b, b->prompts.n[k], PROMPT_TEST);
        for (int k = 0; k < b->generated.count; k++)
            if (b->generated.n[k]) bench_test(&bench, b, b->generated.n[k], GENERATE_TEST);
        for (int k = 0; k < b->generated.count && b->forced.depth; k++) {
            if (!b->generated.n[k]) continue;
            set_length(m, 0, bench.depth);
            bench_run(&bench, 4, FORCED_TEST, NULL);
            bench_test(&bench, b, b->generated.n[k], FORCED_TEST);
        }
        for (int k = 0; k < b->rows.count; k++) {
            if (!b->rows.n[k]) continue;
            set_length(m, 0, bench.depth);
            bench_run(&bench, b->rows.n[k], VERIFY_TEST, NULL);      // its own warm-up: every number of rows is another step
            bench_test(&bench, b, b->rows.n[k], VERIFY_TEST);
        }
        copy_rings(m, 0, bench.rings, COPY_IN);
        set_length(m, 0, bench.depth);
    }
    const double gib = 1 << 30;
    if (b->format == FORMAT_JSON) printf("%s]\n", bench.n_printed ? "\n" : "[");
    if (b->format == FORMAT_MD) {
        printf("\nMemory: %.3f GiB planned, %.3f GiB resident, which includes the mapped pages of the model file.\n",
               (double)planned_memory(m) / gib, (double)resident_memory() / gib);
        if (device_memory(&bench))
            printf("Device: %.3f GiB used, %.1f %% of the plan.\n", (double)device_memory(&bench) / gib,
                   100 * (double)device_memory(&bench) / (double)planned_memory(m));
        printf("Bandwidth: %.1f GB/s. GB/s counts the weights and cache rows that a token reads, once; file and caches are warm.\n",
               bench.bandwidth * 1e-9);
    }
    flush_output();
    free(bench.ids);
    free(bench.rings);
    free_model(m);
    free(m);
}

// ==== [2] Check ======================================================================================================
// Two backends run the same text on the same file: once as a step of few rows, whose rounding is the same on both, and once
// as a prompt, whose products may be rounded otherwise (gemma4.h, contract 6): only the first one is judged. The second backend
// is the CPU, or the definition itself (parts/reference.h), which takes some nanoseconds for each weight and row.

typedef struct {
    char   name[24];
    int    layer;             // where the share is largest
    double off, size, share;  // largest |difference|, largest |value|, off / size there
} Difference;

// What a backend makes of the first n ids in one step; freed by the caller with free_model and free.
static Model *check_run(const char *path, const Ops *ops, ModelOptions o, const int32_t *ids, int n) {
    Model *m = alloc_or_die(1, sizeof *m);
    load_model(m, path, ops, o, "");
    for (int i = 0; i < n; i++) m->chunk[i] = (StepRow){ .token = ids[i], .output = true };
    step(m, &(StepSeg){ .seq = 0, .kind = SEG_CHAIN, .n = n, .rows = m->chunk }, 1);
    return m;
}

// Mean KL divergence in nats of the next token, of the softmax of p from that of q; rows of n logits.
static double mean_divergence(const float *p, const float *q, int rows, int n) {
    double sum = 0;
    for (int r = 0; r < rows; r++, p += n, q += n) {
        const double lp = logsumexp(p, n), lq = logsumexp(q, n);
        for (int i = 0; i < n; i++) sum += exp(p[i] - lp) * ((p[i] - lp) - (q[i] - lq));
    }
    return sum / rows;
}

// Prints what differs, worst layer per name, in the order of the model. Returns the divergence of the logits.
static double check_compare(const Model *a, const Model *b, const char *what) {
    Difference found[32];
    int n_found = 0;
    double divergence = NAN;
    if (a->n_checkpoints != b->n_checkpoints) die("check: got %d checkpoints and %d", a->n_checkpoints, b->n_checkpoints);
    for (int i = 0; i < a->n_checkpoints; i++) {
        const Checkpoint *x = &a->checkpoints[i], *y = &b->checkpoints[i];
        const size_t n = (size_t)x->n_rows * (size_t)x->cols;
        double off = 0, size = 0;
        for (size_t k = 0; k < n; k++) {
            const double d = fabs((double)x->data[k] - (double)y->data[k]);
            if (d > off || isnan(d)) off = d;          // a NaN stays
            size = fmax(size, fabs((double)x->data[k]));
        }
        int k = 0;
        while (k < n_found && strcmp(found[k].name, x->name)) k++;
        if (k == n_found && n_found < 32) {
            n_found++;
            found[k] = (Difference){ .share = -1 };
            memcpy(found[k].name, x->name, sizeof x->name);
        }
        const double share = off == 0 ? 0 : off / size;
        if (k < n_found && (share > found[k].share || (isnan(share) && !isnan(found[k].share)))) {
            found[k].off = off;
            found[k].size = size;
            found[k].share = share;
            found[k].layer = x->layer;
        }
        if (!strcmp(x->name, "result_output")) divergence = mean_divergence(x->data, y->data, x->n_rows, x->cols);
    }
    printf("%s\n| checkpoint         | layer | largest value | largest difference | share   |\n"
           "| ------------------ | ----: | ------------: | -----------------: | ------: |\n", what);
    for (int k = 0; k < n_found; k++)
        printf("| %-18s | %5d | %13.4g | %18.3g | %7.1e |\n", found[k].name, found[k].layer, found[k].size, found[k].off,
               found[k].share);
    printf("next token: mean KL divergence %.3g\n\n", divergence);
    return divergence;
}

// Mean KL divergence in nats of what a backend makes of n ids as one prompt from what it makes of them in steps of `few` rows.
static double prompt_divergence(const char *path, const Ops *ops, ModelOptions o, const int32_t *ids, int n, int few) {
    Model *m = alloc_or_die(1, sizeof *m);
    load_model(m, path, ops, o, NULL);
    const size_t vocab = (size_t)m->config.vocab;
    float *logits[2];
    for (int k = 0; k < 2; k++) {
        const int most = k ? n : few;
        logits[k] = alloc_or_die((size_t)n * vocab, sizeof(float));
        reset_session(m, 0);
        for (int at = 0; at < n; at += most) {
            const int rows = min_int(most, n - at);
            for (int i = 0; i < rows; i++) m->chunk[i] = (StepRow){ .token = ids[at + i], .output = true };
            step(m, &(StepSeg){ .seq = 0, .kind = SEG_CHAIN, .n = rows, .rows = m->chunk }, 1);
            for (int i = 0; i < rows; i++) read_logits(m, i, logits[k] + (size_t)(at + i) * vocab);
            commit_all(m);
        }
    }
    const double divergence = mean_divergence(logits[0], logits[1], n, (int)vocab);
    free(logits[0]);
    free(logits[1]);
    free_model(m);
    free(m);
    return divergence;
}

// gemma4 check: exit status 1 when the next-token distributions of the step of few rows differ by more than CHECK_LIMIT nats.
#define CHECK_LIMIT 0.05
static int verb_check(const char *model, const Ops *ops, const Ops *other, ModelOptions o) {
    static const char text[] =
        "The old lighthouse stood on a rock above the sea. Every evening at 7:45 the keeper climbed its 203 steps, lit the "
        "lamp and wrote one line into a book: the wind, the ships, the colour of the sky. for (int i = 0; i < n; i++) sum += "
        "x[i]; On Sundays his daughter came with bread, apples and the newspaper, and they read it to each other until the "
        "tea was cold.";
    enum { FEW = 16, MANY = STEP_ROWS + 32 };
    if (ops == other)
        die("check: compares a GPU with the CPU, but this build found no GPU it can use; try --against reference");
    Gguf g;
    Tokenizer tok;
    TokIds ids = { 0 };
    open_tokenizer(&tok, &g, model);
    if (tok_encode(&tok, text, sizeof text - 1, TOK_PLAIN, &ids) < 0) die("%s: %s", model, tok.err);
    int32_t all[MANY];
    for (int i = 0; i < MANY; i++) all[i] = i == 0 && tok.bos >= 0 ? tok.bos : ids.ids[(size_t)i % ids.n];
    tok_ids_free(&ids);
    tok_free(&tok);
    gguf_close(&g);

    o.n_ctx = o.n_batch = o.n_logits = MANY;
    o.ctx_from = "";
    double worst = 0;
    for (int k = 0; k < 2; k++) {
        const int n = k ? MANY : FEW;
        char what[80];
        snprintf(what, sizeof what, "check: %s", other->name);
        progress(what, 0, 1, "run");
        Model *a = check_run(model, other, o, all, n);
        progress(what, 1, 1, "run");
        Model *b = check_run(model, ops, o, all, n);
        if (!k) print_plan(b);
        snprintf(what, sizeof what, "%s against %s, a step of %d rows", ops->name, other->name, n);
        const double d = check_compare(a, b, what);
        if (!k) worst = d;
        free_model(a);
        free_model(b);
        free(a);
        free(b);
    }
    printf("%s, a prompt of %d rows against steps of %d rows: mean KL divergence %.3g\n", ops->name, MANY, STEP_ROWS,
           prompt_divergence(model, ops, o, all, MANY, STEP_ROWS));
    flush_output();
    if (worst <= CHECK_LIMIT) return 0;
    die("%s: check: expected a mean KL divergence of at most %g, got %.3g", model, CHECK_LIMIT, worst);
}

// ==== [3] Perplexity =================================================================================================
// How well the model foretells a text, counted as llama-perplexity counts it. The ids of the text are cut into chunks of
// n_ctx, each begins with <bos> in place of its first id, and each id of its second half is judged by those before it in
// the chunk. With a stride chunks have n_ctx + stride / 2 ids, begin `stride` ids apart, and the last `stride` of each
// are judged.   PPL = exp(mean of -log p), its error from the deviation of -log p.
//
// A base file keeps the distributions of one run, so that another run, with other weights or another cache, is compared
// with them id by id: the divergence KL(base || run), whether both have the same first choice, by how much the id's
// probability differs. Little-endian:
//
//   offset  bytes  field
//        0      8  magic "GEMMA4P\n"
//        8      4  version, 1                         12   4  vocabulary
//       16      4  ids of a chunk                     20   4  of these judged
//       24      4  stride; 0: none                    28   4  chunks
//       32      8  hash of the tokenizer, as in a session's file
//       40      8  hash of the ids of all chunks
//       48      8  bytes of the whole file            56   8  hash of the header before this field
//       64         rows: of each judged id f32 log p of the id, f32 least log p, f32 step, u32 likeliest id, and
//                  (log p - least) / step of every id as u16, an even number of them
//   end - 8     8  hash of everything before
//
// So a log p is off by half a step, 1 / 131070 of what lies between the likeliest and the least likely id (under the
// soft-cap of 30 at most 60 nats, so 4.6e-4); the id's own is exact, and sums are made 1 again. Equal runs diverge by
// less than 4e-8 nats, others are off by less than half a step times the mean |log p - log q|: test_ppl sees less than
// 1e-3 of a divergence.

typedef struct {
    int  n_ctx, stride, n_chunks;      // stride 0: none; n_chunks 0: as many as the text has
    const char *base, *compare;        // file to write, to compare with; or NULL
    Format format;
} PplOptions;

typedef struct {
    char     magic[8];
    uint32_t version, vocab, chunk, judged, stride, n_chunks;
    uint64_t tokenizer, ids, file_bytes, hash;
} PplHeader;
_Static_assert(sizeof(PplHeader) == 64, "the table above");

typedef struct { float log_p, least, step; uint32_t best; } PplRow;    // what a row of the file begins with

enum { PPL_ROWS = 256, PPL_PIECE = 16 };               // rows of logits of a step; of these on the host at a time

typedef struct {                       // of one judged id
    double log_p, base_log_p, divergence;
    bool   same_best;
} Judged;

typedef struct {
    Model      *m;
    const PplOptions *o;
    FileStream  file;                  // of base or compare, if there is one
    int         vocab;
    size_t      row_bytes;             // of the file
    float      *logits;                // (PPL_PIECE, vocab)
    uint8_t    *rows;                  // (PPL_PIECE, row_bytes)
    Judged     *judged;                // (n) in the order of the text
    int         n;
} Ppl;

typedef struct {                       // means with their standard errors
    double log_p, ppl, ppl_error, seconds;
    double base_ppl, ratio, ratio_error, divergence, divergence_error, median, p99, p999, most, same, same_error, rms;
} PplResult;

static uint64_t ppl_ids_hash(const int32_t *ids, size_t n) {
    Hash h = hash_new();
    hash_add(&h, ids, n * sizeof *ids);
    return hash_end(&h);
}

static int ppl_chunk(const PplOptions *o) { return o->n_ctx + o->stride / 2; }
static int ppl_judged(const PplOptions *o) { return o->stride ? o->stride : o->n_ctx - 1 - o->n_ctx / 2; }
static int ppl_apart(const PplOptions *o) { return o->stride ? o->stride : o->n_ctx; }

typedef struct { Ppl *p; int first; } PplWork;         // the piece's row 0 is judged id `first`

static void write_base_rows(const void *task, int begin, int end) {
    const PplWork *w = task;
    for (int r = begin; r < end; r++) {
        const float *z = w->p->logits + (size_t)r * (size_t)w->p->vocab;
        const double sum = logsumexp(z, w->p->vocab);
        uint8_t *out = w->p->rows + (size_t)r * w->p->row_bytes;
        uint16_t *code = (uint16_t *)(void *)(out + sizeof(PplRow));
        float least = z[0];
        uint32_t best = 0;
        for (int i = 1; i < w->p->vocab; i++) {
            if (z[i] < least) least = z[i];
            if (z[i] > z[best]) best = (uint32_t)i;
        }
        const float step = (z[best] - least) / 65535;
        const PplRow row = { (float)w->p->judged[w->first + r].log_p, (float)(least - sum), step, best };
        memcpy(out, &row, sizeof row);
        for (int i = 0; i < w->p->vocab; i++)
            code[i] = step > 0 ? (uint16_t)min_int(65535, (int)lrintf((z[i] - least) / step)) : 0;
        if (w->p->vocab % 2) code[w->p->vocab] = 0;
    }
}

static void compare_rows(const void *task, int begin, int end) {
    const PplWork *w = task;
    const int vocab = w->p->vocab;
    for (int r = begin; r < end; r++) {
        const float *z = w->p->logits + (size_t)r * (size_t)vocab;
        const uint8_t *in = w->p->rows + (size_t)r * w->p->row_bytes;
        const uint16_t *code = (const uint16_t *)(const void *)(in + sizeof(PplRow));
        PplRow row;
        memcpy(&row, in, sizeof row);
        const double sum = logsumexp(z, vocab);
        double total = 0, divergence = 0;              // of exp(log p), of that times the difference of logs
        int best = 0;
        for (int i = 0; i < vocab; i++) {
            const double base = row.least + (double)row.step * code[i], p = exp(base);
            total += p;
            divergence += p * (base - (z[i] - sum));
            if (z[i] > z[best]) best = i;
        }
        Judged *j = &w->p->judged[w->first + r];
        j->divergence = divergence / total - log(total);
        j->base_log_p = row.log_p;
        j->same_best = row.best == (uint32_t)best;
    }
}

// The last step's rows of logits, which are followed by the ids next (n).
static void judge_rows(Ppl *p, const int32_t *next, int n) {
    Model *m = p->m;
    const Ops *op = m->ops;
    const size_t vocab = (size_t)p->vocab;
    float log_p[PPL_ROWS];
    op->copy(&(Copy){ m->s.chosen, next, (size_t)n * sizeof *next, COPY_IN });         // nobody samples, nor reads hidden
    op->logprob(&(Logprob){ .n_rows = n, .vocab = p->vocab, .logits = m->s.logits, .ids = m->s.chosen, .out = m->s.hidden });
    op->copy(&(Copy){ log_p, m->s.hidden, (size_t)n * sizeof *log_p, COPY_OUT });
    op->wait();
    for (int r = 0; r < n; r++) {
        if (!isfinite(log_p[r]) && unfinished) unlink(unfinished);
        if (!isfinite(log_p[r])) die("%s: the logits of id %d are not finite", m->gguf.path, p->n + r);
        p->judged[p->n + r] = (Judged){ .log_p = log_p[r] };
    }
    for (int at = 0; at < n && (p->o->base || p->o->compare); at += PPL_PIECE) {
        const int some = min_int(n - at, PPL_PIECE);
        const PplWork work = { p, p->n + at };
        op->copy(&(Copy){ p->logits, m->s.logits + (size_t)at * vocab, (size_t)some * vocab * sizeof(float), COPY_OUT });
        op->wait();
        if (p->o->compare) stream_get(&p->file, p->rows, (size_t)some * p->row_bytes, false);
        if (p->o->compare && p->file.err) die("--kld: %s: %s", p->o->compare, strerror(p->file.err));
        parallel(some, 1, p->o->compare ? compare_rows : write_base_rows, &work);
        if (p->o->base) stream_put(&p->file, p->rows, (size_t)some * p->row_bytes, false);
    }
    p->n += n;
}

// Runs a chunk (n ids) from an empty session; its ids from number `first` + 1 on are judged.
static void judge_chunk(Ppl *p, const int32_t *ids, int n, int first) {
    Model *m = p->m;
    reset_session(m, 0);
    for (int at = 0; at < n - 1; ) {
        int rows = 0, wanted = 0;
        for (; at + rows < n - 1 && rows < m->options.n_batch && wanted < m->options.n_logits; rows++) {
            m->chunk[rows] = (StepRow){ .token = ids[at + rows], .output = at + rows >= first };
            wanted += m->chunk[rows].output;
        }
        step(m, &(StepSeg){ .seq = 0, .kind = SEG_CHAIN, .n = rows, .rows = m->chunk,
                            .more = max_int(n - at - rows, DENSE_ROWS) },
             1);                                       // where prompts are sparse, no row is one of a prompt's last
        if (wanted) judge_rows(p, ids + at + rows - wanted + 1, wanted);
        commit_all(m);
        at += rows;
    }
}

static PplHeader ppl_header(const Model *m, const PplOptions *o, const int32_t *ids) {
    PplHeader h = { .magic = "GEMMA4P", .version = 1, .vocab = (uint32_t)m->config.vocab, .chunk = (uint32_t)ppl_chunk(o),
                    .judged = (uint32_t)ppl_judged(o), .stride = (uint32_t)o->stride, .n_chunks = (uint32_t)o->n_chunks };
    uint64_t model, weights;
    h.magic[7] = '\n';
    hash_model(&m->gguf, &model, &h.tokenizer, &weights);
    h.ids = ppl_ids_hash(ids, (size_t)ppl_apart(o) * (size_t)(o->n_chunks - 1) + h.chunk);
    const uint64_t row = sizeof(PplRow) + round_up(h.vocab, 2) * sizeof(uint16_t);
    h.file_bytes = sizeof h + row * h.judged * h.n_chunks + sizeof(uint64_t);
    Hash hash = hash_new();
    hash_add(&hash, &h, offsetof(PplHeader, hash));
    h.hash = hash_end(&hash);
    return h;
}

static void open_base(Ppl *p, const PplHeader *own) {
    const char *path = p->o->compare;
    struct stat st;
    PplHeader h;
    p->file.fd = open(path, O_RDONLY | O_CLOEXEC);
    if (p->file.fd < 0 || fstat(p->file.fd, &st)) die("--kld: %s: %s", path, strerror(errno));
    if (!S_ISREG(st.st_mode) || st.st_size < (off_t)(sizeof h + sizeof(uint64_t)))
        die("--kld: %s: expected a file written by --kld-base, got %lld bytes", path, (long long)st.st_size);
    if (read(p->file.fd, &h, sizeof h) != sizeof h || memcmp(h.magic, own->magic, sizeof h.magic) || h.version != own->version)
        die("--kld: %s: expected a file written by --kld-base, got another file", path);
    Hash hash = hash_new();
    hash_add(&hash, &h, offsetof(PplHeader, hash));
    if (h.hash != hash_end(&hash)) die("--kld: %s: the header is damaged: wrong checksum", path);
    const struct { const char *name; uint64_t got, want; } fields[] = {
        { "vocabulary", h.vocab, own->vocab }, { "tokenizer", h.tokenizer, own->tokenizer },
        { "-c: ids per chunk", h.chunk, own->chunk }, { "--ppl-stride", h.stride, own->stride },
        { "--chunks", h.n_chunks, own->n_chunks }, { "-f: the text", h.ids, own->ids },
        { "bytes", h.file_bytes, (uint64_t)st.st_size } };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if (fields[i].got != fields[i].want && !strcmp(fields[i].name, "bytes"))
            die("--kld: %s: expected %" PRIu64 " bytes, got %" PRIu64 ": the file is truncated or damaged", path, fields[i].got,
                fields[i].want);
        else if (fields[i].got != fields[i].want)
            die("--kld: %s: %s: expected %" PRIu64 " as in this run, got %" PRIu64, path, fields[i].name, fields[i].want,
                fields[i].got);
    lseek(p->file.fd, 0, SEEK_SET);
    p->file.total = h.file_bytes;
    stream_get(&p->file, NULL, sizeof h, false);
}

static void close_base(Ppl *p) {                       // the checksum at its end
    uint64_t hash = 0;
    if (p->o->base) {
        stream_flush(&p->file);
        hash = hash_end(&p->file.hash);
        if (!p->file.err) p->file.err = write_output(&p->file.out, &hash, sizeof hash);
        p->file.err = finish_output(&p->file.out, p->file.err);
        if (p->file.err && !interrupted) die("--kld-base: %s: %s", p->o->base, strerror(p->file.err));
    }
    if (!p->o->compare || interrupted) return;
    if (read(p->file.fd, &hash, sizeof hash) != sizeof hash || hash != hash_end(&p->file.hash))
        die("--kld: %s: the file is damaged: wrong checksum", p->o->compare);
    close(p->file.fd);
}

static int compare_judged(const void *a, const void *b) {
    const double x = ((const Judged *)a)->divergence, y = ((const Judged *)b)->divergence;
    return (x > y) - (x < y);
}

static double ppl_quantile(const Judged *sorted, int n, double share) {
    const double at = share * (n - 1);
    const int i = (int)at;
    return sorted[i].divergence + (at - i) * (sorted[min_int(i + 1, n - 1)].divergence - sorted[i].divergence);
}

// Mean and standard error of n numbers that come to these sums.
static double mean_error(double sum, double squares, int n, double *mean) {
    *mean = sum / n;
    const double variance = squares / n - *mean * *mean;
    return n > 1 && variance > 0 ? sqrt(variance / (n - 1)) : 0;
}

static PplResult sum_up(Judged *judged, int n) {       // orders them by divergence
    PplResult r = { 0 };
    double s[9] = { 0 }, base, ratio;
    for (int i = 0; i < n; i++) {
        const Judged *j = &judged[i];
        const double worse = j->base_log_p - j->log_p, dp = exp(j->log_p) - exp(j->base_log_p);
        s[0] += -j->log_p, s[1] += j->log_p * j->log_p;
        s[2] += -j->base_log_p;
        s[3] += worse, s[4] += worse * worse;
        s[5] += j->divergence, s[6] += j->divergence * j->divergence;
        s[7] += dp * dp;
        s[8] += j->same_best;
    }
    const double error = mean_error(s[0], s[1], n, &r.log_p);
    r.ppl = exp(r.log_p);
    r.ppl_error = error * r.ppl;
    base = s[2] / n;
    r.base_ppl = exp(base);
    const double ratio_error = mean_error(s[3], s[4], n, &ratio);
    r.ratio = exp(ratio);
    r.ratio_error = ratio_error * r.ratio;
    r.divergence_error = mean_error(s[5], s[6], n, &r.divergence);
    r.same = s[8] / n;
    r.same_error = n > 1 ? sqrt(r.same * (1 - r.same) / (n - 1)) : 0;
    r.rms = sqrt(s[7] / n);
    qsort(judged, (size_t)n, sizeof *judged, compare_judged);
    r.median = ppl_quantile(judged, n, 0.5);
    r.p99 = ppl_quantile(judged, n, 0.99);
    r.p999 = ppl_quantile(judged, n, 0.999);
    r.most = judged[n - 1].divergence;
    return r;
}

// The model was planned for ppl_plan(); ids (n), at least a chunk, begin with <bos> if there is one. Sets o->n_chunks.
// Ctrl-C ends it: the result means nothing then.
static PplResult ppl_measure(Model *m, int32_t bos, const int32_t *ids, int n, PplOptions *o) {
    const int chunk = ppl_chunk(o), judged = ppl_judged(o), apart = ppl_apart(o);
    const int most = o->stride ? max_int(1, (n - chunk + apart - 1) / apart) : n / chunk;
    const double start = seconds();
    o->n_chunks = o->n_chunks ? min_int(o->n_chunks, most) : most;
    const size_t vocab = (size_t)m->config.vocab;
    Ppl p = { .m = m, .o = o, .vocab = m->config.vocab, .row_bytes = sizeof(PplRow) + round_up(vocab, 2) * sizeof(uint16_t) };
    const PplHeader h = ppl_header(m, o, ids);
    const bool files = o->base || o->compare;
    p.logits = alloc_or_die(files ? PPL_PIECE * vocab : 1, sizeof *p.logits);
    p.rows = alloc_or_die(files ? PPL_PIECE * p.row_bytes : 1, 1);
    p.judged = alloc_or_die((size_t)o->n_chunks * (size_t)judged, sizeof *p.judged);
    p.file = (FileStream){ .op = m->ops, .fd = -1, .total = h.file_bytes, .hash = hash_new() };
    p.file.piece = alloc_or_die(files ? SESSION_PIECE : 1, 1);
    if (o->compare) open_base(&p, &h);
    if (o->base) {
        signal(SIGXFSZ, SIG_IGN);
        p.file.err = create_output(&p.file.out, o->base, 0666);
        if (p.file.err) die("--kld-base: %s: %s", o->base, strerror(p.file.err));
        char size[32];
        fprintf(stderr, "# --kld-base: %s: %s for %d ids\n", o->base, amount(size, (double)h.file_bytes, "B"),
                o->n_chunks * judged);
        stream_put(&p.file, &h, sizeof h, false);
    }
    int32_t *chunk_ids = alloc_or_die((size_t)chunk, sizeof *chunk_ids);
    progress("perplexity", 0, (size_t)o->n_chunks, "chunks");
    for (int i = 0; i < o->n_chunks; i++) {
        memcpy(chunk_ids, ids + (size_t)i * (size_t)apart, (size_t)chunk * sizeof *ids);
        if (bos >= 0) chunk_ids[0] = bos;
        judge_chunk(&p, chunk_ids, chunk, chunk - 1 - judged);
        if (p.file.err || interrupted) break;          // a full disk: there is no use in going on
        progress("perplexity", (size_t)i + 1, (size_t)o->n_chunks, "chunks");
    }
    if (interrupted && o->base) p.file.err = EINTR;    // half a file is none
    close_base(&p);
    PplResult r = sum_up(p.judged, p.n);
    r.seconds = seconds() - start;
    free(chunk_ids);
    free(p.file.piece);
    free(p.judged);
    free(p.rows);
    free(p.logits);
    return r;
}

static void print_ppl(const Model *m, const PplOptions *o, const PplResult *r) {
    const int n = o->n_chunks * ppl_judged(o);
    const char *layout = m->options.untied ? "untied" : "tied";
    const NamedText texts[] = {
        { "model_filename", m->gguf.path }, { "model_type", model_name(m) }, { "backends", m->ops->name },
        { "type_k", kv_names[m->options.k_type] }, { "type_v", kv_names[m->options.v_type] },
        { "type_swa", kv_names[ring_type(m)] }, { "kv_layout", layout } };
    const NamedNumber numbers[] = {
        { "kv_tail", m->options.tail }, { "n_ctx", o->n_ctx }, { "ppl_stride", o->stride },
        { "n_chunks", o->n_chunks }, { "n_judged", n }, { "seconds", r->seconds },
        { "nll", r->log_p }, { "ppl", r->ppl }, { "ppl_error", r->ppl_error },
        { "base_ppl", r->base_ppl }, { "ppl_ratio", r->ratio }, { "ppl_ratio_error", r->ratio_error },
        { "kld_mean", r->divergence }, { "kld_error", r->divergence_error }, { "kld_median", r->median },
        { "kld_99", r->p99 }, { "kld_99_9", r->p999 }, { "kld_max", r->most }, { "same_top", r->same },
        { "same_top_error", r->same_error }, { "rms_delta_p", r->rms } };
    enum { N_TEXTS = sizeof texts / sizeof *texts, N_NUMBERS = sizeof numbers / sizeof *numbers };
    const int n_numbers = o->compare ? N_NUMBERS : 9;
    if (o->format == FORMAT_MD) {
        printf("| model | backend | K | V | sliding | context | stride | chunks | ids scored | PPL |\n"
               "| --- | --- | --- | --- | --- | ---: | ---: | ---: | ---: | ---: |\n"
               "| %s | %s | %s | %s | %s | %d | %d | %d | %d | %.4f ± %.4f |\n", model_name(m), m->ops->name,
               kv_names[m->options.k_type], kv_names[m->options.v_type], kv_names[ring_type(m)], o->n_ctx, o->stride,
               o->n_chunks, n, r->ppl, r->ppl_error);
        if (o->compare)
            printf("\n| KL divergence | median | 99 %% | 99.9 %% | largest | same top token | PPL / base PPL | RMS of Δp |\n"
                   "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n"
                   "| %.3e ± %.1e | %.3e | %.3e | %.3e | %.3e | %.3f ± %.3f %% | %.5f ± %.5f | %.4f %% |\n", r->divergence,
                   r->divergence_error, r->median, r->p99, r->p999, r->most, 100 * r->same, 100 * r->same_error, r->ratio,
                   r->ratio_error, 100 * r->rms);
        printf("\nPPL = %.4f +/- %.5f\n", r->ppl, r->ppl_error);
    } else if (o->format == FORMAT_CSV) {
        print_csv(texts, N_TEXTS, numbers, n_numbers, true);
    } else {
        const char *between = o->format == FORMAT_JSON ? ",\n    " : ", ";
        printf(o->format == FORMAT_JSON ? "[\n  {\n    " : "{");
        for (int i = 0; i < N_TEXTS; i++) {
            printf("\"%s\": ", texts[i].name);
            print_text(texts[i].value, '\\');
            printf("%s", between);
        }
        for (int i = 0; i < n_numbers; i++)
            printf("\"%s\": %.12g%s", numbers[i].name, numbers[i].value, i + 1 < n_numbers ? between : "");
        printf(o->format == FORMAT_JSON ? "\n  }\n]\n" : "}\n");
    }
    flush_output();
}

// What a model that measures perplexity is planned for.
static ModelOptions ppl_plan(ModelOptions o, const PplOptions *p) {
    o.n_ctx = ppl_chunk(p);
    o.n_logits = min_int(ppl_judged(p), PPL_ROWS);
    return o;
}

// gemma4 ppl: the exit status.
static int verb_ppl(const char *model, const Ops *ops, ModelOptions o, PplOptions *p, const char *text, size_t n_text,
                    TokMode mode) {
    Model *m = alloc_or_die(1, sizeof *m);
    Tokenizer tok;
    TokIds ids = { 0 };
    if (!ops->logprob) die("ppl: the %s backend has no operation logprob", ops->name);
    load_model(m, model, ops, ppl_plan(o, p), NULL);
    load_tokenizer(&tok, &m->gguf, m->config.vocab);
    if (tok.bos >= 0 && tok__push(&tok, &ids, tok.bos) < 0) die("%s", tok.err);
    if (tok_encode(&tok, text, n_text, mode, &ids) < 0) die("-f: %s", tok.err);
    if (ids.n < (size_t)ppl_chunk(p) || ids.n > INT_MAX)
        die("-f: expected a text of at least %d ids (one chunk), got %zu; try a longer text or a smaller -c", ppl_chunk(p), ids.n);
    read_weights(m, false);
    stop_on(SIGINT);
    const PplResult r = ppl_measure(m, tok.bos, ids.ids, (int)ids.n, p);
    const double density = read_density(m);
    print_plan(m);
    if (density > 0)
        fprintf(stderr, "# pFlash%s: attended to %.1f %% of the blocks\n", o.pflash_density ? ", forced" : "", 100 * density);
    if (!interrupted) print_ppl(m, p, &r);
    tok_ids_free(&ids);
    tok_free(&tok);
    free_model(m);
    free(m);
    return interrupted ? 130 : 0;
}

#endif
