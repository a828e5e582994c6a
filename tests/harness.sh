# harness.sh - for all shell suites: a temporary folder, counted cases, runs with a time limit. A suite sources it at
# the top of the repository (`. tests/harness.sh`) and ends with `finish NAME`.
# Environment: GEMMA4 (./gemma4), BUILD (build), STRICT=1 (skips fail).
# shellcheck shell=sh disable=SC2034  # suites use these variables
gemma4=${GEMMA4:-$PWD/gemma4} build=${BUILD:-build}
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
: >"$tmp/err"
passed=0 failed=0 skipped=0 status=0
serve=                                            # flags for drive
limit=                                            # a program that hangs fails with status 124
timeout --foreground -k 1 1 true 2>/dev/null && limit="timeout --foreground -k 5 ${limit_seconds:-300}"

check() { # check STATUS MESSAGE: counts one case
    if [ "$1" -eq 0 ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAILED: $2"
    fi
}
ok() { # ok NAME COMMAND...: one case: the command must succeed; on failure shows stderr of the last run
    this_case=$1
    shift
    "$@" && check 0 && return
    check 1 "$this_case (exit status of the last run $status, $*)"
    sed 's/^/    stderr: /' "$tmp/err" | head -n 5
}
skip() {
    echo "skipped: $1"
    if [ "${STRICT:-0}" = 0 ]; then skipped=$((skipped + 1)); else failed=$((failed + 1)); fi
}
run() { # run ARGUMENTS...: runs gemma4; sets $status, writes $tmp/out and $tmp/err
    $limit "$gemma4" "$@" >"$tmp/out" 2>"$tmp/err" </dev/null
    status=$?
}
wait_for_server() { # wait_for_server LOG: waits until the server that writes LOG answers, at most a minute; sets $url
    for _ in $(seq 1200); do
        grep -qs '^# serving at ' "$1" && break
        sleep 0.05
    done
    url=$(sed -n 's/^# serving at //p' "$1")
}
drive() { # drive NAME [ARGUMENTS]: runs tests/NAME.mjs in node against a server (key "secret"; $serve: more flags); adds its cases
    run serve models/gemma4-mini-q8_0.gguf --host 203.0.113.1 --port 0
    if grep -q 'libmicrohttpd' "$tmp/err"; then
        skip "$1: this build has no server"
        return
    fi
    "$gemma4" serve models/gemma4-mini-q8_0.gguf --port 0 -t 2 -np 2 --api-key secret $serve >/dev/null 2>"$tmp/log" </dev/null &
    pid=$!
    trap 'kill -9 $pid 2>/dev/null; rm -rf "$tmp"' EXIT
    wait_for_server "$tmp/log"
    driver=$1
    shift
    $limit node "tests/$driver.mjs" "$url" secret "$@" >"$tmp/out" 2>&1
    grep -v "^# $driver: " "$tmp/out"
    n=$(sed -n "s/^# $driver: \([0-9]*\) passed.*/\1/p" "$tmp/out")
    f=$(sed -n "s/^# $driver: .* \([0-9]*\) failed\$/\1/p" "$tmp/out")
    passed=$((passed + ${n:-0})) failed=$((failed + ${f:-1}))
    kill -TERM "$pid"
    wait "$pid"
    status=$?
    ok "the server ends as always" [ "$status" -eq 0 ]
    ok "no answer was a 5xx" [ "$(grep -c '"status":5' "$tmp/log")" -eq 0 ]
}
finish() { # finish NAME: prints the summary line; returns the suite's exit status
    echo "# $1: $passed passed, $failed failed, $skipped skipped"
    [ "$failed" -eq 0 ]
}
