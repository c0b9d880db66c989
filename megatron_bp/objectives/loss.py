"""Cross-entropy of a linear head, chunk by chunk over rows, with the vocabulary split over ranks.

Two forms of one loss, neither of which ever has an [R, V] tensor. `linear_cross_entropy` keeps one
number a row and computes the logits again in backward: four matrix products in all. Where the
weight of each row is known beforehand, `weighted_cross_entropy` computes the gradients in forward:
three. Knows nothing of which rows are targets. Specified by tests/objectives/test_loss.py and
test_gpu_loss.py.

Shape letters: R target rows, C rows of one chunk, E hidden size, V vocabulary rows of this rank.

    loss_r = lse_r - z_r[label_r],  z = hidden @ weight^T  (passes.py: lse and the gradient of z)
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_bp.objectives.head import LOCAL, Head, Local, Logits, LossOptions, gradients, scaled

__all__ = [
    "LOCAL",
    "Local",
    "LossOptions",
    "check_labels",
    "linear_cross_entropy",
    "weighted_cross_entropy",
]


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
    device-to-host read of a single value a call, unless `options` say that they are checked.

    The gradient of a low-precision `weight` is rounded in place: until it is dropped it holds the
    memory of its float32 sum, twice its own size.

    Shapes: hidden [R, E], weight [V, E], labels int64 [R] -> float32 [R] (float64 for float64).
    Raises: ValueError or TypeError if shapes, types or labels do not fit.
    """
    _check_inputs(hidden, weight, labels, options)
    loss: Tensor = _LinearCrossEntropy.apply(hidden, weight, labels, options, group)
    return loss


def weighted_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    row_weight: Tensor,
    *,
    options: LossOptions,
    group: dist.ProcessGroup | Local = LOCAL,
) -> tuple[Tensor, Tensor]:
    """sum_r row_weight_r * loss_r, differentiable, and the losses, which are not.

    Otherwise as `linear_cross_entropy`. Forward computes both gradients of the sum beside the loss,
    so that the logits are computed once; backward multiplies them by the sum's own gradient, and
    can run once. Until then the gradients take memory, that of `weight` in float32. The gradient of
    a low-precision `hidden` is rounded twice, unless the sum's gradient is a power of two.

    Shapes: row_weight [R] of any floating-point type -> scalar of that type, losses [R].
    Raises: as there; TypeError for float16, whose gradients need the scale of the loss beforehand.
    """
    _check_inputs(hidden, weight, labels, options)
    if row_weight.shape != labels.shape or row_weight.requires_grad:
        raise ValueError(
            f"row_weight {list(row_weight.shape)} must be a constant of shape "
            f"{list(labels.shape)}; detach it, or use linear_cross_entropy."
        )
    if hidden.dtype == torch.float16:
        raise TypeError(
            "hidden is torch.float16: gradients computed before the loss is scaled would vanish. "
            "Use torch.bfloat16, or linear_cross_entropy."
        )
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        total, loss_R = _WeightedCrossEntropy.apply(
            hidden, weight, labels, row_weight, options, group
        )
        return total, loss_R
    loss_R = _LinearCrossEntropy.apply(hidden, weight, labels, options, group)
    return _weighted_sum(loss_R, row_weight), loss_R


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
        # First this rank's lse and label logit, chunk by chunk, then one merge over ranks.
        head = Head(hidden, weight, labels, options, group)
        lse_R = torch.empty(len(labels), dtype=head.dtype, device=hidden.device)
        picked_R = torch.empty_like(lse_R)
        logits = Logits(head, with_gradient=False)
        for rows in head.chunks():
            lse_CB, picked_R[rows] = logits.statistics(rows)
            lse_R[rows] = lse_CB.logsumexp(1)
        lse_R, picked_R = head.merge(lse_R, picked_R)
        ctx.save_for_backward(hidden, weight, labels, lse_R)
        ctx.options, ctx.group = options, group
        return lse_R - picked_R

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dloss_R: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, labels, lse_R = ctx.saved_tensors
        head = Head(hidden, weight, labels, ctx.options, ctx.group)
        logits = Logits(head, with_gradient=True)
        dhidden_RE, dweight_VE = gradients(
            head,
            ctx.needs_input_grad,
            lambda rows: logits.gradient(rows, lse_R[rows], dloss_R[rows]),
        )
        if dweight_VE is not None:
            dweight_VE = scaled(dweight_VE, lse_R.new_ones(()), weight.dtype)
        return dhidden_RE, dweight_VE, None, None, None


class _WeightedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        row_weight: Tensor,
        options: LossOptions,
        group: dist.ProcessGroup | Local,
    ) -> tuple[Tensor, Tensor]:
        head = Head(hidden, weight, labels, options, group)
        loss_R = torch.empty(len(labels), dtype=head.dtype, device=hidden.device)
        scale_R = row_weight.to(head.dtype)
        logits = Logits(head, with_gradient=True)

        def dlogits_of(rows: slice) -> Tensor:
            lse_CB, picked_C = logits.statistics(rows)
            lse_C, picked_C = head.merge(lse_CB.logsumexp(1), picked_C)
            loss_R[rows] = lse_C - picked_C
            return logits.gradient_of_statistics(rows, lse_CB, lse_C, picked_C, scale_R[rows])

        ctx.save_for_backward(*gradients(head, ctx.needs_input_grad, dlogits_of))
        ctx.dtype = weight.dtype
        ctx.mark_non_differentiable(loss_R)
        return _weighted_sum(loss_R, row_weight), loss_R

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dtotal: Tensor, _: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        # In place: a second backward finds changed tensors, and autograd refuses it.
        dhidden_RE, dweight_VE = ctx.saved_tensors
        if dhidden_RE is not None:
            dhidden_RE = dhidden_RE.mul_(dtotal)
        if dweight_VE is not None:
            dweight_VE = scaled(dweight_VE, dtotal, ctx.dtype)
        return dhidden_RE, dweight_VE, None, None, None, None


def _weighted_sum(loss_R: Tensor, row_weight: Tensor) -> Tensor:
    return (loss_R.to(row_weight.dtype) * row_weight).sum()


def _check_inputs(hidden: Tensor, weight: Tensor, labels: Tensor, options: LossOptions) -> None:
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
    if not options.labels_checked:
        check_labels(labels, options)


def check_labels(labels: Tensor, options: LossOptions) -> None:
    """Returns if every label counts; waits for the device.

    Raises: ValueError that names the first row whose label does not.
    """
    wrong_R = (labels < 0) | (labels >= options.num_valid_vocab) | (labels == options.excluded_id)
    if not wrong_R.any():
        return
    row = int(wrong_R.nonzero()[0])
    raise ValueError(
        f"the label of row {row} is {int(labels[row])}; labels must be in "
        f"[0, num_valid_vocab={options.num_valid_vocab}) and differ from "
        f"excluded_id={options.excluded_id}. Pass target rows only."
    )
