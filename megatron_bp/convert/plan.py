"""The conversion plan: every Megatron tensor of a model with the Hugging Face rows that make it up.

Owns key names, layouts and coverage (every tensor on both sides accounted for). Knows no files.
Specified by tests/convert/test_plan.py and the golden key lists in tests/golden/.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from enum import StrEnum

import torch

from megatron_bp.convert.families.base import Entry, Family, ModelShape
from megatron_bp.convert.link import TOP, Link, TensorInfo, check_links
from megatron_bp.convert.rules import target_rows

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


def link_key(link: Link, layout: Layout) -> str:
    """Returns the key of the link's tensor in a checkpoint of that layout."""
    return link.name if link.layer == TOP else layer_key(link.name, link.layer, layout)


def layer_key(name: str, layer: int, layout: Layout) -> str:
    """Returns the checkpoint key of something inside a layer."""
    middle = f"{layer}." if layout is Layout.PER_LAYER else ""
    return f"decoder.layers.{middle}{name}"


def make_links(family: Family, shape: ModelShape) -> tuple[Link, ...]:
    """Returns all tensors of the model, top level first, then layer by layer.

    A tied model has no head link: Megatron and Hugging Face both leave that key out.
    """
    links = [
        _make_link(entry, layer, shape)
        for layer in (TOP, *range(shape.num_layers))
        for entry in family.entries(family, shape, layer)
    ]
    check_links(links)
    return tuple(links)


def _make_link(entry: Entry, layer: int, shape: ModelShape) -> Link:
    dims = shape.dims()
    prefix = "" if layer == TOP else f"{shape.layer_prefix}{layer}."
    shapes = tuple(
        tuple(size if isinstance(size, int) else dims[size] for size in source.shape)
        for source in entry.sources
    )
    row_shape = shapes[0][len(shapes[0]) - entry.width_dims :] if entry.width_dims else ()
    rows = [math.prod(s[: len(s) - entry.width_dims]) for s in shapes]
    pieces = entry.rule(rows, shape.num_groups)
    num_rows = target_rows(pieces)
    lead = tuple(size if isinstance(size, int) else dims[size] for size in entry.stack)
    assert num_rows % math.prod(lead) == 0, f"{entry.target}: {num_rows} rows do not fill {lead}"
    return Link(
        name=entry.target,
        layer=layer,
        shape=(*lead, num_rows // math.prod(lead), *row_shape),
        sources=tuple(
            source.name[1:] if source.name.startswith("/") else prefix + source.name
            for source in entry.sources
        ),
        source_shapes=shapes,
        pieces=pieces,
        row_dims=len(lead) + 1,
        offset=entry.offset,
        pinned=entry.pinned,
        alias=entry.alias,
    )


EMBEDDING_KEY, OUTPUT_KEY = PADDED_KEYS


def source_of(links: Iterable[Link], target: str) -> str:
    """Returns the Hugging Face name behind a top-level tensor, "" when the model has none."""
    for link in links:
        if link.layer == TOP and link.name == target:
            return link.sources[0]
    return ""


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
        shapes[link_key(link, layout)] = (num_layers, *link.shape) if stacked else link.shape
    return shapes


def extra_state_keys(family: Family, shape: ModelShape, layout: Layout) -> tuple[str, ...]:
    """Returns the keys of the (empty) `_extra_state` objects that Megatron asks for.

    A stack of experts has one an expert, numbered within its layer.
    """
    keys = []
    for layer in (TOP, *range(shape.num_layers)):
        stacked = layout is Layout.HOMOGENEOUS and layer != TOP
        for module, count in family.states(family, shape, layer):
            name = module if layer == TOP else layer_key(module, layer, layout)
            for number in range(count):
                shard = f"{number}_{count}"
                if stacked:
                    shard = f"{layer}_{shape.num_layers}"
                if stacked and count > 1:
                    shard = f"{layer}.{number}_{shape.num_layers}.{count}"
                keys.append(f"{name}._extra_state/shard_{shard}")
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
