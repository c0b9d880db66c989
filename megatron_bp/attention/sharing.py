"""Launches of a backward pass that share accumulators.

A kernel that sums dQ, dK and dV in fp32 buffers of its own prepares them before each launch and
brings them into rows after it. If all launches of a pass sum in the same buffers, that happens
once, and little is left to add: this module says which launches can, and where in the buffers each
of them lies. Pure integers, computed once a pass and cached.
Kernels sum whole tiles of rows and keys. Launches share rows if they begin and end where tiles do;
a launch that does not, or has tiles of another height, has rows of its own.
Specified by tests/attention/test_sharing.py.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from megatron_bp.attention.contract import NativeKernel, Window
from megatron_bp.attention.problems import KeyValue
from megatron_bp.attention.schedule import Pass, RowBook, Runs, Step
from megatron_bp.layout.decomposition import KeySpace, Phase

MOST_PARTS = 4
"""A launch with problems at uneven distances becomes launches of one problem, up to so many."""


class Tiles(NamedTuple):
    """Rows and keys that a kernel sums at once."""

    rows: int
    keys: int


class TileRule(NamedTuple):
    """A kernel's tiles: `long` for unmasked launches of at least `long_keys` keys, else `usual`."""

    usual: Tiles
    long: Tiles
    long_keys: int

    def of(self, window: Window, num_keys: int) -> Tiles:
        """The tiles of a launch."""
        unmasked = window.left < 0 and window.right < 0
        return self.long if unmasked and num_keys >= self.long_keys else self.usual


class SharedLaunch(NamedTuple):
    """`num_problems` problems at even distances.

    Problem x has `num_rows` rows from `row + x * row_step` on and `num_keys` keys of `space` from
    `key + x * key_step` on; its key gradients are summed in `group`, from row
    `offset + x * offset_step` of the group's buffer on. Key steps of 0: all have the same keys.
    In rows of its own a launch has `row` and `row_step` 0, and problem x is the x-th of them.
    Until it is placed, `group` and the offsets are 0.
    """

    num_problems: int
    row: int
    row_step: int
    num_rows: int
    space: KeySpace
    key: int
    key_step: int
    num_keys: int
    window: Window
    group: int = 0
    offset: int = 0
    offset_step: int = 0

    @property
    def key_starts(self) -> tuple[int, ...]:
        """First keys of the problems, each once."""
        count = self.num_problems if self.key_step else 1
        return tuple(self.key + x * self.key_step for x in range(count))


@dataclass(frozen=True, eq=False)
class KeyGroup:
    """Runs of keys whose gradients share a buffer: run i has its rows [i * padded, ...)."""

    space: KeySpace
    runs: Runs
    padded: int


@dataclass(frozen=True, eq=False)
class RowGroup:
    """Launches whose query gradients share a buffer, in tiles of `tile` rows, and its rows.

    `own` holds the step if it is a single one with rows of its own; else they are all local rows.
    """

    tile: int
    launches: tuple[SharedLaunch, ...]
    runs: Runs
    own: tuple[Step, ...] = ()

    @property
    def joined(self) -> bool:
        """Whether the runs lie one after another in the buffer, as one problem."""
        return bool(self.own) and self.own[0].joined


class Part(NamedTuple):
    """Launches by the number of their row group; then the numbers of key groups to be written."""

    rows: tuple[tuple[int, tuple[SharedLaunch, ...]], ...]
    keys: tuple[tuple[KeySpace, tuple[int, ...]], ...]


@dataclass(frozen=True, eq=False)
class Shared:
    """What can share accumulators, and the rest of the pass, to be run after it.

    `rows` are in the order in which they write query gradients.
    """

    rows: tuple[RowGroup, ...]
    keys: tuple[KeyGroup, ...]
    rest: Pass

    @cached_property
    def parts(self) -> tuple["Part", "Part"]:
        """The two parts of the pass, in turn.

        The first one has the launches at the clean buffer, or all if none are at the shard.
        """
        clean, others = {KeySpace.CLEAN}, set(KeySpace) - {KeySpace.CLEAN}
        if all(x.space is not KeySpace.SHARD for x in self.keys):
            clean, others = clean | others, set()
        return self._part(clean), self._part(others)

    def _part(self, spaces: set[KeySpace]) -> "Part":
        rows = [
            (number, tuple(x for x in group.launches if x.space in spaces))
            for number, group in enumerate(self.rows)
        ]
        keys: dict[KeySpace, tuple[int, ...]] = {}
        for number, group in enumerate(self.keys):
            if group.space in spaces:
                keys[group.space] = (*keys.get(group.space, ()), number)
        return Part(tuple(x for x in rows if x[1]), tuple(sorted(keys.items())))


class SharedRows(Protocol):
    """Sums for a row group."""

    def launch(self, launch: SharedLaunch, k_SZMH: Tensor, v_SZMH: Tensor) -> None:
        """Adds the gradients of a launch's problems."""
        ...


class SharedBackward(Protocol):
    """A backward pass whose launches share accumulators."""

    def prepare(self, dout_ZTNH: Tensor, out_ZTNH: Tensor, lse_ZNT: Tensor) -> Tensor:
        """Before all else: rowsum(dout * out) of all local rows, fp32 (fp64 for fp64) [Z, N, T]."""
        ...

    def rows(self, group: int, q_BQNH: Tensor, dout_BQNH: Tensor) -> SharedRows:
        """Sums for a row group, kept until they are written.

        B are samples, or problems with those of a sample `num_samples` apart.
        """
        ...

    def write_rows(self, dq_TZNH: Tensor) -> None:
        """Writes or adds, as their runs say, the query gradients of all row groups in turn."""
        ...

    def write_keys(self, groups: tuple[int, ...], into: KeyValue) -> None:
        """Writes or adds, as their runs say, the key and value gradients of groups in turn."""
        ...


@runtime_checkable
class SharingKernel(NativeKernel, Protocol):
    """A kernel whose launches can share accumulators."""

    def shares(self, head_size: int, queries_per_key: int) -> bool:
        """Whether it can, for this head size and so many query heads a key/value head."""
        ...

    def tiles(self, head_size: int) -> TileRule:
        """Its tiles."""
        ...

    def share(
        self, like_SZMH: Tensor, queries_per_key: int, shared: Shared, scale: float
    ) -> SharedBackward:
        """A pass over keys like `like_SZMH`."""
        ...


class _Candidate(NamedTuple):
    """A launch that is not placed yet; `own` as in RowGroup."""

    launch: SharedLaunch
    tile: int
    own: tuple[Step, ...] = ()


def share(todo: Pass, rule: TileRule, stays: Callable[[Step], bool]) -> Shared:
    """Splits a backward pass; steps for which `stays` holds are never shared."""
    common = rule.usual
    found: list[_Candidate] = []
    rest: list[tuple[Phase, Step]] = []
    for phase, step in _steps(todo, stays):
        parts = () if stays(step) else _candidates(step, rule, todo.num_rows)
        found += parts
        if not parts:
            rest.append((phase, step))
    if not found:
        return Shared((), (), todo)
    books = {space: RowBook(size) for space, size in todo.num_keys.items()}
    keys: list[KeyGroup] = []
    placed: dict[int, SharedLaunch] = {}
    for space in KeySpace:
        mine = [x.launch for x in found if x.launch.space is space]
        for members, starts, length in _grouped(mine, common.keys):
            padded = -(-length // common.keys) * common.keys
            at = _Runs(starts, length)
            placed |= {id(x): _placed(x, len(keys), at, common.keys) for x in members}
            runs = books[space].write(np.array(starts), length, in_pieces=True)
            keys.append(KeyGroup(space, runs, padded))
    book = RowBook(todo.num_rows)
    rows = _row_groups([(x, placed[id(x.launch)]) for x in found], common.rows, book)
    return Shared(tuple(rows), tuple(keys), todo.reordered(rest, book, books))


def _row_groups(
    found: list[tuple[_Candidate, SharedLaunch]], tile: int, book: RowBook
) -> Iterator[RowGroup]:
    """Launches in row groups, in the order in which they write: those over most rows store."""
    together = tuple(launch for x, launch in found if not x.own)
    if together:
        runs = book.write(np.zeros(1, dtype=np.int64), len(book.touched), in_pieces=False)
        yield RowGroup(tile, together, runs)
    alone = [(x, launch) for x, launch in found if x.own]
    for x, launch in sorted(alone, key=lambda pair: -pair[1].num_problems * pair[1].num_rows):
        rows = x.own[0].rows
        runs = book.write(rows.starts, rows.length, in_pieces=False)
        yield RowGroup(x.tile, (launch,), runs, x.own)


def _steps(todo: Pass, stays: Callable[[Step], bool]) -> Iterator[tuple[Phase, Step]]:
    """The pass in the order of a backward, far ends by themselves unless the step stays."""
    for phase in reversed(Phase):
        for step in todo.steps[phase]:
            for part in (step,) if stays(step) else (step.alone, *step.far):
                yield phase, part


def _candidates(step: Step, rule: TileRule, num_rows: int) -> tuple[_Candidate, ...]:
    """The step as launches at even distances; none if it cannot be."""
    if len(step.keys) != 1:
        return ()
    (space, keys), rows, shared = step.keys[0], step.rows, step.joined or step.folded
    tiles = rule.of(step.window, keys.length)
    assert tiles.keys == rule.usual.keys, f"{tiles} and {rule.usual} differ in keys"
    one = rows.num_problems == 1
    even = one or bool(rows.step and (shared or keys.step))
    parts: list[tuple[int, int, int, int, int]] = []
    if even:
        key_step, row_step = 0 if shared or one else keys.step, 0 if one else rows.step
        parts = [(rows.num_problems, int(rows.starts[0]), row_step, int(keys.starts[0]), key_step)]
    elif rows.num_problems <= MOST_PARTS:
        pairs = zip(rows.starts, np.broadcast_to(keys.starts, rows.starts.shape), strict=True)
        parts = [(1, int(row), 0, int(key), 0) for row, key in pairs]
    if tiles == rule.usual:
        found = [_in_common(step, space, part, tiles.rows, num_rows) for part in parts]
        if all(found):
            return tuple(x[0] for x in found)
    if not even or step.folded:
        return ()
    count, _, _, key, key_step = parts[0]
    count, length = (1, count * rows.length) if step.joined else (count, rows.length)
    at = (space, key, key_step, keys.length, step.window)
    return (_Candidate(SharedLaunch(count, 0, 0, length, *at), tiles.rows, (step,)),)


def _in_common(
    step: Step, space: KeySpace, part: tuple[int, int, int, int, int], tile: int, num_rows: int
) -> tuple[_Candidate, ...]:
    """A launch of the step over rows that all launches share; none if it cuts a tile.

    Rows above a square or wider causal problem see no key of it, so it may begin earlier.
    """
    count, row, row_step, key, key_step = part
    up, stop = row % tile, row + (count - 1) * row_step + step.rows.length
    blind = step.window == (-1, 0) and step.num_keys <= step.rows.length
    ends = stop % tile == 0 or stop == num_rows
    if (up and not blind) or row_step % tile or not ends:
        return ()
    if count > 1 and (row + step.rows.length) % tile:
        return ()
    length = step.rows.length + up
    at = (space, key, key_step, step.num_keys, step.window)
    return (_Candidate(SharedLaunch(count, row - up, row_step, length, *at), tile),)


class _Runs(NamedTuple):
    """Runs of keys that share a buffer."""

    starts: tuple[int, ...]
    length: int


def _grouped(
    launches: list[SharedLaunch], tile: int
) -> list[tuple[list[SharedLaunch], tuple[int, ...], int]]:
    """Launches of one buffer each, with the starts and the length of its runs.

    One run over all keys, if every launch begins where a tile of it does; else each launch has runs
    of its own, or places in the runs of one with longer ones.
    """
    if not launches:
        return []
    lo = min(min(x.key_starts) for x in launches)
    hi = max(max(x.key_starts) + x.num_keys for x in launches)
    if all((start - lo) % tile == 0 for x in launches for start in x.key_starts):
        return [(launches, (lo,), hi - lo)]
    longest: dict[tuple[int, ...], int] = {}
    for starts, length in (_own_runs(x, tile) for x in launches):
        longest[starts] = max(length, longest.get(starts, 0))
    runs = sorted((_Runs(*x) for x in longest.items()), key=lambda x: -x.length)
    members: dict[_Runs, list[SharedLaunch]] = {x: [] for x in runs}
    for x in launches:
        members[next(y for y in runs if _places(x, y, tile))].append(x)
    return [(found, *at) for at, found in members.items() if found]


def _own_runs(x: SharedLaunch, tile: int) -> _Runs:
    """The runs of a launch's problems, or one run if they overlap by whole tiles."""
    if 0 < x.key_step < x.num_keys and x.key_step % tile == 0:
        return _Runs((x.key,), (x.num_problems - 1) * x.key_step + x.num_keys)
    return _Runs(x.key_starts, x.num_keys)


def _places(x: SharedLaunch, runs: _Runs, tile: int) -> tuple[int, ...]:
    """First rows of a launch's problems in a buffer of `runs`; nothing if it has no place there.

    They are evenly spaced: in one run, or at the same row of consecutive runs.
    """
    padded = -(-runs.length // tile) * tile
    if x.key_starts == runs.starts:
        return tuple(i * padded for i in range(len(runs.starts)))
    found = []
    for start in x.key_starts:
        for i, lo in enumerate(runs.starts):
            row = start - lo
            if row >= 0 and row % tile == 0 and row + x.num_keys <= runs.length:
                found.append((i, row))
                break
        else:
            return ()
    steps = {(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(found)}
    if len(steps) > 1 or any(i and row for i, row in steps):
        return ()
    return tuple(i * padded + row for i, row in found)


def _placed(x: SharedLaunch, group: int, runs: _Runs, tile: int) -> SharedLaunch:
    """The launch in its group's buffer."""
    first, *others = _places(x, runs, tile)
    step = others[0] - first if others else 0
    return x._replace(group=group, offset=first, offset_step=step)
