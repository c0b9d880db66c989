"""Launches a function on N gloo processes of this machine and brings back what each rank returned.

Owns process start, rendezvous, timeout and error transport for tests; knows nothing of what the
tests compute. Specified by the tests that call `run_distributed`.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_distributed(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0
) -> list[Any]:
    """Returns `[fn(rank, world_size, *args) for rank in range(world_size)]`, one process a rank.

    The default process group (gloo) is initialised before `fn` and destroyed after it. `fn` must be
    a module-level function; the child loads its file by path, so it works whatever pytest calls the
    test module. Arguments and results must be picklable (tensors on CPU are).

    Units: `timeout` in seconds, for the whole launch; a collective gets three quarters of it, so
    that one that hangs is reported with its line.
    Raises: RuntimeError with the traceback of the rank that failed first (a collective that timed
    out is such a failure); TimeoutError when nothing failed but a rank did not end.
    """
    source = inspect.getsourcefile(fn)
    assert source is not None, f"{fn} has no source file"
    assert "." not in fn.__qualname__, f"{fn} is not a module-level function"
    with tempfile.TemporaryDirectory(prefix="run_distributed_") as folder:
        context = mp.spawn(
            _child,
            args=(world_size, source, fn.__module__, fn.__name__, args, folder, timeout),
            nprocs=world_size,
            join=False,
        )
        deadline = time.monotonic() + timeout
        try:
            while not context.join(timeout=max(deadline - time.monotonic(), 0.0)):
                if time.monotonic() >= deadline:
                    raise TimeoutError(
                        f"{fn.__name__} on {world_size} ranks did not end within {timeout} s"
                    )
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            raise RuntimeError(_first_failure(folder, str(error))) from None
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return [
            torch.load(_result_path(folder, rank), weights_only=False) for rank in range(world_size)
        ]


def _child(
    rank: int,
    world_size: int,
    source: str,
    module_name: str,
    fn_name: str,
    args: tuple[Any, ...],
    folder: str,
    timeout: float,
) -> None:
    torch.set_num_threads(1)
    fn = getattr(_load(source, module_name), fn_name)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=0.75 * timeout),
    )
    try:
        torch.save(fn(rank, world_size, *args), _result_path(folder, rank))
        dist.barrier()  # a rank that ends early must not tear down connections others still use
    except BaseException:
        # Written before the connections close: the peers' "closed by peer" errors come later.
        failure = {"when": time.time_ns(), "text": f"rank {rank}:\n{traceback.format_exc()}"}
        (Path(folder) / f"failure_{rank}.json").write_text(json.dumps(failure))
        raise
    finally:
        dist.destroy_process_group()


def _first_failure(folder: str, otherwise: str) -> str:
    failures = [json.loads(path.read_text()) for path in Path(folder).glob("failure_*.json")]
    if not failures:
        return otherwise  # killed by a signal, or failed before the process group existed
    return str(min(failures, key=lambda failure: failure["when"])["text"])


def _load(source: str, module_name: str) -> Any:
    if module_name in sys.modules and module_name != "__main__":
        return sys.modules[module_name]
    name = "__spawned_main__" if module_name == "__main__" else module_name
    spec = importlib.util.spec_from_file_location(name, source)
    assert spec is not None, f"cannot load {source}"
    assert spec.loader is not None, f"cannot load {source}"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _result_path(folder: str, rank: int) -> Path:
    return Path(folder) / f"result_{rank}.pt"
