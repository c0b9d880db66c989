"""Measures whole training steps of Megatron, in one process or under torchrun.

A step is Megatron's own `train_step` on a model built as examples/pretrain_bdlm.py builds it, with
random tokens: batch, forward, backward, gradient sums, optimizer. Every case starts from the same
weights and sample, so their first losses and gradient norms must agree. Specified by
tests/mcore/test_step_bench.py; the command line is tools/bench_step.py.
"""

import gc
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import wraps
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from megatron_bp.attention.flex_baseline import gathered_attention
from megatron_bp.layout.flops import needed_flops
from megatron_bp.layout.plan import with_window
from megatron_bp.mcore import adaptor, cpu, forward_step, versions
from megatron_bp.mcore.carrier import BlockParams
from megatron_bp.mcore.core_attention import Seat
from megatron_bp.mcore.dataset import CorruptionRules, Sample
from megatron_bp.mcore.forward_step import DiffusionForwardStep
from megatron_bp.mcore.step_cases import RECIPES, Case, Job
from megatron_bp.mcore.step_trace import Split, split_of
from megatron_bp.mcore.step_waits import lost, rows_of, shares, slowest
from megatron_bp.objectives.objective import Objective, Views


@dataclass(frozen=True)
class Clock:
    """Steps run before timing and timed, and whether one more is profiled."""

    warmups: int = 2
    repeats: int = 3
    with_profile: bool = True


@dataclass(frozen=True)
class Measured:
    """One rank's numbers of a case; `losses` and `grad_norms` of every step since the start.

    `static_bytes` is allocated before the first step. `target_share` is the share of corrupted rows
    that are targets.
    """

    step_ms: list[float]
    peak_bytes: int
    static_bytes: int
    target_share: float
    losses: list[float]
    grad_norms: list[float]
    splits: tuple[Split, ...]


@dataclass(frozen=True)
class BenchSeat(Seat):
    """A layer's attention in a range of the profiler's, optionally by FlexAttention."""

    flex: bool = False

    def attend(self, query: Tensor, key: Tensor, value: Tensor, params: BlockParams) -> Tensor:
        """Returns as `Seat.attend`."""
        with record_function("bench/attention"):
            if not self.flex:
                return super().attend(query, key, value, params)
            return self._attend_flex(query, key, value, params)

    def _attend_flex(
        self, query: Tensor, key: Tensor, value: Tensor, params: BlockParams
    ) -> Tensor:
        from megatron_bp.attention.kernels.flex import attend

        layout = params.layout
        options = replace(
            layout.options,
            softmax_scale=self.softmax_scale,
            corrupted_only=layout.prune and self.is_last_layer,
        )
        plan = with_window(layout.plan, self.window)
        out = gathered_attention(query, key, value, plan, layout.groups, options, attend)
        return out.reshape(*out.shape[:2], -1)


def start() -> None:
    """Makes this process able to run cases; on the CPU if there is no CUDA device."""
    if not torch.cuda.is_available():
        cpu.enable_cpu()
    cpu.use_shipped_dataset_helpers()
    versions.require_seams()


def run_case(job: Job, case: Case, clock: Clock) -> Measured:
    """Builds, trains and measures one case, and takes Megatron's state down again."""
    trainer, chunks = None, list[Any]()
    try:
        trainer = Trainer(job, case)
        chunks += trainer.model
        return trainer.measure(clock)
    finally:
        trainer = None
        while chunks:
            drop_graphs(chunks.pop())
        _take_down()


class Trainer:
    """A model, its optimizer and its batches, one step at a time."""

    def __init__(self, job: Job, case: Case) -> None:
        from megatron.core.enums import ModelType
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.utils import get_model_config
        from megatron.training import training
        from megatron.training.argument_utils import (
            gpt_config_from_args,
            pretrain_cfg_container_from_args,
        )

        with mock.patch.object(sys, "argv", ["bench_step.py", *job.flags(case)]):
            args, config = adaptor.parse()
        training.initialize_megatron()
        model_config = gpt_config_from_args(args)
        container = pretrain_cfg_container_from_args(args, model_config)
        _, production = adaptor.parts(args, config, model_config)
        recipe = RECIPES[case.recipe]
        rules = production.rules  # type: ignore[attr-defined]
        self.samples = _samples(rules, job, recipe.separate_views)
        self.target_share = _target_share(rules, job)
        if recipe.separate_views:
            rules = replace(rules, objective=one_view(rules.objective))
        self.step_func = DiffusionForwardStep(args, config, rules, job.shape.vocab)
        self.model, self.optimizer, self.scheduler = training.setup_model_and_optimizer(
            ModelType.encoder_or_decoder,
            checkpointing_context={},
            cfg_container=container,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )
        for chunk in self.model:
            use_bench_seats(chunk, recipe.flex)
            chunk.train()
        self.optimizer.step = _ranged("bench/optimizer", self.optimizer.step)
        self.config, self.run = get_model_config(self.model[0]), training.train_step
        self.schedule = get_forward_backward_func()
        _set_schedule_functions(args, self.config, self.model[0], self.optimizer)

    def step(self) -> tuple[float, float]:
        """Trains one step; returns loss and gradient norm (the loss is NaN but on a last stage)."""
        report, _, _, _, _, norm, *_ = self.run(
            self.step_func,
            self.samples,
            self.model,
            self.optimizer,
            self.scheduler,
            self.config,
            self.schedule,
            iteration=0,
        )
        loss = float(report["bdlm loss"]) if report else float("nan")
        return loss, float(norm)

    def measure(self, clock: Clock) -> Measured:
        """Runs and times the steps."""
        done, times = [], []
        static = torch.cuda.memory_allocated()
        ranged = _ranged("bench/loss", forward_step.score_targets)
        with mock.patch.object(forward_step, "score_targets", ranged):
            for _ in range(clock.warmups):
                done.append(self.step())
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            for _ in range(clock.repeats):
                dist.barrier()
                torch.cuda.synchronize()
                begin = time.perf_counter()
                done.append(self.step())
                torch.cuda.synchronize()
                times.append(1e3 * (time.perf_counter() - begin))
            peak = torch.cuda.max_memory_allocated()
            splits = (self._profiled(),) if clock.with_profile else ()
        losses, norms = zip(*done, strict=True)
        share = self.target_share
        return Measured(times, peak, static, share, list(losses), list(norms), splits)

    def _profiled(self) -> Split:
        on_cuda = torch.version.cuda is not None and torch.cuda.is_available()
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
        dist.barrier()
        torch.cuda.synchronize()
        with profile(activities=kinds) as recorded:
            self.step()
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            recorded.export_chrome_trace(str(path))
            return split_of(json.loads(path.read_text()))


def use_bench_seats(model: Any, flex: bool) -> int:
    """Gives every attention of a model a `BenchSeat`; returns how many there are."""
    found = 0
    for module in model.modules():
        seat = getattr(module, "seat", None)
        if isinstance(seat, Seat):
            values = {field.name: getattr(seat, field.name) for field in fields(Seat)}
            module.seat = BenchSeat(**values, flex=flex)
            found += 1
    return found


def drop_graphs(model: Any) -> int:
    """Empties what a mixture of experts' dispatchers keep of the last batch; returns how many.

    The routing probabilities hold their graph, and the graph by its hooks the whole model: a circle
    through C++ that Python cannot collect, so the memory would be missing in the next case.
    """
    found = 0
    for module in model.modules():
        holder = getattr(module, "token_dispatcher", module)
        for name, value in vars(holder).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                setattr(holder, name, None)
                found += 1
    return found


def one_view(objective: Objective) -> Objective:
    """The objective of a micro-batch that holds one of the two complementary views."""
    return replace(objective, views=Views.SINGLE)


def _target_share(rules: CorruptionRules, job: Job) -> float:
    sample = next(_samples(rules, job, separate_views=False))
    return float((sample["weights"] > 0).double().mean())


def _samples(rules: CorruptionRules, job: Job, separate_views: bool) -> Iterator[Sample]:
    """The data rank's sample for ever, or its views in turn, each with the clean tokens."""
    from megatron.core import parallel_state

    index = parallel_state.get_data_parallel_rank()
    generator = torch.Generator().manual_seed(77 + index)
    tokens = torch.randint(0, job.shape.vocab, (job.length,), generator=generator)
    tokens[tokens == rules.mask_token_id] += 1
    clean = {"tokens": tokens, "loss_mask": torch.ones(job.length)}
    sample = {name: x[None] for name, x in rules.sample(clean, index, is_padding=False).items()}
    if torch.version.cuda is not None and torch.cuda.is_available():  # as Megatron's data loader
        sample = {name: x.pin_memory() for name, x in sample.items()}
    if not separate_views:
        return itertools.repeat(sample)
    by_view = ("corrupted", "labels", "weights", "counted", "bucket")
    views = range(rules.objective.num_views)
    return itertools.cycle(
        {name: x[:, v : v + 1] if name in by_view else x for name, x in sample.items()}
        for v in views
    )


def _ranged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return function(*args, **kwargs)

    return run


def _set_schedule_functions(args: Any, config: Any, chunk: Any, optimizer: Any) -> None:
    """Sets what Megatron's `train` sets before its first step."""
    from megatron.core.distributed import finalize_model_grads

    config.grad_scale_func = optimizer.scale_loss
    if config.finalize_model_grads_func is None:
        config.finalize_model_grads_func = finalize_model_grads
    if args.overlap_grad_reduce:
        config.no_sync_func = chunk.no_sync


def _take_down() -> None:
    from megatron.core import parallel_state
    from megatron.training.training import destroy_global_state

    destroy_global_state()
    parallel_state.destroy_model_parallel()
    parallel_state._HIERARCHICAL_CONTEXT_PARALLEL_GROUPS = None
    gc.collect()
    torch.cuda.empty_cache()


def summary(job: Job, case: Case, measured: Measured, peak_tflops: float) -> dict[str, Any]:
    """The case's numbers over all ranks, as plain values; collective.

    A step takes as long as on its slowest rank; memory is that of the fullest. TFLOP/s are needed
    ones of one GPU, and `mfu` their share of `peak_tflops`.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, measured)
    steps = [max(times) for times in zip(*(m.step_ms for m in everyone), strict=True)]
    step_ms = statistics.median(steps)
    # The same work for every recipe: what the objective needs.
    work = needed_flops(job.run(replace(case, recipe="ours"), measured.target_share))
    tflops = work / dist.get_world_size() / step_ms / 1e9
    last = next(m for m in everyone if m.losses[0] == m.losses[0])
    profiles = [rows_of(ranks) for ranks in zip(*(m.splits for m in everyone), strict=True)]
    return {
        "case": case.name,
        "shape": job.shape.name,
        "layers": job.shape.num_layers,
        "length": job.length,
        "objective": job.objective,
        "world": dist.get_world_size(),
        "num_ranks": job.num_ranks,
        "step_ms": round(step_ms, 3),
        "all_steps_ms": [round(x, 3) for x in steps],
        "tokens_per_s": round(job.data * job.length / step_ms * 1e3, 1),
        "needed_tflop": round(work / 1e12, 3),
        "useful_tflops_per_gpu": round(tflops, 2),
        "mfu": round(tflops / peak_tflops, 4),
        "peak_gib": round(max(m.peak_bytes for m in everyone) / 2**30, 3),
        "static_gib": round(max(m.static_bytes for m in everyone) / 2**30, 3),
        "losses": last.losses,
        "grad_norms": measured.grad_norms,
        "target_share": measured.target_share,
        "ranks": [[rows[rank] for rows in profiles] for rank in range(len(everyone))],
        "slowest": [slowest(rows) for rows in profiles],
    }


def line(row: dict[str, Any]) -> str:
    """Returns a row of `summary` (and its speedup) as a line of a table."""
    if "failed" in row:
        return f"{row['case']:24} {row['length']:>8} failed: {row['failed']}"
    split = row["ranks"][0][0] if row["ranks"][0] else {}
    parts = {**split.get("computing_ms", {}), "idle": split.get("idle_ms", 0.0)}
    parts |= {f"exposed {k}": v for k, v in split.get("exposed_ms", {}).items()}
    rows = [rank[0] for rank in row["ranks"]] if split else []
    exposed = f"{shares(rows)}; {lost(rows)}" if rows else "not profiled"
    faster = row.get("speedup", float("nan"))
    return (f"{row['case']:24} {row['length']:>8} {row['step_ms']:>10.1f} ms {faster:>6.3f}x "
            f"{row['tokens_per_s']:>9.0f} tok/s {row['useful_tflops_per_gpu']:>7.1f} TF/s "
            f"{100 * row['mfu']:>5.1f} % {row['peak_gib']:>7.2f} GiB  loss {row['losses'][0]:.6f} "
            f"norm {row['grad_norms'][0]:.6f}  "
            + ", ".join(f"{k} {v:.0f}" for k, v in parts.items()) + f"; {exposed}")  # fmt: skip
