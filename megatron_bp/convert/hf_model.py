"""A Hugging Face directory of a known family, opened only if every tensor is accounted for.

Specified by tests/convert/test_hf_model.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_bp.convert.families import read_model
from megatron_bp.convert.families.base import Family, ModelShape
from megatron_bp.convert.hf_assets import read_config
from megatron_bp.convert.plan import Link, check_coverage, hf_shapes, make_links
from megatron_bp.convert.safetensors_io import SafetensorsDir

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class HfModel:
    """A Hugging Face directory whose every tensor is accounted for."""

    family: Family
    shape: ModelShape
    links: tuple[Link, ...]
    source: SafetensorsDir


def open_hf_model(directory: Path) -> HfModel:
    """Returns the model after checking that its tensors are exactly those its config describes.

    A tied model may carry its head as well, if it equals the embedding.
    Raises: ValueError naming what is missing, left over or of another shape.
    """
    family, shape = read_model(read_config(directory))
    source = SafetensorsDir(directory)
    links = make_links(family, shape)
    found = dict(source.tensors)
    if shape.tied and HEAD in found:
        _check_tied_head(source)
        del found[HEAD]
    check_coverage(str(directory), hf_shapes(links), found)
    for link in links:
        dtypes = {found[name].dtype for name in link.sources}
        if len(dtypes) > 1 or not all(dtype.is_floating_point for dtype in dtypes):
            raise ValueError(f"{', '.join(link.sources)} have dtypes {dtypes}; must be one float")
    return HfModel(family, shape, links, source)


def _check_tied_head(source: SafetensorsDir) -> None:
    same = source.tensors[EMBEDDING] == source.tensors[HEAD]
    if same:
        for lo, rows in source.iter_rows(EMBEDDING):
            head = torch.empty_like(rows)
            source.read_rows_into(HEAD, lo, head)
            same = same and torch.equal(rows.view(torch.uint8), head.view(torch.uint8))
    if not same:
        raise ValueError(
            f"config.json says tie_word_embeddings=true, but {HEAD} differs from {EMBEDDING}; "
            f"set tie_word_embeddings to false, or remove {HEAD}"
        )
