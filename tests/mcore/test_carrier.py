"""Local rows are as many as tensor-parallel ranks and fp8 linear layers can take."""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import pytest

from megatron_bp.layout.plan import PlanRequest, make_plan
from megatron_bp.mcore.carrier import FP8_ROWS, row_multiple


def arguments(**changes: Any) -> argparse.Namespace:
    given = {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "micro_batch_size": 1,
        "eval_micro_batch_size": 1,
        "fp8": "hybrid",
        "fp8_recipe": "delayed",
    }
    return argparse.Namespace(**{**given, **changes})


CASES = itertools.product(FP8_ROWS, (1, 2), (False, True), ((1, 1), (2, 2), (3, 1), (4, 2)))


@pytest.mark.parametrize(("recipe", "tensor", "split", "samples"), CASES)
def test_every_rank_and_micro_batch_has_whole_fp8_tiles(
    recipe: str, tensor: int, split: bool, samples: tuple[int, int]
) -> None:
    train, evaluation = samples
    multiple = row_multiple(
        arguments(
            tensor_model_parallel_size=tensor,
            sequence_parallel=split,
            micro_batch_size=train,
            eval_micro_batch_size=evaluation,
            fp8_recipe=recipe,
        )
    )
    for length in (45, 64, 100):
        plan = make_plan(PlanRequest(length, 8, 2, 2, row_multiple=multiple), 0)
        for size in samples:
            rows = plan.rows.num_rows // (tensor if split else 1) * size
            assert rows % FP8_ROWS[recipe] == 0


def test_without_fp8_rows_are_those_of_the_ranks() -> None:
    assert row_multiple(arguments(fp8=None)) == 2
    assert row_multiple(arguments(fp8=None, sequence_parallel=False)) == 1


def test_an_unknown_recipe_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--fp8-recipe new is not known .* use one of delayed, "):
        row_multiple(arguments(fp8_recipe="new"))
