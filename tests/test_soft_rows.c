/* test_soft_rows.c - pictures in prompts, as rows that take the place of embeddings (Row.ahead, StepRow.soft, Prompt).
 *
 * Small models and random rows: the definition in plain loops; chunks; sessions and files; drafts; messages. No picture is
 * decoded here. A row that equals a scaled embedding has to give the bits of that token.
 * Environment: VISION_GOLDEN=FOLDER compares with reference data for images too. FOLDER has E, V and U, each with the
 * model in hf, the rows in NAME.soft.f32, and prompts: .tokens.i32 and logits (tests/golden/README.md). */
#define _GNU_SOURCE
#define TESTING
#include <stdlib.h>
static int fail_at = -1;      // the allocation that fails, counted from now on; -1: none, or it has failed
static int fails(void) { return fail_at >= 0 && fail_at-- == 0; }
#define malloc(n) (fails() ? NULL : malloc(n))
#define calloc(n, size) (fails() ? NULL : calloc(n, size))
#define realloc(p, n) (fails() ? NULL : realloc(p, n))
#include "../gemma4.c"
#undef malloc
#undef calloc
#undef realloc
#include "test.h"
#include "files.h"

enum { N_TEXT = 1500, MAX_PICTURES = 4,
       STRIDE = 17 };         // steps end next to a picture, and at every 17th place elsewhere

typedef struct {              // a prompt
    int32_t ids[N_TEXT];
    int     n, n_pictures;
    Picture pictures[MAX_PICTURES];
} Text;

static uint32_t random_state = 1;
static int rnd(int n) {       // 0 .. n-1
    random_state = random_state * 1664525u + 1013904223u;
    return (int)((random_state >> 8) % (uint32_t)n);
}

static Model *open_model(const char *path, const Ops *ops, ModelOptions o) {
    Model *m = alloc_or_die(1, sizeof *m);
    load_model(m, path, ops, o, NULL);
    return m;
}

static ModelOptions options(void) {
    return (ModelOptions){ .n_ctx = 512, .n_seqs = 2, .n_batch = 256, .n_logits = 256, .k_type = KV_F32,
                           .v_type = KV_F32 };
}

static void add_text(Text *x, int n, int vocab) {
    while (n--) x->ids[x->n++] = 3 + rnd(vocab - 3);
}

static void add_picture(Text *x, int n, int dim, uint64_t hash, const float *rows) {
    float *own = NULL;
    if (!rows) rows = own = alloc_or_die((size_t)(n * dim), sizeof *rows);             // kept to the end
    for (int i = 0; own && i < n * dim; i++) own[i] = (float)(rnd(2001) - 1000) / 400;
    x->pictures[x->n_pictures++] = (Picture){ x->n, n, rows };
    for (int i = 0; i < n; i++) x->ids[x->n++] = picture_id(hash, i);
}

// Runs a prompt through session 0 in steps that end at cuts (n_cuts, ascending); out (n, vocab): logits of all rows.
static float *run_rows(Model *m, const Text *x, const int *cuts, int n_cuts) {
    const size_t vocab = (size_t)m->config.vocab;
    float *out = alloc_or_die((size_t)x->n * vocab, sizeof *out);
    reset_session(m, 0);
    for (int at = 0, k = 0, end; at < x->n; at = end) {
        end = k < n_cuts ? cuts[k++] : x->n;
        for (int i = at; i < end; i++) {
            StepRow *row = &m->step_rows[i - at];
            *row = (StepRow){ .token = x->ids[i], .output = true };
            for (int p = 0; p < x->n_pictures; p++) {
                const Picture *q = &x->pictures[p];
                if (i < q->first || i >= q->first + q->n) continue;
                row->soft = q->rows + (size_t)(i - q->first) * (size_t)m->config.dim;
                row->ahead = vision_whole_blocks(&m->config) ? q->first + q->n - 1 - i : 0;
            }
        }
        step(m, &(StepSeg){ .seq = 0, .kind = SEG_CHAIN, .n = end - at, .rows = m->step_rows, .more = x->n - end }, 1);
        for (int i = at; i < end; i++) read_logits(m, i - at, out + (size_t)i * vocab);
        commit_all(m);
    }
    return out;
}

static double distance(const float *a, const float *b, size_t n) {
    double most = 0;
    for (size_t i = 0; i < n; i++) most = fabs((double)a[i] - b[i]) <= most ? most : fabs((double)a[i] - b[i]);
    return most;
}

static bool allowed_cut(const Model *m, const Text *x, int i) { return !vision_whole_blocks(&m->config) || !in_picture(x->ids, i); }

// Cuts at random places, and one at each place where a step may end.
static void test_chunks(const char *name, Model *m, const Text *x, const float *whole) {
    const size_t n = (size_t)x->n * (size_t)m->config.vocab;
    for (int i = 1; i < x->n; i++) {
        if (!allowed_cut(m, x, i) || (i % STRIDE && allowed_cut(m, x, i - 1) && allowed_cut(m, x, i + 1))) continue;
        float *out = run_rows(m, x, &i, 1);
        CHECK(!memcmp(out, whole, n * sizeof *out), "%s: a step that ends at %d: logits differ by %g", name, i,
              distance(out, whole, n));
        free(out);
    }
    for (int k = 0; k < 4; k++) {
        int cuts[N_TEXT], n_cuts = 0;
        for (int i = 1; i < x->n; i++) if (rnd(20) == 0 && allowed_cut(m, x, i)) cuts[n_cuts++] = i;
        float *out = run_rows(m, x, cuts, n_cuts);
        CHECK(!memcmp(out, whole, n * sizeof *out), "%s: %d steps: logits differ by %g", name, n_cuts + 1,
              distance(out, whole, n));
        free(out);
    }
}

// ---- random rows ----------------------------------------------------------------------------------------------------

// A row that is an embedding, scaled, is that token; of models with per-layer embeddings only token 0.
static void test_embeddings(const char *name, Model *m) {
    const size_t dim = (size_t)m->config.dim, n = 20 * (size_t)m->config.vocab;
    Text text = { .n = 20 }, soft = { .n = 20 };
    float rows[20 * 64];
    for (int i = 0; i < 20; i++) text.ids[i] = soft.ids[i] = m->config.ple_dim ? 0 : 3 + i * i;
    for (int i = 0; i < 20; i++)
        for (size_t k = 0; k < dim; k++)
            rows[(size_t)i * dim + k] = sqrtf((float)dim) *
                                        ((const float *)m->weights.token_embd.data)[(size_t)text.ids[i] * dim + k];
    for (int i = 5; i < 15; i += 4) {                  // a picture of one row sees nothing ahead
        soft.n_pictures = 1;
        soft.pictures[0] = (Picture){ i, 1, rows + (size_t)i * dim };
        soft.ids[i] = picture_id(9, 0);
        float *a = run_rows(m, &text, NULL, 0), *b = run_rows(m, &soft, NULL, 0);
        CHECK(!memcmp(a, b, n * sizeof *a), "%s: the embedding of id %d as a row: logits differ by %g", name,
              text.ids[i], distance(a, b, n));
        soft.ids[i] = text.ids[i];
        free(a);
        free(b);
    }
}

static Text random_text(const Model *m, const int *pictures, int n) {
    Text x = { 0 };
    add_text(&x, 5, m->config.vocab);
    for (int i = 0; i < n; i++) {
        add_picture(&x, pictures[i], m->config.dim, (uint64_t)i + 1, NULL);
        add_text(&x, 3 + 17 * i, m->config.vocab);
    }
    return x;
}

static int n_recorded;        // steps between begin() and end(), which a GPU may record; not those of commits

static bool count_begin(StepKey key) {
    n_recorded += key.kind == STEP_PROMPT || key.kind == STEP_DECODE;
    return cpu_ops()->begin(key);
}

static void test_model(const char *preset) {
    const char *path = kept(make_model(preset, preset, "f32", NULL));
    Ops counted = *cpu_ops();
    counted.begin = count_begin;
    n_recorded = 0;
    Model *m = open_model(path, &counted, options()), *plain = open_model(path, reference_ops(), options());
    const size_t vocab = (size_t)m->config.vocab;
    test_embeddings(preset, m);
    Text x = random_text(m, (const int[]){ 40, 7, 36 }, 3);            // the window has 32 tokens
    const size_t n = (size_t)x.n * vocab;
    const int before = n_recorded;
    float *got = run_rows(m, &x, NULL, 0), *want = run_rows(plain, &x, NULL, 0);
    CHECK(before && n_recorded == before, "%s: a step with pictures is recorded", preset);
    CHECK(distance(got, want, n) < 2e-3, "%s: logits of pictures: off by %g from plain loops", preset,
          distance(got, want, n));
    test_chunks(preset, m, &x, got);
    Text other = x;                                    // the last row of a picture: who sees it?
    const Picture *p = &x.pictures[0];
    float *changed = alloc_or_die((size_t)(p->n * m->config.dim), sizeof *changed);
    memcpy(changed, p->rows, (size_t)(p->n * m->config.dim) * sizeof *changed);
    changed[p->n * m->config.dim - 1] += 3;
    other.pictures[0].rows = changed;
    float *out = run_rows(m, &other, NULL, 0);
    const size_t begin = (size_t)p->first * vocab, last = (size_t)(p->first + p->n - 1) * vocab;
    CHECK(!memcmp(out, got, begin * sizeof *out), "%s: text sees a picture that comes after it", preset);
    CHECK((memcmp(out + begin, got + begin, vocab * sizeof *out) != 0) == vision_whole_blocks(&m->config),
          "%s: the first row of a picture: expected that it %s the last one", preset,
          vision_whole_blocks(&m->config) ? "sees" : "does not see");
    CHECK(memcmp(out + last, got + last, vocab * sizeof *out) != 0, "%s: a row does not see itself", preset);
    free(changed);
    free(got);
    free(want);
    free(out);
    model_close(m);
    model_close(plain);
}

// ---- sessions -------------------------------------------------------------------------------------------------------

static const AnswerOptions greedy = { .n_predict = 12, .ignore_eos = true, .think_budget = -1, .sampling.repeat = 1 };

static bool answer_with(Session *s, const Text *x, AnswerOptions o, int32_t *said, int *n_said, Event *end) {
    Event e = { 0 };
    *n_said = 0;
    if (!session_start(s, &(Prompt){ .ids = x->ids, .n = x->n, .n_head = 1, .pictures = x->pictures,
                                     .n_pictures = x->n_pictures }, &o)) return false;
    while (e.kind != EVENT_END) {
        session_next(s, &e);
        for (int i = 0; e.kind == EVENT_TOKEN && i < e.n_ids; i++) said[(*n_said)++] = e.ids[i];
    }
    if (end) *end = e;
    return true;
}

static void same_answer(const char *what, Session *s, const Text *x, AnswerOptions o, const int32_t *want, int n,
                        int cached) {
    int32_t said[256];
    int n_said;
    const bool ok = answer_with(s, x, o, said, &n_said, NULL);
    CHECK(ok && n_said == n && !memcmp(said, want, (size_t)n * sizeof *said), "%s: another answer: %s", what,
          ok ? "" : session_error(s));
    CHECK(cached < 0 || session_turn(s)->n_cached == cached, "%s: expected %d cached tokens, got %d", what, cached,
          session_turn(s)->n_cached);
}

static void refused(const char *what, Session *s, const Text *x) {
    CHECK(!session_start(s, &(Prompt){ .ids = x->ids, .n = x->n, .pictures = x->pictures, .n_pictures = x->n_pictures },
                         &greedy), "%s: expected an error", what);
}

static void test_refusals(Session *s, const Text *x) {
    Text bad = *x;
    bad.n_pictures--;
    refused("an id of a picture without its rows", s, &bad);
    bad = *x;
    bad.n = bad.pictures[0].first + bad.pictures[0].n;
    bad.n_pictures = 1;
    refused("a picture without text after it", s, &bad);
    bad = *x;
    bad.pictures[0].rows = NULL;
    refused("a picture without rows", s, &bad);
    bad = *x;
    bad.pictures[0].first++;
    refused("a picture at another place", s, &bad);
}

static void test_drafts(const char *name, Session *s, const Text *x) {
    const SpecKind kinds[] = { SPEC_NGRAM, SPEC_NGRAM_MOD, drafter_of(session_model(s)) };
    int32_t want[256];
    int n;
    AnswerOptions o = greedy;
    o.n_predict = 60;
    session_forget(s);
    answer_with(s, x, o, want, &n, NULL);
    for (int k = 0; k < 3 && kinds[k]; k++) {
        char what[80];
        snprintf(what, sizeof what, "%s, %s", name, spec_names[kinds[k]]);
        session_forget(s);
        o.drafting = (Drafting){ .kind = kinds[k], .n_max = k == 2 ? 4 : 8 };
        same_answer(what, s, x, o, want, n, 0);
        CHECK(k < 2 || session_turn(s)->drafts.drafted > 0, "%s: expected drafts, got none", what);
    }
}

// A full context drops pictures with what is before them; later words run again.
static void test_shift(const char *name, Session *s) {
    int32_t said[1024];
    int n;
    Event end;
    Text late = { 0 }, *x = &late;
    AnswerOptions o = greedy;
    add_text(x, 200, 500);
    add_picture(x, 100, session_model(s)->config.dim, 3, NULL);
    add_text(x, 10, 500);
    o.n_predict = 320;
    o.shift = true;
    session_forget(s);
    CHECK(answer_with(s, x, o, said, &n, &end) && end.end == END_LENGTH && n == 320 && session_turn(s)->shifts == 1, "%s: a full context: %s", name,
          session_error(s));
    for (size_t i = 0; i < session_held(s)->n; i++)
        CHECK(session_held(s)->ids[i] >= 0, "%s: a picture in the context that was shifted", name);
}

// What penalties count after steps is what they count again from the ids.
static void test_counts(const char *name, Session *s, const Text *x) {
    Model *m = session_model(s);
    const size_t n = (size_t)m->config.vocab;
    int32_t said[256], n_said, *counts = m->s.counts + (size_t)s->seq * n, *copy = alloc_or_die(n, sizeof *copy);
    session_forget(s);
    answer_with(s, x, greedy, said, &n_said, NULL);
    memcpy(copy, counts, n * sizeof *copy);
    CHECK(shorten_session(m, s->seq, s->held.ids, (int)s->held.n) && !memcmp(copy, counts, n * sizeof *copy),
          "%s: other counts for penalties", name);
    free(copy);
}

// A prompt with a picture is dense, another one of that length is not.
static void test_dense(const char *path) {
    ModelOptions o = options();
    o.n_ctx = 1600;
    o.n_logits = STEP_ROWS;
    o.pflash_density = 0.1f;
    Model *m = open_model(path, cpu_ops(), o);
    Tokenizer t;
    int32_t said[256];
    int n_said;
    model_tokenizer(m, &t);
    Session *s = session_open(m, &t, 0);
    for (int k = 0; k < 2; k++) {
        Text x = { 0 };
        add_text(&x, 1350, 500);
        if (k) add_picture(&x, 60, m->config.dim, 3, NULL), add_text(&x, 20, 500);
        answer_with(s, &x, greedy, said, &n_said, NULL);
        const double density = read_density(m);
        CHECK(k ? density == 1 : density > 0 && density < 1, "%s: attends to %g of the blocks",
              k ? "a prompt with a picture" : "text", density);
        session_forget(s);
    }
    session_close(s);
    tok_free(&t);
    model_close(m);
}

// No draft goes beyond text that a picture follows.
static void test_ngrams(void) {
    const int32_t ids[] = { 8, 9, 4, 5, 6, 7, picture_id(1, 0), picture_id(1, 1), 3, 4, 5, 6 };
    int32_t out[8];
    Ngrams g = { 0 };
    ngrams_add(&g, ids, 12, false);
    const int n = ngrams_look_up(&g, ids, 12, 3, 8, out);
    CHECK(n == 1 && out[0] == 7, "%d drafts before a picture", n);
    free(g.newest);
    free(g.earlier);
}

static void test_file(const char *name, Session *s, Session *other, const Text *x, const int32_t *want, int n) {
    const char *path = kept(in_tmp("%s.session", name));
    SessionNote note;
    CHECK(session_to_file(s, &(SessionNote){ 0 }, path, NULL), "%s: %s", name, session_error(s));
    session_forget(other);
    CHECK(session_from_file(other, &note, path, NULL) == 1, "%s: %s", name, session_error(other));
    session_note_free(&note);
    same_answer("from a file", other, x, greedy, want, n, x->n - 1);
    SessionPeek peek;
    CHECK(session_peek(other, path, &peek) == 1 && same_ids(&peek.ids, session_held(s)) == (int)peek.ids.n,
          "%s: other ids in its file", name);
    tok_ids_free(&peek.ids);
}

// drafter: of the model, or NULL
static void test_sessions(const char *name, const char *path, const char *drafter) {
    ModelOptions o = options();
    o.n_ctx = 448;
    if (drafter) o.drafter = drafter, o.draft_width = 1, o.draft_depth = 4;
    o.k_type = o.v_type = KV_F16;
    o.n_logits = STEP_ROWS;
    o.penalties = true;
    Model *m = open_model(path, cpu_ops(), o);
    Tokenizer t;
    int32_t want[256], said[256];
    int n, n_said;
    model_tokenizer(m, &t);
    Session *s = session_open(m, &t, 0), *fresh = session_open(m, &t, 1);
    const Text x = random_text(m, (const int[]){ 70, 100 }, 2);
    Text y = x;                                        // another second picture
    y.n_pictures = 1;
    y.n = x.pictures[1].first;
    add_picture(&y, 100, m->config.dim, 77, NULL);
    memcpy(y.ids + y.n, x.ids + y.n, (size_t)(x.n - y.n) * sizeof *y.ids);
    y.n = x.n;
    CHECK(answer_with(s, &x, greedy, want, &n, NULL) && n == 12, "%s: %s", name, session_error(s));
    same_answer("the same prompt again", s, &x, greedy, want, n, x.n - 1);
    test_file(name, s, fresh, &x, want, n);
    CHECK(answer_with(fresh, &y, greedy, said, &n_said, NULL), "%s: %s", name, session_error(fresh));
    same_answer("another picture at the same place", s, &y, greedy, said, n_said, -1);
    CHECK(session_turn(s)->n_cached <= y.pictures[1].first, "%s: cached another picture", name);
    Text small = random_text(m, (const int[]){ 10, 20 }, 2);           // equal ids in the first rows of a picture
    session_forget(s);
    answer_with(s, &small, greedy, said, &n_said, NULL);
    for (int i = 15; i < 20; i++) small.ids[small.pictures[1].first + i]--;
    answer_with(s, &small, greedy, said, &n_said, NULL);
    CHECK(session_turn(s)->n_cached == small.pictures[1].first, "%s: of a picture a part is reused, or more is not",
          name);
    CHECK(answer_with(fresh, &y, greedy, said, &n_said, NULL), "%s: %s", name, session_error(fresh));
    const int chunks[] = { 7, 101 };
    for (int k = 0; k < 2; k++) {
        session_forget(s);
        session_set_budget(s, chunks[k], INFINITY);
        session_set_snapshots(s, 4, 32);
        same_answer("chunks", s, &x, greedy, want, n, 0);
        for (int i = 0; i < s->n_snapshots; i++)
            CHECK(allowed_cut(m, &x, s->snapshots[i].n), "%s: a snapshot inside a picture, at %d", name,
                  s->snapshots[i].n);
        same_answer("another picture, with snapshots", s, &y, greedy, said, n_said, -1);
    }
    AnswerOptions penal = greedy;
    penal.sampling.repeat = 1.3f;
    session_forget(fresh);
    answer_with(fresh, &x, penal, said, &n_said, NULL);
    same_answer("penalties, counted again", fresh, &x, penal, said, n_said, x.n - 1);
    test_refusals(s, &x);
    test_drafts(name, s, &x);
    test_shift(name, s);
    test_counts(name, s, &x);
    session_close(s);
    session_close(fresh);
    tok_free(&t);
    model_close(m);
}

static void test_drafter(const char *name, const char *path, const char *drafter, int depth) {
    ModelOptions o = options();
    o.n_logits = STEP_ROWS;
    o.drafter = drafter, o.draft_width = 1, o.draft_depth = depth;
    Model *m = open_model(path, cpu_ops(), o);
    Tokenizer t;
    model_tokenizer(m, &t);
    Session *s = session_open(m, &t, 0);
    const Text x = random_text(m, (const int[]){ 70, 100 }, 2);
    test_drafts(name, s, &x);
    session_close(s);
    tok_free(&t);
    model_close(m);
}

// ---- conversations --------------------------------------------------------------------------------------------------

// A PPM of w x h pixels as a part of a message, after a comma.
static void ppm_part(Model *m, const Tokenizer *t, int w, int h, TokText *parts) {
    char file[16384], err[200];
    int n = snprintf(file, sizeof file, "P6 %d %d 255\n", w, h), tokens;
    for (int i = 0; i < 3 * w * h; i++) file[n++] = (char)(i * 7 + w);
    CHECK(picture_part(m, t, (TokStr){ file, (size_t)n }, parts, &w, &h, &tokens, err, sizeof err), "%s", err);
}

static void add(TokText *to, const char *s) {
    if (!tok_text_append(to, s, strlen(s))) die("out of memory");
}

static bool place(Model *m, Tokenizer *t, const TokText *messages, bool cue, TokIds *ids, size_t *before_cue,
                  PromptPictures *p, char *err) {
    TokPictures at = { 0 };
    const TokChat chat = { .messages = { messages->s, messages->n }, .add_cue = cue, .pictures = &at,
                           .before_cue = before_cue };
    *p = (PromptPictures){ 0 };
    ids->n = 0;
    bool ok = tok_chat(t, &chat, ids, NULL) == 0;
    if (!ok) snprintf(err, 300, "%s", t->err);
    size_t n_more = 0;
    const size_t n = ids->n;
    ok = ok && read_pictures(m, t, &at, p, &n_more, err, 300);
    ok = ok && place_pictures(t, &at, ids, before_cue, p);
    CHECK(!ok || ids->n == n + n_more, "%zu ids, pictures add %zu, then %zu", n, n_more, ids->n);
    tok_pictures_free(&at);
    return ok;
}

static void refused_message(Model *m, Tokenizer *t, const char *message, const char *why) {
    TokText messages = { 0 };
    TokIds ids = { 0 };
    PromptPictures p;
    char err[300] = "";
    add(&messages, message);
    CHECK(!place(m, t, &messages, false, &ids, NULL, &p, err) && strstr(err, why), "expected '%s', got '%s'", why, err);
    tok_text_free(&messages);
    tok_ids_free(&ids);
}

// The rows of a picture stand alone where a vocabulary has no tokens around them.
static void test_place_alone(Model *m, Tokenizer *t) {
    TokText with = { 0 }, without = { 0 };
    TokIds ids = { 0 }, plain = { 0 };
    PromptPictures p, none;
    size_t before_cue = 0, plain_before_cue = 0;
    ImageSize size;
    char err[300] = "";
    add(&with, "[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"\"}");
    ppm_part(m, t, 60, 40, &with);
    add(&with, ",{\"type\":\"text\",\"text\":\"b\"}]}]");
    add(&without, "[{\"role\":\"user\",\"content\":\"b\"}]");
    CHECK(place(m, t, &with, true, &ids, &before_cue, &p, err), "%s", err);
    CHECK(place(m, t, &without, true, &plain, &plain_before_cue, &none, err), "%s", err);
    CHECK(image_fit(60, 40, m->vision->usual_tokens, &size) && p.n == 1 && p.places[0].n == size.tokens, "another size");
    CHECK(ids.n == plain.n + (size_t)size.tokens && before_cue == plain_before_cue + (size_t)size.tokens,
          "%zu ids, %zu before the cue, without the picture %zu, %zu", ids.n, before_cue, plain.n, plain_before_cue);
    for (size_t i = 0, first = (size_t)p.places[0].first; i < plain.n; i++)
        CHECK(ids.ids[i < first ? i : i + (size_t)size.tokens] == plain.ids[i], "id %zu differs", i);
    for (int i = 0; i < size.tokens; i++)
        CHECK(ids.ids[p.places[0].first + i] == picture_id(p.files[0].hash, i), "row %d of the picture", i);
    pictures_free(&p);
    pictures_free(&none);
    tok_text_free(&with);
    tok_text_free(&without);
    tok_ids_free(&ids);
    tok_ids_free(&plain);
}

// Whichever allocation fails, an error says so, and nothing ends the process.
static void test_no_memory(Model *m, Tokenizer *t, const TokText *messages) {
    TokIds ids = { 0 };
    PromptPictures p;
    char err[300] = "";
    int n = 0;
    for (bool failed = true; failed; n++) {
        size_t before_cue;
        fail_at = n;
        bool ok = place(m, t, messages, true, &ids, &before_cue, &p, err);
        for (int k = 0; k < p.n && ok; k++) ok = decode_picture(&p.files[k], err, sizeof err);
        failed = fail_at < 0;
        fail_at = -1;
        CHECK(failed ? !ok && strstr(err, "out of memory") : ok, "allocation %d: '%s'", n, err);
        pictures_free(&p);
    }
    CHECK(n > 20, "two pictures take %d allocations", n);
    RowCache rows = { 0 };
    fail_at = 0;
    CHECK(!row_cache_add(&rows, 1, NULL, 0) && !rows.n, "a list of pictures without memory");
    fail_at = -1;
    tok_ids_free(&ids);
}

// Two pictures between texts, one of which spells a marker.
static void test_places(const char *path) {
    Model *m = open_model(path, cpu_ops(), options());
    Vision tower = { .max_tokens = 1120, .usual_tokens = 70 };
    Tokenizer t;
    TokText messages = { 0 };
    TokIds ids = { 0 }, part = { 0 };
    PromptPictures p, q;
    char err[300] = "";
    size_t before_cue = 0;
    model_tokenizer(m, &t);
#define IMAGE(url) "[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\",\"image_url\":{\"url\":\"" url "\"}}]}]"
    refused_message(m, &t, IMAGE("data:,UDYg"), "no image tower is loaded");
    m->vision = &tower;
    m->tower_hash = 5;
    test_place_alone(m, &t);
    t.image = t.n_tokens - 1;                          // the small model's vocabulary lacks these
    t.image_open = t.n_tokens - 2;
    t.image_close = t.n_tokens - 3;
    refused_message(m, &t, IMAGE("https://example.com/a.png"), "addresses are not opened");
    refused_message(m, &t, IMAGE("data:image/png;base64,@"), "expected its data in base64");
    refused_message(m, &t, IMAGE("data:image/png;base64,AAAA"), "expected a PNG");
    refused_message(m, &t, "[{\"role\":\"user\",\"content\":[{\"type\":\"image\"}]}]", "expected {\"type\"");
    add(&messages, "[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a <|image|> b\"}");
    ppm_part(m, &t, 60, 40, &messages);
    add(&messages, ",{\"type\":\"text\",\"text\":\"and\"}");
    ppm_part(m, &t, 20, 70, &messages);
    add(&messages, "]}]");
    test_no_memory(m, &t, &messages);
    CHECK(place(m, &t, &messages, true, &ids, &before_cue, &p, err), "%s", err);
    CHECK(place(m, &t, &messages, false, &part, NULL, &q, err), "%s", err);
    CHECK(part.n == before_cue && same_ids(&part, &ids) == (int)part.n, "the cue begins at %zu, not at %zu", part.n,
          before_cue);
    int n_open = 0, n_close = 0, n_soft = 0;
    for (size_t i = 0; i < ids.n; i++) {
        n_open += ids.ids[i] == t.image_open;
        n_close += ids.ids[i] == t.image_close;
        n_soft += ids.ids[i] < 0;
        CHECK(ids.ids[i] != t.image, "a placeholder is left");
    }
    ImageSize size[2];
    CHECK(image_fit(60, 40, 70, &size[0]) && image_fit(20, 70, 70, &size[1]), "no sizes");
    CHECK(n_open == 2 && n_close == 2 && p.n == 2 && n_soft == size[0].tokens + size[1].tokens,
          "%d, %d markers, %d pictures of %d tokens", n_open, n_close, p.n, n_soft);
    for (int k = 0; k < p.n; k++) {
        const Picture *x = &p.places[k];
        CHECK(x->n == size[k].tokens && ids.ids[x->first - 1] == t.image_open && ids.ids[x->first] < -1 &&
              ids.ids[x->first + x->n] == t.image_close && ids.ids[x->first] == picture_id(p.files[k].hash, 0),
              "picture %d: %d tokens at %d", k, x->n, x->first);
    }
    CHECK(p.files[0].hash != p.files[1].hash && p.files[0].hash == q.files[0].hash, "hashes of pictures");
    add(&messages, " ");
    messages.n -= 4;                                   // "]}] "
    add(&messages, "]},{\"role\":\"assistant\",\"content\":[{\"type\":\"image\"}]}]");
    CHECK(!place(m, &t, &messages, false, &part, NULL, &q, err) && strstr(err, "expected text parts in an answer"),
          "an image in an answer: %s", err);
    m->vision = NULL;
    pictures_free(&p);
    pictures_free(&q);
    tok_ids_free(&ids);
    tok_ids_free(&part);
    tok_text_free(&messages);
    tok_free(&t);
    model_close(m);
}

// ---- reference data -------------------------------------------------------------------------------------------------

static float *read_array(const char *folder, const char *name, size_t *n) {            // 32-bit words
    char path[1024];
    struct stat st;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = must(fopen(path, "rb"));
    if (fstat(fileno(f), &st)) die("%s: %s", path, strerror(errno));
    *n = (size_t)st.st_size / 4;
    float *x = must(malloc(*n * 4));
    if (fread(x, 4, *n, f) != *n) die("%s: cannot read", path);
    fclose(f);
    return x;
}

// The model's folder with a tokenizer, which the data lack.
static const char *folder_with_tokenizer(const char *folder) {
    static const char *const files[] = { "config.json", "model.safetensors" };
    const char *dir = kept(in_tmp("hf-%c", folder[strlen(folder) - 1]));
    char *real = must(realpath(folder, NULL)), from[1200];
    if (mkdir(dir, 0700)) die("%s: %s", dir, strerror(errno));
    for (int i = 0; i < 2; i++) {
        snprintf(from, sizeof from, "%s/hf/%s", real, files[i]);
        if (symlink(from, in_tmp("hf-%c/%s", folder[strlen(folder) - 1], files[i]))) die("%s: %s", from, strerror(errno));
    }
    FILE *f = must(fopen(in_tmp("hf-%c/tokenizer.json", folder[strlen(folder) - 1]), "w"));
    fprintf(f, "{\"model\":{\"type\":\"BPE\",\"merges\":[],\"vocab\":{\"<pad>\":0,\"<eos>\":1,\"<bos>\":2");
    for (int i = 3; i < 320; i++) fprintf(f, ",\"<unused%d>\":%d", i, i);
    fprintf(f, "}},\"added_tokens\":[]}");
    fclose(f);
    free(real);
    return dir;
}

static void test_golden(const char *folder, Model *m, const char *prompt, const char *const *images) {
    char name[64];
    size_t n_ids, n_want, n_rows;
    Text x = { 0 };
    snprintf(name, sizeof name, "%s.tokens.i32", prompt);
    float *words = read_array(folder, name, &n_ids);
    const int32_t *ids = (const int32_t *)(void *)words;
    float *rows[MAX_PICTURES];
    for (size_t i = 0; i < n_ids; ) {
        const int image = x.n_pictures;
        if (ids[i] != 300) {
            x.ids[x.n++] = ids[i++];
            continue;
        }
        snprintf(name, sizeof name, "%s.soft.f32", images[image]);
        rows[image] = read_array(folder, name, &n_rows);
        const int n = (int)n_rows / m->config.dim;
        add_picture(&x, n, m->config.dim, (uint64_t)image, rows[image]);
        i += (size_t)n;
    }
    const char *rule = !x.n_pictures ? "" : vision_whole_blocks(&m->config) ? "_R1" : "_causal";
    snprintf(name, sizeof name, "%s.logits%s.f32", prompt, rule);
    float *want = read_array(folder, name, &n_want), *got = run_rows(m, &x, NULL, 0);
    const double off = distance(got, want, n_want);
    CHECK(n_want == n_ids * (size_t)m->config.vocab && off <= 1e-3, "%s/%s: off by %g", folder, name, off);
    printf("%s/%s: %zu logits, off by %.2g\n", folder, name, n_want, off);
    if (x.n_pictures) test_chunks(prompt, m, &x, got);
    for (int i = 0; i < x.n_pictures; i++) free(rows[i]);
    free(words);
    free(want);
    free(got);
}

static void test_golden_folder(const char *all) {
    static const char kinds[] = "EVU";
    for (int k = 0; k < 3; k++) {
        char folder[600];
        snprintf(folder, sizeof folder, "%s/%c", all, kinds[k]);
        ModelOptions o = options();
        Model *m = open_model(folder_with_tokenizer(folder), cpu_ops(), o);
        test_golden(folder, m, "text", NULL);
        test_golden(folder, m, "one", (const char *const[]){ "grad333x517" });
        test_golden(folder, m, "two", (const char *const[]){ "check1000x200", "grad48x48" });
        model_close(m);
    }
}

int main(void) {
    make_tmp();
    test_model("micro-dense");
    test_model("micro-e");
    test_sessions("mini", "models/gemma4-mini-q8_0.gguf", "models/gemma4-mini-mtp-q8_0.gguf");
    test_sessions("mini-e", "models/gemma4-mini-e-q8_0.gguf", NULL);
    test_drafter("mini with dflash", "models/gemma4-mini-q8_0.gguf", "models/gemma4-mini-dflash-q8_0.gguf", 15);
    test_dense("models/gemma4-mini-q8_0.gguf");
    test_ngrams();
    test_places("models/gemma4-mini-q8_0.gguf");
    if (getenv("VISION_GOLDEN")) test_golden_folder(getenv("VISION_GOLDEN"));
    return test_done("soft_rows");
}
