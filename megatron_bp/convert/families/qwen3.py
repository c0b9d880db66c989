"""The Qwen3 dense family: Llama's table plus query and key norms, and a head size of its own.

Specified by tests/convert/test_families.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_bp.convert.families.base import Entry, Family, ModelShape, Source
from megatron_bp.convert.families.dense import read_dense_shape
from megatron_bp.convert.families.llama import (
    DENSE_EXTRA_STATES,
    DENSE_HEAD,
    DENSE_LAYER,
    DENSE_LAYER_EXTRA_STATES,
    DENSE_TOP,
)
from megatron_bp.convert.rules import copy_rows

QK_NORMS = tuple(
    Entry(
        f"self_attention.{short}_layernorm.weight",
        (Source(f"self_attn.{short}_norm.weight", ("head",)),),
        copy_rows,
    )
    for short in ("q", "k")
)


def read_qwen3_shape(config: Mapping[str, Any]) -> ModelShape:
    """Returns the shape of a Qwen3 dense config; ValueError lists what cannot be converted."""
    # Qwen3Config's default head_dim is 128, whatever hidden_size / num_attention_heads is.
    return read_dense_shape(
        {"head_dim": 128, **config}, family="qwen3", qk_norm=True, refuse_bias=("attention_bias",)
    )


QWEN3 = Family(
    name="qwen3",
    model_types=("qwen3",),
    architectures=("SDARForCausalLM",),
    top=DENSE_TOP,
    head=DENSE_HEAD,
    layer=DENSE_LAYER + QK_NORMS,
    extra_states=DENSE_EXTRA_STATES,
    layer_extra_states=DENSE_LAYER_EXTRA_STATES
    + ("self_attention.q_layernorm", "self_attention.k_layernorm"),
    read_shape=read_qwen3_shape,
)
