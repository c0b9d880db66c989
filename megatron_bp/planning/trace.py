"""Writes the spans of a simulation as a Chrome trace, which Perfetto and chrome://tracing read.

A process is a rank, a thread a lane. Source: Trace Event Format, complete events ("ph": "X", times
in microseconds). Specified by tests/planning/test_simulate_trace.py.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_bp.planning.events import Lane, Span


def trace_events(spans: Iterable[Span]) -> list[dict[str, Any]]:
    """The events of spans: names of ranks and lanes, then one complete event a span."""
    spans = list(spans)
    lanes = {lane: number for number, lane in enumerate(Lane)}
    events: list[dict[str, Any]] = []
    for rank in sorted({span.rank for span in spans}):
        events.append(_named("process_name", rank, 0, f"rank {rank}"))
        events += [_named("thread_name", rank, n, lane.value) for lane, n in lanes.items()]
    for span in sorted(spans, key=lambda span: (span.rank, span.start)):
        if span.end > span.start:
            events.append(
                {
                    "name": span.name,
                    "ph": "X",
                    "ts": 1e6 * span.start,
                    "dur": 1e6 * (span.end - span.start),
                    "pid": span.rank,
                    "tid": lanes[span.lane],
                }
            )
    return events


def _named(what: str, rank: int, lane: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": lane, "args": {"name": name}}


def write_trace(path: Path, spans: Iterable[Span]) -> int:
    """Writes a trace file; the number of its events."""
    events = trace_events(spans)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return len(events)
