"""The forward step of `--bdlm-objective none`: what Megatron's own GPT pretraining script does.

Megatron's wheel has no pretraining script, so the few lines are here. They must stay equal to it,
bit for bit (tests/mcore/test_pretrain_ar.py). Knows no block parallelism.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import (
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_timers
from megatron.training.utils import is_first_or_last_pipeline_stage
from torch import Tensor

KEYS = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")


def forward_step(
    data_iterator: Iterator[dict[str, Tensor]], model: Any, return_schedule_plan: bool = False
) -> tuple[Tensor, functools.partial[Any]]:
    """Returns per-token losses and the function that sums them, as Megatron's schedules expect."""
    if return_schedule_plan:
        raise ValueError(
            "--overlap-moe-expert-parallel-comm is not supported by this script; drop it"
        )
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = _batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, functools.partial(_loss, batch["loss_mask"])


def refuse_not_finite(loss: Tensor) -> None:
    """Returns if a loss is finite; else Megatron's rerun machinery ends the run."""
    for rejected, what in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
        get_rerun_state_machine().validate_result(
            result=loss,
            rejection_func=rejected,
            message=f"found {what} in local forward loss calculation",
            tolerance=0.0,
            fatal=True,
        )


def _batch(data_iterator: Iterator[dict[str, Tensor]], vp_stage: Any) -> dict[str, Any]:
    if not is_first_or_last_pipeline_stage(vp_stage):
        return dict.fromkeys(KEYS)
    args = get_args()
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    batch: dict[str, Any] = {}
    if tp_rank == 0:
        batch = {
            key: value.cuda(non_blocking=True)
            for key, value in next(data_iterator).items()
            if key in KEYS
        }
    training = torch.is_grad_enabled()
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size if training else args.eval_micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=parallel_state.is_pipeline_first_stage(),
        is_pipeline_last_stage=parallel_state.is_pipeline_last_stage(),
    )
    batch = get_batch_on_this_cp_rank(
        batch, is_hybrid_cp=False, cp_group=parallel_state.get_context_parallel_group()
    )
    return {key: batch.get(key) for key in KEYS}


def _loss(
    loss_mask: Tensor, output: Tensor, model: Any = None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    args = get_args()
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    num_tokens = mask.sum().clone().detach().to(torch.int)
    if args.check_for_nan_in_loss_and_grad:
        refuse_not_finite(loss)
    report = torch.cat([loss.clone().detach().view(1), num_tokens.view(1)])
    return loss, num_tokens, {"lm loss": report}
