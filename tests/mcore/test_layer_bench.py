"""The layer benchmark runs what it names: one layer, in several ways that move their own bytes."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_bp.attention.bench import Shape
from megatron_bp.comm.groups import BlockGroups
from megatron_bp.layout.exchange import SlabExchange
from megatron_bp.mcore import layer_bench
from megatron_bp.mcore.layer_bench import WAYS, LayerCase, LayerRun
from megatron_bp.mcore.step_trace import Split
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
    plain = LayerCase(SMALL, 64, world, kernel="dense")
    cases = [replace(plain, own_last=own_last) for own_last in (False, True)]
    cases.append(replace(plain, kernel="none such"))
    runs = [(case, groups) for case in cases]
    cpu, dtype = torch.device("cpu"), torch.float32
    found["rows"] = layer_bench.measure(runs, cpu, dtype, 3)
    found["both"] = layer_bench.measure(runs[:1], cpu, dtype, 1, ["both"])
    found["backward"] = layer_bench.measure(runs[:1], cpu, dtype, 1, ["backward"])
    found["orders"] = []
    for case in cases[:2]:
        run = LayerRun(case, groups, cpu, dtype)
        out = run.forward()
        found["orders"].append([out.detach(), *run.gradients(out)])
    try:
        layer_bench.make_groups(world, blocking=False, max_ctas=8)
    except ValueError as error:
        found["refused"] = str(error)
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


def test_both_orders_of_backward_give_the_same_layer(ways: list[dict]) -> None:
    for found in ways:
        for a, b in zip(*found["orders"], strict=True):
            assert float((a - b).abs().max()) < 1e-5  # fp32 sums in another order


def test_the_measurement_reports_all_ranks_and_what_failed(ways: list[dict]) -> None:
    for row, also in zip(ways[0]["rows"][:2], ways[1]["rows"][:2], strict=True):
        for part in layer_bench.PARTS:
            assert row[f"{part}_ms"] == also[f"{part}_ms"] > 0
        assert [rank["expected_bytes"] > 0 for rank in row["ranks"]] == [True, True]
    assert [row.get("own_last") for row in ways[0]["rows"]] == [False, True, True]
    assert "none such" in ways[0]["rows"][2]["failed"]
    assert "forward_ms" not in ways[0]["both"][0]
    assert ways[0]["both"][0]["both_ms"] > 0
    assert ways[0]["backward"][0]["tflops"] > 0
    assert ways[0]["backward"][0]["backward_ms"] > 0
    assert "forward_ms" not in ways[0]["backward"][0]


def test_cases_are_timed_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a device that slows down meanwhile slows all of them."""
    order: list[tuple[int, str]] = []
    parted = LayerRun.part

    def part(run: LayerRun, name: str) -> Any:
        order.append((run.case.length, name))
        return parted(run, name)

    monkeypatch.setattr(LayerRun, "part", part)
    monkeypatch.setattr(layer_bench, "profiled", lambda run, device: Split(1, {}, {}, {}, 0, ()))
    monkeypatch.setattr(layer_bench.dist, "get_world_size", lambda: 1)
    cases = [(LayerCase(SMALL, n, 1, kernel="dense"), BlockGroups.single()) for n in (8, 16, 24)]
    rows = layer_bench.measure(cases, torch.device("cpu"), torch.float32, 3, ["both"])
    assert [length for length, _ in order] == [8, 16, 24, 16, 24, 8, 24, 8, 16]
    assert [row["length"] for row in rows] == [8, 16, 24]


def test_a_limit_for_nccl_is_refused_elsewhere(ways: list[dict]) -> None:
    assert ways[0]["refused"] == "max_ctas=8 is for NCCL, not gloo; use 0."
