/* steps.h - steps of the engine that several tests use. Include after gemma4.c. */
#ifndef STEPS_H
#define STEPS_H

// Runs n tokens through session seq. The caller commits the last chunk and may sample before that.
static void run_prompt(Model *m, int seq, const int32_t *tokens, int n) {
    for (int at = 0; at < n; ) {
        at += run_chunk(m, seq, tokens + at, n - at);
        if (at < n) commit_all(m);
    }
}

#endif
