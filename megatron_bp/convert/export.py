"""Megatron to Hugging Face: from converted checkpoints and from real training checkpoints.

Specified by tests/convert/test_export.py and test_megatron_load.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_bp.convert.bdlm_settings import hash_files, read_manifest, write_manifest
from megatron_bp.convert.hf_assets import copy_assets, dtype_changes, patch_json, read_config
from megatron_bp.convert.hf_model import EMBEDDING
from megatron_bp.convert.megatron_args import ASSETS_NAME
from megatron_bp.convert.megatron_model import (
    MegatronModel,
    find_iteration,
    open_megatron_model,
)
from megatron_bp.convert.plan import Link, TensorInfo, choose_dtype
from megatron_bp.convert.progress import Progress
from megatron_bp.convert.rules import clip
from megatron_bp.convert.safetensors_io import SafetensorsWriter
from megatron_bp.convert.staging import staged


@dataclass(frozen=True)
class ExportRequest:
    """What to read and write.

    `assets` is a Hugging Face directory without weights (config, tokenizer); `iteration` -1 is the
    latest; `dtype` is "keep" or a name in `DTYPES`; `block_size` 0 and `mask_token_id` -1 take what
    checkpoint and assets say.
    """

    source: Path
    target: Path
    assets: Path
    iteration: int
    dtype: str
    max_shard_bytes: int
    block_size: int
    mask_token_id: int
    overwrite: bool


def mcore_to_hf(request: ExportRequest, progress: Progress) -> dict[str, Any]:
    """Writes a complete Hugging Face directory; returns its manifest."""
    directory = find_iteration(request.source, request.iteration)
    config = read_config(request.assets)
    model = open_megatron_model(directory, config)
    state = model.reader.common_state()
    settings = _bdlm_keys(request, config, vars(state.get("args", argparse.Namespace())))
    outputs = _output_tensors(model, request.dtype)
    need = sum(info.num_bytes for info in outputs.values())
    with staged(request.target, overwrite=request.overwrite, need_bytes=need) as partial:
        progress.start("writing safetensors", need)
        with SafetensorsWriter(partial, outputs, request.max_shard_bytes) as writer:
            for link in model.links:
                _write_link(model, link, outputs, writer, progress)
        left = copy_assets(request.assets, partial)
        changes = dtype_changes(config, outputs[EMBEDDING].dtype) | settings
        patch_json(partial / "config.json", changes)
        generation = partial / "generation_config.json"
        if settings and generation.is_file():
            patch_json(generation, settings)
        hashes = hash_files([directory / ".metadata", directory / "metadata.json"], progress)
        return write_manifest(
            partial,
            {
                **_inherited(read_manifest(request.assets.parent)),
                "family": model.family.name,
                **settings,
                "exported_iteration": int(state.get("iteration", 0)),
                "exported_from": directory.name,
                "source_sha256": hashes,
                "ignored_entries": model.ignored,
                "not_copied": left,
            },
        )


def _inherited(manifest: Mapping[str, Any]) -> dict[str, Any]:
    names = ("objective", "alignment", "clean_rule", "mask_token")
    return {name: manifest[name] for name in names if name in manifest}


def _output_tensors(model: MegatronModel, dtype: str) -> dict[str, TensorInfo]:
    outputs = {}
    for link in model.links:
        kept = choose_dtype(model.info(link).dtype, dtype)
        for name, shape in zip(link.sources, link.source_shapes, strict=True):
            outputs[name] = TensorInfo(shape, kept)
    return outputs


def _write_link(
    model: MegatronModel,
    link: Link,
    outputs: Mapping[str, TensorInfo],
    writer: SafetensorsWriter,
    progress: Progress,
) -> None:
    for lo, rows in model.iter_rows(link):
        for piece in clip(link.pieces, lo, lo + rows.shape[0]):
            name = link.sources[piece.source]
            part = rows[piece.target_lo - lo :][: piece.rows]
            if part.dtype != outputs[name].dtype:
                part = part.to(outputs[name].dtype)
            writer.write_rows(name, piece.source_lo, part)
            progress.advance(part.nbytes)


def _bdlm_keys(
    request: ExportRequest, config: Mapping[str, Any], args: Mapping[str, Any]
) -> dict[str, int]:
    """Returns the config keys of a block-diffusion model ({} for an autoregressive one).

    Raises: ValueError when the checkpoint was trained with other values than the assets name.
    """
    trained = args.get("bdlm_objective", "none") != "none"
    keys = {}
    for name, wish, unset in (
        ("block_size", request.block_size, 0),
        ("mask_token_id", request.mask_token_id, -1),
    ):
        said = config.get(name, unset)
        used = args.get(name, unset) if trained else unset
        if wish != unset:
            keys[name] = wish
        elif used != unset and said != unset and used != said:
            raise ValueError(
                f"the checkpoint was trained with {name}={used}, but the assets' config.json says "
                f"{said}; give --{name.replace('_', '-')} {used} or {said}"
            )
        elif used != unset or said != unset:
            keys[name] = used if used != unset else said
    return keys


def default_assets(source: Path) -> Path:
    """Returns the assets directory beside a converted checkpoint.

    Raises: ValueError when there is none, as in a training run's save directory.
    """
    for folder in (source / ASSETS_NAME, source.parent / ASSETS_NAME):
        if (folder / "config.json").is_file():
            return folder
    raise ValueError(
        f"{source} has no {ASSETS_NAME}/config.json beside it; give --hf-assets DIR, for example "
        f"the {ASSETS_NAME} folder of the converted checkpoint that training started from"
    )
