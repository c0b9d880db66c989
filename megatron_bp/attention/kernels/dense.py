"""The plain torch kernel: any device, dtype and head size, both strategies, full score matrices.

The obvious implementation that the fast kernels are tested against; exact in fp64. Memory is
quadratic, so it is for CPUs and tests. Specified by tests/attention/test_kernels.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_bp.attention.contract import (
    Cut,
    IntervalMask,
    KernelCaps,
    Saved,
    Strategy,
    Window,
    lse_dtype,
    window_mask,
)


def _scores(q_ZQNH: Tensor, k_ZKMH: Tensor, mask_QK: Tensor, scale: float) -> Tensor:
    """Masked scores [Z, M, G, Q, K] with G query heads for each key/value head."""
    z, rows, _, size = q_ZQNH.shape
    q = q_ZQNH.view(z, rows, k_ZKMH.shape[2], -1, size)
    scores = torch.einsum("zqmgh,zkmh->zmgqk", q, k_ZKMH) * scale
    return scores.masked_fill(~mask_QK, float("-inf"))


def attend(q: Tensor, k: Tensor, v: Tensor, mask_QK: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Output and LSE of dense masked attention, computed in fp32 (fp64 for fp64).

    Shapes: q [Z, Q, N, H], k and v [Z, K, M, H], mask bool [Q, K]; out like q, lse [Z, N, Q].
    """
    wide = lse_dtype(q.dtype)
    scores = _scores(q.to(wide), k.to(wide), mask_QK, scale)
    lse = torch.logsumexp(scores, dim=-1)
    base = torch.where(torch.isneginf(lse), torch.zeros_like(lse), lse)
    out = torch.einsum("zmgqk,zkmh->zqmgh", torch.exp(scores - base[..., None]), v.to(wide))
    return out.reshape(q.shape).to(q.dtype), lse.flatten(1, 2)


def attend_backward(
    dout: Tensor, saved: Saved, mask_QK: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv from the merged output and LSE, in the accumulation dtype.

    p = exp(s - lse), ds = p * (dout v^T - rowsum(dout * out)): exact for any part of a row's keys.
    """
    q, k, v, out, lse = saved
    wide = lse_dtype(q.dtype)
    z, rows, heads, size = q.shape
    grouped = (z, rows, k.shape[2], heads // k.shape[2], size)
    q, k, v, dout = q.to(wide), k.to(wide), v.to(wide), dout.to(wide)
    scores = _scores(q, k, mask_QK, scale)
    lse = lse.unflatten(1, (k.shape[2], -1))
    base = torch.where(torch.isneginf(lse), torch.zeros_like(lse), lse)
    p = torch.exp(scores - base[..., None])
    delta = (dout * out.to(wide)).sum(-1).view(grouped[:-1]).permute(0, 2, 3, 1)
    dout = dout.view(grouped)
    ds = p * (torch.einsum("zqmgh,zkmh->zmgqk", dout, v) - delta[..., None]) * scale
    dq = torch.einsum("zmgqk,zkmh->zqmgh", ds, k).reshape(q.shape)
    dk = torch.einsum("zmgqk,zqmgh->zkmh", ds, q.view(grouped))
    dv = torch.einsum("zmgqk,zqmgh->zkmh", p, dout)
    return dq, dk, dv


@dataclass(frozen=True)
class DenseKernel:
    """Plain torch attention for `native` and `interval`."""

    deterministic: bool = False
    name = "dense"
    caps = KernelCaps(
        strategies=frozenset(Strategy),
        devices=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16}),
        max_head_size=1024,
        cut=Cut.CHUNKS,
    )

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, window: Window, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See NativeKernel."""
        return attend(q, k, v, window_mask(q.shape[1], k.shape[1], window, q.device), scale)

    def backward(
        self, dout: Tensor, saved: Saved, window: Window, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See NativeKernel."""
        mask = window_mask(saved.q.shape[1], saved.k.shape[1], window, dout.device)
        return attend_backward(dout, saved, mask, scale)

    def forward_ragged(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See RaggedKernel."""
        parts = []
        for x, length in enumerate(lengths.tolist()):
            keys = (k[None, :length], v[None, :length])
            parts.append(self.forward(q[x : x + 1], *keys, Window(), scale))
        out, lse = zip(*parts, strict=True)
        return torch.cat(out), torch.cat(lse)

    def forward_interval(
        self, q: Tensor, k: Tensor, v: Tensor, mask: IntervalMask, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See IntervalKernel."""
        return attend(q, k, v, mask.dense(), scale)

    def backward_interval(
        self, dout: Tensor, saved: Saved, mask: IntervalMask, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See IntervalKernel."""
        return attend_backward(dout, saved, mask.dense(), scale)
