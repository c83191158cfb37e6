#!/bin/sh
# Communication volume by formula against time in kernels, for combinations of a
# layer's block strategies:
#
#   sh cfp_test/scripts/enum_and_benchmark/llama_enum_benchmark_comm_comp.sh \
#       --devices 4 --platform cuda --limit 64 --json enum.json --plot enum.svg
set -eu
root=$(cd "$(dirname "$0")/../../.." && pwd)
. "$root/cfp_test/scripts/python.sh"
exec "$PYTHON" -m cfp_test.bench.enumerate llama "$@"
