"""Reads a model's shape from a Hugging Face config.json.

Knows the common keys of decoder configurations; keys that change the shape in a way this does not
know are refused by model type. Specified by tests/planning/test_hf_config.py.
"""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_bp.layout.model_shape import (
    AttentionShape,
    DeltaNetShape,
    ExpertsShape,
    LayerKind,
    ModelShape,
)

QK_NORM = ("qwen3", "gemma4", "diffusion_gemma")
KNOWN = (
    "llama",
    "mistral",
    "ministral",
    "ministral3",
    "mistral3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_5",
    "qwen3_5_text",
    "gemma4",
    "gemma4_text",
    "diffusion_gemma",
    "nemotron_labs_diffusion",
)


def model_from_file(path: Path) -> ModelShape:
    """The shape of the model whose config.json is `path` (or lies in it)."""
    file = path / "config.json" if path.is_dir() else path
    return model_from_config(json.loads(file.read_text()), file.parent.name or str(file))


def model_from_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape that `config` describes.

    Raises: ValueError naming what is missing, or a model type that is not known.
    """
    kind = str(config.get("model_type"))
    if kind not in KNOWN:
        raise ValueError(f"model_type {kind!r} is not known here; known are {', '.join(KNOWN)}.")
    text = {**config, **config.get("text_config", {})}
    wanted = (
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "vocab_size",
    )
    missing = [key for key in wanted if not isinstance(text.get(key), int)]
    if missing:
        raise ValueError(f"config.json of {name} must give integers for {', '.join(missing)}.")
    types = text.get("layer_types") or _default_types(text, kind)
    # transformers 5.24 gives what differs from layer to layer as overrides.
    own = {int(number): of for number, of in (text.get("per_layer_config") or {}).items()}
    kinds = Counter(
        _layer(str(of_layer), {**text, **own.get(number, {})}, kind, number in own)
        for number, of_layer in enumerate(types)
    )
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    return ModelShape(
        name=name,
        hidden=text["hidden_size"],
        vocab=text["vocab_size"],
        layers=tuple(kinds.items()),
        tied=bool(tied),
        source=f"config.json, model_type {kind}",
    )


def _default_types(text: Mapping[str, Any], kind: str) -> list[str]:
    number = text["num_hidden_layers"]
    if kind.startswith("qwen3_5"):
        every = text.get("full_attention_interval", 4)
        names = ("full_attention", "linear_attention")
        return [names[0] if (i + 1) % every == 0 else names[1] for i in range(number)]
    if kind in ("gemma4", "gemma4_text", "diffusion_gemma"):
        return [
            "full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(number)
        ]
    window = text.get("sliding_window") and text.get("use_sliding_window", True)
    return ["sliding_attention" if window else "full_attention"] * number


def _layer(of_layer: str, text: Mapping[str, Any], kind: str, settled: bool) -> LayerKind:
    experts = _experts(text, kind)
    ffn = text["intermediate_size"]
    if experts.num_experts and "gemma" not in kind:
        ffn = text.get("shared_expert_intermediate_size", 0)
    norms = 7 if experts.num_experts and "gemma" in kind else 4 if "gemma" in kind else 2
    if of_layer == "linear_attention":
        delta = DeltaNetShape(
            text["linear_num_key_heads"],
            text["linear_num_value_heads"],
            text["linear_key_head_dim"],
            text["linear_value_head_dim"],
            text.get("linear_conv_kernel_dim", 4),
        )
        return LayerKind(delta, ffn, experts, num_norms=norms)
    attention = _attention(of_layer, text, kind, settled)
    return LayerKind(attention, ffn, experts, num_norms=norms)


def _attention(of_layer: str, text: Mapping[str, Any], kind: str, settled: bool) -> AttentionShape:
    heads = text["num_attention_heads"]
    groups = text.get("num_key_value_heads") or heads
    size = text.get("head_dim") or text["hidden_size"] // heads
    sliding = of_layer == "sliding_attention"
    shared = False
    if "gemma" in kind and not sliding:
        if not settled:
            size = text.get("global_head_dim", 512)
            groups = text.get("num_global_key_value_heads") or groups
        shared = bool(text.get("attention_k_eq_v", kind == "diffusion_gemma"))
    return AttentionShape(
        num_heads=heads,
        num_kv_heads=groups,
        head_size=size,
        window=int(text["sliding_window"]) if sliding else 0,
        shared_kv=shared,
        output_gate=kind.startswith("qwen3_5"),
        qk_norm=kind.startswith(QK_NORM),
        bias=kind == "qwen2",
    )


def _experts(text: Mapping[str, Any], kind: str) -> ExpertsShape:
    number = text.get("num_experts") or text.get("num_local_experts") or 0
    if not number or not text.get("moe_intermediate_size"):
        return ExpertsShape()
    top = text.get("num_experts_per_tok") or text.get("top_k_experts")
    size = int(text["moe_intermediate_size"])
    return ExpertsShape(int(number), int(top or 0), size, router_scales="gemma" in kind)
