"""Writes encoded documents as Megatron's indexed dataset PREFIX.{bin,idx}, published in one step.

Which tokens are learnt goes to PREFIX_mask.{bin,idx}, with the same documents. Must not know
objectives, masks or models. Specified by tests/tools/test_preprocess.py.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

from megatron_bp.data.encoding import Encoding, MalformedInputError
from megatron_bp.data.rendering import Format
from megatron_bp.data.sources import cut_work
from megatron_bp.data.tokenizer import LoadedTokenizer
from megatron_bp.data.work import (
    Part,
    Progress,
    describe_job,
    encode_parts,
    open_parts,
    read_parts,
)

PIECE_BYTES = 1 << 20  # large enough to hide the hand-over, small enough to keep workers level
NUM_SHOWN = 5  # malformed records that a summary names


@dataclass(frozen=True)
class Summary:
    """What a dataset holds. Units: documents, tokens (end tokens included), bytes of kept text."""

    lengths: tuple[int, ...]
    num_learnt: int
    num_bytes: int
    dropped: dict[str, int]
    changed: dict[str, int]
    malformed: tuple[str, ...]

    @property
    def num_tokens(self) -> int:
        """All tokens of all documents."""
        return sum(self.lengths)

    def histogram(self) -> list[tuple[int, int, int]]:
        """(lo, hi, documents with lo <= length < hi) for powers of two, empty ends left out."""
        powers = Counter(length.bit_length() for length in self.lengths)
        span = range(min(powers, default=0), max(powers, default=-1) + 1)
        return [(1 << power >> 1, 1 << power, powers[power]) for power in span]


@dataclass(frozen=True)
class Job:
    """One dataset to write. `encoding.tokenizer_file` is filled in by `write_dataset`.

    Units: `min_tokens` tokens (the dataset is refused below that), `piece_bytes` bytes of input.
    """

    prefix: Path
    files: tuple[Path, ...]
    tokenizer: LoadedTokenizer
    encoding: Encoding
    num_workers: int
    min_tokens: int
    overwrite: bool
    piece_bytes: int = PIECE_BYTES

    @property
    def with_mask(self) -> bool:
        """Whether some tokens may not be learnt."""
        return self.encoding.format is not Format.TEXT

    @property
    def parts(self) -> Path:
        """The folder of finished pieces of work."""
        return self.prefix.with_name(f"{self.prefix.name}.parts")


def existing_files(prefix: Path) -> list[Path]:
    """The files of a dataset that is already there."""
    names = [f"{prefix}{kind}" for kind in (".idx", ".bin", "_mask.idx", "_mask.bin")]
    return [path for path in map(Path, names) if path.exists()]


def write_dataset(job: Job, report: Callable[[Progress, int], None]) -> Summary:
    """Writes the dataset; after a failure an old one is unchanged.

    The index is removed first and appears last: where it exists, the files are complete. After a
    kill the finished pieces of work stay, and the same job goes on from them. `report` gets the
    progress and the bytes of all input.
    Raises: ValueError for an output that exists, too few tokens, no documents, malformed input.
    """
    if existing_files(job.prefix) and not job.overwrite:
        names = [str(path) for path in existing_files(job.prefix)]
        raise ValueError(f"prefix={job.prefix}: {names} exist; pass --overwrite or a new prefix.")
    pieces = list(cut_work(job.files, job.piece_bytes))
    weight = sum(span.weight for piece in pieces for span in piece)
    job.parts.parent.mkdir(parents=True, exist_ok=True)
    tokenizer_file = job.prefix.with_name(f"{job.prefix.name}.tokenizer.json")
    tokenizer_file.write_text(job.tokenizer.serialized, encoding="utf-8")
    encoding = replace(job.encoding, tokenizer_file=str(tokenizer_file))
    try:
        description = describe_job(job.files, encoding, job.piece_bytes)
        open_parts(job.parts, description, job.overwrite)
        encode_parts(
            pieces, encoding, job.parts, job.num_workers, lambda done: report(done, weight)
        )
        summary = _write_files(read_parts(job.parts, len(pieces)), job)
        _refuse_too_little(summary, job)
    except MalformedInputError:
        shutil.rmtree(job.parts)
        raise
    finally:
        tokenizer_file.unlink()
    _publish(job)
    return summary


def _write_files(parts: Iterable[Part], job: Job) -> Summary:
    dtype = DType.optimal_dtype(job.tokenizer.num_ids)
    tokens = IndexedDatasetBuilder(f"{job.parts / 'data'}.bin", dtype=dtype)
    mask = IndexedDatasetBuilder(f"{job.parts / 'data'}_mask.bin", dtype=np.uint8)
    lengths: list[int] = []
    dropped: Counter[str] = Counter()
    changed: Counter[str] = Counter()
    malformed: list[str] = []
    num_bytes = num_learnt = 0
    for part in parts:
        begin = 0
        for length in part.lengths.tolist():
            document = slice(begin, begin + length)
            tokens.add_document(part.tokens[document], [length])
            mask.add_document(part.learnt[document].astype(np.uint8), [length])
            begin += length
        lengths += part.lengths.tolist()
        dropped += part.dropped
        changed += part.changed
        malformed += part.malformed
        num_bytes += part.num_bytes
        num_learnt += int(part.learnt.sum())
    tokens.finalize(f"{job.parts / 'data'}.idx")
    mask.finalize(f"{job.parts / 'data'}_mask.idx")
    shown = tuple(malformed[:NUM_SHOWN])
    return Summary(tuple(lengths), num_learnt, num_bytes, dict(dropped), dict(changed), shown)


def _refuse_too_little(summary: Summary, job: Job) -> None:
    if summary.num_tokens >= max(job.min_tokens, 1):
        return
    shutil.rmtree(job.parts)
    raise ValueError(
        f"{len(job.files)} files gave {len(summary.lengths)} documents with "
        f"{summary.num_tokens} tokens, dropped {summary.dropped}; at least "
        f"min_tokens={max(job.min_tokens, 1)} are needed (one sample takes the sequence "
        "length). Add text or lower --min-tokens."
    )


def _publish(job: Job) -> None:
    for path in existing_files(job.prefix):
        path.unlink()
    kinds = ("_mask.bin", "_mask.idx", ".bin", ".idx") if job.with_mask else (".bin", ".idx")
    for kind in kinds:
        (job.parts / f"data{kind}").replace(f"{job.prefix}{kind}")
    shutil.rmtree(job.parts)
