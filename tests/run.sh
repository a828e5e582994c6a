#!/bin/sh
# Runs every test program and shell test, JOBS at a time, prints one line for each, and adds up their summaries.
#
#   tests/run.sh [name ...]      all suites, or the named ones: tests/run.sh test_ops test_cli
#
# A suite is tests/test_X.c (built by make as $BUILD/test_X) or tests/test_X.sh. It prints, near its end, one line
# "# X: N passed, N failed, N skipped". A suite that ends without this line, or with a failing exit status although
# its line reports no failure, counts as one failure. The output of a failing suite is shown.
# The suites of $slow start first, so that no long suite runs alone at the end; their lines come last.
# Environment: BUILD (build), GEMMA4 (./gemma4), STRICT=1 (skips fail), TEST_TIMEOUT (seconds for one suite, 1200),
# LONG=1 (docs/tests.md says what it adds), JOBS (half more than processors, since some suites wait for a server or a
# terminal; 1 if there is a GPU, because tests check its free memory).
slow="test_kernels test_cli test_server test_page test_forward test_walk test_eval test_cache test_backend test_ops test_check"
cd "$(dirname "$0")/.." || exit 1
BUILD=${BUILD:-build}
GEMMA4=${GEMMA4:-$PWD/gemma4}
export BUILD GEMMA4

if [ "$1" = -one ]; then  # -one NAME: runs one suite; its lines go to log/NAME.line, its name to stdout
    name=$2
    log=$BUILD/log/$name.txt
    limit=                                        # --foreground: Ctrl-C reaches the test too
    timeout --foreground -k 1 1 true 2>/dev/null && limit="timeout --foreground -k 10 ${TEST_TIMEOUT:-1200}"
    start=$(date +%s)
    if [ -x "tests/$name.sh" ]; then
        $limit "tests/$name.sh" >"$log" 2>&1 </dev/null
    elif [ -f "tests/$name.sh" ]; then
        $limit sh "tests/$name.sh" >"$log" 2>&1 </dev/null
    else
        $limit "$BUILD/$name" >"$log" 2>&1 </dev/null
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
    {
        printf '%-16s %s passed, %s failed, %s skipped  (%s s)%s\n' "$name" "$p" "$f" "$s" "$seconds" "$why"
        if [ "$f" -gt 0 ]; then
            sed 's/^/    /' "$log"
        else
            grep '^skipped: ' "$log" | sed 's/^/    /'
        fi
    } >"$log.part"
    echo "$p $f $s" >"${log%.txt}.counts"
    mv "$log.part" "${log%.txt}.line"             # written last: the file exists when the suite has ended
    echo "$name"
    exit 0
fi

mkdir -p "$BUILD/log" && rm -f "$BUILD"/log/*.line "$BUILD"/log/*.counts || exit 1
[ $# -gt 0 ] || set -- tests/test_*.c tests/test_*.sh
first='' names=''
for suite in "$@"; do
    name=$(basename "${suite%.*}")
    case " $slow " in
    *" $name "*) ;;
    *) names="$names $name" ;;
    esac
done
for name in $slow; do
    case " $* " in *[\ /]"$name"[.\ ]*) first="$first $name" ;; esac
done
processors=$(nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 2)
jobs=${JOBS:-$([ -e /dev/nvidiactl ] && echo 1 || echo $((processors + (processors + 1) / 2)))}
# shellcheck disable=SC2086  # names are words
printf '%s\n' $first $names | xargs -P "$jobs" -n 1 sh tests/run.sh -one | {
    passed=0 failed=0 skipped=0
    for name in $names $first; do
        while [ ! -e "$BUILD/log/$name.line" ] && read -r _; do :; done
        p=0 f=1 s=0
        if [ -e "$BUILD/log/$name.line" ]; then
            read -r p f s <"$BUILD/log/$name.counts"
            cat "$BUILD/log/$name.line"
        else
            echo "$name: not run to its end"
        fi
        passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
    done
    echo "$passed passed, $failed failed, $skipped skipped"
    [ "$failed" -eq 0 ]
}
