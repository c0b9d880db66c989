"""Every record of every file is read once, and a bad one is named by its line or row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_bp.data.sources import Record, cut_work, find_files, read_records

ROWS = [{"text": "x" * index, "n": index} for index in range(1, 40)]


def read_all(files: list[Path], piece_bytes: int, json_key: str = "text") -> list[Record]:
    pieces = list(cut_work(files, piece_bytes))
    return [r for piece in pieces for span in piece for r in read_records(span, json_key)]


def write_tables(folder: Path) -> list[Path]:
    """The rows as JSON lines, as Parquet in groups, as an Arrow stream and as an Arrow file."""
    pyarrow = pytest.importorskip("pyarrow", reason="reads Parquet and Arrow files")
    from pyarrow import parquet

    table = pyarrow.Table.from_pylist(ROWS)
    parquet.write_table(table, folder / "rows.parquet", row_group_size=7)
    for name, new in (("stream", pyarrow.ipc.new_stream), ("file", pyarrow.ipc.new_file)):
        path = str(folder / f"{name}.arrow")
        with pyarrow.OSFile(path, "wb") as sink, new(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=9)
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (folder / "rows.jsonl").write_text(lines)
    return sorted(folder.iterdir())


@pytest.mark.parametrize("piece_bytes", [1, 50, 1 << 20])
def test_every_kind_of_file_gives_the_same_records(tmp_path: Path, piece_bytes: int) -> None:
    files = write_tables(tmp_path)
    assert len(files) == 4
    for file in files:
        records = read_all([file], piece_bytes)
        assert [record.value for record in records] == [row["text"] for row in ROWS], file
        assert not any(record.reason for record in records)
        assert [r.value for r in read_all([file], piece_bytes, "")] == ROWS, "whole rows"


def test_rows_of_tables_are_counted_from_the_start_of_the_file(tmp_path: Path) -> None:
    for file in write_tables(tmp_path):
        records = read_all([file], 50, "missing")
        assert all(record.malformed for record in records)
        assert records[20].reason == "no text under key 'missing'"
        place = f"{file}:21" if file.suffix == ".jsonl" else f"{file}, row 20"
        assert records[20].where == place


def test_bad_lines_are_named_by_number_wherever_the_file_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "a"}\n\n{\n[1]\n{"text": 3}\n\xff\n{"text": ""}\n{"text": "b"}')
    for piece_bytes in (1, 5, 100):
        records = read_all([path], piece_bytes)
        assert [record.value for record in records if not record.reason] == ["a", "b"]
        assert [(r.where.rpartition(":")[2], r.reason) for r in records if r.malformed] == [
            ("3", "line is not JSON"),
            ("4", "line is not a JSON object"),
            ("5", "no text under key 'text'"),
            ("6", "not UTF-8"),
        ]
        assert [r.reason for r in records if r.reason and not r.malformed] == [
            "blank line",
            "empty",
        ]


def test_a_saved_data_set_stands_for_its_arrow_files(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    for file in write_tables(folder):
        if file.name != "stream.arrow":
            file.unlink()
    (folder / "cache-1.arrow").write_bytes(b"not data")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "stream.arrow"}]}))
    assert find_files([folder], "*.jsonl", ()) == [folder / "stream.arrow"]
    (tmp_path / "dataset_dict.json").write_text("{}")
    with pytest.raises(ValueError, match=r"holds the splits \['set'\]; give one of them"):
        find_files([tmp_path], "*.jsonl", ())
