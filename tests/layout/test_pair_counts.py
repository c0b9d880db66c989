"""Rows, pairs and travelling rows of all ranks are what the plans say, one by one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bp.layout.exchange import WindowExchange
from megatron_bp.layout.owners import Ownership
from megatron_bp.layout.pair_counts import (
    merged,
    overlap,
    pair_counts,
    row_counts,
    window_rows,
)
from megatron_bp.layout.plan import PlanRequest, make_plan
from megatron_bp.layout.visibility import CleanRule, CorruptedRule

DEGREES = [(1, 1), (2, 1), (2, 2), (3, 3), (4, 2), (4, 4), (6, 3)]


@st.composite
def requests(draw: st.DrawFn) -> PlanRequest:
    ranks, shards = draw(st.sampled_from(DEGREES))
    block = draw(st.integers(1, 9))
    return PlanRequest(
        length=draw(st.integers(2 * ranks * block, 2 * ranks * block + 70)),
        block_size=block,
        num_ranks=ranks,
        num_clean_shards=shards,
        num_views=draw(st.integers(1, 2)),
        clean_rule=draw(st.sampled_from(CleanRule)),
        corrupted_rule=draw(st.sampled_from(CorruptedRule)),
        window=draw(st.sampled_from([0, 1, 2, 5, 13, 60])),
        ownership=draw(st.sampled_from(Ownership)),
        row_multiple=draw(st.sampled_from([1, 4])),
    )


@settings(max_examples=120, deadline=None)
@given(requests())
def test_counts_equal_those_of_every_plan(request_: PlanRequest) -> None:
    plans = [make_plan(request_, rank) for rank in range(request_.num_ranks)]
    counts, rows = pair_counts(request_), row_counts(request_)
    assert counts.total.tolist() == [plan.visibility.num_pairs for plan in plans]
    for plan in plans:
        assert (plan.rows.num_clean, plan.rows.num_corrupted) == (rows.clean, rows.corrupted)
        assert rows.total == plan.rows.num_rows
    exchanges = [plan.exchange for plan in plans]
    if isinstance(exchanges[0], WindowExchange):
        received = [sum(x.receive_counts) for x in exchanges if isinstance(x, WindowExchange)]
        assert window_rows(request_).tolist() == received


def test_clean_and_corrupted_pairs_are_told_apart() -> None:
    counts = pair_counts(PlanRequest(64, 4, num_views=2))
    assert counts.clean.tolist() == [64 * 65 // 2]
    assert counts.corrupted.tolist() == [2 * 16 * 16 * 17 // 2]


def test_a_million_tokens_over_512_ranks_are_counted_without_plans() -> None:
    request = PlanRequest(2**20, 32, num_ranks=512, num_clean_shards=512, window=1024)
    counts = pair_counts(request)
    assert counts.total.shape == (512,)
    assert np.ptp(window_rows(request)) >= 0
    # (2P - 2)(W - 1) / P rows on average: chunks are longer than the window
    assert window_rows(request).sum() == (2 * 512 - 2) * 1023


@pytest.mark.parametrize(
    ("given", "union"),
    [
        ([], []),
        ([(3, 3)], []),
        ([(4, 6), (0, 2), (2, 3)], [(0, 3), (4, 6)]),
        ([(0, 9), (2, 3)], [(0, 9)]),
    ],
)
def test_intervals_are_merged(given: list[tuple[int, int]], union: list[tuple[int, int]]) -> None:
    assert merged(given) == union


def test_overlap_counts_shared_positions() -> None:
    assert overlap([(0, 4), (6, 9)], [(2, 7)]) == 3
    assert overlap([(0, 4)], [(4, 9)]) == 0
