"""Specifies megatron_bp/convert/bridge_files.py.

Bridge's provider is a TransformerConfig with the fields below (megatron-bridge 0.6.2,
models/gpt_provider.py), which a stand-in has here: a field that neither has is a TypeError.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_bp.convert.ar_to_bdlm import ImportRequest, hf_to_mcore
from megatron_bp.convert.bridge_files import FAMILIES, PROVIDER, write_bridge_files
from megatron_bp.convert.plan import Layout
from megatron_bp.convert.progress import Silent
from tests.convert.tiny_models import LLAMA, LLAMA3_ROPE, QWEN3, make_hf

PROVIDER_FIELDS = (
    "share_embeddings_and_output_weights", "make_vocab_size_divisible_by", "vocab_size",
    "position_embedding_type", "rotary_base", "rotary_percent", "rope_scaling",
    "rope_scaling_factor", "seq_length", "should_pad_vocab",
)  # fmt: skip


def _convert(tmp_path: Path, hf: Path) -> Path:
    target = tmp_path / "m"
    hf_to_mcore(ImportRequest(hf, target, Layout.PER_LAYER, "keep", overwrite=False), Silent())
    return target / "release"


def _build(node: dict[str, Any], known: dict[str, Any]) -> Any:
    """Does what megatron's instantiate does with `_target_` and `_call_`; needs no omegaconf."""
    fields = {k: _build(v, known) if isinstance(v, dict) else v for k, v in node.items()}
    target, call = fields.pop("_target_"), fields.pop("_call_", True)
    if target not in known:
        module, _, name = target.rpartition(".")
        known[target] = getattr(importlib.import_module(module), name)
    return known[target](**fields) if call else known[target]


def test_train_state_has_the_tensors_that_bridge_reads(tmp_path: Path):
    release = _convert(tmp_path, make_hf(tmp_path / "hf", LLAMA))
    state = torch.load(release / "train_state.pt", weights_only=True)
    whole = ("step", "consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
    flags = ("do_train", "do_valid", "do_test")
    assert {name: (value.dtype, value.item()) for name, value in state.items()} == {
        **dict.fromkeys(whole, (torch.int64, 0)),
        "floating_point_operations_so_far": (torch.float64, 0.0),
        **dict.fromkeys(flags, (torch.bool, False)),
    }
    assert not (release.parent / "latest_train_state.pt").exists()  # the tracker names "release"


def test_other_families_get_no_bridge_files(tmp_path: Path):
    write_bridge_files(tmp_path, "qwen3_5", argparse.Namespace())
    assert list(tmp_path.iterdir()) == []
    assert FAMILIES == ("llama", "qwen2", "qwen3", "qwen3_moe")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_bridges_reader_builds_the_model_config(tmp_path: Path, name: str):
    import yaml
    from megatron.core.transformer import TransformerConfig

    fields = [(field, Any, dataclasses.field(default=None)) for field in PROVIDER_FIELDS]
    provider = dataclasses.make_dataclass("GPTModelProvider", fields, bases=(TransformerConfig,))
    scaled = {**LLAMA, "rope_scaling": LLAMA3_ROPE}
    hf = make_hf(tmp_path / "hf", scaled if name == "llama" else QWEN3)
    config = yaml.safe_load((_convert(tmp_path, hf) / "run_config.yaml").read_text())
    assert config["checkpoint"] == {
        "save_optim": False, "save_rng": False, "fully_parallel_save": False,
    }  # fmt: skip
    model = _build(config["model"], {PROVIDER: provider})
    assert (model.activation_func, model.params_dtype) == (torch.nn.functional.silu, torch.bfloat16)
    assert (model.num_query_groups, model.gated_linear_unit, model.vocab_size) == (2, True, 101)
    expected = (12, True, 8.0, True, False) if name == "llama" else (16, False, 8.0, False, True)
    found = (
        model.kv_channels,
        model.rope_scaling,
        model.rope_scaling_factor,
        model.share_embeddings_and_output_weights,
        model.qk_layernorm,
    )
    assert found == expected
