"""PyTorch's CPU flash attention operator, which returns the LSE and takes a merged one back.

The window becomes an additive mask; key/value heads are repeated, because the operator wants it.
Specified by tests/attention/test_kernels.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_bp.attention.contract import Cut, KernelCaps, Saved, Strategy, Window, window_mask

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _mask(q: Tensor, k: Tensor, window: Window) -> tuple[Tensor, Tensor]:
    """The additive mask [Q, K], and which rows [Q] see no key."""
    allowed = window_mask(q.shape[1], k.shape[1], window, q.device)
    mask = torch.zeros(allowed.shape, dtype=q.dtype).masked_fill(~allowed, float("-inf"))
    return mask, ~allowed.any(1)


def _heads(x: Tensor, repeat: int) -> Tensor:
    return x.transpose(1, 2).repeat_interleave(repeat, 1)


@dataclass(frozen=True)
class SdpaCpuKernel:
    """PyTorch's fused CPU attention."""

    deterministic: bool = False
    name = "sdpa_cpu"
    caps = KernelCaps(
        strategies=frozenset({Strategy.NATIVE}),
        devices=frozenset({"cpu"}),
        dtypes=frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16}),
        max_head_size=1024,
        cut=Cut.PLAN,
    )

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, window: Window, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See NativeKernel."""
        mask, empty = _mask(q, k, window)
        repeat = q.shape[2] // k.shape[2]
        out, lse = _forward(
            q.transpose(1, 2), _heads(k, repeat), _heads(v, repeat), attn_mask=mask, scale=scale
        )
        return out.transpose(1, 2), lse.masked_fill(empty, float("-inf"))

    def backward(
        self, dout: Tensor, saved: Saved, window: Window, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See NativeKernel."""
        q, k, v, out, lse = saved
        mask, _ = _mask(q, k, window)
        kv_heads, repeat = k.shape[2], q.shape[2] // k.shape[2]
        dq, dk, dv = _backward(
            dout.transpose(1, 2).contiguous(),
            q.transpose(1, 2),
            _heads(k, repeat),
            _heads(v, repeat),
            out.transpose(1, 2),
            lse.masked_fill(torch.isneginf(lse), 0.0),
            0.0,
            False,
            attn_mask=mask,
            scale=scale,
        )
        dk, dv = (x.unflatten(1, (kv_heads, repeat)).sum(2).transpose(1, 2) for x in (dk, dv))
        return dq.transpose(1, 2), dk, dv
