#!/usr/bin/env bash
# One task a GPU by SLURM; before the time is up the job goes back to the queue, and continues from its last checkpoint.
# Not run on a cluster. From the repository's folder, with the environment active:
#   sbatch --nodes 4 examples/slurm.sh --config configs/paper/qwen3-30b-a3b.yaml
#SBATCH --job-name=dclightning
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
set -euo pipefail

# The signal goes to this script alone: ranks that stopped on one themselves could do so at different places.
trap 'scontrol requeue "$SLURM_JOB_ID"' USR1

export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1} # srun does not take it from the job
runs="runs/$SLURM_JOB_ID" # a requeued job keeps its number
resume=()
if compgen -G "$runs/*/*/checkpoints/last.ckpt" >/dev/null; then resume=(--ckpt_path last); fi
srun dclightning fit "$@" "${resume[@]}" --trainer.logger.init_args.save_dir "$runs" \
    --trainer.num_nodes "$SLURM_NNODES" --trainer.devices "$SLURM_NTASKS_PER_NODE" &
wait $! # in the foreground srun would keep the trap from running
