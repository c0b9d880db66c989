"""Triton kernels of untile.py: sums in tiles are read once, as they lie, and rows written once.

A program has slabs of 16 rows. In memory a slab is, for each warp group, some runs of 128 numbers
(512 if swapped); in registers their dims, powers of two but for the count of runs, are permuted to
rows and columns. W is the number of columns with that count rounded up to a power of two.
Knows strides and dtypes, no plan. Letters else as in untile.py.
Specified by tests/attention/test_triton_untile.py (interpreted on CPU) and test_gpu_untile.py.
"""

import triton
import triton.language as tl

from megatron_bp.attention.triton_put import put


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
def _extra(  # type: ignore[no-untyped-def]
    ptr,
    base,
    slab,
    back,
    first,
    step,
    num_problems,
    length,
    joined,
    from_x,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    ALONG: tl.constexpr,
    SWAPPED: tl.constexpr,
    SLABS: tl.constexpr,
):
    """What an evenly spaced problem has for slabs, [16 * SLABS, W], and for which of their rows.

    It is the latest one that begins before a slab's end, or that so many (`back`) before it.
    """
    x = tl.minimum((slab - first) // step, num_problems - 1) - back
    a = slab - first - x * step
    keep = (slab >= first) & (x >= 0) & (a < length)
    base, row = base + x * from_x, a + x * joined
    found = _slabs(ptr, base, row, keep, SIZE, ROWS, GROUPS, ALONG, SWAPPED, SLABS)
    keep = tl.reshape(keep & (a + tl.arange(0, 16)[None, :] < length), (SLABS * 16,))
    return tl.where(keep[:, None], found, 0.0), keep


@triton.jit
def rows_kernel(  # type: ignore[no-untyped-def]
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
        found, keep = _extra(
            second_ptr, z * from_z2 + n * from_n2, slab, 0, first2, step2, num_problems2, length2,
            joined2, from_x2, SIZE, ROWS2, GROUPS2, ALONG2, SWAPPED2, SLABS
        )  # fmt: skip
        total += found
    if EXTRA >= 2:
        found, keep = _extra(
            third_ptr, z * from_z3 + n * from_n3, slab, 0, first3, step3, num_problems3, length3,
            joined3, from_x3, SIZE, ROWS2, GROUPS2, ALONG2, SWAPPED2, SLABS
        )  # fmt: skip
        total += found
    a = lo + tl.arange(0, SLABS * 16)
    inside = a < num_rows
    at = a
    if EXTRA == 0:
        at = tl.load(starts_ptr + x + a // length, mask=inside, other=0) + a % length
    columns, there = _columns(SIZE, GROUPS // ALONG, SWAPPED)
    at = (at * to_t + z * to_z + n * to_n)[:, None] + columns[None, :]
    put(to_ptr + at, total * scale, inside[:, None] & there[None, :], STORE)


@triton.jit
def keys_kernel(  # type: ignore[no-untyped-def]
    dk_ptr,
    dv_ptr,
    starts_ptr,
    members_ptr,
    sums_ptr,
    extra_ptr,
    scale,
    num_heads,
    to_s,
    to_z,
    to_m,
    skip,
    lo,
    hi,
    from_v,
    from_z,
    from_x,
    from_m,
    shift,
    step,
    num_problems,
    length,
    extra_v,
    extra_z,
    extra_x,
    extra_m,
    STORE: tl.constexpr,
    BASE: tl.constexpr,
    COVER: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    ALONG: tl.constexpr,
    SWAPPED: tl.constexpr,
    SLABS: tl.constexpr,
):
    """target[start of x + a] (+)= sums[x, a] for a in [lo, hi): of dK times `scale`, and of dV.

    Adds evenly spaced extra sums, up to COVER a row, that begin `shift` rows after the run. Without
    BASE there are only these, and only their rows are written.
    """
    z = (tl.program_id(1) // num_heads).to(tl.int64)
    m = (tl.program_id(1) % num_heads).to(tl.int64)
    is_v, number = (tl.program_id(2) % 2).to(tl.int64), tl.program_id(2) // 2
    first = tl.program_id(0).to(tl.int64) * (SLABS * 16) + lo // 16 * 16
    slab = first + tl.arange(0, SLABS)[:, None] * 16
    row = first + tl.arange(0, SLABS * 16)
    columns, there = _columns(SIZE, GROUPS // ALONG, SWAPPED)
    if BASE:
        x = tl.load(members_ptr + skip + number)
        base, keep = is_v * from_v + z * from_z + m * from_m + x * from_x, slab < hi
        total = _slabs(sums_ptr, base, slab, keep, SIZE, ROWS, GROUPS, ALONG, SWAPPED, SLABS)
        inside = (row >= lo) & (row < hi)
        at = tl.load(starts_ptr + x) + row
    else:
        total = tl.zeros((SLABS * 16, columns.shape[0]), tl.float32)
        inside = row < 0
        at = tl.load(starts_ptr) + row
    for back in tl.static_range(COVER):
        base = is_v * extra_v + z * extra_z + m * extra_m
        found, keep = _extra(
            extra_ptr, base, slab, back, shift, step, num_problems, length, 0,
            extra_x, SIZE, ROWS, GROUPS, ALONG, SWAPPED, SLABS
        )  # fmt: skip
        total += found
        if not BASE:
            inside = inside | keep
    at = (at * to_s + z * to_z + m * to_m)[:, None] + columns[None, :]
    inside = inside[:, None] & there[None, :]
    if is_v == 0:
        put(dk_ptr + at, total * scale, inside, STORE)
    else:
        put(dv_ptr + at, total, inside, STORE)
