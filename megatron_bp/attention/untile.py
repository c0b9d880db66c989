"""From fp32 sums in a kernel's tiles to gradients in rows, in one pass.

A matrix kernel of Hopper adds each tile to memory in the order in which its threads hold it: that
of the accumulators of a warp group (128 threads), register by register. `Order` says which place
has which element, and the functions here read sums in that order, scale them, and store them in or
add them to rows of any strides and dtype. On CUDA that is a Triton kernel (triton_untile.py) which
computes in fp32; elsewhere plain torch says what it computes, but rounds after each of these sums.
Letters: B problems and samples, X problems, Z samples, N heads, M key/value heads, T and S target
rows, H head size.
Specified by tests/attention/test_triton_untile.py; on a GPU, against FlashAttention 4's own kernel,
by test_gpu_untile.py.
Source of the order: PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16", D (fp32).
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_bp.attention.passes import add_rows
from megatron_bp.attention.problems import KeyValue, add_pieces
from megatron_bp.attention.schedule import Runs

THREADS = 128
"""Of a warp group."""
SLAB = 16
"""Rows that lie together in every order: two registers' rows, or two registers of 8 rows each."""


class Order(NamedTuple):
    """How a tile [rows, size] lies in memory, a piece for each of `groups` warp groups.

    Of these `along_rows` lie one below the other, the others side by side. `swapped`: the tile was
    computed as its transpose [size, rows].
    """

    rows: int
    size: int
    groups: int
    along_rows: int
    swapped: bool

    @property
    def known(self) -> bool:
        """Whether `places` holds: warp groups of 64 rows (columns if swapped), slabs undivided."""
        if self.along_rows < 1 or self.groups % self.along_rows:
            return False
        beside = self.groups // self.along_rows
        if self.swapped:
            return self.size % (64 * beside) == 0 and self.rows % (SLAB * self.along_rows) == 0
        return self.rows % (64 * self.along_rows) == 0 and self.size % (8 * beside) == 0

    @property
    def places(self) -> Tensor:
        """Place in the tile of each element, int64 [rows, size]."""
        return _places(self)


@lru_cache(maxsize=64)
def _places(order: Order) -> Tensor:
    rows, size, groups, along_rows, swapped = order
    beside = groups // along_rows
    height, width = (size, rows) if swapped else (rows, size)
    high, broad = (beside, along_rows) if swapped else (along_rows, beside)
    m, n = torch.arange(height)[:, None], torch.arange(width)[None, :]
    per = width // broad  # columns of a warp group
    group = m // 64 % high + high * (n // per)
    quad = m // (64 * high) * (per // 8) + n % per // 8  # of the thread's registers
    thread = m % 64 // 16 * 32 + m % 8 * 4 + n % 8 // 2
    at = group * (rows * size // groups) + quad * 4 * THREADS + thread * 4
    at = at + m % 16 // 8 * 2 + n % 2
    return at.T.contiguous() if swapped else at


class Tiled(NamedTuple):
    """Sums [B, N, padded rows * size] in tiles of an order."""

    sums: Tensor
    order: Order

    def rows(self) -> Tensor:
        """The sums in rows [B, padded rows, N, H], a copy."""
        rows, size = self.order[:2]
        places = self.order.places.to(self.sums.device).flatten()
        found = self.sums.unflatten(-1, (-1, rows * size))[..., places]
        return found.unflatten(-1, (rows, size)).flatten(2, 3).transpose(1, 2)


class RowSums(NamedTuple):
    """Query gradients of `runs`: B is X * Z, or Z if the runs are `joined` to one problem."""

    tiled: Tiled
    runs: Runs
    joined: bool


def write_rows(dq_TZNH: Tensor, sums: Sequence[RowSums], scale: float) -> None:
    """Writes or adds (as runs say) sums times `scale`, in their order, each row once if it can."""
    if dq_TZNH.is_cuda:
        from megatron_bp.attention import triton_untile

        triton_untile.write_rows(dq_TZNH, sums, scale)
        return
    for tiled, runs, joined in sums:
        length = runs.length * (runs.num_problems if joined else 1)
        found = tiled.rows()[:, :length] * scale
        add_rows((dq_TZNH,), runs, (by_problem(found, dq_TZNH.shape[1], runs, joined),))


def by_problem(x_BQNH: Tensor, num_samples: int, runs: Runs, joined: bool) -> Tensor:
    """Rows of problems and samples, or of problems joined to one, as [X, Q, Z, N, H]."""
    if joined:
        return x_BQNH.transpose(0, 1).unflatten(0, (runs.num_problems, -1))
    return x_BQNH.unflatten(0, (-1, num_samples)).transpose(1, 2)


class KeySums(NamedTuple):
    """Key and value gradients of `runs`: B is 2 * Z * X, dK's before dV's."""

    tiled: Tiled
    runs: Runs


def write_keys(into: KeyValue, sums: Sequence[KeySums], scale: float) -> None:
    """Writes or adds (as runs say) sums of dK times `scale` and of dV, in their order.

    Rows of sums that overlap evenly, and those of other sums in which they lie, are written once if
    they can be.
    """
    if into.k.is_cuda:
        from megatron_bp.attention import triton_untile

        triton_untile.write_keys(into, sums, scale)
        return
    for tiled, runs in sums:
        found = tiled.rows()[:, : runs.length].unflatten(0, (2, -1, runs.num_problems))
        dk, dv = found.permute(0, 2, 3, 1, 4, 5)  # [X, L, Z, M, H]
        add_pieces(into, runs, dk * scale, dv)
