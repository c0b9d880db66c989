"""A schedule stores each row once, first, and lists the rows that nothing stores."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bp.attention.schedule import Pass, disjoint_rounds, make_schedule
from megatron_bp.layout.decomposition import KeySpace, Phase
from megatron_bp.layout.plan import PlanRequest, make_plan
from tests.layout.test_decomposition import requests


def check_stores(todo: Pass, order: list[Phase], num_rows: int) -> None:
    """Stores come before adds, and gaps are the rows that no step stores."""
    touched = np.zeros(num_rows, dtype=bool)
    stored = np.zeros(num_rows, dtype=bool)
    for phase in order:
        for step in todo.steps[phase]:
            rows = (step.rows.starts[:, None] + np.arange(step.rows.length)).ravel()
            if step.rows.store:
                assert not touched[rows].any()
                assert len(np.unique(rows)) == len(rows)
                stored[rows] = True
            touched[rows] = True
    gaps = np.zeros(num_rows, dtype=bool)
    for lo, hi in todo.row_gaps:
        gaps[lo:hi] = True
    np.testing.assert_array_equal(gaps, ~stored)


@settings(max_examples=60, deadline=None)
@given(requests(), st.booleans(), st.booleans())
def test_rows_are_stored_before_they_are_added_to(
    request: PlanRequest, corrupted_only: bool, by_chunk: bool
) -> None:
    plan = make_plan(request, request.num_ranks - 1)
    schedule = make_schedule(plan, corrupted_only, by_chunk)
    num_rows = plan.rows.num_rows - schedule.first_row
    check_stores(schedule.forward, list(Phase), num_rows)
    check_stores(schedule.backward, list(reversed(Phase)), num_rows)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=12), st.integers(1, 6))
def test_rounds_hold_every_problem_once_and_no_overlap(starts: list[int], length: int) -> None:
    rounds = disjoint_rounds(np.array(starts), length)
    assert sorted(np.concatenate(rounds).tolist()) == list(range(len(starts)))
    for members in rounds:
        assert (np.diff(np.sort(np.array(starts)[members])) >= length).all()


def test_a_large_share_has_no_gap_to_fill() -> None:
    request = PlanRequest(length=4096, block_size=32, num_ranks=4, num_clean_shards=4)
    for window in (0, 256):
        for rank in range(4):
            plan = make_plan(PlanRequest(**{**request.__dict__, "window": window}), rank)
            todo = make_schedule(plan, False, True).forward
            assert sum(hi - lo for lo, hi in todo.row_gaps) <= 64
            assert not todo.key_gaps[KeySpace.OWN]
