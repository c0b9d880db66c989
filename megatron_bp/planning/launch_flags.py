"""Writes a planned run as the flags that start it.

Only what the plan decides and the shape knows: data, tokenizer, checkpoint, rotary base and
learning rate are the user's. Specified by tests/planning/test_launch_flags.py, which parses the
flags with Megatron's own parser and asks mcore's refusals.
"""

from megatron_bp.layout.model_shape import AttentionShape, LayerKind, ModelShape
from megatron_bp.layout.run_shape import Mode, Recompute, Run
from megatron_bp.layout.traffic import clean_rows_sent, kv_row_elements
from megatron_bp.planning.cluster import Cluster, by_node


def unlaunchable(model: ModelShape) -> tuple[str, ...]:
    """Why Megatron-Core 0.19.2's GPT layers cannot be this model; empty if they can."""
    reasons = []
    mixers = [kind.mixer for kind, _ in model.layers]
    if not all(isinstance(mixer, AttentionShape) for mixer in mixers):
        reasons.append("delta-rule layers have no block-diffusion form here yet")
    softmax = [mixer for mixer in mixers if isinstance(mixer, AttentionShape)]
    if any(mixer.shared_kv for mixer in softmax):
        reasons.append("K = V projections are not in Megatron-Core's attention")
    if any(mixer.output_gate for mixer in softmax):
        reasons.append("gated attention output is not verified with block diffusion")
    if len({(m.num_heads, m.num_kv_heads, m.head_size) for m in softmax}) > 1:
        reasons.append("layers with different heads need one specification a layer")
    if len({m.window for m in softmax}) > 1:
        reasons.append("layers with and without a window need their own pattern flag")
    if model.name.startswith("dflash"):
        reasons.append("drafters are not trained by this package yet")
    return tuple(reasons)


def launch_flags(run: Run, objective: str, cluster: Cluster) -> list[str]:
    """The flags of `run`, in the order model, batch, degrees, memory.

    Raises: ValueError if Megatron cannot build the model.
    """
    reasons = unlaunchable(run.model)
    if reasons:
        raise ValueError(f"{run.model.name} cannot be launched: " + "; ".join(reasons) + ".")
    kind = run.model.layers[0][0]
    assert isinstance(kind.mixer, AttentionShape)
    flags = [*_model_flags(run.model, kind, kind.mixer), *_batch_flags(run, objective)]
    flags += _degree_flags(run, cluster.hardware.kernel_for(kind.mixer).kernel)
    if gathers_by_node(run, kind, cluster):
        flags += ["--bp-hierarchical-gather", str(cluster.node_size)]
    return [*flags, *_memory_flags(run)]


def gathers_by_node(run: Run, kind: LayerKind, cluster: Cluster) -> bool:
    """Whether the plan wants the two-step gather of clean rows."""
    if run.topology.shards == 1:
        return False
    sent = clean_rows_sent(run, 0) * kv_row_elements(run, kind) * run.policy.element_bytes
    return by_node(cluster, run.topology, sent / 2)


def _model_flags(model: ModelShape, kind: LayerKind, mixer: AttentionShape) -> list[str]:
    flags = ["--num-layers", str(model.num_layers), "--hidden-size", str(model.hidden)]
    flags += ["--num-attention-heads", str(mixer.num_heads), "--group-query-attention"]
    flags += ["--num-query-groups", str(mixer.num_kv_heads), "--kv-channels", str(mixer.head_size)]
    flags += ["--vocab-size", str(model.vocab), "--normalization", "RMSNorm"]
    flags += ["--position-embedding-type", "rope", "--swiglu"]
    if not mixer.bias:
        flags.append("--disable-bias-linear")
    else:
        flags += ["--add-qkv-bias", "--disable-bias-linear"]
    if mixer.qk_norm:
        flags.append("--qk-layernorm")
    if not model.tied:
        flags.append("--untie-embeddings-and-output-weights")
    if mixer.window:
        flags += ["--window-size", f"{mixer.window - 1},0"]
    experts = kind.experts
    if not experts.num_experts:
        return [*flags, "--ffn-hidden-size", str(kind.ffn)]
    flags += ["--ffn-hidden-size", str(kind.ffn or experts.ffn)]
    flags += ["--num-experts", str(experts.num_experts), "--moe-router-topk", str(experts.top_k)]
    flags += ["--moe-ffn-hidden-size", str(experts.ffn), "--moe-grouped-gemm"]
    flags += ["--moe-token-dispatcher-type", "alltoall"]
    if kind.ffn:
        flags += ["--moe-shared-expert-intermediate-size", str(kind.ffn)]
    return flags


def _batch_flags(run: Run, objective: str) -> list[str]:
    batch = run.batch
    return [
        "--seq-length",
        str(batch.length),
        "--max-position-embeddings",
        str(batch.length),
        "--block-size",
        str(batch.block_size),
        "--bdlm-objective",
        objective,
        "--micro-batch-size",
        str(batch.micro_batch),
        "--global-batch-size",
        str(batch.global_batch),
        "--attention-dropout",
        "0",
        "--hidden-dropout",
        "0",
        "--bf16",
    ]


def _degree_flags(run: Run, kernel: str) -> list[str]:
    topology = run.topology
    owned = 1 if topology.mode in (Mode.CP, Mode.ONE_RANK) else topology.context
    flags = ["--tensor-model-parallel-size", str(topology.tensor)]
    if topology.sequence_parallel:
        flags.append("--sequence-parallel")
    flags += ["--pipeline-model-parallel-size", str(topology.pipeline)]
    if topology.virtual > 1:
        flags += ["--num-virtual-stages-per-pipeline-rank", str(topology.virtual)]
    flags += ["--context-parallel-size", str(topology.shards)]
    flags += ["--block-parallel-size", str(owned)]
    if topology.expert > 1:
        flags += ["--expert-model-parallel-size", str(topology.expert)]
    return [*flags, "--bp-attention-kernel", kernel]


def _memory_flags(run: Run) -> list[str]:
    policy, flags = run.policy, []
    full = policy.recompute in (Recompute.FULL, Recompute.FULL_KEEP_ATTENTION)
    if full:
        flags += ["--recompute-granularity", "full", "--recompute-method", "uniform"]
        keep = policy.recompute is Recompute.FULL_KEEP_ATTENTION
        flags += ["--recompute-num-layers", "1"]
        flags += ["--bp-recompute-attention", "keep" if keep else "rerun"]
    if policy.recompute is Recompute.SELECTIVE:
        modules = "moe" if run.model.has_experts else "mlp"
        flags += ["--recompute-granularity", "selective", "--recompute-modules", modules]
    if policy.recompute is not Recompute.FULL:
        flags += ["--bp-clean-kv", "keep" if policy.keep_gathered else "regather"]
    narrow = policy.grad_wire_bytes == policy.element_bytes
    flags += ["--bp-grad-wire-dtype", "model" if narrow else "fp32"]
    if policy.main_grad_bytes == policy.element_bytes:
        flags.append("--grad-reduce-in-bf16")
    if policy.shard_optimizer:
        flags.append("--use-distributed-optimizer")
        if policy.overlap_data_parallel:
            flags += ["--overlap-grad-reduce", "--overlap-param-gather"]
    return flags
