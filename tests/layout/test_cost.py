"""Predicted bytes equal the method's published traffic, and predicted pairs its mask."""

import numpy as np
import pytest

from megatron_bp.layout.cost import (
    LayerShape,
    Traffic,
    imbalance,
    layer_traffic,
    mean_step_bytes,
    owned_imbalance,
    pairs,
)
from megatron_bp.layout.owners import Ownership
from megatron_bp.layout.plan import PlanRequest, make_plan
from megatron_bp.layout.visibility import CleanRule

GIB = 2**30
L, P = 262144, 8


def context(**values: object) -> PlanRequest:
    """A 256K sample shared by eight ranks."""
    return PlanRequest(length=L, num_ranks=P, num_clean_shards=P, **values)


@pytest.mark.parametrize(("baseline", "gib"), [(False, 105.00), (True, 210.00)])
def test_nemotron_14b_at_256k_moves_what_the_paper_measured(baseline: bool, gib: float) -> None:
    """40 layers, bf16, forward + recompute + backward; the baseline also moves corrupted keys."""
    shape = LayerShape(num_kv_heads=8, head_size=128)
    request = context(block_size=32, gather_corrupted=baseline)
    assert mean_step_bytes(request, shape, num_layers=40) / GIB == gib


def test_diffusion_gemma_at_256k_moves_what_the_paper_measured() -> None:
    """25 sliding and 5 full layers; its encoder and decoder are two runs of the same traffic."""
    sliding = mean_step_bytes(context(block_size=256, window=1024), LayerShape(8, 256), 25)
    full = mean_step_bytes(context(block_size=256), LayerShape(2, 512), 5)
    rows = (1024 - 1) * (2 * P - 2) / P
    assert 2 * sliding == 25 * 6 * rows * 8192
    assert round(2 * sliding / GIB, 3) == 2.049
    assert 2 * full / GIB == 26.25
    assert round(2 * (sliding + full) / GIB, 2) == 28.30


@pytest.mark.parametrize("num_ranks", [2, 4, 5])
@pytest.mark.parametrize("baseline", [False, True])
def test_dense_traffic_follows_the_closed_form(num_ranks: int, baseline: bool) -> None:
    """2 * micro-batch * L * (P - 1) / P * heads * size * bytes a pass, per stream that travels."""
    length, views = 2 * num_ranks * 24, 2
    request = PlanRequest(
        length=length,
        block_size=4,
        num_ranks=num_ranks,
        num_clean_shards=num_ranks,
        num_views=views,
        gather_corrupted=baseline,
    )
    shape = LayerShape(3, 5, micro_batch=2, bytes_per_element=2, grad_bytes_per_element=4)
    streams = 1 + views if baseline else 1
    elements = streams * 2 * 2 * length * (num_ranks - 1) // num_ranks * 3 * 5
    for rank in range(num_ranks):
        traffic = layer_traffic(make_plan(request, rank), shape)
        assert traffic == Traffic(gather_bytes=2 * elements, reduce_bytes=4 * elements)


def test_gathers_and_reductions_add_up_to_a_step() -> None:
    traffic = Traffic(gather_bytes=10, reduce_bytes=3)
    assert traffic.step_bytes(num_gathers=1) == 13
    assert traffic.step_bytes(num_gathers=2) == 23


def test_replicated_clean_rows_cost_no_traffic() -> None:
    request = PlanRequest(length=64, block_size=4, num_ranks=4)
    assert mean_step_bytes(request, LayerShape(8, 128), 10) == 0


def test_a_hybrid_moves_as_much_as_its_clean_shards_do() -> None:
    shape = LayerShape(8, 128)
    hybrid = PlanRequest(length=64, block_size=4, num_ranks=4, num_clean_shards=2)
    plain = PlanRequest(length=64, block_size=4, num_ranks=2, num_clean_shards=2)
    assert mean_step_bytes(hybrid, shape, 3) == mean_step_bytes(plain, shape, 3) > 0


def test_windowed_backward_returns_the_rows_that_the_forward_received() -> None:
    request = PlanRequest(
        length=48,
        block_size=4,
        num_ranks=3,
        num_clean_shards=3,
        window=9,
        ownership=Ownership.CONTIGUOUS,
    )
    shape = LayerShape(1, 1, bytes_per_element=1, grad_bytes_per_element=2)
    plans = [make_plan(request, rank) for rank in range(3)]
    forward = [layer_traffic(plan, shape).gather_bytes for plan in plans]
    backward = [layer_traffic(plan, shape).reduce_bytes for plan in plans]
    assert forward == [16, 16, 0]  # the first rank has no history, the last no successor
    assert backward == [0, 32, 32]  # twice 8 rows of K and V, in two bytes


def test_the_windowed_exchange_is_cheaper_than_the_dense_one() -> None:
    dense = context(block_size=256, window=1024, windowed_exchange=False)
    windowed = context(block_size=256, window=1024)
    shape = LayerShape(8, 256)
    assert mean_step_bytes(windowed, shape, 1) < 0.01 * mean_step_bytes(dense, shape, 1)


def test_the_honest_baseline_windows_clean_rows_and_moves_every_corrupted_row() -> None:
    shape = LayerShape(8, 256)
    gathered = context(block_size=256, gather_corrupted=True, window=1024, windowed_exchange=False)
    honest = context(block_size=256, gather_corrupted=True, window=1024)
    windowed = context(block_size=256, window=1024)
    whole, own = mean_step_bytes(gathered, shape, 1), mean_step_bytes(windowed, shape, 1)
    assert mean_step_bytes(honest, shape, 1) == whole / 2 + own


@pytest.mark.parametrize(("length", "block"), [(64, 4), (48, 1), (96, 8)])
@pytest.mark.parametrize("views", [1, 2])
def test_pairs_follow_the_closed_forms(length: int, block: int, views: int) -> None:
    """Corrupted: B^2 (N(N-1)/2 + N); clean: L(L+1)/2 by token, B^2 N(N+1)/2 by block."""
    num_blocks = length // block
    corrupted = views * block**2 * num_blocks * (num_blocks + 1) // 2
    clean = {
        CleanRule.TOKEN_CAUSAL: length * (length + 1) // 2,
        CleanRule.BLOCK_CAUSAL: block**2 * num_blocks * (num_blocks + 1) // 2,
    }
    for rule in CleanRule:
        for num_ranks in (1, 2, 4):
            request = PlanRequest(
                length=length,
                block_size=block,
                num_ranks=num_ranks,
                num_clean_shards=num_ranks,
                num_views=views,
                clean_rule=rule,
            )
            assert sum(pairs(request)) == corrupted + clean[rule]


def test_imbalance_is_the_busiest_rank_over_the_mean() -> None:
    request = PlanRequest(
        length=64, block_size=4, num_ranks=4, num_clean_shards=4, ownership=Ownership.CONTIGUOUS
    )
    of_rank = pairs(request)
    assert imbalance(request) == max(of_rank) / np.mean(of_rank)
    assert of_rank == sorted(of_rank)


@pytest.mark.parametrize("documents", [(), ((0, 9), (9, 47), (47, 52), (52, 64))])
@pytest.mark.parametrize(("num_ranks", "shards"), [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize("views", [1, 2])
def test_ownership_alone_tells_the_imbalance(
    documents: tuple[tuple[int, int], ...], num_ranks: int, shards: int, views: int
) -> None:
    request = PlanRequest(64, 4, num_ranks, shards, views, documents=documents)
    wanted = imbalance(request)
    for rank in range(num_ranks):
        assert owned_imbalance(make_plan(request, rank)) == pytest.approx(wanted, rel=1e-12)
