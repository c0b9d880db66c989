"""A config.json gives the shape of the model that transformers builds from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_bp.planning.hf_config import model_from_config, model_from_file
from megatron_bp.planning.shapes import MODELS

GEMMA = {
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "num_hidden_layers": 30,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "sliding_window": 1024,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 2,
    "enable_moe_block": True,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
    "hidden_size_per_layer_input": 0,
}
QWEN = {
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {},
    "ministral3": {"hidden_size": 3072, "num_hidden_layers": 26, "intermediate_size": 9216},
    "qwen3_5_text": QWEN,
    "gemma4_text": GEMMA,
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_parameters_are_those_of_transformers(kind: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **CONFIGS[kind])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert model_from_config(config.to_dict(), kind).num_parameters == count


def test_both_spellings_of_gemma_are_read() -> None:
    """Checkpoints give global sizes; transformers 5.24 writes overrides of single layers."""
    types = [*["sliding_attention"] * 5, "full_attention"] * 5
    config = {**GEMMA, "model_type": "gemma4_text", "layer_types": types, "vocab_size": 262144}
    config["tie_word_embeddings"] = True
    wanted = MODELS["diffusiongemma-26b-a4b"].layers
    assert model_from_config(config, "gemma").layers == wanted
    own = {f"{i:02d}": {"head_dim": 512, "num_key_value_heads": 2} for i in range(5, 30, 6)}
    del config["num_global_key_value_heads"]
    assert model_from_config({**config, "per_layer_config": own}, "gemma").layers == wanted


def test_a_folder_or_a_file_may_be_given(tmp_path: Path) -> None:
    folder = tmp_path / "llama-tiny"
    folder.mkdir()
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "vocab_size": 64,
    }
    (folder / "config.json").write_text(json.dumps(config))
    assert model_from_file(folder) == model_from_file(folder / "config.json")
    assert model_from_file(folder).name == "llama-tiny"


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not known here; known are llama"),
        ({"model_type": "llama", "hidden_size": 8}, "integers for num_hidden_layers, inter"),
    ],
)
def test_what_cannot_be_read_is_refused(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        model_from_config(config, "x")
