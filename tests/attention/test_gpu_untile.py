"""The compiled kernels of untile.py, and its orders against FlashAttention 4's own postprocess."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from megatron_bp.attention.choose import load_kernel
from megatron_bp.attention.schedule import Runs
from megatron_bp.attention.untile import Order, RowSums, Tiled, write_rows
from tests.attention import test_triton_untile as cpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_compiled_kernels_equal_sums_in_rows() -> None:
    cpu.check_all("cuda")


def orders(size: int) -> Iterator[Order]:
    """What flash4_sums.py takes for a head size: usual rows, tall rows, keys."""
    from megatron_bp.attention import flash4_sums

    yield from (flash4_sums._row_order(size, tall) for tall in (False, True))
    yield flash4_sums._key_order(size)


@pytest.mark.parametrize("size", sorted(cpu.ORDERS))
def test_rows_are_those_of_the_packages_postprocess_bit_by_bit(size: int) -> None:
    try:
        load_kernel("flash4")
    except ImportError as error:
        pytest.skip(str(error))
    from megatron_bp.attention import flash4_sums

    assert tuple(orders(size)) == cpu.ORDERS[size]
    for order in orders(size):
        rows, heads, samples = 5 * order.rows - 7, 3, 2
        shape = (samples, heads, 5 * order.rows * size)
        sums = torch.randn(shape, generator=torch.Generator().manual_seed(1)).cuda()
        want = torch.zeros(samples, rows, heads, size, dtype=torch.bfloat16, device="cuda")
        flash4_sums._round(sums, want, 0.375, order)
        got = torch.zeros_like(want).transpose(0, 1)
        runs = Runs(np.zeros(1, dtype=np.int64), rows, True, (np.zeros(1, dtype=np.int64),))
        write_rows(got, [RowSums(Tiled(sums, order), runs, joined=False)], 0.375)
        assert torch.equal(got.transpose(0, 1), want), order
