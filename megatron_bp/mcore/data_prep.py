"""Turns text into Megatron's indexed dataset: one document per file or JSON line.

Owns the cutting of inputs into pieces of work, encoding in worker processes, counting, and
publishing PREFIX.bin and PREFIX.idx in one step. Must not know objectives, masks or models.
Documents keep the order of the inputs, so the result does not depend on the number of workers.
Specified by tests/tools/test_preprocess.py.
"""

from __future__ import annotations

import fnmatch
import json
import multiprocessing
import os
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

PIECE_BYTES = 1 << 20  # large enough to hide the hand-over, small enough to keep workers level
JSON_LINES = (".jsonl", ".ndjson")


@dataclass(frozen=True)
class LoadedTokenizer:
    """A tokenizer as its tokenizer.json, the number of its ids, the id that ends a document."""

    serialized: str
    num_ids: int
    eos_id: int


@dataclass(frozen=True)
class Encoding:
    """How text becomes tokens. `eos_id` -1 appends nothing."""

    tokenizer_file: str
    eos_id: int
    json_key: str
    parse_special: bool
    drop_lossy: bool


@dataclass(frozen=True)
class Span:
    """A text file, or the lines of a JSON-lines file that start in bytes [lo, hi)."""

    path: str
    lo: int
    hi: int


@dataclass(frozen=True)
class Encoded:
    """The documents of one piece of work, back to back, and what was left out and why."""

    tokens: np.ndarray
    lengths: tuple[int, ...]
    num_bytes: int
    num_lossy: int
    dropped: Counter[str]


@dataclass(frozen=True)
class Summary:
    """What a dataset holds. Units: documents, tokens (end tokens included), bytes of kept text."""

    lengths: tuple[int, ...]
    num_bytes: int
    num_lossy: int
    dropped: dict[str, int]

    @property
    def num_tokens(self) -> int:
        """All tokens of all documents."""
        return sum(self.lengths)

    def histogram(self) -> list[tuple[int, int, int]]:
        """(lo, hi, documents with lo <= length < hi) for powers of two, empty ends left out."""
        powers = Counter(length.bit_length() for length in self.lengths)
        span = range(min(powers, default=0), max(powers, default=-1) + 1)
        return [(1 << power >> 1, 1 << power, powers[power]) for power in span]


def load_tokenizer(directory: Path, eos_token: str) -> LoadedTokenizer:
    """The tokenizer of a Hugging Face directory; `eos_token` "" takes the directory's own.

    Raises: ValueError when the directory does not load, is slow only, or lacks the token.
    """
    from transformers import AutoTokenizer

    if not directory.is_dir():
        raise ValueError(f"tokenizer={directory} is not a directory; give a model directory.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        serialized = tokenizer.backend_tokenizer.to_str()
    except Exception as error:  # the library raises many types for the same mistake
        first_line = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"tokenizer={directory} does not load as a fast tokenizer "
            f"({type(error).__name__}: {first_line}); it needs tokenizer.json and "
            "tokenizer_config.json, for example as tools/extract_smollm2.py writes them."
        ) from error
    token = eos_token or tokenizer.eos_token or ""
    eos_id = tokenizer.get_vocab().get(token, -1)
    if eos_token and eos_id < 0:
        raise ValueError(f"eos_token={eos_token!r} is not in the vocabulary of {directory}.")
    return LoadedTokenizer(serialized, max(tokenizer.get_vocab().values()) + 1, eos_id)


def find_files(inputs: Sequence[Path], pattern: str, excluded: Sequence[str]) -> list[Path]:
    """The files named, and those below named directories that match; sorted per input, each once.

    Raises: ValueError when an input does not exist or nothing is left.
    """
    missing = [str(path) for path in inputs if not path.exists()]
    if missing:
        raise ValueError(f"inputs={missing} do not exist; give files or directories.")
    found: dict[Path, None] = {}
    for path in inputs:
        for file in sorted(path.rglob(pattern)) if path.is_dir() else [path]:
            if file.is_file() and not any(fnmatch.fnmatch(str(file), rule) for rule in excluded):
                found[file.absolute()] = None
    if not found:
        raise ValueError(
            f"inputs={[str(path) for path in inputs]} hold no file for glob={pattern!r} and "
            f"exclude={list(excluded)}; name files, or a glob that matches, such as '*.py'."
        )
    return list(found)


def cut_work(files: Iterable[Path], piece_bytes: int) -> Iterator[tuple[Span, ...]]:
    """Pieces of about `piece_bytes`: several small files, or a part of a JSON-lines file."""
    piece: list[Span] = []
    weight = 0
    for file in files:
        size = file.stat().st_size
        step = piece_bytes if file.suffix in JSON_LINES else max(size, 1)
        for lo in range(0, max(size, 1), step):
            piece.append(Span(str(file), lo, min(lo + step, size)))
            weight += piece[-1].hi - lo
            if weight >= piece_bytes:
                yield tuple(piece)
                piece, weight = [], 0
    if piece:
        yield tuple(piece)


def read_documents(span: Span, json_key: str) -> Iterator[tuple[str, str]]:
    """(text, "") for each document of the span, or ("", reason) for one that cannot be used."""
    path = Path(span.path)
    if path.suffix not in JSON_LINES:
        yield decode_utf8(path.read_bytes())
        return
    with path.open("rb") as lines:
        lines.seek(max(span.lo - 1, 0))
        if span.lo > 0:
            lines.readline()  # a line belongs to the span in which it starts
        while lines.tell() < span.hi:
            text, reason = decode_utf8(lines.readline())
            yield ("", reason) if reason else read_json_line(text, json_key)


def decode_utf8(raw: bytes) -> tuple[str, str]:
    """(text, "") with its newlines as they are, or ("", reason)."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return "", "not UTF-8"
    return (text, "") if text else ("", "empty")


def read_json_line(line: str, json_key: str) -> tuple[str, str]:
    """(text under the key, "") or ("", reason)."""
    if not line.strip():
        return "", "blank line"
    try:
        value = json.loads(line)
    except json.JSONDecodeError:
        return "", "line is not JSON"
    text = value.get(json_key) if isinstance(value, dict) else ""
    if not isinstance(text, str):
        return "", f"no text under key {json_key!r}"
    return (text, "") if text else ("", "empty")


@lru_cache(maxsize=1)
def load_backend(tokenizer_file: str, parse_special: bool) -> Any:
    """The object of a tokenizer.json; without `parse_special`, "<|im_end|>" is plain text."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(tokenizer_file)
    backend.encode_special_tokens = not parse_special
    backend.no_truncation()
    backend.no_padding()
    return backend


def encode_piece(piece: tuple[Span, ...], encoding: Encoding) -> Encoded:
    """The tokens of every document of the piece; runs in a worker."""
    backend = load_backend(encoding.tokenizer_file, encoding.parse_special)
    end = [encoding.eos_id] if encoding.eos_id >= 0 else []
    documents: list[np.ndarray] = []
    dropped: Counter[str] = Counter()
    num_bytes = num_lossy = 0
    for span in piece:
        for text, reason in read_documents(span, encoding.json_key):
            if reason:
                dropped[reason] += 1
                continue
            tokens = backend.encode(text, add_special_tokens=False).ids
            lossy = backend.decode(tokens, skip_special_tokens=False) != text
            if lossy and encoding.drop_lossy:
                dropped["tokens do not decode to the text"] += 1
                continue
            num_lossy += lossy
            num_bytes += len(text.encode())
            documents.append(np.array(tokens + end, dtype=np.int64))
    joined = np.concatenate(documents) if documents else np.empty(0, dtype=np.int64)
    lengths = tuple(len(document) for document in documents)
    return Encoded(joined, lengths, num_bytes, num_lossy, dropped)


def encode_all(
    pieces: Iterable[tuple[Span, ...]], encoding: Encoding, num_workers: int
) -> Iterator[Encoded]:
    """The encoded pieces in order, with a bounded number in flight; one worker is this process."""
    if num_workers == 1:
        yield from (encode_piece(piece, encoding) for piece in pieces)
        return
    spawn = multiprocessing.get_context("spawn")  # a fork may inherit the tokenizer's held locks
    with ProcessPoolExecutor(num_workers, mp_context=spawn) as pool:
        waiting: deque[Future[Encoded]] = deque()
        for piece in pieces:
            waiting.append(pool.submit(encode_piece, piece, encoding))
            if len(waiting) >= 4 * num_workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def write_pair(
    encoded_pieces: Iterable[Encoded],
    prefix: Path,
    num_ids: int,
    report: Callable[[int, int, int], None],
) -> Summary:
    """Writes PREFIX.bin and PREFIX.idx; `report` gets documents, tokens and bytes so far."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    dtype = DType.optimal_dtype(num_ids)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    lengths: list[int] = []
    dropped: Counter[str] = Counter()
    num_tokens = num_bytes = num_lossy = 0
    for encoded in encoded_pieces:
        begin = 0
        for length in encoded.lengths:
            builder.add_document(encoded.tokens[begin : begin + length], [length])
            begin += length
        lengths.extend(encoded.lengths)
        dropped.update(encoded.dropped)
        num_tokens += begin
        num_bytes += encoded.num_bytes
        num_lossy += encoded.num_lossy
        report(len(lengths), num_tokens, num_bytes)
    builder.finalize(f"{prefix}.idx")
    return Summary(tuple(lengths), num_bytes, num_lossy, dict(dropped))


@dataclass(frozen=True)
class Job:
    """One dataset to write. Units: `min_tokens` tokens; the dataset is refused below that."""

    prefix: Path
    files: tuple[Path, ...]
    tokenizer: LoadedTokenizer
    append_eos: bool
    json_key: str
    parse_special: bool
    drop_lossy: bool
    num_workers: int
    min_tokens: int
    overwrite: bool


def existing_files(prefix: Path) -> list[Path]:
    """The files of a dataset that is already there."""
    return [path for path in (Path(f"{prefix}.idx"), Path(f"{prefix}.bin")) if path.exists()]


def write_dataset(job: Job, report: Callable[[int, int, int], None]) -> Summary:
    """Writes PREFIX.bin and PREFIX.idx; after a failure neither is changed.

    The index is removed first and appears last: where it exists, the pair is complete.
    Raises: ValueError for an output that exists, too few tokens, no documents, no end token.
    """
    if existing_files(job.prefix) and not job.overwrite:
        names = [str(path) for path in existing_files(job.prefix)]
        raise ValueError(f"prefix={job.prefix}: {names} exist; pass --overwrite or a new prefix.")
    if job.append_eos and job.tokenizer.eos_id < 0:
        raise ValueError("the tokenizer names no eos token; pass --eos-token TOKEN or --no-eos.")
    folder = job.prefix.with_name(f"{job.prefix.name}.partial-{os.getpid()}-{time.time_ns()}")
    folder.mkdir(parents=True)
    try:
        tokenizer_file = folder / "tokenizer.json"
        tokenizer_file.write_text(job.tokenizer.serialized, encoding="utf-8")
        eos_id = job.tokenizer.eos_id if job.append_eos else -1
        encoding = Encoding(
            str(tokenizer_file), eos_id, job.json_key, job.parse_special, job.drop_lossy
        )
        pieces = cut_work(job.files, PIECE_BYTES)
        encoded = encode_all(pieces, encoding, job.num_workers)
        summary = write_pair(encoded, folder / "data", job.tokenizer.num_ids, report)
        if summary.num_tokens < max(job.min_tokens, 1):
            raise ValueError(
                f"{len(job.files)} files gave {len(summary.lengths)} documents with "
                f"{summary.num_tokens} tokens, dropped {summary.dropped}; at least "
                f"min_tokens={max(job.min_tokens, 1)} are needed (one sample takes the sequence "
                "length). Add text or lower --min-tokens."
            )
        Path(f"{job.prefix}.idx").unlink(missing_ok=True)
        for suffix in (".bin", ".idx"):
            (folder / f"data{suffix}").replace(f"{job.prefix}{suffix}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return summary
