"""Chunks of packed documents are dealt so that the busiest rank is close to the mean."""

from itertools import pairwise

import numpy as np
import pytest

from megatron_bp.layout.blocks import Spans, make_blocks
from megatron_bp.layout.cost import imbalance
from megatron_bp.layout.dealing import block_costs, cut_evenly, deal_by_cost
from megatron_bp.layout.owners import Ownership, make_owners
from megatron_bp.layout.plan import PlanRequest, make_plan
from megatron_bp.layout.visibility import CleanRule

LENGTH, BLOCK = 8192, 32
MIXES = ("log_normal", "short_log_normal", "few_long", "one_long")


def documents(mix: str, seed: int) -> Spans:
    """Documents of a realistic mix, in random order, that fill a sample."""
    drawn = np.random.Generator(np.random.Philox(key=seed))
    lengths: list[int] = []
    while sum(lengths) < LENGTH:
        size = {
            "log_normal": drawn.lognormal(6, 1.2),
            "short_log_normal": drawn.lognormal(4.5, 1),
            "few_long": LENGTH * drawn.uniform(0.2, 0.5) if drawn.random() < 0.08 else 150,
            "one_long": drawn.integers(20, 300) if lengths else 0.6 * LENGTH,
        }[mix]
        lengths.append(int(np.clip(size, 4, LENGTH - sum(lengths))))
    drawn.shuffle(lengths)
    edges = np.concatenate([[0], np.cumsum(lengths)])
    return tuple((int(lo), int(hi)) for lo, hi in pairwise(edges))


def packed(mix: str, seed: int, num_ranks: int, shards: int, **more: object) -> PlanRequest:
    return PlanRequest(
        length=LENGTH,
        block_size=BLOCK,
        num_ranks=num_ranks,
        num_clean_shards=shards,
        documents=documents(mix, seed),
        **more,
    )


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_the_busiest_rank_is_within_five_percent_of_the_mean(mix: str, num_ranks: int) -> None:
    """Exact pairs of the plans, so that the cost that the deal used is checked as well."""
    found = [imbalance(packed(mix, seed, num_ranks, num_ranks)) for seed in range(3)]
    assert max(found) < 1.05


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("views", [1, 2])
def test_replicated_clean_rows_are_balanced_too(shards: int, views: int) -> None:
    for rule in CleanRule:
        request = packed("few_long", 5, 4, shards, num_views=views, clean_rule=rule)
        assert imbalance(request) < 1.05


@pytest.mark.parametrize("mix", MIXES)
def test_no_rank_reserves_many_more_rows_than_its_share(mix: str) -> None:
    """Balance of pairs is not bought with padding rows."""
    for num_ranks in (2, 4):
        rows = make_plan(packed(mix, 1, num_ranks, num_ranks), 0).rows
        assert rows.num_rows * num_ranks / (2 * LENGTH) < 1.05


def test_dealing_from_both_ends_would_not_balance() -> None:
    """What this file is for: the mirrored pairs of equal blocks, on packed documents."""
    blocks = make_blocks(LENGTH, BLOCK, documents("one_long", 3))
    cost = np.add(*block_costs(blocks))
    total = np.concatenate([[0], np.cumsum(cost)])[cut_evenly(blocks, 8)]
    load = np.diff(total)[:4] + np.diff(total)[4:][::-1]
    assert load.max() / load.mean() > 1.3


def test_a_deal_gives_every_rank_one_chunk_of_each_group() -> None:
    cost = np.array([0, 9, 4, 5, 1, 2, 8, 0])
    chunks = deal_by_cost(cost, np.zeros(2, dtype=np.int64))
    np.testing.assert_array_equal(chunks // 2, [[0, 1, 2, 3]] * 2)
    assert sorted(chunks.ravel()) == list(range(8))
    assert cost[chunks].sum(1).tolist() == [15, 14]


def test_a_deal_levels_what_the_ranks_had_before() -> None:
    chunks = deal_by_cost(np.array([3, 7]), np.array([4, 0]))
    assert chunks.tolist() == [[0], [1]]


def test_costs_are_the_pairs_of_a_plan() -> None:
    request = PlanRequest(length=50, block_size=4, documents=((0, 3), (3, 31), (31, 50)))
    plan = make_plan(request, 0)
    clean, corrupted = block_costs(plan.blocks)
    assert clean.sum() + corrupted.sum() == plan.visibility.num_pairs


def test_equal_blocks_of_several_documents_are_dealt_by_cost() -> None:
    blocks = make_blocks(64, 4, ((0, 48), (48, 64)))
    owners = make_owners(blocks, 2, 2, Ownership.DUAL_END)
    load = [np.add(*block_costs(blocks))[owners.blocks_of(rank)].sum() for rank in range(2)]
    assert max(load) / np.mean(load) < 1.05
