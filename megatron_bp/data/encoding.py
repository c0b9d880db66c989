"""Encodes the records of a piece of work into documents: tokens, and which of them are learnt.

Owns the rules of what is left out, cut or refused, and counts every case. Runs in worker
processes. Specified by tests/data/test_encoding.py and tests/tools/test_preprocess.py.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_bp.data.rendering import (
    AssistantMask,
    ChatTokenizer,
    Format,
    Ids,
    Segment,
    UnusableRecordError,
    load_chat_tokenizer,
    read_ids,
    read_messages,
    read_prompt,
    render_by_marks,
    render_by_prefixes,
)
from megatron_bp.data.sources import EMPTY, Record, Span, read_records

NUM_SHOWN = 5  # malformed records of a piece that are named


class Overflow(StrEnum):
    """What becomes of a document that is longer than the maximum."""

    REJECT = "reject"
    TRUNCATE = "truncate"
    SPLIT = "split"


@dataclass(frozen=True)
class Encoding:
    """How records become documents; the same in every worker.

    `eos_id` and `mask_id` are -1 if there is none. Units: `max_length` tokens, 0 for no limit.
    """

    format: Format
    tokenizer_file: str
    tokenizer_folder: str
    num_ids: int
    eos_id: int
    mask_id: int
    json_key: str
    parse_special: bool
    drop_lossy: bool
    assistant_mask: AssistantMask
    max_length: int
    overflow: Overflow
    stop_on_error: bool


class MalformedInputError(ValueError):
    """A malformed record under --on-error stop."""


@dataclass
class Piece:
    """The documents of one piece of work, in order, and what happened to the records.

    `dropped` counts records by reason, `changed` documents by what was done to them. `malformed`
    names the first malformed records.
    """

    tokens: list[NDArray[np.int64]] = field(default_factory=list)
    learnt: list[NDArray[np.bool_]] = field(default_factory=list)
    num_bytes: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    changed: Counter[str] = field(default_factory=Counter)
    malformed: list[str] = field(default_factory=list)


LOSSY = "tokens do not decode to the text"


def encode_piece(spans: tuple[Span, ...], encoding: Encoding) -> Piece:
    """The documents of all records of the spans.

    Raises: MalformedInputError for a malformed record, if the encoding stops on errors.
    """
    piece, encoder = Piece(), _Encoder(encoding)
    json_key = encoding.json_key if encoding.format is Format.TEXT else ""
    for span in spans:
        for record in read_records(span, json_key):
            reason, malformed = record.reason, record.malformed
            if not reason:
                try:
                    reason = encoder.add(record, piece)
                except UnusableRecordError as error:
                    reason, malformed = str(error), True
            if malformed and encoding.stop_on_error:
                raise MalformedInputError(
                    f"{record.where}: {reason}; mend it, or pass --on-error skip to leave such "
                    "records out."
                )
            if malformed and len(piece.malformed) < NUM_SHOWN:
                piece.malformed.append(f"{record.where}: {reason}")
            if reason:
                piece.dropped[reason] += 1
    return piece


class _Encoder:
    def __init__(self, encoding: Encoding) -> None:
        self.encoding = encoding
        self.backend = load_backend(
            encoding.tokenizer_file, encoding.parse_special or encoding.format is Format.CHAT
        )
        self.chat: ChatTokenizer | None = None
        if encoding.format is Format.CHAT:
            self.chat = load_chat(encoding.tokenizer_folder)

    def add(self, record: Record, piece: Piece) -> str:
        """Adds the documents of a record to the piece, or says why it has none."""
        parts = self._segments(record.value)
        if isinstance(parts, Ids):
            tokens, learnt = self._checked(parts)
        else:
            tokens, learnt, lossy = self._encode(parts)
            if lossy and self.encoding.drop_lossy:
                return LOSSY
            piece.changed[f"warning: {LOSSY} (kept)"] += lossy
        if not len(tokens):
            return EMPTY
        if self.encoding.mask_id >= 0 and (tokens == self.encoding.mask_id).any():
            return "holds the mask token"
        if not learnt.any():
            return "no token to learn"
        if not isinstance(parts, Ids):
            piece.num_bytes += sum(len(segment.text.encode()) for segment in parts)
        return self._fit(tokens, learnt, piece)

    def _segments(self, value: Any) -> list[Segment] | Ids:
        match self.encoding.format:
            case Format.TEXT:
                return [Segment(value, True)]
            case Format.PROMPT:
                return read_prompt(value)
            case Format.IDS:
                return read_ids(value)
            case Format.CHAT:
                return self._chat_segments(value)

    def _chat_segments(self, value: Any) -> list[Segment] | Ids:
        assert self.chat is not None, "chat records need a chat tokenizer"
        messages = read_messages(value)
        if not self.encoding.parse_special:
            self._refuse_special_text(messages)
        if self.encoding.assistant_mask is AssistantMask.MARKS:
            return render_by_marks(self.chat, messages)
        return render_by_prefixes(self.chat, messages)

    def _refuse_special_text(self, messages: list[Any]) -> None:
        special = [
            token.content
            for token in self.backend.get_added_tokens_decoder().values()
            if token.special
        ]
        text = "\n".join(str(message.get("content")) for message in messages)
        spelt = [token for token in special if token in text]
        if spelt:
            raise UnusableRecordError(
                f"a message spells the special token {spelt[0]} (--parse-special reads it as one)"
            )

    def _encode(self, segments: list[Segment]) -> tuple[NDArray[np.int64], NDArray[np.bool_], bool]:
        tokens: list[int] = []
        learnt: list[bool] = []
        lossy = False
        for segment in segments:
            ids = self.backend.encode(segment.text, add_special_tokens=False).ids
            lossy |= self.backend.decode(ids, skip_special_tokens=False) != segment.text
            tokens += ids
            learnt += [segment.learnt] * len(ids)
        if self.encoding.eos_id >= 0 and tokens:
            tokens.append(self.encoding.eos_id)
            learnt.append(True)
        return np.array(tokens, dtype=np.int64), np.array(learnt, dtype=np.bool_), lossy

    def _checked(self, ids: Ids) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        tokens = np.array(ids.tokens, dtype=np.int64)
        outside = tokens[(tokens < 0) | (tokens >= self.encoding.num_ids)]
        if len(outside):
            raise UnusableRecordError(
                f"token {outside[0]} is outside the vocabulary of {self.encoding.num_ids} ids"
            )
        return tokens, np.array(ids.learnt, dtype=np.bool_)

    def _fit(self, tokens: NDArray[np.int64], learnt: NDArray[np.bool_], piece: Piece) -> str:
        """Adds a document, or what the overflow rule makes of it; says why if nothing is left."""
        limit, rule = self.encoding.max_length, self.encoding.overflow
        if 0 < limit < len(tokens):
            if rule is Overflow.REJECT:
                return f"longer than --max-length {limit}"
            done = "truncated to" if rule is Overflow.TRUNCATE else "split into pieces of"
            starts = range(0, limit if rule is Overflow.TRUNCATE else len(tokens), limit)
            parts = [slice(lo, lo + limit) for lo in starts]
            kept = [part for part in parts if learnt[part].any()]
            if not kept:
                return f"no token to learn in the first {limit}"
            piece.changed[f"{done} --max-length {limit}"] += 1
            if len(kept) < len(parts):
                piece.changed["pieces left out: no token to learn"] += len(parts) - len(kept)
        else:
            kept = [slice(0, len(tokens))]
        for part in kept:
            piece.tokens.append(tokens[part])
            piece.learnt.append(learnt[part])
        return ""


@lru_cache(maxsize=1)
def load_backend(tokenizer_file: str, parse_special: bool) -> Any:
    """The object of a tokenizer.json; without `parse_special`, "<|im_end|>" is plain text."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(tokenizer_file)
    backend.encode_special_tokens = not parse_special
    backend.no_truncation()
    backend.no_padding()
    return backend


@lru_cache(maxsize=1)
def load_chat(folder: str) -> ChatTokenizer:
    """The chat tokenizer of a folder, loaded once a worker."""
    return load_chat_tokenizer(Path(folder))
