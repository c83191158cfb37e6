#!/bin/sh
# One pass over LLaMA 2:
#
#   sh cfp_test/llama2/llama_test.sh --num_layer 4 --batch_size 80 --mode analysis
#   sh cfp_test/llama2/llama_test.sh --num_layer 4 --batch_size 80 --mode profile
#   sh cfp_test/llama2/llama_test.sh --num_layer 4 --batch_size 80 --mode search
#
# Without a GPU it takes virtual CPU devices; --platform says which. --help lists all
# options. DUMP_PROFILE_PARALLEL_BLOCK=0 leaves out blocks and single profiles.
# The interpreter is $PYTHON, else the environment of `make install`, else python3.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
. "$root/cfp_test/scripts/python.sh"
exec "$PYTHON" -m cfp_test.llama2 "$@"
