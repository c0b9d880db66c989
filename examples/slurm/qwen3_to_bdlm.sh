#!/usr/bin/env bash
# Submits four jobs, each after the one before: Qwen3-8B is converted, text is tokenised, the
# block-diffusion model is trained on 2 nodes of 8 GPUs, and exported. Run in the checkout.
#   examples/slurm/qwen3_to_bdlm.sh [--dry-run]       --dry-run needs neither Slurm nor a GPU
# MODEL, TEXT and WORK (see examples/qwen3_to_bdlm.sh) are passed on from the environment.
set -euo pipefail
cd "$(dirname "$0")/../.."
export NODES=2 GPUS_PER_NODE=8
if [ "${1:-}" = --dry-run ]; then
  for step in convert preprocess train export; do examples/qwen3_to_bdlm.sh $step --dry-run; done
  exit
fi
after=()
submit() { # STEP SBATCH_OPTIONS...
  local step=$1 job
  shift
  job=$(sbatch --parsable "${after[@]}" --job-name="qwen3-$step" --output=%x-%j.log \
    --open-mode=append --requeue "$@" --wrap="srun --kill-on-bad-exit=1 examples/qwen3_to_bdlm.sh $step")
  echo "$step: job $job"
  after=(--dependency="afterok:${job%%;*}" --kill-on-invalid-dep=yes)
}
cpu=(--nodes=1 --ntasks=1 --cpus-per-task=16 --mem=64G --time=04:00:00)
submit convert "${cpu[@]}"
submit preprocess "${cpu[@]}"
submit train --nodes=$NODES --ntasks-per-node=$GPUS_PER_NODE --gpus-per-node=$GPUS_PER_NODE \
  --cpus-per-task=12 --mem=0 --exclusive --time=24:00:00 --signal=TERM@300
submit export "${cpu[@]}"
