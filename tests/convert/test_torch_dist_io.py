"""Specifies megatron_bp/convert/torch_dist_io.py and plain_pickle.py against torch's own loader."""

from __future__ import annotations

import argparse
import enum
import io
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron_bp.convert.link import TensorInfo
from megatron_bp.convert.plain_pickle import Opaque, load_plain
from megatron_bp.convert.torch_dist_io import (
    COMMON_STATE,
    Chunk,
    TorchDistReader,
)
from megatron_bp.convert.torch_dist_writer import write_torch_dist

STACKED = torch.randn(3, 8, 4)
TABLE = torch.randn(600_000, 1)  # above the small-file limit


class Color(enum.Enum):
    """A class that a checkpoint may mention."""

    RED = 1


def _boxes(tensor: torch.Tensor, key: str, splits: tuple[int, ...]) -> list[Chunk]:
    """Cuts dim i into `splits[i]` equal parts."""
    sizes = [size // parts for size, parts in zip(tensor.shape, splits, strict=True)]
    info = TensorInfo(tuple(tensor.shape), tensor.dtype)
    grid = torch.cartesian_prod(*(torch.arange(parts) for parts in splits)).reshape(-1, len(splits))
    return [
        Chunk(key, info, tuple(int(i) * s for i, s in zip(box, sizes, strict=True)), tuple(sizes))
        for box in grid
    ]


def _write(directory: Path, splits: tuple[int, int, int]) -> None:
    data = {"stacked": STACKED, "table": TABLE}

    def make(chunk: Chunk) -> torch.Tensor:
        box = zip(chunk.offset, chunk.size, strict=True)
        return data[chunk.key][tuple(slice(lo, lo + n) for lo, n in box)].clone()

    chunks = _boxes(STACKED, "stacked", splits) + _boxes(TABLE, "table", (2, 1))
    state = {"args": argparse.Namespace(color=Color.RED, n=3, dtype=torch.bfloat16), "iteration": 5}
    write_torch_dist(
        directory, chunks, {COMMON_STATE: state, "x._extra_state/shard_0_1": None}, make
    )


@pytest.mark.parametrize("splits", [(3, 1, 1), (3, 2, 1), (3, 1, 2), (1, 2, 2)])
def test_every_layer_reads_back_whatever_the_chunks(tmp_path: Path, splits: tuple[int, int, int]):
    _write(tmp_path, splits)
    reader = TorchDistReader(tmp_path)
    for layer in range(3):
        blocks = list(reader.iter_rows("stacked", layer))
        assert [lo for lo, _ in blocks] == [i * (8 // len(blocks)) for i in range(len(blocks))]
        assert torch.equal(torch.cat([rows for _, rows in blocks]), STACKED[layer])
    assert torch.equal(torch.cat([rows for _, rows in reader.iter_rows("table")]), TABLE)
    assert reader.objects == {COMMON_STATE, "x._extra_state/shard_0_1"}


def test_torch_loads_what_was_written(tmp_path: Path):
    _write(tmp_path, (3, 2, 1))
    state = {"stacked": torch.empty_like(STACKED), "table": torch.empty_like(TABLE)}
    dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)
    assert torch.equal(state["stacked"], STACKED)
    assert torch.equal(state["table"], TABLE)
    # One file for small chunks, one for each of the two large ones, one for the objects.
    assert len(list(tmp_path.glob("*.distcp"))) == 4
    marker = (tmp_path / "metadata.json").read_text()
    assert marker == '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'


def test_common_state_is_read_without_importing_its_classes(tmp_path: Path):
    _write(tmp_path, (3, 1, 1))
    state = TorchDistReader(tmp_path).common_state()
    assert state["iteration"] == 5
    assert state["args"].n == 3
    assert state["args"].dtype == torch.bfloat16
    assert isinstance(state["args"].color, Opaque)


def test_loading_runs_no_code_that_the_file_names(tmp_path: Path):
    class Attack:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "touched",))

    stream = io.BytesIO()
    torch.save({"a": Attack(), "tensor": torch.arange(3)}, stream)
    stream.seek(0)
    loaded = load_plain(stream)
    assert torch.equal(loaded["tensor"], torch.arange(3))
    assert not (tmp_path / "touched").exists()


def test_a_directory_without_marker_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="is not a torch_dist checkpoint"):
        TorchDistReader(tmp_path)


def test_a_part_of_a_storage_is_not_written_with_the_rest(tmp_path: Path):
    # torch.save writes whole storages, so a view would put foreign data into the file.
    chunk = Chunk("x", TensorInfo((2, 4), torch.float32), (0, 0), (2, 4))
    with pytest.raises(AssertionError, match="x: part of a storage"):
        write_torch_dist(tmp_path, [chunk], {}, lambda _: STACKED[0, :2])
