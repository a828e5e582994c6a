#!/bin/sh
# Runs every test program and shell test, one line each, and adds up their summaries.
#
#   tests/run.sh [name ...]      all suites, or the named ones: tests/run.sh test_ops test_cli
#
# A suite is tests/test_X.c (built by make as $BUILD/test_X) or tests/test_X.sh. It prints, near its end, one line
# "# X: N passed, N failed, N skipped". A suite that ends without this line, or with a failing exit status although
# its line reports no failure, counts as one failure. The output of a failing suite is shown.
# Environment: BUILD (build), GEMMA4 (./gemma4), STRICT=1 (skips fail), TEST_TIMEOUT (seconds for one suite, 1200),
# LONG=1 (10,000 mutated model files instead of 300).
cd "$(dirname "$0")/.." || exit 1
BUILD=${BUILD:-build}
GEMMA4=${GEMMA4:-$PWD/gemma4}
export BUILD GEMMA4
# Threads that wait by spinning make a test forty times slower as soon as anything else needs a core.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"
limit=                                            # --foreground: Ctrl-C reaches the test too
timeout --foreground -k 1 1 true 2>/dev/null && limit="timeout --foreground -k 10 ${TEST_TIMEOUT:-1200}"
mkdir -p "$BUILD/log" || exit 1

[ $# -gt 0 ] || set -- tests/test_*.c tests/test_*.sh
passed=0 failed=0 skipped=0
for suite in "$@"; do
    name=$(basename "${suite%.*}")
    log=$BUILD/log/$name.txt
    start=$(date +%s)
    if [ -x "tests/$name.sh" ]; then
        $limit "tests/$name.sh" >"$log" 2>&1
    elif [ -f "tests/$name.sh" ]; then
        $limit sh "tests/$name.sh" >"$log" 2>&1
    else
        $limit "$BUILD/$name" >"$log" 2>&1
    fi
    status=$?
    seconds=$(($(date +%s) - start))
    line=$(grep -E '^# [^:]*: [0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$' "$log" | tail -n 1)
    counts=$(echo "${line##*:}" | tr -cd '0-9 ')
    # shellcheck disable=SC2086  # the three numbers are three words
    set -- $counts
    p=${1:-0} f=${2:-0} s=${3:-0}
    why=
    if [ -z "$line" ]; then
        f=1 why=", ended without a summary (exit status $status)"
    elif [ "$status" -ne 0 ] && [ "$f" -eq 0 ]; then
        f=1 why=", exit status $status"
    fi
    printf '%-16s %s passed, %s failed, %s skipped  (%s s)%s\n' "$name" "$p" "$f" "$s" "$seconds" "$why"
    if [ "$f" -gt 0 ]; then
        sed 's/^/    /' "$log"
    else
        grep '^skipped: ' "$log" | sed 's/^/    /'
    fi
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
