"""Every layout, rule, window and strategy gives the dense reference's output and gradients."""

import itertools
import random
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_bp.attention import block_parallel
from megatron_bp.attention.block_parallel import (
    AttentionOptions,
    GradWire,
    block_parallel_attention,
)
from megatron_bp.attention.contract import Strategy
from megatron_bp.attention.reference import reference_attention
from megatron_bp.comm.groups import BlockGroups, BlockingGroup, LocalGroup, NodeGroup
from megatron_bp.comm.wires import reduces_at_once
from megatron_bp.layout.blocks import Spans
from megatron_bp.layout.decomposition import KeySpace
from megatron_bp.layout.plan import PlanRequest, make_plan
from megatron_bp.layout.visibility import CleanRule, CorruptedRule
from tests.distributed import run_distributed

HEADS, KV_HEADS, SIZE = 4, 2, 8
TOLERANCE = 1e-12  # fp64 rounding over a few hundred keys
DOCUMENTS = ((0, 3), (3, 4), (4, 30), (30, 64))


class Case(NamedTuple):
    """One point of the space of layouts: every three values of it meet in some case."""

    mode: str
    clean_rule: CleanRule
    window: int
    sample: tuple[int, Spans]
    num_views: int
    strategy: Strategy

    def request(self, num_ranks: int) -> PlanRequest:
        """The plan request of the case on `num_ranks`."""
        length, documents = self.sample
        return PlanRequest(
            length=length,
            block_size=4,
            num_ranks=num_ranks,
            num_clean_shards={"pure": 1, "hybrid": 2}.get(self.mode, num_ranks),
            num_views=self.num_views,
            clean_rule=self.clean_rule,
            corrupted_rule=CorruptedRule.CAUSAL if length == 28 else CorruptedRule.BIDIRECTIONAL,
            window=self.window,
            documents=documents,
            gather_corrupted=self.mode == "baseline",
            row_multiple=2,
            windowed_exchange=self.mode != "all rows travel",
        )


SAMPLES = [(64, ()), (61, ()), (28, ()), (64, DOCUMENTS)]  # full, ragged, few blocks, packed


MODES_OF_FOUR = ("pure", "hybrid", "csbp", "baseline")  # with full attention on four ranks


def every_case(num_ranks: int) -> list[Case]:
    """All combinations that make sense on `num_ranks`."""
    modes = ["pure"]
    if num_ranks > 1:
        modes += ["csbp", "baseline", "all rows travel"]
    if num_ranks == 4:
        modes += ["hybrid"]
    axes = (modes, CleanRule, (0, 3, 11), SAMPLES, (1, 2), Strategy)
    found = [Case(*values) for values in itertools.product(*axes)]
    return [x for x in found if x.window or x.mode != "all rows travel"]


def meetings(case: Case, strength: int) -> set[tuple[tuple[int, object], ...]]:
    """The sets of `strength` values that meet in a case."""
    return set(itertools.combinations(enumerate(case), strength))


@cache
def cases(num_ranks: int) -> list[Case]:
    """Cases in which every three values (two on three ranks) that can meet do meet."""
    strength = 2 if num_ranks == 3 else 3
    seen: set[tuple[tuple[int, object], ...]] = set()
    kept = []
    shuffled = every_case(num_ranks)
    random.Random(0).shuffle(shuffled)
    for case in shuffled:
        if meetings(case, strength) - seen:
            kept.append(case)
            seen |= meetings(case, strength)
    return sorted(kept)


def make_groups(num_ranks: int, num_shards: int) -> BlockGroups:
    """Groups of adjacent clean shards over the default group; collective."""
    if num_ranks == 1:
        return BlockGroups.single()
    rank = dist.get_rank()
    shard_sets = [list(range(i, i + num_shards)) for i in range(0, num_ranks, num_shards)]
    replica_sets = [list(range(j, num_ranks, num_shards)) for j in range(num_shards)]

    def mine(sets: list[list[int]]) -> dist.ProcessGroup | LocalGroup:
        made = [(ranks, dist.new_group(ranks)) for ranks in sets if len(ranks) > 1]
        return next((group for ranks, group in made if rank in ranks), LocalGroup())

    return BlockGroups(dist.group.WORLD, mine(shard_sets), mine(replica_sets))


def sample_tensors(request: PlanRequest, num_samples: int, seed: int) -> list[torch.Tensor]:
    """q, k, v, dout of every row of the sample, by coordinate: [views + 1, L, Z, heads, H]."""
    generator = torch.Generator().manual_seed(seed)
    shape = (request.num_views + 1, request.length, num_samples)
    return [
        torch.randn(*shape, heads, SIZE, generator=generator, dtype=torch.float64)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]


def local(x: torch.Tensor, request: PlanRequest, rank: int) -> torch.Tensor:
    """The rows of `rank`; padding rows hold NaN-free garbage that must not matter."""
    rows = make_plan(request, rank).rows
    stream, position = torch.from_numpy(rows.stream), torch.from_numpy(rows.position)
    picked = x[stream.clamp(min=0), position.clamp(min=0)].clone()
    picked[stream < 0] = 7.0
    return picked


@cache
def dense(one: PlanRequest) -> list[torch.Tensor]:
    """out, dq, dk, dv of the one-process reference, by coordinate."""
    tensors = sample_tensors(one, 2, seed=3)
    plan = make_plan(one, 0)
    q, k, v = (local(x, one, 0).requires_grad_() for x in tensors[:3])
    out = reference_attention(q, k, v, plan, SIZE**-0.5)
    grads = torch.autograd.grad(out, (q, k, v), local(tensors[3], one, 0))
    stream, position = torch.from_numpy(plan.rows.stream), torch.from_numpy(plan.rows.position)
    spread = []
    for source in (out.detach(), *grads):
        full = torch.zeros(one.num_views + 1, one.length, *source.shape[1:]).to(source)
        full[stream[stream >= 0], position[stream >= 0]] = source[stream >= 0]
        spread.append(full)
    return spread


def check_case(
    request: PlanRequest, rank: int, groups: BlockGroups, options: AttentionOptions
) -> float:
    """Largest relative error of this rank's output and gradients against the reference."""
    tensors = sample_tensors(request, 2, seed=3)
    one = replace(
        request,
        num_ranks=1,
        num_clean_shards=1,
        gather_corrupted=False,
        row_multiple=1,
        windowed_exchange=True,
    )
    want = dense(one)
    plan = make_plan(request, rank)
    q, k, v = (local(x, request, rank).requires_grad_() for x in tensors[:3])
    out = block_parallel_attention(q, k, v, plan, groups, options)
    dout = local(tensors[3], request, rank)
    clean = torch.from_numpy(plan.rows.stream) == 0
    dout[clean] /= groups.clean_replicas.size()  # replicas share the work of clean rows
    grads = torch.autograd.grad(out, (q, k, v), dout)
    got = [out.detach(), *grads]
    if groups.clean_replicas.size() > 1:
        for grad in got[1:]:
            total = grad[: plan.rows.num_clean].clone()
            dist.all_reduce(total, group=groups.clean_replicas)
            grad[: plan.rows.num_clean] = total
    worst = 0.0
    real = torch.from_numpy(plan.rows.stream) >= 0
    assert (out[~real] == 0).all()
    for mine, full in zip(got, want, strict=True):
        error = (mine - local(full, request, rank))[real].abs().max() / full.abs().max()
        worst = max(worst, float(error))
    return worst


def _worker(rank: int, num_ranks: int) -> dict[str, object]:
    groups = {}
    errors = {}
    for case in cases(num_ranks):
        request = case.request(num_ranks)
        c = request.num_clean_shards
        if c not in groups:
            groups[c] = make_groups(num_ranks, c)
        options = AttentionOptions(SIZE**-0.5, strategy=case.strategy, kernel="dense")
        errors[case] = check_case(request, rank, groups[c], options)
    found: dict[str, object] = {"errors": errors}
    if num_ranks == 4:
        found["shared"] = _shared_errors(rank, groups)
    if num_ranks == 2:
        found |= {"broken": _dropped_share(rank, groups[2]), "wire": _bf16_wire(rank, groups[2])}
    return found


def _shared_errors(rank: int, groups: dict[int, BlockGroups]) -> dict[tuple[bool, Case], float]:
    """Errors with a kernel whose launches share accumulators, as the GPU's does.

    In both orders: the reduction after all launches, or before those at own keys.
    """
    # Not at the top: that module's tests would be collected here too.
    from tests.attention.test_sharing import SharingDense

    errors = {}
    found = [x for x in cases(4) if x.strategy is Strategy.NATIVE and not x.window]
    with mock.patch.object(block_parallel, "choose_kernel", return_value=SharingDense()):
        for own_last, case in itertools.product((False, True), found):
            request = case.request(4)
            options = AttentionOptions(SIZE**-0.5, kernel="dense", own_last=own_last)
            of_case = groups[request.num_clean_shards]
            errors[own_last, case] = check_case(request, rank, of_case, options)
    return errors


@cache
def results(num_ranks: int) -> list[dict[str, Any]]:
    """What each rank found; one launch of processes serves all tests of `num_ranks`."""
    return [_worker(0, 1)] if num_ranks == 1 else run_distributed(_worker, num_ranks)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_every_layout_equals_the_dense_reference(num_ranks: int) -> None:
    for found in results(num_ranks):
        assert set(found["errors"]) == set(cases(num_ranks))
        assert {x: e for x, e in found["errors"].items() if not e <= TOLERANCE} == {}


def test_launches_that_share_accumulators_equal_the_dense_reference() -> None:
    for found in results(4):
        modes = {(own_last, case.mode) for own_last, case in found["shared"]}
        assert modes == {(x, y) for x in (False, True) for y in MODES_OF_FOUR}
        assert {x: e for x, e in found["shared"].items() if not e <= TOLERANCE} == {}


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_every_two_choices_meet_in_some_case(num_ranks: int) -> None:
    def met(chosen: list[Case]) -> set[tuple[tuple[int, object], ...]]:
        return set().union(*(meetings(case, 2) for case in chosen))

    assert met(cases(num_ranks)) == met(every_case(num_ranks))


@pytest.mark.parametrize("strategy", Strategy)
def test_corrupted_only_gives_the_corrupted_rows(strategy: Strategy) -> None:
    request = PlanRequest(length=40, block_size=4, num_views=2, clean_rule=CleanRule.BLOCK_CAUSAL)
    plan = make_plan(request, 0)
    clean = plan.rows.num_clean
    q, k, v = (
        local(x, request, 0).requires_grad_() for x in sample_tensors(request, 2, seed=5)[:3]
    )
    options = AttentionOptions(SIZE**-0.5, strategy=strategy, kernel="dense")
    full = block_parallel_attention(q, k, v, plan, BlockGroups.single(), options)[clean:]
    part = block_parallel_attention(
        q, k, v, plan, BlockGroups.single(), replace(options, corrupted_only=True)
    )
    torch.testing.assert_close(part, full, rtol=0, atol=1e-13)
    dout = torch.randn(full.shape, dtype=full.dtype, generator=torch.Generator().manual_seed(1))
    for a, b in zip(
        torch.autograd.grad(part, (q, k, v), dout),
        torch.autograd.grad(full, (q, k, v), dout),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def _dropped_share(rank: int, groups: BlockGroups) -> float:
    """The error when one rank's share of every reduce-scatter is lost."""
    request = PlanRequest(length=32, block_size=4, num_ranks=2, num_clean_shards=2)
    whole = dist.reduce_scatter_tensor

    def broken(out: torch.Tensor, tensor: torch.Tensor, **kwargs: object) -> object:
        if dist.get_rank() == 1:
            tensor = torch.zeros_like(tensor)
        return whole(out, tensor, **kwargs)

    dist.reduce_scatter_tensor = broken
    try:
        return check_case(request, rank, groups, AttentionOptions(SIZE**-0.5, kernel="dense"))
    finally:
        dist.reduce_scatter_tensor = whole


def test_a_dropped_share_of_the_reduce_scatter_is_caught() -> None:
    # Of the other rank, whose keys rank 1 saw; rank 1's own gradients at its own keys stay there.
    assert results(2)[0]["broken"] > 1e-3


def _bf16_wire(rank: int, groups: BlockGroups) -> float:
    """Relative difference of key gradients summed over a bf16 and over an fp32 wire."""
    request = PlanRequest(length=32, block_size=4, num_ranks=2, num_clean_shards=2)
    plan = make_plan(request, rank)
    got = {}
    for wire in GradWire:
        q, k, v = (
            local(x, request, rank).bfloat16().requires_grad_()
            for x in sample_tensors(request, 1, seed=3)[:3]
        )
        options = AttentionOptions(SIZE**-0.5, kernel="dense", grad_wire=wire)
        out = block_parallel_attention(q, k, v, plan, groups, options)
        got[wire] = torch.autograd.grad(out.float().square().sum(), k)[0]
    error = (got[GradWire.FP32] - got[GradWire.MODEL]).abs().max()
    return float(error / got[GradWire.FP32].abs().max())


def test_bf16_on_the_wire_costs_only_bf16_rounding() -> None:
    for found in results(2):
        assert 0 < found["wire"] < 2e-2  # bf16 has 8 bits; two rounded shares cost about one


@pytest.mark.parametrize("kind", [dist.ProcessGroup, NodeGroup, BlockingGroup, LocalGroup])
@pytest.mark.parametrize("own_last", [False, True])
def test_own_keys_come_last_where_a_reduction_is_one_kernel(kind: type, own_last: bool) -> None:
    plan = make_plan(PlanRequest(length=64, block_size=4, num_ranks=2, num_clean_shards=2), 0)
    shape = torch.Size((plan.rows.num_rows, 1, 2, 8))
    how = block_parallel._Kind(
        plan,
        AttentionOptions(1.0, own_last=own_last),
        (shape, shape, shape),
        torch.float32,
        torch.device("cpu"),
        near=False,
        beside=reduces_at_once(mock.Mock(spec=kind)),
    )
    is_apart = KeySpace.SHARD in block_parallel._layer(how).backward.num_keys
    assert is_apart is (own_last and kind is dist.ProcessGroup)


def test_refuses_tensors_that_do_not_fit_the_plan() -> None:
    plan = make_plan(PlanRequest(length=16, block_size=4), 0)
    x = torch.zeros(16, 1, 2, 8)
    with pytest.raises(ValueError, match="must have the plan's 32 rows"):
        block_parallel_attention(x, x, x, plan, BlockGroups.single(), AttentionOptions(1.0))


def test_refuses_groups_that_do_not_fit_the_plan() -> None:
    request = PlanRequest(length=16, block_size=4, num_ranks=2, num_clean_shards=2)
    plan = make_plan(request, 1)
    x = torch.zeros(plan.rows.num_rows, 1, 2, 8)
    with pytest.raises(ValueError, match=r"the plan is for .* = \(2, 2, 1\)"):
        block_parallel_attention(x, x, x, plan, BlockGroups.single(), AttentionOptions(1.0))
