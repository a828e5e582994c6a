#!/bin/sh
# Prints a C file with all our headers inlined, each file once, between banners. System headers stay
# #include lines.    tools/amalgamate.sh gemma4.c build > build/gemma4.c
# An included file is searched in the folder of the file that includes it, the current directory, then the folder of generated files.
[ $# -eq 2 ] || { echo "amalgamate.sh: expected a file and a folder, got $#" >&2; exit 1; }
exec awk -v first="$1" -v made="$2/" '
function exists(file,   line, found) {
    found = (getline line < file) >= 0
    close(file)
    return found
}
function fail(message) {
    print "amalgamate.sh: " message > "/dev/stderr"
    failed = 1
    exit 1
}
function add(file,   line, word, beside) {
    if (file in done) return
    done[file] = 1
    print "// ######## " file " ########"
    while ((getline line < file) > 0) {
        if (line !~ /^[ \t]*#[ \t]*include[ \t]*"/) { print line; continue }
        split(line, word, "\"")
        beside = file
        sub(/[^\/]*$/, "", beside)
        beside = beside word[2]
        while (beside ~ /[^\/]+\/\.\.\//) sub(/[^\/]+\/\.\.\//, "", beside)
        if (exists(beside)) add(beside)
        else if (exists(word[2])) add(word[2])
        else if (exists(made word[2])) add(made word[2])
        else fail(file ": \"" word[2] "\" is not there")
        print "// ######## " file ", continued ########"
    }
    close(file)
}
BEGIN {
    print "// One file made of several. The bits and the speed of `make cpu`, where the compiler knows these flags:"
    print "//   cc -O3 -march=native -ffp-contract=off gemma4.c -o gemma4 -lm -pthread"
    if (!exists(first)) fail(first " is not there")
    add(first)
}
END { exit failed }'
