"""Looks at and compares model directories: `inspect` and `verify`.

Specified by tests/convert/test_check.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megatron_bp.convert.bdlm_settings import read_manifest
from megatron_bp.convert.gemma_to_diffusion import view_as_diffusion
from megatron_bp.convert.hf_assets import read_config, with_config_keys
from megatron_bp.convert.hf_model import open_hf_model
from megatron_bp.convert.link import Link, TensorInfo
from megatron_bp.convert.mask_row import TensorSource
from megatron_bp.convert.megatron_args import ASSETS_NAME
from megatron_bp.convert.megatron_model import (
    LATEST,
    MegatronModel,
    find_iteration,
    is_model_key,
    iter_link_rows,
    open_megatron_model,
    with_vocab_rows,
)
from megatron_bp.convert.pass_through import NoTensors, open_kept, restore_original
from megatron_bp.convert.progress import Progress
from megatron_bp.convert.rules import clip
from megatron_bp.convert.safetensors_io import SafetensorsDir
from megatron_bp.convert.torch_dist_io import TorchDistReader

_SHOWN_ARGS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "qk_layernorm",
    "untie_embeddings_and_output_weights",
    "bdlm_objective",
    "block_size",
    "mask_token_id",
)


def inspect_directory(directory: Path) -> dict[str, Any]:
    """Returns family, sizes, a key summary and the mask id of a Hugging Face or Megatron directory.

    Raises: ValueError when it is neither.
    """
    if (directory / "config.json").is_file() and list(directory.glob("*.safetensors")):
        model = open_hf_model(directory)
        config = read_config(directory)
        return {
            "kind": "hf",
            "family": model.family.name,
            **asdict(model.shape),
            "passed_through": len(model.passed),
            "mask_token_id": config.get("mask_token_id", -1),
            "block_size": config.get("block_size", 0),
            **_summary(model.source.tensors),
        }
    iteration = find_iteration(directory, LATEST)
    reader = TorchDistReader(iteration)
    state = reader.common_state()
    args = vars(state.get("args", argparse.Namespace()))
    model_tensors = {key: info for key, info in reader.tensors.items() if is_model_key(key)}
    return {
        "kind": "megatron",
        "iteration": iteration.name,
        "family": read_manifest(directory).get("family", "unknown"),
        **{name: args[name] for name in _SHOWN_ARGS if name in args},
        **_summary(model_tensors),
        "other_entries": len(reader.tensors) - len(model_tensors) + len(reader.objects),
    }


def _summary(tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    return {
        "num_tensors": len(tensors),
        "num_bytes": sum(info.num_bytes for info in tensors.values()),
        "dtypes": sorted({str(info.dtype).removeprefix("torch.") for info in tensors.values()}),
        "first_keys": list(tensors)[:4],
    }


def verify(hf: Path, megatron: Path, progress: Progress) -> dict[str, Any]:
    """Compares every tensor bit by bit; returns counts and the names that differ.

    The mask row that a conversion wrote is left out, and counted as `exempt_rows`, when `hf` is the
    model before it got its mask row. A Gemma 4 model is compared as the DiffusionGemma one that was
    made of it, the new tensors included.
    """
    source = open_hf_model(hf)
    tensors: TensorSource = source.source
    manifest = read_manifest(megatron)
    mask_id = int(manifest.get("mask_token_id", -1))
    exempt = mask_id if "mask_token_id" not in read_config(hf) else -1
    config = read_config(hf)
    if exempt >= 0:
        rows = max(source.shape.vocab_size, exempt + 1)
        config = with_config_keys(config, {"vocab_size": rows})
    tables = source.tables() if exempt >= 0 else ()
    if source.family.name == manifest.get("converted_from", ""):
        source, tensors, config = view_as_diffusion(source, config, manifest["block_size"])
    model = open_megatron_model(find_iteration(megatron, LATEST), config, tensors.tensors)
    model = with_vocab_rows(model, source.shape.vocab_size)
    progress.start("comparing", sum(info.num_bytes for info in tensors.tensors.values()))
    differ = [
        name
        for link in model.links
        for name in _differing(model, link, tensors, (exempt, tables), progress)
    ]
    kept = open_kept(megatron / ASSETS_NAME)
    differ += [name for name in source.passed if not _same(tensors, kept, name, progress)]
    return {
        "tensors": sum(len(link.sources) for link in model.links) + len(source.passed),
        "differ": sorted(set(differ)),
        "exempt_rows": int(exempt >= 0),
    }


def _differing(
    model: MegatronModel,
    link: Link,
    source: TensorSource,
    exempt: tuple[int, tuple[str, ...]],
    progress: Progress,
) -> list[str]:
    stored = model.stored(link)
    row, tables = exempt
    if stored.info.dtype != source.tensors[link.sources[0]].dtype and not link.offset:
        return list(link.sources)
    differ = []
    for lo, rows in iter_link_rows(model.reader, link, stored):
        for piece in clip(link.pieces, lo, lo + rows.shape[0]):
            name = link.sources[piece.source]
            here = rows[piece.target_lo - lo :][: piece.rows].contiguous()
            other = torch.empty(here.shape, dtype=source.tensors[name].dtype)
            source.read_rows_into(name, piece.source_lo, other)
            if link.offset:
                here = restore_original(here, other, link.offset)
            if name in tables and 0 <= row - piece.source_lo < piece.rows:
                other[row - piece.source_lo] = here[row - piece.source_lo]
            if not torch.equal(here.view(torch.uint8), other.view(torch.uint8)):
                differ.append(name)
            progress.advance(other.nbytes)
    return differ


def _same(
    source: TensorSource, kept: SafetensorsDir | NoTensors, name: str, progress: Progress
) -> bool:
    if isinstance(kept, NoTensors) or kept.tensors.get(name) != source.tensors[name]:
        return False
    same = True
    for lo, rows in source.iter_rows(name):
        other = torch.empty_like(rows)
        kept.read_rows_into(name, lo, other)
        same = same and torch.equal(
            rows.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8)
        )
        progress.advance(rows.nbytes)
    return same
