"""Starts Triton kernels without analysing their arguments every time.

`kernel[grid](...)` looks at every argument to find the compiled kernel: most of what a launch costs
the CPU. The layers of a model start the same launches in every step, so here all numbers together
say which compiled kernel it is, and tensors are passed as addresses.
Specified by tests/attention/test_triton_launch.py; compiled, by test_gpu_passes.py.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

Grid = tuple[int, int, int]
Numbers = tuple[int | float, ...]
ALIGNED = 16
"""Bytes: a kernel compiled ahead of its tensors takes their addresses to be multiples of this."""


def ceil_div(a: int, b: int) -> int:
    """ceil(a / b). Triton's own function costs the CPU a fifth of a launch."""
    return -(-a // b)


def padded_size(size: int) -> int:
    """The smallest power of two that is at least `size` (and 1)."""
    return 1 << max(size - 1, 0).bit_length()


@lru_cache(maxsize=64)
def shared_memory(device: torch.device) -> int:
    """Bytes that one program may have on a GPU; elsewhere as on a Hopper, which it stands for."""
    if device.type != "cuda":
        return 227 * 1024
    found = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return int(found["max_shared_mem"])


class Resources(NamedTuple):
    """What a program gets; 0 registers a thread: as many as the compiler likes."""

    num_warps: int = 4
    num_stages: int = 3
    registers: int = 0

    def options(self) -> dict[str, int]:
        """As Triton takes them."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return {**options, "maxnreg": self.registers} if self.registers else options


def launch(
    kernel: Any,
    grid: Grid,
    tensors: tuple[Tensor, ...],
    numbers: Numbers,
    constants: tuple[int, ...],
    resources: Resources,
) -> None:
    """Runs `kernel` on the current device and stream.

    Its parameters are the tensors, the numbers and the constants (tl.constexpr), in that order. A
    new value of any number looks for its kernel again, and compiles one if Triton would.
    """
    if isinstance(kernel, triton.JITFunction):
        pointers = [x.data_ptr() for x in tensors]
        if not any(pointer % ALIGNED for pointer in pointers):
            key = (grid, tuple([x.dtype for x in tensors]), numbers, constants, resources)
            _compiled(kernel, tensors[0].device.index, key)(*pointers, *numbers, *constants)
            return
    kernel[grid](*tensors, *numbers, *constants, **resources.options())


@lru_cache(maxsize=4096)
def _compiled(
    kernel: Any,
    device: int,
    key: tuple[Grid, tuple[torch.dtype, ...], Numbers, tuple[int, ...], Resources],
) -> Callable[..., None]:
    """The compiled kernel, to be called with addresses, numbers and constants."""
    del device  # of the key only: a kernel is loaded for the current device
    grid, dtypes, numbers, constants, resources = key
    compiled = kernel.warmup(*dtypes, *numbers, *constants, grid=grid, **resources.options())
    run: Callable[..., None] = compiled[grid]
    return run
