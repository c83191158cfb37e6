#!/bin/sh
# Plans the cells of the table in docs/results: models, links and memory budgets, each
# group with a store of its own, so that its first plan is a cold one.
#
#   sh cfp_test/scripts/never_loses.sh FOLDER [GROUP ...]
#
# Groups: gpt moe gpt_p2p moe_p2p gpt_f32 moe_f32 bert llama bert_p2p llama_p2p; all
# of them unless some are named. MESH is x=4 unless set, LIMIT the seconds that a group
# may take (none), OPTIONS what never_loses.py is to be told besides. In the folder:
# GROUP.json, a line for each plan, and GROUP.log. A store that lies there already,
# GROUP.store, is used, and plans are no cold ones then.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
. "$root/cfp_test/scripts/python.sh"
folder=${1:?name a folder for the results}
shift
mkdir -p "$folder"
[ $# -gt 0 ] || set -- gpt moe gpt_p2p moe_p2p gpt_f32 moe_f32 bert llama bert_p2p llama_p2p
for group in "$@"; do
    budgets=none p2p= type=
    case $group in
    *_p2p) p2p=NCCL_P2P_DISABLE=1 ;;
    *_f32) type="--dtype float32" ;;
    esac
    case ${group%_*} in
    gpt) target="gpt --layers 4 --hidden 4096 --heads 32 --batch 24 --seq 1024" ;;
    moe) target="moe --layers 4 --batch 64" ;;
    bert | llama) target="${group%_*} --layers 4" ;;
    *) echo "unknown group: $group" >&2 && exit 2 ;;
    esac
    case $group in
    gpt_f32 | moe_f32) budgets=none,0.35 ;;
    gpt* | moe*) budgets=none,0.6,0.35 ;;
    esac
    echo "$group: $target $type $p2p"
    code=0
    env $p2p ${LIMIT:+timeout "$LIMIT"} "$PYTHON" "$root/cfp_test/scripts/never_loses.py" \
        $target $type --mesh "${MESH:-x=4}" --budgets "$budgets" ${OPTIONS:-} --log \
        --workdir "$folder/$group.store" --json "$folder/$group.json" \
        >"$folder/$group.out" 2>"$folder/$group.log" || code=$?
    [ $code -eq 0 ] || echo "$group ended with code $code: see $folder/$group.log"
done
