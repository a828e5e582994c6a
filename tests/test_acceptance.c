/* test_acceptance.c - draft acceptance of the trained drafters, by kind of text and depth, is as in
 * models/acceptance.md.
 *
 * The engine continues 24 of the 96 prompts per kind that the table was measured with (tests/drafted.txt, made by
 * tools/prompts.py), and drafts after every third token. A rate may differ by 0.03 plus four standard errors, which
 * include the variance between texts and the binomial variance of tokens. LONG=1: all kinds and prompts, at temperature
 * 0 and 1, and a line for each with the measured rates and those of the table; else six prompts of two kinds with short
 * answers. Run from the top of the repository, where the models are. */
#define TESTING
#include "../gemma4.c"
#include "test.h"
#include "steps.h"

enum { ROW = 384,             // ids of a prompt and its answer
       PROMPTS = 24, MOST_DEPTH = 15, MOST_KINDS = 16, EACH = 3 };

typedef struct { int32_t ids[ROW]; int n; } Ids;
typedef struct { char name[24]; Ids prompts[PROMPTS]; int n; } Kind;
typedef struct { int right[PROMPTS][MOST_DEPTH], tried[PROMPTS][MOST_DEPTH]; long ids; } Count;

static Kind kinds[MOST_KINDS];
static int n_kinds;

static void read_prompts(const char *path) {
    size_t size;
    char *data = read_file(path, &size, "test");
    data = realloc(data, size + 1);
    if (!data) die("%s: out of memory", path);
    data[size] = 0;
    for (char *line = strtok(data, "\n"); line; line = strtok(NULL, "\n")) {
        if (*line == '#') continue;
        if (*line == '[') {
            if (n_kinds == MOST_KINDS) die("%s: more than %d kinds", path, MOST_KINDS);
            snprintf(kinds[n_kinds++].name, sizeof kinds->name, "%.*s", (int)strcspn(line + 1, "]"), line + 1);
            continue;
        }
        Kind *k = &kinds[max_int(n_kinds - 1, 0)];
        if (!n_kinds || k->n == PROMPTS) die("%s: expected [KIND], and %d prompts of it", path, PROMPTS);
        Ids *p = &k->prompts[k->n++];
        for (char *at = line; *at && p->n < ROW; at += *at == ' ') p->ids[p->n++] = (int32_t)strtol(at, &at, 10);
    }
    free(data);
}

// Rates of models/acceptance.md: the row "KIND, TEMPERATURE" of the table that begins with "| NAME, temperature".
// False: there is none.
static bool read_shares(const char *page, const char *table, const char *kind, int temperature, int depth,
                        double *share) {
    char head[64], row[64];
    snprintf(head, sizeof head, "\n| %s, temperature |", table);
    snprintf(row, sizeof row, "\n| %.20s, %d |", kind, temperature);
    const char *at = strstr(page, head), *end = at ? strstr(at + 1, "\n\n") : NULL;
    at = at ? strstr(at, row) : NULL;
    if (!at || (end && at > end)) return false;
    const char *stop = strchr(at + 1, '\n');
    for (int d = depth - 1; d >= 0; d--) {             // the last columns
        do stop--; while (stop[-1] != '|');
        share[d] = strtod(stop, NULL);
        stop--;
    }
    return true;
}

static int32_t next_token(Model *m, int temperature, uint64_t seed, int pos) {     // from row 0 of the logits
    const int vocab = m->config.vocab;
    float *logits = alloc_or_die((size_t)vocab, sizeof *logits);
    double total = 0, sum = 0;
    int best = 0, id = 0;
    read_logits(m, 0, logits);
    for (int i = 1; i < vocab; i++) if (logits[i] > logits[best]) best = i;
    for (int i = 0; i < vocab; i++) total += exp((double)(logits[i] - logits[best]));
    const double u = (double)random_unit(seed, pos) * total;
    for (id = 0; id < vocab - 1; id++) {
        sum += exp((double)(logits[id] - logits[best]));
        if (sum > u) break;
    }
    free(logits);
    return temperature ? id : best;
}

// Continues a prompt in session 0 to the end of the answer or of the row, and counts the accepted drafts after every
// third token.
static void one_prompt(Model *m, const Tokenizer *t, const Ids *prompt, int temperature, int depth, int number,
                       Count *c) {
    int32_t said[ROW + 1], drafts[ROW][MOST_DEPTH];
    int n = 0;
    reset_session(m, 0);
    run_prompt(m, 0, prompt->ids, prompt->n);
    for (;;) {
        said[n] = next_token(m, temperature, (uint64_t)number, prompt->n + n);
        m->ops->copy(&(Copy){ m->s.next, &said[n], sizeof *said, COPY_IN });
        m->ops->copy(&(Copy){ m->s.last, &(int32_t){ 0 }, sizeof(int32_t), COPY_IN });
        commit_all(m);
        if (n % EACH == 0) {
            issue_draft(m, &(int32_t){ 0 }, 1, depth);
            m->ops->copy(&(Copy){ drafts[n], m->drafter->ids, (size_t)depth * sizeof **drafts, COPY_OUT });
            m->ops->wait();
        }
        n++;
        if (prompt->n + n == ROW || tok_is_stop(t, said[n - 1])) break;
        run_chunk(m, 0, &said[n - 1], 1);
    }
    for (int i = 0; i < n; i += EACH)
        for (int d = 0, good = 1; d < depth && i + 1 + d < n; d++) {
            good = good && drafts[i][d] == said[i + 1 + d];
            c->tried[number][d]++;
            c->right[number][d] += good;
        }
    c->ids += n;
}

// The acceptance rate at depth d, where `want` is expected, and its standard error.
static double part_of(const Count *c, int n, int d, double want, double *error) {
    double right = 0, tried = 0, square = 0;
    for (int r = 0; r < n; r++) {
        right += c->right[r][d];
        tried += c->tried[r][d];
    }
    const double share = right / fmax(tried, 1);
    for (int r = 0; r < n; r++) square += pow(c->right[r][d] - share * c->tried[r][d], 2);
    *error = sqrt(square * n / (n - 1) / fmax(tried * tried, 1) + want * (1 - want) / fmax(tried, 1));
    return share;
}

static void one_kind(Model *m, const Tokenizer *t, const char *page, const char *table, const Kind *k, int temperature,
                     bool whole) {
    const int depth = m->options.draft_depth, n = whole ? k->n : 6;
    double want[MOST_DEPTH];
    Count c = { 0 };
    if (!CHECK(read_shares(page, table, k->name, temperature, depth, want), "models/acceptance.md: expected a row '%s, "
               "%d' of %s", k->name, temperature, table)) return;
    for (int i = 0; i < n; i++) one_prompt(m, t, &k->prompts[i], temperature, depth, i, &c);
    if (whole) printf("| %s | %s, %d | %ld ids |", table, k->name, temperature, c.ids);
    for (int d = 0; d < depth; d++) {
        double error;
        int texts = 0;
        const double got = part_of(&c, n, d, want[d], &error), most = 4 * error + 0.03;
        for (int i = 0; i < n; i++) texts += c.tried[i][d] > 0;
        if (whole) printf(" %.2f/%.2f |", got, want[d]);
        CHECK(texts < 6 || fabs(got - want[d]) <= most, "%s, %s, temperature %d, depth %d: %.3f are right, expected "
              "%.2f, off by %.3f at most", table, k->name, temperature, d + 1, got, want[d], most);
    }
    if (whole) printf("\n");
}

static void one_drafter(const char *path, const char *table, int depth, const char *page, bool whole) {
    static const char *const some[] = { "facts", "task" };
    Model *m = alloc_or_die(1, sizeof *m);
    Tokenizer tok;
    load_model(m, "models/gemma4-mini-q8_0.gguf", cpu_ops(),
               (ModelOptions){ .n_ctx = ROW, .n_seqs = 1, .n_batch = 256, .n_logits = 1, .k_type = KV_F16,
                              .v_type = KV_F16, .drafter = path, .draft_width = 1, .draft_depth = depth }, NULL);
    load_tokenizer(&tok, &m->gguf, m->config.vocab);
    for (int temperature = 0; temperature <= whole; temperature++)
        for (int i = 0; i < n_kinds; i++) {
            bool wanted = whole;
            for (int k = 0; k < 2; k++) wanted |= !strcmp(kinds[i].name, some[k]);
            if (wanted) one_kind(m, &tok, page, table, &kinds[i], temperature, whole);
        }
    tok_free(&tok);
    free_model(m);
    free(m);
}

int main(void) {
    const bool whole = getenv("LONG") && strcmp(getenv("LONG"), "0");
    size_t size;
    char *page = read_file("models/acceptance.md", &size, "test");
    page = realloc(page, size + 1);
    if (!page) die("models/acceptance.md: out of memory");
    page[size] = 0;
    start_threads(1);
    read_prompts("tests/drafted.txt");
    one_drafter("models/gemma4-mini-mtp-q8_0.gguf", "MTP", 8, page, whole);
    one_drafter("models/gemma4-mini-dflash-q8_0.gguf", "DFlash", 15, page, whole);
    free(page);
    return test_done("acceptance");
}
