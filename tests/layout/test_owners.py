"""Every block and every clean row has exactly one owner, and the owners' work is balanced."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bp.layout.cost import imbalance, pairs
from megatron_bp.layout.owners import (
    Ownership,
    has_equal_blocks,
    make_chunks,
    make_owners,
    make_rows,
)
from megatron_bp.layout.plan import PlanRequest
from megatron_bp.layout.visibility import CleanRule
from tests.layout.test_decomposition import requests

BOTH = st.sampled_from(Ownership)


@settings(max_examples=150, deadline=None)
@given(requests(), BOTH)
def test_every_block_has_exactly_one_owner(request: PlanRequest, ownership: Ownership) -> None:
    blocks = request.blocks
    owners = make_owners(blocks, request.num_ranks, request.num_clean_shards, ownership)
    of_rank = [owners.blocks_of(rank) for rank in range(request.num_ranks)]
    assert sorted(np.concatenate(of_rank)) == list(range(blocks.num_blocks))
    for rank, owned in enumerate(of_rank):
        inside = [
            lo <= blocks.start[b] and blocks.stop[b] <= hi
            for b in owned
            for lo, hi in owners.corrupted.spans_of(rank)
        ]
        assert sum(inside) == len(owned), "a block must lie whole in one chunk of its owner"


@settings(max_examples=150, deadline=None)
@given(requests(), BOTH)
def test_chunks_cover_all_positions_once(request: PlanRequest, ownership: Ownership) -> None:
    owners = make_owners(request.blocks, request.num_ranks, request.num_clean_shards, ownership)
    for chunks in (owners.corrupted, owners.clean):
        covered = [
            position
            for rank in range(chunks.num_ranks)
            for lo, hi in chunks.spans_of(rank)
            for position in range(lo, hi)
        ]
        assert sorted(covered) == list(range(request.length))
        k = chunks.num_pieces
        assert sorted(chunks.chunks_of.ravel()) == list(range(2 * k * chunks.num_ranks))
        for slab in (0, 1):
            mine = slice(slab * k, slab * k + k)
            lengths = [
                sum(hi - lo for lo, hi in chunks.spans_of(rank)[mine])
                for rank in range(chunks.num_ranks)
            ]
            assert chunks.slab_lengths[slab] == max(lengths)
            assert (chunks.slab_of_chunk[chunks.chunks_of[:, mine]] == slab).all()


@settings(max_examples=150, deadline=None)
@given(requests(), BOTH)
def test_clean_chunks_are_unions_of_corrupted_chunks(
    request: PlanRequest, ownership: Ownership
) -> None:
    owners = make_owners(request.blocks, request.num_ranks, request.num_clean_shards, ownership)
    assert set(owners.clean.bounds) <= set(owners.corrupted.bounds)
    if request.num_clean_shards == request.num_ranks:
        np.testing.assert_array_equal(owners.clean.bounds, owners.corrupted.bounds)


@settings(max_examples=150, deadline=None)
@given(requests())
def test_chunks_in_names_the_chunks_of_each_position(request: PlanRequest) -> None:
    chunks = make_chunks(request.blocks, request.num_ranks, Ownership.DUAL_END)
    of_position = np.searchsorted(chunks.bounds, np.arange(request.length), side="right") - 1
    for lo, hi in ((0, request.length), (request.length // 3, request.length // 2 + 1)):
        assert chunks.chunks_in(lo, hi).tolist() == sorted(set(of_position[lo:hi]))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8])
def test_dual_end_pairs_each_chunk_with_its_mirror(num_ranks: int) -> None:
    blocks = PlanRequest(length=2 * num_ranks * 12, block_size=4).blocks
    owners = make_owners(blocks, num_ranks, num_ranks, Ownership.DUAL_END)
    last = blocks.num_blocks - 1
    for rank in range(num_ranks):
        owned = set(owners.blocks_of(rank).tolist())
        assert owned == {last - block for block in owned}
        early, late = owners.corrupted.chunks_of[rank]
        assert (early, late) == (rank, 2 * num_ranks - 1 - rank)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(1, 2),
    st.sampled_from(CleanRule),
)
def test_pairs_are_equal_on_all_ranks_when_blocks_divide(
    num_ranks: int, blocks_per_chunk: int, block_size: int, num_views: int, rule: CleanRule
) -> None:
    for shards in {1, num_ranks}:
        request = PlanRequest(
            length=2 * num_ranks * blocks_per_chunk * block_size,
            block_size=block_size,
            num_ranks=num_ranks,
            num_clean_shards=shards,
            num_views=num_views,
            clean_rule=rule,
        )
        assert len(set(pairs(request))) == 1
        assert imbalance(request) == 1.0


@pytest.mark.parametrize("rule", CleanRule)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_contiguous_ownership_is_unbalanced(num_ranks: int, rule: CleanRule) -> None:
    shape = {
        "length": 2 * num_ranks * 16,
        "block_size": 4,
        "num_ranks": num_ranks,
        "num_clean_shards": num_ranks,
        "clean_rule": rule,
    }
    assert imbalance(PlanRequest(**shape)) == 1.0
    # The last rank sees (2P - 1) / P of the mean prefix; the own parts dilute that a little.
    contiguous = imbalance(PlanRequest(**shape, ownership=Ownership.CONTIGUOUS))
    assert 1.3 < contiguous < (2 * num_ranks - 1) / num_ranks


@settings(max_examples=150, deadline=None)
@given(requests())
def test_every_rank_has_the_same_row_layout(request: PlanRequest) -> None:
    blocks = request.blocks
    owners = make_owners(blocks, request.num_ranks, request.num_clean_shards, request.ownership)
    rows = [
        make_rows(blocks, owners, rank, request.num_views, request.row_multiple)
        for rank in range(request.num_ranks)
    ]
    assert len({(r.num_rows, r.num_clean, r.num_corrupted) for r in rows}) == 1
    assert rows[0].num_rows % request.row_multiple == 0
    for r in rows:
        real = r.stream >= 0
        for column in (r.stream, r.position, r.block, r.document, r.coordinate):
            assert len(column) == r.num_rows
            assert (column[~real] == -1).all(), "a padding row is -1 in every column"
        np.testing.assert_array_equal(r.block[real], blocks.of_position[r.position[real]])
        np.testing.assert_array_equal(r.document[real], blocks.document[r.block[real]])
        np.testing.assert_array_equal(
            r.coordinate[real],
            np.where(r.stream > 0, (r.stream - 1) * request.length, 0)[real] + r.position[real],
        )
        assert not (r.stream[: r.num_clean] > 0).any()
        assert not (r.stream[r.num_clean :] == 0).any()
        views = [r.position[r.stream == 1 + view] for view in range(request.num_views)]
        for view in views:
            np.testing.assert_array_equal(view, views[0])
            assert (np.diff(view) > 0).all()


@settings(max_examples=100, deadline=None)
@given(requests())
def test_corrupted_and_clean_rows_of_a_rank_cover_the_same_positions(request: PlanRequest) -> None:
    owners = make_owners(request.blocks, request.num_ranks, request.num_ranks, Ownership.DUAL_END)
    for rank in range(request.num_ranks):
        rows = make_rows(request.blocks, owners, rank, 1, 1)
        np.testing.assert_array_equal(
            rows.position[rows.stream == 0], rows.position[rows.stream == 1]
        )


@settings(max_examples=150, deadline=None)
@given(requests())
def test_unequal_blocks_are_cut_near_equal_tokens_and_dealt_one_of_each_group(
    request: PlanRequest,
) -> None:
    """Each cut is at most half a block from its ideal place, so a chunk is off by one block."""
    blocks, num_ranks = request.blocks, request.num_ranks
    if has_equal_blocks(blocks) or num_ranks == 1:
        return  # one run of equal blocks is padded instead
    chunks = make_owners(blocks, num_ranks, num_ranks, Ownership.DUAL_END).corrupted
    ideal = np.linspace(0, request.length, len(chunks.bounds))
    assert (np.abs(chunks.bounds - ideal) <= request.block_size / 2 + 1e-9).all()
    np.testing.assert_array_equal(
        chunks.chunks_of // num_ranks, np.tile(np.arange(2 * chunks.num_pieces), (num_ranks, 1))
    )


def test_equal_blocks_are_padded_so_that_all_chunks_but_the_last_are_equal() -> None:
    chunks = make_chunks(PlanRequest(length=41, block_size=4).blocks, 2, Ownership.DUAL_END)
    assert chunks.bounds.tolist() == [0, 12, 24, 36, 41]
    chunks = make_chunks(PlanRequest(length=8, block_size=4).blocks, 3, Ownership.DUAL_END)
    assert chunks.bounds.tolist() == [0, 4, 8, 8, 8, 8, 8]


def test_contiguous_ownership_gives_neighbouring_chunks() -> None:
    blocks = PlanRequest(length=24, block_size=2).blocks
    owners = make_owners(blocks, 3, 3, Ownership.CONTIGUOUS)
    assert owners.rank_of_block.tolist() == [0] * 4 + [1] * 4 + [2] * 4
