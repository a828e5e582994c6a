#!/bin/sh
# Tests of the command line, end to end on the small model: text, flags, the commands, errors, signals, a full disk.
# Environment: GEMMA4 (the binary, ./gemma4), BUILD (the folder of make_vocab, build), STRICT=1 (skips fail).
cd "$(dirname "$0")/.." || exit 1
model=models/gemma4-mini-q8_0.gguf
vocab=4096
. tests/harness.sh

story() { # story FILE ARGUMENTS...: runs the model on one prompt; its text goes to $tmp/FILE
    file=$1
    shift
    run "$model" -p "Tell me a story about a fox." -v "$@"
    cp "$tmp/out" "$tmp/$file"
    ok "story $*: exits 0" [ "$status" -eq 0 ]
}
same() { [ -s "$tmp/$1" ] && cmp -s "$tmp/$1" "$tmp/$2"; }
differ() { ! cmp -s "$tmp/$1" "$tmp/$2"; }
lines() { [ "$(grep -c '' "$tmp/$1")" -eq "$2" ]; }
size() { [ -f "$1" ] && [ "$(wc -c <"$1")" -eq "$2" ]; }
has() { grep -qF -e "$2" "$tmp/$1"; }
none() { ! grep -qE -e "$2" "$tmp/$1"; }
starts() { # starts LONG SHORT: the text of LONG starts with that of SHORT, without its final newline
    case $(cat "$tmp/$1") in "$(cat "$tmp/$2")"*) return 0 ;; esac
    return 1
}
first_line() { # stderr must be one line; sets $line to it
    line='' more=''
    { IFS= read -r line && ! IFS= read -r more && [ -z "$more" ]; } <"$tmp/err"
}
line_begins() { case $line in "$1"*) ;; *) return 1 ;; esac; }
line_has() { case $line in *"$1"*) ;; *) return 1 ;; esac; }
error() { # error WORD ARGUMENTS...: must fail with status 1, one error line that contains WORD, and no text
    word=$1
    shift
    run "$@"
    ok "error [$*]: exit status 1" [ "$status" -eq 1 ]
    ok "error [$*]: stdout is empty" [ ! -s "$tmp/out" ]
    ok "error [$*]: one line on stderr" first_line
    ok "error [$*]: starts with 'gemma4: error:'" line_begins 'gemma4: error: '
    ok "error [$*]: names '$word'" line_has "$word"
}
ids() { # ids NUMBER...: prints them as 32-bit little-endian integers
    for i in "$@"; do
        format=$(printf '\\%03o\\%03o\\%03o\\%03o' $((i & 255)) $((i >> 8 & 255)) $((i >> 16 & 255)) $((i >> 24 & 255)))
        # shellcheck disable=SC2059  # the format is the data
        printf "$format"
    done
}

# ---- text ----------------------------------------------------------------------------
story greedy --temp 0 -n 60
ok "the story has text" grep -q '[a-z]' "$tmp/greedy"
ok "stdout has no statistics" none greedy '^# '
ok "statistics go to stderr" has err "tok/s"
ok "every line on stderr starts with '# '" none err '^[^#]|^#[^ ]'
cp "$tmp/err" "$tmp/err.story"
story again --temp 0 -n 60
ok "greedy text is the same twice" same greedy again
story one --temp 0 -n 60 -t 1
story two --temp 0 -n 60 -t 2
ok "one thread and two give the same text" same one two
ok "-t does not change the text" same greedy one
story short --temp 0 -n 20
ok "-n 20 gives the beginning of -n 60" starts greedy short
ok "-n 20 gives less than -n 60" differ greedy short
story c --temp 0 -n 60 -c 512
ok "-c does not change the text" same greedy c

story seed7 --temp 1 --seed 7 -n 60
story seed7b --temp 1 --seed 7 -n 60
story seed8 --temp 1 --seed 8 -n 60
ok "the same seed gives the same text" same seed7 seed7b
ok "another seed gives another text" differ seed7 seed8
story auto --temp 0 -n 60 --spec auto --draft-max 5
ok "--spec auto without a drafter does not change the text" same greedy auto
story topk --temp 1 --seed 7 --top-k 1 -n 60
ok "--top-k 1 is greedy" same greedy topk
story topp --temp 1 --seed 7 --top-p 0.000001 -n 60
ok "a tiny --top-p is greedy" same greedy topp

story tied --temp 0 -n 100 --ignore-eos --kv-layout tied
story untied --temp 0 -n 100 --ignore-eos --kv-layout untied
ok "tied and untied cache give the same 100 tokens" same tied untied
story f32 --temp 0 -n 60 -ctk f32 -ctv f32
story f16 --temp 0 -n 60 -ctk f16 -ctv f16
story mixed --temp 0 -n 60 -ctk f32 -ctv f16 --kv-layout untied
ok "the plan names both types" has err "(f32/f16 untied)"
ok "an f32 cache gives text" grep -q '[a-z]' "$tmp/f32"
ok "an f16 cache gives text" grep -q '[a-z]' "$tmp/f16"
ok "an f32/f16 cache gives text" grep -q '[a-z]' "$tmp/mixed"

printf '%s' "Tell me a story about a fox." >"$tmp/prompt.txt"
run "$model" -f "$tmp/prompt.txt" --temp 0 -n 60
ok "-f reads the prompt that -p takes" same greedy out
story raw --temp 0 -n 60 --raw
ok "--raw leaves out the chat template" differ greedy raw
story system --temp 0 -n 20 --system "You are a pirate."
mkdir "$tmp/dump"
story dump --temp 0 -n 2 --dump "$tmp/dump"
ok "--dump writes files" [ -n "$(ls "$tmp/dump" 2>/dev/null)" ]
i=0
while [ $i -lt 130 ]; do printf 'The fox ran home. '; i=$((i + 1)); done >"$tmp/long.txt"     # longer than one chunk
run "$model" -f "$tmp/long.txt" --temp 0 -n 1 --dump "$tmp/dump"
ls -l "$tmp/dump" | awk '{ print $5, $9 }' >"$tmp/sizes1"
run "$model" -f "$tmp/long.txt" --temp 0 -n 1 --dump "$tmp/dump"
ls -l "$tmp/dump" | awk '{ print $5, $9 }' >"$tmp/sizes2"
ok "--dump replaces the files of an earlier run" same sizes1 sizes2
run "$model" -p "$(printf 'bad \377\376 bytes \300')" --temp 0 -n 4
ok "invalid UTF-8 does not crash" [ "$status" -le 1 ]
run "$model" -p "" --temp 0 -n 4
ok "an empty prompt does not crash" [ "$status" -le 1 ]

# ---- the plain loop ------------------------------------------------------------------
# --greedy makes the tokens of --temp 0 from the same logits: up to -n, to the end of the turn, after a prompt of several
# chunks, to the end of the context. Its text is the same except for a thought ("fox." makes the second model think).
for file in "$model" models/gemma4-mini-e-q8_0.gguf; do
    for words in "-f $tmp/prompt.txt -n 60" "-p Hello" "-f $tmp/long.txt -n 20" "-p Once --raw -n 30 -c 20" "-p fox."; do
        # shellcheck disable=SC2086  # flags are words
        run "$file" $words --temp 0 -v
        cp "$tmp/out" "$tmp/usual"
        grep -o 'last logits [0-9a-f]*' "$tmp/err" >"$tmp/usual.hash"
        # shellcheck disable=SC2086
        run "$file" $words --greedy -v
        grep -o 'last logits [0-9a-f]*' "$tmp/err" >"$tmp/greedy.hash"
        ok "$file $words --greedy: exits 0" [ "$status" -eq 0 ]
        [ "$words" = "-p fox." ] || ok "$file $words --greedy: the text of --temp 0" same usual out
        ok "$file $words --greedy: the last logits of --temp 0" same usual.hash greedy.hash
    done
done
ok "--greedy: the sampling line says so" has err "# sampling: greedy (temperature 0)"
refused() { # refused NAME FLAGS...: the plain loop would have to ignore these flags
    name=$1
    shift
    error "--greedy cannot be used with $name; try --temp 0" "$model" -p hi --greedy "$@"
}
printf '[]' >"$tmp/no-tools.json"
refused "a chat" -i
refused --temp --temp 0.5
refused "-md or --spec" -md models/gemma4-mini-mtp-q8_0.gguf
refused "-md or --spec" --spec ngram
refused penalties --repeat-penalty 1.1
refused penalties --presence-penalty 0.1
refused penalties --frequency-penalty 0.1
refused --logit-bias -l 5+1
refused --stop -r x
refused "a grammar" --grammar 'root ::= "a"'
refused "a grammar" --grammar-file "$tmp/prompt.txt"
refused "a grammar" -j '{}'
refused "a grammar" -jf "$tmp/no-tools.json"
refused "--tools or --think" --tools "$tmp/no-tools.json"
refused "--tools or --think" --think
refused --session --session "$tmp/none"
refused --context-shift --context-shift
refused --ignore-eos --ignore-eos
refused --top-logits --top-logits 2
refused --compress --compress 0.5
refused "-n 0" -n 0
run "$model" -p hi --greedy --temp 0 -n 2
ok "--greedy --temp 0: exits 0" [ "$status" -eq 0 ]

# ---- logits --------------------------------------------------------------------------
ids 2 100 200 300 400 >"$tmp/five.i32"
ids 2 >"$tmp/one.i32"
run logits "$model" --ids "$tmp/five.i32" -o "$tmp/five.f32"
ok "logits of 5 ids: exits 0" [ "$status" -eq 0 ]
ok "logits of 5 ids: n * vocab * 4 bytes" size "$tmp/five.f32" $((5 * vocab * 4))
ok "logits: stdout is empty" size "$tmp/out" 0
run logits "$model" --ids "$tmp/one.i32" -o "$tmp/one.f32"
ok "logits of 1 id: n * vocab * 4 bytes" size "$tmp/one.f32" $((vocab * 4))
run logits "$model" --ids "$tmp/five.i32" -o "$tmp/again.f32"
ok "logits are the same twice" same five.f32 again.f32
run logits "$model" --ids "$tmp/five.i32" -o "$tmp/again.f32" -c 0
ok "logits -c 0: a context for the ids" same five.f32 again.f32
run logits "$model" -p "about a fox." -o "$tmp/text.f32"
ok "logits -p: exits 0" [ "$status" -eq 0 ]
run tokenize "$model" -p "about a fox." -o "$tmp/text.i32"
ok "tokenize -o: stdout is empty" size "$tmp/out" 0
{ ids 2; cat "$tmp/text.i32"; } >"$tmp/bos-text.i32"
run logits "$model" --ids "$tmp/bos-text.i32" -o "$tmp/again.f32"
ok "logits -p: those of <bos> and the ids of tokenize -o" same text.f32 again.f32
head -c $((vocab * 4)) "$tmp/five.f32" >"$tmp/row0.f32"
ok "later ids do not change the first row" same row0.f32 one.f32

# ---- thoughts, tools, templates ------------------------------------------------------
ok "a template that is not Google's is named" grep -q "^# chat template of the file: not one of Google's; .* variant" "$tmp/err.story"
story large --temp 0 -n 20 --template large
ok "--template large is taken" has err "large variant"
cat >"$tmp/tools.json" <<'END'
[{"type":"function","function":{"name":"get_weather","description":"Get the weather for a city.","parameters":
{"type":"object","properties":{"city":{"type":"string","description":"City name."}},"required":["city"]}}}]
END
run "$model" -p "What is the weather in Paris?" --tools "$tmp/tools.json" --temp 0 -n 100
ok "--tools: a call is a line of JSON on stdout" grep -qE '^\{"name":"[^"]+","arguments":\{.*\}\}$' "$tmp/out"
ok "--tools: nothing else is" lines out 1
ok "--tools: the statistics say why it stopped" has err "stopped: tool call"
run "$model" -p "What is 22 minus 2?" --think --temp 0 -n 100
ok "--think: exits 0" [ "$status" -eq 0 ]
ok "--think: no thoughts on stderr" none err thought:
cp "$tmp/out" "$tmp/hidden"
run "$model" -p "What is 22 minus 2?" --think --show-thoughts --temp 0 -n 100
ok "--show-thoughts: the thought is on stderr" has err "# thought:"
ok "--show-thoughts: stdout is the same" same hidden out
printf '[{"function":{}}]' >"$tmp/noname.json"
error "tools[0].function.name" "$model" -p hi --tools "$tmp/noname.json"
error "byte 0" "$model" -p hi --tools "$tmp/prompt.txt"
error missing.json "$model" -p hi --tools "$tmp/missing.json"
error --template "$model" -p hi --template huge
for flag in --think "--system x" "--tools $tmp/tools.json" "--template large"; do
    # shellcheck disable=SC2086  # a flag and its value are two words
    error "${flag%% *}" "$model" -p hi --raw $flag
done

# ---- constrained answers --------------------------------------------------------------
form() { # form TEXT ARGUMENTS...: with this grammar or schema the answer must be this text
    case " $* " in *" --raw "*) printf '%s' "$1" ;; *) echo "$1" ;; esac >"$tmp/want"
    shift
    run "$model" -p "Tell me a story." --seed 1 "$@"
    ok "$*: exits 0" [ "$status" -eq 0 ]
    ok "$*: the answer that is left" same want out
}
printf 'root ::= first # one\nfirst ::= "yes, " ("it is")' >"$tmp/form.gbnf"
printf '{"const":{"fox":[1,true,"red"]}}' >"$tmp/form.json"
form "yes, it is" --grammar 'root ::= "yes, " "it is"'
form "yes, it is" --grammar-file "$tmp/form.gbnf" --spec ngram
form '"a red fox"' -j '{"enum":["a red fox"]}'
form '{"fox":[1,true,"red"]}' --json-schema-file "$tmp/form.json" --raw
form '"P' -j '{"enum":["Paris"]}' -r ar
run "$model" -p "Tell me a story." -n 5 -j '{"type":"array","uniqueItems":true}'
ok "what a grammar cannot enforce is said" has err "# not enforced: schema: #/uniqueItems: "
form '5' -j '{"const":5}' --tools "$tmp/tools.json" -l 48-100                             # without <|tool_call>
run "$model" -p "What is 22 minus 2?" --think --show-thoughts --think-budget 8 --temp 0 -j '{"enum":["a red fox"]}'
ok "a thought comes before the answer" has err "# thought:"
ok "and not in the text" grep -qx '"a red fox"' "$tmp/out"
run "$model" -p "Tell me a story." --tools "$tmp/tools.json" --tool-choice required -n 60 --temp 0
ok "--tool-choice required: a call, unless it is cut" grep -qE '^\{"name":"get_weather","arguments":\{' "$tmp/out"
printf '[{"type":"function","function":{"name":"f"}},{"type":"function","function":{"name":"g","parameters":{"type":"object",
"properties":{"x":{"const":5}},"required":["x"]}}}]' >"$tmp/two.json"
run "$model" -p "Tell me a story." --tools "$tmp/two.json" --tool-choice g -n 14              # several calls are allowed
ok "--tool-choice NAME: this one is called" grep -qx '{"name":"g","arguments":{"x":5}}' "$tmp/out"
ok "--tool-choice NAME: and no other" none out '"name":"f"'
error "expected either --grammar or --json-schema" "$model" -p hi -j '{}' --grammar 'root ::= "a"'
error "expected either --grammar-file or --json-schema-file" "$model" -p hi --json-schema-file "$tmp/form.json" --grammar-file "$tmp/form.gbnf"
error "--tool-choice needs --tools" "$model" -p hi --tool-choice required
error "expected a tool named 'nobody'" "$model" -p hi --tools "$tmp/tools.json" --tool-choice nobody
error "--tool-choice cannot be used with --json-schema" "$model" -p hi --tools "$tmp/tools.json" --tool-choice required -j '{}'
error "--ignore-eos cannot be used with --json-schema" "$model" -p hi -j '{}' --ignore-eos
error "--ignore-eos cannot be used with --tool-choice" "$model" -p hi --tools "$tmp/tools.json" --tool-choice required --ignore-eos
error "--grammar-file: $tmp/missing.gbnf" "$model" -p hi --grammar-file "$tmp/missing.gbnf"
error "--json-schema-file: $tmp/missing.json" "$model" -p hi --json-schema-file "$tmp/missing.json"
error "--grammar: grammar: line 2: " "$model" -p hi --grammar 'root ::= a
a ::= ('
error "--json-schema: schema: #/properties/x/type: " "$model" -p hi -j '{"properties":{"x":{"type":"strin"}}}'
error "--json-schema: schema: byte 1: " "$model" -p hi -j '{'
sed 's/"type":"string"/"not":{}/' "$tmp/tools.json" >"$tmp/not.json"
error "--tool-choice: grammar: no text matches it" "$model" -p hi --tools "$tmp/not.json" --tool-choice required

# ---- tokenize, detokenize ------------------------------------------------------------
tokens() { # tokens FILE IDS ARGUMENTS...: tokenize must print these ids, and detokenize the text
    file=$1 want=$2
    shift 2
    run tokenize "$file" "$@"
    ok "tokenize $*: exits 0" [ "$status" -eq 0 ]
    ok "tokenize $*: prints $want" [ "$(cat "$tmp/out")" = "$want" ]
    ok "tokenize $*: one line" lines out 1
    ok "tokenize $*: stderr is empty" size "$tmp/err" 0
}
vocab_file=$tmp/vocab.gguf
if ! gzip --version >/dev/null 2>&1; then
    skip "tokenize on Gemma 4's vocabulary: gzip is missing"
elif [ ! -x "$build/make_vocab" ]; then
    skip "tokenize on Gemma 4's vocabulary: make_vocab is not built"
else
    gzip -dc tests/golden/gemma4-tokens.txt.gz | "$build/make_vocab" "$vocab_file"
    ok "make_vocab" [ -s "$vocab_file" ]
    tokens "$vocab_file" "2 105 2364 107 9259 106" -p "<bos><|turn>user
Hello<turn|>" --special
    tokens "$vocab_file" "236746 52 236763" -p 'a<|"|>b'
    tokens "$vocab_file" "236746 236820 153857 111038 236763" -p 'a<|"|>b' --plain
    error 262143 detokenize "$vocab_file" --ids 262144
    error token_embd.weight "$vocab_file" -p hi
    rm -f "$vocab_file"
fi
tokens "$model" "" -p ""
printf 'tabs\tand  spaces \303\251 \377 <turn|>\n' >"$tmp/odd.txt"
printf 'tabs\tand  spaces \303\251 \357\277\275 <turn|>\n' >"$tmp/repaired.txt"
for mode in "" --plain --special; do
    # shellcheck disable=SC2086  # an empty mode is no argument
    run tokenize "$model" -f "$tmp/odd.txt" $mode
    ok "tokenize -f $mode: exits 0" [ "$status" -eq 0 ]
    run detokenize "$model" --ids "$(cat "$tmp/out")"
    ok "detokenize: exits 0" [ "$status" -eq 0 ]
    ok "detokenize: the text comes back, an invalid byte as U+FFFD" same repaired.txt out
done
run detokenize "$model" --ids "  "
ok "detokenize of nothing: exits 0" [ "$status" -eq 0 ]
ok "detokenize of nothing: nothing" size "$tmp/out" 0
run tokenize "$model" -p "$(cat "$tmp/repaired.txt")" -o "$tmp/written.i32"
run detokenize "$model" --ids "$tmp/written.i32"
ok "detokenize: a file that tokenize -o wrote" [ "$status$(cat "$tmp/out")" = "0$(cat "$tmp/repaired.txt")" ]
printf '\377\377\377\177' >"$tmp/high.i32"
error "high.i32: id 0: expected 0.." detokenize "$model" --ids "$tmp/high.i32"
for ids in x 1.5 "2 5x" -1 4096 99999999999999999999; do
    error --ids detokenize "$model" --ids "$ids"
done
error --ids detokenize "$model"
error detokenize detokenize "$model" --ids 2 -p hi
error -p tokenize "$model"
error missing.txt tokenize "$model" -f "$tmp/missing.txt"
error --plain tokenize "$model" -p hi --plain --special
error tokenize tokenize "$model" -p hi --temp 1
error tokenize tokenize "$model" -p hi -c 512
error --plain "$model" -p hi --plain
error --special logits "$model" --ids "$tmp/five.i32" -o "$tmp/x.f32" --special
error missing.gguf tokenize "$tmp/missing.gguf" -p hi
printf 'GGUF\003\000\000\000\000\000\000\000\000\000\000\000\000\000\000\000\000\000\000\000' >"$tmp/bare.gguf"
error "no tokenizer" tokenize "$tmp/bare.gguf" -p hi
error prompt.txt tokenize "$tmp/prompt.txt" -p hi

# ---- help ----------------------------------------------------------------------------
run --help
ok "--help exits 0" [ "$status" -eq 0 ]
ok "--help writes nothing to stderr" size "$tmp/err" 0
for word in logits tokenize detokenize quantize plan view ppl check niah eval serve bench sweep plot model prompt sampling "structured output" \
    "speculative decoding" "KV cache" device output; do
    ok "--help names $word" grep -qE -e "(^|[^a-z-])$word([^a-z-]|\$)" "$tmp/out"
done
# Every flag, with each of its names, with a valid and an invalid value. A flag that is missing here fails the test.
for verb in "" serve plan bench sweep plot ppl niah eval check quantize tokenize detokenize logits view; do
    # shellcheck disable=SC2086  # no command is no word
    run $verb --help
    ok "$verb --help: exits 0" [ "$status" -eq 0 ]
    ok "$verb --help: of that command alone" grep -q "^gemma4 ${verb:-0}" "$tmp/out"
    cat "$tmp/out" >>"$tmp/helps"
    echo >>"$tmp/helps"
done
cp "$tmp/helps" "$tmp/out"
sed -nE 's/^  (--?[a-z-]+(, --?[a-z-]+)*).*/\1/p' "$tmp/out" | tr -d , | awk '!seen[$0]++' >"$tmp/flags"
ok "--help: at least 35 flags" [ "$(grep -c '' "$tmp/flags")" -ge 35 ]
awk '/^  -/ { if (line) print line; line = "" } /^$/ { if (line) print line; line = "" } /^  +[^ ]/ { line = line $0 } END { print line }' "$tmp/out" |
    grep '^  -' | grep -v default | sort -u >"$tmp/no-default"
ok "--help: each flag says its default but --model, --help and --version" lines no-default 3
printf '[]' >"$tmp/no-tools.json"
"$build/make_gguf" --preset tiny-moe --quant q8_0 --kind mmproj --layers 2 --out "$tmp/tower.gguf"
"$build/make_gguf" --preset micro-dense --quant f16 --kind mmproj --out "$tmp/micro-tower.gguf"
"$build/make_gguf" --preset micro-dense --quant q8_0 --vocab 262144 --out "$tmp/sees.gguf"     # has tokens for pictures
{ printf 'P6\n4 3\n255\n' && head -c 36 /dev/zero; } >"$tmp/picture.ppm"
drafter=models/gemma4-mini-mtp-q8_0.gguf
printf '\002\000\000\000' >"$tmp/bos.i32"
printf 'ctx,decode_tps\n1024,3\n2048,2\n' >"$tmp/table.csv"
while read -r names; do
    for flag in $names; do
        verb='' plain="-p hi -n 2 --temp 0" good='' bad='' file=$model
        case "$names " in
        "-md "* | "--draft-min-p "* | "--tree "* | "--lazy-draft "*)      # need a drafter
            file=models/gemma4-mini-q8_0.gguf plain="$plain -md $drafter" ;;
        esac
        case "$names " in
        "-md "*) good=$drafter bad=missing.gguf plain="-p hi -n 2 --temp 0" ;;
        "--draft-min-p "*) good=0.5 bad=2 ;;
        "--tree "*) good=8 bad=64 ;;
        "--lazy-draft "*) ;;
        "--spec-force "* | "-p --n-prompt " | "-n --n-gen " | "-d --n-depth " | "-r --repetitions " | "--rows " | "--images " | \
        "--fill " | "-pg " | \
        "--pflash-density ") continue ;;                                                               # of bench, below
        "--last ") verb=view plain='' file="$tmp/dump" good=8 bad=0 ;;
        "--chunks ") verb=ppl plain="-f $tmp/long.txt -c 64" good=2 bad=-1 ;;
        "--ppl-stride ") verb=ppl plain="-f $tmp/long.txt -c 64 --chunks 2" good=16 bad=64 ;;
        "--kld-base " | "--kld ") verb=ppl plain="-f $tmp/long.txt -c 64 --chunks 2" good="$tmp/base" bad=/nowhere/x ;;
        "-d --depth ") verb=niah plain="-p 256 -r 1" good=50 bad=101 ;;
        "--needles ") verb=niah plain="-p 256 -d 50 -r 1" good=2 bad=0 ;;
        "--svg ") verb=niah plain="-p 256 -d 50 -r 1" good="$tmp/map.svg" bad=/nowhere/x ;;
        "--kind ") verb=plot plain='' file="$tmp/table.csv" good=speed bad=pie ;;
        "--prompts ") verb=eval plain="--limit 1 -n 2" good=tests/prompts.jsonl bad=missing.jsonl ;;
        "--csv ") verb=eval plain="--prompts tests/prompts.jsonl --limit 1 -n 2" good="$tmp/rows.csv" bad=/nowhere/x ;;
        "--limit ") verb=eval plain="--prompts tests/prompts.jsonl -n 2 -c 500" good=1 bad=-1 ;;
        "--run-code ") verb=eval plain="--prompts tests/prompts.jsonl --limit 1 -n 2" ;;
        "--compress ") good=0.5 bad=1 ;;
        "--compress-from ") plain="$plain --compress 0.5" good=100 bad=63 ;;
        "--scorer ") plain="$plain --compress 0.5" good="$model" bad=missing.gguf ;;
        "--pflash ") good=0.5 bad=1.5 ;;
        "--pflash-from ") good=0 bad=-1 ;;
        "-m "*) good="$model" bad=missing.gguf ;;
        "-p "*) plain='' good="hi -n 2" ;;
        "-f "*) plain='' good="$tmp/prompt.txt -n 2" bad=missing.txt ;;
        "-sys "*) good=pirate ;;
        "-i "*) plain="-n 2" ;;
        "--image "*)
            file=$tmp/sees.gguf plain="-p hi -n 2 -c 200 --mmproj $tmp/micro-tower.gguf --image-tokens 70"
            good=$tmp/picture.ppm bad=missing.png ;;
        "--mmproj "*) good=$tmp/tower.gguf bad=$model ;;
        "--image-tokens "*) plain="$plain --mmproj $tmp/tower.gguf" good=70 bad=71 ;;
        "--history "*) plain="-i -n 2" good="$tmp/history" ;;
        "--session "*) good="$tmp/kept" bad=/nowhere/x ;;
        "-v "*) ;;
        "--color "*) good=off ;;
        "--document "*) verb='' plain='' good=man bad=pdf ;;
        "--think-budget "*) good="3 --think" bad=-2 ;;
        "--tools "*) good="$tmp/no-tools.json" bad=missing.json ;;
        "--tool-choice "*) plain="$plain --tools $tmp/tools.json" good=required bad=nobody ;;
        "--grammar "*) good='root::="a"' bad='root::=a' ;;
        "--grammar-file "*) good="$tmp/form.gbnf" bad=missing.gbnf ;;
        "-j "*) good='{}' bad='{' ;;
        "-jf "*) good="$tmp/form.json" bad=missing.json ;;
        "--template "*) good=large bad=middle ;;
        "-n "*) plain="-p hi" good=2 bad=-2 ;;
        "-t "*) good=1 bad=0 ;;
        "-c "*) good=0 bad=-1 ;;
        "--temp "*) plain="-p hi -n 2" good=0.5 bad=-1 ;;
        "--top-k "*) good=5 bad=-1 ;;
        "--top-p "* | "--min-p "*) good=0.5 bad=1.5 ;;
        "--repeat-penalty "*) good=1.1 bad=0 ;;
        "--presence-penalty "* | "--frequency-penalty "*) good=0.1 bad=x ;;
        "-l "*) good=5+1 bad=5 ;;
        "-s "*) good=7 bad=-1 ;;
        "-r "*) good=zzz ;;
        "-ctk "* | "-ctv "*) good="f32 --kv-layout untied" bad=q1 ;;
        "--kv-swa "*) good=q8_0 bad=q1 ;;
        "--kv-tail "*) good=64 bad=-1 ;;
        "--spec "*) good=ngram bad=guess ;;
        "--draft-max "*) good="4 --spec ngram" bad=64 ;;
        "--kv-layout "*) good=untied bad=both ;;
        "--against "*) error "" check "$model" --against metal; continue ;;              # the others are below
        "--backend "*) good=cpu bad=metal ;;
        "--vram "*) good=4 bad=0.001 ;;
        "--card "*) continue ;;                           # test_device tests it
        "--cpu-moe "*) ;;
        "--n-cpu-moe "*) good=2 bad=-1 ;;
        "--override-tensor "*) good=exps=CPU bad=exps ;;
        "--top-logits "*) good=2 bad=-1 ;;
        "-o "*) verb=logits plain="--ids $tmp/bos.i32" good="$tmp/bos.f32" bad=/nowhere/x ;;
        "--dump "*) good="$tmp/dump" bad=/nowhere/x ;;
        "--ids "*) verb=detokenize plain='' good=2 bad=x ;;
        "--plain "* | "--special "*) verb=tokenize plain="-p hi" ;;
        "--check-tensors "* | "--think "* | "--raw "* | "--greedy "* | "--ignore-eos "* | "--context-shift "* | "--show-thoughts "*) ;;
        "-h "* | "--version "*) ;;
        "--host "* | "--port "* | "-np "* | "--chunk "* | "--api-key "* | "--api-key-file "* | "--alias "* | "--queue "* | \
        "--timeout "* | "--max-body "* | "--cache-ram "* | "--session-dir "* | "--session-disk "* | "--log-text "*) continue ;;                  # test_server.sh tests them
        "--allow-origin "* | "--public-url "*) continue ;;                                                # test_origins.sh
        "--request-memory "*) continue ;;                                                                 # test_hostile.sh
        *) bad="no case for $flag in test_cli.sh" plain=--missing ;;
        esac
        [ "${names%% *}" != -m ] || file=
        # shellcheck disable=SC2086  # verbs, flags and values are words
        run $verb $file $plain $flag $good
        if [ "$flag" = --history ] && grep -q "no line editing" "$tmp/err"; then
            ok "$flag: refused by a build without a line editor" [ "$status" -eq 1 ]
        else
            ok "$flag $good: exits 0" [ "$status" -eq 0 ]
        fi
        # shellcheck disable=SC2086
        [ -z "$bad" ] || error "" $verb $file $plain $flag "$bad"
    done
done <"$tmp/flags"
case "$("$gemma4" --version)" in
*"uses cuda"*)
    run check "$model"
    ok "check: the GPU agrees with the CPU" [ "$status" -eq 0 ]
    ok "check: names its checkpoints" grep -q '^| result_output ' "$tmp/out" ;;
*)  error check: check "$model" ;;
esac
run check "$model" --against reference -ctk tq3
ok "check: the CPU agrees with the reference" [ "$status" -eq 0 ]
ok "check: judges short steps and prompts" [ "$(grep -c '^| result_output .*| ok ' "$tmp/out")" -eq 2 ]
run --version
ok "--version exits 0" [ "$status" -eq 0 ]
ok "--version prints one line" lines out 1

# ---- wrong flags ---------------------------------------------------------------------
error "--nope: unknown flag" "$model" -p hi --nope
error "-p needs a value" "$model" -p
error "-n needs a value" "$model" -p hi -n
error -n "$model" -p hi -n ten
error -n "$model" -p hi -n 5x
error -n "$model" -p hi -n ''
error -n "$model" -p hi -n 99999999999999999999
error --temp "$model" -p hi --temp hot
error --temp "$model" -p hi --temp nan
error --temp "$model" -p hi --temp -1
error --top-p "$model" -p hi --top-p 2
error --top-k "$model" -p hi --top-k -5
error --seed "$model" -p hi --seed x
error -c "$model" -p hi -c -1
error -c "$model" -p hi -c 12.5
error -t "$model" -p hi -t two
error --kv-layout "$model" -p hi --kv-layout sideways
error -ctk "$model" -p hi -ctk q9
error "--kv-layout untied" "$model" -p hi -ctk f32 -ctv f16
error "--spec mtp" "$model" -p hi --spec mtp
error "--tree" "$model" -p hi --tree 8
error "--spec dflash" models/gemma4-mini-q8_0.gguf -p hi --spec dflash -md $drafter
error "expected" models/gemma4-mini-e-q8_0.gguf -p hi -md $drafter
error "--spec-force" bench models/gemma4-mini-q8_0.gguf --spec-force 0.5
error "--spec-force" bench models/gemma4-mini-q8_0.gguf -md $drafter --spec-force 2
error "--draft-max" bench models/gemma4-mini-q8_0.gguf -md models/gemma4-mini-dflash-q8_0.gguf --spec-force 0.5 --draft-max 20
error -c "$model" -c 16 -p "This prompt is a good deal longer than the sixteen tokens of context that it is given to \
fill, and so it must be refused before anything is generated."

# ---- wrong files ---------------------------------------------------------------------
printf 'This is a text file and no model, whatever its name says.\n' >"$tmp/text.gguf"
: >"$tmp/empty.gguf"
head -c 20 "$model" >"$tmp/cut20.gguf"
head -c 50000 "$model" >"$tmp/cut50000.gguf"
head -c 4000000 "$model" >"$tmp/cut4000000.gguf"
mkdir "$tmp/folder.gguf"
for file in missing.gguf folder.gguf empty.gguf text.gguf cut20.gguf cut50000.gguf cut4000000.gguf; do
    error "$file" "$tmp/$file" -p hi
done
error "missing.txt: No such file or directory" "$model" -f "$tmp/missing.txt"
error folder.gguf "$model" -f "$tmp/folder.gguf"
error text.gguf "$model" -p hi --dump "$tmp/text.gguf/dump"
error "expected a folder, got a file" "$model" -p hi --dump "$tmp/text.gguf"

ids 2 4096 >"$tmp/big.i32"
ids 2 -1 >"$tmp/negative.i32"
printf '\002\000\000\000\001' >"$tmp/odd.i32"
: >"$tmp/none.i32"
for file in big negative odd none missing; do
    error "$file.i32" logits "$model" --ids "$tmp/$file.i32" -o "$tmp/x.f32"
done
error text.gguf logits "$model" --ids "$tmp/five.i32" -o "$tmp/text.gguf/x.f32"
error folder.gguf logits "$model" --ids "$tmp/five.i32" -o "$tmp/folder.gguf"
error missing.gguf logits "$tmp/missing.gguf" --ids "$tmp/five.i32" -o "$tmp/x.f32"
error -o logits "$model" --ids "$tmp/five.i32"
error "expected either --ids or -p, got both" logits "$model" --ids "$tmp/five.i32" -o "$tmp/x.f32" -p hi
error "-sys is not a logits option; it is an option of: generate" logits "$model" --ids "$tmp/five.i32" -o "$tmp/x.f32" -sys hi
cp "$model" "$tmp/own.gguf"
error "it is a model file, which only quantize replaces" logits "$tmp/own.gguf" --ids "$tmp/five.i32" -o "$tmp/own.gguf"
error "it is a model file, which only quantize replaces" tokenize "$tmp/own.gguf" -p hi -o "$tmp/own.gguf"
error "it is a model file, which only quantize replaces" niah "$model" -p 256 --svg "$tmp/own.gguf"
ok "-o does not touch the model" cmp -s "$model" "$tmp/own.gguf"
error --ids logits "$model" -o "$tmp/x.f32"

# ---- sampling ------------------------------------------------------------------------
# The greedy story of the first block is $tmp/greedy.
story repeat1 --temp 0 -n 60 --repeat-penalty 1 --presence-penalty 0 --frequency-penalty 0
ok "penalties that are off change nothing" same greedy repeat1
story repeat --temp 0 -n 60 --repeat-penalty 1.5
ok "--repeat-penalty changes the text" differ greedy repeat
story presence --temp 0 -n 60 --presence-penalty 2
ok "--presence-penalty changes the text" differ greedy presence
story frequency --temp 0 -n 60 --frequency-penalty 2
ok "--frequency-penalty changes the text" differ greedy frequency
ok "frequency and presence are not the same" differ presence frequency
for n in one two; do
    threads=1
    [ $n = one ] || threads=2
    story "all_$n" -n 60 --seed 5 --temp 1.2 --top-k 40 --top-p 0.9 --min-p 0.01 --repeat-penalty 1.1 --presence-penalty 0.1 \
        --frequency-penalty 0.1 --logit-bias 834+1,845-1 -t $threads
done
ok "one seed gives one text on any number of threads" same all_one all_two
ok "the chain is shown in its order" has err "# sampling: logit bias, penalties (repeat 1.1, frequency 0.1, \
presence 0.1), temperature 1.2, top-k 40, top-p 0.9, min-p 0.01, then sample, seed 5"
run "$model" -p "Tell me a story about a fox." -n 1 --seed 1 -v
ok "without flags the chain is Gemma's" has err "# sampling: temperature 1, top-k 64, top-p 0.95, then sample, seed 1"

run "$model" -p "Tell me a story about a fox." --temp 0 -n 30 --top-logits 3
cp "$tmp/err" "$tmp/top"
ok "--top-logits leaves the text alone" starts greedy out
ok "--top-logits: one line for every token" [ "$(grep -c '^# position ' "$tmp/top")" -eq 30 ]
ok "--top-logits: three candidates, all with id, text, logit and probability" [ "$(grep -cE \
    '^# position [0-9]+, chosen [0-9]+:( [0-9]+ "([^"\\]|\\.)*" -?[0-9.]+ [0-9.e-]+,?){3}$' "$tmp/top")" -eq 30 ]
ok "--top-logits: greedy chooses the first" [ "$(sed -nE 's/^# position [0-9]+, chosen ([0-9]+): ([0-9]+) .*/\1 \2/p' "$tmp/top" |
    awk '$1 != $2' | wc -l)" -eq 0 ]
run "$model" -p "Tell me a story about a fox." --temp 0 -n 1 --top-logits 16777216
ok "--top-logits: at most the vocabulary" [ "$(grep '^# position ' "$tmp/err" | grep -o '", \| -*[0-9.]* [0-9.e-]*,' | wc -l)" -ge 4000 ]

# The first and second greedy token: ids for biases.
first=$(sed -nE 's/^# position [0-9]+, chosen ([0-9]+):.*/\1/p' "$tmp/top" | sed -n 1p)
second=$(sed -nE 's/^# position [0-9]+, chosen [0-9]+: [0-9]+ "([^"\\]|\\.)*" [^ ]* [^ ]*, ([0-9]+) .*/\2/p' "$tmp/top" | sed -n 1p)
run "$model" -p "Tell me a story about a fox." --temp 0 -n 1 --top-logits 1 --logit-bias "$first-inf"
ok "--logit-bias ID-inf: the second best comes up" has err "chosen $second: $first "
run "$model" -p "Tell me a story about a fox." --temp 0 -n 1 --top-logits 1 -l "$first-50" -l "7-1,$first+50"
ok "--logit-bias: those of one id add up" has err "chosen $first: $first "
run "$model" -p "Tell me a story about a fox." --temp 0 -n 3 --top-logits 1 --logit-bias 700+1000
ok "--logit-bias ID+VALUE: that token and no other" [ "$(grep -c 'chosen 700:' "$tmp/err")" -eq 3 ]

# The greedy story begins "Once upon a time"; a stop string may end inside a token or span two.
word=$(cut -c 10-20 "$tmp/greedy" | head -n 1)
run "$model" -p "Tell me a story about a fox." --temp 0 -n 60 --stop "$word"
printf '%s' "$(head -c 9 "$tmp/greedy")" >"$tmp/want"
printf '%s' "$(cat "$tmp/out")" >"$tmp/got"
ok "--stop ends the text before the stop string" same want got
ok "--stop says why" has err "stopped: stop string"
run "$model" -p "Tell me a story about a fox." --temp 0 -n 60 --stop "no such text" -r "$word" --stop "$word and more"
printf '%s' "$(cat "$tmp/out")" >"$tmp/got"
ok "-r is --stop, and several are several" same want got
run "$model" -p "Tell me a story about a fox." --temp 0 -n 60 --stop "${word}never"
ok "--stop: text that only begins like a stop string is printed" same greedy out
run "$model" -p "Tell me a story about a fox." --temp 0 -n 60 --stop "$(head -c 1 "$tmp/greedy")"
ok "--stop: the first byte ends it" size "$tmp/out" 0
ok "--stop: an empty text is not an error" [ "$status" -eq 0 ]
last=$(tail -c 4 "$tmp/greedy")
run "$model" -p "Tell me a story about a fox." --temp 0 -n 60 --stop "${last}x"
ok "--stop: text held back at the end is printed" same greedy out

error --repeat-penalty "$model" -p hi --repeat-penalty 0
error --repeat-penalty "$model" -p hi --repeat-penalty nan
error --presence-penalty "$model" -p hi --presence-penalty inf
error --frequency-penalty "$model" -p hi --frequency-penalty x
error --top-logits "$model" -p hi --top-logits -1
error --stop "$model" -p hi --stop
error --stop "$model" -p hi --stop ""
for bias in "" , 5 +1 5+ 5- 5+x 5+1, ,5+1 5+nan 5+inf 5+1e99 5--1 " 5+1" -1+1 5+1,6 5+1x 99999999999999999999999+1; do
    error --logit-bias "$model" -p hi --logit-bias "$bias"
done
error 0\ to\ 4095 "$model" -p hi --logit-bias 4096+1
for flag in --repeat-penalty --presence-penalty --frequency-penalty --logit-bias --stop --top-logits; do
    error "is not a logits option" logits "$model" --ids "$tmp/five.i32" -o "$tmp/x.f32" $flag 2
done

# ---- bench ---------------------------------------------------------------------------
run bench "$model" --mmproj "$tmp/tower.gguf" --images 6,0,7 -p 2 -n 0 -d 3 -r 2
ok "bench --images: exits 0" [ "$status" -eq 0 ]
rows=$(sed -nE 's/^\| .* (pp2 @ d3|img[0-9]+( @.*)?) \| +[0-9.]+ ± [0-9.]+ \|.*/\1/p' "$tmp/out" | tr '\n' ,)
ok "bench --images: a row for each picture, after the others and at no depth, got $rows" [ "$rows" = "pp2 @ d3,img6,img7," ]
ok "bench --images: milliseconds" [ "$(grep -cE ' img[67] \| +[0-9.]+ ± [0-9.]+ \| +[0-9.]+ ± [0-9.]+ ms \|' "$tmp/out")" -eq 2 ]
run bench "$model" --mmproj "$tmp/tower.gguf" --images 12 -p 0 -n 0 -r 1 -o csv
ok "bench --images: csv: milliseconds are those of the speed" awk -F, '
    NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i }
    NR == 2 { x = $at["avg_ts"] * $at["image_ms"] / 12000; good = $at["n_image"] == 12 && x > 0.999 && x < 1.001 }
    END { exit !good }' "$tmp/out"
ok "bench --images: csv: names the tower's file" has out "\"$tmp/tower.gguf\""
error "--images needs --mmproj" bench "$model" --images 6
error "expected at most 1120 tokens per picture, got 1121" bench "$model" --mmproj "$tmp/tower.gguf" --images 1121
run bench "$model" --mmproj "$tmp/tower.gguf" --images 1117 -p 0 -n 0
ok "bench --images: more than the tower's positions" has err "no positions for a picture of 1117 x 1 tokens"
error "nothing to measure" bench "$model" --mmproj "$tmp/tower.gguf" --images 0 -p 0 -n 0
for preset in e2b e4b 12b 26b-a4b 31b; do              # towers of true shape, with text models of true width
    "$build/make_gguf" --preset $preset --quant q8_0 --layers 2 --vocab 512 --sparse --out "$tmp/wide.gguf"
    "$build/make_gguf" --preset $preset --quant q8_0 --kind mmproj --sparse --out "$tmp/wide-tower.gguf"
    run plan "$tmp/wide.gguf" --mmproj "$tmp/wide-tower.gguf" --vram 60
    ok "plan: the image tower of $preset" [ "$status$(grep -c '^image tower  *[0-9.]* GiB, pictures of up to 280 tokens$' "$tmp/out")" = 01 ]
done
sizes=
for tokens in 70 1120; do
    run plan "$tmp/wide.gguf" --mmproj "$tmp/wide-tower.gguf" --vram 60 --image-tokens $tokens
    sizes="$sizes $(awk '/^image tower/ { print $3 }' "$tmp/out")"
done
# six rows of 1152 values for each of 9450 more patches
ok "plan: --image-tokens counts, $sizes" sh -c "echo $sizes | awk '{ exit !(\$2 - \$1 > 0.24 && \$2 - \$1 < 0.5) }'"
$limit "$gemma4" bench "$model" -p 3,70 -n 2 -d 0,5 -r 2 -t 2 >"$tmp/bench.md" 2>"$tmp/err"
status=$?
ok "bench: exit status 0" [ "$status" -eq 0 ]
rows=$(grep -cE '^\| .* \| +(cpu|cuda) +\| +2 \| +(pp3|pp70|tg2)( @ d5)? \| +[0-9]+\.[0-9]+ ± [0-9.]+ \|' "$tmp/bench.md")
ok "bench: a row for each test and depth, got $rows of 6" [ "$rows" -eq 6 ]
ok "bench: GB/s of generation" grep -qE ' tg2 @ d5 .* [0-9]+\.[0-9]+ \([0-9]+ %\) \|' "$tmp/bench.md"
peak=$(sed -n 's/^Int8 peak: \([0-9.]*\) TOPS.*/\1/p' "$tmp/bench.md")   # none without AVX-512 VNNI, or with a GPU
shares=$(grep -cE ' pp70( @ d5)? .* [0-9]+\.[0-9]+ TOPS \([0-9]+ %\) \|' "$tmp/bench.md")
ok "bench: int8 operations of prompts, if the peak is known (${peak:-no}), got $shares rows" \
    [ "$shares" -eq "$([ "$peak" ] && echo 2 || echo 0)" ]
ok "bench: planned and resident memory" grep -qE '^Memory: [0-9.]+ GiB planned, [0-9.]+ GiB resident' "$tmp/bench.md"
$limit "$gemma4" bench -r 1 -m "$model" -p 0 -n 2,3 -o csv >"$tmp/bench.csv" 2>"$tmp/err"
widths=$(awk -F, '{ print NF }' "$tmp/bench.csv" | sort -u | wc -l)
ok "bench: csv: a head and two lines of equal width" [ "$(wc -l <"$tmp/bench.csv") $widths" = "3 1" ]
card=$(awk -F, 'NR == 1 { for (i = 1; i <= NF; i++) if ($i == "card") at = i } END { print $at }' "$tmp/bench.csv" | tr -d '"')
ok "bench: csv: the card, none on the CPU" [ "$card" = "$("$gemma4" plan "$model" | sed -n 's/^card  *\([^,]*\),.*/\1/p')" ]
ok "bench: csv: names" grep -q '^model_filename,.*,n_gen,n_depth,avg_ts,stddev_ts,' "$tmp/bench.csv"
ok "bench: csv: dense prompts have no density" grep -qE ',0,0,0,[^,]+,[^,]+$' "$tmp/bench.csv"
$limit "$gemma4" bench "$model" -p 2 -n 0 --rows 5 -d 9 -r 3 -o json >"$tmp/bench.json" 2>"$tmp/err"
ok "bench: json: three samples" grep -qE '"samples_ts": \[[0-9.e+]+, [0-9.e+]+, [0-9.e+]+\]' "$tmp/bench.json"
ok "bench: json: how the context was filled" grep -q '"fill": "prompt"' "$tmp/bench.json"
ok "bench: json: rows of a step" grep -q '"n_verify": 5' "$tmp/bench.json"
ok "bench: json: begins and ends" [ "$(head -c 1 "$tmp/bench.json")$(tail -n 1 "$tmp/bench.json")" = "[]" ]
for list in x 1, ,1 -1 1.5 99999999999999999999 "1 2" 1x; do
    error "-p: expected at most 32 integers" bench "$model" -p "$list"
done
$limit "$gemma4" bench "$model" -p 0 -n 2 --rows 3,16 -d 0,9 -r 1 --fill random >"$tmp/bench.md" 2>"$tmp/err"
ok "bench: --rows: a row for each" [ "$(grep -cE '\| +vs(3|16)( @ d9 \(random fill\))? \| +[0-9]+\.[0-9]+ ± ' "$tmp/bench.md")" -eq 4 ]
ok "bench: --fill random says so" grep -qE ' tg2 @ d9 \(random fill\) \| ' "$tmp/bench.md"
$limit "$gemma4" bench "$model" -p 0 -n 2 -d 0,40 -r 1 --fill random -o csv -ctk f16,f32 --kv-layout untied >"$tmp/bench.csv" 2>"$tmp/err"
ok "bench: --fill random: csv" [ "$(cut -d, -f6 "$tmp/bench.csv" | tr -d '"\n')" = fillnonerandomnonerandom ]
run --n-prompt 2 --n-gen 2 --n-depth 2 --repetitions 1 -o csv -m "$model" bench
ok "bench: the long names of its flags, which may come before it" [ "$(wc -l <"$tmp/out")" -eq 3 ]
for flag in "-p x" "--n-prompt x" "-n x" "--n-gen x" "-d x" "--n-depth x" "-r 0" "--repetitions 0" "--pflash-density 101"; do
    # shellcheck disable=SC2086  # a flag and a value
    error "expected" bench "$model" $flag
done
error "-p: expected at most 32 integers" -p bench bench "$model"
error "--temp is not a bench option" --temp 0 bench "$model"
error "expected the command before the model; try gemma4 bench $model" "$model" bench -p 2
error "a second model file" "$model" "$model" -p hi
error "unknown command or missing file 'draft'; commands: serve, plan," draft "$model"
error "unknown command or missing file 'draft'" draft
error "unknown command or missing file 'frobnicate'" frobnicate -m "$model" -p hi
error "'tokenise'; did you mean tokenize?" tokenise "$model" -p hi
error "--tempp: unknown flag; did you mean --temp?" "$model" -p hi --tempp 1
error "-temp: unknown flag; did you mean --temp?" "$model" -p hi -temp 1
error "--nothing-like-it: unknown flag; try gemma4 bench --help" bench "$model" --nothing-like-it
error "--temp: expected a number from 0 to 1000, got ''" "$model" -p hi --temp=
error "--raw: expected no value, got 'yes'" "$model" -p hi --raw=yes
error "unexpected word 'hello' after the model" "$model" hello
error "a text needs -p: gemma4 tokenize $model -p \"hello world\"" tokenize "$model" "hello world"
error "unexpected word '8080' after the model $model; try gemma4 serve --help" serve "$model" 8080
error "expected a model file, got an empty name" "" -p hi
error "expected a model file; try gemma4 serve MODEL.gguf" serve
error "expected a model file; try gemma4 quantize IN OUT.gguf TYPE" quantize
error "there is no command 'llama-server'; type gemma4 serve MODEL.gguf" llama-server -m "$model"
for flag in -f -md --grammar-file --tools; do
    error "$flag: expected a file name, got an empty one" "$model" -p hi $flag ""
done
run "$model" -p hi --temp=0 -n=2 --think=false
cp "$tmp/out" "$tmp/equals"
run "$model" -p hi --temp 0 -n 2
ok "--flag=value is --flag value" same equals out
run "$model" -p hi --temp 0 -n 2 --reasoning-budget 0
ok "--reasoning-budget 0 needs no --think" same equals out
for flag in -f --tools; do
    error "$flag: /dev/zero: expected at most" "$model" -p hi $flag /dev/zero
done
error "--rows: expected at most 64" bench "$model" --rows 65
error "--fill: expected prompt|random" bench "$model" --fill zeros
error "-o: expected md|csv|json" bench "$model" -o xml
run bench "$model" -t 1,2 -ctk f16,q8_0 -p 2 -n 0 -r 1 -pg 3,2
ok "bench: a list for -t and -ctk: all combinations" [ "$(grep -cE '\| +[12] \| +pp2 .* (f16|q8_0) +\| (f16|q8_0) +\|$' "$tmp/out")" -eq 4 ]
ok "bench: one head" [ "$(grep -c '^| model' "$tmp/out")" -eq 1 ]
ok "bench: -pg" [ "$(grep -c '| *pp3+tg2 |' "$tmp/out")" -eq 4 ]
ok "bench: a build line" grep -qE '^build: [^ ]+ \(.+\), ' "$tmp/out"
run bench "$model" -md $drafter,models/gemma4-mini-dflash-q8_0.gguf --spec-force 0.7,0.5 -p 0 -n 2 -r 1 -o jsonl
ok "bench: -md A,B and jsonl: a line for each test" lines out 4
ok "bench: jsonl: objects that name the draft model" [ "$(grep -c '^{"model_filename": .*"model_draft": "models/.*\]}$' "$tmp/out")" -eq 4 ]
run bench "$model" -p 2 -n 2 -r 1 -ctk f16,q8_0 -o json
ok "bench: one list of several runs" [ "$(grep -c '^\[$' "$tmp/out")$(grep -c '^\]$' "$tmp/out")$(grep -c n_threads "$tmp/out")" = 114 ]
run bench "$model" -p 2 -n 2 -r 1 -o sql
ok "bench: sql: a table and two rows" [ "$(sed 's/ .*//' "$tmp/out" | tr '\n' ' ')" = "CREATE INSERT INSERT " ]
error "bench: nothing to measure: -p and -n are 0" bench "$model" -p 0 -n 0
for flag in "-t 0" "-t x" "-t 5000" "-ctk q9" "-ctk f16," "-pg 5" "-pg 5,0" "-pg 1,2,3"; do
    # shellcheck disable=SC2086  # a flag and a value
    error "${flag%% *}: expected" bench "$model" $flag
done
error "-c is not a bench option" bench "$model" -c 100
error "--temp is not a bench option" bench "$model" --temp 0
error "-d: expected at most" bench "$model" -d 16777216
error "an integer from 1" bench "$model" -r 0

# ---- sparse prompts, needles ---------------------------------------------------------
run bench "$model" -r 1 -p 1100 -n 0 -o json --pflash-density 10
ok "bench --pflash-density: says that it was forced" grep -q '"pflash_forced": 0.1' "$tmp/out"
ok "bench --pflash-density: prints the result" grep -qE '"pflash_density": 0\.9[0-9]' "$tmp/out"
run bench "$model" -r 1 -p 128 -n 0 --pflash --pflash-from 0
ok "bench --pflash: a number is not needed" [ "$status" -eq 0 ]
ok "bench --pflash: a short prompt is dense" grep -q 'pFlash: 100.0 %' "$tmp/out"
note="# note: --kv-tail: with --pflash, chunks of a prompt with more than 64 tokens do not read it"
run "$model" -p hi -n 1 --pflash --kv-tail 64 -ctk q8_0
ok "--pflash with --kv-tail: says what prompts do not read" [ "$(grep -cFx -e "$note" "$tmp/err")" -eq 1 ]
run "$model" -p hi -n 1 --pflash --kv-tail 64
ok "--pflash with an f16 cache: there is no tail" none err "note:"
run "$model" -p hi -n 1 -v -c 300 -ctk tq3 --kv-tail 1000000
ok "--kv-tail beyond the context: the context's memory" has err "plan: context 300: global KV 1.1 MiB"
run "$model" -p "$(yes 'The fox ran.' | head -n 40)" -v -n 1 --pflash 0.2 --pflash-from 0
ok "--pflash: the statistics have it" has err "pFlash: attended to 100.0 % of the blocks"
run niah "$model" -p 256,300 -d 0,100 -r 1 --needles 2 --svg "$tmp/map.svg"
ok "niah: exits 0" [ "$status" -eq 0 ]
ok "niah: the models find the needles" grep -q '^8 of 8 needles found, 100.0 %.$' "$tmp/out"
ok "niah: a row for each length" [ "$(grep -c '^| [0-9]' "$tmp/out")" -eq 2 ]
ok "niah: the heat map has a cell for each" [ "$(grep -c '^<g fill="black"><text .*>100</text>$' "$tmp/map.svg")" -eq 5 ]   # and the legend
long=$(yes 'The fox ran.' | head -n 300)
run "$model" -p "$long" -n 1 --temp 0 --compress 0.25
ok "--compress: prints the kept part, and that it is lossy" has err "# prompt compressed (lossy): kept "
run "$model" -p "$long" -n 1 --temp 0 --compress 0.25 --raw
ok "--compress --raw: prints the kept part" has err "# prompt compressed (lossy): kept "
run "$model" -p "Hello" -n 1 --temp 0 --compress 0.25
ok "--compress: a short prompt is left alone" eval '[ "$status" -eq 0 ] && ! grep -q compressed "$tmp/err"'
run "$model" -p hi --compress 0.5 --session "$tmp/none"
ok "--compress: not with --session" has err "--compress cannot be used with --session"
run "$model" -p hi --scorer "$model"
ok "--scorer: needs --compress" has err "try --compress 0.2"
for size in 512 4096; do                          # another size, and other words of the same size
    "$build/make_gguf" --preset micro-e --quant q8_0 --vocab $size --out "$tmp/words.gguf" >/dev/null 2>"$tmp/err"
    for verb in "" niah; do
        run $verb "$model" -p 512 --compress 0.5 --scorer "$tmp/words.gguf"
        ok "$verb --scorer: $size other words are refused" [ "$status" -eq 1 ]
        ok "$verb --scorer: $size other words: a line that names both files" grep -qE \
            "^gemma4: error: --scorer: $tmp/words.gguf: expected the vocabulary of $model.*(got 512|token [0-9]+ differs)" "$tmp/err"
    done
done
run niah "$model" -p 256 -d 50 -r 2 -o csv -f "$tmp/long.txt" --pflash 0.5
ok "niah: csv: a head and a line" lines out 2
ok "niah: csv: of equal width" [ "$(awk -F, '{ print NF }' "$tmp/out" | sort -u | wc -l)" -eq 1 ]
error "-p: expected prompts of at least 256" niah "$model" -p 100
error "-o: expected md|csv" niah "$model" -o json

# ---- perplexity ----------------------------------------------------------------------
run ppl "$model" -f "$tmp/long.txt" -c 128
ok "ppl: exits 0" [ "$status" -eq 0 ]
ok "ppl: the last line is the perplexity" grep -qE '^PPL = [0-9]+\.[0-9]{4} \+/- [0-9]+\.[0-9]{5}$' "$tmp/out"
run ppl "$model" -f "$tmp/long.txt" -c 64 --chunks 3 --kld-base "$tmp/base" -o jsonl
ok "ppl: jsonl is one line" lines out 1
ok "ppl: jsonl has the perplexity and no divergence" grep -qE '^\{"model_filename": .*"n_chunks": 3, "n_judged": 93, .*"ppl_error": [0-9.e-]+\}$' "$tmp/out"
ok "ppl: --kld-base: says its size" has err "kB for 93 ids"
run ppl "$model" -f "$tmp/long.txt" -c 64 --chunks 3 --kld "$tmp/base" -o json
ok "ppl: json begins and ends" [ "$(head -c 1 "$tmp/out")$(tail -n 1 "$tmp/out")" = "[]" ]
ok "ppl: a run is like itself" grep -qE '"same_top": (1|0\.9999+),' "$tmp/out"
run ppl "$model" -f "$tmp/long.txt" -c 64 --chunks 3 --kld "$tmp/base" -ctk f32 -o csv
ok "ppl: csv: a head and a line" lines out 2
ok "ppl: csv: of equal width" [ "$(awk -F, '{ print NF }' "$tmp/out" | sort -u | wc -l)" -eq 1 ]
ok "ppl: csv: names" grep -q ',ppl,ppl_error,base_ppl,.*,kld_mean,kld_error,kld_median,kld_99,kld_99_9,kld_max,same_top,' "$tmp/out"
run ppl "$model" -f "$tmp/long.txt" -c 64 --chunks 3 --kld "$tmp/base" -ctk f32
ok "ppl: md: the divergence" grep -qE '^\| [0-9.e-]+ ± [0-9.e-]+ \|.* %% \||^\| [0-9.e-]+ ± .* % \|' "$tmp/out"
wrong() { # wrong WORD FLAGS...: like error(), for ppl on that text
    word=$1
    shift
    error "$word" ppl "$model" -f "$tmp/long.txt" "$@"
}
wrong "-c: ids per chunk: expected 32 as in this run, got 64" -c 32 --kld "$tmp/base"
wrong "--chunks: expected 2 as in this run, got 3" -c 64 --chunks 2 --kld "$tmp/base"
wrong "--ppl-stride: expected 8 as in this run, got 0" -c 60 --ppl-stride 8 --kld "$tmp/base"
wrong "expected either --kld-base or --kld, got both" --kld "$tmp/base" --kld-base "$tmp/x"
wrong "-c: expected at least 4" -c 3
wrong "--ppl-stride: expected less than" -c 64 --ppl-stride 64
wrong "expected a text of at least 8000 ids" -c 8000
wrong "expected md|csv|json|jsonl" -o xml
wrong "a file written by --kld-base" -c 64 --kld "$tmp/five.i32"
wrong "a file written by --kld-base" -c 64 --kld "$tmp/long.txt"
wrong "No such file" -c 64 --kld "$tmp/missing"
wrong "No such file" -c 64 --kld-base "$tmp/missing/x"
error "-f: the text: expected" ppl "$model" -f README.md -c 64 --chunks 3 --kld "$tmp/base"
error "-f: expected a text" ppl "$model"
head -c 9000 "$tmp/base" >"$tmp/cut"
wrong "truncated" -c 64 --chunks 3 --kld "$tmp/cut"
{ head -c 9000 "$tmp/base" && printf x && tail -c +9002 "$tmp/base"; } >"$tmp/cut"
wrong "wrong checksum" -c 64 --chunks 3 --kld "$tmp/cut"
(trap '' XFSZ && ulimit -f 100 && exec "$gemma4" ppl "$model" -f "$tmp/long.txt" -c 64 --chunks 3 --kld-base "$tmp/base") >"$tmp/out" 2>"$tmp/err"
ok "ppl: a full disk: exit status 1" [ $? -eq 1 ]
ok "ppl: a full disk: says so" grep -q "^gemma4: error: --kld-base: " "$tmp/err"
run ppl "$model" -f "$tmp/long.txt" -c 64 --chunks 3 --kld "$tmp/base"
ok "ppl: a full disk: the old file is kept" [ "$status" -eq 0 ]

# ---- where the prompt comes from -----------------------------------------------------
fed() { # fed INPUT ARGUMENTS...: runs gemma4 with INPUT as standard input
    printf '%b' "$1" >"$tmp/in"
    shift
    $limit "$gemma4" "$@" >"$tmp/out" 2>"$tmp/err" <"$tmp/in"
    status=$?
}
fed "Tell me a story about a fox." "$model" --temp 0 -n 60
ok "standard input is the prompt" same greedy out
fed "Tell me a story about a fox." "$model" --temp 0 -n 60 -f -
ok "-f - is standard input" same greedy out
run tokenize "$model" -p "about a fox."
cp "$tmp/out" "$tmp/rest"
printf 'Read already.\nabout a fox.' >"$tmp/in"
{ read -r line; $limit "$gemma4" tokenize "$model" -f - >"$tmp/out" 2>"$tmp/err"; } <"$tmp/in"
ok "-f - reads from the current position of standard input" same rest out
fed "" "$model" -n 2 -f -
ok "-f -: an empty prompt is a prompt" [ "$status" -eq 0 ]
$limit "$gemma4" "$model" -n 2 -f - >"$tmp/out" 2>"$tmp/err" <"$tmp"
status=$?
ok "-f -: standard input that cannot be read: exit status 1" [ "$status" -eq 1 ]
ok "-f -: and one line that names it" grep -q '^gemma4: error: -f: standard input: ' "$tmp/err"
fed "Another text." "$model" --temp 0 -n 60 -p "Tell me a story about a fox."
ok "-p leaves standard input alone" same greedy out
fed "about a fox." tokenize "$model" -p "Tell me a story" -f -
cp "$tmp/out" "$tmp/joined"
run tokenize "$model" -p "Tell me a story

about a fox."
ok "-p and -f: an empty line between" same joined out
run "$model" -n 2
ok "no prompt at all: exit status 1" [ "$status" -eq 1 ]
ok "no prompt at all: one line" lines err 1
ok "no prompt at all: names -p" has err "-p: expected a prompt"
error -f "$model" -i -f -
error --history "$model" -p hi --history "$tmp/history"
error --think "$model" -p hi --think-budget 5
error "a chat cannot be used with --raw" "$model" -i --raw

# ---- chat ----------------------------------------------------------------------------
cd "$tmp" || exit 1
mini=$OLDPWD/$model
case $model in /*) mini=$model ;; esac
fed "Tell me a story about a fox.\nWho is it about?\n/stats\n/save two.json\n/nothing\n/clear now\n/save\n/system Be brief.\n/save three.json\n" \
    "$mini" -i --temp 0 -n 60
ok "chat: exits 0 at the end of input" [ "$status" -eq 0 ]
ok "chat: the first answer is that of -p" starts out greedy
ok "chat: cached tokens are not run again" has err "were cached"
ok "chat: /stats counts messages" has err "; 4 messages"
ok "chat: /save" has err "# 4 messages saved in two.json"
ok "chat: an unknown command" has err "# /nothing: unknown command"
ok "chat: a command with an argument too many" has err "# /clear: expected no argument"
ok "chat: a command without its argument" has err "# /save: expected FILE"
ok "chat: all statistics only from /stats" [ "$(grep -c '^# prompt: ' err)" -eq 1 ]
ok "chat: a line after each answer" [ "$(grep -c '^# [0-9]* tokens.*; prompt ' err)" -eq 2 ]
ok "chat: every line on stderr starts with '# '" none err '^[^#]|^#[^ ]'
ok "chat: /save leaves no partial file" [ "$(echo two.json*)" = two.json ]
ok "chat: /system comes first" grep -q '^\[{"role":"system","content":"Be brief."},{"role":"user"' three.json
sed -n '2,$p' out >second
ok "chat: a second answer" grep -q '[a-z]' second
tail -n 1 out >last
fed "/load two.json\n/retry\n/save again.json\n" "$mini" -i --temp 0 -n 60
ok "chat: the same conversation from a file gives the same answer" same last out
ok "chat: /load, /retry, /save: the same file" same two.json again.json
fed "Tell me a story about a fox.\nWho is it about?\n" "$mini" -i --temp 0 -n 60 --repeat-penalty 1.2
tail -n 1 out >penalised
fed "Tell me a story about a fox.\n/save p.json\n" "$mini" -i --temp 0 -n 60 --repeat-penalty 1.2
fed "/load p.json\nWho is it about?\n" "$mini" -i --temp 0 -n 60 --repeat-penalty 1.2
ok "chat: penalties count the tokens of the session only" same penalised out
fed "hi\n" "$mini" -i --temp 0 -n 4 -v
ok "chat: -v shows statistics" has err "# decode: "
fed "//clear, and tell me a story about a fox.\nTell me a story \\\\\nabout a fox.\n/save slash.json\n" "$mini" -i --temp 0 -n 8 --ignore-eos
ok "chat: two slashes are text with one" grep -qF '"content":"/clear, and tell me' slash.json
ok "chat: a backslash continues the line" grep -qF '"content":"Tell me a story \nabout a fox."' slash.json
echo "somebody's" >two.json.part
fed "/load two.json\n/save two.json\n" "$mini" -i --temp 0 -n 2
ok "chat: /save does not touch other files" grep -q "somebody's" two.json.part
mkfifo "$tmp/pipe"
fed "hi\n/save $tmp/pipe\n" "$mini" -i --temp 0 -n 2
ok "chat: /save replaces regular files only" [ -p "$tmp/pipe" ]
ok "chat: /save onto a pipe: says why" has err "# /save: $tmp/pipe: "
fed "hi\n/save /nowhere/x\n/load missing.json\n/load two.json/x\n/load err\nhi\n" "$mini" -i --temp 0 -n 2
ok "chat: /save and /load that fail: the chat continues" [ "$status" -eq 0 ]
ok "chat: /save says why" has err "# /save: /nowhere/x: "
ok "chat: /load says why" has err "# /load: missing.json: "
ok "chat: /load prints each reason" has err "# /load: two.json/x: Not a directory"
ok "chat: /load names the place" has err "# /load: err: messages"
fed "/retry\n/tool 5\n/exit\nhi\n" "$mini" -i --temp 0 -n 2
ok "chat: /retry without a message" has err "# no message to answer yet"
ok "chat: /tool without a call" has err "# /tool: the model did not call a tool"
ok "chat: /exit ends it" size out 0
run "$mini" -i -p "Tell me a story about a fox." --temp 0 -n 60
ok "chat: -p is the first message" starts out greedy

# A ring overwrites old rows, so it is saved before an answer that the next prompt will not contain. The last logits
# must equal, bit for bit, those of a session that gets the whole conversation at once.
story_of="Tell me a story about a"
resumed() { # resumed FLAGS...: runs $tmp/talk as a chat, then the conversation in a new one; compares the last logits
    fed "$talk/save long.json\n/stats\n" "$mini" -i --temp 0 "$@"
    grep -o 'last logits.*' err >last
    grep -o '; [0-9]* were cached' err >reused
    fed "/load long.json\n/retry\n/stats\n" "$mini" -i --temp 0 "$@"
    grep -o 'last logits.*' err >again
}
talk="$story_of fox.\n$story_of cow.\n$story_of duck.\nWho is it about?\n"
for template in small large; do
    resumed -n 100 --template $template
    ok "chat, $template: turns past the window are those of a fresh session" same last again
    ok "chat, $template: most of them was in the cache" grep -q '; [2-9][0-9][0-9] were' reused
done
talk="What is 22 minus 2?\nAnd 22 minus 3?\n"
resumed -n 200 --think
ok "chat: thoughts of earlier turns leave the prompt" same last again
talk="$story_of fox.\n$story_of cow.\n$story_of duck.\n/retry\n"
resumed -n 100 --template large
ok "chat: /retry past the window" same last again

# ---- sessions in files ---------------------------------------------------------------
# Several runs, each resuming the session file of the run before, must write the same text as one run and end with the
# same logits. The conversation is longer than the window; the seed is in the file.
printf '%s\n' "$story_of fox." "What is 22 minus 2?" "$story_of owl." "What is the capital of Austria?" >lines
in_runs() { # in_runs HOW FLAGS...: each line in a separate run; HOW -i: in a chat; -p: as the prompt
    how=$1 seed="-s 5"
    shift
    rm -f s
    : >parts
    while IFS= read -r line; do
        # shellcheck disable=SC2086  # two arguments, or none
        if [ "$how" = -i ]; then
            printf '%s\n' "$line" | $limit "$gemma4" "$@" -i -v --session s $seed >out 2>err
        else
            $limit "$gemma4" "$@" -v -p "$line" --session s $seed >out 2>err </dev/null
        fi
        cat out >>parts
        seed=
    done <lines
    grep -oE 'last logits.*|[0-9]+ were cached' err >again
}
for file in "$mini" "${mini%/*}/gemma4-mini-e-q8_0.gguf"; do
    for flags in "--temp 0" "--temp 1 --presence-penalty 0.3" "--temp 0 --think --template large"; do
        [ "$file" = "$mini" ] || [ "$flags" != "--temp 0" ] || continue
        # shellcheck disable=SC2086  # flags are words
        set -- "$file" -n 100 $flags
        $limit "$gemma4" "$@" -i -v -s 5 <lines >long 2>err
        grep -oE 'last logits.*|[0-9]+ were cached' err | tail -n 2 >last
        for how in -i -p; do
            in_runs $how "$@"
            ok "--session $how $flags: resumed runs write the same text as one run" same long parts
            ok "--session $how $flags: and end with its logits, with as much in the cache" same last again
        done
    done
done
for flags in "-n 40 --temp 0" "-n 40 --temp 1 -ctk q8_0" "-c 128 -n 80 --temp 1 --context-shift -ctk tq3 --kv-tail 40 --kv-swa q8_0"; do
    # shellcheck disable=SC2086
    set -- "$mini" --raw --ignore-eos $flags
    n=${flags#*-n } n=${n%% *}
    run "$@" -p "Once upon a time" -s 5 -n $((5 * n))
    cp out long
    rm -f s
    run "$@" -p "Once upon a time" -s 5 --session s
    cp out parts
    for i in 1 2 3 4; do
        run "$@" -p "" --session s
        cat out >>parts
    done
    ok "--session --raw $flags: five runs write the same text as one" same long parts
done
run "$mini" -v --raw -p "Once upon a" --temp 0 -n 0 --session s2
ok "--session: a prompt alone" has err "0 tokens generated"
run "$mini" --raw -p " time" --temp 0 -n 40 --session s2
cp out parts
run "$mini" --raw -p "Once upon a time" --temp 0 -n 40
ok "--session --raw: the prompt continues the text" same parts out

run "$mini" -p "Tell me a story about a fox." --temp 0 --session s3
cp s3 s3.before
error "-ctk: expected f32, got f16; try -ctk f16" "$mini" -p hi --session s3 -ctk f32
error "-ctv: expected f32, got f16" "$mini" -p hi --session s3 -ctv f32 --kv-layout untied
error "expected untied, got tied" "$mini" -p hi --session s3 --kv-layout untied
error "model: expected" "${mini%/*}/gemma4-mini-e-q8_0.gguf" -p hi --session s3
error "expected a session with a text, got one with a conversation; try without --raw" "$mini" -p hi --session s3 --raw
error "expected a session with a conversation, got one with a text; try with --raw" "$mini" -p hi --session s2
error "expected a gemma4 session file" "$mini" -p hi --session lines
error "expected a regular file" "$mini" -p hi --session .
error "expected a file name" "$mini" -p hi --session ""
error "cannot write to nowhere" "$mini" -p hi --session nowhere/s
error "--session is not a logits option" logits "$mini" --session s3
head -c 5000 s3 >cut && error "truncated" "$mini" -p hi --session cut
{ head -c 200000 s3 && printf x && tail -c +200002 s3; } >changed && error "damaged" "$mini" -p hi --session changed
[ -c /dev/full ] && error "expected a regular file, got a device" "$mini" -p hi --session /dev/full
mkdir shut && chmod 555 shut
folder=shut
touch shut/x 2>/dev/null && folder=/proc           # root can write everywhere except there
run "$mini" -p hi -n 4 --session $folder/s
ok "--session: a folder that cannot be written to: exit status 1" [ "$status" -eq 1 ]
ok "--session: a folder that cannot be written to: is named" grep -q "^gemma4: error: --session: $folder/s: " err
ok "--session: refused files are unchanged" same s3 s3.before
(trap '' XFSZ && ulimit -f 200 && exec $limit "$gemma4" "$mini" -p "What is 22 minus 2?" --temp 0 --session s3) >out 2>err
ok "--session, a full disk: exit status 1" [ $? -eq 1 ]
ok "--session, a full disk: the answer came" has out "22 - 2 = 20"
ok "--session, a full disk: says so" grep -q "^gemma4: error: --session: s3: .*; the old file is unchanged" err
ok "--session, a full disk: the old file is kept" same s3 s3.before
(trap '' XFSZ && ulimit -f 200 && printf 'hi\n/stats\n' | $limit "$gemma4" "$mini" -i --temp 0 --session s3) >out 2>err
ok "--session, a full disk in a chat: the chat continues" has err "# context: "
ok "--session, a full disk in a chat: says so" has err "# --session: s3: "
ok "--session, a full disk in a chat: the old file is kept" same s3 s3.before
ok "--session: no other file is left" [ -z "$(ls | grep tmp)" ]
mode_is() { [ -n "$(find "$2" -maxdepth 0 -perm "$1")" ]; }
ok "--session: only its owner reads a conversation" mode_is 600 s3
cp s3 s4 && chmod 640 s4 && ln -s s4 link && ln -s new link2
run "$mini" -p hi -n 2 --temp 0 --session link
ok "--session: a link leads to the file that is replaced" [ -h link -a "$status" -eq 0 ]
ok "--session: which was written" [ -z "$(cmp -s s3 s4 && echo same)" ]
ok "--session: and keeps its mode" mode_is 640 s4
run "$mini" -p hi -n 2 --temp 0 --session link2
ok "--session: a link to a missing file" [ -h link2 -a -s new ]
ln -s link4 link3 && ln -s link3 link4
error "symbolic links" "$mini" -p hi --session link3
if [ "$(id -u)" -ne 0 ]; then
    chmod 400 s4 && cp s4 s4.before
    error "ermission denied" "$mini" -p hi --session s4
    ok "--session: a read-only file is kept" same s4 s4.before
fi
fed "/clear\n/system Be short.\n" "$mini" -i --temp 0 --session s3
fed "/save kept.json\n" "$mini" -i --temp 0 --session s3
ok "/save: only its owner reads a conversation" mode_is 600 kept.json
ok "--session: commands of the chat are kept too" has kept.json '{"role":"system","content":"Be short."}]'

# ---- tool results --------------------------------------------------------------------
fed "What is the weather in Paris?\nhello\n/tool {\"temp\": 15}\n/tool x\n/save tool.json\n" "$mini" -i --temp 0 -n 60 --tools tools.json
ok "/tool: a message while a call waits is refused" has err "# the model called a tool; answer with /tool RESULT"
ok "/tool: the result follows its call" grep -qE '"tool_calls":\[\{"id":"(call_[0-9_]+)".*\{"role":"tool","tool_call_id":"call_[0-9_]+","content":\{"temp": 15\}\}' tool.json
ok "/tool: an answer follows" grep -q '"role":"tool".*"role":"assistant"' tool.json

# ---- thinking ------------------------------------------------------------------------
run "$mini" -p "What is 22 minus 2?" --think --show-thoughts --temp 0 -n 200
thought=$(sed -n '/^# thought:/,/^# /p' err)
for n in 0 1 2; do
    run "$mini" -p "What is 22 minus 2?" --think --think-budget $n --show-thoughts --temp 0 -n 200
    ok "--think-budget $n: an answer" grep -q '[0-9]' out
    ok "--think-budget $n: not the whole thought" [ "$(sed -n '/^# thought:/,/^# /p' err)" != "$thought" ]
done
run "$mini" -p "What is 22 minus 2?" --think --think-budget 0 --show-thoughts --temp 0 -n 200
ok "--think-budget 0: no thought" none err '^# thought:'
run "$mini" -p "What is 22 minus 2?" --think --think-budget 1000 --temp 0 -n 200
cp out free
run "$mini" -p "What is 22 minus 2?" --think --temp 0 -n 200
ok "--think-budget that is not reached changes nothing" same free out

# ---- a full context ------------------------------------------------------------------
run "$mini" -p "Tell me a story about a fox." --temp 0 --ignore-eos -c 64
ok "a full context ends the generation" has err "stopped: context full"
ok "a full context: says what to do" has err "--context-shift"
ok "a full context: exits 0" [ "$status" -eq 0 ]
cp out full
run "$mini" -p "Tell me a story about a fox." --temp 0 --ignore-eos -c 64 --context-shift -n 200 -sys "Be kind." -v
ok "--context-shift continues" has err "200 tokens generated, stopped: -n reached"
ok "--context-shift announces each shift" \
   [ "$(grep -c '^# context full: [0-9]* tokens dropped; kept the first [0-9]* and the newest [0-9]*$' err)" -ge 4 ]
run "$mini" -p "Tell me a story about a fox." --temp 0 --ignore-eos -c 64 --context-shift -n 80
ok "--context-shift changes nothing before the context is full" starts out full
run "$mini" -p "Once upon a time" --raw --temp 0 --ignore-eos -c 64 --context-shift -n 100
ok "--context-shift: --raw keeps the first token" has err "kept the first 1 and the newest 31"
fed "Tell me a story about a fox.\nAnd one about a cow, please, which is long enough to fill what is left of it all, and more.\nhi\n/stats\n" \
    "$mini" -i --temp 0 -n 30 -c 80
ok "chat: a full context: the message is refused" has err "# context full: the conversation has"
ok "chat: a full context: it is taken back" has err "; 4 messages"
fed "Tell me a story about a fox.\nAnd one about a cow.\nAnd now about a duck.\nhi\n/stats\n/save shifted.json\n" "$mini" -i --temp 0 -n 30 -c 96 \
    --context-shift -sys "Be kind."
ok "chat: --context-shift continues" has err "the model no longer sees"
ok "chat: --context-shift: /stats says so" grep -q "; 8 messages, the oldest [246] of them hidden from the model" err
ok "chat: --context-shift: /save writes all" grep -q '"Be kind.".*about a fox.*about a cow.*about a duck.*"hi"' shifted.json

fed "/load shifted.json\nAnd one about a cow, please, which is long enough to fill what is left of it all, and more, or most \
of it.\n/stats\n/retry\n" "$mini" -i --temp 0 -n 0 -c 96 --context-shift
ok "chat: --context-shift: a message that is taken back shifts" has err "no longer sees the oldest 8 messages"
ok "chat: --context-shift: the hidden messages come back" grep -q '; 8 messages$' err
ok "chat: --context-shift: /retry asks the message before" grep -q 'no longer sees the oldest [246] messages' err
echo null >null.json
fed "/load null.json\n/stats\nhi\n/save talk.json\n/load talk.json\n" "$mini" -i --temp 0 -n 2 --ignore-eos
ok "chat: /load of null: an empty conversation" has err "# 0 messages loaded from null.json"
ok "chat: /load of null: the chat continues" has err "# 2 messages loaded from talk.json"
ok "chat: /load of null: the saved file" grep -q '^\[{"role":"user","content":"hi"},{"role":"assistant"' talk.json

# ---- the plan ------------------------------------------------------------------------
run plan "$mini" -c 4096
ok "plan: exits 0" [ "$status" -eq 0 ]
ok "plan: stderr is empty" size err 0
trained=$(sed -nE 's/.*trained length ([0-9]+)$/\1/p' out)
ok "plan: prints the trained context length" [ "$trained" -ge 4096 ]
for word in weights "global KV" "window KV" staging activations scratch total available free "largest context that fits: $trained" 1048576; do
    ok "plan: says $word" has out "$word"
done
ok "plan: warns beyond the trained length" grep -q "^ *32768 .*exceeds the trained length" out
ok "plan: one command line is recommended" [ "$(grep -c '^recommended: gemma4 ' out)" -eq 1 ]
run plan "$mini" --vram 24 -c 32768
ok "plan: a row for each cache type, with estimates for a card of that size" \
    [ "$(grep -cE '^(f16|q8_0|q4_0|tq4|tq3) +32768 +[0-9]+\.[0-9] +[0-9]+\.[0-9]$' out)" -eq 5 ]
ok "plan: says that they are estimated, and for what" grep -q 'estimated for ' out
ok "plan: the row that they come from" grep -qE '^measured on an H100, .* f16: 534\.5 tok/s at 0, 377\.9 at 131072 \(commit [0-9a-f]+\)$' out
at_0() { awk '/^f16 / { print $3 }' out; }
slow=$(at_0)
run plan "$mini" --vram 32 -c 32768
case $(sed -n 's/.*estimated for //p' out) in
rtx5090*) ok "plan: an RTX 5090 reads 1.91 times as fast as an RTX 3090" [ "$(awk -v a="$(at_0)" -v b="$slow" 'BEGIN { printf "%.2f", a / b }')" = 1.91 ] ;;
esac
eval "set -- $(sed -n 's/^recommended: gemma4 //p' out)"
run "$@" -p hi -n 1
ok "plan: the recommended command line works" [ "$status" -eq 0 ]
run plan "$mini" --vram 0.03
ok "plan: no room: exit status 1" [ "$status" -eq 1 ]
ok "plan: no room: one line on stderr" lines err 1
most=$(sed -nE 's/.*try -c ([0-9]+), .*a larger --vram, a smaller model$/\1/p' err)
ok "plan: too little memory: prints the largest context that fits" [ -n "$most" ]
run plan "$mini" --vram 0.03 -c "$most"
ok "plan: that context fits" [ "$status" -eq 0 ]
run plan "$mini" --vram 0.03 -c $((most + 64))
ok "plan: one tile more does not" [ "$status" -eq 1 ]
run "$mini" -p hi -n 1 --vram 0.03 -c 0
ok "-c 0 uses the largest context that fits" grep -q ", context $most\$" err
run "$mini" -p hi -n 1 -c 0
ok "-c 0 uses at most the trained length" grep -q ", context $trained\$" err
error "try -c $most" "$mini" -p hi --vram 0.03 -c 8192
error "a smaller model" "$mini" -p hi --vram 0.001 -c 0
error plan plan "$mini" -p hi
error "expected h100|" plan "$mini" --card gtx1080
run plan "$mini" --card rtx3090
if [ "$status" -eq 0 ]; then
    ok "plan: --card: names it" grep -q '^card  *rtx3090 (pretended), compute capability 8\.6, 82 SMs, ' out
else
    error "--card: rtx3090: this build has no CUDA; build with make cuda" plan "$mini" --card rtx3090
    error "--card: rtx3090: " "$mini" -p hi --card rtx3090
fi
cd "$OLDPWD" || exit 1

# ---- a full disk, a closed pipe, Ctrl-C ----------------------------------------------
if [ -c /dev/full ]; then
    $limit "$gemma4" "$model" -p hi --temp 0 -n 20 --ignore-eos >/dev/full 2>"$tmp/err"
    status=$?
    ok "full disk: exit status 1" [ "$status" -eq 1 ]
    ok "full disk: an error line" grep -q '^gemma4: error: ' "$tmp/err"
    error /dev/full logits "$model" --ids "$tmp/five.i32" -o /dev/full
    $limit "$gemma4" --help >/dev/full 2>"$tmp/err"
    status=$?
    ok "full disk: --help: exit status 1" [ "$status" -eq 1 ]
    ok "full disk: --help: an error line" grep -q '^gemma4: error: standard output: ' "$tmp/err"
    $limit "$gemma4" --version >/dev/full 2>"$tmp/err"
    ok "full disk: --version: an error line" grep -q '^gemma4: error: standard output: ' "$tmp/err"
    $limit "$gemma4" bench "$model" -p 1 -n 1 -r 1 >/dev/full 2>"$tmp/err"
    status=$?
    ok "full disk: bench: exit status 1" [ "$status" -eq 1 ]
else
    skip "no /dev/full on this system"
fi
$limit "$gemma4" "$model" -p "Tell me a story." --temp 0 -n 4 >&- 2>"$tmp/err"
status=$?
ok "closed stdout: exit status 1" [ "$status" -eq 1 ]

{
    $limit "$gemma4" "$model" -p hi --temp 0 -n 4000 --ignore-eos 2>"$tmp/err"
    echo $? >"$tmp/status"
} | head -c 10 >"$tmp/ten"
status=$(cat "$tmp/status")
ok "closed pipe: the reader has its 10 bytes" size "$tmp/ten" 10
ok "closed pipe: no hang" [ "$status" -ne 124 ]
ok "closed pipe: no crash" [ "$status" -ne 139 ]

if env --default-signal=INT true 2>/dev/null; then      # a shell starts background commands with SIGINT ignored
    env --default-signal=INT "$gemma4" "$model" -p hi --temp 0 -n 8000 --ignore-eos >"$tmp/out" 2>"$tmp/err" &
    pid=$!
    i=0
    while [ ! -s "$tmp/out" ] && [ $i -lt 1200 ]; do sleep 0.1; i=$((i + 1)); done
    ok "Ctrl-C: text appears while it is generated" [ -s "$tmp/out" ]
    ok "Ctrl-C: the process runs until then" kill -INT $pid
    i=0
    while kill -0 $pid 2>/dev/null && [ $i -lt 1200 ]; do sleep 0.1; i=$((i + 1)); done
    ok "Ctrl-C: the process ends" [ $i -lt 1200 ]
    kill -9 $pid 2>/dev/null
    wait $pid
    status=$?
    ok "Ctrl-C: exit status 130" [ "$status" -eq 130 ]
    ok "Ctrl-C: the text so far is written" [ -s "$tmp/out" ]
    rm "$tmp/out"
    env --ignore-signal=INT "$gemma4" "$model" -p hi --temp 0 -n 200 --ignore-eos >"$tmp/out" 2>"$tmp/err" &
    pid=$!
    i=0
    while [ ! -s "$tmp/out" ] && [ $i -lt 1200 ]; do sleep 0.1; i=$((i + 1)); done
    kill -INT $pid
    wait $pid
    status=$?
    ok "Ctrl-C that is ignored: the run continues" [ "$status" -eq 0 ]
    ok "Ctrl-C that is ignored: to the end" has err "stopped: -n reached"
else
    skip "no 'env --default-signal' on this system: Ctrl-C"
fi

finish cli
