"""Carries a batch's layout through Megatron's model in the place of packed-sequence parameters.

Megatron hands `packed_seq_params` to every layer and to the rotary embedding and reads only its
base fields, so a subclass reaches our attention untouched. Tensors are made once for each layout.
Knows no data and no model. Specified by tests/mcore/test_carrier.py.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_bp.attention.block_parallel import AttentionOptions
from megatron_bp.attention.keeping import KEYS_ONLY, Keeper, Keeping
from megatron_bp.comm.groups import BlockGroups
from megatron_bp.layout.plan import PlanRequest, RankPlan, make_plan


@dataclass(frozen=True, eq=False)
class Layout:
    """One rank's rows of a batch shape, on the device that computes them.

    `prune` says that the last layer gives its output for corrupted rows only.
    Shapes: `position`, `token_index` int64 [T], `is_padding` bool [T], `target_index` int64
    [num_corrupted]. Indices point into the streams [clean ; view 0 ; view 1 ...] of L tokens each
    (`token_index`) and into the views alone (`target_index`); 0 for padding rows.
    """

    plan: RankPlan
    groups: BlockGroups
    options: AttentionOptions
    prune: bool
    position: Tensor
    token_index: Tensor
    target_index: Tensor
    is_padding: Tensor

    @property
    def num_corrupted(self) -> int:
        """Local rows from the first corrupted row on, padding included."""
        return self.plan.rows.num_corrupted

    def moe_ignores(self) -> Tensor:
        """Rows that the statistics of a mixture of experts must not count, bool [T].

        Padding, and clean rows that another rank of the context group counts already.
        """
        ignored = self.is_padding.clone()
        if self.groups.clean_replica > 0:
            ignored[: self.plan.rows.num_clean] = True
        return ignored


@dataclass(frozen=True)
class Source:
    """Where rows come from: streams of `stream_length` tokens (0: the request's length).

    `restart_positions` counts rotary positions from the start of each document.
    """

    stream_length: int = 0
    restart_positions: bool = False


def make_layout(
    request: PlanRequest,
    groups: BlockGroups,
    options: AttentionOptions,
    prune: bool,
    device: torch.device,
    source: Source = Source(),
) -> Layout:
    """Returns this rank's layout for a batch shape."""
    plan = make_plan(request, groups.rank)
    rows, stream_length = plan.rows, source.stream_length or request.length
    is_padding = rows.position < 0
    position = np.where(is_padding, 0, rows.position)
    token_index = np.where(is_padding, 0, rows.stream * stream_length + position)
    target_index = np.where(is_padding, 0, token_index - stream_length)[rows.num_clean :]
    if source.restart_positions:
        position = position - np.where(is_padding, 0, plan.blocks.document_start[rows.block])

    def on_device(values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)

    return Layout(
        plan=plan,
        groups=groups,
        options=options,
        # The corrupted rows alone must split over the tensor-parallel ranks as all rows do.
        prune=prune and rows.num_corrupted % request.row_multiple == 0,
        position=on_device(position),
        token_index=on_device(token_index),
        target_index=on_device(target_index),
        is_padding=on_device(is_padding),
    )


USUAL = Keeping()

# Rows that an fp8 matrix multiply of Transformer Engine works on at a time, by recipe.
FP8_ROWS = MappingProxyType(
    {"delayed": 16, "tensorwise": 16, "mxfp8": 32, "blockwise": 128, "custom": 128}
)


def row_multiple(args: argparse.Namespace) -> int:
    """Returns what the number of local rows must be a multiple of, for the linear layers.

    The tensor-parallel size under sequence parallelism, so that rows split evenly, times the rows
    that an fp8 recipe needs on each rank.
    Raises: ValueError for an fp8 recipe whose needs are not known.
    """
    ranks = args.tensor_model_parallel_size if args.sequence_parallel else 1
    if not getattr(args, "fp8", None):
        return ranks
    recipe = str(getattr(args.fp8_recipe, "value", args.fp8_recipe))
    if recipe not in FP8_ROWS:
        raise ValueError(
            f"--fp8-recipe {recipe} is not known to block diffusion; use one of "
            f"{', '.join(FP8_ROWS)}"
        )
    rows = FP8_ROWS[recipe]
    samples = math.gcd(args.micro_batch_size, args.eval_micro_batch_size)
    return ranks * rows // math.gcd(rows, samples)


@dataclass(kw_only=True, eq=False)
class BlockParams(PackedSeqParams):
    """The carrier: packed-sequence parameters that hold a layout.

    `qkv_format` is sbhd, so that attention keeps its unpacked path, and `cp_group` stays None:
    another value would re-point Transformer Engine's context group.
    """

    layout: Layout
    keeper: Keeper = field(default_factory=lambda: Keeper(KEYS_ONLY))


def make_params(layout: Layout, keeping: Keeping = USUAL) -> BlockParams:
    """Returns the carrier of one micro-batch of a layout, whose layers keep what `keeping` says."""
    length = layout.plan.request.length
    return BlockParams(
        qkv_format="sbhd",
        max_seqlen_q=length,
        max_seqlen_kv=length,
        layout=layout,
        keeper=Keeper(keeping),
    )
