"""Packs whole documents into samples, and names the documents of a sample position by position.

The packing of an epoch is a pure function of lengths, sample length, seed and epoch, so a resumed
run and every rank find the same samples. Knows no files and no tokens. Specified by
tests/data/test_packing.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatron_bp.layout.blocks import Spans

PADDING = -1  # the document of a position that holds no token of any document

Sample = tuple[int, ...]


def pack_epoch(
    lengths: NDArray[np.integer], capacity: int, seed: int, epoch: int
) -> tuple[Sample, ...]:
    """The samples of one epoch: each document in exactly one, none longer than `capacity` tokens.

    Documents come in an order drawn from (seed, epoch); each goes to the sample with the least
    room that still holds it (best fit). The samples then come in an order of their own.
    Raises: ValueError for a document that is empty or longer than `capacity`.
    """
    wrong = np.flatnonzero((lengths < 1) | (lengths > capacity))
    if len(wrong):
        raise ValueError(
            f"{len(wrong)} of {len(lengths)} documents are empty or longer than a sample of "
            f"{capacity} tokens (document {wrong[0]} has {lengths[wrong[0]]}); prepare the data "
            f"with --max-length {capacity} and an --overflow rule, or train with longer samples."
        )
    key = np.array([seed, epoch], dtype=np.uint64)
    draws = np.random.Philox(key=key).random_raw(2 * len(lengths))
    samples: list[list[int]] = []
    by_room: dict[int, list[int]] = defaultdict(list)
    rooms = 0  # bit r is set if a sample has room for exactly r more tokens
    for document in np.argsort(draws[: len(lengths)], kind="stable").tolist():
        length = int(lengths[document])
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            index = by_room[room].pop()
            rooms ^= 0 if by_room[room] else 1 << room
        else:
            room, index = capacity, len(samples)
            samples.append([])
        samples[index].append(document)
        if room > length:
            by_room[room - length].append(index)
            rooms |= 1 << (room - length)
    order = np.argsort(draws[len(lengths) :][: len(samples)], kind="stable")
    return tuple(tuple(samples[index]) for index in order)


def document_of_position(lengths: Sequence[int], capacity: int) -> NDArray[np.int64]:
    """Index of the document at each position of a sample, `PADDING` behind the last one."""
    document = np.full(capacity, PADDING, dtype=np.int64)
    document[: sum(lengths)] = np.repeat(np.arange(len(lengths)), lengths)
    return document


def document_spans(document: NDArray[np.int64], block_size: int) -> Spans:
    """Spans of the documents of a sample; padding is cut into documents of one block each.

    Padding is apart from every document and, block by block, costs next to no attention.
    Shapes: `document` int64 [length], as `document_of_position` gives it.
    """
    length, used = len(document), used_length(document)
    starts = np.flatnonzero(np.diff(document[:used], prepend=-2))
    bounds = [*starts.tolist(), *range(used, length, block_size), length]
    return tuple(pairwise(bounds))


def used_length(document: NDArray[np.int64]) -> int:
    """Positions before the padding at the end of a sample."""
    return int((document != PADDING).sum())
