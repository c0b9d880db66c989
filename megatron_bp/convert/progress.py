"""The progress interface that long conversions report to; the command line draws the bar.

Specified by tests/convert/test_command.py.
"""

from __future__ import annotations

from typing import Protocol


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
