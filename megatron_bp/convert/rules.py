"""Row rules: how the rows of one Megatron tensor are taken from the rows of Hugging Face tensors.

Every transform but an offset is a permutation of whole rows (dim 0) of one or more sources,
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


def interleave_in(groups: int) -> RowRule:
    """Returns `interleave_groups` for layers with a number of query groups of their own."""

    def rule(source_rows: Sequence[int], num_groups: int) -> Pieces:
        return interleave_groups(source_rows, groups)

    return rule


def interleave_parts(part_rows: Sequence[int]) -> RowRule:
    """Returns `interleave_groups` for one source that holds all parts, one after another.

    Bailing-MoE's query_key_value: all queries, all keys, all values.
    """

    def rule(source_rows: Sequence[int], num_groups: int) -> Pieces:
        (total,) = source_rows
        if total != sum(part_rows):
            raise ValueError(f"a source of {total} rows does not hold parts of {list(part_rows)}")
        starts = [sum(part_rows[:number]) for number in range(len(part_rows))]
        return tuple(
            Piece(0, starts[piece.source] + piece.source_lo, piece.target_lo, piece.rows)
            for piece in interleave_groups(part_rows, num_groups)
        )

    return rule


def interleave_gated_groups(source_rows: Sequence[int], num_groups: int) -> Pieces:
    """Returns, group by group, its queries, its output gates, its key and its value.

    The sources are q, k, v; each head of q is [query ; gate] (Qwen3.5's q_proj). Megatron's
    linear_qkv with attention_output_gate has all queries of a group before all its gates.
    Raises: ValueError when the sizes do not divide.
    """
    q_rows, k_rows, v_rows = source_rows
    head = k_rows // num_groups
    if head * num_groups != k_rows or v_rows != k_rows or q_rows % (2 * k_rows):
        raise ValueError(
            f"q, k, v have {q_rows}, {k_rows}, {v_rows} rows: k and v must be equal and divide "
            f"into num_groups={num_groups}, q must be a multiple of {2 * k_rows} (query and gate)"
        )
    heads = q_rows // (2 * k_rows)
    pieces = []
    target_lo = 0
    for group in range(num_groups):
        for part in (0, 1):
            for number in range(group * heads, (group + 1) * heads):
                pieces.append(Piece(0, (2 * number + part) * head, target_lo, head))
                target_lo += head
        for source in (1, 2):
            pieces.append(Piece(source, group * head, target_lo, head))
            target_lo += head
    return tuple(pieces)


def take_rows(lo: int, rows: int) -> RowRule:
    """Returns the rule that takes rows [lo, lo + rows) of the only source.

    Rules of other targets must take the rest; `check_links` holds them to it.
    """

    def rule(source_rows: Sequence[int], num_groups: int) -> Pieces:
        (total,) = source_rows
        if lo + rows > total:
            raise ValueError(f"rows [{lo}, {lo + rows}) do not exist in a source of {total} rows")
        return (Piece(0, lo, 0, rows),)

    return rule


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
