"""The launches of the `native` strategy cover what the plan covers, when keys are there."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bp.attention.contract import Cut
from megatron_bp.attention.prefix import native_launches
from megatron_bp.attention.windows import TILE, by_block
from megatron_bp.layout.decomposition import KeySpace, Launch, Phase
from megatron_bp.layout.plan import PlanRequest, RankPlan, make_plan
from tests.layout.test_decomposition import coverage, requests


@settings(max_examples=150, deadline=None)
@given(requests())
def test_launches_cover_every_allowed_pair_once_and_no_other(request: PlanRequest) -> None:
    for rank in range(request.num_ranks):
        plan = make_plan(request, rank)
        heads = (1, TILE // math.gcd(TILE, request.block_size))
        for corrupted_only, cut, many in product((False, True), Cut, heads):
            want = coverage(plan)
            if corrupted_only:
                want[: plan.rows.num_clean] = 0
            mine = replace(plan, launches=native_launches(plan, corrupted_only, cut, many))
            np.testing.assert_array_equal(coverage(mine), want)


@settings(max_examples=150, deadline=None)
@given(requests())
def test_problems_of_whole_blocks_cover_the_same_pairs(request: PlanRequest) -> None:
    request = replace(request, window=request.window or 7)
    for rank in range(request.num_ranks):
        plan = make_plan(request, rank)
        for launches in (plan.launches, plan.corrupted_launches):
            want = coverage(replace(plan, launches=launches))
            mine = tuple(by_block(plan, list(launches)))
            np.testing.assert_array_equal(coverage(replace(plan, launches=mine)), want)


def key_slabs(plan: RankPlan, launch: Launch) -> tuple[set[int], set[int]]:
    """Slabs of all clean keys of a launch, and of those that other shards own."""
    chunks, every, remote = plan.owners.clean, set(), set()
    for run in launch.keys:
        if run.space is KeySpace.CLEAN:
            rows = (run.starts[:, None] + np.arange(run.length)).ravel()
            position = plan.exchange.buffer_position[rows]
            chunk = np.searchsorted(chunks.bounds, position, side="right") - 1
            own = np.isin(chunk, chunks.chunks_of[plan.shard])
            every |= {1 + int(s) for s in chunks.slab_of_chunk[chunk]}
            remote |= {1 + int(s) for s in chunks.slab_of_chunk[chunk[~own]]}
    return every, remote


@settings(max_examples=100, deadline=None)
@given(requests(), st.sampled_from(Cut))
def test_launches_wait_for_their_keys_and_gradients_for_their_launches(
    request: PlanRequest, cut: Cut
) -> None:
    for rank in range(request.num_ranks):
        plan = make_plan(request, rank)
        windowed = not hasattr(plan.exchange, "slabs")
        launches = list(native_launches(plan, False, cut))
        if request.window:
            launches += by_block(plan, list(plan.launches))
        for launch in launches:
            every, remote = key_slabs(plan, launch)
            if windowed:
                every, remote = ({int(Phase.EARLY)} if x else set() for x in (every, remote))
            if request.num_clean_shards > 1:
                assert launch.ready >= max(remote, default=0)
                assert launch.slab >= max(every, default=0)


def test_clean_and_corrupted_rows_share_the_keys_before_their_chunks() -> None:
    request = PlanRequest(length=256, block_size=4, num_ranks=4, num_clean_shards=4)
    plan = make_plan(request, 1)
    early, late = plan.owners.clean.spans_of(1)
    unmasked = [
        x for x in native_launches(plan, False, Cut.CHUNKS) if x.right < 0 and x.keys[0].length > 4
    ]
    first, second = sorted(unmasked, key=lambda x: x.ready)
    assert first.num_rows * first.num_problems == plan.rows.num_rows
    assert first.keys[0].length == early[0]
    assert second.num_rows * second.num_problems == plan.rows.num_rows // 2
    assert second.keys[0].length == late[0] - early[0]


def test_what_lies_inside_a_chunk_needs_no_other_rank() -> None:
    request = PlanRequest(length=256, block_size=4, num_ranks=4, num_clean_shards=4)
    for rank in range(4):
        waiting = [
            x for x in native_launches(make_plan(request, rank), False, Cut.CHUNKS) if x.ready
        ]
        assert all(x.left < 0 and x.right < 0 for x in waiting)


def test_the_blocks_of_both_chunks_are_one_launch_where_squares_are() -> None:
    request = PlanRequest(length=256, block_size=4, num_ranks=4, num_clean_shards=4)
    for cut, num_launches in ((Cut.CHUNKS, 1), (Cut.CHUNK, 2)):
        launches = native_launches(make_plan(request, 1), False, cut)
        around = [x for x in launches if len(x.keys) == 2]
        assert len(around) == num_launches
        rows = np.concatenate([x.rows for x in around])
        assert len(set(rows.tolist())) == len(rows) == 14  # each chunk's first sees no block before


WINDOWED = PlanRequest(length=2**15, block_size=32, num_ranks=8, num_clean_shards=8, window=1024)


def test_blocks_whose_heads_fill_a_tile_see_their_window_unmasked() -> None:
    plan = make_plan(WINDOWED, 3)
    clean, *windows, own = native_launches(plan, False, Cut.CHUNKS, heads=4)
    assert (clean.left, clean.num_rows) == (1023, 2048)
    assert [(x.num_rows, x.num_keys, x.left, x.right) for x in windows] == [(32, 1023, -1, -1)] * 2
    assert sum(x.num_problems for x in windows) == plan.rows.num_corrupted // 32
    assert [x.space for x in own.keys] == [KeySpace.OWN]
    assert own.ready == max(x.ready for x in windows)  # after them, to be merged as it is written


@pytest.mark.parametrize(("rank", "heads"), [(3, 1), (3, 2), (3, 3), (3, 6), (0, 4)])
def test_other_small_blocks_keep_the_shifted_launches(rank: int, heads: int) -> None:
    """Blocks that fill no tile or part of one, and those at the start of a sample (rank 0), where
    each sees more keys than the one before."""
    plan = make_plan(WINDOWED, rank)
    lefts = {x.left for x in native_launches(plan, False, Cut.CHUNKS, heads) if x.num_keys > 96}
    assert lefts == {1023, 1023 - 32}
