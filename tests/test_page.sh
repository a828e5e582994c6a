#!/bin/sh
# The chat page, web/index.html, in a real browser (tests/page.mjs) with the server on the small model. Nothing is downloaded:
# playwright-core and axe-core must be in build/clients, where .ci/run puts them, and the browser is chromium.
# Environment: GEMMA4 (the binary, ./gemma4), STRICT=1 (skips fail).
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
drive page $clients
finish test_page
