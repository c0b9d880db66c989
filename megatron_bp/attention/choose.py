"""Chooses an attention kernel by name or by need; never falls back silently.

Knows the names and where their modules are; a kernel's optional import happens only when it is
asked for. Specified by tests/attention/test_choose.py.
"""

from importlib import import_module

from megatron_bp.attention.contract import (
    IntervalKernel,
    KernelNeed,
    NativeKernel,
    missing,
)

AttentionKernel = NativeKernel | IntervalKernel

KERNELS = {"dense": "DenseKernel"}
"""Kernel name (= module in kernels/) and class, in the order `auto` tries them on each device."""

AUTO = {"cpu": ("dense",), "cuda": ("dense",)}


def load_kernel(name: str) -> AttentionKernel:
    """The kernel called `name`.

    Raises: ValueError for an unknown name; ImportError, saying what to install, if its package is
    missing.
    """
    if name not in KERNELS:
        raise ValueError(f"kernel={name!r} is not one of {', '.join(['auto', *KERNELS])}.")
    module = import_module(f"megatron_bp.attention.kernels.{name}")
    kernel: AttentionKernel = getattr(module, KERNELS[name])()
    return kernel


def choose_kernel(name: str, need: KernelNeed) -> AttentionKernel:
    """The kernel `name`, or with "auto" the first of the device's list that can serve `need`.

    Raises: ValueError with every reason if the kernel (or, with auto, all of them) cannot.
    """
    if name != "auto":
        kernel = load_kernel(name)
        reasons = missing(kernel.caps, need)
        if reasons:
            raise ValueError(f"kernel={name!r} cannot run this layer: {'; '.join(reasons)}.")
        return kernel
    refused = []
    for candidate in AUTO.get(need.device, ()):
        try:
            kernel = load_kernel(candidate)
        except ImportError as error:
            refused.append(f"{candidate}: {error}")
            continue
        reasons = missing(kernel.caps, need)
        if not reasons:
            return kernel
        refused.append(f"{candidate}: {'; '.join(reasons)}")
    raise ValueError(f"no attention kernel can run this layer. {' | '.join(refused)}.")
