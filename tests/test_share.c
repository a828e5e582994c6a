/* test_share.c - how much of a long prompt the server runs together with answers, with a simulated clock: rounds with
 * some of its rows, or with some layers of a chunk, take at most three times as long as rounds without, but every
 * prompt makes progress.
 *
 * A machine is given by the time of a step of n rows, and by how much longer a row takes after more tokens. -v prints
 * the table. */
#define TESTING
#include "../gemma4.c"
#include "test.h"

#define N_OF(list) ((int)(sizeof (list) / sizeof *(list)))

enum { N_PROMPT = 65536, N_ANSWERS = 2 };

typedef struct {
    const char *name;
    double      rows[7][2];   // rows of a step and its time in ms; linear between them and after the last
    double      deeper;       // ms that a row takes longer after N_PROMPT tokens
    int         most;         // --chunk
    bool        floored;      // even SHARE_LEAST rows take too long
} Simulated;

// The first two as measured, in ms.
static const Simulated machines[] = {
    { "26B, H100", { { 1, 2.05 }, { 2, 3.19 }, { 4, 3.55 }, { 8, 4.45 }, { 16, 6.77 }, { 32, 9.79 }, { 64, 16.3 } },
      0.01, 64, false },
    { "31B, H100", { { 1, 7.8 }, { 4, 9.93 }, { 8, 10.75 }, { 16, 15.2 }, { 32, 24.7 }, { 48, 41 }, { 64, 58.6 } },
      0.02, 64, false },
    { "a processor", { { 1, 10 }, { 8, 17 }, { 64, 90 }, { 512, 600 } }, 0.1, 512, false },
    { "rows one by one", { { 1, 1 }, { 64, 64 } }, 1, 512, true },
    { "rows for nothing", { { 1, 10 }, { 512, 11 } }, 0, 512, false },
};

static int compare_doubles(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double takes(const Simulated *m, int rows, int prompt, int depth) {
    int i = 0;
    while (i < N_OF(m->rows) - 2 && m->rows[i + 2][0] > 0 && rows > m->rows[i + 1][0]) i++;
    const double *a = m->rows[i], *b = m->rows[i + 1];
    return a[1] + (rows - a[0]) * (b[1] - a[1]) / (b[0] - a[0]) + prompt * m->deeper * depth / N_PROMPT;
}

// Runs a prompt together with answers. Half-way the machine becomes `slower` times slower; a fraction `noise` of a
// round's time is random, and every 50th round takes ten times as long.
static void test_machine(const Simulated *m, double slower, double noise, bool tell) {
    const int least = min_int(SHARE_LEAST, m->most);
    Share s = share_of(least, m->most);
    int done = 0, rounds = 0, held = 0, over = 0, fewest = m->most, most = 0, waits = 0, longest = 0;
    double sum = 0, spent = 0;
    bool fits = true;
    srand(1);
    while (done < N_PROMPT) {
        const bool with = !share_looks(&s);
        const double pace = done > N_PROMPT / 2 ? slower : 1, chance = 1 + noise * (2.0 * rand() / RAND_MAX - 1);
        const int rows = (int)s.amount;
        const double plain = pace * takes(m, N_ANSWERS, 0, 0);
        const double exact = with ? pace * takes(m, N_ANSWERS + rows, rows, done) : plain;
        waits = with ? 0 : waits + 1;
        longest = max_int(longest, waits);
        if (with && rows > SHARE_LEAST) over += exact > 3.3 * plain;
        if (with)
            sum += exact / plain, rounds++, done += rows, fewest = min_int(fewest, rows), most = max_int(most, rows);
        else held++;
        spent += exact;
        share_learn(&s, with ? rows : 0, exact * chance * (noise > 0 && (rounds + held) % 50 == 49 ? 10 : 1));
        fits = fits && s.amount >= least && s.amount <= m->most;
    }
    const double mean = sum / rounds;
    if (tell)
        printf("%-18s x%.1f +-%.2f: %4d to %4d rows, a round %.2f of a plain one, %.2f %% over, %.0f rows/s\n", m->name,
               slower, noise, fewest, most, mean, 100.0 * over / rounds, 1e3 * N_PROMPT / spent);
    CHECK(fits, "%s: rows from %d to %d", m->name, fewest, most);
    CHECK(longest <= 1, "%s: the prompt waits %d rounds", m->name, longest);
    CHECK(over <= 0.06 * rounds + 2, "%s: %d of %d rounds take too long", m->name, over, rounds);
    CHECK(m->floored ? most == SHARE_LEAST : most > min_int(SHARE_LEAST, m->most - 1), "%s: at most %d rows", m->name,
          most);
    CHECK(m->floored || mean >= 2 || most == m->most, "%s: a round takes %.2f of a plain one only", m->name, mean);
    CHECK(held <= rounds / SHARE_ROUNDS + 2, "%s: %d of %d rounds go without", m->name, held, rounds);
}

// The same with some layers of a chunk at a time: one layer in six takes `global` times as long and counts as `told`
// times as many multiplications.
static void test_layers(const char *name, double plain, double layer, double global, double told, bool tell) {
    enum { LAYERS = 30, CHUNKS = 100 };
    Share s = share_of(1, INFINITY);
    double times[CHUNKS * LAYERS];
    int n = 0, over = 0;
    for (int chunk = 0; chunk < CHUNKS; chunk++)
        for (int l = 0; l < LAYERS; ) {
            const double before = plain;
            double worked = 0, taken = plain;
            if (share_looks(&s)) {
                share_learn(&s, 0, before);
                continue;
            }
            for (; l < LAYERS; l++) {
                const double more = l % 6 == 5 ? told : 1;
                if (worked > 0 && worked + more > s.amount) break;
                worked += more;
                taken += l % 6 == 5 ? layer * global : layer;
            }
            times[n++] = taken / plain;
            if (l < LAYERS) share_learn(&s, worked, taken);
        }
    qsort(times, (size_t)n, sizeof *times, compare_doubles);
    for (int i = 0; i < n; i++) over += times[i] > fmax(3.1, 1 + layer * (1 + global) / plain);
    if (tell)
        printf("%-18s rounds of layers: median %.2f of a plain one, 99 %% %.2f\n", name, times[n / 2],
               times[n * 99 / 100]);
    CHECK(times[n / 2] <= fmax(3, 1 + layer / plain), "%s: %.2f in the median", name, times[n / 2]);
    CHECK(times[n / 2] >= 2 || layer * global >= plain, "%s: %.2f in the median only", name, times[n / 2]);
    CHECK(over <= n / 20, "%s: %d of %d rounds take too long", name, over, n);
}

int main(int argc, char **argv) {
    const bool tell = argc > 1 && !strcmp(argv[1], "-v");
    for (int i = 0; i < N_OF(machines); i++) {
        test_machine(&machines[i], 1, 0, tell);
        test_machine(&machines[i], 3, 0, tell);
        test_machine(&machines[i], 0.4, 0.1, tell);
    }
    test_machine(&(Simulated){ "--chunk 4", { { 1, 1 }, { 64, 10 } }, 0, 4, false }, 1, 0, false);
    test_layers("26B, 64K", 2.15, 1.1, 4, 3, tell);
    test_layers("26B, 256K", 2.15, 1.1, 12, 6, tell);
    test_layers("31B, 4K", 8, 1.5, 1.2, 1.2, tell);
    test_layers("small layers", 2, 0.1, 1, 1, tell);
    test_layers("large layers", 1, 9, 2, 2, tell);
    return test_done("test_share");
}
