"""What a rank reports is a pair (sum, count), so that adding ranks up is right."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_bp.layout.plan import PlanRequest, make_plan
from megatron_bp.mcore import forward_step
from megatron_bp.mcore.batch import CLEAN, Targets
from megatron_bp.mcore.forward_step import target_report
from megatron_bp.objectives.objective import make_objective

JOINT = make_objective("nemotron_labs")
QUARTERS = [f"loss at t {lo}" for lo in ("0.00-0.25", "0.25-0.50", "0.50-0.75", "0.75-1.00")]


def targets(bucket: list[int], num_rows: int) -> Targets:
    """Targets of one sample: one row each, with rows that are no target between them."""
    column = torch.tensor([value for own in bucket for value in (own, 0)], dtype=torch.int64)[
        :, None
    ]
    is_target = (torch.arange(2 * len(bucket)) % 2 == 0)[:, None]
    return Targets(
        labels=torch.zeros_like(column),
        weights=torch.ones_like(column, dtype=torch.float64),
        is_target=is_target,
        bucket=column,
        num_counted=torch.tensor(0),
        num_rows=torch.tensor(num_rows),
    )


@pytest.fixture
def one_tensor_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head is not split."""
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    monkeypatch.setattr(
        forward_step.parallel_state, "get_tensor_model_parallel_group", lambda: alone
    )


def report(bucket: list[int], losses: list[float], **given: Any) -> dict[str, list[float]]:
    wins = torch.tensor(given.get("wins", []), dtype=torch.bool)
    scores = torch.tensor(0.0), torch.tensor(losses), wins
    found = target_report(
        targets(bucket, 10), scores, given.get("objective", JOINT), with_accuracy="wins" in given
    )
    return {name: pair.tolist() for name, pair in found.items()}


def test_losses_are_summed_for_each_quarter_of_the_levels() -> None:
    found = report([0, 3, 0, CLEAN, 1], [1.0, 2.0, 4.0, 8.0, 16.0])
    assert [found[name] for name in QUARTERS] == [[5, 2], [16, 1], [0, 0], [2, 1]]
    assert found["next token loss"] == [8, 1]
    assert found["masked fraction"] == [4, 10]
    assert "masked token accuracy" not in found


def test_accuracy_counts_masked_tokens_only() -> None:
    found = report([0, CLEAN, 2], [1.0, 1.0, 1.0], wins=[True, True, False])
    assert found["masked token accuracy"] == [1, 2]


def test_a_rank_without_targets_reports_the_same_names() -> None:
    assert report([], [], wins=[]).keys() == report([0], [1.0], wins=[True]).keys()
    assert all(pair[0] == 0 for pair in report([], [], wins=[]).values())


def test_quarters_are_those_of_the_objective_and_next_tokens_need_a_loss() -> None:
    objective = make_objective("standard", t_min=0.2, t_max=0.6)
    found = report([0], [1.0], objective=objective)
    assert found.keys() == {
        "masked fraction",
        *(f"loss at t {x}" for x in ("0.20-0.30", "0.30-0.40", "0.40-0.50", "0.50-0.60")),
    }


@pytest.mark.usefixtures("one_tensor_rank")
def test_the_head_waits_for_a_weight_that_is_gathered_when_its_layer_is_called() -> None:
    """As with --overlap-param-gather, whose hook waits for the weight before the layer runs."""
    layer = torch.nn.Linear(4, 8, bias=False)
    layer.sequence_parallel = False  # type: ignore[assignment]
    layer.weight.data.fill_(math.nan)

    def gather(module: torch.nn.Module, _: object) -> None:
        layer.weight.data.fill_(1.0)

    layer.register_forward_pre_hook(gather)
    total, _, _ = forward_step.score_targets(
        hidden_states=torch.ones(4, 1, 4),
        output_layer=layer,
        output_weight=None,
        context=forward_step.TargetHead(targets([0, 1], 2), 8, -1, 7, with_accuracy=False),
    )
    assert float(total) == pytest.approx(2 * math.log(8))


def test_one_level_is_one_quarter() -> None:
    objective = make_objective("sdar", t_min=0.5, t_max=0.5)
    found = report([0, 0], [1.0, 3.0], objective=objective)
    assert found == {"masked fraction": [2, 10], "loss at t 0.50": [4, 2]}


class DeviceAnswers(TorchDispatchMode):
    """Notes operations that make a CPU wait for its device: they read sizes or values."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = func is torch.ops.aten.index.Tensor and any(
            x is not None and x.dtype == torch.bool for x in args[1]
        )
        reads = (
            torch.ops.aten.nonzero.default,
            torch.ops.aten._local_scalar_dense.default,
        )
        if by_mask or func in reads:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def scored(head: forward_step.TargetHead, layer: torch.nn.Linear) -> forward_step.Scores:
    hidden = torch.ones(len(head.targets.is_target), 1, 4, requires_grad=True)
    return forward_step.score_targets(
        hidden_states=hidden, output_layer=layer, output_weight=None, context=head
    )


@pytest.mark.usefixtures("one_tensor_rank")
def test_nothing_waits_for_the_device_from_the_model_to_the_end_of_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = SimpleNamespace(
        check_for_nan_in_loss_and_grad=False, seq_length=8, data_parallel_size=1,
        log_throughput=False,
    )  # fmt: skip
    step = forward_step.DiffusionForwardStep(
        args, SimpleNamespace(), SimpleNamespace(objective=JOINT), 8
    )
    groups = SimpleNamespace(num_ranks=2)
    step.__dict__["layouts"] = SimpleNamespace(common=SimpleNamespace(groups=groups))
    plan = make_plan(PlanRequest(length=8, block_size=2, num_ranks=2, num_clean_shards=2), 0)
    layout = SimpleNamespace(groups=groups, plan=plan)
    layer = torch.nn.Linear(4, 8, bias=False)
    layer.sequence_parallel = False  # type: ignore[assignment]
    head = forward_step.TargetHead(targets([0, CLEAN], 2), 8, -1, 7, with_accuracy=False)

    with DeviceAnswers() as before:  # the order of answers is what the test is about
        ready = head.get_ready()
    assert len(before.found) >= 2
    uploads: list[Any] = []
    monkeypatch.setattr(torch, "tensor", lambda *given, **named: uploads.append(given))
    with DeviceAnswers() as during:
        for _ in range(2):  # throughput is reported from the second micro-batch on
            loss, report = step._loss(ready.targets, layout, True, scored(ready, layer))
        loss.backward()
    assert during.found == uploads == []
    assert {"tokens per second", "attention imbalance", *QUARTERS} <= report.keys()
    assert float(loss.detach()) == pytest.approx(float(scored(head, layer)[0].detach()))


def test_a_label_that_does_not_count_is_refused_before_the_model_runs() -> None:
    head = forward_step.TargetHead(targets([0, 1], 2), 8, 0, 7, with_accuracy=False)
    with pytest.raises(ValueError, match=r"the label of row 0 is 0; .* excluded_id=0"):
        head.get_ready()
