"""Turns command-line arguments into a checked run: our flags, what Megatron is told, and every
refusal.

The flags are generated from `BlockParallelConfig`. `prepare` runs before Megatron's own
`validate_args` and makes the context-parallel axis carry the context group; `finish` runs after
it, because validation resets what it sets. Nothing here imports megatron at import time. Specified
by tests/mcore/test_arguments.py.
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from megatron_bp.config import BlockParallelConfig, flag
from megatron_bp.mcore.lora_flags import take_base
from megatron_bp.mcore.refusals import refuse


def add_block_parallel_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Returns the parser with our flags added; usable as Megatron's `extra_args_provider`."""
    group = parser.add_argument_group("block parallel", BlockParallelConfig.__doc__)
    for knob in fields(BlockParallelConfig):
        options: dict[str, Any] = {"dest": knob.name, "default": knob.default}
        options["help"] = knob.metadata["help"].replace("%", "%%")
        if isinstance(knob.default, bool):
            group.add_argument(flag(knob.name), action=argparse.BooleanOptionalAction, **options)
            continue
        if knob.metadata["choices"]:
            options["choices"] = list(knob.metadata["choices"])
        group.add_argument(flag(knob.name), type=type(knob.default), **options)
    return parser


def config_from_args(args: argparse.Namespace) -> BlockParallelConfig:
    """Returns the knobs of parsed arguments.

    Raises: ValueError that lists every problem of the values themselves.
    """
    return BlockParallelConfig(
        **{knob.name: getattr(args, knob.name) for knob in fields(BlockParallelConfig)}
    )


def prepare(args: argparse.Namespace, config: BlockParallelConfig) -> None:
    """Makes the context-parallel axis carry the context group; call before Megatron validates.

    After it, `args.context_parallel_size` is the context group's size P, `args.bp_clean_shards`
    the number C of clean shards (what the user gave as --context-parallel-size), and the
    hierarchical sizes are [C, P // C]. `args.seq_length` stays L. Without a block-diffusion
    objective nothing is touched.
    Raises: ValueError that lists every problem.
    """
    if not config.is_diffusion:
        return
    if config.bdlm_data == "sft":
        args.reset_attention_mask = True  # packed documents never see one another
    refuse(args, config)
    num_shards = args.context_parallel_size
    num_ranks = max(num_shards, config.block_parallel_size)
    args.bp_clean_shards = num_shards
    args.context_parallel_size = num_ranks
    if num_ranks > 1:
        args.hierarchical_context_parallel_sizes = [num_shards, num_ranks // num_shards]
    if config.bdlm_noise_seed < 0:
        args.bdlm_noise_seed = args.seed
    take_base(args, config)
    # Megatron requires L to be a multiple of 2 * context size, a property of its own slicing; our
    # plan pads. Given as encoder_seq_length the length reaches the same places (validation copies
    # it back).
    args.encoder_seq_length, args.seq_length = args.seq_length, None


def finish(args: argparse.Namespace, config: BlockParallelConfig) -> None:
    """Sets what Megatron's validation resets; call after it."""
    if not config.is_diffusion:
        return
    if args.pipeline_model_parallel_size > 1:
        # Between stages travel L/C + V*L/P rows, which is not seq_length / context size.
        args.variable_seq_lengths = True
        # Megatron rejects its default dispatcher with variable lengths, even for dense models.
        args.moe_token_dispatcher_type = "alltoall"
    # Our attention owns the mask; a dense L x L mask for each sample would only be thrown away.
    args.create_attention_mask_in_dataloader = False


def banner(args: argparse.Namespace, config: BlockParallelConfig) -> str:
    """Returns what each degree consumes, for the start of a run (after `finish`)."""
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    if not config.is_diffusion:
        return "block parallelism is off (--bdlm-objective none): stock Megatron"
    num_ranks, num_shards = args.context_parallel_size, args.bp_clean_shards
    bp = config.block_parallel_size
    return (
        f"block diffusion: objective {config.bdlm_objective}, block size {config.block_size} "
        "tokens, "
        f"L {args.seq_length} tokens\n"
        f"  mode: {mode_name(num_shards, bp)}\n"
        f"  world {args.world_size} = TP {tp} x PP {pp} x context group {num_ranks} x DP "
        f"{args.data_parallel_size}\n"
        f"  context group {num_ranks} = max(--context-parallel-size {num_shards}, "
        "--block-parallel-size "
        f"{bp}): {num_shards} clean shard(s), each held by {num_ranks // num_shards} rank(s)"
        + _throughput_line(args, config)
    )


def _throughput_line(args: argparse.Namespace, config: BlockParallelConfig) -> str:
    if not args.log_throughput:
        return ""
    from megatron_bp.mcore.throughput import peak_of_run

    _, text = peak_of_run(args, config)
    return f"\n  throughput counts useful work only; model FLOPs utilization is {text}"


def mode_name(num_shards: int, block_parallel_size: int) -> str:
    """Returns the name of the mode that the two degrees select."""
    if num_shards == block_parallel_size == 1:
        return "one rank"
    if block_parallel_size == 1:
        return "conventional context parallelism (rows by position)"
    if num_shards == 1:
        return "pure block parallelism (clean rows replicated)"
    if num_shards == block_parallel_size:
        return "context-sharded block parallelism (clean rows sharded, blocks owned)"
    return "hybrid (clean rows sharded over sub-groups, blocks owned)"
