"""Lets Megatron train over gloo on GPUs: several ranks on one card, or hosts that lack NCCL.

Megatron reduces its gradient buffers within torch's coalescing manager, and gloo coalesces tensors
of the CPU only ("allreduce_coalesced: unsupported device type cuda"). Each operation by itself it
does on both, with the same sums. Slow, as everything passes through the host; for tests and trials.
Specified by tests/mcore/test_gloo.py.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any

import torch


def use_gloo_on_gpus(args: argparse.Namespace) -> None:
    """Makes gradients travel one buffer at a time, if the run is over gloo and on GPUs.

    Raises: ValueError for flags that start operations and wait for them later.
    """
    if args.distributed_backend != "gloo" or not torch.cuda.is_available():
        return
    overlapped = [
        f"--{name.replace('_', '-')}"
        for name in ("overlap_grad_reduce", "overlap_param_gather")
        if getattr(args, name)
    ]
    if overlapped:
        raise ValueError(
            f"{' and '.join(overlapped)} need operations that gloo has not on a GPU; drop "
            f"{'it' if len(overlapped) == 1 else 'them'}, or use --distributed-backend nccl"
        )
    issue_singly()


def issue_singly() -> None:
    """Replaces the coalescing manager of Megatron's gradient buffers in this process."""
    from megatron.core.distributed import param_and_grad_buffer

    param_and_grad_buffer._coalescing_manager = _each_by_itself


@contextlib.contextmanager
def _each_by_itself(
    group: Any = None, device: Any = None, async_ops: bool = False
) -> Iterator[None]:
    """In the place of torch's manager: an operation within it is complete when its call returns.

    Raises: ValueError if the operations are to be waited for later: their handles are dropped.
    """
    if async_ops:
        raise ValueError("operations that are issued singly cannot be asynchronous")
    yield None
