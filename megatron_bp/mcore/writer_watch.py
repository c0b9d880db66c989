"""Ends a rank whose background writer of checkpoints (`--async-save`) is gone.

Megatron hands each save to a writer process and waits for its answer, without a limit and without
looking whether it lives: after the writer is killed, or a disk is full, the next save waits for
ever. A rank that ends is something launchers and schedulers know how to restart. Specified by
tests/mcore/test_async_save.py.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

PERIOD = 2.0  # seconds between two looks; a writer is gone when two of them miss it


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
