"""Runs short launches on two side streams in turn, so that one fills what the other leaves idle.

A launch ends with a partly filled wave and has passes before and after it that wait for memory; in
layers under a window that is a tenth of the time. What a launch leaves to do (merging, adding) runs
on the caller's stream, in the order of the launches, so results keep their bits.
Specified by tests/attention/test_gpu_lanes.py.
"""

from collections import deque
from collections.abc import Callable
from functools import lru_cache

import torch

Finish = Callable[[], None]
"""What is left to do with a launch's results, on the caller's stream."""


@lru_cache(maxsize=64)
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


class Lanes:
    """Two launches at a time. Every launch sees all that the caller's stream was given before it.

    Memory: what a launch allocates belongs to its side stream. It is freed only after `finish` is
    on the caller's stream, and the side stream waits for that before it allocates again.
    """

    def __init__(self, device: torch.device) -> None:
        self._main = torch.cuda.current_stream(device)
        self._streams = _streams(device)
        self._running: deque[tuple[torch.cuda.Event, Finish]] = deque()
        self._count = 0

    def run(self, launch: Callable[[], Finish]) -> None:
        """Starts `launch` beside the one before it; finishes the one before that."""
        lane = self._streams[self._count % 2]
        self._count += 1
        lane.wait_stream(self._main)
        with torch.cuda.stream(lane):
            finish = launch()
            self._running.append((lane.record_event(), finish))
        if len(self._running) > 1:
            self._finish_one()

    def drain(self) -> None:
        """Finishes everything that was started."""
        while self._running:
            self._finish_one()

    def _finish_one(self) -> None:
        done, finish = self._running.popleft()
        self._main.wait_event(done)
        finish()
