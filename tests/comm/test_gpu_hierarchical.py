"""On GPUs, exchanges by node give the bits of flat ones while the compute stream is busy.

What only this can show: the second step, queued on a stream of its own, waits for the first one,
and no buffer is reused while a collective still reads it.
"""

import pytest
import torch
import torch.distributed as dist

from megatron_bp.comm.clean_kv import CleanGather, CleanReduce
from megatron_bp.comm.groups import Group
from megatron_bp.comm.hierarchical import split_by_node
from megatron_bp.layout.decomposition import Phase
from megatron_bp.layout.plan import PlanRequest, make_plan
from tests.distributed import run_distributed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
RANKS, ROUNDS = 4, 8
REQUEST = PlanRequest(length=16384, block_size=32, num_ranks=RANKS, num_clean_shards=RANKS)


def exchange(group: Group, rank: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Gathered keys and reduced whole-number gradients, with work and new buffers in between."""
    plan = make_plan(REQUEST, rank)
    clean = plan.rows.num_clean
    generator = torch.Generator("cuda").manual_seed(100 * seed + rank)
    k, v = torch.randn(2, clean, 1, 8, 128, generator=generator, device="cuda").bfloat16()
    busy = torch.randn(2048, 2048, generator=generator, device="cuda")
    gather = CleanGather(k, v, plan.exchange, group)
    for phase in Phase:
        busy = busy @ busy / 2048
        gather.wait(phase)
    reduce = CleanReduce(gather.buffer_SZ2MH, plan.exchange, group, torch.float32, zeroed=False)
    shape = reduce.grad_SZ2MH.shape
    reduce.grad_SZ2MH.copy_(
        torch.randint(-64, 65, shape, generator=generator, device="cuda", dtype=torch.int32)
    )
    reduce.start()
    churn = [torch.full(shape, float("nan"), device="cuda") for _ in range(4)]
    busy = busy @ busy / 2048 + churn[0].nansum()
    return gather.buffer_SZ2MH, torch.stack(reduce.finish(clean))


def _worker(rank: int, num_ranks: int, backend: str) -> bool:
    torch.cuda.set_device(rank % torch.cuda.device_count())
    flat = dist.new_group(list(range(num_ranks)), backend=backend)
    assert isinstance(flat, dist.ProcessGroup)
    by_node = split_by_node(flat, [i // 2 for i in range(num_ranks)])
    for seed in range(ROUNDS):
        want, got = (exchange(group, rank, seed) for group in (flat, by_node))
        if not (want[0].equal(got[0]) and want[1].equal(got[1])):
            return False
    return True


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_by_node_gives_the_bits_of_a_flat_exchange(backend: str) -> None:
    """gloo plays four ranks on any GPUs; NCCL needs a GPU for each."""
    if backend == "nccl" and torch.cuda.device_count() < RANKS:
        pytest.skip(f"NCCL needs {RANKS} GPUs")
    assert run_distributed(_worker, RANKS, backend, timeout=300.0) == [True] * RANKS
