"""The Megatron tensors that each family must become, built with torch.cat, split and views.

Independent of the converter's tables and row rules: names are written out here once more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
# The text model's prefix and the head's name, by the case's family.
NAMES = {
    "mistral3": ("language_model.model.", "language_model.lm_head.weight"),
    "nemotron": ("encoder.", "diffusion_head.weight"),
    "qwen3_5": ("model.language_model.", "lm_head.weight"),
    "gemma4": ("model.language_model.", "lm_head.weight"),
    "diffusion_gemma": ("model.decoder.", ""),
}


def by_group(parts: list[torch.Tensor], groups: int) -> torch.Tensor:
    """Returns the parts' rows group by group."""
    return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], 1).flatten(0, 1)


def expected_tensors(case: str, config: Mapping[str, Any], hf: Tensors) -> Tensors:
    """Returns the Megatron tensors of a case of tiny_families.py by their per-layer keys."""
    family = case.partition("-")[0]
    if family.startswith("dflash"):
        return _drafter(hf, config["num_key_value_heads"])
    text = config.get("text_config", config)
    if family == "bailing":
        return _bailing(config, hf)
    prefix, head = NAMES.get(family, ("model.", "lm_head.weight"))
    out = {
        "embedding.word_embeddings.weight": hf[f"{prefix}embed_tokens.weight"],
        "decoder.final_layernorm.weight": hf[f"{prefix}norm.weight"],
    }
    if head in hf:
        out["output_layer.weight"] = hf[head]
    if family == "diffusion_gemma":
        s = f"{prefix}self_conditioning."
        out |= {
            "self_conditioning.pre_norm.weight": hf[f"{s}pre_norm.weight"],
            "self_conditioning.linear_fc1.weight": torch.cat(
                [hf[f"{s}gate_proj.weight"], hf[f"{s}up_proj.weight"]]
            ),
            "self_conditioning.linear_fc2.weight": hf[f"{s}down_proj.weight"],
        }
    for number in range(text["num_hidden_layers"]):
        layer = {
            name.removeprefix(f"{prefix}layers.{number}."): tensor
            for name, tensor in hf.items()
            if name.startswith(f"{prefix}layers.{number}.")
        }
        if "gemma" in family:
            made = _gemma_layer(text, layer)
        elif "linear_attn.A_log" in layer:
            made = _gdn(text, layer) | _mlp(layer, text)
        else:
            made = _attention(text, layer, gated="qwen3_5" in family) | _mlp(layer, text)
        if family == "diffusion_gemma":
            made["encoder_layer_scalar"] = hf[
                f"model.encoder.language_model.layers.{number}.layer_scalar"
            ]
        out |= {f"decoder.layers.{number}.{name}": tensor for name, tensor in made.items()}
    return out


def _attention(config: Mapping[str, Any], layer: Tensors, *, gated: bool) -> Tensors:
    groups = config["num_key_value_heads"]
    q, k, v = (layer[f"self_attn.{name}_proj.weight"] for name in "qkv")
    parts = [q, k, v]
    if gated:
        # Each head of q_proj is [query ; gate]; Megatron wants a group's queries, then its gates.
        both = q.unflatten(0, (config["num_attention_heads"], 2, -1))
        parts = [both[:, 0].flatten(0, 1), both[:, 1].flatten(0, 1), k, v]
    a = "self_attention."
    out = {
        f"{a}linear_qkv.weight": by_group(parts, groups),
        f"{a}linear_qkv.layer_norm_weight": layer["input_layernorm.weight"],
        f"{a}linear_proj.weight": layer["self_attn.o_proj.weight"],
    }
    if "self_attn.q_proj.bias" in layer:
        biases = [layer[f"self_attn.{name}_proj.bias"] for name in "qkv"]
        out[f"{a}linear_qkv.bias"] = by_group(biases, groups)
    for name in "qk":
        if f"self_attn.{name}_norm.weight" in layer:
            out[f"{a}{name}_layernorm.weight"] = layer[f"self_attn.{name}_norm.weight"]
    return out


def _gdn(config: Mapping[str, Any], layer: Tensors) -> Tensors:
    key = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    value = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    mixer = {name.removeprefix("linear_attn."): tensor for name, tensor in layer.items()}
    a = "self_attention."
    out = {
        f"{a}in_proj.layer_norm_weight": layer["input_layernorm.weight"],
        f"{a}in_proj.weight.z": mixer["in_proj_z.weight"],
        f"{a}in_proj.weight.beta": mixer["in_proj_b.weight"],
        f"{a}in_proj.weight.alpha": mixer["in_proj_a.weight"],
        f"{a}A_log": mixer["A_log"],
        f"{a}dt_bias": mixer["dt_bias"],
        f"{a}out_norm.weight": mixer["norm.weight"].float() - 1,
        f"{a}out_proj.weight": mixer["out_proj.weight"],
    }
    for source, target in (("in_proj_qkv", "in_proj"), ("conv1d", "conv1d")):
        split = mixer[f"{source}.weight"].split([key, key, value])
        for name, tensor in zip(("query", "key", "value"), split, strict=True):
            out[f"{a}{target}.weight.{name}"] = tensor
    return out


def _mlp(layer: Tensors, config: Mapping[str, Any]) -> Tensors:
    norm = layer["post_attention_layernorm.weight"]
    if "mlp.gate.weight" not in layer:
        return {
            "mlp.linear_fc1.layer_norm_weight": norm,
            "mlp.linear_fc1.weight": torch.cat(
                [layer["mlp.gate_proj.weight"], layer["mlp.up_proj.weight"]]
            ),
            "mlp.linear_fc2.weight": layer["mlp.down_proj.weight"],
        }
    out = {
        "pre_mlp_layernorm.weight": norm,
        "mlp.linear_fc1.layer_norm_weight": norm,
        "mlp.router.weight": layer["mlp.gate.weight"],
    }
    first, second = "mlp.experts.experts.linear_fc1.weight", "mlp.experts.experts.linear_fc2.weight"
    if "mlp.experts.gate_up_proj" in layer:
        out |= {first: layer["mlp.experts.gate_up_proj"], second: layer["mlp.experts.down_proj"]}
    else:
        count = config.get("num_local_experts") or config["num_experts"]
        gate, up, down = (
            torch.stack([layer[f"mlp.experts.{e}.{name}_proj.weight"] for e in range(count)])
            for name in ("gate", "up", "down")
        )
        out |= {first: torch.cat([gate, up], 1), second: down}
    if "mlp.shared_expert_gate.weight" in layer:
        s = "mlp.shared_expert."
        out |= {
            "mlp.shared_experts.gate_weight": layer["mlp.shared_expert_gate.weight"],
            "mlp.shared_experts.linear_fc1.weight": torch.cat(
                [layer[f"{s}gate_proj.weight"], layer[f"{s}up_proj.weight"]]
            ),
            "mlp.shared_experts.linear_fc2.weight": layer[f"{s}down_proj.weight"],
        }
    return out


def _gemma_layer(config: Mapping[str, Any], layer: Tensors) -> Tensors:
    # Full attention layers have no v_proj and one key head, sliding ones two.
    names = [name for name in "qkv" if f"self_attn.{name}_proj.weight" in layer]
    groups = config["num_key_value_heads"] if "v" in names else 1
    a = "self_attention."
    moe = "router.scale" in layer
    dense = "mlp.shared_experts." if moe else "mlp."
    out = {
        f"{a}linear_qkv.layer_norm_weight": layer["input_layernorm.weight"],
        f"{a}linear_qkv.weight": by_group(
            [layer[f"self_attn.{name}_proj.weight"] for name in names], groups
        ),
        f"{a}q_layernorm.weight": layer["self_attn.q_norm.weight"],
        f"{a}k_layernorm.weight": layer["self_attn.k_norm.weight"],
        f"{a}linear_proj.weight": layer["self_attn.o_proj.weight"],
        f"{a}linear_proj.post_layernorm.weight": layer["post_attention_layernorm.weight"],
        f"{dense}linear_fc1.layer_norm_weight": layer["pre_feedforward_layernorm.weight"],
        f"{dense}linear_fc1.weight": torch.cat(
            [layer["mlp.gate_proj.weight"], layer["mlp.up_proj.weight"]]
        ),
        f"{dense}linear_fc2.weight": layer["mlp.down_proj.weight"],
        "post_ffn_layernorm.weight": layer["post_feedforward_layernorm.weight"],
        "layer_scalar": layer["layer_scalar"],
    }
    if moe:
        out |= {
            "mlp.post_shared_expert_layernorm.weight": layer["post_feedforward_layernorm_1.weight"],
            "mlp.post_moe_layernorm.weight": layer["post_feedforward_layernorm_2.weight"],
            "pre_mlp_layernorm.weight": layer["pre_feedforward_layernorm_2.weight"],
            "mlp.router.weight": layer["router.proj.weight"],
            "mlp.router.scale": layer["router.scale"],
            "mlp.router.per_expert_scale": layer["router.per_expert_scale"],
            "mlp.experts.experts.linear_fc1.weight": layer["experts.gate_up_proj"],
            "mlp.experts.experts.linear_fc2.weight": layer["experts.down_proj"],
        }
    return out


def _bailing(config: Mapping[str, Any], hf: Tensors) -> Tensors:
    heads, groups, head = (
        config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    out = {
        "embedding.word_embeddings.weight": hf["model.word_embeddings.weight"],
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
    }
    if "lm_head.weight" in hf:
        out["output_layer.weight"] = hf["lm_head.weight"]
    for number in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{number}."
        layer = {n.removeprefix(prefix): t for n, t in hf.items() if n.startswith(prefix)}
        q, k, v = (
            layer["attention.query_key_value.weight"]
            .unflatten(0, (heads + 2 * groups, head))
            .split([heads, groups, groups])
        )
        made = {
            "self_attention.linear_qkv.layer_norm_weight": layer["input_layernorm.weight"],
            "self_attention.linear_qkv.weight": by_group(
                [part.flatten(0, 1) for part in (q, k, v)], groups
            ),
            "self_attention.q_layernorm.weight": layer["attention.query_layernorm.weight"],
            "self_attention.k_layernorm.weight": layer["attention.key_layernorm.weight"],
            "self_attention.linear_proj.weight": layer["attention.dense.weight"],
        }
        if "mlp.experts.gate_proj" in layer:
            both = [layer[f"mlp.experts.{name}_proj"] for name in ("gate", "up")]
            layer["mlp.experts.gate_up_proj"] = torch.cat(both, 1)
        made |= _mlp(layer, config)
        if "mlp.gate.weight" in layer:
            s = "mlp.shared_experts."
            made["mlp.router.expert_bias"] = layer["mlp.gate.expert_bias"]
            made[f"{s}linear_fc1.weight"] = torch.cat(
                [layer[f"{s}gate_proj.weight"], layer[f"{s}up_proj.weight"]]
            )
            made[f"{s}linear_fc2.weight"] = layer[f"{s}down_proj.weight"]
        out |= {f"decoder.layers.{number}.{name}": tensor for name, tensor in made.items()}
    return out


def _drafter(hf: Tensors, groups: int) -> Tensors:
    out = {}
    for name, tensor in hf.items():
        target = name.replace("post_attention_layernorm", "pre_mlp_layernorm")
        target = target.replace("self_attn.q_proj", "self_attention.linear_q")
        target = target.replace("self_attn.o_proj", "self_attention.linear_proj")
        target = target.replace("self_attn.q_norm", "self_attention.q_layernorm")
        target = target.replace("self_attn.k_norm", "self_attention.k_layernorm")
        target = target.replace("mlp.down_proj", "mlp.linear_fc2")
        target = "final_layernorm.weight" if name == "norm.weight" else target
        if "self_attn.k_proj" in name:
            value = hf[name.replace("k_proj", "v_proj")]
            target = name.replace("self_attn.k_proj", "self_attention.linear_kv")
            tensor = by_group([tensor, value], groups)
        elif "mlp.gate_proj" in name:
            target = name.replace("mlp.gate_proj", "mlp.linear_fc1")
            tensor = torch.cat([tensor, hf[name.replace("gate_proj", "up_proj")]])
        elif "v_proj" in name or "up_proj" in name:
            continue
        out[f"draft.{target}"] = tensor
    return out
