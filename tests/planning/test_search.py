"""A search tries every split, keeps what fits, orders it by time, and counts what it refuses."""

import time
from dataclasses import replace

import pytest

from megatron_bp.layout.memory import peak_memory
from megatron_bp.layout.model_shape import AttentionShape, dense_model
from megatron_bp.layout.run_shape import Mode, Policy, Topology
from megatron_bp.planning.cluster import Cluster
from megatron_bp.planning.hardware import GIB, H200
from megatron_bp.planning.predict import predict
from megatron_bp.planning.search import Found, describe, divisors, search, topologies
from megatron_bp.planning.shapes import model_named
from megatron_bp.planning.workload import Workload

CLUSTER = Cluster(H200)


def workload(world: int = 8, length: int = 131072, batch: int = 8) -> Workload:
    return Workload(model_named("nemotron-8b"), "standard", length, 32, world, batch, CLUSTER)


@pytest.fixture(scope="module")
def found() -> Found:
    return search(workload(), num_best=4)


def test_every_topology_fills_the_world_once() -> None:
    all_of_them = list(topologies(workload(16)))
    assert len(set(all_of_them)) == len(all_of_them)
    assert {t.world for t in all_of_them} == {16}
    assert {t.mode for t in all_of_them} == set(Mode)
    assert Topology(tensor=2, context=8, shards=8) in all_of_them
    assert max(t.tensor for t in all_of_them) == 8


def test_every_data_rank_has_equally_many_samples() -> None:
    assert {t.data for t in topologies(workload(24, batch=6))} == {1, 2, 3, 6}


def test_the_best_are_ordered_distinct_and_fit(found: Found) -> None:
    times = [candidate.step.total for candidate in found.best]
    assert times == sorted(times)
    assert len({candidate.run.topology for candidate in found.best}) == len(found.best) == 4
    limit = (H200.memory_gib - H200.reserve_gib) * GIB
    for candidate in found.best:
        assert candidate.memory == peak_memory(candidate.run)
        assert candidate.memory.total <= limit
        assert candidate.step == predict(candidate.run, CLUSTER)
        tokens = candidate.tokens_per_second
        assert tokens == pytest.approx(8 * 131072 / candidate.step.total)


def test_all_combinations_are_accounted_for(found: Found) -> None:
    assert found.num_tried == found.num_fitting + sum(r.count for r in found.refused)
    memory = [r for r in found.refused if r.reason == "does not fit into memory"]
    assert memory
    assert all(r.excess > 0 for r in memory)
    assert next(c.run.topology.mode for c in found.modes) is found.best[0].run.topology.mode


def test_owning_blocks_beats_the_baseline_and_replicas(found: Found) -> None:
    assert found.best[0].run.topology.mode is Mode.CSBP
    order = [candidate.run.topology.mode for candidate in found.modes]
    assert order.index(Mode.CP) < order.index(Mode.BP)


def test_less_memory_changes_the_choice_and_none_leaves_nothing() -> None:
    small = replace(workload(), cluster=Cluster(replace(H200, memory_gib=70.0)))
    best = search(small).best[0]
    assert best.memory.total / GIB <= 62
    none = search(replace(workload(), cluster=Cluster(replace(H200, memory_gib=9.0))))
    assert none.best == none.modes == ()
    assert none.num_fitting == 0


def test_a_policy_is_taken_as_given() -> None:
    found = search(workload(), policy=Policy(grad_wire_bytes=2, main_grad_bytes=2))
    assert {c.run.policy.grad_wire_bytes for c in found.best} == {2}


def test_4096_gpus_and_a_million_tokens_take_less_than_30_seconds() -> None:
    """CPU seconds of this process, so that neighbours do not count; 3 to 4 seen."""
    model = model_named("nemotron-14b")
    start = time.process_time()
    found = search(Workload(model, "standard", 2**20, 32, 4096, 512, CLUSTER))
    assert time.process_time() - start < 30
    assert found.num_tried > 10_000
    assert found.best[0].run.topology.world == 4096


def test_divisors_are_all_of_them() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


def test_a_run_reads_as_words() -> None:
    text = describe(Topology(tensor=2, context=4, shards=4, expert=2), 1, Policy())
    assert text == (
        "TP 2, PP 1, context 4 (CSBP, 4 shards), EP 2, DP 1, micro-batch 1, recompute none, "
        "keys kept"
    )


def test_a_tiny_model_prefers_data_parallelism() -> None:
    model = dense_model("tiny", 2, 512, 1024, AttentionShape(8, 8, 64), 32000)
    best = search(Workload(model, "standard", 4096, 32, 8, 64, CLUSTER)).best[0]
    assert best.run.topology.data == 8
