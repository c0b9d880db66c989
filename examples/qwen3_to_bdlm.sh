#!/usr/bin/env bash
# Turns Qwen3-8B into a block-diffusion model (SDAR's objective), step by step.
#   examples/qwen3_to_bdlm.sh convert|preprocess|train|export [--dry-run]
# convert, preprocess and export run once on one machine and need no GPU; train runs on every node
# (or GPU) and goes on after a restart. On a file system that all nodes see:
#   MODEL  Qwen3-8B as Hugging Face safetensors      TEXT  text files      WORK  everything made here
set -euo pipefail
cd "$(dirname "$0")/.."
step=${1:?convert, preprocess, train or export}
[ "${2:-}" = --dry-run ] && dry_run=1
: "${MODEL:=/data/Qwen3-8B}" "${TEXT:=/data/text}" "${WORK:=/data/qwen3-bdlm}" "${WORKERS:=8}"
. examples/launch.sh

run() { # COMMAND...
  echo "+ $*"
  [ "$dry_run" = 1 ] || "$@"
}
shape=( # what the conversion writes to $WORK/bdlm/megatron_flags.sh
  --num-layers 36 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 32
  --group-query-attention --num-query-groups 8 --kv-channels 128 --max-position-embeddings 40960
  --position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0 --normalization RMSNorm
  --norm-epsilon 1e-06 --qk-layernorm --swiglu --disable-bias-linear --attention-dropout 0.0
  --hidden-dropout 0.0 --untie-embeddings-and-output-weights --bf16
  --make-vocab-size-divisible-by 128 --padded-vocab-size 151936
)
training=(
  --bdlm-objective sdar --block-size 32 --mask-token-id 151669
  --data-path "$WORK/text" --split 99,1,0 --data-cache-path "$WORK/index"
  --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$WORK/bdlm/hf"
  --seq-length 32768 --micro-batch-size 1 --global-batch-size 64 --train-iters 2500
  --lr 2e-5 --min-lr 2e-6 --lr-decay-style cosine --lr-warmup-fraction 0.05
  --clip-grad 1.0 --weight-decay 0.1 --adam-beta2 0.95
  --tensor-model-parallel-size 2 --sequence-parallel
  --context-parallel-size 2 --block-parallel-size 2
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
  --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
)
restarting=(
  --pretrained-checkpoint "$WORK/bdlm" --load "$WORK/run" --save "$WORK/run" --save-interval 100
  --save-retain-interval 500 --dist-ckpt-optim-fully-reshardable
  --async-save --use-persistent-ckpt-worker --async-strategy mcore
  --exit-signal-handler --distributed-timeout-minutes 30
  --eval-interval 500 --eval-iters 4 --log-interval 10 --tensorboard-dir "$WORK/run/tensorboard"
)
case $step in
  convert)
    run mkdir -p "$WORK"
    run python tools/convert_checkpoint.py ar2bdlm "$MODEL" "$WORK/bdlm" \
      --objective sdar --block-size 32 --workers "$WORKERS"
    ;;
  preprocess)
    run python tools/preprocess.py "$WORK/text" "$TEXT" --tokenizer "$WORK/bdlm/hf" \
      --workers "$WORKERS"
    ;;
  train) launch "${shape[@]}" "${training[@]}" "${restarting[@]}" ;;
  export)
    run python tools/convert_checkpoint.py mcore2hf "$WORK/run" "$WORK/trained" \
      --hf-assets "$WORK/bdlm/hf" --serve-as sdar --workers "$WORKERS"
    ;;
  *) echo "$step is no step; use convert, preprocess, train or export" >&2 && exit 2 ;;
esac
