"""The Triton passes, compiled: the same cases as in the interpreter."""

import pytest
import torch

from megatron_bp.attention import bench
from megatron_bp.attention.contract import Strategy
from tests.attention.test_passes import check_all


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_triton_passes_equal_their_formulas() -> None:
    check_all("cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [0, 70])
def test_float64_is_not_rounded_to_float32(window: int) -> None:
    case = bench.Case(bench.Shape(8, 2, 64, window=window), 512, 2, 1, num_views=2)
    layer = bench.Layer(case, Strategy.NATIVE, "dense")
    found = bench.errors(layer, torch.device("cuda"), torch.float64)
    assert max(found.values()) < 1e-13, found
