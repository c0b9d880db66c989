"""The launches of the `native` strategy cover what the plan covers, when keys are there."""

from dataclasses import replace
from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bp.attention.contract import Cut
from megatron_bp.attention.prefix import native_launches
from megatron_bp.attention.windows import window_launches
from megatron_bp.layout.decomposition import KeySpace, Launch, Phase
from megatron_bp.layout.plan import PlanRequest, RankPlan, make_plan
from tests.layout.test_decomposition import coverage, requests


@settings(max_examples=150, deadline=None)
@given(requests())
def test_launches_cover_every_allowed_pair_once_and_no_other(request: PlanRequest) -> None:
    for rank in range(request.num_ranks):
        plan = make_plan(request, rank)
        for corrupted_only, cut in product((False, True), Cut):
            want = coverage(plan)
            if corrupted_only:
                want[: plan.rows.num_clean] = 0
            mine = replace(plan, launches=native_launches(plan, corrupted_only, cut))
            np.testing.assert_array_equal(coverage(mine), want)


@settings(max_examples=150, deadline=None)
@given(requests())
def test_problems_of_whole_blocks_cover_the_same_pairs(request: PlanRequest) -> None:
    request = replace(request, window=request.window or 7)
    for rank in range(request.num_ranks):
        plan = make_plan(request, rank)
        for launches in (plan.launches, plan.corrupted_launches):
            want = coverage(replace(plan, launches=launches))
            mine = tuple(window_launches(plan, list(launches), tile=1))
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
            launches += window_launches(plan, list(plan.launches), tile=1)
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
