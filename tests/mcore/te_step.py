"""One block-diffusion step of a tiny Transformer Engine model, and the dense answer to it.

Used with the stand-in on the CPU (test_te_attention.py) and with Transformer Engine on a GPU
(test_gpu_te.py); both run it in a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

# Linear layers with fp8 weights want sizes that are multiples of 16; heads are as in real models.
WIDTHS = {
    "hidden_size": 128,
    "ffn_hidden_size": 192,
    "num_attention_heads": 8,
    "num_query_groups": 2,
    "kv_channels": 128,
}
BLOCK, NUM_SAMPLES = 32, 2

# Transformer Engine keeps a layer norm's weight in the linear layer behind it.
NORM_NAMES = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


@dataclass(frozen=True)
class Answer:
    """A loss and the gradients of all parameters, in fp64 on the CPU, by Megatron's local names."""

    loss: float
    grads: dict[str, Tensor]
    num_fp8_layers: int = 0
    num_attention_runs: int = 0  # forward, of parts of a layer's attention


@dataclass(frozen=True)
class Step:
    """How a step is computed: an attention kernel by name, a dtype, and Megatron's fp8 recipe.

    `recompute`: every layer runs again in backward, except its attention.

    On a GPU problems of up to 256 keys go to the small-problem kernel, whatever kernel is named:
    `length` (tokens) must be longer there.
    """

    kernel: str
    dtype: torch.dtype
    length: int
    fp8_recipe: str = "none"
    next_token: bool = False
    recompute: bool = False


def reference_step(rank: int, num_ranks: int, length: int) -> Answer:
    """The answer by plain formulas and a dense mask in fp64, on the CPU."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    known: Any = sys.modules  # the reference has nothing of Transformer Engine in it
    known.setdefault("transformer_engine", None)
    from megatron_bp.mcore import cpu

    cpu.enable_cpu()
    from megatron_bp.mcore import exactness_reference
    from megatron_bp.mcore.exactness_problem import Layout, start_layout

    torch.set_default_dtype(torch.float64)
    start_layout(Layout())
    exactness_reference.transformer_config = _config
    got = exactness_reference.compute_reference(_problem(torch.float64, length))
    return Answer(got.loss, got.grads)


def run_steps(rank: int, num_ranks: int, steps: list[Step], stand_in: bool) -> list[Answer | str]:
    """The answers of the production path, or the error of a step that failed."""
    if stand_in:
        from tests.mcore import te_stand_in

        te_stand_in.install()
        from megatron_bp.mcore import cpu

        cpu.enable_cpu()
        torch.set_default_dtype(torch.float64)
    else:
        torch.compiler.set_stance("force_eager")  # compiling would take most of the time
    from megatron.training.global_vars import _set_timers

    from megatron_bp.mcore.exactness_problem import Layout, start_layout

    _set_timers(argparse.Namespace(timing_log_level=0, timing_log_option="minmax"))
    start_layout(Layout())
    answers: list[Answer | str] = []
    for step in steps:
        begin = time.perf_counter()
        try:
            answers.append(_step(step))
        except Exception as error:  # the other steps are worth their time on a GPU
            traceback.print_exc()
            answers.append(f"{type(error).__name__}: {error}")
        print("TE_STEP", step, f"{time.perf_counter() - begin:.1f} s", flush=True)
    return answers


def steps_and_reference(
    rank: int, num_ranks: int, steps: list[Step]
) -> tuple[list[Answer | str], Answer]:
    """The answers of the production path over the stand-in, and by plain formulas."""
    return run_steps(rank, num_ranks, steps, True), reference_step(rank, num_ranks, steps[0].length)


def differences(got: Answer, wanted: Answer) -> dict[str, float]:
    """Relative errors: of the loss, and of each parameter's gradient in the 2-norm."""
    assert got.grads.keys() == wanted.grads.keys()
    errors = {"loss": abs(got.loss - wanted.loss) / abs(wanted.loss)}
    for name, grad in wanted.grads.items():
        errors[name] = float((got.grads[name] - grad).norm() / grad.norm())
    return errors


def _problem(dtype: torch.dtype, length: int) -> Any:
    from megatron_bp.mcore.exactness_problem import Problem

    return Problem(length=length, block_size=BLOCK, num_samples=NUM_SAMPLES, dtype=dtype)


def _config(problem: Any, layout: Any, **changes: Any) -> Any:
    from megatron_bp.mcore import exactness_problem

    return replace(exactness_problem.transformer_config(problem, layout), **WIDTHS, **changes)


def _model(step: Step) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    from megatron_bp.mcore.exactness_problem import Layout, gpt
    from megatron_bp.mcore.model import diffusion_spec, use_plan_positions
    from megatron_bp.mcore.te_attention import TEBlockParallelAttention

    fp8 = step.fp8_recipe != "none"
    changes: dict[str, Any] = {"fp8": "hybrid", "fp8_recipe": step.fp8_recipe} if fp8 else {}
    if step.recompute:
        changes |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    bf16 = step.dtype == torch.bfloat16
    config = _config(_problem(step.dtype, step.length), Layout(), bf16=bf16, **changes)
    stock_spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=True)
    stock = gpt(config, stock_spec, _problem(step.dtype, step.length))
    model = gpt(config, diffusion_spec(stock_spec, config), _problem(step.dtype, step.length))
    attention = model.decoder.layers[0].self_attention.core_attention
    assert type(attention) is TEBlockParallelAttention, type(attention)
    assert "decoder.layers.0.self_attention.core_attention._extra_state" in model.state_dict()
    model.load_state_dict(stock.state_dict(), strict=True)
    stock.load_state_dict(model.state_dict(), strict=True)
    model = model.to(torch.cuda.current_device())
    (model,) = use_plan_positions([model.to(step.dtype)])
    return model


def _step(step: Step) -> Answer:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from megatron_bp.mcore.exactness_reference import _initial

    model = _model(step)
    ours = dict(model.named_parameters())
    names = {_local_name(name): name for name in ours}
    assert len(names) == len(ours)
    for local, name in names.items():
        shape = torch.empty(ours[name].shape, dtype=torch.float64, device="cpu")
        ours[name].data.copy_(_initial(local, shape))
    wide = step.dtype == torch.bfloat16
    ddp = DistributedDataParallel(
        model.config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=wide, overlap_grad_reduce=False, use_distributed_optimizer=False
        ),
        model,
    )
    if step.fp8_recipe == "delayed":  # its scales come from the steps before
        _loss(ddp, step)
        ddp.zero_grad_buffer()
    with _counted_runs() as runs:
        loss = _loss(ddp, step)
    grads = {local: ours[name].main_grad.double().cpu() for local, name in names.items()}
    count = sum(bool(getattr(m, "fp8_initialized", False)) for m in model.modules())
    return Answer(loss, grads, count, len(runs))


@contextlib.contextmanager
def _counted_runs() -> Iterator[list[None]]:
    """Gains an item whenever a part of a layer's attention is computed forward."""
    from megatron_bp.attention.native import NativeRun

    stock, runs = NativeRun.forward, list[None]()

    def forward(*args: Any, **named: Any) -> Any:
        runs.append(None)
        return stock(*args, **named)

    NativeRun.forward = forward  # type: ignore[method-assign]
    try:
        yield runs
    finally:
        NativeRun.forward = stock  # type: ignore[method-assign]


def _loss(ddp: Any, step: Step) -> float:
    return _next_token_loss(ddp, step) if step.next_token else _diffusion_loss(ddp, step)


def _diffusion_loss(ddp: Any, step: Step) -> float:
    """Runs Megatron's schedule with our forward step; returns the loss."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_bp.config import BlockParallelConfig
    from megatron_bp.mcore.exactness_problem import MASK_ID, VALID_VOCAB, VOCAB, rules_of
    from megatron_bp.mcore.forward_step import DiffusionForwardStep

    problem = _problem(step.dtype, step.length)
    config = BlockParallelConfig(
        block_size=BLOCK,
        bdlm_objective="standard",
        mask_token_id=MASK_ID,
        clean_rule=problem.clean_rule,
        document_positions="run_on",
        bp_attention_kernel=step.kernel,
        bp_recompute_attention="keep" if step.recompute else "auto",
    )
    given = {
        "seq_length": step.length,
        "micro_batch_size": NUM_SAMPLES,
        "eval_micro_batch_size": NUM_SAMPLES,
        "num_experts": 0,
        "check_for_nan_in_loss_and_grad": False,
        "data_parallel_size": 1,
        "group_query_attention": True,
        "bp_grad_wire_dtype": "fp32",
        "bp_loss_chunk_rows": 1024,
        "padded_vocab_size": VOCAB,
    }
    args = argparse.Namespace(**{**vars(ddp.module.config), **given})
    (report,) = get_forward_backward_func()(
        forward_step_func=DiffusionForwardStep(args, config, rules_of(problem), VALID_VOCAB),
        data_iterator=_batches(problem),
        model=[ddp],
        num_microbatches=1,
        seq_length=step.length,
        micro_batch_size=NUM_SAMPLES,
        forward_only=False,
    )
    total, count = report["bdlm loss"].tolist()
    return total / count


def _next_token_loss(ddp: Any, step: Step) -> float:
    """Runs a plain next-token step, which takes the stock path; returns the loss."""
    ddp.module.set_is_first_microbatch()
    tokens = next(_batches(_problem(step.dtype, step.length)))["clean"].to(
        torch.cuda.current_device()
    )
    position = torch.arange(step.length, device=tokens.device).expand_as(tokens)
    loss = ddp(tokens, position, None, labels=tokens.roll(-1, 1)).float().mean()
    loss.backward()  # one data-parallel rank: there is no gradient to reduce
    return float(loss)


def _batches(problem: Any) -> Iterator[dict[str, Tensor]]:
    from megatron_bp.mcore.exactness_problem import samples_of

    samples = samples_of(problem)
    yield {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def _local_name(name: str) -> str:
    for local, suffix in NORM_NAMES.items():
        if name.endswith(suffix):
            return name.removesuffix(suffix) + local
    return name
