"""Hugging Face to Megatron: a plain conversion, or one that makes a block-diffusion model of it.

Reads headers and checks everything first, then streams. Writes DIR/release (the checkpoint),
DIR/latest_checkpointed_iteration.txt, DIR/megatron_flags.{yaml,sh}, DIR/hf (config and tokenizer)
and DIR/bdlm_conversion.json. Specified by tests/convert/test_ar_to_bdlm.py and
test_megatron_load.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron_bp import __version__
from megatron_bp.convert.bdlm_settings import (
    AUTOREGRESSIVE,
    BdlmSettings,
    exported_settings,
    settings_fields,
    write_manifest,
)
from megatron_bp.convert.bridge_files import write_bridge_files
from megatron_bp.convert.families.base import ModelShape
from megatron_bp.convert.hf_assets import (
    PASS_THROUGH_NAME,
    asset_files,
    copy_assets,
    dtype_changes,
    patch_json,
    read_config,
    with_config_keys,
    write_json,
)
from megatron_bp.convert.hf_model import HfModel, open_hf_model
from megatron_bp.convert.import_work import ImportWork, Scratch, plan_chunks
from megatron_bp.convert.jobs import run_journaled
from megatron_bp.convert.mask_row import MaskRowSource, TensorSource
from megatron_bp.convert.mask_wish import MaskWish, make_rows, usual_wish
from megatron_bp.convert.megatron_args import (
    ASSETS_NAME,
    RELEASE_NAME,
    TRACKER_NAME,
    common_state,
    megatron_flags,
    write_flags,
)
from megatron_bp.convert.pass_through import write_kept
from megatron_bp.convert.plan import Layout, extra_state_keys, make_links
from megatron_bp.convert.progress import Progress
from megatron_bp.convert.safetensors_io import plan_shards
from megatron_bp.convert.staging import check_output, fingerprint, partial_path, staged
from megatron_bp.convert.tokenizer_files import (
    choose_mask_row,
    edit_tokenizer,
    read_vocabulary,
)
from megatron_bp.convert.torch_dist_io import COMMON_STATE
from megatron_bp.convert.torch_dist_writer import finish_checkpoint, plan_files

SHARD_BYTES = 5 * 2**30


@dataclass(frozen=True)
class ImportRequest:
    """What to read and write. `dtype` is "keep" or a name in `DTYPES`.

    `workers` is the number of processes; the output does not depend on it.
    """

    source: Path
    target: Path
    layout: Layout
    dtype: str
    overwrite: bool
    workers: int = 1
    check_finite: bool = False


def hf_to_mcore(request: ImportRequest, progress: Progress) -> dict[str, Any]:
    """Converts an autoregressive model unchanged; returns the manifest."""
    model = open_hf_model(request.source)
    fields = {"family": model.family.name, **settings_fields(AUTOREGRESSIVE)}
    return write_import(
        request, model, model.source, AUTOREGRESSIVE, fields, progress, lambda _: {}
    )


TokenizerCheck = Callable[[Path, str, int], str]
"""(assets, token, id) -> what to note; raises ValueError when the id is not the token's."""


def _unchecked(assets: Path, token: str, token_id: int) -> str:
    return "not checked"


def ar_to_bdlm(
    request: ImportRequest,
    bdlm: BdlmSettings,
    wish: MaskWish,
    progress: Progress,
    check_tokenizer: TokenizerCheck = _unchecked,
) -> dict[str, Any]:
    """Converts an autoregressive model to a block-diffusion one; returns the manifest.

    `bdlm`'s mask token is ignored in favour of the one chosen from `wish`, or by the family's rule
    when nothing is wished. The edited tokenizer must pass `check_tokenizer`.
    """
    if bdlm.objective == "none":
        raise ValueError("objective='none' needs no mask token; use hf2mcore, or 'standard'")
    model = open_hf_model(request.source)
    shape = model.shape
    wish = usual_wish(wish, model.family.name, shape.vocab_size)
    mask = choose_mask_row(
        read_vocabulary(request.source),
        shape.vocab_size,
        token=wish.token,
        token_id=wish.token_id,
        resize=wish.resize,
    )
    bdlm = replace(bdlm, mask_token=mask.token, mask_token_id=mask.token_id)
    check_output(request.target, overwrite=request.overwrite, need_bytes=0)
    rows = make_rows(model.source, model.tables(), mask, wish.init)
    source = MaskRowSource(
        model.source, mask.token_id, {name: row.values for name, row in rows.items()}
    )
    shape = replace(shape, vocab_size=max(shape.vocab_size, mask.token_id + 1))
    fields = {
        "family": model.family.name,
        **settings_fields(bdlm),
        "mask_row": {
            "init": wish.init,
            "row_added": mask.is_new_row,
            "token_added": mask.is_new_token,
            "tables": {
                name: {
                    "norm": row.norm,
                    "mean_row_norm": row.mean_row_norm,
                    "replaced_norm": row.replaced_norm,
                }
                for name, row in rows.items()
            },
        },
    }
    model = replace(model, shape=shape, links=make_links(model.family, shape))

    def edit(assets: Path) -> dict[str, Any]:
        edit_tokenizer(assets, mask)
        return {"tokenizer": check_tokenizer(assets, mask.token, mask.token_id)}

    return write_import(request, model, source, bdlm, fields, progress, edit)


def write_import(
    request: ImportRequest,
    model: HfModel,
    source: TensorSource,
    bdlm: BdlmSettings,
    fields: Mapping[str, Any],
    progress: Progress,
    edit: Callable[[Path], dict[str, Any]],
) -> dict[str, Any]:
    """Writes the whole output directory and returns its manifest.

    `source` has the tensors that `model` names, which need not be those of the files; `fields` go
    to the manifest, `edit` changes the copied assets and returns more fields.
    """
    shape, layout = model.shape, request.layout
    partial = partial_path(request.target)
    work = _plan_work(request, model, source, partial)
    need = sum(x.num_bytes for x in work.files) + sum(x.num_bytes for x in work.shards)
    same = fingerprint(
        {
            "version": __version__,
            "files": [(file.name, *_stamp(file)) for file in work.hashes],
            "written": [(file.name, file.chunks) for file in work.files],
            **fields,
        }
    )
    with staged(request.target, overwrite=request.overwrite, need_bytes=need, same=same):
        work.checkpoint.mkdir(exist_ok=True)
        work.kept.mkdir(parents=True, exist_ok=True)
        results = run_journaled(work, request.workers, progress, partial, "converting")
        spans = results[len(work.hashes) :][: len(work.files)]
        dtype = next(iter(work.places)).info.dtype
        state = common_state(shape, bdlm, layout, dtype)
        objects = dict.fromkeys(extra_state_keys(model.family, shape, layout))
        finish_checkpoint(work.checkpoint, work.files, spans, {**objects, COMMON_STATE: state})
        write_bridge_files(work.checkpoint, model.family.name, state["args"])
        (partial / TRACKER_NAME).write_text(RELEASE_NAME)
        write_flags(partial, megatron_flags(shape, bdlm, dtype), shape.notes)
        left = copy_assets(request.source, partial / ASSETS_NAME)
        write_kept(work.kept, source.tensors, work.shards)
        _edit_assets(partial / ASSETS_NAME, shape, bdlm, dtype)
        fields = {**fields, **edit(partial / ASSETS_NAME)}
        names = [file.name for file in work.hashes]
        return write_manifest(
            partial,
            {
                **fields,
                "layout": str(layout),
                "notes": list(shape.notes),
                "passed_through": len(model.passed),
                "source_sha256": dict(zip(names, results, strict=False)),
                "not_copied": left,
            },
        )


def _plan_work(
    request: ImportRequest, model: HfModel, source: TensorSource, partial: Path
) -> ImportWork:
    """Returns the jobs. Raises: ValueError for a layout that the family's layers do not have."""
    shape, layout = model.shape, request.layout
    if layout is Layout.HOMOGENEOUS and not model.family.stackable:
        raise ValueError(
            f"layout=homogeneous stacks equal layers, but those of {model.family.name} differ; "
            f"use --layout per_layer"
        )
    places = plan_chunks(model.links, source, layout, request.dtype, shape.num_layers)
    return ImportWork(
        source=source,
        hashes=(*model.source.files, *asset_files(request.source)),
        files=plan_files(list(places)),
        places=places,
        shards=plan_shards(model.passed, SHARD_BYTES),
        checkpoint=partial / RELEASE_NAME,
        kept=partial / ASSETS_NAME / PASS_THROUGH_NAME,
        check_finite=request.check_finite,
        scratch=Scratch(),
    )


def _stamp(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns


def _edit_assets(
    directory: Path, shape: ModelShape, bdlm: BdlmSettings, dtype: torch.dtype
) -> None:
    config = read_config(directory)
    changes: dict[str, Any] = dict(dtype_changes(config, dtype))
    if bdlm.objective != "none":
        keys = {"mask_token_id": bdlm.mask_token_id, **exported_settings(bdlm)}
        changes |= {"vocab_size": shape.vocab_size, **keys}
        generation = directory / "generation_config.json"
        if generation.is_file():
            patch_json(generation, {name: keys[name] for name in ("mask_token_id", "block_size")})
    write_json(directory / "config.json", with_config_keys(config, changes))
