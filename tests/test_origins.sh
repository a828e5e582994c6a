#!/bin/sh
# Which web pages may use the server: --allow-origin, --public-url, preflights, and a browser with the page behind the proxy of
# docs/server.md (tests/origins.mjs).
# Environment: GEMMA4 (the binary, ./gemma4), STRICT=1 (skips fail).
cd "$(dirname "$0")/.." || exit 1
model=models/gemma4-mini-q8_0.gguf
. tests/harness.sh

run serve "$model" --host 203.0.113.1 --port 0                       # an address that this machine does not have
if ! command -v curl >/dev/null 2>&1 || grep -q 'libmicrohttpd' "$tmp/err"; then
    skip "origins: curl or libmicrohttpd is not here"
    finish test_origins
    exit
fi
for value in x null https:// https://a.example/path https://a.example:0 https://a.example:65536 https://u@a.example 'http://[::1' \
    'https://*.example' 'a.example:80'; do
    run serve "$model" --allow-origin "$value"
    ok "--allow-origin $value: one line, exit status 1" [ "$status $(wc -l <"$tmp/err")" = "1 1" ]
    ok "--allow-origin $value: expected and got" grep -qF -e "gemma4: error: --allow-origin: expected an origin" "$tmp/err"
done
for value in chat.example app://chat.example 'https://chat.example/?a' 'https://chat.example/#a' https:chat.example; do
    run serve "$model" --public-url "$value"
    ok "--public-url $value: one line, exit status 1" [ "$status $(wc -l <"$tmp/err")" = "1 1" ]
    ok "--public-url $value: expected and got" grep -qF -e "got '$value'" "$tmp/err"
done

pids=
trap 'for p in $pids; do kill -9 "$p" 2>/dev/null; done; rm -rf "$tmp"' EXIT
serve() { # serve NAME FLAGS...: starts a server; sets $pid, $url and $host
    name=$1
    shift
    : >"$tmp/$name.log"
    "$gemma4" serve "$model" --port 0 -t 2 "$@" >/dev/null 2>"$tmp/$name.log" </dev/null &
    pid=$!
    pids="$pids $pid"
    wait_for_server "$tmp/$name.log"
    host=${url#http://}
}
call() { # call PATH [CURL FLAGS...]: leaves the body in $tmp/out, the headers without CR in $tmp/headers; sets $code
    path=$1
    shift
    code=$(curl -sS -m 300 -D "$tmp/raw" -o "$tmp/out" -w '%{http_code}' "$@" "$url$path" 2>"$tmp/err")
    tr -d '\r' <"$tmp/raw" >"$tmp/headers"
}
from() { # from ORIGIN PATH [CURL FLAGS...]
    origin=$1
    shift
    call "$@" -H "Origin: $origin"
}
ask_first() { # ask_first ORIGIN [CURL FLAGS...]: a preflight, as browsers send it
    origin=$1
    shift
    from "$origin" /v1/chat/completions -X OPTIONS -H 'Access-Control-Request-Method: POST' \
        -H 'Access-Control-Request-Headers: authorization,content-type,x-stainless-lang' "$@"
}
is() { [ "$code" = "$1" ]; }
header() { grep -qixF -e "$1" "$tmp/headers"; }
lacks() { ! grep -qi -e "^$1:" "$tmp/headers"; }
has() { grep -qF -e "$1" "$tmp/out"; }
may_read() { # may_read NAME ORIGIN: the response lets pages of ORIGIN read it, without credentials
    ok "$1: may read" header "Access-Control-Allow-Origin: $2"
    ok "$1: all headers" header 'Access-Control-Expose-Headers: *'
    ok "$1: no credentials" lacks Access-Control-Allow-Credentials
    ok "$1: caches know" header 'Vary: Origin'
}
refused() { # refused NAME WORD: 403 that contains WORD, which no page may read
    ok "$1: 403" is 403
    ok "$1: names '$2'" has "$2"
    ok "$1: may not read" lacks Access-Control-Allow-Origin
}

# ---- none allowed ----------------------------------------------------------------------
serve plain
call /health
ok "no Origin: fine" is 200
ok "caches know that the answer depends on it" header 'Vary: Origin'
ok "no page may read it" lacks Access-Control-Allow-Origin
from "http://$host" /health
ok "our own page" is 200
from "https://$host" /health
ok "our own page behind a proxy with TLS that keeps Host" is 200
for origin in http://localhost:3000 http://127.0.0.1:1 https://a.example app://obsidian.md "app://$host" null "http://$host.a.example" \
    "http://$host/" '*'; do
    from "$origin" /health
    refused "from $origin" "--allow-origin $origin"
done
ask_first http://localhost:3000
refused "a preflight" "--allow-origin http://localhost:3000"
call /health -H 'Host: a.example'
refused "a name that points here" "--public-url"
from http://a.example /health -H 'Host: a.example'
refused "its own page" "Host"
kill -TERM "$pid"

# ---- some allowed, a key -----------------------------------------------------------------
serve some --allow-origin https://App.Example:443/ --allow-origin app://obsidian.md --allow-origin http://localhost:3000 \
    --public-url https://chat.example/gemma --api-key secret --max-body 1
ok "the public address is shown" grep -q '^# public address: https://chat.example/gemma$' "$tmp/some.log"
key='Authorization: Bearer secret'
story='{"messages":[{"role":"user","content":"Tell me a story about a fox."}],"temperature":0,"max_tokens":4'
for origin in https://app.example app://obsidian.md http://localhost:3000; do
    ask_first "$origin"
    ok "$origin, preflight: 204, without a key" is 204
    may_read "$origin, preflight" "$origin"
    ok "$origin, preflight: methods" header 'Access-Control-Allow-Methods: GET, HEAD, POST, DELETE'
    ok "$origin, preflight: headers" header 'Access-Control-Allow-Headers: authorization,content-type,x-stainless-lang'
    ok "$origin, preflight: for two hours" header 'Access-Control-Max-Age: 7200'
    ok "$origin, preflight: a private network only if asked" lacks Access-Control-Allow-Private-Network
    from "$origin" /v1/chat/completions -H "$key" -d "$story}"
    ok "$origin, an answer" is 200
    may_read "$origin, an answer" "$origin"
    from "$origin" /v1/chat/completions -N -H "$key" -d "$story,\"stream\":true}"
    ok "$origin, a stream" has 'data: [DONE]'
    may_read "$origin, a stream" "$origin"
done
ask_first https://app.example -H 'Access-Control-Request-Private-Network: true'
ok "a private network, if asked" header 'Access-Control-Allow-Private-Network: true'
from https://app.example /v1/models -H "$key"
may_read "models" https://app.example
from https://app.example /v1/models
ok "no key: 401" is 401
may_read "no key" https://app.example
from https://app.example /api/tags -H 'x-api-key: secret'
may_read "Ollama's list" https://app.example
for path in /api/version /api/tags /api/ps; do                       # a client of Ollama within a desktop program
    from app://obsidian.md $path -H "$key"
    ok "a desktop client, $path" is 200
    may_read "a desktop client, $path" app://obsidian.md
done
from app://obsidian.md /api/show -H "$key" -d '{"name":"gemma4-mini-q8_0:latest"}'
ok "a desktop client, /api/show" has '"capabilities":["completion"'
from app://obsidian.md /api/chat -H "$key" -H 'Content-Type: application/json' -d '{"model":"gemma4-mini-q8_0:latest","messages":[{"role":"system",
"content":"Be brief."},{"role":"user","content":"Hi","images":[]}],"stream":true,"keep_alive":"5m","options":{"num_predict":3,"num_ctx":4096}}'
ok "a desktop client, /api/chat" has '"done":true,"done_reason":'
may_read "a desktop client, /api/chat" app://obsidian.md
from https://app.example /nowhere -H "$key"
ok "an unknown path: 404" is 404
may_read "an unknown path" https://app.example
from https://app.example /v1/chat/completions -H "$key" -d '{'
ok "a broken body: 400" is 400
may_read "a broken body" https://app.example
head -c 1200000 /dev/zero | tr '\0' 'x' >"$tmp/large"
from https://app.example /v1/chat/completions -H "$key" -H 'Expect:' --data-binary "@$tmp/large"
ok "too large: 413" is 413
may_read "too large" https://app.example
from https://app.example /
may_read "the page" https://app.example
for origin in https://app.example:444 http://app.example https://app.example.evil https://evil.app.example https://app.exampl null \
    http://localhost:3001 http://localhost app://obsidian.md.evil https://chat.example:8443 http://chat.example; do
    from "$origin" /health
    refused "from $origin" "--allow-origin $origin"
    ask_first "$origin"
    refused "from $origin, preflight" Origin
done
from https://chat.example /health
ok "the public page" is 200
ok "which needs no leave to read" lacks Access-Control-Allow-Origin
from https://chat.example /health -H 'Host: CHAT.example:443'
ok "also when the proxy keeps Host" is 200
call /health -H 'Host: chat.example.evil'
refused "another name" Host
call /v1/chat/completions -X OPTIONS -H "$key"
ok "OPTIONS of no page: 204" is 204
call /v1/chat/completions -X OPTIONS
ok "OPTIONS of no page needs the key" is 401
kill -TERM "$pid"

# ---- all allowed --------------------------------------------------------------------------
serve all --allow-origin '*'
ok "a warning" grep -q '^# warning: --allow-origin \*' "$tmp/all.log"
for origin in https://any.example null vscode-webview://0ab1; do
    from "$origin" /health
    ok "* and $origin" is 200
    may_read "* and $origin" '*'
done
call /health -H 'Host: a.example'
refused "* and a name that points here" Host
kill -TERM "$pid"

# ---- a browser ----------------------------------------------------------------------------
chromium=$(command -v chromium || command -v chromium-browser || command -v google-chrome)
if [ "$chromium" ] && command -v node >/dev/null 2>&1; then
    CHROMIUM=$chromium GEMMA4=$gemma4 $limit node tests/origins.mjs "$tmp" >"$tmp/out" 2>&1
    grep -v '^# origins: ' "$tmp/out"
    n=$(sed -n 's/^# origins: \([0-9]*\) passed.*/\1/p' "$tmp/out") f=$(sed -n 's/^# origins: .* \([0-9]*\) failed$/\1/p' "$tmp/out")
    passed=$((passed + ${n:-0})) failed=$((failed + ${f:-1}))
else
    skip "the page behind a proxy: no chromium, or no node"
fi
finish test_origins
