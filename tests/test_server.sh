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
get /props
ok "props report the sessions" has out '"total_slots":3'
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
ok "byte for byte" cmp -s web/index.html "$tmp/out"
tr -d '\r' <"$tmp/headers" >"$tmp/a"
for line in "Content-Type: text/html; charset=utf-8" "X-Content-Type-Options: nosniff" "Referrer-Policy: no-referrer" "Cache-Control: no-cache"; do
    ok "the page: $line" grep -qix "$line" "$tmp/a"
done
ok "the page: nothing but its own server" grep -qi "^Content-Security-Policy: default-src 'none'; .*connect-src 'self';" "$tmp/a"
tag=$(sed -n 's/^[Ee][Tt]ag: //p' "$tmp/a")
get /index.html -H "If-None-Match: $tag"
ok "the page: 304 for a client that has it" is 304
get /index.html -H 'If-None-Match: "0"'
ok "the page: whole for a client that has another version" cmp -s web/index.html "$tmp/out"
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
ok "which is cut" has out '"finish_reason":"length"'
ok "usage counts" has out '"completion_tokens":40'
ok "timings are reported" has out '"predicted_per_second":'
ask $chat "{$user,\"temperature\":0,\"max_tokens\":40,\"stream\":true,\"stream_options\":{\"include_usage\":true}}" -N
text content out | sed 's/\\"/"/g; s/\\n/\n/g' >"$tmp/streamed"
ok "a stream has the same text" same plain streamed
ok "it ends in [DONE]" [ "$(grep -c '^data: \[DONE\]$' "$tmp/out")" -eq 1 ]
ok "and reports the usage" has out '"choices":[],"usage":{"prompt_tokens":21'
ok "of which most was cached" [ "$(number cached_tokens out)" -eq 20 ]
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
ok "a stop string ends it" has out '"finish_reason":"stop"'
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
for field in '"thinking":"on"' '"metadata":1' '"tool_choice":"auto"' '"output_format":5' \
    '"tools":[{"type":"web_search_20250305","name":"web_search"}]'; do
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
refused "/v1/responses: a tool that is not a function" 400 "tools" /v1/responses "{$fox,\"tools\":[{\"type\":\"custom\",\"name\":\"x\"}]}"
refused "/v1/responses: nothing is kept" 400 "previous_response_id" /v1/responses "{$fox,\"previous_response_id\":\"x\"}"

# ---- constrained answers: only one text is possible, for any model ---------------------------------------
says() { # says NAME KEY TEXT: the strings with that key are this text, except for spaces after colons
    text "$2" out | sed 's/: /:/g' >"$tmp/said"
    ok "$1" [ "$(cat "$tmp/said")" = "$3" ]
}
count_is() { [ "$(grep -oF -e "$2" "$tmp/out" | wc -l)" -eq "$1" ]; }
one_city='{"type":"object","properties":{"city":{"enum":["Paris"]}},"required":["city"],"additionalProperties":false}'
city='{\"city\":\"Paris\"}'
other_city='{"type":"object","properties":{"city":{"not":{}}}}'
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
ok "it is named by its place" has out 'schema: #/properties/city/not: '
ask /v1/messages "{$short,\"output_format\":{\"type\":\"json_schema\",\"schema\":$other_city}}"
ok "/v1/messages: a schema that is not understood: 400" is 400
ok "/v1/messages: it is named by its place" has out 'schema: #/properties/city/not: '
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

# ---- errors: 4xx with a reason; the server keeps running ----------------------------------
refused "an unknown path" 404 "endpoint" /v1/images "{}"
get $chat
ok "GET instead of POST: 405" is 405
refused "invalid JSON" 400 "not JSON" $chat "hello"
refused "not an object" 400 "object" $chat "[1]"
refused "no messages" 400 "messages" $chat "{}"
refused "empty messages" 400 "messages" $chat '{"messages":[]}'
refused "n 2" 400 '"param":"n"' $chat "{$user,\"n\":2}"
refused "an image" 400 "image" $chat '{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]}'
refused "audio" 400 "audio" $chat "{$user,\"modalities\":[\"text\",\"audio\"],\"audio\":{}}"
refused "a wrong type" 400 "temperature" $chat "{$user,\"temperature\":\"hot\"}"
refused "out of range" 400 "top_p" $chat "{$user,\"top_p\":2}"
refused "not an integer" 400 "max_tokens" $chat "{$user,\"max_tokens\":1.5}"
refused "an empty stop" 400 "stop" $chat "{$user,\"stop\":[\"\"]}"
refused "a bias out of range" 400 "logit_bias" $chat "{$user,\"logit_bias\":{\"999999\":1}}"
refused "a sampler that is not there" 400 "xtc_probability" $chat "{$user,\"xtc_probability\":0.5}"
refused "an unknown role" 400 "role" $chat '{"messages":[{"role":"wizard","content":"a"}]}'
refused "a result without its call" 400 "tool_calls" $chat '{"messages":[{"role":"user","content":"a"},{"role":"tool","content":"a"}]}'
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
refused "logprobs 1 instead of true" 400 "true or false" $chat "{$user,\"logprobs\":1}"
refused "ids out of range" 400 "prompt[1]" /v1/completions '{"prompt":[2,4096]}'
refused "two prompts" 400 "several" /v1/completions '{"prompt":["a","b"]}'
refused "no tokens" 400 "tokens" /detokenize "{}"
yes "word" | head -n 9000 | tr '\n' ' ' | sed 's/.*/{"prompt":"&"}/' >"$tmp/long"
ask /v1/completions "@$tmp/long"
ok "a prompt that is too long: 400" is 400
ok "with the code that clients know" has out '"code":"context_length_exceeded"'
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
chunks=$(grep -c '"prompt_progress"' "$tmp/out")
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
ok "and the same chunks" [ "$(grep -c '"prompt_progress"' "$tmp/out")" -eq "$chunks" ]
ok "between which the answer continued: $before, then $after" [ $((after - before)) -ge $((5 * chunks)) ]

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
    ok "a stream comes through it" same plain a
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
serve small --parallel 1 --chunk 64 --queue 1 --timeout 600 --alias "a fox" --api-key-file "$tmp/key" -c 4096
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
