"""Evaluation reports loss by noise level and accuracy; every layout reports the same."""

from __future__ import annotations

import math

import pytest

from megatron_bp.layout.cost import owned_imbalance
from megatron_bp.layout.plan import PlanRequest, make_plan
from tests.mcore.runs import flags, train_jobs

DIGITS = 1e-5  # fp32 sums in other orders, in the losses and in Megatron's counts
RUN = "--lr 1e-2 --min-lr 1e-2 --train-iters 6 --eval-interval 3 --eval-iters 4"
JOINT = f"{RUN} --bdlm-objective nemotron_labs"
CSBP = "--context-parallel-size 2 --block-parallel-size 2"
ONE = {"standard": RUN, "joint": JOINT}
TWO = {
    "standard csbp": f"{RUN} {CSBP}",
    "standard tensor": f"{RUN} --tensor-model-parallel-size 2",
    "joint pure": f"{JOINT} --block-parallel-size 2",
}
QUARTERS = [f"loss at t {lo}" for lo in ("0.00-0.25", "0.25-0.50", "0.50-0.75", "0.75-1.00")]


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, float]]]:
    folder = tmp_path_factory.mktemp("logs")
    one = train_jobs(1, [(name, flags(text)) for name, text in ONE.items()], folder)
    two = train_jobs(2, [(name, flags(text)) for name, text in TWO.items()], folder)
    return one | two


def test_evaluation_reports_loss_by_level_and_accuracy(logged: dict) -> None:
    evaluated = [step for step in logged["joint"] if "bdlm loss validation" in step]
    assert len(evaluated) == 2
    for step in evaluated:
        quarters = [step[f"{name} validation"] for name in QUARTERS]
        assert all(0 < loss < 10 for loss in quarters), quarters
        assert len(set(quarters)) == 4
        assert 0.3 < step["masked fraction validation"] < 0.7
        assert step["next token loss validation"] > 0
    accuracies = [step["masked token accuracy validation"] for step in evaluated]
    assert 0 < accuracies[1] < 1
    assert "next token loss" not in logged["standard"][0]
    assert "masked token accuracy" not in logged["standard"][0]


@pytest.mark.parametrize("name", TWO)
def test_two_ranks_report_what_one_rank_reports(logged: dict, name: str) -> None:
    wanted = logged[name.split()[0]]
    assert len(logged[name]) == len(wanted) == 6
    compared = 0
    for got, step in zip(logged[name], wanted, strict=True):
        reports = {tag for tag in step if any(word in tag for word in ("loss", "masked"))}
        reports -= {"loss-scale"}
        assert reports <= got.keys()
        for tag in reports:
            assert got[tag] == pytest.approx(step[tag], rel=DIGITS, nan_ok=True), tag
            compared += not math.isnan(step[tag])
    assert compared > 40


def test_throughput_is_reported_between_training_steps_only(logged: dict) -> None:
    """Not in the first step, nor in the first one after an evaluation."""
    reported = ["tokens per second" in step for step in logged["standard csbp"]]
    assert reported == [False, True, True, False, True, True]


def test_balance_is_reported_where_ranks_share_a_sample(logged: dict) -> None:
    wanted = owned_imbalance(make_plan(PlanRequest(48, 8, 2, 2), 0))  # six blocks in four chunks
    for step in logged["standard csbp"]:
        assert step["attention imbalance"] == pytest.approx(wanted, rel=1e-6)
    assert "attention imbalance" not in logged["standard"][0]
