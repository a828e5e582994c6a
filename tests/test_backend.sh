#!/bin/sh
# Another backend (docs/porting.md): tools/new_backend.sh copies the reference under a new name, with nothing left to
# rename; the copy compiles as C and as C++, and passes tests of operations as `test_ops -NAME`. In a copy of the tree.
# plain.cu is compiled by hipcc if that is installed.
# Environment: BUILD (build: where make put engine.a), CC (cc), CXX (c++).
cd "$(dirname "$0")/.." || exit 1
. tests/harness.sh
engine=$build/engine.a
case $engine in /*) ;; *) engine=$PWD/$engine ;; esac
cp -R Makefile gemma4.c gemma4.h gguf.h tokenizer.h parts tools tests "$tmp" || exit 1
cd "$tmp" || exit 1
defines='-DBACKEND_OPS=toy_ops -DBACKEND_NAME="toy"'
new() { # new ARGUMENTS: runs the script
    tools/new_backend.sh "$@" >out 2>err
    status=$?
}
new toy.cu
ok "new_backend.sh toy.cu: exits 0" [ "$status" -eq 0 ]
if command -v "${CXX:-c++}" >/dev/null 2>&1; then
    # shellcheck disable=SC2086  # defines are words
    "${CXX:-c++}" -std=c++20 -Wall -Werror -I. $defines -fsyntax-only -x c++ parts/toy.cu >out 2>err
    ok "the copy compiles as C++" [ $? -eq 0 ]
    cat err
else
    skip "no C++ compiler: a backend in C++"
fi
new toy
ok "new_backend.sh keeps an older file" [ "$status" -eq 1 ]
rm -f parts/toy.cu
new toy.cu plain
ok "new_backend.sh toy.cu plain: exits 0" [ "$status" -eq 0 ]
ok "nothing of plain.cu is left to rename" [ "$(sed 1d parts/toy.cu | grep -cE '\bplain(_|\.|;|")')" -eq 0 ]
if command -v "${CXX:-c++}" >/dev/null 2>&1; then
    # shellcheck disable=SC2086  # defines are words
    "${CXX:-c++}" -std=c++20 -w -fno-exceptions -Itests/cuda_on_cpu -I. $defines -fsyntax-only -x c++ parts/toy.cu >out 2>err
    ok "the copy of plain.cu compiles" [ $? -eq 0 ]
    cat err
fi
rm -f parts/toy.cu
new toy
ok "new_backend.sh toy: exits 0" [ "$status" -eq 0 ]
ok "says how to test it" grep -q 'make BACKEND=parts/toy.h test-backend' out
ok "has a table of its own" grep -q '^const Ops \*toy_ops(void)' parts/toy.h
ok "nothing is left to rename" [ "$(sed 1d parts/toy.h | grep -ciE '\bref(_|\b)|reference')" -eq 0 ]
for name in cpu kv cuda Toy 1st 'a b' '' int; do
    new "$name"
    ok "new_backend.sh '$name': refused with one line" [ "$status$(wc -l <err)" = 11 ]
done
# The tests look at the backend, not at the reference: an error in the copy, which WRONG plants, is found below.
sed 's/out\[(size_t)r \* o->table->cols + i\] = v\[i\]/& * (getenv("WRONG") ? 1.01f : 1)/' parts/toy.h >wrong
ok "the error is planted" [ "$(diff wrong parts/toy.h | grep -c '^<')" -eq 1 ]
mv wrong parts/toy.h
linked=
[ -f "$engine" ] && linked="-DENGINE_LINKED $engine"
# shellcheck disable=SC2086  # words
${CC:-cc} -std=c11 -O0 -Wall -Werror -Wno-unused-function -I. -UNDEBUG -ffp-contract=off $defines \
    -DBACKEND_FILE='"parts/toy.h"' tests/test_ops.c $linked -o test_ops -lm -pthread >out 2>err
ok "the copy compiles as C, with the tests" [ $? -eq 0 ]
$limit ./test_ops -toy gather_rows embed close >out 2>err
status=$?
ok "test_ops -toy: passes" [ "$status" -eq 0 ]
ok "test_ops -toy: tests the operations named" grep -q '^# ops: [1-9][0-9]* passed, 0 failed' out
WRONG=1 $limit ./test_ops -toy embed >out 2>err
ok "an error in the copy is found" grep -q '^# ops: .* [1-9][0-9]* failed' out
$limit ./test_ops -toy gather_row >out 2>err
ok "test_ops -toy: refuses a name that is none" [ $? -ne 0 ]
# shellcheck disable=SC2086
${CC:-cc} -std=c11 -O0 -w -I. -I"$(dirname "$engine")" -ffp-contract=off $defines -DBACKEND_FILE='"parts/toy.h"' gemma4.c $linked \
    -o gemma4 -lm -pthread >out 2>err
ok "the program compiles with the copy" [ $? -eq 0 ]
chosen() { # chosen ARGUMENTS: the backend that the program takes
    ./gemma4 "$@" --version 2>err | sed 's/.*; uses \(.*\))/\1/'
}
ok "it takes the copy" [ "$(chosen)" = toy ]
ok "--backend toy: too" [ "$(chosen --backend toy)" = toy ]
ok "--backend reference: another" [ "$(chosen --backend reference)" = reference ]
# plain.cu, unchanged, for GPUs of AMD. hipcc prints notes of its own; what the compiler says names the file.
if command -v hipcc >/dev/null 2>&1; then
    hipcc -x hip --offload-arch=gfx1030 -std=c++17 -O0 -Wall -Werror -c parts/plain.cu -o plain.o 2>err
    ok "hipcc compiles plain.cu" [ $? -eq 0 ]
    grep 'parts/' err
else
    skip "no hipcc: plain.cu for GPUs of AMD"
fi
finish backend
