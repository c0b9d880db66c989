"""The `native` strategy: the plan's launches over any plain kernel, merged by log-sum-exp.

Knows no wires and no mask. Letters: T local rows, S key rows, Z samples, X problems, Q rows and K
keys of a problem, N query heads, M key/value heads, G = N / M, H head size.
Specified by tests/attention/test_native.py.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from functools import partial as partial_call
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from megatron_bp.attention.contract import NativeKernel, Saved, WritingKernel, lse_dtype
from megatron_bp.attention.lanes import Finish, Queue, queue_on
from megatron_bp.attention.passes import add_rows, in_one, merge_rows, read_rows
from megatron_bp.attention.problems import Problems, Spaces
from megatron_bp.attention.ragged import RaggedKernel, RaggedStep
from megatron_bp.attention.row_pieces import PiecewiseKernel, in_pieces
from megatron_bp.attention.schedule import Pass, Runs, Step
from megatron_bp.attention.shared_run import SharedRun
from megatron_bp.attention.sharing import Shared, SharingKernel, share
from megatron_bp.layout.decomposition import KeySpace, Phase


class Partial(NamedTuple):
    """Attention merged so far: `out` [T, Z, N, H] in the model's dtype, `lse` [T, Z, N] wide."""

    out: Tensor
    lse: Tensor


class Rest(NamedTuple):
    """What is left of a backward pass, and rowsum(dout * out) [T, Z, N] if that is known."""

    steps: Mapping[Phase, tuple[Step, ...]]
    row_sums: tuple[Tensor, ...]


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


def _nothing() -> None:
    pass


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
        for step, small in _in_turn(tuple(steps), _runs_small(q_TZNH), q_TZNH.shape[3]):
            if small:  # it writes rows itself, after all that was started before
                queue.drain()
            run = self._small_forward if small else self._forward
            queue.run(partial_call(run, step, q_TZNH, keys, partial), step.num_pairs)

    def _forward(self, step: Step, q_TZNH: Tensor, keys: Spaces, partial: Partial) -> Finish:
        at = Problems(step, keys[0].k.shape[2])
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

    def forward_ragged(
        self,
        steps: Iterable[RaggedStep],
        q_TZNH: Tensor,
        keys: Spaces,
        partial: Partial,
        queue: Queue,
    ) -> None:
        """The same for steps whose problems end apart."""
        clean, samples = keys[KeySpace.CLEAN], q_TZNH.shape[1]
        for step in steps:
            pairs = step.rows.length * sum(step.lengths)
            for sample in range(samples):
                one = [q_TZNH, *clean, *partial]
                if samples > 1:
                    one = [x[:, sample : sample + 1] for x in one]
                queue.run(partial_call(self._ragged, step, *one), pairs)

    def _ragged(
        self, step: RaggedStep, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> Finish:
        """For tensors of one sample."""
        rows = read_rows(q, step.rows)[:, :, 0]
        k, v = (x[step.key : step.key + max(step.lengths), 0] for x in (k, v))
        kernel, heads = cast(RaggedKernel, self.kernel), (1, k.shape[1], -1)
        lengths = _lengths_on(step, q.device)
        part, part_lse = kernel.forward_ragged(rows, k, v, lengths, self.scale)
        part, part_lse = part.unflatten(2, heads), part_lse.unflatten(1, heads)
        return partial_call(merge_rows, out, lse, step.rows, part, part_lse.permute(0, 4, 1, 2, 3))

    def _small_forward(self, step: Step, q: Tensor, keys: Spaces, partial: Partial) -> Finish:
        todo = _small_problems(step, q.device)
        into = (partial.out, partial.lse)
        _small().forward_into(q, _near(step, keys), todo, self.scale, into, store=step.rows.store)
        return _nothing

    def begin_backward(
        self,
        todo: Pass,
        dout_TZNH: Tensor,
        saved: tuple[Tensor, Spaces, Partial],
        grads: tuple[Tensor, Spaces],
        clean_done: Finish = _nothing,
    ) -> Rest:
        """Zeroes what no launch stores and runs launches that share accumulators; returns the rest.

        `grads` may be unwritten. The rest of the pass adds to it. If its steps in phases EARLY and
        LATE are none, `clean_done` is called once nothing will add to the clean buffer any more.
        """
        q, keys = saved[:2]
        size, queries_per_key = q.shape[3], q.shape[2] // keys[0].k.shape[2]
        shared = _shared(todo, self.kernel, size, queries_per_key, _runs_small(q))
        _clear_gaps(shared.rest, grads)
        steps = shared.rest.steps
        done = _nothing if steps[Phase.EARLY] or steps[Phase.LATE] else clean_done
        row_sums: tuple[Tensor, ...] = ()
        if shared.rows:
            kernel = cast(SharingKernel, self.kernel)
            sums = kernel.share(keys[0].k, queries_per_key, shared, self.scale)
            queue = queue_on(q.device, self.beside)
            row_sums = (SharedRun(shared, sums, queue, dout_TZNH, saved, grads).run(done),)
        else:
            done()
        return Rest(steps, row_sums)

    def backward(
        self,
        steps: Iterable[Step],
        dout_TZNH: Tensor,
        saved: tuple[Tensor, Spaces, Partial],
        grads: tuple[Tensor, Spaces],
        row_sums: tuple[Tensor, ...] = (),
    ) -> None:
        """Adds the steps' gradients to `grads` (dq, key spaces), in place.

        `row_sums` are those of `begin_backward`, if it found any.
        """
        queue, q = queue_on(dout_TZNH.device, self.beside), saved[0]
        most_rows = _rows_at_once(self.kernel, q.shape[3])
        for step, small in _in_turn(tuple(steps), _runs_small(q), q.shape[3], most_rows):
            if small:
                queue.drain()
            run: Callable[..., Finish] = self._backward
            if small:
                run = partial_call(self._small_backward, row_sums)
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
        at = Problems(step, keys[0].k.shape[2])
        k, v = at.key(keys, 0), at.key(keys, 1)
        local = Saved(at.query(q), k, v, at.query(partial.out), at.lse(partial.lse))
        dout = at.query(dout_TZNH)
        dq_part: tuple[Tensor, ...] = ()
        if self.kernel.caps.writes and at.kernel_may_write(q.shape[1]):
            kernel = cast(WritingKernel, self.kernel)
            dk, dv = kernel.backward_into(dout, local, step.window, self.scale, at.query(dq))
        else:
            part, dk, dv = self.kernel.backward(dout, local, step.window, self.scale)
            dq_part = (part,)
        dk, dv = (x.unflatten(0, (-1, q.shape[1])).transpose(1, 2) for x in (dk, dv))

        def finish() -> None:
            for part in dq_part:
                at.add_query(dq, part)
            at.add_keys(dkeys, dk, dv)

        return finish

    def _small_backward(
        self,
        row_sums: tuple[Tensor, ...],
        step: Step,
        dout_TZNH: Tensor,
        saved: tuple[Tensor, Spaces, Partial],
        grads: tuple[Tensor, Spaces],
    ) -> Finish:
        (q, keys, partial), (dq, dkeys) = saved, grads
        (clean, _, far), into = _small_runs(step), _near(step, dkeys)
        # Launches that share accumulators have added in any order already.
        in_any_order = bool(row_sums) and into.clean[0].dtype.itemsize >= 4
        small = _small()
        left = small.backward_into(
            small.Rows(q, row_sums[0] if row_sums else partial.out, partial.lse, dout_TZNH),
            _near(step, keys),
            _small_problems(step, q.device),
            self.scale,
            (dq, into),
            _small_stores(step, in_any_order),
        )

        def finish() -> None:
            for runs, values in zip((clean, far), left, strict=True):
                for run in runs if values[0].shape[1] else ():
                    add_rows(into.clean, run, values)

        return finish


SmallRuns = tuple[tuple[Runs, ...], tuple[Runs, ...], tuple[Runs, ...]]


@lru_cache(maxsize=1)
def _small() -> Any:
    """The small-problem kernel; needs Triton."""
    from megatron_bp.attention import triton_small

    return triton_small


@lru_cache(maxsize=8192)
def _small_runs(step: Step) -> SmallRuns:
    """The clean run, the own run and the far end of a step's problems; empty where absent."""
    clean = tuple(runs for space, runs in step.keys if space is not KeySpace.OWN)
    own = tuple(runs for space, runs in step.keys if space is KeySpace.OWN)
    return clean, own, tuple(runs for far in step.far for _, runs in far.keys)


@lru_cache(maxsize=8192)
def _near_space(step: Step) -> KeySpace:
    in_shard = any(space is KeySpace.SHARD for space, _ in step.keys)
    return KeySpace.SHARD if in_shard else KeySpace.CLEAN


def _near(step: Step, spaces: Spaces) -> Any:
    """The clean buffer, or instead this rank's shard, as a step reads it, and the own one."""
    return _small().Keys(spaces[_near_space(step)], spaces[KeySpace.OWN])


@lru_cache(maxsize=8192)
def _small_stores(step: Step, in_any_order: bool) -> Any:
    """How results are put; those of clean keys race if nothing of theirs is to be overwritten."""
    clean, own, far = _small_runs(step)
    races = in_any_order and not any(x.store for x in (*clean, *far))
    return _small().Stores(
        rows=step.rows.store,
        clean=all(x.store for x in clean) and not races,
        own=all(x.store for x in own),
        direct=races or _apart(clean),
        races=races,
    )


def _apart(runs: tuple[Runs, ...]) -> bool:
    """Whether no two problems have the same rows, so that a kernel may add to them."""
    return all(len(x.rounds) == 1 and not x.pieces for x in runs)


@lru_cache(maxsize=256)
def _in_turn(
    steps: tuple[Step, ...], runs_small: bool, head_size: int, most_rows: int = 0
) -> tuple[tuple[Step, bool], ...]:
    """The steps in pieces of `most_rows` rows, and whether each is for the small-problem kernel.

    That kernel takes far ends along; else they are steps by themselves.
    """

    def is_small(step: Step) -> bool:
        return runs_small and _fits_small(step, head_size)

    apart = [(x,) if not x.far or is_small(x) else (x.alone, *x.far) for x in steps]
    pieces = [piece for some in apart for step in some for piece in in_pieces(step, most_rows)]
    return tuple((piece, is_small(piece)) for piece in pieces)


@lru_cache(maxsize=64)
def _rows_at_once(kernel: NativeKernel, head_size: int) -> int:
    """Most rows of an unmasked backward launch; 0: as many as there are."""
    return kernel.rows_at_once(head_size) if isinstance(kernel, PiecewiseKernel) else 0


@lru_cache(maxsize=8192)
def _fits_small(step: Step, head_size: int) -> bool:
    if any(x.joined or x.folded for x in (step, *step.far)):
        return False
    spaces = {space for x in (step, *step.far) for space, _ in x.keys} - {KeySpace.OWN}
    if len(spaces) > 1:  # the kernel reads one buffer beside the own one
        return False
    clean, own, far = _small_runs(step)
    keys, end = (sum(x.length for x in runs) for runs in ((*clean, *own), far))
    one_each = max(len(clean), len(own), len(far)) <= 1 and _apart((step.rows, *own))
    return one_each and _small().fits(step.rows.length, keys, end, head_size)


def _runs_small(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


@lru_cache(maxsize=1024)
def _lengths_on(step: RaggedStep, device: torch.device) -> Tensor:
    """Keys of each problem, int32 [X]."""
    return torch.tensor(step.lengths, dtype=torch.int32, device=device)


@lru_cache(maxsize=256)
def _shared(
    todo: Pass, kernel: NativeKernel, head_size: int, queries_per_key: int, small: bool
) -> Shared:
    """What a kernel can share; `small` if small problems have a kernel of theirs."""
    if isinstance(kernel, SharingKernel) and kernel.shares(head_size, queries_per_key):
        return share(todo, kernel.tiles(head_size), lambda x: small and _fits_small(x, head_size))
    return Shared((), (), todo)


@lru_cache(maxsize=8192)
def _small_problems(step: Step, device: torch.device) -> Any:
    """A step as the small-problem kernel takes it."""
    runs = _small_runs(step)
    absent = np.zeros_like(step.rows.starts)
    starts = np.stack([step.rows.starts, *(x[0].starts if x else absent for x in runs)])
    lengths = tuple(x[0].length if x else 0 for x in runs)
    on_device = torch.from_numpy(starts).to(device)
    return _small().Problems(on_device, step.rows.length, lengths, step.window)


def _clear_gaps(todo: Pass, grads: tuple[Tensor, Spaces]) -> None:
    """Zeroes the rows that no step of `todo` stores."""
    dq, spaces = grads
    for lo, hi in todo.row_gaps:
        dq[lo:hi].zero_()
    for space, gaps in todo.key_gaps.items():
        for lo, hi in gaps:
            for tensor in in_one(spaces[space]):
                tensor[lo:hi].zero_()
