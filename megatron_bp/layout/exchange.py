"""Says which clean key rows travel, and where in the key buffer each row lands.

Two exchanges. The dense one gathers two slabs (every shard's early chunks, then every shard's late
chunks); equal blocks put the early slab in natural order without a copy. The windowed one sends
only rows that some query of the receiver sees. Corrupted rows never appear here, except in the
conventional context-parallel baseline. Specified by tests/layout/test_exchange.py and tests/comm/.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_bp.layout.owners import ChunkMap


class Copy(NamedTuple):
    """`length` rows from row `source` of one buffer to row `target` of another."""

    source: int
    target: int
    length: int


class Route(StrEnum):
    """How a slab reaches shards on other nodes."""

    DIRECT = "direct"  # every shard's rows to every shard
    BY_NODE = "by_node"  # to one shard of each node, then on inside the node


class LinkRows(NamedTuple):
    """Rows that one rank sends, by what carries them."""

    inside: int  # to ranks of its own node
    between: int  # to ranks of other nodes


@dataclass(frozen=True)
class Slab:
    """One all-gather: `length` rows from each shard.

    `in_place_at` is the buffer row where the gathered slab lies in its final order, or -1 when it
    is gathered beside and moved by `copies` (gathered row -> buffer row). `local_row` is the first
    local row of this rank's share.
    """

    length: int
    local_row: int
    in_place_at: int
    copies: tuple[Copy, ...]


@dataclass(frozen=True, eq=False)
class SlabExchange:
    """The dense two-slab exchange of one rank, and the layout of its key buffer.

    Exchanges compare by identity, as plans do.
    Shapes: `buffer_position` int64 [num_buffer_rows], the position in each buffer row (-1: none).
    `own` copies this rank's rows to the buffer (local row -> buffer row), before any gather ends.
    """

    num_shards: int
    shard: int
    slabs: tuple[Slab, Slab]
    own: tuple[Copy, ...]
    buffer_position: NDArray[np.int64]

    @property
    def num_buffer_rows(self) -> int:
        """Rows of the key buffer."""
        return len(self.buffer_position)

    @property
    def sent_rows(self) -> int:
        """Rows that one rank puts on the wire in one forward pass (all-gather counting)."""
        return sum(slab.length for slab in self.slabs) * (self.num_shards - 1)

    def link_rows(self, ranks_per_node: int, route: Route) -> LinkRows:
        """`sent_rows` split over links, for k nodes of n adjacent shards; s rows in both slabs.

        Direct: s * (n - 1) inside and s * (k - 1) * n between. By node: s * k * (n - 1) inside (a
        rank passes on what it got from each node) and s * (k - 1) between. The sums are equal. The
        reduction sends as many.
        Raises: ValueError if the shards do not fill their nodes.
        """
        nodes = _num_nodes(self.num_shards, ranks_per_node)
        rows, per_node = sum(slab.length for slab in self.slabs), self.num_shards // nodes
        if route is Route.DIRECT:
            return LinkRows(rows * (per_node - 1), rows * (nodes - 1) * per_node)
        return LinkRows(rows * nodes * (per_node - 1), rows * (nodes - 1))


@dataclass(frozen=True, eq=False)
class WindowExchange:
    """The windowed exchange of one rank: an all-to-all of only those rows that are needed.

    Exchanges compare by identity, as plans do.
    Shapes: `send_rows` int64 [sum(send_counts)], local rows, grouped by destination shard;
    `receive_rows` int64 [sum(receive_counts)], buffer rows, grouped by source shard.
    """

    num_shards: int
    shard: int
    send_rows: NDArray[np.int64]
    send_counts: tuple[int, ...]
    receive_rows: NDArray[np.int64]
    receive_counts: tuple[int, ...]
    own: tuple[Copy, ...]
    buffer_position: NDArray[np.int64]

    @property
    def num_buffer_rows(self) -> int:
        """Rows of the key buffer."""
        return len(self.buffer_position)

    @property
    def sent_rows(self) -> int:
        """Rows that this rank puts on the wire in one forward pass."""
        return sum(self.send_counts)

    def link_rows(self, ranks_per_node: int, counts: tuple[int, ...]) -> LinkRows:
        """Rows split over links; `counts` is `send_counts`, or `receive_counts` for backward.

        Raises: ValueError if the shards do not fill their nodes.
        """
        per_node = self.num_shards // _num_nodes(self.num_shards, ranks_per_node)
        first = self.shard - self.shard % per_node
        inside = sum(counts[first : first + per_node])
        return LinkRows(inside, sum(counts) - inside)


Exchange = SlabExchange | WindowExchange


def _num_nodes(num_shards: int, ranks_per_node: int) -> int:
    if ranks_per_node < 1 or (num_shards % ranks_per_node and ranks_per_node < num_shards):
        raise ValueError(
            f"ranks_per_node={ranks_per_node} must divide the {num_shards} shards, or hold all of "
            "them; use a divisor."
        )
    return max(1, num_shards // ranks_per_node)


def dense_exchange(chunks: ChunkMap, shard: int) -> SlabExchange:
    """The two-slab exchange of `shard`; its local rows are [early slab ; late slab]."""
    early, late = chunks.slab_lengths
    slab_start = (0, chunks.num_ranks * early)
    in_order = chunks.num_pieces == 1 and all(
        lo == hi or lo == slab_start[s] + i * (early, late)[s]
        for s in (0, 1)
        for i, chunk in enumerate(sorted(int(c) for c in chunks.chunks_of[:, s]))
        for lo, hi in [chunks.span(chunk)]
    )
    length = int(chunks.bounds[-1])
    num_rows = chunks.num_ranks * (early + late) if in_order else length
    slabs = []
    for s, (rows, local_row) in enumerate(((early, 0), (late, early))):
        copies = [
            Copy(rank * rows + row - local_row, lo, hi - lo)
            for rank in range(chunks.num_ranks)
            for row, lo, hi in _pieces(chunks, rank, s)
        ]
        straight = in_order and all(copy.target == slab_start[s] + copy.source for copy in copies)
        slabs.append(
            Slab(
                rows,
                local_row,
                slab_start[s] if straight else -1,
                () if straight else tuple(copies),
            )
        )
    own = tuple(Copy(row, lo, hi - lo) for s in (0, 1) for row, lo, hi in _pieces(chunks, shard, s))
    position = np.arange(num_rows)
    position[length:] = -1
    return SlabExchange(chunks.num_ranks, shard, (slabs[0], slabs[1]), own, position)


def _pieces(chunks: ChunkMap, rank: int, slab: int) -> list[tuple[int, int, int]]:
    """(local row, lo, hi) of the non-empty chunks of one slab of `rank`."""
    k = chunks.num_pieces
    placed = chunks.placed_spans(rank)[slab * k : slab * k + k]
    return [(row, lo, hi) for row, lo, hi in placed if lo < hi]


def window_exchange(
    chunks: ChunkMap, shard: int, needed: list[NDArray[np.bool_]]
) -> WindowExchange:
    """The windowed exchange of `shard` when shard j needs the positions `needed[j]`, bool [length].

    The buffer holds this rank's own rows and the remote rows it needs, in position order.
    """
    length = int(chunks.bounds[-1])
    owner, local_row = np.empty(length, dtype=np.int64), np.empty(length, dtype=np.int64)
    for rank in range(chunks.num_ranks):
        for first, lo, hi in chunks.placed_spans(rank):
            owner[lo:hi], local_row[lo:hi] = rank, first + np.arange(hi - lo)
    here = needed[shard] | (owner == shard)
    position = np.flatnonzero(here)
    buffer_row = np.full(length, -1, dtype=np.int64)
    buffer_row[position] = np.arange(len(position))
    others = [rank for rank in range(chunks.num_ranks) if rank != shard]
    send = {rank: np.flatnonzero(needed[rank] & (owner == shard)) for rank in others}
    receive = {rank: np.flatnonzero(needed[shard] & (owner == rank)) for rank in others}
    own = tuple(
        Copy(first, int(buffer_row[lo]), hi - lo)
        for first, lo, hi in chunks.placed_spans(shard)
        if lo < hi
    )

    def joined(parts: dict[int, NDArray[np.int64]], table: NDArray[np.int64]) -> NDArray[np.int64]:
        return table[np.concatenate([np.empty(0, np.int64), *(parts[r] for r in sorted(parts))])]

    def counts(parts: dict[int, NDArray[np.int64]]) -> tuple[int, ...]:
        return tuple(len(parts.get(rank, ())) for rank in range(chunks.num_ranks))

    return WindowExchange(
        num_shards=chunks.num_ranks,
        shard=shard,
        send_rows=joined(send, local_row),
        send_counts=counts(send),
        receive_rows=joined(receive, buffer_row),
        receive_counts=counts(receive),
        own=own,
        buffer_position=position,
    )
