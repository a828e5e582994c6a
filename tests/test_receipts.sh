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
for wrong in "t.csv nothing/it has no column nothing" "none.csv ctx/cannot be read" "t.csv ctx ctx=7/no row is chosen"; do
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
cat >"$tmp/bin/gemma4" <<'END'
#!/bin/sh
[ "$1" != --version ] || exec "$GEMMA4_REAL" "$@"
verb=$1
before=
for word in "$@"; do
    shift
    case $verb$before in
    sweep-d) word=16 ;;
    sweep-n) word=1 ;;
    niah-p) word=256 ;;
    esac
    set -- "$@" "$word"
    before=
    case $word in -?*) before=$word ;; esac
done
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
for table in 26b-long 31b-long draft-26b draft-31b ladder ablation e4b e2b trees-26b trees-31b; do
    ok "$table.csv: a table of sweep" grep -q '^config,arch,' "$tmp/out/$table.csv"
done
rows() { echo $(($(wc -l <"$tmp/out/$1.csv") - 1)); }
# the draft lengths once for code and once for prose
ok "26b-long: 3 + 1 curves" [ "$(rows 26b-long)" -eq 4 ]
ok "draft-26b: 1 + 8 settings" [ "$(rows draft-26b)" -eq 9 ]
ok "ablation: 3 + 1 + 3 + 2 + 2 settings" [ "$(rows ablation)" -eq 11 ]
ok "trees: 5 sizes" [ "$(rows trees-31b)" -eq 5 ]
ok "compress: three tables of niah" [ "$(head -qn 1 "$tmp/out"/compress-*.csv | grep -c '^length,depth,')" -eq 3 ]
ok "a line for each part" [ "$(wc -l <"$tmp/out/runs.csv")" -eq $(($(wc -l <"$tmp/parts") + 1)) ]
before=$(cat "$tmp/out"/[!r]*.csv | cksum)
bench trees ladder compress
ok "a part that is complete changes nothing" [ "$(cat "$tmp/out"/[!r]*.csv | cksum)" = "$before" ]
bench nothing
ok "an unknown part is refused" [ "$status" -eq 1 ]
finish receipts
