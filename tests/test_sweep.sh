#!/bin/sh
# gemma4 sweep: the columns, a row for each combination, resuming, refusals. On the small model, whose times mean nothing.
# Environment: GEMMA4 (the binary, ./gemma4).
cd "$(dirname "$0")/.." || exit 1
. tests/harness.sh
m=models/gemma4-mini-q8_0.gguf mtp=models/gemma4-mini-mtp-q8_0.gguf dflash=models/gemma4-mini-dflash-q8_0.gguf csv=$tmp/sweep.csv
columns=config,arch,draft,kv_k,kv_v,ctx,dm,wall_s,prefill_ms,prefill_tps,decode_ms,decode_tps,al,accept_rate,first_tok_ms,vram_peak_gb,\
avg_power_w,total_energy_j,prefill_energy_j,decode_energy_j,decode_j_per_tok
cell() { # cell FILE ROW NAME: a cell of the table; rows count from 1
    awk -F, -v row="$2" -v name="$3" 'NR == 1 { for (i = 1; i <= NF; i++) if ($i == name) at = i } NR == row + 1 { print $at }' "$1"
}
is() { # is NAME GOT WANTED
    check "$([ "$2" = "$3" ]; echo $?)" "$1: expected '$3', got '$2'"
}
sweep() { run sweep "$m" -t 2 -n 4 "$@"; }

sweep -md none,$mtp,$dflash --draft-max 2,16 --tree 0,16 -d 80 -o "$csv"
is "the columns" "$(head -n 1 "$csv")" "$columns"
# 1 without a draft model, 2 x 2 with MTP, 2 with DFlash, which drafts at most 15 tokens
is "a row for each combination" "$(wc -l <"$csv" | tr -d ' ')" 8
is "rows that cannot be measured are named" "$(grep -c '^# left out: .*drafts at most 15 tokens' "$tmp/err")" 2
is "every row has every cell" "$(awk -F, '{ print NF }' "$csv" | sort -u)" 21
is "a row without a draft model" "$(cell "$csv" 1 draft)/$(cell "$csv" 1 dm)/$(cell "$csv" 1 al)/$(cell "$csv" 1 ctx)" "none///80"
is "80 tokens in prefill_ms" "$(awk -v ms="$(cell "$csv" 1 prefill_ms)" -v tps="$(cell "$csv" 1 prefill_tps)" 'BEGIN { printf "%.0f", ms * tps / 1000 }')" 80
is "4 tokens in decode_ms" "$(awk -v ms="$(cell "$csv" 1 decode_ms)" -v tps="$(cell "$csv" 1 decode_tps)" 'BEGIN { printf "%.0f", ms * tps / 1000 }')" 4
if [ "$("$gemma4" plan "$m" | grep -c '^card')" -eq 0 ]; then
    is "without a GPU energy and memory are not known" "$(cell "$csv" 1 vram_peak_gb)$(cell "$csv" 1 total_energy_j)$(cell "$csv" 1 decode_j_per_tok)" ""
fi
is "trees are in the column config" "$(grep -c 'tree=16' "$csv")" 3

cp "$csv" "$tmp/part.csv"
sweep -ctk f16,q8_0 -d 0,80 -o "$tmp/part.csv"
ok "resumes: the rows that were missing" grep -qx '# 3 rows measured, 1 were there already' "$tmp/err"
is "resumes: the old ones as they were" "$(head -n 8 "$tmp/part.csv" | cksum)" "$(cksum <"$csv")"
is "no prompt, no time for it" "$(cell "$tmp/part.csv" 8 ctx)$(cell "$tmp/part.csv" 8 prefill_ms)$(cell "$tmp/part.csv" 8 first_tok_ms)" 0
refused() { # refused TEXT ARGUMENTS: exit status 1 and one line that contains the text
    why=$1
    shift
    run "$@"
    check "$([ "$status" -eq 1 ] && [ "$(wc -l <"$tmp/err")" -eq 1 ] && grep -qF -e "$why" "$tmp/err"; echo $?)" "refused '$why': $(cat "$tmp/err")"
}
refused "row 1: expected rows of gemma4-mini-e-q8_0.gguf" sweep models/gemma4-mini-e-q8_0.gguf -o "$csv"
echo "a,b" >"$tmp/other.csv"
refused "a table with other columns" sweep $m -o "$tmp/other.csv"
printf '%s\n"a' "$columns" >"$tmp/open.csv"
refused "a quote is missing" sweep $m -o "$tmp/open.csv"
printf '%s' "$(cat "$csv")" >"$tmp/cut.csv"
refused "a line break at its end" sweep $m -o "$tmp/cut.csv"
refused "--draft-max: expected integers from 1 to 63" sweep $m -md $mtp --draft-max 64
refused "--draft-max needs a draft model" sweep $m --draft-max 2
refused "--tree: expected integers from 0 to 63" sweep $m -md $mtp --tree 99
refused "--spec-force: expected a draft model" sweep $m --spec-force 0.5
refused "-ctk: expected f16|" sweep $m -ctk q9
refused "-f: expected a text of at least 50000 tokens" sweep $m -d 50000 -f README.md -n 1
refused "cannot write" sweep $m -o /nowhere/x.csv

sweep -md $mtp --spec-force 1,0 --draft-max 3 -d 70 --fill random -ctk tq3
is "forced: a row on standard output" "$(wc -l <"$tmp/out" | tr -d ' ')" 2
is "forced: 2 tokens a step, a third of the drafts" "$(cell "$tmp/out" 1 al)/$(cell "$tmp/out" 1 accept_rate)" "2/0.333333"
is "random fill: no time for the prompt" "$(cell "$tmp/out" 1 prefill_ms)$(cell "$tmp/out" 1 first_tok_ms)" ""
ok "random fill: the column config says so" grep -q '^gemma4-mini-q8_0.gguf n=4 fill=random force=1/0 ' "$tmp/out"
run bench $m -md $mtp --spec-force 1,0 --draft-max 3 --tree 16 -p 0 -n 4 -r 1 -o csv
is "bench --tree: as many tokens a step" "$(tail -n 1 "$tmp/out" | grep -c ',3,16,2,')" 1
refused "--tree needs --spec-force" bench $m -md $mtp --tree 16 -n 4 -r 1
refused "--tree: expected at least --draft-max" bench $m -md $mtp --spec-force 1 --draft-max 8 --tree 4 -n 4 -r 1


# ---- gemma4 plot ---------------------------------------------------------------------
awk -v head="$columns" 'BEGIN {
    print head
    for (k = 0; k < 2; k++) for (dm = 0; dm <= 4; dm += 4) for (ctx = 1024; ctx <= 2097152; ctx *= 2)
        printf "\"a.gguf n=4 \"\"<&>\"\"\",A <b>,%s,%s,f16,%d,%s,1,2,%d,3,%d,,%s,2,%g,4,5,1,4,%g\n", dm ? "d.gguf" : "none", k ? "tq3" : "f16", ctx,
            dm ? dm : "", 9000 - ctx / 300, 400 - ctx / 6000 + 50 * dm, dm ? 0.5 : "", 16 + ctx / 1e5, 1 + ctx / 1e6 - k / 5 }' >"$tmp/t.csv"
plot() { # plot KIND FILE: draws $tmp/out
    # shellcheck disable=SC2086  # none for ""
    run plot "$2" ${1:+--kind $1}
    is "plot $1: exit status" "$status" 0
    is "plot $1: one picture, 600 pixels wide" "$(grep -c 'viewBox="0 0 600 [0-9]*"' "$tmp/out")$(tail -n 1 "$tmp/out")" "1</svg>"
    # No text leaves the picture or touches the next one on its line, at 7 pixels a letter.
    is "plot $1: texts apart" "$(sed -n 's/^\(<g [^>]*>\)*<text x="\([0-9.]*\)" y="\([0-9.]*\)" font-size="1[2-9]" text-anchor="\([a-z]*\)">\(.*\)<\/text>$/\2 \3 \4 \5/p' "$tmp/out" |
        sed 's/&#[0-9]*;/x/g' | awk '{ text = $0; sub(/^[^ ]* [^ ]* [^ ]* /, "", text); n = 6.5 * length(text)
            from = $3 == "end" ? $1 - n : $3 == "middle" ? $1 - n / 2 : $1
            if (from < 0 || from + n > 600) print "outside: " text
            print > "/dev/null"; printf "%s %s %s\n", $2, from, from + n > "'"$tmp"'/places" }')" ""
    is "plot $1: texts do not overlap" "$(sort -k1,1n -k2,2n "$tmp/places" | awk '$1 == y && $2 < end { print } { y = $1; end = $3 }')" ""
}
for kind in speed prompt energy memory acceptance drafts pareto; do plot $kind "$tmp/t.csv"; done
plot "" "$tmp/t.csv"
ok "plot: the speed by context, if there are several" grep -q '>generated tokens per second</text>' "$tmp/out"
ok "plot: a log scale that says so" grep -q '>context, tokens (log scale)</text>' "$tmp/out"
is "plot: a point for each row" "$(grep -cE '<circle|fill="#[0-9A-F]*"/>' "$tmp/out")" 52
is "plot: 1K and 1M, where 11 octaves lie between 2M and 1K" "$(sed -n 's/.*x="\([0-9.]*\)" .*>\(1K\|1M\|2M\)<.*/\2 \1/p' "$tmp/out" |
    awk '{ at[$1] = $2 } END { printf "%.2f", (at["1M"] - at["1K"]) / (at["2M"] - at["1K"]) }')" 0.91
is "plot: curves are named by what differs" "$(sed -n 's/^<text x="[0-9]*.0".*>\(.*cache.*\)<\/text>$/\1/p' "$tmp/out" | tr '\n' '|')" \
    "no draft model, cache f16|d, draft 4, cache f16|no draft model, cache tq3, V f16|d, draft 4, cache tq3, V f16|"
ok "plot: names are texts, not markup" grep -q 'A &#60;b&#62;, .*&#34;&#60;&#38;&#62;&#34;' "$tmp/out"
printf 'length,depth,needles,asked,right\n1024,0,1,4,4\n1024,100,1,4,0\n65536,0,1,4,1\n# a comment\n65536,100,1,4,2\n65536,100,1,4,2\n' >"$tmp/n.csv"
plot "" "$tmp/n.csv"
is "plot: a heat map" "$(sed -n 's/^<g .*>\([0-9]*\)<\/text>$/\1/p' "$tmp/out" | tr '\n' ' ')" "100 0 25 50 0 25 50 75 100 "
ok "plot: tokens of the texts" grep -q '>64K</text>' "$tmp/out"
{ echo ctx,decode_tps; for ctx in 1024 1100 1200 1300 20000 65536 66000 70000 1048576; do echo "$ctx,5"; done; } >"$tmp/near.csv"
plot speed "$tmp/near.csv"
ok "plot: contexts that are near each other share a mark" [ "$(grep -c '>[0-9.]*[KM]</text>' "$tmp/out")" -eq 4 ]
printf 'config,ctx,decode_tps\na,1024,5\na,2048,4\na tree=16,1024,6\na tree=16,2048,5\n' >"$tmp/two.csv"
plot speed "$tmp/two.csv"
is "plot: a curve without words of its own has a name" "$(sed -n 's/^<text x="[0-9]*.0".*>\(default\|tree=16\)<\/text>$/\1/p' "$tmp/out" | tr '\n' ' ')" \
    "default tree=16 "
run plot "$tmp/n.csv" -o "$tmp/n.svg"
ok "plot -o: the file" grep -q '</svg>' "$tmp/n.svg"
printf '%s\n' "$columns" >"$tmp/empty.csv"
refused "--kind memory: expected rows with numbers" plot "$csv" --kind memory
refused "expected a table of gemma4 sweep" plot "$tmp/empty.csv"
refused "plot: $tmp/none.csv" plot "$tmp/none.csv"
: >"$tmp/nothing.csv"
refused "got an empty file" plot "$tmp/nothing.csv"
printf 'ctx,decode_tps\n1,2\n2,x\n' >"$tmp/bad.csv"
refused "row 2: decode_tps: expected a number, got 'x'" plot "$tmp/bad.csv"
printf 'ctx,decode_tps\n1,2\n2,1e300\n' >"$tmp/bad.csv"
refused "expected numbers from 0 to 1e+12" plot "$tmp/bad.csv"
printf 'ctx,decode_tps\n1,2,3\n' >"$tmp/bad.csv"
refused "row 1: expected 2 cells, as the first line has, got 3" plot "$tmp/bad.csv"
printf 'length,depth,right\n1,2,3\n' >"$tmp/bad.csv"
refused "expected a column 'asked'" plot "$tmp/bad.csv"
refused "--kind: expected heat|speed" plot "$csv" --kind pie
finish sweep
