"""Chooses an attention kernel by name or by need; never falls back silently.

Knows the names and where their modules are; a kernel's optional import happens only when it is
asked for. Specified by tests/attention/test_choose.py.
"""

import logging
from functools import lru_cache
from importlib import import_module

from megatron_bp.attention.contract import (
    IntervalKernel,
    KernelNeed,
    NativeKernel,
    missing,
)

AttentionKernel = NativeKernel | IntervalKernel

KERNELS = {
    "flash4": "Flash4Kernel",
    "te": "TeKernel",
    "sdpa": "SdpaKernel",
    "flex": "FlexKernel",
    "sdpa_cpu": "SdpaCpuKernel",
    "dense": "DenseKernel",
}
"""Kernel name (= module in kernels/) and class."""

AUTO = {"cpu": ("dense",), "cuda": ("flash4", "te", "sdpa", "flex")}
AUTO_SLIDING = {"cuda": ("flash4", "sdpa", "te", "flex")}  # cuDNN's windowed backward is slow
"""The order in which `auto` tries kernels, fastest measured first (docs/bench/attention.md).

`dense` is never chosen on CUDA: its memory is quadratic, so it must be asked for.
"""

log = logging.getLogger(__name__)


def load_kernel(name: str, deterministic: bool = False) -> AttentionKernel:
    """The kernel called `name`.

    Raises: ValueError for an unknown name; ImportError, saying what to install, if its package is
    missing.
    """
    if name not in KERNELS:
        raise ValueError(f"kernel={name!r} is not one of {', '.join(['auto', *KERNELS])}.")
    module = import_module(f"megatron_bp.attention.kernels.{name}")
    kernel: AttentionKernel = getattr(module, KERNELS[name])(deterministic)
    return kernel


@lru_cache(maxsize=256)
def choose_kernel(name: str, need: KernelNeed) -> AttentionKernel:
    """The kernel `name`, or with "auto" the first of the device's list that can serve `need`.

    What `auto` chose, and why not the kernels before it, is logged once for each need.
    Raises: ValueError with every reason if the kernel (or, with auto, all of them) cannot.
    """
    if name != "auto":
        kernel = load_kernel(name, need.deterministic)
        reasons = missing(kernel.caps, need)
        if reasons:
            raise ValueError(f"kernel={name!r} cannot run this layer: {'; '.join(reasons)}.")
        return kernel
    refused = []
    order = AUTO_SLIDING.get(need.device) if need.sliding else None
    for candidate in order or AUTO.get(need.device, ()):
        try:
            kernel = load_kernel(candidate, need.deterministic)
        except ImportError as error:
            refused.append(f"{candidate}: {error}")
            continue
        reasons = missing(kernel.caps, need)
        if not reasons:
            why = f" ({' | '.join(refused)})" if refused else ", the fastest measured"
            log.info("attention kernel for %s: %s%s", need, candidate, why)
            return kernel
        refused.append(f"{candidate}: {'; '.join(reasons)}")
    raise ValueError(f"no attention kernel can run this layer. {' | '.join(refused)}.")
