"""Deals chunks of unequal blocks so that all ranks have about the same number of attention pairs.

With packed documents the cost of a token depends on where its document starts, so dealing from
both ends no longer balances. The sample is cut into 2 * P * k chunks of about equal tokens; of each
P neighbouring chunks every rank gets one, which keeps tokens equal, and cost decides which one.
Knows nothing of masks or tensors. Specified by tests/layout/test_dealing.py.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_bp.layout.blocks import BlockTable

PIECES = (
    1,
    2,
    4,
    8,
    16,
)  # k: chunks a rank has in each half of the sample; more pieces, more launches
GOOD_ENOUGH = 1.02  # busiest rank over the mean: below it, more pieces cost more than they bring


@dataclass(frozen=True)
class Deal:
    """Who owns which chunk. Chunk c holds the blocks [cuts[c], cuts[c + 1]).

    Shapes: `cuts` int64 [2 * num_ranks * k + 1]; `chunks_of` int64 [num_ranks, 2 * k], ascending,
    the first k in the first half of the sample.
    """

    cuts: NDArray[np.int64]
    chunks_of: NDArray[np.int64]


def block_costs(blocks: BlockTable) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Attention pairs of the clean rows and of one view's rows of each block, int64 [num_blocks].

    Clean rows are counted token by token and windows are left out: layers with different windows
    share one ownership.
    """
    tokens = blocks.stop - blocks.start
    before = blocks.start - blocks.document_start
    return tokens * before + tokens * (tokens + 1) // 2, tokens * (before + tokens)


def cut_evenly(blocks: BlockTable, num_chunks: int) -> NDArray[np.int64]:
    """The block starts nearest to `num_chunks` equal token counts, as block indices."""
    starts = np.append(blocks.start, blocks.length)
    ideal = np.arange(num_chunks + 1) * (blocks.length / num_chunks)
    after = np.clip(np.searchsorted(starts, ideal), 1, blocks.num_blocks)
    cut = np.where(ideal - starts[after - 1] <= starts[after] - ideal, after - 1, after)
    cut[0], cut[-1] = 0, blocks.num_blocks
    return cut


def balanced_deals(
    blocks: BlockTable, num_ranks: int, num_clean_shards: int, num_views: int
) -> tuple[Deal, Deal]:
    """The deals of corrupted blocks over the ranks and of clean rows over the shards.

    They are one deal when every rank is a shard. The number of pieces is the smallest one that
    balances well, or else the best.
    """
    costs = block_costs(blocks)
    clean, corrupted = costs[0], costs[1] * num_views
    tried: list[tuple[float, tuple[Deal, Deal]]] = []
    for pieces in PIECES:
        cuts = cut_evenly(blocks, 2 * num_ranks * pieces)
        if num_clean_shards == num_ranks:
            cost = _sums(clean + corrupted, cuts)
            chunks_of = deal_by_cost(cost, np.zeros(num_ranks, dtype=np.int64))
            load, deals = cost[chunks_of].sum(1), (Deal(cuts, chunks_of),) * 2
        else:
            wide = cuts[:: num_ranks // num_clean_shards]
            cost = _sums(clean, wide)
            shards = deal_by_cost(cost, np.zeros(num_clean_shards, dtype=np.int64))
            before = np.tile(cost[shards].sum(1), num_ranks // num_clean_shards)
            cost = _sums(corrupted, cuts)
            chunks_of = deal_by_cost(cost, before)
            load = before + cost[chunks_of].sum(1)
            deals = (Deal(cuts, chunks_of), Deal(wide, shards))
        tried.append((load.max() * num_ranks / load.sum(), deals))
        if tried[-1][0] <= GOOD_ENOUGH or 4 * num_ranks * pieces > blocks.num_blocks:
            break
    return min(tried, key=lambda trial: trial[0])[1]


def deal_by_cost(cost: NDArray[np.int64], load: NDArray[np.int64]) -> NDArray[np.int64]:
    """Chunks of each rank, int64 [P, num_chunks / P]: one of each P neighbouring chunks.

    Groups of P chunks are dealt in the order of their spread, the costliest chunk to the rank with
    the least so far; then pairs of ranks swap chunks of a group while that lowers the larger load.
    Shapes: `cost` [num_chunks], `load` [P] what each rank has already.
    """
    num_ranks, load = len(load), load.copy()
    groups = cost.reshape(-1, num_ranks)
    chunks_of = np.empty((num_ranks, len(groups)), dtype=np.int64)
    for group in np.argsort(groups.min(1) - groups.max(1), kind="stable"):
        costliest = np.argsort(-groups[group], kind="stable")
        lightest = np.argsort(load, kind="stable")
        chunks_of[lightest, group] = group * num_ranks + costliest
        load[lightest] += groups[group][costliest]
    for _ in range(4 * num_ranks):
        if not _swap(cost, load, chunks_of):
            break
    return chunks_of


def _swap(cost: NDArray[np.int64], load: NDArray[np.int64], chunks_of: NDArray[np.int64]) -> bool:
    """Swaps the two chunks of one group that lower the busiest rank's load most, if any does."""
    busy = int(load.argmax())
    moved = cost[chunks_of[busy]][None] - cost[chunks_of]  # what `busy` would hand to each rank
    worse = np.maximum(load[busy] - moved, load[:, None] + moved)
    worse[busy] = load[busy]
    other, group = np.unravel_index(int(worse.argmin()), worse.shape)
    if worse[other, group] >= load[busy]:
        return False
    load[busy] -= moved[other, group]
    load[other] += moved[other, group]
    mine, theirs = chunks_of[busy, group], chunks_of[other, group]
    chunks_of[busy, group], chunks_of[other, group] = theirs, mine
    return True


def _sums(values: NDArray[np.int64], cuts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sum of `values` over each chunk of blocks."""
    total = np.concatenate([[0], np.cumsum(values)])
    return total[cuts[1:]] - total[cuts[:-1]]
