"""What stays on a rank comes last, in a buffer of its own, and nothing else changes."""

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_bp.attention.contract import Cut
from megatron_bp.attention.kernels.dense import DenseKernel
from megatron_bp.attention.lanes import InARow
from megatron_bp.attention.native import NativeRun, Partial, empty_partial
from megatron_bp.attention.own_last import own_last
from megatron_bp.attention.problems import KeyValue
from megatron_bp.attention.schedule import Pass, make_schedule
from megatron_bp.attention.sharing import SharedLaunch, TileRule, Tiles, share
from megatron_bp.layout.decomposition import KeySpace, Phase
from megatron_bp.layout.plan import PlanRequest, RankPlan, make_plan
from tests.attention.test_sharing import (
    HEADS,
    KV_HEADS,
    SAMPLES,
    SCALE,
    SIZE,
    DenseRows,
    SharingDense,
    rules,
)
from tests.layout.test_decomposition import requests

LONG = PlanRequest(length=2**16, block_size=32, num_ranks=4, num_clean_shards=4)


def pass_of(plan: RankPlan, corrupted_only: bool = False, cut: Cut = Cut.CHUNKS) -> Pass:
    return own_last(plan, make_schedule(plan, corrupted_only, cut).backward)


class Layer:
    """Random rows and keys of a rank, clean keys in the buffer and in local order."""

    def __init__(self, plan: RankPlan, kernel: DenseKernel, corrupted_only: bool) -> None:
        self.plan, self.run = plan, NativeRun(kernel, SCALE)
        self.schedule = make_schedule(plan, corrupted_only, Cut.CHUNKS)
        generator = torch.Generator().manual_seed(5)

        def draw(rows: int, heads: int) -> Tensor:
            size = (rows, SAMPLES, heads, SIZE)
            return torch.randn(size, generator=generator, dtype=torch.float64)

        rows = plan.rows.num_rows - self.schedule.first_row
        self.q, self.dout = draw(rows, HEADS), draw(rows, HEADS)
        sizes = (plan.exchange.num_buffer_rows, len(plan.own_coordinate))
        clean, own = (KeyValue(draw(n, KV_HEADS), draw(n, KV_HEADS)) for n in sizes)
        shard = KeyValue(*(torch.zeros(plan.rows.num_clean, *x.shape[1:]).to(x) for x in clean))
        for at in plan.exchange.own:
            for mine, x in zip(shard, clean, strict=True):
                mine[at.source : at.source + at.length] = x[at.target : at.target + at.length]
        self.keys = clean, own, shard
        self.partial: Partial = empty_partial(self.q, self.schedule.forward)
        for phase in Phase:
            steps = self.schedule.forward.steps[phase]
            self.run.forward(steps, self.q, self.keys, self.partial, InARow())

    def backward(
        self, todo: Pass, note: Callable[[], None] = lambda: None
    ) -> tuple[list[Tensor], list[list[Tensor]]]:
        """dq and gradients of clean and own keys; and those of the clean buffer at each call."""
        dq = torch.full_like(self.q, float("nan"))
        grads = [
            KeyValue(*(torch.full_like(x, float("nan")) for x in space)) for space in self.keys
        ]
        seen: list[list[Tensor]] = []
        saved, into = (self.q, self.keys, self.partial), (dq, tuple(grads))

        def done() -> None:
            note()
            seen.append([x.clone() for x in grads[0]])

        rest = self.run.begin_backward(todo, self.dout, saved, into, done)
        remote = (*rest.steps[Phase.LATE], *rest.steps[Phase.EARLY])
        assert len(seen) == (not remote)
        self.run.backward((*remote, *rest.steps[Phase.LOCAL]), self.dout, saved, into)
        sums = [x.clone() for x in grads[0]]
        if KeySpace.SHARD in todo.num_keys:
            for at in self.plan.exchange.own:
                for x, mine in zip(sums, grads[2], strict=True):
                    x[at.target : at.target + at.length] += mine[at.source : at.source + at.length]
        for before in seen:
            for a, b in zip(before, grads[0], strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0)
        return [dq, *sums, *grads[1]], seen


@settings(max_examples=60, deadline=None)
@given(requests(), rules(), st.booleans(), st.booleans(), st.integers(0, 3))
def test_any_plan_gives_the_gradients_in_the_plans_order(
    request: PlanRequest, rule: TileRule, shared: bool, corrupted_only: bool, rank: int
) -> None:
    plan = make_plan(request, rank % request.num_ranks)
    exact = Layer(plan, DenseKernel(), corrupted_only)
    kernel = SharingDense(rule=rule) if shared else DenseKernel()
    want, _ = exact.backward(exact.schedule.backward)
    got, _ = Layer(plan, kernel, corrupted_only).backward(own_last(plan, exact.schedule.backward))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def pairs(todo: Pass, phases: tuple[Phase, ...]) -> int:
    return sum(step.num_pairs for phase in phases for step in todo.steps[phase])


@pytest.mark.parametrize("rank", range(4))
def test_squares_and_blocks_stay_and_the_rest_travels(rank: int) -> None:
    """Two chunks of L / 8 in two streams: 4 squares of 2^26 pairs (and the blocks) of each rank.

    As many on every rank, so that all come to the reduction together: also on rank 3, whose two
    chunks lie side by side.
    """
    todo = pass_of(make_plan(LONG, rank))
    remote = {s for x in (Phase.LATE, Phase.EARLY) for y in todo.steps[x] for s, _ in y.keys}
    stays = {space for step in todo.steps[Phase.LOCAL] for space, _ in step.keys}
    assert remote == {KeySpace.CLEAN}
    assert stays == {KeySpace.SHARD, KeySpace.OWN}
    assert pairs(todo, (Phase.LOCAL,)) == pytest.approx(4 * 2**26, rel=0.02)


TILES = [
    TileRule(Tiles(4, 4), Tiles(4, 4), 0),  # all launches in rows that they share
    TileRule(Tiles(4, 4), Tiles(8, 4), 64),  # long ones in rows of their own
]


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("corrupted_only", [False, True])
@pytest.mark.parametrize("rule", TILES)
def test_the_reduction_can_start_before_every_launch_that_stays(
    rank: int, corrupted_only: bool, rule: TileRule
) -> None:
    plan = make_plan(replace(LONG, length=512, block_size=4), rank)
    layer = Layer(plan, SharingDense(rule=rule), corrupted_only)
    order: list[str] = []
    launch = DenseRows.launch

    def noted(self: DenseRows, at: SharedLaunch, k: Tensor, v: Tensor) -> None:
        order.append(at.space.name)
        launch(self, at, k, v)

    todo = pass_of(plan, corrupted_only)
    with mock.patch.object(DenseRows, "launch", noted):
        got, seen = layer.backward(todo, lambda: order.append("sent"))
    at = order.index("sent")
    assert len(seen) == order.count("sent") == 1
    assert set(order[:at]) == {"CLEAN"}
    assert "CLEAN" not in order[at:]
    assert "SHARD" in order[at:]
    exact = Layer(plan, DenseKernel(), corrupted_only)
    want, _ = exact.backward(exact.schedule.backward)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def test_the_sums_over_all_local_rows_store_the_query_gradients() -> None:
    """On rank 1 all rows see the first chunk and the late ones five more, in tiles of their own."""
    rule = TileRule(Tiles(64, 128), Tiles(80, 128), 8192)
    todo = pass_of(make_plan(LONG, 1))
    found = share(todo, rule, lambda step: step.rows.length <= 32)
    assert [x.launches[0].num_rows for x in found.rows] == [8192, 32768, 16384]
    assert found.rows[0].runs.length == todo.num_rows
    assert [x.runs.store for x in found.rows] == [True, False, False]
    assert found.rest.row_gaps == ()


@pytest.mark.parametrize(
    "request_",
    [
        replace(LONG, num_ranks=1, num_clean_shards=1),
        replace(LONG, num_clean_shards=1),
        replace(LONG, window=1024),
        replace(LONG, window=1024, windowed_exchange=False),
    ],
)
def test_nothing_moves_where_nothing_travels_or_rows_see_a_window(request_: PlanRequest) -> None:
    plan = make_plan(request_, 0)
    todo = make_schedule(plan, False, Cut.CHUNKS).backward
    assert own_last(plan, todo) is todo


def test_the_shard_is_stored_once_and_its_gaps_are_listed() -> None:
    """The squares of both chunks cover the shard, so no row of it is zeroed first."""
    plan = make_plan(LONG, 1)
    todo = pass_of(plan)
    assert todo.num_keys[KeySpace.SHARD] == plan.rows.num_clean
    assert todo.key_gaps[KeySpace.SHARD] == ()
    runs = [x for step in todo.steps[Phase.LOCAL] for s, x in step.keys if s is KeySpace.SHARD]
    assert runs[0].store
    assert np.array_equal(runs[0].starts, [0, 8192])
