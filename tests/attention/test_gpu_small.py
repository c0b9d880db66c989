"""The small-problem kernel, compiled, in bf16: the same cases as in the interpreter."""

import pytest
import torch

from tests.attention.test_small import CASES, MODES, check


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", CASES)
def test_small_problems_equal_the_dense_kernel(case: tuple) -> None:
    for mode in MODES:
        # a few bf16 roundings of numbers up to about 4
        check(case, mode, "cuda", torch.bfloat16, 4e-2)
