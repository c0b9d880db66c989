"""A GPU waits for its CPU where launches take longer than kernels, and where its queue is empty."""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from megatron_bp.layout.run_shape import BatchShape, Policy, Recompute, Run, Topology
from megatron_bp.planning.cluster import Cluster
from megatron_bp.planning.hardware import H200, Hardware, calibrated
from megatron_bp.planning.host import HOST_H200, NO_HOST, HostTime
from megatron_bp.planning.predict import num_checks, predict
from megatron_bp.planning.shapes import model_named
from megatron_bp.planning.simulate import simulate_step
from megatron_bp.planning.simulate_program import Scenario

MODEL = model_named("nemotron-3b")
FOUR = Topology(context=4, shards=4)
KEPT = Policy(Recompute.FULL_KEEP_ATTENTION, keep_gathered=False)
SLOW = HostTime(layer_forward=1.0, layer_again=0.5, layer_backward=2.0, head=3.0)


def run(length: int, topology: Topology = FOUR, policy: Policy = KEPT, layers: int = 4) -> Run:
    model = replace(MODEL, layers=((MODEL.layers[0][0], layers),))
    batch = BatchShape(length, 32, global_batch=2 * topology.data)
    return Run(model, batch, topology, policy)


def seconds(host: HostTime, of: Run) -> float:
    return predict(of, Cluster(replace(H200, host=host))).total


@pytest.mark.parametrize(
    ("kept", "backward"),
    [
        (Recompute.NONE, 2.0),
        (Recompute.SELECTIVE, 2.25),
        (Recompute.FULL_KEEP_ATTENTION, 2.5),
        (Recompute.FULL, 3.0),
    ],
)
def test_a_layer_takes_its_kernels_or_its_launches(kept: Recompute, backward: float) -> None:
    assert SLOW.late_forward(0.25) == 0.75
    assert SLOW.late_backward(kept, 0.5) == backward - 0.5
    assert SLOW.late_head(1.0) == 2.0
    assert SLOW.late_forward(1.5) == SLOW.late_backward(kept, 9.0) == SLOW.late_head(4.0) == 0.0


def test_a_step_of_launches_alone_takes_what_they_take() -> None:
    """Two micro-batches of four layers; a GPU that computes in no time beside a slow CPU."""
    fast = replace(H200, matmul_tflops=1e9, head_tflops=1e9, elementwise_tb_s=1e9, host=SLOW)
    fast = replace(fast, kernels=tuple(replace(k, forward=1e9, backward=1e9) for k in H200.kernels))
    one = run(4096, Topology(), replace(KEPT, checks_for_nan=False))
    assert predict(one, Cluster(fast)).total == pytest.approx(2 * (4 * 3.5 + 3.0), rel=1e-3)


def test_a_long_sample_loses_what_a_step_waits_for_answers_and_no_more() -> None:
    """128K on four GPUs: no launch is waited for, so batches, checks and the step are all."""
    of, host = run(131072), HOST_H200
    more = seconds(host, of) - seconds(NO_HOST, of)
    assert more == pytest.approx(2 * host.micro_batch + host.step + host.check * num_checks(of))
    assert more < 0.01 * seconds(NO_HOST, of)
    assert seconds(host, run(2048)) > 2 * seconds(NO_HOST, run(2048))


def test_checks_are_of_the_loss_and_of_buckets_that_are_reduced_early() -> None:
    assert num_checks(run(4096)) == 2 + 4 + 1
    assert num_checks(run(4096, policy=replace(KEPT, overlap_data_parallel=False))) == 2
    assert num_checks(run(4096, Topology())) == 2
    assert num_checks(run(4096, policy=replace(KEPT, checks_for_nan=False))) == 0


@pytest.mark.parametrize("length", [2048, 16384, 131072])
@pytest.mark.parametrize("kept", [Recompute.NONE, Recompute.FULL_KEEP_ATTENTION, Recompute.FULL])
def test_the_simulator_waits_as_the_closed_form_does(length: int, kept: Recompute) -> None:
    """Three quarters of the shortest step are launches, a tenth of the second, 2 % of the last."""
    of, cluster = run(length, policy=replace(KEPT, recompute=kept)), Cluster(H200)
    simulated = simulate_step(Scenario(of, cluster)).seconds
    assert simulated == pytest.approx(predict(of, cluster).total, rel=0.02)


BASELINE = replace(FOUR, block_owned=False)


@pytest.mark.parametrize(
    ("kept", "keep_gathered", "in_backward"),
    [
        (Recompute.FULL_KEEP_ATTENTION, False, 2),
        (Recompute.FULL_KEEP_ATTENTION, True, 1),
        (Recompute.FULL, False, 1),  # the second forward gathers
    ],
)
def test_corrupted_keys_that_travel_cost_their_launches(
    kept: Recompute, keep_gathered: bool, in_backward: int
) -> None:
    policy = replace(KEPT, recompute=kept, keep_gathered=keep_gathered)
    slow = replace(SLOW, exchange=0.25)
    assert slow.of(run(4096, BASELINE, policy)) == replace(
        slow, layer_forward=1.25, layer_backward=2.0 + 0.25 * in_backward
    )
    assert slow.of(run(4096, FOUR, policy)) == slow


@pytest.mark.parametrize("length", [2048, 16384])
def test_the_simulator_starts_the_exchanges_of_the_baseline_too(length: int) -> None:
    of, cluster = run(length, BASELINE), Cluster(H200)
    simulated = simulate_step(Scenario(of, cluster)).seconds
    assert simulated == pytest.approx(predict(of, cluster).total, rel=0.03)


def given(tmp_path: Path, value: object) -> Hardware:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"hardware": {"host": value}}))
    return calibrated(H200, [path])


def test_a_user_gives_a_cpu_by_field_or_switches_it_off(tmp_path: Path) -> None:
    mine = given(tmp_path, {"layer_forward": 0.02, "check": 0}).host
    assert mine == replace(HOST_H200, layer_forward=0.02, check=0.0)
    assert given(tmp_path, 0).host == NO_HOST
    assert all(getattr(NO_HOST, field.name) == 0 for field in fields(HostTime))


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ({"layer": 1}, "must be 0, or seconds by name for some of layer_forward, layer_again"),
        (3, "host=3 must be 0, or seconds by name"),
        ({"step": -1}, r"host=\{'step': -1\} must be seconds of at least 0"),
    ],
)
def test_other_values_for_the_cpu_are_refused(tmp_path: Path, value: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        given(tmp_path, value)


def test_rows_on_the_wire_are_work_beside_which_launches_run() -> None:
    """Tensor ranks halve the kernels of a layer, but wait for rows meanwhile."""
    wide = run(1024, Topology(tensor=2))
    slow = Cluster(replace(H200, node_link=replace(H200.node_link, latency_s=60e-6)))
    near, far = predict(wide, Cluster(H200)), predict(wide, slow)
    assert near.host - far.host == pytest.approx(far.exposed_tensor - near.exposed_tensor)
    assert near.host > far.host
