#!/bin/bash
# Slurm: one node with four GPUs. sbatch build_jaxlib/site/slurm.sh
#SBATCH --job-name=cfp
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --mem=0
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.log
# Nothing else may run beside what is measured.
#SBATCH --exclusive
set -euo pipefail

# What to plan: a step of yours (file.py:function), or a model of the zoo.
TARGET=${TARGET:-gpt --layers 4}

module load cfp
# Measurements are shared by all jobs; locks must hold there (cfp doctor, row locks).
export CFP_CACHE_DIR=${CFP_CACHE_DIR:-${SCRATCH:-$HOME}/cfp-cache}
ulimit -n "$(ulimit -Hn)"

# One process sees all GPUs of the node.
step=(srun --ntasks=1 --gpus-per-node=4 --cpu-bind=none)
"${step[@]}" cfp doctor
"${step[@]}" cfp plan $TARGET --platform cuda --devices 4 -o "plan-$SLURM_JOB_ID.json"
