"""The benchmark computes what it says: the layer's own results, on its plan's pairs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_bp.attention import bench
from megatron_bp.attention.contract import Strategy

SMALL = bench.Shape(4, 2, 8, block_size=4)
CPU = torch.device("cpu")


@pytest.mark.parametrize("window", [0, 11])
@pytest.mark.parametrize("strategy", Strategy)
def test_a_layer_without_wires_equals_the_dense_kernel(strategy: Strategy, window: int) -> None:
    case = bench.Case(bench.Shape(4, 2, 8, 4, window), 64, 2, 1, num_views=2)
    found = bench.errors(bench.Layer(case, strategy, "dense"), CPU, torch.float64)
    assert max(found.values()) < 1e-14


def test_errors_show_a_wrong_scale() -> None:
    case = bench.Case(SMALL, 64, 2, 1)
    layer = bench.Layer(case, Strategy.NATIVE, "dense")
    x = bench.random_inputs(case, CPU, torch.float64)
    wrong = layer.forward(x._replace(q=x.q * 1.01)).out
    assert (wrong - layer.forward(x).out).norm() > 1e-4 * wrong.norm()


def test_tflops_count_allowed_pairs_only() -> None:
    result = bench.Result("x", 2.0, 5.0, 10**9, 0.0, 4 * 4 * 8, 1.0, False).as_dict()
    assert result["forward_tflops"] == pytest.approx(4 * 4 * 8 * 1e9 / 2e-3 / 1e12)
    assert result["backward_tflops"] == pytest.approx(2.5 * 4 * 4 * 8 * 1e9 / 5e-3 / 1e12)


def test_the_command_plots_what_an_earlier_run_wrote(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    line = {"shape": "a", "run": "flex", "rank": 3}
    results = [{**line, "length": 1024, "tflops": 1.0}, {**line, "length": 2048, "failed": "no"}]
    (tmp_path / "a.json").write_text(json.dumps({"results": results}))
    tool = Path(__file__).parents[2] / "tools/bench_attention.py"
    arguments = ["--read", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]
    subprocess.run([sys.executable, str(tool), *arguments], check=True)
    assert (tmp_path / "a.png").stat().st_size > 1000
