#!/bin/sh
# Plans, runs and checks every model of the zoo against one device, in float32 on
# virtual CPU devices: unrolled and scanned, with and without rematerialisation, on
# meshes of one and two axes. One line of JSON for each; exit code 1 if any differs.
#
#   sh cfp_test/scripts/check_matrix.sh [FILE]
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
. "$root/cfp_test/scripts/python.sh"
out=${1:-check_matrix.jsonl}
: >"$out"
failed=0
common="--hidden 32 --heads 4 --batch 8 --seq 16 --vocab 96 --dtype float32"
for mesh in x=4 x=8 x=2,y=2; do
    for model in gpt moe bert llama; do
        size="--layers 2 $common"
        [ "$model" = moe ] && size="--layers 4 --experts 8 --expert_group_size 32 $common"
        [ "$mesh" = x=8 ] && size=$(echo "$size" | sed 's/--heads 4/--heads 8/')
        for scan in --no-scan --scan; do
            for remat in --no-remat --remat; do
                line="$model $size $scan $remat --mesh $mesh"
                if found=$("$PYTHON" -m cfp run $line --platform cpu --steps 2 --check \
                    --quick --per-kind 1 --no-race --quiet --json 2>/dev/null); then
                    ok=true
                else
                    ok=false failed=1
                fi
                echo "$found" | "$PYTHON" -c '
import json, sys
text = sys.stdin.read()
found = json.loads(text) if text.strip() else {}
row = {"run": sys.argv[1], "passed": sys.argv[2] == "true"}
row |= {k: found.get(k) for k in ("plan", "largest_difference", "tolerance")}
print(json.dumps(row))' "$line" "$ok" | tee -a "$out"
            done
        done
    done
done
exit $failed
