/* dump.h - intermediate results ("checkpoints") of the forward pass, for --dump and for tests.
 *
 * Uses the types and the forward pass of gemma4.c. forward() calls one function after each block of a layer; without
 * --dump they return at once. Names are those of llama.cpp's gemma4 graph, so that dumps of both programs can be
 * compared. While dumping, all rows go through all layers. Begin with dump_layer(). */
#ifndef DUMP_H
#define DUMP_H

typedef struct Checkpoint {   // a named intermediate result
    char   name[24];
    int    layer;             // -1: outside the layers
    int    n_rows, cols;
    float *data;              // (n_rows, cols) on the host
} Checkpoint;

enum { OUT_OF_LAYERS = -1 };

// Saves (n_rows, cols) values: in memory if dump_dir is "", else appended to DIR/NAME-LAYER.f32 (outside the layers:
// DIR/NAME.f32). The first step of a run truncates the file.
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
    char path[4096], layer[16] = "";
    if (l != OUT_OF_LAYERS) snprintf(layer, sizeof layer, "-%d", l);
    if (snprintf(path, sizeof path, "%s/%s%s.f32", m->dump_dir, name, layer) >= (int)sizeof path)
        die("--dump: %s: the path is too long", m->dump_dir);
    FILE *f = fopen(path, m->steps > 1 ? "ab" : "wb");
    if (!f) die("--dump: %s: %s", path, strerror(errno));
    if (fwrite(host, sizeof *host, n, f) != n || fclose(f)) die("--dump: %s: %s", path, strerror(errno));
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

static void dump_embeddings(Model *m, const Pass *p) {
    const Config *c = &m->config;
    if (!m->dump_dir) return;
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

static void dump_layer(Model *m, int l, const Pass *p) {
    if (!m->dump_dir) return;
    checkpoint_in(m, "out_scaled", l, p->stream, p->batch.n_rows);
    checkpoint_in(m, "l_out", l, p->stream, p->batch.n_rows);
}

static void dump_output(Model *m) {                    // without output rows too: it truncates older files
    if (!m->dump_dir) return;
    checkpoint(m, "result_norm", OUT_OF_LAYERS, m->s.hidden, m->step.n_out, m->config.dim);
    checkpoint(m, "result_output", OUT_OF_LAYERS, m->s.logits, m->step.n_out, m->config.vocab);
}

#endif
