#!/bin/sh
# npm clients drive the server on the small model (tests/clients.mjs), each by a row of tests/rows.mjs; the table of docs/server.md has
# these rows. Nothing is downloaded: the clients must be in build/clients, where .ci/run puts three of them. LONG=1: headless agents too,
# and zod's types, if they are there. TABLE=1 writes the table.
# Environment: GEMMA4 (the binary, ./gemma4), STRICT=1 (skips fail), LONG=1, TABLE=1, CLIENTS (build/clients).
cd "$(dirname "$0")/.." || exit 1
limit_seconds=${LONG:+3600}
. tests/harness.sh

clients=${CLIENTS:-build/clients}
here() { for name in "$@"; do [ -d "$clients/node_modules/$name" ] || return 1; done; }
if ! command -v node >/dev/null 2>&1 || ! here openai @anthropic-ai/sdk ollama; then
    skip "clients: no node, or not: npm install --prefix $clients openai@6 @anthropic-ai/sdk@1 ollama@0.6"
    finish test_clients
    exit
fi
[ -n "$TABLE" ] || ok "docs/server.md has the table of tests/rows.mjs" node tests/table.mjs
serve="--temp 0 ${LONG:+-c 65536}"
drive clients "$clients" ${TABLE:+--table}
if [ -n "$LONG" ] && here zod; then drive zod "$clients"; fi
finish test_clients
