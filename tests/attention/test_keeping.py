"""What layers keep changes no bit of a result; collectives, launches and bytes are as predicted."""

import gc
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch

from megatron_bp.attention.block_parallel import AttentionOptions, block_parallel_attention
from megatron_bp.attention.contract import Strategy
from megatron_bp.attention.keeping import Keeper, Keeping, Slot, kept_bytes
from megatron_bp.attention.native import NativeRun
from megatron_bp.comm.clean_kv import CleanGather, CleanReduce
from megatron_bp.comm.groups import BlockGroups
from megatron_bp.layout.cost import LayerShape
from megatron_bp.layout.plan import PlanRequest, RankPlan, make_plan
from tests.attention.test_block_parallel import (
    HEADS,
    KV_HEADS,
    SIZE,
    local,
    make_groups,
    sample_tensors,
)
from tests.distributed import run_distributed

NUM_LAYERS = 3
MODES = {
    "single": PlanRequest(64, 4),
    "csbp": PlanRequest(64, 4, num_ranks=2, num_clean_shards=2, row_multiple=2),
    "ragged": PlanRequest(61, 4, num_ranks=2, num_clean_shards=2, num_views=2),
    "pure": PlanRequest(64, 4, num_ranks=2),
    "window": PlanRequest(64, 4, num_ranks=2, num_clean_shards=2, window=7),
    "baseline": PlanRequest(64, 4, num_ranks=2, num_clean_shards=2, gather_corrupted=True),
}
KEEPINGS = [Keeping(a, k) for a, k in itertools.product((False, True), repeat=2)]


class Stack:
    """Some attention layers on top of one another, each run once or twice as under recompute."""

    def __init__(self, plan: RankPlan, groups: BlockGroups, options: AttentionOptions) -> None:
        self.plan, self.groups, self.options = plan, groups, options
        self.scales = [torch.full((3,), 1.0 + i, dtype=torch.float64) for i in range(NUM_LAYERS)]
        for scale in self.scales:
            scale.requires_grad_()

    def layer(self, x: torch.Tensor, number: int, keeper: Keeper) -> torch.Tensor:
        """One layer: q, k and v are scaled copies of its input."""
        k, v = (x[:, :, ::2] * self.scales[number][i] for i in (1, 2))
        q = x * self.scales[number][0]
        slot = Slot(keeper, number)
        out = block_parallel_attention(q, k, v, self.plan, self.groups, self.options, slot)
        return x + out

    def run(self, x: torch.Tensor, keeper: Keeper, twice: bool) -> torch.Tensor:
        """The output of the stack."""
        for number in range(NUM_LAYERS):
            x = Twice.apply(x, self, number, keeper) if twice else self.layer(x, number, keeper)
        return x


class Twice(torch.autograd.Function):
    """Runs a layer without gradients, and once more in backward, as Megatron's checkpoints do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, stack: Stack, number: int, keeper: Keeper) -> Any:
        ctx.save_for_backward(x)
        ctx.rest = (stack, number, keeper)
        return stack.layer(x, number, keeper)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        stack, number, keeper = ctx.rest
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out = stack.layer(x, number, keeper)
        torch.autograd.backward(out, grads)
        return x.grad, None, None, None


@contextmanager
def recorded() -> Iterator[list[str]]:
    """Lists, in the order of their start: gathers, launches of a phase forward, and `down`, the
    launches and reductions of backward (several in a row once)."""
    seen: list[str] = []
    places: list[tuple[Any, str, str]] = [
        (CleanGather, "__init__", "gather"),
        (CleanReduce, "start", "down"),
        (NativeRun, "forward", "forward"),
        (NativeRun, "backward", "down"),
    ]

    def noted(function: Callable[..., Any], word: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if word != "down" or seen[-1:] != ["down"]:
                seen.append(word)
            return function(*args, **kwargs)

        return call

    whole = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
    for owner, name, word in places:
        setattr(owner, name, noted(getattr(owner, name), word))
    try:
        yield seen
    finally:
        for owner, name, function in whole:
            setattr(owner, name, function)


def one_step(stack: Stack, x: torch.Tensor, keeping: Keeping, twice: bool) -> list[Any]:
    """[output, gradients..., layers that still wait] of one pass up and down the stack."""
    keeper = Keeper(keeping)
    for scale in stack.scales:
        scale.grad = None
    start = x.clone().requires_grad_()
    out = stack.run(start, keeper, twice)
    out.square().sum().backward()
    return [out.detach(), start.grad, *(scale.grad for scale in stack.scales), keeper.num_kept]


def make_stack(mode: str, rank: int, groups: BlockGroups, strategy: Strategy) -> Any:
    request = MODES[mode]
    options = AttentionOptions(SIZE**-0.5, strategy=strategy, kernel="dense")
    stack = Stack(make_plan(request, rank), groups, options)
    return stack, local(sample_tensors(request, 2, seed=3)[0], request, rank)


def _worker(rank: int, world_size: int) -> dict[str, Any]:
    groups = {shards: make_groups(2, shards) for shards in (1, 2)}
    found: dict[str, Any] = {"differs": [], "order": {}}
    for mode, strategy in itertools.product(list(MODES)[1:], Strategy):
        stack, x = make_stack(mode, rank, groups[MODES[mode].num_clean_shards], strategy)
        want = one_step(stack, x, Keeping(), twice=False)
        for keeping, twice in itertools.product(KEEPINGS, (False, True)):
            with recorded() as order:
                got = one_step(stack, x, keeping, twice)
            same = all(torch.equal(a, b) for a, b in zip(got[:-1], want[:-1], strict=True))
            if not same or got[-1]:
                found["differs"].append((mode, strategy, keeping, twice))
            if strategy is Strategy.NATIVE:
                found["order"][mode, keeping, twice] = order
    return found


@cache
def results() -> list[dict[str, Any]]:
    return run_distributed(_worker, 2)


def test_no_choice_changes_a_bit_and_none_leaves_a_layer_waiting() -> None:
    assert [found["differs"] for found in results()] == [[], []]


def test_all_ranks_start_their_collectives_in_the_same_order() -> None:
    mine, other = results()
    assert mine["order"] == other["order"]


UP = ["gather", *["forward"] * 3]  # three phases


@pytest.mark.parametrize("mode", ["csbp", "window", "pure"])
@pytest.mark.parametrize(
    ("keeping", "twice", "backward"),
    [
        # Keys wait for backward.
        (Keeping(False, True), False, ["down"]),
        # Gathered again: the layer below gathers before the launches of a backward start.
        (Keeping(False, False), False, ["gather", *["gather", "down"] * 2]),
        # A second run gathers and computes, whatever the choice about keys.
        (Keeping(False, True), True, [*UP, "down"] * 3),
        (Keeping(False, False), True, [*UP, "down"] * 3),
        # Output, LSE and keys wait: the second run does nothing.
        (Keeping(True, True), True, ["down"]),
        # Output and LSE wait: the second run starts the gather for backward, and computes nothing.
        (Keeping(True, False), True, ["gather", "down"] * 3),
    ],
)
def test_gathers_and_launches_come_as_often_and_in_the_order_they_should(
    mode: str, keeping: Keeping, twice: bool, backward: list[str]
) -> None:
    order = results()[0]["order"][mode, keeping, twice]
    assert order == [*UP * NUM_LAYERS, *backward]


@pytest.mark.parametrize("corrupted_only", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_a_layer_saves_for_backward_is_what_is_predicted(
    corrupted_only: bool, dtype: torch.dtype
) -> None:
    request = PlanRequest(61, 4, num_views=2)
    plan = make_plan(request, 0)
    q, k, v = (
        local(x, request, 0).to(dtype).requires_grad_()
        for x in sample_tensors(request, 2, seed=5)[:3]
    )
    options = AttentionOptions(SIZE**-0.5, kernel="dense", corrupted_only=corrupted_only)

    def saved(keeping: Keeping) -> int:
        total = 0

        def pack(x: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total += x.numel() * x.element_size()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            slot = Slot(Keeper(keeping), 1)
            block_parallel_attention(q, k, v, plan, BlockGroups.single(), options, slot)
        return total

    shape = LayerShape(KV_HEADS, SIZE, micro_batch=2, bytes_per_element=dtype.itemsize)
    predicted = kept_bytes(plan, shape, HEADS, corrupted_only)
    inputs = sum(x.numel() * x.element_size() for x in (q, k, v))
    assert saved(Keeping(clean_kv=False)) == inputs + predicted.attention
    assert saved(Keeping()) == inputs + predicted.attention + predicted.clean_kv


@pytest.mark.parametrize("clean_kv", [False, True])
def test_what_a_first_run_leaves_is_what_is_predicted(clean_kv: bool) -> None:
    request = PlanRequest(61, 4, num_views=2)
    plan = make_plan(request, 0)
    q, k, v = (local(x, request, 0).bfloat16() for x in sample_tensors(request, 2, seed=5)[:3])
    keeper = Keeper(Keeping(attention=True, clean_kv=clean_kv))
    options = AttentionOptions(SIZE**-0.5, kernel="dense")
    with torch.no_grad():
        block_parallel_attention(q, k, v, plan, BlockGroups.single(), options, Slot(keeper, 1))
    left = keeper.take(1)
    total = sum(x.numel() * x.element_size() for x in (*left.results, *left.keys))
    predicted = kept_bytes(plan, LayerShape(KV_HEADS, SIZE, micro_batch=2), HEADS, False)
    assert total == predicted.attention + (predicted.clean_kv if clean_kv else 0)
    assert keeper.num_kept == 0


def test_activations_are_freed_with_the_graph_and_without_the_garbage_collector() -> None:
    stack, x = make_stack("single", 0, BlockGroups.single(), Strategy.NATIVE)
    gc.disable()
    try:
        keeper = Keeper(Keeping(clean_kv=False))
        out = stack.run(x.requires_grad_(), keeper, twice=False)
        nodes = list(keeper._line)
        assert len(nodes) == NUM_LAYERS
        assert all(ref() is not None for ref in nodes)
        del out
        assert [ref() for ref in nodes] == [None] * NUM_LAYERS
    finally:
        gc.enable()
