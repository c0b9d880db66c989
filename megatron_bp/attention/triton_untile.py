"""Starts the kernels of triton_untile_kernels.py: which sums share a pass, and where they lie.

Letters as in untile.py.
Specified by tests/attention/test_triton_untile.py (interpreted on CPU) and test_gpu_untile.py.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_bp.attention.passes import MOST_COVER, rounds_on, starts_on
from megatron_bp.attention.problems import KeyValue
from megatron_bp.attention.schedule import Runs
from megatron_bp.attention.triton_launch import Launch, ceil_div, padded_size
from megatron_bp.attention.triton_untile_kernels import keys_kernel, rows_kernel
from megatron_bp.attention.untile import SLAB, KeySums, Order, RowSums

ELEMENTS = 4096
"""Of a program: 32 a thread."""
MOST_EXTRA = 2
"""Sums that are added to others in one pass."""
MOST_HOMES = 4
"""Runs that are written one by one if other sums lie in them."""


class _Sums(NamedTuple):
    """How sums lie: as RowSums and KeySums (never joined), with the strides of their memory."""

    runs: Runs
    order: Order
    strides: tuple[int, ...]
    joined: bool = False


class _Target(NamedTuple):
    """Shape and strides of rows [T, Z, N, H], and where they are."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: torch.device


class _Write(NamedTuple):
    """A launch, the row numbers that it reads, and which of the sums it takes."""

    launch: Launch
    numbers: tuple[Tensor, ...]
    which: tuple[int, ...]


def write_rows(dq_TZNH: Tensor, sums: Sequence[RowSums], scale: float) -> None:
    """See untile.write_rows."""
    lie = tuple([_Sums(x.runs, x.tiled.order, x.tiled.sums.stride(), x.joined) for x in sums])
    into = _Target(dq_TZNH.shape, dq_TZNH.stride(), dq_TZNH.device)
    for launch, numbers, which in _row_writes(into, lie, scale):
        launch.start((dq_TZNH, *numbers, *[sums[i].tiled.sums for i in which]))


@lru_cache(maxsize=1024)
def _row_writes(into: _Target, sums: tuple[_Sums, ...], scale: float) -> tuple[_Write, ...]:
    left, found = list(range(len(sums))), []
    while left:
        first = left.pop(0)
        extra: list[int] = []
        while left and len(extra) < MOST_EXTRA:
            other = sums[left[0]]
            if not _in_one_pass(sums[first], other, into.shape[0]):
                break
            if extra and other.order != sums[extra[0]].order:
                break
            extra.append(left.pop(0))
        found.append(_row_write(into, sums, (first, *extra), scale))
    return tuple(found)


def _in_one_pass(first: _Sums, other: _Sums, num_rows: int) -> bool:
    """Whether slabs of `first`, which has all rows, are slabs of `other` too."""
    runs, orders = other.runs, {first.order, other.order}
    if first.joined or not first.runs.store or first.runs.length != num_rows:
        return False
    if len(orders) > 1 and any(_width(x) != x.size for x in orders):
        return False
    apart = runs.writable and _is_even(runs)
    return apart and not runs.first % SLAB and not (other.joined and runs.length % SLAB)


def _row_write(
    into: _Target, sums: tuple[_Sums, ...], which: tuple[int, ...], scale: float
) -> _Write:
    """The first of `which` sums, and the others added."""
    first, *extra = which
    (runs, order, _, joined), (_, samples, heads, _) = sums[first], into.shape
    assert into.strides[3] == 1, "head elements must be contiguous"
    assert len(runs.rounds) == 1, "rows of a launch must not overlap"
    problems = 1 if joined else runs.num_problems
    num_rows = runs.length * (runs.num_problems // problems)
    numbers = [scale, heads, *into.strides[:3], num_rows, runs.length]
    numbers += _strides(sums[first], samples)
    others = (extra * MOST_EXTRA or [first] * MOST_EXTRA)[:MOST_EXTRA]
    for x in [sums[i] for i in others]:
        joins = x.runs.length if x.joined else 0
        numbers += [x.runs.first, max(x.runs.step, 1), x.runs.num_problems, x.runs.length, joins]
        numbers += _strides(x, samples)
    slabs = _slabs_of(order)
    launch = Launch(
        rows_kernel,
        (ceil_div(num_rows, SLAB * slabs), samples * heads, problems),
        tuple(numbers),
        (runs.store, len(extra), *_shape(order), *_shape(sums[others[0]].order)[1:], slabs),
    )
    return _Write(launch, (starts_on(runs, into.device),), (first, *others))


def _strides(x: _Sums, num_samples: int) -> tuple[int, int, int]:
    """From problem to problem, sample to sample, head to head."""
    batch, head, _ = x.strides
    return (0 if x.joined else num_samples * batch), batch, head


class _Part(NamedTuple):
    """Rows [lo, hi) of `num_runs` runs, those whose numbers are members[skip:]."""

    members: Tensor
    skip: int
    num_runs: int
    lo: int
    hi: int
    store: bool


def write_keys(into: KeyValue, sums: Sequence[KeySums], scale: float) -> None:
    """See untile.write_keys."""
    assert into.k.stride() == into.v.stride(), "targets must share a layout"
    lie = tuple([_Sums(x.runs, x.tiled.order, x.tiled.sums.stride()) for x in sums])
    target = _Target(into.k.shape, into.k.stride(), into.k.device)
    for launch, numbers, which in _key_writes(target, lie, scale):
        launch.start((*into, *numbers, *[sums[i].tiled.sums for i in which]))


@lru_cache(maxsize=1024)
def _key_writes(into: _Target, sums: tuple[_Sums, ...], scale: float) -> tuple[_Write, ...]:
    left, found = list(range(len(sums))), []
    while left:
        first = left.pop(0)
        runs = sums[first].runs
        if not runs.writable and _is_even(runs):
            rows = (runs.num_problems - 1) * runs.step + runs.length
            part = _Part(starts_on(runs, into.device), 0, 1, 0, rows, runs.store)
            found.append(_key_write(into, sums, (first, first), part, scale))
            continue
        inside = {i: x for x in left for i in _home(runs, sums[x].runs)}
        left = [x for x in left if x not in inside.values()]
        if inside:
            members = rounds_on(runs, into.device)[0]
            for i in range(runs.num_problems):
                part = _Part(members, i, 1, 0, runs.length, runs.store)
                which = (first, inside[i]) if i in inside else (first,)
                found.append(_key_write(into, sums, which, part, scale))
            continue
        for lo, piece in runs.pieces or ((0, runs),):
            for members in rounds_on(piece, into.device):
                part = _Part(members, 0, len(members), lo, lo + piece.length, piece.store)
                found.append(_key_write(into, sums, (first,), part, scale))
    return tuple(found)


def _is_even(runs: Runs) -> bool:
    """Whether problems begin where slabs do, and few of them have the same row."""
    few = runs.length <= MOST_COVER * runs.step
    return runs.num_problems == 1 or (few and not runs.step % SLAB)


def _home(runs: Runs, other: Runs) -> tuple[int, ...]:
    """The run in whose slabs all runs of `other` have slabs of theirs; nothing if there is none."""
    if runs.pieces or len(runs.rounds) > 1 or runs.num_problems > MOST_HOMES:
        return ()
    if other.pieces or other.store or not _is_even(other):
        return ()
    stop = int(other.starts[-1]) + other.length
    return tuple(
        i
        for i, start in enumerate(runs.starts.tolist())
        if start <= other.first and stop <= start + runs.length and not (other.first - start) % SLAB
    )


def _key_write(
    into: _Target, sums: tuple[_Sums, ...], which: tuple[int, ...], part: _Part, scale: float
) -> _Write:
    """Sums of a part with extra ones, if `which` names two, or alone if it names them twice."""
    members, skip, num_runs, lo, hi, store = part
    first, *extra = which
    (runs, order, *_), (_, samples, heads, _) = sums[first], into.shape
    assert into.strides[3] == 1, "head elements must be contiguous"
    added = (*extra, first)[0]
    is_base, slabs, other = added != first or not extra, _slabs_of(order), sums[added]
    shift = other.runs.first - int(runs.starts[skip])
    step = max(other.runs.step, 1)
    launch = Launch(
        keys_kernel,
        (ceil_div(hi - lo // SLAB * SLAB, SLAB * slabs), samples * heads, 2 * num_runs),
        (
            *(scale, heads, *into.strides[:3], skip, lo, hi, *_key_strides(sums[first], samples)),
            *(shift, step, other.runs.num_problems, other.runs.length),
            *_key_strides(other, samples),
        ),
        (
            *(store, is_base, ceil_div(other.runs.length, step) if extra else 0),
            *(*_shape(order), slabs),
        ),
    )
    return _Write(launch, (starts_on(runs, into.device), members), (first, added))


def _key_strides(x: _Sums, num_samples: int) -> tuple[int, ...]:
    """From dK to dV, sample to sample, run to run, head to head."""
    run, head, _ = x.strides
    sample = x.runs.num_problems * run
    return num_samples * sample, sample, run, head


def _shape(order: Order) -> tuple[int, ...]:
    """As the kernels take it."""
    return order.size, order.rows, order.groups, order.along_rows, int(order.swapped)


def _width(order: Order) -> int:
    """W of the kernels."""
    beside, unit = order.groups // order.along_rows, 64 if order.swapped else 8
    return beside * unit * padded_size(order.size // beside // unit)


def _slabs_of(order: Order) -> int:
    """Slabs of a program."""
    return max(1, ELEMENTS // (SLAB * _width(order)))
