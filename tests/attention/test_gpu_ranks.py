"""Several ranks on one GPU, over gloo: the whole path with real kernels against one process.

What only this can show: kernels, Triton passes and collectives together on CUDA tensors.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bp.attention.block_parallel import AttentionOptions, block_parallel_attention
from megatron_bp.attention.choose import load_kernel
from megatron_bp.attention.contract import Strategy
from megatron_bp.attention.reference import reference_attention
from megatron_bp.layout.plan import PlanRequest, make_plan
from megatron_bp.layout.visibility import CleanRule
from tests.attention.test_block_parallel import make_groups
from tests.distributed import run_distributed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HEADS, KV_HEADS, SIZE, SAMPLES = 8, 2, 128, 2
SCALE = SIZE**-0.5
LIMIT = 8e-3  # relative L2; a few bf16 roundings (2^-9) of inputs, partial results and sums
DOCUMENTS = ((0, 100), (100, 101), (101, 390), (390, 512))


def requests(num_ranks: int) -> list[PlanRequest]:
    """Modes, rules, windows, packed and ragged samples, prompts and views."""
    base = PlanRequest(
        length=512, block_size=32, num_ranks=num_ranks, num_clean_shards=num_ranks, row_multiple=2
    )
    return [
        base,
        replace(base, clean_rule=CleanRule.BLOCK_CAUSAL, num_views=2),
        replace(base, length=501, num_views=2),
        replace(base, documents=DOCUMENTS),
        replace(base, window=100),
        replace(base, window=20, documents=DOCUMENTS, clean_rule=CleanRule.BLOCK_CAUSAL),
        replace(base, prompts=(70,)),
        replace(base, num_clean_shards=1, num_views=2),
        replace(base, gather_corrupted=True),
    ]


def whole(request: PlanRequest) -> list[Tensor]:
    """q, k, v, dout of the whole sample in bf16, [streams, L, Z, heads, H]."""
    generator = torch.Generator().manual_seed(2)
    shape = (request.num_views + 1, request.length, SAMPLES)
    return [
        torch.randn(*shape, heads, SIZE, generator=generator).bfloat16().cuda()
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]


def local(x: Tensor, request: PlanRequest, rank: int) -> Tensor:
    """The rows of `rank`; padding rows hold large numbers that must not matter."""
    rows = make_plan(request, rank).rows
    stream, position = (torch.from_numpy(c).cuda() for c in (rows.stream, rows.position))
    picked = x[stream.clamp(min=0), position.clamp(min=0)].clone()
    picked[stream < 0] = 1e3
    return picked


def reference(request: PlanRequest, tensors: list[Tensor]) -> list[Tensor]:
    """out, dq, dk, dv of the dense fp64 reference in one process, by stream and position."""
    one = replace(request, num_ranks=1, num_clean_shards=1, gather_corrupted=False, row_multiple=1)
    plan = make_plan(one, 0)
    q, k, v = (local(x.double(), one, 0).requires_grad_() for x in tensors[:3])
    out = reference_attention(q, k, v, plan, SCALE)
    grads = torch.autograd.grad(out, (q, k, v), local(tensors[3].double(), one, 0))
    stream, position = (torch.from_numpy(c).cuda() for c in (plan.rows.stream, plan.rows.position))
    real, spread = stream >= 0, []
    for source in (out.detach(), *grads):
        full = source.new_zeros(request.num_views + 1, request.length, *source.shape[1:])
        full[stream[real], position[real]] = source[real]
        spread.append(full)
    return spread


def _worker(rank: int, num_ranks: int, kernel: str) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)  # fresh tensors hold NaN
    groups = {c: make_groups(num_ranks, c) for c in sorted({1, num_ranks})}
    for request in requests(num_ranks):
        tensors = whole(request)
        want = reference(request, tensors)
        here = groups[request.num_clean_shards]
        plan = make_plan(request, rank)
        q, k, v = (local(x, request, rank).requires_grad_() for x in tensors[:3])
        dout = local(tensors[3], request, rank)
        dout[torch.from_numpy(plan.rows.stream).cuda() == 0] /= here.clean_replicas.size()
        out = block_parallel_attention(
            q, k, v, plan, here, AttentionOptions(SCALE, Strategy.NATIVE, kernel)
        )
        got = [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]
        if here.clean_replicas.size() > 1:
            for grad in got[1:]:
                total = grad[: plan.rows.num_clean].float()
                dist.all_reduce(total, group=here.clean_replicas)
                grad[: plan.rows.num_clean] = total.to(grad.dtype)
        real = torch.from_numpy(plan.rows.stream).cuda() >= 0
        assert (out[~real] == 0).all(), request
        for mine, full in zip(got, want, strict=True):
            right = local(full, request, rank)[real]
            error = float((mine[real].double() - right).norm() / right.norm())
            assert error < LIMIT, (error, request)


@pytest.mark.parametrize("num_ranks", [1, 4])
@pytest.mark.parametrize("kernel", ["flash4", "te", "sdpa"])
def test_the_whole_path_equals_the_dense_reference(kernel: str, num_ranks: int) -> None:
    try:
        load_kernel(kernel)
    except ImportError as error:
        pytest.skip(str(error))
    run_distributed(_worker, num_ranks, kernel, timeout=300.0)
