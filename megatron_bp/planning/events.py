"""Computes when every operation of a step starts and ends on every rank.

A program is the list of operations that all ranks of one pipeline stage issue, in order. An
operation starts on a rank when the lanes it occupies are free, everything it needs has ended, and
all members of its group are as far; its group then takes as long as its slowest member. Lanes serve
in issue order, as streams do, so times follow from maxima and sums, and one pass over the programs
gives what an event queue would (tests/planning/test_simulate_events.py compares the two).

Symmetry is used in one place, exactly: ranks of a stage share the list of operations, so that each
is computed for all of them at once. Every rank has its own clock and its own durations.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]  # [R], one value a rank of a stage


class Lane(StrEnum):
    """What an operation occupies while it runs.

    Data-parallel messages have lanes of their own: they wait for other replicas, and a link serves
    others meanwhile. That they slow one another down is neglected.
    """

    COMPUTE = "compute"
    NODE = "node links"
    NETWORK = "network"
    NODE_DATA = "node, data"
    NETWORK_DATA = "network, data"


@dataclass(frozen=True, eq=False)
class Groups:
    """Who takes part in an operation together: int64 [groups, size], each rank of a stage once."""

    ranks: NDArray[np.int64]

    @cached_property
    def group_of(self) -> NDArray[np.int64]:
        """The group of each rank, int64 [R]."""
        group = np.empty(self.ranks.size, dtype=np.int64)
        group[self.ranks] = np.arange(len(self.ranks))[:, None]
        return group

    @property
    def size(self) -> int:
        """Ranks of one group."""
        return self.ranks.shape[1]

    def latest(self, values: Seconds) -> Seconds:
        """The largest value of each rank's group."""
        if self.size == 1:
            return values
        return np.asarray(values[self.ranks].max(axis=1)[self.group_of])


def alone(num_ranks: int) -> Groups:
    """Every rank for itself."""
    return Groups(np.arange(num_ranks)[:, None])


@dataclass(frozen=True, eq=False)
class Op:
    """One operation of a program.

    `cause` names what a rank waits for when it waits for this. `needs` are earlier operations of
    the same program, `arrives` are (stage, operation) of others, rank by rank.
    Units: `seconds` [R] on each rank; `sent` [lanes, R] bytes that each rank puts on each lane.
    """

    name: str
    cause: str
    lanes: tuple[Lane, ...]
    seconds: Seconds
    groups: Groups
    needs: tuple[int, ...] = ()
    arrives: tuple[tuple[int, int], ...] = ()
    sent: tuple[float, ...] = ()


@dataclass(frozen=True)
class Span:
    """One operation on one traced rank. Units: seconds from the start of the step."""

    rank: int
    lane: Lane
    name: str
    start: float
    end: float


@dataclass(eq=False)
class Timeline:
    """What a simulation found; [W] arrays are by global rank.

    `end` is when each rank is done. `busy` seconds of each lane. `exposed` is what the compute lane
    waited while the operation it waited for was running; `waited` while that had not started, for
    peers or busy lanes. `sent` bytes by cause and lane.
    """

    end: Seconds
    busy: dict[Lane, Seconds] = field(default_factory=dict)
    exposed: dict[str, Seconds] = field(default_factory=dict)
    waited: dict[str, Seconds] = field(default_factory=dict)
    sent: dict[tuple[str, Lane], Seconds] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    num_ops: int = 0

    @property
    def seconds(self) -> float:
        """The step: the last rank's end."""
        return float(self.end.max())


class _Stage:
    """The clocks of one stage's ranks, and the results that later operations still need."""

    def __init__(self, program: Sequence[Op], num_ranks: int) -> None:
        self.program, self.next = program, 0
        self.free: dict[Lane, Seconds] = defaultdict(lambda: np.zeros(num_ranks))
        self.times: dict[int, tuple[Seconds, Seconds]] = {}

    def __bool__(self) -> bool:
        return self.next < len(self.program)


def simulate(programs: Sequence[Sequence[Op]], num_ranks: int, traced: Iterable[int]) -> Timeline:
    """Runs the programs of all stages, `num_ranks` ranks each; spans are kept of `traced` ranks.

    Global rank = stage * num_ranks + rank of the stage.
    Raises: ValueError if operations wait for one another in a circle.
    """
    line = Timeline(np.zeros(len(programs) * num_ranks))
    stages = [_Stage(program, num_ranks) for program in programs]
    uses = _count_uses(programs)
    shown: dict[int, list[int]] = defaultdict(list)
    for rank in traced:
        shown[rank // num_ranks].append(rank % num_ranks)
    while any(stages):
        moved = False
        for number, stage in enumerate(stages):
            while stage and all(i in stages[s].times for s, i in stage.program[stage.next].arrives):
                _run(stages, number, line, shown[number])
                op, moved = stage.program[stage.next], True
                for key in (*((number, i) for i in op.needs), *op.arrives):
                    uses[key] -= 1
                    if not uses[key]:
                        del stages[key[0]].times[key[1]]
                if not uses[number, stage.next]:
                    del stage.times[stage.next]
                stage.next += 1
        if not moved:
            stuck = [f"{s.program[s.next].name} (stage {i})" for i, s in enumerate(stages) if s]
            raise ValueError(f"operations wait for one another: {', '.join(stuck)}.")
    return line


def _count_uses(programs: Sequence[Sequence[Op]]) -> Counter[tuple[int, int]]:
    uses: Counter[tuple[int, int]] = Counter()
    for number, program in enumerate(programs):
        for at, op in enumerate(program):
            uses[number, at] += 0
            uses.update((number, need) for need in op.needs)
            uses.update(op.arrives)
    return uses


def _run(stages: list[_Stage], number: int, line: Timeline, shown: list[int]) -> None:
    """Runs the next operation of a stage on all its ranks."""
    stage = stages[number]
    op, num_ranks = stage.program[stage.next], stage.program[stage.next].seconds.size
    here = slice(number * num_ranks, (number + 1) * num_ranks)
    waits = [(stage.program[i], stage.times[i]) for i in op.needs]
    waits += [(stages[s].program[i], stages[s].times[i]) for s, i in op.arrives]
    begin = np.zeros(num_ranks)
    for lane in op.lanes:
        begin = np.maximum(begin, stage.free[lane])
    for _, (_, end) in waits:
        begin = np.maximum(begin, end)
    begin = op.groups.latest(begin)
    end = begin + op.groups.latest(op.seconds)
    if Lane.COMPUTE in op.lanes:
        _attribute(line, here, stage.free[Lane.COMPUTE], waits)
    for lane in op.lanes:
        stage.free[lane] = end
        busy = line.busy.setdefault(lane, np.zeros(line.end.size))
        busy[here] += end - begin
    for lane, nbytes in zip(op.lanes, op.sent, strict=False):
        sent = line.sent.setdefault((op.cause, lane), np.zeros(line.end.size))
        sent[here] += nbytes
    stage.times[stage.next] = begin, end
    line.end[here] = np.maximum(line.end[here], end)
    line.num_ops += num_ranks
    for rank in shown:
        line.spans += [
            Span(here.start + rank, lane, op.name, float(begin[rank]), float(end[rank]))
            for lane in op.lanes
        ]


def _attribute(
    line: Timeline, here: slice, free: Seconds, waits: list[tuple[Op, tuple[Seconds, Seconds]]]
) -> None:
    """Adds the idle time before a compute operation to the cause that ended last."""
    others = [wait for wait in waits if Lane.COMPUTE not in wait[0].lanes]
    if not others:
        return
    ends = np.stack([end for _, (_, end) in others])
    last = ends.argmax(axis=0)
    for number, (op, (start, end)) in enumerate(others):
        gap = np.where(last == number, np.maximum(end - free, 0.0), 0.0)
        exposed = np.minimum(gap, end - start)
        for table, value in ((line.exposed, exposed), (line.waited, gap - exposed)):
            total = table.setdefault(op.cause, np.zeros(line.end.size))
            total[here] += value
