"""The `interval` strategy: all rows against all keys in one launch with an interval mask.

Specified by tests/attention/test_block_parallel.py.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from megatron_bp.attention.contract import IntervalKernel, IntervalMask, Saved
from megatron_bp.attention.native import Partial
from megatron_bp.attention.problems import KeyValue, Spaces
from megatron_bp.layout.decomposition import KeySpace
from megatron_bp.layout.plan import RankPlan


@lru_cache(maxsize=64)
def interval_mask(plan: RankPlan, first_row: int, device: torch.device) -> IntervalMask:
    """The mask of the rows from `first_row` on against [clean buffer ; own keys]."""
    seen = plan.visibility

    def column(values: "np.ndarray") -> Tensor:
        return torch.from_numpy(values.astype(np.int32)).to(device)

    names = np.concatenate([plan.exchange.buffer_position, plan.own_coordinate])
    return IntervalMask(
        clean_lo=column(seen.clean_lo[first_row:]),
        clean_hi=column(seen.clean_hi[first_row:]),
        own_lo=column(seen.own_lo[first_row:]),
        own_hi=column(seen.own_hi[first_row:]),
        key_name=column(names),
        num_clean=plan.exchange.num_buffer_rows,
    )


@dataclass(frozen=True)
class IntervalRun:
    """Forward and backward of the one launch."""

    kernel: IntervalKernel
    scale: float
    mask: IntervalMask

    def forward(self, q_TZNH: Tensor, keys: Spaces) -> Partial:
        """Output and LSE of all rows."""
        k, v = _joined(keys)
        out, lse = self.kernel.forward_interval(q_TZNH.transpose(0, 1), k, v, self.mask, self.scale)
        return Partial(out.transpose(0, 1), lse.permute(2, 0, 1))

    def backward(
        self, dout_TZNH: Tensor, saved: tuple[Tensor, Spaces, Partial], grads: tuple[Tensor, Spaces]
    ) -> None:
        """Writes the launch's gradients to `grads` (dq, key spaces)."""
        q, keys, partial = saved
        k, v = _joined(keys)
        local = Saved(
            q.transpose(0, 1), k, v, partial.out.transpose(0, 1), partial.lse.permute(1, 2, 0)
        )
        dq, dk, dv = self.kernel.backward_interval(
            dout_TZNH.transpose(0, 1), local, self.mask, self.scale
        )
        grads[0].copy_(dq.transpose(0, 1))
        for part, grad in enumerate((dk, dv)):
            clean, own = grad.transpose(0, 1).tensor_split([self.mask.num_clean])
            grads[1][KeySpace.CLEAN][part].copy_(clean)
            grads[1][KeySpace.OWN][part].copy_(own)


def _joined(keys: Spaces) -> KeyValue:
    """All keys and values, clean buffer first, as [Z, S, M, H]."""
    clean, own = keys
    return KeyValue(
        torch.cat([clean.k, own.k]).transpose(0, 1), torch.cat([clean.v, own.v]).transpose(0, 1)
    )
