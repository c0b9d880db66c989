"""The Llama-type family: Llama 1-3, SmolLM2, Mistral without a window, and dense look-alikes.

Owns the table that the dense families share. Specified by tests/convert/test_families.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_bp.convert.families.base import Entry, Family, ModelShape, Source
from megatron_bp.convert.families.dense import read_dense_shape
from megatron_bp.convert.rules import concat_rows, copy_rows, interleave_groups

DENSE_TOP = (
    Entry(
        "embedding.word_embeddings.weight",
        (Source("{text}embed_tokens.weight", ("vocab", "hidden")),),
        copy_rows,
    ),
    Entry("decoder.final_layernorm.weight", (Source("{text}norm.weight", ("hidden",)),), copy_rows),
)
DENSE_HEAD = Entry("output_layer.weight", (Source("{head}", ("vocab", "hidden")),), copy_rows)
DENSE_LAYER = (
    Entry(
        "self_attention.linear_qkv.layer_norm_weight",
        (Source("input_layernorm.weight", ("hidden",)),),
        copy_rows,
    ),
    Entry(
        "self_attention.linear_qkv.weight",
        (
            Source("self_attn.q_proj.weight", ("query", "hidden")),
            Source("self_attn.k_proj.weight", ("key", "hidden")),
            Source("self_attn.v_proj.weight", ("key", "hidden")),
        ),
        interleave_groups,
    ),
    Entry(
        "self_attention.linear_proj.weight",
        (Source("self_attn.o_proj.weight", ("hidden", "query")),),
        copy_rows,
    ),
    Entry(
        "mlp.linear_fc1.layer_norm_weight",
        (Source("post_attention_layernorm.weight", ("hidden",)),),
        copy_rows,
    ),
    Entry(
        "mlp.linear_fc1.weight",
        (
            Source("mlp.gate_proj.weight", ("ffn", "hidden")),
            Source("mlp.up_proj.weight", ("ffn", "hidden")),
        ),
        concat_rows,
    ),
    Entry(
        "mlp.linear_fc2.weight",
        (Source("mlp.down_proj.weight", ("hidden", "ffn")),),
        copy_rows,
    ),
)
# Both layer specs ask for the linears; the Transformer Engine spec also for its norms. Transformer
# Engine's attention overrides sharded_state_dict and asks for nothing (megatron-core 0.19.2).
DENSE_EXTRA_STATES = ("decoder.final_layernorm",)
DENSE_LAYER_EXTRA_STATES = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)


def read_llama_shape(config: Mapping[str, Any]) -> ModelShape:
    """Returns the shape of a Llama-type config; ValueError lists what cannot be converted."""
    return read_dense_shape(
        config, family="llama", qk_norm=False, refuse_bias=("attention_bias", "mlp_bias")
    )


LLAMA = Family(
    name="llama",
    model_types=("llama", "mistral"),
    top=DENSE_TOP,
    head=DENSE_HEAD,
    layer=DENSE_LAYER,
    extra_states=DENSE_EXTRA_STATES,
    layer_extra_states=DENSE_LAYER_EXTRA_STATES,
    read_shape=read_llama_shape,
)
