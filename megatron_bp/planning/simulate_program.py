"""Collects what the ranks of one pipeline stage compute and send, in the order they issue it.

Owns a scenario and the bookkeeping of a program; what a layer issues is in simulate_layers.py.
Specified by tests/planning/test_simulate.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_bp.layout.model_shape import LayerKind
from megatron_bp.layout.run_shape import Run
from megatron_bp.planning.cluster import Cluster
from megatron_bp.planning.events import Groups, Lane, Op, Seconds
from megatron_bp.planning.predict import Schedule
from megatron_bp.planning.simulate_links import Message, Placement
from megatron_bp.planning.simulate_mesh import Mesh, Slow, placements, slow_factors
from megatron_bp.planning.simulate_schedule import Pipeline, Turn

LAST = (-1,)  # the computation that was added last


@dataclass(frozen=True)
class Scenario:
    """One run on one cluster. `hierarchical`: keys are gathered by node where shards span nodes."""

    run: Run
    cluster: Cluster
    schedule: Schedule = Schedule.OVERLAPPED
    hierarchical: bool = False
    slow: tuple[Slow, ...] = ()

    def __post_init__(self) -> None:
        for one in self.slow:
            if one.rank >= self.run.topology.world:
                raise ValueError(
                    f"slow rank {one.rank} does not exist; use one below "
                    f"{self.run.topology.world}, the number of ranks."
                )

    @cached_property
    def mesh(self) -> Mesh:
        """The groups of a stage."""
        return Mesh(self.run.topology)

    @cached_property
    def placements(self) -> dict[str, Placement]:
        """How groups lie on nodes."""
        return placements(self.mesh, self.cluster.node_size)

    @cached_property
    def pipeline(self) -> Pipeline:
        """The order of micro-batches."""
        topology = self.run.topology
        return Pipeline(topology.pipeline, topology.virtual, self.run.num_micro_batches)

    def layers(self, stage: int, chunk: int) -> list[tuple[LayerKind, bool]]:
        """The layers of one model chunk, and whether they are pruned; kinds are spread evenly."""
        topology, kinds = self.run.topology, spread(self.run.model.layers)
        size = len(kinds) // (topology.pipeline * topology.virtual)
        first = (chunk * topology.pipeline + stage) * size
        pruned = len(kinds) - 1 if self.run.prunes_last_layer else -1
        return [(kinds[i], i == pruned) for i in range(first, first + size)]


def spread(layers: Sequence[tuple[LayerKind, int]]) -> list[LayerKind]:
    """The layers in an order that mixes kinds evenly and ends with the last kind."""
    keyed = [
        ((i + 1) / count, at, kind) for at, (kind, count) in enumerate(layers) for i in range(count)
    ]
    return [kind for _, _, kind in sorted(keyed, key=lambda x: x[:2])]


class StageProgram:
    """The program of one stage. `compute` and `send` add an operation and return its number."""

    def __init__(self, scenario: Scenario, stage: int) -> None:
        self.scenario, self.stage, self.mesh = scenario, stage, scenario.mesh
        self.ops: list[Op] = []
        self.sent_turns: dict[Turn, int] = {}
        self.arrivals: dict[int, tuple[int, Turn]] = {}
        self._awaited: list[int] = []
        self._last_compute: tuple[int, ...] = ()
        self._arrival: tuple[()] | tuple[int, Turn] = ()
        ranks, slow = scenario.mesh.num_ranks, scenario.slow
        self._compute_factor = slow_factors(slow, ranks, stage, lambda one: one.compute)
        self._link_factor = slow_factors(slow, ranks, stage, lambda one: one.link)

    def wait(self, *ops: int) -> None:
        """Makes the next computation wait for operations."""
        self._awaited += ops

    def wait_for_turn(self, source: tuple[()] | tuple[int, Turn]) -> None:
        """Makes the next computation wait for what another stage sends after a turn."""
        self._arrival = source

    def compute(self, name: str, seconds: float | Seconds) -> int:
        """Adds a computation; seconds on each rank, or of every rank alike."""
        number = len(self.ops)
        times = np.asarray(seconds * self._compute_factor, dtype=np.float64)
        needs, self._awaited = tuple(dict.fromkeys(self._awaited)), []
        if self._arrival:
            self.arrivals[number], self._arrival = self._arrival, ()
        self.ops.append(Op(name, "compute", (Lane.COMPUTE,), times, self.mesh.single, needs))
        self._last_compute = (number,)
        return number

    def send(
        self,
        name: str,
        cause: str,
        groups: Groups,
        message: Message,
        after: tuple[int, ...] = LAST,
    ) -> int:
        """Adds a message of what was computed last, or of the results of operations `after`."""
        times = message.seconds * self._link_factor
        needs = self._last_compute if after == LAST else after
        self.ops.append(Op(name, cause, message.lanes, times, groups, needs, (), message.sent))
        return len(self.ops) - 1
