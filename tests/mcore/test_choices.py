"""Flags make the objective: a preset, with the choices that are given and no other changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_bp.layout.visibility import CleanRule
from megatron_bp.mcore.arguments import config_from_args
from megatron_bp.mcore.choices import objective_of
from megatron_bp.objectives.objective import PRESETS, Canvas, Objective, Scope
from tests.mcore.parsing import parsed

CHANGES: dict[str, dict[str, Any]] = {
    "": {},
    "--clean-rule token_causal": {"clean_rule": CleanRule.TOKEN_CAUSAL},
    "--bdlm-canvas seed_and_mask": {"canvas": Canvas.SEED_AND_MASK},
    "--bdlm-noise-range 0.3,0.8": {"t_min": 0.3, "t_max": 0.8},
    "--clean-rule token_causal --bdlm-ar-loss-weight 0.5": {
        "clean_rule": CleanRule.TOKEN_CAUSAL,
        "ar_loss_weight": 0.5,
    },
    "--bdlm-ar-loss-weight 0": {"ar_loss_weight": 0.0},
    "--calculate-per-token-loss": {"scope": Scope.GLOBAL},
}


def objective(text: str) -> Objective:
    args = parsed(text)
    return objective_of(args, config_from_args(args))


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("text", CHANGES)
def test_flags_replace_a_presets_choices(name: str, text: str) -> None:
    got = objective(f"--bdlm-objective {name} {text}")
    assert got == replace(PRESETS[name], **CHANGES[text])
