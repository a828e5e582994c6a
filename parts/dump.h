/* dump.h - intermediate results ("checkpoints") of the forward pass, for --dump and for tests.
 *
 * Uses the types and the forward pass of gemma4.c. forward() calls one function after each block of a layer; without
 * --dump they return at once. Names are those of llama.cpp's gemma4 graph, so that dumps of both programs can be
 * compared. While dumping, all rows go through all layers. Begin with dump_layer().
 *
 * A folder gets three things more, which `gemma4 view DIR` (view.h) reads:
 *   model.json    the sizes of the model and of its layers, and the texts of all tokens
 *   rows.f32      (rows, 3) of each row its token, its position, and 1 if it is an output row, else 0
 *   lens-L.f32    (output rows, LENS, 3) the most likely next tokens if the model ended after layer L ("logit lens"):
 *                 token, logit, probability; the most likely first; of the tokens that the file allows */
#ifndef DUMP_H
#define DUMP_H

typedef struct Checkpoint {   // a named intermediate result
    char   name[24];
    int    layer;             // -1: outside the layers
    int    n_rows, cols;
    float *data;              // (n_rows, cols) on the host; of ffn_moe_topk, which only memory gets: int32 expert ids
} Checkpoint;

enum { OUT_OF_LAYERS = -1, LENS = 5 };

// Appends n values to DIR/NAME-LAYER.f32 (outside the layers: DIR/NAME.f32). The first step of a run replaces the file.
static void append_values(const Model *m, const char *name, int l, const float *host, size_t n) {
    char path[4096], layer[16] = "";
    if (l != OUT_OF_LAYERS) snprintf(layer, sizeof layer, "-%d", l);
    if (snprintf(path, sizeof path, "%s/%s%s.f32", m->dump_dir, name, layer) >= (int)sizeof path)
        die("--dump: %s: the path is too long", m->dump_dir);
    const int err = m->steps > 1 ? append_to_file(path, host, n * sizeof *host, 0666) : 0;
    if (m->steps <= 1) write_output_file("--dump", path, host, n * sizeof *host, false);
    if (err) die("--dump: %s: cannot write: %s; it ends with an earlier token", path, strerror(err));
}

// Saves (n_rows, cols) values: in memory if dump_dir is "", else in a file.
static void checkpoint(Model *m, const char *name, int l, const float *data, int n_rows, int cols) {
    const size_t n = (size_t)n_rows * cols;
    float *host = alloc_or_die(n, sizeof *host);
    m->ops->copy(&(Copy){ host, data, n * sizeof *host, COPY_OUT });
    m->ops->wait();
    if (!*m->dump_dir) {
        m->checkpoints = realloc(m->checkpoints, (size_t)(m->n_checkpoints + 1) * sizeof *m->checkpoints);
        if (!m->checkpoints) die("out of memory for %d checkpoints", m->n_checkpoints + 1);
        Checkpoint *c = &m->checkpoints[m->n_checkpoints++];
        *c = (Checkpoint){ .layer = l, .n_rows = n_rows, .cols = cols, .data = host };
        snprintf(c->name, sizeof c->name, "%s", name);
        return;
    }
    append_values(m, name, l, host, n);
    free(host);
}

// Saves the value y of an In. No buffer holds it, so it is computed again.
static void checkpoint_in(Model *m, const char *name, int l, In in, int n_rows) {
    in.x_out = NULL;
    m->ops->close(&(Close){ .n_rows = n_rows, .cols = m->config.dim, .in = in, .out = m->s.dump[0] });
    checkpoint(m, name, l, m->s.dump[0], n_rows, m->config.dim);
}

// Saves norm(x; w_norm), an input of the block. The stream's x does not include the block's output yet.
static void checkpoint_normed(Model *m, const char *name, int l, const Pass *p, const float *w_norm) {
    const In in = { .x = p->stream.x, .scale = 1, .w_pre = w_norm, .eps = m->config.eps };
    checkpoint_in(m, name, l, in, p->batch.n_rows);
}

// Saves what the block adds to the stream.
static void checkpoint_added(Model *m, const char *name, int l, const Pass *p) {
    In added = p->stream;
    added.x = NULL;
    checkpoint_in(m, name, l, added, p->batch.n_rows);
}

// ---- what `gemma4 view` reads in addition ----

// Writes DIR/model.json.
static void dump_model(Model *m) {
    const Config *c = &m->config;
    const GgufStr *tokens = NULL;
    TokText text = { 0 };
    size_t n = 0, n_json = 0;
    char path[4096], *json = NULL;
    if (snprintf(path, sizeof path, "%s/model.json", m->dump_dir) >= (int)sizeof path)
        die("--dump: %s: the path is too long", m->dump_dir);
    FILE *f = open_memstream(&json, &n_json);
    if (!f) die("--dump: out of memory");
    const char *name = model_name(m);
    if (tok_add_json_string(&text, (TokStr){ name, strlen(name) }) < 0) die("--dump: out of memory");
    fprintf(f, "{\"name\":%.*s,\n\"dim\":%d,\"n_heads\":%d,\"n_experts\":%d,\"n_experts_used\":%d,\"ple_dim\":%d,"
            "\"sparse\":%d,\"lens\":%d,\n\"layers\":[", (int)text.n, text.s, c->dim, c->n_heads, c->n_experts,
            c->n_experts_used, c->ple_dim, m->options.pflash > 0 || m->options.pflash_density > 0, LENS);
    for (int l = 0; l < c->n_layers; l++) {
        const LayerConfig *lc = &c->layer[l];
        fprintf(f, "%s\n{\"window\":%d,\"head_dim\":%d,\"n_kv_heads\":%d,\"kv_layer\":%d,\"scale\":%.9g}", l ? "," : "",
                lc->is_swa ? c->n_swa : 0, lc->head_dim, lc->n_kv_heads, lc->kv_layer,
                (double)m->weights.layer[l].layer_output_scale);
    }
    fprintf(f, "],\n\"tokens\":[");
    gguf_get_strs(&m->gguf, "tokenizer.ggml.tokens", &tokens, &n);   // a file without a tokenizer: no texts
    for (size_t i = 0; i < n && i < (size_t)c->vocab; i++) {
        text.n = 0;
        if (tok_add_json_string(&text, (TokStr){ tokens[i].s, tokens[i].n }) < 0) die("--dump: out of memory");
        fprintf(f, "%s\n%.*s", i ? "," : "", (int)text.n, text.s);
    }
    fprintf(f, "]}\n");
    tok_text_free(&text);
    if (ferror(f) | fclose(f)) die("--dump: out of memory");
    write_output_file("--dump", path, json, n_json, false);
    free(json);
}

// Saves token, position and "is an output row" of the step's rows.
static void dump_rows(Model *m) {
    const Step *t = &m->step;
    if (m->steps == 1) dump_model(m);
    float *rows = alloc_or_die((size_t)t->n_rows * 3, sizeof *rows);
    for (int r = 0; r < t->n_rows; r++) {
        rows[3 * r] = (float)t->rows[r].token;             // exact, since MAX_VOCAB is 2^24
        rows[3 * r + 1] = (float)(m->len[t->segs[t->rows[r].seg].seq] + t->rows[r].depth);
    }
    for (int i = 0; i < t->n_out; i++) rows[3 * t->out_index[i] + 2] = 1;
    append_values(m, "rows", OUT_OF_LAYERS, rows, (size_t)t->n_rows * 3);
    free(rows);
}

// Finds the LENS largest logits of the tokens that the file allows, as (token, logit, probability).
static void choose_candidates(const Model *m, float *logits, float out[LENS][3]) {
    const double sum = logsumexp(logits, m->config.vocab);
    for (int i = 0; i < LENS; i++) {
        const int32_t best = max_int(best_token(m, logits), 0);    // logits that are no numbers: token 0, shown as such
        out[i][0] = (float)best;
        out[i][1] = logits[best];
        out[i][2] = (float)exp(logits[best] - sum);
        logits[best] = -INFINITY;
    }
}

// The logit lens: the output norm and the head, applied to the output of layer l, which checkpoint_in() has left in
// dump[0]. One row at a time, because s->logits may have room for one row alone; end_pass() fills s->logits again.
static void dump_lens(Model *m, int l) {
    const Config *c = &m->config;
    const Weights *w = &m->weights;
    const State *s = &m->s;
    const int n_out = m->step.n_out;
    float *logits = alloc_or_die((size_t)c->vocab, sizeof *logits);
    float (*found)[LENS][3] = alloc_or_die((size_t)n_out, sizeof *found);
    for (int i = 0; i < n_out; i++) {
        const In in = { .x = s->dump[0] + (size_t)m->step.out_index[i] * (size_t)c->dim, .scale = 1,
                        .w_pre = w->output_norm, .eps = c->eps };
        m->ops->head(&(Head){ .n_rows = 1, .in = in, .w = w->output.data ? &w->output : &w->token_embd,
                              .cap = c->logit_cap, .logits = s->logits, .hidden = s->hidden });
        read_logits(m, 0, logits);
        choose_candidates(m, logits, found[i]);
    }
    append_values(m, "lens", l, found[0][0], (size_t)n_out * LENS * 3);
    free(found);
    free(logits);
}

// ---- after each block ----

static void dump_embeddings(Model *m, const Pass *p) {
    const Config *c = &m->config;
    if (!m->dump_dir) return;
    if (*m->dump_dir) dump_rows(m);
    checkpoint(m, "inp_scaled", OUT_OF_LAYERS, p->stream.x, p->all.n_rows, c->dim);
    if (c->ple_dim) checkpoint(m, "inp_per_layer", OUT_OF_LAYERS, p->ple, p->all.n_rows, c->n_layers * c->ple_dim);
}

static void dump_attention(Model *m, int l, const Pass *p) {
    const LayerConfig *lc = &m->config.layer[l];
    const LayerWeights *w = &m->weights.layer[l];
    float *const *dump = m->s.dump;
    const int n = p->batch.n_rows, q_dim = m->config.n_heads * lc->head_dim, kv_dim = lc->n_kv_heads * lc->head_dim;
    if (!m->dump_dir) return;
    checkpoint(m, "Qcur_normed", l, dump[0], n, q_dim);
    checkpoint(m, "Qcur_pos", l, dump[1], n, q_dim);
    if (p->qkv.k) {
        checkpoint(m, "Kcur_normed", l, dump[2], n, kv_dim);
        checkpoint(m, "Vcur_normed", l, dump[3], n, kv_dim);
        checkpoint(m, "Kcur_pos", l, dump[4], n, kv_dim);
    }
    checkpoint_normed(m, "attn_norm", l, p, w->attn_norm);
    checkpoint_added(m, "attn_post_norm", l, p);
    checkpoint_in(m, "attn_out", l, p->stream, n);
}

static void dump_feed_forward(Model *m, int l, const Pass *p) {
    const Config *c = &m->config;
    const LayerWeights *w = &m->weights.layer[l];
    const State *s = &m->s;
    const int n = p->batch.n_rows;
    if (!m->dump_dir) return;
    checkpoint_normed(m, c->n_experts ? "ffn_norm_1" : "ffn_norm", l, p, w->ffn_norm);
    if (c->n_experts) {
        In branch = { .delta = { s->mlp }, .w_delta = { w->post_ffw_norm_1 }, .scale = 1, .eps = c->eps };
        checkpoint(m, "ffn_moe_logits", l, s->router, n, c->n_experts);
        if (!*m->dump_dir) checkpoint(m, "ffn_moe_topk", l, (const float *)s->expert_ids, n, c->n_experts_used);
        checkpoint_normed(m, "ffn_norm_2", l, p, w->pre_ffw_norm_2);
        checkpoint_in(m, "ffn_mlp", l, branch, n);
        branch.delta[0] = s->moe;
        branch.w_delta[0] = w->post_ffw_norm_2;
        checkpoint_in(m, "ffn_moe", l, branch, n);
    } else {
        checkpoint(m, "ffn_out", l, s->mlp, n, c->dim);
    }
    checkpoint_added(m, "ffn_post_norm", l, p);
}

static void dump_per_layer_embedding(Model *m, int l, const Pass *p) {
    if (m->dump_dir) checkpoint_added(m, "per_layer_embd_out", l, p);
}

// The stream becomes that of another run with the same checkpoints (Model.follow): the next layer starts with it.
static void follow_stream(Model *m, Pass *p) {
    const Checkpoint *theirs = &m->follow[m->n_checkpoints - 1];
    float *x = p->stream.x == m->s.x[0] ? m->s.x[1] : m->s.x[0];
    const size_t n = (size_t)theirs->n_rows * (size_t)theirs->cols;
    assert(!strcmp(theirs->name, "l_out") && theirs->n_rows == p->batch.n_rows);
    m->ops->copy(&(Copy){ x, theirs->data, n * sizeof *x, COPY_IN });
    p->stream = (In){ .x = x, .scale = 1, .eps = p->stream.eps };
}

static void dump_layer(Model *m, int l, Pass *p) {
    if (!m->dump_dir) return;
    checkpoint_in(m, "out_scaled", l, p->stream, p->batch.n_rows);
    checkpoint_in(m, "l_out", l, p->stream, p->batch.n_rows);
    if (*m->dump_dir) dump_lens(m, l);
    if (m->follow) follow_stream(m, p);
}

static void dump_output(Model *m) {                    // without output rows too: it truncates older files
    if (!m->dump_dir) return;
    checkpoint(m, "result_norm", OUT_OF_LAYERS, m->s.hidden, m->step.n_out, m->config.dim);
    checkpoint(m, "result_output", OUT_OF_LAYERS, m->s.logits, m->step.n_out, m->config.vocab);
}

#endif
