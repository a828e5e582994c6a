# completions.zsh - what zsh offers after Tab: loads the completions of gemma4 as a shell of a user does, in a pseudo-terminal.
#   zsh tests/completions.zsh FOLDER <LINES      FOLDER: of _gemma4
# Prints for each line the words that zsh offers for its last word, without repetitions, on one line.
zmodload zsh/zpty || exit 1
zpty shell zsh -f -i
zpty -w shell "PROMPT= RPROMPT=; stty -echo; fpath=(${(q)1} \$fpath); autoload -Uz compinit; compinit -D -u"
# compadd -O lists the words that match; the functions of zsh call it with -O, -A or -D for themselves
zpty -w shell 'compadd() {
    [[ ${@[1,(i)(-|--)]} == *-(O|A|D)\ * ]] && { builtin compadd "$@"; return }
    local -a words; builtin compadd -O words "$@"; print -rn -- "${(j: :)words} "; builtin compadd "$@" }'
zpty -w shell 'offer() { print -rn -- "<<"; _main_complete; print -r -- ">>"; compstate[insert]= compstate[list]=; }'
zpty -w shell 'zle -C offer complete-word offer; bindkey "^I" offer; print READY'
zpty -r shell text '*READY*READY*'
while IFS= read -r line; do
    zpty -w -n shell "$line"$'\t'
    zpty -r shell text '*<<*>>*'
    print -r -- ${(u)=${${text#*<<}%%>>*}}
    zpty -w -n shell $'\x15'                 # Ctrl-U: an empty line
done
