"""Turns a mask into native launches: plain, causal or windowed attention on contiguous keys.

A corrupted row at position i of a block that starts at s must see the clean keys [0, s). That is
native causal attention shifted by one block, keys [0, i - B], plus what is left: the keys
(i - B, s) of the previous block and the whole own block, a small attention of one fixed shape a
block. The parts are merged by log-sum-exp. Rows without a key to their left skip the shifted
launch. Derivation and windows: DESIGN.md. Specified by tests/layout/test_decomposition.py.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatron_bp.layout.blocks import BlockTable
from megatron_bp.layout.owners import ChunkMap, Owners, Rows
from megatron_bp.layout.visibility import CleanRule, CorruptedRule, MaskRules


class Phase(IntEnum):
    """When the keys of a launch are here: at once, after the early slab, after the late slab."""

    LOCAL = 0
    EARLY = 1
    LATE = 2


class KeySpace(IntEnum):
    """Which key buffer a key run lies in.

    CLEAN holds gathered clean keys, OWN corrupted ones. SHARD (in backward) holds this rank's own
    clean rows in local order.
    """

    CLEAN = 0
    OWN = 1
    SHARD = 2


@dataclass(frozen=True, eq=False)
class KeyRun:
    """Runs of `length` contiguous keys, one for each problem of a launch.

    Shapes: `starts` int64 [Z]. Units: rows of the key buffer that `space` names.
    """

    space: KeySpace
    starts: NDArray[np.int64]
    length: int


@dataclass(frozen=True, eq=False)
class Launch:
    """Z equal attention problems: `num_rows` queries each against its key runs, concatenated.

    Query a sees key c of the concatenation iff a + K - Q - left <= c <= a + K - Q + right (bottom
    right aligned, as FlashAttention does); -1 is unbounded, right = 0 is causal.
    Shapes: `rows` int64 [Z], the first local row of each problem.
    `ready` is when it may run; `slab` is the last slab whose key gradient it adds to (LOCAL: none).
    """

    rows: NDArray[np.int64]
    num_rows: int
    keys: tuple[KeyRun, ...]
    left: int
    right: int
    ready: Phase
    slab: Phase

    @property
    def num_problems(self) -> int:
        """Z, the number of equal problems."""
        return len(self.rows)

    @property
    def num_keys(self) -> int:
        """K, the keys of one problem."""
        return sum(run.length for run in self.keys)

    def only(self, kept: NDArray[np.bool_]) -> "Launch":
        """The same launch with the problems that `kept` [Z] selects."""
        keys = tuple(replace(run, starts=run.starts[kept]) for run in self.keys)
        return replace(self, rows=self.rows[kept], keys=keys)

    @property
    def num_pairs(self) -> int:
        """Allowed (row, key) pairs over all problems."""
        at = np.arange(self.num_rows) + self.num_keys - self.num_rows
        lo = np.zeros_like(at) if self.left < 0 else np.maximum(at - self.left, 0)
        hi = np.full_like(at, self.num_keys)
        if self.right >= 0:
            hi = np.minimum(at + self.right + 1, self.num_keys)
        return int(np.maximum(hi - lo, 0).sum()) * self.num_problems


@dataclass(frozen=True)
class Availability:
    """Which phase brings a range of clean keys to a rank, and which slab their gradient goes to."""

    clean: ChunkMap
    shard: int
    by_window: bool
    own_ready: Phase

    def ready(self, lo: int, hi: int) -> Phase:
        """Phase after which the clean keys [lo, hi) are here."""
        chunks = self.clean.chunks_in(lo, hi)
        remote = chunks[~np.isin(chunks, self.clean.chunks_of[self.shard])]
        if not len(remote):
            return Phase.LOCAL
        return Phase.EARLY if self.by_window else self._slab(remote)

    def slab(self, lo: int, hi: int) -> Phase:
        """Last slab that holds one of the clean keys [lo, hi)."""
        chunks = self.clean.chunks_in(lo, hi)
        if self.by_window or self.clean.num_ranks == 1:
            return Phase.EARLY
        return self._slab(chunks)

    def _slab(self, chunks: NDArray[np.int64]) -> Phase:
        return Phase(1 + int(self.clean.slab_of_chunk[chunks].max()))


@dataclass(frozen=True)
class _Shape:
    """What problems must share to run in one launch."""

    num_rows: int
    runs: tuple[tuple[KeySpace, int], ...]
    left: int
    right: int
    ready: Phase
    slab: Phase


class _Launches:
    """Collects problems and groups those of equal shape into launches."""

    def __init__(self, available: Availability) -> None:
        self.available = available
        self.problems: dict[_Shape, list[tuple[int, ...]]] = defaultdict(list)

    def add(
        self,
        row: int,
        num_rows: int,
        runs: list[tuple[KeySpace, int, int]],
        left: int = -1,
        right: int = -1,
    ) -> None:
        """Add one problem; `runs` are (space, lo, hi); empty runs are dropped."""
        runs = [run for run in runs if run[1] < run[2]]
        ready = slab = Phase.LOCAL
        for space, lo, hi in runs:
            if space is KeySpace.CLEAN:
                ready = max(ready, self.available.ready(lo, hi))
                slab = max(slab, self.available.slab(lo, hi))
            else:
                ready = max(ready, self.available.own_ready)
        shape = _Shape(
            num_rows, tuple((space, hi - lo) for space, lo, hi in runs), left, right, ready, slab
        )
        self.problems[shape].append((row, *(lo for _, lo, _ in runs)))

    def launches(self) -> tuple[Launch, ...]:
        """All launches, in phase order, large ones last within a phase."""
        made = []
        for shape, problems in self.problems.items():
            starts = np.array(sorted(problems), dtype=np.int64).T
            keys = tuple(
                KeyRun(space, starts[1 + i], length) for i, (space, length) in enumerate(shape.runs)
            )
            made.append(
                Launch(
                    starts[0],
                    shape.num_rows,
                    keys,
                    shape.left,
                    shape.right,
                    shape.ready,
                    shape.slab,
                )
            )
        return tuple(sorted(made, key=lambda launch: (launch.ready, launch.num_keys)))


def decompose(
    blocks: BlockTable, owners: Owners, rows: Rows, rules: MaskRules, available: Availability
) -> tuple[Launch, ...]:
    """Launches that cover every pair the rules allow exactly once, and no other pair.

    Key runs are in clean positions and own coordinates; `plan.make_plan` turns them into rows of
    the key buffers. Chunks hold whole blocks.
    """
    out = _Launches(available)
    for stream, lo, hi, row in _spans(rows, owners):
        first = int(np.searchsorted(blocks.start, lo))
        last = int(np.searchsorted(blocks.start, hi))
        for document in np.unique(blocks.document[first:last]):
            inside = np.flatnonzero(blocks.document[first:last] == document) + first
            a, z = int(blocks.start[inside[0]]), int(blocks.stop[inside[-1]])
            d = int(blocks.document_start[inside[0]])
            if stream == 0 and rules.clean is CleanRule.TOKEN_CAUSAL:
                k = max(d, a - rules.window + 1) if rules.window else d
                out.add(row + a - lo, z - a, [(KeySpace.CLEAN, k, z)], rules.window - 1, 0)
                continue
            _shifted(out, blocks.block_size, rules.window, (d, a, z), row + a - lo)
            for b in inside:
                _own_block(out, blocks, rules, int(b), stream, row + int(blocks.start[b]) - lo)
    return out.launches()


def _spans(rows: Rows, owners: Owners) -> list[tuple[int, int, int, int]]:
    """Runs of consecutive positions of one stream: (stream, lo, hi, first local row).

    A rank whose two chunks touch keeps them apart when it shares the sample: the early chunk's
    launches then need not wait for the late slab.
    """
    step = (np.diff(rows.stream) != 0) | (np.diff(rows.position) != 1)
    for chunks, of_stream in (
        (owners.clean, rows.stream == 0),
        (owners.corrupted, rows.stream > 0),
    ):
        if chunks.num_ranks > 1:
            step |= (np.isin(rows.position, chunks.bounds) & of_stream)[1:]
    cut = np.concatenate([[0], np.flatnonzero(step) + 1, [rows.num_rows]])
    found = []
    for a, z in pairwise(cut):
        if rows.stream[a] >= 0:
            lo = int(rows.position[a])
            found.append((int(rows.stream[a]), lo, lo + int(z - a), int(a)))
    return found


def _shifted(
    out: _Launches, block_size: int, window: int, span: tuple[int, int, int], row: int
) -> None:
    """Causal attention of the rows of [a, z) shifted by one block, inside document start d."""
    d, a, z = span
    first = max(a, d + block_size)
    if first >= z or 0 < window <= block_size:
        return
    k = max(d, first - window + 1) if window else d
    left = window - block_size - 1 if window else -1
    out.add(row + first - a, z - first, [(KeySpace.CLEAN, k, z - block_size)], left, 0)


def _own_block(
    out: _Launches, blocks: BlockTable, rules: MaskRules, b: int, stream: int, row: int
) -> None:
    """What is left for the rows of block `b`: the keys just before it and the block itself."""
    start, stop = int(blocks.start[b]), int(blocks.stop[b])
    d, size, window = int(blocks.document_start[b]), blocks.block_size, rules.window
    short = 0 < window <= size
    before = max(d, start - (window - 1 if short else size))
    right = -1
    if stream == 0:
        runs = [(KeySpace.CLEAN, before, stop)]
    else:
        base = (stream - 1) * blocks.length
        runs = [(KeySpace.CLEAN, before, start), (KeySpace.OWN, base + start, base + stop)]
        right = 0 if rules.corrupted is CorruptedRule.CAUSAL else -1
    left = -1 if short or before == start else size - 1
    out.add(row, stop - start, runs, left, right)
    if window > size:
        lo, hi = max(d, start - window + 1), stop - window
        if lo < hi:
            out.add(row + (stop - start) - (hi - lo), hi - lo, [(KeySpace.CLEAN, lo, hi)], -1, 0)
