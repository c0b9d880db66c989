"""Attention of many small problems: what is left around each block, in one Triton kernel a pass.

A vendor kernel spends a whole tile on a block of 32 rows. Here the query heads of a key/value head
share a tile, keys come straight from up to two buffers (the previous clean block, the own block),
and the result is merged into its rows (or added to dq) in the same pass.
Letters: X problems, Q rows, Z samples, N query heads, M key/value heads, K keys, H head size.
Specified by tests/attention/test_small.py (interpreted on CPU) and test_gpu_small.py.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_bp.attention.contract import Window

MAX_TILE = 16384
"""Largest padded keys * head size of a problem: its dk and dv must fit in registers."""
MAX_ROWS = 256
TILE_ROWS = 64


class KeyParts(NamedTuple):
    """Keys and values of a problem, as one or two runs [X, K, Z, M, H]; the second may be empty."""

    first: tuple[Tensor, Tensor]
    second: tuple[Tensor, Tensor]

    @property
    def num_keys(self) -> int:
        """K of both runs."""
        return self.first[0].shape[1] + self.second[0].shape[1]


def fits(num_rows: int, num_keys: int, head_size: int, dtype: torch.dtype) -> bool:
    """Whether problems of this shape are small enough."""
    tile = max(triton.next_power_of_2(num_keys), 16) * max(triton.next_power_of_2(head_size), 16)
    return tile <= MAX_TILE and num_rows <= MAX_ROWS and dtype in (torch.bfloat16, torch.float16)


@triton.jit
def _visible(a, c, num_rows, num_keys, left, right):  # type: ignore[no-untyped-def]
    """Which of the keys c [1, C] the rows a [R, 1] see; -1 is unbounded."""
    at = a + num_keys - num_rows
    seen = (c < num_keys) & (a < num_rows)
    seen = seen & ((left < 0) | (c >= at - left))
    return seen & ((right < 0) | (c <= at + right))


@triton.jit
def _load_keys(  # type: ignore[no-untyped-def]
    ptr, ptr2, x, z, m, c, h, split, num_keys, size, s_x, s_k, s_z, s_m, t_x, t_k, t_z, t_m
):
    """Rows c of the two runs [first ; second], zero beyond them."""
    inside = (h < size)[None, :]
    at = ptr + x * s_x + z * s_z + m * s_m + c[:, None] * s_k + h[None, :]
    at2 = ptr2 + x * t_x + z * t_z + m * t_m + (c[:, None] - split) * t_k + h[None, :]
    late = c[:, None] >= split
    first = tl.load(at, mask=inside & ~late, other=0.0)
    second = tl.load(at2, mask=inside & late & (c[:, None] < num_keys), other=0.0)
    return tl.where(late, second, first)


@triton.jit
def _forward_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, k2_ptr, v2_ptr, out_ptr, lse_ptr,
    samples, num_rows, split, num_keys, group, size, scale, left, right,
    q_x, q_q, q_z, q_n, k_x, k_k, k_z, k_m, k2_x, k2_k, k2_z, k2_m,
    o_x, o_q, o_z, o_n, l_x, l_q, l_z, l_n,
    STORE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    problem, m = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x, z = problem // samples, problem % samples
    r = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    a, n = r // group, m * group + r % group
    c, h = tl.arange(0, KEYS), tl.arange(0, SIZE)
    keep = a < num_rows
    keep2 = keep[:, None] & (h < size)[None, :]
    q_at = q_ptr + x * q_x + z * q_z + a[:, None] * q_q + n[:, None] * q_n + h[None, :]
    q = tl.load(q_at, mask=keep2, other=0.0)
    k = _load_keys(k_ptr, k2_ptr, x, z, m, c, h, split, num_keys, size,
                   k_x, k_k, k_z, k_m, k2_x, k2_k, k2_z, k2_m)  # fmt: skip
    v = _load_keys(v_ptr, v2_ptr, x, z, m, c, h, split, num_keys, size,
                   k_x, k_k, k_z, k_m, k2_x, k2_k, k2_z, k2_m)  # fmt: skip
    seen = _visible(a[:, None], c[None, :], num_rows, num_keys, left, right)
    s = tl.where(seen, tl.dot(q, tl.trans(k)) * scale, float("-inf"))
    o_at = out_ptr + x * o_x + z * o_z + a[:, None] * o_q + n[:, None] * o_n + h[None, :]
    l_at = lse_ptr + x * l_x + z * l_z + a * l_q + n * l_n
    top = tl.max(s, 1)
    if not STORE:
        old = tl.load(l_at, mask=keep, other=float("-inf"))
        top = tl.maximum(top, old)
    top = tl.where(top == float("-inf"), 0.0, top)
    p = tl.exp(s - top[:, None])
    total = tl.sum(p, 1)
    out = tl.dot(p.to(v.dtype), v)
    if not STORE:
        weight = tl.exp(old - top)
        total += weight
        out += weight[:, None] * tl.load(o_at, mask=keep2, other=0.0).to(tl.float32)
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    lse = tl.where(empty, float("-inf"), top + tl.log(total))
    tl.store(o_at, (out / total[:, None]).to(out_ptr.dtype.element_ty), mask=keep2)
    tl.store(l_at, lse, mask=keep)


@triton.jit
def _backward_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, k2_ptr, v2_ptr, out_ptr, lse_ptr, dout_ptr, dq_ptr, dk_ptr, dv_ptr,
    samples, num_rows, split, num_keys, group, size, scale, left, right,
    q_x, q_q, q_z, q_n, k_x, k_k, k_z, k_m, k2_x, k2_k, k2_z, k2_m,
    o_x, o_q, o_z, o_n, l_x, l_q, l_z, l_n, g_x, g_q, g_z, g_n, d_x, d_q, d_z, d_n,
    dk_x, dk_k, dk_z, dk_m,
    STORE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """All rows of one problem, sample and key/value head; see kernels/dense.py for the formula."""
    problem, m = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x, z = problem // samples, problem % samples
    c, h = tl.arange(0, KEYS), tl.arange(0, SIZE)
    k = _load_keys(k_ptr, k2_ptr, x, z, m, c, h, split, num_keys, size,
                   k_x, k_k, k_z, k_m, k2_x, k2_k, k2_z, k2_m)  # fmt: skip
    v = _load_keys(v_ptr, v2_ptr, x, z, m, c, h, split, num_keys, size,
                   k_x, k_k, k_z, k_m, k2_x, k2_k, k2_z, k2_m)  # fmt: skip
    dk = tl.zeros((KEYS, SIZE), dtype=tl.float32)
    dv = tl.zeros((KEYS, SIZE), dtype=tl.float32)
    for first in range(0, num_rows * group, ROWS):
        r = first + tl.arange(0, ROWS)
        a, n = r // group, m * group + r % group
        keep = a < num_rows
        keep2 = keep[:, None] & (h < size)[None, :]
        a2, n2, h2 = a[:, None], n[:, None], h[None, :]
        q = tl.load(q_ptr + x * q_x + z * q_z + a2 * q_q + n2 * q_n + h2, mask=keep2, other=0.0)
        g = tl.load(dout_ptr + x * g_x + z * g_z + a2 * g_q + n2 * g_n + h2, mask=keep2, other=0.0)
        o = tl.load(out_ptr + x * o_x + z * o_z + a2 * o_q + n2 * o_n + h2, mask=keep2, other=0.0)
        lse = tl.load(lse_ptr + x * l_x + z * l_z + a * l_q + n * l_n, mask=keep, other=0.0)
        delta = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
        seen = _visible(a[:, None], c[None, :], num_rows, num_keys, left, right)
        s = tl.dot(q, tl.trans(k)) * scale
        p = tl.where(seen, tl.exp(s - lse[:, None]), 0.0)
        dv += tl.dot(tl.trans(p.to(g.dtype)), g)
        ds = (p * (tl.dot(g, tl.trans(v)) - delta[:, None]) * scale).to(q.dtype)
        dk += tl.dot(tl.trans(ds), q)
        dq = tl.dot(ds, k)
        d_at = dq_ptr + x * d_x + z * d_z + a2 * d_q + n2 * d_n + h2
        if not STORE:
            dq += tl.load(d_at, mask=keep2, other=0.0).to(tl.float32)
        tl.store(d_at, dq.to(dq_ptr.dtype.element_ty), mask=keep2)
    inside = (c < num_keys)[:, None] & (h < size)[None, :]
    at = x * dk_x + z * dk_z + m * dk_m + c[:, None] * dk_k + h[None, :]
    tl.store(dk_ptr + at, dk.to(dk_ptr.dtype.element_ty), mask=inside)
    tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=inside)


def _sizes(q_XQZNH: Tensor, keys: KeyParts) -> tuple[int, int, int, int, int, int]:
    (k, v), (k2, v2) = keys
    assert (k.stride(), k2.stride()) == (v.stride(), v2.stride()), "k and v must lie alike"
    assert q_XQZNH.stride(-1) == k.stride(-1) == k2.stride(-1) == 1, "heads must be contiguous"
    _, rows, samples, heads, size = q_XQZNH.shape
    return samples, rows, k.shape[1], keys.num_keys, heads // k.shape[3], size


def _tiles(num_keys: int, size: int) -> dict[str, int]:
    return {
        "ROWS": TILE_ROWS,
        "KEYS": max(triton.next_power_of_2(num_keys), 16),
        "SIZE": max(triton.next_power_of_2(size), 16),
    }


def forward_into(
    q_XQZNH: Tensor,
    keys: KeyParts,
    window: Window,
    scale: float,
    into: tuple[Tensor, Tensor],
    *,
    store: bool,
) -> None:
    """Merges the problems' output and LSE into `into` ([X, Q, Z, N, H] and [X, Q, Z, N])."""
    out, lse = into
    sizes = _sizes(q_XQZNH, keys)
    samples, rows, _, num_keys, group, size = sizes
    grid = (len(q_XQZNH) * samples, keys.first[0].shape[3], triton.cdiv(rows * group, TILE_ROWS))
    _forward_kernel[grid](
        q_XQZNH,
        *keys.first,
        *keys.second,
        out,
        lse,
        *sizes,
        scale,
        *window,
        *q_XQZNH.stride()[:4],
        *keys.first[0].stride()[:4],
        *keys.second[0].stride()[:4],
        *out.stride()[:4],
        *lse.stride(),
        STORE=store,
        **_tiles(num_keys, size),
        num_warps=4 if size <= 128 else 8,
    )


class Rows(NamedTuple):
    """Query-side tensors of a backward: [X, Q, Z, N, H], the LSE [X, Q, Z, N]."""

    q: Tensor
    out: Tensor
    lse: Tensor
    dout: Tensor


def backward_into(
    rows: Rows, keys: KeyParts, window: Window, scale: float, dq_XQZNH: Tensor, *, store: bool
) -> tuple[Tensor, Tensor]:
    """Adds to dq; returns dk and dv of both runs together, [X, K, Z, M, H]."""
    sizes = _sizes(rows.q, keys)
    samples, _, _, num_keys, _, size = sizes
    like = keys.first[0]
    shape = (len(rows.q), num_keys, samples, like.shape[3], size)
    dk, dv = (torch.empty(shape, dtype=like.dtype, device=like.device) for _ in range(2))
    _backward_kernel[(len(rows.q) * samples, like.shape[3])](
        rows.q,
        *keys.first,
        *keys.second,
        rows.out,
        rows.lse,
        rows.dout,
        dq_XQZNH,
        dk,
        dv,
        *sizes,
        scale,
        *window,
        *rows.q.stride()[:4],
        *like.stride()[:4],
        *keys.second[0].stride()[:4],
        *rows.out.stride()[:4],
        *rows.lse.stride(),
        *rows.dout.stride()[:4],
        *dq_XQZNH.stride()[:4],
        *dk.stride()[:4],
        STORE=store,
        **_tiles(num_keys, size),
        num_warps=4 if size <= 128 else 8,
        num_stages=1,  # two turns of the row loop or so: room for more programs instead
    )
    return dk, dv
