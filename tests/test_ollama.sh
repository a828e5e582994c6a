#!/bin/sh
# Ollama's API with curl, on the small model: the requests that its clients send, and the answers that they read.
# Environment: GEMMA4 (the binary, ./gemma4), STRICT=1 (skips fail).
cd "$(dirname "$0")/.." || exit 1
model=models/gemma4-mini-q8_0.gguf
. tests/harness.sh

run serve "$model" --host 203.0.113.1 --port 0                       # an address that this machine does not have
if ! command -v curl >/dev/null 2>&1 || grep -q 'libmicrohttpd' "$tmp/err"; then
    skip "Ollama's API: curl or libmicrohttpd is not here"
    finish test_ollama
    exit
fi
"$gemma4" serve "$model" --port 0 -t 2 -np 2 >/dev/null 2>"$tmp/log" </dev/null &
pid=$!
trap 'kill -9 $pid 2>/dev/null; rm -rf "$tmp"' EXIT
wait_for_server "$tmp/log"

ask() { # ask PATH BODY [CURL FLAGS...]: writes the response to $tmp/out, its headers to $tmp/headers; sets $code
    path=$1 body=$2
    shift 2
    code=$(curl -sS -m 300 -D "$tmp/headers" -o "$tmp/out" -w '%{http_code}' "$@" --data-binary "$body" "$url$path" 2>"$tmp/err")
}
get() { # get PATH [CURL FLAGS...]
    path=$1
    shift
    code=$(curl -sS -m 300 -D "$tmp/headers" -o "$tmp/out" -w '%{http_code}' "$@" "$url$path" 2>"$tmp/err")
}
is() { [ "$code" = "$1" ]; }
has() { grep -qF -e "$1" "$tmp/out"; }
lacks() { ! has "$1"; }
header() { tr -d '\r' <"$tmp/headers" | grep -qix "$1"; }
text() { # text KEY: the strings of that key in $tmp/out, joined
    grep -oE "\"$1\":\"([^\"\\\\]|\\\\.)*\"" "$tmp/out" | sed -E "s/^\"$1\":\"//; s/\"\$//" | tr -d '\n'
}
number() { grep -oE "\"$1\":[-0-9.e+]+" "$tmp/out" | tail -n 1 | sed 's/.*://'; }        # the last one with that key
lines() { wc -l <"$tmp/out" | tr -d ' '; }
equal() { [ -n "$1" ] && [ "$1" = "$2" ]; }
positive() { [ "${1:-0}" -gt 0 ] 2>/dev/null; }
refused() { # refused NAME STATUS WORD PATH BODY [CURL FLAGS...]: must be {"error":".."} that contains WORD
    name=$1 want=$2 word=$3
    shift 3
    ask "$@"
    ok "$name: status $want" is "$want"
    ok "$name: names '$word'" has "$word"
    ok "$name: is an error of Ollama's form" grep -qE '^\{"error":"([^"\\]|\\.)*"\}$' "$tmp/out"
}
story='{"role":"user","content":"Tell me a story about a fox."}'
greedy='"options":{"temperature":0,"num_predict":12}'

# ---- what clients ask first ----------------------------------------------------------
get / -I
ok "HEAD / is 200" is 200
get /api/version
ok "version: three numbers" grep -qE '^\{"version":"[0-9]+\.[0-9]+\.[0-9]+"\}$' "$tmp/out"
get /api/tags
ok "tags: the model, with a tag" has '{"models":[{"name":"gemma4-mini-q8_0:latest","model":"gemma4-mini-q8_0:latest","size":77'
ok "tags: a digest of 64 digits" grep -qE '"digest":"[0-9a-f]{64}"' "$tmp/out"
ok "tags: its details" has '"details":{"parent_model":"","format":"gguf","family":"gemma4","families":["gemma4"],"parameter_size":"7.21M","quantization_level":"Q8_0"}'
ok "tags: a time" grep -qE '"modified_at":"20[0-9-]{8}T[0-9:]{8}\.[0-9]{6}Z"' "$tmp/out"
get /api/ps
ok "ps: the model is loaded, with its context" has '"context_length":8192'
ok "ps: in no GPU" has '"size_vram":0,'
for name in '"model":"gemma4-mini-q8_0"' '"model":"gemma4-mini-q8_0:latest"' '"name":"gemma4-mini-q8_0"'; do
    ask /api/show "{$name}"
    ok "show $name: what it can do" has '"capabilities":["completion","tools","thinking"]'
done
ok "show: its architecture and context" has '"general.architecture":"gemma4"'
ok "show: the context of this server" has '"gemma4.context_length":8192'
ok "show: parameters" has '"parameters":"num_ctx 8192\ntemperature 1\ntop_k 64\ntop_p 0.95\nmin_p 0\n"'
ok "show: details, modelfile, template" grep -q '"modelfile":"FROM .*"template":".*"details":{' "$tmp/out"
refused "show another model" 404 "model 'llama3' not found" /api/show '{"model":"llama3"}'
refused "show nothing" 400 "model" /api/show '{}'

# ---- the same text as elsewhere --------------------------------------------------------
ask /v1/chat/completions "{\"messages\":[$story],\"temperature\":0,\"max_tokens\":12}"
want=$(text content) prompt=$(number prompt_tokens)
ok "there is a text to compare with" [ -n "$want" ]
ask /api/chat "{\"model\":\"any\",\"messages\":[$story],$greedy}"
ok "chat: a stream by default" header 'content-type: application/x-ndjson'
ok "chat: the text" equal "$(text content)" "$want"
ok "chat: each line is an object" [ "$(grep -c '^{"model":"gemma4-mini-q8_0:latest","created_at":"20.*,"message":{"role":"assistant",.*}$' "$tmp/out")" = "$(lines)" ]
ok "chat: one line is the last" [ "$(grep -c '"done":true' "$tmp/out")" = 1 ]
tail -n 1 "$tmp/out" >"$tmp/last"
ok "chat: it says why" grep -q '"message":{"role":"assistant","content":""},"done":true,"done_reason":"length",' "$tmp/last"
ok "chat: it counts tokens" [ "$(number eval_count) $(number prompt_eval_count)" = "12 $prompt" ]
for key in total_duration load_duration prompt_eval_duration eval_duration; do ok "chat: $key" positive "$(number $key)"; done
ok "chat: the parts are not longer than the whole" \
    [ "$(number total_duration)" -ge $(($(number prompt_eval_duration) + $(number eval_duration))) ]
ask /api/chat "{\"messages\":[$story],\"stream\":false,$greedy}"
ok "chat, whole: JSON" header 'content-type: application/json'
ok "chat, whole: the text" equal "$(text content)" "$want"
ask /api/generate "{\"prompt\":\"Tell me a story about a fox.\",$greedy}"
ok "generate: the text" equal "$(text response)" "$want"
ok "generate: a last line" [ "$(grep -c '"response":"","context":\[.*\],"done":true,"done_reason":"length",' "$tmp/out")" = 1 ]
ask /api/generate "{\"prompt\":\"Tell me a story about a fox.\",\"stream\":false,\"system\":\"\",\"template\":\"\",\"suffix\":\"\",$greedy}"
ok "generate, whole: the text" equal "$(text response)" "$want"
context=$(sed 's/.*"context":\(\[[0-9,]*\]\).*/\1/' "$tmp/out")
ask /api/chat "{\"messages\":[$story,{\"role\":\"assistant\",\"content\":\"$want\"},{\"role\":\"user\",\"content\":\"And then?\"}],$greedy}"
next=$(text content) prompt=$(number prompt_eval_count)
ask /api/generate "{\"prompt\":\"And then?\",\"context\":$context,$greedy}"
ok "generate: context is the conversation so far" [ "$(text response) $(number prompt_eval_count)" = "$next $prompt" ]
ask /api/chat "{\"messages\":[{\"role\":\"system\",\"content\":\"Be brief.\"},$story],$greedy}"
next=$(text content) prompt=$(number prompt_eval_count)
ask /api/generate "{\"prompt\":\"Tell me a story about a fox.\",\"system\":\"Be brief.\",$greedy}"
ok "generate: system" [ "$(text response) $(number prompt_eval_count)" = "$next $prompt" ]
ask /apply-template "{\"messages\":[$story]}"
n=$(number n_tokens)
ask /api/generate "{\"raw\":true,\"prompt\":\"$(text prompt)\",$greedy}"
ok "generate, raw: the marks of the template count" [ "$(text response) $(number prompt_eval_count)" = "$want $n" ]
ok "generate, raw: no context" lacks '"context"'
ask /api/chat "{\"messages\":[$story,{\"role\":\"assistant\",\"content\":\"Once upon a time, there was\"}],\"stream\":false,$greedy}"
ok "an answer that was begun goes on" [ -n "$(text content)" ]
ok "and is not begun again" lacks '"content":"Once'

# ---- options, thoughts, formats --------------------------------------------------------
ask /api/chat "{\"messages\":[$story],\"stream\":false,\"options\":{\"temperature\":0,\"num_predict\":-1,\"stop\":[\" fox\"],\"seed\":1,\"top_k\":5,\"top_p\":0.5,\"min_p\":0.1,\"repeat_penalty\":1,\"presence_penalty\":0,\"frequency_penalty\":0,\"num_ctx\":4096}}"
ok "stop ends it" [ "$(text content)|$(text done_reason)" = "${want%% fox*}|stop" ]
ok "no warning of options that have their effect" sh -c "! grep -qi '^x-gemma4-warning' '$tmp/headers'"
ask /api/chat "{\"messages\":[$story],\"stream\":false,\"temperature\":0,\"options\":{\"num_predict\":1,\"num_ctx\":9000,\"mirostat\":1,\"num_gpu\":null}}"
ok "a warning names options without effect" header \
    'x-gemma4-warning: temperature: left out; options.num_ctx: the context has 8192 tokens; options.mirostat: left out'
ask /api/chat "{\"messages\":[$story],\"think\":true,\"options\":{\"temperature\":0,\"num_predict\":60}}"
ok "think: thoughts come first" [ -n "$(text thinking)" ]
ok "think: then the text" grep -q '"content":"Once' "$tmp/out"
thought=$(text thinking)
ask /api/generate "{\"prompt\":\"Tell me a story about a fox.\",\"stream\":false,\"think\":\"high\",\"options\":{\"temperature\":0,\"num_predict\":60}}"
ok "think, generate: the same thought" equal "$(text thinking)" "$thought"
schema='{"type":"object","properties":{"city":{"enum":["Paris"]}},"required":["city"],"additionalProperties":false}'
ask /api/chat "{\"messages\":[$story],\"stream\":false,\"format\":$schema}"
ok "format: a schema" has '"content":"{\"city\": \"Paris\"}"'
ask /api/generate "{\"prompt\":\"a\",\"stream\":false,\"format\":\"json\",\"options\":{\"num_predict\":1,\"temperature\":0}}"
ok "format: json" has '"response":"{'
ask /api/chat "{\"messages\":[$story],\"stream\":false,\"format\":\"\",\"logprobs\":true,\"top_logprobs\":2,\"options\":{\"temperature\":0,\"num_predict\":2}}"
ok "logprobs" grep -qE '"logprobs":\[\{"id":[0-9]+,"token":"Once","logprob":-0.*"top_logprobs":\[\{.*\},\{.*\}\]\},\{.*\}\],"done":true' "$tmp/out"

# ---- tools -------------------------------------------------------------------------------
tools='"tools":[{"type":"function","function":{"name":"get_weather","description":"Weather of a city","parameters":{"type":"object","properties":{"city":{"type":"string"}},"required":["city"]}}}]'
asked='{"role":"user","content":"What is the weather in Paris?"}'
call='"function":{"index":0,"name":"get_weather","arguments":{"city":"Paris"}}'
ask /api/chat "{\"messages\":[$asked],$tools,\"options\":{\"temperature\":0}}"
ok "a call, whose arguments are an object" has "$call}]},\"done\":false}"
ok "it has an id" grep -q '"tool_calls":\[{"id":"call_[0-9a-f]*","function"' "$tmp/out"
ok "the reason is stop" has '"done":true,"done_reason":"stop"'
ask /api/chat "{\"messages\":[$asked],$tools,\"stream\":false,\"options\":{\"temperature\":0}}"
ok "a call, whole" has "$call}]},\"done\":true"
ask /v1/chat/completions "{\"messages\":[$asked,{\"role\":\"assistant\",\"tool_calls\":[{\"id\":\"a\",\"type\":\"function\",\"function\":{\"name\":\"get_weather\",\"arguments\":\"{\\\"city\\\":\\\"Paris\\\"}\"}},{\"id\":\"b\",\"type\":\"function\",\"function\":{\"name\":\"get_time\",\"arguments\":\"{}\"}}]},{\"role\":\"tool\",\"tool_call_id\":\"b\",\"content\":\"noon\"},{\"role\":\"tool\",\"tool_call_id\":\"a\",\"content\":\"sunny\"}],$tools,\"temperature\":0,\"max_tokens\":12}"
want=$(text content) prompt=$(number prompt_tokens)
both="{\"role\":\"assistant\",\"content\":\"\",\"tool_calls\":[{\"function\":{\"name\":\"get_weather\",\"arguments\":{\"city\":\"Paris\"}}},{\"function\":{\"name\":\"get_time\",\"arguments\":{}}}]}"
ask /api/chat "{\"messages\":[$asked,$both,{\"role\":\"tool\",\"tool_name\":\"get_time\",\"content\":\"noon\"},{\"role\":\"tool\",\"content\":\"sunny\"}],$tools,$greedy}"
ok "results by name and by place" [ "$(text content) $(number prompt_eval_count)" = "$want $prompt" ]
ask /api/chat "{\"messages\":[$asked,$(echo "$both" | sed 's/{"function":{"name":"get_time"/{"id":"t","function":{"name":"get_time"/'),{\"role\":\"tool\",\"tool_call_id\":\"t\",\"content\":\"noon\"},{\"role\":\"tool\",\"tool_call_id\":\"u\",\"content\":\"sunny\"}],$tools,$greedy}"
ok "results by id, and one whose id no call has" [ "$(text content) $(number prompt_eval_count)" = "$want $prompt" ]

# ---- load, unload, errors ----------------------------------------------------------------
ask /api/generate '{"model":"gemma4-mini-q8_0"}'
ok "no prompt: loaded" grep -q '"response":"","done":true,"done_reason":"load"}$' "$tmp/out"
ask /api/chat '{"model":"gemma4-mini-q8_0","messages":[],"keep_alive":0}'
ok "keep_alive 0: unloaded" grep -q '"message":{"role":"assistant","content":""},"done":true,"done_reason":"unload"}$' "$tmp/out"
refused "not JSON" 400 "JSON" /api/chat '{"messages":'
refused "no role" 400 'messages[0].role' /api/chat '{"messages":[{"content":"a"}]}'
refused "an image" 400 'messages[0].images' /api/chat '{"messages":[{"role":"user","content":"a","images":["aGk="]}]}'
refused "an image in a prompt" 400 'images' /api/generate '{"prompt":"a","images":["aGk="]}'
refused "suffix" 400 "does not support insert" /api/generate '{"prompt":"a","suffix":"b"}'
refused "template" 400 "template" /api/generate '{"prompt":"a","template":"b"}'
refused "raw with a system prompt" 400 "raw mode" /api/generate '{"prompt":"a","raw":true,"system":"b"}'
refused "context that is no token" 400 "context[1]" /api/generate '{"prompt":"a","context":[2,4096]}'
refused "format xml" 400 "format" /api/chat "{\"messages\":[$story],\"format\":\"xml\"}"
refused "think maybe" 400 "think" /api/chat "{\"messages\":[$story],\"think\":\"maybe\"}"
refused "temperature hot" 400 "temperature" /api/chat "{\"messages\":[$story],\"options\":{\"temperature\":\"hot\"}}"
refused "num_predict many" 400 "options.num_predict" /api/chat "{\"messages\":[$story],\"options\":{\"num_predict\":\"many\"}}"
refused "options in a list" 400 "options" /api/chat "{\"messages\":[$story],\"options\":[1]}"
refused "stream maybe" 400 "stream" /api/chat "{\"messages\":[$story],\"stream\":\"maybe\"}"
refused "a prompt that is too long" 400 "8192" /api/generate "{\"prompt\":\"$(yes word | head -n 9000 | tr '\n' ' ')\"}"
refused "embed" 400 "does not support embeddings" /api/embed '{"model":"m","input":"a"}'
refused "embeddings" 400 "does not support embeddings" /api/embeddings '{"model":"m","prompt":"a"}'
for verb in pull push create copy; do refused "$verb" 400 "$verb is not supported" /api/$verb '{"model":"m"}'; done
refused "delete" 400 "delete is not supported" /api/delete '{"model":"m"}' -X DELETE
refused "an unknown path" 404 "/api/blobs/sha256:0" /api/blobs/sha256:0 '' -X POST
refused "another method" 405 "GET" /api/tags '{}'
refused "another Host" 403 "Host" /api/chat '{}' -H 'Host: example.com'

# ---- what known clients send, field by field ------------------------------------------------
ask /api/chat "{\"model\":\"gemma4-mini-q8_0:latest\",\"messages\":[{\"role\":\"user\",\"content\":\"Hi\",\"images\":[]}],\"options\":{\"num_predict\":4,\"num_ctx\":2048},\"format\":\"\",\"keep_alive\":\"5m\",\"stream\":true,\"tools\":[]}"
ok "Open WebUI" has '"done":true'
ask /api/chat '{"model":"m","messages":[{"role":"user","content":"Hi","images":null,"tool_calls":null}],"format":null,"keep_alive":"5m","think":null,"options":{"num_predict":4,"num_keep":null,"stop":null},"stream":true}'
ok "Page Assist, LangChain" has '"done":true'
ask /api/chat '{"model":"m","messages":[{"role":"user","content":"Hi"}],"format":"","options":{"num_predict":4},"truncate":true,"shift":true}'
ok "ollama run" has '"done":true'
kill -TERM "$pid"
wait "$pid"
status=$?
ok "the server ends as always" [ "$status" -eq 0 ]
ok "no answer was a 5xx" [ "$(grep -c '"status":5' "$tmp/log")" -eq 0 ]
finish test_ollama
