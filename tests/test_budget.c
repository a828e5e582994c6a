/* test_budget.c - the memory of requests (parts/budget.h): parts that cannot starve each other, work that waits for its
 * turn, and sums that are right at the end. */
#define TESTING
#include "../gemma4.c"
#include "test.h"

enum { MIB = 1 << 20 };

static Budget b;
static atomic_int n_worked;

static void *work(void *bytes) {
    const size_t n = *(size_t *)bytes;
    if (budget_work(&b, n, true, 60)) {
        n_worked++;
        budget_rest(&b, n, true);
    }
    return NULL;
}

static void test_parts(void) {
    size_t one = 0, two = 0, answer = 0;
    budget_open(&b, 40 * MIB);                         // 10 for bodies, 20 for work, 10 for answers
    CHECK(budget_set(&b, FOR_BODIES, &one, 6 * MIB) && one == 6 * MIB, "a body of 6 of 10 MiB");
    CHECK(!budget_set(&b, FOR_BODIES, &two, 5 * MIB) && two == 0, "another of 5: refused, and nothing changes");
    CHECK(budget_set(&b, FOR_BODIES, &two, 4 * MIB), "of 4: there is room");
    CHECK(!budget_set(&b, FOR_BODIES, &one, 6 * MIB + 1) && one == 6 * MIB, "the first may not grow");
    CHECK(budget_set(&b, FOR_ANSWERS, &answer, 10 * MIB), "bodies take nothing from answers");
    CHECK(!budget_work(&b, 20 * MIB + 1, false, 0), "more work than there may ever be");
    CHECK(!budget_set(&b, FOR_ANSWERS, &answer, SIZE_MAX) && answer == 10 * MIB, "a size that wraps around");
    CHECK(budget_set(&b, FOR_BODIES, &one, 1 * MIB) && budget_set(&b, FOR_BODIES, &two, 9 * MIB), "what one returns, another gets");
    CHECK(budget_used(&b) == 20 * MIB, "used: %zu bytes, want %d", budget_used(&b), 20 * MIB);
    budget_set(&b, FOR_BODIES, &one, 0);
    budget_set(&b, FOR_BODIES, &two, 0);
    budget_set(&b, FOR_ANSWERS, &answer, 0);
    CHECK(budget_used(&b) == 0, "at the end: %zu bytes", budget_used(&b));
}

static void test_work(void) {
    pthread_t threads[8];
    size_t n = 15 * MIB;                               // two do not fit
    budget_open(&b, 40 * MIB);
    CHECK(budget_work(&b, n, true, 0), "the first begins");
    CHECK(!budget_work(&b, n, true, 0), "the second has no room");
    CHECK(budget_work(&b, MIB, false, 0), "a small one goes on");
    for (int i = 0; i < 8; i++) if (pthread_create(&threads[i], NULL, work, &n)) abort();
    usleep(20000);
    CHECK(n_worked == 0, "%d worked before there was room", n_worked);
    budget_rest(&b, n, true);
    for (int i = 0; i < 8; i++) pthread_join(threads[i], NULL);
    CHECK(n_worked == 8, "%d of 8 worked", n_worked);
    budget_rest(&b, MIB, false);
    for (int i = 0; i < b.most_working; i++) CHECK(budget_work(&b, 1, true, 0), "thread %d of %d", i, b.most_working);
    CHECK(!budget_work(&b, 1, true, 0), "more than %d threads work", b.most_working);
    CHECK(budget_work(&b, 1, false, 0), "small requests do not wait for large ones");
    for (int i = 0; i < b.most_working; i++) budget_rest(&b, 1, true);
    budget_rest(&b, 1, false);
    CHECK(budget_used(&b) == 0 && !b.working[0] && !b.working[1], "at the end: %zu bytes, %d, %d", budget_used(&b), b.working[0],
          b.working[1]);
}

int main(void) {
    test_parts();
    test_work();
    return test_done("budget");
}
