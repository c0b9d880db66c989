"""A tensor source with one table row replaced or appended: the mask token's embedding and head row.

Knows tensors by name only. Specified by tests/convert/test_mask_row.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_bp.convert.link import TensorInfo


class TensorSource(Protocol):
    """Named tensors that can be read by row ranges."""

    tensors: dict[str, TensorInfo]

    def read_rows_into(self, name: str, lo: int, out: torch.Tensor) -> None:
        """Fills `out` with rows from `lo` on."""

    def iter_rows(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields (first row, rows) blocks in order."""

    def file_name(self, name: str) -> str:
        """Returns the name of the file that holds the tensor."""


@dataclass(frozen=True)
class NewRow:
    """A row for one table, its norm, the others' mean norm and that of the row it replaces.

    `replaced_norm` is -1 when the row is added.
    """

    values: torch.Tensor
    norm: float
    mean_row_norm: float
    replaced_norm: float


def mean_row(source: TensorSource, name: str, without_row: int) -> NewRow:
    """Returns the mean of the table's rows except row `without_row` (which may lie outside).

    Summed in fp64, rounded to fp32, cast once to the table's dtype.
    """
    info = source.tensors[name]
    total = torch.zeros(info.shape[1:], dtype=torch.float64)
    norms, count, replaced = 0.0, 0, -1.0
    for lo, rows in source.iter_rows(name):
        keep = torch.ones(rows.shape[0], dtype=torch.bool)
        if lo <= without_row < lo + rows.shape[0]:
            keep[without_row - lo] = False
            replaced = float(rows[without_row - lo].double().norm())
        for part, kept in zip(rows.split(4096), keep.split(4096), strict=True):
            wide = part[kept].double()
            total += wide.sum(0)
            norms += float(wide.norm(dim=1).sum())
            count += wide.shape[0]
    return _new_row((total / count).float().to(info.dtype), norms / count, replaced)


def stored_row(source: TensorSource, name: str, row: int) -> NewRow:
    """Returns row `row` of the table as it is, for a mask row that was trained already."""
    info = source.tensors[name]
    out = torch.empty((1, *info.shape[1:]), dtype=info.dtype)
    source.read_rows_into(name, row, out)
    norm = float(out[0].double().norm())
    return _new_row(out[0], mean_row(source, name, row).mean_row_norm, norm)


def _new_row(values: torch.Tensor, mean_row_norm: float, replaced: float) -> NewRow:
    return NewRow(values, float(values.double().norm()), mean_row_norm, replaced)


class MaskRowSource:
    """`source` with one row of some tables replaced, or added when it is one past the end."""

    def __init__(self, source: TensorSource, row: int, rows: Mapping[str, torch.Tensor]) -> None:
        """`rows` has the new values by table name."""
        self._source = source
        self._row = row
        self._rows = dict(rows)
        self.tensors = dict(source.tensors)
        for name in rows:
            info = source.tensors[name]
            assert row <= info.shape[0], f"{name}: row {row} is not adjacent to the table"
            num_rows = max(info.shape[0], row + 1)
            self.tensors[name] = TensorInfo((num_rows, *info.shape[1:]), info.dtype)

    def read_rows_into(self, name: str, lo: int, out: torch.Tensor) -> None:
        """Fills `out` with rows from `lo` on."""
        hi = lo + out.shape[0]
        if name not in self._rows or not lo <= self._row < hi:
            self._source.read_rows_into(name, lo, out)
            return
        stored = min(hi, self._source.tensors[name].shape[0]) - lo
        if stored > 0:
            self._source.read_rows_into(name, lo, out[:stored])
        out[self._row - lo] = self._rows[name]

    def file_name(self, name: str) -> str:
        """Returns the name of the file that holds the tensor."""
        return self._source.file_name(name)

    def iter_rows(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields (first row, rows) blocks in order."""
        last = self.tensors[name].shape[0] - 1
        for lo, rows in self._source.iter_rows(name):
            if name in self._rows and lo <= self._row < lo + rows.shape[0]:
                rows[self._row - lo] = self._rows[name]
            yield lo, rows
        if name in self._rows and self._source.tensors[name].shape[0] == last:
            yield last, self._rows[name][None]
