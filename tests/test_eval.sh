#!/bin/sh
# The small models answer held-out questions: the short form of tests/eval_mini.sh for both of them.
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
finish "eval of both models"
