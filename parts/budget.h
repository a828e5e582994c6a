/* budget.h - how much memory requests and their answers may take, and how many requests are prepared at once.
 *
 * A request is read, prepared (parsed, rendered, tokenized, its grammar compiled) on the thread of its connection, and
 * answered by the engine. Each of these has a part of the memory of its own, so that one cannot starve another: bodies
 * that are held, work on them, and answers with their prompts and grammars. What is not there is refused: one client
 * gets an error, and all others go on.
 *
 * Uses base.h. Begin with budget_set() and budget_work(). */
#ifndef BUDGET_H
#define BUDGET_H

#if defined USE_MICROHTTPD || defined TESTING
#include <sys/resource.h>

typedef enum { FOR_BODIES, FOR_WORK, FOR_ANSWERS, BUDGET_PARTS } BudgetPart;

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t  freed;             // work has ended
    size_t limit[BUDGET_PARTS], used[BUDGET_PARTS];                  // bytes
    int    working[2], most_working;   // threads that prepare small and large requests; the most of each
} Budget;

// A budget of this many bytes: a quarter for bodies, half for work, a quarter for answers. Small requests do not wait
// for large ones: at most half as many threads as there are processors prepare either.
static inline void budget_limit(Budget *b, size_t bytes) {
    pthread_mutex_lock(&b->lock);
    b->limit[FOR_BODIES] = b->limit[FOR_ANSWERS] = bytes / 4;
    b->limit[FOR_WORK] = bytes / 2;
    pthread_mutex_unlock(&b->lock);
}

static inline void budget_open(Budget *b, size_t bytes) {
    const long cores = sysconf(_SC_NPROCESSORS_ONLN);
    *b = (Budget){ .most_working = cores > 3 ? (int)cores / 2 : 1 };
    pthread_mutex_init(&b->lock, NULL);
    pthread_cond_init(&b->freed, NULL);
    budget_limit(b, bytes);
}

// Changes what the caller holds of a part from *held to n bytes. False: there is no room for more, and nothing changes.
static inline bool budget_set(Budget *b, BudgetPart part, size_t *held, size_t n) {
    pthread_mutex_lock(&b->lock);
    const size_t others = b->used[part] - *held;
    const bool ok = n <= *held || (n <= b->limit[part] && others <= b->limit[part] - n);
    if (ok) b->used[part] = others + n;
    if (ok) *held = n;
    pthread_mutex_unlock(&b->lock);
    return ok;
}

// Waits until there are n bytes for work and a thread may begin it, at most `seconds`. False: it may not.
static inline bool budget_work(Budget *b, size_t n, bool large, int seconds) {
    struct timespec until;
    bool ok, late = false;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += seconds;
    pthread_mutex_lock(&b->lock);
    for (;;) {
        ok = n <= b->limit[FOR_WORK] && b->used[FOR_WORK] <= b->limit[FOR_WORK] - n &&
             b->working[large] < b->most_working;
        if (ok || late || n > b->limit[FOR_WORK]) break;
        late = pthread_cond_timedwait(&b->freed, &b->lock, &until) != 0;
    }
    if (ok) b->used[FOR_WORK] += n;
    if (ok) b->working[large]++;
    pthread_mutex_unlock(&b->lock);
    return ok;
}

static inline void budget_rest(Budget *b, size_t n, bool large) {    // ends budget_work()
    pthread_mutex_lock(&b->lock);
    b->used[FOR_WORK] -= n;
    b->working[large]--;
    pthread_cond_broadcast(&b->freed);
    pthread_mutex_unlock(&b->lock);
}

static inline size_t budget_used(Budget *b) {          // bytes of all parts
    pthread_mutex_lock(&b->lock);
    const size_t n = b->used[FOR_BODIES] + b->used[FOR_WORK] + b->used[FOR_ANSWERS];
    pthread_mutex_unlock(&b->lock);
    return n;
}

// Bytes of address space that are left to this process (ulimit -v). SIZE_MAX: it has no limit.
static inline size_t address_space_left(void) {
    struct rlimit lim;
    unsigned long pages = 0;
    if (getrlimit(RLIMIT_AS, &lim) || lim.rlim_cur == RLIM_INFINITY) return SIZE_MAX;
    FILE *f = fopen("/proc/self/statm", "r");
    if (f && fscanf(f, "%lu", &pages) != 1) pages = 0;
    if (f) fclose(f);
    const size_t used = (size_t)pages * (size_t)sysconf(_SC_PAGESIZE);
    return used < lim.rlim_cur ? (size_t)lim.rlim_cur - used : 0;
}

#endif
#endif
