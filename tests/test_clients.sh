#!/bin/sh
# The official npm clients of OpenAI, Anthropic and Ollama drive the server on the small model (tests/clients.mjs). Nothing is
# downloaded: the clients must be in build/clients, where .ci/run puts them.
# Environment: GEMMA4 (the binary, ./gemma4), STRICT=1 (skips fail).
cd "$(dirname "$0")/.." || exit 1
. tests/harness.sh

clients=build/clients
here() { for name in openai @anthropic-ai/sdk ollama; do [ -d "$clients/node_modules/$name" ] || return 1; done; }
if ! command -v node >/dev/null 2>&1 || ! here; then
    skip "clients: no node, or not: npm install --prefix $clients openai@6 @anthropic-ai/sdk@1 ollama@0.6"
    finish test_clients
    exit
fi
drive clients $clients
finish test_clients
