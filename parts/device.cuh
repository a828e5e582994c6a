/* device.cuh - the device and its memory: start, allocation, copies, recorded steps, measurements. A part of
 * gemma4_kernels.cu, which includes it in its section [10].
 *
 * HOLDS        the operations of gemma4.h that compute nothing: scratch_bytes, init, memory, reserve, release, copy,
 * begin,
 *              end, wait, fence, wait_for, launches, card, bandwidth, joules
 * MAY USE      all of gemma4_kernels.cu that precedes the include
 * BEGIN        with cuda_init() in [1] and cuda_begin() in [3]
 *   [1] Scratch, the device, start       [3] Recorded steps, fences
 *   [2] Memory, copies                   [4] Bandwidth, energy */
#ifndef DEVICE_CUH
#define DEVICE_CUH

// ==== [1] Scratch, the device, start =================================================================================
// Small copies go through a pinned buffer, so that the host does not wait: data for the device is first copied to the
// buffer; data from the device stays in the buffer until wait() or wait_for(). The kernels of a step are launched as
// they are called until its key was seen RECORD_AFTER times; then they are recorded as a graph, which is replayed from
// then on. Recording takes as long as some steps, so it does not pay for rare kinds of steps; drafts of several
// sessions make many. Prompt steps are never recorded, since most prompts have their own sizes.

enum { LEAST_MAJOR = 8,               // compute capability
       LEAST_SHARED = 99 << 10 };     // shared memory of a block on every such card

static size_t scratch_layout(const Limits *lim, char *base) {
    const size_t all = (size_t)lim->max_rows * lim->max_cols, rows = prepared_rows(lim);
    const size_t of_experts = lim->max_experts ? min_int(lim->max_rows, STEP_ROWS) : 0;
    const size_t prepared = (2 * rows + of_experts) * lim->max_cols;
    const int pairs = lim->max_rows > STEP_ROWS ? lim->max_rows * lim->max_experts : 0;
    size_t at = 0;
#define PLACE(field, type, n) cuda.field = (type *)(base + at), at += round_up((n) * sizeof(type), 256)
    PLACE(y, float, prepared);
    PLACE(yq, int8_t, prepared);
    PLACE(ys, float, prepared / 32 + 2 * rows + of_experts);
    PLACE(y16, __half, lim->max_rows > STEP_ROWS ? all : 0);
    PLACE(order, int32_t, pairs);
    PLACE(tiles, PairTile, pairs ? most_tiles(pairs, MAX_PROMPT_EXPERTS, SMALL_TILE) : 0);
    PLACE(panel, __half, PANEL_BYTES / sizeof(__half));
    PLACE(wide, float, lim->max_rows > STEP_ROWS ? wide_values(lim->max_rows) : 0);
    PLACE(partial, float, PARTIAL_BYTES / sizeof(float));
    PLACE(arrived, unsigned, MAX_ARRIVED);
    PLACE(blas_work, char, BLAS_BYTES);
    PLACE(ring, char, lim->host_bytes);
    PLACE(slots, int32_t, lim->host_bytes ? STEP_ROWS * lim->max_experts : 0);
#undef PLACE
    return at;
}

static Limits joined_limits(const Limits *lim) {
    Limits l = *lim;
    l.max_rows = max_int(max_int(l.max_rows, cuda.lim.max_rows), 1);
    l.max_cols = (int)round_up(max_int(l.max_cols, cuda.lim.max_cols), 32);
    l.max_experts = max_int(l.max_experts, cuda.lim.max_experts);
    l.vocab = max_int(l.vocab, cuda.lim.vocab);
    if (l.host_bytes < cuda.lim.host_bytes) l.host_bytes = cuda.lim.host_bytes;
    return l;
}

static size_t cuda_scratch_bytes(const Limits *lim) {
    const Limits l = joined_limits(lim);
    char *kept = cuda.scratch;
    const size_t n = scratch_layout(&l, NULL);
    if (kept) scratch_layout(&cuda.lim, kept);         // the call above only counted
    // pinned buffers come from the same memory
    return n + (cuda.card.host_memory ? UPLOAD_THREADS * UPLOAD_PORTION : 0);
}

static int device_attribute(cudaDeviceAttr which) {
    int value = 0;
    CHECK_CUDA(cudaDeviceGetAttribute(&value, which, 0), "device attribute %d", (int)which);
    return value;
}

static bool in_host_memory;   // the real GPU allocates from the host's memory: Jetson, GB10

static const char *device_name(void) {
    static struct cudaDeviceProp p;
    CHECK_CUDA(cudaGetDeviceProperties(&p, 0), "device");
    return p.name;
}

// The real GPU; if a card is pretended, the smaller of both in every figure.
static Card read_card(const Card *pretended) {
    size_t free_bytes = 0;
    Card c = { device_name() };
    c.major = device_attribute(cudaDevAttrComputeCapabilityMajor);
    c.minor = device_attribute(cudaDevAttrComputeCapabilityMinor);
    c.n_sm = device_attribute(cudaDevAttrMultiProcessorCount);
    c.block_shared = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    c.sm_shared = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    c.sm_threads = device_attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
    c.sm_registers = device_attribute(cudaDevAttrMaxRegistersPerMultiprocessor);
    c.l2 = (size_t)device_attribute(cudaDevAttrL2CacheSize);
    c.host_memory = in_host_memory = device_attribute(cudaDevAttrIntegrated);
    cudaFuncAttributes code = { };
    const cudaError_t e = cudaFuncGetAttributes(&code, sort_pairs_kernel);     // any kernel: the code of all is loaded
    if (e != cudaSuccess && e != cudaErrorMemoryAllocation)
        cuda_die("%s, compute capability %d.%d: this program was built for other GPUs (%s); build it with make cuda "
                 "ARCH=native, or ARCH=all-major", c.name, c.major, c.minor, cudaGetErrorString(e));
    CHECK_CUDA(e, "the kernels' code");
    // wait_for_previous_kernel() does nothing in code that was compiled for less than 9.0, even if a 9.0 card runs it.
    c.starts_early = c.major >= 9 && code.ptxVersion >= 90;
    CHECK_CUDA(cudaMemGetInfo(&free_bytes, &c.memory), "memory");
    if (!pretended) return c;
    const Card *p = pretended;
    c.name = p->name, c.major = p->major, c.minor = p->minor;
    c.n_sm = min_int(c.n_sm, p->n_sm);
    c.block_shared = min_int(c.block_shared, p->block_shared), c.sm_shared = min_int(c.sm_shared, p->sm_shared);
    c.sm_threads = min_int(c.sm_threads, p->sm_threads), c.sm_registers = min_int(c.sm_registers, p->sm_registers);
    c.l2 = min_size(c.l2, p->l2), c.memory = min_size(c.memory, p->memory);
    c.host_memory |= p->host_memory;
    c.starts_early &= p->starts_early;
    return c;
}

// Is there a GPU that this program can use? If one is there but cannot be used, one line says why.
static bool find_device(void) {
    static int found = -1;
    int n_devices = 0, driver = 0, runtime = 0;
    if (found >= 0) return found;
    const cudaError_t e = cudaGetDeviceCount(&n_devices);
    found = e == cudaSuccess && n_devices;
    if (found) {
        const int major = device_attribute(cudaDevAttrComputeCapabilityMajor);
        found = major >= LEAST_MAJOR;
        if (!found)
            fprintf(stderr, "# cuda: %s has compute capability %d.%d, but the fast kernels need %d.0 or newer; "
                    "--backend plain runs on it\n",
                    device_name(), major, device_attribute(cudaDevAttrComputeCapabilityMinor), LEAST_MAJOR);
    } else if (e == cudaErrorInsufficientDriver) {     // the driver is too old, or missing: version 0
        if (cudaDriverGetVersion(&driver) == cudaSuccess && cudaRuntimeGetVersion(&runtime) == cudaSuccess && driver)
            fprintf(stderr, "# cuda: the driver supports CUDA %d.%d, but this program was built with CUDA %d.%d: no "
                    "GPU is used; update the driver, or build with an older toolkit\n",
                    driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    } else if (e != cudaSuccess && e != cudaErrorNoDevice) {
        fprintf(stderr, "# cuda: %s: no GPU is used\n", cudaGetErrorString(e));
    }
    cudaGetLastError();
    return found;
}

static void start_device(void) {
    if (cuda.stream) return;
    cuda.card = read_card(cuda.pretended);
    if (cuda.card.block_shared < LEAST_SHARED)
        cuda_die("%s: a block may have %d bytes of shared memory, but the kernels need %d", cuda.card.name,
                 cuda.card.block_shared, LEAST_SHARED);
    CHECK_CUDA(cudaStreamCreateWithFlags(&cuda.stream, cudaStreamNonBlocking), "stream");
    CHECK_CUDA(cudaStreamCreateWithFlags(&cuda.copies, cudaStreamNonBlocking), "stream");
    CHECK_CUDA(cudaEventCreateWithFlags(&cuda.used, EVENT_FLAGS), "event");
    CHECK_CUDA(cudaMallocHost((void **)&cuda.pinned, PINNED_BYTES), "pinned memory of %d bytes", PINNED_BYTES);
    allow_shared(prepare_kernel<ROW_QUADS>);
    allow_shared(prepare_kernel<NARROW_QUADS>);
    allow_shared(prepare_kernel<0>);
    allow_products();
    allow_experts();
    allow_attend();
    allow_flash<64>();
    allow_flash<32>();
    CHECK_BLAS(cublasCreate(&cuda.blas), "cublasCreate");
    CHECK_BLAS(cublasSetStream(cuda.blas, cuda.stream), "cublasSetStream");
}

static void forget_steps(void) {
    for (int i = 0; i < cuda.n_steps; i++)
        if (cuda.steps[i].exec) cudaGraphExecDestroy(cuda.steps[i].exec);
    cuda.n_steps = 0;
}

static void cuda_init(const Limits *lim) {
    start_device();
    CHECK_CUDA(cudaStreamSynchronize(cuda.stream), "init");
    CHECK_CUDA(cudaStreamSynchronize(cuda.copies), "init");
    empty_ring();
    forget_steps();
    const Limits l = joined_limits(lim);
    const size_t size = scratch_layout(&l, NULL);
    if (size > cuda.scratch_size) {
        if (cuda.scratch) cudaFree(cuda.scratch);
        CHECK_CUDA(cudaMalloc((void **)&cuda.scratch, size), "scratch of %zu bytes", size);
        cuda.scratch_size = size;
    }
    cuda.lim = l;
    scratch_layout(&l, cuda.scratch);
    CHECK_CUDA(cudaMemsetAsync(cuda.arrived, 0, MAX_ARRIVED * sizeof *cuda.arrived, cuda.stream), "init");
    CHECK_BLAS(cublasSetWorkspace(cuda.blas, cuda.blas_work, BLAS_BYTES), "cublasSetWorkspace");
}

// ==== [2] Memory, copies =============================================================================================

// Host memory that is available without swapping, including the page cache; 0: unknown.
static size_t available_host_memory(void) {
    char line[128];
    unsigned long long kb = 0;
    FILE *f = fopen("/proc/meminfo", "r");
    while (f && !kb && fgets(line, sizeof line, f)) sscanf(line, "MemAvailable: %llu kB", &kb);
    if (f) fclose(f);
    return (size_t)kb << 10;
}

static void cuda_memory(size_t *free_bytes, size_t *total) {
    start_device();
    CHECK_CUDA(cudaMemGetInfo(free_bytes, total), "memory");
    if (in_host_memory) {                              // where CUDA counts the page cache as used
        const size_t available = min_size(available_host_memory(), *total);
        if (available > *free_bytes) *free_bytes = available;
    }
    const size_t used = *total - *free_bytes, most = cuda.card.memory;
    *total = most;
    *free_bytes = most > used ? most - used : 0;       // as on a card with that memory and the same users
}

static void *cuda_reserve(size_t bytes) {
    void *p = NULL;
    start_device();
    if (cudaMalloc(&p, bytes ? bytes : 256) != cudaSuccess) {
        cudaGetLastError();
        return NULL;
    }
    CHECK_CUDA(cudaMemsetAsync(p, 0, bytes, cuda.stream), "zeroing %zu bytes", bytes);
    return cuda.reserved = p;
}

// The stream has reached a point: delivers the copies from the device up to it, and frees their part of the pinned
// buffer.
static void finish_copies(size_t pinned_at, unsigned n_pending) {
    for (; (int)(n_pending - cuda.n_handed) > 0; cuda.n_handed++) {
        const Pending *p = &cuda.pending[cuda.n_handed % MAX_PENDING];
        memcpy(p->dst, p->src, p->bytes);
    }
    if (pinned_at > cuda.pinned_free) cuda.pinned_free = pinned_at;
}

static void cuda_wait(void) {
    CHECK_CUDA(cudaStreamSynchronize(cuda.stream), "wait");
    finish_copies(cuda.pinned_at, cuda.n_pending);
}

static void cuda_release(void *p) {
    cuda_wait();
    CHECK_CUDA(cudaStreamSynchronize(cuda.copies), "release");
    empty_ring();
    forget_steps();
    for (HostMatrix **at = &cuda.in_host; *at; ) {
        HostMatrix *m = *at;
        if (m->owner != p) {
            at = &m->next;
            continue;
        }
        *at = m->next;
        CHECK_CUDA(cudaEventDestroy(m->arrived), "release of a matrix");
        CHECK_CUDA(cudaFreeHost(m->data), "release of a matrix");
        free(m);
    }
    CHECK_CUDA(cudaFree(p), "release");
}

// Reserves bytes of the pinned buffer.
static char *take_pinned(size_t bytes) {
    bytes = round_up(bytes, 64);
    const size_t at = cuda.pinned_at % PINNED_BYTES, skipped = at + bytes > PINNED_BYTES ? PINNED_BYTES - at : 0;
    const bool full = cuda.pinned_at + skipped + bytes - cuda.pinned_free > PINNED_BYTES;
    if (full || cuda.n_pending - cuda.n_handed == MAX_PENDING) cuda_wait();
    char *p = cuda.pinned + (cuda.pinned_at + skipped) % PINNED_BYTES;
    cuda.pinned_at += skipped + bytes;
    return p;
}

// copy_words: copies a few words between the pinned buffer and the device, by a kernel: the copy engine would have to
// be waited for on both sides.
//   shapes    dst, src (n) words of 32 bits
//   launch    one block of 256
//   traffic   one round trip over the bus, some 2 us
//   numerics  exact
//   see       cuda_copy
__global__ void copy_words_kernel(volatile uint32_t *dst, const volatile uint32_t *src, int n) {
    wait_for_previous_kernel();
    for (int i = threadIdx.x; i < n; i += blockDim.x) dst[i] = src[i];
}

static void copy_through_pinned(void *dst, const void *src, size_t bytes, cudaMemcpyKind kind) {
    if (bytes <= 4096 && ((uintptr_t)dst | (uintptr_t)src | bytes) % 4 == 0) {
        launch(WRITES_ALL_BUT_WEIGHTS, copy_words_kernel, 1, 256, 0, (volatile uint32_t *)dst,
               (const volatile uint32_t *)src, (int)(bytes / 4));
        CHECK_LAUNCH("copy of %zu bytes", bytes);
        return;
    }
    CHECK_CUDA(cudaMemcpyAsync(dst, src, bytes, kind, cuda.stream), "copy of %zu bytes", bytes);
}

static void cuda_copy(const Copy *c) {
    if (!c->bytes) return;
    if (c->kind == COPY_WITHIN) {
        CHECK_CUDA(cudaMemcpyAsync(c->dst, c->src, c->bytes, cudaMemcpyDeviceToDevice, cuda.stream),
                   "copy of %zu bytes", c->bytes);
        return;
    }
    const cudaMemcpyKind kind = c->kind == COPY_IN ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost;
    if (c->bytes > PINNED_BYTES / 4) {                 // large: a plain copy, for which the host waits
        CHECK_CUDA(cudaMemcpyAsync(c->dst, c->src, c->bytes, kind, cuda.stream), "copy of %zu bytes", c->bytes);
        CHECK_CUDA(cudaStreamSynchronize(cuda.stream), "copy of %zu bytes", c->bytes);
        return;
    }
    char *at = take_pinned(c->bytes);
    if (c->kind == COPY_IN) {
        memcpy(at, c->src, c->bytes);
        copy_through_pinned(c->dst, at, c->bytes, kind);
    } else {
        copy_through_pinned(at, c->src, c->bytes, kind);
        cuda.pending[cuda.n_pending++ % MAX_PENDING] = (Pending){ c->dst, at, c->bytes };
    }
}

// ==== [3] Recorded steps, fences =====================================================================================

// The entry of a key. A new key replaces the one that was not used for the longest time.
static Recorded *find_step(const StepKey *key) {
    Recorded *oldest = cuda.steps;
    cuda.n_begun++;
    for (int i = 0; i < cuda.n_steps; i++) {
        Recorded *step = &cuda.steps[i];
        if (memcmp(&step->key, key, sizeof *key) == 0) return step;
        if (step->used < oldest->used) oldest = step;
    }
    if (cuda.n_steps < MAX_STEPS) *(oldest = &cuda.steps[cuda.n_steps++]) = (Recorded){ };
    if (oldest->exec) {
        CHECK_CUDA(cudaStreamSynchronize(cuda.stream), "forgetting a step");       // it may run
        CHECK_CUDA(cudaGraphExecDestroy(oldest->exec), "forgetting a step");
    }
    *oldest = (Recorded){ *key };
    return oldest;
}

static bool cuda_begin(StepKey key) {
    cuda.step = NULL;
    cuda.last = (Launched){ 0, WRITES_ALL_BUT_WEIGHTS };               // a replayed step does not set it
    if (key.kind == STEP_PROMPT) return true;
    Recorded *step = find_step(&key);
    step->used = cuda.n_begun;
    join_copies();
    if (step->n_launched < RECORD_AFTER) {
        step->n_launched++;
        return true;
    }
    cuda.step = step;
    cuda.recording = !step->exec;
    if (cuda.recording)
        CHECK_CUDA(cudaStreamBeginCapture(cuda.stream, cudaStreamCaptureModeThreadLocal),
                   "recording a step of %d rows", key.rows);
    return cuda.recording;
}

static void cuda_end(void) {
    Recorded *step = cuda.step;
    if (!step) return;
    const int rows = step->key.rows;
    if (cuda.recording) {
        cudaGraph_t graph;
        join_copies();
        CHECK_CUDA(cudaStreamEndCapture(cuda.stream, &graph), "recording a step of %d rows", rows);
        CHECK_CUDA(cudaGraphGetNodes(graph, NULL, &step->n_nodes), "recording a step of %d rows", rows);
        CHECK_CUDA(cudaGraphInstantiate(&step->exec, graph, 0), "recording a step of %d rows", rows);
        CHECK_CUDA(cudaGraphDestroy(graph), "recording a step of %d rows", rows);
        cuda.recording = false;
    }
    CHECK_CUDA(cudaGraphLaunch(step->exec, cuda.stream), "step of %d rows", rows);
    cuda.n_launches += (int64_t)step->n_nodes;
}

static int cuda_fence(void) {
    Fence *fence = &cuda.fences[cuda.n_fences % MAX_FENCES];
    if (!fence->event) CHECK_CUDA(cudaEventCreateWithFlags(&fence->event, EVENT_FLAGS), "fence");
    CHECK_CUDA(cudaEventRecord(fence->event, cuda.stream), "fence");
    fence->pinned_at = cuda.pinned_at;
    fence->n_pending = cuda.n_pending;
    return cuda.n_fences++;
}

// A fence older than the last MAX_FENCES was overwritten by a later one; waiting for that waits for the older one too.
static void cuda_wait_for(int number) {
    const Fence *fence = &cuda.fences[number % MAX_FENCES];
    CHECK_CUDA(cudaEventSynchronize(fence->event), "wait_for");
    finish_copies(fence->pinned_at, fence->n_pending);
}

static int64_t cuda_launches(void) { return cuda.n_launches; }

static const Card *cuda_card(void) {
    start_device();
    return &cuda.card;
}

void cuda_pretend(const Card *card) { cuda.pretended = card; }

void cuda_watch(void (*watch)(const LaunchPlan *), bool plans_only) {
    cuda.watch = watch;
    cuda.plans_only = plans_only;
}

// ==== [4] Bandwidth, energy ==========================================================================================

// read_once: reads n times 16 bytes for cuda_bandwidth. The sum is stored only if it has one certain value, so that the
// compiler cannot remove the loads.
//   shapes    p (n) of 16 bytes, out (1)
//   launch    16 blocks of 256 per multiprocessor, 8 loads in flight in every thread
//   traffic   16 n bytes
//   numerics  integers
//   see       cuda_bandwidth
__global__ void read_once_kernel(const uint4 *p, size_t n, uint32_t *out) {
    wait_for_previous_kernel();
    uint32_t sum = 0;
    const size_t stride = (size_t)gridDim.x * blockDim.x;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += 8 * stride) {
        uint4 v[8];
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] = i + k * stride < n ? load_once(p + i + k * stride) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int k = 0; k < 8; k++) sum += v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
    }
    if (sum == 0x9e3779b9u) *out = sum;
}

// Bytes per second of a kernel that only reads: the best of ten passes over a gigabyte, or over what is free; both are
// many times the L2 cache. Measured once; 0 if too little memory is free.
static double cuda_bandwidth(void) {
    static double best = -1;
    if (best >= 0) return best;
    size_t bytes = (size_t)1 << 30;
    char *p = NULL;
    best = 0;
    start_device();
    while (bytes >= 256 << 20 && cudaMalloc((void **)&p, bytes + 256) != cudaSuccess) bytes /= 2, p = NULL;
    cudaGetLastError();
    if (!p) return 0;
    cudaEvent_t event[2];
    for (int i = 0; i < 2; i++) CHECK_CUDA(cudaEventCreate(&event[i]), "bandwidth");
    CHECK_CUDA(cudaMemsetAsync(p, 0, bytes, cuda.stream), "bandwidth");
    for (int i = 0; i < 11; i++) {                     // the first pass does not count
        float ms = 0;
        CHECK_CUDA(cudaEventRecord(event[0], cuda.stream), "bandwidth");
        launch(WRITES_NOTHING, read_once_kernel, cuda.card.n_sm * 16, 256, 0, (const uint4 *)p, bytes / sizeof(uint4),
               (uint32_t *)(p + bytes));
        CHECK_LAUNCH("bandwidth");
        CHECK_CUDA(cudaEventRecord(event[1], cuda.stream), "bandwidth");
        CHECK_CUDA(cudaEventSynchronize(event[1]), "bandwidth");
        CHECK_CUDA(cudaEventElapsedTime(&ms, event[0], event[1]), "bandwidth");
        if (i && ms > 0 && bytes / (ms * 1e-3) > best) best = bytes / (ms * 1e-3);
    }
    for (int i = 0; i < 2; i++) cudaEventDestroy(event[i]);
    CHECK_CUDA(cudaFree(p), "bandwidth");
    return best;
}

// Bytes per second of copies from pinned host memory: the best of ten. Measured once; 0 if GPU and host share memory.
static double cuda_bus(void) {
    enum { BUS_BYTES = 32 << 20 };
    static double best = -1;
    if (best >= 0) return best;
    char *from = NULL, *to = NULL;
    best = 0;
    start_device();
    if (in_host_memory || cudaMallocHost((void **)&from, BUS_BYTES) != cudaSuccess) return cudaGetLastError(), best;
    cudaEvent_t event[2];
    for (int i = 0; i < 2; i++) CHECK_CUDA(cudaEventCreate(&event[i]), "bus");
    if (cudaMalloc((void **)&to, BUS_BYTES) != cudaSuccess) cudaGetLastError();
    for (int i = 0; to && i < 10; i++) {
        float ms = 0;
        CHECK_CUDA(cudaEventRecord(event[0], cuda.stream), "bus");
        CHECK_CUDA(cudaMemcpyAsync(to, from, BUS_BYTES, cudaMemcpyHostToDevice, cuda.stream), "bus");
        CHECK_CUDA(cudaEventRecord(event[1], cuda.stream), "bus");
        CHECK_CUDA(cudaEventSynchronize(event[1]), "bus");
        CHECK_CUDA(cudaEventElapsedTime(&ms, event[0], event[1]), "bus");
        if (ms > 0 && BUS_BYTES / (ms * 1e-3) > best) best = BUS_BYTES / (ms * 1e-3);
    }
    for (int i = 0; i < 2; i++) cudaEventDestroy(event[i]);
    if (to) CHECK_CUDA(cudaFree(to), "bus");
    CHECK_CUDA(cudaFreeHost(from), "bus");
    return best;
}

// Joules since the driver was loaded, from NVML if it is installed; else -1.
static double cuda_joules(void) {
    static unsigned (*energy)(void *, unsigned long long *);
    static void *device;
    static bool tried;
    if (!tried) {
        tried = true;
        void *lib = dlopen("libnvidia-ml.so.1", RTLD_NOW);
        unsigned (*init)(void) = lib ? (unsigned (*)(void))dlsym(lib, "nvmlInit_v2") : NULL;
        typedef unsigned (*ByPci)(const char *, void **);
        const ByPci by_pci = lib ? (ByPci)dlsym(lib, "nvmlDeviceGetHandleByPciBusId_v2") : NULL;
        char pci[32] = "";
        const bool named = init && by_pci && init() == 0 && cudaDeviceGetPCIBusId(pci, sizeof pci, 0) == cudaSuccess;
        if (named && by_pci(pci, &device) == 0)
            energy = (unsigned (*)(void *, unsigned long long *))dlsym(lib, "nvmlDeviceGetTotalEnergyConsumption");
    }
    unsigned long long millijoules = 0;
    return energy && energy(device, &millijoules) == 0 ? millijoules * 1e-3 : -1;
}

#endif
