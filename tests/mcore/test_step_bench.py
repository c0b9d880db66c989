"""The step benchmark trains the same job in every case, and says what it measured."""

import gc
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_bp.layout.run_shape import Mode as RunMode
from megatron_bp.layout.run_shape import Recompute
from megatron_bp.mcore.step_bench import drop_graphs, line
from megatron_bp.mcore.step_cases import MODES, RECIPES, SHAPES, Case, Job, cases_at, cut
from megatron_bp.planning.shapes import MODELS

TOOL = Path(__file__).parents[2] / "tools/bench_step.py"
CASES = ["cp-plain/recompute-all", "csbp/ours", "bp/no-recompute", "contiguous/keep-keys"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the tool writes for two processes: case -> row."""
    path = tmp_path_factory.mktemp("bench") / "step.json"
    given = "--shape tiny --layers 2 --length 64 --block 8 --dtype fp32 --warmups 1 --repeats 1"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(TOOL), *given.split(), "--objective", "fast_dllm_v2", "--json", str(path)]
    command += ["--baseline", CASES[0], "--case", *CASES, "csbp/ours-separate@64", "bp/ours@32"]
    command += ["--", "--use-distributed-optimizer", "--overlap-grad-reduce"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(command, check=True, env=environment, timeout=240, capture_output=True)
    return {row["case"]: row for row in json.loads(path.read_text())["results"]}


@pytest.mark.parametrize("name", CASES[1:])
def test_every_case_trains_the_same_job(rows: dict, name: str) -> None:
    base, row = rows[CASES[0]], rows[name]
    assert row["losses"] == pytest.approx(base["losses"], rel=1e-6)
    assert row["grad_norms"] == pytest.approx(base["grad_norms"], rel=1e-5)
    assert row["needed_tflop"] == base["needed_tflop"]


def test_cases_run_at_the_lengths_they_name(rows: dict) -> None:
    assert set(rows) == {*CASES, "csbp/ours-separate"}


def test_separate_views_train_the_mean_of_two_halves(rows: dict) -> None:
    assert rows["csbp/ours-separate"]["losses"][0] == pytest.approx(
        rows["csbp/ours"]["losses"][0] / 2, rel=1e-6
    )


def test_a_row_says_what_a_reader_compares(rows: dict) -> None:
    row = rows["csbp/ours"]
    assert row["tokens_per_s"] == pytest.approx(64e3 / row["step_ms"], rel=1e-3)
    assert row["speedup"] == pytest.approx(
        row["tokens_per_s"] / rows[CASES[0]]["tokens_per_s"], rel=1e-3
    )
    assert row["predicted_ms"] > 0
    assert len(row["ranks"]) == 2
    for (profile,) in row["ranks"]:
        assert set(profile["waiting_ms"]) == set(profile["transfer_ms"]) == {"attention", "other"}
    (slowest,) = row["slowest"]
    assert len(slowest["busy_ms"]) == 2
    assert "slowest rank" in line(row)


def test_an_unknown_case_is_refused_with_the_names() -> None:
    with pytest.raises(ValueError, match=r"MODE/RECIPE with a mode of one, csbp.* csbp/ours"):
        Case.parse("csbp")


@pytest.mark.parametrize(("mode", "ranks"), [("one", 2), ("hybrid", 3)])
def test_a_mode_refuses_ranks_that_it_cannot_use(mode: str, ranks: int) -> None:
    with pytest.raises(ValueError, match=f"num_ranks={ranks}"):
        MODES[mode].flags(ranks)


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("csbp", RunMode.CSBP), ("bp", RunMode.BP), ("hybrid", RunMode.HYBRID), ("cp", RunMode.CP)],
)
def test_the_planner_sees_the_mode_that_runs(mode: str, kind: RunMode) -> None:
    job = Job(cut(MODELS["nemotron-3b"], 4), 4096, 32, "standard", num_ranks=4)
    assert job.run(Case(mode, "ours"), 0.5).topology.mode is kind


def test_the_planner_sees_what_is_kept() -> None:
    job = Job(SHAPES["tiny"], 4096, 32, "standard")
    policies = {name: job.run(Case("one", name), 0.5).policy for name in RECIPES}
    kept = {name: policy.recompute for name, policy in policies.items()}
    assert kept["ours"] is Recompute.FULL_KEEP_ATTENTION
    assert kept["recompute-all"] is kept["flex"] is Recompute.FULL
    assert kept["no-recompute"] is kept["regather"] is kept["flex-no-recompute"] is Recompute.NONE
    keys = {name for name, policy in policies.items() if policy.keep_gathered}
    assert keys == {"keep-keys", "no-recompute", "flex-no-recompute"}


def test_layers_of_several_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match="several kinds of layers"):
        cut(MODELS["qwen3.5-27b"], 4)


def hooked_router() -> torch.nn.Module:
    """A layer as Megatron leaves it after a step: its dispatcher keeps probabilities with their
    graph, and a hook on the gradient of its weight, like those of DDP, keeps the layer."""
    router = torch.nn.Linear(2, 2, bias=False)
    accumulate = router.weight.expand_as(router.weight).grad_fn.next_functions[0][0]
    accumulate.register_hook(lambda *_: router)
    router.token_dispatcher = SimpleNamespace(  # type: ignore[assignment]
        probs=router(torch.ones(1, 2)), counts=torch.ones(2), name="all to all"
    )
    router.held = accumulate  # type: ignore[assignment]
    return router


def test_a_model_with_experts_is_gone_before_the_next_case() -> None:
    kept, dropped = hooked_router(), hooked_router()
    assert drop_graphs(torch.nn.Sequential(dropped)) == 1
    assert dropped.token_dispatcher.name == "all to all"
    assert dropped.token_dispatcher.counts is not None
    seen = weakref.ref(kept), weakref.ref(dropped)
    del kept, dropped
    gc.collect()
    assert [ref() is None for ref in seen] == [False, True]
    drop_graphs(seen[0]())


def test_a_case_may_name_its_lengths() -> None:
    texts = ["csbp/ours", "cp/ours@64,128", "bp/ours@32"]
    found = {length: [case.name for case in cases_at(texts, length)] for length in (32, 64, 128)}
    assert found == {
        32: ["csbp/ours", "bp/ours"], 64: ["csbp/ours", "cp/ours"], 128: ["csbp/ours", "cp/ours"]
    }  # fmt: skip
