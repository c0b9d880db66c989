"""FlexAttention as training code commonly uses it, for comparison: keys gathered, then one launch.

The whole exchange is waited for, all keys are one tensor, and PyTorch's autograd runs the kernel's
own backward. (The `interval` strategy with the kernel `flex` runs the forward again in backward,
since the kernel has no public backward entry.) Used by benchmarks only. Specified by
tests/attention/test_flex_baseline.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_bp.attention.block_parallel import AttentionOptions, GradWire
from megatron_bp.attention.contract import IntervalMask, lse_dtype
from megatron_bp.attention.interval import interval_mask
from megatron_bp.comm.clean_kv import CleanGather, CleanReduce
from megatron_bp.comm.groups import BlockGroups, Group
from megatron_bp.layout.decomposition import Phase
from megatron_bp.layout.exchange import Exchange
from megatron_bp.layout.plan import RankPlan

# Output [Z, Q, N, H] and LSE of q [Z, Q, N, H], k and v [Z, S, M, H], a mask and a scale.
Attend = Callable[[Tensor, Tensor, Tensor, IntervalMask, float], tuple[Tensor, Tensor]]


def gathered_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: RankPlan,
    groups: BlockGroups,
    options: AttentionOptions,
    attend: Attend,
) -> Tensor:
    """Attention of this rank's rows by one masked launch over gathered keys.

    Shapes: as block_parallel_attention. `attend` must be differentiable.
    """
    wire = k.dtype if options.grad_wire is GradWire.MODEL else lse_dtype(k.dtype)
    first_row = plan.rows.num_clean if options.corrupted_only else 0
    k, v = (x.transpose(0, 1) for x in _all_keys(k, v, plan, groups, wire))
    mask = interval_mask(plan, first_row, q.device)
    out, _ = attend(q[first_row:].transpose(0, 1), k, v, mask, options.softmax_scale)
    return out.transpose(0, 1)


def _all_keys(
    k: Tensor, v: Tensor, plan: RankPlan, groups: BlockGroups, wire: torch.dtype
) -> tuple[Tensor, Tensor]:
    """All keys and values that local rows may see, clean buffer first, [S, Z, M, H]."""
    clean, exchange = plan.rows.num_clean, plan.exchange
    if _is_local_order(plan):
        return k, v
    parts = [_GatherKeys.apply(k[:clean], v[:clean], exchange, groups.clean_shards, wire)]
    if plan.request.gather_corrupted:
        views = plan.request.num_views
        rows = sum(plan.owners.corrupted.slab_lengths)
        for view in range(views):
            here = slice(clean + view * rows, clean + (view + 1) * rows)
            own = _GatherKeys.apply(k[here], v[here], plan.own_exchange, groups.context, wire)
            parts.append(own)
    else:
        parts.append(torch.stack([k[clean:], v[clean:]], dim=2))
    packed = torch.cat(parts)
    return packed[:, :, 0], packed[:, :, 1]


def _is_local_order(plan: RankPlan) -> bool:
    """Whether the local rows are all keys, in the order of the key buffer."""
    exchange = plan.exchange
    return (
        exchange.num_shards == 1
        and not plan.request.gather_corrupted
        and exchange.num_buffer_rows == plan.rows.num_clean
        and all(copy.source == copy.target for copy in exchange.own)
    )


class _GatherKeys(torch.autograd.Function):
    """Packed keys and values of all shards; the gradient is reduced to their owners."""

    @staticmethod
    def forward(
        ctx: Any, k: Tensor, v: Tensor, exchange: Exchange, group: Group, wire: torch.dtype
    ) -> Tensor:
        gather = CleanGather(k, v, exchange, group)
        gather.wait(Phase.LATE)
        ctx.saved = (exchange, group, wire, k.shape, k.dtype)
        return gather.buffer_SZ2MH

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        exchange, group, wire, shape, dtype = ctx.saved
        (grad,) = grad_outputs
        reduce = CleanReduce(grad, exchange, group, wire, zeroed=False)
        reduce.grad_SZ2MH.copy_(grad)
        reduce.start()
        dk, dv = grad.new_empty(shape, dtype=dtype), grad.new_empty(shape, dtype=dtype)
        reduce.finish_into(dk, dv)
        return dk, dv, None, None, None
