"""The tensors of a repository that Megatron's model does not own, and the names of all the others.

An import keeps them in a folder of the assets, an export puts them back. Tensors that get an offset
are kept too, because adding and taking away rounds: w - 1 + 1 is not w for small w. So are those
with a dtype of their own, because Megatron saves fp32 parameters of a bf16 model in bf16. Specified
by tests/convert/test_exact_offset.py and test_family_round_trips.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from megatron_bp.convert.hf_assets import PASS_THROUGH_NAME
from megatron_bp.convert.link import TensorInfo
from megatron_bp.convert.safetensors_io import SafetensorsDir, Shard, write_index

_NAMES = "names.json"


class NoTensors:
    """A tensor source without tensors."""

    def __init__(self) -> None:
        """Has nothing."""
        self.tensors: dict[str, TensorInfo] = {}


def write_kept(directory: Path, names: Iterable[str], shards: Sequence[Shard]) -> None:
    """Completes the folder of `shards`: their index, and the names of the whole repository."""
    write_index(directory, shards)
    (directory / _NAMES).write_text(json.dumps(sorted(names), indent=1) + "\n")


def open_kept(
    assets: Path, wanted: Callable[[str], bool] = lambda name: False
) -> SafetensorsDir | NoTensors:
    """Returns the tensors kept beside the assets.

    Assets that are a whole repository have them among their own, where `wanted` picks them.
    """
    directory = assets / PASS_THROUGH_NAME
    if list(directory.glob("*.safetensors")):
        return SafetensorsDir(directory)
    if not list(assets.glob("*.safetensors")):
        return NoTensors()
    whole = SafetensorsDir(assets)
    whole.tensors = {name: info for name, info in whole.tensors.items() if wanted(name)}
    return whole if whole.tensors else NoTensors()


def repository_names(assets: Path) -> tuple[str, ...]:
    """Returns the tensor names of the repository that the assets are from, () when unknown."""
    path = assets / PASS_THROUGH_NAME / _NAMES
    if path.is_file():
        return tuple(json.loads(path.read_text()))
    if list(assets.glob("*.safetensors")):
        return tuple(SafetensorsDir(assets).tensors)
    return ()


def restore_original(values: torch.Tensor, original: torch.Tensor, offset: float) -> torch.Tensor:
    """Returns `values`, but the original's bits where they are what `original` becomes and back.

    So a value that training left alone is restored exactly, and a changed one is rounded once, to
    the original's dtype.
    """
    image = ((original.double() + offset).to(values.dtype).double() - offset).to(values.dtype)
    return torch.where(image == values, original, values.to(original.dtype))
