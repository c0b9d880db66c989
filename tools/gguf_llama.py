"""Reads a llama GGUF in Hugging Face's terms: tensor names, row order, configuration, tokenizer.

Owns what differs between the two formats; extract_smollm2.py owns files and the command line.
Needs the packages gguf and tokenizers. Specified by tests/tools/test_extract_smollm2.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

CONTROL = 3  # gguf TokenType.CONTROL
TENSOR_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def hf_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor of a llama model."""
    stem, _, suffix = name.rpartition(".")
    if stem in TOP_NAMES:
        return f"{TOP_NAMES[stem]}.{suffix}"
    head, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    if head != "blk" or part not in TENSOR_NAMES:
        raise ValueError(
            f"GGUF tensor {name!r} is not one of a plain llama model; use a llama GGUF."
        )
    return f"model.layers.{layer}.{TENSOR_NAMES[part]}.{suffix}"


def undo_rope_permutation(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a Q or K weight in Hugging Face's order, which keeps the two rotary halves apart.

    A llama GGUF interleaves them: row 2i is row i of the first half, row 2i+1 of the second.
    """
    pairs = weight.reshape(num_heads, weight.shape[0] // num_heads // 2, 2, *weight.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def read_fields(reader: Any) -> dict[str, Any]:
    """The GGUF's metadata as plain Python values; refuses other architectures."""
    fields = {name: field.contents() for name, field in reader.fields.items()}
    given = (
        fields.get("general.architecture"),
        fields.get("tokenizer.ggml.model"),
        fields.get("tokenizer.ggml.pre"),
    )
    if given != ("llama", "gpt2", "smollm"):
        raise ValueError(
            f"(architecture, tokenizer, pre-tokenizer)={given}; they must be "
            "('llama', 'gpt2', 'smollm'). Use the GGUF of SmolLM or SmolLM2."
        )
    return fields


def special_ids(fields: dict[str, Any]) -> dict[str, int]:
    """bos, eos and pad token ids of the GGUF."""
    long_names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {
        f"{key}_token_id": fields[f"tokenizer.ggml.{name}_token_id"]
        for key, name in long_names.items()
    }


def model_config(fields: dict[str, Any], dtype: str, tied: bool) -> dict[str, Any]:
    """config.json, with the rotary base in the spelling of transformers 4 and of 5."""
    hidden, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    theta = float(fields["llama.rope.freq_base"])
    epsilon = fields["llama.attention.layer_norm_rms_epsilon"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": fields["llama.block_count"],
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "vocab_size": fields["llama.vocab_size"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": float(f"{epsilon:.6g}"),  # the GGUF rounds 1e-5 to fp32
        "rope_theta": theta,
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": dtype,
        **special_ids(fields),
    }


def write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    """Writes tokenizer.json and its companions: byte-level BPE, every digit alone ("smollm")."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    unknown = tokens[fields["tokenizer.ggml.unknown_token_id"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token=unknown))
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    tokenizer.add_special_tokens([AddedToken(token, special=True, **flags) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {key[:-3]: tokens[index] for key, index in special_ids(fields).items()}
    named["unk_token"] = unknown
    write_json(folder / "special_tokens_map.json", named)
    entries = {str(vocab[name]): {"content": name, "special": True} | flags for name in special}
    config = named | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": entries,
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
    }
    if "tokenizer.chat_template" in fields:
        config["chat_template"] = fields["tokenizer.chat_template"]
    write_json(folder / "tokenizer_config.json", config)


def dequantized(reader: Any, fields: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Hugging Face's name and the float32 value of every tensor."""
    from gguf import dequantize

    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    for number, tensor in enumerate(reader.tensors, start=1):
        weight = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        part = tensor.name.split(".")[-2]
        weight = undo_rope_permutation(weight, heads[part]) if part in heads else weight
        yield hf_name(tensor.name), weight
        if number % 60 == 0 or number == len(reader.tensors):
            print(f"  {number}/{len(reader.tensors)} tensors", file=sys.stderr, flush=True)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes `value` as indented JSON."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
