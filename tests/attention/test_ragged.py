"""One launch over the keys before both chunks gives what one for each slab gives."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from megatron_bp.attention.contract import Cut, Window
from megatron_bp.attention.kernels.dense import DenseKernel
from megatron_bp.attention.lanes import InARow
from megatron_bp.attention.native import NativeRun, Partial, empty_partial
from megatron_bp.attention.problems import KeyValue
from megatron_bp.attention.ragged import RaggedStep, together
from megatron_bp.attention.schedule import Pass, make_schedule
from megatron_bp.layout.decomposition import Phase
from megatron_bp.layout.plan import PlanRequest, RankPlan, make_plan
from tests.layout.test_decomposition import requests

SAMPLES, HEADS, KV_HEADS, SIZE = 2, 4, 2, 8
LONG = PlanRequest(length=2**16, block_size=32, num_ranks=8, num_clean_shards=8)


def forward_pass(request: PlanRequest, rank: int) -> Pass:
    """A rank's forward pass by slab."""
    return make_schedule(make_plan(request, rank), False, Cut.CHUNKS).forward


def run(plan: RankPlan, todo: Pass, ragged: tuple[RaggedStep, ...]) -> Partial:
    """Output and LSE of a pass over random rows and keys."""
    generator = torch.Generator().manual_seed(5)

    def draw(rows: int, heads: int) -> Tensor:
        return torch.randn(rows, SAMPLES, heads, SIZE, generator=generator, dtype=torch.float64)

    q = draw(plan.rows.num_rows, HEADS)
    sizes = (plan.exchange.num_buffer_rows, len(plan.own_coordinate))
    clean, own = (KeyValue(draw(n, KV_HEADS), draw(n, KV_HEADS)) for n in sizes)
    at, partial = NativeRun(DenseKernel(), SIZE**-0.5), empty_partial(q, todo)
    for phase in Phase:
        at.forward(todo.steps[phase], q, (clean, own), partial, InARow())
    at.forward_ragged(ragged, q, (clean, own), partial, InARow())
    return partial


@settings(max_examples=60, deadline=None)
@given(requests())
def test_any_plan_gives_the_output_and_lse_of_launches_by_slab(request: PlanRequest) -> None:
    plan = make_plan(request, request.num_ranks - 1)
    todo = make_schedule(plan, False, Cut.CHUNKS).forward
    by_slab = run(plan, todo, ())
    for a, b in zip(run(plan, *together(todo)), by_slab, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_views", [1, 2])
@pytest.mark.parametrize("rank", range(1, 7))
def test_both_chunks_of_a_long_sample_take_one_launch(rank: int, num_views: int) -> None:
    todo, ragged = together(forward_pass(replace(LONG, num_views=num_views), rank))
    early, late = 4096 * rank, 4096 * (15 - rank)
    assert [(x.rows.length, x.key, x.lengths) for x in ragged] == [
        (4096, 0, (late,) * (1 + num_views) + (early,) * (1 + num_views))
    ]
    chunks = np.arange(2 * (1 + num_views)) * 4096  # early and late in turn
    assert ragged[0].rows.starts.tolist() == [*chunks[1::2], *chunks[::2]]
    assert not todo.steps[Phase.EARLY]
    assert not todo.steps[Phase.LATE]


@pytest.mark.parametrize("rank", [0, 7])
def test_a_rank_whose_slabs_need_one_launch_keeps_it(rank: int) -> None:
    """Nothing lies before the first chunk, and only its own rows between the middle ones."""
    todo = forward_pass(LONG, rank)
    assert together(todo) == (todo, ())


def test_windowed_passes_have_no_such_launches() -> None:
    todo = forward_pass(replace(LONG, window=1024), 3)
    assert together(todo) == (todo, ())


@dataclass(frozen=True)
class Short(DenseKernel):
    """A kernel that drops the last key of every problem."""

    def forward_ragged(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See RaggedKernel."""
        return super().forward_ragged(q, k, v, lengths - 1, scale)


@pytest.mark.parametrize("kernel", [DenseKernel(), Short()])
def test_problem_x_sees_its_own_number_of_keys(kernel: DenseKernel) -> None:
    q, k, v = (torch.randn(*shape, 4, 8) for shape in ((3, 5), (9,), (9,)))
    lengths = torch.tensor([2, 9, 4], dtype=torch.int32)
    out, _ = kernel.forward_ragged(q, k, v, lengths, 0.3)
    alike = []
    for x, length in enumerate(lengths.tolist()):
        one = DenseKernel().forward(q[x][None], k[None, :length], v[None, :length], Window(), 0.3)
        alike.append(torch.allclose(out[x], one[0][0]))
    assert all(alike) is not isinstance(kernel, Short)
