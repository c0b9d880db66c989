"""Everything one rank must know about one batch shape, as a pure function of shapes and rules.

Every rank and every pipeline stage computes the same plans; nothing is communicated. Plans are
cached. Specified by tests/layout/test_plan.py.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from megatron_bp.layout.blocks import BlockTable, Spans, make_blocks
from megatron_bp.layout.decomposition import (
    Availability,
    KeyRun,
    KeySpace,
    Launch,
    Phase,
    decompose,
)
from megatron_bp.layout.exchange import (
    Exchange,
    SlabExchange,
    dense_exchange,
    window_exchange,
)
from megatron_bp.layout.owners import Owners, Ownership, Rows, make_owners, make_rows
from megatron_bp.layout.visibility import (
    CleanRule,
    CorruptedRule,
    MaskRules,
    Visibility,
    visibility_of,
)


@dataclass(frozen=True)
class PlanRequest:
    """Shapes and rules of one batch; equal requests give equal plans on every rank.

    `num_ranks` P shares one sample, `num_clean_shards` C of them hold the clean rows (P // C
    times). `num_views` counts corrupted views of the sample. `window` is in tokens, 0 for none.
    `gather_corrupted` is the conventional context-parallel baseline: corrupted keys travel too, all
    of them, also where `windowed_exchange` sends clean rows only to ranks that see them.
    `row_multiple` pads the local rows (tensor parallel size under sequence parallelism).
    Raises: ValueError listing every problem.
    """

    length: int
    block_size: int
    num_ranks: int = 1
    num_clean_shards: int = 1
    num_views: int = 1
    clean_rule: CleanRule = CleanRule.TOKEN_CAUSAL
    corrupted_rule: CorruptedRule = CorruptedRule.BIDIRECTIONAL
    window: int = 0
    documents: Spans = ()
    prompts: tuple[int, ...] = ()
    ownership: Ownership = Ownership.DUAL_END
    gather_corrupted: bool = False
    row_multiple: int = 1
    windowed_exchange: bool = True

    def __post_init__(self) -> None:
        problems = [
            f"{name}={getattr(self, name)} must be at least 1."
            for name in ("num_ranks", "num_clean_shards", "num_views", "row_multiple")
            if getattr(self, name) < 1
        ]
        if not problems and self.num_ranks % self.num_clean_shards:
            problems.append(
                f"num_ranks={self.num_ranks} must be a multiple of num_clean_shards="
                f"{self.num_clean_shards}; use num_clean_shards=1 or {self.num_ranks}."
            )
        if self.gather_corrupted and self.num_ranks != self.num_clean_shards:
            problems.append(
                f"gather_corrupted needs num_clean_shards={self.num_clean_shards} to equal "
                f"num_ranks={self.num_ranks}."
            )
        for name, kind in (
            ("clean_rule", CleanRule),
            ("corrupted_rule", CorruptedRule),
            ("ownership", Ownership),
        ):
            value = getattr(self, name)
            if not isinstance(value, kind):  # an equal string would compare by identity and lose
                choices = ", ".join(f"{kind.__name__}.{member.name}" for member in kind)
                problems.append(f"{name}={value!r} must be one of {choices}.")
        if problems:
            raise ValueError(" ".join(problems))
        self.rules  # noqa: B018  (validates the window)

    @property
    def rules(self) -> MaskRules:
        """The mask rules of the request."""
        return MaskRules(self.clean_rule, self.corrupted_rule, self.window)

    @property
    def blocks(self) -> BlockTable:
        """The blocks of the sample."""
        return make_blocks(self.length, self.block_size, self.documents, self.prompts)


@dataclass(frozen=True, eq=False)
class RankPlan:
    """The plan of one context rank: rows, mask, launches and exchange.

    `launches` name rows of the key buffers: clean keys as `exchange` lays them out, own keys as
    local corrupted rows (with `gather_corrupted`: view by view as `own_exchange` lays them out).
    Plans compare by identity; `make_plan` returns the same plan for equal requests.
    Shapes: `own_coordinate` int64 [num_own_keys], -1 for padding.
    """

    request: PlanRequest
    rank: int
    blocks: BlockTable
    owners: Owners
    rows: Rows
    visibility: Visibility
    launches: tuple[Launch, ...]
    exchange: Exchange
    own_coordinate: NDArray[np.int64]

    @cached_property
    def own_exchange(self) -> SlabExchange:
        """How one view of the corrupted rows travels in the context-parallel baseline."""
        return dense_exchange(self.owners.corrupted, self.rank)

    @property
    def shard(self) -> int:
        """This rank's clean shard."""
        return self.rank % self.request.num_clean_shards

    @cached_property
    def corrupted_launches(self) -> tuple[Launch, ...]:
        """The launches of corrupted rows alone (a pruned last layer)."""
        return tuple(
            launch.only(launch.rows >= self.rows.num_clean)
            for launch in self.launches
            if (launch.rows >= self.rows.num_clean).any()
        )


@lru_cache(maxsize=64)
def make_plan(request: PlanRequest, rank: int) -> RankPlan:
    """The plan of context rank `rank` for `request`.

    Raises: ValueError if `rank` is not in [0, request.num_ranks).
    """
    if not 0 <= rank < request.num_ranks:
        raise ValueError(f"rank={rank} must be in [0, {request.num_ranks}).")
    blocks = request.blocks
    owners = make_owners(
        blocks,
        request.num_ranks,
        request.num_clean_shards,
        request.ownership,
        request.num_views,
    )
    rows = make_rows(blocks, owners, rank, request.num_views, request.row_multiple)
    shard = rank % request.num_clean_shards
    by_window = _by_window(request)
    exchange: Exchange
    if by_window:
        first = rank - shard
        needed = [
            _needed(request, blocks, owners, first + j) for j in range(request.num_clean_shards)
        ]
        exchange = window_exchange(owners.clean, shard, needed)
    else:
        exchange = dense_exchange(owners.clean, shard)
    own_ready = Phase.LATE if request.gather_corrupted else Phase.LOCAL
    launches = decompose(
        blocks, owners, rows, request.rules, Availability(owners.clean, shard, by_window, own_ready)
    )
    own_coordinate = _own_coordinates(request, owners, rows, rank)
    return RankPlan(
        request=request,
        rank=rank,
        blocks=blocks,
        owners=owners,
        rows=rows,
        visibility=visibility_of(rows.stream, rows.position, blocks, request.rules),
        launches=_to_buffer_rows(launches, exchange.buffer_position, own_coordinate),
        exchange=exchange,
        own_coordinate=own_coordinate,
    )


@lru_cache(maxsize=64)
def with_window(plan: RankPlan, window: int) -> RankPlan:
    """The plan of another layer of the same model, with the same rows and window `window`."""
    return make_plan(replace(plan.request, window=window), plan.rank)


def _by_window(request: PlanRequest) -> bool:
    return request.windowed_exchange and request.window > 0 and request.num_clean_shards > 1


def _needed(
    request: PlanRequest, blocks: BlockTable, owners: Owners, rank: int
) -> NDArray[np.bool_]:
    """Clean positions that some row of `rank` sees, or that its launches read; bool [length]."""
    rows = make_rows(blocks, owners, rank, 1, 1)
    seen = visibility_of(rows.stream, rows.position, blocks, request.rules)
    edges = np.zeros(request.length + 1, dtype=np.int64)
    np.add.at(edges, seen.clean_lo, 1)
    np.add.at(edges, seen.clean_hi, -1)
    return np.cumsum(edges)[:-1] > 0


def _own_coordinates(
    request: PlanRequest, owners: Owners, rows: Rows, rank: int
) -> NDArray[np.int64]:
    if not request.gather_corrupted:
        return rows.coordinate[rows.num_clean :]
    position = dense_exchange(owners.corrupted, rank).buffer_position
    view = np.arange(request.num_views)[:, None]
    return np.where(position >= 0, view * request.length + position, -1).ravel()


def _to_buffer_rows(
    launches: tuple[Launch, ...],
    clean_position: NDArray[np.int64],
    own_coordinate: NDArray[np.int64],
) -> tuple[Launch, ...]:
    """The same launches with key runs in buffer rows instead of positions and coordinates."""

    def inverse(names: NDArray[np.int64]) -> NDArray[np.int64]:
        row = np.full(int(names.max(initial=-1)) + 1, -1, dtype=np.int64)
        row[names[names >= 0]] = np.flatnonzero(names >= 0)
        return row

    row_of = {KeySpace.CLEAN: inverse(clean_position), KeySpace.OWN: inverse(own_coordinate)}

    def moved(run: KeyRun) -> KeyRun:
        table = row_of[run.space]
        starts = table[run.starts]
        ends = table[run.starts + run.length - 1]
        contiguous = (starts >= 0) & (ends - starts == run.length - 1)
        assert contiguous.all(), f"keys of {run} are not one run of the buffer"
        return replace(run, starts=starts)

    return tuple(
        replace(launch, keys=tuple(moved(run) for run in launch.keys)) for launch in launches
    )
