#!/bin/sh
# All passes over the four settings of the functionality check, which are for 4 GPUs.
# What follows on the command line goes to every pass.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)

# num_layer num_heads batch_size
for setting in "16 4 32" "16 4 64" "16 2 96" "16 2 128"; do
    set -- $setting "$@"
    layers=$1 heads=$2 batch=$3
    shift 3
    echo "============ MoE test: batchsize:$batch layers:$layers heads:$heads ============"
    for mode in analysis profile search; do
        echo "*********** $mode pass ****************"
        sh "$root/cfp_test/moe/moe_test.sh" --mode "$mode" --num_layer "$layers" \
            --num_heads "$heads" --batch_size "$batch" "$@"
    done
done
