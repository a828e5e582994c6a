#!/bin/sh
# Measures how much quality each type of the KV cache costs the small models: a table with one row per model and type,
# and limits.
#
#   tests/coherence.sh [--short] [--types "f16 q8_0 tq3"] [MODEL.gguf ..] [-- FLAGS]     both models, every type; minutes each
#
# Perplexity of held-out documents and stories, KL divergence from an f16 cache and greedy tokens that stay the same
# (gemma4 ppl); questions after facts, memorised lists, edits that repeat a text exactly, codes in 1K to 16K ids of
# text, sampled texts that are valid UTF-8 and do not loop (eval_mini). FLAGS are cache flags for all types: --kv-tail
# 128, --kv-swa q8_0, --kv-layout untied. --short: fewer items, and codes in 1K ids only. Prints a line "FAILED: .." for
# each row that is below the limit of its type; then the exit status is 1.
# Environment: GEMMA4 (./gemma4), BUILD (build: where make put eval_mini).
cd "$(dirname "$0")/.." || exit 1
gemma4=${GEMMA4:-$PWD/gemma4} build=${BUILD:-build}
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
short='' types="f16 bf16 q8_0 q4_0 tq4 tq3" models='' lengths="1024 2048 4096 8192 16384" size="-c 2048"
while [ $# -gt 0 ]; do
    case $1 in
    --short) short=--short lengths=1024 size="-c 512 --chunks 12" ;;
    --types) types=$2 && shift ;;
    --) shift && break ;;
    -*) echo "coherence.sh: $1: expected --short, --types or -- before flags of the cache" >&2 && exit 1 ;;
    *) models="$models $1" ;;
    esac
    shift
done
[ -n "$models" ] || models="models/gemma4-mini-q8_0.gguf models/gemma4-mini-e-q8_0.gguf"
for program in "$gemma4" "$build/eval_mini"; do
    [ -x "$program" ] || { echo "coherence.sh: $program is not there; try make all test-programs" >&2 && exit 1; }
done

# Held-out documents of every kind, with their markup, then stories.
awk '/^\[/ { doc = $0 ~ /^\[loss /; inside = $0 == "[haystack]"; fresh = 1; next }
     { gsub(/\\n/, "\n"); gsub(/\\t/, "\t") }
     doc { printf "%s", $0 }
     inside { printf "%s%s", fresh ? "" : " ", $0; fresh = /\n$/ }' tests/eval_mini.txt >"$tmp/text"

field() { # field NAME: a field of the JSON line in $tmp/ppl
    sed -nE "s/.*\"$1\": ([^,}]*)[,}].*/\1/p" "$tmp/ppl"
}
share() { # share KIND..: right answers "of" items, summed over the kinds
    awk -v kinds="$*" 'BEGIN { n = split(kinds, kind, "/") }
        { for (i = 1; i <= n; i++) if (index($0, kind[i]) == 1) { rest = substr($0, 25); split(rest, v, " "); items += v[1]; right += v[2] } }
        END { printf "%d of %d", right, items }' "$tmp/eval"
}
least() { # least RIGHT "of" ITEMS PERCENT
    [ $((100 * $1)) -ge $(($4 * $3)) ] && [ "$3" -gt 0 ]
}
set_texts() { # set_texts UTF-8 "of" TEXTS, LOOPS "loop"
    n_utf8=$1 n_texts=${3%,} n_loops=$4
    [ $# -eq 5 ]
}
status=0
fail() {
    echo "FAILED: $*"
    status=1
}

printf '| model | cache | PPL | KL divergence | 99 %% | same top token | facts | rolls | edits |'
for n in $lengths; do printf ' codes in %d |' "$n"; done
printf ' texts |\n| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |'
for n in $lengths; do printf ' ---: |'; done
printf ' ---: |\n'
for model in $models; do
    # shellcheck disable=SC2086  # size and flags are words
    "$gemma4" ppl "$model" -f "$tmp/text" --special $size --kld-base "$tmp/base" >"$tmp/ppl" 2>"$tmp/err" ||
        { sed 's/^/    /' "$tmp/err" && fail "$model: ppl" && continue; }
    name=${model##*/}
    for type in $types; do
        row="${name%.gguf}, -ctk $type $*"
        # shellcheck disable=SC2086
        "$gemma4" ppl "$model" -f "$tmp/text" --special $size --kld "$tmp/base" -ctk "$type" "$@" -o jsonl >"$tmp/ppl" 2>"$tmp/err" ||
            { sed 's/^/    /' "$tmp/err" && fail "$row: ppl" && continue; }
        # shellcheck disable=SC2086
        "$build/eval_mini" $short --at-least 0 --kinds facts,roll,edit,needles,texts -ctk "$type" "$@" "$model" >"$tmp/eval" 2>&1 ||
            { sed 's/^/    /' "$tmp/eval" && fail "$row: eval_mini" && continue; }
        same=$(field same_top) facts=$(share 'facts ') rolls=$(share 'roll ') edits=$(share 'edit ')
        texts=$(sed -nE 's/^texts: ([0-9]+) of ([0-9]+) are UTF-8, ([0-9]+) loop.*/\1 of \2, \3 loop/p' "$tmp/eval")
        printf '| %s | %s | %.4f | %.2e | %.2e | %.2f %% | %s | %s | %s |' "${name%.gguf}" "$type${1:+ $*}" \
            "$(field ppl)" \
            "$(field kld_mean)" "$(field kld_99)" "$(awk "BEGIN { print 100 * $same }")" "$facts" "$rolls" "$edits"
        for n in $lengths; do printf ' %s |' "$(share "needle $n, 1 key /needle $n, 4 keys")"; done
        printf ' %s |\n' "$texts"

        # Limits of a type: largest divergence, least percentage of unchanged greedy tokens and of right answers.
        case $type in
        f16) far=4e-8 stay=100 right=87 ;;
        f32 | bf16 | q8_0) far=2e-4 stay=99 right=87 ;;
        q4_0 | tq4) far=1e-3 stay=98 right=87 ;;
        *) far=4e-3 stay=96 right=80 ;;
        esac
        [ $# -eq 0 ] || far=2e-2 stay=94               # FLAGS may cost more
        awk "BEGIN { exit !($(field kld_mean) <= $far) }" ||
            fail "$row: expected a divergence of at most $far from an f16 cache, got $(field kld_mean)"
        awk "BEGIN { exit !($same * 100 >= $stay - 1e-6) }" || fail "$row: expected $stay % of first choices to stay, got $same"
        # shellcheck disable=SC2086  # three words
        for answers in "$facts" "$rolls" "$edits" "$(share "needle 1024, 1 key /needle 1024, 4 keys")"; do
            least $answers $right || fail "$row: expected $right % of facts, rolls, edits and codes in 1024 ids right, got $answers"
        done
        # shellcheck disable=SC2086,SC2015  # "4 of 4, 0 loop"
        set_texts $texts && [ "$n_texts" -gt 0 ] && [ "$n_utf8" = "$n_texts" ] && [ "$n_loops" = 0 ] ||
            fail "$row: expected texts that are UTF-8 and do not loop, got '$texts'"
    done
done
exit $status
