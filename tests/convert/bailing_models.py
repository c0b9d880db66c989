"""Bailing-MoE v2 and LLaDA2 in small: a config, the published key list, and the model's formulas.

transformers has no class for them, so `reference_logits` is written from the published description:
grouped query attention with query and key norms, rotary positions on a part of each head, experts
chosen by sigmoid score plus bias inside the best groups and weighted by the score alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import linear, silu

from tests.convert.family_models import DENSE, MOE

Tensors = Mapping[str, torch.Tensor]

BAILING: dict[str, Any] = {
    **DENSE,
    **MOE,
    "architectures": ["BailingMoeV2ForCausalLM"],
    "model_type": "bailing_moe_v2",
    "num_hidden_layers": 3,
    "head_dim": 16,
    "first_k_dense_replace": 1,
    "num_experts": 6,
    "num_experts_per_tok": 4,
    "n_group": 3,
    "topk_group": 2,
    "num_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "moe_router_enable_expert_bias": True,
    "score_function": "sigmoid",
    "router_dtype": "fp32",
    "norm_topk_prob": True,
    "use_qk_norm": True,
    "use_bias": False,
    "use_qkv_bias": False,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-6,
    "rope_theta": 600000,
    "rope_scaling": None,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def bailing_shapes(config: Mapping[str, Any], *, stacked: bool) -> dict[str, tuple[int, ...]]:
    """Returns the published key list of Bailing-MoE v2 and LLaDA2 with its shapes."""
    hidden, ffn, count = (config[x] for x in ("hidden_size", "intermediate_size", "num_experts"))
    expert, head = config["moe_intermediate_size"], config["head_dim"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]

    def mlp(prefix: str, size: int) -> dict[str, tuple[int, ...]]:
        up = {f"{prefix}{name}_proj.weight": (size, hidden) for name in ("gate", "up")}
        return up | {f"{prefix}down_proj.weight": (hidden, size)}

    shapes: dict[str, tuple[int, ...]] = {
        "model.word_embeddings.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}input_layernorm.weight": (hidden,),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
            f"{prefix}attention.query_key_value.weight": ((heads + 2 * groups) * head, hidden),
            f"{prefix}attention.query_layernorm.weight": (head,),
            f"{prefix}attention.key_layernorm.weight": (head,),
            f"{prefix}attention.dense.weight": (hidden, heads * head),
        }
        if layer < config["first_k_dense_replace"]:
            shapes |= mlp(f"{prefix}mlp.", ffn)
            continue
        shapes |= mlp(f"{prefix}mlp.shared_experts.", expert * config["num_shared_experts"])
        shapes[f"{prefix}mlp.gate.weight"] = (count, hidden)
        shapes[f"{prefix}mlp.gate.expert_bias"] = (count,)
        if stacked:
            for name in ("gate", "up"):
                shapes[f"{prefix}mlp.experts.{name}_proj"] = (count, expert, hidden)
            shapes[f"{prefix}mlp.experts.down_proj"] = (count, hidden, expert)
        else:
            for number in range(count):
                shapes |= mlp(f"{prefix}mlp.experts.{number}.", expert)
    return shapes


def _norm(x: torch.Tensor, weight: torch.Tensor, config: Mapping[str, Any]) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).rsqrt() * weight


def _rotate(x: torch.Tensor, config: Mapping[str, Any]) -> torch.Tensor:
    """Returns x [batch, length, heads, head] turned by position in its first dims (half-split)."""
    size = int(config["head_dim"] * config["partial_rotary_factor"])
    frequencies = config["rope_theta"] ** -(torch.arange(0, size, 2).double() / size)
    angles = (torch.arange(x.shape[1]).double()[:, None] * frequencies).float()[None, :, None]
    first, second = x[..., : size // 2], x[..., size // 2 : size]
    cos, sin = angles.cos(), angles.sin()
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat([*turned, x[..., size:]], -1)


def _mlp(x: torch.Tensor, weights: Tensors, prefix: str) -> torch.Tensor:
    gate, up, down = (weights[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down"))
    return linear(silu(linear(x, gate)) * linear(x, up), down)


def _experts(x: torch.Tensor, weights: Tensors, config: Mapping[str, Any]) -> torch.Tensor:
    scores = linear(x, weights["mlp.gate.weight"]).sigmoid()
    chosen = scores + weights["mlp.gate.expert_bias"]
    groups = chosen.unflatten(-1, (config["n_group"], -1))
    best = groups.topk(2, -1).values.sum(-1).topk(config["topk_group"], -1).indices
    open_groups = torch.zeros(groups.shape[:-1]).scatter(-1, best, 1.0).bool()
    allowed = groups.masked_fill(~open_groups[..., None], float("-inf")).flatten(-2)
    experts = allowed.topk(config["num_experts_per_tok"], -1).indices
    parts = scores.gather(-1, experts)
    parts = config["routed_scaling_factor"] * parts / parts.sum(-1, keepdim=True)
    shares = torch.zeros_like(scores).scatter(-1, experts, parts)
    out = _mlp(x, weights, "mlp.shared_experts.")
    for number in range(config["num_experts"]):
        out = out + shares[..., number, None] * _mlp(x, weights, f"mlp.experts.{number}.")
    return out


def _attend(x: torch.Tensor, weights: Tensors, config: Mapping[str, Any]) -> torch.Tensor:
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    both = linear(x, weights["attention.query_key_value.weight"])
    q, k, v = both.unflatten(-1, (heads + 2 * groups, -1)).split([heads, groups, groups], 2)
    q = _rotate(_norm(q, weights["attention.query_layernorm.weight"], config), config)
    k = _rotate(_norm(k, weights["attention.key_layernorm.weight"], config), config)
    k, v = (part.repeat_interleave(heads // groups, 2) for part in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * config["head_dim"] ** -0.5
    later = torch.ones(scores.shape[-2:]).triu(1).bool()
    shares = scores.masked_fill(later, float("-inf")).softmax(-1)
    out = torch.einsum("bhqk,bkhd->bqhd", shares, v).flatten(2)
    return linear(out, weights["attention.dense.weight"])


def reference_logits(config: Mapping[str, Any], hf: Tensors, tokens: torch.Tensor) -> torch.Tensor:
    """Returns the logits of a model whose experts are stored one by one, causal, in fp32."""
    x = hf["model.word_embeddings.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        own = {n.removeprefix(prefix): t for n, t in hf.items() if n.startswith(prefix)}
        x = x + _attend(_norm(x, own["input_layernorm.weight"], config), own, config)
        y = _norm(x, own["post_attention_layernorm.weight"], config)
        x = x + (
            _mlp(y, own, "mlp.") if "mlp.gate_proj.weight" in own else _experts(y, own, config)
        )
    head = hf.get("lm_head.weight", hf["model.word_embeddings.weight"])
    return linear(_norm(x, hf["model.norm.weight"], config), head)
