"""What is compared is timed in turn, after warming up, and its median is reported."""

from collections.abc import Callable

import pytest
import torch

from megatron_bp.attention.timing import Clock


class FakeEvent:
    """An event whose time is the number of runs so far."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = 0.0

    def record(self) -> None:
        """Takes the time."""
        self.at = FakeEvent.now

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def elapsed_time(self, other: "FakeEvent") -> float:
        """Milliseconds from here to `other`."""
        return other.at - self.at


def test_runs_take_turns_and_medians_are_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    order: list[str] = []

    def run(name: str, cost: float) -> Callable[[], object]:
        def once() -> None:
            order.append(name)
            FakeEvent.now += cost + (100.0 if len(order) == 9 else 0.0)  # one slow run

        return once

    assert Clock(3).medians_ms([run("a", 2.0), run("b", 5.0)]) == [2.0, 5.0]
    assert "".join(order[:6]) == "aaabbb"
    assert [set(order[i : i + 2]) for i in (6, 8, 10)] == 3 * [{"a", "b"}]


def test_a_burst_is_as_many_runs_as_its_time_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    count = 0

    def run() -> None:
        nonlocal count
        count += 1
        FakeEvent.now += 4.0

    assert Clock(5, burst_ms=40.0).medians_ms([run]) == [4.0]
    assert count == 3 + 5 * 10
