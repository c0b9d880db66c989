"""Merges partial attention results by their log-sum-exp.

    lse = log(exp(lse_a) + exp(lse_b));  out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

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
    # An empty row has lse = -inf; subtracting 0 instead keeps the weights 0 rather than NaN.
    base = torch.where(torch.isneginf(lse), torch.zeros_like(lse), lse)
    weight_a, weight_b = torch.exp(lse_a - base)[..., None], torch.exp(lse_b - base)[..., None]
    return weight_a * out_a.to(lse.dtype) + weight_b * out_b.to(lse.dtype), lse
