"""Knows which ranks of a pipeline stage form each group, and which of them are slow.

Megatron's order of ranks: tensor fastest, then context, data and pipeline; clean shards are
adjacent context ranks, experts are dealt over context and data ranks. Specified by
tests/planning/test_simulate_links.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron_bp.layout.run_shape import Topology
from megatron_bp.planning.events import Groups, Seconds, alone
from megatron_bp.planning.simulate_links import Placement


@dataclass(frozen=True)
class Slow:
    """A global rank whose compute or links take `compute` or `link` times as long.

    Raises: ValueError for factors that are not positive.
    """

    rank: int
    compute: float = 1.0
    link: float = 1.0

    def __post_init__(self) -> None:
        if min(self.compute, self.link) <= 0 or self.rank < 0:
            raise ValueError(
                f"slow rank {self.rank} with factors {self.compute} and {self.link}: the rank must "
                "not be negative and factors must be positive; use for example rank 3, compute 1.2."
            )


@dataclass(frozen=True, eq=False)
class Mesh:
    """The groups of one stage's ranks; every stage has the same. `num_ranks` is R = T * P * D."""

    topology: Topology

    @property
    def num_ranks(self) -> int:
        """R, the ranks of a stage."""
        topology = self.topology
        return topology.tensor * topology.context * topology.data

    @property
    def _ids(self) -> NDArray[np.int64]:
        topology = self.topology
        shape = topology.data, topology.context, topology.tensor
        return np.arange(self.num_ranks).reshape(shape)

    @cached_property
    def single(self) -> Groups:
        """Every rank for itself."""
        return alone(self.num_ranks)

    @cached_property
    def tensor(self) -> Groups:
        """Ranks that split matrices."""
        return Groups(self._ids.reshape(-1, self.topology.tensor))

    @cached_property
    def context(self) -> Groups:
        """Ranks that share a sample."""
        return Groups(self._ids.transpose(0, 2, 1).reshape(-1, self.topology.context))

    @cached_property
    def shards(self) -> Groups:
        """Ranks that together hold the clean rows once."""
        return Groups(self.context.ranks.reshape(-1, self.topology.shards))

    @cached_property
    def data(self) -> Groups:
        """Ranks that hold the same weights: data and context ranks."""
        return Groups(self._ids.transpose(2, 0, 1).reshape(self.topology.tensor, -1))

    @cached_property
    def expert(self) -> Groups:
        """Ranks that share the experts."""
        return Groups(self.data.ranks.reshape(-1, self.topology.expert))

    @cached_property
    def expert_data(self) -> Groups:
        """Ranks that hold the same experts."""
        tensor, expert = self.topology.tensor, self.topology.expert
        ranks = self.data.ranks.reshape(tensor, -1, expert).transpose(0, 2, 1)
        return Groups(ranks.reshape(tensor * expert, -1))

    def of_context(self, values: NDArray[np.float64]) -> Seconds:
        """A value of each context rank, [P], for all ranks of the stage, [R]."""
        topology = self.topology
        shape = topology.data, topology.context, topology.tensor
        return np.broadcast_to(values[None, :, None], shape).ravel()


def slow_factors(
    slow: tuple[Slow, ...], num_ranks: int, stage: int, factor: Callable[[Slow], float]
) -> Seconds:
    """How many times as long each rank of a stage takes, [R]."""
    found = np.ones(num_ranks)
    for one in slow:
        if one.rank // num_ranks == stage:
            found[one.rank % num_ranks] *= factor(one)
    return found


def placements(mesh: Mesh, node_size: int) -> dict[str, Placement]:
    """How each kind of group of two ranks or more lies on nodes, by its name in `Mesh`."""
    names = ("tensor", "shards", "context", "expert", "data", "expert_data")
    found = {name: getattr(mesh, name) for name in names}
    return {
        name: Placement.of(groups, node_size) for name, groups in found.items() if groups.size > 1
    }
