"""Groups of one context group agree on sizes and ranks, or are refused."""

from dataclasses import dataclass
from typing import Any, cast

import pytest

from megatron_bp.comm.groups import BlockGroups, LocalGroup
from megatron_bp.comm.wires import wire_group


@dataclass(frozen=True)
class Stub:
    """A process group as far as BlockGroups looks: a size and this process's rank."""

    count: int
    index: int

    def size(self) -> int:
        """Number of ranks."""
        return self.count

    def rank(self) -> int:
        """This process's rank."""
        return self.index


def group(count: int, index: int) -> Any:
    """A stub, or the group of this process alone."""
    return LocalGroup() if count == 1 else cast(Any, Stub(count, index))


@pytest.mark.parametrize(("num_ranks", "shards"), [(1, 1), (2, 1), (2, 2), (4, 2), (6, 3)])
def test_context_rank_i_holds_clean_shard_i_modulo_shards(num_ranks: int, shards: int) -> None:
    for rank in range(num_ranks):
        groups = BlockGroups(
            group(num_ranks, rank),
            group(shards, rank % shards),
            group(num_ranks // shards, rank // shards),
        )
        assert (groups.num_ranks, groups.rank) == (num_ranks, rank)
        assert groups.num_clean_shards == shards
        assert groups.clean_replica == rank // shards


def test_one_process_needs_no_process_group() -> None:
    groups = BlockGroups.single()
    assert (groups.num_ranks, groups.rank, groups.num_clean_shards) == (1, 0, 1)
    assert groups.clean_replica == 0


def test_refuses_sizes_that_do_not_multiply() -> None:
    text = "clean_shards has 2 ranks and clean_replicas 1; their product must be .* 4"
    with pytest.raises(ValueError, match=text):
        BlockGroups(group(4, 0), group(2, 0), group(1, 0))


def test_refuses_clean_shard_groups_of_ranks_that_are_not_adjacent() -> None:
    text = "context rank 1 must be rank 1 of its clean-shard group, not 0; .* adjacent ranks"
    with pytest.raises(ValueError, match=text):
        BlockGroups(group(4, 1), group(2, 0), group(2, 1))


def test_a_lone_process_cannot_communicate() -> None:
    text = "this process has no group; pass BlockGroups with process groups, or plan for num_ranks"
    with pytest.raises(ValueError, match=text):
        wire_group(LocalGroup())
