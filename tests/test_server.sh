#!/bin/sh
# Tests of the HTTP API, end to end on the small model: answers, streams, errors, clients that disconnect, many at once,
# shutdown.
# Environment: GEMMA4 (the binary, ./gemma4), STRICT=1 (skips fail), LONG=1 (1,000 requests, more broken bodies).
cd "$(dirname "$0")/.." || exit 1
model=models/gemma4-mini-q8_0.gguf
. tests/harness.sh

if ! command -v curl >/dev/null 2>&1; then
    skip "the server: curl is not here"
    finish test_server
    exit
fi
run serve "$model" --host 203.0.113.1 --port 0                       # an address that this machine does not have
if grep -q 'libmicrohttpd' "$tmp/err"; then
    ok "without libmicrohttpd the verb names the package" grep -q 'libmicrohttpd-dev' "$tmp/err"
    skip "the server: this build has no libmicrohttpd"
    finish test_server
    exit
fi
ok "an address of another machine is an error" [ "$status" -eq 1 ]
ok "it is named" grep -q '203.0.113.1' "$tmp/err"

for flags in "--port 99999" "--port x" "-np 0" "-np 65" "--chunk 0" "--queue -1" "--timeout 0" "--max-body 0" "--api-key-file /nowhere/x" \
    "--host 256.0.0.1" "--template middle" "-p hi"; do
    # shellcheck disable=SC2086  # a flag and its value
    run serve "$model" $flags
    ok "serve $flags: exit status 1" [ "$status" -eq 1 ]
    ok "serve $flags: names the flag" grep -q -e "^gemma4: error: ${flags%% *}[: ]" "$tmp/err"
done
run serve "$model" --api-key ""
ok "an empty key: exit status 1" [ "$status" -eq 1 ]

pids=
trap 'for p in $pids; do kill -9 "$p" 2>/dev/null; done; rm -rf "$tmp"' EXIT

# ---- helpers -------------------------------------------------------------------------
serve() { # serve NAME FLAGS...: starts a server; sets $pid and $url
    name=$1
    shift
    : >"$tmp/$name.log"
    "$gemma4" serve "$model" --port 0 -t 2 "$@" >/dev/null 2>"$tmp/$name.log" </dev/null &
    pid=$!
    pids="$pids $pid"
    wait_for_server "$tmp/$name.log"
}
ask() { # ask PATH BODY [CURL FLAGS...]: writes the response to $tmp/out, sets $code to its status
    path=$1 body=$2
    shift 2
    code=$(curl -sS -m 600 -o "$tmp/out" -w '%{http_code}' "$@" --data-binary "$body" "$url$path" 2>"$tmp/err")
}
get() { # get PATH [CURL FLAGS...]
    path=$1
    shift
    code=$(curl -sS -m 600 -o "$tmp/out" -w '%{http_code}' "$@" "$url$path" 2>"$tmp/err")
}
is() { [ "$code" = "$1" ]; }
has() { grep -qF -e "$2" "$tmp/$1"; }
lacks() { ! grep -qF -e "$2" "$tmp/$1"; }
count_of() { [ "$(grep -oF -e "$2" "$tmp/$1" | wc -l)" -eq "$3" ]; }
same() { [ -s "$tmp/$1" ] && cmp -s "$tmp/$1" "$tmp/$2"; }
text() { # text KEY FILE: the strings of that key in JSON, joined
    grep -oE "\"$1\":\"([^\"\\\\]|\\\\.)*\"" "$tmp/$2" | sed -E "s/^\"$1\":\"//; s/\"\$//" | tr -d '\n'
}
number() { # number KEY FILE: the last number with that key
    grep -oE "\"$1\":[-0-9.e+]+" "$tmp/$2" | tail -n 1 | sed 's/.*://'
}
metric() { curl -s -m 600 "$url/metrics" | sed -n "s/^gemma4_$1 //p"; }
until_metric() { # until_metric NAME VALUE: waits until the metric has this value, at most a minute
    for _ in $(seq 1200); do
        [ "$(metric "$1")" = "$2" ] && return 0
        sleep 0.05
    done
    return 1
}
refused() { # refused NAME STATUS WORD PATH BODY: must be refused with that status and an error that contains WORD
    ask "$4" "$5"
    ok "$1: status $2" is "$2"
    ok "$1: names '$3'" has out "$3"
    ok "$1: is a JSON error" grep -q '^{"error":{"message":".*"type":"' "$tmp/out"
}
# ---- a port in use; requests while the model is loading ------------------------------
serve first
port=${url##*:}
run serve "$model" --port "$port" --check-tensors
next=$(sed -n "s/^gemma4: error: --port: $port is in use; try --port \([0-9]*\)$/\1/p" "$tmp/err")
ok "a port in use is an error, before the model is loaded" [ "$status" -eq 1 ]
ok "it names a port that is free" [ "${next:-0}" -gt "$port" ]
kill "$pid"
wait "$pid"
# Its stderr is a pipe that is full, so the server stops in the middle of loading until somebody reads.
mkfifo "$tmp/pipe" && exec 5<>"$tmp/pipe"
yes '' | dd of="$tmp/pipe" bs=4096 count=64 iflag=fullblock oflag=nonblock 2>"$tmp/dd"
"$gemma4" serve "$model" --port "$next" -t 2 --api-key k >/dev/null 2>"$tmp/pipe" </dev/null 5<&- &
pid=$! url=http://127.0.0.1:$next
pids="$pids $pid"
for _ in $(seq 600); do get /health && ! is 000 && break; sleep 0.05; done
ok "while it is loading: /health is 503" is 503
ok "while it is loading: /health says so" has out '{"status":"loading"}'
get /v1/models
ok "while it is loading: the key is checked" is 401
get /v1/models -H 'Authorization: Bearer k' -D "$tmp/head"
ok "while it is loading: 503" is 503
ok "while it is loading: the error says so" has out 'the model is loading; try again later'
ok "while it is loading: when to try again" grep -qi '^retry-after: 1' "$tmp/head"
get /
ok "while it is loading: the page is there" is 200
cat <&5 >"$tmp/loaded.log" &
pids="$pids $!"
wait_for_server "$tmp/loaded.log"
get /health
ok "loaded: /health is 200" is 200
get /v1/models -H 'Authorization: Bearer k'
ok "loaded: the model is listed" has out '"object":"list"'
kill "$pid"
wait "$pid"
exec 5<&-

user='"messages":[{"role":"user","content":"Tell me a story about a fox."}]'
chat=/v1/chat/completions

serve main -np 3 --queue 20 --max-body 1
main=$pid

# ---- small endpoints -----------------------------------------------------------------
get /health
ok "health is ok" has out '{"status":"ok"}'
get /v1/models
ok "the model is called as its file" has out '"id":"gemma4-mini-q8_0"'
cp "$tmp/out" "$tmp/a"
get /v1/models/gemma4-mini-q8_0
ok "and by its name" grep -qF "$(cat "$tmp/out")" "$tmp/a"
get /v1/models/gemma5
ok "another name: 404" is 404
ok "which clients know" has out '"param":"model","code":"model_not_found"'
get /v1/models -H "anthropic-version: 2023-06-01"
ok "in Anthropic's format if requested" has out '{"data":[{"type":"model","id":"gemma4-mini-q8_0","display_name":'
get /v1/models/gemma5 -H "anthropic-version: 2023-06-01"
ok "also its error" has out '{"type":"error","error":{"type":"not_found_error",'
ok "with the trained length, and its size" grep -q '"meta":{"n_vocab":4096,"n_ctx":8192,"n_ctx_train":16384,"n_embd":256,"n_params":7205430,"size":7741656}' "$tmp/a"
get /props
ok "props report the sessions" has out '"total_slots":3'
ok "props: the file and the program" grep -q "\"model_path\":\"$model\",\"build_info\":\"gemma4 [0-9]" "$tmp/out"
ok "props: the chat template of the file" has out '"chat_template":"{{ bos_token }}{%- if enable_thinking -%}'
ok "props: the context and the sampling where clients look" has out '"default_generation_settings":{"n_ctx":8192,"n_predict":-1,"temperature":1,'
for path in /models /models/gemma4-mini-q8_0 /v1/models; do
    get $path
    ok "GET $path" is 200
done
get /v1/models/
ok "no name of a model: 404 that names the path" has out 'GET /v1/models/: this server has no such endpoint'
get /completions -I
ok "HEAD of what is sent by POST: 405" is 405
ask /models/x "{}" -X OPTIONS -D "$tmp/headers"
ok "OPTIONS: 204" is 204
ok "OPTIONS: what the path takes" grep -qi '^Allow: GET, HEAD, OPTIONS' "$tmp/headers"
get /slots
ok "slots are free" has out '{"id":2,"n_ctx":8192,"is_processing":false}'
get /health -I
ok "HEAD works as GET" is 200
ask /tokenize '{"content":"Once upon a time"}'
ids=$(sed 's/.*\[\(.*\)\].*/\1/' "$tmp/out")
run tokenize "$model" -p "Once upon a time"
ok "ids are those of the verb" grep -q "$(echo "$ids" | cut -d, -f1)" "$tmp/out"
ask /detokenize "{\"tokens\":[$ids]}"
ok "ids become the text again" has out '{"content":"Once upon a time"}'
ask /apply-template "{$user}"
ok "a conversation becomes a prompt" has out '<|turn>user\nTell me a story about a fox.<turn|>'

# ---- the page -------------------------------------------------------------------------
get / -D "$tmp/headers"
ok "the page is there" is 200
page_of() { sed 's/ nonce="[0-9a-f]*"//' "$tmp/out"; }
ok "byte for byte, but for the nonces" [ "$(page_of)" = "$(cat web/index.html)" ]
ok "two nonces" [ "$(grep -cE '^<(style|script) nonce="[0-9a-f]{32}">' "$tmp/out")" = 2 ]
tr -d '\r' <"$tmp/headers" >"$tmp/a"
for line in "Content-Type: text/html; charset=utf-8" "X-Content-Type-Options: nosniff" "Referrer-Policy: no-referrer" "Cache-Control: no-cache"; do
    ok "the page: $line" grep -qix "$line" "$tmp/a"
done
nonce=$(sed -n 's/^<script nonce="\(.*\)">$/\1/p' "$tmp/out")
ok "the page: its own script and style alone" grep -q "script-src 'nonce-$nonce'; style-src 'nonce-$nonce';" "$tmp/a"
ok "the page: nothing but its own server" grep -qi "^Content-Security-Policy: default-src 'none'; .*connect-src 'self';" "$tmp/a"
tag=$(sed -n 's/^[Ee][Tt]ag: //p' "$tmp/a")
get /index.html -H "If-None-Match: $tag"
ok "the page: 304 for a client that has it" is 304
get /index.html -H 'If-None-Match: "0"'
ok "the page: whole for a client that has another version" [ "$(page_of)" = "$(cat web/index.html)" ]
get / -H "Host: example.org"
ok "the page: another Host is refused" is 403
ask / "{}" -D "$tmp/headers"
ok "the page: POST is 405" is 405
ok "the page: with the method that works" grep -qi '^Allow: GET' "$tmp/headers"
get /page
ok "an unknown path is not the page" is 404

# ---- one answer ----------------------------------------------------------------------
run "$model" -p "Tell me a story about a fox." --temp 0 -n 40
printf '%s' "$(cat "$tmp/out")" >"$tmp/cli"
ask $chat "{$user,\"temperature\":0,\"max_tokens\":40,\"seed\":1}"
ok "a chat is answered" is 200
text content out | sed 's/\\"/"/g; s/\\n/\n/g' >"$tmp/plain"
ok "with the text of the command line" same cli plain
ok "which is cut, by max_tokens" has out '"finish_reason":"length","stop_reason":"max_tokens"}'
ok "usage counts" has out '"completion_tokens":40'
ok "timings are reported" has out '"predicted_per_second":'
ask $chat "{$user,\"temperature\":0,\"max_tokens\":40,\"stream\":true,\"stream_options\":{\"include_usage\":true}}" -N
text content out | sed 's/\\"/"/g; s/\\n/\n/g' >"$tmp/streamed"
ok "a stream has the same text" same plain streamed
ok "it ends in [DONE]" [ "$(grep -c '^data: \[DONE\]$' "$tmp/out")" -eq 1 ]
ok "and reports the usage" has out '"choices":[],"usage":{"prompt_tokens":21'
ok "of which most was cached" [ "$(number cached_tokens out)" -eq 20 ]
for path in $chat /v1/completions /completion; do      # how many events there are depends on the time
    ask $path "{$user,\"prompt\":\"Once upon a time\",\"temperature\":0,\"max_tokens\":10,\"stream\":true,\"timings_per_token\":true}" -N
    grep -E '"delta":\{"content"|"text":"[^"]|"content":"[^"].*"stop":false' "$tmp/out" >"$tmp/texts"
    ok "$path: timings_per_token: with every text" sh -c "grep -q . '$tmp/texts' && ! grep -vq '\"timings\":{' '$tmp/texts'"
    grep -oE '"predicted_n":[0-9]+' "$tmp/out" | sed 's/.*://' >"$tmp/a"
    ok "$path: timings_per_token: they count up to the end" sh -c "sort -nc '$tmp/a' && [ \"\$(tail -n 1 '$tmp/a')\" -eq 10 ]"
    ok "$path: timings_per_token: times grow" sh -c "grep -oE '\"predicted_ms\":[0-9.e+-]+' '$tmp/out' | sed 's/.*://' | sort -gc"
    ask $path "{$user,\"prompt\":\"Once upon a time\",\"temperature\":0,\"max_tokens\":10,\"stream\":true}" -N
    ok "$path: without it only the end has timings" count_of out '"timings":{' 1
done
ask /v1/completions "{\"prompt\":\"Once upon a time\",\"temperature\":0,\"max_tokens\":10}"
ok "a text is continued" grep -q '"text":"[^"]*[a-z]' "$tmp/out"
text text out >"$tmp/a"
ask /v1/completions "{\"prompt\":\"Once upon a time\",\"temperature\":0,\"max_tokens\":10,\"stream\":true}" -N
text text out >"$tmp/b"
ok "and as a stream" same a b
ask /v1/completions "{\"prompt\":[2,$ids],\"temperature\":0,\"max_tokens\":10}"
text text out >"$tmp/b"
ok "and from ids" same a b
ask $chat "{$user,\"temperature\":0,\"max_tokens\":40,\"stop\":[\" fox\",\"zzz\"]}"
ok "a stop string ends it, and is named" has out '"finish_reason":"stop","stop_reason":" fox"}'
ok "before that text" has out '"content":"Once upon a time, there was a little"'
ask $chat "{$user,\"max_tokens\":30,\"seed\":7}"
text content out >"$tmp/a"
ask $chat "{$user,\"max_tokens\":30,\"seed\":7}"
text content out >"$tmp/b"
ok "a seed gives the same text again" same a b
ask $chat "{$user,\"max_tokens\":3,\"temperature\":0,\"logprobs\":true,\"top_logprobs\":2}"
ok "probabilities of each token" [ "$(grep -o '"top_logprobs"' "$tmp/out" | wc -l)" -eq 3 ]
twelve='"prompt":"Once upon a time","temperature":0,"max_tokens":12'
ask /v1/completions "{$twelve,\"logprobs\":2,\"stop\":\" little\"}"
ok "/v1/completions: probabilities in its own format" has out '"text":", there was a","logprobs":{"tokens":[","," there"," was"," a"],"token_logprobs":[-'
ok "/v1/completions: the most probable by name" grep -q '"top_logprobs":\[{",":-[^,]*,"[^"]*":-[^,]*},{" there":-' "$tmp/out"
ok "/v1/completions: the offset of each, except for a stop string" has out '"text_offset":[0,1,7,11]}'
ask /v1/completions "{$twelve,\"logprobs\":2}"
list() { grep -oE "\"$1\":\[[^]]*" "$tmp/out" | sed 's/.*\[//' | paste -s -d , -; }
list tokens >"$tmp/a"
list top_logprobs >>"$tmp/a"
list text_offset >>"$tmp/a"
ask /v1/completions "{$twelve,\"logprobs\":2,\"stream\":true}" -N
list tokens >"$tmp/b"
list top_logprobs >>"$tmp/b"
list text_offset >>"$tmp/b"
ok "/v1/completions: the same as a stream" same a b
ask /v1/completions "{$twelve,\"logprobs\":0,\"temperature\":3,\"top_k\":0,\"seed\":1}"
ok "/v1/completions: logprobs 0 is the token's own" grep -q '"token_logprobs":\[-[^]]*\],"top_logprobs":null,' "$tmp/out"
ask /v1/completions "{$twelve,\"logprobs\":1,\"temperature\":3,\"top_k\":0,\"seed\":1}"
ok "/v1/completions: a sampled token is listed even if it is not the most probable" grep -q '"top_logprobs":\[[^]]*{"[^"]*":[^,]*,"[^"]*":-[0-9.]*}' "$tmp/out"
ask /v1/completions '{"prompt":"a","temperature":0,"max_tokens":2,"logprobs":1,"logit_bias":{"478":100}}'        # the byte f0
ok "/v1/completions: a part of a character by its bytes" has out '"tokens":["bytes:\\xf0","bytes:\\xf0"]'
ask $chat "{$user,\"max_tokens\":3,\"temperature\":0,\"logit_bias\":{\"834\":-100}}"
ok "a bias changes the text" lacks out '"content":"Once'
ask $chat "{$user,\"max_tokens\":3,\"temperature\":0}"
ok "and is gone for the next one" has out '"content":"Once'
ask $chat "{$user,\"max_tokens\":2,\"stream\":true,\"return_progress\":true,\"cache_prompt\":false}" -N
ok "progress of the prompt, if requested" has out '"prompt_progress":{"total":21,"cache":0'
ask $chat '{"max_tokens":60,"temperature":0,"messages":[{"role":"user","content":"What is the weather in Paris?"}],
"tools":[{"type":"function","function":{"name":"get_weather","description":"Weather of a city","parameters":{"type":"object",
"properties":{"city":{"type":"string"}},"required":["city"]}}}]}'
ok "tools are taken" is 200
cp "$tmp/out" "$tmp/tools"
if has tools '"tool_calls"'; then
    ok "a call: finish_reason" has tools '"finish_reason":"tool_calls"'
    ok "a call: its name" has tools '"function":{"name":"get_weather","arguments":"{'
else
    skip "tool calls: the small model made none"
fi

# ---- several answers: choices in order, each with the text that a request of its own would get -------------------------
choice() { # choice I KEY FILE: the string with that key in choice I of a whole answer
    sed 's/{"index":/\n&/g' "$tmp/$3" | grep "^{\"index\":$1," | grep -oE "\"$2\":\"([^\"\\\\]|\\\\.)*\"" | head -n 1 | sed "s/^\"$2\"://"
}
count_is() { [ "$(grep -oF -e "$2" "$tmp/out" | wc -l)" -eq "$1" ]; }
pieces() { # pieces I KEY FILE: the same of a stream, joined
    grep "\"choices\":\[{\"index\":$1," "$tmp/$3" | grep -oE "\"$2\":\"([^\"\\\\]|\\\\.)*\"" | sed -E "s/^\"$2\":\"//; s/\"$//" | tr -d '\n'
}
for seed in 7 8 9; do
    ask $chat "{$user,\"max_tokens\":12,\"seed\":$seed}"
    choice 0 content out
done >"$tmp/a"
ask $chat "{$user,\"max_tokens\":12,\"seed\":7,\"n\":3}"
for k in 0 1 2; do choice $k content out; done >"$tmp/b"
ok "n 3: the answers to seeds 7, 8 and 9" same a b
ok "n 3: the prompt counts once, answers all" has out '"usage":{"prompt_tokens":21,"completion_tokens":36,"total_tokens":57,'
ask $chat "{$user,\"max_tokens\":12,\"seed\":7,\"n\":3,\"stream\":true,\"stream_options\":{\"include_usage\":true}}" -N
for k in 0 1 2; do printf '"%s"\n' "$(pieces $k content out)"; done >"$tmp/b"
ok "n 3, streamed: the same by index" same a b
ok "n 3, streamed: an end for each" [ "$(grep -c '"finish_reason":"length"' "$tmp/out")" -eq 3 ]
ok "n 3, streamed: one usage" [ "$(grep -c '"completion_tokens":36' "$tmp/out")" -eq 1 ]
ok "n 3, streamed: one end of the stream, the last line" [ "$(grep '^data' "$tmp/out" | grep -n DONE)" = "$(grep -c '^data' "$tmp/out"):data: [DONE]" ]
ask $chat "{$user,\"max_tokens\":20,\"temperature\":0,\"n\":2,\"logprobs\":true,\"json_schema\":{\"const\":\"one two three\"}}"
ok "n 2 with a schema: both follow it" [ "$(choice 1 content out)" = '"\"one two three\""' ]
ok "n 2 with temperature 0: equal ones" [ "$(choice 0 content out)" = "$(choice 1 content out)" ]
ok "n 2: probabilities in each" [ "$(grep -o '"refusal":null},"finish' "$tmp/out" | wc -l)" -eq 2 ]
for prompt in '[2,834]' '"Once upon"' '"The fox"'; do
    ask /v1/completions "{\"prompt\":$prompt,\"temperature\":0,\"max_tokens\":6,\"logprobs\":1}"
    sed 's/.*"text"://; s/,"finish_reason".*//' "$tmp/out"
    echo
done >"$tmp/a"
list='"prompt":[[2,834],"Once upon","The fox"],"temperature":0,"max_tokens":6,"logprobs":1'
ask /v1/completions "{$list}"
sed 's/{"index":/\n&/g' "$tmp/out" | grep '^{"index"' | sed 's/.*"text"://; s/,"finish_reason".*//' >"$tmp/b"
ok "/v1/completions: a list of prompts, with probabilities" same a b
ask /v1/completions "{$list,\"stream\":true}" -N
{ pieces 0 text out; echo; pieces 1 text out; echo; pieces 2 text out; echo; } >"$tmp/b"
sed 's/^"//; s/",.*//' "$tmp/a" >"$tmp/c"
ok "/v1/completions: a list of prompts, streamed" same c b
ask /v1/completions '{"prompt":[[2,3,4]],"max_tokens":3}'
ok "/v1/completions: a list of one list of ids" has out '"choices":[{"index":0,"text":"'
ask /v1/completions '{"prompt":["a","b"],"n":2,"max_tokens":1,"temperature":0}'
ok "/v1/completions: two answers to each of two prompts" grep -q '"index":0,.*"index":1,.*"index":2,.*"index":3,' "$tmp/out"
ok "/v1/completions: prompts count once" has out '"prompt_tokens":4,"completion_tokens":4,'
ask /v1/completions '{"prompt":"Once upon a time","temperature":0,"max_tokens":5,"logprobs":1}'
list token_logprobs | tr ',' '\n' | tail -n 5 >"$tmp/a"
continued=$(text text out)
ask /v1/completions "{\"prompt\":\"Once upon a time$continued\",\"temperature\":0,\"max_tokens\":1,\"logprobs\":1,\"echo\":true}"
list token_logprobs | tr ',' '\n' | sed '1,5d; $d' >"$tmp/b"
ok "/v1/completions: echo: the prompt and then the answer" grep -qF "\"text\":\"Once upon a time$continued " "$tmp/out"
ok "/v1/completions: echo: the probabilities of the prompt are those that its tokens had" same a b
ok "/v1/completions: echo: the first token has none" grep -q '"tokens":\["<bos>","Once".*"token_logprobs":\[null,-.*"top_logprobs":\[null,{.*"text_offset":\[0,0,4,9,11,' "$tmp/out"
cp "$tmp/out" "$tmp/c"
ask /v1/completions "{\"prompt\":\"Once upon a time$continued\",\"temperature\":0,\"max_tokens\":1,\"logprobs\":1,\"echo\":true,\"stream\":true}" -N
list token_logprobs >"$tmp/b"
cp "$tmp/c" "$tmp/out"
list token_logprobs >"$tmp/a"
ok "/v1/completions: echo: the same as a stream" same a b
ask /v1/completions '{"prompt":[[2,834]],"max_tokens":0,"logprobs":0,"echo":true}'
ok "/v1/completions: echo of a prompt alone" grep -q '"text":"Once","logprobs":{"tokens":\["<bos>","Once"\],"token_logprobs":\[null,-[0-9.]*\],"top_logprobs":null,"text_offset":\[0,0\]},"finish_reason":"length"' "$tmp/out"
ask /v1/completions '{"prompt":[[2],[2]],"max_tokens":1,"logprobs":1,"echo":true,"temperature":0}'
ok "/v1/completions: echo: an answer that ends at once is a token too" count_is 2 '"tokens":["<bos>","<|turn>"]'
channel=$(curl -sS -m 60 --data-binary '{"content":"<|channel>","parse_special":true}' "$url/tokenize" | sed 's/.*\[\([0-9]*\).*/\1/')
for n in 1 3; do
    for stream in false true; do
        ask /v1/completions "{\"prompt\":[2,834],\"max_tokens\":$n,\"logprobs\":1,\"echo\":true,\"logit_bias\":{\"$channel\":100},\"stream\":$stream}" -N
        ok "/v1/completions: echo: all $n tokens of a thought have probabilities, stream $stream" [ "$(list token_logprobs | tr ',' '\n' | wc -l)" -eq $((2 + n)) ]
    done
done
ask /v1/completions '{"prompt":"Once","max_tokens":2,"temperature":0,"echo":true}'
ok "/v1/completions: echo without probabilities" has out '"text":"Once upon a","logprobs":null'
ask /completion '{"prompt":"Once upon a time","temperature":0,"n_predict":10}'
ok "/completion: the same text in llama.cpp's form" has out "{\"index\":0,\"content\":\"$continued "
ok "/completion: why it stopped" grep -q '"stop":true,.*"tokens_predicted":10,"tokens_evaluated":5,.*"stop_type":"limit","stopping_word":""' "$tmp/out"
text content out >"$tmp/a"
ask /completion '{"prompt":"Once upon a time","temperature":0,"n_predict":10,"stream":true}' -N
text content out >"$tmp/b"
ok "/completion: the same as a stream" same a b
ok "/completion: which ends in an object with stop" [ "$(grep -c '"stop":true' "$tmp/out")" -eq 1 ]
ask /completion '{"prompt":["Once upon a time",[2,834]],"temperature":0,"n_predict":10,"stop":[" was"]}'
ok "/completion: a list of prompts gives a list" grep -q '^\[{"index":0,.*"stop_type":"word","stopping_word":" was".*,{"index":1,.*\]$' "$tmp/out"
mean() { sed 's/.*"token_logprobs":\[//; s/\].*//' "$tmp/out" | tr ',' '\n' | awk '{ s += $1 } END { printf "%.4f\n", s / NR }'; }
for seed in 3 4 5 6; do
    ask /v1/completions "{\"prompt\":\"Tom\",\"temperature\":2,\"max_tokens\":5,\"logprobs\":0,\"seed\":$seed}"
    mean
done | sort -n | tail -n 1 >"$tmp/a"
ask /v1/completions '{"prompt":"Tom","temperature":2,"max_tokens":5,"logprobs":0,"seed":3,"best_of":4}'
mean >"$tmp/b"
ok "/v1/completions: best_of is the most probable of them" same a b
ok "/v1/completions: best_of pays for all of them" has out '"completion_tokens":20,'
ok "nothing is left of any" until_metric requests_running 0

# ---- a call in a prompt keeps the ids that the model wrote -------------------------------------
ask /tokenize '{"content":"Paris"}'
paris=$(sed 's/.*\[\([0-9]*\).*/\1/' "$tmp/out")
ask $chat "{\"max_tokens\":60,\"temperature\":0,\"logit_bias\":{\"$paris\":-100},\"messages\":[{\"role\":\"user\",\"content\":\"What is the weather in Paris?\"}],
\"tool_choice\":\"required\",\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"get_weather\",\"parameters\":{\"type\":\"object\",
\"properties\":{\"city\":{\"enum\":[\"Paris\"]}},\"required\":[\"city\"]}}}]}"
said=$(sed 's/.*"message":\(.*\),"logprobs":.*/\1/' "$tmp/out")
call=$(sed -n 's/.*"tool_calls":\[{"id":"\([^"]*\)".*/\1/p' "$tmp/out")
tokens_with() { # tokens_with ID CACHE: number of tokens of the prompt in which the call has that id
    ask $chat "{\"max_tokens\":1,\"cache_prompt\":$2,\"messages\":[{\"role\":\"user\",\"content\":\"What?\"},$(echo "$said" | sed "s/$call/$1/"),
{\"role\":\"tool\",\"tool_call_id\":\"$1\",\"content\":\"sunny\"}]}"
    number prompt_tokens out
}
ok "a call is made of the one city, in other tokens than those of the template" has out '"arguments":"{\"city\":\"Paris\"}"'
if [ -n "$call" ]; then
    ok "a call is rendered as it was written, if its id is known" [ "$(tokens_with "$call" true)" -ne "$(tokens_with other false)" ]
    ok "but not if nothing may be cached" [ "$(tokens_with other false)" -eq "$(tokens_with "$call" false)" ]
else
    skip "calls as they were written: the small model made none"
fi

# ---- prefill: the client begins the answer -------------------------------------------------
begun() { # begun TEXT [MEMBERS]: the question, and TEXT as the beginning of the answer
    printf '"messages":[{"role":"user","content":"Tell me a story about a fox."},{"role":"assistant","content":"%s"%s}]' "$1" "$2"
}
on='"continue_final_message":true,"add_generation_prompt":false'
ask $chat "{$user,\"temperature\":0,\"max_tokens\":40}"
text content out >"$tmp/a"
ask $chat "{$user,\"temperature\":0,\"max_tokens\":12}"
start=$(text content out)
ask $chat "{$(begun "$start"),$on,\"temperature\":0,\"max_tokens\":28}"
{ printf '%s' "$start"; text content out; } >"$tmp/b"
ok "a truncated answer is continued" same a b
ok "in the tokens that the model wrote it in" [ "$(number prompt_tokens out)" -eq 33 ]
ok "which are cached" [ "$(number cached_tokens out)" -eq 32 ]
ask $chat "{$(begun "$start"),$on,\"temperature\":0,\"max_tokens\":28,\"stream\":true}" -N
{ printf '%s' "$start"; text content out; } >"$tmp/b"
ok "and as a stream" same a b
ask /v1/messages "{$(begun "$start"),\"temperature\":0,\"max_tokens\":28}"
{ printf '%s' "$start"; text text out; } >"$tmp/b"
ok "/v1/messages: it continues by itself" same a b
ask $chat "{$(begun "Once upon"),$on,\"max_tokens\":3,\"ignore_eos\":true,\"stop\":\"Once\",\"logprobs\":true}"
ok "a prefill does not end an answer" has out '"finish_reason":"length"'
ok "probabilities are of new tokens" [ "$(grep -o '"logprob"' "$tmp/out" | wc -l)" -eq 3 ]
ask /apply-template "{$user}"
text prompt out >"$tmp/a"
printf 'Once upon ' >>"$tmp/a"
ask /apply-template "{$(begun "Once upon "),$on}"
text prompt out >"$tmp/b"
ok "its prompt is that of the question, then the prefill, unchanged" same a b
n=$(number n_tokens out)
ask /v1/messages/count_tokens "{$(begun "Once upon ")}"
ok "/v1/messages/count_tokens: with the prefill" [ "$(number input_tokens out)" -eq "$n" ]
ask /v1/messages/count_tokens "{$(begun "")}"
ok "/v1/messages/count_tokens: an empty prefill counts nothing" has out '{"input_tokens":21}'
ask /apply-template "{$(begun "Once" ',"reasoning_content":"Hm."'),$on,\"chat_template_kwargs\":{\"enable_thinking\":true}}"
ok "a thought comes before it" has out '<|turn>model\n<|channel>thought\nHm.\n<channel|>Once","n_tokens"'
ask /apply-template "{$(begun "Once")}"
ok "without the field it is a turn like any other" has out '<|turn>model\nOnce<turn|>\n<|turn>model\n'
past_call=',"tool_calls":[{"id":"a","function":{"name":"f","arguments":"{}"}}]'
refused "a question that is continued" 400 '"param":"messages"' $chat "{$user,$on}"
refused "an empty answer that is continued" 400 '"param":"messages"' $chat "{$(begun ""),$on}"
refused "a call that is continued" 400 '"param":"messages"' $chat "{$(begun "Once" "$past_call"),$on}"
refused "a new turn together with it" 400 '"param":"add_generation_prompt"' $chat "{$(begun "Once"),\"continue_final_message\":true,\"add_generation_prompt\":true}"
refused "a schema together with it" 400 '"param":"response_format"' $chat "{$(begun "{"),$on,\"response_format\":{\"type\":\"json_object\"}}"
ask /v1/messages '{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"f","input":{}}]}]}'
ok "/v1/messages: a call at the end: 400" is 400

# ---- other dialects ------------------------------------------------------------------------
declared='"name":"get_weather","description":"Weather of a city"'
schema='{"type":"object","properties":{"city":{"type":"string"}},"required":["city"]}'
weather='"temperature":0,"max_tokens":60,"messages":[{"role":"user","content":"What is the weather in Paris?"}]'
ask /v1/messages "{$user,\"max_tokens\":40,\"temperature\":0}"
text text out | sed 's/\\"/"/g; s/\\n/\n/g' >"$tmp/a"
ok "/v1/messages: the same text" same plain a
ok "/v1/messages: why it ends" has out '"stop_reason":"max_tokens"'
ask /v1/messages "{$user,\"max_tokens\":40,\"temperature\":0,\"stream\":true}" -N
text text out | sed 's/\\"/"/g; s/\\n/\n/g' >"$tmp/a"
ok "/v1/messages: the same as a stream" same plain a
ok "/v1/messages: the stream ends" has out 'event: message_stop'
ask /v1/messages "{$weather,\"stream\":true,\"tools\":[{$declared,\"input_schema\":$schema}]}" -N
has tools '"tool_calls"' && ok "/v1/messages: the call, streamed" has out '"partial_json":"{\"city\":'
ask /v1/messages/count_tokens "{$user}"
ok "/v1/messages/count_tokens" has out '{"input_tokens":21}'
ask /v1/messages '{"messages":[{"role":"user","content":[{"type":"image"}]}]}'
ok "/v1/messages: an image: 400" is 400
ok "/v1/messages: errors in its own format" has out '{"type":"error","error":{"type":"invalid_request_error","message":"'
ask /v1/messages "{$user,\"max_tokens\":40,\"temperature\":0,\"stop_sequences\":[\"zzz\",\" fox\"]}"
ok "/v1/messages: the stop sequence" has out '"stop_reason":"stop_sequence","stop_sequence":" fox"'
ask /v1/messages "{\"system\":[{\"type\":\"text\",\"text\":\"Be kind.\",\"cache_control\":{\"type\":\"ephemeral\"}}],\"max_tokens\":1,
\"thinking\":{\"type\":\"enabled\",\"budget_tokens\":9},\"tool_choice\":{\"type\":\"auto\",\"disable_parallel_tool_use\":true},\"metadata\":{\"user_id\":\"u\"},
\"tools\":[{$declared,\"input_schema\":$schema,\"cache_control\":{\"type\":\"ephemeral\"}}],\"messages\":[{\"role\":\"user\",\"content\":\"Hi.\"},{\"role\":\"assistant\",\"content\":[
{\"type\":\"thinking\",\"thinking\":\"Hm.\",\"signature\":\"\"},{\"type\":\"text\",\"text\":\"Yes.\"},{\"type\":\"tool_use\",\"id\":\"a\",\"name\":\"f\",\"input\":{}}]},
{\"role\":\"user\",\"content\":[{\"type\":\"tool_result\",\"tool_use_id\":\"a\",\"content\":[{\"type\":\"text\",\"text\":\"r\"}],\"is_error\":true},{\"type\":\"text\",\"text\":\"And?\"}]}]}"
ok "/v1/messages: everything that an agent sends" is 200
for field in '"thinking":"on"' '"metadata":1' '"tool_choice":"auto"' '"output_format":5' '"tools":[{"type":"custom"}]'; do
    ask /v1/messages "{$user,$field}"
    ok "/v1/messages: $field: 400" is 400
done
fox='"input":"Tell me a story about a fox.","max_output_tokens":40,"temperature":0'
ask /v1/responses "{$fox}"
text text out | sed 's/\\"/"/g; s/\\n/\n/g' >"$tmp/a"
ok "/v1/responses: the same text" same plain a
ask /v1/responses "{$fox,\"stream\":true}" -N
text delta out | sed 's/\\"/"/g; s/\\n/\n/g' >"$tmp/a"
ok "/v1/responses: the same as a stream" same plain a
ok "/v1/responses: the stream ends" has out 'event: response.incomplete'
called() { # called ID: an item with a call
    printf '{"type":"function_call","call_id":"%s","name":"f","arguments":"{}"}' "$1"
}
hi='"max_output_tokens":1,"input":[{"role":"user","content":"Hi."},{"type":"reasoning","summary":[],"content":[{"type":"reasoning_text","text":"Hm."}]}'
result='{"type":"function_call_output","call_id":"'
ask /v1/responses "{$hi,$(called a),$(called b),${result}a\",\"output\":\"r\"},${result}b\",\"output\":\"s\"}]}"
items=$(number input_tokens out)
ask $chat "{\"max_tokens\":1,\"messages\":[{\"role\":\"user\",\"content\":\"Hi.\"},{\"role\":\"assistant\",\"reasoning_content\":\"Hm.\",\"tool_calls\":[
{\"id\":\"a\",\"function\":{\"name\":\"f\",\"arguments\":\"{}\"}},{\"id\":\"b\",\"function\":{\"name\":\"f\",\"arguments\":\"{}\"}}]},
{\"role\":\"tool\",\"tool_call_id\":\"a\",\"content\":\"r\"},{\"role\":\"tool\",\"tool_call_id\":\"b\",\"content\":\"s\"}]}"
ok "/v1/responses: thoughts and calls of a turn are one message" [ "$items" = "$(number prompt_tokens out)" ]
ok "/v1/responses: of which all is cached" [ "$(number cached_tokens out)" -eq $((items - 1)) ]
ask /v1/responses "{$fox,\"tools\":[{\"type\":\"web_search\\r\\nX-Bad: 1é\"}]}" -D "$tmp/headers"
tr -d '\r' <"$tmp/headers" >"$tmp/a"
ok "a tool that the server cannot run is left out" is 200
ok "with a warning in a header, without the bytes that a header may not have" grep -qix 'x-gemma4-warning: tools\[0\] web_searchrnX-Bad1: left out, this server does not run it' "$tmp/a"
ok "and in the log" grep -q '"warnings":"tools\[0\] web_search' "$tmp/main.log"
refused "/v1/responses: nothing is kept" 400 "previous_response_id" /v1/responses "{$fox,\"previous_response_id\":\"x\"}"

# ---- histories that began elsewhere --------------------------------------------------------
# The prompt of each is that of a plain conversation of /v1/chat/completions: it has as many tokens, and all are cached.
same_prompt() { # same_prompt NAME MESSAGES PATH BODY: MESSAGES of a chat make the prompt that BODY makes at PATH
    ask $chat "{\"max_tokens\":1,\"messages\":[$2]}"
    want=$(number prompt_tokens out)
    ask "$3" "{\"max_tokens\":1,\"max_output_tokens\":1,$4}" -D "$tmp/headers"
    case $3 in
    /v1/messages) got="$(($(number input_tokens out) + $(number cache_read_input_tokens out))) $(number cache_read_input_tokens out)" ;;
    /v1/responses) got="$(number input_tokens out) $(number cached_tokens out)" ;;
    *) got="$(number prompt_tokens out) $(number cached_tokens out)" ;;
    esac
    ok "$1" [ "$code $got" = "200 $want $((want - 1))" ]
}
warned() { tr -d '\r' <"$tmp/headers" | grep -qi "^x-gemma4-warning: .*$1"; }
msg() { printf '{"role":"%s","content":"%s"}' "$1" "$2"; }          # msg ROLE TEXT: a message
hi=$(msg user Hi.) and=$(msg user And?)
one() { # one ID [ARGUMENTS]: a message with a call
    printf '{"role":"assistant","tool_calls":[{"id":"%s","type":"function","function":{"name":"f","arguments":%s}}]}' "$1" "${2:-{\}}"
}
gave() { printf '{"role":"tool","tool_call_id":"%s","content":"%s"}' "$1" "$2"; }      # gave ID TEXT: a result
block() { printf '{"type":"text","text":"%s"}' "$1"; }

for given in '"Be kind."' "[$(block "Be kind.")]"; do
    same_prompt "/v1/messages: system at the end: $given" "$hi,$(msg system "Be kind.")" /v1/messages "\"messages\":[$hi,{\"role\":\"system\",\"content\":$given}]"
    same_prompt "/v1/messages: system between turns: $given" "$hi,$(msg assistant Yes.),$(msg system "Be kind."),$and" /v1/messages \
        "\"messages\":[$hi,$(msg assistant Yes.),{\"role\":\"system\",\"content\":$given},$and]"
done
same_prompt "/v1/messages: system after results" "$hi,$(one a),$(gave a r),$(msg system S)" /v1/messages "\"messages\":[$hi,
{\"role\":\"assistant\",\"content\":[{\"type\":\"tool_use\",\"id\":\"a\",\"name\":\"f\",\"input\":{}}]},
{\"role\":\"user\",\"content\":[{\"type\":\"tool_result\",\"tool_use_id\":\"a\",\"content\":\"r\"}]},$(msg system S)]"
bill='x-anthropic-billing-header: cc_version=2.1; cch='
for given in "\"${bill}1;\\nBe kind.\"" "[$(block "${bill}2;"),$(block "Be kind.")]" "[$(block "${bill}3;\\nBe kind.")]"; do
    case $given in \[*) plain="{\"role\":\"system\",\"content\":[$(block "Be kind.")]}" ;; *) plain=$(msg system "Be kind.") ;; esac
    same_prompt "/v1/messages: without the line that changes: $given" "$plain,$hi" /v1/messages "\"system\":$given,\"messages\":[$hi]"
done
same_prompt "/v1/messages: nothing but that line: no system turn" "$hi" /v1/messages "\"system\":[$(block "${bill}4;")],\"messages\":[$hi]"
same_prompt "/v1/messages: in another place it is a text" "$(msg user "${bill}5;")" /v1/messages "\"messages\":[$(msg user "${bill}5;")]"

# results, by the id of their call
both="$hi,$(one a),$(gave a r)"
item() { printf '{"type":"function_call","call_id":"%s","name":"f","arguments":"{}"}' "$1"; }
result() { printf '{"type":"function_call_output","call_id":"%s","output":"%s"}' "$1" "$2"; }
for role in user developer system; do
    shown=$role
    [ $role != developer ] || shown=system
    same_prompt "/v1/responses: a text of $role between call and result" "$both,$(msg $shown t)" /v1/responses "\"input\":[$hi,$(item a),$(msg $role t),$(result a r)]"
    same_prompt "a text of $role between call and result" "$both,$(msg $shown t)" $chat "\"messages\":[$hi,$(one a),$(msg $role t),$(gave a r)]"
done
same_prompt "/v1/responses: a text of the assistant between them" "$hi,$(msg assistant t),$(one a),$(gave a r)" /v1/responses \
    "\"input\":[$hi,$(item a),{\"type\":\"message\",\"role\":\"assistant\",\"content\":[{\"type\":\"output_text\",\"text\":\"t\"}]},$(result a r)]"
two='{"role":"assistant","tool_calls":[{"id":"a","function":{"name":"f","arguments":"{}"}},{"id":"b","function":{"name":"f","arguments":"{}"}}]}'
same_prompt "/v1/responses: results of two calls, a text between" "$hi,$two,$(gave b s),$(gave a r),$and" /v1/responses \
    "\"input\":[$hi,$(item a),$(item b),$(result b s),$and,$(result a r)]"
same_prompt "a result after the turn of the next call" "$both,$(one b),$(gave b s)" $chat "\"messages\":[$hi,$(one a),$(one b),$(gave b s),$(gave a r)]"
same_prompt "an id that is used twice: of the call before" "$both,$and,$(one a),$(gave a s)" $chat "\"messages\":[$hi,$(one a),$(gave a r),$and,$(one a),$(gave a s)]"
same_prompt "a result before its call" "$both" $chat "\"messages\":[$hi,$(gave a r),$(one a)]"
same_prompt "a result without an id follows its call" "$both" $chat "\"messages\":[$hi,$(one a),{\"role\":\"tool\",\"name\":\"f\",\"content\":\"r\"}]"
same_prompt "a result whose call is gone is a text" "$hi,$(msg user "[result of a tool] r")" $chat "\"messages\":[$hi,$(gave x r)]"
ok "with a warning" warned 'a tool result without its call'
same_prompt "/v1/messages: too" "$(msg user "[result of a tool] r"),$(msg user Hi.)" /v1/messages \
    "\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"tool_result\",\"tool_use_id\":\"x\",\"content\":\"r\"},$(block Hi.)]}]"
same_prompt "OpenAI's first form of calls" "$both" $chat "\"messages\":[$hi,{\"role\":\"assistant\",\"content\":null,\"function_call\":{\"name\":\"f\",\"arguments\":\"{}\"}},
{\"role\":\"function\",\"name\":\"f\",\"content\":\"r\"}]"

# arguments that are no object
same_prompt "broken arguments are read as a text" "$hi,$(one a '{"arguments":"{\"a\": 1"}'),$(gave a r)" $chat "\"messages\":[$hi,$(one a '"{\"a\": 1"'),$(gave a r)]"
for given in '""' '" "' null '"null"'; do
    same_prompt "no arguments: $given" "$both" $chat "\"messages\":[$hi,$(one a "$given"),$(gave a r)]"
done
same_prompt "/v1/responses: broken arguments" "$hi,$(one a '{"arguments":"{\"a"}'),$(gave a r)" /v1/responses \
    "\"input\":[$hi,{\"type\":\"function_call\",\"call_id\":\"a\",\"name\":\"f\",\"arguments\":\"{\\\"a\"},$(result a r)]"
same_prompt "/v1/messages: broken arguments" "$hi,$(one a '{"arguments":"{\"a"}'),$(gave a r)" /v1/messages "\"messages\":[$hi,
{\"role\":\"assistant\",\"content\":[{\"type\":\"tool_use\",\"id\":\"a\",\"name\":\"f\",\"input\":\"{\\\"a\"}]},
{\"role\":\"user\",\"content\":[{\"type\":\"tool_result\",\"tool_use_id\":\"a\",\"content\":[$(block r)]}]}]"

# parts that are no text, in old turns
old() { # old TYPE MEMBERS TEXT [WARNING]: a part of an old turn of each API reads as TEXT
    part="{\"type\":\"$1\"$2}"
    for role in assistant user; do
        plain="$(msg $role "$3"),$(msg assistant Yes.),$and"
        same_prompt "an old part $1 of $role" "$plain" $chat "\"messages\":[{\"role\":\"$role\",\"content\":[$part]},$(msg assistant Yes.),$and]"
        [ -z "$4" ] || ok "an old part $1 of $role: a warning" warned "$1: replaced by a placeholder"
    done
    same_prompt "/v1/messages: an old part $1" "$plain" /v1/messages "\"messages\":[{\"role\":\"user\",\"content\":[$part]},$(msg assistant Yes.),$and]"
    same_prompt "/v1/responses: an old part $1" "$plain" /v1/responses "\"input\":[{\"role\":\"user\",\"content\":[$part]},$(msg assistant Yes.),$and]"
}
old refusal ',"refusal":"no"' no
old image_url ',"image_url":{"url":"data:image/png;base64,iVBORw0KGgo="}' '[image_url left out]' w
old document ',"title":"T","source":{"type":"text","media_type":"text/plain","data":"abc"}' 'T\nabc'
old document ',"source":{"type":"content","content":[{"type":"text","text":"abc"}]}' abc
old document ',"source":{"type":"base64","media_type":"application/pdf","data":"JVBERi0xLjQK"}' '[document left out]' w
old search_result ',"title":"T","source":"http://x","content":[{"type":"text","text":"abc"}]' 'T\nabc'
old input_file ',"filename":"a.txt","file_data":"data:text/plain;base64,YWJjCg=="' 'a.txt\nabc'
old input_file ',"file_id":"file-1"' '[input_file left out]' w
old file ',"file":{"filename":"a.txt","file_data":"data:text/plain;base64,YWJj"}' 'a.txt\nabc'
old server_tool_use ',"id":"s","name":"web_search","input":{"query":"x"}' '[server_tool_use left out]' w
old web_search_tool_result ',"tool_use_id":"s","content":[]' '[web_search_tool_result left out]' w
same_prompt "/v1/messages: a tool's results: an image, a reference, a search result" "$hi,$(one a),$(gave a "[image left out][tool_reference left out]T\\nabc")" /v1/messages "\"messages\":[$hi,
{\"role\":\"assistant\",\"content\":[{\"type\":\"tool_use\",\"id\":\"a\",\"name\":\"f\",\"input\":{}}]},
{\"role\":\"user\",\"content\":[{\"type\":\"tool_result\",\"tool_use_id\":\"a\",\"content\":[{\"type\":\"image\",\"source\":{\"type\":\"base64\",\"media_type\":\"image/png\",\"data\":\"iVBO\"}},
{\"type\":\"tool_reference\",\"tool_name\":\"g\"},{\"type\":\"search_result\",\"title\":\"T\",\"source\":\"x\",\"content\":[$(block abc)]}]}]}]"
for given in '"content":null' '"role":"assistant"' '"content":[]'; do
    ask /v1/messages "{\"max_tokens\":1,\"messages\":[$hi,{\"role\":\"assistant\",$given},$and]}"
    ok "/v1/messages: an old message without text: $given" is 200
done
same_prompt "/v1/messages: thoughts that are hidden or empty" "$hi,$(msg assistant Yes.),$and" /v1/messages "\"messages\":[$hi,{\"role\":\"assistant\",\"content\":[
{\"type\":\"redacted_thinking\",\"data\":\"x\"},{\"type\":\"thinking\",\"thinking\":\"\",\"signature\":\"x\"},$(block Yes.)]},$and]"
same_prompt "thoughts among the parts" "$hi,$(msg assistant Yes.),$and" $chat "\"messages\":[$hi,{\"role\":\"assistant\",\"content\":[
{\"type\":\"thinking\",\"thinking\":\"Hm.\"},$(block Yes.)]},$and]"
ok "with a warning" warned 'thoughts among the parts of a content: left out'
refused "/v1/responses: an image to be answered now" 400 "input_image: this model reads text only; start the server with --mmproj" /v1/responses \
    '{"input":[{"role":"user","content":[{"type":"input_text","text":"a"},{"type":"input_image","image_url":"x"}]}]}'
refused "a file to be answered now, before instructions" 400 "file: expected text" $chat "{\"messages\":[$hi,$(msg assistant Yes.),
{\"role\":\"user\",\"content\":[{\"type\":\"file\",\"file\":{\"file_id\":\"x\"}}]},$(msg developer d)]}"

# items of /v1/responses
for kind in web_search_call file_search_call code_interpreter_call image_generation_call mcp_call mcp_list_tools mcp_approval_request compaction program; do
    same_prompt "/v1/responses: an item $kind" "$hi,$(msg assistant "[$kind left out]"),$(msg assistant Yes.),$and" /v1/responses \
        "\"input\":[$hi,{\"type\":\"$kind\",\"id\":\"x_1\",\"status\":\"completed\",\"action\":{\"type\":\"search\"}},$(msg assistant Yes.),$and]"
    ok "/v1/responses: an item $kind: a warning" warned "$kind: replaced by a placeholder"
done
same_prompt "/v1/responses: an item with a role and no content" "$hi,$(msg assistant "[additional_tools left out]"),$and" /v1/responses \
    "\"input\":[$hi,{\"type\":\"additional_tools\",\"role\":\"developer\",\"tools\":[]},$and]"
named() { printf '{"role":"assistant","tool_calls":[{"id":"a","function":{"name":"%s","arguments":%s}}]}' "$1" "$2"; }
for kind in "custom_tool_call,\"name\":\"g\",\"input\":\"x y\"|g|{\"input\":\"x y\"}" "local_shell_call,\"action\":{\"command\":[\"ls\"]}|local_shell|{\"command\":[\"ls\"]}" \
    "computer_call,\"action\":{\"type\":\"wait\"}|computer|{\"type\":\"wait\"}" "function_call,\"namespace\":\"n\",\"name\":\"g\",\"arguments\":\"{}\"|n__g|{}"; do
    rest=${kind#*|}
    type=${kind%%,*} members=${kind%%|*}
    same_prompt "/v1/responses: an item $type" "$hi,$(named "${rest%%|*}" "${rest#*|}"),$(gave a r),$and" /v1/responses \
        "\"input\":[$hi,{\"type\":\"$type\",\"call_id\":\"a\",${members#*,}},{\"type\":\"${type}_output\",\"call_id\":\"a\",\"output\":[{\"type\":\"input_text\",\"text\":\"r\"}]},$and]"
done
same_prompt "/v1/responses: a picture of the screen" "$hi,$(named computer '{}'),$(gave a '[computer_screenshot left out]')" /v1/responses \
    "\"input\":[$hi,{\"type\":\"computer_call\",\"call_id\":\"a\"},{\"type\":\"computer_call_output\",\"call_id\":\"a\",\"output\":{\"type\":\"computer_screenshot\",\"image_url\":\"x\"}}]"
same_prompt "/v1/responses: a thought that is encrypted, or empty" "$both" /v1/responses \
    "\"input\":[$hi,{\"type\":\"reasoning\",\"id\":\"rs_1\",\"summary\":[],\"encrypted_content\":\"x\"},{\"type\":\"reasoning\",\"summary\":[],\"content\":[]},$(item a),$(result a r)]"
ok "/v1/responses: an encrypted thought: a warning" warned 'reasoning: left out, it is encrypted'
same_prompt "/v1/responses: a thought that is a summary" "$hi,$(one a | sed 's/"tool_calls"/"reasoning_content":"Hm.","tool_calls"/'),$(gave a r)" /v1/responses \
    "\"input\":[$hi,{\"type\":\"reasoning\",\"summary\":[{\"type\":\"summary_text\",\"text\":\"Hm.\"}]},$(item a),$(result a r)]"

# items and responses that are kept in memory
ask /v1/responses "{\"max_output_tokens\":5,\"temperature\":0,\"input\":[$hi]}"
first=$(sed 's/^{"id":"\([^"]*\)".*/\1/' "$tmp/out") message=$(sed 's/.*"id":"\(msg_[^"]*\)".*/\1/' "$tmp/out") answer=$(text text out)
same_prompt "/v1/responses: a reference to an item" "$hi,$(msg assistant "$answer"),$and" /v1/responses "\"input\":[$hi,{\"type\":\"item_reference\",\"id\":\"$message\"},$and]"
same_prompt "/v1/responses: a reference without a type" "$hi,$(msg assistant "$answer"),$and" /v1/responses "\"input\":[$hi,{\"id\":\"$message\"},$and]"
same_prompt "/v1/responses: a response that is continued" "$hi,$(msg assistant "$answer"),$and" /v1/responses "\"previous_response_id\":\"$first\",\"input\":\"And?\",\"stream\":true"
next=$(sed -n 's/.*"response":{"id":"\([^"]*\)".*/\1/p' "$tmp/out" | head -n 1) second=$(text delta out)
same_prompt "/v1/responses: and its answer, with other instructions" "$(msg system S),$hi,$(msg assistant "$answer"),$and,$(msg assistant "$second"),$hi" /v1/responses \
    "\"previous_response_id\":\"$next\",\"instructions\":\"S\",\"input\":[$hi],\"store\":false"
last=$(sed 's/^{"id":"\([^"]*\)".*/\1/' "$tmp/out")
refused "/v1/responses: store: false is not kept" 400 "store: false" /v1/responses "{\"previous_response_id\":\"$last\",\"input\":\"a\"}"
refused "/v1/responses: an unknown response" 400 '"param":"previous_response_id"' /v1/responses '{"previous_response_id":"resp_0","input":"a"}'
refused "/v1/responses: an unknown item" 400 "store: false" /v1/responses '{"input":[{"type":"item_reference","id":"msg_0"}]}'
refused "/v1/responses: an item that is no object" 400 "input[1]: expected an object" /v1/responses "{\"input\":[$hi,\"a\"]}"
for thread in '{"type":"create"}' '{"type":"continue","previous_message_id":"msg_0"}'; do
    for path in /v1/messages /v1/messages/count_tokens; do
        ask $path "{\"max_tokens\":1,\"thread\":$thread,\"messages\":[$hi]}"
        ok "$path: thread $thread: 400" is 400
        ok "$path: in the form that its clients know" has out '"details":{"error_code":"thread_unsupported_request","unsupported":["thread"]}},"request_id":"req_'
    done
done

# ---- tools that are no functions -----------------------------------------------------------------
forced='"input":"Hi.","max_output_tokens":400,"parallel_tool_calls":false'
only_x='{"type":"object","properties":{"city":{"enum":["x"]}},"required":["city"],"additionalProperties":false}'
space="{\"type\":\"namespace\",\"name\":\"many\",\"description\":\"d\",\"tools\":[{\"type\":\"function\",\"name\":\"g\",\"parameters\":$only_x},{\"type\":\"function\",\"name\":\"h\"}]}"
custom='{"type":"custom","name":"patch","description":"d","format":{"type":"grammar","syntax":"lark","definition":"start: /a/"}}'
ask /v1/responses "{$forced,\"tools\":[{\"type\":\"web_search\"},$space],\"tool_choice\":{\"type\":\"function\",\"name\":\"g\",\"namespace\":\"many\"}}" -D "$tmp/headers"
ok "a tool of a namespace is called by its name there" has out '"name":"g","namespace":"many","arguments":"{\"city\":\"x\"}","status":"completed"}'
ok "the tool before it is left out" warned 'tools\[0\] web_search: left out'
called=$(sed 's/.*"output":\[\(.*\)\],"usage".*/\1/' "$tmp/out") call=$(sed 's/.*"call_id":"\([^"]*\)".*/\1/' "$tmp/out")
ask /v1/responses "{\"max_output_tokens\":1,\"tools\":[{\"type\":\"web_search\"},$space],\"input\":[$hi,$called,$(result "$call" r)]}"
ok "its call and result are read again, and only they are new" [ $(($(number input_tokens out) - $(number cached_tokens out))) -le 40 ]
ask /v1/responses "{$forced,\"tools\":[$space],\"tool_choice\":{\"type\":\"function\",\"name\":\"g\",\"namespace\":\"many\"},\"stream\":true}" -N
ok "and in a stream" count_of out '"name":"g","namespace":"many","arguments"' 3
grammar='"grammar":"root ::= <|tool_call> \"call:patch{input:\" <|\"|> \"a\\n\" <|\"|> \"}\" <tool_call|>"'
ask /v1/responses "{$forced,\"tools\":[$custom],\"tool_choice\":{\"type\":\"custom\",\"name\":\"patch\"},\"max_output_tokens\":20}"
ok "a custom tool can be forced" has out '"type":"custom_tool_call","id":"ctc_'
ask /v1/responses "{$forced,\"tools\":[$custom],\"tool_choice\":{\"type\":\"custom\",\"name\":\"patch\"},\"max_output_tokens\":20,\"stream\":true}" -N
grep '^event: ' "$tmp/out" | sed 's/event: response\.//' | tr '\n' ' ' >"$tmp/a"
ok "and in a stream" grep -q 'output_item.added custom_tool_call_input.delta custom_tool_call_input.done output_item.done ' "$tmp/a"
ask $chat "{\"messages\":[$hi],\"max_tokens\":40,\"tools\":[{\"type\":\"custom\",\"custom\":{\"name\":\"patch\"}}],$grammar}"
ok "a call of a custom tool has its input as a text" grep -q '"type":"custom","custom":{"name":"patch","input":"a\\n"}}\]' "$tmp/out"
ask $chat "{\"messages\":[$hi],\"max_tokens\":40,\"tools\":[{\"type\":\"custom\",\"custom\":{\"name\":\"patch\"}}],$grammar,\"stream\":true}" -N
ok "and in a stream" has out '"tool_calls":[{"index":0,"id":"call_'
ok "with its input" has out '"type":"custom","custom":{"name":"patch","input":"a\n"}}]'
ask $chat "{\"messages\":[$hi],\"max_tokens\":1,\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\"}},{\"type\":\"web_search_preview\"},{\"type\":\"mcp\",\"server_label\":\"s\"}]}" -D "$tmp/headers"
ok "a function beside tools that are left out" is 200
ok "which are named" warned 'tools\[1\] web_search_preview: left out.*; tools\[2\] mcp: left out'
ask /v1/messages "{\"max_tokens\":90,\"messages\":[$hi],\"tools\":[{\"type\":\"bash_20250124\",\"name\":\"bash\"},{\"type\":\"computer_20250124\",\"name\":\"computer\",\"display_width_px\":9}],
\"tool_choice\":{\"type\":\"tool\",\"name\":\"bash\",\"disable_parallel_tool_use\":true}}" -D "$tmp/headers"
ok "/v1/messages: a tool that the client runs is a function" has out '"name":"bash","input":{'
ok "/v1/messages: one that needs images is left out" warned 'tools\[1\] computer_20250124: left out'
ask $chat "{\"messages\":[$hi],\"max_tokens\":1,\"tools\":[$(seq -s , 99 | sed 's/[0-9]*/{"type":"t&"}/g')]}" -D "$tmp/headers"
ok "many warnings: the header is short, and says that there are more" warned '; \.\.$'
refused "only tools that are left out, and a call is forced" 400 "tool_choice needs tools" /v1/responses "{$forced,\"tools\":[{\"type\":\"web_search\"}],\"tool_choice\":\"required\"}"

# ---- unknown fields ------------------------------------------------------------------------------
for field in temprature:temperature max_token:max_tokens maxTokens:max_tokens tool:tools top-p:top_p; do
    ask $chat "{$user,\"max_tokens\":1,\"${field%:*}\":null}" -D "$tmp/headers"
    ok "a field that is nearly ${field#*:}: 200" is 200
    ok "a field that is nearly ${field#*:}: a warning" warned "${field%:*}: unknown field; did you mean ${field#*:}?"
done
for k in 1 2; do ask /v1/messages "{$user,\"max_tokens\":1,\"wholly_new\":$k}" -D "$tmp/headers"; done
ok "another field: no warning" [ "$(grep -ci x-gemma4-warning "$tmp/headers")" -eq 0 ]
ok "but one line in the log of the run" [ "$(grep -c '^# unknown field of a request, ignored: wholly_new$' "$tmp/main.log")" -eq 1 ]

# ---- constrained answers: only one text is possible, for any model ---------------------------------------
says() { # says NAME KEY TEXT: the strings with that key are this text, except for spaces after colons
    text "$2" out | sed 's/: /:/g' >"$tmp/said"
    ok "$1" [ "$(cat "$tmp/said")" = "$3" ]
}
one_city='{"type":"object","properties":{"city":{"enum":["Paris"]}},"required":["city"],"additionalProperties":false}'
city='{\"city\":\"Paris\"}'
other_city='{"type":"object","properties":{"city":{"$ref":"#/x"}}}'
unique='{"type":"array","items":{"type":"integer"},"maxItems":2,"uniqueItems":true}'
either='{"type":"function","function":{"name":"f","parameters":'"$one_city"'}},{"type":"function","function":{"name":"g"}}'
short="$user,\"max_tokens\":60"
for format in "\"response_format\":{\"type\":\"json_schema\",\"json_schema\":{\"name\":\"x\",\"strict\":true,\"schema\":$one_city}}" \
    "\"response_format\":{\"type\":\"json_schema\",\"schema\":$one_city}" "\"response_format\":{\"type\":\"json_object\",\"schema\":$one_city}" \
    "\"json_schema\":$one_city" "\"json_schema\":$one_city,\"reasoning_effort\":\"high\",\"reasoning_budget\":3" \
    "\"tools\":[],\"parallel_tool_calls\":false,\"json_schema\":$one_city"; do
    ask $chat "{$short,$format}"
    says "a schema: ${format%%,*}" content "$city"
    ok "a schema: the answer ends with it" has out '"finish_reason":"stop"'
    ask $chat "{$short,$format,\"stream\":true}" -N
    says "a schema: ${format%%,*}, streamed" content "$city"
done
ask $chat "{$short,\"max_tokens\":12,\"response_format\":{\"type\":\"json_object\"}}"
ok "any object begins as one" has out '"content":"{'
ask $chat "{$short,\"response_format\":{\"type\":\"text\"},\"json_schema\":null,\"grammar\":\"root ::= [0-9]{7} \\\"!\\\"\"}"
ok "a grammar" grep -qE '"content":"[0-9]{7}!"' "$tmp/out"
ask $chat "{$short,\"stream\":true,\"grammar\":\"root ::= \\\"yes, it is\\\"\"}" -N
says "a grammar, streamed" content "yes, it is"
ask /v1/completions '{"prompt":"Once","max_tokens":60,"grammar":"root ::= \"upon a hill\"","logprobs":1}'
says "/v1/completions: a grammar" text "upon a hill"
ask /v1/completions "{\"prompt\":\"Once\",\"max_tokens\":60,\"json_schema\":$one_city,\"stream\":true}" -N
says "/v1/completions: a schema, streamed" text "$city"
one_call='"parallel_tool_calls":false'
ask $chat "{$short,\"tools\":[$either],\"tool_choice\":\"required\",$one_call}"
ok "a forced call: there is one" count_is 1 '"type":"function"'
ok "a forced call: and no text" has out '"content":null,"tool_calls":[{'
ok "a forced call: finish_reason" has out '"finish_reason":"tool_calls"'
for name in f g; do
    ask $chat "{$short,\"tools\":[$either],\"tool_choice\":{\"type\":\"function\",\"function\":{\"name\":\"$name\"}},$one_call,\"stream\":true}" -N
    ok "a forced call of $name, streamed" count_is 1 "\"function\":{\"name\":\"$name\",\"arguments\":\"{"
done
ask $chat "{$short,\"tools\":[$either],\"tool_choice\":\"auto\",$one_call,\"response_format\":{\"type\":\"json_schema\",\"schema\":$one_city}}"
ok "a schema and tools: an answer or a call" grep -qE '"content":"\{|"tool_calls":\[' "$tmp/out"
written() { # written BLOCK [MORE]: the model writes exactly BLOCK between the markers of a tool call
    ask $chat "{$short,\"grammar\":\"root ::= <|tool_call> \\\"$1\\\" <tool_call|>\"$2}" -N
}
for stream in '' ',"stream":true'; do
    written 'search(q=hello, world, n=1) call:stop' "$stream"
    ok "calls in another form$stream: the first" has out '"name":"search","arguments":"{\"q\":\"hello, world\",\"n\":1}"'
    ok "calls in another form$stream: the second" has out '"name":"stop","arguments":"{}"'
    ok "calls in another form$stream: finish_reason" has out '"finish_reason":"tool_calls"'
    written 'call:todo prose here' "$stream"
    says "a text that is no call$stream" content "call:todo prose here"
    ok "a text that is no call$stream: finish_reason" has out '"finish_reason":"stop"'
done
written 'call:f{q:hello world, how are you today?}' ',"max_tokens":12'
ok "a call that is cut off: what there is" has out '"name":"f","arguments":"{\"q\":\"hello'
ok "a call that is cut off: finish_reason" has out '"finish_reason":"length"'
open_token=$(curl -sS -m 60 --data-binary '{"content":"<|tool_call>","parse_special":true}' "$url/tokenize" | sed 's/.*\[\([0-9]*\).*/\1/')
ask $chat "{$weather,\"tools\":[$either],$one_call,\"logit_bias\":{\"$open_token\":100}}"
ok "one call at most: the model would make more, and makes one" count_is 1 '"type":"function"'
ok "one call at most: then the answer ends" has out '"finish_reason":"tool_calls"'
ask /v1/messages "{$short,\"output_format\":{\"type\":\"json_schema\",\"schema\":$one_city}}"
says "/v1/messages: output_format" text "$city"
ask /v1/messages "{$short,\"output_config\":{\"format\":{\"type\":\"json_schema\",\"schema\":$one_city}},\"stream\":true}" -N
says "/v1/messages: output_config, streamed" text "$city"
for choice in '"any"' '"tool","name":"f"'; do
    forced="$short,\"tools\":[{\"name\":\"f\",\"input_schema\":$one_city}],\"tool_choice\":{\"type\":$choice,\"disable_parallel_tool_use\":true}"
    ask /v1/messages "{$forced}"
    ok "/v1/messages: tool_choice $choice" count_is 1 '"name":"f","input":{"city":"Paris"}'
    ok "/v1/messages: tool_choice $choice: stop_reason" has out '"stop_reason":"tool_use"'
    ask /v1/messages "{$forced,\"stream\":true}" -N
    ok "/v1/messages: tool_choice $choice, streamed" count_is 1 '"partial_json":"{\"city\":\"Paris\"}"'
done
input='"input":"Tell me a story.","max_output_tokens":60'
ask /v1/responses "{$input,\"text\":{\"format\":{\"type\":\"json_schema\",\"name\":\"x\",\"schema\":$one_city}}}"
says "/v1/responses: text.format" text "$city"
for choice in '"required"' '{"type":"function","name":"f"}'; do
    forced="$input,\"tools\":[{\"type\":\"function\",\"name\":\"f\",\"parameters\":$one_city}],\"tool_choice\":$choice,$one_call"
    ask /v1/responses "{$forced}"
    ok "/v1/responses: tool_choice $choice" count_is 1 '"name":"f","arguments":"{\"city\":\"Paris\"}"'
    ask /v1/responses "{$forced,\"stream\":true}" -N
    ok "/v1/responses: tool_choice $choice, streamed" has out '"type":"response.function_call_arguments.done"'
done
refused "a missing schema" 400 '"param":"response_format"' $chat "{$user,\"response_format\":{\"type\":\"json_schema\"}}"
refused "an unknown format" 400 '"param":"response_format"' $chat "{$user,\"response_format\":{\"type\":\"xml\"}}"
refused "a schema that is not understood" 400 '"param":"response_format"' $chat \
    "{$user,\"response_format\":{\"type\":\"json_schema\",\"json_schema\":{\"schema\":$other_city}}}"
ok "it is named by its place" has out 'schema: #/properties/city/$ref: '
ask /v1/messages "{$short,\"output_format\":{\"type\":\"json_schema\",\"schema\":$other_city}}"
ok "/v1/messages: a schema that is not understood: 400" is 400
ok "/v1/messages: it is named by its place" has out 'schema: #/properties/city/$ref: '
refused "strict: what cannot be enforced" 400 'schema: #/uniqueItems: ' $chat \
    "{$user,\"response_format\":{\"type\":\"json_schema\",\"json_schema\":{\"strict\":true,\"schema\":$unique}}}"
refused "a strict tool" 400 'tools[0].parameters: #/properties/x/uniqueItems: ' $chat \
    "{$user,\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"strict\":true,\"parameters\":{\"type\":\"object\",
    \"properties\":{\"x\":$unique}}}}],\"tool_choice\":\"required\"}"
for stream in false true; do
    ask $chat "{$user,\"max_tokens\":9,\"json_schema\":$unique,\"stream\":$stream}" -N -D "$tmp/headers"
    ok "without strict it is left out, streamed: $stream" is 200
    ok "and a header says so" grep -qi '^x-gemma4-warning: schema: #/uniqueItems: ' "$tmp/headers"
done
refused "two schemas" 400 '"param":"json_schema"' $chat "{$user,\"json_schema\":{},\"response_format\":{\"type\":\"json_object\"}}"
refused "a broken grammar" 400 '"param":"grammar"' $chat "{$user,\"grammar\":\"root ::= a\\na ::= (\"}"
ok "it is named by its line" has out 'grammar: line 2: '
refused "an invalid grammar" 400 '"param":"grammar"' $chat "{$user,\"grammar\":5}"
refused "a grammar and a schema" 400 '"param":"grammar"' $chat "{$user,\"grammar\":\"root ::= \\\"a\\\"\",\"json_schema\":{}}"
refused "a grammar and a forced call" 400 '"param":"grammar"' $chat \
    "{$user,\"grammar\":\"root ::= \\\"a\\\"\",\"tools\":[$either],\"tool_choice\":\"required\"}"
refused "ignore_eos and a schema" 400 '"param":"ignore_eos"' $chat "{$user,\"json_schema\":{},\"ignore_eos\":true}"
refused "a call without tools" 400 '"param":"tool_choice"' $chat "{$user,\"tool_choice\":\"required\"}"
refused "a call with no tools in the list" 400 '"param":"tool_choice"' $chat "{$user,\"tool_choice\":\"required\",\"tools\":[ ]}"
refused "a tool that is not there" 400 '"param":"tool_choice"' $chat \
    "{$user,\"tools\":[$either],\"tool_choice\":{\"type\":\"function\",\"function\":{\"name\":\"h\"}}}"
refused "an unknown tool choice" 400 '"param":"tool_choice"' $chat "{$user,\"tools\":[$either],\"tool_choice\":\"maybe\"}"
refused "a tool whose schema is not understood" 400 '"param":"tools"' $chat \
    "{$user,\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":$other_city}}],\"tool_choice\":\"required\"}"
ask /v1/messages "{$short,\"tool_choice\":{\"type\":\"any\"}}"
ok "/v1/messages: any without tools: 400" is 400
ok "/v1/messages: which is named" has out 'tool_choice needs tools'
many='x x x x x x x x\nx ::= y y y y y y y y\ny ::= z z z z z z z z\nz ::= w w w w w w w w\nw ::= \"a\"? \"a\"?'
refused "a grammar that fails in the middle" 400 "too ambiguous" $chat "{$user,\"grammar\":\"root ::= \\\"The fox\\\" $many\"}"
ask $chat "{$user,\"temperature\":0,\"max_tokens\":40,\"seed\":1}"
text content out | sed 's/\\"/"/g; s/\\n/\n/g' >"$tmp/a"
ok "after all of them the text is as before" same plain a

# ---- the contract: shapes, states and words that clients rely on -------------------------------------------------------
events() { # events FILE: the types of a stream's events; of equal ones in a row, one
    sed -n 's/^event: //p' "$tmp/$1" | uniq | sed 's/^response\.//' | tr '\n' ' '
}
numbered() { # numbered FILE: the sequence numbers of a stream are 0, 1, 2, ..
    grep -oE '"sequence_number":[0-9]+' "$tmp/$1" | awk -F: '$2 != NR - 1 { bad = 1 } END { exit bad || !NR }'
}
send='"tools":[{"type":"function","name":"send","parameters":{"type":"object","properties":{"text":{"type":"string","minLength":400}},"required":["text"]}}],"tool_choice":"required"'
ask /v1/responses "{\"max_output_tokens\":8,\"input\":\"hi\",$send}"
ok "/v1/responses: a call that is cut is incomplete" grep -q '"name":"send","arguments":"[^}]*}","status":"incomplete"}\],"usage"' "$tmp/out"
ok "/v1/responses: and so is the response" has out '"status":"incomplete","completed_at":null,"error":null,"incomplete_details":{"reason":"max_output_tokens"},'
ask /v1/responses "{\"max_output_tokens\":8,\"input\":\"hi\",$send,\"stream\":true}" -N
ok "/v1/responses: a call that is cut, streamed: begins in progress" has out '"name":"send","arguments":"","status":"in_progress"}}'
grep -A 1 '^event: response.output_item.done' "$tmp/out" >"$tmp/a"
ok "/v1/responses: a call that is cut, streamed: ends incomplete" grep -q '"name":"send",.*"status":"incomplete"}}$' "$tmp/a"
ok "/v1/responses: a call that is cut, streamed: in the response too" [ "$(grep -c '"name":"send","arguments":"[^}]*}","status":"incomplete"' "$tmp/out")" -eq 2 ]
ask /v1/responses '{"max_output_tokens":3,"temperature":0,"input":"Tell me a story about a fox.","stream":true}' -N
ok "/v1/responses: events of a text" [ "$(events out)" = "created in_progress output_item.added content_part.added output_text.delta output_text.done content_part.done output_item.done incomplete " ]
ok "/v1/responses: they are numbered" numbered out
ok "/v1/responses: a text that is cut" [ "$(grep -c '"type":"message","id":"msg_[^"]*","status":"incomplete"' "$tmp/out")" -eq 2 ]
ask /v1/responses "{\"input\":\"hi\",\"text\":{\"format\":{\"type\":\"json_schema\",\"name\":\"x\",\"schema\":$one_city}}}"
ok "/v1/responses: a text that is whole" has out '"type":"message","id":"msg_'
ok "/v1/responses: has the status completed" [ "$(grep -oF '"status":"completed"' "$tmp/out" | wc -l)" -eq 2 ]
paris='"input":"What is the weather in Paris?","temperature":0'
ask /v1/responses "{$paris,\"max_output_tokens\":4,\"reasoning\":{\"effort\":\"high\"},\"stream\":true}" -N
ok "/v1/responses: events of a thought" [ "$(events out)" = "created in_progress output_item.added content_part.added reasoning_text.delta reasoning_text.done content_part.done output_item.done incomplete " ]
ok "/v1/responses: the part of a thought" has out '"content_index":0,"part":{"type":"reasoning_text","text":""}}'
ok "/v1/responses: a thought that is cut" [ "$(grep -c '"type":"reasoning","id":"rs_[^"]*","status":"incomplete","summary":\[\]' "$tmp/out")" -eq 2 ]
for kind in auto concise detailed; do
    ask /v1/responses "{$paris,\"max_output_tokens\":40,\"reasoning\":{\"effort\":\"high\",\"summary\":\"$kind\"},\"stream\":true}" -N
    ok "/v1/responses: events of a summary: $kind" [ "$(events out)" = "created in_progress output_item.added reasoning_summary_part.added reasoning_summary_text.delta reasoning_summary_text.done reasoning_summary_part.done output_item.done completed " ]
done
ok "/v1/responses: they are numbered too" numbered out
text delta out >"$tmp/a"
ask /v1/responses "{$paris,\"max_output_tokens\":40,\"reasoning\":{\"effort\":\"high\",\"summary\":\"auto\"}}"
ok "/v1/responses: the item has the summary" has out "\"status\":\"completed\",\"summary\":[{\"type\":\"summary_text\",\"text\":\"$(cat "$tmp/a")\"}]"
ok "/v1/responses: and nothing encrypted" has out '"encrypted_content":null,"content":[{"type":"reasoning_text","text":"'
ask /v1/responses "{$paris,\"max_output_tokens\":40,\"reasoning\":{\"effort\":\"high\",\"summary\":\"auto\"},\"include\":[\"reasoning.encrypted_content\"]}"
ok "/v1/responses: unless it was asked for" grep -q '"encrypted_content":"gemma4-[0-9a-f]*"' "$tmp/out"
ok "/v1/responses: what was asked for" has out '"reasoning":{"effort":"high","summary":"auto"}'
asked='"instructions":"Be kind.","metadata":{"a":"b"},"tools":[{"type":"function","name":"f","parameters":{"type":"object"},"strict":false}],"tool_choice":"none","top_p":0.5'
ask /v1/responses "{\"input\":\"hi\",\"max_output_tokens\":1,\"temperature\":0.25,\"parallel_tool_calls\":false,\"user\":\"u\",$asked}"
for part in '"instructions":"Be kind."' '"metadata":{"a":"b"}' '"tools":[{"type":"function","name":"f","parameters":{"type":"object"},"strict":false}]' \
    '"tool_choice":"none"' '"temperature":0.25,"top_p":0.5' '"max_output_tokens":1,' '"parallel_tool_calls":false' '"user":"u"' \
    '"previous_response_id":null' '"truncation":"disabled"' '"text":{"format":{"type":"text"}}' '"store":true' '"background":false'; do
    ok "/v1/responses: the response has $part" has out "$part"
done
ask /v1/responses '{"input":"hi","max_output_tokens":1}'
for part in '"instructions":null' '"metadata":{}' '"tools":[]' '"tool_choice":"auto"' '"max_output_tokens":1,' '"user":null'; do
    ok "/v1/responses: the response has $part if it was not given" has out "$part"
done
f='{"type":"function","function":{"name":"f","parameters":'"$one_city"'}}'
for choice in '"required"' '{"type":"function","function":{"name":"f"}}'; do
    ask $chat "{$short,\"tools\":[$f],\"tool_choice\":$choice,$one_call,\"stream\":true}" -N
    ok "a forced call, streamed: the first delta has no text" grep -q '^data: .*"delta":{"role":"assistant","content":null},' "$tmp/out"
    ok "a forced call, streamed: nor has any other" lacks out '"content":"'
    ask $chat "{$user,\"tools\":[$f],\"tool_choice\":$choice,\"max_tokens\":1}"
    ok "a forced call that is cut at once: content is null" has out '"content":null},"logprobs":null,"finish_reason":"length"'
done
ask $chat "{$short,\"max_tokens\":1,\"stream\":true}" -N
ok "a stream of text: the first delta has an empty one" grep -q '^data: .*"delta":{"role":"assistant","content":""},' "$tmp/out"
ask $chat "{$short,\"tools\":[$f],\"grammar\":\"root ::= \\\"Wait. \\\" <|tool_call> \\\"call:f{}\\\" <tool_call|>\"}"
ok "a call after a text: both" has out '"content":"Wait. ","tool_calls":[{"id":"call_'
ok "a call after a text: finish_reason" has out '"finish_reason":"tool_calls"'
for end in '"stop":"fox" stop stop_sequence' '"max_tokens":2 length max_tokens' "\"json_schema\":$one_city stop end_turn"; do
    what=${end%% *} reasons=${end#* }
    ask $chat "{$user,\"temperature\":0,$what}"
    ok "finish_reason: $what: ${reasons% *}" has out "\"finish_reason\":\"${reasons% *}\""
    ask /v1/messages "{$user,\"temperature\":0,$(echo "$what" | sed 's/"stop":\(.*\)/"stop_sequences":[\1]/; s/"json_schema":\(.*\)/"output_format":{"type":"json_schema","schema":\1}/')}"
    ok "stop_reason: $what: ${reasons#* }" has out "\"stop_reason\":\"${reasons#* }\""
done
ask /v1/messages "{$user,\"max_tokens\":2,\"temperature\":0,\"stream\":true}" -N -D "$tmp/headers"
ok "/v1/messages: events" [ "$(events out)" = "message_start ping content_block_start content_block_delta content_block_stop message_delta message_stop " ]
ok "/v1/messages: how a message begins" has out '"content":[],"stop_reason":null,"stop_sequence":null,"stop_details":null,"container":null,"usage":{"input_tokens":21,"cache_creation_input_tokens":0,"cache_read_input_tokens":0,'
ok "/v1/messages: the delta has the whole usage" has out '"usage":{"input_tokens":1,"cache_creation_input_tokens":0,"cache_read_input_tokens":20,'
ok "/v1/messages: a stream has the id of its request" grep -qi '^request-id: req_' "$tmp/headers"
think='"thinking":{"type":"enabled","budget_tokens":1024},"temperature":0,"max_tokens":12,"messages":[{"role":"user","content":"What is the weather in Paris?"}]'
ask /v1/messages "{$think}"
signature=$(text signature out)
ok "/v1/messages: a thought is signed" [ -n "$signature" ]
ask /v1/messages "{$think,\"stream\":true}" -N
ok "/v1/messages: the same signature, streamed" has out "\"delta\":{\"type\":\"signature_delta\",\"signature\":\"$signature\"}}"
# ---- end of the contract

# ---- errors: 4xx with a reason; the server keeps running ----------------------------------
refused "an unknown path" 404 "POST /v1/images: this server has no such endpoint; docs/server.md" /v1/images "{}"
refused "embeddings" 404 "/v1/embeddings: this server has no embeddings" /embeddings '{"input":"a"}'
ask /completions '{"prompt":"a","max_tokens":1}'
ok "/completions: the same without /v1" has out '"object":"text_completion"'
for path in /chat/completions /responses /messages; do
    ask $path '{"max_tokens":1,"max_output_tokens":1,"input":"a","messages":[{"role":"user","content":"a"}]}'
    ok "$path: the same without /v1" is 200
done
ask /messages/count_tokens "{$user}"
ok "/messages/count_tokens too" has out '{"input_tokens":21}'
get $chat
ok "GET instead of POST: 405" is 405
refused "invalid JSON" 400 "not JSON" $chat "hello"
refused "not an object" 400 "object" $chat "[1]"
ok "error.code is a word or null" has out '"type":"invalid_request_error","param":null,"code":null}}'
refused "no messages" 400 "messages" $chat "{}"
refused "empty messages" 400 "messages" $chat '{"messages":[]}'
refused "n 129" 400 '"param":"n"' $chat "{$user,\"n\":129}"
refused "n 0" 400 '"param":"n"' $chat "{$user,\"n\":0}"
refused "best_of less than n" 400 '"param":"best_of"' /v1/completions '{"prompt":"a","n":3,"best_of":2}'
refused "best_of in a stream" 400 '"param":"best_of"' /v1/completions '{"prompt":"a","best_of":2,"stream":true}'
refused "an image" 400 "image" $chat '{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]}'
refused "audio" 400 "audio" $chat "{$user,\"modalities\":[\"text\",\"audio\"],\"audio\":{}}"
refused "a wrong type" 400 "temperature" $chat "{$user,\"temperature\":\"hot\"}"
refused "out of range" 400 "top_p" $chat "{$user,\"top_p\":2}"
refused "not an integer" 400 "max_tokens" $chat "{$user,\"max_tokens\":1.5}"
refused "an empty stop" 400 "stop" $chat "{$user,\"stop\":[\"\"]}"
refused "a bias out of range" 400 "logit_bias" $chat "{$user,\"logit_bias\":{\"999999\":1}}"
refused "a sampler that is not there" 400 "xtc_probability" $chat "{$user,\"xtc_probability\":0.5}"
refused "an unknown role" 400 "role" $chat '{"messages":[{"role":"wizard","content":"a"}]}'
refused "thinking that is not a switch" 400 "enable_thinking" $chat "{$user,\"chat_template_kwargs\":{\"enable_thinking\":\"yes\"}}"
refused "no token left" 400 "logit_bias" $chat "{$user,\"logit_bias\":{$(seq -s ':-100,"' 0 4095 | sed 's/:-/":-/g; s/^/"/; s/$/":-100/')}}"
ask $chat "{$user,\"max_tokens\":1,\"samplers\":\"top_k;top_p\",\"typical_p\":1,\"xtc_probability\":0,\"dry_multiplier\":0,\"dynatemp_range\":0,\"mirostat\":0,
\"timings_per_token\":true,\"reasoning_format\":\"auto\",\"repetition_penalty\":1.1,\"logprobs\":false,\"top_logprobs\":0,\"stop\":null,\"tools\":[],\"grammar\":\"\",
\"stream_options\":null,\"parallel_tool_calls\":true,\"store\":false,\"metadata\":{},\"n\":1}"
ok "fields that clients send and that change nothing" is 200
refused "logprobs true instead of a number" 400 "0 to 5" /v1/completions '{"prompt":"a","logprobs":true}'
refused "logprobs 6" 400 "0 to 5" /v1/completions '{"prompt":"a","logprobs":6}'
refused "logprobs 1.5" 400 "0 to 5" /v1/completions '{"prompt":"a","logprobs":1.5}'
refused "logprobs -1" 400 '"param":"logprobs"' /v1/completions '{"prompt":"a","logprobs":-1}'
refused "echo in a chat" 400 "/v1/completions" $chat "{$user,\"echo\":true}"
refused "logprobs 1 instead of true" 400 "true or false" $chat "{$user,\"logprobs\":1}"
refused "ids out of range" 400 "prompt[1]" /v1/completions '{"prompt":[2,4096]}'
refused "ids out of range in the second of two prompts" 400 "prompt[1][0]" /v1/completions '{"prompt":[[2],[4096]]}'
refused "a prompt without ids" 400 "at least one token" /v1/completions '{"prompt":[[2],[]]}'
refused "a prompt that is an object" 400 "a list of token ids" /v1/completions '{"prompt":["a",{}]}'
refused "129 prompts" 400 "at most 128" /v1/completions "{\"prompt\":[$(seq -s, 129 | sed 's/[0-9]*/[2]/g')]}"
refused "65 prompts with two answers each" 400 "at most 128" /v1/completions "{\"n\":2,\"prompt\":[$(seq -s, 65 | sed 's/[0-9]*/[2]/g')]}"
refused "no tokens" 400 "tokens" /detokenize "{}"
yes "word" | head -n 9000 | tr '\n' ' ' | sed 's/.*/{"prompt":"&"}/' >"$tmp/long"
ask /v1/completions "@$tmp/long"
n=$(sed -n 's/.*"n_prompt_tokens":\([0-9]*\).*/\1/p' "$tmp/out")
ok "a prompt that is too long: 400" is 400
ok "it has more than 8192 tokens" [ "${n:-0}" -gt 8192 ]
ok "with the code that clients know" has out '"param":"prompt","code":"context_length_exceeded","n_prompt_tokens":'"$n"',"n_ctx":8192}}'
ok "with the text that clients know" has out "This model's maximum context length is 8192 tokens. However, your prompt resulted in $n tokens."
ask /completion "@$tmp/long"
ok "/completion: too long: the type that clients of llama.cpp know" has out '"type":"exceed_context_size_error"'
sed 's/^{"prompt":\(.*\)}$/{"input":\1}/' "$tmp/long" >"$tmp/body"
ask /v1/responses "@$tmp/body"
ok "/v1/responses: too long: text, parameter and code" grep -q "maximum context length is 8192 tokens.*\"param\":\"input\",\"code\":\"context_length_exceeded\"" "$tmp/out"
sed 's/^{"prompt":\(.*\)}$/{"max_tokens":1,"messages":[{"role":"user","content":\1}]}/' "$tmp/long" >"$tmp/body"
ask $chat "@$tmp/body"
ok "chat: too long: text, parameter and code" grep -q "maximum context length is 8192 tokens. However, your messages resulted in [0-9]* tokens.*\"param\":\"messages\",\"code\":\"context_length_exceeded\"" "$tmp/out"
ask /v1/messages "@$tmp/body" -D "$tmp/headers"
n=$(sed -n 's/.*prompt is too long: \([0-9]*\) tokens > 8192 maximum.*/\1/p' "$tmp/out")
ok "/v1/messages: too long, in Anthropic's words" has out "{\"type\":\"error\",\"error\":{\"type\":\"invalid_request_error\",\"message\":\"prompt is too long: $n tokens > 8192 maximum\"},\"request_id\":\"req_"
id=$(sed -n 's/.*"request_id":"\([^"]*\)".*/\1/p' "$tmp/out")
ok "/v1/messages: the id of the request is in the headers too" [ "$(grep -ciE "^(x-)?request-id: $id" "$tmp/headers")" -eq 2 ]
ask /v1/messages/count_tokens "@$tmp/body"
ok "/v1/messages/count_tokens: counts what is too long" has out "{\"input_tokens\":$n}"
head -c 1200000 /dev/zero | tr '\0' 'x' >"$tmp/large"
ask /tokenize "@$tmp/large" -H "Expect:"
ok "a body that is too large: 413" is 413
ask /tokenize "@$tmp/large" -H "Transfer-Encoding: chunked" -H "Expect:"
ok "and in chunks: 413" is 413
get /health -H "Host: example.com"
ok "another Host: 403" is 403
get /health -H "Origin: http://example.com"
ok "another Origin: 403" is 403
get /health -H "Origin: $url"
ok "our own Origin is fine" is 200
printf '{%s,"tools":[{"type":"function","function":{"name":"f"}}],"stop":"x","max_tokens":1}' "$user" >"$tmp/whole"
size=$(wc -c <"$tmp/whole") bad=0 step=11
[ "${LONG:-0}" = 0 ] || step=1
for n in $(seq 0 $step $((size - 1))); do
    head -c "$n" "$tmp/whole" >"$tmp/cut"
    ask $chat "@$tmp/cut"
    case $code in 4??) ;; *) bad=$((bad + 1)) ;; esac
done
ok "a body cut anywhere is a 4xx" [ "$bad" -eq 0 ]
i=0 bad=0
while [ $i -lt $((size / step)) ]; do                                # one byte differs
    { head -c $((i * step)) "$tmp/whole"; printf '\377'; tail -c +$((i * step + 2)) "$tmp/whole"; } >"$tmp/cut"
    ask $chat "@$tmp/cut"
    case $code in 4??|200) ;; *) bad=$((bad + 1)) ;; esac
    i=$((i + 1))
done
ok "a broken byte anywhere is a 4xx or text" [ "$bad" -eq 0 ]
ok "no body made a 5xx" [ "$(metric 'http_responses_total{class="5xx"}')" = 0 ]

# ---- several at once: the same answers as alone --------------------------------------------------
prompt() { # prompt K: a request body; the fifth has a long prompt
    [ "$1" -ne 5 ] || long=$(yes "The fox ran over the hill and saw a bird." | head -n 120 | tr '\n' ' ')
    [ "$1" -eq 5 ] || long=
    printf '{"messages":[{"role":"user","content":"%sTell me story number %s about a fox."}],"seed":%s,"max_tokens":40%s}' \
        "$long" "$1" "$1" "$2"
}
for k in 1 2 3 4 5 6; do
    ask $chat "$(prompt $k ',"cache_prompt":false')"
    text content out >"$tmp/alone.$k"
done
ok "a long prompt is answered" [ -s "$tmp/alone.5" ]
waits=
for k in 1 2 3 4 5 6; do
    curl -sS -m 600 -N -o "$tmp/many.$k" --data-binary "$(prompt $k ',"stream":true')" "$url$chat" &
    waits="$waits $!"
done
# shellcheck disable=SC2086  # several numbers
wait $waits
for k in 1 2 3 4 5 6; do
    text content "many.$k" >"$tmp/together.$k"
    ok "text $k is the same with other sessions" same "alone.$k" "together.$k"
done
ask $chat "$(prompt 5 ',"x":1')"
ok "a long cached prompt does not run again" [ "$(number cached_tokens out)" -gt 1000 ]
text content out >"$tmp/again"
ok "and gives the same text" same alone.5 again

# A chunk is 512 tokens. While another session decodes, it starts with 8 tokens and grows by a quarter each time, until
# a step takes three times as long as one without a chunk.
endless="{$user,\"ignore_eos\":true,\"max_tokens\":8000"
ask $chat "$(prompt 5 ',"stream":true,"return_progress":true,"cache_prompt":false')" -N
text content out >"$tmp/alone"
ok "a prompt that is alone runs in large chunks" [ "$(grep -c '"prompt_progress"' "$tmp/out")" -le 5 ]
curl -sS -N -m 600 -o "$tmp/left" --data-binary "$endless,\"stream\":true}" "$url$chat" &
answer=$!
ok "an answer is under way" until_metric requests_running 1
ask $chat "$(prompt 5 ',"stream":true,"return_progress":true,"cache_prompt":false')" -N
text content out >"$tmp/beside"
kill $answer
wait $answer 2>/dev/null
ok "a prompt runs in small chunks during an answer" [ "$(grep -c '"prompt_progress"' "$tmp/out")" -ge 9 ]
ok "with the same text" same alone beside
ok "and nothing is left of either" until_metric requests_running 0
cancelled=$(metric requests_cancelled_total)

# ---- a conversation: each turn computes only new tokens --------------------------------------
talk='{"role":"user","content":"Tell me a story about a fox."}' old=0 repeated=0
for turn in 1 2 3 4 5; do
    ask $chat "{\"messages\":[$talk],\"temperature\":0,\"max_tokens\":30}"
    [ $((old - $(number cached_tokens out))) -le 40 ] || repeated=$((repeated + 1))
    old=$(number prompt_tokens out)
    talk="$talk,{\"role\":\"assistant\",\"content\":\"$(text content out)\"},{\"role\":\"user\",\"content\":\"And then, $turn?\"}"
done
ok "a conversation's prefix stays in its session" [ "$repeated" -eq 0 ]

# ---- many connections, and some slow ones ----------------------------------------------------
loris='' slow=2
[ "${LONG:-0}" = 0 ] || slow=60
for _ in $(seq 20); do                                               # each sends half a request and waits
    { printf 'POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n'; sleep "$slow"; } |
        curl -sS -m 600 "telnet://${url#http://}" >/dev/null 2>&1 &
    loris="$loris $!"
done
for _ in $(seq 200); do printf 'url = "%s/health"\noutput = "/dev/null"\nwrite-out = "%%{http_code}\\n"\n' "$url"; done >"$tmp/urls"
curl -sS -m 600 -Z --parallel-max 200 --parallel-immediate -K "$tmp/urls" >"$tmp/codes" 2>"$tmp/err"
ok "200 connections at once, and 20 silent ones" [ "$(grep -c '^200$' "$tmp/codes")" -eq 200 ]
ask $chat "{$user,\"max_tokens\":4}"
ok "and answers continue" is 200
if [ "${LONG:-0}" != 0 ]; then
    ok "they are still connected" [ "$(metric connections)" -ge 20 ]
    sleep 45
    ok "who does not speak is hung up on" until_metric connections 1
fi
# shellcheck disable=SC2086  # several numbers
kill $loris 2>/dev/null

# ---- clients that disconnect ----------------------------------------------------------------
curl -sS -N -m 600 -o "$tmp/left" --data-binary "$endless,\"stream\":true}" "$url$chat" &
first=$!
curl -sS -N -m 600 -o "$tmp/left" --data-binary "$endless}" "$url$chat" &
second=$!
ok "two answers are under way" until_metric requests_running 2
kill -9 $first $second
wait $first $second 2>/dev/null
ok "both end when their callers leave" until_metric requests_running 0
ok "and are counted" [ "$(metric requests_cancelled_total)" = $((cancelled + 2)) ]
if [ "${LONG:-0}" != 0 ]; then
    rss() { sed -n 's/^VmRSS:[^0-9]*\([0-9]*\).*/\1/p' "/proc/$main/status"; }
    for k in $(seq 100); do ask $chat "{$user,\"max_tokens\":4}"; done
    before=$(rss)
    for k in $(seq 1000); do ask $chat "{$user,\"max_tokens\":4}"; done
    after=$(rss)
    echo "# 1,000 requests: $before KiB before, $after KiB after"
    ok "memory stays flat over 1,000 requests" [ $((after - before)) -le $((before / 100)) ]
fi

# ---- sparse prompts: chunks must not be smaller, so only some layers run between two tokens of others ----------
serve layers -np 2 -c 4096 --chunk 512 --pflash 0.5 --pflash-from 0
ask $chat "$(prompt 5 ',"stream":true,"return_progress":true,"cache_prompt":false')" -N
text content out >"$tmp/alone"
# Whether chunks are whole: the last one may be cut for a snapshot before the answer. Events that come together are one.
chunks() { sed -n 's/.*"prompt_progress":{"total":\([0-9]*\),"cache":0,"processed":\([0-9]*\).*/\1 \2/p' "$tmp/out" |
    awk '{ bad += $2 % 512 && $2 < $1 - 16 } END { print((NR > 0 && !bad) ? "whole" : "cut") }'; }
alone=$(chunks)
curl -sS -N -m 600 -o "$tmp/left" --data-binary "{$user,\"ignore_eos\":true,\"max_tokens\":3000,\"stream\":true}" "$url$chat" &
answer=$!
ok "an answer is under way" until_metric requests_running 1
before=$(grep -c '^data:' "$tmp/left")
ask $chat "$(prompt 5 ',"stream":true,"return_progress":true,"cache_prompt":false')" -N
after=$(grep -c '^data:' "$tmp/left")
text content out >"$tmp/beside"
kill $answer
wait $answer 2>/dev/null
ok "a sparse prompt during an answer has the same text" same alone beside
ok "and whole chunks" [ "$alone $(chunks)" = "whole whole" ]
ok "between which the answer continued: $before, then $after" [ $((after - before)) -ge 15 ]

# ---- drafts; prompts in small chunks -----------------------------------------------------------
serve guesses -np 2 --chunk 32 -md models/gemma4-mini-mtp-q8_0.gguf --spec mtp          # auto may not draft on a slow machine
for k in 1 2 3; do
    curl -sS -m 600 -N -o "$tmp/many.$k" --data-binary "$(prompt $k ',"stream":true')" "$url$chat" &
    eval "wait$k=$!"
done
wait "$wait1" "$wait2" "$wait3"
for k in 1 2 3; do
    text content "many.$k" >"$tmp/together.$k"
    ok "text $k is the same with drafts" same "alone.$k" "together.$k"
done
ask /v1/completions '{"prompt":"a b c d e f a b c d e f a b c d e f a b c","temperature":0,"max_tokens":40,"ignore_eos":true}'
ok "drafts are reported" [ "$(number draft_n out)" -gt 0 ]

curl -sS -N -m 600 -o "$tmp/prompt" --data-binary "{\"prompt\":\"$(yes "The fox ran over the hill." | head -n 200 | tr '\n' ' ')\",
\"max_tokens\":1,\"cache_prompt\":false}" "$url/v1/completions" &                  # 1,400 tokens: 44 chunks
waits=$!
ok "a long prompt runs" until_metric requests_running 1
ask $chat "{$user,\"max_tokens\":25,\"ignore_eos\":true}"
ok "a second answer gets a token for each chunk, and so finishes first" [ ! -s "$tmp/prompt" ]
ok "with all its tokens" has out '"completion_tokens":25'
wait $waits
ok "and the prompt is answered" has prompt '"finish_reason":"length"'

one_of() { # one_of USER NAME TOKENS: sends a request; appends NAME to $tmp/order after its answer
    curl -sS -m 600 -o "$tmp/left" --data-binary "{$user,\"ignore_eos\":true,\"max_tokens\":$3,\"user\":\"$1\"}" "$url$chat"
    echo "$2" >>"$tmp/order"
}
waits=
for k in 1 2 3 4; do
    one_of greedy "greedy$k" 400 &
    waits="$waits $!"
done
ok "one client has all sessions, and waits" until_metric requests_waiting 2
one_of modest modest 5 &
modest=$!
ok "another one waits too" until_metric requests_waiting 3
# shellcheck disable=SC2086  # several numbers
wait $waits $modest
ok "another one is next" [ "$(head -n 3 "$tmp/order" | grep -c modest)" -eq 1 ]

# ---- an agent: each turn has the result of a call, or a question; LONG=1: 50 turns after a long prompt ----------
turns=8 intro=20
[ "${LONG:-0}" = 0 ] || turns=50 intro=1750
serve agent -np 2 -c 20480 --chunk 64
talk="{\"role\":\"system\",\"content\":\"$(yes 'You answer what you are asked.' | head -n $intro | tr '\n' ' ')\"},
{\"role\":\"user\",\"content\":\"What is the weather in Paris?\"}"
result=$(yes 'It is sunny, the wind is weak, and there is no rain.' | head -n 4 | tr '\n' ' ')
tools='[{"type":"function","function":{"name":"get_weather","description":"Weather of a city","parameters":{"type":"object",
"properties":{"city":{"type":"string"}},"required":["city"]}}}]'
calls=0
: >"$tmp/turns"
for turn in $(seq $turns); do
    ask $chat "{\"messages\":[$talk],\"tools\":$tools,\"temperature\":0,\"max_tokens\":24}"
    echo "$(number prompt_tokens out) $(number prompt_n out)" >>"$tmp/turns"
    talk="$talk,$(sed 's/.*"message":\(.*\),"logprobs":.*/\1/' "$tmp/out")"
    call=$(sed -n 's/.*"tool_calls":\[{"id":"\([^"]*\)".*/\1/p' "$tmp/out")
    [ -z "$call" ] || calls=$((calls + 1))
    if [ -n "$call" ]; then talk="$talk,{\"role\":\"tool\",\"tool_call_id\":\"$call\",\"content\":\"$result\"}"
    else talk="$talk,{\"role\":\"user\",\"content\":\"$result What is the weather in Rome, $turn?\"}"; fi
done
awk 'NR > 1 { run += $2; new += $1 - before }
     { before = $1 }
     END { printf "# an agent: %d turns, %d ids at the end; %d run of %d new ones\n", NR, before, run, new
           print (run <= 1.05 * new) ? "fine" : "bad" }' "$tmp/turns" >"$tmp/agent"
head -n 1 "$tmp/agent"
ok "an agent: hardly more than the new tokens of its prompts run" grep -q '^fine' "$tmp/agent"
ok "an agent: it makes calls" [ "$calls" -gt 0 ]
kill -TERM "$pid"
wait "$pid"

# ---- saved idle conversations ----------------------------------------------------------------
kept="$tmp/kept"
serve keeper --session-dir "$kept" -c 4096
keeper=$pid
words() { yes "$1" | head -n "$2" | tr '\n' ' '; }
ask_words() { # ask_words TEXT FILE: a chat about TEXT; writes the answer to FILE, sets $cached to the reused tokens
    ask $chat "{\"messages\":[{\"role\":\"user\",\"content\":\"$1\"}],\"temperature\":0,\"max_tokens\":12}"
    text content out >"$tmp/$2"
    cached=$(number cached_tokens out)
}
a="$(words 'The fox ran over the hill.' 40) What did it do?" b="$(words 'A bird sat in a tree.' 40) What did it do?"
ask_words "$a" a.1
ok "nothing is cached at first" [ "$cached" -eq 0 ]
ask_words "$b" b.1
ask_words "$a" a.2
ok "a conversation comes back to the one slot there is" [ "$cached" -gt 200 ]
ok "with the same text" same a.1 a.2
ok "and is counted" [ "$(metric sessions_resumed_total)" = 1 ]
far="$(words 'The fox ran over the hill.' 150)"
ask_words "$far $(words 'It rained on Monday.' 25)" c.1
ask_words "$far $(words 'It rained on Friday.' 25)" c.2
ok "a prompt that differs early runs from the snapshot before that" [ "$cached" -gt 1000 ]
ask $chat "{\"messages\":[{\"role\":\"user\",\"content\":\"$far $(words 'It rained on Friday.' 25)\"}],\"temperature\":0,\"max_tokens\":12,\"cache_prompt\":false}"
text content out >"$tmp/c.3"
ok "with the same text as without" same c.2 c.3
for _ in $(seq 1200); do
    [ "$(find "$kept" -name '*.session' | wc -l)" -ge 2 ] && break
    sleep 0.05
done
run serve "$model" --port 0 --session-dir "$kept"
ok "a second server does not use the folder" grep -q -e '--session-dir: .*another server' "$tmp/err"
kill -TERM "$keeper"
wait "$keeper"
ok "sessions are in files at the end" [ "$(find "$kept" -name '*.session' | wc -l)" -ge 3 ]
ok "of which only we can read" [ -z "$(find "$kept" -perm /077)" ]
half="0123456789abcdef.session.1.tmp 0123456789abcdef.session.89abcdef.tmp"
theirs="0123456789abcdef.session.bak 0123456789abcdef.session.2026-11-25 0123456789abcdef.session.x.tmp a.session.1.tmp b.session"
for f in $half $theirs; do printf 'half' >"$kept/$f"; done
serve keeper --session-dir "$kept" -c 4096
for f in $half; do ok "what was left half written goes: $f" [ ! -e "$kept/$f" ]; done
for f in $theirs; do ok "other files stay: $f" [ -e "$kept/$f" ]; done
ask_words "$a" a.2
ok "another run continues from them" [ "$cached" -gt 200 ]
ok "with the same text again" same a.1 a.2
kill -TERM "$pid"
wait "$pid"
for f in "$kept"/*.session; do                                        # one byte of each differs
    size=$(wc -c <"$f")
    { head -c $((size - 5000)) "$f"; printf '\377\377'; tail -c 4998 "$f"; } >"$tmp/damaged" && cp "$tmp/damaged" "$f"
done
serve keeper --session-dir "$kept" -c 4096
ask_words "$a" a.2
ok "damaged files are not gone on from" [ "$cached" -eq 0 ]
ok "which the log says" grep -q 'is damaged: wrong checksum' "$tmp/keeper.log"
ok "and the text is right" same a.1 a.2
kill -TERM "$pid"
wait "$pid"

# The same conversation with two cache types: a separate file for each.
ask_plain() { # ask_plain TEXT [MORE]: a completion; writes its text to $tmp/plain, sets $cached and $prompt (tokens)
    ask /v1/completions "{\"prompt\":\"$1\",\"temperature\":0,\"max_tokens\":$most,\"logprobs\":2${2:-}}"
    sed 's/.*"choices"//; s/"usage".*//' "$tmp/out" >"$tmp/plain"
    cached=$(number cached_tokens out) prompt=$(number prompt_tokens out)
}
fox=$(words 'The fox ran.' 40) most=8
fox=${fox% }
for type in f16 q8_0 f16; do
    serve types --session-dir "$tmp/types" -c 1024 -ctk $type -ctv $type
    ask_plain "$fox"
    kill -TERM "$pid"
    wait "$pid"
done
ok "a cache of another type leaves the file of the first" [ "$cached" -gt 100 ]
ok "and has a separate one" [ "$(find "$tmp/types" -name '*.session' | wc -l)" -eq 2 ]

# If a longer conversation cannot be saved, the file of its shorter beginning is kept.
serve small --session-dir "$tmp/disk" -c 2048 --session-disk 2
ask_plain "$fox"
ask_plain "$(words 'A bird sat.' 40)"
ask_plain "$fox $(words 'It rained.' 300)"
ok "the shorter one comes back" [ "$cached" -gt 100 ]
kill -TERM "$pid"
wait "$pid"
ok "the log says that there is no room for the longer one" grep -q 'cannot write: the session exceeds --session-disk' "$tmp/small.log"
serve small --session-dir "$tmp/disk" -c 2048 --session-disk 2
ask_plain "$fox"
ok "the shorter one is in a file still" [ "$cached" -gt 100 ]
ask_plain "$(words 'A bird sat.' 40)"
ask_plain "$(words 'A cow slept.' 40)"
ask_plain "$(words 'A dog ate.' 40)"
ask_plain "$(words 'A bird sat.' 40)"
ok "a conversation without room in files stays in memory" [ "$cached" -gt 100 ]
kill -TERM "$pid"
wait "$pid"

# A conversation that is too large for memory does not evict all others; with a folder, all slots are saved at shutdown.
serve small -np 1 -c 2048 --cache-ram 3
ask_plain "$fox"
ask_plain "$(words 'It rained.' 300)"
ask_plain "$(words 'A bird sat.' 40)"
ask_plain "$fox"
ok "a session that is too large leaves the others in memory" [ "$cached" -gt 100 ]
kill -TERM "$pid"
wait "$pid"
serve slots -np 3 -c 3072 --cache-ram 0 --session-dir "$tmp/slots"
for text in "$fox" "$(words 'A bird sat.' 40)" "$(words 'A cow slept.' 40)"; do ask_plain "$text"; done
kill -TERM "$pid"
wait "$pid"
ok "all slots are in files at the end" [ "$(find "$tmp/slots" -name '*.session' | wc -l)" -eq 3 ]
newest=$(ls -t "$tmp/slots" | head -n 1)
serve slots -np 1 -c 1024 --session-dir "$tmp/slots" --session-disk 2
kill -TERM "$pid"
wait "$pid"
ok "if files have too little room, the last used one is kept" [ -e "$tmp/slots/$newest" ]

# Prompts that diverge early, continue, and come back: a stored conversation may be evicted just when a prompt is going
# to continue it.
most=1                                                                # so that a session holds only its prompt
for flags in "" "--session-dir $tmp/parts" "--cache-ram 2" "--cache-ram 2 --session-dir $tmp/parts2"; do
    # shellcheck disable=SC2086  # flags are words
    serve parts -np 1 -c 2048 $flags
    differ=0
    for cache in false true true true; do
        k=0
        for text in "$fox" "$(words 'A bird sat.' 130)" "$fox" "$fox $(words 'It rained.' 130)" "$fox $(words 'It was warm.' 80)" \
            "$(words 'A cow slept.' 40)" "$fox" "$(words 'A cow slept.' 40)"; do
            k=$((k + 1))
            ask_plain "$text" ",\"cache_prompt\":$cache"
            [ $cache = true ] || cp "$tmp/plain" "$tmp/alone.$k"
            is 200 && cmp -s "$tmp/alone.$k" "$tmp/plain" || differ=$((differ + 1))
        done
    done
    ok "prompts that part and come back ($flags): the texts of the same alone" [ "$differ" -eq 0 ]
    kill -TERM "$pid"
    wait "$pid"
    status=$?
    ok "and the server ends as always" [ "$status" -eq 0 ]
done

# The ids of a request are used unchanged, even if cached ids have the same text.
ids() { ask /tokenize "{\"content\":\"$1\"}" && grep -oE '\[[0-9,]+\]' "$tmp/out" | tr -d '[]'; }
serve asked -np 1 -c 1024
sentence='There was once a shy fox who lived near a quiet river. Everyone called him Tom.'
whole="2,$(ids "$sentence")" letters=2 rest=$sentence
full="\"messages\":[{\"role\":\"user\",\"content\":\"$(words 'It rained.' 240)\"}],\"max_tokens\":32000"
long_text='{"type":"json_schema","name":"x","schema":{"type":"string","minLength":2000}}'
ask $chat "{$full,\"response_format\":$long_text}"
ok "an answer that fills the context, and may be longer: length" has out '"finish_reason":"length","stop_reason":"context"}'
ok "it has filled it" [ "$(number total_tokens out)" -eq 1025 ]
ask /v1/messages "{$full,\"output_format\":$long_text}"
ok "the same in Anthropic's words" has out '"stop_reason":"model_context_window_exceeded"'
ask /v1/responses "{\"input\":\"$(words 'It rained.' 240)\",\"max_output_tokens\":32000,\"text\":{\"format\":$long_text}}"
ok "and in those of /v1/responses" has out '"status":"incomplete","completed_at":null,"error":null,"incomplete_details":{"reason":"max_output_tokens"},'
while [ -n "$rest" ]; do
    letter=${rest%"${rest#?}"} rest=${rest#?}
    letters="$letters,$(ids "$letter")"
done
n_letters=$(echo "$letters" | tr ',' '\n' | wc -l)
ask /v1/completions "{\"prompt\":[$letters],\"temperature\":0,\"max_tokens\":8,\"cache_prompt\":false}"
text text out >"$tmp/a"
ask /v1/completions "{\"prompt\":[$whole],\"temperature\":0,\"max_tokens\":8}"
ok "token ids are run as they are given" [ "$(number prompt_tokens out)" -eq "$(echo "$whole" | tr ',' '\n' | wc -l)" ]
ask /v1/completions "{\"prompt\":[$letters],\"temperature\":0,\"max_tokens\":8}"
text text out >"$tmp/b"
ok "also others that spell the same" [ "$(number prompt_tokens out)" -eq "$n_letters" ]
ok "with the answer of the same alone" cmp -s "$tmp/a" "$tmp/b"

# Streams have the same logprobs as complete answers: of a call, of a stop string.
timer='"tools":[{"type":"function","function":{"name":"set_timer","parameters":{"type":"object","properties":{"minutes":{"type":"integer"}}}}}],"temperature":0'
wake='{"role":"user","content":"Wake me in 49 minutes."}'
ask $chat "{\"messages\":[$wake],$timer,\"logprobs\":true,\"grammar\":\"root ::= <|tool_call> \\\"call:set_timer{minutes:        49        }\\\" <tool_call|>\"}"
grep -oE '"token":"[^"]*","logprob":[^,]*' "$tmp/out" >"$tmp/a"
ask $chat "{\"messages\":[$wake],$timer,\"logprobs\":true,\"stream\":true,\"grammar\":\"root ::= <|tool_call> \\\"call:set_timer{minutes:        49        }\\\" <tool_call|>\"}" -N
grep -oE '"token":"[^"]*","logprob":[^,]*' "$tmp/out" >"$tmp/b"
ok "a stream has the logprobs of a call" same a b
count='"messages":[{"role":"user","content":"Count from 23 to 33."}],"temperature":0,"logprobs":true'
for stop in '", "' '"24, 25"' '"no such"'; do
    for stream in false true; do
        ask $chat "{$count,\"stop\":$stop,\"max_tokens\":12,\"stream\":$stream}" -N
        grep -oE '"token":"[^"]*","logprob":[^,]*' "$tmp/out" >"$tmp/$stream"
    done
    ok "a stream has the logprobs of the whole answer: stop $stop" same false true
done
kill -TERM "$pid"
wait "$pid"

run serve "$model" --port 0 --session-dir /dev/null
ok "a path that is not a folder is an error" grep -q -e '^gemma4: error: --session-dir: ' "$tmp/err"
(
    ulimit -f 200                                                     # in blocks of 512 bytes or more; simulates a full disk
    exec "$gemma4" serve "$model" --port 0 -t 2 --session-dir "$tmp/full" >/dev/null 2>"$tmp/full.log" </dev/null
) &
pid=$!
pids="$pids $pid"
wait_for_server "$tmp/full.log"
ask_words "$a" a.2
ask_words "$b" b.2
ok "a full disk: answers continue" same b.1 b.2
ok "and the log says so" grep -q 'cannot keep a session\|stays in memory only' "$tmp/full.log"
kill -TERM "$pid"
wait "$pid"
status=$?
ok "and the server ends as always" [ "$status" -eq 0 ]

# ---- two servers behind the nginx of docs/server.md -------------------------------------------
nginx=$(command -v nginx || ls /usr/sbin/nginx 2>/dev/null)
if [ -n "$nginx" ]; then
    serve one
    one=$pid first=$url
    serve two
    two=$pid second=$url
    port=$((20000 + $$ % 20000))
    sed -n '/^```nginx$/,/^```$/p' docs/server.md | grep -v '^```' |
        sed "s#10.0.0.1:8080#${first#http://}#; s#10.0.0.2:8080#${second#http://}#; s#listen 80#listen 127.0.0.1:$port#" >"$tmp/servers.conf"
    mkdir -p "$tmp/nginx"
    paths=$(for p in client_body proxy fastcgi uwsgi scgi; do printf '%s_temp_path %s/nginx/%s; ' "$p" "$tmp" "$p"; done)
    printf 'daemon off; master_process off; pid %s/nginx/pid; error_log stderr; events {}\nhttp { access_log off; %s include %s; }\n' \
        "$tmp" "$paths" "$tmp/servers.conf" >"$tmp/nginx.conf"
    "$nginx" -p "$tmp/nginx" -e stderr -c "$tmp/nginx.conf" 2>"$tmp/nginx.log" &
    proxy=$!
    pids="$pids $proxy"
    url=http://127.0.0.1:$port
    for _ in $(seq 1200); do
        get /health
        is 200 && break
        sleep 0.05
    done
    ok "nginx takes the configuration" is 200
    for k in 1 2 3 4 5 6; do
        ask $chat "{$user,\"temperature\":0,\"max_tokens\":4}" -H "X-Session-Id: $k"
        ask $chat "{$user,\"temperature\":0,\"max_tokens\":40,\"stream\":true}" -N -H "X-Session-Id: $k"
    done
    text content out | sed 's/\\"/"/g; s/\\n/\n/g' >"$tmp/a"
    ok "a stream comes through it" same cli a
    n_one=$(grep -c '"path":"/v1/chat' "$tmp/one.log") n_two=$(grep -c '"path":"/v1/chat' "$tmp/two.log")
    ok "each conversation goes to one server" [ $((n_one + n_two + n_one % 2)) -eq 12 ]
    for k in $(seq 24); do get /props -H "X-Session-Id: $k"; done
    ok "and they are shared out" [ $(($(grep -c '"path":"/props"' "$tmp/one.log") * $(grep -c '"path":"/props"' "$tmp/two.log"))) -gt 0 ]
    kill -TERM "$one"
    wait "$one"
    bad=0
    for k in 1 2 3 4 5 6; do
        ask $chat "{$user,\"temperature\":0,\"max_tokens\":4}" -H "X-Session-Id: $k"
        is 200 || bad=$((bad + 1))
    done
    ok "one that has ended is done without" [ "$bad" -eq 0 ]
    kill "$two" "$proxy"
    wait "$two" "$proxy"
else
    skip "two servers behind nginx: nginx is not installed"
fi

serve other --host 127.0.0.2                                          # Linux has all of 127.0.0.0/8
if [ -n "$url" ]; then
    get /health
    ok "a loopback address of the user's choice may be named" is 200
    get /health -H "Host: 127.0.0.2.example.com"
    ok "and no other with the same prefix" is 403
    kill -TERM "$pid"
    wait "$pid"
fi

# ---- a full queue, a key, the end ----------------------------------------------------------
printf 'secret\n' >"$tmp/key"
serve small --parallel 1 --chunk 64 --queue 1 --timeout 600 --alias "a fox" --api-key-file "$tmp/key" -c 2048
get /health
ok "health needs no key" is 200
get /v1/models -H "x-api-key: secret"
ok "the model has another name" has out '"id":"a fox"'
refused "no key" 401 "key" $chat "{$user}"
refused "no key, an unknown path" 401 "key" /nowhere "{}"
get /
ok "the page needs no key" is 200
ask /tokenize '{"content":"a"}' -H "Authorization: Bearer secret"
ok "the key opens" is 200
ask /tokenize '{"content":"a"}' -H "x-api-key: secrets"
ok "another key does not" is 401
metric() { curl -s -m 600 -H "x-api-key: secret" "$url/metrics" | sed -n "s/^gemma4_$1 //p"; }
for k in 1 2; do
    curl -sS -N -m 600 -o "$tmp/full.$k" -H "x-api-key: secret" --data-binary "$endless,\"stream\":true}" "$url$chat" &
    eval "caller$k=$!"
    [ $k -eq 2 ] || ok "the first one runs" until_metric requests_running 1
done
ok "the second one waits" until_metric requests_waiting 1
ask $chat "{$user}" -H "x-api-key: secret" -D "$tmp/headers"
ok "the third one is refused: 429" is 429
ok "with Retry-After" grep -qi '^Retry-After: ' "$tmp/headers"
kill -9 "$caller2"
wait "$caller2" 2>/dev/null
ok "who leaves the queue is taken out" until_metric requests_waiting 0
kill -TERM "$pid"
for _ in $(seq 1200); do
    get /health
    [ "$code" = 503 ] && break
    sleep 0.05
done
ok "SIGTERM: no new requests" is 503
wait "$caller1"
ok "SIGTERM: the answer under way ends, or is cut after 30 seconds" \
    grep -qE '^data: (\[DONE\]|\{"error":.*shutting down)' "$tmp/full.1"
wait "$pid"
status=$?
ok "SIGTERM: exits 0" [ "$status" -eq 0 ]
ok "no prompt is in the log" lacks small.log "story"
kill -TERM "$main"
wait "$main"
status=$?
ok "the first server is still there, and ends" [ "$status" -eq 0 ]
ok "a line of JSON for each request" grep -q '^{"time":.*"path":"/v1/chat/completions","status":200,' "$tmp/main.log"

finish test_server
