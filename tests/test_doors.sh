#!/bin/sh
# The parts of the engine and what they may see. Callers (store.h, compress.h, chat.h, niah.h, view.h, server.h) compile with engine.h in
# place of the engine, where Model and Session are incomplete types. Every part uses only what stands above it in the list at the
# end of gemma4.c, what engine.h declares, and what gemma4.c says is defined further below. The head of every part says what the
# part uses, which is above it, and where to begin.
# Environment: CC (cc), LONG=1 (every part alone).
cd "$(dirname "$0")/.." || exit 1
. tests/harness.sh

# ---- callers, each with headers, engine.h and the callers that its head names ----

http=
pkg-config --exists 'libmicrohttpd >= 0.9.71' 2>/dev/null && http="-DUSE_MICROHTTPD $(pkg-config --cflags libmicrohttpd)"
echo '""' >"$tmp/page.h"                            # in place of the chat page
compile() { # compile FILE: leaves $status and the compiler's messages in $tmp/err
    # shellcheck disable=SC2086  # CC and http are words
    ${CC:-cc} -std=c11 -fsyntax-only -Wall -Wextra -Werror=implicit-function-declaration -Wno-unused-function $http \
        -I. -I"$tmp" "$1" 2>"$tmp/err"
    status=$?
}
seen='parts/base.h gemma4.h gguf.h tokenizer.h parts/grammar.h parts/pattern.h parts/schema.h parts/engine.h'
caller() { # caller PART HEADER...: includes what every caller sees, then these, then the part
    part=$1
    shift
    {
        printf '#define _GNU_SOURCE\n'
        for header in $seen "$@" "parts/$part"; do echo "#include \"$header\""; done
        printf '%s\n' "$extra"
    } >"$tmp/caller.c"
    compile "$tmp/caller.c"
}
extra=
caller store.h
ok "store.h sees engine.h alone" [ "$status" -eq 0 ]
caller compress.h
ok "compress.h sees engine.h alone" [ "$status" -eq 0 ]
caller niah.h parts/compress.h parts/plot.h
ok "niah.h sees engine.h, compress.h and plot.h" [ "$status" -eq 0 ]
caller eval.h parts/answer.h parts/judge.h
ok "eval.h sees engine.h, answer.h and judge.h" [ "$status" -eq 0 ]
caller view.h
ok "view.h sees engine.h alone" [ "$status" -eq 0 ]
caller chat.h parts/answer.h parts/lines.h parts/compress.h
ok "chat.h sees engine.h and three callers" [ "$status" -eq 0 ]
caller server.h parts/answer.h parts/lines.h parts/compress.h parts/chat.h parts/store.h \
    parts/request.h parts/recent.h parts/budget.h parts/schedule.h parts/exchange.h parts/dialects.h parts/history.h parts/openai.h \
    parts/anthropic.h parts/responses.h parts/ollama.h
ok "server.h sees engine.h and callers" [ "$status" -eq 0 ]
[ "$http" ] || skip "store.h, server.h and the parts between: no libmicrohttpd, so most of them is not compiled"
extra='static int look(const Model *m) { return m->config.vocab; }'       # the check itself: it notices who looks inside
caller compress.h
ok "a caller that looks into a Model does not compile" [ "$status" -ne 0 ]
extra='static size_t look(const Session *s) { return s->held.n; }'
caller compress.h
ok "a caller that looks into a Session does not compile" [ "$status" -ne 0 ]

# ---- includes go one way: gemma4.c up to each part; the compiler names the functions that are used, but not defined yet ----

sed -n '/^\/\/ Defined in the parts named/,/^$/p' gemma4.c >"$tmp/declared"
sed -n 's/^API .*[ *]\([a-z_0-9]*\)(.*/\1/p' parts/engine.h >"$tmp/public"
ok "gemma4.c names what is defined in parts" grep -q '(' "$tmp/declared"
ok "engine.h declares public functions" grep -qx 'session_next' "$tmp/public"
parts=$(sed -n '/^\/\/ ==== \[7\]/,$s/^#include "\(parts\/.*\)"/\1/p' gemma4.c)
ok "gemma4.c includes parts at its end" [ "$(echo "$parts" | wc -l)" -gt 10 ]
late() { # late: of the names in $tmp/err, those that nobody allows
    sed -n "s/.*[‘'\`]\([a-z_0-9]*\)[’'] used but never defined.*/\1/p; \
            s/.*function [‘'\`]\([a-z_0-9]*\)[’'] has internal linkage but is not defined.*/\1/p" "$tmp/err" | sort -u |
        while read -r name; do
            grep -qx "$name" "$tmp/public" || grep -q "[ *]$name(" "$tmp/declared" || printf ' %s' "$name"
        done
}
sed '/^\/\/ ==== \[7\]/,$d' gemma4.c >"$tmp/book.c"
: >"$tmp/above"
n=0
for part in $parts; do                      # each with those above it; without LONG=1 every sixth, which takes a sixth of the time
    echo "#include \"$part\"" >>"$tmp/above"
    n=$((n + 1))
    [ "${LONG:-0}" = 1 ] || [ $((n % 6)) -eq 0 ] || continue
    cat "$tmp/book.c" "$tmp/above" >"$tmp/prefix.c"
    compile "$tmp/prefix.c"
    ok "gemma4.c up to $part: compiles" [ "$status" -eq 0 ]
    names=$(late)
    check "$([ -z "$names" ]; echo $?)" "$part, or a part above it, uses what a part below defines:$names"
done
{
    cat "$tmp/book.c"
    echo 'static int defined_below(void); int uses_it(void) { return defined_below(); }'
} >"$tmp/prefix.c"
compile "$tmp/prefix.c"
ok "the compiler names what is used before it is defined" [ "$(late)" = ' defined_below' ]

# ---- heads ----

for part in parts/*.h; do
    name=$(basename "$part")
    head=$(sed '/\*\//q' "$part" | sed 's/^ \* *//' | tr '\n' ' ')
    case $head in "/* $name - "*) check 0 ;; *) check 1 "$part: its head does not begin with its name" ;; esac
    case $head in *' Uses '*) check 0 ;; *) check 1 "$part: its head does not say what it uses" ;; esac
    case $head in *' Begin with '*) check 0 ;; *) check 1 "$part: its head does not say where to begin" ;; esac
    uses=${head#* Uses }
    uses=${uses%% Begin with *}
    later=$(echo "$parts" | sed -n "\\:^$part\$:,\$p" | tail -n +2)
    for below in $later; do
        case $uses in *"${below#parts/}"*) check 1 "$part: its head says that it uses $below, which is below it" ;; esac
    done
done
finish doors
