"""Attention of many small problems: what is left around each block, in one Triton kernel a pass.

A vendor kernel spends a whole tile on a block of 32 rows. Here the query heads of a key/value head
share a tile; rows and keys are found by the first row of each run, so problems may lie anywhere;
keys come straight from up to three runs (the previous clean block, the own block, the far end of
the window), and the result is merged into its rows in the same pass. A backward adds dq and the
gradients of the first two runs to their rows. Those of the far end are rows of other problems'
clean runs: where sums may be in any order they are added by atomics, else returned.
Letters: X problems, T query rows, S key rows, Z samples, N query heads, M key/value heads, H head
size. Specified by tests/attention/test_small.py (interpreted on CPU) and test_gpu_small.py.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_bp.attention.contract import Window
from megatron_bp.attention.triton_launch import (
    Launch,
    Resources,
    ceil_div,
    padded_size,
    shared_memory,
)
from megatron_bp.attention.triton_put import ADDS, RACES, WRITES
from megatron_bp.attention.triton_small_kernels import backward_kernel, forward_kernel
from megatron_bp.attention.triton_small_wide import forward_wide_kernel

MAX_TILE = 16384
"""Largest padded keys * head size of a problem: its dk and dv must fit in registers."""
MAX_TILE_BESIDE_FAR = 8192
"""The same for each tile of a problem with a far end: above it, two kernels spill fewer registers
than one."""
MAX_ROWS = 256
ADD, WRITE, RACE = ADDS.value, WRITES.value, RACES.value
"""How the backward kernel puts a result."""
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
    """Keys and values (or their gradients) of the clean and own buffers, each [S, Z, M, H].

    Those of a buffer lie alike, but for own keys and values.
    """

    clean: Pair
    own: Pair


def fits(num_rows: int, num_keys: int, num_far: int, head_size: int) -> bool:
    """Whether problems of this shape, with `num_far` keys more at the far end, are small enough."""
    tile = max(_tile(num_keys), _tile(num_far)) * _tile(head_size)
    return tile <= (MAX_TILE_BESIDE_FAR if num_far else MAX_TILE) and num_rows <= MAX_ROWS


def _tile(size: int) -> int:
    return max(padded_size(size), 16)


class _Lie(NamedTuple):
    """What a launch is made for: the problems but for their places, shapes, and all strides."""

    problems: int
    num_rows: int
    lengths: tuple[int, int, int]
    window: Window
    samples: int
    heads: int
    kv_heads: int
    size: int
    scale: float
    device: torch.device
    strides: tuple[tuple[int, ...], ...]

    @property
    def group(self) -> int:
        """Query heads of a key/value head."""
        return self.heads // self.kv_heads

    @property
    def numbers(self) -> tuple[int | float, ...]:
        """The first numbers of every kernel, but for the length of the far end."""
        clean, own, _ = self.lengths
        return self.problems, self.samples, self.num_rows, clean, clean + own


def _lie(q_TZNH: Tensor, keys: Keys, todo: Problems, scale: float, *others: Tensor) -> _Lie:
    starts, num_rows, lengths, window = todo
    _, samples, heads, size = q_TZNH.shape
    (k, v), (k2, v2) = keys
    problem, at = (starts.shape[1], num_rows, lengths, window), (samples, heads, k.shape[2], size)
    strides = tuple([x.stride() for x in (q_TZNH, k, v, k2, v2, *others)])
    return _Lie(*problem, *at, scale, q_TZNH.device, strides)


def _input_strides(lie: _Lie) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Strides of q and keys: those that are numbers of every kernel, and its first constants."""
    q, k, v, k2, v2 = lie.strides[:5]
    assert k == v, "clean k and v must lie alike"
    assert q[3] == k[3] == k2[3] == v2[3] == 1, "heads must be contiguous"
    return (q[1], k[1], k[2], k2[1], k2[2], v2[1], v2[2]), (q[0], q[2], k[0], k2[0], v2[0])


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
    launch = _forward(_lie(q_TZNH, keys, todo, scale, *into), store)
    launch.start((todo.starts, q_TZNH, *keys.clean, *keys.own, *into))


@lru_cache(maxsize=1024)
def _forward(lie: _Lie, store: bool) -> Launch:
    inputs, constants = _input_strides(lie)
    out, lse = lie.strides[5:]
    near, far, wide = _tile(sum(lie.lengths[:2])), lie.lengths[2], _tile(lie.size)
    rows = 128 if near * wide <= 8192 and wide <= 128 else 64
    programs = lie.problems * lie.samples
    grid = (programs, lie.kv_heads, ceil_div(lie.num_rows * lie.group, rows))
    strides = (*inputs, out[1], *lse)
    constants = (*constants, out[0], out[2], lie.group, lie.size, store, rows, near)
    if lie.size > WHOLE_HEAD and not far:
        numbers = (*lie.numbers, lie.scale, *lie.window, *strides)
        resources = Resources(num_warps=4, num_stages=1)
        return Launch(forward_wide_kernel, grid, numbers, (*constants, *SLICES), resources)
    return Launch(
        forward_kernel,
        grid,
        (*lie.numbers, far, lie.scale, *lie.window, *strides),
        (*constants, _tile(far) if far else 0, wide),
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
    """Which results overwrite their rows instead of adding; `direct`: clean ones have rows.

    With `races` problems add to the rows of clean keys, fp32, in any order: it takes `direct`, and
    neither the clean run nor the far end may store.
    """

    rows: bool
    clean: bool
    own: bool
    direct: bool
    races: bool = False


def backward_into(
    rows: Rows,
    keys: Keys,
    todo: Problems,
    scale: float,
    grads: tuple[Tensor, Keys],
    store: Stores,
) -> tuple[Pair, Pair]:
    """Adds to dq and to the key gradients of the first two runs, and with `races` of the third.

    Returns dk and dv, each [X, K, Z, M, H], of the runs that were not added: the clean run if not
    `store.direct`, and the far end; empty where there is no such run.
    """
    dq, into = grads
    clean, problems = keys.clean[0], todo.starts.shape[1]
    length, _, far_length = todo.lengths
    far_length = 0 if store.races else far_length
    first = into.clean if store.direct else _apart(clean, problems * length)
    far = _apart(clean, problems * far_length) if far_length else into.clean
    others = (*rows[1:], dq, first[0], into.own[0], far[0])
    launch = _backward(_lie(rows.q, keys, todo, scale, *others), store)
    tensors = (todo.starts, rows.q, *keys.clean, *keys.own, *rows[1:], dq)
    launch.start((*tensors, *first, *into.own, *far))
    none = clean.as_strided((problems, 0, *clean.shape[1:]), (0,) * 5)
    return (
        (none, none) if store.direct else _by_problem(first, problems),
        _by_problem(far, problems) if far_length else (none, none),
    )


@lru_cache(maxsize=1024)
def _backward(lie: _Lie, store: Stores) -> Launch:
    strides, constants = _strides(lie)
    lengths = (lie.num_rows * lie.group, *lie.lengths)
    shape, resources = _backward_shape(lengths, lie.size, lie.device)
    if store.races and shape[0] == 1 and shape[4] == WHOLE_HEAD and not lie.lengths[2]:
        # Two programs a multiprocessor are faster than one that spills no registers.
        resources = resources._replace(num_warps=4)
    summed = len(lie.strides[5]) == 3
    assert not store.races or (store.direct and not store.clean), f"{store}: a race must add"
    clean, end = (RACE, RACE) if store.races else (_how(store.clean or not store.direct), WRITE)
    how = (_how(store.rows), store.direct, clean, _how(store.own), end)
    return Launch(
        backward_kernel,
        (lie.problems * lie.samples, lie.kv_heads, 1),
        (*lie.numbers, lie.lengths[2], lie.scale, *lie.window, *strides),
        (*constants, lie.group, lie.size, summed, *shape, *how),
        resources,
    )


def _how(store: bool) -> int:
    return WRITE if store else ADD


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


def _strides(lie: _Lie) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Strides of a backward's tensors: those that are numbers of its kernel, and its constants."""
    inputs, constants = _input_strides(lie)
    out, lse, dout, dq, dk, dk2, dk3 = lie.strides[5:]
    assert dout[3] == dq[3] == dk[3] == dk2[3] == 1, "heads must be contiguous"
    output, sums = ((*out[:3],), (0, 0, 0))[:: 1 if len(out) == 4 else -1]
    at_keys = (dk[1], dk[2], dk2[1], dk2[2], dk3[1], dk3[2])
    return (
        (*inputs, output[1], *lse, *sums, dout[1], dq[1], *at_keys),
        (
            *(*constants, output[0], output[2], dout[0], dout[2]),
            *(dq[0], dq[2], dk[0], dk2[0], dk3[0]),
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
