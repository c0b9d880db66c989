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
    return dict(json.loads(path.read_text(encoding="utf-8")))


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
    known = {path.name for path in files} | {MANIFEST_NAME}
    names = sorted(path.name for path in source.iterdir())
    return tuple(name for name in names if name not in known and not name.startswith("."))


def patch_json(path: Path, changes: Mapping[str, Any]) -> None:
    """Sets top-level keys of a JSON file and keeps the rest and its order."""
    value = json.loads(path.read_text(encoding="utf-8"))
    value.update(changes)
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def dtype_changes(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, str]:
    """Returns the config entries that name the weights' dtype, in the config's own spelling."""
    name = str(dtype).removeprefix("torch.")
    keys = [key for key in ("dtype", "torch_dtype") if key in config]
    return {key: name for key in keys or ("torch_dtype",)}
