"""Predicts work and traffic: attention pairs of each rank and bytes on the wire.

Bytes are counted the way collectives move them, for each rank: an all-gather sends input * (n - 1),
a reduce-scatter sends output * (n - 1) (its input is n outputs), an all-to-all sends its remote
payload. Numbers here come from plans and are exact for any documents; pair_counts.py counts the
same for all ranks of an unpacked sample without plans, flops.py, memory.py and traffic.py count a
whole step. Specified by tests/layout/test_cost.py; tests/comm measures the same numbers.
"""

from dataclasses import dataclass

import numpy as np

from megatron_bp.layout.dealing import block_costs
from megatron_bp.layout.exchange import SlabExchange
from megatron_bp.layout.plan import PlanRequest, RankPlan, make_plan


@dataclass(frozen=True)
class LayerShape:
    """Key/value shape of one attention layer on one tensor-parallel rank.

    Units: `bytes_per_element` bytes of K/V on the wire, `grad_bytes_per_element` of their
    gradients; `micro_batch` samples.
    """

    num_kv_heads: int
    head_size: int
    micro_batch: int = 1
    bytes_per_element: int = 2
    grad_bytes_per_element: int = 2

    @property
    def row_elements(self) -> int:
        """K and V elements of one row position."""
        return 2 * self.micro_batch * self.num_kv_heads * self.head_size


@dataclass(frozen=True)
class Traffic:
    """Bytes one rank sends for one layer: one gather, and one reduce-scatter."""

    gather_bytes: int
    reduce_bytes: int

    def step_bytes(self, num_gathers: int) -> int:
        """Bytes of a training step with `num_gathers` gathers (2 under full recompute)."""
        return num_gathers * self.gather_bytes + self.reduce_bytes


def _rows(plan: RankPlan) -> tuple[int, int]:
    """Rows sent in the forward pass and in the backward pass."""
    exchange, corrupted = plan.exchange, 0
    if plan.request.gather_corrupted:
        corrupted = plan.request.num_views * plan.own_exchange.sent_rows
    if isinstance(exchange, SlabExchange):
        return exchange.sent_rows + corrupted, exchange.sent_rows + corrupted
    return exchange.sent_rows + corrupted, sum(exchange.receive_counts) + corrupted


def layer_traffic(plan: RankPlan, shape: LayerShape) -> Traffic:
    """Bytes that `plan.rank` sends for one attention layer of `shape`."""
    forward, backward = _rows(plan)
    return Traffic(
        gather_bytes=forward * shape.row_elements * shape.bytes_per_element,
        reduce_bytes=backward * shape.row_elements * shape.grad_bytes_per_element,
    )


def mean_step_bytes(
    request: PlanRequest, shape: LayerShape, num_layers: int, num_gathers: int = 2
) -> float:
    """Bytes sent in a training step by `num_layers` equal layers, averaged over the ranks."""
    sent = [
        layer_traffic(make_plan(request, rank), shape).step_bytes(num_gathers)
        for rank in range(request.num_ranks)
    ]
    return num_layers * sum(sent) / request.num_ranks


def pairs(request: PlanRequest) -> list[int]:
    """Attention pairs (row, key) that each rank computes: the balance of a layout."""
    return [make_plan(request, rank).visibility.num_pairs for rank in range(request.num_ranks)]


def imbalance(request: PlanRequest) -> float:
    """Pairs of the busiest rank over the mean; 1.0 is perfect."""
    of_rank = pairs(request)
    return max(of_rank) * len(of_rank) / sum(of_rank)


def owned_imbalance(plan: RankPlan) -> float:
    """Pairs of the busiest rank over the mean, from ownership alone: one plan and no mask.

    Clean rows count as token-causal and windows are left out, as for dealing.
    """
    clean, corrupted = block_costs(plan.blocks)
    owners, num_ranks = plan.owners, plan.request.num_ranks
    num_shards = owners.clean.num_ranks
    shard_of_chunk = np.empty(owners.clean.chunks_of.size, dtype=np.int64)
    shard_of_chunk[owners.clean.chunks_of] = np.arange(num_shards)[:, None]
    chunk = np.searchsorted(owners.clean.bounds, plan.blocks.start, side="right") - 1
    of_shard = np.bincount(shard_of_chunk[chunk], clean, minlength=num_shards)
    load = np.tile(of_shard, num_ranks // num_shards)
    load += np.bincount(owners.rank_of_block, corrupted * plan.request.num_views, num_ranks)
    return float(load.max() * num_ranks / load.sum())
