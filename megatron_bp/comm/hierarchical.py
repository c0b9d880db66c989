"""Gathers and reduces in two steps where a group spans nodes: each byte crosses once per node.

A gather first exchanges rows between equal ranks of the nodes, then spreads them inside each node;
a reduction sums inside each node first, then between nodes. With k nodes of n ranks, a rank sends
k - 1 shares to other nodes, where a flat exchange must deliver its share to (k - 1) * n remote
ranks. The total is the same: k * n - 1 shares. Specified by tests/comm/test_hierarchical.py.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bp.comm.groups import Group, NodeGroup

Works = list[dist.Work | None]


class TwoSteps:
    """Collectives `first`, and those that `then` starts from their results.

    On a GPU the second step is queued at once on a stream of its own, so that neither the host nor
    the compute stream waits between the steps. On a CPU it starts in `wait`.
    """

    def __init__(
        self, first: Works, then: Callable[[], Works], tensors: tuple[Tensor, ...]
    ) -> None:
        self._first, self._then = first, then
        # Waiting on another stream lets go of what a collective reads; it must live until `wait`.
        self._tensors = tensors
        self._second: Works = []
        self._queued = tensors[0].is_cuda
        if self._queued:
            with torch.cuda.stream(torch.cuda.Stream(tensors[0].device)):
                self._start_second()

    def _start_second(self) -> None:
        for work in self._first:
            finish(work)
        self._second = self._then()

    def wait(self) -> None:
        """Returns when the current stream may read the results of both steps."""
        if not self._queued:
            self._start_second()
        for work in self._second:
            finish(work)


def finish(work: dist.Work | None) -> None:
    """Makes the current stream wait for a collective."""
    if work is not None:
        work.wait()


def gather_by_node(gathered: Tensor, mine: Tensor, group: NodeGroup) -> TwoSteps:
    """Starts to fill `gathered` with the rows `mine` of each rank, in rank order."""
    rows, node_rows = len(mine), group.ranks_per_node * len(mine)
    column = mine.new_empty((group.num_nodes * rows, *mine.shape[1:]))
    between = dist.all_gather_into_tensor(column, mine, group=group.between, async_op=True)

    def spread(node: int, share: Tensor) -> dist.Work | None:
        place = gathered[node * node_rows : (node + 1) * node_rows]
        return dist.all_gather_into_tensor(place, share, group=group.inside, async_op=True)

    own = spread(group.node, mine)  # needs no other node

    def others() -> Works:
        return [
            spread(node, column[node * rows : (node + 1) * rows])
            for node in range(group.num_nodes)
            if node != group.node
        ]

    return TwoSteps([between, own], others, (gathered, mine, column))


def reduce_by_node(mine: Tensor, whole: Tensor, group: NodeGroup) -> TwoSteps:
    """Starts to sum `whole` over the ranks: over those of a node, then over the nodes."""
    rows, node_rows = len(mine), group.ranks_per_node * len(mine)
    column = mine.new_empty((group.num_nodes * rows, *mine.shape[1:]))
    inside = [
        dist.reduce_scatter_tensor(
            column[node * rows : (node + 1) * rows],
            whole[node * node_rows : (node + 1) * node_rows],
            group=group.inside,
            async_op=True,
        )
        for node in range(group.num_nodes)
    ]

    def between() -> Works:
        return [dist.reduce_scatter_tensor(mine, column, group=group.between, async_op=True)]

    return TwoSteps(inside, between, (mine, whole, column))


def split_by_node(group: Group, nodes: Sequence[int]) -> Group:
    """The group as a `NodeGroup`, or as it is if no byte would be saved; collective over `group`.

    `nodes` is the node of each rank of `group`. Nothing is saved when all ranks are on one node, or
    each on its own.
    Raises: ValueError if the nodes do not hold equally many adjacent ranks, or torch.distributed
    was initialised with a device.
    """
    num_nodes = len(set(nodes))
    if num_nodes in (1, len(nodes)):
        return group
    per_node = len(nodes) // num_nodes
    runs = [nodes[i : i + per_node] for i in range(0, len(nodes), per_node)]
    if len(runs) != num_nodes or any(len(set(run)) > 1 for run in runs):
        raise ValueError(
            f"the {len(nodes)} ranks that share clean rows are on nodes {list(nodes)}; a "
            "hierarchical gather needs equally many adjacent ranks on each node. Use "
            "--bp-hierarchical-gather 0, or degrees that divide a node."
        )
    assert isinstance(group, dist.ProcessGroup), "only a process group has ranks on other nodes"
    refuse_bound_device(dist.group.WORLD)
    ranks = dist.get_process_group_ranks(group)
    node, local = divmod(group.rank(), per_node)
    inside = ranks[node * per_node : (node + 1) * per_node]
    between = ranks[local::per_node]
    made = [
        dist.new_group(part, backend=dist.get_backend(group), use_local_synchronization=True)
        for part in (inside, between)
    ]
    return NodeGroup(group, *(cast(dist.ProcessGroup, part) for part in made))


def refuse_bound_device(world: Any) -> None:
    """Returns if groups can be made by their members alone, as different pipeline stages must.

    With a bound device torch splits the world's communicator, which every rank must take part in;
    members would wait for the others for ever. Megatron-Core 0.19.2 binds none.
    Raises: ValueError if a device is bound.
    """
    if getattr(world, "bound_device_id", None) is not None:
        raise ValueError(
            f"torch.distributed was initialised with device_id={world.bound_device_id}; gathers by "
            "node make groups of some ranks only, which needs init_process_group without "
            "device_id. Drop it, or use --bp-hierarchical-gather 0."
        )
