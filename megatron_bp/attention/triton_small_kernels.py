"""The kernels of triton_small.py: all heads and rows of a block in a tile, its keys in another.

A program has one problem, sample and key/value head. Row and head strides are constants of the
compiled kernel, so that one address serves a whole tile: registers are what limits it.
Keys lie in two tiles: KEYS slots for the clean run and then the own run, seen under a window; FAR
slots (0: none) for the far end. Letters as in triton_small.py.
Specified by tests/attention/test_small.py (interpreted on CPU) and test_gpu_small.py.
"""

import triton
import triton.language as tl

from megatron_bp.attention.triton_put import RACES, put


@triton.jit
def _near_at(clean, own, c, h, split, s_k, t_k):  # type: ignore[no-untyped-def]
    """Addresses of rows c of the runs [clean ; own]; the pointers are to their row 0."""
    c2, h2 = c[:, None], h[None, :]
    return tl.where(c2 < split, clean + (c2 * s_k + h2), own + (c2 * t_k + h2))


@triton.jit
def _near_seen(a, c, num_rows, near, left, right):  # type: ignore[no-untyped-def]
    """Which of the keys c [1, C] the rows a [R, 1] see; -1 is unbounded."""
    at = a + near - num_rows
    seen = ((left < 0) | (c >= at - left)) & ((right < 0) | (c <= at + right))
    return seen & (a < num_rows) & (c < near)


@triton.jit
def _far_seen(a, c, num_rows, far):  # type: ignore[no-untyped-def]
    """The same at the far end: causal, seen by the last rows."""
    return (a < num_rows) & (c < far) & (c <= a + far - num_rows)


@triton.jit
def forward_kernel(  # type: ignore[no-untyped-def]
    starts_ptr, q_ptr, k_ptr, v_ptr, k2_ptr, v2_ptr, out_ptr, lse_ptr,
    problems, samples, num_rows, split, near, far, scale, left, right,
    q_z, k_z, k_m, k2_z, k2_m, v2_z, v2_m, o_z, l_q, l_z, l_n,
    q_q: tl.constexpr, q_n: tl.constexpr, k_k: tl.constexpr, k2_k: tl.constexpr,
    v2_k: tl.constexpr, o_q: tl.constexpr, o_n: tl.constexpr,
    GROUP: tl.constexpr, HEAD: tl.constexpr, STORE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, FAR: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """ROWS rows of the output and LSE, merged with what is there unless STORE."""
    problem, m = tl.program_id(0), tl.program_id(1)
    x, z = problem // samples, (problem % samples).to(tl.int64)
    row = tl.load(starts_ptr + x)
    first = tl.load(starts_ptr + problems + x) * k_k + z * k_z + m * k_m
    own = tl.load(starts_ptr + 2 * problems + x) - split
    own_k, own_v = own * k2_k + z * k2_z + m * k2_m, own * v2_k + z * v2_z + m * v2_m
    r = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    a, n = r // GROUP, m * GROUP + r % GROUP
    c, h = tl.arange(0, KEYS), tl.arange(0, SIZE)
    a2, n2, h2, inside = a[:, None], n[:, None], h[None, :], (h < HEAD)[None, :]
    keep = a < num_rows
    keep2, there = keep[:, None] & inside, (c < near)[:, None] & inside
    o_at = out_ptr + (row * o_q + z * o_z) + (a2 * o_q + n2 * o_n + h2)
    l_at = lse_ptr + (row * l_q + z * l_z) + (a * l_q + n * l_n)
    q_at = q_ptr + (row * q_q + z * q_z) + (a2 * q_q + n2 * q_n + h2)
    k_at = _near_at(k_ptr + first, k2_ptr + own_k, c, h, split, k_k, k2_k)
    v_at = _near_at(v_ptr + first, v2_ptr + own_v, c, h, split, k_k, v2_k)
    q = tl.load(q_at, mask=keep2, other=0.0)
    k = tl.load(k_at, mask=there, other=0.0)
    v = tl.load(v_at, mask=there, other=0.0)
    if FAR > 0:
        f = tl.arange(0, FAR)
        last = tl.load(starts_ptr + 3 * problems + x) * k_k + z * k_z + m * k_m
        last += f[:, None] * k_k + h2
        there = (f < far)[:, None] & inside
        k3 = tl.load(k_ptr + last, mask=there, other=0.0)
        v3 = tl.load(v_ptr + last, mask=there, other=0.0)
    if not STORE:  # on its way while the products are computed
        old = tl.load(l_at, mask=keep, other=float("-inf"))
        before = tl.load(o_at, mask=keep2, other=0.0)
    seen = _near_seen(a2, c[None, :], num_rows, near, left, right)
    s = tl.where(seen, tl.dot(q, tl.trans(k)) * scale, float("-inf"))
    top = tl.max(s, 1)
    if FAR > 0:
        seen = _far_seen(a2, f[None, :], num_rows, far)
        s3 = tl.where(seen, tl.dot(q, tl.trans(k3)) * scale, float("-inf"))
        top = tl.maximum(top, tl.max(s3, 1))
    if not STORE:
        top = tl.maximum(top, old)
    top = tl.where(top == float("-inf"), 0.0, top)
    p = tl.exp(s - top[:, None])
    total = tl.sum(p, 1)
    out = tl.dot(p.to(v.dtype), v)
    if FAR > 0:
        p3 = tl.exp(s3 - top[:, None])
        total += tl.sum(p3, 1)
        out += tl.dot(p3.to(v.dtype), v3)
    if not STORE:
        weight = tl.exp(old - top)
        total += weight
        out += weight[:, None] * before.to(tl.float32)
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    lse = tl.where(empty, float("-inf"), top + tl.log(total))
    tl.store(o_at, (out * (1.0 / total)[:, None]).to(out_ptr.dtype.element_ty), mask=keep2)
    tl.store(l_at, lse, mask=keep)


@triton.jit
def _put_both(  # type: ignore[no-untyped-def]
    at, at2, value, keep, keep2, CLEAN: tl.constexpr, OWN: tl.constexpr
):
    """The clean and the own keys' part of a tile, to their places."""
    put(at, value, keep, CLEAN)
    put(at2, value, keep2, OWN)


LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _probabilities(q, k, v, g, lse2, delta, seen, scale):  # type: ignore[no-untyped-def]
    """p and ds of a tile of keys, with the LSE to base 2; see kernels/dense.py for the formula."""
    p = tl.where(seen, tl.exp2(tl.dot(q, tl.trans(k)) * (scale * LOG2E) - lse2[:, None]), 0.0)
    ds = p * (tl.dot(g, tl.trans(v)) - delta[:, None])
    return p.to(g.dtype), ds.to(q.dtype)


@triton.jit
def _row_numbers(  # type: ignore[no-untyped-def]
    out_ptr, lse_ptr, g, a, n, h, keep, inside, l_q, l_n, t_q, t_n,
    o_q: tl.constexpr, o_n: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    """LSE to base 2 and rowsum(dout * out) of a tile of rows with dout `g`."""
    lse = tl.load(lse_ptr + (a * l_q + n * l_n), mask=keep, other=0.0)
    if SUMMED:
        delta = tl.load(out_ptr + (a * t_q + n * t_n), mask=keep, other=0.0)
    else:
        at = a[:, None] * o_q + n[:, None] * o_n + h[None, :]
        o = tl.load(out_ptr + at, mask=keep[:, None] & inside, other=0.0)
        delta = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
    return lse * LOG2E, delta


@triton.jit
def _zeros(KEYS: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums dk and dv."""
    return (
        tl.zeros((KEYS, SIZE), dtype=tl.float32),
        tl.zeros((KEYS, SIZE), dtype=tl.float32),
    )


@triton.jit
def _run_at(start, z, m, c, h, s_k: tl.constexpr, s_z, s_m):  # type: ignore[no-untyped-def]
    """Where rows c of a run lie from the beginning of its buffer on."""
    return start * s_k + z * s_z + m * s_m + (c[:, None] * s_k + h[None, :])


@triton.jit
def _load_both(k_at, v_at, there):  # type: ignore[no-untyped-def]
    return tl.load(k_at, mask=there, other=0.0), tl.load(v_at, mask=there, other=0.0)


@triton.jit
def backward_kernel(  # type: ignore[no-untyped-def]
    starts_ptr, q_ptr, k_ptr, v_ptr, k2_ptr, v2_ptr, out_ptr, lse_ptr, dout_ptr, dq_ptr,
    dk_ptr, dv_ptr, dk2_ptr, dv2_ptr, dk3_ptr, dv3_ptr, problems, samples, num_rows, split, near,
    far, scale, left, right, q_z, k_z, k_m, k2_z, k2_m, v2_z, v2_m, o_z, l_q, l_z, l_n,
    t_q, t_z, t_n, g_z, d_z, e_z, e_m, e2_z, e2_m, e3_z, e3_m,
    q_q: tl.constexpr, q_n: tl.constexpr, k_k: tl.constexpr, k2_k: tl.constexpr,
    v2_k: tl.constexpr, o_q: tl.constexpr, o_n: tl.constexpr, g_q: tl.constexpr, g_n: tl.constexpr,
    d_q: tl.constexpr, d_n: tl.constexpr, e_k: tl.constexpr, e2_k: tl.constexpr, e3_k: tl.constexpr,
    GROUP: tl.constexpr, HEAD: tl.constexpr, SUMMED: tl.constexpr, TILES: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, FAR: tl.constexpr, SIZE: tl.constexpr,
    QUERY: tl.constexpr, DIRECT: tl.constexpr, CLEAN: tl.constexpr, OWN: tl.constexpr,
    END: tl.constexpr,
):  # fmt: skip
    """All gradients of a problem, in TILES tiles of rows.

    `out_ptr` is the output, or with SUMMED rowsum(dout * out), with strides t. QUERY, CLEAN, OWN
    and END say how results are put; those of the far end RACES, or WRITES apart from its rows.
    """
    problem, m = tl.program_id(0), tl.program_id(1)
    x, z = problem // samples, (problem % samples).to(tl.int64)
    row, first = tl.load(starts_ptr + x), tl.load(starts_ptr + problems + x)
    own = tl.load(starts_ptr + 2 * problems + x) - split
    c, h = tl.arange(0, KEYS), tl.arange(0, SIZE)
    c2, h2, inside = c[:, None], h[None, :], (h < HEAD)[None, :]
    a1 = first * k_k + z * k_z + m * k_m
    own_k, own_v = own * k2_k + z * k2_z + m * k2_m, own * v2_k + z * v2_z + m * v2_m
    there = (c2 < near) & inside
    k_at = _near_at(k_ptr + a1, k2_ptr + own_k, c, h, split, k_k, k2_k)
    v_at = _near_at(v_ptr + a1, v2_ptr + own_v, c, h, split, k_k, v2_k)
    if TILES > 1:
        k, v = _load_both(k_at, v_at, there)
    if FAR > 0:
        f, last = tl.arange(0, FAR), tl.load(starts_ptr + 3 * problems + x)
        there3 = (f < far)[:, None] & inside
        at3 = _run_at(last if END == RACES else x.to(tl.int64) * far, z, m, f, h, e3_k, e3_z, e3_m)
        last = _run_at(last, z, m, f, h, k_k, k_z, k_m)
        dk3, dv3 = _zeros(FAR, SIZE)
    q_ptr += row * q_q + z * q_z + m * GROUP * q_n
    dout_ptr += row * g_q + z * g_z + m * GROUP * g_n
    out_ptr += row * (t_q if SUMMED else o_q) + z * (t_z if SUMMED else o_z)
    out_ptr += m * GROUP * (t_n if SUMMED else o_n)
    dq_ptr += row * d_q + z * d_z + m * GROUP * d_n
    lse_ptr += row * l_q + z * l_z + m * GROUP * l_n
    dk, dv = _zeros(KEYS, SIZE)
    at = _run_at(first if DIRECT else x.to(tl.int64) * split, z, m, c, h, e_k, e_z, e_m)
    at2 = _run_at(own, z, m, c, h, e2_k, e2_z, e2_m)
    mine, mine2 = (c2 < split) & inside, (c2 >= split) & there
    for tile in range(TILES):
        r = tile * ROWS + tl.arange(0, ROWS)
        a, n = r // GROUP, r % GROUP
        keep = a < num_rows
        a2, n2, keep2 = a[:, None], n[:, None], keep[:, None] & inside
        # Everything that a product takes is on its way before the first one.
        q = tl.load(q_ptr + (a2 * q_q + n2 * q_n + h2), mask=keep2, other=0.0)
        if TILES == 1:
            k = tl.load(k_at, mask=there, other=0.0)
        g = tl.load(dout_ptr + (a2 * g_q + n2 * g_n + h2), mask=keep2, other=0.0)
        if TILES == 1:
            v = tl.load(v_at, mask=there, other=0.0)
        lse2, delta = _row_numbers(
            out_ptr, lse_ptr, g, a, n, h, keep, inside, l_q, l_n, t_q, t_n, o_q, o_n, SUMMED
        )  # fmt: skip
        if FAR > 0:
            k3, v3 = _load_both(k_ptr + last, v_ptr + last, there3)
        seen = _near_seen(a2, c[None, :], num_rows, near, left, right)
        p, ds = _probabilities(q, k, v, g, lse2, delta, seen, scale)
        dv += tl.dot(tl.trans(p), g)
        if TILES == 1:  # written at once, to have room for the rest
            _put_both(dv_ptr + at, dv2_ptr + at2, dv, mine, mine2, CLEAN, OWN)
        dk += tl.dot(tl.trans(ds), q)
        if TILES == 1:
            _put_both(dk_ptr + at, dk2_ptr + at2, dk * scale, mine, mine2, CLEAN, OWN)
        dq = tl.dot(ds, k)
        if FAR > 0:
            seen = _far_seen(a2, f[None, :], num_rows, far)
            p, ds = _probabilities(q, k3, v3, g, lse2, delta, seen, scale)
            dv3 += tl.dot(tl.trans(p), g)
            if TILES == 1:
                put(dv3_ptr + at3, dv3, there3, END)
            dk3 += tl.dot(tl.trans(ds), q)
            if TILES == 1:
                put(dk3_ptr + at3, dk3 * scale, there3, END)
            dq = tl.dot(ds, k3, dq)
        put(dq_ptr + (a2 * d_q + n2 * d_n + h2), dq * scale, keep2, QUERY)
    if TILES > 1:
        _put_both(dv_ptr + at, dv2_ptr + at2, dv, mine, mine2, CLEAN, OWN)
        _put_both(dk_ptr + at, dk2_ptr + at2, dk * scale, mine, mine2, CLEAN, OWN)
        if FAR > 0:
            put(dv3_ptr + at3, dv3, there3, END)
            put(dk3_ptr + at3, dk3 * scale, there3, END)
