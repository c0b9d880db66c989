"""FlashAttention 4's forward, below its entry point once that has found the kernel.

The entry point makes a key of some seventy values from its arguments and calls the compiled kernel
that the key names, which takes it 67 us of CPU. The layers of a model make the same calls in every
step: the first of a kind goes through the entry point, later ones straight to the kernel that it
took. What is unusual (memory that it would copy, nothing to compute, another architecture) always
goes through it.
Specified by tests/attention/test_flash4_forward.py (kernels replaced) and test_gpu_forward.py.
Source: flash-attn-4 (flash_attn.cute.interface), https://github.com/Dao-AILab/flash-attention.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from flash_attn.cute import interface  # kernels/flash4.py says what to install
from flash_attn.cute.utils import AuxData
from torch import Tensor

from megatron_bp.attention.views import ALIGNED, begin_at

Options = dict[str, Any]
"""Arguments of the entry point: `causal`, window bounds, `tile_mn`."""


class Inputs(NamedTuple):
    """q [X, Q, N, H], k and v [X, K, M, H]; `lengths` int32 [X] or nothing: keys of a problem."""

    q: Tensor
    k: Tensor
    v: Tensor
    lengths: tuple[Tensor, ...] = ()


class _Kind(NamedTuple):
    """All that the key of a kernel can depend on: layouts of q, k, v, output and LSE, options."""

    layouts: tuple[tuple[torch.Size, tuple[int, ...]], ...]
    dtype: torch.dtype
    device: int
    has_lengths: bool
    options: tuple[tuple[str, Any], ...]


class _Found(NamedTuple):
    """A kind's compiled kernel, once the entry point has run; `usual`: may be called without it."""

    usual: bool
    kernels: list[Callable[..., None]]


class _Watched:
    """The package's cache of compiled kernels; `asked` are the keys that were looked up."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.asked: list[Any] = []

    def __contains__(self, key: Any) -> bool:
        self.asked.append(key)
        return key in self.cache

    def __getitem__(self, key: Any) -> Any:
        return self.cache[key]

    def __setitem__(self, key: Any, kernel: Any) -> None:
        self.cache[key] = kernel


def run(x: Inputs, scale: float, into: tuple[Tensor, Tensor], options: Options) -> None:
    """Writes the output [X, Q, N, H] and the LSE [X, N, Q] of `x` to `into`."""
    tensors = (x.q, x.k, x.v, *into)
    kind = _Kind(
        tuple([(t.shape, t.stride()) for t in tensors]),
        x.q.dtype,
        x.q.device.index,
        bool(x.lengths),
        tuple(options.items()),
    )
    found = _found(kind)
    if not found.usual or any(t.data_ptr() % ALIGNED for t in tensors[:4]):
        _enter(x, scale, into, options)
    elif not found.kernels:
        found.kernels.extend(_watch(lambda: _enter(x, scale, into, options)))
    else:
        q, k, v = (t.detach() if t.requires_grad else t for t in x[:3])
        found.kernels[0](
            q,
            k,
            v,
            *into,
            scale,
            *(None, None, None),
            x.lengths[0] if x.lengths else None,
            None,
            options.get("window_size_left"),
            options.get("window_size_right"),
            *(None, None),
            AuxData(None, None),
            *(None, None),
        )


def _enter(x: Inputs, scale: float, into: tuple[Tensor, Tensor], options: Options) -> None:
    """The entry point."""
    out, lse = into
    used = {"seqused_k": x.lengths[0]} if x.lengths else {}
    interface._flash_attn_fwd(
        x.q, x.k, x.v, softmax_scale=scale, out=out, lse=lse, **used, **options
    )


def _watch(call: Callable[[], None]) -> tuple[Callable[..., None], ...]:
    """Runs `call`; returns the compiled kernel that the entry point looked up, if it was one."""
    entry = interface._flash_attn_fwd
    cache = entry.compile_cache
    entry.compile_cache = watched = _Watched(cache)
    try:
        call()
    finally:
        entry.compile_cache = cache
    keys = list(dict.fromkeys(watched.asked))
    return (cache[keys[0]],) if len(keys) == 1 else ()


@lru_cache(maxsize=4096)
def _found(kind: _Kind) -> _Found:
    """What is known of a kind of call; its kernel is filled in later."""
    whole = all(0 not in shape for shape, _ in kind.layouts)
    rows = (ALIGNED // kind.dtype.itemsize,) * 4 + (1,)  # the LSE is wide, and aligned to itself
    strides = (stride for _, stride in kind.layouts)
    aligned = all(begin_at(*x) for x in zip(strides, rows, strict=True))
    return _Found(whole and aligned and interface._get_device_arch() // 10 == 9, [])
