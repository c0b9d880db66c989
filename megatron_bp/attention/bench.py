"""Measures one rank's share of block-parallel attention, beside FlexAttention and dense ceilings.

Everything runs on one device: the gathered clean keys are a buffer of random numbers, so times are
those of the computation, without wires. TFLOP/s count allowed pairs only: 4 * pairs * N * H
forward, 2.5 times that backward. A ceiling is dense causal (or windowed) attention with as many
pairs.
Specified by tests/attention/test_bench.py; the command line is tools/bench_attention.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_bp.attention.choose import load_kernel
from megatron_bp.attention.contract import (
    IntervalKernel,
    NativeKernel,
    Saved,
    Strategy,
    Window,
    lse_dtype,
)
from megatron_bp.attention.interval import IntervalRun, interval_mask
from megatron_bp.attention.lanes import queue_on
from megatron_bp.attention.native import NativeRun, Partial, empty_partial
from megatron_bp.attention.problems import KeyValue, Spaces
from megatron_bp.attention.schedule import make_schedule
from megatron_bp.comm.clean_kv import pack
from megatron_bp.layout.decomposition import Phase
from megatron_bp.layout.exchange import SlabExchange
from megatron_bp.layout.plan import PlanRequest, RankPlan, make_plan
from megatron_bp.layout.visibility import CleanRule


@dataclass(frozen=True)
class Shape:
    """Attention shape of a model: query and key/value heads, head size, block and window."""

    heads: int
    kv_heads: int
    head_size: int
    block_size: int = 32
    window: int = 0


SHAPES = {
    "nemotron-3b": Shape(32, 8, 128),
    "nemotron-8b": Shape(32, 8, 128),
    "nemotron-14b": Shape(32, 8, 128),
    "nemotron-window": Shape(32, 8, 128, window=1024),
    "qwen3.5-27b": Shape(24, 4, 256),
    "diffusiongemma-sliding": Shape(16, 8, 256, block_size=256, window=1024),
}


@dataclass(frozen=True)
class Case:
    """What is measured: a shape at length L, rank `rank` of P."""

    shape: Shape
    length: int
    num_ranks: int
    rank: int
    num_views: int = 1
    clean_rule: CleanRule = CleanRule.TOKEN_CAUSAL

    @property
    def plan(self) -> RankPlan:
        """The rank's plan under context-sharded block parallelism."""
        return make_plan(
            PlanRequest(
                length=self.length,
                block_size=self.shape.block_size,
                num_ranks=self.num_ranks,
                num_clean_shards=self.num_ranks,
                num_views=self.num_views,
                clean_rule=self.clean_rule,
                window=self.shape.window,
            ),
            self.rank,
        )


class Result(NamedTuple):
    """Median milliseconds, allowed pairs, and what follows from them."""

    name: str
    forward_ms: float
    backward_ms: float
    pairs: int
    peak_gib: float
    flops_per_pair: int  # 4 * N * H, the forward's
    host_ms: float  # what the CPU needs to start both passes

    def as_dict(self) -> dict[str, float | str]:
        """Everything, with TFLOP/s forward, backward and together."""
        work = self.pairs * self.flops_per_pair / 1e9
        total = self.forward_ms + self.backward_ms
        return {
            **self._asdict(),
            "forward_tflops": work / self.forward_ms,
            "backward_tflops": 2.5 * work / self.backward_ms,
            "tflops": 3.5 * work / total,
        }


class Inputs(NamedTuple):
    """Random local rows and key buffers of a case."""

    q: Tensor
    dout: Tensor
    packed: Tensor
    own: KeyValue

    @property
    def keys(self) -> Spaces:
        """Key spaces as the layer has them."""
        return KeyValue(self.packed[:, :, 0], self.packed[:, :, 1]), self.own


def random_inputs(
    case: Case, device: torch.device, dtype: torch.dtype, num_samples: int = 1
) -> Inputs:
    """Normal random inputs; timing zeros would flatter."""
    generator = torch.Generator(device).manual_seed(1)
    plan, shape = case.plan, case.shape

    def draw(rows: int, *heads: int) -> Tensor:
        size = (rows, num_samples, *heads, shape.head_size)
        return torch.randn(size, generator=generator, device=device).to(dtype)

    own = len(plan.own_coordinate)
    return Inputs(
        draw(plan.rows.num_rows, shape.heads),
        draw(plan.rows.num_rows, shape.heads),
        draw(plan.exchange.num_buffer_rows, 2, shape.kv_heads),
        KeyValue(draw(own, shape.kv_heads), draw(own, shape.kv_heads)),
    )


@dataclass(frozen=True)
class Layer:
    """Forward and backward of one rank's attention without wires."""

    case: Case
    strategy: Strategy
    kernel: str
    deterministic: bool = False

    def forward(self, x: Inputs) -> Partial:
        """Output and LSE of all local rows."""
        kernel, scale = (
            load_kernel(self.kernel, self.deterministic),
            self.case.shape.head_size**-0.5,
        )
        if self.strategy is Strategy.INTERVAL:
            assert isinstance(kernel, IntervalKernel)
            mask = interval_mask(self.case.plan, 0, x.q.device)
            return IntervalRun(kernel, scale, mask).forward(x.q, x.keys)
        assert isinstance(kernel, NativeKernel)
        todo = make_schedule(self.case.plan, False, kernel.caps.cut).forward
        partial, run = empty_partial(x.q, todo), self._run(kernel)
        queue = queue_on(x.q.device, run.beside)
        for phase in Phase:
            run.forward(todo.steps[phase], x.q, x.keys, partial, queue)
        queue.drain()
        return partial

    def _run(self, kernel: NativeKernel) -> NativeRun:
        shape = self.case.shape
        return NativeRun(kernel, shape.head_size**-0.5, beside=shape.window > 0)

    def backward(self, x: Inputs, partial: Partial) -> tuple[Tensor, Tensor, KeyValue]:
        """dq, packed clean-key gradients and own-key gradients."""
        kernel, scale = (
            load_kernel(self.kernel, self.deterministic),
            self.case.shape.head_size**-0.5,
        )
        dq = torch.empty_like(x.q)
        packed = torch.empty_like(x.packed, dtype=lse_dtype(x.packed.dtype))
        own = KeyValue(torch.empty_like(x.own.k), torch.empty_like(x.own.v))
        grads = (dq, (KeyValue(packed[:, :, 0], packed[:, :, 1]), own))
        saved = (x.q, x.keys, partial)
        if self.strategy is Strategy.INTERVAL:
            assert isinstance(kernel, IntervalKernel)
            mask = interval_mask(self.case.plan, 0, x.q.device)
            IntervalRun(kernel, scale, mask).backward(x.dout, saved, grads)
            return dq, packed, own
        assert isinstance(kernel, NativeKernel)
        todo = make_schedule(self.case.plan, False, kernel.caps.cut).backward
        run = self._run(kernel)
        todo = run.begin_backward(todo, x.dout, saved, grads)
        for phase in reversed(Phase):
            run.backward(todo.steps[phase], x.dout, saved, grads)
        return dq, packed, own


@dataclass(frozen=True)
class Clock:
    """How often to time, and whether as replays of a CUDA graph, without the launch gaps."""

    repeats: int
    graphs: bool = False

    def median_ms(self, run: Callable[[], object]) -> float:
        """Median time of `run` between device events, after two warm-up runs."""
        for _ in range(2):
            run()
        if self.graphs:
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                run()
            run = graph.replay
            run()
        times = []
        for _ in range(self.repeats):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
        return sorted(times)[self.repeats // 2]


def host_ms(run: Callable[[], object], repeats: int = 3) -> float:
    """Median time until `run` returns, the device idle before: what the CPU needs to start it."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = perf_counter()
        run()
        times.append(1e3 * (perf_counter() - start))
    return sorted(times)[repeats // 2]


def measure_layer(layer: Layer, device: torch.device, clock: Clock) -> Result:
    """One strategy and kernel on random bf16 inputs."""
    x = random_inputs(layer.case, device, torch.bfloat16)
    torch.cuda.reset_peak_memory_stats(device)
    forward = clock.median_ms(lambda: layer.forward(x))
    partial = layer.forward(x)
    backward = clock.median_ms(lambda: layer.backward(x, partial))
    host = host_ms(lambda: layer.backward(x, layer.forward(x)))
    name = f"{layer.strategy}/{layer.kernel}"
    pairs = layer.case.plan.visibility.num_pairs
    return _result(name, layer.case, (forward, backward, host), pairs)


def measure_flex(case: Case, device: torch.device, clock: Clock) -> Result:
    """FlexAttention as a model would use it: compiled, exact block lists, autograd backward."""
    from megatron_bp.attention.kernels.flex import attend

    x = random_inputs(case, device, torch.bfloat16)
    mask = interval_mask(case.plan, 0, device)
    k, v = (torch.cat([clean, own]).transpose(0, 1) for clean, own in zip(*x.keys, strict=True))
    q, k, v = (t.contiguous().requires_grad_() for t in (x.q.transpose(0, 1), k, v))
    dout, scale = x.dout.transpose(0, 1), case.shape.head_size**-0.5
    torch.cuda.reset_peak_memory_stats(device)
    forward = clock.median_ms(lambda: attend(q, k, v, mask, scale))
    out, _ = attend(q, k, v, mask, scale)
    backward = clock.median_ms(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))

    def both() -> None:
        torch.autograd.grad(attend(q, k, v, mask, scale)[0], (q, k, v), dout)

    pairs = case.plan.visibility.num_pairs
    return _result("flex", case, (forward, backward, host_ms(both)), pairs)


def measure_dense(kernel_name: str, case: Case, device: torch.device, clock: Clock) -> Result:
    """The ceiling: one dense causal (or windowed) launch with about as many pairs."""
    kernel, shape = load_kernel(kernel_name), case.shape
    assert isinstance(kernel, NativeKernel)
    pairs, window = case.plan.visibility.num_pairs, shape.window
    rows = (pairs + window**2 // 2) // window if window else int((2 * pairs) ** 0.5)
    rows = max(rows // 256, 1) * 256
    pairs = rows * window - window * (window - 1) // 2 if window else rows * (rows + 1) // 2

    def draw(heads: int) -> Tensor:
        size = (1, rows, heads, shape.head_size)
        return torch.randn(size, device=device).to(torch.bfloat16)

    q, k, v, dout = draw(shape.heads), draw(shape.kv_heads), draw(shape.kv_heads), draw(shape.heads)
    at, scale = Window(window - 1, 0), shape.head_size**-0.5
    torch.cuda.reset_peak_memory_stats(device)
    forward = clock.median_ms(lambda: kernel.forward(q, k, v, at, scale))
    saved = Saved(q, k, v, *kernel.forward(q, k, v, at, scale))
    backward = clock.median_ms(lambda: kernel.backward(dout, saved, at, scale))

    def both() -> None:
        kernel.backward(dout, Saved(q, k, v, *kernel.forward(q, k, v, at, scale)), at, scale)

    return _result(f"dense/{kernel_name}", case, (forward, backward, host_ms(both)), pairs)


def _result(name: str, case: Case, times: tuple[float, float, float], pairs: int) -> Result:
    """Of forward, backward and host milliseconds."""
    forward, backward, host = times
    peak, work = torch.cuda.max_memory_allocated() / 2**30, 4 * case.shape.heads
    return Result(name, forward, backward, pairs, peak, work * case.shape.head_size, host)


def errors(layer: Layer, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Relative L2 errors of output and gradients against the dense kernel in fp32 (or fp64)."""
    x = random_inputs(layer.case, device, dtype)
    wide = lse_dtype(dtype)
    exact = Layer(layer.case, Strategy.INTERVAL, "dense")
    own = KeyValue(x.own.k.to(wide), x.own.v.to(wide))
    y = Inputs(x.q.to(wide), x.dout.to(wide), x.packed.to(wide), own)
    partial, want = layer.forward(x), exact.forward(y)
    got_grads, want_grads = layer.backward(x, partial), exact.backward(y, want)
    pairs = {
        "out": (partial.out, want.out),
        "dq": (got_grads[0], want_grads[0]),
        "dk": (got_grads[1][:, :, 0], want_grads[1][:, :, 0]),
        "dv": (got_grads[1][:, :, 1], want_grads[1][:, :, 1]),
        "dk_own": (got_grads[2].k, want_grads[2].k),
        "dv_own": (got_grads[2].v, want_grads[2].v),
    }
    return {
        name: float((a.to(wide) - b).norm() / b.norm().clamp(min=1e-30))
        for name, (a, b) in pairs.items()
    }


def kernel_times(layer: Layer, device: torch.device) -> dict[str, float]:
    """Milliseconds of each device kernel in one forward and backward, by name (profiler)."""
    x = random_inputs(layer.case, device, torch.bfloat16)
    layer.backward(x, layer.forward(x))
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        layer.backward(x, layer.forward(x))
        torch.cuda.synchronize()
    return {
        event.key: event.self_device_time_total / 1e3
        for event in profile.key_averages()
        if event.self_device_time_total
    }


def wire_copies_ms(case: Case, device: torch.device, clock: Clock) -> dict[str, float]:
    """Milliseconds of the exchange's local copies: packing, and moving the mirrored slab."""
    x, exchange = random_inputs(case, device, torch.bfloat16), case.plan.exchange
    clean = case.plan.rows.num_clean
    k, v = x.packed[:clean, :, 0].contiguous(), x.packed[:clean, :, 1].contiguous()
    mine = torch.empty_like(x.packed[:clean])
    times = {"pack": clock.median_ms(lambda: pack(k, v, mine))}
    if isinstance(exchange, SlabExchange):
        copies = exchange.slabs[1].copies
        beside = x.packed[: exchange.num_shards * exchange.slabs[1].length].clone()
        to = [x.packed[c.target : c.target + c.length] for c in copies]
        source = [beside[c.source : c.source + c.length] for c in copies]
        times["slab"] = clock.median_ms(lambda: torch._foreach_copy_(to, source))
    return times


def versions() -> dict[str, str]:
    """Installed versions of what is measured."""
    found = {}
    for name in ("torch", "triton", "flash-attn-4", "transformer-engine", "nvidia-cudnn-cu13"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found
