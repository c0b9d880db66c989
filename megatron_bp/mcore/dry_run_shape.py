"""Describes a run given by Megatron's arguments in the words of the cost model (`layout`).

Knows arguments after validation; starts nothing. What it leaves out is said by `approximations`.
Specified by tests/mcore/test_dry_run_shape.py.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass

from megatron_bp.config import BlockParallelConfig
from megatron_bp.layout.model_shape import AttentionShape, ExpertsShape, LayerKind, ModelShape
from megatron_bp.layout.run_shape import BatchShape, Policy, Recompute, Run, Topology
from megatron_bp.mcore.choices import objective_of


@dataclass(frozen=True)
class Cluster:
    """Where a run would start. Units: GiB; `reserve_gib` is left to CUDA, NCCL and fragments."""

    num_gpus: int
    gpus_per_node: int
    memory_gib: float
    reserve_gib: float

    def __post_init__(self) -> None:
        if self.num_gpus < 1 or self.gpus_per_node < 1:
            raise ValueError(
                f"num_gpus={self.num_gpus} and gpus_per_node={self.gpus_per_node} must be at least "
                "1; use for example 16 and 8"
            )
        if not 0 <= self.reserve_gib < self.memory_gib:
            raise ValueError(
                f"reserve_gib={self.reserve_gib} must be at least 0 and below "
                f"memory_gib={self.memory_gib}; use for example 6 of 80"
            )

    @property
    def usable_bytes(self) -> int:
        """What a run may fill on each GPU."""
        return int((self.memory_gib - self.reserve_gib) * 2**30)


def run_of(args: argparse.Namespace, config: BlockParallelConfig, recompute: Recompute) -> Run:
    """Returns the run of validated arguments (after `arguments.finish`).

    Raises: ValueError for what cannot be laid out.
    """
    return Run(
        model_of(args),
        batch_of(args, config),
        _topology(args, config),
        policy_of(args, config, recompute),
    )


def wishes(args: argparse.Namespace, config: BlockParallelConfig) -> tuple[Recompute, ...]:
    """Returns what may be computed again under these flags, the first that fits is taken.

    With --bp-recompute-attention auto a run keeps attention if memory allows.
    """
    if args.recompute_granularity == "full":
        keep, again = Recompute.FULL_KEEP_ATTENTION, Recompute.FULL
        return {"auto": (keep, again), "keep": (keep,)}.get(config.bp_recompute_attention, (again,))
    if args.recompute_granularity == "selective" and {"mlp", "moe"} & {*args.recompute_modules}:
        return (Recompute.SELECTIVE,)
    return (Recompute.NONE,)


def policy_of(
    args: argparse.Namespace, config: BlockParallelConfig, recompute: Recompute
) -> Policy:
    """Returns what is kept, in which dtypes."""
    element = args.params_dtype.itemsize
    states = (args.main_params_dtype, args.exp_avg_dtype, args.exp_avg_sq_dtype)
    optimizer = sum(dtype.itemsize for dtype in states)
    if element == 4:  # fp32 weights are their own main weights
        optimizer -= 4
    if args.optimizer_cpu_offload:
        optimizer = round(optimizer * (1 - args.optimizer_offload_fraction))
    full = args.recompute_granularity == "full"
    return Policy(
        recompute=recompute,
        keep_gathered={"keep": True, "regather": False}.get(config.bp_clean_kv, not full),
        prune_last_layer=config.bp_prune_last_layer,
        shard_optimizer=args.use_distributed_optimizer,
        overlap_data_parallel=args.overlap_grad_reduce,
        fused=args.transformer_impl == "transformer_engine",
        element_bytes=element,
        grad_wire_bytes=4 if config.bp_grad_wire_dtype == "fp32" else element,
        main_grad_bytes=4 if args.accumulate_allreduce_grads_in_fp32 else element,
        optimizer_bytes=optimizer,
        loss_chunk_rows=config.bp_loss_chunk_rows,
    )


def approximations(args: argparse.Namespace, config: BlockParallelConfig) -> list[str]:
    """Returns what the cost model leaves out or simplifies of this run, one sentence each."""
    found = []
    if args.recompute_granularity == "full" and (
        args.recompute_method != "uniform" or args.recompute_num_layers != 1
    ):
        found.append("full recompute is counted as uniform, one layer at a time")
    if config.bdlm_lora_rank:
        found.append("all weights are counted as trained; adapters need fewer gradients and states")
    if args.fp8:
        found.append("linear layers are counted in bf16, without the copies that FP8 keeps")
    return found


def model_of(args: argparse.Namespace) -> ModelShape:
    """Returns the model of validated arguments."""
    from megatron.core.transformer.utils import is_layer_window_attention

    kinds: Counter[LayerKind] = Counter()
    for layer in range(1, args.num_layers + 1):
        window = args.window_size
        slides = is_layer_window_attention(window, args.window_attn_skip_freq, layer)
        attention = AttentionShape(
            num_heads=args.num_attention_heads,
            num_kv_heads=args.num_query_groups
            if args.group_query_attention
            else args.num_attention_heads,
            head_size=args.kv_channels,
            window=window[0] + 1 if window and slides else 0,
            qk_norm=bool(args.qk_layernorm),
            bias=bool(args.add_qkv_bias or args.add_bias_linear),
        )
        kinds[_kind(args, attention, layer)] += 1
    return ModelShape(
        "the model of these flags",
        args.hidden_size,
        args.padded_vocab_size,
        tuple(kinds.items()),
        tied=not args.untie_embeddings_and_output_weights,
    )


def _kind(args: argparse.Namespace, attention: AttentionShape, layer: int) -> LayerKind:
    frequency = args.moe_layer_freq
    if not args.num_experts or not (
        frequency[layer - 1] if isinstance(frequency, list) else (layer - 1) % frequency == 0
    ):
        return LayerKind(attention, args.ffn_hidden_size, gated=args.swiglu)
    inner = args.moe_ffn_hidden_size or args.ffn_hidden_size
    experts = ExpertsShape(args.num_experts, args.moe_router_topk, inner)
    shared = args.moe_shared_expert_intermediate_size or 0
    return LayerKind(attention, shared, experts, gated=args.swiglu)


def batch_of(args: argparse.Namespace, config: BlockParallelConfig) -> BatchShape:
    """Returns the batch of validated arguments, with as many targets as noise has on average."""
    objective = objective_of(args, config)
    return BatchShape(
        length=args.seq_length,
        block_size=config.block_size,
        num_views=objective.num_views,
        clean_rule=objective.clean_rule,
        corrupted_rule=objective.corrupted_rule,
        micro_batch=args.micro_batch_size,
        global_batch=args.global_batch_size,
        target_share=(objective.t_min + objective.t_max) / 2,
        learns_clean=objective.learns_clean,
    )


def _topology(args: argparse.Namespace, config: BlockParallelConfig) -> Topology:
    context = args.context_parallel_size
    return Topology(
        tensor=args.tensor_model_parallel_size,
        context=context,
        shards=args.bp_clean_shards,
        pipeline=args.pipeline_model_parallel_size,
        virtual=args.virtual_pipeline_model_parallel_size or 1,
        expert=args.expert_model_parallel_size,
        data=args.data_parallel_size,
        block_owned=config.block_parallel_size > 1 or context == 1,
    )
