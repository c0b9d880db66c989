"""Runs the launches of a backward pass that share accumulators, in two parts if some stay home.

The first part ends with the gradients of the clean buffer, which travel; the second one holds
launches at keys whose gradients do not, and ends with the query gradients of both. Letters: T local
rows, S key rows, Z samples, N query heads, M key/value heads, H head size.
Specified by tests/attention/test_sharing.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial as partial_call

from torch import Tensor

from megatron_bp.attention.lanes import Finish, Queue
from megatron_bp.attention.problems import KeyValue, Problems, Spaces
from megatron_bp.attention.sharing import Shared, SharedBackward, SharedLaunch, SharedRows


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

    def run(self, first_done: Callable[[], None]) -> Tensor:
        """Runs everything, and `first_done` as soon as the first part's gradients are written.

        Returns rowsum(dout * out) [T, Z, N].
        """
        (out, lse), shared = self.saved[2], self.shared
        row_sums = self.sums.prepare(
            self.dout.transpose(0, 1), out.transpose(0, 1), lse.permute(1, 2, 0)
        )
        first, last = shared.parts
        goes_on = {number for number, _ in last.rows}
        open_rows: dict[int, SharedRows] = {}
        for part in (first, last):
            for number, launches in part.rows:
                rows = open_rows.pop(number, None) or self._rows(number)
                self._launch(rows, launches)
                if part is first and number in goes_on:
                    open_rows[number] = rows
            for space, groups in part.keys:
                self.sums.write_keys(groups, self.grads[1][space])
            if part is first:
                first_done()
        self.sums.write_rows(self.grads[0])
        return row_sums.permute(2, 0, 1)

    def _rows(self, number: int) -> SharedRows:
        """Sums for a row group."""
        (q, keys, _), group = self.saved, self.shared.rows[number]
        if not group.own:
            return self.sums.rows(number, q.transpose(0, 1), self.dout.transpose(0, 1))
        at = Problems(group.own[0], keys[0].k.shape[2])
        return self.sums.rows(number, at.query(q), at.query(self.dout))

    def _launch(self, rows: SharedRows, launches: tuple[SharedLaunch, ...]) -> None:
        for launch in launches:
            pairs = launch.num_problems * launch.num_rows * launch.num_keys
            one = partial_call(_launch, rows, launch, self.saved[1][launch.space])
            self.queue.run(one, pairs)
        self.queue.drain()


def _launch(rows: SharedRows, launch: SharedLaunch, keys: KeyValue) -> Finish:
    rows.launch(launch, *keys)
    return _nothing


def _nothing() -> None:
    pass
