"""Whole training jobs: every layout logs the same losses (test_resume_layouts.py: also resumed)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mcore.runs import flags, train_jobs

# Megatron prints seven digits; TensorBoard keeps fp32. The layouts sum in other orders in fp32, so
# the last of these digits may round either way.
DIGITS = 2e-7

LOSS, MASKED, NORM = "bdlm loss", "masked fraction", "grad-norm"

TWO = {
    "csbp": "--context-parallel-size 2 --block-parallel-size 2",
    "pure": "--block-parallel-size 2",
    "baseline": "--context-parallel-size 2",
    "data parallel": "",
    "csbp v2": "--context-parallel-size 2 --block-parallel-size 2 --bdlm-objective fast_dllm_v2",
    "csbp ragged": "--context-parallel-size 2 --block-parallel-size 2 --seq-length 45",
    "csbp documents": "--context-parallel-size 2 --block-parallel-size 2 --reset-attention-mask",
    "csbp per token": "--context-parallel-size 2 --block-parallel-size 2 "
    "--calculate-per-token-loss",
    "csbp interval": "--context-parallel-size 2 --block-parallel-size 2 "
    "--bp-attention-strategy interval",
    "pure full prune off": "--block-parallel-size 2 --no-bp-prune-last-layer",
    "csbp recompute": "--context-parallel-size 2 --block-parallel-size 2 "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "csbp rerun": "--context-parallel-size 2 --block-parallel-size 2 --recompute-granularity full "
    "--recompute-method uniform --recompute-num-layers 1 --bp-recompute-attention rerun",
    "csbp regather": "--context-parallel-size 2 --block-parallel-size 2 --bp-clean-kv regather "
    "--log-throughput --bp-peak-tflops 0.5 --log-timers-to-tensorboard",
    "csbp overlap": "--context-parallel-size 2 --block-parallel-size 2 "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
}
ONE = {
    "one": "",
    "one v2": "--bdlm-objective fast_dllm_v2",
    "one ragged": "--seq-length 45",
    "one documents": "--reset-attention-mask",
    "one per token": "--calculate-per-token-loss",
}
REFERENCE = {
    "csbp v2": "one v2",
    "csbp ragged": "one ragged",
    "csbp documents": "one documents",
    "csbp per token": "one per token",
}


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, float]]]:
    folder = tmp_path_factory.mktemp("logs")
    one = train_jobs(1, [(name, flags(text)) for name, text in ONE.items()], folder)
    two = train_jobs(2, [(name, flags(text)) for name, text in TWO.items()], folder)
    return one | two


@pytest.mark.parametrize("name", TWO)
def test_two_ranks_log_what_one_rank_logs(logged: dict, name: str) -> None:
    assert_same_steps(logged[name], logged[REFERENCE.get(name, "one")])


def test_other_objectives_and_data_log_other_losses(logged: dict) -> None:
    second = {name: logged[name][1][LOSS] for name in ONE}
    assert len(set(second.values())) == len(second), second


def test_the_log_has_loss_masked_fraction_and_throughput(logged: dict) -> None:
    step = logged["csbp"][-1]
    assert 3.0 < step[LOSS] < 7.0
    assert 0.2 < step[MASKED] < 0.8
    assert step["tokens per second"] > 0


def test_the_log_counts_useful_work_if_asked(logged: dict) -> None:
    step = logged["csbp regather"][-1]
    work = step["useful TFLOP/s per GPU"]
    assert 0 < work < 1
    assert step["model FLOPs utilization"] == pytest.approx(work / 0.5)
    # Megatron's own line: the same work up to the number of targets, and its own clock.
    assert 0.2 < step["throughput"] / work < 2
    assert "useful TFLOP/s per GPU" not in logged["csbp"][-1]


def assert_same_steps(got: list[dict[str, float]], wanted: list[dict[str, float]]) -> None:
    assert len(got) == len(wanted) == 4
    for step, (one, other) in enumerate(zip(got, wanted, strict=True)):
        assert one[MASKED] == other[MASKED], f"step {step}"
        assert one[LOSS] == pytest.approx(other[LOSS], rel=DIGITS), f"step {step}"
        assert one[NORM] == pytest.approx(other[NORM], rel=1e-5), f"step {step}"


@pytest.mark.slow
def test_four_ranks_log_what_one_rank_logs(logged: dict, tmp_path: Path) -> None:
    four = {
        "hybrid": "--context-parallel-size 2 --block-parallel-size 4",
        "csbp of data": "--context-parallel-size 2 --block-parallel-size 2",
    }
    got = train_jobs(4, [(name, flags(text)) for name, text in four.items()], tmp_path)
    for name in four:
        assert_same_steps(got[name], logged["one"])
