"""DFlash and DFlash2 drafters: the draft's own tensors only, no embedding and no head.

A drafter reads hidden states of a frozen target model and uses that model's tables. Its queries
come from the draft stream alone, its keys and values from two inputs (the target's context features
and the draft stream): linear_q and linear_kv are separate, and linear_kv is [k ; v] a group, as in
Megatron's cross attention (megatron-core 0.19.2, transformer/attention.py). Layers live under
`draft.layers.N`, beside the target's `decoder.layers.N`. megatron-core has no drafter, so those
names are ours; exact round trips and golden key lists (tests/golden/convert_dflash*_keys.json) are
the evidence. Hugging Face names are those of the published drafters that SGLang 0.5.23 loads; no
class of transformers has them. Specified by tests/convert/test_families.py.

`target_layer_ids`, `mask_token_id` and `block_size` are mandatory: engines that guess them guess
wrong silently (sglang issue 37475).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_bp.convert.families.base import Entry, ExtraStates, Family, ModelShape, Source
from megatron_bp.convert.families.dense import read_dense_shape
from megatron_bp.convert.families.llama import DENSE_HEAD
from megatron_bp.convert.rules import concat_rows, copy_rows, interleave_groups

_V2_SIZES = ("conv_kernel_size", "conv_group_size", "selector_rank")


@dataclass(frozen=True, kw_only=True)
class DraftShape(ModelShape):
    """A drafter's shape. `conv_taps` 0 means DFlash without convolutions and selector."""

    num_features: int
    conv_taps: int
    conv_group: int
    selector_rank: int

    def dims(self) -> dict[str, int]:
        """Returns the sizes that entry tables name."""
        sizes = {
            **super().dims(),
            "features": self.num_features * self.hidden_size,
            "taps": self.conv_taps,
            "rank": self.selector_rank,
        }
        if self.conv_taps:
            sizes["conv"] = 2 * self.conv_taps * (self.hidden_size // self.conv_group)
        return sizes


def read_dflash_shape(config: Mapping[str, Any]) -> DraftShape:
    """Returns the shape of a drafter's config; ValueError lists what is missing."""
    architectures = config.get("architectures") or ()
    second = "DFlash2DraftModel" in architectures
    base = read_dense_shape(
        {"head_dim": 128, **config, "sliding_window": None},
        family="dflash2" if second else "dflash",
        qk_norm=True,
        refuse_bias=("attention_bias",),
        layer_types=("full_attention", "sliding_attention"),
    )
    own = dict(config.get("dflash_config") or {})
    own.setdefault("block_size", config.get("block_size"))
    problems = [
        f"dflash_config.{name}={own.get(name)!r} must be an integer"
        for name in ("mask_token_id", "block_size", *(_V2_SIZES if second else ()))
        if not isinstance(own.get(name), int)
    ]
    targets = own.get("target_layer_ids")
    if not isinstance(targets, list) or not targets:
        problems.append(
            f"dflash_config.target_layer_ids={targets!r} must list the target's layers; no formula "
            f"replaces it"
        )
    group = own.get("conv_group_size")
    if second and isinstance(group, int) and (group < 1 or base.hidden_size % group):
        problems.append(f"dflash_config.conv_group_size={group} must divide {base.hidden_size}")
    if problems:
        raise ValueError("config.json cannot be converted:\n  " + "\n  ".join(problems))
    assert isinstance(targets, list), "checked above"
    base = replace(
        base,
        tied=True,  # neither side has a table
        layer_prefix="layers.",
        args=(*base.args, *((f"draft_{name}", value) for name, value in sorted(own.items()))),
        notes=("a drafter: load it beside its target model, which these flags do not describe",),
    )
    return DraftShape(
        **vars(base),
        num_features=len(targets),
        conv_taps=own["conv_kernel_size"] if second else 0,
        conv_group=own["conv_group_size"] if second else 0,
        selector_rank=own["selector_rank"] if second else 0,
    )


def _copy(target: str, source: str, *shape: str | int) -> Entry:
    return Entry(target, (Source(source, shape),), copy_rows)


_TOP = (
    _copy("draft.fc.weight", "fc.weight", "hidden", "features"),
    _copy("draft.hidden_norm.weight", "hidden_norm.weight", "hidden"),
    _copy("draft.final_layernorm.weight", "norm.weight", "hidden"),
)
_SELECTOR = tuple(
    _copy(f"draft.candidate_selector.{name}", f"candidate_selector.{name}", *shape)
    for name, shape in (
        ("predecessor_codebook", ("vocab", "rank")),
        ("successor_codebook", ("vocab", "rank")),
        ("hidden_projection.weight", ("rank", "hidden")),
    )
)
_LAYER = (
    _copy("input_layernorm.weight", "input_layernorm.weight", "hidden"),
    _copy("self_attention.linear_q.weight", "self_attn.q_proj.weight", "query", "hidden"),
    Entry(
        "self_attention.linear_kv.weight",
        (
            Source("self_attn.k_proj.weight", ("key", "hidden")),
            Source("self_attn.v_proj.weight", ("key", "hidden")),
        ),
        interleave_groups,
    ),
    _copy("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", "head"),
    _copy("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", "head"),
    _copy("self_attention.linear_proj.weight", "self_attn.o_proj.weight", "hidden", "query"),
    _copy("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", "hidden"),
    Entry(
        "mlp.linear_fc1.weight",
        (
            Source("mlp.gate_proj.weight", ("ffn", "hidden")),
            Source("mlp.up_proj.weight", ("ffn", "hidden")),
        ),
        concat_rows,
    ),
    _copy("mlp.linear_fc2.weight", "mlp.down_proj.weight", "hidden", "ffn"),
)
_CONVOLUTIONS = tuple(
    _copy(f"{name}.{part}", f"{name}.{part}", *shape)
    for name in ("attention_conv", "mlp_conv")
    for part, shape in (
        ("base_kernel", (2, "taps", "hidden")),
        ("kernel_projection.weight", ("conv", "hidden")),
    )
)


def _entries(family: Family, shape: ModelShape, layer: int) -> tuple[Entry, ...]:
    if layer >= 0:
        return ()  # everything has its whole name, because the layers are no decoder layers
    table = [*family.top]
    for number in range(shape.num_layers):
        for entry in family.layer:
            sources = tuple(
                replace(source, name=f"{shape.layer_prefix}{number}.{source.name}")
                for source in entry.sources
            )
            target = f"draft.layers.{number}.{entry.target}"
            table.append(replace(entry, target=target, sources=sources))
    return tuple(table)


def _states(family: Family, shape: ModelShape, layer: int) -> ExtraStates:
    return ()


DFLASH = Family(
    name="dflash",
    model_types=(),
    top=_TOP,
    head=DENSE_HEAD,
    layer=_LAYER,
    extra_states=(),
    layer_extra_states=(),
    read_shape=read_dflash_shape,
    entries=_entries,
    states=_states,
    stackable=False,
    architectures=("DFlashDraftModel",),
)
DFLASH2 = replace(
    DFLASH,
    name="dflash2",
    top=(*_TOP, *_SELECTOR),
    layer=(*_LAYER, *_CONVOLUTIONS),
    architectures=("DFlash2DraftModel",),
)
