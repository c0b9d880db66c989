"""FlashAttention 4's forward without its entry point gives the bits that it gives with it.

What only a GPU can show: that the kernel found is the one, called with what it takes.
"""

import pytest
import torch
from torch import Tensor

from megatron_bp.attention.contract import Window
from tests.attention.test_gpu_shared import flash4

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# problems, rows, keys, heads, key/value heads, head size, window
CASES = [
    (2, 300, 300, 8, 2, 128, Window(-1, 0)),
    (1, 256, 9000, 8, 2, 128, Window()),  # the wider tile
    (3, 100, 700, 6, 1, 256, Window()),
    (2, 128, 400, 4, 4, 64, Window(100, 0)),
    (2, 128, 400, 4, 2, 256, Window(100, -1)),
]


def entry(x: tuple[Tensor, Tensor, Tensor], scale: float, options: dict) -> tuple[Tensor, Tensor]:
    """The package's public result."""
    from flash_attn.cute.interface import _flash_attn_fwd

    return _flash_attn_fwd(*x, softmax_scale=scale, return_lse=True, **options)[:2]


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_every_call_of_a_kind_equals_the_entry_point_bit_for_bit(case: tuple, ragged: bool) -> None:
    flash4()
    from megatron_bp.attention.kernels import flash4 as module

    problems, rows, keys, heads, kv_heads, size, window = case
    if ragged and window != Window():
        pytest.skip("problems that end apart are unmasked")
    kernel, scale = module.Flash4Kernel(), size**-0.5
    draw = torch.Generator("cuda").manual_seed(3)
    lengths = torch.arange(problems, dtype=torch.int32, device="cuda") * 37 + keys // 2
    for _ in range(3):  # found at the first, called without the entry point then
        q = torch.randn(problems, rows, heads, size, generator=draw, device="cuda").bfloat16()
        kv = torch.randn(1, keys, 2, kv_heads, size, generator=draw, device="cuda").bfloat16()
        k, v = (kv[:, :, i].expand(problems, -1, -1, -1) for i in range(2))
        options = module._forward_options(q, k, window)
        if ragged:
            got = kernel.forward_ragged(q, kv[0, :, 0], kv[0, :, 1], lengths, scale)
            options["seqused_k"] = lengths
        else:
            got = kernel.forward(q, k, v, window, scale)
        for a, b in zip(got, entry((q, k, v), scale, options), strict=True):
            assert torch.equal(a, b)
