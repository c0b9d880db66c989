"""FlashAttention 4: unmasked, causal and windowed launches, and a mask form for `interval`.

Uses the package's forward and backward entry points, because a backward must be given the merged
output and LSE, and results go straight to where they belong.
Specified by tests/attention/test_gpu_kernels.py.
Source: flash-attn-4 (flash_attn.cute.interface), https://github.com/Dao-AILab/flash-attention.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megatron_bp.attention.block_lists import MaskKey, block_lists, key_intervals
from megatron_bp.attention.contract import Cut, IntervalMask, KernelCaps, Saved, Strategy, Window
from megatron_bp.attention.sharing import Shared, SharedBackward, TileRule

try:
    import cutlass
    import cutlass.cute as cute
    from flash_attn.cute import utils
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    from megatron_bp.attention import flash4_forward, flash4_sums
except (ImportError, OSError) as error:  # OSError: a shared library that does not load
    raise ImportError(
        f"kernel='flash4' needs FlashAttention 4: pip install 'megatron-bp[fa4]' ({error})."
    ) from error


WIDE = 128, 176
"""Rows and keys of a forward tile for unmasked launches at head sizes 97 to 128. Measured in bursts
at 64K and 256K (docs/bench/attention.md): 1 to 2 percent faster than the package's 128 x 128."""
WIDE_KEYS = 8192
"""From so many keys on; fewer would not be whole tiles of 176."""


def _forward_options(q: Tensor, k: Tensor, window: Window) -> dict[str, Any]:
    """The window and tile of a forward launch as FlashAttention's arguments."""
    options, unmasked = _window(window, q.shape[1]), window == (-1, -1)
    if unmasked and 96 < q.shape[3] <= 128 and k.shape[1] >= WIDE_KEYS:
        options["tile_mn"] = WIDE
    return options


def _window(window: Window, num_rows: int) -> dict[str, Any]:
    """The window as FlashAttention's arguments; both align at the bottom right."""
    left, right = window
    if left < 0 and right <= 0:
        return {"causal": right == 0}
    # From the last row on every key is to the left, so this right bound never cuts.
    right = num_rows - 1 if right < 0 else right
    return {
        "causal": False,
        "window_size_left": None if left < 0 else left,
        "window_size_right": right,
    }


@lru_cache(maxsize=1)
def _interval_mod() -> Any:
    @cute.jit
    def interval_mod(
        batch: Any, head: Any, row: Any, key: Any, seqlen_info: Any, columns: Any
    ) -> Any:
        lo = utils.scalar_to_ssa(columns[0][row[0]], cutlass.Int32)
        hi = utils.scalar_to_ssa(columns[1][row[0]], cutlass.Int32)
        own_lo = utils.scalar_to_ssa(columns[2][row[0]], cutlass.Int32)
        own_hi = utils.scalar_to_ssa(columns[3][row[0]], cutlass.Int32)
        return ((key >= lo) & (key < hi)) | ((key >= own_lo) & (key < own_hi))

    return interval_mod


def _sparse(mask: IntervalMask, tile: tuple[int, int], backward: bool) -> Any:
    by_query, by_key = block_lists(MaskKey(mask), *tile)
    lists = by_key if backward else by_query
    flat = (x[None, None] for part in lists for x in part)
    return BlockSparseTensorsTorch(*flat, block_size=tile)


def _tile(head_size: int, backward: bool) -> tuple[int, int]:
    """The kernel's own tiles on Hopper, which block lists must use."""
    if backward:
        keys = 128 if head_size <= 128 else 96 if head_size <= 192 else 64
        return (128 if head_size <= 64 else 64), keys
    return 128, (128 if head_size <= 128 else 112 if head_size <= 192 else 80)


def _output(q: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for the output [X, Q, N, H] and LSE [X, N, Q] of q [X, Q, N, H]."""
    problems, rows, heads, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    return out, torch.empty(problems, heads, rows, dtype=torch.float32, device=q.device)


@dataclass(frozen=True)
class Flash4Kernel:
    """FlashAttention 4 on Hopper, where it was tested and measured."""

    deterministic: bool = False
    name = "flash4"
    caps = KernelCaps(
        strategies=frozenset(Strategy),
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        max_head_size=256,
        head_multiple=8,
        interval_deterministic=False,
        min_arch=90,
        max_arch=99,
        writes=True,
        cut=Cut.CHUNKS,
        packs_heads=True,
    )

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, window: Window, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See NativeKernel."""
        into = _output(q)
        self.forward_into(q, k, v, window, scale, into)
        return into

    def forward_into(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: Window,
        scale: float,
        into: tuple[Tensor, Tensor],
    ) -> None:
        """See WritingKernel."""
        inputs = flash4_forward.Inputs(q, k, v)
        flash4_forward.run(inputs, scale, into, _forward_options(q, k, window))

    def forward_ragged(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See RaggedKernel."""
        k, v = (x.expand(len(q), -1, -1, -1) for x in (k, v))
        inputs, into = flash4_forward.Inputs(q, k, v, (lengths,)), _output(q)
        flash4_forward.run(inputs, scale, into, _forward_options(q, k, Window()))
        return into

    def backward(
        self, dout: Tensor, saved: Saved, window: Window, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See NativeKernel."""
        dq = torch.empty(saved.q.shape, dtype=saved.q.dtype, device=dout.device)
        return dq, *self.backward_into(dout, saved, window, scale, dq)

    def backward_into(
        self, dout: Tensor, saved: Saved, window: Window, scale: float, dq: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See WritingKernel."""
        q, k, v, out, lse = saved
        dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
        _flash_attn_bwd(
            q,
            k,
            v,
            out,
            dout,
            lse,
            scale,
            dq=dq,
            dk=dk,
            dv=dv,
            deterministic=self.deterministic,
            **_window(window, q.shape[1]),
        )
        return dk, dv

    def shares(self, head_size: int, queries_per_key: int) -> bool:
        """See SharingKernel. In deterministic mode each launch orders its own sums."""
        return queries_per_key > 1 and not self.deterministic

    def tiles(self, head_size: int) -> TileRule:
        """See SharingKernel."""
        return flash4_sums.tiles(head_size)

    def share(
        self, like_SZMH: Tensor, queries_per_key: int, shared: Shared, scale: float
    ) -> SharedBackward:
        """See SharingKernel."""
        return flash4_sums.Flash4Backward(like_SZMH, queries_per_key, shared, scale)

    def forward_interval(
        self, q: Tensor, k: Tensor, v: Tensor, mask: IntervalMask, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See IntervalKernel."""
        out, lse = _flash_attn_fwd(
            q,
            k,
            v,
            softmax_scale=scale,
            return_lse=True,
            mask_mod=_interval_mod(),
            aux_tensors=list(key_intervals(MaskKey(mask))),
            block_sparse_tensors=_sparse(mask, _tile(q.shape[-1], False), False),
        )[:2]
        return out, lse

    def backward_interval(
        self, dout: Tensor, saved: Saved, mask: IntervalMask, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See IntervalKernel."""
        dq, dk, dv = _flash_attn_bwd(
            *saved[:4],
            dout,
            saved.lse,
            scale,
            mask_mod=_interval_mod(),
            aux_tensors=list(key_intervals(MaskKey(mask))),
            block_sparse_tensors=_sparse(mask, _tile(dout.shape[-1], True), True),
        )[:3]
        return dq, dk, dv
