"""A simulated step is exact where it can be computed by hand, and its bytes are those counted."""

import time
from dataclasses import replace

import numpy as np
import pytest

from megatron_bp.layout.decomposition import Phase
from megatron_bp.layout.model_shape import (
    AttentionShape,
    DeltaNetShape,
    ExpertsShape,
    LayerKind,
    ModelShape,
)
from megatron_bp.layout.owners import Ownership
from megatron_bp.layout.plan import PlanRequest, make_plan
from megatron_bp.layout.run_shape import BatchShape, Policy, Recompute, Run, Topology
from megatron_bp.layout.traffic import Axis, step_traffic
from megatron_bp.layout.visibility import CleanRule
from megatron_bp.planning.events import Lane, Timeline
from megatron_bp.planning.hardware import H200, Link
from megatron_bp.planning.host import NO_HOST
from megatron_bp.planning.predict import (
    Cluster,
    Schedule,
    optimizer_seconds,
    predict,
    run_head_seconds,
)
from megatron_bp.planning.shapes import model_named
from megatron_bp.planning.simulate import breakdown, simulate_step, summary
from megatron_bp.planning.simulate_mesh import Slow
from megatron_bp.planning.simulate_program import Scenario, spread
from megatron_bp.planning.simulate_work import layer_work, phase_pairs

GIB = 2**30
FULL, SLIDING = AttentionShape(8, 4, 64), AttentionShape(8, 4, 64, window=256)
DENSE = ModelShape("dense", 512, 4096, ((LayerKind(FULL, 1024), 4),))
MIXED = ModelShape("mixed", 512, 4096, ((LayerKind(SLIDING, 1024), 4), (LayerKind(FULL, 1024), 4)))
EXPERTS = ModelShape("experts", 512, 4096, ((LayerKind(FULL, 512, ExpertsShape(8, 2, 256)), 4),))
DELTA = ModelShape(
    "delta",
    512,
    4096,
    ((LayerKind(DeltaNetShape(4, 8, 64, 64), 1024), 2), (LayerKind(FULL, 1024), 2)),
)
BATCH = BatchShape(4096, 32, global_batch=4)
CLUSTER = Cluster(replace(H200, host=NO_HOST), node_size=4)


def flat(speed: float, latency: float = 0.0) -> Link:
    """A link of one speed, GiB/s."""
    return Link(((1.0, speed),), latency)


def step(run: Run, cluster: Cluster = CLUSTER, **values: object) -> Timeline:
    """The timeline of a run."""
    return simulate_step(Scenario(run, cluster, **values))  # type: ignore[arg-type]


def test_one_rank_takes_the_sum_of_its_launches() -> None:
    run = Run(DENSE, BATCH, Topology())
    line, gpu = step(run), CLUSTER.hardware
    whole, pruned = (layer_work(run, DENSE.layers[0][0], CLUSTER, x) for x in (False, True))
    layers = [whole, whole, whole, pruned]
    forward = sum(x.before + x.after + x.ffn + float(x.forward.sum()) for x in layers)
    backward = sum(2 * (x.before + x.after + x.ffn) + float(x.backward.sum()) for x in layers)
    batch = forward + backward + run_head_seconds(run, gpu)
    want = run.num_micro_batches * batch + optimizer_seconds(run, gpu)
    assert line.seconds == pytest.approx(want, rel=1e-12)
    assert line.busy[Lane.COMPUTE][0] == pytest.approx(want, rel=1e-12)
    assert not line.sent


def test_two_ranks_overlap_as_computed_by_hand() -> None:
    """One layer, one sample: the late slab travels behind local and early launches."""
    model = ModelShape("one", 512, 4096, ((LayerKind(FULL, 1024), 1),))
    policy = Policy(prune_last_layer=False, overlap_data_parallel=False)
    run = Run(model, replace(BATCH, global_batch=1), Topology(context=2, shards=2), policy)
    link = flat(50.0)
    cluster = Cluster(replace(H200, node_link=link, network_link=link, host=NO_HOST), 4)
    work, gpu = layer_work(run, model.layers[0][0], cluster, False), cluster.hardware
    data = sum(link.seconds(c.sent_bytes) for c in step_traffic(run) if c.axis is Axis.DATA)
    slab = 4096 // 4 * 2 * 4 * 64  # elements of a quarter of the keys and values
    gather, reduce = link.seconds(slab * 2), link.seconds(slab * 4)
    ends = []
    for rank in range(2):
        local, early, late = work.forward[:, rank]
        here, gathered = work.before + local, work.before + gather
        here = max(here, gathered) + early  # a rank without early launches waits all the same
        ends.append(max(here, gathered + gather) + late)
    forward = np.array(ends)  # no rank waits for the other before its late slab's gradients
    now = forward + work.after + work.ffn + run_head_seconds(run, gpu)
    now = now + 2 * (work.after + work.ffn)
    done = (now + work.backward[2] + work.backward[1]).max()
    end = done + 2 * reduce + 2 * work.before + data + optimizer_seconds(run, gpu)
    assert step(run, cluster).seconds == pytest.approx(end, rel=1e-12)


RUNS = {
    "one": Run(DENSE, BATCH, Topology()),
    "csbp": Run(DENSE, BATCH, Topology(context=4, shards=4)),
    "csbp over nodes": Run(MIXED, BATCH, Topology(context=8, shards=8)),
    "pure bp": Run(DENSE, BATCH, Topology(context=4)),
    "hybrid": Run(MIXED, BATCH, Topology(context=8, shards=4)),
    "cp": Run(MIXED, BATCH, Topology(context=4, shards=4, block_owned=False)),
    "cp, all gathered": Run(
        MIXED, BATCH, Topology(context=4, shards=4, block_owned=False, windowed_exchange=False)
    ),
    "two views": Run(DENSE, replace(BATCH, num_views=2), Topology(context=4, shards=4, data=2)),
    "regather": Run(DENSE, BATCH, Topology(context=4, shards=4), Policy(keep_gathered=False)),
    "tensor": Run(DENSE, BATCH, Topology(tensor=2, context=4, shards=4)),
    "data": Run(DENSE, BATCH, Topology(context=2, shards=2, data=4)),
    "plain data": Run(
        DENSE, BATCH, Topology(data=4), Policy(shard_optimizer=False, overlap_data_parallel=False)
    ),
    "pipeline": Run(DENSE, BATCH, Topology(context=2, shards=2, pipeline=4)),
    "chunks": Run(MIXED, BATCH, Topology(context=2, shards=2, pipeline=4, virtual=2)),
    "experts": Run(EXPERTS, BATCH, Topology(context=4, shards=4, expert=8, data=2)),
    "delta": Run(DELTA, BATCH, Topology(tensor=2)),
    "all axes": Run(
        EXPERTS, BATCH, Topology(tensor=2, context=4, shards=4, expert=4, pipeline=2, data=2)
    ),
    **{
        f"recompute {kind}": Run(
            EXPERTS,
            BATCH,
            Topology(tensor=2, context=4, shards=4, expert=2),
            Policy(recompute=kind, keep_gathered=kind is Recompute.FULL),
        )
        for kind in Recompute
    },
}
CAUSES = {
    Axis.SHARDS: "context",
    Axis.CONTEXT: "context",
    Axis.TENSOR: "tensor",
    Axis.EXPERT: "expert",
    Axis.DATA: "data",
    Axis.PIPELINE: "pipeline",
}


@pytest.mark.parametrize("how", ["flat", "by node", "blocking"])
@pytest.mark.parametrize("name", RUNS)
def test_simulated_bytes_are_the_counted_ones(name: str, how: str) -> None:
    """Mean over ranks; between stages the mean of middle ones, which are what is counted."""
    run = RUNS[name]
    schedule = Schedule.BLOCKING if how == "blocking" else Schedule.OVERLAPPED
    line = step(run, schedule=schedule, hierarchical=how == "by node")
    want: dict[str, float] = {}
    for collective in step_traffic(run):
        cause = CAUSES[collective.axis]
        want[cause] = want.get(cause, 0.0) + collective.step_bytes
    got: dict[str, np.ndarray] = {}
    for (cause, _), values in line.sent.items():
        got[cause] = got.get(cause, 0) + values
    per_stage, stages = run.topology.world // run.topology.pipeline, run.topology.pipeline
    if stages > 1:  # the first stage sends no gradient of rows and the last no rows
        between = got.pop("pipeline")
        middle = between[per_stage:-per_stage] if stages > 2 else 2 * between
        assert middle.mean() == pytest.approx(want.pop("pipeline"), rel=1e-12)
    means = {cause: float(values.mean()) for cause, values in got.items()}
    assert means == pytest.approx({c: v for c, v in want.items() if v}, rel=1e-12)


@pytest.mark.parametrize("name", RUNS)
def test_every_rank_accounts_for_the_whole_step(name: str) -> None:
    line = step(RUNS[name])
    for rank in range(RUNS[name].topology.world):
        parts = breakdown(line, rank)
        assert parts.total == pytest.approx(line.seconds, rel=1e-12)
        assert parts.idle > -1e-12  # what is left over, after a stage's last gradient
        assert parts.idle < 1e-12 or RUNS[name].topology.pipeline > 1


@pytest.mark.parametrize("name", RUNS)
def test_faster_links_and_overlap_never_cost_time(name: str) -> None:
    slow, fast = flat(5.0, 1e-5), flat(50.0, 1e-6)
    times = [
        step(RUNS[name], Cluster(replace(H200, node_link=node, network_link=network), 4)).seconds
        for node, network in ((slow, slow), (fast, slow), (fast, fast))
    ]
    assert times == sorted(times, reverse=True)
    blocking = step(RUNS[name], schedule=Schedule.BLOCKING).seconds
    assert step(RUNS[name]).seconds <= blocking * (1 + 1e-12)


def test_a_slow_rank_delays_the_step_by_what_it_computes_longer() -> None:
    """Tensor ranks have equal work and wait for one another after every part of it."""
    run = Run(DENSE, BATCH, Topology(tensor=4), Policy(overlap_data_parallel=False))
    base = step(run)
    for factor in (1.1, 2.0):
        slow = step(run, slow=(Slow(2, compute=factor),))
        more = (factor - 1) * base.busy[Lane.COMPUTE][2]
        assert slow.seconds == pytest.approx(base.seconds + more, rel=1e-12)
        optimizer = (factor - 1) * optimizer_seconds(run, CLUSTER.hardware)
        for rank in (0, 1, 3):
            parts, before = breakdown(slow, rank), breakdown(base, rank)
            longer = parts.waited["tensor"] - before.waited["tensor"]
            assert longer + parts.idle == pytest.approx(more, rel=1e-9)
            assert parts.idle == pytest.approx(optimizer, rel=1e-9)


def test_a_slow_link_delays_a_blocking_step_by_its_messages() -> None:
    run = Run(DENSE, BATCH, Topology(context=4, shards=4), Policy(overlap_data_parallel=False))
    base = step(run, schedule=Schedule.BLOCKING)
    slow = step(run, schedule=Schedule.BLOCKING, slow=(Slow(1, link=3.0),))
    messages = base.busy[Lane.NODE][1] + base.busy[Lane.NODE_DATA][1]
    assert slow.seconds == pytest.approx(base.seconds + 2 * messages, rel=1e-9)


def test_a_rank_that_does_not_exist_cannot_be_slow() -> None:
    with pytest.raises(ValueError, match="slow rank 4 does not exist; use one below 4"):
        step(Run(DENSE, BATCH, Topology(context=4, shards=4)), slow=(Slow(4, 2.0),))
    with pytest.raises(ValueError, match="factors must be positive"):
        Slow(1, compute=0.0)


def test_contiguous_ownership_makes_ranks_wait() -> None:
    batch = replace(BATCH, length=2**17, global_batch=1)
    even = Run(DENSE, batch, Topology(context=4, shards=4))
    uneven = Run(DENSE, batch, Topology(context=4, shards=4, ownership=Ownership.CONTIGUOUS))
    lines = [step(run) for run in (even, uneven)]
    spread_of = [float(np.ptp(line.busy[Lane.COMPUTE])) for line in lines]
    assert spread_of[0] < 1e-9 < spread_of[1]
    assert lines[1].seconds > lines[0].seconds
    assert lines[1].waited["context"].max() > 10 * lines[0].waited["context"].max()


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"num_views": 2},
        {"clean_rule": CleanRule.BLOCK_CAUSAL},
        {"window": 1024},
        {"num_clean_shards": 1},
        {"num_clean_shards": 2},
        {"ownership": Ownership.CONTIGUOUS},
        {"gather_corrupted": True},
    ],
)
def test_phases_hold_the_pairs_that_launches_of_a_plan_hold(values: dict[str, object]) -> None:
    shape = {"length": 8192, "block_size": 32, "num_ranks": 4, "num_clean_shards": 4}
    request = PlanRequest(**{**shape, **values})
    got = phase_pairs(request).of_rows(corrupted_only=False)
    plans = [make_plan(request, rank) for rank in range(4)]
    for which in (0, 1):
        want = [
            [
                sum(x.num_pairs for x in plan.launches if (x.ready, x.slab)[which] is phase)
                for plan in plans
            ]
            for phase in Phase
        ]
        total = np.sum(want, axis=0)
        # The first block of a chunk has its neighbour elsewhere: one block of 64 or more.
        np.testing.assert_allclose(got[which] / total, want / total, atol=0.008)
        np.testing.assert_allclose(got[which].sum(axis=0), total, rtol=1e-12)


@pytest.mark.parametrize("degree", [4, 8])
def test_the_closed_form_of_a_model_of_the_paper_agrees(degree: int) -> None:
    """Where nothing but the busiest rank matters the two predictions may differ by little."""
    batch = BatchShape(2**17, 32, global_batch=1)
    run = Run(model_named("nemotron-8b"), batch, Topology(context=degree, shards=degree))
    cluster = Cluster(H200, 8)
    assert step(run, cluster).seconds == pytest.approx(predict(run, cluster).total, rel=0.02)


def test_layers_of_several_kinds_are_mixed_and_end_with_the_last_kind() -> None:
    kinds = spread(((MIXED.layers[0][0], 4), (MIXED.layers[1][0], 2)))
    windows = [kind.mixer.window for kind in kinds if isinstance(kind.mixer, AttentionShape)]
    assert windows == [256, 256, 0, 256, 256, 0]


def test_4096_ranks_take_seconds() -> None:
    """Four of Nemotron 14B's 40 layers: a tenth of the whole, which may take a minute."""
    kind = model_named("nemotron-14b").layers[0][0]
    model = ModelShape("short", 5120, 131072, ((kind, 4),))
    topology = Topology(tensor=2, context=64, shards=64, pipeline=2, data=16)
    run = Run(model, BatchShape(2**20, 32, global_batch=64), topology)
    begin = time.process_time()
    line = step(run, Cluster(H200, 8), hierarchical=True, slow=(Slow(1234, 1.2),))
    assert time.process_time() - begin < 6
    assert len(line.end) == 4096
    assert "4,096 ranks" in summary(line)
    assert line.sent["context", Lane.NETWORK].min() > 0


def test_a_slow_replica_holds_up_others_only_where_gradients_meet() -> None:
    """Four replicas of two tensor ranks; the others wait for the slow one at the step's end."""
    run = Run(DENSE, replace(BATCH, length=2**15), Topology(tensor=2, data=4))
    base, slow = step(run), step(run, slow=(Slow(0, compute=2.0),))
    assert slow.seconds > 1.5 * base.seconds
    for rank in range(2, 8):
        before, after = breakdown(base, rank), breakdown(slow, rank)
        assert after.waited["tensor"] <= before.waited["tensor"] * (1 + 1e-9)
        longer = after.waited["data"] + after.idle - before.waited["data"] - before.idle
        assert longer == pytest.approx(slow.seconds - base.seconds, rel=0.02)


MEASURED = {
    # ms of a step and of waiting for keys on either rank: docs/bench/nccl.md, two H200s, 4 layers
    "csbp": (Topology(context=2, shards=2), 1240, (64, 4)),
    "pure bp": (Topology(context=2), 1638, (0, 0)),
    "cp": (Topology(context=2, shards=2, block_owned=False), 1255, (64, 10)),
    "contiguous": (Topology(context=2, shards=2, ownership=Ownership.CONTIGUOUS), 1560, (727, 5)),
}


@pytest.mark.parametrize("name", MEASURED)
def test_steps_measured_on_two_gpus_are_simulated_within_six_percent(name: str) -> None:
    topology, milliseconds, waiting = MEASURED[name]
    model = model_named("nemotron-3b")
    model = replace(model, layers=((model.layers[0][0], 4),))
    policy = Policy(recompute=Recompute.FULL_KEEP_ATTENTION, keep_gathered=False)
    run = Run(model, BatchShape(65536, 32, global_batch=1), topology, policy)
    line = step(run, Cluster(H200, 8))
    assert 1e3 * line.seconds == pytest.approx(milliseconds, rel=0.06)
    for rank in (0, 1):
        parts = breakdown(line, rank)
        keys = sum(table.get("context", 0.0) for table in (parts.exposed, parts.waited))
        assert 1e3 * keys == pytest.approx(waiting[rank], abs=0.06 * milliseconds)
