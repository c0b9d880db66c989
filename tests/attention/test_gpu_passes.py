"""The Triton passes, compiled: the same cases as in the interpreter."""

import pytest
import torch

from tests.attention.test_passes import check_all


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_triton_passes_equal_their_formulas() -> None:
    check_all("cuda")
