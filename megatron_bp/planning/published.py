"""Models the published block-parallel training (arXiv 2609.19242) as its authors run it.

Their layouts differ from ours: keys are waited for, layers run again in full, gradients are bf16,
views are stacked with a clean copy each, DiffusionGemma's encoder and decoder gather apart, and in
the context-parallel baseline of DiffusionGemma and Qwen clean rows are contiguous shards. The
numbers and where they were found are in `NUMBERS`. Specified by tests/planning/test_published.py.
"""

from dataclasses import dataclass, replace
from types import MappingProxyType

from megatron_bp.layout.flops import needed_flops
from megatron_bp.layout.memory import peak_memory
from megatron_bp.layout.model_shape import AttentionShape, LayerKind
from megatron_bp.layout.owners import Ownership
from megatron_bp.layout.pair_counts import pair_counts
from megatron_bp.layout.run_shape import BatchShape, Policy, Recompute, Run, Topology
from megatron_bp.layout.traffic import (
    clean_rows_sent,
    context_collectives,
    delta_by_heads_bytes,
    delta_collectives,
    kv_row_elements,
)
from megatron_bp.planning.cluster import Cluster
from megatron_bp.planning.hardware import GIB, H200, KernelSpeed
from megatron_bp.planning.predict import Schedule, layer_time, predict
from megatron_bp.planning.shapes import model_named

PASSES = 3  # two gathers (forward, recomputation) and one reduction
PAPER = "arXiv 2609.19242 (https://arxiv.org/abs/2609.19242)"
ABSTRACT = f"abstract of {PAPER}"
READ = f"{PAPER}, as the project had noted it"
NOTES = f"{PAPER}, second hand: public reading notes of September 2026"

# What their kernels do on an H200: FlashAttention 4's mask form with exact block lists (D 128,
# windows), FlexAttention forward at D 256, as measured with unmodified packages (docs/plan.md).
THEIR_KERNELS = (
    KernelSpeed(128, False, "flash4 mask", 604.0, 581.0),
    KernelSpeed(256, False, "flex / flash4 mask", 322.0, 317.0),
    KernelSpeed(256, True, "flash4 mask", 426.0, 150.0),
    KernelSpeed(512, False, "their own", 322.0, 139.0, assumed=True),
)
THEIR_CLUSTER = Cluster(replace(H200, kernels=THEIR_KERNELS))
THEIR_POLICY = Policy(
    recompute=Recompute.FULL,
    prune_last_layer=False,
    overlap_data_parallel=False,
    grad_wire_bytes=2,
    main_grad_bytes=2,
)


@dataclass(frozen=True)
class Number:
    """A published number and where it was found."""

    value: float
    source: str


NUMBERS = MappingProxyType(
    {
        "nemotron-14b CP GiB": Number(210.00, READ),
        "nemotron-14b CSBP GiB": Number(105.00, READ),
        "diffusiongemma CP GiB": Number(433.13, READ),
        "diffusiongemma CSBP GiB": Number(28.30, READ),
        "256K step s": Number(56.4, READ),
        "256K exposed s": Number(2.41, READ),
        "nemotron-3b 256K": Number(1.18, f"{ABSTRACT}; {NOTES}: 1.18 to 1.19 for 3B to 14B"),
        "nemotron-14b 256K": Number(1.19, NOTES),
        "diffusiongemma 256K": Number(1.45, f"{ABSTRACT}; model from {NOTES}"),
        "qwen 256K lowest": Number(1.27, ABSTRACT),
        "qwen 256K": Number(1.33, f"{ABSTRACT}; model from {NOTES}"),
        "diffusiongemma 512K": Number(1.61, f"{ABSTRACT}; model from {NOTES}"),
        "nemotron-14b by block": Number(1.145, f"{NOTES}: 1.14 to 1.15, blocks 128 to 1024"),
        "diffusiongemma by block": Number(1.385, f"{NOTES}: 1.33 to 1.44, blocks 128 to 1024"),
        "pure BP 64K": Number(1.46, NOTES),
        "contiguous lowest": Number(1.28, NOTES),
        "contiguous highest": Number(1.34, NOTES),
        "diffusiongemma CP MFU": Number(0.127, NOTES),
        "diffusiongemma CSBP MFU": Number(0.184, NOTES),
        "qwen CP MFU": Number(0.201, NOTES),
        "qwen CSBP MFU": Number(0.268, NOTES),
        "CSBP 64K GiB": Number(89.8, NOTES),
        "pure BP 64K GiB": Number(110.7, NOTES),
        "qwen CP HBM": Number(120.7, NOTES),
        "qwen CSBP HBM": Number(111.1, NOTES),
        "DFlash2 512K": Number(2.48, ABSTRACT),
        "DFlash2 1M": Number(7.59, ABSTRACT),
    }
)


@dataclass(frozen=True)
class Setting:
    """One of their runs. `pairs` samples of a micro-batch, each with its own clean copy.

    `encoder_apart`: clean and corrupted passes gather clean keys each. `contiguous_baseline`: the
    baseline's clean rows are contiguous shards. `windowed` layers follow from the model.
    """

    model: str
    length: int
    context: int = 8
    tensor: int = 1
    data: int = 2
    block_size: int = 256
    pairs: int = 1
    encoder_apart: bool = False
    contiguous_baseline: bool = False

    def run(self, block_owned: bool) -> Run:
        """The run: CSBP, or the context-parallel baseline (which gathers windows whole)."""
        topology = Topology(
            tensor=self.tensor,
            context=self.context,
            shards=self.context,
            data=self.data,
            block_owned=block_owned,
            windowed_exchange=block_owned,
        )
        batch = BatchShape(
            self.length,
            self.block_size,
            micro_batch=self.pairs,
            global_batch=self.pairs * self.data,
        )
        return Run(model_named(self.model), batch, topology, THEIR_POLICY)


def nemotron(size: str, length: int, context: int = 8) -> Setting:
    """Supervised fine-tuning of a Nemotron-Labs-Diffusion model on 16 GPUs."""
    return Setting(f"nemotron-{size}", length, context, data=16 // context)


def diffusion_gemma(length: int, context: int = 8) -> Setting:
    """Supervised fine-tuning of DiffusionGemma on 16 GPUs."""
    return Setting(
        "diffusiongemma-26b-a4b",
        length,
        context,
        data=16 // context,
        encoder_apart=True,
        contiguous_baseline=True,
    )


def qwen(length: int) -> Setting:
    """Conversion of Qwen3.8-27B on 16 GPUs: TP 2, P 8, two complementary views."""
    return Setting("qwen3.5-27b", length, tensor=2, data=1, pairs=2, contiguous_baseline=True)


def published_gib(setting: Setting, block_owned: bool) -> float:
    """GiB of attention keys, values and gradients that a GPU sends in a step, their way.

    Clean keys 3 passes, twice if encoder and decoder gather apart; corrupted keys 3 (baseline).
    """
    total = 0.0
    for collective in context_collectives(setting.run(block_owned)):
        twice = setting.encoder_apart and collective.name.startswith("clean")
        total += collective.step_bytes * (2 if twice else 1)
    return total / GIB


def imbalance_of_baseline(setting: Setting, kind: LayerKind) -> float:
    """Pairs of the baseline's busiest rank over the mean, in one layer.

    Corrupted rows are even; contiguous clean shards give the last rank (2P - 1) / P of the mean.
    """
    mixer = kind.mixer
    if not isinstance(mixer, AttentionShape) or not setting.contiguous_baseline or mixer.window:
        return 1.0
    request = setting.run(False).request()
    even = pair_counts(request)
    clean = pair_counts(replace(request, ownership=Ownership.CONTIGUOUS)).clean
    return float((clean.max() + even.corrupted.max()) / even.total.max())


@dataclass(frozen=True)
class PublishedStep:
    """Predicted seconds of a step their way, of which `exposed` wait for keys, and GiB held."""

    seconds: float
    exposed: float
    memory_gib: float


def published_step(setting: Setting, block_owned: bool) -> PublishedStep:
    """Predicts a step their way: `predict` with their schedule, and what it does not know."""
    run, cluster = setting.run(block_owned), THEIR_CLUSTER
    step = predict(run, cluster, Schedule.BLOCKING)
    ours = sum(cluster.seconds(scan, run.topology) for scan in delta_collectives(run))
    waiting, busy = -ours, 0.0  # delta layers deal heads, they do not scan
    for kind, count in run.model.layers:
        layer = layer_time(run, kind, cluster, Schedule.BLOCKING)
        mixer = kind.mixer
        if isinstance(mixer, AttentionShape):
            attention = 2 * layer.attention_forward + layer.attention_backward
            if not block_owned:
                busy += count * attention * (imbalance_of_baseline(setting, kind) - 1)
            if setting.encoder_apart:
                sent = clean_rows_sent(run, mixer.window) * kv_row_elements(run, kind) * 2
                again = cluster.ring_seconds(sent, setting.context, setting.tensor)
                waiting += count * PASSES * again
        else:
            sent = delta_by_heads_bytes(run, mixer) * (1 if block_owned else 2)
            moved = cluster.all_to_all_seconds(sent, setting.context, setting.tensor)
            waiting += count * PASSES * moved
    return PublishedStep(
        seconds=step.total + waiting + busy,
        exposed=step.exposed_context + waiting,
        memory_gib=peak_memory(run).total / GIB,
    )


def published_speedup(setting: Setting) -> float:
    """Predicted seconds of the baseline over CSBP's."""
    baseline, owned = published_step(setting, False), published_step(setting, True)
    return baseline.seconds / owned.seconds


def published_utilisation(setting: Setting, block_owned: bool) -> float:
    """Needed operations over seconds, 16 GPUs and peak; every sample has a clean copy."""
    run = setting.run(block_owned)
    seconds = published_step(setting, block_owned).seconds * run.topology.world
    return needed_flops(run) / seconds / (THEIR_CLUSTER.hardware.peak_tflops * 1e12)


def pure_block_parallel(setting: Setting) -> Run:
    """The same run with clean rows on every rank."""
    run = setting.run(True)
    return replace(run, topology=replace(run.topology, shards=1))


def slowdown_of_pure(setting: Setting) -> float:
    """Predicted seconds of pure block parallelism over CSBP's."""
    pure = predict(pure_block_parallel(setting), THEIR_CLUSTER, Schedule.BLOCKING)
    return pure.total / published_step(setting, True).seconds


def slowdown_of_contiguous(setting: Setting) -> float:
    """Predicted seconds with contiguous target blocks over dual-end ones; clean rows stay dual-end.

    The last rank's corrupted pairs are (2P - 1) / P of the mean in full layers.
    """
    run, extra = setting.run(True), 0.0
    request = run.request()
    even = pair_counts(request)
    busiest = pair_counts(replace(request, ownership=Ownership.CONTIGUOUS)).corrupted.max()
    more = float((even.clean.max() + busiest) / even.total.max()) - 1
    for kind, count in run.model.layers:
        if isinstance(kind.mixer, AttentionShape) and not kind.mixer.window:
            layer = layer_time(run, kind, THEIR_CLUSTER, Schedule.BLOCKING)
            extra += count * more * (2 * layer.attention_forward + layer.attention_backward)
    return 1 + extra / published_step(setting, True).seconds
