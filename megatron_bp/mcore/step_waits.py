"""Says how much of a rank's exposed communication was waiting for peers, from all ranks' traces.

A collective moves nothing until the last rank arrives: until its kernel starts there. What a rank
exposes before that moment is waiting, and would vanish if all ranks arrived together; the rest is
transfer. Clocks of different traces are aligned by the ends of the collectives that two ranks
share. Knows no torch and no model. Specified by tests/mcore/test_step_waits.py.
"""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_bp.mcore.step_trace import ATTENTION, OTHER, Message, Split


@dataclass(frozen=True)
class Exposed:
    """One rank's exposed communication in milliseconds, by part (ATTENTION, OTHER).

    `last` counts the collectives at which this rank was the last to arrive.
    """

    waiting_ms: dict[str, float]
    transfer_ms: dict[str, float]
    last: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        rounded = {
            name: {part: round(value, 3) for part, value in getattr(self, name).items()}
            for name in ("waiting_ms", "transfer_ms")
        }
        return {**rounded, "arrived_last": self.last}


def exposed_of(ranks: Sequence[Split]) -> list[Exposed]:
    """The exposed time of each rank, given the split of every rank of the job.

    Collectives of a group that its ranks do not list alike (a trace that was cut) count as
    transfer, so waiting is never overstated.
    """
    waiting = [dict.fromkeys((ATTENTION, OTHER), 0.0) for _ in ranks]
    last = [0] * len(ranks)
    for of_group in _by_group(ranks):
        names = [[message.name for message in messages] for messages in of_group.values()]
        if len(of_group) < 2 or any(other != names[0] for other in names):
            continue
        ahead = _clocks(of_group)
        for together in zip(*of_group.values(), strict=True):
            starts = {
                rank: message.span[0] - ahead[rank]
                for rank, message in zip(of_group, together, strict=True)
            }
            slowest = max(starts, key=lambda rank: starts[rank])
            last[slowest] += 1
            for rank, message in zip(of_group, together, strict=True):
                arrived = starts[slowest] + ahead[rank]
                waiting[rank][message.part] += _before(message, arrived) / 1e3
    return [
        Exposed(
            waiting[rank],
            {part: split.exposed_ms.get(part, 0.0) - waiting[rank][part] for part in waiting[rank]},
            last[rank],
        )
        for rank, split in enumerate(ranks)
    ]


def rows_of(ranks: Sequence[Split]) -> list[dict[str, Any]]:
    """Plain values for JSON: the split of each rank, and what of its exposed time was waiting."""
    found = zip(ranks, exposed_of(ranks), strict=True)
    return [{**split.as_dict(), **exposed.as_dict()} for split, exposed in found]


def shares(rows: Sequence[Mapping[str, Any]]) -> str:
    """Exposed time of the exchange of keys in percent of a rank's wall, for `rows_of` a job.

    The range over ranks, and what the rank exposes that is waited for: what all of them lose.
    """
    texts = []
    for name in ("transfer_ms", "waiting_ms"):
        parts = [_percent(row, name) for row in rows]
        texts.append(f"{name.removesuffix('_ms')} {min(parts):.2f}..{max(parts):.2f} %")
    slowest = slowest_of(rows)
    both = sum(_percent(rows[slowest], name) for name in ("transfer_ms", "waiting_ms"))
    return "keys exposed: " + ", ".join([*texts, f"slowest rank ({slowest}) {both:.2f} %"])


def slowest_of(rows: Sequence[Mapping[str, Any]]) -> int:
    """The rank that waits least for peers, and so is waited for."""
    return min(range(len(rows)), key=lambda rank: sum(rows[rank]["waiting_ms"].values()))


def _percent(row: Mapping[str, Any], name: str) -> float:
    value: float = 100 * row[name][ATTENTION] / max(row["wall_ms"], 1e-9)
    return value


def slowest(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a step loses to communication, and how unequal its ranks are, for `rows_of` a job.

    The rank that others wait for (`slowest_of`) has the longest work, and so what it exposes
    (`exposed_ms`, `share` of its wall; keys and parameters, transfer and the waiting it has itself)
    is what the step would be shorter without communication. `busy_ms` is what each rank computes
    and waits: where these are equal, the waiting is unequal work or unequal GPUs.
    """
    waiting = [sum(row["waiting_ms"].values()) for row in rows]
    rank = slowest_of(rows)
    row = rows[rank]
    exposed = sum(row["transfer_ms"].values()) + waiting[rank]
    return {
        "rank": rank,
        "exposed_ms": round(exposed, 3),
        "share": round(exposed / max(row["wall_ms"], 1e-9), 5),
        "transfer_ms": row["transfer_ms"],
        "waiting_ms": row["waiting_ms"],
        "busy_ms": [
            round(sum(row["computing_ms"].values()) + waiting[r], 3) for r, row in enumerate(rows)
        ],
    }


def lost(rows: Sequence[Mapping[str, Any]]) -> str:
    """`slowest` as text: the whole exposed communication of the rank that others wait for."""
    found = slowest(rows)
    parts = [
        f"{name} {found['transfer_ms'][part]:.1f} + {found['waiting_ms'][part]:.1f} waiting"
        for name, part in (("keys", ATTENTION), ("parameters", OTHER))
    ]
    busy = found["busy_ms"]
    return (
        f"slowest rank {found['rank']} exposes {found['exposed_ms']:.1f} ms "
        f"({100 * found['share']:.2f} %): {', '.join(parts)}; "
        f"compute + waiting {min(busy):.1f}..{max(busy):.1f} ms"
    )


def _by_group(ranks: Sequence[Split]) -> list[Mapping[int, list[Message]]]:
    """The messages of each rank that takes part in a group, for each group, in order."""
    groups: dict[str, dict[int, list[Message]]] = defaultdict(dict)
    for rank, split in enumerate(ranks):
        for message in split.messages:
            groups[message.group].setdefault(rank, []).append(message)
    return list(groups.values())


def _clocks(of_group: Mapping[int, Sequence[Message]]) -> dict[int, float]:
    """How far each rank's clock is ahead of the first one's: all ranks see a collective end."""
    first = next(iter(of_group.values()))
    return {
        rank: statistics.median(
            mine.span[1] - theirs.span[1] for mine, theirs in zip(messages, first, strict=True)
        )
        for rank, messages in of_group.items()
    }


def _before(message: Message, moment: float) -> float:
    """Microseconds of `alone` before a moment."""
    return sum(max(min(end, moment) - start, 0.0) for start, end in message.alone)
