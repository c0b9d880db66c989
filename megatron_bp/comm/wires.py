"""Starts the collectives that move clean keys and values, over whatever kind of group is given.

Owns what a collective in flight is, and which collectives a kind of group needs; knows nothing of
keys, slabs or windows. Groups that span nodes are in hierarchical.py. Specified by
tests/comm/test_hierarchical.py and tests/comm/test_clean_kv.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor
from torch.distributed import _coalescing_manager

from megatron_bp.comm.groups import BlockingGroup, Group, LocalGroup, NodeGroup
from megatron_bp.comm.hierarchical import gather_by_node, reduce_by_node


class Work(Protocol):
    """One or more collectives in flight."""

    def wait(self) -> Any:
        """Returns when the current stream may read what they fill."""
        ...


@dataclass(frozen=True)
class Pending:
    """What is in flight (none: it is done) and the tensor it fills."""

    work: Work | None
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


class GatherPart(NamedTuple):
    """Rows `mine` of each rank, in rank order, fill `gathered`; `mine` may be its place there."""

    gathered: Tensor
    mine: Tensor


class ReducePart(NamedTuple):
    """`whole` is summed over the ranks; rank r receives its rows [r, r + 1) * `num_rows`."""

    whole: Tensor
    num_rows: int


def start_gathers(parts: Sequence[GatherPart], group: Group) -> list[Pending]:
    """Starts all parts, in one kernel where the backend can; one result for each."""
    if isinstance(group, BlockingGroup):
        return [_done(x) for x in start_gathers(parts, group.whole)]
    if isinstance(group, NodeGroup):
        return [Pending(gather_by_node(*x, group), x.gathered) for x in parts]
    whole = wire_group(group)
    start = partial(dist.all_gather_into_tensor, group=whole, async_op=True)
    return _start_together([partial(start, *x) for x in parts], [x.gathered for x in parts], whole)


def start_reduces(parts: Sequence[ReducePart], group: Group) -> list[Pending]:
    """Starts all parts, in one kernel where the backend can; one result for each."""
    if isinstance(group, BlockingGroup):
        return [_done(x) for x in start_reduces(parts, group.whole)]
    mine = [x.whole.new_empty((x.num_rows, *x.whole.shape[1:])) for x in parts]
    pairs = [(at, x.whole) for at, x in zip(mine, parts, strict=True)]
    if isinstance(group, NodeGroup):
        return [Pending(reduce_by_node(at, x, group), at) for at, x in pairs]
    whole = wire_group(group)
    start = partial(dist.reduce_scatter_tensor, group=whole, async_op=True)
    return _start_together([partial(start, *pair) for pair in pairs], mine, whole)


def _start_together(
    starts: Sequence[Callable[[], Work | None]], tensors: Sequence[Tensor], group: dist.ProcessGroup
) -> list[Pending]:
    """Several collectives of one kind as one kernel.

    A second kernel would begin when the first one ends, and what is computed meanwhile be queued
    behind it where the device has one queue (CUDA_DEVICE_MAX_CONNECTIONS=1).
    """
    if len(starts) < 2 or not _starts_together(tensors[0], group):
        return [Pending(start(), x) for start, x in zip(starts, tensors, strict=True)]
    with _coalescing_manager(group, async_ops=True) as everything:
        for start in starts:
            start()
    return [Pending(everything, x) for x in tensors]


def _starts_together(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether the backend has coalesced collectives: gloo has none for tensors on a GPU."""
    return not tensor.is_cuda or dist.get_backend(group) != "gloo"


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
