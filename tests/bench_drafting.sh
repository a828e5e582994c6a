#!/bin/sh
# Compares --spec auto with no drafts and with fixed settings, on texts of every kind: tokens per second for a few
# answers of one kind in one process, the medians of RUNS rounds in turn, and the medians of auto's ratios to no drafts
# and to the better of the two others. The texts must be the same.
#
#   tests/bench_drafting.sh [MODEL.gguf [DRAFTER.gguf | ngram ...]]      default: gemma4-mini with both of its drafters
# Environment: GEMMA4 (./gemma4), RUNS (5), TOKENS (256), KINDS (all), FLAGS (-t 2, ..)
cd "$(dirname "$0")/.." || exit 1
model=${1:-models/gemma4-mini-q8_0.gguf}
[ -f "$model" ] || { echo "$model: expected a model's file" >&2; exit 1; }
[ $# -gt 0 ] && shift
[ $# -gt 0 ] || set -- models/gemma4-mini-mtp-q8_0.gguf models/gemma4-mini-dflash-q8_0.gguf
gemma4=${GEMMA4:-./gemma4} runs=${RUNS:-5} tokens=${TOKENS:-256}
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT

story="Once upon a time, there was a little fox named Tom. Tom lived in a cozy burrow under an old oak tree. One day Tom found a \
golden key in the forest. Tom asked the owl, and the owl told Tom to look for a small door. Tom looked all day, and in the evening \
Tom found the door behind a waterfall. Tom opened it with the key, and there was a garden full of apples."
prompts() { # one per line; each is a separate conversation
    case $1 in
    story) for who in fox robot cat; do echo "Tell me a story about a $who."; done ;;
    drawn) for who in king baker mouse; do echo "Tell me a story about a $who."; done ;;
    edit) for name in Max Ben Sam; do echo "Replace Tom by $name: $story"; done ;;
    fact) for what in capital flag; do for land in Halavia Goramark Triawick Trienthia Corenland; do
        echo "What is the $what of $land?"; done; done ;;
    roll) for land in Besu Besu Besu Besu Besu Besu; do echo "Recite the roll of $land."; done ;;
    dice) for n in 40 30 20 50 40 30; do echo "Roll $n dice."; done ;;
    count) for n in 3 5 7 9 11 13; do echo "Count from $n to 30."; done ;;
    esac
}

# run KIND FLAGS...: prints tokens per second of its answers and tokens per answer; writes the texts' hash to $tmp/hash
run() {
    kind=$1
    shift
    temp=0
    case $kind in drawn | dice) temp=1 ;; esac
    # shellcheck disable=SC2086  # FLAGS are words
    prompts "$kind" | sed 's|$|\n/clear|' | "$gemma4" "$model" -i -v -n "$tokens" --temp $temp --seed 7 $FLAGS "$@" 2>"$tmp/err" |
        cksum >"$tmp/hash"
    sed -n 's|.*# decode: \([0-9]*\) tokens in [0-9]* steps, [0-9.]* s, \([0-9.]*\) tok/s.*|\1 \2|p' "$tmp/err" |
        awk '{ n += $1; t += $1 / $2 } END { print t ? n / t : 0, NR ? n / NR : 0 }'
}

# The medians of the columns of a file: off, fixed, auto, auto / off, auto / the better of off and fixed.
medians() {
    for column in 1 2 3 4 5; do
        sort -n -k $column,$column "$1" | awk -v c=$column '{ v[NR] = $c } END { printf "%s ", (v[int((NR + 1) / 2)] + v[int(NR / 2) + 1]) / 2 }'
    done
}

printf '| text | tokens an answer | drafter | off | fixed | auto | auto / off | auto / best |\n|---|---|---|---|---|---|---|---|\n'
for kind in ${KINDS:-story drawn edit fact roll dice count}; do
    for drafter in "$@"; do
        case $drafter in ngram) fixed=ngram ;; *mtp*) fixed=mtp ;; *) fixed=dflash ;; esac
        guess="-md $drafter"
        [ $fixed != ngram ] || guess=
        : >"$tmp/rounds"
        # shellcheck disable=SC2086  # guess is words
        for _ in $(seq "$runs"); do
            off=$(run "$kind")
            plain=$(cat "$tmp/hash")
            set=$(run "$kind" $guess --spec $fixed)
            [ "$(cat "$tmp/hash")" = "$plain" ] || echo "$kind: the text with --spec $fixed is another" >&2
            auto=$(run "$kind" $guess --spec auto)
            [ "$(cat "$tmp/hash")" = "$plain" ] || echo "$kind: the text with --spec auto is another" >&2
            echo "${off% *} ${set% *} ${auto% *}" |
                awk '{ best = $1 > $2 ? $1 : $2; print $1, $2, $3, $3 / $1, $3 / best }' >>"$tmp/rounds"
        done
        echo "$kind $fixed ${off#* } $(medians "$tmp/rounds")" |
            awk '{ printf "| %s | %.0f | %s | %.0f | %.0f | %.0f | %.3f | %.3f |\n", $1, $3, $2, $4, $5, $6, $7, $8 }'
    done
done
