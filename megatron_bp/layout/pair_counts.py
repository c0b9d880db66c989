"""Counts rows, attention pairs and travelling rows of every rank at once, without making plans.

A plan of 4,096 ranks takes minutes to make for all of them; the counts follow from ownership and
from what a row sees, both of which are arrays. Exact: tests/layout/test_pair_counts.py compares
every number with the plans' own.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from megatron_bp.layout.blocks import BlockTable
from megatron_bp.layout.owners import ChunkMap, Owners, make_owners
from megatron_bp.layout.plan import PlanRequest
from megatron_bp.layout.visibility import visibility_of

Counts = NDArray[np.int64]
Interval = tuple[int, int]


@dataclass(frozen=True)
class RowCounts:
    """Local rows, equal on every rank: `clean`, `corrupted` (all views, padding included)."""

    clean: int
    corrupted: int

    @property
    def total(self) -> int:
        """All local rows."""
        return self.clean + self.corrupted


@dataclass(frozen=True, eq=False)
class PairCounts:
    """Attention pairs of each rank, int64 [P], clean rows and corrupted rows apart."""

    clean: Counts
    corrupted: Counts

    @property
    def total(self) -> Counts:
        """All pairs of each rank."""
        return self.clean + self.corrupted


def _shared(request: PlanRequest) -> PlanRequest:
    """The request without what ownership does not depend on, so that it is computed once."""
    return replace(request, window=0, row_multiple=1, windowed_exchange=True)


@lru_cache(maxsize=256)
def _owners(request: PlanRequest) -> Owners:
    return make_owners(
        request.blocks,
        request.num_ranks,
        request.num_clean_shards,
        request.ownership,
        request.num_views,
    )


def owners_of(request: PlanRequest) -> Owners:
    """Who owns what, cached."""
    return _owners(_shared(request))


@lru_cache(maxsize=4096)
def row_counts(request: PlanRequest) -> RowCounts:
    """Rows that each rank holds: L / C clean and V * L / P corrupted ones, padded as plans pad."""
    owners = owners_of(request)
    clean = sum(owners.clean.slab_lengths)
    rows = clean + request.num_views * sum(owners.corrupted.slab_lengths)
    rows += -rows % request.row_multiple
    return RowCounts(clean, rows - clean)


@lru_cache(maxsize=64)
def _pairs_before(request: PlanRequest) -> tuple[Counts, Counts]:
    """Pairs of the clean and corrupted rows before each block, int64 [N + 1], of one view."""
    blocks = request.blocks
    position = np.arange(blocks.length)
    of_stream = []
    for stream in (0, 1):
        seen = visibility_of(np.full(blocks.length, stream), position, blocks, request.rules)
        keys = seen.clean_hi.astype(np.int64) - seen.clean_lo + (seen.own_hi - seen.own_lo)
        of_block = np.add.reduceat(keys, blocks.start)
        of_stream.append(np.concatenate([[0], np.cumsum(of_block)]))
    return of_stream[0], of_stream[1]


def _of_ranks(chunks: ChunkMap, before: Counts, blocks: BlockTable) -> Counts:
    """Sum over each rank's chunks of a quantity given as its sum before each block."""
    at = before[np.searchsorted(blocks.start, chunks.bounds)]
    return np.diff(at)[chunks.chunks_of].sum(axis=1)


@lru_cache(maxsize=1024)
def pair_counts(request: PlanRequest) -> PairCounts:
    """Pairs (row, key) that each rank computes; `cost.pairs` without making plans."""
    owners = owners_of(request)
    alone = replace(
        _shared(request),
        num_ranks=1,
        num_clean_shards=1,
        num_views=1,
        gather_corrupted=False,
        window=request.window,
    )
    clean, corrupted = _pairs_before(alone)
    of_shard = _of_ranks(owners.clean, clean, request.blocks)
    return PairCounts(
        clean=np.tile(of_shard, request.num_ranks // request.num_clean_shards),
        corrupted=request.num_views * _of_ranks(owners.corrupted, corrupted, request.blocks),
    )


def merged(intervals: list[Interval]) -> list[Interval]:
    """The union of half-open intervals as disjoint ones, ascending."""
    union: list[Interval] = []
    for lo, hi in sorted(i for i in intervals if i[0] < i[1]):
        if union and lo <= union[-1][1]:
            union[-1] = (union[-1][0], max(hi, union[-1][1]))
        else:
            union.append((lo, hi))
    return union


def overlap(some: list[Interval], others: list[Interval]) -> int:
    """Positions that are in both of two lists of disjoint intervals."""
    return sum(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a in some for b in others)


@lru_cache(maxsize=256)
def window_rows(request: PlanRequest) -> Counts:
    """Clean rows that each rank receives in a windowed exchange, int64 [P]; sent ones sum equally.

    Clean rows [a, z) need [max(0, a - (W - 1)), z), a corrupted block at s needs [s - (W - 1), s);
    what the rank holds itself does not travel.
    Aligned dual-end ownership: (2P - 2)(W - 1) / P on average (facts: chunk 0 has no history, and
    the last rank's chunks are neighbours). One document only.
    """
    owners = owners_of(request)
    reach, starts = request.window - 1, request.blocks.start
    received = []
    for rank in range(request.num_ranks):
        held = merged(list(owners.clean.spans_of(rank % request.num_clean_shards)))
        needed = [(max(0, lo - reach), hi) for lo, hi in held]
        for span in owners.corrupted.spans_of(rank):
            first, last = np.searchsorted(starts, span)
            if reach < request.block_size:
                needed += [(max(0, int(s) - reach), int(s)) for s in starts[first:last]]
            elif first < last:  # the windows of neighbouring blocks touch
                needed.append((max(0, int(starts[first]) - reach), int(starts[last - 1])))
        union = merged(needed)
        received.append(sum(hi - lo for lo, hi in union) - overlap(union, held))
    return np.array(received, dtype=np.int64)
