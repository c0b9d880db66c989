"""The launches of every rank cover exactly the pairs of its mask, each once."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bp.layout.decomposition import KeySpace, Phase
from megatron_bp.layout.plan import PlanRequest, RankPlan, make_plan
from megatron_bp.layout.visibility import CleanRule, CorruptedRule, dense_mask


def coverage(plan: RankPlan) -> np.ndarray:
    """How often the launches cover each (row, key) pair: int [T, clean keys + own keys]."""
    num_clean_keys = len(plan.exchange.buffer_position)
    seen = np.zeros((plan.rows.num_rows, num_clean_keys + len(plan.own_coordinate)), dtype=int)
    for launch in plan.launches:
        q, k = launch.num_rows, launch.num_keys
        at = np.arange(q)[:, None] + k - q
        key = np.arange(k)[None]
        allowed = np.ones((q, k), dtype=int)
        if launch.left >= 0:
            allowed &= key >= at - launch.left
        if launch.right >= 0:
            allowed &= key <= at + launch.right
        for z, row in enumerate(launch.rows):
            columns = np.concatenate(
                [
                    run.starts[z]
                    + np.arange(run.length)
                    + (num_clean_keys if run.space is KeySpace.OWN else 0)
                    for run in launch.keys
                ]
            )
            seen[row : row + q, columns] += allowed
    return seen


@st.composite
def requests(draw: st.DrawFn) -> PlanRequest:
    block = draw(st.integers(1, 9))
    num_ranks = draw(st.sampled_from([1, 2, 3, 4]))
    length = draw(st.integers(1, 96))
    cuts = draw(st.sets(st.integers(1, max(1, length - 1)), max_size=4)) - {length}
    edges = [0, *sorted(cuts), length]
    documents = tuple(pairwise(edges))
    prompts = tuple(draw(st.integers(0, hi - lo)) for lo, hi in documents)
    shards = draw(st.sampled_from([c for c in (1, 2, 3, 4) if num_ranks % c == 0]))
    baseline = shards == num_ranks and draw(st.booleans())
    return PlanRequest(
        length=length,
        block_size=block,
        num_ranks=num_ranks,
        num_clean_shards=shards,
        num_views=draw(st.integers(1, 2)),
        clean_rule=draw(st.sampled_from(CleanRule)),
        corrupted_rule=draw(st.sampled_from(CorruptedRule)),
        window=draw(st.sampled_from([0, 0, 1, 2, 3, 5, 8, 13, 40])),
        documents=documents if draw(st.booleans()) else (),
        prompts=prompts if draw(st.booleans()) and len(documents) == 1 else (),
        gather_corrupted=baseline,
        row_multiple=draw(st.sampled_from([1, 4])),
        windowed_exchange=draw(st.booleans()),
    )


@settings(max_examples=300, deadline=None)
@given(requests())
def test_launches_cover_every_allowed_pair_once_and_no_other(request: PlanRequest) -> None:
    for rank in range(request.num_ranks):
        plan = make_plan(request, rank)
        want = dense_mask(plan.visibility, plan.exchange.buffer_position, plan.own_coordinate)
        np.testing.assert_array_equal(coverage(plan), want.astype(int))
        assert sum(launch.num_pairs for launch in plan.launches) == plan.visibility.num_pairs


@settings(max_examples=100, deadline=None)
@given(requests())
def test_launch_reads_only_keys_that_its_phase_has_brought(request: PlanRequest) -> None:
    for rank in range(request.num_ranks):
        plan = make_plan(request, rank)
        chunks = plan.owners.clean
        for launch in plan.launches:
            for run in launch.keys:
                if run.space is KeySpace.OWN:
                    assert not request.gather_corrupted or launch.ready is Phase.LATE
                    continue
                rows = (run.starts[:, None] + np.arange(run.length)).ravel()
                position = plan.exchange.buffer_position[rows]
                chunk = np.searchsorted(chunks.bounds, position, side="right") - 1
                own = np.isin(chunk, chunks.chunks_of[plan.shard])
                assert (launch.ready > Phase.LOCAL) or own.all()
                if launch.ready is Phase.EARLY and len(chunk[~own]):
                    windowed = not hasattr(plan.exchange, "slabs")
                    assert windowed or (chunks.slab_of_chunk[chunk[~own]] == 0).all()


def test_first_block_of_a_document_has_no_shifted_launch() -> None:
    plan = make_plan(PlanRequest(length=8, block_size=8), 0)
    assert len(plan.launches) == 2  # the clean causal launch and the own block
    assert all(launch.num_keys == 8 for launch in plan.launches)


def test_one_shape_of_local_launch_serves_all_full_blocks() -> None:
    plan = make_plan(PlanRequest(length=64, block_size=4), 0)
    problems = sorted((x.num_problems, x.num_rows, x.num_keys) for x in plan.launches)
    assert problems == [(1, 4, 4), (1, 60, 60), (1, 64, 64), (15, 4, 8)]


@pytest.mark.parametrize("rank", range(3))
def test_both_views_share_launches(rank: int) -> None:
    one = make_plan(PlanRequest(length=96, block_size=4, num_ranks=3, num_clean_shards=3), rank)
    two = make_plan(
        PlanRequest(length=96, block_size=4, num_ranks=3, num_clean_shards=3, num_views=2), rank
    )
    assert len(one.launches) == len(two.launches)


@settings(max_examples=60, deadline=None)
@given(requests())
def test_corrupted_launches_cover_exactly_the_corrupted_rows(request: PlanRequest) -> None:
    plan = make_plan(request, request.num_ranks - 1)
    want = coverage(plan)
    want[: plan.rows.num_clean] = 0
    np.testing.assert_array_equal(coverage(replace(plan, launches=plan.corrupted_launches)), want)
