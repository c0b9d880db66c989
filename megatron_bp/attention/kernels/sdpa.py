"""PyTorch's own CUDA attention operators: cuDNN where it can, else its FlashAttention 2.

No package is needed beyond PyTorch. cuDNN's causal mask is aligned at the top left here, so a
causal launch with more keys than rows is split in a full and a square part; it has no window here.
Specified by tests/attention/test_gpu_kernels.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_bp.attention.contract import KernelCaps, Saved, Strategy, Window
from megatron_bp.attention.merge import merge

aten = torch.ops.aten


def _cudnn_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = aten._scaled_dot_product_cudnn_attention.default(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )[:2]
    return out.transpose(1, 2), lse.view(out.shape[:3])


def _cudnn_backward(
    dout: Tensor, saved: Saved, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, out = (x.transpose(1, 2) for x in saved[:4])
    no_dropout = torch.zeros((), dtype=torch.int64, device=q.device)
    grads = aten._scaled_dot_product_cudnn_attention_backward.default(
        dout.transpose(1, 2),
        q,
        k,
        v,
        out,
        saved.lse[..., None].contiguous(),
        no_dropout,
        no_dropout,
        None,
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        causal,
        scale=scale,
    )
    dq, dk, dv = (x.transpose(1, 2) for x in grads)
    return dq, dk, dv


def _apart(x: Tensor) -> Tensor:
    """A copy if problems overlap in memory (windows of neighbouring blocks do)."""
    return x.contiguous() if x.stride(0) < x.shape[1] * x.stride(1) and len(x) > 1 else x


def _flash_args(q: Tensor, k: Tensor, window: Window) -> tuple[int, int, bool, dict[str, int]]:
    left, right = window
    causal = left < 0 and right == 0
    sides = {} if causal else {"window_size_left": left, "window_size_right": right}
    return q.shape[1], k.shape[1], causal, sides


@dataclass(frozen=True)
class SdpaKernel:
    """cuDNN or FlashAttention 2 as PyTorch ships them."""

    deterministic: bool = False
    name = "sdpa"
    caps = KernelCaps(
        strategies=frozenset({Strategy.NATIVE}),
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        max_head_size=256,
        head_multiple=8,
        deterministic=False,
        min_arch=80,
    )

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, window: Window, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See NativeKernel."""
        k, v = _apart(k), _apart(v)
        if not _fits_cudnn(q, k, window):
            rows, keys, causal, sides = _flash_args(q, k, window)
            out, lse = aten._flash_attention_forward.default(
                q, k, v, None, None, rows, keys, 0.0, causal, False, scale=scale, **sides
            )[:2]
            return out, lse
        causal, before = window.right == 0, k.shape[1] - q.shape[1]
        if not causal or not before:
            return _cudnn_forward(q, k, v, causal, scale)
        out, lse = _cudnn_forward(q, k[:, :before], v[:, :before], False, scale)
        own, own_lse = _cudnn_forward(q, k[:, before:], v[:, before:], True, scale)
        out, lse = merge(out, lse.transpose(1, 2), own, own_lse.transpose(1, 2))
        return out.to(q.dtype), lse.transpose(1, 2)

    def backward(
        self, dout: Tensor, saved: Saved, window: Window, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See NativeKernel."""
        q, k, v, out, lse = saved
        k, v = _apart(k), _apart(v)
        saved = Saved(q, k, v, out, lse)
        if not _fits_cudnn(q, k, window):
            return _flash_backward(dout, saved, window, scale)
        causal, before = window.right == 0, k.shape[1] - q.shape[1]
        if not causal or not before:
            return _cudnn_backward(dout, saved, causal, scale)
        parts = [
            _cudnn_backward(dout, Saved(q, k[:, keys], v[:, keys], out, lse), square, scale)
            for keys, square in ((slice(before), False), (slice(before, None), True))
        ]
        dk, dv = (torch.cat([part[i] for part in parts], 1) for i in (1, 2))
        return parts[0][0] + parts[1][0], dk, dv


def _fits_cudnn(q: Tensor, k: Tensor, window: Window) -> bool:
    """Whether cuDNN serves: no window, a problem of some size, Hopper or later."""
    rows, keys = q.shape[1], k.shape[1]
    plain = window == (-1, -1) or (window == (-1, 0) and keys >= rows)
    return plain and min(rows, keys) >= 128 and torch.cuda.get_device_capability(q.device)[0] >= 9


def _flash_backward(
    dout: Tensor, saved: Saved, window: Window, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, out, lse = saved
    rows, keys, causal, sides = _flash_args(q, k, window)
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
    dq, dk, dv = aten._flash_attention_backward.default(
        dout,
        q,
        k,
        v,
        out,
        lse.contiguous(),
        None,
        None,
        rows,
        keys,
        0.0,
        causal,
        no_dropout,
        no_dropout,
        scale=scale,
        **sides,
    )
    return dq, dk, dv
