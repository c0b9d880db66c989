"""Runs numbered jobs, in this process or in several, and gathers their results.

Results do not depend on the number of processes: a job never sees another one. Knows nothing of
what the jobs do. Specified by tests/convert/test_jobs.py.
"""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

import torch

from megatron_bp.convert.progress import Progress
from megatron_bp.convert.staging import open_journal


class Work(Protocol):
    """Something picklable that can do any of its jobs."""

    def run(self, job: int, advance: Callable[[int], None]) -> Any:
        """Returns the (picklable) result of the job; reports bytes done to `advance`."""


class NamedWork(Work, Protocol):
    """Work whose jobs have names, sizes and a good order, and results that JSON can hold."""

    def names(self) -> list[str]:
        """Returns a name for every job, in order."""

    def order(self) -> list[int]:
        """Returns the jobs in the order to start them."""

    def num_bytes(self, job: int) -> int:
        """Returns the size that a job reports to `advance`."""


def run_journaled(
    work: NamedWork, num_workers: int, progress: Progress, partial: Path, label: str
) -> list[Any]:
    """Returns the result of every job, in order; those in the journal of `partial` are not redone.

    A job's result is noted when the job is finished, so a killed run goes on from there.
    """
    journal = open_journal(partial)
    names = work.names()
    results = {
        job: journal.finished[name] for job, name in enumerate(names) if name in journal.finished
    }
    left = [job for job in work.order() if job not in results]
    progress.start(label, sum(work.num_bytes(job) for job in left))

    def finished(job: int, result: Any) -> None:
        journal.note(names[job], result)
        results[job] = result

    run_jobs(work, left, num_workers, progress, finished)
    return [results[job] for job in range(len(names))]


def run_jobs(
    work: Work,
    jobs: Sequence[int],
    num_workers: int,
    progress: Progress,
    finished: Callable[[int, Any], None],
) -> None:
    """Runs the jobs in order, `num_workers` at a time, and calls `finished(job, result)` for each.

    Raises: what a job raised if that is a ValueError, and ValueError when a process died.
    """
    if num_workers < 1:
        raise ValueError(f"workers={num_workers} must be at least 1")
    if num_workers == 1:
        for job in jobs:
            finished(job, work.run(job, progress.advance))
        return
    waiting = list(reversed(jobs))
    running: dict[Connection, int] = {}
    with _processes(work, min(num_workers, max(1, len(jobs)))) as pipes:
        for pipe in pipes:
            _give(pipe, waiting, running)
        while running:
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                kind, value = _receive(ready, running[ready])
                if kind == "advance":
                    progress.advance(value)
                else:
                    finished(running.pop(ready), value)
                    _give(ready, waiting, running)


def _give(pipe: Connection, waiting: list[int], running: dict[Connection, int]) -> None:
    if waiting:
        running[pipe] = waiting.pop()
        pipe.send(running[pipe])


def _receive(pipe: Connection, job: int) -> tuple[str, Any]:
    try:
        kind, value = pipe.recv()
    except EOFError:
        raise ValueError(
            f"a worker process died in job {job}, perhaps for lack of memory; try fewer --workers"
        ) from None
    if kind == "error":
        raise value
    return kind, value


@contextmanager
def _processes(work: Work, count: int) -> Iterator[list[Connection]]:
    # Spawned, not forked: torch's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    payload = pickle.dumps(work)
    ours, processes = [], []
    try:
        for _ in range(count):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(payload, there), daemon=True)
            process.start()
            there.close()
            ours.append(here)
            processes.append(process)
        yield ours
    finally:
        for pipe in ours:
            pipe.close()
        for process in processes:
            process.terminate()
            process.join()


def _serve(payload: bytes, pipe: Connection) -> None:
    torch.set_num_threads(1)
    work: Work = pickle.loads(payload)
    try:
        while True:
            job = pipe.recv()
            try:
                pipe.send(("done", work.run(job, lambda count: pipe.send(("advance", count)))))
            except ValueError as error:
                pipe.send(("error", error))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent has gone, or needs no more
