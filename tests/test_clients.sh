#!/bin/sh
# The official npm clients of OpenAI and Anthropic drive the server on the small model (tests/clients.mjs). Nothing is
# downloaded: the clients must be in build/clients, where .ci/run puts them.
# Environment: GEMMA4 (the binary, ./gemma4), STRICT=1 (skips fail).
cd "$(dirname "$0")/.." || exit 1
. tests/harness.sh

clients=build/clients
if ! command -v node >/dev/null 2>&1 || [ ! -d $clients/node_modules/openai ] || [ ! -d $clients/node_modules/@anthropic-ai/sdk ]; then
    skip "clients: no node, or not: npm install --prefix $clients openai@6 @anthropic-ai/sdk@1"
    finish test_clients
    exit
fi
drive clients $clients
finish test_clients
