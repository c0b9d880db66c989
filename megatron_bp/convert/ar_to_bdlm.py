"""Hugging Face to Megatron: a plain conversion, or one that makes a block-diffusion model of it.

Reads headers and checks everything first, then streams. Writes DIR/release (the checkpoint),
DIR/latest_checkpointed_iteration.txt, DIR/megatron_flags.{yaml,sh}, DIR/hf (config and tokenizer)
and DIR/bdlm_conversion.json. Specified by tests/convert/test_ar_to_bdlm.py and
test_megatron_load.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron_bp.convert.bdlm_settings import (
    ALIGNMENT_OF_OBJECTIVE,
    AUTOREGRESSIVE,
    BdlmSettings,
    hash_files,
    write_manifest,
)
from megatron_bp.convert.families.base import ModelShape
from megatron_bp.convert.hf_assets import (
    asset_files,
    copy_assets,
    dtype_changes,
    patch_json,
    read_config,
)
from megatron_bp.convert.hf_model import EMBEDDING, HEAD, HfModel, open_hf_model
from megatron_bp.convert.link import Link, TensorInfo, row_box, row_ranges
from megatron_bp.convert.mask_row import (
    MaskRowSource,
    NewRow,
    TensorSource,
    mean_row,
    stored_row,
)
from megatron_bp.convert.megatron_args import (
    ASSETS_NAME,
    RELEASE_NAME,
    TRACKER_NAME,
    common_state,
    megatron_flags,
    write_flags,
)
from megatron_bp.convert.plan import (
    Layout,
    choose_dtype,
    extra_state_keys,
    link_key,
    make_links,
)
from megatron_bp.convert.progress import Progress
from megatron_bp.convert.rules import clip
from megatron_bp.convert.staging import check_output, staged
from megatron_bp.convert.tokenizer_files import (
    MaskRow,
    choose_mask_row,
    edit_tokenizer,
    read_vocabulary,
)
from megatron_bp.convert.torch_dist_io import COMMON_STATE, Chunk, write_torch_dist

CHUNK_BYTES = 128 * 2**20


@dataclass(frozen=True)
class ImportRequest:
    """What to read and write. `dtype` is "keep" or a name in `DTYPES`."""

    source: Path
    target: Path
    layout: Layout
    dtype: str
    overwrite: bool


@dataclass(frozen=True)
class MaskWish:
    """What the user said about the mask token; "" and -1 mean not given.

    `init` is "mean" (of the other rows) or "keep" (the row that the table has).
    """

    token: str
    token_id: int
    resize: bool
    init: str


def hf_to_mcore(request: ImportRequest, progress: Progress) -> dict[str, Any]:
    """Converts an autoregressive model unchanged; returns the manifest."""
    model = open_hf_model(request.source)
    fields = {"family": model.family.name, **_settings_fields(AUTOREGRESSIVE)}
    return _write(request, model, model.source, AUTOREGRESSIVE, fields, progress)


def ar_to_bdlm(
    request: ImportRequest, bdlm: BdlmSettings, wish: MaskWish, progress: Progress
) -> dict[str, Any]:
    """Converts an autoregressive model to a block-diffusion one; returns the manifest.

    `bdlm`'s mask token is ignored in favour of the one chosen from `wish`.
    """
    if bdlm.objective == "none":
        raise ValueError("objective='none' needs no mask token; use hf2mcore, or 'standard'")
    model = open_hf_model(request.source)
    shape = model.shape
    mask = choose_mask_row(
        read_vocabulary(request.source),
        shape.vocab_size,
        token=wish.token,
        token_id=wish.token_id,
        resize=wish.resize,
    )
    bdlm = replace(bdlm, mask_token=mask.token, mask_token_id=mask.token_id)
    check_output(request.target, overwrite=request.overwrite, need_bytes=0)
    rows = _make_rows(model, mask, wish.init)
    source = MaskRowSource(
        model.source, mask.token_id, {name: row.values for name, row in rows.items()}
    )
    shape = replace(shape, vocab_size=max(shape.vocab_size, mask.token_id + 1))
    fields = {
        "family": model.family.name,
        **_settings_fields(bdlm),
        "mask_row": {
            "init": wish.init,
            "row_added": mask.is_new_row,
            "token_added": mask.is_new_token,
            "tables": {
                name: {"norm": row.norm, "mean_row_norm": row.mean_row_norm}
                for name, row in rows.items()
            },
        },
    }
    model = replace(model, shape=shape, links=make_links(model.family, shape))
    return _write(request, model, source, bdlm, fields, progress, mask)


def _make_rows(model: HfModel, mask: MaskRow, init: str) -> dict[str, NewRow]:
    tables = (EMBEDDING,) if model.shape.tied else (EMBEDDING, HEAD)
    if init == "mean":
        return {name: mean_row(model.source, name, mask.token_id) for name in tables}
    if init != "keep":
        raise ValueError(f"mask row init={init!r} must be 'mean' or 'keep'")
    if mask.is_new_row:
        raise ValueError("--mask-row-init keep needs an existing row; use mean with --resize")
    return {name: stored_row(model.source, name, mask.token_id) for name in tables}


def _settings_fields(bdlm: BdlmSettings) -> dict[str, Any]:
    return {
        "objective": bdlm.objective,
        "alignment": ALIGNMENT_OF_OBJECTIVE[bdlm.objective],
        "block_size": bdlm.block_size,
        "clean_rule": bdlm.clean_rule,
        "mask_token": bdlm.mask_token,
        "mask_token_id": bdlm.mask_token_id,
    }


def _write(
    request: ImportRequest,
    model: HfModel,
    source: TensorSource,
    bdlm: BdlmSettings,
    fields: Mapping[str, Any],
    progress: Progress,
    *masks: MaskRow,
) -> dict[str, Any]:
    shape = model.shape
    chunks, owner = _plan_chunks(model.links, source, request.layout, request.dtype, shape)
    need = sum(info.num_bytes for info in {c.key: c.info for c in chunks}.values())
    with staged(request.target, overwrite=request.overwrite, need_bytes=need) as partial:
        hashes = hash_files([*model.source.files, *asset_files(request.source)], progress)
        dtype = owner[chunks[0]].dtype
        progress.start("writing torch_dist", need)

        def make_chunk(chunk: Chunk) -> torch.Tensor:
            tensor = _fill(owner[chunk].link, source, owner[chunk].rows_lo, chunk)
            progress.advance(tensor.nbytes)
            return tensor

        objects = {key: None for key in extra_state_keys(model.family, shape, request.layout)}
        state = common_state(shape, bdlm, request.layout, dtype)
        write_torch_dist(
            partial / RELEASE_NAME, chunks, {**objects, COMMON_STATE: state}, make_chunk
        )
        (partial / TRACKER_NAME).write_text(RELEASE_NAME)
        write_flags(partial, megatron_flags(shape, bdlm, dtype))
        left = copy_assets(request.source, partial / ASSETS_NAME)
        _edit_assets(partial / ASSETS_NAME, shape, bdlm, dtype, masks)
        return write_manifest(
            partial,
            {**fields, "layout": str(request.layout), "source_sha256": hashes, "not_copied": left},
        )


@dataclass(frozen=True)
class _Owner:
    link: Link
    rows_lo: int
    dtype: torch.dtype


def _plan_chunks(
    links: Sequence[Link], source: TensorSource, layout: Layout, dtype: str, shape: ModelShape
) -> tuple[list[Chunk], dict[Chunk, _Owner]]:
    owner: dict[Chunk, _Owner] = {}
    for link in links:
        stacked = layout is Layout.HOMOGENEOUS and link.layer >= 0
        kept = source.tensors[link.sources[0]].dtype
        kept = kept if link.pinned else choose_dtype(kept, dtype)
        lead = (shape.num_layers,) if stacked else ()
        info = TensorInfo((*lead, *link.shape), kept)
        for lo, rows in row_ranges(link, kept.itemsize, CHUNK_BYTES):
            box = row_box(link, lo, rows)
            offset = ((link.layer,) if stacked else ()) + box[0]
            size = ((1,) if stacked else ()) + box[1]
            owner[Chunk(link_key(link, layout), info, offset, size)] = _Owner(link, lo, kept)
    return list(owner), owner


def _fill(link: Link, source: TensorSource, rows_lo: int, chunk: Chunk) -> torch.Tensor:
    out = torch.empty(chunk.size, dtype=chunk.info.dtype)
    rows = out.view(-1, *link.row_shape)
    for piece in clip(link.pieces, rows_lo, rows_lo + rows.shape[0]):
        name = link.sources[piece.source]
        part = rows[piece.target_lo - rows_lo :][: piece.rows]
        if source.tensors[name].dtype == out.dtype and not link.offset:
            source.read_rows_into(name, piece.source_lo, part)
        else:
            stored = torch.empty(part.shape, dtype=source.tensors[name].dtype)
            source.read_rows_into(name, piece.source_lo, stored)
            part.copy_(stored.double() + link.offset if link.offset else stored)
    return out


def _edit_assets(
    directory: Path,
    shape: ModelShape,
    bdlm: BdlmSettings,
    dtype: torch.dtype,
    masks: Sequence[MaskRow],
) -> None:
    config = read_config(directory)
    changes: dict[str, Any] = dict(dtype_changes(config, dtype))
    for mask in masks:
        changes |= {
            "vocab_size": shape.vocab_size,
            "mask_token_id": mask.token_id,
            "block_size": bdlm.block_size,
        }
        edit_tokenizer(directory, mask)
        generation = directory / "generation_config.json"
        if generation.is_file():
            patch_json(generation, {"mask_token_id": mask.token_id, "block_size": bdlm.block_size})
    patch_json(directory / "config.json", changes)
