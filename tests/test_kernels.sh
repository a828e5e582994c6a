#!/bin/sh
# The kernels of gemma4_kernels.cu without a GPU: g++ compiles them and tests/cuda_on_cpu executes them; its
# cuda_runtime.h says what that proves and what it does not. First tests of the emulator itself, with deliberate
# faults; the plans for each card; then each operation and a whole model as an RTX 3090, against the CPU backend; the
# sampler, the layout of weights, image towers; the operations and the sampler of parts/plain.cu.
# LONG=1: all cases of operations, as an H100 too, two models on all cards of parts/cards.h, every conversation whose
# steps run ahead of the host, drafts, several sessions at once. On a machine with a GPU the same programs run all cases on it.
# Environment: BUILD (build), STRICT=1 (a skip fails), LONG=1.
cd "$(dirname "$0")/.." || exit 1
build=${BUILD:-build}
passed=0 failed=0 skipped=0

finish() {
    echo "# kernels: $passed passed, $failed failed, $skipped skipped"
    [ "$failed" -eq 0 ]
    exit
}

one() { # one PROGRAM ARGUMENTS...: adds its counts; without a summary line it has failed
    what=$*
    program=$build/$1
    shift
    out=$(BUILD=$build "$program" "$@" 2>&1)
    status=$?
    line=$(echo "$out" | grep -E '^# [^:]*: [0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$' | tail -n 1)
    p=0 f=1 s=0
    [ -n "$line" ] && read -r p f s <<EOT
$(echo "${line##*:}" | tr -cd '0-9 ')
EOT
    [ "$status" -ne 0 ] && [ "$f" -eq 0 ] && f=1
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
    echo "$what ($p passed, $f failed, exit status $status)"
    [ "$f" -eq 0 ] || echo "$out" | tail -n 40
}

if [ -e "$build/kernels.o" ]; then
    echo "# built for a GPU, on which the other suites run these programs"
    finish
fi
if [ ! -x "$build/emulated/test_emulator" ]; then
    why="g++ not found; install the package g++ (gcc-c++ on Fedora)"
    command -v g++ >/dev/null 2>&1 && why="not built; run 'make test-programs ENGINE=cpu'"
    echo "skipped: the CUDA backend's kernels on the CPU: $why"
    if [ "${STRICT:-0}" = 0 ]; then skipped=1; else failed=1; fi
    finish
fi
unset CUDA_VISIBLE_DEVICES
few=-few long= others=
[ "${LONG:-0}" = 0 ] || few='' long=-long others='a100 rtx4090 rtx5090 gb10'
one emulated/test_emulator
one test_cards
[ -z "$long" ] || one test_ops -cuda card=h100           # what every GPU test runs there
for card in rtx3090 $others; do one test_ops -cuda $few card=$card; done
if [ -n "$long" ]; then
    for card in h100 rtx3090 $others; do one test_cuda -few card=$card tiny-moe-q4_k_m mini; done
else
    one test_cuda -few card=rtx3090:16 mini
fi
one test_sampling -cuda seen position card=rtx3090
one test_ops -plain -few
one test_ops -plain embed             # every type of weights
one test_sampling -plain -few
one test_vision -cuda $few card=rtx3090
[ -z "$long" ] || one test_cuda -few micro-dense-f16     # another dense target: test_draft
[ -z "$long" ] || one test_cuda -few -host card=rtx3090 tiny-moe-q4_k_m mini
one test_layout card=h100:8            # few multiprocessors: each computes norms again, which takes time
one test_ops -cuda $few -host expert_gate_up expert_down card=rtx3090
[ -z "$long" ] || one test_ahead -cuda card=rtx3090
[ -z "$long" ] || one test_verify -few card=rtx3090      # test_draft verifies too
[ -z "$long" ] || one test_draft -few -long card=rtx3090
finish
