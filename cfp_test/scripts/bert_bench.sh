#!/bin/sh
# All passes over the artifact's settings of this model, on the devices there are:
#
#   sh cfp_test/scripts/bert_bench.sh --devices 4 --platform cuda --json rows.jsonl
#
# --settings '24x2 32x4' names others, batch size x layers. All options of the model's
# own script go to every pass. DUMP_PROFILE_PARALLEL_BLOCK=0 leaves out blocks and
# single profiles.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
. "$root/cfp_test/scripts/python.sh"
exec "$PYTHON" -m cfp_test.bench.passes bert "$@"
