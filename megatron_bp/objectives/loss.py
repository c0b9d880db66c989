"""Cross-entropy of a linear head, chunk by chunk over rows, with the vocabulary split over ranks.

Owns the head's matrix products and their gradients, so that no [R, V] tensor ever exists. Knows
nothing of which rows are targets or how losses are weighted. Specified by
tests/objectives/test_loss.py.

Shape letters: R target rows, C rows of one chunk, E hidden size, V vocabulary rows of this rank.

    loss_r = lse_r - z_r[label_r],  z = hidden @ weight^T,  lse_r = log sum_v exp z_r[v]
    dz_r[v] = (exp(z_r[v] - lse_r) - [v == label_r]) * dloss_r
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


class Local(Enum):
    """The absence of a process group: this process has the whole vocabulary."""

    LOCAL = "local"


LOCAL: Final = Local.LOCAL


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """Which part of the vocabulary this rank holds, what of it counts, and the chunk size.

    `vocab_start` is the token id of the first local weight row. Ids from `num_valid_vocab` on are
    Megatron's padding: they get no probability and their weight rows a gradient of exactly zero.
    So does `excluded_id` (the mask token, -1 for none).

    Units: `chunk_rows` in rows; memory peaks at about chunk_rows * V compute-type elements.
    """

    vocab_start: int
    num_valid_vocab: int
    excluded_id: int = -1
    chunk_rows: int = 1024

    def __post_init__(self) -> None:
        for name, least in (("vocab_start", 0), ("num_valid_vocab", 1), ("chunk_rows", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}.")
        if self.excluded_id < -1:
            raise ValueError(f"excluded_id={self.excluded_id} must be a token id, or -1 for none.")


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    options: LossOptions,
    group: dist.ProcessGroup | Local = LOCAL,
) -> Tensor:
    """Cross-entropy of each row's label under softmax(hidden @ weight^T), differentiable.

    `hidden` and `labels` are the same on every rank of `group`, `weight` is this rank's part of the
    vocabulary. The gradient of `hidden` is summed over the group here (no caller may sum it again),
    that of `weight` is local. Low-precision inputs are computed and accumulated in float32, and
    gradients rounded once to the inputs' types. R may be 0. Checking labels costs one
    device-to-host read of a single value a call.

    Shapes: hidden [R, E], weight [V, E], labels int64 [R] -> float32 [R] (float64 for float64).
    Raises: ValueError or TypeError if shapes, types or labels do not fit.
    """
    _check_inputs(hidden, weight, labels)
    _check_labels(labels, options)
    loss: Tensor = _LinearCrossEntropy.apply(hidden, weight, labels, options, group)
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        options: LossOptions,
        group: dist.ProcessGroup | Local,
    ) -> Tensor:
        # First this rank's lse and label logit, chunk by chunk, then one merge over ranks: two
        # collectives a call, however many chunks.
        dtype = _compute_dtype(hidden)
        lse_R = torch.empty(len(labels), dtype=dtype, device=hidden.device)
        picked_R = torch.empty_like(lse_R)
        for rows in _chunks(len(labels), options.chunk_rows):
            logits_CV = _logits(hidden[rows], weight, options)
            column_C, hit_C = _local_column(labels[rows], weight, options)
            # picked is 0 where another rank holds the label, so that the sum over ranks is right
            picked_R[rows] = logits_CV.gather(1, column_C).squeeze(1).where(hit_C, 0.0)
            # a shard that is all padding has maximum -inf; any finite shift gives it lse = -inf
            max_C = logits_CV.amax(1).clamp_min(torch.finfo(dtype).min)
            sum_C = logits_CV.sub_(max_C[:, None]).exp_().sum(1)
            lse_R[rows] = max_C + sum_C.log()
        if group is not LOCAL and len(labels):
            lse_R, picked_R = _merge_over_ranks(lse_R, picked_R, group)
        ctx.save_for_backward(hidden, weight, labels, lse_R)
        ctx.options, ctx.group = options, group
        return lse_R - picked_R

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dloss_R: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, labels, lse_R = ctx.saved_tensors
        options, group = ctx.options, ctx.group
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        dhidden_RE = torch.empty_like(hidden, dtype=lse_R.dtype) if need_hidden else None
        dweight_VE = torch.zeros_like(weight, dtype=lse_R.dtype) if need_weight else None
        for rows in _chunks(len(labels), options.chunk_rows):
            dlogits_CV = _logits(hidden[rows], weight, options)
            dlogits_CV.sub_(lse_R[rows, None]).exp_()
            column_C, hit_C = _local_column(labels[rows], weight, options)
            dlogits_CV.scatter_add_(1, column_C, -hit_C[:, None].to(dlogits_CV.dtype))
            dlogits_CV = dlogits_CV.mul_(dloss_R[rows, None]).to(_operand_dtype(weight))
            if dhidden_RE is not None:
                dhidden_RE[rows] = _product(dlogits_CV, weight)
            if dweight_VE is not None:
                _add_product(dweight_VE, dlogits_CV.t(), hidden[rows])
        if dhidden_RE is not None:
            if group is not LOCAL and len(labels):
                dist.all_reduce(dhidden_RE, group=group)
            dhidden_RE = dhidden_RE.to(hidden.dtype)
        if dweight_VE is not None:
            dweight_VE = dweight_VE.to(weight.dtype)
        return dhidden_RE, dweight_VE, None, None, None


def _merge_over_ranks(
    lse_R: Tensor, picked_R: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    max_R = lse_R.clone()
    dist.all_reduce(max_R, op=dist.ReduceOp.MAX, group=group)
    both_2R = torch.stack([(lse_R - max_R).exp(), picked_R])
    dist.all_reduce(both_2R, group=group)
    return max_R + both_2R[0].log(), both_2R[1]


def _logits(hidden_CE: Tensor, weight: Tensor, options: LossOptions) -> Tensor:
    """Logits of a chunk in the compute type, -inf where the vocabulary does not count."""
    logits_CV = _product(hidden_CE, weight.t())
    # The product covers padding too: cutting it off would spoil the alignment it was added for.
    logits_CV[:, max(options.num_valid_vocab - options.vocab_start, 0) :] = float("-inf")
    excluded = options.excluded_id - options.vocab_start
    if options.excluded_id >= 0 and 0 <= excluded < len(weight):
        logits_CV[:, excluded] = float("-inf")
    return logits_CV


def _local_column(labels_C: Tensor, weight: Tensor, options: LossOptions) -> tuple[Tensor, Tensor]:
    """Column [C, 1] of each label in this rank's vocabulary (0 if elsewhere), and whether it is."""
    column_C = labels_C - options.vocab_start
    hit_C = (column_C >= 0) & (column_C < len(weight))
    return column_C.where(hit_C, 0)[:, None], hit_C


def _chunks(num_rows: int, chunk_rows: int) -> Iterator[slice]:
    for start in range(0, num_rows, chunk_rows):
        yield slice(start, min(start + chunk_rows, num_rows))


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def _operand_dtype(weight: Tensor) -> torch.dtype:
    """Type of the products' operands: only CUDA multiplies low precision into float32."""
    return weight.dtype if weight.is_cuda else _compute_dtype(weight)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b accumulated and returned in the compute type."""
    dtype, operand = _compute_dtype(b), _operand_dtype(b)
    if operand == dtype:
        return a.to(dtype) @ b.to(dtype)
    return torch.mm(a, b, out_dtype=dtype)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Adds a @ b to `total`, which is in the compute type."""
    if _operand_dtype(b) == total.dtype:
        total.addmm_(a, b.to(total.dtype))
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


def _check_inputs(hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or labels.shape != hidden.shape[:1]:
        raise ValueError(
            f"hidden {list(hidden.shape)}, weight {list(weight.shape)} and labels "
            f"{list(labels.shape)} must have the shapes [R, E], [V, E] and [R]."
        )
    if hidden.shape[1] != weight.shape[1] or len(weight) == 0:
        raise ValueError(
            f"weight {list(weight.shape)} must have at least one row, and rows of the size "
            f"{hidden.shape[1]} of hidden."
        )
    if hidden.dtype != weight.dtype or not hidden.is_floating_point():
        raise TypeError(
            f"hidden is {hidden.dtype} and weight {weight.dtype}; both must have the same "
            "floating-point type, for example torch.bfloat16."
        )
    if labels.dtype != torch.int64:
        raise TypeError(f"labels are {labels.dtype}; they must be torch.int64.")


def _check_labels(labels: Tensor, options: LossOptions) -> None:
    wrong_R = (labels < 0) | (labels >= options.num_valid_vocab) | (labels == options.excluded_id)
    if not wrong_R.any():
        return
    row = int(wrong_R.nonzero()[0])
    raise ValueError(
        f"the label of row {row} is {int(labels[row])}; labels must be in "
        f"[0, num_valid_vocab={options.num_valid_vocab}) and differ from "
        f"excluded_id={options.excluded_id}. Pass target rows only."
    )
