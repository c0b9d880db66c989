"""Row rules: how the rows of one Megatron tensor are taken from the rows of Hugging Face tensors.

Every transform of the dense families is a permutation of whole rows (dim 0) of one or more sources,
so one list of `Piece`s describes a rule and its inverse, and any row range can be converted on its
own. This file knows no tensor names and no files. Specified by tests/convert/test_rules.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """`rows` rows: source number `source` at `source_lo` on, target at `target_lo` on."""

    source: int
    source_lo: int
    target_lo: int
    rows: int


Pieces = tuple[Piece, ...]
RowRule = Callable[[Sequence[int], int], Pieces]
"""(rows of each source, number of query groups) -> pieces in target order."""


def copy_rows(source_rows: Sequence[int], num_groups: int) -> Pieces:
    """Returns the identity: the only source, unchanged."""
    (rows,) = source_rows
    return (Piece(0, 0, 0, rows),)


def concat_rows(source_rows: Sequence[int], num_groups: int) -> Pieces:
    """Returns the sources one after another (`linear_fc1` = [gate ; up] of the whole matrix)."""
    pieces = []
    target_lo = 0
    for source, rows in enumerate(source_rows):
        pieces.append(Piece(source, 0, target_lo, rows))
        target_lo += rows
    return tuple(pieces)


def interleave_groups(source_rows: Sequence[int], num_groups: int) -> Pieces:
    """Returns, group by group, that query group's rows of every source (`linear_qkv`: [q.. k v]).

    Raises: ValueError when a source does not divide into `num_groups`.
    """
    for rows in source_rows:
        if rows % num_groups:
            raise ValueError(f"{rows} rows do not divide into num_groups={num_groups} query groups")
    pieces = []
    target_lo = 0
    for group in range(num_groups):
        for source, rows in enumerate(source_rows):
            part = rows // num_groups
            pieces.append(Piece(source, group * part, target_lo, part))
            target_lo += part
    return tuple(pieces)


def clip(pieces: Pieces, lo: int, hi: int) -> Iterator[Piece]:
    """Yields the parts of `pieces` whose target rows lie in [lo, hi)."""
    for piece in pieces:
        start = max(piece.target_lo, lo)
        stop = min(piece.target_lo + piece.rows, hi)
        if start < stop:
            yield Piece(
                piece.source, piece.source_lo + start - piece.target_lo, start, stop - start
            )


def target_rows(pieces: Pieces) -> int:
    """Returns the number of target rows that `pieces` describe."""
    return sum(piece.rows for piece in pieces)


def check_bijection(pieces: Pieces, source_rows: Sequence[int]) -> None:
    """Asserts that every source row and every target row is used exactly once."""
    targets = sorted((piece.target_lo, piece.target_lo + piece.rows) for piece in pieces)
    _assert_tiles(targets, target_rows(pieces), "target")
    for source, rows in enumerate(source_rows):
        used = [(p.source_lo, p.source_lo + p.rows) for p in pieces if p.source == source]
        _assert_tiles(sorted(used), rows, f"source {source}")


def _assert_tiles(intervals: list[tuple[int, int]], length: int, name: str) -> None:
    position = 0
    for lo, hi in intervals:
        follows = lo == position < hi
        assert follows, f"{name}: rows [{lo}, {hi}) do not follow row {position}"
        position = hi
    assert position == length, f"{name}: rows end at {position}, not at {length}"
