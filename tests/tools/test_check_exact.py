"""Every layout trains as one process with a dense mask does, and the check can fail."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_check(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/check_exact.py"), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=ROOT)


@pytest.mark.slow
def test_every_layout_is_exact_in_fp64(tmp_path: Path) -> None:
    done = run_check("--layout", "all", "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["limit"] == 1e-10  # fp64 rounding over two layers, with room
    assert len(written["cases"]) > 140
    assert max(case["grad_error"] for case in written["cases"]) <= 1e-10
    modes = {(case["context"], case["block"]) for case in written["cases"]}
    assert modes == {(1, 1), (2, 2), (4, 4), (1, 2), (1, 4), (2, 4), (2, 1), (4, 1)}
    for axis in ("tensor", "pipeline", "data", "virtual", "expert", "overlap"):
        assert any(case[axis] > 1 or case[axis] is True for case in written["cases"]), axis


@pytest.mark.slow
def test_fp32_is_as_exact_as_fp32_can_be() -> None:
    done = run_check("--layout", "csbp2", "--layout", "tp2_sp_csbp2", "--dtype", "fp32")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_a_dropped_share_of_the_gradient_collective_is_caught() -> None:
    done = run_check("--layout", "recompute_csbp2", "--break")
    assert done.returncode == 1
    assert "2 cases, 2 not exact" in done.stdout


def test_packed_documents_train_as_each_of_them_alone() -> None:
    """One process; the layouts of several are among those of the slow test."""
    done = run_check("--layout", "documents1")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "5 cases, 0 not exact" in done.stdout
