"""Gemma 4 and DiffusionGemma: two head sizes, K = V layers, experts beside a dense MLP.

megatron-core 0.19.2 has no Gemma 4 layer, so nothing there names these tensors and no CPU test can
build the model; exact round trips and golden key lists (tests/golden/convert_gemma4*_keys.json,
convert_diffusion_gemma_keys.json) are the evidence. The names follow Megatron where it has the
module (linear_qkv, shared_experts, router, experts.experts) and Megatron-Bridge's for the extra
norms. Unlike Bridge, full attention layers hold no copy of K as V: their linear_qkv is [q.. k] a
group.

Sliding layers have `head_dim` and `num_key_value_heads`, full layers `global_head_dim` and
`num_global_key_value_heads` (transformers 5.24 writes `per_layer_config` instead). The encoder of
DiffusionGemma shares all weights with its decoder except the `layer_scalar` buffers; both sets are
kept. Vision and audio towers pass through. Gemma 4 E2B and E4B (per-layer embeddings, shared K/V)
are refused. Specified by tests/convert/test_families.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_bp.convert.families.base import (
    Entry,
    ExtraStates,
    Family,
    ModelShape,
    Source,
    keep_shape,
    name_top,
)
from megatron_bp.convert.families.composite import settle_names, text_config
from megatron_bp.convert.families.dense import read_dense_shape
from megatron_bp.convert.families.llama import DENSE_EXTRA_STATES, DENSE_HEAD, DENSE_TOP
from megatron_bp.convert.rules import concat_rows, copy_rows, interleave_in

SLIDING = "sliding_attention"
FULL = "full_attention"
_DIFFUSION = "diffusion_gemma"
_ENCODER_LAYERS = "/model.encoder.language_model.layers."


@dataclass(frozen=True, kw_only=True)
class GemmaShape(ModelShape):
    """A Gemma 4 shape. `num_experts` 0 means dense; `head_size` is that of sliding layers.

    `shared_kv` says that full attention layers have no v_proj.
    """

    layer_types: tuple[str, ...]
    full_head_size: int
    full_groups: int
    shared_kv: bool
    num_experts: int
    expert_ffn_size: int

    def heads(self, layer: int) -> tuple[int, int]:
        """Returns (head size, number of query groups) of a layer."""
        if self.layer_types[layer] == SLIDING:
            return self.head_size, self.num_groups
        return self.full_head_size, self.full_groups


def read_gemma4_shape(config: Mapping[str, Any]) -> GemmaShape:
    """Returns the shape of a Gemma 4 or DiffusionGemma config.

    Raises: ValueError listing what is missing and what cannot be converted.
    """
    model_type = str(config.get("model_type"))
    composite = not model_type.endswith("_text")
    text = text_config(config, tied_by_default=True) if composite else dict(config)
    text.setdefault("tie_word_embeddings", True)
    diffusion = model_type.startswith(_DIFFUSION)
    problems = _unsupported(text, diffusion)
    # The activation and the rotary settings are Gemma's own; the rest is like any dense decoder.
    plain = {k: v for k, v in text.items() if k not in ("rope_parameters", "sliding_window")}
    base = read_dense_shape(
        plain,
        family=_DIFFUSION if diffusion else "gemma4",
        qk_norm=True,
        refuse_bias=("attention_bias",),
        layer_types=(SLIDING, FULL),
    )
    types = _layer_types(text, base.num_layers)
    shared_kv = diffusion or bool(text.get("attention_k_eq_v", False))
    head, groups = _full_heads(text, types, base, shared_kv)
    experts = _experts(text, diffusion, problems)
    if base.num_heads % groups:
        problems.append(f"{groups} key heads of full layers do not divide {base.num_heads} heads")
    if problems:
        raise ValueError("config.json cannot be converted:\n  " + "\n  ".join(problems))
    prefix = "model.language_model.layers." if composite else "model.layers."
    base = replace(
        base,
        layer_prefix="model.decoder.layers." if diffusion else prefix,
        args=(("swiglu", False), ("window_size", (text["sliding_window"] - 1, 0))),
        flags=(("swiglu", False),),
        notes=(
            "megatron-core 0.19.2 has no Gemma 4 layer: these flags give its sizes, not a model",
        ),
        tie_disputed=bool(text.get("tie_disputed", False)) and not diffusion,
    )
    return GemmaShape(
        **vars(base),
        layer_types=types,
        full_head_size=head,
        full_groups=groups,
        shared_kv=shared_kv,
        num_experts=experts[0],
        expert_ffn_size=experts[1],
    )


def _unsupported(text: Mapping[str, Any], diffusion: bool) -> list[str]:
    problems = []
    if not isinstance(text.get("sliding_window"), int):
        problems.append(f"sliding_window={text.get('sliding_window')!r} must be an integer")
    activation = text.get("hidden_activation", "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        problems.append(f"hidden_activation={activation!r} must be 'gelu_pytorch_tanh'")
    # Gemma4TextConfig's default is 256.
    if not diffusion and text.get("hidden_size_per_layer_input", 256):
        problems.append(
            "hidden_size_per_layer_input must be 0: per-layer embeddings (E2B, E4B) do not convert"
        )
    for name in ("num_kv_shared_layers", "use_double_wide_mlp"):
        if text.get(name):
            problems.append(f"{name}={text[name]} must be 0: shared K/V layers do not convert")
    return problems


def _layer_types(text: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    types = text.get("layer_types")
    if types is None:
        types = [SLIDING if (layer + 1) % 6 else FULL for layer in range(num_layers)]
    if len(types) != num_layers:
        raise ValueError(f"layer_types has {len(types)} entries for {num_layers} layers")
    return (*types[:-1], FULL)  # transformers forces the last layer


def _full_heads(
    text: Mapping[str, Any], types: tuple[str, ...], base: ModelShape, shared_kv: bool
) -> tuple[int, int]:
    own = text.get("per_layer_config")
    if own:
        layers = [number for number, kind in enumerate(types) if kind == FULL]
        own = {int(layer): heads for layer, heads in own.items()}  # transformers pads: "05"
        found = {
            (
                own[layer].get("head_dim", base.head_size),
                own[layer].get("num_key_value_heads", base.num_groups),
            )
            for layer in layers
            if layer in own
        }
        if len(found) != 1 or len(own) != len(layers):
            raise ValueError(
                f"per_layer_config={own} must give the full layers, {layers}, one head_dim and "
                f"num_key_value_heads"
            )
        return found.pop()
    groups = text.get("num_global_key_value_heads") if shared_kv else None
    return int(text.get("global_head_dim", 512)), int(groups or base.num_groups)


def _experts(text: Mapping[str, Any], diffusion: bool, problems: list[str]) -> tuple[int, int]:
    if not (diffusion or text.get("enable_moe_block")):
        return 0, 0
    sizes = (text.get("num_experts"), text.get("moe_intermediate_size"))
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        problems.append(
            f"num_experts={sizes[0]!r} and moe_intermediate_size={sizes[1]!r} must be positive"
        )
        return 0, 0
    return int(sizes[0] or 0), int(sizes[1] or 0)


def _norm(target: str, source: str) -> Entry:
    return Entry(f"{target}", (Source(f"{source}.weight", ("hidden",)),), copy_rows)


def _attention(shape: GemmaShape, layer: int) -> tuple[Entry, ...]:
    head, groups = shape.heads(layer)
    query = shape.num_heads * head
    projections = [("q", query), ("k", groups * head)]
    if not (shape.shared_kv and shape.layer_types[layer] == FULL):
        projections.append(("v", groups * head))
    return (
        _norm("self_attention.linear_qkv.layer_norm_weight", "input_layernorm"),
        Entry(
            "self_attention.linear_qkv.weight",
            tuple(
                Source(f"self_attn.{name}_proj.weight", (rows, "hidden"))
                for name, rows in projections
            ),
            interleave_in(groups),
        ),
        *(
            Entry(
                f"self_attention.{name}_layernorm.weight",
                (Source(f"self_attn.{name}_norm.weight", (head,)),),
                copy_rows,
            )
            for name in ("q", "k")
        ),
        Entry(
            "self_attention.linear_proj.weight",
            (Source("self_attn.o_proj.weight", ("hidden", query)),),
            copy_rows,
        ),
        _norm("self_attention.linear_proj.post_layernorm.weight", "post_attention_layernorm"),
        _norm("post_ffn_layernorm.weight", "post_feedforward_layernorm"),
    )


def _dense_mlp(module: str) -> tuple[Entry, ...]:
    return (
        _norm(f"{module}.linear_fc1.layer_norm_weight", "pre_feedforward_layernorm"),
        Entry(
            f"{module}.linear_fc1.weight",
            (
                Source("mlp.gate_proj.weight", ("ffn", "hidden")),
                Source("mlp.up_proj.weight", ("ffn", "hidden")),
            ),
            concat_rows,
        ),
        Entry(
            f"{module}.linear_fc2.weight",
            (Source("mlp.down_proj.weight", ("hidden", "ffn")),),
            copy_rows,
        ),
    )


def _moe_mlp(shape: GemmaShape) -> tuple[Entry, ...]:
    count, ffn = shape.num_experts, shape.expert_ffn_size

    def whole(target: str, name: str, *size: str | int, **settings: Any) -> Entry:
        return Entry(f"mlp.{target}", (Source(name, size),), copy_rows, **settings)

    stack: dict[str, Any] = {"stack": (count,), "row_rank": 1}
    return (
        *_dense_mlp("mlp.shared_experts"),
        _norm("mlp.post_shared_expert_layernorm.weight", "post_feedforward_layernorm_1"),
        _norm("pre_mlp_layernorm.weight", "pre_feedforward_layernorm_2"),
        _norm("mlp.post_moe_layernorm.weight", "post_feedforward_layernorm_2"),
        whole("router.weight", "router.proj.weight", count, "hidden"),
        whole("router.scale", "router.scale", "hidden"),
        whole("router.per_expert_scale", "router.per_expert_scale", count),
        # [E, 2F, H], the gate first, and [E, H, F]: Megatron's own layout.
        whole(
            "experts.experts.linear_fc1.weight",
            "experts.gate_up_proj",
            *(count, 2 * ffn, "hidden"),
            **stack,
        ),
        whole(
            "experts.experts.linear_fc2.weight",
            "experts.down_proj",
            *(count, "hidden", ffn),
            **stack,
        ),
    )


def _entries(family: Family, shape: ModelShape, layer: int) -> tuple[Entry, ...]:
    assert isinstance(shape, GemmaShape), f"{shape.family} is not Gemma 4"
    if layer < 0:
        return name_top(family.top if shape.tied else (*family.top, family.head), shape)
    scalars = [Entry("layer_scalar", (Source("layer_scalar", (1,)),), copy_rows)]
    if family.name == _DIFFUSION:
        source = Source(f"{_ENCODER_LAYERS}{layer}.layer_scalar", (1,))
        scalars.append(Entry("encoder_layer_scalar", (source,), copy_rows))
    mlp = _moe_mlp(shape) if shape.num_experts else _dense_mlp("mlp")
    return (*_attention(shape, layer), *mlp, *scalars)


def _states(family: Family, shape: ModelShape, layer: int) -> ExtraStates:
    # No layer class exists that asks for any; the final norm is Megatron's own.
    return tuple((module, 1) for module in family.extra_states) if layer < 0 else ()


_SELF_CONDITIONING = (
    Entry(
        "self_conditioning.pre_norm.weight",
        (Source("{text}self_conditioning.pre_norm.weight", ("hidden",)),),
        copy_rows,
    ),
    Entry(
        "self_conditioning.linear_fc1.weight",
        (
            Source("{text}self_conditioning.gate_proj.weight", ("ffn", "hidden")),
            Source("{text}self_conditioning.up_proj.weight", ("ffn", "hidden")),
        ),
        concat_rows,
    ),
    Entry(
        "self_conditioning.linear_fc2.weight",
        (Source("{text}self_conditioning.down_proj.weight", ("hidden", "ffn")),),
        copy_rows,
    ),
)
GEMMA4 = Family(
    name="gemma4",
    model_types=("gemma4", "gemma4_text"),
    top=DENSE_TOP,
    head=DENSE_HEAD,
    layer=(),
    extra_states=DENSE_EXTRA_STATES,
    layer_extra_states=(),
    read_shape=read_gemma4_shape,
    entries=_entries,
    states=_states,
    pass_through=(
        "model.vision_tower.",
        "model.embed_vision.",
        "model.audio_tower.",
        "model.embed_audio.",
    ),
    stackable=False,
    adapt=settle_names(
        ("model.language_model.layers.", "lm_head.weight"), ("model.layers.", "lm_head.weight")
    ),
)
DIFFUSION_GEMMA = replace(
    GEMMA4,
    name=_DIFFUSION,
    model_types=(_DIFFUSION,),
    top=(*DENSE_TOP, *_SELF_CONDITIONING),
    adapt=keep_shape,
    pass_through=("model.encoder.vision_tower.", "model.encoder.embed_vision."),
)
