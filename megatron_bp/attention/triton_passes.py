"""Triton kernels of passes.py: one read and one write of every row, no temporaries.

Knows strides and dtypes, no plan. Letters as in passes.py; W is a run of contiguous elements.
Specified by tests/attention/test_passes.py (interpreted on CPU) and test_gpu_passes.py.
"""

from functools import lru_cache

import triton
import triton.language as tl
from torch import Tensor

from megatron_bp.attention.triton_launch import Launch, ceil_div, padded_size
from megatron_bp.attention.triton_put import put

Strides = tuple[tuple[int, ...], ...]


@triton.jit
def _merge_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    lse_ptr,
    starts_ptr,
    part_ptr,
    part_lse_ptr,
    num_rows,
    num_heads,
    group,
    size,
    out_t,
    out_z,
    out_n,
    lse_t,
    lse_z,
    lse_n,
    part_x,
    part_q,
    part_z,
    part_m,
    part_g,
    plse_x,
    plse_q,
    plse_z,
    plse_m,
    plse_g,
    STORE: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """out, lse of one row and sample, HEADS heads at a time; see merge.py for the formula."""
    row = tl.program_id(0).to(tl.int64)
    z = tl.program_id(1)
    x, a = row // num_rows, row % num_rows
    t = tl.load(starts_ptr + x) + a
    n = tl.program_id(2) * HEADS + tl.arange(0, HEADS)
    h = tl.arange(0, SIZE)
    m, g = n // group, n % group
    keep = n < num_heads
    keep2 = keep[:, None] & (h < size)[None, :]
    lse_at = lse_ptr + t * lse_t + z * lse_z + n * lse_n
    out_at = out_ptr + t * out_t + z * out_z + n[:, None] * out_n + h[None, :]
    part_at = part_ptr + x * part_x + a * part_q + z * part_z
    part_at = part_at + m[:, None] * part_m + g[:, None] * part_g + h[None, :]
    plse_at = part_lse_ptr + x * plse_x + a * plse_q + z * plse_z + m * plse_m + g * plse_g
    lse_b = tl.load(plse_at, mask=keep, other=float("-inf"))
    out_b = tl.load(part_at, mask=keep2, other=0.0).to(tl.float32)
    if STORE:
        lse, out = lse_b, out_b
    else:
        lse_a = tl.load(lse_at, mask=keep, other=float("-inf"))
        out_a = tl.load(out_at, mask=keep2, other=0.0).to(tl.float32)
        base = tl.maximum(lse_a, lse_b)
        base = tl.where(base == float("-inf"), 0.0, base)
        weight_a, weight_b = tl.exp(lse_a - base), tl.exp(lse_b - base)
        total = weight_a + weight_b
        empty = total == 0.0
        scale = 1.0 / tl.where(empty, 1.0, total)
        lse = tl.where(empty, float("-inf"), base + tl.log(tl.where(empty, 1.0, total)))
        out = out_a * (weight_a * scale)[:, None] + out_b * (weight_b * scale)[:, None]
    tl.store(lse_at, lse, mask=keep)
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=keep2)


def merge_rows(
    out_TZNH: Tensor,
    lse_TZN: Tensor,
    starts: Tensor,
    part_XQZMGH: Tensor,
    lse_XQZMG: Tensor,
    *,
    store: bool,
) -> None:
    """See passes.merge_rows; `starts` int64 [X] are the first rows of the problems."""
    strides = out_TZNH.stride(), lse_TZN.stride(), part_XQZMGH.stride(), lse_XQZMG.stride()
    tensors = (out_TZNH, lse_TZN, starts, part_XQZMGH, lse_XQZMG)
    _merge(part_XQZMGH.shape, strides, store).start(tensors)


@lru_cache(maxsize=1024)
def _merge(shape: tuple[int, ...], strides: Strides, store: bool) -> Launch:
    problems, rows, samples, kv_heads, group, size = shape
    out, lse, part, part_lse = strides
    assert out[3] == part[5] == 1, "head elements must be contiguous"
    padded, num_heads = padded_size(size), kv_heads * group
    heads = min(padded_size(num_heads), max(1, 4096 // padded))
    return Launch(
        _merge_kernel,
        (problems * rows, samples, ceil_div(num_heads, heads)),
        (rows, num_heads, group, size, *out[:3], *lse, *part[:5], *part_lse),
        (store, heads, padded),
    )


@triton.jit
def _add_kernel(  # type: ignore[no-untyped-def]
    first_ptr,
    second_ptr,
    starts_ptr,
    members_ptr,
    value_ptr,
    value2_ptr,
    num_rows,
    num_heads,
    width,
    to_s,
    to_z,
    to_m,
    from_x,
    from_q,
    from_z,
    from_m,
    STORE: tl.constexpr,
    BOTH: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """target[start + a] += value[x, a] for one row, sample, head and WIDTH elements."""
    row = tl.program_id(0).to(tl.int64)
    z, m = tl.program_id(1) // num_heads, tl.program_id(1) % num_heads
    x = tl.load(members_ptr + row // num_rows)
    a = row % num_rows
    s = tl.load(starts_ptr + x) + a
    w = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    keep = w < width
    to = s * to_s + z * to_z + m * to_m + w
    source = x * from_x + a * from_q + z * from_z + m * from_m + w
    total = tl.load(value_ptr + source, mask=keep, other=0.0).to(tl.float32)
    put(first_ptr + to, total, keep, STORE)
    if BOTH:
        total2 = tl.load(value2_ptr + source, mask=keep, other=0.0).to(tl.float32)
        put(second_ptr + to, total2, keep, STORE)


def add_rows(
    targets_SZMW: tuple[Tensor, ...],
    starts: Tensor,
    members: Tensor,
    values_XQZMW: tuple[Tensor, ...],
    *,
    store: bool,
) -> None:
    """See passes.add_rows; adds the problems `members` int64, whose runs must not overlap."""
    values, strides = _alike(targets_SZMW, values_XQZMW)
    tensors = (targets_SZMW[0], targets_SZMW[-1], starts, members, values[0], values[-1])
    _add(len(members), values[0].shape, strides, len(targets_SZMW) == 2, store).start(tensors)


@lru_cache(maxsize=1024)
def _add(members: int, shape: tuple[int, ...], strides: Strides, both: bool, store: bool) -> Launch:
    heads, width, to, source = _collapsed(shape, *strides)
    rows, samples = shape[1:3]
    block = min(padded_size(width), 2048)
    return Launch(
        _add_kernel,
        (members * rows, samples * heads, ceil_div(width, block)),
        (rows, heads, width, *to, *source),
        (store, both, block),
    )


@triton.jit
def _sum_kernel(  # type: ignore[no-untyped-def]
    first_ptr,
    second_ptr,
    value_ptr,
    value2_ptr,
    start,
    step,
    length,
    num_problems,
    num_rows,
    num_heads,
    width,
    to_s,
    to_z,
    to_m,
    from_x,
    from_q,
    from_z,
    from_m,
    STORE: tl.constexpr,
    BOTH: tl.constexpr,
    COVER: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """target[start + r] += sum over x of value[x, r - x * step], for ROWS rows of the target."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    z, m = tl.program_id(1) // num_heads, tl.program_id(1) % num_heads
    w = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    inside = (w < width)[None, :]
    latest = tl.minimum(r // step, num_problems - 1)
    touched = r < 0
    total = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    total2 = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    for back in tl.static_range(COVER):
        x = latest - back
        a = r - x * step
        keep = (x >= 0) & (a < length) & (r < num_rows)
        touched = touched | keep
        source = x.to(tl.int64) * from_x + a.to(tl.int64) * from_q + z * from_z + m * from_m
        source = source[:, None] + w[None, :]
        keep2 = keep[:, None] & inside
        total += tl.load(value_ptr + source, mask=keep2, other=0.0).to(tl.float32)
        if BOTH:
            total2 += tl.load(value2_ptr + source, mask=keep2, other=0.0).to(tl.float32)
    to = (start + r).to(tl.int64) * to_s + z * to_z + m * to_m
    to = to[:, None] + w[None, :]
    keep2 = touched[:, None] & inside
    put(first_ptr + to, total, keep2, STORE)
    if BOTH:
        put(second_ptr + to, total2, keep2, STORE)


def sum_rows(
    targets_SZMW: tuple[Tensor, ...],
    spacing: tuple[int, int],
    values_XQZMW: tuple[Tensor, ...],
    *,
    store: bool,
) -> None:
    """Like add_rows for all problems of evenly spaced runs (first row, step), which may overlap.

    Every row of the targets is read and written once, however many problems it gets values from.
    """
    values, strides = _alike(targets_SZMW, values_XQZMW)
    tensors = (targets_SZMW[0], targets_SZMW[-1], values[0], values[-1])
    _sum(spacing, values[0].shape, strides, len(targets_SZMW) == 2, store).start(tensors)


@lru_cache(maxsize=1024)
def _sum(
    spacing: tuple[int, int], shape: tuple[int, ...], strides: Strides, both: bool, store: bool
) -> Launch:
    heads, width, to, source = _collapsed(shape, *strides)
    problems, length, samples = shape[:3]
    start, step = spacing
    num_rows = (problems - 1) * step + length
    block = min(padded_size(width), 1024)
    rows = min(max(4096 // block, 1), 16)
    return Launch(
        _sum_kernel,
        (ceil_div(num_rows, rows), samples * heads, ceil_div(width, block)),
        (start, step, length, problems, num_rows, heads, width, *to, *source),
        (store, both, ceil_div(length, step), rows, block),
    )


def _alike(
    targets: tuple[Tensor, ...], values: tuple[Tensor, ...]
) -> tuple[tuple[Tensor, ...], Strides]:
    """Values of one layout, copied if they have not, and the strides of targets and values."""
    to, source = targets[0].stride(), values[0].stride()
    assert targets[-1].stride() == to, "targets must share a layout"
    if source != values[-1].stride() or source[-1] != 1:
        values = tuple(x.contiguous() for x in values)
        source = values[0].stride()
    return values, (to, source)


def _collapsed(
    shape: tuple[int, ...], to: tuple[int, ...], source: tuple[int, ...]
) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    """Heads, elements of each, and strides of targets [S, Z, M, W] and values [X, Q, Z, M, W].

    Heads that lie beside one another in targets and values count as one.
    """
    assert to[3] == source[4] == 1, "the last dim must be contiguous"
    heads, width = shape[3:]
    if to[2] == source[3] == width:
        heads, width = 1, heads * width
    return heads, width, to[:3], source[:4]
