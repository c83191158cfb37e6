#!/bin/sh
# All passes over the four settings of the functionality check, which are for 4 GPUs.
# What follows on the command line goes to every pass. SETTINGS names others, as
# '16x4x32 16x4x64': layers x heads x batch size.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)

for setting in ${SETTINGS:-16x4x32 16x4x64 16x2x96 16x2x128}; do
    IFS=x
    set -- $setting "$@"
    unset IFS
    layers=$1 heads=$2 batch=$3
    shift 3
    echo "============ MoE test: batchsize:$batch layers:$layers heads:$heads ============"
    for mode in analysis profile search; do
        echo "*********** $mode pass ****************"
        sh "$root/cfp_test/moe/moe_test.sh" --mode "$mode" --num_layer "$layers" \
            --num_heads "$heads" --batch_size "$batch" "$@"
    done
done
