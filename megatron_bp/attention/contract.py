"""What an attention kernel promises: layouts, the log-sum-exp, capabilities and explicit choice.

Layout is [Z, rows, heads, H] for tensors and [Z, heads, rows] for the LSE. The LSE is the natural
logarithm, fp32 (fp64 for fp64 inputs); a row that sees no key has output 0 and LSE -inf. A backward
takes the *merged* output and LSE of a row, so partial gradients of several launches just add up.
Letters: Z problems, Q query rows, K key rows, N query heads, M key/value heads, H head size.
Specified by tests/attention/test_contract.py and tests/attention/test_kernels.py.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor


class Strategy(StrEnum):
    """How a mask becomes kernel calls."""

    NATIVE = "native"  # the shifted-causal decomposition over plain causal and windowed launches
    INTERVAL = "interval"  # one launch with a mask of four intervals a row


class Cut(StrEnum):
    """Which launches a kernel runs best; measured, see docs/bench/attention.md."""

    PLAN = "plan"  # the plan's: causal launches have more keys than rows
    CHUNK = "chunk"  # square causal launches inside a chunk, unmasked ones for the keys before it
    CHUNKS = "chunks"  # the same, with the squares of both chunks in one launch of strided problems


class Window(NamedTuple):
    """Query a sees key c iff a + K - Q - left <= c <= a + K - Q + right; -1 is unbounded."""

    left: int = -1
    right: int = -1


class IntervalMask(NamedTuple):
    """The mask of `interval` launches: which keys each row sees, and what each key is called.

    Shapes: `clean_lo`, `clean_hi`, `own_lo`, `own_hi` int32 [Q]; `key_name` int32 [K]: the first
    `num_clean` keys are named by position, the others by own coordinate; -1 is never seen.
    """

    clean_lo: Tensor
    clean_hi: Tensor
    own_lo: Tensor
    own_hi: Tensor
    key_name: Tensor
    num_clean: int

    def dense(self) -> Tensor:
        """The mask as a matrix, bool [Q, K]."""
        clean, own = self.key_name[: self.num_clean], self.key_name[self.num_clean :]

        def inside(lo: Tensor, hi: Tensor, key: Tensor) -> Tensor:
            return (lo[:, None] <= key) & (key < hi[:, None]) & (key >= 0)

        return torch.cat(
            [inside(self.clean_lo, self.clean_hi, clean), inside(self.own_lo, self.own_hi, own)], 1
        )


@dataclass(frozen=True)
class KernelCaps:
    """What a kernel can run. `max_head_size` and `head_multiple` are in elements.

    `min_arch` is the lowest CUDA compute capability (major * 10 + minor), 0 where it does not
    apply; `max_arch` the highest. `writes` says that the kernel is also a WritingKernel.
    `cut` says which launches suit it, `packs_heads` that rows of a forward tile are those of all
    query heads of a key head.
    """

    strategies: frozenset[Strategy]
    devices: frozenset[str]
    dtypes: frozenset[torch.dtype]
    max_head_size: int
    head_multiple: int = 1
    windows: bool = True
    deterministic: bool = True
    interval_deterministic: bool = True
    min_arch: int = 0
    max_arch: int = 999
    writes: bool = False
    cut: Cut = Cut.CHUNK
    packs_heads: bool = False


@dataclass(frozen=True)
class KernelNeed:
    """What one attention layer asks of a kernel.

    `window` says that some launch is windowed, as those around a block are; `sliding` that the
    layer's large launches are.
    """

    strategy: Strategy
    device: str
    dtype: torch.dtype
    head_size: int
    window: bool
    deterministic: bool = False
    arch: int = 0
    sliding: bool = False


def forward_heads(caps: KernelCaps, q: torch.Size, k: torch.Size) -> int:
    """Query heads that a row of a forward tile is one of, for launches made to fit tiles.

    1 for several samples: the keys of many problems are then no view. Shapes are [T, Z, N, H] and
    [T, Z, M, H].
    """
    packs = caps.packs_heads and q[1] == 1
    return q[2] // k[2] if packs else 1


def missing(caps: KernelCaps, need: KernelNeed) -> list[str]:
    """Reasons why a kernel with `caps` cannot serve `need`; empty if it can."""
    reasons = []
    if need.strategy not in caps.strategies:
        reasons.append(f"it has no {need.strategy} form")
    if need.device not in caps.devices:
        reasons.append(f"it runs on {', '.join(sorted(caps.devices))}, not on {need.device}")
    if need.dtype not in caps.dtypes:
        names = ", ".join(sorted(str(d).removeprefix("torch.") for d in caps.dtypes))
        reasons.append(f"it takes {names}, not {str(need.dtype).removeprefix('torch.')}")
    if need.head_size > caps.max_head_size or need.head_size % caps.head_multiple:
        reasons.append(
            f"it takes head sizes up to {caps.max_head_size} in multiples of "
            f"{caps.head_multiple}, not {need.head_size}"
        )
    if need.window and not caps.windows:
        reasons.append("it has no sliding window")
    interval = need.strategy is Strategy.INTERVAL
    if need.deterministic and not (caps.interval_deterministic if interval else caps.deterministic):
        reasons.append("its backward is not deterministic")
    if need.device == "cuda" and not caps.min_arch <= need.arch <= caps.max_arch:
        reasons.append(
            f"it needs compute capability {caps.min_arch}..{caps.max_arch}, not {need.arch}"
        )
    return reasons


@runtime_checkable
class NativeKernel(Protocol):
    """A kernel for `native`: full, causal or windowed attention, K/V heads not repeated."""

    name: str
    caps: KernelCaps

    def __hash__(self) -> int:
        """Kernels are keys of caches."""
        ...

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, window: Window, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output [Z, Q, N, H] and LSE [Z, N, Q] of q [Z, Q, N, H] against k, v [Z, K, M, H]."""
        ...

    def backward(
        self,
        dout: Tensor,
        saved: "Saved",
        window: Window,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of the pairs of this launch, given the merged output and LSE."""
        ...


@runtime_checkable
class WritingKernel(NativeKernel, Protocol):
    """A native kernel that can write output, LSE and dq straight into given (strided) tensors."""

    def forward_into(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: Window,
        scale: float,
        into: tuple[Tensor, Tensor],
    ) -> None:
        """Like `forward`, with output and LSE written to `into`."""
        ...

    def backward_into(
        self, dout: Tensor, saved: "Saved", window: Window, scale: float, dq: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Like `backward`, with dq written to `dq`; returns dk and dv."""
        ...


@runtime_checkable
class IntervalKernel(Protocol):
    """A kernel for `interval`: one launch with an IntervalMask."""

    name: str
    caps: KernelCaps

    def forward_interval(
        self, q: Tensor, k: Tensor, v: Tensor, mask: IntervalMask, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output [Z, Q, N, H] and LSE [Z, N, Q] under `mask`."""
        ...

    def backward_interval(
        self, dout: Tensor, saved: "Saved", mask: IntervalMask, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv under `mask`, given output and LSE."""
        ...


class Saved(NamedTuple):
    """What a backward needs: inputs, merged output and merged LSE (or the slices of a launch)."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32, or fp64 for fp64 inputs: the dtype of the LSE and of accumulated gradients."""
    return torch.promote_types(dtype, torch.float32)


def window_mask(num_rows: int, num_keys: int, window: Window, device: torch.device) -> Tensor:
    """Allowed pairs of a bottom-right aligned window, bool [num_rows, num_keys]."""
    at = torch.arange(num_rows, device=device)[:, None] + (num_keys - num_rows)
    key = torch.arange(num_keys, device=device)
    allowed = torch.ones(num_rows, num_keys, dtype=torch.bool, device=device)
    if window.left >= 0:
        allowed &= key >= at - window.left
    if window.right >= 0:
        allowed &= key <= at + window.right
    return allowed
