"""Merges partial attention results by their log-sum-exp.

    lse = log(exp(lse_a) + exp(lse_b));  out = w_a out_a + w_b out_b
    w_a = sigmoid(lse_a - lse_b);  w_b = sigmoid(lse_b - lse_a)

The weights equal exp(lse_a - lse) and exp(lse_b - lse), which lose eps * |lse| to rounding.
A part that saw no key (LSE -inf) has weight 0; two such parts merge to output 0 and LSE -inf.
Specified by tests/attention/test_merge.py.
"""

import torch
from torch import Tensor


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """The attention of a row over the union of two disjoint key sets.

    Shapes: outputs [..., H], LSEs [...]. The result has the dtype of the LSEs (fp32 or fp64).
    """
    lse = torch.logaddexp(lse_a, lse_b)
    # Two empty parts: -inf - -inf is NaN; any weights serve, since both outputs are 0.
    apart = torch.where(torch.isneginf(lse), torch.zeros_like(lse), lse_a - lse_b)[..., None]
    weight_a, weight_b = torch.sigmoid(apart), torch.sigmoid(-apart)
    return weight_a * out_a.to(lse.dtype) + weight_b * out_b.to(lse.dtype), lse
