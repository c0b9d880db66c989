"""Groups inside a node use its link; groups over nodes share their ports."""

from dataclasses import replace

import pytest

from megatron_bp.layout.run_shape import Topology
from megatron_bp.layout.traffic import Axis, Collective
from megatron_bp.planning.cluster import Cluster, by_node, strides
from megatron_bp.planning.hardware import GIB, H200, Link

NEAR, FAR = Link(((1.0, 100.0),), latency_s=0.0), Link(((1.0, 10.0),), latency_s=0.0)
CLUSTER = Cluster(replace(H200, node_link=NEAR, network_link=FAR), node_size=8)


@pytest.mark.parametrize(
    ("size", "stride", "near"),
    [(8, 1, 8), (16, 1, 8), (4, 2, 4), (16, 2, 4), (4, 8, 1), (2, 64, 1)],
)
def test_ranks_that_share_a_node(size: int, stride: int, near: int) -> None:
    assert CLUSTER.in_node(size, stride) == near


def test_a_ring_is_as_fast_as_its_slowest_part() -> None:
    assert CLUSTER.ring_seconds(GIB, 8, 1) == pytest.approx(1 / 100)
    assert CLUSTER.ring_seconds(GIB, 4, 8) == pytest.approx(1 / 10)  # one rank a node
    assert CLUSTER.ring_seconds(GIB, 16, 1) == pytest.approx(1 / 80)  # 8 ports together
    assert CLUSTER.ring_seconds(GIB, 16, 4) == pytest.approx(1 / 20)  # 2 ports


def test_two_steps_send_each_share_once_to_each_node() -> None:
    share = GIB / 15
    wanted = share / (10 * GIB) + 2 * 7 * share / (100 * GIB)
    assert CLUSTER.two_step_seconds(GIB, 16, 1) == pytest.approx(wanted)
    assert CLUSTER.two_step_seconds(GIB, 8, 1) == CLUSTER.ring_seconds(GIB, 8, 1)


def test_two_steps_are_chosen_where_they_are_sooner() -> None:
    topology = Topology(context=16, shards=16)
    slow = replace(CLUSTER.hardware, network_link=replace(FAR, points=((1.0, 2.0),)))
    assert by_node(Cluster(slow), topology, GIB)
    quick = replace(CLUSTER.hardware, network_link=replace(FAR, points=((1.0, 50.0),)))
    assert not by_node(Cluster(quick), topology, GIB)
    assert not by_node(Cluster(slow), Topology(context=12, shards=12), GIB)  # does not fill nodes


def test_an_all_to_all_leaves_by_each_ranks_own_port() -> None:
    remote = GIB * 8 / 15
    assert CLUSTER.all_to_all_seconds(GIB, 16, 1) == pytest.approx(remote / (10 * GIB))
    assert CLUSTER.all_to_all_seconds(GIB, 8, 1) == pytest.approx(1 / 100)


def test_each_axis_has_its_stride() -> None:
    topology = Topology(tensor=2, context=4, shards=2, data=3, pipeline=2)
    assert strides(topology)[Axis.SHARDS] == 2
    assert strides(topology)[Axis.PIPELINE] == 24
    passed = Collective("rows", Axis.PIPELINE, 2, 3, float(GIB))
    assert CLUSTER.seconds(passed, topology) == pytest.approx(3 / 10)
    inside = Topology(tensor=2, pipeline=2)
    assert CLUSTER.seconds(passed, inside) == pytest.approx(3 / 100)
    routed = Collective("rows", Axis.EXPERT, 4, 1, float(GIB))
    assert CLUSTER.seconds(routed, topology) == pytest.approx(1 / 100)
