"""Counts right answers of a linear head, chunk by chunk over rows, vocabulary split over ranks.

For evaluation only: no gradient, and never more than `chunk_rows` rows of logits. Specified by
tests/objectives/test_accuracy.py. Shape letters: R rows, C rows of one chunk, E hidden size, V
vocabulary rows of this rank.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bp.objectives.loss import LOCAL, Local, LossOptions


@torch.no_grad()
def label_wins(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    options: LossOptions,
    group: dist.ProcessGroup | Local = LOCAL,
) -> Tensor:
    """Whether no token that counts has a greater logit than each row's label, bool [R].

    Logits are accumulated in float32 (float64 for float64). Arguments are those of
    `linear_cross_entropy`, on every rank of `group`; labels must be tokens that count.

    Shapes: hidden [R, E], weight [V, E], labels int64 [R].
    """
    column_R = labels - options.vocab_start
    is_here_R = (column_R >= 0) & (column_R < len(weight))
    parts = []
    for lo in range(0, len(labels), options.chunk_rows):
        rows = slice(lo, lo + options.chunk_rows)
        logits_CV = _logits(hidden[rows], weight)
        logits_CV.masked_fill_(_never_right(weight, options), float("-inf"))
        best_C = logits_CV.amax(1)
        column_C1 = column_R[rows].clamp(0, len(weight) - 1)[:, None]
        own_C = logits_CV.gather(1, column_C1)[:, 0]
        label_C = own_C.masked_fill(~is_here_R[rows], float("-inf"))
        both_2C = torch.stack([best_C, label_C])
        if group is not LOCAL:
            dist.all_reduce(both_2C, op=dist.ReduceOp.MAX, group=group)
        parts.append(both_2C[1] >= both_2C[0])
    return torch.cat(parts) if parts else torch.zeros_like(labels, dtype=torch.bool)


def _never_right(weight: Tensor, options: LossOptions) -> Tensor:
    """Columns of this rank that no answer counts, bool [V]."""
    token_V = torch.arange(len(weight), device=weight.device) + options.vocab_start
    return (token_V >= options.num_valid_vocab) | (token_V == options.excluded_id)


def _logits(hidden_CE: Tensor, weight: Tensor) -> Tensor:
    if hidden_CE.dtype in (torch.float32, torch.float64):
        return hidden_CE @ weight.t()
    if hidden_CE.is_cuda:
        return torch.mm(hidden_CE, weight.t(), out_dtype=torch.float32)
    return hidden_CE.float() @ weight.t().float()
