"""The layer benchmark runs what it names: one layer, in several ways that move their own bytes."""

from typing import Any

import pytest
import torch

from megatron_bp.attention.bench import Shape
from megatron_bp.layout.exchange import SlabExchange
from megatron_bp.mcore import layer_bench
from megatron_bp.mcore.layer_bench import WAYS, LayerCase, LayerRun
from tests.comm.counting import counted
from tests.distributed import run_distributed

SMALL = Shape(4, 2, 8, block_size=4)


def test_one_gather_brings_the_rows_of_two_slabs_to_the_same_places() -> None:
    for num_ranks in (2, 3):
        for rank in range(num_ranks):
            two = LayerCase(SMALL, 61, num_ranks).plan(rank).exchange
            one = LayerCase(SMALL, 61, num_ranks, "csbp-single").plan(rank).exchange
            assert isinstance(two, SlabExchange)
            assert isinstance(one, SlabExchange)
            assert one.slabs[0].length == sum(slab.length for slab in two.slabs)
            assert one.slabs[1].length == 0
            assert one.sent_rows == two.sent_rows
            moved = one.slabs[0].copies
            targets = {row for c in moved for row in range(c.target, c.target + c.length)}
            assert targets == set(range(len(targets)))
            assert len(targets) >= 61


def run_ways(rank: int, world: int) -> dict[str, Any]:
    """Output and gradients of every way on this rank, the bytes it sent and those it should."""
    found = {}
    for name, way in WAYS.items():
        groups = layer_bench.make_groups(int(way.shards * world) or 1, way.blocking)
        case = LayerCase(SMALL, 64, world, name, "dense", num_views=2)
        run = LayerRun(case, groups, torch.device("cpu"), torch.float32)
        with counted() as sent:
            out = run.forward()
            grads = run.gradients(out)
        should = case.traffic(rank, torch.float32)
        found[name] = {
            "layer": [out.detach(), *grads],
            "sent": sum(x.total for x in sent),
            "should": should.gather_bytes + should.reduce_bytes,
        }
    groups = layer_bench.make_groups(world, blocking=False)
    small = LayerCase(SMALL, 64, world, kernel="dense")
    found["row"] = layer_bench.measure(small, groups, torch.device("cpu"), torch.float32, repeats=1)
    return found


@pytest.fixture(scope="module")
def ways() -> list[dict[str, Any]]:
    return run_distributed(run_ways, 2)


@pytest.mark.parametrize("name", WAYS)
def test_every_way_moves_the_bytes_that_are_counted(ways: list[dict], name: str) -> None:
    for found in ways:
        assert found[name]["sent"] == found[name]["should"]
    assert (ways[0][name]["sent"] > 0) == (WAYS[name].shards == 1)


@pytest.mark.parametrize(
    ("name", "like"),
    [("csbp-single", "csbp"), ("csbp-blocking", "csbp"), ("cp", "csbp"), ("cp-plain", "cp")],
)
def test_ways_with_the_same_rows_give_the_same_layer(
    ways: list[dict], name: str, like: str
) -> None:
    for found in ways:
        for a, b in zip(found[name]["layer"], found[like]["layer"], strict=True):
            assert float((a - b).abs().max()) < 1e-5  # fp32 sums in another order


def test_the_measurement_reports_all_ranks(ways: list[dict]) -> None:
    assert ways[0]["row"]["both_ms"] == ways[1]["row"]["both_ms"] > 0
    assert [rank["expected_bytes"] > 0 for rank in ways[0]["row"]["ranks"]] == [True, True]
