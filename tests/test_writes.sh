#!/bin/sh
# Every failing write loses nothing: tests/fail_write.c makes the nth call that changes a file fail (full disk, disk error),
# be interrupted, be short, or kills the process, in every command that writes a file. After it the file is as it was
# before, or complete, byte for byte; one line says what happened; nothing else is left, except by a kill, and that does
# not disturb the next run.
# Some n of each command; LONG=1: every n, or 200 of many.
cd "$(dirname "$0")/.." || exit 1
. tests/harness.sh
shim=$PWD/$build/fail_write.so model=$PWD/models/gemma4-mini-q8_0.gguf
case $build in /*) shim=$build/fail_write.so ;; esac
under=$tmp/under                                  # the folder whose files are written

# ---- one mechanism -----------------------------------------------------------------------------
# A file that is written in another way would lose its old contents.
others=$(grep -nE 'fopen\([^;]*"[wa]|O_CREAT|O_TRUNC|[^a-z_](rename|creat|freopen|mkstemp)\(' gemma4.c gguf.h tokenizer.h parts/*.h |
    grep -v '^parts/base.h:')
ok "files are written by parts/base.h alone: $others" [ -z "$others" ]

# ---- standard output ---------------------------------------------------------------------------
to_full() { # to_full ARGUMENTS: the run must say that its output is lost
    $limit "$gemma4" "$@" >/dev/full 2>"$tmp/err" </dev/null
    status=$?
    ok "$1 $3: standard output is full" [ "$status" -eq 1 ]
    ok "$1 $3: one line says so" [ "$(grep -c '^gemma4: error: standard output: No space left on device$' "$tmp/err")" -eq 1 ]
}
printf 'It is a long text of some words about a fox and a duck. %.0s' $(seq 20) >"$tmp/long.txt"
if [ -w /dev/full ]; then
    to_full "$model" -p hi -n 2 -t 1
    to_full "$model" -p hi -n 2 -t 1 --greedy
    to_full tokenize "$model" -p hi
    to_full detokenize "$model" --ids 5
    to_full plan "$model" -c 512
    [ "${LONG:-0}" = 0 ] || to_full bench "$model" -p 8 -n 0 -r 1 -t 1 -o csv
    to_full ppl "$model" -f "$tmp/long.txt" -c 64 --chunks 1 -t 1
    to_full niah "$model" -p 256 -d 0 -r 1 -t 1 -o csv
    to_full --version
    to_full --help
    to_full --document man
else
    skip "no /dev/full on this system"
fi

# ---- files -------------------------------------------------------------------------------------
: >"$tmp/in"
with_shim() { # with_shim HOW NUMBER ARGUMENTS: runs gemma4 in a fresh folder; its standard input is $tmp/in
    rm -rf "$under"
    cp -R "$tmp/before" "$under"
    : >"$tmp/calls"
    how=$1 number=$2
    shift 2
    LD_PRELOAD=$shim FAIL_UNDER=$under FAIL_HOW=$how FAIL_AT=$number FAIL_LOG=$tmp/calls \
        $limit "$gemma4" "$@" >"$tmp/out" 2>"$tmp/err" <"$tmp/in"
    status=$?
}
equal() { diff -r -x '*.tmp' "$1" "$under" >"$tmp/diff" 2>&1; }
old_or_new() { equal "$tmp/before" || equal "$tmp/want" || { [ -n "$same" ] && "$same"; }; }
judge() { # judge WHAT ARGUMENTS: after a run in which call number $number failed
    call=$(sed -n "${number}p" "$tmp/calls")
    case_is="$1: $how at $number, $call" said=$(grep -cE "$says" "$tmp/err")
    shift
    if [ "$how" = KILL ]; then
        ok "$case_is: it was killed" [ "$status" -eq 137 ]
        ok "$case_is: the file is the old one or the new one" old_or_new
        $limit "$gemma4" "$@" >/dev/null 2>"$tmp/err" <"$tmp/in"
        status=$?
        ok "$case_is: the next run succeeds" [ "$status" -eq 0 ]
        return
    fi
    ok "$case_is: no other file is left" [ -z "$(find "$under" -name '*.tmp')" ]
    case $how,$call in
    SHORT,* | EINTR,* | *,"fsync $under")         # or the folder's, when the file has its name
        ok "$case_is: no line of error" [ "$said" -eq 0 ]
        ok "$case_is: the run succeeds" [ "$status" -eq 0 ]
        ok "$case_is: the file is complete" equal "$tmp/want"
        ;;
    *)
        ok "$case_is: one line says so" [ $((said >= 1 && said <= 1 + retries)) -eq 1 ]
        if [ "$retries" -eq 1 ] && [ "$status" -eq 0 ]; then
            ok "$case_is: the file is complete" equal "$tmp/want"
        else
            ok "$case_is: the exit status" [ "$status" -eq "$lost" ]
            ok "$case_is: the old file is unchanged" "${same:-equal}" "$tmp/before"
        fi
        ;;
    esac
}
# every WHAT N HOWS ARGUMENTS: the command must write what a run without faults writes ($tmp/want), or leave the folder as
# it was ($tmp/before). N of its calls fail, evenly chosen, and the last three; each of HOWS is used in turn, with LONG=1 each
# at every call. $lost: exit status of a run whose file is lost; $says: its line of error; $retries: 1: it may write the
# file again; $same: what compares the folder, '': equal.
every() {
    what=$1 some=$2 hows=$3
    shift 3
    with_shim none 0 "$@"
    ok "$what: the run succeeds" [ "$status" -eq 0 ]
    rm -rf "$tmp/want"
    mv "$under" "$tmp/want"
    total=$(grep -c . "$tmp/calls")
    ok "$what: writes a file" [ "$total" -ge 4 ]
    turn=0
    [ "${LONG:-0}" = 0 ] || some=200
    for n in $(seq "$total"); do
        [ $((total - n)) -lt 3 ] || [ $(((n - 1) % (1 + total / some))) -eq 0 ] || continue
        turn=$((turn + 1)) at=0
        for how in $hows; do
            at=$((at + 1))
            [ "${LONG:-0}" != 0 ] || [ $((turn % $(echo "$hows" | wc -w) + 1)) -eq $at ] || continue
            with_shim "$how" "$n" "$@"
            [ "$(grep -c . "$tmp/calls")" -ge "$n" ] || continue       # this fault has fewer calls to meet
            judge "$what" "$@"
        done
    done
}
before() { # before COMMAND: what is in the folder before each run
    rm -rf "$under" "$tmp/before"
    mkdir "$under"
    "$@"
    mv "$under" "$tmp/before"
}
old_file() { echo "what was there before" >"$under/file"; }
# shellcheck disable=SC2086  # flags are words
old_session() { "$gemma4" $session -p hello >/dev/null 2>&1; }
old_dump() { "$gemma4" "$model" -p "the fox" -n 3 --temp 0 -t 1 --dump "$under" >/dev/null 2>&1; }

if [ "$(uname)" != Linux ] || [ ! -s "$shim" ]; then
    skip "no library of faults (it needs Linux and a compiler that makes shared libraries)"
    finish writes
    exit
fi
before old_file
with_shim ENOSPC 1 tokenize "$model" -p hi -o "$under/file"
if [ ! -s "$tmp/calls" ]; then
    skip "LD_PRELOAD does not reach this program (a static build, or a sanitizer's)"
    finish writes
    exit
fi
all="ENOSPC SHORT EIO KILL EINTR EDQUOT"
lost=1 same='' retries=0
says="^gemma4: error: -o: $under/file: cannot write: .*; the old file is unchanged"
every tokenize 9 "$all" tokenize "$model" -p hi -o "$under/file"
printf '\002\000\000\000\003\000\000\000' >"$tmp/ids"
every logits 2 "$all" logits "$model" -t 1 --ids "$tmp/ids" -o "$under/file"
says="^gemma4: error: quantize: $under/file: cannot write: .*; the old file is unchanged"
every quantize 3 "$all" quantize "$model" "$under/file" q4_0 -t 1
says="^gemma4: error: --kld-base: $under/file: cannot write: .*; the old file is unchanged"
every ppl 2 "$all" ppl "$model" -f "$tmp/long.txt" -c 32 --chunks 1 -t 1 --kld-base "$under/file"
says="^gemma4: error: --svg: $under/file: cannot write: .*; the old file is unchanged"
every niah 2 "$all" niah "$model" -p 256 -d 0 -r 1 -t 1 -o csv --svg "$under/file"
session="$model -n 2 -s 1 --temp 0 -t 1 --session $under/file"
before old_session
says="^gemma4: error: --session: $under/file: cannot write: .*; the old file is unchanged"
# shellcheck disable=SC2086
every session 3 "$all" $session -p hi
printf 'hi\n' >"$tmp/in"
retries=1                                         # a chat writes it again at its end
says="^(# |gemma4: error: )--session: $under/file: cannot write: .*; the old file is unchanged"
# shellcheck disable=SC2086
every "a chat's session" 3 "$all" $session -i
retries=0
printf '/load %s\n/save %s\n/stats\n' "$tmp/messages" "$under/file" >"$tmp/in"
echo '[{"role":"user","content":"hi"},{"role":"assistant","content":"Hello."}]' >"$tmp/messages"
before old_file
lost=0 says="^# /save: $under/file: cannot write: .*; the old file is unchanged"
every /save 2 "$all" "$model" -i -n 2 -t 1
: >"$tmp/in"
# A dump has many files, each with a row or more for every step: each is the old one, or begins like the new one and ends
# after a step, or with kill -9 within a row.
whole_steps() {
    n_rows=$(($(wc -c <"$tmp/want/rows.f32") / 12)) n_steps=3
    for file in "$under"/*; do
        new=$tmp/want/${file##*/} old=$tmp/before/${file##*/}
        case $file in *.tmp) continue ;; esac
        cmp -s "$file" "$old" && continue
        bytes=$(wc -c <"$file") all_bytes=$(wc -c <"$new")
        cmp -s -n "$bytes" "$file" "$new" || return 1
        [ $((bytes * n_rows % all_bytes)) -eq 0 ] || [ $((bytes * n_steps % all_bytes)) -eq 0 ] || [ "$how" = KILL ] || return 1
    done
}
before old_dump
lost=1 same=whole_steps says="^gemma4: error: --dump: $under/[^ ]*: cannot write: "
every "a dump" 3 "$all" "$model" -p "the cow" -n 3 --temp 0 -t 1 --dump "$under"

# ---- the server's folder of sessions -----------------------------------------------------------
ask() { # ask WORDS: sets $code and $tmp/answer
    code=$(curl -s -m 60 -o "$tmp/answer" -w '%{http_code}' "$url/v1/completions" \
        -d "{\"prompt\":\"$(printf "$1 %.0s" $(seq 90))\",\"max_tokens\":2,\"temperature\":0}")
}
# serve_with HOW N UNDER: a server whose call N to a file under UNDER fails; three conversations in one slot, so that two
# have to leave it, and SIGTERM. Sets $status and $codes; its log is $tmp/log.
serve_with() {
    : >"$tmp/calls"
    LD_PRELOAD=$shim FAIL_UNDER=$3 FAIL_HOW=$1 FAIL_AT=$2 FAIL_LOG=$tmp/calls \
        "$gemma4" serve "$model" --port 0 -t 1 -np 1 -c 512 --session-dir "$under" >/dev/null 2>"$tmp/log" </dev/null &
    pid=$!
    trap 'kill -9 $pid 2>/dev/null; rm -rf "$tmp"' EXIT
    wait_for_server "$tmp/log"
    codes=
    for words in fox cow duck; do
        ask $words
        codes="$codes $code"
    done
    kill -TERM "$pid" 2>/dev/null
    wait "$pid" 2>/dev/null
    status=$?
}
run serve "$model" --host 203.0.113.1 --port 0
if grep -q libmicrohttpd "$tmp/err" || ! command -v curl >/dev/null; then
    skip "a server's sessions: this build has no server, or there is no curl"
else
    rm -rf "$under"
    mkdir "$under"
    serve_with none 0 "$under"
    ok "a server: three sessions in files" [ "$(find "$under" -name '*.session' | grep -c .)" -eq 3 ]
    rm -rf "$tmp/want" "$tmp/before"
    cp -R "$under" "$tmp/want"
    first=$(sed -n 's/^rename .*\///p' "$tmp/calls" | head -n 1)
    mkdir "$tmp/before"
    cp "$tmp/want/$first" "$tmp/before"
    total=$(grep -c . "$tmp/calls")
    sample="ENOSPC:2 EIO:5 KILL:3"
    [ "${LONG:-0}" = 0 ] || sample=$(for how in ENOSPC EIO KILL SHORT EINTR; do seq -f "$how:%g" "$total"; done)
    for fault in $sample; do
        how=${fault%:*} number=${fault#*:}
        rm -rf "$under"
        cp -R "$tmp/before" "$under"
        serve_with "$how" "$number" "$under"
        [ "$(grep -c . "$tmp/calls")" -ge "$number" ] || continue
        call=$(sed -n "${number}p" "$tmp/calls")
        case_is="a server: $how at $number, $call"
        ok "$case_is: the old session is unchanged" cmp -s "$under/$first" "$tmp/before/$first"
        for file in "$under"/*.session; do
            ok "$case_is: ${file##*/} is complete" cmp -s "$file" "$tmp/want/${file##*/}"
        done
        if [ "$how" = KILL ]; then
            ok "$case_is: it was killed" [ "$status" -eq 137 ]
            serve_with none 0 "$under"            # the next one deletes what is half written
            ok "$case_is: the next one has all three" diff -r "$tmp/want" "$under"
            continue
        fi
        ok "$case_is: all are answered" [ "$codes" = " 200 200 200" ]
        ok "$case_is: it ends as always" [ "$status" -eq 0 ]
        ok "$case_is: no other file is left" [ -z "$(find "$under" -type f ! -name '*.session')" ]
        case $how,$call in
        ENOSPC,"fsync $under") ;;                 # no file is lost yet, but later ones are
        SHORT,* | EINTR,* | *,"fsync $under") ok "$case_is: all three are in files" diff -r "$tmp/want" "$under" ;;
        *) ok "$case_is: the log says so" grep -q "^# --session-dir: $under/.*: cannot write: " "$tmp/log" ;;
        esac
    done
    rm -f "$under"/*
    serve_with ENOSPC 1 /memfd:
    ok "a server without memory for sessions: all are answered" [ "$codes" = " 200 200 200" ]
    ok "a server without memory for sessions: the log says so" grep -q 'cannot keep a session of .* tokens: No space left' "$tmp/log"
fi
finish writes
