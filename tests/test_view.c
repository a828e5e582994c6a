/* test_view.c - what `gemma4 view` computes from a dump (parts/view.h [1] and [2]) against what the model did:
 * attention weights (their sums, the mask, the window, and the output of attention computed from them), chosen experts,
 * and the most likely next tokens after each layer. Both trained models, prompts longer than their window. */
#define TESTING
#include "../gemma4.c"
#include "test.h"
#include "files.h"

enum { N_PROMPT = 150, N_MADE = 4, N_RUN = N_PROMPT + N_MADE - 1 };

static int32_t made[N_MADE];                           // the greedy tokens

// Runs a prompt and N_MADE greedy tokens, the last of which is not run. All that it computes goes to dir.
static void run_dumped(Model *m, Tokenizer *t) {
    static const char text[] = "Once upon a time a little fox ran home through the old forest, and the owl said: ";
    TokIds ids = { 0 };
    float *logits = must(malloc((size_t)m->config.vocab * sizeof *logits));
    tok_push_id(t, &ids, t->bos);
    while (ids.n < N_PROMPT) tok_encode(t, text, sizeof text - 1, TOK_PLAIN, &ids);
    for (int at = 0; at < N_PROMPT; commit_all(m)) at += run_chunk(m, 0, ids.ids + at, N_PROMPT - at);
    for (int i = 0; i < N_MADE; i++) {
        read_logits(m, 0, logits);
        made[i] = best_token(m, logits);
        if (i + 1 == N_MADE) break;
        step(m, &(StepSeg){ .n = 1, .rows = &(StepRow){ .token = made[i], .output = true } }, 1);
        commit_all(m);
    }
    tok_ids_free(&ids);
    free(logits);
}

static void check_rows(const View *v, const char *name) {
    CHECK(v->n_rows == N_RUN && v->n_out == N_MADE, "%s: expected %d rows, %d output rows, got %d, %d", name, N_RUN,
          N_MADE, v->n_rows, v->n_out);
    for (int i = 0; i < N_MADE - 1; i++)
        CHECK(v->token[N_PROMPT + i] == made[i], "%s: row %d: expected token %d, got %d", name, N_PROMPT + i,
              (int)made[i], (int)v->token[N_PROMPT + i]);
    for (int r = 0; r < v->n_rows; r++)
        CHECK(v->out[r] == (r < N_PROMPT - 1 ? -1 : r - N_PROMPT + 1), "%s: row %d: output row %d", name, r, v->out[r]);
}

// Weights sum to 1; a row sees itself and earlier rows, the nearest `window`; showing fewer rows changes no weight.
static void check_weights(const View *all, const View *part, int l, const char *name) {
    double *w = view_attention(all, l), *few = view_attention(part, l);
    const int window = all->layer[l].window;
    for (int h = 0; h < all->n_heads; h++)
        for (int i = 0; i < all->n; i++) {
            const double *row = w + (size_t)(h * all->n + i) * (size_t)(all->n + 1);
            double sum = 0, earlier = 0, worst = 0;
            int wrong = 0;
            for (int j = 0; j < all->n; j++) {
                const bool seen = j <= i && (!window || i - j < window);
                sum += row[1 + j];
                wrong += seen ? !(row[1 + j] >= 0 && row[1 + j] <= 1) : row[1 + j] != 0;
            }
            CHECK(fabs(sum - 1) < 1e-9 && !wrong && row[0] == 0, "%s, layer %d, head %d, row %d: sum %.12f, %d weights "
                  "are wrong, %g before the first row", name, l, h, i, sum, wrong, row[0]);
            if (i < part->first) continue;
            const double *same = few + (size_t)(h * part->n + i - part->first) * (size_t)(part->n + 1);
            for (int j = 0; j < part->first; j++) earlier += row[1 + j];
            for (int j = 0; j < part->n; j++) worst = fmax(worst, fabs(same[1 + j] - row[1 + part->first + j]));
            CHECK(worst == 0 && fabs(same[0] - earlier) < 1e-9, "%s, layer %d, head %d, row %d: of %d rows shown: off "
                  "by %g, earlier %g, not %g", name, l, h, i, part->n, worst, same[0], earlier);
        }
    free(w);
    free(few);
}

// The weights are the model's: norm(Wo (weights V)) of the last row is what attention added. Wo reads int8.
static void check_output(Model *m, const View *v, int l, const char *name) {
    const ViewLayer *layer = &v->layer[l];
    const int hd = layer->head_dim, kv_dim = layer->n_kv_heads * hd, group = v->n_heads / layer->n_kv_heads;
    double *w = view_attention(v, l), squares = 0, off = 0, size = 0;
    float *value = read_values(v, "Vcur_normed", layer->kv_layer, v->n_rows, kv_dim, 0, v->n_rows);
    float *added = read_values(v, "attn_post_norm", l, v->n_rows, v->dim, v->n_rows - 1, 1);
    float *sum = must(calloc((size_t)(v->n_heads * hd), sizeof *sum)), *y = must(calloc((size_t)v->dim, sizeof *y));
    for (int h = 0; h < v->n_heads; h++)
        for (int j = 0; j < v->n_rows; j++) {
            const double weight = w[(size_t)(h * v->n + v->n - 1) * (size_t)(v->n + 1) + (size_t)(1 + j)];
            for (int i = 0; i < hd; i++) sum[h * hd + i] += (float)weight * value[j * kv_dim + h / group * hd + i];
        }
    multiply(m, 1, (In){ .x = sum, .scale = 1, .eps = m->config.eps }, &m->weights.layer[l].attn_output, y);
    for (int i = 0; i < v->dim; i++) squares += (double)y[i] * y[i];
    for (int i = 0; i < v->dim; i++) {
        const double normed = y[i] / sqrt(squares / v->dim + (double)m->config.eps) *
            (double)m->weights.layer[l].post_attention_norm[i];
        off += pow(normed - added[i], 2);
        size += pow(added[i], 2);
    }
    CHECK(sqrt(off / size) < 0.02, "%s, layer %d: attention adds another vector, off by %g", name, l, sqrt(off / size));
    free(w); free(value); free(added); free(sum); free(y);
}

// The experts of the last row in the last layer, which the model's state still holds.
static void check_experts(const Model *m, const View *v, const char *name) {
    const int last = v->n_layers - 1;
    if (!v->n_experts) return;
    float *router = read_values(v, "ffn_moe_logits", last, v->n_rows, v->n_experts, v->n_rows - 1, 1);
    int expert[MAX_LAYERS];
    double weight[MAX_LAYERS];
    chosen_experts(v, router, expert, weight);
    for (int i = 0; i < v->n_used; i++) {
        const float *scale = m->weights.layer[last].ffn_down_exps_scale;
        const double want = m->s.expert_weights[i], got = weight[i] * (scale ? (double)scale[expert[i]] : 1);
        CHECK(expert[i] == m->s.expert_ids[i] && fabs(got - want) <= 1e-5 * fabs(want), "%s: expert %d: expected %d, "
              "weight %g, got %d, %g", name, i, (int)m->s.expert_ids[i], want, expert[i], got);
    }
    free(router);
}

// After the last layer the most likely token is the one that the model chose, with its logit.
static void check_lens(const Model *m, const View *v, const char *name) {
    for (int l = 0; l < v->n_layers; l++) {
        float *lens = read_values(v, "lens", l, v->n_out, LENS * 3, 0, v->n_out);
        float *logits = read_values(v, "result_output", -1, v->n_out, m->config.vocab, 0, v->n_out);
        for (int r = 0; r < v->n_out; r++) {
            const float (*c)[3] = (const float (*)[3])(const void *)(lens + r * LENS * 3);
            double sum = 0;
            for (int i = 0; i < LENS; i++) {
                const bool ordered = !i || c[i][1] < c[i - 1][1] || (c[i][1] == c[i - 1][1] && c[i][0] > c[i - 1][0]);
                CHECK(view_id(v, c[i][0]) >= 0 && ordered, "%s, layer %d, row %d: candidate %d: token %g, logit %g",
                      name, l, r, i, (double)c[i][0], (double)c[i][1]);
                sum += (double)c[i][2];
            }
            CHECK(sum > 0 && sum < 1.0001, "%s, layer %d, row %d: the probabilities sum to %g", name, l, r, sum);
            if (l + 1 < v->n_layers) continue;
            const double want = (double)logits[(size_t)r * (size_t)m->config.vocab + (size_t)made[r]];
            CHECK((int32_t)c[0][0] == made[r] && fabs((double)c[0][1] - want) < 1e-4 * fabs(want), "%s, row %d: "
                  "expected token %d, logit %g, got %g, %g", name, r, (int)made[r], want, (double)c[0][0],
                  (double)c[0][1]);
        }
        free(lens);
        free(logits);
    }
}

static void write_values(const char *dir, const char *name, const float *values, size_t n) {
    char path[1200];
    snprintf(path, sizeof path, "%s/%s.f32", dir, name);
    FILE *f = must(fopen(path, "wb"));
    CHECK(fwrite(values, sizeof *values, n, f) == n && !fclose(f), "%s: cannot be written", path);
}

// Four heads, two key heads: heads 0 and 1 read key head 0, heads 2 and 3 key head 1. Layer 1 reads the keys of layer
// 0.
static void check_groups(void) {
    static const float q[2][4] = { { 1, 1, 1, 1 }, { 1, 2, 3, 4 } }, k[2][2] = { { 0.5f, -1 }, { 1, 1 } };
    ViewLayer layers[] = { { .head_dim = 1, .n_kv_heads = 2 }, { .head_dim = 1, .n_kv_heads = 2 } };
    const View v = { .dir = tmp, .n_heads = 4, .n_layers = 2, .layer = layers, .n_rows = 2, .n = 2 };
    write_values(tmp, "Qcur_pos-1", q[0], 8);
    write_values(tmp, "Kcur_pos-0", k[0], 4);
    double *w = view_attention(&v, 1);
    for (int h = 0; h < 4; h++) {
        const double first = exp((double)(q[1][h] * k[0][h / 2])), second = exp((double)(q[1][h] * k[1][h / 2]));
        const double *rows = w + h * 6;
        CHECK(rows[1] == 1 && rows[2] == 0 && fabs(rows[4] - first / (first + second)) < 1e-12 &&
              fabs(rows[5] - second / (first + second)) < 1e-12, "four heads, head %d: weights %g, %g; %g, %g", h,
              rows[1], rows[2], rows[4], rows[5]);
    }
    free(w);
}

static void check_model(const char *name) {
    char path[256], dir[1024];
    Tokenizer t;
    Model *m = must(calloc(1, sizeof *m));
    snprintf(path, sizeof path, "models/%s-q8_0.gguf", name);
    snprintf(dir, sizeof dir, "%s", in_tmp("%s", name));
    load_model(m, path, cpu_ops(), (ModelOptions){ .n_ctx = 256, .n_seqs = 1, .n_batch = 64, .n_logits = 1,
                                                   .k_type = KV_F32, .v_type = KV_F32 }, dir);
    load_tokenizer(&t, &m->gguf, m->config.vocab);
    run_dumped(m, &t);
    View all = read_view(dir, VIEW_MOST), part = read_view(dir, 20);
    CHECK(all.n_layers == m->config.n_layers && all.vocab == m->config.vocab && all.dim == m->config.dim,
          "%s: %d layers, %d tokens, dim %d", name, all.n_layers, all.vocab, all.dim);
    check_rows(&all, name);
    for (int l = 0; l < all.n_layers; l++) {
        CHECK(all.layer[l].window == (m->config.layer[l].is_swa ? m->config.n_swa : 0) && all.layer[l].window < N_RUN,
              "%s, layer %d: window %d", name, l, all.layer[l].window);
        check_weights(&all, &part, l, name);
        check_output(m, &all, l, name);
    }
    check_experts(m, &all, name);
    check_lens(m, &all, name);
    free_view(&all, read_lengths(&all));
    free_view(&part, read_lengths(&part));
    tok_free(&t);
    free_model(m);
    free(m);
}

int main(void) {
    make_tmp();
    check_groups();
    check_model("gemma4-mini");
    check_model("gemma4-mini-e");
    return test_done("view");
}
