"""The process groups of one context group, built once and passed as arguments.

Specified by tests/comm/test_groups.py.
"""

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class LocalGroup:
    """A group of this process alone; needs no torch.distributed."""

    def size(self) -> int:
        """Always 1."""
        return 1

    def rank(self) -> int:
        """Always 0."""
        return 0


Group = dist.ProcessGroup | LocalGroup


@dataclass(frozen=True)
class BlockGroups:
    """Groups of the ranks that share one sample.

    `context` has P ranks, one for each share of corrupted blocks. `clean_shards` has the C ranks
    that together hold the clean rows once; `clean_replicas` the P // C ranks with equal clean rows.
    Context rank i holds clean shard i % C.
    Raises: ValueError if the sizes do not multiply.
    """

    context: Group
    clean_shards: Group
    clean_replicas: Group

    def __post_init__(self) -> None:
        if self.clean_shards.size() * self.clean_replicas.size() != self.context.size():
            raise ValueError(
                f"clean_shards has {self.clean_shards.size()} ranks and clean_replicas "
                f"{self.clean_replicas.size()}; their product must be the context group's "
                f"{self.context.size()}."
            )
        if self.rank % self.num_clean_shards != self.clean_shards.rank():
            raise ValueError(
                f"context rank {self.rank} must be rank {self.rank % self.num_clean_shards} of its "
                f"clean-shard group, not {self.clean_shards.rank()}; make clean-shard groups of "
                "adjacent ranks."
            )

    @classmethod
    def single(cls) -> "BlockGroups":
        """Groups of one process that does not share its sample."""
        return cls(LocalGroup(), LocalGroup(), LocalGroup())

    @property
    def num_ranks(self) -> int:
        """P, the ranks that share one sample."""
        return self.context.size()

    @property
    def rank(self) -> int:
        """This process's rank in the context group."""
        return self.context.rank()

    @property
    def num_clean_shards(self) -> int:
        """C, the shards of the clean rows."""
        return self.clean_shards.size()

    @property
    def clean_replica(self) -> int:
        """Which copy of its clean shard this process holds."""
        return self.clean_replicas.rank()
