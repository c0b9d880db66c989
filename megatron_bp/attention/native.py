"""The `native` strategy: the plan's launches over any plain kernel, merged by log-sum-exp.

Knows how rows and key runs become kernel inputs, and how results are added back; knows no wires and
no mask. Letters: T local rows, S key rows, Z samples, X problems, Q rows and K keys of a problem,
N query heads, M key/value heads, H head size. Specified by tests/attention/test_native.py.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_bp.attention.contract import NativeKernel, Saved, Window
from megatron_bp.attention.merge import merge
from megatron_bp.layout.decomposition import KeyRun, Launch


class KeyValue(NamedTuple):
    """Keys and values (or their gradients) of one key space: two tensors [S, Z, M, H]."""

    k: Tensor
    v: Tensor


Spaces = tuple[KeyValue, KeyValue]  # indexed by KeySpace: clean, own


class Partial(NamedTuple):
    """Attention merged so far: `out` [T, Z, N, H] (accumulation dtype), `lse` [T, Z, N]."""

    out: Tensor
    lse: Tensor


def _starts_and_length(of: "KeyRun | Launch") -> "tuple[np.ndarray, int]":
    return (of.starts, of.length) if isinstance(of, KeyRun) else (of.rows, of.num_rows)


@lru_cache(maxsize=8192)
def _index(run: "KeyRun | Launch", device: torch.device) -> Tensor:
    """Row index [X * length] of runs that are neither one slice nor back to back."""
    starts, length = _starts_and_length(run)
    return torch.from_numpy((starts[:, None] + np.arange(length)).ravel()).to(device)


@dataclass(frozen=True)
class Runs:
    """Equal runs of rows: reads them as [X, length, ...] and adds gradients back.

    A single run, or runs that lie back to back, are read and written in place without a copy.
    """

    of: "KeyRun | Launch"
    first: int = 0

    @property
    def _shape(self) -> "tuple[np.ndarray, int]":
        starts, length = _starts_and_length(self.of)
        return starts - self.first, length

    def _slice(self) -> slice | None:
        starts, length = self._shape
        if (np.diff(starts) != length).any():
            return None
        return slice(int(starts[0]), int(starts[-1]) + length)

    def _rows(self, device: torch.device) -> Tensor:
        index = _index(self.of, device)
        return index - self.first if self.first else index

    def read(self, x: Tensor) -> Tensor:
        """Rows as [X, length, ...]."""
        where = self._slice()
        picked = x[where] if where is not None else x[self._rows(x.device)]
        starts, length = self._shape
        return picked.unflatten(0, (len(starts), length))

    def write(self, x: Tensor, value: Tensor) -> None:
        """Overwrites the rows with `value` [X, length, ...]; runs must not overlap."""
        where = self._slice()
        x[where if where is not None else self._rows(x.device)] = value.flatten(0, 1).to(x.dtype)

    def add(self, x: Tensor, value: Tensor) -> None:
        """Adds `value` [X, length, ...] to the rows; runs may overlap."""
        flat = value.flatten(0, 1).to(x.dtype)
        where = self._slice()
        if where is not None:
            x[where] += flat
        else:
            x.index_add_(0, self._rows(x.device), flat)


@dataclass(frozen=True)
class _Problem:
    """How one launch is laid out for a kernel.

    Problems that read the same keys (the complementary views) are folded into the query heads of
    each key/value head: the keys are then read once, and their gradients summed in the kernel.
    """

    launch: Launch
    first_row: int

    @property
    def rows(self) -> Runs:
        return Runs(self.launch, self.first_row)

    @property
    def window(self) -> Window:
        return Window(self.launch.left, self.launch.right)

    @property
    def shares_keys(self) -> bool:
        starts = [run.starts for run in self.launch.keys]
        return self.launch.num_problems > 1 and all((s == s[0]).all() for s in starts)

    def query(self, x_TZNH: Tensor, num_kv_heads: int) -> Tensor:
        """Query-shaped rows as [problems, Q, heads, H]."""
        x = self.rows.read(x_TZNH)  # [X, Q, Z, N, H]
        if self.shares_keys:
            x = x.unflatten(3, (num_kv_heads, -1)).permute(2, 1, 3, 0, 4, 5)
            return x.flatten(2, 4)
        return x.transpose(1, 2).flatten(0, 1)

    def lse(self, x_TZN: Tensor, num_kv_heads: int) -> Tensor:
        """LSE rows as the kernel has them, [problems, heads, Q]."""
        return self.query(x_TZN[..., None], num_kv_heads)[..., 0].transpose(1, 2)

    def unquery(self, x: Tensor, num_samples: int, num_kv_heads: int) -> Tensor:
        """The inverse of `query`: [problems, Q, heads, H] as [X, Q, Z, N, H]."""
        if self.shares_keys:
            x = x.unflatten(2, (num_kv_heads, self.launch.num_problems, -1))
            return x.permute(3, 1, 0, 2, 4, 5).flatten(3, 4)
        return x.unflatten(0, (-1, num_samples)).transpose(1, 2)

    def key(self, spaces: Spaces, part: int) -> Tensor:
        """Keys (part 0) or values (part 1) as [problems, K, M, H]."""
        runs = [self._run(run).read(spaces[run.space][part]) for run in self.launch.keys]
        joined = runs[0] if len(runs) == 1 else torch.cat(runs, 1)  # [X, K, Z, M, H]
        return joined.transpose(1, 2).flatten(0, 1)

    def add_key(self, spaces: Spaces, part: int, grad: Tensor) -> None:
        """Adds key or value gradients [problems, K, M, H] to their rows."""
        num_samples = spaces[0][part].shape[1]
        grad = grad.unflatten(0, (-1, num_samples)).transpose(1, 2)
        at = 0
        for run in self.launch.keys:
            self._run(run).add(spaces[run.space][part], grad[:, at : at + run.length])
            at += run.length

    def _run(self, run: KeyRun) -> Runs:
        if not self.shares_keys:
            return Runs(run)
        return Runs(_first(run))


@lru_cache(maxsize=4096)
def _first(run: KeyRun) -> KeyRun:
    return KeyRun(run.space, run.starts[:1], run.length)


@dataclass(frozen=True)
class NativeRun:
    """Forward and backward of launches on one set of local rows that starts at `first_row`."""

    kernel: NativeKernel
    scale: float
    first_row: int

    def forward(
        self, launches: Iterable[Launch], q_TZNH: Tensor, keys: Spaces, partial: Partial
    ) -> None:
        """Merges the launches into `partial`, in place."""
        num_samples, num_kv_heads = q_TZNH.shape[1], keys[0].k.shape[2]
        for launch in launches:
            at = _Problem(launch, self.first_row)
            out, lse = self.kernel.forward(
                at.query(q_TZNH, num_kv_heads),
                at.key(keys, 0),
                at.key(keys, 1),
                at.window,
                self.scale,
            )
            out = at.unquery(out, num_samples, num_kv_heads)
            lse = at.unquery(lse.transpose(1, 2)[..., None], num_samples, num_kv_heads)[..., 0]
            merged = merge(at.rows.read(partial.out), at.rows.read(partial.lse), out, lse)
            at.rows.write(partial.out, merged[0])
            at.rows.write(partial.lse, merged[1])

    def backward(
        self,
        launches: Iterable[Launch],
        dout_TZNH: Tensor,
        saved: tuple[Tensor, Spaces, Partial],
        grads: tuple[Tensor, Spaces],
    ) -> None:
        """Adds the launches' gradients to `grads` (dq, key spaces), in place."""
        q, keys, partial = saved
        dq, dkeys = grads
        num_samples, num_kv_heads = q.shape[1], keys[0].k.shape[2]
        for launch in launches:
            at = _Problem(launch, self.first_row)
            local = Saved(
                at.query(q, num_kv_heads),
                at.key(keys, 0),
                at.key(keys, 1),
                at.query(partial.out, num_kv_heads),
                at.lse(partial.lse, num_kv_heads),
            )
            dout = at.query(dout_TZNH, num_kv_heads)
            dq_part, dk, dv = self.kernel.backward(dout, local, at.window, self.scale)
            at.rows.add(dq, at.unquery(dq_part, num_samples, num_kv_heads))
            at.add_key(dkeys, 0, dk)
            at.add_key(dkeys, 1, dv)
