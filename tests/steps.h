/* steps.h - steps of the engine as several tests take them. Behind gemma4.c. */
#ifndef STEPS_H
#define STEPS_H

// Runs all of n tokens through session seq. The last chunk is left to the caller to commit, who may sample first.
static void run_prompt(Model *m, int seq, const int32_t *tokens, int n) {
    for (int at = 0; at < n; ) {
        at += run_chunk(m, seq, tokens + at, n - at);
        if (at < n) commit_all(m);
    }
}

#endif
