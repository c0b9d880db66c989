"""Transformer Engine's fused attention (cuDNN), called below its module so that LSEs can be merged.

Keys and values that lie side by side in one packed buffer are passed as they are.
Specified by tests/attention/test_gpu_kernels.py.
Source: transformer_engine.pytorch.cpp_extensions.fused_attn.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megatron_bp.attention.contract import KernelCaps, Saved, Strategy, Window

try:
    import transformer_engine.pytorch  # noqa: F401  (loads the extension)
    from transformer_engine.pytorch.cpp_extensions.fused_attn import (
        FusedAttnBackend,
        fused_attn_bwd,
        fused_attn_fwd,
    )
except (ImportError, OSError) as error:  # OSError: a shared library that does not load
    raise ImportError(
        f"kernel='te' needs Transformer Engine: pip install 'megatron-bp[te]' ({error})."
    ) from error


@lru_cache(maxsize=256)
def _lengths(num_problems: int, length: int, device: torch.device) -> Tensor:
    return torch.arange(num_problems + 1, dtype=torch.int32, device=device) * length


@lru_cache(maxsize=64)
def _no_dropout(device: torch.device) -> Tensor:
    """The state of a random generator that nothing asks for numbers."""
    return torch.zeros(2, dtype=torch.int64, device=device)


def _packed(k: Tensor, v: Tensor) -> bool:
    """Whether k and v are the two halves of one tensor [K, Z, 2, M, H]."""
    z, _, heads, size = k.shape
    row = 2 * heads * size
    side_by_side = v.data_ptr() - k.data_ptr() == heads * size * k.element_size()
    strides = (z * row, size, 1)
    same = k.stride() == v.stride() and (k.stride(1), k.stride(2), k.stride(3)) == strides
    return side_by_side and same and (z == 1 or k.stride(0) == row)


@dataclass(frozen=True)
class _Form:
    """How a launch is described to Transformer Engine."""

    rows_first: bool
    mask: dict[str, Any]

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor, window: Window, scale: float) -> "_Form":
        left, right = window
        mask: dict[str, Any] = {"attn_scale": scale}
        if left < 0 and right == 0 and q.shape[1] == k.shape[1]:
            mask |= {"attn_mask_type": "causal", "window_size": (-1, 0)}
        elif right == 0:
            mask |= {"attn_mask_type": "causal_bottom_right", "window_size": (left, 0)}
        elif left < 0:
            mask |= {"attn_mask_type": "no_mask", "window_size": (-1, -1)}
        else:
            # From the last row on every key is to the left, so this right bound never cuts.
            right = q.shape[1] - 1 if right < 0 else right
            mask |= {
                "attn_mask_type": "no_mask",
                "window_size": (left, right),
                "bottom_right_diagonal": True,
            }
        packed = _packed(k, v)
        mask["qkv_layout"] = "sbhd_sb2hd" if packed else "bshd_bshd_bshd"
        mask["o_format"] = "sbhd" if packed else "bshd"
        return _Form(packed, mask)

    def query(self, x: Tensor) -> Tensor:
        return (x.transpose(0, 1) if self.rows_first else x).contiguous()

    def key(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1) if self.rows_first else x.contiguous()

    def back(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1) if self.rows_first else x


def _shape_args(q: Tensor, k: Tensor) -> tuple[int, int, Tensor, Tensor]:
    (problems, rows), keys = q.shape[:2], k.shape[1]
    lengths = _lengths(problems, rows, q.device), _lengths(problems, keys, q.device)
    return rows, keys, *lengths


MOST_ROWS = 4096
"""Rows of an unmasked backward launch at head sizes above 128: cuDNN 9.19 runs 8,192 rows against
36,864 keys at 351 TFLOP/s and 4,096 at 389 (head size 256, one H200; 2,048: 374), and at head size
192 16,384 rows against 12,288 keys at 286 and 4,096 at 325. At head size 128 it gains nothing."""


@dataclass(frozen=True)
class TeKernel:
    """cuDNN's attention through Transformer Engine."""

    deterministic: bool = False
    name = "te"
    caps = KernelCaps(
        strategies=frozenset({Strategy.NATIVE}),
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        max_head_size=256,
        head_multiple=8,
        min_arch=80,
    )

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, window: Window, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See NativeKernel."""
        form = _Form.of(q, k, v, window, scale)
        out, saved = fused_attn_fwd(
            True,
            *_shape_args(q, k),
            form.query(q),
            form.key(k),
            form.key(v),
            q.dtype,
            FusedAttnBackend["F16_arbitrary_seqlen"],
            **form.mask,
        )[:2]
        return form.back(out), saved[0].view(q.shape[0], q.shape[2], q.shape[1])

    def rows_at_once(self, head_size: int) -> int:
        """See PiecewiseKernel."""
        return MOST_ROWS if head_size > 128 else 0

    def backward(
        self, dout: Tensor, saved: Saved, window: Window, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See NativeKernel."""
        q, k, v, out, lse = saved
        form = _Form.of(q, k, v, window, scale)
        grads = fused_attn_bwd(
            *_shape_args(q, k),
            form.query(q),
            form.key(k),
            form.key(v),
            form.query(out),
            form.query(dout),
            q.dtype,
            [lse[..., None].contiguous(), _no_dropout(q.device)],
            FusedAttnBackend["F16_arbitrary_seqlen"],
            do_format=form.mask["o_format"],
            dqkv_layout=form.mask["qkv_layout"],
            deterministic=self.deterministic,
            **form.mask,
        )
        dq, dk, dv = (form.back(x) for x in grads[:3])
        return dq, dk, dv
