"""The jobs of a conversion to Megatron: hash a source file, write a checkpoint file, copy a shard.

Every job can run in any process. Knows families only as links. Specified by
tests/convert/test_round_trip.py and test_jobs.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_bp.convert.link import Link, TensorInfo, row_box, row_ranges
from megatron_bp.convert.mask_row import TensorSource
from megatron_bp.convert.plan import Layout, choose_dtype, link_key
from megatron_bp.convert.rules import clip
from megatron_bp.convert.safetensors_io import Shard, ShardWriter
from megatron_bp.convert.torch_dist_io import Chunk
from megatron_bp.convert.torch_dist_writer import ChunkFile, write_chunks

CHUNK_BYTES = 128 * 2**20
_HASH_BYTES = 8 * 2**20


@dataclass(frozen=True)
class ChunkRows:
    """The rows of a link, from `rows_lo` on, that fill one chunk."""

    link: Link
    rows_lo: int


def plan_chunks(
    links: Sequence[Link], source: TensorSource, layout: Layout, dtype: str, num_layers: int
) -> dict[Chunk, ChunkRows]:
    """Returns the chunks of a checkpoint, in the order of the links, and what fills them."""
    chunks = {}
    for link in links:
        stacked = layout is Layout.HOMOGENEOUS and link.layer >= 0
        stored = source.tensors[link.sources[0]].dtype
        kept = stored if link.pinned else choose_dtype(stored, dtype)
        if link.offset:  # w - 1 of a bf16 w needs more bits than bf16 has
            kept = torch.promote_types(kept, torch.float32)
        lead = (num_layers,) if stacked else ()
        info = TensorInfo((*lead, *link.shape), kept)
        for lo, rows in row_ranges(link, kept.itemsize, CHUNK_BYTES):
            box = row_box(link, lo, rows)
            offset = ((link.layer,) if stacked else ()) + box[0]
            size = ((1,) if stacked else ()) + box[1]
            chunks[Chunk(link_key(link, layout), info, offset, size)] = ChunkRows(link, lo)
    return chunks


class Scratch:
    """Memory that one chunk after another is made in; fresh memory costs as much as the copy."""

    def __init__(self) -> None:
        """Has none yet."""
        self._memory = bytearray()

    def __reduce__(self) -> tuple[type[Scratch], tuple[()]]:
        return Scratch, ()  # another process has its own

    def take(self, chunk: Chunk) -> torch.Tensor:
        """Returns memory for the chunk; the tensor taken before it is overwritten."""
        if len(self._memory) < chunk.num_bytes:
            self._memory = bytearray(chunk.num_bytes)
        if not chunk.num_bytes:
            return torch.empty(chunk.size, dtype=chunk.info.dtype)
        part = memoryview(self._memory)[: chunk.num_bytes]
        return torch.frombuffer(part, dtype=chunk.info.dtype).view(chunk.size)


def fill_chunk(
    source: TensorSource, chunk: Chunk, place: ChunkRows, out: torch.Tensor, *, check_finite: bool
) -> torch.Tensor:
    """Returns `out` filled with the chunk.

    Raises: ValueError naming a tensor that has NaN or infinity.
    """
    link, rows_lo = place.link, place.rows_lo
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
        if check_finite and not part.isfinite().all():
            raise ValueError(
                f"{name} has NaN or infinite values in rows {piece.source_lo} to "
                f"{piece.source_lo + piece.rows - 1}"
                + ("" if chunk.info.dtype == source.tensors[name].dtype else f" as {out.dtype}")
                + "; correct the source, or leave --check-finite out"
            )
    return out


@dataclass(frozen=True)
class ImportWork:
    """Jobs in the order: `hashes` (file sizes are read as they are), `files`, `shards`."""

    source: TensorSource
    hashes: tuple[Path, ...]
    files: tuple[ChunkFile, ...]
    places: Mapping[Chunk, ChunkRows]
    shards: tuple[Shard, ...]
    checkpoint: Path
    kept: Path
    check_finite: bool
    scratch: Scratch

    def names(self) -> list[str]:
        """Returns a name for every job, in order."""
        hashes = [f"hash of {path.name}" for path in self.hashes]
        return [*hashes, *(file.name for file in self.files), *(s.name for s in self.shards)]

    def order(self) -> list[int]:
        """Returns the jobs so that a file is hashed just before it is converted, while cached."""
        number = {path.name: job for job, path in enumerate(self.hashes)}
        order: dict[int, None] = {}
        for job, file in enumerate(self.files, start=len(self.hashes)):
            for chunk in file.chunks:
                for name in self.places[chunk].link.sources:
                    order.setdefault(number.get(self.source.file_name(name), job))
            order.setdefault(job)
        rest = range(len(self.names()))
        return [*order, *(job for job in rest if job not in order)]

    def num_bytes(self, job: int) -> int:
        """Returns the size that a job reports to `advance`."""
        if job < len(self.hashes):
            return self.hashes[job].stat().st_size
        job -= len(self.hashes)
        if job < len(self.files):
            return self.files[job].num_bytes
        return self.shards[job - len(self.files)].num_bytes

    def run(self, job: int, advance: Callable[[int], None]) -> Any:
        """Does one job; returns a digest, the spans of a file's chunks, or nothing."""
        if job < len(self.hashes):
            return _hash(self.hashes[job], advance)
        job -= len(self.hashes)
        if job >= len(self.files):
            return self._copy(self.shards[job - len(self.files)], advance)
        file = self.files[job]

        def make_chunk(number: int) -> torch.Tensor:
            chunk = file.chunks[number]
            tensor = fill_chunk(
                self.source,
                chunk,
                self.places[chunk],
                self.scratch.take(chunk),
                check_finite=self.check_finite,
            )
            advance(tensor.nbytes)
            return tensor

        return write_chunks(self.checkpoint, file, make_chunk)

    def _copy(self, shard: Shard, advance: Callable[[int], None]) -> None:
        with ShardWriter(self.kept, shard) as writer:
            for name in shard.tensors:
                for lo, rows in self.source.iter_rows(name):
                    writer.write_rows(name, lo, rows)
                    advance(rows.nbytes)


def _hash(file: Path, advance: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    block = memoryview(bytearray(_HASH_BYTES))
    with open(file, "rb", buffering=0) as stream:
        while count := stream.readinto(block):
            digest.update(block[:count])
            advance(count)
    return digest.hexdigest()
