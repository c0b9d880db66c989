"""Issues what one layer computes and sends for one micro-batch, forward and backward.

The order is that of attention/block_parallel.py (both slabs start at once, late launches last; in
backward both slabs are reduced after their launches, those at own keys included: to run these
beside the reduction hid it and saved no time) inside Megatron's transformer layer under sequence
parallelism. Specified by tests/planning/test_simulate.py.
"""

from dataclasses import dataclass

import numpy as np

from megatron_bp.layout.memory import gathered_bytes
from megatron_bp.layout.model_shape import AttentionShape, LayerKind
from megatron_bp.layout.pair_counts import owners_of
from megatron_bp.layout.run_shape import Mode, Recompute, Run
from megatron_bp.layout.traffic import clean_rows_sent, corrupted_rows_sent, kv_row_elements
from megatron_bp.planning.events import Seconds
from megatron_bp.planning.predict import Schedule, T
from megatron_bp.planning.simulate_links import Message, by_node, neighbours, ring
from megatron_bp.planning.simulate_program import LAST, Scenario, StageProgram
from megatron_bp.planning.simulate_work import LayerWork, layer_work

LOCAL, EARLY, LATE = 0, 1, 2
PHASE_NAMES = ("local", "early", "late")
Steps = tuple[tuple[Message, ...], ...]


@dataclass(frozen=True)
class KeyMessages:
    """Keys of one layer on the wire: the clean slabs, by phase, and the corrupted rows.

    Each is steps that follow one another; the messages of one step run at a time.
    """

    slabs: tuple[tuple[int, Steps], ...]
    corrupted: Steps


def key_messages(scenario: Scenario, kind: LayerKind, width: int, gathers: bool) -> KeyMessages:
    """The messages of one gather, or of one reduction, with `width` bytes an element."""
    run, cluster = scenario.run, scenario.cluster
    if not isinstance(kind.mixer, AttentionShape) or run.topology.context == 1:
        return KeyMessages((), ())
    row, window = kv_row_elements(run, kind) * width, kind.mixer.window
    slabs: list[tuple[int, Steps]] = []
    shards = run.topology.shards
    if shards > 1 and window and run.topology.windowed_exchange:
        sent = clean_rows_sent(run, window) * row
        slabs.append((EARLY, ((neighbours(cluster, scenario.placements["shards"], sent),),)))
    elif shards > 1:
        lengths = owners_of(run.request()).clean.slab_lengths
        for phase, length in zip((EARLY, LATE), lengths, strict=True):
            slabs.append((phase, _slab(scenario, (shards - 1) * length * row, gathers)))
    corrupted: Steps = ()
    if run.topology.mode is Mode.CP:
        placement = scenario.placements["context"]
        corrupted = ((ring(cluster, placement, corrupted_rows_sent(run) * row),),)
    return KeyMessages(tuple(slabs), corrupted)


def _slab(scenario: Scenario, sent: float, gathers: bool) -> Steps:
    placement = scenario.placements["shards"]
    if scenario.hierarchical and placement.nodes > 1 and placement.per_node > 1:
        return by_node(scenario.cluster, placement, sent, gathers)
    return ((ring(scenario.cluster, placement, sent),),)


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer of one stage's program: its seconds, and its messages each way."""

    work: LayerWork
    forward: tuple[Seconds, ...]
    backward: tuple[Seconds, ...]
    gather: KeyMessages
    reduce: KeyMessages
    tensor: tuple[Message, ...]
    expert: tuple[Message, ...]
    reorder: float

    def seconds(self, times: int, kept: Recompute = Recompute.NONE) -> float:
        """Seconds of the busiest rank's kernels: forward (`times` 1) or backward (2) and again."""
        work, phases = self.work, (self.forward, self.backward)[times - 1]
        matrices = work.before + work.after + work.ffn + work.experts
        found = times * matrices + work.mixer[times - 1] + float(np.sum(phases, axis=0).max())
        if kept is Recompute.FULL:
            return found + self.seconds(1)
        share = {Recompute.NONE: 0.0, Recompute.SELECTIVE: work.ffn + work.experts}
        return found + share.get(kept, matrices)


def make_layer(
    scenario: Scenario,
    layer: tuple[LayerKind, bool],
    tensor: tuple[Message, ...],
    expert: tuple[Message, ...],
) -> Layer:
    """A layer; `tensor` and `expert` are the message of rows between matrices, if there is one."""
    kind, pruned = layer
    run, cluster = scenario.run, scenario.cluster
    work = layer_work(run, kind, cluster, pruned)
    reorder = 0.0
    if scenario.schedule is Schedule.BLOCKING and run.topology.mode is Mode.CP:
        reorder = 2 * gathered_bytes(run, kind) / (cluster.hardware.elementwise_tb_s * T)
    return Layer(
        work,
        tuple(scenario.mesh.of_context(x) for x in work.forward),
        tuple(scenario.mesh.of_context(x) for x in work.backward),
        key_messages(scenario, kind, run.policy.element_bytes, gathers=True),
        key_messages(scenario, kind, run.policy.grad_wire_bytes, gathers=False),
        tensor,
        expert if kind.experts.num_experts else (),
        reorder,
    )


class LayerWriter:
    """Issues layers into a program. `kept` holds gathers started for backward, by layer."""

    def __init__(self, program: StageProgram, run: Run) -> None:
        self.program, self.run = program, run
        self.blocking = program.scenario.schedule is Schedule.BLOCKING
        self._ahead: dict[tuple[int, int], dict[int, list[int]]] = {}

    def forward(self, layer: Layer) -> None:
        """One layer forward."""
        work = layer.work
        self._tensor(layer)
        self.program.compute("projection in", work.before)
        self._attend(layer, self._gather(layer, LAST))
        self._after_attention(layer)

    def _after_attention(self, layer: Layer) -> None:
        work = layer.work
        self.program.compute("projection out", work.after)
        self._tensor(layer)
        self._feed_forward(layer, 1.0)

    def _feed_forward(self, layer: Layer, times: float) -> None:
        self._tensor(layer)
        if layer.expert:
            self._experts(layer)
            self.program.compute("experts", times * layer.work.experts)
            self._experts(layer)
        self.program.compute("feed forward", times * layer.work.ffn)
        self._tensor(layer)

    def backward(self, layer: Layer, place: tuple[int, int], below: tuple[Layer, ...]) -> None:
        """One layer backward, after what of it is computed again.

        `place` is (chunk, layer), `below` the layer that comes next, if it is in this chunk.
        """
        kept, program, work = self.run.policy.recompute, self.program, layer.work
        again = not self.run.policy.keep_gathered and kept is not Recompute.FULL
        ready = self._again(layer) if again and place not in self._ahead else {}
        if kept in (Recompute.FULL, Recompute.FULL_KEEP_ATTENTION):
            self._tensor(layer)
            program.compute("projection in (again)", work.before)
            if kept is Recompute.FULL:
                self._attend(layer, self._gather(layer, LAST))
            elif work.mixer[0]:
                program.compute("mixer (again)", work.mixer[0])
            self._after_attention(layer)
        elif kept is Recompute.SELECTIVE:
            self._feed_forward(layer, 1.0)
        self._feed_forward(layer, 2.0)
        self._tensor(layer)  # a backward gathers the inputs of weight gradients besides
        self._tensor(layer)
        program.compute("projection out backward", 2 * work.after)
        for waited in (self._ahead.pop(place, ready)).values():
            program.wait(*waited)
        if again and below and kept is not Recompute.FULL_KEEP_ATTENTION:
            self._ahead[place[0], place[1] - 1] = self._again(below[0])
        self._attend_backward(layer)
        program.compute("projection in backward", 2 * work.before)
        self._tensor(layer)
        self._tensor(layer)

    def _again(self, layer: Layer) -> dict[int, list[int]]:
        return self._gather(layer, LAST)

    def _gather(self, layer: Layer, after: tuple[int, ...]) -> dict[int, list[int]]:
        """Starts the gathers of a layer; what to wait for, by phase."""
        waits: dict[int, list[int]] = {}
        for phase, steps in layer.gather.slabs:
            name = f"gather {PHASE_NAMES[phase]} keys"
            waits.setdefault(phase, []).extend(self._send(name, "shards", steps, after))
        if layer.gather.corrupted:
            sent = self._send("gather corrupted keys", "context", layer.gather.corrupted, after)
            waits.setdefault(LATE, []).extend(sent)
        return waits

    def _attend(self, layer: Layer, waits: dict[int, list[int]]) -> None:
        program = self.program
        if layer.work.mixer[0]:
            program.compute("mixer", layer.work.mixer[0])
            return
        if self.blocking:
            program.wait(*(op for ops in waits.values() for op in ops))
            if layer.reorder:
                program.compute("reorder keys", layer.reorder)
        for phase, seconds in enumerate(layer.forward):
            program.wait(*waits.get(phase, ()))
            if seconds.any() or waits.get(phase):
                program.compute(f"attention, {PHASE_NAMES[phase]} keys", seconds)

    def _attend_backward(self, layer: Layer) -> None:
        """Late launches, early ones, then both slabs' reductions, late first.

        Not a slab at a time: the rank with the last chunk is on the late slab until nearly the end.
        """
        program = self.program
        if layer.work.mixer[1]:
            program.compute("mixer backward", layer.work.mixer[1])
            return
        slabs = dict(layer.reduce.slabs)
        reduced: list[int] = []
        for phase in (LATE, EARLY, LOCAL):
            if layer.backward[phase].any():
                name = f"attention backward, {PHASE_NAMES[phase]} slab"
                program.compute(name, layer.backward[phase])
            if phase == EARLY:
                for slab in sorted(slabs, reverse=True):
                    reduced += self._reduce(slab, slabs[slab])
        if layer.reduce.corrupted:
            name = "reduce corrupted keys"
            reduced += self._send(name, "context", layer.reduce.corrupted, LAST)
        program.wait(*reduced)
        if layer.reorder:
            program.compute("reorder key gradients", layer.reorder)

    def _reduce(self, phase: int, steps: Steps) -> tuple[int, ...]:
        return self._send(f"reduce {PHASE_NAMES[phase]} keys", "shards", steps, LAST)

    def _send(self, name: str, group: str, steps: Steps, after: tuple[int, ...]) -> tuple[int, ...]:
        """Starts a message's steps; the operations of the last one."""
        groups = getattr(self.program.mesh, group)
        for step in steps:
            after = tuple(self.program.send(name, "context", groups, m, after) for m in step)
        return after

    def _tensor(self, layer: Layer) -> None:
        for message in layer.tensor:
            mesh = self.program.mesh
            self.program.wait(self.program.send("rows", "tensor", mesh.tensor, message))

    def _experts(self, layer: Layer) -> None:
        for message in layer.expert:
            mesh = self.program.mesh
            self.program.wait(self.program.send("routed rows", "expert", mesh.expert, message))
