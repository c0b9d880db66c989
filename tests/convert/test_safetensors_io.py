"""Specifies megatron_bp/convert/safetensors_io.py against the safetensors library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_bp.convert.link import TensorInfo
from megatron_bp.convert.safetensors_io import (
    INDEX_NAME,
    SafetensorsDir,
    Shard,
    ShardWriter,
    plan_shards,
    write_index,
)
from tests.convert.tiny_models import read_hf, same_bits

TENSORS = {
    "a": torch.randn(7, 3).bfloat16(),
    "b": torch.randn(5),
    "c": torch.randn(4, 6).half(),
    "empty": torch.empty(0, 3),
    "stack": torch.randn(3, 2, 4),
    "scalar": torch.tensor(2.5),
}


def _write(directory: Path, max_shard_bytes: int) -> None:
    infos = {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in TENSORS.items()}
    shards = plan_shards(infos, max_shard_bytes)
    write_index(directory, shards)
    for shard in shards:
        with ShardWriter(directory, shard) as writer:
            assert not (directory / shard.name).exists()
            for name in shard.tensors:
                rows = TENSORS[name]
                rows = rows.flatten(0, -2) if rows.dim() > 2 else rows  # stacks may be folded
                for lo in reversed(range(len(rows) if rows.dim() else 1)):  # any order
                    writer.write_rows(name, lo, rows[lo : lo + 1] if rows.dim() else rows)


@pytest.mark.parametrize("max_shard_bytes", [10**9, 50])
def test_written_files_read_back_the_same_with_the_library(tmp_path: Path, max_shard_bytes: int):
    _write(tmp_path, max_shard_bytes)
    found = read_hf(tmp_path)
    assert found.keys() == TENSORS.keys()
    assert all(same_bits(found[name], TENSORS[name]) for name in TENSORS)
    names = sorted(path.name for path in tmp_path.iterdir())
    if max_shard_bytes > 10**6:
        assert names == ["model.safetensors"]
    else:
        index = json.loads((tmp_path / INDEX_NAME).read_text())
        assert index["weight_map"].keys() == TENSORS.keys()
        assert len(names) == len(set(index["weight_map"].values())) + 1 > 2


def test_row_ranges_of_library_files_are_read(tmp_path: Path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    source = SafetensorsDir(tmp_path)
    out = torch.empty(3, 3, dtype=torch.bfloat16)
    source.read_rows_into("a", 2, out)
    assert same_bits(out, TENSORS["a"][2:5])
    assert source.tensors["c"] == TensorInfo((4, 6), torch.float16)


def test_a_sharded_directory_written_here_is_read_here(tmp_path: Path):
    _write(tmp_path, 50)
    source = SafetensorsDir(tmp_path)
    for name, tensor in TENSORS.items():
        blocks = [rows for _, rows in source.iter_rows(name)]
        assert same_bits(torch.cat(blocks) if tensor.dim() and blocks else tensor, tensor)
    assert torch.equal(next(source.iter_rows("scalar"))[1], TENSORS["scalar"])
    folded = torch.empty(3, 4)
    source.read_rows_into("stack", 2, folded)
    assert torch.equal(folded, TENSORS["stack"].view(6, 4)[2:5])


def test_a_row_not_written_is_an_error(tmp_path: Path):
    shard = Shard("model.safetensors", {"a": TensorInfo((2, 3), torch.float32)})
    writer = ShardWriter(tmp_path, shard)
    writer.write_rows("a", 0, torch.zeros(1, 3))
    with pytest.raises(AssertionError, match="not written exactly once"):
        writer.close()
    assert not (tmp_path / "model.safetensors").exists()


def test_a_truncated_file_is_refused(tmp_path: Path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-4])
    with pytest.raises(ValueError, match="truncated or damaged"):
        SafetensorsDir(tmp_path)


def test_damaged_headers_are_refused_by_name(tmp_path: Path):
    file = tmp_path / "model.safetensors"
    entry = '"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    for header, text in (
        ("{" + entry + "," + entry + "}", "names a twice"),
        ("{" + entry + "," + entry.replace('"a"', '"b"') + "}", "b overlaps or leaves a gap"),
        ("{" + entry.replace("F32", "F8_E4M3") + "}", "a has dtype F8_E4M3, which is not"),
        ("{" + entry, "is not a whole safetensors file"),
    ):
        file.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(4))
        with pytest.raises(ValueError, match=text):
            SafetensorsDir(tmp_path)


def test_an_index_that_disagrees_with_its_files_is_refused(tmp_path: Path):
    _write(tmp_path, 50)
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    index["weight_map"]["ghost"] = index["weight_map"]["a"]
    (tmp_path / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(ValueError, match="disagree on 1 tensors: ghost"):
        SafetensorsDir(tmp_path)
    del index["weight_map"]["ghost"]
    stray = index["weight_map"].pop("a")
    (tmp_path / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=rf"has .*{stray}.*, which {INDEX_NAME} does not list"):
        SafetensorsDir(tmp_path)
    (tmp_path / stray).unlink()
    index["weight_map"]["a"] = "gone.safetensors"
    (tmp_path / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"names \['gone\.safetensors'\], which"):
        SafetensorsDir(tmp_path)


def test_an_empty_directory_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"no \*\.safetensors file"):
        SafetensorsDir(tmp_path)
