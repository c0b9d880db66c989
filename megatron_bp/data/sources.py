"""Finds input files, cuts them into pieces of work, and reads the records of a piece.

Text files are one record each; JSON lines, Parquet files and data sets that Hugging Face's
`save_to_disk` wrote (Arrow files, read with pyarrow) hold many. Knows no tokenizer. Specified by
tests/data/test_sources.py and tests/tools/test_preprocess.py.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

JSON_LINES = (".jsonl", ".ndjson")
TABLES = (".parquet", ".arrow")
EMPTY, BLANK, NOT_UTF8 = "empty", "blank line", "not UTF-8"


@dataclass(frozen=True)
class Span:
    """A part of a file: a text file, the JSON lines that start in bytes [lo, hi), or the row groups
    (Parquet) or record batches (Arrow) [lo, hi). `weight` is its size in bytes."""

    path: str
    lo: int
    hi: int
    weight: int


@dataclass(frozen=True)
class Record:
    """One input: its value (a text, or columns by name), or the reason why there is none.

    A malformed record breaks the rules of its file; others are just left out. `at` is the byte at
    which its line starts, or its row in a table; -1 for a whole file.
    """

    path: str
    at: int
    value: Any = ""
    reason: str = ""
    malformed: bool = False

    @property
    def where(self) -> str:
        """Path and line (counted from 1) or row (from 0); reads the file up to there."""
        if Path(self.path).suffix in JSON_LINES:
            with Path(self.path).open("rb") as file:
                line = file.read(self.at).count(b"\n") + 1
            return f"{self.path}:{line}"
        return self.path if self.at < 0 else f"{self.path}, row {self.at}"


def find_files(inputs: Sequence[Path], pattern: str, excluded: Sequence[str]) -> list[Path]:
    """The files named, and those below named directories that match; sorted per input, each once.

    A directory that `save_to_disk` wrote stands for its Arrow files.
    Raises: ValueError when an input does not exist or nothing is left.
    """
    missing = [str(path) for path in inputs if not path.exists()]
    if missing:
        raise ValueError(f"inputs={missing} do not exist; give files or directories.")
    found: dict[Path, None] = {}
    for path in inputs:
        for file in _files_of(path, pattern):
            if file.is_file() and not any(fnmatch.fnmatch(str(file), rule) for rule in excluded):
                found[file.absolute()] = None
    if not found:
        raise ValueError(
            f"inputs={[str(path) for path in inputs]} hold no file for glob={pattern!r} and "
            f"exclude={list(excluded)}; name files, or a glob that matches, such as '*.py'."
        )
    return list(found)


def _files_of(path: Path, pattern: str) -> list[Path]:
    if not path.is_dir():
        return [path]
    if (path / "dataset_dict.json").exists():
        splits = sorted(child.name for child in path.iterdir() if (child / "state.json").exists())
        raise ValueError(
            f"input={path} holds the splits {splits}; give one of them, such as "
            f"{path / (splits[0] if splits else 'train')}."
        )
    if (path / "state.json").exists():
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        return [path / entry["filename"] for entry in state["_data_files"]]
    return sorted(path.rglob(pattern))


def cut_work(files: Iterable[Path], piece_bytes: int) -> Iterator[tuple[Span, ...]]:
    """Pieces of about `piece_bytes`: several small files, or a part of a file of many records."""
    piece: list[Span] = []
    weight = 0
    for span in (span for file in files for span in _spans_of(file, piece_bytes)):
        piece.append(span)
        weight += span.weight
        if weight >= piece_bytes:
            yield tuple(piece)
            piece, weight = [], 0
    if piece:
        yield tuple(piece)


def _spans_of(file: Path, piece_bytes: int) -> Iterator[Span]:
    size = file.stat().st_size
    if file.suffix in JSON_LINES:
        for lo in range(0, max(size, 1), piece_bytes):
            hi = min(lo + piece_bytes, size)
            yield Span(str(file), lo, hi, hi - lo)
    elif file.suffix in TABLES:
        sizes = _group_sizes(file)
        for index, group in enumerate(sizes):
            yield Span(str(file), index, index + 1, group * size // max(sum(sizes), 1))
    else:
        yield Span(str(file), 0, size, size)


def read_records(span: Span, json_key: str) -> Iterator[Record]:
    """The records of the span. With a `json_key` the value is the text under it, else columns.

    A file of no known suffix is one text, whatever `json_key` is.
    """
    path = Path(span.path)
    if path.suffix in JSON_LINES:
        records = _json_lines(span)
    elif path.suffix in TABLES:
        records = _table_rows(span)
    else:
        text, reason = _decode(path.read_bytes())
        yield Record(span.path, -1, text, reason)
        return
    for record in records:
        if record.reason or not json_key:
            yield record
            continue
        text = record.value.get(json_key)
        if isinstance(text, str):
            yield replace(record, value=text, reason="" if text else EMPTY)
        else:
            yield replace(record, reason=f"no text under key {json_key!r}", malformed=True)


def _json_lines(span: Span) -> Iterator[Record]:
    with Path(span.path).open("rb") as lines:
        lines.seek(max(span.lo - 1, 0))
        if span.lo > 0:
            lines.readline()  # a line belongs to the span in which it starts
        while lines.tell() < span.hi:
            at = lines.tell()
            value, reason = _parse(lines.readline())
            malformed = bool(reason) and reason != BLANK
            yield Record(span.path, at, value, reason, malformed)


def _parse(raw: bytes) -> tuple[Any, str]:
    line, reason = _decode(raw)
    if reason:
        return "", reason
    if not line.strip():
        return "", BLANK
    try:
        value = json.loads(line)
    except json.JSONDecodeError:
        return "", "line is not JSON"
    return (value, "") if isinstance(value, dict) else ("", "line is not a JSON object")


def _decode(raw: bytes) -> tuple[str, str]:
    """(text, "") with its newlines as they are, or ("", reason)."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return "", NOT_UTF8
    return (text, "") if text else ("", EMPTY)


def _group_sizes(file: Path) -> list[int]:
    """Bytes of each row group or record batch; at least 1."""
    if file.suffix == ".arrow":
        return [max(batch.nbytes, 1) for batch in _batches(file)]
    from pyarrow import parquet

    metadata = parquet.ParquetFile(file).metadata
    return [
        max(metadata.row_group(index).total_byte_size, 1)
        for index in range(metadata.num_row_groups)
    ]


def _table_rows(span: Span) -> Iterator[Record]:
    path = Path(span.path)
    if path.suffix == ".arrow":
        batches = list(_batches(path))
        before = sum(batch.num_rows for batch in batches[: span.lo])
        tables: list[Any] = batches[span.lo : span.hi]
    else:
        from pyarrow import parquet

        file = parquet.ParquetFile(path)
        before = sum(file.metadata.row_group(group).num_rows for group in range(span.lo))
        tables = [file.read_row_groups(list(range(span.lo, span.hi)))]
    for value in (row for table in tables for row in table.to_pylist()):
        yield Record(span.path, before, value)
        before += 1


def _batches(file: Path) -> Iterator[Any]:
    """Record batches of an Arrow file in the stream or in the file format."""
    import pyarrow

    with pyarrow.memory_map(str(file)) as mapped:
        try:
            yield from pyarrow.ipc.open_stream(mapped)
        except pyarrow.ArrowInvalid:
            mapped.seek(0)
            reader = pyarrow.ipc.open_file(mapped)
            yield from (reader.get_batch(index) for index in range(reader.num_record_batches))
