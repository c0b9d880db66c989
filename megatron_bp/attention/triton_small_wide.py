"""The forward of triton_small.py for head sizes above 128: heads are read and written in slices.

Scores are summed slice by slice, and then the output is made and written slice by slice, so that a
program needs few registers and four of them share a multiprocessor: 0.131 ms where whole heads, one
program a multiprocessor, take 0.221 (254 blocks of 32 rows at head size 256, one H200). Backward in
slices gained little in fourteen forms, though whole heads spill 1 KB a thread there: 0.48 ms at
best against 0.52, and 0.45 against 0.44 where row sums are known.
Letters as in triton_small.py. Specified by tests/attention/test_small.py (interpreted on CPU) and
test_gpu_small.py.
"""

import triton
import triton.language as tl

from megatron_bp.attention.triton_small_kernels import _near_at, _near_seen


@triton.jit
def forward_wide_kernel(  # type: ignore[no-untyped-def]
    starts_ptr, q_ptr, k_ptr, v_ptr, k2_ptr, v2_ptr, out_ptr, lse_ptr,
    problems, samples, num_rows, split, near, scale, left, right,
    q_z, k_z, k_m, k2_z, k2_m, v2_z, v2_m, o_z, l_q, l_z, l_n,
    q_q: tl.constexpr, q_n: tl.constexpr, k_k: tl.constexpr, k2_k: tl.constexpr,
    v2_k: tl.constexpr, o_q: tl.constexpr, o_n: tl.constexpr,
    GROUP: tl.constexpr, HEAD: tl.constexpr, STORE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SLICE: tl.constexpr, STAGES: tl.constexpr,
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
    c, h = tl.arange(0, KEYS), tl.arange(0, SLICE)
    a2, n2, h2 = a[:, None], n[:, None], h[None, :]
    keep = a < num_rows
    keep2, there = keep[:, None], (c < near)[:, None]
    o_at = out_ptr + (row * o_q + z * o_z) + (a2 * o_q + n2 * o_n + h2)
    l_at = lse_ptr + (row * l_q + z * l_z) + (a * l_q + n * l_n)
    q_at = q_ptr + (row * q_q + z * q_z) + (a2 * q_q + n2 * q_n + h2)
    k_at = _near_at(k_ptr + first, k2_ptr + own_k, c, h, split, k_k, k2_k)
    v_at = _near_at(v_ptr + first, v2_ptr + own_v, c, h, split, k_k, v2_k)
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
