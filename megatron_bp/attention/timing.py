"""Times of device work: what is compared is timed in turn, because a device slows as it warms.

Specified by tests/attention/test_timing.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

Run = Callable[[], object]
WARM_UPS = 2


@dataclass(frozen=True)
class Clock:
    """How often to time."""

    repeats: int

    def medians_ms(self, runs: Sequence[Run]) -> list[float]:
        """Median milliseconds of each run between device events, after two warm-up runs.

        Every round takes each run once, so that all share the device's temperature and clocks.
        """
        for run in runs:
            for _ in range(WARM_UPS):
                run()
        times: list[list[float]] = [[] for _ in runs]
        for _ in range(self.repeats):
            for run, mine in zip(runs, times, strict=True):
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                run()
                stop.record()
                stop.synchronize()
                mine.append(start.elapsed_time(stop))
        return [sorted(mine)[self.repeats // 2] for mine in times]


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
