#!/bin/sh
# Builds the CPU program for aarch64, with and without its dot product instructions, and runs it in qemu: it must write
# the same stories as gemma4, with the same bits in the logits, and quantise to the same bytes. Only with LONG=1.
# Environment: LONG=1, GEMMA4 (./gemma4), ARM_CC (aarch64-linux-gnu-gcc), STRICT=1 (skips fail, except the one without
# LONG=1).
cd "$(dirname "$0")/.." || exit 1
. tests/harness.sh
export CUDA_VISIBLE_DEVICES=
native=$gemma4 arm_cc=${ARM_CC:-aarch64-linux-gnu-gcc}
qemu=$(command -v qemu-aarch64 || command -v qemu-aarch64-static)

stories() { # stories FOLDER: stories of $gemma4, its quantised file and the hashes of its last logits
    mkdir "$1"
    run quantize models/gemma4-mini-q8_0.gguf "$1/gemma4-mini-q4_k_m.gguf" q4_k_m
    ok "$1: quantises" [ "$status" -eq 0 ]
    tell "$1/q8_0" models/gemma4-mini-q8_0.gguf
    tell "$1/e-q8_0" models/gemma4-mini-e-q8_0.gguf
    tell "$1/q4_k_m" "$1/gemma4-mini-q4_k_m.gguf"
    tell "$1/q8_0-tq3-mtp" models/gemma4-mini-q8_0.gguf -ctk tq3 -ctv tq3 -md models/gemma4-mini-mtp-q8_0.gguf --spec mtp
}
tell() { # tell OUT MODEL FLAGS..: 64 tokens, greedy, and the hash of the last logits
    out=$1
    shift
    run "$@" -v -p "Tell me a story about a fox who lost a red ball in the snow, and about the owl who found it." --temp \
        0 -n 64
    grep -o 'last logits .*' "$tmp/err" >>"$tmp/out"
    ok "$out: tells a story" [ "$status" -eq 0 ]
    mv "$tmp/out" "$out"
}

if [ "${LONG:-0}" = 0 ]; then
    STRICT=0 skip "aarch64 in qemu: only with LONG=1"
elif [ -z "$qemu" ]; then
    skip "no qemu-aarch64 (package qemu-user)"
elif ! echo 'int main(void) { return 0; }' | $arm_cc -static -xc - -o "$tmp/probe" 2>/dev/null || ! "$qemu" "$tmp/probe"; then
    skip "no $arm_cc that links static programs (packages gcc-aarch64-linux-gnu and libc6-dev-arm64-cross)"
else
    stories "$tmp/native"
    for arch in armv8.2-a+dotprod armv8-a; do
        MAKEFLAGS='' make -s B="$tmp/$arch" ENGINE=cpu HTTP=0 IMAGES=0 CC="$arm_cc" CFLAGS="-O2 -march=$arch" LDFLAGS=-static \
            "$tmp/$arch/gemma4-dev" >"$tmp/out" 2>"$tmp/err"
        status=$?
        ok "$arch: compiles" [ "$status" -eq 0 ]
        printf '#!/bin/sh\nexec "%s" "%s" "$@"\n' "$qemu" "$tmp/$arch/gemma4-dev" >"$tmp/in-qemu"
        chmod +x "$tmp/in-qemu"
        gemma4=$tmp/in-qemu
        stories "$tmp/$arch/told"
        : >"$tmp/err"
        for file in "$tmp"/native/*; do
            ok "$arch: ${file##*/} is that of $native" cmp -s "$file" "$tmp/$arch/told/${file##*/}"
        done
    done
fi
finish aarch64
