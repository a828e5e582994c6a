#!/bin/sh
# gemma4 eval: the prompts of tests/prompts.jsonl, which the small models can answer. The texts are equal without drafts and with MTP,
# DFlash, trees, n-grams and auto; rows are kept and continued; files of other runs and bad lines are refused with one line.
# With LONG=1: all prompts, both models, sampling too.
cd "$(dirname "$0")/.." || exit 1
. tests/harness.sh
mini=models/gemma4-mini
prompts=tests/prompts.jsonl
few=7
[ "${LONG:-0}" = 0 ] || few=48

# hashes FILE: hashes of texts, one a line, of a CSV without quoted commas
hashes() { tail -n +2 "$1" | cut -d , -f 14; }
fails() { # fails NAME TEXT FLAGS...: exit status 1 and one line that contains the text
    name=$1 text=$2
    shift 2
    run eval $mini-q8_0.gguf "$@"
    ok "$name: status 1" [ "$status" -eq 1 ]
    ok "$name: one line" [ "$(grep -c '' "$tmp/err")" -eq 1 ]
    ok "$name: it says '$text'" grep -qF -- "$text" "$tmp/err"
}
same() { # same NAME FLAGS...: the texts are those of the run without drafts
    name=$1
    shift
    run eval $mini-q8_0.gguf --prompts $prompts --limit $few -n 16 -o csv "$@"
    ok "$name: status 0" [ "$status" -eq 0 ]
    hashes "$tmp/out" >"$tmp/hashes"
    ok "$name: the texts without drafts" cmp -s "$tmp/plain" "$tmp/hashes"
    tail -n +2 "$tmp/out" | awk -F , '$14 != $15 || $6 < 1 || $9 == "" || $10 < 1 || $10 > 64 { exit 1 }'
    check $? "$name: hashes of both texts are equal, speed-up and tokens per step are there"
}

run eval $mini-q8_0.gguf --prompts $prompts --limit $few -n 16 -o csv
ok "without drafts: status 0" [ "$status" -eq 0 ]
hashes "$tmp/out" >"$tmp/plain"
ok "a row for each prompt" [ "$(wc -l <"$tmp/plain")" -eq "$few" ]
ok "different prompts, different texts" [ "$(sort -u "$tmp/plain" | wc -l)" -gt 5 ]
ok "no column of drafts is filled" [ "$(tail -n +2 "$tmp/out" | cut -d , -f 8-11 | sort -u)" = ",,," ]
ok "the answers are right" [ "$(grep -c ',right,' "$tmp/out")" -ge $((few / 3)) ]
ok "a story is not judged" grep -q '"story/0","story",.*,,"-n reached",' "$tmp/out"
same mtp -md $mini-mtp-q8_0.gguf --spec mtp
same "a tree of DFlash" -md $mini-dflash-q8_0.gguf --spec dflash --tree 24
same auto -md $mini-dflash-q8_0.gguf
same dflash -md $mini-dflash-q8_0.gguf --spec dflash
cp "$tmp/out" "$tmp/dflash.csv"

# ---- tokens per step are those that a run prints ----

run $mini-q8_0.gguf -p "Tell me a story about a curious duck" --temp 0 -n 16 -md $mini-dflash-q8_0.gguf --spec dflash -v
want=$(sed -n 's/^# drafts: .*, \([0-9.]*\) tokens per step.*/\1/p' "$tmp/err")
got=$(awk -F , '/"story\/0"/ { printf "%.2f", $10 }' "$tmp/dflash.csv")
ok "tokens per step: $got, a run says $want" [ "$got" = "$want" ]

# ---- rows in a file ----

set -- --prompts $prompts -n 8 --csv "$tmp/rows.csv"
run eval $mini-q8_0.gguf "$@" --limit 3
ok "--csv: three rows" [ "$(wc -l <"$tmp/rows.csv")" -eq 4 ]
cp "$tmp/rows.csv" "$tmp/three.csv"
printf '4,"tool/0","to' >>"$tmp/rows.csv"              # as if the process was killed
run eval $mini-q8_0.gguf "$@" --limit 5 -o csv
ok "it continues: status 0" [ "$status" -eq 0 ]
ok "it says so" grep -q '^# --csv: .*: 3 of 5 prompts are done already$' "$tmp/err"
head -n 4 "$tmp/rows.csv" >"$tmp/first"
ok "the rows before are kept" cmp -s "$tmp/first" "$tmp/three.csv"
ok "two rows were added" [ "$(wc -l <"$tmp/rows.csv")" -eq 6 ]
ok "stdout has all of them" cmp -s "$tmp/out" "$tmp/rows.csv"
run eval $mini-q8_0.gguf "$@" --limit 5 -o json
ok "json of rows that are kept" grep -q '"setting": "model=gemma4-mini-q8_0.gguf ' "$tmp/out"
if command -v python3 >/dev/null 2>&1; then
    ok "it is JSON: five rows, a mean of five" python3 -c 'import json, sys
d = json.load(open(sys.argv[1]))
assert len(d["rows"]) == 5 and d["summary"][0]["prompts"] == 5 and d["summary"][0]["right"] == 2, d["summary"][0]
assert [r["prompt"] for r in d["rows"]] == [1, 2, 3, 4, 5] and d["rows"][0]["spec_tok_s"] is None
assert {s["kind"] for s in d["summary"]} == {"", "facts", "arithmetic", "counting", "tool", "edit"}' "$tmp/out"
else
    skip "no python3 to read JSON with"
fi
sed '3s/\(.*\),[0-9a-f]\{16\},right/\1,0123456789abcdef,right/' "$tmp/three.csv" >"$tmp/rows.csv"
run eval $mini-q8_0.gguf "$@" --limit 3
ok "a text that differs with drafts: status 1" [ "$status" -eq 1 ]
ok "it is named" grep -q '^#   prompt 2 (arithmetic/0)$' "$tmp/err"
ok "the table says so" grep -q '^| 2 arithmetic/0 .* DIFFERENT |' "$tmp/out"
cp "$tmp/three.csv" "$tmp/rows.csv"
fails "another option" "its rows have n=8, this run has n=9" "$@" -n 9
run eval models/gemma4-mini-e-q8_0.gguf "$@"
ok "another model: status 1" [ "$status" -eq 1 ]
ok "it is named" grep -q 'its rows have model=gemma4-mini-q8_0.gguf, this run has model=gemma4-mini-e-q8_0.gguf' "$tmp/err"
fails "another draft model" "its rows have draft-model=, this run has draft-model=gemma4-mini-mtp-q8_0.gguf" "$@" -md $mini-mtp-q8_0.gguf
sed 1d $prompts >"$tmp/others.jsonl"
fails "other prompts" "line 2: prompt 1 is another one in" "$@" --prompts "$tmp/others.jsonl"
echo "some notes" >"$tmp/notes"
fails "another file" "expected a file of gemma4 eval" "$@" --csv "$tmp/notes"
ok "which is unchanged" [ "$(cat "$tmp/notes")" = "some notes" ]

# ---- Ctrl-C ----

if env --default-signal=INT true 2>/dev/null; then      # a shell starts background commands with SIGINT ignored
    rm -f "$tmp/rows.csv"
    env --default-signal=INT "$gemma4" eval $mini-q8_0.gguf --prompts $prompts -n 400 --csv "$tmp/rows.csv" >"$tmp/out" 2>"$tmp/err" &
    pid=$!
    for _ in $(seq 3000); do
        [ "$(cat "$tmp/rows.csv" 2>/dev/null | wc -l)" -lt 3 ] || break
        sleep 0.01
    done
    kill -INT $pid
    wait $pid
    status=$?
    n=$(grep -c '' "$tmp/rows.csv")
    ok "Ctrl-C: status 130" [ "$status" -eq 130 ]
    ok "Ctrl-C: it says how to continue" grep -q "^# interrupted: $((n - 1)) of 48 prompts are done; the same command continues\$" "$tmp/err"
    ok "Ctrl-C: only whole answers have rows" sh -c "! grep -q interrupted '$tmp/rows.csv'"
    ok "Ctrl-C: the sums of these rows" grep -q "^| mean of $((n - 1)) | all |" "$tmp/out"
else
    skip "env has no --default-signal: Ctrl-C"
fi

# ---- bad lines ----

bad() { # bad NAME LINE TEXT
    printf '{"prompt":"Hello"}\n\n%s\n' "$2" >"$tmp/bad.jsonl"
    fails "$1" "$3" --prompts "$tmp/bad.jsonl" -c 512
    ok "$1: no answer was made before" [ ! -s "$tmp/out" ]
}
bad "not JSON" '{"prompt":' 'bad.jsonl: line 3, byte '
bad "no object" '[1]' 'line 3: expected a JSON object'
bad "no prompt" '{"text":"Hello"}' 'line 3: expected a field prompt, question, problem or messages'
bad "bad messages" '{"messages":[{"role":1}]}' 'line 3: messages[0]'
bad "another check" '{"prompt":"x","answer":"y","check":"maybe"}' 'line 3: "check": expected none, exact, number'
bad "a long prompt" "{\"prompt\":\"$(printf 'word %.0s' $(seq 600))\"}" 'but the context only 512; try -c '
: >"$tmp/bad.jsonl"
fails "an empty file" "expected lines of JSON objects, got none" --prompts "$tmp/bad.jsonl"
fails "no file" "No such file" --prompts "$tmp/none.jsonl"
fails "no flag" "--prompts: expected a file; try gemma4 eval"

# ---- programs ----

printf '{"task_id":"T/0","prompt":"def f(x):\\n","entry_point":"f","test":"def check(c): pass\\n"}\n' >"$tmp/code.jsonl"
run eval $mini-q8_0.gguf --prompts "$tmp/code.jsonl" -n 8
ok "programs do not run unasked" grep -q '^# 1 prompts have tests; --run-code runs' "$tmp/err"
if command -v python3 >/dev/null 2>&1; then
    run eval $mini-q8_0.gguf --prompts "$tmp/code.jsonl" -n 8 --run-code
    ok "with --run-code they do" grep -q "^# the model's programs run in a child: 10 s, 1024 MiB" "$tmp/err"
    ok "and are judged" grep -q ' of 1 right' "$tmp/out"
else
    skip "no python3 to run programs with"
fi

if [ "${LONG:-0}" != 0 ]; then
    same "MTP's tree" -md $mini-mtp-q8_0.gguf --spec mtp --tree 12
    same n-grams --spec ngram
    same "n-grams of any text" --spec ngram-mod
    run eval $mini-q8_0.gguf --prompts $prompts -n 200 -o csv -md $mini-dflash-q8_0.gguf --spec dflash --temp 1
    ok "sampled: equal texts" [ "$status" -eq 0 ]
    run eval models/gemma4-mini-e-q8_0.gguf --prompts $prompts -n 200 -o csv --spec ngram
    ok "gemma4-mini-e: equal texts" [ "$status" -eq 0 ]
    ok "gemma4-mini-e: right answers" [ "$(grep -c ',right,' "$tmp/out")" -ge 38 ]
fi
finish "gemma4 eval"
