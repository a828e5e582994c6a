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
finish sweep
