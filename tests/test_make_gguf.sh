#!/bin/sh
# make_gguf writes exactly the files that golden/SHA256 lists, and fails with bad arguments or a full disk.
# A name in that list gives the arguments: PRESET-QUANT[-KIND][-split].gguf; micro-* files with
# --seed 11 --separate-pools (the reference results belong to these), tiny-* files with the default seed.
# Environment: BUILD (build: where make put make_gguf), CC (used if it is not there), STRICT=1 (skips fail).
cd "$(dirname "$0")/.." || exit 1
. tests/harness.sh
make_gguf=$build/make_gguf
if [ ! -x "$make_gguf" ]; then
    make_gguf=$tmp/make_gguf
    ${CC:-cc} -std=c11 -O2 tests/make_gguf.c -o "$make_gguf" -lm || exit 1
fi

# ---- the listed files
while read -r want file; do
    name=${file%.gguf} kind=target seed=1
    set --
    case $name in *-split) name=${name%-split}; set -- "$@" --split-experts ;; esac
    case $name in *-mtp | *-dflash | *-mmproj) kind=${name##*-} name=${name%-*} ;; esac
    case $name in micro-*) seed=11; set -- "$@" --separate-pools ;; esac
    got=$("$make_gguf" --preset "${name%-*}" --quant "${name##*-}" --kind "$kind" --seed "$seed" "$@" \
        --sha256 --out "$tmp/$file")
    [ "${got%% *}" = "$want" ]
    check $? "$file: SHA-256 expected $want, got ${got%% *}"
done <tests/golden/SHA256

# ---- the printed sizes are those of the files
if command -v sha256sum >/dev/null 2>&1; then
    list=$PWD/tests/golden/SHA256
    (cd "$tmp" && sha256sum -c --quiet "$list")
    check $? "sha256sum -c: a file on disk differs from golden/SHA256"
else
    skip "no sha256sum: the files on disk were not hashed a second time"
fi

# ---- projectors of true shape: as large as published ones, up to a few keys
while read -r preset quant published; do
    "$make_gguf" --preset "$preset" --quant "$quant" --kind mmproj --sparse --out "$tmp/mmproj.gguf"
    off=$((published - $(wc -c <"$tmp/mmproj.gguf")))
    [ "$off" -ge -2000 ] && [ "$off" -le 2000 ]
    check $? "mmproj of $preset, $quant: $off bytes less than the published file"
done <<.
26b-a4b f16 1193058432
.
rm -f "$tmp/mmproj.gguf"

# ---- bad arguments: exit 1, one line, no file
refuse() { # refuse TEXT ARGUMENTS...: TEXT must be part of the error
    text=$1
    shift
    "$make_gguf" "$@" >"$tmp/stdout" 2>"$tmp/stderr"
    status=$?
    [ "$status" -eq 1 ] && [ "$(wc -l <"$tmp/stderr")" -eq 1 ] && [ ! -s "$tmp/stdout" ] && [ ! -e "$tmp/x.gguf" ] \
        && grep -qF -- "$text" "$tmp/stderr"
    check $? "make_gguf $*: expected exit status 1 and one line with '$text', got $status and: $(cat "$tmp/stderr")"
}
x=$tmp/x.gguf
refuse "--preset is missing" --quant f16 --out "$x"
refuse "--quant is missing" --preset micro-e --out "$x"
refuse "--out is missing" --preset micro-e --quant f16
refuse "expected one of" --preset micro --quant f16 --out "$x"
refuse "expected one of" --preset micro-e --quant q5_k --out "$x"
refuse "expected one of" --preset micro-e --quant f16 --kind draft --out "$x"
refuse "unknown argument '--dense'" --preset micro-e --quant f16 --out "$x" --dense
refuse "has no bytes to hash" --preset micro-e --quant f16 --out "$x" --sparse --sha256
refuse "expected a value" --preset micro-e --quant f16 --out "$x" --seed
refuse "from 0 to 4294967295, got '4294967296'" --preset micro-e --quant f16 --out "$x" --seed 4294967296
refuse "got '-1'" --preset micro-e --quant f16 --out "$x" --seed -1
refuse "got '5x'" --preset micro-e --quant f16 --out "$x" --layers 5x
refuse "from 2 to 512, got '1'" --preset micro-e --quant f16 --out "$x" --layers 1
refuse "from 512 to 262144, got '511'" --preset micro-e --quant f16 --out "$x" --vocab 511
refuse "has no experts" --preset micro-e --quant f16 --out "$x" --split-experts
refuse "has no experts" --preset micro-moe --quant f16 --kind mtp --out "$x" --split-experts
refuse "got q4_0" --preset micro-e --quant q4_0 --kind mmproj --out "$x"
refuse "has no vocabulary" --preset micro-e --quant f16 --kind mmproj --vocab 512 --out "$x"
refuse "has no layers" --preset 12b --quant f16 --kind mmproj --layers 2 --out "$x"
refuse "no draft model of preset 12b" --preset 12b --quant f16 --kind dflash --out "$x"
refuse "cannot create" --preset micro-e --quant f16 --out "$tmp/no/such/folder/x.gguf"

# ---- a write that fails: the partial file is removed (a file size limit simulates a full disk)
if (trap '' XFSZ && ulimit -f 100) 2>/dev/null; then
    (trap '' XFSZ && ulimit -f 100 && exec "$make_gguf" --preset micro-e --quant f16 --out "$x") 2>"$tmp/stderr"
    [ $? -eq 1 ] && [ ! -e "$x" ] && grep -q "the partial file was removed" "$tmp/stderr"
    check $? "a write past the file size limit: $(cat "$tmp/stderr")"
else
    skip "this shell cannot limit the file size: no failing write"
fi

finish make_gguf
