#!/bin/sh
# Measures what gemma4-mini sees: draws pictures that its image tower was not trained on, asks gemma4 about each of them in question
# forms that the training left out, and prints how many answers are right for each kind of question, with the 95 % interval in per
# cent (Wilson). An answer is right if it is the expected text.
#
#   tests/eval_see.sh DIR [FLAGS ..]      DIR has pictures and questions.txt; without them: 100 pictures are written there.
#                                         Flags for gemma4: --image-tokens 70
#
# More pictures, of one kind or with other sizes: python3 tools/pictures.py --out DIR --n 300 --kind one --size 320x200
# Environment: GEMMA4 (./gemma4), MMPROJ (the tower of models/), PYTHON (python3, with PyTorch). 280 tokens take half a second of
# one core for each question.
cd "$(dirname "$0")/.." || exit 1
dir=$1
[ -n "$dir" ] || { sed -n '2,12s/^# \{0,1\}//p' "$0" >&2; exit 1; }
shift
gemma4=${GEMMA4:-./gemma4} mmproj=${MMPROJ:-models/gemma4-mini-mmproj-f16.gguf}
if [ ! -f "$dir/questions.txt" ]; then
    "${PYTHON:-python3}" tools/pictures.py --out "$dir" --n 100 --seed 2 --size 256x256 || exit 1
fi
while IFS='|' read -r picture kind question answer; do
    got=$("$gemma4" models/gemma4-mini-q8_0.gguf --mmproj "$mmproj" --image "$dir/$picture" -p "$question" --temp 0 -n 32 "$@" \
        2>"$dir/err" </dev/null) || { cat "$dir/err" >&2; exit 1; }
    [ "$got" = "$answer" ] || echo "$picture: $question $answer GOT $got" >&2
    [ "$got" = "$answer" ]
    echo "$kind|$?"
done <"$dir/questions.txt" >"$dir/results.txt" || exit 1
awk -F'|' '
    function line(name, k, n,   z, p, middle, half) {
        z = 1.96; p = k / n
        middle = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z * sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
        printf "| %s | %d of %d | %.1f .. %.1f |\n", name, k, n, 100 * (middle - half), 100 * (middle + half)
    }
    { if (!n[$1]++) kinds[++m] = $1; right[$1] += $2 == 0 }
    END {
        print "| question | right | 95 % interval |"; print "|---|---|---|"
        for (i = 1; i <= m; i++) line(kinds[i], right[kinds[i]], n[kinds[i]])
        exit m == 0
    }' "$dir/results.txt"
