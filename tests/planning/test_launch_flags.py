"""Flags of planned runs parse with Megatron's parser, pass every refusal, and say the plan."""

import shlex

import pytest

from megatron_bp.layout.model_shape import AttentionShape, ExpertsShape, LayerKind, ModelShape
from megatron_bp.layout.run_shape import BatchShape, Policy, Recompute, Run, Topology
from megatron_bp.mcore.arguments import config_from_args
from megatron_bp.mcore.refusals import refuse
from megatron_bp.planning.cluster import Cluster
from megatron_bp.planning.hardware import H200
from megatron_bp.planning.launch_flags import launch_flags, unlaunchable
from megatron_bp.planning.report import flags_text
from megatron_bp.planning.search import search
from megatron_bp.planning.shapes import MODELS, model_named
from megatron_bp.planning.workload import OBJECTIVES, Workload
from tests.mcore.parsing import parser

CLUSTER = Cluster(H200)
USERS = ["--mask-token-id", "100", "--tokenizer-type", "NullTokenizer", "--mock-data"]
MOE = ModelShape(
    "moe",
    2048,
    151936,
    ((LayerKind(AttentionShape(32, 4, 128, qk_norm=True), 1024, ExpertsShape(16, 8, 768)), 24),),
)


def accepted(flags: list[str], world: int) -> dict[str, object]:
    """The parsed arguments, after every refusal has passed them."""
    args = parser().parse_args([*flags, *USERS])
    args.world_size = world
    refuse(args, config_from_args(args))
    return vars(args)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("name", ["nemotron-3b", "nemotron-14b"])
def test_the_best_of_a_search_is_accepted(name: str, objective: str) -> None:
    workload = Workload(model_named(name), objective, 65536, 32, 16, 4, CLUSTER)
    for candidate in search(workload, num_best=3).best:
        args = accepted(launch_flags(candidate.run, objective, CLUSTER), 16)
        assert args["num_layers"] == workload.model.num_layers
        assert args["bdlm_objective"] == objective


@pytest.mark.parametrize(
    "topology",
    [
        Topology(tensor=2, context=4, shards=4, data=2),
        Topology(context=8, shards=2, data=2),
        Topology(context=8, shards=1, data=2),
        Topology(context=8, shards=8, data=2, block_owned=False),
        Topology(tensor=2, pipeline=2, virtual=3, context=4, shards=4, data=1),
        Topology(tensor=8, data=2),
    ],
)
@pytest.mark.parametrize("recompute", Recompute)
def test_every_mode_and_policy_is_accepted(topology: Topology, recompute: Recompute) -> None:
    policy = Policy(recompute, keep_gathered=False, grad_wire_bytes=2, main_grad_bytes=2)
    model = ModelShape("m", 2048, 131072, ((MODELS["nemotron-3b"].layers[0][0], 24),))
    run = Run(model, BatchShape(65536, 32, global_batch=4), topology, policy)
    args = accepted(launch_flags(run, "standard", CLUSTER), 16)
    assert args["tensor_model_parallel_size"] == topology.tensor
    assert args["context_parallel_size"] == topology.shards
    owned = topology.context if topology.block_owned else 1
    assert args["block_parallel_size"] == owned
    assert args["bp_grad_wire_dtype"] == "model"
    assert args["grad_reduce_in_bf16"]
    full = recompute in (Recompute.FULL, Recompute.FULL_KEEP_ATTENTION)
    assert (args["recompute_granularity"] == "full") == full
    if recompute is Recompute.FULL_KEEP_ATTENTION:
        assert args["bp_recompute_attention"] == "keep"
    if recompute is not Recompute.FULL:
        assert args["bp_clean_kv"] == "regather"


def test_experts_have_their_flags() -> None:
    run = Run(
        MOE,
        BatchShape(65536, 32, global_batch=4),
        Topology(context=8, shards=8, expert=8, data=2),
        Policy(Recompute.SELECTIVE),
    )
    args = accepted(launch_flags(run, "standard", CLUSTER), 16)
    assert (args["num_experts"], args["moe_router_topk"]) == (16, 8)
    assert args["expert_model_parallel_size"] == 8
    assert args["recompute_modules"] == ["moe"]
    assert args["qk_layernorm"]


def test_a_slow_network_asks_for_gathers_by_node() -> None:
    from dataclasses import replace

    slow = replace(H200.network_link, points=((1.0, 1.0),))
    cluster = Cluster(replace(H200, network_link=slow))
    run = Run(
        model_named("nemotron-3b"),
        BatchShape(65536, 32),
        Topology(context=16, shards=16),
        Policy(),
    )
    args = accepted(launch_flags(run, "standard", cluster), 16)
    assert args["bp_hierarchical_gather"] == 8
    assert "--bp-hierarchical-gather" not in launch_flags(run, "standard", CLUSTER)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("qwen3.5-27b", "delta-rule layers have no block-diffusion form here yet"),
        ("diffusiongemma-26b-a4b", "K = V projections are not in Megatron-Core"),
        ("dflash2-qwen3.8", "drafters are not trained by this package yet"),
    ],
)
def test_models_that_megatron_cannot_build_get_no_flags(name: str, reason: str) -> None:
    model = model_named(name)
    assert any(reason in text for text in unlaunchable(model))
    run = Run(model, BatchShape(65536, 256), Topology(), Policy())
    with pytest.raises(ValueError, match=reason):
        launch_flags(run, "standard", CLUSTER)
    workload = Workload(model, "standard", 65536, 256, 8, 8, CLUSTER)
    found = search(workload, num_best=1)
    assert flags_text(found.best[0], workload).startswith("no flags: ")


def test_flags_are_one_line_to_paste() -> None:
    workload = Workload(model_named("nemotron-3b"), "standard", 65536, 32, 8, 8, CLUSTER)
    text = flags_text(search(workload, num_best=1).best[0], workload)
    assert "\n" not in text
    accepted(shlex.split(text), 8)
