#!/bin/sh
# run.sh --fetch, with a fake curl that serves one small file: list, download, resume, damaged file, no network, no
# curl; then what run.sh builds and runs, with a fake make, with and without nvcc and a GPU; and the flags that the
# Makefile gives to nvcc, for which GPUs, and to the C compiler, which links.
# Environment: STRICT=1 (skips fail).
cd "$(dirname "$0")/.." || exit 1
. tests/harness.sh

has() { grep -qF -e "$1" "$tmp/err"; }
lines() { [ "$(grep -c '' "$tmp/err")" -eq "$1" ]; }

# A copy of run.sh downloads to its own folder.
mkdir "$tmp/tree" "$tmp/bin" || exit 1
cp run.sh "$tmp/tree/run.sh"
cat >"$tmp/bin/curl" <<'END'
#!/bin/sh
# Serves $tmp/payload. Files in $tmp select an error: offline, missing, cut, full.
[ ! -e "$tmp/offline" ] || exit 6
echo "$*" >>"$tmp/calls"
case $1 in
-sI*)
    if [ -e "$tmp/missing" ]; then printf 'HTTP/2 404 \r\ncontent-length: 15\r\n\r\n'; exit 0; fi
    printf 'HTTP/2 302 \r\ncontent-length: 99\r\nx-linked-size: %s\r\nX-Linked-ETag: "%s"\r\n\r\nHTTP/2 200 \r\netag: "other"\r\n\r\n' \
        "$(wc -c <"$tmp/payload" | tr -d ' ')" "$(cat "$tmp/sha")"
    exit 0 ;;
esac
while [ "$1" != -o ]; do shift; done
have=$(wc -c <"$2" 2>/dev/null | tr -d ' ')
if [ -e "$tmp/full" ]; then exit 23; fi
if [ "${have:-0}" -gt "$(wc -c <"$tmp/payload")" ]; then exit 22; fi
if [ -e "$tmp/cut" ]; then head -c 1000 "$tmp/payload" >"$2"; exit 18; fi
tail -c +$((${have:-0} + 1)) "$tmp/payload" >>"$2"
END
chmod +x "$tmp/bin/curl"
export tmp
fetch() { # fetch ARGUMENTS...: runs run.sh --fetch; sets $status, writes $tmp/err
    PATH="$tmp/bin:$PATH" sh "$tmp/tree/run.sh" --fetch "$@" >"$tmp/out" 2>"$tmp/err"
    status=$?
}
i=0
while [ $i -lt 500 ]; do echo "line $i of a model"; i=$((i + 1)); done >"$tmp/payload"
if command -v sha256sum >/dev/null 2>&1; then sha256sum "$tmp/payload" | cut -d ' ' -f 1 >"$tmp/sha"
elif command -v shasum >/dev/null 2>&1; then shasum -a 256 "$tmp/payload" | cut -d ' ' -f 1 >"$tmp/sha"
else openssl dgst -sha256 "$tmp/payload" 2>/dev/null | sed 's/.* //' >"$tmp/sha"
fi

for name in "" nothing; do
    fetch $name
    ok "--fetch $name: exit status 1" [ "$status" -eq 1 ]
    ok "--fetch $name: lists the names" has "  26b"
    ok "--fetch $name: names repository and file" grep -qE '^  26b +16.8 GB  [a-z-]+/[^ ]+-GGUF  [^ ]+\.gguf$' "$tmp/err"
done

# The model for a machine: GPU memory in MiB as nvidia-smi prints it, host memory as getconf does, 4096 bytes a page.
cat >"$tmp/bin/nvidia-smi" <<'END'
#!/bin/sh
[ -s "$tmp/gpu" ] && cat "$tmp/gpu"
END
cat >"$tmp/bin/getconf" <<'END'
#!/bin/sh
case $1 in _PHYS_PAGES) echo $(($(cat "$tmp/host") * 262144)) ;; *) echo 4096 ;; esac
END
chmod +x "$tmp/bin/nvidia-smi" "$tmp/bin/getconf"
touch "$tmp/offline"
while read -r gpu host name why; do
    echo "$gpu" >"$tmp/gpu" && echo "$host" >"$tmp/host"
    [ "$gpu" != none ] || : >"$tmp/gpu"
    fetch best
    ok "GPU $gpu MiB, host $host GiB: $name" has "--fetch $name: "
    ok "GPU $gpu MiB, host $host GiB: why" has "$why"
done <<'END'
24576 32 31b 24 GiB
20475 16 26b 20 GiB
8188 31 26b 31 GiB of host memory
12288 16 12b 12 GiB
8188 16 e4b 8 GiB
4096 16 e2b 4 GiB
none 31 26b 31 GiB of host memory
none 16 e4b 16 GiB
none 4 e2b 4 GiB
END
rm "$tmp/offline"
echo 8188 >"$tmp/gpu" && echo 16 >"$tmp/host"
printf '#!/bin/sh\necho "recommended: gemma4 $2 -c 77"\n' >"$tmp/tree/gemma4" && chmod +x "$tmp/tree/gemma4"
fetch best
ok "best: says with which flags to run it" has "recommended here: $tmp/tree/gemma4 $tmp/tree/models/gemma-4-E4B-it-Q4_K_M.gguf -c 77; "
rm -f "$tmp/bin/nvidia-smi" "$tmp/bin/getconf" "$tmp/tree/gemma4" "$tmp/tree/models/gemma-4-E4B-it-Q4_K_M.gguf"
fetch e4b e2b
ok "two names: exit status 1" [ "$status" -eq 1 ]

file=$tmp/tree/models/gemma-4-E4B-it-Q4_K_M.gguf
touch "$tmp/offline"
fetch e4b
ok "no network: exit status 1" [ "$status" -eq 1 ]
ok "no network: one line" lines 1
ok "no network: says so" has "is there a network connection?"
rm "$tmp/offline"
touch "$tmp/missing"
fetch e4b
ok "no such file: exit status 1" [ "$status" -eq 1 ]
ok "no such file: one line with the server's answer" has "HTTP/2 404"
rm "$tmp/missing"
touch "$tmp/cut"
fetch e4b
ok "an interrupted download: exit status 1" [ "$status" -eq 1 ]
ok "an interrupted download: says what to do" has "run the same command to resume it"
ok "an interrupted download: no model" [ ! -e "$file" ]
ok "an interrupted download: the part is kept" [ -e "$file.part" ]
rm "$tmp/cut"
touch "$tmp/full"
fetch e4b
ok "a full disk: exit status 1" [ "$status" -eq 1 ]
ok "a full disk: says so" has "cannot write; is the disk full"
ok "a full disk: the part is kept" [ -e "$file.part" ]
rm "$tmp/full"
fetch e4b
ok "resumed: exits 0" [ "$status" -eq 0 ]
ok "resumed: the whole file" cmp -s "$tmp/payload" "$file"
ok "resumed: the draft is gone" [ ! -e "$file.part" ]
ok "size is shown" has "$(wc -c <"$tmp/payload" | tr -d ' ') bytes"
ok "SHA-256 is shown" has "SHA-256 $(cat "$tmp/sha")"
ok "curl was asked to resume" grep -q -e '-C - .*https://huggingface.co/ggml-org/gemma-4-E4B-it-GGUF/resolve/main/gemma-4-E4B-it-Q4_K_M.gguf' "$tmp/calls"
: >"$tmp/calls"
fetch e4b
ok "again: exits 0" [ "$status" -eq 0 ]
ok "again: nothing is downloaded twice" [ "$(grep -c '' "$tmp/calls")" -eq 1 ]
if [ ! -s "$tmp/sha" ]; then
    echo "skipped: no sha256sum, shasum or openssl: a damaged file"
    if [ "${STRICT:-0}" = 0 ]; then skipped=1; else failed=$((failed + 1)); fi
else
    printf 'X' | dd of="$file" bs=1 seek=100 conv=notrunc 2>/dev/null
    fetch e4b
    ok "a damaged file: exit status 1" [ "$status" -eq 1 ]
    ok "a damaged file: both sums" has "expected SHA-256 $(cat "$tmp/sha"), got"
    ok "a damaged file: is kept" [ -e "$file" ]
    mv "$file" "$file.part"
    fetch e4b
    ok "a damaged partial file: exit status 1" [ "$status" -eq 1 ]
    ok "a damaged partial file: is removed" [ ! -e "$file.part" ]
    ok "a damaged partial file: does not become the model" [ ! -e "$file" ]
fi
echo "another file" >"$file"
fetch e4b
ok "a file of another size: exit status 1" [ "$status" -eq 1 ]
ok "a file of another size: is kept" grep -q another "$file"
rm "$file"
cat "$tmp/payload" "$tmp/sha" - >"$file.part" <<END
more than the server has
END
fetch e4b
ok "a draft that is too large: exits 0" [ "$status" -eq 0 ]
ok "a draft that is too large: says so" has "removing it"
ok "a draft that is too large: the whole file" cmp -s "$tmp/payload" "$file"

# Prompts: the fake curl serves any address, so the hashes are those of the payload.
sed "s/[0-9a-f]\{64\} 1319 MIT/$(cat "$tmp/sha") 500 MIT/; s/- 500 MIT/- 499 MIT/" "$tmp/tree/run.sh" >"$tmp/tree/prompts.sh"
fetch_prompts() { # fetch_prompts NAME: like fetch
    PATH="$tmp/bin:$PATH" sh "$tmp/tree/prompts.sh" --fetch "$1" >"$tmp/out" 2>"$tmp/err"
    status=$?
}
cp "$tmp/payload" "$tmp/lines"
awk '{ print "{\"question\":\"" $0 "\"}" }' "$tmp/lines" >"$tmp/payload"
fetch_prompts gsm8k
ok "prompts of another SHA-256: exit status 1" [ "$status" -eq 1 ]
ok "prompts of another SHA-256: both sums" has "expected SHA-256 $(cat "$tmp/sha"), got "
ok "prompts of another SHA-256: no file" [ ! -e "$tmp/tree/models/gsm8k.jsonl" ]
fetch_prompts math
ok "a wrong number of prompts: exit status 1" [ "$status" -eq 1 ]
ok "a wrong number of prompts: says so" has "expected 499 lines of JSON objects; removed it"
ok "a wrong number of prompts: no file" [ ! -e "$tmp/tree/models/math.jsonl" ]
cp "$tmp/payload" "$tmp/more" && head -n 499 "$tmp/more" >"$tmp/payload"
fetch_prompts math
ok "prompts: exits 0" [ "$status" -eq 0 ]
ok "prompts: the whole file" cmp -s "$tmp/payload" "$tmp/tree/models/math.jsonl"
ok "prompts: the license" has "models/math.jsonl: complete: 499 prompts, license MIT; gemma4 eval MODEL --prompts "
touch "$tmp/offline"
fetch_prompts math
ok "prompts that are there: exits 0, without a network" [ "$status" -eq 0 ]
fetch_prompts humaneval
ok "prompts without a network: exit status 1" [ "$status" -eq 1 ]
ok "prompts without a network: one line" lines 1
rm "$tmp/offline"
if command -v gzip >/dev/null 2>&1; then
    head -n 164 "$tmp/more" | gzip >"$tmp/payload"
    sed -i.bak 's/[0-9a-f]\{64\} 164 MIT/- 164 MIT/' "$tmp/tree/prompts.sh"
    fetch_prompts humaneval
    ok "packed prompts: exits 0" [ "$status" -eq 0 ]
    ok "packed prompts: are unpacked" [ "$(grep -c '^{' "$tmp/tree/models/humaneval.jsonl")" -eq 164 ]
    ok "packed prompts: nothing else is left" [ ! -e "$tmp/tree/models/humaneval.jsonl.part" ]
fi
fetch nothing
ok "--fetch: lists draft models" grep -qE '^  26b-dflash +0.5 GB  Lucebox/' "$tmp/err"
ok "--fetch: lists prompts" grep -qE '^  gsm8k +prompts for gemma4 eval: 1319 of them, license MIT$' "$tmp/err"
cp "$tmp/lines" "$tmp/payload"

mkdir "$tmp/elsewhere" && ln -s elsewhere/link "$tmp/link" && ln -s "$tmp/tree/run.sh" "$tmp/elsewhere/link"
PATH="$tmp/bin:$PATH" sh "$tmp/link" --fetch e4b >"$tmp/out" 2>"$tmp/err"
status=$?
ok "a link to a link to run.sh: finds its folder" has "$file: complete"
(cd "$tmp" && PATH="$tmp/bin:$PATH" CDPATH=$tmp sh tree/run.sh --fetch e4b >"$tmp/out" 2>"$tmp/err")
status=$?
ok "CDPATH: finds its folder" has "tree/models/gemma-4-E4B-it-Q4_K_M.gguf: complete"
ok "CDPATH: exits 0" [ "$status" -eq 0 ]

# A PATH without curl.
mkdir "$tmp/few"
for tool in sh awk cat cut dirname grep mkdir mktemp mv rm sed tail tr uname wc; do
    ln -s "$(command -v $tool)" "$tmp/few/$tool"
done
PATH=$tmp/few sh "$tmp/tree/run.sh" --fetch e4b >"$tmp/out" 2>"$tmp/err"
status=$?
ok "no curl: exit status 1" [ "$status" -eq 1 ]
ok "no curl: one line" lines 1
ok "no curl: says so" has "curl not found; to install it:"
ok "no curl: no package manager: names curl" has "to install it: install curl with the package manager"

# ---- what is built and run -----------------------------------------------------------
cat >"$tmp/bin/make" <<'END'
#!/bin/sh
# make -s -C FOLDER TARGET: builds a gemma4 that prints its arguments; fails if $top/fails-TARGET exists.
echo "$4" >>"$top/made"
if [ -e "$top/fails-$4" ]; then
    printf 'note\nx(1): error: no luck with %s\nx(2): error: again\n' "$4" >&2
    exit 2
fi
printf '#!/bin/sh\necho "%s $*"\n' "$4" >"$3/gemma4" && chmod +x "$3/gemma4"
END
chmod +x "$tmp/bin/make"
export top="$tmp"                               # run.sh uses the name tmp itself
touch "$tmp/tree/gemma4_kernels.cu"
runs() { # runs NVCC [GPU]: runs run.sh with this nvcc and GPU; sets $status, writes $tmp/made, $tmp/out and $tmp/err
    : >"$tmp/made"
    PATH="$tmp/bin:$PATH" NVCC=$1 HAS_GPU=${2-one} sh "$tmp/tree/run.sh" m.gguf -p hi >"$tmp/out" 2>"$tmp/err"
    status=$?
}
made() { [ "$(tr '\n' ' ' <"$tmp/made")" = "$1" ]; }

runs nvcc
ok "a build: runs it" grep -qx 'all m.gguf -p hi' "$tmp/out"
runs nvcc
ok "a build that is there: the command alone" lines 1
mkdir "$tmp/tree/build"
PATH="$tmp/bin:$PATH" NVCC='' HAS_GPU='' sh "$tmp/tree/run.sh" m.gguf >"$tmp/out" 2>"$tmp/err"
ok "a model alone: a chat" grep -qx 'cpu m.gguf' "$tmp/out"
PATH="$tmp/bin:$PATH" NVCC='' HAS_GPU='' sh "$tmp/tree/run.sh" >"$tmp/out" 2>"$tmp/err"
ok "nothing: a story" grep -q 'gemma4-mini-q8_0.gguf -p Tell me a story about a fox. --temp 0$' "$tmp/out"
PATH="$tmp/bin:$PATH" NVCC='' HAS_GPU='' sh "$tmp/tree/run.sh" --image a.png >"$tmp/out" 2>"$tmp/err"
ok "a picture without a tower: gemma4 says what is missing" grep -q 'gemma4-mini-q8_0.gguf --image a.png -p What is in' "$tmp/out"
touch "$tmp/tree/models/gemma4-mini-mmproj-f16.gguf"
PATH="$tmp/bin:$PATH" NVCC='' HAS_GPU='' sh "$tmp/tree/run.sh" --image a.png >"$tmp/out" 2>"$tmp/err"
ok "a picture alone: what is in it" \
    grep -q -- '--mmproj .*/gemma4-mini-mmproj-f16.gguf --image a.png -p What is in this picture? --temp 0$' "$tmp/out"
PATH="$tmp/bin:$PATH" NVCC='' HAS_GPU='' sh "$tmp/tree/run.sh" --image a.png -mm b.gguf -p hi >"$tmp/out" 2>"$tmp/err"
ok "a picture with a tower: as it is" grep -q 'gemma4-mini-q8_0.gguf --image a.png -mm b.gguf -p hi$' "$tmp/out"
runs nvcc ""
ok "nvcc and no GPU: runs the CPU's" grep -qx 'cpu m.gguf -p hi' "$tmp/out"
ok "nvcc and no GPU: builds nothing else" made "cpu "
ok "nvcc and no GPU: one line more" lines 2
ok "nvcc and no GPU: says how to build for one" has "no GPU found, using the CPU; to build for a GPU in another machine: make cuda ARCH="
runs "" ""
ok "neither: runs the CPU's" grep -qx 'cpu m.gguf -p hi' "$tmp/out"
ok "neither: does not say how to build for a GPU" [ -z "$(grep 'make cuda' "$tmp/err")" ]
touch "$tmp/fails-all"
runs nvcc
ok "a CUDA build that fails: runs the CPU's" grep -qx 'cpu m.gguf -p hi' "$tmp/out"
ok "a CUDA build that fails: two lines" lines 2
ok "a CUDA build that fails: says why" has "a GPU needs CUDA 12 and sm_80, or newer: x(1): error: no luck with all"
touch "$tmp/fails-cpu"
runs ""
ok "a build that fails without nvcc: exit status 1" [ "$status" -eq 1 ]
ok "a build that fails without nvcc: the messages" has "x(2): error: again"
ok "a build that fails without nvcc: once" made "cpu "
runs nvcc
ok "both builds fail: exit status 1" [ "$status" -eq 1 ]
ok "both builds fail: the CPU's messages" has "no luck with cpu"
ok "both builds fail: nothing runs" [ ! -s "$tmp/out" ]
mv "$tmp/tree/build" "$tmp/tree/hidden"        # acts as not writable, also for root
runs nvcc
ok "a tree that is not writable: runs the existing program" grep -qx 'cpu m.gguf -p hi' "$tmp/out"
ok "a tree that is not writable: says so" has "cannot build: "
ok "a tree that is not writable: once" made "all "
rm "$tmp/tree/gemma4"
runs nvcc
ok "a tree that is not writable, with nothing to run: exit status 1" [ "$status" -eq 1 ]

if [ -f gemma4_kernels.cu ]; then
    for option in split-compile other; do
        printf '#!/bin/sh\necho "--%s <number>"\n' $option >"$tmp/bin/nvcc"
        chmod +x "$tmp/bin/nvcc"
        make -n B="$tmp/b" NVCC="$tmp/bin/nvcc" "$tmp/b/kernels.o" >"$tmp/$option" 2>"$tmp/err"
    done
    ok "an nvcc that knows --split-compile: it is used" grep -q -e '-lineinfo --split-compile=0 -arch' "$tmp/split-compile"
    ok "an nvcc that does not: it is left out" grep -q -e '-lineinfo  -arch' "$tmp/other"
    touch "$tmp/cublas_v2.h"
    for gpu in "" one; do                       # the program that make test builds
        MAKEFLAGS='' make -n B="$tmp/b" NVCC="$tmp/bin/nvcc" CUBLAS="$tmp/cublas_v2.h" HAS_GPU=$gpu JOBS=1 test >"$tmp/test$gpu" 2>"$tmp/err"
    done
    ok "make test, nvcc and a GPU: the kernels are compiled by nvcc" grep -q "^$tmp/bin/nvcc .* -o $tmp/b/kernels.o" "$tmp/testone"
    ok "make test, nvcc and a GPU: its ./gemma4 is CUDA's" grep -q "GEMMA4=.*/gemma4-cuda" "$tmp/testone"
    ok "make test, nvcc and no GPU: no nvcc" [ -z "$(grep "^$tmp/bin/nvcc" "$tmp/test")" ]
    ok "make test, nvcc and no GPU: the CPU's programs" grep -q -e "-o $tmp/b/test_ops " "$tmp/test"
    for target in "$tmp/b/make_gguf" "$tmp/b/test_ops" bench; do
        MAKEFLAGS='' make -n B="$tmp/b" NVCC="$tmp/bin/nvcc" CUBLAS="$tmp/cublas_v2.h" HAS_GPU='' "$target" >"$tmp/out" 2>"$tmp/err"
        status=$?
        ok "make ${target##*/}, nvcc and no GPU: exits 0" [ "$status" -eq 0 ]
        ok "make ${target##*/}, nvcc and no GPU: no nvcc" [ -z "$(grep "^$tmp/bin/nvcc" "$tmp/out")" ]
    done
    ok "make bench leaves ./gemma4 alone" [ -z "$(grep -E 'cp -f|cmp -s' "$tmp/out")" ]
    ok "make bench runs what it has built" grep -q "^$tmp/b/gemma4-cpu bench " "$tmp/out"
    ok "make test, nvcc and no GPU: the CPU's gemma4" grep -q "GEMMA4=.*/gemma4-dev" "$tmp/test"

    mkdir -p "$tmp/toolkit/lib/stubs"
    cat >"$tmp/bin/nvcc" <<'END'
#!/bin/sh
case " $* " in
*" --list-gpu-code "*) printf 'sm_%s\n' 75 80 86 87 89 90 120 ;;
*" --dryrun "*) printf '#$ LIBRARIES=  "-L%s/lib/stubs" "-L%s/bin/../lib" "-L/usr/lib"\n' "$tmp/toolkit" "$tmp/toolkit" >&2 ;;
esac
END
    mkdir "$tmp/toolkit/bin"
    compiles() { # compiles ARCH FLAGS: nvcc must get FLAGS for ARCH
        MAKEFLAGS='' make -n B="$tmp/b" HTTP=0 NVCC="$tmp/bin/nvcc" ARCH="$1" "$tmp/b/kernels.o" >"$tmp/out" 2>"$tmp/err"
        status=$?
        flags=$(grep "^$tmp/bin/nvcc" "$tmp/out" | grep -oE -e '-(arch|gencode|code)[ =][^ ]*' | tr '\n' ' ')
        ok "ARCH=$1" [ "$flags" = "$2 " ]
    }
    compiles sm_86 "-arch=sm_86"
    compiles native "-arch=native"
    pair() { echo "-gencode arch=compute_$1,code=sm_$2"; }
    compiles all-major "$(pair 80 80) $(pair 86 86) $(pair 89 89) $(pair 90 90) $(pair 120 120)"
    compiles compute_86:sm_90 "$(pair 86 90)"
    compiles "compute_86:sm_90 compute_120:sm_120" "$(pair 86 90) $(pair 120 120)"
    # The C compiler links, with the flags of pkg-config, which nvcc does not take.
    MAKEFLAGS='' make -n B="$tmp/b" HTTP=0 NVCC="$tmp/bin/nvcc" CUBLAS="$tmp/cublas_v2.h" ENGINE=cuda CC=some-cc \
        LDFLAGS=-L/some HTTP_LIB='-Wl,-z,relro -lmicrohttpd' "$tmp/b/gemma4-cuda" "$tmp/b/test_layout" >"$tmp/out" 2>"$tmp/err"
    status=$?
    libraries="-L/usr/lib -Wl,-rpath,$(cd "$tmp/toolkit/lib" && pwd -P) -lcublas -lcudart_static "
    for program in gemma4-cuda test_layout; do
        grep -E "^[^ ]*cc .*/kernels.o -o $tmp/b/$program " "$tmp/out" >"$tmp/link"
        ok "the link of $program: one" [ "$(grep -c '' "$tmp/link")" -eq 1 ]
        ok "the link of $program: by the C compiler" grep -q "^some-cc .*$tmp/b/$program.o " "$tmp/link"
        ok "the link of $program: LDFLAGS" grep -q -e ' -L/some ' "$tmp/link"
        ok "the link of $program: the toolkit's libraries, found again at run time" grep -qF -e "$libraries" "$tmp/link"
        ok "the link of $program: no stubs" [ -z "$(grep stubs "$tmp/link")" ]
    done
    ok "the link of gemma4-cuda: flags of pkg-config" grep -q -e "-o $tmp/b/gemma4-cuda .*-Wl,-z,relro -lmicrohttpd" "$tmp/out"
fi

# ---- make install: the program, a manual page, completions ---------------------------
shared=$tmp/dest/usr/share man=$tmp/dest/usr/share/man/man1/gemma4.1
if [ -x "$gemma4" ]; then
    MAKEFLAGS='' make install BIN="$gemma4" DESTDIR="$tmp/dest" PREFIX=/usr >"$tmp/out" 2>"$tmp/err"
    status=$?
    ok "make install: exits 0" [ "$status" -eq 0 ]
    ok "make install: the program" cmp -s "$gemma4" "$tmp/dest/usr/bin/gemma4"
    ok "make install: a manual page" grep -q '^\.SH FLAGS: sampling$' "$man"
    ok "the manual page has the flags of commands" grep -q '^\.B \\-np, \\-\\-parallel N$' "$man"
    ok "the manual page has the chat's commands" grep -q '^\.B /bye ' "$man"
    ok "the manual page has flags of other programs" grep -q '^\.B \\-ngl ' "$man"
    if command -v groff >/dev/null 2>&1; then
        ok "the manual page: no warnings" [ -z "$(groff -man -Tutf8 -ww -z "$man" 2>&1)" ]
    else
        skip "no groff: the manual page"
    fi
    if command -v bash >/dev/null 2>&1; then
        completes() { # completes WANT WORD...: what Tab offers for the last word
            want=$1
            shift
            # shellcheck disable=SC2016  # bash expands them
            got=$(bash -c '. "$1"; shift; COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)); _gemma4; echo "${COMPREPLY[@]}"' - \
                "$shared/bash-completion/completions/gemma4" "$@" 2>"$tmp/err")
            ok "bash completes '$*' to '$want', got '$got'" [ "$got" = "$want" ]
        }
        completes "serve" gemma4 serv
        completes "--output" gemma4 bench m.gguf --out
        completes "auto" gemma4 m.gguf --spec a
        completes "md csv" gemma4 niah m.gguf -o ""
        completes "--threads" gemma4 serve m.gguf --thr
    else
        skip "no bash: its completions"
    fi
    if command -v zsh >/dev/null 2>&1; then
        mkdir -p "$tmp/zsh/folder" && touch "$tmp/zsh/m.gguf" "$tmp/zsh/text.txt"
        cat >"$tmp/lines" <<'LINES'
gemma4 serv|serve
gemma4 serve m.gguf --thr|--threads
gemma4 bench m.gguf --out|--output
gemma4 m.gguf --spec a|auto
gemma4 niah m.gguf -o |md csv
gemma4 m|m.gguf
gemma4 m.gguf -f t|text.txt
gemma4 serve m.gguf --session-dir |folder
LINES
        script=$PWD/tests/completions.zsh
        (cd "$tmp/zsh" && cut -d '|' -f 1 "$tmp/lines" | $limit zsh "$script" "$shared/zsh/site-functions") >"$tmp/offers" 2>"$tmp/err"
        paste -d '|' "$tmp/lines" "$tmp/offers" >"$tmp/both"
        while IFS='|' read -r line want got; do
            ok "zsh completes '$line' to '$want', got '$got'" [ "$got" = "$want" ]
        done <"$tmp/both"
    else
        skip "no zsh: its completions"
    fi
else
    skip "no gemma4 to install"
fi

finish run_sh
