"""Orders a plan's launches for one pass and says which of them may overwrite what they write.

The first step that touches a row stores its result; later ones merge or add. Rows that no step
stores are listed as gaps, to be filled once. Pure integers, computed once a plan and cached.
Specified by tests/attention/test_schedule.py.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatron_bp.attention.contract import Cut, Window
from megatron_bp.attention.prefix import native_launches, shares_keys
from megatron_bp.attention.windows import is_far_end
from megatron_bp.layout.decomposition import KeySpace, Launch, Phase
from megatron_bp.layout.plan import RankPlan


@dataclass(frozen=True, eq=False)
class Runs:
    """Runs of `length` rows, one a problem, and how results are written to them.

    `store` means that no earlier step touched these rows and that they do not overlap, so a result
    may overwrite them. Within one of the `rounds` (problem numbers) no two runs overlap. A single
    run that earlier steps touched in part has `pieces`: (first row of the run, runs of its own).
    """

    starts: NDArray[np.int64]
    length: int
    store: bool
    rounds: tuple[NDArray[np.int64], ...]
    pieces: tuple[tuple[int, "Runs"], ...] = ()

    @cached_property
    def first(self) -> int:
        """First row of the first run."""
        return int(self.starts[0])

    @cached_property
    def step(self) -> int:
        """Rows from one run's start to the next if that is always the same, else 0."""
        if len(self.starts) == 1:
            return self.length
        steps = np.diff(self.starts)
        return int(steps[0]) if (steps == steps[0]).all() and steps[0] > 0 else 0

    @property
    def writable(self) -> bool:
        """Whether the runs are one strided view without overlap."""
        return self.step >= self.length

    @property
    def num_problems(self) -> int:
        """X, the number of runs."""
        return len(self.starts)


@dataclass(frozen=True, eq=False)
class Step:
    """One launch. Problems that read the same keys become one problem: by more rows if nothing is
    masked (`joined`), else by more query heads for each key/value head (`folded`).

    `far` holds the step of the far ends of the same blocks' windows, if there is one: it runs next,
    or in the same kernel where one can do both.
    """

    rows: Runs
    keys: tuple[tuple[KeySpace, Runs], ...]
    window: Window
    joined: bool
    folded: bool
    far: tuple["Step", ...] = ()

    @cached_property
    def alone(self) -> "Step":
        """The same step without `far`."""
        return replace(self, far=())

    @property
    def num_keys(self) -> int:
        """K, the keys of one problem."""
        return sum(runs.length for _, runs in self.keys)

    @property
    def num_pairs(self) -> int:
        """Rows times keys of all problems, allowed or not."""
        return self.rows.num_problems * self.rows.length * self.num_keys


Gaps = tuple[tuple[int, int], ...]
MOST_PIECES = 4
"""A run is cut into at most so many pieces; more launches cost more than adding to zeros."""
MOST_BLOCK_ROWS = 256
"""Rows of a block that a kernel may run together with the far end of its window."""
FEWEST_ROWS = 1024
"""Shorter runs are not cut: zeroing them costs less."""


@dataclass(frozen=True, eq=False)
class Pass:
    """The steps of a forward or backward pass by phase, and the rows [lo, hi) that none stores."""

    steps: Mapping[Phase, tuple[Step, ...]]
    row_gaps: Gaps
    key_gaps: Mapping[KeySpace, Gaps]
    num_rows: int
    num_keys: Mapping[KeySpace, int]

    def reordered(
        self,
        steps: Iterable[tuple[Phase, Step]],
        rows: "RowBook",
        keys: Mapping[KeySpace, "RowBook"],
    ) -> "Pass":
        """A pass of `steps` alone, in that order, after what `rows` and `keys` say was written."""
        found: dict[Phase, list[Step]] = {phase: [] for phase in Phase}

        def again(step: Step) -> Step:
            written = []
            for space, runs in step.keys:
                written.append((space, keys[space].write(runs.starts, runs.length, in_pieces=True)))
            at = rows.write(step.rows.starts, step.rows.length, in_pieces=False)
            far = tuple(again(x) for x in step.far)
            return replace(step, rows=at, keys=tuple(written), far=far)

        for phase, step in steps:
            found[phase].append(again(step))
        gaps = {space: book.gaps() for space, book in keys.items()}
        ordered = {phase: tuple(found[phase]) for phase in Phase}
        return replace(self, steps=ordered, row_gaps=rows.gaps(), key_gaps=gaps)


@dataclass(frozen=True, eq=False)
class Schedule:
    """Both passes of one layer over local rows that start at `first_row`."""

    forward: Pass
    backward: Pass
    first_row: int


@lru_cache(maxsize=64)
def make_schedule(
    plan: RankPlan, corrupted_only: bool, cut: Cut, forward_heads: int = 1
) -> Schedule:
    """The schedule of `plan` for a kernel that `cut` suits; backward runs the slabs in reverse.

    A row of the kernel's tile is one of `forward_heads` query heads in forward.
    """
    forward = launches = native_launches(plan, corrupted_only, cut)
    if plan.request.window and forward_heads > 1:  # else blocks are run by their rows alone
        forward = native_launches(plan, corrupted_only, cut, forward_heads)
    first_row = plan.rows.num_clean if corrupted_only else 0
    return Schedule(
        forward=_make_pass(plan, first_row, [(x.ready, x) for x in forward]),
        backward=_make_pass(
            plan, first_row, [(x.slab, x) for x in _backward_order(plan, launches)]
        ),
        first_row=first_row,
    )


class RowBook:
    """Which rows have been touched, and which of them by a step that may store."""

    def __init__(self, num_rows: int) -> None:
        self.touched = np.zeros(num_rows, dtype=np.bool_)
        self.stored = np.zeros(num_rows, dtype=np.bool_)

    def write(self, starts: NDArray[np.int64], length: int, in_pieces: bool) -> Runs:
        """The runs of the next step that writes here, a single one in pieces if that helps."""
        rounds = disjoint_rounds(starts, length)
        index = (starts[:, None] + np.arange(length)).ravel()
        store = len(rounds) == 1 and not self.touched[index].any()
        cut = in_pieces and not store and len(starts) == 1 and length >= FEWEST_ROWS
        pieces = self._pieces(int(starts[0]), length) if cut else ()
        if store:
            self.stored[index] = True
        for lo, piece in pieces:
            self.stored[starts[0] + lo : starts[0] + lo + piece.length] |= piece.store
        self.touched[index] = True
        return Runs(starts, length, store, rounds, pieces)

    def _pieces(self, start: int, length: int) -> tuple[tuple[int, Runs], ...]:
        """The run cut where rows begin or cease to be touched; nothing if that is nowhere."""
        touched = self.touched[start : start + length]
        edges = [0, *(np.flatnonzero(np.diff(touched)) + 1).tolist(), length]
        if not 2 < len(edges) <= MOST_PIECES + 1:
            return ()
        one = (np.zeros(1, dtype=np.int64),)
        return tuple(
            (lo, Runs(np.array([start + lo]), hi - lo, not bool(touched[lo]), one))
            for lo, hi in pairwise(edges)
        )

    def gaps(self) -> Gaps:
        """Rows that no step stores."""
        edges = np.flatnonzero(np.diff(np.concatenate([[True], self.stored, [True]])))
        return tuple((int(lo), int(hi)) for lo, hi in edges.reshape(-1, 2))


def disjoint_rounds(starts: NDArray[np.int64], length: int) -> tuple[NDArray[np.int64], ...]:
    """Problem numbers, split into the fewest rounds whose runs do not overlap."""
    order = np.argsort(starts, kind="stable")
    if (np.diff(starts[order]) >= length).all():
        return (np.arange(len(starts)),)
    rounds: list[list[int]] = []
    for problem in order:
        for members in rounds:
            if starts[members[-1]] + length <= starts[problem]:
                members.append(int(problem))
                break
        else:
            rounds.append([int(problem)])
    return tuple(np.array(members, dtype=np.int64) for members in rounds)


def _make_pass(plan: RankPlan, first_row: int, launches: Iterable[tuple[Phase, Launch]]) -> Pass:
    """The pass that runs `launches` (each with its phase) in the order given."""
    rows = RowBook(plan.rows.num_rows - first_row)
    keys = {
        KeySpace.CLEAN: RowBook(plan.exchange.num_buffer_rows),
        KeySpace.OWN: RowBook(len(plan.own_coordinate)),
    }
    steps: dict[Phase, list[Step]] = {phase: [] for phase in Phase}

    def step(launch: Launch, far: tuple[Launch, ...]) -> Step:
        shared = shares_keys(launch)
        unmasked = launch.left < 0 and launch.right < 0
        written = []
        for run in launch.keys:
            starts = run.starts[:1] if shared else run.starts
            written.append((run.space, keys[run.space].write(starts, run.length, in_pieces=True)))
        return Step(
            rows.write(launch.rows - first_row, launch.num_rows, in_pieces=False),
            tuple(written),
            Window(launch.left, launch.right),
            joined=shared and unmasked,
            folded=shared and not unmasked,
            far=tuple(step(x, ()) for x in far),
        )

    for phase, launch, far in _with_far_ends(launches):
        steps[phase].append(step(launch, far))
    return Pass(
        {phase: tuple(steps[phase]) for phase in Phase},
        rows.gaps(),
        {space: found.gaps() for space, found in keys.items()},
        len(rows.touched),
        {space: len(found.touched) for space, found in keys.items()},
    )


def _with_far_ends(
    launches: Iterable[tuple[Phase, Launch]],
) -> list[tuple[Phase, Launch, tuple[Launch, ...]]]:
    """The launches with their phases; far ends of windows go with the blocks that they end.

    A far end is a square causal launch whose rows are the last ones of another launch's problems.
    """
    found: list[tuple[Phase, Launch, tuple[Launch, ...]]] = []
    place: dict[tuple[Phase, bytes], int] = {}
    for phase, launch in launches:
        ends = phase, (launch.rows + launch.num_rows).tobytes()
        at = place.get(ends, -1)
        if at >= 0 and is_far_end(launch) and launch.num_rows < found[at][1].num_rows:
            found[at] = (*found[at][:2], (launch,))
            del place[ends]
            continue
        if launch.num_rows <= MOST_BLOCK_ROWS and not is_far_end(launch):
            place[ends] = len(found)
        found.append((phase, launch, ()))
    return found


def _backward_order(plan: RankPlan, launches: tuple[Launch, ...]) -> list[Launch]:
    """Late slabs first. Under a window the launches that can store most gradients come first."""

    def key(launch: Launch) -> tuple[int, ...]:
        if not plan.request.window:
            return (-launch.slab,)
        return -launch.slab, _keys_overlap(launch), -launch.num_problems * launch.num_rows

    return sorted(launches, key=key)


def _keys_overlap(launch: Launch) -> bool:
    """Whether problems share keys, so that their gradients must be added rather than stored."""
    runs = (run for run in launch.keys if not shares_keys(launch))
    return any(bool((np.diff(np.sort(run.starts)) < run.length).any()) for run in runs)
