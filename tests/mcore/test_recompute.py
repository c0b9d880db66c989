"""Under full recompute attention can run and gather once a layer, and what that keeps is known."""

from __future__ import annotations

import argparse
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_bp.attention.keeping import Keeping
from megatron_bp.config import BlockParallelConfig
from megatron_bp.layout.plan import PlanRequest, make_plan
from megatron_bp.mcore import recompute
from tests.distributed import run_distributed
from tests.mcore.parsing import parsed

NUM_LAYERS, SLABS = 2, 2
CHOICES = ["rerun regather", "rerun keep", "keep keep", "keep regather"]


def _worker(rank: int, world_size: int) -> dict[str, dict[str, float]]:
    """For each choice, one training step of `exactness.check`: calls by name, and the error."""
    from megatron_bp.mcore import cpu

    cpu.enable_cpu()
    from dataclasses import replace

    import torch.distributed as dist
    from megatron.training.global_vars import _set_timers

    from megatron_bp.attention.native import NativeRun
    from megatron_bp.mcore.exactness import check
    from megatron_bp.mcore.exactness_problem import Layout, Problem, start_layout
    from megatron_bp.mcore.exactness_reference import compute_reference

    torch.set_default_dtype(torch.float64)
    _set_timers(argparse.Namespace(timing_log_level=0, timing_log_option="minmax"))
    start_layout(Layout(data=2))
    problem = Problem(num_samples=1)
    reference = compute_reference(problem)
    start_layout(Layout(context=2, block=2))
    calls: dict[str, float] = {}

    def counted(owner: Any, name: str) -> None:
        whole = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            return whole(*args, **kwargs)

        setattr(owner, name, call)

    counted(dist, "all_gather_into_tensor")
    counted(NativeRun, "forward")
    found = {}
    for choice in ("once keep", *CHOICES):
        calls.clear()
        attention, keys = choice.split()
        layout = replace(
            Layout(context=2, block=2),
            recompute="none" if attention == "once" else "full",
            recompute_attention="rerun" if attention == "once" else attention,
            clean_kv=keys,
        )
        error = check(problem, layout, reference).grad_error
        found[choice] = {**calls, "error": error}
    return found


@cache
def counts() -> dict[str, dict[str, float]]:
    return run_distributed(_worker, 2)[0]


@pytest.mark.parametrize(
    ("choice", "runs", "gathers"),
    [
        ("once keep", 1, 1),
        ("rerun regather", 2, 2),
        ("rerun keep", 2, 2),
        ("keep keep", 1, 1),
        ("keep regather", 1, 2),
    ],
)
def test_attention_runs_and_gathers_as_often_as_asked(choice: str, runs: int, gathers: int) -> None:
    found = counts()[choice]
    assert found["forward"] == runs * NUM_LAYERS * 3  # three phases a run
    assert found["all_gather_into_tensor"] == gathers * NUM_LAYERS * SLABS
    assert found["error"] <= 1e-10


FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def given(text: str = "") -> tuple[argparse.Namespace, BlockParallelConfig]:
    from megatron_bp.mcore.arguments import config_from_args

    args = parsed(text)
    args.params_dtype, args.kv_channels, args.padded_vocab_size = torch.bfloat16, 8, 128
    return args, config_from_args(args)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", Keeping(attention=False, clean_kv=True)),
        ("--bp-clean-kv regather", Keeping(attention=False, clean_kv=False)),
        (FULL, Keeping(attention=True, clean_kv=False)),
        (f"{FULL} --bp-clean-kv keep", Keeping(attention=True, clean_kv=True)),
        (f"{FULL} --bp-recompute-attention rerun", Keeping(attention=False, clean_kv=False)),
        ("--recompute-granularity selective", Keeping(attention=False, clean_kv=True)),
    ],
)
def test_flags_say_what_is_kept(text: str, wanted: Keeping) -> None:
    assert recompute.keeping_of(*given(text)) == wanted


@pytest.mark.parametrize(
    ("text", "chunks", "wanted"),
    [
        ("", None, 8),
        ("--pipeline-model-parallel-size 4", None, 8),  # 4 micro-batches of 2 layers
        ("--pipeline-model-parallel-size 4", 2, 11),  # 8 * (1 + 3/8)
    ],
)
def test_layers_in_flight_are_those_of_the_first_stage(
    text: str, chunks: int | None, wanted: int
) -> None:
    args, _ = given(f"--num-layers 8 {text}")
    args.virtual_pipeline_model_parallel_size = chunks
    assert recompute.layers_in_flight(args) == wanted


def test_costs_are_the_rows_heads_and_bytes_of_all_layers() -> None:
    args, _ = given(f"{FULL} --num-layers 3 --micro-batch-size 2")
    plan = make_plan(PlanRequest(48, 8), 0)
    cost = recompute.costs(args, plan, prune=True)
    width = 4 * (8 * 2 + 4)  # heads * (head size in bf16 + fp32 LSE)
    assert cost.attention == (96 + 96 + 48) * 2 * width
    assert cost.clean_kv == 3 * 48 * 2 * (2 * 2 * 8 * 2)  # K and V of 2 heads of 8, bf16
    assert cost.gather == 0


def test_only_layers_that_run_twice_keep_attention() -> None:
    plan = make_plan(PlanRequest(48, 8), 0)
    block = "--recompute-granularity full --recompute-method block --recompute-num-layers 1"
    args, _ = given(f"{block} --num-layers 4")
    whole, _ = given(f"{FULL} --num-layers 4")
    assert 4 * recompute.costs(args, plan, False).attention == (
        recompute.costs(whole, plan, False).attention
    )
    none, _ = given("--num-layers 4")
    assert recompute.costs(none, plan, False).attention == 0


def test_the_bytes_of_each_choice_are_printed() -> None:
    args, _ = given(FULL)
    cost = recompute.Costs(2, 2, attention=3 << 30, clean_kv=1 << 30, gather=1 << 29)
    text = recompute.describe(args, Keeping(True, False), cost)
    assert "attention under recompute: kept by 2 layers in flight: +3.00 GiB a rank" in text
    assert "gathered again for backward (1.00 GiB a rank would keep them)" in text
    assert "2 gather(s) a layer, 1.00 GiB sent by a rank" in text
    text = recompute.describe(args, Keeping(True, True), cost)
    assert "kept for backward: +1.00 GiB a rank" in text
    assert "1 gather(s) a layer, 512.00 MiB sent" in text
    text = recompute.describe(args, Keeping(False, True), cost)
    assert "runs twice (keeping it would take 3.00 GiB a rank)" in text
    assert "whatever --bp-clean-kv says; 2 gather(s)" in text


def decided(
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    capacity: int,
    others_agree: bool = True,
    iteration: int = 0,
) -> tuple[Keeping, str]:
    """What `auto` chooses on a GPU with so many bytes."""
    args, config = given(f"{FULL} {text}")
    args.data_parallel_size = args.bp_clean_shards = 1
    args.virtual_pipeline_model_parallel_size, args.iteration = None, iteration
    args.main_params_dtype = args.exp_avg_dtype = args.exp_avg_sq_dtype = torch.float32
    layout = SimpleNamespace(
        plan=make_plan(PlanRequest(48, 8), 0), prune=True, position=torch.zeros(1)
    )
    memory = SimpleNamespace(total_memory=capacity)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: memory)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 0)
    monkeypatch.setattr(recompute, "get_block_parallel_group", lambda: "group")

    def all_reduce(fits: torch.Tensor, op: Any, group: Any) -> None:
        assert group == "group"
        fits *= others_agree

    monkeypatch.setattr(recompute.dist, "all_reduce", all_reduce)
    model = torch.nn.Linear(1 << 14, 1 << 14, bias=False, device="meta")
    return recompute.decide(args, config, layout, model)  # type: ignore[arg-type]


@pytest.mark.parametrize("others_agree", [True, False])
@pytest.mark.parametrize(("capacity", "fits"), [(80 << 30, True), (1 << 20, False)])
def test_auto_keeps_if_every_rank_of_the_context_group_has_the_memory(
    monkeypatch: pytest.MonkeyPatch, capacity: int, fits: bool, others_agree: bool
) -> None:
    keeping, text = decided(monkeypatch, "", capacity, others_agree)
    assert keeping.attention == (fits and others_agree)
    assert "needed to keep" in text


def test_a_resumed_run_has_adams_moments_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would keep less than the run that it continues."""

    def left(text: str, iteration: int) -> float:
        _, line = decided(monkeypatch, text, 80 << 30, iteration=iteration)
        return float(line.split(" needed to keep, ")[1].split(" GiB")[0])

    moments = 8 * 2**28 / 2**30  # GiB
    assert left("", 3) - left("", 0) == pytest.approx(moments, abs=0.02)  # printed with two digits
    assert left("--no-load-optim", 3) == left("", 0)


def test_auto_keeps_nothing_where_memory_cannot_be_estimated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uneven = "--num-layers 3 --pipeline-model-parallel-size 2"
    keeping, text = decided(monkeypatch, uneven, 80 << 30)
    assert not keeping.attention
    assert "nothing is kept without being asked for" in text
    assert "pipeline * virtual = 2 must divide the 3 layers" in text
