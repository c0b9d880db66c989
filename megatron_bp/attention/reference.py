"""The whole method in one process and one dense 2L mask: what every layout must reproduce.

Uses autograd instead of the hand-written backward, and the dense mask instead of launches.
Specified by tests/attention/test_block_parallel.py, which compares everything with it.
"""

import torch
from torch import Tensor

from megatron_bp.layout.plan import RankPlan
from megatron_bp.layout.visibility import dense_mask


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, plan: RankPlan, softmax_scale: float
) -> Tensor:
    """Attention of all rows of a one-rank plan, differentiable by autograd.

    Shapes: q [T, Z, N, H], k and v [T, Z, M, H] in `plan.rows` order; the result is like q.
    Raises: ValueError if the plan shares the sample over several ranks.
    """
    if plan.request.num_ranks != 1:
        raise ValueError(
            f"the reference needs a plan for num_ranks=1, not {plan.request.num_ranks}."
        )
    clean = plan.rows.num_clean
    mask = dense_mask(plan.visibility, plan.rows.coordinate[:clean], plan.rows.coordinate[clean:])
    allowed = torch.from_numpy(mask).to(q.device)
    repeat = q.shape[2] // k.shape[2]
    q, k, v = q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = (q @ k.mT * softmax_scale).masked_fill(~allowed, float("-inf"))
    empty = ~allowed.any(1)
    probabilities = scores.masked_fill(empty[:, None], 0.0).softmax(-1)
    out = probabilities.masked_fill(empty[:, None], 0.0) @ v
    return out.permute(2, 0, 1, 3)
