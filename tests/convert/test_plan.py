"""Specifies megatron_bp/convert/plan.py: key names, layouts and coverage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_bp.convert.families import read_model
from megatron_bp.convert.plan import (
    Layout,
    TensorInfo,
    check_coverage,
    extra_state_keys,
    hf_shapes,
    make_links,
    megatron_shapes,
)
from tests.convert.tiny_models import LLAMA, QWEN3, expected_megatron, random_tensors

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize("config", [LLAMA, QWEN3], ids=["llama", "qwen3"])
def test_links_describe_exactly_the_tensors_of_both_sides(config: dict[str, Any]):
    family, shape = read_model(config)
    links = make_links(family, shape)
    hf = random_tensors(config)
    assert hf_shapes(links) == {name: tuple(t.shape) for name, t in hf.items()}
    expected = {name: tuple(t.shape) for name, t in expected_megatron(config, hf).items()}
    assert megatron_shapes(links, Layout.PER_LAYER, shape.num_layers) == expected


@pytest.mark.parametrize("config", [LLAMA, QWEN3], ids=["llama", "qwen3"])
def test_checkpoint_keys_match_the_golden_list(config: dict[str, Any]):
    # The lists were checked against GPTModel.sharded_state_dict of megatron-core 0.19.2
    # (test_megatron_load.py does so again).
    family, shape = read_model(config)
    found = {}
    for layout in Layout:
        tensors = megatron_shapes(make_links(family, shape), layout, shape.num_layers)
        objects = extra_state_keys(family, shape, layout)
        found[str(layout)] = {
            "tensors": {key: list(size) for key, size in sorted(tensors.items())},
            "objects": sorted(objects),
        }
    golden = GOLDEN / f"convert_{family.name}_keys.json"
    assert found == json.loads(golden.read_text())


def test_coverage_names_what_is_missing_left_over_and_misshapen():
    expected = {"a": (2, 3), "b": (4,), "c": (5,)}
    found = {name: TensorInfo(size, torch.float32) for name, size in expected.items()}
    check_coverage("here", expected, found)
    wrong = {**found, "a": TensorInfo((3, 3), torch.float32), "x": found["b"]}
    del wrong["c"]
    with pytest.raises(ValueError, match="here does not have") as error:
        check_coverage("here", expected, wrong)
    text = str(error.value)
    assert "1 missing: c" in text
    assert "1 not accounted for: x" in text
    assert "a has [3, 3], config says [2, 3]" in text


def test_only_padded_tables_may_have_more_rows():
    expected = {"a": (2, 3)}
    more, fewer = (TensorInfo((rows, 3), torch.float32) for rows in (4, 1))
    check_coverage("here", expected, {"a": more}, ["a"])
    with pytest.raises(ValueError, match="of another shape"):
        check_coverage("here", expected, {"a": more})
    with pytest.raises(ValueError, match="of another shape"):
        check_coverage("here", expected, {"a": fewer}, ["a"])
