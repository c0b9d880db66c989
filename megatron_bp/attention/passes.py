"""The small passes around a kernel: merge by log-sum-exp, and adding gradients to their rows.

On CUDA each is one Triton kernel (triton_passes.py), but for fp64; elsewhere plain torch says what
it computes.
Everything is computed in fp32 (fp64 for fp64) and written in the dtype of its target.
Letters: X problems, Q rows of a problem, Z samples, M key/value heads, G query heads a key/value
head, N query heads, H head size, T and S target rows. Specified by tests/attention/test_passes.py.
"""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from megatron_bp.attention.merge import merge
from megatron_bp.attention.schedule import Runs
from megatron_bp.attention.views import problems_view, rows_view
from megatron_bp.comm import clean_kv
from megatron_bp.layout.exchange import Copy

MOST_COVER = 16
"""Evenly spaced runs are added in one pass if a row lies in at most so many of them."""
FEW_RUNS = 8
"""So many runs are read by torch.cat, which copies long ones at full bandwidth."""


@lru_cache(maxsize=8192)
def starts_on(runs: Runs, device: torch.device) -> Tensor:
    """First row of each run, int64 [X]."""
    return torch.from_numpy(runs.starts).to(device)


@lru_cache(maxsize=8192)
def rows_on(runs: Runs, device: torch.device) -> Tensor:
    """Every row of the runs, int64 [X * length]."""
    return torch.from_numpy((runs.starts[:, None] + np.arange(runs.length)).ravel()).to(device)


@lru_cache(maxsize=8192)
def rounds_on(runs: Runs, device: torch.device) -> tuple[Tensor, ...]:
    """Problem numbers of each round, int64."""
    return tuple(torch.from_numpy(members).to(device) for members in runs.rounds)


def read_rows(x: Tensor, runs: Runs) -> Tensor:
    """Rows [X, length, ...] of x [T, ...]: a view if the runs are evenly spaced."""
    for view in rows_view(runs, x.shape, x.stride()):
        return view.of(x)
    if runs.num_problems <= FEW_RUNS:
        return torch.stack([x[lo : lo + runs.length] for lo in runs.starts.tolist()])
    return x[rows_on(runs, x.device)].unflatten(0, (len(runs.starts), runs.length))


def read_problems(x: Tensor, runs: Runs) -> Tensor:
    """Rows [X * Z, length, ...] of x [T, Z, ...], samples of a problem together.

    One view, made in one go, if the runs are evenly spaced and problems or samples are single.
    """
    for view in problems_view(runs, x.shape, x.stride()):
        return view.of(x)
    return read_rows(x, runs).transpose(1, 2).flatten(0, 1)


def pad_rows(x_CZNT: Tensor, runs: Runs, joined: bool, num_rows: int, beyond: float) -> Tensor:
    """Columns of x that are in the runs, as [C, B, N, num_rows], filled up with `beyond`.

    B is X * Z, samples of a problem together, or Z if the problems are `joined` to one.
    """
    parts, samples, heads, _ = x_CZNT.shape
    batch = samples if joined else samples * runs.num_problems
    into = torch.empty((parts, batch, heads, num_rows), dtype=x_CZNT.dtype, device=x_CZNT.device)
    if _has_kernels(x_CZNT):
        from megatron_bp.attention import triton_moves

        starts, length = starts_on(runs, x_CZNT.device), runs.length
        triton_moves.pad_rows(x_CZNT, starts, length, into, beyond, joined=joined)
        return into
    found = read_rows(x_CZNT.permute(3, 0, 1, 2), runs)  # [X, Q, C, Z, N]
    if joined:
        found = found.permute(2, 3, 4, 0, 1).flatten(3)
    else:
        found = found.permute(2, 0, 3, 4, 1).flatten(1, 2)
    into[..., : found.shape[3]] = found
    into[..., found.shape[3] :] = beyond
    return into


def in_one(pair_SZMH: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Both tensors as one view [S, Z, 2, M, H] if they lie side by side in a packed buffer.

    What is done to every element then takes one pass over memory that lies together.
    """
    first, second = pair_SZMH
    (_, *inner), (row, *strides) = first.shape, first.stride()
    half = inner[1] * inner[2]
    apart = second.data_ptr() - first.data_ptr()
    packed = first.stride() == second.stride() and strides == [2 * half, inner[2], 1]
    if not packed or apart != half * first.element_size():
        return first, second
    shape = (len(first), inner[0], 2, *inner[1:])
    at = first.storage_offset()
    return (first.as_strided(shape, (row, 2 * half, half, inner[2], 1), at),)


def _write_rows(x: Tensor, runs: Runs, value: Tensor) -> None:
    if runs.writable:
        read_rows(x, runs).copy_(value)
    else:
        x[rows_on(runs, x.device)] = value.flatten(0, 1).to(x.dtype)


def merge_rows(
    out_TZNH: Tensor, lse_TZN: Tensor, runs: Runs, part_XQZMGH: Tensor, lse_XQZMG: Tensor
) -> None:
    """Merges a launch's result into its rows, in place; a storing launch overwrites them."""
    if _has_kernels(out_TZNH):
        from megatron_bp.attention import triton_passes

        starts = starts_on(runs, out_TZNH.device)
        triton_passes.merge_rows(
            out_TZNH, lse_TZN, starts, part_XQZMGH, lse_XQZMG, store=runs.store
        )
        return
    part, part_lse = part_XQZMGH.flatten(3, 4), lse_XQZMG.flatten(3, 4)
    if not runs.store:
        part, part_lse = merge(read_rows(out_TZNH, runs), read_rows(lse_TZN, runs), part, part_lse)
    _write_rows(out_TZNH, runs, part)
    _write_rows(lse_TZN, runs, part_lse)


def add_rows(
    targets_SZMW: tuple[Tensor, ...], runs: Runs, values_XQZMW: tuple[Tensor, ...]
) -> None:
    """Adds values to the rows of their targets, in place; a storing launch overwrites them.

    Up to two targets of one layout (keys and values) share a pass. Overlapping runs are added in a
    fixed order, so the result is deterministic.
    """
    if _has_kernels(targets_SZMW[0]):
        device = targets_SZMW[0].device
        from megatron_bp.attention import triton_passes

        if runs.step and runs.length <= MOST_COVER * runs.step:
            spacing = runs.first, runs.step
            triton_passes.sum_rows(targets_SZMW, spacing, values_XQZMW, store=runs.store)
            return
        starts = starts_on(runs, device)
        for members in rounds_on(runs, device):
            triton_passes.add_rows(targets_SZMW, starts, members, values_XQZMW, store=runs.store)
        return
    for target, value in zip(targets_SZMW, values_XQZMW, strict=True):
        if runs.store:
            _write_rows(target, runs, value)
        else:
            add_by_rounds(target, runs, value)


def pack_rows(k_RZMH: Tensor, v_RZMH: Tensor, copies: tuple[Copy, ...], out_SZ2MH: Tensor) -> None:
    """See clean_kv.pack_rows."""
    if _has_kernels(out_SZ2MH) and k_RZMH.stride(3) == v_RZMH.stride(3) == 1:
        from megatron_bp.attention import triton_moves

        triton_moves.pack_rows(k_RZMH, v_RZMH, copies, out_SZ2MH)
        return
    clean_kv.pack_rows(k_RZMH, v_RZMH, copies, out_SZ2MH)


def write_part(
    part_RZ2MH: Tensor, row: int, own: tuple[Tensor, ...], into: tuple[Tensor, Tensor]
) -> None:
    """See clean_kv.write_part."""
    if _has_kernels(into[0]):
        from megatron_bp.attention import triton_moves

        triton_moves.write_part(part_RZ2MH, row, own, into)
        return
    clean_kv.write_part(part_RZ2MH, row, own, into)


def add_by_rounds(target: Tensor, runs: Runs, value: Tensor) -> None:
    """Adds [X, Q, ...] to its rows; within a round no row occurs twice, so the order is fixed."""
    device = target.device
    rows = rows_on(runs, device).view(runs.num_problems, runs.length)
    for members in rounds_on(runs, device):
        target[rows[members].flatten()] += value[members].flatten(0, 1).to(target.dtype)


def _has_kernels(target: Tensor) -> bool:
    """The kernels compute in fp32; fp64 on CUDA is for checks only."""
    return target.is_cuda and target.dtype != torch.float64
