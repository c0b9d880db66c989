"""Draws a simulation: what traced ranks do over time, and where each rank's step went.

Specified by tests/planning/test_simulate_trace.py.
"""

from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from megatron_bp.planning.events import Lane, Span, Timeline

# The first word of an operation's name that is found decides its colour.
COLOURS = MappingProxyType(
    {
        "attention": "#2f6db3",
        "gather": "#e08a2e",
        "reduce": "#c2452f",
        "routed": "#8c6bb1",
        "experts": "#5aa7a7",
        "gradients": "#7a5230",
        "values": "#b59a7a",
        "rows": "#d9b83b",
        "head": "#1b3a5c",
        "optimizer": "#444444",
        "": "#8fb8de",  # matrices and the rest
    }
)
PARTS = ("#8fb8de", "#e08a2e", "#d9b83b", "#8c6bb1", "#7a5230", "#c2452f", "#5aa7a7")
SHOWN_OPS = 14  # computations of the first rank that the close-up shows


def colour_of(name: str) -> str:
    """The colour of an operation."""
    return next(colour for word, colour in COLOURS.items() if word in name)


def close_up(spans: Sequence[Span]) -> tuple[float, float]:
    """Start and end of a few operations of the first traced rank, a third into the step."""
    first = min(span.rank for span in spans)
    ops = [span for span in spans if span.rank == first and span.lane is Lane.COMPUTE]
    at = len(ops) // 3
    return ops[at].start, ops[min(at + SHOWN_OPS, len(ops) - 1)].end


def parts_of(line: Timeline) -> dict[str, np.ndarray]:
    """Where each rank's step went, in seconds [W]; the parts add up to the step on every rank."""
    parts = {"compute": line.busy[Lane.COMPUTE].copy()}
    for title, table in (("exposed", line.exposed), ("waiting", line.waited)):
        for cause, values in table.items():
            if values.max() > 0:
                parts[f"{title}: {cause}"] = values
    parts["idle at the end"] = line.seconds - np.sum(list(parts.values()), axis=0)
    return parts


def draw(path: Path, line: Timeline, title: str) -> None:
    """Writes a PNG of a timeline that has spans.

    Raises: ValueError if no rank was traced.
    """
    if not line.spans:
        raise ValueError("nothing was traced; trace at least one rank, for example rank 0.")
    from matplotlib.figure import Figure

    ranks = sorted({span.rank for span in line.spans})
    figure = Figure(figsize=(15, 4.5 + 0.9 * len(ranks)), layout="constrained")
    whole, near, bars = figure.subplots(3, 1, height_ratios=[len(ranks), len(ranks), 3.5])
    _lanes(whole, line.spans, ranks, (0.0, line.seconds))
    whole.set_title(title, loc="left")
    _lanes(near, line.spans, ranks, close_up(line.spans))
    near.set_title("close-up", loc="left")
    _legend(near)
    below = np.zeros(len(line.end))
    for number, (name, values) in enumerate(parts_of(line).items()):
        bars.fill_between(
            np.arange(-0.5, len(below)),
            np.append(below, below[-1]) * 1e3,
            np.append(below + values, below[-1] + values[-1]) * 1e3,
            step="post",
            label=name,
            color=PARTS[number % len(PARTS)],
            alpha=1.0 if number < len(PARTS) else 0.5,
            linewidth=0,
        )
        below = below + values
    bars.set(xlabel="rank", ylabel="ms", xlim=(-0.5, len(below) - 0.5), ylim=(0, None))
    bars.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)


def _lanes(axes: Any, spans: Sequence[Span], ranks: list[int], show: tuple[float, float]) -> None:
    """One row for each lane of each rank, between two times."""
    used = {(span.rank, span.lane) for span in spans}
    rows = [(rank, lane) for rank in ranks for lane in Lane if (rank, lane) in used]
    for number, (rank, lane) in enumerate(rows):
        here = [
            span
            for span in spans
            if (span.rank, span.lane) == (rank, lane)
            and span.end > show[0]
            and span.start < show[1]
        ]
        axes.broken_barh(
            [(1e3 * span.start, 1e3 * (span.end - span.start)) for span in here],
            (number - 0.4, 0.8),
            facecolors=[colour_of(span.name) for span in here],
            edgecolor="white" if len(here) < 100 else "face",  # short ones must stay visible
            linewidth=0.3,
        )
    axes.set_yticks(range(len(rows)), [f"{rank} {lane.value}" for rank, lane in rows], fontsize=7)
    axes.set(xlim=(1e3 * show[0], 1e3 * show[1]), xlabel="ms")
    axes.invert_yaxis()


def _legend(axes: Any) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=c, label=word or "matrices") for word, c in COLOURS.items()]
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
