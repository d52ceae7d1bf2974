#!/bin/bash
# sbatch examples/clusters/slurm.sh
#SBATCH --job-name=hadal
#SBATCH --nodes=2
#SBATCH --gpus-per-node=4
#SBATCH --time=60
#SBATCH --requeue
# One task of srun is a rank; hadal run asks for as many tasks as there are GPUs, and needs no other word
# about nodes. A job that is put back into the queue goes on from its last checkpoint.
set -eu
cd "${SLURM_SUBMIT_DIR:-.}"
exec hadal run --launcher slurm examples/clusters/train.py \
    --deepspeed_config examples/clusters/ds_config.json --folder checkpoints "$@"
