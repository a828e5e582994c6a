#!/bin/sh
# The small models answer held-out questions: the short form of tests/eval_mini.sh for both of them. The quality of each
# cache type stays within its limits: the short form of tests/coherence.sh; with LONG=1 for every type.
cd "$(dirname "$0")/.." || exit 1
. tests/harness.sh
measure() { # measure MODEL PERCENT
    echo "$1"
    out=$(tests/eval_mini.sh "$1" --short --at-least "$2")
    status=$?
    echo "$out"
    line=$(echo "$out" | grep '^# eval: ')
    [ -n "$line" ] || line="# eval: 0 passed, 1 failed"
    # shellcheck disable=SC2046  # the numbers are words
    set -- $(echo "$line" | tr -cd '0-9 ')
    [ "$status" -eq 0 ] || [ "$2" -gt 0 ] || set -- "$1" 1
    passed=$((passed + $1)) failed=$((failed + $2))
}
measure models/gemma4-mini-q8_0.gguf 95
measure models/gemma4-mini-e-q8_0.gguf 95
row() { # row MODEL TYPES [-- FLAGS]: one case
    model=$1 types=$2
    shift 2
    GEMMA4=$gemma4 tests/coherence.sh --short --types "$types" "models/$model.gguf" "$@" >"$tmp/out" 2>"$tmp/err"
    status=$?
    cat "$tmp/out"
    ok "coherence of $model with a cache of $types $*" [ $status -eq 0 ]
    ok "coherence of $model with a cache of $types $*: a row for each" \
        [ "$(grep -c "^| $model | " "$tmp/out")" -eq "$(echo "$types" | wc -w)" ]
}
every="f16 bf16 q8_0 q4_0 tq4 tq3"
if [ "${LONG:-0}" = 0 ]; then
    row gemma4-mini-e-q8_0 tq3                     # the questions above used f16
else
    row gemma4-mini-q8_0 "$every"
    row gemma4-mini-e-q8_0 "$every"
    row gemma4-mini-q8_0 tq3 -- --kv-tail 64 --kv-swa q8_0
    row gemma4-mini-q8_0 "q8_0 tq3" -- --kv-layout untied
fi
finish "eval of both models"
