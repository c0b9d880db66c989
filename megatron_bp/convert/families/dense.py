"""Reads the config of a Llama-like decoder, which most families share.

Knows Hugging Face config names; knows no tensors. Specified by tests/convert/test_families.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_bp.convert.families.base import ModelShape
from megatron_bp.convert.families.rope import read_rope


def read_dense_shape(
    config: Mapping[str, Any],
    *,
    family: str,
    qk_norm: bool,
    refuse_bias: tuple[str, ...],
    partial_rotary: bool = False,
    layer_types: tuple[str, ...] = ("full_attention",),
) -> ModelShape:
    """Returns the shape of a Llama-like config.

    Raises: ValueError that lists every missing key and every setting without a Megatron
    counterpart.
    """
    problems: list[str] = []

    def size(name: str) -> int:
        value = config.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            problems.append(f"{name}={value!r} must be a positive integer")
            return 1
        return value

    num_heads = size("num_attention_heads")
    hidden_size = size("hidden_size")
    if config.get("head_dim") is None and hidden_size % num_heads:
        problems.append(f"hidden_size={hidden_size} is not a multiple of {num_heads} heads")
    head_size = config.get("head_dim") or hidden_size // num_heads
    num_groups = config.get("num_key_value_heads") or num_heads
    if num_heads % num_groups:
        problems.append(f"num_key_value_heads={num_groups} does not divide {num_heads} heads")
    rope = read_rope(config, problems, partial=partial_rotary)
    problems += _unsupported(config, refuse_bias, layer_types)
    shape = ModelShape(
        family=family,
        num_layers=size("num_hidden_layers"),
        hidden_size=hidden_size,
        ffn_size=size("intermediate_size"),
        num_heads=num_heads,
        num_groups=num_groups,
        head_size=head_size,
        vocab_size=size("vocab_size"),
        max_positions=size("max_position_embeddings"),
        norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
        rope_base=rope.base,
        rope_scaling_factor=rope.llama3_factor,
        qk_norm=qk_norm,
        tied=bool(config.get("tie_word_embeddings", False)),
        args=rope.args,
        flags=rope.flags,
        notes=rope.notes,
    )
    if problems:
        raise ValueError("config.json cannot be converted:\n  " + "\n  ".join(problems))
    return shape


def _unsupported(
    config: Mapping[str, Any], refuse_bias: tuple[str, ...], layer_types: tuple[str, ...]
) -> list[str]:
    problems = [
        f"{name}=true: projection biases are not supported; only models without them convert"
        for name in refuse_bias
        if config.get(name)
    ]
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        problems.append(f"hidden_act={activation!r} must be 'silu' (--swiglu)")
    stored_types = config.get("layer_types") or ()
    # Qwen's configs have a window that is off unless use_sliding_window says otherwise.
    qwen = str(config.get("model_type", "")).startswith("qwen")
    uses_window = config.get("use_sliding_window", not qwen)
    strange = sorted({kind for kind in stored_types if kind not in layer_types})
    if strange:
        problems.append(
            f"layer_types must all be {' or '.join(map(repr, layer_types))}, "
            f"found {', '.join(strange)}"
        )
    elif not stored_types and uses_window and config.get("sliding_window"):
        problems.append(f"sliding_window={config['sliding_window']} must be null (full attention)")
    if config.get("quantization_config"):
        problems.append("quantization_config is set: convert the unquantised weights")
    return problems
