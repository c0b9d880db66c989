"""Specifies megatron_bp.objectives.accuracy: a label wins if no token that counts scores higher."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bp.objectives.accuracy import label_wins
from megatron_bp.objectives.loss import LossOptions
from tests.distributed import run_distributed

ROWS, SIZE, VOCAB, VALID, EXCLUDED = 23, 5, 16, 13, 4


def problem(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(ROWS, SIZE, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCAB, SIZE, generator=generator, dtype=torch.float64)
    weight[EXCLUDED] *= 5  # would win often, were it counted
    weight[VALID:] *= 5
    best = by_hand(hidden.to(dtype).double(), weight.to(dtype).double())
    labels = torch.where(torch.arange(ROWS) % 3 == 0, best, (best + 1) % 3)
    return hidden.to(dtype), weight.to(dtype), labels


def by_hand(hidden: Tensor, weight: Tensor) -> Tensor:
    """The best token that counts, row by row."""
    tokens = [token for token in range(VALID) if token != EXCLUDED]
    return torch.tensor(
        [max(tokens, key=lambda token: float(row @ weight[token])) for row in hidden]
    )


def options(start: int = 0, chunk_rows: int = 7) -> LossOptions:
    return LossOptions(
        vocab_start=start, num_valid_vocab=VALID, excluded_id=EXCLUDED, chunk_rows=chunk_rows
    )


@pytest.mark.parametrize("chunk_rows", [1, 7, 64])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_row_is_right_if_its_label_is_the_best_token(dtype: torch.dtype, chunk_rows: int) -> None:
    hidden, weight, labels = problem(dtype)
    wins = label_wins(hidden, weight, labels, options=options(chunk_rows=chunk_rows))
    wanted = by_hand(hidden.double(), weight.double()) == labels
    assert torch.equal(wins, wanted)
    assert 0 < int(wins.sum()) < ROWS


def test_no_row_and_no_gradient() -> None:
    hidden, weight, labels = problem()
    assert label_wins(hidden[:0], weight, labels[:0], options=options()).shape == (0,)
    wins = label_wins(hidden.requires_grad_(), weight, labels, options=options())
    assert not wins.requires_grad
    assert wins.dtype == torch.bool


def test_ranks_that_share_the_vocabulary_agree_with_one() -> None:
    hidden, weight, labels = problem()
    wanted = label_wins(hidden, weight, labels, options=options())
    for wins in run_distributed(_sharded, 2, hidden, weight, labels):
        assert torch.equal(wins, wanted)


def _sharded(rank: int, num_ranks: int, hidden: Any, weight: Any, labels: Any) -> Tensor:
    share = VOCAB // num_ranks
    return label_wins(
        hidden,
        weight[rank * share :][:share],
        labels,
        options=options(rank * share),
        group=dist.group.WORLD,
    )
