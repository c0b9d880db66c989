"""Simulates one training step on every rank: what computes, travels and waits when.

Builds the program of each pipeline stage from a run and lets events.py compute its times. Where
predict.py is a closed form of the busiest rank, this sees who waits for whom: stragglers,
imbalance, exposed messages, bubbles. Specified by tests/planning/test_simulate.py.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from megatron_bp.layout.traffic import (
    Collective,
    data_collectives,
    expert_collectives,
    pipeline_collectives,
    tensor_collectives,
)
from megatron_bp.planning.events import Lane, Op, Timeline, simulate
from megatron_bp.planning.hardware import Hardware
from megatron_bp.planning.predict import num_checks, optimizer_seconds, run_head_seconds
from megatron_bp.planning.simulate_layers import Layer, LayerWriter, make_layer
from megatron_bp.planning.simulate_links import Message, all_to_all, one_to_one, ring
from megatron_bp.planning.simulate_program import Scenario, StageProgram
from megatron_bp.planning.simulate_schedule import Turn

OWN_LANES = MappingProxyType({Lane.NODE: Lane.NODE_DATA, Lane.NETWORK: Lane.NETWORK_DATA})


def simulate_step(scenario: Scenario, traced: Iterable[int] = ()) -> Timeline:
    """The timeline of one step; spans are kept of the global ranks `traced`.

    Raises: ValueError if a traced rank does not exist, groups lie unevenly on nodes or
    micro-batches do not divide.
    """
    traced, world = tuple(traced), scenario.run.topology.world
    wrong = [rank for rank in traced if not 0 <= rank < world]
    if wrong:
        raise ValueError(f"traced rank {wrong[0]} does not exist; use ranks below {world}.")
    stages = range(scenario.run.topology.pipeline)
    programs = [_Writer(scenario, stage).write() for stage in stages]
    return simulate(_connected(programs), scenario.mesh.num_ranks, traced)


def _connected(programs: list[StageProgram]) -> list[list[Op]]:
    """The operations, each arrival resolved to the operation that sends it."""
    connected = []
    for program in programs:
        ops = list(program.ops)
        for number, (stage, turn) in program.arrivals.items():
            sender = programs[stage].sent_turns[turn]
            ops[number] = replace(ops[number], arrives=((stage, sender),))
        connected.append(ops)
    return connected


@dataclass(frozen=True)
class _Bucket:
    """A part of the data-parallel traffic of a stage: a group's name and one message."""

    group: str
    message: Message


class _Writer:
    """Writes the program of one stage."""

    def __init__(self, scenario: Scenario, stage: int) -> None:
        self.scenario, self.stage, self.run = scenario, stage, scenario.run
        self._host = self._gpu.host.of(self.run)
        self.program = StageProgram(scenario, stage)
        self.layers = LayerWriter(self.program, scenario.run)
        self.chunks = [self._layers(chunk) for chunk in range(scenario.run.topology.virtual)]
        self._values: dict[tuple[int, int], list[int]] = {}
        self._gradients: list[int] = []

    def write(self) -> StageProgram:
        """The program: weights arrive, micro-batches pass, gradients leave, the optimizer steps."""
        overlap = self.run.policy.overlap_data_parallel
        places = [(c, i) for c, chunk in enumerate(self.chunks) for i in range(len(chunk))]
        for place in places if overlap else places[:1]:
            self._values[place] = self._data("values", len(places) if overlap else 1, after=())
        last = {c: self.run.num_micro_batches - 1 for c in range(len(self.chunks))}
        for turn in self.scenario.pipeline.turns(self.stage):
            self.program.wait_for_turn(self.scenario.pipeline.before(self.stage, turn))
            if turn.forward:
                self._forward(turn)
            else:
                self._backward(turn, turn.micro_batch == last[turn.chunk] and overlap)
            self._pass_on(turn)
        if not overlap:
            self._gradients += self._data("gradients", 1)
        self.program.wait(*self._gradients)
        self.program.compute("optimizer", optimizer_seconds(self.run, self._gpu))
        host = self._host
        self._launches(host.step + host.check * num_checks(self.run))
        return self.program

    @property
    def _gpu(self) -> Hardware:
        return self.scenario.cluster.hardware

    def _layers(self, chunk: int) -> list[Layer]:
        scenario, made, found = self.scenario, {}, []
        rows, routed = tensor_collectives(self.run), expert_collectives(self.run)
        of_kind = [kind for kind, _ in self.run.model.layers if kind.experts.top_k]
        for layer in scenario.layers(self.stage, chunk):
            if layer not in made:
                tensor = tuple(self._ring("tensor", c.sent_bytes) for c in rows)
                expert: tuple[Message, ...] = ()
                if routed and layer[0] in of_kind:
                    sent = routed[of_kind.index(layer[0])].sent_bytes
                    place = scenario.placements["expert"]
                    expert = (all_to_all(scenario.cluster, place, sent),)
                made[layer] = make_layer(scenario, layer, tensor, expert)
            found.append(made[layer])
        return found

    def _ring(self, group: str, sent: float) -> Message:
        return ring(self.scenario.cluster, self.scenario.placements[group], sent)

    def _forward(self, turn: Turn) -> None:
        host = self._host
        if self.stage == turn.chunk == 0:
            self._launches(host.micro_batch)
        for number, layer in enumerate(self.chunks[turn.chunk]):
            if turn.micro_batch == 0:
                self.program.wait(*self._values.get((turn.chunk, number), ()))
            self.layers.forward(layer)
            self._launches(host.late_forward(layer.seconds(1)))
        if self._is_end(turn):
            seconds = run_head_seconds(self.run, self._gpu)
            self.program.compute("head and loss", seconds)
            self._launches(host.late_head(seconds))

    def _launches(self, seconds: float) -> None:
        """The GPU waits for the CPU that starts its kernels."""
        if seconds > 0:
            self.program.compute("launches", seconds)

    def _is_end(self, turn: Turn) -> bool:
        topology = self.run.topology
        return self.stage == topology.pipeline - 1 and turn.chunk == topology.virtual - 1

    def _backward(self, turn: Turn, reduces: bool) -> None:
        chunk = self.chunks[turn.chunk]
        for number in reversed(range(len(chunk))):
            below = (chunk[number - 1],) if number else ()
            self.layers.backward(chunk[number], (turn.chunk, number), below)
            again = self.run.policy.recompute
            late = self._host.late_backward(again, chunk[number].seconds(2, again))
            self._launches(late)
            if reduces:
                self._gradients += self._data("gradients", sum(map(len, self.chunks)))

    def _data(self, what: str, parts: int, after: tuple[int, ...] = (-1,)) -> list[int]:
        """One of `parts` equal parts of a stage's data-parallel traffic, gradients or values."""
        sent = []
        for collective in data_collectives(self.run):
            if collective.name.startswith(what):
                group = "expert_data" if "experts" in collective.name else "data"
                message = self._ring(group, collective.sent_bytes / parts)
                message = replace(message, lanes=tuple(OWN_LANES[x] for x in message.lanes))
                groups = getattr(self.program.mesh, group)
                sent.append(self.program.send(collective.name, "data", groups, message, after))
        return sent

    def _pass_on(self, turn: Turn) -> None:
        """Sends the rows of a turn to the stage that takes them, if there is one."""
        topology, step = self.run.topology, 1 if turn.forward else -1
        place = turn.chunk * topology.pipeline + self.stage + step
        if not 0 <= place < topology.pipeline * topology.virtual:
            return
        collective: Collective = pipeline_collectives(self.run)[0]
        distance = abs(place % topology.pipeline - self.stage) * self.program.mesh.num_ranks
        message = one_to_one(self.scenario.cluster, distance, collective.sent_bytes)
        single = self.program.mesh.single
        self.program.sent_turns[turn] = self.program.send("rows", "pipeline", single, message)


@dataclass(frozen=True)
class Breakdown:
    """Where one rank's step went; the parts add up to the step. Units: seconds.

    `exposed` by cause: a message it waited for was on its way. `waited` by cause: that message had
    not started, because a peer or a link was late. `idle` at the end, until the last rank is done.
    """

    compute: float
    exposed: dict[str, float]
    waited: dict[str, float]
    idle: float

    @property
    def total(self) -> float:
        """The step."""
        return self.compute + sum(self.exposed.values()) + sum(self.waited.values()) + self.idle


def breakdown(line: Timeline, rank: int) -> Breakdown:
    """Where the step of one global rank went."""
    compute = float(line.busy[Lane.COMPUTE][rank])
    exposed = {cause: float(values[rank]) for cause, values in line.exposed.items()}
    waited = {cause: float(values[rank]) for cause, values in line.waited.items()}
    known = compute + sum(exposed.values()) + sum(waited.values())
    return Breakdown(compute, exposed, waited, line.seconds - known)


def summary(line: Timeline) -> str:
    """What a simulation says, in a few lines."""
    compute = line.busy[Lane.COMPUTE]
    lines = [
        f"step {line.seconds * 1e3:,.1f} ms; {len(line.end):,} ranks, {line.num_ops:,} operations",
        f"  compute    {_range(compute)}   imbalance {compute.max() / compute.mean():.3f}",
    ]
    for title, table in (("exposed", line.exposed), ("waited", line.waited)):
        lines += [
            f"  {title:8s} {cause:9s} {_range(values)}"
            for cause, values in table.items()
            if values.max() > 0
        ]
    for (cause, lane), values in sorted(line.sent.items()):
        lines.append(f"  sent {cause:9s} {lane:13s} {values.mean() / 2**30:9.3f} GiB a rank")
    return "\n".join(lines)


def _range(seconds: np.ndarray) -> str:
    low, mean, high = (1e3 * float(x) for x in (seconds.min(), seconds.mean(), seconds.max()))
    return f"{low:9,.1f} {mean:9,.1f} {high:9,.1f} ms (least, mean, most)"
