/* fuzz_server.c - bodies of requests from clients. The first byte selects the endpoint and the call that the server
 * remembers; bit 4 of it, whether the model sees images. The rest is the body. It becomes a prompt of valid ids, or is refused with status 400 and a reason of
 * one line. Needs libmicrohttpd; without it this target does nothing. */
#define TESTING
#include "../gemma4.c"
#include "fuzz.h"

#ifndef USE_MICROHTTPD
int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) { return (void)bytes, (void)size, 0; }
#else
static Tokenizer t;                     // the small vocabulary
static Model m;
static Server srv;
static Vision tower = { .max_tokens = 1120, .usual_tokens = 70 };

static void set_up(void) {
    make_built_in(&t);
    m.config.vocab = t.n_tokens;
    m.options.n_ctx = 1 << 20;
    m.options.n_seqs = 1;
    m.tower_hash = 5;
    t.image_open = t.n_tokens - 1;                     // this vocabulary lacks these
    t.image_close = t.n_tokens - 2;
    srv = (Server){ .m = &m, .t = &t, .o = { .max_queue = 1, .timeout = 1, .n_predict = -1, .think_budget = -1 },
                    .ready = true, .lock = PTHREAD_MUTEX_INITIALIZER, .replays = alloc_or_die(REPLAYS, sizeof(Replay)) };
    NEED(grammar_vocab_init(&srv.vocab, &t));
    budget_open(&srv.budget, (size_t)4 << 30);
    recent_add(&srv.items, "r", "", str("{\"type\":\"message\",\"role\":\"assistant\",\"content\":\"a\"}"));
    recent_add(&srv.responses, "resp_w", "", str("{\"role\":\"user\",\"content\":\"a\"}"));
    recent_add(&srv.responses, "resp_x", "resp_w", str("{\"type\":\"item_reference\",\"id\":\"r\"},{\"role\":\"user\"}"));
}

// Stores the call "i": the model called f with the argument a, written with a space or without.
static void write_call(bool space) {
    TokIds *ids = &srv.replays[0].ids;
    ids->n = 0;
    strcpy(srv.replays[0].id, "i");
    NEED(tok_push_id(&t, ids, t.call_open) == 0 && tok_encode(&t, space ? "call:f{a: 1}" : "call:f{a:1}", space ? 12 : 11,
                                                            TOK_PLAIN, ids) == 0 &&
         tok_push_id(&t, ids, t.call_close) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    static const Api *const apis[] = { &chat_api, &plain_api, &messages_api, &responses_api,
                                       &ollama_chat_api, &ollama_generate_api, &ollama_raw_api, &chat_api };
    if (!t.n_tokens) set_up();
    if (!size) return 0;
    write_call(bytes[0] & 4);
    srv.sees = bytes[0] & 16;
    m.vision = srv.sees ? &tower : NULL;
    const Api *api = apis[(bytes[0] & 3) + (bytes[0] & 8 ? 4 : 0)];
    Request r;
    Exchange *x = alloc_or_die(1, sizeof *x);
    *x = (Exchange){ .srv = &srv, .t = t };
    append(&x->body, (const char *)bytes + 1, size - 1);
    NEED(add_choice(x));
    if (read_question(x, api, &r) && add_answers(x, &r) && decode_pictures(x)) {
        NEED(!x->fault.status && x->n_choices >= 1 && x->n_choices <= MAX_CHOICES);
        for (int k = 0; k < x->n_choices; k++) {
            const Job *job = x->choices[k].job;
            NEED(job->ids.n > 0 && job->checkpoint_at >= 0 && (size_t)job->checkpoint_at <= job->ids.n && job->n_top <= MAX_TOP);
            const PromptPictures *p = &x->choices->job->pictures;
            find_pictures(&job->ids, p->places, p->n);
            for (size_t i = 0, at = 0; i < job->ids.n; i++) {
                while (at < (size_t)p->n && i >= (size_t)(p->places[at].first + p->places[at].n)) at++;
                const bool soft = at < (size_t)p->n && i >= (size_t)p->places[at].first;
                NEED(job->ids.ids[i] < t.n_tokens && (soft ? job->ids.ids[i] < -1 : job->ids.ids[i] >= 0));
            }
        }
    } else {
        NEED(x->fault.status == 400 && *x->fault.text && !strchr(x->fault.text, '\n'));
    }
    for (int k = 0; k < x->n_choices; k++) job_drop(x->choices[k].job);
    exchange_free(x);
    return 0;
}
#endif
