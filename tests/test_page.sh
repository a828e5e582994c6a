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
drive page
finish test_page
