"""The gather and the reduction are adjoint, exact, and move the bytes that layout/cost predicts.

Only a group can show this: one spawn for each world size runs all cases; the tests below read what
its ranks returned.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase as Step
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bp.attention.block_parallel import (
    AttentionOptions,
    GradWire,
    block_parallel_attention,
)
from megatron_bp.comm import wires
from megatron_bp.comm.clean_kv import CleanGather, CleanReduce
from megatron_bp.comm.groups import BlockGroups, LocalGroup
from megatron_bp.layout.cost import LayerShape, Traffic, layer_traffic
from megatron_bp.layout.decomposition import Phase
from megatron_bp.layout.exchange import SlabExchange
from megatron_bp.layout.owners import Ownership
from megatron_bp.layout.plan import PlanRequest, make_plan
from tests.attention.test_block_parallel import make_groups
from tests.comm.counting import counted
from tests.distributed import run_distributed
from tests.layout.test_decomposition import requests

WORLDS = [2, 3, 4]
KV_HEADS, SIZE, SAMPLES = 2, 4, 2
DOCUMENTS = ((0, 3), (3, 30), (30, 48))


def cases(num_ranks: int) -> list[PlanRequest]:
    """Aligned, ragged and packed samples; dense, windowed, baseline and hybrid exchanges."""
    aligned = PlanRequest(
        length=num_ranks * 24,
        block_size=4,
        num_ranks=num_ranks,
        num_clean_shards=num_ranks,
        num_views=2,
    )
    dense = [
        aligned,
        replace(aligned, length=61, num_views=1),
        replace(aligned, length=48, documents=DOCUMENTS),
        replace(aligned, ownership=Ownership.CONTIGUOUS),
        replace(aligned, gather_corrupted=True),
        replace(aligned, length=61, gather_corrupted=True),
    ]
    hybrid = [replace(aligned, num_clean_shards=c) for c in (2,) if num_ranks == 4]
    return [
        *dense,
        *(replace(request, window=9) for request in dense[:4]),
        replace(aligned, window=1),
        replace(aligned, window=200),
        replace(aligned, window=9, gather_corrupted=True),
        replace(aligned, window=9, gather_corrupted=True, windowed_exchange=False),
        *hybrid,
        *(replace(request, window=9) for request in hybrid),
    ]


@dataclass(frozen=True)
class Wire:
    """Dtypes of one layer on the wire."""

    dtype: torch.dtype
    grad: GradWire
    grad_bytes: int


WIRES = [
    Wire(torch.float32, GradWire.FP32, 4),
    Wire(torch.bfloat16, GradWire.FP32, 4),
    Wire(torch.bfloat16, GradWire.MODEL, 2),
]


def random(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Standard normal fp64 numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def total(value: float) -> float:
    """Sum of `value` over all ranks."""
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor)
    return float(tensor)


def adjoint_products(request: PlanRequest, rank: int, groups: BlockGroups) -> tuple[float, float]:
    """<gather(x), y> and <x, reduce(y)>, summed over ranks, for random x and y."""
    plan = make_plan(request, rank)
    exchange, clean = plan.exchange, plan.rows.num_clean
    shape = (SAMPLES, KV_HEADS, SIZE)
    k, v = random((clean, *shape), 10 + rank), random((clean, *shape), 20 + rank)
    gather = CleanGather(k, v, exchange, groups.clean_shards)
    gather.wait(Phase.LATE)
    y = random((exchange.num_buffer_rows, SAMPLES, 2, KV_HEADS, SIZE), 30 + rank)
    y[torch.from_numpy(exchange.buffer_position < 0)] = 0  # no query sees these rows
    reduce = CleanReduce(gather.buffer_SZ2MH, exchange, groups.clean_shards, torch.float64)
    reduce.grad_SZ2MH.copy_(y)
    reduce.start()
    dk, dv = reduce.finish(clean)
    left = (gather.buffer_SZ2MH * y).sum()
    return total(float(left)), total(float((k * dk).sum() + (v * dv).sum()))


def stays_at_home(request: PlanRequest, rank: int, groups: BlockGroups) -> float:
    """How far a reduction with own gradients is from the sum of both, over real rows."""
    plan = make_plan(request, rank)
    clean, shape = plan.rows.num_clean, (SAMPLES, KV_HEADS, SIZE)
    y = random((plan.exchange.num_buffer_rows, SAMPLES, 2, KV_HEADS, SIZE), 40 + rank)
    own = random((clean, *shape), 50 + rank), random((clean, *shape), 60 + rank)
    found = []
    for added in ((), own):
        reduce = CleanReduce(y, plan.exchange, groups.clean_shards, torch.float64)
        reduce.grad_SZ2MH.copy_(y)
        reduce.start()
        grads = torch.empty(clean, *shape), torch.empty(clean, *shape)  # fp32, as a model's may be
        reduce.finish_into(*grads, added)
        found.append(torch.stack(grads).double())
    real = torch.from_numpy(plan.rows.position[:clean] >= 0)
    return float((found[1] - found[0] - torch.stack(own))[:, real].abs().max())


def together(
    request: PlanRequest, rank: int, groups: BlockGroups, coalesced: bool
) -> tuple[int, list[torch.Tensor]]:
    """How often several collectives are started as one in an exchange, and what they bring.

    If not `coalesced`, over a backend that cannot.
    """
    plan = make_plan(request, rank)
    clean, shape = plan.rows.num_clean, (SAMPLES, KV_HEADS, SIZE)
    k, v = random((clean, *shape), 70 + rank), random((clean, *shape), 80 + rank)
    real, started = wires._coalescing_manager, []

    def noted(*args: Any, **kwargs: Any) -> Any:
        started.append(args)
        return real(*args, **kwargs)

    with (
        mock.patch.object(wires, "_starts_together", return_value=coalesced),
        mock.patch.object(wires, "_coalescing_manager", noted),
    ):
        gather = CleanGather(k, v, plan.exchange, groups.clean_shards, together=True)
        gather.wait(Phase.LATE)
        buffer = gather.buffer_SZ2MH
        reduce = CleanReduce(buffer, plan.exchange, groups.clean_shards, torch.float64)
        reduce.grad_SZ2MH.copy_(buffer)
        reduce.start()
        return len(started), [buffer, *reduce.finish(clean)]


def as_one(request: PlanRequest, rank: int, groups: BlockGroups) -> bool:
    """Whether both slabs move as one, if there are two, and exactly as one by one."""
    num_slabs = 0
    exchange = make_plan(request, rank).exchange
    if isinstance(exchange, SlabExchange):
        num_slabs = sum(slab.length > 0 for slab in exchange.slabs)
    (count, moved), (apart, singly) = (
        together(request, rank, groups, coalesced) for coalesced in (True, False)
    )
    equal = all(a.equal(b) for a, b in zip(moved, singly, strict=True))
    return equal and apart == 0 and count == (2 if num_slabs == 2 else 0)


def position_errors(
    request: PlanRequest, rank: int, groups: BlockGroups, as_one: bool = False
) -> list[str]:
    """What is wrong with the buffer after each phase when every row holds its own position."""
    plan = make_plan(request, rank)
    position = torch.from_numpy(plan.exchange.buffer_position)
    local = torch.from_numpy(plan.rows.position[: plan.rows.num_clean]).double()
    k = local[:, None, None, None].expand(-1, SAMPLES, KV_HEADS, SIZE)
    gather = CleanGather(k, k + 0.5, plan.exchange, groups.clean_shards, together=as_one)
    chunk = np.searchsorted(plan.owners.clean.bounds, position.numpy(), side="right") - 1
    own = torch.from_numpy(np.isin(chunk, plan.owners.clean.chunks_of[plan.shard]))
    early = torch.from_numpy(plan.owners.clean.slab_of_chunk[chunk] == 0)
    if not isinstance(plan.exchange, SlabExchange):
        early |= True  # one all-to-all brings everything
    wrong = []
    for phase, here in ((Phase.LOCAL, own), (Phase.EARLY, own | early), (Phase.LATE, own | True)):
        gather.wait(phase)
        rows = here & (position >= 0)
        want = position[rows].double()[:, None, None, None]
        got_k, got_v = gather.buffer_SZ2MH[rows].unbind(2)
        if not ((got_k == want).all() and (got_v == want + 0.5).all()):
            wrong.append(f"{phase!r} of {request}, {as_one=}")
    return wrong


def copies_summed(request: PlanRequest, rank: int, groups: BlockGroups) -> bool:
    """Whether a gradient of one in every buffer row comes back as the number of its copies."""
    plan = make_plan(request, rank)
    clean = plan.rows.num_clean
    like = torch.zeros(1, SAMPLES, 2, KV_HEADS, SIZE)
    reduce = CleanReduce(like, plan.exchange, groups.clean_shards, torch.float32)
    real = torch.from_numpy(plan.exchange.buffer_position >= 0)
    reduce.grad_SZ2MH[real] = 1
    reduce.start()
    dk, dv = reduce.finish(clean)
    first = rank - plan.shard
    held = np.zeros(request.length, dtype=int)
    for peer in range(first, first + request.num_clean_shards):
        position = make_plan(request, peer).exchange.buffer_position
        held[position[position >= 0]] += 1
    at = plan.rows.position[:clean]
    want = torch.from_numpy(np.where(at >= 0, held[at], 0))[:, None, None, None]
    return bool((dk == want).all() and (dv == want).all())


def layer_bytes(
    request: PlanRequest, rank: int, groups: BlockGroups, wire: Wire
) -> tuple[Traffic, Traffic]:
    """Measured and predicted traffic of one attention layer, forward and backward."""
    plan = make_plan(request, rank)
    rows = plan.rows.num_rows
    q = random((rows, SAMPLES, 2 * KV_HEADS, SIZE), 1).to(wire.dtype).requires_grad_()
    k, v = (
        random((rows, SAMPLES, KV_HEADS, SIZE), seed).to(wire.dtype).requires_grad_()
        for seed in (2, 3)
    )
    options = AttentionOptions(SIZE**-0.5, kernel="dense", grad_wire=wire.grad)
    with counted() as sent:
        out = block_parallel_attention(q, k, v, plan, groups, options)
        forward = sum(x.total for x in sent)
        out.sum().backward()
    everything = sum(x.total for x in sent)
    shape = LayerShape(KV_HEADS, SIZE, SAMPLES, wire.dtype.itemsize, wire.grad_bytes)
    return Traffic(forward, everything - forward), layer_traffic(plan, shape)


def rounded_grads(rank: int, groups: BlockGroups) -> dict[torch.dtype, torch.Tensor]:
    """The owner's gradient when every rank contributes 1 + 2^-10, for each wire dtype."""
    plan = make_plan(cases(dist.get_world_size())[0], rank)
    like = torch.zeros(1, 1, 2, 1, 1, dtype=torch.bfloat16)
    grads = {}
    for dtype in (torch.bfloat16, torch.float32):
        reduce = CleanReduce(like, plan.exchange, groups.clean_shards, dtype)
        assert reduce.grad_SZ2MH.dtype == torch.float32
        reduce.grad_SZ2MH.fill_(1 + 2**-10)
        reduce.start()
        grads[dtype] = reduce.finish(plan.rows.num_clean)[0]
    return grads


def _worker(rank: int, num_ranks: int) -> dict[str, Any]:
    groups: dict[int, BlockGroups] = {}
    names = ("adjoint", "home", "one", "wrong", "copies", "bytes")
    found: dict[str, Any] = {name: [] for name in names}
    for request in cases(num_ranks):
        c = request.num_clean_shards
        if c not in groups:
            groups[c] = make_groups(num_ranks, c)
        found["adjoint"].append(adjoint_products(request, rank, groups[c]))
        found["home"].append(stays_at_home(request, rank, groups[c]))
        found["one"].append(as_one(request, rank, groups[c]))
        for one in (False, True):
            found["wrong"] += position_errors(request, rank, groups[c], one)
        found["copies"].append(copies_summed(request, rank, groups[c]))
        found["bytes"].append([layer_bytes(request, rank, groups[c], wire) for wire in WIRES])
    found["rounded"] = rounded_grads(rank, groups[num_ranks])
    return found


@cache
def results(num_ranks: int) -> list[dict[str, Any]]:
    """What each rank of a run on `num_ranks` found; the run happens once."""
    return run_distributed(_worker, num_ranks)


@pytest.mark.parametrize("num_ranks", WORLDS)
def test_the_reduction_is_the_adjoint_of_the_gather(num_ranks: int) -> None:
    for found in results(num_ranks):
        for request, (left, right) in zip(cases(num_ranks), found["adjoint"], strict=True):
            assert left != 0
            # fp64 sums of a few thousand products of order one
            assert left == pytest.approx(right, rel=1e-12, abs=1e-11), request


@pytest.mark.parametrize("num_ranks", WORLDS)
def test_gradients_that_did_not_travel_are_added_once(num_ranks: int) -> None:
    for found in results(num_ranks):
        assert max(found["home"]) < 1e-5  # two roundings to fp32 of sums of order ten


@pytest.mark.parametrize("num_ranks", WORLDS)
def test_two_slabs_travel_as_one_and_bring_what_each_by_itself_brings(num_ranks: int) -> None:
    for found in results(num_ranks):
        one = dict(zip(cases(num_ranks), found["one"], strict=True))
        assert one == dict.fromkeys(cases(num_ranks), True)


@pytest.mark.parametrize(
    ("on_gpu", "backend", "as_one"),
    [(False, "gloo", True), (True, "gloo", False), (True, "nccl", True)],
)
def test_gloo_moves_slabs_on_a_gpu_one_by_one(on_gpu: bool, backend: str, as_one: bool) -> None:
    """It has no coalesced collectives for them ("unsupported device type cuda")."""
    with mock.patch.object(dist, "get_backend", return_value=backend):
        assert wires._starts_together(mock.Mock(is_cuda=on_gpu), mock.Mock()) is as_one


def _random_adjoints(rank: int, num_ranks: int, drawn: list[PlanRequest]) -> list[Any]:
    groups = make_groups(num_ranks, num_ranks)
    return [adjoint_products(request, rank, groups) for request in drawn]


@settings(max_examples=3, deadline=None, derandomize=True, phases=[Step.generate])
@given(drawn=st.lists(requests(), min_size=20, max_size=20))
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_gather_and_reduction_are_adjoint_for_any_request(
    num_ranks: int, drawn: list[PlanRequest]
) -> None:
    """Lists of requests are drawn here, so that every rank runs the same ones in one spawn."""
    shared = {"num_ranks": num_ranks, "num_clean_shards": num_ranks, "gather_corrupted": False}
    drawn = [replace(request, **shared) for request in drawn]
    for found in run_distributed(_random_adjoints, num_ranks, drawn):
        for request, (left, right) in zip(drawn, found, strict=True):
            # fp64 sums of a few thousand products of order one
            assert left == pytest.approx(right, rel=1e-12, abs=1e-11), request


@pytest.mark.parametrize("num_ranks", WORLDS)
def test_each_phase_brings_the_rows_it_promises(num_ranks: int) -> None:
    for found in results(num_ranks):
        assert found["wrong"] == []


@pytest.mark.parametrize("num_ranks", WORLDS)
def test_the_owner_gets_one_share_from_every_copy_of_its_row(num_ranks: int) -> None:
    for found in results(num_ranks):
        assert dict(zip(cases(num_ranks), found["copies"], strict=True)) == dict.fromkeys(
            cases(num_ranks), True
        )


@pytest.mark.parametrize("num_ranks", WORLDS)
def test_measured_bytes_of_a_layer_equal_the_prediction(num_ranks: int) -> None:
    for found in results(num_ranks):
        for request, of_wire in zip(cases(num_ranks), found["bytes"], strict=True):
            for wire, (measured, predicted) in zip(WIRES, of_wire, strict=True):
                assert measured == predicted, (request, wire)
    some = [m for m, _ in (wires[0] for wires in results(num_ranks)[0]["bytes"])]
    assert some[0].gather_bytes > 0
    assert some[4].gather_bytes == 3 * some[0].gather_bytes, "the baseline moves both views too"


@pytest.mark.parametrize("num_ranks", WORLDS)
def test_fp32_on_the_wire_loses_nothing_and_bf16_rounds_each_share(num_ranks: int) -> None:
    for found in results(num_ranks):
        assert (found["rounded"][torch.float32] == num_ranks * (1 + 2**-10)).all()
        assert (found["rounded"][torch.bfloat16] == num_ranks).all()


def test_a_lone_process_keeps_its_rows_and_gradients() -> None:
    plan = make_plan(PlanRequest(length=10, block_size=4), 0)
    k, v = random((12, 1, 2, 3), 1), random((12, 1, 2, 3), 2)
    clean = plan.rows.num_clean
    gather = CleanGather(k[:clean], v[:clean], plan.exchange, LocalGroup())
    gather.wait(Phase.LATE)
    real = torch.from_numpy(plan.exchange.buffer_position >= 0)
    rows = torch.from_numpy(plan.rows.position[:clean] >= 0)
    torch.testing.assert_close(gather.buffer_SZ2MH[real][:, :, 0], k[:clean][rows], rtol=0, atol=0)
    reduce = CleanReduce(gather.buffer_SZ2MH, plan.exchange, LocalGroup(), torch.float64)
    reduce.grad_SZ2MH.copy_(gather.buffer_SZ2MH)
    reduce.start()
    dk, dv = reduce.finish(clean)
    torch.testing.assert_close(dk[rows], k[:clean][rows], rtol=0, atol=0)
    torch.testing.assert_close(dv[rows], v[:clean][rows], rtol=0, atol=0)


@pytest.mark.parametrize("window", [0, 5])
def test_refuses_a_shared_sample_without_a_group(window: int) -> None:
    request = PlanRequest(length=32, block_size=4, num_ranks=2, num_clean_shards=2, window=window)
    plan = make_plan(request, 0)
    k = torch.zeros(plan.rows.num_clean, 1, 1, 2)
    with pytest.raises(ValueError, match="this process has no group"):
        CleanGather(k, k, plan.exchange, LocalGroup())
    reduce = CleanReduce(torch.zeros(1, 1, 2, 1, 2), plan.exchange, LocalGroup(), torch.float32)
    with pytest.raises(ValueError, match="this process has no group"):
        reduce.start()
