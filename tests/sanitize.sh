#!/bin/sh
# Runs the GPU tests under compute-sanitizer: each test program (of test_ops and test_sampling each part) in a separate
# process, JOBS at a time, with each tool:
#   memcheck    everything
#   racecheck   without the products of cuBLAS (on sm_90 the tool cannot run them) and without copy_words, which uses no shared memory
#   initcheck   without cuBLAS (on sm_90 the tool does not see its writes)
# Needs a GPU, compute-sanitizer (it comes with the CUDA toolkit) and the tests as `make sanitize` builds them, with
# ARRIVING_LANES=32 (gemma4_kernels.cu [5])
#   tests/sanitize.sh [TOOL ...]
# Environment: BUILD (build), JOBS (processors, 16 at most), LOGS (a new folder: one log per process), LIMIT (1200
# seconds for a process). All GPUs are used, or those in CUDA_VISIBLE_DEVICES.
cd "$(dirname "$0")/.." || exit 1
export BUILD="${BUILD:-build}" LOGS="${LOGS:-$(mktemp -d)}" LIMIT="${LIMIT:-1200}"
jobs=${JOBS:-$(nproc | awk '{ print ($1 > 16) ? 16 : $1 }')}

if [ "$1" = -one ]; then                # -one TOOL PROGRAM ARGUMENTS...: runs one process
    tool=$2
    shift 2
    log=$LOGS/$(echo "$tool $*" | sed "s#$BUILD/##" | tr -c 'a-zA-Z0-9\n' _).log
    start=$(date +%s)
    n=$(nvidia-smi -L 2>/dev/null | wc -l)
    [ "$n" -gt 1 ] && [ -z "$CUDA_VISIBLE_DEVICES" ] && export CUDA_VISIBLE_DEVICES=$((SLOT % n))
    [ "$tool" = racecheck ] && set -- --kernel-name-exclude kns=copy_words_kernel "$@"
    timeout "$LIMIT" compute-sanitizer --tool "$tool" --error-exitcode 99 "$@" >"$log" 2>&1
    status=$? result=FAILED
    [ $status -eq 0 ] && grep -qE 'ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards' "$log" &&
        # without a GPU tests are skipped
        grep -qE '^# .*: [1-9][0-9]* passed, 0 failed, 0 skipped$' "$log" && result=clean
    echo "$result, $(($(date +%s) - start)) s, status $status: $log"
    exit 0
fi

if ! command -v compute-sanitizer >/dev/null 2>&1; then
    echo "skipped: compute-sanitizer not found; it comes with the CUDA toolkit (put its bin folder into PATH)"
    echo "# sanitizer: 0 passed, 0 failed, 1 skipped"
    exit 0
fi
{
    for model in micro-dense-f32 micro-dense-f16 micro-moe-f32 micro-moe-q8_0 micro-e-f32 micro-e-q8_0 tiny-dense-q4_k_m \
        tiny-moe-q4_k_m tiny-e-q4_k_m tiny-moe-q4_0; do echo "test_cuda $model"; done
    for op in matmul attend close sample expert_down head qkv_store expert_gate_up gate_up ple_inject kv_commit kv_copy route \
        logprob embed ple_rows gather_rows block_select attn_mass verify_walk head_centroid \
        clamp gelu_product layer_norm rope_2d attend_all pool; do echo "test_ops -cuda $op"; done
    for part in choice edges spread seen position; do echo "test_sampling -cuda $part"; done
    printf '%s\n' test_layout "test_ahead -cuda" "test_verify -few" "test_draft -few" \
        "test_ops -plain -few" "test_sampling -plain -few"
} | sed "s#^#$BUILD/#" >"$LOGS/programs"
[ $# -gt 0 ] || set -- racecheck memcheck initcheck
for tool in "$@"; do
    if [ "$tool" = memcheck ]; then cat "$LOGS/programs"
    else sed -E 's/test_(ops|sampling) -cuda/& -few/; s/test_cuda/& -few/' "$LOGS/programs"; fi | sed "s/^/$tool /"
done | xargs -P "$jobs" --process-slot-var=SLOT -L 1 "$0" -one | tee "$LOGS/results"
passed=$(grep -c '^clean' "$LOGS/results") failed=$(grep -vc '^clean' "$LOGS/results")
echo "# sanitizer: $passed passed, $failed failed, 0 skipped"
[ "$failed" -eq 0 ]
