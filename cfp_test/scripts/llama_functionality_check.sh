#!/bin/sh
# All passes over four settings of LLaMA 2, which are for 4 GPUs.
# What follows on the command line goes to every pass. SETTINGS names others, as
# '2x40 2x80': layers x batch size.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)

for setting in ${SETTINGS:-2x40 2x80 4x40 4x80}; do
    IFS=x
    set -- $setting "$@"
    unset IFS
    layers=$1 batch=$2
    shift 2
    echo "============ LLAMA test: batchsize:$batch layers:$layers ============"
    for mode in analysis profile search; do
        echo "*********** $mode pass ****************"
        sh "$root/cfp_test/llama2/llama_test.sh" --mode "$mode" --num_layer "$layers" \
            --batch_size "$batch" "$@"
    done
done
