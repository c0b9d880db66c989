"""Finds what of a mixture of experts would depend on the layout, in a run's arguments.

Routing itself does not: a row goes to its experts wherever it is. What counts or drops rows does.
Used by refusals.py; specified by tests/mcore/test_expert_rows.py.
"""

from __future__ import annotations

import argparse

from megatron_bp.config import BlockParallelConfig
from megatron_bp.layout.plan import PlanRequest, make_plan
from megatron_bp.mcore.choices import objective_of
from megatron_bp.mcore.expert_rows import every_row_counts


def expert_problems(args: argparse.Namespace, config: BlockParallelConfig) -> list[str]:
    """Returns what of the experts cannot be trained alike on every layout."""
    if not args.num_experts:
        return []
    problems = []
    if args.calculate_per_token_loss:
        problems.append(
            "--calculate-per-token-loss with --num-experts scales the auxiliary loss by the number "
            "of targets; drop --calculate-per-token-loss (the default loss is exact)"
        )
    for name in ("sinkhorn", "quantile_balancing"):
        if name in args.moe_router_load_balancing_type:
            problems.append(
                f"--moe-router-load-balancing-type {name} routes a row by the other rows of its "
                "rank; use aux_loss"
            )
    if args.moe_expert_capacity_factor is not None:
        problems.append(
            f"--moe-expert-capacity-factor {args.moe_expert_capacity_factor} drops rows by what "
            "else a rank has; drop the flag"
        )
    if args.moe_input_jitter_eps is not None:
        problems.append(
            f"--moe-input-jitter-eps {args.moe_input_jitter_eps} draws noise rank by rank; drop it"
        )
    if args.moe_z_loss_coeff or args.moe_router_enable_expert_bias:
        problems += _uneven_problems(args, config)
    return problems


def _uneven_problems(args: argparse.Namespace, config: BlockParallelConfig) -> list[str]:
    """What needs every row of every rank, where some ranks have rows that must not count."""
    cp, bp = args.context_parallel_size, config.block_parallel_size
    num_ranks = max(cp, bp)
    step = 2 * num_ranks * config.block_size
    longer = -(-(args.seq_length or step) // step) * step
    packed = args.reset_attention_mask and num_ranks > 1
    if not packed and (bp == 1 or bp == cp) and _is_even(args, config, num_ranks):
        return []
    remedy = "drop it" if packed else f"use --context-parallel-size {num_ranks}"
    if not packed and (bp == 1 or bp == cp):
        remedy = f"use --seq-length {longer}"
    what = {
        "--moe-z-loss-coeff": (args.moe_z_loss_coeff, "averages ranks as if they had equally many"),
        "--moe-router-enable-expert-bias": (
            args.moe_router_enable_expert_bias,
            "cannot leave rows out in Megatron",
        ),
    }
    return [
        f"{name} {why}, but here ranks hold rows that must not count (padding, or clean rows that "
        f"another rank has too); {remedy}"
        for name, (value, why) in what.items()
        if value
    ]


def _is_even(args: argparse.Namespace, config: BlockParallelConfig, num_ranks: int) -> bool:
    """Whether every row counts, with the padding that sequence parallelism and fp8 ask for."""
    from megatron_bp.mcore.carrier import row_multiple

    try:
        request = PlanRequest(
            length=args.seq_length,
            block_size=config.block_size,
            num_ranks=num_ranks,
            num_clean_shards=args.context_parallel_size,
            num_views=objective_of(args, config).num_views,
            row_multiple=row_multiple(args),
        )
        return every_row_counts(make_plan(request, 0))
    except (ValueError, TypeError):
        return True  # reported elsewhere
