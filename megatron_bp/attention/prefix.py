"""The launches of the `native` strategy: the plan's, or a chunk by itself and unmasked the rest.

Every row of a rank's chunk sees all clean keys of its document before the chunk. So for kernels
that are slow on causal launches with more keys than rows (cuDNN's are), the decomposition runs
inside each chunk as if its documents began there, and one unmasked launch, whose queries are clean
and corrupted rows alike, takes the keys before. That also halves the passes over key gradients and
leaves everything inside the chunk to run while keys still travel. A late chunk's keys before the
early chunk go with the early chunk's. Under a window there is little to share: see windows.py.
Specified by tests/attention/test_prefix.py and tests/attention/test_block_parallel.py.
"""

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from math import gcd
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_bp.attention.contract import Cut
from megatron_bp.attention.windows import TILE, by_block, later_together, merge_alike
from megatron_bp.layout.blocks import BlockTable
from megatron_bp.layout.decomposition import (
    Availability,
    KeyRun,
    KeySpace,
    Launch,
    Phase,
    decompose,
)
from megatron_bp.layout.owners import ChunkMap, Rows
from megatron_bp.layout.plan import RankPlan


class _Before(NamedTuple):
    """`num_rows` local rows from `row` on see all clean positions [document_start, chunk_start)."""

    row: int
    num_rows: int
    document_start: int
    chunk_start: int


def native_launches(
    plan: RankPlan, corrupted_only: bool, cut: Cut, heads: int = 1
) -> tuple[Launch, ...]:
    """Launches that cover what `plan.launches` cover, large ones first within a phase.

    With `corrupted_only`, those of corrupted rows alone. A row of a kernel's tile is one of `heads`
    query heads.
    """
    if cut is not Cut.PLAN and not plan.request.window:
        launches = _by_chunk(plan, corrupted_only)
        if cut is Cut.CHUNKS:
            launches = _with_squares_together(launches)
    else:
        launches = list(plan.corrupted_launches if corrupted_only else plan.launches)
    if plan.request.window:
        launches = _windowed(plan, launches, heads)
    launches = [part for launch in launches for part in _evenly_spaced(launch)]
    return tuple(sorted(launches, key=_size))


def _size(launch: Launch) -> tuple[int, ...]:
    """What launches of a pass are ordered by. A kernel of small problems merges as it writes."""
    rows = launch.num_problems * launch.num_rows
    return launch.ready, _is_small(launch), -rows, launch.num_problems


def _windowed(plan: RankPlan, launches: list[Launch], heads: int) -> list[Launch]:
    """The launches under a window, by block where blocks (of `heads` heads) fill tiles."""
    size = plan.request.block_size
    if size < TILE and (size * heads) % TILE:
        return later_together(launches)
    found = by_block(plan, launches)
    if size >= TILE:
        return found
    parts = [part for launch in found for part in _evenly_spaced(launch)]
    # Blocks at the start of a document see fewer keys, each its own number; and keys of many small
    # blocks must be views.
    if len(parts) > MOST_LAUNCHES or not all(_is_small(x) or _is_even(x) for x in parts):
        return later_together(launches)
    last = max((x.ready for x in found), default=Phase.LOCAL)
    return [replace(x, ready=last) if _is_small(x) else x for x in parts]


def _by_chunk(plan: RankPlan, corrupted_only: bool) -> list[Launch]:
    request, owners = plan.request, plan.owners
    own_ready = Phase.LATE if request.gather_corrupted else Phase.LOCAL
    available = Availability(owners.clean, plan.shard, by_window=False, own_ready=own_ready)
    stream = plan.rows.stream
    clean, corrupted = (owners.clean, stream == 0), (owners.corrupted, stream > 0)
    if corrupted_only:
        parts = [corrupted]
    elif np.array_equal(owners.clean.bounds, owners.corrupted.bounds):
        parts = [(owners.corrupted, stream >= 0)]
    else:
        parts = [clean, corrupted]
    inside: list[Launch] = []
    before: list[_Before] = []
    for chunks, mine in parts:
        rows = replace(plan.rows, stream=np.where(mine, stream, -1))
        blocks = _cut(plan.blocks, chunks)
        inside += decompose(blocks, owners, rows, request.rules, available)
        before += _before(plan.blocks, rows, chunks)
    row_of = {
        KeySpace.CLEAN: _inverse(plan.exchange.buffer_position),
        KeySpace.OWN: _inverse(plan.own_coordinate),
    }
    launches = [*inside, *_prefixes(before, available)]
    return [replace(x, keys=tuple(_moved(run, row_of) for run in x.keys)) for x in launches]


def _with_squares_together(launches: list[Launch]) -> list[Launch]:
    """The launches, with the squares of both chunks in one, and their blocks in another."""
    both = [x for x in launches if _is_square(x) or _is_block(x)]
    others = [x for x in launches if not (_is_square(x) or _is_block(x))]
    return [*others, *merge_alike(both, lambda x: x.ready)]


def _is_block(launch: Launch) -> bool:
    """Whether a launch is what is left around small blocks: no row is in two such problems."""
    return _is_small(launch) and any(run.space is KeySpace.OWN for run in launch.keys)


def _is_small(launch: Launch) -> bool:
    return max(launch.num_rows, launch.num_keys) <= SMALL


def _is_square(launch: Launch) -> bool:
    clean = all(run.space is KeySpace.CLEAN for run in launch.keys)
    return clean and launch.left < 0 and launch.right == 0


def _chunk_of(position: NDArray[np.int64], chunks: ChunkMap) -> NDArray[np.int64]:
    """Chunk of each position; one rank's two chunks count as one."""
    if chunks.num_ranks == 1:
        return np.zeros_like(position)
    return np.searchsorted(chunks.bounds, position, side="right") - 1


def _cut(blocks: BlockTable, chunks: ChunkMap) -> BlockTable:
    """The same blocks with a document of its own in each chunk."""
    chunk = _chunk_of(blocks.start, chunks)
    return replace(
        blocks,
        document=blocks.document * len(chunks.bounds) + chunk,
        document_start=np.maximum(blocks.document_start, chunks.bounds[chunk]),
    )


def _before(blocks: BlockTable, rows: Rows, chunks: ChunkMap) -> list[_Before]:
    """Runs of rows whose document starts before their chunk."""
    real = np.flatnonzero(rows.stream >= 0)
    chunk = _chunk_of(rows.position[real], chunks)
    columns = np.stack([rows.stream[real], chunk, rows.document[real], rows.position[real] - real])
    cut = np.flatnonzero((np.diff(columns) != 0).any(0)) + 1
    found = []
    for run in np.split(np.arange(len(real)), cut):
        if len(run):
            row = int(real[run[0]])
            start = int(blocks.document_start[rows.block[row]])
            bound = int(chunks.bounds[chunk[run[0]]])
            if start < bound:
                found.append(_Before(row, len(run), start, bound))
    return found


def _prefixes(before: list[_Before], available: Availability) -> list[Launch]:
    """Unmasked launches, cut where a chunk starts so that later chunks join earlier ones."""
    by_document: dict[int, list[_Before]] = defaultdict(list)
    for member in before:
        by_document[member.document_start].append(member)
    launches = []
    for start, members in sorted(by_document.items()):
        for lo, hi in pairwise(sorted({start, *(x.chunk_start for x in members)})):
            rows, length = _joined([x for x in members if x.chunk_start >= hi])
            run = KeyRun(KeySpace.CLEAN, np.full(len(rows), lo), hi - lo)
            ready, slab = available.ready(lo, hi), available.slab(lo, hi)
            launches.append(Launch(rows, length, (run,), -1, -1, ready, slab))
    return launches


def _joined(members: list[_Before]) -> tuple[NDArray[np.int64], int]:
    """First rows and length of the longest equal runs that make up the members' rows."""
    runs: list[list[int]] = []
    for x in sorted(members):
        if runs and runs[-1][1] == x.row:
            runs[-1][1] += x.num_rows
        else:
            runs.append([x.row, x.row + x.num_rows])
    length = gcd(*(hi - lo for lo, hi in runs))
    return np.concatenate([np.arange(lo, hi, length) for lo, hi in runs]), length


def _inverse(names: NDArray[np.int64]) -> NDArray[np.int64]:
    row = np.full(int(names.max(initial=-1)) + 1, -1, dtype=np.int64)
    row[names[names >= 0]] = np.flatnonzero(names >= 0)
    return row


def _moved(run: KeyRun, row_of: dict[KeySpace, NDArray[np.int64]]) -> KeyRun:
    """The run in rows of its key buffer instead of positions or coordinates."""
    table = row_of[run.space]
    starts = table[run.starts]
    assert (table[run.starts + run.length - 1] - starts == run.length - 1).all(), (
        f"keys of {run} are not one run of the buffer"
    )
    return replace(run, starts=starts)


def shares_keys(launch: Launch) -> bool:
    """Whether several problems all read the same keys."""
    starts = [run.starts for run in launch.keys]
    return launch.num_problems > 1 and all((s == s[0]).all() for s in starts)


MOST_PARTS = 4
"""A launch is cut into evenly spaced ones only if few come out; more launches cost more time."""
MOST_LAUNCHES = 8
"""Small blocks under a window become problems of their own only if few launches come out."""
SMALL = 64
"""Problems of at most so many rows and keys may lie anywhere: a kernel of our own runs them."""


def _jumps(launch: Launch) -> NDArray[np.int64]:
    """Problems at which the distance of rows or keys changes."""
    columns = np.stack([launch.rows, *(run.starts for run in launch.keys)])
    return np.flatnonzero((np.diff(columns, n=2) != 0).any(0)) + 1


def _is_even(launch: Launch) -> bool:
    return not len(_jumps(launch))


def _evenly_spaced(launch: Launch) -> list[Launch]:
    """The launch, cut so that rows and keys of each part are evenly spaced and need no gather."""
    if _is_small(launch):
        return [launch]
    cuts: list[int] = []
    for jump in _jumps(launch):  # an uneven step shows at both of its ends
        if not cuts or jump > cuts[-1]:
            cuts.append(int(jump) + 1)
    edges = [0, *cuts, launch.num_problems]
    if shares_keys(launch) or not 1 < len(edges) - 1 <= MOST_PARTS:
        return [launch]
    index = np.arange(launch.num_problems)
    return [launch.only((index >= lo) & (index < hi)) for lo, hi in pairwise(edges)]
