"""The kernels of triton_small.py for head sizes above 128: heads are read and written in slices.

Whole heads of that size do not fit in registers. So scores and their gradients are summed slice by
slice, and then every result is made and written slice by slice; the second reading of a slice comes
from cache. Backward keeps the probabilities of all rows of a problem, TILES tiles of them, with
keys as rows: so they are operands of the products dv and dk as they are.
Letters as in triton_small.py. Specified by tests/attention/test_small.py (interpreted on CPU) and
test_gpu_small.py.
"""

import triton
import triton.language as tl

from megatron_bp.attention.triton_small_kernels import _near_at, _near_seen, _put, _put_both


@triton.jit
def forward_wide_kernel(  # type: ignore[no-untyped-def]
    starts_ptr, q_ptr, k_ptr, v_ptr, k2_ptr, v2_ptr, out_ptr, lse_ptr,
    problems, samples, num_rows, split, near, scale, left, right,
    q_z, k_z, k_m, k2_z, k2_m, o_z, l_q, l_z, l_n,
    q_q: tl.constexpr, q_n: tl.constexpr, k_k: tl.constexpr, k2_k: tl.constexpr,
    o_q: tl.constexpr, o_n: tl.constexpr,
    GROUP: tl.constexpr, HEAD: tl.constexpr, STORE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SLICE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """ROWS rows of the output and LSE, merged with what is there unless STORE."""
    problem, m = tl.program_id(0), tl.program_id(1)
    x, z = problem // samples, (problem % samples).to(tl.int64)
    row = tl.load(starts_ptr + x)
    first = tl.load(starts_ptr + problems + x) * k_k + z * k_z + m * k_m
    own = (tl.load(starts_ptr + 2 * problems + x) - split) * k2_k + z * k2_z + m * k2_m
    r = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    a, n = r // GROUP, m * GROUP + r % GROUP
    c, h = tl.arange(0, KEYS), tl.arange(0, SLICE)
    a2, n2, h2 = a[:, None], n[:, None], h[None, :]
    keep = a < num_rows
    keep2, there = keep[:, None], (c < near)[:, None]
    o_at = out_ptr + (row * o_q + z * o_z) + (a2 * o_q + n2 * o_n + h2)
    l_at = lse_ptr + (row * l_q + z * l_z) + (a * l_q + n * l_n)
    q_at = q_ptr + (row * q_q + z * q_z) + (a2 * q_q + n2 * q_n + h2)
    k_at = _near_at(k_ptr + first, k2_ptr + own, c, h, split, k_k, k2_k)
    v_at = _near_at(v_ptr + first, v2_ptr + own, c, h, split, k_k, k2_k)
    s = tl.zeros((ROWS, KEYS), dtype=tl.float32)
    for d in tl.range(0, HEAD, SLICE, num_stages=STAGES):
        inside = h2 + d < HEAD
        q = tl.load(q_at + d, mask=keep2 & inside, other=0.0)
        k = tl.load(k_at + d, mask=there & inside, other=0.0)
        s += tl.dot(q, tl.trans(k))
    seen = _near_seen(a2, c[None, :], num_rows, near, left, right)
    s = tl.where(seen, s * scale, float("-inf"))
    top = tl.max(s, 1)
    if not STORE:
        old = tl.load(l_at, mask=keep, other=float("-inf"))
        top = tl.maximum(top, old)
    top = tl.where(top == float("-inf"), 0.0, top)
    p = tl.exp(s - top[:, None])
    total = tl.sum(p, 1)
    if not STORE:
        weight = tl.exp(old - top)
        total += weight
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    tl.store(l_at, tl.where(empty, float("-inf"), top + tl.log(total)), mask=keep)
    p, part = p.to(v_ptr.dtype.element_ty), (1.0 / total)[:, None]
    for d in tl.range(0, HEAD, SLICE, num_stages=STAGES):
        inside = h2 + d < HEAD
        out = tl.dot(p, tl.load(v_at + d, mask=there & inside, other=0.0))
        if not STORE:
            before = tl.load(o_at + d, mask=keep2 & inside, other=0.0)
            out += weight[:, None] * before.to(tl.float32)
        tl.store(o_at + d, (out * part).to(out_ptr.dtype.element_ty), mask=keep2 & inside)


@triton.jit
def backward_wide_kernel(  # type: ignore[no-untyped-def]
    starts_ptr, q_ptr, k_ptr, v_ptr, k2_ptr, v2_ptr, out_ptr, lse_ptr, dout_ptr, dq_ptr,
    dk_ptr, dv_ptr, dk2_ptr, dv2_ptr,
    problems, samples, num_rows, split, near, scale, left, right,
    q_z, k_z, k_m, k2_z, k2_m, o_z, l_q, l_z, l_n, t_q, t_z, t_n, g_z, d_z,
    e_z, e_m, e2_z, e2_m,
    q_q: tl.constexpr, q_n: tl.constexpr, k_k: tl.constexpr, k2_k: tl.constexpr,
    o_q: tl.constexpr, o_n: tl.constexpr, g_q: tl.constexpr, g_n: tl.constexpr,
    d_q: tl.constexpr, d_n: tl.constexpr, e_k: tl.constexpr, e2_k: tl.constexpr,
    GROUP: tl.constexpr, HEAD: tl.constexpr, SUMMED: tl.constexpr, TILES: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SLICE: tl.constexpr, STAGES: tl.constexpr,
    STORE: tl.constexpr, DIRECT: tl.constexpr, CLEAN: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """All gradients of a problem; see backward_kernel for SUMMED and the strides t."""
    problem, m = tl.program_id(0), tl.program_id(1)
    x, z = problem // samples, (problem % samples).to(tl.int64)
    row, first = tl.load(starts_ptr + x), tl.load(starts_ptr + problems + x)
    own = tl.load(starts_ptr + 2 * problems + x) - split
    c, h = tl.arange(0, KEYS), tl.arange(0, SLICE)
    c2, h2 = c[:, None], h[None, :]
    there = c2 < near
    a1, b1 = first * k_k + z * k_z + m * k_m, own * k2_k + z * k2_z + m * k2_m
    k_at = _near_at(k_ptr + a1, k2_ptr + b1, c, h, split, k_k, k2_k)
    v_at = _near_at(v_ptr + a1, v2_ptr + b1, c, h, split, k_k, k2_k)
    q_ptr += row * q_q + z * q_z + m * GROUP * q_n
    dout_ptr += row * g_q + z * g_z + m * GROUP * g_n
    if SUMMED:
        out_ptr += row * t_q + z * t_z + m * GROUP * t_n
    else:
        out_ptr += row * o_q + z * o_z + m * GROUP * o_n
    dq_ptr += row * d_q + z * d_z + m * GROUP * d_n
    lse_ptr += row * l_q + z * l_z + m * GROUP * l_n
    ps = ()
    dss = ()
    for tile in tl.static_range(TILES):
        r = tile * ROWS + tl.arange(0, ROWS)
        a, n = r // GROUP, r % GROUP
        keep = a < num_rows
        a2, n2, keep2 = a[:, None], n[:, None], keep[:, None]
        lse = tl.load(lse_ptr + (a * l_q + n * l_n), mask=keep, other=0.0)
        if SUMMED:
            delta = tl.load(out_ptr + (a * t_q + n * t_n), mask=keep, other=0.0)
        else:
            delta = tl.zeros((ROWS,), dtype=tl.float32)
        s = tl.zeros((KEYS, ROWS), dtype=tl.float32)
        dp = tl.zeros((KEYS, ROWS), dtype=tl.float32)
        for d in tl.range(0, HEAD, SLICE, num_stages=STAGES):
            inside = h2 + d < HEAD
            keep3 = keep2 & inside
            q = tl.load(q_ptr + (a2 * q_q + n2 * q_n + h2) + d, mask=keep3, other=0.0)
            k = tl.load(k_at + d, mask=there & inside, other=0.0)
            s += tl.dot(k, tl.trans(q))
            g = tl.load(dout_ptr + (a2 * g_q + n2 * g_n + h2) + d, mask=keep3, other=0.0)
            v = tl.load(v_at + d, mask=there & inside, other=0.0)
            dp += tl.dot(v, tl.trans(g))
            if not SUMMED:
                o = tl.load(out_ptr + (a2 * o_q + n2 * o_n + h2) + d, mask=keep3, other=0.0)
                delta += tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
        seen = _near_seen(a[None, :], c2, num_rows, near, left, right)
        p = tl.where(seen, tl.exp(s * scale - lse[None, :]), 0.0)
        ds = p * (dp - delta[None, :]) * scale
        ps += (p.to(dout_ptr.dtype.element_ty),)  # type: ignore[assignment]
        dss += (ds.to(q_ptr.dtype.element_ty),)  # type: ignore[assignment]
    at = (first if DIRECT else x.to(tl.int64) * split) * e_k + z * e_z + m * e_m + (c2 * e_k + h2)
    at2 = own * e2_k + z * e2_z + m * e2_m + (c2 * e2_k + h2)
    for d in tl.range(0, HEAD, SLICE, num_stages=1):
        inside = h2 + d < HEAD
        mine, mine2 = (c2 < split) & inside, (c2 >= split) & there & inside
        dv = tl.zeros((KEYS, SLICE), dtype=tl.float32)
        for tile in tl.static_range(TILES):
            r = tile * ROWS + tl.arange(0, ROWS)
            a2, n2 = (r // GROUP)[:, None], (r % GROUP)[:, None]
            keep3 = (a2 < num_rows) & inside
            g = tl.load(dout_ptr + (a2 * g_q + n2 * g_n + h2) + d, mask=keep3, other=0.0)
            dv += tl.dot(ps[tile], g)
        _put_both(dv_ptr + at + d, dv2_ptr + at2 + d, dv, mine, mine2, CLEAN, OWN)
    # A loop of its own: with both, the operands of all products would be held at once.
    for d in tl.range(0, HEAD, SLICE, num_stages=1):
        inside = h2 + d < HEAD
        mine, mine2 = (c2 < split) & inside, (c2 >= split) & there & inside
        k = tl.load(k_at + d, mask=there & inside, other=0.0)
        dk = tl.zeros((KEYS, SLICE), dtype=tl.float32)
        for tile in tl.static_range(TILES):
            r = tile * ROWS + tl.arange(0, ROWS)
            a2, n2 = (r // GROUP)[:, None], (r % GROUP)[:, None]
            keep3 = (a2 < num_rows) & inside
            q = tl.load(q_ptr + (a2 * q_q + n2 * q_n + h2) + d, mask=keep3, other=0.0)
            dk += tl.dot(dss[tile], q)
            dq = tl.dot(tl.trans(dss[tile]), k)
            _put(dq_ptr + (a2 * d_q + n2 * d_n + h2) + d, dq, keep3, STORE)
        _put_both(dk_ptr + at + d, dk2_ptr + at2 + d, dk, mine, mine2, CLEAN, OWN)
