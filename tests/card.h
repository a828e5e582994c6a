/* card.h - lets a test of the CUDA backend plan for another card: the argument card=NAME, with a name of parts/cards.h.
 *
 * On a GPU, the backend plans for that card; the emulator emulates that card, or card=NAME:SMS, a part of it with so many
 * multiprocessors. Include after gemma4.h. */
#ifndef CARD_H
#define CARD_H
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef EMULATED
bool cuda_on_cpu(const char *card);      // cuda_on_cpu/cuda_runtime.h
#endif

// Removes the argument from argv.
static inline void take_card(int *argc, char **argv) {
    int n = 0;
    for (int i = 0; i < *argc; i++) {
        const char *name = strncmp(argv[i], "card=", 5) ? NULL : argv[i] + 5;
        if (!name) argv[n++] = argv[i];
#if defined(EMULATED)
        else if (cuda_on_cpu(name)) continue;
#else
        else if (find_card(name)) {
#ifdef USE_CUDA
            cuda_pretend(find_card(name));
#endif
        }
#endif
        else printf("%s: there is no card of that name\n", argv[i]), exit(1);
    }
    argv[*argc = n] = NULL;
}
#endif
