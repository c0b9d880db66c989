"""Throughput counts what the objective needs: equal to hand-made sums and to the cost model's."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch

from megatron_bp.attention.block_parallel import AttentionOptions
from megatron_bp.comm.groups import BlockGroups
from megatron_bp.config import BlockParallelConfig
from megatron_bp.layout.blocks import Spans
from megatron_bp.layout.model_shape import AttentionShape, LayerKind, dense_model
from megatron_bp.layout.plan import PlanRequest, make_plan
from megatron_bp.layout.visibility import CleanRule
from megatron_bp.mcore import throughput
from megatron_bp.mcore.arguments import config_from_args
from megatron_bp.mcore.carrier import Layout, make_layout
from tests.mcore.parsing import parsed

# 2 layers, hidden 32, 4 query and 2 key heads of 8, feed-forward 48 (gated), 128 padded ids.
QKV, PROJECTION, FEED_FORWARD, HEAD = 32 * 64, 32 * 32, 3 * 32 * 48, 32 * 128
LENGTH, BLOCK = 48, 8


def given(text: str = "") -> tuple[argparse.Namespace, BlockParallelConfig]:
    """Arguments as they are after validation, as far as the count reads them."""
    args = parsed(text)
    args.params_dtype, args.kv_channels, args.padded_vocab_size = torch.bfloat16, 8, 128
    args.data_parallel_size = 2
    return args, config_from_args(args)


def layout_of(request: PlanRequest) -> Layout:
    options = AttentionOptions(softmax_scale=1.0)
    return make_layout(request, BlockGroups.single(), options, True, torch.device("cpu"))


def pairs_by_hand(documents: Spans = ((0, LENGTH),), window: int = 0) -> tuple[int, int]:
    """Pairs of clean (token-causal) and corrupted rows, row by row."""
    clean = corrupted = 0
    for lo, hi in documents:
        for row in range(lo, hi):
            first_of_block = lo + (row - lo) // BLOCK * BLOCK
            before = row + 1 - lo
            prefix = first_of_block - lo
            clean += min(before, window) if window else before
            corrupted += min(prefix, window - 1) if window else prefix
            corrupted += min(hi, first_of_block + BLOCK) - first_of_block
    return clean, corrupted


def test_useful_work_is_the_sum_by_hand() -> None:
    args, config = given()
    targets = torch.zeros(LENGTH, 3, dtype=torch.bool)
    targets[:5] = True
    clean, corrupted = pairs_by_hand()
    layer = 2 * 2 * LENGTH * (QKV + PROJECTION + FEED_FORWARD) + 4 * 32 * (clean + corrupted)
    # Nothing reads what the last layer makes of clean rows: they give keys and values only.
    last = layer - 2 * LENGTH * (PROJECTION + FEED_FORWARD) - 4 * 32 * clean
    found = throughput.Meter(args, config).useful_flops(
        layout_of(PlanRequest(LENGTH, BLOCK)), targets
    )
    assert float(found) == 3 * (3 * (layer + last) + 2 * HEAD * 15)


def test_packed_documents_and_windows_count_their_own_pairs() -> None:
    documents = ((0, 10), (10, 29), (29, 48))
    args, config = given("--window-size 10,0 --window-attn-skip-freq 2")
    request = PlanRequest(LENGTH, BLOCK, documents=documents)
    found = throughput.Meter(args, config).useful_flops(
        layout_of(request), torch.zeros(LENGTH, 1, dtype=torch.bool)
    )
    rows = 2 * LENGTH * (QKV + PROJECTION + FEED_FORWARD)
    last_rows = rows - LENGTH * (PROJECTION + FEED_FORWARD)
    pairs = sum(pairs_by_hand(documents, window=11)) + pairs_by_hand(documents)[1]
    assert float(found) == 3 * (2 * (rows + last_rows) + 4 * 32 * pairs)


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("views", [1, 2])
def test_shares_of_all_ranks_add_up_to_the_sample(shards: int, views: int) -> None:
    """Replicated clean rows count once; padding rows do not count."""
    model = dense_model("tiny", 3, 32, 48, AttentionShape(4, 2, 8), 128)
    alone = PlanRequest(61, BLOCK, num_views=views, clean_rule=CleanRule.BLOCK_CAUSAL)
    shared = PlanRequest(
        61,
        BLOCK,
        num_ranks=4,
        num_clean_shards=shards,
        num_views=views,
        clean_rule=CleanRule.BLOCK_CAUSAL,
        row_multiple=4,
    )
    parts = [throughput.layer_work(model, make_plan(shared, rank), True) for rank in range(4)]
    assert sum(parts) == pytest.approx(throughput.layer_work(model, make_plan(alone, 0), True))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "--bdlm-objective fast_dllm_v2",
        "--bdlm-objective nemotron_labs",
        "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24",
        "--window-size 10,0 --window-attn-skip-freq 2",
        "--micro-batch-size 2 --global-batch-size 4",
    ],
)
def test_the_count_of_megatrons_log_is_that_of_the_step_with_the_mean_number_of_targets(
    text: str,
) -> None:
    args, config = given(text)
    batch = throughput.batch_of(args, config)
    model = throughput.model_of(args)
    request = PlanRequest(LENGTH, BLOCK, num_views=batch.num_views, clean_rule=batch.clean_rule)
    prune = not (batch.learns_clean or model.has_experts)
    layers = throughput.layer_work(model, make_plan(request, 0), prune)
    targets = batch.target_share * batch.num_views * LENGTH + batch.learns_clean * LENGTH
    wanted = 4 * 3 * (layers + 2 * HEAD * targets)
    found = throughput.useful_flops_of_batch(args, config, 4)
    assert found == pytest.approx(wanted, rel=0.02)  # targets are rounded to whole rows


def test_megatron_counts_useful_work_in_diffusion_runs_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron.training import training

    def stock(args: Any, batch_size: int, *given: Any, **named: Any) -> float:
        return -1.0

    monkeypatch.setattr(training, "num_floating_point_operations", stock)
    args, config = given()
    throughput.count_useful_work(config)
    throughput.count_useful_work(config)  # replaces the first
    count = training.num_floating_point_operations
    assert getattr(count, throughput.STOCK) is stock
    wanted = throughput.useful_flops_of_batch(args, config, 2)
    assert count(args, 2, seqlen_squared_sum_in_batch=None) == wanted
    args.bdlm_objective = "none"
    assert count(args, 2) == -1.0


def test_a_report_needs_two_training_steps_in_a_row() -> None:
    args, config = given()
    meter = throughput.Meter(args, config)
    layout, targets = layout_of(PlanRequest(LENGTH, BLOCK)), torch.ones(LENGTH, 3).bool()
    assert meter.report(layout, targets) == {}
    found = meter.report(layout, targets)
    tokens, seconds = found["tokens per second"].tolist()
    assert tokens == 3 * 48 * 2
    assert 0 < seconds < 60
    assert found.keys() == {"tokens per second"}
    meter.pause()
    assert meter.report(layout, targets) == {}


def test_the_report_is_work_of_one_gpu_and_its_share_of_the_peak() -> None:
    args, config = given("--log-throughput --bp-peak-tflops 500")
    args.world_size = 4  # two data ranks on two pipeline stages
    meter = throughput.Meter(args, config)
    layout, targets = layout_of(PlanRequest(LENGTH, BLOCK)), torch.ones(LENGTH, 1).bool()
    meter.report(layout, targets)
    found = meter.report(layout, targets)
    flops = float(meter.useful_flops(layout, targets))
    assert found["useful TFLOP/s per GPU"][0] == pytest.approx(flops * 2 / 4 / 1e12)
    assert found["model FLOPs utilization"][0] == pytest.approx(flops * 2 / 4 / 1e12 / 500)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("NVIDIA H200", 989.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA H100 PCIe", 0.0),
        ("NVIDIA H200 NVL", 0.0),
        ("NVIDIA GeForce RTX 4090", 0.0),
    ],
)
def test_peaks_are_those_of_known_devices(name: str, wanted: float) -> None:
    assert throughput.peak_tflops(name) == wanted


def test_without_a_known_peak_utilization_is_left_out_and_the_log_says_so() -> None:
    args, config = given("--log-throughput")
    peak, text = throughput.peak_of_run(args, config)
    assert peak == 0
    assert "no peak is known for bfloat16 on cpu; give --bp-peak-tflops" in text
    meter = throughput.Meter(args, config)
    layout, targets = layout_of(PlanRequest(LENGTH, BLOCK)), torch.ones(LENGTH, 1).bool()
    meter.report(layout, targets)
    assert "model FLOPs utilization" not in meter.report(layout, targets)


def test_a_layer_kind_with_experts_counts_those_of_a_row() -> None:
    args, _ = given("--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24")
    kind: LayerKind
    ((kind, count),) = throughput.model_of(args).layers
    assert count == 2
    assert throughput._after(throughput.model_of(args), kind) == 32 * (3 * 2 * 24 + 4)
