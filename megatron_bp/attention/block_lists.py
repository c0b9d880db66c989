"""Turns an interval mask into key-row intervals and exact block lists for mask kernels.

Both are computed once a mask and cached. Specified by tests/attention/test_block_lists.py.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_bp.attention.contract import IntervalMask


@dataclass(frozen=True, eq=False)
class MaskKey:
    """A mask as a cache key: the same object, not equal contents."""

    mask: IntervalMask

    def __hash__(self) -> int:
        return id(self.mask.key_name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MaskKey) and other.mask.key_name is self.mask.key_name


class KeyIntervals(NamedTuple):
    """Row q sees the key rows [lo, hi) and [own_lo, own_hi); all int32 [Q]."""

    lo: Tensor
    hi: Tensor
    own_lo: Tensor
    own_hi: Tensor


class BlockList(NamedTuple):
    """For each row of blocks: how many blocks it meets (int32 [R]) and which (int32 [R, C])."""

    num: Tensor
    which: Tensor


class BlockLists(NamedTuple):
    """Blocks where only some pairs are allowed, and blocks where all are."""

    partial: BlockList
    full: BlockList


@lru_cache(maxsize=64)
def key_intervals(key: MaskKey) -> KeyIntervals:
    """The intervals of the mask in key rows instead of names.

    Raises: ValueError if the keys that a row sees are not one run of rows in each half.
    """
    mask = key.mask
    columns = [x.cpu().numpy() for x in (mask.clean_lo, mask.clean_hi, mask.own_lo, mask.own_hi)]
    names = mask.key_name.cpu().numpy()
    clean = _to_rows(columns[0], columns[1], names[: mask.num_clean], 0)
    own = _to_rows(columns[2], columns[3], names[mask.num_clean :], mask.num_clean)
    device = mask.key_name.device
    return KeyIntervals(*(torch.from_numpy(x.astype(np.int32)).to(device) for x in (*clean, *own)))


def _to_rows(
    lo: NDArray[np.int32], hi: NDArray[np.int32], names: NDArray[np.int32], first: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    row = np.flatnonzero(names >= 0)
    name = names[row]
    a, z = np.searchsorted(name, lo), np.searchsorted(name, hi)
    some = a < z
    # A sentinel row keeps the look-up of empty intervals in range.
    row = np.append(row, row[-1:] + 1) if len(row) else np.zeros(1, dtype=np.int64)
    row_lo, row_hi = row[np.where(some, a, 0)], row[np.where(some, z, 1) - 1] + 1
    if (np.diff(name) <= 0).any() or (some & (row_hi - row_lo != z - a)).any():
        raise ValueError("interval masks need the keys that a row sees in one run of rows.")
    return np.where(some, row_lo + first, 0), np.where(some, row_hi + first, 0)


@lru_cache(maxsize=64)
def block_lists(key: MaskKey, rows: int, cols: int) -> tuple[BlockLists, BlockLists]:
    """Exact lists for blocks of `rows` x `cols`: key blocks of query blocks, and the reverse."""
    at = key_intervals(key)
    num_keys = len(key.mask.key_name)

    def edge(x: Tensor, pad: int, largest: bool) -> Tensor:
        short = -len(x) % rows
        x = torch.cat([x, x.new_full((short,), pad)]).view(-1, rows)
        return (x.amax(1) if largest else x.amin(1))[:, None]

    start = torch.arange(0, num_keys, cols, device=at.lo.device)
    stop = (start + cols).clamp(max=num_keys)
    some, full = torch.zeros((), device=at.lo.device), torch.zeros((), device=at.lo.device)
    big = num_keys + 1
    for lo, hi in ((at.lo, at.hi), (at.own_lo, at.own_hi)):
        empty = lo >= hi
        low, high = torch.where(empty, big, lo), torch.where(empty, 0, hi)
        some = some + ((start < edge(high, 0, True)) & (stop > edge(low, big, False)))
        full = full + ((start >= edge(low, 0, True)) & (stop <= edge(high, big, False)))
    full = full > 0
    part = (some > 0) & ~full
    return (
        BlockLists(_list(part), _list(full)),
        BlockLists(_list(part.T), _list(full.T)),
    )


def _list(meets: Tensor) -> BlockList:
    order = torch.argsort(meets.to(torch.int8), dim=1, descending=True, stable=True)
    return BlockList(meets.sum(1, dtype=torch.int32), order.to(torch.int32).contiguous())
