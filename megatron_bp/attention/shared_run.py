"""Runs the launches of a backward pass that share accumulators, in two parts if some stay home.

The first part ends with the gradients of the clean buffer, which travel; the second one holds
launches at keys whose gradients do not. Letters: T local rows, S key rows, Z samples, X problems,
Q rows of a problem, N query heads, M key/value heads, H head size.
Specified by tests/attention/test_sharing.py.
"""

from collections.abc import Callable, Iterator
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

    def run(self, first_done: Callable[[], None]) -> tuple[Tensor, ...]:
        """Runs everything, and `first_done` as soon as the first part's gradients are written.

        Returns rowsum(dout * out) [T, Z, N] if launches share all local rows, else nothing.
        """
        sums: list[Tensor] = []
        parts = [self._rows(group, sums) for group in self.shared.rows]
        for is_first in (True, False):
            for part in parts:
                next(part, None)
            for i, group in enumerate(self.shared.keys):
                if self.shared.ends_first(group.space) is is_first:
                    self._write_keys(i, group)
            if is_first:
                first_done()
        return tuple(sums)

    def _rows(self, group: RowGroup, sums: list[Tensor]) -> Iterator[None]:
        """A row group's launches and query gradients; yields where its second part begins.

        Row sums of a group over all local rows go to `sums`.
        """
        first = [x for x in group.launches if self.shared.ends_first(x.space)]
        last = [x for x in group.launches if not self.shared.ends_first(x.space)]
        if not first:
            yield
        rows, write = self._together(group) if not group.own else self._apart(group)
        if not group.own:
            sums.append(rows.row_sums().permute(2, 0, 1))
        self._launch(rows, first)
        if first and last:
            yield
        self._launch(rows, last)
        write()

    def _launch(self, rows: SharedRows, launches: list[SharedLaunch]) -> None:
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

        def write() -> None:
            if group.store:
                rows.write(dq)
                return
            part = torch.empty_like(dq)
            rows.write(part)
            dq.add_(part)

        return rows, write

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
