# Makefile - builds the engine, its tests and its fuzzers. A C compiler is all it needs; `make help` lists the targets.
#
# Only ./gemma4 lands in this directory, everything else in build/. Set on the command line as needed:
#   CC=clang   CFLAGS="-O2 -g"   HTTP=0 (no server)   IMAGES=0 (no PNG, JPEG, WebP)   WERROR=1 (warnings are errors)
#   PREFIX=/usr/local   DESTDIR=   FUZZ_SECONDS=60   MODEL=file.gguf (for bench)   LDFLAGS=-L/folder
#   ARCH=sm_90 (for which GPUs); native (those of this machine); all-major (8.0 to 12.1, as far as nvcc knows them); pairs:
#     ARCH=compute_86:sm_90 is the code of an 8.6 card assembled for a 9.0 card, which tests the former on the latter
#   BACKEND=parts/NAME.h or .cu (another backend, from tools/new_backend.sh: docs/porting.md; built in build/NAME)
#   JOBS=4 (what make test does at a time)   STRICT=1 (a skipped test fails)   LONG=1 (longer tests: docs/tests.md)

BACKEND_NAME := $(basename $(notdir $(BACKEND)))
B       := build$(if $(BACKEND),/$(BACKEND_NAME))
BIN     := gemma4
CFLAGS  ?= -O3 -march=native -g1
PREFIX  ?= /usr/local
MODEL   ?= models/gemma4-mini-q8_0.gguf
# Without a GPU to look at: the oldest that the kernels run on; newer ones translate it when they load it.
ARCH    ?= $(if $(wildcard /dev/nvidiactl),native,sm_80)
PLAIN_ARCH ?= sm_75
NVCC    ?= $(shell command -v nvcc 2>/dev/null || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
# HAS_GPU= on the command line: as on a machine without one. In WSL a GPU is dxg, on a Jetson nvhost-gpu.
HAS_GPU ?= $(wildcard /dev/nvidiactl /dev/dxg /dev/nvhost-gpu)
KERNELS := $(wildcard gemma4_kernels.cu)
KERNEL_PARTS := $(wildcard parts/*.cuh) gemma4.h parts/kv.h parts/cards.h
CUBLAS  := $(wildcard $(addsuffix ../include/cublas_v2.h,$(dir $(NVCC))) /usr/include/cublas_v2.h)
ENGINE  := $(if $(and $(if $(BACKEND),,1),$(strip $(NVCC)),$(KERNELS),$(CUBLAS)),cuda,cpu)
# Without a GPU tests and benchmarks need no nvcc, since test_kernels.sh carries the kernels out on the CPU; ENGINE=cuda asks for it.
TESTED  := $(if $(or $(strip $(HAS_GPU)),$(filter command,$(origin ENGINE))),$(ENGINE),cpu)
TESTED_BIN = $(B)/gemma4-$(if $(filter cpu,$(TESTED)),dev,cuda)
JOBS    ?= $(shell nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 2)

# -ffp-contract=off: the CPU operations are the reference, so a*b + c rounds twice with every compiler.
# gcc compiles the parts of one file side by side when they are put together at link time.
LTO       := $(shell probe=$$(mktemp) || exit; echo 'int main(void) { return 0; }' | \
    $(CC) -flto=auto -flto-partition=balanced -xc - -o $$probe 2>/dev/null && echo -flto=auto -flto-partition=balanced; rm -f $$probe)
# The server answers HTTP with libmicrohttpd, when pkg-config finds it.
HTTP      ?= $(shell pkg-config --exists 'libmicrohttpd >= 0.9.71' 2>/dev/null && echo 1)
HTTP_FLAG := $(if $(filter 1,$(HTTP)),-DUSE_MICROHTTPD $(shell pkg-config --cflags libmicrohttpd))
HTTP_LIB  := $(if $(filter 1,$(HTTP)),$(shell pkg-config --libs libmicrohttpd))
# Pictures are read with the libraries of these that pkg-config finds.
IMAGES    ?= $(shell for lib in libpng libjpeg libwebp; do pkg-config --exists $$lib 2>/dev/null && echo $$lib; done)
DECODERS  := $(filter libpng libjpeg libwebp,$(IMAGES))
IMAGE_FLAGS := $(if $(DECODERS),$(shell pkg-config --cflags $(DECODERS)) $(if $(filter libpng,$(DECODERS)),-DUSE_PNG) \
    $(if $(filter libjpeg,$(DECODERS)),-DUSE_JPEG) $(if $(filter libwebp,$(DECODERS)),-DUSE_WEBP))
IMAGE_LIBS := $(if $(DECODERS),$(shell pkg-config --libs $(DECODERS)))
# Another backend: a C header is part of gemma4.c, a .cu file an object of its own. NAME_ops() is its table.
ifneq ($(BACKEND),)
BACKEND_DEFINES := -DBACKEND_OPS=$(BACKEND_NAME)_ops -DBACKEND_NAME=\"$(BACKEND_NAME)\"
BACKEND_FLAGS := $(BACKEND_DEFINES) $(if $(filter %.h,$(BACKEND)),-DBACKEND_FILE=\"$(BACKEND)\")
BACKEND_OBJECT := $(if $(filter %.cu,$(BACKEND)),$(B)/backend.o)
BACKEND_LIBS = $(if $(BACKEND_OBJECT),$(CUDA_LIBS))
endif
COMPILE  := $(CC) -std=c11 -Wall -Wextra $(if $(filter 1,$(WERROR)),-Werror) -pthread -ffp-contract=off $(CFLAGS) $(BACKEND_FLAGS) -I$(B)
SOURCES  := gemma4.c $(wildcard *.h parts/*.h) $(B)/page.h
TESTS    := $(patsubst tests/%.c,$(B)/%,$(wildcard tests/test_*.c tests/make_*.c tests/eval_*.c))
LINES    := $(B)/lines
FAULTS   := $(if $(filter Linux,$(shell uname)),$(B)/fail_write.so)
BENCHES  := $(patsubst tests/%.c,$(B)/%,$(wildcard tests/bench_*.c))
comma := ,
# A pair a:b is -gencode arch=a,code=b; all-major is a list of pairs.
MAJOR     = $(filter $(shell $(NVCC) --list-gpu-code 2>/dev/null),$(addprefix sm_,80 86 89 90 100 120 121))
ARCHES    = $(if $(filter all-major,$(ARCH)),$(foreach a,$(MAJOR),$(subst sm,compute,$(a)):$(a)),$(strip $(ARCH)))
ARCH_FLAGS = $(if $(findstring :,$(ARCHES)),$(foreach a,$(ARCHES),-gencode arch=$(subst :,$(comma)code=,$(a))),-arch=$(ARCHES))
# the first releases of CUDA 12 do not know it
SPLIT_COMPILE = $(if $(findstring --split-compile,$(shell $(NVCC) --help 2>/dev/null)),--split-compile=0)
# The C compiler links; nvcc says which folder its libraries are in. These flags leave the kernels' object without calls of the C++
# runtime, which the C compiler may not find. Statics without a lock are safe: one thread at a time launches kernels.
HOST_FLAGS = -Xcompiler -fPIE,-fno-exceptions,-fno-threadsafe-statics
LINK      = $(CC) -pthread $(CFLAGS)
CUDA_L    = $(sort $(filter-out %/stubs,$(filter -L%,$(subst ",,$(shell $(NVCC) $(NVCC_FLAGS) --dryrun -x cu /dev/null 2>&1)))))
CUDA_DIRS = $(realpath $(CUDA_L:-L%=%))
CUDA_LIBS = $(CUDA_DIRS:%=-L%) $(patsubst %,-Wl$(comma)-rpath$(comma)%,$(filter-out /lib% /usr/lib%,$(CUDA_DIRS))) \
    -lcublas -lcudart_static -lrt -ldl -lm
FUZZERS  := $(patsubst tests/%.c,$(B)/%,$(wildcard tests/fuzz_*.c))
# The kernels without a GPU: compiled by g++ against tests/cuda_on_cpu, which carries them out (its cuda_runtime.h says how), and
# linked to the tests that know of a GPU. CUDA_VISIBLE_DEVICES= hides it from them.
E        := $(B)/emulated
EMULATOR := $(if $(and $(filter cpu,$(TESTED)),$(if $(BACKEND),,1)),$(if $(shell command -v $(firstword $(CXX)) 2>/dev/null),$(E)/test_emulator))
EMULATED := $(if $(EMULATOR),$(patsubst %,$(B)/%,test_ops test_sampling test_cuda test_layout test_ahead test_verify test_draft test_cards test_device test_vision))
EMULATE  := $(CXX) -std=c++20 -g1 -Wall -Wno-unknown-pragmas -fno-exceptions -fno-rtti \
    -ffp-contract=off -pthread $(filter -march=% -mcpu=%,$(CFLAGS))
KERNEL_FLAGS := -Og -Wno-maybe-uninitialized -Wno-deprecated-enum-float-conversion -fno-extern-tls-init -Itests/cuda_on_cpu \
    -fsanitize=alignment,bounds -fno-sanitize-recover=all

all: $(ENGINE)                  ## build ./gemma4 for this machine: CUDA when nvcc is found, else CPU
cpu: $(B)/gemma4-cpu            ## build for the CPU only
	@cmp -s $< $(BIN) 2>/dev/null || cp -f $< $(BIN)
cuda: $(if $(filter cuda,$(ENGINE)),$(B)/gemma4-cuda,no-cuda)   ## build for CUDA and CPU in one binary
	@cmp -s $< $(BIN) 2>/dev/null || cp -f $< $(BIN)
no-cuda:
	@echo "make cuda: $(if $(strip $(NVCC)),cublas_v2.h not found next to $(NVCC); install the complete CUDA toolkit,nvcc not found; install the \
	CUDA toolkit (12 or newer) or set NVCC=/path/to/nvcc); or use 'make cpu'" >&2; exit 1

$(B)/gemma4-cpu: $(SOURCES) $(B)/commit.h $(BACKEND) $(BACKEND_OBJECT) $(B)/flags
	$(COMPILE) $(LTO) $(HTTP_FLAG) $(IMAGE_FLAGS) gemma4.c $(BACKEND_OBJECT) -o $@ $(LDFLAGS) $(HTTP_LIB) $(IMAGE_LIBS) $(BACKEND_LIBS) -lm
$(B)/backend.o: $(BACKEND) gemma4.h gguf.h $(wildcard parts/*.cuh) parts/kv.h parts/cards.h $(B)/cuda-flags
	$(NVCC) -O3 -std=c++20 $(HOST_FLAGS),-ffp-contract=off -lineinfo $(ARCH_FLAGS) $(NVCC_FLAGS) -I. $(BACKEND_DEFINES) -c $< -o $@
# Tests another backend; OPS="matmul attend": these operations alone, and no sampler.
test-backend: $(if $(BACKEND),$(B)/test_ops $(B)/test_sampling)        ## with BACKEND=FILE: build that backend and test its operations
	@[ "$(BACKEND)" ] || { echo 'make test-backend: expected BACKEND=parts/NAME.h or .cu; make one with tools/new_backend.sh NAME' >&2; exit 1; }
	$(B)/test_ops -$(BACKEND_NAME) $(OPS)
	$(if $(OPS),,$(B)/test_sampling -$(BACKEND_NAME))
$(B)/gemma4-cuda: $(B)/gemma4-cuda.o $(B)/plain.o $(B)/kernels.o
	$(LINK) $^ -o $@ $(LDFLAGS) $(HTTP_LIB) $(IMAGE_LIBS) $(CUDA_LIBS)
$(B)/gemma4-cuda.o: $(SOURCES) $(B)/commit.h $(B)/flags
	$(COMPILE) $(HTTP_FLAG) $(IMAGE_FLAGS) -DUSE_CUDA -c gemma4.c -o $@
$(B)/kernels.o: gemma4_kernels.cu $(KERNEL_PARTS) $(B)/cuda-flags
	$(NVCC) -O3 -std=c++17 $(HOST_FLAGS) -lineinfo $(SPLIT_COMPILE) $(ARCH_FLAGS) $(NVCC_FLAGS) -c $< -o $@
# The plain kernels are for older GPUs too, whatever ARCH says; newer ones translate them when they load them.
$(B)/plain.o: parts/plain.cu gemma4.h parts/kv.h parts/cards.h $(B)/cuda-flags
	$(NVCC) -O3 -std=c++17 $(HOST_FLAGS) -lineinfo -arch=$(PLAIN_ARCH) $(NVCC_FLAGS) -c $< -o $@
# The kernels of docs/kernels.md, one after the other.
$(B)/bench_ladder: tests/bench_ladder.cu $(B)/plain.o $(B)/kernels.o
	$(NVCC) -O3 -std=c++17 $(HOST_FLAGS) $(ARCH_FLAGS) $(NVCC_FLAGS) -I. -c $< -o $@.o
	$(LINK) $@.o $(B)/plain.o $(B)/kernels.o -o $@ $(LDFLAGS) $(CUDA_LIBS) -lstdc++
# The server's page as a string of C, which parts/server.h includes. ? is escaped since two of them may begin a trigraph.
$(B)/page.h: web/index.html
	@mkdir -p $(B) && sed 's/[\\"?]/\\&/g; s/.*/"&\\n"/' $< > $@.part && mv -f $@.part $@
# The commit that --version names; not a prerequisite of the tests' programs, which would be rebuilt after every commit.
$(B)/commit.h: FORCE
	@mkdir -p $(B); is="#define COMMIT \"$$(git describe --always --dirty=+ --exclude '*' 2>/dev/null || echo unknown)\""; \
	[ "$$(cat $@ 2>/dev/null)" = "$$is" ] || printf '%s\n' "$$is" > $@
# What these hold is how things are built; a change of it rebuilds what was built otherwise.
$(B)/flags: HOLDS = $(COMPILE) $(LTO) $(HTTP_LIB) $(IMAGE_LIBS)
$(B)/cuda-flags: HOLDS = $(NVCC) $(HOST_FLAGS) $(ARCH) $(NVCC_FLAGS)
$(B)/engine: HOLDS = $(TESTED)
$(B)/flags $(B)/cuda-flags $(B)/engine: FORCE
	@mkdir -p $(B); holds='$(HOLDS)'; [ "$$(cat $@ 2>/dev/null)" = "$$holds" ] || printf '%s\n' "$$holds" > $@

test:                           ## build what is missing and run all tests
	@$(MAKE) --no-print-directory $(if $(filter -j%,$(MAKEFLAGS)),,-j$(JOBS)) ENGINE=$(TESTED) $(TESTED_BIN) test-programs
	@BUILD=$(B) GEMMA4="$$(pwd)/$(TESTED_BIN)" $(if $(filter cpu,$(TESTED)),CUDA_VISIBLE_DEVICES=) sh tests/run.sh
test-programs: $(EMULATOR) $(TESTS) $(LINES) $(FAULTS)   ## build the test programs without running them
# A test program includes the source that it tests, so part of that goes unused. Asserts stay on. Most compile longer than they
# run: -Og in place of -O3, which gives the same bits.
TEST_COMPILE = $(patsubst -g,-g1,$(COMPILE:-O3=-Og))
$(BENCHES): TEST_COMPILE = $(COMPILE)
# It counts allocations, also those of the objects that it links.
$(B)/test_forward: override LDFLAGS += $(if $(FAULTS),$(addprefix -Wl$(comma)--wrap=,malloc calloc realloc aligned_alloc))
# Most of their time goes into loops of the reference and of their own.
$(B)/test_ops $(B)/test_forward: TEST_COMPILE = $(patsubst -g,-g1,$(COMPILE:-O3=-O2))
# It counts calls of functions instead of seconds.
$(B)/test_grammar: TEST_COMPILE += -finstrument-functions
# It has the server in it.
$(B)/test_slots: TEST_COMPILE += $(HTTP_FLAG)
$(B)/test_slots: override LDFLAGS += $(HTTP_LIB)
# It writes and reads pictures.
$(B)/test_image: TEST_COMPILE += $(IMAGE_FLAGS)
$(B)/test_image: override LDFLAGS += $(IMAGE_LIBS)
# What the programs link instead of compiling it each: the parts that have an interface and bodies. Of these a test may still
# compile one itself, to look inside it: the archive's is not taken then.
ENGINE_OBJECTS := $(patsubst %,$(B)/parts/%.o,base gguf tokenizer cpu)
$(B)/engine.a: $(ENGINE_OBJECTS)
	@rm -f $@ && $(AR) rcs $@ $^
$(B)/parts/base.o: parts/base.h
$(B)/parts/gguf.o: gguf.h
$(B)/parts/tokenizer.o: tokenizer.h gguf.h
$(B)/parts/tokenizer.o: USES = -include gguf.h
$(B)/parts/cpu.o: parts/cpu.h parts/base.h gemma4.h parts/cards.h gguf.h parts/kv.h
$(B)/parts/cpu.o: USES = -include parts/base.h -include gemma4.h -include gguf.h -include parts/kv.h
$(ENGINE_OBJECTS): $(B)/flags
	@mkdir -p $(@D)
	$(COMPILE) -UNDEBUG -D_GNU_SOURCE $(USES) -D$(shell echo $(basename $(@F)) | tr a-z A-Z)_IMPLEMENTATION -xc -c $(filter %$(basename $(@F)).h,$^) -o $@
# Without a GPU the shell suites run this program.
dev: $(B)/gemma4-dev            ## build ./gemma4 fast, for the CPU, hardly optimised: a change of one part takes seconds
	@cmp -s $< $(BIN) 2>/dev/null || cp -f $< $(BIN)
$(B)/gemma4-dev: $(B)/engine.a $(SOURCES) $(B)/commit.h $(B)/flags
	$(COMPILE:-O3=-Og) -DENGINE_LINKED $(HTTP_FLAG) $(IMAGE_FLAGS) gemma4.c $(B)/engine.a -o $@ $(LDFLAGS) $(HTTP_LIB) $(IMAGE_LIBS) -lm
# The chat's line editor alone: test_terminal types to it.
$(LINES): tests/lines.c parts/lines.h parts/base.h $(B)/flags
	$(TEST_COMPILE) $< -o $@ $(LDFLAGS) -lm
# Makes calls that write files fail: test_writes.sh loads it with LD_PRELOAD.
$(FAULTS): tests/fail_write.c $(B)/flags
	$(CC) -O1 -Wall -Wextra $(if $(filter 1,$(WERROR)),-Werror) -shared -fPIC $< -o $@ -ldl
$(TESTS) $(BENCHES): $(B)/%: tests/%.c $(wildcard tests/*.h tests/make_*.c) $(SOURCES) $(B)/flags $(B)/engine $(B)/engine.a \
    $(if $(filter cuda,$(TESTED)),$(B)/kernels.o $(B)/plain.o) $(BACKEND) $(BACKEND_OBJECT)
ifeq ($(TESTED),cuda)
	$(TEST_COMPILE) -I. -UNDEBUG -DENGINE_LINKED -DUSE_CUDA -Wno-unused-function -c $< -o $@.o
	$(LINK) $@.o $(B)/engine.a $(B)/plain.o $(B)/kernels.o -o $@ $(LDFLAGS) $(CUDA_LIBS)
else
	$(TEST_COMPILE) -I. -UNDEBUG -DENGINE_LINKED -Wno-unused-function $< $(B)/engine.a $(GPU_FLAGS) $(BACKEND_OBJECT) -o $@ $(LDFLAGS) $(BACKEND_LIBS) -lm $(GPU_LIBS)
endif
$(EMULATED): $(E)/kernels.o $(E)/plain.o $(E)/emulator.o
$(EMULATED): GPU_FLAGS = -DUSE_CUDA -DEMULATED=1 -rdynamic $(E)/kernels.o $(E)/plain.o $(E)/emulator.o
$(EMULATED): GPU_LIBS = -ldl
$(E)/kernels.o: gemma4_kernels.cu $(KERNEL_PARTS) $(wildcard tests/cuda_on_cpu/*.h) $(B)/flags
	@mkdir -p $(E)
	$(EMULATE) $(KERNEL_FLAGS) -xc++ -c $< -o $@
$(E)/plain.o: parts/plain.cu gemma4.h parts/kv.h parts/cards.h $(wildcard tests/cuda_on_cpu/*.h) $(B)/flags
	@mkdir -p $(E)
	$(EMULATE) $(KERNEL_FLAGS) -xc++ -c $< -o $@
$(E)/emulator.o: tests/cuda_on_cpu/emulator.cpp parts/cards.h $(wildcard tests/cuda_on_cpu/*.h) $(B)/flags
	@mkdir -p $(E)
	$(EMULATE) -O3 -c $< -o $@
$(E)/test_emulator: tests/test_emulator.cpp tests/test.h $(wildcard tests/cuda_on_cpu/*.h) $(E)/emulator.o
	$(EMULATE) $(KERNEL_FLAGS) -rdynamic $< $(E)/emulator.o -o $@ -lm -ldl
asan:                           ## run all tests under AddressSanitizer and UndefinedBehaviorSanitizer
	@$(MAKE) --no-print-directory test B=build/asan BIN=build/asan/gemma4 ENGINE=cpu EMULATOR= CFLAGS="-O1 -march=native -g \
	-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer"
sanitize:                       ## run the GPU's tests under compute-sanitizer
	@$(MAKE) --no-print-directory test-programs B=build/sanitize NVCC_FLAGS=-DARRIVING_LANES=32
	@BUILD=build/sanitize tests/sanitize.sh

FUZZ_CC      ?= clang
FUZZ_SECONDS ?= 60
FUZZ_OPT     ?= -O1             # -O0 compiles in a fifth of the time and runs at a third of the speed
FUZZ_FLAGS    = $(strip $(FUZZ_OPT)) -g1 -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=undefined
fuzz:                           ## run each fuzz target for FUZZ_SECONDS (0: only on its seeds) under clang's libFuzzer
	@mkdir -p $(B)/fuzz; echo 'int LLVMFuzzerTestOneInput(void) { return 0; }' | \
	  $(FUZZ_CC) -fsanitize=fuzzer -xc - -o $(B)/fuzz/probe 2>/dev/null || \
	  { echo "make fuzz: '$(FUZZ_CC) -fsanitize=fuzzer' does not link; install clang and its runtime:" \
	  "libclang-rt-dev (Debian, Ubuntu), compiler-rt (Fedora, Arch, Alpine)" >&2; exit 1; }
	@$(MAKE) --no-print-directory $(if $(filter -j%,$(MAKEFLAGS)),,-j$(JOBS)) B=$(B)/fuzz CC=$(FUZZ_CC) ENGINE=cpu CFLAGS="$(FUZZ_FLAGS)" fuzz-programs
	@for f in $(patsubst tests/%.c,$(B)/fuzz/%,$(wildcard tests/fuzz_*.c)); do mkdir -p $$f.corpus; \
	  head -c 1000 models/gemma4-mini-q8_0.gguf > $$f.corpus/head; \
	  seeds=tests/seeds/$${f##*fuzz_}; [ -d $$seeds ] || seeds=; \
	  $$f $(if $(filter 0,$(FUZZ_SECONDS)),-runs=0,-max_total_time=$(FUZZ_SECONDS)) -timeout=10 -artifact_prefix=$$f. \
	    $$f.corpus $$seeds 2> $$f.log || { tail -n 40 $$f.log; echo "$$f: failed" >&2; exit 1; }; \
	  echo "$$f: $$(grep -E '^(Done|#[0-9]+.*DONE)' $$f.log | tail -n 1)"; done
fuzz-programs: $(FUZZERS)
$(FUZZERS): $(B)/%: tests/%.c $(wildcard tests/*.h) $(SOURCES) $(B)/flags $(B)/engine.a
	$(COMPILE) -fsanitize=fuzzer -I. -UNDEBUG -DENGINE_LINKED -DFUZZER $(HTTP_FLAG) $(IMAGE_FLAGS) -Wno-unused-function $< \
	  $(B)/engine.a -o $@ $(LDFLAGS) $(HTTP_LIB) $(IMAGE_LIBS) -lm

SHARED = $(DESTDIR)$(PREFIX)/share
amalgamate: $(B)/page.h $(B)/commit.h         ## write build/gemma4.c, everything in one file: cc -O3 gemma4.c -lm -pthread
	@{ cat $(B)/commit.h; tools/amalgamate.sh gemma4.c $(B); } > $(B)/gemma4.c.part && mv -f $(B)/gemma4.c.part $(B)/gemma4.c
bench: $(B)/gemma4-$(TESTED)    ## time MODEL on this machine: prompt and decode tok/s; leaves ./gemma4 alone
	@$< bench "$(MODEL)"
receipts:                       ## write the figures in README.md and docs that come from docs/receipts/*.csv again
	@tools/receipts.sh
install:                        ## copy gemma4, its manual page and completions for bash and zsh to DESTDIR and PREFIX
	@test -x $(BIN) || $(MAKE) all
	install -d $(patsubst %,"$(SHARED)/%",man/man1 bash-completion/completions zsh/site-functions) "$(DESTDIR)$(PREFIX)/bin"
	install -m 755 $(BIN) "$(DESTDIR)$(PREFIX)/bin/gemma4"
	"$(abspath $(BIN))" --document man > "$(SHARED)/man/man1/gemma4.1"
	"$(abspath $(BIN))" --document bash > "$(SHARED)/bash-completion/completions/gemma4"
	"$(abspath $(BIN))" --document zsh > "$(SHARED)/zsh/site-functions/_gemma4"
clean:                          ## remove everything that was built
	rm -rf build gemma4
help:                           ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
FORCE:
.DELETE_ON_ERROR:
.PHONY: receipts test-backend all cpu cuda no-cuda test test-programs asan sanitize fuzz fuzz-programs amalgamate bench install clean help dev FORCE
