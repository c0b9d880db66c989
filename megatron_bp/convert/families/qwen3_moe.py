"""The Qwen3-MoE family: Qwen3's attention with experts instead of the dense MLP.

Specified by tests/convert/test_families.py; logits and expert parallel loads by
tests/convert/test_family_megatron.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_bp.convert.families.base import (
    Entry,
    ExtraStates,
    Family,
    ModelShape,
    uniform_entries,
    uniform_states,
)
from megatron_bp.convert.families.dense import read_dense_shape
from megatron_bp.convert.families.llama import DENSE_EXTRA_STATES, DENSE_HEAD, DENSE_TOP
from megatron_bp.convert.families.moe import (
    MoeShape,
    adapt_experts,
    moe_entries,
    moe_states,
    read_moe_shape,
)
from megatron_bp.convert.families.qwen3 import QWEN3


def read_qwen3_moe_shape(config: Mapping[str, Any]) -> MoeShape:
    """Returns the shape of a Qwen3-MoE config; ValueError lists what cannot be converted."""
    # transformers' Qwen3MoeConfig has norm_topk_prob false unless the file says otherwise.
    dense = read_dense_shape(
        {"intermediate_size": 6144, **config},
        family="qwen3_moe",
        qk_norm=True,
        refuse_bias=("attention_bias",),
    )
    return read_moe_shape(dense, {"norm_topk_prob": False, **config}, fused=False)


def _entries(family: Family, shape: ModelShape, layer: int) -> tuple[Entry, ...]:
    entries = uniform_entries(family, shape, layer)
    if layer < 0:
        return entries
    assert isinstance(shape, MoeShape), f"{shape.family} has no experts"
    return (*entries, *moe_entries(shape))


def _states(family: Family, shape: ModelShape, layer: int) -> ExtraStates:
    states = uniform_states(family, shape, layer)
    if layer < 0:
        return states
    assert isinstance(shape, MoeShape), f"{shape.family} has no experts"
    return (*states, *moe_states(shape))


QWEN3_MOE = Family(
    name="qwen3_moe",
    model_types=("qwen3_moe",),
    architectures=("SDARMoeForCausalLM",),
    top=DENSE_TOP,
    head=DENSE_HEAD,
    layer=tuple(entry for entry in QWEN3.layer if not entry.target.startswith("mlp.")),
    extra_states=DENSE_EXTRA_STATES,
    layer_extra_states=tuple(
        module for module in QWEN3.layer_extra_states if not module.startswith("mlp.")
    ),
    read_shape=read_qwen3_moe_shape,
    entries=_entries,
    states=_states,
    adapt=adapt_experts,
)
