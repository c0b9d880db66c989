"""Reads and writes directories of safetensors files by row ranges, with memory for one range only.

Plain reads instead of memory mapping, so resident memory is what the caller allocates. Owns the
file format (8-byte header length, JSON header, data) and sharding; knows no model. Checked against
the `safetensors` library by tests/convert/test_safetensors_io.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch

from megatron_bp.convert.plan import TensorInfo

INDEX_NAME = "model.safetensors.index.json"
DTYPE_OF_NAME = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAME_OF_DTYPE = {dtype: name for name, dtype in DTYPE_OF_NAME.items()}
_MAX_HEADER_BYTES = 100_000_000
_READ_BYTES = 64 * 2**20


@dataclass(frozen=True)
class _Place:
    file: Path
    offset: int


class SafetensorsDir:
    """The tensors of a Hugging Face directory; reads rows straight into given memory."""

    def __init__(self, directory: Path) -> None:
        """Reads only headers.

        Raises: ValueError when there are no safetensors files, or an index and its files disagree.
        """
        self.files = _list_files(directory)
        self.tensors: dict[str, TensorInfo] = {}
        self._places: dict[str, _Place] = {}
        for file in self.files:
            for name, info, offset in _read_header(file):
                if name in self.tensors:
                    raise ValueError(f"{name} is in both {self._places[name].file} and {file}")
                self.tensors[name] = info
                self._places[name] = _Place(file, offset)
        _check_index(directory, self._places)

    def read_rows_into(self, name: str, lo: int, out: torch.Tensor) -> None:
        """Fills `out` with rows [lo, lo + len(out)) of the tensor; `out` must have its dtype."""
        info, place = self.tensors[name], self._places[name]
        assert out.dtype == info.dtype, f"{name} is {info.dtype}, memory is {out.dtype}"
        assert out.is_contiguous(), f"{name}: memory must be contiguous"
        assert 0 <= lo <= info.shape[0] - out.shape[0], f"{name}: rows out of range"
        memory = _bytes_of(out)
        with open(place.file, "rb", buffering=0) as stream:
            stream.seek(place.offset + lo * info.row_bytes)
            _read_exactly(stream, memory, place.file)

    def iter_rows(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields (first row, rows) blocks of at most 64 MiB in order."""
        info = self.tensors[name]
        step = max(1, _READ_BYTES // max(1, info.row_bytes))
        for lo in range(0, info.shape[0], step):
            out = torch.empty((min(step, info.shape[0] - lo), *info.shape[1:]), dtype=info.dtype)
            self.read_rows_into(name, lo, out)
            yield lo, out


class SafetensorsWriter:
    """Writes tensors of known shape by row ranges in any order; `close` proves completeness."""

    def __init__(
        self, directory: Path, tensors: Mapping[str, TensorInfo], max_shard_bytes: int
    ) -> None:
        """Creates the files at full size. Shards hold whole tensors, in the order of `tensors`."""
        self._tensors = dict(tensors)
        self._rows_left = {name: info.shape[0] for name, info in tensors.items()}
        self._places: dict[str, _Place] = {}
        self._streams: dict[Path, BinaryIO] = {}
        shards = _split_shards(tensors, max_shard_bytes)
        for number, names in enumerate(shards, start=1):
            file = directory / _shard_name(number, len(shards))
            self._create(file, names)
        if len(shards) > 1:
            self._write_index(directory / INDEX_NAME)

    def _create(self, file: Path, names: list[str]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name in names:
            info = self._tensors[name]
            header[name] = {
                "dtype": NAME_OF_DTYPE[info.dtype],
                "shape": list(info.shape),
                "data_offsets": [offset, offset + info.num_bytes],
            }
            offset += info.num_bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        stream = open(file, "w+b", buffering=0)  # noqa: SIM115 - closed by close()
        self._streams[file] = stream
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + offset)
        for name in names:
            start = header[name]["data_offsets"][0]
            self._places[name] = _Place(file, 8 + len(text) + start)

    def _write_index(self, path: Path) -> None:
        index = {
            "metadata": {"total_size": sum(info.num_bytes for info in self._tensors.values())},
            "weight_map": {name: place.file.name for name, place in sorted(self._places.items())},
        }
        path.write_text(json.dumps(index, indent=2) + "\n")

    def write_rows(self, name: str, lo: int, rows: torch.Tensor) -> None:
        """Writes rows [lo, lo + len(rows)) of the tensor."""
        info, place = self._tensors[name], self._places[name]
        assert rows.dtype == info.dtype, f"{name} is {info.dtype}, rows are {rows.dtype}"
        assert rows.shape[1:] == info.shape[1:], f"{name}: rows of another width"
        stream = self._streams[place.file]
        stream.seek(place.offset + lo * info.row_bytes)
        memory = _bytes_of(rows.contiguous())
        while memory:
            written = stream.write(memory)
            memory = memory[written:]
        self._rows_left[name] -= rows.shape[0]

    def close(self) -> None:
        """Flushes to disk. Raises: AssertionError when a row was not written, or written twice."""
        wrong = [name for name, rows in self._rows_left.items() if rows != 0]
        assert not wrong, f"{len(wrong)} tensors were not written exactly once: {wrong[:4]}"
        for stream in self._streams.values():
            os.fsync(stream.fileno())
        self._close_streams()

    def _close_streams(self) -> None:
        for stream in self._streams.values():
            stream.close()

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._close_streams()


def _list_files(directory: Path) -> tuple[Path, ...]:
    index = directory / INDEX_NAME
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        files = tuple(directory / name for name in names)
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise ValueError(f"{index} names {absent[:4]}, which {directory} does not have")
        # Mistral repositories carry their own format's copy of the same weights.
        stray = [
            path.name
            for path in sorted(directory.glob("*.safetensors"))
            if path.name not in names and not path.name.startswith("consolidated")
        ]
        if stray:
            raise ValueError(
                f"{directory} has {stray[:4]}, which {index.name} does not list; "
                f"remove what does not belong to the model"
            )
        return files
    files = tuple(sorted(directory.glob("*.safetensors")))
    if not files:
        raise ValueError(f"{directory} has no *.safetensors file; give a Hugging Face model folder")
    if len(files) > 1:
        raise ValueError(f"{directory} has {len(files)} safetensors files but no {INDEX_NAME}")
    return files


def _check_index(directory: Path, places: Mapping[str, _Place]) -> None:
    index = directory / INDEX_NAME
    if not index.is_file():
        return
    listed = json.loads(index.read_text())["weight_map"]
    stored = {name: place.file.name for name, place in places.items()}
    wrong = sorted(
        name for name in listed.keys() | stored.keys() if listed.get(name) != stored.get(name)
    )
    if wrong:
        raise ValueError(
            f"{index} and the files beside it disagree on {len(wrong)} tensors: "
            f"{', '.join(wrong[:4])}"
        )


def _read_header(file: Path) -> Iterator[tuple[str, TensorInfo, int]]:
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        data_bytes = file.stat().st_size - 8 - length
        if length > _MAX_HEADER_BYTES or data_bytes < 0:
            raise ValueError(f"{file} is not a whole safetensors file")
        header = json.loads(stream.read(length))
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in DTYPE_OF_NAME:
            raise ValueError(f"{file}: {name} has dtype {entry['dtype']}, which is not supported")
        info = TensorInfo(tuple(entry["shape"]), DTYPE_OF_NAME[entry["dtype"]])
        lo, hi = entry["data_offsets"]
        if hi - lo != info.num_bytes or hi > data_bytes:
            raise ValueError(f"{file} is truncated or damaged at {name}")
        yield name, info, 8 + length + lo


def _split_shards(tensors: Mapping[str, TensorInfo], max_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    used = 0
    for name, info in tensors.items():
        if shards[-1] and used + info.num_bytes > max_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += info.num_bytes
    return shards


def _shard_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy()).cast("B")


def _read_exactly(stream: Any, memory: memoryview, file: Path) -> None:
    while memory:
        count = stream.readinto(memory)
        if not count:
            raise ValueError(f"{file} ended early; it is truncated")
        memory = memory[count:]
