"""The `native` strategy gives the dense reference's values and gradients for any plan.

With replicated clean rows no rank needs another, so every rank's plan runs in this one process;
layouts that communicate are in test_block_parallel.py.
"""

from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from megatron_bp.attention import schedule
from megatron_bp.attention.block_parallel import AttentionOptions, block_parallel_attention
from megatron_bp.attention.contract import Cut, Strategy
from megatron_bp.attention.prefix import native_launches
from megatron_bp.attention.reference import reference_attention
from megatron_bp.comm.groups import BlockGroups, LocalGroup
from megatron_bp.layout.decomposition import Launch
from megatron_bp.layout.plan import PlanRequest, RankPlan, make_plan
from megatron_bp.layout.visibility import CleanRule, CorruptedRule
from tests.layout.test_decomposition import requests

SAMPLES, HEADS, KV_HEADS, SIZE = 2, 4, 2, 8
NATIVE = AttentionOptions(SIZE**-0.5, strategy=Strategy.NATIVE, kernel="dense")
FULL = PlanRequest(length=29, block_size=4, num_views=2)


@dataclass(frozen=True)
class Replicas:
    """The context group of a rank that needs no other: a size and a rank."""

    count: int
    index: int

    def size(self) -> int:
        """Number of ranks."""
        return self.count

    def rank(self) -> int:
        """This rank."""
        return self.index


def groups_of(plan: RankPlan) -> BlockGroups:
    """Groups of one rank whose clean rows are all its own."""
    context = cast(Any, Replicas(plan.request.num_ranks, plan.rank))
    return BlockGroups(context, LocalGroup(), context)


def alone(request: PlanRequest) -> PlanRequest:
    """The same sample and rules with replicated clean rows: nothing travels."""
    return replace(request, num_clean_shards=1, gather_corrupted=False)


def sample(request: PlanRequest, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v, dout of the whole sample, [streams, length, Z, heads, H]."""
    generator = torch.Generator().manual_seed(7)
    shape = (1 + request.num_views, request.length, SAMPLES)
    return [
        torch.randn(*shape, heads, SIZE, generator=generator, dtype=torch.float64).to(dtype)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]


def rows_of(x: Tensor, plan: RankPlan, padding: float) -> Tensor:
    """The local rows of a tensor of the whole sample; padding rows hold `padding`."""
    stream, position = torch.from_numpy(plan.rows.stream), torch.from_numpy(plan.rows.position)
    local = x[stream.clamp(min=0), position.clamp(min=0)].clone()
    local[stream < 0] = padding
    return local


def run(plan: RankPlan, x: list[Tensor], options: AttentionOptions = NATIVE) -> list[Tensor]:
    """out, dq, dk, dv of the local rows; padding rows hold large numbers that must not matter."""
    q, k, v, dout = (rows_of(t, plan, 1e3) for t in x)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    out = block_parallel_attention(q, k, v, plan, groups_of(plan), options)
    if options.corrupted_only:
        dout = dout[plan.rows.num_clean :]
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def want(plan: RankPlan, x: list[Tensor], clean_loss: bool = True) -> list[Tensor]:
    """The same by the dense reference, for gradients of this rank's rows alone."""
    one = make_plan(replace(plan.request, num_ranks=1, row_multiple=1), 0)
    full = [rows_of(t, one, 0.0).double() for t in x]
    mine = torch.zeros(len(x[0]), plan.request.length)
    real = plan.rows.stream >= 0
    mine[plan.rows.stream[real], plan.rows.position[real]] = 1.0
    if not clean_loss:
        mine[0] = 0.0
    q, k, v = (t.requires_grad_() for t in full[:3])
    out = reference_attention(q, k, v, one, NATIVE.softmax_scale)
    dout = full[3] * rows_of(mine, one, 0.0)[:, None, None, None]
    found = []
    stream, position = torch.from_numpy(one.rows.stream), torch.from_numpy(one.rows.position)
    for part in (out.detach(), *torch.autograd.grad(out, (q, k, v), dout)):
        whole = torch.zeros(*mine.shape, *part.shape[1:], dtype=torch.float64)
        whole[stream[stream >= 0], position[stream >= 0]] = part[stream >= 0]
        found.append(rows_of(whole, plan, 0.0))
    return found


def close(got: list[Tensor], exact: list[Tensor]) -> None:
    """Equal to fp64 rounding over a few hundred keys."""
    for a, b in zip(got, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@settings(max_examples=40, deadline=None)
@given(requests())
def test_any_plan_equals_the_dense_reference(request: PlanRequest) -> None:
    """By chunk (the dense kernel) and with the plan's own launches (the other one)."""
    alone_request = alone(request)
    plan = make_plan(alone_request, alone_request.num_ranks - 1)
    x = sample(alone_request)
    exact = want(plan, x)
    for kernel in ("dense", "sdpa_cpu"):
        close(run(plan, x, replace(NATIVE, kernel=kernel)), exact)


@settings(max_examples=15, deadline=None)
@given(requests())
def test_a_pruned_layer_gives_the_corrupted_rows_alone(request: PlanRequest) -> None:
    plan = make_plan(alone(request), 0)
    x = sample(plan.request)
    exact = want(plan, x, clean_loss=False)
    exact[0] = exact[0][plan.rows.num_clean :]
    close(run(plan, x, replace(NATIVE, corrupted_only=True)), exact)


@pytest.mark.parametrize("window", [3, 4, 5, 6])
def test_every_rank_runs_its_own_plan_with_windows_about_a_block(window: int) -> None:
    request = replace(FULL, num_ranks=2, clean_rule=CleanRule.BLOCK_CAUSAL, window=window)
    x = sample(request)
    for rank in range(2):
        plan = make_plan(request, rank)
        close(run(plan, x), want(plan, x))


@pytest.mark.parametrize("rule", CleanRule)
def test_large_blocks_in_a_window_are_problems_of_their_own(rule: CleanRule) -> None:
    request = PlanRequest(length=530, block_size=128, window=200, num_ranks=2, clean_rule=rule)
    x = sample(request)
    for rank in range(2):
        plan = make_plan(request, rank)
        close(run(plan, x), want(plan, x))


def test_padding_rows_give_zero_and_get_no_gradient() -> None:
    plan = make_plan(replace(FULL, row_multiple=16, num_ranks=2), 0)
    padding = torch.from_numpy(plan.rows.stream < 0)
    assert padding.sum() > 4
    for result in run(plan, sample(plan.request)):
        assert (result[padding] == 0).all()


def run_launches(
    plan: RankPlan, launches: tuple[Launch, ...], patch: pytest.MonkeyPatch
) -> list[Tensor]:
    """`run` with these launches instead of the plan's own."""
    patch.setattr(schedule, "native_launches", lambda *_: launches)
    return run(replace(plan), sample(plan.request))  # a copy: schedules are cached by plan


def test_launches_in_reverse_order_give_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(replace(FULL, clean_rule=CleanRule.BLOCK_CAUSAL), 0)
    forward = run(plan, sample(plan.request))
    close(run_launches(plan, native_launches(plan, False, Cut.CHUNKS)[::-1], monkeypatch), forward)


def test_a_dropped_launch_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(FULL, 0)
    launches = native_launches(plan, False, Cut.CHUNKS)
    for dropped in range(len(launches)):
        rest = launches[:dropped] + launches[dropped + 1 :]
        error = run_launches(plan, rest, monkeypatch)[0] - want(plan, sample(FULL))[0]
        assert error.abs().max() > 1e-3


@pytest.mark.parametrize("rule", CorruptedRule)
def test_views_share_keys_but_not_corrupted_tokens(rule: CorruptedRule) -> None:
    """Changing the tokens of one view changes nothing in the other."""
    request = replace(FULL, corrupted_rule=rule)
    plan = make_plan(request, 0)
    x = sample(request)
    before = run(plan, x)[0]
    changed = [t.clone() for t in x]
    for t in changed[:3]:
        t[2] += 1.0
    moved = (run(plan, changed)[0] - before).abs().amax((1, 2, 3)) > 0
    assert not moved[plan.rows.stream < 2].any()
    assert moved[plan.rows.stream == 2].all()


@pytest.mark.parametrize("window", [0, 6])
def test_bf16_costs_a_few_roundings_of_the_exact_result(window: int) -> None:
    """A row's parts are rounded once each and once merged; there are at most three."""
    request = replace(FULL, length=64, window=window)
    plan = make_plan(request, 0)
    x = sample(request, torch.bfloat16)
    for got, exact in zip(run(plan, x), want(plan, x), strict=True):
        assert got.dtype == torch.bfloat16
        error = (got.double() - exact).abs().max() / exact.abs().max()
        assert error <= 4 * torch.finfo(torch.bfloat16).eps
