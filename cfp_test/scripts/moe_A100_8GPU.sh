#!/bin/sh
# The artifact's performance test. The number in the name is the artifact's: this runs
# on the devices there are, and says so. Options are those of moe_bench.sh.
set -eu
exec sh "$(dirname "$0")/moe_bench.sh" --wanted 8 "$@"
