"""Attention of many small problems: what is left around each block, in one Triton kernel a pass.

A vendor kernel spends a whole tile on a block of 32 rows. Here the query heads of a key/value head
share a tile; rows and keys are found by the first row of each run, so problems may lie anywhere;
keys come straight from up to three runs (the previous clean block, the own block, the far end of
the window), and the result is merged into its rows in the same pass. A backward adds dq and the
gradients of the first two runs to their rows; the far end's would race with other problems' and
are returned.
Letters: X problems, T query rows, S key rows, Z samples, N query heads, M key/value heads, H head
size. Specified by tests/attention/test_small.py (interpreted on CPU) and test_gpu_small.py.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_bp.attention.contract import Window

MAX_TILE = 16384
"""Largest padded keys * head size of a problem: its dk and dv must fit in registers."""
MAX_TILE_WITH_FAR = 8192
"""The same with a far end: above it two kernels are faster than one that spills registers."""
MAX_ROWS = 256
TILE_ROWS = 64


class Problems(NamedTuple):
    """X problems of `num_rows` rows and up to three key runs; a run of length 0 is absent.

    `starts` int64 [4, X]: first local row, then first key row in the clean, own and again the clean
    buffer. The first two runs are seen under `window`, bottom right aligned, as one run; the last
    `lengths[2]` rows see the third run, the far end, causally.
    """

    starts: Tensor
    num_rows: int
    lengths: tuple[int, int, int]
    window: Window


Pair = tuple[Tensor, Tensor]


class Keys(NamedTuple):
    """Keys and values (or their gradients) of the clean and own buffers, each [S, Z, M, H]."""

    clean: tuple[Tensor, Tensor]
    own: tuple[Tensor, Tensor]


def fits(num_rows: int, num_keys: int, num_far: int, head_size: int) -> bool:
    """Whether problems of this shape, with `num_far` keys more at the far end, are small enough."""
    num_keys += num_far
    tile = max(triton.next_power_of_2(num_keys), 16) * max(triton.next_power_of_2(head_size), 16)
    return tile <= (MAX_TILE_WITH_FAR if num_far else MAX_TILE) and num_rows <= MAX_ROWS


@triton.jit
def _visible(a, c, num_rows, near, far, left, right):  # type: ignore[no-untyped-def]
    """Which of the keys c [1, C] the rows a [R, 1] see; -1 is unbounded."""
    at = a + near - num_rows
    seen = (c < near) & ((left < 0) | (c >= at - left)) & ((right < 0) | (c <= at + right))
    far_seen = (c >= near) & (c < near + far) & (c - near <= a + far - num_rows)
    return (a < num_rows) & (seen | far_seen)


@triton.jit
def _load_keys(  # type: ignore[no-untyped-def]
    clean, own, end, c, h, split, near, far, size, s_k, t_k, FAR: tl.constexpr
):
    """Rows c of the runs [clean ; own ; far end], zero beyond; the pointers are to their row 0."""
    inside = (h < size)[None, :]
    c2, h2 = c[:, None], h[None, :]
    mine = (c2 >= split) & (c2 < near)
    rows = tl.load(clean + c2 * s_k + h2, mask=inside & (c2 < split), other=0.0)
    rows = tl.where(mine, tl.load(own + c2 * t_k + h2, mask=inside & mine, other=0.0), rows)
    if FAR:
        last = (c2 >= near) & (c2 < near + far)
        rows = tl.where(last, tl.load(end + c2 * s_k + h2, mask=inside & last, other=0.0), rows)
    return rows


@triton.jit
def _forward_kernel(  # type: ignore[no-untyped-def]
    starts_ptr, q_ptr, k_ptr, v_ptr, k2_ptr, v2_ptr, out_ptr, lse_ptr,
    problems, samples, num_rows, split, near, far, group, size, scale, left, right,
    q_q, q_z, q_n, k_k, k_z, k_m, k2_k, k2_z, k2_m, o_q, o_z, o_n, l_q, l_z, l_n,
    STORE: tl.constexpr, FAR: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    problem, m = tl.program_id(0), tl.program_id(1)
    x, z = problem // samples, (problem % samples).to(tl.int64)
    row = tl.load(starts_ptr + x)
    first = tl.load(starts_ptr + problems + x) * k_k + z * k_z + m * k_m
    own = (tl.load(starts_ptr + 2 * problems + x) - split) * k2_k + z * k2_z + m * k2_m
    last = (tl.load(starts_ptr + 3 * problems + x) - near) * k_k + z * k_z + m * k_m
    r = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    a, n = r // group, m * group + r % group
    c, h = tl.arange(0, KEYS), tl.arange(0, SIZE)
    keep = a < num_rows
    keep2 = keep[:, None] & (h < size)[None, :]
    q_at = q_ptr + row * q_q + z * q_z + (a[:, None] * q_q + n[:, None] * q_n + h[None, :])
    q = tl.load(q_at, mask=keep2, other=0.0)
    k = _load_keys(k_ptr + first, k2_ptr + own, k_ptr + last, c, h, split, near, far, size,
                   k_k, k2_k, FAR)  # fmt: skip
    v = _load_keys(v_ptr + first, v2_ptr + own, v_ptr + last, c, h, split, near, far, size,
                   k_k, k2_k, FAR)  # fmt: skip
    seen = _visible(a[:, None], c[None, :], num_rows, near, far, left, right)
    s = tl.where(seen, tl.dot(q, tl.trans(k)) * scale, float("-inf"))
    o_at = out_ptr + row * o_q + z * o_z + (a[:, None] * o_q + n[:, None] * o_n + h[None, :])
    l_at = lse_ptr + row * l_q + z * l_z + (a * l_q + n * l_n)
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
def _put(ptr, c, h, value, keep, size, s_k, STORE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes the rows c of `value` that are kept to `ptr` (of row 0), or adds them."""
    at = ptr + c[:, None] * s_k + h[None, :]
    keep2 = keep[:, None] & (h < size)[None, :]
    if not STORE:
        value += tl.load(at, mask=keep2, other=0.0).to(tl.float32)
    tl.store(at, value.to(ptr.dtype.element_ty), mask=keep2)


@triton.jit
def _backward_kernel(  # type: ignore[no-untyped-def]
    starts_ptr, q_ptr, k_ptr, v_ptr, k2_ptr, v2_ptr, out_ptr, lse_ptr, dout_ptr, dq_ptr,
    dk_ptr, dv_ptr, dk2_ptr, dv2_ptr, dk3_ptr, dv3_ptr,
    problems, samples, num_rows, split, near, far, group, size, scale, left, right,
    q_q, q_z, q_n, k_k, k_z, k_m, k2_k, k2_z, k2_m, o_q, o_z, o_n, l_q, l_z, l_n,
    g_q, g_z, g_n, d_q, d_z, d_n, e_k, e_z, e_m, e2_k, e2_z, e2_m, e3_k, e3_z, e3_m,
    STORE: tl.constexpr, DIRECT: tl.constexpr, CLEAN: tl.constexpr, OWN: tl.constexpr,
    FAR: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """All rows of one problem, sample and key/value head; see kernels/dense.py for the formula."""
    problem, m = tl.program_id(0), tl.program_id(1)
    x, z = problem // samples, (problem % samples).to(tl.int64)
    row = tl.load(starts_ptr + x)
    first, own = tl.load(starts_ptr + problems + x), tl.load(starts_ptr + 2 * problems + x) - split
    last = tl.load(starts_ptr + 3 * problems + x) - near
    c, h = tl.arange(0, KEYS), tl.arange(0, SIZE)
    a1, b1, c1 = first * k_k + z * k_z + m * k_m, own * k2_k + z * k2_z + m * k2_m, last * k_k
    c1 += z * k_z + m * k_m
    k = _load_keys(k_ptr + a1, k2_ptr + b1, k_ptr + c1, c, h, split, near, far, size,
                   k_k, k2_k, FAR)  # fmt: skip
    v = _load_keys(v_ptr + a1, v2_ptr + b1, v_ptr + c1, c, h, split, near, far, size,
                   k_k, k2_k, FAR)  # fmt: skip
    q_ptr += row * q_q + z * q_z + m * group * q_n
    dout_ptr += row * g_q + z * g_z + m * group * g_n
    out_ptr += row * o_q + z * o_z + m * group * o_n
    dq_ptr += row * d_q + z * d_z + m * group * d_n
    lse_ptr += row * l_q + z * l_z + m * group * l_n
    dk = tl.zeros((KEYS, SIZE), dtype=tl.float32)
    dv = tl.zeros((KEYS, SIZE), dtype=tl.float32)
    for start in range(0, num_rows * group, ROWS):
        r = start + tl.arange(0, ROWS)
        a, n = r // group, r % group
        keep = a < num_rows
        keep2 = keep[:, None] & (h < size)[None, :]
        a2, n2, h2 = a[:, None], n[:, None], h[None, :]
        g = tl.load(dout_ptr + (a2 * g_q + n2 * g_n + h2), mask=keep2, other=0.0)
        o = tl.load(out_ptr + (a2 * o_q + n2 * o_n + h2), mask=keep2, other=0.0)
        delta = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
        q = tl.load(q_ptr + (a2 * q_q + n2 * q_n + h2), mask=keep2, other=0.0)
        lse = tl.load(lse_ptr + (a * l_q + n * l_n), mask=keep, other=0.0)
        seen = _visible(a2, c[None, :], num_rows, near, far, left, right)
        s = tl.dot(q, tl.trans(k)) * scale
        p = tl.where(seen, tl.exp(s - lse[:, None]), 0.0)
        dv += tl.dot(tl.trans(p.to(g.dtype)), g)
        ds = (p * (tl.dot(g, tl.trans(v)) - delta[:, None]) * scale).to(q.dtype)
        dk += tl.dot(tl.trans(ds), q)
        dq = tl.dot(ds, k)
        d_at = dq_ptr + (a2 * d_q + n2 * d_n + h2)
        if not STORE:
            dq += tl.load(d_at, mask=keep2, other=0.0).to(tl.float32)
        tl.store(d_at, dq.to(dq_ptr.dtype.element_ty), mask=keep2)
    at = (first if DIRECT else x.to(tl.int64) * split) * e_k + z * e_z + m * e_m
    _put(dk_ptr + at, c, h, dk, c < split, size, e_k, CLEAN)
    _put(dv_ptr + at, c, h, dv, c < split, size, e_k, CLEAN)
    at, keep = own * e2_k + z * e2_z + m * e2_m, (c >= split) & (c < near)
    _put(dk2_ptr + at, c, h, dk, keep, size, e2_k, OWN)
    _put(dv2_ptr + at, c, h, dv, keep, size, e2_k, OWN)
    if FAR:
        at = (x.to(tl.int64) * far - near) * e3_k + z * e3_z + m * e3_m
        keep = (c >= near) & (c < near + far)
        _put(dk3_ptr + at, c, h, dk, keep, size, e3_k, True)
        _put(dv3_ptr + at, c, h, dv, keep, size, e3_k, True)


def _sizes(q_TZNH: Tensor, keys: Keys, todo: Problems) -> tuple[int, ...]:
    (k, v), (k2, v2) = keys
    assert (k.stride(), k2.stride()) == (v.stride(), v2.stride()), "k and v must lie alike"
    assert q_TZNH.stride(-1) == k.stride(-1) == k2.stride(-1) == 1, "heads must be contiguous"
    _, samples, heads, size = q_TZNH.shape
    clean, own, far = todo.lengths
    problems = todo.starts.shape[1]
    return problems, samples, todo.num_rows, clean, clean + own, far, heads // k.shape[2], size


def _tiles(todo: Problems, size: int) -> dict[str, int]:
    keys = max(triton.next_power_of_2(sum(todo.lengths)), 16)
    wide = max(triton.next_power_of_2(size), 16)
    return {"ROWS": TILE_ROWS, "KEYS": keys, "SIZE": wide}


def forward_into(
    q_TZNH: Tensor,
    keys: Keys,
    todo: Problems,
    scale: float,
    into: tuple[Tensor, Tensor],
    *,
    store: bool,
) -> None:
    """Merges the problems' output and LSE into their rows of `into` ([T, Z, N, H], [T, Z, N])."""
    out, lse = into
    sizes = _sizes(q_TZNH, keys, todo)
    problems, samples, rows, *_, group, size = sizes
    grid = (problems * samples, keys.clean[0].shape[2], triton.cdiv(rows * group, TILE_ROWS))
    _forward_kernel[grid](
        todo.starts,
        q_TZNH,
        *keys.clean,
        *keys.own,
        out,
        lse,
        *sizes,
        scale,
        *todo.window,
        *q_TZNH.stride()[:3],
        *keys.clean[0].stride()[:3],
        *keys.own[0].stride()[:3],
        *out.stride()[:3],
        *lse.stride(),
        STORE=store,
        FAR=todo.lengths[2] > 0,
        **_tiles(todo, size),
        num_warps=4 if size <= 128 else 8,
    )


class Rows(NamedTuple):
    """Query-side tensors of a backward: [T, Z, N, H], the LSE [T, Z, N]."""

    q: Tensor
    out: Tensor
    lse: Tensor
    dout: Tensor


class Stores(NamedTuple):
    """Which results overwrite their rows instead of adding; `direct`: clean ones have rows."""

    rows: bool
    clean: bool
    own: bool
    direct: bool


def backward_into(
    rows: Rows,
    keys: Keys,
    todo: Problems,
    scale: float,
    grads: tuple[Tensor, Keys],
    store: Stores,
) -> tuple[Pair, Pair]:
    """Adds to dq and to the key gradients of the first two runs.

    Returns dk and dv, each [X, K, Z, M, H], of the runs that were not added: the clean run if not
    `store.direct`, and the far end; empty where there is no such run.
    """
    sizes = _sizes(rows.q, keys, todo)
    problems, samples, *_, size = sizes
    dq, into = grads
    clean = keys.clean[0]

    first = into.clean if store.direct else _apart(clean, problems, samples, todo.lengths[0])
    far = _apart(clean, problems, samples, todo.lengths[2])
    tiles = _tiles(todo, size)
    _backward_kernel[(problems * samples, clean.shape[2])](
        todo.starts,
        rows.q,
        *keys.clean,
        *keys.own,
        rows.out,
        rows.lse,
        rows.dout,
        dq,
        *first,
        *into.own,
        *far,
        *sizes,
        scale,
        *todo.window,
        *rows.q.stride()[:3],
        *clean.stride()[:3],
        *keys.own[0].stride()[:3],
        *rows.out.stride()[:3],
        *rows.lse.stride(),
        *rows.dout.stride()[:3],
        *dq.stride()[:3],
        *first[0].stride()[:3],
        *into.own[0].stride()[:3],
        *far[0].stride()[:3],
        STORE=store.rows,
        DIRECT=store.direct,
        CLEAN=store.clean or not store.direct,
        OWN=store.own,
        FAR=todo.lengths[2] > 0,
        **tiles,
        num_warps=4 if tiles["KEYS"] * tiles["SIZE"] <= 8192 else 8,
        num_stages=1,  # two turns of the row loop or so: room for more programs instead
    )
    if store.direct:
        first = _apart(clean, problems, samples, 0)
    return _by_problem(first, problems), _by_problem(far, problems)


def _apart(like: Tensor, problems: int, samples: int, length: int) -> Pair:
    """Two new tensors [X * length, Z, M, H]."""
    shape = (problems * length, samples, *like.shape[2:])
    first, second = (torch.empty(shape, dtype=like.dtype, device=like.device) for _ in range(2))
    return first, second


def _by_problem(pair: Pair, problems: int) -> Pair:
    first, second = (x.view(problems, len(x) // problems, *x.shape[1:]) for x in pair)
    return first, second
