"""FlashAttention 4's backward with accumulators that all launches of a pass share.

The package's backward is three kernels: one prepares LSE and row sums, the main one adds to fp32
buffers of dQ, dK and dV, and one rounds such a buffer to the model's dtype. Here the first runs
once over all rows, the main one for each launch, and in place of the last untile.py adds what
several buffers have for a row and writes it once. Where it does not know how a buffer's tiles lie,
the package's kernel rounds it, to be added. Grouped-query attention only: else the main kernel
stores dK and dV.
Specified by tests/attention/test_flash4_sums.py (kernels replaced) and test_gpu_shared.py.
Source: flash-attn-4 (flash_attn.cute.interface), https://github.com/Dao-AILab/flash-attention.
"""

import math
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import cutlass.cute as cute  # kernels/flash4.py says what to install
import torch
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
from torch import Tensor

from megatron_bp.attention.contract import Window
from megatron_bp.attention.operands import KeyLayout, RowLayout, operands, whole
from megatron_bp.attention.passes import add_rows, pad_rows
from megatron_bp.attention.problems import KeyValue, add_pieces
from megatron_bp.attention.sharing import RowGroup, Shared, SharedLaunch, TileRule, Tiles
from megatron_bp.attention.untile import (
    KeySums,
    Order,
    RowSums,
    Tiled,
    by_problem,
    write_keys,
    write_rows,
)
from megatron_bp.attention.views import ALIGNED, begin_at, views_of

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


def _row_order(head_size: int, tall: bool) -> Order:
    """How the buffer of dQ lies."""
    config = _config(head_size, tall)
    groups = 1 if config.dQ_single_wg else config.num_wg
    return Order(
        config.m_block_size, head_size, groups, config.AtomLayoutMdQ, bool(config.dQ_swapAB)
    )


def _key_order(head_size: int) -> Order:
    """How those of dK and dV lie."""
    config = _config(head_size)
    return Order(
        config.n_block_size,
        head_size,
        config.num_wg,
        config.AtomLayoutNdKV,
        bool(config.dKV_swapAB),
    )


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


class Flash4Backward:
    """See SharedBackward."""

    def __init__(
        self, like_SZMH: Tensor, queries_per_key: int, shared: Shared, scale: float
    ) -> None:
        _, samples, heads, size = like_SZMH.shape
        self.shared, self.scale, self.queries_per_key = shared, scale, queries_per_key
        self.num_samples, self.size, self.dtype = samples, size, like_SZMH.dtype
        self.wide = whole(size, _head_multiple(size))
        # Of dK and dV [2 * Z * X, M, padded * wide].
        self._shapes = [
            (2 * samples * x.runs.num_problems, heads, x.padded * self.wide) for x in shared.keys
        ]
        # Only what is begun and not written yet has memory: gigabytes at 128K tokens.
        self.key_sums: dict[int, Tensor] = {}
        self._row_sums: dict[int, Tensor] = {}

    def prepare(self, dout_ZTNH: Tensor, out_ZTNH: Tensor, lse_ZNT: Tensor) -> Tensor:
        """See SharedBackward."""
        samples, length, heads, size = out_ZTNH.shape
        tile = _config(size).m_block_size
        shape = (2, samples, heads, whole(length, tile))
        self.known = torch.empty(shape, dtype=torch.float32, device=out_ZTNH.device)
        row_sums, lse = self.known.unbind()
        _bwd_preprocess(
            _as_taken(out_ZTNH),
            _as_taken(dout_ZTNH),
            row_sums,
            _as_taken(lse_ZNT),
            lse,
            *(None,) * 4,
            torch2cute_dtype_map[out_ZTNH.dtype],
            size,
            size,
            tile,
            fake_mode=False,
            hdim_multiple_of=_head_multiple(size),
        )
        return row_sums[..., :length]

    def rows(self, group: int, q_BQNH: Tensor, dout_BQNH: Tensor) -> "Flash4Rows":
        """See SharedBackward."""
        rows = Flash4Rows(self, self.shared.rows[group], q_BQNH, dout_BQNH)
        self._row_sums[group] = rows.sums
        self._begin_keys(group)
        return rows

    def _begin_keys(self, group: int) -> None:
        """Zeroed sums for the keys of a row group's launches, in one pass."""
        keys = sorted({x.group for x in self.shared.rows[group].launches} - set(self.key_sums))
        shapes = [self._shapes[i] for i in keys]
        sizes = [math.prod(shape) for shape in shapes]
        flat = self.known.new_zeros(sum(sizes))
        for i, shape, stop in zip(keys, shapes, accumulate(sizes), strict=True):
            strides = (shape[1] * shape[2], shape[2], 1)
            self.key_sums[i] = flat.as_strided(shape, strides, stop - math.prod(shape))

    def write_rows(self, dq_TZNH: Tensor) -> None:
        """See SharedBackward."""
        usual, found = _config(self.size).m_block_size, []
        for i, x in enumerate(self.shared.rows):
            order = _row_order(self.size, x.tile != usual)
            found.append(RowSums(Tiled(self._row_sums.pop(i), order), x.runs, x.joined))
        if self.wide == self.size and all(x.tiled.order.known for x in found):
            write_rows(dq_TZNH, found, self.scale)
            return
        samples = dq_TZNH.shape[1]
        for (sums, order), runs, joined in found:
            length = runs.length * (runs.num_problems if joined else 1)
            shape = (len(sums), length, *dq_TZNH.shape[2:])
            part = torch.empty(shape, dtype=dq_TZNH.dtype, device=dq_TZNH.device)
            _round(sums, part, self.scale, order)
            add_rows((dq_TZNH,), runs, (by_problem(part, samples, runs, joined),))

    def write_keys(self, groups: tuple[int, ...], into: KeyValue) -> None:
        """See SharedBackward."""
        order = _key_order(self.size)
        found = [(self.key_sums.pop(i), self.shared.keys[i].runs) for i in groups]
        if self.wide == self.size and order.known:
            tiled = [KeySums(Tiled(x, order), runs) for x, runs in found]
            write_keys(into, tiled, self.scale)
            return
        for sums, runs in found:
            shape = (runs.num_problems, runs.length, *into.k.shape[1:])
            parts = [torch.empty(shape, dtype=self.dtype, device=into.k.device) for _ in range(2)]
            by_sample = sums.unflatten(0, (2, self.num_samples, -1))
            for sample in range(self.num_samples):
                for part, x, scale in zip(parts, by_sample, (self.scale, 1.0), strict=True):
                    _round(x[sample], part[:, :, sample], scale, order)
            add_pieces(into, runs, *parts)


class Flash4Rows:
    """See SharedRows."""

    def __init__(
        self, work: Flash4Backward, group: RowGroup, q_BQNH: Tensor, dout_BQNH: Tensor
    ) -> None:
        self._work = work
        self._q, self._dout = _as_taken(q_BQNH), _as_taken(dout_BQNH)
        batch, length, heads, size = q_BQNH.shape
        self._tall = group.tile != _config(size).m_block_size
        padded = whole(length, group.tile)
        self._layout = RowLayout(
            work.num_samples,
            batch,
            heads,
            size,
            work.wide,
            group.tile,
            padded,
            self._q.stride(),
            self._dout.stride(),
        )
        shape = (batch, heads, padded * work.wide)
        self.sums = torch.zeros(shape, dtype=torch.float32, device=q_BQNH.device)
        self._known = work.known
        if group.own:
            self._known = pad_rows(work.known, group.runs, group.joined, padded, BEYOND)

    def launch(self, launch: SharedLaunch, k_SZMH: Tensor, v_SZMH: Tensor) -> None:
        """See SharedRows."""
        work = self._work
        causal, left, right = _bounds(launch.window, launch.num_rows)
        variant = _Variant(
            self._q.dtype, work.size, work.queries_per_key, causal, left is not None, self._tall
        )
        kernel = _main_kernel(variant)
        k, v = _as_taken(k_SZMH), _as_taken(v_SZMH)
        group = work.shared.keys[launch.group]
        keys = KeyLayout(
            k.shape[2],
            _config(work.size).n_block_size,
            group.padded,
            group.runs.num_problems,
            k.stride(),
            v.stride(),
        )
        known, key_sums = self._known, work.key_sums[launch.group]
        tensors = (self._q, k, v, self._dout, known, known, self.sums, key_sums, key_sums)
        none = (None, None, None)
        for sample in range(work.num_samples):
            kernel(
                *views_of(operands(launch, self._layout, keys, sample), tensors),
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


def _as_taken(x: Tensor) -> Tensor:
    """The tensor if it lies as kernels take it; else what the package, which asks more, makes."""
    taken = not x.data_ptr() % ALIGNED and begin_at(x.stride(), ALIGNED // x.dtype.itemsize)
    return x if taken else maybe_contiguous(x)


def _round(wide: Tensor, into: Tensor, scale: float, order: Order) -> None:
    """Writes sums [B, heads, rows * H] times `scale` to [B, rows, heads, H]."""
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
        order.rows,
        order.groups * 128,
        order.along_rows,
        order.swapped,
        fake_mode=False,
        hdim_multiple_of=_head_multiple(size),
    )


def _bounds(window: Window, num_rows: int) -> tuple[bool, Any, Any]:
    """(causal, left, right) as the main kernel takes them: no bounds, or both."""
    left, right = window
    if left < 0:
        return right == 0, None, None
    # From the last row on every key is to the left, so this right bound never cuts.
    return False, left, num_rows - 1 if right < 0 else right
