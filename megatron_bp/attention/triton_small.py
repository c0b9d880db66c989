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

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_bp.attention.contract import Window
from megatron_bp.attention.triton_launch import (
    Resources,
    ceil_div,
    launch,
    padded_size,
    shared_memory,
)
from megatron_bp.attention.triton_small_kernels import backward_kernel, forward_kernel
from megatron_bp.attention.triton_small_wide import forward_wide_kernel

MAX_TILE = 16384
"""Largest padded keys * head size of a problem: its dk and dv must fit in registers."""
MAX_TILE_BESIDE_FAR = 8192
"""The same for each tile of a problem with a far end: above it, two kernels spill fewer registers
than one."""
MAX_ROWS = 256
MEMORY = 200 * 1024
"""Bytes of shared memory that the larger row tiles of the backward are made for."""
WHOLE_HEAD = 128
"""The forward takes larger heads in slices (triton_small_wide.py), but beside a far end."""
SLICES = 64, 3
"""Elements of a slice, and how many slices are on their way at once."""


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

    clean: Pair
    own: Pair


def fits(num_rows: int, num_keys: int, num_far: int, head_size: int) -> bool:
    """Whether problems of this shape, with `num_far` keys more at the far end, are small enough."""
    tile = max(_tile(num_keys), _tile(num_far)) * _tile(head_size)
    return tile <= (MAX_TILE_BESIDE_FAR if num_far else MAX_TILE) and num_rows <= MAX_ROWS


def _tile(size: int) -> int:
    return max(padded_size(size), 16)


def _sizes(q_TZNH: Tensor, keys: Keys, todo: Problems) -> tuple[int, ...]:
    (k, v), (k2, v2) = keys
    assert (k.stride(), k2.stride()) == (v.stride(), v2.stride()), "k and v must lie alike"
    assert q_TZNH.stride(3) == k.stride(3) == k2.stride(3) == 1, "heads must be contiguous"
    clean, own, far = todo.lengths
    return todo.starts.shape[1], q_TZNH.shape[1], todo.num_rows, clean, clean + own, far


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
    kv_heads, size = keys.clean[0].shape[2:]
    group = q_TZNH.shape[2] // kv_heads
    near, far, wide = _tile(sum(todo.lengths[:2])), todo.lengths[2], _tile(size)
    rows = 128 if near * wide <= 8192 and wide <= 128 else 64
    q_q, q_z, q_n, _ = q_TZNH.stride()
    k_k, k_z, k_m, _ = keys.clean[0].stride()
    k2_k, k2_z, k2_m, _ = keys.own[0].stride()
    o_q, o_z, o_n, _ = out.stride()
    problems, samples, *_ = sizes = _sizes(q_TZNH, keys, todo)
    grid = (problems * samples, kv_heads, ceil_div(todo.num_rows * group, rows))
    tensors = (todo.starts, q_TZNH, *keys.clean, *keys.own, out, lse)
    strides = (q_z, k_z, k_m, k2_z, k2_m, o_z, *lse.stride())
    constants = (q_q, q_n, k_k, k2_k, o_q, o_n, group, size, store, rows)
    if size > WHOLE_HEAD and not far:
        numbers = (*sizes[:5], scale, *todo.window, *strides)
        shape, resources = (near, *SLICES), Resources(num_warps=4, num_stages=1)
        launch(forward_wide_kernel, grid, tensors, numbers, (*constants, *shape), resources)
        return
    launch(
        forward_kernel,
        grid,
        tensors,
        (*sizes, scale, *todo.window, *strides),
        (*constants, near, _tile(far) if far else 0, wide),
        # Two programs a multiprocessor are faster than one that spills no registers.
        Resources(8 if rows * wide > 8192 else 4, registers=128 if rows == wide == 128 else 0),
    )


class Rows(NamedTuple):
    """Query-side tensors of a backward: [T, Z, N, H], the LSE [T, Z, N].

    `out` may be rowsum(dout * out) [T, Z, N] instead, fp32, where that is known already.
    """

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
    dq, into = grads
    clean = keys.clean[0]
    problems, samples, *_ = sizes = _sizes(rows.q, keys, todo)
    length, _, far_length = todo.lengths
    first = into.clean if store.direct else _apart(clean, problems * length)
    far = _apart(clean, problems * far_length) if far_length else into.own
    strides, constants = _strides(rows, keys, dq, (first[0], into.own[0], far[0]))
    group, summed = rows.q.shape[2] // clean.shape[2], rows.out.ndim == 3
    lengths = (todo.num_rows * group, *todo.lengths)
    shape, resources = _backward_shape(lengths, clean.shape[3], clean.device)
    tensors = (todo.starts, rows.q, *keys.clean, *keys.own, rows.out, rows.lse, rows.dout, dq)
    launch(
        backward_kernel,
        (problems * samples, clean.shape[2], 1),
        (*tensors, *first, *into.own, *far),
        (*sizes, scale, *todo.window, *strides),
        (
            *(*constants, group, clean.shape[3], summed, *shape),
            *(store.rows, store.direct, store.clean or not store.direct, store.own),
        ),
        resources,
    )
    none = clean.as_strided((problems, 0, *clean.shape[1:]), (0,) * 5)
    return (
        (none, none) if store.direct else _by_problem(first, problems),
        _by_problem(far, problems) if far_length else (none, none),
    )


@lru_cache(maxsize=1024)
def _backward_shape(
    lengths: tuple[int, int, int, int], size: int, device: torch.device
) -> tuple[tuple[int, ...], Resources]:
    """Constants of the backward kernel that say how large its tiles are, and what it needs.

    `lengths`: rows times heads, and the three key runs.
    """
    near, far, wide = _tile(lengths[1] + lengths[2]), lengths[3], _tile(size)
    if wide <= 128:  # keys are rows of the products dk and dv, and tensor cores take 64
        near = max(near, 64)
    rows = 128 if near * wide <= 8192 and wide <= 128 else 64
    if shared_memory(device) < MEMORY:
        rows = 32
    tiles = ceil_div(lengths[0], rows)
    # One turn of the row loop or a few: room for more programs instead of stages.
    resources = Resources(num_warps=8 if rows * wide >= 8192 else 4, num_stages=1)
    return (tiles, rows, near, max(_tile(far), 64) if far else 0, wide), resources


def _strides(
    rows: Rows, keys: Keys, dq: Tensor, grads: tuple[Tensor, Tensor, Tensor]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Strides of a backward's tensors: those that are numbers of its kernel, and its constants."""
    q_q, q_z, q_n, _ = rows.q.stride()
    k_k, k_z, k_m, _ = keys.clean[0].stride()
    k2_k, k2_z, k2_m, _ = keys.own[0].stride()
    o_q, o_z, o_n = rows.out.stride()[:3]
    g_q, g_z, g_n, g_h = rows.dout.stride()
    d_q, d_z, d_n, d_h = dq.stride()
    e_k, e_z, e_m, e_h = grads[0].stride()
    e2_k, e2_z, e2_m, e2_h = grads[1].stride()
    e3_k, e3_z, e3_m, _ = grads[2].stride()
    assert g_h == d_h == e_h == e2_h == 1, "heads must be contiguous"
    output, sums = ((o_q, o_z, o_n), (0, 0, 0))[:: 1 if rows.out.ndim == 4 else -1]
    at_lse, at_keys = rows.lse.stride(), (e_z, e_m, e2_z, e2_m, e3_z, e3_m)
    return (
        (q_z, k_z, k_m, k2_z, k2_m, output[1], *at_lse, *sums, g_z, d_z, *at_keys),
        (
            q_q,
            q_n,
            k_k,
            k2_k,
            output[0],
            output[2],
            g_q,
            g_n,
            d_q,
            d_n,
            e_k,
            e2_k,
            e3_k,
        ),
    )


def _apart(like: Tensor, length: int) -> Pair:
    """Two new tensors [length, Z, M, H]."""
    shape = (length, *like.shape[1:])
    first, second = (torch.empty(shape, dtype=like.dtype, device=like.device) for _ in range(2))
    return first, second


def _by_problem(pair: Pair, problems: int) -> Pair:
    first, second = (x.view(problems, len(x) // problems, *x.shape[1:]) for x in pair)
    return first, second
