"""Each objective's loss and gradients are those of its written-out formula, on any number of ranks.

Everything between noise and loss is the production path (labels, weights, rows, head); the model is
random numbers. Whole models are compared in tests/tools/test_check_exact.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_bp.mcore import forward_step
from megatron_bp.mcore.batch import Batch
from megatron_bp.mcore.carrier import Layout
from megatron_bp.mcore.exactness_formulas import FORMULAS, batch_loss
from megatron_bp.mcore.exactness_problem import (
    MASK_ID,
    VALID_VOCAB,
    VOCAB,
    Problem,
    rules_of,
    samples_of,
)
from megatron_bp.mcore.exactness_reference import see
from megatron_bp.objectives.objective import PRESETS
from tests.mcore.test_batch import Ranks, layout

SIZE = 6
LAYOUTS = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]  # ranks, clean shards
TOLERANCE = 1e-13  # fp64 sums of a few hundred terms


@pytest.fixture(autouse=True)
def _one_tensor_parallel_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Ranks(1, 0)
    monkeypatch.setattr(forward_step.parallel_state, "get_tensor_model_parallel_group", lambda: one)


def test_every_preset_has_a_formula() -> None:
    assert {name for name in FORMULAS if name in PRESETS} == set(PRESETS)
    assert all(FORMULAS[name].preset == name and not FORMULAS[name].choices for name in PRESETS)


@pytest.mark.parametrize("changes", [{}, {"few_targets": True}, {"packed": True}], ids=str)
@pytest.mark.parametrize("name", FORMULAS)
def test_ranks_together_compute_the_formula(name: str, changes: dict[str, Any]) -> None:
    problem = Problem(objective=name, clean_rule="preset", num_samples=2, **changes)
    compare(problem)


@pytest.mark.parametrize("name", ["standard", "fast_dllm_v2", "nemotron_labs"])
def test_one_denominator_for_the_batch_is_that_of_the_formula(name: str) -> None:
    compare(Problem(objective=name, clean_rule="preset", num_samples=2, per_token=True))


@pytest.mark.parametrize("name", FORMULAS)
def test_a_batch_without_any_target_has_loss_and_gradients_of_zero(name: str) -> None:
    problem = Problem(objective=name, clean_rule="preset", num_samples=1)
    clean = {"tokens": torch.arange(problem.length) % MASK_ID, "loss_mask": torch.zeros(64)}
    batch = as_batch(rules_of(problem).sample(clean, 0, is_padding=False))
    head = torch.ones((VOCAB, SIZE), dtype=torch.float64, requires_grad=True)
    for ranks, shards in LAYOUTS:
        for rank in range(ranks):
            mine = layout(rank, ranks, shards, views=batch.weights.shape[1] // 64, length=64)
            rows = torch.ones(len(mine.position), 1, SIZE, dtype=torch.float64, requires_grad=True)
            total = score(problem, batch, mine, rows, head)
            assert total == 0
            gradients = torch.autograd.grad(total, (rows, head))
            assert all((gradient == 0).all() for gradient in gradients)


def compare(problem: Problem) -> None:
    """Compares loss and gradients of every layout with the formula."""
    views = rules_of(problem).objective.num_views
    generator = torch.Generator().manual_seed(5)
    shape = (problem.num_samples, (1 + views) * problem.length, SIZE)
    hidden = torch.randn(shape, generator=generator, dtype=torch.float64)
    head = torch.randn((VOCAB, SIZE), generator=generator, dtype=torch.float64)
    wanted = gradients(problem, hidden, head, by_formula)
    assert wanted[0] > 0
    for ranks, shards in LAYOUTS:
        got = gradients(problem, hidden, head, on_ranks, ranks, shards)
        for one, other in zip(got, wanted, strict=True):
            error = (one - other).abs().max() / other.abs().max()
            assert error <= TOLERANCE, (ranks, shards, float(error))


def gradients(
    problem: Problem, hidden: Tensor, head: Tensor, loss_of: Any, *layout_of: int
) -> tuple[Tensor, ...]:
    """Loss, d hidden and d head."""
    hidden, head = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    loss = loss_of(problem, hidden, head, *layout_of)
    return loss.detach(), *torch.autograd.grad(loss, (hidden, head))


def by_formula(problem: Problem, hidden: Tensor, head: Tensor) -> Tensor:
    formula = FORMULAS[problem.objective]
    never = torch.arange(VOCAB) >= VALID_VOCAB
    never[MASK_ID] = formula.never_predicts_mask
    scores = (hidden @ head.t()).masked_fill(never, float("-inf")).log_softmax(-1)
    parts = [
        formula.parts(see(problem, index, sample, rows))
        for index, (sample, rows) in enumerate(zip(samples_of(problem), scores, strict=True))
    ]
    return batch_loss(parts, problem.per_token)


def on_ranks(problem: Problem, hidden: Tensor, head: Tensor, ranks: int, shards: int) -> Tensor:
    """The sum over ranks of what each rank returns to Megatron, divided as Megatron does."""
    objective, total, counted = rules_of(problem).objective, 0.0, 0.0
    for sample, rows in zip(samples_of(problem), hidden, strict=True):
        batch = as_batch(sample)
        for rank in range(ranks):
            mine = layout(
                rank,
                ranks,
                shards,
                views=objective.num_views,
                length=problem.length,
                documents=rules_of(problem).documents(sample["clean"].numpy()),
            )
            total = total + score(problem, batch, mine, rows[mine.token_index][:, None], head)
            targets = batch.targets(mine, objective)
            counted += float(targets.num_counted)
    whole = max(counted, 1.0) if problem.per_token else problem.num_samples
    return torch.as_tensor(total / whole)


def score(problem: Problem, batch: Batch, mine: Layout, rows: Tensor, head: Tensor) -> Tensor:
    """What one rank's head returns for the rows of its layout."""
    objective = rules_of(problem).objective
    context = forward_step.TargetHead(
        batch.targets(mine, objective),
        VALID_VOCAB,
        MASK_ID if objective.exclude_mask_logit else -1,
        chunk_rows=7,
        with_accuracy=False,
    )
    return forward_step.score_targets(
        hidden_states=rows,
        output_layer=SimpleNamespace(sequence_parallel=False, weight=head, _forward_pre_hooks={}),
        output_weight=None,
        context=context,
    )[0]


def as_batch(sample: dict[str, Tensor]) -> Batch:
    """A micro-batch of one sample."""
    return Batch(
        document=sample["document"][None],
        streams=torch.cat([sample["clean"], sample["corrupted"].flatten()])[None],
        labels=sample["labels"].flatten()[None],
        counted=sample["counted"].flatten()[None].long(),
        bucket=sample["bucket"].flatten()[None],
        next_labels=sample["next_labels"][None],
        weights=sample["weights"].flatten()[None],
        normalizer=sample["normalizer"][None].double(),
    )
