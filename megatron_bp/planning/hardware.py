"""Holds the measured speeds that predictions are made of: kernels by shape, links by message size.

The built-in H200 numbers are medians of docs/bench/*.json and of the four-GPU runs in
docs/plan.md; what is not measured is marked in `assumed`. A user's own bench files replace them.
Specified by tests/planning/test_hardware.py.
"""

import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_bp.layout.model_shape import AttentionShape
from megatron_bp.planning.host import HOST_H200, NO_HOST, HostTime
from megatron_bp.planning.shapes import model_named

GIB = 2**30

# What tools/bench_attention.py calls its shapes: (head size, window).
BENCH_SHAPES = MappingProxyType(
    {
        "nemotron-3b": (128, 0),
        "nemotron-8b": (128, 0),
        "nemotron-14b": (128, 0),
        "nemotron-window": (128, 1024),
        "qwen3.5-27b": (256, 0),
        "diffusiongemma-sliding": (256, 1024),
    }
)


@dataclass(frozen=True)
class KernelSpeed:
    """TFLOP/s of an attention kernel at one head size, with or without a window.

    Allowed pairs only: forward 4 * pairs * N * H operations, backward 2.5 times as many. `kernel`
    is the name to launch with. `assumed`: not measured. Beside them a pass takes, whatever its
    pairs: `fixed_s`, and `element_s` for each row and query element (kernels around the blocks,
    preparing and rounding of rows), in seconds, (forward, backward).
    """

    head_size: int
    windowed: bool
    kernel: str
    forward: float
    backward: float
    assumed: bool = False
    fixed_s: tuple[float, float] = (0.0, 0.0)
    element_s: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class Link:
    """Bandwidth of collectives by message size, GiB/s a rank, and what a call costs beside it.

    `points` are (bytes one rank sends, GiB/s), ascending; between them it is interpolated in the
    logarithm of the size.
    """

    points: tuple[tuple[float, float], ...]
    latency_s: float = 20e-6

    def seconds(self, sent_bytes: float) -> float:
        """Time of one call that sends `sent_bytes` from each rank."""
        if sent_bytes <= 0:
            return 0.0
        return self.latency_s + sent_bytes / (self.speed(sent_bytes) * GIB)

    def speed(self, sent_bytes: float) -> float:
        """GiB/s at a message size."""
        points = self.points
        if sent_bytes <= points[0][0]:
            return points[0][1]
        for (small, low), (large, high) in pairwise(points):
            if sent_bytes <= large:
                share = (sent_bytes - small) / (large - small)
                return low + share * (high - low)
        return points[-1][1]


@dataclass(frozen=True)
class Hardware:
    """One kind of GPU, its links and the CPU that starts its kernels.

    Units: GiB, TFLOP/s, TB/s, seconds. `matmul_tflops` dense bf16 matrices, `head_tflops` the fused
    vocabulary loss, `elementwise_tb_s` memory traffic of norms, activations and the like,
    `window_layer_s` the least time of a windowed layer forward and backward (its launches),
    `reserve_gib` what allocator, libraries and communication take beside counted bytes.
    """

    name: str
    memory_gib: float
    peak_tflops: float
    kernels: tuple[KernelSpeed, ...]
    matmul_tflops: float
    head_tflops: float
    elementwise_tb_s: float
    node_link: Link
    network_link: Link
    host: HostTime = NO_HOST
    window_layer_s: float = 0.0028
    grouped_matmul_share: float = 0.8
    delta_tflops: float = 100.0
    reserve_gib: float = 8.0
    assumed: tuple[str, ...] = ()

    def kernel_for(self, shape: AttentionShape) -> KernelSpeed:
        """The fastest kernel known for a head size; the next smaller head size if there is none."""
        windowed = shape.window > 0
        fitting = [k for k in self.kernels if k.windowed == windowed] or list(self.kernels)
        exact = [k for k in fitting if k.head_size == shape.head_size]
        if exact:
            return max(exact, key=lambda k: k.forward + 2.5 * k.backward)
        near = min(fitting, key=lambda k: abs(k.head_size - shape.head_size))
        return replace(near, head_size=shape.head_size, assumed=True)


# Four H200 of one host, NCCL, NVLink multicast off (docs/plan.md): all-gathers of 16 MiB to 1 GiB,
# of which a rank sends three quarters.
NVLINK_H200 = Link(
    tuple((0.75 * 2.0**n, s) for n, s in ((24, 80), (26, 161), (28, 239), (30, 288)))
)
# One 400 Gb/s port a GPU is 46.6 GiB/s; 0.85 of it, after a ramp like NVLink's.
NETWORK_400G = Link(((2.0**20, 8.0), (2.0**24, 25.0), (2.0**28, 39.6)), latency_s=40e-6)

# Head size 128 by docs/bench/attention.md, run C: what passes take beside their pairs of 16K, 32K
# and 64K on 8 ranks, and with that the speed of 256K. Head size 256: medians of all runs; under a
# window the launches as they are since 557dc0c (128) and 49f45a6 (256).
_KERNELS_H200 = (
    KernelSpeed(
        128,
        False,
        "flash4",
        667.0,
        624.0,
        fixed_s=(0.075e-3, 0.26e-3),
        element_s=(2.9e-12, 16.2e-12),
    ),
    KernelSpeed(256, False, "flash4", 703.0, 374.0),
    KernelSpeed(128, True, "flash4", 453.0, 346.0),
    KernelSpeed(256, True, "flash4", 457.0, 214.0),
    KernelSpeed(512, False, "auto", 322.0, 139.0, assumed=True),
)
_ASSUMED = (
    "network: 0.85 of one 400 Gb/s port a GPU (no run spanned two hosts)",
    "head size 512: FlexAttention's speed at 256 (no library kernel serves it on Hopper)",
    "grouped expert matrices: 0.8 of dense ones; delta rule: 100 TFLOP/s",
    "elementwise: fitted once to a whole layer of Nemotron 3B",
)

H200 = Hardware(
    name="h200",
    memory_gib=139.0,
    peak_tflops=989.0,
    kernels=_KERNELS_H200,
    matmul_tflops=672.0,
    head_tflops=603.0,
    elementwise_tb_s=1.9,
    node_link=NVLINK_H200,
    network_link=NETWORK_400G,
    host=HOST_H200,
    assumed=_ASSUMED,
)
H100 = replace(
    H200,
    name="h100",
    memory_gib=79.0,
    assumed=("speeds: those of an H200 (the same chip with less and slower memory)", *_ASSUMED),
)
HARDWARE = MappingProxyType({gpu.name: gpu for gpu in (H200, H100)})


def hardware_named(name: str) -> Hardware:
    """The built-in GPU called `name`.

    Raises: ValueError that lists the names.
    """
    if name not in HARDWARE:
        raise ValueError(
            f"GPU {name!r} is not built in; use one of {', '.join(HARDWARE)}, and give its own "
            "numbers with --calibration."
        )
    return HARDWARE[name]


def calibrated(hardware: Hardware, paths: Iterable[Path]) -> Hardware:
    """`hardware` with the numbers of bench files in its place.

    A file is what tools/bench_attention.py or tools/bench_loss.py wrote with --json, a collection
    of such under "runs", or {"hardware": {field: number}} for anything else.
    Raises: ValueError for a file that is none of these, or names an unknown field.
    """
    for path in paths:
        record = json.loads(path.read_text())
        parts = record.get("runs", [record])
        together = {"results": [line for part in parts for line in part.get("results", ())]}
        given = _take_attention(hardware, together)
        used, hardware = given is not hardware, given
        for part in parts:
            for step in (_take_fields, _take_loss):
                changed = step(hardware, part)
                used, hardware = used or changed is not hardware, changed
        if not used:
            raise ValueError(
                f"--calibration {path} holds neither attention results (shape, forward_tflops), "
                'nor loss results (products_ms), nor {"hardware": {...}}; write one with '
                "tools/bench_attention.py --json."
            )
    return hardware


def _take_fields(hardware: Hardware, record: Mapping[str, Any]) -> Hardware:
    given = record.get("hardware", {})
    simple = {k for k, v in vars(hardware).items() if isinstance(v, float)}
    links = {"node_link", "network_link"}
    unknown = sorted(set(given) - simple - links - {"host"})
    if unknown:
        raise ValueError(
            f"calibration field {', '.join(unknown)} is unknown; use "
            f"{', '.join(sorted(simple | links | {'host'}))}."
        )
    values: dict[str, Any] = {k: float(given[k]) for k in given if k in simple}
    for name in links & set(given):
        points = tuple(sorted((float(size), float(speed)) for size, speed in given[name]))
        values[name] = replace(getattr(hardware, name), points=points)
    if "host" in given:
        values["host"] = hardware.host.given(given["host"])
    return replace(hardware, **values) if values else hardware


def _take_attention(hardware: Hardware, record: Mapping[str, Any]) -> Hardware:
    """The fastest native kernel of the longest sample of each shape, in place of the built-in."""
    best: dict[tuple[int, bool], tuple[tuple[int, float], KernelSpeed]] = {}
    for result in record.get("results", ()):
        size, window = BENCH_SHAPES.get(str(result.get("shape")), (0, 0))
        run = str(result.get("run", result.get("name", "")))
        if not size or not run.startswith("native/") or "forward_tflops" not in result:
            continue
        speed = KernelSpeed(
            size,
            window > 0,
            run.split("/")[1].split("@")[0],
            float(result["forward_tflops"]),
            float(result["backward_tflops"]),
        )
        rank = (int(result["length"]), speed.forward + 2.5 * speed.backward)
        key = (size, window > 0)
        if key not in best or rank > best[key][0]:
            best[key] = (rank, speed)
    if not best:
        return hardware
    others = tuple(k for k in hardware.kernels if (k.head_size, k.windowed) not in best)
    return replace(hardware, kernels=(*(speed for _, speed in best.values()), *others))


def _take_loss(hardware: Hardware, record: Mapping[str, Any]) -> Hardware:
    """Matrix speed from the loss's bare products, and the fused loss's own speed."""
    if "products_ms" not in record:
        return hardware
    words = shlex.split(record["command"])
    asked = dict(pairwise(words))
    model = model_named(asked.get("--shape", "nemotron-14b"))
    rows = int(asked.get("--rows", 65536))
    work = 3 * 2 * rows * model.hidden * model.vocab / 1e12
    products = work / (record["products_ms"][-1] / 1e3)
    shares = [r["of_products"] for r in record["results"] if r["name"].startswith("in_forward")]
    return replace(
        hardware, matmul_tflops=products, head_tflops=products * max(shares, default=0.9)
    )
