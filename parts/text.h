/* text.h - loads the tokenizer of a file, describes a model and its plan in words, and runs the smaller verbs.
 *
 * Uses the model, load.h, plan.h and answer.h (hashes). Begin with load_tokenizer() and print_plan().
 *   [1] The tokenizer of a file    [2] Model and plan in words    [3] Verbs */
#ifndef TEXT_H
#define TEXT_H

// ==== [1] The tokenizer of a file ===================================================================================

static TokStr tok_str(GgufStr s) { return (TokStr){ s.s, s.n }; }

static int token_id(Gguf *g, const char *key, int vocab) {           // -1: the file lacks the key
    return gguf_find_kv(g, key) ? (int)key_int(g, key, 0, vocab - 1, 0) : -1;
}

// Dies unless the file's tokenizer is Gemma 4's. Ollama's exporter calls it llama, with the pre-tokenizer gemma4.
static void check_tokenizer_kind(Gguf *g) {
    GgufStr kind = { "", 0 }, pre = { "", 0 };
    const int has_kind = gguf_get_str(g, "tokenizer.ggml.model", &kind);
    if (has_kind < 0 || gguf_get_str(g, "tokenizer.ggml.pre", &pre) < 0) die_gguf(g);
    if (!has_kind) die("%s: key 'tokenizer.ggml.model': missing; the file has no tokenizer", g->path);
    if (!str_is(kind, "gemma4") && !(str_is(kind, "llama") && str_is(pre, "gemma4")))
        die("%s: key 'tokenizer.ggml.model': expected 'gemma4', got '%s' (E_META_RANGE)", g->path, shown(kind));
}

// The key's array of strings. Dies if it is missing.
static const GgufStr *key_strs(Gguf *g, const char *key, size_t *n) {
    const GgufStr *strs = NULL;
    const int found = gguf_get_strs(g, key, &strs, n);
    if (found < 0) die_gguf(g);
    if (!found) die("%s: key '%s': missing (E_META_MISSING)", g->path, key);
    return strs;
}

// The texts of the file's tokens; *n: their number, at most `rows`, those of token_embd.weight; 0: not known. Tokens
// without a row cannot occur: they are left out.
static const GgufStr *key_tokens(Gguf *g, size_t rows, size_t *n) {
    const GgufStr *tokens = key_strs(g, "tokenizer.ggml.tokens", n);
    if (*n < rows)
        die("%s: key 'tokenizer.ggml.tokens': expected %zu texts, one per row of token_embd.weight, got %zu "
            "(E_SHAPE)", g->path, rows, *n);
    if (rows && *n > rows) {
        fprintf(stderr, "# note: %zu token%s no row in token_embd.weight, the first: %s; left out\n", *n - rows,
                *n - rows == 1 ? " has" : "s have", shown(tokens[rows]));
        *n = rows;
    }
    if (*n < 1 || *n > MAX_VOCAB)
        die("%s: key 'tokenizer.ggml.tokens': expected 1 to %d texts, got %zu (E_META_ARRAY)", g->path, MAX_VOCAB, *n);
    return tokens;
}

static const GgufStr *key_merges(Gguf *g, size_t *n) {
    const GgufStr *merges = key_strs(g, "tokenizer.ggml.merges", n);
    if (*n > INT_MAX)
        die("%s: key 'tokenizer.ggml.merges': expected at most %d, got %zu (E_META_ARRAY)", g->path, INT_MAX, *n);
    for (size_t i = 0; i < *n; i++)
        if (merges[i].n < 3 || !memchr(merges[i].s + 1, ' ', merges[i].n - 2))
            die("%s: key 'tokenizer.ggml.merges': merge %zu: expected two texts separated by a space, got '%s' "
                "(E_META_RANGE)", g->path, i, shown(merges[i]));
    return merges;
}

// Notes ids outside the vocabulary that nothing reads.
static void check_unread_ids(Gguf *g, size_t n_tokens) {
    static const char *const names[] = { "unknown", "padding", "mask", "separator", "seperator", "cls" };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char key[64];
        int64_t id = 0;
        snprintf(key, sizeof key, "tokenizer.ggml.%s_token_id", names[i]);
        if (gguf_get_int(g, key, INT64_MIN, INT64_MAX, &id) < 0) die_gguf(g);
        if (id < 0 || id >= (int64_t)n_tokens)
            fprintf(stderr, "# note: key '%s': %" PRId64 " is not a token; nothing needs it\n", key, id);
    }
}

// Reads the ids that end generation besides eos and eot: at most TOK_MAX_STOPS. Ids outside the vocabulary are noted.
static int read_ends(Gguf *g, size_t n_tokens, int32_t *ends) {
    static const char *const keys[] = { "tokenizer.ggml.eos_token_ids", "tokenizer.ggml.eom_token_id" };
    int64_t ids[TOK_MAX_STOPS];
    int n = 0;
    for (int k = 0; k < 2; k++) {
        const GgufKv *kv = gguf_find_kv(g, keys[k]);
        const size_t n_ids = kv ? (size_t)(kv->type == GGUF_V_ARRAY ? kv->count : 1) : 0;
        if (n_ids > TOK_MAX_STOPS)
            die("%s: key '%s': expected at most %d ids, got %zu (E_META_ARRAY)", g->path, keys[k], TOK_MAX_STOPS,
                n_ids);
        if (kv && gguf_get_ints(g, keys[k], INT32_MIN, UINT32_MAX, ids, n_ids) < 0) die_gguf(g);
        for (size_t i = 0; i < n_ids; i++) {
            if (ids[i] < 0 || ids[i] >= (int64_t)n_tokens)
                fprintf(stderr, "# note: key '%s': %" PRId64 " is not a token and ends nothing\n", keys[k], ids[i]);
            else if (n < TOK_MAX_STOPS)
                ends[n++] = (int32_t)ids[i];
        }
    }
    return n;
}

// The file's chat template; of several, the first. Empty: it has none.
static GgufStr key_template(Gguf *g) {
    static const char key[] = "tokenizer.chat_template";
    const GgufKv *kv = gguf_find_kv(g, key);
    GgufStr text = { "", 0 };
    if (kv && kv->type == GGUF_V_ARRAY && kv->strs) return kv->count ? kv->strs[0] : text;
    if (gguf_get_str(g, key, &text) < 0) die_gguf(g);
    return text;
}

// vocab: the number of tokens that the weights have rows for; 0: as many as the file's token_embd.weight has, if any.
static void load_tokenizer(Tokenizer *t, Gguf *g, int vocab) {
    size_t n_tokens = 0, n_merges = 0;
    check_tokenizer_kind(g);
    const GgufTensor *embd = gguf_find_tensor(g, "token_embd.weight");
    const size_t rows = vocab ? (size_t)vocab : embd ? (size_t)embd->ne[1] : 0;
    const GgufStr *tokens = key_tokens(g, rows, &n_tokens), *merges = key_merges(g, &n_merges);
    const GgufKv *scores = gguf_find_kv(g, "tokenizer.ggml.scores");  // nothing reads them
    const size_t n_all = (size_t)gguf_find_kv(g, "tokenizer.ggml.tokens")->count;
    if (scores && (scores->type != GGUF_V_ARRAY || scores->count != n_all))
        die("%s: key 'tokenizer.ggml.scores': expected an array of %zu (E_META_ARRAY)", g->path, n_all);
    check_unread_ids(g, n_tokens);

    TokStr *text = alloc_or_die(n_tokens + n_merges, sizeof *text);
    int64_t *types64 = alloc_or_die(n_all, sizeof *types64);
    int32_t *types = alloc_or_die(n_tokens, sizeof *types), ends[TOK_MAX_STOPS];
    for (size_t i = 0; i < n_tokens; i++) text[i] = tok_str(tokens[i]);
    for (size_t i = 0; i < n_merges; i++) text[n_tokens + i] = tok_str(merges[i]);
    const int has_types = gguf_get_ints(g, "tokenizer.ggml.token_type", INT32_MIN, INT32_MAX, types64, n_all);
    if (has_types < 0) die_gguf(g);
    for (size_t i = 0; i < n_tokens; i++) types[i] = (int32_t)types64[i];
    const TokVocab v = {
        .tokens = text, .n_tokens = (int)n_tokens, .types = has_types ? types : NULL,
        .merges = text + n_tokens, .n_merges = (int)n_merges,
        .bos = token_id(g, "tokenizer.ggml.bos_token_id", (int)n_tokens),
        .eos = token_id(g, "tokenizer.ggml.eos_token_id", (int)n_tokens),
        .eot = token_id(g, "tokenizer.ggml.eot_token_id", (int)n_tokens),
        .ends = ends, .n_ends = read_ends(g, n_tokens, ends),
        .chat_template = tok_str(key_template(g)),
        .has_ple = key_int(g, "gemma4.embedding_length_per_layer_input", 0, 1 << 16, 0) > 0
    };
    if (tok_init(t, &v) < 0) die("%s: tokenizer: %s", g->path, t->err);
    free(text);
    free(types64);
    free(types);
}

// Notes the tokens around a picture that the vocabulary lacks, if the model has an image tower.
static void note_picture_tokens(const Model *m, const Tokenizer *t) {
    const bool open = t->image_open >= 0, close = t->image_close >= 0;
    if (m->vision && !(open && close))
        fprintf(stderr, "# note: the vocabulary has no %s%s%s: pictures stand in the prompt without %s\n",
                open ? "" : "<|image>", open || close ? "" : " and ", close ? "" : "<image|>",
                open || close ? "it" : "them");
}

static void model_tokenizer(Model *m, Tokenizer *t) {
    load_tokenizer(t, &m->gguf, m->config.vocab);
    note_picture_tokens(m, t);
}

// ==== [2] Model and plan in words ===================================================================================

// Returns the name of the GPU that the operations are planned for, or "" for the CPU. It is valid until the next call.
static const char *card_name(const Ops *op) {
    static char name[280];
    const Card *card = op->card ? op->card() : NULL;
    snprintf(name, sizeof name, "%s%s", card ? card->name : "", card && is_pretended(card) ? " (pretended)" : "");
    return name;
}

static void print_card(FILE *f, const char *label, const Ops *op) {
    const Card *card = op->card ? op->card() : NULL;
    if (card)
        fprintf(f, "%s%s, compute capability %d.%d, %d SMs, %.1f GiB%s\n", label, card_name(op), card->major,
                card->minor,
                card->n_sm, (double)card->memory / (1 << 30), card->host_memory ? " shared with the host" : "");
}

#if !defined(COMMIT) && defined(__has_include)         // a tree that is not built by make has no such header
#if __has_include("commit.h")
#include "commit.h"
#endif
#endif
#ifndef COMMIT
#define COMMIT "unknown"
#endif
#ifdef __clang__
#define COMPILER "clang " __clang_version__
#else
#define COMPILER "gcc " __VERSION__
#endif

static void print_warnings(Model *m) {
    if (m->options.n_ctx > m->config.n_ctx_train)
        fprintf(stderr, "# warning: context %d exceeds the trained length %d; quality may suffer\n", m->options.n_ctx,
                m->config.n_ctx_train);
    print_unknown(m->binder);
    if (m->drafter->kind != DRAFTER_NONE) print_unknown(m->drafter->binder);
}

// Returns what to say after the name of the backend if it is the CPU although this build could use a GPU.
static const char *backend_note(const Model *m) {
    (void)m;
#ifdef USE_CUDA
    if (m->ops->on_host && !cuda_ops()) return " (no GPU usable by this build)";
#endif
    return "";
}

// Which weights are planned in host memory, in words: "experts of 19 layers, FFNs of 2 layers"; "": none. Valid until
// the next call.
static const char *host_weights(const Model *m) {
    static char text[160];
    static const char *const names[] = { "experts", "FFNs", "other matrices" };
    int n_layers[3] = { 0 }, last[3] = { -1, -1, -1 };
    bool table = false;
    *text = 0;
    for (int i = 0; i < m->binder->n_uploads; i++) {
        const Upload *u = &m->binder->uploads[i];
        if (!u->tensor.in_host) continue;
        table |= u->layer < 0;
        const Leaving turn = leaving_of(m, u);
        const int kind = u->tensor.n > 1 ? 0 : turn == LEAVES_LAST ? 1 : 2;
        if (u->layer >= 0 && last[kind] != u->layer) last[kind] = u->layer, n_layers[kind]++;
    }
    for (int k = 0; k < 3; k++)
        if (n_layers[k])
            snprintf(text + strlen(text), sizeof text - strlen(text), "%s%s of %d layer%s", *text ? ", " : "", names[k],
                     n_layers[k], n_layers[k] == 1 ? "" : "s");
    if (table) snprintf(text + strlen(text), sizeof text - strlen(text), "%sthe per-layer embedding table",
                        *text ? ", " : "");
    return text;
}

// Tokens per second that the memories allow at position pos: the device's weights and cache rows pass once, and what
// lies in host memory passes over the bus. 0: a rate is not known.
static double most_tokens_per_second(const Model *m, int pos) {
    const double device = m->ops->bandwidth ? m->ops->bandwidth() : 0, bus = m->ops->bus ? m->ops->bus() : 0;
    const double host = (double)m->plan.from_host;
    if (device <= 0 || (host > 0 && bus <= 0)) return 0;
    return 1 / ((bytes_per_token(m, pos) - host) / device + (host > 0 ? host / bus : 0));
}

// Prints model, backend and context on one line of stderr, and warnings.
static void print_model(Model *m) {
    const char *card = card_name(m->ops);
    const char *host = host_weights(m);
    fprintf(stderr, "# %s%s (%s) on %s%s%s%s, context %d%s%s%s\n", style.dim, model_name(m),
            gguf_type_name(m->weights.layer[0].attn_q.type), m->ops->name, *card ? " " : "", card, backend_note(m),
            m->options.n_ctx, *host ? "; in host memory: " : "", host, style.normal);
    print_warnings(m);
}

// Prints model, plan and device to stderr.
static const char *layers_of_tower(const Vision *v, char out[64]) {
    snprintf(out, 64, v->embedder ? "one matrix, no layers (gemma4uv)" : "%d layers", v->n_layers);
    return out;
}

static void print_plan(Model *m) {
    const Config *c = &m->config;
    const double mib = 1 << 20;
    bool tied = false;
    for (int i = 0; i < m->n_caches; i++) tied |= m->caches[i].n_rot > 0;
    const KvType k = m->options.k_type, v = m->options.v_type;
    fprintf(stderr, "# %s: %d layers, dim %d, %d experts, vocabulary %d, weights %.1f MiB (%s)\n", model_name(m),
            c->n_layers, c->dim, c->n_experts, c->vocab, (double)m->binder->bytes / mib,
            gguf_type_name(m->weights.layer[0].attn_q.type));
    fprintf(stderr, "# plan: context %d: global KV %.1f MiB (%s%s%s %s), window KV %.1f MiB, staging %.1f MiB, "
                    "activations "
            "%.1f MiB, scratch %.1f MiB\n", m->options.n_ctx, (double)m->plan.kv_global / mib,
            kv_names[k], k == v ? "" : "/", k == v ? "" : kv_names[v], tied ? "tied" : "untied",
            (double)m->plan.kv_rings / mib, (double)m->plan.staging / mib, (double)m->plan.activations / mib,
            (double)m->plan.scratch / mib);
    if (m->plan.in_host)
        fprintf(stderr, "# plan: %.1f MiB of weights in host memory (%s), of which a token reads %.1f MiB over the "
                "bus\n", (double)m->plan.in_host / mib, host_weights(m), (double)m->plan.from_host / mib);
    if (m->plan.weights)
        fprintf(stderr, "# weights loaded in %.2f s, %.2f GB/s\n", m->upload_seconds,
                (double)m->binder->bytes / m->upload_seconds * 1e-9);
    print_warnings(m);
    const Drafter *d = m->drafter;
    if (d->kind != DRAFTER_NONE)
        fprintf(stderr, "# draft model: %s %s: %d layers, dim %d, weights %.1f MiB (%s)%s; plan: %.1f MiB\n",
                d->kind == DRAFTER_MTP ? "MTP assistant" : "DFlash", d->gguf.path,
                d->config.n_layers, d->config.dim, (double)d->binder->bytes / mib,
                gguf_type_name(d->weights.layer[0].attn_q.type), d->weights_uploaded ? "" : ", not loaded yet",
                (double)m->plan.drafter / mib);
    const Vision *tower = m->vision;
    char layers[64];
    if (tower)
        fprintf(stderr, "# image tower: %s: %s, width %d, weights %.1f MiB (%s), pictures of up to %d tokens; "
                "plan: %.1f MiB\n", tower->gguf.path, layers_of_tower(tower, layers), tower->dim,
                (double)tower->binder.bytes / mib, gguf_type_name(tower->projection.type), tower->max_tokens,
                (double)m->plan.vision / mib);
    fprintf(stderr, "# backend: %s%s, %d thread%s\n", m->ops->name, backend_note(m), count_threads(),
            count_threads() == 1 ? "" : "s");
    print_card(stderr, "# card: ", m->ops);
}

// Prints the sampling steps that are switched on, in the order in which they run.
static void print_sampling(const Model *m, const SampleParams *p) {
    fprintf(stderr, "# sampling: ");
    if (m->n_suppressed) fprintf(stderr, "%d tokens suppressed, ", m->n_suppressed);
    if (m->s.bias) fprintf(stderr, "logit bias, ");
    if (m->s.counts && (p->repeat != 1 || p->frequency != 0 || p->presence != 0))
        fprintf(stderr, "penalties (repeat %g, frequency %g, presence %g), ", (double)p->repeat, (double)p->frequency,
                (double)p->presence);
    if (p->temperature <= 0) {
        fprintf(stderr, "greedy (temperature 0)\n");
        return;
    }
    fprintf(stderr, "temperature %g, ", (double)p->temperature);
    if (p->top_k > 0) fprintf(stderr, "top-k %d, ", (int)p->top_k);
    if (p->top_p < 1) fprintf(stderr, "top-p %g, ", (double)p->top_p);
    if (p->min_p > 0) fprintf(stderr, "min-p %g, ", (double)p->min_p);
    fprintf(stderr, "then sample, seed %" PRIu64 "\n", p->seed);
}

// ==== [3] Verbs =====================================================================================================

// Loads the tokenizer of a file, which need not contain weights.
static void open_tokenizer(Tokenizer *t, Gguf *g, const char *path) {
    open_model_file(g, path, false);
    load_tokenizer(t, g, 0);
}

// Reads token ids from a file: little-endian int32. The caller frees the result, which has *n ids.
static int32_t *read_id_file(const char *path, int *n) {
    size_t size = 0;
    uint8_t *bytes = read_file(path, &size, "--ids");
    if (!size || size % 4) die("--ids: %s: expected little-endian int32 ids, got %zu bytes", path, size);
    if (size / 4 > MAX_CONTEXT) die("--ids: %s: expected at most %d ids, got %zu", path, MAX_CONTEXT, size / 4);
    *n = (int)(size / 4);
    int32_t *ids = alloc_or_die(*n, sizeof *ids);
    for (int i = 0; i < *n; i++) {
        const uint8_t *b = bytes + (size_t)i * 4;
        ids[i] = (int32_t)((uint32_t)b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24);
    }
    free(bytes);
    return ids;
}

// The ids of <bos> and a text, as --raw runs them. The caller frees the result, which has *n ids.
static int32_t *ids_of_text(const char *model, const char *text, int *n) {
    Gguf g;
    Tokenizer t;
    TokIds ids = { 0 };
    open_tokenizer(&t, &g, model);
    if (t.bos >= 0) push_id(&t, &ids, t.bos);
    if (tok_encode(&t, text, strlen(text), TOK_PLAIN, &ids) < 0) die("-p: %s", t.err);
    if (ids.n < 1 || ids.n > MAX_CONTEXT) die("-p: expected 1 to %d tokens, got %zu", MAX_CONTEXT, ids.n);
    tok_free(&t);
    gguf_close(&g);
    *n = (int)ids.n;
    return ids.ids;
}

// gemma4 logits: writes the logits of every position of a list of ids, after the soft-cap, as n x vocab float32. The
// ids are those of a file, or those of a text if it is not NULL.
static void verb_logits(const char *model, const Ops *ops, ModelOptions o, const char *ids_path, const char *text,
                        const char *out_path, const char *dump_dir, bool check_tensors, bool verbose) {
    const char *const from = text ? "-p" : "--ids";
    int n;
    int32_t *ids = text ? ids_of_text(model, text, &n) : read_id_file(ids_path, &n);
    if (o.n_ctx <= 0) o.n_ctx = n;
    if (o.n_ctx == n) o.ctx_from = text ? "length of -p" : "number of --ids";
    if (n > o.n_ctx) die("%s: expected at most %d ids, got %d; try -c %d", from, o.n_ctx, n, n);
    o.n_logits = o.n_batch = STEP_ROWS;
    Model *m = alloc_or_die(1, sizeof *m);
    load_model(m, model, ops, o, dump_dir);
    if (check_tensors) read_weights(m, true);
    for (int i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= m->config.vocab)
            die("--ids: %s: id %d: expected 0..%d, got %" PRId32, ids_path, i, m->config.vocab - 1, ids[i]);
    Output out_file;
    int err = create_output(&out_file, out_path, 0666);
    float *logits = alloc_or_die(m->config.vocab, sizeof *logits);
    const double t0 = seconds();
    progress("logits", 0, n, "positions");
    for (int at = 0; at < n && !err; ) {
        const int chunk = min_int(n - at, STEP_ROWS);
        for (int i = 0; i < chunk; i++) m->step_rows[i] = (StepRow){ .token = ids[at + i], .output = true };
        step(m, &(StepSeg){ .seq = 0, .kind = SEG_CHAIN, .n = chunk, .rows = m->step_rows }, 1);
        for (int i = 0; i < chunk && !err; i++) {
            read_logits(m, i, logits);
            err = write_output(&out_file, logits, (size_t)m->config.vocab * sizeof *logits);
        }
        commit_all(m);
        at += chunk;
        progress("logits", at, n, "positions");
    }
    err = finish_output(&out_file, err);
    if (err) die_output("-o", &out_file, err);
    if (verbose) print_plan(m);
    else print_model(m);
    fprintf(stderr, "# %d positions x %d logits in %.2f s\n", n, m->config.vocab, seconds() - t0);
    free(logits);
    free(ids);
    free_model(m);
    free(m);
}

// gemma4 tokenize: prints the ids of a text in decimal on one line, or writes them to a file. It adds no <bos>.
static void verb_tokenize(const char *model, const char *text, size_t n, TokMode mode, const char *out_path) {
    Gguf g;
    Tokenizer tok;
    TokIds ids = { 0 };
    open_tokenizer(&tok, &g, model);
    if (tok_encode(&tok, text, n, mode, &ids) < 0) die("tokenize: %s", tok.err);
    if (out_path) write_output_file("-o", out_path, ids.ids, ids.n * sizeof *ids.ids, true);
    for (size_t i = 0; i < ids.n && !out_path; i++) printf("%s%" PRId32, i ? " " : "", ids.ids[i]);
    if (!out_path) printf("\n");
    flush_output();
    tok_ids_free(&ids);
    tok_free(&tok);
    gguf_close(&g);
}

// The ids of a list in decimal, or if it does not begin as one, of a file as `tokenize -o` writes it. The caller frees
// the result, which has *n ids, all of them below `vocab`. Dies on anything else.
static int32_t *ids_of_list(const char *list, int vocab, int *n) {
    const char *s = list + strspn(list, " \t\r\n");
    if (*s && !strchr("0123456789+-", *s)) {
        if (access(list, F_OK)) die("--ids: expected ids from 0 to %d or a file of them, got '%.40s'", vocab - 1, list);
        int32_t *ids = read_id_file(list, n);
        for (int i = 0; i < *n; i++)
            if (ids[i] < 0 || ids[i] >= vocab)
                die("--ids: %s: id %d: expected 0..%d, got %" PRId32, list, i, vocab - 1, ids[i]);
        return ids;
    }
    int32_t *ids = alloc_or_die(strlen(s) / 2 + 1, sizeof *ids);
    for (*n = 0; *s; s += strspn(s, " \t\r\n")) {
        char *end;
        errno = 0;
        const long id = strtol(s, &end, 10);
        if (end == s || errno || id < 0 || id >= vocab || !strchr(" \t\r\n", *end))
            die("--ids: number %d: expected an id from 0 to %d, got '%.*s'", *n + 1, vocab - 1,
                min_int((int)strcspn(s, " \t\r\n"), 40), s);
        ids[(*n)++] = (int32_t)id;
        s = end;
    }
    return ids;
}

// gemma4 detokenize: prints the text of ids, special tokens as text too; nothing if one of them is wrong.
static void verb_detokenize(const char *model, const char *list) {
    Gguf g;
    Tokenizer tok;
    int n;
    open_tokenizer(&tok, &g, model);
    int32_t *ids = ids_of_list(list, tok.n_tokens, &n);
    for (int i = 0; i < n; i++) {
        const TokStr piece = tok_piece(&tok, ids[i], true);
        fwrite(piece.s, 1, piece.n, stdout);
    }
    flush_output();
    free(ids);
    tok_free(&tok);
    gguf_close(&g);
}

// Prints what lies in host memory and what that costs, and which smaller cache or context would cost less.
static void print_host_plan(Model *m, size_t budget) {
    const double gib = 1 << 30, bus = m->ops->bus ? m->ops->bus() : 0;
    const size_t from_host = m->plan.from_host;
    const int n_ctx = m->options.n_ctx;
    const KvType k = m->options.k_type, v = m->options.v_type, smaller = k == KV_F16 ? KV_Q8_0 : KV_TQ3;
    double most = most_tokens_per_second(m, 0);
    printf("             %9.3f GiB in host memory: %s\n", (double)m->plan.in_host / gib, host_weights(m));
    if (!from_host) return;
    printf("             %9.3f GiB of them pass the bus for each token", (double)from_host / gib);
    if (most > 0) printf(", at %.1f GB/s; at most %.1f tok/s", bus * 1e-9, most);
    printf("\n");
    for (int i = 0; i < 2; i++) {
        if (i) m->options.k_type = m->options.v_type = smaller;
        if (i ? k == smaller : n_ctx < 2 * TILE_SLOTS) continue;
        if (fit_context(m, i ? n_ctx : n_ctx / 2, budget) > budget || m->plan.from_host >= from_host) continue;
        most = most_tokens_per_second(m, 0);
        printf("             %9.3f GiB with %s", (double)m->plan.from_host / gib, i ? "-ctk " : "-c ");
        if (i) printf("%s", kv_names[smaller]);
        else printf("%d", n_ctx / 2);
        if (most > 0) printf("; at most %.1f tok/s", most);
        printf("\n");
    }
    m->options.k_type = k, m->options.v_type = v;
    fit_context(m, n_ctx, budget);
}

static void print_contexts(Model *m, size_t budget) {
    static const int contexts[] = { 8 << 10, 32 << 10, 128 << 10, 256 << 10, 1 << 20 };
    const double gib = 1 << 30;
    printf("%8s  %9s  %9s\n", "context", "KV GiB", "total GiB");
    for (size_t i = 0; i < sizeof contexts / sizeof *contexts; i++) {
        const size_t all = fit_context(m, contexts[i], budget);
        const char *host = host_weights(m);
        printf("%8d  %9.3f  %9.3f  %s%s%s%s\n", contexts[i], (double)(m->plan.kv_global + m->plan.kv_rings) / gib,
               (double)all / gib, all <= budget ? "fits" : "does not fit", *host ? "; in host memory: " : "", host,
               contexts[i] > m->config.n_ctx_train ? ", exceeds the trained length" : "");
    }
}

// gemma4 plan: prints the memory that a context needs, and reserves none. Dies if the context does not fit.
static void verb_plan(const char *model, const Ops *ops, ModelOptions o) {
    const double gib = 1 << 30;
    Model *m = alloc_or_die(1, sizeof *m);
    plan_model(m, model, ops, o, NULL);
    const size_t budget = plan_budget(m);
    const int n_ctx = m->options.n_ctx, trained = m->config.n_ctx_train, most = largest_context(m, trained, budget);
    size_t free_bytes, total;
    ops->memory(&free_bytes, &total);
    const size_t needed = fit_context(m, n_ctx, budget);
    const MemoryPlan plan = m->plan;
    const size_t weights = plan.weights ? plan.weights : m->binder->bytes;
    printf("%s: context %d, trained length %d\n", model_name(m), n_ctx, trained);
    print_card(stdout, "card         ", ops);
    printf("weights      %9.3f GiB%s\n", (double)weights / gib, plan.weights ? "" : ", in the mapped file");
    if (plan.in_host) print_host_plan(m, budget);
    printf("global KV    %9.3f GiB\n", (double)plan.kv_global / gib);
    printf("window KV    %9.3f GiB\n", (double)plan.kv_rings / gib);
    printf("staging      %9.3f GiB\n", (double)plan.staging / gib);
    printf("activations  %9.3f GiB, steps of %d rows\n", (double)plan.activations / gib, m->options.n_batch);
    printf("scratch      %9.3f GiB\n", (double)plan.scratch / gib);
    if (o.drafter)
        printf("draft model  %9.3f GiB\n", (double)(plan.drafter + (plan.weights ? 0 :
                                                                    m->drafter->binder->bytes)) / gib);
    if (o.projector)
        printf("image tower  %9.3f GiB, pictures of up to %d tokens\n",
               (double)(plan.vision + (plan.weights ? 0 : vision_bytes(m))) / gib, m->vision->max_tokens);
    printf("total        %9.3f GiB\n", (double)needed / gib);
    printf("available    %9.3f GiB, %s\n", (double)budget / gib,
           o.memory ? "set by --vram" : "31/32 of the free memory");
    if (!o.memory) printf("free         %9.3f GiB of %.3f\n", (double)free_bytes / gib, (double)total / gib);
    printf("largest context that fits: %d%s\n\n", most, most == trained ? ", the trained length" : "");
    print_contexts(m, budget);
    print_advice(m, o.n_ctx > 0 ? o.n_ctx : trained, budget);
    flush_output();
    if (fit_context(m, n_ctx, budget) > budget) die_no_room(m);
    free_model(m);
    free(m);
}

#endif
