#!/bin/sh
# The table of docs/commands.md: commands from the manuals of llama.cpp, Lucebox, Ollama and vLLM, and what they do here. Runs each
# command on the small model and compares its exit status and what it says with the table.
#
#   tests/test_commands.sh --write      writes the table again
# Environment: GEMMA4 (the binary, ./gemma4).
cd "$(dirname "$0")/.." || exit 1
. tests/harness.sh
table=$PWD/docs/commands.md
gemma4=$(cd "$(dirname "$gemma4")" && pwd)/$(basename "$gemma4")
models=$PWD/models
cd "$tmp" || exit 1
ln -s "$models/gemma4-mini-q8_0.gguf" m.gguf
ln -s "$models/gemma4-mini-mtp-q8_0.gguf" draft.gguf
ln -s "$models/gemma4-mini-dflash-q8_0.gguf" dflash.gguf
mkdir drafter several                             # folders with one GGUF file, with two
ln -s "$models/gemma4-mini-mtp-q8_0.gguf" drafter/mtp.gguf
: >drafter/README.md
ln -s "$models/gemma4-mini-mtp-q8_0.gguf" several/a.gguf
ln -s "$models/gemma4-mini-mtp-q8_0.gguf" several/b.gguf
echo "Tell me a story." >prompt.txt
yes "The fox ran home." | head -n 40 >long.txt
echo 'root ::= "apple, pear, plum"' >list.gbnf
"$gemma4" serve m.gguf --host 203.0.113.1 --port 0 2>&1 | grep -q libmicrohttpd && no_server=1

# Runs a command and prints what it does: works, or the note, or the error.
outcome() {
    case $1 in
    llama-cli*) words=${1#llama-cli} ;;
    llama-server*) words="serve ${1#llama-server}" ;;
    "vllm serve"*) words="serve ${1#vllm serve}" ;;
    test_gemma4_dflash*) words=${1#test_gemma4_dflash} ;;
    dflash_server*) words="serve ${1#dflash_server}" ;;
    llama-bench*) words="bench ${1#llama-bench}" ;;
    llama-perplexity*) words="ppl ${1#llama-perplexity}" ;;
    llama-tokenize*) words="tokenize ${1#llama-tokenize}" ;;
    llama-quantize*) words="quantize ${1#llama-quantize}" ;;
    ollama*) words=${1#ollama} ;;
    esac
    case $words in
    serve*m.gguf*)                                # ends when it serves
        eval "exec \"\$gemma4\" $words --port 0" >out 2>err </dev/null &
        pid=$!
        for _ in $(seq 1200); do
            grep -qs '^# serving at ' err && break
            kill -0 $pid 2>/dev/null || break
            sleep 0.02
        done
        kill -TERM $pid 2>/dev/null
        wait $pid
        status=$? ;;
    *)  echo "Hello" >in
        eval "$limit \"\$gemma4\" $words" >out 2>err <in
        status=$? ;;
    esac
    [ $status -gt 0 ] || [ -s out ] || grep -q '^# serving at ' err || [ -s out.gguf ] || echo "nothing was printed"
    note=$(sed -n 's/^# not needed: /note: /p' err)
    case $status in
    0) echo "${note:-works}" ;;
    1) sed -n 's/^gemma4: error: /refused: /p' err ;;
    *) echo "exit status $status" ;;
    esac
}

sed -n 's/^| `\(.*\)` | \(.*\)|$/\1\n\2/p' "$table" >rows
sed '/^| `/d' "$table" >written
while IFS= read -r command && IFS= read -r want; do
    if [ "$no_server" ] && [ "${command#*server}${command#*serve }" != "$command$command" ]; then
        skip "$command: this build has no server"
        continue
    fi
    got=$(outcome "$command" | sed 's/|/\\|/g')
    rm -f out.gguf
    echo "| \`$command\` | $got |" >>written
    [ "$1" = --write ] || check "$([ "${want% }" = "$got" ]; echo $?)" "$command: expected '$want', got '$got'"
done <rows
if [ "$1" = --write ]; then cp written "$table"; fi
n=$(grep -c '^| `' "$table")
check "$([ "$n" -ge 40 ]; echo $?)" "docs/commands.md: at least 40 commands, got $n"
finish commands
