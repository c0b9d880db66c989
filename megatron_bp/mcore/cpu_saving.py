"""Lets Megatron's background writer of checkpoints (`--async-save`) run without CUDA.

Two things of it hold on a GPU only. The writer is a process of its own, started before any patch of
ours, and its first act is to choose a CUDA device. And it takes a step's tensors by copying them
from the device to the CPU; on a CPU that copies nothing, so it would write weights which training
has changed meanwhile. Owns only that; specified by tests/mcore/test_async_save.py.
"""

from __future__ import annotations

from typing import Any


def use_cpu_writer() -> None:
    """Makes the background writer of this process one that copies, and asks for no device."""
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

    PersistentAsyncCaller.async_loop = staticmethod(write_on_cpu)


def write_on_cpu(*args: Any, **kwargs: Any) -> None:
    """Runs Megatron's loop of the writer; the first thing that a writer process does."""
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    from megatron_bp.mcore.cpu import patch_torch_cuda

    patch_torch_cuda()
    FileSystemWriterAsync.preload_tensors = staticmethod(copy_tensors)
    PersistentAsyncCaller.async_loop(*args, **kwargs)


def copy_tensors(write_buckets: list[Any], non_blocking: bool = True) -> list[Any]:
    """Returns the buckets (file, key, (bytes, tensors)) with tensors of their own.

    The trainer waits for it, as it waits for the copy from a GPU.
    """
    return [
        (file, key, (written, [(item, tensor.clone()) for item, tensor in tensors]))
        for file, key, (written, tensors) in write_buckets
    ]
