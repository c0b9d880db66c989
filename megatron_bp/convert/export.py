"""Megatron to Hugging Face: from converted checkpoints and from real training checkpoints.

Specified by tests/convert/test_export.py and test_megatron_load.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron_bp import __version__
from megatron_bp.convert.bdlm_settings import (
    AUTOREGRESSIVE,
    BdlmSettings,
    hash_files,
    read_manifest,
    settings_fields,
    write_manifest,
)
from megatron_bp.convert.export_settings import ExportWish, find_settings
from megatron_bp.convert.export_work import ExportWork
from megatron_bp.convert.families import DIFFUSION_GEMMA
from megatron_bp.convert.hf_assets import (
    PASS_THROUGH_NAME,
    copy_assets,
    dtype_changes,
    patch_json,
    read_config,
    with_config_keys,
    write_json,
)
from megatron_bp.convert.jobs import run_journaled
from megatron_bp.convert.link import Link, TensorInfo
from megatron_bp.convert.lora import merge, open_adapters
from megatron_bp.convert.megatron_args import ASSETS_NAME
from megatron_bp.convert.megatron_model import (
    MegatronModel,
    Stored,
    find_iteration,
    open_megatron_model,
)
from megatron_bp.convert.pass_through import NoTensors, open_kept, repository_names
from megatron_bp.convert.plan import EMBEDDING_KEY, choose_dtype, source_of
from megatron_bp.convert.progress import Progress
from megatron_bp.convert.safetensors_io import SafetensorsDir, plan_shards, write_index
from megatron_bp.convert.serve_as import AS_IT_IS, find_profile
from megatron_bp.convert.serve_as.base import Export, Profile
from megatron_bp.convert.staging import fingerprint, partial_path, staged

WEIGHTS = ("auto", "model", "master")


@dataclass(frozen=True)
class ExportRequest:
    """What to read and write.

    `assets` is a Hugging Face directory without weights (config, tokenizer); `iteration` -1 is the
    latest; `dtype` is "keep" or a name in `DTYPES`; `block_size` 0, `mask_token_id` -1, `objective`
    "" and `clean_rule` "" take what checkpoint and assets say. `weights` is one of `WEIGHTS`.
    `adapters` are folders of runs with adapters on `source`, merged into it.
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
    objective: str = ""
    clean_rule: str = ""
    weights: str = "auto"
    workers: int = 1
    check_finite: bool = False
    serve_as: str = AS_IT_IS
    adapters: tuple[Path, ...] = ()


def mcore_to_hf(request: ExportRequest, progress: Progress) -> dict[str, Any]:
    """Writes a complete Hugging Face directory; returns its manifest."""
    plan = _plan_export(request)
    work, export = plan.work, plan.export
    need = sum(shard.num_bytes for shard in work.shards)
    same = fingerprint({"version": __version__, "assets": request.assets.absolute(), **plan.facts})
    with staged(request.target, overwrite=request.overwrite, need_bytes=need, same=same) as partial:
        run_journaled(work, request.workers, progress, partial, "writing safetensors")
        write_index(partial, work.shards)
        left = copy_assets(request.assets, partial)
        dtype = next(iter(work.shards[0].tensors.values())).dtype
        config = with_config_keys(export.config, dtype_changes(export.config, dtype))
        _edit_assets(partial, plan.profile, replace(export, config=config))
        directory = work.reader.directory
        hashes = hash_files([directory / ".metadata", directory / "metadata.json"])
        return write_manifest(
            partial,
            {
                "family": export.family,
                **settings_fields(export.settings),
                **plan.fields,
                "serve_as": plan.profile.name,
                "exported_from": directory.name,
                "source_sha256": hashes,
                "not_copied": left,
            },
        )


@dataclass(frozen=True)
class _ExportPlan:
    """`facts` are what, beside code and assets, decides the bytes; `fields` go to the manifest."""

    export: Export
    profile: Profile
    work: ExportWork
    facts: Mapping[str, Any]
    fields: Mapping[str, Any]


def _plan_export(request: ExportRequest) -> _ExportPlan:
    """Returns everything decided and checked, with nothing written."""
    directory = find_iteration(request.source, request.iteration)
    config = read_config(request.assets)
    every = tuple(open_adapters(folder) for folder in request.adapters)
    model = merge(open_megatron_model(directory, config, repository_names(request.assets)), every)
    state = model.reader.common_state()
    manifest = read_manifest(request.assets.parent)
    # The run that trained adapters says what the merged model is.
    args = dict(every[-1].args) if every else vars(state.get("args", argparse.Namespace()))
    settings = _find_settings(request, model, args, config, manifest)
    shape = model.shape
    canvas = str(args.get("bdlm_canvas", "preset"))
    export = Export(model.family.name, config, settings, shape.vocab_size, shape.tied, canvas)
    profile = find_profile(request.serve_as, export)
    kept = _open_whole_kept(request.assets, model, manifest)
    master = _use_masters(model, request)
    links = tuple((link, model.stored(link, master=master)) for link in model.links)
    stored = _output_tensors(links, request.dtype)
    stored |= {n: x for n, x in kept.tensors.items() if profile.keeps_others or n in stored}
    names: dict[str, tuple[str, ...]] = {name: (profile.rename(name),) for name in stored}
    embedding = source_of(model.links, EMBEDDING_KEY)
    if profile.untied_head and shape.tied and embedding and shape.head_name not in names:
        names[embedding] += (profile.untied_head,)
    outputs = {new: info for name, info in stored.items() for new in names[name]}
    zeros = {
        name: TensorInfo(size, next(iter(stored.values())).dtype)
        for name, size in profile.zeros(export).items()
    }
    work = ExportWork(
        reader=model.reader,
        links=links,
        kept=kept,
        shards=plan_shards(outputs | zeros, request.max_shard_bytes),
        written_names=names,
        zeros=zeros,
        directory=partial_path(request.target),
        check_finite=request.check_finite,
    )
    facts = {
        "source": directory.absolute(),
        "stored": model.reader.stamp(),
        "shards": [(shard.name, dict(shard.tensors)) for shard in work.shards],
        "master": master,
        "names": names,
    }
    fields = {
        **_inherited(manifest),
        "weights": "master" if master else "model",
        "exported_iteration": every[-1].iteration if every else int(state.get("iteration", 0)),
        "ignored_entries": model.ignored,
        "canvas": canvas,
    }
    return _ExportPlan(export, profile, work, facts, fields)


def _find_settings(
    request: ExportRequest,
    model: MegatronModel,
    args: Mapping[str, Any],
    config: Mapping[str, Any],
    manifest: Mapping[str, Any],
) -> BdlmSettings:
    if model.is_drafter:
        return AUTOREGRESSIVE  # block size and mask id stay in its dflash_config
    if model.family is DIFFUSION_GEMMA:
        return AUTOREGRESSIVE  # no mask; canvas_length is in the config
    wish = ExportWish(
        request.objective, request.block_size, request.clean_rule, request.mask_token_id
    )
    settings = find_settings(wish, args, config, manifest)
    _check_mask(settings, model.shape.vocab_size)
    return settings


def _open_whole_kept(
    assets: Path, model: MegatronModel, manifest: Mapping[str, Any]
) -> SafetensorsDir | NoTensors:
    originals = {name for link in model.links if link.needs_original for name in link.sources}
    others = model.family.pass_through
    kept = open_kept(assets, lambda name: name in originals or name.startswith(others))
    expected = manifest.get("passed_through", len(kept.tensors))
    if len(kept.tensors) != expected:
        raise ValueError(
            f"{assets} lacks tensors that the conversion kept in {PASS_THROUGH_NAME}/ "
            f"({len(kept.tensors)} of {expected}); give the whole folder"
        )
    return kept


def _check_mask(settings: BdlmSettings, vocab_size: int) -> None:
    mask = settings.mask_token_id
    if settings.objective != "none" and not 0 <= mask < vocab_size:
        raise ValueError(
            f"mask_token_id={mask} must be in [0, vocab_size={vocab_size}) of the assets' "
            f"config.json; give --mask-token-id"
        )


def _use_masters(model: MegatronModel, request: ExportRequest) -> bool:
    """Tells whether to read the optimizer's fp32 copies: if asked, or if it makes a difference.

    A model tensor is its copy rounded to the model's dtype, so only a float32 export gains by them.
    """
    if request.weights not in WEIGHTS:
        raise ValueError(f"weights={request.weights!r} must be one of {', '.join(WEIGHTS)}")
    lacking = [
        key
        for link in model.links
        if (key := model.stored(link).key) not in model.masters
        and model.stored(link).info.dtype != torch.float32
    ]
    if request.weights == "master" and (lacking or not model.masters):
        flat = any(".gbuf_idx_" in key for key in model.reader.tensors)
        why = (
            "its optimizer state is in flat buckets (dp_reshardable), not by parameter"
            if flat
            else "they were not saved"
        )
        raise ValueError(
            f"{request.source} has no fp32 master of {len(lacking)} tensors ({lacking[:2]}): "
            f"{why}; "
            f"save with --dist-ckpt-optim-fully-reshardable, or use --weights model"
        )
    wanted = request.weights == "master" or (
        request.weights == "auto" and request.dtype == "float32"
    )
    return wanted and bool(model.masters) and not lacking


def _inherited(manifest: Mapping[str, Any]) -> dict[str, Any]:
    names: tuple[str, ...] = ("mask_row", "notes", "converted_from", "self_conditioning")
    if manifest.get("family") == DIFFUSION_GEMMA.name:
        names += ("objective", "alignment", "block_size", "clean_rule")
    return {name: manifest[name] for name in names if name in manifest}


def _output_tensors(links: Iterable[tuple[Link, Stored]], dtype: str) -> dict[str, TensorInfo]:
    outputs = {}
    for link, stored in links:
        kept = stored.info.dtype if link.pinned else choose_dtype(stored.info.dtype, dtype)
        for name, shape in zip(link.sources, link.source_shapes, strict=True):
            outputs[name] = TensorInfo(shape, kept)
    return outputs


def _edit_assets(directory: Path, profile: Profile, export: Export) -> None:
    write_json(directory / "config.json", profile.rewrite(export))
    for name, text in profile.files.items():
        (directory / name).write_text(text)
    settings = export.settings
    generation = directory / "generation_config.json"
    if settings.objective != "none" and generation.is_file():
        keys = {"mask_token_id": settings.mask_token_id, "block_size": settings.block_size}
        patch_json(generation, keys)


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
