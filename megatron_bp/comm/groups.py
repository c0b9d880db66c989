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


@dataclass(frozen=True)
class NodeGroup:
    """The ranks of `whole` on several nodes, n adjacent ranks on each of k nodes, n and k over 1.

    `inside` holds the n ranks of this node; `between` one rank of each node, with this rank's place
    in its node.
    Raises: ValueError if the sizes or ranks do not fit.
    """

    whole: dist.ProcessGroup
    inside: dist.ProcessGroup
    between: dist.ProcessGroup

    def __post_init__(self) -> None:
        sizes = self.whole.size(), self.inside.size(), self.between.size()
        if min(sizes) < 2 or sizes[0] != sizes[1] * sizes[2]:
            raise ValueError(
                f"a group of {sizes[0]} ranks cannot be {sizes[2]} nodes of {sizes[1]} ranks; the "
                "product must be its size and both must be at least 2."
            )
        if self.whole.rank() != self.node * sizes[1] + self.inside.rank():
            raise ValueError(
                f"rank {self.whole.rank()} must be rank {self.whole.rank() % sizes[1]} of node "
                f"{self.whole.rank() // sizes[1]}, not rank {self.inside.rank()} of node "
                f"{self.node}; put adjacent ranks on a node."
            )

    def size(self) -> int:
        """Ranks on all nodes."""
        return self.whole.size()

    def rank(self) -> int:
        """This process's rank in `whole`."""
        return self.whole.rank()

    @property
    def num_nodes(self) -> int:
        """k, the nodes."""
        return self.between.size()

    @property
    def ranks_per_node(self) -> int:
        """n, the ranks of one node."""
        return self.inside.size()

    @property
    def node(self) -> int:
        """The node of this process."""
        return self.between.rank()


@dataclass(frozen=True)
class BlockingGroup:
    """A group over which nothing overlaps, for comparison only.

    A gather is waited for at once; gradients are reduced when all of them are computed.
    """

    whole: dist.ProcessGroup | NodeGroup

    def size(self) -> int:
        """Ranks of the group."""
        return self.whole.size()

    def rank(self) -> int:
        """This process's rank in the group."""
        return self.whole.rank()


Group = dist.ProcessGroup | LocalGroup | NodeGroup | BlockingGroup


@dataclass(frozen=True)
class BlockGroups:
    """Groups of the ranks that share one sample.

    `context` has P ranks, one for each share of corrupted blocks. `clean_shards` has the C ranks
    that together hold the clean rows once; `clean_replicas` the P // C ranks with equal clean rows.
    Context rank i holds clean shard i % C. `near` says that the clean shards are on one host, so
    that all of them arrive about together.
    Raises: ValueError if the sizes do not multiply.
    """

    context: Group
    clean_shards: Group
    clean_replicas: Group
    near: bool = False

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
        return cls(LocalGroup(), LocalGroup(), LocalGroup(), near=True)

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
