"""Starts Triton kernels without analysing their arguments every time.

`kernel[grid](...)` looks at every argument to find the compiled kernel: most of what a launch costs
the CPU. The layers of a model start the same launches in every step, so here a `Launch` is made
once for tensors that lie alike: it knows all numbers and the compiled kernel, and tensors are
passed as addresses.
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


USUAL = Resources()


class Launch:
    """A kernel with its grid and all its arguments but the tensors, to be started many times.

    The kernel's parameters are the tensors, the numbers and the constants (tl.constexpr), in that
    order. For tensors of other dtypes or on another device the compiled kernel is looked for again,
    and compiled if Triton would.
    """

    def __init__(
        self,
        kernel: Any,
        grid: Grid,
        numbers: Numbers,
        constants: tuple[int, ...],
        resources: Resources = USUAL,
    ) -> None:
        self._kernel, self._grid = kernel, grid
        self._rest = (*numbers, *constants)
        self._options = resources.options()
        self._is_compiled = isinstance(kernel, triton.JITFunction)
        self._found: dict[tuple[Any, ...], _Found] = {}

    def start(self, tensors: tuple[Tensor, ...]) -> None:
        """Runs the kernel on the current device and stream."""
        if self._is_compiled:
            pointers = [x.data_ptr() for x in tensors]
            if not any([pointer % ALIGNED for pointer in pointers]):
                device = tensors[0].device.index
                kind = (device, *[x.dtype for x in tensors])
                run, stream_of, found = self._found.get(kind) or self._find(kind)
                run(*self._grid, stream_of(device), *found, *pointers, *self._rest)
                return
        self._kernel[self._grid](*tensors, *self._rest, **self._options)

    def _find(self, kind: tuple[Any, ...]) -> "_Found":
        """The compiled kernel."""
        _, *dtypes = kind  # the device is of the key only: a kernel is loaded for the current one
        compiled = self._kernel.warmup(*dtypes, *self._rest, grid=self._grid, **self._options)
        compiled[self._grid]  # loads it
        # As `compiled[grid]` calls it, but for the hooks of profilers, which cost as much again.
        none = (None, None, None)
        self._found[kind] = _Found(
            compiled.run,
            triton.runtime.driver.active.get_current_stream,
            (compiled.function, compiled.packed_metadata, *none),
        )
        return self._found[kind]


class _Found(NamedTuple):
    """Starts a compiled kernel: run(*grid, stream_of(device), *kernel, *arguments)."""

    run: Callable[..., None]
    stream_of: Callable[[int], int]
    kernel: tuple[Any, ...]


def launch(
    kernel: Any,
    grid: Grid,
    tensors: tuple[Tensor, ...],
    numbers: Numbers,
    constants: tuple[int, ...],
    resources: Resources,
) -> None:
    """Starts the `Launch` of these arguments."""
    _made(kernel, grid, numbers, constants, resources).start(tensors)


_made = lru_cache(maxsize=4096)(Launch)
