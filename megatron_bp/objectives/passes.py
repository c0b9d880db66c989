"""Row passes of the loss: log-sum-exp, label logit, gradient of the logits, rounding.

On CUDA each is one Triton kernel (triton_passes.py); elsewhere plain torch says what it computes.
Knows nothing of matrix products or process groups. Specified by tests/objectives/test_passes.py.

Shape letters: C rows of a chunk, V vocabulary columns of this rank, N columns of a piece of them,
B blocks of columns.

    lse_c = log sum_v exp z_c[v]
    dz_c[v] = (exp(z_c[v] - lse_c) - [v == column_c]) * scale_c

Where lse is known, `write_gradient` makes dz of z. Where it is not, `write_statistics` leaves each
block's softmax, so that z need not be kept, and `rescale_shares` makes dz of that.
"""

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 4096  # columns of a block


class Live(NamedTuple):
    """Columns that count: those before `stop`, but for `excluded` (-1: none)."""

    stop: int
    excluded: int


def write_statistics(
    lse_CB: Tensor,
    picked_C: Tensor,
    share_CN: Tensor,
    logits_CN: Tensor,
    column_C: Tensor,
    live: Live,
    start: int,
) -> None:
    """Writes the log-sum-exp of each block of a piece, and the logits at `column_C` if inside.

    `share_CN` gets the softmax of each block in a form that only `rescale_shares` reads: it is
    `logits_CN` itself, or a narrower tensor, or empty if shares are not needed. The piece begins
    at column `start`. A block without live columns has log-sum-exp -inf and shares of 0.
    """
    if _has_kernels(logits_CN):
        from megatron_bp.objectives import triton_passes

        triton_passes.write_statistics(lse_CB, picked_C, share_CN, logits_CN, column_C, live, start)
        return
    _kill(logits_CN, live, start)
    at_C = column_C - start
    inside_C = (at_C >= 0) & (at_C < logits_CN.shape[1])
    label_C = logits_CN.gather(1, at_C.where(inside_C, 0)[:, None]).squeeze(1)
    picked_C.copy_(label_C.where(inside_C, picked_C))
    for block, logits in enumerate(logits_CN.split(BLOCK, 1)):
        lse_CB[:, block] = logits.logsumexp(1)
        if share_CN.numel():
            # a finite shift leaves 0, not NaN, where the block is dead
            shift_C = lse_CB[:, block].clamp(min=torch.finfo(lse_CB.dtype).min)
            logits.sub_(shift_C[:, None]).exp_()


def rescale_shares(
    dlogits_CV: Tensor,
    lse_CB: Tensor,
    lse_C: Tensor,
    picked_C: Tensor,
    column_C: Tensor,
    scale_C: Tensor,
) -> None:
    """Turns shares of blocks, in the memory of `dlogits_CV`, into the gradient of the logits.

    The label's entry comes from its logit `picked_C`: 1 - p of a rounded p near 1 would be noise.
    """
    if _has_kernels(lse_CB):
        from megatron_bp.objectives import triton_passes

        triton_passes.rescale_shares(dlogits_CV, lse_CB, lse_C, picked_C, column_C, scale_C)
        return
    factor_CB = (lse_CB - lse_C[:, None]).exp() * scale_C[:, None]
    for block, shares in enumerate(dlogits_CV.split(BLOCK, 1)):
        shares.mul_(factor_CB[:, block, None])
    label_C = (picked_C - lse_C).expm1() * scale_C
    at_C1 = column_C.clamp(min=0)[:, None]
    label_C = label_C.where(column_C >= 0, dlogits_CV.gather(1, at_C1).squeeze(1))
    dlogits_CV.scatter_(1, at_C1, label_C[:, None])


def write_gradient(
    out_CN: Tensor,
    logits_CN: Tensor,
    lse_C: Tensor,
    column_C: Tensor,
    scale_C: Tensor,
    live: Live,
    start: int,
) -> None:
    """Writes the gradient of a piece's logits, rounded once to the type of `out_CN`; 0 if not live.

    `out_CN` is `logits_CN` itself or does not overlap it; the logits may be overwritten.
    """
    if _has_kernels(logits_CN):
        from megatron_bp.objectives import triton_passes

        triton_passes.write_gradient(out_CN, logits_CN, lse_C, column_C, scale_C, live, start)
        return
    _kill(logits_CN, live, start)
    logits_CN.sub_(lse_C[:, None]).exp_()
    at_C = column_C - start
    inside_C = (at_C >= 0) & (at_C < logits_CN.shape[1])
    hit_C = inside_C.to(logits_CN.dtype)
    logits_CN.scatter_add_(1, at_C.where(inside_C, 0)[:, None], -hit_C[:, None])
    torch.mul(logits_CN, scale_C[:, None], out=out_CN)


def write_scaled(out: Tensor, x: Tensor, factor: Tensor) -> None:
    """out = x * factor, rounded once; both contiguous and of one shape, `factor` a scalar."""
    if _has_kernels(x):
        from megatron_bp.objectives import triton_passes

        triton_passes.write_scaled(out, x, factor)
        return
    torch.mul(x, factor, out=out)


def _has_kernels(x: Tensor) -> bool:
    """The kernels are for float32; float64 on CUDA is for checks only."""
    return x.is_cuda and x.dtype == torch.float32


def _kill(logits_CN: Tensor, live: Live, start: int) -> None:
    # The product covers padding too: cutting it off would spoil the alignment it was added for.
    logits_CN[:, max(live.stop - start, 0) :] = float("-inf")
    if start <= live.excluded < start + logits_CN.shape[1]:
        logits_CN[:, live.excluded - start] = float("-inf")
