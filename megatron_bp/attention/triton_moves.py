"""Triton kernels of passes.py that move rows: to packed or padded ones, and reduced parts home.

Knows strides and dtypes, no plan. Letters as in passes.py.
Specified by tests/attention/test_passes.py (interpreted on CPU) and test_gpu_passes.py.
"""

from functools import lru_cache

import triton
import triton.language as tl
from torch import Tensor

from megatron_bp.attention.triton_launch import Launch, ceil_div, padded_size
from megatron_bp.layout.exchange import Copy


@triton.jit
def _pad_kernel(  # type: ignore[no-untyped-def]
    source_ptr,
    starts_ptr,
    into_ptr,
    length,
    num_problems,
    num_samples,
    num_heads,
    source_rows,
    into_rows,
    beyond,
    JOINED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """ROWS columns of one line (part, sample, head) of one problem, or of all joined."""
    line = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n, batch = line % num_heads, line // num_heads
    if JOINED:
        x, a = row // length, row % length
        from_line = line
    else:
        z, batch = batch % num_samples, batch // num_samples
        x, a = batch % num_problems + row // length * num_problems, row
        from_line = (batch // num_problems * num_samples + z) * num_heads + n
    keep = x < num_problems
    start = tl.load(starts_ptr + x, mask=keep, other=0)
    source = from_line.to(tl.int64) * source_rows + start + a
    found = tl.load(source_ptr + source, mask=keep, other=beyond)
    tl.store(into_ptr + line.to(tl.int64) * into_rows + row, found, mask=row < into_rows)


def pad_rows(
    x_CZNT: Tensor, starts: Tensor, length: int, into: Tensor, beyond: float, *, joined: bool
) -> None:
    """See passes.pad_rows; `starts` int64 [X] are the first columns of the runs."""
    assert x_CZNT.is_contiguous(), "columns must be contiguous"
    launch = _pad(x_CZNT.shape, length, len(starts), into.shape, beyond, joined)
    launch.start((x_CZNT, starts, into))


@lru_cache(maxsize=1024)
def _pad(
    shape: tuple[int, ...],
    length: int,
    problems: int,
    into: tuple[int, ...],
    beyond: float,
    joined: bool,
) -> Launch:
    (parts, samples, heads, columns), (_, batch, _, num_rows) = shape, into
    rows = min(padded_size(num_rows), 1024)
    return Launch(
        _pad_kernel,
        (ceil_div(num_rows, rows), parts * batch * heads, 1),
        (length, problems, samples, heads, columns, num_rows, beyond),
        (joined, rows),
    )


@triton.jit
def _part_kernel(  # type: ignore[no-untyped-def]
    part_ptr,
    own_k_ptr,
    own_v_ptr,
    dk_ptr,
    dv_ptr,
    first_row,
    num_samples,
    width,
    own_t,
    own_z,
    to_t,
    to_z,
    OWN: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """dk, dv of one row and sample: WIDTH of the heads' elements."""
    line = tl.program_id(0).to(tl.int64)
    t, z = line // num_samples + first_row, line % num_samples
    w = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    keep = w < width
    source, to, beside = line * 2 * width + w, t * to_t + z * to_z + w, t * own_t + z * own_z + w
    dk = tl.load(part_ptr + source, mask=keep, other=0.0).to(tl.float32)
    dv = tl.load(part_ptr + source + width, mask=keep, other=0.0).to(tl.float32)
    if OWN:
        dk += tl.load(own_k_ptr + beside, mask=keep, other=0.0).to(tl.float32)
        dv += tl.load(own_v_ptr + beside, mask=keep, other=0.0).to(tl.float32)
    tl.store(dk_ptr + to, dk.to(dk_ptr.dtype.element_ty), mask=keep)
    tl.store(dv_ptr + to, dv.to(dv_ptr.dtype.element_ty), mask=keep)


def write_part(
    part_RZ2MH: Tensor, row: int, own: tuple[Tensor, ...], into: tuple[Tensor, Tensor]
) -> None:
    """See clean_kv.write_part."""
    beside = own or into
    strides = part_RZ2MH.stride(), *[x.stride() for x in (*beside, *into)]
    launch = _part(part_RZ2MH.shape, strides, row, bool(own))
    launch.start((part_RZ2MH, *beside, *into))


@lru_cache(maxsize=1024)
def _part(
    shape: tuple[int, ...], strides: tuple[tuple[int, ...], ...], row: int, own: bool
) -> Launch:
    rows, samples, _, heads, size = shape
    part, beside, beside_v, to, to_v = strides
    width = heads * size
    assert (beside, to) == (beside_v, to_v), "keys and values must lie alike"
    assert beside[2:] == to[2:] == part[3:] == (size, 1), "heads must be contiguous"
    assert part[:3] == (samples * 2 * width, 2 * width, width), "what arrives is contiguous"
    block = min(padded_size(width), 1024)
    return Launch(
        _part_kernel,
        (rows * samples, ceil_div(width, block), 1),
        (row, samples, width, *beside[:2], *to[:2]),
        (own, block),
    )


@triton.jit
def _pack_kernel(  # type: ignore[no-untyped-def]
    k_ptr,
    v_ptr,
    into_ptr,
    source,
    target,
    length,
    source2,
    target2,
    num_samples,
    width,
    k_t,
    k_z,
    k_m,
    v_t,
    v_z,
    v_m,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Keys and values of one row and sample of two runs: WIDTH of the heads' elements."""
    line = tl.program_id(0).to(tl.int64)
    row, z = line // num_samples, line % num_samples
    second = row >= length
    t = tl.where(second, source2 - length, source) + row
    s = tl.where(second, target2 - length, target) + row
    w = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    keep = w < width
    m, h = w // SIZE, w % SIZE
    k = tl.load(k_ptr + t * k_t + z * k_z + m * k_m + h, mask=keep, other=0.0)
    v = tl.load(v_ptr + t * v_t + z * v_z + m * v_m + h, mask=keep, other=0.0)
    to = into_ptr + (s * num_samples + z) * 2 * width + w
    tl.store(to, k, mask=keep)
    tl.store(to + width, v, mask=keep)


def pack_rows(k_RZMH: Tensor, v_RZMH: Tensor, copies: tuple[Copy, ...], out_SZ2MH: Tensor) -> None:
    """See clean_kv.pack_rows."""
    assert out_SZ2MH.is_contiguous(), "packed rows are contiguous"
    for launch in _packs(copies, k_RZMH.shape[1:], (k_RZMH.stride(), v_RZMH.stride())):
        launch.start((k_RZMH, v_RZMH, out_SZ2MH))


@lru_cache(maxsize=1024)
def _packs(
    copies: tuple[Copy, ...], shape: tuple[int, ...], strides: tuple[tuple[int, ...], ...]
) -> tuple[Launch, ...]:
    """A launch for two runs."""
    samples, heads, size = shape
    assert all(x[3] == 1 for x in strides), "head elements must be contiguous"
    width, some = heads * size, [x for x in copies if x.length]
    block = min(padded_size(width), 1024)
    found = []
    for at in range(0, len(some), 2):
        first, *others = some[at : at + 2]
        second = others[0] if others else Copy(0, 0, 0)
        numbers = (*first, *second[:2], samples, width, *[x for at in strides for x in at[:3]])
        grid = ((first.length + second.length) * samples, ceil_div(width, block), 1)
        found.append(Launch(_pack_kernel, grid, numbers, (size, block)))
    return tuple(found)
