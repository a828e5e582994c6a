#!/bin/sh
# tools/amalgamate.sh: each file is included once, a missing file is an error. The engine as one file compiles without
# warnings; LONG=1: it writes the same story as gemma4, with the same bits in the logits (the story: .ci/run too).
# Environment: GEMMA4 (./gemma4), BUILD (build), CC (cc), LONG=1.
cd "$(dirname "$0")/.." || exit 1
. tests/harness.sh

mkdir -p "$tmp/tree/parts" "$tmp/tree/made"
echo '"ab"' >"$tmp/tree/made/s.h"
printf '#include "h.h"\n#include "parts/p.h"\n#include "h.h"\nchar s[] =\n#include "s.h"\n;\nint main(void) { return h + p - (int)sizeof s; }\n' >"$tmp/tree/a.c"
printf '#include <stdio.h>\nint h = 1;\n' >"$tmp/tree/h.h"
printf '/* as in\n * #include "nothing.h" */\n#include "../h.h"\nint p = 2;\n' >"$tmp/tree/parts/p.h"
amalgamate() { (cd "$1" && sh "$OLDPWD/tools/amalgamate.sh" "$2" "$3") >"$tmp/one.c" 2>"$tmp/err"; status=$?; }
amalgamate "$tmp/tree" a.c made
ok "a file twice: exits 0" [ "$status" -eq 0 ]
ok "a file twice: it is there once" [ "$(grep -c '^int h' "$tmp/one.c")" -eq 1 ]
ok "a file of a folder: it is there" [ "$(grep -c '^int p' "$tmp/one.c")" -eq 1 ]
ok "a file that was made: it is there" grep -qx '"ab"' "$tmp/one.c"
ok "headers of the system stay" grep -q '^#include <stdio.h>' "$tmp/one.c"
ok "no file of ours is included" [ -z "$(grep '^#include "' "$tmp/one.c")" ]
ok "it compiles and runs" sh -c '${CC:-cc} "$0/one.c" -o "$0/one" && "$0/one"' "$tmp"
rm "$tmp/tree/h.h"
amalgamate "$tmp/tree" a.c made
ok "a missing header: exit status 1" [ "$status" -eq 1 ]
ok "a missing header: is named" grep -q 'a.c: "h.h" is not there' "$tmp/err"
amalgamate . nothing.c made
ok "a missing file: exit status 1" [ "$status" -eq 1 ]

amalgamate . gemma4.c "$build"
ok "the engine: exits 0" [ "$status" -eq 0 ]
ok "the engine: no file of ours is included" [ -z "$(grep '^#include "' "$tmp/one.c")" ]
# shellcheck disable=SC2086  # CC may hold flags
${CC:-cc} -DUSE_MICROHTTPD -Wall -Wextra -fsyntax-only "$tmp/one.c" 2>"$tmp/err"
status=$?
if grep -q 'microhttpd.h' "$tmp/err"; then
    skip "the page in one file: no libmicrohttpd"
    # shellcheck disable=SC2086
    ${CC:-cc} -Wall -Wextra -fsyntax-only "$tmp/one.c" 2>"$tmp/err"
    status=$?
else
    ok "the engine: the page is in it" grep -qxF "\"$(grep '<title>' web/index.html)\\n\"" "$tmp/one.c"
fi
ok "the engine: compiles" [ "$status" -eq 0 ]
ok "the engine: without warnings" [ ! -s "$tmp/err" ]
if [ "${LONG:-0}" = 0 ]; then
    finish amalgamate
    exit
fi
# shellcheck disable=SC2086
${CC:-cc} -O0 -ffp-contract=off "$tmp/one.c" -o "$tmp/one" -lm -pthread
status=$?
ok "the engine: links" [ "$status" -eq 0 ]
set -- models/gemma4-mini-q8_0.gguf -p "Once upon a time" --raw --temp 0 -n 8 -v       # few tokens: -O0 is slow
run "$@"
mv "$tmp/out" "$tmp/story"
hash=$(grep -o 'last logits .*' "$tmp/err")
gemma4=$tmp/one
run "$@"
ok "the engine: tells a story" [ -s "$tmp/out" ]
ok "the engine: the same story" cmp -s "$tmp/out" "$tmp/story"
ok "the engine: the same logits" [ "$hash" = "$(grep -o 'last logits .*' "$tmp/err")" ]
finish amalgamate
