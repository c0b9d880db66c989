"""The Qwen3.5, 3.6 and 3.8 family: Gated DeltaNet layers with gated attention in between.

Names and layout of the Megatron side: megatron-core 0.19.2, ssm/gated_delta_net/common.py
(`sharded_state_dict`: in_proj is stored as query, key, value, z, beta and alpha, conv1d as query,
key and value, so that tensor parallel sizes can change), transformer/attention.py (linear_qkv with
attention_output_gate) and models/gpt/experimental_attention_variant_module_specs.py (the layer norm
is fused into in_proj). Megatron runs these layers only with Transformer Engine and
flash-linear-attention on CUDA. tests/convert/test_hybrid_megatron.py builds its GatedDeltaNet and
gated attention classes on the CPU with torch norms in place of the fused ones, loads a checkpoint
on one and two tensor ranks and compares logits with transformers; the names of the fused norms rest
on the golden key lists (tests/golden/convert_qwen3_5*_keys.json).

All norms are zero-centred on both sides, except `linear_attn.norm`: Hugging Face stores w and
Megatron, which builds it as zero-centred too, w - 1. It and A_log keep fp32 in a bf16 model.
Vision (`model.visual.*`) and multi-token prediction (`mtp.*`) pass through.
Specified by tests/convert/test_families.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_bp.convert.families.base import (
    Entry,
    ExtraStates,
    Family,
    ModelShape,
    Source,
    name_top,
)
from megatron_bp.convert.families.composite import settle_names, text_config
from megatron_bp.convert.families.dense import read_dense_shape
from megatron_bp.convert.families.llama import (
    DENSE_EXTRA_STATES,
    DENSE_HEAD,
    DENSE_LAYER,
    DENSE_TOP,
)
from megatron_bp.convert.families.moe import (
    MoeShape,
    adapt_experts,
    moe_entries,
    moe_states,
    read_moe_shape,
)
from megatron_bp.convert.families.qwen3 import QK_NORMS
from megatron_bp.convert.rules import copy_rows, interleave_gated_groups, take_rows

LINEAR = "linear_attention"
FULL = "full_attention"
_GDN_SIZES = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)


@dataclass(frozen=True)
class GdnSizes:
    """The sizes of Gated DeltaNet layers, and which layers they are."""

    key_heads: int
    value_heads: int
    key_head_size: int
    value_head_size: int
    conv_kernel: int
    layer_types: tuple[str, ...]

    @property
    def key_size(self) -> int:
        """The rows of the query part, and of the key part, of the input projection."""
        return self.key_heads * self.key_head_size

    @property
    def value_size(self) -> int:
        """The rows of the value part, and of the z part, of the input projection."""
        return self.value_heads * self.value_head_size


@dataclass(frozen=True, kw_only=True)
class HybridShape(ModelShape):
    """A shape with Gated DeltaNet layers."""

    gdn: GdnSizes


@dataclass(frozen=True, kw_only=True)
class HybridMoeShape(MoeShape):
    """A shape with Gated DeltaNet layers and experts."""

    gdn: GdnSizes


def read_qwen3_5_shape(config: Mapping[str, Any]) -> HybridShape | HybridMoeShape:
    """Returns the shape of a Qwen3.5 config, dense or MoE, of the text model or with vision.

    Raises: ValueError listing what is missing and what cannot be converted.
    """
    model_type = str(config.get("model_type"))
    composite = not model_type.endswith("_text")
    text = dict(config)
    if composite:
        text = text_config(config, tied_by_default=False)
    moe = model_type.startswith("qwen3_5_moe")
    if moe:  # no dense MLP anywhere
        text.setdefault("intermediate_size", text.get("moe_intermediate_size"))
    if "partial_rotary_factor" not in (text.get("rope_parameters") or {}):
        text.setdefault("partial_rotary_factor", 0.25)  # as transformers does
    base = read_dense_shape(
        text,
        family="qwen3_5_moe" if moe else "qwen3_5",
        qk_norm=True,
        refuse_bias=("attention_bias",),
        partial_rotary=True,
        layer_types=(LINEAR, FULL),
    )
    gdn = _read_gdn(text, base.num_layers)
    args, flags = _gdn_settings(gdn)
    base = replace(
        base,
        layer_prefix="model.language_model.layers." if composite else "model.layers.",
        args=(*base.args, *args),
        flags=(*base.flags, *flags),
        tie_disputed=bool(text.get("tie_disputed", False)),
    )
    if not moe:
        return HybridShape(**vars(base), gdn=gdn)
    moe_shape = read_moe_shape(base, {"norm_topk_prob": True, **text}, fused=True)
    return HybridMoeShape(**vars(moe_shape), gdn=gdn)


def _read_gdn(text: Mapping[str, Any], num_layers: int) -> GdnSizes:
    problems = [
        f"{name}={text.get(name)!r} must be a positive integer"
        for name in _GDN_SIZES
        if not isinstance(text.get(name), int) or text[name] < 1
    ]
    types = text.get("layer_types")
    if types is None:
        interval = text.get("full_attention_interval", 4)
        types = [FULL if (layer + 1) % interval == 0 else LINEAR for layer in range(num_layers)]
    if len(types) != num_layers:
        problems.append(f"layer_types has {len(types)} entries for {num_layers} layers")
    if text.get("attn_output_gate") is False:
        problems.append("attn_output_gate=false: q_proj must carry an output gate")
    if problems:
        raise ValueError("config.json cannot be converted:\n  " + "\n  ".join(problems))
    keys, values, key_size, value_size, kernel = (int(text[name]) for name in _GDN_SIZES)
    return GdnSizes(keys, values, key_size, value_size, kernel, tuple(types))


def _gdn_settings(gdn: GdnSizes) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
    pattern = [int(kind == LINEAR) for kind in gdn.layer_types]
    values = {
        "experimental_attention_variant": "gated_delta_net",
        "linear_num_key_heads": gdn.key_heads,
        "linear_num_value_heads": gdn.value_heads,
        "linear_key_head_dim": gdn.key_head_size,
        "linear_value_head_dim": gdn.value_head_size,
        "linear_conv_kernel_dim": gdn.conv_kernel,
        "attention_output_gate": True,
        "apply_layernorm_1p": True,
    }
    flags = [(name.replace("_", "-"), value) for name, value in values.items()]
    flags.append(("linear-attention-freq", "[" + ",".join(map(str, pattern)) + "]"))
    args = [*values.items(), ("layernorm_zero_centered_gamma", True)]
    return [*args, ("linear_attention_freq", pattern)], flags


_MLP = tuple(entry for entry in DENSE_LAYER if entry.target.startswith("mlp."))
_ATTENTION = (
    *(
        entry
        for entry in DENSE_LAYER
        if entry.target.startswith("self_attention.")
        and entry.target != "self_attention.linear_qkv.weight"
    ),
    Entry(
        "self_attention.linear_qkv.weight",
        (
            Source("self_attn.q_proj.weight", ("gated_query", "hidden")),
            Source("self_attn.k_proj.weight", ("key", "hidden")),
            Source("self_attn.v_proj.weight", ("key", "hidden")),
        ),
        interleave_gated_groups,
    ),
    *QK_NORMS,
)


def _gdn_entries(gdn: GdnSizes) -> tuple[Entry, ...]:
    width = 2 * gdn.key_size + gdn.value_size
    parts = (
        ("query", 0, gdn.key_size),
        ("key", gdn.key_size, gdn.key_size),
        ("value", 2 * gdn.key_size, gdn.value_size),
    )
    qkv = (Source("linear_attn.in_proj_qkv.weight", (width, "hidden")),)
    conv = (Source("linear_attn.conv1d.weight", (width, 1, gdn.conv_kernel)),)
    heads = gdn.value_heads

    def whole(target: str, name: str, *shape: str | int, **settings: Any) -> Entry:
        sources = (Source(f"linear_attn.{name}", shape),)
        return Entry(f"self_attention.{target}", sources, copy_rows, **settings)

    return (
        Entry(
            "self_attention.in_proj.layer_norm_weight",
            (Source("input_layernorm.weight", ("hidden",)),),
            copy_rows,
        ),
        *(
            Entry(f"self_attention.in_proj.weight.{part}", qkv, take_rows(lo, rows))
            for part, lo, rows in parts
        ),
        whole("in_proj.weight.z", "in_proj_z.weight", gdn.value_size, "hidden"),
        whole("in_proj.weight.beta", "in_proj_b.weight", heads, "hidden"),
        whole("in_proj.weight.alpha", "in_proj_a.weight", heads, "hidden"),
        *(
            Entry(f"self_attention.conv1d.weight.{part}", conv, take_rows(lo, rows))
            for part, lo, rows in parts
        ),
        whole("A_log", "A_log", heads, pinned=True),
        whole("dt_bias", "dt_bias", heads),
        whole("out_norm.weight", "norm.weight", gdn.value_head_size, offset=-1.0, pinned=True),
        whole("out_proj.weight", "out_proj.weight", "hidden", gdn.value_size),
    )


def _entries(family: Family, shape: ModelShape, layer: int) -> tuple[Entry, ...]:
    if layer < 0:
        return name_top(family.top if shape.tied else (*family.top, family.head), shape)
    assert isinstance(shape, HybridShape | HybridMoeShape), f"{shape.family} is no hybrid"
    linear = shape.gdn.layer_types[layer] == LINEAR
    mixer = _gdn_entries(shape.gdn) if linear else _ATTENTION
    return (*mixer, *(moe_entries(shape) if isinstance(shape, MoeShape) else _MLP))


def _states(family: Family, shape: ModelShape, layer: int) -> ExtraStates:
    if layer < 0:
        return tuple((module, 1) for module in family.extra_states)
    assert isinstance(shape, HybridShape | HybridMoeShape), f"{shape.family} is no hybrid"
    linear = shape.gdn.layer_types[layer] == LINEAR
    names = (
        "in_proj out_norm out_proj" if linear else "linear_qkv linear_proj q_layernorm k_layernorm"
    )
    mixer: ExtraStates = tuple((f"self_attention.{name}", 1) for name in names.split())
    if isinstance(shape, MoeShape):
        return (*mixer, *moe_states(shape))
    return (*mixer, ("mlp.linear_fc1", 1), ("mlp.linear_fc2", 1))


_settle = settle_names(
    ("model.language_model.layers.", "lm_head.weight"), ("model.layers.", "lm_head.weight")
)


def _adapt_moe(shape: ModelShape, names: Collection[str]) -> ModelShape:
    return adapt_experts(_settle(shape, names), names)


QWEN3_5 = Family(
    name="qwen3_5",
    model_types=("qwen3_5", "qwen3_5_text"),
    top=DENSE_TOP,
    head=DENSE_HEAD,
    layer=(),
    extra_states=DENSE_EXTRA_STATES,
    layer_extra_states=(),
    read_shape=read_qwen3_5_shape,
    entries=_entries,
    states=_states,
    pass_through=("model.visual.", "mtp."),
    stackable=False,
    adapt=_settle,
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    name="qwen3_5_moe",
    model_types=("qwen3_5_moe", "qwen3_5_moe_text"),
    adapt=_adapt_moe,
)
