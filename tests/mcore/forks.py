"""Runs whole training jobs in processes forked from one that has imported Megatron, and kills them.

Importing Megatron takes longer than a small job; a fork is a process of its own all the same, with
its own memory, process group and end. Each job is a session of its own, as a job step of a cluster
is: what it leaves behind (writers of checkpoints) ends with `kill`. Knows nothing of the tests.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from tests.mcore.runs import as_job

Death = Callable[[int], None]


class Megatron:
    """A process that has imported Megatron, where `fork_job` and `finish` work."""

    def __init__(self) -> None:
        context = mp.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other,))
        self._process.start()
        other.close()

    def __enter__(self) -> Megatron:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()

    def call(self, fn: Callable[..., Any], *args: Any, timeout: float = 600.0) -> Any:
        """Returns `fn(*args)` from that process.

        `fn` is a module-level function; arguments and result must be picklable.
        Raises: RuntimeError with the traceback of `fn`; TimeoutError after `timeout` seconds.
        """
        self._pipe.send((fn, args))
        if not self._pipe.poll(timeout):
            raise TimeoutError(f"{fn.__name__} did not end within {timeout} s")
        failure, result = self._pipe.recv()
        if failure:
            raise RuntimeError(failure)
        return result


def _serve(pipe: Any) -> None:
    # Once, for all forks: what every job imports. Tokenizers bring transformers, which takes most.
    import megatron.core.tokenizers.text  # noqa: F401
    import torch.utils.tensorboard

    from megatron_bp.mcore import cpu, dataset, forward_step, model  # noqa: F401

    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        cpu.enable_cpu()
    while True:
        fn, args = pipe.recv()
        try:
            pipe.send(("", fn(*args)))
        except BaseException:
            pipe.send((traceback.format_exc(), None))


@dataclass(frozen=True)
class Job:
    """Forked ranks of one job: process ids, each the leader of a session."""

    pids: tuple[int, ...]
    log: Path

    def wait(self, timeout: float = 120.0) -> list[int]:
        """Returns how each rank ended (negative: the signal), and ends what they left behind.

        When one rank is killed its peers are too, as a launcher does.
        """
        ends: dict[int, int] = {}
        deadline = time.monotonic() + timeout
        while len(ends) < len(self.pids):
            for pid in set(self.pids) - set(ends):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    ends[pid] = os.waitstatus_to_exitcode(status)
            if any(end < 0 for end in ends.values()) or time.monotonic() > deadline:
                self.kill()
            time.sleep(0.02)
        self.kill()
        return [ends[pid] for pid in self.pids]

    def kill(self) -> None:
        """Sends SIGKILL to every process of every rank."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def fork_job(num_ranks: int, given: Sequence[str], folder: Path, death: Death | None = None) -> Job:
    """Starts a job with these flags; call it in a `Megatron` process.

    Its output goes to FOLDER/log and its scalars to FOLDER/tensorboard. `death(rank)` runs before
    the job in each rank and may arrange for its end.
    """
    folder.mkdir(parents=True)
    rendezvous = folder / "rendezvous"
    pids = []
    for rank in range(num_ranks):
        pid = os.fork()
        if pid == 0:
            _be_rank(rank, num_ranks, [*given], folder, rendezvous, death)
        pids.append(pid)
    return Job(tuple(pids), folder / "log")


def checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """Returns every tensor of a torch_dist checkpoint, whatever layout wrote it."""
    import torch.distributed.checkpoint as dcp

    described = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in described.items()
        if hasattr(entry, "properties")
    }
    dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    return tensors


def finish(num_ranks: int, given: Sequence[str], folder: Path) -> None:
    """Runs a job to its end.

    Raises: AssertionError with the end of its output if a rank failed.
    """
    job = fork_job(num_ranks, given, folder)
    ends = job.wait()
    assert not any(ends), f"{folder.name} ended with {ends}:\n{job.log.read_text()[-6000:]}"


def _be_rank(
    rank: int, num_ranks: int, given: list[str], folder: Path, rendezvous: Path, death: Death | None
) -> None:
    import torch.distributed as dist
    from megatron.core.dist_checkpointing.strategies.filesystem_async import get_write_results_queue

    from megatron_bp.mcore.adaptor import train

    code = 1
    try:
        os.setsid()
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        where = f"file://{rendezvous}"
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=num_ranks)
        # The queue to writers of checkpoints is a process: forked, because a new one imports torch.
        if "--exit-signal-handler" not in given:  # then started by the job, with a signal ignored
            get_write_results_queue("fork")
        if death is not None:
            death(rank)
        as_job(rank, num_ranks, [*given, "--tensorboard-dir", str(folder / "tensorboard")], train)
        dist.barrier()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        if code:
            atexit._run_exitfuncs()  # what the end of a process does, which a fork skips
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
