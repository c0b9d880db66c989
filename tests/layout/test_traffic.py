"""Bytes of each collective equal the plans' own and the published totals."""

from dataclasses import replace

import pytest

from megatron_bp.layout.cost import LayerShape, mean_step_bytes
from megatron_bp.layout.model_shape import (
    AttentionShape,
    DeltaNetShape,
    ExpertsShape,
    LayerKind,
    ModelShape,
    dense_model,
)
from megatron_bp.layout.run_shape import BatchShape, Policy, Recompute, Run, Topology
from megatron_bp.layout.traffic import (
    attention_gib,
    context_collectives,
    data_collectives,
    delta_by_heads_bytes,
    delta_by_scan_bytes,
    delta_collectives,
    expert_collectives,
    gather_count,
    pipeline_collectives,
    step_traffic,
    tensor_collectives,
)

GIB = 2**30
MODEL = dense_model("tiny", 4, 32, 48, AttentionShape(4, 2, 16), 64)
BATCH = BatchShape(length=96, block_size=4, num_views=2, global_batch=2)


@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("windowed", [True, False])
@pytest.mark.parametrize(
    ("context", "shards", "owned"), [(4, 4, True), (4, 2, True), (3, 3, False), (4, 1, True)]
)
@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.FULL])
def test_keys_travel_as_the_plans_say(
    window: int, windowed: bool, context: int, shards: int, owned: bool, recompute: Recompute
) -> None:
    model = dense_model("tiny", 4, 32, 48, AttentionShape(4, 2, 16, window=window), 64)
    topology = Topology(
        context=context, shards=shards, block_owned=owned, windowed_exchange=windowed
    )
    run = Run(model, BATCH, topology, Policy(recompute=recompute, grad_wire_bytes=4))
    shape = LayerShape(2, 16, grad_bytes_per_element=4)
    gathers = gather_count(run)
    planned = mean_step_bytes(run.request(window), shape, 4, gathers) * run.num_micro_batches
    counted = sum(c.step_bytes for c in context_collectives(run))
    assert counted == pytest.approx(planned, rel=1e-12)


def test_keys_are_gathered_again_only_if_they_did_not_wait() -> None:
    run = Run(MODEL, BATCH, Topology())
    assert gather_count(run) == 1
    assert gather_count(replace(run, policy=Policy(keep_gathered=False))) == 2
    assert gather_count(replace(run, policy=Policy(recompute=Recompute.FULL))) == 2
    kept = Policy(recompute=Recompute.FULL_KEEP_ATTENTION)
    assert gather_count(replace(run, policy=kept)) == 1


def test_k_and_v_that_are_one_tensor_may_travel_once() -> None:
    kind = LayerKind(AttentionShape(4, 2, 16, shared_kv=True), 48)
    run = Run(ModelShape("shared", 32, 64, ((kind, 2),)), BATCH, Topology(context=4, shards=4))
    once = replace(run, policy=Policy(shared_kv_wire=True))
    assert attention_gib(run) == 2 * attention_gib(once) > 0


def test_rows_between_tensor_ranks_follow_sequence_parallelism() -> None:
    run = Run(MODEL, BATCH, Topology(tensor=2, context=4, shards=4))
    rows = (96 // 4) + 2 * (96 // 4)
    (rows_of_layers,) = tensor_collectives(run)
    assert rows_of_layers.sent_bytes == rows * 32 * 2 / 2
    assert rows_of_layers.calls == 4 * 2 * 10  # layers, micro-batches, 4 forward and 6 backward
    full = replace(run, policy=Policy(recompute=Recompute.FULL))
    assert tensor_collectives(full)[0].calls == 4 * 2 * 14
    assert tensor_collectives(replace(run, topology=Topology())) == []


def test_stages_pass_on_their_rows_both_ways() -> None:
    run = Run(MODEL, BATCH, Topology(pipeline=2, virtual=2))
    (passed,) = pipeline_collectives(run)
    assert passed.sent_bytes == 3 * 96 * 32 * 2
    assert passed.calls == 2 * 2 * 2


def test_experts_receive_routed_rows_twice_each_way() -> None:
    kind = LayerKind(AttentionShape(4, 2, 16), 0, ExpertsShape(8, 2, 24))
    model = ModelShape("moe", 32, 64, ((kind, 3),))
    run = Run(model, BATCH, Topology(context=4, shards=4, expert=4))
    (routed,) = expert_collectives(run)
    assert routed.sent_bytes == (24 + 48) * 2 * 32 * 2 * 3 / 4
    assert routed.calls == 3 * 2 * 4


def test_data_ranks_reduce_gradients_and_gather_weights() -> None:
    run = Run(MODEL, BATCH, Topology(data=2))
    gradients, values = data_collectives(run)
    assert gradients.sent_bytes == MODEL.num_parameters * 4 / 2
    assert values.sent_bytes == MODEL.num_parameters * 2 / 2
    assert data_collectives(replace(run, topology=Topology())) == []


def test_a_scan_over_chunks_is_cheaper_than_dealing_heads() -> None:
    """Facts, section 4: 221 GiB a step by heads (Qwen3.5-27B, TP 2, P 8, two views, 256K)."""
    shape = DeltaNetShape(16, 48, 128, 128)
    kind = LayerKind(shape, 17408)
    model = ModelShape("qwen-delta", 5120, 248320, ((kind, 48),))
    batch = BatchShape(2**18, 256, num_views=2)
    run = Run(model, batch, Topology(tensor=2, context=8, shards=8))
    assert round(48 * 3 * delta_by_heads_bytes(run, shape) / GIB) == 221
    assert delta_by_scan_bytes(run, shape) == 2 * 48 * 128 * 256 * 4 * 7 / 2
    (maps,) = delta_collectives(run)
    assert maps.step_bytes / GIB < 6


def test_a_step_lists_every_kind_once() -> None:
    run = Run(MODEL, BATCH, Topology(tensor=2, context=2, shards=2, pipeline=2, data=2))
    names = [collective.name for collective in step_traffic(run)]
    assert names == [
        "clean K/V gather (full)",
        "clean K/V reduce (full)",
        "rows of layers",
        "rows between stages",
        "gradients of weights",
        "values of weights",
    ]
