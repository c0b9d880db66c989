"""Runs the launches of a backward pass that share accumulators.

Letters: T local rows, S key rows, Z samples, X problems, Q rows of a problem, N query heads, M
key/value heads, H head size.
Specified by tests/attention/test_sharing.py.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial as partial_call

import torch
from torch import Tensor

from megatron_bp.attention.contract import Saved
from megatron_bp.attention.lanes import Finish, Queue
from megatron_bp.attention.passes import read_rows
from megatron_bp.attention.problems import KeyValue, Problems, Spaces, add_pieces
from megatron_bp.attention.sharing import (
    KeyGroup,
    RowGroup,
    Shared,
    SharedBackward,
    SharedLaunch,
    SharedRows,
)


@dataclass(frozen=True)
class SharedRun:
    """A pass over local rows.

    `saved` holds q [T, Z, N, H], keys, and merged output and LSE; `grads` dq and key gradients,
    zero where no launch stores.
    """

    shared: Shared
    sums: SharedBackward
    queue: Queue
    dout: Tensor
    saved: tuple[Tensor, Spaces, tuple[Tensor, Tensor]]
    grads: tuple[Tensor, Spaces]

    def run(self) -> tuple[Tensor, ...]:
        """Runs everything.

        Returns rowsum(dout * out) [T, Z, N] if launches share all local rows, else nothing.
        """
        sums: list[Tensor] = []
        for group in self.shared.rows:
            rows, write = self._together(group) if not group.own else self._apart(group)
            if not group.own:
                sums.append(rows.row_sums().permute(2, 0, 1))
            self._launch(rows, group.launches)
            write()
        for i, keys in enumerate(self.shared.keys):
            self._write_keys(i, keys)
        return tuple(sums)

    def _launch(self, rows: SharedRows, launches: Iterable[SharedLaunch]) -> None:
        for launch in launches:
            pairs = launch.num_problems * launch.num_rows * launch.num_keys
            one = partial_call(_launch, rows, launch, self.saved[1][launch.space])
            self.queue.run(one, pairs)
        self.queue.drain()

    def _together(self, group: RowGroup) -> tuple[SharedRows, Callable[[], None]]:
        """Sums over all local rows, and what writes their query gradients."""
        q, _, (out, lse) = self.saved
        q, out, dout, dq = (x.transpose(0, 1) for x in (q, out, self.dout, self.grads[0]))
        local = Saved(q, q, q, out, lse.permute(1, 2, 0))
        rows = self.sums.rows(dout, local, group.tile, all_rows=True)
        return rows, partial_call(rows.write, dq)

    def _apart(self, group: RowGroup) -> tuple[SharedRows, Callable[[], None]]:
        """Sums over the rows of one step, and what writes their query gradients."""
        q, keys, (out, lse) = self.saved
        dq, at = self.grads[0], Problems(group.own[0], keys[0].k.shape[2])
        own_q = at.query(q)
        local = Saved(own_q, own_q, own_q, at.query(out), at.lse(lse))
        all_rows = own_q.shape[:2] == (q.shape[1], q.shape[0]) and not at.step.joined
        rows = self.sums.rows(at.query(self.dout), local, group.tile, all_rows=all_rows)

        def write() -> None:
            if at.kernel_may_write(q.shape[1]):
                rows.write(at.query(dq))
                return
            part = torch.empty(own_q.shape, dtype=q.dtype, device=q.device)
            rows.write(part)
            at.add_query(dq, part)

        return rows, write

    def _write_keys(self, number: int, group: KeyGroup) -> None:
        """Writes or adds a key group's gradients."""
        runs, into, dtype = group.runs, self.grads[1][group.space], self.saved[0].dtype
        if runs.store and runs.writable and into.k.dtype == dtype:
            self.sums.write_keys(number, read_rows(into.k, runs), read_rows(into.v, runs))
            return
        shape = (runs.num_problems, runs.length, *into.k.shape[1:])
        dk, dv = (torch.empty(shape, dtype=dtype, device=into.k.device) for _ in range(2))
        self.sums.write_keys(number, dk, dv)
        add_pieces(into, runs, dk, dv)


def _launch(rows: SharedRows, launch: SharedLaunch, keys: KeyValue) -> Finish:
    rows.launch(launch, *keys)
    return _nothing


def _nothing() -> None:
    pass
