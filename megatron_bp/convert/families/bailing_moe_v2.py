"""Bailing-MoE v2 (Ling 2.0, Ring 2.0) and LLaDA2, the block-diffusion models made of it.

Both have the same tensors (llama.cpp PR 17454 maps them alike): one query_key_value a layer with
all queries, then all keys, then all values; query and key norms; the first `first_k_dense_replace`
layers dense, the others with sigmoid-scored, group-limited experts, an fp32 `expert_bias` and a
shared expert without gate. Names and Megatron's counterparts as in Megatron-Bridge 0.6.2
(models/bailing), SGLang 0.5.23 (models/llada2.py) and the published config.json files. Experts come
one by one, as servers read them, or stacked by projection, as dFactory trains them.
Multi-token-prediction layers are refused. Specified by tests/convert/test_families.py; logits by
test_bailing_moe_v2.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from megatron_bp.convert.families.base import (
    Entry,
    ExtraStates,
    Family,
    ModelShape,
    Source,
    uniform_entries,
)
from megatron_bp.convert.families.dense import read_dense_shape
from megatron_bp.convert.families.llama import DENSE_EXTRA_STATES, DENSE_HEAD, DENSE_LAYER
from megatron_bp.convert.families.moe import MoeShape, expert_entries, moe_norm
from megatron_bp.convert.rules import concat_rows, copy_rows, interleave_in, interleave_parts

_STACKED_PROBE = "mlp.experts.gate_proj"


class BailingShape(MoeShape):
    """A shape whose first layers are dense. `fused_experts` means stacked by projection."""

    @property
    def num_dense_layers(self) -> int:
        """The number of leading layers without experts."""
        return int(dict(self.args)["moe_layer_freq"].count(0))


def read_bailing_shape(config: Mapping[str, Any]) -> BailingShape:
    """Returns the shape of a Bailing-MoE v2 or LLaDA2 config.

    Raises: ValueError listing what is missing and what cannot be converted.
    """
    problems = _unsupported(config)
    # LLaDA2MoeConfig's default; BailingMoeV2's models say it themselves.
    diffusion = config.get("model_type") == "llada2_moe"
    factor = config.get("partial_rotary_factor", 0.5 if diffusion else 1.0)
    head = config.get("head_dim")
    rotary = config.get("rotary_dim")
    if rotary is not None and isinstance(head, int) and rotary != int(head * factor):
        problems.append(
            f"rotary_dim={rotary} must be head_dim * partial_rotary_factor = {int(head * factor)}"
        )
    sizes = {}
    for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group"):
        value = config.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            problems.append(f"{name}={value!r} must be a positive integer")
        sizes[name] = value if isinstance(value, int) else 1
    base = read_dense_shape(
        {**config, "partial_rotary_factor": factor},
        family="bailing_moe_v2",
        qk_norm=True,
        refuse_bias=("use_bias", "use_qkv_bias"),
        partial_rotary=True,
    )
    dense = config.get("first_k_dense_replace", 0)
    if not isinstance(dense, int) or not 0 <= dense <= base.num_layers:
        problems.append(f"first_k_dense_replace={dense!r} must be in [0, {base.num_layers}]")
    if problems:
        raise ValueError("config.json cannot be converted:\n  " + "\n  ".join(problems))
    shared_width = config.get("moe_shared_expert_intermediate_size", sizes["moe_intermediate_size"])
    shared = int(config.get("num_shared_experts") or 0) * int(shared_width)
    values = _router_values(config, sizes)
    pattern = [0] * dense + [1] * (base.num_layers - dense)
    args: list[tuple[str, Any]] = [*values.items(), ("moe_layer_freq", pattern)]
    flags = [(name.replace("_", "-"), value) for name, value in values.items()]
    flags.append(("moe-layer-freq", f"([0]*{dense}+[1]*{base.num_layers - dense})"))
    if shared:
        args.append(("moe_shared_expert_intermediate_size", shared))
        flags.append(("moe-shared-expert-intermediate-size", shared))
    fields = {
        **vars(base),
        "args": (*base.args, *args),
        "flags": (*base.flags, *flags),
    }
    return BailingShape(
        **fields,
        num_experts=sizes["num_experts"],
        expert_ffn_size=sizes["moe_intermediate_size"],
        shared_ffn_size=shared,
        fused_experts=False,
    )


def _router_values(
    config: Mapping[str, Any], sizes: Mapping[str, int]
) -> dict[str, str | int | float | bool]:
    return {
        "num_experts": sizes["num_experts"],
        "moe_router_topk": sizes["num_experts_per_tok"],
        "moe_ffn_hidden_size": sizes["moe_intermediate_size"],
        "moe_router_score_function": "sigmoid",
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": sizes["n_group"],
        "moe_router_group_topk": int(config["topk_group"]),
        "moe_router_topk_scaling_factor": float(config["routed_scaling_factor"]),
    }


def _unsupported(config: Mapping[str, Any]) -> list[str]:
    problems = []
    for name, wanted in (
        ("score_function", "sigmoid"),
        ("norm_topk_prob", True),
        ("use_qk_norm", True),
        ("moe_router_enable_expert_bias", True),
    ):
        if config.get(name, wanted) != wanted:
            problems.append(f"{name}={config[name]!r} must be {wanted!r}")
    if config.get("norm_head"):
        problems.append("norm_head=true: a head that is normalised when loaded does not convert")
    if config.get("expert_capacity") is not None:
        problems.append(
            f"expert_capacity={config['expert_capacity']}: experts chosen by block (block routing) "
            f"have no counterpart in Megatron"
        )
    if config.get("num_nextn_predict_layers"):
        problems.append(
            f"num_nextn_predict_layers={config['num_nextn_predict_layers']} must be 0: "
            f"multi-token-prediction layers do not convert"
        )
    for name in ("topk_group", "routed_scaling_factor"):
        value = config.get(name)
        if not isinstance(value, int | float) or value <= 0:
            problems.append(f"{name}={value!r} must be positive")
    groups, experts = config.get("n_group"), config.get("num_experts")
    chosen, best = config.get("num_experts_per_tok", 0), config.get("topk_group", 0)
    known = all(isinstance(value, int) and value > 0 for value in (chosen, best))
    if known and groups != 1 and chosen // best != 2:
        problems.append(
            f"num_experts_per_tok={chosen} must be twice topk_group={best}: the "
            f"model ranks groups by their 2 best experts, Megatron by that quotient"
        )
    if isinstance(groups, int) and isinstance(experts, int) and groups and experts % groups:
        problems.append(f"num_experts={experts} must be a multiple of n_group={groups}")
    return problems


def _adapt(shape: ModelShape, names: Collection[str]) -> ModelShape:
    assert isinstance(shape, BailingShape), f"{shape.family} is not Bailing-MoE v2"
    probe = f"{shape.layer_prefix}{shape.num_dense_layers}.{_STACKED_PROBE}"
    return replace(shape, fused_experts=probe in names)


def _attention(shape: ModelShape) -> tuple[Entry, ...]:
    query, key = shape.num_heads * shape.head_size, shape.num_groups * shape.head_size
    return (
        DENSE_LAYER[0],
        Entry(
            "self_attention.linear_qkv.weight",
            (Source("attention.query_key_value.weight", (query + 2 * key, "hidden")),),
            interleave_parts((query, key, key)),
        ),
        *(
            Entry(
                f"self_attention.{short}_layernorm.weight",
                (Source(f"attention.{name}_layernorm.weight", ("head",)),),
                copy_rows,
            )
            for short, name in (("q", "query"), ("k", "key"))
        ),
        Entry(
            "self_attention.linear_proj.weight",
            (Source("attention.dense.weight", ("hidden", "query")),),
            copy_rows,
        ),
    )


def _stacked_experts(shape: BailingShape) -> tuple[Entry, ...]:
    up = ("experts", "expert_ffn", "hidden")
    return (
        Entry(
            "mlp.experts.experts.linear_fc1.weight",
            (Source("mlp.experts.gate_proj", up), Source("mlp.experts.up_proj", up)),
            interleave_in(shape.num_experts),
            ("experts",),
            1,
        ),
        Entry(
            "mlp.experts.experts.linear_fc2.weight",
            (Source("mlp.experts.down_proj", ("experts", "hidden", "expert_ffn")),),
            copy_rows,
            ("experts",),
            1,
        ),
    )


_SHARED_EXPERT = (
    Entry(
        "mlp.shared_experts.linear_fc1.weight",
        (
            Source("mlp.shared_experts.gate_proj.weight", ("shared_ffn", "hidden")),
            Source("mlp.shared_experts.up_proj.weight", ("shared_ffn", "hidden")),
        ),
        concat_rows,
    ),
    Entry(
        "mlp.shared_experts.linear_fc2.weight",
        (Source("mlp.shared_experts.down_proj.weight", ("hidden", "shared_ffn")),),
        copy_rows,
    ),
)


def _entries(family: Family, shape: ModelShape, layer: int) -> tuple[Entry, ...]:
    assert isinstance(shape, BailingShape), f"{shape.family} is not Bailing-MoE v2"
    if layer < 0:
        return uniform_entries(family, shape, layer)
    attention = _attention(shape)
    if layer < shape.num_dense_layers:
        return (*attention, *(x for x in DENSE_LAYER if x.target.startswith("mlp.")))
    return (
        *attention,
        *moe_norm(),
        Entry("mlp.router.weight", (Source("mlp.gate.weight", ("experts", "hidden")),), copy_rows),
        Entry(
            "mlp.router.expert_bias",
            (Source("mlp.gate.expert_bias", ("experts",)),),
            copy_rows,
            pinned=True,
        ),
        *(_stacked_experts(shape) if shape.fused_experts else expert_entries(shape)),
        *(_SHARED_EXPERT if shape.shared_ffn_size else ()),
    )


def _states(family: Family, shape: ModelShape, layer: int) -> ExtraStates:
    assert isinstance(shape, BailingShape), f"{shape.family} is not Bailing-MoE v2"
    if layer < 0:
        return tuple((module, 1) for module in family.extra_states)
    attention: ExtraStates = tuple((f"self_attention.{name}", 1) for name in _ATTENTION_STATES)
    if layer < shape.num_dense_layers:
        return (*attention, ("mlp.linear_fc1", 1), ("mlp.linear_fc2", 1))
    experts, shared = "mlp.experts.experts.linear_fc", "mlp.shared_experts.linear_fc"
    return (
        *attention,
        ("pre_mlp_layernorm", 1),
        *((f"{experts}{number}", shape.num_experts) for number in (1, 2)),
        *((f"{shared}{number}", 1) for number in (1, 2) if shape.shared_ffn_size),
    )


_ATTENTION_STATES = ("linear_qkv", "linear_proj", "q_layernorm", "k_layernorm")
BAILING_MOE_V2 = Family(
    name="bailing_moe_v2",
    model_types=("bailing_moe_v2", "llada2_moe"),
    # Their model_type is sometimes that of the first version, bailing_moe.
    architectures=("BailingMoeV2ForCausalLM", "LLaDA2MoeModelLM"),
    top=(
        Entry(
            "embedding.word_embeddings.weight",
            (Source("model.word_embeddings.weight", ("vocab", "hidden")),),
            copy_rows,
        ),
        Entry(
            "decoder.final_layernorm.weight", (Source("model.norm.weight", ("hidden",)),), copy_rows
        ),
    ),
    head=DENSE_HEAD,
    layer=(),
    extra_states=DENSE_EXTRA_STATES,
    layer_extra_states=(),
    read_shape=read_bailing_shape,
    entries=_entries,
    states=_states,
    stackable=False,
    adapt=_adapt,
)
