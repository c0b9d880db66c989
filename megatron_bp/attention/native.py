"""The `native` strategy: the plan's launches over any plain kernel, merged by log-sum-exp.

Knows how rows and key runs become kernel inputs, and how results come back; knows no wires and no
mask. Inputs are views wherever rows lie together. Letters: T local rows, S key rows, Z samples,
X problems, Q rows and K keys of a problem, N query heads, M key/value heads, G = N / M, H head
size. Specified by tests/attention/test_native.py.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from functools import partial as partial_call
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from megatron_bp.attention.contract import NativeKernel, Saved, WritingKernel, lse_dtype
from megatron_bp.attention.lanes import Finish, Queue, queue_on
from megatron_bp.attention.passes import add_rows, merge_rows, read_rows
from megatron_bp.attention.schedule import Pass, Runs, Step
from megatron_bp.layout.decomposition import KeySpace


class KeyValue(NamedTuple):
    """Keys and values (or their gradients) of one key space: two tensors [S, Z, M, H]."""

    k: Tensor
    v: Tensor


Spaces = tuple[KeyValue, KeyValue]  # indexed by KeySpace: clean, own


class Partial(NamedTuple):
    """Attention merged so far: `out` [T, Z, N, H] in the model's dtype, `lse` [T, Z, N] wide."""

    out: Tensor
    lse: Tensor


def empty_partial(like_TZNH: Tensor, todo: Pass) -> Partial:
    """A Partial for the steps of `todo`: unwritten, except rows that no step stores.

    The LSE is laid out [Z, N, T] in memory, as kernels have it.
    """
    rows, samples, heads = like_TZNH.shape[:3]
    out = torch.empty(like_TZNH.shape, dtype=like_TZNH.dtype, device=like_TZNH.device)
    wide = lse_dtype(out.dtype)
    lse = torch.empty(samples, heads, rows, dtype=wide, device=out.device).permute(2, 0, 1)
    for lo, hi in todo.row_gaps:
        out[lo:hi] = 0
        lse[lo:hi] = float("-inf")
    return Partial(out, lse)


@dataclass(frozen=True)
class _Problems:
    """How one step is laid out for a kernel."""

    step: Step
    num_kv_heads: int

    def query(self, x_TZNH: Tensor) -> Tensor:
        """Query-shaped rows as [problems, Q, heads, H]."""
        x = read_rows(x_TZNH, self.step.rows)  # [X, Q, Z, N, H]
        if self.step.joined:
            # torch.cat copies a few long runs at full bandwidth, flatten does not.
            apart = self.step.rows.step > self.step.rows.length and len(x) <= 8
            return (torch.cat([*x]) if apart else x.flatten(0, 1)).transpose(0, 1)
        if self.step.folded:
            x = x.unflatten(3, (self.num_kv_heads, -1)).permute(2, 1, 3, 0, 4, 5)
            return x.flatten(2, 4)
        return x.transpose(1, 2).flatten(0, 1)

    def lse(self, x_TZN: Tensor) -> Tensor:
        """LSE rows as the kernel has them, [problems, heads, Q]."""
        if self.step.joined or self.step.folded:
            return self.query(x_TZN[..., None])[..., 0].transpose(1, 2)
        return read_rows(x_TZN, self.step.rows).permute(0, 2, 3, 1).flatten(0, 1)

    def unquery(self, x: Tensor, num_samples: int) -> Tensor:
        """The inverse of `query`, a view: [problems, Q, heads, H] as [X, Q, Z, M, G, H]."""
        problems = self.step.rows.num_problems
        if self.step.joined:
            x = x.transpose(0, 1).unflatten(0, (problems, -1))
            return x.unflatten(3, (self.num_kv_heads, -1))
        if self.step.folded:
            x = x.unflatten(2, (self.num_kv_heads, problems, -1))
            return x.permute(3, 1, 0, 2, 4, 5)
        x = x.unflatten(2, (self.num_kv_heads, -1))
        return x.unflatten(0, (-1, num_samples)).transpose(1, 2)

    def key_parts(self, spaces: Spaces, part: int) -> list[Tensor]:
        """The runs of keys (part 0) or values (part 1), each [X, K, Z, M, H]."""
        return [read_rows(spaces[space][part], runs) for space, runs in self.step.keys]

    def key(self, spaces: Spaces, part: int) -> Tensor:
        """Keys (part 0) or values (part 1) as [problems, K, M, H]."""
        found = self.key_parts(spaces, part)
        joined = found[0] if len(found) == 1 else torch.cat(found, 1)
        return joined.transpose(1, 2).flatten(0, 1)

    def add_keys(self, spaces: Spaces, dk_XKZMH: Tensor, dv_XKZMH: Tensor) -> None:
        """Adds key and value gradients to their rows."""
        at = 0
        for space, runs in self.step.keys:
            for lo, piece in runs.pieces or ((0, runs),):
                part = slice(at + lo, at + lo + piece.length)
                add_rows(tuple(spaces[space]), piece, (dk_XKZMH[:, part], dv_XKZMH[:, part]))
            at += runs.length

    @property
    def in_place(self) -> bool:
        """Whether the rows are a view that may be written."""
        return self.step.rows.writable and not self.step.folded

    def kernel_may_write(self, num_samples: int) -> bool:
        """Whether `query` and `lse` of fresh rows are views as a kernel takes them."""
        rows = self.step.rows
        one = rows.num_problems == 1 or (num_samples == 1 and not self.step.joined)
        return rows.store and self.in_place and one and rows.length > 1


@dataclass(frozen=True)
class NativeRun:
    """Forward and backward of steps on one set of local rows; `beside`: short ones overlap."""

    kernel: NativeKernel
    scale: float
    beside: bool = False

    def forward(
        self,
        steps: Iterable[Step],
        q_TZNH: Tensor,
        keys: Spaces,
        partial: Partial,
        queue: Queue,
    ) -> None:
        """Merges the steps into `partial`, in place, once `queue` is drained."""
        for step in _one_by_one(steps, q_TZNH):
            small = _is_small(step, q_TZNH)
            if small:  # it writes rows itself, after all that was started before
                queue.drain()
            run = self._small_forward if small else self._forward
            queue.run(partial_call(run, step, q_TZNH, keys, partial), step.num_pairs)

    def _forward(self, step: Step, q_TZNH: Tensor, keys: Spaces, partial: Partial) -> Finish:
        at = _Problems(step, keys[0].k.shape[2])
        q, k, v = at.query(q_TZNH), at.key(keys, 0), at.key(keys, 1)
        if self.kernel.caps.writes and at.kernel_may_write(q_TZNH.shape[1]):
            into = (at.query(partial.out), at.lse(partial.lse))
            kernel = cast(WritingKernel, self.kernel)
            kernel.forward_into(q, k, v, step.window, self.scale, into)
            return _nothing
        out, lse = self.kernel.forward(q, k, v, step.window, self.scale)
        out = at.unquery(out, q_TZNH.shape[1])
        lse = at.unquery(lse.transpose(1, 2)[..., None], q_TZNH.shape[1])[..., 0]
        return partial_call(merge_rows, partial.out, partial.lse, step.rows, out, lse)

    def _small_forward(self, step: Step, q: Tensor, keys: Spaces, partial: Partial) -> Finish:
        from megatron_bp.attention import triton_small as small

        todo = _small_problems(step, q.device)
        into = (partial.out, partial.lse)
        small.forward_into(q, small.Keys(*keys), todo, self.scale, into, store=step.rows.store)
        return _nothing

    def backward(
        self,
        steps: Iterable[Step],
        dout_TZNH: Tensor,
        saved: tuple[Tensor, Spaces, Partial],
        grads: tuple[Tensor, Spaces],
    ) -> None:
        """Adds the steps' gradients to `grads` (dq, key spaces), in place."""
        queue = queue_on(dout_TZNH.device, self.beside)
        for step in _one_by_one(steps, saved[0]):
            small = _is_small(step, saved[0])
            if small:
                queue.drain()
            run = self._small_backward if small else self._backward
            queue.run(partial_call(run, step, dout_TZNH, saved, grads), step.num_pairs)
        queue.drain()

    def _backward(
        self,
        step: Step,
        dout_TZNH: Tensor,
        saved: tuple[Tensor, Spaces, Partial],
        grads: tuple[Tensor, Spaces],
    ) -> Finish:
        q, keys, partial = saved
        dq, dkeys = grads
        at = _Problems(step, keys[0].k.shape[2])
        k, v = at.key(keys, 0), at.key(keys, 1)
        local = Saved(at.query(q), k, v, at.query(partial.out), at.lse(partial.lse))
        dout = at.query(dout_TZNH)
        dq_part: tuple[Tensor, ...] = ()
        if self.kernel.caps.writes and at.kernel_may_write(q.shape[1]):
            kernel = cast(WritingKernel, self.kernel)
            dk, dv = kernel.backward_into(dout, local, step.window, self.scale, at.query(dq))
        else:
            part, dk, dv = self.kernel.backward(dout, local, step.window, self.scale)
            dq_part = (at.unquery(part, q.shape[1]).flatten(-2),)
        dk, dv = (x.unflatten(0, (-1, q.shape[1])).transpose(1, 2) for x in (dk, dv))

        def finish() -> None:
            if dq_part:
                rows = dq.unflatten(2, (at.num_kv_heads, -1)).flatten(-2)
                add_rows((rows,), step.rows, dq_part)
            at.add_keys(dkeys, dk, dv)

        return finish

    def _small_backward(
        self,
        step: Step,
        dout_TZNH: Tensor,
        saved: tuple[Tensor, Spaces, Partial],
        grads: tuple[Tensor, Spaces],
    ) -> Finish:
        from megatron_bp.attention import triton_small as small

        (q, keys, partial), (dq, dkeys) = saved, grads
        clean, own, far = _small_runs(step)
        stores = small.Stores(step.rows.store, _stores(clean), _stores(own), _apart(clean))
        left = small.backward_into(
            small.Rows(q, partial.out, partial.lse, dout_TZNH),
            small.Keys(*keys),
            _small_problems(step, q.device),
            self.scale,
            (dq, small.Keys(*dkeys)),
            stores,
        )

        def finish() -> None:
            for runs, values in zip((clean, far), left, strict=True):
                for run in runs if values[0].shape[1] else ():
                    add_rows(tuple(dkeys[KeySpace.CLEAN]), run, values)

        return finish


SmallRuns = tuple[tuple[Runs, ...], tuple[Runs, ...], tuple[Runs, ...]]


def _small_runs(step: Step) -> SmallRuns:
    """The clean run, the own run and the far end of a step's problems; empty where absent."""
    clean = tuple(runs for space, runs in step.keys if space is KeySpace.CLEAN)
    own = tuple(runs for space, runs in step.keys if space is KeySpace.OWN)
    return clean, own, tuple(runs for far in step.far for _, runs in far.keys)


def _stores(runs: tuple[Runs, ...]) -> bool:
    return all(x.store for x in runs)


def _apart(runs: tuple[Runs, ...]) -> bool:
    """Whether no two problems have the same rows, so that a kernel may add to them."""
    return all(len(x.rounds) == 1 and not x.pieces for x in runs)


def _nothing() -> None:
    pass


def _one_by_one(steps: Iterable[Step], q_TZNH: Tensor) -> Iterable[Step]:
    """The steps, far ends by themselves unless the small-problem kernel takes them along."""
    for step in steps:
        if not step.far or _is_small(step, q_TZNH):
            yield step
        else:
            yield from (step.alone, *step.far)


def _is_small(step: Step, q_TZNH: Tensor) -> bool:
    """Whether a step is for the small-problem kernel: blocks on a GPU, rows and keys apart."""
    shared = any(x.joined or x.folded for x in (step, *step.far))
    if not _runs_small(q_TZNH) or shared:
        return False
    from megatron_bp.attention import triton_small as small

    clean, own, far = _small_runs(step)
    keys, end = (sum(x.length for x in runs) for runs in ((*clean, *own), far))
    one_each = max(len(clean), len(own), len(far)) <= 1 and _apart((step.rows, *own))
    return one_each and small.fits(step.rows.length, keys, end, q_TZNH.shape[-1])


def _runs_small(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


@lru_cache(maxsize=8192)
def _small_problems(step: Step, device: torch.device) -> Any:
    """A step as the small-problem kernel takes it."""
    from megatron_bp.attention import triton_small as small

    runs = _small_runs(step)
    absent = np.zeros_like(step.rows.starts)
    starts = np.stack([step.rows.starts, *(x[0].starts if x else absent for x in runs)])
    lengths = tuple(x[0].length if x else 0 for x in runs)
    on_device = torch.from_numpy(starts).to(device)
    return small.Problems(on_device, step.rows.length, lengths, step.window)  # type: ignore[arg-type]


def clear_gaps(tensors: Iterable[Tensor], todo: Pass, space: KeySpace) -> None:
    """Zeroes the key rows of `space` that no step of `todo` stores."""
    for tensor in tensors:
        for lo, hi in todo.key_gaps[space]:
            tensor[lo:hi] = 0
