"""Specifies megatron_bp.objectives.objective: presets, overrides and what is refused."""

from dataclasses import replace
from itertools import product

import pytest

from megatron_bp.layout.visibility import CleanRule, CorruptedRule
from megatron_bp.objectives import Normalizer, TSampling, Weight, make_objective


def test_every_combination_either_is_consistent_or_is_refused() -> None:
    for views, weight, normalizer in product((1, 2), Weight, Normalizer):
        change = {"num_views": views, "weight": weight, "normalizer": normalizer}
        if views == 2 and weight is Weight.INVERSE_T:
            with pytest.raises(ValueError, match=r"use weight=none, or num_views=1\."):
                replace(make_objective("standard"), **change)
        else:
            changed = replace(make_objective("standard"), **change)
            assert (changed.num_views, changed.weight, changed.normalizer) == (
                views,
                weight,
                normalizer,
            )


def test_standard_predicts_the_own_token_once_with_inverse_t_weights() -> None:
    objective = make_objective("standard")
    assert (objective.label_shift, objective.num_views) == (0, 1)
    assert objective.clean_rule is CleanRule.TOKEN_CAUSAL
    assert objective.corrupted_rule is CorruptedRule.BIDIRECTIONAL
    assert objective.weight is Weight.INVERSE_T
    assert objective.normalizer is Normalizer.SUPERVISED
    assert objective.t_sampling is TSampling.ANTITHETIC
    assert objective.exclude_mask_logit is True
    assert (objective.t_min, objective.t_max) == (1e-3, 1.0)


def test_fast_dllm_v2_predicts_the_next_token_over_two_views() -> None:
    objective = make_objective("fast_dllm_v2")
    assert (objective.label_shift, objective.num_views) == (1, 2)
    assert objective.clean_rule is CleanRule.BLOCK_CAUSAL
    assert objective.corrupted_rule is CorruptedRule.BIDIRECTIONAL
    assert objective.weight is Weight.NONE
    assert objective.normalizer is Normalizer.TARGETS
    assert objective.t_sampling is TSampling.INDEPENDENT
    assert objective.exclude_mask_logit is False
    assert (objective.t_min, objective.t_max) == (1e-3, 1.0)


def test_a_choice_that_is_given_replaces_that_of_the_preset_and_no_other() -> None:
    preset = make_objective("standard")
    assert make_objective("standard", clean_rule="preset") == preset
    assert make_objective("standard", clean_rule="block_causal") == replace(
        preset, clean_rule=CleanRule.BLOCK_CAUSAL
    )
    assert make_objective("standard", corrupted_rule="causal") == replace(
        preset, corrupted_rule=CorruptedRule.CAUSAL
    )
    assert make_objective("standard", weight="none") == replace(preset, weight=Weight.NONE)
    assert make_objective("standard", normalizer="targets") == replace(
        preset, normalizer=Normalizer.TARGETS
    )
    assert make_objective("standard", t_sampling="independent") == replace(
        preset, t_sampling=TSampling.INDEPENDENT
    )


def test_objectives_are_hashable_values() -> None:
    assert len({make_objective("standard"), make_objective("standard")}) == 1


def test_unknown_names_and_choices_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'standrad' is unknown; use one of 'standard', 'fast_d"):
        make_objective("standrad")
    with pytest.raises(ValueError, match=r"CleanRule 'causal' is unknown; use one of \['preset',"):
        make_objective("standard", clean_rule="causal")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"label_shift": 2}, r"label_shift=2 must be 0 \(own token\) or 1"),
        ({"num_views": 3, "weight": Weight.NONE}, "num_views=3 must be 1 or 2"),
        ({"t_min": 0.0}, "must satisfy 0 < t_min <= t_max <= 1"),
        ({"t_max": 1.5}, "must satisfy 0 < t_min <= t_max <= 1"),
        ({"t_min": 0.6, "t_max": 0.5}, "must satisfy 0 < t_min <= t_max <= 1"),
    ],
)
def test_values_out_of_range_are_refused(change: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        replace(make_objective("standard"), **change)


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ValueError, match=r"label_shift=7 .* num_views=9 .* t_min=-1\.0"):
        replace(make_objective("standard"), label_shift=7, num_views=9, t_min=-1.0)
