#!/bin/sh
# Registers, stack and spills of the kernels that take most of the time of decoding and verification, as a Markdown table with one
# column for each architecture.
#
#   tools/registers.sh sm_86 sm_120          compiles for each, some minutes of one core; forms of ARCH as in the Makefile
#   tools/registers.sh FILE ..               reads what `nvcc -Xptxas -v` wrote to a file
#
# A cell is "registers / stack bytes / spill bytes" of one thread; 0 / 0 is left out. Spills are stores plus loads, counted in
# the code, not per execution. The stack includes that of functions that the kernel calls, the spills do not.
# Environment: NVCC, NVCC_FLAGS (more flags for it).
root=$(dirname "$0")/..
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
fail() { echo "registers.sh: $1" >&2 && exit 1; }
filter=$(command -v c++filt || command -v cu++filt || command -v llvm-cxxfilt) || fail "no c++filt; it comes with binutils"
[ $# -gt 0 ] || fail "which architectures? for example: tools/registers.sh sm_86 sm_120"

for arch in "$@"; do
    log=$arch
    if [ ! -f "$arch" ]; then
        log=$tmp/log
        echo "registers.sh: compiling for $arch" >&2
        make -C "$root" B="$tmp/build" ENGINE=cuda ARCH="$arch" NVCC_FLAGS="-Xptxas -v $NVCC_FLAGS" "$tmp/build/kernels.o" \
            >"$log" 2>&1 || { grep -v 'ptxas info\|bytes stack frame' "$log" | tail -n 10 >&2; fail "$arch: nvcc failed"; }
    fi
    # "Compiling entry function 'NAME' for 'ARCH'" begins a kernel; "Function properties for NAME" tells whose spills follow.
    awk -v label="$([ -f "$arch" ] || echo "$arch")" '
    function number_before(words) { return match($0, "[0-9]+ " words) ? substr($0, RSTART) + 0 : 0 }
    /Compiling entry function/ {
        split($0, part, "\047")
        name = part[2]; arch = label ? label : part[4]; spills = stack = 0
        next
    }
    /Function properties for/ { own = $NF == name; next }
    /bytes spill stores/ && own {
        stack = number_before("bytes stack frame")
        spills = number_before("bytes spill stores") + number_before("bytes spill loads")
    }
    /Used [0-9]+ registers/ && name != "" {
        if ($0 ~ /cumulative stack/) stack = number_before("bytes cumulative stack")
        cell = number_before("registers")
        print arch "|" name "|" cell (stack + spills ? " / " stack " / " spills : "")
        name = ""
    }' "$log" >>"$tmp/cells"
done
[ -s "$tmp/cells" ] || fail "no kernel in the log; was it written by nvcc -Xptxas -v?"

"$filter" <"$tmp/cells" | sed 's/|void /|/; s/(DType)0\([,>]\)/F32\1/; s/(DType)1\([,>]\)/F16\1/; s/(DType)30\([,>]\)/BF16\1/
    s/([^|]*|/|/' | sort -t '|' -V -k 2 >"$tmp/named"
awk -F '|' '
function rows(title, pattern,   i, a, line) {
    for (i = 1; i <= n_names; i++) {
        if (names[i] !~ "^(" pattern ")$") continue
        line = "| " title " | `" names[i] "` |"
        for (a = 1; a <= n_archs; a++) line = line " " cell[archs[a], names[i]] " |"
        print line
        title = ""
    }
}
FNR == NR { if (!($1 in seen)) { seen[$1] = 1; archs[++n_archs] = $1 } next }   # in the order of the arguments
{ if (!($2 in known)) { known[$2] = 1; names[++n_names] = $2 } cell[$1, $2] = $3 }
END {
    head = "| rows | kernel |"; rule = "|---|---|"
    for (a = 1; a <= n_archs; a++) { head = head " " archs[a] " |"; rule = rule "---|" }
    print head "\n" rule
    rows("one", "gemv_kernel.*|gemv_floats_kernel.*|product_kernel<1>")
    rows("few", "product_kernel<3>|tile_kernel.*")
    rows("attention", "attend_half_kernel.*|attend_coded_kernel.*|flash_kernel.*|attend_plain_kernel")
}' "$tmp/cells" "$tmp/named"
