"""Specifies megatron_bp/convert/families: what a config means, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_bp.convert.families import read_model
from tests.convert.tiny_models import LLAMA, LLAMA3_ROPE, QWEN3


def test_shapes_are_read_from_both_spellings_of_rope():
    _, old = read_model(LLAMA)
    new_config = {k: v for k, v in LLAMA.items() if k != "rope_theta"}
    new_config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    _, new = read_model(new_config)
    assert old == new
    assert (old.head_size, old.rope_base, old.qk_norm, old.tied) == (12, 10000, False, True)


def test_qwen3_heads_have_a_size_of_their_own():
    _, shape = read_model(QWEN3)
    assert (shape.head_size, shape.qk_norm, shape.tied) == (16, True, False)
    _, default = read_model({k: v for k, v in QWEN3.items() if k != "head_dim"})
    assert default.head_size == 128  # Qwen3Config's default, not hidden_size / heads


def test_llama3_rope_scaling_is_read():
    _, shape = read_model({**LLAMA, "rope_scaling": LLAMA3_ROPE})
    assert shape.rope_scaling_factor == 8.0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2'; the converter knows llama"),
        ({"attention_bias": True}, "attention_bias=true"),
        ({"mlp_bias": True}, "mlp_bias=true"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' must be 'silu'"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_type='linear' has no counter"),
        (
            {"rope_scaling": {**LLAMA3_ROPE, "low_freq_factor": 2.0}},
            "low_freq_factor=2.0 differs from 1.0",
        ),
        ({"rope_theta": 10000.5}, "rope_theta=10000.5 must be a whole number"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 must be 1.0"),
        ({"use_sliding_window": True, "sliding_window": 128}, "sliding_window=128 must be null"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types must all be"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide 4 heads"),
        ({"hidden_size": None}, "hidden_size=None must be a positive integer"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is set"),
    ],
)
def test_configs_without_a_counterpart_are_refused(change: dict[str, Any], text: str):
    with pytest.raises(ValueError, match=text):
        read_model({**LLAMA, **change})


def test_all_problems_are_reported_at_once():
    with pytest.raises(
        ValueError, match=r"(?s)attention_bias.*hidden_act.*rope|rope.*attention_bias"
    ):
        read_model({**LLAMA, "attention_bias": True, "hidden_act": "gelu", "rope_theta": 0.5})
