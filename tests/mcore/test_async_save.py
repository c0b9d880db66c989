"""Checkpoints written in the background hold the weights of their step, and are resumed from equal.

In bf16 with the distributed optimizer: what is resumed are its fp32 main parameters and moments.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch

from megatron_bp.mcore.checkpoints import iteration_folder
from megatron_bp.mcore.cpu_saving import copy_tensors
from tests.mcore.forks import Megatron, checkpoint, finish, fork_job
from tests.mcore.runs import flags, read_scalars

RUN = (
    "--train-iters 4 --eval-iters 0 --bf16 --use-distributed-optimizer "
    "--dist-ckpt-optim-fully-reshardable --context-parallel-size 2 --block-parallel-size 2"
)
ASYNC = "--async-save --use-persistent-ckpt-worker --async-strategy mcore"


def _runs(folder: Path) -> None:
    """Four steps at once, and with a stop after two; each step is saved."""
    whole, parts = f"{RUN} --save-interval 1 --save {folder}/whole", f"{folder}/parts"
    asynchronous = f"{RUN} {ASYNC} --save-interval 1 --save {parts} --load {parts}"
    finish(2, flags(whole), folder / "log_whole")
    finish(2, flags(f"{asynchronous} --exit-interval 2"), folder / "log_first")
    finish(2, flags(asynchronous), folder / "log_second")


def test_an_asynchronous_save_is_the_synchronous_one(tmp_path: Path, megatron: Megatron) -> None:
    megatron.call(_runs, tmp_path)
    for step in (1, 2, 3, 4):
        want = checkpoint(iteration_folder(tmp_path / "whole", step))
        got = checkpoint(iteration_folder(tmp_path / "parts", step))
        assert got.keys() == want.keys()
        assert [key for key in want if not torch.equal(got[key], want[key])] == [], step
    logged = [read_scalars(tmp_path / f"log_{name}/tensorboard") for name in ("first", "second")]
    whole = read_scalars(tmp_path / "log_whole/tensorboard")
    for one, other in zip(logged[0] + logged[1], whole, strict=True):
        assert (one["bdlm loss"], one["grad-norm"]) == (other["bdlm loss"], other["grad-norm"])


def _kill_the_writer(rank: int) -> None:
    """In the third step, after the save of the second."""
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

    from megatron_bp.mcore.forward_step import DiffusionForwardStep

    call, count = DiffusionForwardStep.__call__, [0]

    def counted(self: Any, *args: Any) -> Any:
        count[0] += 1
        if count[0] == 5:
            os.kill(PersistentAsyncCaller._persistent_process.pid, signal.SIGKILL)
        return call(self, *args)

    DiffusionForwardStep.__call__ = counted  # type: ignore[method-assign]


def _orphaned(folder: Path) -> tuple[list[int], str]:
    given = flags(f"--train-iters 8 --eval-iters 0 {ASYNC} --save {folder}/run --save-interval 2")
    job = fork_job(1, given, folder / "log", _kill_the_writer)
    return job.wait(timeout=60.0), job.log.read_text()


def test_a_rank_without_its_writer_ends_instead_of_waiting(
    tmp_path: Path, megatron: Megatron
) -> None:
    ends, text = megatron.call(_orphaned, tmp_path)
    assert ends == [1], text[-3000:]
    assert "is gone: killed, or it could not write" in text
    assert "start the job again" in text


def _fail(rank: int) -> None:
    """In the third step, after the save of the second."""
    from megatron_bp.mcore.forward_step import DiffusionForwardStep

    call, count = DiffusionForwardStep.__call__, [0]

    def counted(self: Any, *args: Any) -> Any:
        count[0] += 1
        if count[0] == 5:
            raise RuntimeError("a failure of training")
        return call(self, *args)

    DiffusionForwardStep.__call__ = counted  # type: ignore[method-assign]


def _failed(folder: Path) -> tuple[list[int], str]:
    given = f"--train-iters 8 --eval-iters 0 {ASYNC} --exit-signal-handler --save-interval 2"
    job = fork_job(1, flags(f"{given} --save {folder}/run"), folder / "log", _fail)
    return job.wait(timeout=60.0), job.log.read_text()


def test_a_failed_rank_ends_although_its_writer_ignores_sigterm(
    tmp_path: Path, megatron: Megatron
) -> None:
    ends, text = megatron.call(_failed, tmp_path)
    assert ends == [1], text[-3000:]
    assert "a failure of training" in text


def test_the_writer_gets_tensors_of_its_own() -> None:
    trained = torch.ones(3)
    ((_, key, (written, tensors)),) = copy_tensors([("file", "key", ([b"x"], [("item", trained)]))])
    trained.zero_()
    assert (key, written) == ("key", [b"x"])
    assert tensors[0][1].tolist() == [1.0, 1.0, 1.0]
