"""Backward steps of many rows as several of fewer, for kernels that run those faster.

Pure integers. Specified by tests/attention/test_row_pieces.py.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Protocol, runtime_checkable

import numpy as np

from megatron_bp.attention.contract import NativeKernel
from megatron_bp.attention.schedule import Runs, Step


@runtime_checkable
class PiecewiseKernel(NativeKernel, Protocol):
    """A kernel whose unmasked backward launches are faster with fewer rows."""

    def rows_at_once(self, head_size: int) -> int:
        """Most rows of such a launch; 0: as many as there are."""
        ...


@lru_cache(maxsize=4096)
def in_pieces(step: Step, most_rows: int) -> tuple[Step, ...]:
    """An unmasked step of one problem as steps of at most `most_rows` rows; else the step alone.

    Rows that were joined by a copy come apart where they are. Steps whose runs are shorter than
    `most_rows` stay whole: each piece adds to the gradients of all keys.
    """
    rows, one = step.rows, (np.zeros(1, dtype=np.int64),)
    alone = step.joined or rows.num_problems == 1
    if step.window != (-1, -1) or not alone or rows.length < most_rows or not most_rows:
        return (step,)
    length = -(-rows.length // -(-rows.length // most_rows))
    again = tuple((space, replace(runs, store=False, pieces=())) for space, runs in step.keys)
    pieces: list[Step] = []
    for start in rows.starts.tolist():
        for lo in range(0, rows.length, length):
            num_rows = min(length, rows.length - lo)
            at = Runs(np.array([start + lo]), num_rows, rows.store, one)
            keys = again if pieces else step.keys
            pieces.append(replace(step, rows=at, keys=keys, joined=False))
    return tuple(pieces)
