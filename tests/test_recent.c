/* test_recent.c - the memory of recent texts (parts/recent.h): the newest are found by their ids, and their number and
 * bytes are bounded. */
#define TESTING
#include "../gemma4.c"
#include "test.h"

static Recent r;

static void add(int i, const char *previous, TokStr text) {
    char id[32];
    snprintf(id, sizeof id, "id_%d", i);
    recent_add(&r, id, previous, text);
}

static bool holds(const char *id, const char *text) {
    const Kept *k = recent_find(&r, id);
    return text ? k && k->text.n == strlen(text) && (!k->text.n || !memcmp(k->text.s, text, k->text.n)) : !k;
}

int main(void) {
    char *large = calloc(RECENT_BYTES + 1, 1), name[70];
    CHECK(holds("id_0", NULL), "an empty memory holds nothing");
    add(0, "", (TokStr){ "a", 1 });
    add(1, "id_0", (TokStr){ "", 0 });
    CHECK(holds("id_0", "a") && holds("id_1", ""), "texts are found by their ids");
    CHECK(!strcmp(recent_find(&r, "id_1")->previous, "id_0"), "with the id that belongs to them");
    add(0, "", (TokStr){ "b", 1 });
    CHECK(holds("id_0", "b"), "the newer of two texts with an id is found");
    for (int i = 2; i <= RECENT; i++) add(i, "", (TokStr){ "xy", 2 });
    CHECK(r.end - r.first == RECENT && r.bytes == 1 + 2 * (RECENT - 1), "at most RECENT texts: %zu, %zu bytes",
          r.end - r.first, r.bytes);
    CHECK(holds("id_1", NULL) && holds("id_0", "b") && holds("id_2", "xy"), "the oldest ones are gone");
    add(9000, "", (TokStr){ large, RECENT_BYTES - 3 });
    CHECK(r.end - r.first == 2 && r.bytes == RECENT_BYTES - 1, "at most RECENT_BYTES bytes: %zu texts, %zu bytes",
          r.end - r.first, r.bytes);
    add(9001, "", (TokStr){ large, RECENT_BYTES + 1 });
    CHECK(holds("id_9001", NULL) && recent_find(&r, "id_9000"), "a text that is too long is not kept, and drops none");
    memset(name, 'n', 69);
    name[69] = 0;
    recent_add(&r, name, "", (TokStr){ "a", 1 });
    CHECK(holds(name, NULL), "nor is one with such an id");
    recent_free(&r);
    free(large);
    return test_done("recent");
}
