"""Looks at and compares model directories: `inspect` and `verify`.

Specified by tests/convert/test_check.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_bp.convert.bdlm_settings import read_manifest
from megatron_bp.convert.hf_assets import read_config
from megatron_bp.convert.hf_model import EMBEDDING, HEAD, open_hf_model
from megatron_bp.convert.megatron_model import (
    LATEST,
    MegatronModel,
    find_iteration,
    is_model_key,
    open_megatron_model,
    with_vocab_rows,
)
from megatron_bp.convert.plan import Link, TensorInfo
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
            **vars(model.shape),
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
    model before it got its mask row.
    """
    source = open_hf_model(hf)
    manifest = read_manifest(megatron)
    mask_id = int(manifest.get("mask_token_id", -1))
    exempt = mask_id if "mask_token_id" not in read_config(hf) else -1
    config = dict(read_config(hf))
    if exempt >= 0:
        config["vocab_size"] = max(int(config["vocab_size"]), exempt + 1)
    model = open_megatron_model(find_iteration(megatron, LATEST), config)
    model = with_vocab_rows(model, source.shape.vocab_size)
    progress.start("comparing", sum(info.num_bytes for info in source.source.tensors.values()))
    differ = [
        name
        for link in model.links
        for name in _differing(model, link, source.source, exempt, progress)
    ]
    return {
        "tensors": sum(len(link.sources) for link in model.links),
        "differ": sorted(set(differ)),
        "exempt_rows": int(exempt >= 0),
    }


def _differing(
    model: MegatronModel, link: Link, source: SafetensorsDir, exempt: int, progress: Progress
) -> list[str]:
    if model.info(link).dtype != source.tensors[link.sources[0]].dtype:
        return list(link.sources)
    differ = []
    for lo, rows in model.iter_rows(link):
        for piece in clip(link.pieces, lo, lo + rows.shape[0]):
            name = link.sources[piece.source]
            stored = rows[piece.target_lo - lo :][: piece.rows].contiguous()
            other = torch.empty_like(stored)
            source.read_rows_into(name, piece.source_lo, other)
            if name in (EMBEDDING, HEAD) and 0 <= exempt - piece.source_lo < piece.rows:
                other[exempt - piece.source_lo] = stored[exempt - piece.source_lo]
            if not torch.equal(stored.view(torch.uint8), other.view(torch.uint8)):
                differ.append(name)
            progress.advance(other.nbytes)
    return differ
