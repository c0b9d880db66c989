"""Times collectives over groups of ranks that lie inside a node or span nodes.

Ranks are numbered as Megatron does: tensor, context, data, pipeline, from the inside out. A group
has `size` ranks, `stride` apart; n of them share a node.
Specified by tests/planning/test_cluster.py.
"""

from dataclasses import dataclass

from megatron_bp.layout.run_shape import Topology
from megatron_bp.layout.traffic import Axis, Collective
from megatron_bp.planning.hardware import Hardware, Link


@dataclass(frozen=True)
class Cluster:
    """A GPU and its links, and how many GPUs a node has."""

    hardware: Hardware
    node_size: int = 8

    def in_node(self, size: int, stride: int) -> int:
        """n, the ranks of a group that share a node."""
        return min(size, max(1, self.node_size // stride))

    def link(self, span: int) -> Link:
        """The link that joins ranks within `span` consecutive ones."""
        gpu = self.hardware
        return gpu.node_link if span <= self.node_size else gpu.network_link

    def ring_seconds(self, sent_bytes: float, size: int, stride: int) -> float:
        """An all-gather or reduce-scatter of which each rank sends `sent_bytes`.

        Inside a node: that over NVLink. Over nodes: n rings, each crossing at another rank's port
        and carrying 1 / n of the data, so the slower of the node's link with all bytes and of the
        port with 1 / n of them.
        """
        near = self.in_node(size, stride)
        if near == size:
            return self.hardware.node_link.seconds(sent_bytes)
        across = self.hardware.network_link.seconds(sent_bytes / near)
        return across if near == 1 else max(self.hardware.node_link.seconds(sent_bytes), across)

    def two_step_seconds(self, sent_bytes: float, size: int, stride: int) -> float:
        """The same by node (comm/hierarchical.py): between nodes first, then inside each.

        With k nodes and shares of sent / (size - 1): k - 1 shares cross, k * (n - 1) stay inside.
        """
        near = self.in_node(size, stride)
        if near in (1, size):
            return self.ring_seconds(sent_bytes, size, stride)
        share, nodes = sent_bytes / (size - 1), size // near
        across = self.hardware.network_link.seconds(share * (nodes - 1))
        return across + self.hardware.node_link.seconds(share * nodes * (near - 1))

    def all_to_all_seconds(self, sent_bytes: float, size: int, stride: int) -> float:
        """An all-to-all: what goes to other nodes leaves by each rank's own port."""
        near = self.in_node(size, stride)
        remote = sent_bytes * (size - near) / max(1, size - 1)
        inside = self.hardware.node_link.seconds(sent_bytes - remote)
        return max(inside, self.hardware.network_link.seconds(remote))

    def seconds(self, collective: Collective, topology: Topology) -> float:
        """All calls of a collective of a step, one after another."""
        size, sent = collective.size, collective.sent_bytes
        stride = strides(topology)[collective.axis]
        if collective.axis is Axis.EXPERT:
            one = self.all_to_all_seconds(sent, size, stride)
        elif collective.axis is Axis.PIPELINE:
            one = self.link(stride + 1).seconds(sent)
        else:
            one = self.ring_seconds(sent, size, stride)
        return collective.calls * one


def strides(topology: Topology) -> dict[Axis, int]:
    """How far apart neighbours of a group are; experts are dealt over context and data ranks."""
    tensor = topology.tensor
    return {
        Axis.TENSOR: 1,
        Axis.SHARDS: tensor,
        Axis.CONTEXT: tensor,
        Axis.EXPERT: tensor,
        Axis.DATA: tensor,
        Axis.PIPELINE: tensor * topology.context * topology.data,
    }


def by_node(cluster: Cluster, topology: Topology, sent_bytes: float) -> bool:
    """Whether clean rows are gathered sooner in two steps than by one flat collective."""
    size, stride = topology.shards, topology.tensor
    if cluster.node_size % stride or size % cluster.in_node(size, stride):
        return False
    flat = cluster.ring_seconds(sent_bytes, size, stride)
    return cluster.two_step_seconds(sent_bytes, size, stride) < flat
