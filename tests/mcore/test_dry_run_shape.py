"""Megatron's arguments become the run that the cost model counts: layers, dtypes, degrees."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_bp.layout.model_shape import ExpertsShape
from megatron_bp.layout.run_shape import Mode, Recompute, Run
from megatron_bp.mcore.dry_run_shape import Cluster
from megatron_bp.planning.shapes import model_named
from tests.mcore.forks import Megatron
from tests.mcore.test_dry_run import BASE, FULL

NEMOTRON = (
    "--num-layers 40 --hidden-size 5120 --ffn-hidden-size 16384 --num-attention-heads 32 "
    "--untie-embeddings-and-output-weights"
)


def _run(given: str) -> tuple[tuple[Recompute, ...], Run, list[str]]:
    from megatron_bp.mcore.dry_run import validated
    from megatron_bp.mcore.dry_run_shape import approximations, run_of, wishes

    args, config, _ = validated(given.split(), Cluster(16, 8, 80.0, 6.0))
    found = wishes(args, config)
    return found, run_of(args, config, found[0]), approximations(args, config)


@pytest.fixture
def run_of(megatron: Megatron) -> Any:
    return lambda text="": megatron.call(_run, f"{BASE} {text}")


def test_the_model_is_the_one_of_the_flags(run_of: Any) -> None:
    model, want = run_of(NEMOTRON)[1].model, model_named("nemotron-14b")
    assert (model.layers, model.tied) == (want.layers, False)
    assert model.num_parameters == want.num_parameters
    assert run_of()[1].model.tied


def test_windows_experts_and_head_norms_are_counted_by_layer(run_of: Any) -> None:
    model = run_of("--window-size 1023,0 --window-attn-skip-freq 6 --qk-layernorm")[1].model
    windows = {kind.mixer.window: count for kind, count in model.layers}
    assert windows == {1024: 20, 0: 4}
    assert all(kind.mixer.qk_norm for kind, _ in model.layers)
    experts = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 1024"
    mixed = run_of(f"{experts} --moe-layer-freq 2")[1].model
    counts = {kind.experts: count for kind, count in mixed.layers}
    assert counts == {ExpertsShape(8, 2, 1024): 12, ExpertsShape(): 12}
    assert run_of(f"{experts} --expert-model-parallel-size 4")[1].topology.expert == 4


def test_dtypes_decide_the_bytes(run_of: Any) -> None:
    bf16 = run_of()[1].policy
    assert (bf16.element_bytes, bf16.main_grad_bytes, bf16.optimizer_bytes) == (2, 4, 12)
    assert bf16.grad_wire_bytes == 4
    assert run_of("--bp-grad-wire-dtype model")[1].policy.grad_wire_bytes == 2
    small = "--grad-reduce-in-bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16"
    policy = run_of(f"{small} --exp-avg-sq-dtype bf16")[1].policy
    assert (policy.main_grad_bytes, policy.optimizer_bytes) == (2, 8)


def test_what_is_computed_again_follows_the_flags(run_of: Any) -> None:
    keep, again = Recompute.FULL_KEEP_ATTENTION, Recompute.FULL
    assert run_of()[0] == (Recompute.NONE,)
    assert run_of(FULL)[0] == (keep, again)
    assert run_of(f"{FULL} --bp-recompute-attention keep")[0] == (keep,)
    assert run_of(f"{FULL} --bp-recompute-attention rerun")[0] == (again,)
    mlp = run_of("--recompute-granularity selective --recompute-modules mlp")[0]
    assert mlp == (Recompute.SELECTIVE,)
    assert run_of()[1].policy.keep_gathered
    assert not run_of(FULL)[1].policy.keep_gathered
    assert run_of(f"{FULL} --bp-clean-kv keep")[1].policy.keep_gathered


def test_degrees_and_objective_follow_the_flags(run_of: Any) -> None:
    hybrid = run_of("--context-parallel-size 2 --block-parallel-size 4")[1].topology
    assert (hybrid.mode, hybrid.context, hybrid.shards, hybrid.data) == (Mode.HYBRID, 4, 2, 4)
    assert run_of("--context-parallel-size 4")[1].topology.mode is Mode.CP
    assert run_of("--block-parallel-size 4")[1].topology.mode is Mode.BP
    two = run_of("--bdlm-objective fast_dllm_v2")[1].batch
    assert (two.num_views, two.learns_clean) == (2, False)
    assert run_of("--bdlm-objective nemotron_labs")[1].batch.learns_clean


def test_what_is_simplified_is_said(run_of: Any) -> None:
    assert run_of(FULL)[2] == []
    block = FULL.replace("uniform", "block").replace("-layers 1", "-layers 4")
    assert "counted as uniform" in run_of(block)[2][0]
