"""Every layout, rule, window and strategy gives the dense reference's output and gradients."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron_bp.attention.block_parallel import (
    AttentionOptions,
    GradWire,
    block_parallel_attention,
)
from megatron_bp.attention.contract import Strategy
from megatron_bp.attention.reference import reference_attention
from megatron_bp.comm.groups import BlockGroups, LocalGroup
from megatron_bp.layout.plan import PlanRequest, make_plan
from megatron_bp.layout.visibility import CleanRule, CorruptedRule
from tests.distributed import run_distributed

HEADS, KV_HEADS, SIZE = 4, 2, 8
TOLERANCE = 1e-12  # fp64 rounding over a few hundred keys
DOCUMENTS = ((0, 3), (3, 4), (4, 30), (30, 64))


def cases(num_ranks: int) -> Iterator[PlanRequest]:
    """Requests for `num_ranks`: all modes, rules and windows; ragged and packed samples."""
    shards = sorted({1, num_ranks} | ({2} if num_ranks == 4 else set()))
    samples = [(64, ()), (61, ()), (28, ()), (64, DOCUMENTS)]
    for c, rule, window, (length, documents) in itertools.product(
        shards, CleanRule, (0, 3, 11), samples
    ):
        base = PlanRequest(
            length=length,
            block_size=4,
            num_ranks=num_ranks,
            num_clean_shards=c,
            clean_rule=rule,
            window=window,
            documents=documents,
            row_multiple=2,
            num_views=2 if length == 64 else 1,
            corrupted_rule=CorruptedRule.CAUSAL if length == 28 else CorruptedRule.BIDIRECTIONAL,
        )
        yield base
        if c == num_ranks > 1:
            yield replace(base, gather_corrupted=True)
            if window:
                yield replace(base, windowed_exchange=False)


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


def dense(request: PlanRequest, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """out, dq, dk, dv of the one-process reference, by coordinate."""
    one = replace(request, num_ranks=1, num_clean_shards=1, gather_corrupted=False, row_multiple=1)
    plan = make_plan(one, 0)
    q, k, v = (local(x, one, 0).requires_grad_() for x in tensors[:3])
    out = reference_attention(q, k, v, plan, SIZE**-0.5)
    grads = torch.autograd.grad(out, (q, k, v), local(tensors[3], one, 0))
    stream, position = torch.from_numpy(plan.rows.stream), torch.from_numpy(plan.rows.position)
    spread = []
    for source in (out.detach(), *grads):
        full = torch.zeros(request.num_views + 1, request.length, *source.shape[1:]).to(source)
        full[stream[stream >= 0], position[stream >= 0]] = source[stream >= 0]
        spread.append(full)
    return spread


def check_case(
    request: PlanRequest, rank: int, groups: BlockGroups, options: AttentionOptions
) -> float:
    """Largest relative error of this rank's output and gradients against the reference."""
    tensors = sample_tensors(request, 2, seed=3)
    want = dense(request, tensors)
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


def _worker(rank: int, num_ranks: int) -> None:
    groups = {}
    for request in cases(num_ranks):
        c = request.num_clean_shards
        if c not in groups:
            groups[c] = make_groups(num_ranks, c)
        for strategy in Strategy:
            options = AttentionOptions(SIZE**-0.5, strategy=strategy, kernel="dense")
            error = check_case(request, rank, groups[c], options)
            assert error <= TOLERANCE, (error, request, strategy)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_every_layout_equals_the_dense_reference(num_ranks: int) -> None:
    run_distributed(_worker, num_ranks)


def test_one_rank_equals_the_dense_reference() -> None:
    _worker(0, 1)


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


def _dropped_share(rank: int, num_ranks: int) -> None:
    """A reduce-scatter that loses the other rank's share must be seen by the same check."""
    request = PlanRequest(length=32, block_size=4, num_ranks=2, num_clean_shards=2)
    groups = make_groups(2, 2)
    whole = dist.reduce_scatter_tensor

    def broken(out: torch.Tensor, tensor: torch.Tensor, **kwargs: object) -> object:
        if dist.get_rank() == 1:
            tensor = torch.zeros_like(tensor)
        return whole(out, tensor, **kwargs)

    options = AttentionOptions(SIZE**-0.5, kernel="dense")
    assert check_case(request, rank, groups, options) <= TOLERANCE
    dist.reduce_scatter_tensor = broken
    assert check_case(request, rank, groups, options) > 1e-3


def test_a_dropped_share_of_the_reduce_scatter_is_caught() -> None:
    run_distributed(_dropped_share, 2)


def _bf16_wire(rank: int, num_ranks: int) -> None:
    request = PlanRequest(length=32, block_size=4, num_ranks=2, num_clean_shards=2)
    groups = make_groups(2, 2)
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
    error = (got[GradWire.FP32] - got[GradWire.MODEL]).abs().max() / got[GradWire.FP32].abs().max()
    assert 0 < error < 2e-2  # bf16 has 8 bits; summing two rounded shares costs about one


def test_bf16_on_the_wire_costs_only_bf16_rounding() -> None:
    run_distributed(_bf16_wire, 2)


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
