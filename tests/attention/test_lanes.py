"""Launches are finished in order, at most one of them late; the streams are stand-ins here."""

from typing import Any, cast

import pytest
import torch

from megatron_bp.attention import lanes
from megatron_bp.attention.lanes import SHORT, InARow, Lanes, queue_on


class Stream:
    """Notes what waits for what."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: "Stream") -> None:
        """All of the other stream so far."""
        self.log.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> str:
        """An event called like the stream."""
        return self.name

    def wait_event(self, event: str) -> None:
        """One event."""
        self.log.append(f"{self.name} waits for {event}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happened, in order."""
    found: list[str] = []
    sides = cast(Any, (Stream("a", found), Stream("b", found)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream("main", found))
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: found.append(f"on {stream.name}"))
    monkeypatch.setattr(lanes, "_streams", lambda _: sides)
    return found


def start(queue: Any, log: list[str], name: str, num_pairs: int = SHORT.start) -> None:
    """Runs a launch that notes when it starts and when it is finished."""

    def launch() -> Any:
        log.append(f"start {name}")
        return lambda: log.append(f"finish {name}")

    queue.run(launch, num_pairs)


def test_a_launch_is_finished_after_the_next_one_started(log: list[str]) -> None:
    queue = Lanes(torch.device("cuda"))
    for name in "123":
        start(queue, log, name)
    queue.drain()
    assert log == [
        *("a waits for main", "on a", "start 1", "on main"),
        *("b waits for main", "on b", "start 2", "on main", "main waits for a", "finish 1"),
        *("a waits for main", "on a", "start 3", "on main", "main waits for b", "finish 2"),
        *("main waits for a", "finish 3"),
    ]


def test_a_large_launch_stays_on_the_callers_stream_and_keeps_the_order(log: list[str]) -> None:
    queue = Lanes(torch.device("cuda"))
    start(queue, log, "1")
    start(queue, log, "large", SHORT.stop)
    queue.drain()
    assert log[4:] == ["start large", "main waits for a", "finish 1", "finish large"]


def test_a_launch_that_fails_leaves_the_callers_stream_current(log: list[str]) -> None:
    def launch() -> Any:
        raise RuntimeError("no such kernel")

    with pytest.raises(RuntimeError, match="no such kernel"):
        Lanes(torch.device("cuda")).run(launch, SHORT.start)
    assert log == ["a waits for main", "on a", "on main"]


def test_without_a_gpu_every_launch_is_finished_at_once() -> None:
    found: list[str] = []
    queue = queue_on(torch.device("cpu"), True)
    assert isinstance(queue, InARow)
    for name in "12":
        start(queue, found, name)
    assert found == ["start 1", "finish 1", "start 2", "finish 2"]
