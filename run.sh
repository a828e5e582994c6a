#!/bin/sh
# Builds gemma4 and runs it:    ./run.sh [MODEL.gguf] [gemma4 flags ...]
# Says what is in a picture:    ./run.sh --image FILE
# Downloads a model to models/: ./run.sh --fetch NAME          (resumes a partial download; without NAME: the list)
#                               ./run.sh --fetch best          (the one that suits this machine; says why)
# Downloads prompts for gemma4 eval: ./run.sh --fetch humaneval  (or gsm8k, math)
#
# The model is the first argument, else $GEMMA4_MODEL, else the small one in models/. Without any argument it tells a story.
# Works from any directory. Everything but the generated text goes to stderr.
self=$0
while [ -h "$self" ]; do            # a link to run.sh: the folder is that of the file itself
    link=$(readlink "$self") || exit 1
    case $link in
    /*) self=$link ;;
    *) self=$(dirname -- "$self")/$link ;;
    esac
done
here=$(CDPATH='' cd -- "$(dirname -- "$self")" && pwd) || exit 1

say() { echo "run.sh: $*" >&2; }

# Prints the command that installs a package on this system. Arguments: its general name, the command on a Mac, and its name for
# apt, dnf, apk, pacman and zypper.
how_to_install() {
    if [ "$(uname -s)" = Darwin ]; then echo "$2"
    elif command -v apt-get >/dev/null 2>&1; then echo "apt-get install $3"
    elif command -v dnf >/dev/null 2>&1; then echo "dnf install $4"
    elif command -v apk >/dev/null 2>&1; then echo "apk add $5"
    elif command -v pacman >/dev/null 2>&1; then echo "pacman -S $6"
    elif command -v zypper >/dev/null 2>&1; then echo "zypper install $7"
    else echo "install $1 with the package manager of this system"
    fi
}

# Prints $1 as a word that a shell reads back unchanged.
quote() {
    case $1 in
    '' | *[!A-Za-z0-9_./=,:+-]*) printf "'%s' " "$(printf '%s' "$1" | sed "s/'/'\\\\''/g")" ;;
    *) printf '%s ' "$1" ;;
    esac
}

# ---- models to download --------------------------------------------------------------
# Name, repository on huggingface.co, file, approximate size in GB. Publishers replace files, so the exact size and SHA-256 come from
# the server at download time (headers X-Linked-Size and X-Linked-ETag).
models() {
    cat <<'END'
e2b    unsloth/gemma-4-E2B-it-GGUF       gemma-4-E2B-it-Q4_K_M.gguf      3.1
e2b-q8 ggml-org/gemma-4-E2B-it-GGUF      gemma-4-E2B-it-Q8_0.gguf        5.0
e4b    ggml-org/gemma-4-E4B-it-GGUF      gemma-4-E4B-it-Q4_K_M.gguf      5.3
12b    ggml-org/gemma-4-12B-it-GGUF      gemma-4-12B-it-Q4_K_M.gguf      7.4
26b    ggml-org/gemma-4-26B-A4B-it-GGUF  gemma-4-26B-A4B-it-Q4_K_M.gguf  16.8
31b    ggml-org/gemma-4-31B-it-GGUF      gemma-4-31B-it-Q4_K_M.gguf      18.7
e2b-mtp     ggml-org/gemma-4-E2B-it-GGUF  mtp-gemma-4-E2B-it-Q8_0.gguf    0.1
e4b-mtp     ggml-org/gemma-4-E4B-it-GGUF  mtp-gemma-4-E4B-it-Q8_0.gguf    0.1
12b-mtp     ggml-org/gemma-4-12B-it-GGUF  mtp-gemma-4-12B-it-Q8_0.gguf    0.5
26b-dflash  Lucebox/gemma-4-26B-A4B-it-DFlash-GGUF  gemma-4-26B-A4B-it-DFlash-q8_0.gguf  0.5
31b-dflash  Lucebox/gemma-4-31B-it-DFlash-GGUF      gemma-4-31B-it-DFlash-q8_0.gguf      1.6
END
}

# Prompts for gemma4 eval: name, address, SHA-256 of what is there or -, number of prompts, license.
prompts() {
    cat <<'END'
humaneval https://raw.githubusercontent.com/openai/human-eval/6d43fb980f9fee3c892a914eda09951f772ad10d/data/HumanEval.jsonl.gz b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef 164 MIT
gsm8k https://raw.githubusercontent.com/openai/grade-school-math/3101c7d5072418e28b9008a6636bde82a006892c/grade_school_math/data/test.jsonl 3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14 1319 MIT
math https://huggingface.co/datasets/HuggingFaceH4/MATH-500/resolve/main/test.jsonl - 500 MIT
END
}

# Prints GiB of memory: of the first GPU, or 0; of the host, or 0.
gpu_gib() {
    mib=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null | head -n 1)
    case $mib in '' | *[!0-9]*) echo 0 ;; *) echo $(((mib + 512) / 1024)) ;; esac
}
host_gib() {
    pages=$(getconf _PHYS_PAGES 2>/dev/null) size=$(getconf PAGE_SIZE 2>/dev/null)
    case $pages$size in
    '' | *[!0-9]*) echo $(($(sysctl -n hw.memsize 2>/dev/null || echo 0) / 1073741824)) ;;
    *) echo $((pages / 1024 * size / 1048576)) ;;
    esac
}

# Prints the name of the model that suits this machine, and why. Room beside the weights: 3 GiB for caches and buffers. Experts that
# a GPU has no room for may lie in host memory; the file's pages pass through it too.
best() {
    gpu=$(gpu_gib) host=$(host_gib)
    if [ "$gpu" -ge 22 ]; then echo "31b its 18.7 GB fit into the GPU's $gpu GiB"
    elif [ "$gpu" -ge 19 ]; then echo "26b its 16.8 GB fit into the GPU's $gpu GiB"
    elif [ "$gpu" -ge 6 ] && [ "$host" -ge 22 ]; then
        echo "26b a token reads 4 of its 25 billion weights; experts that the GPU's $gpu GiB cannot hold lie in $host GiB of host memory"
    elif [ "$gpu" -ge 11 ]; then echo "12b its 7.4 GB fit into the GPU's $gpu GiB"
    elif [ "$gpu" -ge 7 ]; then echo "e4b its 5.3 GB fit into the GPU's $gpu GiB"
    elif [ "$gpu" -ge 4 ]; then echo "e2b its 3.1 GB fit into the GPU's $gpu GiB"
    elif [ "$host" -ge 22 ]; then echo "26b a token reads 4 of its 25 billion weights, and they fit into $host GiB of host memory"
    elif [ "$host" -ge 9 ]; then echo "e4b its 5.3 GB fit into $host GiB of host memory"
    else echo "e2b it is the smallest; this machine has $host GiB of memory"
    fi
}

bytes_of() { wc -c <"$1" | tr -d ' '; }

# Prints the SHA-256 of a file; nothing if this system has no program for it.
sha256_of() {
    if command -v sha256sum >/dev/null 2>&1; then sha256sum "$1" | cut -d ' ' -f 1
    elif command -v shasum >/dev/null 2>&1; then shasum -a 256 "$1" | cut -d ' ' -f 1
    elif command -v openssl >/dev/null 2>&1; then openssl dgst -sha256 "$1" | sed 's/.* //'
    fi
}

# header NAME HEADERS: prints its value in the first response that has it, without quotes.
header() { printf '%s\n' "$2" | tr -d '\r"' | awk -v name="$1:" 'tolower($1) == name { print $2; exit }'; }

# is_complete FILE SIZE SHA256: compares the file with the server's size and hash, and prints the result.
is_complete() {
    got=$(bytes_of "$1")
    [ "$got" -eq "$2" ] || { say "$1: expected $2 bytes, got $got"; return 1; }
    got=$(sha256_of "$1")
    if [ -z "$3" ] || [ -z "$got" ]; then say "$1: complete: size matches; no SHA-256 to compare"
    elif [ "$got" != "$3" ]; then say "$1: expected SHA-256 $3, got $got"; return 1
    else say "$1: complete: size and SHA-256 match"
    fi
}

need_curl() {
    command -v curl >/dev/null 2>&1 && return
    say "--fetch: curl not found; to install it: $(how_to_install curl "brew install curl" curl curl curl curl curl)"
    return 1
}

# is_whole FILE COUNT: the file has that many lines of JSON objects.
is_whole() {
    [ "$(grep -c '' "$1")" -eq "$2" ] && [ "$(grep -c '^{.*}' "$1")" -eq "$2" ]
}

# fetch_prompts NAME ADDRESS SHA256 COUNT LICENSE: downloads prompts to models/NAME.jsonl.
fetch_prompts() {
    file=$here/models/$1.jsonl part=$here/models/$1.jsonl.part
    use="gemma4 eval MODEL --prompts $file"
    if [ -f "$file" ]; then
        is_whole "$file" "$4" || { say "$file: expected $4 lines of JSON objects; move it away to download it again"; return 1; }
        say "$file: complete: $4 prompts, license $5; $use"
        return 0
    fi
    need_curl || return 1
    mkdir -p "$here/models" || return 1
    rm -f "$part"
    curl -fL --progress-bar -o "$part" "$2" || { rm -f "$part"; say "--fetch: $2: download failed; is there a network connection?"; return 1; }
    got=$(sha256_of "$part")
    if [ "$3" != - ] && [ "$got" ] && [ "$got" != "$3" ]; then
        rm -f "$part"
        say "--fetch: $2: expected SHA-256 $3, got $got; removed it"
        return 1
    fi
    case $2 in
    *.gz) gzip -dc <"$part" >"$file" || { rm -f "$part" "$file"; say "--fetch: $2: cannot unpack; removed it"; return 1; } ;;
    *) mv "$part" "$file" ;;
    esac
    rm -f "$part"
    is_whole "$file" "$4" || { rm -f "$file"; say "--fetch: $2: expected $4 lines of JSON objects; removed it"; return 1; }
    say "$file: complete: $4 prompts, license $5; $use"
}

# Downloads the file of that name to models/FILE.part, checks size and SHA-256, and makes it models/FILE.
fetch() {
    if [ "$1" = best ]; then
        choice=$(best)
        say "--fetch ${choice%% *}: ${choice#* }; any context and cache type that fits is planned at start"
        set -- "${choice%% *}"
    fi
    line=$(prompts | awk -v name="$1" '$1 == name')
    if [ "$line" ]; then
        # shellcheck disable=SC2086  # the line's words
        fetch_prompts $line
        return
    fi
    line=$(models | awk -v name="$1" '$1 == name')
    if [ -z "$line" ]; then
        say "--fetch: expected one of these names, got '$1'; NAME-mtp and NAME-dflash are draft models, for -md"
        models | awk '{ printf "  %-10s %5s GB  %s  %s\n", $1, $4, $2, $3 }' >&2
        prompts | awk '{ printf "  %-10s prompts for gemma4 eval: %s of them, license %s\n", $1, $4, $5 }' >&2
        return 1
    fi
    # shellcheck disable=SC2086  # the line's words
    set -- $line
    file=$here/models/$3 part=$here/models/$3.part url=https://huggingface.co/$2/resolve/main/$3
    need_curl || return 1
    headers=$(curl -sIL "$url") || { say "--fetch: $url: no response; is there a network connection?"; return 1; }
    size=$(header x-linked-size "$headers") sha=$(header x-linked-etag "$headers")
    case $size in
    '' | *[!0-9]*)
        say "--fetch: $url: expected a file size, got: $(printf '%s\n' "$headers" | tr -d '\r' | grep '^HTTP' | tail -n 1)"
        return 1 ;;
    esac
    case $sha in *[!0-9a-f]*) sha= ;; esac
    [ ${#sha} -eq 64 ] || sha=
    say "$url: $size bytes, SHA-256 ${sha:-not given}"
    mkdir -p "$here/models" || return 1
    if [ -f "$file" ]; then
        is_complete "$file" "$size" "$sha" || { say "move it away to download it again"; return 1; }
        return 0
    fi
    if [ -f "$part" ] && [ "$(bytes_of "$part")" -gt "$size" ]; then
        say "$part: expected at most $size bytes, got $(bytes_of "$part"); removing it"
        rm -f "$part" || return 1
    fi
    if [ ! -f "$part" ] || [ "$(bytes_of "$part")" -ne "$size" ]; then
        curl -fL -C - --progress-bar -o "$part" "$url"
        case $? in
        0) ;;
        23) say "--fetch: $part: cannot write; is the disk full, or models/ read-only?"; return 1 ;;
        *) say "--fetch: download interrupted; run the same command to resume it"; return 1 ;;
        esac
    fi
    is_complete "$part" "$size" "$sha" || { rm -f "$part"; say "removed it; try again"; return 1; }
    mv "$part" "$file"
}

# Prints the command line that gemma4 plan recommends for a file in models/ on this machine; nothing before the first build.
advise() {
    [ -x "$here/gemma4" ] || return 0
    line=$("$here/gemma4" plan "$1" 2>/dev/null | sed -n 's/^recommended: gemma4 //p')
    [ -z "$line" ] || say "recommended here: $here/gemma4 $line; gemma4 plan $1 says why"
}

case ${1:-} in
--fetch)
    [ $# -le 2 ] || { say "--fetch: expected one name, got more"; exit 1; }
    fetch "${2:-}" || exit 1
    if [ "${2:-}" = best ]; then advise "$file"; fi
    exit ;;
-h | --help)
    sed -n '2,9s/^# \{0,1\}//p' "$0"
    echo ;;
esac

# ---- what the build needs ------------------------------------------------------------
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
printf '#include <stdio.h>\nint main(void) { return puts("") < 0; }\n' >"$tmp/c.c"
for compiler in ${CC:+"$CC"} cc gcc clang none; do
    # shellcheck disable=SC2086  # CC may hold flags
    $compiler "$tmp/c.c" -o "$tmp/c" >/dev/null 2>&1 && break
done
if [ "$compiler" = none ]; then
    say "no working C compiler; to install one: $(how_to_install 'gcc and make' 'xcode-select --install' \
        build-essential 'gcc make' build-base base-devel 'gcc make')"
    exit 1
fi
if ! command -v make >/dev/null 2>&1; then
    say "make not found; to install it: $(how_to_install make 'xcode-select --install' make make make make make)"
    exit 1
fi
export CC="$compiler"
# As in the Makefile. Without a GPU nvcc would spend minutes on kernels that cannot run here.
nvcc=${NVCC-$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)}
gpu=${HAS_GPU-$(ls /dev/nvidiactl /dev/dxg /dev/nvhost-gpu 2>/dev/null)}
if [ -n "$nvcc" ] && [ -z "$gpu" ]; then
    say "no GPU found, using the CPU; to build for a GPU in another machine: make cuda ARCH=sm_90 (or sm_80, sm_120, all-major)"
    nvcc=
elif [ -f "$here/gemma4_kernels.cu" ] && [ -z "$nvcc" ] && [ "$(uname -s)" = Linux ] && ! command -v apk >/dev/null 2>&1; then
    say "nvcc not found, using the CPU; for a GPU (sm_80 or newer), to install CUDA 12 or newer: $(how_to_install 'the CUDA toolkit' '' \
        nvidia-cuda-toolkit cuda-toolkit '' cuda cuda-toolkit)"
fi

[ -x "$here/gemma4" ] || say "building${nvcc:+; nvcc needs a few minutes for the kernels}"
build() { make -s -C "$here" "$1" >"$tmp/log" 2>&1; }
target=cpu
[ -z "$nvcc" ] || target=all
if build $target; then
    cat "$tmp/log" >&2
else
    error=$(awk 'tolower($0) ~ /error|fatal|denied|read-only|not found/ { print; exit }' "$tmp/log")
    if [ -x "$here/gemma4" ] && ! { [ -w "$here" ] && [ -w "$here/build" ]; }; then
        say "cannot build: $here is not writable ($error); running the existing gemma4"
    elif [ -n "$nvcc" ] && build cpu; then
        say "the CUDA build failed, using the CPU (tests: make test ENGINE=cpu); a GPU needs CUDA 12 and sm_80, or newer: $error"
    else
        cat "$tmp/log" >&2
        say "the build failed; the compiler's messages are above"
        exit 1
    fi
fi

# ---- what to run ---------------------------------------------------------------------
model=${GEMMA4_MODEL:-$here/models/gemma4-mini-q8_0.gguf}
case ${1:-} in
'') set -- -p "Tell me a story about a fox." --temp 0 ;;
--image) [ $# -ne 2 ] || set -- "$@" -p "What is in this picture?" --temp 0 ;;
-*) ;;
*) model=$1; shift ;;
esac
# The small model comes with an image tower.
tower=${model%-q8_0.gguf}-mmproj-f16.gguf
case " $* " in
*" --mmproj "* | *" -mm "*) ;;
*" --image "*) [ ! -f "$tower" ] || set -- --mmproj "$tower" "$@" ;;
esac
# The small model comes with a draft model. gemma4 uses it where that makes answers faster on this machine.
drafter=${model%-q8_0.gguf}-dflash-q8_0.gguf
case " $* " in
*" -md "* | *" --model-draft "* | *" --spec "*) ;;
*)
    if [ "$drafter" != "$model" ] && [ -f "$drafter" ]; then
        say "using the draft model $drafter for speculative decoding; output is unchanged; --spec off disables it"
        set -- -md "$drafter" "$@"
    fi ;;
esac
set -- "$here/gemma4" "$model" "$@"
{ printf '# '; for word in "$@"; do quote "$word"; done; echo; } >&2
rm -rf "$tmp"
exec "$@"
