"""A trace holds every span of the traced ranks, a drawing is drawn, the command does both."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from megatron_bp.layout.run_shape import BatchShape, Run, Topology
from megatron_bp.planning.events import Lane, Timeline
from megatron_bp.planning.hardware import H200
from megatron_bp.planning.predict import Cluster
from megatron_bp.planning.shapes import model_named
from megatron_bp.planning.simulate import simulate_step
from megatron_bp.planning.simulate_program import Scenario
from megatron_bp.planning.trace import trace_events, write_trace

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def line() -> Timeline:
    batch = BatchShape(2**16, 32, global_batch=1)
    run = Run(model_named("nemotron-3b"), batch, Topology(context=4, shards=4))
    return simulate_step(Scenario(run, Cluster(H200, 2)), traced=(0, 2))


def test_a_trace_has_every_span_in_microseconds(line: Timeline, tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    assert write_trace(path, line.spans) == len(trace_events(line.spans))
    events = json.loads(path.read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == sum(span.end > span.start for span in line.spans)
    assert {event["pid"] for event in complete} == {0, 2}
    ends = [event["ts"] + event["dur"] for event in complete if event["pid"] == 2]
    assert max(ends) == pytest.approx(1e6 * line.end[2])
    named = {e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert named == {lane.value for lane in Lane}


def test_spans_of_a_lane_do_not_overlap_and_fill_its_busy_time(line: Timeline) -> None:
    for rank in (0, 2):
        for lane in Lane:
            spans = [s for s in line.spans if (s.rank, s.lane) == (rank, lane)]
            assert all(a.end <= b.start for a, b in pairwise(spans))
            busy = sum(span.end - span.start for span in spans)
            known = line.busy[lane][rank] if lane in line.busy else 0.0
            assert busy == pytest.approx(known, rel=1e-9)


def test_a_drawing_is_made_and_its_bars_add_up(line: Timeline, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="draws")
    from megatron_bp.planning.drawing import draw, parts_of

    total = np.sum(list(parts_of(line).values()), axis=0)
    np.testing.assert_allclose(total, line.seconds, rtol=1e-12)
    draw(tmp_path / "step.png", line, "a step")
    assert (tmp_path / "step.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match="nothing was traced"):
        draw(tmp_path / "none.png", Timeline(line.end), "a step")


def command(*flags: str) -> subprocess.CompletedProcess[str]:
    """Runs tools/simulate_step.py."""
    base = [sys.executable, str(ROOT / "tools/simulate_step.py"), "--model", "nemotron-3b"]
    return subprocess.run(
        [*base, "--length", "65536", *flags], capture_output=True, text=True, cwd=ROOT
    )


def test_the_command_prints_and_writes_what_was_simulated(tmp_path: Path) -> None:
    trace = tmp_path / "step.json"
    degrees = ("--context", "4", "--shards", "4", "--data", "2", "--schedule", "blocking")
    done = command(*degrees, "--slow", "3:1.5", "--ranks", "3,0", "--trace", str(trace))
    assert done.returncode == 0, done.stderr
    assert "8 ranks" in done.stdout
    assert "imbalance 1.4" in done.stdout
    assert "assumed: network" in done.stdout
    assert len(json.loads(trace.read_text())["traceEvents"]) > 100


def test_the_command_refuses_what_cannot_be_laid_out() -> None:
    done = command("--context", "4", "--shards", "3")
    assert (done.returncode, done.stdout) == (2, "")
    assert "shards=3 must divide context=4" in done.stderr
    assert "traced rank 4 does not exist" in command("--ranks", "4").stderr
