#!/bin/sh
# A random test of the server (tests/walk.py): with other sessions, drafters, resumed conversations, cancelled requests
# and kills, each answer must be the same as for the request alone. Fixed seeds; LONG=1: 20 minutes.
# Environment: GEMMA4 (the binary, ./gemma4), STRICT=1 (skips fail), WALK="--gpu --seconds 300" (other arguments of
# walk.py).
cd "$(dirname "$0")/.." || exit 1
. tests/harness.sh

if ! command -v python3 >/dev/null 2>&1; then
    skip "the walk: python3 is not here"
    finish test_walk
    exit
fi
run serve models/gemma4-mini-q8_0.gguf --host 203.0.113.1 --port 0     # an address that this machine does not have
if grep -q 'libmicrohttpd' "$tmp/err"; then
    skip "the walk: this build has no libmicrohttpd"
    finish test_walk
    exit
fi
# Seeds that found bugs: conversations freed while in use, ids replaced, calls replayed, streams without probabilities.
# With a sanitizer they take about eight times as long, so there are fewer.
what="--seeds 13,24,2,8,33"
grep -q -e __asan_init -e __tsan_init "$gemma4" && what="--seeds 24,2,8"
[ "${LONG:-0}" = 0 ] || what="--seed 1000 --seconds 1200"
# shellcheck disable=SC2086  # flags and their values
python3 tests/walk.py --gemma4 "$gemma4" ${WALK:-$what} >"$tmp/out" 2>"$tmp/err" </dev/null
status=$?
cat "$tmp/out"
ok "the walk found nothing" [ "$status" -eq 0 ]
ok "it compared answers" grep -q '^# walk: .* failed: [1-9][0-9]* answers compared' "$tmp/out"
ok "the server continued from its cache" grep -q '; [1-9][0-9]* tokens reused, [1-9][0-9]* sessions resumed;' "$tmp/out"
finish test_walk
