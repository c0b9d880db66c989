"""Moves to the end of backward what adds to no gradient that travels.

Launches whose clean keys are all this rank's own (the squares of its chunks and what is left around
its blocks: an eighth of the pairs on four ranks) add to gradients that stay here. With a buffer of
their own for these, the reduction of all others can start before them and travels while they run.
What the last rank's late chunk sees of its early one, beside it, is not among them: with that in
its last part too this rank would come to the reduction an eighth of backward before the others.
Pure integers, computed once a pass and cached. Specified by tests/attention/test_own_last.py.
"""

from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from megatron_bp.attention.contract import Window
from megatron_bp.attention.schedule import MOST_BLOCK_ROWS, Pass, RowBook, Step
from megatron_bp.layout.decomposition import KeySpace, Phase
from megatron_bp.layout.exchange import SlabExchange
from megatron_bp.layout.plan import RankPlan


@lru_cache(maxsize=64)
def own_last(plan: RankPlan, todo: Pass) -> Pass:
    """The backward pass `todo`, launches at own clean keys in phase LOCAL and in space SHARD.

    The same pass if nothing travels, or under a window: its launches are short, and few rows
    travel.
    """
    exchange = plan.exchange
    if not isinstance(exchange, SlabExchange) or exchange.num_shards == 1 or plan.request.window:
        return todo
    local = np.full(exchange.num_buffer_rows, -1, dtype=np.int64)
    for source, target, length in exchange.own:
        local[target : target + length] = source + np.arange(length)
    steps: list[tuple[Phase, Step]] = []
    last: list[tuple[Phase, Step]] = []
    for phase in reversed(Phase):
        for step in todo.steps[phase]:
            moved = _moved(step, local)
            last += [(Phase.LOCAL, x) for x in moved]
            steps += [] if moved else [(phase, step)]
    if not last:
        return todo
    sizes = {**todo.num_keys, KeySpace.SHARD: plan.rows.num_clean}
    books = {space: RowBook(size) for space, size in sizes.items()}
    ordered = todo.reordered([*steps, *last], RowBook(todo.num_rows), books)
    return replace(ordered, num_keys=sizes)


def _moved(step: Step, local: NDArray[np.int64]) -> tuple[Step, ...]:
    """The step at keys in local order; nothing if it has no clean keys, or some of other ranks, or
    is not around the diagonal.
    """
    if step.window == Window() and step.rows.length > MOST_BLOCK_ROWS:
        return ()
    keys = []
    for space, runs in step.keys:
        if space is KeySpace.CLEAN:
            starts = local[runs.starts]
            ends = local[runs.starts + runs.length - 1]
            if (starts < 0).any() or (ends - starts != runs.length - 1).any():
                return ()
            space, runs = KeySpace.SHARD, replace(runs, starts=starts)
        keys.append((space, runs))
    if step.far or all(space is KeySpace.OWN for space, _ in keys):
        return ()
    return (replace(step, keys=tuple(keys)),)
