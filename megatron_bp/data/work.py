"""Encodes pieces of work in processes, keeps finished pieces on disk, and resumes after a kill.

A folder PREFIX.parts holds one file for each finished piece and the description of the job; a run
with the same description takes up what is there. Pieces keep the order of the inputs, so the result
does not depend on the number of workers. Specified by tests/data/test_work.py and
tests/tools/test_preprocess.py.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_bp.data.encoding import Encoding, Piece, encode_piece
from megatron_bp.data.sources import Span

VERSION = 1  # of the part files; a change makes old ones unusable


@dataclass(frozen=True)
class Part:
    """A finished piece of work as it lies on disk.

    Shapes: `tokens` int64 and `learnt` bool, the documents back to back; `lengths` their tokens.
    """

    tokens: NDArray[np.int64]
    learnt: NDArray[np.bool_]
    lengths: NDArray[np.int64]
    num_bytes: int
    dropped: Counter[str]
    changed: Counter[str]
    malformed: tuple[str, ...]


@dataclass(frozen=True)
class Progress:
    """How far a job is. Units: `weight` bytes of input of the finished pieces."""

    num_documents: int
    num_tokens: int
    weight: int
    num_reused: int


def describe_job(files: Sequence[Path], encoding: Encoding, piece_bytes: int) -> str:
    """What decides the parts: options, tokenizer, and the files by size and time."""
    serialized = Path(encoding.tokenizer_file).read_bytes()
    stamps = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    options = asdict(replace(encoding, tokenizer_file=hashlib.sha256(serialized).hexdigest()))
    return json.dumps([VERSION, piece_bytes, options, stamps], indent=1)


def open_parts(folder: Path, description: str, overwrite: bool) -> None:
    """Makes the folder of a job, or finds the one that an unfinished run of it left.

    Raises: ValueError if the folder is of another job and may not be overwritten.
    """
    note = folder / "job.json"
    if folder.exists() and not (note.exists() and note.read_text() == description):
        if not overwrite and note.exists():
            raise ValueError(
                f"{folder} holds the unfinished work of other options or inputs; run that command "
                "again to finish it, or pass --overwrite to start over."
            )
        for path in folder.glob("part-*"):
            path.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    note.write_text(description)


def encode_parts(
    pieces: Sequence[tuple[Span, ...]],
    encoding: Encoding,
    folder: Path,
    num_workers: int,
    report: Callable[[Progress], None],
) -> None:
    """Leaves a part file in the folder for each piece; finished ones are reused.

    One worker is this process. Raises: MalformedInputError as `encode_piece`.
    """
    paths = [folder / f"part-{index:06d}.npz" for index in range(len(pieces))]
    todo = [index for index, path in enumerate(paths) if not path.exists()]
    total = Progress(0, 0, 0, len(pieces) - len(todo))
    if total.num_reused:
        report(total)

    def count(index: int, done: tuple[int, int]) -> None:
        nonlocal total
        total = Progress(
            total.num_documents + done[0],
            total.num_tokens + done[1],
            total.weight + sum(span.weight for span in pieces[index]),
            total.num_reused,
        )
        report(total)

    if num_workers == 1:
        for index in todo:
            count(index, _encode_to(paths[index], pieces[index], encoding))
        return
    spawn = multiprocessing.get_context("spawn")  # a fork may inherit the tokenizer's held locks
    with ProcessPoolExecutor(num_workers, mp_context=spawn) as pool:
        jobs = {
            pool.submit(_encode_to, paths[index], pieces[index], encoding): index for index in todo
        }
        try:
            for job in as_completed(jobs):
                count(jobs[job], job.result())
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _encode_to(path: Path, spans: tuple[Span, ...], encoding: Encoding) -> tuple[int, int]:
    """Encodes a piece into a part file, which appears whole; returns documents and tokens."""
    piece = encode_piece(spans, encoding)
    lengths = np.array([len(tokens) for tokens in piece.tokens], dtype=np.int64)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.savez(
            file,
            tokens=np.concatenate([np.empty(0, np.int64), *piece.tokens]).astype(np.int32),
            learnt=np.concatenate([np.empty(0, np.bool_), *piece.learnt]),
            lengths=lengths,
            notes=np.frombuffer(_notes(piece).encode(), dtype=np.uint8),
        )
    partial.replace(path)
    return len(lengths), int(lengths.sum())


def _notes(piece: Piece) -> str:
    return json.dumps([piece.num_bytes, piece.dropped, piece.changed, piece.malformed])


def read_parts(folder: Path, num_pieces: int) -> Iterator[Part]:
    """The parts of a finished job in input order."""
    for index in range(num_pieces):
        with np.load(folder / f"part-{index:06d}.npz") as stored:
            num_bytes, dropped, changed, malformed = json.loads(stored["notes"].tobytes())
            yield Part(
                tokens=stored["tokens"].astype(np.int64),
                learnt=stored["learnt"],
                lengths=stored["lengths"],
                num_bytes=num_bytes,
                dropped=Counter(dropped),
                changed=Counter(changed),
                malformed=tuple(malformed),
            )
