"""The pass over programs gives the times of an event queue, and idle time is all accounted for."""

import heapq
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from megatron_bp.planning.events import Groups, Lane, Op, alone, simulate


def by_event_queue(programs: list[list[Op]], num_ranks: int) -> dict[tuple[int, int, int], float]:
    """End of (stage, operation, rank), from a queue of events and nothing else.

    An operation of a group starts when the last of what its members wait for has ended: operations
    it needs, arrivals, and the operation issued before it on each of its lanes.
    """
    waiting: dict[Any, int] = {}
    wakes: dict[Any, list[Any]] = defaultdict(list)
    members: dict[Any, list[Any]] = {}
    for stage, program in enumerate(programs):
        before: dict[Any, Any] = {}
        for number, op in enumerate(program):
            for group, ranks in enumerate(op.groups.ranks.tolist()):
                node = stage, number, group
                members[node] = [(stage, number, rank) for rank in ranks]
                causes = {(stage, need, rank) for need in op.needs for rank in ranks}
                causes |= {(s, i, rank) for s, i in op.arrives for rank in ranks}
                causes |= {
                    before[lane, r] for lane in op.lanes for r in ranks if (lane, r) in before
                }
                waiting[node] = len(causes)
                for cause in causes:
                    wakes[cause].append(node)
            for rank in range(num_ranks):
                for lane in op.lanes:
                    before[lane, rank] = stage, number, rank
    queue: list[tuple[float, Any]] = []

    def start(node: Any, now: float) -> None:
        op = programs[node[0]][node[1]]
        longest = max(float(op.seconds[rank]) for _, _, rank in members[node])
        heapq.heappush(queue, (now + longest, node))

    for node, count in list(waiting.items()):
        if not count:
            start(node, 0.0)
    ends: dict[tuple[int, int, int], float] = {}
    while queue:
        now, node = heapq.heappop(queue)
        for member in members[node]:
            ends[member] = now
            for woken in wakes[member]:
                waiting[woken] -= 1
                if not waiting[woken]:
                    start(woken, now)
    return ends


def random_programs(seed: int) -> tuple[list[list[Op]], int]:
    """Two stages of four ranks with random groups, needs, lanes, arrivals and durations."""
    rng = np.random.default_rng(seed)
    pairs = Groups(np.array([[0, 2], [1, 3]]))
    kinds = [alone(4), pairs, Groups(np.arange(4)[None])]
    lanes = [(Lane.COMPUTE,), (Lane.NODE,), (Lane.NETWORK,), (Lane.NODE, Lane.NETWORK)]
    programs: list[list[Op]] = [[], []]
    for number in range(30):
        for stage in (0, 1):
            needs = tuple({int(x) for x in rng.integers(0, number, 2)}) if number else ()
            arrives = ((1 - stage, int(rng.integers(0, number))),) if number and stage else ()
            programs[stage].append(
                Op(
                    f"op {number}",
                    "some cause",
                    lanes[rng.integers(4)],
                    rng.random(4),
                    kinds[rng.integers(3)],
                    needs,
                    arrives,
                )
            )
    return programs, 4


@pytest.mark.parametrize("seed", range(20))
def test_every_operation_ends_when_an_event_queue_says(seed: int) -> None:
    programs, num_ranks = random_programs(seed)
    want = by_event_queue(programs, num_ranks)
    line = simulate(programs, num_ranks, range(2 * num_ranks))
    assert line.num_ops == len(want) == 2 * 30 * num_ranks
    got: dict[tuple[int, str], set[float]] = defaultdict(set)
    for span in line.spans:
        got[span.rank, span.name].add(span.end)
    for (stage, number, rank), end in want.items():
        (mine,) = got[stage * num_ranks + rank, f"op {number}"]
        assert mine == pytest.approx(end, rel=1e-12)
    assert line.seconds == pytest.approx(max(want.values()), rel=1e-12)


def op(name: str, lane: Lane, seconds: list[float], groups: Groups, *needs: int) -> Op:
    """An operation of one lane."""
    return Op(name, name, (lane,), np.array(seconds), groups, needs, (), (8.0,))


def test_two_ranks_hide_a_message_behind_what_does_not_need_it() -> None:
    """Both send at 1 and 3 (the message starts at 3, takes 4); rank 0 has 5 to do meanwhile."""
    one, both = alone(2), Groups(np.array([[0, 1]]))
    program = [
        op("before", Lane.COMPUTE, [1, 3], one),
        op("message", Lane.NODE, [4, 2], both, 0),
        op("meanwhile", Lane.COMPUTE, [5, 1], one),
        op("after", Lane.COMPUTE, [2, 2], one, 1),
    ]
    line = simulate([program], 2, [])
    assert line.end.tolist() == [9, 9]
    assert line.busy[Lane.COMPUTE].tolist() == [8, 6]
    assert line.exposed["message"].tolist() == [1, 3]  # 7 - 6 and 7 - 4
    assert line.waited["message"].tolist() == [0, 0]
    assert line.sent["message", Lane.NODE].tolist() == [8, 8]


def test_waiting_for_a_late_peer_is_not_exposed_communication() -> None:
    one, both = alone(2), Groups(np.array([[0, 1]]))
    program = [
        op("before", Lane.COMPUTE, [1, 10], one),
        op("message", Lane.NODE, [2, 2], both, 0),
        op("after", Lane.COMPUTE, [1, 1], one, 1),
    ]
    line = simulate([program], 2, [])
    assert line.end.tolist() == [13, 13]
    assert line.exposed["message"].tolist() == [2, 2]
    assert line.waited["message"].tolist() == [9, 0]


def test_operations_in_a_circle_are_refused_with_their_names() -> None:
    one = alone(1)
    programs = [
        [Op("left", "x", (Lane.COMPUTE,), np.ones(1), one, (), ((1, 0),))],
        [Op("right", "x", (Lane.COMPUTE,), np.ones(1), one, (), ((0, 0),))],
    ]
    with pytest.raises(ValueError, match=r"one another: left \(stage 0\), right \(stage 1\)"):
        simulate(programs, 1, [])
