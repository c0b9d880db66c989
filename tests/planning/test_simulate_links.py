"""Messages take what their algorithm takes, and groups lie on nodes as Megatron orders ranks."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_bp.layout.exchange import Route, SlabExchange
from megatron_bp.layout.plan import PlanRequest, make_plan
from megatron_bp.layout.run_shape import Topology
from megatron_bp.planning.events import Groups, Lane
from megatron_bp.planning.hardware import GIB, H200, Link
from megatron_bp.planning.predict import Cluster
from megatron_bp.planning.simulate_links import (
    HOP_S,
    Message,
    Placement,
    all_to_all,
    by_node,
    neighbours,
    one_to_one,
    ring,
)
from megatron_bp.planning.simulate_mesh import Mesh

NODE, NETWORK = Link(((1.0, 100.0),), 1e-5), Link(((1.0, 10.0),), 3e-5)
CLUSTER = Cluster(replace(H200, node_link=NODE, network_link=NETWORK), node_size=8)
ONE_NODE, TWO_NODES = Placement(8, 8), Placement(16, 8)


def test_a_ring_inside_a_node_takes_the_measured_time() -> None:
    assert ring(CLUSTER, ONE_NODE, GIB) == Message((Lane.NODE,), 1e-5 + 0.01, (GIB,))


def test_a_ring_over_nodes_crosses_them_on_every_port_and_pays_each_hop() -> None:
    """16 GiB from each rank: 2 over its port at 10 GiB/s, 14 inside at 100."""
    message = ring(CLUSTER, TWO_NODES, 16 * GIB)
    assert message.sent == (14 * GIB, 2 * GIB)
    assert message.seconds == pytest.approx(3e-5 + 0.2 + 15 * HOP_S)
    assert ring(CLUSTER, Placement(2, 1), GIB).sent == (0, GIB)


def test_two_steps_send_what_the_hierarchical_exchange_sends() -> None:
    request = PlanRequest(16 * 64, 4, num_ranks=16, num_clean_shards=16)
    exchange = make_plan(request, 0).exchange
    assert isinstance(exchange, SlabExchange)
    rows = exchange.link_rows(8, Route.BY_NODE)
    for gathers in (True, False):
        steps = by_node(CLUSTER, TWO_NODES, float(exchange.sent_rows), gathers)
        messages = [message for step in steps for message in step]
        sent = {lane: 0.0 for lane in (Lane.NODE, Lane.NETWORK)}
        for message in messages:
            sent[message.lanes[0]] += message.sent[0]
        assert (sent[Lane.NODE], sent[Lane.NETWORK]) == rows
    (between, own), (other,) = by_node(CLUSTER, TWO_NODES, 15 * GIB, gathers=True)
    assert (between.seconds, own.seconds) == pytest.approx((3e-5 + 0.1 + HOP_S, 1e-5 + 0.07))
    assert other.seconds == own.seconds
    (inside,), (after,) = by_node(CLUSTER, TWO_NODES, 15 * GIB, gathers=False)
    assert (inside.seconds, after) == (pytest.approx(2 * own.seconds), between)


def test_a_direct_exchange_waits_for_its_slower_link() -> None:
    message = all_to_all(CLUSTER, TWO_NODES, 15 * GIB)
    assert message.sent == pytest.approx((7 * GIB, 8 * GIB))
    assert message.seconds == pytest.approx(3e-5 + 0.8)
    assert all_to_all(CLUSTER, ONE_NODE, GIB).seconds == pytest.approx(1e-5 + 0.01)


def test_a_windowed_exchange_crosses_only_between_neighbours() -> None:
    message = neighbours(CLUSTER, TWO_NODES, 16 * GIB)
    assert message.sent == (14 * GIB, 2 * GIB)
    assert message.seconds == pytest.approx(3e-5 + 0.8)  # half of the outermost ranks' rows
    assert neighbours(CLUSTER, ONE_NODE, GIB).sent == (GIB,)


def test_rows_between_stages_take_the_link_of_their_distance() -> None:
    assert one_to_one(CLUSTER, 4, GIB).lanes == (Lane.NODE,)
    assert one_to_one(CLUSTER, 8, GIB) == Message((Lane.NETWORK,), 3e-5 + 0.1, (GIB,))


def test_groups_are_dealt_in_the_order_of_megatron() -> None:
    mesh = Mesh(Topology(tensor=2, context=4, shards=2, data=3, expert=6))
    assert mesh.tensor.ranks[:2].tolist() == [[0, 1], [2, 3]]
    assert mesh.context.ranks[:3].tolist() == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14]]
    assert mesh.shards.ranks[:2].tolist() == [[0, 2], [4, 6]]
    assert mesh.data.ranks.tolist() == [list(range(t, 24, 2)) for t in (0, 1)]
    assert mesh.expert.ranks[0].tolist() == [0, 2, 4, 6, 8, 10]
    assert mesh.expert_data.ranks[0].tolist() == [0, 12]
    for name in ("single", "tensor", "context", "shards", "data", "expert", "expert_data"):
        groups: Groups = getattr(mesh, name)
        assert sorted(groups.ranks.ravel()) == list(range(24)), name
    of_context = mesh.of_context(np.array([10.0, 11.0, 12.0, 13.0]))
    assert of_context.tolist() == [10, 10, 11, 11, 12, 12, 13, 13] * 3


def test_groups_that_fill_nodes_are_placed_and_others_refused() -> None:
    mesh = Mesh(Topology(tensor=2, context=8, shards=8, data=2))
    assert Placement.of(mesh.context, 8) == Placement(8, 4)
    assert Placement.of(mesh.tensor, 8) == Placement(2, 2)
    assert Placement.of(mesh.data, 8).nodes == 4
    with pytest.raises(ValueError, match="3 ranks lie unevenly on nodes of 8"):
        Placement.of(Mesh(Topology(context=3, shards=3, data=8)).context, 8)
