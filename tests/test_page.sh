#!/bin/sh
# The chat page, web/index.html, in a real browser (tests/page.mjs) with the server on the small model. Nothing is downloaded:
# playwright-core and axe-core must be in build/clients, where .ci/run puts them, and the browser is chromium. Pictures go to a
# second server, with a model and an image tower of random weights.
# Environment: GEMMA4 (the binary, ./gemma4), BUILD (build: make_gguf), CC (used if that is not there), STRICT=1 (skips fail).
cd "$(dirname "$0")/.." || exit 1
. tests/harness.sh

ok "the page is ASCII" sh -c '! LC_ALL=C grep -q "[^ -~]" web/index.html'
clients=build/clients
if ! command -v node >/dev/null 2>&1 || ! command -v chromium >/dev/null 2>&1 || [ ! -d $clients/node_modules/playwright-core ] ||
    [ ! -d $clients/node_modules/axe-core ]; then
    skip "the page: no node, no chromium, or not: npm install --prefix $clients playwright-core axe-core"
    finish test_page
    exit
fi
make_gguf=$build/make_gguf
if [ ! -x "$make_gguf" ]; then
    make_gguf=$tmp/make_gguf
    ${CC:-cc} -std=c11 -O2 tests/make_gguf.c -o "$make_gguf" -lm || exit 1
fi
"$make_gguf" --preset micro-dense --vocab 262144 --quant q8_0 --out "$tmp/text.gguf" &&
    "$make_gguf" --preset micro-dense --kind mmproj --quant f32 --out "$tmp/tower.gguf" || exit 1
run serve "$tmp/text.gguf" --host 203.0.113.1 --port 0               # an address that this machine does not have
if grep -q 'libmicrohttpd' "$tmp/err"; then
    skip "the page: this build has no server"
    finish test_page
    exit
fi
printf '\211PNG\r\n\032\n' >"$tmp/cut.png"
run "$tmp/text.gguf" --mmproj "$tmp/tower.gguf" --image "$tmp/cut.png" -p x
if grep -q 'this build cannot read it' "$tmp/err"; then
    skip "pictures in the page: this build has no libpng"
    drive page $clients
    finish test_page
    exit
fi
# shellcheck disable=SC2086  # $limit is several words, or none
$limit "$gemma4" serve "$tmp/text.gguf" --mmproj "$tmp/tower.gguf" --image-tokens 70 --port 0 -t 1 -c 4096 \
    >/dev/null 2>"$tmp/seeing" </dev/null &
seeing=$!
wait_for_server "$tmp/seeing"
drive page $clients "$url"
kill -TERM "$seeing"
wait "$seeing"
status=$?
ok "the server with a tower ends as always" [ "$status" -eq 0 ]
ok "none of its answers was a 5xx" [ "$(grep -c '"status":5' "$tmp/seeing")" -eq 0 ]
finish test_page
