#!/bin/bash
# LSF with jsrun: one node, all its GPUs. bsub < build_jaxlib/site/lsf.sh
#BSUB -J cfp
#BSUB -nnodes 1
#BSUB -W 1:00
#BSUB -o cfp-%J.log
set -euo pipefail

TARGET=${TARGET:-gpt --layers 4}
GPUS=${GPUS:-4}

module load cfp
export CFP_CACHE_DIR=${CFP_CACHE_DIR:-${MEMBERWORK:-$HOME}/cfp-cache}
ulimit -n "$(ulimit -Hn)"

# JAX finds out by itself about Slurm, Open MPI and Kubernetes, but not about jsrun: here
# one resource set holds all GPUs, and one process uses them.
step=(jsrun --nrs 1 --tasks_per_rs 1 --gpu_per_rs "$GPUS" --cpu_per_rs ALL_CPUS
    --bind none --smpiargs=-disable_gpu_hooks)
"${step[@]}" cfp doctor
"${step[@]}" cfp plan $TARGET --platform cuda --devices "$GPUS" \
    -o "plan-$LSB_JOBID.json"
