"""Decides who owns what: runs of whole blocks, cut into chunks, and the chunks of each rank.

The only place that multiplies ranks. Equal blocks are dealt from both ends: rank r owns chunks r
and 2P-1-r of 2P, so that every rank sees the same number of clean keys. Unequal blocks (packed
documents) are dealt by cost, see dealing.py. Either way a rank's corrupted blocks and its clean
rows cover the same positions when every rank is a shard. Knows nothing of masks or tensors.
Specified by tests/layout/test_owners.py.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from megatron_bp.layout.blocks import BlockTable
from megatron_bp.layout.dealing import Deal, balanced_deals, cut_evenly


class Ownership(StrEnum):
    """How chunks are dealt to ranks."""

    DUAL_END = "dual_end"  # rank r owns chunks r and 2P-1-r; unequal blocks: dealt by cost
    CONTIGUOUS = "contiguous"  # rank r owns chunks 2r and 2r+1: unbalanced, for comparison only


@dataclass(frozen=True)
class ChunkMap:
    """2k chunks of whole blocks a rank: k early ones, then k late ones, ascending in each half.

    Shapes: `bounds` int64 [2 * k * num_ranks + 1], `chunks_of` int64 [num_ranks, 2 * k].
    Units: positions in tokens; chunk c covers [bounds[c], bounds[c + 1]) and may be empty.
    """

    num_ranks: int
    bounds: NDArray[np.int64]
    chunks_of: NDArray[np.int64]

    @property
    def num_pieces(self) -> int:
        """k, the chunks of a rank in each slab."""
        return self.chunks_of.shape[1] // 2

    def span(self, chunk: int) -> tuple[int, int]:
        """First and one past the last position of `chunk`."""
        return int(self.bounds[chunk]), int(self.bounds[chunk + 1])

    def spans_of(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Spans of the chunks of `rank`: k early ones, then k late ones."""
        return tuple(self.span(chunk) for chunk in self.chunks_of[rank])

    def placed_spans(self, rank: int) -> tuple[tuple[int, int, int], ...]:
        """(first row, lo, hi) of each chunk of `rank`, where its late slab follows its early one.

        A slab's chunks follow one another without gaps; what is left of the slab comes last.
        """
        placed, row = [], 0
        for piece, (lo, hi) in enumerate(self.spans_of(rank)):
            if piece == self.num_pieces:
                row = self.slab_lengths[0]
            placed.append((row, lo, hi))
            row += hi - lo
        return tuple(placed)

    @property
    def slab_lengths(self) -> tuple[int, int]:
        """Rows that every rank reserves for its early and for its late chunks, in tokens."""
        lengths = np.diff(self.bounds)[self.chunks_of].reshape(self.num_ranks, 2, -1).sum(2)
        return int(lengths[:, 0].max()), int(lengths[:, 1].max())

    @property
    def slab_of_chunk(self) -> NDArray[np.int64]:
        """0 for chunks that are some rank's early chunk, 1 for late ones; int64 [num_chunks]."""
        slab = np.empty(self.chunks_of.size, dtype=np.int64)
        early, late = np.split(self.chunks_of, 2, axis=1)
        slab[early], slab[late] = 0, 1
        return slab

    def chunks_in(self, lo: int, hi: int) -> NDArray[np.int64]:
        """Non-empty chunks that hold some position of [lo, hi)."""
        chunk = np.arange(self.chunks_of.size)
        start, stop = self.bounds[:-1], self.bounds[1:]
        return chunk[(start < hi) & (stop > lo) & (start < stop)]


def has_equal_blocks(blocks: BlockTable) -> bool:
    """Whether all blocks but the last are full, so that position alone decides their cost."""
    return bool((blocks.stop - blocks.start == blocks.block_size)[:-1].all())


def make_chunks(
    blocks: BlockTable, num_ranks: int, ownership: Ownership, group: int = 1
) -> ChunkMap:
    """Two chunks a rank by position; with `group` k, cut where 2 * num_ranks * k chunks are cut.

    A sample of equal blocks (the last may be ragged) is padded to 2P groups of ceil(B / 2P)
    blocks: all chunks but the last non-empty one are equal, so keys gathered from the ranks lie in
    natural order. Otherwise the cuts are the block starts nearest to equal token counts.
    """
    num_chunks = 2 * num_ranks * group
    starts = np.append(blocks.start, blocks.length)
    if has_equal_blocks(blocks):
        cut = np.minimum(
            np.arange(num_chunks + 1) * -(-blocks.num_blocks // num_chunks), blocks.num_blocks
        )
    else:
        cut = cut_evenly(blocks, num_chunks)
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
    blocks: BlockTable,
    num_ranks: int,
    num_clean_shards: int,
    ownership: Ownership,
    num_views: int = 1,
) -> Owners:
    """Owners of all blocks and clean rows; clean chunks are unions of corrupted chunks.

    `num_views` weighs corrupted rows against clean ones where the two are dealt apart.
    """
    if ownership is Ownership.DUAL_END and num_ranks > 1 and not _is_one_document(blocks):
        deals = balanced_deals(blocks, num_ranks, num_clean_shards, num_views)
        corrupted, clean = (_dealt_chunks(blocks, deal) for deal in deals)
    else:
        group = num_ranks // num_clean_shards
        corrupted = make_chunks(blocks, num_ranks, ownership)
        clean = make_chunks(blocks, num_clean_shards, ownership, group=group)
    rank_of_chunk = np.empty(corrupted.chunks_of.size, dtype=np.int64)
    rank_of_chunk[corrupted.chunks_of] = np.arange(num_ranks)[:, None]
    chunk_of_block = np.searchsorted(corrupted.bounds, blocks.start, side="right") - 1
    return Owners(corrupted, clean, rank_of_chunk[chunk_of_block])


def _is_one_document(blocks: BlockTable) -> bool:
    return has_equal_blocks(blocks) and not blocks.document_start.any()


def _dealt_chunks(blocks: BlockTable, deal: Deal) -> ChunkMap:
    starts = np.append(blocks.start, blocks.length)
    return ChunkMap(len(deal.chunks_of), starts[deal.cuts], deal.chunks_of)


@dataclass(frozen=True)
class Rows:
    """What each local row of a rank is; -1 in every column for a padding row.

    Local order: clean early slab, clean late slab, then for each view its early and late slab,
    then padding. Every slab is padded to the longest rank's, so all ranks have equally many rows.
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
        row_position = np.full(sum(chunks.slab_lengths), -1, dtype=np.int64)
        for row, lo, hi in chunks.placed_spans(chunk_rank):
            row_position[row : row + hi - lo] = np.arange(lo, hi)
        return row_position

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
