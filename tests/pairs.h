/* pairs.h - a model and its drafter on the CPU or the GPU, as the tests of drafting take them. Behind gemma4.c. */
#ifndef PAIRS_H
#define PAIRS_H

static bool on_gpu;                                    // where open_pair() puts them

static const Ops *gpu_ops(void) {                      // NULL: none
#ifdef USE_CUDA
    return cuda_ops();
#else
    return NULL;
#endif
}

static Model *open_on(const Ops *ops, const char *path, PlanOptions o) {
    Model *m = alloc_or_die(1, sizeof *m);
    load_model(m, path, ops, o, NULL);
    return m;
}

static Model *open_pair(const char *path, PlanOptions o) { return open_on(on_gpu ? gpu_ops() : cpu_ops(), path, o); }

static void close_model(Model *m) {
    free_model(m);
    free(m);
}

static void read_back(Model *m, void *host, const void *data, size_t bytes) {
    m->ops->copy(&(Copy){ host, data, bytes, COPY_OUT });
    m->ops->wait();
}

#endif
