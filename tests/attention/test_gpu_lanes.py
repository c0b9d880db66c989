"""Launches that run two at a time give the bits of launches one after another."""

import pytest
import torch

from megatron_bp.attention import bench, native
from megatron_bp.attention.bench import SHAPES, Case, Layer, random_inputs
from megatron_bp.attention.contract import Strategy
from megatron_bp.attention.lanes import InARow
from tests.attention.test_gpu_kernels import kernel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def results(layer: Layer) -> list[torch.Tensor]:
    """Output, LSE and all gradients."""
    x = random_inputs(layer.case, torch.device("cuda"), torch.bfloat16)
    partial = layer.forward(x)
    dq, packed, own = layer.backward(x, partial)
    return [*partial, dq, packed, *own]


@pytest.mark.parametrize("name", ["flash4", "te", "sdpa"])
@pytest.mark.parametrize("shape", ["nemotron-window", "diffusiongemma-sliding"])
def test_lanes_keep_every_bit(name: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    repeats = name != "sdpa" and shape == "nemotron-window"  # its backward repeats its bits
    kernel(name, Strategy.NATIVE, SHAPES[shape].head_size, repeats)
    layer = Layer(Case(SHAPES[shape], 16384, 4, 1), Strategy.NATIVE, name, repeats)
    beside = [results(layer) for _ in range(5)]
    for module in (native, bench):
        monkeypatch.setattr(module, "queue_on", lambda *_: InARow())
    alone = results(layer)
    for run in beside:
        for got, want in zip(run[: None if repeats else 2], alone, strict=False):
            assert torch.equal(got, want)
        for got, want in zip(run, alone, strict=True):
            assert (got.float() - want.float()).norm() <= 1e-2 * want.float().norm()
