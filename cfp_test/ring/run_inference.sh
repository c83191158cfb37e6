#!/bin/sh
# Tokens that a LLaMA adds to a prompt, computed without a cache of keys and values:
#
#   sh cfp_test/ring/run_inference.sh --method ring --prompt 12,7,3 --new 8
#
# Options are those of benchmark_ring.sh otherwise.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
. "$root/cfp_test/scripts/python.sh"
exec "$PYTHON" -m cfp_test.ring inference "$@"
