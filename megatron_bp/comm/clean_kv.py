"""Moves packed clean keys and values between clean shards, and their gradients back to owners.

Owns the wires: what is sent when, and in which dtype. Knows no mask and no kernel. The layouts come
from layout/exchange.py. K and V travel in one packed buffer, rows first.
Letters: R local rows, S buffer rows, Z samples, M key/value heads, H head size, C shards.
Specified by tests/comm/test_clean_kv.py (adjointness, bytes, both exchanges).
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bp.comm.groups import Group, LocalGroup
from megatron_bp.layout.exchange import Exchange, Slab, SlabExchange, WindowExchange


def wire_group(group: Group) -> dist.ProcessGroup:
    """The process group to communicate over.

    Raises: ValueError if this process is alone but the layout wants peers.
    """
    if isinstance(group, LocalGroup):
        raise ValueError(
            "the plan shares the sample over several ranks but this process has no group; "
            "pass BlockGroups with process groups, or plan for num_ranks=1."
        )
    return group


def pack(k_RZMH: Tensor, v_RZMH: Tensor, out_RZ2MH: Tensor) -> None:
    """Writes keys and values side by side into `out_RZ2MH`."""
    out_RZ2MH[:, :, 0].copy_(k_RZMH)
    out_RZ2MH[:, :, 1].copy_(v_RZMH)


@dataclass(frozen=True)
class _Pending:
    """A collective in flight and the tensor it fills."""

    work: dist.Work | None
    tensor: Tensor

    def wait(self) -> None:
        """Returns when `tensor` may be read by the current stream."""
        if self.work is not None:
            self.work.wait()


class CleanGather:
    """The forward exchange of one layer: starts at construction, then `wait` a phase at a time.

    `buffer_SZ2MH` holds this rank's own rows at once, the rest as phases complete. Collectives are
    started in the order early slab, late slab on every rank.

    Shapes: `k_RZMH`, `v_RZMH` are the local clean rows [num_clean, Z, M, H].
    """

    def __init__(self, k_RZMH: Tensor, v_RZMH: Tensor, exchange: Exchange, group: Group) -> None:
        self.exchange = exchange
        shape = (exchange.num_buffer_rows, k_RZMH.shape[1], 2, *k_RZMH.shape[2:])
        # Zeros: a row that no peer fills must not hold a NaN that a masked product would spread.
        self.buffer_SZ2MH = k_RZMH.new_zeros(shape)
        for source, target, length in exchange.own:
            pack(
                k_RZMH[source : source + length],
                v_RZMH[source : source + length],
                self.buffer_SZ2MH[target : target + length],
            )
        self._pending: dict[int, _Pending] = {}
        if exchange.num_shards == 1:
            return
        wire = wire_group(group)
        if isinstance(exchange, SlabExchange):
            for phase, slab in enumerate(exchange.slabs, start=1):
                if slab.length:
                    self._pending[phase] = self._start_slab(slab, k_RZMH, v_RZMH, wire)
        else:
            self._pending[1] = self._start_window(exchange, k_RZMH, v_RZMH, wire)

    def _start_slab(
        self, slab: Slab, k_RZMH: Tensor, v_RZMH: Tensor, wire: dist.ProcessGroup
    ) -> _Pending:
        rows = self.exchange.num_shards * slab.length
        if slab.in_place_at >= 0:
            gathered = self.buffer_SZ2MH[slab.in_place_at : slab.in_place_at + rows]
        else:
            gathered = self.buffer_SZ2MH.new_empty((rows, *self.buffer_SZ2MH.shape[1:]))
        mine = gathered[self.exchange.shard * slab.length :][: slab.length]
        local = slice(slab.local_row, slab.local_row + slab.length)
        pack(k_RZMH[local], v_RZMH[local], mine)
        work = dist.all_gather_into_tensor(gathered, mine, group=wire, async_op=True)
        return _Pending(work, gathered)

    def _start_window(
        self, exchange: WindowExchange, k_RZMH: Tensor, v_RZMH: Tensor, wire: dist.ProcessGroup
    ) -> _Pending:
        rows = _index(exchange.send_rows, k_RZMH)
        sent = torch.stack([k_RZMH[rows], v_RZMH[rows]], dim=2)
        received = sent.new_empty((sum(exchange.receive_counts), *sent.shape[1:]))
        work = dist.all_to_all_single(
            received,
            sent,
            list(exchange.receive_counts),
            list(exchange.send_counts),
            group=wire,
            async_op=True,
        )
        return _Pending(work, received)

    def wait(self, phase: int) -> None:
        """Returns when every key that phases up to `phase` bring is in the buffer."""
        for key in sorted(p for p in self._pending if p <= phase):
            pending = self._pending.pop(key)
            pending.wait()
            if isinstance(self.exchange, WindowExchange):
                rows = _index(self.exchange.receive_rows, pending.tensor)
                self.buffer_SZ2MH[rows] = pending.tensor
                continue
            for source, target, length in self.exchange.slabs[key - 1].copies:
                self.buffer_SZ2MH[target : target + length].copy_(
                    pending.tensor[source : source + length]
                )


class CleanReduce:
    """The adjoint of `CleanGather`: each clean row's gradient is summed at its owner.

    Fill `grad_SZ2MH` (fp32, or fp64 for fp64), call `start(phase)` once no launch will add to the
    rows of that phase's slab (late slab first), then `finish`.
    """

    def __init__(
        self, like: Tensor, exchange: Exchange, group: Group, wire_dtype: torch.dtype
    ) -> None:
        self.exchange, self.group, self.wire_dtype = exchange, group, wire_dtype
        accumulate = torch.promote_types(like.dtype, torch.float32)
        self.grad_SZ2MH = torch.zeros(
            (exchange.num_buffer_rows, *like.shape[1:]), dtype=accumulate, device=like.device
        )
        self._pending: dict[int, _Pending] = {}

    def start(self, phase: int) -> None:
        """Starts the reduce-scatter (or the reverse all-to-all) of the slab of `phase`, once."""
        exchange = self.exchange
        if exchange.num_shards == 1:
            return
        wire = wire_group(self.group)
        if isinstance(exchange, SlabExchange):
            slab = exchange.slabs[phase - 1]
            if slab.length:
                self._pending[phase] = self._start_slab(slab, wire)
        elif phase == 1:
            rows = _index(exchange.receive_rows, self.grad_SZ2MH)
            sent = self.grad_SZ2MH[rows].to(self.wire_dtype)
            received = sent.new_empty((sum(exchange.send_counts), *sent.shape[1:]))
            work = dist.all_to_all_single(
                received,
                sent,
                list(exchange.send_counts),
                list(exchange.receive_counts),
                group=wire,
                async_op=True,
            )
            self._pending[phase] = _Pending(work, received)

    def _start_slab(self, slab: Slab, wire: dist.ProcessGroup) -> _Pending:
        rows = self.exchange.num_shards * slab.length
        if slab.in_place_at >= 0:
            whole = self.grad_SZ2MH[slab.in_place_at : slab.in_place_at + rows].to(self.wire_dtype)
        else:
            whole = self.grad_SZ2MH.new_zeros(
                (rows, *self.grad_SZ2MH.shape[1:]), dtype=self.wire_dtype
            )
            for source, target, length in slab.copies:
                whole[source : source + length].copy_(self.grad_SZ2MH[target : target + length])
        mine = whole.new_empty((slab.length, *whole.shape[1:]))
        work = dist.reduce_scatter_tensor(mine, whole, group=wire, async_op=True)
        return _Pending(work, mine)

    def finish(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """Gradients of the local clean rows, once every started collective is done.

        Shapes: two tensors [num_rows, Z, M, H] in the accumulation dtype; padding rows get 0.
        """
        grad = self.grad_SZ2MH
        local = grad.new_zeros((num_rows, *grad.shape[1:]))
        exchange = self.exchange
        if exchange.num_shards == 1 or isinstance(exchange, WindowExchange):
            for source, target, length in exchange.own:
                local[source : source + length] = grad[target : target + length]
        for phase, pending in self._pending.items():
            pending.wait()
            if isinstance(exchange, WindowExchange):
                rows = _index(exchange.send_rows, local)
                local.index_add_(0, rows, pending.tensor.to(local.dtype))
            else:
                slab = exchange.slabs[phase - 1]
                local[slab.local_row : slab.local_row + slab.length] = pending.tensor
        self._pending.clear()
        return local[:, :, 0], local[:, :, 1]


def _index(rows: "np.ndarray", like: Tensor) -> Tensor:
    return torch.from_numpy(rows).to(like.device)
