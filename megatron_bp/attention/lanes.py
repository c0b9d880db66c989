"""Runs launches on two side streams in turn, so that one fills what the other leaves idle.

A launch ends with a partly filled wave and has passes before and after it that wait for memory.
Measured (docs/bench/attention.md): 2.5 percent of a layer under a window. Without one launches are
long and the device is at its power limit: nothing is gained, and starting them costs the CPU more.
What a launch leaves to do (merging, adding) runs on the caller's stream, in the order of the
launches, so results keep their bits.
Specified by tests/attention/test_lanes.py and test_gpu_lanes.py.
"""

from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

import torch

Finish = Callable[[], None]
"""What is left to do with a launch's results, on the caller's stream."""
Launch = Callable[[], Finish]
SHORT = range(2**17, 2**26)
"""Rows times keys of launches that run two at a time. Larger ones fill the device by themselves,
and their buffers would be kept for a side stream; smaller ones end before the next is prepared."""


class Queue(Protocol):
    """Takes launches in order."""

    def run(self, launch: Launch, num_pairs: int) -> None:
        """Starts `launch`, which allows at most `num_pairs` pairs, and finishes it some time."""
        ...

    def drain(self) -> None:
        """Finishes everything that was started."""
        ...


class InARow:
    """One launch after another, each finished at once."""

    def run(self, launch: Launch, num_pairs: int) -> None:
        """See Queue."""
        del num_pairs
        launch()()

    def drain(self) -> None:
        """See Queue."""


@lru_cache(maxsize=64)
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


class Lanes:
    """Two launches at a time. A launch sees everything that is finished before it starts.

    Memory: what a launch allocates belongs to its side stream. It is freed only after `finish` is
    on the caller's stream, and the side stream waits for that before it allocates again.
    """

    def __init__(self, device: torch.device) -> None:
        self._main = torch.cuda.current_stream(device)
        self._streams = _streams(device)
        self._running: deque[tuple[torch.cuda.Event, Finish]] = deque()
        self._count = 0

    def run(self, launch: Launch, num_pairs: int) -> None:
        """Starts `launch` beside the one before it; finishes the one before that."""
        if num_pairs not in SHORT:
            finish = launch()
            self.drain()
            finish()
            return
        lane = self._streams[self._count % 2]
        self._count += 1
        lane.wait_stream(self._main)
        # Not torch.cuda.stream: asking for devices and streams, it costs more than a launch.
        torch.cuda.set_stream(lane)
        try:
            finish = launch()
        finally:
            torch.cuda.set_stream(self._main)
        self._running.append((lane.record_event(), finish))
        if len(self._running) > 1:
            self._finish_one()

    def drain(self) -> None:
        """See Queue."""
        while self._running:
            self._finish_one()

    def _finish_one(self) -> None:
        done, finish = self._running.popleft()
        self._main.wait_event(done)
        finish()


def queue_on(device: torch.device, beside: bool) -> Queue:
    """Two lanes on a GPU if launches shall run beside one another; else one after another."""
    return Lanes(device) if beside and device.type == "cuda" else InARow()
