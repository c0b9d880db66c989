"""Says where the device time of one training step went, from a trace of PyTorch's profiler.

Reads the trace's kernels and the ranges of the threads that launched them; knows no torch and no
model. Each instant of the step belongs to one part: to a computing kernel if one runs, else to a
communicating one (which is then exposed), else to none (idle). So the parts add up to the wall.
Specified by tests/mcore/test_step_trace.py.
"""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ATTENTION, LINEARS, LOSS, OPTIMIZER, OTHER = "attention", "linears", "loss", "optimizer", "other"
COMPUTING = (ATTENTION, LINEARS, LOSS, OPTIMIZER, OTHER)

# Ranges that `step_bench` opens, and names of autograd nodes in backward, where none is open.
RANGES = (
    (re.compile(r"bench/attention|BlockParallelAttention|GatherKeys|CompiledFunction"), ATTENTION),
    (re.compile(r"bench/loss|CrossEntropy"), LOSS),
    (re.compile(r"bench/optimizer"), OPTIMIZER),
)
PRODUCT = re.compile(r"gemm|nvjet|cutlass|xmma|splitK", re.IGNORECASE)
FLEX = re.compile(r"flex_attention")
WIRE = re.compile(r"^nccl")

Span = tuple[float, float]


@dataclass(frozen=True)
class Message:
    """One collective as NCCL recorded it.

    `sent_bytes` counts as layout/cost.py: an all-gather sends its input to n - 1 peers, a
    reduce-scatter n - 1 outputs. 0 if the trace does not say. `group` names the ranks that take
    part. It ran during `span` (microseconds of this rank's clock), of which nothing computed, and
    no earlier message ran, during `alone`.
    """

    name: str
    part: str
    sent_bytes: int
    group: str
    span: Span
    alone: tuple[Span, ...]


@dataclass(frozen=True)
class Split:
    """Where the device time of a step went (milliseconds), and what was sent.

    `computing_ms` holds the parts of COMPUTING. `exposed_ms` is communication while nothing
    computes, by the part whose code started it (ATTENTION: the exchange of keys and their
    gradients; OTHER: gradients of parameters and the like); `wire_ms` all of it, hidden or not.
    """

    wall_ms: float
    computing_ms: dict[str, float]
    exposed_ms: dict[str, float]
    wire_ms: dict[str, float]
    idle_ms: float
    messages: tuple[Message, ...]

    def sent_bytes(self, part: str) -> int:
        """Bytes that this rank sent in code of a part."""
        return sum(message.sent_bytes for message in self.messages if message.part == part)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without the single messages."""
        rounded = {
            name: {part: round(value, 3) for part, value in getattr(self, name).items()}
            for name in ("computing_ms", "exposed_ms", "wire_ms")
        }
        sent = {part: self.sent_bytes(part) for part in (ATTENTION, OTHER)}
        return {
            "wall_ms": round(self.wall_ms, 3),
            **rounded,
            "idle_ms": round(self.idle_ms, 3),
            "sent_bytes": sent,
        }


def split_of(trace: Mapping[str, Any]) -> Split:
    """Returns the split of a whole trace (of one step; `traceEvents` of the exported JSON)."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    part_of = _launching_parts(events)
    kernels = sorted((e for e in events if _on_device(e)), key=lambda e: float(e["ts"]))
    if not kernels:
        zero = dict.fromkeys(COMPUTING, 0.0)
        return Split(0.0, zero, {}, {}, 0.0, ())
    computing: dict[str, float] = dict.fromkeys(COMPUTING, 0.0)
    wires: list[tuple[Mapping[str, Any], str]] = []
    busy: list[Span] = []
    for event in kernels:
        span = _span(event)
        part = part_of.get(event.get("args", {}).get("correlation"), OTHER)
        if WIRE.match(event["name"]):
            wires.append((event, part if part == ATTENTION else OTHER))
            continue
        reach = busy[-1][1] if busy else span[0]
        computing[_kernel_part(event["name"], part)] += max(span[1] - max(span[0], reach), 0.0)
        _extend(busy, span)
    messages = _messages(wires, busy)
    exposed, everything = _wire_times(messages)
    wall = max(_span(e)[1] for e in kernels) - _span(kernels[0])[0]
    idle = wall - sum(computing.values()) - sum(exposed.values())
    return Split(
        wall / 1e3, _in_ms(computing), _in_ms(exposed), _in_ms(everything), idle / 1e3, messages
    )  # fmt: skip


def _in_ms(times_us: Mapping[str, float]) -> dict[str, float]:
    return {part: value / 1e3 for part, value in times_us.items()}


def _span(event: Mapping[str, Any]) -> Span:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _on_device(event: Mapping[str, Any]) -> bool:
    return event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")


def _extend(busy: list[Span], span: Span) -> None:
    """Adds a span that starts no earlier than those before it to a list of disjoint spans."""
    if busy and span[0] <= busy[-1][1]:
        busy[-1] = (busy[-1][0], max(busy[-1][1], span[1]))
    else:
        busy.append(span)


def _kernel_part(name: str, launched_in: str) -> str:
    if FLEX.search(name):
        return ATTENTION
    if launched_in == OTHER and PRODUCT.search(name):
        return LINEARS
    return launched_in


def _launching_parts(events: Iterable[Mapping[str, Any]]) -> dict[Any, str]:
    """The part in whose innermost range each launch happened, by correlation id."""
    ranges: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
    launches: dict[Any, list[tuple[float, Any]]] = defaultdict(list)
    for event in events:
        kind, thread = event.get("cat"), event.get("tid")
        if kind in ("cuda_runtime", "cuda_driver"):
            launches[thread].append((float(event["ts"]), event["args"].get("correlation")))
        elif kind in ("user_annotation", "cpu_op"):
            part = next((part for name, part in RANGES if name.search(event["name"])), "")
            if part:
                ranges[thread].append((*_span(event), part))
    found: dict[Any, str] = {}
    for thread, started in launches.items():
        found.update(_innermost(sorted(ranges[thread]), sorted(started, key=lambda x: x[0])))
    return found


def _innermost(
    ranges: Sequence[tuple[float, float, str]], launches: Iterable[tuple[float, Any]]
) -> dict[Any, str]:
    found, inside, following = {}, list[tuple[float, str]](), 0
    for when, correlation in launches:
        while following < len(ranges) and ranges[following][0] <= when:
            _, end, part = ranges[following]
            inside.append((end, part))
            following += 1
        inside = [(end, part) for end, part in inside if end >= when]
        if inside:
            found[correlation] = inside[-1][1]
    return found


def _messages(
    wires: Iterable[tuple[Mapping[str, Any], str]], busy: Sequence[Span]
) -> tuple[Message, ...]:
    """The messages in the order in which they started; overlapping ones are alone once."""
    starts, reach, found = [lo for lo, _ in busy], float("-inf"), []
    for event, part in wires:
        lo, hi = _span(event)
        alone = _uncovered(max(lo, reach), hi, busy, starts)
        reach = max(reach, hi)
        args = event.get("args", {})
        group = f"{args.get('Process Group Name', '')} {args.get('Process Group Ranks', '')}"
        name = str(args.get("Collective name", "")).lower()
        found.append(
            Message(name or event["name"], part, _sent_bytes(name, args), group, (lo, hi), alone)
        )
    return tuple(found)


def _wire_times(messages: Iterable[Message]) -> tuple[dict[str, float], dict[str, float]]:
    """Exposed and whole communication time by part; overlapping messages count once."""
    exposed: dict[str, float] = {ATTENTION: 0.0, OTHER: 0.0}
    everything, reach = dict(exposed), float("-inf")
    for message in messages:
        lo, hi = message.span
        everything[message.part] += max(hi - max(lo, reach), 0.0)
        reach = max(reach, hi)
        exposed[message.part] += sum(end - start for start, end in message.alone)
    return exposed, everything


def _uncovered(
    lo: float, hi: float, busy: Sequence[Span], starts: Sequence[float]
) -> tuple[Span, ...]:
    """What is left of [lo, hi) without the disjoint spans `busy`."""
    found = []
    for start, end in busy[max(bisect_right(starts, lo) - 1, 0) :]:
        if start >= hi:
            break
        if start > lo:
            found.append((lo, start))
        lo = max(lo, end)
    return (*found, (lo, hi)) if lo < hi else tuple(found)


_BYTES = {"BFloat16": 2, "Half": 2, "Float": 4, "Double": 8, "Long": 8, "Int": 4, "Byte": 1}


def _sent_bytes(name: str, args: Mapping[str, Any]) -> int:
    size = int(args.get("Group size", 0))
    width = _BYTES.get(str(args.get("dtype", "")), 0)
    elements = 0
    if "allgather" in name:
        elements = int(args.get("In msg nelems", 0)) * (size - 1)
    elif "reduce_scatter" in name:
        elements = int(args.get("Out msg nelems", 0)) * (size - 1)
    elif "all_to_all" in name or "alltoall" in name:
        elements = int(args.get("In msg nelems", 0))
    return elements * width
