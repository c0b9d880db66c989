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
    """What is in flight (none: it is done) and the tensor it fills.

    It also holds what is read meanwhile, whose memory must not be used again before `wait`.
    """

    work: Work | None
    tensor: Tensor
    reads: tuple[Tensor, ...] = ()

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
    """`whole` is summed over the ranks; `mine` of rank r receives its rows [r, r + 1) * len."""

    mine: Tensor
    whole: Tensor


def reduces_at_once(group: Group) -> bool:
    """Whether launches can run beside a reduction: it is one kernel, and starts when it is told.

    Where a device has one queue, launches would stand behind the second step of a reduction that
    is done by node until the last rank has taken part in the first.
    """
    return isinstance(group, dist.ProcessGroup)


def start_gathers(parts: Sequence[GatherPart], group: Group) -> list[Pending]:
    """Starts all parts, in one kernel where the backend can; one result for each."""
    if isinstance(group, BlockingGroup):
        return [_done(x) for x in start_gathers(parts, group.whole)]
    if isinstance(group, NodeGroup):
        return [Pending(gather_by_node(*x, group), x.gathered) for x in parts]
    return _start_together(dist.all_gather_into_tensor, list(parts), wire_group(group))


def start_reduces(parts: Sequence[ReducePart], group: Group) -> list[Pending]:
    """Starts all parts, in one kernel where the backend can; one result for each."""
    if isinstance(group, BlockingGroup):
        return [_done(x) for x in start_reduces(parts, group.whole)]
    if isinstance(group, NodeGroup):
        return [Pending(reduce_by_node(*x, group), x.mine) for x in parts]
    return _start_together(dist.reduce_scatter_tensor, list(parts), wire_group(group))


def _start_together(
    collective: Callable[..., Work | None],
    pairs: Sequence[tuple[Tensor, Tensor]],
    group: dist.ProcessGroup,
) -> list[Pending]:
    """One collective for each pair (output, input), as one kernel.

    A second kernel would begin when the first one ends, and what is computed meanwhile be queued
    behind it where the device has one queue (CUDA_DEVICE_MAX_CONNECTIONS=1; docs/bench/nccl.md).
    """
    start = partial(collective, group=group, async_op=True)
    if len(pairs) < 2 or not _starts_together(pairs[0][0], group):
        return [Pending(start(*pair), pair[0], pair[1:]) for pair in pairs]
    with _coalescing_manager(group, async_ops=True) as everything:
        for pair in pairs:
            start(*pair)
    return [Pending(everything, pair[0], pair[1:]) for pair in pairs]


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
    return Pending(work, received, (sent,))


def _done(pending: Pending) -> Pending:
    pending.wait()
    return Pending(None, pending.tensor)
