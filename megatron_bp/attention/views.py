"""Strided views of tensors, each described once.

The layers of a model ask for the same views in every step, and to say where one lies costs the CPU
as much as to make it.
Specified by tests/attention/test_passes.py and test_operands.py.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from megatron_bp.attention.schedule import Runs

ALIGNED = 16
"""Bytes: FlashAttention's kernels read rows that begin at multiples of this, others are copied."""


class View(NamedTuple):
    """A strided view that begins `offset` elements after a tensor's first."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, x: Tensor) -> Tensor:
        """The view of `x`."""
        return x.as_strided(self.shape, self.stride, x.storage_offset() + self.offset)


def views_of(views: Sequence[View], tensors: Sequence[Tensor]) -> list[Tensor]:
    """A view of each tensor."""
    return [view.of(x) for view, x in zip(views, tensors, strict=True)]


@lru_cache(maxsize=4096)
def rows_view(runs: Runs, shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[View, ...]:
    """The view [X, length, ...] of the rows of evenly spaced runs of x [T, ...]; else nothing."""
    if not runs.step:
        return ()
    row, *inner = strides
    size = (runs.num_problems, runs.length, *shape[1:])
    return (View(size, (runs.step * row, row, *inner), runs.first * row),)


@lru_cache(maxsize=4096)
def problems_view(runs: Runs, shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[View, ...]:
    """The view [X * Z, length, ...] of the same rows of x [T, Z, ...], if X or Z is 1."""
    problems, samples = runs.num_problems, shape[1]
    if not runs.step or 1 not in (problems, samples):
        return ()
    row, sample, *inner = strides
    outer = sample if problems == 1 else runs.step * row
    size = (problems * samples, runs.length, *shape[2:])
    return (View(size, (outer, row, *inner), runs.first * row),)


@lru_cache(maxsize=4096)
def begin_at(strides: tuple[int, ...], unit: int) -> bool:
    """Whether elements lie together and everything above them begins at multiples of `unit`."""
    return strides[-1] == 1 and all(not stride % unit for stride in strides[:-1])
