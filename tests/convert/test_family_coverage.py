"""Specifies that every family accounts for every tensor on both sides, and names what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_bp.convert.ar_to_bdlm import ImportRequest, hf_to_mcore
from megatron_bp.convert.families import FAMILIES, read_model
from megatron_bp.convert.link import Link, TensorInfo
from megatron_bp.convert.plan import (
    Layout,
    check_coverage,
    extra_state_keys,
    hf_shapes,
    make_links,
    megatron_shapes,
)
from megatron_bp.convert.progress import Silent
from tests.convert.tiny_families import CASES, make_case, write_repository

GOLDEN = Path(__file__).parents[1] / "golden"
# One case a key layout: what the golden lists hold.
GOLDEN_CASES = (
    "qwen2-untied",
    "qwen3_moe-untied",
    "mistral3-untied",
    "nemotron-untied",
    "qwen3_5-released",
    "qwen3_5_moe-fused",
    "gemma4_text-tied",
    "gemma4-tied",
    "diffusion_gemma-tied",
    "dflash",
    "dflash2",
)


def _links(name: str) -> tuple[tuple[Link, ...], Any, dict[str, torch.Tensor]]:
    config, tensors = make_case(name)
    family, shape = read_model(config)
    shape = family.adapt(shape, tensors)
    owned = {
        key: tensor
        for key, tensor in tensors.items()
        if not (family.pass_through and key.startswith(family.pass_through))
    }
    return make_links(family, shape), (family, shape), owned


def test_every_family_has_a_case():
    covered = {read_model(make_case(name)[0])[0].name for name in CASES}
    assert covered == {family.name for family in FAMILIES}


@pytest.mark.parametrize("name", CASES)
def test_links_read_exactly_the_text_models_tensors(name: str):
    # check_links (inside make_links) has shown that every row of them is used exactly once.
    links, _, owned = _links(name)
    assert hf_shapes(links) == {key: tuple(tensor.shape) for key, tensor in owned.items()}


@pytest.mark.parametrize("name", GOLDEN_CASES)
def test_checkpoint_keys_match_the_golden_list(name: str):
    # Where the names come from is in each family's module; test_family_megatron.py checks those
    # that Megatron can build.
    links, (family, shape), _ = _links(name)
    found = {}
    for layout in Layout if family.stackable else (Layout.PER_LAYER,):
        tensors = megatron_shapes(links, layout, shape.num_layers)
        found[str(layout)] = {
            "tensors": {key: list(size) for key, size in sorted(tensors.items())},
            "objects": sorted(extra_state_keys(family, shape, layout)),
        }
    golden = json.loads((GOLDEN / f"convert_{name.partition('-')[0]}_keys.json").read_text())
    assert found == golden


@pytest.mark.parametrize("name", CASES)
def test_every_tensor_that_is_missing_renamed_or_misshapen_is_named(name: str):
    links, (_, shape), owned = _links(name)
    sides = {
        "source": hf_shapes(links),
        "checkpoint": megatron_shapes(links, Layout.PER_LAYER, shape.num_layers),
    }
    assert sides["source"].keys() == owned.keys()
    for expected in sides.values():
        whole = {key: TensorInfo(size, torch.bfloat16) for key, size in expected.items()}
        check_coverage("here", expected, whole)
        for key, info in whole.items():
            without = {k: v for k, v in whole.items() if k != key}
            larger = TensorInfo((*info.shape[:-1], info.shape[-1] + 1), info.dtype)
            for wrong, texts in (
                (without, [f"1 missing: {key}"]),
                ({**without, f"{key}_": info}, [f"1 missing: {key}", f"accounted for: {key}_"]),
                ({**whole, f"{key}_": info}, [f"1 not accounted for: {key}_"]),
                ({**whole, key: larger}, [f"1 of another shape: {key} has "]),
            ):
                with pytest.raises(ValueError, match="here does not have") as error:
                    check_coverage("here", expected, wrong)
                assert all(text in str(error.value) for text in texts), (key, str(error.value))


@pytest.mark.parametrize(
    ("name", "renamed"),
    [
        ("qwen2-tied", "model.layers.1.self_attn.k_proj.bias"),
        ("qwen3_moe-untied", "model.layers.1.mlp.experts.2.up_proj.weight"),
        ("qwen3_moe-fused", "model.layers.0.mlp.experts.down_proj"),
        ("mistral3-untied", "language_model.lm_head.weight"),
        ("nemotron-untied", "diffusion_head.weight"),
        ("qwen3_5-released", "model.language_model.layers.0.linear_attn.A_log"),
        ("qwen3_5_moe-fused", "model.layers.2.mlp.shared_expert_gate.weight"),
        ("gemma4_text-tied", "model.layers.0.layer_scalar"),
        ("diffusion_gemma-tied", "model.encoder.language_model.layers.1.layer_scalar"),
        ("dflash2", "candidate_selector.predecessor_codebook"),
    ],
)
def test_a_renamed_tensor_stops_the_conversion_before_anything_is_written(
    tmp_path: Path, name: str, renamed: str
):
    config, tensors = make_case(name)
    tensors[f"{renamed}.other"] = tensors.pop(renamed)
    hf = write_repository(tmp_path / "hf", config, tensors)
    request = ImportRequest(hf, tmp_path / "m", Layout.PER_LAYER, "keep", overwrite=False)
    with pytest.raises(ValueError, match=r"1 missing(?s:.*)1 not accounted for") as error:
        hf_to_mcore(request, Silent())
    assert f"missing: {renamed}\n" in str(error.value)
    assert f"accounted for: {renamed}.other" in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_tied_head_that_differs_is_refused_in_a_vision_repository(tmp_path: Path):
    config, tensors = make_case("mistral3-tied")
    embedding = tensors["language_model.model.embed_tokens.weight"]
    for change, text in ((0.0, ""), (1.0, "language_model.lm_head.weight differs")):
        head = {"language_model.lm_head.weight": embedding + change}
        hf = write_repository(tmp_path / f"hf{change}", config, tensors | head)
        request = ImportRequest(hf, tmp_path / "m", Layout.PER_LAYER, "keep", overwrite=False)
        if not text:
            hf_to_mcore(request, Silent())
            continue
        with pytest.raises(ValueError, match=text):
            hf_to_mcore(
                ImportRequest(hf, tmp_path / "n", Layout.PER_LAYER, "keep", False), Silent()
            )


@pytest.mark.parametrize("name", ["qwen2-tied", "qwen3_5-released", "gemma4-tied"])
def test_mixed_dtypes_inside_one_megatron_tensor_are_refused(tmp_path: Path, name: str):
    config, tensors = make_case(name)
    key = next(key for key in tensors if key.endswith("k_proj.weight"))
    tensors[key] = tensors[key].float()
    hf = write_repository(tmp_path / "hf", config, tensors)
    with pytest.raises(ValueError, match="must be one float") as error:
        hf_to_mcore(ImportRequest(hf, tmp_path / "m", Layout.PER_LAYER, "keep", False), Silent())
    assert key in str(error.value)
