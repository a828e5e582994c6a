#!/bin/sh
# The figures of README.md and docs that come from docs/receipts: they are those of the tables. tools/receipts.sh itself; and
# tests/bench_receipts.sh, whose runs are made tiny: every command line of every part is right, and parts continue.
# Environment: GEMMA4 (the binary, ./gemma4).
cd "$(dirname "$0")/.." || exit 1
. tests/harness.sh
gemma4=$(cd "$(dirname "$gemma4")" && pwd)/$(basename "$gemma4")
export GEMMA4="$gemma4"

tools/receipts.sh --check 2>"$tmp/err"
status=$?
ok "the figures in README.md and docs are those of docs/receipts: make receipts" [ "$status" -eq 0 ]

# ---- tools/receipts.sh ---------------------------------------------------------------
mkdir -p "$tmp/tree/docs/receipts"
printf '# a comment\nconfig,ctx,decode_tps,al\na.gguf n=4 tree=16,1024,1234.56,\na.gguf n=4,2048,12.345,2.5\nb.gguf n=4,65536,0.123456,1\n' \
    >"$tmp/tree/docs/receipts/t.csv"
page() { printf '%s\n' "# Title" "$@" "the end" >"$tmp/tree/docs/page.md"; }
receipts() {
    tools/receipts.sh "$@" "$tmp/tree" 2>"$tmp/err"
    status=$?
}
page "<!-- receipt t.csv ctx decode_tps al -->" "| old |" "<!-- end -->" "![](receipts/t.speed.svg)"
receipts --check
ok "a figure that differs: status 1" [ "$status" -eq 1 ]
ok "a figure that differs is named" grep -q 'docs/page.md differs from docs/receipts' "$tmp/err"
ok "a picture that is not there is named" grep -q 'docs/receipts/t.speed.svg differs' "$tmp/err"
ok "--check changes nothing" grep -q '^| old |$' "$tmp/tree/docs/page.md"
receipts
ok "written" [ "$status" -eq 0 ]
printf '%s\n' '| ctx | decode_tps | al |' '|---|---|---|' '| 1024 | 1235 |  |' '| 2048 | 12.35 | 2.50 |' '| 65536 | 0.123 | 1 |' >"$tmp/want"
sed -n '/^|/p' "$tmp/tree/docs/page.md" >"$tmp/got"
ok "the table" cmp -s "$tmp/want" "$tmp/got"
ok "the rest of the page stays" [ "$(sed '/^|/d; /^[<!]/d' "$tmp/tree/docs/page.md" | tr '\n' '/')" = "# Title/the end/" ]
receipts --check
ok "then nothing differs" [ "$status" -eq 0 ]
sed -i.old 's/1024,1234/1024,1334/' "$tmp/tree/docs/receipts/t.csv"
receipts --check
ok "a changed table differs" [ "$status" -eq 1 ]
page "<!-- receipt t.csv al config~n=4 config~a.gguf ctx=2048 -->" "<!-- end -->"
receipts
ok "rows are chosen by words and values" [ "$(grep -c '^| 2.50 |$' "$tmp/tree/docs/page.md")/$(grep -c '^|' "$tmp/tree/docs/page.md")" = 1/3 ]
page "<!-- receipt t.csv al config!tree=16 config~a.gguf -->" "<!-- end -->"
receipts
ok "rows are chosen by a word that they lack" [ "$(sed -n '/^|/p' "$tmp/tree/docs/page.md" | tr '\n' '/')" = "| al |/|---|/| 2.50 |/" ]
printf '"a","b"\n"x","1.5"\n' >"$tmp/tree/docs/receipts/quoted.csv"
printf 'a,b\n"x,y",1.5\n' >"$tmp/tree/docs/receipts/comma.csv"
page "<!-- receipt quoted.csv a b -->" "<!-- end -->"
receipts
ok "cells in quotes" grep -q '^| x | 1.50 |$' "$tmp/tree/docs/page.md"
for wrong in "t.csv nothing/it has no column nothing" "none.csv ctx/cannot be read" "comma.csv a/a row of 3 cells, expected 2" "t.csv ctx ctx=7/no row is chosen"; do
    page "<!-- receipt ${wrong%%/*} -->" "<!-- end -->"
    receipts
    ok "refused: ${wrong#*/}" grep -q "${wrong#*/}" "$tmp/err"
    ok "refused: ${wrong#*/}: status" [ "$status" -eq 1 ]
done
page "<!-- receipt t.csv ctx -->"
receipts
ok "refused: no end" grep -q 'a receipt without' "$tmp/err"

# ---- tests/bench_receipts.sh ---------------------------------------------------------
# Its models are the small one, and its lengths are cut by a program in place of gemma4.
mkdir "$tmp/models" "$tmp/bin"
for name in 26b-a4b 31b e2b e4b; do
    ln -s "$PWD/models/gemma4-mini-q8_0.gguf" "$tmp/models/$name-q4_k_m.gguf"
    ln -s "$PWD/models/gemma4-mini-mtp-q8_0.gguf" "$tmp/models/$name-mtp-q4_k_m.gguf"
    ln -s "$PWD/models/gemma4-mini-dflash-q8_0.gguf" "$tmp/models/$name-dflash-q8_0.gguf"
done
# fewer tokens; bench says that they were as many as asked for
cat >"$tmp/bin/gemma4" <<'END'
#!/bin/sh
[ "$1" != --version ] || exec "$GEMMA4_REAL" "$@"
verb=$1
before=
for word in "$@"; do
    shift
    case $verb$before in
    sweep-d) word=16 ;;
    sweep-n | bench-r) word=1 ;;
    niah-p) word=256 ;;
    bench-p) case $word in *,*) word=8,16 ;; *) word=16 ;; esac ;;
    esac
    set -- "$@" "$word"
    before=
    case $word in -?*) before=$word ;; esac
done
[ "$verb" != bench ] || { "$GEMMA4_REAL" "$@" -t 1 | sed -E '2,$s/^(([^,]*,){18})8,/\1512,/; 2,$s/^(([^,]*,){18})16,/\14096,/'; exit; }
exec "$GEMMA4_REAL" "$@" -t 1
END
chmod +x "$tmp/bin/gemma4"
bench() {
    GEMMA4_REAL=$gemma4 GEMMA4=$tmp/bin/gemma4 MODELS=$tmp/models OUT=$tmp/out tests/bench_receipts.sh "$@" >"$tmp/log" 2>"$tmp/err"
    status=$?
}
rm -rf "$tmp/out"
bench
ok "the parts are listed" [ "$(grep -c '' "$tmp/log")" -ge 12 ]
cut -d ' ' -f 1 "$tmp/log" | grep -v server >"$tmp/parts"
# shellcheck disable=SC2046  # names are words
bench $(cat "$tmp/parts")
ok "every command line of every part is right" [ "$status" -eq 0 ]
for table in 26b-long 31b-long draft-26b-code draft-26b-prose draft-31b-code draft-31b-prose ladder ablation e4b e2b trees-26b trees-31b; do
    ok "$table.csv: a table of sweep" grep -q '^config,arch,' "$tmp/out/$table.csv"
done
rows() { echo $(($(wc -l <"$tmp/out/$1.csv") - 1)); }
ok "26b-long: 3 + 2 + 1 curves" [ "$(rows 26b-long)" -eq 6 ]
ok "draft-26b: without and 4 settings" [ "$(rows draft-26b-code)" -eq 5 ]
ok "ablation: 3 + 1 + 3 + 2 + 2 settings" [ "$(rows ablation)" -eq 11 ]
ok "trees: 5 sizes" [ "$(rows trees-31b)" -eq 5 ]
ok "compress: three ways" [ "$(cut -d , -f 1 "$tmp/out/compress.csv" | tr '\n' ' ')" = "scores whole own scorer " ]
ok "speed: numbers for both prompts and for generation" [ "$(grep -cE '^[a-z0-9-]+(,[0-9.]+){6},,,,,,$' "$tmp/out/speed.csv")" -eq 4 ]
ok "speed-cpu: a test that did not run is an empty cell" [ "$(grep -cE '^[a-z0-9-]+(,(,[0-9.]+){2}){2},,,,,,$' "$tmp/out/speed-cpu.csv")" -eq 4 ]
ok "pflash-1m: a table of bench" grep -q '^model_filename,' "$tmp/out/pflash-1m.csv"
ok "a line for each part" [ "$(wc -l <"$tmp/out/runs.csv")" -eq "$(wc -l <"$tmp/parts")" ]     # not for beside
ok "beside: every row that was reported" [ "$(rows beside)" -eq "$(grep -cE '^(26B|31B) ' tests/bench_receipts.sh)" ]
before=$(cat "$tmp/out"/[!r]*.csv | cksum)
bench trees ladder compress
ok "a part that is complete changes nothing" [ "$(cat "$tmp/out"/[!r]*.csv | cksum)" = "$before" ]
bench nothing
ok "an unknown part is refused" [ "$status" -eq 1 ]
finish receipts
