"""10,000 drawn shapes: everything has one owner, loads are bounded, every allowed pair runs once.

Pairs are compared by fingerprints: each key has a random 64-bit number, and a row's fingerprint is
the sum over its keys, modulo 2^64. A pair left out, run twice or exchanged for another changes it
(up to one chance in 2^64). All numbers come from one seed, so a failing case has an index.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron_bp.layout.blocks import BlockTable
from megatron_bp.layout.dealing import block_costs
from megatron_bp.layout.decomposition import KeySpace, Launch
from megatron_bp.layout.owners import ChunkMap, Ownership, has_equal_blocks, make_owners
from megatron_bp.layout.plan import PlanRequest, RankPlan, make_plan
from megatron_bp.layout.visibility import CleanRule, CorruptedRule

CASES, ALL_RANKS_EVERY = 10_000, 100
Hashes = NDArray[np.uint64]


def drawn(index: int) -> tuple[PlanRequest, int]:
    """Case `index`: a request and one of its ranks."""
    rng = np.random.default_rng([7, index])
    block = int(rng.choice([1, 2, 3, 4, 5, 8, 16, 32]))
    num_ranks = int(rng.choice([1, 2, 3, 4, 5, 6, 8]))
    length = int(rng.integers(1, 8 * num_ranks * block if rng.random() < 0.2 else 30 * block))
    if rng.random() < 0.25:
        length = 2 * num_ranks * block * int(rng.integers(1, 4))  # divides evenly
    cuts = sorted({int(x) for x in rng.integers(1, length + 1, rng.integers(0, 7))} - {length})
    documents = tuple(pairwise([0, *cuts, length])) if rng.random() < 0.5 else ()
    prompts = tuple(int(rng.integers(0, hi - lo + 1)) for lo, hi in documents or ((0, length),))
    shards = int(rng.choice([c for c in range(1, num_ranks + 1) if num_ranks % c == 0]))
    request = PlanRequest(
        length=length,
        block_size=block,
        num_ranks=num_ranks,
        num_clean_shards=num_ranks if rng.random() < 0.6 else shards,
        num_views=int(rng.integers(1, 3)),
        clean_rule=list(CleanRule)[rng.integers(2)],
        corrupted_rule=list(CorruptedRule)[rng.integers(2)],
        window=int(rng.choice([0, 1, 2, block, block + 1, 3 * block, int(rng.integers(1, 200))])),
        documents=documents,
        prompts=prompts if rng.random() < 0.2 else (),
        ownership=Ownership.CONTIGUOUS if rng.random() < 0.1 else Ownership.DUAL_END,
        row_multiple=int(rng.choice([1, 1, 4])),
        windowed_exchange=bool(rng.random() < 0.7),
    )
    return request, int(rng.integers(num_ranks))


def partition_problems(chunks: ChunkMap, length: int) -> Iterator[str]:
    """Chunks cover [0, length) in order, and each has one owner."""
    if chunks.bounds[0] != 0 or chunks.bounds[-1] != length or (np.diff(chunks.bounds) < 0).any():
        yield f"bounds {chunks.bounds.tolist()} do not cover [0, {length})"
    if sorted(chunks.chunks_of.ravel()) != list(range(len(chunks.bounds) - 1)):
        yield f"chunks {chunks.chunks_of.tolist()} do not have one owner each"


def sums(values: NDArray[np.int64], chunks: ChunkMap, blocks: BlockTable) -> NDArray[np.int64]:
    """Sum of a quantity of blocks over each chunk."""
    before = np.concatenate([[0], np.cumsum(values)])
    at = before[np.searchsorted(blocks.start, chunks.bounds)]
    return np.diff(at)


def balance_problems(request: PlanRequest) -> Iterator[str]:
    """Every token and block has one owner, and no rank has more than its bound.

    Equal blocks of one document: a rank has at most what it has in the sample padded to 2P equal
    chunks, where all ranks are equal. Otherwise chunks are off by at most a block of tokens, and
    dealing leaves no rank further above the mean than the largest spread of P neighbouring chunks.
    """
    blocks, num_ranks, length = request.blocks, request.num_ranks, request.length
    owners = make_owners(
        blocks, num_ranks, request.num_clean_shards, request.ownership, request.num_views
    )
    for chunks in (owners.clean, owners.corrupted):
        yield from partition_problems(chunks, length)
    corrupted = owners.corrupted
    owned = np.searchsorted(corrupted.bounds, blocks.start, side="right") - 1
    whole = (corrupted.bounds[owned] <= blocks.start) & (blocks.stop <= corrupted.bounds[owned + 1])
    mine = (corrupted.chunks_of[owners.rank_of_block] == owned[:, None]).any(1)
    if not (whole & mine).all():
        yield f"blocks {np.flatnonzero(~(whole & mine))} are cut or not at their owner"
    if request.ownership is Ownership.CONTIGUOUS or request.num_clean_shards != num_ranks:
        return
    tokens = np.diff(corrupted.bounds)[corrupted.chunks_of].sum(1)
    cost = sums(np.add(*block_costs(blocks)), corrupted, blocks)
    load = cost[corrupted.chunks_of].sum(1)
    if has_equal_blocks(blocks) and not blocks.document_start.any():
        per_chunk, size = -(-blocks.num_blocks // (2 * num_ranks)), blocks.block_size
        n = 2 * num_ranks * per_chunk * size  # the padded sample
        padded = n * (n + 1) // 2 + n * (n + size) // 2
        if tokens.max() > n // num_ranks or load.max() * num_ranks > padded:
            yield f"tokens {tokens} or pairs {load} exceed those of the padded sample"
        if length == n and len(set(load)) > 1:
            yield f"pairs {load} are not equal although blocks divide"
    elif num_ranks > 1:
        pieces, groups = corrupted.num_pieces, cost.reshape(-1, num_ranks)
        if np.abs(tokens - length / num_ranks).max() > 2 * pieces * blocks.block_size:
            yield f"tokens {tokens} are further from equal than {2 * pieces} blocks"
        if load.max() > load.mean() + (groups.max(1) - groups.min(1)).max():
            yield f"pairs {load} are further above the mean than the spread of {groups}"


@dataclass(frozen=True)
class Fingerprints:
    """Running sums of random numbers over clean positions and own coordinates."""

    clean: Hashes
    own: Hashes

    @classmethod
    def of(cls, request: PlanRequest) -> "Fingerprints":
        """One number for each key, and a last one for rows that hold no key."""
        rng = np.random.default_rng(3)
        size = request.length * (1 + request.num_views) + 2
        numbers = rng.integers(0, 2**64, size, dtype=np.uint64)
        return cls(numbers[: request.length + 1], numbers[request.length + 1 :])


def running(numbers: Hashes) -> Hashes:
    """Sums of the numbers before each place, modulo 2^64."""
    return np.concatenate([np.zeros(1, np.uint64), np.cumsum(numbers, dtype=np.uint64)])


def launched(launch: Launch, keys: dict[KeySpace, Hashes]) -> Hashes:
    """Fingerprints of what each row of each problem sees, [Z, num_rows]."""
    at = np.arange(launch.num_rows) + launch.num_keys - launch.num_rows
    lo = np.zeros_like(at) if launch.left < 0 else np.clip(at - launch.left, 0, None)
    hi = np.full_like(at, launch.num_keys) if launch.right < 0 else at + launch.right + 1
    hi = np.maximum(np.minimum(hi, launch.num_keys), lo)
    total = np.zeros((launch.num_problems, launch.num_rows), np.uint64)
    first = 0
    for run in launch.keys:
        start, stop = (np.clip(x - first, 0, run.length) for x in (lo, hi))
        total += keys[run.space][run.starts[:, None] + stop]
        total -= keys[run.space][run.starts[:, None] + start]
        first += run.length
    return total


def coverage_problems(plan: RankPlan) -> Iterator[str]:
    """Each row's launches see its allowed keys, each once, and nothing else."""
    numbers, seen = Fingerprints.of(plan.request), plan.visibility
    clean, own = running(numbers.clean), running(numbers.own)
    want = clean[seen.clean_hi] - clean[seen.clean_lo] + own[seen.own_hi] - own[seen.own_lo]
    keys = {
        KeySpace.CLEAN: running(numbers.clean[plan.exchange.buffer_position]),
        KeySpace.OWN: running(numbers.own[plan.own_coordinate]),
    }
    got = np.zeros(plan.rows.num_rows, np.uint64)
    for launch in plan.launches:
        np.add.at(got, launch.rows[:, None] + np.arange(launch.num_rows), launched(launch, keys))
    if not (got == want).all():
        yield f"rows {np.flatnonzero(got != want)} of rank {plan.rank} see other keys than allowed"


def whole_problems(request: PlanRequest) -> Iterator[str]:
    """All ranks together hold every row and run every pair of one rank's plan."""
    plans = [make_plan(request, rank) for rank in range(request.num_ranks)]
    coordinates = np.concatenate([p.rows.coordinate[p.rows.stream > 0] for p in plans])
    if not (np.sort(coordinates) == np.arange(request.num_views * request.length)).all():
        yield "corrupted rows are not each on one rank"
    alone = make_plan(PlanRequest(**_alone(request)), 0)
    replicas = request.num_ranks // request.num_clean_shards
    for stream, copies in ((0, replicas), (1, 1)):
        pairs = [sum(_pairs(p, stream) for p in plans), _pairs(alone, stream) * copies]
        if pairs[0] != pairs[1]:
            yield f"{pairs[0]} pairs of stream {stream} instead of {pairs[1]}"
    for plan in plans:
        yield from coverage_problems(plan)


def _alone(request: PlanRequest) -> dict[str, object]:
    kept = ("length", "block_size", "num_views", "clean_rule", "corrupted_rule", "window")
    return {name: getattr(request, name) for name in (*kept, "documents", "prompts")}


def _pairs(plan: RankPlan, stream: int) -> int:
    seen, rows = plan.visibility, plan.rows
    here = rows.stream == 0 if stream == 0 else rows.stream > 0
    keys = seen.clean_hi - seen.clean_lo + seen.own_hi - seen.own_lo
    return int(keys[here].sum())


def test_ten_thousand_plans_partition_balance_and_cover() -> None:
    checked = 0
    for index in range(CASES):
        request, rank = drawn(index)
        problems = [*balance_problems(request), *coverage_problems(make_plan(request, rank))]
        if index % ALL_RANKS_EVERY == 0:
            problems += whole_problems(request)
        assert problems == [], (index, request)
        checked += 1
    assert checked == 10_000


def test_the_cases_are_varied() -> None:
    """No dimension that the test above is about is missing from what it draws."""
    requests = [drawn(index)[0] for index in range(0, CASES, 20)]
    share = {
        "several documents": np.mean([len(r.documents) > 1 for r in requests]),
        "windowed": np.mean([r.window > 0 for r in requests]),
        "window above a block": np.mean([r.window > r.block_size for r in requests]),
        "ragged": np.mean([r.length % (2 * r.num_ranks * r.block_size) > 0 for r in requests]),
        "even": np.mean([r.length % (2 * r.num_ranks * r.block_size) == 0 for r in requests]),
        "several ranks": np.mean([r.num_ranks > 1 for r in requests]),
        "hybrid": np.mean([1 < r.num_clean_shards < r.num_ranks for r in requests]),
        "more than 32 blocks": np.mean([r.blocks.num_blocks > 32 for r in requests]),
        "prompts": np.mean([any(r.prompts) for r in requests]),
    }
    assert min(share.values()) > 0.05, share
    assert len(set(requests)) == len(requests)


@pytest.mark.parametrize("change", ["drop", "twice", "shift"])
def test_a_wrong_launch_changes_the_fingerprint(change: str) -> None:
    plan = make_plan(PlanRequest(96, 4, num_ranks=2, num_clean_shards=2, window=9), 1)
    assert list(coverage_problems(plan)) == []
    last = plan.launches[-1]
    other = {
        "drop": plan.launches[:-1],
        "twice": (*plan.launches, last),
        "shift": (*plan.launches[:-1], _shifted(last)),
    }[change]
    broken = RankPlan(**{**vars(plan), "launches": other})
    assert len(list(coverage_problems(broken))) == 1


def _shifted(launch: Launch) -> Launch:
    run = launch.keys[0]
    moved = type(run)(run.space, run.starts - 1, run.length)
    return Launch(**{**vars(launch), "keys": (moved, *launch.keys[1:])})
