"""Brings a micro-batch to its ranks: one read a tensor-parallel group, a broadcast, and each
rank's rows.

The samples come whole (all L tokens, corrupted by the dataset); each rank cuts its rows with its
layout. Knows no model. Specified by tests/mcore/test_batch.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bp.data.packing import document_spans, used_length
from megatron_bp.mcore.carrier import Layout, Source, make_layout
from megatron_bp.mcore.dataset import CorruptionRules, Sample
from megatron_bp.objectives.objective import NUM_BUCKETS, Objective, Scope

CLEAN = NUM_BUCKETS  # the bucket of next-token targets, after those of the noise levels


@dataclass(frozen=True, eq=False)
class Batch:
    """A micro-batch of whole samples on this rank's device.

    Shapes: `document` int64 [Z, L] as data/packing.py numbers documents;
    `streams` int64 [Z, (1 + V) * L], the clean tokens followed by those of each view;
    `labels`, `counted`, `bucket` int64 and `weights` float64 [Z, V * L]; `next_labels` int64
    [Z, L]; `normalizer` float64 [Z].
    """

    document: Tensor
    streams: Tensor
    labels: Tensor
    counted: Tensor
    bucket: Tensor
    next_labels: Tensor
    weights: Tensor
    normalizer: Tensor

    def tokens(self, layout: Layout) -> Tensor:
        """This rank's input ids, int64 [Z, T]; 0 in padding rows."""
        return self.streams[:, layout.token_index].masked_fill(layout.is_padding, 0)

    def targets(self, layout: Layout, objective: Objective) -> Targets:
        """What this rank's rows are to learn; clean rows come first, if they have a loss."""
        real = ~layout.is_padding[layout.plan.rows.num_clean :]
        weights = self.weights[:, layout.target_index] * real
        views = Targets(
            labels=self.labels[:, layout.target_index].t(),
            weights=self._diffusion_weights(weights, objective).t(),
            is_target=(weights > 0).t(),
            bucket=self.bucket[:, layout.target_index].t(),
            num_counted=(self.counted[:, layout.target_index] * real).sum(),
            num_rows=real.sum() * len(self.weights),
        )
        return self._with_clean_rows(views, layout, objective) if objective.learns_clean else views

    def _diffusion_weights(self, weights: Tensor, objective: Objective) -> Tensor:
        if objective.scope is Scope.EXAMPLE:
            weights = weights / self.normalizer.clamp(min=1)[:, None]
        return weights * objective.diffusion_loss_weight

    def _with_clean_rows(self, views: Targets, layout: Layout, objective: Objective) -> Targets:
        """Adds the next-token targets of clean rows, dealt over the ranks that hold the same rows.

        A target counts on one rank; dealing spreads the head's work.
        """
        num_clean, groups = layout.plan.rows.num_clean, layout.groups
        labels = self.next_labels[:, layout.token_index[:num_clean]]
        turn = torch.arange(num_clean, device=labels.device) % groups.clean_replicas.size()
        mine = (turn == groups.clean_replica) & ~layout.is_padding[:num_clean]
        is_target = (labels >= 0) & mine
        weights = torch.full_like(self.normalizer, objective.ar_loss_weight)
        if objective.scope is Scope.EXAMPLE:
            weights = weights / (self.next_labels >= 0).sum(1).clamp(min=1)
        weights = weights[:, None].expand_as(labels)
        return Targets(
            labels=torch.cat([labels.clamp(min=0).t(), views.labels]),
            weights=torch.cat([weights.t(), views.weights]),
            is_target=torch.cat([is_target.t(), views.is_target]),
            bucket=torch.cat([torch.full_like(labels, CLEAN).t(), views.bucket]),
            num_counted=views.num_counted,
            num_rows=views.num_rows,
        )


@dataclass(frozen=True, eq=False)
class Targets:
    """What the last rows of a rank are to learn; rows first, as in Megatron's hidden states.

    `weights` are the factors of the rows' cross-entropies in the sum that is the objective (its
    normalizers included, if they are the samples' own). `bucket` is the quarter of the noise levels
    that a target's token is in, `CLEAN` for the next-token targets of clean rows.

    Shapes: `labels`, `weights`, `is_target`, `bucket` [rows, Z]; the counts [], of corrupted rows.
    """

    labels: Tensor
    weights: Tensor
    is_target: Tensor
    bucket: Tensor
    num_counted: Tensor
    num_rows: Tensor

    @cached_property
    def places(self) -> tuple[Tensor, Tensor]:
        """Row and sample of each target, int64 [R] each, in the order of rows.

        The first use waits for the device, since R is the length of the answer; later ones do not.
        """
        row, sample = self.is_target.nonzero(as_tuple=True)
        return row, sample

    @cached_property
    def picked_labels(self) -> Tensor:
        """Labels of the targets, int64 [R]."""
        return self.labels[self.places]


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
    widths = [length, length + columns, columns, columns, columns, length]
    ints = torch.empty(num_samples, sum(widths), dtype=torch.int64, device=device)
    floats = torch.empty(num_samples, columns + 1, dtype=torch.float64, device=device)
    if dist.get_rank() == source:
        sample = next(samples)
        names = ("document", "clean", "corrupted", "labels", "counted", "bucket", "next_labels")
        parts = [sample[name].flatten(1) for name in names]
        sizes = [part.shape[1] for part in parts]
        if len(parts[0]) != num_samples or sum(sizes) != ints.shape[1]:
            raise ValueError(
                f"the data loader gave {[len(parts[0]), sum(sizes)]} integers for (micro-batch, "
                f"views, length) = {shape}, which needs {list(ints.shape)}"
            )
        # One by one and from pinned memory, as the data loader gives them: a copy of all of them
        # on the CPU, and waiting for that, took 1 ms of an idle device at 64K.
        for place, part in zip(ints.split(sizes, 1), parts, strict=True):
            place.copy_(part, non_blocking=True)
        floats[:, :-1].copy_(sample["weights"].flatten(1), non_blocking=True)
        floats[:, -1].copy_(sample["normalizer"], non_blocking=True)
    if group.size() > 1:
        dist.broadcast(ints, source, group=group)
        dist.broadcast(floats, source, group=group)
    document, streams, labels, counted, bucket, following = ints.split(widths, 1)
    last = floats[:, :-1], floats[:, -1]
    return Batch(document, streams, labels, counted, bucket, following, *last)


@dataclass(frozen=True)
class LayoutSource:
    """Gives each batch its layout: one for all, or one for each set of packed documents.

    Positions restart at each document or run on. With a `length_multiple` (tokens; 0: none) the
    padding behind the documents gets rows only up to that multiple.
    """

    common: Layout
    rules: CorruptionRules
    restart_positions: bool = True
    length_multiple: int = 0

    def of(self, batch: Batch) -> Layout:
        """Returns the layout of a batch; packed documents come one sample at a time."""
        if not self.rules.split_documents:
            return self.common
        common, request = self.common, self.common.plan.request
        document = batch.document[0].cpu().numpy()[: self.length_of(batch)]
        spans = document_spans(document, request.block_size)
        return make_layout(
            replace(request, length=len(document), documents=spans),
            common.groups,
            common.options,
            common.prune,
            common.position.device,
            Source(stream_length=request.length, restart_positions=self.restart_positions),
        )

    def length_of(self, batch: Batch) -> int:
        """Positions of a sample that get rows: all of them, or up to the multiple that holds its
        documents."""
        whole = batch.document.shape[1]
        if not self.length_multiple:
            return whole
        used = used_length(batch.document[0].cpu().numpy())
        return min(whole, max(-(-used // self.length_multiple), 1) * self.length_multiple)
