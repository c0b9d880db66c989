"""Writes and reads Megatron `torch_dist` directories by chunks, without model or process group.

Uses torch.distributed.checkpoint only. A checkpoint is `.metadata` (names, shapes, chunks),
`*.distcp` (data) and `metadata.json` (Megatron's marker, byte for byte what megatron-core 0.19
writes); common state is the byte object `common_state/shard_0_1`. Knows no key names beyond that
one. Specified by tests/convert/test_torch_dist_io.py.
"""

from __future__ import annotations

import dataclasses
import io
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.utils import _create_file_view
from torch.futures import Future

from megatron_bp.convert.plain_pickle import load_plain
from megatron_bp.convert.plan import TensorInfo

COMMON_STATE = "common_state/shard_0_1"
MARKER = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
_SMALL_BYTES = 2**20


@dataclass(frozen=True)
class Chunk:
    """A box of a stored tensor: [offset, offset + size) of `info.shape`."""

    key: str
    info: TensorInfo
    offset: tuple[int, ...]
    size: tuple[int, ...]


def write_torch_dist(
    directory: Path,
    chunks: Sequence[Chunk],
    objects: Mapping[str, Any],
    make_chunk: Callable[[Chunk], torch.Tensor],
) -> None:
    """Writes a complete checkpoint; `make_chunk` is called once a chunk, when its turn comes.

    Small things share one file and every other chunk has its own, because torch keeps all tensors
    of one file alive until that file is written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(
            {},
            storage_writer=_TwoSizesWriter(
                str(directory), single_file_per_rank=False, thread_count=1
            ),
            planner=_ChunkPlanner(chunks, objects, make_chunk),
            no_dist=True,
        )
    # Last, because Megatron takes a directory with this file for a checkpoint.
    (directory / "metadata.json").write_text(json.dumps(MARKER))


class _ChunkPlanner(DefaultSavePlanner):
    def __init__(
        self,
        chunks: Sequence[Chunk],
        objects: Mapping[str, Any],
        make_chunk: Callable[[Chunk], torch.Tensor],
    ) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._chunks = {(chunk.key, chunk.offset): chunk for chunk in chunks}
        self._objects = objects
        self._make_chunk = make_chunk

    def create_local_plan(self) -> SavePlan:
        items = []
        count: dict[str, int] = {}
        for chunk in self._chunks.values():
            index = count.get(chunk.key, 0)
            count[chunk.key] = index + 1
            items.append(_tensor_item(chunk, index))
        items += [
            WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO)
            for name in self._objects
        ]
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        name, offset = write_item.index.fqn, write_item.index.offset
        if offset is None:
            stream = io.BytesIO()
            torch.save([self._objects[name]], stream)
            stream.seek(0)
            return stream
        chunk = self._chunks[(name, tuple(offset))]
        tensor = self._make_chunk(chunk)
        assert tuple(tensor.shape) == chunk.size, f"{name}: {tensor.shape} is not {chunk.size}"
        assert tensor.dtype == chunk.info.dtype, f"{name}: {tensor.dtype} was promised otherwise"
        return tensor


def _tensor_item(chunk: Chunk, index: int) -> WriteItem:
    offset = torch.Size(chunk.offset)
    return WriteItem(
        index=MetadataIndex(chunk.key, offset, index),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offset, torch.Size(chunk.size)),
            properties=TensorProperties(dtype=chunk.info.dtype),
            size=torch.Size(chunk.info.shape),
        ),
    )


def _item_bytes(item: WriteItem) -> int:
    data = item.tensor_data
    if data is None:
        return 0
    assert data.chunk is not None
    return data.chunk.sizes.numel() * data.properties.dtype.itemsize


class _TwoSizesWriter(FileSystemWriter):
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        small = [item for item in plan.items if _item_bytes(item) <= _SMALL_BYTES]
        large = [item for item in plan.items if _item_bytes(item) > _SMALL_BYTES]
        prefix = plan.storage_data.prefix
        results: list[Any] = []
        for items, one_file, name in ((small, True, f"{prefix}small_"), (large, False, prefix)):
            self.single_file_per_rank = one_file
            storage = dataclasses.replace(plan.storage_data, prefix=name)
            part = dataclasses.replace(plan, items=items, storage_data=storage)
            results += super().write_data(part, planner).wait()
        done: Future[Any] = Future()
        done.set_result(results)
        return done


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

        Blocks follow the stored chunks, so that each chunk is loaded once and, unless it is split
        along a later dim (tensor parallel rows), memory holds one chunk.
        """
        lead = 1 if layer >= 0 else 0
        shape = self.tensors[key].shape[lead:]
        chunks = [chunk for chunk in self._chunks[key] if not lead or _has_layer(chunk, layer)]
        whole_rows = all(chunk.size[lead + 1 :] == shape[1:] for chunk in chunks)
        if whole_rows:
            for chunk in sorted(chunks, key=lambda chunk: chunk.offset[lead]):
                yield chunk.offset[lead], self._load(chunk, layer)
            return
        out = torch.empty(shape, dtype=self.tensors[key].dtype)
        for chunk in chunks:
            box = zip(chunk.offset[lead:], chunk.size[lead:], strict=True)
            out[tuple(slice(lo, lo + size) for lo, size in box)] = self._load(chunk, layer)
        yield 0, out

    def _load(self, chunk: Chunk, layer: int) -> torch.Tensor:
        with self._open(MetadataIndex(chunk.key, torch.Size(chunk.offset))) as view:
            tensor = torch.load(view, map_location="cpu", weights_only=True)
        assert tuple(tensor.shape) == chunk.size, f"{chunk.key}: damaged chunk"
        return tensor if layer < 0 else tensor[layer - chunk.offset[0]]

    @contextmanager
    def _open(self, index: MetadataIndex) -> Iterator[Any]:
        place = self._storage[index]
        if getattr(place, "transform_descriptors", None):
            raise ValueError(
                f"{self.directory}: {index.fqn} is stored with a transform (compressed); "
                f"save the checkpoint without storage extensions"
            )
        with open(self.directory / place.relative_path, "rb") as stream:
            yield _create_file_view(stream, place.offset, place.length)

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
