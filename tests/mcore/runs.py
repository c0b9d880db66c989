"""Runs whole training jobs of `examples/pretrain_bdlm.py` in gloo processes and reads what they
logged.

Several jobs share one start of the processes, because importing Megatron takes most of a small
job's time. The jobs run in child processes only: enabling the CPU changes torch for the whole
process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.distributed import run_distributed

Job = tuple[str, list[str]]

MODEL = [
    "--num-layers",
    "2",
    "--hidden-size",
    "32",
    "--num-attention-heads",
    "4",
    "--group-query-attention",
    "--num-query-groups",
    "2",
    "--ffn-hidden-size",
    "48",
    "--seq-length",
    "48",
    "--max-position-embeddings",
    "256",
    "--position-embedding-type",
    "rope",
    "--normalization",
    "RMSNorm",
    "--swiglu",
    "--disable-bias-linear",
    "--untie-embeddings-and-output-weights",
    "--qk-layernorm",
    "--make-vocab-size-divisible-by",
    "64",
    "--micro-batch-size",
    "1",
    "--global-batch-size",
    "2",
    "--train-iters",
    "4",
    "--lr",
    "1e-3",
    "--min-lr",
    "1e-3",
    "--lr-decay-style",
    "constant",
    "--eval-iters",
    "1",
    "--eval-interval",
    "100",
    "--log-interval",
    "1",
    "--mock-data",
    "--tokenizer-type",
    "NullTokenizer",
    "--vocab-size",
    "127",
    "--seed",
    "7",
    "--num-workers",
    "0",
    "--attention-dropout",
    "0",
    "--hidden-dropout",
    "0",
    "--use-cpu-initialization",
    "--tensorboard-log-interval",
    "1",
]
DIFFUSION = ["--bdlm-objective", "standard", "--mask-token-id", "120", "--block-size", "8"]


def flags(text: str, base: Sequence[str] = (*MODEL, *DIFFUSION)) -> list[str]:
    """Returns the flags of a small job, with those of `text` added."""
    return [*base, *text.split()]


def train_jobs(num_ranks: int, jobs: Sequence[Job], folder: Path) -> dict[str, list[dict]]:
    """Returns, for each job by name, what it logged at each step: tag -> value."""
    logged = [(name, [*given, "--tensorboard-dir", str(folder / name)]) for name, given in jobs]
    run_distributed(_train_jobs, num_ranks, logged, timeout=240.0)
    return {name: read_scalars(folder / name) for name, _ in jobs}


def read_scalars(folder: Path) -> list[dict[str, float]]:
    """Returns tag -> value for each logged step of a TensorBoard folder, in step order."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    steps: dict[int, dict[str, float]] = {}
    for tag in events.Tags()["scalars"]:
        if tag.endswith("vs samples"):
            continue
        for event in events.Scalars(tag):
            steps.setdefault(event.step, {})[tag] = event.value
    return [steps[step] for step in sorted(steps)]


def as_job(rank: int, num_ranks: int, given: list[str], run: Callable[[], None]) -> None:
    """Calls `run` as torchrun would start it, and removes Megatron's global state after it."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK=str(rank))
    sys.argv = ["pretrain_bdlm.py", *given]
    try:
        run()
    except SystemExit as end:  # --exit-interval
        if end.code:
            raise
    finally:
        from megatron.core import parallel_state
        from megatron.training.global_vars import get_tensorboard_writer
        from megatron.training.training import destroy_global_state

        if get_tensorboard_writer() is not None:
            get_tensorboard_writer().close()
        destroy_global_state()
        parallel_state.destroy_model_parallel()


def _train_jobs(rank: int, num_ranks: int, jobs: list[Job]) -> None:
    from megatron_bp.mcore.adaptor import train

    for _, given in jobs:
        as_job(rank, num_ranks, given, train)
