"""FlexAttention (PyTorch) for `interval`, compiled.

It has no public backward entry, so the backward runs the forward again under autograd. On CPU
PyTorch has only the forward, so training there is refused; `forward_interval` still runs.
Specified by tests/attention/test_kernels.py and tests/attention/test_gpu_kernels.py.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from megatron_bp.attention.block_lists import MaskKey, block_lists, key_intervals
from megatron_bp.attention.contract import IntervalMask, KernelCaps, Saved, Strategy

TILE = 128


@lru_cache(maxsize=64)
def flex_mask(key: MaskKey) -> BlockMask:
    """The mask with exact block lists."""
    lo, hi, own_lo, own_hi = key_intervals(key)
    (partial, full), _ = block_lists(key, TILE, TILE)

    def allowed(batch: Tensor, head: Tensor, row: Tensor, col: Tensor) -> Tensor:
        clean = (col >= lo[row]) & (col < hi[row])
        return clean | ((col >= own_lo[row]) & (col < own_hi[row]))

    return BlockMask.from_kv_blocks(
        partial.num[None, None],
        partial.which[None, None],
        full.num[None, None],
        full.which[None, None],
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=allowed,
        seq_lengths=(len(lo), len(key.mask.key_name)),
    )


@lru_cache(maxsize=2)
def _attention(compiled: bool) -> Any:
    return torch.compile(flex_attention, dynamic=False) if compiled else flex_attention


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: IntervalMask, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [Z, Q, N, H] and LSE [Z, N, Q], differentiable by autograd."""
    out, lse = _attention(q.is_cuda)(
        *(x.transpose(1, 2) for x in (q, k, v)),
        block_mask=flex_mask(MaskKey(mask)),
        scale=scale,
        enable_gqa=True,
        return_lse=True,
    )
    return out.transpose(1, 2), lse


@dataclass(frozen=True)
class FlexKernel:
    """FlexAttention with exact block lists."""

    deterministic: bool = False
    name = "flex"
    caps = KernelCaps(
        strategies=frozenset({Strategy.INTERVAL}),
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        max_head_size=256,
        interval_deterministic=False,
    )

    def forward_interval(
        self, q: Tensor, k: Tensor, v: Tensor, mask: IntervalMask, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See IntervalKernel."""
        with torch.no_grad():
            out, lse = attend(q, k, v, mask, scale)
        empty = (mask.clean_lo >= mask.clean_hi) & (mask.own_lo >= mask.own_hi)
        return out, lse.masked_fill(empty, float("-inf"))

    def backward_interval(
        self, dout: Tensor, saved: Saved, mask: IntervalMask, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See IntervalKernel."""
        q, k, v = (x.detach().requires_grad_() for x in saved[:3])
        with torch.enable_grad():
            out, _ = attend(q, k, v, mask, scale)
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
        return dq, dk, dv
