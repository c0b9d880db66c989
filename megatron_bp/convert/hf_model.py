"""A Hugging Face directory of a known family, opened only if every tensor is accounted for.

Specified by tests/convert/test_round_trip.py and test_pass_through.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_bp.convert.families import read_model
from megatron_bp.convert.families.base import Family, ModelShape
from megatron_bp.convert.hf_assets import read_config
from megatron_bp.convert.link import Link, TensorInfo
from megatron_bp.convert.plan import (
    EMBEDDING_KEY,
    OUTPUT_KEY,
    check_coverage,
    hf_shapes,
    make_links,
    source_of,
)
from megatron_bp.convert.safetensors_io import SafetensorsDir


@dataclass(frozen=True)
class HfModel:
    """A Hugging Face directory whose every tensor is accounted for.

    `passed` are the tensors to keep beside the checkpoint: those that Megatron's model does not own
    and the originals of those that get an offset or keep a dtype of their own.
    """

    family: Family
    shape: ModelShape
    links: tuple[Link, ...]
    source: SafetensorsDir
    passed: Mapping[str, TensorInfo]

    def tables(self) -> tuple[str, ...]:
        """Returns the names of the tensors with one row a token: embedding, and an untied head."""
        names = (source_of(self.links, key) for key in (EMBEDDING_KEY, OUTPUT_KEY))
        return tuple(name for name in names if name)


def open_hf_model(directory: Path) -> HfModel:
    """Returns the model after checking that its tensors are exactly those its config describes.

    A tied model may carry its head as well, if it equals the embedding.
    Raises: ValueError naming what is missing, left over or of another shape.
    """
    family, shape = read_model(read_config(directory))
    source = SafetensorsDir(directory)
    shape = family.adapt(shape, source.tensors)
    links = make_links(family, shape)
    embedding = source_of(links, EMBEDDING_KEY)
    passed = {
        name: info
        for name, info in source.tensors.items()
        if family.pass_through and name.startswith(family.pass_through)
    }
    found = {name: info for name, info in source.tensors.items() if name not in passed}
    if shape.tied and embedding and shape.head_name in found:
        _check_tied_head(source, embedding, shape.head_name)
        del found[shape.head_name]
    check_coverage(str(directory), hf_shapes(links), found)
    for link in links:
        dtypes = {found[name].dtype for name in link.sources}
        if len(dtypes) > 1 or not all(dtype.is_floating_point for dtype in dtypes):
            raise ValueError(f"{', '.join(link.sources)} have dtypes {dtypes}; must be one float")
    originals = {
        name: found[name] for link in links if link.needs_original for name in link.sources
    }
    return HfModel(family, shape, links, source, passed | originals)


def _check_tied_head(source: SafetensorsDir, embedding: str, head: str) -> None:
    same = source.tensors[embedding] == source.tensors[head]
    if same:
        for lo, rows in source.iter_rows(embedding):
            other = torch.empty_like(rows)
            source.read_rows_into(head, lo, other)
            same = same and torch.equal(rows.view(torch.uint8), other.view(torch.uint8))
    if not same:
        raise ValueError(
            f"config.json says tie_word_embeddings=true, but {head} differs from {embedding}; "
            f"set tie_word_embeddings to false, or remove {head}"
        )
