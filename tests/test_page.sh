#!/bin/sh
# The script of web/index.html in node, without a browser (tests/page.mjs), and with the server on the small model.
# Environment: GEMMA4 (the binary, ./gemma4), STRICT=1 (skips fail).
cd "$(dirname "$0")/.." || exit 1
. tests/harness.sh

ok "the page is ASCII" sh -c '! LC_ALL=C grep -q "[^ -~]" web/index.html'
if ! command -v node >/dev/null 2>&1; then
    skip "the page's script: node is not here"
    finish test_page
    exit
fi
run serve models/gemma4-mini-q8_0.gguf --host 203.0.113.1 --port 0
if grep -q 'libmicrohttpd' "$tmp/err"; then
    skip "the page's script: this build has no server"
    finish test_page
    exit
fi
"$gemma4" serve models/gemma4-mini-q8_0.gguf --port 0 -t 2 --api-key secret >/dev/null 2>"$tmp/log" </dev/null &
pid=$!
trap 'kill -9 $pid 2>/dev/null; rm -rf "$tmp"' EXIT
for _ in $(seq 200); do
    grep -q '^# serving at ' "$tmp/log" && break
    sleep 0.05
done
$limit node tests/page.mjs "$(sed -n 's/^# serving at //p' "$tmp/log")" secret >"$tmp/out" 2>&1
grep -v '^# page: ' "$tmp/out"
p=$(sed -n 's/^# page: \([0-9]*\) passed.*/\1/p' "$tmp/out") f=$(sed -n 's/^# page: .* \([0-9]*\) failed$/\1/p' "$tmp/out")
passed=$((passed + ${p:-0})) failed=$((failed + ${f:-1}))
kill -TERM "$pid"
wait "$pid"
finish test_page
