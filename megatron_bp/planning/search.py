"""Searches all degrees and policies of a workload for the fastest that fit into memory.

Exhaustive over divisors: every (TP, PP, chunks, context, clean shards, EP, DP, micro-batch,
recomputation, kept keys). What is refused is counted with its reason, for `why`. Specified by
tests/planning/test_search.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import product

from megatron_bp.layout.memory import MemoryBytes, peak_memory
from megatron_bp.layout.run_shape import (
    BatchShape,
    Mode,
    Policy,
    Recompute,
    Run,
    Topology,
    run_problems,
)
from megatron_bp.planning.hardware import GIB
from megatron_bp.planning.predict import StepTime, predict
from megatron_bp.planning.workload import Workload

MICRO_BATCHES = (1, 2, 4)
MEGATRON = Policy()  # fp32 main gradients, sharded optimizer, fp32 on the wire
# (what is run again, whether gathered keys wait for backward); under full recomputation keys are
# made again with the layer, so keeping them is no choice there.
KEEPING = (
    (Recompute.NONE, True),
    (Recompute.NONE, False),
    (Recompute.SELECTIVE, True),
    (Recompute.SELECTIVE, False),
    (Recompute.FULL_KEEP_ATTENTION, True),
    (Recompute.FULL_KEEP_ATTENTION, False),
    (Recompute.FULL, True),
)


@dataclass(frozen=True)
class Candidate:
    """A run that fits, with its predicted step and memory."""

    run: Run
    step: StepTime
    memory: MemoryBytes

    @property
    def tokens_per_second(self) -> float:
        """Clean tokens a second of the whole job."""
        batch = self.run.batch
        return batch.global_batch * batch.length / self.step.total


@dataclass(frozen=True)
class Refused:
    """Why some combinations are out: `reason` for `count` of them.

    `mode` is the context group's; `example` one of them, in words; `excess` the smallest overshoot
    of memory in GiB (0 for other reasons).
    """

    mode: Mode
    reason: str
    count: int
    example: str
    excess: float


@dataclass(frozen=True)
class Found:
    """The result of a search: `best` candidates by step time, `modes` the best of each mode."""

    best: tuple[Candidate, ...]
    modes: tuple[Candidate, ...]
    refused: tuple[Refused, ...]
    num_tried: int
    num_fitting: int


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]


def topologies(workload: Workload) -> Iterator[Topology]:
    """Every way to split `workload.world` ranks that the batch allows.

    Tensor groups stay inside a node; contexts are powers of two (and the world's own divisors up to
    8); every divisor of a context may be its number of clean shards; the conventional baseline is
    included. Data-parallel ranks each need a sample.
    """
    model, world = workload.model, workload.world
    contexts = [d for d in divisors(world) if d <= 8 or d & (d - 1) == 0]
    experts = [d for d in divisors(_experts(workload)) if d <= world]
    for tensor in (d for d in divisors(workload.cluster.node_size) if world % d == 0):
        for pipeline in (d for d in divisors(model.num_layers) if (world // tensor) % d == 0):
            for context in (c for c in contexts if (world // tensor // pipeline) % c == 0):
                data = world // tensor // pipeline // context
                if data > workload.global_batch or workload.global_batch % data:
                    continue
                for expert in (e for e in experts if (context * data) % e == 0):
                    for virtual in _chunks(model.num_layers, pipeline):
                        base = Topology(tensor, context, context, pipeline, virtual, expert, data)
                        yield from _modes(base)


def _experts(workload: Workload) -> int:
    return max(1, *(kind.experts.num_experts for kind, _ in workload.model.layers))


def _chunks(num_layers: int, pipeline: int) -> list[int]:
    if pipeline == 1:
        return [1]
    return [d for d in divisors(num_layers // pipeline) if d in (1, 2, 4)]


def _modes(base: Topology) -> Iterator[Topology]:
    context = base.context
    if context == 1:
        yield base
        return
    yield replace(base, block_owned=False)
    for shards in divisors(context):
        yield replace(base, shards=shards)


def search(workload: Workload, num_best: int = 5, policy: Policy = MEGATRON) -> Found:
    """The fastest runs of `workload` that fit, and why others do not.

    Of each topology and micro-batch the policies are tried; a slower policy that fits nowhere more
    is dropped by time alone.
    """
    limit = workload.cluster.hardware.memory_gib - workload.cluster.hardware.reserve_gib
    fitting: list[Candidate] = []
    refusals: dict[tuple[Mode, str], Refused] = {}
    num_tried = 0
    for topology, micro in product(topologies(workload), MICRO_BATCHES):
        batch = workload.batch(micro)
        problem = _problem(workload, batch, topology)
        if problem:
            num_tried += 1
            _count(refusals, topology, problem, describe(topology, micro, policy), 0.0)
            continue
        for recompute, keep in KEEPING:
            num_tried += 1
            chosen = replace(policy, recompute=recompute, keep_gathered=keep)
            run = Run(workload.model, batch, topology, chosen)
            memory = peak_memory(run)
            excess = memory.total / GIB - limit
            if excess > 0:
                what = describe(topology, micro, chosen)
                _count(refusals, topology, "does not fit into memory", what, excess)
                continue
            fitting.append(Candidate(run, predict(run, workload.cluster), memory))
    by_mode = {c.run.topology.mode: c for c in sorted(fitting, key=_slowness, reverse=True)}
    return Found(
        best=tuple(_distinct(fitting, num_best)),
        modes=tuple(sorted(by_mode.values(), key=_slowness)),
        refused=tuple(refusals.values()),
        num_tried=num_tried,
        num_fitting=len(fitting),
    )


def _slowness(candidate: Candidate) -> tuple[float, int]:
    return candidate.step.total, candidate.memory.total


def _distinct(fitting: list[Candidate], number: int) -> list[Candidate]:
    """The fastest, one of each topology: the rest differ in what they keep."""
    of_topology: dict[Topology, Candidate] = {}
    for candidate in sorted(fitting, key=_slowness):
        of_topology.setdefault(candidate.run.topology, candidate)
    return nsmallest(number, of_topology.values(), key=_slowness)


def _problem(workload: Workload, batch: BatchShape, topology: Topology) -> str:
    """Why a combination cannot be laid out, or nothing."""
    if batch.global_batch % (batch.micro_batch * topology.data):
        return "global batch is not a multiple of micro-batch x data ranks"
    micro_batches = batch.global_batch // (batch.micro_batch * topology.data)
    if topology.virtual > 1 and micro_batches % topology.pipeline:
        return "interleaving needs micro-batches in multiples of the pipeline"
    sentences = run_problems(workload.model, batch, topology)
    return sentences[0] if sentences else ""


def _count(
    refusals: dict[tuple[Mode, str], Refused],
    topology: Topology,
    reason: str,
    example: str,
    excess: float,
) -> None:
    key = topology.mode, reason
    known = refusals.get(key)
    if known is None:
        refusals[key] = Refused(topology.mode, reason, 1, example, excess)
    elif excess < known.excess:
        refusals[key] = replace(known, count=known.count + 1, example=example, excess=excess)
    else:
        refusals[key] = replace(known, count=known.count + 1)


def describe(topology: Topology, micro_batch: int, policy: Policy) -> str:
    """A run in one line of words."""
    parts = [f"TP {topology.tensor}", f"PP {topology.pipeline}"]
    if topology.virtual > 1:
        parts.append(f"x {topology.virtual} chunks")
    parts += [f"context {topology.context} ({topology.mode}", f"{topology.shards} shards)"]
    if topology.expert > 1:
        parts.append(f"EP {topology.expert}")
    keys = "" if policy.recompute is Recompute.FULL else ", keys kept"
    if not policy.keep_gathered:
        keys = ", keys gathered again"
    parts += [f"DP {topology.data}", f"micro-batch {micro_batch}"]
    return ", ".join(parts) + f", recompute {policy.recompute}{keys}"
