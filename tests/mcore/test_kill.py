"""A job killed by SIGKILL again and again, in a step and at every point of a save, with synchronous
and asynchronous saves, ends as one that was never killed: bit for bit, weights and optimizer.

After each death the folder must name a complete checkpoint (or none, before the first). A death is
arranged by an audit hook, which Python calls before it opens or renames a file; the death itself is
a real SIGKILL, to the whole session as when a node fails.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_bp.mcore.checkpoints import TRACKER, complete_iterations, iteration_folder
from tests.mcore.forks import Megatron, checkpoint, finish, fork_job
from tests.mcore.runs import flags, read_scalars

STEPS = 10
RUN = (
    f"--train-iters {STEPS} --save-interval 2 --eval-iters 0 --weight-decay 0.1 "
    "--lr-decay-style cosine --lr-warmup-iters 3 --lr-decay-iters 20 --min-lr 0"
)
ASYNC = "--async-save --use-persistent-ckpt-worker --async-strategy mcore"
TWO = (
    "--context-parallel-size 2 --block-parallel-size 2 --use-distributed-optimizer "
    "--dist-ckpt-optim-fully-reshardable"
)


Arm = Callable[[], None]


@dataclass(frozen=True)
class Life:
    """One start of the job: how rank `rank` dies, and what the tracker may read afterwards."""

    name: str
    arm: Arm
    tracker: tuple[str, ...]
    flags: str = ""
    rank: int = 0
    ends: int = -signal.SIGKILL


def die() -> None:
    """The whole session of this process is gone, its background writer too."""
    os.killpg(0, signal.SIGKILL)


def in_step(number: int) -> None:
    """Dies in the forward pass of the step with this number, counted in this life."""
    from megatron_bp.mcore.forward_step import DiffusionForwardStep

    call, count = DiffusionForwardStep.__call__, [0]

    def counted(self: Any, *args: Any) -> Any:
        count[0] += 1
        if count[0] == 2 * number:  # two micro-batches a step
            die()
        return call(self, *args)

    DiffusionForwardStep.__call__ = counted  # type: ignore[method-assign]


def asked_to_end() -> None:
    """All processes get SIGTERM in the first step, as Slurm sends it before a time limit."""
    from megatron_bp.mcore.forward_step import DiffusionForwardStep

    call, told = DiffusionForwardStep.__call__, [False]

    def tell(self: Any, *args: Any) -> Any:
        if not told[0]:
            told[0] = True
            os.killpg(0, signal.SIGTERM)
        return call(self, *args)

    DiffusionForwardStep.__call__ = tell  # type: ignore[method-assign]


def at(event: str, ending: str, before: Callable[[Path], None] | None = None) -> None:
    """Dies when a file whose path ends so is about to be opened for writing, or renamed."""

    def hook(name: str, given: tuple[Any, ...]) -> None:
        if name != event or not str(given[0]).endswith(ending):
            return
        if event == "open" and given[1] != "w":
            return
        if before is not None:
            before(Path(str(given[0])))
        die()

    sys.addaudithook(hook)


def torn(path: Path) -> None:
    """What a kill in the middle of writing leaves."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb", 0) as file:
        file.write(b"\x80half")


def emptied(path: Path) -> None:
    """What a kill between opening and writing leaves."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))


def in_first_step() -> None:
    in_step(1)


def in_second_step() -> None:
    in_step(2)


def in_third_step() -> None:
    in_step(3)


def in_tensor_file() -> None:
    at("open", "__0_0.distcp", torn)


def in_tensor_file_of_rank_1() -> None:
    at("open", "__1_0.distcp", torn)


def before_metadata() -> None:
    at("os.rename", ".metadata.tmp")


def in_description() -> None:
    at("open", "metadata.json", emptied)


def before_tracker() -> None:
    at("open", TRACKER)


def in_tracker() -> None:
    at("open", TRACKER, emptied)


ONE_RANK = (
    Life("step", in_first_step, ("none",)),
    Life("tensor file of the first save", in_tensor_file, ("none",)),
    Life("step after a save", in_third_step, ("2",)),
    Life("tensor file", in_tensor_file, ("2",)),
    Life("before .metadata", before_metadata, ("2",)),
    Life("metadata.json", in_description, ("2",)),
    Life("before the tracker", before_tracker, ("2",)),
    Life("tracker", in_tracker, ("",)),
    Life("SIGTERM", asked_to_end, ("5",), "--exit-signal-handler", ends=0),
    Life("SIGTERM, asynchronous", asked_to_end, ("6",), f"--exit-signal-handler {ASYNC}", ends=0),
    Life("step after an asynchronous save", in_second_step, ("6",), ASYNC),
    Life("tracker, asynchronous", in_tracker, ("",), ASYNC),
)
TWO_RANKS = (
    Life("tensor file of one rank", in_tensor_file_of_rank_1, ("none",), rank=1),
    Life("tracker", in_tracker, ("",)),
)
CASES = {"one rank": (1, "", ONE_RANK), "two ranks": (2, TWO, TWO_RANKS)}


def live(folder: Path, name: str) -> list[str]:
    """Runs the job whole, and again with all its lives; returns the tracker after each death."""
    num_ranks, layout, lives = CASES[name]
    finish(num_ranks, flags(f"{RUN} {layout} --save {folder}/whole"), folder / "uninterrupted")
    run = folder / "run"
    given = f"{RUN} {layout} --save {run} --load {run}"
    found = []
    for number, life in enumerate(lives):

        def death(rank: int, life: Life = life) -> None:
            if rank == life.rank:
                life.arm()

        job = fork_job(num_ranks, flags(f"{given} {life.flags}"), folder / str(number), death)
        ends = job.wait()
        # A rank may see that its peer is gone, and end by that, before the signal reaches it.
        known = {life.ends, 1} if num_ranks > 1 else {life.ends}
        wrong = life.ends not in ends or not known.issuperset(ends)
        assert not wrong, f"{life.name}: {ends}\n{job.log.read_text()[-6000:]}"
        tracker = run / TRACKER
        found.append(tracker.read_text() if tracker.exists() else "none")
        if found[-1].isdecimal():
            assert int(found[-1]) in complete_iterations(run), life.name
    finish(num_ranks, flags(given), folder / "last")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_job_killed_at_every_point_ends_as_if_never_killed(
    tmp_path: Path, megatron: Megatron, name: str
) -> None:
    found = megatron.call(live, tmp_path, name)
    for life, tracker in zip(CASES[name][2], found, strict=True):
        assert tracker in life.tracker, life.name
    want = checkpoint(iteration_folder(tmp_path / "whole", STEPS))
    got = checkpoint(iteration_folder(tmp_path / "run", STEPS))
    assert got.keys() == want.keys()
    assert {key.split(".")[-3] for key in want if key.startswith("optimizer")} >= {"exp_avg"}
    assert [key for key in want if not torch.equal(got[key], want[key])] == []
    logged = read_scalars(tmp_path / "last/tensorboard")
    whole = read_scalars(tmp_path / "uninterrupted/tensorboard")
    assert len(logged) >= 2
    for one, other in zip(logged, whole[-len(logged) :], strict=True):
        assert one["bdlm loss"] == other["bdlm loss"]
        assert one["grad-norm"] == other["grad-norm"]
