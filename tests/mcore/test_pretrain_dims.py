"""Interleaved pipelines and dealt experts in whole jobs: they log what one rank logs.

All start from one checkpoint, because Megatron draws other weights for other layouts.
"""

from __future__ import annotations

import pytest

from tests.mcore.runs import flags, train_jobs
from tests.mcore.test_pretrain_bdlm import DIGITS, LOSS, MASKED, NORM

KIND = {
    "dense": "--num-layers 4 --global-batch-size 4",
    "experts": "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 "
    "--moe-aux-loss-coeff 0.1 --moe-token-dispatcher-type alltoall",
}
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
INTERLEAVED = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
SHARDED = "--context-parallel-size 2 --block-parallel-size 2"
JOBS = {
    "interleaved": ("dense", INTERLEAVED),
    "interleaved, attention kept": ("dense", f"{INTERLEAVED} {FULL}"),
    "dealt experts": ("experts", f"{SHARDED} --expert-model-parallel-size 2"),
    "dealt experts, pure": (
        "experts",
        f"--block-parallel-size 2 --expert-model-parallel-size 2 {FULL}",
    ),
}


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, float]]]:
    folder = tmp_path_factory.mktemp("logs")

    def start(kind: str, text: str = "") -> list[str]:
        load = f"--load {folder / kind} --finetune --no-load-optim --no-load-rng"
        return flags(f"{KIND[kind]} {load} {text}")

    made = [
        (f"{kind} first", flags(f"{text} --train-iters 1 --save-interval 1 --save {folder / kind}"))
        for kind, text in KIND.items()
    ]
    one = train_jobs(1, [*made, *((kind, start(kind)) for kind in KIND)], folder)
    two = train_jobs(2, [(name, start(*given)) for name, given in JOBS.items()], folder)
    return one | two


@pytest.mark.parametrize("name", JOBS)
def test_a_layout_logs_what_one_rank_logs(logged: dict, name: str) -> None:
    got, wanted = logged[name], logged[JOBS[name][0]]
    assert len(got) == len(wanted) == 4
    for one, other in zip(got, wanted, strict=True):
        assert one[MASKED] == other[MASKED]
        assert one[LOSS] == pytest.approx(other[LOSS], rel=2 * DIGITS)
        assert one[NORM] == pytest.approx(other[NORM], rel=1e-5)
