"""The types of a family table.

Knows no tensor files. Specified by tests/convert/test_families.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_bp.convert.rules import RowRule


@dataclass(frozen=True)
class ModelShape:
    """What a dense decoder-only model needs to be built, in neutral names.

    `rope_scaling_factor` 0.0 means no scaling; otherwise Llama 3.1's rule with that factor.
    `layer_prefix` goes before the layer number in Hugging Face names and `head_name` is the output
    table there. `args` and `flags` replace or add what megatron_args.py derives from the rest:
    Namespace fields, and command-line flags without dashes (False leaves the flag out). `notes` are
    settings that no Megatron flag carries, for people to read. `tie_disputed` means that a config
    leaves open whether the head is tied, so that the tensors decide (`settle_tie`).
    """

    family: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_groups: int
    head_size: int
    vocab_size: int
    max_positions: int
    norm_epsilon: float
    rope_base: int
    rope_scaling_factor: float
    qk_norm: bool
    tied: bool
    layer_prefix: str = "model.layers."
    head_name: str = "lm_head.weight"
    args: tuple[tuple[str, Any], ...] = ()
    flags: tuple[tuple[str, str | int | float | bool], ...] = ()
    notes: tuple[str, ...] = ()
    tie_disputed: bool = False

    def dims(self) -> dict[str, int]:
        """Returns the sizes that entry tables name."""
        return {
            "hidden": self.hidden_size,
            "ffn": self.ffn_size,
            "query": self.num_heads * self.head_size,
            "gated_query": 2 * self.num_heads * self.head_size,
            "key": self.num_groups * self.head_size,
            "head": self.head_size,
            "vocab": self.vocab_size,
        }


@dataclass(frozen=True)
class Source:
    """One Hugging Face tensor and its shape, in numbers or in the names of `ModelShape.dims`.

    Inside a layer the name is relative to the layer, unless it starts with "/".
    """

    name: str
    shape: tuple[str | int, ...]


@dataclass(frozen=True)
class Entry:
    """One Megatron tensor made of the rows of some Hugging Face tensors by `rule`.

    A row has all dims of a source but the first, unless `row_rank` says how many trailing ones.
    `stack` are leading target dims into which the rows are folded, ("experts",) for [E, F, H].
    `offset`, `pinned` and `alias` are those of `Link`.
    """

    target: str
    sources: tuple[Source, ...]
    rule: RowRule
    stack: tuple[str | int, ...] = ()
    row_rank: int = -1
    offset: float = 0.0
    pinned: bool = False
    alias: bool = False

    @property
    def width_dims(self) -> int:
        """The number of trailing source dims that make up a row."""
        return self.row_rank if self.row_rank >= 0 else len(self.sources[0].shape) - 1


def name_top(entries: tuple[Entry, ...], shape: ModelShape) -> tuple[Entry, ...]:
    """Returns top-level entries with `{text}` and `{head}` in source names filled in."""
    text = shape.layer_prefix.removesuffix("layers.")
    return tuple(
        replace(
            entry,
            sources=tuple(
                replace(source, name=source.name.format(text=text, head=shape.head_name))
                for source in entry.sources
            ),
        )
        for entry in entries
    )


def uniform_entries(family: Family, shape: ModelShape, layer: int) -> tuple[Entry, ...]:
    """Returns `layer` for every layer, and `top` with the head of an untied model for `TOP`."""
    if layer >= 0:
        return family.layer
    return name_top(family.top if shape.tied else (*family.top, family.head), shape)


ExtraStates = tuple[tuple[str, int], ...]
"""(module, number of its `_extra_state` objects): more than one for a stack of experts."""


def uniform_states(family: Family, shape: ModelShape, layer: int) -> ExtraStates:
    """Returns the extra states of any layer, or of the top level."""
    modules = family.layer_extra_states if layer >= 0 else family.extra_states
    return tuple((module, 1) for module in modules)


def settle_tie(shape: ModelShape, names: Collection[str]) -> ModelShape:
    """Returns `shape`, tied exactly when there is no head tensor if its config left that open."""
    if not (shape.tie_disputed and names):
        return shape
    return replace(shape, tied=shape.head_name not in names)


def keep_shape(shape: ModelShape, names: Collection[str]) -> ModelShape:
    """Returns `shape`: the config alone says how the tensors are named."""
    return shape


@dataclass(frozen=True)
class Family:
    """A table of entries. `layer` names are relative to one layer, the others are whole names.

    `architectures` of config.json come before its `model_type`, because drafters and remote-code
    models use another family's type. In names of `top` and `head`, {text} and {head} stand for the
    prefix of the text model and `ModelShape.head_name`.
    `extra_states` and `layer_extra_states` list the modules whose `_extra_state` object Megatron's
    Transformer Engine or local layer spec asks for when it loads.
    `entries` and `states` choose from the tables by layer (`TOP` for none) for models whose layers
    differ. `pass_through` are prefixes of Hugging Face names that Megatron's model does not own
    (vision, MTP); those tensors are kept beside the checkpoint and restored by an export.
    `stackable` says whether all layers have the same tensors, as the homogeneous layout needs.
    `adapt` settles from the names found what a config does not say (fused or separate experts);
    no names at all leave the family's default.
    """

    name: str
    model_types: tuple[str, ...]
    top: tuple[Entry, ...]
    head: Entry
    layer: tuple[Entry, ...]
    extra_states: tuple[str, ...]
    layer_extra_states: tuple[str, ...]
    read_shape: Callable[[Mapping[str, Any]], ModelShape]
    entries: Callable[[Family, ModelShape, int], tuple[Entry, ...]] = uniform_entries
    states: Callable[[Family, ModelShape, int], ExtraStates] = uniform_states
    pass_through: tuple[str, ...] = ()
    stackable: bool = True
    architectures: tuple[str, ...] = ()
    adapt: Callable[[ModelShape, Collection[str]], ModelShape] = keep_shape
