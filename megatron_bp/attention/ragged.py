"""Unmasked launches over the keys before each chunk, made one launch of problems that end apart.

Both chunks' rows see the keys before the early chunk, and the late chunk's those up to the late
one. By slab that is two launches, the second of which starts when the late slab has come. Where
keys are there at once, a kernel that takes a number of keys for each problem needs one launch and
one merge, and its last wave of tiles is one instead of two. Late rows come first, so that the last
wave has short tiles: 1 to 2 percent of the launch, which copying its rows does not cost
(docs/bench/attention.md).
Pure integers. Specified by tests/attention/test_ragged.py.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatron_bp.attention.contract import NativeKernel
from megatron_bp.attention.passes import FEW_RUNS
from megatron_bp.attention.schedule import Pass, Runs, Step
from megatron_bp.layout.decomposition import KeySpace, Phase


@dataclass(frozen=True, eq=False)
class RaggedStep:
    """Problem x: the x-th run of rows sees `lengths[x]` clean keys from row `key` on.

    Longer problems come first.
    """

    rows: Runs
    key: int
    lengths: tuple[int, ...]


@runtime_checkable
class RaggedKernel(NativeKernel, Protocol):
    """A kernel that takes a number of keys for each problem."""

    def forward_ragged(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output [X, Q, N, H] and LSE [X, N, Q] of q [X, Q, N, H] against k, v [K, M, H].

        Problem x sees the first `lengths[x]` keys (int32 [X]), at least one and all unmasked.
        """
        ...


@lru_cache(maxsize=256)
def together(todo: Pass) -> tuple[Pass, tuple[RaggedStep, ...]]:
    """A forward pass without its launches over the keys before the chunks, and those as one.

    The pass as it is, if it has not exactly two such launches or their rows are many runs.
    """
    before = [
        (phase, step)
        for phase in (Phase.EARLY, Phase.LATE)
        for step in todo.steps[phase]
        if _is_before(step)
    ]
    if len(before) != 2:
        return todo, ()
    (_, first), (_, second) = before
    at, (lo, mid), (start, hi) = _rows_of(first), _keys_of(first), _keys_of(second)
    late = set(_rows_of(second).tolist())
    if start != mid or not late <= set(at.tolist()):
        return todo, ()
    length = gcd(first.rows.length, second.rows.length)
    starts = at[::length]
    if not 2 <= len(starts) <= FEW_RUNS:
        return todo, ()
    is_late = np.array([int(x) in late for x in starts])
    starts = np.concatenate([starts[is_late], starts[~is_late]])
    lengths = (hi - lo,) * int(is_late.sum()) + (mid - lo,) * int((~is_late).sum())
    rows = Runs(starts, length, False, (np.arange(len(starts)),))
    gone = {id(step) for _, step in before}
    rest = {p: tuple(x for x in steps if id(x) not in gone) for p, steps in todo.steps.items()}
    return replace(todo, steps=rest), (RaggedStep(rows, lo, lengths),)


def _is_before(step: Step) -> bool:
    """Whether a launch is unmasked, adds to rows, and all its rows see the same clean keys."""
    one_run = step.joined or step.rows.num_problems == 1
    clean = len(step.keys) == 1 and step.keys[0][0] is KeySpace.CLEAN
    return step.window == (-1, -1) and clean and one_run and not step.rows.store


def _rows_of(step: Step) -> NDArray[np.int64]:
    """All rows of a step, in order."""
    return np.sort((step.rows.starts[:, None] + np.arange(step.rows.length)).ravel())


def _keys_of(step: Step) -> tuple[int, int]:
    """First clean key and the one after the last."""
    runs = step.keys[0][1]
    return int(runs.starts[0]), int(runs.starts[0]) + runs.length
