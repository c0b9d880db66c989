"""Every GPU kernel equals the dense reference, to within what its dtype costs an obvious version.

The tolerance is not a guess: it is twice the error of plain torch attention computed in the same
low precision, against fp64. What only a GPU can show: the kernels themselves.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_bp.attention import bench
from megatron_bp.attention.choose import KERNELS, choose_kernel, load_kernel
from megatron_bp.attention.contract import (
    KernelNeed,
    NativeKernel,
    Saved,
    Strategy,
    Window,
    missing,
    window_mask,
)
from megatron_bp.attention.kernels.dense import attend, attend_backward

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
GPU_KERNELS = [name for name in KERNELS if name not in ("dense", "sdpa_cpu")]
# rows, keys, window: full, square and rectangular causal, windows, small blocks, odd lengths
LAUNCHES = [
    (128, 256, Window()),
    (257, 257, Window(-1, 0)),
    (256, 1000, Window(-1, 0)),
    (320, 447, Window(127, 0)),
    (32, 64, Window(31, -1)),
    (7, 39, Window(31, -1)),
    (1, 33, Window()),
]


def need(strategy: Strategy, head_size: int, deterministic: bool = False) -> KernelNeed:
    """A bf16 layer on this device."""
    major, minor = torch.cuda.get_device_capability()
    return KernelNeed(
        strategy, "cuda", torch.bfloat16, head_size, True, deterministic, 10 * major + minor
    )


def kernel(name: str, strategy: Strategy, head_size: int, deterministic: bool = False) -> object:
    """The kernel, or a skip that says why it cannot run here."""
    try:
        found = load_kernel(name, deterministic)
    except ImportError as error:
        pytest.skip(str(error))
    reasons = missing(found.caps, need(strategy, head_size, deterministic))
    if reasons:
        pytest.skip(f"{name}: {'; '.join(reasons)}")
    return found


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fresh tensors hold NaN, so an output that is not written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def inputs(launch: tuple[int, int, Window], head_size: int, problems: int) -> list[Tensor]:
    """q, k, v, dout; keys and values are views of one packed buffer, as the layer has them."""
    rows, keys, _ = launch
    generator = torch.Generator(CUDA).manual_seed(11)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=CUDA).bfloat16()

    packed = draw(keys, problems, 2, 2, head_size)
    k, v = packed[:, :, 0].transpose(0, 1), packed[:, :, 1].transpose(0, 1)
    q, dout = (draw(problems, rows, 8, head_size) for _ in range(2))
    return [q, k, v, dout]


def eager(x: list[Tensor], mask: Tensor, scale: float, extra: Tensor) -> list[Tensor]:
    """Plain attention in the dtype of x; `extra` is the LSE of keys that another launch has."""
    q, k, v, dout = x
    out, lse = attend(q, k, v, mask, scale)
    weight = torch.exp(lse - torch.logaddexp(lse, extra)).transpose(1, 2)[..., None]
    merged = (out.to(weight.dtype) * weight).to(out.dtype)
    saved = Saved(q, k, v, merged, torch.logaddexp(lse, extra))
    return [out, lse, *attend_backward(dout, saved, mask, scale)]


def low_precision(x: list[Tensor], mask: Tensor, scale: float, extra: Tensor) -> list[Tensor]:
    """Autograd through bf16 matmuls: what the dtype costs an obvious implementation."""
    q, k, v, dout = x
    repeat = q.shape[2] // k.shape[2]
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    qh, kh, vh = (t.transpose(1, 2) for t in leaves)
    kh, vh = kh.repeat_interleave(repeat, 1), vh.repeat_interleave(repeat, 1)
    scores = (qh @ kh.mT * scale).masked_fill(~mask, float("-inf"))
    lse = torch.logsumexp(scores.float(), -1)
    total = torch.logaddexp(lse, extra)
    merged = torch.exp(scores.float() - total[..., None]).bfloat16() @ vh
    plain = (torch.exp(scores.float() - lse[..., None]).bfloat16() @ vh).transpose(1, 2)
    grads = torch.autograd.grad(merged.transpose(1, 2), leaves, dout)
    return [plain.detach(), lse.detach(), *grads]


def error(got: Tensor, want: Tensor) -> float:
    """Relative L2 error; NaN if anything is NaN."""
    return float((got.double() - want).norm() / want.norm().clamp(min=1e-30))


@pytest.mark.parametrize("head_size", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
@pytest.mark.parametrize("name", GPU_KERNELS)
def test_a_launch_equals_the_reference(
    name: str, launch: tuple[int, int, Window], head_size: int
) -> None:
    found = kernel(name, Strategy.NATIVE, head_size)
    assert isinstance(found, NativeKernel)
    scale, window = head_size**-0.5, launch[2]
    x = inputs(launch, head_size, problems=3)
    mask = window_mask(launch[0], launch[1], window, CUDA)
    exact_x = [t.double() for t in x]
    extra = torch.randn(3, 8, launch[0], device=CUDA, dtype=torch.float64)
    want = eager(exact_x, mask, scale, extra)
    rough = low_precision(x, mask, scale, extra.float())
    out, lse = found.forward(*x[:3], window, scale)
    merged_lse = torch.logaddexp(lse.double(), extra)
    weight = torch.exp(lse.double() - merged_lse).transpose(1, 2)[..., None]
    saved = Saved(*x[:3], (out.double() * weight).bfloat16(), merged_lse.float())
    got = [out, lse, *found.backward(x[3], saved, window, scale)]
    for label, mine, obvious, right in zip(
        ("out", "lse", "dq", "dk", "dv"), got, rough, want, strict=True
    ):
        assert mine.shape == right.shape, label
        limit = 2 * error(obvious, right) + 1e-4
        assert error(mine, right) <= limit, (label, error(mine, right), limit)


CASES = {
    "nemotron": bench.Case(bench.SHAPES["nemotron-8b"], 2048, 2, 1),
    "views": bench.Case(bench.SHAPES["nemotron-8b"], 1024, 2, 0, num_views=2),
    "window": bench.Case(bench.SHAPES["nemotron-window"], 4096, 2, 1),
    "ragged": bench.Case(bench.SHAPES["nemotron-8b"], 1013, 3, 2),
    "wide": bench.Case(bench.SHAPES["qwen3.5-27b"], 1024, 2, 1),
    "sliding": bench.Case(bench.SHAPES["diffusiongemma-sliding"], 4096, 2, 1),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("strategy", Strategy)
@pytest.mark.parametrize("name", GPU_KERNELS)
def test_a_layer_equals_the_reference(name: str, strategy: Strategy, case: str) -> None:
    shape = CASES[case].shape
    kernel(name, strategy, shape.head_size)
    layer = bench.Layer(CASES[case], strategy, name)
    found = bench.errors(layer, CUDA, torch.bfloat16)
    # A few bf16 roundings (2^-9 each) of inputs, partial results and sums.
    assert max(found.values()) < 6e-3, found


@pytest.mark.parametrize("name", [n for n in GPU_KERNELS if n != "flex"])
def test_deterministic_mode_repeats_its_bits(name: str) -> None:
    head_size = 128
    kernel(name, Strategy.NATIVE, head_size, deterministic=True)
    for case in ("nemotron", "views", "window"):
        layer = replace(bench.Layer(CASES[case], Strategy.NATIVE, name), deterministic=True)
        x = bench.random_inputs(CASES[case], CUDA, torch.bfloat16)
        partial = layer.forward(x)
        first = layer.backward(x, partial)
        for _ in range(100):
            again = layer.forward(x)
            assert torch.equal(again.out, partial.out)
            assert torch.equal(again.lse, partial.lse)
            grads = layer.backward(x, partial)
            assert torch.equal(grads[0], first[0])
            assert torch.equal(grads[1], first[1])
            assert torch.equal(grads[2].k, first[2].k)
            assert torch.equal(grads[2].v, first[2].v)


def test_auto_chooses_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    choose_kernel.cache_clear()
    with caplog.at_level("INFO"):
        chosen = choose_kernel("auto", need(Strategy.NATIVE, 128))
    assert chosen.name in caplog.text


def test_a_head_size_that_no_kernel_has_is_refused_with_reasons() -> None:
    with pytest.raises(ValueError, match="head sizes up to 256 in multiples of 8, not 512"):
        choose_kernel("auto", need(Strategy.NATIVE, 512))


def test_nothing_waits_for_the_device() -> None:
    name = choose_kernel("auto", need(Strategy.NATIVE, 128)).name
    layer = bench.Layer(CASES["nemotron"], Strategy.NATIVE, name)
    x = bench.random_inputs(CASES["nemotron"], CUDA, torch.bfloat16)
    layer.backward(x, layer.forward(x))
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer.backward(x, layer.forward(x))
    finally:
        torch.cuda.set_sync_debug_mode("default")
