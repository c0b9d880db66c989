"""The block-parallel view of Megatron's parallel state: accessors in Megatron's naming, no state
of its own.

Megatron's context-parallel axis carries the context group (`arguments.prepare`), its hierarchical
groups are the clean shards and the clean replicas. Everything here is derived from
megatron.core.parallel_state on each call, so there is nothing to keep in step. Specified by
tests/mcore/test_parallel_state.py.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_bp.comm.groups import BlockGroups, BlockingGroup, Group, LocalGroup
from megatron_bp.comm.hierarchical import split_by_node


def get_block_parallel_group() -> dist.ProcessGroup:
    """Returns the group of the P ranks that share one sample, in block-parallel rank order."""
    return parallel_state.get_context_parallel_group()


def get_block_parallel_world_size() -> int:
    """Returns P, the number of ranks that share one sample."""
    return int(parallel_state.get_context_parallel_world_size())


def get_block_parallel_rank() -> int:
    """Returns this process's rank in the block-parallel group."""
    return int(parallel_state.get_context_parallel_rank())


def get_block_parallel_global_ranks() -> list[int]:
    """Returns the global ranks of the block-parallel group, in block-parallel rank order."""
    return list(parallel_state.get_context_parallel_global_ranks())


def get_clean_shard_group() -> dist.ProcessGroup:
    """Returns the group of the C adjacent ranks that together hold the clean rows once.

    Raises: RuntimeError if Megatron was initialised without it.
    """
    return _hierarchical_groups()[0]


def get_clean_replica_group() -> dist.ProcessGroup:
    """Returns the group of the P // C ranks that hold the same clean rows.

    Raises: RuntimeError if Megatron was initialised without it.
    """
    return _hierarchical_groups()[1]


@dataclass(frozen=True)
class Links:
    """How the ranks of a context group are connected, and whether that is used.

    `ranks_per_node` is the number of adjacent global ranks of one node; 0 treats all ranks alike,
    -1 tells nodes by host name. Without `overlap` every collective is waited for at once.
    """

    ranks_per_node: int = 0
    overlap: bool = True


def make_block_groups(pg_collection: Any = parallel_state, links: Links = Links()) -> BlockGroups:
    """Returns this process's groups, from a ProcessGroupCollection or Megatron's own state.

    Collective over the context group: hosts are compared, and process groups made if `links` has
    nodes.
    Raises: ValueError if the ranks do not fill their nodes.
    """
    if pg_collection is parallel_state:
        context, hierarchy = get_block_parallel_group(), _hierarchical_groups
    else:
        context, hierarchy = pg_collection.cp, lambda: list(pg_collection.hcp)
    if context.size() == 1:
        return BlockGroups.single()
    shards, replicas = hierarchy()
    hosts = _hosts_of(shards)
    wires, near = _linked(shards, links, hosts), len(set(hosts)) == 1
    # The conventional baseline exchanges corrupted rows over the context group, which is then the
    # group of clean shards.
    whole = wires if shards.size() == context.size() else context
    return BlockGroups(whole, wires, replicas, near)


def _linked(group: dist.ProcessGroup, links: Links, hosts: list[int]) -> Group:
    if group.size() == 1:
        return group
    linked: Group = group
    if links.ranks_per_node:
        nodes = hosts
        if links.ranks_per_node > 0:
            ranks = dist.get_process_group_ranks(group)
            nodes = [rank // links.ranks_per_node for rank in ranks]
        linked = split_by_node(group, nodes)
    if links.overlap:
        return linked
    assert not isinstance(linked, LocalGroup | BlockingGroup), "a process group or its nodes"
    return BlockingGroup(linked)


def _hosts_of(group: dist.ProcessGroup) -> list[int]:
    """The host of each rank of a group, as the first rank on it; collective."""
    hosts: list[Any] = [None] * group.size()
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    return [hosts.index(host) for host in hosts]


def destroy_block_parallel() -> None:
    """Destroys the process groups that block parallelism uses, with the rest of Megatron's."""
    parallel_state.destroy_model_parallel()
    # Megatron forgets these, and the next initialisation would see the old ones.
    parallel_state._HIERARCHICAL_CONTEXT_PARALLEL_GROUPS = None


def _hierarchical_groups() -> list[dist.ProcessGroup]:
    groups = parallel_state.get_hierarchical_context_parallel_groups(check_initialized=False)
    if not groups:
        raise RuntimeError(
            "Megatron was initialised without clean-shard groups; call initialize_model_parallel "
            "with "
            "context_parallel_size=P and hierarchical_context_parallel_sizes=[C, P // C] (see "
            "megatron_bp.mcore.arguments.prepare)"
        )
    return list(groups)
