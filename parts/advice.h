/* advice.h - which cache type, context and draft suit a card: print_advice() is the last part of gemma4 plan.
 *
 * Uses plan.h, generate.h (bytes that a token reads) and cards.h. Begin with print_advice().
 *
 * The times come from one H100: files with the models' real dimensions, random weights, Q4_K_M (docs/speed.md,
 * docs/speculation.md). Each row gives two shares of the memory bandwidth: that at which weights are read, and that at
 * which the cache is. A token of another file, cache or card takes its bytes over the bandwidth times these shares. So
 * every speed that is printed is an estimate.
 *   [1] What was measured    [2] Estimates    [3] Advice */
#ifndef ADVICE_H
#define ADVICE_H

// ==== [1] What was measured ==========================================================================================

typedef struct {              // generation
    const char *name;
    int    n_layers;          // of the model that it is
    double weights;           // bytes that a token reads
    KvType type;
    double at_0;              // tokens per second with an empty context
    double at_depth;          // and with MEASURED_DEPTH tokens; 0: not measured
    double cache;             // bytes of cache that a token reads there
    const char *commit;
} MeasuredSpeed;

enum { MEASURED_DEPTH = 131072 };
static const double h100_bandwidth = 3.07e12, h100_nominal = 3.35e12;  // bytes/s: as bench measures it; as vendors say

static const MeasuredSpeed measured[] = {
    { "26B-A4B", 30, 2.593e9, KV_F16, 534.5, 377.9, 1.887e9, "bb5b785" },
    { "26B-A4B", 30, 2.593e9, KV_Q8_0, 507.1, 396.6, 1.101e9, "409eca6" },
    { "26B-A4B", 30, 2.593e9, KV_TQ3, 499.2, 399.8, 0.537e9, "409eca6" },
    { "31B", 60, 18.666e9, KV_F16, 125.7, 92.2, 7.550e9, "345495b" },
    { "31B", 60, 18.666e9, KV_Q8_0, 120.1, 98.1, 4.404e9, "345495b" },
    { "31B", 60, 18.666e9, KV_Q4_0, 120.0, 100.0, 2.726e9, "345495b" },
    { "31B", 60, 18.666e9, KV_TQ4, 118.7, 97.1, 2.621e9, "345495b" },
    { "31B", 60, 18.666e9, KV_TQ3, 120.1, 99.1, 2.150e9, "345495b" },
    { "E4B", 42, 2.970e9, KV_F16, 461.2, 0, 0, "bb5b785" },
    { "E2B", 35, 1.472e9, KV_F16, 700.6, 0, 0, "bb5b785" } };

typedef struct {              // drafts, of which `rate` are accepted at every depth
    int n_layers;
    DrafterKind kind;
    int draft_max;
    double rate, speed, plain;         // speed, plain: tokens per second with drafts and without
    const char *commit;
} MeasuredDraft;

static const MeasuredDraft measured_drafts[] = {
    { 30, DRAFTER_DFLASH, 7, 0.815, 822.1, 480.3, "a0ba30d" }, { 30, DRAFTER_MTP, 2, 0.78, 612.2, 473.9, "345495b" },
    { 60, DRAFTER_DFLASH, 7, 0.805, 335.2, 122.0, "345495b" }, { 60, DRAFTER_MTP, 4, 0.78, 264.3, 124.1, "a0ba30d" } };

typedef struct { int n_layers, n_prompt; double dense, sparse; const char *commit; } MeasuredPrompt;   // seconds

static const MeasuredPrompt measured_prompts[] = {     // sparse: pFlash with a tenth of the blocks
    { 30, 131072, 8.3, 4.5, "345495b" }, { 60, 65536, 12.8, 8.5, "345495b" } };

#define N_MEASURED(list) ((int)(sizeof(list) / sizeof *(list)))

// ==== [2] Estimates ==================================================================================================

// The row that is nearest to the model and the cache type: if its model was not measured, one of the same kind; if the
// type was not, the last one that is quantised too.
static const MeasuredSpeed *nearest_speed(const Model *m, KvType type) {
    const Config *c = &m->config;
    const int kind = c->ple_dim ? 42 : c->n_experts ? 30 : 60;
    const MeasuredSpeed *best = NULL;
    int most = 0;
    for (int i = 0; i < N_MEASURED(measured); i++) {
        const MeasuredSpeed *r = &measured[i];
        const int of_model = 2 * (r->n_layers == c->n_layers) + (r->n_layers == kind);
        const int points = 4 * of_model + 2 * (r->type == type) + (kv_group(r->type) && kv_group(type));
        if (points >= most) most = points, best = r;
    }
    return best;
}

// The bandwidth that memory is read at on the card that the plan is for, in bytes/s; 0: not known. name: of the card.
static double advised_bandwidth(const Model *m, char name[96]) {
    const Card *card = m->ops->card ? m->ops->card() : NULL;
    const bool pretended = card && is_pretended(card);
    *name = 0;
    if (card && !pretended) {
        const double found = m->ops->bandwidth ? m->ops->bandwidth() : 0;
        snprintf(name, 96, "%.60s (%.0f GB/s measured)", card->name, found * 1e-9);
        return found;
    }
    if (pretended) card = find_card(card->name);
    for (int i = 0; i < N_CARDS && !pretended && m->options.memory; i++)       // --vram: the smallest that has as much
        if (cards[i].memory >= m->options.memory && (!card || cards[i].memory < card->memory)) card = &cards[i];
    if (card) snprintf(name, 96, "%s (%.0f GB/s)", card->name, card->bandwidth * 1e-9);
    return card ? card->bandwidth * h100_bandwidth / h100_nominal : 0;
}

// Tokens per second at position pos, with the planned cache.
static double estimated_speed(const Model *m, const MeasuredSpeed *r, double bandwidth, int pos) {
    const double bus = m->ops->bus && m->ops->bus() > 0 ? m->ops->bus() : 25e9;        // PCIe 4 x16
    const double weights = bytes_per_token(m, 0) - (double)m->plan.from_host;
    const double cache = bytes_per_token(m, pos) - bytes_per_token(m, 0);
    const double weights_share = r->weights * r->at_0 / h100_bandwidth;
    const double cache_share = r->at_depth > 0 ? r->cache / (1 / r->at_depth - 1 / r->at_0) / h100_bandwidth :
                               weights_share;
    return 1 / ((weights / weights_share + cache / cache_share) / bandwidth + (double)m->plan.from_host / bus);
}

// ==== [3] Advice =====================================================================================================

static bool takes_type(const Model *m, KvType type) {  // rows of the global layers consist of whole groups
    for (int l = 0; l < m->config.first_shared; l++) {
        const Cache *c = &m->caches[m->cache_of[l]];
        if (m->config.layer[l].is_swa || !kv_group(type)) continue;
        if (c->k.dim % KV_ROTATION || c->v.dim % KV_ROTATION) return false;
    }
    return true;
}

// Prints a word as a shell reads it.
static void print_shell_word(const char *s) {
    const bool plain = *s && !s[strspn(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./=,:+-")];
    if (!plain) putchar('\'');
    for (; *s; s++) {
        if (*s == '\'') printf("'\\''");
        else putchar(*s);
    }
    if (!plain) putchar('\'');
}

// Prints the row that a speed comes from, and what was measured with drafts and sparse prompts.
static void print_sources(const Model *m, const MeasuredSpeed *r, const MeasuredDraft *d, const MeasuredPrompt *p) {
    printf("measured on an H100, random weights: %s, %s: %.1f tok/s at 0", r->name, kv_names[r->type], r->at_0);
    if (r->at_depth > 0) printf(", %.1f at %d", r->at_depth, MEASURED_DEPTH);
    printf(" (commit %s)\n", r->commit);
    if (r->n_layers != m->config.n_layers) printf("    %s itself was not measured\n", model_name(m));
    if (d)
        printf("    %s draft model, --draft-max %d, %.1f %% of the drafts accepted at each depth: %.1f tok/s, without "
               "it %.1f (commit %s)\n", d->kind == DRAFTER_MTP ? "MTP" : "DFlash", d->draft_max, 100 * d->rate,
               d->speed, d->plain, d->commit);
    if (p)
        printf("    --pflash (lossy; without it prompts are exact): prompts of %d tokens %.2fx as fast (commit %s)\n",
               p->n_prompt, p->dense / p->sparse, p->commit);
}

// Prints one command line for a context of n_ctx tokens with this cache type; sources: and where its figures are from.
static void print_recommended(const Model *m, KvType type, int n_ctx, bool sources) {
    const Drafter *drafter = m->drafter;
    const MeasuredDraft *d = NULL;
    const MeasuredPrompt *p = NULL;
    for (int i = N_MEASURED(measured_drafts) - 1; i >= 0; i--) {       // without -md the first of the model: DFlash
        const MeasuredDraft *r = &measured_drafts[i];
        const bool same_kind = drafter->kind == DRAFTER_NONE || r->kind == drafter->kind;
        if (r->n_layers == m->config.n_layers && same_kind) d = r;
    }
    for (int i = 0; i < N_MEASURED(measured_prompts); i++)
        if (measured_prompts[i].n_layers == m->config.n_layers && n_ctx >= measured_prompts[i].n_prompt)
            p = &measured_prompts[i];
    printf("recommended: gemma4 ");
    print_shell_word(m->gguf.path);
    printf(" -c %d -ctk %s", n_ctx, kv_names[type]);
    if (drafter->kind != DRAFTER_NONE) {
        printf(" -md ");
        print_shell_word(drafter->gguf.path);
        if (d) printf(" --draft-max %d", min_int(d->draft_max, m->options.draft_depth));
    }
    if (p) printf(" --pflash");
    printf("\n");
    if (sources) print_sources(m, nearest_speed(m, type), d, p);
    else printf("    speeds are estimated for a GPU; try --vram 24\n");
    if (sources && d && drafter->kind == DRAFTER_NONE) printf("    give plan -md FILE, to count its memory too\n");
}

// Prints for each cache type the largest context up to `wanted` tokens that fits, and its speed; then the command line
// with the first type that holds all of them, else with the one that holds most. Changes the plan.
static void print_advice(Model *m, int wanted, size_t budget) {
    static const KvType types[] = { KV_F16, KV_Q8_0, KV_TQ4, KV_Q4_0, KV_TQ3 };        // by quality
    char card[96];
    const double bandwidth = advised_bandwidth(m, card);
    const ModelOptions options = m->options;
    KvType best = KV_F16;
    int most = 0;
    printf("\ncache  largest context");
    if (bandwidth > 0)
        printf("  tok/s at 0   at 64K  at its end   estimated for %s", card);
    printf("\n");
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        if (!takes_type(m, types[i])) continue;
        m->options.k_type = m->options.v_type = types[i];
        const int n = largest_context(m, wanted, budget);
        const MeasuredSpeed *r = nearest_speed(m, types[i]);
        const bool planned = n > 0 && fit_context(m, n, budget) <= budget;
        printf("%-5s  %15d", kv_names[types[i]], n);
        if (planned && bandwidth > 0 && !kv_group(r->type) == !kv_group(types[i])) {
            printf("  %10.1f", estimated_speed(m, r, bandwidth, 0));
            if (n >= 1 << 16) printf("  %7.1f", estimated_speed(m, r, bandwidth, 1 << 16));
            else printf("  %7s", "");
            printf("  %10.1f", estimated_speed(m, r, bandwidth, n));
        }
        printf("\n");
        if (n > most) most = n, best = types[i];
    }
    if (most) print_recommended(m, best, most, bandwidth > 0);
    m->options = options;
}

#endif
