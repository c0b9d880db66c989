"""The block-parallel view of Megatron's parallel state: accessors in Megatron's naming, no state
of its own.

Megatron's context-parallel axis carries the context group (`arguments.prepare`), its hierarchical
groups are the clean shards and the clean replicas. Everything here is derived from
megatron.core.parallel_state on each call, so there is nothing to keep in step. Specified by
tests/mcore/test_parallel_state.py.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_bp.comm.groups import BlockGroups


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


def make_block_groups(pg_collection: Any = parallel_state) -> BlockGroups:
    """Returns this process's groups, from a ProcessGroupCollection or Megatron's own state."""
    if pg_collection is parallel_state:
        context, hierarchy = get_block_parallel_group(), _hierarchical_groups
    else:
        context, hierarchy = pg_collection.cp, lambda: list(pg_collection.hcp)
    if context.size() == 1:
        return BlockGroups.single()
    shards, replicas = hierarchy()
    return BlockGroups(context, shards, replicas)


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
