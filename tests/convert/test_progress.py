"""Specifies megatron_bp/convert/progress.py."""

from __future__ import annotations

import io

from megatron_bp.convert.progress import ProgressLine


def test_a_log_gets_a_line_with_speed_and_time_left_every_ten_seconds():
    now = [0.0]
    stream = io.StringIO()
    line = ProgressLine(stream, lambda: now[0])
    line.start("converting", 100 * 2**20)
    for _ in range(3):
        now[0] += 6
        line.advance(10 * 2**20)
    now[0] += 6
    line.advance(70 * 2**20)
    line.close()
    assert stream.getvalue().splitlines() == [
        "converting: 20% 20 MiB of 100 MiB, 2 MiB/s, 0:12 gone, 0:48 left",
        "converting: 100% 100 MiB of 100 MiB, 4 MiB/s, 0:24 gone, 0:00 left",
        "converting: 100% 100 MiB of 100 MiB, 4 MiB/s, 0:24 gone, 0:00 left",
    ]


def test_a_terminal_redraws_one_line():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    now = [0.0]
    stream = Terminal()
    line = ProgressLine(stream, lambda: now[0])
    line.start("x", 3 * 2**40)
    for _ in range(10):
        now[0] += 0.125
        line.advance(2**30)
    line.close()
    assert stream.getvalue().count("\r") == 6  # five times a second, and the end
    assert stream.getvalue().count("\n") == 1
    assert "0% 10.00 GiB of 3072.00 GiB, 8.00 GiB/s, 0:01 gone, 6:23 left" in stream.getvalue()


def test_an_empty_step_is_done():
    stream = io.StringIO()
    line = ProgressLine(stream, lambda: 0.0)
    line.start("nothing", 0)
    line.close()
    assert stream.getvalue().startswith("nothing: 100% 0 B of 0 B, ")
