"""What eight ranks send for a layer is what the formulas say: every mode, objective and route.

Measured at the calls of torch.distributed, forward and backward apart, inside and between nodes of
four ranks. Counted twice: from each rank's plan (layout/cost.py) and for whole runs without plans
(layout/traffic.py).
"""

import itertools
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import pytest
import torch

from megatron_bp.attention.block_parallel import (
    AttentionOptions,
    GradWire,
    block_parallel_attention,
)
from megatron_bp.comm.groups import BlockGroups
from megatron_bp.config import OBJECTIVES
from megatron_bp.layout.cost import LayerShape, Traffic, layer_traffic
from megatron_bp.layout.exchange import LinkRows, Route, SlabExchange
from megatron_bp.layout.model_shape import AttentionShape, dense_model
from megatron_bp.layout.plan import PlanRequest, make_plan
from megatron_bp.layout.run_shape import BatchShape, Policy, Run, Topology
from megatron_bp.layout.traffic import Axis, context_collectives
from megatron_bp.objectives.objective import make_objective
from tests.attention.test_block_parallel import make_groups
from tests.comm.counting import counted
from tests.comm.test_clean_kv import DOCUMENTS
from tests.comm.test_hierarchical import by_node
from tests.distributed import run_distributed

RANKS, PER_NODE, LENGTH, BLOCK = 8, 4, 128, 4
HEADS, KV_HEADS, SIZE, SAMPLES = 2, 1, 4, 2
SHARDS = {"csbp": 8, "pure": 1, "hybrid": 4, "cp": 8}
DTYPE, ELEMENT_BYTES = torch.bfloat16, 2
WINDOW = 13


class Case(NamedTuple):
    """One layer: its mode and route, and what decides its plan."""

    mode: str
    objective: str
    window: int
    packed: bool
    windowed_exchange: bool
    by_node: bool
    wire: GradWire

    @property
    def request(self) -> PlanRequest:
        """The plan request of the case."""
        objective = make_objective(self.objective)
        return PlanRequest(
            length=48 if self.packed else LENGTH,
            block_size=BLOCK,
            num_ranks=RANKS,
            num_clean_shards=SHARDS[self.mode],
            num_views=objective.num_views,
            clean_rule=objective.clean_rule,
            corrupted_rule=objective.corrupted_rule,
            window=self.window,
            documents=DOCUMENTS if self.packed else (),
            gather_corrupted=self.mode == "cp",
            windowed_exchange=self.windowed_exchange,
        )

    @property
    def grad_bytes(self) -> int:
        """Bytes of a gradient element on the wire."""
        return 4 if self.wire is GradWire.FP32 else ELEMENT_BYTES


def cases() -> list[Case]:
    """Every mode with every objective, full and windowed; then every mode with every other axis."""
    plain = Case("csbp", "standard", 0, False, True, False, GradWire.FP32)
    objectives = [name for name in OBJECTIVES if name != "none"]
    found = [
        plain._replace(mode=mode, objective=objective, window=window)
        for mode, objective, window in itertools.product(SHARDS, objectives, (0, WINDOW))
    ]
    for mode in SHARDS:
        base = plain._replace(mode=mode, objective="fast_dllm_v2")
        found += [
            base._replace(packed=True),
            base._replace(packed=True, window=WINDOW),
            base._replace(window=WINDOW, windowed_exchange=False),
            base._replace(wire=GradWire.MODEL),
            base._replace(by_node=True),
            base._replace(by_node=True, window=WINDOW),
            base._replace(by_node=True, packed=True, wire=GradWire.MODEL),
        ]
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Measured:
    """Bytes one rank sent forward and backward, and rows of K and V over each link."""

    traffic: Traffic
    links: tuple[LinkRows, LinkRows]


def measure(case: Case, groups: BlockGroups) -> Measured:
    """Runs one layer forward and backward and counts."""
    plan = make_plan(case.request, groups.rank)
    shape = plan.rows.num_rows, SAMPLES
    q = torch.ones(*shape, HEADS, SIZE, dtype=DTYPE, requires_grad=True)
    k, v = (torch.ones(*shape, KV_HEADS, SIZE, dtype=DTYPE, requires_grad=True) for _ in range(2))
    options = AttentionOptions(SIZE**-0.5, kernel="dense", grad_wire=case.wire)
    with counted(PER_NODE) as forward:
        out = block_parallel_attention(q, k, v, plan, groups, options)
    with counted(PER_NODE) as backward:
        out.sum().backward()
    row = 2 * SAMPLES * KV_HEADS * SIZE
    links = [
        LinkRows(*(sum(getattr(x, side) for x in sent) // (row * width) for side in SIDES))
        for sent, width in ((forward, ELEMENT_BYTES), (backward, case.grad_bytes))
    ]
    traffic = Traffic(*(sum(x.total for x in sent) for sent in (forward, backward)))
    return Measured(traffic, (links[0], links[1]))


SIDES = ("inside", "between")


def _worker(rank: int, num_ranks: int) -> list[Measured]:
    flat = {shards: make_groups(num_ranks, shards) for shards in sorted(set(SHARDS.values()))}
    nodes = {c: by_node(x, PER_NODE) if c > 1 else x for c, x in flat.items()}
    return [measure(x, (nodes if x.by_node else flat)[SHARDS[x.mode]]) for x in cases()]


@cache
def measured() -> list[list[Measured]]:
    """What each rank measured, one entry a case."""
    return run_distributed(_worker, RANKS)


def test_every_layer_sends_what_its_plan_counts() -> None:
    shape = LayerShape(KV_HEADS, SIZE, SAMPLES, ELEMENT_BYTES)
    for rank, of_rank in enumerate(measured()):
        for case, got in zip(cases(), of_rank, strict=True):
            counted_in = replace(shape, grad_bytes_per_element=case.grad_bytes)
            assert got.traffic == layer_traffic(make_plan(case.request, rank), counted_in), case
    pure = [x.traffic for c, x in zip(cases(), measured()[0], strict=True) if c.mode == "pure"]
    assert pure == [Traffic(0, 0)] * len(pure), "replicated clean rows do not travel"


def test_bytes_between_nodes_are_those_of_the_route() -> None:
    seen = set()
    for rank, of_rank in enumerate(measured()):
        for case, got in zip(cases(), of_rank, strict=True):
            plan = make_plan(case.request, rank)
            route = Route.BY_NODE if case.by_node else Route.DIRECT
            want = [LinkRows(0, 0), LinkRows(0, 0)]
            if isinstance(plan.exchange, SlabExchange):
                per_node = min(PER_NODE, plan.exchange.num_shards)
                want = [plan.exchange.link_rows(per_node, route)] * 2
            else:
                counts = plan.exchange.send_counts, plan.exchange.receive_counts
                want = [plan.exchange.link_rows(PER_NODE, rows) for rows in counts]
            if case.mode == "cp":
                own = plan.own_exchange.link_rows(PER_NODE, route)
                views = case.request.num_views
                want = [
                    LinkRows(x.inside + views * own.inside, x.between + views * own.between)
                    for x in want
                ]
            assert got.links == tuple(want), case
            seen.add((case.mode, route, got.links[0].between > 0))
    assert ("csbp", Route.BY_NODE, True) in seen


def test_whole_runs_are_counted_without_plans_as_they_are_measured() -> None:
    """The mean over ranks; one document, since a run is counted for its batch shape."""
    checked = 0
    for number, case in enumerate(cases()):
        if case.packed:
            continue
        found = [of_rank[number].traffic for of_rank in measured()]
        run = _run(case)
        want = {"gather": 0.0, "reduce": 0.0}
        for collective in context_collectives(run):
            assert collective.axis in (Axis.SHARDS, Axis.CONTEXT)
            kind = next(kind for kind in want if kind in collective.name)
            want[kind] += collective.step_bytes
        assert sum(x.gather_bytes for x in found) / RANKS == pytest.approx(want["gather"]), case
        assert sum(x.reduce_bytes for x in found) / RANKS == pytest.approx(want["reduce"]), case
        checked += 1
    assert checked >= 8 * len([name for name in OBJECTIVES if name != "none"])


def _run(case: Case) -> Run:
    request = case.request
    mixer = AttentionShape(HEADS, KV_HEADS, SIZE, window=case.window)
    return Run(
        dense_model("one layer", 1, HEADS * SIZE, 16, mixer, 32),
        BatchShape(
            LENGTH,
            BLOCK,
            request.num_views,
            request.clean_rule,
            request.corrupted_rule,
            micro_batch=SAMPLES,
            global_batch=SAMPLES,
        ),
        Topology(
            context=RANKS,
            shards=SHARDS[case.mode],
            block_owned=case.mode != "cp",
            windowed_exchange=case.windowed_exchange,
        ),
        Policy(element_bytes=ELEMENT_BYTES, grad_wire_bytes=case.grad_bytes),
    )
