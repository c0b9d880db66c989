"""Specifies megatron_bp/convert/families/rope.py: rotary settings of either spelling."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_bp.convert.families.rope import Rope, read_rope

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


def _read(config: dict[str, Any], *, partial: bool = False) -> tuple[Rope, list[str]]:
    problems: list[str] = []
    return read_rope(config, problems, partial=partial), problems


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {**YARN, "beta_fast": 16.0, "mscale": 0.7, "mscale_all_dim": 0.3},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ],
)
def test_both_spellings_mean_the_same(settings: dict[str, Any]):
    old_type = {"type" if key == "rope_type" else key: v for key, v in settings.items()}
    spellings = [
        {"rope_theta": 5e5, "rope_scaling": settings or None},
        {"rope_theta": 5e5, "rope_scaling": old_type or None},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default", **settings}},
    ]
    read = [_read(spelling) for spelling in spellings]
    assert read[0] == read[1] == read[2]
    assert read[0][0].base == 500000
    assert read[0][1] == []


def test_yarn_without_mscale_scales_by_its_own_factor():
    # transformers: 0.1 ln(factor) + 1. Megatron: mscale(factor, 1) / mscale(factor, 0).
    rope, problems = _read({"rope_theta": 1e6, "rope_scaling": YARN, "max_position_embeddings": 9})
    args = dict(rope.args)
    assert (args["mscale"], args["mscale_all_dim"], problems) == (1.0, 0.0, [])
    assert (args["yarn_beta_fast"], args["yarn_beta_slow"]) == (32.0, 1.0)
    assert args["yarn_original_max_position_embeddings"] == 1024
    assert dict(rope.flags)["yarn-correction-range-round-to-int"] is True
    exact, _ = _read({"rope_scaling": {**YARN, "truncate": False}})
    assert dict(exact.flags)["no-yarn-correction-range-round-to-int"] is True
    assert "yarn-correction-range-round-to-int" not in dict(exact.flags)


def test_a_part_of_the_head_is_rotated_only_in_families_that_do_so():
    config = {"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25}}
    rope, problems = _read(config, partial=True)
    assert (dict(rope.flags), dict(rope.args)) == (
        {"rotary-percent": 0.25},
        {"rotary_percent": 0.25},
    )
    assert problems == []
    assert _read(config)[1] == ["partial_rotary_factor=0.25 must be 1.0"]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({**YARN, "factor": None}, "YaRN needs factor >= 1"),
        ({**YARN, "factor": 0.5}, "factor=0.5"),
        ({"rope_type": "yarn", "factor": 2.0}, "original_max_position_embeddings=None"),
        ({**YARN, "attention_factor": 1.5}, "attention_factor=1.5 differs from 1.13863"),
        ({"rope_type": "longrope"}, "rope_type='longrope' has no counterpart"),
        ({"rope_theta": 0.5}, "rope_theta=0.5 must be a whole number"),
        ({"rope_theta": "x"}, "rope_theta='x' must be a whole number"),
    ],
)
def test_settings_without_a_counterpart_are_named(settings: dict[str, Any], text: str):
    _, problems = _read({"rope_parameters": settings})
    assert len(problems) == 1
    assert text in problems[0]
