"""Specifies megatron_bp/convert/link.py: row ranges are boxes, and links use every row once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_bp.convert.link import Link, check_links, row_box, row_ranges
from megatron_bp.convert.rules import Piece


def _link(shape: tuple[int, ...], row_dims: int) -> Link:
    rows = int(torch.tensor(shape[:row_dims]).prod())
    return Link("t", 0, shape, ("s",), (shape,), (Piece(0, 0, 0, rows),), row_dims=row_dims)


@given(
    st.integers(1, 5), st.integers(1, 7), st.integers(1, 4), st.integers(1, 200), st.integers(1, 2)
)
def test_row_ranges_are_boxes_that_tile_the_tensor(a: int, b: int, c: int, most: int, dims: int):
    link = _link((a, b, c), dims)
    numbers = torch.arange(a * b * c).view(a, b, c)
    out = torch.full_like(numbers, -1)
    position = 0
    for lo, rows in row_ranges(link, 2, most):
        assert lo == position
        position += rows
        offset, size = row_box(link, lo, rows)
        one_row = numbers.view(link.num_rows, *link.row_shape)[lo : lo + rows]
        assert one_row.numel() * 2 <= most or rows == 1
        box = tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))
        out[box] = one_row.reshape(size)
    assert position == link.num_rows
    assert torch.equal(out, numbers)


def test_links_may_share_a_source_but_not_its_rows():
    top = Link("top", 0, (2, 3), ("s",), ((5, 3),), (Piece(0, 0, 0, 2),))
    rest = replace(top, name="rest", shape=(3, 3), pieces=(Piece(0, 2, 0, 3),))
    check_links([top, rest])
    check_links([top, rest, replace(rest, name="copy", alias=True)])
    with pytest.raises(AssertionError, match="s: rows end at 2, not at 5"):
        check_links([top])
    with pytest.raises(AssertionError, match=r"s: rows \[2, 5\) do not follow row 5"):
        check_links([top, rest, replace(rest, name="copy")])
    with pytest.raises(AssertionError, match="only aliases use"):
        check_links([replace(top, alias=True)])
    with pytest.raises(AssertionError, match="top, layer 0: rows end at 2, not at 4"):
        check_links([replace(top, shape=(4, 3)), rest])
