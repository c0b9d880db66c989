"""Counts the work that a training step really needs, for --log-throughput.

Useful work: every real row of the sample once (2L rows, 3L with two views; a clean row on several
ranks counts once), exactly the attention pairs of the mask, layer by layer with their windows, the
head for target rows only, three times forward, and nothing that is computed twice. Adapters train
few weights, but are counted as if all were. Specified by tests/mcore/test_throughput.py.
"""

from __future__ import annotations

import argparse
import functools
import math
import time
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megatron_bp.config import BlockParallelConfig
from megatron_bp.layout.flops import model_flops
from megatron_bp.layout.model_shape import AttentionShape, LayerKind, ModelShape
from megatron_bp.layout.plan import RankPlan, with_window
from megatron_bp.layout.run_shape import Policy, Run, Topology
from megatron_bp.mcore.carrier import Layout
from megatron_bp.mcore.dry_run_shape import batch_of, model_of

# Dense bf16 TFLOP/s of data-center GPUs by what their CUDA name begins with, after "NVIDIA ".
# Source: NVIDIA's data sheets. The slower PCIe and NVL boards of one name are not among them.
PEAK_TFLOPS = MappingProxyType(
    {
        "A100-SXM": 312.0,
        "A100 80GB PCIe": 312.0,
        "H100 80GB HBM3": 989.0,
        "H200": 989.0,
        "GH200": 989.0,
        "B200": 2250.0,
    }
)
FORWARD_AND_BACKWARD = 3  # backward has twice the products of forward
STOCK = "_megatron_bp_stock"  # on our count: Megatron's own


def peak_tflops(name: str) -> float:
    """Returns the dense bf16 peak of a device by its CUDA name; 0 if it is not known."""
    short = name.removeprefix("NVIDIA ")
    if short.startswith("H200 NVL"):
        return 0.0
    return next((peak for start, peak in PEAK_TFLOPS.items() if short.startswith(start)), 0.0)


def peak_of_run(args: argparse.Namespace, config: BlockParallelConfig) -> tuple[float, str]:
    """Returns the peak that utilisation is measured against (TFLOP/s; 0: none), and one line."""
    if config.bp_peak_tflops:
        return config.bp_peak_tflops, f"against --bp-peak-tflops {config.bp_peak_tflops:g}"
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    peak = peak_tflops(name) if args.params_dtype.itemsize == 2 else 0.0
    if peak:
        return peak, f"against {peak:g} TFLOP/s, the dense bf16 peak of {name}"
    kind = str(args.params_dtype).removeprefix("torch.")
    return 0.0, f"left out: no peak is known for {kind} on {name}; give --bp-peak-tflops"


@functools.lru_cache(maxsize=64)
def layer_work(model: ModelShape, plan: RankPlan, prune: bool) -> float:
    """Forward operations of all layers for a rank's share of one sample.

    The shares of a context group's ranks add up to the sample's work. `prune`: nothing reads what
    the last layer makes of clean rows.
    """
    kinds = [kind for kind, count in model.layers for _ in range(count)]
    return sum(_kind_work(model, kind, plan) for kind in kinds) - (
        _clean_work_of_last(model, kinds[-1], plan) if prune else 0.0
    )


def _kind_work(model: ModelShape, kind: LayerKind, plan: RankPlan) -> float:
    """2 * rows * weights + 4 * pairs * N * H (scores and values, 2 each) of one layer."""
    clean, corrupted = _rows(plan)
    clean_pairs, corrupted_pairs = _pairs(kind, plan)
    mixer = _attention(kind)
    weights = model.hidden * (mixer.qkv_width + mixer.query_width) + _after(model, kind)
    pairs = clean_pairs + corrupted_pairs
    return 2 * (clean + corrupted) * weights + 4 * pairs * mixer.query_width


def _clean_work_of_last(model: ModelShape, kind: LayerKind, plan: RankPlan) -> float:
    """What a last layer does for clean rows after their keys and values."""
    clean, _ = _rows(plan)
    mixer = _attention(kind)
    weights = mixer.query_width * model.hidden + _after(model, kind)
    return 2 * clean * weights + 4 * _pairs(kind, plan)[0] * mixer.query_width


def _after(model: ModelShape, kind: LayerKind) -> int:
    """Weights that a row meets after attention: feed-forward, router, its experts."""
    inner = kind.ffn + kind.experts.top_k * kind.experts.ffn
    return model.hidden * ((kind.input_widths + 1) * inner + kind.experts.num_experts)


def _attention(kind: LayerKind) -> AttentionShape:
    assert isinstance(kind.mixer, AttentionShape), "block diffusion runs softmax attention"
    return kind.mixer


def _replicas(plan: RankPlan) -> int:
    return plan.request.num_ranks // plan.request.num_clean_shards


def _rows(plan: RankPlan) -> tuple[float, float]:
    """Real clean rows, each counted once over its replicas, and real corrupted rows."""
    rows = plan.rows
    clean = int((rows.position[: rows.num_clean] >= 0).sum())
    return clean / _replicas(plan), int((rows.position[rows.num_clean :] >= 0).sum())


def _pairs(kind: LayerKind, plan: RankPlan) -> tuple[float, float]:
    """Attention pairs of clean rows, counted once over their replicas, and of corrupted rows."""
    seen = with_window(plan, _attention(kind).window).visibility
    keys = seen.clean_hi.astype("int64") - seen.clean_lo + seen.own_hi - seen.own_lo
    num_clean = plan.rows.num_clean
    return float(keys[:num_clean].sum()) / _replicas(plan), float(keys[num_clean:].sum())


class Meter:
    """Turns micro-batches into pairs (work, seconds) that Megatron adds up over ranks and steps."""

    def __init__(self, args: argparse.Namespace, config: BlockParallelConfig) -> None:
        self.args, self.config = args, config
        self._last_training = math.nan  # when the last micro-batch ended, if it was a training one

    def pause(self) -> None:
        """Forgets the time: what passes until the next micro-batch is no training."""
        self._last_training = math.nan

    def report(self, layout: Layout, is_target: Tensor) -> dict[str, Tensor]:
        """Pairs since the training micro-batch before; nothing after the start or an evaluation.

        Shapes: `is_target` [rows, Z]. Units: clean tokens of all data ranks, TFLOP of one GPU.
        """
        now = time.perf_counter()
        seconds, self._last_training = now - self._last_training, now
        if math.isnan(seconds):
            return {}
        data, num_samples = self.args.data_parallel_size, is_target.shape[1]
        found: dict[str, float | Tensor] = {
            "tokens per second": num_samples * self.args.seq_length * data
        }
        if self.args.log_throughput:
            flops = self.useful_flops(layout, is_target)
            # This rank's share, times the ranks that have one, spread over all GPUs.
            one = flops * (layout.groups.num_ranks * data / self.args.world_size / 1e12)
            found["useful TFLOP/s per GPU"] = one
            peak, _ = peak_of_run(self.args, self.config)
            if peak:
                found["model FLOPs utilization"] = one / peak
        # Filled on the device: a copy to it would wait for all that is queued there.
        clock = torch.full((), seconds, dtype=torch.float64, device=is_target.device)
        return {name: torch.stack([clock * 0 + work, clock]) for name, work in found.items()}

    def useful_flops(self, layout: Layout, is_target: Tensor) -> Tensor:
        """Forward and backward operations of a rank's share of a micro-batch."""
        model, batch = model_of(self.args), batch_of(self.args, self.config)
        prune = not (batch.learns_clean or model.has_experts)
        layers = layer_work(model, layout.plan, prune) * is_target.shape[1]
        head = 2.0 * model.hidden * model.vocab * is_target.sum().double()
        return FORWARD_AND_BACKWARD * (layers + head)


def useful_flops_of_batch(
    args: argparse.Namespace, config: BlockParallelConfig, batch_size: int
) -> int:
    """Operations that a step of `batch_size` samples needs, with as many targets as on average."""
    run = Run(model_of(args), batch_of(args, config), Topology(), Policy())
    return batch_size * model_flops(run).needed // run.batch.micro_batch


def count_useful_work(config: BlockParallelConfig) -> None:
    """Makes Megatron's own throughput line count useful work in block-diffusion runs.

    Runs without an objective keep Megatron's count. A second call replaces the first.
    """
    from megatron.training import training

    present: Any = training.num_floating_point_operations
    stock: Callable[..., float] = getattr(present, STOCK, present)

    @functools.wraps(stock)
    def count(args: argparse.Namespace, batch_size: int, *given: Any, **named: Any) -> float:
        if getattr(args, "bdlm_objective", "none") == "none":
            return stock(args, batch_size, *given, **named)
        return useful_flops_of_batch(args, config, batch_size)

    setattr(count, STOCK, stock)
    training.num_floating_point_operations = count
