"""Specifies megatron_bp/convert/rules.py: row rules are bijections that can be cut anywhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_bp.convert.rules import (
    Piece,
    check_bijection,
    clip,
    concat_rows,
    interleave_gated_groups,
    interleave_groups,
    interleave_in,
    interleave_parts,
    take_rows,
    target_rows,
)

SIZES = st.tuples(st.integers(1, 5), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())


@given(SIZES)
def test_rules_use_every_row_once_and_cut_anywhere(sizes: tuple[int, list[int], st.DataObject]):
    groups, parts, data = sizes
    rows = [part * groups for part in parts]
    for rule in (concat_rows, interleave_groups):
        pieces = rule(rows, groups)
        check_bijection(pieces, rows)
        total = target_rows(pieces)
        assert total == sum(rows)
        cut = data.draw(st.integers(0, total))
        halves = [*clip(pieces, 0, cut), *clip(pieces, cut, total)]
        assert _rows(halves) == _rows(pieces)


def test_interleave_groups_puts_queries_before_their_key_and_value():
    # 2 groups; 4 query rows, 2 key rows, 2 value rows: q0 q1 k0 v0 | q2 q3 k1 v1
    pieces = interleave_groups([4, 2, 2], 2)
    assert [(row[0], row[1]) for row in _rows(pieces)] == [
        (0, 0), (0, 1), (1, 0), (2, 0), (0, 2), (0, 3), (1, 1), (2, 1),
    ]  # fmt: skip


def test_interleave_parts_is_interleave_groups_of_one_source():
    pieces = interleave_parts((4, 2, 2))([8], 2)
    check_bijection(pieces, [8])
    assert [row[1] for row in _rows(pieces)] == [0, 1, 4, 6, 2, 3, 5, 7]
    with pytest.raises(ValueError, match=r"a source of 9 rows does not hold parts of \[4, 2, 2\]"):
        interleave_parts((4, 2, 2))([9], 2)


def test_interleave_groups_refuses_rows_that_do_not_divide():
    with pytest.raises(ValueError, match="5 rows do not divide into num_groups=2"):
        interleave_groups([4, 5], 2)


@pytest.mark.parametrize(
    "pieces",
    [
        (Piece(0, 0, 0, 2),),  # row 2 unused
        (Piece(0, 0, 0, 2), Piece(0, 1, 2, 2)),  # row 1 twice
        (Piece(0, 0, 0, 2), Piece(0, 2, 3, 1)),  # hole in the target
    ],
)
def test_check_bijection_finds_rows_left_out_or_used_twice(pieces: tuple[Piece, ...]):
    with pytest.raises(AssertionError):
        check_bijection(pieces, [3])


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_gated_groups_use_every_row_once(groups: int, heads: int, head: int):
    rows = [2 * groups * heads * head, groups * head, groups * head]
    pieces = interleave_gated_groups(rows, groups)
    check_bijection(pieces, rows)


def test_gated_groups_put_queries_before_gates():
    # 2 groups of 2 heads of size 1; q has [query gate] a head: q0 g0 q1 g1 q2 g2 q3 g3
    pieces = interleave_gated_groups([8, 2, 2], 2)
    assert [(row[0], row[1]) for row in _rows(pieces)] == [
        (0, 0), (0, 2), (0, 1), (0, 3), (1, 0), (2, 0),
        (0, 4), (0, 6), (0, 5), (0, 7), (1, 1), (2, 1),
    ]  # fmt: skip


@pytest.mark.parametrize("rows", [[8, 3, 3], [8, 2, 4], [6, 2, 2]])
def test_gated_groups_refuse_sizes_that_do_not_divide(rows: list[int]):
    with pytest.raises(ValueError, match=f"q, k, v have {rows[0]}, {rows[1]}, {rows[2]} rows"):
        interleave_gated_groups(rows, 2)


def test_take_rows_takes_a_part_and_refuses_what_is_not_there():
    assert take_rows(2, 3)([7], 1) == (Piece(0, 2, 0, 3),)
    with pytest.raises(ValueError, match=r"rows \[5, 8\) do not exist in a source of 7 rows"):
        take_rows(5, 3)([7], 1)


def test_layers_may_have_their_own_number_of_groups():
    assert interleave_in(2)([4, 2], 1) == interleave_groups([4, 2], 2)
    assert interleave_in(1)([4, 2], 2) == interleave_groups([4, 2], 1)


def _rows(pieces) -> list[tuple[int, int, int]]:
    return [
        (piece.source, piece.source_lo + i, piece.target_lo + i)
        for piece in pieces
        for i in range(piece.rows)
    ]
