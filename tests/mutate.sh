#!/bin/sh
# Do the tests see? Plants the faults of tests/mutants.txt into a copy of the tree, one at a time, and runs the suites that
# should find them. Prints which suite finds each fault, and at the end how many are found.
#
#   tests/mutate.sh [N ...]      all faults, or those with these numbers; about ten seconds each
#
# The suites first have to pass without a fault. A fault whose text is not in its file exactly once is an error: the code
# has changed, so change tests/mutants.txt too.
# Environment: TEST_TIMEOUT (seconds for a suite, 600: a suite that hangs has found the fault).
cd "$(dirname "$0")/.." || exit 1
export TEST_TIMEOUT="${TEST_TIMEOUT:-600}" CUDA_VISIBLE_DEVICES=
list=$PWD/tests/mutants.txt root=$PWD
tree=$(mktemp -d) || exit 1
trap 'rm -rf "$tree"' EXIT
trap 'exit 130' INT TERM

field() { # field N KEY: a line of fault N; KEY is one of: name file before after suites
    awk -v n="$1" -v key="$2" '
        /^#/ || /^$/ { next }
        /^: / { at++; if (at == n && key == "name") print substr($0, 3) }
        at != n { next }
        /^- / && key == "before" { print substr($0, 3) }
        /^\+( |$)/ && key == "after" { print substr($0, 3) }
        /^@ / && key == "file" { print $2 }
        /^@ / && key == "suites" { sub(/^@ [^ ]+ /, ""); print }' "$list"
}
plant() { # plant N FILE: replaces the one occurrence of the text in the copy's file
    BEFORE=$(field "$1" before) AFTER=$(field "$1" after) awk '
        BEGIN { before = ENVIRON["BEFORE"]; after = ENVIRON["AFTER"] }
        {
            for (rest = $0; before != "" && (i = index(rest, before)); rest = substr(rest, i + 1)) n++
            if ((i = index($0, before))) $0 = substr($0, 1, i - 1) after substr($0, i + length(before))
            print
        }
        END { exit n != 1 }' "$root/$2" >"$tree/$2"
}
build() { # build SUITE: what it runs, in the copy: a program of its own, or gemma4, or both
    if [ ! -f "$tree/tests/$1.c" ]; then set -- build/gemma4-dev
    elif grep -q GEMMA4 "$tree/tests/$1.c"; then set -- "build/$1" build/gemma4-dev
    else set -- "build/$1"; fi
    make -s -C "$tree" ENGINE=cpu EMULATOR= "$@" >"$tree/build.log" 2>&1
}
passes() { # passes SUITE
    JOBS=1 BUILD=build GEMMA4="$tree/build/gemma4-dev" sh "$tree/tests/run.sh" "$1" >"$tree/run.log" 2>&1
}
stop() {
    echo "mutate: $1" >&2
    exit 1
}

[ $# -gt 0 ] || set -- $(seq "$(grep -c '^: ' "$list")")
for n in "$@"; do                                 # all of the list first, since it is fast
    file=$(field "$n" file)
    [ -f "$file" ] || stop "fault $n: expected a file, got '$file'"
    mkdir -p "$tree/$(dirname "$file")"
    plant "$n" "$file" || stop "fault $n: expected this once in $file: $(field "$n" before)"
    for suite in $(field "$n" suites); do
        [ -f "tests/$suite.c" ] || [ -f "tests/$suite.sh" ] || stop "fault $n: there is no suite '$suite'"
    done
done

tar cf - --exclude=./build --exclude=./.git . | tar xf - -C "$tree" || exit 1
programs=$(printf ' build/%s' $(cd tests && ls make_*.c | sed 's/\.c//') lines)
# shellcheck disable=SC2086  # these are words
make -s -C "$tree" ENGINE=cpu EMULATOR= build/gemma4-dev $programs >"$tree/build.log" 2>&1 || stop "$(cat "$tree/build.log")"
for suite in $(for n in "$@"; do field "$n" suites | tr ' ' '\n'; done | sort -u); do
    build "$suite" || stop "$suite: $(cat "$tree/build.log")"
    passes "$suite" || stop "$suite fails without a fault: $(cat "$tree/run.log")"
done

found=0
for n in "$@"; do
    file=$(field "$n" file) by="NOT FOUND"
    plant "$n" "$file"
    for suite in $(field "$n" suites); do
        build "$suite" || stop "fault $n: it does not compile: $(cat "$tree/build.log")"
        passes "$suite" && continue
        by=$suite found=$((found + 1))
        break
    done
    printf '%3d  %-16s %-20s %s\n' "$n" "$by" "$file" "$(field "$n" name)"
    cat "$root/$file" >"$tree/$file"              # newer than what was built from the fault
done
echo "$# faults, $found found"
[ "$found" -eq $# ]
