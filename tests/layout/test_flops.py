"""Operations follow closed forms, add up over ranks, and grow by what is run again."""

from dataclasses import replace

import pytest

from megatron_bp.layout.flops import (
    delta_flops,
    executed_flops,
    head_flops,
    layer_flops,
    model_flops,
    needed_flops,
    recomputed_flops,
)
from megatron_bp.layout.model_shape import (
    AttentionShape,
    DeltaNetShape,
    ExpertsShape,
    LayerKind,
    ModelShape,
    dense_model,
)
from megatron_bp.layout.run_shape import BatchShape, Policy, Recompute, Run, Topology

L, B, E, N, M, H, F, V = 256, 8, 32, 4, 2, 16, 48, 64
MODEL = dense_model("tiny", 3, E, F, AttentionShape(N, M, H), V)
KIND = MODEL.layers[0][0]
WEIGHTS = E * (N + 2 * M) * H + N * H * E + 3 * E * F
PAIRS = L * (L + 1) // 2 + B * B * (L // B) * (L // B + 1) // 2
KEEP_ALL = Policy(prune_last_layer=False)
ONE = Topology()


def run(topology: Topology = ONE, policy: Policy = KEEP_ALL, views: int = 1) -> Run:
    return Run(MODEL, BatchShape(L, B, num_views=views), topology, policy)


def test_a_dense_layer_is_two_operations_a_weight_and_row_and_four_a_pair() -> None:
    flops = layer_flops(run(), KIND)
    assert flops.linear == 2 * 2 * L * WEIGHTS
    assert flops.attention == 4 * PAIRS * N * H
    assert (flops.experts, flops.delta, flops.head) == (0, 0, 0)


@pytest.mark.parametrize(("context", "shards"), [(4, 4), (4, 2), (4, 1)])
def test_ranks_share_the_work_but_replicated_clean_rows(context: int, shards: int) -> None:
    one, mine = layer_flops(run(), KIND), layer_flops(run(Topology(1, context, shards)), KIND)
    clean_rows, clean_pairs = L // shards, L * (L + 1) // 2 // shards
    assert mine.linear == 2 * (clean_rows + L // context) * WEIGHTS
    corrupted = (PAIRS - L * (L + 1) // 2) // context
    assert mine.attention == pytest.approx(4 * (clean_pairs + corrupted) * N * H, rel=0.02)
    if shards == context:
        assert mine.linear * context == one.linear


def test_tensor_ranks_share_everything() -> None:
    one, two = layer_flops(run(), KIND), layer_flops(run(Topology(tensor=2)), KIND)
    assert (two.linear, two.attention) == (one.linear // 2, one.attention // 2)


def test_a_pruned_layer_skips_clean_rows_after_their_keys() -> None:
    whole, pruned = layer_flops(run(), KIND), layer_flops(run(), KIND, pruned=True)
    after = N * H * E + 3 * E * F
    assert whole.linear - pruned.linear == 2 * L * after
    assert whole.attention - pruned.attention == 4 * (L * (L + 1) // 2) * N * H


def test_a_model_prunes_its_last_layer_alone() -> None:
    pruned, whole = model_flops(run(policy=Policy())), model_flops(run())
    saved = layer_flops(run(), KIND).linear - layer_flops(run(), KIND, pruned=True).linear
    assert whole.linear - pruned.linear == saved
    assert whole.linear == 3 * layer_flops(run(), KIND).linear


def test_logits_are_counted_for_targets_only() -> None:
    assert head_flops(run()) == 2 * (L // 2) * E * V
    learns = replace(run(), batch=BatchShape(L, B, learns_clean=True))
    assert head_flops(learns) == 2 * (L // 2 + L) * E * V


def test_two_views_share_the_clean_rows() -> None:
    one, two = layer_flops(run(), KIND), layer_flops(run(views=2), KIND)
    assert two.linear * 2 == one.linear * 3


def test_executed_is_needed_plus_the_scores_again_plus_recomputation() -> None:
    flops = model_flops(run())
    plain = 3 * (flops.linear + flops.head) + round(3.5 * flops.attention)
    assert executed_flops(run()) == plain
    assert needed_flops(run()) == 3 * flops.total
    for kept, more in (
        (Recompute.NONE, 0),
        (Recompute.SELECTIVE, 3 * 2 * 2 * L * 3 * E * F),
        (Recompute.FULL_KEEP_ATTENTION, flops.linear),
        (Recompute.FULL, flops.linear + flops.attention),
    ):
        again = run(policy=replace(KEEP_ALL, recompute=kept))
        assert recomputed_flops(again) == more
        assert executed_flops(again) == plain + more


def test_needed_does_not_depend_on_the_layout() -> None:
    spread = run(Topology(tensor=2, context=4, shards=1), Policy())
    assert needed_flops(spread) == needed_flops(run(policy=Policy()))


def test_experts_count_routed_rows() -> None:
    experts = LayerKind(AttentionShape(N, M, H), 0, ExpertsShape(8, 2, 24))
    model = ModelShape("moe", E, V, ((experts, 1),))
    moe = Run(model, BatchShape(L, B), Topology())
    flops = layer_flops(moe, experts)
    assert flops.experts == 2 * 2 * L * 2 * 3 * E * 24
    assert flops.linear == 2 * 2 * L * (WEIGHTS - 3 * E * F + E * 8)


def test_the_delta_rule_is_linear_in_rows() -> None:
    shape = DeltaNetShape(2, 4, 8, 16)
    assert delta_flops(shape, 10) == 10 * 4 * (6 * 8 * 16 + 3 * 64 * 24)
    kind = LayerKind(shape, F)
    model = ModelShape("delta", E, V, ((kind, 1),))
    flops = layer_flops(Run(model, BatchShape(L, B), Topology()), kind)
    assert flops.attention == 0
    assert flops.delta == delta_flops(shape, 2 * L)
