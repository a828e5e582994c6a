#!/bin/sh
# The page of `gemma4 view`: dumps of both small models become a page that an XML parser accepts, that needs nothing but itself,
# and that has every layer, every token and the greedy token; a dump that is missing, damaged or of another kind gives one line.
# tests/test_view.c checks the numbers.
# Environment: GEMMA4 (the binary, ./gemma4), STRICT=1 (skips fail).
cd "$(dirname "$0")/.." || exit 1
. tests/harness.sh

model=models/gemma4-mini-q8_0.gguf
parser=
if command -v xmllint >/dev/null 2>&1; then parser='xmllint --noout'
elif python3 -c 'import xml.dom.minidom' 2>/dev/null; then
    parser='python3 -c "import sys, xml.dom.minidom; xml.dom.minidom.parse(sys.argv[1])"'
else skip "no xmllint and no python3: nothing parses the page"
fi
parses() { [ -z "$parser" ] || eval "$parser" '"$1"' 2>"$tmp/err"; }
# Nothing of a page is loaded: links go to its own ids, and there is no script.
stands_alone() { ! grep -qE '://|url\(|@import|<script|<link|<img|src=|href="[^#]' "$1"; }
count() { [ "$(grep -o -e "$2" "$1" | wc -l)" -eq "$3" ]; }
one_line() { # one_line NAME TEXT ARGUMENTS...: status 1, no output, one line of error that contains TEXT
    what=$1 text=$2
    shift 2
    run "$@"
    ok "$what: exits 1" [ "$status" -eq 1 ]
    ok "$what: no output" [ ! -s "$tmp/out" ]
    ok "$what: one line" [ "$(grep -c '' "$tmp/err")" -eq 1 ]
    ok "$what: says why" grep -qF -e "$text" "$tmp/err"
}

# ---- pages ----

page() { # page NAME LAYERS ARGUMENTS...: a dump of models/gemma4-NAME, its page in $tmp/NAME.html
    name=$1 layers=$2
    shift 2
    run "models/gemma4-$name-q8_0.gguf" --temp 0 --dump "$tmp/$name" "$@"
    cp "$tmp/out" "$tmp/$name.txt"
    run view "$tmp/$name"
    cp "$tmp/out" "$tmp/$name.html"
    ok "$name: exits 0" [ "$status" -eq 0 ]
    ok "$name: nothing on stderr" [ ! -s "$tmp/err" ]
    ok "$name: parses" parses "$tmp/$name.html"
    ok "$name: needs nothing else" stands_alone "$tmp/$name.html"
    ok "$name: has $layers layers" count "$tmp/$name.html" '<details class="layer"' "$layers"
    ok "$name: has two maps for the heads of each layer" count "$tmp/$name.html" '<figcaption>head [0-9]' $((2 * layers))
    ok "$name: its output row has a line for each layer" count "$tmp/$name.html" '<tr><th>layer [0-9]*</th>' "$layers"
}
greedy() { # greedy NAME: the last layer's most likely token is the one that the run printed
    grep '^<tr><th>layer' "$tmp/$1.html" | tail -n 1 | sed 's/.*<th>layer [0-9]*<\/th><td[^>]*><span class="t">\([^<]*\)<.*/\1/' |
        tr -d '\n' >"$tmp/token"
    [ -s "$tmp/token" ] && [ "$(cat "$tmp/token")" = "$(cat "$tmp/$1.txt")" ]
}
page mini 6 -p "Tell me a story about a fox." -n 1
ok "mini: the greedy token" greedy mini
ok "mini: two experts for each token" count "$tmp/mini.html" '<td class="experts">[0-9]*: [0-9]* %, [0-9]*: [0-9]* %</td>' \
    "$(grep -c '<td class="experts">' "$tmp/mini.html")"
ok "mini: keys of two kinds" sh -c 'grep -q "sliding window of" "$1" && grep -q "global attention" "$1"' - "$tmp/mini.html"
ok "mini: shows all of a short run" sh -c '! grep -q "are not shown" "$1"' - "$tmp/mini.html"
page mini-e 7 -p "Tell me a story about a fox." -n 1
ok "mini-e: the greedy token" greedy mini-e
ok "mini-e: shared keys and values" grep -q 'keys and values of layer' "$tmp/mini-e.html"
ok "mini-e: per-layer embeddings" grep -q '<th>per-layer embedding adds</th>' "$tmp/mini-e.html"
ok "mini-e: no experts" count "$tmp/mini-e.html" '<td class="experts">' 0

i=0
while [ $i -lt 20 ]; do printf 'A <b>fox</b> & "owls" ran.\n'; i=$((i + 1)); done >"$tmp/long.txt"
run "$model" -f "$tmp/long.txt" --temp 0 -n 3 --raw --dump "$tmp/long"
run view "$tmp/long"
cp "$tmp/out" "$tmp/long.html"
ok "long: parses" parses "$tmp/long.html"
ok "long: says what is not shown" grep -q 'The page shows the last 64 tokens; [0-9]* earlier ones are not shown' "$tmp/long.html"
ok "long: 64 tokens in each layer" count "$tmp/long.html" '<td class="experts">' $((6 * 64))
ok "long: text is escaped" sh -c 'grep -q "&#60;" "$1" && ! grep -q "<b>fox" "$1"' - "$tmp/long.html"
ok "long: three output rows" count "$tmp/long.html" '<tr><th>layer [0-9]*</th>' 18
run view "$tmp/long" --last 8
ok "--last 8: 8 tokens in each layer" count "$tmp/out" '<td class="experts">' $((6 * 8))
run view "$tmp/long" --last 512
ok "--last 512: all tokens" sh -c '! grep -q "are not shown" "$1"' - "$tmp/out"
ok "--last 512: parses" parses "$tmp/out"

# ---- dumps that cannot be shown ----

make='make a dump with: gemma4 MODEL -p TEXT -n 1 --dump'
copy() { rm -rf "$tmp/bad"; cp -r "$tmp/mini" "$tmp/bad"; }
one_line "no folder" "expected the folder of a dump" view
one_line "a missing folder" "$make" view "$tmp/missing"
one_line "a file" "$make" view "$model"
mkdir "$tmp/empty"
one_line "an empty folder" "model.json: No such file or directory; $make" view "$tmp/empty"
for file in rows l_out-3 Qcur_pos-0 Kcur_pos-5 attn_post_norm-1 ffn_post_norm-2 ffn_moe_logits-4 lens-5 inp_scaled; do
    copy
    rm "$tmp/bad/$file.f32"
    one_line "without $file" "$file.f32: No such file or directory; $make" view "$tmp/bad"
    head -c 1000 "$tmp/mini/$file.f32" | head -c -1 >"$tmp/bad/$file.f32"
    one_line "$file cut off" "$file.f32: expected " view "$tmp/bad"
    rm "$tmp/bad/$file.f32"
    mkdir "$tmp/bad/$file.f32"
    one_line "$file is a folder" "$file.f32: expected " view "$tmp/bad"
done
copy
size=$(wc -c <"$tmp/mini/model.json")
for n in 0 1 10 40 100 150 300 500 700 "$((size / 2))" "$((size - 3))"; do
    head -c "$n" "$tmp/mini/model.json" >"$tmp/bad/model.json"
    one_line "$n bytes of model.json" "model.json: " view "$tmp/bad"
done
for change in s/256/0/ s/256/-1/ 's/"dim"/"din"/' 's/"n_heads":2/"n_heads":3/' 's/"kv_layer":0/"kv_layer":1/' 's/"layers"/"layer"/' \
    's/"tokens":\[/"tokens":{"a":/'; do
    sed "$change" "$tmp/mini/model.json" >"$tmp/bad/model.json"
    one_line "model.json, $change" "$tmp/bad/" view "$tmp/bad"
done
rm -rf "$tmp/bad"
cp -r "$tmp/mini-e" "$tmp/bad"
for key in n_kv_heads head_dim; do                 # of layer 5, which reads the cache of layer 3
    awk -v key="$key" '/"window"/ && n++ == 5 { sub("\"" key "\":[0-9]*", "\"" key "\":2") } 1' "$tmp/mini-e/model.json" \
        >"$tmp/bad/model.json"
    one_line "another $key than the cache that it reads" "model.json: layer 5: its sizes contradict each other" view "$tmp/bad"
done
copy
for file in rows l_out-3 Qcur_pos-0 lens-5 ffn_moe_logits-4; do      # values that are not numbers
    head -c "$(wc -c <"$tmp/mini/$file.f32")" /dev/zero | tr '\0' '\377' >"$tmp/bad/$file.f32"
    [ $file != rows ] || one_line "rows that are not numbers" "rows.f32: row 0: expected a token id" view "$tmp/bad"
    cp "$tmp/mini/rows.f32" "$tmp/bad"
done
run view "$tmp/bad"
ok "values that are not numbers: a page all the same" [ "$status" -eq 0 ]
ok "values that are not numbers: parses" parses "$tmp/out"
run "$model" -p "A fox." --temp 0 -n 2 --session "$tmp/s"
run "$model" -p "And an owl." --temp 0 -n 2 --session "$tmp/s" --dump "$tmp/resumed"
one_line "a resumed session" "expected position 0" view "$tmp/resumed"
if [ -w /dev/full ]; then
    "$gemma4" view "$tmp/mini" >/dev/full 2>"$tmp/err"
    status=$?
    ok "a full disk" [ "$status" -eq 1 ]
fi
finish view_page
