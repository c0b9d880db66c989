"""Buffers of an exchange are cut where its copies say, and what is sent is packed once."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bp.comm import clean_kv
from megatron_bp.comm.clean_kv import CleanGather, _cuts
from megatron_bp.layout.exchange import Copy, SlabExchange
from megatron_bp.layout.plan import PlanRequest, make_plan


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int]:
    """(start, length) of runs that do not overlap, in any order, some empty; and all rows."""
    spans, at = [], 0
    for gap, length in draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=5)):
        spans.append((at + gap, length))
        at += gap + length
    return draw(st.permutations(spans)), at + draw(st.integers(0, 2))


@settings(max_examples=60, deadline=None)
@given(sources=runs(), targets=runs())
def test_cuts_are_the_runs_in_their_order_and_what_is_between(
    sources: tuple[list[tuple[int, int]], int], targets: tuple[list[tuple[int, int]], int]
) -> None:
    both = list(zip(sources[0], targets[0], strict=False))
    copies = tuple(Copy(a, b, min(n, m)) for (a, n), (b, m) in both)
    for cut, starts, num_rows in zip(
        _cuts(copies, sources[1], targets[1]),
        zip(*((x.source, x.target) for x in copies), strict=True) if copies else ((), ()),
        (sources[1], targets[1]),
        strict=True,
    ):
        x = torch.arange(num_rows)
        want = [x[a : a + copy.length].tolist() for a, copy in zip(starts, copies, strict=True)]
        assert [piece.tolist() for piece in cut.of(x)] == want
        gaps = [row for gap in cut.gaps_of(x) for row in gap.tolist()]
        assert gaps == sorted(set(range(num_rows)) - {row for rows in want for row in rows})


@pytest.mark.parametrize("length", [64, 60])
def test_what_a_gather_sends_is_packed_for_its_buffer_only_where_chunks_are_whole(
    length: int,
) -> None:
    """At 60 tokens the last chunk is shorter than what is sent for it."""
    plan = make_plan(PlanRequest(length, 4, num_ranks=2, num_clean_shards=2), 0)
    exchange, clean = plan.exchange, plan.rows.num_clean
    assert isinstance(exchange, SlabExchange)
    k = torch.arange(1.0, clean + 1)[:, None, None, None].expand(-1, 1, 1, 2)
    group = mock.Mock(spec=dist.ProcessGroup)
    with (
        mock.patch.object(
            clean_kv, "start_gathers", return_value=[mock.Mock(), mock.Mock()]
        ) as sent,
        mock.patch.object(clean_kv, "pack", wraps=clean_kv.pack) as packed,
    ):
        gather = CleanGather(k, -k, exchange, group, together=True)
    (parts, _), _ = sent.call_args
    whole = {(x.source, x.length) for x in exchange.own}
    more = [x for x in exchange.slabs if (x.local_row, x.length) not in whole]
    assert packed.call_count == len(exchange.own) + len(more)
    assert bool(more) is (length == 60)
    for part, slab in zip(parts, exchange.slabs, strict=True):
        rows = torch.arange(slab.local_row, slab.local_row + slab.length) + 1.0
        assert torch.equal(part.mine[:, 0, 0, 0, 0], rows)
        assert torch.equal(part.mine[:, 0, 1, 0, 0], -rows)
    assert gather.buffer_SZ2MH.shape[0] == exchange.num_buffer_rows
