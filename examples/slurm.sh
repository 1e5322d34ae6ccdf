#!/bin/bash
# A run on a SLURM cluster that goes on by itself after each time limit and each preemption.
#
#     sbatch examples/slurm.sh --config grpo.yaml
#
# Two minutes before the time limit SLURM sends SIGUSR1 to every process; preemption sends SIGTERM. The run then ends its
# step or leaves the rollouts in progress, writes a checkpoint, and exits with 75. The job is queued again, and
# `--resume_from_checkpoint auto` takes the newest whole checkpoint; the first start finds none and begins anew.

#SBATCH --job-name=grpo
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append

export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))

# One task a GPU: SLURM starts the ranks, so that its signals reach them. A launcher between them would not pass on
# SIGUSR1.
srun --kill-on-bad-exit=0 bash -c '
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE
    exec groupgrad train "$@" --resume_from_checkpoint auto
' groupgrad "$@"
code=$?

if [ "$code" -eq 75 ]; then  # stopped by a signal, after a checkpoint
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
