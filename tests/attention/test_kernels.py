"""Every kernel that runs on CPU keeps the contract: values, LSE, gradients, windows, empty rows.

The oracle is plain autograd in fp64 on a boolean mask. Kernels of a GPU are held to the same
contract by test_gpu_kernels.py.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_bp.attention.choose import AUTO, load_kernel
from megatron_bp.attention.contract import (
    IntervalKernel,
    IntervalMask,
    KernelNeed,
    NativeKernel,
    Saved,
    Strategy,
    Window,
    lse_dtype,
    missing,
)
from megatron_bp.attention.merge import merge

SCALE = 0.3
WINDOWS = [
    Window(),
    Window(-1, 0),
    Window(0, 0),
    Window(3, 0),
    Window(2, 2),
    Window(-1, 2),
    Window(1, -1),
]
SHAPES = [(1, 6, 6), (2, 4, 9), (2, 9, 4), (1, 1, 7), (3, 5, 1)]  # problems, rows, keys
NAMES = AUTO["cpu"]


def native(name: str, dtype: torch.dtype = torch.float64, window: Window = Window()) -> Any:  # noqa: B008
    """The kernel called `name`, if it serves native launches of `dtype`; else a skip."""
    return serving(name, Strategy.NATIVE, dtype, window.left >= 0)


def serving(name: str, strategy: Strategy, dtype: torch.dtype, window: bool) -> Any:
    """The kernel called `name`, or a skip with its reasons."""
    try:
        kernel = load_kernel(name)
    except ImportError as error:
        pytest.skip(str(error))
    reasons = missing(kernel.caps, KernelNeed(strategy, "cpu", dtype, 8, window))
    if reasons:
        pytest.skip("; ".join(reasons))
    return kernel


def tensors(z: int, rows: int, keys: int, seed: int = 0) -> list[Tensor]:
    """q, k, v, dout in fp64 with two query heads for each of two key/value heads."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(z, n, heads, 8, generator=generator, dtype=torch.float64)
        for n, heads in ((rows, 4), (keys, 2), (keys, 2), (rows, 4))
    ]


def window_matrix(rows: int, keys: int, window: Window) -> Tensor:
    """The window by its definition, one pair at a time."""
    allowed = torch.zeros(rows, keys, dtype=torch.bool)
    for a in range(rows):
        for c in range(keys):
            at = a + keys - rows
            left = window.left < 0 or c >= at - window.left
            right = window.right < 0 or c <= at + window.right
            allowed[a, c] = left and right
    return allowed


def oracle(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, allowed: Tensor) -> list[Tensor]:
    """out, lse, dq, dk, dv by autograd in fp64."""
    q, k, v = (x.double().detach().requires_grad_() for x in (q, k, v))
    repeat = q.shape[2] // k.shape[2]
    scores = SCALE * torch.einsum("zanh,zcnh->znac", q, k.repeat_interleave(repeat, 2))
    lse = scores.masked_fill(~allowed, -math.inf).logsumexp(-1)
    weights = (scores - scores.amax(-1, keepdim=True)).exp() * allowed
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)
    out = torch.einsum("znac,zcnh->zanh", weights, v.repeat_interleave(repeat, 2))
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), dout.double())]


def close(got: Tensor, want: Tensor) -> None:
    """Equal to fp64 rounding of sums over a handful of keys."""
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("window", WINDOWS, ids=lambda w: f"left{w.left}_right{w.right}")
def test_native_launches_equal_autograd(name: str, window: Window) -> None:
    kernel = native(name, window=window)
    for z, rows, keys in SHAPES:
        q, k, v, dout = tensors(z, rows, keys)
        want = oracle(q, k, v, dout, window_matrix(rows, keys, window))
        out, lse = kernel.forward(q, k, v, window, SCALE)
        close(out, want[0])
        close(lse, want[1])
        for got, grad in zip(
            kernel.backward(dout, Saved(q, k, v, out, lse), window, SCALE), want[2:], strict=True
        ):
            close(got, grad)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("window", "rows", "keys", "seen"),
    [
        (Window(-1, 0), 2, 4, [[0, 1, 2], [0, 1, 2, 3]]),
        (Window(-1, 0), 4, 2, [[], [], [0], [0, 1]]),
        (Window(1, 0), 2, 4, [[1, 2], [2, 3]]),
        (Window(1, 1), 3, 3, [[0, 1], [0, 1, 2], [1, 2]]),
        (Window(0, 1), 2, 3, [[1, 2], [2]]),
        (Window(), 2, 2, [[0, 1], [0, 1]]),
    ],
)
def test_windows_are_aligned_at_the_bottom_right(
    name: str, window: Window, rows: int, keys: int, seen: list[list[int]]
) -> None:
    """Zero queries weigh all visible keys equally, so one-hot values show who was seen."""
    kernel = native(name, window=window)
    q, k = torch.zeros(1, rows, 1, 8).double(), torch.zeros(1, keys, 1, 8).double()
    v = torch.eye(keys, 8, dtype=torch.float64)[None, :, None]
    out, lse = kernel.forward(q, k, v, window, SCALE)
    for row, want in enumerate(seen):
        assert out[0, row, 0].nonzero().ravel().tolist() == want
        assert lse[0, 0, row].exp().item() == pytest.approx(len(want))  # a natural logarithm


@pytest.mark.parametrize("name", NAMES)
def test_rows_without_keys_give_zero_minus_infinity_and_no_gradient(name: str) -> None:
    kernel, window = native(name), Window(-1, 0)
    q, k, v, dout = tensors(2, 6, 2)
    out, lse = kernel.forward(q, k, v, window, SCALE)
    assert (out[:, :4] == 0).all()
    assert torch.isneginf(lse[:, :, :4]).all()
    assert torch.isfinite(lse[:, :, 4:]).all()
    dq, dk, dv = kernel.backward(dout, Saved(q, k, v, out, lse), window, SCALE)
    assert (dq[:, :4] == 0).all()
    assert all(torch.isfinite(x).all() for x in (dq, dk, dv))
    dout[:, :4] = 1e9
    for a, b in zip(
        (dk, dv),
        kernel.backward(dout, Saved(q, k, v, out, lse), window, SCALE)[1:],
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cut", [1, 4, 8])
@pytest.mark.parametrize("causal", [False, True])
def test_backwards_of_two_key_parts_with_the_merged_lse_add_up(
    name: str, cut: int, causal: bool
) -> None:
    kernel = native(name)
    q, k, v, dout = tensors(2, 5, 9)
    whole = Window(-1, 0 if causal else -1)
    # Of the first `cut` keys a causal row sees as many more as lie beyond the cut.
    first = Window(-1, 9 - cut) if causal else whole
    halves = [(slice(0, cut), first), (slice(cut, 9), whole)]
    parts = [kernel.forward(q, k[:, s], v[:, s], w, SCALE) for s, w in halves]
    (out_a, lse_a), (out_b, lse_b) = ((out.transpose(1, 2), lse) for out, lse in parts)
    out, lse = merge(out_a, lse_a, out_b, lse_b)
    out = out.transpose(1, 2)
    want = oracle(q, k, v, dout, window_matrix(5, 9, whole))
    close(out, want[0])
    close(lse, want[1])
    grads = [
        kernel.backward(dout, Saved(q, k[:, s], v[:, s], out, lse), w, SCALE) for s, w in halves
    ]
    close(grads[0][0] + grads[1][0], want[2])
    close(torch.cat([grads[0][1], grads[1][1]], 1), want[3])
    close(torch.cat([grads[0][2], grads[1][2]], 1), want[4])


def interval_mask() -> IntervalMask:
    """Rows with a prefix, a window, an own block, two intervals, and nothing; one padding key."""

    def column(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return IntervalMask(
        clean_lo=column(0, 2, 0, 1, 0),
        clean_hi=column(4, 3, 0, 4, 0),
        own_lo=column(0, 0, 6, 8, 0),
        own_hi=column(0, 0, 8, 9, 0),
        key_name=column(3, 0, -1, 1, 2, 6, 7, -1, 8),
        num_clean=5,
    )


INTERVAL_KEYS = [[0, 1, 3, 4], [4], [5, 6], [0, 3, 4, 8], []]  # seen key columns of each row


@pytest.mark.parametrize("name", NAMES)
def test_interval_launches_equal_autograd(name: str) -> None:
    kernel = serving(name, Strategy.INTERVAL, torch.float64, False)
    mask = interval_mask()
    allowed = torch.zeros(5, 9, dtype=torch.bool)
    for row, keys in enumerate(INTERVAL_KEYS):
        allowed[row, keys] = True
    assert torch.equal(mask.dense(), allowed)
    q, k, v, dout = tensors(2, 5, 9)
    want = oracle(q, k, v, dout, allowed)
    out, lse = kernel.forward_interval(q, k, v, mask, SCALE)
    close(out, want[0])
    close(lse, want[1])
    grads = kernel.backward_interval(dout, Saved(q, k, v, out, lse), mask, SCALE)
    for got, grad in zip(grads, want[2:], strict=True):
        close(got, grad)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_costs_no_more_than_rounding_the_exact_result(
    name: str, dtype: torch.dtype
) -> None:
    """The exact result of the rounded inputs, itself rounded once, sets the scale of the error."""
    kernel, window = native(name, dtype), Window(-1, 0)
    q, k, v, dout = (x.to(dtype) for x in tensors(2, 12, 20))
    want = oracle(q, k, v, dout, window_matrix(12, 20, window))
    out, lse = kernel.forward(q, k, v, window, SCALE)
    assert out.dtype == dtype
    assert lse.dtype == lse_dtype(dtype) == torch.float32
    torch.testing.assert_close(lse.double(), want[1], rtol=1e-5, atol=1e-5)
    grads = kernel.backward(dout, Saved(q, k, v, out, lse), window, SCALE)
    for got, exact in zip((out, *grads), (want[0], *want[2:]), strict=True):
        error = (got.double() - exact).abs().max() / exact.abs().max()
        assert error <= 4 * torch.finfo(dtype).eps  # rounded out enters the gradients too


@pytest.mark.parametrize("name", NAMES)
def test_the_same_launch_gives_the_same_bits(name: str) -> None:
    kernel, window = native(name), Window(3, 0)
    q, k, v, dout = tensors(2, 7, 9)
    once, again = (kernel.forward(q, k, v, window, SCALE) for _ in range(2))
    assert torch.equal(once[0], again[0])
    assert torch.equal(once[1], again[1])
    first, second = (kernel.backward(dout, Saved(q, k, v, *once), window, SCALE) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_has_the_forms_that_it_claims(name: str) -> None:
    kernel = load_kernel(name)
    assert kernel.name == name
    assert kernel.caps.strategies
    if Strategy.NATIVE in kernel.caps.strategies:
        assert isinstance(kernel, NativeKernel)
    if Strategy.INTERVAL in kernel.caps.strategies:
        assert isinstance(kernel, IntervalKernel)
