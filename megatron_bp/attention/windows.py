"""The launches of the `native` strategy under a sliding window.

All rows of a block see the same clean keys, those of the window before the block. If a block fills
a kernel's tile that is one unmasked problem a block, and another one for the block itself: nothing
is masked, at the price of reading each key for every block whose window holds it. A forward kernel
may fill its tile with all query heads of a key head (`KernelCaps.packs_heads`). Small blocks keep
the plan's shifted launches, which read a key once. Specified by tests/attention/test_prefix.py.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from megatron_bp.layout.decomposition import Availability, KeyRun, KeySpace, Launch, Phase
from megatron_bp.layout.exchange import WindowExchange
from megatron_bp.layout.plan import RankPlan
from megatron_bp.layout.visibility import CleanRule, CorruptedRule

TILE = 128
"""Rows of a kernel's tile: blocks of at least so many rows get problems of their own."""


class _Problem(NamedTuple):
    """`num_rows` local rows against one run of keys, in positions or own coordinates."""

    row: int
    num_rows: int
    space: KeySpace
    lo: int
    hi: int
    right: int


def by_block(plan: RankPlan, launches: list[Launch]) -> list[Launch]:
    """Launches of whole blocks that cover what `launches` (some of the plan's) cover."""
    by_token = plan.request.clean_rule is CleanRule.TOKEN_CAUSAL
    num_clean, clean_too = plan.rows.num_clean, False
    found = []
    for launch in launches:
        clean = launch.rows < num_clean
        clean_too |= bool(clean.any()) and not by_token
        if by_token and clean.any():
            found.append(launch.only(clean))
    by_window = isinstance(plan.exchange, WindowExchange)
    own_ready = Phase.LATE if plan.request.gather_corrupted else Phase.LOCAL
    available = Availability(plan.owners.clean, plan.shard, by_window, own_ready)
    groups: dict[tuple[int, KeySpace, int, int, Phase, Phase], list[_Problem]] = defaultdict(list)
    for x in _problems(plan, 0 if clean_too else num_clean):
        ready, slab = own_ready, Phase.LOCAL
        if x.space is KeySpace.CLEAN:
            ready, slab = available.ready(x.lo, x.hi), available.slab(x.lo, x.hi)
        groups[(x.num_rows, x.space, x.hi - x.lo, x.right, ready, slab)].append(x)
    found += [_launch(plan, members, *key[-2:]) for key, members in groups.items()]
    # A window's keys come at once: waiting for them all costs less than two launches more.
    return merge_alike(found, lambda x: ()) if by_window else found


def _problems(plan: RankPlan, first_row: int) -> Iterator[_Problem]:
    """What each block of the local rows sees, from `first_row` on."""
    rows, blocks, window = plan.rows, plan.blocks, plan.request.window
    right = 0 if plan.request.corrupted_rule is CorruptedRule.CAUSAL else -1
    columns = np.stack([rows.stream, rows.block])[:, first_row:]
    cut = first_row + 1 + np.flatnonzero((np.diff(columns) != 0).any(0))
    for part in np.split(np.arange(first_row, rows.num_rows), cut - first_row):
        if not len(part) or rows.stream[part[0]] < 0:
            continue
        row, block = int(part[0]), int(rows.block[part[0]])
        start, stop = int(blocks.start[block]), int(blocks.stop[block])
        lo = max(int(blocks.document_start[block]), start - (window - 1))
        if rows.stream[row] == 0:
            yield _Problem(row, len(part), KeySpace.CLEAN, lo, stop, -1)
            continue
        if lo < start:
            yield _Problem(row, len(part), KeySpace.CLEAN, lo, start, -1)
        base = (int(rows.stream[row]) - 1) * blocks.length
        yield _Problem(row, len(part), KeySpace.OWN, base + start, base + stop, right)


def _launch(plan: RankPlan, members: list[_Problem], ready: Phase, slab: Phase) -> Launch:
    first = members[0]
    own = first.space is KeySpace.OWN
    names = plan.own_coordinate if own else plan.exchange.buffer_position
    row_of = np.full(int(names.max(initial=-1)) + 1, -1, dtype=np.int64)
    row_of[names[names >= 0]] = np.flatnonzero(names >= 0)
    starts, last = (row_of[[x.lo for x in members]], row_of[[x.hi - 1 for x in members]])
    length = first.hi - first.lo
    assert (last - starts == length - 1).all(), "keys of a block are not one run of the buffer"
    rows = np.array([x.row for x in members], dtype=np.int64)
    return Launch(
        rows, first.num_rows, (KeyRun(first.space, starts, length),), -1, first.right, ready, slab
    )


def later_together(launches: list[Launch]) -> list[Launch]:
    """The launches, with problems of one shape in one launch at the last phase.

    Near and far ends of a block's window become launches of the same blocks, so that one kernel
    can run both. Splitting either by phase gains nothing, because the large launches wait for the
    same keys.
    """
    launches = merge_alike(launches, lambda x: ())
    far = [x for x in launches if is_far_end(x)]
    near = [x for x in launches if not is_far_end(x)]
    found: list[Launch] = []
    for i, end in enumerate(far):
        mine = [np.isin(x.rows + x.num_rows, end.rows + end.num_rows) for x in near]
        group = [x for x, ends in zip(near, mine, strict=True) if ends.any()]
        ready, slab = max(x.ready for x in [end, *group]), max(x.slab for x in [end, *group])
        far[i] = replace(end, ready=ready, slab=slab)
        for x, ends in zip(near, mine, strict=True):
            if ends.any():
                found.append(replace(x.only(ends), ready=ready, slab=slab))
        rest = zip(near, mine, strict=True)
        near = [x.only(~ends) if ends.any() else x for x, ends in rest if not ends.all()]
    return [*near, *found, *far]


def is_far_end(launch: Launch) -> bool:
    """Whether a launch is the far end of windows: square and causal, so a few rows a block."""
    square = len(launch.keys) == 1 and launch.num_keys == launch.num_rows
    return square and (launch.left, launch.right) == (-1, 0)


def merge_alike(launches: list[Launch], apart: Callable[[Launch], Hashable]) -> list[Launch]:
    """The launches, with those of one shape and value of `apart` made one, at their last phase."""
    groups: dict[Hashable, list[Launch]] = defaultdict(list)
    for launch in launches:
        lengths = tuple((run.space, run.length) for run in launch.keys)
        shape = (launch.num_rows, lengths, launch.left, launch.right)
        groups[(shape, apart(launch))].append(launch)
    return [_together(members) for members in groups.values()]


def _together(members: list[Launch]) -> Launch:
    rows = np.concatenate([x.rows for x in members])
    order = np.argsort(rows, kind="stable")
    keys = tuple(
        replace(run, starts=np.concatenate([x.keys[i].starts for x in members])[order])
        for i, run in enumerate(members[0].keys)
    )
    ready, slab = max(x.ready for x in members), max(x.slab for x in members)
    return replace(members[0], rows=rows[order], keys=keys, ready=ready, slab=slab)
