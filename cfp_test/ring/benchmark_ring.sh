#!/bin/sh
# Latency and memory of a LLaMA against the length of its sequences, for each way to
# compute its attention, up to where memory ends:
#
#   sh cfp_test/ring/benchmark_ring.sh --devices 8 --platform cuda --model 7b \
#       --lengths 2048,8192,32768,131072 --json rows.json --plot ring.png
#   sh cfp_test/ring/benchmark_ring.sh --train ...
#   sh cfp_test/ring/benchmark_ring.sh --alone --train ...    # attention of one layer
#
# Without options a tiny model on virtual CPU devices. Weights are random, or those of
# --checkpoint FOLDER (safetensors, with Hugging Face's names). --help lists all options.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
. "$root/cfp_test/scripts/python.sh"
exec "$PYTHON" -m cfp_test.ring benchmark "$@"
