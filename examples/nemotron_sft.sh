#!/usr/bin/env bash
# Fine-tunes Nemotron-Labs-Diffusion 3B, 8B or 14B on chats of up to 262,144 tokens, on 2 x 8 GPUs.
#   examples/nemotron_sft.sh 3b|8b|14b [--dry-run]
# Runs on every node (or GPU); started by slurm/, nemo_run/ and kubernetes/. A restart goes on from
# RUN, the first start begins with BASE. Folders, on a file system that all nodes see:
#   BASE  converted model: tools/convert_checkpoint.py hf2mcore HF_DIR BASE
#   DATA  prefix of chats: tools/preprocess.py DATA chats.jsonl --format chat --tokenizer BASE/hf
#   RUN   checkpoints, TensorBoard, dataset index
set -euo pipefail
cd "$(dirname "$0")/.."
model=${1:?3b, 8b or 14b}
[ "${2:-}" = --dry-run ] && dry_run=1
: "${BASE:=/data/nemotron-$model}" "${DATA:=/data/chats}" "${RUN:=/data/runs/nemotron-$model}"
. examples/launch.sh

case $model in # the model, then a layout for 16 GPUs of 80 GiB
  3b)
    shape=(--num-layers 26 --hidden-size 3072 --ffn-hidden-size 9216)
    layout=(--context-parallel-size 8 --block-parallel-size 8)
    ;;
  8b)
    shape=(--num-layers 34 --hidden-size 4096 --ffn-hidden-size 14336)
    shape+=(--untie-embeddings-and-output-weights)
    layout=(--tensor-model-parallel-size 2 --sequence-parallel)
    layout+=(--context-parallel-size 8 --block-parallel-size 8)
    ;;
  14b)
    shape=(--num-layers 40 --hidden-size 5120 --ffn-hidden-size 16384)
    shape+=(--untie-embeddings-and-output-weights)
    layout=(--tensor-model-parallel-size 2 --sequence-parallel)
    layout+=(--context-parallel-size 8 --block-parallel-size 8)
    ;;
  *) echo "$model is no model of this example; use 3b, 8b or 14b" >&2 && exit 2 ;;
esac
shape+=(
  --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128
  --max-position-embeddings 262144 --position-embedding-type yarn --rotary-base 1000000
  --rotary-percent 1.0 --rotary-scaling-factor 16.0 --yarn-original-max-position-embeddings 16384
  --yarn-beta-fast 32.0 --yarn-beta-slow 1.0 --mscale 1.0 --mscale-all-dim 1.0
  --yarn-correction-range-round-to-int --normalization RMSNorm --norm-epsilon 1e-05 --swiglu
  --disable-bias-linear --attention-dropout 0.0 --hidden-dropout 0.0 --bf16
  --make-vocab-size-divisible-by 128 --padded-vocab-size 131072
)
training=(
  --bdlm-objective nemotron_labs --block-size 32 --mask-token-id 100
  --bdlm-data sft --data-path "$DATA" --split 99,1,0 --data-cache-path "$RUN/index"
  --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$BASE/hf"
  --seq-length 262144 --micro-batch-size 1 --global-batch-size 16 --train-iters 1000
  --lr 1e-5 --min-lr 1e-6 --lr-decay-style cosine --lr-warmup-fraction 0.05
  --clip-grad 1.0 --weight-decay 0.1 --adam-beta2 0.95
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
  --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
)
restarting=(
  --pretrained-checkpoint "$BASE" --load "$RUN" --save "$RUN" --save-interval 25
  --save-retain-interval 250 --dist-ckpt-optim-fully-reshardable # a restart may change the layout
  --async-save --use-persistent-ckpt-worker --async-strategy mcore
  --exit-signal-handler --distributed-timeout-minutes 30
)
logging=(
  --eval-interval 100 --eval-iters 2 --log-interval 1 --tensorboard-dir "$RUN/tensorboard"
  --timing-log-level 0
)
launch "${shape[@]}" "${layout[@]}" "${training[@]}" "${restarting[@]}" "${logging[@]}"
