"""The profiles of block-diffusion language models: SDAR, Fast-dLLM v2, LLaDA2, Nemotron, Gemma.

Engines and versions read: SGLang 0.5.23 (dllm/config.py, models/sdar.py, sdar_moe.py, llada2.py,
gemma4_diffusion.py), LMDeploy's sdar model, the models' published config.json files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_bp.convert.serve_as.base import (
    Export,
    Profile,
    family_problems,
    flat_config,
    settings_problems,
    with_top_level_rope,
)
from megatron_bp.convert.serve_as.remote_code import LLADA2_FILES, remote_files

SDAR_MASK = 151669
FAST_DLLM_MASK = 151665
LLADA2_MASK = 156895
# Llama's settings that Qwen2Config does not have; reading has refused all values but the usual.
_ONLY_LLAMA = ("attention_bias", "mlp_bias", "pretraining_tp", "rope_interleaved", "head_dim")
# What sglang/srt/models/llada2.py reads without a default of its own; the values are the only ones
# that the family's reader accepts, or have no effect when a model is served.
_LLADA2_DEFAULTS: Mapping[str, Any] = {
    "hidden_act": "silu",
    "use_bias": False,
    "use_qkv_bias": False,
    "use_qk_norm": True,
    "norm_topk_prob": True,
    "score_function": "sigmoid",
    "router_dtype": "fp32",
    "moe_router_enable_expert_bias": True,
    "num_shared_experts": None,
    "first_k_dense_replace": 0,
    "embedding_dropout": 0.0,
    "norm_head": False,
    "tie_word_embeddings": False,
}
_SDAR = {
    "qwen3": ("SDARForCausalLM", "sdar", "Qwen3"),
    "qwen3_moe": ("SDARMoeForCausalLM", "sdar_moe", "Qwen3Moe"),
}


def _block_keys(export: Export) -> dict[str, Any]:
    settings = export.settings
    return {"block_size": settings.block_size, "mask_token_id": settings.mask_token_id}


def _remote(architecture: str, model_type: str) -> dict[str, Any]:
    config = f"{architecture.removesuffix('ForCausalLM')}Config"
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "auto_map": {
            "AutoConfig": f"configuration_{model_type}.{config}",
            "AutoModel": f"modeling_{model_type}.{architecture}",
            "AutoModelForCausalLM": f"modeling_{model_type}.{architecture}",
        },
    }


def _sdar_problems(export: Export) -> list[str]:
    why = "the engine's SDAR has Qwen3's layers, with query and key norms"
    problems = family_problems(export, tuple(_SDAR), why)
    return problems + settings_problems(
        export, alignment="same", clean_rule="block_causal", mask_token_id=SDAR_MASK
    )


def _sdar_config(export: Export) -> dict[str, Any]:
    architecture, model_type, _ = _SDAR[export.family]
    config = {"head_dim": 128, **with_top_level_rope(export.config)}  # Qwen3Config's default
    return {**config, **_remote(architecture, model_type), **_block_keys(export)}


def _fast_dllm_problems(export: Export) -> list[str]:
    why = (
        "Fast-dLLM v2 has Qwen2.5's layers, which hold Llama-type models exactly (zero biases) but "
        "no query and key norms, experts or other layer types"
    )
    problems = family_problems(export, ("qwen2", "llama"), why)
    if export.family == "llama":
        problems += _llama_as_qwen2_problems(export.config)
    # The published generation code has Qwen2.5's mask id as a default; other models must pass it.
    mask = FAST_DLLM_MASK if export.family == "qwen2" else -1
    return problems + settings_problems(
        export, alignment="shifted", clean_rule="block_causal", mask_token_id=mask
    )


def _llama_as_qwen2_problems(config: Mapping[str, Any]) -> list[str]:
    head, whole = config.get("head_dim"), int(config["hidden_size"])
    heads = int(config["num_attention_heads"])
    if head in (None, whole // heads):
        return []
    return [
        f"head_dim={head} must be hidden_size / num_attention_heads = {whole // heads}: Qwen2.5's "
        f"layers have no head size of their own"
    ]


def _fast_dllm_config(export: Export) -> dict[str, Any]:
    config = with_top_level_rope(export.config)
    if export.family == "llama":
        config = {k: v for k, v in config.items() if k not in _ONLY_LLAMA}
        config |= {"use_sliding_window": False, "sliding_window": None}
    return {
        **config,
        **_remote("Fast_dLLM_QwenForCausalLM", "Fast_dLLM_Qwen"),
        **_block_keys(export),
        "bd_size": export.settings.block_size,
        "layer_types": ["full_attention"] * int(config["num_hidden_layers"]),
    }


def _zero_biases(export: Export) -> dict[str, tuple[int, ...]]:
    """Returns the biases that Qwen2.5's layers have and Llama's do not, in Qwen2.5's names."""
    if export.family != "llama":
        return {}
    config = export.config
    heads = int(config["num_attention_heads"])
    head = int(config["hidden_size"]) // heads
    rows = {"q": heads, "k": int(config.get("num_key_value_heads") or heads)}
    rows["v"] = rows["k"]
    return {
        f"model.layers.{layer}.self_attn.{name}_proj.bias": (count * head,)
        for layer in range(int(config["num_hidden_layers"]))
        for name, count in rows.items()
    }


def _llada2_problems(export: Export) -> list[str]:
    why = (
        "LLaDA2 is Bailing-MoE v2 (fused query_key_value, grouped sigmoid routing); a Qwen3 model "
        "can be served with --serve-as sdar"
    )
    problems = family_problems(export, ("bailing_moe_v2",), why)
    if export.vocab_size <= LLADA2_MASK:
        problems.append(
            f"vocab_size={export.vocab_size} has no row {LLADA2_MASK}, the mask that the engine "
            f"has built in"
        )
    return problems + settings_problems(
        export, alignment="same", clean_rule="block_causal", mask_token_id=LLADA2_MASK
    )


def _llada2_config(export: Export) -> dict[str, Any]:
    config = dict(export.config)
    rotary = config.get("rotary_dim", config["head_dim"])
    factor = config.get("partial_rotary_factor", rotary / config["head_dim"])
    return {
        **_LLADA2_DEFAULTS,
        **with_top_level_rope(config),
        "partial_rotary_factor": factor,
        "rotary_dim": int(config["head_dim"] * factor),
        "architectures": ["LLaDA2MoeModelLM"],
        "model_type": "llada2_moe",
        "auto_map": {"AutoConfig": "configuration_llada2_moe.LLaDA2MoeConfig"},
        **_block_keys(export),
    }


def _nemotron_problems(export: Export) -> list[str]:
    why = "Nemotron-Labs-Diffusion has Ministral-3's layers"
    problems = family_problems(export, ("ministral3", "nemotron_labs_diffusion"), why)
    return problems + settings_problems(
        export, alignment="same", clean_rule="token_causal", mask_token_id=-1
    )


def _nemotron_config(export: Export) -> dict[str, Any]:
    config = with_top_level_rope(flat_config(export.config))
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    beta = scaling.get("llama_4_scaling_beta", config.get("llama_4_scaling_beta", 0.1))
    out = {
        **config,
        "architectures": ["NemotronLabsDiffusionModel"],
        "model_type": "nemotron_labs_diffusion",
        "auto_map": {
            "AutoConfig": "configuration_nemotron_labs_diffusion.NemotronLabsDiffusionConfig",
            "AutoModel": "modeling_nemotron_labs_diffusion.NemotronLabsDiffusionModel",
        },
        **_block_keys(export),
        "dlm_paradigm": "bidirectional",
        "llama_4_scaling_beta": beta,
        "tie_word_embeddings": False,
    }
    out.pop("vision_config", None)
    return out


def _nemotron_name(name: str) -> str:
    name = name.removeprefix("language_model.")
    if name in ("lm_head.weight", "diffusion_head.weight"):
        return "diffusion_head.weight"
    return f"encoder.{name.removeprefix('model.').removeprefix('encoder.')}"


def _gemma_problems(export: Export) -> list[str]:
    problems = family_problems(
        export,
        ("diffusion_gemma",),
        "DiffusionGemma has a decoder with self-conditioning, which no autoregressive model has",
    )
    if export.settings.objective != "none":
        problems.append(
            f"objective={export.settings.objective} trains on mask tokens, but the engine starts "
            f"from random tokens and has no mask"
        )
    if not export.tied:
        problems.append("the head must be tied to the embedding; SGLang has no untied head for it")
    return problems


def _gemma_config(export: Export) -> dict[str, Any]:
    out = dict(export.config)
    out |= {
        "architectures": ["DiffusionGemmaForBlockDiffusion"],
        "model_type": "diffusion_gemma",
        "canvas_length": int(out.get("canvas_length", 256)),
    }
    return out


SDAR = Profile("sdar", _sdar_problems, _sdar_config, files=remote_files(_SDAR.values()))
FAST_DLLM_V2 = Profile(
    "fast_dllm_v2",
    _fast_dllm_problems,
    _fast_dllm_config,
    files=remote_files([("Fast_dLLM_QwenForCausalLM", "Fast_dLLM_Qwen", "Qwen2")]),
    zeros=_zero_biases,
)
LLADA2 = Profile("llada2", _llada2_problems, _llada2_config, files=LLADA2_FILES)
NEMOTRON_LABS = Profile(
    "nemotron_labs",
    _nemotron_problems,
    _nemotron_config,
    _nemotron_name,
    untied_head="diffusion_head.weight",
    keeps_others=False,
)
DIFFUSION_GEMMA = Profile("diffusion_gemma", _gemma_problems, _gemma_config)
