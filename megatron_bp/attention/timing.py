"""Times of device work: what is compared is timed in turn, because a device slows as it warms.

Specified by tests/attention/test_timing.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from time import perf_counter

import torch

Run = Callable[[], object]
WARM_UPS = 2


@dataclass(frozen=True)
class Clock:
    """How often to time, and for how many milliseconds at least each time (0: one run)."""

    repeats: int
    burst_ms: float = 0.0

    def medians_ms(self, runs: Sequence[Run]) -> list[float]:
        """Median milliseconds of each run between device events, after two warm-up runs.

        Every round takes each run once, in an order drawn anew, and back to back for `burst_ms`: a
        device at its power limit needs tens of milliseconds to settle, and meanwhile what ran
        before decides its clocks.
        """
        counts = [self._count(run) for run in runs]
        times: list[list[float]] = [[] for _ in runs]
        order, draw = list(range(len(runs))), Random(0)
        for _ in range(self.repeats):
            draw.shuffle(order)
            for at in order:
                times[at].append(_mean_ms(runs[at], counts[at]))
        return [sorted(mine)[self.repeats // 2] for mine in times]

    def _count(self, run: Run) -> int:
        """Warms up; returns how many runs make a burst."""
        for _ in range(WARM_UPS):
            run()
        return max(1, round(self.burst_ms / _mean_ms(run, 1)))


def _mean_ms(run: Run, count: int) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / count


def as_graph(run: Run) -> Run:
    """A CUDA graph of `run` to replay, without the gaps between launches."""
    for _ in range(WARM_UPS):
        run()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def host_ms(run: Run, repeats: int = 3) -> float:
    """Median time until `run` returns, the device idle before: what the CPU needs to start it."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = perf_counter()
        run()
        times.append(1e3 * (perf_counter() - start))
    return sorted(times)[repeats // 2]
