#!/bin/sh
# The table of contents at the head of a long source lists the section banners below it, in order; no engine source
# reads the environment or has lines over 120 columns; and the top of the tree has no unexpected files. Entries are "[n]  Title",
# one or two on a line; banners are "// ==== [n] Title ====".
cd "$(dirname "$0")/.." || exit 1
. tests/harness.sh


# Prints one line per difference, then "N entries".
compare() {
    awk '
    function trim(s) { gsub(/^[ \t]+|[ \t*\/]+$/, "", s); return s }
    /^\/\/ ====+ *\[[0-9]+\] / {
        n_banners++
        title = $0
        sub(/^\/\/ =+ */, "", title); sub(/ *=+ *$/, "", title)
        number = title; sub(/\].*/, "", number); sub(/\[/, "", number)
        sub(/^\[[0-9]+\] */, "", title)
        if (number + 0 != n_banners) printf "%s:%d: banner [%s] is number %d\n", FILENAME, FNR, number, n_banners
        banner[number] = trim(title)
        next
    }
    n_banners == 0 && /^[ \t*\/]*\[[0-9]+\] / {          # the table comes before the first banner
        rest = $0
        while (match(rest, /\[[0-9]+\] /)) {
            number = substr(rest, RSTART + 1, RLENGTH - 3)
            rest = substr(rest, RSTART + RLENGTH)
            title = rest
            if (match(rest, /  +\[[0-9]+\] /)) title = substr(rest, 1, RSTART - 1)
            entry[number] = trim(title)
            n_entries++
        }
    }
    END {
        if (n_entries == 0 && FNR > 400) printf "%s: no table of contents\n", FILENAME
        for (n in entry)
            if (!(n in banner)) printf "%s: [%s] %s is in the table and has no banner\n", FILENAME, n, entry[n]
            else if (entry[n] != banner[n])
                printf "%s: [%s] is \"%s\" in the table and \"%s\" in the banner\n", FILENAME, n, entry[n], banner[n]
        for (n in banner)
            if (!(n in entry)) printf "%s: [%s] %s has a banner and is not in the table\n", FILENAME, n, banner[n]
    }' "$1"
}

for file in gemma4.c parts/*.h parts/*.cuh parts/*.cu gemma4_kernels.cu tests/make_gguf.c; do
    [ "$file" = gemma4.c ] || [ -f "$file" ] || continue
    differences=$(compare "$file" 2>&1)
    [ -z "$differences" ]
    check $? "$differences"
done
for file in gemma4.c gemma4.h gemma4_kernels.cu gguf.h tokenizer.h parts/*.h parts/*.cuh parts/*.cu; do
    [ "$file" != gemma4_kernels.cu ] || [ -f "$file" ] || continue
    uses=$(grep -nE '\b(secure_)?getenv *\(' "$file" 2>&1 | grep -vE 'getenv\("(TERM|NO_COLOR)"\)')       # the terminal's
    [ -z "$uses" ]
    check $? "$file: reads the environment: $uses"
    long=$(awk 'length($0) > 120 { printf " %d", FNR }' "$file")
    [ -z "$long" ]
    check $? "$file: lines of more than 120 bytes:$long"
done
# The README's table of what to read first: the lines of each file, within a twentieth.
sed -n 's/^| \([a-z0-9_/]*\.[a-z]*\) | \([0-9]*\) |.*/\1 \2/p' README.md >"$tmp/rows"
check "$([ "$(wc -l <"$tmp/rows")" -ge 4 ]; echo $?)" "README.md: no table of files and lines"
while read -r file lines; do
    [ -f "$file" ] || continue
    real=$(wc -l <"$file")
    check "$([ $((20 * (real - lines))) -le "$real" ] && [ $((20 * (lines - real))) -le "$real" ]; echo $?)" \
        "README.md: $file has $real lines, not $lines"
done <"$tmp/rows"
# The files at the top of the tree, in a git checkout: a mistyped redirection can create one that is then committed.
top=" Makefile gemma4.c gemma4.h gemma4_kernels.cu gguf.h tokenizer.h parts web run.sh models tools tests docs README.md LICENSE \
CONTRIBUTING.md .ci .gitignore .clang-format .editorconfig "
if files=$(git ls-files 2>/dev/null) && [ -n "$files" ]; then
    for name in $(printf '%s\n' "$files" | cut -d / -f 1 | sort -u); do
        case $top in
        *" $name "*) check 0 ;;
        *) check 1 "$name: does not belong at the top of the tree" ;;
        esac
    done
fi
finish toc
