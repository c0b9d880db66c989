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
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_bp.config import BlockParallelConfig
from megatron_bp.mcore.dataset import Sample
from megatron_bp.mcore.exactness_data_parallel import distribute, gather_gradients
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
    config = transformer_config(problem, layout)
    chunks = _chunks(problem, layout, config)
    for name, parameter in _parameters(chunks):
        parameter.data.copy_(_shard(reference.parameters[name], parameter, name))
    wrapped = distribute(chunks, config, layout)
    # Pipelines get several micro-batches, so that stages work on different ones at a time.
    one_by_one = problem.packed or problem.num_experts or layout.pipeline > 1
    micro_batch = 1 if one_by_one else problem.num_samples // layout.data
    step = DiffusionForwardStep(
        _arguments(problem, layout, micro_batch, config),
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
            **dict(layout.knobs),
        ),
        rules_of(problem),
        VALID_VOCAB,
    )
    batches = [_batches(problem, layout, micro_batch) for _ in chunks]
    with contextlib.redirect_stdout(io.StringIO()):  # one line a case
        reports = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=batches if layout.virtual > 1 else batches[0],
            model=wrapped,
            num_microbatches=problem.num_samples // layout.data // micro_batch,
            seq_length=problem.length,
            micro_batch_size=micro_batch,
            forward_only=False,
        )
    if layout.overlap:
        gather_gradients(wrapped)
    return _compare(reports, chunks, reference)


def _compare(
    reports: list[dict[str, Tensor]], chunks: list[GPTModel], reference: Reference
) -> Result:
    total = torch.zeros(2, dtype=torch.float64, device=torch.cuda.current_device())
    for report in reports:
        total += report["bdlm loss"]
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    # Only the last pipeline stage has the loss.
    dist.all_reduce(
        total, op=dist.ReduceOp.MAX, group=parallel_state.get_pipeline_model_parallel_group()
    )
    loss = float(total[0] / total[1].clamp(min=1e-300))
    worst, name_of_worst = 0.0, ""
    for name, parameter in _parameters(chunks):
        if not parameter.requires_grad:
            continue
        full = reference.grads[name]
        want = _shard(full, parameter, name).to(parameter.device)
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
    problem: Problem, layout: Layout, micro_batch: int, config: TransformerConfig
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
        "log_throughput": False,
        "bp_grad_wire_dtype": "fp32",
        "bp_loss_chunk_rows": 7,
    }
    return argparse.Namespace(**{**vars(config), **given})


def _batches(problem: Problem, layout: Layout, micro_batch: int) -> Iterator[Sample]:
    mine = samples_of(problem)[parallel_state.get_data_parallel_rank() :: layout.data]
    for first in range(0, len(mine), micro_batch):
        part = mine[first : first + micro_batch]
        yield {name: torch.stack([sample[name] for sample in part]) for name in part[0]}


def _chunks(problem: Problem, layout: Layout, config: TransformerConfig) -> list[GPTModel]:
    """The model chunks of this pipeline rank; one without the interleaved schedule."""
    spec = diffusion_spec(local_spec(problem), config)
    chunks = [gpt(config, spec, problem, chunk) for chunk in range(layout.virtual)]
    use_plan_positions(chunks)
    device = torch.device(torch.cuda.current_device())
    return [chunk.to(device, problem.dtype) for chunk in chunks]


def _parameters(chunks: list[GPTModel]) -> Iterator[tuple[str, Any]]:
    """Parameters, each by its name in a model on one rank: layers and experts are renumbered."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            parts = name.split(".")
            if "layers" in parts:
                at = parts.index("layers") + 1
                layer: Any = chunk.decoder.layers[int(parts[at])]
                parts[at] = str(layer.layer_number - 1)
            if "local_experts" in parts:
                at = parts.index("local_experts") + 1
                first = parallel_state.get_expert_model_parallel_rank() * len(
                    layer.mlp.experts.local_experts
                )
                parts[at] = str(first + int(parts[at]))
            yield ".".join(parts), parameter


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
