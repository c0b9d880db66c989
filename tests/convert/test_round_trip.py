"""Specifies ar_to_bdlm.py, export.py and hf_model.py: exact round trips, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_bp.convert.ar_to_bdlm import ImportRequest, MaskWish, ar_to_bdlm, hf_to_mcore
from megatron_bp.convert.bdlm_settings import BdlmSettings
from megatron_bp.convert.export import ExportRequest, mcore_to_hf
from megatron_bp.convert.plan import Layout
from megatron_bp.convert.progress import Silent
from megatron_bp.convert.torch_dist_io import TorchDistReader
from tests.convert.tiny_models import (
    LLAMA,
    LLAMA3_ROPE,
    QWEN3,
    expected_megatron,
    make_hf,
    random_tensors,
    read_hf,
    same_bits,
    write_hf,
)

CASES = {
    "llama-tied": LLAMA,
    "llama-untied-rope3": {**LLAMA, "tie_word_embeddings": False, "rope_scaling": LLAMA3_ROPE},
    "qwen3-untied": QWEN3,
    "qwen3-tied": {**QWEN3, "tie_word_embeddings": True},
}
SETTINGS = BdlmSettings("fast_dllm_v2", 8, "preset", "", -1)
NO_WISH = MaskWish("", -1, resize=False, init="mean")


def _import(source: Path, target: Path, **changes: Any) -> ImportRequest:
    request = ImportRequest(source, target, Layout.PER_LAYER, "keep", overwrite=False)
    return replace(request, **changes)


def _export(source: Path, target: Path, **changes: Any) -> ExportRequest:
    request = ExportRequest(source, target, source / "hf", -1, "keep", 10**9, 0, -1, False)
    return replace(request, **changes)


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("name", CASES)
def test_a_bf16_round_trip_is_bit_exact(tmp_path: Path, name: str, layout: Layout):
    config = CASES[name]
    hf = make_hf(tmp_path / "hf", config)
    hf_to_mcore(_import(hf, tmp_path / "m", layout=layout), Silent())
    mcore_to_hf(_export(tmp_path / "m", tmp_path / "back", max_shard_bytes=40_000), Silent())
    before, after = read_hf(hf), read_hf(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(same_bits(before[key], after[key]) for key in before)
    assert (tmp_path / "back" / "model.safetensors.index.json").exists()
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert json.loads((tmp_path / "back" / file).read_text()) == json.loads(
            (hf / file).read_text()
        )


@pytest.mark.parametrize("name", CASES)
def test_megatron_tensors_equal_an_independent_construction(tmp_path: Path, name: str):
    hf = make_hf(tmp_path / "hf", CASES[name])
    hf_to_mcore(_import(hf, tmp_path / "m"), Silent())
    reader = TorchDistReader(tmp_path / "m" / "release")
    expected = expected_megatron(CASES[name], read_hf(hf))
    assert reader.tensors.keys() == expected.keys()
    for key, tensor in expected.items():
        found = torch.cat([rows for _, rows in reader.iter_rows(key)])
        assert same_bits(found, tensor), key


def test_large_tensors_are_cut_into_chunks_without_a_seam(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("megatron_bp.convert.import_work.CHUNK_BYTES", 7 * 48 * 2)
    hf = make_hf(tmp_path / "hf", QWEN3)
    hf_to_mcore(_import(hf, tmp_path / "m", layout=Layout.HOMOGENEOUS), Silent())
    mcore_to_hf(_export(tmp_path / "m", tmp_path / "back"), Silent())
    before, after = read_hf(hf), read_hf(tmp_path / "back")
    assert all(same_bits(before[key], after[key]) for key in before)


def test_dtype_changes_only_when_asked_and_config_says_so(tmp_path: Path):
    hf = make_hf(tmp_path / "hf", LLAMA)
    hf_to_mcore(_import(hf, tmp_path / "m", dtype="float32"), Silent())
    mcore_to_hf(_export(tmp_path / "m", tmp_path / "keep"), Silent())
    mcore_to_hf(_export(tmp_path / "m", tmp_path / "bf16", dtype="bfloat16"), Silent())
    before, kept, cast = (read_hf(tmp_path / name) for name in ("hf", "keep", "bf16"))
    assert all(same_bits(kept[key], before[key].float()) for key in before)
    assert all(same_bits(cast[key], before[key]) for key in before)
    for name, dtype in (("keep", "float32"), ("bf16", "bfloat16")):
        assert json.loads((tmp_path / name / "config.json").read_text())["torch_dtype"] == dtype


@pytest.mark.parametrize("name", ["llama-tied", "qwen3-untied"])
def test_ar_to_bdlm_adds_one_mean_row_and_changes_nothing_else(tmp_path: Path, name: str):
    hf = make_hf(tmp_path / "hf", CASES[name])
    # The tokenizer has 100 ids, the table 101 rows: row 100 is unused.
    manifest = ar_to_bdlm(
        _import(hf, tmp_path / "m"), SETTINGS, replace(NO_WISH, token_id=100), Silent()
    )
    mcore_to_hf(_export(tmp_path / "m", tmp_path / "back"), Silent())
    before, after = read_hf(hf), read_hf(tmp_path / "back")
    tables = {"model.embed_tokens.weight", "lm_head.weight"} & before.keys()
    for key in before:
        expected = before[key].clone()
        if key in tables:
            expected[100] = before[key][:100].double().mean(0).float().bfloat16()
            norm = manifest["mask_row"]["tables"][key]["norm"]
            assert norm == pytest.approx(float(expected[100].double().norm()))
        assert same_bits(after[key], expected), key
    assert manifest["mask_row"]["tables"].keys() == tables
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (config["vocab_size"], config["mask_token_id"], config["block_size"]) == (101, 100, 8)
    generation = json.loads((tmp_path / "back" / "generation_config.json").read_text())
    assert generation == {
        "eos_token_id": 2, "top_p": 0.9, "block_size": 8, "mask_token_id": 100,
    }  # fmt: skip


def test_resize_grows_config_tables_and_tokenizer_together(tmp_path: Path):
    config = {**QWEN3, "vocab_size": 100}
    hf = write_hf(tmp_path / "hf", {**config, "vocab_size": 101}, random_tensors(config))
    (hf / "config.json").write_text(json.dumps(config))  # a tokenizer of exactly 100 ids
    wish = replace(NO_WISH, token="<mask>", resize=True)
    manifest = ar_to_bdlm(_import(hf, tmp_path / "m"), SETTINGS, wish, Silent())
    assert (manifest["mask_token"], manifest["mask_token_id"]) == ("<mask>", 100)
    mcore_to_hf(_export(tmp_path / "m", tmp_path / "back"), Silent())
    after = read_hf(tmp_path / "back")
    assert after["model.embed_tokens.weight"].shape == (101, 48)
    assert after["lm_head.weight"].shape == (101, 48)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["vocab_size"] == 101
    tokens = json.loads((tmp_path / "back" / "tokenizer.json").read_text())["added_tokens"]
    assert tokens[-1]["id"] == 100


def test_mask_row_can_be_kept(tmp_path: Path):
    hf = make_hf(tmp_path / "hf", LLAMA)
    wish = replace(NO_WISH, token_id=100, init="keep")
    ar_to_bdlm(_import(hf, tmp_path / "m"), SETTINGS, wish, Silent())
    mcore_to_hf(_export(tmp_path / "m", tmp_path / "back"), Silent())
    key = "model.embed_tokens.weight"
    assert same_bits(read_hf(hf)[key], read_hf(tmp_path / "back")[key])


def test_the_manifest_names_sources_settings_and_versions(tmp_path: Path):
    hf = make_hf(tmp_path / "hf", LLAMA)
    ar_to_bdlm(_import(hf, tmp_path / "m"), SETTINGS, replace(NO_WISH, token_id=100), Silent())
    manifest = json.loads((tmp_path / "m" / "bdlm_conversion.json").read_text())
    assert manifest["source_sha256"].keys() >= {
        "model.safetensors", "config.json", "tokenizer.json",
    }  # fmt: skip
    expected = {
        "family": "llama",
        "objective": "fast_dllm_v2",
        "alignment": "shifted",
        "block_size": 8,
        "clean_rule": "preset",
        "mask_token": "<|MASK|>",
        "mask_token_id": 100,
        "megatron_core_version": "0.19.2",
        "tool": "megatron_bp",
    }
    assert {key: manifest[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (("drop", "model.layers.1.mlp.up_proj.weight"), r"1 missing: model\.layers\.1\.mlp\.up"),
        (("add", "model.layers.0.extra.weight"), r"1 not accounted for: model\.layers\.0\.extra"),
        (("add", "lm_head.weight"), "tie_word_embeddings=true, but lm_head.weight differs"),
        (("drop_row", "model.norm.weight"), r"1 of another shape: model\.norm\.weight"),
    ],
)
def test_a_source_that_does_not_match_its_config_is_refused_before_writing(
    tmp_path: Path, change: tuple[str, str], text: str
):
    how, name = change
    tensors = random_tensors(LLAMA)
    if how == "drop":
        del tensors[name]
    elif how == "add":
        tensors[name] = torch.zeros(101, 48).bfloat16()
    else:
        tensors[name] = tensors[name][1:].clone()
    hf = write_hf(tmp_path / "hf", LLAMA, tensors)
    with pytest.raises(ValueError, match=text):
        hf_to_mcore(_import(hf, tmp_path / "m"), Silent())
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_tied_model_may_repeat_its_embedding_as_head(tmp_path: Path):
    tensors = random_tensors(LLAMA)
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    hf = write_hf(tmp_path / "hf", LLAMA, tensors | head)
    hf_to_mcore(_import(hf, tmp_path / "m"), Silent())
    assert "output_layer.weight" not in TorchDistReader(tmp_path / "m" / "release").tensors


def test_a_tied_head_is_compared_to_the_last_bit_of_every_block(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("megatron_bp.convert.safetensors_io._READ_BYTES", 48 * 2 * 10)
    tensors = random_tensors(LLAMA)
    head = tensors["model.embed_tokens.weight"].clone()
    head.view(torch.uint8)[0, 0] ^= 1  # the first block of several
    hf = write_hf(tmp_path / "hf", LLAMA, tensors | {"lm_head.weight": head})
    with pytest.raises(ValueError, match=r"lm_head\.weight differs"):
        hf_to_mcore(_import(hf, tmp_path / "m"), Silent())


def test_export_refuses_a_checkpoint_that_does_not_match_its_config(tmp_path: Path):
    hf = make_hf(tmp_path / "hf", QWEN3)
    hf_to_mcore(_import(hf, tmp_path / "m"), Silent())
    other = tmp_path / "m" / "hf" / "config.json"
    for change, text in (
        ({"num_hidden_layers": 3}, r"8 not accounted for: decoder\.layers\.3"),
        ({"num_hidden_layers": 5}, r"8 missing: decoder\.layers\.4"),
        ({"model_type": "llama"}, "8 not accounted for: decoder.layers.0.self_attention.q_layer"),
        (
            {"tie_word_embeddings": True},
            "tie_word_embeddings=true, but output_layer.weight differs",
        ),
        ({"vocab_size": 102}, "embedding.word_embeddings.weight has .101, 48., config says .102"),
    ):
        other.write_text(json.dumps({**QWEN3, **change}))
        with pytest.raises(ValueError, match=text):
            mcore_to_hf(_export(tmp_path / "m", tmp_path / "back"), Silent())
        assert not (tmp_path / "back").exists()


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path):
    class Interrupt(Silent):
        def advance(self, num_bytes: int) -> None:
            raise KeyboardInterrupt

    hf = make_hf(tmp_path / "hf", LLAMA)
    with pytest.raises(KeyboardInterrupt):
        hf_to_mcore(_import(hf, tmp_path / "m"), Interrupt())
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_mixed_dtypes_inside_a_fused_tensor_are_refused(tmp_path: Path):
    tensors = random_tensors(LLAMA)
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors[name] = tensors[name].float()
    hf = tmp_path / "hf"
    write_hf(hf, LLAMA, tensors)
    with pytest.raises(ValueError, match="must be one float"):
        hf_to_mcore(_import(hf, tmp_path / "m"), Silent())


def test_sharded_sources_are_read(tmp_path: Path):
    tensors = random_tensors(LLAMA)
    hf = write_hf(tmp_path / "hf", LLAMA, tensors)
    (hf / "model.safetensors").unlink()
    halves = (dict(list(tensors.items())[:9]), dict(list(tensors.items())[9:]))
    weight_map = {}
    for number, half in enumerate(halves, start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file(half, hf / file)
        weight_map |= dict.fromkeys(half, file)
    (hf / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    hf_to_mcore(_import(hf, tmp_path / "m"), Silent())
    mcore_to_hf(_export(tmp_path / "m", tmp_path / "back"), Silent())
    after = read_hf(tmp_path / "back")
    assert all(same_bits(tensors[key], after[key]) for key in tensors)
