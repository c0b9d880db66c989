"""Runs agree only if every step is in both and the losses are close."""

import subprocess
import sys
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

TOOL = Path(__file__).parents[2] / "tools/compare_runs.py"


def compare(tmp_path: Path, *runs: dict[int, float]) -> subprocess.CompletedProcess[str]:
    for index, run in enumerate(runs):
        with SummaryWriter(str(tmp_path / str(index))) as writer:
            for step, loss in run.items():
                writer.add_scalar("bdlm loss", loss, step)
    folders = [str(tmp_path / str(index)) for index in range(len(runs))]
    command = [sys.executable, str(TOOL), *folders, "--limit", "1e-5"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_agrees_when_later_runs_continue_the_first(tmp_path: Path) -> None:
    done = compare(tmp_path, {1: 2.0, 2: 1.5, 3: 1.0}, {1: 2.0, 2: 1.5}, {3: 1.000001})
    assert done.returncode == 0
    assert "largest relative difference 9.5e-07" in done.stdout  # 1e-6 in float32


def test_refuses_a_loss_that_differs(tmp_path: Path) -> None:
    assert compare(tmp_path, {1: 2.0, 2: 1.5}, {1: 2.0, 2: 1.501}).returncode == 1


def test_refuses_a_missing_step(tmp_path: Path) -> None:
    done = compare(tmp_path, {1: 2.0, 2: 1.5}, {1: 2.0})
    assert done.returncode == 1
    assert "steps differ: [1, 2]" in done.stdout
