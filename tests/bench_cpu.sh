#!/bin/sh
# Times a model on this machine: prompt and decode tok/s, minimum and median of three runs.
#
#   tests/bench_cpu.sh [MODEL.gguf] [gemma4 flags ...]       example: tests/bench_cpu.sh model.gguf -t 8
#
# Each run processes one prompt of about 400 words and generates 128 tokens greedily; the numbers are those of the
# engine's statistics line on stderr. Environment: GEMMA4 (./gemma4), RUNS (3).
here=$(cd "$(dirname "$0")/.." && pwd) || exit 1
gemma4=${GEMMA4:-$here/gemma4}
model=${1:-$here/models/gemma4-mini-q8_0.gguf}
[ $# -eq 0 ] || shift
runs=${RUNS:-3}
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT

i=0
while [ $i -lt 40 ]; do
    printf 'One day the small fox walked over the hill %d. ' $i
    i=$((i + 1))
done >"$tmp/prompt.txt"

# Prints the first "<number> tok/s" after the word $1 in a statistics line.
speed() {
    awk -v word="$1" '/^# / && (at = index($0, word)) {
        rest = substr($0, at)
        if (match(rest, /[0-9.]+ tok\/s/)) { value = substr(rest, RSTART, RLENGTH - 6) }
    } END { print value }' "$tmp/stats.txt"
}

i=0
while [ $i -lt "$runs" ]; do
    if ! "$gemma4" "$model" -f "$tmp/prompt.txt" -n 128 --temp 0 --ignore-eos "$@" >/dev/null 2>"$tmp/stats.txt"; then
        cat "$tmp/stats.txt" >&2
        exit 1
    fi
    speed prompt >>"$tmp/prompt"
    speed decode >>"$tmp/decode"
    i=$((i + 1))
done
echo "$model, $(uname -m), $runs runs, 128 tokens"
for what in prompt decode; do
    sort -n "$tmp/$what" | awk -v what=$what '{ v[NR] = $1 }
        END { printf "  %s tok/s   min %8.1f   median %8.1f\n", what, v[1], v[int((NR + 1) / 2)] }'
done
