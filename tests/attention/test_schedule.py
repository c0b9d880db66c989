"""A schedule stores each row once, first, and lists the rows that nothing stores."""

from collections.abc import Iterator
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bp.attention import schedule as module
from megatron_bp.attention.contract import Cut
from megatron_bp.attention.prefix import native_launches
from megatron_bp.attention.schedule import Pass, Step, disjoint_rounds, make_schedule
from megatron_bp.layout.decomposition import KeySpace, Phase
from megatron_bp.layout.plan import PlanRequest, make_plan
from tests.layout.test_decomposition import requests


def every(steps: tuple[Step, ...]) -> Iterator[Step]:
    """The steps with the far ends that go with them, in order."""
    for step in steps:
        yield from (step, *step.far)


def check_stores(todo: Pass, order: list[Phase], num_rows: int) -> None:
    """Stores come before adds, and gaps are the rows that no step stores."""
    touched = np.zeros(num_rows, dtype=bool)
    stored = np.zeros(num_rows, dtype=bool)
    for phase in order:
        for step in every(todo.steps[phase]):
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
@given(requests(), st.booleans(), st.sampled_from(Cut))
def test_rows_are_stored_before_they_are_added_to(
    request: PlanRequest, corrupted_only: bool, cut: Cut
) -> None:
    plan = make_plan(request, request.num_ranks - 1)
    schedule = make_schedule(plan, corrupted_only, cut)
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


def check_key_stores(todo: Pass, space: KeySpace, num_rows: int) -> None:
    """The same for gradients of keys, piece by piece, in backward order."""
    touched, stored = np.zeros(num_rows, dtype=bool), np.zeros(num_rows, dtype=bool)
    for phase in reversed(Phase):
        for step in every(todo.steps[phase]):
            for where, runs in step.keys:
                for _, piece in runs.pieces or ((0, runs),):
                    rows = (piece.starts[:, None] + np.arange(piece.length)).ravel()
                    if where is space and piece.store:
                        assert not touched[rows].any()
                        stored[rows] = True
                if where is space:
                    touched[(runs.starts[:, None] + np.arange(runs.length)).ravel()] = True
    gaps = np.zeros(num_rows, dtype=bool)
    for lo, hi in todo.key_gaps[space]:
        gaps[lo:hi] = True
    np.testing.assert_array_equal(gaps, ~stored)


@settings(max_examples=60, deadline=None)
@given(requests(), st.sampled_from(Cut))
def test_key_gradients_are_stored_before_they_are_added_to(request: PlanRequest, cut: Cut) -> None:
    plan = make_plan(request, 0)
    todo = make_schedule(plan, False, cut).backward
    check_key_stores(todo, KeySpace.CLEAN, plan.exchange.num_buffer_rows)
    check_key_stores(todo, KeySpace.OWN, len(plan.own_coordinate))


def test_only_keys_that_no_row_sees_are_zeroed() -> None:
    for window in (0, 256):
        request = PlanRequest(
            length=4096, block_size=32, num_ranks=4, num_clean_shards=4, window=window
        )
        for rank in range(4):
            plan = make_plan(request, rank)
            todo = make_schedule(plan, False, Cut.CHUNKS).backward
            assert not todo.key_gaps[KeySpace.OWN]
            last = plan.visibility.clean_hi.max()
            unseen = len(plan.exchange.buffer_position) - last if not window else 2 * window
            assert sum(hi - lo for lo, hi in todo.key_gaps[KeySpace.CLEAN]) <= unseen


def test_both_ends_of_a_window_are_one_step_of_the_same_blocks() -> None:
    request = PlanRequest(length=512, block_size=8, num_ranks=2, num_clean_shards=2, window=40)
    for rank in range(2):
        schedule = make_schedule(make_plan(request, rank), False, Cut.CHUNKS)
        for todo in (schedule.forward, schedule.backward):
            steps = [step for phase in Phase for step in todo.steps[phase]]
            assert not any(step.rows.length == 7 for step in steps)  # no far end by itself
            (step,) = (step for step in steps if step.far)
            np.testing.assert_array_equal(step.far[0].rows.starts, step.rows.starts + 1)
            assert step.rows.num_problems >= 26  # of 32 blocks: the others have no far end


@pytest.mark.parametrize(("window", "heads", "decompositions"), [(0, 4, 1), (8, 1, 1), (8, 4, 2)])
def test_launches_are_made_twice_only_for_tiles_that_change_them(
    window: int, heads: int, decompositions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(PlanRequest(256, 4, num_ranks=2, num_clean_shards=2, window=window), 1)
    made = Mock(wraps=native_launches)
    monkeypatch.setattr(module, "native_launches", made)
    make_schedule.__wrapped__(plan, False, Cut.CHUNKS, heads)
    assert made.call_count == decompositions
