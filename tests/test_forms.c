/* test_forms.c - constrained answers in sessions: they match the grammar with any speculation method and with other
 * sessions.
 *
 *   test_forms [mtp] [dflash] [e] pairs of models to test; default: all
 *
 * A schema, a grammar, forced calls, thoughts before them and a full context: the ids with drafts equal those without,
 * greedy and sampled, with prompt lookup, drafters and their trees. A finished answer matches the grammar and satisfies
 * the schema. After it, an unconstrained answer is the same as in a session that never had a grammar. Sessions with and
 * without a grammar in one step write the same as alone. A grammar that fails ends only its own answer. test_grammar
 * tests what grammars accept, test_ahead steps that are issued ahead. Run from the top of the repository, where the
 * models are. */
#define TESTING
#include "../gemma4.c"
#include "test.h"
#include "pairs.h"

enum { MOST_IDS = 160, N_METHODS = 4, N_TOGETHER = 4 };

static const char schema[] =
    "{\"type\":\"object\",\"properties\":{\"name\":{\"type\":\"string\",\"maxLength\":9},"
    "\"kind\":{\"enum\":[\"fox\",\"bird\"]},\"age\":{\"type\":\"integer\",\"minimum\":0,\"maximum\":99},"
    "\"seen\":{\"type\":\"array\",\"items\":{\"type\":\"boolean\"},"
    "\"minItems\":1,\"maxItems\":2}},\"required\":[\"name\",\"kind\",\"age\",\"seen\"],\"additionalProperties\":false}";
static const char gbnf[] = "root ::= \"The \" animal (\", the \" animal){2,3} \".\"\n"
                           "animal ::= \"fox\" | \"old \" \"cat\" | [a-c]{2,3}";
static const char tools[] =
    "[{\"type\":\"function\",\"function\":{\"name\":\"get_weather\",\"parameters\":{\"type\":\"object\","
    "\"properties\":{\"city\":{\"enum\":[\"Paris\",\"Rome\"]},\"days\":{\"type\":\"integer\",\"minimum\":1,"
    "\"maximum\":9}},\"required\":[\"city\",\"days\"]}}}]";
static const char text[] = "root ::= [a-zA-Z ,.!'\\n]{1,70}";             // similar to the model's own text
static const char shifting[] = "root ::= (\"fox \" | \"bird \" | \"old cat \"){30} \".\"";
// x matches in too many ways. Prompt lookup drafts it, the model writes something else.
#define TOO_MANY "x x x x x x x x\nx ::= y y y y y y y y\ny ::= z z z z z z z z\n" \
                 "z ::= w w w w w w w w\nw ::= \"a\"? \"a\"?"
static const char failing[] = "root ::= \"The fox and the bird \" " TOO_MANY;
static const char passing[] = "root ::= \"Once upon\" (\" a time.\" | \" night \" v)\nv ::= " TOO_MANY;

typedef enum { FREE, BY_SCHEMA, BY_GRAMMAR, BY_TOOLS, BY_EITHER, BY_TEXT, BY_SHIFTING, BY_PASSING, BY_FAILING,
               N_FORMS } Form;
static const char *const forms[] = { "free", "schema", "grammar", "forced call", "schema or call", "text", "shifted",
                                     "past a failure", "failing" };

typedef enum { NO_THOUGHT, MAY_THINK, OPEN_THOUGHT } Thought;
static const char *const thoughts[] = { "no thought", "may think", "in a thought" };

typedef struct {
    Form    form;
    Thought thought;
    int     budget, n;        // thinking budget; tokens, -1: to the end
    float   temperature;
    Drafting drafting;
} Ask;

typedef struct {
    int32_t ids[MOST_IDS];
    int     n, n_calls, shifts;
    EndReason end;
    char    text[1024], thought[1024], call[256], err[512];
    DraftCount drafts;
} Answer;

static Tokenizer tok;
static GrammarVocab vocab;

static TokStr str(const char *s) { return (TokStr){ s, strlen(s) }; }

static bool make_form(Grammar *g, Form form) {         // false: no grammar, or it failed
    const TokStr none = { NULL, 0 };
    switch (form) {
    case BY_SCHEMA: return grammar_from_schema(g, &vocab, str(schema), false);
    case BY_GRAMMAR: return grammar_from_gbnf(g, &vocab, str(gbnf));
    case BY_TOOLS: return grammar_from_tools(g, &vocab, str(tools), "get_weather", false, none, false);
    case BY_EITHER: return grammar_from_tools(g, &vocab, str(tools), NULL, true, str(schema), false);
    case BY_TEXT: return grammar_from_gbnf(g, &vocab, str(text));
    case BY_SHIFTING: return grammar_from_gbnf(g, &vocab, str(shifting));
    case BY_PASSING: return grammar_from_gbnf(g, &vocab, str(passing));
    case BY_FAILING: return grammar_from_gbnf(g, &vocab, str(failing));
    default: return false;
    }
}

static TokIds prompt_of(const Ask *a) {
    TokIds ids = { 0 };
    TokText messages = { 0 };
    const char *said = a->form == BY_TOOLS || a->form == BY_EITHER ? "What is the weather in Paris?" :
        a->thought != NO_THOUGHT ? "What is 22 minus 2?" :
        a->form == BY_SHIFTING || a->form == BY_TEXT || a->form == FREE ? "Tell me a story." :
        a->form == BY_PASSING ? "Once upon night 1.\nOnce upon night 2." :
        "The old cat, the fox, the old cat, the fox: {\"name\": \"Fox\", \"kind\": \"fox\", "
        "\"age\": 9, \"seen\": [true, true]}";
    TokChat chat = { .add_cue = true, .think = a->thought != NO_THOUGHT };
    if (tok_add_message(&messages, "user", str(said)) < 0) abort();
    chat.messages = (TokStr){ messages.s, messages.n };
    if (a->form == BY_TOOLS || a->form == BY_EITHER) chat.tools = str(tools);
    if (tok_chat(&tok, &chat, &ids, NULL) < 0) die("%s", tok.err);
    if (a->thought == OPEN_THOUGHT && tok_encode(&tok, "<|channel>thought\n", 18, TOK_SPECIAL, &ids) < 0)
        die("%s", tok.err);
    tok_text_free(&messages);
    return ids;
}

static void begin(Session *s, const Ask *a, Grammar *g) {
    TokIds ids = prompt_of(a);
    const AnswerOptions o = { .n_predict = a->n < 0 ? MOST_IDS : a->n, .grammar = a->form == FREE ? NULL : g,
        .may_think = a->thought != NO_THOUGHT, .think_budget = a->budget, .shift = a->form == BY_SHIFTING,
        .drafting = a->drafting,
        .sampling = { .seed = 11, .temperature = a->temperature, .top_k = 64, .top_p = 0.95f, .repeat = 1 } };
    if (a->form != FREE) CHECK(make_form(g, a->form), "%s: %s", forms[a->form], g->err);
    if (!session_start(s, &(Prompt){ .ids = ids.ids, .n = (int)ids.n, .n_head = 4 }, &o)) die("%s", s->err);
    tok_ids_free(&ids);
}

static bool took(Session *s, const Event *e, Answer *out) {            // false: the answer ended
    for (int i = 0; e->kind == EVENT_TOKEN && i < e->n_ids && out->n < MOST_IDS; i++) out->ids[out->n++] = e->ids[i];
    if (e->kind == EVENT_TOKEN || e->kind == EVENT_END) {
        strncat(out->text, e->content.s ? e->content.s : "", e->content.n);
        strncat(out->thought, e->thought.s ? e->thought.s : "", e->thought.n);
    }
    if (e->kind != EVENT_END) return true;
    out->end = e->end;
    out->drafts = s->turn.drafts;
    out->shifts = s->turn.shifts;
    out->n_calls = s->reply.n_calls;
    const TokStr call = s->reply.n_calls ? s->reply.calls[0].arguments : (TokStr){ "", 0 };
    snprintf(out->call, sizeof out->call, "%.*s", (int)call.n, call.s);
    if (e->error) snprintf(out->err, sizeof out->err, "%s", e->error);
    CHECK((int)s->held.n == s->m->len[s->seq], "%zu tokens held, %d in the cache", s->held.n, s->m->len[s->seq]);
    return false;
}

static Answer tell(Session *s, const Ask *a) {
    Answer out = { 0 };
    Grammar g;
    Event e;
    begin(s, a, &g);
    do session_next(s, &e);
    while (took(s, &e, &out));
    if (a->form != FREE) grammar_free(&g);
    return out;
}

// ---- checks of an answer --------------------------------------------------------------------------------------------

static bool accepted(const Ask *a, const Answer *got) {                // its ids, by a separate grammar
    Grammar g;
    static const GrammarStart how[] = { START_ANSWER, START_MAY_THINK, START_THINKING };         // by Thought
    const bool made = make_form(&g, a->form);
    GrammarState s = made ? grammar_start(&g, how[a->thought]) : 0;
    bool ok = made;
    for (int i = 0; ok && i < got->n; i++) ok = grammar_advance(&g, &s, got->ids[i]);
    ok = ok && (got->end == END_LENGTH || g.stack_sets[s].complete);
    grammar_free(&g);
    return ok;
}

static bool is_number_to(const GgufJson *v, int most) {
    return v->type == GGUF_J_NUMBER && v->n <= 2 && memchr("0123456789", v->s[0], 10) && atoi(v->s) <= most;
}

static bool satisfies(const char *text) {              // the schema
    GgufJson root, v, list, item;
    size_t at;
    const char *err;
    char name[64];
    int n = 0, n_items = 0, chars = 0;
    if (gguf_json_parse(text, strlen(text), &root, &at, &err) < 0 || root.type != GGUF_J_OBJECT) return false;
    for (GgufJson rest = root; gguf_json_next(&rest, &v, &item); ) n++;
    if (n != 4 || !gguf_json_get(&root, "name", &v) || v.type != GGUF_J_STRING || v.n > sizeof name) return false;
    for (size_t i = 0, len = gguf_json_string(&v, name); i < len; i++) chars += ((unsigned char)name[i] & 0xC0) != 0x80;
    if (chars > 9 || !gguf_json_get(&root, "kind", &v) || (!gguf_json_is(&v, "fox") && !gguf_json_is(&v, "bird")))
        return false;
    if (!gguf_json_get(&root, "age", &v) || !is_number_to(&v, 99)) return false;
    if (!gguf_json_get(&root, "seen", &list) || list.type != GGUF_J_ARRAY) return false;
    for (; gguf_json_next(&list, NULL, &item); n_items++)
        if (item.type != GGUF_J_TRUE && item.type != GGUF_J_FALSE) return false;
    return n_items >= 1 && n_items <= 2;
}

static bool is_call(const Answer *got) {
    GgufJson root, v;
    size_t at;
    const char *err;
    return got->n_calls >= 1 && gguf_json_parse(got->call, strlen(got->call), &root, &at, &err) == 0 &&
           gguf_json_get(&root, "city", &v) && (gguf_json_is(&v, "Paris") || gguf_json_is(&v, "Rome")) &&
           gguf_json_get(&root, "days", &v) && is_number_to(&v, 9);
}

static void check_form(const Ask *a, const Answer *got, const char *where) {
    CHECK(accepted(a, got), "%s: the grammar does not accept '%s'", where, got->text);
    if (a->n >= 0) {
        CHECK(got->end == END_LENGTH && got->n == a->n, "%s: %d ids, ends with %s", where, got->n, end_text[got->end]);
        return;
    }
    const bool calls = a->form == BY_TOOLS || (a->form == BY_EITHER && got->n_calls);
    CHECK(got->end == (calls ? END_CALLS : END_TURN), "%s: ends with %s: '%s'", where, end_text[got->end], got->text);
    if (calls)
        CHECK(is_call(got) && !*got->text && (a->form != BY_TOOLS || got->n_calls == 1),
              "%s: %d calls, '%s', text '%s'", where, got->n_calls, got->call, got->text);
    else if (a->form == BY_SCHEMA || a->form == BY_EITHER)
        CHECK(satisfies(got->text), "%s: '%s' does not satisfy it", where, got->text);
    else if (a->form != BY_TEXT) CHECK(got->text[strlen(got->text) - 1] == '.', "%s: '%s'", where, got->text);
}

static void compare(const Answer *got, const Answer *want, const char *where, const char *who) {
    int same = 0;
    while (same < got->n && same < want->n && got->ids[same] == want->ids[same]) same++;
    CHECK(same == got->n && same == want->n, "%s, %s: %d ids, expected %d, the first %d the same", where, who, got->n,
          want->n, same);
    CHECK(got->end == want->end && got->shifts == want->shifts, "%s, %s: ends with %s, expected %s", where, who,
          end_text[got->end], end_text[want->end]);
    CHECK(!strcmp(got->text, want->text) && !strcmp(got->thought, want->thought) && !strcmp(got->call, want->call) &&
          !strcmp(got->err, want->err), "%s, %s: got '%s' (%s), expected '%s' (%s)", where, who, got->text, got->err,
          want->text, want->err);
}

// ---- one answer, by every method ------------------------------------------------------------------------------------

static const struct { const char *who; Drafting drafting; } methods[N_METHODS] = {
    { "ngram", { .kind = SPEC_NGRAM, .n_max = 6 } },
    { "a drafter", { .kind = SPEC_MTP, .n_max = 3 } },
    { "a tree", { .kind = SPEC_MTP, .n_max = 3, .tree = 12 } },
    { "auto", { .kind = SPEC_AUTO, .n_max = 4 } },
};
static DraftCount sums[N_METHODS];

static const Ask asks[] = {
    { .form = BY_SCHEMA, .budget = -1, .n = -1 },
    { .form = BY_TEXT, .budget = -1, .n = -1, .temperature = 1 },
    { .form = BY_GRAMMAR, .budget = -1, .n = -1 },
    { .form = BY_TOOLS, .budget = -1, .n = -1, .temperature = 1 },
    { .form = BY_TEXT, .budget = -1, .n = -1 },
    { .form = BY_SCHEMA, .thought = MAY_THINK, .budget = 6, .n = -1, .temperature = 1 },
    { .form = BY_EITHER, .budget = -1, .n = -1 },
    { .form = BY_TOOLS, .thought = OPEN_THOUGHT, .budget = 2, .n = -1 },
    { .form = BY_SCHEMA, .budget = -1, .n = 7, .temperature = 1 },
    { .form = BY_SHIFTING, .budget = -1, .n = -1, .temperature = 1 },
    { .form = BY_PASSING, .budget = -1, .n = -1 },
    { .form = BY_FAILING, .budget = -1, .n = -1 },
};

// With an MTP drafter: prompt lookup, trees and auto, alternately; with a DFlash drafter: chains and trees.
static bool turn_of(const Model *m, int k, int number) {
    if (m->drafter->kind == DRAFTER_DFLASH) return k == 1 + number / 2 % 2;
    return m->drafter->kind == DRAFTER_NONE || k == 1 || k / 2 + k % 2 == number % 3;
}

static void one_ask(Session *plain, Session *s, int number, const char *name) {
    const Model *m = s->m;
    const Ask *ask = &asks[number];
    const Ask second = { .budget = -1, .n = 5, .temperature = ask->temperature };
    Ask a = *ask;
    char where[120];
    snprintf(where, sizeof where, "%s, %s, %s, %s", name, forms[a.form], thoughts[a.thought],
             a.temperature > 0 ? "sampled" : "greedy");
    session_forget(plain);
    const Answer after = tell(plain, &second);         // a session that never had a grammar
    session_forget(plain);
    const Answer want = tell(plain, &a);
    const Answer next = tell(plain, &second);
    compare(&next, &after, where, "no grammar after it");
    if (a.form == BY_FAILING)
        CHECK(want.end == END_ERROR && strstr(want.err, "too ambiguous") && !strchr(want.err, '\n') && want.n > 2 &&
              !strncmp(want.text, "The fox and the bird ", strlen(want.text)), "%s: '%s', ends with %s: %s", where,
              want.text, end_text[want.end], want.err);
    else check_form(&a, &want, where);
    CHECK(a.form != BY_PASSING || !strcmp(want.text, "Once upon a time."), "%s: '%s'", where, want.text);
    CHECK(a.form != BY_SHIFTING || want.shifts > 0, "%s: no shift", where);
    CHECK(a.thought == NO_THOUGHT || *want.thought, "%s: no thought", where);
    for (int k = 0; k < N_METHODS; k++) {
        a.drafting = methods[k].drafting;
        if (a.drafting.kind == SPEC_MTP) a.drafting.kind = drafter_of(m);
        if (a.drafting.kind == SPEC_OFF || !turn_of(m, k, number)) continue;
        session_forget(s);
        const Answer got = tell(s, &a);
        compare(&got, &want, where, methods[k].who);
        sums[k].drafted += got.drafts.drafted;
        sums[k].accepted += got.drafts.accepted;
        if (k == 1) continue;
        const Answer more = tell(s, &second);
        compare(&more, &after, where, "no grammar after one with drafts");
    }
}

// ---- several sessions -----------------------------------------------------------------------------------------------

// Sessions that share steps; the last one starts while the others answer.
static void with_others(Session *s, int n, const char *name) {
    const SpecKind drafter = s->m->drafter->kind == DRAFTER_NONE ? SPEC_NGRAM : drafter_of(s->m);
    Ask ask[N_TOGETHER] = {
        { .form = BY_SCHEMA, .budget = -1, .n = 40, .temperature = 1 },
        { .form = FREE, .budget = -1, .n = 30 },
        { .form = BY_TOOLS, .budget = -1, .n = 40 },
        { .form = BY_GRAMMAR, .budget = -1, .n = 40, .temperature = 1 },
    };
    const Drafting drafting[N_TOGETHER] = { { .kind = SPEC_NGRAM, .n_max = 6 }, { .kind = drafter, .n_max = 4 },
                                         { .kind = SPEC_OFF }, { .kind = drafter, .n_max = 3 } };
    Answer alone[N_TOGETHER] = { 0 }, together[N_TOGETHER] = { 0 };
    Grammar g[N_TOGETHER];
    bool runs[N_TOGETHER] = { false };
    for (int k = 0; k < n; k++) {
        session_forget(&s[k]);
        alone[k] = tell(&s[k], &ask[k]);
        ask[k].drafting = drafting[k];
    }
    for (int k = 0; k < n; k++) session_forget(&s[k]);
    for (int round = 0, n_runs = 1; n_runs; round++) {
        Session *some[N_TOGETHER];
        Event e[N_TOGETHER];
        int who[N_TOGETHER];
        n_runs = 0;
        for (int k = 0; k < n; k++) {
            if (round == (k == n - 1 ? 6 : 0)) {
                begin(&s[k], &ask[k], &g[k]);
                runs[k] = true;
            }
            if (runs[k]) {
                who[n_runs] = k;
                some[n_runs++] = &s[k];
            }
        }
        if (n_runs) sessions_next(some, n_runs, e);
        for (int i = 0; i < n_runs; i++) runs[who[i]] = took(some[i], &e[i], &together[who[i]]);
    }
    for (int k = 0; k < n; k++) {
        compare(&together[k], &alone[k], name, k == 1 ? "with others, no grammar" : "with others");
        if (ask[k].form != FREE) grammar_free(&g[k]);
    }
}

static void one_pair(const char *path, const char *drafter) {
    const ModelOptions o = { .drafter = drafter, .draft_width = DRAFT_WIDTH, .n_ctx = 320, .n_seqs = N_TOGETHER,
                             .n_batch = 256, .n_logits = STEP_ROWS, .k_type = KV_F16, .v_type = KV_F16 };
    ModelOptions small = o;
    const char *name = strrchr(path, '/') + 1;
    Session s[N_TOGETHER], t[2];
    small.n_ctx = 40;
    small.n_seqs = 2;
    Model *m = open_pair(path, o), *tight = open_pair(path, small);
    load_tokenizer(&tok, &m->gguf, m->config.vocab);
    if (!grammar_vocab_init(&vocab, &tok)) abort();
    for (int k = 0; k < N_TOGETHER; k++) init_session(&s[k], m, &tok, k);
    for (int k = 0; k < 2; k++) init_session(&t[k], tight, &tok, k);
    for (int i = 0; i < (int)(sizeof asks / sizeof *asks); i++) {
        const bool full = asks[i].form == BY_SHIFTING;
        if (drafter && m->drafter->kind == DRAFTER_DFLASH && i % 2) continue;            // tested with the other pair
        one_ask(full ? &t[0] : &s[0], full ? &t[1] : &s[1], i, name);
    }
    if (m->drafter->kind != DRAFTER_DFLASH) with_others(s, N_TOGETHER, name);
    for (int k = 0; k < N_TOGETHER; k++) free_session(&s[k]);
    for (int k = 0; k < 2; k++) free_session(&t[k]);
    grammar_vocab_free(&vocab);
    tok_free(&tok);
    close_model(m);
    close_model(tight);
}

int main(int argc, char **argv) {
    static const struct { const char *name, *model, *drafter; } pairs[] = {
        { "mtp", "models/gemma4-mini-q8_0.gguf", "models/gemma4-mini-mtp-q8_0.gguf" },
        { "dflash", "models/gemma4-mini-q8_0.gguf", "models/gemma4-mini-dflash-q8_0.gguf" },
        { "e", "models/gemma4-mini-e-q8_0.gguf", NULL },
    };
    start_threads(1);
    for (int i = 0; i < 3; i++) {
        bool wanted = argc < 2;
        for (int k = 1; k < argc; k++) wanted |= !strcmp(argv[k], pairs[i].name);
        if (wanted) one_pair(pairs[i].model, pairs[i].drafter);
    }
    for (int k = 0; k < 3 && argc < 2; k++) {          // auto may not draft on every machine
        CHECK(sums[k].drafted > 0 && sums[k].accepted > 0, "%s: %d of %d drafts were accepted", methods[k].who,
              sums[k].accepted, sums[k].drafted);
        printf("# %s: %d of %d drafts accepted\n", methods[k].who, sums[k].accepted, sums[k].drafted);
    }
    return test_done("forms");
}
