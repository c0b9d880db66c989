"""Backward steps in pieces give the gradients of whole ones."""

from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from megatron_bp.attention.contract import Cut, Saved, Window
from megatron_bp.attention.kernels.dense import DenseKernel
from megatron_bp.attention.row_pieces import in_pieces
from megatron_bp.attention.schedule import Step, make_schedule
from megatron_bp.layout.decomposition import Phase
from megatron_bp.layout.plan import PlanRequest, make_plan
from tests.attention.test_sharing import gradients
from tests.layout.test_decomposition import requests

LONG = PlanRequest(length=2**16, block_size=32, num_ranks=8, num_clean_shards=8)


@dataclass(frozen=True)
class Pieces(DenseKernel):
    """The plain kernel, told to take few rows at once; it counts the rows of unmasked launches."""

    most_rows: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "seen", Counter())

    def rows_at_once(self, head_size: int) -> int:
        """See PiecewiseKernel."""
        return self.most_rows

    def backward(
        self, dout: Tensor, saved: Saved, window: Window, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See NativeKernel."""
        if window == (-1, -1) and len(dout) <= 2:  # of one problem and two samples
            self.seen[dout.shape[1]] += 1  # type: ignore[attr-defined]
        return super().backward(dout, saved, window, scale)


@pytest.mark.parametrize("most_rows", [1, 5])
@settings(max_examples=25, deadline=None)
@given(request=requests())
def test_any_plan_gives_the_gradients_of_whole_steps(request: PlanRequest, most_rows: int) -> None:
    plan = make_plan(request, request.num_ranks - 1)
    exact = gradients(plan, DenseKernel(), corrupted_only=False)
    found = gradients(plan, Pieces(most_rows=most_rows), corrupted_only=False)
    for got, want in zip(found, exact, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-11)


def unmasked(most_rows: int) -> dict[Phase, list[Step]]:
    """Rank 3's unmasked backward steps with more rows than a block, in pieces."""
    steps = make_schedule(make_plan(LONG, 3), False, Cut.CHUNK).backward.steps
    return {
        phase: [
            piece
            for step in steps[phase]
            for piece in in_pieces(step, most_rows)
            if step.window == (-1, -1) and step.rows.length > 32
        ]
        for phase in Phase
    }


def test_rows_that_were_joined_come_apart_where_they_are() -> None:
    found = unmasked(4096)
    late, early = (
        [(x.rows.starts.tolist(), x.rows.length) for x in found[p]]
        for p in (Phase.LATE, Phase.EARLY)
    )
    assert late == [([4096], 4096), ([12288], 4096)]
    assert early == [([4096 * i], 4096) for i in range(4)]
    assert not any(x.joined for steps in found.values() for x in steps)


def test_only_the_first_piece_may_store_gradients_of_keys() -> None:
    for steps in unmasked(4096).values():
        for i, step in enumerate(steps):
            for _, runs in step.keys:
                assert runs.store == (i == 0)
                assert not (i and runs.pieces)


def test_pieces_are_of_one_length_and_short_or_masked_steps_stay_whole() -> None:
    assert {x.rows.length for x in unmasked(3000)[Phase.LATE]} == {2048}
    assert [x.rows.length for x in unmasked(5000)[Phase.LATE]] == [4096]
    steps = make_schedule(make_plan(LONG, 3), False, Cut.CHUNK).backward.steps
    for step in (x for phase in Phase for x in steps[phase]):
        if step.window != (-1, -1) or step.rows.length <= 32:
            assert in_pieces(step, 64) == (step,)
        assert in_pieces(step, 0) == (step,)


def test_a_layer_takes_pieces_in_backward_alone() -> None:
    kernel = Pieces(most_rows=16)
    request = PlanRequest(length=256, block_size=16, num_ranks=2, num_clean_shards=2)
    gradients(make_plan(request, 1), kernel, corrupted_only=False)
    assert kernel.seen  # type: ignore[attr-defined]
    assert max(kernel.seen) <= 16  # type: ignore[attr-defined]
