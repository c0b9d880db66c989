"""Tiny random Hugging Face directories and the Megatron tensors they must become.

`expected_megatron` is an independent oracle: it builds fused tensors with torch.cat and views, not
with the converter's row rules.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

# Sizes differ from one another, the vocabulary is odd, Qwen3's heads are wider than hidden / heads.
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN3 = {
    **LLAMA,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "head_dim": 16,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def random_tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Returns every tensor of the model, bf16, values that differ everywhere."""
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    head = config.get("head_dim", hidden // heads)
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "self_attn.q_proj.weight": (heads * head, hidden),
            prefix + "self_attn.k_proj.weight": (groups * head, hidden),
            prefix + "self_attn.v_proj.weight": (groups * head, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, heads * head),
            prefix + "mlp.gate_proj.weight": (ffn, hidden),
            prefix + "mlp.up_proj.weight": (ffn, hidden),
            prefix + "mlp.down_proj.weight": (hidden, ffn),
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
        }
        if config["model_type"] == "qwen3":
            shapes[prefix + "self_attn.q_norm.weight"] = (head,)
            shapes[prefix + "self_attn.k_norm.weight"] = (head,)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).to(torch.bfloat16)
        for name, shape in shapes.items()
    }


def write_hf(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> Path:
    """Writes a Hugging Face directory with weights, config and tokenizer; returns it."""
    directory.mkdir(parents=True)
    save_file(dict(tensors), directory / "model.safetensors", metadata={"format": "pt"})
    write_json(directory / "config.json", config)
    write_json(directory / "generation_config.json", {"eos_token_id": 2, "top_p": 0.9})
    write_tokenizer(directory, config["vocab_size"] - 1)
    return directory


def write_tokenizer(directory: Path, num_tokens: int) -> None:
    """Writes a byte-free BPE tokenizer with ids [0, num_tokens): <unk> <s> </s>, then pieces."""
    pieces = ["<unk>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz"]
    pieces += [f"piece{number}" for number in range(len(pieces), num_tokens)]
    added = [
        {
            "id": number,
            "content": pieces[number],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for number in range(3)
    ]
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": "<unk>",
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {piece: number for number, piece in enumerate(pieces)},
        "merges": [],
    }
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
    tokenizer |= dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder"))
    write_json(directory / "tokenizer.json", tokenizer | {"model": model})
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    write_json(directory / "tokenizer_config.json", {**special, "chat_template": "{{ messages }}"})
    write_json(directory / "special_tokens_map.json", special)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes JSON."""
    path.write_text(json.dumps(value, indent=2))


def make_hf(directory: Path, config: Mapping[str, Any], seed: int = 0) -> Path:
    """Writes a random model of that config; returns its directory."""
    return write_hf(directory, config, random_tensors(config, seed))


def read_hf(directory: Path) -> dict[str, torch.Tensor]:
    """Returns every tensor of a Hugging Face directory, by the safetensors library."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tells whether shape, dtype and every bit agree."""
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    )


def expected_megatron(
    config: Mapping[str, Any], hf: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Returns the Megatron tensors by their per-layer checkpoint keys."""
    groups = config["num_key_value_heads"]
    out = {
        "embedding.word_embeddings.weight": hf["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
    }
    if not config["tie_word_embeddings"]:
        out["output_layer.weight"] = hf["lm_head.weight"]
    for layer in range(config["num_hidden_layers"]):
        h, m = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        qkv = [hf[f"{h}self_attn.{x}_proj.weight"].unflatten(0, (groups, -1)) for x in "qkv"]
        out |= {
            m + "self_attention.linear_qkv.weight": torch.cat(qkv, 1).flatten(0, 1),
            m + "self_attention.linear_qkv.layer_norm_weight": hf[h + "input_layernorm.weight"],
            m + "self_attention.linear_proj.weight": hf[h + "self_attn.o_proj.weight"],
            m + "mlp.linear_fc1.layer_norm_weight": hf[h + "post_attention_layernorm.weight"],
            m + "mlp.linear_fc1.weight": torch.cat(
                [hf[h + "mlp.gate_proj.weight"], hf[h + "mlp.up_proj.weight"]]
            ),
            m + "mlp.linear_fc2.weight": hf[h + "mlp.down_proj.weight"],
        }
        if config["model_type"] == "qwen3":
            for x in "qk":
                out[f"{m}self_attention.{x}_layernorm.weight"] = hf[f"{h}self_attn.{x}_norm.weight"]
    return out
