#!/bin/sh
# The same settings as cfp_test/scripts/gpt_A100_8GPU.sh, with what a cost model in
# Alpa's formulation chooses. --link nvlink, pcie or pcie4 has it take links by data
# sheet; by default they are fitted to measured collectives.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
exec sh "$root/cfp_test/scripts/gpt_bench.sh" --wanted 8 --alpa "$@"
