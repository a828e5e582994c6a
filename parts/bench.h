/* bench.h - measurements of a model: verb_bench() measures its speed as llama-bench does, verb_check() compares the
 * checkpoints of two backends, verb_ppl() measures perplexity.
 *
 * Uses generate.h, session.h and text.h. Begin with verb_bench(), verb_check() or verb_ppl().
 *   [1] Bench    [2] Check    [3] Perplexity */
#ifndef BENCH_H
#define BENCH_H

// ==== [1] Bench ======================================================================================================
// ppN runs a prompt of N random tokens; tgN generates N tokens one by one; vsN runs verification steps of N rows, none
// of which is committed. "@ dN": with N tokens in the context. They are run first; with "(random fill)" the cache is
// filled with random numbers instead, which is faster; attention reads as many bytes. tgN (forced) generates N
// tokens in steps with drafts, of which a given fraction is accepted at random: the text means nothing, the time does.
// imgN computes the N soft rows of a picture of noise, already resized; the text model does not run.
// Every test is run once to warm up, then several times: mean and standard deviation of tokens (vsN, imgN:
// rows) per second.

typedef enum { FORMAT_MD, FORMAT_CSV, FORMAT_JSON, FORMAT_JSONL, FORMAT_SQL } Format;

typedef struct {              // drafts that are accepted at random
    float accept_rate[DRAFT_MAX];      // by depth, of drafts whose parents are all accepted
    int   depth;              // drafts in a step; 0: none
    int   tree;               // tokens of the tree that is made of them; 0: they are a chain
} Forced;

typedef struct {
    IntList prompts, generated, rows, images, depths;  // an element 0 of all but depths skips that test
    IntList pair_prompts, pair_generated;              // tests of a prompt and then generation
    int n_printed;            // rows that runs before this one have printed
    bool is_last;             // no run follows
    bool shows_types;         // of the KV cache, in the table
    Forced forced;
    int n_runs;
    bool random_fill;
    Format format;
} BenchOptions;

typedef enum { PROMPT_TEST, GENERATE_TEST, VERIFY_TEST, FORCED_TEST, PAIR_TEST, IMAGE_TEST } BenchKind;
enum { VERIFY_STEPS = 32 };   // steps of a verification run

typedef struct {
    Model   *m;
    int32_t *ids;             // (n_ctx) random
    uint8_t *rings;           // copy of the rings at `depth`; in global layers no row before the end is overwritten
    int      depth;           // tokens in the context
    bool     filled;          // the caches hold random numbers
    double   bandwidth;       // bytes/s of the memory, 0: not known
    double   int8_peak;       // int8 operations/s of the processor in prompts, 0: not known
    bool     has_joules;      // the device reports the energy it uses
    size_t   free_before;     // free bytes of the device before the model was loaded
    int      n_printed;
    int      n_first;         // PAIR_TEST: tokens of the prompt
    uint8_t *picture;         // noise, levels of the largest picture
    float   *soft;            // its soft rows
    Forced   forced;
    double   draft_seconds, verify_seconds;            // of the last run with drafts
    int      n_steps, n_made;                          // its steps with drafts; tokens made
} Bench;

// Writes the rows of a step whose drafts are a tree of the drafter's last candidates, which follow the token that was
// sampled at row `last` of the step before.
static StepSeg bench_tree(Bench *b, int last) {
    Model *m = b->m;
    Candidates c;
    Drafts d = { 0 };
    read_candidates(m, 0, 1, b->forced.depth, &c);
    make_tree(&d, &c, b->forced.tree, -INFINITY);
    m->step_rows[0] = (StepRow){ .token = m->result->chosen[last], .parent = -1, .output = true };
    for (int k = 0; k < d.n; k++)
        m->step_rows[1 + k] = (StepRow){ .token = d.token[k], .parent = d.parent[k], .output = true };
    return (StepSeg){ .seq = 0, .kind = d.branches ? SEG_TREE : SEG_CHAIN, .n = 1 + d.n, .rows = m->step_rows };
}

// Makes at least n tokens, in at least one step with drafts. How many drafts are accepted is random; of a tree, those
// of its chain of most likely tokens. As in sessions, a step with a chain is issued before the host knows the result of
// the last one.
static void bench_forced(Bench *b, int n) {
    Model *m = b->m;
    const StepResult *v = m->result;
    const int depth = b->forced.depth;
    const bool ahead = m->ops->fence && !b->forced.tree;               // else a step ends before the next one is issued
    const int32_t seg = 0;
    double began = 0;
    b->draft_seconds = b->verify_seconds = 0;
    b->n_steps = b->n_made = 0;
    for (int pass = 0; b->n_made < n || !b->n_steps; pass++) {     // the first pass has no drafts and makes one token
        StepSeg next = { .seq = 0, .kind = SEG_CHAIN, .n = 1 + depth, .rows = m->step_rows };
        int accepted = 0;
        while (pass && accepted < depth &&
               random_unit(3, pass * DRAFT_MAX + accepted) < b->forced.accept_rate[accepted]) accepted++;
        m->step_rows[0] = (StepRow){ .token = b->ids[0], .output = true };
        if (!pass) step(m, &(StepSeg){ .seq = 0, .kind = SEG_CHAIN, .n = 1, .rows = m->step_rows }, 1);
        issue_verification(m, &seg, 1, depth, &(int32_t){ 1 + accepted });
        if (!ahead) read_result(m);
        for (int r = 0; r <= depth; r++) m->step_rows[r] = (StepRow){ .token = ON_DEVICE, .output = true };
        if (b->forced.tree) next = bench_tree(b, accepted);
        step(m, &next, 1);
        if (ahead) read_result(m);
        if (pass) {
            b->verify_seconds += v->verified - began;
            b->draft_seconds += v->drafted - v->verified;
            b->n_steps++;
        }
        b->n_made += 1 + accepted;
        began = v->drafted;
    }
}

// Operations that the matrices take for each token of a prompt except the last, two per weight: output rows alone
// continue in the last layer that writes a cache or is tapped (gemma4.c, Pass.last_full), from its q on.
static double prompt_ops(const Model *m) {
    const Config *c = &m->config;
    const int last = max_int(c->first_shared - 1, m->taps.end);
    const Tensor *proj = &m->weights.per_layer_model_proj;
    double n = c->ple_dim ? (double)proj->rows * proj->cols : 0;
    for (int l = 0; l < last && l < c->n_layers; l++) n += layer_size(c, &m->weights.layer[l], false);
    if (last >= c->n_layers) return 2 * n;
    const Tensor *k = &m->weights.layer[last].attn_k, *v = &m->weights.layer[last].attn_v;
    return 2 * (n + (double)k->rows * k->cols + (v->data ? (double)v->rows * v->cols : 0));
}

// Runs n steps of `rows` rows after the end of session 0. As in sessions, a step is issued while the last one runs.
static void bench_steps(Bench *b, int n, int rows, bool commits) {
    Model *m = b->m;
    const Ops *op = m->ops;
    const int from = m->len[0];
    for (int i = 0, last = 0; i < n; i++) {
        for (int r = 0; r < rows; r++)
            m->step_rows[r] = (StepRow){ .token = b->ids[(from + i + r) % m->options.n_ctx], .output = true };
        step(m, &(StepSeg){ .seq = 0, .kind = SEG_CHAIN, .n = rows, .rows = m->step_rows }, 1);
        if (commits) commit_all(m);
        const int fence = op->fence ? op->fence() : 0;
        if (op->fence && i) op->wait_for(last);
        last = fence;
    }
}

static void bench_prompt(Bench *b, int n, const char *what) {          // what: text of a progress line; NULL: none
    Model *m = b->m;
    const int from = m->len[0];
    if (what) progress(what, 0, (size_t)n, "tokens");
    for (int at = 0; at < n; ) {
        at += run_chunk(m, 0, b->ids + from + at, n - at);
        commit_all(m);
        if (what) progress(what, (size_t)at, (size_t)n, "tokens");
    }
}

// Computes the soft rows of a picture of n tokens, as near to a square as n allows.
static void bench_picture(Bench *b, int n) {
    int h = (int)sqrt(n);
    while (n % h) h--;
    if (vision_rows(b->m->vision, b->picture, n / h * EMBEDDER_SIDE, h * EMBEDDER_SIDE, b->soft) != n)
        die("--images: the tower has no positions for a picture of %d x %d tokens", n / h, h);
}

// Runs one test with n tokens (VERIFY_TEST: steps of n rows) after the end of session 0. Returns the seconds.
static double bench_run(Bench *b, int n, BenchKind kind, const char *what) {
    const double start = seconds();
    if (kind == FORCED_TEST) {                         // waits for its last result
        bench_forced(b, n);
        return seconds() - start;
    }
    if (kind == GENERATE_TEST) bench_steps(b, n, 1, true);
    if (kind == VERIFY_TEST) bench_steps(b, VERIFY_STEPS, n, false);
    if (kind == IMAGE_TEST) bench_picture(b, n);
    if (kind == PROMPT_TEST && n) bench_prompt(b, n, what);
    if (kind == PAIR_TEST) {
        bench_prompt(b, b->n_first, NULL);
        bench_steps(b, n - b->n_first, 1, true);
    }
    b->m->ops->wait();
    return seconds() - start;
}

// Fills `out` with random finite numbers in a cache's type, as large as normed K and V; or, scale, with f16 scales.
static void random_rows(uint8_t *out, size_t bytes, KvType type, bool scale) {
    const bool codes = kv_group(type) && !scale;
    for (size_t i = 0; i < bytes / 4; i++) {
        float v[2];
        for (int k = 0; k < 2; k++)
            v[k] = (3.4f * random_unit(2 + (uint64_t)k, (int32_t)i) - 1.7f) * (scale ? 0x1p-7f : 1);
        uint16_t halves[2];
        for (int k = 0; k < 2; k++)
            halves[k] = codes ? (uint16_t)(int)(v[k] * 19000) :
                        type == KV_BF16 && !scale ? gguf_f32_to_bf16(v[k]) : gguf_f32_to_f16(v[k]);
        memcpy(out + i * 4, type == KV_F32 ? (const void *)v : halves, 4);
    }
}

// Fills all slots of session 0's caches with random rows: one megabyte, repeated.
static void fill_caches(Model *m) {
    enum { FILL_BYTES = 1 << 20 };
    const Ops *op = m->ops;
    uint8_t *rows = alloc_or_die(FILL_BYTES, 1);
    for (int i = 0; i < m->n_caches; i++) {
        CachePart parts[CACHE_PARTS];
        const int n_parts = cache_parts(&m->caches[i], 0, parts);
        for (int k = 0; k < n_parts; k++) {
            const CachePart *p = &parts[k];
            const size_t first = p->bytes < FILL_BYTES ? p->bytes : FILL_BYTES;
            random_rows(rows, first, p->type, p->is_scale);
            op->copy(&(Copy){ p->data, rows, first, COPY_IN });
            for (size_t at = first; at < p->bytes; at += first)
                op->copy(&(Copy){ p->data + at, p->data, p->bytes - at < first ? p->bytes - at : first, COPY_WITHIN });
        }
    }
    op->wait();
    free(rows);
}

// Makes session 0 `depth` tokens long.
static void bench_to_depth(Bench *b, int depth, bool random_fill) {
    Model *m = b->m;
    char what[32];
    snprintf(what, sizeof what, "filling d%d", depth);
    if (random_fill) {
        if (depth && !b->filled) fill_caches(m);       // fills all slots: once is enough for all depths
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

// Prints printable ASCII in quotes. quote: what precedes a quote in it, '"' in CSV, '\\' in JSON.
static void print_text(const char *s, char quote) {
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

// Prints a row of the table "test", which the first row creates, as llama-bench names it.
static void print_sql(const NamedText *texts, int n_texts, const NamedNumber *numbers, int n_numbers, bool head) {
    if (head) printf("CREATE TABLE IF NOT EXISTS test (");
    for (int i = 0; i < n_texts && head; i++) printf("%s TEXT, ", texts[i].name);
    for (int i = 0; i < n_numbers && head; i++) printf("%s REAL%s", numbers[i].name, i + 1 < n_numbers ? ", " : ");\n");
    printf("INSERT INTO test (");
    for (int i = 0; i < n_texts; i++) printf("%s, ", texts[i].name);
    for (int i = 0; i < n_numbers; i++) printf("%s%s", numbers[i].name, i + 1 < n_numbers ? ", " : ") VALUES (");
    for (int i = 0; i < n_texts; i++) {
        putchar('\'');
        for (const char *s = texts[i].value; *s; s++) printf(*s == '\'' ? "\'\'" : "%c", *s);
        printf("', ");
    }
    for (int i = 0; i < n_numbers; i++) printf("%.12g%s", numbers[i].value, i + 1 < n_numbers ? ", " : ");\n");
}

// The name of the processor as the system knows it; "": it does not. Valid until the next call.
static const char *cpu_name(void) {
    static char line[200];
    char *name = NULL;
    FILE *f = fopen("/proc/cpuinfo", "r");
    while (f && !name && fgets(line, sizeof line, f))
        if (!strncmp(line, "model name", 10) && (name = strchr(line, ':'))) name += 2;
    if (f) fclose(f);
    if (name) name[strcspn(name, "\n")] = 0;
    return name ? name : "";
}

static const char *time_now(void) {                    // "2026-07-09T12:00:00Z"; valid until the next call
    static char text[32];
    const time_t now = time(NULL);
    struct tm utc;
    if (!gmtime_r(&now, &utc) || !strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &utc)) text[0] = 0;
    return text;
}

// Bytes of this process in memory, with pages of the mapped file; 0: not known. Not the peak, since measuring the
// bandwidth takes more.
static size_t resident_memory(void) {
    unsigned long long pages = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    if (f && fscanf(f, "%*u %llu", &pages) != 1) pages = 0;
    if (f) fclose(f);
    return (size_t)pages * (size_t)sysconf(_SC_PAGESIZE);
}

static size_t planned_memory(const Model *m) {
    const MemoryPlan *p = &m->plan;
    const size_t mapped = p->weights ? 0 : m->binder->bytes + m->drafter->binder->bytes + vision_bytes(m);
    return p->weights + mapped + p->drafter + p->vision + p->kv_global + p->kv_rings + p->staging +
           p->activations + p->scratch;
}

// Device memory that is in use since the model was loaded, with recorded steps; 0: the device has no memory of its own.
static size_t device_memory(const Bench *b) {
    size_t free_bytes = 0, total;
    if (b->m->plan.weights) b->m->ops->memory(&free_bytes, &total);
    return b->m->plan.weights && b->free_before > free_bytes ? b->free_before - free_bytes : 0;
}

typedef struct {              // result of a test
    char   name[64];
    int    n;                 // tokens, or rows of a step or picture
    BenchKind kind;
    bool   filled;            // with random numbers in the context
    const double *speed;      // (n_runs) tokens (rows) per second
    double mean, sd, rate;    // rate: bytes per second of weights and cache rows that are read
    double per_step, joules;  // launches of a step, energy of a token; 0: not known
    double int8_ops;          // of matrices per second, if the peak is known
    double image_ms, image_ms_sd;      // milliseconds of a picture
    double density;           // fraction of the blocks that a sparse prompt attended to; 0: it was dense
} BenchResult;

static void print_markdown_head(const Bench *b, const BenchOptions *o, int width) {    // width: of the column "test"
    const bool launches = b->m->ops->launches != NULL;
    const char *line = "------------------------------";
    printf("| %-30s | %10s | %10s | %-10s | %7s | %*s | %20s | %18s |", "model", "size", "params", "backend", "threads",
           width, "test", "t/s", "GB/s (of memory)");
    if (launches) printf(" %8s |", "launches");
    if (b->has_joules) printf(" %7s |", "J/token");
    if (o->shows_types) printf(" type_k | type_v |");
    printf("\n| %s | ---------: | ---------: | ---------- | ------: | %.*s: | -------------------: | "
           "-----------------: |", line, width - 1, line);
    if (launches) printf(" -------: |");
    if (b->has_joules) printf(" ------: |");
    if (o->shows_types) printf(" ------ | ------ |");
    printf("\n");
}

static void print_markdown(const Bench *b, const BenchOptions *o, const BenchResult *r, bool first) {
    const Model *m = b->m;
    const Ops *op = m->ops;
    const int width = o->random_fill ? 30 : 15;
    const double bytes = model_size(m).bytes, params = model_size(m).params;
    char size[32], count[32], speed[48], read_rate[48] = "";
    if (first) print_markdown_head(b, o, width);
    snprintf(size, sizeof size, "%.2f %s", bytes / (bytes < 0x1p30 ? 0x1p20 : 0x1p30), bytes < 0x1p30 ? "MiB" : "GiB");
    snprintf(count, sizeof count, "%.2f %s", params / (params < 1e9 ? 1e6 : 1e9), params < 1e9 ? "M" : "B");
    snprintf(speed, sizeof speed, "%.2f ± %.2f", r->mean, r->sd);
    if (r->kind == GENERATE_TEST)
        snprintf(read_rate, sizeof read_rate, b->bandwidth > 0 ? "%.2f (%.0f %%)" : "%.2f", r->rate * 1e-9,
                 b->bandwidth > 0 ? r->rate / b->bandwidth * 100 : 0);
    if (r->int8_ops > 0)
        snprintf(read_rate, sizeof read_rate, "%.3f TOPS (%.0f %%)", r->int8_ops * 1e-12,
                 r->int8_ops / b->int8_peak * 100);
    if (r->density > 0)
        snprintf(read_rate, sizeof read_rate, "pFlash%s: %.1f %%", m->options.pflash_density ? ", forced" : "",
                 100 * r->density);
    if (r->kind == IMAGE_TEST)
        snprintf(read_rate, sizeof read_rate, "%.2f ± %.2f ms", r->image_ms, r->image_ms_sd);
    printf("| %-30s | %10s | %10s | %-10s | %7d | %*s | %21s | %*s |", model_name(m), size, count, op->name,
           count_threads(), width, r->name, speed, r->kind == IMAGE_TEST ? 19 : 18, read_rate);
    const bool in_products = r->kind == PROMPT_TEST || r->kind == IMAGE_TEST;  // of cuBLAS, which does not tell what
    if (op->launches && !in_products) printf(" %8.1f |", r->per_step);         // it launches
    if (op->launches && in_products) printf(" %8s |", "");
    if (b->has_joules) printf(" %7.3f |", r->joules);
    if (o->shows_types) printf(" %-6s | %-6s |", kv_names[m->options.k_type], kv_names[m->options.v_type]);
    printf("\n");
}

// Prints a result as CSV or JSON, with more fields.
static void print_fields(const Bench *b, const BenchOptions *o, const BenchResult *r, bool first) {
    const Model *m = b->m;
    const ModelSize size = model_size(m);
    const NamedNumber numbers[] = {
        { "model_size", size.bytes }, { "model_n_params", size.params }, { "n_ubatch", m->options.n_batch },
        { "n_threads", count_threads() },
        { "n_prompt", r->kind == PAIR_TEST ? b->n_first : r->kind == PROMPT_TEST ? r->n : 0 },
        { "n_gen", r->kind == PAIR_TEST ? r->n - b->n_first :
                   r->kind == GENERATE_TEST || r->kind == FORCED_TEST ? r->n : 0 }, { "n_depth", b->depth },
        { "avg_ts", r->mean }, { "stddev_ts", r->sd }, { "read_bytes_per_s", r->rate },
        { "bandwidth_bytes_per_s", b->bandwidth }, { "planned_bytes", (double)planned_memory(m) },
        { "resident_bytes", (double)resident_memory() }, { "n_verify", r->kind == VERIFY_TEST ? r->n : 0 },
        { "launches_per_step", r->per_step }, { "joules_per_token", r->joules },
        { "device_bytes", (double)device_memory(b) },
        { "n_drafted", r->kind == FORCED_TEST ? b->forced.depth : 0 },
        { "n_tree", r->kind == FORCED_TEST ? b->forced.tree : 0 },
        { "forced_tokens_per_step", r->kind == FORCED_TEST ? (double)(b->n_made - 1) / b->n_steps : 0 },
        { "draft_ms", r->kind == FORCED_TEST ? 1e3 * b->draft_seconds / b->n_steps : 0 },
        { "verify_ms", r->kind == FORCED_TEST ? 1e3 * b->verify_seconds / b->n_steps : 0 },
        { "n_image", r->kind == IMAGE_TEST ? r->n : 0 }, { "image_ms", r->image_ms },
        { "image_ms_stddev", r->image_ms_sd },
        { "pflash_alpha", m->options.pflash }, { "pflash_forced", m->options.pflash_density },
        { "pflash_density", r->density }, { "int8_ops_per_s", r->int8_ops },
        { "int8_peak_ops_per_s", b->int8_peak } };
    const NamedText texts[] = {
        { "model_filename", m->gguf.path }, { "model_type", model_name(m) }, { "backends", m->ops->name },
        { "type_k", kv_names[m->options.k_type] }, { "type_v", kv_names[m->options.v_type] },
        { "fill", !b->depth ? "none" : r->filled ? "random" : "prompt" }, { "card", card_name(m->ops) },
        { "type_weights", gguf_type_name(m->weights.layer[0].attn_q.type) }, { "build_commit", COMMIT },
        { "build_compiler", COMPILER }, { "cpu_info", cpu_name() }, { "test_time", time_now() },
        { "model_draft", m->drafter->kind == DRAFTER_NONE ? "" : m->drafter->gguf.path },
        { "model_mmproj", m->vision ? m->vision->gguf.path : "" } };
    enum { N_TEXTS = sizeof texts / sizeof *texts, N_NUMBERS = sizeof numbers / sizeof *numbers };
    if (o->format == FORMAT_CSV) {
        print_csv(texts, N_TEXTS, numbers, N_NUMBERS, first);
        return;
    }
    if (o->format == FORMAT_SQL) {
        print_sql(texts, N_TEXTS, numbers, N_NUMBERS, first);
        return;
    }
    const bool lines = o->format == FORMAT_JSONL;      // an object on each line
    const char *const gap = lines ? " " : "\n    ";
    printf(lines ? "{" : first ? "[\n  {" : ",\n  {");
    for (int i = 0; i < N_TEXTS; i++) {
        printf("%s%s\"%s\": ", i ? "," : "", i || !lines ? gap : "", texts[i].name);
        print_text(texts[i].value, '\\');
    }
    for (int i = 0; i < N_NUMBERS; i++) printf(",%s\"%s\": %.12g", gap, numbers[i].name, numbers[i].value);
    printf(",%s\"samples_ts\": [", gap);
    for (int i = 0; i < o->n_runs; i++) printf("%s%.12g", i ? ", " : "", r->speed[i]);
    printf(lines ? "]}\n" : "]\n  }");
}

// Returns the standard deviation of n numbers, and their mean.
static double mean_and_deviation(const double *x, int n, double *mean) {
    double sum = 0, squares = 0;
    for (int i = 0; i < n; i++) sum += x[i];
    *mean = sum / n;
    for (int i = 0; i < n; i++) squares += (x[i] - *mean) * (x[i] - *mean);
    return n > 1 ? sqrt(squares / (n - 1)) : 0;
}

// The milliseconds of a picture, from the speeds of all runs.
static void picture_times(BenchResult *r, int n_runs) {
    double *ms = alloc_or_die(n_runs, sizeof *ms);
    for (int i = 0; i < n_runs; i++) ms[i] = 1e3 * r->n / r->speed[i];
    r->image_ms_sd = mean_and_deviation(ms, n_runs, &r->image_ms);
    free(ms);
}

// Runs a test, and prints its result.
static void bench_test(Bench *b, const BenchOptions *o, int n, BenchKind kind) {
    static const char *const kinds[] = { "pp", "tg", "vs", "tg", "pp", "img" };
    Model *m = b->m;
    const Ops *op = m->ops;
    double *speed = alloc_or_die(o->n_runs, sizeof *speed);
    BenchResult r = { .n = n, .kind = kind, .filled = b->depth && o->random_fill, .speed = speed };
    const int n_steps = kind == GENERATE_TEST ? n : kind == VERIFY_TEST ? VERIFY_STEPS : 0;
    const int n_rows = kind == VERIFY_TEST ? VERIFY_STEPS * n : n;
    int at = snprintf(r.name, sizeof r.name, "%s%d", kinds[kind], kind == PAIR_TEST ? b->n_first : n);
    if (kind == PAIR_TEST) at += snprintf(r.name + at, sizeof r.name - (size_t)at, "+tg%d", n - b->n_first);
    if (b->depth)
        snprintf(r.name + at, sizeof r.name - (size_t)at, " @ d%d%s", b->depth, r.filled ? " (random fill)" : "");
    if (kind == FORCED_TEST && !b->forced.tree) strcat(r.name, " (forced)");
    if (kind == FORCED_TEST && b->forced.tree)
        snprintf(r.name + strlen(r.name), sizeof r.name - strlen(r.name), " (tree %d)", b->forced.tree);
    read_density(m);                                   // resets the counts of blocks
    int64_t launches = 0;                              // up to the last run, in which all steps are recorded already
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
    }
    r.density = kind == PROMPT_TEST ? read_density(m) : 0;
    const int n_issued = kind == FORCED_TEST ? b->n_steps : n_steps;
    r.per_step = op->launches && n_issued ? (double)(op->launches() - launches) / n_issued : 0;
    progress(r.name, o->n_runs, o->n_runs, "runs");
    r.sd = mean_and_deviation(speed, o->n_runs, &r.mean);
    for (int i = 0; i < n && kind == GENERATE_TEST; i++) r.rate += bytes_per_token(m, b->depth + i) / n * r.mean;
    if (kind == IMAGE_TEST) picture_times(&r, o->n_runs);
    if (kind == PROMPT_TEST && b->int8_peak > 0) r.int8_ops = prompt_ops(m) * r.mean;
    const bool first = !b->n_printed++;
    if (o->format == FORMAT_MD) print_markdown(b, o, &r, first);
    else print_fields(b, o, &r, first);
    if (o->format == FORMAT_MD && kind == FORCED_TEST)
        fprintf(stderr, "# forced acceptance: %d draft tokens per step, %.2f tokens per step; %.3f ms to draft, %.3f "
                        "ms to verify\n",
                b->forced.depth, (double)(b->n_made - 1) / b->n_steps, 1e3 * b->draft_seconds / b->n_steps,
                1e3 * b->verify_seconds / b->n_steps);
    flush_output();
    free(speed);
}

// Sets the context, the output rows and the size of pictures that the tests need.
static void bench_limits(const BenchOptions *b, ModelOptions *o) {
    int max_n = 1, max_depth = 0, max_rows = 0;
    for (int i = 0; i < b->prompts.count; i++) max_n = max_int(max_n, b->prompts.n[i]);
    for (int i = 0; i < b->generated.count; i++) max_n = max_int(max_n, b->generated.n[i]);
    for (int i = 0; i < b->pair_prompts.count; i++)
        max_n = max_int(max_n, b->pair_prompts.n[i] + b->pair_generated.n[i]);
    for (int i = 0; i < b->rows.count; i++) max_rows = max_int(max_rows, b->rows.n[i]);
    if (b->forced.depth) max_rows = max_int(max_rows, 1 + max_int(b->forced.depth, b->forced.tree));
    for (int i = 0; i < b->depths.count; i++) max_depth = max_int(max_depth, b->depths.n[i]);
    for (int i = 0; i < b->images.count; i++) o->image_tokens = max_int(o->image_tokens, b->images.n[i]);
    if (max_rows > STEP_ROWS) die("--rows: expected at most %d rows per step, got %d", STEP_ROWS, max_rows);
    if (max_rows) max_n = max_int(max_n, max_rows + VERIFY_STEPS);     // ids that verification steps use
    if (b->forced.depth) max_n += max_int(b->forced.depth, b->forced.tree) + 2;
    if (max_depth > MAX_CONTEXT - max_n)
        die("-d: expected at most %d tokens in total, got %d and %d", MAX_CONTEXT, max_depth, max_n);
    o->n_ctx = max_depth + max_n;
    o->ctx_from = "-p, -n or -d";
    o->n_logits = max_int(o->n_logits, max_rows);
}

// Steps of a new size are slow at first: products are chosen or loaded. A long prompt needs a whole chunk and its last
// one.
static void bench_warm_up(Bench *b, const BenchOptions *o) {
    Model *m = b->m;
    const int batch = m->options.n_batch;
    int max_n = m->options.n_ctx;
    for (int i = 0; i < o->depths.count; i++) max_n = min_int(max_n, m->options.n_ctx - o->depths.n[i]);
    for (int k = 0; k < o->prompts.count; k++) {
        const int n = o->prompts.n[k];
        bench_run(b, n > 2 * batch ? batch + 1 + (n - 1) % batch : n, PROMPT_TEST, "warming up");
        set_length(m, 0, 0);
    }
    bench_run(b, min_int(max_n, 4), GENERATE_TEST, NULL);
    reset_session(m, 0);
}

// Runs a test for each n of a list.
static void bench_list(Bench *b, const BenchOptions *o, const IntList *list, BenchKind kind) {
    for (int k = 0; k < list->count; k++) {
        const int n = list->n[k];
        if (!n) continue;
        if (kind == FORCED_TEST || kind == VERIFY_TEST || kind == IMAGE_TEST) {  // another kind of step: own warm-up
            set_length(b->m, 0, b->depth);
            bench_run(b, kind == FORCED_TEST ? 4 : n, kind, NULL);
        }
        bench_test(b, o, n, kind);
    }
}

// Runs the tests of -pg.
static void bench_pairs(Bench *b, const BenchOptions *o) {
    for (int k = 0; k < o->pair_prompts.count; k++) {
        b->n_first = o->pair_prompts.n[k];
        bench_test(b, o, b->n_first + o->pair_generated.n[k], PAIR_TEST);
    }
}

// Runs the tests of --images.
static void bench_pictures(Bench *b, const BenchOptions *o) {
    const Model *m = b->m;
    if (!m->vision) return;
    const size_t levels = (size_t)m->vision->max_tokens * EMBEDDER_SIDE * EMBEDDER_SIDE * 3;
    b->picture = alloc_or_die(levels, 1);
    b->soft = alloc_or_die((size_t)m->vision->max_tokens * (size_t)m->config.dim, sizeof *b->soft);
    for (size_t i = 0; i < levels; i++) b->picture[i] = (uint8_t)(256 * random_unit(4, (int32_t)i));
    bench_to_depth(b, 0, false);
    bench_list(b, o, &o->images, IMAGE_TEST);
    free(b->picture);
    free(b->soft);
}

static void print_bench_end(const Bench *b, Format format) {
    const double gib = 1 << 30, planned = (double)planned_memory(b->m), device = (double)device_memory(b);
    if (format == FORMAT_JSON) printf("\n]\n");
    if (format == FORMAT_MD) {
        printf("\nMemory: %.3f GiB planned, %.3f GiB resident, which includes the mapped pages of the model file.\n",
               planned / gib, (double)resident_memory() / gib);
        if (device > 0) printf("Device: %.3f GiB used, %.1f %% of the plan.\n", device / gib, 100 * device / planned);
        printf("Bandwidth: %.1f GB/s. GB/s counts the weights and cache rows that a token reads, once; file and "
               "caches are "
               "warm.\n", b->bandwidth * 1e-9);
        if (b->int8_peak > 0)
            printf("Int8 peak: %.3f TOPS on all threads. TOPS counts two operations for each weight that multiplies a "
                   "token.\n", b->int8_peak * 1e-12);
        printf("build: %s (%s), %s\n", COMMIT, COMPILER, cpu_name());
    }
    flush_output();
}

// Returns the number of rows that were printed, those of earlier runs included.
static int verb_bench(const char *model, const Ops *ops, ModelOptions o, const BenchOptions *b) {
    Bench bench = { .m = alloc_or_die(1, sizeof *bench.m), .forced = b->forced, .n_printed = b->n_printed };
    Model *m = bench.m;
    size_t total;
    bench_limits(b, &o);
    bench.bandwidth = ops->bandwidth ? ops->bandwidth() : 0;
    bench.int8_peak = ops->int8_peak ? ops->int8_peak() : 0;
    bench.has_joules = ops->joules && ops->joules() >= 0;
    ops->memory(&bench.free_before, &total);
    load_model(m, model, ops, o, NULL);
    if (b->forced.depth > m->options.draft_depth && o.drafter)
        die("--draft-max: %s: expected at most %d draft tokens, got %d", o.drafter, m->options.draft_depth,
            b->forced.depth);
    print_plan(m);
    read_weights(m, false);
    bench.ids = alloc_or_die(o.n_ctx, sizeof *bench.ids);
    for (int i = 0; i < o.n_ctx; i++) bench.ids[i] = (int32_t)(random_unit(1, i) * (float)m->config.vocab);
    bench.rings = alloc_or_die(copy_rings(m, 0, NULL, COPY_OUT), 1);
    bench_warm_up(&bench, b);
    for (int i = 0; i < b->depths.count; i++) {
        bench_to_depth(&bench, b->depths.n[i], b->random_fill);
        bench_list(&bench, b, &b->prompts, PROMPT_TEST);
        bench_list(&bench, b, &b->generated, GENERATE_TEST);
        bench_pairs(&bench, b);
        if (b->forced.depth) bench_list(&bench, b, &b->generated, FORCED_TEST);
        bench_list(&bench, b, &b->rows, VERIFY_TEST);
        copy_rings(m, 0, bench.rings, COPY_IN);
        set_length(m, 0, bench.depth);
    }
    bench_pictures(&bench, b);
    if (b->is_last) print_bench_end(&bench, b->format);
    free(bench.ids);
    free(bench.rings);
    free_model(m);
    free(m);
    return bench.n_printed;
}

// ==== [2] Check ======================================================================================================
// Two backends run the same text with the same file: as a step of few rows, and as a prompt (gemma4.h, contract 6). The
// checkpoints of one are compared with those of the other, which is the CPU or the reference (parts/reference.h; it
// takes some nanoseconds for each weight and row). Every layer starts with the residual stream of the other backend
// (follow_stream() in dump.h). So differences do not grow from layer to layer, one tolerance fits any depth, and a
// checkpoint beyond it is the fault of an operation of its own layer.
//
// The difference of two rows x, y of a checkpoint is |x - y| / |x|, with Euclidean norms. Two are judged: that of the
// median row, and that of the worst row. An operation that is off by 1 % is off in every row, so the median is 1e-2,
// unless a norm cancels a factor of the whole row. Correct backends differ in last bits. Where such a value is rounded
// to int8 or to a code of the cache, it may get the neighbouring code ("a jump"). That happens in some rows only.
//
// A row that chose other experts computes other values until the layer ends; these are not judged. The choice is, by
// the gap between the router's logits that changed places (ffn_moe_topk). What two correct backends choose differently
// is nearly tied.

typedef enum {                // what a checkpoint was computed with, from a stream that both backends have in common
    FROM_STREAM,              // f32 operations alone: the embedding, norms
    PRODUCTS,                 // and matrices
    ATTENTION                 // and keys and values from the cache
} CheckKind;

static const struct CheckName { const char *name; CheckKind kind; bool after_experts; } check_names[] = {
    { "inp_scaled", FROM_STREAM, false },              // in order of computation
    { "inp_per_layer", PRODUCTS, false },
    { "attn_norm", FROM_STREAM, false },
    { "Qcur_normed", PRODUCTS, false }, { "Kcur_normed", PRODUCTS, false }, { "Vcur_normed", PRODUCTS, false },
    { "Qcur_pos", PRODUCTS, false }, { "Kcur_pos", PRODUCTS, false },
    { "attn_post_norm", ATTENTION, false }, { "attn_out", ATTENTION, false },
    { "ffn_norm", ATTENTION, false }, { "ffn_norm_1", ATTENTION, false }, { "ffn_norm_2", ATTENTION, false },
    { "ffn_moe_logits", ATTENTION, false }, { "ffn_moe_topk", ATTENTION, false },
    { "ffn_out", ATTENTION, false }, { "ffn_mlp", ATTENTION, false }, { "ffn_moe", ATTENTION, true },
    { "ffn_post_norm", ATTENTION, true }, { "per_layer_embd_out", ATTENTION, true },
    { "out_scaled", ATTENTION, true }, { "l_out", ATTENTION, true },
    { "result_norm", FROM_STREAM, false }, { "result_output", PRODUCTS, false }
};
enum { CHECK_NAMES = sizeof check_names / sizeof *check_names, CHECK_ROWS = STEP_ROWS + 32 };

typedef struct { double median, worst; } RowDifference;        // over the rows of a checkpoint

// How far two correct backends may be apart. Seen: the largest of cpu against reference on both minis and of an H100
// against cpu on 17 files (minis; 26B, 31B and E2B of true width; tiny models in f32, f16, q8_0 and q4_k_m), each with
// every type of cache. Margins are a factor of 2 and more.
//   FROM_STREAM  f32 sums in another order. Seen 2e-7.
//   PRODUCTS, ATTENTION in short steps: the same, and jumps of int8 codes. Seen 6e-7 in the median row, 1.1e-3 and
//                1.3e-2 in the worst. If rows are wide, the median row may have a jump too, of 3e-4.
//   ATTENTION, if a code jumped before a row's key or value: all rows that see the key differ a little, and the next
//                int8 codes jump in every one of them. Seen 6.3e-3 and 1.1e-2 (random weights, 96 rows).
//   ATTENTION on a device whose keys and values are not f32: scores and weights are f16 there, and the next int8 codes
//                jump in every row. Seen 1.2e-2 and 1.8e-2.
//   Prompts, if a backend converts factors of products to 16 bits where the other has int8. Seen: PRODUCTS 6.2e-3 and
//                1e-2; ATTENTION 2.5e-2 and 3.9e-2, with 4 or 3 bits 7.6e-2 and 0.17, since codes of the cache jump.
static RowDifference check_tolerance(const Model *a, const Model *b, CheckKind kind, int layer, int n_rows,
                                     const bool *key_jumped) {
    const bool exact = n_rows <= STEP_ROWS || (a->ops->exact_prompts && b->ops->exact_prompts);
    if (kind == FROM_STREAM) return (RowDifference){ 1e-5, 1e-5 };
    if (kind == PRODUCTS) return exact ? (RowDifference){ 1e-3, 2e-2 } : (RowDifference){ 2e-2, 3e-2 };
    const Cache *c = &b->caches[b->cache_of[layer]];
    const KvType k = c->k.type, v = c->v.type;
    const bool on_host = a->ops->on_host && b->ops->on_host;
    if (exact && (on_host || (k == KV_F32 && v == KV_F32)))
        return (RowDifference){ key_jumped[b->cache_of[layer]] ? 1.5e-2 : 1e-3, 5e-2 };
    if (exact) return (RowDifference){ 3e-2, 6e-2 };
    return k > KV_Q8_0 || v > KV_Q8_0 ? (RowDifference){ 0.2, 0.4 } : (RowDifference){ 6e-2, 0.12 };
}

typedef struct {              // of the checkpoints of one name, that with the largest ratio
    int    count;             // of these checkpoints; 0: the model has none
    int    layer, row;        // row: the worst
    RowDifference off, tolerance;
    double ratio;             // off / tolerance, the larger of the two; above 1: FAIL. A NaN counts as Inf
} Difference;

typedef struct {              // the comparison of two runs
    Difference found[CHECK_NAMES];
    bool       failed;
    Difference first;         // the first checkpoint beyond its tolerance, in order of layers, then of check_names
    const char *first_name;
    int        place;         // of first in that order
    bool       flipped[CHECK_ROWS];    // rows that chose other experts in the current layer
    bool       key_jumped[MAX_LAYERS]; // (caches) the key or value of a row is off by more than last bits
    int        n_flips, n_choices;     // rows x layers
    double     tie;           // of all flips: the largest gap between the router's logits that changed places
} Comparison;

// Runs n ids in one step on a backend, and keeps all checkpoints. The caller frees the model with free_model and free.
// follow: the checkpoints of another run, whose stream every layer starts with; or NULL.
static Model *check_run(const char *path, const Ops *ops, ModelOptions o, const int32_t *ids, int n,
                        const Checkpoint *follow) {
    Model *m = alloc_or_die(1, sizeof *m);
    load_model(m, path, ops, o, "");
    m->follow = follow;
    for (int i = 0; i < n; i++) m->step_rows[i] = (StepRow){ .token = ids[i], .output = true };
    step(m, &(StepSeg){ .seq = 0, .kind = SEG_CHAIN, .n = n, .rows = m->step_rows }, 1);
    return m;
}

// Mean KL divergence, in nats, of the next token's distribution: KL(softmax(p) || softmax(q)), over rows of n logits.
static double mean_divergence(const float *p, const float *q, int rows, int n) {
    double sum = 0;
    for (int r = 0; r < rows; r++, p += n, q += n) {
        const double lp = logsumexp(p, n), lq = logsumexp(q, n);
        for (int i = 0; i < n; i++) sum += exp(p[i] - lp) * ((p[i] - lp) - (q[i] - lq));
    }
    return sum / rows;
}

static double row_norm(const float *x, int n) {
    double squares = 0;
    for (int i = 0; i < n; i++) squares += (double)x[i] * x[i];
    return sqrt(squares);
}

static double row_difference(const Checkpoint *x, const Checkpoint *y, int r) {
    const int n = x->cols;
    const float *u = x->data + (size_t)r * (size_t)n, *v = y->data + (size_t)r * (size_t)n;
    double squares = 0;
    for (int i = 0; i < n; i++) squares += ((double)u[i] - v[i]) * ((double)u[i] - v[i]);
    return squares == 0 ? 0 : sqrt(squares) / row_norm(u, n);
}

static bool has_id(const int32_t *ids, int n, int32_t id) {
    for (int i = 0; i < n; i++)
        if (ids[i] == id) return true;
    return false;
}

// Row r of ffn_moe_topk: the experts that two backends chose. 0: the same. Else how near the tie was: the largest gap
// between the router's logits of an expert that only one chose and one that only the other chose, over the norm of the
// row's logits, which are the checkpoint before x.
static double chosen_gap(Comparison *c, const Checkpoint *x, const Checkpoint *y, int r) {
    const int n = x->cols, n_experts = x[-1].cols;
    const float *logits = x[-1].data + (size_t)r * (size_t)n_experts;
    int32_t ours[MAX_EXPERTS], theirs[MAX_EXPERTS];
    double gap = 0;
    assert(!strcmp(x[-1].name, "ffn_moe_logits"));
    memcpy(ours, x->data + (size_t)r * (size_t)n, (size_t)n * sizeof *ours);
    memcpy(theirs, y->data + (size_t)r * (size_t)n, (size_t)n * sizeof *theirs);
    c->flipped[r] = false;
    for (int i = 0; i < n; i++)
        for (int j = 0; j < n; j++) {
            if (has_id(theirs, n, ours[i]) || has_id(ours, n, theirs[j])) continue;
            c->flipped[r] = true;
            gap = fmax(gap, fabs((double)logits[ours[i]] - logits[theirs[j]]) / row_norm(logits, n_experts));
        }
    c->n_choices++;
    c->n_flips += c->flipped[r];
    c->tie = fmax(c->tie, gap);
    return gap;
}

static int compare_differences(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

// Compares two checkpoints, and notes the result if its ratio is the largest of its name so far.
static void check_checkpoint(Comparison *c, const Model *a, const Model *b, const Checkpoint *x, const Checkpoint *y) {
    int k = 0, n = 0;
    double rows[CHECK_ROWS];
    while (k < CHECK_NAMES && strcmp(check_names[k].name, x->name)) k++;
    assert(k < CHECK_NAMES && x->n_rows <= CHECK_ROWS);
    const bool chosen = !strcmp(x->name, "ffn_moe_topk");
    Difference d = { .count = c->found[k].count + 1, .layer = x->layer };
    d.tolerance = check_tolerance(a, b, check_names[k].kind, x->layer, x->n_rows, c->key_jumped);
    if (chosen) d.tolerance.worst *= sqrt(2);          // two logits are off, in opposite ways
    for (int r = 0; r < x->n_rows; r++) {
        if (check_names[k].after_experts && c->flipped[r]) continue;
        rows[n] = chosen ? chosen_gap(c, x, y, r) : row_difference(x, y, r);
        if (isnan(rows[n])) rows[n] = INFINITY;
        if (rows[n] > d.off.worst) d.off.worst = rows[n], d.row = r;
        n++;
    }
    qsort(rows, (size_t)n, sizeof *rows, compare_differences);
    if (n) d.off.median = rows[n / 2];
    if ((!strcmp(x->name, "Kcur_pos") || !strcmp(x->name, "Vcur_normed")) && d.off.worst > 1e-5)
        c->key_jumped[b->cache_of[x->layer]] = true;
    d.ratio = fmax(d.off.median / d.tolerance.median, d.off.worst / d.tolerance.worst);
    if (d.count == 1 || d.ratio > c->found[k].ratio) c->found[k] = d;
    c->found[k].count = d.count;
    if (d.ratio <= 1) return;
    const int place = (k < CHECK_NAMES - 2 ? x->layer : MAX_LAYERS) * CHECK_NAMES + k;         // the results come last
    if (c->failed && place > c->place) return;
    c->failed = true;
    c->place = place;
    c->first = d;
    c->first_name = x->name;
}

static void print_first(const Comparison *c) {         // the first checkpoint beyond its tolerance
    const Difference *d = &c->first;
    const bool all = d->off.median > d->tolerance.median;
    printf("first difference: ");
    if (d->layer != OUT_OF_LAYERS) printf("layer %d, ", d->layer);
    printf("%s: %.1e", c->first_name, all ? d->off.median : d->off.worst);
    if (all) printf(" in the median row");
    else printf(" in row %d", d->row);
    printf(", tolerance %.1e\n", all ? d->tolerance.median : d->tolerance.worst);
}

// Prints the comparison of two runs: for each name the checkpoint that is nearest to its tolerance, or farthest beyond
// it. Returns false if one is beyond.
static bool check_compare(const Model *a, const Model *b, const char *what) {
    Comparison c = { 0 };
    if (a->n_checkpoints != b->n_checkpoints)
        die("check: got %d checkpoints and %d", a->n_checkpoints, b->n_checkpoints);
    for (int i = 0; i < a->n_checkpoints; i++) check_checkpoint(&c, a, b, &a->checkpoints[i], &b->checkpoints[i]);
    printf("%s\n| checkpoint         | layer | median row | tolerance | worst row | tolerance | result |\n"
           "| ------------------ | ----: | ---------: | --------: | --------: | --------: | ------ |\n", what);
    for (int k = 0; k < CHECK_NAMES; k++) {
        const Difference *d = &c.found[k];
        if (!d->count) continue;
        printf("| %-18s | %5d | %10.1e | %9.1e | %9.1e | %9.1e | %-6s |\n", check_names[k].name, d->layer,
               d->off.median, d->tolerance.median, d->off.worst, d->tolerance.worst, d->ratio <= 1 ? "ok" : "FAIL");
    }
    if (c.n_flips)
        printf("experts: %d of %d choices differ; their logits are at most %.1e of the row's norm apart; what these "
               "rows compute then is not judged\n", c.n_flips, c.n_choices, c.tie);
    if (c.failed) print_first(&c);
    printf("\n");
    return !c.failed;
}

// Logits (n, vocab) of n ids run in steps of at most max_rows rows. Not a run with checkpoints: steps are recorded, and
// every layer reads what the one before wrote.
static float *plain_logits(Model *m, const int32_t *ids, int n, int max_rows) {
    const size_t vocab = (size_t)m->config.vocab;
    float *logits = alloc_or_die((size_t)n * vocab, sizeof *logits);
    reset_session(m, 0);
    for (int at = 0; at < n; at += max_rows) {
        const int rows = min_int(max_rows, n - at);
        for (int i = 0; i < rows; i++) m->step_rows[i] = (StepRow){ .token = ids[at + i], .output = true };
        step(m, &(StepSeg){ .seq = 0, .kind = SEG_CHAIN, .n = rows, .rows = m->step_rows }, 1);
        for (int i = 0; i < rows; i++) read_logits(m, i, logits + (size_t)(at + i) * vocab);
        commit_all(m);
    }
    return logits;
}

// The next-token distributions of whole passes; theirs (n, vocab): the logits of the other backend. Returns false if
// those of short steps are farther from them than correct backends were seen to be: 0.049 nats; with experts 0.29 (the
// 26B's dimensions, random weights), since a row that chose another expert differs from there on. A wrong cache is some
// nats away. A prompt is not judged here: a model of random weights amplifies what 16-bit products round.
static bool check_plain(const char *path, const Ops *ops, ModelOptions o, const int32_t *ids, int n,
                        const Checkpoint *theirs) {
    Model *m = model_open(path, ops, o, NULL);
    float *steps = plain_logits(m, ids, n, STEP_ROWS), *prompt = plain_logits(m, ids, n, n);
    const double d = mean_divergence(theirs->data, steps, n, theirs->cols), limit = m->config.n_experts ? 1 : 0.2;
    assert(!strcmp(theirs->name, "result_output") && theirs->n_rows == n);
    printf("next token, from whole passes: mean KL divergence %.2g, tolerance %g, %s; %d rows as a prompt against "
           "steps of %d: %.2g\n", d, limit, d <= limit ? "ok" : "FAIL", n, STEP_ROWS,
           mean_divergence(steps, prompt, n, theirs->cols));
    free(steps);
    free(prompt);
    model_close(m);
    return d <= limit;
}

// gemma4 check. Returns the exit status: 1 if a checkpoint is beyond its tolerance.
static int verb_check(const char *model, const Ops *ops, const Ops *other, ModelOptions o) {
    static const char text[] =
        "The old lighthouse stood on a rock above the sea. Every evening at 7:45 the keeper climbed its 203 steps, "
        "lit the lamp and wrote one line into a book: the wind, the ships, the colour of the sky. for (int i = 0; i "
        "< n; i++) sum += x[i]; On Sundays his daughter came with bread, apples and the newspaper, and they read it "
        "to each other until the tea was cold.";
    enum { FEW = 16 };
    if (ops == other)
        die("check: compares a GPU with the CPU, but this build found no GPU it can use; try --against reference");
    Gguf g;
    Tokenizer tok;
    TokIds ids = { 0 };
    open_tokenizer(&tok, &g, model);
    if (tok_encode(&tok, text, sizeof text - 1, TOK_PLAIN, &ids) < 0) die("%s: %s", model, tok.err);
    int32_t all[CHECK_ROWS];
    for (int i = 0; i < CHECK_ROWS; i++) all[i] = i == 0 && tok.bos >= 0 ? tok.bos : ids.ids[(size_t)i % ids.n];
    tok_ids_free(&ids);
    tok_free(&tok);
    gguf_close(&g);

    o.n_ctx = o.n_batch = o.n_logits = CHECK_ROWS;
    o.ctx_from = "";
    bool good = true;
    for (int k = 0; k < 2; k++) {
        const int n = k ? CHECK_ROWS : FEW;
        char what[80];
        snprintf(what, sizeof what, "check: %s", other->name);
        progress(what, 0, 1, "run");
        Model *a = check_run(model, other, o, all, n, NULL);
        progress(what, 1, 1, "run");
        Model *b = check_run(model, ops, o, all, n, a->checkpoints);
        if (!k) print_plan(b);
        snprintf(what, sizeof what, "%s against %s, a %s of %d rows", ops->name, other->name, k ? "prompt" : "step", n);
        good &= check_compare(a, b, what);
        model_close(b);
        if (k) good &= check_plain(model, ops, o, all, n, &a->checkpoints[a->n_checkpoints - 1]);
        model_close(a);
    }
    flush_output();
    return good ? 0 : 1;
}

// ==== [3] Perplexity =================================================================================================
// How well the model predicts a text, computed as llama-perplexity does. The ids of the text are cut into chunks of
// n_ctx. The first id of each chunk is replaced by <bos>. Each id of the second half is judged: its probability, given
// the ids before it in the chunk. With a stride, chunks have n_ctx + stride / 2 ids and begin `stride` ids apart; the
// last `stride` ids of each are judged.   PPL = exp(mean of -log p); its error follows from the standard deviation of
// -log p.
//
// A base file holds the distributions of a run. Another run, with other weights or another cache type, is compared with
// it id by id: the divergence KL(base || run), whether the most probable id is the same, and the difference of the id's
// probability. All fields are little-endian:
//
//   offset  bytes  field
//        0      8  magic "GEMMA4P\n"
//        8      4  version, 1                         12   4  vocabulary
//       16      4  ids of a chunk                     20   4  judged ids of a chunk
//       24      4  stride; 0: none                    28   4  chunks
//       32      8  hash of the tokenizer, as in a session file
//       40      8  hash of the ids of all chunks
//       48      8  bytes of the whole file            56   8  hash of the header before this field
//       64         a row for each judged id: f32 log p of the id, f32 smallest log p, f32 step, u32 most probable id,
//                  and for every id (log p - smallest) / step as u16, padded to an even number
//   end - 8     8  hash of everything before
//
// The error of a stored log p is at most half a step: 1 / 131070 of the distance between the most and the least
// probable id, which with the soft-cap of 30 is at most 60 nats, so 4.6e-4. The id's own log p is exact. Sums of
// probabilities are normalised to 1. Equal runs have a divergence below 4e-8 nats; the error of others is below half a
// step times the mean of |log p - log q|: test_ppl finds less than 1e-3 of the divergence.

typedef struct {
    int  n_ctx, stride, n_chunks;      // stride 0: none; n_chunks 0: all of the text
    const char *base, *compare;        // base file to write, to compare with; or NULL
    Format format;
} PplOptions;

typedef struct {
    char     magic[8];
    uint32_t version, vocab, chunk, judged, stride, n_chunks;
    uint64_t tokenizer, ids, file_bytes, hash;
} PplHeader;
_Static_assert(sizeof(PplHeader) == 64, "the table above");

typedef struct { float log_p, min, step; uint32_t best; } PplRow;      // the beginning of a row of the file

enum { PPL_ROWS = 256, PPL_PIECE = 16 };               // output rows of a step; rows that the host copies at once

typedef struct {                       // a judged id
    double log_p, base_log_p, divergence;
    bool   same_best;
} Judged;

typedef struct {
    Model      *m;
    const PplOptions *o;
    FileStream  file;                  // the base file, if there is one
    int         vocab;
    size_t      row_bytes;             // of the file
    float      *logits;                // (PPL_PIECE, vocab)
    uint8_t    *rows;                  // (PPL_PIECE, row_bytes)
    Judged     *judged;                // (n) in text order
    int         n;
} Ppl;

typedef struct {                       // means with their standard errors
    double log_p, ppl, ppl_error, seconds;
    double base_ppl, ratio, ratio_error, divergence, divergence_error, median, p99, p999, max, same, same_error, rms;
} PplResult;

static uint64_t ppl_ids_hash(const int32_t *ids, size_t n) {
    Hash h = hash_new();
    hash_add(&h, ids, n * sizeof *ids);
    return hash_end(&h);
}

static int ppl_chunk(const PplOptions *o) { return o->n_ctx + o->stride / 2; }
static int ppl_judged(const PplOptions *o) { return o->stride ? o->stride : o->n_ctx - 1 - o->n_ctx / 2; }
static int ppl_apart(const PplOptions *o) { return o->stride ? o->stride : o->n_ctx; }

typedef struct { Ppl *p; int first; } PplWork;         // first: number of the judged id of row 0

static void write_base_rows(const void *task, int begin, int end) {
    const PplWork *w = task;
    for (int r = begin; r < end; r++) {
        const float *z = w->p->logits + (size_t)r * (size_t)w->p->vocab;
        const double sum = logsumexp(z, w->p->vocab);
        uint8_t *out = w->p->rows + (size_t)r * w->p->row_bytes;
        uint16_t *code = (uint16_t *)(void *)(out + sizeof(PplRow));
        float min = z[0];
        uint32_t best = 0;
        for (int i = 1; i < w->p->vocab; i++) {
            if (z[i] < min) min = z[i];
            if (z[i] > z[best]) best = (uint32_t)i;
        }
        const float step = (z[best] - min) / 65535;
        const PplRow row = { (float)w->p->judged[w->first + r].log_p, (float)(min - sum), step, best };
        memcpy(out, &row, sizeof row);
        for (int i = 0; i < w->p->vocab; i++)
            code[i] = step > 0 ? (uint16_t)min_int(65535, (int)lrintf((z[i] - min) / step)) : 0;
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
        double total = 0, divergence = 0;              // sums of p and of p * (log p - log q)
        int best = 0;
        for (int i = 0; i < vocab; i++) {
            const double base = row.min + (double)row.step * code[i], p = exp(base);
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

// Judges the n output rows of the last step: ids next[i] follow them.
static void judge_rows(Ppl *p, const int32_t *next, int n) {
    Model *m = p->m;
    const Ops *op = m->ops;
    const size_t vocab = (size_t)p->vocab;
    float log_p[PPL_ROWS];
    op->copy(&(Copy){ m->s.chosen, next, (size_t)n * sizeof *next, COPY_IN });         // free: nothing is sampled
    op->logprob(&(Logprob){ .n_rows = n, .vocab = p->vocab, .logits = m->s.logits, .ids = m->s.chosen,
                            .out = m->s.hidden });
    op->copy(&(Copy){ log_p, m->s.hidden, (size_t)n * sizeof *log_p, COPY_OUT });
    op->wait();
    for (int r = 0; r < n; r++) {
        if (!isfinite(log_p[r])) die("%s: the logits of id %d are not finite", m->gguf.path, p->n + r);
        p->judged[p->n + r] = (Judged){ .log_p = log_p[r] };
    }
    for (int at = 0; at < n && (p->o->base || p->o->compare); at += PPL_PIECE) {
        const int rows = min_int(n - at, PPL_PIECE);
        const PplWork work = { p, p->n + at };
        op->copy(&(Copy){ p->logits, m->s.logits + (size_t)at * vocab, (size_t)rows * vocab * sizeof(float),
                          COPY_OUT });
        op->wait();
        if (p->o->compare) stream_get(&p->file, p->rows, (size_t)rows * p->row_bytes, false);
        if (p->o->compare && p->file.err) die("--kld: %s: %s", p->o->compare, strerror(p->file.err));
        parallel(rows, 1, p->o->compare ? compare_rows : write_base_rows, &work);
        if (p->o->base) stream_put(&p->file, p->rows, (size_t)rows * p->row_bytes, false);
    }
    p->n += n;
}

// Runs a chunk of n ids in an empty session, and judges those after number `first`.
static void judge_chunk(Ppl *p, const int32_t *ids, int n, int first) {
    Model *m = p->m;
    reset_session(m, 0);
    for (int at = 0; at < n - 1; ) {
        int rows = 0, n_out = 0;
        for (; at + rows < n - 1 && rows < m->options.n_batch && n_out < m->options.n_logits; rows++) {
            m->step_rows[rows] = (StepRow){ .token = ids[at + rows], .output = at + rows >= first };
            n_out += m->step_rows[rows].output;
        }
        const int more = max_int(n - at - rows, DENSE_ROWS);           // if prompts are sparse, all rows are
        step(m, &(StepSeg){ .seq = 0, .kind = SEG_CHAIN, .n = rows, .rows = m->step_rows, .more = more }, 1);
        if (n_out) judge_rows(p, ids + at + rows - n_out + 1, n_out);
        commit_all(m);
        at += rows;
    }
}

static PplHeader ppl_header(const Model *m, const PplOptions *o, const int32_t *ids) {
    PplHeader h = { .magic = "GEMMA4P", .version = 1, .vocab = (uint32_t)m->config.vocab,
                    .chunk = (uint32_t)ppl_chunk(o), .judged = (uint32_t)ppl_judged(o), .stride = (uint32_t)o->stride,
                    .n_chunks = (uint32_t)o->n_chunks };
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

// Opens the base file to compare with. own: the header that this run would write.
static void open_base(Ppl *p, const PplHeader *own) {
    const char *path = p->o->compare;
    struct stat st;
    PplHeader h;
    p->file.fd = open(path, O_RDONLY | O_CLOEXEC);
    if (p->file.fd < 0 || fstat(p->file.fd, &st)) die("--kld: %s: %s", path, strerror(errno));
    if (!S_ISREG(st.st_mode) || st.st_size < (off_t)(sizeof h + sizeof(uint64_t)))
        die("--kld: %s: expected a file written by --kld-base, got %lld bytes", path, (long long)st.st_size);
    if (read(p->file.fd, &h, sizeof h) != sizeof h || memcmp(h.magic, own->magic, sizeof h.magic) ||
        h.version != own->version)
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
            die("--kld: %s: expected %" PRIu64 " bytes, got %" PRIu64 ": the file is truncated or damaged", path,
                fields[i].got, fields[i].want);
        else if (fields[i].got != fields[i].want)
            die("--kld: %s: %s: expected %" PRIu64 " as in this run, got %" PRIu64, path, fields[i].name,
                fields[i].want, fields[i].got);
    lseek(p->file.fd, 0, SEEK_SET);
    p->file.total = h.file_bytes;
    stream_get(&p->file, NULL, sizeof h, false);
}

static void close_base(Ppl *p) {                       // writes or compares the checksum
    uint64_t hash = 0;
    if (p->o->base) {
        stream_flush(&p->file);
        hash = hash_end(&p->file.hash);
        if (!p->file.err) p->file.err = write_output(&p->file.out, &hash, sizeof hash);
        p->file.err = finish_output(&p->file.out, p->file.err);
        if (p->file.err && !interrupted) die_output("--kld-base", &p->file.out, p->file.err);
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

static double ppl_quantile(const Judged *sorted, int n, double fraction) {
    const double at = fraction * (n - 1);
    const int i = (int)at;
    return sorted[i].divergence + (at - i) * (sorted[min_int(i + 1, n - 1)].divergence - sorted[i].divergence);
}

// Returns the standard error of the mean of n numbers, from their sum and the sum of their squares.
static double mean_error(double sum, double squares, int n, double *mean) {
    *mean = sum / n;
    const double variance = squares / n - *mean * *mean;
    return n > 1 && variance > 0 ? sqrt(variance / (n - 1)) : 0;
}

static PplResult sum_up(Judged *judged, int n) {       // sorts them by divergence
    PplResult r = { 0 };
    double log_p = 0, log_p2 = 0, base = 0, worse = 0, worse2 = 0, kld = 0, kld2 = 0, delta_p2 = 0, same = 0, ratio;
    for (int i = 0; i < n; i++) {
        const Judged *j = &judged[i];
        const double w = j->base_log_p - j->log_p, delta_p = exp(j->log_p) - exp(j->base_log_p);
        log_p += -j->log_p;
        log_p2 += j->log_p * j->log_p;
        base += -j->base_log_p;
        worse += w;
        worse2 += w * w;
        kld += j->divergence;
        kld2 += j->divergence * j->divergence;
        delta_p2 += delta_p * delta_p;
        same += j->same_best;
    }
    const double error = mean_error(log_p, log_p2, n, &r.log_p);
    r.ppl = exp(r.log_p);
    r.ppl_error = error * r.ppl;
    r.base_ppl = exp(base / n);
    const double ratio_error = mean_error(worse, worse2, n, &ratio);
    r.ratio = exp(ratio);
    r.ratio_error = ratio_error * r.ratio;
    r.divergence_error = mean_error(kld, kld2, n, &r.divergence);
    r.same = same / n;
    r.same_error = n > 1 ? sqrt(r.same * (1 - r.same) / (n - 1)) : 0;
    r.rms = sqrt(delta_p2 / n);
    qsort(judged, (size_t)n, sizeof *judged, compare_judged);
    r.median = ppl_quantile(judged, n, 0.5);
    r.p99 = ppl_quantile(judged, n, 0.99);
    r.p999 = ppl_quantile(judged, n, 0.999);
    r.max = judged[n - 1].divergence;
    return r;
}

static void create_base(Ppl *p, const PplHeader *h) {
    const char *path = p->o->base;
    char size[32];
    p->file.err = create_output(&p->file.out, path, 0666);
    if (p->file.err) die_output("--kld-base", &p->file.out, p->file.err);
    fprintf(stderr, "# --kld-base: %s: %s for %d ids\n", path, amount(size, (double)h->file_bytes, "B"),
            p->o->n_chunks * ppl_judged(p->o));
    stream_put(&p->file, h, sizeof *h, false);
}

// Measures the perplexity of ids (n): at least a chunk, the first is <bos> if the model has one. Requires: the model
// was planned with ppl_plan(). Sets o->n_chunks. Ctrl-C ends it; then the result means nothing.
static PplResult ppl_measure(Model *m, int32_t bos, const int32_t *ids, int n, PplOptions *o) {
    const int chunk = ppl_chunk(o), judged = ppl_judged(o), apart = ppl_apart(o);
    const int max_chunks = o->stride ? max_int(1, (n - chunk + apart - 1) / apart) : n / chunk;
    const double start = seconds();
    o->n_chunks = o->n_chunks ? min_int(o->n_chunks, max_chunks) : max_chunks;
    const size_t vocab = (size_t)m->config.vocab;
    Ppl p = { .m = m, .o = o, .vocab = m->config.vocab,
              .row_bytes = sizeof(PplRow) + round_up(vocab, 2) * sizeof(uint16_t) };
    const PplHeader h = ppl_header(m, o, ids);
    const bool files = o->base || o->compare;
    p.logits = alloc_or_die(files ? PPL_PIECE * vocab : 1, sizeof *p.logits);
    p.rows = alloc_or_die(files ? PPL_PIECE * p.row_bytes : 1, 1);
    p.judged = alloc_or_die((size_t)o->n_chunks * (size_t)judged, sizeof *p.judged);
    p.file = (FileStream){ .op = m->ops, .fd = -1, .total = h.file_bytes, .hash = hash_new() };
    p.file.piece = alloc_or_die(files ? SESSION_PIECE : 1, 1);
    if (o->compare) open_base(&p, &h);
    if (o->base) create_base(&p, &h);
    int32_t *chunk_ids = alloc_or_die((size_t)chunk, sizeof *chunk_ids);
    progress("perplexity", 0, (size_t)o->n_chunks, "chunks");
    for (int i = 0; i < o->n_chunks; i++) {
        memcpy(chunk_ids, ids + (size_t)i * (size_t)apart, (size_t)chunk * sizeof *ids);
        if (bos >= 0) chunk_ids[0] = bos;
        judge_chunk(&p, chunk_ids, chunk, chunk - 1 - judged);
        if (p.file.err || interrupted) break;          // the disk is full
        progress("perplexity", (size_t)i + 1, (size_t)o->n_chunks, "chunks");
    }
    if (interrupted && o->base) p.file.err = EINTR;    // an incomplete file is removed
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

static void print_ppl_markdown(const Model *m, const PplOptions *o, const PplResult *r) {
    printf("| model | backend | K | V | sliding | context | stride | chunks | ids scored | PPL |\n"
           "| --- | --- | --- | --- | --- | ---: | ---: | ---: | ---: | ---: |\n"
           "| %s | %s | %s | %s | %s | %d | %d | %d | %d | %.4f ± %.4f |\n", model_name(m), m->ops->name,
           kv_names[m->options.k_type], kv_names[m->options.v_type], kv_names[ring_type(m)], o->n_ctx, o->stride,
           o->n_chunks, o->n_chunks * ppl_judged(o), r->ppl, r->ppl_error);
    if (o->compare)
        printf("\n| KL divergence | median | 99 %% | 99.9 %% | largest | same top token | PPL / base PPL "
               "| RMS of Δp |\n"
               "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n"
               "| %.3e ± %.1e | %.3e | %.3e | %.3e | %.3e | %.3f ± %.3f %% | %.5f ± %.5f | %.4f %% |\n",
               r->divergence, r->divergence_error, r->median, r->p99, r->p999, r->max, 100 * r->same,
               100 * r->same_error, r->ratio, r->ratio_error, 100 * r->rms);
    printf("\nPPL = %.4f +/- %.5f\n", r->ppl, r->ppl_error);
}

static void print_ppl_json(const NamedText *texts, int n_texts, const NamedNumber *numbers, int n_numbers, bool lines) {
    const char *between = lines ? ", " : ",\n    ";
    printf(lines ? "{" : "[\n  {\n    ");
    for (int i = 0; i < n_texts; i++) {
        printf("\"%s\": ", texts[i].name);
        print_text(texts[i].value, '\\');
        printf("%s", between);
    }
    for (int i = 0; i < n_numbers; i++)
        printf("\"%s\": %.12g%s", numbers[i].name, numbers[i].value, i + 1 < n_numbers ? between : "");
    printf(lines ? "}\n" : "\n  }\n]\n");
}

static void print_ppl(const Model *m, const PplOptions *o, const PplResult *r) {
    const char *layout = m->options.untied ? "untied" : "tied";
    const NamedText texts[] = {
        { "model_filename", m->gguf.path }, { "model_type", model_name(m) }, { "backends", m->ops->name },
        { "type_k", kv_names[m->options.k_type] }, { "type_v", kv_names[m->options.v_type] },
        { "type_swa", kv_names[ring_type(m)] }, { "kv_layout", layout } };
    const NamedNumber numbers[] = {
        { "kv_tail", m->options.tail }, { "n_ctx", o->n_ctx }, { "ppl_stride", o->stride },
        { "n_chunks", o->n_chunks }, { "n_judged", o->n_chunks * ppl_judged(o) }, { "seconds", r->seconds },
        { "nll", r->log_p }, { "ppl", r->ppl }, { "ppl_error", r->ppl_error },
        { "base_ppl", r->base_ppl }, { "ppl_ratio", r->ratio }, { "ppl_ratio_error", r->ratio_error },
        { "kld_mean", r->divergence }, { "kld_error", r->divergence_error }, { "kld_median", r->median },
        { "kld_99", r->p99 }, { "kld_99_9", r->p999 }, { "kld_max", r->max }, { "same_top", r->same },
        { "same_top_error", r->same_error }, { "rms_delta_p", r->rms } };
    enum { N_TEXTS = sizeof texts / sizeof *texts, N_NUMBERS = sizeof numbers / sizeof *numbers };
    const int n_numbers = o->compare ? N_NUMBERS : 9;
    if (o->format == FORMAT_MD) print_ppl_markdown(m, o, r);
    else if (o->format == FORMAT_CSV) print_csv(texts, N_TEXTS, numbers, n_numbers, true);
    else print_ppl_json(texts, N_TEXTS, numbers, n_numbers, o->format == FORMAT_JSONL);
    flush_output();
}

// Options of a model that measures perplexity.
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
    if (tok.bos >= 0 && tok_push_id(&tok, &ids, tok.bos) < 0) die("%s", tok.err);
    if (tok_encode(&tok, text, n_text, mode, &ids) < 0) die("-f: %s", tok.err);
    if (ids.n < (size_t)ppl_chunk(p) || ids.n > INT_MAX)
        die("-f: expected a text of at least %d ids (one chunk), got %zu; try a longer text or a smaller -c",
            ppl_chunk(p),
            ids.n);
    read_weights(m, false);
    stop_on(SIGINT);
    const PplResult r = ppl_measure(m, tok.bos, ids.ids, (int)ids.n, p);
    const double density = read_density(m);
    print_plan(m);
    if (density > 0)
        fprintf(stderr, "# pFlash%s: attended to %.1f %% of the blocks\n", o.pflash_density ? ", forced" : "",
                100 * density);
    if (!interrupted) print_ppl(m, p, &r);
    tok_ids_free(&ids);
    tok_free(&tok);
    free_model(m);
    free(m);
    return interrupted ? 130 : 0;
}

#endif
