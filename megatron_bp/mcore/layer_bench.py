"""Measures one attention layer, forward and backward, on the ranks of a context group.

Everything a layer does is in it: packing, exchange, launches, merge, reduction. Beside the times
stand a profile of each rank (communication that nothing hides) and the bytes it sent, as NCCL
recorded them, against layout/cost.py. Cases are timed in turn, so that a device that slows down
slows all of them. Specified by tests/mcore/test_layer_bench.py; the command line is
tools/bench_layer.py.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from megatron_bp.attention.bench import Shape
from megatron_bp.attention.block_parallel import (
    AttentionOptions,
    GradWire,
    block_parallel_attention,
)
from megatron_bp.attention.flex_baseline import gathered_attention
from megatron_bp.comm.groups import BlockGroups, BlockingGroup, Group, LocalGroup
from megatron_bp.layout.cost import LayerShape, Traffic, layer_traffic
from megatron_bp.layout.exchange import Copy, Slab, SlabExchange
from megatron_bp.layout.owners import Ownership
from megatron_bp.layout.plan import PlanRequest, RankPlan, make_plan
from megatron_bp.mcore.step_trace import ATTENTION, Split, split_of
from megatron_bp.mcore.step_waits import rows_of

Run = Callable[[], object]
PARTS = ("forward", "backward", "both")


@dataclass(frozen=True)
class Way:
    """How the layer is split and when keys travel.

    `shards` is the share of P that the clean rows are split over; `single` gathers them in one
    piece instead of two slabs; `blocking` waits for every collective at once.
    """

    shards: float = 1.0
    conventional: bool = False
    ownership: Ownership = Ownership.DUAL_END
    single: bool = False
    blocking: bool = False


WAYS = {
    "csbp": Way(),
    "csbp-single": Way(single=True),
    "csbp-blocking": Way(blocking=True),
    "contiguous": Way(ownership=Ownership.CONTIGUOUS),
    "bp": Way(shards=0),
    "hybrid": Way(shards=0.5),
    "cp": Way(conventional=True),
    "cp-plain": Way(conventional=True, blocking=True),
}


@dataclass(frozen=True)
class LayerCase:
    """A layer at a length, on P ranks in one way; `kernel` is a kernel's name, or flex_baseline.

    Without `own_last` the reduction starts after all launches. NCCL may take `max_ctas`
    multiprocessors for a collective (0: as many as it likes).
    """

    shape: Shape
    length: int
    num_ranks: int
    way: str = "csbp"
    kernel: str = "auto"
    wire: GradWire = GradWire.FP32
    num_views: int = 1
    own_last: bool = True
    max_ctas: int = 0

    @property
    def num_shards(self) -> int:
        """C, the shards of the clean rows."""
        return int(WAYS[self.way].shards * self.num_ranks) or 1

    def plan(self, rank: int) -> RankPlan:
        """The plan of a rank."""
        way = WAYS[self.way]
        request = PlanRequest(
            length=self.length,
            block_size=self.shape.block_size,
            num_ranks=self.num_ranks,
            num_clean_shards=self.num_shards,
            num_views=self.num_views,
            window=self.shape.window,
            ownership=way.ownership,
            gather_corrupted=way.conventional and self.num_ranks > 1,
            windowed_exchange=not way.blocking,
        )
        plan = make_plan(request, rank)
        return single_gather(plan) if way.single else plan

    def traffic(self, rank: int, dtype: torch.dtype) -> Traffic:
        """Bytes that a rank should send."""
        wire = dtype if self.wire is GradWire.MODEL else torch.promote_types(dtype, torch.float32)
        shape = LayerShape(
            self.shape.kv_heads, self.shape.head_size, 1, dtype.itemsize, wire.itemsize
        )
        return layer_traffic(self.plan(rank), shape)


def single_gather(plan: RankPlan) -> RankPlan:
    """The plan with one all-gather (and one reduce-scatter) instead of those of two slabs.

    Gathered rows come rank by rank, [early ; late] of each, and are copied to their places.
    """
    exchange = plan.exchange
    assert isinstance(exchange, SlabExchange), "a windowed exchange has no slabs"
    early = exchange.slabs[0].length
    whole = early + exchange.slabs[1].length
    copies = []
    for at, slab in enumerate(exchange.slabs):
        found = slab.copies or tuple(
            Copy(rank * slab.length, slab.in_place_at + rank * slab.length, slab.length)
            for rank in range(exchange.num_shards if slab.length else 0)
        )
        for source, target, length in found:
            rank, row = divmod(source, slab.length)
            copies.append(Copy(rank * whole + (early if at else 0) + row, target, length))
    slabs = Slab(whole, 0, -1, tuple(copies)), Slab(0, whole, -1, ())
    return replace(plan, exchange=replace(exchange, slabs=slabs))


def make_groups(num_shards: int, blocking: bool, max_ctas: int = 0) -> BlockGroups:
    """Groups over all processes, which are on one host, with adjacent clean shards; collective.

    Raises: ValueError for `max_ctas` over a backend other than NCCL.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    if world == 1:
        return BlockGroups.single()
    options: Any = None
    if max_ctas:
        if dist.get_backend() != "nccl":
            raise ValueError(f"max_ctas={max_ctas} is for NCCL, not {dist.get_backend()}; use 0.")
        options = dist.ProcessGroupNCCL.Options()
        options.config.max_ctas = max_ctas

    def mine(sets: list[list[int]]) -> Group:
        some = [ranks for ranks in sets if len(ranks) > 1]
        made = [(ranks, dist.new_group(ranks, pg_options=options)) for ranks in some]
        for ranks, group in made:
            if rank in ranks:
                assert isinstance(group, dist.ProcessGroup)
                return BlockingGroup(group) if blocking else group
        return LocalGroup()

    shards = [list(range(i, i + num_shards)) for i in range(0, world, num_shards)]
    replicas = [list(range(j, world, num_shards)) for j in range(num_shards)]
    return BlockGroups(mine([list(range(world))]), mine(shards), mine(replicas), near=True)


class LayerRun:
    """A layer with random inputs on this rank."""

    def __init__(
        self, case: LayerCase, groups: BlockGroups, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.plan, self.groups, self.case = case.plan(groups.rank), groups, case
        generator = torch.Generator(device).manual_seed(1 + groups.rank)
        shape, rows = case.shape, self.plan.rows.num_rows

        def draw(heads: int) -> Tensor:
            size = (rows, 1, heads, shape.head_size)
            return torch.randn(size, generator=generator, device=device).to(dtype)

        self.q = draw(shape.heads).requires_grad_()
        self.k = draw(shape.kv_heads).requires_grad_()
        self.v = draw(shape.kv_heads).requires_grad_()
        self.dout = draw(shape.heads)
        self.options = AttentionOptions(
            softmax_scale=shape.head_size**-0.5,
            kernel="auto" if case.kernel == "flex_baseline" else case.kernel,
            grad_wire=case.wire,
            own_last=case.own_last,
        )

    def forward(self) -> Tensor:
        """The layer's output."""
        of_rank = self.q, self.k, self.v, self.plan, self.groups, self.options
        with record_function("bench/attention"):
            if self.case.kernel != "flex_baseline":
                return block_parallel_attention(*of_rank)
            from megatron_bp.attention.kernels.flex import attend

            return gathered_attention(*of_rank, attend)

    def gradients(self, out: Tensor) -> tuple[Tensor, ...]:
        """The gradients of q, k and v."""
        return torch.autograd.grad(out, (self.q, self.k, self.v), self.dout)

    def both(self) -> None:
        """Forward and backward once."""
        self.gradients(self.forward())

    def part(self, name: str) -> Run:
        """One of PARTS, ready to run."""
        if name == "backward":
            return partial(self.gradients, self.forward())
        return self.forward if name == "forward" else self.both


Case = tuple[LayerCase, BlockGroups]


def measure(
    cases: Sequence[Case],
    device: torch.device,
    dtype: torch.dtype,
    repeats: int,
    parts: Sequence[str] = PARTS,
) -> list[dict[str, Any]]:
    """Each case as plain values over all ranks; collective.

    Both passes together are timed, and those of `parts` by themselves, in the order of PARTS. Times
    are medians of the slowest rank, in milliseconds. `exposed_share` is the time in which a
    rank communicates and computes nothing, over its time from the first kernel to the last. A case
    that cannot run has `failed` instead.
    """
    parts = [part for part in PARTS if part in parts or part == "both"]
    runs: list[LayerRun] = []
    failed: dict[LayerCase, str] = {}
    for case, groups in cases:
        try:
            runs.append(LayerRun(case, groups, device, dtype))
            for _ in range(2):
                runs[-1].both()
        except Exception as error:
            failed[case] = f"{type(error).__name__}: {str(error)[:300]}"
            runs = [run for run in runs if run.case is not case]
    times: dict[LayerCase, dict[str, list[float]]] = {
        run.case: {part: [] for part in parts} for run in runs
    }
    for turn in range(repeats):
        for run in (*runs[turn % len(runs) :], *runs[: turn % len(runs)]) if runs else ():
            for part in parts:
                times[run.case][part].append(_slowest_ms(run.part(part), device))
    rows = {}
    for run in runs:
        medians = {f"{name}_ms": statistics.median(x) for name, x in times[run.case].items()}
        rows[run.case] = {**_named(run.case, dtype), **medians, **_profile(run, device, dtype)}
        rows[run.case]["tflops"] = _work(rows[run.case], run.case) / medians["both_ms"]
    return [
        rows[case] if case in rows else {**_named(case, dtype), "failed": failed[case]}
        for case, _ in cases
    ]


def _named(case: LayerCase, dtype: torch.dtype) -> dict[str, Any]:
    return {**asdict(case), "dtype": str(dtype).removeprefix("torch.")}


def _profile(run: LayerRun, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """What a profile of both passes says of every rank."""
    split = profiled(run.both, device)
    expected = run.case.traffic(run.groups.rank, dtype)
    counted = {
        "pairs": run.plan.visibility.num_pairs,
        "exposed_share": split.exposed_ms.get(ATTENTION, 0.0) / max(split.wall_ms, 1e-9),
        "expected_bytes": expected.gather_bytes + expected.reduce_bytes,
    }
    everyone: list[Any] = [(split, counted)]
    if dist.get_world_size() > 1:
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (split, counted))
    profiles = rows_of([of_rank for of_rank, _ in everyone])
    pairs = zip(profiles, everyone, strict=True)
    return {"ranks": [{**row, **of_rank} for row, (_, of_rank) in pairs]}


def _work(row: dict[str, Any], case: LayerCase) -> float:
    """Operations of both passes on the rank with most pairs, in 1e9."""
    pairs: int = max(rank["pairs"] for rank in row["ranks"])
    return 3.5 * 4 * case.shape.heads * case.shape.head_size * pairs / 1e9


def _slowest_ms(run: Run, device: torch.device) -> float:
    """Milliseconds of the slowest rank."""
    _settle(device)
    begin = time.perf_counter()
    run()
    _synchronize(device)
    slowest = torch.tensor(1e3 * (time.perf_counter() - begin), dtype=torch.float64, device=device)
    if dist.get_world_size() > 1:
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def profiled(run: Run, device: torch.device) -> Split:
    """Where the device time of `run` goes on this rank."""
    kinds = [ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(ProfilerActivity.CUDA)
    _settle(device)
    with profile(activities=kinds) as recorded:
        run()
        _synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        return split_of(cast(dict[str, Any], json.loads(path.read_text())))


def _settle(device: torch.device) -> None:
    """All ranks begin together."""
    if dist.get_world_size() > 1:
        dist.barrier()
    _synchronize(device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
