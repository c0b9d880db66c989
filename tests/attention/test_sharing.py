"""Launches that share accumulators give the gradients of launches that do not.

`SharingDense` sums whole tiles as a GPU kernel does: what lies in a tile beyond a launch's rows
gets garbage, so a launch that does not end where a tile does would show.
"""

from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_bp.attention.contract import Cut, Saved, window_mask
from megatron_bp.attention.kernels.dense import DenseKernel, attend_backward
from megatron_bp.attention.lanes import InARow
from megatron_bp.attention.native import NativeRun, Partial, empty_partial
from megatron_bp.attention.own_last import own_last
from megatron_bp.attention.passes import add_rows
from megatron_bp.attention.problems import KeyValue, Problems, Spaces, add_pieces
from megatron_bp.attention.schedule import Pass, make_schedule
from megatron_bp.attention.sharing import RowGroup, Shared, SharedLaunch, TileRule, Tiles, share
from megatron_bp.attention.untile import by_problem
from megatron_bp.layout.decomposition import KeySpace, Phase
from megatron_bp.layout.plan import PlanRequest, RankPlan, make_plan
from megatron_bp.layout.visibility import CleanRule
from tests.layout.test_decomposition import requests

SAMPLES, HEADS, KV_HEADS, SIZE = 2, 4, 2, 8
SCALE = SIZE**-0.5
GARBAGE = 1e6
FOURS = TileRule(Tiles(4, 4), Tiles(4, 4), 0)


def whole(length: int, tile: int) -> int:
    """`length` in whole tiles."""
    return -(-length // tile) * tile


class DenseShared:
    """See SharedBackward."""

    def __init__(self, like: Tensor, shared: Shared, rule: TileRule) -> None:
        self.shared, self.groups, self.rule = shared, shared.keys, rule
        self.known: tuple[Tensor, ...] = ()  # out [T, Z, N, H], LSE [T, Z, N]
        self.row_sums: dict[int, DenseRows] = {}
        self.sums = [
            torch.zeros(2, x.runs.num_problems * x.padded, *like.shape[1:], dtype=like.dtype)
            for x in shared.keys
        ]

    def prepare(self, dout: Tensor, out: Tensor, lse: Tensor) -> Tensor:
        """See SharedBackward."""
        self.known = out.transpose(0, 1), lse.permute(2, 0, 1)
        return (dout * out).sum(-1).transpose(1, 2)

    def rows(self, group: int, q: Tensor, dout: Tensor) -> "DenseRows":
        """See SharedBackward."""
        assert group not in self.row_sums
        self.row_sums[group] = DenseRows(self, self.shared.rows[group], q, dout)
        return self.row_sums[group]

    def write_rows(self, dq: Tensor) -> None:
        """See SharedBackward."""
        for number, group in enumerate(self.shared.rows):
            rows = self.row_sums.pop(number)
            num_rows = rows.dout.shape[1]
            part = by_problem(rows.dq[:, :num_rows], SAMPLES, group.runs, group.joined)
            add_rows((dq,), group.runs, (part,))

    def write_keys(self, groups: tuple[int, ...], into: KeyValue) -> None:
        """See SharedBackward."""
        for group in groups:
            runs, parts = self.groups[group].runs, self.sums[group]
            in_runs = [x.unflatten(0, (runs.num_problems, -1))[:, : runs.length] for x in parts]
            add_pieces(into, runs, *in_runs)


class DenseRows:
    """See SharedRows; problems [X * samples, Q, heads, H] or samples [samples, T, heads, H]."""

    def __init__(self, work: DenseShared, group: RowGroup, q: Tensor, dout: Tensor) -> None:
        self.work, self.q, self.dout, self.tile = work, q, dout, group.tile
        batch, length, heads, size = dout.shape
        self.dq = torch.zeros(batch, whole(length, group.tile), heads, size, dtype=dout.dtype)
        out, lse = work.known
        self.out, self.lse = out.transpose(0, 1), lse.permute(1, 2, 0)
        for step in group.own:
            at = Problems(step, KV_HEADS)
            self.out, self.lse = at.query(out), at.lse(lse)

    def launch(self, launch: SharedLaunch, k: Tensor, v: Tensor) -> None:
        """See SharedRows."""
        work, rule = self.work, self.work.rule
        assert self.tile == rule.of(launch.window, launch.num_keys).rows
        assert work.groups[launch.group].space is launch.space
        apart = SAMPLES if len(self.dout) > SAMPLES else 0
        mask = window_mask(launch.num_rows, launch.num_keys, launch.window, k.device)
        for x, z in product(range(launch.num_problems), range(SAMPLES)):
            row, key = launch.row + x * launch.row_step, launch.key + x * launch.key_step
            at = launch.offset + x * launch.offset_step
            assert row % self.tile == 0
            assert at % rule.usual.keys == 0
            rows, keys = slice(row, row + launch.num_rows), slice(key, key + launch.num_keys)
            b = slice(z + x * apart, z + x * apart + 1)
            q, out, dout = (t[b, rows] for t in (self.q, self.out, self.dout))
            k_part, v_part = (t[keys, z][None] for t in (k, v))
            saved = Saved(q, k_part, v_part, out, self.lse[b, :, rows])
            dq, dk, dv = attend_backward(dout, saved, mask, SCALE)
            self.dq[b, rows] += dq
            # The rest of the last tile gets what another row's LSE makes of rows of zeros.
            self.dq[b, rows.stop : row + whole(launch.num_rows, self.tile)] = GARBAGE
            assert at + launch.num_keys <= len(work.sums[launch.group][0])
            for into, part in zip(work.sums[launch.group], (dk, dv), strict=True):
                into[at : at + launch.num_keys, z] += part[0]


@dataclass(frozen=True)
class SharingDense(DenseKernel):
    """The plain kernel with launches that share accumulators."""

    rule: TileRule = FOURS

    def shares(self, head_size: int, queries_per_key: int) -> bool:
        """See SharingKernel."""
        return queries_per_key > 1

    def tiles(self, head_size: int) -> TileRule:
        """See SharingKernel."""
        return self.rule

    def share(
        self, like: Tensor, queries_per_key: int, shared: Shared, scale: float
    ) -> DenseShared:
        """See SharingKernel."""
        assert (scale, queries_per_key) == (SCALE, HEADS // KV_HEADS)
        return DenseShared(like, shared, self.rule)


def gradients(plan: RankPlan, kernel: DenseKernel, corrupted_only: bool) -> list[Tensor]:
    """dq and the gradients of clean and own keys, [rows, Z, heads, H]."""
    schedule = make_schedule(plan, corrupted_only, Cut.CHUNKS)
    generator = torch.Generator().manual_seed(5)

    def draw(rows: int, heads: int) -> Tensor:
        return torch.randn(rows, SAMPLES, heads, SIZE, generator=generator, dtype=torch.float64)

    rows = plan.rows.num_rows - schedule.first_row
    q, dout = draw(rows, HEADS), draw(rows, HEADS)
    sizes = (plan.exchange.num_buffer_rows, len(plan.own_coordinate))
    clean, own = (KeyValue(draw(n, KV_HEADS), draw(n, KV_HEADS)) for n in sizes)
    run, keys = NativeRun(kernel, SCALE), (clean, own)
    partial = empty_partial(q, schedule.forward)
    for phase in Phase:
        run.forward(schedule.forward.steps[phase], q, keys, partial, InARow())
    return backward(run, schedule.backward, dout, (q, keys, partial))


def backward(
    run: NativeRun, todo: Pass, dout: Tensor, saved: tuple[Tensor, Spaces, Partial]
) -> list[Tensor]:
    """A pass as a layer runs it, in memory that holds NaN."""
    q, (clean, own), _ = saved
    dq, *flat = (torch.full_like(x, float("nan")) for x in (q, *clean, *own))
    spaces = (KeyValue(*flat[:2]), KeyValue(*flat[2:]))
    rest = run.begin_backward(todo, dout, saved, (dq, spaces))
    for sums in rest.row_sums:
        torch.testing.assert_close(sums, (dout * saved[2].out).sum(-1), rtol=0, atol=1e-13)
    for phase in reversed(Phase):
        run.backward(rest.steps[phase], dout, saved, (dq, spaces), rest.row_sums)
    return [dq, *flat]


@st.composite
def rules(draw: st.DrawFn) -> TileRule:
    """Tiles of a few rows and keys, other ones for long launches or not."""
    keys = draw(st.sampled_from([1, 3, 4]))
    usual, tall = (Tiles(draw(st.sampled_from([1, 2, 4, 5, 8])), keys) for _ in range(2))
    return TileRule(usual, tall, draw(st.sampled_from([0, 8, 1000])))


@settings(max_examples=60, deadline=None)
@given(requests(), rules(), st.booleans())
def test_any_plan_gives_the_gradients_of_separate_launches(
    request: PlanRequest, rule: TileRule, corrupted_only: bool
) -> None:
    plan = make_plan(request, request.num_ranks - 1)
    exact = gradients(plan, DenseKernel(), corrupted_only)
    got = gradients(plan, SharingDense(rule=rule), corrupted_only)
    for a, b in zip(got, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def shared(request: PlanRequest, rule: TileRule, rank: int = 3) -> Shared:
    """What a rank's backward pass can share, small blocks left to another kernel."""
    plan = make_plan(request, rank)
    todo = make_schedule(plan, False, Cut.CHUNKS).backward
    return share(todo, rule, lambda step: step.rows.length <= 32)


def alike(rows: int, keys: int) -> TileRule:
    """The same tiles for all launches."""
    return TileRule(Tiles(rows, keys), Tiles(rows, keys), 0)


LONG = PlanRequest(length=2**16, block_size=32, num_ranks=8, num_clean_shards=8)


@pytest.mark.parametrize("apart", [False, True])
def test_parts_have_every_launch_and_key_group_once_those_of_the_clean_buffer_first(
    apart: bool,
) -> None:
    plan = make_plan(LONG, 3)
    todo = make_schedule(plan, False, Cut.CHUNKS).backward
    if apart:
        todo = own_last(plan, todo)
    found = share(todo, alike(64, 128), lambda _: False)
    first, last = found.parts
    for number, group in enumerate(found.rows):
        mine = [launches for part in (first, last) for i, launches in part.rows if i == number]
        assert sorted(x for launches in mine for x in launches) == sorted(group.launches)
    written = [i for part in (first, last) for _, groups in part.keys for i in groups]
    assert sorted(written) == list(range(len(found.keys)))
    assert all(
        found.keys[i].space is space for space, some in (*first.keys, *last.keys) for i in some
    )
    spaces = [{space for space, _ in part.keys} for part in (first, last)]
    clean, others = {KeySpace.CLEAN}, {KeySpace.OWN, KeySpace.SHARD}
    assert spaces == ([clean, others] if apart else [{*KeySpace} - {KeySpace.SHARD}, set()])


@pytest.mark.parametrize("rank", range(8))
@pytest.mark.parametrize("num_views", [1, 2])
def test_all_large_launches_of_a_long_sample_share_one_buffer_of_rows_and_one_of_keys(
    rank: int, num_views: int
) -> None:
    found = shared(replace(LONG, num_views=num_views), alike(64, 128), rank)
    assert len(found.rows) == len(found.keys) == 1
    assert found.keys[0].runs.store
    assert all(step.rows.length <= 32 for steps in found.rest.steps.values() for step in steps)
    assert found.rest.row_gaps == ()


def test_rows_of_a_shifted_square_are_taken_from_the_start_of_their_chunk() -> None:
    launches = shared(LONG, alike(64, 128)).rows[0].launches
    squares = [(x.row, x.num_rows, x.num_keys) for x in launches if x.window == (-1, 0)]
    assert squares == [(0, 4096, 4096), (8192, 4096, 4064)]


def test_long_launches_in_taller_tiles_have_rows_of_their_own_but_the_same_keys() -> None:
    found = shared(LONG, TileRule(Tiles(64, 128), Tiles(80, 128), 8192))
    assert [group.tile for group in found.rows] == [64, 80, 80]
    lengths = [[x.num_rows for x in group.launches] for group in found.rows]
    assert lengths == [[4096, 4096], [16384], [8192]]
    assert len(found.keys) == 1


def test_keys_that_no_common_tile_fits_have_buffers_of_their_own() -> None:
    """4096 is no multiple of 48, so only launches with the same first keys share."""
    found = shared(LONG, alike(64, 48), rank=1)
    starts = [group.runs.starts.tolist() for group in found.keys]
    assert len(starts) == 3
    assert [4096, 57344] in starts
    assert all(group.padded % 48 == 0 for group in found.keys)


def test_windows_of_whole_blocks_share_rows_but_only_keys_that_tiles_fit() -> None:
    request = replace(LONG, block_size=256, window=1024)
    found = shared(request, alike(64, 48))
    assert not any(found.rest.steps.values())
    assert len(found.rows) == 1
    assert len(found.keys) == 4
    assert {group.space for group in found.keys} == {KeySpace.CLEAN, KeySpace.OWN}
    clean, own = shared(request, alike(64, 64)).keys
    assert (clean.space, own.space) == (KeySpace.CLEAN, KeySpace.OWN)
    assert (clean.runs.starts.tolist(), clean.runs.length) == ([0, 5119], 5119)
    assert clean.runs.store


@pytest.mark.parametrize("corrupted_only", [False, True])
@pytest.mark.parametrize("keys", [32, 48])
def test_blocks_in_the_keys_of_larger_launches_give_the_same_gradients(
    keys: int, corrupted_only: bool
) -> None:
    request = PlanRequest(
        length=3072, block_size=128, num_ranks=4, num_clean_shards=4, window=300, num_views=2
    )
    plan = make_plan(request, 1)  # its chunks lie apart, and so do the keys of their windows
    exact = gradients(plan, DenseKernel(), corrupted_only)
    got = gradients(plan, SharingDense(rule=alike(64, keys)), corrupted_only)
    for a, b in zip(got, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def test_a_launch_that_ends_inside_a_tile_has_rows_of_its_own() -> None:
    found = shared(replace(LONG, length=2**16 - 96), alike(64, 128), rank=0)
    together = [x for group in found.rows if not group.own for x in group.launches]
    assert all((x.row + x.num_rows) % 64 == 0 for x in together)
    assert sum(len(group.own) for group in found.rows) > 0
    assert all(step.rows.length <= 32 for steps in found.rest.steps.values() for step in steps)


def test_block_causal_clean_rows_share_as_well() -> None:
    found = shared(replace(LONG, clean_rule=CleanRule.BLOCK_CAUSAL), alike(64, 128))
    launches = found.rows[0].launches
    assert sum(x.num_problems * x.num_rows for x in launches if x.window == (-1, 0)) == 2**14
    assert all(x.row % 64 == 0 for x in launches)
