"""Decides who owns what: runs of whole blocks, cut into 2P chunks, two chunks a rank.

The only place that multiplies ranks. With dual-end ownership rank r owns chunks r and 2P-1-r, so
that every rank sees the same number of clean keys, and its corrupted blocks and its clean rows
cover the same positions. Knows nothing of masks or tensors.
Specified by tests/layout/test_owners.py.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from megatron_bp.layout.blocks import BlockTable


class Ownership(StrEnum):
    """How chunks are dealt to ranks."""

    DUAL_END = "dual_end"  # rank r owns chunks r and 2P-1-r
    CONTIGUOUS = "contiguous"  # rank r owns chunks 2r and 2r+1: unbalanced, for comparison only


@dataclass(frozen=True)
class ChunkMap:
    """Two chunks of whole blocks a rank; `chunks_of[rank] = (early, late)`.

    Shapes: `bounds` int64 [2 * num_ranks + 1], `chunks_of` int64 [num_ranks, 2].
    Units: positions in tokens; chunk c covers [bounds[c], bounds[c + 1]) and may be empty.
    """

    num_ranks: int
    bounds: NDArray[np.int64]
    chunks_of: NDArray[np.int64]

    def span(self, chunk: int) -> tuple[int, int]:
        """First and one past the last position of `chunk`."""
        return int(self.bounds[chunk]), int(self.bounds[chunk + 1])

    def spans_of(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Spans of the early and of the late chunk of `rank`."""
        early, late = self.chunks_of[rank]
        return self.span(early), self.span(late)

    @property
    def slab_lengths(self) -> tuple[int, int]:
        """Rows that every rank reserves for its early and for its late chunk, in tokens."""
        lengths = np.diff(self.bounds)[self.chunks_of]
        return int(lengths[:, 0].max()), int(lengths[:, 1].max())

    @property
    def slab_of_chunk(self) -> NDArray[np.int64]:
        """0 for chunks that are some rank's early chunk, 1 for late ones; int64 [2 * num_ranks]."""
        slab = np.empty(2 * self.num_ranks, dtype=np.int64)
        slab[self.chunks_of[:, 0]], slab[self.chunks_of[:, 1]] = 0, 1
        return slab

    def chunks_in(self, lo: int, hi: int) -> NDArray[np.int64]:
        """Non-empty chunks that hold some position of [lo, hi)."""
        chunk = np.arange(2 * self.num_ranks)
        start, stop = self.bounds[:-1], self.bounds[1:]
        return chunk[(start < hi) & (stop > lo) & (start < stop)]


def make_chunks(
    blocks: BlockTable, num_ranks: int, ownership: Ownership, group: int = 1
) -> ChunkMap:
    """Chunks for `num_ranks` ranks; with `group` k, cut where 2 * num_ranks * k chunks are cut.

    A sample of equal blocks (the last may be ragged) is padded to 2P groups of ceil(B / 2P)
    blocks: all chunks but the last non-empty one are equal, so keys gathered from the ranks lie in
    natural order. Otherwise the cuts are the block starts nearest to equal token counts.
    """
    num_chunks = 2 * num_ranks * group
    starts = np.append(blocks.start, blocks.length)
    full = blocks.stop - blocks.start == blocks.block_size
    if full[:-1].all():
        cut = np.minimum(
            np.arange(num_chunks + 1) * -(-blocks.num_blocks // num_chunks), blocks.num_blocks
        )
    else:
        ideal = np.arange(num_chunks + 1) * (blocks.length / num_chunks)
        after = np.clip(np.searchsorted(starts, ideal), 1, blocks.num_blocks)
        cut = np.where(ideal - starts[after - 1] <= starts[after] - ideal, after - 1, after)
        cut[0], cut[-1] = 0, blocks.num_blocks
    rank = np.arange(num_ranks)
    if ownership is Ownership.DUAL_END:
        chunks_of = np.stack([rank, 2 * num_ranks - 1 - rank], axis=1)
    else:
        chunks_of = np.stack([2 * rank, 2 * rank + 1], axis=1)
    return ChunkMap(num_ranks=num_ranks, bounds=starts[cut][::group], chunks_of=chunks_of)


@dataclass(frozen=True)
class Owners:
    """Ownership of one sample: corrupted blocks over P ranks, clean rows over C shards.

    Clean shard j lives on the context ranks i with i % C == j (replicated P // C times).
    """

    corrupted: ChunkMap
    clean: ChunkMap
    rank_of_block: NDArray[np.int64]

    def blocks_of(self, rank: int) -> NDArray[np.int64]:
        """Blocks that `rank` owns, ascending."""
        return np.flatnonzero(self.rank_of_block == rank)


def make_owners(
    blocks: BlockTable, num_ranks: int, num_clean_shards: int, ownership: Ownership
) -> Owners:
    """Owners of all blocks and clean rows; clean chunks are unions of corrupted chunks."""
    corrupted = make_chunks(blocks, num_ranks, ownership)
    clean = make_chunks(blocks, num_clean_shards, ownership, group=num_ranks // num_clean_shards)
    rank_of_chunk = np.empty(2 * num_ranks, dtype=np.int64)
    rank_of_chunk[corrupted.chunks_of] = np.arange(num_ranks)[:, None]
    chunk_of_block = np.searchsorted(corrupted.bounds, blocks.start, side="right") - 1
    return Owners(corrupted, clean, rank_of_chunk[chunk_of_block])


@dataclass(frozen=True)
class Rows:
    """What each local row of a rank is; -1 in every column for a padding row.

    Local order: clean early chunk, clean late chunk, then for each view its early and late chunk,
    then padding. Every chunk is padded to its slab length, so all ranks have equally many rows.
    Shapes: all int64 [T]. `stream` is 0 for clean rows and 1 + view for corrupted rows;
    `coordinate` is the position of a clean row and view * length + position of a corrupted row.
    """

    stream: NDArray[np.int64]
    position: NDArray[np.int64]
    block: NDArray[np.int64]
    document: NDArray[np.int64]
    coordinate: NDArray[np.int64]
    num_clean: int
    num_views: int

    @property
    def num_rows(self) -> int:
        """Local rows, padding included."""
        return len(self.stream)

    @property
    def num_corrupted(self) -> int:
        """Rows from the first corrupted row to the end, padding included."""
        return self.num_rows - self.num_clean


def make_rows(
    blocks: BlockTable, owners: Owners, rank: int, num_views: int, row_multiple: int
) -> Rows:
    """Rows of context rank `rank`, padded to a multiple of `row_multiple` rows."""

    def slab(chunks: ChunkMap, chunk_rank: int) -> NDArray[np.int64]:
        parts = [
            np.pad(np.arange(lo, hi), (0, length - (hi - lo)), constant_values=-1)
            for (lo, hi), length in zip(
                chunks.spans_of(chunk_rank), chunks.slab_lengths, strict=True
            )
        ]
        return np.concatenate(parts)

    clean = slab(owners.clean, rank % owners.clean.num_ranks)
    corrupted = slab(owners.corrupted, rank)
    position = np.concatenate([clean, *[corrupted] * num_views])
    stream = np.repeat(np.arange(1 + num_views), [len(clean)] + [len(corrupted)] * num_views)
    tail = -len(position) % row_multiple
    position = np.pad(position, (0, tail), constant_values=-1)
    stream = np.where(position >= 0, np.pad(stream, (0, tail)), -1)
    real = position >= 0
    block = np.where(real, blocks.of_position[position], -1)
    return Rows(
        stream=stream,
        position=position,
        block=block,
        document=np.where(real, blocks.document[block], -1),
        coordinate=np.where(real, np.maximum(stream - 1, 0) * blocks.length + position, -1),
        num_clean=len(clean),
        num_views=num_views,
    )
