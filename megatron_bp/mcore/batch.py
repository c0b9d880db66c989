"""Brings a micro-batch to its ranks: one read a tensor-parallel group, a broadcast, and each
rank's rows.

The samples come whole (all L tokens, corrupted by the dataset); each rank cuts its rows with its
layout. Knows no model. Specified by tests/mcore/test_batch.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bp.layout.blocks import Spans
from megatron_bp.layout.plan import PlanRequest
from megatron_bp.mcore.carrier import Layout, make_layout
from megatron_bp.mcore.dataset import CorruptionRules, Sample


@dataclass(frozen=True, eq=False)
class Batch:
    """A micro-batch of whole samples on this rank's device.

    Shapes: `streams` int64 [Z, (1 + V) * L], the clean tokens followed by those of each view;
    `labels`, `counted` int64 and `weights` float64 [Z, V * L]; `normalizer` float64 [Z].
    """

    streams: Tensor
    labels: Tensor
    counted: Tensor
    weights: Tensor
    normalizer: Tensor

    def tokens(self, layout: Layout) -> Tensor:
        """This rank's input ids, int64 [Z, T]; 0 in padding rows."""
        return self.streams[:, layout.token_index].masked_fill(layout.is_padding, 0)

    def targets(self, layout: Layout) -> Targets:
        """What this rank's corrupted rows are to learn."""
        real = ~layout.is_padding[layout.plan.rows.num_clean :]
        weights = self.weights[:, layout.target_index] * real
        return Targets(
            labels=self.labels[:, layout.target_index].t(),
            weights=weights.t(),
            is_target=(weights > 0).t(),
            num_counted=(self.counted[:, layout.target_index] * real).sum(),
            num_rows=real.sum() * len(self.weights),
            normalizer=self.normalizer,
        )


@dataclass(frozen=True, eq=False)
class Targets:
    """What corrupted rows are to learn; rows first, as in Megatron's hidden states.

    Shapes: `labels`, `weights`, `is_target` [num_corrupted, Z]; `normalizer` [Z]; the counts [].
    """

    labels: Tensor
    weights: Tensor
    is_target: Tensor
    num_counted: Tensor
    num_rows: Tensor
    normalizer: Tensor


def receive_batch(
    samples: Iterator[Sample],
    shape: tuple[int, int, int],
    device: torch.device,
    group: dist.ProcessGroup,
    source: int,
) -> Batch:
    """Returns the next micro-batch on every rank of a tensor-parallel group.

    `shape` is (Z, V, L); `source` is the global rank that has `samples`, which others do not read.
    """
    num_samples, num_views, length = shape
    columns = num_views * length
    ints = torch.empty(num_samples, length + 3 * columns, dtype=torch.int64, device=device)
    floats = torch.empty(num_samples, columns + 1, dtype=torch.float64, device=device)
    if dist.get_rank() == source:
        sample = next(samples)
        names = ("clean", "corrupted", "labels", "counted")
        packed = torch.cat([sample[name].flatten(1).long() for name in names], 1)
        if packed.shape != ints.shape:
            raise ValueError(
                f"the data loader gave {list(packed.shape)} integers for (micro-batch, views, "
                f"length) = {shape}, which needs {list(ints.shape)}"
            )
        ints.copy_(packed)
        weights = (sample["weights"].flatten(1), sample["normalizer"][:, None].double())
        floats.copy_(torch.cat(weights, 1))
    if group.size() > 1:
        dist.broadcast(ints, source, group=group)
        dist.broadcast(floats, source, group=group)
    streams, labels, counted = ints.split([length + columns, columns, columns], 1)
    return Batch(streams, labels, counted, floats[:, :-1], floats[:, -1])


@dataclass(frozen=True)
class LayoutSource:
    """Gives each batch its layout: one for all, or one for each set of packed documents."""

    common: Layout
    rules: CorruptionRules

    def of(self, batch: Batch) -> Layout:
        """Returns the layout of a batch; packed documents come one sample at a time."""
        if not self.rules.split_documents:
            return self.common
        request = self.common.plan.request
        clean = batch.streams[0, : request.length].cpu().numpy()
        return self._with_documents(request, self.rules.documents(clean))

    def _with_documents(self, request: PlanRequest, documents: Spans) -> Layout:
        common = self.common
        return make_layout(
            replace(request, documents=documents),
            common.groups,
            common.options,
            common.prune,
            common.position.device,
        )
