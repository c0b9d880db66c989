"""Built-in shapes have the published sizes, and what is assumed is said."""

import pytest

from megatron_bp.planning.shapes import MODELS, model_named

# Billions as published: Ministral 3 (3.4, 8.4, 14), Gemma 4 26B-A4B (25.2), Qwen3.5-27B (27).
PUBLISHED = {
    "nemotron-3b": 3.4,
    "nemotron-8b": 8.4,
    "nemotron-14b": 13.5,
    "diffusiongemma-26b-a4b": 25.2,
    "qwen3.5-27b": 27.0,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_many_as_published(name: str) -> None:
    assert MODELS[name].num_parameters / 1e9 == pytest.approx(PUBLISHED[name], rel=0.012)


def test_every_shape_says_where_it_is_from() -> None:
    for name, model in MODELS.items():
        assert model.name == name
        assert model.source
    assert MODELS["dflash2-qwen3.8"].assumed


def test_an_unknown_model_is_named_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="'gpt-9' is not built in; use one of nemotron-3b, "):
        model_named("gpt-9")
