#!/bin/bash
# sbatch docs/cloud/slurm.sh: 4 nodes of 8 GPUs, again and again until the run is finished.
#SBATCH --job-name=grpo
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@600
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

# The tasks, not this shell, get SIGTERM 600 s before the time is up: they save and exit with 75.
export HF_HOME=/shared/huggingface JAX_COMPILATION_CACHE_DIR=/shared/compiled
code=0
srun jaxrl-llm train grpo_qwen2_5_1_5b_gsm8k --run_dir /shared/runs/grpo --learner.compute.microbatch_rows 32 \
  --output.grace_s 500 || code=$?

case "$code" in
  75) most=1000 ;; # preempted, state saved
  1 | 134 | 137 | 143) most=5 ;; # a process died or was killed
  *) most=0 ;; # 0: done; 2: the input was wrong; 3: a guard stopped the run
esac
if [ "${SLURM_RESTART_COUNT:-0}" -lt "$most" ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
