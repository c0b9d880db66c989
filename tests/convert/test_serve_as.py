"""Specifies megatron_bp/convert/serve_as: the keys that engines read, and what they would misread.

`READ` lists the config keys that an engine's code reads, with the file it was read in. SGLang's are
those of its 0.5.23 wheel; published config.json files where no engine has the model yet.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_bp.convert.ar_to_bdlm import ImportRequest, hf_to_mcore
from megatron_bp.convert.bdlm_settings import AUTOREGRESSIVE, BdlmSettings
from megatron_bp.convert.export import ExportRequest, mcore_to_hf
from megatron_bp.convert.plan import Layout
from megatron_bp.convert.progress import Silent
from megatron_bp.convert.serve_as import AS_IT_IS, PROFILES, find_profile
from megatron_bp.convert.serve_as.base import Export
from tests.convert.bailing_models import BAILING
from tests.convert.tiny_models import (
    LLAMA,
    LLAMA3_ROPE,
    QWEN3,
    random_tensors,
    read_hf,
    same_bits,
    write_hf,
    write_json,
)

SDAR = BdlmSettings("standard", 4, "block_causal", "<|MASK|>", 151669)
FAST = BdlmSettings("fast_dllm_v2", 32, "preset", "|<MASK>|", 151665)
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}
QWEN = {k: v for k, v in QWEN3.items() if k != "rope_theta"} | ROPE | {"vocab_size": 151936}
MINISTRAL: dict[str, Any] = {
    "model_type": "mistral3",
    "eos_token_id": 11,
    "vision_config": {},
    "text_config": {
        **QWEN,
        "model_type": "ministral3",
        "vocab_size": 131072,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "llama_4_scaling_beta": 0.1,
        },
    },
}
DRAFT: dict[str, Any] = {
    **{k: v for k, v in QWEN.items() if k != "architectures"},
    "num_hidden_layers": 2,
    "num_target_layers": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 2048,
    "is_causal": False,
    "block_size": 8,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 4, 6]},
}
_SECOND = {
    "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16,
}  # fmt: skip
DRAFT2: dict[str, Any] = {**DRAFT, "dflash_config": {**DRAFT["dflash_config"], **_SECOND}}
BAILING_2: dict[str, Any] = {
    **BAILING,
    "vocab_size": 157184,
    "num_experts": 256,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
}
EXPORTS = {
    "sdar": Export("qwen3", QWEN, SDAR, 151936, False),
    "fast_dllm_v2": Export("qwen2", QWEN, FAST, 151936, True),
    "llada2": Export(
        "bailing_moe_v2", BAILING_2, replace(SDAR, mask_token_id=156895), 157184, False
    ),
    "nemotron_labs": Export(
        "ministral3", MINISTRAL, BdlmSettings("standard", 32, "preset", "", 100), 131072, True
    ),
    "diffusion_gemma": Export("diffusion_gemma", QWEN, AUTOREGRESSIVE, 262144, True),
    "dflash": Export("dflash", DRAFT, AUTOREGRESSIVE, 151936, True),
    "dflash2": Export("dflash2", DRAFT2, AUTOREGRESSIVE, 151936, True),
}
_LAYERS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "num_hidden_layers", "rms_norm_eps", "max_position_embeddings", "vocab_size", "hidden_act",
    "tie_word_embeddings", "rope_theta",
)  # fmt: skip
READ = {
    # sglang/srt/models/sdar.py, dllm/config.py (architectures; mask and block built in there)
    "sdar": (*_LAYERS, "head_dim", "architectures", "model_type", "auto_map"),
    # config.json and generation code of Efficient-Large-Model/Fast_dLLM_v2
    "fast_dllm_v2": (*_LAYERS, "architectures", "model_type", "auto_map", "bd_size", "layer_types"),
    # sglang/srt/models/llada2.py
    "llada2": (
        *_LAYERS, "head_dim", "architectures", "model_type", "auto_map", "rope_scaling",
        "partial_rotary_factor", "rotary_dim", "use_bias", "use_qkv_bias", "use_qk_norm",
        "norm_topk_prob", "score_function", "router_dtype", "moe_router_enable_expert_bias",
        "num_experts", "num_experts_per_tok", "n_group", "topk_group", "routed_scaling_factor",
        "moe_intermediate_size", "num_shared_experts", "first_k_dense_replace",
        "embedding_dropout", "norm_head",
    ),
    # published config.json of Nemotron-Labs-Diffusion
    "nemotron_labs": (
        *_LAYERS, "architectures", "model_type", "auto_map", "dlm_paradigm", "block_size",
        "mask_token_id", "llama_4_scaling_beta", "rope_scaling",
    ),
    # sglang/srt/dllm/config.py
    "diffusion_gemma": ("architectures", "model_type", "canvas_length"),
    # sglang/srt/speculative/dflash_utils.py and models/dflash.py
    "dflash": (
        *_LAYERS, "architectures", "model_type", "block_size", "is_causal", "layer_types",
        "sliding_window", "use_sliding_window", "num_target_layers", "dflash_config",
    ),
}  # fmt: skip
READ["dflash2"] = READ["dflash"]


@pytest.mark.parametrize("name", EXPORTS)
def test_a_profile_writes_every_key_that_its_engine_reads(name: str):
    config = find_profile(name, EXPORTS[name]).rewrite(EXPORTS[name])
    assert [key for key in READ[name] if key not in config] == []
    theta = 600000 if name == "llada2" else 1000000.0
    assert config.get("rope_theta", theta) == theta  # engines take 10000 otherwise


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sdar", ("SDARForCausalLM", "sdar")),
        ("fast_dllm_v2", ("Fast_dLLM_QwenForCausalLM", "Fast_dLLM_Qwen")),
        ("llada2", ("LLaDA2MoeModelLM", "llada2_moe")),
        ("nemotron_labs", ("NemotronLabsDiffusionModel", "nemotron_labs_diffusion")),
        ("diffusion_gemma", ("DiffusionGemmaForBlockDiffusion", "diffusion_gemma")),
        ("dflash", ("DFlashDraftModel", "qwen3")),
        ("dflash2", ("DFlash2DraftModel", "qwen3")),
    ],
)
def test_architecture_and_type_are_the_engines(name: str, expected: tuple[str, str]):
    config = find_profile(name, EXPORTS[name]).rewrite(EXPORTS[name])
    assert (config["architectures"], config["model_type"]) == ([expected[0]], expected[1])
    moe = replace(EXPORTS["sdar"], family="qwen3_moe")
    config = find_profile("sdar", moe).rewrite(moe)
    assert (config["architectures"], config["model_type"]) == (["SDARMoeForCausalLM"], "sdar_moe")


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("sdar", {"family": "llama"}, "family=llama must be qwen3 or qwen3_moe: .* query and key"),
        (
            "sdar",
            {"settings": replace(SDAR, mask_token_id=151670)},
            "must be 151669, which",
        ),
        (
            "sdar",
            {"settings": replace(SDAR, objective="fast_dllm_v2")},
            "logit_alignment=shifted, but the engine reads same: every token .* wrong row",
        ),
        (
            "sdar",
            {"settings": replace(SDAR, clean_rule="preset")},
            "clean_rule=token_causal must be block_causal",
        ),
        ("sdar", {"settings": AUTOREGRESSIVE}, "the model is autoregressive; convert it with ar2"),
        ("sdar", {"canvas": "uniform"}, "canvas=uniform: the model was trained to correct random"),
        ("sdar", {"canvas": "seed_and_mask"}, "canvas=seed_and_mask: .* the engine masks it"),
        ("fast_dllm_v2", {"canvas": "uniform"}, "but the engine shows it mask tokens"),
        ("fast_dllm_v2", {"settings": replace(FAST, objective="standard")}, "same, but .* shifted"),
        ("fast_dllm_v2", {"family": "qwen3"}, "must be qwen2 or llama: .* no query and key norms"),
        (
            "fast_dllm_v2",
            {"family": "llama"},
            "head_dim=16 must be .* = 8: Qwen2.5's layers have no",
        ),
        (
            "fast_dllm_v2",
            {"settings": replace(FAST, mask_token_id=100)},
            "mask_token_id=100 must be 151665, which",
        ),
        ("nemotron_labs", {"family": "qwen3"}, "must be ministral3 or nemotron_labs_diffusion"),
        ("diffusion_gemma", {"settings": SDAR}, "starts from random tokens and has no mask"),
        ("diffusion_gemma", {"family": "gemma4"}, "self-conditioning, which no autoregressive"),
        ("dflash", {"config": {**DRAFT, "is_causal": None}}, "is_causal is missing: without it"),
        ("dflash", {"config": {**DRAFT, "num_target_layers": 6}}, r"\[1, 4, 6\] must be below"),
        ("dflash", {"config": {**DRAFT, "dflash_config": {}}}, "target_layer_ids is missing; eng"),
        ("dflash", {"config": {**DRAFT, "layer_types": []}}, "layer_types has 0 entries"),
        ("dflash", {"config": {**DRAFT, "sliding_window": None}}, "sliding_window is missing"),
        ("dflash", {"config": DRAFT2}, "selector_top_k=16 belongs to DFlash2: the engine would"),
        ("dflash2", {"config": DRAFT}, "dflash_config.selector_rank is missing"),
        ("dflash2", {"family": "dflash"}, "family=dflash must be dflash2"),
    ],
)
def test_what_the_engine_would_misread_is_refused(name: str, change: dict[str, Any], text: str):
    with pytest.raises(ValueError, match=rf"serve_as={name} cannot be written:\n(?s:.*){text}"):
        find_profile(name, replace(EXPORTS[name], **change))


def test_a_model_that_llada2_cannot_be_is_refused_with_every_reason():
    reasons = r"must be bailing_moe_v2(?s:.*)no row 156895(?s:.*)must be 156895"
    with pytest.raises(ValueError, match=reasons):
        find_profile("llada2", EXPORTS["sdar"])
    settings = replace(EXPORTS["llada2"].settings, clean_rule="token_causal")
    causal = replace(EXPORTS["llada2"], settings=settings)
    with pytest.raises(ValueError, match="clean_rule=token_causal must be block_causal"):
        find_profile("llada2", causal)


def test_every_profile_has_a_list_of_what_its_engine_reads():
    assert PROFILES.keys() == EXPORTS.keys() == READ.keys()
    with pytest.raises(ValueError, match="serve_as='x' must be one of as_it_is, sdar"):
        find_profile("x", EXPORTS["sdar"])


def test_a_drafters_own_settings_are_written_twice_and_causality_is_said():
    config = find_profile("dflash2", EXPORTS["dflash2"]).rewrite(EXPORTS["dflash2"])
    own = config["dflash_config"]
    assert (own["block_size"], config["block_size"], own["causal"]) == (8, 8, False)
    assert (own["projector_type"], config["is_causal"]) == ("dflash2", False)


def test_the_default_keeps_the_architecture_and_says_how_logits_are_used():
    config = find_profile(AS_IT_IS, EXPORTS["sdar"]).rewrite(EXPORTS["sdar"])
    assert config == QWEN | {
        "mask_token_id": 151669, "block_size": 4,
        "logit_alignment": "same", "clean_rule": "block_causal",
    }  # fmt: skip


def _export(root: Path, hf: Path, **changes: Any) -> ExportRequest:
    hf_to_mcore(ImportRequest(hf, root / "m", Layout.PER_LAYER, "keep", False), Silent())
    sizes = (-1, "keep", 10**9, 0, -1, False)
    return ExportRequest(root / "m", root / "back", root / "m" / "hf", *sizes, **changes)


def test_nemotron_tensors_are_renamed_and_a_tied_head_is_written_out(tmp_path: Path):
    config = {**QWEN3, **MINISTRAL["text_config"], "vocab_size": 101, "tie_word_embeddings": True}
    config |= {"mask_token_id": 100, "block_size": 32}
    tensors = random_tensors({**config, "model_type": "llama"})
    hf = write_hf(tmp_path / "hf", config, tensors)
    request = _export(tmp_path, hf, serve_as="nemotron_labs", objective="standard")
    mcore_to_hf(request, Silent())
    found = read_hf(tmp_path / "back")
    assert same_bits(found["diffusion_head.weight"], tensors["model.embed_tokens.weight"])
    assert same_bits(found["encoder.norm.weight"], tensors["model.norm.weight"])
    assert {"diffusion_head.weight"} | {
        name.replace("model.", "encoder.") for name in tensors
    } == found.keys()
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert written["tie_word_embeddings"] is False


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_a_llama_model_is_served_in_qwen2s_layers_with_zero_biases(tmp_path: Path, tied: bool):
    from transformers import AutoModelForCausalLM

    config = {**LLAMA, "torch_dtype": "float32", "tie_word_embeddings": tied}
    config |= {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "rope_theta": 5e5}
    config |= {"rope_scaling": LLAMA3_ROPE}
    tensors = {name: tensor.float() for name, tensor in random_tensors(config).items()}
    hf = write_hf(tmp_path / "hf", config, tensors)
    changes = {"objective": "fast_dllm_v2", "block_size": 8, "mask_token_id": 100}
    request = _export(tmp_path, hf, serve_as="fast_dllm_v2")
    manifest = mcore_to_hf(replace(request, max_shard_bytes=40_000, **changes), Silent())
    assert (manifest["family"], manifest["serve_as"]) == ("llama", "fast_dllm_v2")
    found = read_hf(tmp_path / "back")
    assert [name for name in tensors if not same_bits(found[name], tensors[name])] == []
    added = {name: found[name].shape[0] for name in found.keys() - tensors.keys()}
    assert added == {
        f"model.layers.{layer}.self_attn.{name}_proj.bias": rows
        for layer in range(2)
        for name, rows in (("q", 48), ("k", 24), ("v", 24))
    }
    assert not any(found[name].any() for name in added)
    served, loading = AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", trust_remote_code=True, output_loading_info=True
    )
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert type(served).__name__ == "Fast_dLLM_QwenForCausalLM"
    assert (served.config.bd_size, served.config.mask_token_id) == (8, 100)
    original = AutoModelForCausalLM.from_pretrained(hf)
    tokens = torch.randint(0, 101, (2, 33), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = original.eval()(tokens).logits
        assert expected.std() > 0.1
        assert torch.equal(served.eval()(tokens).logits, expected)
    # What was exported can be converted again, as the Qwen2 model that it now is.
    again = ImportRequest(tmp_path / "back", tmp_path / "n", Layout.PER_LAYER, "keep", False)
    assert hf_to_mcore(again, Silent())["family"] == "qwen2"


@pytest.mark.slow
def test_transformers_loads_an_sdar_export_and_computes_the_same_logits(tmp_path: Path):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = {**QWEN, "hidden_size": 16, "intermediate_size": 24, "torch_dtype": "float32"}
    config |= {"num_hidden_layers": 2}
    tensors = {name: tensor.float() for name, tensor in random_tensors(config).items()}
    hf = write_hf(tmp_path / "hf", {**config, "vocab_size": 101}, tensors)
    write_json(hf / "config.json", config)
    changes = {"objective": "standard", "clean_rule": "block_causal"}
    request = _export(tmp_path, hf, serve_as="sdar", **changes)
    mcore_to_hf(replace(request, block_size=4, mask_token_id=151669), Silent())
    load = {"trust_remote_code": True}
    served = AutoModelForCausalLM.from_pretrained(tmp_path / "back", **load).eval()
    assert type(served).__name__ == "SDARForCausalLM"
    settings = AutoConfig.from_pretrained(tmp_path / "back", **load)
    assert (settings.model_type, settings.rope_theta, settings.block_size) == ("sdar", 1e6, 4)
    original = AutoModelForCausalLM.from_pretrained(hf).eval()
    tokens = torch.randint(0, 151936, (1, 12), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        assert torch.equal(served(tokens).logits, original(tokens).logits)
