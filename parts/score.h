/* score.h - scores of a prompt's tokens, for prompt compression (compress.h).
 *
 * Uses engine.h (section [6], which it implements), plan.h and generate.h. Begin with score_prompt().
 *
 * A scorer is a small model with the target's vocabulary, or the target's own first layers. It reads all of the prompt.
 * The score of a token is the attention that the last SCORE_ROWS tokens pay to it in the global layers: the largest
 * value of any of these layers and heads, averaged over those tokens. */
#ifndef SCORE_H
#define SCORE_H

// Scores n > SCORE_ROWS tokens that follow what session seq holds, and leaves the session as it was. score: (n)
static void score_tokens(Model *m, int seq, const int32_t *ids, int n, float *score) {
    const int len = m->len[seq], n_written = m->n_written[seq], n_keys = m->s.n_keys;
    uint8_t *rings = alloc_or_die(copy_rings(m, seq, NULL, COPY_OUT) + 1, 1);
    float *mass = alloc_or_die((size_t)SCORE_ROWS * (size_t)n_keys, sizeof *mass);
    copy_rings(m, seq, rings, COPY_OUT);
    m->ops->copy(&(Copy){ m->s.mass, mass, (size_t)SCORE_ROWS * (size_t)n_keys * sizeof *mass, COPY_IN });
    for (int at = 0, rows; at < n; at += rows) {
        const int left = n - SCORE_ROWS - at;
        rows = left > 0 ? min_int(left, m->options.n_batch) : SCORE_ROWS;
        m->scorer_pass = left > 0 ? SCORER_PASS : COLLECT_ATTENTION;
        for (int i = 0; i < rows; i++) m->step_rows[i] = (StepRow){ .token = ids[at + i] };
        select_buffers(m, rows > STEP_ROWS);
        step(m, &(StepSeg){ .seq = seq, .kind = SEG_CHAIN, .n = rows, .rows = m->step_rows, .more = n - at - rows }, 1);
        if (left > 0) set_length(m, seq, len + at + rows);
    }
    m->scorer_pass = 0;
    m->ops->copy(&(Copy){ mass, m->s.mass, (size_t)SCORE_ROWS * (size_t)n_keys * sizeof *mass, COPY_OUT });
    copy_rings(m, seq, rings, COPY_IN);
    set_length(m, seq, len);
    m->ops->wait();
    m->n_written[seq] = n_written;
    for (int j = 0; j < n; j++) {
        score[j] = 0;
        for (int r = 0; r < SCORE_ROWS; r++)
            score[j] += mass[(size_t)r * (size_t)n_keys + (size_t)(len + j)] / SCORE_ROWS;
    }
    free(mass);
    free(rings);
}

static void score_prompt(Session *s, Model *scorer, const int32_t *ids, int n, int first, float *score) {
    Model *m = scorer ? scorer : s->m;
    const int seq = scorer ? 0 : s->seq;
    if (scorer) reset_session(m, 0);
    else session_keep(s, ids, first + 1);
    const int held = m->len[seq];
    score_tokens(m, seq, ids + held, n - held, score + held);
}

// Runs when the program starts. The scorer itself is loaded for the first long prompt.
static void scorer_check(const char *file, Model *target) {
    static const char key[] = "tokenizer.ggml.tokens";
    Gguf g;
    const GgufStr *want = NULL, *got = NULL;
    size_t n = 0, n_got = 0, i = 0;
    open_model_file(&g, file, false);
    if (gguf_get_strs(&target->gguf, key, &want, &n) < 1)
        die("--scorer: %s: key '%s': missing (E_META_MISSING)", target->gguf.path, key);
    if (gguf_get_strs(&g, key, &got, &n_got) < 1) die("--scorer: %s: key '%s': missing (E_META_MISSING)", file, key);
    if (n != n_got)
        die("--scorer: %s: expected the vocabulary of %s with %zu tokens, got %zu", file, target->gguf.path, n, n_got);
    while (i < n && want[i].n == got[i].n && !memcmp(want[i].s, got[i].s, want[i].n)) i++;
    if (i < n)
        die("--scorer: %s: expected the vocabulary of %s: both have %zu tokens, but token %zu differs", file,
            target->gguf.path, n, i);
    gguf_close(&g);
}

// Loads only the layers of the file that scoring needs.
static Model *scorer_open(Model *target, const char *file, int n) {
    ModelOptions o = { .n_seqs = 1, .n_batch = BATCH_FIT, .n_logits = 1, .k_type = KV_F16, .v_type = KV_F16,
                       .can_score = true, .scorer_only = true, .n_ctx = (int)round_up((size_t)n, 1024),
                       .ctx_from = "prompt for --scorer", .shared_limits = plan_limits(target) };
    if (target->options.memory) {                      // both models have to fit into --vram
        const MemoryPlan *p = &target->plan;
        const size_t weights = p->weights ? p->weights : target->binder->bytes;
        const size_t taken = weights + p->kv_global + p->kv_rings + p->staging + p->activations + p->scratch +
                             p->drafter;
        o.memory = target->options.memory > taken ? target->options.memory - taken : 1;
    }
    return model_open(file, target->ops, o, NULL);
}

#endif
