"""Each key buffer gets every row it needs exactly once, and no row that no query sees travels.

The collectives are played by hand on arrays of positions; tests/comm runs the real ones.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from megatron_bp.layout.decomposition import KeySpace
from megatron_bp.layout.exchange import (
    Exchange,
    SlabExchange,
    WindowExchange,
    dense_exchange,
)
from megatron_bp.layout.owners import Ownership, make_chunks
from megatron_bp.layout.plan import PlanRequest, RankPlan, make_plan
from megatron_bp.layout.visibility import CleanRule
from tests.layout.test_decomposition import requests

EMPTY = -9  # a buffer row that nothing has written


class Buffer:
    """A key buffer that holds positions and counts how often each row was written."""

    def __init__(self, rows: int) -> None:
        self.rows = np.full(rows, EMPTY)
        self.writes = np.zeros(rows, dtype=int)

    def write(self, at: np.ndarray, values: np.ndarray) -> None:
        """Writes `values` at rows `at`."""
        self.rows[at] = values
        np.add.at(self.writes, at, 1)


def played(exchanges: Sequence[Exchange], local: Sequence[np.ndarray]) -> list[Buffer]:
    """The key buffer of every shard after the exchange; `local` are the shards' clean rows.

    Rows that a shard copies from itself and receives again from a gather count once.
    """
    buffers = []
    for me in exchanges:
        buffer = Buffer(me.num_buffer_rows)
        if isinstance(me, WindowExchange) or me.num_shards == 1:
            for source, target, length in me.own:
                buffer.write(target + np.arange(length), local[me.shard][source : source + length])
        if isinstance(me, WindowExchange):
            arrived = []
            for other in exchanges:
                assert isinstance(other, WindowExchange)
                sent = np.split(other.send_rows, np.cumsum(other.send_counts)[:-1])
                arrived.append(local[other.shard][sent[me.shard]])
            assert [len(rows) for rows in arrived] == list(me.receive_counts)
            buffer.write(me.receive_rows, np.concatenate(arrived))
        elif me.num_shards > 1:
            for slab in me.slabs:
                where = slice(slab.local_row, slab.local_row + slab.length)
                gathered = np.concatenate([rows[where] for rows in local])
                if slab.in_place_at >= 0:
                    buffer.write(slab.in_place_at + np.arange(len(gathered)), gathered)
                for source, target, length in slab.copies:
                    buffer.write(target + np.arange(length), gathered[source : source + length])
        buffers.append(buffer)
    return buffers


def replica(request: PlanRequest, first: int) -> list[RankPlan]:
    """The plans of the ranks `first`.. that together hold the clean rows once."""
    return [make_plan(request, first + j) for j in range(request.num_clean_shards)]


@settings(max_examples=150, deadline=None)
@given(requests())
def test_every_buffer_row_is_filled_exactly_once_with_its_position(request: PlanRequest) -> None:
    for first in range(0, request.num_ranks, request.num_clean_shards):
        plans = replica(request, first)
        local = [plan.rows.position[: plan.rows.num_clean] for plan in plans]
        for plan, buffer in zip(plans, played([p.exchange for p in plans], local), strict=True):
            position = plan.exchange.buffer_position
            real = position >= 0
            np.testing.assert_array_equal(buffer.rows[real], position[real])
            assert (buffer.writes[real] == 1).all()
            assert (buffer.writes[~real] <= 1).all()
            assert np.isin(buffer.rows[~real], (EMPTY, -1)).all()
            assert len(np.unique(position[real])) == real.sum()


@settings(max_examples=150, deadline=None)
@given(requests())
def test_own_rows_are_in_the_buffer_before_anything_arrives(request: PlanRequest) -> None:
    for rank in range(request.num_ranks):
        plan = make_plan(request, rank)
        local = plan.rows.position[: plan.rows.num_clean]
        placed = []
        for source, target, length in plan.exchange.own:
            np.testing.assert_array_equal(
                plan.exchange.buffer_position[target : target + length],
                local[source : source + length],
            )
            placed += local[source : source + length].tolist()
        assert sorted(placed) == sorted(local[local >= 0].tolist())


@settings(max_examples=150, deadline=None)
@given(requests())
def test_the_buffer_holds_every_clean_row_that_a_query_sees(request: PlanRequest) -> None:
    for rank in range(request.num_ranks):
        plan = make_plan(request, rank)
        assert seen_positions(plan) <= set(plan.exchange.buffer_position.tolist())
        for launch in plan.launches:
            for run in launch.keys:
                if run.space is KeySpace.CLEAN:
                    rows = run.starts[:, None] + np.arange(run.length)
                    assert (plan.exchange.buffer_position[rows] >= 0).all()


def seen_positions(plan: RankPlan) -> set[int]:
    """Clean positions that some row of the plan sees."""
    seen = plan.visibility
    return {p for lo, hi in zip(seen.clean_lo, seen.clean_hi, strict=True) for p in range(lo, hi)}


@settings(max_examples=200, deadline=None)
@given(requests())
def test_a_windowed_exchange_moves_only_rows_that_some_query_sees(request: PlanRequest) -> None:
    windowed = replace(request, window=request.window or 4, windowed_exchange=True)
    for first in range(0, windowed.num_ranks, windowed.num_clean_shards):
        plans = replica(windowed, first)
        for plan in plans:
            if not isinstance(plan.exchange, WindowExchange):
                assert windowed.num_clean_shards == 1 or windowed.gather_corrupted
                continue
            exchange = plan.exchange
            own = set(plan.rows.position[: plan.rows.num_clean].tolist())
            received = exchange.buffer_position[exchange.receive_rows]
            assert set(received.tolist()) == seen_positions(plan) - own
            assert exchange.send_counts[plan.shard] == exchange.receive_counts[plan.shard] == 0
            for other in plans:
                assert isinstance(other.exchange, WindowExchange)
                assert (
                    exchange.send_counts[other.shard] == other.exchange.receive_counts[plan.shard]
                )


@pytest.mark.parametrize("rule", CleanRule)
@pytest.mark.parametrize("num_views", [1, 2])
def test_a_window_of_one_sends_nothing(rule: CleanRule, num_views: int) -> None:
    request = PlanRequest(
        length=48,
        block_size=3,
        num_ranks=2,
        num_clean_shards=2,
        num_views=num_views,
        clean_rule=rule,
        window=1,
    )
    for rank in range(2):
        exchange = make_plan(request, rank).exchange
        assert isinstance(exchange, WindowExchange)
        assert exchange.sent_rows == 0
        assert sum(exchange.receive_counts) == 0


@pytest.mark.parametrize("rule", CleanRule)
@pytest.mark.parametrize(("num_ranks", "window"), [(2, 2), (2, 7), (3, 16), (4, 9), (8, 17)])
def test_aligned_windows_send_their_rows_once_per_remote_chunk_edge(
    num_ranks: int, window: int, rule: CleanRule
) -> None:
    """2P chunks, less the first (no history) and chunk P (its left neighbour is on its rank)."""
    request = PlanRequest(
        length=2 * num_ranks * 16,
        block_size=4,
        num_ranks=num_ranks,
        num_clean_shards=num_ranks,
        window=window,
        clean_rule=rule,
    )
    exchanges = [make_plan(request, rank).exchange for rank in range(num_ranks)]
    sent = sum(exchange.sent_rows for exchange in exchanges)
    assert sent == (window - 1) * (2 * num_ranks - 2)


def test_the_early_slab_of_an_aligned_sample_is_gathered_in_place_and_the_late_one_mirrored() -> (
    None
):
    request = PlanRequest(length=96, block_size=4, num_ranks=3, num_clean_shards=3)
    for rank in range(3):
        exchange = make_plan(request, rank).exchange
        assert isinstance(exchange, SlabExchange)
        early, late = exchange.slabs
        assert (early.length, early.in_place_at, early.copies) == (16, 0, ())
        assert late.in_place_at == -1
        assert late.copies == ((0, 80, 16), (16, 64, 16), (32, 48, 16))
        np.testing.assert_array_equal(exchange.buffer_position, np.arange(96))
        assert exchange.sent_rows == 2 * 32


@settings(max_examples=150, deadline=None)
@given(requests())
def test_the_early_slab_of_one_run_of_blocks_needs_no_copy(request: PlanRequest) -> None:
    dense = replace(request, documents=(), prompts=(), windowed_exchange=False)
    for rank in range(request.num_ranks):
        exchange = make_plan(dense, rank).exchange
        assert isinstance(exchange, SlabExchange)
        assert (exchange.slabs[0].in_place_at, exchange.slabs[0].copies) == (0, ())


def test_contiguous_ownership_is_gathered_beside_both_times() -> None:
    blocks = PlanRequest(length=32, block_size=4).blocks
    chunks = make_chunks(blocks, 2, Ownership.CONTIGUOUS)
    exchange = dense_exchange(chunks, 1)
    assert [slab.in_place_at for slab in exchange.slabs] == [-1, -1]
    assert exchange.slabs[0].copies == ((0, 0, 8), (8, 16, 8))
    assert exchange.slabs[1].copies == ((0, 8, 8), (8, 24, 8))


def test_one_shard_sends_nothing() -> None:
    exchange = make_plan(PlanRequest(length=32, block_size=4, num_ranks=4), 2).exchange
    assert exchange.num_shards == 1
    assert exchange.sent_rows == 0
