"""Trains one step of a tiny model in any layout and compares it with one process and a dense mask.

The layout side is the production path: GPTModel with our layer specification, Megatron's DDP and
schedules, our forward step. Used by tools/check_exact.py; specified by
tests/tools/test_check_exact.py.
"""

import argparse
import contextlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_bp.config import BlockParallelConfig
from megatron_bp.mcore.dataset import Sample
from megatron_bp.mcore.exactness_formulas import FORMULAS
from megatron_bp.mcore.exactness_problem import (
    MASK_ID,
    VALID_VOCAB,
    Layout,
    Problem,
    gpt,
    local_spec,
    rules_of,
    samples_of,
    transformer_config,
)
from megatron_bp.mcore.exactness_reference import Reference
from megatron_bp.mcore.forward_step import DiffusionForwardStep
from megatron_bp.mcore.model import diffusion_spec, use_plan_positions


@dataclass(frozen=True)
class Result:
    """How far a layout is from the reference; relative to the largest value of each gradient."""

    loss: float
    loss_error: float
    grad_error: float
    worst_parameter: str


def check(problem: Problem, layout: Layout, reference: Reference) -> Result:
    """Trains one step and compares; `start_layout` came before. Equal on all ranks."""
    model = _layout_model(problem, layout)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(_shard(reference.parameters[_full_name(name)], parameter, name))
    ddp = DistributedDataParallel(
        model.config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=False, overlap_grad_reduce=False, use_distributed_optimizer=False
        ),
        model,
    )
    model.config.finalize_model_grads_func = finalize_model_grads
    micro_batch = 1 if problem.packed or problem.num_experts else problem.num_samples // layout.data
    step = DiffusionForwardStep(
        _arguments(problem, layout, micro_batch, model),
        BlockParallelConfig(
            block_parallel_size=layout.block,
            block_size=problem.block_size,
            bdlm_objective=FORMULAS[problem.objective].preset,
            mask_token_id=MASK_ID,
            clean_rule=problem.clean_rule,
            # As in the reference: rotary tables are fp32, so equal distances are not equal bits.
            document_positions="restart" if problem.documents else "run_on",
            bp_attention_strategy=layout.strategy,
            bp_attention_kernel="dense",
            bp_loss_chunk_rows=7,
            bdlm_length_multiple=problem.length_multiple,
            bp_recompute_attention=layout.recompute_attention,
            bp_clean_kv=layout.clean_kv,
        ),
        rules_of(problem),
        VALID_VOCAB,
    )
    with contextlib.redirect_stdout(io.StringIO()):  # one line a case
        reports = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=_batches(problem, layout, micro_batch),
            model=[ddp],
            num_microbatches=problem.num_samples // layout.data // micro_batch,
            seq_length=problem.length,
            micro_batch_size=micro_batch,
            forward_only=False,
        )
    return _compare(reports, ddp, reference)


def _compare(reports: list[dict[str, Tensor]], ddp: Any, reference: Reference) -> Result:
    total = torch.zeros(2, dtype=torch.float64)
    for report in reports:
        total += report["bdlm loss"]
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    # Only the last pipeline stage has the loss.
    dist.all_reduce(
        total, op=dist.ReduceOp.MAX, group=parallel_state.get_pipeline_model_parallel_group()
    )
    loss = float(total[0] / total[1].clamp(min=1e-300))
    worst, name_of_worst = 0.0, ""
    for name, parameter in ddp.module.named_parameters():
        if not parameter.requires_grad:
            continue
        full = reference.grads[_full_name(name)]
        want = _shard(full, parameter, name)
        scale = float(full.abs().max()) or 1.0
        error = float((parameter.main_grad - want).abs().max()) / scale
        if not error <= worst:  # a NaN is the worst error there is
            worst, name_of_worst = error, name
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (worst, name_of_worst))
    worst, name_of_worst = max(everyone, key=lambda pair: np.nan_to_num(pair[0], nan=np.inf))
    scale = max(abs(reference.loss), 1e-12)
    return Result(loss, abs(loss - reference.loss) / scale, worst, name_of_worst)


def _arguments(
    problem: Problem, layout: Layout, micro_batch: int, model: GPTModel
) -> argparse.Namespace:
    """The arguments of a run that the forward step reads; the model's shape is in its config."""
    given = {
        "seq_length": problem.length,
        "deterministic_mode": False,
        "micro_batch_size": micro_batch,
        "eval_micro_batch_size": micro_batch,
        "num_experts": problem.num_experts,
        "check_for_nan_in_loss_and_grad": False,
        "data_parallel_size": layout.data,
        "group_query_attention": True,
        "bp_grad_wire_dtype": "fp32",
        "bp_loss_chunk_rows": 7,
    }
    return argparse.Namespace(**{**vars(model.config), **given})


def _batches(problem: Problem, layout: Layout, micro_batch: int) -> Iterator[Sample]:
    mine = samples_of(problem)[parallel_state.get_data_parallel_rank() :: layout.data]
    for first in range(0, len(mine), micro_batch):
        part = mine[first : first + micro_batch]
        yield {name: torch.stack([sample[name] for sample in part]) for name in part[0]}


def _layout_model(problem: Problem, layout: Layout) -> GPTModel:
    config = transformer_config(problem, layout)
    model = gpt(config, diffusion_spec(local_spec(problem), config), problem)
    use_plan_positions([model])
    return model.to(problem.dtype)


def _full_name(name: str) -> str:
    """A parameter's name in a model without pipeline parallelism."""
    parts = name.split(".")
    if "layers" in parts:
        at = parts.index("layers") + 1
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        offset = parallel_state.get_pipeline_model_parallel_rank() * (2 // stages)
        parts[at] = str(int(parts[at]) + offset)
    return ".".join(parts)


def _shard(full: Tensor, like: Tensor, name: str) -> Tensor:
    """This tensor-parallel rank's part of a full parameter or gradient."""
    if full.shape == like.shape:
        return full
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    if "linear_fc1" in name:  # [gate ; up], each split
        return torch.cat([half.chunk(size)[rank] for half in full.chunk(2)])
    dim = next(i for i in range(full.dim()) if full.shape[i] != like.shape[i])
    return full.chunk(size, dim)[rank]
