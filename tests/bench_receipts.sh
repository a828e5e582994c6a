#!/bin/sh
# Measures on a GPU what README.md and docs quote: writes the tables in docs/receipts/, of which make receipts makes figures.
#
#   tests/bench_receipts.sh              lists the parts
#   tests/bench_receipts.sh PART ..      runs some. A part ends after LIMIT seconds at most; the same call then continues it.
#
# The models have real dimensions and random weights, so drafts are accepted at random, at given rates. Contexts are really
# filled: prompts are processed. Each call adds a line to runs.csv: part, date, card, driver, commit.
# Environment: GEMMA4 (./gemma4), BUILD (build: where make_gguf is), MODELS (build/models: where it writes the models), OUT
# (docs/receipts), LIMIT (480), LLAMA (a folder with llama-bench, for the parts speed and speed-cpu: empty cells without it).
cd "$(dirname "$0")/.." || exit 1
gemma4=${GEMMA4:-./gemma4} build=${BUILD:-build} models=${MODELS:-build/models} out=${OUT:-docs/receipts} limit=${LIMIT:-480}

parts() {
    cat <<'END'
speed           26B, 31B, E4B, E2B: prompts of 512 and 4096, generation, beside llama.cpp
speed-cpu       the same on the processor: prompts of 128 and 512
26b-long        26B, q8_0, DFlash 4 and 8, 64K to 512K, in 24 GiB
26b-f16         26B, f16, 4K to 128K, without drafts and with DFlash 4
26b-1m          26B, tq3, 1M, without drafts and with MTP 2, in 24 GiB, cache of random rows
26b-1m-dflash   the same with DFlash 4, after a prompt
31b-long        31B, tq3, MTP 2, 64K to 256K, in 24 GiB
draft-26b       26B, DFlash: 0 to 15 drafts at the acceptance of code and of prose, at 4K
draft-31b       31B, the same
ladder          26B, eleven contexts from 1K to 1M, dense
ladder-pflash   the same contexts with pFlash, a tenth of the blocks
pflash-1m       26B, a prompt of 1M with pFlash, three times
ablation        26B at 64K: one setting changed at a time
small           E4B and E2B with MTP, 1 to 4 drafts
compress        26B, a prompt of 131072 tokens: whole, compressed by its own layers, by E2B
server          26B, 1 to 16 sessions, without a draft model and with --spec auto (its MTP drafts are never right)
trees           26B and 31B, DFlash: trees of 16 to 63 tokens
beside          the tables beside what was reported for an RTX 3090; measures nothing
END
}

# model NAME PRESET KIND QUANT: sets $file, and writes it if it is not there.
model() {
    file=$models/$1.gguf
    [ -f "$file" ] && return
    mkdir -p "$models" && "$build/make_gguf" --preset "$2" --kind "$3" --quant "$4" --out "$file" >&2 || exit 1
}
big() { model 26b-a4b-q4_k_m 26b-a4b target q4_k_m; target=$file; model 26b-a4b-dflash-q8_0 26b-a4b dflash q8_0; dflash=$file
    model 26b-a4b-mtp-q4_k_m 26b-a4b mtp q4_k_m; mtp=$file; }
dense() { model 31b-q4_k_m 31b target q4_k_m; target=$file; model 31b-dflash-q8_0 31b dflash q8_0; dflash=$file
    model 31b-mtp-q4_k_m 31b mtp q4_k_m; mtp=$file; }

# within COMMAND..: runs it as long as the part has time left; else the part ends with status 124.
within() {
    left=$((began + limit - $(date +%s)))
    [ $left -gt 0 ] || exit 124
    timeout "$left" "$@" || exit
}

# sweep TABLE FLAGS..: adds the rows of $target that are missing.
sweep() {
    csv=$out/$1.csv
    shift
    within "$gemma4" sweep "$target" -n 256 -o "$csv" "$@"
}

# The acceptance per depth at which n drafts give a mean of $2 tokens per step: sum of p^k, k = 1 .. n, is $2 - 1.
rate_of() {
    awk -v n="$1" -v al="$2" 'BEGIN {
        low = 0; high = 1
        for (i = 0; i < 40; i++) {
            p = (low + high) / 2; sum = 0; product = 1
            for (k = 1; k <= n; k++) { product *= p; sum += product }
            if (sum < al - 1) low = p; else high = p
        }
        printf "%.3f", p }'
}

# Reported for an RTX 3090 and published weights (Lucebox): tokens per second, and per step. Then where ours is: table, cache,
# context, drafts. Their draft lengths count the model's own token; only contexts of 4096 were filled.
reported() {
    cat <<'END'
26B code 56.7 1.00 draft-26b-code q8_0 4096 0
26B code 95.5 1.90 draft-26b-code q8_0 4096 1
26B code 118.3 2.61 draft-26b-code q8_0 4096 3
26B code 131.8 3.88 draft-26b-code q8_0 4096 7
26B code 132.1 5.22 draft-26b-code q8_0 4096 15
26B prose 58.0 1.00 draft-26b-prose q8_0 4096 0
26B prose 82.1 1.63 draft-26b-prose q8_0 4096 1
26B prose 94.6 2.12 draft-26b-prose q8_0 4096 3
26B prose 68.9 2.03 draft-26b-prose q8_0 4096 7
26B prose 61.9 2.49 draft-26b-prose q8_0 4096 15
31B code 30.4 1.00 draft-31b-code q8_0 4096 0
31B code 46.5 1.82 draft-31b-code q8_0 4096 1
31B code 55.7 2.91 draft-31b-code q8_0 4096 3
31B code 47.9 4.06 draft-31b-code q8_0 4096 7
31B code 68.0 4.20 draft-31b-code q8_0 4096 15
31B prose 30.8 1.00 draft-31b-prose q8_0 4096 0
31B prose 47.5 1.87 draft-31b-prose q8_0 4096 1
31B prose 58.5 3.05 draft-31b-prose q8_0 4096 3
31B prose 52.3 4.41 draft-31b-prose q8_0 4096 7
31B prose 81.7 5.12 draft-31b-prose q8_0 4096 15
26B DFlash 67.0 - 26b-long q8_0 131072 4
26B DFlash 63.8 - 26b-long q8_0 262144 4
26B DFlash 62.4 - 26b-long q8_0 524288 4
26B DFlash 26 - 26b-long tq3 1048000 4
26B MTP 19.8 1.00 26b-long tq3 1048000 0
26B MTP 23.7 - 26b-long tq3 1048000 2
31B MTP 6.26 1.00 31b-long tq3 65536 0
31B MTP 10.07 - 31b-long tq3 65536 2
31B MTP 10.18 - 31b-long tq3 131072 2
END
}

# beside: writes beside.csv, a row for each that was reported. Cells are empty where ours was not measured.
beside() {
    echo model,what,cache,ctx,drafts,reported_al,reported_tps,al,decode_tps
    reported | while read -r model what tps al table cache ctx drafts; do
        echo "$model,$what,$cache,$ctx,$drafts,${al#-},$tps,$(awk -F, -v cache="$cache" -v ctx="$ctx" -v drafts="$drafts" '
            NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i; next }
            $at["kv_k"] == cache && $at["ctx"] == ctx && $at["dm"] + 0 == drafts { print $at["al"] "," $at["decode_tps"]; found = 1; exit }
            END { if (!found) print "," }' "$out/$table.csv" 2>/dev/null || echo ,)"
    done
}

# drafts TABLE N:AL..: a row without drafts, then one for each number of drafts, at AL tokens per step.
drafts() {
    table=$1
    shift
    sweep "$table" -ctk q8_0 -d 4096
    for al in "$@"; do
        n=${al%:*}
        sweep "$table" -ctk q8_0 -d 4096 -md "$dflash" --draft-max "$n" --spec-force "$(rate_of "$n" "${al#*:}")"
    done
}

# rates COLUMN TEST..: from CSV of gemma4 bench or llama-bench, the column of each test, pN or nN, separated by commas.
rates() {
    awk -v column="$1" -v tests="$2" '
    { n = split($0, cell, /,/); for (i = 1; i <= n; i++) gsub(/"/, "", cell[i]) }
    NR == 1 { for (i = 1; i <= n; i++) at[cell[i]] = i; next }
    { p = cell[at["n_prompt"]]; value[p > 0 ? "p" p : "n" cell[at["n_gen"]]] = sprintf("%.5g", cell[at[column]]) }
    END { k = split(tests, test, " "); for (i = 1; i <= k; i++) printf "%s%s", (i > 1 ? "," : ""), value[test[i]] }'
}

# speed TABLE P1 P2 N THREADS FLAGS..: a row for each model: both prompts and generation, gemma4 and llama.cpp, with deviations.
speed() {
    csv=$out/$1.csv p1=$2 p2=$3 n=$4 threads=$5
    shift 5
    [ -s "$csv" ] || echo "model,pp$p1,pp$p2,tg$n,pp${p1}_sd,pp${p2}_sd,tg${n}_sd,llama_pp$p1,llama_pp$p2,llama_tg$n,llama_pp${p1}_sd,llama_pp${p2}_sd,llama_tg${n}_sd" >"$csv"
    for size in 26b-a4b 31b e4b e2b; do
        grep -q "^$size," "$csv" && continue
        model $size-q4_k_m $size target q4_k_m
        runs=3
        [ "$size $threads" != "31b 16" ] || runs=1
        within "$gemma4" bench "$file" -p "$p1,$p2" -n "$n" -r $runs -t "$threads" -o csv "$@" >"$out/speed.ours"
        : >"$out/speed.theirs"
        layers=99
        case " $* " in *" cpu "*) layers=0 ;; esac
        [ -z "$LLAMA" ] || LD_LIBRARY_PATH=$LLAMA:/usr/local/cuda/lib64 within "$LLAMA/llama-bench" -m "$file" -ngl $layers -fa 1 \
            -ub 2048 -p "$p1,$p2" -n "$n" -r $runs -t "$threads" -o csv >"$out/speed.theirs" 2>/dev/null
        row=$size
        for of in ours theirs; do
            for column in avg_ts stddev_ts; do row=$row,$(rates $column "p$p1 p$p2 n$n" <"$out/speed.$of"); done
        done
        echo "$row" >>"$csv"
        rm "$out/speed.ours" "$out/speed.theirs"
    done
}

# The CSV of a table in Markdown.
csv_of() { sed -n '/^|[- :|]*$/d; s/^| *//p' | sed 's/,/;/g; s/ *| */,/g; s/,$//'; }

run_part() {
    case $1 in
    speed)     speed speed 512 4096 128 4 ;;
    speed-cpu) speed speed-cpu 128 512 24 16 --backend cpu ;;
    26b-long)
        big
        sweep 26b-long --vram 24 -ctk q8_0 -d 65536,131072,262144,524288 -md none
        sweep 26b-long --vram 24 -ctk q8_0 -d 65536,131072,262144,524288 -md "$dflash" --draft-max 4,8 --spec-force 0.7 ;;
    26b-f16)
        big
        sweep 26b-f16 -d 4096,65536,131072 -md none
        sweep 26b-f16 -d 4096,65536,131072 -md "$dflash" --draft-max 4 --spec-force 0.7 ;;
    26b-1m)
        big
        sweep 26b-long --vram 24 -ctk tq3 -d 1048000 --fill random -md none
        sweep 26b-long --vram 24 -ctk tq3 -d 1048000 --fill random -md "$mtp" --draft-max 2 --spec-force 0.57 ;;
    26b-1m-dflash)
        big
        sweep 26b-long --vram 24 -ctk tq3 -d 1048000 -md "$dflash" --draft-max 4 --spec-force 0.7 ;;
    31b-long)
        dense
        sweep 31b-long --vram 24 -ctk tq3 -d 65536,131072,261120 -md none
        sweep 31b-long --vram 24 -ctk tq3 -d 65536,131072,261120 -md "$mtp" --draft-max 2 --spec-force 0.78 ;;
    draft-26b)                                         # tokens per step that were reported with published weights
        big
        drafts draft-26b-code 1:1.90 3:2.61 7:3.88 15:5.22
        drafts draft-26b-prose 1:1.63 3:2.12 7:2.03 15:2.49 ;;
    draft-31b)
        dense
        drafts draft-31b-code 1:1.82 3:2.91 7:4.06 15:4.20
        drafts draft-31b-prose 1:1.87 3:3.05 7:4.41 15:5.12 ;;
    ladder)
        big
        sweep ladder -d 1024,2048,4096,8192,16384,32768,65536,131072,262144,524288,1048320 ;;
    ladder-pflash)
        big
        sweep ladder -d 1024,2048,4096,8192,16384,32768,65536,131072,262144,524288,1048320 --pflash-density 10 ;;
    pflash-1m)
        big
        [ -s "$out/pflash-1m.csv" ] && return
        within "$gemma4" bench "$target" -p 1048320 -n 0 -r 3 --pflash-density 10 -o csv >"$out/pflash.part"
        sed "s|\"$models/|\"|" "$out/pflash.part" >"$out/pflash-1m.csv"
        rm "$out/pflash.part" ;;
    ablation)
        big
        sweep ablation -d 65536 -ctk f16,q8_0,tq3
        sweep ablation -d 65536 -ctk q8_0 --pflash-density 10
        sweep ablation -d 65536 -ctk q8_0 -md "$dflash" --draft-max 4,7,15 --spec-force 0.7
        sweep ablation -d 65536 -ctk q8_0 -md "$dflash" --draft-max 7 --tree 16,32 --spec-force 0.7
        sweep ablation -d 65536 -ctk q8_0 -md "$mtp" --draft-max 2,4 --spec-force 0.78 ;;
    small)
        for size in e4b e2b; do
            model $size-q4_k_m $size target q4_k_m
            target=$file
            model $size-mtp-q4_k_m $size mtp q4_k_m
            sweep $size -d 512,4096,65536 -md none
            sweep $size -d 4096 -md "$file" --draft-max 1,2,3,4 --spec-force 0.65
        done ;;
    compress)
        big
        model e2b-q4_k_m e2b target q4_k_m
        for how in whole own scorer; do
            grep -qs "^$how," "$out/compress.csv" && continue
            case $how in whole) set -- ;; own) set -- --compress 0.1 ;; scorer) set -- --compress 0.1 --scorer "$file" ;; esac
            within "$gemma4" niah "$target" -p 131072 -d 50 -r 2 -o csv "$@" >"$out/compress.part"
            [ -s "$out/compress.csv" ] || sed -n '1s/^/scores,/p' "$out/compress.part" >"$out/compress.csv"
            sed -n "2s/^/$how,/p" "$out/compress.part" >>"$out/compress.csv"
            rm "$out/compress.part"
        done ;;
    server)
        big
        [ -s "$out/server.csv" ] && return
        within tests/bench_server.py "$target" --gemma4 "$gemma4" >"$out/server.plain"
        within tests/bench_server.py "$target" --gemma4 "$gemma4" --flags "-md $mtp --spec auto" >"$out/server.auto"
        for how in plain auto; do csv_of <"$out/server.$how" >"$out/server.$how.csv"; done
        paste -d , "$out/server.plain.csv" "$out/server.auto.csv" | cut -d , -f 1,2,4 | sed '1s/.*/figure,plain,auto/' >"$out/server.csv"
        rm "$out"/server.*.csv "$out/server.plain" "$out/server.auto" ;;
    trees)
        for of in big dense; do
            $of
            table=trees-$([ $of = big ] && echo 26b || echo 31b)
            sweep "$table" -ctk q8_0 -d 4096,65536 -md "$dflash" --draft-max 15 --tree 0,16,32,48,63 --spec-force 0.8
        done ;;
    beside) beside >"$out/beside.csv" ;;
    *)  echo "bench_receipts.sh: expected one of the parts that it lists, got '$1'" >&2
        exit 1 ;;
    esac
}

[ $# -gt 0 ] || { parts; exit; }
mkdir -p "$out" || exit 1
[ -s "$out/runs.csv" ] || echo part,date,card,driver,commit >"$out/runs.csv"
card=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -n 1 | sed 's/, */,/')
for part in "$@"; do
    began=$(date +%s)
    ( run_part "$part" )
    status=$?
    [ $status -eq 124 ] && echo "$part: not finished after $limit s; the same call continues it" >&2
    [ $status -eq 0 ] || [ $status -eq 124 ] || exit $status
    [ "$part" = beside ] || echo "$part,$(date -u +%Y-%m-%dT%H:%M:%SZ),${card:-none,none},$("$gemma4" --version | sed 's/.*(commit \([^,]*\),.*/\1/')" >>"$out/runs.csv"
done
