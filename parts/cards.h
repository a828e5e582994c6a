/* cards.h - properties of GPUs, and the GPUs that --card and the emulator of the tests know by name.
 *
 * The CUDA backend reads the properties of the installed GPU into a Card once, at start, and computes all launch sizes
 * from it. So a GPU that is not in the table works too. Sources: CUDA programming guide (compute capabilities),
 * vendors' tables.
 *
 * Uses no other part. Begin with find_card().
 *   [1] Card    [2] Cards by name */
#ifndef CARDS_H
#define CARDS_H
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

// ==== [1] Card =======================================================================================================

typedef struct {
    const char *name;
    int    major, minor;      // compute capability
    int    n_sm;              // streaming multiprocessors
    int    block_shared;      // bytes of shared memory: of a block at most
    int    sm_shared;         // of an SM; the system takes BLOCK_SYSTEM of it for each block
    int    sm_threads;        // resident threads of an SM at most
    int    sm_registers;
    size_t l2, memory;        // bytes
    bool   host_memory;       // GPU and host share memory
    bool   starts_early;      // programmatic dependent launch: blocks may start before the previous kernel has ended
    double bandwidth;         // bytes/s of the memory, as the vendor says; 0: not known
} Card;

enum { BLOCK_SYSTEM = 1 << 10 };

// ==== [2] Cards by name ==============================================================================================

#define CARD_SHARED(kb) (kb) << 10, ((kb) + 1) << 10
#define CARD_BYTES(l2_mb, memory_gb) (size_t)(l2_mb) << 20, (size_t)(memory_gb) << 30
static const Card cards[] = {  // name, capability, SMs, shared memory, threads, registers, L2 and memory, .., bandwidth
    { "h100",    9, 0, 132, CARD_SHARED(227), 2048, 65536, CARD_BYTES(50, 80), false, true, 3350e9 },
    { "a100",    8, 0, 108, CARD_SHARED(163), 2048, 65536, CARD_BYTES(40, 40), false, false, 1555e9 },
    { "rtx3090", 8, 6, 82,  CARD_SHARED(99),  1536, 65536, CARD_BYTES(6, 24), false, false, 936e9 },
    { "rtx4090", 8, 9, 128, CARD_SHARED(99),  1536, 65536, CARD_BYTES(72, 24), false, false, 1008e9 },
    { "rtx5090", 12, 0, 170, CARD_SHARED(99), 1536, 65536, CARD_BYTES(96, 32), false, true, 1792e9 },
    { "gb10",    12, 1, 48, CARD_SHARED(99),  1536, 65536, CARD_BYTES(24, 128), true, true, 273e9 },
};
#undef CARD_SHARED
#undef CARD_BYTES
#define CARD_NAMES "h100|a100|rtx3090|rtx4090|rtx5090|gb10"
enum { N_CARDS = sizeof cards / sizeof *cards };

static inline const Card *find_card(const char *name) {        // NULL: no such card
    for (int i = 0; i < N_CARDS; i++)
        if (!strcmp(cards[i].name, name)) return &cards[i];
    return NULL;
}

static inline bool is_pretended(const Card *c) { return find_card(c->name); }  // names from the driver are longer
#endif
