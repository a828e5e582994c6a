/* pairs.h - opens a model and its drafter on the CPU or the GPU, for the tests of drafting. Include after gemma4.c. */
#ifndef PAIRS_H
#define PAIRS_H
#include "test.h"
#include "files.h"

static bool on_gpu;                                    // where open_pair() opens them

static const Ops *gpu_ops(void) {                      // NULL: none
#ifdef USE_CUDA
    return cuda_ops();
#else
    return NULL;
#endif
}

static Model *open_on(const Ops *ops, const char *path, ModelOptions o) {
    Model *m = alloc_or_die(1, sizeof *m);
    load_model(m, path, ops, o, NULL);
    return m;
}

static Model *open_pair(const char *path, ModelOptions o) { return open_on(on_gpu ? gpu_ops() : cpu_ops(), path, o); }

static void close_model(Model *m) {
    free_model(m);
    free(m);
}

static void read_back(Model *m, void *host, const void *data, size_t bytes) {
    m->ops->copy(&(Copy){ host, data, bytes, COPY_OUT });
    m->ops->wait();
}

// Checks that a pair is refused with one line that has all these words.
static void refused(const char *path, ModelOptions o, const char *const *words) {
    fflush(stdout);
    const pid_t child = fork();
    if (!child) {
        const int err = open(in_tmp("stderr"), O_WRONLY | O_CREAT | O_TRUNC, 0600);
        if (err < 0 || dup2(err, 2) < 0) _exit(126);
        open_pair(path, o);
        _exit(0);
    }
    int status = -1;
    while (child > 0 && waitpid(child, &status, 0) < 0 && errno == EINTR) {}
    char *err = text_of(in_tmp("stderr"));
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 1 && strchr(err, '\n') == err + strlen(err) - 1,
          "%s with %s: expected one line and status 1, got status %d and: %s", path, o.drafter, status, err);
    for (; *words; words++)
        CHECK(strstr(err, *words), "%s with %s: expected '%s' in: %s", path, o.drafter, *words, err);
    free(err);
}

#endif
