"""A run that resumes at any step, in any layout, trains on the same samples with the same noise."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from tests.distributed import run_distributed
from tests.mcore.runs import as_job, flags

STEPS, BATCH = 4, 2
RUN = f"--bdlm-objective nemotron_labs --train-iters {STEPS} --global-batch-size {BATCH}"
# step to resume at, processes, layout
RESUMED = {
    "one rank, larger micro-batches": (2, 1, "--micro-batch-size 2"),
    "clean shards": (1, 2, "--context-parallel-size 2 --block-parallel-size 2"),
    "clean replicas": (2, 2, "--block-parallel-size 2"),
    "data parallel": (3, 2, ""),
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Digest of every training sample of each run, in order of steps, sorted within a step."""
    folder = tmp_path_factory.mktemp("checkpoints")
    save = f"{RUN} --save {folder} --save-interval 1 --no-save-optim --eval-iters 0"
    found: dict[str, list[str]] = {}
    for world, jobs in ((1, [("whole", flags(save))]), (2, [])):
        for name, (step, processes, text) in RESUMED.items():
            again = f"{RUN} {text} --load {folder} --ckpt-step {step} --no-load-optim"
            if processes == world:
                jobs.append((name, flags(f"{again} --eval-iters 0")))
        ranks = run_distributed(_train_recorded, world, jobs, timeout=240.0)
        for name, _ in jobs:
            # Ranks that share samples saw equal ones; data-parallel ranks share a step's out.
            parts = [rank[name] for rank in ranks]
            every = [digest for step in zip(*parts, strict=True) for digest in step]
            found[name] = parts[0] if parts[0] == parts[-1] else every
    return {name: _sorted_in_steps(digests) for name, digests in found.items()}


def test_a_run_sees_each_sample_once(seen: dict[str, list[str]]) -> None:
    assert len(set(seen["whole"])) == len(seen["whole"]) == STEPS * BATCH


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_sees_the_rest(seen: dict[str, list[str]], name: str) -> None:
    assert seen[name] == seen["whole"][RESUMED[name][0] * BATCH :]


def _sorted_in_steps(digests: list[str]) -> list[str]:
    steps = [digests[first : first + BATCH] for first in range(0, len(digests), BATCH)]
    return [digest for step in steps for digest in sorted(step)]


def _train_recorded(rank: int, num_ranks: int, jobs: list[Any]) -> dict[str, list[str]]:
    from megatron_bp.mcore.adaptor import train
    from megatron_bp.mcore.forward_step import DiffusionForwardStep

    receive = DiffusionForwardStep._receive
    found: dict[str, list[str]] = {}

    def record(self: Any, samples: Any, training: bool) -> Any:
        batch = receive(self, samples, training)
        if training:
            for sample in zip(batch.streams, batch.labels, batch.weights, strict=True):
                whole = b"".join(part.cpu().numpy().tobytes() for part in sample)
                digests.append(hashlib.sha256(whole).hexdigest())
        return batch

    DiffusionForwardStep._receive = record  # type: ignore[method-assign]
    for name, given in jobs:
        digests = found[name] = []
        as_job(rank, num_ranks, given, train)
    return found
