"""The gathered baseline computes what block-parallel attention does, output and gradients."""

import pytest
import torch
from torch import Tensor

from megatron_bp.attention.block_parallel import AttentionOptions, block_parallel_attention
from megatron_bp.attention.contract import IntervalMask
from megatron_bp.attention.flex_baseline import gathered_attention
from megatron_bp.attention.kernels import dense
from megatron_bp.comm.groups import BlockGroups, LocalGroup
from megatron_bp.layout.owners import Ownership
from megatron_bp.layout.plan import PlanRequest, make_plan
from tests.distributed import run_distributed

TOLERANCE = 1e-12  # fp64 rounding over a few hundred keys

REQUESTS = {
    "one rank": PlanRequest(64, 4),
    "two views": PlanRequest(64, 4, num_views=2),
    "csbp": PlanRequest(64, 4, 2, 2, num_views=2),
    "conventional": PlanRequest(64, 4, 2, 2, num_views=2, gather_corrupted=True),
    "replicated": PlanRequest(64, 4, 2, 1),
    "contiguous": PlanRequest(64, 4, 2, 2, ownership=Ownership.CONTIGUOUS),
    "window": PlanRequest(64, 4, 2, 2, window=9),
}


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: IntervalMask, scale: float
) -> tuple[Tensor, Tensor]:
    """Plain torch in the place of FlexAttention, which has no backward on a CPU."""
    return dense.attend(q, k, v, mask.dense(), scale)


def compare(rank: int, num_ranks: int, name: str, corrupted_only: bool) -> float:
    """The largest difference of output and gradients from block-parallel attention."""
    import torch.distributed as dist

    request = REQUESTS[name]
    groups = BlockGroups.single()
    if num_ranks > 1 and request.num_clean_shards > 1:
        groups = BlockGroups(dist.group.WORLD, dist.group.WORLD, LocalGroup())
    elif num_ranks > 1:
        groups = BlockGroups(dist.group.WORLD, LocalGroup(), dist.group.WORLD)
    plan = make_plan(request, rank)
    options = AttentionOptions(0.3, corrupted_only=corrupted_only)
    generator = torch.Generator().manual_seed(5 + rank)
    q, k, v, dout = (
        torch.randn(
            plan.rows.num_rows, 2, heads, 8, generator=generator, dtype=torch.float64
        ).requires_grad_()
        for heads in (4, 2, 2, 4)
    )
    dout = dout.detach()[plan.rows.num_clean if corrupted_only else 0 :]
    results = []
    for out in (
        block_parallel_attention(q, k, v, plan, groups, options),
        gathered_attention(q, k, v, plan, groups, options, attend),
    ):
        results.append((out, *torch.autograd.grad(out, (q, k, v), dout)))
    return max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("corrupted_only", [False, True])
@pytest.mark.parametrize("name", ["one rank", "two views"])
def test_one_rank_gives_the_same(name: str, corrupted_only: bool) -> None:
    assert compare(0, 1, name, corrupted_only) < TOLERANCE


def compare_all(rank: int, num_ranks: int) -> dict[str, float]:
    """The difference of every case on two ranks."""
    names = [name for name in REQUESTS if REQUESTS[name].num_ranks == num_ranks]
    return {f"{n} {c}": compare(rank, num_ranks, n, c) for n in names for c in (False, True)}


def test_two_ranks_give_the_same_in_every_mode() -> None:
    for found in run_distributed(compare_all, 2):
        assert len(found) == 10
        assert max(found.values()) < TOLERANCE, found
