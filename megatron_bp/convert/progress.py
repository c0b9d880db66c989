"""The progress interface that long conversions report to, and the line that shows it.

Specified by tests/convert/test_progress.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TextIO


class Progress(Protocol):
    """Receives the steps of a conversion. Units: bytes."""

    def start(self, label: str, total_bytes: int) -> None:
        """Begins a step of that size."""

    def advance(self, num_bytes: int) -> None:
        """Adds to the current step."""


class Silent:
    """A `Progress` that shows nothing."""

    def start(self, label: str, total_bytes: int) -> None:
        """Does nothing."""

    def advance(self, num_bytes: int) -> None:
        """Does nothing."""


class ProgressLine:
    """A `Progress` shown as text: part done, bytes, bytes/s and time left.

    On a terminal one line is redrawn five times a second, elsewhere a line is added every ten
    seconds.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        """Writes to `stream`; `clock` counts seconds."""
        self._stream, self._clock = stream, clock
        self._redraw = stream.isatty()
        self._label, self._total, self._done = "", 0, 0
        self._began = self._shown = 0.0

    def start(self, label: str, total_bytes: int) -> None:
        """Begins a step; the one before is ended."""
        self.close()
        self._label, self._total, self._done = label, total_bytes, 0
        self._began = self._shown = self._clock()

    def advance(self, num_bytes: int) -> None:
        """Adds bytes and shows the line when it is time."""
        self._done += num_bytes
        if self._clock() - self._shown >= (0.2 if self._redraw else 10.0):
            self._show(end="" if self._redraw else "\n")

    def close(self) -> None:
        """Ends the current step with its last line."""
        if self._label:
            self._show(end="\n")
        self._label = ""

    def _show(self, end: str) -> None:
        self._shown = self._clock()
        seconds = max(self._shown - self._began, 1e-6)
        speed = self._done / seconds
        left = (self._total - self._done) / speed if speed else 0.0
        part = 100 * self._done // self._total if self._total else 100
        text = (
            f"{self._label}: {part}% {_bytes(self._done)} of {_bytes(self._total)}, "
            f"{_bytes(speed)}/s, {_time(seconds)} gone, {_time(left)} left"
        )
        print(f"\r{text}\x1b[K" if self._redraw else text, end=end, file=self._stream, flush=True)


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
