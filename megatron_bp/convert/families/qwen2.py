"""The Qwen2 and Qwen2.5 family: Llama's table plus a bias on query, key and value.

Specified by tests/convert/test_families.py; logits by test_family_megatron.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
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
from megatron_bp.convert.rules import interleave_groups

_QKV_BIAS = Entry(
    "self_attention.linear_qkv.bias",
    (
        Source("self_attn.q_proj.bias", ("query",)),
        Source("self_attn.k_proj.bias", ("key",)),
        Source("self_attn.v_proj.bias", ("key",)),
    ),
    interleave_groups,
)


def read_qwen2_shape(config: Mapping[str, Any]) -> ModelShape:
    """Returns the shape of a Qwen2 config; ValueError lists what cannot be converted."""
    shape = read_dense_shape(config, family="qwen2", qk_norm=False, refuse_bias=())
    return replace(
        shape,
        args=(*shape.args, ("add_qkv_bias", True)),
        flags=(*shape.flags, ("add-qkv-bias", True)),
    )


QWEN2 = Family(
    name="qwen2",
    model_types=("qwen2",),
    architectures=("Fast_dLLM_QwenForCausalLM",),
    top=DENSE_TOP,
    head=DENSE_HEAD,
    layer=(*DENSE_LAYER, _QKV_BIAS),
    extra_states=DENSE_EXTRA_STATES,
    layer_extra_states=DENSE_LAYER_EXTRA_STATES,
    read_shape=read_qwen2_shape,
)
