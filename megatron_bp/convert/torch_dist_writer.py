"""Writes Megatron `torch_dist` directories by chunks, the same bytes for the same input.

Not torch's own writer, because that keeps a whole file's tensors alive and puts a random id into
`.metadata`. `metadata.json` is byte for byte what megatron-core 0.19 writes. Knows no key names.
Specified by tests/convert/test_torch_dist_io.py.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.serialization import get_crc32_options, set_crc32_options

from megatron_bp.convert.torch_dist_io import Chunk

MARKER = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
SMALL_BYTES = 2**20
"""Larger chunks have a file of their own, which torch writes without copying them first."""

BATCH_BYTES = 64 * 2**20
Span = tuple[int, int]
"""(offset, length) in a file, bytes."""


@dataclass(frozen=True)
class ChunkFile:
    """One `*.distcp` file and the chunks in it."""

    name: str
    chunks: tuple[Chunk, ...]

    @property
    def num_bytes(self) -> int:
        """The bytes of its tensors."""
        return sum(chunk.num_bytes for chunk in self.chunks)


def plan_files(chunks: Sequence[Chunk]) -> tuple[ChunkFile, ...]:
    """Returns the files for the chunks: one for each large chunk, batches of the small ones."""
    groups: list[list[Chunk]] = []
    batch: list[Chunk] = []
    for chunk in chunks:
        if chunk.num_bytes > SMALL_BYTES:
            groups.append([chunk])
            continue
        if not batch or sum(x.num_bytes for x in batch) > BATCH_BYTES:
            batch = []
            groups.append(batch)
        batch.append(chunk)
    return tuple(
        ChunkFile(f"__0_{number}.distcp", tuple(group)) for number, group in enumerate(groups)
    )


def write_chunks(
    directory: Path, file: ChunkFile, make_chunk: Callable[[int], torch.Tensor]
) -> list[Span]:
    """Writes one file and returns where its chunks are; `make_chunk` gets their numbers in order.

    Memory holds one chunk. The file appears under its name when it is whole.
    """
    path = directory / file.name
    unfinished = path.with_name(path.name + ".unfinished")
    with _without_checksums():
        if len(file.chunks) == 1:
            torch.save(_checked(file.chunks[0], make_chunk(0)), str(unfinished))
            spans = [(0, unfinished.stat().st_size)]
        else:
            spans = []
            with open(unfinished, "wb") as stream:
                for number, chunk in enumerate(file.chunks):
                    start = stream.tell()
                    torch.save(_checked(chunk, make_chunk(number)), stream)
                    spans.append((start, stream.tell() - start))
    os.replace(unfinished, path)
    return spans


def _checked(chunk: Chunk, tensor: torch.Tensor) -> torch.Tensor:
    assert tuple(tensor.shape) == chunk.size, f"{chunk.key}: {tensor.shape} is not {chunk.size}"
    assert tensor.dtype == chunk.info.dtype, f"{chunk.key}: {tensor.dtype} was not promised"
    # torch.save writes the whole storage, also of a part.
    assert tensor.untyped_storage().nbytes() == tensor.nbytes, f"{chunk.key}: part of a storage"
    return tensor


@contextmanager
def _without_checksums() -> Iterator[None]:
    # They cost more than the copy, and neither torch.load nor safetensors looks at any.
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def finish_checkpoint(
    directory: Path,
    files: Sequence[ChunkFile],
    spans: Sequence[Sequence[Span]],
    objects: Mapping[str, Any],
) -> None:
    """Writes the objects, `.metadata` and, last, the marker that makes it a checkpoint."""
    metadata = Metadata(state_dict_metadata={}, storage_data={})
    for file, places in zip(files, spans, strict=True):
        for chunk, (offset, length) in zip(file.chunks, places, strict=True):
            _add_chunk(metadata, chunk, _StorageInfo(file.name, offset, length))
    name = f"__0_{len(files)}.distcp"
    with open(directory / name, "wb") as stream:
        for key, value in objects.items():
            start = stream.tell()
            torch.save([value], stream)
            place = _StorageInfo(name, start, stream.tell() - start)
            metadata.state_dict_metadata[key] = BytesStorageMetadata()
            metadata.storage_data[MetadataIndex(key)] = place
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    (directory / "metadata.json").write_text(json.dumps(MARKER))


def _add_chunk(metadata: Metadata, chunk: Chunk, place: _StorageInfo) -> None:
    key, offset = chunk.key, torch.Size(chunk.offset)
    if key not in metadata.state_dict_metadata:
        metadata.state_dict_metadata[key] = TensorStorageMetadata(
            TensorProperties(dtype=chunk.info.dtype), torch.Size(chunk.info.shape), []
        )
    tensor = metadata.state_dict_metadata[key]
    assert isinstance(tensor, TensorStorageMetadata)
    index = MetadataIndex(key, offset, len(tensor.chunks))
    tensor.chunks.append(ChunkStorageMetadata(offset, torch.Size(chunk.size)))
    metadata.storage_data[index] = place


def write_torch_dist(
    directory: Path,
    chunks: Sequence[Chunk],
    objects: Mapping[str, Any],
    make_chunk: Callable[[Chunk], torch.Tensor],
) -> None:
    """Writes a complete checkpoint in this process; `make_chunk` is called once a chunk."""
    directory.mkdir(parents=True, exist_ok=True)
    files = plan_files(chunks)
    spans = [
        write_chunks(directory, file, lambda number, file=file: make_chunk(file.chunks[number]))  # type: ignore[misc]
        for file in files
    ]
    finish_checkpoint(directory, files, spans, objects)
