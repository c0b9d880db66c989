"""Speeds come from bench files; built-in ones are those of the repository's own."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from megatron_bp.layout.model_shape import AttentionShape, dense_model
from megatron_bp.layout.run_shape import BatchShape, Run, Topology
from megatron_bp.planning.cluster import Cluster
from megatron_bp.planning.hardware import (
    GIB,
    H200,
    HARDWARE,
    Link,
    calibrated,
    hardware_named,
)
from megatron_bp.planning.predict import Schedule, layer_time

BENCH = Path(__file__).parents[2] / "docs" / "bench"


def test_a_link_interpolates_between_its_points() -> None:
    link = Link(((100.0, 10.0), (200.0, 30.0)), latency_s=0.0)
    assert [link.speed(size) for size in (1, 100, 150, 200, 999)] == [10, 10, 20, 30, 30]
    assert link.seconds(0) == 0
    assert link.seconds(100) == pytest.approx(100 / (10 * GIB))
    assert replace(link, latency_s=1.0).seconds(1) > 1


def test_unknown_head_sizes_borrow_the_nearest_and_say_so() -> None:
    near = H200.kernel_for(AttentionShape(8, 8, 64))
    assert near.assumed
    assert near.head_size == 64
    assert near.forward == 667.0
    known = H200.kernel_for(AttentionShape(32, 8, 128))
    assert not known.assumed
    assert H200.kernel_for(AttentionShape(16, 8, 256, window=9)).backward == 214.0


@pytest.mark.parametrize(
    ("shape", "length", "attention"),
    [
        ("nemotron-8b", 262144, AttentionShape(32, 8, 128)),
        ("qwen3.5-27b", 65536, AttentionShape(24, 4, 256)),
    ],
)
def test_built_in_kernels_are_within_3_percent_of_the_bench_medians(
    shape: str, length: int, attention: AttentionShape
) -> None:
    record = json.loads((BENCH / "attention_h200.json").read_text())
    results = [
        result
        for run in record["runs"]
        for result in run["results"]
        if (result.get("shape"), result.get("length")) == (shape, length)
        and result.get("name") == "native/flash4"
        and "forward_tflops" in result
    ]
    assert len(results) >= 2
    speed = H200.kernel_for(attention)
    for mine, name in ((speed.forward, "forward_tflops"), (speed.backward, "backward_tflops")):
        assert mine == pytest.approx(median(r[name] for r in results), rel=0.03)


@pytest.mark.parametrize(
    ("length", "forward_ms", "backward_ms"),
    [
        (16384, 0.957, 2.789),
        (32768, 3.502, 9.903),
        (65536, 13.57, 37.43),
        (131072, 54.99, 141.7),
        (262144, 211.7, 568.6),
    ],
)
def test_short_samples_take_what_a_pass_costs_beside_its_pairs(
    length: int, forward_ms: float, backward_ms: float
) -> None:
    """Eight ranks, 32/8 heads (docs/bench/attention.md, run C); seen: -3.3 to +1.4 %."""
    model = dense_model("8b", 1, 4096, 14336, AttentionShape(32, 8, 128), 131072)
    run = Run(model, BatchShape(length, 32), Topology(context=8, shards=8))
    layer = layer_time(run, model.layers[0][0], Cluster(H200), Schedule.OVERLAPPED)
    assert 1e3 * layer.attention_forward == pytest.approx(forward_ms, rel=0.035)
    assert 1e3 * layer.attention_backward == pytest.approx(backward_ms, rel=0.035)


def test_the_loss_bench_gives_matrix_speeds() -> None:
    gpu = calibrated(replace(H200, matmul_tflops=1.0), [BENCH / "loss_h200.json"])
    assert gpu.matmul_tflops == pytest.approx(H200.matmul_tflops, rel=0.01)
    assert gpu.head_tflops == pytest.approx(H200.head_tflops, rel=0.01)


def test_a_bench_file_replaces_kernels_of_its_shapes_only(tmp_path: Path) -> None:
    line = {
        "shape": "nemotron-14b",
        "length": 4096,
        "run": "native/sdpa",
        "tflops": 10.0,
        "forward_tflops": 12.0,
        "backward_tflops": 9.0,
    }
    failed = {"shape": "nemotron-14b", "length": 8192, "run": "native/te", "failed": "no"}
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"results": [line, failed]}))
    gpu = calibrated(H200, [path])
    speed = gpu.kernel_for(AttentionShape(32, 8, 128))
    assert (speed.kernel, speed.forward, speed.backward) == ("sdpa", 12.0, 9.0)
    assert gpu.kernel_for(AttentionShape(24, 4, 256)).forward == 703.0


def test_the_repositorys_bench_file_can_be_given_whole() -> None:
    gpu = calibrated(H200, [BENCH / "attention_h200.json"])
    assert gpu.kernel_for(AttentionShape(32, 8, 128)).forward == pytest.approx(667, rel=0.05)


def test_numbers_may_be_given_by_field(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    given = {"memory_gib": 80, "network_link": [[1e9, 90.0], [1e6, 10.0]]}
    path.write_text(json.dumps({"hardware": given}))
    gpu = calibrated(H200, [path])
    assert gpu.memory_gib == 80.0
    assert gpu.network_link.points == ((1e6, 10.0), (1e9, 90.0))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"hardware": {"speed": 1}}', "calibration field speed is unknown; use "),
        ("{}", "holds neither attention results"),
    ],
)
def test_a_file_that_says_nothing_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=sentence):
        calibrated(H200, [path])


def test_an_unknown_gpu_is_refused_with_those_there_are() -> None:
    assert set(HARDWARE) == {"h100", "h200"}
    with pytest.raises(ValueError, match="'a100' is not built in; use one of h200, h100"):
        hardware_named("a100")
