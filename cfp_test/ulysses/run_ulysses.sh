#!/bin/sh
# Ulysses in five ways, of a small decoder:
#
#   sh cfp_test/ulysses/run_ulysses.sh SEQ [eager|compile|deepcompile|ringattn|auto|all]
#
# eager: all-to-alls in the model's code, op by op; compile: the same, compiled;
# deepcompile: inserted by the compiler, at constraints around an attention that knows
# of none; ringattn: a ring; auto: as cfp plans the whole step, with the attention as the
# model wrote it. Q, K and V before and after the exchange, outputs and gradients are
# saved per rank under --dump (./qkv), of auto those of one device; `check_qkv.sh DIR_A
# DIR_B` compares two runs. Prints one row of JSON. Several modes (all: each) and
# several lengths with commas run in one process. --help lists all options. The
# interpreter is $PYTHON, else the environment of `make install`.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
. "$root/cfp_test/scripts/python.sh"
exec "$PYTHON" -m cfp_test.ulysses "$@"
