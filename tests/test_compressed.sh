#!/bin/sh
# serve --compress: long prompts are compressed, and every answer says so; the next turns of a conversation find in the cache what the
# model was shown; answers do not depend on others that run at the same time; prompts that are too long are refused.
cd "$(dirname "$0")/.." || exit 1
. tests/harness.sh
mini=models/gemma4-mini-q8_0.gguf
run serve $mini --host 203.0.113.1 --port 0
if grep -q 'libmicrohttpd' "$tmp/err"; then
    skip "this build has no server"
    finish "compressed prompts"
    exit
fi
start() { # start FLAGS...: a server; sets $url and $pid
    : >"$tmp/log"
    "$gemma4" serve $mini --port 0 -np 2 -c 1024 --temp 0 --compress 0.3 --compress-from 200 "$@" >/dev/null 2>"$tmp/log" </dev/null &
    pid=$!
    trap 'kill -9 $pid 2>/dev/null; rm -rf "$tmp"' EXIT
    wait_for_server "$tmp/log"
}
stop() {
    kill -TERM $pid
    wait $pid
    status=$?
    ok "$1: the server ends as always" [ "$status" -eq 0 ]
}
ask() { # ask FILE BODY [PATH]: an answer; its head is in FILE.head
    curl -s -m 300 -D "$1.head" -o "$1" "$url${3:-/v1/chat/completions}" -H 'Content-Type: application/json' -d "$2"
}
number() { # number FILE NAME: the first number of that name in an answer
    grep -o "\"$2\":[0-9.e+-]*" "$1" | head -n 1 | sed 's/.*://'
}
text() { grep -o '"content":"[^"]*"' "$1" | head -n 1; }
metric() { curl -s -m 60 "$url/metrics" | sed -n "s/^gemma4_$1 //p"; }
long=$(i=0; while [ $i -lt 90 ]; do printf 'The fox ran to house %d. ' $i; i=$((i + 1)); done)
system='{"role":"system","content":"You are a helpful assistant."}'
first="$system,{\"role\":\"user\",\"content\":\"$long Where did the fox run?\"}"
body() { printf '{"messages":[%s],"max_tokens":12%s}' "$1" "$2"; }
short="$(body '{"role":"user","content":"Count from 5 to 30."}' '')"

start -md models/gemma4-mini-dflash-q8_0.gguf --spec dflash
ok "the log says what is compressed" grep -q '^# prompts of 200 tokens and more are compressed to 0.3 (lossy); at most 1024 tokens are read$' "$tmp/log"
ask "$tmp/short" "$short"
ok "a short prompt stays as it is" [ -z "$(number "$tmp/short" original_tokens)" ]
ok "and there is no warning" sh -c "! grep -qi '^x-gemma4-warning' '$tmp/short.head'"
steps=$(number "$tmp/short" tokens_per_step)
ok "tokens per step of drafts: $steps" sh -c "echo '$steps' | awk '{ exit !(\$1 > 1.5 && \$1 <= 16) }'"
ok "/metrics counts steps and drafts" [ "$(metric steps_total)" -gt 0 ]
ok "/metrics counts accepted drafts" [ "$(metric draft_tokens_accepted_total)" -gt 0 ]

ask "$tmp/one" "$(body "$first" '')"
before=$(number "$tmp/one" original_tokens) shown=$(number "$tmp/one" prompt_tokens)
ok "a long prompt: about 0.3 of $before tokens are shown, $shown" [ $((10 * shown)) -gt $((2 * before)) ]
ok "a long prompt: less than half of it" [ $((2 * shown)) -lt "$before" ]
ok "timings: the prompt's tokens" [ "$(number "$tmp/one" prompt_original_n)" = "$before" ]
ok "timings: scoring is part of the prompt's time" sh -c \
    "echo '$(number "$tmp/one" prompt_score_ms) $(number "$tmp/one" prompt_ms)' | awk '{ exit !(\$1 > 0 && \$1 < \$2) }'"
ok "a warning says so" grep -qi "^x-gemma4-warning: the prompt was compressed (lossy): the model was shown $shown of $before tokens" "$tmp/one.head"
ok "/metrics: tokens left out" [ "$(metric prompt_tokens_left_out_total)" -eq $((before - shown)) ]
ask "$tmp/again" "$(body "$first" '')"
ok "again: the same text" [ "$(text "$tmp/again")" = "$(text "$tmp/one")" ]
ok "again: from the cache" [ "$(number "$tmp/again" cached_tokens)" -ge $((shown - 16)) ]
ok "again: nothing is scored" [ "$(number "$tmp/again" prompt_score_ms)" = 0 ]

second="$first,{\"role\":\"assistant\",\"content\":\"The fox ran far.\"},{\"role\":\"user\",\"content\":\"Tell me more.\"}"
ask "$tmp/two" "$(body "$second" '')"
ok "the next turn: what the model was shown is in the cache" [ "$(number "$tmp/two" cached_tokens)" -ge $((shown - 16)) ]
ok "the next turn: it is shown a little more" [ "$(number "$tmp/two" prompt_tokens)" -lt $((shown + 40)) ]
ok "the next turn: nothing is scored" [ "$(number "$tmp/two" prompt_score_ms)" = 0 ]
ask "$tmp/stream" "$(body "$first" ',"stream":true,"stream_options":{"include_usage":true}')"
ok "a stream: usage says so" [ "$(number "$tmp/stream" original_tokens)" = "$before" ]

# Two at a time, one of them with a prompt that is compressed.
other="$system,{\"role\":\"user\",\"content\":\"Read this. $long Where did the fox run?\"}"
ask "$tmp/alone" "$(body "$other" ',"cache_prompt":false')"
ask "$tmp/a" "$(body '{"role":"user","content":"Count from 5 to 30."}' ',"n":2')" &
ask "$tmp/b" "$(body "$other" ',"cache_prompt":false')"
wait $!
ok "at the same time: the text of the long prompt" [ "$(text "$tmp/b")" = "$(text "$tmp/alone")" ]
ok "at the same time: the text of the short one" [ "$(text "$tmp/a")" = "$(text "$tmp/short")" ]

ask "$tmp/raw" "{\"prompt\":\"$long\",\"max_tokens\":4,\"temperature\":0}" /v1/completions
ok "a text: compressed" [ "$(number "$tmp/raw" original_tokens)" -gt 800 ]
ask "$tmp/ids" "{\"prompt\":[2,$(yes 300 | head -n 300 | paste -sd, -)],\"max_tokens\":4,\"temperature\":0}" /v1/completions
ok "token ids: never" sh -c "[ -z '$(number "$tmp/ids" original_tokens)' ] && [ '$(number "$tmp/ids" prompt_tokens)' = 301 ]"
ask "$tmp/long" "$(body "{\"role\":\"user\",\"content\":\"$long $long\"}" '')"
ok "a prompt that does not fit the context to be scored: refused" grep -q 'context_length_exceeded' "$tmp/long"
stop "without a scorer"

start --scorer models/gemma4-mini-e-q8_0.gguf
ok "a scorer: prompts may be longer than the context" grep -q 'at most 4096 tokens are read$' "$tmp/log"
ask "$tmp/long" "$(body "{\"role\":\"user\",\"content\":\"$long $long\"}" '')"
ok "a scorer: a longer prompt is answered" [ "$(number "$tmp/long" original_tokens)" -gt 1600 ]
ok "a scorer: it was shown what fits" [ "$(number "$tmp/long" prompt_tokens)" -le 1024 ]
ask "$tmp/longer" "$(body "{\"role\":\"user\",\"content\":\"$long $long $long $long $long\"}" '')"
ok "a scorer: a prompt that is too long when it is compressed: refused" grep -q 'has [0-9]* when it is compressed.*context_length_exceeded' "$tmp/longer"
ask "$tmp/longer" "$(body "{\"role\":\"user\",\"content\":\"$long $long $long $long $long $long\"}" '')"
ok "a scorer: a prompt beyond its room: refused" grep -q 'maximum context length is 4096 tokens.*context_length_exceeded' "$tmp/longer"
stop "with a scorer"
run serve $mini --port 0 --compress-from 300
ok "--compress-from alone is refused" grep -q -e '--compress-from needs --compress' "$tmp/err"
finish "compressed prompts"
