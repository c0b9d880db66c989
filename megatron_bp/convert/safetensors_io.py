"""Reads and writes directories of safetensors files by row ranges, with memory for one range only.

Plain reads instead of memory mapping, so resident memory is what the caller allocates. Owns the
file format (8-byte header length, JSON header, data) and sharding; knows no model. Checked against
the `safetensors` library by tests/convert/test_safetensors_io.py.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from megatron_bp.convert.link import TensorInfo

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
        """Fills `out` with rows [lo, lo + len(out)) of the tensor; `out` must have its dtype.

        Rows may be folded: dim 0 of `out` then counts the first dims flattened, and `lo` too.
        """
        info, place = self.tensors[name], self._places[name]
        row_bytes = math.prod(out.shape[1:]) * info.dtype.itemsize
        assert out.dtype == info.dtype, f"{name} is {info.dtype}, memory is {out.dtype}"
        assert out.is_contiguous(), f"{name}: memory must be contiguous"
        assert 0 <= lo * row_bytes <= info.num_bytes - out.nbytes, f"{name}: rows out of range"
        memory = _bytes_of(out)
        with open(place.file, "rb", buffering=0) as stream:
            stream.seek(place.offset + lo * row_bytes)
            _read_exactly(stream, memory, place.file)

    def file_name(self, name: str) -> str:
        """Returns the name of the file that holds the tensor."""
        return self._places[name].file.name

    def iter_rows(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields (first row, rows) blocks of at most 64 MiB in order; a scalar as it is."""
        info = self.tensors[name]
        if not info.shape:
            out = torch.empty((), dtype=info.dtype)
            self.read_rows_into(name, 0, out)
            yield 0, out
            return
        step = max(1, _READ_BYTES // max(1, info.row_bytes))
        for lo in range(0, info.shape[0], step):
            out = torch.empty((min(step, info.shape[0] - lo), *info.shape[1:]), dtype=info.dtype)
            self.read_rows_into(name, lo, out)
            yield lo, out


@dataclass(frozen=True)
class Shard:
    """One safetensors file to be written: its name and its tensors in order."""

    name: str
    tensors: Mapping[str, TensorInfo]

    @property
    def num_bytes(self) -> int:
        """The bytes of its tensors."""
        return sum(info.num_bytes for info in self.tensors.values())


def plan_shards(tensors: Mapping[str, TensorInfo], max_bytes: int) -> tuple[Shard, ...]:
    """Returns files of at most `max_bytes` (or one tensor) that hold the tensors in order."""
    groups: list[dict[str, TensorInfo]] = [{}] if tensors else []
    used = 0
    for name, info in tensors.items():
        if groups[-1] and used + info.num_bytes > max_bytes:
            groups.append({})
            used = 0
        groups[-1][name] = info
        used += info.num_bytes
    return tuple(
        Shard(_shard_name(number, len(groups)), group) for number, group in enumerate(groups, 1)
    )


def write_index(directory: Path, shards: Sequence[Shard]) -> None:
    """Writes the index that several shards need; nothing for one."""
    if len(shards) < 2:
        return
    files = {name: shard.name for shard in shards for name in shard.tensors}
    index = {
        "metadata": {"total_size": sum(shard.num_bytes for shard in shards)},
        "weight_map": dict(sorted(files.items())),
    }
    (directory / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


class ShardWriter:
    """Writes one shard by row ranges in any order; `close` proves completeness."""

    def __init__(self, directory: Path, shard: Shard) -> None:
        """Creates the file at full size under an unfinished name, which `close` puts right."""
        self._path = directory / shard.name
        self._tensors = shard.tensors
        self._bytes_left = {name: info.num_bytes for name, info in shard.tensors.items()}
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, info in shard.tensors.items():
            span = [offset, offset + info.num_bytes]
            shape = list(info.shape)
            entry = {"dtype": NAME_OF_DTYPE[info.dtype], "shape": shape, "data_offsets": span}
            header[name] = entry
            offset += info.num_bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        data = 8 + len(text)
        self._offsets = {name: data + header[name]["data_offsets"][0] for name in shard.tensors}
        stream = open(self._unfinished(), "wb", buffering=0)  # noqa: SIM115 - closed by close()
        self._stream = stream
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(data + offset)

    def _unfinished(self) -> Path:
        return self._path.with_name(self._path.name + ".unfinished")

    def info(self, name: str) -> TensorInfo:
        """Returns shape and dtype of a tensor of this shard."""
        return self._tensors[name]

    def write_rows(self, name: str, lo: int, rows: torch.Tensor) -> None:
        """Writes rows [lo, lo + len(rows)) of dim 0 of the tensor; a scalar is one row.

        Rows may be folded: dim 0 then counts the first dims flattened, and `lo` too.
        """
        info = self._tensors[name]
        tail = rows.shape[1:]
        assert rows.dtype == info.dtype, f"{name} is {info.dtype}, rows are {rows.dtype}"
        assert info.shape[len(info.shape) - len(tail) :] == tail, f"{name}: rows of another width"
        row_bytes = math.prod(tail) * info.dtype.itemsize
        self._stream.seek(self._offsets[name] + lo * row_bytes)
        memory = _bytes_of(rows.contiguous())
        self._bytes_left[name] -= len(memory)
        while memory:
            written = self._stream.write(memory)
            memory = memory[written:]

    def close(self) -> None:
        """Puts the name right. Raises: AssertionError when a row is missing, or came twice."""
        wrong = [name for name, left in self._bytes_left.items() if left != 0]
        assert not wrong, f"{len(wrong)} tensors were not written exactly once: {wrong[:4]}"
        self._stream.close()
        os.replace(self._unfinished(), self._path)

    def __enter__(self) -> ShardWriter:
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
            self._stream.close()


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
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        if twice:
            raise ValueError(f"{file} names {twice[0]} twice")
        return dict(pairs)

    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        data_bytes = file.stat().st_size - 8 - length
        if length > _MAX_HEADER_BYTES or data_bytes < 0:
            raise ValueError(f"{file} is not a whole safetensors file; it is truncated or damaged")
        text = stream.read(length)
    try:
        header = json.loads(text, object_pairs_hook=unique)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise ValueError(f"{file} is not a whole safetensors file; its header is damaged") from None
    end = 0
    header.pop("__metadata__", None)
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        if entry["dtype"] not in DTYPE_OF_NAME:
            raise ValueError(f"{file}: {name} has dtype {entry['dtype']}, which is not supported")
        info = TensorInfo(tuple(entry["shape"]), DTYPE_OF_NAME[entry["dtype"]])
        lo, hi = entry["data_offsets"]
        if hi - lo != info.num_bytes or hi > data_bytes:
            raise ValueError(f"{file} is truncated or damaged at {name}")
        if lo != end:
            raise ValueError(f"{file} is damaged: {name} overlaps or leaves a gap")
        end = hi
        yield name, info, 8 + length + lo


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
