#!/bin/sh
# Images in the server's APIs with curl, on a model and a tower of random weights: all forms of a part mean the same image,
# what an image costs, what of it is kept, what is refused.
# Environment: GEMMA4 (the binary, ./gemma4), BUILD (build: make_gguf), CC (used if that is not there), STRICT=1 (skips fail).
cd "$(dirname "$0")/.." || exit 1
. tests/harness.sh
make_gguf=$build/make_gguf
if [ ! -x "$make_gguf" ]; then
    make_gguf=$tmp/make_gguf
    ${CC:-cc} -std=c11 -O2 tests/make_gguf.c -o "$make_gguf" -lm || exit 1
fi
"$make_gguf" --preset micro-dense --vocab 262144 --quant q8_0 --out "$tmp/text.gguf" &&
    "$make_gguf" --preset micro-dense --vocab 258000 --quant q8_0 --out "$tmp/half.gguf" &&
    "$make_gguf" --preset micro-dense --kind mmproj --quant f32 --out "$tmp/tower.gguf" || exit 1
run serve "$tmp/text.gguf" --host 203.0.113.1 --port 0               # an address that this machine does not have
if ! command -v curl >/dev/null 2>&1 || grep -q 'libmicrohttpd' "$tmp/err"; then
    skip "images in the server: curl or libmicrohttpd is not here"
    finish test_pictures_server
    exit
fi

start() { # start FLAGS...: a server with the model
    : >"$tmp/log"
    "$gemma4" serve "$tmp/text.gguf" --port 0 -t 1 -c 4096 --request-memory 64 --cache-ram 64 "$@" >/dev/null 2>"$tmp/log" </dev/null &
    pid=$!
    trap 'kill -9 $pid 2>/dev/null; rm -rf "$tmp"' EXIT
    wait_for_server "$tmp/log"
}
stop() {
    kill -TERM "$pid"
    wait "$pid"
    status=$?
    ok "the server ends as always" [ "$status" -eq 0 ]
    ok "no answer was a 5xx" [ "$(grep -c '"status":5' "$tmp/log")" -eq 0 ]
}
ask() { # ask PATH BODY: writes the response to $tmp/out; sets $code
    printf '%s' "$2" >"$tmp/body"
    code=$(curl -sS -m 300 -o "$tmp/out" -w '%{http_code}' --data-binary "@$tmp/body" "$url$1" 2>"$tmp/err")
}
get() { code=$(curl -sS -m 300 -o "$tmp/out" -w '%{http_code}' "$url$1" 2>"$tmp/err"); }
has() { grep -qF -e "$1" "$tmp/out"; }
text() { grep -oE "\"$1\":\"w[0-9w ]*\"|\"$1\":\" w[0-9w ]*\"" "$tmp/out" | head -n 1 | sed 's/^"[a-z]*"://'; }
number() { grep -oE "\"$1\":[0-9]+" "$tmp/out" | tail -n 1 | sed 's/.*://'; }
computed() { # images that the tower has computed so far
    curl -sS -m 300 "$url/metrics" 2>"$tmp/err" | sed -n 's/^gemma4_images_total //p'
}
refused() { # refused NAME WORD PATH BODY: status 400, and a message that contains WORD
    ask "$3" "$4"
    ok "$1: status 400, not $code" [ "$code" = 400 ]
    ok "$1: says '$2', not $(head -c 300 "$tmp/out")" has "$2"
}
picture() { # picture SEED: a PPM of 20 x 10 pixels in base64
    { printf 'P6 20 10 255\n' && head -c 600 /dev/zero | tr '\0' "$1"; } | base64 | tr -d '\n'
}
same() { # same NAME KEY: the answer is that to the image $a and "hi"
    ok "$1: status 200, not $code: $(head -c 200 "$tmp/out")" [ "$code" = 200 ]
    ok "$1: the answer $(text "$2"), not $want" [ "$(text "$2")" = "$want" ]
}
a=$(picture a) b=$(picture b)
url_of() { printf '{"type":"image_url","image_url":{"url":"data:image/png;base64,%s"%s}}' "$1" "$2"; }
hi='{"type":"text","text":"hi"}'
user() { printf '{"role":"user","content":[%s]}' "$1"; }
few='"temperature":0,"max_tokens":6'
chat=/v1/chat/completions

start -np 2 --mmproj "$tmp/tower.gguf" --session-dir "$tmp/sessions"
ok "a vocabulary with the tokens around an image: no note" [ "$(grep -c 'the vocabulary has no' "$tmp/log")" -eq 0 ]
run "$tmp/half.gguf" --mmproj "$tmp/tower.gguf" -p hi -n 1
ok "a vocabulary with one of them: the start says so" grep -qx '# note: the vocabulary has no <image|>: .*' "$tmp/err"

# ---- the same image in every form ------------------------------------------------------
get /props
ok "/props: it sees" has '"modalities":{"vision":true,"audio":false}'
get /v1/models
ok "/v1/models: it sees" has '"modalities":{"vision":true,"audio":false}'
ask /api/show '{"model":"text"}'
ok "/api/show: it sees" has '"vision"'
ask $chat "{\"messages\":[$(user "$hi")],$few}"
plain=$(number prompt_tokens) blind=$(text content)
ask $chat "{\"messages\":[$(user "$(url_of "$a"),$hi")],$few}"
want=$(text content)
ok "an image changes the answer" [ "$code" = 200 ] && [ -n "$want" ] && [ "$want" != "$blind" ]
# 20 x 10 pixels become 23 x 11 tokens of at most 280
ok "an image takes 253 tokens and 2" [ "$(number prompt_tokens)" = $((plain + 255)) ]
ok "one image was computed" [ "$(computed)" = 1 ]
ask $chat "{\"messages\":[$(user "{\"type\":\"image_url\",\"image_url\":\"$a\"},$hi")],$few}"
same "chat: a string, without data:" content
ok "all of the prompt but a token was cached" [ "$(number cached_tokens)" = $((plain + 254)) ]
ask $chat "{\"messages\":[$(user "$(url_of "$a" ',"detail":"auto"'),$hi")],$few,\"cache_prompt\":false}"
same "chat: detail auto, no cached prompt" content
ok "no cached prompt" [ "$(number cached_tokens)" = 0 ]
ok "the image was not computed again" [ "$(computed)" = 1 ]
ask /v1/responses "{\"input\":[{\"role\":\"user\",\"content\":[{\"type\":\"input_image\",\"image_url\":\"data:;base64,$a\"},{\"type\":\"input_text\",\"text\":\"hi\"}]}],\"temperature\":0,\"max_output_tokens\":6}"
same "responses" text
id=$(grep -oE '"id":"resp_[0-9a-f]*"' "$tmp/out" | sed 's/.*"resp/resp/; s/"//')
ask /v1/responses "{\"previous_response_id\":\"$id\",\"input\":\"and?\",\"max_output_tokens\":1}"
ok "responses: the next one has the image" [ "$(number input_tokens)" -gt 260 ] && [ "$(number cached_tokens)" -gt 250 ]
block="{\"type\":\"image\",\"source\":{\"type\":\"base64\",\"media_type\":\"image/gif\",\"data\":\"$a\"}}"
ask /v1/messages "{\"messages\":[$(user "$block,$hi")],$few}"
same "messages" text
ask /v1/messages/count_tokens "{\"messages\":[$(user "$block,$hi")],$few}"
ok "messages: the count" has "{\"input_tokens\":$((plain + 255))}"
ask /api/chat "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\",\"images\":[\"$a\"]}],\"stream\":false,\"options\":{\"temperature\":0,\"num_predict\":6}}"
same "ollama: chat" content
ask /api/generate "{\"prompt\":\"hi\",\"images\":[\"$a\"],\"stream\":false,\"options\":{\"temperature\":0,\"num_predict\":6}}"
same "ollama: generate" response
ok "ollama: no context" sh -c "! grep -q '\"context\"' '$tmp/out'"
ask $chat "{\"messages\":[$(user "$(url_of "$a"),$hi")],$few,\"stream\":true}"
ok "chat: a stream" grep -qF "$(echo "$want" | cut -d " " -f 2)" "$tmp/out"
ask /apply-template "{\"messages\":[$(user "$hi,$(url_of "$a")")]}"
ok "apply-template: parts stay in order" has 'user\nhi<|image|><turn|>'
ok "apply-template: tokens" [ "$(number n_tokens)" = $((plain + 255)) ]
ok "still one image was computed" [ "$(computed)" = 1 ]

# ---- sizes, turns, other images --------------------------------------------------------
ask $chat "{\"messages\":[$(user "$(url_of "$a" ',"detail":"low"'),$hi")],$few}"
ok "detail low: 11 x 5 tokens" [ "$(number prompt_tokens)" = $((plain + 57)) ]
ask $chat "{\"messages\":[$(user "$(url_of "$a" ',"detail":"high"'),$hi")],$few}"
ok "detail high: 47 x 23 tokens" [ "$(number prompt_tokens)" = $((plain + 1083)) ]
ask $chat "{\"messages\":[$(user "$(url_of "$b"),$hi")],$few}"
ok "another image of this size has another answer" [ "$code" = 200 ] && [ "$(text content)" != "$want" ]
ok "and nothing of the first one" [ "$(number cached_tokens)" -le 10 ]
ok "four were computed" [ "$(computed)" = 4 ]
ask $chat "{\"messages\":[$(user "$(url_of "$a"),$hi"),{\"role\":\"assistant\",\"content\":\"a\"},$(user "$(url_of "$b"),$hi")],$few,\"n\":2}"
ok "a second turn with another image" [ "$code" = 200 ] && [ "$(number prompt_tokens)" -gt $((plain + 510)) ]
ok "the first one is kept" [ "$(number cached_tokens)" -gt 253 ]
ok "no row was computed" [ "$(computed)" = 4 ]
two=$(text content)
ask $chat "{\"messages\":[$(user "$(url_of "$b"),$hi"),{\"role\":\"assistant\",\"content\":\"a\"},$(user "$(url_of "$a"),$hi")],$few}"
ok "their order counts" [ "$code" = 200 ] && [ "$(text content)" != "$two" ]
ask $chat "{\"messages\":[$(user "$(url_of "$a"),{\"type\":\"text\",\"text\":\"<|image|>\"}")],$few}"
ok "a marker in a text is text" [ "$code" = 200 ] && [ "$(number prompt_tokens)" -gt $((plain + 246)) ]
call="{\"role\":\"assistant\",\"content\":[{\"type\":\"tool_use\",\"id\":\"i\",\"name\":\"f\",\"input\":{}}]}"
ask /v1/messages "{\"messages\":[$(user "$hi"),$call,$(user "{\"type\":\"tool_result\",\"tool_use_id\":\"i\",\"content\":[{\"type\":\"text\",\"text\":\"r\"},$block]}")],$few}"
ok "an image in a result of a tool" [ "$code" = 200 ] && [ $(($(number input_tokens) + $(number cache_read_input_tokens))) -gt 260 ]
ask $chat "{\"messages\":[$(user "$hi"),{\"role\":\"tool\",\"tool_call_id\":\"lost\",\"content\":[$(url_of "$a")]}],$few}"
ok "an image in a result whose call is lost" [ "$code" = 200 ] && [ "$(number prompt_tokens)" -gt 260 ]
ask $chat "{\"messages\":[$(user "$(url_of "$(picture c)"),$(url_of "$(picture c)"),$(url_of "$(picture d)")")],$few}"
ok "an image twice and another one" [ "$code" = 200 ] && [ "$(computed)" = 6 ]

# ---- what is refused -------------------------------------------------------------------
one() { echo "{\"messages\":[$(user "$1")],\"max_tokens\":1}"; }
refused "an address" "addresses are not opened" $chat "$(one '{"type":"image_url","image_url":{"url":"https://example.com/a.png"}}')"
refused "a file" "addresses are not opened" $chat "$(one '{"type":"image_url","image_url":{"url":"file:///etc/passwd"}}')"
refused "an address of Anthropic's form" "addresses are not opened" /v1/messages "$(one '{"type":"image","source":{"type":"url","url":"https://example.com/a.png"}}')"
refused "no base64" "expected its data in base64" $chat "$(one "$(url_of 'a?b')")"
refused "half an image" "truncated" $chat "$(one "$(url_of "$(echo "$a" | cut -c 1-200)")")"
refused "no image" "expected a PNG" $chat "$(one "$(url_of aGVsbG8gd29ybGQ=)")"
refused "a GIF" "got GIF; convert it" $chat "$(one "$(url_of "$(printf 'GIF89a\1\0\1\0' | base64)")")"
refused "no data" "expected its data in base64" /v1/responses '{"input":[{"role":"user","content":[{"type":"input_image","file_id":"f"}]}]}'
refused "an unknown detail" "expected low, high or auto" $chat "$(one "$(url_of "$a" ',"detail":"x"')")"
refused "an image of the assistant's" "expected text parts in an answer" $chat \
    "{\"messages\":[$(user "$hi"),{\"role\":\"assistant\",\"content\":[$(url_of "$a")]},$(user "$hi")]}"
refused "an image of the system's" "system message" $chat "{\"messages\":[{\"role\":\"system\",\"content\":[$(url_of "$a")]},$(user "$hi")]}"
refused "a number as an image" "messages[0].images[1]: expected a string" /api/chat "{\"messages\":[{\"role\":\"user\",\"content\":\"a\",\"images\":[\"$a\",1]}]}"
refused "an image with raw" "raw" /api/generate "{\"prompt\":\"a\",\"raw\":true,\"images\":[\"$a\"]}"
refused "images for more than the context" "maximum context length is 4096" $chat "$(one "$(for i in 1 2 3 4; do url_of "$a" ',"detail":"high"'; echo ,; done)$hi")"
large=$({ printf 'P6 4000 4000 255\n' && head -c 100 /dev/zero; } | base64 | tr -d '\n')
ask /v1/messages/count_tokens "$(one "$(url_of "$large"),$hi")"
ok "a count needs the head of an image only" has "{\"input_tokens\":$((plain + 258))}"
refused "an image that needs too much memory" "takes up to 183 MiB" $chat "$(one "$(url_of "$large")")"
ok "nothing of these was computed" [ "$(computed)" = 6 ]

# ---- the same pixels in another format: a grey PNG -------------------------------------
png=iVBORw0KGgoAAAANSUhEUgAAABQAAAAKCAAAAACRPiE6AAAAEUlEQVR42mNMZMAETAxDWBAAWDcAdVyBtwoAAAAASUVORK5CYII=
ask $chat "{\"messages\":[$(user "$(url_of "$png"),$hi")],$few}"
if has "make again"; then skip "an image as PNG: this build has no libpng"
else same "an image as PNG" content; fi
stop

# ---- another run: an idle conversation from its file; a model that does not see --------
start -np 1 --mmproj "$tmp/tower.gguf" --image-tokens 70
ok "--image-tokens 70: the plan" grep -q '^# image tower: .* pictures of up to 70 tokens' "$tmp/log"
ask $chat "{\"messages\":[$(user "$(url_of "$a"),$hi")],$few}"
ok "--image-tokens 70" [ "$(number prompt_tokens)" = $((plain + 57)) ]
ask $chat "{\"messages\":[$(user "$(url_of "$a" ',"detail":"high"'),$hi")],$few}"
ok "--image-tokens 70: detail high too" [ "$(number prompt_tokens)" = $((plain + 57)) ]
stop
start -np 1 --mmproj "$tmp/tower.gguf" --session-dir "$tmp/sessions"
ok "the plan has detail high" grep -q '^# image tower: .* 2 layers, .* pictures of up to 1120 tokens' "$tmp/log"
ask $chat "{\"messages\":[$(user "$(url_of "$a" ',"detail":"high"'),$hi"),{\"role\":\"assistant\",\"content\":\"a\"},$(user "$hi")],$few}"
ok "a file of a session has the rows of its image" [ "$(number cached_tokens)" -gt 1081 ] && [ "$(computed)" = 0 ]
stop
start -np 1
get /props
ok "/props: it does not see" has '"modalities":{"vision":false,"audio":false}'
refused "an image without a tower" "image_url: this model reads text only; start the server with --mmproj FILE" $chat "$(one "$(url_of "$a")")"
refused "an image without a tower, Ollama" "start the server with --mmproj FILE" /api/generate "{\"prompt\":\"a\",\"images\":[\"$a\"]}"
stop
finish test_pictures_server
