"""Measures one rank's share of block-parallel attention, beside FlexAttention and dense ceilings.

Everything runs on one device: the gathered clean keys are a buffer of random numbers, so times are
those of the computation, without wires. TFLOP/s count allowed pairs only: 4 * pairs * N * H
forward, 2.5 times that backward. A ceiling is dense causal (or windowed) attention with as many
pairs.
Specified by tests/attention/test_bench.py; the command line is tools/bench_attention.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
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
    forward_heads,
    lse_dtype,
)
from megatron_bp.attention.interval import IntervalRun, interval_mask
from megatron_bp.attention.lanes import queue_on
from megatron_bp.attention.native import NativeRun, Partial, empty_partial
from megatron_bp.attention.problems import KeyValue, Spaces
from megatron_bp.attention.ragged import RaggedKernel, together
from megatron_bp.attention.schedule import make_schedule
from megatron_bp.attention.timing import Clock, Run, as_graph, host_ms
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
    graphs: bool  # times are of replays of a CUDA graph

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
        heads = forward_heads(kernel.caps, x.q.shape, x.keys[0].k.shape)
        whole = make_schedule(self.case.plan, False, kernel.caps.cut, heads).forward
        todo, ragged = together(whole) if isinstance(kernel, RaggedKernel) else (whole, ())
        partial, run = empty_partial(x.q, todo), self._run(kernel)
        queue = queue_on(x.q.device, run.beside)
        for phase in Phase:
            run.forward(todo.steps[phase], x.q, x.keys, partial, queue)
        run.forward_ragged(ragged, x.q, x.keys, partial, queue)
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
        rest = run.begin_backward(todo, x.dout, saved, grads)
        for phase in reversed(Phase):
            run.backward(rest.steps[phase], x.dout, saved, grads, rest.row_sums)
        return dq, packed, own


class Passes(NamedTuple):
    """A forward and a backward pass, ready to be timed. `capturable` says: in a CUDA graph too."""

    name: str
    case: Case
    forward: Run
    backward: Run
    pairs: int
    peak_gib: float  # of both passes with their inputs
    capturable: bool


def measure(runs: Sequence[Passes], clock: Clock, graphs: bool = False) -> list[Result]:
    """Times of several runs, taken in turn; with `graphs` of graphs of those that can be."""
    as_timed = [as_graph if graphs and x.capturable else lambda run: run for x in runs]
    forward = clock.medians_ms([f(x.forward) for f, x in zip(as_timed, runs, strict=True)])
    backward = clock.medians_ms([f(x.backward) for f, x in zip(as_timed, runs, strict=True)])
    found = []
    for x, *ms in zip(runs, forward, backward, strict=True):

        def both(x: Passes = x) -> None:
            x.forward()
            x.backward()

        per_pair = 4 * x.case.shape.heads * x.case.shape.head_size
        graph = graphs and x.capturable
        host = host_ms(both)
        found.append(Result(x.name, ms[0], ms[1], x.pairs, x.peak_gib, per_pair, host, graph))
    return found


def _passes(
    name: str,
    case: Case,
    prepare: Callable[[], tuple[Run, Run]],
    pairs: int,
    capturable: bool = True,
) -> Passes:
    """Runs both passes once, for the peak of memory above what was there before."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    forward, backward = prepare()
    forward()
    backward()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    return Passes(name, case, forward, backward, pairs, peak, capturable)


def layer_passes(layer: Layer, device: torch.device) -> Passes:
    """One strategy and kernel on random bf16 inputs."""

    def prepare() -> tuple[Run, Run]:
        x = random_inputs(layer.case, device, torch.bfloat16)
        partial = layer.forward(x)
        return lambda: layer.forward(x), lambda: layer.backward(x, partial)

    name, pairs = f"{layer.strategy}/{layer.kernel}", layer.case.plan.visibility.num_pairs
    return _passes(name, layer.case, prepare, pairs)


def flex_passes(case: Case, device: torch.device) -> Passes:
    """FlexAttention as a model would use it: compiled, exact block lists, autograd backward."""
    from megatron_bp.attention.kernels.flex import attend

    def prepare() -> tuple[Run, Run]:
        x = random_inputs(case, device, torch.bfloat16)
        mask = interval_mask(case.plan, 0, device)
        k, v = (torch.cat([clean, own]).transpose(0, 1) for clean, own in zip(*x.keys, strict=True))
        q, k, v = (t.contiguous().requires_grad_() for t in (x.q.transpose(0, 1), k, v))
        dout, scale = x.dout.transpose(0, 1), case.shape.head_size**-0.5
        out, _ = attend(q, k, v, mask, scale)
        return (
            lambda: attend(q, k, v, mask, scale),
            lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True),
        )

    return _passes("flex", case, prepare, case.plan.visibility.num_pairs, capturable=False)


def dense_passes(kernel_name: str, case: Case, device: torch.device) -> Passes:
    """The ceiling: one dense causal (or windowed) launch with about as many pairs."""
    kernel, shape = load_kernel(kernel_name), case.shape
    assert isinstance(kernel, NativeKernel)
    pairs, window = case.plan.visibility.num_pairs, shape.window
    rows = (pairs + window**2 // 2) // window if window else int((2 * pairs) ** 0.5)
    rows = max(rows // 256, 1) * 256
    pairs = rows * window - window * (window - 1) // 2 if window else rows * (rows + 1) // 2

    def prepare() -> tuple[Run, Run]:
        def draw(heads: int) -> Tensor:
            size = (1, rows, heads, shape.head_size)
            return torch.randn(size, device=device).to(torch.bfloat16)

        q, dout = draw(shape.heads), draw(shape.heads)
        k, v = draw(shape.kv_heads), draw(shape.kv_heads)
        at, scale = Window(window - 1, 0), shape.head_size**-0.5
        saved = Saved(q, k, v, *kernel.forward(q, k, v, at, scale))
        return (
            lambda: kernel.forward(q, k, v, at, scale),
            lambda: kernel.backward(dout, saved, at, scale),
        )

    return _passes(f"dense/{kernel_name}", case, prepare, pairs)


def prepare(run: str, case: Case, device: torch.device) -> Passes:
    """The passes of "flex", "dense/KERNEL" (the ceiling) or "STRATEGY/KERNEL"."""
    kind, _, kernel = run.partition("/")
    if kind == "flex":
        return flex_passes(case, device)
    if kind == "dense":
        return dense_passes(kernel, case, device)
    return layer_passes(Layer(case, Strategy(kind), kernel), device)


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
    runs: dict[str, Run] = {"pack": lambda: pack(k, v, mine)}
    if isinstance(exchange, SlabExchange):
        copies = exchange.slabs[1].copies
        beside = x.packed[: exchange.num_shards * exchange.slabs[1].length].clone()
        to = [x.packed[c.target : c.target + c.length] for c in copies]
        source = [beside[c.source : c.source + c.length] for c in copies]
        runs["slab"] = lambda: torch._foreach_copy_(to, source)
    return dict(zip(runs, clock.medians_ms(list(runs.values())), strict=True))


def versions() -> dict[str, str]:
    """Installed versions of what is measured."""
    found = {}
    for name in ("torch", "triton", "flash-attn-4", "transformer-engine", "nvidia-cudnn-cu13"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found
