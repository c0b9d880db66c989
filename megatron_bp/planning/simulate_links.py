"""Times one message by the algorithm that carries it: rings, direct exchanges, two steps by node.

Letters: g ranks of a group on k nodes, n of them on each. Specified by
tests/planning/test_simulate_links.py.
"""

from dataclasses import dataclass

import numpy as np

from megatron_bp.planning.cluster import Cluster
from megatron_bp.planning.events import Groups, Lane

HOP_S = 2e-6  # one step of a ring, beside what a call costs; assumed


@dataclass(frozen=True)
class Placement:
    """How a group lies on nodes: `size` ranks, `per_node` on each."""

    size: int
    per_node: int

    @property
    def nodes(self) -> int:
        """k, the nodes of the group."""
        return self.size // self.per_node

    @classmethod
    def of(cls, groups: Groups, node_size: int) -> "Placement":
        """The span of equal groups of ranks.

        Raises: ValueError if a group lies unevenly on its nodes.
        """
        node = groups.ranks // node_size
        nodes = {tuple(np.unique(row, return_counts=True)[1].tolist()) for row in node}
        if len(nodes) > 1 or len(set(next(iter(nodes)))) > 1:
            raise ValueError(
                f"groups of {groups.size} ranks lie unevenly on nodes of {node_size}; use degrees "
                "that divide a node, or are multiples of it."
            )
        return cls(groups.size, next(iter(nodes))[0])


@dataclass(frozen=True)
class Message:
    """What one call occupies: lanes, seconds, and the bytes each rank puts on each lane."""

    lanes: tuple[Lane, ...]
    seconds: float
    sent: tuple[float, ...]


def ring(cluster: Cluster, span: Placement, sent_bytes: float) -> Message:
    """An all-gather or reduce-scatter in which each rank sends `sent_bytes` = (g - 1) shares.

    Inside a node: the measured link. Over nodes: n rings, each of which crosses nodes on another
    rank's network port, so that a rank sends 1 / n of its bytes over the network; both links work
    at once and the slower one decides; each of g - 1 steps costs a hop. Source: how NCCL builds
    rings, one for each network port.
    """
    gpu = cluster.hardware
    if span.nodes == 1:
        return Message((Lane.NODE,), gpu.node_link.seconds(sent_bytes), (sent_bytes,))
    network = sent_bytes / span.per_node
    slowest = max(gpu.network_link.seconds(network), gpu.node_link.seconds(sent_bytes - network))
    seconds = slowest + HOP_S * (span.size - 1)
    return Message((Lane.NODE, Lane.NETWORK), seconds, (sent_bytes - network, network))


def by_node(
    cluster: Cluster, span: Placement, sent_bytes: float, gathers: bool
) -> tuple[tuple[Message, ...], ...]:
    """The two steps of comm/hierarchical.py; messages of one step run at a time.

    Of g - 1 shares, k - 1 go between nodes in one ring of k, and k * (n - 1) inside, in k calls. A
    gather's own node is gathered beside the exchange between nodes; a reduction is inside first.
    """
    gpu, share = cluster.hardware, sent_bytes / (span.size - 1)
    between, inside = share * (span.nodes - 1), share * (span.per_node - 1)
    seconds = gpu.network_link.seconds(between) + HOP_S * (span.nodes - 1)
    network = Message((Lane.NETWORK,), seconds, (between,))

    def calls(count: int) -> Message:
        return Message((Lane.NODE,), count * gpu.node_link.seconds(inside), (count * inside,))

    if gathers:
        return (network, calls(1)), (calls(span.nodes - 1),)
    return (calls(span.nodes),), (network,)


def all_to_all(cluster: Cluster, span: Placement, sent_bytes: float) -> Message:
    """A direct exchange in which `sent_bytes` go to the g - 1 others in equal parts.

    Both links work at once and the slower one decides.
    """
    gpu = cluster.hardware
    inside = sent_bytes * (span.per_node - 1) / max(1, span.size - 1)
    if span.nodes == 1:
        return Message((Lane.NODE,), gpu.node_link.seconds(sent_bytes), (sent_bytes,))
    network = sent_bytes - inside
    seconds = max(gpu.network_link.seconds(network), gpu.node_link.seconds(inside))
    return Message((Lane.NODE, Lane.NETWORK), seconds, (inside, network))


def neighbours(cluster: Cluster, span: Placement, sent_bytes: float) -> Message:
    """A windowed exchange: a rank's two chunks need rows of the ranks before and after it.

    Over nodes, half of what the first and the last rank of a node send crosses, 1 / n of all bytes.
    """
    gpu = cluster.hardware
    if span.nodes == 1:
        return Message((Lane.NODE,), gpu.node_link.seconds(sent_bytes), (sent_bytes,))
    network = sent_bytes / span.per_node
    crossing = max(sent_bytes / 2, network)
    seconds = max(gpu.network_link.seconds(crossing), gpu.node_link.seconds(sent_bytes - crossing))
    return Message((Lane.NODE, Lane.NETWORK), seconds, (sent_bytes - network, network))


def one_to_one(cluster: Cluster, distance: int, sent_bytes: float) -> Message:
    """A message to the rank `distance` further."""
    link = cluster.link(distance + 1)
    lane = Lane.NODE if link is cluster.hardware.node_link else Lane.NETWORK
    return Message((lane,), link.seconds(sent_bytes), (sent_bytes,))
