"""The conversion plan: every Megatron tensor of a model with the Hugging Face rows that make it up.

Owns key names, layouts and coverage (every tensor on both sides accounted for). Knows no files.
Specified by tests/convert/test_plan.py and the golden key lists in tests/golden/.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch

from megatron_bp.convert.families.base import Entry, Family, ModelShape
from megatron_bp.convert.rules import Pieces, check_bijection, target_rows

TOP = -1
"""The layer number of tensors that belong to no layer."""

PADDED_KEYS = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Megatron pads these tables; rows past the Hugging Face vocabulary carry nothing."""


KEEP_DTYPE = "keep"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def choose_dtype(stored: torch.dtype, name: str) -> torch.dtype:
    """Returns the dtype to write: `stored` for "keep", else the one named in `DTYPES`."""
    if name != KEEP_DTYPE and name not in DTYPES:
        raise ValueError(f"dtype={name!r} must be 'keep' or one of {', '.join(DTYPES)}")
    return stored if name == KEEP_DTYPE else DTYPES[name]


class Layout(StrEnum):
    """How layer keys are written: one key a layer, or one key with a leading layer axis."""

    PER_LAYER = "per_layer"
    HOMOGENEOUS = "homogeneous"


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype of a stored tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """The size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """The size of one row (dim 0) in bytes."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize


@dataclass(frozen=True)
class Link:
    """One Megatron tensor (`name` inside layer `layer`, or `TOP`) and the sources of its rows."""

    name: str
    layer: int
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    source_shapes: tuple[tuple[int, ...], ...]
    pieces: Pieces

    def key(self, layout: Layout) -> str:
        """Returns the key of the tensor in a checkpoint of that layout."""
        if self.layer == TOP:
            return self.name
        return layer_key(self.name, self.layer, layout)


def layer_key(name: str, layer: int, layout: Layout) -> str:
    """Returns the checkpoint key of something inside a layer."""
    middle = f"{layer}." if layout is Layout.PER_LAYER else ""
    return f"decoder.layers.{middle}{name}"


def make_links(family: Family, shape: ModelShape) -> tuple[Link, ...]:
    """Returns all tensors of the model, top level first, then layer by layer.

    A tied model has no head link: Megatron and Hugging Face both leave that key out.
    """
    dims = shape.dims()
    entries = family.top if shape.tied else (*family.top, family.head)
    links = [_make_link(entry, TOP, dims, shape.num_groups) for entry in entries]
    for layer in range(shape.num_layers):
        links += [_make_link(entry, layer, dims, shape.num_groups) for entry in family.layer]
    return tuple(links)


def _make_link(entry: Entry, layer: int, dims: Mapping[str, int], num_groups: int) -> Link:
    prefix = "" if layer == TOP else f"model.layers.{layer}."
    shapes = tuple(tuple(dims[name] for name in source.shape) for source in entry.sources)
    rows = [source_shape[0] for source_shape in shapes]
    pieces = entry.rule(rows, num_groups)
    check_bijection(pieces, rows)
    return Link(
        name=entry.target,
        layer=layer,
        shape=(target_rows(pieces), *shapes[0][1:]),
        sources=tuple(prefix + source.name for source in entry.sources),
        source_shapes=shapes,
        pieces=pieces,
    )


def hf_shapes(links: Iterable[Link]) -> dict[str, tuple[int, ...]]:
    """Returns the expected shape of every Hugging Face tensor, in the order of the links."""
    return {
        name: shape
        for link in links
        for name, shape in zip(link.sources, link.source_shapes, strict=True)
    }


def megatron_shapes(
    links: Iterable[Link], layout: Layout, num_layers: int
) -> dict[str, tuple[int, ...]]:
    """Returns the expected shape of every Megatron key in that layout."""
    shapes = {}
    for link in links:
        stacked = layout is Layout.HOMOGENEOUS and link.layer != TOP
        shapes[link.key(layout)] = (num_layers, *link.shape) if stacked else link.shape
    return shapes


def extra_state_keys(family: Family, num_layers: int, layout: Layout) -> tuple[str, ...]:
    """Returns the keys of the (empty) `_extra_state` objects that Megatron asks for."""
    keys = [f"{module}._extra_state/shard_0_1" for module in family.extra_states]
    for layer in range(num_layers):
        shard = "0_1" if layout is Layout.PER_LAYER else f"{layer}_{num_layers}"
        keys += [
            f"{layer_key(module, layer, layout)}._extra_state/shard_{shard}"
            for module in family.layer_extra_states
        ]
    return tuple(keys)


def check_coverage(
    where: str,
    expected: Mapping[str, tuple[int, ...]],
    found: Mapping[str, TensorInfo],
    may_be_padded: Iterable[str] = (),
) -> None:
    """Passes only when `found` has exactly the expected names and shapes.

    Names in `may_be_padded` may have more rows than expected.
    Raises: ValueError naming the first missing, left-over and misshapen tensors, with counts.
    """
    padded = frozenset(may_be_padded)
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected]
    misshapen = [
        f"{name} has {list(found[name].shape)}, config says {list(shape)}"
        for name, shape in expected.items()
        if name in found and not _fits(found[name].shape, shape, name in padded)
    ]
    parts = [
        f"{len(names)} {what}: {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"
        for what, names in (
            ("missing", missing),
            ("not accounted for", extra),
            ("of another shape", misshapen),
        )
        if names
    ]
    if parts:
        raise ValueError(
            f"{where} does not have the tensors that its config describes "
            f"({len(expected)} expected, {len(found)} found):\n  " + "\n  ".join(parts)
        )


def _fits(found: tuple[int, ...], expected: tuple[int, ...], padded: bool) -> bool:
    if padded:
        return len(found) == len(expected) and found[0] >= expected[0] and found[1:] == expected[1:]
    return found == expected
