"""Starts the kernels of triton_untile_kernels.py: which sums share a pass, and where they lie.

Letters as in untile.py.
Specified by tests/attention/test_triton_untile.py (interpreted on CPU) and test_gpu_untile.py.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from megatron_bp.attention.passes import MOST_COVER, rounds_on, starts_on
from megatron_bp.attention.problems import KeyValue
from megatron_bp.attention.schedule import Runs
from megatron_bp.attention.triton_launch import Resources, ceil_div, launch, padded_size
from megatron_bp.attention.triton_untile_kernels import keys_kernel, rows_kernel
from megatron_bp.attention.untile import SLAB, KeySums, Order, RowSums

ELEMENTS = 4096
"""Of a program: 32 a thread."""
MOST_EXTRA = 2
"""Sums that are added to others in one pass."""
MOST_HOMES = 4
"""Runs that are written one by one if other sums lie in them."""


def write_rows(dq_TZNH: Tensor, sums: Sequence[RowSums], scale: float) -> None:
    """See untile.write_rows."""
    left = list(sums)
    while left:
        first = left.pop(0)
        extra: list[RowSums] = []
        while left and len(extra) < MOST_EXTRA and _in_one_pass(first, left[0], len(dq_TZNH)):
            if extra and left[0].tiled.order != extra[0].tiled.order:
                break
            extra.append(left.pop(0))
        _write_rows(dq_TZNH, first, extra, scale)


def _in_one_pass(first: RowSums, other: RowSums, num_rows: int) -> bool:
    """Whether slabs of `first`, which has all rows, are slabs of `other` too."""
    runs, orders = other.runs, {first.tiled.order, other.tiled.order}
    if first.joined or not first.runs.store or first.runs.length != num_rows:
        return False
    if len(orders) > 1 and any(_width(x) != x.size for x in orders):
        return False
    apart = runs.writable and _is_even(runs)
    return apart and not runs.first % SLAB and not (other.joined and runs.length % SLAB)


def _write_rows(dq: Tensor, first: RowSums, extra: list[RowSums], scale: float) -> None:
    (tiled, runs, joined), (_, samples, heads, _) = first, dq.shape
    assert dq.stride(3) == 1, "head elements must be contiguous"
    assert len(runs.rounds) == 1, "rows of a launch must not overlap"
    problems = 1 if joined else runs.num_problems
    num_rows = runs.length * (runs.num_problems // problems)
    numbers = [scale, heads, *dq.stride()[:3], num_rows, runs.length, *_strides(first, samples)]
    others = (extra * MOST_EXTRA or [first] * MOST_EXTRA)[:MOST_EXTRA]
    for x in others:
        joins = x.runs.length if x.joined else 0
        numbers += [x.runs.first, max(x.runs.step, 1), x.runs.num_problems, x.runs.length, joins]
        numbers += _strides(x, samples)
    slabs, order = _slabs_of(tiled.order), others[0].tiled.order
    launch(
        rows_kernel,
        (ceil_div(num_rows, SLAB * slabs), samples * heads, problems),
        (dq, starts_on(runs, dq.device), *(x.tiled.sums for x in (first, *others))),
        tuple(numbers),
        (runs.store, len(extra), *_shape(tiled.order), *_shape(order)[1:], slabs),
        Resources(),
    )


def _strides(x: RowSums, num_samples: int) -> tuple[int, int, int]:
    """From problem to problem, sample to sample, head to head."""
    batch, head, _ = x.tiled.sums.stride()
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
    left, device = list(sums), into.k.device
    while left:
        first = left.pop(0)
        runs = first.runs
        if not runs.writable and _is_even(runs):
            rows = (runs.num_problems - 1) * runs.step + runs.length
            part = _Part(starts_on(runs, device), 0, 1, 0, rows, runs.store)
            _write_keys(into, first, part, (first,), scale)
            continue
        inside = {i: x for x in left for i in _home(runs, x.runs)}
        left = [x for x in left if all(x is not y for y in inside.values())]
        if inside:
            members = rounds_on(runs, device)[0]
            for i in range(runs.num_problems):
                part = _Part(members, i, 1, 0, runs.length, runs.store)
                _write_keys(into, first, part, (inside[i],) if i in inside else (), scale)
            continue
        for lo, piece in runs.pieces or ((0, runs),):
            for members in rounds_on(piece, device):
                part = _Part(members, 0, len(members), lo, lo + piece.length, piece.store)
                _write_keys(into, first, part, (), scale)


def _is_even(runs: Runs) -> bool:
    """Whether problems begin where slabs do, and few of them have the same row."""
    few = runs.length <= MOST_COVER * runs.step
    return runs.num_problems == 1 or (few and not runs.step % SLAB)


@lru_cache(maxsize=1024)
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


def _write_keys(
    into: KeyValue, first: KeySums, part: _Part, extra: tuple[KeySums, ...], scale: float
) -> None:
    """Sums of a part with `extra` ones, or of `first` alone if it is the extra one."""
    members, skip, num_runs, lo, hi, store = part
    (tiled, runs), (_, samples, heads, _) = first, into.k.shape
    assert into.k.stride() == into.v.stride(), "targets must share a layout"
    assert into.k.stride(3) == 1, "head elements must be contiguous"
    other = (*extra, first)[0]
    is_base, slabs = other is not first or not extra, _slabs_of(tiled.order)
    shift = other.runs.first - int(runs.starts[skip])
    step = max(other.runs.step, 1)
    launch(
        keys_kernel,
        (ceil_div(hi - lo // SLAB * SLAB, SLAB * slabs), samples * heads, 2 * num_runs),
        (*into, starts_on(runs, into.k.device), members, tiled.sums, other.tiled.sums),
        (
            *(scale, heads, *into.k.stride()[:3], skip, lo, hi, *_key_strides(first, samples)),
            *(shift, step, other.runs.num_problems, other.runs.length),
            *_key_strides(other, samples),
        ),
        (
            *(store, is_base, ceil_div(other.runs.length, step) if extra else 0),
            *(*_shape(tiled.order), slabs),
        ),
        Resources(),
    )


def _key_strides(x: KeySums, num_samples: int) -> tuple[int, ...]:
    """From dK to dV, sample to sample, run to run, head to head."""
    run, head, _ = x.tiled.sums.stride()
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
