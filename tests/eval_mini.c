/* eval_mini.c - measures what the small models can do, on held-out questions and texts.
 *
 *   build/eval_mini [--short] [--at-least PERCENT] [--kinds A,B] [cache flags] MODEL.gguf [tests/eval_mini.txt]
 *
 * Prints a table per kind of question: how many answers are right, the 95 % interval of that rate (Wilson), the loss of
 * the answers in nats per id, and how many of their ids are near ties (best two logits within 0.1). An answer is right
 * if each of its ids is the greedy choice after the ids before it, which means that greedy decoding gives the answer;
 * so all its rows run in one step. Then the loss of held-out documents, and the near ties of greedy stories. "needle"
 * asks for one of 1 or 4 codes placed in a story text of the given length; questions are not committed, so a text is
 * read once for all its questions. The run fails if facts, arithmetic, thoughts, tasks or tool calls are less than 95 %
 * right (--at-least), other kinds less than 90 %, needles up to 4K less than 98 %; longer needles are only reported.
 * --at-least 0 only reports. --short uses some of the items and needles up to 1K, and allows one wrong answer of eight.
 * --kinds selects kinds of questions, and of needles, losses, stories and texts. Texts are sampled stories: they must
 * be UTF-8 and must not end in a loop. The flags of the cache are those of gemma4: -ctk -ctv --kv-swa --kv-tail
 * --kv-layout.
 *
 * The data comes from tools/make_eval.py. Names and codes of needles come from a fixed random sequence here. */
#define TESTING
#include "../gemma4.c"
#include "steps.h"
#include "test.h"

#ifdef SANITIZED
enum { SHORT_ITEMS = 2, SHORT_LENGTHS = 1 };           // a step takes thirty times as long with a sanitizer
#else
enum { SHORT_ITEMS = 8, SHORT_LENGTHS = 2 };
#endif
enum { N_BATCH = 256, MAX_ITEMS = 2000, ITEM_PARTS = 4, MAX_IDS = 17000 };

typedef struct { char *part[ITEM_PARTS]; int n_parts; } Item;      // given and expected texts alternate

typedef struct {
    char name[40];
    Item *items;
    int  n;
} Section;

static struct {
    bool      is_short;
    const char *kinds;                 // selected kinds, separated by commas; NULL: all
    double    at_least;                // required rate of right answers; 0: only report
    Model    *m;
    Tokenizer tok;
    Section   sections[64];
    int       n_sections;
    int32_t   ids[MAX_IDS];
    bool      wanted[MAX_IDS];         // this id is part of an answer
    int       n;
    float    *logits;                  // (vocab)
} t;

typedef struct { int items, right, ids, near_ties; double loss, loss2; } Score;

static bool wanted(const char *kind) {
    const size_t n = strlen(kind);
    for (const char *at = t.kinds; at && *at; at += strcspn(at, ","), at += *at == ',')
        if (strcspn(at, ",") == n && !memcmp(at, kind, n)) return true;
    return !t.kinds;
}

// ---- the file -------------------------------------------------------------------------------------------------------

static void unescape(char *s) {
    char *out = s;
    for (; *s; s++) {
        if (*s == '\\' && s[1]) {
            s++;
            *out++ = *s == 'n' ? '\n' : *s == 't' ? '\t' : *s;
        } else {
            *out++ = *s;
        }
    }
    *out = 0;
}

static void read_data(const char *path) {
    size_t size;
    char *data = read_file(path, &size, path);
    data = realloc(data, size + 1);
    if (!data) die("%s: out of memory", path);
    data[size] = 0;
    Section *s = NULL;
    for (char *line = strtok(data, "\n"); line; line = strtok(NULL, "\n")) {
        if (line[0] == '#' && !s) continue;
        if (!strncmp(line, "[exact ", 7) || !strncmp(line, "[loss ", 6) || !strcmp(line, "[haystack]")) {
            if (t.n_sections == (int)(sizeof t.sections / sizeof *t.sections)) die("%s: too many sections", path);
            s = &t.sections[t.n_sections++];
            snprintf(s->name, sizeof s->name, "%.*s", (int)strcspn(line + 1, "]"), line + 1);
            s->items = alloc_or_die(MAX_ITEMS, sizeof *s->items);
            continue;
        }
        if (!s || s->n == MAX_ITEMS) die("%s: expected at most %d lines in a section, after its head", path, MAX_ITEMS);
        Item *item = &s->items[s->n++];
        for (char *p = line; p; ) {
            char *tab = strchr(p, '\t');
            if (tab) *tab = 0;
            if (item->n_parts == ITEM_PARTS) die("%s: [%s]: more than %d parts in a line", path, s->name, ITEM_PARTS);
            unescape(p);
            item->part[item->n_parts++] = p;
            p = tab ? tab + 1 : NULL;
        }
    }
}

// ---- ids ------------------------------------------------------------------------------------------------------------

static void start_text(void) {
    t.n = 1;
    t.ids[0] = t.tok.bos;
    t.wanted[0] = false;
}

static void add_text(const char *s, bool wanted) {
    TokIds v = { 0 };
    if (tok_encode(&t.tok, s, strlen(s), TOK_SPECIAL, &v) < 0) die("%s", t.tok.err);
    if (t.n + (int)v.n > MAX_IDS) die("a text has more than %d ids", MAX_IDS);
    for (size_t i = 0; i < v.n; i++) {
        t.ids[t.n] = v.ids[i];
        t.wanted[t.n++] = wanted;
    }
    tok_ids_free(&v);
}

// With thinking off, the larger models get an empty thought before the answer.
static void add_empty_thought(const char *given) {
    const char *turn = "<|turn>model\n";
    const size_t n = strlen(given), n_turn = strlen(turn);
    if (t.tok.large_variant && n >= n_turn && !strcmp(given + n - n_turn, turn) && !strstr(given, "<|think|>"))
        add_text("<|channel>thought\n<channel|>", false);
}

static void add_question(const char *question) {       // as a user's turn, unless it already has markup
    if (!strncmp(question, "<|turn>", 7)) {
        add_text(question, false);
        add_empty_thought(question);
        return;
    }
    add_text("<|turn>user\n", false);
    add_text(question, false);
    add_text("<turn|>\n<|turn>model\n", false);
    add_empty_thought("<|turn>model\n");
}

// ---- rows -----------------------------------------------------------------------------------------------------------

static void judge_row(int kept, int32_t next, Score *s, bool *right) {
    read_logits(t.m, kept, t.logits);
    const int vocab = t.m->config.vocab;
    float best = -INFINITY, second = -INFINITY;
    int arg = 0;
    for (int i = 0; i < vocab; i++) {
        if (t.logits[i] > best) second = best, best = t.logits[i], arg = i;
        else if (t.logits[i] > second) second = t.logits[i];
    }
    double sum = 0;
    for (int i = 0; i < vocab; i++) sum += exp((double)(t.logits[i] - best));
    const double loss = (double)best + log(sum) - (double)t.logits[next];
    s->loss += loss;
    s->loss2 += loss * loss;
    s->ids++;
    s->near_ties += best - second < 0.1f;
    if (arg != next) *right = false;
}

// Runs ids [from, n) after the first `from` ids, which the session has, and checks the answer's ids. keep: commits
// them; otherwise they are at most STEP_ROWS and the session is unchanged. True: all ids of the answer are the greedy
// choice.
static bool run_ids(int from, bool keep, Score *s) {
    bool right = true;
    for (int at = from; at < t.n; ) {
        const int n = min_int(t.n - at, keep ? N_BATCH : STEP_ROWS);
        for (int i = 0; i < n; i++)
            t.m->step_rows[i] = (StepRow){ .token = t.ids[at + i], .output = at + i + 1 < t.n && t.wanted[at + i + 1] };
        step(t.m, &(StepSeg){ .seq = 0, .kind = SEG_CHAIN, .n = n, .rows = t.m->step_rows }, 1);
        for (int i = 0, kept = 0; i < n; i++)
            if (t.m->step_rows[i].output) judge_row(kept++, t.ids[at + i + 1], s, &right);
        if (keep) commit_all(t.m);
        at += n;
        if (!keep && at < t.n) die("a question has more than %d ids", STEP_ROWS);
    }
    return right;
}

// ---- the table ------------------------------------------------------------------------------------------------------

static void print_score(const char *name, const Score *s, double at_least) {
    const double n = s->items, p = s->right / n, z = 1.96;
    const double middle = (p + z * z / (2 * n)) / (1 + z * z / n);
    const double half = z / (1 + z * z / n) * sqrt(p * (1 - p) / n + z * z / (4 * n * n));
    printf("%-24s %5d %5d  %5.1f %%  (%5.1f ..%6.1f)  %8.4f  %6.2f %%\n", name, s->items, s->right, 100 * p,
           100 * fmax(0, middle - half), 100 * fmin(1, middle + half), s->loss / s->ids, 100.0 * s->near_ties / s->ids);
    if (at_least > 0)
        CHECK(p >= at_least, "%s: expected %.0f %% right at least, got %.1f %%", name, 100 * at_least, 100 * p);
}

static void print_loss(const char *name, const Score *s) {
    const double mean = s->loss / s->ids, variance = s->loss2 / s->ids - mean * mean;
    printf("%-24s %5d ids  %.3f +- %.3f\n", name, s->ids, mean, 1.96 * sqrt(fmax(0, variance) / s->ids));
    if (t.at_least > 0) CHECK(mean < 1.5, "%s: expected a loss below 1.5 nats, got %.3f", name, mean);
}

static void exact(const Section *s) {
    static const char *strict[] = { "facts", "arithmetic", "think", "task", "tool", "parallel_tool" };
    const char *name = s->name + strlen("exact ");
    double at_least = t.at_least - 0.05;
    for (size_t i = 0; i < sizeof strict / sizeof *strict; i++) if (!strcmp(name, strict[i])) at_least = t.at_least;
    if (t.is_short) at_least = fmin(at_least, 0.87);
    Score score = { 0 };
    const int stride = t.is_short && s->n > SHORT_ITEMS ? s->n / SHORT_ITEMS : 1;
    for (int i = 0; i < s->n; i += stride) {
        const Item *item = &s->items[i];
        start_text();
        for (int j = 0; j < item->n_parts; j++) {
            if (j == 0) add_question(item->part[j]);
            else add_text(item->part[j], j % 2 == 1);
        }
        reset_session(t.m, 0);
        score.items++;
        score.right += run_ids(0, true, &score);
    }
    print_score(name, &score, at_least);
}

static void loss(const Section *s) {
    Score score = { 0 };
    for (int i = 0; i < (t.is_short ? min_int(s->n, SHORT_ITEMS / 2) : s->n); i++) {
        start_text();
        add_text(s->items[i].part[0], true);
        reset_session(t.m, 0);
        run_ids(0, true, &score);
    }
    print_loss(s->name + strlen("loss "), &score);
}

// ---- needles --------------------------------------------------------------------------------------------------------

static uint32_t random_state = 7;
static int rnd(int n) {       // 0 .. n-1
    random_state = random_state * 1664525u + 1013904223u;
    return (int)((random_state >> 8) % (uint32_t)n);
}

static void key_name(char *name) {                     // two or three syllables
    const int n = 2 + rnd(2);
    for (int i = 0; i < n; i++) {
        name[2 * i] = "bdfghklmnprstvz"[rnd(15)];
        name[2 * i + 1] = "aeiou"[rnd(5)];
    }
    name[0] = (char)(name[0] - 'a' + 'A');
    name[2 * n] = 0;
}

// Asks for all codes in n_texts texts of about n_ids ids, with n_keys codes each; adds the results to *all.
static void needles(const Section *hay, int n_ids, int n_keys, int n_texts, Score *all) {
    Score score = { 0 };
    for (int k = 0; k < n_texts; k++) {
        char name[4][8], code[4][8], text[160];
        int at[4];                                     // position of the key
        for (int i = 0; i < n_keys; i++) {
            key_name(name[i]);
            for (int j = 0; j < i; j++) if (!strcmp(name[i], name[j])) {
                key_name(name[i]);
                j = -1;
            }
            snprintf(code[i], sizeof code[i], "%05d", rnd(100000));
            at[i] = n_keys == 1 ? (int)((k + 0.5) / n_texts * (n_ids - 90)) : rnd(n_ids - 90);
        }
        start_text();
        add_text("<|turn>user\n", false);
        bool done[4] = { false }, after_blank = true;
        for (int line = rnd(hay->n); t.n < n_ids - 70; line = (line + 1) % hay->n) {
            for (int i = 0; i < n_keys; i++) {
                if (done[i] || t.n < at[i]) continue;
                snprintf(text, sizeof text, "%sThe secret code of %s is %s.", after_blank ? "" : " ", name[i], code[i]);
                add_text(text, false);
                done[i] = true;
                after_blank = false;
            }
            const char *sentence = hay->items[line].part[0];
            char spaced[600];                          // a space is part of the word after it
            snprintf(spaced, sizeof spaced, "%s%s", after_blank ? "" : " ", sentence);
            add_text(spaced, false);
            after_blank = sentence[strlen(sentence) - 1] == '\n';
        }
        reset_session(t.m, 0);
        const int n = t.n;
        run_ids(0, true, &score);
        for (int i = 0; i < n_keys; i++) {
            if (!done[i]) die("a code found no place");
            t.n = n;
            snprintf(text, sizeof text, "%sWhat is the secret code of %s?<turn|>\n<|turn>model\n",
                     after_blank ? "" : "\n\n", name[i]);
            add_text(text, false);
            add_empty_thought("<|turn>model\n");
            snprintf(text, sizeof text, "The secret code of %s is %s.<turn|>", name[i], code[i]);
            add_text(text, true);
            score.items++;
            score.right += run_ids(n, false, &score);
        }
    }
    char name[40];
    snprintf(name, sizeof name, "needle %d, %d key%s", n_ids, n_keys, n_keys > 1 ? "s" : "");
    print_score(name, &score, 0);
    fflush(stdout);
    all->items += score.items;
    all->right += score.right;
    all->ids += score.ids;
    all->near_ties += score.near_ties;
    all->loss += score.loss;
}

static void all_needles(const Section *hay) {
    static const struct { int n_ids, n_texts[2]; } lengths[] = {           // number of texts with 1 key, with 4 keys
        { 256, { 24, 12 } }, { 1024, { 24, 12 } }, { 2048, { 16, 8 } }, { 4096, { 16, 8 } }, { 8192, { 6, 4 } },
        { 16384, { 3, 3 } }
    };
    Score all[2] = { 0 }, longer = { 0 };
    for (int i = 0; i < (t.is_short ? SHORT_LENGTHS : 6); i++)
        for (int four = 0; four < 2; four++)
            needles(hay, lengths[i].n_ids, four ? 4 : 1, t.is_short ? (four ? 1 : 4) : lengths[i].n_texts[four],
                    lengths[i].n_ids <= 4096 ? &all[four] : &longer);
    const double at_least = t.at_least < 0.95 ? t.at_least : 0.98;
    print_score("needles to 4096, 1 key", &all[0], at_least);
    print_score("needles to 4096, 4 keys", &all[1], at_least);
}

// ---- greedy stories -------------------------------------------------------------------------------------------------

static void stories(int n_stories, int n_ids) {
    static const char *kinds[] = { "a fox", "an owl", "a rabbit", "a bear named Bruno", "a girl", "a dragon", "a duck",
                                   "a mole" };
    Score score = { 0 };
    for (int k = 0; k < n_stories; k++) {
        char question[80];
        snprintf(question, sizeof question, "Tell me a story about %s.", kinds[k]);
        start_text();
        add_question(question);
        reset_session(t.m, 0);
        run_prompt(t.m, 0, t.ids, t.n);
        for (int i = 0; i < n_ids; i++) {
            bool right = true;
            read_logits(t.m, 0, t.logits);
            int best = 0;
            for (int j = 1; j < t.m->config.vocab; j++) if (t.logits[j] > t.logits[best]) best = j;
            judge_row(0, best, &score, &right);
            commit_all(t.m);
            if (tok_is_stop(&t.tok, best)) break;
            const StepRow row = { .token = best, .output = true };
            step(t.m, &(StepSeg){ .seq = 0, .kind = SEG_CHAIN, .n = 1, .rows = &row }, 1);
        }
    }
    const double share = (double)score.near_ties / score.ids;
    printf("greedy stories: %d of %d ids hang on a near tie (%.2f %%), loss %.4f\n", score.near_ties, score.ids,
           100 * share, score.loss / score.ids);
    if (t.at_least > 0)
        CHECK(share <= 0.04, "greedy stories: expected 4 %% near ties at most, got %.2f %%", 100 * share);
}

// ---- sampled texts --------------------------------------------------------------------------------------------------

// True: the last ids repeat a sequence, at least 4 times and at least 32 ids long.
static bool loops(const int32_t *ids, int n) {
    for (int period = 1; period <= 64; period++) {
        const int len = max_int(4 * period, 32);
        int same = 0;
        while (same < len && same + period < n && ids[n - 1 - same] == ids[n - 1 - same - period]) same++;
        if (same == len) return true;
    }
    return false;
}

static bool is_utf8(const TokText *text, bool cut) {   // cut: it may end inside a character
    for (size_t i = 0; i < text->n; ) {
        uint32_t cp;
        const int len = tok_read_utf8((const unsigned char *)text->s + i, text->n - i, &cp);
        if (len <= 0) return len < 0 && cut;
        i += (size_t)len;
    }
    return true;
}

static void texts(int n_texts, int n_ids) {
    static const char *heroes[] = { "a fox", "an owl", "a rabbit", "a girl", "a dragon", "a duck", "a mole", "a cow" };
    static const int32_t ring[32] = { 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7,
                                      7, 7, 7, 7, 8 };
    int32_t again[40];
    TokText half = { .s = (char[]){ "a\303" }, .n = 2 };
    for (int i = 0; i < 40; i++) again[i] = i % 2;
    int bad = 0, looping = 0, ended = 0, all = 0;
    CHECK(!loops(ring, 32) && loops(again, 40) && is_utf8(&half, true) && !is_utf8(&half, false),
          "texts: the judges of texts are wrong");
    for (int k = 0; k < n_texts; k++) {
        char question[80];
        TokText text = { 0 };
        TokIds said = { 0 };
        Session s;
        Event e = { 0 };
        const AnswerOptions o = { .n_predict = n_ids, .think_budget = -1,
                                  .sampling = { .seed = (uint64_t)k, .temperature = 1,
                                  .top_k = 64, .top_p = 0.95f, .repeat = 1 } };
        snprintf(question, sizeof question, "Tell me a story about %s.", heroes[k % 8]);
        start_text();
        add_question(question);
        init_session(&s, t.m, &t.tok, 0);
        if (!session_start(&s, &(Prompt){ .ids = t.ids, .n = t.n }, &o)) die("%s", s.err);
        while (e.kind != EVENT_END) {
            session_next(&s, &e);
            for (int i = 0; i < e.n_ids; i++) {
                const TokStr piece = tok_piece(&t.tok, e.ids[i], false);
                push_id(s.t, &said, e.ids[i]);
                if (!tok_text_append(&text, piece.s, piece.n)) die("out of memory");
            }
        }
        bad += !is_utf8(&text, e.end == END_LENGTH);
        looping += loops(said.ids, (int)said.n);
        ended += e.end == END_TURN;
        all += (int)said.n;
        tok_ids_free(&said);
        tok_text_free(&text);
        free_session(&s);
    }
    printf("texts: %d of %d are UTF-8, %d loop, %d end by themselves, %d ids\n", n_texts - bad, n_texts, looping, ended,
           all);
    if (t.at_least > 0) CHECK(!bad && !looping, "texts: %d are no UTF-8, %d loop", bad, looping);
}

static KvType kv_type(const char *name) {
    for (int i = KV_F32; i <= KV_TQ3; i++)
        if (!strcmp(name, kv_names[i])) return (KvType)i;
    die("%s: no such type of a cache", name);
}

int main(int argc, char **argv) {
    ModelOptions o = { .n_seqs = 1, .n_batch = N_BATCH, .n_logits = N_BATCH, .k_type = KV_F16, .v_type = KV_F16 };
    const char *model = NULL, *data = "tests/eval_mini.txt";
    int n_files = 0;
    t.at_least = 0.95;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--short")) t.is_short = true;
        else if (!strcmp(argv[i], "--at-least") && i + 1 < argc) t.at_least = atof(argv[++i]) / 100;
        else if (!strcmp(argv[i], "--kinds") && i + 1 < argc) t.kinds = argv[++i];
        else if (!strcmp(argv[i], "-ctk") && i + 1 < argc) o.k_type = o.v_type = kv_type(argv[++i]);
        else if (!strcmp(argv[i], "-ctv") && i + 1 < argc) o.v_type = kv_type(argv[++i]);
        else if (!strcmp(argv[i], "--kv-swa") && i + 1 < argc) o.ring_type = kv_type(argv[++i]);
        else if (!strcmp(argv[i], "--kv-tail") && i + 1 < argc) o.tail = atoi(argv[++i]);
        else if (!strcmp(argv[i], "--kv-layout") && i + 1 < argc) o.untied = !strcmp(argv[++i], "untied");
        else if (argv[i][0] == '-') die("%s: expected --short, --at-least, --kinds or a flag of the cache", argv[i]);
        else if (n_files++ == 0) model = argv[i];
        else data = argv[i];
    }
    if (!model) die("usage: eval_mini [--short] [--at-least PERCENT] MODEL.gguf [DATA]");
    read_data(data);
    t.m = alloc_or_die(1, sizeof *t.m);
    o.n_ctx = t.is_short ? 1536 : MAX_IDS;
    load_model(t.m, model, cpu_ops(), o, NULL);
    load_tokenizer(&t.tok, &t.m->gguf, t.m->config.vocab);
    t.logits = alloc_or_die((size_t)t.m->config.vocab, sizeof *t.logits);

    printf("%-24s %5s %5s  %7s  %16s  %8s  %8s\n", "kind", "items", "right", "share", "95 % interval", "loss",
           "near tie");
    const Section *hay = NULL;
    for (int i = 0; i < t.n_sections; i++) {
        if (!strncmp(t.sections[i].name, "exact ", 6) && wanted(t.sections[i].name + 6)) exact(&t.sections[i]);
        if (!strcmp(t.sections[i].name, "haystack")) hay = &t.sections[i];
    }
    if (!hay) die("%s: section [haystack]: missing", data);
    if (wanted("needles")) all_needles(hay);
    if (wanted("losses")) printf("\nheld-out documents: loss, nats per id\n");
    for (int i = 0; i < t.n_sections; i++)
        if (!strncmp(t.sections[i].name, "loss ", 5) && wanted("losses")) loss(&t.sections[i]);
    printf("\n");
    if (wanted("stories")) stories(t.is_short ? 2 : 8, t.is_short ? 80 : 260);
    if (wanted("texts")) texts(t.is_short ? 4 : 16, 400);
    free_model(t.m);
    return test_done("eval");
}
