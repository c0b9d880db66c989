"""The files of a Hugging Face directory that are not weights: copied, and patched as JSON.

Owns which files are assets. Specified by tests/convert/test_ar_to_bdlm.py and test_export.py.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_bp.convert.staging import MANIFEST_NAME

_WEIGHT_SUFFIXES = (
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".bin.index.json",
    ".pt",
    ".pth",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
)


def read_config(directory: Path) -> dict[str, Any]:
    """Returns `config.json`. Raises: ValueError when the directory is no Hugging Face model."""
    path = directory / "config.json"
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory; give a Hugging Face model folder")
    if not path.is_file():
        raise ValueError(f"{directory} has no config.json; give a Hugging Face model folder")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    return dict(config)


def asset_files(directory: Path) -> tuple[Path, ...]:
    """Returns the top-level files that are not weights, sorted."""
    return tuple(
        path
        for path in sorted(directory.iterdir())
        if path.is_file()
        and path.name != MANIFEST_NAME
        and not path.name.endswith(_WEIGHT_SUFFIXES)
        and not path.name.startswith(".")
    )


def copy_assets(source: Path, target: Path) -> tuple[str, ...]:
    """Copies the asset files; returns the names of everything left behind but hidden files."""
    target.mkdir(exist_ok=True)
    files = asset_files(source)
    for path in files:
        shutil.copyfile(path, target / path.name)
    known = {path.name for path in files} | {MANIFEST_NAME, PASS_THROUGH_NAME}
    names = sorted(path.name for path in source.iterdir())
    return tuple(name for name in names if name not in known and not name.startswith("."))


PASS_THROUGH_NAME = "pass_through"
"""The folder beside the assets with the tensors that Megatron's model does not own."""

NESTED = "text_config"
"""Where the config of a model with several parts keeps the language model's."""


def patch_json(path: Path, changes: Mapping[str, Any]) -> None:
    """Sets top-level keys of a JSON file and keeps the rest and its order."""
    value = json.loads(path.read_text(encoding="utf-8"))
    value.update(changes)
    write_json(path, value)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes JSON as Hugging Face does."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def with_config_keys(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config with every key set where it is: nested, at the top or both; else on top.

    A nested language model's vocabulary size belongs to it alone.
    """
    out = dict(config)
    nested = dict(config.get(NESTED) or {})
    for key, value in changes.items():
        if key in nested:
            nested[key] = value
        if key in out or key not in nested:
            out[key] = value
    return out | {NESTED: nested} if nested else out


def dtype_changes(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, str]:
    """Returns the config entries that name the weights' dtype, in the config's own spelling."""
    name = str(dtype).removeprefix("torch.")
    spelt = {**(config.get(NESTED) or {}), **config}
    keys = [key for key in ("dtype", "torch_dtype") if key in spelt]
    return {key: name for key in keys or ("torch_dtype",)}
