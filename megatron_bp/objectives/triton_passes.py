"""Triton kernels of passes.py, for float32 logits: each reads and writes every element once.

Specified by tests/objectives/test_passes.py (interpreted on CPU) and test_gpu_loss.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_bp.objectives.passes import BLOCK, Live

# Shares are at most 1; times this they fit float16, where its 11 bits last down to 2**-29, so that
# the rounding to bfloat16 that follows is the one that counts.
SHARE_SCALE = tl.constexpr(2.0**15)


@triton.jit
def _statistics_kernel(  # type: ignore[no-untyped-def]
    lse_ptr,
    picked_ptr,
    share_ptr,
    logits_ptr,
    column_ptr,
    lse_stride,
    share_stride,
    logits_stride,
    num_columns,
    start,
    stop,
    excluded,
    SHARES: tl.constexpr,
    IN_FLOAT16: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    keep = (at < num_columns) & (start + at < stop) & (start + at != excluded)
    logits_ptr += row * logits_stride
    # read before the first reduction, whose barrier keeps shares in the same memory behind it
    label = tl.load(column_ptr + row) - start - block * BLOCK
    inside = (label >= 0) & (label < tl.minimum(BLOCK, num_columns - block * BLOCK))
    picked = tl.load(logits_ptr + block * BLOCK + label, mask=inside, other=0.0)
    z = tl.load(logits_ptr + at, mask=keep, other=float("-inf"))
    best = tl.maximum(tl.max(z, 0), -3.4e38)  # finite, so that a dead block has sum 0
    e = tl.exp(z - best)
    total = tl.sum(e, 0)
    tl.store(lse_ptr + row * lse_stride + block, best + tl.log(total))
    tl.store(picked_ptr + row, picked, mask=inside)
    if SHARES:
        share = e / tl.where(total > 0.0, total, 1.0)
        if IN_FLOAT16:
            share *= SHARE_SCALE
        share_at = share_ptr + row * share_stride + at
        tl.store(share_at, share.to(share_ptr.dtype.element_ty), mask=at < num_columns)


@triton.jit
def _rescale_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    share_ptr,
    lse_block_ptr,
    lse_ptr,
    picked_ptr,
    column_ptr,
    scale_ptr,
    lse_block_stride,
    row_stride,
    num_columns,
    IN_FLOAT16: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # out and share are the same memory: each thread overwrites what it has read
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    share = tl.load(share_ptr + row * row_stride + at, mask=at < num_columns, other=0.0)
    lse, scale = tl.load(lse_ptr + row), tl.load(scale_ptr + row)
    factor = tl.exp(tl.load(lse_block_ptr + row * lse_block_stride + block) - lse) * scale
    if IN_FLOAT16:
        factor /= SHARE_SCALE
    label = (tl.exp(tl.load(picked_ptr + row) - lse) - 1.0) * scale
    value = tl.where(at == tl.load(column_ptr + row), label, share.to(tl.float32) * factor)
    out = out_ptr + row * row_stride + at
    tl.store(out, value.to(out_ptr.dtype.element_ty), mask=at < num_columns)


@triton.jit
def _gradient_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    logits_ptr,
    lse_ptr,
    column_ptr,
    scale_ptr,
    out_stride,
    logits_stride,
    num_columns,
    start,
    stop,
    excluded,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = (at < num_columns) & (start + at < stop) & (start + at != excluded)
    z = tl.load(logits_ptr + row * logits_stride + at, mask=keep, other=float("-inf"))
    p = tl.exp(z - tl.load(lse_ptr + row))
    p = tl.where(start + at == tl.load(column_ptr + row), p - 1.0, p)
    value = tl.where(keep, p * tl.load(scale_ptr + row), 0.0)
    out = out_ptr + row * out_stride + at
    tl.store(out, value.to(out_ptr.dtype.element_ty), mask=at < num_columns)


@triton.jit
def _scale_kernel(out_ptr, x_ptr, factor_ptr, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x_ptr + at, mask=at < size, other=0.0) * tl.load(factor_ptr).to(tl.float32)
    tl.store(out_ptr + at, value.to(out_ptr.dtype.element_ty), mask=at < size)


def _grid(x_CN: Tensor) -> tuple[int, int]:
    """A program for each row and block; consecutive programs take consecutive rows."""
    assert x_CN.stride(1) == 1, "columns must be contiguous"
    return x_CN.shape[0], triton.cdiv(x_CN.shape[1], BLOCK)


def write_statistics(
    lse_CB: Tensor,
    picked_C: Tensor,
    share_CN: Tensor,
    logits_CN: Tensor,
    column_C: Tensor,
    live: Live,
    start: int,
) -> None:
    """See passes.write_statistics."""
    narrow = share_CN.dtype == torch.bfloat16
    _statistics_kernel[_grid(logits_CN)](
        lse_CB,
        picked_C,
        share_CN.view(torch.float16) if narrow else share_CN,
        logits_CN,
        column_C,
        lse_CB.stride(0),
        share_CN.stride(0),
        logits_CN.stride(0),
        logits_CN.shape[1],
        start,
        live.stop,
        live.excluded,
        SHARES=share_CN.numel() > 0,
        IN_FLOAT16=narrow,
        BLOCK=BLOCK,
        num_warps=8,
    )


def rescale_shares(
    dlogits_CV: Tensor,
    lse_CB: Tensor,
    lse_C: Tensor,
    picked_C: Tensor,
    column_C: Tensor,
    scale_C: Tensor,
) -> None:
    """See passes.rescale_shares."""
    narrow = dlogits_CV.dtype == torch.bfloat16
    _rescale_kernel[_grid(dlogits_CV)](
        dlogits_CV,
        dlogits_CV.view(torch.float16) if narrow else dlogits_CV,
        lse_CB,
        lse_C,
        picked_C,
        column_C,
        scale_C,
        lse_CB.stride(0),
        dlogits_CV.stride(0),
        dlogits_CV.shape[1],
        IN_FLOAT16=narrow,
        BLOCK=BLOCK,
        num_warps=8,
    )


def write_gradient(
    out_CN: Tensor,
    logits_CN: Tensor,
    lse_C: Tensor,
    column_C: Tensor,
    scale_C: Tensor,
    live: Live,
    start: int,
) -> None:
    """See passes.write_gradient."""
    assert out_CN.stride(1) == 1, "columns must be contiguous"
    _gradient_kernel[_grid(logits_CN)](
        out_CN,
        logits_CN,
        lse_C,
        column_C,
        scale_C,
        out_CN.stride(0),
        logits_CN.stride(0),
        logits_CN.shape[1],
        start,
        live.stop,
        live.excluded,
        BLOCK=BLOCK,
        num_warps=8,
    )


def write_scaled(out: Tensor, x: Tensor, factor: Tensor) -> None:
    """See passes.write_scaled."""
    assert out.is_contiguous(), "out must be contiguous"
    assert x.is_contiguous(), "x must be contiguous"
    if x.numel():
        _scale_kernel[(triton.cdiv(x.numel(), BLOCK),)](
            out, x, factor, x.numel(), BLOCK=BLOCK, num_warps=8
        )
