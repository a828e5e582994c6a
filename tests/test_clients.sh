#!/bin/sh
# The official npm clients of OpenAI and Anthropic drive the server on the small model (tests/clients.mjs). Nothing is downloaded
# here: they have to be in build/clients, where .ci/run puts them.
# Environment: GEMMA4 (the binary, ./gemma4), STRICT=1 (skips fail).
cd "$(dirname "$0")/.." || exit 1
model=models/gemma4-mini-q8_0.gguf
. tests/harness.sh

clients=build/clients
if ! command -v node >/dev/null 2>&1 || [ ! -d $clients/node_modules/openai ] || [ ! -d $clients/node_modules/@anthropic-ai/sdk ]; then
    skip "clients: no node, or not: npm install --prefix $clients openai@6 @anthropic-ai/sdk@1"
    finish test_clients
    exit
fi
run serve "$model" --host 203.0.113.1 --port 0
if grep -q 'libmicrohttpd' "$tmp/err"; then
    skip "clients: this build has no server"
    finish test_clients
    exit
fi
"$gemma4" serve "$model" --port 0 -t 2 -np 2 --api-key secret >/dev/null 2>"$tmp/log" </dev/null &
pid=$!
trap 'kill -9 $pid 2>/dev/null; rm -rf "$tmp"' EXIT
for _ in $(seq 200); do
    grep -q '^# serving at ' "$tmp/log" && break
    sleep 0.05
done
$limit node tests/clients.mjs "$(sed -n 's/^# serving at //p' "$tmp/log")" secret $clients >"$tmp/out" 2>&1
grep -v '^# clients: ' "$tmp/out"
passed=$(sed -n 's/^# clients: \([0-9]*\) passed.*/\1/p' "$tmp/out") failed=$(sed -n 's/^# clients: .* \([0-9]*\) failed$/\1/p' "$tmp/out")
passed=${passed:-0} failed=${failed:-1}
kill -TERM "$pid"
wait "$pid"
status=$?
ok "the server ends as always" [ "$status" -eq 0 ]
ok "no answer was a 5xx" [ "$(grep -c '"status":5' "$tmp/log")" -eq 0 ]
finish test_clients
