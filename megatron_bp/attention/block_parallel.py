"""Context-sharded block-parallel attention: one autograd function for all modes and kernels.

Owns the order of things: local launches run while the early slab travels, launches on the early
slab while the late one does; backward reduces both slabs when nothing adds to them any more, and
meanwhile runs the launches whose key gradients stay on this rank. Knows no mask (layout/), no wire
format (comm/) and no kernel.
Letters: T local rows, Z samples, N query heads, M key/value heads, H head size, S key rows.
Specified by tests/attention/test_block_parallel.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from megatron_bp.attention.choose import AttentionKernel, choose_kernel
from megatron_bp.attention.contract import (
    IntervalKernel,
    KernelNeed,
    NativeKernel,
    Strategy,
    forward_heads,
    lse_dtype,
)
from megatron_bp.attention.interval import IntervalRun, interval_mask
from megatron_bp.attention.keeping import ALONE, Slot
from megatron_bp.attention.lanes import queue_on
from megatron_bp.attention.native import NativeRun, Partial, empty_partial
from megatron_bp.attention.own_last import own_last
from megatron_bp.attention.passes import pack_rows, write_part
from megatron_bp.attention.problems import KeyValue, Spaces
from megatron_bp.attention.ragged import RaggedKernel, RaggedStep, together
from megatron_bp.attention.schedule import Pass, make_schedule
from megatron_bp.comm.clean_kv import CleanGather, CleanReduce
from megatron_bp.comm.groups import BlockGroups
from megatron_bp.comm.wires import reduces_at_once
from megatron_bp.layout.decomposition import KeySpace, Phase
from megatron_bp.layout.plan import RankPlan


class GradWire(StrEnum):
    """Dtype in which clean-K/V gradients travel; they are always accumulated in fp32 or fp64."""

    FP32 = "fp32"  # fp32 (fp64 in fp64 runs): the sum over ranks is as exact as on one rank
    MODEL = "model"  # the dtype of K and V: half the bytes for bf16


@dataclass(frozen=True)
class AttentionOptions:
    """How a layer computes. `corrupted_only` skips clean queries (a pruned last layer).

    With `own_last` backward starts the reduction before the launches at this rank's own clean keys,
    where one can run beside it (docs/bench/nccl.md has it both ways).
    """

    softmax_scale: float
    strategy: Strategy = Strategy.NATIVE
    kernel: str = "auto"
    grad_wire: GradWire = GradWire.FP32
    corrupted_only: bool = False
    deterministic: bool = False
    own_last: bool = True


def block_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: RankPlan,
    groups: BlockGroups,
    options: AttentionOptions,
    slot: Slot = ALONE,
) -> Tensor:
    """Attention of this rank's rows over the whole sample, exact in value and gradient.

    Shapes: q [T, Z, N, H], k and v [T, Z, M, H] in `plan.rows` order; the result is like q, or
    [T - num_clean, Z, N, H] with `corrupted_only`. Padding rows give 0. `slot` is the layer's place
    among what its micro-batch keeps for backward and for a second run of the layer.
    Raises: ValueError if shapes do not fit the plan, the groups do not fit the plan, or no kernel
    can serve.
    Source: Context-sharded block parallelism; decomposition and merge as in DESIGN.md.
    """
    _check_groups(plan, groups)
    beside = reduces_at_once(groups.clean_shards)
    shapes = (q.shape, k.shape, v.shape)
    layer = _layer(_Kind(plan, options, shapes, q.dtype, q.device, groups.near, beside))
    call = _Call(layer, groups, slot)
    if slot.is_first_run:
        partial, keys = _attend(q, k, v, call)
        slot.keeper.put(slot.layer, tuple(partial), keys)
        return partial.out
    return cast(Tensor, _BlockParallelAttention.apply(q, k, v, call))


def _check_groups(plan: RankPlan, groups: BlockGroups) -> None:
    request = plan.request
    want = (request.num_ranks, request.num_clean_shards, plan.rank)
    have = (groups.num_ranks, groups.num_clean_shards, groups.rank)
    if want != have:
        raise ValueError(
            f"the plan is for (ranks, clean shards, rank) = {want} but the groups are {have}."
        )


def _check_shapes(q: torch.Size, k: torch.Size, v: torch.Size, rows: int) -> None:
    if not (q[0] == k[0] == v[0] == rows and k == v):
        raise ValueError(
            f"q {tuple(q)}, k {tuple(k)}, v {tuple(v)} must have the plan's {rows} rows first, and "
            "k and v the same shape."
        )
    if q[1] != k[1] or q[3] != k[3] or q[2] % k[2]:
        raise ValueError(
            f"q {tuple(q)} and k {tuple(k)} must agree in samples and head size, and the query "
            "heads be a multiple of the key heads."
        )


class _Kind(NamedTuple):
    """What decides how a layer runs: the same in every step. `shapes` are those of q, k and v.

    `near`: see BlockGroups; `beside`: whether launches can run beside a reduction.
    """

    plan: RankPlan
    options: AttentionOptions
    shapes: tuple[torch.Size, torch.Size, torch.Size]
    dtype: torch.dtype
    device: torch.device
    near: bool
    beside: bool


@dataclass(frozen=True, eq=False)
class _Layer:
    """How layers of a kind run. `wire` is the dtype in which their key gradients travel."""

    plan: RankPlan
    options: AttentionOptions
    kernel: AttentionKernel
    first_row: int
    forward: Pass
    ragged: tuple[RaggedStep, ...]
    backward: Pass
    wire: torch.dtype

    @cached_property
    def native(self) -> NativeRun:
        """For the native strategy."""
        kernel, beside = cast(NativeKernel, self.kernel), self.plan.request.window > 0
        return NativeRun(kernel, self.options.softmax_scale, beside)

    def interval(self, device: torch.device) -> IntervalRun:
        """For the interval strategy."""
        mask = interval_mask(self.plan, self.first_row, device)
        return IntervalRun(cast(IntervalKernel, self.kernel), self.options.softmax_scale, mask)


@lru_cache(maxsize=64)
def _layer(kind: _Kind) -> _Layer:
    """Chooses a kernel, and the passes that suit it.

    Raises: ValueError as block_parallel_attention does.
    """
    plan, options, shapes, dtype, device, near, beside = kind
    _check_shapes(*shapes, plan.rows.num_rows)
    arch = 0
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = 10 * major + minor
    need = KernelNeed(
        strategy=options.strategy,
        device=device.type,
        dtype=dtype,
        head_size=shapes[0][-1],
        window=any(x.left >= 0 for x in plan.launches),
        deterministic=options.deterministic,
        arch=arch,
        sliding=plan.request.window > 0,
    )
    kernel = choose_kernel(options.kernel, need)
    heads = forward_heads(kernel.caps, *shapes[:2])
    schedule = make_schedule(plan, options.corrupted_only, kernel.caps.cut, heads)
    forward = schedule.forward
    ragged: tuple[RaggedStep, ...] = ()
    # Launches over both slabs' keys are one where the slabs come about together.
    if near and isinstance(kernel, RaggedKernel):
        forward, ragged = together(forward)
    wire = dtype if options.grad_wire is GradWire.MODEL else lse_dtype(dtype)
    last = options.own_last and beside
    backward = own_last(plan, schedule.backward) if last else schedule.backward
    return _Layer(plan, options, kernel, schedule.first_row, forward, ragged, backward, wire)


@dataclass(frozen=True)
class _Call:
    """One call of a layer."""

    layer: _Layer
    groups: BlockGroups
    slot: Slot

    @property
    def plan(self) -> RankPlan:
        return self.layer.plan


class _BlockParallelAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: _Call) -> Tensor:
        keeper, kept = call.slot.keeper, call.slot.keeper.take(call.slot.layer)
        if kept.results:  # the second run of this layer computes nothing
            partial = Partial(kept.results[0].detach(), kept.results[1])
            keys = kept.keys
            if not keys:  # on its way while the rest of the layer runs again
                ctx.gather = _start_gather(k, v, call)
        else:
            partial, keys = _attend(q, k, v, call)
            if not keeper.keeping.clean_kv and not kept.again:
                keys = ()
                keeper.line_up(ctx)
        ctx.call = call
        ctx.save_for_backward(q, k, v, *partial, *keys)
        return partial.out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        dout = grad_outputs[0].contiguous()
        call: _Call = ctx.call
        layer, clean = call.layer, call.plan.rows.num_clean
        q, k, v, out, lse, *kept = ctx.saved_tensors
        todo, first_row = layer.backward, layer.first_row
        is_native = layer.options.strategy is Strategy.NATIVE
        is_apart = is_native and KeySpace.SHARD in todo.num_keys
        packed, own = _keys_again(ctx, k, v, kept)
        shards = call.groups.clean_shards
        reduce = CleanReduce(packed, call.plan.exchange, shards, layer.wire, zeroed=False)
        dpacked = reduce.grad_SZ2MH
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        if first_row:
            dq[:first_row].zero_()
        (dk_clean, dk_own), (dv_clean, dv_own) = (x.tensor_split((clean,)) for x in (dk, dv))
        down = _own_grad_buffers(own.k, (dk_own, dv_own), call)
        keys: Spaces = (_split(packed), own)
        sums: Spaces = (_split(dpacked), down)
        shard: tuple[Tensor, ...] = ()
        if is_apart:
            size = (clean, *dpacked.shape[1:2], *dpacked.shape[3:])
            shard = dpacked.new_empty(size), dpacked.new_empty(size)
            keys, sums = (*keys, _alike(k[:clean], v[:clean])), (*sums, KeyValue(*shard))
        rows, drows = (x[first_row:] if first_row else x for x in (q, dq))
        saved, grads = (rows, keys, Partial(out, lse)), (drows, sums)
        # Not the late slab by itself: the rank with the last chunk computes on it until nearly the
        # end, and meanwhile a waiting reduction would take multiprocessors from the other ranks'
        # launches (docs/bench/nccl.md).
        if is_native:
            run = layer.native
            rest = run.begin_backward(todo, dout, saved, grads, reduce.start)
            remote = (*rest.steps[Phase.LATE], *rest.steps[Phase.EARLY])
            if remote:
                run.backward(remote, dout, saved, grads, rest.row_sums)
                reduce.start()
            run.backward(rest.steps[Phase.LOCAL], dout, saved, grads, rest.row_sums)
        else:
            layer.interval(q.device).backward(dout, saved, grads)
            reduce.start()
        _reduce_own_grads(down, (dk_own, dv_own), call)
        reduce.finish_into(dk_clean, dv_clean, shard, write_part)
        return dq, dk, dv, None


def _attend(q: Tensor, k: Tensor, v: Tensor, call: _Call) -> tuple[Partial, tuple[Tensor, ...]]:
    """The layer's output and LSE, and the key buffers that were gathered for it."""
    gather, corrupted = _start_gather(k, v, call), _start_own_gathers(k, v, call)
    layer = call.layer
    # Detached here, not launch by launch: compiled kernels refuse tensors that need gradients.
    clean, rows = _split(gather.buffer_SZ2MH), q.detach()
    if layer.first_row:
        rows = rows[layer.first_row :]
    if layer.options.strategy is Strategy.INTERVAL:
        gather.wait(Phase.LATE)
        own = _own_keys(k, v, call, corrupted)
        partial = layer.interval(q.device).forward(rows, (clean, own))
    else:
        run, todo = layer.native, layer.forward
        partial, queue = empty_partial(rows, todo), queue_on(q.device, run.beside)
        own = clean if corrupted else _own_keys(k, v, call, corrupted)
        for phase in Phase:
            gather.wait(phase)
            if corrupted and phase is Phase.LATE:  # no launch before reads gathered own keys
                own = _own_keys(k, v, call, corrupted)
            run.forward(todo.steps[phase], rows, (clean, own), partial, queue)
        run.forward_ragged(layer.ragged, rows, (clean, own), partial, queue)
        queue.drain()
    gathered = tuple(own) if call.plan.request.gather_corrupted else ()
    return partial, (gather.buffer_SZ2MH, *gathered)


def _start_gather(k: Tensor, v: Tensor, call: _Call) -> CleanGather:
    exchange, shards, near = call.plan.exchange, call.groups.clean_shards, call.groups.near
    return CleanGather(k, v, exchange, shards, together=near, pack_own=pack_rows)


def _split(packed_SZ2MH: Tensor) -> KeyValue:
    return KeyValue(*packed_SZ2MH.unbind(2))


def _keys_again(ctx: Any, k: Tensor, v: Tensor, kept: list[Tensor]) -> tuple[Tensor, KeyValue]:
    """The key buffers for backward: kept ones, or gathered again; then the layer below gathers.

    Every rank does this in the same order: it depends on nothing but what the layers keep.
    """
    call: _Call = ctx.call
    if kept:
        packed, *gathered = kept
        return packed, KeyValue(*gathered) if gathered else _own_keys(k, v, call, ())
    gather = getattr(ctx, "gather", None) or _start_gather(k, v, call)
    ctx.gather, corrupted = None, _start_own_gathers(k, v, call)
    gather.wait(Phase.LATE)
    for below in call.slot.keeper.next_after(ctx):
        k_below, v_below = below.saved_tensors[1:3]
        below.gather = _start_gather(k_below, v_below, below.call)
    return gather.buffer_SZ2MH, _own_keys(k, v, call, corrupted)


def _views(x: Tensor, call: _Call) -> tuple[Tensor, ...]:
    """The local corrupted rows of each view, without trailing padding rows."""
    views = call.plan.request.num_views
    rows = sum(call.plan.owners.corrupted.slab_lengths)
    return x[: views * rows].unflatten(0, (views, rows)).unbind(0)


def _start_own_gathers(k: Tensor, v: Tensor, call: _Call) -> tuple[CleanGather, ...]:
    """Gathers of corrupted keys, one for each view, in the context-parallel baseline; else none."""
    if not call.plan.request.gather_corrupted:
        return ()
    clean = call.plan.rows.num_clean
    views = zip(_views(k[clean:], call), _views(v[clean:], call), strict=True)
    exchange, group, near = call.plan.own_exchange, call.groups.context, call.groups.near
    return tuple(CleanGather(*view, exchange, group, together=near) for view in views)


def _own_keys(k: Tensor, v: Tensor, call: _Call, gathers: Sequence[CleanGather]) -> KeyValue:
    """Corrupted keys: what `gathers` bring, or else the local ones."""
    if not gathers:
        own = (x[call.plan.rows.num_clean :] for x in (k, v))
        return KeyValue(*(x if x.stride(-1) == 1 else x.contiguous() for x in own))
    for gather in gathers:
        gather.wait(Phase.LATE)
    buffers = [gather.buffer_SZ2MH for gather in gathers]
    return _split(torch.cat(buffers) if len(buffers) > 1 else buffers[0])


def _alike(k: Tensor, v: Tensor) -> KeyValue:
    """Keys and values with the same strides."""
    alike = k.stride() == v.stride() and k.stride(-1) == 1
    return KeyValue(k, v) if alike else KeyValue(k.contiguous(), v.contiguous())


def _own_grad_buffers(own_k: Tensor, local: tuple[Tensor, Tensor], call: _Call) -> KeyValue:
    """Where gradients of corrupted keys go: to their rows, or (baseline) to a wide buffer."""
    if not call.plan.request.gather_corrupted:
        return KeyValue(*local)
    wide = lse_dtype(own_k.dtype)
    return KeyValue(torch.empty_like(own_k, dtype=wide), torch.empty_like(own_k, dtype=wide))


def _reduce_own_grads(down: KeyValue, local: tuple[Tensor, Tensor], call: _Call) -> None:
    """Sums the gradients of all ranks' corrupted rows at their owners (the baseline).

    All views travel at once, after the last launch: the launches at corrupted keys run last.
    """
    if not call.plan.request.gather_corrupted:
        return
    exchange, group = call.plan.own_exchange, call.groups.context
    reduces = []
    for grad in torch.stack([down.k, down.v], dim=2).chunk(call.plan.request.num_views):
        reduce = CleanReduce(grad, exchange, group, call.layer.wire, zeroed=False)
        reduce.grad_SZ2MH.copy_(grad)
        reduce.start()
        reduces.append(reduce)
    for part in local:
        part.zero_()
    targets = zip(*(_views(part, call) for part in local), strict=True)
    for reduce, (dk_view, dv_view) in zip(reduces, targets, strict=True):
        reduce.finish_into(dk_view, dv_view)
