"""FlashAttention 4's backward with accumulators that all launches of a pass share.

The package's backward is three kernels: one prepares LSE and row sums and zeroes dQ's fp32 buffer,
the main one adds to fp32 buffers of dQ, dK and dV, and one rounds such a buffer to the model's
dtype. Here the first runs once over all rows, the main one for each launch, the last once for dQ
and for each buffer of keys. Grouped-query attention only: else the main kernel stores dK and dV.
Specified by tests/attention/test_flash4_sums.py (kernels replaced) and test_gpu_shared.py.
Source: flash-attn-4 (flash_attn.cute.interface), https://github.com/Dao-AILab/flash-attention.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_bp.attention.contract import Saved, Window
from megatron_bp.attention.sharing import KeyGroup, SharedLaunch, TileRule, Tiles

try:
    import cutlass.cute as cute
    from flash_attn.cute.cache_utils import get_jit_cache
    from flash_attn.cute.cute_dsl_utils import maybe_contiguous
    from flash_attn.cute.flash_bwd_sm90 import FlashAttentionBackwardSm90
    from flash_attn.cute.interface import (
        _bwd_postprocess_convert,
        _bwd_preprocess,
        _tile_size_bwd_sm90,
        make_fake_bwd_tensors,
        torch2cute_dtype_map,
    )
    from flash_attn.cute.utils import AuxData
except (ImportError, OSError) as error:  # OSError: a shared library that does not load
    raise ImportError(
        f"kernel='flash4' needs FlashAttention 4: pip install 'megatron-bp[fa4]' ({error})."
    ) from error

ARCH = 90
LONG = 8192
"""From so many keys on, the taller tile of unmasked launches (head sizes 97 to 128) gains more, 4
percent, than rows of their own cost."""


def tiles(head_size: int) -> TileRule:
    """Rows and keys of the main kernel's tile on Hopper."""
    usual, tall = (_config(head_size, tall) for tall in (False, True))
    return TileRule(
        Tiles(usual.m_block_size, usual.n_block_size),
        Tiles(tall.m_block_size, tall.n_block_size),
        LONG,
    )


@lru_cache(maxsize=32)
def _config(head_size: int, tall: bool = False) -> Any:
    """The package's for causal launches, or with `tall` that for unmasked ones."""
    return _tile_size_bwd_sm90(head_size, head_size, not tall, False)


def _head_multiple(head_size: int) -> int:
    """What the fp32 buffers round the head size up to."""
    return 64 if _config(head_size).dKV_swapAB else 32


class _Variant(NamedTuple):
    """What a compiled main kernel depends on."""

    dtype: torch.dtype
    head_size: int
    queries_per_key: int
    causal: bool
    local: bool
    tall: bool


@lru_cache(maxsize=1)
def _compiled() -> Any:
    """The package's cache of compiled kernels, on disk if it is told so."""
    return get_jit_cache("bwd_shared")


@lru_cache(maxsize=256)
def _main_kernel(variant: _Variant) -> Any:
    found = _compiled()
    config = _config(variant.head_size, variant.tall)
    key = (ARCH, torch2cute_dtype_map[variant.dtype], *variant[1:], config)
    if key not in found:
        found[key] = _compile(variant)
    return found[key]


def _compile(variant: _Variant) -> Any:
    config = _config(variant.head_size, variant.tall)
    dtype = torch2cute_dtype_map[variant.dtype]
    kernel = FlashAttentionBackwardSm90(
        dtype,
        variant.head_size,
        variant.head_size,
        variant.queries_per_key,
        variant.causal,
        is_local=variant.local,
        deterministic=False,
        tile_m=config.m_block_size,
        tile_n=config.n_block_size,
        Q_stage=config.num_stages_Q,
        dO_stage=config.num_stages_dO,
        PdS_stage=config.num_stages_PdS,
        SdP_swapAB=config.SdP_swapAB,
        dKV_swapAB=config.dKV_swapAB,
        dQ_swapAB=config.dQ_swapAB,
        AtomLayoutMSdP=config.AtomLayoutMSdP,
        AtomLayoutNdKV=config.AtomLayoutNdKV,
        AtomLayoutMdQ=config.AtomLayoutMdQ,
        num_threads=(config.num_wg + 1) * 128,
        dQ_single_wg=config.dQ_single_wg,
    )
    fake = make_fake_bwd_tensors(dtype, has_gqa=True, varlen_q=False, varlen_k=False)
    q, k, v, _, dout, _, _, _, _, lse, row_sum, dq, dk, dv, _ = fake
    bounds = (1, 1) if variant.local else (None, None)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    lengths = semaphores = (None, None, None)
    args = (q, k, v, dout, lse, row_sum, dq, dk, dv, 1.0, None, *lengths, *bounds, *semaphores)
    tail = (AuxData(None, None), None, None, stream)
    return cute.compile(kernel, *args, *tail, options="--enable-tvm-ffi")


BEYOND = 1e30
"""LSE (to base 2) and row sum of rows that do not exist: they weigh nothing, and 0 * it is 0."""


class _Prepared(NamedTuple):
    """What is known about rows: row sums and LSE [2, B, N, Q], `done` of Q written."""

    sums: Tensor
    done: int


class Flash4Backward:
    """See SharedBackward."""

    def __init__(
        self,
        like_SZMH: Tensor,
        queries_per_key: int,
        groups: tuple[KeyGroup, ...],
        scale: float,
    ) -> None:
        _, samples, heads, size = like_SZMH.shape
        self.groups, self.scale, self.queries_per_key = groups, scale, queries_per_key
        self.num_samples, self.size = samples, size
        self.wide = _whole(size, _head_multiple(size))
        shapes = [(samples, x.runs.num_problems, heads, x.padded * self.wide) for x in groups]
        sizes = [2 * a * b * c * d for a, b, c, d in shapes]
        flat = torch.zeros(sum(sizes), dtype=torch.float32, device=like_SZMH.device).split(sizes)
        self.sums = [x.view(2, *shape) for x, shape in zip(flat, shapes, strict=True)]
        self._all_rows: list[_Prepared] = []

    def rows(self, dout_BQNH: Tensor, saved: Saved, tile: int, *, all_rows: bool) -> "Flash4Rows":
        """See SharedBackward."""
        known = self._all_rows if all_rows else []
        rows = Flash4Rows(self, dout_BQNH, saved, tile, tuple(known))
        if all_rows:
            self._all_rows = [rows.prepared]
        return rows

    def write_keys(self, group: int, dk_XLZMH: Tensor, dv_XLZMH: Tensor) -> None:
        """See SharedBackward."""
        config = _config(self.size)
        shape = (
            config.n_block_size,
            config.num_wg * 128,
            config.AtomLayoutNdKV,
            config.dKV_swapAB,
        )
        dk, dv = self.sums[group]
        for sample in range(self.num_samples):
            _round(dk[sample], dk_XLZMH[:, :, sample], self.scale, shape)
            _round(dv[sample], dv_XLZMH[:, :, sample], 1.0, shape)


class Flash4Rows:
    """See SharedRows."""

    def __init__(
        self,
        work: Flash4Backward,
        dout_BQNH: Tensor,
        saved: Saved,
        tile: int,
        known: tuple[_Prepared, ...],
    ) -> None:
        self._work, self._tile = work, tile
        self._q, self._dout = maybe_contiguous(saved.q), maybe_contiguous(dout_BQNH)
        batch, length, heads, size = saved.q.shape
        # Problems of one sample lie so many apart.
        self._apart = work.num_samples if batch > work.num_samples else 0
        self._tall = tile != _config(size).m_block_size
        padded = _whole(length, tile)
        wide = {"dtype": torch.float32, "device": self._q.device}
        if known:
            self._dq = torch.zeros(batch, heads, padded * work.wide, **wide)
            self.prepared = known[0]
            if padded > self.prepared.done:
                self.prepared.sums[..., self.prepared.done :] = BEYOND
                self.prepared = self.prepared._replace(done=self.prepared.sums.shape[3])
        else:
            self._dq = torch.empty(batch, heads, padded * work.wide, **wide)
            most = max(_whole(length, x.rows) for x in tiles(size)[:2])
            self.prepared = _Prepared(torch.empty(2, batch, heads, most, **wide), padded)
            self._prepare(saved)
        self._row_sum, self._lse = self.prepared.sums

    def _prepare(self, saved: Saved) -> None:
        """Writes row sums and LSE, and zeroes the buffer of dQ."""
        size, (row_sum, lse) = self._work.size, self.prepared.sums
        _bwd_preprocess(
            maybe_contiguous(saved.out),
            self._dout,
            row_sum,
            maybe_contiguous(saved.lse),
            lse,
            self._dq,
            None,
            None,
            None,
            torch2cute_dtype_map[self._q.dtype],
            size,
            size,
            self._tile,
            fake_mode=False,
            hdim_multiple_of=_head_multiple(size),
        )

    def launch(self, launch: SharedLaunch, k_SZMH: Tensor, v_SZMH: Tensor) -> None:
        """See SharedRows."""
        work = self._work
        causal, left, right = _bounds(launch.window, launch.num_rows)
        variant = _Variant(
            self._q.dtype, work.size, work.queries_per_key, causal, left is not None, self._tall
        )
        kernel = _main_kernel(variant)
        k, v = maybe_contiguous(k_SZMH), maybe_contiguous(v_SZMH)
        none = (None, None, None)
        for sample in range(work.num_samples):
            kernel(
                self._rows_of(launch, self._q, sample),
                *(_keys_of(launch, x, sample) for x in (k, v)),
                self._rows_of(launch, self._dout, sample),
                *(self._sums_of(launch, x, sample) for x in (self._lse, self._row_sum, self._dq)),
                *self._key_sums_of(launch, sample),
                work.scale,
                None,
                *none,
                left,
                right,
                *none,
                AuxData(None, None),
                None,
                None,
            )

    def _rows_of(self, launch: SharedLaunch, x_BQNH: Tensor, sample: int) -> Tensor:
        """A sample's problems, [X, rows, heads, H]."""
        batch, row, head, _ = x_BQNH.stride()
        at = x_BQNH.storage_offset() + sample * batch + launch.row * row
        step = self._apart * batch + launch.row_step * row
        shape = (launch.num_problems, launch.num_rows, *x_BQNH.shape[2:])
        return x_BQNH.as_strided(shape, (step, row, head, 1), at)

    def _sums_of(self, launch: SharedLaunch, x: Tensor, sample: int) -> Tensor:
        """The same rows of LSE, row sums or the buffer of dQ, [X, heads, rows (* H)].

        The last rows' tile may reach beyond them, into the padding.
        """
        width = self._work.wide if x is self._dq else 1
        batch, head, _ = x.stride()
        step = self._apart * batch + launch.row_step * width
        num_rows = _whole(launch.num_rows, self._tile)
        shape = (launch.num_problems, x.shape[1], num_rows * width)
        at = x.storage_offset() + sample * batch + launch.row * width
        return x.as_strided(shape, (step, head, 1), at)

    def _key_sums_of(self, launch: SharedLaunch, sample: int) -> list[Tensor]:
        """The buffers of dK and dV, [X, heads, keys * H]."""
        work, group, views = self._work, self._work.groups[launch.group], []
        num_keys = _whole(launch.num_keys, _config(work.size).n_block_size)
        first, row = divmod(launch.offset, group.padded)
        runs, rows = divmod(launch.offset_step, group.padded)
        for x in work.sums[launch.group]:
            batch, run, head, _ = x.stride()
            step = runs * run + rows * work.wide
            at = x.storage_offset() + sample * batch + first * run + row * work.wide
            shape = (launch.num_problems, x.shape[2], num_keys * work.wide)
            views.append(x.as_strided(shape, (step, head, 1), at))
        return views

    def row_sums(self) -> Tensor:
        """See SharedRows."""
        return self._row_sum[:, :, : self._q.shape[1]]

    def write(self, dq_BQNH: Tensor) -> None:
        """See SharedRows."""
        config = _config(self._work.size, self._tall)
        threads = 128 if config.dQ_single_wg else config.num_wg * 128
        shape = (config.m_block_size, threads, config.AtomLayoutMdQ, config.dQ_swapAB)
        _round(self._dq, dq_BQNH, self._work.scale, shape)


def _keys_of(launch: SharedLaunch, x_SZMH: Tensor, sample: int) -> Tensor:
    """A sample's problems, [X, keys, heads, H]."""
    row, to_sample, head, _ = x_SZMH.stride()
    at = x_SZMH.storage_offset() + launch.key * row + sample * to_sample
    shape = (launch.num_problems, launch.num_keys, *x_SZMH.shape[2:])
    return x_SZMH.as_strided(shape, (launch.key_step * row, row, head, 1), at)


def _round(wide: Tensor, into: Tensor, scale: float, shape: tuple[int, int, int, bool]) -> None:
    """Writes sums [B, heads, rows * H] times `scale` to [B, rows, heads, H]."""
    tile, threads, atom, swap = shape
    size = into.shape[-1]
    _bwd_postprocess_convert(
        wide,
        into,
        scale,
        None,
        None,
        ARCH,
        torch2cute_dtype_map[into.dtype],
        size,
        tile,
        threads,
        atom,
        swap,
        fake_mode=False,
        hdim_multiple_of=_head_multiple(size),
    )


def _whole(length: int, tile: int) -> int:
    """`length` rounded up to whole tiles."""
    return -(-length // tile) * tile


def _bounds(window: Window, num_rows: int) -> tuple[bool, Any, Any]:
    """(causal, left, right) as the main kernel takes them: no bounds, or both."""
    left, right = window
    if left < 0:
        return right == 0, None, None
    # From the last row on every key is to the left, so this right bound never cuts.
    return False, left, num_rows - 1 if right < 0 else right
