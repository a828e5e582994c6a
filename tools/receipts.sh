#!/bin/sh
# Writes figures in README.md and docs/*.md again from the tables in docs/receipts/ (make receipts):
#   <!-- receipt NAME.csv CELL .. -->   what follows, up to <!-- end -->, is a table. CELL: a column; COLUMN=VALUE chooses
#                                       rows, COLUMN~WORD those whose cell has this word, COLUMN!WORD the others
#   ![..](receipts/NAME.KIND.svg)       a picture: gemma4 plot NAME.csv --kind KIND
#
#   tools/receipts.sh [--check] [FOLDER]     --check: changes nothing, names what differs, and then ends with status 1
# FOLDER: of README.md and docs; default: this tree. Environment: GEMMA4 (the binary, ./gemma4).
here=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd) || exit 1
gemma4=${GEMMA4:-$here/gemma4}
check=
if [ "${1:-}" = --check ]; then check=1; shift; fi
cd "${1:-$here}" || exit 1
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
differs=0

# settle FILE: $tmp/new is what it has to be.
settle() {
    if cmp -s "$tmp/new" "$1"; then return; fi
    if [ "$check" ]; then
        echo "receipts: $1 differs from docs/receipts; run make receipts" >&2
        differs=1
    else
        cp "$tmp/new" "$1" && echo "receipts: $1 written" >&2
    fi
}

for page in README.md docs/*.md; do
    [ -f "$page" ] || continue
    awk '
    function fail(text) { print "receipts: " FILENAME ":" FNR ": " text >"/dev/stderr"; failed = 1; exit 1 }
    function shown(v) {                                # a cell as the page shows it
        if (v !~ /^-?[0-9]*\.[0-9]*(e[-+]?[0-9]+)?$/) return v
        return sprintf(v >= 1000 ? "%.0f" : v >= 100 ? "%.1f" : v >= 1 ? "%.2f" : "%.3f", v)
    }
    function table(words, n,    file, line, k, i, op, name, value, head, at, cell, keep, n_cells, n_rows, rule, names, row, found) {
        file = "docs/receipts/" words[3]
        for (i = 4; i < n; i++) {                      # a column; or a column, one of = ~ !, and a value
            k = match(words[i], /[=~!]/)
            name[i] = k ? substr(words[i], 1, k - 1) : words[i]
            op[i] = k ? substr(words[i], k, 1) : ""
            value[i] = substr(words[i], k + 1)
        }
        while ((k = (getline line <file)) > 0) {
            if (line ~ /^#/ || line == "") continue
            gsub(/"/, "", line)                        # a comma in a cell would make one cell too many
            n_cells = split(line, cell, ",")
            if (!head) {
                head = n_cells
                for (i = 1; i <= n_cells; i++) at[cell[i]] = i
                names = "|"; rule = "|"
                for (i = 4; i < n; i++) {
                    if (!(name[i] in at)) fail(file ": it has no column " name[i])
                    if (op[i] == "") { names = names " " name[i] " |"; rule = rule "---|" }
                }
                print names; print rule
                continue
            }
            if (n_cells != head) fail(file ": a row of " n_cells " cells, expected " head)
            keep = 1; row = "|"
            for (i = 4; i < n; i++) {
                if (op[i] == "=") keep = keep && cell[at[name[i]]] == value[i]
                else if (op[i]) {
                    found = index(" " cell[at[name[i]]] " ", " " value[i] " ") > 0
                    keep = keep && found == (op[i] == "~")
                }
                else row = row " " shown(cell[at[name[i]]]) " |"
            }
            if (keep) { print row; n_rows++ }
        }
        close(file)
        if (k < 0) fail(file ": cannot be read")
        if (!n_rows) fail(file ": no row is chosen")
    }
    /^<!-- receipt / { print; n = split($0, words, " "); table(words, n); inside = 1; next }
    /^<!-- end -->$/ { inside = 0 }
    !inside
    END { if (inside && !failed) { print "receipts: " FILENAME ": a receipt without <!-- end -->" >"/dev/stderr"; exit 1 } }
    ' "$page" >"$tmp/new" || exit 1
    settle "$page"
done

for picture in $(cat README.md docs/*.md 2>/dev/null | grep -o 'receipts/[A-Za-z0-9_-]*\.[a-z]*\.svg' | sort -u); do
    name=${picture#receipts/}
    kind=${name#*.}
    "$gemma4" plot "docs/receipts/${name%%.*}.csv" --kind "${kind%.svg}" >"$tmp/new" || exit 1
    settle "docs/receipts/$name"
done
exit $differs
