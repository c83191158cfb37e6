#!/bin/sh
# All passes over four settings of LLaMA 2, which are for 4 GPUs.
# What follows on the command line goes to every pass.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)

# num_layer batch_size
for setting in "2 40" "2 80" "4 40" "4 80"; do
    set -- $setting "$@"
    layers=$1 batch=$2
    shift 2
    echo "============ LLAMA test: batchsize:$batch layers:$layers ============"
    for mode in analysis profile search; do
        echo "*********** $mode pass ****************"
        sh "$root/cfp_test/llama2/llama_test.sh" --mode "$mode" --num_layer "$layers" \
            --batch_size "$batch" "$@"
    done
done
