"""Specifies megatron_bp/convert/families: what a config means, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_bp.convert.families import read_model
from megatron_bp.convert.families.base import ModelShape
from megatron_bp.convert.families.gemma4 import GemmaShape
from megatron_bp.convert.families.moe import MoeShape
from megatron_bp.convert.plan import hf_shapes, make_links
from tests.convert.tiny_families import make_case
from tests.convert.tiny_models import LLAMA, LLAMA3_ROPE, QWEN3

MISSING = object()


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


def _read(name: str, **changes: Any) -> ModelShape:
    config, tensors = make_case(name)
    for key, value in changes.items():
        outer, _, inner = key.partition("__")
        if not inner:
            config[outer] = value
        else:
            config[outer] = {**config[outer], inner: value}
    config = {key: value for key, value in config.items() if value is not MISSING}
    family, shape = read_model(config)
    return family.adapt(shape, tensors)


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        (
            "qwen2-tied",
            {"use_sliding_window": True, "sliding_window": 8, "layer_types": MISSING},
            "sliding_window=8 must",
        ),
        ("qwen3_moe-tied", {"num_local_experts": MISSING}, "num_experts=None must be a positive"),
        ("qwen3_moe-tied", {"num_experts_per_tok": 0}, "num_experts_per_tok=0 must be a positive"),
        ("qwen3_moe-tied", {"decoder_sparse_step": 2}, "every layer must have experts"),
        ("qwen3_moe-tied", {"mlp_only_layers": [1]}, "every layer must have experts"),
        ("bailing-tied", {"n_group": MISSING}, "n_group=None must be a positive integer"),
        ("bailing-tied", {"topk_group": MISSING}, "topk_group=None must be positive"),
        ("bailing-tied", {"score_function": "softmax"}, "score_function='softmax' must be 'sigmo"),
        ("bailing-tied", {"norm_topk_prob": False}, "norm_topk_prob=False must be True"),
        ("bailing-tied", {"use_qkv_bias": True}, "use_qkv_bias=true: projection biases"),
        ("bailing-tied", {"norm_head": True}, "norm_head=true: a head that is normalised"),
        ("bailing-tied", {"num_nextn_predict_layers": 1}, "multi-token-prediction layers do not"),
        ("bailing-tied", {"expert_capacity": 2}, "block routing) have no counterpart"),
        ("bailing-tied", {"n_group": 4}, "num_experts=6 must be a multiple of n_group=4"),
        (
            "bailing-tied",
            {"num_experts_per_tok": 2},
            "must be twice topk_group=2: the",
        ),
        ("bailing-tied", {"rotary_dim": 16}, "rotary_dim=16 must be head_dim"),
        ("bailing-tied", {"first_k_dense_replace": 4}, "first_k_dense_replace=4 must be in [0, 3]"),
        ("mistral3-tied", {"text_config": MISSING}, "model_type='mistral3' but no text_config"),
        ("mistral3-tied", {"text_config__model_type": "mistral"}, "text_config.model_type='mistra"),
        ("mistral3-tied", {"text_config__sliding_window": 16}, "sliding_window=16 must be null"),
        ("ministral3-tied", {"attention_bias": True}, "attention_bias=true"),
        ("nemotron-untied", {"rope_parameters": MISSING}, "needs its YaRN settings"),
        ("qwen3_5-untied", {"text_config": MISSING}, "model_type='qwen3_5' but no text_config"),
        ("qwen3_5-untied", {"text_config__linear_num_value_heads": None}, "linear_num_value_heads"),
        ("qwen3_5_text-tied", {"layer_types": ["full_attention"]}, "1 entries for 4 layers"),
        (
            "qwen3_5_text-tied",
            {"layer_types": ["sliding_attention"] * 4},
            "found sliding_attention",
        ),
        ("qwen3_5_text-tied", {"attn_output_gate": False}, "q_proj must carry an output gate"),
        ("qwen3_5_moe-untied", {"moe_intermediate_size": MISSING}, "intermediate_size=None must"),
        ("gemma4_text-tied", {"hidden_size_per_layer_input": 16}, "per-layer embeddings"),
        ("gemma4_text-tied", {"hidden_size_per_layer_input": MISSING}, "per-layer embeddings"),
        ("gemma4_text-tied", {"num_kv_shared_layers": 2}, "shared K/V layers do not convert"),
        ("gemma4_text-tied", {"hidden_activation": "silu"}, "must be 'gelu_pytorch_tanh'"),
        (
            "gemma4_text-tied",
            {"num_experts": None},
            "num_experts=None and moe_intermediate_size=20",
        ),
        ("gemma4_text-tied", {"sliding_window": MISSING}, "sliding_window=None must be an integer"),
        (
            "gemma4_text-tied",
            {"per_layer_config": {"0": {"head_dim": 4}}},
            "must give the full lay",
        ),
        ("diffusion_gemma-tied", {"text_config": MISSING}, "but no text_config"),
        ("dflash", {"dflash_config": MISSING}, "target_layer_ids=None must list"),
        ("dflash", {"dflash_config__mask_token_id": None}, "mask_token_id=None must be an integer"),
        ("dflash2", {"dflash_config__conv_group_size": 7}, "conv_group_size=7 must divide 48"),
        (
            "dflash2",
            {"dflash_config__selector_rank": None},
            "selector_rank=None must be an integer",
        ),
    ],
)
def test_a_config_without_its_familys_fields_is_refused(
    name: str, change: dict[str, Any], text: str
):
    with pytest.raises(ValueError, match=r"\w") as error:
        _read(name, **change)
    assert text in str(error.value)


def test_drafters_and_remote_code_are_known_by_architecture():
    # Their model_type is another family's, or anything.
    assert _read("dflash").family == "dflash"
    assert _read("dflash2").family == "dflash2"
    assert _read("nemotron-untied", model_type="whatever").family == "nemotron_labs_diffusion"


@pytest.mark.parametrize(
    ("outer", "inner", "tied"),
    [(True, True, True), (False, False, False), (True, False, True), (MISSING, False, True)],
)
def test_tensors_decide_when_a_config_is_at_odds_with_itself(outer: Any, inner: bool, tied: bool):
    # Without a head tensor, a disputed tie is a tie; with one it is not.
    change = {"tie_word_embeddings": outer, "text_config__tie_word_embeddings": inner}
    assert _read("mistral3-tied", **change).tied is tied
    assert _read("mistral3-untied", **change).tied is (tied and outer is inner)


def test_full_layers_of_gemma_have_their_own_heads_in_either_spelling():
    config, _ = make_case("gemma4_text-tied")
    assert "per_layer_config" in config  # as transformers 5.24 writes it
    new = read_model(config)[1]
    old = {key: value for key, value in config.items() if key != "per_layer_config"}
    old |= {"global_head_dim": 16, "num_global_key_value_heads": 1}
    assert read_model(old)[1] == new
    padded = {f"{int(layer):02d}": heads for layer, heads in config["per_layer_config"].items()}
    assert read_model(config | {"per_layer_config": padded})[1] == new
    assert isinstance(new, GemmaShape)
    assert [new.heads(layer) for layer in range(3)] == [(8, 2), (16, 1), (16, 1)]


def test_layer_types_follow_the_interval_when_a_config_lists_none():
    listed = _read("qwen3_5_text-tied")
    assert _read("qwen3_5_text-tied", layer_types=MISSING, full_attention_interval=4) == listed


@pytest.mark.parametrize(("name", "fused"), [("qwen3_moe", False), ("qwen3_5_moe", True)])
def test_expert_layout_is_read_from_the_names_and_else_as_released(name: str, fused: bool):
    for variant, found in (("untied", False), ("fused", True)):
        shape = _read(f"{name}-{variant}")
        assert isinstance(shape, MoeShape)
        assert shape.fused_experts is found
        family, default = read_model(make_case(f"{name}-{variant}")[0])
        assert isinstance(default, MoeShape)
        for unknown in ((), ("lm_head.weight",)):
            assert family.adapt(default, unknown) == replace(shape, fused_experts=fused)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("qwen3_5-untied", "model.language_model.", "model."),
        ("qwen3_5_text-tied", "model.", "model.language_model."),
        ("gemma4_text-untied", "model.", "model.language_model."),
        ("mistral3-untied", "language_model.model.", "model.language_model."),
        ("ministral3-tied", "model.", "language_model.model."),
    ],
)
def test_the_text_model_is_found_under_other_prefixes(name: str, old: str, new: str):
    config, tensors = make_case(name)
    family, shape = read_model(config)
    moved = {
        "lm_head.weight" if key.endswith("lm_head.weight") else key.replace(old, new, 1)
        for key in tensors
    }
    assert family.adapt(shape, tensors).layer_prefix == f"{old}layers."
    adapted = family.adapt(shape, moved)
    assert adapted.layer_prefix == f"{new}layers."
    links = make_links(family, adapted)
    head = "language_model.lm_head.weight" if new == "language_model.model." else "lm_head.weight"
    assert adapted.head_name == head
    owned = {key for key in hf_shapes(links) if not key.endswith("lm_head.weight")}
    assert owned <= moved
