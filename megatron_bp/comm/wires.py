"""Starts the collectives that move clean keys and values, over whatever kind of group is given.

Owns what a collective in flight is, and which collectives a kind of group needs; knows nothing of
keys, slabs or windows. Groups that span nodes are in hierarchical.py. Specified by
tests/comm/test_hierarchical.py and tests/comm/test_clean_kv.py.
"""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from megatron_bp.comm.groups import BlockingGroup, Group, LocalGroup, NodeGroup
from megatron_bp.comm.hierarchical import TwoSteps, gather_by_node, reduce_by_node


@dataclass(frozen=True)
class Pending:
    """A collective in flight (none: it is done) and the tensor it fills."""

    work: dist.Work | TwoSteps | None
    tensor: Tensor

    def wait(self) -> None:
        """Returns when `tensor` may be read by the current stream."""
        if self.work is not None:
            self.work.wait()


@dataclass(frozen=True)
class Splits:
    """Rows that an all-to-all sends to, and receives from, each rank."""

    send: tuple[int, ...]
    receive: tuple[int, ...]


def wire_group(group: Group) -> dist.ProcessGroup:
    """The process group of all ranks of `group`.

    Raises: ValueError if this process is alone but the layout wants peers.
    """
    if isinstance(group, LocalGroup):
        raise ValueError(
            "the plan shares the sample over several ranks but this process has no group; "
            "pass BlockGroups with process groups, or plan for num_ranks=1."
        )
    return group if isinstance(group, dist.ProcessGroup) else wire_group(group.whole)


def start_gather(gathered: Tensor, mine: Tensor, group: Group) -> Pending:
    """Starts to fill `gathered` with the rows `mine` of each rank, in rank order.

    `mine` may be this rank's place in `gathered`.
    """
    if isinstance(group, BlockingGroup):
        return _done(start_gather(gathered, mine, group.whole))
    if isinstance(group, NodeGroup):
        return Pending(gather_by_node(gathered, mine, group), gathered)
    work = dist.all_gather_into_tensor(gathered, mine, group=wire_group(group), async_op=True)
    return Pending(work, gathered)


def start_reduce(whole: Tensor, num_rows: int, group: Group) -> Pending:
    """Starts to sum `whole` over the ranks; rank r receives its rows [r, r + 1) * num_rows."""
    if isinstance(group, BlockingGroup):
        return _done(start_reduce(whole, num_rows, group.whole))
    mine = whole.new_empty((num_rows, *whole.shape[1:]))
    if isinstance(group, NodeGroup):
        return Pending(reduce_by_node(mine, whole, group), mine)
    work = dist.reduce_scatter_tensor(mine, whole, group=wire_group(group), async_op=True)
    return Pending(work, mine)


def start_exchange(sent: Tensor, splits: Splits, group: Group) -> Pending:
    """Starts an all-to-all of rows: `sent` is grouped by destination, the result by source.

    A group that spans nodes sends its rows directly: most go to one rank only.
    """
    if isinstance(group, BlockingGroup):
        return _done(start_exchange(sent, splits, group.whole))
    received = sent.new_empty((sum(splits.receive), *sent.shape[1:]))
    work = dist.all_to_all_single(
        received,
        sent,
        list(splits.receive),
        list(splits.send),
        group=wire_group(group),
        async_op=True,
    )
    return Pending(work, received)


def _done(pending: Pending) -> Pending:
    pending.wait()
    return Pending(None, pending.tensor)
