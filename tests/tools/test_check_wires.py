"""The check over real wires passes for exact layouts, here on gloo, and fails for broken ones."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_bp.mcore.nccl_exactness import LAYOUTS, inexact

TOOL = Path(__file__).parents[2] / "tools/check_wires.py"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def run(*given: str, ranks: int = 0) -> subprocess.CompletedProcess:
    """The tool, by itself or on some ranks."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *(launch if ranks else []), str(TOOL), *given]
    return subprocess.run(command, env=ENVIRONMENT, timeout=240, capture_output=True, text=True)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("references") / "references.pt"
    assert run("--write-references", str(path)).returncode == 0
    return path


def test_layouts_on_two_ranks_equal_one_process(references: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    given = ["--references", str(references), "--json", str(path), "--dtype", "fp64", "fp32"]
    found = run(*given, "--layout", "csbp2", "tp2_sp", "pp2", "ep2", ranks=2)
    assert found.returncode == 0, found.stdout + found.stderr
    rows = json.loads(path.read_text())
    assert {row["layout"] for row in rows} == {"csbp2", "tp2_sp", "pp2", "ep2"}
    assert "0 not exact" in found.stdout


def test_errors_over_the_bound_are_named() -> None:
    row = {"layout": "csbp2", "problem": "standard", "loss_error": 0.0}
    good = {**row, "dtype": "fp64", "grad_error": 1e-12}
    wrong = {**row, "dtype": "fp64", "grad_error": 1e-9}
    nothing = {**row, "dtype": "fp64", "grad_error": float("nan")}
    assert inexact([good], []) == []
    assert len(inexact([wrong, nothing], [])) == 2
    assert "csbp2 standard fp64" in inexact([wrong], [])[0]


def test_bf16_is_measured_against_one_rank() -> None:
    row = {"layout": "csbp2", "problem": "standard", "dtype": "bf16", "loss_error": 0.0}
    one = [{**row, "layout": "one", "grad_error": 0.01}]
    assert inexact([{**row, "grad_error": 0.014}], one) == []
    assert len(inexact([{**row, "grad_error": 0.021}], one)) == 1
    assert len(inexact([{**row, "grad_error": 0.001}], [])) == 1
    assert inexact(one, []) == []


def test_a_device_that_rounds_more_is_the_yardstick_in_fp64_too() -> None:
    row = {"layout": "csbp2", "problem": "standard", "dtype": "fp64", "loss_error": 0.0}
    one = [{**row, "layout": "one", "grad_error": 2e-7}]
    assert inexact([{**row, "grad_error": 2.5e-7}], one) == []
    assert len(inexact([{**row, "grad_error": 5e-7}], one)) == 1
    assert len(inexact(one, [])) == 1


def test_layouts_fill_their_world() -> None:
    for world, layouts in LAYOUTS.items():
        assert {layout.world_size for layout in layouts.values()} == {world}
