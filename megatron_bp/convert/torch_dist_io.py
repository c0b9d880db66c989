"""Reads Megatron `torch_dist` directories by chunks, without model or process group.

Uses torch.distributed.checkpoint only. A checkpoint is `.metadata` (names, shapes, chunks),
`*.distcp` (data) and `metadata.json` (Megatron's marker); common state is the byte object
`common_state/shard_0_1`. Knows no key names beyond that one. `torch_dist_writer.py` is the other
direction. Specified by tests/convert/test_torch_dist_io.py.
"""

from __future__ import annotations

import io
import json
import math
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.utils import _create_file_view

from megatron_bp.convert.link import TensorInfo
from megatron_bp.convert.plain_pickle import load_plain

COMMON_STATE = "common_state/shard_0_1"


@dataclass(frozen=True)
class Chunk:
    """A box of a stored tensor: [offset, offset + size) of `info.shape`."""

    key: str
    info: TensorInfo
    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """The size in bytes."""
        return math.prod(self.size) * self.info.dtype.itemsize


class TorchDistReader:
    """The contents of one iteration directory; loads one stored chunk at a time."""

    def __init__(self, directory: Path) -> None:
        """Reads only metadata.

        Raises: ValueError when the directory is not a complete torch_dist checkpoint.
        """
        self.directory = directory
        marker = directory / "metadata.json"
        if not marker.is_file() or not (directory / ".metadata").is_file():
            raise ValueError(
                f"{directory} is not a torch_dist checkpoint (no metadata.json and .metadata); "
                f"give the folder with latest_checkpointed_iteration.txt or an iteration in it"
            )
        backend = json.loads(marker.read_text()).get("sharded_backend")
        if backend != "torch_dist":
            raise ValueError(f"{marker} has sharded_backend={backend!r}, must be 'torch_dist'")
        metadata = FileSystemReader(str(directory)).read_metadata()
        self._storage = metadata.storage_data
        self._chunks: dict[str, list[Chunk]] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self.objects: set[str] = set()
        for key, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, BytesStorageMetadata):
                self.objects.add(key)
            else:
                self._add_tensor(key, entry)

    def _add_tensor(self, key: str, entry: TensorStorageMetadata) -> None:
        info = TensorInfo(tuple(entry.size), entry.properties.dtype)
        self.tensors[key] = info
        self._chunks[key] = [
            Chunk(key, info, tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks
        ]

    def iter_rows(self, key: str, layer: int = -1) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields (first row, rows) blocks that together are the tensor, or its layer `layer`.

        Blocks follow the stored chunks, so that each chunk is loaded once. Chunks that split later
        dims (tensor parallel columns) are put together first, those of the same rows at a time.
        """
        lead = 1 if layer >= 0 else 0
        shape = self.tensors[key].shape[lead:]
        chunks = [chunk for chunk in self._chunks[key] if not lead or _has_layer(chunk, layer)]
        if not shape:
            yield 0, self._load(chunks[0], layer)
            return
        groups: dict[tuple[int, int], list[Chunk]] = {}
        for chunk in chunks:
            groups.setdefault((chunk.offset[lead], chunk.size[lead]), []).append(chunk)
        spans = sorted(groups)
        ends = [lo + rows for lo, rows in spans]
        if [lo for lo, _ in spans] != [0, *ends[:-1]] or ends[-1] != shape[0]:
            groups, spans = {(0, shape[0]): chunks}, [(0, shape[0])]
        for lo, rows in spans:
            yield lo, self._join(groups[lo, rows], lo, (rows, *shape[1:]), layer)

    def _join(
        self, chunks: list[Chunk], rows_lo: int, shape: tuple[int, ...], layer: int
    ) -> torch.Tensor:
        lead = 1 if layer >= 0 else 0
        if len(chunks) == 1:
            assert chunks[0].size[lead:] == shape, f"{chunks[0].key}: chunks do not fill it"
            return self._load(chunks[0], layer)
        out = torch.empty(shape, dtype=chunks[0].info.dtype)
        filled = 0
        for chunk in chunks:
            lows = (chunk.offset[lead] - rows_lo, *chunk.offset[lead + 1 :])
            box = zip(lows, chunk.size[lead:], strict=True)
            out[tuple(slice(lo, lo + size) for lo, size in box)] = self._load(chunk, layer)
            filled += math.prod(chunk.size[lead:])
        assert filled == out.numel(), f"{chunks[0].key}: chunks overlap or do not fill it"
        return out

    def _load(self, chunk: Chunk, layer: int) -> torch.Tensor:
        with self._open(MetadataIndex(chunk.key, torch.Size(chunk.offset))) as view:
            try:
                tensor = torch.load(view, map_location="cpu", weights_only=True)
            except (RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
                raise ValueError(
                    f"{self.directory}: {chunk.key} cannot be read, its file is truncated or "
                    f"damaged ({error})"
                ) from None
        if tuple(tensor.shape) != chunk.size:
            raise ValueError(f"{self.directory}: {chunk.key} has a damaged chunk")
        return tensor if layer < 0 else tensor[layer - chunk.offset[0]]

    @contextmanager
    def _open(self, index: MetadataIndex) -> Iterator[Any]:
        place = self._storage[index]
        if getattr(place, "transform_descriptors", None):
            raise ValueError(
                f"{self.directory}: {index.fqn} is stored with a transform (compressed); "
                f"save the checkpoint without storage extensions"
            )
        path = self.directory / place.relative_path
        if not path.is_file():
            raise ValueError(f"{path} is missing; it holds {index.fqn}")
        with open(path, "rb") as stream:
            yield _create_file_view(stream, place.offset, place.length)

    def stamp(self) -> list[tuple[str, int, int]]:
        """Returns name, size and time of every file, to tell whether the checkpoint changed."""
        files = sorted(path for path in self.directory.iterdir() if path.is_file())
        return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]

    def common_state(self) -> dict[str, Any]:
        """Returns the common state (args, iteration, ...) without importing classes it mentions."""
        legacy = self.directory / "common.pt"
        if legacy.is_file():
            return dict(load_plain(io.BytesIO(legacy.read_bytes())))
        if COMMON_STATE not in self.objects:
            raise ValueError(f"{self.directory} has neither {COMMON_STATE} nor common.pt")
        with self._open(MetadataIndex(COMMON_STATE)) as view:
            return dict(load_plain(io.BytesIO(view.read()))[0])


def _has_layer(chunk: Chunk, layer: int) -> bool:
    return chunk.offset[0] <= layer < chunk.offset[0] + chunk.size[0]
