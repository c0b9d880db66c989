"""Specifies every family by whole conversions: Hugging Face to Megatron and back, bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_bp.convert.ar_to_bdlm import ImportRequest, ar_to_bdlm, hf_to_mcore
from megatron_bp.convert.bdlm_settings import BdlmSettings
from megatron_bp.convert.export import ExportRequest, mcore_to_hf
from megatron_bp.convert.mask_wish import MaskWish
from megatron_bp.convert.plan import Layout
from megatron_bp.convert.progress import Silent
from megatron_bp.convert.torch_dist_io import TorchDistReader
from tests.convert.family_oracles import expected_tensors
from tests.convert.tiny_families import CASES, make_case, write_repository
from tests.convert.tiny_models import read_hf, same_bits


def _there(hf: Path, target: Path, layout: Layout = Layout.PER_LAYER, **changes: Any) -> Path:
    settings: dict[str, Any] = {"dtype": "keep", "overwrite": False} | changes
    hf_to_mcore(ImportRequest(hf, target, layout, **settings), Silent())
    return target


def _back(source: Path, target: Path) -> dict[str, Any]:
    request = ExportRequest(source, target, source / "hf", -1, "keep", 40_000, 0, -1, False)
    mcore_to_hf(request, Silent())
    return read_hf(target)


@pytest.mark.parametrize(("number", "name"), enumerate(CASES))
def test_a_family_becomes_its_megatron_tensors_and_comes_back_bit_by_bit(
    tmp_path: Path, number: int, name: str
):
    config, tensors = make_case(name)
    # Every other case is read from a repository of several files.
    hf = write_repository(tmp_path / "hf", config, tensors, num_files=1 + 2 * (number % 2))
    reader = TorchDistReader(_there(hf, tmp_path / "m") / "release")
    expected = expected_tensors(name, config, tensors)
    assert reader.tensors.keys() == expected.keys()
    for key, tensor in expected.items():
        found = torch.cat([rows for _, rows in reader.iter_rows(key)])
        assert same_bits(found, tensor), key
    after = _back(tmp_path / "m", tmp_path / "back")
    assert after.keys() == tensors.keys()
    assert [key for key in tensors if not same_bits(tensors[key], after[key])] == []
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config


@pytest.mark.parametrize("name", ["qwen2-untied", "qwen3_moe-fused", "mistral3-tied"])
def test_uniform_families_go_through_the_homogeneous_layout(tmp_path: Path, name: str):
    config, tensors = make_case(name)
    hf = write_repository(tmp_path / "hf", config, tensors)
    reader = TorchDistReader(_there(hf, tmp_path / "m", Layout.HOMOGENEOUS) / "release")
    assert reader.tensors["decoder.layers.mlp.linear_fc1.layer_norm_weight"].shape == (2, 48)
    after = _back(tmp_path / "m", tmp_path / "back")
    assert after.keys() == tensors.keys()
    assert [key for key in tensors if not same_bits(tensors[key], after[key])] == []


@pytest.mark.parametrize("name", ["qwen3_5-untied", "gemma4-tied", "dflash"])
def test_families_whose_layers_differ_refuse_the_homogeneous_layout(tmp_path: Path, name: str):
    hf = write_repository(tmp_path / "hf", *make_case(name))
    with pytest.raises(ValueError, match="per_layer"):
        _there(hf, tmp_path / "m", Layout.HOMOGENEOUS)


@pytest.mark.parametrize(
    ("name", "tables"),
    [
        ("mistral3-untied", ("language_model.model.embed_tokens", "language_model.lm_head")),
        ("mistral3-tied", ("language_model.model.embed_tokens",)),
        ("nemotron-untied", ("encoder.embed_tokens", "diffusion_head")),
        ("qwen3_5-released", ("model.language_model.embed_tokens", "lm_head")),
        ("qwen3_moe-fused", ("model.embed_tokens", "lm_head")),
    ],
)
def test_a_mask_row_is_written_in_the_familys_own_tables(
    tmp_path: Path, name: str, tables: tuple[str, ...]
):
    config, tensors = make_case(name)
    hf = write_repository(tmp_path / "hf", config, tensors)
    request = ImportRequest(hf, tmp_path / "m", Layout.PER_LAYER, "keep", overwrite=False)
    settings = BdlmSettings("standard", 8, "token_causal", "", -1)
    ar_to_bdlm(request, settings, MaskWish("", 100, resize=False, init="mean"), Silent())
    after = _back(tmp_path / "m", tmp_path / "back")
    assert after.keys() == tensors.keys()
    changed = {key for key in tensors if not same_bits(tensors[key], after[key])}
    assert changed == {f"{table}.weight" for table in tables}
    for key in changed:
        assert same_bits(after[key][:100], tensors[key][:100])
        mean = tensors[key][:100].double().mean(0).float().bfloat16()
        assert same_bits(after[key][100], mean)
