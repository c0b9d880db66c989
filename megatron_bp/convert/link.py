"""A link: one Megatron tensor and the rows of Hugging Face tensors that make it up.

The contract between family tables, which make links, and the pipeline, which only executes them.
Knows no key layouts and no files. Specified by tests/convert/test_link.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_bp.convert.rules import Pieces

TOP = -1
"""The layer number of tensors that belong to no layer."""


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype of a stored tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """The size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """The size of one row (dim 0) in bytes."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize


@dataclass(frozen=True)
class Link:
    """One Megatron tensor (`name` inside layer `layer`, or `TOP`) and the sources of its rows.

    Rows are the first `row_dims` dims flattened: 1 for matrices, 2 for stacked experts [E, F, H].
    A source's rows are its leading dims flattened until the rest equals the target's row. Several
    links may take different rows of one source.
    `offset` is added to every value on the way to Megatron and taken away on the way back.
    `pinned` keeps the stored dtype whatever --dtype says (fp32 parameters of a bf16 model).
    `alias` marks a second copy of another link's rows under another name: it is written as well,
    and export reads whichever of the two a checkpoint has.
    """

    name: str
    layer: int
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    source_shapes: tuple[tuple[int, ...], ...]
    pieces: Pieces
    row_dims: int = 1
    offset: float = 0.0
    pinned: bool = False
    alias: bool = False

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return math.prod(self.shape[: self.row_dims])

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of one row."""
        return self.shape[self.row_dims :]

    @property
    def needs_original(self) -> bool:
        """Whether Megatron's values may have lost bits, so that the original is kept beside."""
        return self.pinned or self.offset != 0

    def source_rows(self, source: int) -> int:
        """Returns the number of rows of source number `source`."""
        shape = self.source_shapes[source]
        lead = len(shape) - len(self.row_shape)
        assert shape[lead:] == self.row_shape, f"{self.sources[source]}: rows of another shape"
        return math.prod(shape[:lead])


def check_links(links: Sequence[Link]) -> None:
    """Asserts that every row of every source and of every target is used exactly once.

    Aliases may repeat rows that another link uses.
    """
    used: dict[str, list[tuple[int, int]]] = {}
    rows: dict[str, int] = {}
    for link in links:
        spans = sorted((piece.target_lo, piece.target_lo + piece.rows) for piece in link.pieces)
        _assert_tiles(spans, link.num_rows, f"{link.name}, layer {link.layer}")
        if not link.alias:
            for number, name in enumerate(link.sources):
                rows[name] = link.source_rows(number)
            for piece in link.pieces:
                lo = piece.source_lo
                used.setdefault(link.sources[piece.source], []).append((lo, lo + piece.rows))
    for name, count in rows.items():
        _assert_tiles(sorted(used.get(name, ())), count, name)
    unknown = [name for link in links for name in link.sources if name not in rows]
    assert not unknown, f"only aliases use {unknown[:4]}"


def _assert_tiles(spans: Iterable[tuple[int, int]], length: int, name: str) -> None:
    position = 0
    for lo, hi in spans:
        follows = lo == position < hi
        assert follows, f"{name}: rows [{lo}, {hi}) do not follow row {position}"
        position = hi
    assert position == length, f"{name}: rows end at {position}, not at {length}"


def row_ranges(link: Link, item_bytes: int, max_bytes: int) -> Iterator[tuple[int, int]]:
    """Yields (first row, rows) ranges of at most `max_bytes` (or one row) that are boxes."""
    inner = link.shape[link.row_dims - 1]
    row_bytes = math.prod(link.row_shape) * item_bytes
    step = max(1, max_bytes // max(1, row_bytes))
    if step >= inner:
        step -= step % inner
    for lo in range(0, link.num_rows, inner if step < inner else step):
        stop = min(lo + max(step, inner), link.num_rows)
        for start in range(lo, stop, step):
            yield start, min(step, stop - start)


def row_box(link: Link, lo: int, rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns (offset, size) in the tensor of a range that `row_ranges` yielded."""
    assert link.row_dims in (1, 2), f"{link.name}: {link.row_dims} row dims"
    offset = list(np.unravel_index(lo, link.shape[: link.row_dims]))
    size = [1] * link.row_dims
    inner = link.shape[link.row_dims - 1]
    if rows % inner == 0 and link.row_dims > 1:
        size[-2:] = [rows // inner, inner]
    else:
        size[-1] = rows
    tail = len(link.row_shape)
    return (*(int(i) for i in offset), *[0] * tail), (*size, *link.row_shape)
