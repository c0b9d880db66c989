"""One run that changes its layout at every stop goes on as if it had never stopped.

The optimizer's state (distributed over ranks, or not) and the schedule move with the weights. Every
layout both reads the checkpoint of another and writes the next one; the losses and gradient norms
are compared with a run of one rank that was never stopped.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mcore.forks import Megatron, finish
from tests.mcore.runs import flags, read_scalars

# Weight decay and a schedule with warm-up show a lost step count or optimizer state.
RUN = (
    "--train-iters 14 --eval-iters 0 --weight-decay 0.1 --lr-decay-style cosine "
    "--lr-warmup-iters 3 --lr-decay-iters 20 --min-lr 0 --no-load-rng"
)
CSBP = "--context-parallel-size 2 --block-parallel-size 2"
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
DISTRIBUTED = "--use-distributed-optimizer"
ANY = f"{DISTRIBUTED} --dist-ckpt-optim-fully-reshardable"
TP, PP = "--tensor-model-parallel-size 2 --sequence-parallel", "--pipeline-model-parallel-size 2"
# Stops after two steps each: (ranks, layout).
TWO_RANKS = (
    (1, ANY),
    (2, f"{CSBP} {OVERLAP} {ANY}"),
    (2, f"{TP} {ANY}"),
    (2, f"{PP} {ANY}"),
    (2, f"{OVERLAP} {ANY}"),
    (2, f"--block-parallel-size 2 {ANY}"),
    (1, ANY),
)
FOUR_RANKS = (
    (1, ANY),
    (4, f"--context-parallel-size 2 --block-parallel-size 4 {ANY}"),
    (4, f"{CSBP} {TP} {ANY}"),
    (4, f"{CSBP} {PP} {ANY}"),
    (4, f"{CSBP} {ANY}"),
    (1, ANY),
)
# The distributed optimizer's default format follows data and context ranks only.
DATA = ((1, DISTRIBUTED), (2, f"{CSBP} {DISTRIBUTED}"), (2, DISTRIBUTED))
CHAINS = {"two_ranks": TWO_RANKS, "four_ranks": FOUR_RANKS, "data_ranks": DATA}


def _chain(folder: Path, name: str) -> None:
    run = folder / name
    for number, (num_ranks, layout) in enumerate(CHAINS[name]):
        stop = 2 * (number + 1)
        given = f"{RUN} {layout} --save {run} --load {run} --save-interval 2 --exit-interval {stop}"
        finish(num_ranks, flags(given), run / str(number))


def _whole(folder: Path) -> None:
    finish(1, flags(f"{RUN} --save {folder}/whole --save-interval 14"), folder / "uninterrupted")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, megatron: Megatron) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    megatron.call(_whole, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", CHAINS)
def test_a_run_goes_on_equal_in_every_layout(
    tmp_path: Path, megatron: Megatron, whole: Path, name: str
) -> None:
    megatron.call(_chain, tmp_path, name)
    logged = []
    for number in range(len(CHAINS[name])):
        logged += read_scalars(tmp_path / name / str(number) / "tensorboard")
    want = read_scalars(whole / "uninterrupted/tensorboard")
    for step, one in enumerate(logged):
        for tag, digits in (("bdlm loss", 2e-7), ("grad-norm", 1e-5), ("learning-rate", 0)):
            assert one[tag] == pytest.approx(want[step][tag], rel=digits), (name, step + 1, tag)
    assert len(logged) == 2 * len(CHAINS[name])
