#!/bin/bash
# PBS: one node with four GPUs. qsub build_jaxlib/site/pbs.sh
#PBS -N cfp
#PBS -l select=1:ncpus=32:ngpus=4:mem=200gb
#PBS -l place=excl
#PBS -l walltime=01:00:00
#PBS -j oe
set -euo pipefail

TARGET=${TARGET:-gpt --layers 4}

cd "$PBS_O_WORKDIR"
module load cfp
export CFP_CACHE_DIR=${CFP_CACHE_DIR:-${SCRATCH:-$HOME}/cfp-cache}
ulimit -n "$(ulimit -Hn)"

cfp doctor
cfp plan $TARGET --platform cuda --devices 4 -o "plan-${PBS_JOBID%%.*}.json"
