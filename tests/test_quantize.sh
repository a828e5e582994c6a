#!/bin/sh
# Tests of gemma4 quantize, end to end, and of Hugging Face folders as models: bytes, round trips, errors, a killed
# process, a full disk.
# Environment: BUILD (build: make_gguf and make_hf), GEMMA4 (./gemma4), STRICT=1 (skips fail).
cd "$(dirname "$0")/.." || exit 1
. tests/harness.sh
make_gguf=$build/make_gguf make_hf=$build/make_hf
mini=models/gemma4-mini-q8_0.gguf

made() { [ "$status" -eq 0 ]; }
same() { [ -s "$1" ] && cmp -s "$1" "$2"; }
has() { grep -qF -e "$2" "$tmp/$1"; }
source_file() { # source_file NAME: makes $tmp/NAME.gguf; PRESET-QUANT[-KIND], with the arguments of test_make_gguf.sh
    [ -f "$tmp/$1.gguf" ] && return
    [ "$1" = gemma4-mini-q8_0 ] && { cp "$mini" "$tmp/$1.gguf"; return; }
    stem=$1 what=target seed=1
    set --
    case $stem in *-mtp | *-dflash) what=${stem##*-} base=${stem%-*} ;; *) base=$stem ;; esac
    case $stem in micro-*) seed=11; set -- --separate-pools ;; esac
    "$make_gguf" --preset "${base%-*}" --quant "${base##*-}" --kind "$what" --seed "$seed" "$@" \
        --out "$tmp/$stem.gguf" || exit 1
}
refuse() { # refuse WORD ARGUMENTS...: must fail with status 1 and one error line that contains WORD, and leave no new file
    word=$1
    shift
    ls -a "$tmp" >"$tmp.before"
    run "$@"
    ls -a "$tmp" >"$tmp.after"
    ok "[$*]: exit status 1" [ "$status" -eq 1 ]
    ok "[$*]: one line that starts with 'gemma4: error:'" [ "$(grep -c '^gemma4: error: ' "$tmp/err")" -eq 1 ]
    ok "[$*]: names '$word'" has err "$word"
    ok "[$*]: leaves no file" cmp -s "$tmp.before" "$tmp.after"
    rm -f "$tmp.before" "$tmp.after"
}
: >"$tmp/out"
: >"$tmp/err"

# ---- bytes ---------------------------------------------------------------------------
# The hashes are those of llama-quantize's files (llama.cpp v0.5.0, without an importance matrix) from the same sources.
while read -r want name type; do
    source_file "$name"
    run quantize "$tmp/$name.gguf" "$tmp/q.gguf" "$type"
    got=$("$make_hf" --list "$tmp/q.gguf" | sed -n 's/^file //p')
    ok "$name to $type: hash $want" [ "$got" = "$want" ]
done <tests/golden/quantize.txt

for name in micro-dense-f16 micro-moe-f16 micro-e-f32; do
    run quantize "$tmp/$name.gguf" "$tmp/a.gguf" f16
    run quantize "$tmp/a.gguf" "$tmp/b.gguf" f32
    run quantize "$tmp/b.gguf" "$tmp/c.gguf" F16
    ok "$name: f16, f32, f16 gives the same bytes" same "$tmp/a.gguf" "$tmp/c.gguf"
    run quantize "$tmp/a.gguf" "$tmp/d.gguf" q8_0 -t 1
    run quantize "$tmp/b.gguf" "$tmp/e.gguf" q8_0 -t 2
    ok "$name: q8_0 from f16 and from f32 are the same" same "$tmp/d.gguf" "$tmp/e.gguf"
    run quantize "$tmp/d.gguf" "$tmp/f.gguf" q8_0
    ok "$name: q8_0 from q8_0 copies" same "$tmp/d.gguf" "$tmp/f.gguf"
    run logits "$tmp/d.gguf" --ids tests/golden/tokens.i32 -o "$tmp/d.f32"
    ok "$name: the q8_0 file runs" made
done
run quantize "$mini" "$tmp/mini32.gguf" f32
ok "to f32: no warning" [ "$(grep -c warning "$tmp/err")" -eq 0 ]
ok "a summary with sizes and bits per weight" has err "32.00 bits per weight"
run quantize "$mini" "$tmp/q.gguf" q4_0
ok "from q8_0: one warning" [ "$(grep -c warning "$tmp/err")" -eq 1 ]
ok "nothing on stdout" [ ! -s "$tmp/out" ]

# ---- Hugging Face folders ------------------------------------------------------------
# The same model as a folder gives the same logits, bit for bit, and the same tensors when it is quantised.
same_tensors() { # same_tensors NAME FOLDER FILE.gguf TYPE
    rm -f "$tmp/a.gguf" "$tmp/b.gguf"
    run quantize "$3" "$tmp/a.gguf" "$4"
    run quantize "$2" "$tmp/b.gguf" "$4"
    "$make_hf" --list "$tmp/a.gguf" | grep -v '^file' >"$tmp/a.txt"
    "$make_hf" --list "$tmp/b.gguf" | grep -v '^file' >"$tmp/b.txt"
    ok "$1: the same tensors after quantising" same "$tmp/a.txt" "$tmp/b.txt"
}
same_model() { # same_model NAME FOLDER FILE.gguf
    rm -f "$tmp/a.f32" "$tmp/b.f32"
    run logits "$3" --ids tests/golden/tokens.i32 -o "$tmp/a.f32"
    run logits "$2" --ids tests/golden/tokens.i32 -o "$tmp/b.f32"
    ok "$1: the same logits" same "$tmp/a.f32" "$tmp/b.f32"
    same_tensors "$1" "$2" "$3" q4_k_m
}
for name in micro-dense-f16 micro-moe-f16 micro-e-f32; do
    "$make_hf" "$tmp/$name.gguf" "$tmp/$name"
    same_model "$name" "$tmp/$name" "$tmp/$name.gguf"
    "$make_hf" --round "$tmp/$name.gguf" "$tmp/r.gguf"
    "$make_hf" "$tmp/r.gguf" "$tmp/$name.set" --bf16 --extra --shards 2 --prefix language_model.model.
    same_model "$name, BF16 vectors, two files, an index, other modalities" "$tmp/$name.set" "$tmp/r.gguf"
    ok "$name: other modalities are counted and named" has err "3 tensors do not belong to the text model"
    run plan "$tmp/$name.set" --mmproj "$tmp/$name.set"                          # whose tower is of a wrong type
    ok "$name: an image tower that is opened is not counted" has err "# 1 tensor does not belong to the text model and is ignored, the first: model.audio_tower."
    "$make_hf" "$tmp/$name.gguf" "$tmp/$name.num" --shards 3 --numbered --prefix model.
    same_model "$name, three numbered files" "$tmp/$name.num" "$tmp/$name.gguf"
done
same_model "a folder by its file" "$tmp/micro-e-f32/model.safetensors" "$tmp/micro-e-f32.gguf"
same_model "a folder by its index" "$tmp/micro-e-f32.set/model.safetensors.index.json" "$tmp/r.gguf"
for pairs in 1 2; do
    "$make_hf" "$tmp/mini32.gguf" "$tmp/mini$pairs" --shards $pairs
    run "$tmp/mini32.gguf" -p "Tell me a story about a fox's 2 friends." --temp 0 -n 40
    cp "$tmp/out" "$tmp/a.txt"
    run "$tmp/mini$pairs" -p "Tell me a story about a fox's 2 friends." --temp 0 -n 40
    ok "tokenizer.json, form $pairs: the same text" same "$tmp/a.txt" "$tmp/out"
done
for kind in micro-dense-f32-mtp micro-e-f32-mtp; do
    source_file $kind
    "$make_hf" "$tmp/$kind.gguf" "$tmp/$kind" --prefix model.
    same_tensors "$kind, an assistant's folder" "$tmp/$kind" "$tmp/$kind.gguf" q8_0
    "$gemma4" quantize "$tmp/$kind" "$tmp/b.gguf" f16 2>/dev/null
    for key in embedding_length_out nextn_predict_layers attention.sliding_window_pattern; do
        ok "$kind: key $key" grep -qa "gemma4-assistant.$key" "$tmp/b.gguf"
    done
done

# ---- damaged folders
folder() { # folder: makes a new copy to damage
    rm -rf "$tmp/bad"
    cp -r "$tmp/micro-e-f32" "$tmp/bad"
}
edit() { # edit FILE SED-SCRIPT
    folder
    sed "$2" "$tmp/bad/$1" >"$tmp/edited"
    cmp -s "$tmp/edited" "$tmp/bad/$1" && ok "edit: '$2' changes $1" false
    mv "$tmp/edited" "$tmp/bad/$1"
}
folder
rm "$tmp/bad/config.json"
refuse "config.json" quantize "$tmp/bad" "$tmp/x.gguf" q8_0
folder
rm "$tmp/bad/model.safetensors"
refuse "E_OPEN" quantize "$tmp/bad" "$tmp/x.gguf" q8_0
folder
rm "$tmp/bad/tokenizer.json"
refuse "tokenizer.json" quantize "$tmp/bad" "$tmp/x.gguf" q8_0
edit config.json 's/^}//'
refuse "not JSON" quantize "$tmp/bad" "$tmp/x.gguf" q8_0
edit config.json 's/"model_type": "gemma4"/"model_type": "llama"/'
refuse "model_type" quantize "$tmp/bad" "$tmp/x.gguf" q8_0
edit config.json 's/"model_type": "gemma4"/"model_type": "qwen3"/'
refuse "draft models" quantize "$tmp/bad" "$tmp/x.gguf" q8_0
edit config.json 's/"hidden_size": [0-9]*,//'
refuse "'hidden_size'" quantize "$tmp/bad" "$tmp/x.gguf" q8_0
edit config.json 's/"hidden_size": [0-9]*,/"hidden_size": 65,/'
refuse "token_embd.weight" "$tmp/bad" -p hi
edit config.json 's/"num_attention_heads": [0-9]*/"num_attention_heads": 1e3/'
refuse "num_attention_heads" quantize "$tmp/bad" "$tmp/x.gguf" q8_0
edit config.json 's/"sliding_attention", "full_attention"\]/"full_attention"]/'
refuse "one per layer" quantize "$tmp/bad" "$tmp/x.gguf" q8_0
edit config.json 's/\["sliding_attention"/["chunked_attention"/'
refuse "chunked_attention" quantize "$tmp/bad" "$tmp/x.gguf" q8_0
edit config.json 's/"rope_type": "proportional"/"rope_type": "yarn"/'
refuse "rope_parameters" quantize "$tmp/bad" "$tmp/x.gguf" q8_0
edit config.json 's/"rope_type": "default"/"rope_type": "yarn"/'
refuse "'rope_parameters': sliding_attention: expected rope_type default" quantize "$tmp/bad" "$tmp/x.gguf" q8_0
edit config.json 's/"rope_type": "proportional"/"rope_type": "proportional", "beta_fast": 32/'
refuse "beta_fast" quantize "$tmp/bad" "$tmp/x.gguf" q8_0
edit tokenizer.json 's/: 7,$/: 8,/'
refuse "got 8 again" quantize "$tmp/bad" "$tmp/x.gguf" q8_0
for merge in 7 '{}' '[]' '["a"]' '["a","b","c"]' '["a b","c"]' '["a",7]' '["","b"]' '"ab"' '" b"' '"a b c"'; do
    edit tokenizer.json 's/"merges": \[/"merges": ['"$merge"',/'
    refuse "merge 0: expected two texts without spaces" quantize "$tmp/bad" "$tmp/x.gguf" q8_0
done
for name in config.json tokenizer.json tokenizer_config.json generation_config.json chat_template.jinja; do
    folder
    rm -f "$tmp/bad/$name"
    mkfifo "$tmp/bad/$name"                       # a reader of a FIFO would wait for a writer
    refuse "$name: expected a regular file" quantize "$tmp/bad" "$tmp/x.gguf" q8_0
done
edit tokenizer.json 's/"vocab"/"words"/'
refuse "model.vocab" quantize "$tmp/bad" "$tmp/x.gguf" q8_0
folder
head -c 5000 "$tmp/micro-e-f32/model.safetensors" >"$tmp/bad/model.safetensors"
refuse "(E_" quantize "$tmp/bad" "$tmp/x.gguf" q8_0
edit model.safetensors 's/layers.0.self_attn.q_proj/layers.0.self_attn.x_proj/'
refuse "x_proj.weight" "$tmp/bad" -p hi
edit model.safetensors 's/layers.1.input_layernorm/layers.0.input_layernorm/'
refuse "E_NAME_DUP" quantize "$tmp/bad" "$tmp/x.gguf" q8_0
edit model.safetensors 's/"dtype":"F32","shape":\[64\]/"dtype":"I32","shape":[64]/'
refuse "expected F32, F16 or BF16, got I32" quantize "$tmp/bad" "$tmp/x.gguf" q8_0

# ---- errors --------------------------------------------------------------------------
printf 'This is a text file and no model, whatever its name says.\n' >"$tmp/text.gguf"
cp "$tmp/micro-moe-f16.gguf" "$tmp/own.gguf"
ln -s own.gguf "$tmp/link.gguf"
mkdir "$tmp/folder.gguf"
refuse "q9_9: expected a type, one of" quantize "$mini" "$tmp/x.gguf" q9_9
refuse "IN OUT.gguf TYPE" quantize "$mini" "$tmp/x.gguf"
refuse "IN OUT.gguf TYPE" quantize "$mini"
refuse "q8_0" quantize "$mini" "$tmp/x.gguf" q4_0 q8_0
refuse "text.gguf" quantize "$tmp/text.gguf" "$tmp/x.gguf" q8_0
refuse "missing.gguf" quantize "$tmp/missing.gguf" "$tmp/x.gguf" q8_0
refuse "no/such/x.gguf" quantize "$mini" "$tmp/no/such/x.gguf" q8_0
refuse "the model file itself" quantize "$tmp/own.gguf" "$tmp/own.gguf" q8_0
refuse "the model file itself" quantize "$tmp/own.gguf" "$tmp/link.gguf" q8_0
refuse "expected a regular file to write" quantize "$tmp/own.gguf" "$tmp/folder.gguf" q8_0
refuse "expected a regular file to write" quantize "$tmp/own.gguf" /dev/null q8_0
refuse "one part of a split model" quantize "$tmp/own.gguf" "$tmp/micro-e-f32/model.safetensors" q8_0
refuse "one part of a split model" quantize "$tmp/own.gguf" "$tmp/x-00001-of-00002.gguf" q8_0
refuse "-p" quantize "$tmp/own.gguf" "$tmp/x.gguf" q8_0 -p hi
ok "the model is untouched" same "$tmp/own.gguf" "$tmp/micro-moe-f16.gguf"
cp "$tmp/micro-dense-f16.gguf" "$tmp/nan.gguf"
printf '\377\377' | dd of="$tmp/nan.gguf" bs=1 seek=200000 conv=notrunc 2>/dev/null
refuse "NaN or Inf" quantize "$tmp/nan.gguf" "$tmp/x.gguf" q8_0
cp "$tmp/micro-e-f32.gguf" "$tmp/nan.gguf"
printf '\377\377\177\177' | dd of="$tmp/nan.gguf" bs=4 seek=100000 conv=notrunc 2>/dev/null
refuse "too large for F16" quantize "$tmp/nan.gguf" "$tmp/x.gguf" f16
refuse "too large for Q8_0" quantize "$tmp/nan.gguf" "$tmp/x.gguf" q8_0
rm "$tmp/nan.gguf"

# ---- a full disk, kill -9, Ctrl-C, a model that is truncated: the old file is kept ---
echo "what stood there" >"$tmp/stay.txt"
cp "$tmp/stay.txt" "$tmp/stay.gguf"
if (ulimit -f 100) 2>/dev/null; then              # a file size limit simulates a full disk
    (ulimit -f 100 && exec "$gemma4" quantize "$tmp/micro-e-f32.gguf" "$tmp/stay.gguf" f16) >"$tmp/out" 2>"$tmp/err"
    status=$?
    ok "full disk: exit status 1" [ "$status" -eq 1 ]
    ok "full disk: one error line" [ "$(grep -c '' "$tmp/err")" -eq 1 ]
    ok "full disk: the old file stands" same "$tmp/stay.txt" "$tmp/stay.gguf"
    ok "full disk: nothing is left" [ -z "$(ls "$tmp" | grep tmp)" ]
else
    skip "this shell cannot limit the file size: no failing write"
fi
source_file tiny-moe-f32
# A model of real size whose weights are holes in the file, so that a run takes long enough on every machine.
long=$tmp/long.gguf
"$make_gguf" --preset e2b --quant f32 --sparse --out "$long" || exit 1
holes=$(du -k "$long" | awk '{ print ($1 < 200000) }')
[ "$holes" = 1 ] || rm -f "$long"
in_the_middle() { # in_the_middle COMMAND...: starts a run on $long; when its file exists, runs the command with the pid
    env --default-signal=INT,QUIT "$gemma4" quantize "$long" "$tmp/stay.gguf" q6_k -t 1 >"$tmp/out" 2>"$tmp/err" &
    pid=$!
    while [ -z "$(ls "$tmp" | grep 'stay.gguf.*tmp')" ] && kill -0 $pid 2>/dev/null; do sleep 0.01; done
    "$@" $pid 2>/dev/null
    sent=$?
    wait $pid
    status=$?
}
if [ "$holes" != 1 ]; then
    skip "no sparse files here: runs that are interrupted"
elif env --default-signal=INT true 2>/dev/null; then      # a shell starts background commands with SIGINT and SIGQUIT ignored
    in_the_middle kill -KILL
    ok "kill -9: it was in the middle" [ "$status" -eq 137 ]
    ok "kill -9: the old file stands" same "$tmp/stay.txt" "$tmp/stay.gguf"
    rm -f "$tmp"/stay.gguf.*.tmp
    in_the_middle kill -INT
    ok "Ctrl-C: exit status 130" [ "$status" -eq 130 ]
    ok "Ctrl-C: the old file stands" same "$tmp/stay.txt" "$tmp/stay.gguf"
    ok "Ctrl-C: nothing is left" [ -z "$(ls "$tmp" | grep tmp)" ]
    again_and_again() { for i in 1 2 3 4 5 6 7 8; do kill -INT "$1"; sleep 0.001; done; }     # signals at the same time would be merged
    in_the_middle again_and_again
    ok "Ctrl-C again and again: exit status 130" [ "$status" -eq 130 ]
    ok "Ctrl-C again and again: nothing is left" [ -z "$(ls "$tmp" | grep tmp)" ]
    in_the_middle kill -TERM
    ok "SIGTERM: exit status 143" [ "$status" -eq 143 ]
    ok "SIGTERM: nothing is left" [ -z "$(ls "$tmp" | grep tmp)" ]
    ulimit -c 0                                         # no core file
    in_the_middle kill -QUIT
    ok "SIGQUIT: exit status 131" [ "$status" -eq 131 ]
    ok "SIGQUIT: nothing is left" [ -z "$(ls "$tmp" | grep tmp)" ]
    trap '' HUP
    long=$tmp/tiny-moe-f32.gguf                         # short enough to finish
    for _ in 1 2 3 4 5 6 7 8 9; do
        in_the_middle kill -HUP
        [ "$sent" -ne 0 ] || break
    done
    long=$tmp/long.gguf
    ok "SIGHUP: it was in the middle" [ "$sent" -eq 0 ]
    trap - HUP
    ok "SIGHUP under nohup: the run continues" [ "$status" -eq 0 ]
    cp "$tmp/stay.txt" "$tmp/stay.gguf"
    run quantize "$tmp/tiny-moe-f32.gguf" "$tmp/stay.gguf" q6_k
    ok "after that it works" made
    ok "and replaces the old file" [ "$("$make_hf" --list "$tmp/stay.gguf" | grep -c Q6_K)" -gt 10 ]
    cp "$tmp/stay.txt" "$tmp/stay.gguf"
    shorten() { dd if=/dev/null of="$long" bs=1 seek=200000 2>/dev/null; }
    in_the_middle shorten
    ok "a model that gets shorter: exit status 1" [ "$status" -eq 1 ]
    ok "a model that gets shorter: one error line" [ "$(grep -c 'gemma4: error: a model file was truncated' "$tmp/err")" -eq 1 ]
    ok "a model that gets shorter: the old file stands" same "$tmp/stay.txt" "$tmp/stay.gguf"
    ok "a model that gets shorter: nothing is left" [ -z "$(ls "$tmp" | grep tmp)" ]
else
    skip "no 'env --default-signal' on this system: what happens in the middle of a run"
fi

finish quantize
