"""Entries of a mixture-of-experts MLP: router, stacked experts and shared expert.

Megatron stacks the experts of a layer, [E, 2F, H] and [E, H, F], whatever layer class and expert
parallel size it runs with. Hugging Face files have one tensor an expert and projection, or the same
stacks; `MoeShape.fused_experts` says which. Target names: megatron-core 0.19.2, transformer/moe
(experts.py, router.py, shared_experts.py), checked against a model's sharded_state_dict by
tests/convert/test_family_megatron.py. Specified by tests/convert/test_families.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_bp.convert.families.base import Entry, ExtraStates, ModelShape, Source
from megatron_bp.convert.rules import concat_rows, copy_rows


@dataclass(frozen=True, kw_only=True)
class MoeShape(ModelShape):
    """A shape with experts. `shared_ffn_size` 0 means no shared expert."""

    num_experts: int
    expert_ffn_size: int
    shared_ffn_size: int
    fused_experts: bool

    def dims(self) -> dict[str, int]:
        """Returns the sizes that entry tables name."""
        return {
            **super().dims(),
            "experts": self.num_experts,
            "expert_ffn": self.expert_ffn_size,
            "shared_ffn": self.shared_ffn_size,
        }


def adapt_experts(shape: ModelShape, names: Collection[str]) -> ModelShape:
    """Returns `shape` with `fused_experts` as the tensor names say.

    The config does not tell: repositories of one model_type have both layouts.
    """
    assert isinstance(shape, MoeShape), f"{shape.family} has no experts"
    experts = f"{shape.layer_prefix}0.mlp.experts."
    for fused, probe in ((True, "gate_up_proj"), (False, "0.gate_proj.weight")):
        if experts + probe in names:
            return replace(shape, fused_experts=fused)
    return shape


def moe_entries(shape: MoeShape) -> tuple[Entry, ...]:
    """Returns the MLP entries of a layer (its norm too, see below).

    The norm before the MLP is written under two names: Megatron's Transformer Engine layer spec
    looks for `pre_mlp_layernorm.weight` and the local spec for `mlp.linear_fc1.layer_norm_weight`,
    though the layer has no such linear. A training checkpoint has one of them.
    """
    entries = [
        *moe_norm(),
        Entry("mlp.router.weight", (Source("mlp.gate.weight", ("experts", "hidden")),), copy_rows),
        *(_fused_experts(shape) if shape.fused_experts else expert_entries(shape)),
    ]
    return (*entries, *(_SHARED_EXPERT if shape.shared_ffn_size else ()))


def moe_norm() -> tuple[Entry, ...]:
    """Returns the norm before the MLP under both of its names (see `moe_entries`)."""
    norm = (Source("post_attention_layernorm.weight", ("hidden",)),)
    return (
        Entry("pre_mlp_layernorm.weight", norm, copy_rows),
        Entry("mlp.linear_fc1.layer_norm_weight", norm, copy_rows, alias=True),
    )


def expert_entries(shape: MoeShape) -> tuple[Entry, ...]:
    """Returns the stacks of experts that Hugging Face files have one by one."""
    first, second = [], []
    for expert in range(shape.num_experts):
        prefix = f"mlp.experts.{expert}."
        for name in ("gate", "up"):
            first.append(Source(f"{prefix}{name}_proj.weight", ("expert_ffn", "hidden")))
        second.append(Source(f"{prefix}down_proj.weight", ("hidden", "expert_ffn")))
    return (
        Entry("mlp.experts.experts.linear_fc1.weight", tuple(first), concat_rows, ("experts",)),
        Entry("mlp.experts.experts.linear_fc2.weight", tuple(second), concat_rows, ("experts",)),
    )


def _fused_experts(shape: MoeShape) -> tuple[Entry, ...]:
    # [E, 2F, H], the gate first, and [E, H, F]: Megatron's own layout. A row is the last dim.
    first = Source("mlp.experts.gate_up_proj", ("experts", 2 * shape.expert_ffn_size, "hidden"))
    second = Source("mlp.experts.down_proj", ("experts", "hidden", "expert_ffn"))
    return (
        Entry("mlp.experts.experts.linear_fc1.weight", (first,), copy_rows, ("experts",), 1),
        Entry("mlp.experts.experts.linear_fc2.weight", (second,), copy_rows, ("experts",), 1),
    )


_SHARED_EXPERT = (
    Entry(
        "mlp.shared_experts.linear_fc1.weight",
        (
            Source("mlp.shared_expert.gate_proj.weight", ("shared_ffn", "hidden")),
            Source("mlp.shared_expert.up_proj.weight", ("shared_ffn", "hidden")),
        ),
        concat_rows,
    ),
    Entry(
        "mlp.shared_experts.linear_fc2.weight",
        (Source("mlp.shared_expert.down_proj.weight", ("hidden", "shared_ffn")),),
        copy_rows,
    ),
    Entry(
        "mlp.shared_experts.gate_weight",
        (Source("mlp.shared_expert_gate.weight", (1, "hidden")),),
        copy_rows,
    ),
)


def moe_states(shape: MoeShape) -> ExtraStates:
    """Returns the extra states of the MLP and its norm."""
    count = shape.num_experts
    states: ExtraStates = (
        ("pre_mlp_layernorm", 1),
        ("mlp.experts.experts.linear_fc1", count),
        ("mlp.experts.experts.linear_fc2", count),
    )
    if shape.shared_ffn_size:
        states += (("mlp.shared_experts.linear_fc1", 1), ("mlp.shared_experts.linear_fc2", 1))
    return states


def read_moe_shape(base: ModelShape, config: Mapping[str, Any], *, fused: bool) -> MoeShape:
    """Returns `base` with the experts that a Qwen MoE config describes.

    `fused` says how the family's released files have them; `adapt_experts` corrects it.
    Raises: ValueError listing missing sizes and layouts without a counterpart.
    """
    problems = []
    # transformers 5 writes num_experts under its other name.
    config = {"num_experts": config.get("num_local_experts"), **config}
    sizes: dict[str, int] = {}
    for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
        value = config.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            problems.append(f"{name}={value!r} must be a positive integer")
        else:
            sizes[name] = value
    step = config.get("decoder_sparse_step", 1)
    if step != 1 or config.get("mlp_only_layers"):
        problems.append(
            f"decoder_sparse_step={step}, mlp_only_layers={config.get('mlp_only_layers')!r}: "
            f"every layer must have experts (1 and [])"
        )
    if problems:
        raise ValueError("config.json cannot be converted:\n  " + "\n  ".join(problems))
    shared = config.get("shared_expert_intermediate_size") or 0
    values: dict[str, str | int | float | bool] = {
        "num_experts": sizes["num_experts"],
        "moe_router_topk": sizes["num_experts_per_tok"],
        "moe_ffn_hidden_size": sizes["moe_intermediate_size"],
        "moe_router_score_function": "softmax",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": float(config.get("router_aux_loss_coef", 0.001)),
    }
    # Softmax over the chosen logits equals softmax over all, renormalised over the chosen.
    pre_softmax = not config.get("norm_topk_prob", True)
    args = [*values.items(), ("moe_router_pre_softmax", pre_softmax)]
    flags = [(name.replace("_", "-"), value) for name, value in values.items()]
    if pre_softmax:
        flags.append(("moe-router-pre-softmax", True))
    if shared:
        args += [("moe_shared_expert_intermediate_size", shared), ("moe_shared_expert_gate", True)]
        flags += [("moe-shared-expert-intermediate-size", shared), ("moe-shared-expert-gate", True)]
    fields = {
        **vars(base),
        "args": (*base.args, *args),
        "flags": (*base.flags, *flags),
        "num_experts": sizes["num_experts"],
        "expert_ffn_size": sizes["moe_intermediate_size"],
        "shared_ffn_size": shared,
        "fused_experts": fused,
    }
    return MoeShape(**fields)
