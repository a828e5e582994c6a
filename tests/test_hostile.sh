#!/bin/sh
# What clients may send to do harm, from tests/hostile.mjs: odd heads, bodies that take much time or memory, clients that never read; then
# the same with little memory (ulimit -v, --request-memory). Each gets its status, and the server goes on.
# Environment: GEMMA4 (the binary, ./gemma4), STRICT=1 (skips fail), LONG=1 (how long another stream waits meanwhile; slow clients).
cd "$(dirname "$0")/.." || exit 1
model=models/gemma4-mini-q8_0.gguf
. tests/harness.sh

run serve "$model" --host 203.0.113.1 --port 0                       # an address that this machine does not have
if ! command -v node >/dev/null 2>&1 || grep -q 'libmicrohttpd' "$tmp/err"; then
    skip "hostile clients: node or libmicrohttpd is not here"
    finish test_hostile
    exit
fi
pids=
trap 'for p in $pids; do kill -9 "$p" 2>/dev/null; done; rm -rf "$tmp"' EXIT
serve() { # serve KIBIBYTES FLAGS...: starts a server whose address space has this limit; sets $pid and $url
    kib=$1
    shift
    : >"$tmp/log"
    (
        # shellcheck disable=SC3045  # dash and bash know -v
        ulimit -v "$kib" 2>/dev/null || true
        exec "$gemma4" serve "$model" --port 0 -t 2 -np 2 "$@" >/dev/null 2>"$tmp/log" </dev/null
    ) &
    pid=$!
    pids="$pids $pid"
    wait_for_server "$tmp/log"
}
attack() { # attack PART [ARGUMENTS]: adds the cases of that part of hostile.mjs
    $limit node tests/hostile.mjs "$url" "$@" >"$tmp/out" 2>&1
    grep -v "^# hostile: " "$tmp/out"
    n=$(sed -n 's/^# hostile: \([0-9]*\) passed.*/\1/p' "$tmp/out")
    f=$(sed -n 's/^# hostile: .* \([0-9]*\) failed$/\1/p' "$tmp/out")
    passed=$((passed + ${n:-0})) failed=$((failed + ${f:-1}))
}
stop() { # stop NAME
    kill -TERM "$pid"
    wait "$pid"
    status=$?
    ok "$1: the server ends as always" [ "$status" -eq 0 ]
    ok "$1: no answer was a 500" [ "$(grep -c '"status":500' "$tmp/log")" -eq 0 ]
}
most() { sed -n 's/^# host memory: .* requests of up to \([0-9.]*\) MiB$/\1/p' "$tmp/log" | awk '{ printf "%d", ($1 - 0.05) * 1048576 }'; }

serve unlimited
attack heads
attack bodies
[ "${LONG:-0}" = 0 ] || attack slow
stop "odd requests"

serve unlimited --request-memory 64
ok "--request-memory 64: requests of up to 0.8 MiB" grep -q '^# host memory: up to 64.0 MiB for requests and answers, requests of up to 0.8 MiB$' "$tmp/log"
[ "${LONG:-0}" = 0 ] || attack memory "$(most)"
stop "a small budget"
run serve "$model" --request-memory 1
ok "--request-memory 1: named as too small" grep -q -e '--request-memory' "$tmp/err"

# shellcheck disable=SC3045
if (ulimit -v 300000) 2>/dev/null; then
    serve 300000
    ok "ulimit -v: the budget is less than half of it" [ "$(sed -n 's/^# host memory: up to \([0-9]*\).* for requests and.*/\1/p' "$tmp/log")" -lt 146 ]
    attack memory "$(most)"
    stop "little address space"
else
    skip "ulimit -v: the shell does not know it, or a lower limit is set"
fi
finish test_hostile
