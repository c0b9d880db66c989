"""A backward pass whose launches share accumulators equals plain attention in fp64.

What only a GPU can show: FlashAttention 4's kernels on buffers that are not theirs alone.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_bp.attention import bench
from megatron_bp.attention.choose import load_kernel
from megatron_bp.attention.contract import Strategy
from megatron_bp.attention.problems import KeyValue

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
# shape, L, P, rank, views: squares and both slabs, two views, a ragged end, one rank, windows
CASES = [
    ("nemotron-8b", 4096, 8, 3, 1),
    ("nemotron-8b", 4096, 8, 3, 2),
    ("nemotron-8b", 4000, 4, 2, 1),
    ("nemotron-8b", 2048, 1, 0, 1),
    ("qwen3.5-27b", 4096, 8, 3, 1),
    ("nemotron-window", 4096, 2, 1, 1),
    ("diffusiongemma-sliding", 4096, 2, 1, 1),
]
BF16 = 5e-3
"""Twice what rounding inputs, probabilities and results to bf16 costs (2.2e-3 .. 2.9e-3)."""


def flash4() -> None:
    """Skips without FlashAttention 4 and a GPU that it runs on."""
    try:
        caps = load_kernel("flash4").caps
    except ImportError as error:
        pytest.skip(str(error))
    major, minor = torch.cuda.get_device_capability()
    if not caps.min_arch <= 10 * major + minor <= caps.max_arch:
        pytest.skip(f"flash4 runs on compute capability {caps.min_arch} to {caps.max_arch}")


def results(layer: bench.Layer, x: bench.Inputs) -> list[Tensor]:
    """Output, dq, packed clean-key gradients, own-key gradients."""
    partial = layer.forward(x)
    dq, packed, own = layer.backward(x, partial)
    return [partial.out, dq, packed, *own]


@pytest.mark.parametrize("long", [0, 8192])
@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("case", CASES, ids=lambda x: f"{x[0]}-{x[1]}-{x[2]}-{x[4]}")
def test_a_layer_equals_plain_attention_in_fp64(
    case: tuple[str, int, int, int, int],
    samples: int,
    long: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With `long` 0 every unmasked launch has the taller tile, and so rows of its own."""
    flash4()
    from megatron_bp.attention import flash4_sums

    monkeypatch.setattr(flash4_sums, "LONG", long)
    shape, length, num_ranks, rank, views = case
    layer = bench.Layer(
        bench.Case(bench.SHAPES[shape], length, num_ranks, rank, num_views=views),
        Strategy.NATIVE,
        "flash4",
    )
    x = bench.random_inputs(layer.case, CUDA, torch.bfloat16, samples)
    own = KeyValue(x.own.k.double(), x.own.v.double())
    wide = bench.Inputs(x.q.double(), x.dout.double(), x.packed.double(), own)
    exact = results(replace(layer, kernel="dense"), wide)
    for got, want in zip(results(layer, x), exact, strict=True):
        error = float((got.double() - want).norm() / want.norm())
        assert error < BF16, error  # a NaN fails too
