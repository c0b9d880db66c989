"""Keeps the processes that write checkpoints alive while their rank needs them, and no longer.

Megatron writes with helpers: one process collects results, and with `--async-save` another writes.
Schedulers send the signal before a time limit, and torchrun sends SIGTERM, to every process of a
rank: the rank would save and end (`--exit-signal-handler`), but its helpers are gone by then. And
where the writer is gone, killed or by a full disk, Megatron hands it the next save and waits
without a limit. So helpers are started with that signal ignored, and a rank without its writer
ends: something launchers and schedulers know how to restart. Specified by
tests/mcore/test_async_save.py and tests/mcore/test_kill.py.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.forkserver
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

PERIOD = 2.0  # seconds between two looks; a writer is gone when two of them miss it


def shield_helpers(number: int, is_async: bool) -> None:
    """Starts the helpers of saves, or what will start them, with the signal `number` ignored.

    What is ignored when a process starts stays so in it. Call it before Megatron initialises.
    """
    from megatron.core.dist_checkpointing.strategies.filesystem_async import get_write_results_queue

    before = signal.signal(number, signal.SIG_IGN)
    try:
        if is_async:
            multiprocessing.forkserver.ensure_running()  # the writer will be its child
        get_write_results_queue("fork" if is_async else "spawn")  # as Megatron does
    finally:
        signal.signal(number, before)
    if is_async:
        # At exit Python ends such a process by SIGTERM and waits for it: after a failure, for ever.
        atexit.register(_end_writer)


def _end_writer() -> None:
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

    process = PersistentAsyncCaller._persistent_process
    if process is not None:  # training did not end as it should
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def watch_writer(period: float = PERIOD, end: Callable[[int], None] = os._exit) -> threading.Thread:
    """Starts a thread that calls `end(1)` when the writer of this process is gone; returns it.

    A writer that ended because training is over is missed once at most: Megatron forgets it.
    """
    thread = threading.Thread(target=_watch, args=(period, end), name="writer-watch", daemon=True)
    thread.start()
    return thread


def _watch(period: float, end: Callable[[int], None]) -> None:
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

    missed = 0  # the process id that the last look missed
    while True:
        time.sleep(period)
        process = PersistentAsyncCaller._persistent_process
        pid = 0 if process is None or is_running(process.pid) else process.pid
        if pid and pid == missed:
            print(
                f"The writer of checkpoints (process {pid}) is gone: killed, or it could not write "
                "(its error is above). Saving would wait for ever, so this rank ends; start the "
                "job again and it goes on from the last complete checkpoint.",
                file=sys.stderr,
                flush=True,
            )
            end(1)
            return
        missed = pid


def is_running(pid: int) -> bool:
    """Returns whether a process of ours exists; asks nothing that Megatron's own wait reads."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
