# Sourced by the examples for clusters: `launch FLAGS...` starts examples/pretrain_bdlm.py on this
# node's GPUs, or, with dry_run=1, only says what it would do (tools/dry_run.py).
#   NODES, GPUS_PER_NODE, GPU_MEMORY_GIB     the cluster
#   MASTER_ADDR, MASTER_PORT                 where rank 0 listens; Slurm says it by itself
#   NODE_RANK                                without Slurm; Kubernetes says it by itself
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
: "${NODES:=2}" "${GPUS_PER_NODE:=8}" "${GPU_MEMORY_GIB:=80}" "${dry_run:=0}"

launch() {
  if [ "$dry_run" = 1 ]; then
    python tools/dry_run.py --num-gpus $((NODES * GPUS_PER_NODE)) --gpus-per-node "$GPUS_PER_NODE" \
      --gpu-memory-gib "$GPU_MEMORY_GIB" -- "$@"
    return
  fi
  export CUDA_DEVICE_MAX_CONNECTIONS=1 # Megatron asks for it before Blackwell: order of launches
  export NCCL_DEBUG=${NCCL_DEBUG:-WARN} OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
  export MASTER_PORT=${MASTER_PORT:-29500}
  if [ -n "${SLURM_PROCID:-}" ]; then # one task a GPU: signals reach the training processes
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
    export MASTER_ADDR=${MASTER_ADDR:-$SLURM_LAUNCH_NODE_IPADDR}
    exec python examples/pretrain_bdlm.py "$@"
  fi
  export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${SAVE_SECONDS:-540} # torchrun kills after 30 s otherwise
  exec python -m torch.distributed.run --nnodes "$NODES" --nproc-per-node "$GPUS_PER_NODE" \
    --node-rank "${NODE_RANK:-$JOB_COMPLETION_INDEX}" --master-addr "$MASTER_ADDR" \
    --master-port "$MASTER_PORT" examples/pretrain_bdlm.py "$@"
}
