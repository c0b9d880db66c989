"""Decides what attention layers keep for backward, from the flags and the memory that is left.

Under --recompute-granularity full Megatron runs a layer once without gradients and again in
backward; attention/keeping.py lets the second run take attention's results from the first. Here
the flags become a `Keeping`, with what it costs in bytes. Specified by
tests/mcore/test_recompute.py.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_bp.attention.keeping import Keeping, kept_bytes
from megatron_bp.config import BlockParallelConfig
from megatron_bp.layout.cost import LayerShape
from megatron_bp.layout.memory import peak_memory
from megatron_bp.layout.plan import RankPlan, with_window
from megatron_bp.layout.run_shape import Recompute
from megatron_bp.mcore.carrier import Layout
from megatron_bp.mcore.core_attention import layer_window
from megatron_bp.mcore.dry_run_shape import run_of
from megatron_bp.mcore.parallel_state import get_block_parallel_group

GIB = 2**30
# Left for what no estimate holds: the allocator's gaps, NCCL buffers, kernels' workspaces.
USABLE_SHARE = 0.9
ADAM_BYTES = 8  # two fp32 moments of a parameter, which the optimizer makes in its first step


@dataclass(frozen=True)
class Costs:
    """Bytes of all layers that are in flight on a rank at a time, and how many layers these are.

    `gather` is what a rank sends to gather the clean keys and values of each of its layers once.
    """

    num_layers: int
    num_rerun: int
    attention: int
    clean_kv: int
    gather: int


def keeping_of(args: argparse.Namespace, config: BlockParallelConfig) -> Keeping:
    """Returns what the flags ask for; `auto` asks to keep attention and `decide` may say no."""
    full = args.recompute_granularity == "full"
    clean_kv = {"auto": not full, "keep": True, "regather": False}[config.bp_clean_kv]
    return Keeping(attention=full and config.bp_recompute_attention != "rerun", clean_kv=clean_kv)


def layers_in_flight(args: argparse.Namespace) -> int:
    """Returns how many layers of micro-batches wait for backward on the first stage, at most.

    One forward, one backward: the first of p stages has p micro-batches of layers / p each. With
    v chunks a rank the interleaved schedule has (p - 1) / (p v) more.
    Source: Megatron-LM's theoretical memory usage (megatron/training).
    """
    stages = args.pipeline_model_parallel_size
    chunks = getattr(args, "virtual_pipeline_model_parallel_size", None) or 1
    more = (stages - 1) / (stages * chunks) if chunks > 1 else 0.0
    return math.ceil(args.num_layers * (1 + more))


def costs(args: argparse.Namespace, plan: RankPlan, prune: bool) -> Costs:
    """Predicts the bytes of keeping and gathering for a rank's layers; windows layer by layer."""
    shape, heads = attention_shape(args)
    each = [
        kept_bytes(
            with_window(plan, layer_window(args, number)),
            shape,
            heads,
            corrupted_only=prune and number == args.num_layers,
        )
        for number in range(1, args.num_layers + 1)
    ]
    flight = layers_in_flight(args)
    share = flight / args.num_layers
    rerun = _num_rerun(args) / args.num_layers

    def total(name: str, part: float) -> int:
        return math.ceil(sum(getattr(layer, name) for layer in each) * part)

    return Costs(
        num_layers=flight,
        num_rerun=math.ceil(flight * rerun),
        attention=total("attention", share * rerun),
        clean_kv=total("clean_kv", share),
        gather=total("gather", 1 / args.pipeline_model_parallel_size),
    )


def attention_shape(args: argparse.Namespace) -> tuple[LayerShape, int]:
    """Returns the key/value shape and the query heads of a layer on one tensor-parallel rank."""
    tensor, heads = args.tensor_model_parallel_size, args.num_attention_heads
    groups = args.num_query_groups if args.group_query_attention else heads
    bytes_per_element = args.params_dtype.itemsize
    wire = max(4, bytes_per_element) if args.bp_grad_wire_dtype == "fp32" else bytes_per_element
    shape = LayerShape(
        num_kv_heads=max(1, groups // tensor),
        head_size=args.kv_channels,
        micro_batch=args.micro_batch_size,
        bytes_per_element=bytes_per_element,
        grad_bytes_per_element=wire,
    )
    return shape, heads // tensor


def _num_rerun(args: argparse.Namespace) -> int:
    """Layers of the model that run twice."""
    if args.recompute_granularity != "full":
        return 0
    if args.recompute_method != "block":
        return int(args.num_layers)
    chunks = getattr(args, "virtual_pipeline_model_parallel_size", None) or 1
    pieces = args.pipeline_model_parallel_size * chunks
    return int(min(args.num_layers, args.recompute_num_layers * pieces))


def describe(args: argparse.Namespace, keeping: Keeping, cost: Costs) -> str:
    """Returns two lines: what is kept or done again, and what each choice costs."""
    if args.recompute_granularity == "full":
        first = (
            f"kept by {cost.num_rerun} layers in flight: +{_size(cost.attention)} a rank, runs once"
            if keeping.attention
            else f"runs twice (keeping it would take {_size(cost.attention)} a rank)"
        )
    else:
        first = "not under full recompute, runs once"
    gathers = 1 if keeping.clean_kv else 2
    second = (
        f"kept for backward: +{_size(cost.clean_kv)} a rank in {cost.num_layers} layers in flight"
        if keeping.clean_kv
        else f"gathered again for backward ({_size(cost.clean_kv)} a rank would keep them)"
    )
    if cost.num_rerun and not keeping.attention:
        gathers, second = 2, "gathered again by layers that run twice, whatever --bp-clean-kv says"
    return (
        f"  attention under recompute: {first}\n"
        f"  clean keys and values: {second}; {gathers} gather(s) a layer, "
        f"{_size(gathers * cost.gather)} sent by a rank for a micro-batch"
    )


def decide(
    args: argparse.Namespace, config: BlockParallelConfig, layout: Layout, model: Any
) -> tuple[Keeping, str]:
    """Returns what is kept in this run, and why; call it before the first training pass.

    `auto` keeps attention if every rank of the context group has the memory, so that all of them
    start the same collectives.
    """
    wish = keeping_of(args, config)
    cost = costs(args, layout.plan, layout.prune)
    text = ""
    if wish.attention and config.bp_recompute_attention == "auto" and torch.cuda.is_available():
        needed = cost.attention + (cost.clean_kv if wish.clean_kv else 0)
        device = layout.position.device
        try:
            free = free_bytes(args, config, model, device)
            text = f"  {_size(needed)} needed to keep, {_size(free)} of device memory left\n"
        except (ValueError, AttributeError) as error:  # a container need not have all arguments
            free = -1
            text = f"  memory is unknown, so nothing is kept without being asked for: {error}\n"
        fits = torch.tensor([needed <= free], device=device, dtype=torch.int32)
        dist.all_reduce(fits, dist.ReduceOp.MIN, group=get_block_parallel_group())
        wish = Keeping(bool(fits), wish.clean_kv)
    return wish, text + describe(args, wish, cost)


def free_bytes(
    args: argparse.Namespace, config: BlockParallelConfig, model: Any, device: torch.device
) -> int:
    """Estimates the device memory that a step under full recompute leaves.

    From what is allocated now (weights, gradients, master weights): less Adam's moments, and what
    the cost model says of activations, workspace and logits.
    Raises: ValueError for a run that the cost model cannot describe.
    """
    usable = int(USABLE_SHARE * torch.cuda.get_device_properties(device).total_memory)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    parameters *= getattr(args, "virtual_pipeline_model_parallel_size", None) or 1
    sharers = args.data_parallel_size * args.context_parallel_size
    moments = ADAM_BYTES * parameters // (sharers if args.use_distributed_optimizer else 1)
    if getattr(args, "iteration", 0) > 0 and not args.no_load_optim:
        moments = 0  # of a resumed run: allocated already
    step = peak_memory(run_of(args, config, Recompute.FULL))
    activations = step.activations + step.gathered_kv + step.workspace + step.logits
    return usable - torch.cuda.memory_allocated(device) - moments - activations


def _size(num_bytes: int) -> str:
    """Bytes as text."""
    for unit, scale in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= scale:
            return f"{num_bytes / scale:.2f} {unit}"
    return f"{num_bytes} B"
