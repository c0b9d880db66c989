"""Moves packed clean keys and values between clean shards, and their gradients back to owners.

Owns the wires: what is sent when, and in which dtype. Knows no mask and no kernel. The layouts come
from layout/exchange.py. K and V travel in one packed buffer, rows first.
Letters: R local rows, S buffer rows, Z samples, M key/value heads, H head size, C shards.
Specified by tests/comm/test_clean_kv.py (adjointness, bytes, both exchanges).
"""

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_bp.comm.groups import BlockingGroup, Group
from megatron_bp.comm.wires import (
    GatherPart,
    Pending,
    ReducePart,
    Splits,
    start_exchange,
    start_gathers,
    start_reduces,
)
from megatron_bp.layout.exchange import Copy, Exchange, Slab, SlabExchange, WindowExchange


def pack(k_RZMH: Tensor, v_RZMH: Tensor, out_RZ2MH: Tensor) -> None:
    """Writes keys and values side by side into `out_RZ2MH`."""
    torch.stack((k_RZMH, v_RZMH), dim=2, out=out_RZ2MH)  # one kernel for both


PackRows = Callable[[Tensor, Tensor, tuple[Copy, ...], Tensor], None]
"""See `pack_rows`."""


def pack_rows(k_RZMH: Tensor, v_RZMH: Tensor, copies: tuple[Copy, ...], out_SZ2MH: Tensor) -> None:
    """Packs the rows of `copies` (local row -> buffer row), which do not overlap."""
    local, targets = _cuts(copies, len(k_RZMH), len(out_SZ2MH))
    runs = zip(local.of(k_RZMH), local.of(v_RZMH), targets.of(out_SZ2MH), strict=True)
    for k, v, place in runs:
        pack(k, v, place)


WritePart = Callable[[Tensor, int, tuple[Tensor, ...], tuple[Tensor, Tensor]], None]
"""See `write_part`."""


def write_part(
    part_RZ2MH: Tensor, row: int, own: tuple[Tensor, ...], into: tuple[Tensor, Tensor]
) -> None:
    """Writes reduced gradients of k and v to their rows of `into`, from row `row` on.

    What `own` has for the same rows is added. `into` and `own` are pairs [T, Z, M, H].
    """
    here = slice(row, row + len(part_RZ2MH))
    for i, (part, target) in enumerate(zip(part_RZ2MH.unbind(2), into, strict=True)):
        if own:
            torch.add(part, own[i][here], out=target[here])
        else:
            target[here].copy_(part)


class CleanGather:
    """The forward exchange of one layer: starts at construction, then `wait` a phase at a time.

    `buffer_SZ2MH` holds this rank's own rows at once, the rest as phases complete. Collectives are
    started in the order early slab, late slab on every rank; `together` they are one kernel, for
    groups over which both slabs come about at once. `pack_own` packs this rank's rows.

    Shapes: `k_RZMH`, `v_RZMH` begin with the local clean rows [num_clean, Z, M, H]; others may
    follow.
    """

    def __init__(
        self,
        k_RZMH: Tensor,
        v_RZMH: Tensor,
        exchange: Exchange,
        group: Group,
        *,
        together: bool = False,
        pack_own: PackRows = pack_rows,
    ) -> None:
        self.exchange = exchange
        shape = (exchange.num_buffer_rows, k_RZMH.shape[1], 2, *k_RZMH.shape[2:])
        self.buffer_SZ2MH = k_RZMH.new_empty(shape)
        # A row that nobody fills must not hold a NaN that a masked product would spread.
        for lo, hi in unfilled_rows(exchange):
            self.buffer_SZ2MH[lo:hi].zero_()
        pack_own(k_RZMH, v_RZMH, exchange.own, self.buffer_SZ2MH)
        self._pending: dict[int, Pending] = {}
        if exchange.num_shards == 1:
            return
        if isinstance(exchange, SlabExchange):
            slabs = [(n, x) for n, x in enumerate(exchange.slabs, start=1) if x.length]
            for some in [slabs] if together else [[one] for one in slabs]:
                parts = [self._part(slab, k_RZMH, v_RZMH) for _, slab in some]
                started = start_gathers(parts, group)
                self._pending |= zip((phase for phase, _ in some), started, strict=True)
        else:
            rows = _rows_on(exchange, k_RZMH.device).send
            sent = torch.stack([k_RZMH[rows], v_RZMH[rows]], dim=2)
            splits = Splits(exchange.send_counts, exchange.receive_counts)
            self._pending[1] = start_exchange(sent, splits, group)

    def _part(self, slab: Slab, k_RZMH: Tensor, v_RZMH: Tensor) -> GatherPart:
        """One slab's gather. What it sends is packed already if own rows are all of the share."""
        rows, in_place = self.exchange.num_shards * slab.length, slab.in_place_at >= 0
        if in_place:
            gathered = self.buffer_SZ2MH[slab.in_place_at : slab.in_place_at + rows]
        else:
            gathered = self.buffer_SZ2MH.new_empty((rows, *self.buffer_SZ2MH.shape[1:]))
        for source, target, length in self.exchange.own:
            if (source, length) == (slab.local_row, slab.length):
                return GatherPart(gathered, self.buffer_SZ2MH[target : target + length])
        mine = gathered[self.exchange.shard * slab.length :][: slab.length]
        local = slice(slab.local_row, slab.local_row + slab.length)
        pack(k_RZMH[local], v_RZMH[local], mine)
        return GatherPart(gathered, mine)

    def wait(self, phase: int) -> None:
        """Returns when every key that phases up to `phase` bring is in the buffer."""
        for key in sorted(p for p in self._pending if p <= phase):
            pending = self._pending.pop(key)
            pending.wait()
            if isinstance(self.exchange, WindowExchange):
                rows = _rows_on(self.exchange, pending.tensor.device).receive
                self.buffer_SZ2MH[rows] = pending.tensor
                continue
            copies = _others(self.exchange, key - 1)
            if copies:
                brought, at = _cuts(copies, len(pending.tensor), self.exchange.num_buffer_rows)
                torch._foreach_copy_(at.of(self.buffer_SZ2MH), brought.of(pending.tensor))


class CleanReduce:
    """The adjoint of `CleanGather`: each clean row's gradient is summed at its owner.

    Fill `grad_SZ2MH` (fp32, or fp64 for fp64), call `start` once no launch will add to it, then
    `finish`. With `zeroed=False` the caller promises to write every row.
    """

    def __init__(
        self,
        like: Tensor,
        exchange: Exchange,
        group: Group,
        wire_dtype: torch.dtype,
        *,
        zeroed: bool = True,
    ) -> None:
        self.exchange, self.group, self.wire_dtype = exchange, group, wire_dtype
        accumulate = torch.promote_types(like.dtype, torch.float32)
        self.grad_SZ2MH = torch.empty(
            (exchange.num_buffer_rows, *like.shape[1:]), dtype=accumulate, device=like.device
        )
        if zeroed:
            self.grad_SZ2MH.zero_()
        self._pending: list[Pending] = []
        self._summed: tuple[Tensor, ...] = ()  # what reduce-scatters fill, all local rows
        self._deferred = False

    def start(self) -> None:
        """Starts the reduce-scatter of both slabs (or the reverse all-to-all), as one kernel.

        Over a blocking group it starts in `finish`: to wait here for ranks whose launches take
        longer would cost what no schedule without overlap costs.
        """
        if isinstance(self.group, BlockingGroup):
            self._deferred = True
        else:
            self._start()

    def _start(self) -> None:
        exchange = self.exchange
        if exchange.num_shards == 1:
            return
        if isinstance(exchange, SlabExchange):
            lengths = [slab.length for slab in exchange.slabs]  # local rows, one after the other
            shape = (sum(lengths), *self.grad_SZ2MH.shape[1:])
            self._summed = (self.grad_SZ2MH.new_empty(shape, dtype=self.wire_dtype),)
            mine = zip(exchange.slabs, self._summed[0].split(lengths), strict=True)
            parts = [self._part(slab, rows) for slab, rows in mine if slab.length]
            self._pending += start_reduces(parts, self.group)
        else:
            rows = _rows_on(exchange, self.grad_SZ2MH.device).receive
            sent = self.grad_SZ2MH[rows].to(self.wire_dtype)
            splits = Splits(exchange.receive_counts, exchange.send_counts)
            self._pending.append(start_exchange(sent, splits, self.group))

    def _part(self, slab: Slab, mine: Tensor) -> ReducePart:
        rows = self.exchange.num_shards * slab.length
        if slab.in_place_at >= 0:
            whole = self.grad_SZ2MH[slab.in_place_at : slab.in_place_at + rows].to(self.wire_dtype)
        else:
            whole = self.grad_SZ2MH.new_empty(
                (rows, *self.grad_SZ2MH.shape[1:]), dtype=self.wire_dtype
            )
            sent, summed = _cuts(slab.copies, rows, self.exchange.num_buffer_rows)
            for gap in sent.gaps_of(whole):
                gap.zero_()
            torch._foreach_copy_(sent.of(whole), summed.of(self.grad_SZ2MH))
        return ReducePart(mine, whole)

    def finish(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """Gradients of the local clean rows, once every started collective is done.

        Shapes: two tensors [num_rows, Z, M, H] in the accumulation dtype; padding rows get 0.
        """
        grad = self.grad_SZ2MH
        local = grad.new_empty((num_rows, *grad.shape[1:]))
        self.finish_into(local[:, :, 0], local[:, :, 1])
        return local[:, :, 0], local[:, :, 1]

    def finish_into(
        self,
        dk_RZMH: Tensor,
        dv_RZMH: Tensor,
        own: tuple[Tensor, ...] = (),
        write: WritePart = write_part,
    ) -> None:
        """Like `finish`, written to tensors of any dtype by `write`.

        `own` are gradients [num_rows, Z, M, H] of k and v that did not travel, added on the way.
        """
        if self._deferred:
            self._start()
            self._deferred = False
        parts: list[tuple[int, Tensor]] = []
        exchange = self.exchange
        if exchange.num_shards == 1 or isinstance(exchange, WindowExchange):
            mine = [self.grad_SZ2MH[x.target : x.target + x.length] for x in exchange.own]
            parts += [(copy.source, part) for copy, part in zip(exchange.own, mine, strict=True)]
        for pending in self._pending:
            pending.wait()
            if isinstance(exchange, WindowExchange):
                self._add_received(exchange, pending.tensor)
        self._pending.clear()
        parts += [(0, summed) for summed in self._summed]
        self._summed = ()
        for lo, hi in _gaps(((row, len(part)) for row, part in parts), len(dk_RZMH)):
            dk_RZMH[lo:hi].zero_()
            dv_RZMH[lo:hi].zero_()
        for row, part in parts:
            write(part, row, own, (dk_RZMH, dv_RZMH))

    def _add_received(self, exchange: WindowExchange, received: Tensor) -> None:
        """Adds what peers sent to this rank's own rows of the buffer."""
        index = _rows_on(exchange, received.device)
        # Peer by peer: a row may come from several, and this way the sum has a fixed order.
        for rows, part in zip(index.own, received.split(exchange.send_counts), strict=True):
            if len(rows):
                self.grad_SZ2MH.index_add_(0, rows, part.to(self.grad_SZ2MH.dtype))


class _Cut(NamedTuple):
    """Runs of rows as pieces of all rows, which are made in one go: sizes, and which are runs."""

    sizes: tuple[int, ...]
    which: tuple[int, ...]

    def of(self, x: Tensor) -> list[Tensor]:
        """The runs, in the order given."""
        pieces = x.split_with_sizes(self.sizes)
        return [pieces[i] for i in self.which]

    def gaps_of(self, x: Tensor) -> list[Tensor]:
        """What lies between them."""
        if len(self.which) == len(self.sizes):
            return []
        pieces = x.split_with_sizes(self.sizes)
        return [piece for i, piece in enumerate(pieces) if i not in self.which]


@lru_cache(maxsize=1024)
def _cuts(copies: tuple[Copy, ...], num_sources: int, num_targets: int) -> tuple[_Cut, _Cut]:
    """Source rows and target rows of copies; neither overlap."""
    sources = _cut([(x.source, x.length) for x in copies], num_sources)
    return sources, _cut([(x.target, x.length) for x in copies], num_targets)


def _cut(runs: list[tuple[int, int]], num_rows: int) -> _Cut:
    pieces = sorted([*runs, *((lo, hi - lo) for lo, hi in _gaps(runs, num_rows))])
    return _Cut(tuple(length for _, length in pieces), tuple(pieces.index(x) for x in runs))


@lru_cache(maxsize=64)
def _others(exchange: SlabExchange, number: int) -> tuple[Copy, ...]:
    """The copies of a slab that bring rows of other ranks; this rank's own lie there already."""
    own = {copy.target for copy in exchange.own}
    return tuple(x for x in exchange.slabs[number].copies if x.target not in own)


@lru_cache(maxsize=64)
def unfilled_rows(exchange: Exchange) -> list[tuple[int, int]]:
    """Buffer rows [lo, hi) that neither this rank nor a peer fills."""
    filled = [(copy.target, copy.length) for copy in exchange.own]
    if isinstance(exchange, WindowExchange):
        return []  # every row of its buffer is an own row or a received one
    if exchange.num_shards > 1:
        for slab in exchange.slabs:
            if slab.in_place_at >= 0:
                filled.append((slab.in_place_at, exchange.num_shards * slab.length))
            filled += [(copy.target, copy.length) for copy in slab.copies]
    return _gaps(filled, exchange.num_buffer_rows)


def _gaps(covered: Iterable[tuple[int, int]], num_rows: int) -> list[tuple[int, int]]:
    """The rows [lo, hi) of [0, num_rows) that no (start, length) covers."""
    gaps, at = [], 0
    for start, length in sorted(covered):
        if start > at:
            gaps.append((at, start))
        at = max(at, start + length)
    return [*gaps, (at, num_rows)] if at < num_rows else gaps


class _WindowRows(NamedTuple):
    """Row numbers of a windowed exchange on a device, copied there once."""

    send: Tensor
    receive: Tensor
    own: tuple[Tensor, ...]  # buffer rows of `send`, one tensor a destination


@lru_cache(maxsize=64)
def _rows_on(exchange: WindowExchange, device: torch.device) -> _WindowRows:
    last = max((copy.source + copy.length for copy in exchange.own), default=0)
    buffer_row = np.zeros(last, dtype=np.int64)
    for source, target, length in exchange.own:
        buffer_row[source : source + length] = target + np.arange(length)
    send = torch.from_numpy(exchange.send_rows).to(device)
    own = torch.from_numpy(buffer_row[exchange.send_rows]).to(device)
    receive = torch.from_numpy(exchange.receive_rows).to(device)
    return _WindowRows(send, receive, own.split(exchange.send_counts))
