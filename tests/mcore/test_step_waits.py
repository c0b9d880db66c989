"""Exposed time before the last rank arrives is waiting, the rest transfer, whatever the clocks."""

import random
from dataclasses import replace
from typing import Any

import pytest

from megatron_bp.mcore.step_trace import ATTENTION, OTHER, Message, Split, split_of
from megatron_bp.mcore.step_waits import exposed_of, lost, rows_of, shares, slowest, slowest_of
from tests.mcore.test_step_trace import launched, span, trace

WORLD = {"Process Group Name": "0", "Process Group Ranks": "[0, 1]", "Collective name": "allgather"}


def rank(*messages: Message) -> Split:
    exposed = {ATTENTION: 0.0, OTHER: 0.0}
    for message in messages:
        exposed[message.part] += sum(hi - lo for lo, hi in message.alone) / 1e3
    return Split(0.0, {}, exposed, {}, 0.0, messages)


def message(lo: float, hi: float, part: str = ATTENTION, group: str = "g", name: str = "a") -> Any:
    return Message(name, part, 0, group, (lo, hi), ((lo, hi),))


def test_until_the_last_rank_arrives_the_others_wait() -> None:
    early, late = exposed_of([rank(message(1000, 3500)), rank(message(3000, 3500))])
    assert (early.waiting_ms[ATTENTION], early.transfer_ms[ATTENTION]) == pytest.approx((2.0, 0.5))
    assert (late.waiting_ms[ATTENTION], late.transfer_ms[ATTENTION]) == pytest.approx((0.0, 0.5))
    assert (early.last, late.last) == (0, 1)


def test_what_the_last_rank_exposes_is_what_all_lose() -> None:
    """Rank 1 arrives last twice; ranks 0 and 2 wait for it longer than it moves bytes."""
    arrivals = [(1000.0, 5000.0), (3000.0, 7000.0), (2000.0, 4000.0)]
    ranks = [rank(message(a, 3500), message(b, 7250)) for a, b in arrivals]
    rows = rows_of([replace(x, wall_ms=10.0) for x in ranks])
    assert slowest_of(rows) == 1
    text = "transfer 7.50..7.50 %, waiting 0.00..40.00 %, slowest rank (1) 7.50 %"
    assert shares(rows) == f"keys exposed: {text}"


def test_of_two_ranks_that_come_last_alike_the_slower_one_waited_less() -> None:
    ranks = [
        rank(message(1000, 3500), message(5000, 6000)),
        rank(message(2000, 3500), message(4500, 6000)),
    ]
    assert slowest_of(rows_of(ranks)) == 1


def test_only_what_nothing_hides_counts() -> None:
    hidden = replace(message(1000, 3500), alone=((1500, 2000), (2900, 3200)))
    early, _ = exposed_of([rank(hidden), rank(message(3000, 3500))])
    assert early.waiting_ms[ATTENTION] == pytest.approx(0.6)
    assert early.transfer_ms[ATTENTION] == pytest.approx(0.2)


def test_the_two_columns_add_up_and_no_clock_matters() -> None:
    rng = random.Random(5)
    for _ in range(30):
        world, ends, rows = rng.randint(2, 4), 0.0, list[list[Message]]()
        rows = [[] for _ in range(world)]
        for _ in range(rng.randint(1, 6)):
            starts = [ends + rng.uniform(0, 900) for _ in range(world)]
            ends = max(starts) + rng.uniform(1, 300)
            part = rng.choice([ATTENTION, OTHER])
            for row, lo in zip(rows, starts, strict=True):
                row.append(message(lo, ends, part))
        moved = []
        for row in rows:
            by = rng.uniform(-1e6, 1e6)
            shifted = [
                replace(
                    m,
                    span=(m.span[0] + by, m.span[1] + by),
                    alone=tuple((lo + by, hi + by) for lo, hi in m.alone),
                )
                for m in row
            ]
            moved.append(rank(*shifted))
        same, found = exposed_of([rank(*row) for row in rows]), exposed_of(moved)
        for a, b, split in zip(same, found, moved, strict=True):
            assert a.waiting_ms == pytest.approx(b.waiting_ms, abs=1e-5)
            for part in (ATTENTION, OTHER):
                total = b.waiting_ms[part] + b.transfer_ms[part]
                assert total == pytest.approx(split.exposed_ms[part])
                assert b.waiting_ms[part] >= 0
        assert sum(x.last for x in found) == len(rows[0])


def test_groups_are_matched_by_themselves() -> None:
    """Two pairs of ranks: the slow pair does not make the other wait."""
    quick = [rank(message(0, 100, group="0 1")), rank(message(50, 100, group="0 1"))]
    slow = [rank(message(0, 900, group="2 3")), rank(message(800, 900, group="2 3"))]
    found = exposed_of([quick[0], slow[0], quick[1], slow[1]])
    waited = [x.waiting_ms[ATTENTION] for x in found]
    assert waited == pytest.approx([0.05, 0.8, 0.0, 0.0])


def test_lists_that_differ_are_transfer() -> None:
    whole, cut = rank(message(0, 10), message(20, 30)), rank(message(5, 10))
    named = rank(message(0, 10, name="b"), message(25, 30))
    for other in (cut, named):
        assert exposed_of([whole, other])[0].waiting_ms == {ATTENTION: 0.0, OTHER: 0.0}
        assert exposed_of([whole, other])[0].transfer_ms[ATTENTION] == pytest.approx(0.02)


def test_a_lone_rank_waits_for_nobody() -> None:
    (found,) = exposed_of([rank(message(0, 10))])
    assert found.waiting_ms[ATTENTION] == 0
    assert found.as_dict()["transfer_ms"] == {ATTENTION: 0.01, OTHER: 0.0}


def test_traces_name_the_group_and_the_time_alone() -> None:
    def of_rank(wire_at: float, clock: float) -> Split:
        return split_of(
            trace(
                span("user_annotation", "bench/attention", 0, 10),
                launched(1, 1, "flash", clock + 100, 40),
                launched(2, 2, "ncclDevKernel_AllGather", clock + wire_at, 300 - wire_at, **WORLD),
            )
        )

    first, second = exposed_of([of_rank(120, 0), of_rank(250, 7e5)])
    assert first.waiting_ms[ATTENTION] == pytest.approx(0.11)
    assert first.transfer_ms[ATTENTION] == pytest.approx(0.05)
    assert second.waiting_ms[ATTENTION] == 0


def busy(split: Split, computing: float, idle: float = 0.0) -> Split:
    """The same rank with work of its own, and a wall that is the sum of all parts."""
    wall = computing + sum(split.exposed_ms.values()) + idle
    return replace(split, wall_ms=wall, computing_ms={"linears": computing}, idle_ms=idle)


def test_the_rank_that_others_wait_for_says_what_the_step_loses() -> None:
    """It never waits for keys; the parameters' sum comes while rank 0 is late, for once."""
    early = [message(1000, 3500), message(4000, 4600, OTHER)]
    late = [message(3000, 3500), message(3900, 4600, OTHER)]
    rows = rows_of([busy(rank(*early), 6.0), busy(rank(*late), 8.0, idle=0.2)])
    found = slowest(rows)
    assert found["rank"] == 1
    assert found["exposed_ms"] == pytest.approx(0.5 + 0.7)
    assert found["share"] == pytest.approx(1.2 / (8.0 + 1.2 + 0.2), abs=1e-5)
    assert found["transfer_ms"] == {ATTENTION: 0.5, OTHER: pytest.approx(0.6)}
    assert found["waiting_ms"] == {ATTENTION: 0.0, OTHER: pytest.approx(0.1)}
    assert found["busy_ms"] == pytest.approx([6.0 + 2.0, 8.0 + 0.1])
    assert lost(rows) == (
        "slowest rank 1 exposes 1.2 ms (12.77 %): keys 0.5 + 0.0 waiting, parameters 0.6 + 0.1 "
        "waiting; compute + waiting 8.0..8.1 ms"
    )


def test_one_rank_loses_nothing() -> None:
    found = slowest(rows_of([busy(rank(), 5.0)]))
    assert (found["rank"], found["exposed_ms"], found["busy_ms"]) == (0, 0.0, [5.0])
