#!/bin/sh
# What --spec auto makes of texts of every kind, beside no guesses and fixed settings: tokens a second of the answer, the best of
# RUNS runs in turn, and how auto compares with no guesses and with the best of the others. The text must be the same.
#
#   tests/bench_drafting.sh [MODEL.gguf [DRAFTER.gguf ...]]      default: gemma4-mini with both of its drafters
# Environment: GEMMA4 (./gemma4), RUNS (3), TOKENS (256), FLAGS (-t 2, ..)
cd "$(dirname "$0")/.." || exit 1
model=${1:-models/gemma4-mini-q8_0.gguf}
[ $# -gt 0 ] && shift
[ $# -gt 0 ] || set -- models/gemma4-mini-mtp-q8_0.gguf models/gemma4-mini-dflash-q8_0.gguf
gemma4=${GEMMA4:-./gemma4} runs=${RUNS:-3} tokens=${TOKENS:-256}
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT

story="Once upon a time, there was a little fox named Tom. Tom lived in a cozy burrow under an old oak tree. One day Tom found a \
golden key in the forest. Tom asked the owl, and the owl told Tom to look for a small door. Tom looked all day, and in the evening \
Tom found the door behind a waterfall. Tom opened it with the key, and there was a garden full of apples."
prompt() {
    case $1 in
    story) echo "Tell me a story about a fox." ;;
    drawn) echo "Tell me a story about a king." ;;
    edit) printf 'Replace Tom by Max:\n%s' "$story" ;;
    fact) echo "What is the capital of Halavia?" ;;
    roll) echo "Recite the roll of Besu." ;;
    dice) echo "Roll 40 dice." ;;
    count) echo "Count from 3 to 18." ;;
    esac
}

# run KIND FLAGS...: tokens a second on stdout; the text's hash in $tmp/hash
run() {
    kind=$1
    shift
    temp=0
    case $kind in drawn | dice) temp=1 ;; esac
    # shellcheck disable=SC2086  # FLAGS are words
    prompt "$kind" | "$gemma4" "$model" -f - -n "$tokens" --temp $temp --seed 7 $FLAGS "$@" 2>"$tmp/err" | cksum >"$tmp/hash"
    sed -n 's|^# decode: .* s, \([0-9.]*\) tok/s.*|\1|p' "$tmp/err"
}

better() { awk -v a="$1" -v b="$2" 'BEGIN { print a + 0 > b + 0 ? a : b }'; }

printf '| text | drafter | off | fixed | auto | auto / off | auto / best |\n|---|---|---|---|---|---|---|\n'
for kind in story drawn edit fact roll dice count; do
    for drafter in "$@"; do
        case $drafter in *mtp*) fixed="mtp" ;; *) fixed="dflash" ;; esac
        off=0 set=0 auto=0
        for _ in $(seq "$runs"); do
            off=$(better "$off" "$(run "$kind")")
            plain=$(cat "$tmp/hash")
            set=$(better "$set" "$(run "$kind" -md "$drafter" --spec $fixed)")
            [ "$(cat "$tmp/hash")" = "$plain" ] || echo "$kind: the text with --spec $fixed is another" >&2
            auto=$(better "$auto" "$(run "$kind" -md "$drafter")")
            [ "$(cat "$tmp/hash")" = "$plain" ] || echo "$kind: the text with --spec auto is another" >&2
        done
        awk -v k="$kind" -v d="$fixed" -v off="$off" -v set="$set" -v auto="$auto" 'BEGIN {
            best = off > set ? off : set
            printf "| %s | %s | %.0f | %.0f | %.0f | %.2f | %.2f |\n", k, d, off, set, auto, auto / off, auto / best }'
    done
done
