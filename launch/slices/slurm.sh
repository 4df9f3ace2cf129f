#!/usr/bin/env bash
# Runs a command on GPUs under SLURM, one process for each GPU; JAX learns from SLURM which process it is.
#
#   sbatch --nodes=1 launch/slices/slurm.sh python -m launch.generate --config=configs/smollm2.py:lookup \
#       --config.mesh.model=8 --prompt="abc" --json_out=texts.json
#
# Options of sbatch (--partition, --account, --nodes, --gpus-per-node with --ntasks-per-node) go before the script. It is
# to be submitted from the checkout, whose .venv has the packages: pip install -e '.[cuda]'.
#SBATCH --job-name=specdec
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@60
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

RESTART_STATUS=42 # of a run that SIGTERM ended: launch/preemption.py

if [[ $# -eq 0 ]]; then
  echo 'error: no command: sbatch launch/slices/slurm.sh python -m launch.generate ...' >&2
  exit 2
fi
if [[ -z ${SLURM_JOB_ID:-} ]]; then
  echo 'error: not in a SLURM job: submit this script with sbatch' >&2
  exit 2
fi
cd "$SLURM_SUBMIT_DIR"
if [[ -e .venv/bin/activate ]]; then
  # shellcheck source=/dev/null
  source .venv/bin/activate
fi

status=0
srun --kill-on-bad-exit=1 "$@" || status=$?
if [[ $status -eq $RESTART_STATUS ]]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
