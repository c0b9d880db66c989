"""The types of a family table and the config reading that dense families share.

Knows Hugging Face config names (transformers 4 and 5 spellings); knows no tensor files and no
Megatron arguments. Specified by tests/convert/test_families.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_bp.convert.rules import RowRule


@dataclass(frozen=True)
class ModelShape:
    """What a dense decoder-only model needs to be built, in neutral names.

    `rope_scaling_factor` 0.0 means no scaling; otherwise Llama 3.1's rule with that factor.
    `layer_prefix` goes before the layer number in Hugging Face names. `args` and `flags` replace or
    add what megatron_args.py derives from the rest: Namespace fields, and command-line flags
    without dashes (False leaves the flag out).
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
    args: tuple[tuple[str, Any], ...] = ()
    flags: tuple[tuple[str, str | int | float | bool], ...] = ()

    def dims(self) -> dict[str, int]:
        """Returns the sizes that entry tables name."""
        return {
            "hidden": self.hidden_size,
            "ffn": self.ffn_size,
            "query": self.num_heads * self.head_size,
            "key": self.num_groups * self.head_size,
            "head": self.head_size,
            "vocab": self.vocab_size,
        }


@dataclass(frozen=True)
class Source:
    """One Hugging Face tensor and its shape, in numbers or in the names of `ModelShape.dims`."""

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


def uniform_entries(family: Family, shape: ModelShape, layer: int) -> tuple[Entry, ...]:
    """Returns `layer` for every layer, and `top` with the head of an untied model for `TOP`."""
    if layer >= 0:
        return family.layer
    return family.top if shape.tied else (*family.top, family.head)


def uniform_states(family: Family, shape: ModelShape, layer: int) -> tuple[str, ...]:
    """Returns the extra states of any layer, or of the top level."""
    return family.layer_extra_states if layer >= 0 else family.extra_states


@dataclass(frozen=True)
class Family:
    """A table of entries. `layer` names are relative to one layer, the others are whole names.

    `extra_states` and `layer_extra_states` list the modules whose `_extra_state` object Megatron's
    Transformer Engine or local layer spec asks for when it loads.
    `entries` and `states` choose from the tables by layer (`TOP` for none) for models whose layers
    differ. `pass_through` are prefixes of Hugging Face names that Megatron's model does not own
    (vision, MTP); those tensors are kept beside the checkpoint and restored by an export.
    `stackable` says whether all layers have the same tensors, as the homogeneous layout needs.
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
    states: Callable[[Family, ModelShape, int], tuple[str, ...]] = uniform_states
    pass_through: tuple[str, ...] = ()
    stackable: bool = True


def read_dense_shape(
    config: Mapping[str, Any], *, family: str, qk_norm: bool, refuse_bias: tuple[str, ...]
) -> ModelShape:
    """Returns the shape of a Llama-like config.

    Raises: ValueError that lists every missing key and every setting without a Megatron
    counterpart.
    """
    problems: list[str] = []

    def size(name: str) -> int:
        value = config.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            problems.append(f"{name}={value!r} must be a positive integer")
            return 1
        return value

    num_heads = size("num_attention_heads")
    hidden_size = size("hidden_size")
    if config.get("head_dim") is None and hidden_size % num_heads:
        problems.append(f"hidden_size={hidden_size} is not a multiple of {num_heads} heads")
    head_size = config.get("head_dim") or hidden_size // num_heads
    num_groups = config.get("num_key_value_heads") or num_heads
    if num_heads % num_groups:
        problems.append(f"num_key_value_heads={num_groups} does not divide {num_heads} heads")
    rope_base, factor = _read_rope(config, problems)
    problems += _unsupported(config, refuse_bias)
    shape = ModelShape(
        family=family,
        num_layers=size("num_hidden_layers"),
        hidden_size=hidden_size,
        ffn_size=size("intermediate_size"),
        num_heads=num_heads,
        num_groups=num_groups,
        head_size=head_size,
        vocab_size=size("vocab_size"),
        max_positions=size("max_position_embeddings"),
        norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
        rope_base=rope_base,
        rope_scaling_factor=factor,
        qk_norm=qk_norm,
        tied=bool(config.get("tie_word_embeddings", False)),
    )
    if problems:
        raise ValueError("config.json cannot be converted:\n  " + "\n  ".join(problems))
    return shape


_LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _read_rope(config: Mapping[str, Any], problems: list[str]) -> tuple[int, float]:
    scaling = dict(config.get("rope_scaling") or {})
    scaling |= dict(config.get("rope_parameters") or {})
    base = scaling.get("rope_theta", config.get("rope_theta", 10000.0))
    if not isinstance(base, int | float) or base != int(base):
        problems.append(f"rope_theta={base!r} must be a whole number (--rotary-base is an integer)")
        base = 10000
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind in ("default", None):
        return int(base), 0.0
    if kind != "llama3":
        problems.append(
            f"rope_type={kind!r} has no counterpart in Megatron's GPTModel flags; "
            f"'default' and 'llama3' can be converted"
        )
        return int(base), 0.0
    for name, value in _LLAMA3_ROPE.items():
        if scaling.get(name) != value:
            problems.append(
                f"rope scaling {name}={scaling.get(name)!r} differs from {value}, "
                f"which Megatron's --use-rope-scaling has built in"
            )
    return int(base), float(scaling.get("factor", 0.0))


def _unsupported(config: Mapping[str, Any], refuse_bias: tuple[str, ...]) -> list[str]:
    problems = [
        f"{name}=true: projection biases are not supported; only models without them convert"
        for name in refuse_bias
        if config.get(name)
    ]
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        problems.append(f"hidden_act={activation!r} must be 'silu' (--swiglu)")
    partial = (config.get("rope_parameters") or {}).get(
        "partial_rotary_factor", config.get("partial_rotary_factor", 1.0)
    )
    if partial != 1.0:
        problems.append(f"partial_rotary_factor={partial} must be 1.0")
    layer_types = config.get("layer_types") or ()
    uses_window = config.get("use_sliding_window", config.get("model_type") == "mistral")
    if any(kind != "full_attention" for kind in layer_types):
        problems.append("layer_types must all be 'full_attention'")
    elif not layer_types and uses_window and config.get("sliding_window"):
        problems.append(f"sliding_window={config['sliding_window']} must be null (full attention)")
    if config.get("quantization_config"):
        problems.append("quantization_config is set: convert the unquantised weights")
    return problems
