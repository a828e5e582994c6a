#!/bin/sh
# Measures what a small model can do: facts, arithmetic, tasks, tools, edits, needles, losses. See tests/eval_mini.c.
#
#   tests/eval_mini.sh [MODEL.gguf] [--short] [--at-least PERCENT] ..   default: the mini; takes minutes, with --short less than one
#
# Environment: BUILD (build: where make put eval_mini).
cd "$(dirname "$0")/.." || exit 1
BUILD=${BUILD:-build}
[ -n "$OMP_WAIT_POLICY" ] || export OMP_WAIT_POLICY=passive
if [ ! -x "$BUILD/eval_mini" ]; then
    echo "eval_mini.sh: $BUILD/eval_mini is not there; try make test-programs" >&2
    exit 1
fi
model=models/gemma4-mini-q8_0.gguf
case ${1:-} in
'' | -*) ;;
*) model=$1; shift ;;
esac
exec "$BUILD/eval_mini" "$@" "$model"
