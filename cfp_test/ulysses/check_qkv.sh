#!/bin/sh
# Compares what two runs of run_ulysses.sh saved:
#
#   sh cfp_test/ulysses/check_qkv.sh qkv/eager qkv/deepcompile
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
. "$root/cfp_test/scripts/python.sh"
exec "$PYTHON" -m cfp_test.ulysses.check_qkv "$@"
