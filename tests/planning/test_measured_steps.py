"""Predictions hold for whole Megatron steps that were measured after they were made.

docs/bench/step_h200.json: Nemotron 3B cut to 8, 4 or 2 layers, block 32, Transformer Engine, one,
two and four H200. Seen: seconds -3.5 to +4.1 %, peaks -0.5 to +6.6 %. One is missed and not here:
at commit 3159e6a, where each slab was reduced by itself, a baseline that waits for every collective
took 1.26 times the prediction on two GPUs, because ranks waited for one another's launches.
"""

from dataclasses import dataclass, replace

import pytest

from megatron_bp.layout.memory import peak_memory
from megatron_bp.layout.owners import Ownership
from megatron_bp.layout.run_shape import BatchShape, Policy, Recompute, Run, Topology
from megatron_bp.planning.cluster import Cluster
from megatron_bp.planning.hardware import H200
from megatron_bp.planning.predict import Schedule, predict
from megatron_bp.planning.shapes import model_named

KEPT = Policy(Recompute.FULL_KEEP_ATTENTION, keep_gathered=False, overlap_data_parallel=True)
ALONE = Topology()
CSBP, FOUR = Topology(context=2, shards=2), Topology(context=4, shards=4)
L64, L256 = 65536, 262144


@dataclass(frozen=True)
class Measured:
    """One measured step: how it was run, milliseconds, and GiB of allocated memory at the peak."""

    layers: int
    milliseconds: float
    gib: float
    topology: Topology = ALONE
    policy: Policy = KEPT
    length: int = L64
    num_views: int = 1
    schedule: Schedule = Schedule.OVERLAPPED

    def run(self) -> Run:
        """The run as planned."""
        whole = model_named("nemotron-3b")
        model = replace(whole, layers=((whole.layers[0][0], self.layers),))
        batch = BatchShape(self.length, 32, num_views=self.num_views)
        sharded = replace(self.policy, shard_optimizer=self.topology.context > 1)
        return Run(model, batch, self.topology, sharded)


UNPRUNED = replace(KEPT, prune_last_layer=False)
AGAIN = replace(KEPT, recompute=Recompute.FULL)
KEYS = replace(KEPT, keep_gathered=True)
STEPS = {
    "one GPU": Measured(8, 4677.5, 54.378),
    "one GPU, unpruned": Measured(8, 4949.2, 56.143, policy=UNPRUNED),
    "one GPU, everything again": Measured(8, 5468.0, 48.284, policy=AGAIN),
    "one GPU, two views": Measured(8, 7341.4, 69.467, num_views=2),
    "CSBP 2": Measured(4, 1239.7, 23.214, CSBP),
    "CSBP 2, keys kept": Measured(4, 1235.0, 23.6, CSBP, KEYS),
    "CSBP 2, everything again": Measured(4, 1438.0, 22.1, CSBP, AGAIN),
    "CP 2": Measured(4, 1255.0, 23.2, replace(CSBP, block_owned=False)),
    "pure BP 2": Measured(4, 1638.0, 28.9, Topology(context=2)),
    "contiguous 2": Measured(4, 1560.0, 23.3, replace(CSBP, ownership=Ownership.CONTIGUOUS)),
    "CSBP 4": Measured(4, 638.6, 14.995, FOUR),
    "CP 4": Measured(4, 650.1, 15.504, replace(FOUR, block_owned=False)),
    "CP 4 that waits": Measured(
        4, 655.2, 15.196, replace(FOUR, block_owned=False), schedule=Schedule.BLOCKING
    ),
    "hybrid 4": Measured(4, 878.1, 17.891, Topology(context=4, shards=2)),
    "CSBP 4, shared sums": Measured(4, 628.7, 14.99, FOUR),
    "CP 4, shared sums": Measured(4, 641.0, 15.50, replace(FOUR, block_owned=False)),
    "CSBP 4, 128K": Measured(2, 877.7, 17.43, FOUR, length=2 * L64),
    "CSBP 4, 256K": Measured(2, 2876.3, 27.97, FOUR, length=L256),
    "CP 4, 256K": Measured(2, 2903.0, 30.00, replace(FOUR, block_owned=False), length=L256),
    "CP 4 that waits, 256K": Measured(
        2,
        2920.2,
        28.25,
        replace(FOUR, block_owned=False),
        length=L256,
        schedule=Schedule.BLOCKING,
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_seconds_of_a_step_are_within_5_percent(name: str) -> None:
    measured = STEPS[name]
    step = predict(measured.run(), Cluster(H200), measured.schedule)
    assert 1e3 * step.total == pytest.approx(measured.milliseconds, rel=0.05)


@pytest.mark.parametrize(
    ("length", "layers", "checked", "milliseconds"),
    [
        (16384, 2, True, 103.1),
        (16384, 4, False, 184.5),
        (16384, 8, True, 369.2),
        (65536, 4, True, 1203.3),
    ],
)
def test_steps_that_wait_for_their_cpu_are_within_3_percent(
    length: int, layers: int, checked: bool, milliseconds: float
) -> None:
    """CSBP on two H200, commit 6931bc6, medians of four; seen: +0.1 to +1.0 %.

    Of the CPU's numbers the waits are of the same day: of a profile at 64K, and one check of the
    difference that checks make to four layers at 16K.
    """
    policy = replace(KEPT, checks_for_nan=checked)
    of = Measured(layers, milliseconds, 0.0, CSBP, policy, length).run()
    assert 1e3 * predict(of, Cluster(H200)).total == pytest.approx(milliseconds, rel=0.03)


@pytest.mark.parametrize("name", STEPS)
def test_the_peak_of_memory_is_at_most_7_percent_above(name: str) -> None:
    measured = STEPS[name]
    over = peak_memory(measured.run()).total / 2**30 / measured.gib - 1
    assert -0.01 < over < 0.07


CP4 = replace(FOUR, block_owned=False)
UNCHECKED = replace(KEPT, checks_for_nan=False)
LATER = {
    "64K": Measured(4, 629.0, 15.2, FOUR, UNCHECKED),
    "128K, 8 layers": Measured(8, 4037.3, 29.0, FOUR, UNCHECKED, 2 * L64),
    "256K, 4 layers": Measured(4, 6645.8, 34.3, FOUR, UNCHECKED, L256),
    "64K, CP": Measured(4, 650.2, 15.9, CP4, UNCHECKED),
    "64K, CP that waits": Measured(4, 645.0, 15.7, CP4, UNCHECKED, schedule=Schedule.BLOCKING),
    "256K, CP that waits": Measured(
        4, 6676.6, 36.3, CP4, UNCHECKED, L256, schedule=Schedule.BLOCKING
    ),
    "16K": Measured(4, 112.4, 10.4, FOUR, UNCHECKED, 16384),
    "16K, CP": Measured(4, 123.8, 10.6, CP4, UNCHECKED, 16384),
    "16K, CP that waits": Measured(
        4, 122.8, 10.5, CP4, UNCHECKED, 16384, schedule=Schedule.BLOCKING
    ),
}


@pytest.mark.parametrize("name", LATER)
def test_steps_of_four_gpus_without_checks_are_within_5_percent_and_short_ones_10(
    name: str,
) -> None:
    """Commit 49f45a6; seen: -4.6 to -1.6 %, at 16K -6.2 to -9.9 %; peaks -2.6 to -0.4 %."""
    measured = LATER[name]
    step = predict(measured.run(), Cluster(H200), measured.schedule)
    most = 0.10 if measured.length == 16384 else 0.05
    assert 1e3 * step.total == pytest.approx(measured.milliseconds, rel=most)
    assert -0.03 < peak_memory(measured.run()).total / 2**30 / measured.gib - 1 < 0.07
