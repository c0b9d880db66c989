"""Specifies megatron_bp/convert/hf_assets.py: where a config key belongs, and what is copied."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_bp.convert.hf_assets import copy_assets, dtype_changes, read_config, with_config_keys

FLAT = {"vocab_size": 5, "dtype": "bfloat16"}
NESTED = {"dtype": "bfloat16", "text_config": {"vocab_size": 5, "dtype": "bfloat16", "n": 1}}


def test_keys_of_a_flat_config_are_set_at_the_top():
    changed = with_config_keys(FLAT, {"vocab_size": 6, "mask_token_id": 5})
    assert changed == {"vocab_size": 6, "dtype": "bfloat16", "mask_token_id": 5}
    assert FLAT["vocab_size"] == 5


def test_keys_of_a_nested_config_are_set_where_they_are_and_nowhere_else():
    changed = with_config_keys(NESTED, {"vocab_size": 6, "dtype": "float32", "mask_token_id": 5})
    assert changed == {
        "dtype": "float32",
        "mask_token_id": 5,
        "text_config": {"vocab_size": 6, "dtype": "float32", "n": 1},
    }
    assert NESTED["text_config"]["vocab_size"] == 5


def test_the_dtype_keeps_the_spelling_of_the_config():
    assert dtype_changes(NESTED, torch.float32) == {"dtype": "float32"}
    assert dtype_changes({"torch_dtype": "x"}, torch.float16) == {"torch_dtype": "float16"}
    assert dtype_changes({}, torch.bfloat16) == {"torch_dtype": "bfloat16"}


def test_weights_stay_behind_and_are_named_but_the_kept_tensors_are_not(tmp_path: Path):
    source = tmp_path / "hf"
    (source / "pass_through").mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json", ".hidden", "weights.bin"):
        (source / name).write_text("{}")
    assert copy_assets(source, tmp_path / "out") == ("model.safetensors", "weights.bin")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json", "tokenizer.json",
    ]  # fmt: skip


def test_a_damaged_config_is_named(tmp_path: Path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        read_config(tmp_path)
