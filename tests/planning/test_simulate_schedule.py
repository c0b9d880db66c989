"""Pipeline orders run every turn once, keep 1F1B's memory bound, and have its bubble."""

from types import SimpleNamespace

import numpy as np
import pytest

from megatron_bp.planning.events import Lane, Op, alone, simulate
from megatron_bp.planning.simulate_schedule import Pipeline, Turn

PIPELINES = [(1, 1, 3), (2, 1, 1), (4, 1, 8), (4, 1, 2), (2, 2, 4), (4, 2, 8), (3, 4, 6), (1, 2, 3)]


@pytest.mark.parametrize(("stages", "chunks", "batches"), PIPELINES)
def test_every_turn_comes_once_and_backward_after_forward(
    stages: int, chunks: int, batches: int
) -> None:
    pipeline = Pipeline(stages, chunks, batches)
    for stage in range(stages):
        turns = pipeline.turns(stage)
        assert len(turns) == len(set(turns)) == 2 * chunks * batches
        for turn in turns:
            if not turn.forward:
                assert turns.index(turn._replace(forward=True)) < turns.index(turn)


@pytest.mark.parametrize(("stages", "batches"), [(4, 8), (4, 2), (6, 6)])
def test_a_stage_keeps_at_most_as_many_micro_batches_as_stages_are_left(
    stages: int, batches: int
) -> None:
    for stage in range(stages):
        running = np.cumsum(
            [1 if t.forward else -1 for t in Pipeline(stages, 1, batches).turns(stage)]
        )
        assert running.max() == min(stages - stage, batches)
        assert running[-1] == 0


@pytest.mark.parametrize(("stages", "chunks", "batches"), PIPELINES)
def test_the_order_is_megatrons(stages: int, chunks: int, batches: int) -> None:
    """Its tables and counts of warm-up turns, asked of a communicator of our making."""
    schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    table = schedules.get_schedule_table(batches, chunks, stages if chunks > 1 else batches)
    for stage in range(stages):
        turns = Pipeline(stages, chunks, batches).turns(stage)
        forward = [(t.micro_batch, t.chunk) for t in turns if t.forward]
        assert forward == table
        assert [(t.micro_batch, chunks - 1 - t.chunk) for t in turns if not t.forward] == table
        group = SimpleNamespace(size=lambda: stages, rank=lambda stage=stage: stage)
        peer = SimpleNamespace(
            pp_group=group, virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None
        )
        _, _, warm_up, _ = schedules.get_pp_rank_microbatches(
            batches, chunks, stages, p2p_communicator=peer
        )
        if stages > 1:
            first = [t.forward for t in turns].index(False)
            assert first == min(warm_up + 1, chunks * batches)


def seconds(stages: int, chunks: int, batches: int) -> float:
    """A step whose forward takes 1 and whose backward takes 2 of each chunk; messages take none."""
    pipeline = Pipeline(stages, chunks, batches)
    at = {(s, turn): i for s in range(stages) for i, turn in enumerate(pipeline.turns(s))}
    programs = []
    for stage in range(stages):
        program = []
        for turn in pipeline.turns(stage):
            source = pipeline.before(stage, turn)
            arrives = ((source[0], at[source]),) if source else ()
            time = np.full(1, 1.0 if turn.forward else 2.0)
            program.append(Op("turn", "x", (Lane.COMPUTE,), time, alone(1), (), arrives))
        programs.append(program)
    return simulate(programs, 1, []).seconds


@pytest.mark.parametrize(("stages", "chunks", "batches"), PIPELINES)
def test_the_bubble_is_that_of_the_literature(stages: int, chunks: int, batches: int) -> None:
    """(p - 1) forwards and backwards of one chunk: a share (p - 1) / (m v) of the work."""
    assert seconds(stages, chunks, batches) == 3 * chunks * batches + 3 * (stages - 1)


def test_a_turn_takes_what_the_stage_before_it_sends() -> None:
    pipeline = Pipeline(4, 2, 8)
    assert pipeline.before(0, Turn(True, 3, 0)) == ()
    assert pipeline.before(2, Turn(True, 3, 0)) == (1, Turn(True, 3, 0))
    assert pipeline.before(0, Turn(True, 3, 1)) == (3, Turn(True, 3, 0))
    assert pipeline.before(3, Turn(False, 3, 1)) == ()
    assert pipeline.before(3, Turn(False, 3, 0)) == (0, Turn(False, 3, 1))


def test_interleaving_needs_micro_batches_that_divide() -> None:
    with pytest.raises(ValueError, match=r"6 micro-batches must be a multiple of 4 .* use 8"):
        Pipeline(4, 2, 6)
