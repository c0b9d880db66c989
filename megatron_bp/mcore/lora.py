"""Low-rank adapters (LoRA) on the linear layers of a frozen model: y = W x + alpha / rank * B A x.

Adapters enter through the layer specification. Tensor parallel ranks split the factor that the
layer's weight splits and share the other. Knows nothing of runs and checkpoint folders
(lora_state.py). Source: Hu et al., arXiv:2106.09685. Specified by tests/mcore/test_lora.py.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.nn.functional import linear

FACTORS = ("lora_a", "lora_b")


@dataclass(frozen=True)
class Lora:
    """The adapters of a run: their rank, the factor alpha / rank, the seed of A."""

    rank: int
    alpha: float
    seed: int

    @property
    def scale(self) -> float:
        """What B A x is multiplied by."""
        return self.alpha / self.rank


class Adapter(nn.Module):
    """What both kinds share, in front of a linear layer of Megatron: factors, output, entries."""

    input_size: int  # of the whole layer
    split: ClassVar[dict[str, int]]  # the factor split over tensor parallel ranks: its axis

    def __init__(self, input_size: int, output_size: int, *, lora: Lora, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, **kwargs)
        self.lora, weight = lora, cast(Any, self.weight)
        self.holds_gate_and_up = kwargs.get("stride", 1) == 2
        self.lora_a = nn.Parameter(weight.new_zeros(lora.rank, weight.size(1)))
        self.lora_b = nn.Parameter(weight.new_zeros(weight.size(0), lora.rank))
        for name in FACTORS:
            factor: Any = getattr(self, name)
            if name in self.split:
                stride = kwargs.get("stride", 1)
                set_tensor_model_parallel_attributes(factor, True, self.split[name], stride)
            else:  # it meets a part of the sequence on each rank: its gradient is their sum
                factor.sequence_parallel = self.sequence_parallel

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the layer's output with the adapter's added, and its bias."""
        output, bias = super().forward(input_)
        low = self.exchange(linear(input_, self.lora_a) * self.lora.scale)
        return output + linear(low, self.lora_b), bias

    def exchange(self, low: Tensor) -> Tensor:
        """Returns A x as B reads it, the gradient summed on the way back where it must be."""
        raise NotImplementedError

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Returns the stock entries and both factors."""
        stock = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        mine = make_sharded_tensors_for_checkpoint(
            {name: getattr(self, name) for name in FACTORS},
            prefix,
            self.split,
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        if self.holds_gate_and_up:  # of this rank, so their halves are separate shards
            key, halves = f"{prefix}lora_b", metadata.get("singleton_local_shards", False)
            mine[key] = apply_swiglu_sharded_factory(mine[key], sharded_offsets, halves)
        return {**stock, **mine}


class AdaptedColumn(Adapter, ColumnParallelLinear):
    """Output-split linear layer: A [rank, in] on every rank, B [out / TP, rank] split like W."""

    split: ClassVar[dict[str, int]] = {"lora_b": 0}

    def exchange(self, low: Tensor) -> Tensor:
        """Returns all rows of A x, whose gradient is a sum over the ranks' parts of the output."""
        if self.sequence_parallel:
            return cast(Tensor, gather_from_sequence_parallel_region(low, group=self.tp_group))
        return cast(Tensor, copy_to_tensor_model_parallel_region(low, group=self.tp_group))


class AdaptedRow(Adapter, RowParallelLinear):
    """Input-split linear layer: A [rank, in / TP] split like W, B [out, rank] on every rank."""

    split: ClassVar[dict[str, int]] = {"lora_a": 1}

    def exchange(self, low: Tensor) -> Tensor:
        """Returns A x, summed over the ranks' parts of the input; this rank's rows of it."""
        if self.sequence_parallel:
            return cast(
                Tensor, reduce_scatter_to_sequence_parallel_region(low, group=self.tp_group)
            )
        return cast(Tensor, reduce_from_tensor_model_parallel_region(low, group=self.tp_group))


ADAPTED = {ColumnParallelLinear: AdaptedColumn, RowParallelLinear: AdaptedRow}


def adapted_spec(spec: Any, lora: Lora) -> Any:
    """Returns a copy of a dense layer's specification with adapters on its four linear layers.

    Raises: TypeError for linear layers that are not Megatron's local ones.
    """
    parts = spec.submodules
    attention, mlp = parts.self_attention, parts.mlp
    inner, outer = attention.submodules, mlp.keywords["submodules"]
    for linear_class in (inner.linear_qkv, inner.linear_proj, outer.linear_fc1, outer.linear_fc2):
        if linear_class not in ADAPTED:
            raise TypeError(
                f"--bdlm-lora-rank needs Megatron's local linear layers, and the specification has "
                f"{linear_class}; use --transformer-impl local"
            )

    def put(linear_class: Any) -> Any:
        return functools.partial(ADAPTED[linear_class], lora=lora)

    inner = replace(inner, linear_qkv=put(inner.linear_qkv), linear_proj=put(inner.linear_proj))
    outer = replace(outer, linear_fc1=put(outer.linear_fc1), linear_fc2=put(outer.linear_fc2))
    parts = replace(
        parts,
        self_attention=replace(attention, submodules=inner),
        mlp=functools.partial(mlp.func, **{**mlp.keywords, "submodules": outer}),
    )
    return replace(spec, submodules=parts)


def is_adapter(name: str) -> bool:
    """Tells the name of a factor of an adapter from that of any other tensor."""
    return name.rpartition(".")[2] in FACTORS
