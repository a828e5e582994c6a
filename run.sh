#!/bin/sh
# Builds gemma4 and runs it:   ./run.sh [MODEL.gguf] [gemma4 flags ...]
#
# The model is the first argument, else $GEMMA4_MODEL, else the small one in models/. Without flags it tells a story.
# Works from any directory. Everything but the generated text goes to stderr.
here=$(cd "$(dirname "$0")" && pwd) || exit 1

say() { echo "run.sh: $*" >&2; }

# The command that installs a package on this system. The arguments are the names it has with: apt, dnf, apk,
# pacman, zypper.
how_to_install() {
    if [ "$(uname -s)" = Darwin ]; then echo "xcode-select --install"
    elif command -v apt-get >/dev/null 2>&1; then echo "apt-get install $1"
    elif command -v dnf >/dev/null 2>&1; then echo "dnf install $2"
    elif command -v apk >/dev/null 2>&1; then echo "apk add $3"
    elif command -v pacman >/dev/null 2>&1; then echo "pacman -S $4"
    elif command -v zypper >/dev/null 2>&1; then echo "zypper install $5"
    else echo "install gcc and make with the package manager of this system"
    fi
}

# Prints $1 as a word that a shell reads back unchanged.
quote() {
    case $1 in
    '' | *[!A-Za-z0-9_./=,:+-]*) printf "'%s' " "$(printf '%s' "$1" | sed "s/'/'\\\\''/g")" ;;
    *) printf '%s ' "$1" ;;
    esac
}

# ---- what the build needs ------------------------------------------------------------
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
printf '#include <stdio.h>\nint main(void) { return puts("") < 0; }\n' >"$tmp/c.c"
for compiler in ${CC:+"$CC"} cc gcc clang none; do
    # shellcheck disable=SC2086  # CC may hold flags
    $compiler "$tmp/c.c" -o "$tmp/c" >/dev/null 2>&1 && break
done
if [ "$compiler" = none ]; then
    say "no working C compiler; to add one: $(how_to_install build-essential 'gcc make' build-base base-devel 'gcc make')"
    exit 1
fi
if ! command -v make >/dev/null 2>&1; then
    say "no make; to add it: $(how_to_install make make make make make)"
    exit 1
fi
export CC="$compiler"
if [ -f "$here/gemma4_kernels.cu" ] && ! command -v nvcc >/dev/null 2>&1 && [ ! -x /usr/local/cuda/bin/nvcc ]; then
    say "no nvcc, so the CPU is used; to add it: $(how_to_install nvidia-cuda-toolkit cuda-toolkit \
        'the CUDA toolkit' cuda cuda-toolkit)"
fi
make -s -C "$here" >&2 || { say "the build failed; the compiler's messages are above"; exit 1; }

# ---- what to run ---------------------------------------------------------------------
model=${GEMMA4_MODEL:-$here/models/gemma4-mini-q8_0.gguf}
case ${1:-} in
'' | -*) ;;
*) model=$1; shift ;;
esac
[ $# -gt 0 ] || set -- -p "Tell me a story about a fox." --temp 0
set -- "$here/gemma4" "$model" "$@"
{ printf '# '; for word in "$@"; do quote "$word"; done; echo; } >&2
rm -rf "$tmp"
exec "$@"
