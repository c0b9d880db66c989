"""Triton kernels of untile.py: sums in tiles are read once, as they lie, and rows written once.

A program has slabs of 16 rows. In memory a slab is, for each warp group, some runs of 128 numbers
(512 if swapped); in registers their dims, powers of two but for the count of runs, are permuted to
rows and columns. W is the number of columns with that count rounded up to a power of two.
Letters else as in untile.py.
Specified by tests/attention/test_triton_untile.py (interpreted on CPU) and test_gpu_untile.py.
"""

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from megatron_bp.attention.passes import MOST_COVER, rounds_on, starts_on
from megatron_bp.attention.problems import KeyValue
from megatron_bp.attention.schedule import Runs
from megatron_bp.attention.triton_launch import Resources, ceil_div, launch, padded_size
from megatron_bp.attention.untile import SLAB, Order, RowSums, Tiled

ELEMENTS = 4096
"""Of a program: 32 a thread."""
MOST_EXTRA = 2
"""Sums that are added to others in one pass."""


@triton.jit
def _slabs(  # type: ignore[no-untyped-def]
    ptr,
    base,
    row,
    keep,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    ALONG: tl.constexpr,
    SWAPPED: tl.constexpr,
    SLABS: tl.constexpr,
):
    """[16 * SLABS, W]: the slabs that begin at `row` of sums at `ptr + base`, 0 unless `keep`.

    These three are [SLABS, 1].
    """
    BESIDE: tl.constexpr = GROUPS // ALONG
    PIECE: tl.constexpr = ROWS * SIZE // GROUPS
    QUADS: tl.constexpr = ROWS // ALONG // 8
    COUNT: tl.constexpr = SIZE // BESIDE // (64 if SWAPPED else 8)
    RUNS: tl.constexpr = BESIDE * triton.next_power_of_2(COUNT)
    NUM: tl.constexpr = 2 * RUNS if SWAPPED else RUNS
    RUN: tl.constexpr = 512 if SWAPPED else 128
    i = tl.arange(0, NUM)[None, :]
    at = base + row // ROWS * (ROWS * SIZE)
    r = row % ROWS
    if SWAPPED:  # i: 64 columns, warp group beside, half of a slab
        k = i // (2 * BESIDE)
        at = at + (i // 2 % BESIDE + BESIDE * (r // (QUADS * 8))) * PIECE
        at = at + (k * QUADS + r % (QUADS * 8) // 8 + i % 2) * RUN
    else:  # i: warp group beside, 8 columns
        k = i % (RUNS // BESIDE)
        at = at + (r // 64 % ALONG + ALONG * (i // (RUNS // BESIDE))) * PIECE
        at = at + (r // (64 * ALONG) * COUNT + k) * 512 + r % 64 // 16 * RUN
    at = tl.multiple_of(tl.reshape(at, (SLABS * NUM, 1)), (16, 16)) + tl.arange(0, RUN)[None, :]
    keep = tl.reshape(keep & (k < COUNT), (SLABS * NUM, 1))
    x = tl.load(ptr + at, mask=keep, other=0.0)
    if SWAPPED:
        # slab, (64 columns, warp group), half, warp, lane of 8, lane of 4, 8 columns, 1 row
        x = tl.reshape(x, (SLABS, RUNS, 2, 4, 8, 4, 2, 2))
        x = tl.permute(x, (0, 2, 5, 7, 1, 3, 6, 4))
    else:
        # slab, (warp group, 8 columns), lane of 8, lane of 4, 8 rows, 1 column
        x = tl.reshape(x, (SLABS, RUNS, 8, 4, 2, 2))
        x = tl.permute(x, (0, 4, 2, 1, 3, 5))
    return tl.reshape(x, (SLABS * 16, NUM * RUN // 16))


@triton.jit
def _columns(SIZE: tl.constexpr, BESIDE: tl.constexpr, SWAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Column of each of W, and whether there is one."""
    PER: tl.constexpr = SIZE if SWAPPED else SIZE // BESIDE
    UNIT: tl.constexpr = 64 * BESIDE if SWAPPED else 8
    PADDED: tl.constexpr = triton.next_power_of_2(PER // UNIT) * UNIT
    i = tl.arange(0, SIZE // PER * PADDED)
    return i // PADDED * PER + i % PADDED, i % PADDED < PER


@triton.jit
def _put(ptr, at, total, keep, STORE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stores or adds in the target's dtype."""
    if not STORE:
        total += tl.load(ptr + at, mask=keep, other=0.0).to(tl.float32)
    tl.store(ptr + at, total.to(ptr.dtype.element_ty), mask=keep)


@triton.jit
def _extra(  # type: ignore[no-untyped-def]
    ptr,
    slab,
    z,
    n,
    first,
    step,
    num_problems,
    length,
    joined,
    from_x,
    from_z,
    from_n,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    ALONG: tl.constexpr,
    SWAPPED: tl.constexpr,
    SLABS: tl.constexpr,
):
    """What the sums of evenly spaced problems have for slabs of the target, [16 * SLABS, W]."""
    x = (slab - first) // step
    a = slab - first - x * step
    keep = (slab >= first) & (x < num_problems) & (a < length)
    base, row = x * from_x + z * from_z + n * from_n, a + x * joined
    found = _slabs(ptr, base, row, keep, SIZE, ROWS, GROUPS, ALONG, SWAPPED, SLABS)
    inside = tl.reshape(a + tl.arange(0, 16)[None, :] < length, (SLABS * 16, 1))
    return tl.where(inside, found, 0.0)


@triton.jit
def _rows_kernel(  # type: ignore[no-untyped-def]
    to_ptr,
    starts_ptr,
    sums_ptr,
    second_ptr,
    third_ptr,
    scale,
    num_heads,
    to_t,
    to_z,
    to_n,
    num_rows,
    length,
    from_x,
    from_z,
    from_n,
    first2,
    step2,
    num_problems2,
    length2,
    joined2,
    from_x2,
    from_z2,
    from_n2,
    first3,
    step3,
    num_problems3,
    length3,
    joined3,
    from_x3,
    from_z3,
    from_n3,
    STORE: tl.constexpr,
    EXTRA: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    ALONG: tl.constexpr,
    SWAPPED: tl.constexpr,
    ROWS2: tl.constexpr,
    GROUPS2: tl.constexpr,
    ALONG2: tl.constexpr,
    SWAPPED2: tl.constexpr,
    SLABS: tl.constexpr,
):
    """target[start of x + a] (+)= scale * (sums[x, a] + those of EXTRA others for that row).

    Rows a >= length are those of the next problems. With others, sums are of the target's rows.
    """
    z = (tl.program_id(1) // num_heads).to(tl.int64)
    n = (tl.program_id(1) % num_heads).to(tl.int64)
    x = tl.program_id(2).to(tl.int64)
    lo = tl.program_id(0).to(tl.int64) * (SLABS * 16)
    slab = lo + tl.arange(0, SLABS)[:, None] * 16
    base, keep = x * from_x + z * from_z + n * from_n, slab < num_rows
    total = _slabs(sums_ptr, base, slab, keep, SIZE, ROWS, GROUPS, ALONG, SWAPPED, SLABS)
    if EXTRA >= 1:
        total += _extra(
            second_ptr, slab, z, n, first2, step2, num_problems2, length2, joined2,
            from_x2, from_z2, from_n2, SIZE, ROWS2, GROUPS2, ALONG2, SWAPPED2, SLABS
        )  # fmt: skip
    if EXTRA >= 2:
        total += _extra(
            third_ptr, slab, z, n, first3, step3, num_problems3, length3, joined3,
            from_x3, from_z3, from_n3, SIZE, ROWS2, GROUPS2, ALONG2, SWAPPED2, SLABS
        )  # fmt: skip
    a = lo + tl.arange(0, SLABS * 16)
    inside = a < num_rows
    at = a
    if EXTRA == 0:
        at = tl.load(starts_ptr + x + a // length, mask=inside, other=0) + a % length
    columns, there = _columns(SIZE, GROUPS // ALONG, SWAPPED)
    at = (at * to_t + z * to_z + n * to_n)[:, None] + columns[None, :]
    _put(to_ptr, at, total * scale, inside[:, None] & there[None, :], STORE)


@triton.jit
def _keys_kernel(  # type: ignore[no-untyped-def]
    dk_ptr,
    dv_ptr,
    starts_ptr,
    members_ptr,
    sums_ptr,
    scale,
    num_heads,
    to_s,
    to_z,
    to_m,
    lo,
    hi,
    step,
    num_problems,
    from_v,
    from_z,
    from_x,
    from_m,
    STORE: tl.constexpr,
    COVER: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    ALONG: tl.constexpr,
    SWAPPED: tl.constexpr,
    SLABS: tl.constexpr,
):
    """target[start of x + a] (+)= sums[x, a] for a in [lo, hi): of dK times `scale`, and of dV.

    With COVER runs of `hi` rows begin `step` apart, and a row is the sum over all that have it.
    """
    z = (tl.program_id(1) // num_heads).to(tl.int64)
    m = (tl.program_id(1) % num_heads).to(tl.int64)
    values, member = tl.program_id(2) % 2, tl.program_id(2) // 2
    base = values.to(tl.int64) * from_v + z * from_z + m * from_m
    first = tl.program_id(0).to(tl.int64) * (SLABS * 16) + lo // 16 * 16
    slab = first + tl.arange(0, SLABS)[:, None] * 16
    row = first + tl.arange(0, SLABS * 16)
    columns, there = _columns(SIZE, GROUPS // ALONG, SWAPPED)
    if COVER == 0:
        x = tl.load(members_ptr + member)
        base, keep = base + x * from_x, slab < hi
        total = _slabs(sums_ptr, base, slab, keep, SIZE, ROWS, GROUPS, ALONG, SWAPPED, SLABS)
        inside = (row >= lo) & (row < hi)
        at = tl.load(starts_ptr + x) + row
    else:
        at = tl.load(starts_ptr) + row
        inside = row < 0
        total = tl.zeros((SLABS * 16, columns.shape[0]), tl.float32)
        for back in tl.static_range(COVER):
            x = tl.minimum(slab // step, num_problems - 1) - back
            a = slab - x * step
            some = (x >= 0) & (a < hi)
            found = _slabs(
                sums_ptr, base + x * from_x, a, some, SIZE, ROWS, GROUPS, ALONG, SWAPPED, SLABS
            )  # fmt: skip
            keep = tl.reshape(some & (a + tl.arange(0, 16)[None, :] < hi), (SLABS * 16,))
            total += tl.where(keep[:, None], found, 0.0)
            inside = inside | keep
    at = (at * to_s + z * to_z + m * to_m)[:, None] + columns[None, :]
    inside = inside[:, None] & there[None, :]
    if values == 0:
        _put(dk_ptr, at, total * scale, inside, STORE)
    else:
        _put(dv_ptr, at, total, inside, STORE)


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
    apart = runs.num_problems == 1 or (runs.writable and not runs.step % SLAB)
    return apart and not runs.first % SLAB and not (other.joined and runs.length % SLAB)


def _write_rows(dq: Tensor, first: RowSums, extra: list[RowSums], scale: float) -> None:
    (tiled, runs, joined), (_, samples, heads, _) = first, dq.shape
    assert dq.stride(3) == 1, "head elements must be contiguous"
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
        _rows_kernel,
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
    """Rows [lo, hi) of some runs: of `members`, or with `cover` of all, one every `step` rows."""

    members: Tensor
    lo: int
    hi: int
    step: int
    cover: int
    store: bool


def write_keys(into: KeyValue, runs: Runs, tiled: Tiled, scale: float) -> None:
    """See untile.write_keys."""
    device, length, step = into.k.device, runs.length, runs.step
    if step < length <= MOST_COVER * step and not step % SLAB:
        part = _Part(starts_on(runs, device), 0, length, step, ceil_div(length, step), runs.store)
        _write_keys(into, runs, tiled, scale, part)
        return
    for lo, piece in runs.pieces or ((0, runs),):
        for members in rounds_on(piece, device):
            part = _Part(members, lo, lo + piece.length, 0, 0, piece.store)
            _write_keys(into, runs, tiled, scale, part)


def _write_keys(into: KeyValue, runs: Runs, tiled: Tiled, scale: float, part: _Part) -> None:
    members, lo, hi, step, cover, store = part
    _, samples, heads, _ = into.k.shape
    sums, slabs = tiled.sums.unflatten(0, (2, samples, -1)), _slabs_of(tiled.order)
    assert into.k.stride() == into.v.stride(), "targets must share a layout"
    assert into.k.stride(3) == 1, "head elements must be contiguous"
    num_rows = (runs.num_problems - 1) * step + hi - lo // SLAB * SLAB
    launch(
        _keys_kernel,
        (ceil_div(num_rows, SLAB * slabs), samples * heads, 2 if cover else 2 * len(members)),
        (*into, starts_on(runs, into.k.device), members, tiled.sums),
        (
            *(scale, heads, *into.k.stride()[:3], lo, hi),
            *(step, runs.num_problems, *sums.stride()[:4]),
        ),
        (store, cover, *_shape(tiled.order), slabs),
        Resources(),
    )


def _shape(order: Order) -> tuple[int, ...]:
    """As the kernels take it."""
    return order.size, order.rows, order.groups, order.along_rows, int(order.swapped)


def _width(order: Order) -> int:
    """W of `_slabs`."""
    beside, unit = order.groups // order.along_rows, 64 if order.swapped else 8
    return beside * unit * padded_size(order.size // beside // unit)


def _slabs_of(order: Order) -> int:
    """Slabs of a program."""
    return max(1, ELEMENTS // (SLAB * _width(order)))
