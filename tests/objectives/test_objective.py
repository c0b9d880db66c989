"""Specifies megatron_bp.objectives.objective: presets, overrides and what is refused."""

from dataclasses import replace
from itertools import product

import pytest

from megatron_bp.config import CANVASES, CLEAN_RULES, OBJECTIVES
from megatron_bp.convert.bdlm_settings import (
    ALIGNMENT_OF_OBJECTIVE,
    BdlmSettings,
    exported_settings,
)
from megatron_bp.layout.visibility import CleanRule, CorruptedRule
from megatron_bp.objectives.objective import (
    PRESETS,
    Alignment,
    Canvas,
    Normalizer,
    Objective,
    Scope,
    TSampling,
    Views,
    Weight,
    make_objective,
)


def test_every_combination_either_is_consistent_or_is_refused() -> None:
    refused = 0
    for views, weight, normalizer, canvas in product(Views, Weight, Normalizer, Canvas):
        change = {"views": views, "weight": weight, "normalizer": normalizer, "canvas": canvas}
        wrong = (
            (views == "complementary" and weight == "inverse_t")
            or (canvas == "uniform" and (weight == "inverse_t" or views == "complementary"))
            or ((weight == "block_mean") != (normalizer == "blocks"))
        )
        refused += wrong
        if wrong:
            with pytest.raises(ValueError, match=r"objective 'standard': .* use "):
                replace(make_objective("standard"), **change)
        else:
            changed = replace(make_objective("standard"), **change)
            assert {name: getattr(changed, name) for name in change} == change
    assert refused == 35


def test_a_next_token_loss_needs_a_clean_stream_that_does_not_look_ahead() -> None:
    with pytest.raises(ValueError, match=r"ar_loss_weight=0\.5 needs clean_rule=token_causal"):
        make_objective("sdar", ar_loss_weight=0.5)
    make_objective("sdar", ar_loss_weight=0.5, clean_rule="token_causal")


def test_one_denominator_must_count_next_tokens() -> None:
    make_objective("nemotron_labs", scope="global")
    with pytest.raises(ValueError, match="scope=global has one denominator for both losses"):
        make_objective("nemotron_labs", scope="global", normalizer="targets")


# name: clean rule, alignment, views, weight, normalizer, mask logit excluded, levels, AR, diffusion
PUBLISHED = {
    "standard": "token_causal same_position single inverse_t supervised True antithetic 0.0 1.0",
    "bd3lm": "block_causal same_position single inverse_t supervised True antithetic 0.0 1.0",
    "fast_dllm_v2": "block_causal shifted complementary none targets False independent 0.0 1.0",
    "sdar": "block_causal same_position single inverse_t supervised False independent 0.0 1.0",
    "llada2": "block_causal same_position single none targets False independent 0.0 1.0",
    "nemotron_labs": "token_causal same_position single inverse_t supervised False independent "
    "1.0 0.3",
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_makes_the_published_choices(name: str) -> None:
    preset = make_objective(name)
    choices = (
        preset.clean_rule,
        preset.alignment,
        preset.views,
        preset.weight,
        preset.normalizer,
        preset.exclude_mask_logit,
        preset.t_sampling,
        preset.ar_loss_weight,
        preset.diffusion_loss_weight,
    )
    assert " ".join(map(str, choices)) == PUBLISHED[name]
    assert preset.corrupted_rule is CorruptedRule.BIDIRECTIONAL
    assert preset.canvas is Canvas.ALL_MASKED
    assert preset.scope is Scope.EXAMPLE
    assert (preset.t_min, preset.t_max) == (1e-3, 1.0)


def test_numbers_follow_from_the_names() -> None:
    two, one = make_objective("fast_dllm_v2"), make_objective("standard")
    assert (two.label_shift, two.num_views, one.label_shift, one.num_views) == (1, 2, 0, 1)
    assert make_objective("nemotron_labs").learns_clean
    assert not one.learns_clean
    narrow = make_objective("standard", t_min=0.2, t_max=0.6)
    assert narrow.bucket_names == ("0.20-0.30", "0.30-0.40", "0.40-0.50", "0.50-0.60")
    assert make_objective("standard", t_min=1.0).bucket_names == ("1.00",)
    assert len(set(make_objective("standard", t_min=0.5, t_max=0.5001).bucket_names)) == 4


def test_a_choice_that_is_given_replaces_that_of_the_preset_and_no_other() -> None:
    preset = make_objective("standard")
    assert make_objective("standard", clean_rule="preset", t_min="preset") == preset
    changes = {
        "clean_rule": CleanRule.BLOCK_CAUSAL,
        "corrupted_rule": CorruptedRule.CAUSAL,
        "alignment": Alignment.SHIFTED,
        "canvas": Canvas.SEED_AND_MASK,
        "weight": Weight.NONE,
        "normalizer": Normalizer.TARGETS,
        "scope": Scope.GLOBAL,
        "t_sampling": TSampling.INDEPENDENT,
        "t_min": 0.25,
        "ar_loss_weight": 0.5,
    }
    for name, value in changes.items():
        given = value if isinstance(value, float) else str(value)
        assert make_objective("standard", **{name: given}) == replace(preset, **{name: value})


def test_flags_and_converters_know_every_preset() -> None:
    assert ("none", *PRESETS) == OBJECTIVES
    assert ("preset", *Canvas) == CANVASES
    assert ("preset", *CleanRule) == CLEAN_RULES
    for name, preset in PRESETS.items():
        assert ALIGNMENT_OF_OBJECTIVE[name] == preset.alignment
        exported = exported_settings(BdlmSettings(name, 32, "preset", "", 5))
        assert exported["clean_rule"] == preset.clean_rule


def test_objectives_are_hashable_values() -> None:
    assert len({make_objective("standard"), make_objective("standard")}) == 1


def test_unknown_names_and_choices_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'standrad' is unknown; use one of 'standard', 'bd3lm'"):
        make_objective("standrad")
    with pytest.raises(ValueError, match="colour is no choice of an objective; use"):
        make_objective("standard", colour="red")
    with pytest.raises(ValueError, match=r"CleanRule 'causal' is unknown; use one of \['preset',"):
        make_objective("standard", clean_rule="causal")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"diffusion_loss_weight": 0.0}, "diffusion_loss_weight=0.0 must be positive"),
        ({"ar_loss_weight": -1.0}, "ar_loss_weight=-1.0 must be finite and not negative"),
        ({"ar_loss_weight": float("inf")}, "ar_loss_weight=inf must be finite"),
        ({"t_min": 0.0}, "must satisfy 0 < t_min <= t_max <= 1"),
        ({"t_max": 1.5}, "must satisfy 0 < t_min <= t_max <= 1"),
        ({"t_min": 0.6, "t_max": 0.5}, "must satisfy 0 < t_min <= t_max <= 1"),
    ],
)
def test_values_out_of_range_are_refused(change: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        replace(make_objective("standard"), **change)


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ValueError, match=r"t_min=-1\.0 .* ar_loss_weight=-2\.0 .* is no mean"):
        Objective("mine", t_min=-1.0, ar_loss_weight=-2.0, normalizer=Normalizer.BLOCKS)
